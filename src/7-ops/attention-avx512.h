/* ========================================================================== */
/* >>attention-avx512                      MARK: - attention-avx512 (private) */
/* Exponentials and gradients of a tile's rows with AVX-512.                  */
/* Needs: >>attention.                                                        */
/* ========================================================================== */

/* A strip, some of the queries of a tile, as the argument of the softmax kernels. Row r of the
 * strip sees the first (visible + r * each) of its n keys, of which only the first `most` exist. */
typedef struct tshi_strip {
    const tshi_head *h; /* the head that the tile belongs to */
    int64_t i, r;       /* the query of the strip's first row, and that row's index in the tile */
    int64_t n, most;    /* number of keys that are computed; how many of these exist */
    int64_t visible;    /* keys that row 0 of the strip sees; negative: the first rows see none */
    /* 1 if causal or with a window: every row sees one key more than the row before */
    int64_t each;
} tshi_strip;

/* Returns how many of the strip's keys row r sees, from 0 to most. */
TSHI_INLINE int64_t tshi_attention_row(const tshi_strip *strip, int64_t r) {
    const int64_t visible = strip->visible + r * strip->each;
    return visible < 0 ? 0 : visible < strip->most ? visible : strip->most;
}

/* Returns the strip that begins with row r of the tile at query i, and has n keys from key j on. */
static tshi_strip tshi_attention_strip_at(const tshi_head *h, int64_t i, int64_t r, int64_t j,
                                          int64_t n) {
    const int64_t visible = (h->moves ? h->to + i + r : h->to) - j;
    const tshi_strip strip = {h, i + r, r, n, tshi_base_min(n, h->tk - j), visible, h->moves};
    return strip;
}

/* Multiplies n values of x by `by` and writes them to y, which may be x. */
TSHI_INLINE void tshi_attention_scale(tsh_real *y, const tsh_real *x, int64_t n, tsh_real by) {
    TSHI_LANES for (int64_t e = 0; e < n; e++) y[e] = x[e] * by;
}

#if TSHI_X86 && TSHI_GEMM_FLOAT
/* Loads a block of 32 scores into *a and *b. Only the first `left` are visible; the others become
 * -infinity. */
TSHI_AVX512 TSHI_INLINE void tshi_attention_load(const float *x, int64_t left, __m512 *a,
                                                 __m512 *b) {
    const uint32_t mask = tshi_gemm_mask(left);
    const __m512 none = _mm512_set1_ps(-INFINITY);
    *a = _mm512_mask_loadu_ps(none, (__mmask16)mask, x);
    *b = _mm512_mask_loadu_ps(none, (__mmask16)(mask >> 16), x + 16);
}

/* Returns the maximum of n values, or NaN if one is NaN, as tshi_kernel_max does, with AVX-512. */
TSHI_AVX512 static float tshi_attention_most_avx512(const float *x, int64_t n) {
    __m512 most = _mm512_set1_ps(-INFINITY), a, b;
    __mmask16 nan = 0;
    for (int64_t e = 0; e < n; e += TSHI_BLOCK) {
        tshi_attention_load(x + e, n - e, &a, &b);
        nan |= _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q);
        most = _mm512_max_ps(most, _mm512_max_ps(a, b));
    }
    return nan ? NAN : _mm512_reduce_max_ps(most);
}

/* Returns e^r of 16 values v = n ln 2 + r with -87 <= v <= 0, as tshi_math_exp_whole does for one,
 * and sets *shifted to n + 1.5 * 2^23. */
TSHI_AVX512 TSHI_INLINE __m512 tshi_attention_exp_rest(__m512 v, __m512 *shifted) {
    const __m512 shift = _mm512_set1_ps(12582912.0f), one = _mm512_set1_ps(1.0f);
    const __m512 n = _mm512_fmadd_ps(v, _mm512_set1_ps(1.44269504f), shift);
    const __m512 whole = _mm512_sub_ps(n, shift);
    __m512 r = _mm512_fmadd_ps(whole, _mm512_set1_ps(-0.693359375f), v), p;
    r = _mm512_fmadd_ps(whole, _mm512_set1_ps(2.12194440e-4f), r);
    p = _mm512_fmadd_ps(_mm512_set1_ps(1.3814465e-3f), r, _mm512_set1_ps(8.3687805e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1668394e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666520e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.9999993e-1f));
    *shifted = n;
    return _mm512_fmadd_ps(_mm512_fmadd_ps(p, r, one), r, one);
}

/* Returns e^v of 16 values v <= 0, as tshi_math_exp_below does for one. */
TSHI_AVX512 TSHI_INLINE __m512 tshi_attention_exp(__m512 v) {
    const __m512i least = _mm512_set1_epi32((int)0xC2AE0000u); /* the bits of -87 */
    const __mmask16 normal = _mm512_cmple_epu32_mask(_mm512_castps_si512(v), least);
    __m512 n;
    const __m512 p = tshi_attention_exp_rest(v, &n);
    return _mm512_castsi512_ps(_mm512_maskz_add_epi32(normal, _mm512_castps_si512(p),
                                                      _mm512_slli_epi32(_mm512_castps_si512(n),
                                                                        23)));
}

/* Returns e^v = 2^n 2^f for v <= 0, n = floor(v / ln 2); NaN for NaN. The error is 4e-6 of e^v:
 * little beside the rounding to bf16. */
TSHI_AVX512 TSHI_INLINE __m512 tshi_attention_exp_short(__m512 v) {
    const __m512 x = _mm512_mul_ps(v, _mm512_set1_ps(1.44269504f));
    const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(0.013426805f), f, _mm512_set1_ps(0.05224228f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.2412803f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.69304484f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, x); /* p = 2^f, times 2^n */
}

/* Adds up 32 lanes as tshi_kernel_fold does: the first 16 are in low, the others in high. */
TSHI_AVX512 TSHI_INLINE float tshi_attention_fold(__m512 low, __m512 high) {
    const __m512 a = _mm512_add_ps(low, high);
    const __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    const __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    const __m128 d = _mm_add_ps(c, _mm_movehl_ps(c, c)); /* lanes c0 + c2 and c1 + c3 */
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}

/* Replaces n values x by e^(x - max) and returns their sum, as tshi_kernel_sum_exps does, with
 * AVX-512. */
TSHI_AVX512 static float tshi_attention_exps_avx512(float *x, int64_t n, float max) {
    const __m512 m = _mm512_set1_ps(max);
    __m512 low = _mm512_setzero_ps(), high = low, a, b;
    for (int64_t e = 0; e < n; e += TSHI_BLOCK) {
        tshi_attention_load(x + e, n - e, &a, &b);
        a = tshi_attention_exp(_mm512_sub_ps(a, m));
        b = tshi_attention_exp(_mm512_sub_ps(b, m));
        _mm512_storeu_ps(x + e, a);
        _mm512_storeu_ps(x + e + 16, b);
        low = _mm512_add_ps(low, a);
        high = _mm512_add_ps(high, b);
    }
    return tshi_attention_fold(low, high) + (max - max);
}
#endif

#if TSHI_GEMM_BF16S
/* Does what tshi_attention_exps_avx512 does, with the faster, less exact tshi_attention_exp_short.
 * rounded 1: stores the exponentials as bf16, in the first half of their memory. */
TSHI_GEMM_TARGET_BF16 TSHI_INLINE float tshi_attention_exps_short(float *x, int64_t n, float max,
                                                                  const int rounded) {
    const __m512 m = _mm512_set1_ps(max);
    __m512 low = _mm512_setzero_ps(), high = low, a, b;
    for (int64_t e = 0; e < n; e += TSHI_BLOCK) {
        tshi_attention_load(x + e, n - e, &a, &b);
        a = tshi_attention_exp_short(_mm512_sub_ps(a, m));
        b = tshi_attention_exp_short(_mm512_sub_ps(b, m));
        if (rounded)
            _mm512_storeu_si512(x + e / 2, (__m512i)_mm512_cvtne2ps_pbh(b, a));
        else {
            _mm512_storeu_ps(x + e, a);
            _mm512_storeu_ps(x + e + 16, b);
        }
        low = _mm512_add_ps(low, a);
        high = _mm512_add_ps(high, b);
    }
    return tshi_attention_fold(low, high) + (max - max);
}
TSHI_GEMM_TARGET_BF16 static float tshi_attention_exps_pairs(float *x, int64_t n, float max) {
    return tshi_attention_exps_short(x, n, max, 1);
}
TSHI_GEMM_TARGET_BF16 static float tshi_attention_exps_bf16(float *x, int64_t n, float max) {
    return tshi_attention_exps_short(x, n, max, 0);
}

/* Multiplies n values by `by` and stores them as bf16, with AVX512_BF16 (tshi_head.put). */
TSHI_GEMM_TARGET_BF16 static void tshi_attention_put_bf16(void *to, const float *x, int64_t n,
                                                          float by) {
    for (int64_t e = 0; e < n; e += 16) {
        const __mmask16 mask = (__mmask16)tshi_gemm_mask(n - e);
        const __m512 y = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x + e), _mm512_set1_ps(by));
        _mm256_mask_storeu_epi16((uint16_t *)to + e, mask, (__m256i)_mm512_cvtneps_pbh(y));
    }
}

/* Sets h->back.rows_do to rows [i, i + m) of dO, rounded to pairs of bf16, and h->row to delta of
 * these rows, the dot product of dO and O. The column strides of O and dO are 1. */
TSHI_GEMM_TARGET_BF16 static void tshi_attention_delta_pairs(const tshi_head *h, int64_t i,
                                                             int64_t m) {
    const int64_t d = h->d, words = tshi_attention_words(h, d);
    for (int64_t r = 0; r < m; r++) {
        const float *dout = tshi_gemm_at(h->back.dout, i + r, 0);
        const uint16_t *o = (const uint16_t *)tshi_gemm_from(h->o, i + r, 0).data;
        __m512 low = _mm512_setzero_ps(), high = low;
        for (int64_t e = 0; e < d; e += 32) {
            const uint32_t mask = tshi_gemm_mask(d - e);
            const __m512 a = _mm512_maskz_loadu_ps((__mmask16)mask, dout + e);
            const __m512 b = _mm512_maskz_loadu_ps((__mmask16)(mask >> 16), dout + e + 16);
            const __m512i x = _mm512_maskz_loadu_epi16((__mmask32)mask, o + e);
            const __m256i second = _mm512_extracti64x4_epi64(x, 1);
            low = _mm512_fmadd_ps(a, tshi_gemm_widen(TSHI_GEMM_BF16, _mm512_castsi512_si256(x)),
                                  low);
            high = _mm512_fmadd_ps(b, tshi_gemm_widen(TSHI_GEMM_BF16, second), high);
            _mm512_mask_storeu_epi32(h->back.rows_do + r * words + e / 2,
                                     (__mmask16)tshi_gemm_mask((d - e + 1) / 2),
                                     tshi_gemm_round2(a, b));
        }
        h->row[r] = tshi_attention_fold(low, high);
    }
}

/* Does what tshi_attention_grad_body does for n rows, but writes bf16: the probabilities p and the
 * gradients dS of the scores, in pairs of queries, to columns_p and columns_s, and dS in pairs of
 * keys to the rows of h->back.t. */
TSHI_GEMM_TARGET_BF16 static void tshi_attention_grad_pairs(int64_t n, const tshi_strip *strip) {
    const tshi_head *h = strip->h;
    const int64_t pitch = h->pitch;
    const __m512 scale = _mm512_set1_ps(h->back.ds_scale);
    const __m512i mix = _mm512_loadu_si512(tshi_gemm_mix);
    for (int64_t r = 0; r < n; r += 2) { /* a pair of queries; the second one may not exist */
        const int64_t at = (strip->r + r) / 2 * pitch;
        float *dx = h->back.t + (strip->r + r) * pitch;
        __m512 m[2], l[2], nan[2], delta[2], p[2], ds[2];
        int64_t visible[2];
        for (int q = 0; q < 2; q++) {
            const int64_t row = r + q < n ? r + q : r, i = strip->i + row;
            m[q] = _mm512_set1_ps(h->max[i]);
            l[q] = _mm512_set1_ps(h->log_sum[i]);
            nan[q] = _mm512_sub_ps(l[q], l[q]); /* 0, but NaN if log l is not finite */
            delta[q] = _mm512_set1_ps(h->row[strip->r + row]);
            visible[q] = r + q < n && (double)h->max[i] >= -DBL_MAX ? tshi_attention_row(strip, row)
                                                                    : 0;
        }
        for (int64_t e = 0; e < tshi_attention_wide(strip->n); e += 16) {
            /* 1: one of the two queries sees one of the 16 keys from e on */
            const int some = e < visible[0] || e < visible[1];
            p[0] = p[1] = ds[0] = ds[1] = _mm512_setzero_ps();
            for (int q = 0; q < 2 && some; q++) {
                const int64_t in = (r + q < n ? q : 0) * pitch + e;
                const __mmask16 mask = (__mmask16)tshi_gemm_mask(visible[q] - e);
                const __m512 x = _mm512_loadu_ps(h->s + r * pitch + in);
                p[q] = tshi_attention_exp_short(_mm512_sub_ps(_mm512_sub_ps(x, m[q]), l[q]));
                p[q] = _mm512_maskz_add_ps(mask, p[q], nan[q]);
                ds[q] = _mm512_sub_ps(_mm512_loadu_ps(dx + in), delta[q]);
                ds[q] = _mm512_maskz_mul_ps(mask, _mm512_mul_ps(p[q], ds[q]), scale);
            }
            _mm512_storeu_si512(h->back.columns_p + at + e,
                                _mm512_permutexvar_epi16(mix, tshi_gemm_round2(p[0], p[1])));
            _mm512_storeu_si512(h->back.columns_s + at + e,
                                _mm512_permutexvar_epi16(mix, tshi_gemm_round2(ds[0], ds[1])));
            for (int q = 0; q < 2 && r + q < n; q++)
                _mm256_storeu_si256((__m256i *)(void *)(dx + q * pitch + e / 2),
                                    (__m256i)_mm512_cvtneps_pbh(ds[q]));
        }
    }
}
#endif
