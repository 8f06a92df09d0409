/* ========================================================================== */
/* >>gemm-vector                                MARK: - gemm-vector (private) */
/* Vector micro-kernels of the product, one source for all instruction sets.  */
/* Needs: >>kernel-isa >>gemm.                                                */
/* ========================================================================== */

#if TSHI_VECTORS

/* Micro-kernels, one source for all instruction sets. Each instruction set `isa` defines macros
 * TSHI_GEMM_<name>_<isa>: VEC (type of a register), LOAD, STORE, SET (one value in all lanes), FMA
 * (x * y + z), and SUM, which adds one step of k to the sums: FMA, or the two products of a pair.
 * Rows are unrolled by hand, so that their sums are registers at every level of optimisation:
 * X(isa, i, g) is the code for row i, which is in group g = i / 3. A's row i is read at its group's
 * pointer (a0 to a3) plus 0, 1 or 2 row strides: one operand on x86. */
#define TSHI_GEMM_ROWS6(X, isa)                                                                    \
    X(isa, 0, 0) X(isa, 1, 0) X(isa, 2, 0) X(isa, 3, 1) X(isa, 4, 1) X(isa, 5, 1)
#define TSHI_GEMM_ROWS12(X, isa)                                                                   \
    TSHI_GEMM_ROWS6(X, isa)                                                                        \
    X(isa, 6, 2) X(isa, 7, 2) X(isa, 8, 2) X(isa, 9, 3) X(isa, 10, 3) X(isa, 11, 3)

/* Prefetches the next cache line of a tshi_gemm_walk and advances the walk by one line. */
TSHI_INLINE void tshi_gemm_fetch(tshi_gemm_walk *w) {
    TSHI_PREFETCH(w->at);
    if (w->at != w->last) /* this pass has more lines */
        w->at += w->step;
    else if (w->left > 0) { /* begins the next pass */
        w->left--;
        w->at = w->first += w->along;
        w->last += w->along;
    }
}

#define TSHI_GEMM_ZERO(isa, i, g) c0[i] = c1[i] = zero; /* clears the sums of row i */
#define TSHI_GEMM_STEP(isa, i, g) /* adds A(i, p) B(p, j) to the sums of row i */                  \
    if (rows > i) {                                                                                \
        x = TSHI_GEMM_SET_##isa(a##g[(i - 3 * g) * rsa]); /* A(i, p) in all lanes */               \
        c0[i] = TSHI_GEMM_SUM_##isa(x, b0, c0[i]);                                                 \
        if (vecs > 1) c1[i] = TSHI_GEMM_SUM_##isa(x, b1, c1[i]);                                   \
    }
#define TSHI_GEMM_PUT(isa, c, d, v) /* stores one register of C: alpha v + D */                    \
    TSHI_GEMM_STORE_##isa(c, TSHI_GEMM_FMA_##isa(alpha, v, add ? TSHI_GEMM_LOAD_##isa(d) : zero));
#define TSHI_GEMM_OUT(isa, i, g) /* stores row i of the tile */                                    \
    if (rows > i) {                                                                                \
        TSHI_GEMM_PUT(isa, to + i * rsc, d + i * rsd, c0[i])                                       \
        if (vecs > 1) {                                                                            \
            TSHI_GEMM_PUT(isa, to + i * rsc + lanes, d + i * rsd + lanes, c1[i])                   \
        }                                                                                          \
    }

/* Defines two functions. tshi_gemm_rows_isa computes a tile of `rows` rows of `vecs` registers;
 * both are constants after inlining. tshi_gemm_tile_isa computes a tile of any number of rows up to
 * mr: mr at once, or parts of 8, 4, 2 and 1 rows. */
#define TSHI_GEMM_KERNEL(isa, TARGET, ROWS, mr)                                                    \
    TARGET TSHI_UNROLLED void tshi_gemm_rows_##isa(const tshi_gemm_tile *t, const int rows,        \
                                                   const int vecs) {                               \
        const int lanes = (int)(sizeof(TSHI_GEMM_VEC_##isa) / sizeof(tsh_real));                   \
        const int64_t rsa = t->rsa, csa = t->csa;                                                  \
        const tshi_gemm_word *a0 = t->a, *a1 = rows > 3 ? a0 + 3 * rsa : a0;                       \
        const tshi_gemm_word *a2 = rows > 6 ? a0 + 6 * rsa : a0;                                   \
        const tshi_gemm_word *a3 = rows > 9 ? a0 + 9 * rsa : a0;                                   \
        const tsh_real *b = t->b;                                                                  \
        const tsh_real *c = t->c; /* next row of C to prefetch */                                  \
        const TSHI_GEMM_VEC_##isa zero = {0};                                                      \
        TSHI_GEMM_VEC_##isa x, b0, b1, c0[mr], c1[mr]; /* c0[i], c1[i]: sums of row i */           \
        ROWS(TSHI_GEMM_ZERO, isa)                                                                  \
        (void)a2, (void)a3; /* a2 and a3 are not read in tiles of 6 rows */                        \
        for (int64_t p = t->k, rest; p > 0;) {                                                     \
            rest = p > TSHI_GEMM_STRETCH ? p - TSHI_GEMM_STRETCH : 0;                              \
            for (int i = 0; i < TSHI_GEMM_FETCH; i++) tshi_gemm_fetch(t->walk);                    \
            for (int i = 0; i < TSHI_GEMM_FETCH_C; i++) {                                          \
                TSHI_PREFETCH(c);                                                                  \
                if (vecs > 1) TSHI_PREFETCH(c + lanes);                                            \
                c += c == t->c + (rows - 1) * t->rsc ? 0 : t->rsc;                                 \
            }                                                                                      \
            for (; p > rest; p--) { /* one step of k: a column of A, a row of B */                 \
                b0 = TSHI_GEMM_LOAD_##isa(b);                                                      \
                b1 = vecs > 1 ? TSHI_GEMM_LOAD_##isa(b + lanes) : b0;                              \
                ROWS(TSHI_GEMM_STEP, isa)                                                          \
                b += t->rsb; /* the next row of B */                                               \
                a0 += csa;                                                                         \
                a1 += csa;                                                                         \
                a2 += csa;                                                                         \
                a3 += csa;                                                                         \
            }                                                                                      \
        }                                                                                          \
        const TSHI_GEMM_VEC_##isa alpha = TSHI_GEMM_SET_##isa(t->alpha);                           \
        const int add = t->add;                                                                    \
        const int64_t rsc = t->rsc, rsd = t->rsd;                                                  \
        const tsh_real *d = t->d;                                                                  \
        tsh_real *to = t->c;                                                                       \
        ROWS(TSHI_GEMM_OUT, isa)                                                                   \
    }                                                                                              \
    TARGET static void tshi_gemm_tile_##isa(const tshi_gemm_tile *t, int rows, int cols) {         \
        const int wide = (size_t)cols > sizeof(TSHI_GEMM_VEC_##isa) / sizeof(tsh_real);            \
        tshi_gemm_tile part = *t;                                                                  \
        int left = rows;  /* rows still to be computed */                                          \
        if (rows == mr) { /* a tile of full height */                                              \
            if (wide)                                                                              \
                tshi_gemm_rows_##isa(t, mr, 2);                                                    \
            else                                                                                   \
                tshi_gemm_rows_##isa(t, mr, 1);                                                    \
            return;                                                                                \
        }                                                                                          \
        TSHI_GEMM_PART(isa, mr, 8) /* computes 8 rows at a time */                                 \
        TSHI_GEMM_PART(isa, mr, 4) /* computes 4 rows at a time */                                 \
        TSHI_GEMM_PART(isa, mr, 2) /* computes 2 rows at a time */                                 \
        TSHI_GEMM_PART(isa, mr, 1) /* computes the last row */                                     \
    }
/* Defines tshi_gemm_stream_form_isa, which reads B once, in the order of memory, and meanwhile
 * keeps the sums of all columns in memory. With few rows of A there is little to compute, and the
 * time is that of reading B. A step adds the products of one word of each row of A and one row of
 * B, or two rows if words are pairs; `each` is that number of rows, and `second` the bytes from a
 * pair's first row to its second (0: there is none). form is a constant after inlining: REALS,
 * PAIRS, or BF16 for both BF16 and F16. Rows of B are prefetched one call of tshi_gemm_steps_isa
 * ahead, but at least TSHI_GEMM_NEAR bytes ahead. */
#define TSHI_GEMM_STREAM(isa, TARGET)                                                              \
    TARGET TSHI_INLINE void tshi_gemm_steps_##isa(const tshi_gemm_tile *t, int64_t p,              \
                                                  const int steps, int rows, int cols,             \
                                                  const tshi_gemm_form form) {                     \
        const int lanes = (int)(sizeof(TSHI_GEMM_VEC_##isa) / sizeof(tsh_real));                   \
        const int64_t size = form == TSHI_GEMM_REALS ? (int64_t)sizeof(tsh_real) : 2;              \
        const int64_t each = form == TSHI_GEMM_PAIRS ? 2 : 1, row = t->rsb * size;                 \
        const int64_t step = each * row, reach = TSHI_GEMM_NEAR / (each * cols * size) + 1;        \
        const char *b = (const char *)t->b + p * step;                                             \
        tsh_real x[TSHI_GEMM_FEW][TSHI_GEMM_STEPS], *sums = t->sums; /* x[i][q]: A(i, p + q) */    \
        /* next: bytes from the row of B that is read to the row prefetched, maybe outside B */    \
        const uintptr_t next = (uintptr_t)(step * (steps > reach ? steps : reach));                \
        TSHI_GEMM_VEC_##isa y[TSHI_GEMM_STEPS], sum; /* y[q]: register of B in step q */           \
        for (int i = 0; i < rows; i++)                                                             \
            for (int q = 0; q < steps; q++) x[i][q] = t->a[i * t->rsa + (p + q) * t->csa];         \
        for (int j = 0; j < cols; j += lanes, b += lanes * size, sums += lanes) {                  \
            for (int q = 0; q < steps; q++) {                                                      \
                const char *at = b + q * step;                                                     \
                const int64_t second = 2 * (p + q) + 1 < t->slice ? row : 0;                       \
                (void)second;                                                                      \
                if (form == TSHI_GEMM_REALS)                                                       \
                    y[q] = TSHI_GEMM_LOAD_##isa((const tsh_real *)(const void *)at);               \
                else                                                                               \
                    y[q] = TSHI_GEMM_SHORT_##isa(t->form, at, second);                             \
                TSHI_PREFETCH_L2((const void *)((uintptr_t)at + next));                            \
                if (form == TSHI_GEMM_PAIRS)                                                       \
                    TSHI_PREFETCH_L2((const void *)((uintptr_t)at + (uintptr_t)row + next));       \
            }                                                                                      \
            for (int i = 0; i < rows; i++) {                                                       \
                sum = TSHI_GEMM_LOAD_##isa(sums + i * cols);                                       \
                for (int q = 0; q < steps; q++)                                                    \
                    sum = TSHI_GEMM_SUM_##isa(TSHI_GEMM_SET_##isa(x[i][q]), y[q], sum);            \
                TSHI_GEMM_STORE_##isa(sums + i * cols, sum);                                       \
            }                                                                                      \
        }                                                                                          \
    }                                                                                              \
    TARGET TSHI_INLINE void tshi_gemm_stream_form_##isa(const tshi_gemm_tile *t, int rows,         \
                                                        int cols, const tshi_gemm_form form) {     \
        const int lanes = (int)(sizeof(TSHI_GEMM_VEC_##isa) / sizeof(tsh_real)), add = t->add;     \
        const TSHI_GEMM_VEC_##isa zero = {0}, alpha = TSHI_GEMM_SET_##isa(t->alpha);               \
        int64_t p = 0;                                                                             \
        memset(t->sums, 0, (size_t)rows *(size_t)cols * sizeof *t->sums);                          \
        for (; p + TSHI_GEMM_STEPS <= t->k; p += TSHI_GEMM_STEPS)                                  \
            tshi_gemm_steps_##isa(t, p, TSHI_GEMM_STEPS, rows, cols, form);                        \
        for (; p < t->k; p++) tshi_gemm_steps_##isa(t, p, 1, rows, cols, form);                    \
        for (int i = 0; i < rows; i++)                                                             \
            for (int j = 0; j < cols; j += lanes)                                                  \
                TSHI_GEMM_PUT(isa, t->c + i * t->rsc + j, t->d + i * t->rsd + j,                   \
                              TSHI_GEMM_LOAD_##isa(t->sums + i * cols + j))                        \
    }
#define TSHI_GEMM_PART(isa, mr, size) /* computes parts of `size` rows while as many are left */   \
    for (; mr > size && left >= size; left -= size) {                                              \
        if (wide)                                                                                  \
            tshi_gemm_rows_##isa(&part, size, 2);                                                  \
        else                                                                                       \
            tshi_gemm_rows_##isa(&part, size, 1);                                                  \
        part.a += size * part.rsa;                                                                 \
        part.c += size * part.rsc;                                                                 \
        part.d += size * part.rsd;                                                                 \
    }

/* v128: 128-bit vectors of GNU C, for every processor: SSE2, NEON, ... */
typedef tsh_real tshi_gemm_v128
    __attribute__((vector_size(16), aligned(sizeof(tsh_real)), may_alias));
#define TSHI_GEMM_VEC_v128          tshi_gemm_v128
#define TSHI_GEMM_LOAD_v128(p)      (*(const tshi_gemm_v128 *)(p))
#define TSHI_GEMM_STORE_v128(p, v)  (*(tshi_gemm_v128 *)(p) = (v))
/* An initialiser of a vector with s in all lanes. It is written out, because gcc does not mix a
 * scalar and a vector where scalars are computed in a wider format (x87, s390x); it is a macro,
 * because i386 without SSE passes no vectors. */
#if TSHI_GEMM_FLOAT
#define TSHI_GEMM_LANES(s)                                                                         \
    { (s), (s), (s), (s) }
#else
#define TSHI_GEMM_LANES(s)                                                                         \
    { (s), (s) }
#endif
#define TSHI_GEMM_SET_v128(s)                                                                      \
    __extension__({                                                                                \
        const tsh_real set_value = (s);                                                            \
        const tshi_gemm_v128 set_lanes = TSHI_GEMM_LANES(set_value);                               \
        set_lanes;                                                                                 \
    })
#define TSHI_GEMM_FMA_v128(x, y, z) ((x) * (y) + (z))
#define TSHI_GEMM_SUM_v128          TSHI_GEMM_FMA_v128
#define TSHI_GEMM_SHORT_v128(form, at, second) y[q] /* not used: this kernel reads no 16-bit B */
TSHI_GEMM_KERNEL(v128, , TSHI_GEMM_ROWS6, 6)
TSHI_GEMM_STREAM(v128, )
static void tshi_gemm_stream_v128(const tshi_gemm_tile *t, int rows, int cols) {
    tshi_gemm_stream_form_v128(t, rows, cols, TSHI_GEMM_REALS);
}

#if TSHI_X86
#if TSHI_GEMM_FLOAT
#define TSHI_GEMM_REG(bits)    __m##bits             /* type of a register of `bits` bits */
#define TSHI_GEMM_OP(bits, op) _mm##bits##_##op##_ps /* name of an x86 intrinsic */
#else
#define TSHI_GEMM_REG(bits)    __m##bits##d
#define TSHI_GEMM_OP(bits, op) _mm##bits##_##op##_pd
#endif

#define TSHI_GEMM_VEC_avx2   TSHI_GEMM_REG(256)
#define TSHI_GEMM_LOAD_avx2  TSHI_GEMM_OP(256, loadu)
#define TSHI_GEMM_STORE_avx2 TSHI_GEMM_OP(256, storeu)
#define TSHI_GEMM_SET_avx2   TSHI_GEMM_OP(256, set1)
#define TSHI_GEMM_FMA_avx2   TSHI_GEMM_OP(256, fmadd)
#define TSHI_GEMM_SUM_avx2   TSHI_GEMM_FMA_avx2
TSHI_GEMM_KERNEL(avx2, TSHI_AVX2, TSHI_GEMM_ROWS6, 6)
#if TSHI_GEMM_FLOAT
/* Converts the 8 values at `at`, f16 or bf16 as form says, to float. */
TSHI_AVX2 TSHI_INLINE __m256 tshi_gemm_widen8(const tshi_gemm_form form, const void *at) {
    const __m128i x = _mm_loadu_si128((const __m128i *)at);
    if (form == TSHI_GEMM_F16) return _mm256_cvtph_ps(x);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
#define TSHI_GEMM_SHORT_avx2(form, at, second) tshi_gemm_widen8(form, at)
#else
#define TSHI_GEMM_SHORT_avx2(form, at, second) y[q] /* not used: tsh_real is double */
#endif
TSHI_GEMM_STREAM(avx2, TSHI_AVX2)
TSHI_AVX2 static void tshi_gemm_stream_avx2(const tshi_gemm_tile *t, int rows, int cols) {
    if (t->form == TSHI_GEMM_REALS)
        tshi_gemm_stream_form_avx2(t, rows, cols, TSHI_GEMM_REALS);
    else if (TSHI_GEMM_FLOAT)
        tshi_gemm_stream_form_avx2(t, rows, cols, TSHI_GEMM_BF16);
}

#define TSHI_GEMM_VEC_avx512   TSHI_GEMM_REG(512)
#define TSHI_GEMM_LOAD_avx512  TSHI_GEMM_OP(512, loadu)
#define TSHI_GEMM_STORE_avx512 TSHI_GEMM_OP(512, storeu)
#define TSHI_GEMM_SET_avx512   TSHI_GEMM_OP(512, set1)
#define TSHI_GEMM_FMA_avx512   TSHI_GEMM_OP(512, fmadd)
#define TSHI_GEMM_SUM_avx512   TSHI_GEMM_FMA_avx512
TSHI_GEMM_KERNEL(avx512, TSHI_AVX512, TSHI_GEMM_ROWS12, 12)
#if TSHI_GEMM_FLOAT
/* Converts the 16 values in x, f16 or bf16 as form says, to float. */
TSHI_AVX512 TSHI_INLINE __m512 tshi_gemm_widen(const tshi_gemm_form form, __m256i x) {
    return form == TSHI_GEMM_F16 ? _mm512_cvtph_ps(x)
                                 : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x),
                                                                         16));
}
#define TSHI_GEMM_SHORT_avx512(form, at, second)                                                   \
    tshi_gemm_widen(form, _mm256_loadu_si256((const __m256i *)(const void *)(at)))
#else
#define TSHI_GEMM_SHORT_avx512(form, at, second) y[q] /* not used: tsh_real is double */
#endif
TSHI_GEMM_STREAM(avx512, TSHI_AVX512)
TSHI_AVX512 static void tshi_gemm_stream_avx512(const tshi_gemm_tile *t, int rows, int cols) {
    if (t->form == TSHI_GEMM_REALS)
        tshi_gemm_stream_form_avx512(t, rows, cols, TSHI_GEMM_REALS);
    else if (TSHI_GEMM_FLOAT)
        tshi_gemm_stream_form_avx512(t, rows, cols, TSHI_GEMM_BF16);
}

/* Implements tshi_gemm_kernel.stream with AVX-512. If the last columns fill only half a register,
 * AVX2 computes them. */
static void tshi_gemm_stream_x86(const tshi_gemm_tile *t, int rows, int cols) {
    const int whole = cols / (64 / (int)sizeof(tsh_real)) * (64 / (int)sizeof(tsh_real));
    const int64_t size = t->form == TSHI_GEMM_REALS ? (int64_t)sizeof(tsh_real) : 2;
    tshi_gemm_tile rest = *t;
    if (whole > 0) tshi_gemm_stream_avx512(t, rows, whole);
    if (whole == cols) return;
    rest.b = (const tsh_real *)(const void *)((const char *)t->b + whole * size);
    rest.c += whole;
    if (t->add) rest.d += whole;
    tshi_gemm_stream_avx2(&rest, rows, cols - whole);
}
#endif /* TSHI_X86 */

#if TSHI_GEMM_BF16S
#define TSHI_GEMM_VEC_bf16   __m512
#define TSHI_GEMM_LOAD_bf16  _mm512_loadu_ps
#define TSHI_GEMM_STORE_bf16 _mm512_storeu_ps
#define TSHI_GEMM_SET_bf16   _mm512_set1_ps
#define TSHI_GEMM_FMA_bf16   _mm512_fmadd_ps
#define TSHI_GEMM_SUM_bf16(x, y, z) _mm512_dpbf16_ps(z, (__m512bh)(x), (__m512bh)(y))
TSHI_GEMM_KERNEL(bf16, TSHI_GEMM_TARGET_BF16, TSHI_GEMM_ROWS12, 12)
#endif
#endif /* TSHI_VECTORS */
