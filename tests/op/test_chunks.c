/* tsh_loss_in_chunks against the loss of the whole: the same bits, the same gradients, at every
 * degree, for chunks of any size, heads of every style, frozen, quantised and with adapters; the
 * memory that it saves; what it refuses. */
/* build: double */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"

enum { BATCH = 2, LENGTH = 7, WIDTH = 32, CLASSES = 45 };

/* A model: embedding, a linear layer, tanh, head; and how its loss is computed. */
typedef struct run {
    const char *name;
    tsh_style style;  /* of the head */
    int tied;         /* 1: the head has the embedding's weight */
    int lora;         /* 1: an adapter on the head, all else is frozen; 2: the linear layer, too */
    int twice;        /* 1: gradients of two backwards are added */
    int both;         /* 1: the loss is added to another loss of the same head */
    int checkpoint;   /* 1: the loss is computed inside a checkpointed module */
    int bf16, packed; /* 1: activations and weights are bf16; gradients, too */
    double scale;     /* the loss is multiplied by it; 0: 1 */
    tsh_dtype quantise; /* dtype of the head's weight; 0: the ctx's */
    tsh_cross_entropy_desc desc;
    int64_t rows; /* of a chunk; -1: the whole */
} run;

static const char *const params[] = {"embed.weight",
                                     "mix.weight",
                                     "mix.bias",
                                     "head.weight",
                                     "head.bias",
                                     "head.lora_A.default.weight",
                                     "head.lora_B.default.weight",
                                     "mix.lora_A.default.weight",
                                     "mix.lora_B.default.weight"};

static tsh_tensor *losses(tsh_tensor *x, tsh_tensor *target, void *user) {
    const run *r = (const run *)user;
    tsh_module *head = tsh_find(tsh_root(tsh_ctx_of(x)), "head");
    tsh_cross_entropy_desc desc = r->desc;
    desc.reduction = TSH_REDUCE_NONE;
    return tsh_cross_entropy(tsh_scale(tsh_tanh(tsh_forward(head, x)), 3), target, &desc);
}

static tsh_tensor *total(tsh_tensor *x, tsh_tensor *target, const run *r) {
    run own = *r;
    const tsh_chunks_desc desc = {losses, &own, r->rows};
    tsh_cross_entropy_desc sum = r->desc;
    tsh_module *head = tsh_find(tsh_root(tsh_ctx_of(x)), "head");
    if (r->rows >= 0) return tsh_loss_in_chunks(x, target, &desc);
    sum.reduction = TSH_REDUCE_SUM;
    return tsh_cross_entropy(tsh_scale(tsh_tanh(tsh_forward(head, x)), 3), target, &sum);
}

/* The forward of the module that holds the loss. */
static tsh_tensor *inside(tsh_module *self, tsh_tensor **in, int n, void *user) {
    (void)self, (void)n;
    return total(tsh_tanh(in[0]), in[1], (const run *)user);
}

/* Gives a parameter small integers, which are exact in bf16, too. */
static tsh_result set(tsh_ctx *ctx, tsh_tensor *t, uint64_t seed) {
    uint16_t half[CLASSES * WIDTH];
    if (tsh_dtype_of(t) != TSH_BF16) return ranks_set(ctx, t, seed);
    for (uint64_t e = 0; e < (uint64_t)tsh_numel(t); e++) {
        const float x = (float)ranks_number(seed, e);
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        half[e] = (uint16_t)(bits >> 16);
    }
    return tsh_write(ctx, t, TSH_GLOBAL, half, (size_t)tsh_numel(t) * sizeof *half);
}

static int build(tsh_ctx *ctx, run *r) {
    const tsh_embedding_desc embed = {
        .count = CLASSES, .dim = WIDTH, .style = r->tied ? TSH_ROWWISE : TSH_PLAIN};
    const tsh_linear_desc mix = {.in = WIDTH, .out = WIDTH};
    const tsh_linear_desc head = {.in = WIDTH, .out = CLASSES, .style = r->style};
    const tsh_module_desc outer = {.forward = inside, .user = r};
    const tsh_lora_desc lora = {.rank = 3};
    tsh_module *root = tsh_root(ctx);
    tsh_add_embedding(root, "embed", &embed);
    tsh_add_linear(root, "mix", &mix);
    tsh_add_linear(root, "head", &head);
    tsh_checkpoint(tsh_add_module(root, "loss", &outer), 1);
    if (r->tied) tsh_tie(tsh_find(root, "head"), "weight", tsh_param(root, "embed.weight"));
    CHECK_OK();
    for (int i = 0; i < COUNT(params); i++) {
        if (i == 5 && r->quantise)
            CHECK(tsh_quantize(root, "head", r->quantise) == TSH_OK, "quantise");
        if (i == 5 && r->lora)
            CHECK(tsh_lora(root, r->lora > 1 ? NULL : "head", &lora) == TSH_OK, "lora");
        if (tsh_param(root, params[i]))
            CHECK(set(ctx, tsh_param(root, params[i]), (uint64_t)i) == TSH_OK, "set");
        tsh_clear_error(ctx);
    }
    return 0;
}

/* The loss, and the gradients, of one step. */
static int step(tsh_ctx *ctx, const run *r, double *loss, double *grad[COUNT(params)]) {
    static const int32_t ids[BATCH * LENGTH] = {3, 9, 0, 44, 7, 7, 12, 1, 30, 31, 6, 2, 40, 8};
    static const int32_t next[BATCH * LENGTH] = {9, 0, 44, -100, 7, 12, 13, 30, 31, 6, 2, 40, 8, 3};
    tsh_module *root = tsh_root(ctx);
    for (int i = 0; i <= r->twice; i++) {
        tsh_tensor *x = tsh_from(ctx, ids, tsh_shape2(BATCH, LENGTH), TSH_I32), *y;
        tsh_tensor *target = tsh_from(ctx, next, tsh_shape2(BATCH, LENGTH), TSH_I32);
        x = tsh_forward(tsh_find(root, "mix"),
                        tsh_scale(tsh_forward(tsh_find(root, "embed"), x), 0.03125));
        x = tsh_scale(x, 0.125);
        if (r->checkpoint) {
            tsh_tensor *in[2];
            in[0] = x;
            in[1] = target;
            y = tsh_forward_n(tsh_find(root, "loss"), in, 2);
        } else {
            y = total(tsh_tanh(x), target, r);
        }
        CHECK(y, "%s", r->name);
        *loss = tsh_item(ctx, y);
        if (r->both) y = tsh_add(y, total(tsh_scale(x, 0.5), target, r));
        if (r->scale != 0) y = tsh_scale(y, r->scale);
        CHECK(tsh_backward(ctx, y) == TSH_OK, "%s", r->name);
    }
    for (int i = 0; i < COUNT(params); i++) {
        tsh_tensor *p = tsh_param(root, params[i]);
        tsh_clear_error(ctx);
        grad[i] = p && tsh_grad(p) ? ranks_values(ctx, tsh_grad(p)) : NULL;
    }
    CHECK(tsh_step_end(ctx) == TSH_OK, "%s", r->name);
    return 0;
}

static int same(tsh_ctx *ctx, const run *r, const char *what, int64_t n, const double *got,
                const double *want) {
    /* sums of up to 28 products whose terms are added in another order, some of which cancel: in
     * double, they differ by 1e-13 */
    const double room = r->bf16 ? 2e-2 : sizeof(tsh_real) == 8 ? 1e-12 : 3e-5;
    double most = 0;
    CHECK(!got == !want, "%s: %s is missing", r->name, what);
    for (int64_t e = 0; e < n && got; e++) most = fabs(want[e]) > most ? fabs(want[e]) : most;
    for (int64_t e = 0; e < n && got; e++)
        CHECK(fabs(got[e] - want[e]) <= room * most, "%s, %d rows: %s %d is %.9g, not %.9g",
              r->name, (int)r->rows, what, (int)e, got[e], want[e]);
    CHECK(n == 0 || !got || most > 0, "%s: %s is 0", r->name, what);
    return 0;
}

static int compare(tsh_ctx *ctx, void *user) {
    static const int64_t rows[] = {1, 3, 5, 7, 13, 14, 0};
    run r = *(const run *)user;
    tsh_module *root = tsh_root(ctx);
    const tsh_optim_desc sgd = {.kind = TSH_SGD, .grad_dtype = TSH_BF16};
    double loss, whole, *grad[COUNT(params)], *want[COUNT(params)];
    tsh_optim *optim = NULL;
    /* An all-reduce over three ranks or more, such as that of a row-parallel head's logits, adds in
     * an order that depends on where in the buffer an element is. */
    const int any_order = r.style == TSH_ROWWISE && tsh_tp(ctx)->size > 2;
    if (build(ctx, &r)) return 1;
    if (r.packed) CHECK((optim = tsh_optim_new(root, &sgd)) != NULL, "the optimiser");
    r.rows = -1;
    if (step(ctx, &r, &whole, want)) return 1;
    for (int i = 0; i < COUNT(rows); i++) {
        r.rows = rows[i];
        tsh_zero_grads(root);
        if (step(ctx, &r, &loss, grad)) return 1;
        CHECK(memcmp(&loss, &whole, sizeof loss) == 0 ||
                  (any_order && fabs(loss - whole) < 1e-6 * whole),
              "%s, %d rows: %.9g, not %.9g", r.name, (int)r.rows, loss, whole);
        for (int p = 0; p < COUNT(params); p++) {
            tsh_tensor *t = tsh_param(root, params[p]);
            tsh_clear_error(ctx);
            if (t && same(ctx, &r, params[p], tsh_numel(t), grad[p], want[p])) return 1;
            free(grad[p]);
        }
    }
    for (int p = 0; p < COUNT(params); p++) free(want[p]);
    tsh_optim_free(optim);
    CHECK_OK();
    return 0;
}

static const run runs[] = {
    {.name = "plain", .style = TSH_PLAIN},
    {.name = "column", .style = TSH_COLWISE},
    {.name = "row", .style = TSH_ROWWISE},
    {.name = "smooth", .style = TSH_COLWISE, .desc = {.label_smoothing = 0.1, .z_loss = 0.01}},
    {.name = "tied", .style = TSH_COLWISE, .tied = 1},
    {.name = "scaled", .style = TSH_COLWISE, .scale = 0.3},
    {.name = "twice", .style = TSH_COLWISE, .tied = 1, .twice = 1, .scale = 0.25},
    {.name = "both", .style = TSH_COLWISE, .both = 1},
    {.name = "both twice", .style = TSH_ROWWISE, .both = 1, .twice = 1},
    {.name = "adapter", .style = TSH_COLWISE, .lora = 1},
    {.name = "adapters", .style = TSH_ROWWISE, .lora = 2},
    {.name = "quantised", .style = TSH_COLWISE, .quantise = TSH_Q8_0, .lora = 2},
    {.name = "checkpoint", .style = TSH_COLWISE, .checkpoint = 1},
    {.name = "checkpoint tied", .style = TSH_COLWISE, .checkpoint = 1, .tied = 1, .both = 1},
#ifndef TESTS_DOUBLE
    {.name = "bf16", .style = TSH_COLWISE, .bf16 = 1},
    {.name = "packed", .style = TSH_COLWISE, .bf16 = 1, .packed = 1, .twice = 1},
#endif
};

static void the_loss_has_the_bits_of_the_whole(void **state) {
    (void)state;
    for (int i = 0; i < COUNT(runs); i++)
        for (int d = 0; d < COUNT(ranks_degrees); d++) {
            run r = runs[i];
            const tsh_desc desc = {.dtype = r.bf16 ? TSH_BF16 : TSH_DTYPE_DEFAULT};
            ranks_run_with(ranks_degrees[d], &desc, compare, &r);
        }
}

/* Two replicas of two ranks: gradients are averaged over them as well. */
static void replicas_average_its_gradients(void **state) {
    (void)state;
    for (int i = 0; i < COUNT(runs); i++) {
        run r = runs[i];
        const tsh_desc desc = {.tp = 2, .dtype = r.bf16 ? TSH_BF16 : TSH_DTYPE_DEFAULT};
        ranks_run_with(4, &desc, compare, &r);
    }
}

/* -------------------------------------------------------------- pipelines */

static tsh_tensor *piped_input(tsh_ctx *ctx, int micro_batch, void *user) {
    tsh_tensor *x = tsh_arange(ctx, TSH_REAL, -1, 1, 1.0 / (7 * WIDTH / 2));
    (void)user;
    return tsh_scale(tsh_reshape(x, tsh_shape2(7, WIDTH)), 1 + micro_batch);
}

static tsh_tensor *piped_loss(tsh_ctx *ctx, tsh_tensor *y, int micro_batch, void *user) {
    static const int32_t next[7] = {9, 0, 44, -100, 7, 12, 13};
    (void)micro_batch;
    return total(y, tsh_from(ctx, next, tsh_shape1(7), TSH_I32), (const run *)user);
}

/* Two stages of two ranks each, four micro-batches. The head belongs to the last stage. */
static int piped(tsh_ctx *ctx, void *user) {
    static const char *const paths[] = {"h.0.weight", "h.1.weight", "head.weight", "head.bias"};
    run r = {.style = TSH_COLWISE};
    const tsh_linear_desc square = {.in = WIDTH, .out = WIDTH};
    const tsh_linear_desc head = {.in = WIDTH, .out = CLASSES, .style = TSH_COLWISE};
    const tsh_pipeline_desc desc = {.micro_batches = 4,
                                    .schedule = *(const tsh_pipeline_schedule *)user,
                                    .input = piped_input,
                                    .loss = piped_loss,
                                    .user = &r};
    tsh_module *h = tsh_add_module(tsh_root(ctx), "h", NULL);
    tsh_pipeline *pipeline;
    double loss[2], *grad[2][COUNT(paths)];
    tsh_add_linear(h, "0", &square);
    tsh_add_linear(h, "1", &square);
    tsh_add_linear(tsh_root(ctx), "head", &head);
    pipeline = tsh_pipeline_new(h, &desc);
    CHECK(pipeline, "a pipeline");
    for (int k = 0; k < 2; k++) {
        r.rows = k ? 3 : -1;
        tsh_zero_grads(tsh_root(ctx));
        CHECK(tsh_pipeline_train(pipeline, &loss[k]) == TSH_OK, "step %d", k);
        for (int i = 0; i < COUNT(paths); i++) {
            const int mine = tsh_pp(ctx)->rank == (i > 0);
            tsh_tensor *grads = mine ? tsh_grad(tsh_param(tsh_root(ctx), paths[i])) : NULL;
            CHECK(!mine || grads, "%s", paths[i]);
            grad[k][i] = grads ? ranks_values(ctx, grads) : NULL;
            if (k && grads && same(ctx, &r, paths[i], tsh_numel(grads), grad[1][i], grad[0][i]))
                return 1;
        }
        CHECK(tsh_step_end(ctx) == TSH_OK, "the end");
    }
    CHECK(memcmp(&loss[0], &loss[1], sizeof loss[0]) == 0, "%.9g, not %.9g", loss[1], loss[0]);
    for (int i = 0; i < COUNT(paths); i++) {
        free(grad[0][i]);
        free(grad[1][i]);
    }
    CHECK_OK();
    return 0;
}

static void pipelines_compute_it_on_their_last_stage(void **state) {
    static const tsh_desc desc = {.tp = 2, .pp = 2};
    tsh_pipeline_schedule schedule[] = {TSH_PIPELINE_1F1B, TSH_PIPELINE_GPIPE};
    (void)state;
    for (int i = 0; i < COUNT(schedule); i++) ranks_run_with(4, &desc, piped, &schedule[i]);
}

/* ----------------------------------------------------------------- memory */

enum { ROWS = 512, MANY = 2048 };
static const int32_t zeros[ROWS] = {0};

static tsh_tensor *large(tsh_tensor *x, tsh_tensor *target, void *user) {
    const tsh_cross_entropy_desc none = {.reduction = TSH_REDUCE_NONE};
    return tsh_cross_entropy(tsh_linear(x, (tsh_tensor *)user, NULL), target, &none);
}

static int memory(tsh_ctx *ctx, void *user) {
    const tsh_layout cut = tsh_sharded(0);
    const size_t logits = (size_t)ROWS * MANY * sizeof(tsh_real) / (size_t)tsh_tp(ctx)->size;
    tsh_tensor *x = tsh_requires_grad(
        tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(ROWS, 8), tsh_replicated()), 1);
    tsh_tensor *w = tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(MANY, 8), cut);
    tsh_tensor *t = tsh_from(ctx, zeros, tsh_shape1(ROWS), TSH_I32);
    const tsh_chunks_desc desc = {large, w, 32};
    size_t before;
    (void)user;
    tsh_requires_grad(w, 1);
    for (int no_grad = 1; no_grad >= 0; no_grad--) {
        tsh_tensor *loss;
        if (no_grad) tsh_no_grad_begin(ctx);
        before = tsh_mem_stats(ctx).step_live;
        loss = tsh_loss_in_chunks(x, t, &desc);
        CHECK(loss, "a loss");
        if (no_grad)
            tsh_no_grad_end(ctx);
        else
            CHECK(tsh_backward(ctx, loss) == TSH_OK, "backward");
        /* the logits of a chunk, a few numbers a row, and the gradient of x */
        CHECK(tsh_mem_stats(ctx).step_live_peak - before < logits / 8, "%d bytes of %d",
              (int)(tsh_mem_stats(ctx).step_live_peak - before), (int)logits);
    }
    CHECK(tsh_step_end(ctx) == TSH_OK, "the end");
    CHECK(tsh_mem_stats(ctx).step_live == 0, "%d bytes", (int)tsh_mem_stats(ctx).step_live);
    /* a loss that no backward follows leaves nothing, and no gradient */
    tsh_zero_grad(x);
    tsh_zero_grad(w);
    CHECK(tsh_loss_in_chunks(x, tsh_from(ctx, zeros, tsh_shape1(ROWS), TSH_I32), &desc), "a loss");
    CHECK(!tsh_grad(x) && !tsh_grad(w), "a gradient");
    CHECK(tsh_step_end(ctx) == TSH_OK, "the end");
    CHECK(tsh_mem_stats(ctx).step_live == 0, "%d bytes", (int)tsh_mem_stats(ctx).step_live);
    /* the whole takes that much more */
    before = tsh_mem_stats(ctx).step_live_peak;
    CHECK(tsh_backward(ctx, tsh_sum(large(x, tsh_from(ctx, zeros, tsh_shape1(ROWS), TSH_I32), w),
                                    TSH_ALL, 0)) == TSH_OK,
          "backward");
    CHECK(tsh_mem_stats(ctx).step_live_peak - before > logits - logits / 8, "%d bytes of %d",
          (int)(tsh_mem_stats(ctx).step_live_peak - before), (int)logits);
    CHECK(tsh_step_end(ctx) == TSH_OK, "the end");
    tsh_tensor_free(x);
    tsh_tensor_free(w);
    CHECK_OK();
    return 0;
}

static void logits_never_stand_whole(void **state) {
    (void)state;
    ranks_run(1, memory, NULL);
    ranks_run(3, memory, NULL);
}

/* --------------------------------------------------------------- mistakes */

static tsh_tensor *nothing(tsh_tensor *x, tsh_tensor *target, void *user) {
    (void)x, (void)target, (void)user;
    return NULL;
}

static tsh_tensor *ends(tsh_tensor *x, tsh_tensor *target, void *user) {
    (void)target, (void)user;
    (void)tsh_step_end(tsh_ctx_of(x));
    return x;
}

static tsh_tensor *begins_a_scope(tsh_tensor *x, tsh_tensor *target, void *user) {
    (void)target, (void)user;
    tsh_scope_begin(tsh_ctx_of(x));
    return tsh_mul(x, x);
}

static tsh_tensor *ends_a_scope(tsh_tensor *x, tsh_tensor *target, void *user) {
    tsh_ctx *ctx = tsh_ctx_of(x);
    (void)target, (void)user;
    tsh_scope_end(ctx);
    return x;
}

static tsh_tensor *stops_recording(tsh_tensor *x, tsh_tensor *target, void *user) {
    (void)target, (void)user;
    tsh_no_grad_begin(tsh_ctx_of(x));
    return tsh_mul(x, x);
}

static tsh_tensor *itself(tsh_tensor *x, tsh_tensor *target, void *user) {
    (void)target, (void)user;
    return x;
}

static tsh_tensor *many(tsh_tensor *x, tsh_tensor *target, void *user) {
    tsh_tensor **all = (tsh_tensor **)user;
    (void)target;
    for (int i = 0; all[i]; i++) x = tsh_mul(x, all[i]);
    return x;
}

static int mistakes(tsh_ctx *ctx, void *user) {
    tsh_tensor *x = tsh_requires_grad(
        tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(6, 4), tsh_replicated()), 1);
    tsh_tensor *s = tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(6, 4), tsh_sharded(0)), *all[18];
    tsh_tensor *t = tsh_from(ctx, zeros, tsh_shape1(6), TSH_I32), *loss, *flat;
    tsh_chunks_desc desc = {nothing, NULL, 4};
    double *grad;
    (void)user;
    CHECK_TRUE(!tsh_loss_in_chunks(x, t, NULL));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "tsh_loss_in_chunks: .fn, which computes losses, is NULL");
    CHECK_TRUE(!tsh_loss_in_chunks(x, t, &desc));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "fn returned NULL");
    desc.rows = -1;
    CHECK_TRUE(!tsh_loss_in_chunks(x, t, &desc));
    CHECK_SAYS(TSH_ERR_ARGUMENT, ".rows is -1");
    desc.rows = 4;
    CHECK_TRUE(!tsh_loss_in_chunks(x, tsh_slice(t, 0, 0, 5), &desc));
    CHECK_SAYS(TSH_ERR_SHAPE, "x (6, 4) R and target (5) R");
    desc.fn = ends;
    CHECK_TRUE(!tsh_loss_in_chunks(x, t, &desc));
    CHECK_SAYS(TSH_ERR_STATE, "tsh_step_end");
    desc.fn = begins_a_scope;
    CHECK_TRUE(!tsh_loss_in_chunks(x, t, &desc));
    CHECK_SAYS(TSH_ERR_STATE, "fn begins more than it ends");
    desc.fn = stops_recording;
    CHECK_TRUE(!tsh_loss_in_chunks(x, t, &desc));
    CHECK_SAYS(TSH_ERR_STATE, "fn begins more than it ends");
    tsh_no_grad_begin(ctx); /* else the scope has recorded calls, which is an error of its own */
    desc.fn = ends_a_scope;
    CHECK_TRUE(!tsh_loss_in_chunks(x, t, &desc));
    CHECK_SAYS(TSH_ERR_STATE, "fn begins more than it ends");
    tsh_no_grad_end(ctx);
    desc.fn = itself;
    if (tsh_tp(ctx)->size > 1) {
        CHECK_TRUE(!tsh_loss_in_chunks(s, t, &desc));
        CHECK_SAYS(TSH_ERR_LAYOUT, "tsh_redistribute(x, tsh_replicated())");
    }
    desc.fn = many;
    desc.user = all;
    for (int i = 0; i < 17; i++)
        all[i] = tsh_requires_grad(tsh_tensor_new(ctx, TSH_REAL, tsh_shape1(4), tsh_replicated()),
                                   1);
    all[17] = NULL;
    CHECK_TRUE(!tsh_loss_in_chunks(x, t, &desc));
    CHECK_SAYS(TSH_ERR_UNSUPPORTED, "more than 16 tensors");
    CHECK_TRUE(!tsh_grad(x) && !tsh_grad(all[0]));
    /* what fn returns may be a view of x: its sum, whose gradient is 1 */
    desc.fn = itself;
    CHECK(ranks_set(ctx, x, 5) == TSH_OK, "values");
    loss = tsh_loss_in_chunks(x, t, &desc);
    flat = tsh_sum(tsh_detach(x), TSH_ALL, 0);
    CHECK(loss && tsh_item(ctx, loss) == tsh_item(ctx, flat), "the sum");
    CHECK(tsh_backward(ctx, loss) == TSH_OK, "backward");
    grad = ranks_values(ctx, tsh_grad(x));
    for (int e = 0; e < 24; e++) CHECK(grad[e] == 1, "gradient %d is %g", e, grad[e]);
    free(grad);
    for (int i = 0; i < 17; i++) tsh_tensor_free(all[i]);
    CHECK(tsh_step_end(ctx) == TSH_OK, "the end");
    tsh_tensor_free(x);
    tsh_tensor_free(s);
    CHECK_OK();
    return 0;
}

static void what_cannot_be_computed_is_refused(void **state) {
    (void)state;
    ranks_run(1, mistakes, NULL);
    ranks_run(2, mistakes, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_loss_has_the_bits_of_the_whole),
        cmocka_unit_test(replicas_average_its_gradients),
        cmocka_unit_test(pipelines_compute_it_on_their_last_stage),
        cmocka_unit_test(logits_never_stand_whole),
        cmocka_unit_test(what_cannot_be_computed_is_refused),
    };
    return cmocka_run_group_tests_name("op/chunks", tests, NULL, NULL);
}
