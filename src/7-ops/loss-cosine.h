/* ========================================================================== */
/* >>loss-cosine                                MARK: - loss-cosine (private) */
/* The cosine of the angle between vectors along a dimension.                 */
/* Needs: >>op-map.                                                           */
/* ========================================================================== */

/* For two vectors a and b along the dimension, with n(v) = max(|v|, eps) and the result c:
 *   c = sum a b / (n(a) n(b))            all-reduce of a b, a a, b b if the dimension is sharded
 *   da = g (b / (n(a) n(b)) - c a / (n(a) |a|)), without the second term where |a| is 0; db alike.
 * (As in PyTorch, the second term stays where |a| is below eps.) */

/* A call of tsh_cosine_similarity, and the params of its node. A row is an element of the result;
 * in an input, it is the vector along the axis that the element is computed from. */
typedef struct tshi_loss_cosine {
    int64_t dim[TSH_MAX_DIMS];     /* local lengths of the broadcast shape of a and b; axis: 1 */
    int64_t step[2][TSH_MAX_DIMS]; /* strides of a and b along these dimensions; 0: broadcast */
    int64_t along[2];              /* strides of a and b along the axis */
    int64_t length, rows;          /* local length of a vector; number of local rows */
    int ndim;
    int empty; /* 1: the vectors have no elements, on any rank */
    double eps;
} tshi_loss_cosine;

/* Indices of the three sums of a row, a b, a a and b b, which forward keeps for backward. */
enum { TSHI_LOSS_DOT, TSHI_LOSS_AA, TSHI_LOSS_BB, TSHI_LOSS_PRODUCTS };

/* Computes the sums of products, a b, a a and b b, of one row. Operands: the three sums, a, b. */
TSHI_INLINE void tshi_loss_products_body(int64_t n, const tshi_operand *operand, const void *none) {
    tsh_real lane[3][TSHI_BLOCK], pad[2][TSHI_BLOCK], *out = (tsh_real *)operand[0].data;
    memset(lane, 0, sizeof lane);
    (void)none;
    for (int64_t e = 0; e < n; e += TSHI_BLOCK) {
        const tsh_real *a = tshi_kernel_load(&operand[1], e, n, pad[0]);
        const tsh_real *b = tshi_kernel_load(&operand[2], e, n, pad[1]);
        if (n - e < TSHI_BLOCK) { /* the last block: its padding must add 0 */
            for (int64_t i = n - e; i < TSHI_BLOCK; i++) pad[0][i] = pad[1][i] = 0;
        }
        tshi_kernel_dot_step(lane[TSHI_LOSS_DOT], a, b);
        tshi_kernel_dot_step(lane[TSHI_LOSS_AA], a, a);
        tshi_kernel_dot_step(lane[TSHI_LOSS_BB], b, b);
    }
    for (int i = 0; i < TSHI_LOSS_PRODUCTS; i++) out[i] = tshi_kernel_fold(lane[i]);
}
TSHI_KERNEL(tshi_loss_products, void);

/* The parameters of the kernel that adds a row's gradient: da += other b + own a. */
typedef struct tshi_loss_cosine_row {
    double other, own;
} tshi_loss_cosine_row;

/* Adds the gradient of one row of an input (see tshi_loss_cosine_row). Operands: the gradient, the
 * input, the other input. */
TSHI_INLINE void tshi_loss_cosine_grad_body(int64_t n, const tshi_operand *operand,
                                            const tshi_loss_cosine_row *row) {
    const tsh_real other = TSHI_R(row->other), own = TSHI_R(row->own);
    tsh_real pad[2][TSHI_BLOCK], y[TSHI_BLOCK];
    for (int64_t e = 0; e < n; e += TSHI_BLOCK) {
        const tsh_real *a = tshi_kernel_load(&operand[1], e, n, pad[0]);
        const tsh_real *b = tshi_kernel_load(&operand[2], e, n, pad[1]);
        TSHI_LANES for (int i = 0; i < TSHI_BLOCK; i++) y[i] = other * b[i] + own * a[i];
        tshi_kernel_store(&operand[0], e, n, y, 1);
    }
}
TSHI_KERNEL(tshi_loss_cosine_grad, tshi_loss_cosine_row);

/* Returns where row i of input k begins, in elements from the input's first element. */
static int64_t tshi_loss_cosine_start(const tshi_loss_cosine *call, int k, int64_t i) {
    int64_t at = 0;
    for (int d = call->ndim - 1; d >= 0; d--) {
        at += i % call->dim[d] * call->step[k][d];
        i /= call->dim[d];
    }
    return at;
}

/* What the threads of a rank share while they compute a cosine similarity or its gradients. */
typedef struct tshi_loss_cosine_job {
    const tshi_loss_cosine *call;
    tshi_operand in[2]; /* values of a and b, from their first element */
    const tsh_ctx *ctx;
    tsh_real *products; /* a b, a a and b b of each row, shape (rows, TSHI_LOSS_PRODUCTS) */
    const tsh_real *g;  /* backward: gradient of the result, shape (rows) */
    tshi_dest dest;     /* backward: where the gradient of input `which` goes */
    int which;
} tshi_loss_cosine_job;

/* Returns row i of input k as an operand. */
static tshi_operand tshi_loss_cosine_vector(const tshi_loss_cosine_job *job, int k, int64_t i) {
    tshi_operand row = job->in[k];
    row.step = job->call->along[k];
    tshi_kernel_move(&row, tshi_loss_cosine_start(job->call, k, i));
    return row;
}

/* Computes the sums a b, a a and b b of rows [from, to); a tshi_team_fn. */
static void tshi_loss_cosine_sums(void *job, int piece, int64_t from, int64_t to) {
    const tshi_loss_cosine_job *work = (const tshi_loss_cosine_job *)job;
    (void)piece;
    for (int64_t i = from; i < to; i++) {
        tshi_operand x[3];
        x[0] = tshi_kernel_reals(work->products + i * TSHI_LOSS_PRODUCTS, 1);
        x[1] = tshi_loss_cosine_vector(work, 0, i);
        x[2] = tshi_loss_cosine_vector(work, 1, i);
        tshi_loss_products[work->ctx->isa](work->call->length, x, NULL);
    }
}

/* Returns a vector's norm, the root of `square`, but at least eps. */
static double tshi_loss_norm(tsh_real square, double eps) {
    const double norm = sqrt((double)square);
    return norm < eps ? eps : norm; /* a norm that is NaN stays NaN */
}

/* Computes the gradients of rows [from, to) of input `which`; a tshi_team_fn. */
static void tshi_loss_cosine_grads(void *job, int piece, int64_t from, int64_t to) {
    const tshi_loss_cosine_job *work = (const tshi_loss_cosine_job *)job;
    const tshi_loss_cosine *call = work->call;
    const int k = work->which;
    (void)piece;
    for (int64_t i = from; i < to; i++) {
        const tsh_real *sums = work->products + i * TSHI_LOSS_PRODUCTS;
        const double own = tshi_loss_norm(sums[k ? TSHI_LOSS_BB : TSHI_LOSS_AA], call->eps);
        const double other = tshi_loss_norm(sums[k ? TSHI_LOSS_AA : TSHI_LOSS_BB], call->eps);
        const double g = (double)work->g[i], c = (double)sums[TSHI_LOSS_DOT] / own / other;
        const double norm = sqrt((double)sums[k ? TSHI_LOSS_BB : TSHI_LOSS_AA]);
        const tshi_loss_cosine_row row = {g / own / other,
                                          norm < 0 || norm > 0 ? -g * c / own / norm : 0};
        tshi_operand x[3];
        x[0] = tshi_kernel_reals(work->dest.data + tshi_loss_cosine_start(call, k, i),
                                 call->along[k]);
        x[1] = tshi_loss_cosine_vector(work, k, i);
        x[2] = tshi_loss_cosine_vector(work, !k, i);
        tshi_loss_cosine_grad[work->ctx->isa](call->length, x, &row);
    }
}

/* Computes the gradients of a and b. An input that is broadcast gets the terms of several rows in
 * each element: one thread adds them, in order. */
static void tshi_loss_cosine_backward(tshi_node *node) {
    const tshi_loss_cosine *call = (const tshi_loss_cosine *)node->params;
    tsh_ctx *ctx = node->out->ctx;
    tshi_loss_cosine_job work;
    memset(&work, 0, sizeof work);
    work.call = call;
    work.ctx = ctx;
    work.products = (tsh_real *)tshi_mem_data(node->aux);
    work.g = tshi_tape_grad(node);
    for (int k = 0; k < 2; k++)
        work.in[k] = tshi_kernel_operand(tshi_tape_saved(node, k), 0, node->in[k]->dtype);
    for (work.which = 0; work.which < 2; work.which++) {
        const int64_t own = tsh_local_numel(node->in[work.which]);
        const int alone = own == call->rows * call->length; /* 1: the input is not broadcast */
        if (!tshi_tape_dest_zeroed(node, work.which, &work.dest)) continue;
        tshi_team_run(ctx, alone ? tshi_kernel_parts(ctx, call->rows, call->length) : 1, call->rows,
                      1, tshi_loss_cosine_grads, &work);
    }
}

static const tshi_op tshi_loss_cosine_op = {"tsh_cosine_similarity", "a b",
                                            tshi_rule_cosine,        tshi_loss_cosine_backward,
                                            TSHI_A | TSHI_B,         0};

/* Fills in *call for inputs whose broadcast shape is `shape`. */
static void tshi_loss_cosine_plan(tsh_tensor *const *in, const tsh_shape *shape, int axis,
                                  tshi_loss_cosine *call) {
    call->ndim = shape->ndim;
    call->length = axis < 0 ? 1 : 0;
    call->rows = 1;
    for (int d = 0; d < shape->ndim; d++) {
        int64_t local = shape->dim[d]; /* length on this rank */
        for (int k = 0; k < 2; k++) {
            const int own = d - (shape->ndim - in[k]->ndim);
            const int there = own >= 0 && in[k]->dim[own] == shape->dim[d];
            call->step[k][d] = there && shape->dim[d] > 1 ? in[k]->stride[own] : 0;
            if (there && tshi_rule_is_sharded(in[k], own)) local = in[k]->local[own];
        }
        if (d == axis) {
            call->length = local;
            call->along[0] = call->step[0][d];
            call->along[1] = call->step[1][d];
        }
        call->dim[d] = d == axis ? 1 : local;
        call->rows *= call->dim[d];
    }
}

/* Computes the sums a b, a a and b b of all rows, and from them the result. cut: 1 if the axis is
 * sharded. */
static void tshi_loss_cosine_run(tsh_tensor *const *in, const tshi_loss_cosine *call, int cut,
                                 tsh_real *products, tsh_real *out) {
    tsh_ctx *ctx = in[0]->ctx;
    tshi_loss_cosine_job work;
    memset(&work, 0, sizeof work);
    work.call = call;
    work.ctx = ctx;
    work.products = products;
    for (int k = 0; k < 2; k++)
        work.in[k] = tshi_kernel_operand(tshi_tensor_at(in[k]), 0, in[k]->dtype);
    tshi_team_run(ctx, tshi_kernel_parts(ctx, call->rows, call->length), call->rows, 1,
                  tshi_loss_cosine_sums, &work);
    if (cut)
        (void)tshi_error_comm(
            ctx,
            tsh_allreduce(&ctx->tp, products, TSHI_LOSS_PRODUCTS * call->rows, TSH_REAL, TSH_SUM),
            "tsh_cosine_similarity: all-reduce of sums along the dimension");
    for (int64_t i = 0; i < call->rows; i++, products += TSHI_LOSS_PRODUCTS)
        out[i] = call->empty ? 0 /* not 0 / 0, even if eps is 0 */
                             : TSHI_R((double)products[TSHI_LOSS_DOT] /
                                      tshi_loss_norm(products[TSHI_LOSS_AA], call->eps) /
                                      tshi_loss_norm(products[TSHI_LOSS_BB], call->eps));
}

TSH_API tsh_tensor *tsh_cosine_similarity(tsh_tensor *a, tsh_tensor *b, int dim, double eps) {
    const tshi_op *op = &tshi_loss_cosine_op;
    tsh_tensor *in[2] = {a, b}, *out;
    tsh_ctx *ctx = tshi_tensor_check_floating(op->name, op->inputs, in, 2);
    char ta[TSHI_TEXT_SIZE], tb[TSHI_TEXT_SIZE];
    tshi_block *aux = NULL, *unrounded;
    tshi_loss_cosine call;
    tshi_output output;
    tsh_real *values;
    int axis, cut;
    memset(&call, 0, sizeof call);
    if (!ctx || !tshi_map_shape(op->name, in, 2, &output.shape)) return NULL;
    call.eps = tshi_base_option(eps, 1e-8);
    axis = dim < 0 ? dim + output.shape.ndim : dim;
    if (!output.shape.ndim && (dim == 0 || dim == -1)) axis = -1;
    if (!(eps >= TSH_ZERO && eps <= DBL_MAX))
        return tshi_error_null(ctx, TSH_ERR_ARGUMENT,
                               "%s: eps is %g, not a finite number from 0 up", op->name, eps);
    if (output.shape.ndim ? axis < 0 || axis >= output.shape.ndim : axis != -1)
        return tshi_error_null(ctx, TSH_ERR_SHAPE, "%s: there is no dimension %d in %s and %s",
                               op->name, dim, tshi_tensor_text(a, ta), tshi_tensor_text(b, tb));
    if (!tshi_rule_run(op, in, 2, &axis, &output)) return NULL;
    tshi_loss_cosine_plan(in, &output.shape, axis, &call);
    call.empty = axis >= 0 && output.shape.dim[axis] == 0;
    cut = ctx->tp.size > 1 && (a->layout.kind == TSH_SHARDED || b->layout.kind == TSH_SHARDED) &&
          output.layout.kind == TSH_REPLICATED;
    for (int d = axis; axis >= 0 && d < output.shape.ndim - 1; d++)
        output.shape.dim[d] = output.shape.dim[d + 1];
    if (axis >= 0) output.shape.ndim--;
    out = tshi_tensor_out(ctx, op->name, tshi_tensor_promote(in, 2), &output.shape, &output.layout);
    values = out ? tshi_kernel_output(out, &unrounded) : NULL;
    if (!values) return NULL;
    aux = tshi_mem_alloc(ctx, TSH_MEM_STEP, tshi_dtype_reals(TSHI_LOSS_PRODUCTS * call.rows));
    if (aux) tshi_loss_cosine_run(in, &call, cut, (tsh_real *)tshi_mem_data(aux), values);
    tshi_kernel_output_done(out, unrounded);
    tshi_op_record(op, out, in, 2, output.partial, &call, sizeof call, aux);
    return ctx->error.code == TSH_OK ? out : NULL;
}
