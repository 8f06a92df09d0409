/* tsh_checkpoint: modules that are computed again in backward give the same losses and weights, bit
 * for bit, at every degree, and hold less. */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../support/small_gpt.h"

enum { STEPS = 4, HASHES = 96 };

/* ------------------------------------------------------------- a GPT that trains */

typedef struct setup {
    const char *modules[4]; /* that are checkpoints */
    int sequence, defer;
} setup;

typedef struct outcome {
    const setup *how;
    double loss[STEPS];
    uint64_t hash[HASHES];
    int hashes;
    size_t peak; /* of step memory, on rank 0 */
} outcome;

static void hash_param(const char *path, tsh_tensor *param, void *user) {
    outcome *o = (outcome *)user;
    (void)path;
    o->hash[o->hashes++] = tsh_hash(tsh_ctx_of(param), param);
}

/* Two micro-batches, whose gradients wait for each other. */
static double deferred_step(tsh_ctx *ctx, tsh_optim *optim, tsh_tensor *ids, tsh_tensor *targets,
                            int step) {
    const tsh_backward_desc defer = {.defer = 1};
    double sum = 0;
    int i;
    for (i = 0; i < 2; i++) {
        tsh_tensor *loss;
        gpt_load(ctx, ids, targets, 2 * step + i);
        loss = tsh_cross_entropy(gpt_logits(tsh_root(ctx), ids), targets, NULL);
        (void)tsh_backward_with(ctx, loss, &defer);
        sum += tsh_item(ctx, loss);
        (void)tsh_step_end(ctx);
    }
    (void)tsh_sync_grads(ctx);
    (void)tsh_optim_step(optim);
    tsh_zero_grads(tsh_root(ctx));
    return sum;
}

static int train(tsh_ctx *ctx, void *user) {
    outcome mine, *out = (outcome *)user;
    const setup *h = out->how;
    const tsh_shape shape = tsh_shape2(GPT_BATCH, GPT_CONTEXT);
    const tsh_optim_desc adamw = {.kind = TSH_ADAMW, .lr = 0.01, .clip_norm = 1};
    tsh_tensor *ids = tsh_tensor_new(ctx, TSH_I32, shape, tsh_replicated());
    tsh_tensor *targets = tsh_tensor_new(ctx, TSH_I32, shape, tsh_replicated());
    tsh_module *gpt = gpt_add(ctx);
    tsh_optim *optim;
    int i;
    memset(&mine, 0, sizeof mine);
    for (i = 0; i < 4 && h->modules[i]; i++) tsh_checkpoint(tsh_find(gpt, h->modules[i]), 1);
    CHECK(tsh_parallelize(gpt, h->sequence ? gpt_sequence_plan : gpt_plan,
                          h->sequence ? GPT_SEQUENCE_RULES : GPT_RULES) == TSH_OK,
          "plan");
    optim = tsh_optim_new(gpt, &adamw);
    for (i = 0; i < STEPS; i++) {
        mine.loss[i] = (h->defer ? deferred_step : gpt_step)(ctx, optim, ids, targets, i);
        CHECK_OK();
    }
    tsh_each_param(gpt, hash_param, &mine);
    CHECK_OK();
    mine.peak = tsh_mem_stats(ctx).step_live_peak;
    CHECK(tsh_mem_stats(ctx).step_live == 0, "%zu bytes are left", tsh_mem_stats(ctx).step_live);
    mine.how = h;
    if (tsh_world(ctx)->rank == 0) *out = mine;
    return 0;
}

static void expect_same(const outcome *a, const outcome *b, int ranks) {
    int i;
    for (i = 0; i < STEPS; i++)
        if (memcmp(&a->loss[i], &b->loss[i], sizeof a->loss[i]) != 0)
            fail_msg("%d ranks, step %d: loss %.9g, not %.9g", ranks, i, b->loss[i], a->loss[i]);
    assert_int_equal(a->hashes, b->hashes);
    for (i = 0; i < a->hashes; i++)
        if (a->hash[i] != b->hash[i]) fail_msg("%d ranks: parameter %d differs", ranks, i);
}

static void training_gives_the_same_bits(void **state) {
    static const setup plain = {{NULL}, 0, 0}, sequences = {{NULL}, 1, 0},
                       deferred = {{NULL}, 0, 1};
    static const setup blocks = {{"h.0", "h.1"}, 0, 0},
                       parts = {{"h.0.attn", "h.1.mlp", "ln_f"}, 0, 0};
    static const setup nested = {{"h", "h.0", "h.0.mlp", "h.1.attn"}, 0, 0};
    static const setup lookups = {{"wte", "lm_head"}, 0, 0};
    static const setup blocks_s = {{"h.0", "h.1"}, 1, 0}, blocks_d = {{"h.0", "h.1"}, 0, 1};
    static const setup *const pairs[][2] = {{&plain, &blocks},       {&plain, &parts},
                                            {&plain, &nested},       {&plain, &lookups},
                                            {&sequences, &blocks_s}, {&deferred, &blocks_d}};
    int i, p;
    (void)state;
    for (p = 0; p < COUNT(pairs); p++)
        for (i = 0; i < COUNT(ranks_degrees); i++) {
            outcome kept = {.how = pairs[p][0]}, again = {.how = pairs[p][1]};
            ranks_run(ranks_degrees[i], train, &kept);
            ranks_run(ranks_degrees[i], train, &again);
            expect_same(&kept, &again, ranks_degrees[i]);
        }
}

/* ------------------------------------------------------------------- less memory */

static tsh_tensor *deep(tsh_module *self, tsh_tensor **in, int n, void *user) {
    tsh_tensor *x = in[0];
    int i;
    (void)self, (void)n, (void)user;
    for (i = 0; i < 6; i++) x = tsh_tanh(tsh_add(x, in[0]));
    return x;
}

enum { DEEP = 8, SIDE = 64 };

static int descend(tsh_ctx *ctx, void *user) {
    const tsh_module_desc desc = {deep, NULL};
    size_t *peak = (size_t *)user;
    tsh_tensor *x = tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(SIDE, SIDE), tsh_replicated()), *y = x;
    int i;
    tsh_requires_grad(x, 1);
    for (i = 0; i < DEEP; i++) {
        char name[16];
        tsh_module *m;
        (void)snprintf(name, sizeof name, "m%d", i);
        m = tsh_add_module(tsh_root(ctx), name, &desc);
        tsh_checkpoint(m, *peak != 0);
        y = tsh_forward(m, y);
    }
    CHECK(tsh_backward(ctx, tsh_mean(y, TSH_ALL, 0)) == TSH_OK, "backward");
    CHECK(tsh_grad(x), "gradient");
    *peak = tsh_mem_stats(ctx).step_live_peak;
    return 0;
}

/* 8 modules of 12 tensors each: all of them, or 8 inputs and one module's. */
static void a_checkpoint_keeps_its_inputs_only(void **state) {
    const size_t one = SIDE * SIDE * sizeof(tsh_real);
    size_t kept = 0, again = 1;
    (void)state;
    ranks_run(1, descend, &kept);
    ranks_run(1, descend, &again);
    assert_true(kept >= 6 * DEEP * one);
    assert_true(again <= (DEEP + 16) * one);
}

/* Without gradients, what a module does not return is freed at once. */
static int infer(tsh_ctx *ctx, void *user) {
    const tsh_module_desc desc = {deep, NULL};
    size_t *peak = (size_t *)user;
    tsh_module *m = tsh_add_module(tsh_root(ctx), "m", &desc);
    tsh_tensor *x = tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(SIDE, SIDE), tsh_replicated());
    int i;
    tsh_checkpoint(m, *peak != 0);
    tsh_no_grad_begin(ctx);
    for (i = 0; i < DEEP; i++) x = tsh_forward(m, x);
    tsh_no_grad_end(ctx);
    CHECK(x, "result");
    *peak = tsh_mem_stats(ctx).step_live_peak;
    return 0;
}

static void inference_frees_what_is_not_returned(void **state) {
    const size_t one = SIDE * SIDE * sizeof(tsh_real);
    size_t kept = 0, freed = 1;
    (void)state;
    ranks_run(1, infer, &kept);
    ranks_run(1, infer, &freed);
    assert_true(kept >= 12 * DEEP * one);
    assert_true(freed <= (DEEP + 14) * one);
}

/* --------------------------------------------------------------------- the edges */

static tsh_tensor *two_inputs(tsh_module *self, tsh_tensor **in, int n, void *user) {
    int *calls = (int *)user;
    (void)self;
    ++*calls;
    return n == 2 ? tsh_transpose(tsh_mul(in[0], tsh_exp(in[1])), 0, 1) : in[0];
}

static void set(tsh_ctx *ctx, tsh_tensor *t, double first) {
    tsh_real *values = (tsh_real *)tsh_data(ctx, t);
    int64_t i;
    for (i = 0; i < tsh_numel(t); i++) values[i] = (tsh_real)(first + 0.25 * (double)i);
}

/* Views as inputs and output, an input twice, one without a gradient, and a call without any. */
static int edges(tsh_ctx *ctx, void *user) {
    int calls = 0, on;
    const tsh_module_desc desc = {two_inputs, &calls};
    tsh_module *m = tsh_add_module(tsh_root(ctx), "m", &desc);
    tsh_tensor *a = tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(4, 3), tsh_replicated());
    tsh_tensor *b = tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(2, 3), tsh_replicated());
    double want[12 + 6];
    (void)user;
    set(ctx, a, -1);
    set(ctx, b, 0.5);
    tsh_requires_grad(a, 1);
    for (on = 0; on < 2; on++) {
        tsh_tensor *in[2], *y, *z;
        double *got;
        int i;
        calls = 0;
        tsh_checkpoint(m, on);
        in[0] = tsh_slice(a, 0, 1, 2);
        in[1] = b;
        y = tsh_forward_n(m, in, 2); /* (3, 2); b gets no gradient */
        in[0] = in[1] = tsh_transpose(tsh_slice(a, 1, 0, 2), 0, 1);
        z = tsh_forward_n(m, in, 2); /* (4, 2) */
        CHECK(tsh_backward(ctx, tsh_add(tsh_sum(tsh_mul(y, y), TSH_ALL, 0),
                                        tsh_mean(z, TSH_ALL, 0))) == TSH_OK,
              "backward: %s", tsh_last_error(ctx)->message);
        CHECK(calls == (on ? 4 : 2), "%d calls", calls);
        CHECK(tsh_grad(b) == NULL, "b wants no gradient");
        CHECK((got = ranks_values(ctx, tsh_grad(a))), "a's gradient");
        for (i = 0; i < 12; i++) {
            if (!on) want[i] = got[i];
            CHECK(got[i] == want[i], "element %d: %g, not %g", i, got[i], want[i]);
        }
        free(got);
        tsh_zero_grad(a);
        (void)tsh_step_end(ctx);
    }
    calls = 0;
    tsh_no_grad_begin(ctx);
    CHECK(tsh_hash(ctx, tsh_forward(m, a)) == tsh_hash(ctx, a), "no gradients");
    CHECK(calls == 1, "%d calls", calls);
    tsh_no_grad_end(ctx);
    return 0;
}

static void views_and_inputs_without_gradients_are_taken(void **state) {
    (void)state;
    ranks_run(1, edges, NULL);
    ranks_run(3, edges, NULL);
}

/* Partial sums meet producers that take them as they are, on the way in and on the way out. */
static tsh_tensor *column(tsh_module *self, tsh_tensor **in, int n, void *user) {
    (void)n, (void)user;
    return tsh_forward(tsh_find(self, "w"), in[0]);
}

static tsh_tensor *copied(tsh_module *self, tsh_tensor **in, int n, void *user) {
    (void)self, (void)n, (void)user;
    return tsh_tp_copy(tsh_tanh(in[0]), TSH_SUM);
}

static int boundaries(tsh_ctx *ctx, void *user) {
    const tsh_module_desc inner = {column, NULL}, outer = {copied, NULL};
    const tsh_linear_desc wide = {.in = 6, .out = 10, .style = TSH_COLWISE};
    tsh_module *m = tsh_add_module(tsh_root(ctx), "m", &inner);
    tsh_module *c = tsh_add_module(tsh_root(ctx), "c", &outer);
    tsh_tensor *x = tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(3, 6), tsh_replicated());
    uint64_t want = 0, got;
    int on;
    (void)user;
    tsh_add_linear(m, "w", &wide);
    set(ctx, x, -2);
    tsh_requires_grad(x, 1);
    for (on = 0; on < 4; on++) { /* neither, the linear, the copy, both */
        tsh_tensor *y;
        tsh_checkpoint(m, on & 1);
        tsh_checkpoint(c, on >> 1);
        y = tsh_tanh(tsh_forward(m, tsh_forward(c, x)));
        y = tsh_add(tsh_sum(tsh_tp_gather(y, -1), TSH_ALL, 0), tsh_sum(x, TSH_ALL, 0));
        CHECK(tsh_backward(ctx, y) == TSH_OK, "%s", tsh_last_error(ctx)->message);
        got = tsh_hash(ctx, tsh_grad(x));
        if (!on) want = got;
        CHECK(got == want, "%d: the gradient has other bits", on);
        tsh_zero_grads(tsh_root(ctx));
        tsh_zero_grad(x);
        (void)tsh_step_end(ctx);
    }
    return 0;
}

static void gradients_are_summed_once_at_the_boundary(void **state) {
    int i;
    (void)state;
    for (i = 0; i < COUNT(ranks_degrees); i++) ranks_run(ranks_degrees[i], boundaries, NULL);
}

/* A dropout that is made by the first call, and one that belongs to another module. */
static tsh_tensor *drops(tsh_module *self, tsh_tensor **in, int n, void *user) {
    tsh_module *late = tsh_child(self, 0);
    (void)n;
    if (!late) late = tsh_add_dropout(self, "late", 0.5);
    return tsh_forward((tsh_module *)user, tsh_forward(late, tsh_tanh(in[0])));
}

static int redraw(tsh_ctx *ctx, void *user) {
    uint64_t hash[2];
    int on;
    (void)user;
    for (on = 0; on < 2; on++) {
        tsh_desc desc = {.seed = 3};
        tsh_ctx *own = NULL;
        tsh_module *shared, *m;
        tsh_module_desc as_m = {drops, NULL};
        tsh_tensor *y;
        CHECK(tsh_open(&desc, &own) == TSH_OK, "a ctx of its own");
        as_m.user = shared = tsh_add_dropout(tsh_root(own), "shared", 0.5);
        m = tsh_add_module(tsh_root(own), "m", &as_m);
        tsh_checkpoint(m, on);
        y = tsh_tensor_new(own, TSH_REAL, tsh_shape2(8, 8), tsh_replicated());
        set(own, y, -1);
        tsh_requires_grad(y, 1);
        (void)tsh_backward(own, tsh_sum(tsh_forward(m, tsh_forward(m, y)), TSH_ALL, 0));
        hash[on] = tsh_hash(own, tsh_grad(y));
        CHECK(tsh_ok(own), "%s", tsh_last_error(own)->message);
        tsh_close(own);
    }
    CHECK(hash[0] == hash[1], "other masks");
    return 0;
}

static void masks_are_drawn_again(void **state) {
    (void)state;
    ranks_run(1, redraw, NULL);
}

/* A forward that reads a step tensor that is no input, and one that fails the second time. */
typedef struct trap {
    tsh_tensor *other;
    int calls;
} trap;

static tsh_tensor *reads_another(tsh_module *self, tsh_tensor **in, int n, void *user) {
    trap *t = (trap *)user;
    (void)self, (void)n;
    return tsh_add(in[0], t->other);
}

static tsh_tensor *fails_later(tsh_module *self, tsh_tensor **in, int n, void *user) {
    trap *t = (trap *)user;
    (void)n;
    if (t->calls++) {
        (void)tsh_fail(tsh_ctx_of(in[0]), TSH_ERR_ABORTED, "the second call of %s fails",
                       tsh_module_path(self));
        return NULL;
    }
    return tsh_tanh(in[0]);
}

static int trapped(tsh_ctx *ctx, void *user) {
    trap t = {NULL, 0};
    const tsh_result wants[] = {TSH_ERR_STALE, TSH_ERR_ABORTED, TSH_ERR_STATE};
    const tsh_result want = wants[*(int *)user];
    const tsh_module_desc desc = {*(int *)user == 1 ? fails_later : reads_another, &t};
    tsh_module *m = tsh_add_module(tsh_root(ctx), "m", &desc);
    tsh_tensor *x = tsh_tensor_new(ctx, TSH_REAL, tsh_shape1(5), tsh_replicated());
    tsh_requires_grad(x, 1);
    t.other = tsh_scale(x, 2);
    if (*(int *)user == 2) tsh_retain_grad(t.other);
    tsh_checkpoint(m, 1);
    CHECK(tsh_backward(ctx, tsh_sum(tsh_forward(m, x), TSH_ALL, 0)) == want, "%s",
          tsh_last_error(ctx)->message);
    tsh_clear_error(ctx);
    (void)tsh_step_end(ctx);
    CHECK(tsh_mem_stats(ctx).step_live == 0, "%zu bytes are left", tsh_mem_stats(ctx).step_live);
    return 0;
}

/* An all-gather takes partial gradients as they are, but not where its output is retained. */
static tsh_tensor *gathers_and_retains(tsh_module *self, tsh_tensor **in, int n, void *user) {
    (void)self, (void)n, (void)user;
    return tsh_retain_grad(tsh_full_tensor(in[0]));
}

static int retained(tsh_ctx *ctx, void *user) {
    const tsh_module_desc desc = {gathers_and_retains, NULL};
    const tsh_linear_desc up = {.in = 2, .out = 4, .style = TSH_COLWISE};
    const tsh_layout cut = tsh_sharded(0);
    tsh_module *m = tsh_add_module(tsh_root(ctx), "m", &desc);
    tsh_module *lin = tsh_add_linear(tsh_root(ctx), "up", &up);
    tsh_tensor *x = tsh_keep(tsh_randn(ctx, tsh_shape2(4, 2))), *y;
    uint64_t hash[2];
    int i;
    (void)user;
    tsh_requires_grad(x, 1);
    for (i = 0; i < 2; i++) {
        tsh_checkpoint(m, i);
        y = tsh_forward(lin, tsh_forward(m, tsh_redistribute(x, cut)));
        CHECK(tsh_backward(ctx, tsh_sum(tsh_full_tensor(y), TSH_ALL, 0)) == TSH_OK, "backward");
        hash[i] = tsh_hash(ctx, tsh_grad(x));
        tsh_zero_grad(x);
        (void)tsh_step_end(ctx);
    }
    CHECK(hash[0] == hash[1], "the gradient of a checkpoint's input");
    CHECK_OK();
    return 0;
}

static void what_a_checkpoint_retains_is_completed(void **state) {
    (void)state;
    ranks_run(2, retained, NULL);
}

static void what_cannot_be_computed_again_is_an_error(void **state) {
    int fails;
    (void)state;
    for (fails = 0; fails < 3; fails++) ranks_run(1, trapped, &fails);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(training_gives_the_same_bits),
        cmocka_unit_test(a_checkpoint_keeps_its_inputs_only),
        cmocka_unit_test(inference_frees_what_is_not_returned),
        cmocka_unit_test(views_and_inputs_without_gradients_are_taken),
        cmocka_unit_test(gradients_are_summed_once_at_the_boundary),
        cmocka_unit_test(masks_are_drawn_again),
        cmocka_unit_test(what_a_checkpoint_retains_is_completed),
        cmocka_unit_test(what_cannot_be_computed_again_is_an_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
