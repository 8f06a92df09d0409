/* ========================================================================== */
/* >>tape                                              MARK: - tape (private) */
/* Ops record their calls on the tape; backward walks it once, newest first.  */
/* Needs: >>inputs.                                                           */
/* ========================================================================== */

/* A forward function calls tshi_tape_record last. In backward(node), the op reads the gradient of
 * its output (tshi_tape_grad) and the values that were saved (tshi_tape_saved). For each input it
 * calls tshi_tape_dest, which says where to write the gradient, and whether to overwrite or to add.
 * A tensor has two accumulators, gr and gp (see tshi_node); views share those of their base.
 *
 * tsh_backward has three parts. tshi_tape_mark finds the nodes that the loss depends on and counts
 * how many gradients will be added to each tensor. tshi_tape_walk runs the backward of these nodes
 * and releases them. tshi_tape_sync completes the gradients of leaves over tp and dp. Collectives
 * run while backward goes on: the all-reduce of a partial gradient starts with its last
 * contribution (tshi_tape_input_done), that of a bucket of leaves when it is full
 * (tshi_tape_deliver). */

/* Returns 1 if a call with these inputs must be recorded: one of them requires a gradient. */
static int tshi_tape_records(const tsh_ctx *ctx, tsh_tensor *const *in, int n) {
    if (ctx->tape.no_grad) return 0;
    for (int i = 0; i < n; i++)
        if (in[i] && in[i]->base->requires_grad) return 1;
    return 0;
}

/* Appends a node for a call of op, which made `out` from n inputs, and takes references to the
 * values that backward reads. partial: bits of the inputs whose gradient is a partial sum. params:
 * bytes of the op's options, which the caller copies to node->params. Returns NULL if there
 * is no memory. */
static tshi_node *tshi_tape_add(const tshi_op *op, tsh_tensor *out, tsh_tensor *const *in, int n,
                                unsigned partial, size_t params) {
    tsh_ctx *ctx = out->ctx;
    const size_t inputs = (size_t)n * sizeof(tsh_tensor *);      /* bytes of node->in */
    const size_t saved = ((size_t)n + 1) * sizeof(tshi_block *); /* bytes of node->saved */
    /* bytes of the node and its arrays, up to a multiple of 16 so that params are aligned */
    const size_t head = (sizeof(tshi_node) + inputs + saved + 15) / 16 * 16;
    tshi_node *node = (tshi_node *)tshi_mem_arena_alloc(ctx, &ctx->tape.arena, head + params);
    if (!node) return NULL;
    node->in = (tsh_tensor **)(void *)(node + 1); /* in, saved, params follow the node */
    node->saved = (tshi_block **)(void *)((char *)node->in + inputs);
    if (params) node->params = (char *)node + head;
    node->op = op;
    node->out = out;
    node->n = n;
    node->depth = ctx->depth; /* tsh_scope_end fails if the scope has nodes */
    node->partial = partial;
    node->module = ctx->module; /* errors of backward begin with the module's path */
    for (int i = 0; i <= n; i++) {
        const tsh_tensor *t = i < n ? in[i] : out;
        if (i < n) node->in[i] = in[i];
        tshi_tensor_ref(i < n ? in[i] : out);
        if (!t || !(op->saves & (i < n ? 1u << i : (unsigned)TSHI_OUT))) continue;
        node->saved[i] = t->block;
        t->block->refs++; /* keeps the values until backward */
    }
    node->older = ctx->tape.newest; /* the tape is a list, newest node first */
    ctx->tape.newest = node;
    out->requires_grad = 1;
    out->node = node; /* out is now the output of an op, not a leaf */
    return node;
}

/* Adds to a node those outputs of its op that follow the first, `count` of them, and saves their
 * values for backward. Each output of a floating dtype, the first one too, gets a gradient. */
static void tshi_tape_add_outputs(tshi_node *node, tsh_tensor *const *more, int count) {
    tshi_arena *arena = &node->out->ctx->tape.arena;
    /* bytes of node->more, and of node->more_saved */
    const size_t size = (size_t)count * sizeof(tsh_tensor *);
    tsh_ctx *ctx = node->out->ctx;
    if (!count) return;
    node->more = (tsh_tensor **)tshi_mem_arena_alloc(ctx, arena, size);
    node->more_saved = (tshi_block **)tshi_mem_arena_alloc(ctx, arena, size);
    if (!node->more || !node->more_saved) return;
    for (int i = 0; i < count; i++) {
        node->more[i] = more[i];
        tshi_tensor_ref(more[i]);
        node->more_saved[i] = more[i]->block;
        more[i]->block->refs++; /* keeps the values until backward */
        more[i]->requires_grad = tshi_dtype_computes(more[i]->dtype);
        more[i]->node = node;
    }
    node->more_count = count;
    node->out->requires_grad = tshi_dtype_computes(node->out->dtype);
}

/* Looks for a NaN or an infinity among `values`, laid out by `stride` in t's local shape. If there
 * is one, returns 1 and writes the first to text, with its global index: "NaN at (0, 5)". Else
 * returns 0. */
static TSHI_COLD int tshi_tape_not_finite(const tsh_tensor *t, const void *values,
                                          tsh_dtype dtype, const int64_t *stride, char *text) {
    const int64_t n = tsh_local_numel(t);
    int64_t index[TSH_MAX_DIMS] = {0}, e; /* local index of element e */
    char place[TSHI_TEXT_SIZE];
    double value = 0;
    for (e = 0; e < n; e++) {
        int64_t at = 0; /* where element e is in values */
        for (int d = 0; d < t->ndim; d++) at += index[d] * stride[d];
        value = tshi_dtype_get(dtype, values, at);
        if (value - value != 0) break; /* NaN - NaN and inf - inf are NaN */
        for (int d = t->ndim - 1; d >= 0 && ++index[d] == t->local[d]; d--) index[d] = 0;
    }
    if (e == n) return 0;
    for (int d = 0; d < t->ndim; d++) index[d] = tshi_tensor_global(t, d, index[d]);
    (void)snprintf(text, TSHI_TEXT_SIZE, "%s at %.64s",
                   value != value ? "NaN" : value < 0 ? "-infinity" : "infinity",
                   tshi_tensor_sizes(index, t->ndim, place));
    return 1;
}

/* For tsh_detect_anomaly: fails if the output of an op is not finite. The error names the first
 * input that is not finite either. */
static TSHI_COLD void tshi_tape_check_output(const tshi_op *op, const tsh_tensor *out,
                                             tsh_tensor *const *in, int n) {
    char form[TSHI_TEXT_SIZE], found[TSHI_TEXT_SIZE], old[TSHI_TEXT_SIZE], why[2 * TSHI_TEXT_SIZE];
    int i, length;
    if (!tshi_tape_not_finite(out, tshi_tensor_at(out), out->dtype, out->stride, found))
        return;
    (void)snprintf(why, sizeof why, "the inputs are finite");
    /* goes from the last input to the first, so that `why` names the first that is not finite */
    for (i = n - 1; i >= 0; i--) {
        const char *name = tshi_tensor_name(op->inputs, i, &length);
        if (in[i] && in[i]->block && !tshi_dtype_in_blocks(in[i]->dtype) &&
            tshi_tape_not_finite(in[i], tshi_tensor_at(in[i]), in[i]->dtype, in[i]->stride, old))
            (void)snprintf(why, sizeof why, "%.*s has %s already", length, name, old);
    }
    (void)tsh_fail(out->ctx, TSH_ERR_ANOMALY, "%s: the output %s has %s; %s", op->name,
                   tshi_tensor_text(out, form), found, why);
}

/* Returns the bytes of t's values on this rank. */
static size_t tshi_tape_local_bytes(const tsh_tensor *t) {
    return tshi_dtype_bytes(t->dtype, tsh_local_numel(t));
}

/* Returns the bytes of an op's inputs and output on this rank: what forward reads and writes. */
static TSHI_COLD int64_t tshi_tape_bytes(const tsh_tensor *out, tsh_tensor *const *in, int n) {
    size_t bytes = tshi_tape_local_bytes(out);
    for (int i = 0; i < n; i++)
        if (in[i]) bytes += tshi_tape_local_bytes(in[i]);
    return (int64_t)bytes;
}

/* Returns the bytes that a node's backward reads and writes on this rank: the gradient of the
 * output, the gradient of each input that needs one, and the saved values. */
static TSHI_COLD int64_t tshi_tape_backward_bytes(const tshi_node *node) {
    size_t bytes = tshi_dtype_reals(tsh_local_numel(node->out));
    for (int i = 0; i < node->n; i++) {
        const tsh_tensor *t = node->in[i];
        if (!t) continue;
        if (node->saved[i]) bytes += tshi_tape_local_bytes(t);
        if (t->base->requires_grad) bytes += tshi_dtype_reals(tsh_local_numel(t));
    }
    if (node->saved[node->n]) bytes += tshi_tape_local_bytes(node->out);
    for (int i = 0; i < node->more_count; i++) bytes += tshi_tape_local_bytes(node->more[i]);
    return (int64_t)bytes;
}

/* Records a finished call (see tshi_tape_add). Every op calls this last, when out has its values.
 * Returns NULL, without recording, if the op has no backward or no input requires a gradient, and
 * after an error. */
static tshi_node *tshi_tape_record(const tshi_op *op, tsh_tensor *out, tsh_tensor *const *in, int n,
                                   unsigned partial, size_t params) {
    if (out->ctx->trace)
        tshi_trace_close(out->ctx->trace, op->name, tshi_tape_bytes(out, in, n));
    if (out->ctx->anomalies) tshi_tape_check_output(op, out, in, n);
    if (out->ctx->check_inputs) tshi_inputs_check(op, in, n);
    if (!op->backward || out->ctx->error.code != TSH_OK || !tshi_tape_records(out->ctx, in, n))
        return NULL;
    return tshi_tape_add(op, out, in, n, partial, params);
}

/* Returns 1 if the node's backward reads both accumulators of its output, gr and gp. Then gp, a
 * partial sum, is not all-reduced first. */
static int tshi_tape_accepts_partial(const tshi_node *node) {
    const unsigned wanted = node->out->flags & TSHI_RETAIN ? TSHI_OP_ACCEPTS_RETAINED
                                                           : TSHI_OP_ACCEPTS_PARTIAL;
    return (node->op->flags & wanted) != 0;
}

/* Returns the saved values of input i (i = n: of the output). They have the strides of that
 * input or output. */
static void *tshi_tape_saved(const tshi_node *node, int i) {
    const tsh_tensor *t = i < node->n ? node->in[i] : node->out;
    return (char *)tshi_mem_data(node->saved[i]) + (size_t)t->offset * tsh_dtype_size(t->dtype);
}

/* Does what tshi_tape_saved does, but returns the values as tsh_real, in place or converted to
 * *scratch, which the caller releases; and writes their strides to `stride`. Returns NULL if there
 * is no memory. */
static tsh_real *tshi_tape_saved_reals(const tshi_node *node, int i, int64_t *stride,
                                       tshi_block **scratch) {
    tsh_tensor saved = *(i < node->n ? node->in[i] : node->out);
    saved.block = node->saved[i]; /* the tensor's own block may be released already */
    return tshi_kernel_reals_of(&saved, stride, scratch);
}
