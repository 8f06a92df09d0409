/* ========================================================================== */
/* >>loss-avx512                                MARK: - loss-avx512 (private) */
/* The maximum and the sum of exponentials of a row of logits with AVX-512.   */
/* Needs: >>attention-avx512.                                                 */
/* ========================================================================== */

/* logits per part of a row; tshi_loss_online finds the maximum of a part, then adds its
 * exponentials */
enum { TSHI_LOSS_RUN = 512 };

#if TSHI_X86 && TSHI_GEMM_FLOAT
/* Returns e^v of 16 values v <= 0, as tshi_math_exp_below does for one; NaN for NaN. */
TSHI_AVX512 TSHI_INLINE __m512 tshi_loss_exp(__m512 v) {
    const __mmask16 normal = _mm512_cmp_ps_mask(v, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
    __m512 n;
    const __m512 p = tshi_attention_exp_rest(v, &n);
    return _mm512_maskz_scalef_ps(normal, p, _mm512_sub_ps(n, _mm512_set1_ps(12582912.0f)));
}

/* Adds e^(x - max) of a part of a row, TSHI_LOSS_RUN logits or the last n, to 32 partial sums, in
 * *low and *high. Returns the maximum of the row's next part; of a part with NaN any number. That
 * part is read here so that memory is busy while the exponentials of this one are computed. n:
 * number of logits from x on; whole: 1 if n is two parts or more, a constant after inlining. */
TSHI_AVX512 TSHI_INLINE float tshi_loss_part_avx512(const float *x, int64_t n, float max,
                                                    __m512 *low, __m512 *high, const int whole) {
    enum { AHEAD = 4096 }; /* bytes from a logit to the memory prefetched with it */
    const __m512 m = _mm512_set1_ps(max < -FLT_MAX ? 0 : max); /* e^(-infinity - 0) is 0 */
    __m512 most = _mm512_set1_ps(-INFINITY), a, b;
    for (int64_t e = 0; e < TSHI_LOSS_RUN && (whole || e < n); e += TSHI_BLOCK) {
        const int64_t next = e + TSHI_LOSS_RUN;
        TSHI_PREFETCH((const void *)((uintptr_t)(x + e) + AHEAD));
        TSHI_PREFETCH((const void *)((uintptr_t)(x + e) + AHEAD + 64));
        tshi_attention_load(x + e, whole ? (int64_t)TSHI_BLOCK : n - e, &a, &b);
        *low = _mm512_add_ps(*low, tshi_loss_exp(_mm512_sub_ps(a, m)));
        *high = _mm512_add_ps(*high, tshi_loss_exp(_mm512_sub_ps(b, m)));
        if (!whole && next >= n) continue;
        tshi_attention_load(x + next, whole ? (int64_t)TSHI_BLOCK : n - next, &a, &b);
        most = _mm512_max_ps(most, _mm512_max_ps(a, b));
    }
    return _mm512_reduce_max_ps(most);
}

/* Does what tshi_loss_online does, to the same bits. If a logit is NaN, the sum is NaN, and so is
 * *m, unless another logit is infinite. */
TSHI_AVX512 static float tshi_loss_online_avx512(const float *x, int64_t n, float *m) {
    __m512 low = _mm512_setzero_ps(), high = low; /* partial sums 0 to 15 and 16 to 31 */
    float max = *m, here = max, sum; /* max: maximum of earlier parts; here: of the part at x */
    if (n > 0) here = tshi_attention_most_avx512(x, tshi_base_min(TSHI_LOSS_RUN, n));
    for (; n > 0; n -= TSHI_LOSS_RUN, x += TSHI_LOSS_RUN) {
        if (here > max) { /* this part has the larger maximum: scales the sums */
            const __m512 scale = _mm512_set1_ps(tshi_math_exp(max - here, 1));
            low = _mm512_mul_ps(low, scale);
            high = _mm512_mul_ps(high, scale);
            max = here;
        }
        here = n >= 2 * TSHI_LOSS_RUN ? tshi_loss_part_avx512(x, n, max, &low, &high, 1)
                                      : tshi_loss_part_avx512(x, n, max, &low, &high, 0);
    }
    sum = tshi_attention_fold(low, high);
    *m = sum == sum || max > FLT_MAX ? max : sum;
    return sum + (*m - *m);
}
#define TSHI_LOSS_ONLINE_AVX512 tshi_loss_online_avx512
#else
#define TSHI_LOSS_ONLINE_AVX512 NULL
#endif
