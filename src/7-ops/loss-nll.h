/* ========================================================================== */
/* >>loss-nll                                      MARK: - loss-nll (private) */
/* The negative log-likelihood: of log-probabilities, by class.               */
/* Needs: >>loss-element.                                                     */
/* ========================================================================== */

/* Row i of the log-probabilities x (rows, V) has class y_i and weight w_i = weight[y_i], 0 if the
 * target is ignored: l_i = -w_i x_i,y_i, and dx_i,y_i = -w_i g_i; other elements have gradient 0.
 * If classes are sharded, one rank has x_i,y_i, and the others add 0 in the all-reduce. */

/* Checks the inputs of tsh_nll_loss. ce: its options, converted to those of tsh_cross_entropy.
 * Returns 0 after an error. */
static int tshi_loss_nll_check(tsh_tensor *const *in, const tsh_cross_entropy_desc *ce) {
    const tsh_tensor *x = in[0], *target = in[1], *weight = in[2];
    const int axis = tshi_rule_classes(x, ce->dim); /* the dimension of the classes */
    char tx[TSHI_TEXT_SIZE], tt[TSHI_TEXT_SIZE];
    if ((unsigned)ce->reduction > (unsigned)TSH_REDUCE_NONE || (ce->dim != 0 && ce->dim != 1))
        return tshi_error_zero(x->ctx, TSH_ERR_ARGUMENT,
                               "tsh_nll_loss: reduction %d, dim %d; takes TSH_REDUCE_MEAN, _SUM or "
                               "_NONE, and classes in the last dimension (0) or in dimension 1 (1)",
                               (int)ce->reduction, ce->dim);
    if (tshi_dtypes[target->dtype].floating)
        return tshi_error_zero(x->ctx, TSH_ERR_DTYPE,
                               "tsh_nll_loss: target is %s, not class indices, which are i32 or "
                               "i64: tsh_cast(target, TSH_I64); probabilities are for tsh_kl_div, "
                               "or, of logits, for tsh_cross_entropy",
                               tshi_dtype_name(target->dtype));
    if (!tshi_loss_fits(x, target, axis))
        return tshi_error_zero(
            x->ctx, TSH_ERR_SHAPE, "tsh_nll_loss: log_probs %s and target %s; takes %s%s",
            tshi_tensor_text(x, tx), tshi_tensor_text(target, tt),
            ce->dim ? "(N, V, d1, ..) and (N, d1, ..) with .dim = 1" : "(.., V) and (..)",
            tshi_loss_hint(x, target, ce->dim));
    if (weight && (weight->ndim != 1 || weight->dim[0] != x->dim[axis]))
        return tshi_error_zero(
            x->ctx, TSH_ERR_SHAPE, "tsh_nll_loss: log_probs %s have %lld classes, weight is %s",
            tshi_tensor_text(x, tx), (long long)x->dim[axis], tshi_tensor_text(weight, tt));
    return 1;
}

/* Returns the index of the first element of row i of x (.., V) in an array with strides
 * `stride`. */
static int64_t tshi_loss_row_start(const tsh_tensor *x, const int64_t *stride, int64_t i) {
    int64_t at = 0;
    for (int d = x->ndim - 2; d >= 0; d--) {
        at += i % x->local[d] * stride[d];
        i /= x->local[d];
    }
    return at;
}

static void tshi_loss_nll_backward(tshi_node *node) {
    const tshi_loss *loss = (const tshi_loss *)node->params;
    const tsh_tensor *x = node->in[0]; /* shape (.., V) */
    const tsh_real *g = tshi_tape_grad(node);
    tshi_dest dest;
    if (!tshi_tape_dest_zeroed(node, 0, &dest)) return;
    for (int64_t i = 0; i < loss->rows; i++) {
        const double each = (double)(loss->desc.reduction == TSH_REDUCE_NONE ? g[i] : g[0]) /
                            loss->divisor;
        if (loss->local[i] < 0) continue; /* the row is ignored, or its class is on another rank */
        dest.data[tshi_loss_row_start(x, dest.stride, i) +
                  loss->local[i] * dest.stride[x->ndim - 1]] -= TSHI_R(each * (double)loss->own[i]);
    }
}

/* Writes the loss of each row to `sums`, shape (2, rows). If class weights are sharded, also
 * gathers the weight of each row's class, in the second half of `sums`, to loss->own. */
static void tshi_loss_nll_rows(tsh_tensor *const *in, tshi_loss *loss, tsh_real *sums) {
    const tsh_tensor *x = in[0];
    tsh_ctx *ctx = x->ctx;
    const int64_t n = loss->rows;
    /* 1: each rank has the weights of its own classes only */
    const int gathers = loss->cut && loss->desc.weight &&
                        loss->desc.weight->layout.kind == TSH_SHARDED;
    for (int64_t i = 0; i < n; i++) {
        const int64_t at = tshi_loss_row_start(x, x->stride, i), y = loss->local[i];
        const double v = y < 0 ? 0
                               : tshi_dtype_get(x->dtype, tshi_tensor_at(x),
                                                at + y * x->stride[x->ndim - 1]);
        sums[i] = y < 0 ? TSHI_R(0) : TSHI_R(-loss->own[i] * TSHI_R(v));
        if (gathers) sums[n + i] = loss->own[i];
    }
    if (!loss->cut) return;
    (void)tshi_error_comm(ctx,
                          tsh_allreduce(&ctx->tp, sums, gathers ? 2 * n : n, TSH_REAL, TSH_SUM),
                          "tsh_nll_loss: all-reduce of the row losses");
    if (gathers) memcpy(loss->own, sums + n, tshi_dtype_reals(n));
}

/* Fills in *loss, replaces in[0] by a view whose classes are last and in[2], the class weights, by
 * this rank's shard. Returns 0 after an error. */
static int tshi_loss_nll_plan(tsh_tensor **in, const tsh_cross_entropy_desc *ce, tshi_loss *loss) {
    const int axis = tshi_rule_classes(in[0], ce->dim);
    const int cut = tshi_rule_is_sharded(in[0], axis);
    tsh_layout classes = in[0]->layout; /* becomes the layout of the class weights */
    memset(loss, 0, sizeof *loss);
    in[0] = tshi_loss_turn(in[0], axis);
    if (!in[0]) return 0;
    loss->desc = *ce;
    loss->rows = tshi_tensor_product(in[0]->local, in[0]->ndim - 1);
    loss->classes = in[0]->local[in[0]->ndim - 1];
    loss->cut = cut && in[0]->ctx->tp.size > 1;
    loss->divisor = 1;
    if (!in[2]) return 1;
    classes.dim = 0;
    if (!cut) classes = tsh_replicated();
    in[2] = tshi_loss_shard(in[2], &classes);
    return in[2] != NULL;
}

static const tshi_op tshi_loss_nll_op = {"tsh_nll_loss",
                                         "log_probs target weight",
                                         tshi_rule_cross_entropy,
                                         tshi_loss_nll_backward,
                                         TSHI_NONE,
                                         0};

/* Computes out, the loss, and records the call. loss: filled in by tshi_loss_nll_plan. */
static tsh_tensor *tshi_loss_nll_run(tsh_tensor *const *in, tshi_loss *loss, tsh_tensor *out) {
    tsh_ctx *ctx = out->ctx;
    const int64_t n = loss->rows;
    const int reduced = loss->desc.reduction != TSH_REDUCE_NONE;
    tshi_block *aux = tshi_mem_alloc(ctx, TSH_MEM_STEP,
                                     tshi_dtype_reals(n) + (size_t)n * sizeof *loss->local);
    tshi_block *scratch = aux ? tshi_mem_alloc(ctx, TSH_MEM_STEP, tshi_dtype_reals(2 * n)) : NULL;
    if (scratch) {
        tsh_real *sums = (tsh_real *)tshi_mem_data(scratch);
        loss->local = (int64_t *)tshi_mem_data(aux); /* each row's class, (rows) */
        loss->own = (tsh_real *)(void *)(loss->local + n);
        tshi_loss_targets("tsh_nll_loss", in, loss);
        if (ctx->error.code == TSH_OK) tshi_loss_nll_rows(in, loss, sums);
        if (ctx->error.code == TSH_OK && reduced)
            tshi_loss_reduce(in[0], loss, sums, out);
        else if (ctx->error.code == TSH_OK)
            memcpy(tshi_tensor_values(out), sums, tshi_dtype_reals(n));
    }
    tshi_mem_release(ctx, scratch);
    if (ctx->error.code == TSH_OK)
        tshi_op_record(&tshi_loss_nll_op, out, in, 3, TSHI_NONE, loss, sizeof *loss, aux);
    else
        tshi_mem_release(ctx, aux);
    return ctx->error.code == TSH_OK ? out : NULL;
}

TSH_API tsh_tensor *tsh_nll_loss(tsh_tensor *log_probs, tsh_tensor *target,
                                 const tsh_loss_desc *desc) {
    const tshi_op *op = &tshi_loss_nll_op;
    const tsh_loss_desc given = tshi_loss_options_of(desc);
    tsh_tensor *in[3] = {log_probs, target, given.weight}, *out;
    tsh_ctx *ctx = tshi_tensor_check(op->name, op->inputs, in, in[2] ? 3 : 2);
    tsh_cross_entropy_desc ce;
    tshi_output output;
    tshi_loss loss;
    memset(&ce, 0, sizeof ce);
    ce.reduction = given.reduction;
    ce.ignore = given.ignore;
    ce.ignore_index = given.ignore_index;
    ce.weight = given.weight;
    ce.dim = given.dim;
    if (!ctx || !tshi_tensor_check_floating(op->name, op->inputs, in, 1) ||
        (in[2] && !tshi_tensor_check_floating(op->name, "weight", &in[2], 1)) ||
        !tshi_loss_nll_check(in, &ce))
        return NULL;
    tshi_loss_warn_twice(log_probs, "tsh_softmax",
                         "tsh_nll_loss: log_probs is the result of tsh_softmax, but this loss "
                         "takes logarithms: tsh_log_softmax");
    if (!tshi_rule_run(op, in, 3, &ce, &output) || !tshi_loss_nll_plan(in, &ce, &loss)) return NULL;
    output.shape = tsh_shape_of(in[0]); /* shape (.., V) */
    output.shape.ndim = ce.reduction == TSH_REDUCE_NONE ? log_probs->ndim - 1 : 0;
    out = tshi_tensor_out(ctx, op->name, TSH_REAL, &output.shape, &output.layout);
    return out ? tshi_loss_nll_run(in, &loss, out) : NULL;
}
