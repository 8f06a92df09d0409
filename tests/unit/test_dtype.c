/* A dtype is one row of one table: with a row of its own (bfloat.h) every op takes tensors of it,
 * as of bf16 and f16. Inputs are values that it holds exactly, so that outputs are those of
 * tsh_real, rounded once, and gradients, which are of tsh_real, have the same bits. */
/* build: double */
#define TSHARD_IMPLEMENTATION
#include "../support/bfloat.h"
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../support/unit.h"
#include "../support/short_floats.h"

enum { HALF_INPUTS = 4, HALF_MAX = 4096 };

/* What a test computes: out of n inputs, which hold no other values than a bfloat does. */
typedef struct half_computation {
    const char *name;
    tsh_tensor *(*fn)(tsh_tensor *const *in);
    tsh_shape shape[HALF_INPUTS];
    int n;
    int positive;    /* inputs above 0 */
    double loosened; /* how far gradients may be off, relatively: backward reads the rounded output,
                      * or sums in another order, as products of bf16 do */
    int loss;        /* the output is tsh_real, as all losses are */
} half_computation;

static tsh_tensor *half_add(tsh_tensor *const *in) { return tsh_add(in[0], in[1]); }
static tsh_tensor *half_divide(tsh_tensor *const *in) { return tsh_div(in[0], in[1]); }
static tsh_tensor *half_power(tsh_tensor *const *in) { return tsh_pow(in[0], in[1]); }
static tsh_tensor *half_gelu(tsh_tensor *const *in) { return tsh_gelu(in[0]); }
static tsh_tensor *half_sigmoid(tsh_tensor *const *in) { return tsh_sigmoid(in[0]); }
static tsh_tensor *half_transposed(tsh_tensor *const *in) {
    return tsh_silu(tsh_transpose(in[0], 0, 1));
}
static tsh_tensor *half_where(tsh_tensor *const *in) {
    return tsh_where(tsh_lt(in[0], in[1]), in[0], in[1]);
}
static tsh_tensor *half_sum(tsh_tensor *const *in) { return tsh_sum(in[0], 0, 0); }
static tsh_tensor *half_mean(tsh_tensor *const *in) { return tsh_mean(in[0], 1, 1); }
static tsh_tensor *half_largest(tsh_tensor *const *in) { return tsh_max(in[0], 1, 0); }
static tsh_tensor *half_softmax(tsh_tensor *const *in) { return tsh_softmax(in[0], 1); }
static tsh_tensor *half_log_softmax(tsh_tensor *const *in) { return tsh_log_softmax(in[0], 0); }
static tsh_tensor *half_layer_norm(tsh_tensor *const *in) {
    return tsh_layer_norm(in[0], in[1], in[2], 0);
}
static tsh_tensor *half_rms_norm(tsh_tensor *const *in) { return tsh_rms_norm(in[0], in[1], 0); }
static tsh_tensor *half_rms_norm_one(tsh_tensor *const *in) {
    tsh_rms_norm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.plus_one = 1;
    return tsh_rms_norm_with(in[0], in[1], &desc);
}
static tsh_tensor *half_matmul(tsh_tensor *const *in) { return tsh_matmul(in[0], in[1]); }
static tsh_tensor *half_linear(tsh_tensor *const *in) { return tsh_linear(in[0], in[1], in[2]); }
static tsh_tensor *half_rope(tsh_tensor *const *in) { return tsh_rope(in[0], NULL); }
static tsh_tensor *half_concat(tsh_tensor *const *in) { return tsh_concat(in, 2, 1); }
static tsh_tensor *half_attention(tsh_tensor *const *in) {
    tsh_attention_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.causal = 1;
    return tsh_attention(in[0], in[1], in[2], &desc);
}
static tsh_tensor *half_embedding(tsh_tensor *const *in) {
    tsh_tensor *ids = tsh_arange(tsh_ctx_of(in[0]), TSH_I32, 6, 0, -2);
    return tsh_embedding(ids, in[0], NULL);
}
static tsh_tensor *half_dropout(tsh_tensor *const *in) {
    tsh_ctx_of(in[0])->dropout_calls = 0; /* the same mask each time */
    return tsh_dropout(in[0], 0.25, NULL);
}
static tsh_tensor *half_cross_entropy(tsh_tensor *const *in) {
    tsh_tensor *classes = tsh_arange(tsh_ctx_of(in[0]), TSH_I64, 0, 5, 1);
    return tsh_cross_entropy(in[0], classes, NULL);
}

#define HALF_1(a)          {1, {a}}
#define HALF_2(a, b)       {2, {a, b}}
#define HALF_3(a, b, c)    {3, {a, b, c}}
#define HALF_4(a, b, c, d) {4, {a, b, c, d}}
static const half_computation half_computations[] = {
    {"add", half_add, {HALF_2(5, 37), HALF_2(5, 37)}, 2, 0, 0, 0},
    {"add, broadcast", half_add, {HALF_2(5, 37), HALF_1(37)}, 2, 0, 0, 0},
    {"div", half_divide, {HALF_2(5, 37), HALF_2(5, 1)}, 2, 1, 0, 0},
    {"pow", half_power, {HALF_2(3, 7), HALF_2(3, 7)}, 2, 1, 0, 0},
    {"gelu", half_gelu, {HALF_2(9, 33)}, 1, 0, 0, 0},
    {"sigmoid", half_sigmoid, {HALF_2(9, 33)}, 1, 0, 0.02, 0},
    {"silu of a view", half_transposed, {HALF_2(9, 33)}, 1, 0, 0, 0},
    {"where", half_where, {HALF_2(4, 40), HALF_2(4, 40)}, 2, 0, 0, 0},
    {"sum", half_sum, {HALF_2(5, 37)}, 1, 0, 0, 0},
    {"mean", half_mean, {HALF_2(5, 37)}, 1, 0, 0, 0},
    {"max", half_largest, {HALF_2(5, 37)}, 1, 0, 0, 0},
    {"softmax", half_softmax, {HALF_2(5, 37)}, 1, 0, 0.05, 0},
    {"log_softmax", half_log_softmax, {HALF_2(5, 37)}, 1, 0, 0.05, 0},
    {"layer_norm", half_layer_norm, {HALF_2(6, 70), HALF_1(70), HALF_1(70)}, 3, 0, 0, 0},
    {"rms_norm", half_rms_norm, {HALF_2(6, 70), HALF_1(70)}, 2, 0, 0, 0},
    {"rms_norm, weight + 1", half_rms_norm_one, {HALF_2(6, 70), HALF_1(70)}, 2, 0, 0, 0},
    {"matmul", half_matmul, {HALF_3(2, 19, 45), HALF_3(2, 45, 33)}, 2, 0, 2e-6, 0},
    {"matmul, one row", half_matmul, {HALF_2(1, 300), HALF_2(300, 70)}, 2, 0, 2e-6, 0},
    {"linear", half_linear, {HALF_2(26, 50), HALF_2(40, 50), HALF_1(40)}, 3, 0, 2e-6, 0},
    {"linear, rows", half_linear, {HALF_2(300, 50), HALF_2(70, 50), HALF_1(70)}, 3, 0, 2e-6, 0},
    {"rope", half_rope, {HALF_3(2, 5, 8)}, 1, 0, 0, 0},
    {"concat", half_concat, {HALF_2(3, 4), HALF_2(3, 5)}, 2, 0, 0, 0},
    {"attention",
     half_attention,
     {HALF_4(2, 3, 9, 8), HALF_4(2, 3, 9, 8), HALF_4(2, 3, 9, 8)},
     3,
     0,
     0.05,
     0},
    {"embedding", half_embedding, {HALF_2(7, 20)}, 1, 0, 0, 0},
    {"dropout", half_dropout, {HALF_2(5, 37)}, 1, 0, 0, 0},
    {"cross_entropy", half_cross_entropy, {HALF_2(5, 37)}, 1, 0, 0, 1},
};

/* x rounded to a dtype of 16 bits, by its definition. */
static tsh_real half_rounded(tsh_dtype dtype, tsh_real x) {
    const short_format *f = dtype == TSH_F16 ? &short_f16 : &short_bf16;
    return (tsh_real)short_value(f, short_bits(f, (double)x));
}

/* Random values that 16 bits of either format hold, of any dtype. */
static tsh_tensor *half_random(tsh_ctx *ctx, tsh_shape shape, int positive, tsh_dtype dtype) {
    tsh_tensor *x = tsh_keep(tsh_randn(ctx, shape)), *y;
    tsh_real *values = (tsh_real *)tsh_data(ctx, x);
    int64_t e;
    for (e = 0; e < tsh_numel(x); e++) {
        const double v = (double)values[e];
        values[e] = half_rounded(TSH_BF16, (tsh_real)(positive ? fabs(v) + 0.25 : v));
        values[e] = half_rounded(TSH_F16, values[e]);
    }
    y = tsh_keep(tsh_cast(x, dtype));
    assert_non_null(y);
    return y;
}

static tsh_tensor *half_input(tsh_ctx *ctx, const half_computation *c, int i, tsh_dtype dtype) {
    return half_random(ctx, c->shape[i], c->positive, dtype);
}

/* The output's values and the inputs' gradients, of the loss half_sum(w out) with w fixed. */
static void half_compute(const half_computation *c, tsh_dtype dtype, tsh_real *out, int64_t *count,
                    tsh_real grad[HALF_INPUTS][HALF_MAX * 8]) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_tensor *in[HALF_INPUTS], *y, *w, *dx;
    int64_t e;
    int i;
    for (i = 0; i < c->n; i++) {
        in[i] = half_input(ctx, c, i, dtype);
        tsh_requires_grad(in[i], 1);
    }
    y = c->fn(in);
    if (!y) fail_msg("%s: %s", c->name, tsh_last_error(ctx)->message);
    assert_int_equal(tsh_dtype_of(y), c->loss ? TSH_REAL : dtype);
    *count = tsh_numel(y);
    assert_true(*count <= HALF_MAX * 6);
    for (e = 0; e < *count; e++)
        out[e] = (tsh_real)tshi_dtype_get(tsh_dtype_of(y), tshi_tensor_at(y), e);
    w = half_random(ctx, tsh_shape_of(y), 0, TSH_REAL); /* a product of bf16 rounds it to bf16 */
    tsh_backward(ctx, tsh_sum(tsh_mul(tsh_cast(y, TSH_REAL), w), TSH_ALL, 0));
    for (i = 0; i < c->n; i++) {
        dx = tsh_grad(in[i]);
        if (!dx) fail_msg("%s: no gradient %d: %s", c->name, i, tsh_last_error(ctx)->message);
        assert_int_equal(tsh_dtype_of(dx), TSH_REAL);
        memcpy(grad[i], tsh_data(ctx, dx), (size_t)tsh_numel(dx) * sizeof(tsh_real));
    }
    unit_close(ctx);
}

/* A computation in a dtype of 16 bits against the same in tsh_real. */
static void half_compare(const half_computation *c, tsh_dtype dtype) {
    static tsh_real out[2][HALF_MAX * 6], grad[2][HALF_INPUTS][HALF_MAX * 8];
    /* attention rounds probabilities, too, where it multiplies them as bf16 */
    const double inside = c->fn == half_attention && dtype == TSH_BF16 ? 1.0 / 256 : 0;
    double most = 0;
    int64_t count[2], e;
    int i, d;
    half_compute(c, TSH_REAL, out[0], &count[0], grad[0]);
    half_compute(c, dtype, out[1], &count[1], grad[1]);
    assert_int_equal(count[0], count[1]);
    for (e = 0; e < count[0]; e++) most = fmax(most, fabs((double)out[0][e]));
    for (e = 0; e < count[0]; e++) {
        const tsh_real want = c->loss ? out[0][e] : half_rounded(dtype, out[0][e]);
        const double off = fabs((double)want - (double)out[1][e]);
        /* between two numbers of the dtype, the order of sums decides which one is nearer */
        const double tie = fabs((double)out[0][e] - (double)out[1][e]) -
                           fabs((double)out[0][e] - (double)want);
        if (memcmp(&want, &out[1][e], sizeof want) != 0 && !(off <= inside * most) &&
            !(tie <= 1e-6 * most))
            fail_msg("%s of dtype %d: element %d is %g, not %g rounded", c->name, (int)dtype,
                     (int)e, (double)out[1][e], (double)out[0][e]);
    }
    for (i = 0; i < c->n; i++) {
        int64_t n = 1;
        most = 0;
        for (d = 0; d < c->shape[i].ndim; d++) n *= c->shape[i].dim[d];
        for (e = 0; e < n; e++) most = fmax(most, fabs((double)grad[0][i][e]));
        for (e = 0; e < n; e++) {
            const double off = fabs((double)grad[1][i][e] - (double)grad[0][i][e]);
            if (!(off <= c->loosened * most))
                fail_msg("%s of dtype %d: element %d of gradient %d is %.9g, not %.9g", c->name,
                         (int)dtype, (int)e, i, (double)grad[1][i][e], (double)grad[0][i][e]);
        }
    }
}

static void every_op_takes_every_row(void **state) {
    int k;
    (void)state;
    for (k = 0; k < COUNT(half_computations); k++) {
        half_compare(&half_computations[k], TSH_BF16);
        half_compare(&half_computations[k], TSH_F16);
        half_compare(&half_computations[k], BFLOAT);
    }
}

/* ------------------------------------------------------------------ rounding */

/* Stores x, and compares with the definition. */
static void half_store(tsh_dtype dtype, const short_format *f, tsh_real x) {
    const uint16_t want = short_bits(f, (double)x);
    uint16_t bits;
    tshi_dtypes[dtype].store(&bits, 1, 1, &x);
    if (bits != want && x == x) /* of a NaN, other bits may differ */
        fail_msg("dtype %d: %a becomes %04x, not %04x", (int)dtype, (double)x, bits, want);
    if (x != x) assert_true(short_value(f, bits) != short_value(f, bits));
}

/* All 65,536 values; what lies in the middle of two, and next to it; floats of all sizes. */
static void half_round(tsh_dtype dtype, const short_format *f) {
    uint32_t bits, more = 1;
    for (bits = 0; bits < 0x10000u; bits++) {
        const uint16_t h = (uint16_t)bits;
        const double value = short_value(f, h), next = short_value(f, (uint16_t)(h + 1));
        const double middle = value / 2 + next / 2;
        tsh_real x;
        tshi_dtypes[dtype].load(&h, 1, 1, &x);
        if (memcmp(&x, &(tsh_real){(tsh_real)value}, sizeof x) != 0 && value == value)
            fail_msg("dtype %d: %04x is %a, not %a", (int)dtype, h, (double)x, value);
        if (value == value)
            half_store(dtype, f, x);
        else
            assert_true(x != x);
        if (!isfinite(middle) || (h & 0x7FFF) == 0x7FFF) continue;
        half_store(dtype, f, (tsh_real)middle);
        half_store(dtype, f, (tsh_real)nextafter(middle, (double)INFINITY)); /* a double */
        half_store(dtype, f, (tsh_real)nextafter(middle, -(double)INFINITY));
        half_store(dtype, f, (tsh_real)nextafterf((float)middle, INFINITY));
        half_store(dtype, f, (tsh_real)nextafterf((float)middle, -INFINITY));
    }
    for (bits = 0; bits < 2000000u; bits++) {
        float x;
        more = more * 1664525u + 1013904223u;
        memcpy(&x, &more, sizeof x);
        half_store(dtype, f, (tsh_real)x);
    }
    half_store(dtype, f, (tsh_real)NAN);
    half_store(dtype, f, (tsh_real)3.4028234e38);
}

static void short_floats_are_rounded_once(void **state) {
    (void)state;
    half_round(TSH_BF16, &short_bf16);
    half_round(TSH_F16, &short_f16);
}

/* Contiguous elements are converted 32 at a time, by what the processor has: to the bits of single
 * elements, which the test above compares, and nothing behind them is written. */
static void runs_are_converted_as_single_elements(void **state) {
    enum { MOST = 200 };
    static const tsh_dtype dtypes[] = {TSH_BF16, TSH_F16};
    uint32_t more = 7;
    (void)state;
    for (int k = 0; k < 40 * MOST; k++) {
        const int n = k % MOST, d = k / MOST % 2;
        const tshi_dtype *row = &tshi_dtypes[dtypes[d]];
        uint16_t from[MOST], to[2 * MOST + 1], each;
        tsh_real loaded[MOST + 1], values[MOST], single;
        for (int i = 0; i < n; i++) {
            float x;
            more = more * 1664525u + 1013904223u;
            from[i] = (uint16_t)(more >> 16);
            memcpy(&x, &more, sizeof x);
            values[i] = (tsh_real)x;
        }
        memset(loaded, 0xA5, sizeof loaded);
        memset(to, 0xA5, sizeof to);
        row->load(from, 1, n, loaded);
        row->store(to, 1, n, values);
        row->store(to + MOST, 2, n / 2, values); /* with gaps: one by one */
        for (int i = 0; i < n; i++) {
            row->load(from + i, 1, 1, &single);
            assert_memory_equal(&loaded[i], &single, sizeof single);
            row->store(&each, 1, 1, &values[i]);
            assert_int_equal(to[i], each);
            if (i < n / 2) assert_int_equal(to[MOST + 2 * i], each);
        }
        memset(&single, 0xA5, sizeof single);
        assert_memory_equal(&loaded[n], &single, sizeof single);
        assert_int_equal(to[n], 0xA5A5);
        memset(loaded, 0, sizeof loaded);
        if (d == 0) {
            assert_int_equal(tshi_dtype_load_bf16_portable(from, n, loaded), n / 32 * 32);
            assert_int_equal(tshi_dtype_store_bf16_portable(to + MOST, n, values), n / 32 * 32);
        } else {
            assert_int_equal(tshi_dtype_load_f16_portable(from, n, loaded), n / 32 * 32);
            assert_int_equal(tshi_dtype_store_f16_portable(to + MOST, n, values), n / 32 * 32);
        }
        assert_memory_equal(to + MOST, to, (size_t)(n / 32 * 32) * sizeof *to);
        for (int i = 0; i < n / 32 * 32; i++) {
            row->load(from + i, 1, 1, &single);
            assert_memory_equal(&loaded[i], &single, sizeof single);
        }
    }
}

/* What ops give of inputs of two dtypes: norms and lookups the dtype of what they normalise or look
 * up, others the promoted one, losses TSH_REAL; the values are those of the inputs as tsh_real,
 * rounded. */
static void inputs_of_two_dtypes(void **state) {
    typedef struct mixed {
        const half_computation c;
        int first; /* 1: the output's dtype is that of the first input; 0: promoted */
    } mixed;
    static const mixed rows[] = {
        {{"add", half_add, {HALF_2(5, 37), HALF_1(37)}, 2, 0, 0, 0}, 0},
        {{"div", half_divide, {HALF_2(5, 37), HALF_2(5, 1)}, 2, 1, 0, 0}, 0},
        {{"where", half_where, {HALF_2(4, 40), HALF_2(4, 40)}, 2, 0, 0, 0}, 0},
        {{"concat", half_concat, {HALF_2(3, 4), HALF_2(3, 5)}, 2, 0, 0, 0}, 0},
        {{"rms_norm", half_rms_norm, {HALF_2(6, 70), HALF_1(70)}, 2, 0, 0, 0}, 1},
        {{"rms_norm, weight + 1", half_rms_norm_one, {HALF_2(6, 70), HALF_1(70)}, 2, 0, 0, 0}, 1},
        {{"layer_norm", half_layer_norm, {HALF_2(6, 70), HALF_1(70), HALF_1(70)}, 3, 0, 0, 0}, 1},
    };
    static const tsh_dtype pairs[][2] = {{TSH_BF16, TSH_REAL}, {TSH_REAL, TSH_BF16},
                                         {TSH_F16, TSH_REAL},  {TSH_REAL, TSH_F16},
                                         {TSH_BF16, TSH_F16},  {TSH_F16, TSH_BF16}};
    int k, p, i;
    (void)state;
    for (k = 0; k < COUNT(rows); k++)
        for (p = 0; p < COUNT(pairs); p++) {
            const half_computation *c = &rows[k].c;
            const tsh_dtype want = rows[k].first ? pairs[p][0] : TSH_REAL;
            tsh_ctx *ctx = unit_open(NULL);
            tsh_tensor *in[HALF_INPUTS], *twin[HALF_INPUTS], *y, *z;
            int64_t e;
            for (i = 0; i < c->n; i++) {
                in[i] = tsh_requires_grad(half_input(ctx, c, i, pairs[p][i > 0]), 1);
                twin[i] = tsh_requires_grad(tsh_keep(tsh_cast(tsh_detach(in[i]), TSH_REAL)), 1);
            }
            /* half_where compares its inputs, which must be of one dtype */
            y = c->fn == half_where ? tsh_where(tsh_lt(twin[0], twin[1]), in[0], in[1]) : c->fn(in);
            z = c->fn(twin);
            if (!y) fail_msg("%s: %s", c->name, tsh_last_error(ctx)->message);
            if (tsh_dtype_of(y) != want)
                fail_msg("%s of %d and %d gives %d", c->name, (int)pairs[p][0], (int)pairs[p][1],
                         (int)tsh_dtype_of(y));
            for (e = 0; e < tsh_numel(y); e++) {
                const double got = tshi_dtype_get(want, tshi_tensor_at(y), e);
                double exact = (double)tshi_tensor_values(z)[e];
                if (want != TSH_REAL) exact = (double)half_rounded(want, (tsh_real)exact);
                assert_true(got == exact);
            }
            assert_int_equal(tsh_backward(ctx, tsh_sum(tsh_add(tsh_cast(y, TSH_REAL), z), TSH_ALL,
                                                       0)), TSH_OK);
            for (i = 0; i < c->n; i++) {
                const size_t bytes = (size_t)tsh_numel(in[i]) * sizeof(tsh_real);
                assert_memory_equal(tsh_data(ctx, tsh_grad(in[i])),
                                    tsh_data(ctx, tsh_grad(twin[i])), bytes);
            }
            unit_close(ctx);
        }
}

/* A user's op gets tsh_real, whatever its inputs are. */
static void half_product(tsh_tensor *const *in, int n, void *const *out, void *user) {
    tsh_real *y = (tsh_real *)out[0];
    const tsh_real *x = (const tsh_real *)tsh_data(tsh_ctx_of(in[0]), in[0]);
    (void)user, (void)n;
    y[0] = x[0] * x[1];
}
static void half_product_back(tsh_tensor *const *in, int n, const void *const *out,
                              const tsh_real *const *grad_out, tsh_real *const *grad_in,
                              void *user) {
    const tsh_real *dy = grad_out[0];
    const tsh_real *x = (const tsh_real *)tsh_data(tsh_ctx_of(in[0]), in[0]);
    (void)user, (void)n, (void)out;
    grad_in[0][0] += dy[0] * x[1];
    grad_in[0][1] += dy[0] * x[0];
}

static void custom_ops_get_reals(void **state) {
    tsh_custom_op_desc desc = {.name = "product", .forward = half_product,
                            .backward = half_product_back};
    tsh_ctx *ctx = unit_open(NULL);
    const uint16_t values[2] = {0x4000, 0x40A0}; /* 2 and 5 */
    tsh_tensor *x = tsh_tensor_from(ctx, TSH_BF16, tsh_shape1(2), tsh_replicated(), values), *y;
    (void)state;
    tsh_requires_grad(x, 1);
    y = tsh_custom_op(ctx, &x, 1, NULL, &desc);
    assert_int_equal(tsh_dtype_of(y), TSH_REAL);
    EXPECT_NEAR(tsh_item(ctx, y), 10, 0);
    assert_int_equal(tsh_backward(ctx, y), TSH_OK);
    EXPECT_TEXT(tsh_grad(x), "(2) R: 5 2");
    unit_close(ctx);
}

static void promotion_is_the_wider_one(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_tensor *x = tsh_ones(ctx, tsh_shape1(3)), *half = tsh_cast(x, BFLOAT);
    (void)state;
    assert_int_equal(tsh_dtype_of(tsh_add(half, half)), BFLOAT);
    assert_int_equal(tsh_dtype_of(tsh_add(half, x)), TSH_REAL);
    assert_int_equal(tsh_dtype_of(tsh_mul(x, half)), TSH_REAL);
    assert_int_equal(tsh_dtype_of(tsh_eq(half, half)), TSH_I32);
    half = tsh_cast(x, TSH_BF16);
    assert_int_equal(tsh_dtype_of(tsh_add(half, half)), TSH_BF16);
    assert_int_equal(tsh_dtype_of(tsh_add(half, tsh_cast(x, TSH_F16))), TSH_REAL);
    assert_int_equal(tsh_dtype_of(tsh_cast(half, TSH_DTYPE_DEFAULT)), TSH_REAL);
    unit_close(ctx);
}

/* -------------------------------------------------------------- mixed products */

/* y = x w^T + b by way of a linear or a matmul; the gradients of x and w. */
static void mixed_compute(const tsh_desc *desc, int linear, const tsh_dtype dtype[3], int rows,
                          tsh_real *values, tsh_dtype *out) {
    half_computation shapes = {
        "mixed", NULL, {HALF_2(9, 1000), HALF_2(40, 1000), HALF_1(40)}, 3, 0, 0, 0};
    tsh_ctx *ctx = unit_open(desc);
    tsh_tensor *in[3], *y, *x;
    int64_t e, n = 0;
    int i;
    shapes.shape[0].dim[0] = rows;
    for (i = 0; i < 3; i++) in[i] = half_input(ctx, &shapes, i, dtype[i]);
    x = tsh_requires_grad(in[0], 1);
    tsh_requires_grad(in[1], 1);
    y = linear ? tsh_linear(x, in[1], in[2]) : tsh_matmul(x, tsh_transpose(in[1], 0, 1));
    if (!y) fail_msg("%s", tsh_last_error(ctx)->message);
    *out = tsh_dtype_of(y);
    for (e = 0; e < tsh_numel(y); e++)
        values[n++] = (tsh_real)tshi_dtype_get(*out, tshi_tensor_at(y), e);
    tsh_backward(ctx, tsh_sum(tsh_pow_scalar(tsh_cast(y, TSH_REAL), 2), TSH_ALL, 0));
    for (i = 0; i < 2; i++) {
        tsh_tensor *grad = tsh_grad(i ? in[1] : x);
        if (!grad) fail_msg("%s", tsh_last_error(ctx)->message);
        memcpy(values + n, tsh_data(ctx, grad), (size_t)tsh_numel(grad) * sizeof(tsh_real));
        n += tsh_numel(grad);
    }
    unit_close(ctx);
}

static int mixed_calls;

/* A product of the user's own, which knows tsh_real only. */
static void mixed_gemm(int64_t m, int64_t n, int64_t k, tsh_real alpha,
                       const tsh_real *a, int64_t rsa, int64_t csa, const tsh_real *b, int64_t rsb,
                       int64_t csb, tsh_real beta, tsh_real *c, int64_t rsc, int64_t csc,
                       int threads, void *user) {
    int64_t i, j, p;
    (void)user;
    (void)threads;
    mixed_calls++;
    for (i = 0; i < m; i++)
        for (j = 0; j < n; j++) {
            double sum = 0;
            tsh_real *at = c + i * rsc + j * csc;
            for (p = 0; p < k; p++)
                sum += (double)a[i * rsa + p * csa] * (double)b[p * rsb + j * csb];
            *at = (tsh_real)((double)alpha * sum + (beta != 0 ? (double)(beta * *at) : 0));
        }
}

/* Any dtypes of x, w and b: the result has x's, and is that of tsh_real rounded (to one of two
 * neighbours, if the sum's own error matters); of few rows and several, by a product of one's
 * own. */
static void products_take_mixed_dtypes(void **state) {
    enum { ROWS = 9, VALUES = 9 * 40 + 9 * 1000 + 40 * 1000 };
    static const tsh_dtype all[] = {TSH_REAL, TSH_BF16, TSH_F16};
    static tsh_real want[VALUES], got[VALUES];
    int i;
    (void)state;
    for (i = 0; i < 27 * 4; i++) {
        const tsh_dtype dtype[3] = {all[i % 3], all[i / 3 % 3], all[i / 9 % 3]};
        const tsh_dtype reals[3] = {TSH_REAL, TSH_REAL, TSH_REAL};
        const int linear = i / 27 % 2, rows = i / 54 ? ROWS : 2;
        const double ulp = dtype[0] == TSH_BF16 ? 1.0 / 128 : dtype[0] == TSH_F16 ? 1.0 / 1024 : 0;
        tsh_desc desc;
        tsh_dtype out;
        int64_t e;
        memset(&desc, 0, sizeof desc);
        mixed_compute(&desc, linear, reals, rows, want, &out);
        if (i % 2) desc.gemm.multiply = mixed_gemm;
        mixed_calls = 0;
        mixed_compute(&desc, linear, dtype, rows, got, &out);
        assert_int_equal(mixed_calls, i % 2 ? 3 : 0);
        assert_int_equal(out, dtype[0]);
        for (e = 0; e < rows * 40; e++) {
            const double off = fabs((double)got[e] - (double)want[e]);
            if (!(off <= ulp / 2 * fabs((double)want[e]) + 1e-3))
                fail_msg("case %d, element %d: %g, not %g", i, (int)e, (double)got[e],
                         (double)want[e]);
        }
        for (; e < rows * 40 + rows * 1000 + 40 * 1000; e++) /* 2 y w: y is off by ulp / 2 */
            if (!(fabs((double)got[e] - (double)want[e]) <= 4000 * ulp / 2 + 0.1))
                fail_msg("case %d, gradient %d: %g, not %g", i, (int)e, (double)got[e],
                         (double)want[e]);
    }
}

/* ------------------------------------------------------------------ ranks */

/* Rank r gives r + 1 + e / 4: sums in tsh_real, in the ring's order, rounded once at the end. */
static int sums_of_ranks(tsh_ctx *ctx, void *user) {
    enum { COUNT_ = 77 };
    uint16_t buffer[COUNT_];
    tsh_comm *world = tsh_world(ctx);
    const int size = world->size;
    int e, j, op;
    (void)user;
    for (op = TSH_SUM; op <= TSH_AVG; op++) {
        for (e = 0; e < COUNT_; e++)
            buffer[e] = bfloat_bits((float)world->rank + 1 + (float)e / 4);
        CHECK(tsh_allreduce(world, buffer, COUNT_, BFLOAT, (tsh_redop)op) == TSH_OK, "op %d", op);
        for (e = 0; e < COUNT_; e++) {
            int64_t k = 0;
            tsh_real want;
            while (tshb_coll_chunk(COUNT_, size, (int)k + 1) <= e) k++;
            want = (tsh_real)bfloat_value(bfloat_bits((float)((k + 1) % size) + 1 + (float)e / 4));
            for (j = 2; j <= size; j++) {
                const tsh_real x = (tsh_real)bfloat_value(
                    bfloat_bits((float)((k + j) % size) + 1 + (float)e / 4));
                want = op == TSH_PROD  ? want * x
                       : op == TSH_MIN ? (x < want ? x : want)
                       : op == TSH_MAX ? (x > want ? x : want)
                                       : want + x;
            }
            if (op == TSH_AVG) want /= (tsh_real)size;
            CHECK(buffer[e] == bfloat_bits((float)want), "op %d, element %d: %g, not %g", op, e,
                  (double)bfloat_value(buffer[e]), (double)want);
        }
    }
    return 0;
}

/* A weight sharded by rows, then by columns, whose product is all-reduced: the dense result. */
static int sharded_linear(tsh_ctx *ctx, void *user) {
    static const half_computation dense = {
        "linear", half_linear, {HALF_2(6, 16), HALF_2(12, 16), HALF_1(12)}, 3, 0, 0, 0};
    tsh_tensor *in[3], *y, *sharded, *error;
    int i, dim;
    (void)user;
    for (i = 0; i < 3; i++) in[i] = half_input(ctx, &dense, i, BFLOAT);
    y = tsh_cast(half_linear(in), TSH_REAL);
    for (dim = 0; dim < 2; dim++) {
        tsh_tensor *w = tsh_redistribute(in[1], tsh_sharded(dim));
        tsh_tensor *b = dim ? in[2] : tsh_redistribute(in[2], tsh_sharded(0));
        sharded = tsh_linear(in[0], w, b);
        CHECK_OK();
        CHECK(tsh_dtype_of(sharded) == BFLOAT, "dtype %d", (int)tsh_dtype_of(sharded));
        sharded = tsh_cast(tsh_full_tensor(sharded), TSH_REAL);
        error = tsh_max(tsh_pow_scalar(tsh_sub(sharded, y), 2), TSH_ALL, 0);
        /* ranks' sums are rounded before they are added: two ulps of a bfloat, or nothing */
        CHECK(tsh_item(ctx, error) <= (dim ? 0.0157 : 0), "%g", tsh_item(ctx, error));
        CHECK_OK();
    }
    return 0;
}

static void ranks_share_it(void **state) {
    int i;
    (void)state;
    for (i = 0; i < COUNT(ranks_degrees); i++) {
        ranks_run(ranks_degrees[i], sums_of_ranks, NULL);
        ranks_run(ranks_degrees[i], sharded_linear, NULL);
    }
}

/* ------------------------------------------------------------------ files */

static tsh_tensor *half_model(tsh_ctx *ctx, tsh_tensor **bias) {
    tsh_linear_desc desc;
    tsh_module *m;
    memset(&desc, 0, sizeof desc);
    desc.in = 9;
    desc.out = 5;
    m = tsh_add_linear(tsh_root(ctx), "half", &desc);
    tsh_param(m, "weight")->dtype = BFLOAT; /* a layer's own dtype comes with half precision */
    *bias = tsh_param(m, "bias");
    return tsh_param(m, "weight");
}

static void files_hold_it(void **state) {
    char path[] = "/tmp/test_dtype_XXXXXX.safetensors", text[256];
    tsh_ctx *ctx = unit_open(NULL), *other = unit_open(NULL);
    tsh_tensor *bias[2], *w = half_model(ctx, &bias[0]), *again = half_model(other, &bias[1]);
    FILE *file;
    size_t n;
    (void)state;
    (void)snprintf(path, sizeof path, "/tmp/test_dtype_%ld.safetensors", (long)clock());
    assert_int_equal(tsh_save(tsh_root(ctx), path, NULL), TSH_OK);
    file = fopen(path, "rb");
    assert_non_null(file);
    n = fread(text, 1, sizeof text, file);
    fclose(file);
    for (n = n < sizeof text ? n : sizeof text - 1; n > 0; n--)
        if (memcmp(text + n - 1, "\"U16\"", n + 4 < sizeof text ? 5 : 0) == 0) break;
    assert_true(n > 0);
    assert_int_equal(tsh_materialize(tsh_root(other)), TSH_OK);
    memset(tsh_data(other, again), 0, 9 * 5 * 2);
    assert_int_equal(tsh_load(tsh_root(other), path, NULL), TSH_OK);
    assert_memory_equal(tsh_data(ctx, w), tsh_data(other, again), 9 * 5 * 2);
    assert_memory_equal(tsh_data(ctx, bias[0]), tsh_data(other, bias[1]), 5 * sizeof(tsh_real));
    again->dtype = TSH_I32;
    assert_int_equal(tsh_load(tsh_root(other), path, NULL), TSH_ERR_DTYPE);
    assert_non_null(strstr(tsh_last_error(other)->message, "is U16 (5, 9) in"));
    again->dtype = BFLOAT;
    tsh_clear_error(other);
    remove(path);
    unit_close(ctx);
    unit_close(other);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_op_takes_every_row),
        cmocka_unit_test(short_floats_are_rounded_once),
        cmocka_unit_test(runs_are_converted_as_single_elements),
        cmocka_unit_test(promotion_is_the_wider_one),
        cmocka_unit_test(inputs_of_two_dtypes),
        cmocka_unit_test(custom_ops_get_reals),
        cmocka_unit_test(products_take_mixed_dtypes),
        cmocka_unit_test(ranks_share_it),
        cmocka_unit_test(files_hold_it),
    };
    return cmocka_run_group_tests_name("dtype", tests, NULL, NULL);
}
