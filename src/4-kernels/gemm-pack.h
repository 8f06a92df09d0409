/* ========================================================================== */
/* >>gemm-pack                                    MARK: - gemm-pack (private) */
/* Packing parts of A and B for micro-kernels: portable, SSE, any dtype.      */
/* Needs: >>gemm.                                                             */
/* ========================================================================== */

/* Packs k steps of lanes `from` to valid - 1 of A or B: dst[p * width + i] = src[i * inc + p * ld],
 * and 0 for valid <= i < width. A lane i is a row of A or a column of B; a step p is an index of k.
 * If from is 0, this is the reference that tshi_gemm_pack is tested against. */
static void tshi_gemm_pack_lanes(tsh_real *TSHI_RESTRICT dst, int width, int from, int valid,
                                 int64_t k, const tsh_real *TSHI_RESTRICT src, int64_t inc,
                                 int64_t ld) {
    for (int64_t p = 0; p < k; p++) {
        for (int i = from; i < valid; i++) dst[p * width + i] = src[i * inc + p * ld];
        for (int i = valid; i < width; i++) dst[p * width + i] = 0;
    }
}

#if TSHI_X86 && TSHI_GEMM_FLOAT
/* The next three functions use SSE, which every x86-64 has: packing is bound by memory, so wider
 * registers would not help. */

/* Packs 4 steps of k of `lanes` rows of A (or columns of B) whose elements of one step are
 * contiguous in src. ld: floats from step to step. more: 1 to prefetch steps 8 to 11. */
TSHI_INLINE void tshi_gemm_pack_rows(float *TSHI_RESTRICT dst, int width, int lanes,
                                     const float *TSHI_RESTRICT src, int64_t ld, int more) {
    for (int i = 0; i < lanes; i += 4) {
        for (int p = 0; p < 4 && more && i % 16 == 0; p++) TSHI_PREFETCH(src + (p + 8) * ld + i);
        for (int p = 0; p < 4; p++)
            _mm_storeu_ps(dst + p * width + i, _mm_loadu_ps(src + p * ld + i));
    }
}

/* Packs up to 16 steps of k, a cache line from each of `lanes` rows of A (or columns of B), by
 * transposing 4 x 4 values. inc: floats from row to row. more: 1 to prefetch the cache line after
 * the next. */
TSHI_INLINE void tshi_gemm_pack_columns(float *TSHI_RESTRICT dst, int width, int lanes,
                                        int64_t steps, const float *TSHI_RESTRICT src, int64_t inc,
                                        int more) {
    for (int i = 0; i < lanes; i += 4) {
        for (int l = 0; l < 4 && more; l++) TSHI_PREFETCH(src + (i + l) * inc + 32);
        for (int64_t p = 0; p < steps; p += 4) {
            const float *s = src + i * inc + p;
            float *d = dst + p * width + i;
            __m128 r0 = _mm_loadu_ps(s), r1 = _mm_loadu_ps(s + inc);
            __m128 r2 = _mm_loadu_ps(s + 2 * inc), r3 = _mm_loadu_ps(s + 3 * inc);
            _MM_TRANSPOSE4_PS(r0, r1, r2, r3);
            _mm_storeu_ps(d, r0);
            _mm_storeu_ps(d + width, r1);
            _mm_storeu_ps(d + 2 * width, r2);
            _mm_storeu_ps(d + 3 * width, r3);
        }
    }
}

/* Packs a sliver, `valid` rows of A or columns of B: dst[p * width + i] = src[i * inc + p * ld] if
 * i < valid, else 0, for p < k, i < width. i: row of A or column of B; p: index of k. */
TSHI_OUTLINE void tshi_gemm_pack(float *TSHI_RESTRICT dst, int width, int valid, int64_t k,
                           const float *TSHI_RESTRICT src, int64_t inc, int64_t ld) {
    const int lanes = inc == 1 || ld == 1 ? valid & ~3 : 0;
    const int64_t steps = lanes > 0 ? k & ~(int64_t)3 : 0, block = inc == 1 ? 4 : 16;
    for (int64_t q = 0; q < steps; q += block) {
        const int64_t end = tshi_base_min(q + block, steps);
        if (inc == 1) /* the elements of one index of k are contiguous */
            tshi_gemm_pack_rows(dst + q * width, width, lanes, src + q * ld, ld, q + 12 <= k);
        else /* the elements of a row of A, or a column of B, are contiguous */
            tshi_gemm_pack_columns(dst + q * width, width, lanes, end - q, src + q, inc,
                                   q + 32 < k);
        if (lanes < width) /* packs the rows or columns that are left, and zeros */
            tshi_gemm_pack_lanes(dst + q * width, width, lanes, valid, end - q, src + q * ld, inc,
                                 ld);
    }
    if (steps < k) /* packs the last elements along k */
        tshi_gemm_pack_lanes(dst + steps * width, width, 0, valid, k - steps, src + steps * ld, inc,
                             ld);
}
#else
TSHI_OUTLINE void tshi_gemm_pack(tsh_real *TSHI_RESTRICT dst, int width, int valid, int64_t k,
                           const tsh_real *TSHI_RESTRICT src, int64_t inc, int64_t ld) {
    tshi_gemm_pack_lanes(dst, width, 0, valid, k, src, inc, ld);
}
#endif

/* Returns how many words a row of k elements takes when packed. A word has the size of tsh_real and
 * holds one element or a pair of bf16. */
static int64_t tshi_gemm_words(tshi_gemm_form form, int64_t k) {
    return form >= TSHI_GEMM_PAIRS ? (k + 1) / 2 : k;
}

/* Packs the first `valid` rows of m as pairs of bf16: dst[p * width + i] has elements (i, 2p) and
 * (i, 2p + 1) of m, and 0 for those that do not exist. */
static void tshi_gemm_pack_pairs(tsh_real *dst, int width, int valid, int64_t k,
                                 const tshi_matrix *m) {
    const int64_t size = tshi_dtypes[m->dtype].size;
    for (int64_t p = 0; p < k; p += 2, dst += width)
        for (int i = 0; i < width; i++) {
            const char *from = (const char *)m->data + (i * m->row + p * m->column) * size;
            const int count = i >= valid ? 0 : p + 1 < k ? 2 : 1; /* elements that m has, 0 to 2 */
            tsh_real pair[2] = {0, 0};
            uint32_t word;
            tshi_dtypes[m->dtype].load(from, m->column, count, pair);
            word = tshi_dtype_to_bf16(pair[0]) | (uint32_t)tshi_dtype_to_bf16(pair[1]) << 16;
            memcpy(dst + i, &word, sizeof word);
        }
}

/* Packs the first `valid` rows of m, each k elements long, as a sliver of `width` rows, the others
 * of which are 0. Elements that are not tsh_real are converted: STEPS columns at a time if rows are
 * contiguous, else one column at a time. */
static void tshi_gemm_pack_matrix(const tshi_gemm_kernel *kernel, tsh_real *dst, int width,
                                  int valid, int64_t k, tshi_matrix m, tshi_gemm_form form) {
    enum { STEPS = 64, ROWS = 32 };
    const tshi_dtype *dtype = &tshi_dtypes[m.dtype];
    tsh_real rows[ROWS * STEPS]; /* rows converted to tsh_real; a sliver has at most ROWS */
    if (kernel->pack && kernel->pack(dst, width, valid, k, &m, form)) return;
    if (form == TSHI_GEMM_REALS) /* the elements are tsh_real already */
        tshi_gemm_pack(dst, width, valid, k, (const tsh_real *)m.data, m.row, m.column);
    else if (form >= TSHI_GEMM_PAIRS)
        tshi_gemm_pack_pairs(dst, width, valid, k, &m);
    else if (m.column == 1)
        for (int64_t p = 0; p < k; p += STEPS) {
            const int64_t steps = tshi_base_min(STEPS, k - p);
            for (int i = 0; i < valid; i++)
                dtype->load(tshi_gemm_from(m, i, p).data, 1, steps, rows + i * STEPS);
            tshi_gemm_pack(dst + p * width, width, valid, steps, rows, STEPS, 1);
        }
    else
        for (int64_t p = 0; p < k; p++, dst += width) {
            dtype->load(tshi_gemm_from(m, 0, p).data, m.row, valid, dst);
            for (int i = valid; i < width; i++) dst[i] = 0; /* pads with rows of zeros */
        }
}
