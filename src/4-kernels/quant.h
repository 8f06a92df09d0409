/* ========================================================================== */
/* >>quant                                            MARK: - quant (private) */
/* Products with quantised weights: 8-bit inputs, sums in integers.           */
/* Needs: >>dtype.                                                            */
/* ========================================================================== */

/* Y = X W^T + b. W, shape (out, in), consists of blocks of 32 integers w with a scale s. X is
 * quantised by blocks in the same way, to 8 bits: x is about t q, where q is an integer and the
 * scale t a float. Then
 *
 *     y = sum over the blocks of (s t) * (sum over 32 elements of w q)
 *
 * and the inner sum is one of integers. It is exact; the outer sum adds floats in the order of the
 * blocks, where each product is rounded, then each sum. If blocks have a minimum m (TSH_Q4_1), a
 * weight is s w + m, and m times t (the sum of q) is added after each block's product. So an
 * element of Y depends only on its rows of X and W: not on the number of rows, not on threads, not
 * on the instruction set. (The compiler must not contract a product and a sum into an FMA: -std=c99
 * or -ffp-contract=off.)
 *
 * Columns of Y are computed 16 at a time, as many as a register has lanes. Their weights are moved
 * from blocks to tiles, where four successive elements of 16 rows of W lie side by side: one
 * instruction (VNNI) then adds four products in every lane. A few blocks of a row are moved at a
 * time, so that tiles stay in the L1 cache, and serve all rows of X. With few rows of X, the next
 * block is moved while products with the current one are added, and the time is that of reading
 * W. */
enum {
    TSHI_QUANT_COLUMNS = 16, /* columns of Y, and rows of W, per tile */
    TSHI_QUANT_STRIP = 8,    /* blocks of each row of W that are moved to tiles at a time */
    TSHI_QUANT_WIDE = 4,     /* tiles computed side by side if X has many rows */
    TSHI_QUANT_FEW = 8,      /* max rows of X that are multiplied with a tile at a time */
    TSHI_QUANT_Q8 = 34,      /* bytes of a block of TSH_Q8_0 */
    TSHI_QUANT_Q4 = 18,      /* bytes of a block of TSH_Q4_0 */
    TSHI_QUANT_Q4_1 = 20     /* bytes of a block of TSH_Q4_1 */
};

/* One block of 32 weights of each of 16 rows of W, laid out for the kernels; 64-byte aligned. */
typedef struct tshi_quant_tile {
    /* w[i][c][j]: element 4 i + j of row c, plus 128 (TSH_Q8_0) or 8 (TSH_Q4_0) */
    unsigned char w[8][16][4];
    float scale[16], min[16]; /* scale and minimum of each row's block; min: TSH_Q4_1 only */
} tshi_quant_tile;

/* A block of 32 elements of a row of X, quantised. */
typedef struct tshi_quant_input {
    signed char q[TSHI_DTYPE_BLOCK];
    float scale, sum; /* sum: scale times the sum of q */
    int32_t offset; /* -128, -8 or 0 times the sum of q: cancels what a tile adds to its weights */
} tshi_quant_input;

/* What a kernel reads of W: `count` successive blocks of each of 16 rows. */
typedef struct tshi_quant_source {
    const unsigned char *w; /* address of the first block of the first row */
    int64_t row;            /* bytes from row to row of W */
    int rows;               /* number of rows left in W; if below 16, the last one is repeated */
    int count, size;        /* number of blocks per row; bytes of a block */
    uintptr_t ahead;        /* address from which as many bytes are prefetched as are read */
} tshi_quant_source;

/* Quantises a block of 32 elements of a row of X; offset: what tiles of W add to each weight. */
typedef void (*tshi_quant_input_fn)(const tsh_real *x, int32_t offset, tshi_quant_input *to);
/* Unpacks from->count blocks of each of 16 rows of W into tiles, one for each block. */
typedef void (*tshi_quant_move_fn)(tshi_quant_tile *to, const tshi_quant_source *from);
/* Adds products with from->count blocks of 16 rows of W to the sums of 16 columns of Y, for 1 to 8
 * rows of X. w: the blocks as tiles; NULL: reads from->w instead (not all kernels can). x[8 b + r]:
 * block b of row r of X. stride: floats from row to row of sums. */
typedef void (*tshi_quant_dot_fn)(const tshi_quant_tile *w, const tshi_quant_source *from,
                                  const tshi_quant_input *x, float *sums, int64_t stride, int rows);

struct tshi_quant_kernel {
    const char *name;
    tshi_quant_input_fn input;
    tshi_quant_move_fn move;
    tshi_quant_dot_fn dot;
    int direct; /* max rows of X for which dot reads 16 rows of W without tiles; 0: it never does */
    /* (optional) Called with 1 before, and with 0 after, calls of dot on a thread, as
     * tshi_gemm_kernel.tiles. */
    void (*tiles)(int begin);
};

/* -- the portable kernels for quantised weights ----------------------------- */

/* Implements tshi_quant_kernel.input: scale is the largest magnitude / 127, and q is
 * x / scale, rounded to nearest, ties to even. (Adding 1.5 * 2^23 rounds: the low 8 bits of the sum
 * are q.) If an element is NaN or infinite, so is the scale. To find the largest magnitude, the
 * floats' bits are compared as integers. */
static void tshi_quant_block(const tsh_real *x, int32_t offset, tshi_quant_input *to) {
    float y[TSHI_DTYPE_BLOCK], inverse;
    int32_t most = 0, sum = 0, bits;
    for (int i = 0; i < TSHI_DTYPE_BLOCK; i++) y[i] = (float)x[i];
    for (int i = 0; i < TSHI_DTYPE_BLOCK; i++) {
        memcpy(&bits, &y[i], sizeof bits);
        bits &= 0x7FFFFFFF;
        most = bits > most ? bits : most;
    }
    to->scale = tshi_dtype_float_of((uint32_t)most) / 127;
    inverse = to->scale > FLT_MIN ? 1 / to->scale : 0;
    for (int i = 0; i < TSHI_DTYPE_BLOCK; i++) {
        const float rounded = y[i] * inverse + 12582912.0f;
        memcpy(&bits, &rounded, sizeof bits);
        to->q[i] = (signed char)(unsigned char)((uint32_t)bits & 0xFFu);
    }
    for (int i = 0; i < TSHI_DTYPE_BLOCK; i++) sum += to->q[i];
    to->offset = -offset * sum;
    to->sum = to->scale * (float)sum;
}

static void tshi_quant_move_c(tshi_quant_tile *to, const tshi_quant_source *from) {
    for (int b = 0; b < from->count; b++)
        for (int c = 0; c < TSHI_QUANT_COLUMNS; c++) {
            const int row = c < from->rows ? c : from->rows - 1;
            const unsigned char *w = from->w + row * from->row + b * from->size;
            to[b].scale[c] = tshi_dtype_scale(w);
            w += 2;
            if (from->size == TSHI_QUANT_Q4_1) {
                to[b].min[c] = tshi_dtype_scale(w);
                w += 2;
            }
            for (int i = 0; i < TSHI_DTYPE_BLOCK; i++)
                to[b].w[i / 4][c][i % 4] =
                    (unsigned char)(from->size == TSHI_QUANT_Q8 ? w[i] ^ 128
                                    : i < 16                    ? w[i] & 15
                                                                : w[i - 16] >> 4);
        }
}

static void tshi_quant_dot_c(const tshi_quant_tile *w, const tshi_quant_source *from,
                             const tshi_quant_input *x, float *sums, int64_t stride, int rows) {
    const int has_min = from->size == TSHI_QUANT_Q4_1;
    for (int r = 0; r < rows; r++, sums += stride)
        for (int b = 0; b < from->count; b++) {
            const tshi_quant_input *y = x + TSHI_QUANT_FEW * b + r;
            int32_t sum[TSHI_QUANT_COLUMNS];
            for (int c = 0; c < TSHI_QUANT_COLUMNS; c++) sum[c] = y->offset;
            for (int i = 0; i < TSHI_DTYPE_BLOCK; i++)
                for (int c = 0; c < TSHI_QUANT_COLUMNS; c++)
                    sum[c] += y->q[i] * (int)w[b].w[i / 4][c][i % 4];
            for (int c = 0; c < TSHI_QUANT_COLUMNS; c++)
                sums[c] += w[b].scale[c] * y->scale * (float)sum[c];
            for (int c = 0; c < TSHI_QUANT_COLUMNS && has_min; c++) sums[c] += w[b].min[c] * y->sum;
        }
}
