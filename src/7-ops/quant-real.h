/* ========================================================================== */
/* >>quant-real                                  MARK: - quant-real (private) */
/* Products with quantised weights in training: the weights are converted, a  */
/* few rows at a time, and the inputs are not rounded.                        */
/* Needs: >>quant-avx2 >>op-matmul.                                           */
/* ========================================================================== */

/* How many rows of a quantised weight are converted at a time. It is a constant, so that a gradient
 * dX, which is summed over these rows, has the same bits at every degree. */
enum { TSHI_QUANT_ROWS = 512 };

/* Rows of a quantised weight that threads convert to tsh_real. */
typedef struct tshi_quant_rows {
    const tshi_dtype *from; /* the weight's dtype */
    const char *values;     /* the first row to convert, in ggml's blocks */
    int64_t ins;            /* elements per row */
    tsh_real *to;           /* shape (rows, ins) */
} tshi_quant_rows;

/* Runs on one thread: converts rows [from, to) of the weight to tsh_real. */
static void tshi_quant_convert(void *job, int piece, int64_t from, int64_t to) {
    const tshi_quant_rows *rows = (const tshi_quant_rows *)job;
    const int64_t first = from * rows->ins;
    (void)piece;
    rows->from->load(rows->values + first / rows->from->elements * rows->from->size, 1,
                     (to - from) * rows->ins, rows->to + first);
}

/* Computes a product with a quantised weight W, shape (outs, ins), whose blocks are at `values`. If
 * back is 0: C = X W^T + beta D, shapes X (rows, ins), C and D (rows, outs). If back is 1: C = X W
 * + beta C, shapes X (rows, outs), C (rows, ins). */
static void tshi_quant_reals(const tsh_tensor *w, void *values, int back, int64_t rows,
                             tshi_matrix x, tsh_real beta, tshi_matrix d, tshi_matrix c) {
    tsh_ctx *ctx = w->ctx;
    const int64_t outs = w->local[0], ins = w->local[1];
    const int64_t most = tshi_base_min(outs, TSHI_QUANT_ROWS);
    tshi_block *block = tshi_mem_alloc(ctx, TSH_MEM_STEP, tshi_dtype_reals(most * ins));
    tshi_quant_rows job = {&tshi_dtypes[w->dtype], (const char *)values, ins, NULL};
    if (!block) return;
    job.to = (tsh_real *)tshi_mem_data(block);
    if (back && !outs) tshi_matmul_gemm(ctx, rows, ins, 0, 1, x, x, beta, c); /* C = beta C */
    for (int64_t r = 0, n; r < outs && ctx->error.code == TSH_OK; r += n) {
        const tshi_matrix part = tshi_gemm_matrix(job.to, ins, 1); /* rows [r, r + n) of W */
        n = tshi_base_min(most, outs - r);
        tshi_team_run(ctx, tshi_kernel_parts(ctx, n, ins), n, 1, tshi_quant_convert, &job);
        if (back)
            tshi_matmul_gemm(ctx, rows, ins, n, 1, tshi_gemm_from(x, 0, r), part,
                             r ? TSHI_R(1) : beta, c);
        else
            tshi_matmul_run(ctx, rows, n, ins, 1, x, tshi_gemm_transposed(part), beta,
                            tshi_gemm_from(d, 0, r), tshi_gemm_from(c, 0, r));
        job.values += tshi_dtype_bytes(w->dtype, n * ins);
    }
    tshi_mem_release(ctx, block);
}
