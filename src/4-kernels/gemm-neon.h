/* ========================================================================== */
/* >>gemm-neon                                    MARK: - gemm-neon (private) */
/* Micro-kernels of the product with NEON, and of pairs of bf16.              */
/* Needs: >>arm >>gemm-vector.                                                */
/* ========================================================================== */

/* TSHI_NEON_PAIRS is 1 if kernels that multiply pairs of bf16 are compiled. */
#define TSHI_NEON_PAIRS (TSHI_NEON_BF16 && TSHI_NEON_MM && TSHI_GEMM_FLOAT)

#if TSHI_NEON
#if TSHI_GEMM_FLOAT
#define TSHI_GEMM_NEON(op)   v##op##_f32 /* name of an intrinsic */
#define TSHI_GEMM_VEC_neon   float32x4_t
#define TSHI_GEMM_NEON_LANES 4
#else
#define TSHI_GEMM_NEON(op)   v##op##_f64
#define TSHI_GEMM_VEC_neon   float64x2_t
#define TSHI_GEMM_NEON_LANES 2
#endif
#define TSHI_GEMM_LOAD_neon         TSHI_GEMM_NEON(ld1q)
#define TSHI_GEMM_STORE_neon        TSHI_GEMM_NEON(st1q)
#define TSHI_GEMM_SET_neon          TSHI_GEMM_NEON(dupq_n)
#define TSHI_GEMM_FMA_neon(x, y, z) TSHI_GEMM_NEON(fmaq)(z, x, y)
#define TSHI_GEMM_SUM_neon          TSHI_GEMM_FMA_neon
#if TSHI_GEMM_FLOAT
/* Converts the 4 values at `at`, f16 or bf16 as form says, to float. */
TSHI_INLINE float32x4_t tshi_gemm_widen4(const tshi_gemm_form form, const char *at) {
    const uint16x4_t x = vld1_u16((const uint16_t *)(const void *)at);
    if (form == TSHI_GEMM_F16) return vcvt_f32_f16(vreinterpret_f16_u16(x));
    return vreinterpretq_f32_u32(vshll_n_u16(x, 16));
}
#define TSHI_GEMM_SHORT_neon(form, at, second) tshi_gemm_widen4(form, at)
#else
#define TSHI_GEMM_SHORT_neon(form, at, second) y[q] /* not used: tsh_real is double */
#endif
TSHI_GEMM_KERNEL(neon, , TSHI_GEMM_ROWS12, 12)
TSHI_GEMM_STREAM(neon, )

/* Computes a tile of 12 rows of A, which is packed (t->rsa is 1), and `vecs` registers of columns
 * of B. A register is loaded with the elements of several rows of A; fmla multiplies by one of
 * them. Sums are added in the order of tshi_gemm_rows_neon. */
TSHI_INLINE void tshi_gemm_full_neon(const tshi_gemm_tile *t, const int vecs) {
    const int lanes = TSHI_GEMM_NEON_LANES;
    const tshi_gemm_word *a = t->a;
    const tsh_real *b = t->b, *c = t->c, *d = t->d;
    const TSHI_GEMM_VEC_neon zero = TSHI_GEMM_SET_neon(0);
    TSHI_GEMM_VEC_neon x = zero, b0, b1, c0[12], c1[12]; /* c0[i], c1[i]: sums of row i */
#define TSHI_GEMM_LANE(isa, i, g)                                                                  \
    if (i % TSHI_GEMM_NEON_LANES == 0) x = TSHI_GEMM_LOAD_neon(a + i);                             \
    c0[i] = TSHI_GEMM_NEON(fmaq_laneq)(c0[i], b0, x, i % TSHI_GEMM_NEON_LANES);                    \
    if (vecs > 1) c1[i] = TSHI_GEMM_NEON(fmaq_laneq)(c1[i], b1, x, i % TSHI_GEMM_NEON_LANES);
    TSHI_GEMM_ROWS12(TSHI_GEMM_ZERO, neon)
    for (int64_t p = t->k, rest; p > 0;) {
        rest = p > TSHI_GEMM_STRETCH ? p - TSHI_GEMM_STRETCH : 0;
        for (int i = 0; i < TSHI_GEMM_FETCH; i++) tshi_gemm_fetch(t->walk);
        for (int i = 0; i < TSHI_GEMM_FETCH_C; i++) {
            TSHI_PREFETCH(c);
            c += c == t->c + 11 * t->rsc ? 0 : t->rsc;
        }
        for (; p > rest; p--, a += t->csa, b += t->rsb) { /* one step of k */
            b0 = TSHI_GEMM_LOAD_neon(b);
            b1 = vecs > 1 ? TSHI_GEMM_LOAD_neon(b + lanes) : b0;
            TSHI_GEMM_ROWS12(TSHI_GEMM_LANE, neon)
        }
    }
    const int rows = 12, add = t->add;
    const TSHI_GEMM_VEC_neon alpha = TSHI_GEMM_SET_neon(t->alpha);
    const int64_t rsc = t->rsc, rsd = t->rsd;
    tsh_real *to = t->c;
    TSHI_GEMM_ROWS12(TSHI_GEMM_OUT, neon)
}

static void tshi_gemm_tile_lanes(const tshi_gemm_tile *t, int rows, int cols) {
    if (rows < 12 || t->rsa != 1)
        tshi_gemm_tile_neon(t, rows, cols);
    else if (cols > TSHI_GEMM_NEON_LANES)
        tshi_gemm_full_neon(t, 2);
    else
        tshi_gemm_full_neon(t, 1);
}

static void tshi_gemm_stream_neon(const tshi_gemm_tile *t, int rows, int cols) {
    if (t->form == TSHI_GEMM_REALS)
        tshi_gemm_stream_form_neon(t, rows, cols, TSHI_GEMM_REALS);
    else if (TSHI_GEMM_FLOAT)
        tshi_gemm_stream_form_neon(t, rows, cols, TSHI_GEMM_BF16);
}

#if TSHI_NEON_PAIRS
/* Pairs of bf16. bfmmla adds to each of 2 x 2 sums what two bfdot would: the products of the
 * elements 2p and 2p + 1 along k, then those of the next pair. So tiles, computed by bfmmla, which
 * multiplies twice as many elements as bfdot, and streamed products, computed by bfdot, have the
 * same bits. */
#define TSHI_GEMM_VEC_bfdot   float32x4_t
#define TSHI_GEMM_LOAD_bfdot  vld1q_f32
#define TSHI_GEMM_STORE_bfdot vst1q_f32
#define TSHI_GEMM_SET_bfdot   vdupq_n_f32
#define TSHI_GEMM_FMA_bfdot   TSHI_GEMM_FMA_neon
#define TSHI_GEMM_SUM_bfdot(x, y, z)                                                               \
    vbfdotq_f32(z, vreinterpretq_bf16_f32(x), vreinterpretq_bf16_f32(y))
#define TSHI_GEMM_SHORT_bfdot(form, at, second) tshi_gemm_pairs4(at, second)
/* Loads 4 elements of a row of B, and 4 of the next row, as 4 pairs. second: bytes from the first
 * row to the next; 0: there is no next row, and zeros take its place. */
TSHI_BF16 TSHI_INLINE float32x4_t tshi_gemm_pairs4(const char *at, int64_t second) {
    const uint16x4_t x = vld1_u16((const uint16_t *)(const void *)at);
    const uint16x4_t y = second ? vld1_u16((const uint16_t *)(const void *)(at + second))
                                : vdup_n_u16(0);
    return vreinterpretq_f32_u32(vorrq_u32(vmovl_u16(x), vshll_n_u16(y, 16)));
}
TSHI_GEMM_STREAM(bfdot, TSHI_BF16)
/* Implements tshi_gemm_kernel.stream with bfdot. */
TSHI_BF16 static void tshi_gemm_stream_bfdot(const tshi_gemm_tile *t, int rows, int cols) {
    if (t->form == TSHI_GEMM_PAIRS)
        tshi_gemm_stream_form_bfdot(t, rows, cols, TSHI_GEMM_PAIRS);
    else
        tshi_gemm_stream_neon(t, rows, cols);
}

/* Returns the 4 words at p, of 2 rows, and the 4 words at q, of the next step of k, as operands of
 * bfmmla: 4 elements of k of rows 0 and 1 (of rows 2 and 3 if high is 1). */
TSHI_BF16 TSHI_INLINE bfloat16x8_t tshi_gemm_mix4(uint32x4_t p, uint32x4_t q, const int high) {
    return vreinterpretq_bf16_u32(high ? vzip2q_u32(p, q) : vzip1q_u32(p, q));
}

#define TSHI_GEMM_WORDS(at) vld1q_u32((const uint32_t *)(const void *)(at))
/* Computes a tile of 4 * quads rows and 4 * vecs columns, 2 x 2 sums at a time, from packed pairs
 * of bf16. bfmmla takes two pairs along k: if the number of pairs is odd, A's missing pair is -0
 * and B's is 0: their products, -0, change no sum. */
TSHI_BF16 TSHI_INLINE void tshi_gemm_rows_bfmmla(const tshi_gemm_tile *t, const int quads,
                                                 const int vecs, int rows) {
    const tshi_gemm_word *a = t->a;
    const tsh_real *b = t->b;
    const float32x4_t zero = vdupq_n_f32(0), alpha = vdupq_n_f32(t->alpha);
    float32x4_t s[6][4]; /* s[r][c]: rows 2 r and 2 r + 1, columns 2 c and 2 c + 1 */
#define TSHI_GEMM_EACH6(X)  X(0) X(1) X(2) X(3) X(4) X(5)
#define TSHI_GEMM_CLEAR2(r) s[r][0] = s[r][1] = s[r][2] = s[r][3] = zero;
#define TSHI_GEMM_QUAD(q)                                                                          \
    if (quads > q) {                                                                               \
        const uint32x4_t a0 = TSHI_GEMM_WORDS(a + 4 * q);                                          \
        const uint32x4_t a1 = p > 1 ? TSHI_GEMM_WORDS(a + t->csa + 4 * q) : minus;                 \
        const bfloat16x8_t x0 = tshi_gemm_mix4(a0, a1, 0), x1 = tshi_gemm_mix4(a0, a1, 1);         \
        TSHI_GEMM_MM(2 * q, 0) TSHI_GEMM_MM(2 * q, 1) if (vecs > 1) {                              \
            TSHI_GEMM_MM(2 * q, 2) TSHI_GEMM_MM(2 * q, 3)                                          \
        }                                                                                          \
    }
#define TSHI_GEMM_MM(r, c)                                                                         \
    s[r][c] = vbfmmlaq_f32(s[r][c], x0, y##c);                                                     \
    s[r + 1][c] = vbfmmlaq_f32(s[r + 1][c], x1, y##c);
#define TSHI_GEMM_STEP2(words) /* adds the products of 2 words along k, or of the last one */      \
    {                                                                                              \
        const int p = words;                                                                       \
        const uint32x4_t b0 = TSHI_GEMM_WORDS(b), b2 = vecs > 1 ? TSHI_GEMM_WORDS(b + 4) : b0;     \
        const uint32x4_t b1 = p > 1 ? TSHI_GEMM_WORDS(b + t->rsb) : none;                          \
        const uint32x4_t b3 = p > 1 && vecs > 1 ? TSHI_GEMM_WORDS(b + t->rsb + 4) : none;          \
        const bfloat16x8_t y0 = tshi_gemm_mix4(b0, b1, 0), y1 = tshi_gemm_mix4(b0, b1, 1);         \
        const bfloat16x8_t y2 = tshi_gemm_mix4(b2, b3, 0), y3 = tshi_gemm_mix4(b2, b3, 1);         \
        (void)y2, (void)y3;                                                                        \
        TSHI_GEMM_QUAD(0) TSHI_GEMM_QUAD(1) TSHI_GEMM_QUAD(2)                                      \
    }
    const uint32x4_t none = vdupq_n_u32(0), minus = vdupq_n_u32(0x80008000u);
    const int64_t twice_a = 2 * t->csa, twice_b = 2 * t->rsb;
    int64_t left = t->k;
    TSHI_GEMM_EACH6(TSHI_GEMM_CLEAR2)
    while (left > 1) {
        for (int i = 0; i < TSHI_GEMM_FETCH; i++) tshi_gemm_fetch(t->walk);
        for (int i = 0; i < TSHI_GEMM_STRETCH / 2 && left > 1; i++, left -= 2) {
            TSHI_GEMM_STEP2(2)
            a += twice_a;
            b += twice_b;
        }
    }
    if (left) TSHI_GEMM_STEP2(1)
    const int add = t->add;
#define TSHI_GEMM_HALF(r, c,                                                                       \
                       half) /* row 2 r (half low) or 2 r + 1 (high) of two 2 x 2 sums */          \
    vcombine_f32(vget_##half##_f32(s[r][c]), vget_##half##_f32(s[r][c + 1]))
#define TSHI_GEMM_ROW2(i, half)                                                                    \
    if (4 * quads > i && rows > i) {                                                               \
        TSHI_GEMM_PUT(neon, t->c + i * t->rsc, t->d + i * t->rsd, TSHI_GEMM_HALF(i / 2, 0, half))  \
        if (vecs > 1)                                                                              \
            TSHI_GEMM_PUT(neon, t->c + i * t->rsc + 4, t->d + i * t->rsd + 4,                      \
                          TSHI_GEMM_HALF(i / 2, 2, half))                                          \
    }
#define TSHI_GEMM_OUT2(r) TSHI_GEMM_ROW2((2 * r), low) TSHI_GEMM_ROW2((2 * r + 1), high)
    TSHI_GEMM_EACH6(TSHI_GEMM_OUT2)
}

/* Implements tshi_gemm_kernel.pairs with bfmmla. A is packed to 12 rows; those beyond `rows` are
 * 0. */
TSHI_BF16 static void tshi_gemm_tile_bfmmla(const tshi_gemm_tile *t, int rows, int cols) {
#define TSHI_GEMM_QUADS(quads)                                                                     \
    if (cols > 4)                                                                                  \
        tshi_gemm_rows_bfmmla(t, quads, 2, rows);                                                  \
    else                                                                                           \
        tshi_gemm_rows_bfmmla(t, quads, 1, rows);
    if (rows > 8) {
        TSHI_GEMM_QUADS(3)
    } else if (rows > 4) {
        TSHI_GEMM_QUADS(2)
    } else {
        TSHI_GEMM_QUADS(1)
    }
}

/* -- packing pairs --------------------------------------------------------- */

/* Loads up to 4 contiguous elements, of bf16 (form PAIRS) or float, as bf16; the others are 0. */
TSHI_BF16 TSHI_INLINE uint16x4_t tshi_gemm_short4(const tshi_gemm_form form, const char *at,
                                                  int64_t n) {
    const size_t size = form == TSHI_GEMM_PAIRS ? 2 : 4;
    char some[16] = {0};
    if (n <= 0) return vdup_n_u16(0);
    if (n < 4) at = (const char *)memcpy(some, at, (size_t)n * size);
    if (form == TSHI_GEMM_PAIRS) return vld1_u16((const uint16_t *)(const void *)at);
    return vreinterpret_u16_bf16(vcvt_bf16_f32(vld1q_f32((const float *)(const void *)at)));
}

/* Packs rows of contiguous elements as pairs of bf16, 4 elements (2 words) of 4 rows at a time.
 * inc: bytes from row to row. */
TSHI_BF16 TSHI_INLINE void tshi_gemm_pairs_along(const tshi_gemm_form form, float *dst, int width,
                                                 int valid, int64_t k, const char *src,
                                                 int64_t inc) {
    const int64_t size = form == TSHI_GEMM_PAIRS ? 2 : 4;
    for (int i = 0; i < width; i += 4)
        for (int64_t p = 0; p < k; p += 4) {
            const char *at = src + i * inc + p * size;
            uint32_t *const to = (uint32_t *)(void *)(dst + p / 2 * width + i);
#define TSHI_GEMM_SHORT4(r)                                                                        \
    vreinterpret_u32_u16(                                                                          \
        tshi_gemm_short4(form, at + (valid > i + r ? r * inc : 0), valid > i + r ? k - p : 0))
            const uint32x2_t r0 = TSHI_GEMM_SHORT4(0), r1 = TSHI_GEMM_SHORT4(1);
            const uint32x2_t r2 = TSHI_GEMM_SHORT4(2), r3 = TSHI_GEMM_SHORT4(3);
            vst1q_u32(to, vcombine_u32(vzip1_u32(r0, r1), vzip1_u32(r2, r3)));
            if (p + 2 < k)
                vst1q_u32(to + width, vcombine_u32(vzip2_u32(r0, r1), vzip2_u32(r2, r3)));
        }
}

/* Packs a matrix whose columns are contiguous as pairs of bf16. ld: bytes from column to column. */
TSHI_BF16 TSHI_INLINE void tshi_gemm_pairs_across(const tshi_gemm_form form, float *dst, int width,
                                                  int valid, int64_t k, const char *src,
                                                  int64_t ld) {
    const int64_t size = form == TSHI_GEMM_PAIRS ? 2 : 4;
    for (int64_t p = 0; p < k; p += 2, src += 2 * ld, dst += width)
        for (int i = 0; i < width; i += 4) {
            const int64_t n = valid - i, second = p + 1 < k ? n : 0;
            const uint16x4_t x = tshi_gemm_short4(form, n > 0 ? src + i * size : src, n);
            const uint16x4_t y = tshi_gemm_short4(form, second > 0 ? src + ld + i * size : src,
                                                  second);
            vst1q_u32((uint32_t *)(void *)(dst + i), vorrq_u32(vmovl_u16(x), vshll_n_u16(y, 16)));
        }
}

/* Implements tshi_gemm_kernel.pack for pairs of bf16, with the bf16 instructions of Arm. */
TSHI_BF16 static int tshi_gemm_pack_bfdot(float *dst, int width, int valid, int64_t k,
                                          const tshi_matrix *m, tshi_gemm_form form) {
    const int64_t size = form == TSHI_GEMM_PAIRS ? 2 : 4;
    const char *src = (const char *)m->data;
    if (form < TSHI_GEMM_PAIRS || width % 4 || (m->row != 1 && m->column != 1)) return 0;
    if (m->column == 1 && form == TSHI_GEMM_PAIRS)
        tshi_gemm_pairs_along(TSHI_GEMM_PAIRS, dst, width, valid, k, src, size * m->row);
    else if (m->column == 1)
        tshi_gemm_pairs_along(TSHI_GEMM_ROUNDED, dst, width, valid, k, src, size * m->row);
    else if (form == TSHI_GEMM_PAIRS)
        tshi_gemm_pairs_across(TSHI_GEMM_PAIRS, dst, width, valid, k, src, size * m->column);
    else
        tshi_gemm_pairs_across(TSHI_GEMM_ROUNDED, dst, width, valid, k, src, size * m->column);
    return 1;
}
#endif
#undef TSHI_GEMM_NEON
#undef TSHI_GEMM_VEC_neon
#undef TSHI_GEMM_NEON_LANES
#undef TSHI_GEMM_LOAD_neon
#undef TSHI_GEMM_STORE_neon
#undef TSHI_GEMM_SET_neon
#undef TSHI_GEMM_FMA_neon
#undef TSHI_GEMM_SUM_neon
#undef TSHI_GEMM_SHORT_neon
#undef TSHI_GEMM_LANE
#undef TSHI_GEMM_VEC_bfdot
#undef TSHI_GEMM_LOAD_bfdot
#undef TSHI_GEMM_STORE_bfdot
#undef TSHI_GEMM_SET_bfdot
#undef TSHI_GEMM_FMA_bfdot
#undef TSHI_GEMM_SUM_bfdot
#undef TSHI_GEMM_SHORT_bfdot
#undef TSHI_GEMM_WORDS
#undef TSHI_GEMM_EACH6
#undef TSHI_GEMM_CLEAR2
#undef TSHI_GEMM_QUAD
#undef TSHI_GEMM_MM
#undef TSHI_GEMM_STEP2
#undef TSHI_GEMM_HALF
#undef TSHI_GEMM_ROW2
#undef TSHI_GEMM_OUT2
#undef TSHI_GEMM_QUADS
#undef TSHI_GEMM_SHORT4
#endif /* TSHI_NEON */
