/* ========================================================================== */
/* >>quant-vnni                                  MARK: - quant-vnni (private) */
/* Kernels of quantised weights with AVX-512 and VNNI.                        */
/* Needs: >>gemm >>quant-avx2.                                                */
/* ========================================================================== */

#if TSHI_X86
#define TSHI_QUANT_VNNI                                                                            \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")))

#define TSHI_QUANT_SCALE(c)  tshi_quant_two(w + (c) * row)
static short tshi_quant_two(const unsigned char *scale) {
    short two;
    memcpy(&two, scale, sizeof two);
    return two;
}

/* Loads the f16 scales (or minima) of one block of each of 16 rows of W, as floats. w: address of
 * the first row's scale; row: bytes from one row to the next. */
TSHI_QUANT_VNNI TSHI_INLINE __m512 tshi_quant_scales(const unsigned char *w, int64_t row) {
    __m128i low = _mm_cvtsi32_si128((unsigned short)TSHI_QUANT_SCALE(0));
    __m128i high = _mm_cvtsi32_si128((unsigned short)TSHI_QUANT_SCALE(8));
#define TSHI_QUANT_NEXT(c)                                                                         \
    low = _mm_insert_epi16(low, TSHI_QUANT_SCALE(c), c);                                           \
    high = _mm_insert_epi16(high, TSHI_QUANT_SCALE(8 + (c)), c);
    TSHI_QUANT_NEXT(1) TSHI_QUANT_NEXT(2) TSHI_QUANT_NEXT(3) TSHI_QUANT_NEXT(4) TSHI_QUANT_NEXT(5)
    TSHI_QUANT_NEXT(6) TSHI_QUANT_NEXT(7)
    return _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1));
}

/* Moving one block of each of 16 rows of W to a tile has 8 parts; this function does part p, from 0
 * to 7. Between the parts, the caller adds products to sums: a processor does both at a time. z:
 * registers that the parts share. bits: bits per weight. If it is 8, z[i], i < 4, is loaded with
 * the blocks of rows i and i + 4 (32 bytes each); transposing z[0] to z[3], rows 0 to 7, leaves in
 * z[i] the dwords i and i + 4 of rows 0 to 3, then of rows 4 to 7. z[4] to z[7] do the same for
 * rows 8 to 15. If bits is 4, z[i] is loaded with the blocks of rows i, 4 + i, 8 + i and 12 + i (16
 * bytes each). */
TSHI_QUANT_VNNI TSHI_UNROLLED void tshi_quant_part(const int bits, const int p, const int has_min,
                                                   __m512i *z, tshi_quant_tile *to,
                                                   const unsigned char *w, int64_t row) {
    const __m512i flip = _mm512_set1_epi8(-128), low = _mm512_set1_epi8(15);
    const int head = has_min ? 4 : 2;
#define TSHI_QUANT_LOAD_8(i)                                                                       \
    z[i] = _mm512_inserti64x4(                                                                     \
        _mm512_castsi256_si512(TSHI_QUANT_256(w + ((i) < 4 ? (i) : (i) + 4) * row + 2)),           \
        TSHI_QUANT_256(w + ((i) < 4 ? (i) + 4 : (i) + 8) * row + 2), 1);
#define TSHI_QUANT_KEEP_8(i)                                                                       \
    _mm512_store_si512(to->w[i],                                                                   \
                       _mm512_xor_si512(_mm512_shuffle_i32x4(z[i], z[(i) + 4], 0x88), flip));      \
    _mm512_store_si512(to->w[(i) + 4],                                                             \
                       _mm512_xor_si512(_mm512_shuffle_i32x4(z[i], z[(i) + 4], 0xDD), flip));
#define TSHI_QUANT_LOAD_4(i)                                                                       \
    z[i] = _mm512_castsi128_si512(TSHI_QUANT_128(w + (i)*row + head));                             \
    z[i] = _mm512_inserti32x4(z[i], TSHI_QUANT_128(w + ((i) + 4) * row + head), 1);                \
    z[i] = _mm512_inserti32x4(z[i], TSHI_QUANT_128(w + ((i) + 8) * row + head), 2);                \
    z[i] = _mm512_inserti32x4(z[i], TSHI_QUANT_128(w + ((i) + 12) * row + head), 3);
#define TSHI_QUANT_KEEP_4(i)                                                                       \
    _mm512_store_si512(to->w[i], _mm512_and_si512(z[i], low));                                     \
    _mm512_store_si512(to->w[(i) + 4], _mm512_and_si512(_mm512_srli_epi16(z[i], 4), low));
    if (p == 7) {
        _mm512_store_ps(to->scale, tshi_quant_scales(w, row));
        if (has_min) _mm512_store_ps(to->min, tshi_quant_scales(w + 2, row));
    } else if (bits == 8) {
        if (p == 0) { TSHI_QUANT_LOAD_8(0) TSHI_QUANT_LOAD_8(1) }
        if (p == 1) { TSHI_QUANT_LOAD_8(2) TSHI_QUANT_LOAD_8(3) }
        if (p == 2) TSHI_QUANT_TRANSPOSE(512, z);
        if (p == 3) { TSHI_QUANT_LOAD_8(4) TSHI_QUANT_LOAD_8(5) }
        if (p == 4) { TSHI_QUANT_LOAD_8(6) TSHI_QUANT_LOAD_8(7) }
        if (p == 5) TSHI_QUANT_TRANSPOSE(512, z + 4);
        if (p == 6) {
            TSHI_QUANT_KEEP_8(0) TSHI_QUANT_KEEP_8(1) TSHI_QUANT_KEEP_8(2) TSHI_QUANT_KEEP_8(3)
        }
    } else {
        if (p == 0) { TSHI_QUANT_LOAD_4(0) }
        if (p == 1) { TSHI_QUANT_LOAD_4(1) }
        if (p == 2) { TSHI_QUANT_LOAD_4(2) }
        if (p == 3) { TSHI_QUANT_LOAD_4(3) }
        if (p == 4) TSHI_QUANT_TRANSPOSE(512, z);
        if (p == 5) { TSHI_QUANT_KEEP_4(0) TSHI_QUANT_KEEP_4(1) }
        if (p == 6) { TSHI_QUANT_KEEP_4(2) TSHI_QUANT_KEEP_4(3) }
    }
}

#define TSHI_QUANT_EACH(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#define TSHI_QUANT_MOVE(p) tshi_quant_part(bits, p, has_min, z, to, w, from->row);

TSHI_QUANT_VNNI TSHI_UNROLLED void tshi_quant_tiles(tshi_quant_tile *to,
                                                    const tshi_quant_source *from, const int bits) {
    const int size = from->size, has_min = size == TSHI_QUANT_Q4_1;
    const unsigned char *w = from->w;
    __m512i z[8];
    for (int b = 0; b < from->count; b++, to++, w += size) {
        TSHI_QUANT_EACH(TSHI_QUANT_MOVE)
    }
}

#if TSHI_GEMM_FLOAT
/* Implements tshi_quant_kernel.input, to the same bits as tshi_quant_block: numbers are rounded to
 * nearest, ties to even, and q is 0 for NaN. */
TSHI_QUANT_VNNI static void tshi_quant_block_vnni(const float *x, int32_t offset,
                                                  tshi_quant_input *to) {
    const __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
    const __m512i size = _mm512_max_epi32(_mm512_castps_si512(_mm512_abs_ps(a)),
                                          _mm512_castps_si512(_mm512_abs_ps(b)));
    const float scale = tshi_dtype_float_of((uint32_t)_mm512_reduce_max_epi32(size)) / 127;
    const __m512 inverse = _mm512_set1_ps(scale > FLT_MIN ? 1 / scale : 0);
    const __m128i low = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(a, inverse)));
    const __m128i high = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(b, inverse)));
    const __m128i one = _mm_set1_epi8(1);
    __m128i sums = _mm_dpbusd_epi32(_mm_setzero_si128(), one, low);
    sums = _mm_dpbusd_epi32(sums, one, high);
    sums = _mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0x4E));
    sums = _mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0xB1));
    _mm_storeu_si128((__m128i *)(void *)to->q, low);
    _mm_storeu_si128((__m128i *)(void *)(to->q + 16), high);
    to->scale = scale;
    to->offset = -offset * _mm_cvtsi128_si32(sums);
    to->sum = scale * (float)_mm_cvtsi128_si32(sums);
}
#define TSHI_QUANT_INPUT_VNNI tshi_quant_block_vnni
#else
#define TSHI_QUANT_INPUT_VNNI tshi_quant_block
#endif

TSHI_QUANT_VNNI static void tshi_quant_move_vnni(tshi_quant_tile *to,
                                                 const tshi_quant_source *from) {
    if (from->rows < TSHI_QUANT_COLUMNS)
        tshi_quant_move_c(to, from);
    else if (from->size == TSHI_QUANT_Q8)
        tshi_quant_tiles(to, from, 8);
    else
        tshi_quant_tiles(to, from, 4);
}

#define TSHI_QUANT_SUMS(i)                                                                         \
    s[i] = rows > i ? _mm512_loadu_ps(sums + i * stride) : _mm512_setzero_ps();
#define TSHI_QUANT_BEGIN(i)                                                                        \
    if (width > i) n[i] = _mm512_set1_epi32(x[i].offset);
/* Adds to n[i] the products of w4, four weights of each of 16 rows of W, and four elements of row i
 * of X. This is assembly, because gcc 12 would broadcast the four elements to all lanes by a
 * separate instruction. */
#define TSHI_QUANT_ADD(i)                                                                          \
    if (width > i)                                                                                 \
        __asm__("vpdpbusd %1%{1to16%}, %2, %0"                                                     \
                : "+v"(n[i])                                                                       \
                : "m"(*(const tshi_quant_dword *)(const void *)(x[i].q + 4 * k)), "v"(w4));
#define TSHI_QUANT_STEP(step)                                                                      \
    {                                                                                              \
        const int k = step;                                                                        \
        const __m512i w4 = _mm512_load_si512(now->w[k]);                                           \
        if (bits) tshi_quant_part(bits, k, has_min, z, two + (~b & 1), w, from->row);              \
        TSHI_QUANT_EACH(TSHI_QUANT_ADD)                                                            \
    }
#define TSHI_QUANT_END(i)                                                                          \
    if (width > i)                                                                                 \
        s[i] = _mm512_add_ps(s[i],                                                                 \
                             _mm512_mul_ps(_mm512_mul_ps(scale, _mm512_set1_ps(x[i].scale)),       \
                                           _mm512_cvtepi32_ps(n[i])));                             \
    if (width > i && has_min)                                                                      \
        s[i] = _mm512_add_ps(s[i], _mm512_mul_ps(min, _mm512_set1_ps(x[i].sum)));
#define TSHI_QUANT_PUT(i)                                                                          \
    if (rows > i) _mm512_storeu_ps(sums + i * stride, s[i]);

/* Adds products of 16 rows of W with `rows` rows of X to `sums`, as a tshi_quant_dot_fn does. bits:
 * bits per weight of from->w, 8 or 4; 0: reads W from `tile` instead. width: number of rows that
 * are computed, 1, 4 or 8, at least `rows`. bits and width are constants after inlining. */
TSHI_QUANT_VNNI TSHI_UNROLLED void tshi_quant_rows_vnni(const tshi_quant_tile *tile,
                                                        const tshi_quant_source *from,
                                                        const tshi_quant_input *x, float *sums,
                                                        int64_t stride, int rows, const int bits,
                                                        const int width) {
    const unsigned char *w = from->w;
    tshi_quant_source first = *from; /* `from`, but with its first block only */
    const int size = from->size, has_min = size == TSHI_QUANT_Q4_1;
    uintptr_t ahead = from->ahead;
    /* one tile is multiplied while the next block is moved to the other */
    __attribute__((aligned(64))) tshi_quant_tile two[2];
    __m512i z[8];
    __m512 s[8];
    TSHI_QUANT_EACH(TSHI_QUANT_SUMS)
    first.count = 1;
    if (bits) tshi_quant_move_vnni(two, &first);
    for (int b = 0; b < from->count; b++, x += TSHI_QUANT_FEW) {
        const tshi_quant_tile *now = bits ? two + (b & 1) : tile + b;
        const __m512 scale = _mm512_load_ps(now->scale);
        const __m512 min = has_min ? _mm512_load_ps(now->min) : scale;
        __m512i n[8];
        for (int i = 0; bits && i < TSHI_QUANT_COLUMNS * size; i += 64)
            TSHI_PREFETCH_L2((const void *)(ahead + (uintptr_t)i));
        w += b + 1 < from->count ? size : 0; /* after the last block: moves it again */
        TSHI_QUANT_EACH(TSHI_QUANT_BEGIN)
        TSHI_QUANT_STEP(0) TSHI_QUANT_STEP(1) TSHI_QUANT_STEP(2) TSHI_QUANT_STEP(3)
        TSHI_QUANT_STEP(4) TSHI_QUANT_STEP(5) TSHI_QUANT_STEP(6) TSHI_QUANT_STEP(7)
        TSHI_QUANT_EACH(TSHI_QUANT_END)
        ahead += (uintptr_t)(TSHI_QUANT_COLUMNS * size);
    }
    TSHI_QUANT_EACH(TSHI_QUANT_PUT)
}

TSHI_QUANT_VNNI static void tshi_quant_dot_vnni(const tshi_quant_tile *w,
                                                const tshi_quant_source *from,
                                                const tshi_quant_input *x, float *sums,
                                                int64_t stride, int rows) {
#define TSHI_QUANT_WIDTHS(bits)                                                                    \
    if (rows == 1)                                                                                 \
        tshi_quant_rows_vnni(w, from, x, sums, stride, rows, bits, 1);                             \
    else if (rows <= 4)                                                                            \
        tshi_quant_rows_vnni(w, from, x, sums, stride, rows, bits, 4);                             \
    else                                                                                           \
        tshi_quant_rows_vnni(w, from, x, sums, stride, rows, bits, 8);
    if (w)
        tshi_quant_rows_vnni(w, from, x, sums, stride, rows, 0, 8);
    else if (from->size == TSHI_QUANT_Q8) {
        TSHI_QUANT_WIDTHS(8)
    } else {
        TSHI_QUANT_WIDTHS(4)
    }
}
#undef TSHI_QUANT_WIDTHS
#undef TSHI_QUANT_END
#undef TSHI_QUANT_STEP
#undef TSHI_QUANT_MOVE
#undef TSHI_QUANT_KEEP_4
#undef TSHI_QUANT_LOAD_4
#undef TSHI_QUANT_KEEP_8
#undef TSHI_QUANT_LOAD_8
#undef TSHI_QUANT_BEGIN
#undef TSHI_QUANT_EACH
#undef TSHI_QUANT_PUT
#undef TSHI_QUANT_SUMS
#undef TSHI_QUANT_ADD
#undef TSHI_QUANT_NEXT
#undef TSHI_QUANT_SCALE
#undef TSHI_QUANT_TO
#undef TSHI_QUANT_256
#undef TSHI_QUANT_128
#undef TSHI_QUANT_OP_512
#undef TSHI_QUANT_OP_256
#undef TSHI_QUANT_32
#undef TSHI_QUANT_ROWS
#undef TSHI_QUANT_STORE
#undef TSHI_QUANT_EACH4
#undef TSHI_QUANT_BEGIN4
#undef TSHI_QUANT_ADD4
#undef TSHI_QUANT_END4
#undef TSHI_QUANT_SOME
#undef TSHI_QUANT_X
#undef TSHI_QUANT_ONE
#undef TSHI_QUANT_OP_128
#undef TSHI_QUANT_OP
#undef TSHI_QUANT_TRANSPOSE
#undef TSHI_QUANT_VNNI
#endif /* TSHI_X86 */
