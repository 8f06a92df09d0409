/* For test_added.py: checks tsh_swiglu(a, b) = silu(a) b, which the patch of examples/README.md
 * adds to the header: values, gradients, and layouts on two ranks against the ops that it equals.
 */
#include "check.h"

/* Central differences in double with step 1e-5: see test_gradcheck.c. */
static const double room = 6e-9;

static tsh_tensor *leaf(tsh_ctx *ctx, int64_t rows, int64_t columns) {
    return tsh_requires_grad(tsh_keep(tsh_randn(ctx, tsh_shape2(rows, columns))), 1);
}

/* Every element counts differently. */
static tsh_tensor *weighed(tsh_tensor *y) {
    tsh_ctx *ctx = tsh_ctx_of(y);
    tsh_tensor *w = tsh_arange(ctx, TSH_REAL, 1, 1 + (double)tsh_numel(y), 1);
    return tsh_sum(tsh_mul(tsh_full_tensor(y), tsh_reshape(w, tsh_shape_of(y))), TSH_ALL, 0);
}

static tsh_tensor *loss(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {
    (void)ctx, (void)n, (void)user;
    return weighed(tsh_swiglu(in[0], in[1]));
}

static int gradients(tsh_ctx *ctx, void *user) {
    tsh_tensor *in[2];
    int i;
    (void)user;
    for (i = 0; i < 2; i++) { /* the same shapes; b broadcast */
        in[0] = leaf(ctx, 3, 4);
        in[1] = leaf(ctx, i ? 1 : 3, 4);
        CHECK(tsh_gradcheck(ctx, loss, in, 2, NULL, 0, 0) <= room && tsh_ok(ctx));
    }
    return 0;
}

/* The largest difference between two tensors that are replicated; infinite where shapes differ. */
static double apart(tsh_ctx *ctx, tsh_tensor *x, tsh_tensor *y) {
    const tsh_real *a = (const tsh_real *)tsh_data(ctx, x), *b = (const tsh_real *)tsh_data(ctx, y);
    double most = 0;
    int64_t i;
    if (!a || !b || tsh_numel(x) != tsh_numel(y)) return HUGE_VAL;
    for (i = 0; i < tsh_numel(x); i++)
        if (!(fabs(a[i] - b[i]) <= most)) most = fabs(a[i] - b[i]);
    return most;
}

/* b is sharded as a, or has length 1 where a is sharded: then its gradient is a partial sum. */
static int layouts(tsh_ctx *ctx, void *user) {
    const tsh_layout cut = tsh_sharded(1), sum = tsh_partial();
    tsh_tensor *grad[2], *a = NULL, *b, *y, *z;
    int i;
    (void)user;
    for (i = 0; i < 2; i++) {
        a = leaf(ctx, 3, 5);
        b = leaf(ctx, 3, i ? 1 : 5);
        y = tsh_retain_grad(tsh_mul(tsh_silu(a), b));
        CHECK(tsh_backward(ctx, weighed(y)) == TSH_OK);
        grad[0] = tsh_keep(tsh_grad(a));
        grad[1] = tsh_keep(tsh_grad(b));
        y = tsh_keep(y);
        tsh_zero_grad(a);
        tsh_zero_grad(b);
        z = tsh_swiglu(tsh_redistribute(a, cut), i ? b : tsh_redistribute(b, cut));
        CHECK(tsh_layout_of(z).kind == TSH_SHARDED && tsh_layout_of(z).dim == 1);
        z = tsh_retain_grad(tsh_full_tensor(z));
        CHECK(tsh_backward(ctx, weighed(z)) == TSH_OK);
        CHECK(apart(ctx, y, z) <= 1e-14);
        CHECK(apart(ctx, grad[0], tsh_grad(a)) <= 1e-13);
        CHECK(apart(ctx, grad[1], tsh_grad(b)) <= 1e-13);
    }
    (void)tsh_barrier(tsh_world(ctx));
    CHECK(!tsh_swiglu(tsh_set_layout(tsh_ones(ctx, tsh_shape2(2, 2)), sum), a));
    CHECK(strstr(tsh_last_error(ctx)->message, "tsh_swiglu: "));
    tsh_clear_error(ctx);
    CHECK(!tsh_swiglu(tsh_set_layout(tsh_ones(ctx, tsh_shape2(3, 5)), sum), a));
    CHECK(strstr(tsh_last_error(ctx)->message, "complete the partial sum first"));
    tsh_clear_error(ctx);
    return 0;
}

int main(void) {
    const tsh_desc desc = {.logger.log = tsh_log_stderr};
    return tsh_run(&desc, gradients, NULL) || tsh_threads_run(2, &desc, layouts, NULL);
}
