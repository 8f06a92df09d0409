/* ========================================================================== */
/* >>op-cumsum                                    MARK: - op-cumsum (private) */
/* Cumulative sums, and products along a dimension.                           */
/* Needs: >>op-reduce.                                                        */
/* ========================================================================== */

/* -- cumsum: y_i = x_0 + ... + x_i;   dx_i = dy_i + dy_(i+1) + ... -----------
 * x and y are dense arrays of shape (outer, n, inner), summed along n; floats are added up in
 * double. A column is the n elements at a position in outer and inner. The sums of several columns,
 * a group, are computed together: of neighbours in inner, or, where inner is short, in outer. */

/* Max columns of a group: of neighbours in inner (WIDE), of neighbours in outer (FEW). */
enum { TSHI_CUMSUM_WIDE = 256, TSHI_CUMSUM_FEW = 4 };

typedef struct tshi_cumsum {
    const void *x; /* tsh_real, or int64_t if `integers` is 1 */
    void *y;
    int64_t outer, n, inner;
    int integers;
    int reverse; /* 1: sums from the last element to the first */
} tshi_cumsum;

/* Defines tshi_cumsum_<name>, which computes the cumulative sums of m columns of n elements: column
 * l begins at x[l * next], and its elements are `step` apart (negative: in reverse). */
#define TSHI_CUMSUM_COLUMNS(name, type, sum_type)                                                  \
    TSHI_INLINE void tshi_cumsum_##name##_columns(const type *x, type *y, int64_t n, int64_t step, \
                                                  int64_t next, int64_t m) {                       \
        sum_type sum[TSHI_CUMSUM_WIDE] = {0};                                                      \
        int64_t i, l;                                                                              \
        for (i = 0; i < n; i++, x += step, y += step) TSHI_LANES for (l = 0; l < m; l++) {         \
                sum[l] += (sum_type)x[l * next];                                                   \
                y[l * next] = (type)sum[l];                                                        \
            }                                                                                      \
    }                                                                                              \
    static void tshi_cumsum_##name(const tshi_cumsum *job, int64_t at, int64_t next, int64_t m) {  \
        const int64_t step = job->reverse ? -job->inner : job->inner;                              \
        const int64_t first = at + (job->reverse ? (job->n - 1) * job->inner : 0);                 \
        const type *x = (const type *)job->x + first;                                              \
        type *y = (type *)job->y + first;                                                          \
        if (next == 1)                                                                             \
            tshi_cumsum_##name##_columns(x, y, job->n, step, 1, m);                                \
        else if (m == TSHI_CUMSUM_FEW) /* m is a constant, so the sums stay in registers */        \
            tshi_cumsum_##name##_columns(x, y, job->n, step, next, TSHI_CUMSUM_FEW);               \
        else                                                                                       \
            tshi_cumsum_##name##_columns(x, y, job->n, step, next, m);                             \
    }
TSHI_CUMSUM_COLUMNS(reals, tsh_real, double)
TSHI_CUMSUM_COLUMNS(integers, int64_t, uint64_t) /* unsigned: overflow wraps around */
#undef TSHI_CUMSUM_COLUMNS

/* The groups of columns whose sums are computed together. */
typedef struct tshi_cumsum_groups {
    int by_inner; /* 1: the columns of a group are neighbours in inner, 0: in outer */
    int64_t most; /* columns of a group; the last group may have fewer */
    int64_t each; /* number of groups that cover inner, or outer */
    int64_t count;
} tshi_cumsum_groups;

static tshi_cumsum_groups tshi_cumsum_group(const tshi_cumsum *job) {
    tshi_cumsum_groups g;
    g.by_inner = job->inner >= TSHI_CUMSUM_FEW || job->outer == 1;
    g.most = g.by_inner ? TSHI_CUMSUM_WIDE : TSHI_CUMSUM_FEW;
    g.each = tshi_base_ceil(g.by_inner ? job->inner : job->outer, g.most);
    g.count = g.each * (g.by_inner ? job->outer : job->inner);
    return g;
}

/* Computes the cumulative sums of groups [from, to) of columns; a tshi_team_fn. user: a
 * tshi_cumsum. */
static void tshi_cumsum_piece(void *user, int piece, int64_t from, int64_t to) {
    const tshi_cumsum *job = (const tshi_cumsum *)user;
    const tshi_cumsum_groups g = tshi_cumsum_group(job);
    const int64_t whole = job->n * job->inner; /* elements per position in outer */
    int64_t i, first, at, m;
    (void)piece;
    for (i = from; i < to; i++) {
        first = i % g.each * g.most; /* the group's first position in inner, or outer */
        m = tshi_base_min(g.most, (g.by_inner ? job->inner : job->outer) - first);
        at = g.by_inner ? i / g.each * whole + first : first * whole + i / g.each;
        if (job->integers)
            tshi_cumsum_integers(job, at, g.by_inner ? 1 : whole, m);
        else
            tshi_cumsum_reals(job, at, g.by_inner ? 1 : whole, m);
    }
}

/* Computes the cumulative sums of all columns on the rank's threads. */
static void tshi_cumsum_run(const tsh_ctx *ctx, tshi_cumsum *job) {
    const tshi_cumsum_groups g = tshi_cumsum_group(job);
    if (job->n && g.count)
        tshi_team_run(ctx, tshi_kernel_parts(ctx, g.count, job->n * g.most), g.count, 1,
                      tshi_cumsum_piece, job);
}

/* What backward of tsh_cumsum needs of the call: its local sizes. */
typedef struct tshi_cumsum_params {
    int64_t outer, n, inner;
} tshi_cumsum_params;

static void tshi_cumsum_backward(tshi_node *node) {
    const tshi_cumsum_params *p = (const tshi_cumsum_params *)node->params;
    tshi_cumsum job = {tshi_tape_grad(node), NULL, p->outer, p->n, p->inner, 0, 1};
    tshi_dest dest;
    tshi_block *scratch;
    if (!tshi_tape_dest(node, 0, &dest)) return;
    job.y = tshi_op_dense_dest(node->in[0], &dest, &scratch); /* dest.data, or dense scratch */
    if (!job.y) return;
    tshi_cumsum_run(node->out->ctx, &job);
    tshi_op_accumulate(node->in[0], &dest, scratch);
}

static const tshi_op tshi_cumsum_op = {"tsh_cumsum",         "x",       tshi_rule_cumulate,
                                       tshi_cumsum_backward, TSHI_NONE, 0};

TSH_API tsh_tensor *tsh_cumsum(tsh_tensor *x, int dim) {
    tsh_ctx *ctx = tshi_tensor_check("tsh_cumsum", "x", &x, 1);
    const int integers = ctx && !tshi_dtypes[x->dtype].floating;
    tsh_shape shape = tsh_shape_of(x);
    tshi_cumsum job = TSHI_ZERO;
    tshi_cumsum_params params;
    tshi_reduction r;
    tshi_block *scratch, *unrounded = NULL;
    tsh_tensor *out;
    if (!ctx || (!integers && !tshi_tensor_check_floating("tsh_cumsum", "x", &x, 1))) return NULL;
    if (!tshi_reduce_plan(&tshi_cumsum_op, x, dim == TSH_ALL ? TSH_MAX_DIMS : dim, 1, &r))
        return NULL;
    out = tshi_tensor_out(ctx, "tsh_cumsum", integers ? TSH_I64 : x->dtype, &shape, &r.layout);
    if (!out) return NULL;
    job.integers = integers;
    job.outer = params.outer = r.outer;
    job.n = params.n = r.params.n;
    job.inner = params.inner = r.inner;
    job.y = integers ? tshi_tensor_at(out) : tshi_kernel_output(out, &unrounded);
    job.x = tshi_kernel_packed_as(x, integers ? TSH_I64 : TSH_REAL, &scratch);
    if (ctx->error.code == TSH_OK) tshi_cumsum_run(ctx, &job);
    tshi_mem_release(ctx, scratch);
    tshi_kernel_output_done(out, unrounded); /* rounds to out's dtype */
    if (!integers)
        tshi_op_record(&tshi_cumsum_op, out, &x, 1, TSHI_NONE, &params, sizeof params, NULL);
    return ctx->error.code == TSH_OK ? out : NULL;
}

/* -- prod: y = x_0 x_1 ...;   dx_i = dy times the product of all other x -----------
 * Products are computed in double. The product of the others is that of the elements before times
 * that of the elements after, so zeros need no special case. */

TSHI_INLINE void tshi_cumsum_prod_body(int64_t rows, const tshi_operand *operand,
                                       const tshi_reduce_params *p) {
    tsh_real *y = (tsh_real *)operand[0].data;
    const tsh_real *x = (const tsh_real *)operand[1].data;
    const int64_t n = p->n;
    for (; rows > 0; rows--, x += n) {
        double lane[8] = {1, 1, 1, 1, 1, 1, 1, 1}; /* lane[j]: product of the x_i, i mod 8 = j */
        int64_t i, j;
        for (i = 0; i + 8 <= n; i += 8)
            for (j = 0; j < 8; j++) lane[j] *= (double)x[i + j];
        for (j = 0; i < n; i++, j++) lane[j] *= (double)x[i];
        for (j = 0; j < 4; j++) lane[j] *= lane[j + 4];
        *y++ = TSHI_R((lane[0] * lane[2]) * (lane[1] * lane[3]));
    }
}
TSHI_KERNEL(tshi_cumsum_prod, tshi_reduce_params);

/* Backward of tsh_prod for some rows. Operands: dx and x, dense rows of n values; dy, one value for
 * each row; scratch for n doubles: for each element, the product of those before it. */
static void tshi_cumsum_prod_grad(int64_t rows, const tshi_operand *operand, const void *params) {
    const int64_t n = ((const tshi_reduce_params *)params)->n;
    tsh_real *dx = (tsh_real *)operand[0].data;
    const tsh_real *x = (const tsh_real *)operand[1].data;
    const tsh_real *dy = (const tsh_real *)operand[2].data;
    double *before = (double *)operand[3].data;
    for (; rows > 0; rows--, x += n, dx += n, dy++) {
        double product = 1;
        int64_t i;
        for (i = 0; i < n; i++) {
            before[i] = product;
            product *= (double)x[i];
        }
        for (product = (double)*dy, i = n - 1; i >= 0; i--) {
            dx[i] = TSHI_R(product * before[i]);
            product *= (double)x[i];
        }
    }
}

static void tshi_cumsum_prod_backward(tshi_node *node) {
    const tshi_reduce_params *params = (const tshi_reduce_params *)node->params;
    tsh_ctx *ctx = node->out->ctx;
    tsh_tensor dx = tshi_reduce_rows(node->in[0], params->axis), x = dx;   /* with the axis last */
    const int64_t n = params->n, count = n ? tsh_local_numel(&dx) / n : 0; /* count: rows */
    tshi_rows rows = tshi_kernel_rows_job(tshi_cumsum_prod_grad, count, params);
    tshi_block *scratch[2], *before;
    tshi_dest dest;
    if (!tshi_tape_dest(node, 0, &dest)) return;
    dest.stride = dx.stride;  /* strides with the axis last */
    x.block = node->saved[0]; /* the values of the input */
    before = tshi_mem_alloc(ctx, TSH_MEM_STEP,
                            (size_t)(tshi_kernel_parts(ctx, count, n) * n) * sizeof(double));
    rows.x[0] = tshi_kernel_reals(tshi_op_dense_dest(&dx, &dest, &scratch[0]), n);
    rows.x[1] = tshi_kernel_reals(tshi_kernel_packed_reals(&x, &scratch[1]), n);
    rows.x[2] = tshi_kernel_reals(tshi_tape_grad(node), 1);
    rows.x[3] = tshi_kernel_operand(before ? tshi_mem_data(before) : NULL, 0, TSH_F64);
    rows.own[3] = n;
    if (ctx->error.code == TSH_OK) tshi_kernel_run_rows(ctx, &rows, n);
    tshi_op_accumulate(&dx, &dest, scratch[0]); /* does nothing if the kernel wrote to dest */
    tshi_mem_release(ctx, scratch[1]);
    tshi_mem_release(ctx, before);
}

static const tshi_op tshi_cumsum_prod_op = {
    "tsh_prod", "x", tshi_rule_whole, tshi_cumsum_prod_backward, TSHI_X, 0};

TSH_API tsh_tensor *tsh_prod(tsh_tensor *x, int dim, int keepdim) {
    tsh_ctx *ctx = tshi_tensor_check_floating("tsh_prod", "x", &x, 1);
    tshi_reduction r;
    tshi_block *scratch, *unrounded;
    tsh_tensor *out, xs;
    tshi_rows rows;
    tsh_real *y;
    int64_t i;
    if (!ctx || !tshi_reduce_plan(&tshi_cumsum_prod_op, x, dim, keepdim, &r)) return NULL;
    out = tshi_tensor_out(ctx, "tsh_prod", x->dtype, &r.shape, &r.layout);
    /* where results go as tsh_real: to out's own memory, or to *unrounded until they are rounded */
    y = out ? tshi_kernel_output(out, &unrounded) : NULL;
    if (!y) return NULL;
    xs = tshi_reduce_rows(x, r.params.axis); /* x with the axis last */
    rows = tshi_reduce_job(tshi_cumsum_prod, x, &r.params);
    rows.x[0] = tshi_kernel_reals(y, 1);
    rows.x[1] = tshi_kernel_reals(tshi_kernel_packed_reals(&xs, &scratch), r.params.n);
    for (i = 0; i < tsh_local_numel(out) && !r.params.n; i++) y[i] = 1; /* empty product */
    if (ctx->error.code == TSH_OK) tshi_kernel_run_rows(ctx, &rows, r.params.n);
    tshi_mem_release(ctx, scratch);
    tshi_kernel_output_done(out, unrounded); /* rounds to out's dtype */
    tshi_op_record(&tshi_cumsum_prod_op, out, &x, 1, TSHI_NONE, &r.params, sizeof r.params, NULL);
    return ctx->error.code == TSH_OK ? out : NULL;
}
