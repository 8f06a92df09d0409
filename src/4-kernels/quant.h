/* ========================================================================== */
/* >>quant                                            MARK: - quant (private) */
/* Products with quantised weights: 8-bit inputs, sums in integers.           */
/* Needs: >>dtype.                                                            */
/* ========================================================================== */

/* Y = X W^T + b, with W (out, in) in blocks of 32 integers w and a scale s. X is quantised by
 * blocks in the same way, to 8 bits: x is about t q, where t is a float. Then
 *
 *     y = sum over the blocks of (s t) * (sum over 32 elements of w q)
 *
 * and the inner sum is one of integers. It is exact; the outer one adds floats in the order of the
 * blocks, each product rounded, then each sum. With a minimum m of the block (TSH_Q4_1) w is
 * s v + m, and after each block's product with v, m times t (the sum of q) is added. So an element
 * of Y depends on its rows of X and W only: not on the number of rows, not on threads, not on the
 * instruction set. (Without an FMA that the compiler makes of a product and a sum: -std=c99 or
 * -ffp-contract=off.)
 *
 * Columns of Y are computed 16 at a time, as many as a register has lanes. Their weights are moved
 * from blocks to tiles, where four successive elements of 16 rows of W lie side by side: one
 * instruction (VNNI) then adds four products in every lane. A few blocks of a row are moved at a
 * time, so that tiles stay in the L1 cache, and serve all rows of X. With few rows, the next block
 * is moved while sums of this one are added to, and the time is that of reading W. */
enum {
    TSHI_QUANT_COLUMNS = 16, /* columns of a tile */
    TSHI_QUANT_STRIP = 8,    /* blocks that are moved to tiles at a time */
    TSHI_QUANT_WIDE = 4,     /* tiles side by side, if there are many rows */
    TSHI_QUANT_FEW = 8,      /* rows of X that share a load of a tile */
    TSHI_QUANT_Q8 = 34,      /* bytes of a block of TSH_Q8_0 */
    TSHI_QUANT_Q4 = 18,      /* of TSH_Q4_0 */
    TSHI_QUANT_Q4_1 = 20     /* of TSH_Q4_1 */
};

/* One block of 32 weights of each of 16 rows of W, laid out for the kernels; 64-byte aligned. */
typedef struct tshi_quant_tile {
    unsigned char w[8][16][4]; /* element 4 i + j of row c at [i][c][j], plus 128 (TSH_Q4_0: 8) */
    float scale[16], min[16];  /* min: of TSH_Q4_1 only */
} tshi_quant_tile;

/* A block of a row of X. */
typedef struct tshi_quant_input {
    signed char q[TSHI_DTYPE_BLOCK];
    float scale, sum; /* sum: scale times the sum of q */
    int32_t offset;   /* -128, -8 or 0 times the sum of q: takes away what that adds in a tile */
} tshi_quant_input;

/* `count` blocks of 16 rows of W. */
typedef struct tshi_quant_source {
    const unsigned char *w; /* the first block */
    int64_t row;            /* bytes from row to row */
    int rows;               /* of fewer than 16, the last one stands for those that are missing */
    int count, size;        /* number of blocks; bytes of a block */
    uintptr_t ahead;        /* address of as many bytes, which are prefetched */
} tshi_quant_source;

/* Moves blocks to tiles. */
typedef void (*tshi_quant_move_fn)(tshi_quant_tile *to, const tshi_quant_source *from);
/* Adds blocks to the sums of 16 columns, for 1 to 8 rows of X. from->w: read, if w is NULL (not by
 * all kernels), else tiles. x: block b of row r at 8 b + r; stride: from row to row of sums. */
typedef void (*tshi_quant_dot_fn)(const tshi_quant_tile *w, const tshi_quant_source *from,
                                  const tshi_quant_input *x, float *sums, int64_t stride, int rows);

typedef struct tshi_quant_kernel {
    const char *name;
    tshi_quant_move_fn move;
    tshi_quant_dot_fn dot;
    int direct; /* limit of rows of X for which dot takes no tiles, of 16 rows of W */
} tshi_quant_kernel;

/* -- the portable kernels --------------------------------------------------- */

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
