/* ========================================================================== */
/* >>math                                              MARK: - math (private) */
/* Functions of one float that vectorise: exp, log, tanh, erf, pow and what   */
/* is made of them.                                                           */
/* Needs: >>base.                                                             */
/* ========================================================================== */

/* Functions of one float without calls or branches, so that loops that call them vectorise. (For
 * double they call libm.) Most reduce the argument to a small range by working on the bits of the
 * float, compute a polynomial there, and select the special values at the end by masks.
 * Coefficients are minimax (Remez algorithm) for the relative error of the whole function, unless a
 * source is named. `fused` is a constant after inlining; 1: a * b + c is one instruction, which is
 * faster and a little more exact. The largest errors in ulps over all floats are exp 0.99 (fused:
 * 0.91), tanh 1.50, log 0.87 (0.86), erf 2.00 (1.81), gelu 2.35 (2.01); over samples, pow 0.6. */

/* Returns a * b + c; rounded only once if `fused` is 1. */
TSHI_INLINE float tshi_math_fma(float a, float b, float c, int fused) {
#if defined(__GNUC__)
    return fused ? __builtin_fmaf(a, b, c) : (float)(a * b + c);
#else
    return (void)fused, a * b + c;
#endif
}

/* Returns (((p x + a) x + b) x + c) x + d: four steps of Horner's rule for a polynomial. */
TSHI_INLINE float tshi_math_steps(float p, float x, float a, float b, float c, float d, int fused) {
    p = tshi_math_fma(p, x, a, fused);
    p = tshi_math_fma(p, x, b, fused);
    p = tshi_math_fma(p, x, c, fused);
    return tshi_math_fma(p, x, d, fused);
}

/* Rounds x to float. Where floats are computed in a wider format (x87), a compiler may keep more
 * digits of x, unless it follows C99 strictly (gcc: -std=c99). */
TSHI_INLINE float tshi_math_round(float x) {
#if defined(FLT_EVAL_METHOD) && (FLT_EVAL_METHOD == 1 || FLT_EVAL_METHOD == 2)
    const volatile float stored = x; /* memory holds no more digits than a float */
    return stored;
#else
    return x;
#endif
}

/* Returns the bits of a float. Choices are made by comparing bits, as integers: a comparison of
 * floats may trap, so compilers keep it as a branch, and the loop does not vectorise. */
TSHI_INLINE uint32_t tshi_math_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* Returns the float that has these bits. */
TSHI_INLINE float tshi_math_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Returns a if yes is 1, b if yes is 0, by masking instead of a branch. */
TSHI_INLINE uint32_t tshi_math_pick(int yes, uint32_t a, uint32_t b) {
    return b ^ ((a ^ b) & (0u - (uint32_t)yes)); /* 0u - 1 has all bits set */
}

/* Reduces the argument of e^x = 2^n e^r, n = round(x / ln 2). Returns r = x - n ln 2. ln 2 is split
 * into two parts, so that n times the first part is exact (Cody & Waite 1980). Sets *n to
 * n + 0x4B400000: shifted left by 23, only n is left, at the place of a float's exponent. */
TSHI_INLINE float tshi_math_exp_rest(float x, uint32_t *n, int fused) {
    /* 1.44269504 is 1 / ln 2. Adding 12582912 = 1.5 * 2^23 rounds the product to an integer, which
     * is then in the low bits. */
    const float shifted = tshi_math_round(tshi_math_fma(x, 1.44269504f, 12582912.0f, fused));
    const float whole = shifted - 12582912.0f;             /* n = round(x / ln 2), a float */
    *n = tshi_math_bits(shifted);                          /* the integer n + 0x4B400000 */
    x = tshi_math_fma(whole, -0.693359375f, x, fused);     /* x - n times ln 2 rounded to 9 bits */
    return tshi_math_fma(whole, 2.12194440e-4f, x, fused); /* x - n times the rest of ln 2 */
}

/* Returns (e^r - 1 - r) / r^2 for |r| < 0.35. */
TSHI_INLINE float tshi_math_exp_tail(float r, int fused) {
    return tshi_math_steps(1.3814465e-3f, r, 8.3687805e-3f, 4.1668394e-2f, 1.6666520e-1f,
                           4.9999993e-1f, fused);
}

/* Returns e^r - 1 for |r| < 0.35. */
TSHI_INLINE float tshi_math_exp_less_one(float r, int fused) {
    return tshi_math_fma(tshi_math_exp_tail(r, fused), r * r, r, fused);
}

/* Returns e^r. With p = tshi_math_exp_tail, 1 + r (1 + r p) is the more exact form if fused,
 * 1 + (r + r^2 p) if not. */
TSHI_INLINE float tshi_math_exp_whole(float r, int fused) {
    if (!fused) return tshi_math_exp_less_one(r, fused) + 1.0f;
    return tshi_math_fma(tshi_math_fma(tshi_math_exp_tail(r, fused), r, 1.0f, fused), r, 1.0f,
                         fused);
}

/* Returns e^x for x <= 0 (or just above), in fewer steps than tshi_math_exp: 0 for x < -87, any
 * value for NaN. Adding n to the exponent multiplies by 2^n. */
TSHI_INLINE tsh_real tshi_math_exp_below(tsh_real v, int fused) {
    const uint32_t bits = tshi_math_bits((float)v);
    uint32_t x = bits < 0xC2AE0000u ? bits : 0xC2AE0000u, n; /* x: bits of max(v, -87) */
    float y;
    if (TSHI_DOUBLE) return TSHI_R(exp((double)v));
    y = tshi_math_exp_whole(tshi_math_exp_rest(tshi_math_float(x), &n, fused), fused); /* e^r */
    x = tshi_math_bits(y) + (n << 23);                                                 /* 2^n e^r */
    return TSHI_R(tshi_math_float(tshi_math_pick(bits <= 0xC2AE0000u, x, 0u))); /* x < -87: 0 */
}

/* Returns e^x = 2^n e^r for any x, where |r| < 0.35. 2^n is multiplied in as two factors of about
 * 2^(n/2), so that neither overflows or underflows before the product does. */
TSHI_INLINE tsh_real tshi_math_exp(tsh_real v, int fused) {
    const uint32_t bits = tshi_math_bits((float)v);
    int32_t order = (int32_t)bits; /* positive floats are ordered as their bits */
    uint32_t x, n, half;
    float y;
    if (TSHI_DOUBLE) return TSHI_R(exp((double)v));
    /* Clamps x to [-104, 89] by comparing its bits: as signed integers, which limits positive
     * floats, then as unsigned ones, which limits negative floats. */
    order = order < 0x42B20000 ? order : 0x42B20000;
    x = (uint32_t)order;
    x = x < 0xC2D00000u ? x : 0xC2D00000u;
    y = tshi_math_exp_whole(tshi_math_exp_rest(tshi_math_float(x), &n, fused), fused); /* e^r */
    n -= 0x4B400000u - 254u; /* n plus twice the bias of the exponent */
    half = n >> 1;           /* about half of n, plus the bias */
    y = y * tshi_math_float(half << 23) * tshi_math_float((n - half) << 23); /* 2^n e^r */
    /* If x is NaN, the result is x itself. */
    return TSHI_R(
        tshi_math_float(tshi_math_pick(bits << 1 > 0xFF000000u, bits, tshi_math_bits(y))));
}

/* Returns 1 / (1 + e^-x). */
TSHI_INLINE tsh_real tshi_math_sigmoid(tsh_real x, int fused) {
    return TSHI_R(1) / (TSHI_R(1) + tshi_math_exp(-x, fused));
}

/* Returns tanh x: for |x| < 0.625 an odd polynomial (as in Cephes), else q / (q + 2) with x's sign,
 * where q = e^(2 |x|) - 1. With 2 |x| = n ln 2 + r, q is 2^n (e^r - 1) + 2^n - 1. From |x| = 9.02
 * on, the result is 1 or -1. */
TSHI_INLINE tsh_real tshi_math_tanh(tsh_real v, int fused) {
    const float x = (float)v, z = x * x;                   /* z: argument of the polynomial */
    const uint32_t sign = tshi_math_bits(x) & 0x80000000u; /* x's sign bit */
    const uint32_t a = tshi_math_bits(x) & 0x7FFFFFFFu;    /* the bits of |x| */
    uint32_t n;
    float q, power, mid; /* power: 2^n; mid: tanh x for |x| < 0.625 */
    if (TSHI_DOUBLE) return TSHI_R(tanh((double)v));
    mid = tshi_math_steps(-5.7049874e-3f, z, 2.0639088e-2f, -5.3739715e-2f, 1.3331442e-1f,
                          -3.3333282e-1f, fused);
    mid = tshi_math_fma(mid * z, x, x, fused);
    q = 2.0f * tshi_math_float(a < 0x41200000u ? a : 0x41200000u);       /* 2 min(|x|, 10) */
    q = tshi_math_exp_less_one(tshi_math_exp_rest(q, &n, fused), fused); /* e^r - 1 */
    power = tshi_math_float((n << 23) + 0x3F800000u);                    /* 2^n */
    q = tshi_math_fma(power, q, power - 1.0f, fused);                    /* e^(2 |x|) - 1 */
    q = q / (q + 2.0f);
    return TSHI_R(tshi_math_float(
        tshi_math_pick(a - 0x3F200000u <= 0x40600000u, tshi_math_bits(q), tshi_math_bits(mid)) |
        sign));
}

/* Returns (log(1 + f) - f) / f^2 for 1 + f in [sqrt 1/2, sqrt 2): P(f) f - 1/2 with a polynomial
 * P. */
TSHI_INLINE float tshi_math_log_tail(float f, int fused) {
    float p = tshi_math_steps(6.7466066e-2f, f, -1.1679658e-1f, 1.1890323e-1f, -1.2405135e-1f,
                              1.4219224e-1f, fused);
    p = tshi_math_steps(p, f, -1.6668007e-1f, 2.0002134e-1f, -2.5000010e-1f, 3.3333312e-1f, fused);
    return tshi_math_fma(p, f, -0.5f, fused);
}

/* Returns log x = n log 2 + log(1 + f) with 1 + f in [sqrt 1/2, sqrt 2), and log(1 + f) =
 * f - f^2 / 2 + f^3 P(f) with a polynomial P (as in Cephes). The larger part of n log 2 is exact;
 * the rounding error of its sum with f is added last. The variable e is n 2^23, as the exponent's
 * bits are not shifted down: constants that multiply e are divided by 2^23. */
TSHI_INLINE tsh_real tshi_math_log(tsh_real v, int fused) {
    float x = (float)v, e, f, p, whole, sum, rest;
    uint32_t bits = tshi_math_bits(x), tiny = 0u - (uint32_t)(bits < 0x00800000u), k, m, special;
    if (TSHI_DOUBLE) return TSHI_R(log((double)v));
    m = bits ^ ((bits ^ tshi_math_bits(x * 8388608.0f)) & tiny); /* bits of x; of 2^23 x if tiny */
    k = (m - 0x3F3504F3u) & 0xFF800000u;            /* n << 23; n is 0 from sqrt 1/2 to sqrt 2 */
    f = tshi_math_float(m - k) - 1.0f;              /* 1 + f is x / 2^n */
    e = (float)(int32_t)(k - (0x0B800000u & tiny)); /* n 2^23; subnormal x: (n - 23) 2^23 */
    p = tshi_math_log_tail(f, fused);        /* (log(1 + f) - f) / f^2 */
    whole = e * (0.693359375f / 8388608.0f); /* the larger part of n log 2 */
    sum = whole + f;
    rest = tshi_math_fma(e, -2.12194440e-4f / 8388608.0f, whole - sum + f, fused);
    sum = sum + tshi_math_fma(p, f * f, rest, fused); /* adds rest and log(1 + f) - f */
    /* Results for special x: log 0 is -infinity, log infinity is infinity; all others are NaN. */
    special = tshi_math_pick(bits << 1 == 0u, 0xFF800000u, 0x7FC00000u);
    special = tshi_math_pick(bits == 0x7F800000u, bits, special);
    return TSHI_R(
        tshi_math_float(tshi_math_pick(bits - 1u < 0x7F7FFFFFu, tshi_math_bits(sum), special)));
}

TSHI_INLINE tsh_real tshi_math_sqrt(tsh_real x) {
    return TSHI_DOUBLE ? TSHI_R(sqrt((double)x)) : TSHI_R(sqrtf((float)x));
}

/* Returns the bits of a double. */
TSHI_INLINE uint64_t tshi_math_bits8(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* Returns the double that has these bits. */
TSHI_INLINE double tshi_math_double(uint64_t bits) {
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Rounds x to double, for platforms that compute doubles in a wider format (x87). */
TSHI_INLINE double tshi_math_round8(double x) {
#if defined(FLT_EVAL_METHOD) && FLT_EVAL_METHOD == 2
    const volatile double stored = x;
    return stored;
#else
    return x;
#endif
}

/* Returns x^y = 2^(y log2 x) for x > 0, computed in double. x is 2^n m with m in
 * [sqrt 1/2, sqrt 2); log2 m = s P(s^2) with s = (m - 1) / (m + 1) and a polynomial P. y log2 x is
 * split into an integer i and a rest in [-1/2, 1/2], of which a second polynomial computes
 * 2^rest. */
TSHI_INLINE float tshi_math_power(float x, float y) {
    uint64_t bits = tshi_math_bits8((double)x);
    uint64_t k = (bits - 0x3FE6A09E667F3BCDu + 0x3FF0000000000000u) >> 52; /* n + 1023 (the bias) */
    double m = tshi_math_double(bits - (k << 52) + 0x3FF0000000000000u), s, z, t, p;
    s = (m - 1.0) / (m + 1.0);
    z = s * s;
    p = (3.4073010658534e-1 * z + 4.1167271899778e-1) * z + 5.7708358496515e-1;
    p = (p * z + 9.6179667334180e-1) * z + 2.8853900817901; /* P(s^2) = log2(m) / s */
    /* t = log2 x. The bits k + 0x4330000000000000 are those of the double 2^52 + k; subtracting
     * 2^52 + 1023 leaves n. */
    t = tshi_math_double(k + 0x4330000000000000u) - 4503599627371519.0 + p * s;
    t = t * (double)y;     /* y log2 x */
    t = t < 200 ? t : 200; /* clamps t to [-200, 200], beyond which 2^t is out of a float's range */
    t = t > -200 ? t : -200;
    /* Adding 1.5 * 2^52 rounds t to the integer i, which is then in the low bits of s. */
    s = tshi_math_round8(t + 6755399441055744.0);
    t = t - (s - 6755399441055744.0); /* the rest of y log2 x, in [-1/2, 1/2] */
    p = (1.5353351392569e-4 * t + 1.3398887281849e-3) * t + 9.6184374823696e-3;
    p = (p * t + 5.5503324404768e-2) * t + 2.4022647911954e-1;
    p = (p * t + 6.9314720286791e-1) * t + 1.0;                                      /* 2^t */
    return (float)tshi_math_double(tshi_math_bits8(p) + (tshi_math_bits8(s) << 52)); /* 2^i 2^t */
}

/* Returns x^y, where x and y are v and w, as C's pow does: computes |x|^y, sets x's sign if y is
 * odd, then selects the results for zeros, infinities and NaN. a and b are the bits of |x| and
 * |y|. */
TSHI_INLINE tsh_real tshi_math_pow(tsh_real v, tsh_real w) {
    const uint32_t x = tshi_math_bits((float)v), y = tshi_math_bits((float)w);
    const uint32_t a = x & 0x7FFFFFFFu, b = y & 0x7FFFFFFFu, infinity = 0x7F800000u;
    uint32_t out, even, whole, odd;
    int32_t integer; /* y as an integer, if y fits */
    if (TSHI_DOUBLE) return TSHI_R(pow((double)v, (double)w));
    out = tshi_math_bits(tshi_math_power(tshi_math_float(a), (float)w)); /* |x|^y */
    even = b >= 0x4B800000u; /* |y| >= 2^24, infinity too, is an even integer */
    integer = (int32_t)tshi_math_float(tshi_math_pick((int)even, 0u, y));
    whole = even | (uint32_t)(tshi_math_bits((float)integer) == y); /* 1: y is an integer */
    odd = whole & (uint32_t)integer & 1u;                           /* 1: y is odd */
    out = tshi_math_pick((a == 0u) | (a == infinity),               /* 0^y and infinity^y */
                         tshi_math_pick((uint32_t)(a == 0u) == y >> 31, infinity, 0u), out);
    out |= x & odd << 31; /* x's sign, if y is odd */
    /* The result is NaN if x or y is, or if x is negative and finite and y is no integer. */
    out = tshi_math_pick((a > infinity) | (b > infinity) |
                             (int)((x >> 31) & (whole ^ 1u) & (uint32_t)(a - 1u < infinity - 1u)),
                         0x7FC00000u, out);
    out = tshi_math_pick((b == 0u) | (x == 0x3F800000u) | ((a == 0x3F800000u) & (b == infinity)),
                           0x3F800000u, out); /* x^0, 1^y and (-1)^infinity are 1 */
    return TSHI_R(tshi_math_float(out));
}

/* Returns the derivative of a^b with respect to a, which is b a^(b - 1); 0 if b is 0, even at
 * a = 0. */
TSHI_INLINE tsh_real tshi_math_power_derivative(tsh_real a, tsh_real b) {
    return b < 0 || b > 0 ? b * tshi_math_pow(a, b - TSHI_R(1)) : b * TSHI_R(0);
}

/* The cumulative normal distribution Phi. With a = |x| and z = a^2: Phi(-a) = e^(-z / 2) R(a),
 * where R(a) is the Mills ratio divided by sqrt(2 pi). M(a) = a R(a). Near 0, Phi(x) =
 * 1/2 + x S(z). The next three functions approximate S(z), R(a) and y - a Phi(-a) by
 * polynomials. */

/* Returns S(z), where the normal distribution Phi(x) is 1/2 + x S(x^2), for z up to 0.6875^2. */
TSHI_INLINE float tshi_math_normal(float z, int fused) {
    return tshi_math_steps(1.32573507e-4f, z, -1.20952074e-3f, 9.98079125e-3f, -6.64911047e-2f,
                           3.98942292e-1f, fused);
}

/* Returns R(a) = Phi(-a) e^(a^2 / 2), where Phi is the cumulative normal distribution, with a small
 * absolute, not relative, error: this suffices for 1 - Phi(-a). */
TSHI_INLINE float tshi_math_mills(float a, int fused) {
    const float g = a / (a + 2.5f); /* maps [0, infinity) to [0, 1) */
    float r = tshi_math_steps(1.66279189e-2f, g, 2.21382603e-2f, -5.62647432e-2f, -9.86833498e-2f,
                              4.93170805e-2f, fused);
    r = tshi_math_fma(r, g, 5.65180779e-1f, fused);
    r = tshi_math_fma(r, g, -9.97356653e-1f, fused);
    return tshi_math_fma(r, g, 0.5f, fused);
}

/* Returns y - a Phi(-a), where Phi is the cumulative normal distribution, for a from 0.6875 to
 * 14.4. (At 14.4, a Phi(-a) rounds to 0.) The relative error must be small, as y may be 0.
 * a Phi(-a) is M e^(-a^2 / 2), with M a polynomial, and e^(-a^2 / 2) is 2^n e^(r / 2). z is a^2
 * rounded, low is a^2 - z. M's coefficients hold a factor 2^-24 and 2^n a factor 2^24, so that the
 * latter is not a denormal number and the product is rounded only once. */
TSHI_INLINE float tshi_math_minus_tail(float y, float a, int fused) {
    const float u = (a - 1.5625f) / (a + 3.03125f);                     /* M is a polynomial in u */
    const float cut = tshi_math_float(tshi_math_bits(a) & 0xFFFFF000u); /* upper bits of a */
    const float z = fused ? (float)(a * a) : (float)(cut * cut);
    const float low = fused ? tshi_math_fma(a, a, -z, 1) : (float)((a - cut) * (a + cut));
    const float shifted = tshi_math_round(tshi_math_fma(z, -0.72134752f, 12582912.0f, fused));
    const float n = shifted - 12582912.0f; /* -z / (2 ln 2), rounded to an integer */
    float r, p, m;
    m = tshi_math_steps(-2.96510150e-10f, u, 5.05886832e-10f, 8.87562024e-10f, -1.91779503e-9f,
                        -4.12072465e-9f, fused);
    m = tshi_math_steps(m, u, 1.74520522e-8f, -2.54221497e-8f, 1.80368893e-8f, 1.86518925e-8f,
                        fused);
    r = tshi_math_fma(n, -1.38671875f, -z, fused); /* r = -z - 2 n ln 2, in two parts */
    r = tshi_math_fma(n, 4.2438888e-4f, r, fused) - low;
    p = tshi_math_steps(2.1585102e-5f, r, 2.6152439e-4f, 2.6042746e-3f, 2.0833150e-2f,
                        1.2499998e-1f, fused);
    p = tshi_math_fma(p, r, 0.5f, fused);                               /* r p = e^(r / 2) - 1 */
    m = tshi_math_fma(m * r, p, m, fused);                              /* M e^(r / 2) */
    p = tshi_math_float((tshi_math_bits(shifted) << 23) + 0x4B800000u); /* 2^n times 2^24 */
    return tshi_math_fma(-m, p, y, fused);
}

/* Returns gelu(x) = x Phi(x), where Phi is the cumulative normal distribution. With a = |x|, this
 * is x / 2 + x^2 S(a^2) near 0 (S: tshi_math_normal), else max(x, 0) - a Phi(-a). Infinities and
 * NaN take the first form, so gelu(-infinity) is NaN, as -infinity times 0 is. The result has the
 * sign bit of x; a result that rounds to 0 would lack it otherwise. */
TSHI_INLINE tsh_real tshi_math_gelu(tsh_real v, int fused) {
    const float x = (float)v;
    const uint32_t bits = tshi_math_bits(x) & 0x7FFFFFFFu;                    /* bits of |x| */
    const int32_t order = (int32_t)tshi_math_bits(x);                         /* negative if x is */
    const float a = tshi_math_float(bits < 0x41666666u ? bits : 0x41666666u); /* min(|x|, 14.4) */
    float mid, ends;
    if (TSHI_DOUBLE) /* tsh_real is double: calls the function of libm */
        return TSHI_R(0.5 * (double)v * erfc((double)v * -0.70710678118654752));
    mid = tshi_math_fma(tshi_math_normal(a * a, fused) * x, x, 0.5f * x, fused);
    ends = tshi_math_minus_tail(tshi_math_float((uint32_t)(order > 0 ? order : 0)), a, fused);
    return TSHI_R(tshi_math_float(tshi_math_pick(bits - 0x3F300000u < 0x40500000u,
                                                 tshi_math_bits(ends), tshi_math_bits(mid)) |
                                  ((uint32_t)order ^ bits)));
}

/* Returns gelu'(x) = Phi(x) + x phi(x), where phi = Phi' is the normal density. With a = |x|,
 * gelu'(a) = 1 - gelu'(-a), and gelu'(-a) = e^(-a^2 / 2) (R(a) - a / sqrt(2 pi)), where R is
 * tshi_math_mills. */
TSHI_INLINE tsh_real tshi_math_gelu_derivative(tsh_real v, int fused) {
    const uint32_t x = tshi_math_bits((float)v), bits = x & 0x7FFFFFFFu;
    const float a = tshi_math_float(bits < 0x41600000u ? bits : 0x41600000u); /* min(|x|, 14) */
    float y;
    if (TSHI_DOUBLE) {
        const double bell = 0.39894228040143268 * exp(-0.5 * (double)v * (double)v); /* phi(x) */
        return TSHI_R(0.5 * erfc((double)v * -0.70710678118654752) + (double)v * bell);
    }
    y = tshi_math_fma(-0.39894228f, a, tshi_math_mills(a, fused), fused);
    y = y * (float)tshi_math_exp_below(TSHI_R(-0.5f * a * a), fused); /* gelu'(-a) */
    y = tshi_math_float(
        tshi_math_pick((int)(x >> 31), tshi_math_bits(y), tshi_math_bits(1.0f - y)));
    return TSHI_R(y + ((float)v - (float)v)); /* v - v is 0, or NaN if v is not finite */
}

/* Returns erf(x). With a = |x|: erf(a) = 1 - e^-P, where P = a + a Q(a) with a polynomial Q, for a
 * up to 3.95 (from 3.88 on erf(a) is 1). With -P = n ln 2 + r, erf(a) is 1 - 2^n - 2^n (e^r - 1);
 * erf(x) has the sign of x. */
TSHI_INLINE tsh_real tshi_math_erf(tsh_real v, int fused) {
    const uint32_t x = tshi_math_bits((float)v), bits = x & 0x7FFFFFFFu;
    const float a = tshi_math_float(bits < 0x407CCCCDu ? bits : 0x407CCCCDu); /* min(|x|, 3.95) */
    uint32_t n; /* (n << 23) plus the bits of 1.0 are the bits of 2^n */
    float q, power;
    if (TSHI_DOUBLE) return TSHI_R(erf((double)v));
    q = tshi_math_steps(-9.25656514e-6f, a, 1.17644027e-4f, -6.32846961e-4f, 1.66704645e-3f,
                        -1.60415613e-4f, fused);
    q = tshi_math_steps(q, a, -1.91530529e-2f, 1.02777824e-1f, 6.36619389e-1f, 1.28379166e-1f,
                        fused);
    q = tshi_math_exp_rest(-tshi_math_fma(q, a, a, fused), &n, fused);
    q = tshi_math_exp_less_one(q, fused);             /* e^r - 1 */
    power = tshi_math_float((n << 23) + 0x3F800000u); /* 2^n */
    q = tshi_math_fma(-power, q, 1.0f - power, fused);
    return TSHI_R(
        tshi_math_float(tshi_math_pick(bits > 0x7F800000u, x, tshi_math_bits(q) | (x ^ bits))));
}

/* Returns e^-2u for u = sqrt(2 / pi) (x + 0.044715 x^3). gelu_tanh is x / (1 + e^-2u). */
TSHI_INLINE tsh_real tshi_math_gelu_power(tsh_real x, int fused) {
    return tshi_math_exp(-x * (TSHI_R(1.5957691216057308) + TSHI_R(0.071354816272600) * x * x),
                         fused);
}

/* Returns the derivative of gelu_tanh(x) = x s, where s = 1 / (1 + e^-2u) is the sigmoid of 2u: s +
 * x s (1 - s) d(2u)/dx, with the u of tshi_math_gelu_power. */
TSHI_INLINE tsh_real tshi_math_gelu_tanh_derivative(tsh_real x, int fused) {
    tsh_real s = TSHI_R(1) / (TSHI_R(1) + tshi_math_gelu_power(x, fused));
    tsh_real du2 = TSHI_R(1.5957691216057308) + TSHI_R(0.2140644488178) * x * x; /* d(2u)/dx */
    return s + x * s * (TSHI_R(1) - s) * du2;
}

TSHI_INLINE tsh_real tshi_math_silu(tsh_real x, int fused) {
    return x / (TSHI_R(1) + tshi_math_exp(-x, fused)); /* x times sigmoid(x) */
}

TSHI_INLINE tsh_real tshi_math_silu_derivative(tsh_real x, int fused) {
    tsh_real s = tshi_math_sigmoid(x, fused);
    return s * (TSHI_R(1) + x * (TSHI_R(1) - s)); /* the derivative of x s, where s is sigmoid(x) */
}
