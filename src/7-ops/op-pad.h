/* ========================================================================== */
/* >>op-pad                                          MARK: - op-pad (private) */
/* Elements in other places: pad, flip, roll, triangles of matrices.          */
/* Needs: >>rule-index >>op.                                                  */
/* ========================================================================== */

/* These ops copy elements from x to places of the output; in backward, they add the gradients of
 * these places to that of x. */

/* -- pad, flip, roll: boxes ----------------------------------------------------
 * Along each dimension, the output consists of at most three runs, whose elements are x's in order,
 * in reverse order, or all the same one. One run of each dimension make up a box: its elements are
 * copied by one strided loop. */

typedef struct tshi_pad_run {
    /* elements to, to + 1, ... of the output are elements from, from + step, ... of x */
    int64_t to, from, length;
    int64_t step; /* 1; -1: in reverse; 0: the same element repeated */
} tshi_pad_run;

/* The runs along each dimension; the params of the node. */
typedef struct tshi_pad_runs {
    int count[TSH_MAX_DIMS];
    tshi_pad_run run[TSH_MAX_DIMS][3];
} tshi_pad_runs;

/* Appends a run to those of dimension d, unless it is empty. */
static void tshi_pad_add_run(tshi_pad_runs *runs, int d, int64_t from, int64_t length,
                             int64_t step) {
    const tshi_pad_run *last = runs->count[d] ? &runs->run[d][runs->count[d] - 1] : NULL;
    tshi_pad_run run;
    if (length <= 0) return;
    run.to = last ? last->to + last->length : 0;
    run.from = from;
    run.length = length;
    run.step = step;
    runs->run[d][runs->count[d]++] = run;
}

/* Gives each dimension one run, which copies it unchanged. */
static void tshi_pad_same_runs(tshi_pad_runs *runs, const tsh_tensor *x) {
    int d;
    memset(runs, 0, sizeof *runs);
    for (d = 0; d < x->ndim; d++) tshi_pad_add_run(runs, d, 0, x->local[d], 1);
}

/* One side of a copy: the array that is read or written, and its strides. */
typedef struct tshi_pad_side {
    tshi_operand data;
    const int64_t *stride;
} tshi_pad_side;

static tshi_pad_side tshi_pad_side_of(void *data, const int64_t *stride, tsh_dtype dtype) {
    tshi_pad_side side;
    side.data = tshi_kernel_operand(data, 0, dtype);
    side.stride = stride;
    return side;
}

/* Runs `kernel` over the box that has run choice[d] along each dimension d: from x to y, or, if
 * backward is 1, from y to x. x: an array in the shape of the op's input; y: in that of its output,
 * which is `like`. */
static void tshi_pad_box(const tsh_tensor *like, const tshi_pad_runs *runs, const int *choice,
                         tshi_pad_side x, tshi_pad_side y, int backward, tshi_kernel_fn kernel) {
    tshi_loop loop;
    int d;
    tshi_kernel_space(&loop, like);
    loop.n = 2;
    for (d = 0; d < like->ndim; d++) {
        const tshi_pad_run *run = &runs->run[d][choice[d]];
        loop.dim[d] = run->length;
        tshi_kernel_move(&x.data, run->from * x.stride[d]);
        tshi_kernel_move(&y.data, run->to * y.stride[d]);
        loop.stride[backward][d] = y.stride[d];
        loop.stride[!backward][d] = run->step * x.stride[d];
    }
    loop.x[backward] = y.data;
    loop.x[!backward] = x.data;
    tshi_kernel_run(&loop, kernel, NULL);
}

/* Runs `kernel` over all boxes, in a fixed order. */
static void tshi_pad_boxes(const tsh_tensor *like, const tshi_pad_runs *runs, tshi_pad_side x,
                           tshi_pad_side y, int backward, tshi_kernel_fn kernel) {
    int choice[TSH_MAX_DIMS] = {0}, d;
    for (d = 0; d < like->ndim; d++)
        if (!runs->count[d]) return; /* no element of the output is from x */
    do {
        tshi_pad_box(like, runs, choice, x, y, backward, kernel);
        for (d = like->ndim - 1; d >= 0 && ++choice[d] == runs->count[d]; d--) choice[d] = 0;
    } while (d >= 0);
}

/* Backward of pad, flip and roll: adds the gradient of each output element that is from x to that
 * of the element of x. */
static void tshi_pad_boxes_backward(tshi_node *node) {
    const tshi_pad_runs *runs = (const tshi_pad_runs *)node->params;
    const tsh_tensor *out = node->out;
    tshi_dest dest;
    if (!tshi_tape_dest_zeroed(node, 0, &dest)) return;
    tshi_pad_boxes(out, runs, tshi_pad_side_of(dest.data, dest.stride, TSH_REAL),
                   tshi_pad_side_of(tshi_tape_grad(node), out->stride, TSH_REAL), 1,
                   tshi_kernel_add[out->ctx->isa]);
}

/* Fills out with a value. */
static void tshi_pad_fill(tsh_tensor *out, double value) {
    static const int64_t still[TSH_MAX_DIMS] = {0, 0, 0,
                                                0, 0, 0}; /* 0: always one element */
    double element[1];                                    /* the value, in out's dtype */
    tshi_loop loop;
    tshi_dtype_put(out->dtype, element, 0, value);
    tshi_kernel_space(&loop, out);
    tshi_kernel_tensor(&loop, out);
    tshi_kernel_add_operand(&loop, out, element, still, out->dtype);
    tshi_kernel_run(&loop, tshi_kernel_copy, NULL);
}

/* Runs op: makes an output as *output says, and copies the boxes of x to it. fill: the value of
 * elements outside all boxes; NULL: there are none. */
static tsh_tensor *tshi_pad_moved(const tshi_op *op, tsh_tensor *x, const tshi_pad_runs *runs,
                                  const tshi_output *output, const double *fill) {
    tsh_tensor *out = tshi_tensor_out(x->ctx, op->name, x->dtype, &output->shape, &output->layout);
    if (!out) return NULL;
    if (fill) tshi_pad_fill(out, *fill);
    tshi_pad_boxes(out, runs, tshi_pad_side_of(tshi_tensor_at(x), x->stride, x->dtype),
                   tshi_pad_side_of(tshi_tensor_at(out), out->stride, out->dtype), 0,
                   tshi_kernel_copy);
    tshi_op_record(op, out, &x, 1, TSHI_NONE, runs, sizeof *runs, NULL);
    return out;
}

static const tshi_op tshi_pad_flip_op = {"tsh_flip", "x", tshi_rule_moved, tshi_pad_boxes_backward,
                                         TSHI_NONE,  0};
static const tshi_op tshi_pad_roll_op = {"tsh_roll", "x", tshi_rule_moved, tshi_pad_boxes_backward,
                                         TSHI_NONE,  0};
static const tshi_op tshi_pad_op = {"tsh_pad", "x", tshi_rule_moved, tshi_pad_boxes_backward,
                                    TSHI_NONE, 0};

/* Runs tsh_roll, or tsh_flip if flip is 1. */
static tsh_tensor *tshi_pad_turned(const tshi_op *op, tsh_tensor *x, int dim, int64_t shift,
                                   int flip) {
    tsh_ctx *ctx = tshi_tensor_check(op->name, "x", &x, 1);
    char text[TSHI_TEXT_SIZE];
    tshi_rule_moves moves = {0, 1, 0};
    tshi_pad_runs runs;
    tshi_output output;
    int64_t n;
    int axis;
    if (!ctx) return NULL;
    if (tshi_tensor_scalar_axis(x, dim)) return tsh_clone(x);
    axis = tshi_tensor_axis(x, dim);
    if (axis < 0)
        return tshi_error_null(ctx, TSH_ERR_SHAPE, "%s: there is no dimension %d in %s", op->name,
                               dim, tshi_tensor_text(x, text));
    moves.dims = 1u << axis;
    output.shape = tsh_shape_of(x);
    if (!tshi_rule_run(op, &x, 1, &moves, &output)) return NULL;
    tshi_pad_same_runs(&runs, x);
    n = x->dim[axis];
    runs.count[axis] = 0;
    shift = n ? (shift % n + n) % n : 0; /* brought into [0, n) */
    if (flip) {
        tshi_pad_add_run(&runs, axis, n - 1, n, -1);
    } else {
        tshi_pad_add_run(&runs, axis, n - shift, shift, 1);
        tshi_pad_add_run(&runs, axis, 0, n - shift, 1);
    }
    return tshi_pad_moved(op, x, &runs, &output, NULL);
}

TSH_API tsh_tensor *tsh_flip(tsh_tensor *x, int dim) {
    return tshi_pad_turned(&tshi_pad_flip_op, x, dim, 0, 1);
}

TSH_API tsh_tensor *tsh_roll(tsh_tensor *x, int64_t shift, int dim) {
    return tshi_pad_turned(&tshi_pad_roll_op, x, dim, shift, 0);
}

/* Sets the runs of dimension d, of length n, padded by `before` and `after` elements (negative:
 * elements are cut off). */
static void tshi_pad_set_runs(tshi_pad_runs *runs, int d, int64_t n, int64_t before, int64_t after,
                              tsh_pad_mode mode) {
    const int64_t from = before < 0 ? -before : 0; /* first element of x that is kept */
    const int64_t end = after < 0 ? n + after : n; /* end of the elements that are kept */
    /* 1: in order, -1: in reverse, 0: one element repeated */
    const int64_t step = mode == TSH_PAD_REFLECT ? -1 : mode == TSH_PAD_CIRCULAR;
    runs->count[d] = 0;
    if (mode != TSH_PAD_CONSTANT)
        tshi_pad_add_run(runs, d,
                         mode == TSH_PAD_REFLECT    ? before
                         : mode == TSH_PAD_CIRCULAR ? end - before
                                                    : 0,
                         before, step);
    tshi_pad_add_run(runs, d, from, end - from, 1);
    if (mode != TSH_PAD_CONSTANT)
        tshi_pad_add_run(runs, d,
                         mode == TSH_PAD_REFLECT    ? n - 2
                         : mode == TSH_PAD_CIRCULAR ? from
                                                    : n - 1,
                         after, step);
    else if (before > 0 && runs->count[d])
        runs->run[d][0].to = before;
}

/* Returns 1 if dimension d of x can be padded by `before` and `after` in this mode; else 0 and an
 * error. */
static int tshi_pad_fits(const tsh_tensor *x, int d, int64_t before, int64_t after,
                         tsh_pad_mode mode) {
    const int64_t n = x->dim[d], longest = INT64_MAX / 16, most = before > after ? before : after;
    /* minus the number of elements that are cut off */
    const int64_t cut = (before < 0 ? before : 0) + (after < 0 ? after : 0);
    const char *why = NULL;
    char text[TSHI_TEXT_SIZE];
    if (before < -n || after < -n || before > longest || after > longest || n + before + after < 0)
        why = "the result would be shorter than 0, or too long";
    else if (mode == TSH_PAD_REFLECT && most > 0 && most >= n)
        why = "reflection takes less padding than there are elements";
    else if (mode == TSH_PAD_CIRCULAR && most > n + cut)
        why = "circular padding takes no more padding than there are elements";
    else if (mode == TSH_PAD_REPLICATE && most > 0 && !n)
        why = "there is no element to replicate";
    if (!why) return 1;
    return tshi_error_zero(x->ctx, TSH_ERR_SHAPE, "tsh_pad: (%lld, %lld) at dimension %d of %s; %s",
                           (long long)before, (long long)after, d, tshi_tensor_text(x, text), why);
}

TSH_API tsh_tensor *tsh_pad(tsh_tensor *x, const int64_t *pad, int n, tsh_pad_mode mode,
                            double value) {
    const tshi_op *op = &tshi_pad_op;
    tsh_ctx *ctx = tshi_tensor_check("tsh_pad", "x", &x, 1);
    const int constant = mode == TSH_PAD_CONSTANT;
    /* x may be a partial sum, as the op is linear, unless it pads with a number other than 0 */
    tshi_rule_moves moves = {0, !constant || (value <= 0 && value >= 0), 0};
    tshi_pad_runs runs;
    tshi_output output;
    int i;
    if (!ctx) return NULL;
    if (n < 0 || n > x->ndim || (n > 0 && !pad) || (int)mode < 0 || mode > TSH_PAD_CIRCULAR)
        return tshi_error_null(
            ctx, TSH_ERR_ARGUMENT,
            "tsh_pad: %d pairs%s in mode %d; takes 0 to %d pairs for this x, and "
            "a tsh_pad_mode",
            n, n > 0 && !pad ? " at NULL" : "", (int)mode, x->ndim);
    output.shape = tsh_shape_of(x);
    tshi_pad_same_runs(&runs, x);
    for (i = 0; i < n; i++) {
        const int d = x->ndim - 1 - i;
        const int64_t before = pad[2 * i], after = pad[2 * i + 1];
        if (!before && !after) continue;
        if (!tshi_pad_fits(x, d, before, after, mode)) return NULL;
        moves.dims |= 1u << d;
        output.shape.dim[d] += before + after;
        tshi_pad_set_runs(&runs, d, x->dim[d], before, after, mode);
    }
    if (!tshi_rule_run(op, &x, 1, &moves, &output)) return NULL;
    return tshi_pad_moved(op, x, &runs, &output, constant ? &value : NULL);
}

/* -- tril, triu ------------------------------------------------------------------- */

/* A job that copies or adds the triangle of each matrix of x to y, and may set the rest of y to 0.
 * Backward takes a copy of it from the node and replaces all fields but `diagonal` and `upper`. */
typedef struct tshi_pad_triangle {
    int64_t diagonal;
    int upper;                         /* 0: tril, 1: triu */
    int zero;                          /* 1: sets the elements outside the triangle to 0 */
    const tsh_tensor *like;            /* the op's input or output: shape and layout */
    tshi_pad_side y, x;                /* arrays of that shape */
    tshi_kernel_fn kernel;             /* copies or adds the elements of the triangle */
    tsh_range range[TSH_MAX_SEGMENTS]; /* this rank's columns: `ranges` ranges */
    int ranges;
} tshi_pad_triangle;

/* Runs the kernel for the columns [from, to) of a row. */
static void tshi_pad_triangle_columns(tshi_kernel_fn kernel, const tshi_operand *row, int64_t from,
                                      int64_t to) {
    tshi_operand part[2];
    int i;
    if (from >= to) return;
    for (i = 0; i < 2; i++) {
        part[i] = row[i];
        tshi_kernel_move(&part[i], from * row[i].step);
    }
    kernel(to - from, part, NULL);
}

/* Handles one row of a matrix, whose global index is `row`. Operands: yx, the row of y and that of
 * x; y0, the row of y and a single 0. */
static void tshi_pad_triangle_row(const tshi_pad_triangle *job, int64_t row, const tshi_operand *yx,
                                  const tshi_operand *y0) {
    int64_t local = 0; /* first local column of range s */
    int s;
    for (s = 0; s < job->ranges; local += job->range[s++].length) {
        const int64_t n = job->range[s].length;
        /* the first `low` columns of the range are below the diagonal, for tril also on it: triu
         * sets them to 0, tril keeps them */
        int64_t low = row + job->diagonal + !job->upper - job->range[s].start;
        low = low < 0 ? 0 : tshi_base_min(low, n);
        tshi_pad_triangle_columns(job->kernel, yx, local + (job->upper ? low : 0),
                                  local + (job->upper ? n : low));
        if (job->zero)
            tshi_pad_triangle_columns(tshi_kernel_copy, y0, local + (job->upper ? 0 : low),
                                      local + (job->upper ? low : n));
    }
}

/* A tshi_team_fn: handles rows [from, to), counted over all matrices. */
static void tshi_pad_triangle_rows(void *data, int piece, int64_t from, int64_t to) {
    static const double zero[1] = {0}; /* an element that is 0, of any dtype */
    const tshi_pad_triangle *job = (const tshi_pad_triangle *)data;
    const tsh_tensor *t = job->like;
    const int last = t->ndim - 1;
    int64_t r;
    (void)piece;
    for (r = from; r < to; r++) {
        tshi_operand yx[2], y0[2];
        int64_t rest = r;
        int d;
        yx[0] = job->y.data;
        yx[1] = job->x.data;
        yx[0].step = job->y.stride[last];
        yx[1].step = job->x.stride[last];
        for (d = last - 1; d >= 0; d--) {
            tshi_kernel_move(&yx[0], rest % t->local[d] * job->y.stride[d]);
            tshi_kernel_move(&yx[1], rest % t->local[d] * job->x.stride[d]);
            rest /= t->local[d];
        }
        y0[0] = yx[0];
        y0[1] = tshi_kernel_operand(zero, 0, yx[0].dtype);
        tshi_pad_triangle_row(job, tshi_tensor_global(t, last - 1, r % t->local[last - 1]), yx, y0);
    }
}

/* Runs the job, whose diagonal, upper, zero, x, y and kernel are set, over all rows of `like`. */
static void tshi_pad_triangle_run(tshi_pad_triangle *job, const tsh_tensor *like) {
    const int last = like->ndim - 1;
    const int64_t rows = tshi_tensor_product(like->local, last);
    tsh_range own[TSH_MAX_SEGMENTS]; /* this rank's columns */
    job->like = like;
    memset(own, 0, sizeof own);
    own[0].length = like->local[last];
    job->ranges = 1;
    if (like->layout.kind == TSH_SHARDED && like->layout.dim == last) {
        (void)tshi_layout_own(&like->layout, like->dim[last], &like->ctx->deal, like->ctx->tp.rank,
                              own);
        job->ranges = like->layout.segments;
    }
    memcpy(job->range, own, sizeof own);
    if (rows && like->local[last])
        tshi_team_run(like->ctx, tshi_kernel_parts(like->ctx, rows, like->local[last]), rows, 1,
                      tshi_pad_triangle_rows, job);
}

/* Backward of tril and triu: adds the gradient of the output's triangles to that of x. */
static void tshi_pad_triangle_backward(tshi_node *node) {
    tshi_pad_triangle job = *(const tshi_pad_triangle *)node->params;
    tsh_tensor *out = node->out;
    tshi_dest dest;
    if (!tshi_tape_dest(node, 0, &dest)) return;
    job.zero = !dest.add;
    job.kernel = dest.add ? tshi_kernel_add[out->ctx->isa] : tshi_kernel_copy;
    job.y = tshi_pad_side_of(dest.data, dest.stride, TSH_REAL);
    job.x = tshi_pad_side_of(tshi_tape_grad(node), out->stride, TSH_REAL);
    tshi_pad_triangle_run(&job, out);
}

static const tshi_op tshi_pad_tril_op = {
    "tsh_tril", "x", tshi_rule_keep, tshi_pad_triangle_backward, TSHI_NONE, 0};
static const tshi_op tshi_pad_triu_op = {
    "tsh_triu", "x", tshi_rule_keep, tshi_pad_triangle_backward, TSHI_NONE, 0};

/* Runs tsh_tril, or tsh_triu if upper is 1. */
static tsh_tensor *tshi_pad_triangles(const tshi_op *op, tsh_tensor *x, int64_t diagonal,
                                      int upper) {
    tsh_ctx *ctx = tshi_tensor_check(op->name, "x", &x, 1);
    char text[TSHI_TEXT_SIZE];
    tshi_pad_triangle job;
    tsh_shape shape;
    tsh_tensor *out;
    if (!ctx) return NULL;
    if (x->ndim < 2)
        return tshi_error_null(ctx, TSH_ERR_SHAPE, "%s: %s has no rows and columns", op->name,
                               tshi_tensor_text(x, text));
    shape = tsh_shape_of(x);
    out = tshi_tensor_out(ctx, op->name, x->dtype, &shape, &x->layout);
    if (!out) return NULL;
    memset(&job, 0, sizeof job);
    /* clamped: further diagonals give the same result, but sums with row numbers could overflow */
    job.diagonal = tshi_dtype_clamp(diagonal, -shape.dim[x->ndim - 2] - 1,
                                    shape.dim[x->ndim - 1] + 1);
    job.upper = upper;
    job.zero = 1;
    job.kernel = tshi_kernel_copy;
    job.y = tshi_pad_side_of(tshi_tensor_at(out), out->stride, out->dtype);
    job.x = tshi_pad_side_of(tshi_tensor_at(x), x->stride, x->dtype);
    tshi_pad_triangle_run(&job, out);
    tshi_op_record(op, out, &x, 1, TSHI_NONE, &job, sizeof job, NULL);
    return out;
}

TSH_API tsh_tensor *tsh_tril(tsh_tensor *x, int64_t diagonal) {
    return tshi_pad_triangles(&tshi_pad_tril_op, x, diagonal, 0);
}

TSH_API tsh_tensor *tsh_triu(tsh_tensor *x, int64_t diagonal) {
    return tshi_pad_triangles(&tshi_pad_triu_op, x, diagonal, 1);
}
