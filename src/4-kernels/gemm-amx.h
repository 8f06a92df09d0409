/* ========================================================================== */
/* >>gemm-amx                                      MARK: - gemm-amx (private) */
/* Products of pairs of bf16 with AMX, whose registers are tiles.             */
/* Needs: >>gemm-few.                                                         */
/* ========================================================================== */

/* TSHI_GEMM_AMX is 1 if kernels for AMX are compiled: for Linux on x86-64, if the compiler has the
 * intrinsics. A test that defines TSHI_AMX_MODEL, TSHI_AMX and the macros of tile instructions
 * itself gets the same kernels without AMX. */
#if TSHI_GEMM_BF16S && defined(__linux__) && !defined(__ILP32__) &&                                \
    (defined(TSHI_AMX_MODEL) || (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11))
#define TSHI_GEMM_AMX 1
#else
#define TSHI_GEMM_AMX 0
#endif

#if TSHI_GEMM_AMX
/* Makes the compiler finish pending stores before the tile instructions that follow: gcc's
 * intrinsics for these do not tell it that they read memory. */
#define TSHI_AMX_STORED() __asm__ volatile("" : : : "memory")
#if !defined(TSHI_AMX_MODEL)
#define TSHI_AMX                                                                                   \
    __attribute__((target("amx-tile,amx-bf16,amx-int8,avx512vnni,avx512bf16,avx512f,avx512bw,"     \
                          "avx512dq,avx512vl,avx2,fma,f16c")))
#define TSHI_AMX_CONFIG(config)          _tile_loadconfig(config)
#define TSHI_AMX_RELEASE()               _tile_release()
#define TSHI_AMX_ZERO(tile)              _tile_zero(tile)
#define TSHI_AMX_LOAD(tile, from, row)   _tile_loadd(tile, from, (size_t)(row))
#define TSHI_AMX_STORE(tile, to, row)    _tile_stored(tile, to, (size_t)(row))
#define TSHI_AMX_BF16(sum, a, b)         _tile_dpbf16ps(sum, a, b)
#define TSHI_AMX_INT8(sum, a, b)         _tile_dpbssd(sum, a, b)

#endif

/* The layout of tile registers, as the instruction LDTILECFG reads it. */
typedef struct tshi_gemm_amx_config {
    unsigned char palette, start, reserved[14]; /* palette 1 has 8 tiles of up to 16 x 64 bytes */
    unsigned short bytes[16];                   /* bytes of a row of each tile */
    unsigned char rows[16];                     /* rows of each tile */
} tshi_gemm_amx_config;

/* Configures the tile registers of the calling thread for products C += A B. C is in tiles 0 to 3,
 * each of shape (rows, bytes / 4); A in 4 and 5, of shape (rows, depth); B in 6 and 7, of shape
 * (depth, bytes / 4). Elements are words of 4 bytes. */
TSHI_AMX static void tshi_gemm_amx_configure(int rows, int depth, int bytes) {
    tshi_gemm_amx_config config;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int i = 0; i < 8; i++) {
        config.rows[i] = (unsigned char)(i < 6 ? rows : depth);
        config.bytes[i] = (unsigned short)(i == 4 || i == 5 ? 4 * depth : bytes);
    }
    TSHI_AMX_STORED();
    TSHI_AMX_CONFIG(&config);
}

/* Implements tshi_gemm_kernel.tiles. */
TSHI_AMX static void tshi_gemm_tiles_amx(int begin) {
    if (begin)
        tshi_gemm_amx_configure(16, 16, 64);
    else
        TSHI_AMX_RELEASE();
}

/* THE ORDER OF SUMS. One instruction multiplies a step, 16 pairs of elements along k. It adds the
 * first elements' products apart from the second ones', by fused multiply-adds, then both to C:
 *
 *     even = fma(a[30], b[30], .. fma(a[2], b[2], a[0] b[0])),   acc = acc + (even + odd)
 *
 * rounded to nearest even, where numbers below 2^-126 in magnitude count as 0. Each slice of k
 * begins with a new step, and its last step is filled up with zeros. All functions below add in
 * this order, so an element of C has the same bits whichever of them computes it, for any rows and
 * columns. */

/* Adds the products of `steps` steps (16 pairs of elements along k each) to C, in tiles 0 to 3.
 * row_a, step_a: bytes from row to row and from step to step of A; row_b: bytes from row to row of
 * B. high 1: A has 32 rows, not 16; wide 1: B has 32 columns, not 16; both are constants after
 * inlining. */
TSHI_AMX TSHI_INLINE void tshi_gemm_steps_of_amx(const char *a, int64_t row_a, int64_t step_a,
                                                 const char *b, int64_t row_b, int64_t steps,
                                                 const int high, const int wide,
                                                 tshi_gemm_walk *walk) {
    for (; steps > 0; steps--, a += step_a, b += 16 * row_b) {
        TSHI_AMX_LOAD(6, b, row_b);
        TSHI_AMX_LOAD(4, a, row_a);
        TSHI_AMX_BF16(0, 4, 6);
        if (wide) {
            TSHI_AMX_LOAD(7, b + 64, row_b);
            TSHI_AMX_BF16(1, 4, 7);
        }
        if (high) {
            TSHI_AMX_LOAD(5, a + 16 * row_a, row_a);
            TSHI_AMX_BF16(2, 5, 6);
        }
        if (high && wide) TSHI_AMX_BF16(3, 5, 7);
        for (int i = 0; i < TSHI_GEMM_FETCH; i++) tshi_gemm_fetch(walk);
    }
}

/* Does what tshi_gemm_steps_of_amx does, for high and wide that are no constants. */
TSHI_AMX static void tshi_gemm_steps_amx(const char *a, int64_t row_a, int64_t step_a,
                                         const char *b, int64_t row_b, int64_t steps, int high,
                                         int wide, tshi_gemm_walk *walk) {
    TSHI_AMX_STORED();
    if (high && wide)
        tshi_gemm_steps_of_amx(a, row_a, step_a, b, row_b, steps, 1, 1, walk);
    else if (high)
        tshi_gemm_steps_of_amx(a, row_a, step_a, b, row_b, steps, 1, 0, walk);
    else if (wide)
        tshi_gemm_steps_of_amx(a, row_a, step_a, b, row_b, steps, 0, 1, walk);
    else
        tshi_gemm_steps_of_amx(a, row_a, step_a, b, row_b, steps, 0, 0, walk);
}

/* Copies one step of `rows` rows of A, `words` words each, to 16 rows of 16 words, padded with 0.
 * The words of a row are contiguous or, if rsa is 1, csa apart. */
TSHI_AMX TSHI_OUTLINE void tshi_gemm_stage_amx(float *to, const tshi_gemm_word *a, int64_t rsa,
                                               int64_t csa, int rows, int words) {
    const int lanes = rsa == 1 ? rows : words, lines = rsa == 1 ? words : rows;
    const int64_t next = rsa == 1 ? csa : rsa;
    const __mmask16 mask = (__mmask16)tshi_gemm_mask(lanes);
    __m512 r[16], t0, t1, t2, t3;
    for (int i = 0; i < 16; i++)
        r[i] = i < lines ? _mm512_maskz_loadu_ps(mask, (const float *)a + i * next)
                         : _mm512_setzero_ps();
    if (rsa == 1) {
        TSHI_GEMM_TRANSPOSE16
    }
    for (int i = 0; i < 16; i++) _mm512_store_ps(to + 16 * i, r[i]);
}

/* Returns 16 elements of a row of D, from element `at` on, as floats. bf16: 1 if D is of bf16. */
TSHI_AMX TSHI_INLINE __m512 tshi_gemm_get_amx(const char *row, int at, int bf16) {
    if (!bf16) return _mm512_loadu_ps((const float *)(const void *)row + at);
    return _mm512_castsi512_ps(_mm512_slli_epi32(
        _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)(row + 2 * at))),
        16));
}

/* Stores 16 floats as bf16. */
TSHI_AMX TSHI_INLINE void tshi_gemm_put_bf16(char *to, __m512 x) {
    const __m512i rounded = _mm512_srli_epi32(tshi_gemm_round(x), 16);
    _mm256_storeu_si256((__m256i *)(void *)to, _mm512_cvtepi32_epi16(rounded));
}

/* Stores a tile of C: alpha times the sums, plus D. sums: shape (rows, width). If alpha is 1 and D
 * is not added, none of the values is below 2^-126 in magnitude except 0, as AMX makes such sums 0;
 * so the instruction that rounds two registers to bf16 gives the same bits as tshi_gemm_round. */
TSHI_AMX TSHI_INLINE void tshi_gemm_tile_out_amx(const tshi_gemm_tile *t, const float *sums,
                                                 int rows, const int width) {
    const __m512 alpha = _mm512_set1_ps(t->alpha), zero = _mm512_setzero_ps();
    const int add = t->add, whole = t->bf16 && !add && t->alpha == 1, short_d = t->bf16_d;
    const int64_t size = t->bf16 ? 2 : 4, rsd = t->rsd * (short_d ? 2 : 4), rsc = t->rsc * size;
    const char *d = (const char *)t->d;
    char *c = (char *)t->c;
    for (int i = 0; i < rows; i++, sums += width, c += rsc, d += add ? rsd : 0) {
        const __m512 low = _mm512_load_ps(sums), high = _mm512_load_ps(sums + width - 16);
        const __m512 d0 = add ? tshi_gemm_get_amx(d, 0, short_d) : zero;
        const __m512 d1 = add ? tshi_gemm_get_amx(d, width - 16, short_d) : zero;
        const __m512 x = _mm512_fmadd_ps(alpha, low, d0), y = _mm512_fmadd_ps(alpha, high, d1);
        if (whole && width == 32) {
            _mm512_storeu_si512(c, tshi_gemm_round2(x, y));
        } else if (size == 2) {
            tshi_gemm_put_bf16(c, x);
            tshi_gemm_put_bf16(c + 2 * (width - 16), y);
        } else {
            _mm512_storeu_ps(c, x);
            _mm512_storeu_ps(c + 4 * (width - 16), y);
        }
    }
}

/* Stores the sums in tiles 0 to 3 as floats of shape (32 or 16, width), or loads them if `load` is
 * 1. */
TSHI_AMX TSHI_INLINE void tshi_gemm_keep_amx(float *sums, int width, int high, int wide,
                                             const int load) {
#define TSHI_GEMM_KEEP(tile, at)                                                                   \
    if (load) {                                                                                    \
        TSHI_AMX_LOAD(tile, at, 4 * width);                                                        \
    } else {                                                                                       \
        TSHI_AMX_STORE(tile, at, 4 * width);                                                       \
    }
    TSHI_GEMM_KEEP(0, sums)
    if (wide) { TSHI_GEMM_KEEP(1, sums + 16) }
    if (high) { TSHI_GEMM_KEEP(2, sums + 16 * width) }
    if (high && wide) { TSHI_GEMM_KEEP(3, sums + 16 * width + 16) }
#undef TSHI_GEMM_KEEP
}

/* Implements tshi_gemm_kernel.pairs with AMX. Where the tile instructions cannot read a step (16
 * words along k) in place, because rows or words are missing, or A's words lie column by column,
 * the step is copied to a buffer first. */
TSHI_AMX static void tshi_gemm_tile_amx(const tshi_gemm_tile *t, int rows, int cols) {
    enum { LANES = 16 };
    const int high = rows > LANES, wide = cols > LANES; /* 1: two tiles, not one */
    __attribute__((aligned(64))) float c[32 * 32], a[32 * 16], b[16 * 32];
    const int width = wide ? 32 : 16, packed = t->rsa != 1 && t->csa != 1;
    const int64_t steps = packed || (t->csa == 1 && rows % LANES == 0) ? t->k / LANES : 0;
    const int64_t row_b = 4 * t->rsb;
    if (t->later) {
        tshi_gemm_keep_amx(t->kept, width, high, wide, 1);
    } else {
        TSHI_AMX_ZERO(0);
        if (wide) TSHI_AMX_ZERO(1);
        if (high) TSHI_AMX_ZERO(2);
        if (high && wide) TSHI_AMX_ZERO(3);
    }
    tshi_gemm_steps_amx((const char *)t->a, 4 * t->rsa, 4 * LANES * t->csa, (const char *)t->b,
                        row_b, steps, high, wide, t->walk);
    for (int64_t p = steps * LANES; p < t->k; p += LANES) {
        const int words = (int)tshi_base_min(LANES, t->k - p);
        const tshi_gemm_word *from = t->a + p * t->csa;
        const float *of_b = t->b + p * t->rsb;
        tshi_gemm_stage_amx(a, from, t->rsa, t->csa, rows < LANES ? rows : LANES, words);
        if (high)
            tshi_gemm_stage_amx(a + 256, from + LANES * t->rsa, t->rsa, t->csa, rows - LANES,
                                words);
        if (words < LANES) memset(b, 0, sizeof b);
        for (int i = 0; i < words && words < LANES; i++)
            memcpy(b + i * width, of_b + i * t->rsb, (size_t)width * sizeof *b);
        if (words < LANES) of_b = b;
        tshi_gemm_steps_amx((const char *)a, 64, 0, (const char *)of_b,
                            words < LANES ? 4 * width : row_b, 1, high, wide, t->walk);
    }
    tshi_gemm_keep_amx(t->more ? t->kept : c, width, high, wide, 0);
    if (!t->more) tshi_gemm_tile_out_amx(t, c, rows, width);
}

/* Implements tshi_gemm_kernel.tile, for up to 32 rows, the mr of the kernel for AMX: calls the
 * micro-kernel for AVX-512 for 12 rows at a time. */
static void tshi_gemm_tile_tall(const tshi_gemm_tile *t, int rows, int cols) {
    tshi_gemm_tile part = *t;
    for (; rows > 0; rows -= 12) {
        tshi_gemm_tile_avx512(&part, rows < 12 ? rows : 12, cols);
        part.a += 12 * t->rsa;
        part.c += 12 * t->rsc;
        part.d += t->add ? 12 * t->rsd : 0;
    }
}

/* Implements tshi_gemm_kernel.strip with AMX. */
TSHI_AMX static void tshi_gemm_strip_amx(float *to, int valid, int64_t k, const tshi_matrix *m,
                                         tshi_gemm_form form) {
    const int64_t size = form == TSHI_GEMM_PAIRS ? 2 : 4;
    __attribute__((aligned(64))) float words[256]; /* word p of row i is words[16 p + i] */
    for (int64_t q = 0; q < k; q += 32, to += 512)
        for (int i = 0; i < valid; i += 16) {
            const int rows = (int)tshi_base_min(16, valid - i);
            const tshi_matrix from = tshi_gemm_from(*m, i, q);
            const char *const src = (const char *)from.data;
            const int64_t left = tshi_base_min(32, k - q);
            const uint32_t mask = tshi_gemm_mask(left);
            float *const tile = to + 16 * i;
            if (m->column != 1) {
                if (left < 32) memset(words, 0, sizeof words);
                if (!tshi_gemm_pack_avx512(words, 16, rows, left, &from, form))
                    tshi_gemm_pack_pairs(words, 16, rows, left, &from);
                tshi_gemm_stage_amx(tile, words, 1, 16, 16, 16);
                continue;
            }
            for (int l = 0; l < rows; l++)
                _mm512_store_ps(tile + 16 * l, form == TSHI_GEMM_PAIRS
                                                   ? tshi_gemm_load_row(TSHI_GEMM_PAIRS,
                                                                        src + l * m->row * size,
                                                                        mask)
                                                   : tshi_gemm_load_row(TSHI_GEMM_ROUNDED,
                                                                        src + l * m->row * size,
                                                                        mask));
            for (int l = rows; l < 16; l++) _mm512_store_ps(tile + 16 * l, _mm512_setzero_ps());
        }
}

/* Adds alpha times the sums of a slice of k to `out`, 16 columns of up to 8 rows of C. c: these
 * sums, transposed, of shape (16, width). */
TSHI_AMX TSHI_INLINE void tshi_gemm_few_add_amx(float (*out)[16], const float *c, int rows,
                                                int width, float alpha) {
    for (int i = 0; i < rows; i++) {
        __attribute__((aligned(64))) float sums[16];
        for (int j = 0; j < 16; j++) sums[j] = c[j * width + i];
        _mm512_store_ps(out[i], _mm512_fmadd_ps(_mm512_set1_ps(alpha), _mm512_load_ps(sums),
                                                _mm512_load_ps(out[i])));
    }
}

/* Computes 16 columns of C, from column col on, for tshi_gemm_few_amx, which configures the tiles.
 * It computes C^T = B^T A^T: the left operand of the tile instructions is 16 columns of B, read in
 * place, the right one is A, packed to `width` rows. It prefetches as tshi_gemm_few_rows_avx512
 * does. */
TSHI_AMX static void tshi_gemm_few_columns_amx(const tshi_gemm_tile *t, int col, int cols, int rows,
                                               int width) {
    __attribute__((aligned(64))) float out[8][16], c[16 * 8], a_end[16 * 8];
    __attribute__((aligned(64))) char b_end[16][64];
    const int64_t inc = 2 * t->csb;
    const char *b = (const char *)t->b + col * inc, *a = (const char *)t->a;
    const int64_t more = 8 * inc < TSHI_GEMM_NEAR ? (int64_t)TSHI_GEMM_NEAR
                                                  : tshi_base_min(8 * inc, TSHI_GEMM_AHEAD);
    uintptr_t end = (uintptr_t)b + (uintptr_t)((cols + t->after - col) * inc); /* end of B */
    uintptr_t ahead = (uintptr_t)b + (uintptr_t)(16 * inc + more);
    for (int i = 0; i < rows; i++)
        _mm512_store_ps(out[i],
                        t->add ? _mm512_loadu_ps(t->d + i * t->rsd + col) : _mm512_setzero_ps());
    for (int64_t p = 0; p < t->k; p += t->slice) {
        int64_t left = tshi_base_min(t->slice, t->k - p);
        TSHI_AMX_ZERO(0);
        TSHI_AMX_STORED();
        for (; left >= 32; left -= 32, b += 64, a += 64 * width) {
            ahead += 1024;
            if (ahead >= end) { /* B ends: goes on with t->then or, if it is 0, with b */
                ahead = t->then ? ahead - end + t->then : (uintptr_t)b;
                end = (uintptr_t)-1;
            }
            for (unsigned l = 0; l < 16; l++) TSHI_PREFETCH_L2((const void *)(ahead + 64u * l));
            TSHI_AMX_LOAD(4, b, inc);
            TSHI_AMX_LOAD(6, a, 4 * width);
            TSHI_AMX_BF16(0, 4, 6);
        }
        if (left > 0) {
            memset(a_end, 0, sizeof a_end);
            memset(b_end, 0, sizeof b_end);
            memcpy(a_end, a, (size_t)((left + 1) / 2 * 4 * width));
            for (int i = 0; i < 16; i++) memcpy(b_end[i], b + i * inc, (size_t)(2 * left));
            TSHI_AMX_STORED();
            TSHI_AMX_LOAD(4, b_end, 64);
            TSHI_AMX_LOAD(6, a_end, 4 * width);
            TSHI_AMX_BF16(0, 4, 6);
        }
        TSHI_AMX_STORE(0, c, 4 * width);
        tshi_gemm_few_add_amx(out, c, rows, width, t->alpha);
    }
    for (int i = 0; i < rows; i++)
        _mm512_storeu_ps(t->c + i * t->rsc + col, _mm512_load_ps(out[i]));
}

/* Implements tshi_gemm_kernel.few with AMX. */
TSHI_AMX static void tshi_gemm_few_amx(const tshi_gemm_tile *t, int rows, int cols) {
    const int width = tshi_gemm_few_width(rows);
    if (t->form != TSHI_GEMM_PAIRS) {
        tshi_gemm_few_avx512(t, rows, cols);
        return;
    }
    tshi_gemm_amx_configure(16, 16, 4 * width);
    for (int j = 0; j < cols; j += 16) tshi_gemm_few_columns_amx(t, j, cols, rows, width);
    tshi_gemm_tiles_amx(1);
}

/* Implements tshi_gemm_kernel.stream with AMX. Each step along k reads 32 rows of B, of which it
 * packs 32 columns at a time. */
TSHI_AMX static void tshi_gemm_stream_amx(const tshi_gemm_tile *t, int rows, int cols) {
    const char *const b = (const char *)t->b;
    const __m512 alpha = _mm512_set1_ps(t->alpha);
    const int64_t row = 2 * t->rsb;
    __attribute__((aligned(64))) float words[16 * 32];
    if (t->form != TSHI_GEMM_PAIRS) {
        tshi_gemm_stream_x86(t, rows, cols);
        return;
    }
    tshi_gemm_amx_configure(rows, 16, 64);
    memset(t->sums, 0, (size_t)rows * (size_t)cols * sizeof *t->sums);
    memset(words, 0, sizeof words);
    for (int64_t p = 0; p < t->k; p += 16) {
        const int64_t left = tshi_base_min(32, t->slice - 2 * p); /* rows of B in this step */
        TSHI_AMX_STORED();
        TSHI_AMX_LOAD(4, t->a + p * t->csa, 64);
        if (left < 32) memset(words, 0, sizeof words);
        for (int j = 0; j < cols; j += 32) {
            const int width = cols - j < 32 ? 16 : 32;
            const char *const from = b + 2 * p * row + 2 * j;
            for (int64_t i = 0; i < left; i++)
                TSHI_PREFETCH_L2((const void *)((uintptr_t)from + (uintptr_t)((32 + i) * row)));
            tshi_gemm_pack_across(TSHI_GEMM_PAIRS, words, width, width, left, from, row);
            TSHI_AMX_STORED();
            for (int c = 0; c < width; c += 16) {
                TSHI_AMX_LOAD(0, t->sums + j + c, 4 * (int64_t)cols);
                TSHI_AMX_LOAD(6, words + c, 4 * width);
                TSHI_AMX_BF16(0, 4, 6);
                TSHI_AMX_STORE(0, t->sums + j + c, 4 * (int64_t)cols);
            }
        }
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j += 16) {
            const __m512 d = t->add ? _mm512_loadu_ps(t->d + i * t->rsd + j) : _mm512_setzero_ps();
            _mm512_storeu_ps(t->c + i * t->rsc + j,
                             _mm512_fmadd_ps(alpha, _mm512_loadu_ps(t->sums + i * cols + j), d));
        }
    tshi_gemm_tiles_amx(1);
}
#endif /* TSHI_GEMM_AMX */
