/* ========================================================================== */
/* >>gemm-avx512                                MARK: - gemm-avx512 (private) */
/* Packing with AVX-512; where supported, also rounding to pairs of bf16.     */
/* Needs: >>gemm-vector >>gemm-pack.                                          */
/* ========================================================================== */

#if TSHI_X86 && TSHI_GEMM_FLOAT
/* Returns a bit mask of the first n lanes, of at most 32. */
TSHI_INLINE uint32_t tshi_gemm_mask(int64_t n) {
    return n >= 32 ? 0xFFFFFFFFu : n <= 0 ? 0 : ((uint32_t)1 << n) - 1;
}

/* Rounds 16 floats to bf16, as tshi_dtype_to_bf16 does. The results are in the upper halves of the
 * lanes; the lower halves are not cleared. */
TSHI_AVX512 TSHI_INLINE __m512i tshi_gemm_round(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
    return _mm512_mask_or_epi32(up, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), bits,
                                _mm512_set1_epi32(0x400000)); /* NaN stays NaN */
}

/* tshi_gemm_round2 returns 16 pairs of floats rounded to bf16: (low[0], low[1]), ..., (high[14],
 * high[15]). It is called only on processors with AVX512_BF16: on others no kernel for AVX-512
 * multiplies pairs of bf16. */
#if TSHI_GEMM_BF16S
#define TSHI_GEMM_TARGET_PACK TSHI_GEMM_TARGET_BF16
TSHI_GEMM_TARGET_PACK TSHI_INLINE __m512i tshi_gemm_round2(__m512 low, __m512 high) {
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}
#else
#define TSHI_GEMM_TARGET_PACK TSHI_AVX512
TSHI_AVX512 TSHI_INLINE __m512i tshi_gemm_round2(__m512 low, __m512 high) {
    (void)low, (void)high;
    return _mm512_setzero_si512();
}
#endif

/* A permutation of 16-bit elements: (a0, .., a15, b0, .., b15) becomes (a0, b0, .., a15, b15). */
static const uint16_t tshi_gemm_mix[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                           21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                           11, 27, 12, 28, 13, 29, 14, 30, 15, 31};

/* Returns the next 16 words of a row in packed form: a float or a pair of bf16 each. src: the row's
 * next elements; mask: those of them that exist, the others count as 0. */
TSHI_GEMM_TARGET_PACK
TSHI_INLINE __m512 tshi_gemm_load_row(const tshi_gemm_form form, const char *src,
                                      uint32_t mask) {
    if (form == TSHI_GEMM_REALS) return _mm512_maskz_loadu_ps((__mmask16)mask, src);
    if (form == TSHI_GEMM_PAIRS)
        return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16((__mmask32)mask, src));
    if (form == TSHI_GEMM_ROUNDED) {
        const __m512 low = _mm512_maskz_loadu_ps((__mmask16)mask, src);
        const __m512 high = _mm512_maskz_loadu_ps((__mmask16)(mask >> 16), src + 64);
        return _mm512_castsi512_ps(tshi_gemm_round2(low, high));
    }
    return tshi_gemm_widen(form, _mm256_maskz_loadu_epi16((__mmask16)mask, src));
}

/* Returns one word of each of 16 rows in packed form: a float or a pair of bf16; 0 for rows that
 * are not in mask. src: one element of each row, contiguous. next: bytes from src to the next
 * element of each row, the second one of a pair; 0: the rows end, and second elements are 0. */
TSHI_GEMM_TARGET_PACK
TSHI_INLINE __m512 tshi_gemm_load_column(const tshi_gemm_form form, const char *src,
                                                     __mmask16 mask, int64_t next) {
    const __mmask16 both = next ? mask : 0;
    if (form == TSHI_GEMM_REALS) return _mm512_maskz_loadu_ps(mask, src);
    if (form == TSHI_GEMM_PAIRS) {
        const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, src));
        const __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(both, src + next));
        return _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
    if (form == TSHI_GEMM_ROUNDED) {
        const __m512 low = _mm512_maskz_loadu_ps(mask, src);
        const __m512 high = _mm512_maskz_loadu_ps(both, src + next);
        return _mm512_castsi512_ps(_mm512_permutexvar_epi16(_mm512_loadu_si512(tshi_gemm_mix),
                                                            tshi_gemm_round2(low, high)));
    }
    return tshi_gemm_widen(form, _mm256_maskz_loadu_epi16(mask, src));
}

#if TSHI_GEMM_BF16S
#define TSHI_GEMM_SHORT_bf16(form, at, second)                                                     \
    tshi_gemm_load_column(TSHI_GEMM_PAIRS, at, (__mmask16)-1, second)
TSHI_GEMM_STREAM(bf16, TSHI_GEMM_TARGET_BF16)
/* Implements tshi_gemm_kernel.stream with AVX512_BF16. */
TSHI_GEMM_TARGET_BF16 static void tshi_gemm_stream_bf16(const tshi_gemm_tile *t, int rows,
                                                        int cols) {
    if (t->form == TSHI_GEMM_PAIRS)
        tshi_gemm_stream_form_bf16(t, rows, cols, TSHI_GEMM_PAIRS);
    else
        tshi_gemm_stream_x86(t, rows, cols);
}
#endif

/* Macros that transpose the 16 x 16 words in r[0] to r[15]. WORDS4 transposes 4 x 4 words within
 * each 128-bit quarter of four registers, QUARTERS4 the quarters of four registers; TRANSPOSE16
 * does both for all registers. */
#define TSHI_GEMM_WORDS4(a, b, c, d)                                                               \
    t0 = _mm512_unpacklo_ps(r[a], r[b]), t1 = _mm512_unpackhi_ps(r[a], r[b]);                      \
    t2 = _mm512_unpacklo_ps(r[c], r[d]), t3 = _mm512_unpackhi_ps(r[c], r[d]);                      \
    r[a] = _mm512_shuffle_ps(t0, t2, 0x44), r[b] = _mm512_shuffle_ps(t0, t2, 0xee);                \
    r[c] = _mm512_shuffle_ps(t1, t3, 0x44), r[d] = _mm512_shuffle_ps(t1, t3, 0xee);
#define TSHI_GEMM_QUARTERS4(a, b, c, d)                                                            \
    t0 = _mm512_shuffle_f32x4(r[a], r[b], 0x44), t1 = _mm512_shuffle_f32x4(r[c], r[d], 0x44);      \
    t2 = _mm512_shuffle_f32x4(r[a], r[b], 0xee), t3 = _mm512_shuffle_f32x4(r[c], r[d], 0xee);      \
    r[a] = _mm512_shuffle_f32x4(t0, t1, 0x88), r[b] = _mm512_shuffle_f32x4(t0, t1, 0xdd);          \
    r[c] = _mm512_shuffle_f32x4(t2, t3, 0x88), r[d] = _mm512_shuffle_f32x4(t2, t3, 0xdd);
#define TSHI_GEMM_TRANSPOSE16                                                                      \
    TSHI_GEMM_WORDS4(0, 1, 2, 3) TSHI_GEMM_WORDS4(4, 5, 6, 7)                                      \
    TSHI_GEMM_WORDS4(8, 9, 10, 11) TSHI_GEMM_WORDS4(12, 13, 14, 15)                                \
    TSHI_GEMM_QUARTERS4(0, 4, 8, 12) TSHI_GEMM_QUARTERS4(1, 5, 9, 13)                              \
    TSHI_GEMM_QUARTERS4(2, 6, 10, 14) TSHI_GEMM_QUARTERS4(3, 7, 11, 15)
#define TSHI_GEMM_EACH16(X)                                                                        \
    X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15)

/* Loads 16 rows, whose elements are contiguous, converted to packed form: 16 words of each, a float
 * or a pair of bf16 per word. Rows from `rows` on do not exist and count as 0. inc: bytes from row
 * to row; left: number of elements that each row has left. */
TSHI_GEMM_TARGET_PACK
TSHI_INLINE void tshi_gemm_load_rows(const tshi_gemm_form form, __m512 *to, const char *src,
                                     int64_t rows, int64_t inc, int64_t left) {
    const uint32_t mask = tshi_gemm_mask(left);
    for (int l = 0; l < 16; l++) {
        const char *row = src + (l < rows ? l * inc : 0);
        to[l] = tshi_gemm_load_row(form, row, l < rows ? mask : 0);
        TSHI_PREFETCH((const void *)((uintptr_t)row + 128));
    }
}

/* Packs `valid` rows of k contiguous elements each. inc: bytes from row to row. */
TSHI_GEMM_TARGET_PACK
static void tshi_gemm_pack_along(tshi_gemm_form form, float *dst, int width, int valid, int64_t k,
                                 const char *src, int64_t inc) {
    const int64_t each = form >= TSHI_GEMM_PAIRS ? 2 : 1; /* elements per word */
    const int64_t size = form == TSHI_GEMM_REALS || form == TSHI_GEMM_ROUNDED ? 4 : 2;
    /* loaded: 16 rows, loaded in a loop, through memory; the shuffles that follow take longer */
    __m512 loaded[16], r[16], t0, t1, t2, t3;
    for (int64_t q = 0; q < k; q += 16 * each, dst += 16 * width) { /* packs 16 words of each row */
        const int64_t words = tshi_gemm_words(form, tshi_base_min(k - q, 16 * each));
        for (int i = 0; i < width; i += 16) { /* packs 16 rows */
            const __mmask16 mask = (__mmask16)tshi_gemm_mask(tshi_base_min(width - i, 16));
            const char *from = src + (i < valid ? i * inc : 0) + q * size;
#define TSHI_GEMM_ROWS(form)                                                                       \
    case form: tshi_gemm_load_rows(form, loaded, from, valid - i, inc, k - q); break;
            switch (form) {
                TSHI_GEMM_ROWS(TSHI_GEMM_REALS)
                TSHI_GEMM_ROWS(TSHI_GEMM_BF16)
                TSHI_GEMM_ROWS(TSHI_GEMM_F16)
                TSHI_GEMM_ROWS(TSHI_GEMM_PAIRS)
                TSHI_GEMM_ROWS(TSHI_GEMM_ROUNDED)
            case TSHI_GEMM_OTHER: return;
            }
#define TSHI_GEMM_LOADED(s) r[s] = loaded[s];
#define TSHI_GEMM_WORD(s)                                                                          \
    if (s < words) _mm512_mask_storeu_ps(dst + s * width + i, mask, r[s]);
            TSHI_GEMM_EACH16(TSHI_GEMM_LOADED)
            TSHI_GEMM_TRANSPOSE16
            TSHI_GEMM_EACH16(TSHI_GEMM_WORD)
        }
    }
}

/* Packs `valid` rows of a matrix whose columns are contiguous (its row stride is 1). ld: bytes from
 * column to column. */
TSHI_GEMM_TARGET_PACK
TSHI_INLINE void tshi_gemm_pack_across(const tshi_gemm_form form, float *dst,
                                                             int width, int valid, int64_t k,
                                                             const char *src, int64_t ld) {
    const int64_t each = form >= TSHI_GEMM_PAIRS ? 2 : 1;
    const int64_t size = form == TSHI_GEMM_REALS || form == TSHI_GEMM_ROUNDED ? 4 : 2;
    for (int64_t q = 0; q < k; q += each, src += each * ld, dst += width)
        for (int i = 0; i < width; i += 16) {
            const __mmask16 mask = (__mmask16)tshi_gemm_mask(tshi_base_min(valid - i, 16));
            const __mmask16 to = (__mmask16)tshi_gemm_mask(tshi_base_min(width - i, 16));
            if (form == TSHI_GEMM_REALS) /* prefetches the row that is packed 8 steps later */
                TSHI_PREFETCH((const void *)((uintptr_t)src + (uintptr_t)(i * size + 8 * ld)));
            _mm512_mask_storeu_ps(dst + i, to,
                                  tshi_gemm_load_column(form, src + i * size, mask,
                                                        q + 1 < k ? ld : 0));
        }
}

/* Implements tshi_gemm_kernel.pack with AVX-512. */
TSHI_GEMM_TARGET_PACK static int tshi_gemm_pack_avx512(float *dst, int width, int valid, int64_t k,
                                                       const tshi_matrix *m, tshi_gemm_form form) {
    const char *src = (const char *)m->data;
    const int64_t size = tshi_dtypes[m->dtype].size;
#define TSHI_GEMM_PACK(form)                                                                       \
    case form:                                                                                     \
        if (m->column == 1)                                                                        \
            tshi_gemm_pack_along(form, dst, width, valid, k, src, m->row * size);                  \
        else                                                                                       \
            tshi_gemm_pack_across(form, dst, width, valid, k, src, m->column * size);              \
        return 1;
    if (m->row != 1 && m->column != 1) return 0;
    switch (form) {
        TSHI_GEMM_PACK(TSHI_GEMM_REALS)
        TSHI_GEMM_PACK(TSHI_GEMM_BF16)
        TSHI_GEMM_PACK(TSHI_GEMM_F16)
        TSHI_GEMM_PACK(TSHI_GEMM_PAIRS)
        TSHI_GEMM_PACK(TSHI_GEMM_ROUNDED)
    case TSHI_GEMM_OTHER: break;
    }
    return 0;
}

/* Implements tshi_gemm_kernel.store with AVX-512. */
TSHI_AVX512 static void tshi_gemm_store_avx512(void *to, const float *from, int n,
                                               tsh_dtype dtype) {
    for (int i = 0; i < n; i += 16) {
        const __mmask16 mask = (__mmask16)tshi_gemm_mask(n - i);
        const __m512 x = _mm512_maskz_loadu_ps(mask, from + i);
        const __m512i rounded = _mm512_srli_epi32(tshi_gemm_round(x), 16);
        _mm256_mask_storeu_epi16((uint16_t *)to + i, mask,
                                 dtype == TSH_F16
                                     ? _mm512_maskz_cvtps_ph(mask, x, _MM_FROUND_TO_NEAREST_INT)
                                     : _mm512_cvtepi32_epi16(rounded));
    }
}
#define TSHI_GEMM_PACK_AVX512  tshi_gemm_pack_avx512
#define TSHI_GEMM_STORE_AVX512 tshi_gemm_store_avx512
#else
#define TSHI_GEMM_PACK_AVX512  NULL
#define TSHI_GEMM_STORE_AVX512 NULL
#endif
