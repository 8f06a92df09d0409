/* ========================================================================== */
/* >>op-lora                                        MARK: - op-lora (private) */
/* Y += s H B^T: what an adapter of low rank adds to a linear layer's output. */
/* Backward: dH = s dY B, dB = s dY^T H, and dY goes on as it is.             */
/* Needs: >>op >>op-matmul.                                                   */
/* ========================================================================== */

/* Shapes: Y (.., out), H (.., rank), B (n, rank): the product is added to n columns of Y. Y is
 * changed in place: it is the output of tsh_linear, whose backward does not read it. */
typedef struct tshi_lora {
    double scale;  /* the factor s */
    int64_t first; /* index of the first of the n columns among this rank's columns of Y */
} tshi_lora;

/* Returns `values`, t's local values or its gradient, as a matrix of shape (*rows, features) from
 * column `first` on. */
static tshi_matrix tshi_lora_matrix(const tsh_tensor *t, void *values, tsh_dtype dtype,
                                    int64_t first, int64_t *rows) {
    int64_t step = 0;
    (void)tshi_kernel_rows(t, rows, &step);
    return tshi_gemm_from(tshi_gemm_matrix_of(values, dtype, step, t->stride[t->ndim - 1]), 0,
                          first);
}

static void tshi_lora_backward(tshi_node *node) {
    const tshi_lora *how = (const tshi_lora *)node->params;
    tsh_tensor *h = node->in[1], *b = node->in[2], *out = node->out;
    tsh_ctx *ctx = out->ctx;
    const int64_t n = b->local[0], rank = b->local[1];
    int64_t rows;
    tshi_dest dest;
    /* shapes: dy (rows, n), mh and dH (rows, rank), mb and dB (n, rank) */
    tshi_matrix dy = tshi_lora_matrix(out, tshi_tape_grad(node), TSH_REAL, how->first, &rows);
    const tshi_matrix mh = tshi_lora_matrix(h, tshi_tape_saved(node, 1), h->dtype, 0, &rows);
    const tshi_matrix mb = tshi_gemm_matrix_of(tshi_tape_saved(node, 2), b->dtype, b->stride[0],
                                               b->stride[1]);
    dy.rounds = tshi_matmul_rounds(out, h, b);
    if (tshi_tape_dest(node, 1, &dest))
        tshi_matmul_gemm(ctx, rows, rank, n, TSHI_R(how->scale), dy, mb, TSHI_R(dest.add),
                         tshi_gemm_matrix(dest.data, mh.row, mh.column));
    tshi_tape_input_done(node, 1); /* dH is all-reduced while dB is computed */
    if (ctx->error.code == TSH_OK && tshi_tape_dest(node, 2, &dest))
        tshi_matmul_gemm(ctx, n, rank, rows, TSHI_R(how->scale), tshi_gemm_transposed(dy), mh,
                         TSHI_R(dest.add),
                         tshi_gemm_matrix(dest.data, dest.stride[0], dest.stride[1]));
    if (ctx->error.code == TSH_OK) tshi_tape_identity(node, 0);
}

static const tshi_op tshi_lora_op = {
    "tsh_lora", "y h B", tshi_rule_lora, tshi_lora_backward, TSHI_WEIGHT | TSHI_BIAS, 0};

/* Adds s H B^T in place to the columns of y from `first` on. Returns the sum as a new tensor, which
 * shares y's memory. NULL: an error. */
static tsh_tensor *tshi_lora_add(tsh_tensor *y, tsh_tensor *h, tsh_tensor *b, double scale,
                                 int64_t first) {
    const tshi_lora how = {scale, first};
    tsh_tensor *in[3] = {y, h, b}, *out;
    tsh_ctx *ctx = y->ctx;
    tshi_output output;
    tshi_matrix mh, mb, my;
    int64_t rows;
    output.shape = tsh_shape_of(y);
    if (!tshi_tensor_check("tsh_lora", "y h B", in, 3) ||
        !tshi_rule_run(&tshi_lora_op, in, 3, NULL, &output))
        return NULL;
    out = tshi_tensor_detached(y, y->block); /* shares the memory of y */
    if (!out) return NULL;
    mh = tshi_lora_matrix(h, tshi_tensor_at(h), h->dtype, 0, &rows);
    mb = tshi_gemm_matrix_of(tshi_tensor_at(b), b->dtype, b->stride[1], b->stride[0]); /* B^T */
    my = tshi_lora_matrix(y, tshi_tensor_at(y), y->dtype, first, &rows);
    tshi_matmul_run(ctx, rows, b->local[0], b->local[1], TSHI_R(scale), mh, mb, 1, my, my);
    if (ctx->error.code != TSH_OK) return NULL;
    tshi_op_record(&tshi_lora_op, out, in, 3, output.partial, &how, sizeof how, NULL);
    return out;
}
