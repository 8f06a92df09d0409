/* ========================================================================== */
/* >>rule-index                                  MARK: - rule-index (private) */
/* Layout rules of ops on shapes and indices.                                 */
/* Needs: >>rule.                                                             */
/* ========================================================================== */

/* -- padding, flip, roll, expand, one_hot: their layout rules ---------------- */

/* Parameters of tshi_rule_moved. */
typedef struct tshi_rule_moves {
    unsigned dims; /* bit mask: the dimensions of x along which elements are moved or repeated */
    int linear;    /* 1: the op is linear, so x may be P */
    int skip;      /* number of dimensions that the output has before those of x */
} tshi_rule_moves;

/* Applies the rule of ops that move elements along some dimensions: the output has the layout of x,
 * which may be R, S along another dimension and, if the op is linear, P. */
static int tshi_rule_moved(const tshi_call *call, tshi_output *output) {
    const tshi_rule_moves *moves = (const tshi_rule_moves *)call->params;
    const tsh_layout *layout = &call->in[0]->layout;
    if (layout->kind == TSH_PARTIAL && !moves->linear)
        return tshi_rule_refuse_input(call, "is a partial sum, and the op is not linear");
    if (layout->kind != TSH_SHARDED) return 1;
    if (moves->dims >> layout->dim & 1u)
        return tshi_rule_refuse_input(call, "is sharded along a dimension that the op changes");
    output->layout.dim += moves->skip;
    return 1;
}

/* -- gather, scatter_add, index_select: their layout rules -------------------- */

/* Returns 1 if x and t are sharded into the same shards, along the same dimension, which is not
 * `axis` and has the same length in both. */
static int tshi_rule_beside(const tsh_tensor *x, const tsh_tensor *t, int axis) {
    const int d = x->layout.dim;
    return x->layout.kind == TSH_SHARDED && t->layout.kind == TSH_SHARDED && d != axis &&
           t->layout.dim == d && x->dim[d] == t->dim[d] &&
           tshi_layout_same_shards(&x->layout, &t->layout, x->dim[d], &x->ctx->deal);
}

/* Fails because the layouts of x (input 0) and of t, an index or src, do not fit each other in an
 * op along `axis`. Returns 0. */
static int tshi_rule_refuse_index(const tshi_call *call, const tsh_tensor *t, int axis) {
    const tsh_tensor *x = call->in[0];
    const char *hint = "shard both alike, along another dimension than that of the index: "
                       "tsh_redistribute(x, tsh_layout_of(index)), or gather them: "
                       "tsh_redistribute(x, tsh_replicated())";
    if (tshi_rule_is_sharded(x, axis))
        hint = "no rank has all elements along the dimension of the index: "
               "tsh_redistribute(x, tsh_replicated())";
    else if (x->layout.kind == TSH_PARTIAL || t->layout.kind == TSH_PARTIAL)
        hint = "complete the partial sum first: tsh_redistribute(x, tsh_replicated())";
    return tshi_rule_refuse(call, x, t, hint);
}

/* Applies the layout rule of gather along an axis. Its cases, as "x index: output":
 * R R: R.  P R: P.  R S(axis): S(axis), and the gradient of x is P.
 * S(d) S(d): S(d), if d is not the axis. */
static int tshi_rule_gather(const tshi_call *call, tshi_output *output) {
    const int axis = ((const tshi_rule_axis *)call->params)->axis;
    const tsh_tensor *x = call->in[0], *index = call->in[1];
    if (index->layout.kind == TSH_REPLICATED && x->layout.kind != TSH_SHARDED) return 1;
    if (tshi_rule_beside(x, index, axis)) return 1;
    if (x->layout.kind != TSH_REPLICATED || !tshi_rule_is_sharded(index, axis))
        return tshi_rule_refuse_index(call, index, axis);
    output->layout = index->layout;
    output->partial = TSHI_X; /* each rank has the gradients of its own part of the index */
    return 1;
}

/* Applies the layout rule of scatter_add along an axis. Its cases, as "x index src: output":
 * R R R: R.  P R P: P.  S(d) S(d) S(d): S(d), if d is not the axis. */
static int tshi_rule_scatter(const tshi_call *call, tshi_output *output) {
    const int axis = ((const tshi_rule_axis *)call->params)->axis;
    const tsh_tensor *x = call->in[0], *index = call->in[1], *src = call->in[2];
    (void)output;
    if (x->layout.kind != TSH_SHARDED && index->layout.kind == TSH_REPLICATED &&
        src->layout.kind == x->layout.kind)
        return 1;
    if (!tshi_rule_beside(x, index, axis) && x->layout.kind != TSH_PARTIAL)
        return x->layout.kind == TSH_REPLICATED && index->layout.kind == TSH_REPLICATED
                   ? tshi_rule_refuse_index(call, src, axis)
                   : tshi_rule_refuse_index(call, index, axis);
    return tshi_rule_beside(x, src, axis) || tshi_rule_refuse_index(call, src, axis);
}

/* Applies the layout rule of index_select along an axis, with a 1-D index. Cases, as "x index:
 * output":
 * R R: R.  P R: P.  S(d) R: S(d), if d is not the axis.
 * R S(0): S(axis), and the gradient of x is P.
 * S(axis) R: P, because a rank outputs 0 for slices that it does not hold. */
static int tshi_rule_select(const tshi_call *call, tshi_output *output) {
    const int axis = ((const tshi_rule_axis *)call->params)->axis;
    const tsh_tensor *x = call->in[0], *index = call->in[1];
    if (index->layout.kind == TSH_REPLICATED) {
        if (tshi_rule_is_sharded(x, axis)) output->layout = tsh_partial();
        return 1;
    }
    if (index->layout.kind == TSH_PARTIAL || x->layout.kind != TSH_REPLICATED)
        return tshi_rule_refuse(call, x, index,
                                "an x that is not replicated takes a replicated index: "
                                "tsh_redistribute(index, tsh_replicated())");
    output->layout = index->layout;
    output->layout.dim = axis;
    output->partial = TSHI_X;
    return 1;
}
