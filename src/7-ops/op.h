/* ========================================================================== */
/* >>op                                                  MARK: - op (private) */
/* What all ops share: recording with options, dense copies and gradients.    */
/* Needs: >>tape-grad >>rule.                                                 */
/* ========================================================================== */

/* Records a call of op, as tshi_tape_record does, with a copy of its options: `bytes` bytes at
 * params. aux: a block that backward reads, or NULL. The node owns aux from then on; if no node is
 * recorded, as after an error, aux is released here. */
static void tshi_op_record(const tshi_op *op, tsh_tensor *out, tsh_tensor *const *in, int n,
                           unsigned partial, const void *params, size_t bytes, tshi_block *aux) {
    tshi_node *node = tshi_tape_record(op, out, in, n, partial, bytes);
    if (!node) {
        tshi_mem_release(out->ctx, aux);
        return;
    }
    if (bytes) memcpy(node->params, params, bytes);
    node->aux = aux;
}

/* -- dense buffers that kernels write gradients to ------------------------- */

/* Returns the buffer to which a kernel writes a dense gradient of input x: dest itself if that is
 * dense and is to be overwritten (*scratch is NULL then), else *scratch, which tshi_op_accumulate
 * adds to dest. NULL: no memory. */
static tsh_real *tshi_op_dense_dest(const tsh_tensor *x, const tshi_dest *dest,
                                    tshi_block **scratch) {
    int64_t stride[TSH_MAX_DIMS];
    int d, direct = !dest->add; /* direct: 1 if the kernel writes to dest itself */
    tshi_tensor_strides(x->local, x->ndim, stride);
    for (d = 0; d < x->ndim; d++) direct &= x->local[d] == 1 || stride[d] == dest->stride[d];
    *scratch = NULL;
    if (direct) return dest->data;
    *scratch = tshi_mem_alloc(x->ctx, TSH_MEM_STEP, tshi_dtype_reals(tsh_local_numel(x)));
    return *scratch ? (tsh_real *)tshi_mem_data(*scratch) : NULL;
}

/* Adds the gradient in scratch to dest and releases scratch. Does nothing if scratch is NULL. */
static void tshi_op_accumulate(tsh_tensor *x, const tshi_dest *dest, tshi_block *scratch) {
    int64_t stride[TSH_MAX_DIMS];
    if (!scratch) return;
    tshi_tensor_strides(x->local, x->ndim, stride);
    tshi_tape_accumulate(x, dest, (const tsh_real *)tshi_mem_data(scratch), stride);
    tshi_mem_release(x->ctx, scratch);
}

/* -- copies: tsh_clone, tsh_detach, tsh_keep ------------------------------- */

/* Computes the backward of tsh_clone: adds the gradients of the copy to those of the input, the
 * complete one (gr) to gr, the partial sum (gp) to gp. If gp must be all-reduced, the backward of
 * the op that made the input has it done. */
static void tshi_op_copy_backward(tshi_node *node) {
    tsh_tensor *out = node->out, *base = node->in[0]->base;
    tshi_accumulator *const from[] = {&out->gr, &out->gp}, *const to[] = {&base->gr, &base->gp};
    tshi_dest dest;
    int i;
    for (i = 0; i < 2 && base->requires_grad; i++)
        if (from[i]->live && tshi_tape_dest_in(node->in[0], to[i], &dest))
            tshi_tape_accumulate(node->in[0], &dest,
                                 (const tsh_real *)tshi_mem_data(from[i]->block), out->stride);
}

static const tshi_op tshi_op_clone = {
    "tsh_clone", "x",       tshi_rule_keep, tshi_op_copy_backward,
    TSHI_NONE,   TSHI_OP_ACCEPTS_PARTIAL | TSHI_OP_PASSES_PARTIAL};

/* Returns a dense copy of x, as an op: gradients flow back to x. Errors name op. */
static tsh_tensor *tshi_op_copy(const char *op, tsh_tensor *x) {
    tsh_shape shape = tsh_shape_of(x);
    tsh_tensor *out = tshi_tensor_out(x->ctx, op, x->dtype, &shape, &x->layout);
    if (!out) return NULL;
    if (x->ctx->trace) tshi_trace_open(x->ctx->trace, tshi_op_clone.name);
    tshi_kernel_dense(x, tshi_tensor_at(out), out->dtype, 0);
    (void)tshi_tape_record(&tshi_op_clone, out, &x, 1, TSHI_NONE, 0);
    return out;
}

TSH_API tsh_tensor *tsh_clone(tsh_tensor *x) {
    return tshi_tensor_check("tsh_clone", "x", &x, 1) ? tshi_op_copy("tsh_clone", x) : NULL;
}

TSH_API tsh_tensor *tsh_detach(tsh_tensor *x) {
    return tshi_tensor_check("tsh_detach", "x", &x, 1) ? tshi_tensor_detached(x, x->block) : NULL;
}

TSH_API tsh_tensor *tsh_keep(const tsh_tensor *t) {
    tsh_tensor *x, *out;
    tsh_shape shape = tsh_shape_of(t);
    if (!t) return NULL;
    x = (tsh_tensor *)tshi_kernel_unconst(t);
    if (!tshi_tensor_check("tsh_keep", "t", &x, 1)) return NULL;
    out = tshi_tensor_make(t->ctx, "tsh_keep", TSHI_OWNED, TSH_MEM_TENSORS, t->dtype, &shape,
                           &t->layout);
    if (out) tshi_kernel_dense(t, tshi_tensor_at(out), t->dtype, 0);
    return out;
}
