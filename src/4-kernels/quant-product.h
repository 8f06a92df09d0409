/* ========================================================================== */
/* >>quant-product                            MARK: - quant-product (private) */
/* Products with quantised weights: their kernels; Y is divided among threads. */
/* Needs: >>quant-neon >>quant-amx.                                           */
/* ========================================================================== */

/* The kernels of quantised products. >>isa says which one runs. */
static const tshi_quant_kernel tshi_quant_kernel_c = {"c", tshi_quant_block, tshi_quant_move_c,
                                                      tshi_quant_dot_c, 0, NULL};
#if TSHI_X86
static const tshi_quant_kernel tshi_quant_kernel_avx2 = {"avx2", tshi_quant_block,
                                                         tshi_quant_move_avx2, tshi_quant_dot_avx2,
                                                         1, NULL};
static const tshi_quant_kernel tshi_quant_kernel_vnni = {
    "vnni", TSHI_QUANT_INPUT_VNNI, tshi_quant_move_vnni, tshi_quant_dot_vnni, TSHI_QUANT_FEW, NULL};
#endif
#if TSHI_GEMM_AMX
static const tshi_quant_kernel tshi_quant_kernel_amx = {
    "amx",          TSHI_QUANT_INPUT_VNNI, tshi_quant_move_amx, tshi_quant_dot_amx,
    TSHI_QUANT_FEW, tshi_quant_tiles_amx};
#endif
#if TSHI_NEON_DOT
static const tshi_quant_kernel tshi_quant_kernel_dot = {"dotprod", tshi_quant_block,
                                                        tshi_quant_move_dot, tshi_quant_dot_dot, 4,
                                                        NULL};
#endif
#if TSHI_NEON_MM
static const tshi_quant_kernel tshi_quant_kernel_mm = {"i8mm", tshi_quant_block,
                                                       tshi_quant_move_mm, tshi_quant_dot_mm, 4,
                                                       NULL};
#endif

#undef TSHI_QUANT_INPUT_VNNI

/* -- the product Y = X W^T + b with a quantised W -------------------------- */

/* A product Y = X W^T + b, whose columns are divided among threads. */
typedef struct tshi_quant_job {
    const tshi_quant_kernel *kernel;
    const unsigned char *w;  /* W, shape (outs, blocks); a block has `size` bytes */
    tshi_matrix from;        /* X, shape (rows, 32 * blocks) */
    tshi_quant_input *x;     /* X quantised, shape (rows / 8 rounded up, blocks, 8) */
    const tshi_matrix *bias; /* b, broadcast to (rows, outs); NULL: there is none */
    tshi_matrix y;           /* Y, shape (rows, outs), rows contiguous */
    int64_t rows, outs, blocks;
    int size, wide; /* size: bytes of a block of W; wide: number of tiles computed side by side */
    char *scratch;  /* for each piece of Y: tiles, then sums of shape (rows, 16 * wide) */
    size_t each;    /* bytes of scratch for a piece of Y */
} tshi_quant_job;

/* Quantises the rows [from, to) of X, on any thread (a tshi_team_fn). */
static void tshi_quant_inputs(void *shared, int piece, int64_t from, int64_t to) {
    const tshi_quant_job *job = (const tshi_quant_job *)shared;
    const int32_t offset = job->size == TSHI_QUANT_Q8 ? 128 : job->size == TSHI_QUANT_Q4 ? 8 : 0;
    const tshi_dtype *dtype = &tshi_dtypes[job->from.dtype];
    const int direct = job->from.dtype == TSH_REAL && job->from.column == 1;
    (void)piece;
    for (int64_t i = from; i < to; i++)
        for (int64_t b = 0; b < job->blocks; b++) {
            const void *const x = tshi_gemm_from(job->from, i, b * TSHI_DTYPE_BLOCK).data;
            const int64_t at = (i / TSHI_QUANT_FEW * job->blocks + b) * TSHI_QUANT_FEW;
            tsh_real values[TSHI_DTYPE_BLOCK];
            if (!direct) dtype->load(x, job->from.column, TSHI_DTYPE_BLOCK, values);
            job->kernel->input(direct ? (const tsh_real *)x : values, offset,
                               &job->x[at + i % TSHI_QUANT_FEW]);
        }
}

/* Computes 16 * tiles columns of X W^T, from column `first` on, to `sums`. tile: scratch for tiles
 * of W. */
static void tshi_quant_columns(const tshi_quant_job *job, tshi_quant_tile *tile, float *sums,
                               int64_t first, int tiles) {
    const int64_t stride = TSHI_QUANT_COLUMNS * job->wide;
    /* 1: X has so few rows that the kernel reads W itself, without tiles */
    const int direct = job->rows <= job->kernel->direct &&
                       first + TSHI_QUANT_COLUMNS <= job->outs;
    const int64_t strip = direct ? job->blocks : (int64_t)TSHI_QUANT_STRIP;
    tshi_quant_source from;
    memset(sums, 0, (size_t)(job->rows * stride) * sizeof *sums);
    from.size = job->size;
    from.row = job->blocks * job->size;
    for (int64_t b = 0; b < job->blocks; b += strip) {
        from.count = (int)tshi_base_min(strip, job->blocks - b);
        for (int t = 0; t < tiles; t++) {
            const int64_t c = first + t * TSHI_QUANT_COLUMNS; /* the tile's first column */
            from.w = job->w + c * from.row + b * job->size;
            from.rows = (int)tshi_base_min(TSHI_QUANT_COLUMNS, job->outs - c);
            /* what to prefetch: the 16 rows of W of the tile that is `tiles` tiles further on, from
             * front to back in memory; their first 16 * b blocks were prefetched before */
            from.ahead = (uintptr_t)from.w + (uintptr_t)(TSHI_QUANT_COLUMNS * tiles * from.row +
                                                         (TSHI_QUANT_COLUMNS - 1) * b * job->size);
            if (!direct) job->kernel->move(tile + t * TSHI_QUANT_STRIP, &from);
        }
        for (int64_t i = 0; i < job->rows; i += TSHI_QUANT_FEW)
            for (int t = 0; t < tiles; t++)
                job->kernel->dot(direct ? NULL : tile + t * TSHI_QUANT_STRIP, &from,
                                 job->x + i * job->blocks + TSHI_QUANT_FEW * b,
                                 sums + i * stride + t * TSHI_QUANT_COLUMNS, stride,
                                 (int)tshi_base_min(TSHI_QUANT_FEW, job->rows - i));
    }
}

/* Adds a bias to n elements of a row of Y; y and bias begin at the first of them. */
static void tshi_quant_bias(tsh_real *TSHI_RESTRICT y, int64_t n, tshi_matrix bias) {
    const tsh_real *b = (const tsh_real *)bias.data;
    int64_t c = 0;
    for (; bias.column == 1 && c + TSHI_QUANT_COLUMNS <= n; c += TSHI_QUANT_COLUMNS)
        for (int l = 0; l < TSHI_QUANT_COLUMNS; l++) y[c + l] += b[c + l];
    for (; c < n; c++) y[c] += b[c * bias.column];
}

/* Computes the columns [from, to) of Y, on any thread (a tshi_team_fn). */
static void tshi_quant_piece(void *shared, int piece, int64_t from, int64_t to) {
    const tshi_quant_job *job = (const tshi_quant_job *)shared;
    const int64_t stride = TSHI_QUANT_COLUMNS * job->wide;
    tshi_quant_tile *tile = (tshi_quant_tile *)(void *)(job->scratch + (size_t)piece * job->each);
    float *sums = (float *)(void *)(tile + TSHI_QUANT_STRIP * job->wide);
    if (job->kernel->tiles) job->kernel->tiles(1);
    for (int64_t c, n; from < to; from += n) {
        tsh_real y[TSHI_QUANT_COLUMNS * TSHI_QUANT_WIDE]; /* n elements of a row of Y */
        n = tshi_base_min(stride, to - from);
        tshi_quant_columns(job, tile, sums, from, (int)tshi_base_ceil(n, TSHI_QUANT_COLUMNS));
        for (int64_t i = 0; i < job->rows; i++) {
            void *const row = tshi_gemm_from(job->y, i, from).data;
            const int direct = job->y.dtype == TSH_REAL && n % TSHI_QUANT_COLUMNS == 0;
            tsh_real *const at = direct ? (tsh_real *)row : y;
            for (c = 0; c < n; c += TSHI_QUANT_COLUMNS) /* whole tiles: maybe more than n columns */
                for (int l = 0; l < TSHI_QUANT_COLUMNS; l++)
                    at[c + l] = TSHI_R(sums[i * stride + c + l]);
            if (job->bias) tshi_quant_bias(at, n, tshi_gemm_from(*job->bias, i, from));
            if (!direct) tshi_dtypes[job->y.dtype].store(row, 1, n, y);
        }
    }
    if (job->kernel->tiles) job->kernel->tiles(0);
}

/* Computes Y = X W^T + b by the rank's threads. Shapes: w (outs, ins), quantised; x (rows, ins);
 * bias broadcast to (rows, outs), or NULL; y (rows, outs), of any floating dtype, its rows
 * contiguous. */
TSHI_COLD static void tshi_quant_product(const tsh_tensor *w, int64_t rows, tshi_matrix x,
                               const tshi_matrix *bias, tshi_matrix y) {
    /* min multiply-adds, and elements of X to quantise, per thread: fewer would not pay */
    enum { MIN_WORK = 1 << 18, MIN_INPUTS = 1 << 14 };
    const int64_t outs = w->local[0], ins = w->local[1], blocks = ins / TSHI_DTYPE_BLOCK;
    const int pieces = (int)tshi_base_min(
        tshi_team_parts(w->ctx, rows * outs * ins, MIN_WORK),
        tshi_base_ceil(outs, TSHI_QUANT_COLUMNS * TSHI_QUANT_WIDE));
    const int64_t eights = tshi_base_ceil(rows, TSHI_QUANT_FEW);
    const size_t each = sizeof(tshi_quant_input) * TSHI_QUANT_FEW;
    /* inputs: bytes of the quantised X, rounded up to whole cache lines of 64 bytes */
    const size_t inputs = ((size_t)(eights * blocks) * each + 63) / 64 * 64;
    const int wide = rows > TSHI_QUANT_FEW ? TSHI_QUANT_WIDE : 1;
    const size_t tiles = (size_t)(TSHI_QUANT_STRIP * wide) * sizeof(tshi_quant_tile);
    const size_t sums = (size_t)(rows * TSHI_QUANT_COLUMNS * wide) * sizeof(float);
    tshi_block *block = tshi_mem_alloc(w->ctx, TSH_MEM_STEP,
                                       inputs + (size_t)pieces * (tiles + sums));
    tshi_quant_job job;
    if (!block || !outs || w->ctx->dry) {
        tshi_mem_release(w->ctx, block);
        return;
    }
    job.size = tshi_dtypes[w->dtype].size;
    job.kernel = w->ctx->quant_kernel;
    job.w = (const unsigned char *)tshi_tensor_at(w);
    job.from = x;
    job.x = (tshi_quant_input *)tshi_mem_data(block);
    job.bias = bias;
    job.y = y;
    job.rows = rows;
    job.outs = outs;
    job.blocks = blocks;
    job.wide = wide;
    job.scratch = (char *)job.x + inputs;
    job.each = tiles + sums;
    if (rows > 1 && rows % TSHI_QUANT_FEW) /* fills up the last group of 8 rows of X with zeros */
        memset(job.x + (eights - 1) * blocks * TSHI_QUANT_FEW, 0, (size_t)blocks * each);
    tshi_team_run(w->ctx, tshi_team_parts(w->ctx, rows * ins, MIN_INPUTS), rows, 1,
                  tshi_quant_inputs, &job);
    if (w->ctx->trace) w->ctx->trace->flops += 2.0 * (double)rows * (double)outs * (double)ins;
    tshi_team_run(w->ctx, pieces, outs, TSHI_QUANT_COLUMNS, tshi_quant_piece, &job);
    tshi_mem_release(w->ctx, block);
}
