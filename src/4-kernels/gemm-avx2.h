/* ========================================================================== */
/* >>gemm-avx2                                    MARK: - gemm-avx2 (private) */
/* Packing and storing matrices of 16-bit elements with AVX2.                 */
/* Needs: >>kernel-isa >>gemm.                                                */
/* ========================================================================== */

#if TSHI_X86 && TSHI_GEMM_FLOAT
/* Loads 4 contiguous words, of 4 bytes, of each of 8 columns of B and transposes them: lane c of
 * y[w] becomes word w of column c. inc: bytes from column to column. */
TSHI_AVX2 TSHI_INLINE void tshi_gemm_few_words(const char *b, int64_t inc, __m256 *y) {
#define TSHI_GEMM_FEW_WORDS(c) /* loads 4 words of columns c and c + 4 */                          \
    _mm256_insertf128_ps(                                                                          \
        _mm256_castps128_ps256(_mm_loadu_ps((const float *)(const void *)(b + (c)*inc))),          \
        _mm_loadu_ps((const float *)(const void *)(b + ((c) + 4) * inc)), 1)
    const __m256 r0 = TSHI_GEMM_FEW_WORDS(0), r1 = TSHI_GEMM_FEW_WORDS(1);
    const __m256 r2 = TSHI_GEMM_FEW_WORDS(2), r3 = TSHI_GEMM_FEW_WORDS(3);
    const __m256 u0 = _mm256_unpacklo_ps(r0, r1), u1 = _mm256_unpackhi_ps(r0, r1);
    const __m256 u2 = _mm256_unpacklo_ps(r2, r3), u3 = _mm256_unpackhi_ps(r2, r3);
    y[0] = _mm256_shuffle_ps(u0, u2, 0x44);
    y[1] = _mm256_shuffle_ps(u0, u2, 0xee);
    y[2] = _mm256_shuffle_ps(u1, u3, 0x44);
    y[3] = _mm256_shuffle_ps(u1, u3, 0xee);
}

/* Converts y, a 4-byte word of each of 8 columns, to floats. A word of bf16 or f16 has two
 * elements: the first ones go to z[0], the second ones to z[1]. Otherwise a word is a float, and
 * z[0] and z[1] are both set to y. */
TSHI_AVX2 TSHI_INLINE void tshi_gemm_few_floats(const tshi_gemm_form form, __m256 y, __m256 *z) {
    __m256i x = _mm256_castps_si256(y);
    z[0] = z[1] = y;
    if (form == TSHI_GEMM_BF16) {
        z[0] = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
        z[1] = _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32((int)0xFFFF0000u)));
    } else if (form == TSHI_GEMM_F16) {
        const __m256i halves = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14,
                                                15, 0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11,
                                                14, 15);
        x = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(x, halves), 0xD8);
        z[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(x));
        z[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1));
    }
}

/* Stores the first n lanes of x, all 8 if n is larger. (_mm256_maskstore_ps is slow on AMD's
 * processors.) */
TSHI_AVX2 TSHI_INLINE void tshi_gemm_put8(float *to, int64_t n, __m256 x) {
    float lanes[8];
    if (n >= 8) {
        _mm256_storeu_ps(to, x);
        return;
    }
    _mm256_storeu_ps(lanes, x);
    for (int64_t i = 0; i < n; i++) to[i] = lanes[i];
}

/* Packs rows of contiguous 16-bit elements, which become floats, 8 elements of 8 rows at a time.
 * inc: bytes from row to row. If width < 8, a step of k still stores 8 floats, of which the next
 * step overwrites those beyond width. */
TSHI_AVX2 static void tshi_gemm_pack_along8(tshi_gemm_form form, float *dst, int width, int valid,
                                            int64_t k, const char *src, int64_t inc) {
    char tail[8][16]; /* copy of a part with fewer than 8 rows or elements, padded with 0 */
    for (int i = 0; i < width; i += 8) {
        const int rows = valid - i < 8 ? valid - i : 8;
        for (int64_t q = 0, n; q < k; q += n) {
            const char *from = src + i * inc + 2 * q;
            int64_t step = inc;
            __m256 y[4], z[8];
            n = tshi_base_min(8, k - q);
            for (int r = 0; r < rows && q % 32 == 0; r++) TSHI_PREFETCH(from + r * inc + 128);
            if (rows < 8 || n < 8) {
                memset(tail, 0, sizeof tail);
                for (int r = 0; r < rows; r++) memcpy(tail[r], from + r * inc, (size_t)(2 * n));
                from = tail[0];
                step = 16;
            }
            tshi_gemm_few_words(from, step, y);
            tshi_gemm_few_floats(form, y[0], z);
            tshi_gemm_few_floats(form, y[1], z + 2);
            tshi_gemm_few_floats(form, y[2], z + 4);
            tshi_gemm_few_floats(form, y[3], z + 6);
            for (int64_t p = 0; p < n; p++) /* stores element q + p of each of 8 rows */
                tshi_gemm_put8(dst + (q + p) * width + i,
                               width < 8 && (k - q - p) * width < 8 ? width : 8, z[p]);
        }
    }
}

/* Packs a matrix of 16-bit elements, which become floats, whose columns are contiguous (its row
 * stride is 1). ld: bytes from column to column. */
TSHI_AVX2 static void tshi_gemm_pack_across8(tshi_gemm_form form, float *dst, int width, int valid,
                                             int64_t k, const char *src, int64_t ld) {
    for (int64_t q = 0; q < k; q++, src += ld, dst += width)
        for (int i = 0; i < width; i += 8) {
            const int64_t left = tshi_base_min(valid - i, 8);
            uint16_t some[8] = {0, 0, 0, 0, 0, 0, 0, 0};
            const void *from = left < 8 ? (const void *)some : (const void *)(src + 2 * i);
            if (left < 8 && left > 0) memcpy(some, src + 2 * i, (size_t)(2 * left));
            const __m128i x = _mm_loadu_si128((const __m128i *)from);
            const __m256i wide = _mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16);
            tshi_gemm_put8(dst + i, width - i, form == TSHI_GEMM_F16 ? _mm256_cvtph_ps(x)
                                                                     : _mm256_castsi256_ps(wide));
        }
}

/* Implements tshi_gemm_kernel.pack with AVX2. */
TSHI_AVX2 static int tshi_gemm_pack_avx2(float *dst, int width, int valid, int64_t k,
                                         const tshi_matrix *m, tshi_gemm_form form) {
    const char *src = (const char *)m->data;
    if (form != TSHI_GEMM_BF16 && form != TSHI_GEMM_F16) return 0;
    if ((m->row != 1 && m->column != 1) || (width > 8 && width % 8)) return 0;
    if (m->column == 1)
        tshi_gemm_pack_along8(form, dst, width, valid, k, src, 2 * m->row);
    else
        tshi_gemm_pack_across8(form, dst, width, valid, k, src, 2 * m->column);
    return 1;
}

/* Implements tshi_gemm_kernel.store with AVX2. */
TSHI_AVX2 static void tshi_gemm_store_avx2(void *to, const float *from, int n, tsh_dtype dtype) {
    for (int i = 0; i < n; i += 8) {
        float some[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        for (int l = i; l < n && n - i < 8; l++) some[l - i] = from[l];
        const __m256 x = _mm256_loadu_ps(n - i < 8 ? some : from + i);
        const __m256i bits = _mm256_castps_si256(x), quiet = _mm256_set1_epi32(0x400000);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
        const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
        const __m256i y = _mm256_srli_epi32(
            _mm256_blendv_epi8(up, _mm256_or_si256(bits, quiet), nan), 16); /* x as bf16 */
        const __m128i half = dtype == TSH_F16 ? _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)
                                              : _mm_packus_epi32(_mm256_castsi256_si128(y),
                                                                 _mm256_extracti128_si256(y, 1));
        uint16_t rest[8];
        _mm_storeu_si128((__m128i *)(void *)(n - i < 8 ? rest : (uint16_t *)to + i), half);
        if (n - i < 8) memcpy((uint16_t *)to + i, rest, (size_t)(n - i) * 2);
    }
}
#define TSHI_GEMM_PACK_AVX2  tshi_gemm_pack_avx2
#define TSHI_GEMM_STORE_AVX2 tshi_gemm_store_avx2
#else
#define TSHI_GEMM_PACK_AVX2  NULL
#define TSHI_GEMM_STORE_AVX2 NULL
#endif
