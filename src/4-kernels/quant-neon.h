/* ========================================================================== */
/* >>quant-neon                                  MARK: - quant-neon (private) */
/* Kernels of quantised weights with NEON's sdot and smmla.                   */
/* Needs: >>arm >>quant-vnni.                                                 */
/* ========================================================================== */

#if TSHI_NEON_DOT
/* Tiles hold TSH_Q8_0's weights as they are (128 is not added), so that their sums begin with 0. */
#define TSHI_QUANT_EACH4(X) X(0) X(1) X(2) X(3)

/* Loads the f16 scales (or minima) of one block of each of 4 rows of W, as floats. */
TSHI_INLINE float32x4_t tshi_quant_scales_neon(const unsigned char *const w[4], int at) {
    uint16x4_t h = vdup_n_u16(0);
#define TSHI_QUANT_SCALE(c) h = vld1_lane_u16((const uint16_t *)(const void *)(w[c] + at), h, c);
    TSHI_QUANT_EACH4(TSHI_QUANT_SCALE)
    return vcvt_f32_f16(vreinterpret_f16_u16(h));
}

/* Sets w[c] to the address of row `first` + c of W, or of the last row where W has no such row. */
TSHI_INLINE void tshi_quant_rows_neon(const tshi_quant_source *from, int first,
                                      const unsigned char *w[4]) {
    for (int c = 0; c < 4; c++) {
        const int row = first + c < from->rows ? first + c : from->rows - 1;
        w[c] = from->w + row * from->row;
    }
}

/* Loads the 32 weights that begin at `at` as bytes: 0 to 15 to *low, 16 to 31 to *high. */
TSHI_INLINE void tshi_quant_load_neon(const int bits, const unsigned char *at, int8x16_t *low,
                                      int8x16_t *high) {
    const uint8x16_t x = vld1q_u8(at);
    if (bits == 8) {
        *low = vreinterpretq_s8_u8(x);
        *high = vreinterpretq_s8_u8(vld1q_u8(at + 16));
    } else {
        *low = vreinterpretq_s8_u8(vandq_u8(x, vdupq_n_u8(15)));
        *high = vreinterpretq_s8_u8(vshrq_n_u8(x, 4));
    }
}

/* Returns s, of 4 columns of Y, plus the result of one block of a row of X: its integer sums n
 * times the scales of W and x, and, if has_min is 1, the minima of W times x->sum. */
TSHI_INLINE float32x4_t tshi_quant_end_neon(float32x4_t scale, int has_min, float32x4_t min,
                                            const tshi_quant_input *x, int32x4_t n, float32x4_t s) {
    s = vaddq_f32(s, vmulq_f32(vmulq_n_f32(scale, x->scale), vcvtq_f32_s32(n)));
    return has_min ? vaddq_f32(s, vmulq_n_f32(min, x->sum)) : s;
}

/* Writes the weights of 4 rows of a block, from row c on, to a tile. z[r], z[4 + r]: elements 0 to
 * 15 and 16 to 31 of row c + r. With mm, a tile is laid out for smmla: 16 bytes are 8 elements of a
 * row and as many of the next one; otherwise for sdot, as tshi_quant_tile says. */
TSHI_INLINE void tshi_quant_keep_neon(tshi_quant_tile *to, const int mm, int c,
                                      const int8x16_t *z) {
    for (int h = 0; h < 2; h++, z += 4) {
        const int32x4_t r0 = vreinterpretq_s32_s8(z[0]), r1 = vreinterpretq_s32_s8(z[1]);
        const int32x4_t r2 = vreinterpretq_s32_s8(z[2]), r3 = vreinterpretq_s32_s8(z[3]);
        const int64x2_t q0 = vreinterpretq_s64_s8(z[0]), q1 = vreinterpretq_s64_s8(z[1]);
        const int64x2_t q2 = vreinterpretq_s64_s8(z[2]), q3 = vreinterpretq_s64_s8(z[3]);
        /* even: words 0 and 2 of two rows; odd: their words 1 and 3 */
        const int64x2_t even = vreinterpretq_s64_s32(vtrn1q_s32(r0, r1));
        const int64x2_t odd = vreinterpretq_s64_s32(vtrn2q_s32(r0, r1));
        const int64x2_t even2 = vreinterpretq_s64_s32(vtrn1q_s32(r2, r3));
        const int64x2_t odd2 = vreinterpretq_s64_s32(vtrn2q_s32(r2, r3));
#define TSHI_QUANT_KEEP(i, c, x) vst1q_u8(to->w[4 * h + (i)][c], vreinterpretq_u8_s64(x));
        if (mm) { /* elements 8 g to 8 g + 7 of all 16 rows fill w[2 g] and w[2 g + 1] */
            TSHI_QUANT_KEEP(c / 8, 2 * (c % 8), vzip1q_s64(q0, q1))
            TSHI_QUANT_KEEP(c / 8, 2 * (c % 8) + 4, vzip1q_s64(q2, q3))
            TSHI_QUANT_KEEP(2 + c / 8, 2 * (c % 8), vzip2q_s64(q0, q1))
            TSHI_QUANT_KEEP(2 + c / 8, 2 * (c % 8) + 4, vzip2q_s64(q2, q3))
        } else {
            TSHI_QUANT_KEEP(0, c, vzip1q_s64(even, even2))
            TSHI_QUANT_KEEP(1, c, vzip1q_s64(odd, odd2))
            TSHI_QUANT_KEEP(2, c, vzip2q_s64(even, even2))
            TSHI_QUANT_KEEP(3, c, vzip2q_s64(odd, odd2))
        }
    }
}

/* Moves from->count blocks of each of 16 rows of W to tiles. bits (8 or 4 per weight) and mm are
 * constants after inlining. */
TSHI_INLINE void tshi_quant_tiles_neon(tshi_quant_tile *to, const tshi_quant_source *from,
                                       const int bits, const int mm) {
    const int has_min = from->size == TSHI_QUANT_Q4_1, head = has_min ? 4 : 2;
    for (int c = 0; c < TSHI_QUANT_COLUMNS; c += 4) {
        const unsigned char *w[4];
        tshi_quant_rows_neon(from, c, w);
        for (int b = 0; b < from->count; b++) {
            int8x16_t z[8];
            vst1q_f32(to[b].scale + c, tshi_quant_scales_neon(w, 0));
            if (has_min) vst1q_f32(to[b].min + c, tshi_quant_scales_neon(w, 2));
            for (int r = 0; r < 4; r++) {
                TSHI_PREFETCH((const void *)((uintptr_t)w[r] + 256));
                tshi_quant_load_neon(bits, w[r] + head, &z[r], &z[4 + r]);
                w[r] += from->size;
            }
            tshi_quant_keep_neon(to + b, mm, c, z);
        }
    }
}

/* Adds the products of 16 rows of W (all their blocks) with 1, 2 or 4 rows of X (`width`, a
 * constant after inlining, of which `rows` exist) to `sums`. Reads W as it is stored, 4 rows at a
 * time. */
TSHI_DOT TSHI_INLINE void tshi_quant_direct_neon(const tshi_quant_source *from, const int bits,
                                                 const tshi_quant_input *x, float *sums,
                                                 int64_t stride, const int width, int rows) {
    const int size = from->size, has_min = size == TSHI_QUANT_Q4_1, head = has_min ? 4 : 2;
    for (int c = 0; c < TSHI_QUANT_COLUMNS; c += 4) {
        const tshi_quant_input *y = x;
        const unsigned char *w[4] = {NULL, NULL, NULL, NULL};
        float32x4_t s[4];
        tshi_quant_rows_neon(from, c, w);
#define TSHI_QUANT_SUMS(r)                                                                         \
    s[r] = width > r && rows > r ? vld1q_f32(sums + r * stride + c) : vdupq_n_f32(0);
#define TSHI_QUANT_LOAD(i) tshi_quant_load_neon(bits, w[i] + head, &low[i], &high[i]);
#define TSHI_QUANT_DOT2(i) /* the products of a block of row c + i of W and of a row of X */       \
    vdotq_s32(vdotq_s32(vdupq_n_s32(0), low[i], x0), high[i], x1)
#define TSHI_QUANT_ROW(r)                                                                          \
    if (width > r) {                                                                               \
        const int8x16_t x0 = vld1q_s8(y[r].q), x1 = vld1q_s8(y[r].q + 16);                         \
        int32x4_t n = vpaddq_s32(vpaddq_s32(TSHI_QUANT_DOT2(0), TSHI_QUANT_DOT2(1)),               \
                                 vpaddq_s32(TSHI_QUANT_DOT2(2), TSHI_QUANT_DOT2(3)));              \
        if (bits == 4) n = vaddq_s32(n, vdupq_n_s32(y[r].offset));                                 \
        s[r] = tshi_quant_end_neon(scale, has_min, min, y + r, n, s[r]);                           \
    }
#define TSHI_QUANT_PUT(r)                                                                          \
    if (width > r && rows > r) vst1q_f32(sums + r * stride + c, s[r]);
        TSHI_QUANT_EACH4(TSHI_QUANT_SUMS)
        for (int b = 0; b < from->count; b++, y += TSHI_QUANT_FEW) {
            const float32x4_t scale = tshi_quant_scales_neon(w, 0);
            const float32x4_t min = has_min ? tshi_quant_scales_neon(w, 2) : scale;
            int8x16_t low[4], high[4];
            TSHI_QUANT_EACH4(TSHI_QUANT_LOAD)
            TSHI_QUANT_EACH4(TSHI_QUANT_ROW)
            for (int i = 0; i < 4; i++) {
                TSHI_PREFETCH((const void *)((uintptr_t)w[i] + 512));
                w[i] += size;
            }
        }
        TSHI_QUANT_EACH4(TSHI_QUANT_PUT)
    }
}

/* Adds products as tshi_quant_direct_neon does, for up to 4 rows of X. */
TSHI_DOT static void tshi_quant_few_neon(const tshi_quant_source *from, const tshi_quant_input *x,
                                         float *sums, int64_t stride, int rows) {
#define TSHI_QUANT_WIDTHS(bits)                                                                    \
    if (rows == 1)                                                                                 \
        tshi_quant_direct_neon(from, bits, x, sums, stride, 1, rows);                              \
    else if (rows == 2)                                                                            \
        tshi_quant_direct_neon(from, bits, x, sums, stride, 2, rows);                              \
    else                                                                                           \
        tshi_quant_direct_neon(from, bits, x, sums, stride, 4, rows);
    if (from->size == TSHI_QUANT_Q8) {
        TSHI_QUANT_WIDTHS(8)
    } else {
        TSHI_QUANT_WIDTHS(4)
    }
}

/* Adds the results of a block of 16 rows of W and one row of X to s, 16 sums. */
TSHI_INLINE void tshi_quant_block_neon(const tshi_quant_tile *w, int has_min,
                                       const tshi_quant_input *x, const int32x4_t *n, float *s) {
#define TSHI_QUANT_END(v)                                                                          \
    vst1q_f32(s + 4 * (v), tshi_quant_end_neon(vld1q_f32(w->scale + 4 * (v)), has_min,             \
                                               vld1q_f32(has_min ? w->min + 4 * (v) : w->scale),   \
                                               x, n[v], vld1q_f32(s + 4 * (v))));
    TSHI_QUANT_EACH4(TSHI_QUANT_END)
}

/* -- sdot ------------------------------------------------------------------ */

static void tshi_quant_move_dot(tshi_quant_tile *to, const tshi_quant_source *from) {
    if (from->size == TSHI_QUANT_Q8)
        tshi_quant_tiles_neon(to, from, 8, 0);
    else
        tshi_quant_tiles_neon(to, from, 4, 0);
}

/* Adds the products of one tile of W with 4 rows of X, of which `rows` exist, to `sums`. */
TSHI_DOT TSHI_INLINE void tshi_quant_tile_dot(const tshi_quant_tile *w, int size,
                                              const tshi_quant_input *x, float *sums,
                                              int64_t stride, int rows) {
    const int has_min = size == TSHI_QUANT_Q4_1, signs = size == TSHI_QUANT_Q8;
    int32x4_t n[4][4]; /* n[r][v]: sums of row r of X and columns 4 v to 4 v + 3 of Y */
#define TSHI_QUANT_BEGIN(r)                                                                        \
    n[r][0] = n[r][1] = n[r][2] = n[r][3] = vdupq_n_s32(signs ? 0 : x[r].offset);
#define TSHI_QUANT_X(r) q[r] = vld1q_s8(x[r].q + 16 * h);
#define TSHI_QUANT_ADD(r, i)                                                                       \
    n[r][0] = vdotq_laneq_s32(n[r][0], w0, q[r], i);                                               \
    n[r][1] = vdotq_laneq_s32(n[r][1], w1, q[r], i);                                               \
    n[r][2] = vdotq_laneq_s32(n[r][2], w2, q[r], i);                                               \
    n[r][3] = vdotq_laneq_s32(n[r][3], w3, q[r], i);
#define TSHI_QUANT_STEP(i) /* adds the products of elements 16 h + 4 i to 16 h + 4 i + 3 */        \
    {                                                                                              \
        const signed char *at = (const signed char *)w->w[4 * h + i];                              \
        const int8x16_t w0 = vld1q_s8(at), w1 = vld1q_s8(at + 16);                                 \
        const int8x16_t w2 = vld1q_s8(at + 32), w3 = vld1q_s8(at + 48);                            \
        TSHI_QUANT_ADD(0, i) TSHI_QUANT_ADD(1, i) TSHI_QUANT_ADD(2, i) TSHI_QUANT_ADD(3, i)        \
    }
#define TSHI_QUANT_LAST(r)                                                                         \
    if (rows > r) tshi_quant_block_neon(w, has_min, x + r, n[r], sums + r * stride);
    TSHI_QUANT_EACH4(TSHI_QUANT_BEGIN)
    for (int h = 0; h < 2; h++) {
        int8x16_t q[4];
        TSHI_QUANT_EACH4(TSHI_QUANT_X)
        TSHI_QUANT_EACH4(TSHI_QUANT_STEP)
    }
    TSHI_QUANT_EACH4(TSHI_QUANT_LAST)
}

/* Defines tshi_quant_dot_isa, which implements tshi_quant_kernel.dot: tile by tile, 4 rows of X at
 * a time, or, if there are no tiles (w is NULL; X has up to 4 rows then), reading W in place. */
#define TSHI_QUANT_DOT(isa, TARGET)                                                                \
    TARGET static void tshi_quant_dot_##isa(const tshi_quant_tile *w,                              \
                                            const tshi_quant_source *from,                         \
                                            const tshi_quant_input *x, float *sums,                \
                                            int64_t stride, int rows) {                            \
        if (!w) {                                                                                  \
            tshi_quant_few_neon(from, x, sums, stride, rows);                                      \
            return;                                                                                \
        }                                                                                          \
        for (int r = 0; r < rows; r += 4)                                                          \
            for (int b = 0; b < from->count; b++)                                                  \
                tshi_quant_tile_##isa(w + b, from->size, x + TSHI_QUANT_FEW * b + r,               \
                                      sums + r * stride, stride, rows - r);                        \
    }
TSHI_QUANT_DOT(dot, TSHI_DOT)

/* -- smmla ----------------------------------------------------------------- */

#if TSHI_NEON_MM
static void tshi_quant_move_mm(tshi_quant_tile *to, const tshi_quant_source *from) {
    if (from->size == TSHI_QUANT_Q8)
        tshi_quant_tiles_neon(to, from, 8, 1);
    else
        tshi_quant_tiles_neon(to, from, 4, 1);
}

/* Adds the products of one tile of W with 4 rows of X, of which `rows` exist, to `sums`. */
TSHI_MM TSHI_INLINE void tshi_quant_tile_mm(const tshi_quant_tile *w, int size,
                                            const tshi_quant_input *x, float *sums, int64_t stride,
                                            int rows) {
    const int has_min = size == TSHI_QUANT_Q4_1, signs = size == TSHI_QUANT_Q8;
    /* n[p][c]: sums of rows 2 p and 2 p + 1 of X and columns 2 c and 2 c + 1 of Y */
    int32x4_t n[2][8];
#define TSHI_QUANT_EACH8(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#define TSHI_QUANT_FIRST(p) /* initial value of the sums of rows 2 p and 2 p + 1 of X */           \
    vcombine_s32(vdup_n_s32(signs ? 0 : x[2 * (p)].offset),                                        \
                 vdup_n_s32(signs ? 0 : x[2 * (p) + 1].offset))
#define TSHI_QUANT_BEGIN2(c) n[0][c] = first, n[1][c] = second;
#define TSHI_QUANT_X2(p)     /* elements 8 g to 8 g + 7 of rows 2 p and 2 p + 1 of X */            \
    vcombine_s8(vld1_s8(x[2 * (p)].q + 8 * g), vld1_s8(x[2 * (p) + 1].q + 8 * g))
#define TSHI_QUANT_ADD2(c)                                                                         \
    {                                                                                              \
        const int8x16_t w2 = vld1q_s8(at + 16 * (c));                                              \
        n[0][c] = vmmlaq_s32(n[0][c], x0, w2);                                                     \
        n[1][c] = vmmlaq_s32(n[1][c], x1, w2);                                                     \
    }
#define TSHI_QUANT_64(x)      vreinterpretq_s64_s32(x)
#define TSHI_QUANT_PART(r, v) /* sums of row r of X and columns 4 v to 4 v + 3 of Y */             \
    vreinterpretq_s32_s64((r) % 2 ? vzip2q_s64(TSHI_QUANT_64(n[(r) / 2][2 * (v)]),                 \
                                               TSHI_QUANT_64(n[(r) / 2][2 * (v) + 1]))             \
                                  : vzip1q_s64(TSHI_QUANT_64(n[(r) / 2][2 * (v)]),                 \
                                               TSHI_QUANT_64(n[(r) / 2][2 * (v) + 1])))
#define TSHI_QUANT_LAST2(r)                                                                        \
    if (rows > r) {                                                                                \
        const int32x4_t all[4] = {TSHI_QUANT_PART(r, 0), TSHI_QUANT_PART(r, 1),                    \
                                  TSHI_QUANT_PART(r, 2), TSHI_QUANT_PART(r, 3)};                   \
        tshi_quant_block_neon(w, has_min, x + r, all, sums + r * stride);                          \
    }
    const int32x4_t first = TSHI_QUANT_FIRST(0), second = TSHI_QUANT_FIRST(1);
    TSHI_QUANT_EACH8(TSHI_QUANT_BEGIN2)
    for (int g = 0; g < 4; g++) {
        const signed char *at = (const signed char *)w->w[2 * g];
        const int8x16_t x0 = TSHI_QUANT_X2(0), x1 = TSHI_QUANT_X2(1);
        TSHI_QUANT_EACH8(TSHI_QUANT_ADD2)
    }
    TSHI_QUANT_EACH4(TSHI_QUANT_LAST2)
}

TSHI_QUANT_DOT(mm, TSHI_MM)
#endif
#undef TSHI_QUANT_EACH4
#undef TSHI_QUANT_DOT
#undef TSHI_QUANT_SCALE
#undef TSHI_QUANT_KEEP
#undef TSHI_QUANT_SUMS
#undef TSHI_QUANT_LOAD
#undef TSHI_QUANT_DOT2
#undef TSHI_QUANT_ROW
#undef TSHI_QUANT_PUT
#undef TSHI_QUANT_WIDTHS
#undef TSHI_QUANT_END
#undef TSHI_QUANT_BEGIN
#undef TSHI_QUANT_X
#undef TSHI_QUANT_ADD
#undef TSHI_QUANT_STEP
#undef TSHI_QUANT_LAST
#undef TSHI_QUANT_EACH8
#undef TSHI_QUANT_FIRST
#undef TSHI_QUANT_BEGIN2
#undef TSHI_QUANT_X2
#undef TSHI_QUANT_ADD2
#undef TSHI_QUANT_64
#undef TSHI_QUANT_PART
#undef TSHI_QUANT_LAST2
#endif /* TSHI_NEON_DOT */
