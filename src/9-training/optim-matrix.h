/* ========================================================================== */
/* >>optim-matrix                              MARK: - optim-matrix (private) */
/* Adafactor and Muon, whose updates need whole matrices.                     */
/* Needs: >>op-matmul >>optim-update.                                         */
/* ========================================================================== */

/* -- Adafactor (Shazeer & Stern 2018), as torch.optim.Adafactor -------------
 * The last two dimensions of a tensor are matrices. In place of the moving average v of g^2 that
 * Adam keeps for each element (i, j), v(i, j) = r(i) c(j) / mean of r: r and c are moving averages
 * of the means of g^2 over each row and each column. */

/* Adafactor's update of `batch` matrices of shape (rows, columns); a vector is one row. */
typedef struct tshi_factored {
    /* x: parameter; g: gradient, then update; r, c: moving averages of the rows' and columns' means
     * of g^2; of a vector, r has those of its elements, and c is NULL */
    tsh_real *x, *g, *r, *c;
    int64_t batch, rows, columns;
    /* clip: factor by which g is clipped; weight: that of the new means in r and c; eps: the update
     * divides by sqrt(v), but at least by eps; in the end, x = keep x - by g */
    double clip, weight, eps, keep, by;
    double *mean; /* shape (batch): mean of r in each matrix */
    double *sums; /* shape (batch rows): sums of squares of the update's rows */
} tshi_factored;

/* Runs on one thread: for the rows [from, to), multiplies the gradient g by clip and updates r, the
 * moving average of the means of g^2. */
static void tshi_optim_factor_rows(void *job, int thread, int64_t from, int64_t to) {
    const tshi_factored *f = (const tshi_factored *)job;
    (void)thread;
    for (int64_t row = from; row < to; row++) {
        tsh_real *g = f->g + row * f->columns;
        double sum = 0;
        for (int64_t j = 0; j < f->columns; j++) {
            g[j] *= TSHI_R(f->clip);
            sum += (double)g[j] * (double)g[j];
        }
        if (f->c)
            f->r[row] += TSHI_R(f->weight * (sum / (double)f->columns - (double)f->r[row]));
        else
            for (int64_t j = 0; j < f->columns; j++)
                f->r[j] += TSHI_R(f->weight) * (g[j] * g[j] - f->r[j]);
    }
}

/* Runs on one thread: for the columns [from, to), counted over all matrices, updates c, the moving
 * average of the means of g^2. */
static void tshi_optim_factor_columns(void *job, int thread, int64_t from, int64_t to) {
    const tshi_factored *f = (const tshi_factored *)job;
    double sum[TSHI_BLOCK];
    (void)thread;
    while (from < to) { /* up to TSHI_BLOCK columns of one matrix at a time */
        const int64_t b = from / f->columns, j = from % f->columns;
        const int n = (int)tshi_base_min(TSHI_BLOCK, tshi_base_min(to - from, f->columns - j));
        const tsh_real *g = f->g + b * f->rows * f->columns + j;
        for (int k = 0; k < n; k++) sum[k] = 0;
        for (int64_t i = 0; i < f->rows; i++, g += f->columns)
            for (int k = 0; k < n; k++) sum[k] += (double)g[k] * (double)g[k];
        for (int k = 0; k < n; k++)
            f->c[from + k] += TSHI_R(f->weight *
                                     (sum[k] / (double)f->rows - (double)f->c[from + k]));
        from += n;
    }
}

/* Runs on one thread: for the rows [from, to), replaces g by the update g / max(sqrt(v), eps), and
 * sets `sums` to the sums of its squares. */
static void tshi_optim_factor_update(void *job, int thread, int64_t from, int64_t to) {
    const tshi_factored *f = (const tshi_factored *)job;
    const tsh_real least = TSHI_R(f->eps * f->eps);
    (void)thread;
    for (int64_t row = from; row < to; row++) {
        const int64_t b = row / f->rows;
        tsh_real *g = f->g + row * f->columns;
        const tsh_real *r = f->r, *c = f->c ? f->c + b * f->columns : NULL;
        const tsh_real own = c ? TSHI_R((double)r[row] / f->mean[b]) : 0;
        double sum = 0;
        for (int64_t j = 0; j < f->columns; j++) {
            const tsh_real v = c ? own * c[j] : r[j];
            g[j] /= tshi_math_sqrt(v < least ? least : v);
            sum += (double)g[j] * (double)g[j];
        }
        f->sums[row] = sum;
    }
}

/* Runs on one thread: applies the update g to the parameter, x = keep x - by g, in the rows [from,
 * to). */
static void tshi_optim_factor_apply(void *job, int thread, int64_t from, int64_t to) {
    const tshi_factored *f = (const tshi_factored *)job;
    const tsh_real keep = TSHI_R(f->keep), by = TSHI_R(f->by);
    (void)thread;
    for (int64_t i = from * f->columns; i < to * f->columns; i++)
        f->x[i] = f->x[i] * keep - by * f->g[i];
}

/* Sets mean[b] to the mean of r over the rows of matrix b, but at least to eps. */
static void tshi_optim_factor_means(const tshi_factored *f) {
    for (int64_t b = 0; b < f->batch; b++) {
        double sum = 0;
        for (int64_t i = 0; i < f->rows; i++) sum += (double)f->r[b * f->rows + i];
        f->mean[b] = fmax(sum / (double)f->rows, f->eps);
    }
}

static void tshi_optim_update_adafactor(tshi_turn *turn) {
    const tsh_optim_desc *d = turn->desc;
    const tsh_tensor *t = turn->t;
    const int64_t n = tsh_numel(t), columns = t->ndim ? t->dim[t->ndim - 1] : 1;
    const int64_t all = n ? n / columns : 0; /* number of rows of all matrices */
    const double size = sqrt((double)n), step = (double)turn->step;
    double rate, norm = 0;
    tshi_factored f;
    tshi_block *block = tshi_mem_alloc(t->ctx, TSH_MEM_STEP,
                                       (size_t)(2 * all + 1) * sizeof(double));
    if (!block) return;
    memset(&f, 0, sizeof f);
    f.x = (tsh_real *)turn->x[TSHI_OPTIM_X].data;
    f.g = (tsh_real *)turn->x[TSHI_OPTIM_GRAD].data;
    f.r = (tsh_real *)turn->x[TSHI_OPTIM_FIRST].data;
    f.c = (tsh_real *)turn->x[TSHI_OPTIM_SECOND].data;
    f.columns = columns;
    f.rows = t->ndim > 1 ? t->dim[t->ndim - 2] : 1;
    f.batch = n ? all / f.rows : 0;
    f.clip = turn->params.clip;
    f.weight = pow(step, d->beta2_decay);
    f.eps = d->eps;
    f.keep = 1 - turn->lr * turn->decay;
    f.sums = (double *)tshi_mem_data(block);
    f.mean = f.sums + all;
    if (n) {
        const int parts = tshi_kernel_parts(t->ctx, all, columns);
        const tshi_operand x = turn->x[TSHI_OPTIM_X];
        rate = fmax(d->eps2, sqrt(tshi_optim_sum_squares(t->ctx, x, n)) / size);
        tshi_team_run(t->ctx, parts, all, 1, tshi_optim_factor_rows, &f);
        if (f.c)
            tshi_team_run(t->ctx, tshi_kernel_parts(t->ctx, f.batch * columns, f.rows),
                          f.batch * columns, TSHI_BLOCK, tshi_optim_factor_columns, &f);
        if (f.c) tshi_optim_factor_means(&f);
        tshi_team_run(t->ctx, parts, all, 1, tshi_optim_factor_update, &f);
        for (int64_t i = 0; i < all; i++) norm += f.sums[i];
        f.by = rate * fmin(turn->lr, 1 / sqrt(step)) / fmax(1, sqrt(norm) / (size * d->d));
        tshi_team_run(t->ctx, parts, all, 1, tshi_optim_factor_apply, &f);
    }
    tshi_mem_release(t->ctx, block);
}

/* -- Muon (Jordan et al. 2024), as torch.optim.Muon -------------------------- */

/* The argument of the passes over the elements of a matrix that Muon updates. x, g, m: parameter,
 * gradient, momentum; u: the update. */
typedef struct tshi_muon {
    tsh_real *x, *g, *m, *u;
    tsh_real clip, momentum, keep, by;
    int nesterov;
    double norm; /* what u is divided by */
} tshi_muon;

/* Returns a + w (b - a), as torch.lerp computes it. */
TSHI_INLINE tsh_real tshi_optim_lerp(tsh_real a, tsh_real b, tsh_real w) {
    return w < TSHI_R(0.5) ? a + w * (b - a) : b - (b - a) * (1 - w);
}

/* Returns x rounded to bf16; a double by way of float, as PyTorch rounds it. */
TSHI_INLINE tsh_real tshi_optim_bf16(tsh_real x) {
    return tshi_dtype_from_bf16(tshi_dtype_to_bf16(TSHI_R((float)x)));
}

/* Runs on one thread: for the elements [from, to), updates the momentum m and sets the update u,
 * rounded to bf16, to m or, with Nesterov momentum, to lerp(g, m, momentum). */
static void tshi_optim_muon_begin(void *job, int thread, int64_t from, int64_t to) {
    const tshi_muon *p = (const tshi_muon *)job;
    (void)thread;
    for (int64_t i = from; i < to; i++) {
        const tsh_real g = p->g[i] * p->clip;
        const tsh_real m = p->m[i] = tshi_optim_lerp(p->m[i], g, 1 - p->momentum);
        p->u[i] = tshi_optim_bf16(p->nesterov ? tshi_optim_lerp(g, m, p->momentum) : m);
    }
}

/* Runs on one thread: u = u / norm, rounded to bf16, of the elements [from, to). */
static void tshi_optim_muon_scale(void *job, int thread, int64_t from, int64_t to) {
    const tshi_muon *p = (const tshi_muon *)job;
    const tsh_real norm = TSHI_R(p->norm);
    (void)thread;
    for (int64_t i = from; i < to; i++) p->u[i] = tshi_optim_bf16(p->u[i] / norm);
}

/* Runs on one thread: x = keep x - by u, of the elements [from, to). */
static void tshi_optim_muon_apply(void *job, int thread, int64_t from, int64_t to) {
    const tshi_muon *p = (const tshi_muon *)job;
    (void)thread;
    for (int64_t i = from; i < to; i++) p->x[i] = p->x[i] * p->keep - p->by * p->u[i];
}

/* Computes c = alpha a b + beta d, rounded to bf16; shapes: a (m, k), b (k, n), c and d (m, n). c
 * has no gaps; it is row-major or column-major. */
static void tshi_optim_muon_product(tsh_ctx *ctx, int64_t m, int64_t n, int64_t k, double alpha,
                                    tshi_matrix a, tshi_matrix b, double beta, tshi_matrix d,
                                    tshi_matrix c) {
    tshi_muon p;
    memset(&p, 0, sizeof p);
    p.u = (tsh_real *)c.data;
    p.norm = 1; /* u / 1: the pass only rounds u */
    tshi_matmul_run(ctx, m, n, k, TSHI_R(alpha), a, b, TSHI_R(beta), d, c);
    tshi_team_run(ctx, tshi_kernel_parts(ctx, m, n), m * n, TSHI_BLOCK, tshi_optim_muon_scale, &p);
}

/* Makes the singular values of the matrix u (rows, columns) about 1, by .ns_steps Newton-Schulz
 * steps u = a u + (b u u^T + c (u u^T)^2) u; each product is rounded to bf16, as torch computes it.
 * If u has more rows than columns, its transpose is iterated. scratch: space for another u and for
 * two square matrices of the shorter side. Returns u or scratch, where the result is. */
static tsh_real *tshi_optim_muon_iterate(tsh_ctx *ctx, const tsh_optim_desc *d, int64_t rows,
                                         int64_t columns, tsh_real *u, tsh_real *scratch) {
    const double *const abc = d->ns_coefficients;
    const int tall = rows > columns;
    const int64_t m = tall ? columns : rows, n = tall ? rows : columns;
    tsh_real *next = scratch, *swapped;
    const tshi_matrix gram = tshi_gemm_matrix(scratch + rows * columns, m, 1);
    const tshi_matrix sum = tshi_gemm_matrix(scratch + rows * columns + m * m, m, 1);
    for (int step = 0; step < d->ns_steps && ctx->error.code == TSH_OK; step++) {
        const tshi_matrix x = tshi_gemm_matrix(u, tall ? 1 : columns, tall ? columns : 1);
        tshi_matrix y = x;
        y.data = next;
        tshi_optim_muon_product(ctx, m, m, n, 1, x, tshi_gemm_transposed(x), 0, gram, gram);
        tshi_optim_muon_product(ctx, m, m, m, abc[2], gram, gram, abc[1], gram, sum);
        tshi_optim_muon_product(ctx, m, n, m, 1, sum, x, abc[0], x, y);
        swapped = u;
        u = next;
        next = swapped;
    }
    return u;
}

/* Returns the factor of the learning rate for a parameter of this shape. */
static double tshi_optim_muon_rate(tsh_adjust_lr adjust, double rows, double columns) {
    return adjust == TSH_ADJUST_ORIGINAL          ? sqrt(fmax(1, rows / columns))
           : adjust == TSH_ADJUST_MATCH_RMS_ADAMW ? 0.2 * sqrt(fmax(rows, columns))
                                                  : 1;
}

static void tshi_optim_update_muon(tshi_turn *turn) {
    const tsh_optim_desc *d = turn->desc;
    tsh_ctx *ctx = turn->t->ctx;
    const int64_t rows = turn->t->dim[0], columns = turn->t->dim[1], n = rows * columns;
    const int64_t side = rows < columns ? rows : columns;
    const int parts = tshi_kernel_parts(ctx, rows, columns);
    tshi_block *block;
    tshi_muon p;
    if (!n) return;
    block = tshi_mem_alloc(ctx, TSH_MEM_STEP, tshi_dtype_reals(2 * n + 2 * side * side));
    if (!block) return;
    memset(&p, 0, sizeof p);
    p.x = (tsh_real *)turn->x[TSHI_OPTIM_X].data;
    p.g = (tsh_real *)turn->x[TSHI_OPTIM_GRAD].data;
    p.m = (tsh_real *)turn->x[TSHI_OPTIM_FIRST].data;
    p.u = (tsh_real *)tshi_mem_data(block);
    p.clip = TSHI_R(turn->params.clip);
    p.momentum = TSHI_R(d->momentum);
    p.nesterov = d->nesterov;
    tshi_team_run(ctx, parts, n, TSHI_BLOCK, tshi_optim_muon_begin, &p);
    p.norm = sqrt(tshi_optim_sum_squares(ctx, tshi_kernel_operand(p.u, 1, TSH_REAL), n));
    p.norm = fmax((double)tshi_optim_bf16(TSHI_R(p.norm)), (double)tshi_optim_bf16(TSHI_R(d->eps)));
    tshi_team_run(ctx, parts, n, TSHI_BLOCK, tshi_optim_muon_scale, &p);
    p.u = tshi_optim_muon_iterate(ctx, d, rows, columns, p.u, p.u + n);
    p.keep = TSHI_R(1 - turn->lr * turn->decay);
    p.by = TSHI_R(turn->lr * tshi_optim_muon_rate(d->adjust_lr_fn, (double)rows, (double)columns));
    if (ctx->error.code == TSH_OK)
        tshi_team_run(ctx, parts, n, TSHI_BLOCK, tshi_optim_muon_apply, &p);
    tshi_mem_release(ctx, block);
}
