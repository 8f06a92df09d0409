/* Elementwise ops and reductions that stand beside those of test_golden and test_layouts: values
 * and gradients against PyTorch, also of infinities, NaN, ties and strided inputs, by the kernels
 * of every instruction set; in 16 bits; against finite differences; in every layout and degree;
 * errors of functions in ulps; empty inputs; what must be refused, with its sentence. */
/* build: double nosimd */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/golden.h"
#include "../support/library.h"
#include "../support/ranks.h"

#include <float.h>

/* ------------------------------------------------------------- the ops, by name */

static const double nothing = (double)NAN, far_away = (double)INFINITY;

/* UNARY: of one tensor, the same element by element. REDUCE: along dimension d. */
#define UNARY_OPS(X)                                                                               \
    X(abs, tsh_abs(x))                                                                             \
    X(sign, tsh_sign(x))                                                                           \
    X(sin, tsh_sin(x))                                                                             \
    X(cos, tsh_cos(x))                                                                             \
    X(floor, tsh_floor(x))                                                                         \
    X(ceil, tsh_ceil(x))                                                                           \
    X(round, tsh_round(x))                                                                         \
    X(rsqrt, tsh_rsqrt(x))                                                                         \
    X(reciprocal, tsh_reciprocal(x))                                                               \
    X(log1p, tsh_log1p(x))                                                                         \
    X(expm1, tsh_expm1(x))                                                                         \
    X(softplus, tsh_softplus(x, 0))                                                                \
    X(softplus_beta, tsh_softplus(x, 2.5))                                                         \
    X(elu, tsh_elu(x, 0))                                                                          \
    X(elu_alpha, tsh_elu(x, -0.7))                                                                 \
    X(leaky_relu, tsh_leaky_relu(x, 0))                                                            \
    X(leaky_relu_slope, tsh_leaky_relu(x, 0.3))                                                    \
    X(leaky_relu_zero, tsh_leaky_relu(x, TSH_ZERO))                                                \
    X(selu, tsh_selu(x))                                                                           \
    X(mish, tsh_mish(x))                                                                           \
    X(relu6, tsh_relu6(x))                                                                         \
    X(hardsigmoid, tsh_hardsigmoid(x))                                                             \
    X(hardswish, tsh_hardswish(x))                                                                 \
    X(log_sigmoid, tsh_log_sigmoid(x))                                                             \
    X(clamp, tsh_clamp(x, -1.5, 2.5))                                                              \
    X(clamp_min, tsh_clamp(x, 0.5, nothing))                                                       \
    X(clamp_max, tsh_clamp(x, nothing, 0))                                                         \
    X(clamp_crossed, tsh_clamp(x, 2.5, -1.5))
#define REDUCE_OPS(X)                                                                              \
    X(min, tsh_min(x, d, keep))                                                                    \
    X(argmin, tsh_argmin(x, d, keep))                                                              \
    X(logsumexp, tsh_logsumexp(x, d, keep))                                                        \
    X(var, tsh_var(x, d, 0, keep))                                                                 \
    X(var_zero, tsh_var(x, d, TSH_ZERO, keep))                                                     \
    X(var_three, tsh_var(x, d, 3, keep))                                                           \
    X(std, tsh_std(x, d, 0, keep))                                                                 \
    X(norm_0, tsh_norm(x, TSH_ZERO, d, keep))                                                      \
    X(norm_half, tsh_norm(x, 0.5, d, keep))                                                        \
    X(norm_1, tsh_norm(x, 1, d, keep))                                                             \
    X(norm_3_2, tsh_norm(x, 1.5, d, keep))                                                         \
    X(norm_2, tsh_norm(x, 0, d, keep))                                                             \
    X(norm_3, tsh_norm(x, 3, d, keep))                                                             \
    X(norm_minus, tsh_norm(x, -1, d, keep))                                                        \
    X(norm_inf, tsh_norm(x, far_away, d, keep))                                                    \
    X(norm_least, tsh_norm(x, -far_away, d, keep))                                                 \
    X(prod, tsh_prod(x, d, keep))

#define DEFINE_UNARY(name, call)                                                                   \
    static tsh_tensor *do_##name(tsh_tensor *x) {                                                  \
        return call;                                                                               \
    }
#define DEFINE_REDUCE(name, call)                                                                  \
    static tsh_tensor *do_##name(tsh_tensor *x, int d, int keep) {                                 \
        return call;                                                                               \
    }
UNARY_OPS(DEFINE_UNARY)
REDUCE_OPS(DEFINE_REDUCE)

typedef struct unary_op {
    const char *name;
    tsh_tensor *(*fn)(tsh_tensor *x);
} unary_op;

typedef struct reduce_op {
    const char *name;
    tsh_tensor *(*fn)(tsh_tensor *x, int d, int keep);
} reduce_op;

#define ROW(name, call) {#name, do_##name},
static const unary_op unary_ops[] = {UNARY_OPS(ROW)};
static const reduce_op reduce_ops[] = {REDUCE_OPS(ROW)};

/* Runs an op by its name; NULL if there is none of this name. */
static tsh_tensor *by_name(const char *name, tsh_tensor *x, int d, int keep) {
    int i;
    for (i = 0; i < COUNT(unary_ops); i++)
        if (strcmp(unary_ops[i].name, name) == 0) return unary_ops[i].fn(x);
    for (i = 0; i < COUNT(reduce_ops); i++)
        if (strcmp(reduce_ops[i].name, name) == 0) return reduce_ops[i].fn(x, d, keep);
    if (strcmp("cumsum", name) == 0) return tsh_cumsum(x, d);
    if (strcmp("max", name) == 0) return tsh_max(x, d, keep);
    return NULL;
}

/* -------------------------------------------------------------------- PyTorch */

static int test_isa; /* the kernels that are tested now */

static tsh_ctx *open_ctx(void) {
    tsh_ctx *ctx;
    assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
    library_set_isa(ctx, test_isa);
    return ctx;
}

/* Compares t with a golden tensor: within k roundings of float, relative to 1 + |value|. */
static void compare(tsh_ctx *ctx, const char *name, const char *what, tsh_tensor *t,
                    const golden_tensor *want, double k) {
    double *got;
    int64_t i;
    /* x - mean of values near 1000 is off by half an ulp of the mean: 3e-5 */
    if (strcmp(name, "var_far") == 0 || strcmp(name, "std_far") == 0) k = 600;
    if (!t || !tsh_ok(ctx)) fail_msg("%s.%s: %s", name, what, tsh_last_error(ctx)->message);
    assert_int_equal(tsh_ndim(t), want->shape.ndim);
    for (i = 0; i < want->shape.ndim; i++)
        assert_int_equal(tsh_size(t, (int)i), want->shape.dim[i]);
    assert_int_equal(tsh_dtype_of(t), want->dtype == TSH_I64 ? TSH_I64 : TSH_REAL);
    got = ranks_values(ctx, t);
    assert_non_null(got);
    for (i = 0; i < want->count; i++) {
        const double a = got[i], b = want->dtype == TSH_I64
                                         ? (double)((const int64_t *)want->data)[i]
                                         : (double)((const float *)want->data)[i];
        if (!(a == b || (isnan(a) && isnan(b)) ||
              fabs(a - b) <= k * (double)FLT_EPSILON * (1 + fabs(b))))
            fail_msg("%s.%s[%ld] is %.9g, not %.9g", name, what, (long)i, a, b);
    }
    free(got);
}

typedef tsh_tensor *(*golden_fn)(const char *name, tsh_tensor **in, int d, int keep);

/* Runs fn on the inputs of a case and compares its value and gradients. turned 1: each input of two
 * dimensions or more is a transposed view of a leaf that holds its transpose. */
static void run_case(const golden_file *file, const char *name, const char *op, golden_fn fn, int d,
                     int keep, int turned) {
    tsh_ctx *ctx = open_ctx();
    golden_tensor g;
    tsh_tensor *in[2] = {NULL, NULL}, *leaf[2] = {NULL, NULL}, *out, *grad;
    char what[16];
    int i, n;
    for (n = 0; n < 2; n++) {
        (void)snprintf(what, sizeof what, "in%d", n);
        if (!golden_find(file, name, what, &g)) break;
        leaf[n] = golden_load(ctx, &g);
        if (turned && tsh_ndim(leaf[n]) > 1) leaf[n] = tsh_keep(tsh_transpose(leaf[n], 0, -1));
        if (g.dtype == TSH_F32) tsh_requires_grad(leaf[n], 1);
        in[n] = turned && tsh_ndim(leaf[n]) > 1 ? tsh_transpose(leaf[n], 0, -1) : leaf[n];
    }
    assert_true(n > 0);
    out = fn(op, in, d, keep);
    g = golden_get(file, name, "out");
    compare(ctx, name, "out", out, &g, 16);
    if (golden_find(file, name, "w", &g)) {
        if (tsh_backward(ctx, tsh_sum(tsh_mul(out, golden_load(ctx, &g)), TSH_ALL, 0)) != TSH_OK)
            fail_msg("%s: %s", name, tsh_last_error(ctx)->message);
        for (i = 0; i < n; i++) {
            (void)snprintf(what, sizeof what, "grad%d", i);
            if (!golden_find(file, name, what, &g)) continue;
            grad = tsh_grad(leaf[i]);
            if (turned && tsh_ndim(grad) > 1) grad = tsh_transpose(grad, 0, -1);
            compare(ctx, name, what, grad, &g, 16);
        }
    }
    tsh_close(ctx);
}

static tsh_tensor *run_one(const char *name, tsh_tensor **in, int d, int keep) {
    return by_name(name, in[0], d, keep);
}

static tsh_tensor *run_two(const char *name, tsh_tensor **in, int d, int keep) {
    (void)d, (void)keep;
    if (strcmp(name, "fill 0.75") == 0) return tsh_masked_fill(in[0], in[1], 0.75);
    if (strcmp(name, "fill -inf") == 0) return tsh_masked_fill(in[0], in[1], -far_away);
    if (strcmp(name, "fill 2") == 0) return tsh_masked_fill(in[0], in[1], 2);
    return strcmp(name, "maximum") == 0 ? tsh_maximum(in[0], in[1]) : tsh_minimum(in[0], in[1]);
}

static void run_reductions(const golden_file *file, int turned) {
    char name[64];
    int i;
    for (i = 0; i < COUNT(reduce_ops); i++) {
        const char *op = reduce_ops[i].name;
        run_case(file, op, op, run_one, 1, 0, turned);
        (void)snprintf(name, sizeof name, "%s_keep", op);
        run_case(file, name, op, run_one, -1, 1, turned);
        (void)snprintf(name, sizeof name, "%s_edges", op);
        run_case(file, name, op, run_one, 1, 0, turned);
        if (strcmp(op, "min") == 0 || strcmp(op, "argmin") == 0) continue;
        (void)snprintf(name, sizeof name, "%s_all", op);
        run_case(file, name, op, run_one, TSH_ALL, 0, turned);
        if (strcmp(op, "var") != 0 && strcmp(op, "std") != 0) continue;
        (void)snprintf(name, sizeof name, "%s_one", op);
        run_case(file, name, op, run_one, 1, 0, turned);
        (void)snprintf(name, sizeof name, "%s_same", op);
        run_case(file, name, op, run_one, 1, 0, turned);
        (void)snprintf(name, sizeof name, "%s_far", op);
        run_case(file, name, op, run_one, 1, 0, turned);
    }
}

static void values_and_gradients_are_those_of_pytorch(void **state) {
    golden_file file = golden_open("elementwise");
    int i, turned;
    (void)state;
    for (turned = 0; turned < 2; turned++) {
        for (i = 0; i < COUNT(unary_ops); i++)
            run_case(&file, unary_ops[i].name, unary_ops[i].name, run_one, 0, 0, turned);
        run_case(&file, "sin_far", "sin", run_one, 0, 0, turned);
        run_case(&file, "cos_far", "cos", run_one, 0, 0, turned);
        run_case(&file, "maximum", "maximum", run_two, 0, 0, turned);
        run_case(&file, "maximum_row", "maximum", run_two, 0, 0, turned);
        run_case(&file, "maximum_column", "maximum", run_two, 0, 0, turned);
        run_case(&file, "minimum", "minimum", run_two, 0, 0, turned);
        run_case(&file, "minimum_row", "minimum", run_two, 0, 0, turned);
        run_case(&file, "minimum_column", "minimum", run_two, 0, 0, turned);
        run_case(&file, "masked_fill", "fill 0.75", run_two, 0, 0, turned);
        run_case(&file, "masked_fill_row", "fill -inf", run_two, 0, 0, turned);
        run_case(&file, "masked_fill_wide", "fill 2", run_two, 0, 0, turned);
        run_reductions(&file, turned);
        run_case(&file, "cumsum", "cumsum", run_one, 1, 0, turned);
        run_case(&file, "cumsum_last", "cumsum", run_one, -1, 0, turned);
        run_case(&file, "cumsum_first", "cumsum", run_one, 0, 0, turned);
        run_case(&file, "cumsum_edges", "cumsum", run_one, 1, 0, turned);
        run_case(&file, "cumsum_integers", "cumsum", run_one, 0, 0, turned);
    }
    golden_finish(&file);
}

/* ------------------------------------------------------------- errors in ulps */

/* The distance of a float from the exact value, in units of the last place of a float there. */
static double ulps(double got, double want) {
    int exponent;
    if (got == want) return 0;
    (void)frexp(fabs(want) < (double)FLT_MIN ? (double)FLT_MIN : want, &exponent);
    return fabs(got - want) / ldexp(1, exponent - 24);
}

/* expm1 and log1p are within 2 ulps, sin and cos, too, of numbers of any size, and zeros keep their
 * sign. */
static void functions_are_accurate(void **state) {
    static const struct {
        tsh_tensor *(*fn)(tsh_tensor *x);
        double (*exact)(double x);
        double low, high; /* exponents of the samples to base 10 */
    } functions[] = {{tsh_expm1, expm1, -12, 1.9},
                     {tsh_log1p, log1p, -12, 38},
                     {tsh_sin, sin, -12, 38},
                     {tsh_cos, cos, -12, 38}};
    enum { N = 20000 };
    tsh_ctx *ctx = open_ctx();
    tsh_tensor *x = tsh_zeros(ctx, tsh_shape1(N)), *y;
    tsh_real *in = (tsh_real *)tsh_data(ctx, x), *out;
    int f, i;
    (void)state;
    for (f = 0; f < COUNT(functions); f++) {
        for (i = 0; i < N; i++) {
            const double part = (double)(ranks_mix(5, (uint64_t)i) % 1000003) / 1000003;
            const double size = pow(10, functions[f].low +
                                            part * (functions[f].high - functions[f].low));
            const double least = functions[f].exact == log1p && size >= 1 ? 0.99999 : size;
            in[i] = (tsh_real)(float)(i % 2 ? size : -least);
        }
        in[0] = 0;
        in[1] = (tsh_real)-0.0;
        y = functions[f].fn(x);
        out = (tsh_real *)tsh_data(ctx, y);
        assert_non_null(out);
        for (i = 0; i < N; i++) {
            const double want = functions[f].exact((double)in[i]);
            if (!(ulps((double)out[i], want) <= 2))
                fail_msg("function %d of %.9g is %.9g, not %.9g", f, (double)in[i], (double)out[i],
                         want);
        }
        assert_true(!signbit((double)out[0]));
        assert_true(!signbit((double)out[1]) == (functions[f].exact == cos));
    }
    tsh_close(ctx);
}

/* ------------------------------------------------------------------- 16 bits */

/* What an op gives for a 16-bit input is what it gives for the same values in tsh_real, rounded
 * once; its gradient is that, too, if backward does not read the rounded output. */
static void sixteen_bits_are_rounded_once(tsh_ctx *ctx, const char *op, tsh_dtype dtype) {
    tsh_tensor *leaf = tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(3, 50), tsh_replicated());
    tsh_tensor *half, *exact, *y, *z, *w;
    tsh_real *values = (tsh_real *)tsh_data(ctx, leaf);
    double *a, *b, *da, *db;
    const double room = dtype == TSH_BF16 ? 1.0 / 64 : 1.0 / 512;
    int64_t i, n;
    for (i = 0; i < 150; i++) values[i] = (tsh_real)((double)(i * 37 % 151) / 25 - 2.9);
    half = tsh_requires_grad(tsh_keep(tsh_cast(leaf, dtype)), 1);
    exact = tsh_requires_grad(tsh_keep(tsh_cast(half, TSH_REAL)), 1);
    y = by_name(op, half, 1, 0);
    z = by_name(op, exact, 1, 0);
    assert_true(tsh_ok(ctx) && y && z);
    n = tsh_numel(y);
    assert_int_equal(tsh_dtype_of(y), dtype);
    a = ranks_values(ctx, tsh_cast(y, TSH_REAL));
    b = ranks_values(ctx, tsh_cast(tsh_cast(z, dtype), TSH_REAL));
    for (i = 0; i < n; i++)
        if (!(a[i] == b[i] || (isnan(a[i]) && isnan(b[i]))))
            fail_msg("%s[%ld] is %.9g, not %.9g", op, (long)i, a[i], b[i]);
    w = tsh_add_scalar(tsh_ones(ctx, tsh_shape_of(y)), 0.25);
    y = tsh_sum(tsh_mul(tsh_cast(y, TSH_REAL), w), TSH_ALL, 0);
    z = tsh_sum(tsh_mul(z, w), TSH_ALL, 0);
    assert_int_equal(tsh_backward(ctx, tsh_add(y, z)), TSH_OK);
    da = ranks_values(ctx, tsh_grad(half));
    db = ranks_values(ctx, tsh_grad(exact));
    for (i = 0; i < 150; i++)
        if (!(fabs(da[i] - db[i]) <= room * (1 + fabs(db[i])) || (isnan(da[i]) && isnan(db[i]))))
            fail_msg("%s: gradient %ld is %.9g, not %.9g", op, (long)i, da[i], db[i]);
    assert_int_equal(tsh_step_end(ctx), TSH_OK);
    tsh_tensor_free(half);
    tsh_tensor_free(exact);
    tsh_tensor_free(leaf);
    free(a);
    free(b);
    free(da);
    free(db);
}

static void ops_round_sixteen_bits_once(void **state) {
    static const tsh_dtype dtypes[] = {TSH_BF16, TSH_F16};
    tsh_ctx *ctx = open_ctx();
    int i, k;
    (void)state;
    for (k = 0; k < 2; k++) {
        for (i = 0; i < COUNT(unary_ops); i++)
            sixteen_bits_are_rounded_once(ctx, unary_ops[i].name, dtypes[k]);
        for (i = 0; i < COUNT(reduce_ops); i++)
            if (strcmp(reduce_ops[i].name, "argmin") != 0)
                sixteen_bits_are_rounded_once(ctx, reduce_ops[i].name, dtypes[k]);
        sixteen_bits_are_rounded_once(ctx, "cumsum", dtypes[k]);
    }
    tsh_close(ctx);
}

/* Limits are compared as bf16, as in PyTorch: bf16(0.3) is above 0.3, but not above the limit. */
static void limits_have_the_dtype_of_x(void **state) {
    tsh_ctx *ctx = open_ctx();
    tsh_tensor *x = tsh_requires_grad(
        tsh_keep(tsh_cast(tsh_full(ctx, tsh_shape1(1), 0.3), TSH_BF16)), 1);
    (void)state;
    assert_int_equal(
        tsh_backward(ctx, tsh_cast(tsh_sum(tsh_clamp(x, nothing, 0.3), 0, 0), TSH_REAL)), TSH_OK);
    assert_true(*(tsh_real *)tsh_data(ctx, tsh_grad(x)) == 1);
    tsh_close(ctx);
}

/* ---------------------------------------------------------- finite differences */

/* sum(y * w) with weights of both signs. */
static tsh_tensor *weigh(tsh_tensor *y) {
    tsh_ctx *ctx = tsh_ctx_of(y);
    tsh_tensor *w = tsh_zeros(ctx, tsh_shape_of(y));
    tsh_real *data = (tsh_real *)tsh_data(ctx, w);
    int64_t i;
    for (i = 0; data && i < tsh_numel(w); i++) data[i] = (tsh_real)((i * 29 + 5) % 31 - 14) / 16;
    return tsh_sum(tsh_mul(y, w), TSH_ALL, 0);
}

static tsh_tensor *differ(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {
    (void)ctx, (void)n;
    return weigh(by_name((const char *)user, in[0], 1, 1));
}

static tsh_tensor *differ_two(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {
    (void)ctx, (void)n, (void)user;
    return weigh(tsh_mul(tsh_maximum(in[0], in[1]), tsh_minimum(in[1], in[0])));
}

/* Room: central differences with step h are off by h^2 |f'''| / 6 and u |f| / h; |f'''| is below
 * 1e4 (the norm with p 0.5, at 0.05), h is 1e-5. In float, h 1e-2, only smooth ops are compared. */
static void gradients_are_those_of_finite_differences(void **state) {
    static const double room = 2e-7;
    tsh_ctx *ctx = open_ctx();
    tsh_tensor *in[2];
    const char *name;
    int i, k, n = COUNT(unary_ops) + COUNT(reduce_ops);
    double worst;
    (void)state;
    for (k = 0; k < 2; k++) {
        in[k] = tsh_requires_grad(
            tsh_tensor_new(ctx, TSH_REAL, tsh_shape3(2, 5, 3), tsh_replicated()), 1);
        for (i = 0; i < 30; i++) /* different numbers, not where functions have kinks */
            ((tsh_real *)tsh_data(ctx, in[k]))[i] =
                (tsh_real)((double)((i * 11 + 7 + k) % 31) * 0.19 + 0.045 + 0.05 * k);
    }
    for (i = 0; i <= n && sizeof(tsh_real) == 8; i++) {
        name = i == n                 ? "cumsum"
               : i < COUNT(unary_ops) ? unary_ops[i].name
                                      : reduce_ops[i - COUNT(unary_ops)].name;
        if (strcmp(name, "argmin") == 0) continue;
        worst = tsh_gradcheck(ctx, differ, in, 1, (void *)(uintptr_t)name, 0, 0);
        if (!(worst >= 0 && worst <= room))
            fail_msg("%s: off by %.3g; %s", name, worst, tsh_last_error(ctx)->message);
    }
    worst = tsh_gradcheck(ctx, differ_two, in, 2, NULL, 0, 0);
    assert_true(worst >= 0 && worst <= (sizeof(tsh_real) == 8 ? room : 0.05));
    tsh_close(ctx);
}

/* ---------------------------------------------------------- layouts and degrees */

static tsh_tensor *op_unary(probe *p) {
    return by_name(probe_arg(p), p->in[0], 0, 0);
}

/* "norm_2 1 keep": an op, a dimension, and whether it stays */
static tsh_tensor *op_reduce(probe *p) {
    static const char *const dims[] = {"all", "-1", "0", "1", "2"};
    int i, dim = TSH_ALL, keep = probe_has(p, "keep");
    for (i = 1; i < COUNT(dims); i++)
        if (probe_has(p, dims[i])) dim = i - 2;
    (void)probe_has(p, dims[0]);
    for (i = 0; i < COUNT(reduce_ops); i++)
        if (probe_has(p, reduce_ops[i].name)) return reduce_ops[i].fn(p->in[0], dim, keep);
    return probe_has(p, "cumsum") ? tsh_cumsum(p->in[0], dim) : NULL;
}

static tsh_tensor *op_two(probe *p) {
    if (probe_has(p, "max")) return tsh_maximum(p->in[0], p->in[1]);
    if (probe_has(p, "min")) return tsh_minimum(p->in[0], p->in[1]);
    return probe_has(p, "fill") ? tsh_masked_fill(p->in[0], p->in[1], 0.5) : NULL;
}

#define ROUNDING                  2e-5
#define EXACT(op, arg, out, ...)  TRIAL(op_##op, arg, out, 0, 0, __VA_ARGS__)
#define ROUND(op, arg, out, ...)  TRIAL(op_##op, arg, out, ROUNDING, 0, __VA_ARGS__)
#define VALUES(op, arg, out, ...) TRIAL(op_##op, arg, out, 0, TRIAL_VALUES, __VA_ARGS__)
/* Of one all-gather in forward, and no collective in backward but for the loss's. */
#define ROWS_OF(name)                                                                              \
    ROUND(reduce, name " 1", "R", "3,n S(1)"), ROUND(reduce, name " 1 keep", "R", "2,n,3 S(1)"),   \
        ROUND(reduce, name " 0", "R", "2n,3 S(0, 2 segments, unit 1)"),                            \
        ROUND(reduce, name " all", "R", "2,n,3 S(1)"), ROUND(reduce, name " all", "R", "2,n R"),   \
        EXACT(reduce, name " 2", "S(1)", "2,n,5 S(1)"),                                            \
        EXACT(reduce, name " 0 keep", "S(1)", "5,n,2 S(1)"),                                       \
        EXACT(reduce, name " 0", "S(0)", "5,n,2 S(1)")

static const trial rows[] = {
    EXACT(two, "max", "S(1)", "2,n S(1)", "2,n S(1)"),
    EXACT(two, "max", "S(1)", "2,n S(1)", "2,1 R"),
    EXACT(two, "min", "S(1)", "2,1 R", "2,n S(1)"),
    EXACT(two, "min", "S(0)", "n,3 S(0)", "n,1 S(0)"),
    EXACT(two, "min", "R", "n,3 R", "3 R"),
    EXACT(two, "fill", "S(1)", "2,n S(1)", "%2 2,n S(1)"),
    EXACT(two, "fill", "S(1)", "2,n S(1)", "%2 2,1 R"),
    EXACT(two, "fill", "S(0)", "1,3 R", "%3 n,3 S(0)"),
    EXACT(two, "fill", "R", "n R", "%2 2,n R"),
    EXACT(reduce, "min 2", "S(1)", "2,n,5 S(1)"),
    EXACT(reduce, "min 0 keep", "S(1)", "5,n,2 S(1)"),
    EXACT(reduce, "min all", "R", "2,n R"),
    VALUES(reduce, "argmin 2", "S(1)", "2,n,5 S(1)"),
    VALUES(reduce, "argmin 1", "R", "3,n S(1)"),
    VALUES(reduce, "argmin 0 keep", "R", "2n,2,3 S(0, 2 segments, unit 1)"),
    VALUES(reduce, "argmin all", "R", "2,n R"),
    EXACT(reduce, "prod 2", "S(1)", "2,n,5 S(1)"),
    EXACT(reduce, "prod 0 keep", "S(1)", "5,n,2 S(1)"),
    EXACT(reduce, "prod all", "R", "2,4 R"),
    EXACT(reduce, "cumsum 1", "R", "2,n,3 R"),
    EXACT(reduce, "cumsum 1", "P", "2,n,3 P"),
    EXACT(reduce, "cumsum 2", "S(1)", "2,n,9 S(1)"),
    EXACT(reduce, "cumsum 0", "S(1)", "9,n S(1)"),
    EXACT(reduce, "cumsum -1", "S(0, 3 segments, unit 2)", "6n,3 S(0, 3 segments, unit 2)"),
    VALUES(reduce, "cumsum 0", "S(1)", "%9 9,n S(1)"),
    ROWS_OF("logsumexp"),
    ROWS_OF("var"),
    ROWS_OF("var_zero"),
    ROWS_OF("std"),
    ROWS_OF("norm_0"),
    ROWS_OF("norm_half"),
    ROWS_OF("norm_1"),
    ROWS_OF("norm_2"),
    ROWS_OF("norm_3"),
    ROWS_OF("norm_inf"),
    ROWS_OF("norm_least"),
};

static void every_layout_equals_the_dense_result(void **state) {
    static const char *const layouts[] = {"R", "S(0)", "S(1)", "S(1, 3 segments, unit 2)"};
    static const int64_t lengths[] = {1, 3, 8};
    static trial all[COUNT(rows) + COUNT(unary_ops) * COUNT(layouts)];
    static char texts[COUNT(layouts)][64];
    int i, j, n = COUNT(rows);
    (void)state;
    memcpy(all, rows, sizeof rows);
    for (j = 0; j < COUNT(layouts); j++)
        (void)snprintf(texts[j], sizeof texts[j], "2,6n %s", layouts[j]);
    for (i = 0; i < COUNT(unary_ops); i++)
        for (j = 0; j < COUNT(layouts); j++, n++) {
            const trial t = TRIAL(op_unary, unary_ops[i].name, layouts[j], 0, 0, texts[j]);
            all[n] = t;
        }
    trials_prove(all, n, lengths, COUNT(lengths));
}

/* A row -infinity, -1, -infinity, -1, ... has the mean -infinity, however it is sharded: so the
 * gradient of the variance, 2 (x - mean) / (n - 1), is infinity at -1 and NaN at -infinity. */
static int vary_infinities(tsh_ctx *ctx, void *user) {
    const int size = tsh_tp(ctx)->size;
    tsh_real values[16];
    tsh_tensor *x;
    int i;
    (void)user;
    for (i = 0; i < 2 * size; i++) values[i] = i % 2 ? -1 : (tsh_real)-INFINITY;
    x = tsh_requires_grad(tsh_tensor_new(ctx, TSH_REAL, tsh_shape1(2 * size), tsh_sharded(0)), 1);
    CHECK(tsh_write(ctx, x, TSH_GLOBAL, values, (size_t)(2 * size) * sizeof *values) == TSH_OK,
          "write");
    CHECK(tsh_backward(ctx, tsh_var(x, 0, 0, 0)) == TSH_OK, "backward");
    for (i = 0; i < 2; i++) {
        const tsh_real g = ((const tsh_real *)tsh_data(ctx, tsh_grad(x)))[i];
        CHECK(i ? isinf(g) && g > 0 : isnan(g), "element %d: %g", i, (double)g);
    }
    return 0;
}

static void infinite_means_are_joined(void **state) {
    (void)state;
    ranks_run(1, vary_infinities, NULL);
    ranks_run(2, vary_infinities, NULL);
    ranks_run(3, vary_infinities, NULL);
}

/* The variance of a single value over all dimensions has no freedom: its gradient is NaN. */
static void no_freedom_has_no_gradient(void **state) {
    static const double corrections[] = {1, 2.5};
    tsh_ctx *ctx = open_ctx();
    int i;
    (void)state;
    for (i = 0; i < COUNT(corrections); i++) {
        tsh_tensor *x = tsh_requires_grad(
            tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(1, 1), tsh_replicated()), 1);
        assert_int_equal(tsh_backward(ctx, tsh_var(x, TSH_ALL, corrections[i], 0)), TSH_OK);
        assert_true(isnan(((const tsh_real *)tsh_data(ctx, tsh_grad(x)))[0]));
    }
    tsh_close(ctx);
}

/* The statistics of a sharded dimension cost one all-gather, and nothing in backward. */
static int count_collectives(tsh_ctx *ctx, void *user) {
    static const char *const names[] = {"logsumexp", "var", "std", "norm_2", "norm_inf", "argmin"};
    const uint64_t *calls = tsh_tp(ctx)->stats.calls;
    const spec s = spec_parse("3,7 S(1)", 1);
    int i;
    (void)user;
    for (i = 0; i < COUNT(names); i++) {
        tsh_tensor *x = tsh_requires_grad(spec_tensor(ctx, &s, 3), 1), *y;
        const uint64_t gathers = calls[TSH_ALLGATHER], reduces = calls[TSH_ALLREDUCE];
        y = by_name(names[i], x, 1, 0);
        CHECK(y && calls[TSH_ALLGATHER] == gathers + 1 && calls[TSH_ALLREDUCE] == reduces, "%s",
              names[i]);
        if (tsh_dtype_of(y) == TSH_I64) continue;
        y = tsh_sum(y, TSH_ALL, 0);
        CHECK(tsh_backward(ctx, y) == TSH_OK, "%s", names[i]);
        CHECK(calls[TSH_ALLGATHER] == gathers + 1 && calls[TSH_ALLREDUCE] == reduces,
              "%s: backward", names[i]);
    }
    return 0;
}

static void statistics_run_one_collective(void **state) {
    (void)state;
    ranks_run(3, count_collectives, NULL);
}

/* Large inputs, on one thread and on three: the same bits. */
static int keep_bits(tsh_ctx *ctx, void *user) {
    double **kept = (double **)user;
    static const char *const names[] = {"sin",       "mish",   "clamp", "var",
                                        "logsumexp", "norm_3", "prod",  "cumsum"};
    int i, d;
    for (i = 0; i < 2 * COUNT(names); i++) {
        tsh_tensor *x = tsh_requires_grad(
            tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(300, 257), tsh_replicated()), 1);
        CHECK(tsh_init_uniform(x, NULL) == TSH_OK, "%s", names[i / 2]);
        d = i % 2;
        kept[2 * i] = ranks_values(ctx, by_name(names[i / 2], x, d, 0));
        CHECK(tsh_backward(ctx, weigh(by_name(names[i / 2], x, d, 0))) == TSH_OK, "%s",
              names[i / 2]);
        kept[2 * i + 1] = ranks_values(ctx, tsh_grad(x));
        CHECK(kept[2 * i] && kept[2 * i + 1], "%s", names[i / 2]);
    }
    return 0;
}

static void threads_change_no_bit(void **state) {
    double *kept[2][32] = {{NULL}, {NULL}};
    tsh_desc desc;
    int i, k;
    (void)state;
    for (k = 0; k < 2; k++) {
        memset(&desc, 0, sizeof desc);
        desc.threads = k ? 3 : 1;
        ranks_run_with(1, &desc, keep_bits, kept[k]);
    }
    for (i = 0; i < 32; i++) {
        const int whole = i % 2 || i >= 28 || i < 12; /* i >= 12 and even: 257 or 300 values */
        assert_memory_equal(kept[0][i], kept[1][i], (whole ? 300u * 257u : 257u) * sizeof(double));
        free(kept[0][i]);
        free(kept[1][i]);
    }
}

/* ------------------------------------------------------------- random numbers */

static int draw_uniform(tsh_ctx *ctx, int dense, capture *got) {
    tsh_tensor *a = tsh_uniform(ctx, tsh_shape2(40, 50), -2, 3);
    tsh_tensor *b = tsh_uniform(ctx, tsh_shape2(40, 50), -2, 3);
    double *x, *y, mean = 0;
    int i, equal = 0;
    (void)dense;
    CHECK(!capture_add(ctx, got, a), "the first draw");
    CHECK(!capture_add(ctx, got, b), "the second draw");
    x = got->values[0];
    y = got->values[1];
    for (i = 0; i < 2000; i++) {
        CHECK(x[i] >= -2 && x[i] <= 3, "%g", x[i]);
        mean += x[i] / 2000;
        equal += x[i] == y[i];
    }
    CHECK(equal < 3, "the second draw repeats the first");
    CHECK(fabs(mean - 0.5) < 0.15, "the mean is %g", mean); /* deviation: 5 / sqrt(12 * 2000) */
    return 0;
}

static void uniform_numbers_are_the_same_at_every_degree(void **state) {
    (void)state;
    same_prove(draw_uniform, 0);
}

/* ----------------------------------------------------------- empty, and refused */

static void empty_inputs_are_what_pytorch_says(void **state) {
    static const struct {
        const char *name;
        double value; /* of a row without values */
    } none[] = {{"logsumexp", -(double)INFINITY},
                {"var", (double)NAN},
                {"std", (double)NAN},
                {"norm_2", 0},
                {"norm_1", 0},
                {"norm_half", 0},
                {"norm_0", 0},
                {"prod", 1}};
    tsh_ctx *ctx = open_ctx();
    tsh_tensor *x = tsh_requires_grad(
                   tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(2, 0), tsh_replicated()), 1),
               *y;
    const tsh_real *got;
    int i;
    (void)state;
    for (i = 0; i < COUNT(none); i++) {
        y = by_name(none[i].name, x, 1, 0);
        got = (const tsh_real *)tsh_data(ctx, y);
        if (!got) fail_msg("%s: %s", none[i].name, tsh_last_error(ctx)->message);
        if (!((double)got[1] == none[i].value || (isnan(none[i].value) && isnan((double)got[1]))))
            fail_msg("%s of nothing is %g", none[i].name, (double)got[1]);
        assert_int_equal(tsh_backward(ctx, tsh_sum(y, TSH_ALL, 0)), TSH_OK);
        y = by_name(none[i].name, x, 0, 0); /* no rows at all */
        assert_int_equal(tsh_numel(y), 0);
        assert_true(tsh_ok(ctx));
    }
    for (i = 0; i < COUNT(unary_ops); i++) {
        y = unary_ops[i].fn(x);
        assert_int_equal(tsh_size(y, 0), 2);
        assert_int_equal(tsh_backward(ctx, tsh_sum(y, TSH_ALL, 0)), TSH_OK);
    }
    assert_int_equal(tsh_size(tsh_cumsum(x, 1), 0), 2);
    assert_int_equal(tsh_ndim(tsh_cumsum(tsh_full(ctx, tsh_shape0(), 3), -1)), 0);
    assert_true(tsh_item(ctx, tsh_norm(tsh_full(ctx, tsh_shape0(), -3), 0, 0, 0)) == 3);
    assert_true(tsh_ok(ctx));
    tsh_close(ctx);
}

static int be_refused(tsh_ctx *ctx, void *user) {
    tsh_tensor *x = tsh_ones(ctx, tsh_shape2(4, 6)), *empty = tsh_zeros(ctx, tsh_shape2(2, 0));
    tsh_tensor *ids = tsh_cast(x, TSH_I32), *cut = tsh_redistribute(x, tsh_sharded(1));
    tsh_tensor *sum = tsh_redistribute(x, tsh_partial());
    (void)user;
    CHECK(!tsh_abs(ids) && !tsh_abs(NULL), "integers");
    CHECK_SAYS(TSH_ERR_DTYPE, "tsh_abs: x is i32");
    CHECK(!tsh_sin(sum), "P");
    CHECK_SAYS(TSH_ERR_LAYOUT, "tsh_sin: input is a partial sum");
    CHECK(!tsh_maximum(x, sum), "P");
    CHECK_SAYS(TSH_ERR_LAYOUT, "tsh_maximum: layouts of");
    CHECK(!tsh_clamp(x, nothing, nothing), "no limits");
    CHECK_SAYS(TSH_ERR_ARGUMENT, "tsh_clamp: min and max are NAN");
    CHECK(!tsh_masked_fill(x, x, 0), "a floating mask");
    CHECK_SAYS(TSH_ERR_DTYPE, "tsh_masked_fill: the mask is f");
    CHECK(!tsh_masked_fill(cut, ids, 0), "layouts");
    CHECK_SAYS(TSH_ERR_LAYOUT, "tsh_masked_fill: layouts of");
    CHECK(!tsh_min(cut, 1, 0), "a sharded dimension");
    CHECK_SAYS(TSH_ERR_LAYOUT, "tsh_min: input is not whole along the dimension");
    CHECK(!tsh_prod(cut, -1, 0), "a sharded dimension");
    CHECK_SAYS(TSH_ERR_LAYOUT, "tsh_prod: input is not whole along the dimension");
    CHECK(!tsh_cumsum(cut, 1), "a sharded dimension");
    CHECK_SAYS(TSH_ERR_LAYOUT, "complete it first: tsh_redistribute(x, tsh_replicated())");
    CHECK(!tsh_cumsum(x, TSH_ALL), "all dimensions");
    CHECK_SAYS(TSH_ERR_SHAPE, "tsh_cumsum: there is no dimension");
    CHECK(!tsh_var(sum, 0, 0, 0), "P");
    CHECK_SAYS(TSH_ERR_LAYOUT, "tsh_var: input is not whole");
    CHECK(!tsh_std(x, 2, 0, 0), "dimension 2");
    CHECK_SAYS(TSH_ERR_SHAPE, "tsh_std: there is no dimension 2");
    CHECK(!tsh_norm(empty, far_away, 1, 0), "the largest of nothing");
    CHECK_SAYS(TSH_ERR_SHAPE, "tsh_norm: the norm of no values does not exist for p = inf");
    CHECK(!tsh_norm(x, nothing, 1, 0), "p NAN");
    CHECK_SAYS(TSH_ERR_ARGUMENT, "tsh_norm: p is NAN");
    CHECK(!tsh_min(empty, 1, 0), "the smallest of nothing");
    CHECK_SAYS(TSH_ERR_SHAPE, "tsh_min: nothing to choose from");
    CHECK(!tsh_argmin(empty, 1, 0), "the smallest of nothing");
    CHECK_SAYS(TSH_ERR_SHAPE, "tsh_argmin: nothing to choose from");
    CHECK(!tsh_uniform(ctx, tsh_shape1(3), 2, 1), "low above high");
    CHECK_SAYS(TSH_ERR_ARGUMENT, "tsh_uniform: there are no numbers from 2 to 1");
    return 0;
}

static void what_cannot_be_computed_is_refused(void **state) {
    (void)state;
    ranks_run(1, be_refused, NULL);
    ranks_run(2, be_refused, NULL);
}

int main(void) {
    static const struct CMUnitTest kernels[] = {
        cmocka_unit_test(values_and_gradients_are_those_of_pytorch),
        cmocka_unit_test(functions_are_accurate),
        cmocka_unit_test(ops_round_sixteen_bits_once),
    };
    static const struct CMUnitTest others[] = {
        cmocka_unit_test(limits_have_the_dtype_of_x),
        cmocka_unit_test(gradients_are_those_of_finite_differences),
        cmocka_unit_test(every_layout_equals_the_dense_result),
        cmocka_unit_test(infinite_means_are_joined),
        cmocka_unit_test(no_freedom_has_no_gradient),
        cmocka_unit_test(statistics_run_one_collective),
        cmocka_unit_test(threads_change_no_bit),
        cmocka_unit_test(uniform_numbers_are_the_same_at_every_degree),
        cmocka_unit_test(empty_inputs_are_what_pytorch_says),
        cmocka_unit_test(what_cannot_be_computed_is_refused),
    };
    tsh_ctx *ctx;
    int best, failed = 0;
    char name[48];
    if (tsh_open(NULL, &ctx) != TSH_OK) return 1;
    best = library_isa(ctx);
    tsh_close(ctx);
    for (test_isa = best; test_isa >= 0; test_isa--) {
        (void)snprintf(name, sizeof name, "op/elementwise, kernels %d", test_isa);
        failed += cmocka_run_group_tests_name(name, kernels, NULL, NULL);
    }
    test_isa = best;
    return failed + cmocka_run_group_tests_name("op/elementwise", others, NULL, NULL);
}
