/* What ops give at the edges: accuracy over the whole range of floats, NaN and infinity, empty
 * tensors, dimensions of length 1, integers, ties; and inputs in any memory order. */
/* build: nosimd */
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"

#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#define COUNT(a) ((int)(sizeof(a) / sizeof((a)[0])))
#define NONE     (float)NAN
#define INF      (float)INFINITY

static tsh_ctx *open_ctx(void) {
    tsh_ctx *ctx;
    assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
    return ctx;
}

static void close_ctx(tsh_ctx *ctx) {
    if (!tsh_ok(ctx)) fail_msg("%s", tsh_last_error(ctx)->message);
    tsh_close(ctx);
}

/* An owned tensor that wants a gradient, of the given values. */
static tsh_tensor *leaf(tsh_ctx *ctx, tsh_shape shape, const float *values) {
    return tsh_requires_grad(tsh_tensor_from(ctx, TSH_REAL, shape, tsh_replicated(), values), 1);
}

static tsh_tensor *row(tsh_ctx *ctx, int64_t n, const float *values) {
    return leaf(ctx, tsh_shape1(n), values);
}

static tsh_tensor *ints(tsh_ctx *ctx, tsh_shape shape, const int64_t *values) {
    return tsh_tensor_from(ctx, TSH_I64, shape, tsh_replicated(), values);
}

/* Equal bits, but any NaN for NaN and any zero for zero. */
static int same(double a, double b) {
    return a == b || (isnan(a) && isnan(b));
}

static void expect_values(int line, tsh_tensor *t, int64_t n, const float *want) {
    float got[64];
    int64_t i;
    if (!t) fail_msg("line %d: NULL", line);
    assert_true(n <= COUNT(got) && tsh_dtype_of(t) == TSH_F32);
    if (tsh_numel(t) != n) fail_msg("line %d: %ld elements", line, (long)tsh_numel(t));
    if (tsh_read(tsh_ctx_of(t), t, TSH_LOCAL, got, (size_t)n * 4) != TSH_OK)
        fail_msg("line %d: %s", line, tsh_last_error(tsh_ctx_of(t))->message);
    for (i = 0; i < n; i++)
        if (!same((double)got[i], (double)want[i]))
            fail_msg("line %d: [%ld] is %g, not %g", line, (long)i, (double)got[i],
                     (double)want[i]);
}

static void expect_ints(int line, tsh_tensor *t, int64_t n, const int64_t *want) {
    int64_t i, got[64];
    int32_t half[64];
    int wide = tsh_dtype_of(t) == TSH_I64;
    if (!t) fail_msg("line %d: NULL", line);
    assert_true(n <= COUNT(got) && (wide || tsh_dtype_of(t) == TSH_I32));
    if (tsh_numel(t) != n) fail_msg("line %d: %ld elements", line, (long)tsh_numel(t));
    assert_int_equal(tsh_read(tsh_ctx_of(t), t, TSH_LOCAL, wide ? (void *)got : (void *)half,
                              (size_t)n * (wide ? 8 : 4)),
                     TSH_OK);
    for (i = 0; i < n; i++) {
        if (!wide) got[i] = half[i];
        if (got[i] != want[i])
            fail_msg("line %d: [%ld] is %ld, not %ld", line, (long)i, (long)got[i], (long)want[i]);
    }
}

/* t has exactly these bits. */
static void expect_same_bits(int line, tsh_tensor *t, const float *want) {
    const size_t bytes = (size_t)tsh_numel(t) * sizeof *want;
    float *got = (float *)malloc(bytes);
    assert_non_null(got);
    assert_int_equal(tsh_read(tsh_ctx_of(t), t, TSH_LOCAL, got, bytes), TSH_OK);
    if (memcmp(got, want, bytes) != 0) fail_msg("line %d: other bits", line);
    free(got);
}

#define EXPECT(t, n, ...)                                                                          \
    do {                                                                                           \
        static const float want_[] = __VA_ARGS__;                                                  \
        expect_values(__LINE__, t, n, want_);                                                      \
    } while (0)
#define EXPECT_INTS(t, n, ...)                                                                     \
    do {                                                                                           \
        static const int64_t want_[] = __VA_ARGS__;                                                \
        expect_ints(__LINE__, t, n, want_);                                                        \
    } while (0)

static void backward(tsh_ctx *ctx, tsh_tensor *y) {
    if (tsh_backward(ctx, tsh_sum(y, TSH_ALL, 0)) != TSH_OK)
        fail_msg("%s", tsh_last_error(ctx)->message);
}

/* ------------------------------------------------------------------ accuracy
 * Error in ulps of the float next to libm's double result, over floats of all exponents and both
 * signs: every STEP-th bit pattern, STEP prime. Kernels of every instruction set are tried. */

enum { STEP = 1999, CHUNK = 4096 };

static double ref_sigmoid(double x) {
    return 1 / (1 + exp(-x));
}

static double ref_gelu(double x) {
    return 0.5 * x * erfc(-x * 0.70710678118654752);
}

/* 0.5 x (1 + tanh u) without the cancellation: x / (1 + e^-2u). */
static double ref_gelu_tanh(double x) {
    return x / (1 + exp(-2 * 0.79788456080286536 * (x + 0.044715 * x * x * x)));
}

static double ref_silu(double x) {
    return x / (1 + exp(-x));
}

/* Ulps are enlarged by an argument that is rounded before e^x: e^(u (1 + d)) = e^u (1 + u d). */
static double grow_none(double x) {
    (void)x;
    return 0;
}

static double grow_gelu_tanh(double x) {
    return x < 0 ? fabs(2 * 0.79788456080286536 * (x + 0.044715 * x * x * x)) : 0;
}

typedef struct accuracy {
    const char *name;
    tsh_tensor *(*op)(tsh_tensor *);
    double (*ref)(double), (*grow)(double);
    double low, high;  /* the range */
    double ulps, each; /* the bound is ulps + each * grow(x) */
} accuracy;

static double ulp(double y) {
    int e;
    (void)frexp(y, &e);
    return ldexp(1, e - 24 < -149 ? -149 : e - 24);
}

static double check_chunk(tsh_ctx *ctx, const accuracy *a, const float *x, int n) {
    tsh_tensor *t = tsh_zeros(ctx, tsh_shape1(n)), *y;
    const float *got;
    double worst = 0;
    int i;
    memcpy(tsh_data(ctx, t), x, (size_t)n * 4);
    y = a->op(t);
    got = (const float *)tsh_data(ctx, y);
    assert_non_null(got);
    for (i = 0; i < n; i++) {
        double in = (double)x[i], want = a->ref(in), off = fabs((double)got[i] - want) / ulp(want);
        double room = a->ulps + a->each * a->grow(in);
        if (fabs(want) > (double)FLT_MAX) {
            if (!isinf(got[i])) fail_msg("%s(%.9g) is %.9g", a->name, in, (double)got[i]);
        } else if (fabs(want) < (double)FLT_MIN) {
            /* denormal results may be cut to zero, but are nothing else */
            if (!(fabs((double)got[i]) <= fabs(want) + room * ulp(want)))
                fail_msg("%s(%.9g) is %.9g, not %.9g", a->name, in, (double)got[i], want);
        } else if (!(off <= room)) {
            fail_msg("%s(%.9g) is %.9g, not %.9g: %.3g ulps off, %.3g allowed", a->name, in,
                     (double)got[i], want, off, room);
        } else if (off > worst) {
            worst = off;
        }
    }
    return worst;
}

static double check_accuracy(tsh_ctx *ctx, const accuracy *a) {
    float x[CHUNK];
    uint64_t bits;
    double worst = 0, one;
    int n = 0;
    for (bits = 0; bits <= 0xFFFFFFFFu; bits += STEP) {
        uint32_t low = (uint32_t)bits;
        memcpy(&x[n], &low, 4);
        if (!isfinite(x[n]) || (double)x[n] < a->low || (double)x[n] > a->high) continue;
        if (++n < CHUNK) continue;
        tsh_scope_begin(ctx);
        one = check_chunk(ctx, a, x, n);
        tsh_scope_end(ctx);
        worst = one > worst ? one : worst;
        n = 0;
    }
    one = n ? check_chunk(ctx, a, x, n) : 0;
    return one > worst ? one : worst;
}

static void test_accuracy(void **state) {
    /* exp: a polynomial within 1 ulp and a rounding. sigmoid: exp, a sum and a quotient. tanh: a
     * polynomial, or one times 2^n and a quotient. gelu_tanh: sigmoid times x; its argument carries
     * at most 5 roundings, which e^x enlarges where it is not next to 1. gelu and erf: within 2
     * everywhere, also where they are tiny. */
    static const accuracy all[] = {
        {"exp", tsh_exp, exp, grow_none, -1e38, 1e38, 2, 0},
        {"sigmoid", tsh_sigmoid, ref_sigmoid, grow_none, -87, 1e38, 3, 0},
        {"tanh", tsh_tanh, tanh, grow_none, -1e38, 1e38, 3, 0},
        {"gelu_tanh", tsh_gelu_tanh, ref_gelu_tanh, grow_gelu_tanh, -9, 1e12, 4, 5},
        {"gelu", tsh_gelu, ref_gelu, grow_none, -1e38, 1e38, 2, 0},
        {"erf", tsh_erf, erf, grow_none, -1e38, 1e38, 2, 0},
        {"silu", tsh_silu, ref_silu, grow_none, -87, 1e38, 4, 0},
        {"log", tsh_log, log, grow_none, (double)FLT_MIN, 1e38, 1, 0},
        {"sqrt", tsh_sqrt, sqrt, grow_none, (double)FLT_MIN, 1e38, 0.5, 0},
    };
    tsh_ctx *ctx = open_ctx();
    int i, most = ctx->isa;
    (void)state;
    for (ctx->isa = 0; ctx->isa <= most; ctx->isa++)
        for (i = 0; i < COUNT(all); i++)
            print_message("%s (kernel %d): at most %.3g ulps\n", all[i].name, ctx->isa,
                          check_accuracy(ctx, &all[i]));
    ctx->isa = most;
    close_ctx(ctx);
}

/* ------------------------------------------------------------------ NaN, infinity, zeros */

typedef struct special {
    const char *name;
    tsh_tensor *(*op)(tsh_tensor *);
    double (*ref)(double);
} special;

static double ref_neg(double x) {
    return -x;
}

static double ref_relu(double x) {
    return x < 0 ? 0 : x;
}

static double ref_square(double x) {
    return x * x;
}

static double ref_inverse(double x) {
    return 1 / x;
}

static double ref_one(double x) {
    (void)x;
    return 1;
}

static double ref_plus(double x) {
    return x + 1;
}

static double ref_twice(double x) {
    return -2 * x;
}

static tsh_tensor *op_square(tsh_tensor *x) {
    return tsh_pow_scalar(x, 2);
}

static tsh_tensor *op_inverse(tsh_tensor *x) {
    return tsh_pow_scalar(x, -1);
}

static tsh_tensor *op_one(tsh_tensor *x) {
    return tsh_pow_scalar(x, 0);
}

static tsh_tensor *op_plus(tsh_tensor *x) {
    return tsh_add_scalar(x, 1);
}

static tsh_tensor *op_twice(tsh_tensor *x) {
    return tsh_scale(x, -2);
}

static void test_special(void **state) {
    static const float in[] = {NONE,   INF,    -INF,   0,       -0.0f,   1,        -1,
                               1e30f,  -1e30f, 1e-30f, -1e-30f, FLT_MAX, -FLT_MAX, FLT_MIN,
                               1e-42f, 88.6f,  89,     -87,     -89,     -104,     -200};
    /* torch's formulas: x sigmoid(x) and x Phi(x) are NaN at -infinity */
    static const special all[] = {
        {"neg", tsh_neg, ref_neg},
        {"exp", tsh_exp, exp},
        {"log", tsh_log, log},
        {"sqrt", tsh_sqrt, sqrt},
        {"sigmoid", tsh_sigmoid, ref_sigmoid},
        {"tanh", tsh_tanh, tanh},
        {"relu", tsh_relu, ref_relu},
        {"square", op_square, ref_square},
        {"inverse", op_inverse, ref_inverse},
        {"one", op_one, ref_one},
        {"plus", op_plus, ref_plus},
        {"twice", op_twice, ref_twice},
        {"silu", tsh_silu, ref_silu},
        {"gelu", tsh_gelu, ref_gelu},
        {"erf", tsh_erf, erf},
    };
    tsh_ctx *ctx = open_ctx();
    int i, j;
    (void)state;
    for (i = 0; i < COUNT(all); i++) {
        tsh_tensor *y = all[i].op(row(ctx, COUNT(in), in));
        const float *got = (const float *)tsh_data(ctx, y);
        assert_non_null(got);
        for (j = 0; j < COUNT(in); j++) {
            float want = (float)all[i].ref((double)in[j]);
            /* silu below -88 is -88 times a denormal sigmoid, which may be cut to zero */
            double room = fabs((double)want) < 1e-35 ? 1e-35 : 4 * ulp((double)want);
            if (!same((double)got[j], (double)want) &&
                !(fabs((double)got[j] - (double)want) <= room))
                fail_msg("%s(%g) is %g, not %g", all[i].name, (double)in[j], (double)got[j],
                         (double)want);
        }
    }
    close_ctx(ctx);
}

/* Slopes where a factor of the formula is 0, infinite or huge. */
static void test_special_slopes(void **state) {
    static const float zero[] = {0, 0, 0, 2}, far[] = {-100, 100, -1e4f, 1e4f},
                       mixed[] = {-1, 0, 2};
    tsh_ctx *ctx = open_ctx();
    tsh_tensor *x, *y;
    (void)state;
    x = row(ctx, 4, zero);
    backward(ctx, tsh_pow_scalar(x, 0)); /* x^0 = 1 everywhere */
    EXPECT(tsh_grad(x), 4, {0, 0, 0, 0});
    x = row(ctx, 4, zero);
    backward(ctx, tsh_pow_scalar(x, 1));
    EXPECT(tsh_grad(x), 4, {1, 1, 1, 1});
    x = row(ctx, 4, zero);
    backward(ctx, tsh_pow_scalar(x, 2));
    EXPECT(tsh_grad(x), 4, {0, 0, 0, 4});
    x = row(ctx, 3, mixed);
    y = row(ctx, 3, zero);
    backward(ctx, tsh_pow(x, y)); /* d/da a^0 = 0; d/db a^b = a^b ln a, 0 at a = 0 */
    EXPECT(tsh_grad(x), 3, {0, 0, 0});
    EXPECT(tsh_grad(y), 3, {NONE, 0, 0.69314718f});
    x = row(ctx, 3, mixed);
    backward(ctx, tsh_relu(x)); /* 0 at 0 */
    EXPECT(tsh_grad(x), 3, {0, 0, 1});
    x = row(ctx, 4, zero);
    backward(ctx, tsh_sqrt(x));
    EXPECT(tsh_grad(x), 4, {INF, INF, INF, 0.35355339f});
    x = row(ctx, 4, far);
    backward(ctx, tsh_sigmoid(x));
    EXPECT(tsh_grad(x), 4, {0, 0, 0, 0});
    x = row(ctx, 4, far);
    backward(ctx, tsh_tanh(x));
    EXPECT(tsh_grad(x), 4, {0, 0, 0, 0});
    x = row(ctx, 4, far);
    backward(ctx, tsh_gelu(x));
    EXPECT(tsh_grad(x), 4, {0, 1, 0, 1});
    x = row(ctx, 4, far);
    backward(ctx, tsh_gelu_tanh(x));
    EXPECT(tsh_grad(x), 4, {0, 1, 0, 1});
    x = row(ctx, 4, far);
    backward(ctx, tsh_silu(x));
    EXPECT(tsh_grad(x), 4, {0, 1, 0, 1});
    close_ctx(ctx);
}

/* What is not chosen does not reach the result, nor its gradient. */
static void test_where_and_nan(void **state) {
    static const float bad[] = {NONE, INF, 1}, good[] = {5, 6, 7};
    static const int32_t choice[] = {0, 0, 1};
    tsh_ctx *ctx = open_ctx();
    tsh_tensor *a = row(ctx, 3, bad), *b = row(ctx, 3, good), *y,
               *c = tsh_tensor_from(ctx, TSH_I32, tsh_shape1(3), tsh_replicated(), choice);
    (void)state;
    y = tsh_retain_grad(tsh_where(c, a, b));
    backward(ctx, tsh_mul(y, y));
    EXPECT(y, 3, {5, 6, 1});
    EXPECT(tsh_grad(a), 3, {0, 0, 2});
    EXPECT(tsh_grad(b), 3, {10, 12, 0});
    EXPECT(tsh_add(a, b), 3, {NONE, INF, 8});
    EXPECT(tsh_sub(a, a), 3, {NONE, NONE, 0});
    EXPECT(tsh_mul(a, tsh_zeros(ctx, tsh_shape0())), 3, {NONE, NONE, 0});
    EXPECT(tsh_div(b, tsh_zeros(ctx, tsh_shape0())), 3, {INF, INF, INF});
    EXPECT(tsh_sum(a, 0, 0), 1, {NONE});
    EXPECT(tsh_sum(tsh_slice(a, 0, 1, 2), 0, 0), 1, {INF});
    close_ctx(ctx);
}

/* 0 times NaN is NaN, in products of matrices too: nothing is left out because a factor is 0. Rows
 * without NaN are not touched. */
static void test_nan_in_rows(void **state) {
    static const float m[] = {NONE, 1, 2, 3}, z[] = {0, 0, 1, 1}, one[] = {1, 1};
    tsh_ctx *ctx = open_ctx();
    tsh_tensor *a = leaf(ctx, tsh_shape2(2, 2), m), *b = leaf(ctx, tsh_shape2(2, 2), z), *y;
    (void)state;
    EXPECT(tsh_matmul(a, b), 4, {NONE, NONE, 3, 3});
    EXPECT(tsh_linear(a, tsh_transpose(b, 0, 1), NULL), 4, {NONE, NONE, 3, 3});
    y = tsh_layer_norm(a, row(ctx, 2, one), row(ctx, 2, one), 0);
    assert_true(isnan(((float *)tsh_data(ctx, y))[0]) && isnan(((float *)tsh_data(ctx, y))[1]));
    assert_true(isfinite(((float *)tsh_data(ctx, y))[2]));
    y = tsh_softmax(a, 1);
    assert_true(isnan(((float *)tsh_data(ctx, y))[0]) && isnan(((float *)tsh_data(ctx, y))[1]));
    assert_true(isfinite(((float *)tsh_data(ctx, y))[2]));
    close_ctx(ctx);
}

static void test_softmax_edges(void **state) {
    static const float hidden[] = {-INF, 3, -INF, -INF, -INF, -INF, 1000, -1000, 1000, INF, 0, 0};
    static const int64_t picks[] = {1, 0, 2, 1};
    tsh_cross_entropy_desc none;
    tsh_ctx *ctx = open_ctx();
    tsh_tensor *x = leaf(ctx, tsh_shape2(4, 3), hidden), *y;
    (void)state;
    /* all of it masked: NaN, as torch; infinity less itself: NaN */
    EXPECT(tsh_softmax(x, 1), 12, {0, 1, 0, NONE, NONE, NONE, 0.5f, 0, 0.5f, NONE, NONE, NONE});
    EXPECT(tsh_softmax(tsh_transpose(x, 0, 1), 0), 12,
           {0, NONE, 0.5f, NONE, 1, NONE, 0, NONE, 0, NONE, 0.5f, NONE});
    EXPECT(tsh_log_softmax(x, 1), 12,
           {-INF, 0, -INF, NONE, NONE, NONE, -0.69314718f, -2000.6931472f, -0.69314718f, NONE, NONE,
            NONE});
    memset(&none, 0, sizeof none);
    none.reduction = TSH_REDUCE_NONE;
    y = tsh_retain_grad(tsh_cross_entropy(x, ints(ctx, tsh_shape1(4), picks), &none));
    EXPECT(y, 4, {0, NONE, 0.69314718f, NONE});
    backward(ctx, y);
    EXPECT(tsh_slice(tsh_grad(x), 0, 0, 1), 3, {0, 0, 0});
    EXPECT(tsh_slice(tsh_grad(x), 0, 2, 1), 3, {0.5f, 0, -0.5f});
    close_ctx(ctx);
}

/* A constant added to all logits changes nothing: not even by its own rounding. */
static void test_shifted_logits(void **state) {
    static const float low[] = {0, 1, 2, 3, 0, 1}, high[] = {4096, 4097, 4098, 4099, 4096, 4097};
    static const int64_t picks[] = {1, 0};
    float want[6], got[6];
    tsh_ctx *ctx = open_ctx();
    tsh_tensor *a = leaf(ctx, tsh_shape2(2, 3), low), *b = leaf(ctx, tsh_shape2(2, 3), high), *y;
    int i;
    (void)state;
    y = tsh_softmax(b, 1);
    expect_values(__LINE__, tsh_softmax(a, 1), 6, (const float *)tsh_data(ctx, y));
    y = tsh_log_softmax(b, 1);
    expect_values(__LINE__, tsh_log_softmax(a, 1), 6, (const float *)tsh_data(ctx, y));
    backward(ctx, tsh_cross_entropy(a, ints(ctx, tsh_shape1(2), picks), NULL));
    backward(ctx, tsh_cross_entropy(b, ints(ctx, tsh_shape1(2), picks), NULL));
    assert_int_equal(tsh_read(ctx, tsh_grad(a), TSH_LOCAL, want, sizeof want), TSH_OK);
    assert_int_equal(tsh_read(ctx, tsh_grad(b), TSH_LOCAL, got, sizeof got), TSH_OK);
    for (i = 0; i < 6; i++)
        if (!(fabsf(got[i] - want[i]) <= 4 * FLT_EPSILON))
            fail_msg("slope %d is %.9g, not %.9g", i, (double)got[i], (double)want[i]);
    close_ctx(ctx);
}

/* ------------------------------------------------------------------ ties, argmax */

static void test_max(void **state) {
    static const float ties[] = {1, 3, 3, 2, -1, 3}, nans[] = {1, NONE, 9, NONE, 0, 2};
    tsh_ctx *ctx = open_ctx();
    tsh_tensor *x = leaf(ctx, tsh_shape2(2, 3), ties), *n = leaf(ctx, tsh_shape2(2, 3), nans), *y;
    (void)state;
    EXPECT_INTS(tsh_argmax(x, 1, 0), 2, {1, 2});
    EXPECT_INTS(tsh_argmax(x, 0, 1), 3, {1, 0, 0});
    EXPECT_INTS(tsh_argmax(x, TSH_ALL, 0), 1, {1});
    EXPECT_INTS(tsh_argmax(tsh_transpose(x, 0, 1), TSH_ALL, 1), 1, {2}); /* 1 2 3 -1 3 3 */
    EXPECT_INTS(tsh_argmax(n, 1, 0), 2, {1, 0});
    EXPECT(tsh_max(n, 1, 0), 2, {NONE, NONE});
    EXPECT(tsh_max(n, 0, 0), 3, {NONE, NONE, 9});
    y = tsh_retain_grad(tsh_max(x, 1, 1));
    assert_int_equal(tsh_ndim(y), 2);
    backward(ctx, y);
    EXPECT(y, 2, {3, 3});
    EXPECT(tsh_grad(x), 6, {0, 1, 0, 0, 0, 1}); /* the first of equals */
    tsh_zero_grad(x);
    backward(ctx, tsh_max(x, TSH_ALL, 0));
    EXPECT(tsh_grad(x), 6, {0, 1, 0, 0, 0, 0});
    backward(ctx, tsh_max(n, 1, 0));
    EXPECT(tsh_grad(n), 6, {0, 1, 0, 1, 0, 0});
    close_ctx(ctx);
}

/* Columns are summed in the order of their rows, however many are taken at a time, to the bit. */
static void sum_of_rows(int64_t rows, int64_t n) {
    enum { MOST = 9 * 5000 };
    static float values[MOST];
    tsh_ctx *ctx = open_ctx();
    tsh_tensor *out;
    const float *y;
    float sum;
    int64_t i, r;
    for (i = 0; i < rows * n; i++) values[i] = 1 / ((float)(i % 1009) - 504.5f);
    out = tsh_sum(leaf(ctx, tsh_shape2(rows, n), values), 0, 0);
    y = out ? (const float *)tsh_data(ctx, out) : NULL;
    assert_non_null(y);
    for (i = 0; i < n; i++) {
        for (sum = 0, r = 0; r < rows; r++) sum += values[r * n + i];
        if (memcmp(&y[i], &sum, sizeof sum) != 0)
            fail_msg("%d rows of %d, column %d: %.9g, not %.9g", (int)rows, (int)n, (int)i,
                     (double)y[i], (double)sum);
    }
    close_ctx(ctx);
}

static void test_sum_of_rows(void **state) {
    static const int64_t widths[] = {2, 47, 127, 128, 700, 1024, 1055, 5000};
    int64_t rows;
    int i;
    (void)state;
    for (rows = 1; rows <= 9; rows++)
        for (i = 0; i < (int)(sizeof widths / sizeof *widths); i++) sum_of_rows(rows, widths[i]);
}

/* ------------------------------------------------------------------ integers */

static void test_compare(void **state) {
    static const float a[] = {1, 2, NONE, -0.0f, INF}, b[] = {1, 3, NONE, 0, -INF};
    static const int64_t big[] = {9007199254740993, 9007199254740992, -1};
    static const int64_t near[] = {9007199254740992, 9007199254740993, 1};
    static const int32_t i[] = {-2, 0, 7};
    tsh_ctx *ctx = open_ctx();
    tsh_tensor *x = row(ctx, 5, a), *y = row(ctx, 5, b), *p, *q, *s;
    (void)state;
    EXPECT_INTS(tsh_eq(x, y), 5, {1, 0, 0, 1, 0});
    EXPECT_INTS(tsh_ne(x, y), 5, {0, 1, 1, 0, 1});
    EXPECT_INTS(tsh_lt(x, y), 5, {0, 1, 0, 0, 0});
    EXPECT_INTS(tsh_le(x, y), 5, {1, 1, 0, 1, 0});
    EXPECT_INTS(tsh_gt(x, y), 5, {0, 0, 0, 0, 1});
    EXPECT_INTS(tsh_ge(x, y), 5, {1, 0, 0, 1, 1});
    assert_int_equal(tsh_dtype_of(tsh_lt(x, y)), TSH_I32);
    p = ints(ctx, tsh_shape1(3), big); /* 2^53 + 1: equal as doubles, different as integers */
    q = ints(ctx, tsh_shape1(3), near);
    EXPECT_INTS(tsh_eq(p, q), 3, {0, 0, 0});
    EXPECT_INTS(tsh_lt(p, q), 3, {0, 1, 1});
    EXPECT_INTS(tsh_ge(p, q), 3, {1, 0, 0});
    s = tsh_tensor_from(ctx, TSH_I32, tsh_shape2(3, 1), tsh_replicated(), i);
    EXPECT_INTS(tsh_lt(s, tsh_reshape(s, tsh_shape1(3))), 9, {0, 1, 1, 0, 0, 1, 0, 0, 0});
    close_ctx(ctx);
}

static void test_cast_and_integers(void **state) {
    static const float v[] = {2.9f, -2.9f, -0.5f, 16777216, 0};
    static const int64_t wide[] = {5, -6, 70, 8};
    tsh_ctx *ctx = open_ctx();
    tsh_tensor *x = row(ctx, 5, v), *i, *parts[2];
    (void)state;
    EXPECT_INTS(tsh_cast(x, TSH_I32), 5, {2, -2, 0, 16777216, 0});
    EXPECT_INTS(tsh_cast(x, TSH_I64), 5, {2, -2, 0, 16777216, 0});
    assert_ptr_equal(tsh_cast(x, TSH_REAL), x);
    i = ints(ctx, tsh_shape2(2, 2), wide);
    EXPECT(tsh_cast(i, TSH_REAL), 4, {5, -6, 70, 8});
    EXPECT_INTS(tsh_cast(tsh_transpose(i, 0, 1), TSH_I32), 4, {5, 70, -6, 8});
    EXPECT_INTS(tsh_slice(tsh_transpose(i, 0, 1), 0, 1, 1), 2, {-6, 8});
    EXPECT_INTS(tsh_clone(tsh_transpose(i, 0, 1)), 4, {5, 70, -6, 8});
    EXPECT_INTS(tsh_reshape(tsh_transpose(i, 0, 1), tsh_shape1(4)), 4, {5, 70, -6, 8});
    parts[0] = i;
    parts[1] = tsh_transpose(i, 0, 1);
    EXPECT_INTS(tsh_concat(parts, 2, 1), 8, {5, -6, 5, 70, 70, 8, -6, 8});
    EXPECT_INTS(tsh_keep(parts[1]), 4, {5, 70, -6, 8});
    EXPECT_INTS(tsh_arange(ctx, TSH_I32, 3, -4, -2), 4, {3, 1, -1, -3});
    /* a gradient ends at an integer */
    backward(ctx, tsh_mul(x, tsh_cast(tsh_cast(x, TSH_I32), TSH_REAL)));
    EXPECT(tsh_grad(x), 5, {2, -2, 0, 16777216, 0});
    close_ctx(ctx);
}

/* What is beyond an integer type becomes its nearest end, from floats and from the wider type. */
static void test_cast_clamps(void **state) {
    static const float v[] = {-2147483648.0f, -2147483904.0f, -3e9f, -INF, -2147483520.0f,
                              2147483520.0f,  2147483648.0f,  3e9f,  INF,  NONE};
    static const float w[] = {-9223372036854775808.0f, -9223373136366403584.0f, -1e19f, -INF,
                              9223371487098961920.0f,  9223372036854775808.0f,  INF,    NONE};
    static const int64_t wide[] = {INT64_MIN, INT32_MIN - INT64_C(1), INT32_MIN, -1,
                                   INT32_MAX, INT32_MAX + INT64_C(1), INT64_MAX};
    tsh_ctx *ctx = open_ctx();
    tsh_tensor *back;
    (void)state;
    EXPECT_INTS(tsh_cast(row(ctx, 10, v), TSH_I32), 10,
                {INT32_MIN, INT32_MIN, INT32_MIN, INT32_MIN, -2147483520, 2147483520, INT32_MAX,
                 INT32_MAX, INT32_MAX, 0});
    EXPECT_INTS(tsh_cast(row(ctx, 8, w), TSH_I64), 8,
                {INT64_MIN, INT64_MIN, INT64_MIN, INT64_MIN, INT64_C(9223371487098961920),
                 INT64_MAX, INT64_MAX, 0});
    EXPECT_INTS(tsh_cast(ints(ctx, tsh_shape1(7), wide), TSH_I32), 7,
                {INT32_MIN, INT32_MIN, INT32_MIN, -1, INT32_MAX, INT32_MAX, INT32_MAX});
    back = tsh_cast(tsh_cast(row(ctx, 8, w), TSH_BF16), TSH_I64); /* from 16 bits, and strided */
    EXPECT_INTS(tsh_slice(tsh_transpose(tsh_reshape(back, tsh_shape2(4, 2)), 0, 1), 1, 1, 3), 6,
                {INT64_MIN, INT64_MAX, INT64_MAX, INT64_MIN, INT64_MAX, 0});
    assert_null(tsh_arange(ctx, TSH_I64, 9223372036854775808.0, 1e19, 1e18)); /* 2^63 is beyond */
    assert_int_equal(tsh_last_error(ctx)->code, TSH_ERR_DTYPE);
    tsh_clear_error(ctx);
    EXPECT_INTS(tsh_arange(ctx, TSH_I32, -2147483648.0, -2147483646.0, 1), 2,
                {INT32_MIN, INT32_MIN + 1});
    close_ctx(ctx);
}

/* ------------------------------------------------------------------ nothing, and one */

/* Runs backward through y, whatever its size, and gives x's gradient. */
static tsh_tensor *slope(tsh_ctx *ctx, tsh_tensor *y, tsh_tensor *x) {
    tsh_zero_grad(x);
    backward(ctx, y);
    return tsh_grad(x);
}

static void test_empty_map_and_reduce(void **state) {
    static const float three[] = {1, 2, 3};
    tsh_ctx *ctx = open_ctx();
    tsh_tensor *e = leaf(ctx, tsh_shape2(0, 3), NULL), *b = row(ctx, 3, three), *part[2];
    (void)state;
    assert_null(tsh_data(ctx, e));
    assert_int_equal(tsh_numel(tsh_exp(e)), 0);
    EXPECT(slope(ctx, tsh_mul(e, b), b), 3, {0, 0, 0}); /* broadcast to (0, 3) */
    EXPECT(slope(ctx, tsh_mul(e, b), e), 0, {0});
    EXPECT(slope(ctx, tsh_where(tsh_lt(e, b), e, b), b), 3, {0, 0, 0});
    EXPECT(tsh_sum(e, TSH_ALL, 0), 1, {0});
    EXPECT(tsh_sum(e, 0, 0), 3, {0, 0, 0});
    EXPECT(tsh_sum(e, 1, 1), 0, {0});
    EXPECT(tsh_mean(e, 0, 0), 3, {NONE, NONE, NONE});
    EXPECT(tsh_max(e, 1, 0), 0, {0});
    EXPECT_INTS(tsh_argmax(e, 1, 0), 0, {0});
    EXPECT(slope(ctx, tsh_softmax(e, 1), e), 0, {0});
    EXPECT(tsh_softmax(e, 0), 0, {0});
    EXPECT(tsh_log_softmax(e, -1), 0, {0});
    EXPECT(tsh_reshape(e, tsh_shape3(3, 0, 7)), 0, {0});
    EXPECT(tsh_transpose(e, 0, 1), 0, {0});
    EXPECT(tsh_slice(b, 0, 3, 0), 0, {0});
    part[0] = tsh_reshape(e, tsh_shape1(0));
    part[1] = b;
    EXPECT(slope(ctx, tsh_concat(part, 2, 0), b), 3, {1, 1, 1});
    EXPECT(tsh_dropout(e, 0.5, NULL), 0, {0});
    EXPECT(tsh_cast(tsh_cast(e, TSH_I64), TSH_REAL), 0, {0});
    EXPECT(tsh_clone(e), 0, {0});
    close_ctx(ctx);
}

/* The last columns of a row, which fill no block, get what equal ones in a block get: the sign of
 * a zero, too. */
static void test_norm_ends(void **state) {
    enum { WIDTH = 37 };
    float zeros[WIDTH], ones[WIDTH];
    tsh_ctx *ctx = open_ctx();
    const float *y;
    int i, biased;
    (void)state;
    for (i = 0; i < WIDTH; i++) zeros[i] = 0;
    for (i = 0; i < WIDTH; i++) ones[i] = -1;
    for (biased = 0; biased < 2; biased++) {
        tsh_tensor *x = leaf(ctx, tsh_shape2(1, WIDTH), zeros), *w = row(ctx, WIDTH, ones);
        y = (const float *)tsh_data(ctx, biased ? tsh_layer_norm(x, w, row(ctx, WIDTH, zeros), 0)
                                                : tsh_rms_norm(x, w, 0));
        assert_non_null(y);
        assert_int_equal(signbit(y[0]) != 0, !biased);
        for (i = 1; i < WIDTH; i++) assert_memory_equal(&y[i], &y[0], sizeof *y);
    }
    tsh_close(ctx);
}

/* Rows whose variance is lost if it is taken carelessly, against sums in double: far from zero,
 * the first or the last values far from the rest, all alike. What is allowed beyond rounding is the
 * error of a mean in float. */
static void norm_row(int kind, int64_t n) {
    enum { MOST = 4096 };
    const tsh_layer_norm_desc desc = {.dim = n};
    float values[MOST];
    tsh_ctx *ctx = open_ctx();
    tsh_module *layer = tsh_add_layer_norm(tsh_root(ctx), "norm", &desc);
    tsh_tensor *x, *out;
    double mean = 0, variance = 0, rstd, want, most;
    const float *y;
    int64_t i;
    for (i = 0; i < n; i++) values[i] = kind == 3 ? 0.1f : (float)(i % 5 - 2) * 0.25f;
    for (i = 0; i < n; i++) {
        if (kind == 0) values[i] += 10000;
        if ((kind == 1 && i < 32) || (kind == 2 && i == n - 1)) values[i] += 1000;
    }
    for (i = 0; i < n; i++) mean += (double)values[i] / (double)n;
    for (i = 0; i < n; i++) variance += pow((double)values[i] - mean, 2) / (double)n;
    rstd = 1 / sqrt(variance + 1e-5);
    assert_int_equal(tsh_materialize(layer), TSH_OK);
    x = leaf(ctx, tsh_shape2(1, n), values);
    out = tsh_forward(layer, x);
    y = out ? (const float *)tsh_data(ctx, out) : NULL;
    assert_non_null(y);
    most = fabs(mean) * (double)FLT_EPSILON * rstd + 2e-6;
    for (i = 0; i < n; i++) {
        want = ((double)values[i] - mean) * rstd;
        if (!(fabs((double)y[i] - want) <= most + 4e-6 * fabs(want)))
            fail_msg("row %d of %d, [%d]: %.9g, not %.9g", kind, (int)n, (int)i, (double)y[i],
                     want);
    }
    close_ctx(ctx);
}

static void test_norm_variance(void **state) {
    static const int64_t widths[] = {1, 5, 31, 32, 33, 64, 100, 768, 4096};
    int kind, i;
    (void)state;
    for (kind = 0; kind < 4; kind++)
        for (i = 0; i < (int)(sizeof widths / sizeof *widths); i++) norm_row(kind, widths[i]);
}

/* Norms without a weight are what they are with one of ones, bit for bit, with and without a bias;
 * so are the gradients. */
static void test_norm_without(void **state) {
    enum { WIDTH = 37, ROWS = 3 };
    float v[ROWS * WIDTH], ones[WIDTH], some[WIDTH], want[2][ROWS * WIDTH];
    int kind, i;
    (void)state;
    for (i = 0; i < ROWS * WIDTH; i++) v[i] = (float)(i * 37 % 101) / 25 - 2;
    for (i = 0; i < WIDTH; i++) ones[i] = 1;
    for (i = 0; i < WIDTH; i++) some[i] = (float)(i * 5 % 11) / 5 - 1;
    for (kind = 0; kind < 8; kind++) { /* bit 0: a bias; then layer norm, rms norm and plus one */
        tsh_rms_norm_desc one;
        tsh_ctx *ctx = open_ctx();
        tsh_tensor *x = leaf(ctx, tsh_shape2(ROWS, WIDTH), v), *b = kind & 1 ? row(ctx, WIDTH, some)
                                                                             : NULL;
        int given;
        memset(&one, 0, sizeof one);
        one.plus_one = kind >= 6;
        for (given = 1; given >= 0; given--) {
            tsh_tensor *w = given ? row(ctx, WIDTH, ones) : NULL, *y;
            if (given && kind >= 6) w = tsh_keep(tsh_scale(w, 0));
            y = kind < 4 ? tsh_layer_norm(x, w, b, kind < 2 ? 0 : 0.25)
                         : tsh_rms_norm_with(x, w, &one);
            if (!y) fail_msg("%d %d: %s", kind, given, tsh_last_error(ctx)->message);
            if (given) tsh_read(ctx, y, TSH_LOCAL, want[0], sizeof want[0]);
            if (!given) expect_same_bits(__LINE__, y, want[0]);
            y = slope(ctx, tsh_mul(y, tsh_detach(tsh_scale(x, 0.5))), x);
            if (given) tsh_read(ctx, y, TSH_LOCAL, want[1], sizeof want[1]);
            if (!given) expect_same_bits(__LINE__, y, want[1]);
        }
        close_ctx(ctx);
    }
}

static void test_empty_matrices(void **state) {
    static const float six[] = {1, 2, 3, 4, 5, 6};
    static const int64_t id[] = {0};
    tsh_cross_entropy_desc desc;
    tsh_ctx *ctx = open_ctx();
    tsh_tensor *e = leaf(ctx, tsh_shape2(0, 3), NULL), *w = leaf(ctx, tsh_shape2(2, 3), six),
               *b = row(ctx, 2, six), *narrow = leaf(ctx, tsh_shape2(2, 0), NULL), *none, *q, *k,
               *gain = row(ctx, 3, six), *shift = row(ctx, 3, six);
    (void)state;
    EXPECT(slope(ctx, tsh_matmul(narrow, e), e), 0, {0}); /* (2, 0) (0, 3): sums of no term */
    EXPECT(tsh_matmul(narrow, e), 6, {0, 0, 0, 0, 0, 0});
    EXPECT(slope(ctx, tsh_linear(e, w, b), w), 6, {0, 0, 0, 0, 0, 0});
    EXPECT(slope(ctx, tsh_linear(e, w, b), b), 2, {0, 0});
    EXPECT(tsh_linear(tsh_reshape(narrow, tsh_shape2(2, 0)), leaf(ctx, tsh_shape2(2, 0), NULL), b),
           4, {1, 2, 1, 2}); /* no feature: the bias */
    EXPECT(slope(ctx, tsh_embedding(ints(ctx, tsh_shape1(0), NULL), w, NULL), w), 6,
           {0, 0, 0, 0, 0, 0});
    EXPECT(tsh_embedding(ints(ctx, tsh_shape1(1), id), narrow, NULL), 0, {0});
    EXPECT(slope(ctx, tsh_layer_norm(e, gain, shift, 0), shift), 3, {0, 0, 0});
    none = leaf(ctx, tsh_shape1(0), NULL);
    EXPECT(slope(ctx, tsh_layer_norm(narrow, none, none, 0), narrow), 0, {0}); /* no feature */
    q = leaf(ctx, tsh_shape4(1, 1, 2, 3), six);
    k = leaf(ctx, tsh_shape4(1, 1, 0, 3), NULL);
    EXPECT(slope(ctx, tsh_attention(q, k, k, NULL), q), 6, {0, 0, 0, 0, 0, 0});
    EXPECT(tsh_attention(q, k, k, NULL), 6, {0, 0, 0, 0, 0, 0}); /* a query that sees no key */
    EXPECT(slope(ctx, tsh_attention(k, q, q, NULL), q), 6, {0, 0, 0, 0, 0, 0});
    memset(&desc, 0, sizeof desc);
    none = ints(ctx, tsh_shape1(0), NULL);
    EXPECT(tsh_cross_entropy(e, none, NULL), 1, {NONE});
    desc.empty_zero = 1;
    EXPECT(slope(ctx, tsh_cross_entropy(e, none, &desc), e), 0, {0});
    EXPECT(tsh_cross_entropy(e, none, &desc), 1, {0});
    desc.reduction = TSH_REDUCE_NONE;
    EXPECT(tsh_cross_entropy(e, none, &desc), 0, {0});
    close_ctx(ctx);
}

/* Every row is ignored: NaN as torch, or 0; no gradient either way. */
static void test_all_ignored(void **state) {
    static const float x[] = {1, 2, 3, 4};
    static const int64_t picks[] = {1, 1};
    tsh_cross_entropy_desc desc;
    tsh_ctx *ctx = open_ctx();
    tsh_tensor *logits = leaf(ctx, tsh_shape2(2, 2), x), *y;
    (void)state;
    memset(&desc, 0, sizeof desc);
    desc.ignore = 1;
    desc.ignore_index = 1;
    y = tsh_retain_grad(tsh_cross_entropy(logits, ints(ctx, tsh_shape1(2), picks), &desc));
    backward(ctx, y);
    EXPECT(y, 1, {NONE});
    EXPECT(tsh_grad(logits), 4, {0, 0, 0, 0});
    desc.empty_zero = 1;
    y = tsh_retain_grad(tsh_cross_entropy(logits, ints(ctx, tsh_shape1(2), picks), &desc));
    tsh_zero_grad(logits);
    backward(ctx, y);
    EXPECT(y, 1, {0});
    EXPECT(tsh_grad(logits), 4, {0, 0, 0, 0});
    close_ctx(ctx);
}

static void test_length_one(void **state) {
    static const float v[] = {2, 3};
    static const float five[] = {5};
    static const int64_t zero[] = {0};
    tsh_ctx *ctx = open_ctx();
    tsh_tensor *x = leaf(ctx, tsh_shape3(1, 2, 1), v), *s = leaf(ctx, tsh_shape0(), five), *part[1];
    (void)state;
    EXPECT(tsh_sum(x, 0, 0), 2, {2, 3});
    EXPECT(tsh_sum(x, 1, 1), 1, {5});
    EXPECT(tsh_mean(x, 2, 0), 2, {2, 3});
    EXPECT(tsh_max(x, -3, 0), 2, {2, 3});
    EXPECT_INTS(tsh_argmax(x, 2, 1), 2, {0, 0});
    EXPECT(tsh_softmax(x, 2), 2, {1, 1});
    EXPECT(tsh_log_softmax(x, 0), 2, {0, 0});
    EXPECT(slope(ctx, tsh_mul(tsh_transpose(x, 0, 1), x), x), 2, {10, 10}); /* (2,1,1) (1,2,1) */
    EXPECT(tsh_matmul(tsh_reshape(x, tsh_shape2(2, 1)), tsh_reshape(x, tsh_shape2(1, 2))), 4,
           {4, 6, 6, 9});
    EXPECT(tsh_layer_norm(tsh_reshape(x, tsh_shape2(2, 1)), tsh_reshape(s, tsh_shape1(1)), NULL, 0),
           2, {0, 0});
    EXPECT(tsh_softmax(tsh_reshape(s, tsh_shape1(1)), 0), 1, {1});
    EXPECT(tsh_sum(s, TSH_ALL, 0), 1, {5});
    EXPECT_INTS(tsh_argmax(s, TSH_ALL, 0), 1, {0});
    EXPECT(slope(ctx, tsh_reshape(s, tsh_shape4(1, 1, 1, 1)), s), 1, {1});
    EXPECT(tsh_cross_entropy(tsh_reshape(s, tsh_shape1(1)), ints(ctx, tsh_shape0(), zero), NULL), 1,
           {0});
    part[0] = s = tsh_reshape(s, tsh_shape1(1));
    EXPECT(tsh_concat(part, 1, 0), 1, {5});
    assert_int_equal(tsh_split(s, 0, 1, part), TSH_OK);
    EXPECT(part[0], 1, {5});
    assert_true(tsh_item(ctx, s) == 5);
    close_ctx(ctx);
}

/* A tensor without dimensions takes dimension 0 and -1, as torch's, and no other. */
static void test_scalar_dimensions(void **state) {
    static const float five[] = {5};
    static const int bad[] = {1, -2};
    tsh_ctx *ctx = open_ctx();
    tsh_tensor *s = leaf(ctx, tsh_shape0(), five);
    int dim, keep, i;
    (void)state;
    for (dim = -1; dim <= 0; dim++) {
        for (keep = 0; keep < 2; keep++) {
            EXPECT(tsh_sum(s, dim, keep), 1, {5});
            EXPECT(tsh_mean(s, dim, keep), 1, {5});
            EXPECT_INTS(tsh_argmax(s, dim, keep), 1, {0});
            EXPECT(tsh_max(s, dim, keep), 1, {5});
            assert_int_equal(tsh_ndim(tsh_max(s, dim, keep)), 0);
            EXPECT(slope(ctx, tsh_sum(s, dim, keep), s), 1, {1});
            EXPECT(slope(ctx, tsh_mean(s, dim, keep), s), 1, {1});
            EXPECT(slope(ctx, tsh_max(s, dim, keep), s), 1, {1});
        }
        EXPECT(tsh_softmax(s, dim), 1, {1});
        EXPECT(slope(ctx, tsh_softmax(s, dim), s), 1, {0});
        EXPECT(tsh_log_softmax(s, dim), 1, {0});
        EXPECT(slope(ctx, tsh_transpose(s, dim, -1 - dim), s), 1, {1});
        assert_int_equal(tsh_ndim(tsh_transpose(s, dim, dim)), 0);
    }
    assert_int_equal(tsh_ndim(tsh_permute(s, NULL)), 0);
    for (i = 0; i < 2; i++) {
        const int d = bad[i];
        assert_null(tsh_sum(s, d, 0));
        tsh_clear_error(ctx);
        assert_null(tsh_softmax(s, d));
        tsh_clear_error(ctx);
        assert_null(tsh_transpose(s, 0, d));
        assert_int_equal(tsh_last_error(ctx)->code, TSH_ERR_SHAPE);
        tsh_clear_error(ctx);
    }
    assert_null(tsh_softmax(s, TSH_ALL)); /* of a tensor with dimensions neither */
    tsh_clear_error(ctx);
    close_ctx(ctx);
}

/* ------------------------------------------------------------------ copies, dropout, gradients */

static void test_copies(void **state) {
    static const float v[] = {1, 2, 3};
    tsh_ctx *ctx = open_ctx();
    tsh_tensor *x = row(ctx, 3, v), *clone, *cut, *kept;
    (void)state;
    clone = tsh_clone(x);
    cut = tsh_detach(x);
    kept = tsh_keep(clone);
    assert_ptr_not_equal(tsh_data(ctx, clone), tsh_data(ctx, x));
    assert_ptr_equal(tsh_data(ctx, cut), tsh_data(ctx, x)); /* the values are shared */
    backward(ctx, tsh_mul(tsh_mul(clone, cut), kept));
    EXPECT(tsh_grad(x), 3, {1, 4, 9}); /* through the clone alone */
    assert_null(tsh_grad(cut));
    backward(ctx, x = tsh_mul(row(ctx, 3, v), kept)); /* kept lives on, without a gradient */
    assert_int_equal(tsh_step_end(ctx), TSH_OK);
    EXPECT(kept, 3, {1, 2, 3});
    tsh_no_grad_begin(ctx);
    x = tsh_mul(kept, tsh_requires_grad(kept, 1));
    tsh_no_grad_end(ctx);
    assert_int_equal(tsh_backward(ctx, tsh_sum(x, 0, 0)), TSH_ERR_STATE);
    tsh_clear_error(ctx);
    close_ctx(ctx);
}

static void test_dropout_ends(void **state) {
    static const float v[] = {1, 2, 3};
    tsh_ctx *ctx = open_ctx();
    tsh_tensor *x = row(ctx, 3, v);
    tsh_module *layer = tsh_add_dropout(tsh_root(ctx), "drop", 0.5);
    (void)state;
    assert_ptr_equal(tsh_dropout(x, 0, NULL), x);
    EXPECT(slope(ctx, tsh_dropout(x, 1, NULL), x), 3, {0, 0, 0});
    EXPECT(tsh_dropout(x, 1, NULL), 3, {0, 0, 0});
    tsh_train(layer, 0);
    assert_ptr_equal(tsh_forward(layer, x), x);
    tsh_train(layer, 1);
    assert_ptr_not_equal(tsh_forward(layer, x), x);
    close_ctx(ctx);
}

/* Gradients add up over backward calls until they are zeroed; a retained tensor has one too. */
static void test_accumulation(void **state) {
    static const float v[] = {1, 2, 3};
    tsh_ctx *ctx = open_ctx();
    tsh_tensor *x = row(ctx, 3, v), *y;
    (void)state;
    assert_null(tsh_grad(x));
    backward(ctx, tsh_scale(x, 2));
    backward(ctx, tsh_mul(x, x));
    EXPECT(tsh_grad(x), 3, {4, 6, 8});
    tsh_zero_grad(x);
    assert_null(tsh_grad(x));
    y = tsh_retain_grad(tsh_scale(x, 3));
    backward(ctx, tsh_mul(y, y));
    EXPECT(y, 3, {3, 6, 9});
    EXPECT(tsh_grad(y), 3, {6, 12, 18});
    EXPECT(tsh_grad(x), 3, {18, 36, 54});
    EXPECT(tsh_grad(tsh_slice(x, 0, 1, 1)), 1, {36}); /* a view of a leaf shows its part */
    close_ctx(ctx);
}

/* ------------------------------------------------------------------ attention's edges */

/* More queries than keys: the first queries see none, and give 0 (torch: NaN). */
static void test_attention_sees_nothing(void **state) {
    static const float q[] = {1, 2, 3}, v[] = {5, 7};
    tsh_attention_desc desc;
    tsh_ctx *ctx = open_ctx();
    tsh_tensor *a = leaf(ctx, tsh_shape4(1, 1, 3, 1), q), *b = leaf(ctx, tsh_shape4(1, 1, 2, 1), v),
               *y;
    (void)state;
    memset(&desc, 0, sizeof desc);
    desc.causal = 1;
    y = tsh_retain_grad(tsh_attention(a, tsh_zeros(ctx, tsh_shape4(1, 1, 2, 1)), b, &desc));
    backward(ctx, y);
    EXPECT(y, 3, {0, 5, 6});
    EXPECT(tsh_grad(b), 2, {1.5f, 0.5f});
    EXPECT(tsh_grad(a), 3, {0, 0, 0});
    close_ctx(ctx);
}

/* Whole tiles of scores that are -infinity weigh nothing, before and after a finite one. */
static void test_attention_infinite(void **state) {
    float k[130], v[130];
    tsh_ctx *ctx = open_ctx();
    tsh_tensor *a, *b, *y;
    int i;
    (void)state;
    for (i = 0; i < 130; i++) {
        k[i] = i == 64 || i == 70 ? 0 : -INF;
        v[i] = (float)i;
    }
    a = leaf(ctx, tsh_shape4(1, 1, 130, 1), k);
    b = leaf(ctx, tsh_shape4(1, 1, 130, 1), v);
    y = tsh_attention(tsh_ones(ctx, tsh_shape4(1, 1, 1, 1)), a, b, NULL);
    EXPECT(y, 1, {67});
    k[3] = NONE;
    a = leaf(ctx, tsh_shape4(1, 1, 130, 1), k);
    EXPECT(tsh_attention(tsh_ones(ctx, tsh_shape4(1, 1, 1, 1)), a, b, NULL), 1, {NONE});
    close_ctx(ctx);
}

/* Position by position with a cache is the causal attention of the whole. */
static void test_attention_cache(void **state) {
    enum { H = 2, T = 70, D = 3 };
    tsh_attention_desc desc;
    tsh_ctx *ctx = open_ctx();
    tsh_tensor *x[3], *part[3], *whole;
    tsh_shape shape = tsh_shape4(1, H, T, D);
    float all[H * T * D], one[8 * H * D];
    int64_t i, j, t, n;
    (void)state;
    for (i = 0; i < 3; i++) x[i] = tsh_randn(ctx, shape);
    memset(&desc, 0, sizeof desc);
    desc.causal = 1;
    whole = tsh_attention(x[0], x[1], x[2], &desc);
    assert_int_equal(tsh_read(ctx, whole, TSH_LOCAL, all, sizeof all), TSH_OK);
    desc.cache_k = tsh_tensor_new(ctx, TSH_REAL, shape, tsh_replicated());
    desc.cache_v = tsh_tensor_new(ctx, TSH_REAL, shape, tsh_replicated());
    for (t = 0; t < T; t += n) {
        n = t + 7 < T ? 7 : T - t; /* a prompt of 7, and 7 at a time */
        for (i = 0; i < 3; i++) part[i] = tsh_slice(x[i], 2, t, n);
        desc.past = t;
        whole = tsh_attention(part[0], part[1], part[2], &desc);
        assert_int_equal(tsh_read(ctx, whole, TSH_LOCAL, one, (size_t)(n * H * D) * 4), TSH_OK);
        /* the sums run over the same keys in the same tiles; gemm may order them by its own sizes
         */
        for (i = 0; i < H; i++)
            for (j = 0; j < n * D; j++)
                assert_true(fabsf(one[i * n * D + j] - all[(i * T + t) * D + j]) < 4e-6f);
    }
    close_ctx(ctx);
}

/* ------------------------------------------------------------------ memory order
 * Every op on inputs that lie transposed in memory, and on every other element of a larger tensor
 * with an offset, against dense ones: values and gradients. */

typedef tsh_tensor *(*order_fn)(tsh_tensor **in);

enum { INPUTS = 3, DENSE = 0, REVERSED, SPREAD, ORDERS };

typedef struct order_case {
    const char *name;
    order_fn fn;
    const char *shapes; /* "2,3 3": one per input; "%5 2": integers below 5 */
} order_case;

/* Reads one input's shape; returns what follows. */
static const char *parse_shape(const char *text, tsh_shape *shape, int64_t *below) {
    char *end;
    *shape = tsh_shape0();
    *below = 0;
    if (*text == '%') {
        *below = (int64_t)strtol(text + 1, &end, 10);
        text = end + 1;
    }
    while (*text && *text != ' ') {
        shape->dim[shape->ndim++] = (int64_t)strtol(text, &end, 10);
        text = *end == ',' ? end + 1 : end;
    }
    return *text ? text + 1 : text;
}

/* Value e of input `salt`: eighths within [0.25, 3.125], so that logarithms and powers exist. */
static double order_value(int64_t e, int salt, int64_t below) {
    int64_t mixed = (e * 7 + salt * 5) % 24;
    return below ? (double)(mixed % below) : (double)(mixed + 2) / 8;
}

/* Where element e (row-major over shape) lies in the larger tensor of this memory order. */
static int64_t order_place(const tsh_shape *shape, int order, int64_t e) {
    int64_t place = 0, step = 1, index[TSH_MAX_DIMS];
    int d;
    if (order == DENSE) return e;
    if (order == SPREAD) return 2 * e + 1;
    for (d = shape->ndim - 1; d >= 0; d--) {
        index[d] = e % shape->dim[d];
        e /= shape->dim[d];
    }
    for (d = 0; d < shape->ndim; d++) {
        place += index[d] * step;
        step *= shape->dim[d];
    }
    return place;
}

/* The same values in another memory order. */
static tsh_tensor *order_input(tsh_ctx *ctx, const tsh_shape *shape, int64_t below, int order,
                               int salt) {
    tsh_shape kept = *shape;
    int64_t n = 1, e;
    tsh_tensor *t;
    void *data;
    int d, reverse[TSH_MAX_DIMS];
    for (d = 0; d < shape->ndim; d++) n *= shape->dim[d];
    for (d = 0; d < shape->ndim; d++) reverse[d] = shape->ndim - 1 - d;
    for (d = 0; d < shape->ndim && order == REVERSED; d++)
        kept.dim[d] = shape->dim[shape->ndim - 1 - d];
    if (order == SPREAD) kept.dim[kept.ndim++] = 2;
    t = tsh_tensor_new(ctx, below ? TSH_I64 : TSH_REAL, kept, tsh_replicated());
    data = tsh_data(ctx, t);
    assert_non_null(data);
    for (e = 0; e < n; e++) {
        int64_t at = order_place(shape, order, e);
        if (below)
            ((int64_t *)data)[at] = (int64_t)order_value(e, salt, below);
        else
            ((tsh_real *)data)[at] = (tsh_real)order_value(e, salt, below);
    }
    if (!below) t = tsh_requires_grad(t, 1);
    if (order == REVERSED) t = tsh_permute(t, reverse);
    if (order == SPREAD) t = tsh_reshape(tsh_slice(t, -1, 1, 1), *shape);
    return t;
}

static tsh_module *order_owner; /* of dropout's mask */

typedef struct order_result {
    int64_t count[1 + INPUTS]; /* the output, then gradients; -1: none */
    float *values[1 + INPUTS];
} order_result;

static void order_keep(tsh_ctx *ctx, tsh_tensor *t, order_result *r, int i) {
    tsh_tensor *real = t && tsh_dtype_of(t) != TSH_REAL ? tsh_cast(t, TSH_REAL) : t;
    r->count[i] = t ? tsh_numel(t) : -1;
    r->values[i] = (float *)malloc((size_t)(r->count[i] + 1) * 4);
    assert_non_null(r->values[i]);
    if (t)
        assert_int_equal(tsh_read(ctx, real, TSH_LOCAL, r->values[i], (size_t)r->count[i] * 4),
                         TSH_OK);
}

static void order_run(const order_case *c, int order, order_result *r) {
    tsh_ctx *ctx = open_ctx();
    const char *at = c->shapes;
    tsh_tensor *in[INPUTS] = {NULL, NULL, NULL}, *y, *w;
    int64_t below, e;
    tsh_shape shape;
    int n = 0, i;
    order_owner = tsh_add_dropout(tsh_root(ctx), "drop", 0.5);
    for (; *at; n++) {
        at = parse_shape(at, &shape, &below);
        in[n] = order_input(ctx, &shape, below, order, n);
    }
    y = tsh_retain_grad(c->fn(in));
    if (!y) fail_msg("%s: %s", c->name, tsh_last_error(ctx)->message);
    if (tsh_dtype_of(y) == TSH_REAL && y->base->requires_grad) {
        w = tsh_zeros(ctx, tsh_shape_of(y));
        for (e = 0; e < tsh_numel(w); e++)
            ((tsh_real *)tsh_data(ctx, w))[e] = (tsh_real)(e % 5 - 1) / 4;
        backward(ctx, tsh_mul(y, w));
    }
    order_keep(ctx, y, r, 0);
    for (i = 0; i < INPUTS; i++)
        order_keep(ctx, in[i] && in[i]->base->requires_grad ? tsh_grad(in[i]) : NULL, r, i + 1);
    close_ctx(ctx);
}

#define F(name, expression)                                                                        \
    static tsh_tensor *f_##name(tsh_tensor **in) {                                                 \
        tsh_tensor *a = in[0], *b = in[1], *c = in[2];                                             \
        (void)a;                                                                                   \
        (void)b;                                                                                   \
        (void)c;                                                                                   \
        return expression;                                                                         \
    }
F(neg, tsh_neg(a))
F(scale, tsh_scale(a, 3))
F(add_scalar, tsh_add_scalar(a, 3))
F(pow_scalar, tsh_pow_scalar(a, 1.5))
F(exp, tsh_exp(a))
F(log, tsh_log(a))
F(sqrt, tsh_sqrt(a))
F(sigmoid, tsh_sigmoid(a))
F(tanh, tsh_tanh(a))
F(relu, tsh_relu(tsh_add_scalar(a, -1)))
F(relu_bare, tsh_relu(a))
F(erf, tsh_erf(a))
F(gelu, tsh_gelu(a))
F(gelu_tanh, tsh_gelu_tanh(a))
F(silu, tsh_silu(a))
F(add, tsh_add(a, b))
F(sub, tsh_sub(a, b))
F(mul, tsh_mul(a, b))
F(div, tsh_div(a, b))
F(pow, tsh_pow(a, b))
F(eq, tsh_eq(a, b))
F(ne, tsh_ne(a, b))
F(lt, tsh_lt(a, b))
F(le, tsh_le(a, b))
F(gt, tsh_gt(a, b))
F(ge, tsh_ge(a, b))
F(where, tsh_where(tsh_cast(a, TSH_I32), b, c))
F(cast, tsh_cast(a, TSH_I64))
F(clone, tsh_clone(a))
F(keep, tsh_keep(a))
F(detach, tsh_mul(a, tsh_detach(a)))
F(sum, tsh_sum(a, 1, 0))
F(sum_all, tsh_sum(a, TSH_ALL, 0))
F(mean, tsh_mean(a, 0, 1))
F(max, tsh_max(a, 1, 0))
F(max_all, tsh_max(a, TSH_ALL, 0))
F(argmax, tsh_argmax(a, 0, 0))
F(softmax, tsh_softmax(a, -1))
F(softmax_first, tsh_softmax(a, 0))
F(log_softmax, tsh_log_softmax(a, 1))
F(reshape, tsh_reshape(a, tsh_shape2(-1, 4)))
F(transpose, tsh_exp(tsh_transpose(a, 0, 1)))
F(slice, tsh_exp(tsh_slice(a, 1, 1, 2)))
F(concat, tsh_concat(in, 2, 1))
F(matmul, tsh_matmul(a, b))
F(linear, tsh_linear(a, b, c))
F(linear_plain, tsh_linear(a, b, NULL))
F(embedding, tsh_embedding(a, b, NULL))
F(layer_norm, tsh_layer_norm(a, b, c, 0))
F(layer_norm_plain, tsh_layer_norm(a, b, NULL, 0))
F(attention, tsh_attention(a, b, c, NULL))
F(loss, tsh_cross_entropy(a, b, NULL))
F(full, tsh_full_tensor(a))

static tsh_tensor *f_causal(tsh_tensor **in) {
    tsh_attention_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.causal = 1;
    desc.dropout = 0.3;
    desc.owner = order_owner;
    return tsh_attention(in[0], in[1], in[2], &desc);
}

static tsh_tensor *f_loss_rows(tsh_tensor **in) {
    tsh_cross_entropy_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.reduction = TSH_REDUCE_NONE;
    return tsh_cross_entropy(in[0], in[1], &desc);
}

static tsh_tensor *f_split(tsh_tensor **in) {
    tsh_tensor *part[2];
    (void)tsh_split(in[0], 1, 2, part);
    return tsh_mul(part[0], part[1]);
}

static tsh_tensor *f_dropout(tsh_tensor **in) {
    return tsh_dropout(in[0], 0.4, order_owner);
}

/* y = a + 2 b, told apart by their places. */
static void sum_forward(tsh_tensor *const *in, int n, void *const *out, void *user) {
    tsh_real *y = (tsh_real *)out[0];
    tsh_ctx *ctx = (tsh_ctx *)user;
    const tsh_real *a = (const tsh_real *)tsh_data(ctx, in[0]),
                   *b = (const tsh_real *)tsh_data(ctx, in[n - 1]);
    int64_t i;
    for (i = 0; i < tsh_numel(in[0]); i++) y[i] = a[i] + 2 * b[i];
}

static void sum_backward(tsh_tensor *const *in, int n, const void *const *out,
                         const tsh_real *const *grad_out, tsh_real *const *grad_in, void *user) {
    const tsh_real *dy = grad_out[0];
    int64_t i;
    (void)user;
    (void)out;
    for (i = 0; i < tsh_numel(in[0]); i++) {
        grad_in[0][i] += dy[i];
        grad_in[n - 1][i] += 2 * dy[i];
    }
}

static tsh_tensor *f_custom(tsh_tensor **in) {
    tsh_custom_op_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.name = "my_sum";
    desc.out[0].shape = tsh_shape_of(in[0]);
    desc.out[0].layout = tsh_replicated();
    desc.forward = sum_forward;
    desc.backward = sum_backward;
    desc.user = tsh_ctx_of(in[0]);
    return tsh_custom_op(tsh_ctx_of(in[0]), in, 2, NULL, &desc);
}

static void order_compare(const order_case *c, int order, const order_result *want,
                          const order_result *got) {
    int i;
    int64_t e;
    for (i = 0; i <= INPUTS; i++) {
        if (want->count[i] != got->count[i])
            fail_msg("%s, order %d, result %d: %ld values, not %ld", c->name, order, i,
                     (long)got->count[i], (long)want->count[i]);
        for (e = 0; e < want->count[i]; e++) {
            double x = (double)got->values[i][e], y = (double)want->values[i][e];
            /* the same formulas; loops over strides may sum up to 16 values in another order */
            if (!same(x, y) && !(fabs(x - y) <= 16 * (double)FLT_EPSILON * (1 + fabs(y))))
                fail_msg("%s, order %d, result %d [%ld]: %.9g, not %.9g", c->name, order, i,
                         (long)e, x, y);
        }
    }
}

static void order_check(const order_case *c) {
    order_result dense, other;
    int order, i;
    order_run(c, DENSE, &dense);
    for (order = REVERSED; order < ORDERS; order++) {
        order_run(c, order, &other);
        order_compare(c, order, &dense, &other);
        for (i = 0; i <= INPUTS; i++) free(other.values[i]);
    }
    for (i = 0; i <= INPUTS; i++) free(dense.values[i]);
}

static void test_orders_map(void **state) {
    static const order_case cases[] = {
        {"neg", f_neg, "3,4,5"},
        {"scale", f_scale, "3,4,5"},
        {"add_scalar", f_add_scalar, "3,4,5"},
        {"pow_scalar", f_pow_scalar, "3,4,5"},
        {"exp", f_exp, "3,4,5"},
        {"log", f_log, "3,4,5"},
        {"sqrt", f_sqrt, "3,4,5"},
        {"sigmoid", f_sigmoid, "3,4,5"},
        {"tanh", f_tanh, "3,4,5"},
        {"relu", f_relu, "3,4,5"},
        {"relu", f_relu_bare, "3,4,5"},
        {"erf", f_erf, "3,4,5"},
        {"gelu", f_gelu, "3,4,5"},
        {"gelu_tanh", f_gelu_tanh, "3,4,5"},
        {"silu", f_silu, "3,4,5"},
        {"add", f_add, "3,4,5 3,4,5"},
        {"add", f_add, "3,4,5 4,1"},
        {"sub", f_sub, "4,5 3,4,5"},
        {"mul", f_mul, "3,4,5 3,1,5"},
        {"div", f_div, "3,4,5 3,4,1"},
        {"div", f_div, "5 3,4,5"},
        {"pow", f_pow, "3,4,5 3,4,5"},
        {"pow", f_pow, "3,4,5 4,5"},
        {"eq", f_eq, "3,4,5 4,5"},
        {"ne", f_ne, "%3 3,4,5 %3 4,5"},
        {"lt", f_lt, "3,4,5 4,1"},
        {"le", f_le, "%9 3,4,5 %9 4,5"},
        {"gt", f_gt, "3,4,5 4,5"},
        {"ge", f_ge, "3,4,5 3,1,5"},
        {"where", f_where, "%2 3,4,5 3,4,5 4,1"},
        {"where", f_where, "%2 4,1 3,4,5 3,4,5"},
        {"cast", f_cast, "3,4,5"},
        {"clone", f_clone, "3,4,5"},
        {"keep", f_keep, "3,4,5"},
        {"detach", f_detach, "3,4,5"},
        {"dropout", f_dropout, "3,4,5"},
        {"full", f_full, "3,4,5"},
        {"custom", f_custom, "3,4,5 3,4,5"},
    };
    int i;
    (void)state;
    for (i = 0; i < COUNT(cases); i++) order_check(&cases[i]);
}

static void test_orders_rest(void **state) {
    static const order_case cases[] = {
        {"sum", f_sum, "3,4,5"},
        {"sum_all", f_sum_all, "3,4,5"},
        {"mean", f_mean, "3,4,5"},
        {"max", f_max, "3,4,5"},
        {"max_all", f_max_all, "3,4,5"},
        {"argmax", f_argmax, "3,4,5"},
        {"softmax", f_softmax, "3,4,5"},
        {"softmax", f_softmax_first, "3,4,5"},
        {"log_softmax", f_log_softmax, "3,4,5"},
        {"reshape", f_reshape, "2,3,8"},
        {"transpose", f_transpose, "3,4,5"},
        {"slice", f_slice, "3,4,5"},
        {"split", f_split, "3,4,5"},
        {"concat", f_concat, "3,4,5 3,2,5"},
        {"matmul", f_matmul, "3,4 4,5"},
        {"matmul", f_matmul, "2,1,3,4 3,4,2"},
        {"linear", f_linear, "4 3,4 3"},
        {"linear", f_linear, "5,4 3,4 3"},
        {"linear", f_linear, "2,5,4 3,4 3"},
        {"linear", f_linear_plain, "2,5,4 3,4"},
        {"embedding", f_embedding, "%5 3,2 5,4"},
        {"layer_norm", f_layer_norm, "3,2,5 5 5"},
        {"layer_norm", f_layer_norm_plain, "4,5 5"},
        {"attention", f_attention, "2,3,4,2 2,3,5,2 2,3,5,2"},
        {"attention, causal", f_causal, "2,3,4,2 2,3,5,2 2,3,5,2"},
        {"cross_entropy", f_loss, "3,5 %5 3"},
        {"cross_entropy", f_loss, "2,3,5 %5 2,3"},
        {"cross_entropy", f_loss_rows, "2,3,5 %5 2,3"},
    };
    int i;
    (void)state;
    for (i = 0; i < COUNT(cases); i++) order_check(&cases[i]);
}

/* Frequencies and a factor: the formula, also after the same array got other values. */
static void test_rope_freqs(void **state) {
    tsh_ctx *ctx = open_ctx();
    double freqs[3] = {1, 0.25, 0.125};
    tsh_rope_desc desc;
    tsh_tensor *y;
    float x[2 * 7], want[2 * 7];
    int i, round, t;
    (void)state;
    for (i = 0; i < 14; i++) x[i] = (float)(i % 5) - 1.5F;
    memset(&desc, 0, sizeof desc);
    desc.dims = 6;
    desc.start = 5;
    desc.freqs = freqs;
    desc.factor = 1.5;
    for (round = 0; round < 3; round++) {
        if (round == 1) freqs[1] = 2.5;
        if (round == 2) desc.factor = 0.75;
        y = tsh_rope(tsh_tensor_from(ctx, TSH_REAL, tsh_shape2(2, 7), tsh_replicated(), x), &desc);
        for (t = 0; t < 2; t++) {
            want[7 * t + 6] = x[7 * t + 6];
            for (i = 0; i < 3; i++) {
                double u = (5 + t) * freqs[i], a = (double)x[7 * t + i];
                double b = (double)x[7 * t + i + 3];
                want[7 * t + i] = (float)(desc.factor * (a * cos(u) - b * sin(u)));
                want[7 * t + i + 3] = (float)(desc.factor * (b * cos(u) + a * sin(u)));
            }
        }
        for (i = 0; i < 14; i++) /* three roundings of values up to 4 */
            assert_true(fabs((double)((float *)tsh_data(ctx, y))[i] - (double)want[i]) < 2e-6);
    }
    close_ctx(ctx);
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_accuracy),
        cmocka_unit_test(test_special),
        cmocka_unit_test(test_special_slopes),
        cmocka_unit_test(test_where_and_nan),
        cmocka_unit_test(test_nan_in_rows),
        cmocka_unit_test(test_softmax_edges),
        cmocka_unit_test(test_shifted_logits),
        cmocka_unit_test(test_max),
        cmocka_unit_test(test_sum_of_rows),
        cmocka_unit_test(test_compare),
        cmocka_unit_test(test_cast_and_integers),
        cmocka_unit_test(test_cast_clamps),
        cmocka_unit_test(test_empty_map_and_reduce),
        cmocka_unit_test(test_norm_without),
        cmocka_unit_test(test_empty_matrices),
        cmocka_unit_test(test_norm_ends),
        cmocka_unit_test(test_norm_variance),
        cmocka_unit_test(test_all_ignored),
        cmocka_unit_test(test_length_one),
        cmocka_unit_test(test_scalar_dimensions),
        cmocka_unit_test(test_copies),
        cmocka_unit_test(test_dropout_ends),
        cmocka_unit_test(test_accumulation),
        cmocka_unit_test(test_attention_sees_nothing),
        cmocka_unit_test(test_attention_infinite),
        cmocka_unit_test(test_attention_cache),
        cmocka_unit_test(test_orders_map),
        cmocka_unit_test(test_rope_freqs),
        cmocka_unit_test(test_orders_rest),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
