/* ========================================================================== */
/* >>quant-avx2                                  MARK: - quant-avx2 (private) */
/* Kernels of quantised weights with AVX2.                                    */
/* Needs: >>kernel-isa >>quant.                                               */
/* ========================================================================== */

#if TSHI_X86
typedef struct tshi_quant_dword {
    signed char q[4];
} tshi_quant_dword;

static int32_t tshi_quant_four(const signed char *q) { /* returns four bytes as one integer */
    int32_t four;
    memcpy(&four, q, sizeof four);
    return four;
}

/* Transposes 4 x 4 matrices of 32-bit words: one in each 128-bit lane of the four registers z[0] to
 * z[3], which are `bits` wide. */
#define TSHI_QUANT_TRANSPOSE(bits, z)                                                              \
    do {                                                                                           \
        const __m##bits##i t0 = TSHI_QUANT_OP(bits, unpacklo_epi32)((z)[0], (z)[1]);               \
        const __m##bits##i t1 = TSHI_QUANT_OP(bits, unpacklo_epi32)((z)[2], (z)[3]);               \
        const __m##bits##i t2 = TSHI_QUANT_OP(bits, unpackhi_epi32)((z)[0], (z)[1]);               \
        const __m##bits##i t3 = TSHI_QUANT_OP(bits, unpackhi_epi32)((z)[2], (z)[3]);               \
        (z)[0] = TSHI_QUANT_OP(bits, unpacklo_epi64)(t0, t1);                                      \
        (z)[1] = TSHI_QUANT_OP(bits, unpackhi_epi64)(t0, t1);                                      \
        (z)[2] = TSHI_QUANT_OP(bits, unpacklo_epi64)(t2, t3);                                      \
        (z)[3] = TSHI_QUANT_OP(bits, unpackhi_epi64)(t2, t3);                                      \
    } while (0)
#define TSHI_QUANT_OP(bits, name) TSHI_QUANT_OP_##bits(name)
#define TSHI_QUANT_OP_128(name)   _mm_##name
#define TSHI_QUANT_OP_256(name)   _mm256_##name
#define TSHI_QUANT_OP_512(name)   _mm512_##name

#define TSHI_QUANT_32(at)  _mm_cvtsi32_si128(tshi_quant_four((const signed char *)(at)))
#define TSHI_QUANT_128(at) _mm_loadu_si128((const __m128i *)(const void *)(at))
#define TSHI_QUANT_256(at) _mm256_loadu_si256((const __m256i *)(const void *)(at))
#define TSHI_QUANT_TO(at)  ((__m256i *)(void *)(at))

/* Loads the f16 scales (or minima) of one block of each of 8 rows of W, as floats. w: address of
 * the first row's scale; row: bytes from one row to the next. */
TSHI_AVX2 TSHI_INLINE __m256 tshi_quant_scales_avx2(const unsigned char *w, int64_t row) {
    const __m128i s01 = _mm_unpacklo_epi16(TSHI_QUANT_32(w), TSHI_QUANT_32(w + row));
    const __m128i s23 = _mm_unpacklo_epi16(TSHI_QUANT_32(w + 2 * row), TSHI_QUANT_32(w + 3 * row));
    const __m128i s45 = _mm_unpacklo_epi16(TSHI_QUANT_32(w + 4 * row), TSHI_QUANT_32(w + 5 * row));
    const __m128i s67 = _mm_unpacklo_epi16(TSHI_QUANT_32(w + 6 * row), TSHI_QUANT_32(w + 7 * row));
    return _mm256_cvtph_ps(
        _mm_unpacklo_epi64(_mm_unpacklo_epi32(s01, s23), _mm_unpacklo_epi32(s45, s67)));
}

/* Moves from->count blocks of each of 16 rows of W to tiles, 16 bytes of 8 rows at a time. bits: 8
 * or 4 per weight, a constant after inlining. */
TSHI_AVX2 TSHI_UNROLLED void tshi_quant_tiles_avx2(tshi_quant_tile *to,
                                                   const tshi_quant_source *from, const int bits) {
    const __m256i flip = _mm256_set1_epi8(-128), low = _mm256_set1_epi8(15);
    const int size = from->size, has_min = size == TSHI_QUANT_Q4_1;
    const int64_t row = from->row, head = has_min ? 4 : 2;
    uintptr_t ahead = from->ahead;
    for (int b = 0; b < from->count; b++, to++)
        for (int c = 0; c < TSHI_QUANT_COLUMNS; c += 8, ahead += (uintptr_t)(8 * size)) {
            const unsigned char *w = from->w + c * row + b * size;
            for (int i = 0; i < 8 * size; i += 64)
                TSHI_PREFETCH_L2((const void *)(ahead + (uintptr_t)i));
            _mm256_storeu_ps(to->scale + c, tshi_quant_scales_avx2(w, row));
            if (has_min) _mm256_storeu_ps(to->min + c, tshi_quant_scales_avx2(w + 2, row));
            for (int half = 0; half < bits / 4; half++) {
                __m256i z[4];
#define TSHI_QUANT_ROWS(i) /* loads 16 bytes each of rows i and i + 4 of W into z[i] */            \
    z[i] = _mm256_inserti128_si256(                                                                \
        _mm256_castsi128_si256(TSHI_QUANT_128(w + (i)*row + head + 16 * half)),                    \
        TSHI_QUANT_128(w + ((i) + 4) * row + head + 16 * half), 1);
#define TSHI_QUANT_STORE(i)                                                                        \
    if (bits == 8) {                                                                               \
        _mm256_storeu_si256(TSHI_QUANT_TO(to->w[4 * half + i][c]), _mm256_xor_si256(z[i], flip));  \
    } else {                                                                                       \
        _mm256_storeu_si256(TSHI_QUANT_TO(to->w[i][c]), _mm256_and_si256(z[i], low));              \
        _mm256_storeu_si256(TSHI_QUANT_TO(to->w[4 + i][c]),                                        \
                            _mm256_and_si256(_mm256_srli_epi16(z[i], 4), low));                    \
    }
                TSHI_QUANT_ROWS(0) TSHI_QUANT_ROWS(1) TSHI_QUANT_ROWS(2) TSHI_QUANT_ROWS(3)
                TSHI_QUANT_TRANSPOSE(256, z);
                TSHI_QUANT_STORE(0) TSHI_QUANT_STORE(1) TSHI_QUANT_STORE(2) TSHI_QUANT_STORE(3)
            }
        }
}

TSHI_AVX2 static void tshi_quant_move_avx2(tshi_quant_tile *to, const tshi_quant_source *from) {
    if (from->rows < TSHI_QUANT_COLUMNS)
        tshi_quant_move_c(to, from);
    else if (from->size == TSHI_QUANT_Q8)
        tshi_quant_tiles_avx2(to, from, 8);
    else
        tshi_quant_tiles_avx2(to, from, 4);
}

/* Returns sum plus, for each of 8 rows of W, the products w q of four weights w and four elements q
 * of the quantised X. AVX2 multiplies unsigned by signed bytes and adds neighbouring products to 16
 * bits, with saturation. If bits, the bits per weight, is 8, it multiplies |w| by q with w's sign:
 * two products are at most 2 * 128 * 127, and are added as 32 bits. If bits is 4, it multiplies w
 * (TSH_Q4_0: w + 8) by q: two products are at most 2 * 15 * 127, so that 16-bit sums have space for
 * a whole block. magnitude: |w|, read if bits is 8. */
TSHI_AVX2 TSHI_INLINE __m256i tshi_quant_add_avx2(const int bits, __m256i sum, __m256i w,
                                                  __m256i magnitude, __m256i q) {
    if (bits == 4) return _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, q));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude,
                                                                        _mm256_sign_epi8(q, w)),
                                                   _mm256_set1_epi16(1)));
}

/* Returns sum, of 8 columns of Y, plus the result of one block: its integer sums n times the scales
 * of W and x, and, if has_min is 1, the minima of W times x->sum. */
TSHI_AVX2 TSHI_INLINE __m256 tshi_quant_end_avx2(const int bits, __m256 scale, int has_min,
                                                 __m256 min, const tshi_quant_input *x, __m256i n,
                                                 __m256 sum) {
    const __m256 by = _mm256_mul_ps(scale, _mm256_set1_ps(x->scale));
    if (bits == 4)
        n = _mm256_add_epi32(_mm256_madd_epi16(n, _mm256_set1_epi16(1)),
                             _mm256_set1_epi32(x->offset));
    sum = _mm256_add_ps(sum, _mm256_mul_ps(by, _mm256_cvtepi32_ps(n)));
    return has_min ? _mm256_add_ps(sum, _mm256_mul_ps(min, _mm256_set1_ps(x->sum))) : sum;
}

/* Adds the products of 16 rows of W (all their blocks) with one row of X to 16 sums. Reads W as it
 * is stored, without moving it to tiles. */
TSHI_AVX2 TSHI_UNROLLED void tshi_quant_one_avx2(const tshi_quant_source *from, const int bits,
                                                 const tshi_quant_input *x, float *sums) {
    const __m256i low = _mm256_set1_epi8(15);
    const int size = from->size, has_min = size == TSHI_QUANT_Q4_1;
    const int64_t row = from->row, head = has_min ? 4 : 2;
    for (int c = 0; c < TSHI_QUANT_COLUMNS; c += 8) {
        const unsigned char *w = from->w + c * row;
        const tshi_quant_input *y = x;
        uintptr_t ahead = (uintptr_t)w + (uintptr_t)(8 * row); /* to prefetch: W's next 8 rows */
        __m256 sum = _mm256_loadu_ps(sums + c);
        for (int b = 0; b < from->count; b++, w += size, y += TSHI_QUANT_FEW) {
            __m256i n = _mm256_setzero_si256(), z[4];
            for (int i = 0; i < 8 * size; i += 64)
                TSHI_PREFETCH_L2((const void *)(ahead + (uintptr_t)i));
            ahead += (uintptr_t)(8 * size);
            for (int half = 0; half < bits / 4; half++) {
#define TSHI_QUANT_X(i) _mm256_set1_epi32(tshi_quant_four(y->q + 4 * (i)))
#define TSHI_QUANT_ONE(i)                                                                          \
    if (bits == 8) {                                                                               \
        n = tshi_quant_add_avx2(bits, n, z[i], _mm256_abs_epi8(z[i]), TSHI_QUANT_X(4 * half + i)); \
    } else {                                                                                       \
        const __m256i high = _mm256_and_si256(_mm256_srli_epi16(z[i], 4), low);                    \
        n = tshi_quant_add_avx2(bits, n, _mm256_and_si256(z[i], low), low, TSHI_QUANT_X(i));       \
        n = tshi_quant_add_avx2(bits, n, high, low, TSHI_QUANT_X(4 + i));                          \
    }
                TSHI_QUANT_ROWS(0)
                TSHI_QUANT_ROWS(1) TSHI_QUANT_ROWS(2) TSHI_QUANT_ROWS(3)
                    TSHI_QUANT_TRANSPOSE(256, z);
                TSHI_QUANT_ONE(0) TSHI_QUANT_ONE(1) TSHI_QUANT_ONE(2) TSHI_QUANT_ONE(3)
            }
            const __m256 scale = tshi_quant_scales_avx2(w, row);
            const __m256 min = has_min ? tshi_quant_scales_avx2(w + 2, row) : scale;
            sum = tshi_quant_end_avx2(bits, scale, has_min, min, y, n, sum);
        }
        _mm256_storeu_ps(sums + c, sum);
    }
}

/* Adds the products of one tile of W with `rows` (1, 2 or 4) rows of X to `sums`, which has 16
 * columns of Y for each of these rows. */
TSHI_AVX2 TSHI_UNROLLED void tshi_quant_rows_avx2(const tshi_quant_tile *w, const int bits,
                                                  const int rows, const int has_min,
                                                  const tshi_quant_input *x, float *sums,
                                                  int64_t stride) {
    const __m256i flip = _mm256_set1_epi8(bits == 8 ? -128 : 0);
    __m256i n[4], m[4]; /* integer sums per row of X; n: columns 0 to 7 of Y; m: columns 8 to 15 */
#define TSHI_QUANT_EACH4(X) X(0) X(1) X(2) X(3)
#define TSHI_QUANT_BEGIN4(r) n[r] = m[r] = _mm256_setzero_si256();
#define TSHI_QUANT_ADD4(r)                                                                         \
    if (rows > r) {                                                                                \
        const __m256i q = _mm256_set1_epi32(tshi_quant_four(x[r].q + 4 * i));                      \
        n[r] = tshi_quant_add_avx2(bits, n[r], w0, a0, q);                                         \
        m[r] = tshi_quant_add_avx2(bits, m[r], w1, a1, q);                                         \
    }
#define TSHI_QUANT_END4(r)                                                                         \
    if (rows > r) {                                                                                \
        float *const s = sums + r * stride;                                                        \
        _mm256_storeu_ps(s, tshi_quant_end_avx2(bits, _mm256_loadu_ps(w->scale), has_min,          \
                                                _mm256_loadu_ps(w->min), x + r, n[r],              \
                                                _mm256_loadu_ps(s)));                              \
        _mm256_storeu_ps(s + 8, tshi_quant_end_avx2(bits, _mm256_loadu_ps(w->scale + 8), has_min,  \
                                                    _mm256_loadu_ps(w->min + 8), x + r, m[r],      \
                                                    _mm256_loadu_ps(s + 8)));                      \
    }
    TSHI_QUANT_EACH4(TSHI_QUANT_BEGIN4)
    for (int i = 0; i < 8; i++) {
        const __m256i w0 = _mm256_xor_si256(TSHI_QUANT_256(w->w[i][0]), flip);
        const __m256i w1 = _mm256_xor_si256(TSHI_QUANT_256(w->w[i][8]), flip);
        const __m256i a0 = _mm256_abs_epi8(w0), a1 = _mm256_abs_epi8(w1);
        TSHI_QUANT_EACH4(TSHI_QUANT_ADD4)
    }
    TSHI_QUANT_EACH4(TSHI_QUANT_END4)
}

TSHI_AVX2 static void tshi_quant_dot_avx2(const tshi_quant_tile *w, const tshi_quant_source *from,
                                          const tshi_quant_input *x, float *sums, int64_t stride,
                                          int rows) {
    const int has_min = from->size == TSHI_QUANT_Q4_1;
#define TSHI_QUANT_SOME(some) /* takes `some` rows of X at a time, while as many are left */       \
    for (; rows >= some; rows -= some, x += some, sums += some * stride)                           \
        for (int b = 0; b < from->count; b++)                                                      \
            if (from->size == TSHI_QUANT_Q8)                                                       \
                tshi_quant_rows_avx2(w + b, 8, some, 0, x + TSHI_QUANT_FEW * b, sums, stride);     \
            else                                                                                   \
                tshi_quant_rows_avx2(w + b, 4, some, has_min, x + TSHI_QUANT_FEW * b, sums, stride);
    if (!w) { /* w is NULL: there are no tiles, and X has one row */
        if (from->size == TSHI_QUANT_Q8)
            tshi_quant_one_avx2(from, 8, x, sums);
        else
            tshi_quant_one_avx2(from, 4, x, sums);
        return;
    }
    TSHI_QUANT_SOME(4)
    TSHI_QUANT_SOME(2)
    TSHI_QUANT_SOME(1)
}

#endif /* TSHI_X86 */
