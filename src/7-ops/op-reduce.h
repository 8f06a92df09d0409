/* ========================================================================== */
/* >>op-reduce                                    MARK: - op-reduce (private) */
/* Ops along one dimension, or all: sum, mean, max, min, argmax, softmax.     */
/* Needs: >>op-map.                                                           */
/* ========================================================================== */

/* Every op here calls tshi_reduce_plan, which derives the output's shape and layout and the sizes
 * to loop over; then it allocates the output, runs a kernel and records the call. Sums along the
 * last dimension, max and softmax run on rows, which threads share; other sums are a strided loop
 * over x. Layout rules (tshi_rule_sum, tshi_rule_whole) are in >>rule. */

/* The parameters of the kernels, and of backward. */
typedef struct tshi_reduce_params {
    double c;   /* factor of a sum: 1, in tsh_mean 1 / (number of elements summed). In >>op-stat:
                 * the correction of a variance, the p of a norm */
    int64_t n;  /* local length of the reduced dimension; axis -1: number of local elements */
    int axis;   /* the reduced dimension; -1: all */
    int is_log; /* 1: tsh_log_softmax, 0: tsh_softmax or another op */
} tshi_reduce_params;

/* The plan of one reduction. The local input is an array of shape (outer, n, inner), reduced along
 * n; (1, n, 1) if all dimensions are reduced. Sums run in an order that depends on these sizes
 * only, so their bits do not depend on the number of threads. */
typedef struct tshi_reduction {
    int64_t outer, inner; /* products of the local sizes before and after the axis */
    int64_t length;       /* global length of the reduced dimension; axis -1: number of elements */
    tsh_shape shape;      /* global shape of the output */
    tsh_layout layout;    /* layout of the output */
    tshi_reduce_params params;
} tshi_reduction;

/* Checks dim and x's layout and fills in *r. Returns 0 and an error if the op cannot run along
 * dim. */
static int tshi_reduce_plan(const tshi_op *op, tsh_tensor *x, int dim, int keepdim,
                            tshi_reduction *r) {
    /* the dimension to reduce; -1: all, or x has no dimension `dim` */
    const int axis = dim == TSH_ALL ? -1 : tshi_tensor_axis(x, dim);
    /* 1: x has no dimensions, and dim is 0 or -1: treated as all */
    const int scalar = tshi_tensor_scalar_axis(x, dim);
    const tshi_rule_axis along = {axis, keepdim};
    const tshi_reduce_params params = {1, axis < 0 ? tsh_local_numel(x) : x->local[axis], axis, 0};
    char text[TSHI_TEXT_SIZE];
    tshi_output output;
    int d;
    if (dim != TSH_ALL && axis < 0 && !scalar)
        return tsh_fail(x->ctx, TSH_ERR_SHAPE, "%s: there is no dimension %d in %s", op->name, dim,
                        tshi_tensor_text(x, text)) == TSH_OK;
    if (!tshi_rule_run(op, &x, 1, &along, &output)) return 0;
    r->params = params;
    r->layout = output.layout;
    r->shape = tsh_shape0();
    for (d = 0; d < x->ndim; d++) {
        int reduced = axis < 0 || d == axis; /* 1 if dimension d is reduced */
        if (!reduced || keepdim) r->shape.dim[r->shape.ndim++] = reduced ? 1 : x->dim[d];
    }
    r->length = axis < 0 ? tsh_numel(x) : x->dim[axis];
    r->outer = axis < 0 ? 1 : tshi_tensor_product(x->local, axis);
    r->inner = axis < 0 ? 1 : tshi_tensor_product(x->local + axis + 1, x->ndim - axis - 1);
    return 1;
}

/* -- sum, mean: y = c sum x; dx = c dy --------------------------------------- */

/* Sums rows of p->n adjacent values: y = c sum x. Sums of 4096 values each are computed in
 * tsh_real, and added up in double. Operands: y, x. */
TSHI_INLINE void tshi_reduce_sum_body(int64_t rows, const tshi_operand *operand,
                                      const tshi_reduce_params *p) {
    tsh_real *y = (tsh_real *)operand[0].data;
    const tsh_real *x = (const tsh_real *)operand[1].data;
    const int64_t n = p->n;
    for (; rows > 0; rows--, x += n) {
        double total = 0; /* the sum of one row */
        int64_t i;
        for (i = 0; i < n; i += 4096)
            total += (double)tshi_kernel_sum(x + i, n - i < 4096 ? n - i : 4096);
        *y++ = TSHI_R(total * p->c);
    }
}
TSHI_KERNEL(tshi_reduce_sum, tshi_reduce_params);

/* Fills in the strides that broadcast out to x's shape: 0 along the reduced dimension `axis`, or
 * along all dimensions if axis is -1. */
static void tshi_reduce_spread(const tsh_tensor *x, const tsh_tensor *out, int axis,
                               int64_t *stride) {
    int d, o = 0; /* o: the dimension of out that corresponds to x's dimension d */
    for (d = 0; d < x->ndim; d++) {
        int reduced = axis < 0 || d == axis;
        stride[d] = reduced ? 0 : out->stride[o];
        if (!reduced || out->ndim == x->ndim) o++;
    }
}

/* Computes sums = c sum x, in the shape of out. If the reduced values are adjacent (inner is 1),
 * sums each row; else adds up rows of `inner` values, in order. */
static void tshi_reduce_sums(tsh_tensor *x, const tsh_tensor *out, const tshi_reduction *r,
                             tsh_real *sums) {
    const int64_t n = r->params.n, count = tsh_local_numel(out); /* count: number of sums */
    int64_t stride[TSH_MAX_DIMS], i;
    tshi_loop loop;
    if (r->inner == 1) {
        tshi_rows rows = tshi_kernel_rows_job(tshi_reduce_sum[x->ctx->isa], r->outer, &r->params);
        tshi_block *scratch;
        rows.x[0] = tshi_kernel_reals(sums, 1);
        rows.x[1] = tshi_kernel_reals(tshi_kernel_packed_reals(x, &scratch), n);
        if (rows.x[1].data) tshi_kernel_run_rows(x->ctx, &rows, n);
        tshi_mem_release(x->ctx, scratch);
        return;
    }
    memset(sums, 0, tshi_dtype_reals(count));
    tshi_reduce_spread(x, out, r->params.axis, stride);
    tshi_kernel_space(&loop, x);
    tshi_kernel_add_operand(&loop, x, sums, stride, TSH_REAL); /* stride 0: adds along the axis */
    tshi_kernel_tensor(&loop, x);
    tshi_kernel_run(&loop, tshi_kernel_add[x->ctx->isa], NULL);
    for (i = 0; i < count; i++) sums[i] *= TSHI_R(r->params.c);
}

/* Computes dx = c dy, broadcast along the reduced dimensions; c is 1 for a sum, and 1 / (number of
 * elements) for a mean. */
static void tshi_reduce_sum_backward(tshi_node *node) {
    const tshi_reduce_params *params = (const tshi_reduce_params *)node->params;
    tsh_tensor *x = node->in[0];
    int64_t stride[TSH_MAX_DIMS];
    tshi_loop loop;
    tshi_dest dest;
    tsh_real *g = tshi_tape_grad(node);
    tshi_backward_params back;
    if (!tshi_tape_dest(node, 0, &dest)) return;
    tshi_reduce_spread(x, node->out, params->axis, stride);
    tshi_kernel_space(&loop, x);
    tshi_kernel_add_operand(&loop, x, dest.data, dest.stride, TSH_REAL);
    tshi_kernel_add_operand(&loop, x, g, stride, TSH_REAL);
    /* passes g again as the kernel's operand v, which its formula does not read */
    tshi_kernel_add_operand(&loop, x, g, stride, TSH_REAL);
    back.c = params->c;
    back.add = dest.add;
    tshi_kernel_run(&loop, tshi_map_scale_backward[x->ctx->isa], &back);
}

static const tshi_op tshi_reduce_sum_op = {
    "tsh_sum", "x", tshi_rule_sum, tshi_reduce_sum_backward, TSHI_NONE, 0};
static const tshi_op tshi_reduce_mean_op = {
    "tsh_mean", "x", tshi_rule_sum, tshi_reduce_sum_backward, TSHI_NONE, 0};

/* Runs tsh_sum, or tsh_mean if `mean` is 1. */
static tsh_tensor *tshi_reduce_scaled(const tshi_op *op, tsh_tensor *x, int dim, int keepdim,
                                      int mean) {
    tsh_ctx *ctx = tshi_tensor_check_floating(op->name, op->inputs, &x, 1);
    tshi_reduction r;
    tshi_block *unrounded;
    tsh_tensor *out;
    tsh_real *sums;
    if (!ctx || !tshi_reduce_plan(op, x, dim, keepdim, &r)) return NULL;
    /* divides by the global length, also if x is sharded along it */
    if (mean) r.params.c = 1.0 / (double)r.length;
    out = tshi_tensor_out(ctx, op->name, x->dtype, &r.shape, &r.layout);
    sums = out ? tshi_kernel_output(out, &unrounded) : NULL; /* memory of out, or scratch */
    if (!sums) return NULL;
    tshi_reduce_sums(x, out, &r, sums);
    tshi_kernel_output_done(out, unrounded); /* rounds to out's dtype */
    tshi_op_record(op, out, &x, 1, TSHI_NONE, &r.params, sizeof r.params, NULL);
    return ctx->error.code == TSH_OK ? out : NULL;
}

TSH_API tsh_tensor *tsh_sum(tsh_tensor *x, int dim, int keepdim) {
    return tshi_reduce_scaled(&tshi_reduce_sum_op, x, dim, keepdim, 0);
}

TSH_API tsh_tensor *tsh_mean(tsh_tensor *x, int dim, int keepdim) {
    return tshi_reduce_scaled(&tshi_reduce_mean_op, x, dim, keepdim, 1);
}

/* -- rows -------------------------------------------------------------------
 * max and softmax work on rows: dense values along the axis. If the axis is not the last dimension,
 * values are copied to an array in which it is, and results are copied back. */

/* Returns a handle of t's values with the axis moved to the last dimension; axis -1: with t's own
 * order. */
static tsh_tensor tshi_reduce_rows(const tsh_tensor *t, int axis) {
    tsh_tensor rows = *t; /* a copy that holds no reference to t's block */
    int d;
    for (d = axis; d >= 0 && d < t->ndim - 1; d++) { /* shifts later dimensions left */
        rows.dim[d] = t->dim[d + 1];
        rows.dim[d + 1] = t->dim[axis];
        rows.local[d] = t->local[d + 1];
        rows.local[d + 1] = t->local[axis];
        rows.stride[d] = t->stride[d + 1];
        rows.stride[d + 1] = t->stride[axis];
    }
    return rows;
}

/* Returns a buffer for out's values as tshi_kernel_output does, but a row-major one: in *scratch if
 * out itself is not row-major. */
static tsh_real *tshi_reduce_output(tsh_tensor *out, tshi_block **scratch) {
    if (tshi_tensor_is_dense(out)) return tshi_kernel_output(out, scratch);
    *scratch = tshi_mem_alloc(out->ctx, TSH_MEM_STEP, tshi_dtype_reals(tsh_local_numel(out)));
    return *scratch ? (tsh_real *)tshi_mem_data(*scratch) : NULL;
}

/* Returns a job that runs `kernel` on all rows of t, each of params->n values; if n is 0, on
 * none. */
static tshi_rows tshi_reduce_job(const tshi_kernel_fn *kernel, const tsh_tensor *t,
                                 const tshi_reduce_params *params) {
    const int64_t count = params->n ? tsh_local_numel(t) / params->n : 0;
    return tshi_kernel_rows_job(kernel[t->ctx->isa], count, params);
}

/* -- max, min, argmax, argmin ---------------------------------------------------
 * The first index of the largest or smallest value of each row, or that of the first NaN. Comments
 * speak of the maximum; a minimum is the maximum of the values times -1. */

/* Finds the index of each row's maximum or, if least is 1, minimum. Operands: the index, x, the
 * maximum (NULL: not needed). Only the part of 256 values that has the maximum is searched for the
 * index. */
TSHI_INLINE void tshi_reduce_extreme(int64_t rows, const tshi_operand *operand,
                                     const tshi_reduce_params *p, int least) {
    enum { PART = 256 };
    int64_t *place = (int64_t *)operand[0].data, i, k, m, at;
    const tsh_real *x = (const tsh_real *)operand[1].data;
    tsh_real *max = (tsh_real *)operand[2].data, negated[PART], best, here;
    const int64_t n = p->n;
    for (; rows > 0; rows--, x += n) {
        best = least ? -x[0] : x[0];
        at = 0; /* at: start of the part with the maximum so far */
        for (i = 0; i < n && best == best; i += PART) {
            m = tshi_base_min(PART, n - i);
            if (least)
                TSHI_LANES for (k = 0; k < m; k++) negated[k] = -x[i + k];
            here = tshi_kernel_max(least ? negated : x + i, m);
            if (here <= best) continue; /* false for NaN, which ends the loop */
            best = here;
            at = i;
        }
        if (least) best = -best;
        while (x[at] == x[at] && x[at] != best) at++; /* stops at a NaN, too */
        *place++ = at;
        if (max) *max++ = x[at];
    }
}

TSHI_INLINE void tshi_reduce_place_body(int64_t rows, const tshi_operand *operand,
                                        const tshi_reduce_params *p) {
    tshi_reduce_extreme(rows, operand, p, 0);
}
TSHI_KERNEL(tshi_reduce_place, tshi_reduce_params);

TSHI_INLINE void tshi_reduce_least_body(int64_t rows, const tshi_operand *operand,
                                        const tshi_reduce_params *p) {
    tshi_reduce_extreme(rows, operand, p, 1);
}
TSHI_KERNEL(tshi_reduce_least, tshi_reduce_params);

/* Adds dy to dx at the index of each maximum; forward has stored the indices in aux. */
static void tshi_reduce_max_backward(tshi_node *node) {
    const tshi_reduce_params *params = (const tshi_reduce_params *)node->params;
    const tsh_tensor x = tshi_reduce_rows(node->in[0], params->axis);
    const int64_t *place = (const int64_t *)tshi_mem_data(node->aux);
    const tsh_real *g = tshi_tape_grad(node);
    int64_t e, count = tsh_local_numel(node->out); /* count: number of maxima */
    tshi_dest dest;
    int d;
    if (!tshi_tape_dest_zeroed(node, 0, &dest)) return;
    for (e = 0; e < count; e++) {
        tsh_real *at = dest.data;
        int64_t rest = e * params->n + place[e]; /* row-major index of the maximum */
        for (d = x.ndim - 1; d >= 0; d--) {
            at += rest % x.local[d] * x.stride[d]; /* rest % local: the index along d */
            rest /= x.local[d];
        }
        *at += g[e];
    }
}

/* What tshi_reduce_max returns for each row. */
typedef enum tshi_largest {
    TSHI_LARGEST_VALUE,
    TSHI_LARGEST_PLACE,
    TSHI_LARGEST_FINITE /* the index; an error if the largest value is not finite */
} tshi_largest;

/* One of the ops that tshi_reduce_max runs. */
typedef struct tshi_extreme {
    tshi_op op;
    tshi_largest what;
    const tshi_kernel_fn *kernel; /* table of kernels, one per instruction set */
    double sign;                  /* 1: finds the largest value, -1: the smallest */
} tshi_extreme;

static const tshi_extreme tshi_reduce_max_row = {
    {"tsh_max", "x", tshi_rule_whole, tshi_reduce_max_backward, TSHI_NONE, 0},
    TSHI_LARGEST_VALUE, tshi_reduce_place, 1};
static const tshi_extreme tshi_reduce_min_row = {
    {"tsh_min", "x", tshi_rule_whole, tshi_reduce_max_backward, TSHI_NONE, 0},
    TSHI_LARGEST_VALUE, tshi_reduce_least, -1};
static const tshi_extreme tshi_reduce_argmax_row = {
    {"tsh_argmax", "x", tshi_rule_argmax, NULL, 0, 0}, TSHI_LARGEST_PLACE, tshi_reduce_place, 1};
static const tshi_extreme tshi_reduce_argmin_row = {
    {"tsh_argmin", "x", tshi_rule_argmax, NULL, 0, 0}, TSHI_LARGEST_PLACE, tshi_reduce_least, -1};
static const tshi_extreme tshi_reduce_greedy_row = {
    {"tsh_sample", "logits", tshi_rule_argmax, NULL, 0, 0}, TSHI_LARGEST_FINITE, tshi_reduce_place,
    1};

/* The largest value of a rank's shard of a row. */
typedef struct tshi_best {
    double value;  /* the value; times -1 if the smallest is sought */
    int64_t place; /* global index of the value along the row; -1: the shard is empty */
} tshi_best;

/* Replaces, for each of n rows, the maximum of this rank's shard and its local index by the largest
 * value on all ranks and its global index, with one all-gather. x is sharded along `axis`. */
static void tshi_reduce_agree(const tshi_extreme *row, const tsh_tensor *x, int axis, int64_t n,
                              int64_t *place, tsh_real *max) {
    tsh_ctx *ctx = x->ctx;
    const int64_t size = ctx->tp.size, words = (int64_t)(sizeof(tshi_best) / sizeof(int64_t));
    tshi_block *block = tshi_mem_alloc(ctx, TSH_MEM_STEP,
                                       (size_t)((size + 1) * n) * sizeof(tshi_best) +
                                           (size_t)size * sizeof(int64_t));
    tshi_best *own, *all;  /* best of each row: this rank's, shape (n); all ranks', (size, n) */
    int64_t *counts, i, r; /* counts: words that each rank sends, shape (size) */
    if (!block) return;
    own = (tshi_best *)tshi_mem_data(block);
    all = own + n;
    counts = (int64_t *)(void *)(all + size * n);
    for (r = 0; r < size; r++) counts[r] = n * words;
    for (i = 0; i < n; i++) {
        own[i].value = x->local[axis] ? row->sign * (double)max[i] : 0;
        own[i].place = x->local[axis] ? tshi_tensor_global(x, axis, place[i]) : -1;
    }
    (void)tshi_error_comm(ctx, tsh_allgather(&ctx->tp, own, all, counts, 1, TSH_I64),
                          row->sign > 0 ? "tsh_argmax: all-gather of the largest values"
                                        : "tsh_argmin: all-gather of the smallest values");
    for (i = 0; i < n && ctx->error.code == TSH_OK; i++) {
        const tshi_best *best = NULL;
        for (r = 0; r < size; r++) {
            const tshi_best *at = &all[r * n + i];
            const int nan = at->value != at->value, was = best && best->value != best->value;
            if (at->place < 0) continue;
            if (!best || nan > was || (nan == was && at->value > best->value) ||
                (nan == was && !(at->value < best->value) && at->place < best->place))
                best = at;
        }
        place[i] = best ? best->place : 0;
        max[i] = best ? TSHI_R(row->sign * best->value) : 0;
    }
    tshi_mem_release(ctx, block);
}

/* Records the error that no id can be chosen from a row of the logits. */
static void tshi_reduce_refuse_row(tsh_ctx *ctx, int64_t row) {
    (void)tsh_fail(ctx, TSH_ERR_ANOMALY,
                   "tsh_sample: row %lld of the logits has a NaN, or its largest is not finite",
                   (long long)row);
}

/* Runs tsh_max, tsh_min, tsh_argmax, tsh_argmin, or tsh_sample with temperature 0. */
static tsh_tensor *tshi_reduce_max(const tshi_extreme *row, tsh_tensor *x, int dim, int keepdim) {
    const tshi_op *op = &row->op;
    const tshi_largest what = row->what;
    tsh_ctx *ctx = tshi_tensor_check_floating(op->name, op->inputs, &x, 1);
    tshi_reduction r;
    tshi_block *scratch, *unrounded = NULL, *aux = NULL;
    tshi_rows rows;
    tsh_tensor *out, xs;
    tsh_real *max = NULL; /* where the maxima go; NULL: not needed */
    void *place;          /* int64_t indices: in out, or in aux for backward */
    const int argmax = what != TSHI_LARGEST_VALUE;
    /* cut: 1 if the dimension is sharded over several ranks; keeps: 1 if the maxima go to scratch
     * (`unrounded`) */
    int cut, keeps;
    if (!ctx || !tshi_reduce_plan(op, x, dim, keepdim, &r)) return NULL;
    if (!r.length)
        return tshi_error_null(ctx, TSH_ERR_SHAPE,
                               "%s: nothing to choose from: the dimension is empty", op->name);
    xs = tshi_reduce_rows(x, r.params.axis); /* x with the axis last */
    rows = tshi_reduce_job(row->kernel, x, &r.params);
    out = tshi_tensor_out(ctx, op->name, argmax ? TSH_I64 : x->dtype, &r.shape, &r.layout);
    if (!out) return NULL;
    place = tshi_tensor_at(out); /* argmax outputs the indices */
    cut = argmax && ctx->tp.size > 1 && tshi_rule_is_sharded(x, r.params.axis);
    keeps = cut || what == TSHI_LARGEST_FINITE;
    if (keeps) {
        unrounded = tshi_mem_alloc(ctx, TSH_MEM_STEP, tshi_dtype_reals(tsh_numel(out)));
        max = unrounded ? (tsh_real *)tshi_mem_data(unrounded) : NULL;
    }
    if (!argmax) {
        aux = tshi_mem_alloc(ctx, TSH_MEM_STEP, (size_t)rows.count * sizeof(int64_t));
        place = aux ? tshi_mem_data(aux) : NULL;
        max = tshi_kernel_output(out, &unrounded);
    }
    rows.x[0] = tshi_kernel_operand(place, 1, TSH_I64);
    rows.x[1] = tshi_kernel_reals(tshi_kernel_packed_reals(&xs, &scratch), r.params.n);
    rows.x[2] = tshi_kernel_reals(max, 1);
    if (ctx->error.code == TSH_OK) tshi_kernel_run_rows(ctx, &rows, r.params.n);
    tshi_mem_release(ctx, scratch);
    if (cut && ctx->error.code == TSH_OK)
        tshi_reduce_agree(row, x, r.params.axis, tsh_numel(out), (int64_t *)place, max);
    for (int64_t i = 0; what == TSHI_LARGEST_FINITE && i < tsh_numel(out); i++)
        if (ctx->error.code == TSH_OK && !(fabs((double)max[i]) <= DBL_MAX))
            tshi_reduce_refuse_row(ctx, i);
    if (keeps)
        tshi_mem_release(ctx, unrounded);
    else
        tshi_kernel_output_done(out, unrounded);
    tshi_op_record(op, out, &x, 1, TSHI_NONE, &r.params, sizeof r.params, aux);
    return ctx->error.code == TSH_OK ? out : NULL;
}

TSH_API tsh_tensor *tsh_max(tsh_tensor *x, int dim, int keepdim) {
    return tshi_reduce_max(&tshi_reduce_max_row, x, dim, keepdim);
}

TSH_API tsh_tensor *tsh_min(tsh_tensor *x, int dim, int keepdim) {
    return tshi_reduce_max(&tshi_reduce_min_row, x, dim, keepdim);
}

/* Runs tsh_sample with temperature 0, for logits that are replicated or sharded along the last
 * dimension. */
static tsh_tensor *tshi_reduce_greedy(tsh_tensor *logits) {
    return tshi_reduce_max(&tshi_reduce_greedy_row, logits, -1, 0);
}

TSH_API tsh_tensor *tsh_argmax(tsh_tensor *x, int dim, int keepdim) {
    return tshi_reduce_max(&tshi_reduce_argmax_row, x, dim, keepdim);
}

TSH_API tsh_tensor *tsh_argmin(tsh_tensor *x, int dim, int keepdim) {
    return tshi_reduce_max(&tshi_reduce_argmin_row, x, dim, keepdim);
}

/* -- softmax, log_softmax ---------------------------------------------------
 * m = max x, y = e^(x-m) / sum e^(x-m);   dx = y (dy - sum dy y)
 * log: y = x - m - log sum e^(x-m);       dx = dy - e^y sum dy                */

/* Computes softmax or log_softmax of rows. Operands: y and x, dense rows of p->n values. */
TSHI_INLINE void tshi_reduce_softmax_body(int64_t rows, const tshi_operand *operand,
                                          const tshi_reduce_params *p, int fused) {
    tsh_real *y = (tsh_real *)operand[0].data, pad[TSHI_BLOCK], out[TSHI_BLOCK];
    const tsh_real *x = (const tsh_real *)operand[1].data, *in;
    const int64_t n = p->n; /* length of a row */
    const int log = p->is_log;
    int64_t e;
    int i;
    for (; rows > 0; rows--, x += n, y += n) {
        const tsh_real max = tshi_kernel_max(x, n);
        const tsh_real sum = tshi_kernel_sum_exps(x, n, max, log ? NULL : y,
                                                  fused); /* softmax: stores y = e^(x-m) */
        const tsh_real c = log ? tshi_math_log(sum, fused) : TSHI_R(TSHI_R(1) / sum);
        for (e = 0; e < n; e += TSHI_BLOCK) {
            in = tshi_kernel_load_block(log ? x : y, 1, e, n, pad);
            if (log) /* not x - (max + c): if max is large, that loses digits of c */
                TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) out[i] = in[i] - max - c;
            else
                TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) out[i] = in[i] * c;
            tshi_kernel_store_block(y, 1, e, n, out, 0);
        }
    }
}
TSHI_KERNEL_FUSED(tshi_reduce_softmax, tshi_reduce_params);

/* Computes the backward of softmax or log_softmax of rows. Operands: dx, y and dy, dense rows of
 * p->n values. */
TSHI_INLINE void tshi_reduce_softmax_grad_body(int64_t rows, const tshi_operand *operand,
                                               const tshi_reduce_params *p, int fused) {
    tsh_real *dx = (tsh_real *)operand[0].data, pad[2][TSHI_BLOCK], out[TSHI_BLOCK];
    const tsh_real *y = (const tsh_real *)operand[1].data, *ys;  /* ys: a block of y */
    const tsh_real *dy = (const tsh_real *)operand[2].data, *gs; /* gs: a block of dy */
    const int64_t n = p->n;
    int64_t e;
    int i;
    for (; rows > 0; rows--, dx += n, y += n, dy += n) {
        const tsh_real sum = p->is_log ? tshi_kernel_sum(dy, n) : tshi_kernel_dot(dy, y, n);
        for (e = 0; e < n; e += TSHI_BLOCK) {
            ys = tshi_kernel_load_block(y, 1, e, n, pad[0]);
            gs = tshi_kernel_load_block(dy, 1, e, n, pad[1]);
            if (p->is_log)
                TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++)
                    out[i] = gs[i] - tshi_math_exp(ys[i], fused) * sum;
            else
                TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) out[i] = ys[i] * (gs[i] - sum);
            tshi_kernel_store_block(dx, 1, e, n, out, 0);
        }
    }
}
TSHI_KERNEL_FUSED(tshi_reduce_softmax_grad, tshi_reduce_params);

/* Computes the backward of softmax and log_softmax: runs tshi_reduce_softmax_grad on rows of dx, y
 * (saved) and dy. */
static void tshi_reduce_softmax_backward(tshi_node *node) {
    const tshi_reduce_params *params = (const tshi_reduce_params *)node->params;
    tsh_ctx *ctx = node->out->ctx;
    tsh_tensor dx = tshi_reduce_rows(node->in[0], params->axis); /* sizes and strides of dx */
    tsh_tensor y = tshi_reduce_rows(node->out, params->axis), dy = y;
    tshi_rows rows = tshi_reduce_job(tshi_reduce_softmax_grad, node->out, params);
    tshi_block *scratch[3]; /* dense copies of dx, y, dy, or NULL */
    tshi_dest dest;
    if (!tshi_tape_dest(node, 0, &dest)) return;
    dest.stride = dx.stride;        /* strides with the axis last */
    y.block = node->saved[1];       /* the values of the output */
    dy.block = node->out->gr.block; /* a gradient has the strides of its tensor */
    dy.dtype = TSH_REAL;
    rows.x[0] = tshi_kernel_reals(tshi_op_dense_dest(&dx, &dest, &scratch[0]), params->n);
    rows.x[1] = tshi_kernel_reals(tshi_kernel_packed_reals(&y, &scratch[1]), params->n);
    rows.x[2] = tshi_kernel_reals(tshi_kernel_packed_reals(&dy, &scratch[2]), params->n);
    if (ctx->error.code == TSH_OK) tshi_kernel_run_rows(ctx, &rows, params->n);
    tshi_op_accumulate(&dx, &dest, scratch[0]); /* no-op if the kernel wrote to dest itself */
    tshi_mem_release(ctx, scratch[1]);
    tshi_mem_release(ctx, scratch[2]);
}

static const tshi_op tshi_reduce_softmax_op = {
    "tsh_softmax", "x", tshi_rule_whole, tshi_reduce_softmax_backward, TSHI_OUT, 0};
static const tshi_op tshi_reduce_log_softmax_op = {
    "tsh_log_softmax", "x", tshi_rule_whole, tshi_reduce_softmax_backward, TSHI_OUT, 0};

/* Runs tsh_softmax, or tsh_log_softmax if is_log is 1. */
static tsh_tensor *tshi_reduce_softmaxes(const tshi_op *op, tsh_tensor *x, int dim, int is_log) {
    tsh_ctx *ctx = tshi_tensor_check_floating(op->name, op->inputs, &x, 1);
    tsh_shape shape = tsh_shape_of(x);
    tshi_reduction r;
    tshi_block *scratch, *unrounded;
    tsh_tensor *out, xs, ys; /* xs, ys: x and out with the axis last */
    tshi_rows rows;
    if (!ctx || !tshi_reduce_plan(op, x, dim == TSH_ALL ? TSH_MAX_DIMS : dim, 1, &r)) return NULL;
    r.params.is_log = is_log;
    out = tshi_tensor_out(ctx, op->name, x->dtype, &shape, &x->layout);
    if (!out) return NULL;
    xs = tshi_reduce_rows(x, r.params.axis);
    ys = tshi_reduce_rows(out, r.params.axis);
    rows = tshi_reduce_job(tshi_reduce_softmax, x, &r.params);
    rows.x[0] = tshi_kernel_reals(tshi_reduce_output(&ys, &unrounded), r.params.n);
    rows.x[1] = tshi_kernel_reals(tshi_kernel_packed_reals(&xs, &scratch), r.params.n);
    if (ctx->error.code == TSH_OK) tshi_kernel_run_rows(ctx, &rows, r.params.n);
    tshi_mem_release(ctx, scratch);
    tshi_kernel_output_done(&ys, unrounded);
    tshi_op_record(op, out, &x, 1, TSHI_NONE, &r.params, sizeof r.params, NULL);
    return ctx->error.code == TSH_OK ? out : NULL;
}

TSH_API tsh_tensor *tsh_softmax(tsh_tensor *x, int dim) {
    return tshi_reduce_softmaxes(&tshi_reduce_softmax_op, x, dim, 0);
}

TSH_API tsh_tensor *tsh_log_softmax(tsh_tensor *x, int dim) {
    return tshi_reduce_softmaxes(&tshi_reduce_log_softmax_op, x, dim, 1);
}
