/* ========================================================================== */
/* >>op-custom                                    MARK: - op-custom (private) */
/* tsh_custom_op: ops of the user's own.                                      */
/* Needs: >>op-map.                                                           */
/* ========================================================================== */

/* The user's forward gets dense inputs and writes a dense output. The user's backward adds to dense
 * gradients in scratch, which are then added to the gradients of the inputs. */

enum { TSHI_CUSTOM_INPUTS = 8 }; /* the maximum number of inputs */

/* The params of a custom op's node. op.name points to the caller's string. */
typedef struct tshi_custom {
    tshi_op op;           /* the op, made from the caller's descriptor for this call */
    tsh_custom_op_desc desc; /* a copy of the caller's descriptor */
} tshi_custom;

/* Calls the user's backward with zeroed gradients and adds them to those of the inputs. */
static void tshi_custom_backward(tshi_node *node) {
    const tsh_custom_op_desc *desc = &((const tshi_custom *)node->params)->desc;
    /* kept: the inputs, with the values that were saved */
    tsh_tensor *out = node->out, *kept[TSHI_CUSTOM_INPUTS];
    tsh_ctx *ctx = out->ctx;
    tsh_real *grad[TSHI_CUSTOM_INPUTS];      /* dense gradients to fill; NULL: not needed */
    tshi_block *scratch[TSHI_CUSTOM_INPUTS]; /* holds grad[i], or NULL */
    tshi_dest dest[TSHI_CUSTOM_INPUTS];
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
    if (ctx->error.code == TSH_OK)
        desc->backward(kept, node->n, (const tsh_real *)tshi_tape_saved(node, node->n),
                       tshi_tape_grad(node), grad, desc->user);
    for (int i = 0; i < node->n; i++) {
        if (!scratch[i]) continue;
        tshi_tensor_strides(node->in[i]->local, node->in[i]->ndim, stride);
        tshi_tape_accumulate(node->in[i], &dest[i], grad[i], stride);
        tshi_mem_release(ctx, scratch[i]);
    }
}

TSH_API tsh_tensor *tsh_custom_op(tsh_ctx *ctx, tsh_tensor *const *in, int n,
                                  const tsh_custom_op_desc *desc) {
    tsh_tensor *dense[TSHI_CUSTOM_INPUTS], *out; /* dense: the inputs, or dense copies of them */
    tshi_custom custom;
    if (!ctx || ctx->error.code != TSH_OK) return NULL;
    if (!desc || !desc->forward || !desc->name || n < 1 || n > TSHI_CUSTOM_INPUTS || !in)
        return tshi_error_null(ctx, TSH_ERR_ARGUMENT,
                               "tsh_custom_op: takes a name, a forward and 1 to %d inputs, not %d",
                               TSHI_CUSTOM_INPUTS, n);
    if (!tshi_tensor_check(desc->name, "in[]", in, n)) return NULL;
    if (in[0]->ctx != ctx)
        return tshi_error_null(ctx, TSH_ERR_ARGUMENT, "%s: in[0] belongs to another ctx",
                               desc->name);
    for (int i = 0; i < n; i++) {
        dense[i] = tshi_tensor_is_dense(in[i]) ? in[i] : tshi_op_copy(desc->name, in[i]);
        if (dense[i] && tshi_dtype_computes(in[i]->dtype)) dense[i] = tsh_cast(dense[i], TSH_REAL);
        if (!dense[i]) return NULL;
    }
    out = tshi_tensor_out(ctx, desc->name, TSH_REAL, &desc->shape, &desc->layout);
    if (!out) return NULL;
    desc->forward(dense, n, tshi_tensor_values(out), desc->user);
    if (ctx->error.code != TSH_OK) return NULL;
    memset(&custom, 0, sizeof custom);
    custom.op.name = desc->name;
    if (desc->backward) custom.op.backward = tshi_custom_backward;
    custom.op.saves = ((1u << n) - 1) | (unsigned)TSHI_OUT; /* all inputs and out */
    custom.desc = *desc;
    tshi_op_record(&custom.op, out, dense, n, desc->partial, &custom, sizeof custom, NULL);
    /* custom is a local: the node uses its own copy of the op */
    if (out->node) out->node->op = &((const tshi_custom *)out->node->params)->op;
    return out;
}
