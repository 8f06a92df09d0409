/* tsh_custom_op with several outputs, of several dtypes: against the same composed of ops, on one
 * rank and on several, whichever of the outputs the loss depends on. */
/* build: double */
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"

/* What the op's backward has seen: bit k: output k had a gradient. */
typedef struct seen {
    unsigned gradients;
    int calls;
} seen;

/* x -> 2 x, x^2, and the number of each element's integer part as i64. */
static void three_forward(tsh_tensor *const *in, int n, void *const *out, void *user) {
    const tsh_real *x = (const tsh_real *)tsh_data(tsh_ctx_of(in[0]), in[0]);
    tsh_real *twice = (tsh_real *)out[0], *square = (tsh_real *)out[1];
    int64_t *whole = (int64_t *)out[2];
    (void)n, (void)user;
    for (int64_t i = 0; i < tsh_local_numel(in[0]); i++) {
        twice[i] = 2 * x[i];
        square[i] = x[i] * x[i];
        whole[i] = (int64_t)x[i];
    }
}

static void three_backward(tsh_tensor *const *in, int n, const void *const *out,
                           const tsh_real *const *grad_out, tsh_real *const *grad_in, void *user) {
    const tsh_real *twice = (const tsh_real *)out[0], *square = (const tsh_real *)out[1];
    const int64_t *whole = (const int64_t *)out[2];
    seen *s = (seen *)user;
    (void)n;
    s->calls++;
    s->gradients = 0;
    for (int k = 0; k < 3; k++)
        if (grad_out[k]) s->gradients |= 1u << k;
    for (int64_t i = 0; i < tsh_local_numel(in[0]); i++) {
        if (square[i] * 4 != twice[i] * twice[i] || whole[i] != (int64_t)(twice[i] / 2))
            s->gradients |= 1u << 31; /* the saved outputs are not what forward wrote */
        if (grad_out[0]) grad_in[0][i] += 2 * grad_out[0][i];
        if (grad_out[1]) grad_in[0][i] += twice[i] * grad_out[1][i];
    }
}

static tsh_custom_op_desc three_desc(tsh_tensor *x, seen *s) {
    tsh_custom_op_desc desc = {.name = "three", .outputs = 3, .user = s, .forward = three_forward,
                               .backward = three_backward};
    for (int k = 0; k < 3; k++) {
        desc.out[k].shape = tsh_shape_of(x);
        desc.out[k].layout = tsh_layout_of(x);
    }
    desc.out[2].dtype = TSH_I64;
    return desc;
}

/* A leaf (6, 4) of small integers, whose products and sums are exact. */
static tsh_tensor *small_leaf(tsh_ctx *ctx, tsh_layout layout) {
    tsh_tensor *x = tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(6, 4), layout);
    tsh_real values[24];
    for (int i = 0; i < 24; i++) values[i] = (tsh_real)((i * 7 + 3) % 5 - 2);
    (void)tsh_write(ctx, x, TSH_GLOBAL, values, sizeof values);
    return tsh_requires_grad(x, 1);
}

/* The loss of outputs a and b, of which `uses` says which count (bit 0: a, bit 1: b): each goes
 * through a column-parallel linear, so that its gradient is a partial sum. */
static tsh_tensor *loss_of(tsh_ctx *ctx, tsh_tensor *a, tsh_tensor *b, unsigned uses) {
    tsh_tensor *w = tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(5, 4), tsh_sharded(0)), *loss = NULL;
    tsh_tensor *y[2];
    tsh_real values[20];
    for (int i = 0; i < 20; i++) values[i] = (tsh_real)((i * 3 + 1) % 7 - 3);
    (void)tsh_write(ctx, w, TSH_GLOBAL, values, sizeof values);
    y[0] = a;
    y[1] = tsh_scale(b, 3);
    for (int k = 0; k < 2; k++) {
        tsh_tensor *all = tsh_redistribute(y[k], tsh_replicated()), *sum;
        if (!(uses >> k & 1u)) continue;
        sum = tsh_sum(tsh_redistribute(tsh_linear(all, w, NULL), tsh_replicated()), TSH_ALL, 0);
        loss = loss ? tsh_add(loss, sum) : sum;
    }
    return loss;
}

typedef struct run {
    tsh_layout layout;
    unsigned uses;
} run;

static int as_composed(tsh_ctx *ctx, void *user) {
    const run *r = (const run *)user;
    seen s = {0, 0};
    tsh_real want[24], got[24];
    tsh_tensor *x = small_leaf(ctx, r->layout), *out[3];
    tsh_custom_op_desc desc = three_desc(x, &s);
    CHECK_TRUE(tsh_backward(ctx, loss_of(ctx, tsh_scale(x, 2), tsh_mul(x, x), r->uses)) == TSH_OK);
    CHECK_TRUE(tsh_read(ctx, tsh_grad(x), TSH_GLOBAL, want, sizeof want) == TSH_OK);
    tsh_zero_grad(x);
    (void)tsh_step_end(ctx);
    CHECK_TRUE(tsh_custom_op(ctx, &x, 1, out, &desc) == out[0] && out[0]);
    CHECK_TRUE(tsh_dtype_of(out[2]) == TSH_I64 && tsh_dtype_of(out[1]) == TSH_REAL);
    CHECK_TRUE(tsh_backward(ctx, loss_of(ctx, out[0], out[1], r->uses)) == TSH_OK);
    CHECK(s.calls == 1 && s.gradients == r->uses, "%d calls, gradients %x", s.calls, s.gradients);
    CHECK_TRUE(tsh_read(ctx, tsh_grad(x), TSH_GLOBAL, got, sizeof got) == TSH_OK);
    for (int i = 0; i < 24; i++)
        CHECK(want[i] == got[i], "element %d: %g, not %g", i, (double)got[i], (double)want[i]);
    return 0;
}

static void gradients_are_those_of_composed_ops(void **state) {
    (void)state;
    for (int i = 0; i < COUNT(ranks_degrees); i++)
        for (unsigned uses = 1; uses < 4; uses++)
            for (int dim = -1; dim < 2; dim++) {
                run r = {dim < 0 ? tsh_replicated() : tsh_sharded(dim), uses};
                ranks_run(ranks_degrees[i], as_composed, &r);
            }
}

/* Retained outputs keep their gradients; without a backward everything is given back at the end of
 * the step; no gradient flows through integers. */
static int lifetimes(tsh_ctx *ctx, void *user) {
    seen s = {0, 0};
    tsh_real got[24];
    tsh_tensor *x = small_leaf(ctx, tsh_replicated()), *out[3];
    tsh_custom_op_desc desc = three_desc(x, &s);
    (void)user;
    (void)tsh_custom_op(ctx, &x, 1, out, &desc);
    (void)tsh_step_end(ctx);
    (void)tsh_custom_op(ctx, &x, 1, out, &desc);
    tsh_retain_grad(out[1]);
    CHECK_TRUE(tsh_backward(ctx, tsh_sum(tsh_mul(out[1], out[1]), TSH_ALL, 0)) == TSH_OK);
    CHECK_TRUE(tsh_read(ctx, tsh_grad(out[1]), TSH_GLOBAL, got, sizeof got) == TSH_OK);
    CHECK_TRUE(got[0] == 2 * (tsh_real)(1 * 1) && !tsh_grad(out[0]));
    (void)tsh_step_end(ctx);
    tsh_no_grad_begin(ctx);
    CHECK_TRUE(tsh_custom_op(ctx, &x, 1, NULL, &desc));
    tsh_no_grad_end(ctx);
    (void)tsh_barrier(tsh_world(ctx)); /* all are here before one fails */
    (void)tsh_custom_op(ctx, &x, 1, out, &desc);
    CHECK_TRUE(tsh_backward(ctx, tsh_sum(tsh_cast(out[2], TSH_REAL), TSH_ALL, 0)) != TSH_OK);
    CHECK_SAYS(TSH_ERR_STATE, "does not depend on any tensor");
    return 0;
}

static void outputs_live_as_others_do(void **state) {
    (void)state;
    ranks_run(1, lifetimes, NULL);
    ranks_run(3, lifetimes, NULL);
}

/* Outputs of a smaller dtype are rounded, and their gradients come through the rounding. */
static int dtypes(tsh_ctx *ctx, void *user) {
    seen s = {0, 0};
    char text[80];
    const char *real_text = sizeof(tsh_real) == 8 ? "f64 (2) R: 2 2" : "f32 (2) R: 2 2";
    tsh_tensor *x = tsh_requires_grad(tsh_keep(tsh_full(ctx, tsh_shape1(2), 1.0 + 1.0 / 512)), 1);
    tsh_tensor *out[3];
    tsh_custom_op_desc desc = three_desc(x, &s);
    (void)user;
    desc.out[0].dtype = TSH_BF16;
    desc.out[1].dtype = TSH_F16;
    CHECK_TRUE(tsh_custom_op(ctx, &x, 1, out, &desc));
    CHECK_TRUE(tsh_dtype_of(out[0]) == TSH_BF16 && tsh_dtype_of(out[1]) == TSH_F16);
    CHECK(strcmp(tsh_to_string(out[0], text, sizeof text), "bf16 (2) R: 2 2") == 0, "%s", text);
    CHECK_TRUE(tsh_backward(ctx, tsh_sum(tsh_cast(out[0], TSH_REAL), TSH_ALL, 0)) == TSH_OK);
    CHECK(strcmp(tsh_to_string(tsh_grad(x), text, sizeof text), real_text) == 0, "%s", text);
    CHECK_TRUE(s.gradients == 1u);
    return 0;
}

static void outputs_have_any_dtype(void **state) {
    (void)state;
    ranks_run(1, dtypes, NULL);
    ranks_run(2, dtypes, NULL);
}

static void nan_forward(tsh_tensor *const *in, int n, void *const *out, void *user) {
    three_forward(in, n, out, user);
    ((tsh_real *)out[1])[1] = (tsh_real)NAN;
}

static int refusals(tsh_ctx *ctx, void *user) {
    seen s = {0, 0};
    tsh_tensor *x = small_leaf(ctx, tsh_replicated()), *out[9] = {0};
    tsh_custom_op_desc desc = three_desc(x, &s);
    (void)user;
    desc.outputs = 9;
    out[0] = x;
    CHECK_TRUE(!tsh_custom_op(ctx, &x, 1, out, &desc) && !out[0]);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "three: 9 outputs; it may have 1 to 8");
    desc.outputs = -1;
    CHECK_TRUE(!tsh_custom_op(ctx, &x, 1, out, &desc));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "three: -1 outputs");
    desc.outputs = 3;
    desc.out[1].dtype = (tsh_dtype)99;
    CHECK_TRUE(!tsh_custom_op(ctx, &x, 1, out, &desc));
    CHECK_SAYS(TSH_ERR_DTYPE, "three: output 1: takes");
    desc.out[1].dtype = TSH_Q8_0;
    CHECK_TRUE(!tsh_custom_op(ctx, &x, 1, out, &desc));
    CHECK_SAYS(TSH_ERR_DTYPE, "three: output 1: takes");
    desc.out[1].dtype = TSH_DTYPE_DEFAULT;
    tsh_detect_anomaly(ctx, 1);
    desc.forward = nan_forward;
    (void)tsh_custom_op(ctx, &x, 1, out, &desc);
    CHECK_SAYS(TSH_ERR_ANOMALY, "three: the output (6, 4) R has NaN at (0, 1)");
    CHECK_TRUE(s.calls == 0);
    return 0;
}

static void what_is_refused(void **state) {
    (void)state;
    ranks_run(1, refusals, NULL);
}

static int dumped(tsh_ctx *ctx, void *user) {
    seen s = {0, 0};
    char text[200] = "";
    tsh_tensor *x = small_leaf(ctx, tsh_replicated());
    tsh_custom_op_desc desc = three_desc(x, &s);
    const char *want = sizeof(tsh_real) == 8
                           ? ") = (6, 4) R, (6, 4) R, (6, 4) R; saves input0 output, 768 bytes"
                           : ") = (6, 4) R, (6, 4) R, (6, 4) R; saves input0 output, 480 bytes";
    FILE *file = tmpfile();
    (void)user;
    CHECK_TRUE(file && tsh_custom_op(ctx, &x, 1, NULL, &desc));
    CHECK_TRUE(tsh_tape_dump(ctx, file) == TSH_OK);
    rewind(file);
    CHECK_TRUE(fgets(text, sizeof text, file));
    (void)fclose(file);
    CHECK(strstr(text, want), "%s", text);
    return 0;
}

static void a_dump_shows_all_outputs(void **state) {
    (void)state;
    ranks_run(1, dumped, NULL);
}

static tsh_tensor *both_outputs(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {
    tsh_tensor *out[3];
    tsh_custom_op_desc desc = three_desc(in[0], (seen *)user);
    (void)n;
    if (!tsh_custom_op(ctx, in, 1, out, &desc)) return NULL;
    return tsh_sum(tsh_mul(out[0], tsh_tanh(out[1])), TSH_ALL, 0);
}

static int differences(tsh_ctx *ctx, void *user) {
    seen s = {0, 0};
    tsh_tensor *x = tsh_requires_grad(tsh_keep(tsh_arange(ctx, TSH_REAL, 0.3, 2.2, 0.5)), 1);
    double worst = tsh_gradcheck(ctx, both_outputs, &x, 1, &s, 0, 0);
    (void)user;
    CHECK(worst >= 0 && worst < (sizeof(tsh_real) == 8 ? 1e-8 : 1e-2), "off by %g", worst);
    return 0;
}

static void gradients_are_central_differences(void **state) {
    (void)state;
    ranks_run(1, differences, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_are_those_of_composed_ops),
        cmocka_unit_test(outputs_live_as_others_do),
        cmocka_unit_test(outputs_have_any_dtype),
        cmocka_unit_test(what_is_refused),
        cmocka_unit_test(a_dump_shows_all_outputs),
        cmocka_unit_test(gradients_are_central_differences),
    };
    return cmocka_run_group_tests_name("op/custom", tests, NULL, NULL);
}
