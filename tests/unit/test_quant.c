/* Quantised weights: the bytes are ggml's (quant.safetensors, written by its Python package);
 * products are those of exact integers and doubles within the rounding of their sums, with the same
 * bits by every instruction set and for any number of rows; and what such tensors refuse. */
/* build: double */
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../support/unit.h"
#include "../support/golden.h"

enum { QUANTS = 3 };
static const tsh_dtype kinds[QUANTS] = {TSH_Q8_0, TSH_Q4_0, TSH_Q4_1};

/* -- bytes ---------------------------------------------------------------- */

static void bytes_are_those_of_ggml(void **state) {
    golden_file file = golden_open("quant");
    (void)state;
    for (int k = 0; k < QUANTS; k++) {
        const tshi_dtype *row = &tshi_dtypes[kinds[k]];
        const golden_tensor in = golden_get(&file, row->name, "in0");
        const golden_tensor out = golden_get(&file, row->name, "out");
        const golden_tensor back = golden_get(&file, row->name, "back");
        const int64_t width = in.shape.dim[1];
        const size_t bytes = tshi_dtype_bytes(kinds[k], width);
        assert_int_equal(out.shape.dim[1], bytes);
        for (int64_t r = 0; r < in.shape.dim[0]; r++) {
            tsh_real x[64], y[64];
            unsigned char got[68];
            for (int64_t i = 0; i < width; i++)
                x[i] = (tsh_real)((const float *)in.data)[r * width + i];
            row->store(got, 1, width, x);
            for (size_t i = 0; i < bytes; i++) {
                const float want = ((const float *)out.data)[(size_t)r * bytes + i];
                if ((float)got[i] < want || (float)got[i] > want)
                    fail_msg("%s: byte %d of row %d is %d, not %g", row->name, (int)i, (int)r,
                             got[i], (double)want);
            }
            row->load(got, 1, width, y);
            for (int64_t i = 0; i < width; i++) {
                const double want = (double)((const float *)back.data)[r * width + i];
                if ((double)y[i] - want != 0 && !(want != want && y[i] != y[i]) &&
                    !(fabs(want) > DBL_MAX && (double)y[i] * want > 0))
                    fail_msg("%s: element %d of row %d is %g, not %g", row->name, (int)i, (int)r,
                             (double)y[i], want);
            }
        }
    }
    golden_finish(&file);
}

static void sizes_are_of_blocks(void **state) {
    (void)state;
    assert_int_equal(tsh_dtype_size(TSH_Q8_0), 34);
    assert_int_equal(tsh_dtype_size(TSH_Q4_0), 18);
    assert_int_equal(tsh_dtype_size(TSH_Q4_1), 20);
    assert_int_equal(tshi_dtype_bytes(TSH_Q8_0, 96), 102);
    assert_int_equal(tshi_dtype_bytes(TSH_Q4_0, 96), 54);
    assert_int_equal(tshi_dtype_bytes(TSH_F32, 96), 384);
}

/* Values that are not numbers stay visible, and quantising them is defined. */
static void nan_and_infinity_stay(void **state) {
    static const double bad[2] = {(double)NAN, (double)INFINITY};
    (void)state;
    for (int k = 0; k < QUANTS; k++)
        for (int b = 0; b < 2; b++) {
            const tshi_dtype *row = &tshi_dtypes[kinds[k]];
            unsigned char bytes[34];
            tsh_real x[32], y[32];
            for (int i = 0; i < 32; i++) x[i] = (tsh_real)(i - 7);
            x[20] = (tsh_real)bad[b];
            row->store(bytes, 1, 32, x);
            row->load(bytes, 1, 32, y);
            assert_false(y[20] - y[20] == 0);
        }
}

/* -- products -------------------------------------------------------------- */

/* A weight of random bytes, -128 and the extreme nibbles among them, with scales in [2^-7, 1). */
static tsh_tensor *random_weight(tsh_ctx *ctx, tsh_dtype dtype, int64_t outs, int64_t ins) {
    tsh_tensor *w = tsh_tensor_new(ctx, dtype, tsh_shape2(outs, ins), tsh_replicated());
    unsigned char *at = (unsigned char *)tsh_data(ctx, w);
    const size_t size = tsh_dtype_size(dtype), n = tshi_dtype_bytes(dtype, outs * ins);
    assert_non_null(at);
    for (size_t i = 0; i < n; i++) {
        const unsigned bits = (unsigned)(ranks_mix(5, i) >> 20);
        at[i] = (unsigned char)bits;
        if (i % size == 1) at[i] = (unsigned char)(0x20 + bits % 0x1C); /* of an f16 */
        if (i % size > 1 && bits % 7 == 0) at[i] = 0x80;
        if (size == 20 && i % size == 3) /* of the minimum, of either sign */
            at[i] = (unsigned char)(0x20 + bits % 0x1C + (bits & 0x80));
    }
    return w;
}

/* Row r of x as the product quantises it: integers and a scale per block. */
static void check_row(const tsh_real *x, const unsigned char *w, tsh_dtype dtype, int64_t ins,
                      double bias, double got) {
    const tshi_dtype *row = &tshi_dtypes[dtype];
    double sum = bias, magnitude = fabs(bias), exact = bias, lost = 0;
    for (int64_t b = 0; b < ins / 32; b++, x += 32, w += row->size) {
        tshi_quant_input in;
        tsh_real y[32];
        double most = 0, block = 0, shift = 0; /* shift: the part of the minimum */
        row->load(w, 1, 32, y);
        tshi_quant_block(x, 0, &in);
        for (int i = 0; i < 32; i++) most = fmax(most, fabs((double)x[i]));
        EXPECT_NEAR((double)in.scale, most / 127, most / 127 * 1e-6);
        for (int i = 0; i < 32; i++) {
            const double t = (double)in.scale;
            EXPECT_NEAR((double)in.q[i] * t, (double)x[i], t * 0.50001);
            block += (double)y[i] * (double)in.q[i] * t;
            if (dtype == TSH_Q4_1) shift += (double)tshi_dtype_scale(w + 2) * (double)in.q[i] * t;
            exact += (double)y[i] * (double)x[i];
            lost += fabs((double)y[i]) * t * 0.50001; /* x, rounded to 8 bits */
        }
        sum += block;
        magnitude += fabs(block - shift) + fabs(shift) + fabs(sum - shift) + fabs(sum);
    }
    /* a product and a sum of floats are rounded per block */
    EXPECT_NEAR(got, sum, 1.3e-7 * 2 * magnitude);
    EXPECT_NEAR(got, exact, lost + 1.3e-7 * 2 * magnitude);
}

static tsh_tensor *random_rows(tsh_ctx *ctx, int64_t rows, int64_t ins) {
    tsh_tensor *x = tsh_keep(tsh_randn(ctx, tsh_shape2(rows, ins)));
    for (int64_t i = 0; i < rows * ins; i += 97) ((tsh_real *)tsh_data(ctx, x))[i] = 0;
    return x;
}

/* Every instruction set, 1 to 20 rows: exact within the bound, and the same bits. */
static void products_are_right_and_the_same_everywhere(void **state) {
    static const int outs[] = {1, 15, 16, 17, 80, 100}, ins[] = {32, 64, 288, 544};
    static const int rows[] = {1, 2, 3, 7, 8, 9, 20};
    tsh_ctx *ctx = unit_open(NULL);
    enum { SETS = COUNT(tshi_isas) };
    (void)state;
    tsh_no_grad_begin(ctx);
    for (int k = 0; k < QUANTS; k++)
        for (int o = 0; o < COUNT(outs); o++)
            for (int i = 0; i < COUNT(ins); i++) {
                tsh_tensor *w = random_weight(ctx, kinds[k], outs[o], ins[i]);
                tsh_tensor *x = random_rows(ctx, 20, ins[i]);
                tsh_tensor *b = tsh_keep(tsh_randn(ctx, tsh_shape1(outs[o])));
                const tsh_real *in = (const tsh_real *)tsh_data(ctx, x), *all;
                tshi_isa_use(ctx, &tshi_isas[SETS - 1]);
                all = (const tsh_real *)tsh_data(ctx, tsh_linear(x, w, b));
                assert_non_null(all);
                for (int r = 0; r < 20; r++)
                    for (int c = 0; c < outs[o]; c++)
                        check_row(in + r * ins[i],
                                  (const unsigned char *)tsh_data(ctx, w) +
                                      tshi_dtype_bytes(kinds[k], (int64_t)c * ins[i]),
                                  kinds[k], ins[i],
                                  (double)((const tsh_real *)tsh_data(ctx, b))[c],
                                  (double)all[r * outs[o] + c]);
                for (int s = 0; s < SETS; s++)
                    for (int r = 0; r < COUNT(rows) && tshi_isa_runs(&tshi_isas[s]); r++) {
                        tsh_tensor *part = tsh_slice(x, 0, 0, rows[r]);
                        tshi_isa_use(ctx, &tshi_isas[s]);
                        part = tsh_linear(part, w, b);
                        assert_memory_equal(tsh_data(ctx, part), all,
                                            (size_t)(rows[r] * outs[o]) * sizeof *all);
                    }
                tsh_tensor_free(w);
                tsh_tensor_free(x);
                tsh_tensor_free(b);
                (void)tsh_step_end(ctx);
            }
    tsh_no_grad_end(ctx);
    unit_close(ctx);
}

/* Strided rows, an empty batch, an empty weight, dtypes of x, and the trace's flops. */
static void inputs_of_any_form(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_tensor *w = random_weight(ctx, TSH_Q8_0, 40, 64), *x = random_rows(ctx, 64, 5), *a, *b;
    (void)state;
    tsh_no_grad_begin(ctx);
    a = tsh_linear(tsh_transpose(x, 0, 1), w, NULL);
    b = tsh_linear(tsh_clone(tsh_transpose(x, 0, 1)), w, NULL);
    assert_memory_equal(tsh_data(ctx, a), tsh_data(ctx, b), 5 * 40 * sizeof(tsh_real));
    a = tsh_linear(tsh_cast(tsh_transpose(x, 0, 1), TSH_BF16), w, NULL);
    assert_int_equal(tsh_dtype_of(a), TSH_BF16);
    b = tsh_cast(tsh_linear(tsh_cast(tsh_cast(tsh_transpose(x, 0, 1), TSH_BF16), TSH_REAL), w,
                            NULL),
                 TSH_BF16);
    assert_memory_equal(tsh_data(ctx, a), tsh_data(ctx, b), 5 * 40 * 2);
    a = tsh_linear(tsh_zeros(ctx, tsh_shape3(2, 0, 64)), w, NULL);
    assert_int_equal(tsh_numel(a), 0);
    a = tsh_linear(tsh_zeros(ctx, tsh_shape2(3, 64)),
                   tsh_tensor_new(ctx, TSH_Q4_0, tsh_shape2(0, 64), tsh_replicated()), NULL);
    assert_int_equal(tsh_size(a, 1), 0);
    a = tsh_linear(tsh_zeros(ctx, tsh_shape2(2, 0)),
                   tsh_tensor_new(ctx, TSH_Q4_0, tsh_shape2(2, 0), tsh_replicated()), NULL);
    EXPECT_TEXT(a, "(2, 2) R: 0 0 / 0 0");
    a = tsh_keep(tsh_zeros(ctx, tsh_shape2(1, 64)));
    ((tsh_real *)tsh_data(ctx, a))[40] = (tsh_real)NAN;
    a = tsh_linear(a, w, NULL);
    for (int i = 0; i < 40; i++) {
        const tsh_real y = ((tsh_real *)tsh_data(ctx, a))[i];
        assert_true(y != y);
    }
    tsh_no_grad_end(ctx);
    unit_close(ctx);
}

/* The gradient of x is that of the weight as it is stored; the weight has none. */
static void gradients_go_to_the_input(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    (void)state;
    for (int k = 0; k < QUANTS; k++) {
        tsh_tensor *w = random_weight(ctx, kinds[k], 24, 64);
        tsh_tensor *x = tsh_requires_grad(random_rows(ctx, 3, 64), 1), *dx, *plain;
        tsh_tensor *g = tsh_keep(tsh_randn(ctx, tsh_shape2(3, 24)));
        plain = tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(24, 64), tsh_replicated());
        tshi_dtypes[kinds[k]].load(tsh_data(ctx, w), 1, 24 * 64, tshi_tensor_values(plain));
        (void)tsh_backward(ctx, tsh_sum(tsh_mul(tsh_linear(x, w, NULL), g), TSH_ALL, 0));
        dx = tsh_keep(tsh_grad(x));
        tsh_zero_grad(x);
        (void)tsh_backward(ctx, tsh_sum(tsh_mul(tsh_linear(x, plain, NULL), g), TSH_ALL, 0));
        assert_memory_equal(tsh_data(ctx, dx), tsh_data(ctx, tsh_grad(x)),
                            3 * 64 * sizeof(tsh_real));
        assert_int_equal(tsh_step_end(ctx), TSH_OK);
    }
    unit_close(ctx);
}

static void lookups_give_the_stored_values(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    (void)state;
    for (int k = 0; k < QUANTS; k++) {
        tsh_tensor *w = random_weight(ctx, kinds[k], 10, 96), *y;
        tsh_tensor *ids = tsh_arange(ctx, TSH_I64, 7, 1, -2); /* 7, 5, 3 */
        tsh_real want[96];
        y = tsh_embedding(ids, w, NULL);
        assert_int_equal(tsh_dtype_of(y), TSH_REAL);
        for (int r = 0; r < 3; r++) {
            tshi_dtypes[kinds[k]].load((char *)tsh_data(ctx, w) +
                                           tshi_dtype_bytes(kinds[k], (7 - 2 * r) * 96),
                                       1, 96, want);
            assert_memory_equal((tsh_real *)tsh_data(ctx, y) + r * 96, want, sizeof want);
        }
    }
    unit_close(ctx);
}

/* -- mistakes -------------------------------------------------------------- */

static void other_ops_refuse_them(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_tensor *w = random_weight(ctx, TSH_Q8_0, 32, 32), *x = tsh_ones(ctx, tsh_shape2(2, 32));
    const tsh_lookup_desc longest = {0, 0, 1, 0, 0, 0};
    char text[64], bytes[32 * 34];
    (void)state;
    assert_null(tsh_add(w, w));
    EXPECT(TSH_ERR_DTYPE, "tsh_add: a is q8_0");
    assert_null(tsh_matmul(x, w));
    EXPECT(TSH_ERR_DTYPE, "tsh_matmul: b is q8_0");
    assert_null(tsh_linear(w, w, NULL));
    EXPECT(TSH_ERR_DTYPE, "tsh_linear: x is q8_0");
    assert_null(tsh_transpose(w, 0, 1));
    EXPECT(TSH_ERR_DTYPE, "only tsh_linear and tsh_embedding");
    assert_null(tsh_slice(w, 0, 0, 1));
    EXPECT(TSH_ERR_DTYPE, "tsh_slice: x is q8_0");
    assert_null(tsh_cast(w, TSH_REAL));
    EXPECT(TSH_ERR_DTYPE, "tsh_cast: x is q8_0");
    assert_null(tsh_cast(x, TSH_Q8_0));
    EXPECT(TSH_ERR_DTYPE, "tsh_cast");
    assert_null(tsh_keep(w));
    EXPECT(TSH_ERR_DTYPE, "tsh_keep: t is q8_0");
    assert_null(tsh_arange(ctx, TSH_Q8_0, 0, 32, 1));
    EXPECT(TSH_ERR_DTYPE, "tsh_arange");
    assert_null(tsh_requires_grad(w, 1));
    EXPECT(TSH_ERR_ARGUMENT, "tsh_requires_grad: takes an owned tensor of");
    assert_int_equal(tsh_read(ctx, w, TSH_LOCAL, bytes, sizeof bytes), TSH_ERR_DTYPE);
    EXPECT(TSH_ERR_DTYPE, "tsh_data gives its bytes");
    assert_int_equal(tsh_init_zeros(w, NULL), TSH_ERR_ARGUMENT);
    EXPECT(TSH_ERR_ARGUMENT, "tsh_init_zeros");
    assert_string_equal(tsh_to_string(w, text, sizeof text), "");
    EXPECT(TSH_ERR_DTYPE, "tsh_to_string: t is q8_0");
    assert_null(tsh_embedding(tsh_arange(ctx, TSH_I32, 0, 2, 1), w, &longest));
    EXPECT(TSH_ERR_ARGUMENT, "max_norm changes the weight");
    assert_null(tsh_tensor_new(ctx, TSH_Q4_0, tsh_shape2(4, 48), tsh_replicated()));
    EXPECT(TSH_ERR_SHAPE, "blocks of 32 of q4_0");
    assert_int_equal(tsh_allreduce(tsh_tp(ctx), bytes, 1, TSH_Q8_0, TSH_SUM), TSH_ERR_ARGUMENT);
    unit_close(ctx);
}

/* An anomaly behind a quantised weight is told without reading the weight as floats. */
static void anomalies_are_found_behind_them(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_tensor *w = random_weight(ctx, TSH_Q4_0, 2, 32), *x = tsh_zeros(ctx, tsh_shape2(1, 32));
    (void)state;
    ((tsh_real *)tsh_data(ctx, x))[3] = (tsh_real)INFINITY;
    tsh_detect_anomaly(ctx, 1);
    (void)tsh_linear(x, w, NULL);
    EXPECT(TSH_ERR_ANOMALY, "x has infinity at (0, 3) already");
    unit_close(ctx);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_are_those_of_ggml),
        cmocka_unit_test(sizes_are_of_blocks),
        cmocka_unit_test(nan_and_infinity_stay),
        cmocka_unit_test(products_are_right_and_the_same_everywhere),
        cmocka_unit_test(inputs_of_any_form),
        cmocka_unit_test(gradients_go_to_the_input),
        cmocka_unit_test(lookups_give_the_stored_values),
        cmocka_unit_test(other_ops_refuse_them),
        cmocka_unit_test(anomalies_are_found_behind_them),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
