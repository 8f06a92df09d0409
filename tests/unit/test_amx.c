/* The kernels of AMX compute with a model of its instructions in plain C (support/tiles.h): they
 * pass every test of test_gemm, and those of quantised weights and attention below. Where the
 * processor has AMX, its own instructions give the bits of the model. */
#include "../support/tiles.h"

#if TILES && !defined(TSHARD_NO_SIMD) && !defined(TESTS_DOUBLE)
/* test_gemm.c, for the kernel of AMX only */
int gemm_main(void);
#define amx_kernel() (tshi_isa_runs(&tshi_isas[0]) ? tshi_isas[0].gemm : NULL)
#define EACH_KERNEL(kernel)                                                                        \
    for (const tshi_gemm_kernel *kernel = amx_kernel(); kernel; kernel = NULL)
#define main gemm_main
#include "test_gemm.c"
#undef main
#include "../support/unit.h"

/* Skips a test, where the processor does not have what the kernels need beside AMX. */
#define NEEDS_AVX512_BF16()                                                                        \
    if (!amx_kernel()) SKIP("no AVX512_BF16")

static uint32_t amx_next(void) {
    static uint64_t x = 1;
    x = x * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(x >> 32);
}

/* A bf16: fractions; any bits; subnormal ones and few above; small integers with a NaN or infinity
 * among them; products of about 2^-126; and a part of 2^-126 that rounds to it or not. */
static uint16_t amx_bf16(int what) {
    static const uint16_t special[] = {0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0, 0x8000, 1, 0x8001, 0x80};
    const uint32_t x = amx_next();
    const float integer = (float)(x % 17) - 8;
    if (what == 0) return (uint16_t)((x & 0x80FFu) | 0x3E00u);
    if (what == 1) return (uint16_t)x;
    if (what == 2) return (uint16_t)((x & 0x8000u) | (x >> 16) % 0x900u);
    if (what == 3 && x >> 8 & 3) return (uint16_t)(tiles_bits(integer) >> 16);
    if (what == 3) return special[(x >> 10) % COUNT(special)];
    if (what == 4) return (uint16_t)((x & 0x8000u) | (0x1E00u + (x >> 16) % 0x400u));
    return (uint16_t)((x & 0x8000u) | (x >> 16 & 3 ? 0x1980u + (x >> 20) % 0x80u : 0x2000u));
}

/* One product of tiles by the model and by the processor, at every shape that kernels configure. */
static void the_model_is_the_processor(void **state) {
    static const int shapes[][3] = {{16, 16, 64}, {16, 16, 4}, {16, 16, 16}, {16, 16, 32},
                                    {5, 16, 64},  {1, 16, 64}, {8, 8, 64}};
    (void)state;
    if (!tiles_exist()) SKIP("no AMX");
    for (int turn = 0; turn < 6 * 7 * 60; turn++) {
        static uint16_t a[16][32], b[16][32];
        static uint32_t c[16][16], out[2][16][16];
        const int *s = shapes[turn / 6 % 7];
        for (int i = 0; i < 512; i++) a[i / 32][i % 32] = amx_bf16(turn % 6);
        for (int i = 0; i < 512; i++) b[i / 32][i % 32] = amx_bf16(turn % 6);
        for (int i = 0; i < 256; i++) c[i / 16][i % 16] = (uint32_t)amx_bf16(turn % 6) << 16;
        for (int bf16 = 0; bf16 < 2; bf16++) {
            for (tiles_real = 0; tiles_real < 2; tiles_real++) {
                tshi_gemm_amx_configure(s[0], s[1], s[2]);
                tiles_load(0, c, 64);
                tiles_load(4, a, 64);
                tiles_load(6, b, 64);
                tiles_multiply(0, 4, 6, bf16);
                memset(out[tiles_real], 0, sizeof out[0]);
                tiles_store(0, out[tiles_real], 64);
                tiles_release();
            }
            tiles_real = 0;
            for (int i = 0; i < 256; i++) {
                const uint32_t model = out[0][i / 16][i % 16], real = out[1][i / 16][i % 16];
                if (model != real)
                    fail_msg("bf16 %d, kind %d: the model has %08x, the processor %08x", bf16,
                             turn % 6, (unsigned)model, (unsigned)real);
            }
        }
    }
    assert_int_equal(tiles_faults, 0);
}

/* C = A B of bf16 by the model or the processor. */
static typed amx_product(int real, int64_t m, int64_t n, int64_t k, kind of_a, const int layout[2],
                         int64_t row, int64_t rows) {
    typed a = typed_new(m, k, of_a, layout[0], 1, 0), part = a;
    typed b = typed_new(k, n, kind_of(2), layout[1], 2, 0);
    typed c = typed_new(rows, n, kind_of(0), ROWS, 3, 1);
    part.m = tshi_gemm_from(a.m, row, 0);
    part.rows = rows;
    tiles_real = real;
    typed_gemm(amx_kernel(), R(0.7), &part, &b, 0, &c, &c);
    tiles_real = 0;
    free(a.m.data);
    free(b.m.data);
    return c;
}

/* One row alone, 3 and 8 have the bits that they have among 64; and the processor's are the
 * model's. */
static void rows_alone_have_the_same_bits(void **state) {
    static const int64_t sizes[][2] = {{48, 64}, {33, 31}, {70, 401}, {96, 1601}, {16, 33}};
    static const int64_t counts[] = {1, 3, 8, 17};
    (void)state;
    NEEDS_AVX512_BF16();
    for (int turn = 0; turn < COUNT(sizes) * 8; turn++) {
        const int64_t n = sizes[turn / 8][0], k = sizes[turn / 8][1];
        const int layout[2] = {turn & 1 ? ROWS : COLUMNS, turn & 2 ? ROWS : COLUMNS};
        const kind of_a = kind_of(turn & 4 ? 1 : 2);
        typed whole = amx_product(0, 64, n, k, of_a, layout, 0, 64);
        for (int i = 0; i < COUNT(counts); i++) {
            typed part = amx_product(0, 64, n, k, of_a, layout, 40 + i, counts[i]);
            assert_memory_equal(part.m.data, tshi_gemm_from(whole.m, 40 + i, 0).data,
                                (size_t)(counts[i] * n) * sizeof(tsh_real));
            free(part.m.data);
        }
        if (tiles_exist()) {
            typed real = amx_product(1, 64, n, k, of_a, layout, 0, 64);
            assert_memory_equal(real.m.data, whole.m.data, whole.bytes);
            free(real.m.data);
        }
        free(whole.m.data);
    }
    assert_int_equal(tiles_faults, 0);
    assert_int_equal(tiles_open, 0);
}

/* Quantised weights have the bits of the portable kernel, by the model and by the processor. */
static void quantised_products_have_the_same_bits(void **state) {
    static const tsh_dtype kinds[] = {TSH_Q8_0, TSH_Q4_0, TSH_Q4_1};
    static const int64_t rows[] = {1, 8, 9, 16, 37}, outs[] = {1, 16, 33, 80}, ins[] = {32, 288};
    enum { TURNS = 3 * 5 * 4 * 2 };
    tsh_ctx *ctx;
    (void)state;
    NEEDS_AVX512_BF16();
    ctx = unit_open(NULL);
    tsh_no_grad_begin(ctx);
    for (int turn = 0; turn < TURNS; turn++) {
        const tsh_dtype dtype = kinds[turn % 3];
        const int64_t m = rows[turn / 3 % 5], n = outs[turn / 15 % 4], k = ins[turn / 60];
        tsh_tensor *from = tsh_randn(ctx, tsh_shape2(n, k)), *x = tsh_randn(ctx, tsh_shape2(m, k));
        tsh_tensor *w = tsh_tensor_new(ctx, dtype, tsh_shape2(n, k), tsh_replicated()), *want;
        tshi_dtypes[dtype].store(tsh_data(ctx, w), 1, n * k, (tsh_real *)tsh_data(ctx, from));
        tshi_isa_use(ctx, &tshi_isas[COUNT(tshi_isas) - 1]);
        want = tsh_linear(x, w, NULL);
        tshi_isa_use(ctx, &tshi_isas[0]);
        for (int real = 0; real <= tiles_exist(); real++) {
            const int64_t before = tiles_products;
            tiles_real = real;
            assert_memory_equal(tsh_data(ctx, tsh_linear(x, w, NULL)), tsh_data(ctx, want),
                                (size_t)(m * n) * sizeof(tsh_real));
            tiles_real = 0;
            assert_int_equal(tiles_products > before, m > 8 || n % 16 != 0);
        }
        tsh_step_end(ctx);
    }
    tsh_no_grad_end(ctx);
    unit_close(ctx);
    assert_int_equal(tiles_faults, 0);
}

enum { HEADS = 2, QUERIES = 75, WIDTH = 40, VALUES = HEADS * QUERIES * WIDTH };

/* x: q, k, v, and a factor of the output; out: the output, then the gradients of q, k, v. */
static void amx_attention(tsh_ctx *ctx, const tshi_isa *isa, int real, int causal, tsh_tensor **x,
                          double (*out)[VALUES]) {
    const tsh_attention_desc desc = {.causal = causal};
    tsh_tensor *y;
    tshi_isa_use(ctx, isa);
    tiles_real = real;
    y = tsh_cast(tsh_attention(x[0], x[1], x[2], &desc), TSH_REAL);
    for (int i = 0; i < 4; i++) {
        tsh_tensor *t = i ? tsh_grad(x[i - 1]) : y;
        const void *at = tsh_data(ctx, t);
        if (!at) fail_msg("value %d: %s", i, tsh_last_error(ctx)->message);
        for (int e = 0; e < VALUES; e++) out[i][e] = tshi_dtype_get(tsh_dtype_of(t), at, e);
        if (!i) tsh_backward(ctx, tsh_sum(tsh_mul(y, x[3]), TSH_ALL, 0));
    }
    for (int i = 0; i < 3; i++) tsh_zero_grad(x[i]);
    tsh_step_end(ctx);
    tiles_real = 0;
}

/* Attention, forward and backward: near that of AVX512_BF16, whose probabilities and gradients of
 * scores are rounded to bf16, too (1 in 256 of a sum, few times); the processor's is the
 * model's. */
static void attention_is_near(void **state) {
    static double want[4][VALUES], got[4][VALUES], again[4][VALUES];
    tsh_tensor *x[4];
    tsh_ctx *ctx;
    (void)state;
    NEEDS_AVX512_BF16();
    ctx = unit_open(NULL);
    for (int i = 0; i < 4; i++) {
        x[i] = tsh_randn(ctx, tsh_shape4(1, HEADS, QUERIES, WIDTH));
        x[i] = tsh_keep(i < 3 ? tsh_cast(x[i], TSH_BF16) : x[i]);
        if (i < 3) x[i] = tsh_requires_grad(x[i], 1);
    }
    for (int causal = 0; causal < 2; causal++) {
        const int64_t before = tiles_products;
        amx_attention(ctx, &tshi_isas[0], 0, causal, x, got);
        assert_true(tiles_products > before);
        amx_attention(ctx, &tshi_isas[1], 0, causal, x, want);
        for (int e = 0; e < 4 * VALUES; e++)
            if (!(fabs(got[e / VALUES][e % VALUES] - want[e / VALUES][e % VALUES]) <= 1.0 / 64))
                fail_msg("causal %d: value %d of %d is %g, not %g", causal, e % VALUES, e / VALUES,
                         got[e / VALUES][e % VALUES], want[e / VALUES][e % VALUES]);
        if (!tiles_exist()) continue;
        amx_attention(ctx, &tshi_isas[0], 1, causal, x, again);
        assert_memory_equal(again, got, sizeof got);
    }
    for (int i = 0; i < 4; i++) tsh_tensor_free(x[i]);
    unit_close(ctx);
    assert_int_equal(tiles_faults, 0);
    assert_int_equal(tiles_open, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_model_is_the_processor),
        cmocka_unit_test(rows_alone_have_the_same_bits),
        cmocka_unit_test(quantised_products_have_the_same_bits),
        cmocka_unit_test(attention_is_near),
    };
    const int failed = gemm_main();
    return failed + cmocka_run_group_tests(tests, NULL, NULL);
}
#else
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "../support/skip.h"

static void needs_intrinsics(void **state) {
    (void)state;
    SKIP("no kernels for AMX are compiled");
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(needs_intrinsics)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
#endif
