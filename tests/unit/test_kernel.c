/* Kernels of every instruction set that this processor has: the error of their functions in ulps,
 * the same bits wherever an element lies, the generator's words, largest values and their places.
 *
 * Functions are tried on every 997th float; with TSHARD_EXHAUSTIVE=1 in the environment on all
 * 2^32 (a quarter of an hour). */
/* build: nosimd */
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"
#include "../support/unit.h"
#include "../support/skip.h"

#include <float.h>

#define COUNT(a) ((int)(sizeof(a) / sizeof((a)[0])))

static float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Numbers from 0 up that look like noise. */
static uint32_t noise(uint32_t *seed) {
    *seed = *seed * 1664525u + 1013904223u;
    return *seed >> 8;
}

/* Like 2.5 or -0.125: bits differ in many places, and no function leaves the floats. */
static tsh_real some(uint32_t *seed) {
    return (tsh_real)((double)noise(seed) / 4194304.0 - 2);
}

/* ------------------------------------------------------------------ ulps */

/* References are doubles: what they are off is 2^-28 ulps of a float. An ulp of the float nearest
 * to y. */
static double ulp(double y) {
    int e;
    (void)frexp(y, &e);
    return ldexp(1, e - 24 < -149 ? -149 : e - 24);
}

static int same(float got, double want) {
    if (isnan(want)) return isnan(got);
    return got == (float)want && !signbit(got) == !signbit(want);
}

/* How far got is off: 0 where it is the nearest float, infinite where one is not finite. */
static double off(float got, double want) {
    if (same(got, want)) return 0;
    if (isnan(got) || isnan(want)) return (double)INFINITY;
    if (got == 0 && (float)want == 0) return (double)INFINITY; /* of the other sign */
    if (isinf(got) && fabs(want) > (double)FLT_MAX && (got > 0) == (want > 0)) return 0;
    return isinf(got) ? (double)INFINITY : fabs((double)got - want) / ulp(want);
}

typedef struct function {
    const char *name;
    const tshi_kernel_fn *kernel;
    double (*ref)(double);
    double ulps;
} function;

static double phi(double x) {
    return 0.5 * x * erfc(-x * 0.70710678118654752440);
}

/* From the exact value: less than 2.5 ulps is within 2 of the float that is nearest to it. */
static const function functions[] = {
    {"exp", tshi_map_exp_forward, exp, 1},      {"tanh", tshi_map_tanh_forward, tanh, 2},
    {"log", tshi_map_log_forward, log, 1},      {"erf", tshi_map_erf_forward, erf, 2},
    {"gelu", tshi_map_gelu_forward, phi, 2.45},
};

enum { CHUNK = 4096 };

/* n values by every kernel against the reference; worst: of each kernel so far. */
static void compare(const function *f, float *x, int n, double *worst) {
    static double want[CHUNK];
    static float y[CHUNK];
    const double scalar = 0;
    tshi_operand operand[2];
    int i, isa;
    operand[0] = tshi_kernel_operand(y, 1, TSH_F32);
    operand[1] = tshi_kernel_operand(x, 1, TSH_F32);
    for (i = 0; i < n; i++) want[i] = f->ref((double)x[i]);
    for (isa = 0; isa <= tshi_isa_pick()->kernels; isa++) {
        f->kernel[isa](n, operand, &scalar);
        for (i = 0; i < n; i++) {
            double e = off(y[i], want[i]);
            if (!(e <= f->ulps))
                fail_msg("%s(%a), kernel %d: %a is %.3g ulps off, %g allowed", f->name,
                         (double)x[i], isa, (double)y[i], e, f->ulps);
            if (e > worst[isa]) worst[isa] = e;
        }
    }
}

static void functions_are_accurate(void **state) {
    static float x[CHUNK];
    const uint64_t step = getenv("TSHARD_EXHAUSTIVE") ? 1 : 997;
    const double bits = 8 * sizeof(tsh_real);
    int i, isa, n;
    uint64_t b;
    (void)state;
    if (bits > 32) SKIP("functions of doubles are libm's own");
    for (i = 0; i < COUNT(functions); i++) {
        double worst[TSHI_ISAS] = {0};
        float special[] = {-0.0f, -1e-45f, -INFINITY, INFINITY, NAN};
        compare(&functions[i], special, COUNT(special), worst);
        for (b = 0; b <= 0xFFFFFFFFu;) {
            for (n = 0; n < CHUNK && b <= 0xFFFFFFFFu; n++, b += step) x[n] = float_of((uint32_t)b);
            compare(&functions[i], x, n, worst);
        }
        for (isa = 0; isa <= tshi_isa_pick()->kernels; isa++)
            print_message("%s (kernel %d): at most %.3f ulps\n", functions[i].name, isa,
                          worst[isa]);
    }
}

static void powers_are_accurate(void **state) {
    static const float special[] = {0,
                                    -0.0f,
                                    1,
                                    -1,
                                    2,
                                    -2,
                                    3,
                                    -3,
                                    0.5f,
                                    -0.5f,
                                    INFINITY,
                                    -INFINITY,
                                    NAN,
                                    1e-45f,
                                    -1e-45f,
                                    FLT_MIN,
                                    FLT_MAX,
                                    -FLT_MAX,
                                    16777215,
                                    16777216,
                                    8388607.5f,
                                    -8388607.5f,
                                    8388609,
                                    -8388609,
                                    0.9999999f,
                                    1.0000001f,
                                    1e-30f,
                                    1e30f,
                                    2147483648.0f,
                                    -4294967296.0f,
                                    1.5f,
                                    -1.5f};
    const int many = COUNT(special);
    uint32_t seed = 1;
    double worst = 0;
    tsh_real x, y, z = 0;
    tshi_operand operand[3];
    int i, isa;
    (void)state;
    if (sizeof(tsh_real) == 8) SKIP("powers of doubles are libm's own");
    operand[0] = tshi_kernel_reals(&z, 1);
    operand[1] = tshi_kernel_reals(&x, 1);
    operand[2] = tshi_kernel_reals(&y, 1);
    for (isa = 0; isa <= tshi_isa_pick()->kernels; isa++)
        for (i = 0; i < many * many + 1000000; i++) {
            double want, e;
            x = (tsh_real)float_of(noise(&seed) << 8 ^ noise(&seed));
            y = (tsh_real)float_of(noise(&seed) << 8 ^ noise(&seed));
            if (i % 2) /* near 1, where the logarithm has to be good to more bits */
                x = (tsh_real)(1 + ((double)noise(&seed) / 8388608 - 1) / (1 << noise(&seed) % 8));
            if (i % 3) /* a finite result */
                y = (tsh_real)(((double)noise(&seed) / 8388608 - 1) * 150 /
                               (fabs(log2(fabs((double)x))) + 1e-9));
            if (i % 6 == 1) y = (tsh_real)((int)(noise(&seed) % 65) - 32);
            if (i < many * many) {
                x = (tsh_real)special[i / many];
                y = (tsh_real)special[i % many];
            }
            tshi_map_pow_forward[isa](1, operand, NULL);
            want = pow((double)x, (double)y);
            e = off((float)z, want);
            if (!(e <= 1) || (z == 0 && !signbit(z) != !signbit(want)))
                fail_msg("pow(%a, %a), kernel %d, is %a, not %a: %.3g ulps", (double)x, (double)y,
                         isa, (double)z, want, e);
            worst = e > worst ? e : worst;
        }
    print_message("pow: at most %.3f ulps\n", worst);
}

/* ------------------------------------------------------------------ the same bits */

typedef struct spot {
    const char *name;
    const tshi_kernel_fn *kernel;
    int inputs;
} spot;

static const spot places[] = {
    {"scale", tshi_map_scale_forward, 1},      {"exp", tshi_map_exp_forward, 1},
    {"log", tshi_map_log_forward, 1},          {"sigmoid", tshi_map_sigmoid_forward, 1},
    {"tanh", tshi_map_tanh_forward, 1},        {"erf", tshi_map_erf_forward, 1},
    {"gelu", tshi_map_gelu_forward, 1},        {"gelu_tanh", tshi_map_gelu_tanh_forward, 1},
    {"silu", tshi_map_silu_forward, 1},        {"pow_scalar", tshi_map_pow_scalar_forward, 1},
    {"add", tshi_map_add_forward, 2},          {"div", tshi_map_div_forward, 2},
    {"pow", tshi_map_pow_forward, 2},          {"gelu grad", tshi_map_gelu_backward, 2},
    {"erf grad", tshi_map_erf_backward, 2},   {"silu grad", tshi_map_silu_backward, 2},
    {"tanh grad", tshi_map_tanh_backward, 2}, {"gelu_tanh grad", tshi_map_gelu_tanh_backward, 2},
};

enum { LENGTH = 150, SPREAD = 3 };

/* n elements from `first` on, with steps for y and the inputs, against one element at a time. */
static void check_place(const spot *k, int isa, int64_t first, int64_t n, const int64_t *s) {
    static tsh_real in[2][SPREAD * LENGTH], y[SPREAD * LENGTH], alone;
    const tshi_backward_params p = {1.7, 0}; /* forward kernels read its first member, a double */
    uint32_t seed = 7;
    tshi_operand x[3];
    int64_t i;
    for (i = 0; i < 2 * SPREAD * LENGTH; i++) in[i % 2][i / 2] = some(&seed);
    for (i = 0; i + 1 < SPREAD * LENGTH; i += 10) { /* and what lies beside a special one */
        in[0][i] = 0;
        in[0][i + 1] = (tsh_real)FLT_MIN;
    }
    x[0] = tshi_kernel_reals(y + first, s[0]);
    x[1] = tshi_kernel_reals(in[0] + first, s[1]);
    x[2] = tshi_kernel_reals(in[1] + first, s[2]);
    k->kernel[isa](n, x, &p);
    for (i = 0; i < n; i++) {
        x[0] = tshi_kernel_reals(&alone, 1);
        x[1] = tshi_kernel_reals(in[0] + first + i * s[1], 1);
        x[2] = tshi_kernel_reals(in[1] + first + i * s[2], 1);
        k->kernel[isa](1, x, &p);
        if (memcmp(&alone, y + first + i * s[0], sizeof alone) != 0)
            fail_msg("%s, kernel %d: element %d of %d from %d (steps %d, %d, %d) is %a, alone %a",
                     k->name, isa, (int)i, (int)n, (int)first, (int)s[0], (int)s[1], (int)s[2],
                     (double)y[first + i * s[0]], (double)alone);
    }
}

static void bits_do_not_depend_on_the_place(void **state) {
    static const int64_t steps[][3] = {{1, 1, 1}, {2, 1, 1}, {1, 3, 1}, {1, 1, 0}, {3, 2, 3}};
    int k, isa, j;
    int64_t n, first;
    (void)state;
    for (k = 0; k < COUNT(places); k++)
        for (isa = 0; isa <= tshi_isa_pick()->kernels; isa++)
            for (j = 0; j < COUNT(steps); j++)
                for (first = 0; first < 4; first++)
                    for (n = 1; n < LENGTH - 4; n += 1 + n / 7)
                        check_place(&places[k], isa, first, n, steps[j]);
}

/* ------------------------------------------------------------------ the generator */

static void masks_are_the_generators_bits(void **state) {
    static const double rates[] = {0.1, 0.5, 1};
    enum { MOST = 200 };
    tsh_real x[MOST], y[MOST + 1] = {0};
    uint32_t seed = 3;
    int64_t first, n, i;
    tshi_operand operand[2];
    tshi_dropout_run part;
    tshi_dropout mask;
    int isa, r;
    (void)state;
    mask.key = 0x123456789ABCDEF0u;
    mask.stream = 0xFEDCBA9876543210u;
    operand[0] = tshi_kernel_reals(y, 1);
    operand[1] = tshi_kernel_reals(x, 1);
    part.mask = &mask;
    for (i = 0; i < MOST; i++) x[i] = some(&seed);
    x[5] = (tsh_real)NAN;
    for (r = 0; r < COUNT(rates); r++)
        for (isa = 0; isa <= tshi_isa_pick()->kernels; isa++)
            for (first = 0; first < (int64_t)1 << 36; first = first * 5 + 1)
                for (n = 0; n <= MOST; n += 1 + n / 3) {
                    const double limit = rates[r] * 4294967296.0;
                    mask.p = rates[r];
                    y[n] = 77;
                    part.first = first;
                    tshi_dropout_mask[isa](n, operand, &part);
                    assert_true(y[n] == 77);
                    for (i = 0; i < n; i++) {
                        uint32_t bits = tshi_rng_bits(mask.key, mask.stream, (uint64_t)(first + i));
                        /* volatile: rounded, whatever the compiler's dialect */
                        volatile tsh_real want = x[i] * (tsh_real)(1 / (1 - mask.p));
                        int kept = r < 2 ? (double)bits >= floor(limit) : bits == 0xFFFFFFFFu;
                        if (!kept || r == 2) want = 0;
                        if (!(y[i] == want) && !(kept && isnan(x[i]) && isnan(y[i])))
                            fail_msg("kernel %d, p %g: element %d of %d from %ld is %g", isa,
                                     rates[r], (int)i, (int)n, (long)first, (double)y[i]);
                    }
                }
}

/* ------------------------------------------------------------------ the largest */

static int64_t first_of_largest(const tsh_real *x, int64_t n) {
    int64_t i, best = 0;
    for (i = 0; i < n; i++) {
        if (isnan(x[i])) return i;
        if (x[i] > x[best]) best = i;
    }
    return best;
}

static void the_first_of_the_largest_is_found(void **state) {
    enum { MOST = 140000 };
    static const float put[] = {NAN, -NAN, INFINITY, -INFINITY, 0, -0.0f, 3, FLT_MAX};
    static tsh_real x[MOST];
    const int64_t lengths[] = {1, 2, 31, 32, 33, 100, 768, 65535, 65536, 65537, MOST};
    uint32_t seed = 5;
    int64_t i, place = 0, want;
    tsh_real most;
    tshi_reduce_params params = {0, 0, 0, 0};
    tshi_operand operand[3];
    int isa, l, round;
    (void)state;
    operand[0] = tshi_kernel_operand(&place, 1, TSH_I64);
    operand[1] = tshi_kernel_reals(x, 1);
    for (isa = 0; isa <= tshi_isa_pick()->kernels; isa++)
        for (l = 0; l < COUNT(lengths); l++)
            for (round = 0; round < 60; round++) {
                const int64_t n = lengths[l];
                for (i = 0; i < n; i++) /* coarse: many are equal */
                    x[i] = round % 4 == 3 ? -(tsh_real)INFINITY : (tsh_real)(noise(&seed) % 300);
                for (i = 0; i < round % 5; i++)
                    x[noise(&seed) % (uint32_t)n] = (tsh_real)
                        put[noise(&seed) % (uint32_t)COUNT(put)];
                want = first_of_largest(x, n);
                place = -1;
                most = 77;
                operand[2] = tshi_kernel_reals(round % 2 ? &most : NULL, 1);
                params.n = n;
                tshi_reduce_place[isa](1, operand, &params);
                if (place != want)
                    fail_msg("kernel %d: of %d values the place is %d, not %d", isa, (int)n,
                             (int)place, (int)want);
                if (memcmp(&most, x + want, sizeof most) != 0 && operand[2].data)
                    fail_msg("kernel %d: the largest of %d values is %g, not %g", isa, (int)n,
                             (double)most, (double)x[want]);
            }
}

/* ------------------------------------------------------------------ log-sum-exp in parts */

/* Row `kind`: mixed; rising, so that each part has a larger value; the first 600 are padding. */
static tsh_real logit_of(int kind, int64_t i, uint32_t *seed) {
    if (kind == 2 && i < 600) return -(tsh_real)INFINITY;
    return (tsh_real)(noise(seed) % 16000) / 1000 - 8 + (kind == 1 ? (tsh_real)i / 100 : 0);
}

/* A row's m, and its S in one pass and from m, by the kernel of an instruction set. */
typedef struct powers {
    tsh_real m, sum, again;
} powers;

static powers powers_of(const tsh_real *x, int64_t n, int isa) {
    tshi_operand operand[TSHI_LOSS_OPERANDS];
    tshi_loss_work work;
    powers y = {77, 77, 77};
    memset(operand, 0, sizeof operand);
    operand[TSHI_LOSS_X] = tshi_kernel_reals(x, n);
    operand[TSHI_LOSS_MAX] = tshi_kernel_reals(&y.m, 1);
    operand[TSHI_LOSS_SUM] = tshi_kernel_reals(&y.sum, 1);
    work.classes = n;
    work.which = TSHI_LOSS_BOTH;
    tshi_loss_softmax[isa](1, operand, &work);
    operand[TSHI_LOSS_SUM] = tshi_kernel_reals(&y.again, 1);
    work.which = TSHI_LOSS_S;
    tshi_loss_softmax[isa](1, operand, &work);
    return y;
}

static void the_sum_of_powers_is_taken_in_parts(void **state) {
    enum { MOST = 2500 };
    static tsh_real x[MOST];
    const int64_t lengths[] = {1, 31, 32, 511, 512, 513, 1023, 1024, 1025, 1536, 1700, MOST};
    uint32_t seed = 7;
    int64_t i, odd;
    int isa, l, kind, bad;
    (void)state;
    for (l = 0; l < COUNT(lengths); l++)
        for (kind = 0; kind < 3; kind++)
            for (bad = 0; bad < 3; bad++) { /* then NaN, then infinity somewhere */
                const int64_t n = lengths[l];
                double most = -(double)INFINITY, want = 0;
                powers y, first = {0, 0, 0}; /* first: those of AVX2 */
                for (i = 0; i < n; i++) x[i] = logit_of(kind, i, &seed);
                odd = noise(&seed) % (uint32_t)n;
                if (bad) x[odd] = bad == 1 ? (tsh_real)NAN : (tsh_real)INFINITY;
                for (i = 0; i < n; i++) most = fmax(most, (double)x[i]);
                for (i = 0; i < n; i++) want += exp((double)x[i] - most);
                for (isa = 0; isa <= tshi_isa_pick()->kernels; isa++) {
                    y = powers_of(x, n, isa);
                    if (bad == 1 ? !isnan(y.m) : (double)y.m < most || (double)y.m > most)
                        fail_msg("kernel %d: the largest of %d (%d) is %g, not %g", isa, (int)n,
                                 kind, (double)y.m, most);
                    if (bad || isnan(want) ? !isnan(y.sum) || !isnan(y.again)
                                           : fabs((double)y.sum - want) > 2e-6 * want ||
                                                 fabs((double)y.again - want) > 2e-6 * want)
                        fail_msg("kernel %d: the sums of %d (%d) are %.9g and %.9g, not %.9g", isa,
                                 (int)n, kind, (double)y.sum, (double)y.again, want);
                    if (isa == TSHI_ISA_AVX2) first = y;
                    if (isa > TSHI_ISA_AVX2 && !isnan(y.sum) && memcmp(&y, &first, sizeof y) != 0)
                        fail_msg("kernel %d: the sums of %d (%d) are %a and %a, with AVX2 %a and "
                                 "%a", isa, (int)n, kind, (double)y.sum, (double)y.again,
                                 (double)first.sum, (double)first.again);
                }
            }
}

/* ------------------------------------------------------------------ rows that are not finite */

static void softmax_of_infinities_is_nan(void **state) {
    static const float rows[][3] = {
        {INFINITY, 0, 1}, {-INFINITY, -INFINITY, -INFINITY}, {0, NAN, 1}};
    tsh_ctx *ctx = unit_open(NULL);
    tsh_tensor *x = tsh_zeros(ctx, tsh_shape1(3)), *y[2];
    const int most = ctx->isa;
    tsh_real *v = (tsh_real *)tsh_data(ctx, x);
    int r, i, k;
    (void)state;
    for (ctx->isa = 0; ctx->isa <= most; ctx->isa++) {
        for (r = 0; r < COUNT(rows); r++) {
            for (i = 0; i < 3; i++) v[i] = (tsh_real)rows[r][i];
            y[0] = tsh_softmax(x, 0);
            y[1] = tsh_log_softmax(x, 0);
            for (k = 0; k < 2; k++)
                for (i = 0; i < 3; i++) assert_true(isnan(((tsh_real *)tsh_data(ctx, y[k]))[i]));
        }
        v[0] = 0;
        v[1] = -(tsh_real)INFINITY;
        v[2] = -1000;
        y[0] = tsh_softmax(x, 0);
        assert_true(((tsh_real *)tsh_data(ctx, y[0]))[0] == 1);
        assert_true(((tsh_real *)tsh_data(ctx, y[0]))[1] == 0);
        assert_true(((tsh_real *)tsh_data(ctx, y[0]))[2] == 0);
    }
    ctx->isa = most;
    unit_close(ctx);
}

/* Values whose sums are both infinities have a largest one. */
static void softmax_of_huge_values_is_finite(void **state) {
    enum { WIDE = 256 };
    tsh_ctx *ctx = unit_open(NULL);
    tsh_tensor *x = tsh_zeros(ctx, tsh_shape1(WIDE)), *y;
    const int most = ctx->isa;
    const tsh_real huge = sizeof(tsh_real) == 8 ? (tsh_real)1e308 : (tsh_real)3e38;
    tsh_real *v = (tsh_real *)tsh_data(ctx, x);
    int i;
    (void)state;
    for (i = 0; i < WIDE; i++) v[i] = i % 2 ? huge : -huge;
    for (ctx->isa = 0; ctx->isa <= most; ctx->isa++) {
        y = tsh_softmax(x, 0);
        for (i = 0; i < WIDE; i++)
            assert_true(((tsh_real *)tsh_data(ctx, y))[i] == (i % 2 ? (tsh_real)2 / WIDE : 0));
    }
    ctx->isa = most;
    unit_close(ctx);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(functions_are_accurate),
        cmocka_unit_test(powers_are_accurate),
        cmocka_unit_test(bits_do_not_depend_on_the_place),
        cmocka_unit_test(masks_are_the_generators_bits),
        cmocka_unit_test(the_first_of_the_largest_is_found),
        cmocka_unit_test(the_sum_of_powers_is_taken_in_parts),
        cmocka_unit_test(softmax_of_infinities_is_nan),
        cmocka_unit_test(softmax_of_huge_values_is_finite),
    };
    return cmocka_run_group_tests_name("unit/kernel", tests, NULL, NULL);
}
