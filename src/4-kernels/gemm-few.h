/* ========================================================================== */
/* >>gemm-few                                      MARK: - gemm-few (private) */
/* Products A B with few rows of A, which are bound by reading B.             */
/* Needs: >>kernel >>gemm-avx512 >>gemm-avx2.                                 */
/* ========================================================================== */

/* Returns the number of rows to which A, of `rows` rows, is padded when it is packed for
 * tshi_gemm_kernel.few: 1, 4 or 8. */
static int tshi_gemm_few_width(int64_t rows) {
    return rows == 1 ? 1 : rows <= 4 ? 4 : TSHI_GEMM_FEW_ROWS;
}

#if TSHI_X86 && TSHI_GEMM_FLOAT
/* A product A B with few rows of A is bound by reading B, and packing B would double the traffic.
 * Columns of B are contiguous here, so a few words of each of 8 or 16 columns are transposed in
 * registers. Each element is summed in the same order as in a tile. */
#define TSHI_GEMM_EACH8(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#define TSHI_GEMM_FEW_SUM(i)                                                                       \
    if (rows > i) acc[i] = _mm256_fmadd_ps(_mm256_set1_ps(a[i]), y, acc[i]);
/* Computes one step of k: adds the products of A(i, p) = a[i] and y, 8 elements of row p of B, to
 * acc[i], the sums of row i, for every row i. */
TSHI_AVX2 TSHI_INLINE void tshi_gemm_few_step(const int rows, const float *a, __m256 y,
                                              __m256 *acc){TSHI_GEMM_EACH8(TSHI_GEMM_FEW_SUM)}

/* Adds to the sums the products of A and 4 words of each of 8 columns of B. A word has 4 bytes.
 * each: elements of a word, a constant after inlining. inc: bytes from column to column. */
TSHI_AVX2 TSHI_UNROLLED
    void tshi_gemm_few_quad(tshi_gemm_form form, const int each, const int rows, const float *a,
                            const char *b, int64_t inc, __m256 *acc) {
    __m256 y[4], z[2];
    tshi_gemm_few_words(b, inc, y);
#define TSHI_GEMM_FEW_WORD4(w)                                                                     \
    tshi_gemm_few_floats(each == 1 ? TSHI_GEMM_REALS : form, y[w], z);                             \
    tshi_gemm_few_step(rows, a + each * (w)*rows, z[0], acc);                                      \
    if (each == 2) tshi_gemm_few_step(rows, a + (2 * (w) + 1) * rows, z[1], acc);
    TSHI_GEMM_FEW_WORD4(0) TSHI_GEMM_FEW_WORD4(1) TSHI_GEMM_FEW_WORD4(2) TSHI_GEMM_FEW_WORD4(3)
}

/* Begins 8 columns of C, from column `col` on: in each row i, sets out[i] (the elements of C) to D
 * or 0, and acc[i] (the sums of a slice of k) to 0. */
TSHI_AVX2 TSHI_UNROLLED void tshi_gemm_few_begin(const tshi_gemm_tile *t, int col, int valid,
                                                 const int rows, __m256 *acc, __m256 *out) {
#define TSHI_GEMM_FEW_BEGIN8(i)                                                                    \
    acc[i] = out[i] = _mm256_setzero_ps();                                                         \
    if (rows > i && t->add && valid > i) out[i] = _mm256_loadu_ps(t->d + i * t->rsd + col);
    TSHI_GEMM_EACH8(TSHI_GEMM_FEW_BEGIN8)
}

/* Ends a slice of k: in each row i, adds alpha times acc[i], the sums of the slice, to out[i], and
 * sets acc[i] to 0. */
TSHI_AVX2 TSHI_UNROLLED void tshi_gemm_few_slice(const tshi_gemm_tile *t, const int rows,
                                                 __m256 *acc, __m256 *out) {
    const __m256 alpha = _mm256_set1_ps(t->alpha);
#define TSHI_GEMM_FEW_SLICE8(i)                                                                    \
    if (rows > i) {                                                                                \
        out[i] = _mm256_fmadd_ps(alpha, acc[i], out[i]);                                           \
        acc[i] = _mm256_setzero_ps();                                                              \
    }
    TSHI_GEMM_EACH8(TSHI_GEMM_FEW_SLICE8)
}

TSHI_AVX2 TSHI_UNROLLED void tshi_gemm_few_end(const tshi_gemm_tile *t, int col, int valid,
                                               const int rows, const __m256 *out) {
#define TSHI_GEMM_FEW_END8(i)                                                                      \
    if (rows > i && valid > i) _mm256_storeu_ps(t->c + i * t->rsc + col, out[i]);
    TSHI_GEMM_EACH8(TSHI_GEMM_FEW_END8)
}

/* Copies the last n floats of A to to_a, 64 floats, and the last `size` bytes of each of `columns`
 * columns of B to to_b, 16 bytes per column. Pads both with zeros. */
TSHI_OUTLINE void tshi_gemm_few_last(float *to_a, const float *a, int64_t n, char (*to_b)[16],
                                     const char *b, int64_t size, int64_t inc, int columns) {
    memset(to_a, 0, 64 * sizeof *to_a);
    memcpy(to_a, a, (size_t)n * sizeof *a);
    for (int c = 0; c < columns; c++) {
        memset(to_b[c], 0, 16);
        memcpy(to_b[c], b + c * inc, (size_t)size);
    }
}

/* Returns the largest number of groups of 8 columns that are computed side by side if A is packed
 * to a width of `width`: more groups would not fit into registers. */
TSHI_INLINE int tshi_gemm_few_groups(int width) {
    return width == 1 ? 4 : width == 4 ? 2 : 1;
}

/* Computes 8 * groups columns of C, from column `col` on, with A packed to a width of `rows`; only
 * the first `valid` rows exist. Meanwhile it prefetches as many bytes as it reads, at ascending
 * addresses: B's next columns, or, if there are none (last is 1), the matrix that is read after
 * B. each: elements of B per 4 bytes. */
TSHI_AVX2 TSHI_UNROLLED void tshi_gemm_few_columns(const tshi_gemm_tile *t, int col, int last,
                                                   int valid, const int each, const int rows,
                                                   int groups) {
    /* size: bytes of an element of B; step: number of elements in 4 words (16 bytes) of a column */
    const int64_t size = 4 / each, step = 4 * each;
    const int most = tshi_gemm_few_groups(rows);
    int64_t inc = t->csb * size;
    const char *const begin = (const char *)t->b + col * inc;
    /* b[g]: the address at which group g of 8 columns of B is read next */
    const char *b[4] = {NULL, NULL, NULL, NULL};
    uintptr_t ahead = !last     ? (uintptr_t)begin + (uintptr_t)(8 * groups * inc)
                      : t->then ? t->then
                                : (uintptr_t)begin;
    const tshi_gemm_word *a = t->a;
    float a_end[64];
    char b_end[32][16];
    __m256 acc[4][8], out[4][8]; /* [group][row]; acc: sums of a slice of k; out: of all of k */
#define TSHI_GEMM_FEW_GROUPS(X)                                                                    \
    X(0) if (most > 1 && groups > 1) { X(1) } if (most > 2 && groups > 2) { X(2) X(3) }
#define TSHI_GEMM_FEW_D(g)                                                                         \
    tshi_gemm_few_begin(t, col + 8 * g, valid, rows, acc[g], out[g]);                              \
    b[g] = begin + 8 * g * inc;                                                                    \
    /* hides from gcc that b[g] is computed from b[0]: it would address all 32 columns relative to \
     * b[0] and have too few registers for the offsets */                                          \
    __asm__("" : "+r"(b[g]));
#define TSHI_GEMM_FEW_QUAD(g)                                                                      \
    tshi_gemm_few_quad(t->form, each, rows, a, b[g], inc, acc[g]);                                 \
    b[g] += 16;
#define TSHI_GEMM_FEW_LAST(g)  b[g] = b_end[8 * g];
#define TSHI_GEMM_FEW_ALPHA(g) tshi_gemm_few_slice(t, rows, acc[g], out[g]);
#define TSHI_GEMM_FEW_C(g)     tshi_gemm_few_end(t, col + 8 * g, valid, rows, out[g]);
    TSHI_GEMM_FEW_GROUPS(TSHI_GEMM_FEW_D)
    for (int64_t p = 0, left; p < t->k; p += t->slice) {
        left = tshi_base_min(t->slice, t->k - p);
        for (; left > 0; left -= step, a += step * rows) {
            if (left < step) {
                tshi_gemm_few_last(a_end, a, left * rows, b_end, b[0], left * size, inc,
                                   8 * groups);
                a = a_end;
                TSHI_GEMM_FEW_GROUPS(TSHI_GEMM_FEW_LAST)
                inc = 16;
            }
            for (int l = 0; l < 2 * groups; l++, ahead += 64) TSHI_PREFETCH_L2((const void *)ahead);
            TSHI_GEMM_FEW_GROUPS(TSHI_GEMM_FEW_QUAD)
        }
        TSHI_GEMM_FEW_GROUPS(TSHI_GEMM_FEW_ALPHA)
    }
    TSHI_GEMM_FEW_GROUPS(TSHI_GEMM_FEW_C)
}

/* Implements tshi_gemm_kernel.few with AVX2. */
TSHI_AVX2 static void tshi_gemm_few_avx2(const tshi_gemm_tile *t, int rows, int cols) {
    enum { MOST = 24 << 10 }; /* max bytes of columns read side by side: more would be slower */
    const int width = tshi_gemm_few_width(rows);
    /* bytes: size in memory of 8 columns of B */
    const int64_t bytes = 8 * t->csb * (t->form == TSHI_GEMM_REALS ? 4 : 2);
    int groups = tshi_gemm_few_groups(width);
    while (groups > 1 && groups * bytes > MOST) groups /= 2;
#define TSHI_GEMM_FEW_WIDTHS(each)                                                                 \
    if (width == 1)                                                                                \
        tshi_gemm_few_columns(t, j, last, rows, each, 1, groups);                                  \
    else if (width == 4)                                                                           \
        tshi_gemm_few_columns(t, j, last, rows, each, 4, groups);                                  \
    else                                                                                           \
        tshi_gemm_few_columns(t, j, last, rows, each, 8, 1);
    for (int j = 0; j < cols; j += 8 * groups) {
        while (8 * groups > cols - j) groups /= 2;
        const int last = j + 8 * groups >= cols + t->after;
        if (t->form == TSHI_GEMM_REALS) {
            TSHI_GEMM_FEW_WIDTHS(1)
        } else {
            TSHI_GEMM_FEW_WIDTHS(2)
        }
    }
}
#define TSHI_GEMM_FEW_AVX2 tshi_gemm_few_avx2
#else
#define TSHI_GEMM_FEW_AVX2 NULL
#endif

#if TSHI_X86 && TSHI_GEMM_FLOAT
/* A permutation of 16 pairs of 16-bit elements: puts the first elements of all pairs before the
 * second ones. */
static const uint16_t tshi_gemm_few_halves[32] = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20,
                                                  22, 24, 26, 28, 30, 1,  3,  5,  7,  9,  11,
                                                  13, 15, 17, 19, 21, 23, 25, 27, 29, 31};

/* Stores word s (4 bytes) of each of 16 columns of B to `to`: as it is, or, if layout is BF16 and a
 * word is a pair of 16-bit elements, the first elements of the 16 pairs as floats, then the second
 * ones. */
TSHI_AVX512 TSHI_INLINE void tshi_gemm_few_keep(const tshi_gemm_form layout, tshi_gemm_form form,
                                                float *to, const int s, __m512 word) {
    __m512i x = _mm512_castps_si512(word);
    if (layout != TSHI_GEMM_BF16) {
        _mm512_store_ps(to + 16 * s, word);
    } else if (form == TSHI_GEMM_F16) {
        x = _mm512_permutexvar_epi16(_mm512_loadu_si512(tshi_gemm_few_halves), x);
        _mm512_store_ps(to + 32 * s, _mm512_cvtph_ps(_mm512_castsi512_si256(x)));
        _mm512_store_ps(to + 32 * s + 16, _mm512_cvtph_ps(_mm512_extracti64x4_epi64(x, 1)));
    } else {
        _mm512_store_si512(to + 32 * s, _mm512_slli_epi32(x, 16));
        _mm512_store_si512(to + 32 * s + 16,
                           _mm512_and_si512(x, _mm512_set1_epi32((int)0xFFFF0000u)));
    }
}

/* Does part p, of 8, of transposing one cache line of each of 16 columns of B, whose elements are
 * contiguous. Between the parts, the caller adds products to sums: a processor does both at a time.
 * layout: TSHI_GEMM_BF16 if form is BF16 or F16, else form; a constant after inlining. r: the words
 * that the parts share; to: word s of all columns goes to to + 16 s or, if layout is BF16, both of
 * its elements as floats to to + 32 s; inc: bytes from column to column; ahead: address of 16 cache
 * lines to prefetch. */
TSHI_AVX512 TSHI_UNROLLED void tshi_gemm_few_part(const tshi_gemm_form layout, tshi_gemm_form form,
                                                  const int p, __m512 *r, float *to, const char *b,
                                                  int64_t inc, uintptr_t ahead) {
    __m512 t0, t1, t2, t3;
#define TSHI_GEMM_FEW_LOAD(l) /* loads column 4 p + l */                                           \
    r[4 * (p & 3) + l] = _mm512_loadu_ps(b + (4 * p + l) * inc);                                   \
    TSHI_PREFETCH_L2((const void *)(ahead + 256u * (unsigned)p + 64u * l));
#define TSHI_GEMM_FEW_KEEP(l)                                                                      \
    tshi_gemm_few_keep(layout, form, to, 4 * l + p - 4, r[(p & 3) + 4 * l]);
    if (p < 4) {
        TSHI_GEMM_FEW_LOAD(0) TSHI_GEMM_FEW_LOAD(1) TSHI_GEMM_FEW_LOAD(2) TSHI_GEMM_FEW_LOAD(3)
        TSHI_GEMM_WORDS4(4 * (p & 3), 4 * (p & 3) + 1, 4 * (p & 3) + 2, 4 * (p & 3) + 3)
    } else {
        TSHI_GEMM_QUARTERS4((p & 3), (p & 3) + 4, (p & 3) + 8, (p & 3) + 12)
        TSHI_GEMM_FEW_KEEP(0) TSHI_GEMM_FEW_KEEP(1) TSHI_GEMM_FEW_KEEP(2) TSHI_GEMM_FEW_KEEP(3)
    }
}

/* Transposes the first cache line of each of 16 columns of B to `to`: does all 8 parts of
 * tshi_gemm_few_part. inc: bytes from column to column. */
TSHI_AVX512 TSHI_OUTLINE void tshi_gemm_few_first(tshi_gemm_form form, float *to, const char *b,
                                                  int64_t inc) {
    const tshi_gemm_form layout = form == TSHI_GEMM_F16 ? TSHI_GEMM_BF16 : form;
    __m512 r[16];
#define TSHI_GEMM_FEW_FIRST(p) tshi_gemm_few_part(layout, form, p, r, to, b, inc, (uintptr_t)b);
    TSHI_GEMM_EACH8(TSHI_GEMM_FEW_FIRST)
}

/* Transposes the first 8 floats of each of 16 columns of B to `to`; those from index k on count as
 * 0. column: floats from column to column. */
TSHI_AVX512 TSHI_INLINE void tshi_gemm_few_eight(float *to, const float *b, int64_t k,
                                                 int64_t column) {
    const __mmask8 mask = (__mmask8)tshi_gemm_mask(k);
    __m512 r[8], t0, t1, t2, t3;
    for (int l = 0; l < 8; l++) { /* loads columns 0 and 4, 1 and 5, ..., 8 and 12, ... */
        const float *at = b + (l % 4 + l / 4 * 8) * column;
        r[l] = _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_maskz_loadu_ps(mask, at)),
                                  _mm256_maskz_loadu_ps(mask, at + 4 * column), 1);
    }
    TSHI_GEMM_WORDS4(0, 1, 2, 3)
    TSHI_GEMM_WORDS4(4, 5, 6, 7)
    for (int w = 0; w < 4; w++) {
        _mm512_store_ps(to + 16 * w, _mm512_shuffle_f32x4(r[w], r[w + 4], 0x88));
        _mm512_store_ps(to + 16 * (w + 4), _mm512_shuffle_f32x4(r[w], r[w + 4], 0xDD));
    }
}

/* Transposes the last k elements, less than a cache line, of each of 16 columns of B to `to`.
 * column: elements from column to column. */
TSHI_AVX512 TSHI_OUTLINE void tshi_gemm_few_rest(float *to, tshi_gemm_form form, const void *b,
                                                 int64_t k, int64_t column) {
    const tshi_matrix m = tshi_gemm_matrix_of(tshi_kernel_unconst(b), TSH_F16, column, 1);
    if (form != TSHI_GEMM_REALS)
        (void)tshi_gemm_pack_avx512(to, 16, 16, k, &m, form);
    for (int64_t p = 0; form == TSHI_GEMM_REALS && p < k; p += 8)
        tshi_gemm_few_eight(to + 16 * p, (const float *)b + p, k - p, column);
}

#define TSHI_GEMM_FEW_SUM_avx512(sum, x, y) sum = _mm512_fmadd_ps(_mm512_set1_ps(x), y, sum)
/* Adds the products of x, a pair of bf16, and y, 16 pairs, to sum. This is assembly, because gcc 12
 * would broadcast x to all lanes by a separate instruction. */
#define TSHI_GEMM_FEW_SUM_bf16(sum, x, y)                                                          \
    __asm__("vdpbf16ps %1%{1to16%}, %2, %0" : "+v"(sum) : "m"(x), "v"(y))
#define TSHI_GEMM_FEW_ADD(isa, i, x, y) /* adds x[i] y to the sums of row i */                     \
    if (rows > i) TSHI_GEMM_FEW_SUM_##isa(acc[i], (x)[i], y);
#define TSHI_GEMM_FEW_STEP(isa, x, y)                                                              \
    TSHI_GEMM_FEW_ADD(isa, 0, x, y) TSHI_GEMM_FEW_ADD(isa, 1, x, y)                                \
    TSHI_GEMM_FEW_ADD(isa, 2, x, y) TSHI_GEMM_FEW_ADD(isa, 3, x, y)                                \
    TSHI_GEMM_FEW_ADD(isa, 4, x, y) TSHI_GEMM_FEW_ADD(isa, 5, x, y)                                \
    TSHI_GEMM_FEW_ADD(isa, 6, x, y) TSHI_GEMM_FEW_ADD(isa, 7, x, y)
#define TSHI_GEMM_FEW_WORD(isa, s) /* adds the products of A and word s of 16 columns */           \
    {                                                                                              \
        const __m512 y = _mm512_load_ps(now + 16 * (s));                                           \
        TSHI_GEMM_FEW_STEP(isa, a + (s)*rows, y)                                                   \
    }
#define TSHI_GEMM_FEW_PART(isa, p) /* transposes part p; adds products of an eighth of the words */\
    tshi_gemm_few_part(layout, t->form, p, r, next, b, inc, ahead);                                \
    if (layout == TSHI_GEMM_BF16) {                                                                \
        TSHI_GEMM_FEW_WORD(isa, 4 * p)                                                             \
        TSHI_GEMM_FEW_WORD(isa, 4 * p + 1)                                                         \
        TSHI_GEMM_FEW_WORD(isa, 4 * p + 2)                                                         \
        TSHI_GEMM_FEW_WORD(isa, 4 * p + 3)                                                         \
    } else {                                                                                       \
        TSHI_GEMM_FEW_WORD(isa, 2 * p)                                                             \
        TSHI_GEMM_FEW_WORD(isa, 2 * p + 1)                                                         \
    }
#define TSHI_GEMM_FEW_CLEAR(i) acc[i] = zero;
#define TSHI_GEMM_FEW_BEGIN(i) /* begins row i of C: sets out to D or 0 */                         \
    if (rows > i) out[i] = t->add && valid > i ? _mm512_loadu_ps(t->d + i * t->rsd + col) : zero;
#define TSHI_GEMM_FEW_SLICE(i) /* ends a slice of k: adds alpha acc[i] to the sums of row i */     \
    if (rows > i) out[i] = _mm512_fmadd_ps(alpha, acc[i], out[i]);
#define TSHI_GEMM_FEW_END(i) /* stores row i of C */                                               \
    if (rows > i && valid > i) _mm512_storeu_ps(t->c + i * t->rsc + col, out[i]);

/* Defines two functions. tshi_gemm_few_rows_isa computes 16 columns of C, from column col on, with
 * A packed to a width of `rows`, of which `valid` exist; each element is summed in the same order
 * as in a tile. It reads 16 columns of B at the same time, which the hardware prefetchers of
 * processors handle badly. So it prefetches B itself, in the order of memory, and more than 16
 * columns ahead, because the next 16 columns need the first cache line of each of them at once. At
 * the end of B it prefetches the matrix that is read next (t->then). tshi_gemm_few_isa computes
 * `cols` columns and takes any number of rows up to 8. */
#define TSHI_GEMM_FEW_KERNEL(isa, TARGET, ...)                                                     \
    TARGET TSHI_UNROLLED void tshi_gemm_few_rows_##isa(const tshi_gemm_tile *t, int col, int cols, \
                                                       int valid, const tshi_gemm_form layout,     \
                                                       const int rows) {                           \
        const int64_t size = layout == TSHI_GEMM_REALS ? 4 : 2, inc = t->csb * size;               \
        const int64_t each = 64 / size, step = (layout == TSHI_GEMM_PAIRS ? 16 : each) * rows;     \
        const char *b = (const char *)t->b + col * inc;                                            \
        const int64_t more = 8 * inc < TSHI_GEMM_NEAR ? (int64_t)TSHI_GEMM_NEAR                    \
                                                      : tshi_base_min(8 * inc, TSHI_GEMM_AHEAD);   \
        uintptr_t end = (uintptr_t)b + (uintptr_t)((cols + t->after - col) * inc); /* of B */      \
        uintptr_t ahead = /* address of the 1024 bytes that were prefetched last */                \
            (uintptr_t)b + (uintptr_t)(16 * inc + more);                                           \
        const tshi_gemm_word *a = t->a;                                                            \
        const __m512 zero = _mm512_setzero_ps(), alpha = _mm512_set1_ps(t->alpha);                 \
        __m512 acc[8], out[8], r[16]; /* acc: sums of one slice of k; out: of all of k */          \
        __attribute__((aligned(64))) float words[2][16 * 32]; /* 16 cache lines of B transposed */ \
        TSHI_GEMM_EACH8(TSHI_GEMM_FEW_BEGIN)                                                       \
        if (t->k >= each) tshi_gemm_few_first(t->form, words[0], b, inc);                          \
        for (int64_t p = 0, n = 0, left; p < t->k; p += t->slice) {                                \
            TSHI_GEMM_EACH8(TSHI_GEMM_FEW_CLEAR)                                                   \
            left = tshi_base_min(t->slice, t->k - p);                                              \
            for (; left >= each; left -= each, a += step, n++) {                                   \
                const float *const now = words[n & 1];                                             \
                float *const next = words[~n & 1];                                                 \
                b += (n + 2) * each <= t->k ? 64 : 0; /* b stays at its last cache line */         \
                ahead += 1024;                                                                     \
                if (ahead >= end) { /* B ends: goes on with t->then or, if it is 0, with b */      \
                    ahead = t->then ? ahead - end + t->then : (uintptr_t)b;                        \
                    end = (uintptr_t)-1;                                                           \
                }                                                                                  \
                TSHI_GEMM_FEW_PART(isa, 0)                                                         \
                TSHI_GEMM_FEW_PART(isa, 1)                                                         \
                TSHI_GEMM_FEW_PART(isa, 2)                                                         \
                TSHI_GEMM_FEW_PART(isa, 3)                                                         \
                TSHI_GEMM_FEW_PART(isa, 4)                                                         \
                TSHI_GEMM_FEW_PART(isa, 5)                                                         \
                TSHI_GEMM_FEW_PART(isa, 6)                                                         \
                TSHI_GEMM_FEW_PART(isa, 7)                                                         \
            }                                                                                      \
            if (left > 0)                                                                          \
                tshi_gemm_few_rest(words[0], t->form, b + (t->k >= each ? 64 : 0), left, t->csb);  \
            for (int64_t q = 0; q < tshi_gemm_words(layout, left); q++, a += rows) {               \
                const __m512 y = _mm512_load_ps(words[0] + 16 * q);                                \
                TSHI_GEMM_FEW_STEP(isa, a, y)                                                      \
            }                                                                                      \
            TSHI_GEMM_EACH8(TSHI_GEMM_FEW_SLICE)                                                   \
        }                                                                                          \
        TSHI_GEMM_EACH8(TSHI_GEMM_FEW_END)                                                         \
    }                                                                                              \
    TARGET static void tshi_gemm_few_##isa(const tshi_gemm_tile *t, int rows, int cols) {          \
        const int width = tshi_gemm_few_width(rows);                                               \
        for (int j = 0; j < cols; j += 16) {                                                       \
            switch (t->form) { __VA_ARGS__ }                                                       \
        }                                                                                          \
    }
#define TSHI_GEMM_FEW_CASE(isa, layout)                                                            \
    case layout:                                                                                   \
        if (width == 1)                                                                            \
            tshi_gemm_few_rows_##isa(t, j, cols, rows, layout, 1);                                 \
        else if (width == 4)                                                                       \
            tshi_gemm_few_rows_##isa(t, j, cols, rows, layout, 4);                                 \
        else                                                                                       \
            tshi_gemm_few_rows_##isa(t, j, cols, rows, layout, 8);                                 \
        break;

TSHI_GEMM_FEW_KERNEL(avx512, TSHI_AVX512,
                     TSHI_GEMM_FEW_CASE(avx512, TSHI_GEMM_REALS)
                     case TSHI_GEMM_F16:
                     TSHI_GEMM_FEW_CASE(avx512, TSHI_GEMM_BF16) default
                     : return;)
#define TSHI_GEMM_FEW_AVX512 tshi_gemm_few_avx512
#else
#define TSHI_GEMM_FEW_AVX512 NULL
#endif
#if TSHI_GEMM_BF16S
TSHI_GEMM_FEW_KERNEL(bf16, TSHI_GEMM_TARGET_BF16,
                     TSHI_GEMM_FEW_CASE(bf16, TSHI_GEMM_PAIRS) default : tshi_gemm_few_avx512(
                         t, rows, cols);
                     return;)
#endif
