/* ========================================================================== */
/* >>op-view                                        MARK: - op-view (private) */
/* Other shapes for the same values: permute, slice, concat, reshape.         */
/* Needs: >>op.                                                               */
/* ========================================================================== */

/* A view shares the memory (block) of its base and has sizes, strides, an offset and a layout of
 * its own. No node is recorded for it: a gradient of the view is added to the base's accumulators
 * at the view's offset and strides. Only concat copies values, and reshape if no strides fit. */

/* Makes dimension `from` of x dimension d of x's view: length, stride and sharding. */
static void tshi_view_dim(tsh_tensor *view, int d, const tsh_tensor *x, int from) {
    view->dim[d] = x->dim[from];
    view->local[d] = x->local[from];
    view->stride[d] = x->stride[from];
    if (x->layout.kind == TSH_SHARDED && x->layout.dim == from) view->layout.dim = d;
}

TSH_API tsh_tensor *tsh_permute(tsh_tensor *x, const int *dims) {
    tsh_ctx *ctx = tshi_tensor_check("tsh_permute", "x", &x, 1);
    tsh_tensor *out;
    unsigned seen = 0; /* bit mask: the dimensions of x that dims has named so far */
    int d;
    if (!ctx) return NULL;
    out = tshi_tensor_view(x);
    for (d = 0; out && d < x->ndim; d++) {
        /* the dimension of x that becomes dimension d of the view; -1: there is none */
        int from = dims ? tshi_tensor_axis(x, dims[d]) : -1;
        if (from < 0 || (seen >> from & 1u))
            return tshi_error_null(ctx, TSH_ERR_SHAPE,
                                   "tsh_permute: entry %d does not name a new dimension of %d", d,
                                   x->ndim);
        seen |= 1u << from;
        tshi_view_dim(out, d, x, from);
    }
    return out;
}

TSH_API tsh_tensor *tsh_transpose(tsh_tensor *x, int dim0, int dim1) {
    tsh_tensor *out;
    int a, b;
    if (!tshi_tensor_check("tsh_transpose", "x", &x, 1)) return NULL;
    if (tshi_tensor_scalar_axis(x, dim0) && tshi_tensor_scalar_axis(x, dim1))
        return tshi_tensor_view(x);
    a = tshi_tensor_axis(x, dim0);
    b = tshi_tensor_axis(x, dim1);
    if (a < 0 || b < 0)
        return tshi_error_null(x->ctx, TSH_ERR_SHAPE,
                               "tsh_transpose: no dimensions %d and %d among %d", dim0, dim1,
                               x->ndim);
    out = tshi_tensor_view(x);
    if (!out) return NULL;
    tshi_view_dim(out, a, x, b);
    tshi_view_dim(out, b, x, a);
    return out;
}

/* -- slices: tsh_slice, tsh_split ------------------------------------------ */

/* Narrows out, a view, to elements [start, start + length) of its sharded dimension d. Returns 0 if
 * these are not whole segments: of a part of a segment, no layout describes the ranks' shards. */
static int tshi_view_segments(tsh_tensor *out, int d, int64_t start, int64_t length) {
    tsh_layout *layout = &out->layout;
    const tsh_segment *segment = layout->segment;
    const int64_t end = start + length;
    tsh_range range[TSH_MAX_SEGMENTS]; /* this rank's range of each segment */
    int64_t at = 0, local = 0;         /* at: start of segment s; local: length kept on this rank */
    int s, kept = 0;                   /* kept: number of segments in [start, end) */
    (void)tshi_layout_own(layout, out->dim[d], &out->ctx->deal, out->ctx->tp.rank, range);
    for (s = 0; s < layout->segments && at < start; at += segment[s++].length)
        out->offset += range[s].length * out->stride[d]; /* skips this rank's range of segment s */
    if (at != start) return 0;                           /* the slice starts inside a segment */
    for (; s < layout->segments && at + segment[s].length <= end; at += segment[s++].length) {
        layout->segment[kept++] = segment[s]; /* in place, as kept <= s */
        local += range[s].length;
    }
    layout->segments = kept;
    out->local[d] = local;
    return kept && at == end; /* 0: the slice ends inside a segment */
}

/* Adds to `hint`, a part of an error's text, how a plan declares fused parts such as Q, K and V, if
 * the sharded dimension of x has one segment but may consist of `parts` fused parts. */
static TSHI_COLD void tshi_view_hint_fused(const tsh_tensor *x, int64_t parts, char *hint,
                                           size_t size) {
    if (x->layout.segments == 1 && parts > 1 && parts <= TSH_MAX_SEGMENTS)
        tsh_text_add(hint, size,
                     "if these are %d fused parts, as [Q|K|V], give the rule of their linear "
                     ".segments = %d in the plan (and .unit = head size); else ",
                     (int)parts, (int)parts);
}

TSH_API tsh_tensor *tsh_slice(tsh_tensor *x, int dim, int64_t start, int64_t length) {
    tsh_ctx *ctx = tshi_tensor_check("tsh_slice", "x", &x, 1);
    char text[TSHI_TEXT_SIZE], hint[2 * TSHI_TEXT_SIZE] = "";
    tsh_tensor *out;
    int d;
    if (!ctx) return NULL;
    d = tshi_tensor_axis(x, dim);
    if (d < 0 || start < 0 || length < 0 || start > x->dim[d] - length)
        return tshi_error_null(ctx, TSH_ERR_SHAPE,
                               "tsh_slice: %lld elements from %lld of dimension %d are outside %s",
                               (long long)length, (long long)start, dim, tshi_tensor_text(x, text));
    out = tshi_tensor_view(x);
    if (!out) return NULL;
    if (x->layout.kind == TSH_SHARDED && x->layout.dim == d && (start || length != x->dim[d])) {
        /* gives a hint if the slice is one of several equal parts, such as Q of [Q|K|V] */
        if (length > 0 && start % length == 0 && x->dim[d] % length == 0)
            tshi_view_hint_fused(x, x->dim[d] / length, hint, sizeof hint);
        if (!tshi_view_segments(out, d, start, length))
            return tshi_error_null(
                ctx, TSH_ERR_LAYOUT,
                "tsh_slice: [%lld, %lld) does not begin and end at segment boundaries of the "
                "sharded dimension of %s; %sgather it first: "
                "tsh_redistribute(x, tsh_replicated())",
                (long long)start, (long long)(start + length), tshi_tensor_text(x, text), hint);
    } else if (length != x->dim[d]) {
        out->offset += start * x->stride[d]; /* the dimension is not sharded */
        out->local[d] = length;
    }
    out->dim[d] = length;
    return out;
}

TSH_API tsh_result tsh_split(tsh_tensor *x, int dim, int n, tsh_tensor **parts) {
    int64_t length = tsh_size(x, dim); /* length of the dimension that is split */
    int i;
    for (i = 0; i < n && parts; i++) parts[i] = NULL; /* after an error, all parts are NULL */
    if (!tshi_tensor_check("tsh_split", "x", &x, 1))
        return x ? x->ctx->error.code : TSH_ERR_ARGUMENT;
    if (tshi_tensor_axis(x, dim) < 0)
        return tsh_fail(x->ctx, TSH_ERR_SHAPE, "tsh_split: there is no dimension %d of %d", dim,
                        x->ndim);
    if (n < 1 || !parts || length % n)
        return tsh_fail(x->ctx, TSH_ERR_SHAPE,
                        "tsh_split: a dimension of %lld has no %d equal parts", (long long)length,
                        n);
    for (i = 0; i < n; i++) parts[i] = tsh_slice(x, dim, i * (length / n), length / n);
    return x->ctx->error.code;
}

/* -- joining tensors: tsh_concat ------------------------------------------- */

/* Computes the backward of tsh_concat: adds to the gradient of each part its own range of dy, the
 * gradient of the output. */
static void tshi_view_concat_backward(tshi_node *node) {
    int dim = *(const int *)node->params, i;
    tsh_real *g = tshi_tape_grad(node);
    int64_t at = 0; /* index along dim at which part i starts in dy */
    for (i = 0; i < node->n; i++) {
        const tsh_tensor *part = node->in[i];
        tshi_dest dest;
        if (tshi_tape_dest(node, i, &dest))
            tshi_tape_accumulate(node->in[i], &dest, g + at * node->out->stride[dim],
                                 node->out->stride);
        at += part->local[dim];
    }
}

/* Returns 1 if part i can be joined to part 0 along dimension d: all other sizes are equal, and the
 * dtypes are equal or both are ones that ops compute with; else 0 and an error. */
static int tshi_view_concat_fits(tsh_tensor *const *parts, int i, int d) {
    const tsh_tensor *p = parts[i], *first = parts[0];
    char a[TSHI_TEXT_SIZE], b[TSHI_TEXT_SIZE];
    int e, fits = p->ndim == first->ndim; /* fits: 1 if all sizes except that of d are equal */
    for (e = 0; e < first->ndim && fits; e++) fits = e == d || p->dim[e] == first->dim[e];
    if (fits && (p->dtype == first->dtype ||
                 (tshi_dtype_computes(p->dtype) && tshi_dtype_computes(first->dtype))))
        return 1;
    (void)tsh_fail(p->ctx, fits ? TSH_ERR_DTYPE : TSH_ERR_SHAPE,
                   "tsh_concat: part %d, %s %s, does not go with %s %s along dimension %d", i,
                   tshi_dtype_name(p->dtype), tshi_tensor_text(p, a), tshi_dtype_name(first->dtype),
                   tshi_tensor_text(first, b), d);
    return 0;
}

static const tshi_op tshi_view_concat_op = {
    "tsh_concat", NULL, tshi_rule_concat, tshi_view_concat_backward, TSHI_NONE, 0};

TSH_API tsh_tensor *tsh_concat(tsh_tensor *const *parts, int n, int dim) {
    tsh_ctx *ctx = n > 0 && parts ? tshi_tensor_check("tsh_concat", "parts[]", parts, n) : NULL;
    const tshi_op *op = &tshi_view_concat_op;
    tshi_output output;
    tsh_tensor *out;
    int i, d;
    char *at; /* where the next part goes in out */
    if (!ctx) return NULL;
    if (n > 30) /* a node has a bit mask of its inputs */
        return tshi_error_null(ctx, TSH_ERR_ARGUMENT, "tsh_concat: %d parts; at most 30", n);
    d = tshi_tensor_axis(parts[0], dim);
    if (d < 0)
        return tshi_error_null(ctx, TSH_ERR_SHAPE, "tsh_concat: no dimension %d among %d", dim,
                               parts[0]->ndim);
    output.shape = tsh_shape_of(parts[0]);
    for (i = 1; i < n; i++) {
        if (!tshi_view_concat_fits(parts, i, d)) return NULL;
        output.shape.dim[d] += parts[i]->dim[d]; /* the sum of the parts' sizes */
    }
    if (!tshi_rule_run(op, parts, n, &d, &output)) return NULL;
    out = tshi_tensor_out(ctx, "tsh_concat", tshi_tensor_promote(parts, n), &output.shape,
                          &output.layout);
    if (!out) return NULL;
    at = (char *)tshi_tensor_at(out);
    for (i = 0; i < n; i++) {
        tshi_loop loop;
        tshi_kernel_space(&loop, parts[i]);
        tshi_kernel_add_operand(&loop, parts[i], at, out->stride, out->dtype);
        tshi_kernel_tensor(&loop, parts[i]);
        tshi_kernel_run(&loop, tshi_kernel_copy, NULL);
        at += parts[i]->local[d] * out->stride[d] * tshi_dtypes[out->dtype].size;
    }
    tshi_op_record(op, out, parts, n, TSHI_NONE, &d, sizeof d, NULL);
    return out;
}

/* -- new shapes: tsh_reshape ----------------------------------------------- */

/* Replaces the size -1 in shape, if there is one, by the size that fits. Returns 0 if shape cannot
 * have as many elements as x. */
static int tshi_view_sizes(const tsh_tensor *x, tsh_shape *shape) {
    int64_t total = tsh_numel(x), known = 1; /* known: product of the sizes given */
    int d, open = -1;                        /* open: the dimension whose size is -1 */
    for (d = 0; d < shape->ndim; d++) {
        if (shape->dim[d] < -1 || (shape->dim[d] < 0 && open >= 0)) return 0;
        if ((double)known * (double)shape->dim[d] > 9e18) return 0;
        if (shape->dim[d] < 0)
            open = d;
        else
            known *= shape->dim[d];
    }
    if (open >= 0 && known) shape->dim[open] = total / known;
    if (open >= 0) known *= shape->dim[open]; /* equals total if the size -1 has a solution */
    return known == total;
}

/* Finds which dimensions become which in a reshape: the smallest group [a0, a1) of x's dimensions
 * that contains d, and the group [b0, b1) of shape's dimensions with the same product. (2, 3, 4) to
 * (6, 2, 2): {0, 1} becomes {0}, {2} becomes {1, 2}. */
static void tshi_view_group(const tsh_tensor *x, const tsh_shape *shape, int d, int *a0, int *a1,
                            int *b0, int *b1) {
    int i = 0, j = 0; /* i: next dimension of x; j: of shape */
    while (i < x->ndim) {
        int64_t p = x->dim[i], q = j < shape->ndim ? shape->dim[j] : 1;
        *a0 = i++;
        *b0 = j;
        if (j < shape->ndim) j++;
        while (p != q) { /* extends the group with the smaller product */
            if (p < q && i < x->ndim)
                p *= x->dim[i++];
            else if (j < shape->ndim)
                q *= shape->dim[j++];
            else
                break;
        }
        *a1 = i;
        *b1 = j;
        if (d < i) return; /* the group contains d */
    }
}

/* Fills in the layout after a reshape of x, which is sharded and not empty. Returns 0 if no layout
 * describes the shards: x's sharded dimension d is not the outermost of those that are merged, or a
 * unit, which must stay on one rank, would be cut. */
static int tshi_view_shards(const tsh_tensor *x, const tsh_shape *shape, tsh_layout *layout) {
    int a0 = 0, a1 = 0, b0 = 0, b1 = 0, d = x->layout.dim, e, s, same;
    /* inner: elements per index of d in x; divisor: per index of layout->dim in shape */
    int64_t inner, divisor;
    *layout = x->layout;
    tshi_view_group(x, shape, d, &a0, &a1, &b0, &b1);
    for (e = a0; e < d; e++)
        if (x->dim[e] != 1) return 0; /* d is not the outermost of the merged dimensions */
    inner = tshi_tensor_product(x->dim + d + 1, a1 - d - 1);
    while (b0 < b1 - 1 && shape->dim[b0] == 1 && /* skips sizes of 1, unless they are whole units */
           layout->segment[0].unit * inner % tshi_tensor_product(shape->dim + b0 + 1, b1 - b0 - 1))
        b0++;
    if (b0 >= b1) return 0;
    /* (3 D) to (3, D), as with fused q, k, v: three equal segments of x become one, along D */
    same = layout->segments > 1 && shape->dim[b0] == layout->segments && b0 + 1 < b1;
    for (s = 1; s < layout->segments && same; s++)
        same = layout->segment[s].length == layout->segment[0].length &&
               layout->segment[s].unit == layout->segment[0].unit;
    if (same) { /* the dimension after that of the segments is the sharded one */
        layout->segments = 1;
        b0++;
    }
    layout->dim = b0; /* its segments are as long as those of d, times inner / divisor */
    divisor = tshi_tensor_product(shape->dim + b0 + 1, b1 - b0 - 1);
    for (s = 0; s < layout->segments; s++) {
        tsh_segment *segment = &layout->segment[s];
        if (segment->length * inner % divisor || segment->unit * inner % divisor) return 0;
        segment->length = segment->length * inner / divisor;
        segment->unit = segment->unit * inner / divisor;
    }
    return 1;
}

/* Does what tshi_view_shards does, for an x without elements. If the sharded dimension has length
 * 0, it becomes the corresponding dimension of length 0; else the one that it would become if all
 * sizes of 0 were 1. */
static TSHI_COLD int tshi_view_no_shards(const tsh_tensor *x, const tsh_shape *shape,
                                         tsh_layout *layout) {
    tsh_tensor from = *x; /* from, to: x's shape and the new shape, with 1 for each size of 0 */
    tsh_shape to = *shape;
    int d, zeros = 0; /* zeros: how many sizes of x are 0, up to and including the sharded one */
    for (d = 0; d < x->ndim; d++) {
        if (!x->dim[d] && d <= x->layout.dim) zeros++;
        if (!x->dim[d]) from.dim[d] = 1;
    }
    *layout = tsh_sharded(0);
    for (d = 0; d < to.ndim; d++) {
        if (to.dim[d]) continue;
        if (zeros-- > 0) layout->dim = d; /* the dimension of length 0 that matches x's */
        to.dim[d] = 1;
    }
    return (!x->dim[x->layout.dim] || tshi_view_shards(&from, &to, layout)) &&
           tshi_layout_resolve(layout, shape->ndim, shape->dim);
}

/* Fills in the layout of x after a reshape. Returns 0 if no layout describes the shards. */
static int tshi_view_layout(const tsh_tensor *x, const tsh_shape *shape, tsh_layout *layout) {
    *layout = x->layout;
    if (layout->kind != TSH_SHARDED) return 1; /* R and P fit any shape */
    return tsh_numel(x) ? tshi_view_shards(x, shape, layout)
                        : tshi_view_no_shards(x, shape, layout);
}

/* Adds to `hint`, a part of an error's text, how a plan declares fused parts or heads, if the
 * reshape that is refused splits the sharded dimension of x into such, as (3 H D) to (3, H, D), or
 * (H D) to (H, D). */
static TSHI_COLD void tshi_view_hint_split(const tsh_tensor *x, const tsh_shape *shape, char *hint,
                                           size_t size) {
    int a0 = 0, a1 = 0, b0 = 0, b1 = 0, heads; /* heads: which dimension of shape counts heads */
    if (!tsh_numel(x)) return;
    tshi_view_group(x, shape, x->layout.dim, &a0, &a1, &b0, &b1);
    if (a1 - a0 != 1 || b1 - b0 < 2) return; /* the sharded dimension is merged, or not split */
    if (b1 - b0 > 2 || shape->dim[b0] == 3) tshi_view_hint_fused(x, shape->dim[b0], hint, size);
    heads = b0 + (x->layout.segments > 1 && b1 - b0 > 2);
    if (!*hint)
        tsh_text_add(hint, size,
                     "if these are %lld heads, give the rule of their linear .unit = %lld in the "
                     "plan; else ",
                     (long long)shape->dim[heads],
                     (long long)tshi_tensor_product(shape->dim + heads + 1, b1 - heads - 1));
}

/* Fills in the strides with which x's local values have the ndim local sizes `to`. Returns 0 if
 * there are no such strides: then x must be copied. */
static int tshi_view_strides(const tsh_tensor *x, int ndim, const int64_t *to, int64_t *stride) {
    int64_t run = 1, step = 1; /* run: number of elements that lie `step` apart */
    /* i: the next dimension of x, j: of `to`, both from the last one down */
    int i = x->ndim - 1, j = ndim - 1;
    tshi_tensor_strides(to, ndim, stride);
    if (!tsh_local_numel(x)) return 1; /* no values: any strides do */
    while (i >= 0) {
        while (i >= 0 && x->local[i] == 1) i--; /* skips sizes of 1: any stride does */
        if (i < 0) break;
        step = x->stride[i];
        run = x->local[i];
        while (i > 0 && (x->local[i - 1] == 1 || x->stride[i - 1] == step * run))
            run *= x->local[--i]; /* dimension i continues the run */
        i--;
        for (; j >= 0 && (run > 1 || to[j] == 1); j--) {
            if (run % to[j]) return 0; /* to[j] would need two strides */
            stride[j] = step;
            step *= to[j];
            run /= to[j];
        }
        if (run != 1) return 0; /* `to` has no dimension left for the rest of the run */
    }
    return 1;
}

TSH_API tsh_tensor *tsh_reshape(tsh_tensor *x, tsh_shape shape) {
    tsh_ctx *ctx = tshi_tensor_check("tsh_reshape", "x", &x, 1);
    char from[TSHI_TEXT_SIZE], to[TSHI_TEXT_SIZE], hint[2 * TSHI_TEXT_SIZE] = "";
    const tsh_shape wanted = shape; /* the shape as given, perhaps with a -1 */
    tsh_tensor *out;
    tsh_layout layout;
    if (!ctx) return NULL;
    if (shape.ndim < 0 || shape.ndim > TSH_MAX_DIMS)
        return tshi_error_null(ctx, TSH_ERR_SHAPE,
                               "tsh_reshape: %s to %d dimensions; there may be 0 to %d",
                               tshi_tensor_text(x, from), shape.ndim, TSH_MAX_DIMS);
    if (!tshi_view_sizes(x, &shape))
        return tshi_error_null(ctx, TSH_ERR_SHAPE,
                               "tsh_reshape: %s has %lld elements, which do not fit the new shape "
                               "%s",
                               tshi_tensor_text(x, from), (long long)tsh_numel(x),
                               tshi_tensor_sizes(wanted.dim, wanted.ndim, to));
    if (!tshi_view_layout(x, &shape, &layout)) {
        tshi_view_hint_split(x, &shape, hint, sizeof hint);
        return tshi_error_null(ctx, TSH_ERR_LAYOUT,
                               "tsh_reshape: from %s to %s would cut across the sharded dimension "
                               "or its units of %lld; "
                               "%sgather it first: tsh_redistribute(x, tsh_replicated())",
                               tshi_tensor_text(x, from),
                               tshi_tensor_sizes(shape.dim, shape.ndim, to),
                               (long long)x->layout.segment[0].unit, hint);
    }
    out = tshi_tensor_view(x);
    if (!out || tshi_tensor_set_shape(out, "tsh_reshape", &shape, &layout) != TSH_OK) return NULL;
    if (!tshi_view_strides(x, out->ndim, out->local, out->stride)) {
        x = tshi_op_copy("tsh_reshape", x); /* dense: has strides for every shape */
        return x ? tsh_reshape(x, shape) : NULL;
    }
    return out;
}
