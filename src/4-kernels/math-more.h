/* ========================================================================== */
/* >>math-more                                    MARK: - math-more (private) */
/* More functions of one float: expm1, log1p, sin, cos; softplus, ELU, Mish.  */
/* Needs: >>math.                                                             */
/* ========================================================================== */

/* As in >>math, nothing here calls libm or branches if tsh_real is float, so that loops vectorise.
 * The largest errors in ulps over samples of all floats are expm1 1.5, log1p 0.9, sin and cos 1.6
 * for |x| up to 4.2e8; beyond, libm computes sin and cos. */

/* Returns a if yes is 1, b if yes is 0, without a branch: the caller has computed both. */
TSHI_INLINE tsh_real tshi_math_either(int yes, tsh_real a, tsh_real b) {
    if (TSHI_DOUBLE) return yes ? a : b;
    return TSHI_R(
        tshi_math_float(tshi_math_pick(yes, tshi_math_bits((float)a), tshi_math_bits((float)b))));
}

TSHI_INLINE tsh_real tshi_math_abs(tsh_real x) {
    return TSHI_DOUBLE ? TSHI_R(fabs((double)x)) : TSHI_R(fabsf((float)x));
}

TSHI_INLINE tsh_real tshi_math_floor(tsh_real x) {
    return TSHI_DOUBLE ? TSHI_R(floor((double)x)) : TSHI_R(floorf((float)x));
}

TSHI_INLINE tsh_real tshi_math_ceil(tsh_real x) {
    return TSHI_DOUBLE ? TSHI_R(ceil((double)x)) : TSHI_R(ceilf((float)x));
}

/* Returns x rounded to the nearest integer, halves to the even one. */
TSHI_INLINE tsh_real tshi_math_round_even(tsh_real x) {
    return TSHI_DOUBLE ? TSHI_R(rint((double)x)) : TSHI_R(rintf((float)x));
}

/* Returns 1, -1, or 0 for zeros and NaN, as torch.sign does. */
TSHI_INLINE tsh_real tshi_math_sign(tsh_real x) {
    return TSHI_R((x > 0) - (x < 0));
}

/* -- expm1, log1p ------------------------------------------------------------- */

/* Returns e^x - 1 = 2^n (e^r - 1) + 2^n - 1 for x = n ln 2 + r. Computes half of it, because 2^n
 * overflows for the largest x whose e^x - 1 is finite. Below -17.4 the result is -1. */
TSHI_INLINE tsh_real tshi_math_expm1(tsh_real v, int fused) {
    const uint32_t bits = tshi_math_bits((float)v);
    int32_t order = (int32_t)bits; /* positive floats are ordered as their bits */
    uint32_t x, n;
    float q, half; /* half: 2^(n - 1) */
    if (TSHI_DOUBLE) return TSHI_R(expm1((double)v));
    /* clamps x to [-20, 89], as tshi_math_exp does to [-104, 89] */
    order = order < 0x42B20000 ? order : 0x42B20000;
    x = (uint32_t)order;
    x = x < 0xC1A00000u ? x : 0xC1A00000u;
    q = tshi_math_exp_less_one(tshi_math_exp_rest(tshi_math_float(x), &n, fused), fused);
    half = tshi_math_float((n << 23) + 0x3F000000u);
    q = 2.0f * tshi_math_fma(half, q, half - 0.5f, fused);
    /* NaN stays NaN; else the result has the sign of x, also if it is 0. */
    return TSHI_R(tshi_math_float(
        tshi_math_pick(bits << 1 > 0xFF000000u, bits, tshi_math_bits(q) | (bits & 0x80000000u))));
}

/* Returns log(1 + x) = log u + c / u, where u is 1 + x rounded and c its rounding error. log u is
 * computed as in tshi_math_log, from u = 2^n (1 + f); if n is 0, f is x itself, and c / u
 * is left out. */
TSHI_INLINE tsh_real tshi_math_log1p(tsh_real v, int fused) {
    const float x = (float)v, u = tshi_math_round(1.0f + x), less = tshi_math_round(u - 1.0f);
    const float c = tshi_math_round(x - less) + (1.0f - tshi_math_round(u - less));
    const uint32_t bits = tshi_math_bits(x), m = tshi_math_bits(u);
    const uint32_t k = (m - 0x3F3504F3u) & 0xFF800000u; /* n << 23; u is 2^n (1 + f) */
    const float e = (float)(int32_t)k;                  /* n 2^23 */
    const uint32_t f1 = tshi_math_bits(tshi_math_float(m - k) - 1.0f);
    const float f = tshi_math_float(tshi_math_pick(k == 0u, bits, f1));
    const float low = tshi_math_float(tshi_math_pick(k == 0u, 0u, tshi_math_bits(c / u)));
    const float whole = e * (0.693359375f / 8388608.0f); /* the larger part of n log 2 */
    float sum = whole + f, rest;
    uint32_t special;
    if (TSHI_DOUBLE) return TSHI_R(log1p((double)v));
    rest = tshi_math_fma(e, -2.12194440e-4f / 8388608.0f, whole - sum + f, fused) + low;
    sum = sum + tshi_math_fma(tshi_math_log_tail(f, fused), f * f, rest, fused);
    /* x = -1 gives -infinity, infinity and NaN stay what they are, x < -1 gives NaN; every other
     * result has the sign of x. */
    special = tshi_math_pick(bits == 0xBF800000u, 0xFF800000u, 0x7FC00000u);
    special = tshi_math_pick(bits - 0x7F800000u <= 0x7FFFFFu, bits, special);
    special = tshi_math_pick((bits < 0x7F800000u) | (bits - 0x80000000u < 0x3F800000u),
                             tshi_math_bits(sum) | (bits & 0x80000000u), special);
    return TSHI_R(tshi_math_float(special));
}

/* -- sin, cos ------------------------------------------------------------------ */

/* The bits of 2^28 pi / 2, up to which tshi_math_wave reduces its argument exactly enough. */
enum { TSHI_MATH_FAR = 0x4DC90FDB };

/* Returns sin(x + turn pi / 2) for |x| up to 4.2e8: turn 0 gives sin x, 1 cos x, 2 -sin x. With
 * x = n pi / 2 + r, |r| <= pi / 4, it is sin r or cos r, by polynomials (Cephes), with a sign. r is
 * computed in double, with pi / 2 as a sum of 25 and 53 bits, so that n times the first part is
 * exact. */
TSHI_INLINE float tshi_math_wave(float x, uint32_t turn, int fused) {
    const double shifted = tshi_math_round8((double)x * 0.63661977236758134 + 6755399441055744.0);
    const double n = shifted - 6755399441055744.0; /* x / (pi / 2), rounded to an integer */
    const double rest = (double)x - n * 1.57079631090164184570 - n * 1.58932547735281966916e-8;
    const uint32_t quarter = (uint32_t)tshi_math_bits8(shifted) + turn; /* n + turn */
    const float r = (float)rest, z = r * r;
    float s, c;
    s = tshi_math_fma(-1.9515295891e-4f, z, 8.3321608736e-3f, fused);
    s = tshi_math_fma(s, z, -1.6666654611e-1f, fused);
    s = tshi_math_fma(s * z, r, r, fused); /* sin r */
    c = tshi_math_fma(2.443315711809948e-5f, z, -1.388731625493765e-3f, fused);
    c = tshi_math_fma(c, z, 4.166664568298827e-2f, fused);
    c = tshi_math_fma(c * z, z, tshi_math_fma(z, -0.5f, 1.0f, fused), fused); /* cos r */
    /* sin r gets the sign of r, so that the sine of -0 is -0 */
    return tshi_math_float(tshi_math_pick((int)(quarter & 1u), tshi_math_bits(c),
                                          tshi_math_bits(s) | (tshi_math_bits(r) & 0x80000000u)) ^
                           (quarter & 2u) << 30);
}

/* Does what tshi_math_wave does by libm, for an x of any size. */
TSHI_OUTLINE tsh_real tshi_math_wave_far(tsh_real x, uint32_t turn) {
    const double y = turn & 1u ? cos((double)x) : sin((double)x);
    return TSHI_R(turn & 2u ? -y : y);
}

/* -- softplus, log_sigmoid, ELU, Mish and their derivatives --------------------------- */

/* Returns softplus(x) = log(1 + e^(beta x)) / beta; x itself where beta x is above 20. */
TSHI_INLINE tsh_real tshi_math_softplus(tsh_real x, tsh_real beta, int fused) {
    const tsh_real z = x * beta;
    const tsh_real y = tshi_math_log1p(tshi_math_exp(z, fused), fused) / beta;
    return tshi_math_either(z > 20, x, y);
}

/* Returns the derivative of softplus: 1 where beta x is above 20, else z / (z + 1), z = e^(beta
 * x). */
TSHI_INLINE tsh_real tshi_math_softplus_derivative(tsh_real x, tsh_real beta, int fused) {
    const tsh_real z = tshi_math_exp(x * beta, fused);
    return tshi_math_either(x * beta > 20, TSHI_R(1), z / (z + TSHI_R(1)));
}

/* Returns log(sigmoid(x)) = min(x, 0) - log(1 + e^-|x|). */
TSHI_INLINE tsh_real tshi_math_log_sigmoid(tsh_real x, int fused) {
    const tsh_real z = tshi_math_exp(-tshi_math_abs(x), fused);
    return tshi_math_either(x < 0, x, TSHI_R(0)) - tshi_math_log1p(z, fused);
}

/* Returns the derivative of log(sigmoid(x)), sigmoid(-x): with z = e^-|x|, z / (1 + z) for x >= 0
 * and 1 / (1 + z) for x < 0. */
TSHI_INLINE tsh_real tshi_math_log_sigmoid_derivative(tsh_real x, int fused) {
    const tsh_real z = tshi_math_exp(-tshi_math_abs(x), fused);
    return tshi_math_either(x < 0, TSHI_R(1), z) / (TSHI_R(1) + z);
}

/* Returns ELU (Clevert et al. 2016): x, or alpha (e^x - 1) for x < 0. */
TSHI_INLINE tsh_real tshi_math_elu(tsh_real x, tsh_real alpha, int fused) {
    return tshi_math_either(x < 0, alpha * tshi_math_expm1(x, fused), x);
}

/* Returns the derivative of ELU: 1, or alpha e^x for x <= 0; NaN for NaN. */
TSHI_INLINE tsh_real tshi_math_elu_derivative(tsh_real x, tsh_real alpha, int fused) {
    return tshi_math_either(x > 0, TSHI_R(1), alpha * tshi_math_exp(x, fused));
}

/* Returns Mish (Misra 2019), x tanh(log(1 + e^x)): with w = e^x and n = w (w + 2), this is
 * x n / (n + 2), which for x above 20 rounds to x. */
TSHI_INLINE tsh_real tshi_math_mish(tsh_real x, int fused) {
    const tsh_real w = tshi_math_exp(tshi_math_either(x > 20, TSHI_R(20), x), fused);
    const tsh_real n = w * (w + TSHI_R(2));
    return x * (n / (n + TSHI_R(2)));
}

/* Returns the derivative of Mish: n / (n + 2) + x 4 w (w + 1) / (n + 2)^2, with w and n as in
 * tshi_math_mish. */
TSHI_INLINE tsh_real tshi_math_mish_derivative(tsh_real x, int fused) {
    const tsh_real least = tshi_math_either(x > 20, TSHI_R(20), x); /* min(x, 20) */
    const tsh_real w = tshi_math_exp(least, fused), n = w * (w + TSHI_R(2)), m = n + TSHI_R(2);
    return n / m + least * (TSHI_R(4) * w / m) * ((w + TSHI_R(1)) / m);
}
