/* ========================================================================== */
/* >>op-shape                                      MARK: - op-shape (private) */
/* Other shapes: squeeze, unsqueeze, stack, expand, tile, slices with a step. */
/* Needs: >>rule-index >>op-view.                                             */
/* ========================================================================== */

/* squeeze, unsqueeze and slice_step return views, as the ops of >>op-view do. No other op expects a
 * stride of 0 in its inputs, and a view's gradient lies in that of its base, so expand copies. */

/* -- squeeze, unsqueeze, stack ----------------------------------------------- */

/* Returns the index that dim (negative: from the end) gives to a dimension that is added to ndim
 * others; -1: there is none. */
static int tshi_shape_place(int ndim, int dim) {
    const int at = dim < 0 ? dim + ndim + 1 : dim;
    return at >= 0 && at <= ndim ? at : -1;
}

/* Returns a view of x without its dimension d, which has length 1 and is not sharded. */
static tsh_tensor *tshi_shape_without(tsh_tensor *x, int d) {
    tsh_tensor *out = tshi_tensor_view(x);
    int e;
    if (!out) return NULL;
    out->ndim--;
    for (e = d; e < out->ndim; e++) tshi_view_dim(out, e, x, e + 1);
    return out;
}

TSH_API tsh_tensor *tsh_squeeze(tsh_tensor *x, int dim) {
    tsh_ctx *ctx = tshi_tensor_check("tsh_squeeze", "x", &x, 1);
    char text[TSHI_TEXT_SIZE];
    int d, axis;
    if (!ctx) return NULL;
    axis = tshi_tensor_axis(x, dim);
    if (dim != TSH_ALL && axis < 0 && !tshi_tensor_scalar_axis(x, dim))
        return tshi_error_null(ctx, TSH_ERR_SHAPE, "tsh_squeeze: there is no dimension %d in %s",
                               dim, tshi_tensor_text(x, text));
    for (d = x->ndim - 1; d >= 0 && x; d--) {
        if (x->dim[d] != 1 || (dim != TSH_ALL && d != axis)) continue;
        if (x->layout.kind == TSH_SHARDED && x->layout.dim == d)
            return tshi_error_null(ctx, TSH_ERR_LAYOUT,
                                   "tsh_squeeze: %s is sharded along dimension %d, which would be "
                                   "removed; gather it first: "
                                   "tsh_redistribute(x, tsh_replicated())",
                                   tshi_tensor_text(x, text), d);
        x = tshi_shape_without(x, d);
        if (!x) return NULL;
    }
    return x && x->base == x ? tshi_tensor_view(x) : x;
}

TSH_API tsh_tensor *tsh_unsqueeze(tsh_tensor *x, int dim) {
    tsh_ctx *ctx = tshi_tensor_check("tsh_unsqueeze", "x", &x, 1);
    char text[TSHI_TEXT_SIZE];
    tsh_tensor *out;
    int e, at;
    if (!ctx) return NULL;
    at = tshi_shape_place(x->ndim, dim);
    if (at < 0 || x->ndim == TSH_MAX_DIMS)
        return tshi_error_null(ctx, TSH_ERR_SHAPE,
                               "tsh_unsqueeze: no place %d for a new dimension in %s (at most %d "
                               "dimensions)",
                               dim, tshi_tensor_text(x, text), TSH_MAX_DIMS);
    out = tshi_tensor_view(x);
    if (!out) return NULL;
    for (e = at; e < x->ndim; e++) tshi_view_dim(out, e + 1, x, e);
    out->ndim++;
    out->dim[at] = out->local[at] = 1;
    /* the stride of a dense tensor, although any would do */
    out->stride[at] = at < x->ndim ? x->stride[at] * (x->local[at] > 1 ? x->local[at] : 1) : 1;
    return out;
}

/* Returns 1 if part i can be stacked on part 0: it has the same shape and layout, and a dtype that
 * can be converted; else 0 and an error. */
static int tshi_shape_stacks(tsh_tensor *const *parts, int i) {
    const tsh_tensor *p = parts[i], *first = parts[0];
    char a[TSHI_TEXT_SIZE], b[TSHI_TEXT_SIZE];
    const int shapes = p->ndim == first->ndim &&
                       memcmp(p->dim, first->dim, (size_t)p->ndim * sizeof *p->dim) == 0;
    const int dtypes = p->dtype == first->dtype ||
                       (tshi_dtype_computes(p->dtype) && tshi_dtype_computes(first->dtype));
    const int layouts = shapes &&
                        tshi_layout_equal(&p->layout, &first->layout, p->dim, &p->ctx->deal);
    if (shapes && dtypes && layouts) return 1;
    return tshi_error_zero(p->ctx,
                           !shapes   ? TSH_ERR_SHAPE
                           : !dtypes ? TSH_ERR_DTYPE
                                     : TSH_ERR_LAYOUT,
                           "tsh_stack: part %d, %s %s, is not like part 0, %s %s; parts have one "
                           "shape and one layout: tsh_expand, tsh_cast, tsh_redistribute",
                           i, tshi_dtype_name(p->dtype), tshi_tensor_text(p, a),
                           tshi_dtype_name(first->dtype), tshi_tensor_text(first, b));
}

TSH_API tsh_tensor *tsh_stack(tsh_tensor *const *parts, int n, int dim) {
    enum { MOST = 30 }; /* most parts, as in tsh_concat */
    tsh_ctx *ctx = n > 0 && parts ? tshi_tensor_check("tsh_stack", "parts[]", parts, n) : NULL;
    tsh_tensor *row[MOST];
    int i, at;
    if (!ctx) return NULL;
    at = tshi_shape_place(parts[0]->ndim, dim);
    if (n > MOST)
        return tshi_error_null(ctx, TSH_ERR_ARGUMENT, "tsh_stack: %d parts; at most %d", n, MOST);
    if (at < 0 || parts[0]->ndim == TSH_MAX_DIMS)
        return tshi_error_null(ctx, TSH_ERR_SHAPE,
                               "tsh_stack: no place %d for a new dimension among %d (at most %d)",
                               dim, parts[0]->ndim, TSH_MAX_DIMS);
    for (i = 0; i < n; i++) {
        if (!tshi_shape_stacks(parts, i)) return NULL;
        row[i] = tsh_unsqueeze(parts[i], at);
    }
    return tsh_concat(row, n, at);
}

/* -- expand, tile, repeat_interleave ------------------------------------------ */

/* Backward of expand, tile and repeat_interleave: adds the gradient of the output to that of x,
 * summed over repeated elements. */
static void tshi_shape_expand_backward(tshi_node *node) {
    tsh_tensor *out = node->out;
    tshi_loop loop;
    tshi_dest dest;
    if (!tshi_tape_dest_zeroed(node, 0, &dest)) return;
    tshi_kernel_space(&loop, out);
    tshi_kernel_add_operand(&loop, node->in[0], dest.data, dest.stride, TSH_REAL);
    tshi_kernel_add_operand(&loop, out, tshi_tape_grad(node), out->stride, TSH_REAL);
    tshi_kernel_run(&loop, tshi_kernel_add[out->ctx->isa], NULL);
}

/* Runs op, whose output is x broadcast to `shape`. */
static tsh_tensor *tshi_shape_expanded(const tshi_op *op, tsh_tensor *x, tsh_shape shape) {
    tshi_rule_moves moves = {0, 1, 0};
    char from[TSHI_TEXT_SIZE], to[TSHI_TEXT_SIZE];
    tshi_output output;
    tshi_loop loop;
    tsh_tensor *out;
    int d, fits = shape.ndim >= x->ndim && shape.ndim <= TSH_MAX_DIMS;
    if (fits) moves.skip = shape.ndim - x->ndim;
    output.shape = shape;
    for (d = 0; d < x->ndim && fits; d++) {
        int64_t *length = &output.shape.dim[d + moves.skip];
        if (*length == -1) *length = x->dim[d];
        fits = *length >= 0 && (*length == x->dim[d] || x->dim[d] == 1);
        if (*length != x->dim[d]) moves.dims |= 1u << d;
    }
    for (d = 0; d < moves.skip && fits; d++) fits = shape.dim[d] >= 0;
    if (!fits) {
        /* an invalid ndim: the error's text gets no sizes */
        if (shape.ndim < 0 || shape.ndim > TSH_MAX_DIMS) shape.ndim = 0;
        return tshi_error_null(x->ctx, TSH_ERR_SHAPE,
                               "%s: %s does not broadcast to %s; counted from the last one, sizes "
                               "are equal, 1 in x, or -1: tsh_reshape",
                               op->name, tshi_tensor_text(x, from),
                               tshi_tensor_sizes(shape.dim, shape.ndim, to));
    }
    if (!tshi_rule_run(op, &x, 1, &moves, &output)) return NULL;
    out = tshi_tensor_out(x->ctx, op->name, x->dtype, &output.shape, &output.layout);
    if (!out) return NULL;
    tshi_kernel_space(&loop, out);
    tshi_kernel_tensor(&loop, out);
    tshi_kernel_tensor(&loop, x); /* strides 0 where x has length 1 */
    tshi_kernel_run(&loop, tshi_kernel_copy, NULL);
    tshi_op_record(op, out, &x, 1, TSHI_NONE, NULL, 0, NULL);
    return out;
}

static const tshi_op tshi_shape_expand_op = {
    "tsh_expand", "x", tshi_rule_moved, tshi_shape_expand_backward, TSHI_NONE, 0};
static const tshi_op tshi_shape_tile_op = {
    "tsh_tile", "x", tshi_rule_moved, tshi_shape_expand_backward, TSHI_NONE, 0};
static const tshi_op tshi_shape_repeat_op = {"tsh_repeat_interleave",    "x",       tshi_rule_moved,
                                             tshi_shape_expand_backward, TSHI_NONE, 0};

TSH_API tsh_tensor *tsh_expand(tsh_tensor *x, tsh_shape shape) {
    return tshi_tensor_check("tsh_expand", "x", &x, 1)
               ? tshi_shape_expanded(&tshi_shape_expand_op, x, shape)
               : NULL;
}

/* Repeats each element of dimension d (whole 0), or the dimension as a whole (whole 1), r times: a
 * new dimension after d or before it is expanded to r, and merged with d. */
static tsh_tensor *tshi_shape_repeated(const tshi_op *op, tsh_tensor *x, int d, int64_t r,
                                       int whole) {
    tsh_tensor *row = tsh_unsqueeze(x, whole ? d : d + 1);
    tsh_shape shape = tsh_shape_of(row), merged = tsh_shape_of(x);
    if (!row) return NULL;
    shape.dim[whole ? d : d + 1] = r;
    row = tshi_shape_expanded(op, row, shape);
    if (!row) return NULL;
    merged.dim[d] *= r; /* no overflow: row has as many elements */
    return tsh_reshape(row, merged);
}

/* Returns 1 if x can be repeated r times along dimension d; else 0 and an error. merges 1: this may
 * be the sharded dimension, unless r is 0. */
static int tshi_shape_repeats(const char *op, const tsh_tensor *x, int d, int64_t r, int merges) {
    const int cut = x->layout.kind == TSH_SHARDED && x->layout.dim == d;
    char text[TSHI_TEXT_SIZE];
    if (r < 0 || x->ndim == TSH_MAX_DIMS)
        return tshi_error_zero(
            x->ctx, TSH_ERR_SHAPE,
            "%s: %s %lld times along dimension %d; takes 0 times or more, and at "
            "most %d dimensions",
            op, tshi_tensor_text(x, text), (long long)r, d, TSH_MAX_DIMS - 1);
    if (cut && (!merges || !r))
        return tshi_error_zero(x->ctx, TSH_ERR_LAYOUT,
                               "%s: %s is sharded along dimension %d, which would be repeated %lld "
                               "times; gather it first: tsh_redistribute(x, tsh_replicated())",
                               op, tshi_tensor_text(x, text), d, (long long)r);
    return 1;
}

TSH_API tsh_tensor *tsh_tile(tsh_tensor *x, const int64_t *repeats, int n) {
    tsh_ctx *ctx = tshi_tensor_check("tsh_tile", "x", &x, 1);
    tsh_tensor *out = x;
    int d;
    if (!ctx) return NULL;
    if (n < 0 || n > TSH_MAX_DIMS || (n > 0 && !repeats))
        return tshi_error_null(ctx, TSH_ERR_ARGUMENT, "tsh_tile: %d repeats; takes 0 to %d%s", n,
                               TSH_MAX_DIMS, n > 0 && !repeats ? ", not NULL" : "");
    while (out && out->ndim < n) out = tsh_unsqueeze(out, 0);
    for (d = 0; d < n && out; d++) {
        const int axis = out->ndim - n + d;
        if (repeats[d] == 1) continue;
        if (!tshi_shape_repeats("tsh_tile", out, axis, repeats[d], 0)) return NULL;
        out = tshi_shape_repeated(&tshi_shape_tile_op, out, axis, repeats[d], 1);
    }
    return out == x ? tsh_clone(x) : out;
}

TSH_API tsh_tensor *tsh_repeat_interleave(tsh_tensor *x, int64_t repeats, int dim) {
    tsh_ctx *ctx = tshi_tensor_check("tsh_repeat_interleave", "x", &x, 1);
    char text[TSHI_TEXT_SIZE];
    int axis;
    if (!ctx) return NULL;
    if (tshi_tensor_scalar_axis(x, dim)) x = tsh_unsqueeze(x, 0);
    axis = x ? tshi_tensor_axis(x, dim) : -1;
    if (axis < 0)
        return tshi_error_null(ctx, TSH_ERR_SHAPE,
                               "tsh_repeat_interleave: there is no dimension %d in %s", dim,
                               x ? tshi_tensor_text(x, text) : "x");
    if (!tshi_shape_repeats("tsh_repeat_interleave", x, axis, repeats, 1)) return NULL;
    return tshi_shape_repeated(&tshi_shape_repeat_op, x, axis, repeats, 0);
}

/* -- slice_step ----------------------------------------------------------------- */

/* Returns bound `at` of a Python slice of n elements as an index in [0, n]: a negative one counts
 * from the end. */
static int64_t tshi_shape_bound(int64_t at, int64_t n) {
    if (at < 0) at = at < -n ? 0 : at + n;
    return tshi_base_min(at, n);
}

TSH_API tsh_tensor *tsh_slice_step(tsh_tensor *x, int dim, int64_t start, int64_t stop,
                                   int64_t step) {
    tsh_ctx *ctx = tshi_tensor_check("tsh_slice_step", "x", &x, 1);
    char text[TSHI_TEXT_SIZE];
    int64_t n, length;
    tsh_tensor *out;
    int d;
    if (!ctx) return NULL;
    d = tshi_tensor_axis(x, dim);
    if (d < 0 || step < 1)
        return tshi_error_null(
            ctx, TSH_ERR_SHAPE,
            "tsh_slice_step: dimension %d of %s, step %lld; takes a dimension of "
            "x and a step of 1 or more (tsh_flip reverses)",
            dim, tshi_tensor_text(x, text), (long long)step);
    n = x->dim[d];
    start = tshi_shape_bound(start, n);
    stop = tshi_shape_bound(stop, n);
    length = stop > start ? (stop - start - 1) / step + 1 : 0;
    out = tshi_tensor_view(x);
    if (!out || length == n) return out;
    if (x->layout.kind != TSH_SHARDED || x->layout.dim != d) {
        out->offset += length ? start * x->stride[d] : 0;
        out->stride[d] *= length > 1 ? step : 1;
        out->local[d] = length;
    } else if ((step > 1 && length > 1) || !tshi_view_segments(out, d, start, length)) {
        return tshi_error_null(ctx, TSH_ERR_LAYOUT,
                               "tsh_slice_step: [%lld:%lld:%lld] along the sharded dimension of %s "
                               "is not whole segments; gather it first: "
                               "tsh_redistribute(x, tsh_replicated())",
                               (long long)start, (long long)stop, (long long)step,
                               tshi_tensor_text(x, text));
    }
    out->dim[d] = length;
    return out;
}
