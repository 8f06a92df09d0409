/* Unequal shares of tp (tsh_desc.shares): who owns what; the losses, gradients and files of one
 * rank; ranks that were given different ones. */
/* build: double */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../support/files.h"

/* Sums over ranks in another order than one rank's. */
#define ROUNDING (sizeof(tsh_real) == 4 ? 4e-6 : 1e-13)

enum { WORDS = 37, WIDTH = 12, HEADS = 6, INNER = 25, TOKENS = 5, STEPS = 3, MOST = 8 };

static const struct deal {
    int ranks, shares[MOST];
} deals[] = {{2, {2, 1}},       {2, {1, 9}},       {3, {1, 3, 2}}, {3, {100, 1, 1}},
             {4, {1, 1, 1, 3}}, {2, {1000000, 1}}, {3, {7, 7, 7}}, {8, {1, 2, 3, 4, 4, 3, 2, 1}}};

/* ------------------------------------------------------------------------ who owns what */

static int owns(tsh_ctx *ctx, void *user) {
    const struct deal *deal = (const struct deal *)user;
    const tsh_layout layouts[] = {tsh_sharded(0), tsh_shard_units(0, 4),
                                  tsh_shard_segments(0, 3, 2)};
    const int64_t length = 24000;
    int64_t all = 0;
    int equal = 1;
    for (int r = 0; r < deal->ranks; r++) {
        equal = equal && deal->shares[r] == deal->shares[0];
        all += deal->shares[r];
    }
    for (int i = 0; i < COUNT(layouts); i++) {
        const int parts = layouts[i].segments;
        const int64_t unit = layouts[i].segment[0].unit, n = length / parts / unit;
        int64_t before = 0, held = 0;
        for (int r = 0; r < deal->ranks; before += deal->shares[r++]) {
            tsh_range range[TSH_MAX_SEGMENTS], plain[TSH_MAX_SEGMENTS];
            const int64_t owned = tsh_tp_shard_range(ctx, layouts[i], length, r, range);
            const double from = (double)(n * before) / (double)all;
            const double to = (double)(n * (before + deal->shares[r])) / (double)all;
            (void)tsh_shard_range(layouts[i], length, deal->ranks, r, plain);
            held += owned;
            for (int s = 0; s < parts; s++) {
                const int64_t start = range[s].start - s * (length / parts);
                const double end = (double)(start + range[s].length) / (double)unit;
                CHECK(range[s].length * parts == owned, "segment %d", s);
                if (equal)
                    CHECK(range[s].start == plain[s].start && range[s].length == plain[s].length,
                          "as torch.chunk");
                else
                    CHECK(fabs((double)start / (double)unit - from) <= 0.5 && fabs(end - to) <= 0.5,
                          "rank %d: [%lld, %g) of %g to %g", r, (long long)start, end, from, to);
            }
        }
        CHECK(held == length, "all of it");
    }
    CHECK(tsh_tp_shard_range(ctx, tsh_sharded(0), length, deal->ranks, NULL) == -1, "no such rank");
    CHECK(tsh_tp_shard_range(NULL, tsh_sharded(0), length, 0, NULL) == -1, "no ctx");
    return 0;
}

static void units_are_dealt_in_proportion(void **state) {
    (void)state;
    for (int i = 0; i < COUNT(deals); i++) {
        const tsh_desc desc = {.shares = deals[i].shares};
        ranks_run_with(deals[i].ranks, &desc, owns, (void *)(uintptr_t)&deals[i]);
    }
}

/* ------------------------------------------------------------------------ training */

static tsh_tensor *call(tsh_module *m, const char *child, tsh_tensor *x) {
    return tsh_forward(tsh_find(m, child), x);
}

static tsh_tensor *heads_of(tsh_tensor *x) {
    return tsh_transpose(tsh_reshape(x, tsh_shape4(1, TOKENS, HEADS, WIDTH / HEADS)), 1, 2);
}

/* Attention and a feed-forward net, whose heads and features are cut. */
static tsh_tensor *network(tsh_module *self, tsh_tensor **in, int n, void *user) {
    const tsh_attention_desc how = {.causal = 1};
    tsh_tensor *x = call(self, "words", in[0]), *h, *qkv[3];
    (void)n, (void)user;
    h = call(self, "norm", x);
    for (int i = 0; i < 3; i++) {
        static const char *const names[3] = {"q", "k", "v"};
        qkv[i] = heads_of(call(self, names[i], h));
    }
    h = tsh_transpose(tsh_attention(qkv[0], qkv[1], qkv[2], &how), 1, 2);
    x = tsh_add(x, call(self, "o", tsh_reshape(h, tsh_shape3(1, TOKENS, WIDTH))));
    x = tsh_add(x, call(self, "down", tsh_gelu(call(self, "up", x))));
    return call(self, "head", x);
}

static tsh_module *build(tsh_ctx *ctx) {
    const int64_t size = WIDTH / HEADS;
    const tsh_plan_rule plan[] = {{.path = "words", .style = TSH_ROWWISE},
                                  {.path = "[qkv]", .style = TSH_COLWISE, .unit = size},
                                  {.path = "o", .style = TSH_ROWWISE, .unit = size},
                                  {.path = "up", .style = TSH_COLWISE},
                                  {.path = "down", .style = TSH_ROWWISE},
                                  {.path = "head", .style = TSH_COLWISE}};
    const tsh_embedding_desc words = {.count = WORDS, .dim = WIDTH};
    const tsh_linear_desc square = {.in = WIDTH, .out = WIDTH};
    const tsh_linear_desc up = {.in = WIDTH, .out = INNER}, down = {.in = INNER, .out = WIDTH};
    const tsh_linear_desc head = {.in = WIDTH, .out = WORDS};
    const tsh_layer_norm_desc norm = {.dim = WIDTH};
    const tsh_module_desc how = {network, NULL};
    tsh_module *net = tsh_add_module(tsh_root(ctx), "net", &how);
    (void)tsh_add_embedding(net, "words", &words);
    (void)tsh_add_layer_norm(net, "norm", &norm);
    (void)tsh_add_linear(net, "q", &square);
    (void)tsh_add_linear(net, "k", &square);
    (void)tsh_add_linear(net, "v", &square);
    (void)tsh_add_linear(net, "o", &square);
    (void)tsh_add_linear(net, "up", &up);
    (void)tsh_add_linear(net, "down", &down);
    (void)tsh_add_linear(net, "head", &head);
    (void)tsh_parallelize(net, plan, COUNT(plan));
    (void)tsh_materialize(net);
    return net;
}

static tsh_tensor *ids(tsh_ctx *ctx, int add) {
    int32_t values[TOKENS];
    for (int i = 0; i < TOKENS; i++) values[i] = (7 * i + add) % WORDS;
    return tsh_from(ctx, values, tsh_shape2(1, TOKENS), TSH_I32);
}

typedef struct run {
    double loss[STEPS];
    uint64_t file; /* hash of all parameters after loading */
} run;

typedef struct hashes {
    tsh_ctx *ctx;
    uint64_t sum;
} hashes;

static void hash_one(const char *path, tsh_tensor *t, void *user) {
    hashes *h = (hashes *)user;
    (void)path;
    h->sum = h->sum * 31 + tsh_hash(h->ctx, t);
}

static int trains(tsh_ctx *ctx, void *user) {
    run *r = (run *)user;
    tsh_module *net = build(ctx);
    const tsh_optim_desc how = {.kind = TSH_ADAMW, .lr = 1e-2};
    tsh_optim *optim = tsh_optim_new(net, &how);
    for (int i = 0; i < STEPS; i++) {
        tsh_tensor *logits = tsh_reshape(tsh_forward(net, ids(ctx, 0)), tsh_shape2(TOKENS, WORDS));
        tsh_tensor *target = tsh_reshape(ids(ctx, 3), tsh_shape1(TOKENS));
        tsh_tensor *loss = tsh_cross_entropy(logits, target, NULL);
        const double value = tsh_item(ctx, loss);
        if (tsh_world(ctx)->rank == 0) r->loss[i] = value;
        CHECK(tsh_backward(ctx, loss) == TSH_OK && tsh_optim_step(optim) == TSH_OK, "step: %s",
              tsh_last_error(ctx)->message);
        (void)tsh_step_end(ctx);
    }
    CHECK(tsh_save(tsh_root(ctx), files_path("model"), optim) == TSH_OK, "save");
    CHECK_OK();
    return 0;
}

static int loads(tsh_ctx *ctx, void *user) {
    run *r = (run *)user;
    tsh_module *net = build(ctx);
    const tsh_optim_desc how = {.kind = TSH_ADAMW, .lr = 1e-2};
    tsh_optim *optim = tsh_optim_new(net, &how);
    hashes h = {ctx, 0};
    CHECK(tsh_load(tsh_root(ctx), files_path("model"), optim) == TSH_OK, "%s",
          tsh_last_error(ctx)->message);
    tsh_each_param(net, hash_one, &h);
    if (tsh_world(ctx)->rank == 0) r->file = h.sum;
    return 0;
}

static void losses_and_files_are_those_of_one_rank(void **state) {
    run one, mine, loaded;
    (void)state;
    memset(&one, 0, sizeof one);
    ranks_run(1, trains, &one);
    assert_true(one.loss[STEPS - 1] < one.loss[0]);
    for (int i = 0; i < COUNT(deals); i++) {
        const tsh_desc desc = {.shares = deals[i].shares};
        ranks_run_with(deals[i].ranks, &desc, trains, &mine);
        for (int s = 0; s < STEPS; s++)
            if (fabs(mine.loss[s] - one.loss[s]) > ROUNDING)
                fail_msg("deal %d, step %d: %.9g, not %.9g", i, s, mine.loss[s], one.loss[s]);
        ranks_run_with(deals[i].ranks, &desc, loads, &mine); /* by the same shares */
        ranks_run(1, loads, &loaded);
        assert_true(mine.file == loaded.file);
        ranks_run(3, loads, &loaded); /* and by others */
        assert_true(mine.file == loaded.file);
    }
}

/* ------------------------------------------------------------------------ mistakes */

static int refuses(tsh_ctx *ctx, void *user) {
    const int shares[2] = {3, *(const int *)user};
    tsh_desc desc = {.shares = shares};
    tsh_ctx *other = NULL;
    char text[64];
    (void)snprintf(text, sizeof text, "the share of rank 1 of tp is %d, not from 1 to 1000000",
                   shares[1]);
    CHECK(tsh_comm_split(tsh_world(ctx), 0, 0, &desc.comm) == TSH_OK, "split");
    CHECK(tsh_open(&desc, &other) == TSH_ERR_ARGUMENT, "refused");
    CHECK(strstr(tsh_last_error(other)->message, text), "%s", tsh_last_error(other)->message);
    tsh_close(other);
    return 0;
}

/* Each rank is told that its own share is the larger one. */
static int differs(tsh_ctx *ctx, void *user) {
    const int shares[2][2] = {{2, 1}, {1, 2}};
    tsh_desc desc = {.shares = shares[tsh_world(ctx)->rank]};
    tsh_ctx *other = NULL;
    (void)user;
    CHECK(tsh_comm_split(tsh_world(ctx), 0, 0, &desc.comm) == TSH_OK, "split");
    CHECK(tsh_open(&desc, &other) == TSH_OK, "opened");
    (void)build(other);
    (void)tsh_forward(tsh_find(tsh_root(other), "net"), ids(other, 0));
    CHECK(tsh_last_error(other)->code == TSH_ERR_MISMATCH, "told");
    CHECK(strstr(tsh_last_error(other)->message, "the seed 0, the shares 1 : 2"), "%s",
          tsh_last_error(other)->message);
    tsh_close(other);
    return 0;
}

static void wrong_shares_are_told(void **state) {
    int wrong[] = {0, -1, 1000001};
    (void)state;
    for (int i = 0; i < COUNT(wrong); i++) ranks_run(2, refuses, &wrong[i]);
    ranks_run(2, differs, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(units_are_dealt_in_proportion),
        cmocka_unit_test_teardown(losses_and_files_are_those_of_one_rank, files_after),
        cmocka_unit_test(wrong_shares_are_told),
    };
    return cmocka_run_group_tests_name("layer/shares", tests, files_begin, files_end);
}
