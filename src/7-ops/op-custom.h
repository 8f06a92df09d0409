/* ========================================================================== */
/* >>op-custom                                    MARK: - op-custom (private) */
/* tsh_custom_op: ops of the user's own.                                      */
/* Needs: >>op-map.                                                           */
/* ========================================================================== */

/* The user's forward gets dense inputs and writes dense outputs. The user's backward adds to dense
 * gradients in scratch, which are then added to the gradients of the inputs. */

enum { TSHI_CUSTOM_INPUTS = 8 }; /* the maximum number of inputs of a custom op */

/* The params of a custom op's node. op.name points to the caller's string. */
typedef struct tshi_custom {
    tshi_op op;              /* the op, made from the caller's descriptor for this call */
    tsh_custom_op_desc desc; /* a copy of the caller's descriptor */
} tshi_custom;

/* Returns output k of a custom op's node. */
static tsh_tensor *tshi_custom_out(const tshi_node *node, int k) {
    return k ? node->more[k - 1] : node->out;
}

/* Fills value[k] with the saved values of output k, and grad[k] with its gradient; NULL: it has
 * none. */
static void tshi_custom_outputs(const tshi_node *node, const void **value, const tsh_real **grad) {
    for (int k = 0; k <= node->more_count; k++) {
        const tshi_accumulator *acc = &tshi_custom_out(node, k)->gr;
        value[k] = tshi_mem_data(k ? node->more_saved[k - 1] : node->saved[node->n]);
        grad[k] = acc->live ? (const tsh_real *)tshi_mem_data(acc->block) : NULL;
    }
}

/* Calls the user's backward with zeroed gradients and adds them to those of the inputs. */
static void tshi_custom_backward(tshi_node *node) {
    const tsh_custom_op_desc *desc = &((const tshi_custom *)node->params)->desc;
    /* the inputs, with the values that were saved for backward */
    tsh_tensor *kept[TSHI_CUSTOM_INPUTS];
    tsh_ctx *ctx = node->out->ctx;
    tsh_real *grad[TSHI_CUSTOM_INPUTS];      /* dense gradients to fill; NULL: not needed */
    tshi_block *scratch[TSHI_CUSTOM_INPUTS]; /* memory of grad[i]; NULL: not needed */
    tshi_dest dest[TSHI_CUSTOM_INPUTS];
    const void *value[TSH_MAX_OUTPUTS];
    const tsh_real *grad_out[TSH_MAX_OUTPUTS];
    int64_t stride[TSH_MAX_DIMS]; /* strides of grad[i] */
    for (int i = 0; i < node->n; i++) {
        size_t bytes = tshi_dtype_reals(tsh_local_numel(node->in[i]));
        kept[i] = tshi_tensor_detached(node->in[i], node->saved[i]);
        scratch[i] = kept[i] && tshi_tape_dest(node, i, &dest[i])
                         ? tshi_mem_alloc(ctx, TSH_MEM_STEP, bytes)
                         : NULL;
        grad[i] = scratch[i] ? (tsh_real *)tshi_mem_data(scratch[i]) : NULL;
        if (grad[i]) memset(grad[i], 0, bytes);
    }
    tshi_custom_outputs(node, value, grad_out);
    if (ctx->error.code == TSH_OK) desc->backward(kept, node->n, value, grad_out, grad, desc->user);
    for (int i = 0; i < node->n; i++) {
        if (!scratch[i]) continue;
        tshi_tensor_strides(node->in[i]->local, node->in[i]->ndim, stride);
        tshi_tape_accumulate(node->in[i], &dest[i], grad[i], stride);
        tshi_mem_release(ctx, scratch[i]);
    }
}

/* Fills dense[i] with input i, or a dense copy of it, floating ones as tsh_real. Returns 0 and an
 * error if the descriptor or an input is refused. */
static int tshi_custom_inputs(tsh_ctx *ctx, tsh_tensor *const *in, int n,
                              const tsh_custom_op_desc *desc, tsh_tensor **dense) {
    if (!desc || !desc->forward || !desc->name || n < 1 || n > TSHI_CUSTOM_INPUTS || !in)
        return tshi_error_zero(ctx, TSH_ERR_ARGUMENT,
                               "tsh_custom_op: takes a name, a forward and 1 to %d inputs, not %d",
                               TSHI_CUSTOM_INPUTS, n);
    if (desc->outputs < 0 || desc->outputs > TSH_MAX_OUTPUTS)
        return tshi_error_zero(ctx, TSH_ERR_ARGUMENT, "%s: %d outputs; it may have 1 to %d",
                               desc->name, desc->outputs, TSH_MAX_OUTPUTS);
    if (!tshi_tensor_check(desc->name, "in[]", in, n)) return 0;
    if (in[0]->ctx != ctx)
        return tshi_tensor_refuse_ctx(ctx, desc->name, "in[0]", in[0]->ctx) != NULL;
    for (int i = 0; i < n; i++) {
        dense[i] = tshi_tensor_is_dense(in[i]) ? in[i] : tshi_op_copy(desc->name, in[i]);
        if (dense[i] && tshi_dtype_computes(in[i]->dtype)) dense[i] = tsh_cast(dense[i], TSH_REAL);
        if (!dense[i]) return 0;
    }
    return 1;
}

/* Makes the tensor of output k: of tsh_real if it is floating, since tsh_custom_op rounds it to its
 * dtype later. Returns NULL after an error. */
static tsh_tensor *tshi_custom_output(tsh_ctx *ctx, const tsh_custom_op_desc *desc, int k) {
    const tsh_output *form = &desc->out[k];
    const int known = tshi_dtype_exists(form->dtype);
    const int computes = !form->dtype || (known && tshi_dtype_computes(form->dtype));
    if (!computes &&
        (!known || tshi_dtypes[form->dtype].floating || tshi_dtype_in_blocks(form->dtype)))
        return tshi_error_null(ctx, TSH_ERR_DTYPE,
                               "%s: output %d: takes %s, bf16, f16, i32 or i64, not dtype %d",
                               desc->name, k, tshi_dtype_name(TSH_REAL), (int)form->dtype);
    return tshi_tensor_out(ctx, desc->name, computes ? TSH_REAL : form->dtype, &form->shape,
                           &form->layout);
}

/* Makes the outputs and has the user's forward write them. Returns 0 after an error. */
static int tshi_custom_forward(tsh_tensor *const *in, int n, const tsh_custom_op_desc *desc,
                               int outputs, tsh_tensor **out) {
    tsh_ctx *ctx = in[0]->ctx;
    void *values[TSH_MAX_OUTPUTS];
    for (int k = 0; k < outputs; k++) {
        out[k] = tshi_custom_output(ctx, desc, k);
        if (!out[k]) return 0;
        values[k] = tshi_tensor_at(out[k]);
    }
    desc->forward(in, n, values, desc->user);
    return ctx->error.code == TSH_OK;
}

/* Records the call on the tape. in: the dense inputs. */
static void tshi_custom_record(tsh_tensor *const *in, int n, const tsh_custom_op_desc *desc,
                               int outputs, tsh_tensor *const *out) {
    tshi_custom custom;
    int differentiable = 0; /* 1: an output is floating: it may get a gradient */
    memset(&custom, 0, sizeof custom);
    for (int k = 0; k < outputs; k++) differentiable |= tshi_dtype_computes(out[k]->dtype);
    custom.op.name = desc->name;
    if (desc->backward && differentiable) custom.op.backward = tshi_custom_backward;
    custom.op.saves = ((1u << n) - 1) | (unsigned)TSHI_OUT; /* saves all inputs and outputs */
    custom.desc = *desc;
    tshi_op_record(&custom.op, out[0], in, n, desc->partial, &custom, sizeof custom, NULL);
    for (int k = 1; k < outputs && out[0]->ctx->anomalies; k++)
        tshi_tape_check_output(&custom.op, out[k], in, n);
    if (!out[0]->node) return;
    /* custom is a local: the node uses its own copy of the op */
    out[0]->node->op = &((const tshi_custom *)out[0]->node->params)->op;
    tshi_tape_add_outputs(out[0]->node, out + 1, outputs - 1);
}

TSH_API tsh_tensor *tsh_custom_op(tsh_ctx *ctx, tsh_tensor *const *in, int n, tsh_tensor **out,
                                  const tsh_custom_op_desc *desc) {
    tsh_tensor *dense[TSHI_CUSTOM_INPUTS], *made[TSH_MAX_OUTPUTS]; /* made: the outputs */
    const int outputs = desc && desc->outputs ? desc->outputs : 1;
    int ok = ctx && ctx->error.code == TSH_OK && tshi_custom_inputs(ctx, in, n, desc, dense) &&
             tshi_custom_forward(dense, n, desc, outputs, made);
    if (ok) tshi_custom_record(dense, n, desc, outputs, made);
    for (int k = 0; k < outputs && ok; k++) {
        if (desc->out[k].dtype) made[k] = tsh_cast(made[k], desc->out[k].dtype);
        ok = made[k] != NULL;
    }
    for (int k = 0; k < outputs && k < TSH_MAX_OUTPUTS && out; k++) out[k] = ok ? made[k] : NULL;
    return ok ? made[0] : NULL;
}
