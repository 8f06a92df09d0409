/* Changes of a model after something has begun to depend on it: an optimiser, a pipeline, a cache,
 * quantised weights, a tape, gradients that wait. All ordered pairs of what a program may do to a
 * model: the second one either is refused in one sentence, and has changed nothing, or gives what
 * it gives if it comes first. */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../support/files.h"

enum { VOCABULARY = 8, WIDTH = 32, LENGTH = 4, STEPS = 2 };

typedef enum act {
    NOTHING,
    OPTIM,      /* Adam for the whole model */
    OPTIM_HALF, /* SGD with moments of bf16, for the head */
    PIPELINE,
    CACHE,
    QUANTISE, /* the layers of the MLPs */
    RECORD,   /* a forward, whose backward comes later */
    REDO,     /* the same with a block that is a checkpoint */
    DEFER,    /* a backward, whose gradients wait for tsh_sync_grads */
    TIE_HEAD, /* to the embedding */
    TIE_KEYS, /* the keys of block 1 to those of block 0 */
    TIE_MLP,  /* a layer of the MLP of block 1 to that of block 0 */
    HALF,     /* tsh_to bf16 */
    PLAN_KEYS, /* keys and values that are not cut any more, nor the queries with them */
    PLAN_MLP,
    PREPARE, /* a PREPARE rule of what the pipeline deals to its stages */
    RESET,
    LOAD,
    INITIALISE, /* the embedding */
    ADD_NORM,
    ADD_ATTENTION,
    ADD_PARAM,
    FREEZE, /* the head */
    EVALUATE,
    FREE_OPTIM,
    FREE_CACHE,
    ACTS
} act;

typedef struct model {
    tsh_ctx *ctx;
    tsh_module *root, *h, *head;
    tsh_tensor *ids, *targets; /* (1, LENGTH) */
    tsh_optim *optim[2];
    int optims;
    tsh_pipeline *pipeline;
    tsh_cache *cache;
    tsh_tensor *loss; /* recorded */
} model;

/* What a model computes in the end. */
typedef struct outcome {
    double loss[STEPS + 1]; /* before and in training */
    uint64_t logits, weights; /* hashes */
} outcome;

typedef struct attempted {
    act first, second;
    const char *file;
    int refused;                    /* the second act was */
    tsh_result code;                /* and why */
    char message[TSH_MESSAGE_SIZE];
    int ended;                      /* the world has failed by that, on several ranks */
    uint64_t gradient; /* hash of that which was recorded or waited for the end */
    outcome out;
} attempted;

/* -------------------------------------------------------------------- the model */

static void add_block(tsh_module *h, const char *name) {
    tsh_attention_layer_desc attention = {.dim = WIDTH, .heads = 2};
    const tsh_mlp_desc mlp = {.dim = WIDTH, .hidden = 2 * WIDTH};
    tsh_module *block = tsh_add_module(h, name, NULL);
    attention.attention.causal = 1;
    (void)tsh_add_attention(block, "attn", &attention);
    (void)tsh_add_mlp(block, "mlp", &mlp);
}

static void build(model *m, tsh_ctx *ctx) {
    const tsh_embedding_desc wte = {.count = VOCABULARY, .dim = WIDTH};
    const tsh_classifier_desc head = {.in = WIDTH, .classes = VOCABULARY, .bias = TSH_NO};
    const int32_t ids[LENGTH] = {3, 1, 7, 2}, targets[LENGTH] = {1, 7, 2, 0};
    memset(m, 0, sizeof *m);
    m->ctx = ctx;
    m->root = tsh_root(ctx);
    (void)tsh_add_embedding(m->root, "wte", &wte);
    m->h = tsh_add_module(m->root, "h", NULL);
    add_block(m->h, "0");
    add_block(m->h, "1");
    m->head = tsh_add_classifier(m->root, "head", &head);
    m->ids = tsh_tensor_from(ctx, TSH_I32, tsh_shape2(1, LENGTH), tsh_replicated(), ids);
    m->targets = tsh_tensor_from(ctx, TSH_I32, tsh_shape2(1, LENGTH), tsh_replicated(), targets);
}

static tsh_tensor *embed(tsh_ctx *ctx, int k, void *user) {
    const model *m = (const model *)user;
    (void)ctx, (void)k;
    return tsh_forward(tsh_find(m->root, "wte"), m->ids);
}

static tsh_tensor *loss_of(tsh_ctx *ctx, tsh_tensor *y, int k, void *user) {
    const model *m = (const model *)user;
    (void)ctx, (void)k;
    return tsh_cross_entropy(tsh_forward(m->head, y), m->targets, NULL);
}

static tsh_tensor *forward(model *m) {
    return loss_of(m->ctx, tsh_forward(m->h, embed(m->ctx, 0, m)), 0, m);
}

/* ------------------------------------------------------------------------- acts */

static void tie(const model *m, const char *path, const char *source) {
    (void)tsh_tie(m->root, path, tsh_param(m->root, source));
}

static void shard(const model *m, const char *path) {
    const tsh_plan_rule rule = {.path = path, .style = TSH_PLAIN};
    (void)tsh_parallelize(m->root, &rule, 1);
}

static void refer(model *m, act what) {
    const tsh_optim_desc adam = {.kind = TSH_ADAM, .lr = 0.01};
    const tsh_optim_desc half = {.momentum = 0.5, .lr = 0.01, .moments_dtype = TSH_BF16};
    const tsh_pipeline_desc pipeline = {.micro_batches = 1, .input = embed, .loss = loss_of,
                                        .user = m};
    const tsh_backward_desc defer = {.defer = 1};
    if (what == OPTIM) m->optim[m->optims++] = tsh_optim_new(m->root, &adam);
    if (what == OPTIM_HALF) m->optim[m->optims++] = tsh_optim_new(m->head, &half);
    if (what == PIPELINE) m->pipeline = tsh_pipeline_new(m->h, &pipeline);
    if (what == CACHE) {
        tsh_cache *cache = tsh_cache_new(m->h, 1, 2 * LENGTH, TSH_DTYPE_DEFAULT);
        if (cache) m->cache = cache;
    }
    if (what == REDO) tsh_checkpoint(tsh_child(m->h, 0), 1);
    if (what == RECORD || what == REDO) m->loss = forward(m);
    if (what == DEFER) (void)tsh_backward_with(m->ctx, forward(m), &defer);
    if (what == DEFER) m->loss = NULL; /* its graph was consumed, too */
    if (what == FREE_OPTIM && m->optims) tsh_optim_free(m->optim[--m->optims]);
    if (what == FREE_CACHE) tsh_cache_free(m->cache);
    if (what == FREE_CACHE) m->cache = NULL;
}

static void change(model *m, act what, const char *file) {
    const tsh_layout whole = tsh_replicated();
    const tsh_plan_rule prepare = {.path = "h", .style = TSH_PREPARE_OUTPUT, .output = &whole};
    const tsh_layer_norm_desc norm = {.dim = WIDTH};
    const tsh_attention_layer_desc attention = {.dim = WIDTH, .heads = 2};
    if (what == QUANTISE) (void)tsh_quantize(m->root, "**.mlp.*", TSH_Q8_0);
    if (what == TIE_HEAD) tie(m, "head.weight", "wte.weight");
    if (what == TIE_KEYS) tie(m, "h.1.attn.k_proj.weight", "h.0.attn.k_proj.weight");
    if (what == TIE_MLP) tie(m, "h.1.mlp.up_proj.weight", "h.0.mlp.up_proj.weight");
    if (what == HALF) (void)tsh_to(m->root, TSH_BF16);
    if (what == PLAN_KEYS) shard(m, "h.*.attn.[qkvo]_proj");
    if (what == PLAN_MLP) shard(m, "h.*.mlp.*");
    if (what == PREPARE) (void)tsh_parallelize(m->root, &prepare, 1);
    if (what == RESET) (void)tsh_reset_parameters(m->root);
    if (what == LOAD) (void)tsh_load(m->root, file, NULL);
    if (what == INITIALISE) (void)tsh_init_ones(tsh_param(m->root, "wte.weight"), NULL);
    if (what == ADD_NORM) (void)tsh_add_layer_norm(m->h, "norm", &norm);
    if (what == ADD_ATTENTION) (void)tsh_add_attention(m->h, "more", &attention);
    if (what == ADD_PARAM) (void)tsh_add_param(m->root, "scale", tsh_shape1(1), NULL);
    if (what == FREEZE) (void)tsh_requires_grad(tsh_param(m->root, "head.weight"), 0);
    if (what == EVALUATE) tsh_train(m->root, 0);
}

static void perform(model *m, act what, const char *file) {
    refer(m, what);
    change(m, what, file);
}

/* --------------------------------------------------------------------- the attempted */

static void add_hash(const char *path, tsh_tensor *param, void *user) {
    (void)path;
    *(uint64_t *)user = *(uint64_t *)user * 31 + tsh_hash(tsh_ctx_of(param), param);
}

/* Ends what was begun, a tape or gradients that wait; returns the hash of one of the gradients. */
static uint64_t conclude(model *m) {
    tsh_tensor *wte = tsh_param(m->root, "wte.weight"), *grad;
    uint64_t hash;
    if (m->loss) (void)tsh_backward(m->ctx, m->loss);
    (void)tsh_sync_grads(m->ctx);
    grad = tsh_grad(wte);
    hash = grad ? tsh_hash(m->ctx, grad) : 0;
    tsh_zero_grads(m->root);
    (void)tsh_step_end(m->ctx);
    return hash;
}

/* Uses the model, with its cache, if it has one; which then is freed. */
static void infer(model *m, outcome *out) {
    tsh_ctx *ctx = m->ctx;
    tsh_tensor *logits = NULL;
    tsh_no_grad_begin(ctx);
    if (tsh_pp(ctx)->size == 1)
        logits = tsh_forward(m->head, tsh_forward(m->h, embed(ctx, 0, m)));
    else if (m->pipeline)
        (void)tsh_pipeline_evaluate(m->pipeline, 0, &out->loss[STEPS]);
    out->logits = logits ? tsh_hash(ctx, logits) : 0;
    (void)tsh_step_end(ctx);
    tsh_no_grad_end(ctx);
    tsh_cache_free(m->cache);
}

static void train(model *m, outcome *out) {
    for (int step = 0; step < STEPS; step++) {
        tsh_tensor *loss = m->pipeline ? NULL : forward(m);
        if (m->pipeline) (void)tsh_pipeline_train(m->pipeline, &out->loss[step]);
        if (loss) (void)tsh_backward(m->ctx, loss);
        if (loss) out->loss[step] = tsh_item(m->ctx, loss);
        for (int i = 0; i < m->optims; i++)
            if (m->optim[i]) (void)tsh_optim_step(m->optim[i]);
        tsh_zero_grads(m->root);
        (void)tsh_step_end(m->ctx);
    }
    tsh_each_param(m->root, add_hash, &out->weights);
}

static int attempt(tsh_ctx *ctx, void *user) {
    attempted *all = (attempted *)user, mine = *all;
    model m;
    tsh_error world;
    build(&m, ctx);
    perform(&m, mine.first, mine.file);
    CHECK(tsh_ok(ctx), "the first, %d, is done", (int)mine.first);
    (void)tsh_barrier(tsh_world(ctx)); /* all are here before one fails */
    perform(&m, mine.second, mine.file);
    mine.refused = tsh_last_error(ctx)->code != TSH_OK;
    mine.code = tsh_last_error(ctx)->code;
    (void)snprintf(mine.message, sizeof mine.message, "%s", tsh_last_error(ctx)->message);
    tsh_clear_error(ctx);
    mine.ended = tsh_comm_error(tsh_world(ctx), &world) != TSH_OK;
    if (!mine.ended) {
        mine.gradient = conclude(&m);
        infer(&m, &mine.out);
        train(&m, &mine.out);
        CHECK(tsh_ok(ctx), "after %d and %d: \"%s\"", (int)mine.first, (int)mine.second,
              mine.message);
    }
    if (tsh_world(ctx)->rank == 0) *all = mine;
    return 0;
}

/* Returns what became of `second` after `first`. */
static attempted try_pair(int ranks, int pp, act first, act second, const char *file) {
    const tsh_desc desc = {.pp = pp};
    attempted t;
    memset(&t, 0, sizeof t);
    t.first = first;
    t.second = second;
    t.file = file;
    if (ranks > 1)
        ranks_run_with(ranks, &desc, attempt, &t);
    else if (tsh_run(NULL, attempt, &t)) /* has no world that an error could end */
        fail_msg("%s", ranks_failure[0]);
    return t;
}

static int equal(const outcome *a, const outcome *b) {
    return memcmp(a, b, sizeof *a) == 0;
}

/* ----------------------------------------------------------------------- the walk */

static int saves(tsh_ctx *ctx, void *user) {
    model m;
    build(&m, ctx);
    (void)tsh_init_normal(tsh_param(m.root, "head.weight"), NULL);
    CHECK(tsh_save(m.root, (const char *)user, NULL) == TSH_OK, "save");
    return 0;
}

/* A refusal is one sentence of the function that was called, and has changed nothing. */
static void expect_refused(const attempted *t, const attempted *alone) {
    if (!strstr(t->message, "tsh_") && !strstr(t->message, "is held by stage"))
        fail_msg("%s", t->message);
    if (!t->ended && !equal(&t->out, &alone->out))
        fail_msg("%d after %d has changed something: %s", (int)t->second, (int)t->first,
                 t->message);
}

/* The signs of a row of the table: what became of each act after the act a. */
static void compare(attempted all[ACTS][ACTS], int a, char *row) {
    for (int b = 0; b < ACTS; b++) {
        const attempted *t = &all[a][b], *other = &all[b][a];
        if (t->refused) expect_refused(t, &all[a][NOTHING]);
        if (a >= RECORD && a <= DEFER && !(b >= RECORD && b <= DEFER) && b != RESET && !t->ended &&
            t->gradient != all[a][NOTHING].gradient)
            fail_msg("%d has changed the gradient that %d had begun", b, a);
        row[b] = t->refused ? 'x' : !other->refused && equal(&t->out, &other->out) ? '.' : 'v';
    }
    row[ACTS] = '\0';
}

/* On so many ranks of tp or, with pp 2, of pp, where only pairs with PIPELINE are tried. */
static void walk(int ranks, int pp, const char *const *want) {
    static attempted all[ACTS][ACTS]; /* [first][second] */
    char file[2 * FILES_SIZE], row[ACTS + 1];
    int a, b;
    (void)snprintf(file, sizeof file, "%s/model.safetensors", files_here);
    ranks_run(1, saves, file);
    for (a = 0; a < ACTS; a++)
        for (b = 0; b < ACTS; b++)
            if (pp == 1 || a == PIPELINE || b == PIPELINE)
                all[a][b] = try_pair(ranks, pp, (act)a, (act)b, file);
    for (a = 0; a < ACTS; a++) {
        if (pp > 1 && a != PIPELINE) continue;
        compare(all, a, row);
        if (strcmp(row, want[a]) != 0) fail_msg("row %d is \"%s\", not \"%s\"", a, row, want[a]);
    }
}

/* In row a and column b, what becomes of the act b after a: '.' what b gives before a, too; 'x' b
 * is refused; 'v' both are done, but before a, b gives something else, or is what refuses a. */
static const char *const table[ACTS] = {
    "..........................", /* NOTHING */
    "..v..x...xxxx......vv...v.", /* OPTIM */
    ".v.......x..x...........v.", /* OPTIM_HALF */
    "......vv.xxx...x...xxx....", /* PIPELINE */
    "....x.xxx.x..x......x.....", /* CACHE */
    ".v....vv......x.x.........", /* QUANTISE */
    "...xvx...xxxxxx.xxx.......", /* RECORD */
    "...xxx...xxxxxx.xxx.......", /* REDO */
    "....v.....................", /* DEFER */
    ".vvv..vv.........x........", /* TIE_HEAD */
    ".v.vv.vv.........x........", /* TIE_KEYS */
    ".v.v..vv.........x........", /* TIE_MLP */
    ".vv...vv...........vvv....", /* HALF */
    "....v.vv..................", /* PLAN_KEYS */
    ".....vvv..................", /* PLAN_MLP */
    "...x......................", /* PREPARE */
    ".....vvv.........vv.......", /* RESET */
    "......vv.vvv....v.vvvv....", /* LOAD */
    "......vv........vv........", /* INITIALISE */
    ".v.v........v....x.xv.....", /* ADD_NORM */
    ".v.vv.......v....x.vx.....", /* ADD_ATTENTION */
    "...v........v....x...x....", /* ADD_PARAM */
    "..........................", /* FREEZE */
    "..........................", /* EVALUATE */
    ".vv.......................", /* FREE_OPTIM */
    "..........................", /* FREE_CACHE */
};

static void every_change_is_refused_or_followed(void **state) {
    (void)state;
    walk(1, 1, table);
}

static void ranks_of_tp_refuse_and_follow_alike(void **state) {
    (void)state;
    walk(2, 1, table);
}

static void stages_of_a_pipeline_refuse_and_follow(void **state) {
    static const char *const stages[ACTS] = {NULL, NULL, NULL, "......xxxxxx...x...xxx...."};
    (void)state;
    walk(2, 2, stages);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_change_is_refused_or_followed),
        cmocka_unit_test(ranks_of_tp_refuse_and_follow_alike),
        cmocka_unit_test(stages_of_a_pipeline_refuse_and_follow),
    };
    return cmocka_run_group_tests_name("layer/changes", tests, files_begin, files_end);
}
