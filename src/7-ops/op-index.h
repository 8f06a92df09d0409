/* ========================================================================== */
/* >>op-index                                      MARK: - op-index (private) */
/* Elements by index: gather, scatter_add, index_select, one_hot.             */
/* Needs: >>op-shape.                                                         */
/* ========================================================================== */

/* Every op here loops over the elements of an index tensor. Each of them belongs to one element of
 * `each`, a tensor with the shape of the loop, and to one element of `whole`, the tensor that is
 * indexed: its coordinates are the same, but along the axis it is the index's value.
 *   gather, index_select:  each = whole[index];   backward: dwhole[index] += deach
 *   scatter_add:           whole[index] += each;  backward: deach = dwhole[index]
 * The loop is a tshi_loop in which `whole` has stride 0 along the axis: kernels add the offset of
 * the index. Threads never divide a dimension along which operand 0 has stride 0, so sums run in
 * the order of the index. */

/* One loop over an index. */
typedef struct tshi_index_job {
    const tsh_tensor *space; /* the loop runs over its local shape */
    int axis;                /* the dimension of `whole` that the index counts along */
    int holes;               /* 1: an index of -1 reads 0 and adds nothing */
    tshi_operand whole, each, index;
    const int64_t *whole_stride, *each_stride;
    int64_t index_stride[TSH_MAX_DIMS]; /* 0: the same index for all elements along the dimension */
} tshi_index_job;

/* Parameters of the kernels below; each thread has a copy of its own. Operand 0 of a kernel is
 * written, operand 1 is read, operand 2 is the index. */
typedef struct tshi_index_params {
    int64_t along; /* stride of `whole` along the axis */
    int64_t last;  /* the largest index that is allowed, if checks is 1 */
    int checks, isa;
    int holes; /* 1: an index of -1 reads 0 and adds nothing */
    int *bad; /* set to 1 if an index is out of range; its block is skipped */
} tshi_index_params;

enum { TSHI_INDEX_BLOCK = 256 }; /* how many indices are converted at a time */

/* Returns m <= TSHI_INDEX_BLOCK indices as int64_t, from element e of `index` on: in place, or
 * converted to pad. */
static const int64_t *tshi_index_load(const tshi_operand *index, int64_t e, int64_t m,
                                      int64_t *pad) {
    const tshi_dtype *row = &tshi_dtypes[index->dtype];
    if (index->dtype == TSH_I64 && index->step == 1) return (const int64_t *)index->data + e;
    row->load_integer((const char *)index->data + e * index->step * row->size, index->step, m, pad);
    return pad;
}

/* Does what tshi_index_load does, and checks the indices. Returns NULL if an index is out of
 * range. */
static const int64_t *tshi_index_checked(const tshi_operand *index, int64_t e, int64_t m,
                                         int64_t *pad, const tshi_index_params *p) {
    const int64_t *at = tshi_index_load(index, e, m, pad), last = p->last;
    int64_t i, signs = 0; /* below 0 if an index is out of range */
    if (!p->checks) return at;
    /* the sign bit is masked: last minus an index below 0 could overflow */
    for (i = 0; i < m; i++)
        signs |= at[i] | (last - (at[i] & INT64_MAX));
    if (signs >= 0) return at;
    *p->bad = 1;
    return NULL;
}

/* Computes y[i] = x[index[i]] for n elements that have the same index: copies a row. */
static void tshi_index_copy_row(int64_t n, const tshi_operand *x, const tshi_index_params *p) {
    static const double zero[1] = {0}; /* an element that is 0, of any dtype */
    int64_t pad[1], at;
    tshi_operand row[2];
    const int64_t *first = tshi_index_checked(&x[2], 0, 1, pad, p);
    if (!first) return;
    at = *first;
    row[0] = x[0];
    row[1] = at < 0 ? tshi_kernel_operand(zero, 0, x[1].dtype) : x[1];
    if (at > 0) tshi_kernel_move(&row[1], at * p->along);
    tshi_kernel_copy(n, row, NULL);
}

/* Copies m elements as unsigned integers of their size: y[i] = x[index[i]]. */
#define TSHI_INDEX_MOVE(type)                                                                      \
    do {                                                                                           \
        typedef type TSHI_MAY_ALIAS bits; /* an unsigned integer that may alias floats */          \
        bits *TSHI_RESTRICT y = (bits *)x[0].data + e * sy;                                        \
        const bits *from = (const bits *)x[1].data + e * sx;                                       \
        if (p->holes)                                                                              \
            for (i = 0; i < m; i++) y[i * sy] = at[i] < 0 ? 0 : from[at[i] * along + i * sx];      \
        else                                                                                       \
            for (i = 0; i < m; i++) y[i * sy] = from[at[i] * along + i * sx];                      \
    } while (0)

/* Kernel: y[i] = x[index[i]]. Operands: y, x, index; y and x have one dtype. */
static void tshi_index_gather(int64_t n, const tshi_operand *x, const void *params) {
    const tshi_index_params *p = (const tshi_index_params *)params;
    const int64_t along = p->along, sy = x[0].step, sx = x[1].step;
    int64_t pad[TSHI_INDEX_BLOCK], e, i, m;
    if (!x[2].step) {
        tshi_index_copy_row(n, x, p);
        return;
    }
    for (e = 0; e < n; e += m) {
        const int64_t *at;
        m = tshi_base_min(TSHI_INDEX_BLOCK, n - e);
        at = tshi_index_checked(&x[2], e, m, pad, p);
        if (!at) continue;
        switch (tshi_dtypes[x[0].dtype].size) {
        case 2: TSHI_INDEX_MOVE(uint16_t); break;
        case 4: TSHI_INDEX_MOVE(uint32_t); break;
        default: TSHI_INDEX_MOVE(uint64_t);
        }
    }
}
#undef TSHI_INDEX_MOVE

/* Adds m elements of `type` in their order: y[index[i]] += from[i]. */
#define TSHI_INDEX_ADD(type, from, step)                                                           \
    do {                                                                                           \
        type *y = (type *)x[0].data + e * sy;                                                      \
        const type *v = (from);                                                                    \
        if (p->holes)                                                                              \
            for (i = 0; i < m; i++) {                                                              \
                if (at[i] >= 0) y[at[i] * along + i * sy] += v[i * (step)];                        \
            }                                                                                      \
        else                                                                                       \
            for (i = 0; i < m; i++) y[at[i] * along + i * sy] += v[i * (step)];                    \
    } while (0)

/* Kernel: y[index[i]] += x[i]. Operands: y, x, index; y is of tsh_real, or y and x are integers. */
static void tshi_index_scatter(int64_t n, const tshi_operand *x, const void *params) {
    const tshi_index_params *p = (const tshi_index_params *)params;
    const int64_t along = p->along, sy = x[0].step, sx = x[1].step;
    const tshi_dtype *row = &tshi_dtypes[x[1].dtype];
    int64_t pad[TSHI_INDEX_BLOCK], e, i, m;
    tsh_real values[TSHI_INDEX_BLOCK];          /* a block of x, converted */
    if (!x[2].step && x[0].dtype == TSH_REAL) { /* one index for all: adds a row */
        tshi_operand to[2];
        const int64_t *at = tshi_index_checked(&x[2], 0, 1, pad, p);
        if (!at || *at < 0) return;
        to[0] = x[0];
        to[1] = x[1];
        tshi_kernel_move(&to[0], *at * p->along);
        tshi_kernel_add[p->isa](n, to, NULL);
        return;
    }
    for (e = 0; e < n; e += m) {
        const char *from = (const char *)x[1].data + e * sx * row->size;
        const int64_t *at;
        m = tshi_base_min(TSHI_INDEX_BLOCK, n - e);
        at = tshi_index_checked(&x[2], e, m, pad, p);
        if (!at) continue;
        if (!row->floating && row->size == 4) {
            TSHI_INDEX_ADD(uint32_t, (const uint32_t *)(const void *)from, sx);
        } else if (!row->floating) {
            TSHI_INDEX_ADD(uint64_t, (const uint64_t *)(const void *)from, sx);
        } else if (x[1].dtype == TSH_REAL) {
            TSHI_INDEX_ADD(tsh_real, (const tsh_real *)(const void *)from, sx);
        } else {
            row->load(from, sx, m, values);
            TSHI_INDEX_ADD(tsh_real, values, 1);
        }
    }
}
#undef TSHI_INDEX_ADD

/* Kernel: y[i] += x[index[i]], all of tsh_real. Operands: y, x, index. */
static void tshi_index_gather_add(int64_t n, const tshi_operand *x, const void *params) {
    const tshi_index_params *p = (const tshi_index_params *)params;
    tsh_real *y = (tsh_real *)x[0].data;
    const tsh_real *from = (const tsh_real *)x[1].data;
    const int64_t along = p->along, sy = x[0].step, sx = x[1].step;
    int64_t pad[TSHI_INDEX_BLOCK], e, i, m;
    for (e = 0; e < n; e += m) {
        const int64_t *at;
        m = tshi_base_min(TSHI_INDEX_BLOCK, n - e);
        at = tshi_index_load(&x[2], e, m, pad);
        for (i = 0; i < m; i++) y[(e + i) * sy] += from[at[i] * along + (e + i) * sx];
    }
}

/* The pieces of a loop, one per thread, each with its own parameters. */
typedef struct tshi_index_pieces {
    const tshi_loop *loop;
    tshi_index_params params;
    int bad[64]; /* bad[piece]: 1 if an index in it is out of range; at most 64 pieces */
} tshi_index_pieces;

/* A tshi_team_fn: runs the kernel on piece [from, to) of the loop, as tshi_kernel_piece does, with
 * parameters of its own. */
static void tshi_index_piece(void *data, int piece, int64_t from, int64_t to) {
    tshi_index_pieces *job = (tshi_index_pieces *)data;
    tshi_index_params params = job->params;
    tshi_loop part = *job->loop;
    params.bad = &job->bad[piece];
    part.params = &params;
    if (part.cut < part.ndim)
        tshi_kernel_piece(&part, piece, from, to);
    else
        tshi_kernel_walk(&part); /* no dimension is divided */
}

/* Runs a kernel over the job. scatter: 1 if it writes to `whole`, 0 if it writes to `each`. Returns
 * 0 if an index is out of [0, limit); limit INT64_MAX: the indices were checked before. Threads
 * divide a dimension as tshi_kernel_run does. */
static int tshi_index_run(const tshi_index_job *job, int scatter, tshi_kernel_fn kernel,
                          int64_t limit) {
    enum { MIN_ELEMENTS = 1 << 14 }; /* min elements per thread: fewer would not pay */
    const int64_t count = tsh_local_numel(job->space);
    tshi_index_pieces all;
    tshi_loop loop;
    int d, bad = 0;
    /* at most 64 pieces, the length of all.bad */
    int pieces = (int)tshi_base_min(tshi_team_parts(job->space->ctx, count, MIN_ELEMENTS), 64);
    memset(&all, 0, sizeof all);
    all.loop = &loop;
    all.params.along = job->whole_stride[job->axis];
    all.params.last = limit - 1;
    all.params.holes = job->holes;
    all.params.checks = limit < INT64_MAX;
    all.params.isa = job->space->ctx->isa;
    tshi_kernel_space(&loop, job->space);
    loop.n = 3;
    loop.kernel = kernel;
    loop.x[!scatter] = job->whole;
    loop.x[scatter] = job->each;
    loop.x[2] = job->index;
    for (d = 0; d < loop.ndim; d++) {
        loop.stride[!scatter][d] = d == job->axis ? 0 : job->whole_stride[d];
        loop.stride[scatter][d] = job->each_stride[d];
        loop.stride[2][d] = job->index_stride[d];
    }
    if (!count) return 1;
    tshi_kernel_join(&loop);
    for (d = 0; d < loop.ndim && (!loop.stride[0][d] || loop.dim[d] < pieces); d++) continue;
    loop.cut = d;
    if (d == loop.ndim) pieces = 1;
    tshi_team_run(job->space->ctx, pieces, d < loop.ndim ? loop.dim[d] : 1,
                  d == loop.ndim - 1 ? 16 : 1, tshi_index_piece, &all);
    for (d = 0; d < pieces; d++) bad |= all.bad[d];
    return !bad;
}

/* -- checks of an index --------------------------------------------------------- */

/* Records the error that an index is outside of [0, limit), the elements along dimension `dim` of
 * x, and names the first such index. */
static TSHI_COLD void tshi_index_refuse(const char *op, const tsh_tensor *index, int64_t limit,
                                        int dim) {
    const int64_t n = tsh_local_numel(index);
    tshi_block *scratch;
    const void *values = tshi_kernel_packed(index, &scratch); /* the indices, dense */
    int64_t i, at = 0;
    for (i = 0; i < n && values; i++) {
        at = tshi_tensor_integer(index, values, i);
        if (at < 0 || at >= limit) break;
    }
    tshi_mem_release(index->ctx, scratch);
    (void)tsh_fail(index->ctx, TSH_ERR_ARGUMENT,
                   "%s: index %lld at position %lld is outside [0, %lld), the elements of x along "
                   "dimension %d",
                   op, (long long)at, (long long)i, (long long)limit, dim);
}

/* Kernel: fills x[0] with zeros. */
static void tshi_index_zero(int64_t n, const tshi_operand *x, const void *params) {
    tsh_real *y = (tsh_real *)x[0].data;
    int64_t i;
    (void)params;
    if (x[0].step == 1)
        memset(y, 0, tshi_dtype_reals(n));
    else
        for (i = 0; i < n; i++) y[i * x[0].step] = 0;
}

/* Does what tshi_tape_dest_zeroed does, but all threads of the rank fill a new gradient with
 * zeros. */
static int tshi_index_dest(tshi_node *node, int i, tshi_dest *dest) {
    tsh_tensor *t = node->in[i];
    tshi_loop loop;
    if (!tshi_tape_dest(node, i, dest)) return 0;
    if (dest->add) return 1;
    tshi_kernel_space(&loop, t);
    tshi_kernel_add_operand(&loop, t, dest->data, dest->stride, TSH_REAL);
    tshi_kernel_run(&loop, tshi_index_zero, NULL);
    dest->add = 1;
    return 1;
}

/* Returns 1 if the dtype of `index` is an integer one; else 0 and an error. */
static int tshi_index_integers(const char *op, const tsh_tensor *index) {
    if (!tshi_dtypes[index->dtype].floating) return 1;
    return tshi_error_zero(index->ctx, TSH_ERR_DTYPE,
                           "%s: index is %s; takes i32 or i64, as tsh_cast(index, TSH_I64) gives",
                           op, tshi_dtype_name(index->dtype));
}

/* Checks the shape of an index along the axis of x, and also that of src if that is not NULL (see
 * tsh_gather and tsh_scatter_add). Returns 0 and an error if the sizes do not fit. */
static int tshi_index_sizes(const char *op, const tsh_tensor *x, int axis, const tsh_tensor *index,
                            const tsh_tensor *src) {
    char tx[TSHI_TEXT_SIZE], ti[TSHI_TEXT_SIZE], ts[TSHI_TEXT_SIZE];
    int d, fits = index->ndim == x->ndim && (!src || src->ndim == x->ndim) && axis >= 0;
    for (d = 0; d < x->ndim && fits; d++)
        fits = (d == axis || index->dim[d] <= x->dim[d]) && (!src || index->dim[d] <= src->dim[d]);
    if (fits) return 1;
    return tshi_error_zero(
        x->ctx, TSH_ERR_SHAPE,
        "%s: x %s, index %s%s%s, dimension %d; takes as many dimensions in each, "
        "and an index that is no longer than x (but along that dimension), nor "
        "than src: tsh_expand, tsh_slice",
        op, tshi_tensor_text(x, tx), tshi_tensor_text(index, ti), src ? ", src " : "",
        src ? tshi_tensor_text(src, ts) : "", axis);
}

/* Returns t; if t is a scalar, a view of t with one dimension, of length 1. */
static tsh_tensor *tshi_index_vector(tsh_tensor *t) {
    return t && !t->ndim ? tsh_unsqueeze(t, 0) : t;
}

/* Returns the dimension of x that dim names; -1 and an error if there is none. */
static int tshi_index_axis(const char *op, const tsh_tensor *x, int dim) {
    const int axis = x ? tshi_tensor_axis(x, dim) : -1;
    char text[TSHI_TEXT_SIZE];
    if (axis < 0 && x)
        (void)tsh_fail(x->ctx, TSH_ERR_SHAPE, "%s: there is no dimension %d in %s", op, dim,
                       tshi_tensor_text(x, text));
    return axis;
}

/* -- gather ----------------------------------------------------------------------- */

/* Returns the backward job of a node of tsh_gather (inputs x, index) or of tsh_scatter_add (x,
 * index, src), whose params begin with the axis. `whole` and `each` are not set yet. */
static tshi_index_job tshi_index_node_job(const tshi_node *node) {
    const tsh_tensor *index = node->in[1];
    tshi_index_job job;
    memset(&job, 0, sizeof job);
    job.space = index;
    job.axis = ((const tshi_rule_axis *)node->params)->axis;
    job.index = tshi_kernel_operand(tshi_tape_saved(node, 1), 0, index->dtype);
    memcpy(job.index_stride, index->stride, sizeof job.index_stride);
    return job;
}

/* Backward of a gather: dx[index] += dy. */
static void tshi_index_gather_backward(tshi_node *node) {
    tshi_index_job job = tshi_index_node_job(node);
    tshi_dest dest;
    if (!tshi_index_dest(node, 0, &dest)) return;
    job.whole = tshi_kernel_reals(dest.data, 0);
    job.whole_stride = dest.stride;
    job.each = tshi_kernel_reals(tshi_tape_grad(node), 0);
    job.each_stride = node->out->stride;
    (void)tshi_index_run(&job, 1, tshi_index_scatter, INT64_MAX);
}

/* Runs op, a gather along an axis of x. The inputs were checked, but for the values of the
 * index. */
static tsh_tensor *tshi_index_gathered(const tshi_op *op, tsh_tensor *x, int axis,
                                       tsh_tensor *index) {
    tsh_tensor *in[2] = {x, index}, *out;
    const tshi_rule_axis along = {axis, 1};
    tshi_index_job job;
    tshi_output output;
    output.shape = tsh_shape_of(index);
    if (!tshi_rule_run(op, in, 2, &along, &output)) return NULL;
    out = tshi_tensor_out(x->ctx, op->name, x->dtype, &output.shape, &output.layout);
    if (!out) return NULL;
    memset(&job, 0, sizeof job);
    job.space = index;
    job.axis = axis;
    job.whole = tshi_kernel_operand(tshi_tensor_at(x), 0, x->dtype);
    job.whole_stride = x->stride;
    job.each = tshi_kernel_operand(tshi_tensor_at(out), 0, out->dtype);
    job.each_stride = out->stride;
    job.index = tshi_kernel_operand(tshi_tensor_at(index), 0, index->dtype);
    memcpy(job.index_stride, index->stride, sizeof job.index_stride);
    if (!tshi_index_run(&job, 0, tshi_index_gather, x->dim[axis]))
        tshi_index_refuse(op->name, index, x->dim[axis], axis);
    tshi_op_record(op, out, in, 2, output.partial, &along, sizeof along, NULL);
    return x->ctx->error.code == TSH_OK ? out : NULL;
}

static const tshi_op tshi_index_gather_op = {
    "tsh_gather", "x index", tshi_rule_gather, tshi_index_gather_backward, TSHI_B, 0};

TSH_API tsh_tensor *tsh_gather(tsh_tensor *x, int dim, tsh_tensor *index) {
    const tshi_op *op = &tshi_index_gather_op;
    tsh_tensor *in[2] = {x, index}, *out;
    const int scalar = index && !index->ndim;
    int axis;
    if (!tshi_tensor_check(op->name, op->inputs, in, 2)) return NULL;
    x = tshi_index_vector(x);
    index = tshi_index_vector(index);
    axis = tshi_index_axis(op->name, x, dim);
    if (axis < 0 || !index || !tshi_index_integers(op->name, index) ||
        !tshi_index_sizes(op->name, x, axis, index, NULL))
        return NULL;
    out = tshi_index_gathered(op, x, axis, index);
    return scalar && out ? tsh_squeeze(out, 0) : out;
}

/* -- scatter_add -------------------------------------------------------------------- */

/* Backward of tsh_scatter_add: dsrc = dy[index], and 0 where src is longer than the index; dx =
 * dy. */
static void tshi_index_scatter_backward(tshi_node *node) {
    const tsh_tensor *index = node->in[1], *src = node->in[2];
    const int whole = memcmp(index->local, src->local, (size_t)src->ndim * sizeof *src->local) == 0;
    tshi_index_job job = tshi_index_node_job(node);
    tshi_dest dest;
    job.whole = tshi_kernel_reals(tshi_tape_grad(node), 0);
    job.whole_stride = node->out->stride;
    if (whole ? tshi_tape_dest(node, 2, &dest) : tshi_index_dest(node, 2, &dest)) {
        job.each = tshi_kernel_reals(dest.data, 0);
        job.each_stride = dest.stride;
        (void)tshi_index_run(&job, 0, dest.add ? tshi_index_gather_add : tshi_index_gather,
                             INT64_MAX);
    }
    tshi_tape_identity(node, 0);
}

/* Computes out = x, and then out[index] += src. */
static void tshi_index_scattered(const tsh_tensor *x, int axis, const tsh_tensor *index,
                                 const tsh_tensor *src, tsh_tensor *out) {
    const int reals = tshi_dtypes[out->dtype].floating;
    tshi_index_job job;
    tshi_block *unrounded = NULL;
    void *values = reals ? (void *)tshi_kernel_output(out, &unrounded) : tshi_tensor_at(out);
    if (!values) return;
    memset(&job, 0, sizeof job);
    job.space = index;
    job.axis = axis;
    job.whole = tshi_kernel_operand(values, 0, reals ? TSH_REAL : out->dtype);
    job.whole_stride = out->stride;
    job.each = tshi_kernel_operand(tshi_tensor_at(src), 0, src->dtype);
    job.each_stride = src->stride;
    job.index = tshi_kernel_operand(tshi_tensor_at(index), 0, index->dtype);
    memcpy(job.index_stride, index->stride, sizeof job.index_stride);
    tshi_kernel_dense(x, values, job.whole.dtype, 0);
    if (!tshi_index_run(&job, 1, tshi_index_scatter, x->dim[axis]))
        tshi_index_refuse("tsh_scatter_add", index, x->dim[axis], axis);
    tshi_kernel_output_done(out, unrounded);
}

static const tshi_op tshi_index_scatter_op = {
    "tsh_scatter_add", "x index src", tshi_rule_scatter, tshi_index_scatter_backward, TSHI_B, 0};

/* Runs tsh_scatter_add for tensors with at least one dimension. */
static tsh_tensor *tshi_index_scatter_run(tsh_tensor *const *in, int dim) {
    const tshi_op *op = &tshi_index_scatter_op;
    tsh_tensor *x = in[0], *index = in[1], *src = in[2], *out;
    tshi_rule_axis along = {-1, 1};
    tshi_output output;
    along.axis = tshi_index_axis(op->name, x, dim);
    if (along.axis < 0 || !tshi_index_integers(op->name, index) ||
        !tshi_index_sizes(op->name, x, along.axis, index, src))
        return NULL;
    if (x->dtype != src->dtype ||
        (tshi_dtypes[x->dtype].floating && !tshi_dtype_computes(x->dtype)))
        return tshi_error_null(x->ctx, TSH_ERR_DTYPE,
                               "tsh_scatter_add: x is %s and src is %s; takes one dtype, integers "
                               "or floating, no wider than %s: tsh_cast",
                               tshi_dtype_name(x->dtype), tshi_dtype_name(src->dtype),
                               tshi_dtype_name(TSH_REAL));
    output.shape = tsh_shape_of(x);
    if (!tshi_rule_run(op, in, 3, &along, &output)) return NULL;
    out = tshi_tensor_out(x->ctx, op->name, x->dtype, &output.shape, &output.layout);
    if (!out) return NULL;
    tshi_index_scattered(x, along.axis, index, src, out);
    tshi_op_record(op, out, in, 3, output.partial, &along, sizeof along, NULL);
    return x->ctx->error.code == TSH_OK ? out : NULL;
}

TSH_API tsh_tensor *tsh_scatter_add(tsh_tensor *x, int dim, tsh_tensor *index, tsh_tensor *src) {
    tsh_tensor *in[3] = {x, index, src}, *out;
    const int scalar = x && !x->ndim;
    int i;
    if (!tshi_tensor_check("tsh_scatter_add", "x index src", in, 3)) return NULL;
    for (i = 0; i < 3; i++) in[i] = tshi_index_vector(in[i]);
    if (!in[0] || !in[1] || !in[2]) return NULL;
    out = tshi_index_scatter_run(in, dim);
    return scalar && out ? tsh_squeeze(out, 0) : out;
}

/* -- index_select ----------------------------------------------------------------------
 * A slice is what one element of the index selects. The node's aux has, for each element of the
 * index, the local index of its slice in x; -1: the slice is on another rank. */

/* Returns the job of tsh_index_select, whose output is out; `whole` and `each` are not set yet. */
static tshi_index_job tshi_index_select_job(const tsh_tensor *out, int axis, tshi_block *aux) {
    tshi_index_job job;
    memset(&job, 0, sizeof job);
    job.space = out;
    job.axis = axis;
    job.holes = 1;
    job.index = tshi_kernel_operand(tshi_mem_data(aux), 0, TSH_I64);
    job.index_stride[axis] = 1;
    return job;
}

/* Backward of tsh_index_select: dx[index] += dy. */
static void tshi_index_select_backward(tshi_node *node) {
    const int axis = ((const tshi_rule_axis *)node->params)->axis;
    tshi_index_job job = tshi_index_select_job(node->out, axis, node->aux);
    tshi_dest dest;
    if (!tshi_index_dest(node, 0, &dest)) return;
    job.whole = tshi_kernel_reals(dest.data, 0);
    job.whole_stride = dest.stride;
    job.each = tshi_kernel_reals(tshi_tape_grad(node), 0);
    job.each_stride = node->out->stride;
    (void)tshi_index_run(&job, 1, tshi_index_scatter, INT64_MAX);
}

/* Returns a block with the local index along the axis of x for each element of `index` (-1: on
 * another rank). NULL after an error, such as an index out of range. */
static tshi_block *tshi_index_select_places(const tsh_tensor *x, int axis,
                                            const tsh_tensor *index) {
    const int64_t n = tsh_local_numel(index);
    tshi_block *aux = tshi_mem_alloc(x->ctx, TSH_MEM_STEP, (size_t)n * sizeof(int64_t));
    int64_t i, *at;
    if (!aux) return NULL;
    at = (int64_t *)tshi_mem_data(aux);
    tshi_kernel_dense(index, at, TSH_I64, 0);
    for (i = 0; i < n; i++) {
        if (at[i] < 0 || at[i] >= x->dim[axis]) {
            tshi_index_refuse("tsh_index_select", index, x->dim[axis], axis);
            tshi_mem_release(x->ctx, aux);
            return NULL;
        }
        if (tshi_rule_is_sharded(x, axis)) at[i] = tshi_tensor_local(x, axis, at[i]);
    }
    return aux;
}

static const tshi_op tshi_index_select_op = {
    "tsh_index_select", "x index", tshi_rule_select, tshi_index_select_backward, TSHI_NONE, 0};

/* Runs tsh_index_select along an axis, for tensors with at least one dimension. */
static tsh_tensor *tshi_index_selected(tsh_tensor *x, int axis, tsh_tensor *index) {
    const tshi_op *op = &tshi_index_select_op;
    tsh_tensor *in[2] = {x, index}, *out;
    const tshi_rule_axis along = {axis, 1};
    tshi_index_job job;
    tshi_output output;
    tshi_block *aux;
    output.shape = tsh_shape_of(x);
    output.shape.dim[axis] = index->dim[0];
    if (!tshi_rule_run(op, in, 2, &along, &output)) return NULL;
    out = tshi_tensor_out(x->ctx, op->name, x->dtype, &output.shape, &output.layout);
    aux = out ? tshi_index_select_places(x, axis, index) : NULL;
    if (!aux) return NULL;
    job = tshi_index_select_job(out, axis, aux);
    job.whole = tshi_kernel_operand(tshi_tensor_at(x), 0, x->dtype);
    job.whole_stride = x->stride;
    job.each = tshi_kernel_operand(tshi_tensor_at(out), 0, out->dtype);
    job.each_stride = out->stride;
    (void)tshi_index_run(&job, 0, tshi_index_gather, INT64_MAX);
    tshi_op_record(op, out, in, 2, output.partial, &along, sizeof along, aux);
    return out;
}

TSH_API tsh_tensor *tsh_index_select(tsh_tensor *x, int dim, tsh_tensor *index) {
    const char *op = "tsh_index_select";
    tsh_tensor *in[2] = {x, index}, *out;
    const int scalar = x && !x->ndim;
    char text[TSHI_TEXT_SIZE];
    int axis;
    if (!tshi_tensor_check(op, "x index", in, 2)) return NULL;
    x = tshi_index_vector(x);
    index = tshi_index_vector(index);
    axis = tshi_index_axis(op, x, dim);
    if (axis < 0 || !index || !tshi_index_integers(op, index)) return NULL;
    if (index->ndim != 1 || (scalar && index->dim[0] != 1))
        return tshi_error_null(x->ctx, TSH_ERR_SHAPE, "%s: index is %s; takes one dimension%s", op,
                               tshi_tensor_text(index, text),
                               scalar ? ", and one element if x is a scalar" : "");
    out = tshi_index_selected(x, axis, index);
    return scalar && out ? tsh_squeeze(out, 0) : out;
}

/* -- one_hot ------------------------------------------------------------------------ */

static const tshi_op tshi_index_one_hot_op = {"tsh_one_hot", "ids", tshi_rule_moved, NULL, 0, 0};

TSH_API tsh_tensor *tsh_one_hot(tsh_tensor *ids, int64_t classes) {
    const tshi_op *op = &tshi_index_one_hot_op;
    const tshi_rule_moves moves = {0, 0, 0};
    tsh_ctx *ctx = tshi_tensor_check("tsh_one_hot", "ids", &ids, 1);
    char text[TSHI_TEXT_SIZE];
    tshi_output output;
    tshi_block *scratch;
    const void *values;
    tsh_tensor *out;
    int64_t i, count = tsh_local_numel(ids), *to;
    if (!ctx) return NULL;
    if (tshi_dtypes[ids->dtype].floating || ids->ndim == TSH_MAX_DIMS || classes < 1)
        return tshi_error_null(
            ctx, tshi_dtypes[ids->dtype].floating ? TSH_ERR_DTYPE : TSH_ERR_SHAPE,
            "tsh_one_hot: ids %s %s, %lld classes; takes ids of i32 or i64 of at "
            "most %d dimensions, and 1 class or more",
            tshi_dtype_name(ids->dtype), tshi_tensor_text(ids, text), (long long)classes,
            TSH_MAX_DIMS - 1);
    output.shape = tsh_shape_of(ids);
    output.shape.dim[output.shape.ndim++] = classes;
    if (!tshi_rule_run(op, &ids, 1, &moves, &output)) return NULL;
    out = tshi_tensor_out(ctx, "tsh_one_hot", TSH_I64, &output.shape, &output.layout);
    values = out ? tshi_kernel_packed(ids, &scratch) : NULL; /* the ids, dense */
    if (!values) return NULL;
    to = (int64_t *)tshi_tensor_at(out);
    memset(to, 0, tshi_dtype_bytes(TSH_I64, count * classes));
    for (i = 0; i < count && ctx->error.code == TSH_OK; i++, to += classes) {
        const int64_t id = tshi_tensor_integer(ids, values, i);
        if (id < 0 || id >= classes)
            (void)tsh_fail(
                ctx, TSH_ERR_ARGUMENT,
                "tsh_one_hot: id %lld at position %lld is outside [0, %lld), the classes",
                (long long)id, (long long)i, (long long)classes);
        else
            to[id] = 1;
    }
    tshi_mem_release(ctx, scratch);
    (void)tshi_tape_record(op, out, &ids, 1, TSHI_NONE, 0);
    return ctx->error.code == TSH_OK ? out : NULL;
}
