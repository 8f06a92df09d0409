/* ========================================================================== */
/* >>loss-avx512                                MARK: - loss-avx512 (private) */
/* The maximum and the sum of exponentials of a row of logits, in one pass.   */
/* Needs: >>gemm-avx512.                                                      */
/* ========================================================================== */

#if TSHI_X86 && TSHI_GEMM_FLOAT
/* Adds e^(x - m) of 16 logits x <= m to the sums: 2^n 2^f with x - m = (n + f) ln 2 and |f| <= 1/2.
 * The relative error is 1e-7 + 1.3e-8 |x - m|: little beside the largest term, which is 1. */
TSHI_AVX512 TSHI_INLINE __m512 tshi_loss_add_exp(__m512 sum, __m512 x, __m512 m) {
    const __m512 log2e = _mm512_set1_ps(1.44269504f);
    /* 1.5 * 2^23 rounds to an integer, which 127 makes the bits of the exponent of 2^n */
    const __m512 shift = _mm512_set1_ps(12582912.0f + 127.0f);
    const __m512 v = _mm512_max_ps(_mm512_set1_ps(-87.0f), _mm512_sub_ps(x, m)); /* NaN stays */
    const __m512 n = _mm512_fmadd_ps(v, log2e, shift);
    const __m512 f = _mm512_fmsub_ps(v, log2e, _mm512_sub_ps(n, shift));
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(1.3276472e-3f), f, _mm512_set1_ps(9.6755419e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5507131e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022120e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9314694e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0000001f));
    return _mm512_fmadd_ps(
        p, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(n), 23)), sum);
}

/* Does what tshi_loss_online does, with AVX-512, in groups of 64 logits. If a logit is NaN, S is
 * NaN, but m need not be. */
TSHI_AVX512 static float tshi_loss_online_avx512(const float *x, int64_t n, float *m) {
    enum { GROUP = 4, AHEAD = 4096 }; /* registers of a group; bytes that are prefetched ahead */
    const __m512 none = _mm512_set1_ps(-INFINITY), zero = _mm512_setzero_ps();
    __m512 sum[GROUP], v[GROUP], max = _mm512_set1_ps(-FLT_MAX), top, shrink;
    for (int i = 0; i < GROUP; i++) sum[i] = zero;
    for (; n > 0; n -= 16 * GROUP, x += 16 * GROUP) {
        for (int i = 0; i < GROUP; i++) {
            v[i] = _mm512_mask_loadu_ps(none, (__mmask16)tshi_gemm_mask(n - 16 * i), x + 16 * i);
            TSHI_PREFETCH((const void *)((uintptr_t)(x + 16 * i) + AHEAD));
        }
        top = _mm512_max_ps(_mm512_max_ps(v[0], v[1]), _mm512_max_ps(v[2], v[3]));
        if (_mm512_cmp_ps_mask(top, max, _CMP_GT_OQ)) { /* m grows */
            top = _mm512_set1_ps(_mm512_reduce_max_ps(_mm512_max_ps(max, top)));
            shrink = tshi_loss_add_exp(zero, max, top);
            for (int i = 0; i < GROUP; i++) sum[i] = _mm512_mul_ps(sum[i], shrink);
            max = top;
        }
        for (int i = 0; i < GROUP; i++) sum[i] = tshi_loss_add_exp(sum[i], v[i], max);
    }
    *m = _mm512_cvtss_f32(max);
    sum[0] = _mm512_add_ps(_mm512_add_ps(sum[0], sum[1]), _mm512_add_ps(sum[2], sum[3]));
    float s = _mm512_reduce_add_ps(sum[0]);
    if (s < 0.5f) *m = -INFINITY; /* no term is 1: all logits are -infinity */
    return s + (*m - *m);         /* NaN if m is not finite */
}
#endif
