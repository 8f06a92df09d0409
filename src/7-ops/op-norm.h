/* ========================================================================== */
/* >>op-norm                                        MARK: - op-norm (private) */
/* Layer norm (Ba et al. 2016), RMS norm (Zhang & Sennrich 2019).             */
/* Needs: >>op-map.                                                           */
/* ========================================================================== */

/* Normalises each row of d features (the last dimension). With xh = (x - mean) rstd and h = dy w:
 *
 *     rstd = 1 / sqrt(mean((x - mean)^2) + eps),   y = w xh + b
 *     dx = (h - mean(h) - xh mean(h xh)) rstd,     dw += dy xh,   db += dy
 *
 * RMS norm (about_zero 1) is the same with 0 for mean and mean(h), and without b. Forward stores
 * mean and rstd of each row for backward: stats (rows, 2). A sum over a row is kept as TSHI_BLOCK
 * partial sums, `lane`, which tshi_kernel_fold adds up at the end of the row.
 *
 * Where the features are sharded, this rank has only a part of each row, and a kernel runs twice.
 * The first pass (TSHI_NORM_SUMS) computes the means over this rank's features, an all-reduce turns
 * them into the means over all, and the second pass (TSHI_NORM_GIVEN) normalises with them. */
typedef enum tshi_norm_pass {
    TSHI_NORM_WHOLE, /* computes the means and normalises, in one pass */
    TSHI_NORM_SUMS,  /* computes only the means of each row */
    TSHI_NORM_GIVEN  /* normalises with means that are given */
} tshi_norm_pass;

/* For TSHI_BLOCK values x, adds v = x - c to lane[0 ...] and v^2 to lane[TSHI_BLOCK ...]. */
TSHI_INLINE void tshi_norm_moments_step(tsh_real *lane, const tsh_real *x, tsh_real c) {
    int i;
    for (i = 0; i < TSHI_BLOCK; i++) {
        const tsh_real v = x[i] - c;
        lane[i] += v;
        lane[i + TSHI_BLOCK] += v * v;
    }
}

/* Writes the mean of a row of n values (0 if centred is 0) to stats[0], and the mean square of
 * their distance from stats[0] to stats[1], in one pass about c, the mean of the first block (Chan,
 * Golub & LeVeque 1983). The rounding error grows by the factor 1 + (mean - c)^2 / variance; if
 * that is above 17, a second pass takes the mean itself for c. */
TSHI_INLINE void tshi_norm_moments(const tsh_real *x, int64_t n, int centred, tsh_real *stats) {
    const int64_t first = tshi_base_min(n, TSHI_BLOCK); /* length of the first block */
    tsh_real lane[2 * TSHI_BLOCK], pad[TSHI_BLOCK], c = 0, shift, square;
    int64_t e;
    int pass;
    tshi_kernel_pad(x, first, 0, pad);
    if (centred) c = tshi_kernel_fold(pad) / TSHI_R(first); /* if not centred, c stays 0 */
    for (pass = 0; pass < 2; pass++) {
        memset(lane, 0, sizeof lane);
        for (e = 0; e + TSHI_BLOCK <= n; e += TSHI_BLOCK) tshi_norm_moments_step(lane, x + e, c);
        if (e < n) {
            tshi_kernel_pad(x + e, n - e, c, pad); /* padding with c adds 0 to both sums */
            tshi_norm_moments_step(lane, pad, c);
        }
        shift = centred ? tshi_kernel_fold(lane) / TSHI_R(n) : 0; /* mean - c */
        square = tshi_kernel_fold(lane + TSHI_BLOCK) / TSHI_R(n) - shift * shift;
        stats[0] = c += shift;
        stats[1] = square < 0 ? 0 : square;         /* below 0 only by rounding */
        if (!(shift * shift > 16 * square)) return; /* accurate enough: no second pass */
    }
}

/* Normalises one row of n features: y = (x - mean) rstd w + b; b may be NULL. stats: mean, rstd. */
TSHI_INLINE void tshi_norm_row(tsh_real *y, const tsh_real *x, const tsh_real *w, const tsh_real *b,
                               const tsh_real *stats, int64_t n) {
    const tsh_real mean = stats[0], rstd = stats[1], *xs, *ws, *bs;
    tsh_real pad[3][TSHI_BLOCK], out[TSHI_BLOCK]; /* pad: the short last block of x, w, b */
    int64_t e;
    int i;
    for (e = 0; e < n; e += TSHI_BLOCK) {
        xs = tshi_kernel_load_block(x, 1, e, n, pad[0]);
        ws = tshi_kernel_load_block(w, 1, e, n, pad[1]);
        bs = b ? tshi_kernel_load_block(b, 1, e, n, pad[2]) : NULL;
        if (b)
            TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++)
                out[i] = (xs[i] - mean) * rstd * ws[i] + bs[i];
        else
            TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) out[i] = (xs[i] - mean) * rstd * ws[i];
        tshi_kernel_store_block(y, 1, e, n, out, 0);
    }
}

/* Options of the norm kernels, and the params of a node. */
typedef struct tshi_norm {
    int64_t d, all; /* features on this rank, and on all ranks of tp together */
    double eps;     /* added to the variance */
    int about_zero; /* 1: RMS norm, which does not subtract the mean */
    int plus_one;   /* 1: w + 1 in place of w */
    int cut;        /* 1: the features are sharded over several ranks */
    int add;        /* backward: 1: dx += ..., 0: dx = ... */
    tshi_norm_pass pass;
} tshi_norm;

/* The operands of the forward kernel, which computes y (n, d) and stats (n, 2), the mean and rstd
 * of each row, from x (n, d), w (d) and b (d) or NULL. */
enum { TSHI_NORM_Y, TSHI_NORM_X, TSHI_NORM_W, TSHI_NORM_B, TSHI_NORM_STATS, TSHI_NORM_OPERANDS };
TSHI_INLINE void tshi_norm_rows_body(int64_t n, const tshi_operand *operand, const tshi_norm *p) {
    const tshi_operand *from = &operand[TSHI_NORM_X], *to = &operand[TSHI_NORM_Y];
    const tsh_real *w = (const tsh_real *)operand[TSHI_NORM_W].data; /* shape (d) */
    const tsh_real *b = (const tsh_real *)operand[TSHI_NORM_B].data; /* shape (d) or NULL */
    tsh_real *y = (tsh_real *)to->data, *stats = (tsh_real *)operand[TSHI_NORM_STATS].data;
    const tsh_real *x = (const tsh_real *)from->data; /* shape (n, d) */
    int64_t r;
    for (r = 0; r < n; r++, x += from->step, y += to->step, stats += 2) {
        if (p->pass != TSHI_NORM_GIVEN) tshi_norm_moments(x, p->d, !p->about_zero, stats);
        if (p->pass == TSHI_NORM_WHOLE)
            stats[1] = TSHI_R(1) / tshi_math_sqrt(stats[1] + TSHI_R(p->eps));
        if (p->pass != TSHI_NORM_SUMS) tshi_norm_row(y, x, w, b, stats, p->d);
    }
}
TSHI_KERNEL(tshi_norm_rows, tshi_norm);

/* Turns stats (rows, 2) of this rank's features, the mean and the mean square of distances from it,
 * into those of all features, the mean and rstd. With sums over ranks: mean = sum(d own mean) /
 * all; square = sum(d (own square + (own mean - mean)^2)) / all (Chan, Golub & LeVeque 1983). */
static void tshi_norm_combine(tsh_ctx *ctx, const tshi_norm *p, int64_t rows, tsh_real *stats) {
    const tsh_real share = TSHI_R(p->d) / TSHI_R(p->all);
    tshi_block *block = tshi_mem_alloc(ctx, TSH_MEM_STEP, tshi_dtype_reals(rows));
    tsh_real *sum = block ? (tsh_real *)tshi_mem_data(block) : NULL, shift;
    int64_t r;
    if (!block) return;
    if (!p->about_zero) {
        for (r = 0; r < rows; r++) sum[r] = stats[2 * r] * share;
        (void)tshi_error_comm(ctx, tsh_allreduce(&ctx->tp, sum, rows, TSH_REAL, TSH_SUM),
                              "tsh_layer_norm");
        for (r = 0; r < rows; r++) {
            shift = stats[2 * r] - sum[r];
            stats[2 * r + 1] += shift * shift;
            stats[2 * r] = sum[r];
        }
    }
    for (r = 0; r < rows; r++) sum[r] = stats[2 * r + 1] * share;
    (void)tshi_error_comm(ctx, tsh_allreduce(&ctx->tp, sum, rows, TSH_REAL, TSH_SUM),
                          p->about_zero ? "tsh_rms_norm" : "tsh_layer_norm");
    for (r = 0; r < rows; r++)
        stats[2 * r + 1] = TSHI_R(1) / tshi_math_sqrt(sum[r] + TSHI_R(p->eps));
    tshi_mem_release(ctx, block);
}

/* Returns the factors of the normalised features, shape (d): w itself; w + 1 if p->plus_one is 1; 1
 * if w is NULL, as the norm then has no weight. Factors that are not w itself lie in *scratch,
 * which may hold a copy of w already. NULL: no memory. */
static tsh_real *tshi_norm_weight(tsh_ctx *ctx, const tshi_norm *p, tsh_real *w,
                                  tshi_block **scratch) {
    tsh_real *factor = *scratch ? w : NULL;
    int64_t i;
    if (w && !p->plus_one) return w;
    if (!factor) *scratch = tshi_mem_alloc(ctx, TSH_MEM_STEP, tshi_dtype_reals(p->d));
    if (!factor && *scratch) factor = (tsh_real *)tshi_mem_data(*scratch);
    for (i = 0; factor && i < p->d; i++) factor[i] = w ? w[i] + 1 : 1;
    return factor;
}

/* With h = w dy and xh = (x - mean) rstd: adds TSHI_BLOCK values of h to lane[0 ...], and of h xh
 * to lane[TSHI_BLOCK ...]. */
TSHI_INLINE void tshi_norm_step(tsh_real *lane, const tsh_real *x, const tsh_real *w,
                                const tsh_real *dy, const tsh_real *stats) {
    const tsh_real mean = stats[0], rstd = stats[1]; /* mean and rstd of the row */
    int i;
    TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) {
        const tsh_real xh = (x[i] - mean) * rstd, h = dy[i] * w[i];
        lane[i] += h;
        lane[i + TSHI_BLOCK] += h * xh;
    }
}

/* Adds one row of n features to the gradients: dw += dy xh, with xh = (x - mean) rstd; db += dy. */
TSHI_INLINE void tshi_norm_step_weights(const tsh_real *x, const tsh_real *dy,
                                        const tsh_real *stats, int64_t n,
                                        tsh_real *TSHI_RESTRICT dw, tsh_real *TSHI_RESTRICT db) {
    const tsh_real mean = stats[0], rstd = stats[1];
    int64_t i;
    TSHI_EACH for (i = 0; i < n; i++) {
        dw[i] += dy[i] * ((x[i] - mean) * rstd);
        db[i] += dy[i];
    }
}

/* Computes dx of one row of n features: (h - mean(h) - xh mean(h xh)) rstd, where h = w dy and
 * xh = (x - mean) rstd. add 1: adds this to dx, 0: overwrites dx. means: mean(h), mean(h xh). */
TSHI_INLINE void tshi_norm_grad_row(tsh_real *dx, const tsh_real *x, const tsh_real *w,
                                    const tsh_real *dy, const tsh_real *stats,
                                    const tsh_real *means, int64_t n, int add) {
    const tsh_real mean = stats[0], rstd = stats[1], a = means[0], b = means[1], *xs, *ws, *gs;
    tsh_real pad[3][TSHI_BLOCK], out[TSHI_BLOCK]; /* pad: the short last block of x, w, dy */
    int64_t e;
    int i;
    for (e = 0; e < n; e += TSHI_BLOCK) {
        xs = tshi_kernel_load_block(x, 1, e, n, pad[0]);
        ws = tshi_kernel_load_block(w, 1, e, n, pad[1]);
        gs = tshi_kernel_load_block(dy, 1, e, n, pad[2]);
        TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++)
            out[i] = (gs[i] * ws[i] - a - (xs[i] - mean) * rstd * b) * rstd;
        tshi_kernel_store_block(dx, 1, e, n, out, add);
    }
}

/* Writes mean(h) and mean(h xh) of one row to `means`, where h = w dy and xh = (x - mean) rstd. If
 * the features are sharded, writes this rank's part of each mean: the sum over its features,
 * divided by the number of all features. */
TSHI_INLINE void tshi_norm_means(const tsh_real *x, const tsh_real *w, const tsh_real *dy,
                                 const tsh_real *stats, const tshi_norm *p, tsh_real *means) {
    tsh_real lane[2 * TSHI_BLOCK], pad[3][TSHI_BLOCK];
    const int64_t d = p->d;
    int64_t e;
    memset(lane, 0, sizeof lane);
    for (e = 0; e + TSHI_BLOCK <= d; e += TSHI_BLOCK)
        tshi_norm_step(lane, x + e, w + e, dy + e, stats);
    if (e < d) { /* the short last block */
        tshi_kernel_pad(x + e, d - e, stats[0], pad[0]);
        tshi_kernel_pad(w + e, d - e, 0, pad[1]);
        tshi_kernel_pad(dy + e, d - e, 0, pad[2]);
        tshi_norm_step(lane, pad[0], pad[1], pad[2], stats);
    }
    means[0] = p->about_zero ? 0 : tshi_kernel_fold(lane) / TSHI_R(p->all);
    means[1] = tshi_kernel_fold(lane + TSHI_BLOCK) / TSHI_R(p->all);
}

/* The operands of the backward kernel of n rows: X, W and STATS as in forward, DX in the place of
 * Y, DY in the place of B, then DW and DB, and the MEANS of h and of h xh, used if the features are
 * sharded. The kernel skips dx if DX is NULL, and dw and db if DW is NULL. */
enum { TSHI_NORM_DX = TSHI_NORM_Y, TSHI_NORM_DY = TSHI_NORM_B, TSHI_NORM_DW = TSHI_NORM_OPERANDS };
enum { TSHI_NORM_DB = TSHI_NORM_DW + 1, TSHI_NORM_MEANS, TSHI_NORM_GRAD_OPERANDS };
TSHI_INLINE void tshi_norm_grad_body(int64_t n, const tshi_operand *operand, const tshi_norm *p) {
    tsh_real *dx = (tsh_real *)operand[TSHI_NORM_DX].data;                   /* shape (n, d) */
    tsh_real *dw = (tsh_real *)operand[TSHI_NORM_DW].data;                   /* shape (d) */
    tsh_real *db = (tsh_real *)operand[TSHI_NORM_DB].data;                   /* shape (d) */
    tsh_real *given = (tsh_real *)operand[TSHI_NORM_MEANS].data;             /* shape (n, 2) */
    const tsh_real *x = (const tsh_real *)operand[TSHI_NORM_X].data;         /* shape (n, d) */
    const tsh_real *w = (const tsh_real *)operand[TSHI_NORM_W].data;         /* shape (d) */
    const tsh_real *dy = (const tsh_real *)operand[TSHI_NORM_DY].data;       /* shape (n, d) */
    const tsh_real *stats = (const tsh_real *)operand[TSHI_NORM_STATS].data; /* shape (n, 2) */
    tsh_real own[2] = {0, 0}; /* mean(h) and mean(h xh) of a row, if features are not sharded */
    int64_t r;
    for (r = 0; r < n; r++) {
        tsh_real *means = p->pass == TSHI_NORM_WHOLE ? own : given + 2 * r;
        if (dw && p->pass != TSHI_NORM_SUMS) tshi_norm_step_weights(x, dy, stats, p->d, dw, db);
        if (dx && p->pass != TSHI_NORM_GIVEN) tshi_norm_means(x, w, dy, stats, p, means);
        if (dx && p->pass != TSHI_NORM_SUMS)
            tshi_norm_grad_row(dx, x, w, dy, stats, means, p->d, p->add);
        if (dx) dx += operand[TSHI_NORM_DX].step;
        x += operand[TSHI_NORM_X].step;
        dy += operand[TSHI_NORM_DY].step;
        stats += 2;
    }
}
TSHI_KERNEL(tshi_norm_grad, tshi_norm);

/* A tshi_team_fn: computes columns [from, to) of dw and db. Adds the rows in order. */
static void tshi_norm_columns(void *job, int piece, int64_t from, int64_t to) {
    const tshi_rows *all = (const tshi_rows *)job;
    tshi_operand x[TSHI_NORM_GRAD_OPERANDS];
    tshi_norm part = *(const tshi_norm *)all->params;
    int i;
    (void)piece;
    memcpy(x, all->x, sizeof x);
    x[TSHI_NORM_DX].data = NULL; /* this pass skips dx */
    for (i = 0; i < TSHI_NORM_GRAD_OPERANDS; i++)
        if (i != TSHI_NORM_STATS && i != TSHI_NORM_MEANS) tshi_kernel_move(&x[i], from);
    part.d = to - from; /* number of columns of this piece */
    all->kernel(all->count, x, &part);
}

/* Computes dx, dw and db. With pieces 1, one thread does this in one pass. With more, the threads
 * take two passes: first they divide the rows of dx among them, then the columns of dw and db,
 * because every row adds to these. */
static void tshi_norm_grads(const tsh_ctx *ctx, tshi_rows *work, int64_t d, int pieces) {
    void *dw = work->x[TSHI_NORM_DW].data;
    if (pieces == 1) {
        tshi_team_run(ctx, 1, work->count, 1, tshi_kernel_do_rows, work);
        return;
    }
    work->x[TSHI_NORM_DW].data = NULL; /* first pass: only dx */
    if (work->x[TSHI_NORM_DX].data)
        tshi_team_run(ctx, pieces, work->count, 1, tshi_kernel_do_rows, work);
    work->x[TSHI_NORM_DW].data = dw; /* second pass: dw and db */
    if (dw) tshi_team_run(ctx, pieces, d, 16, tshi_norm_columns, work);
}

/* For sharded features: computes the means that dx needs, this rank's part first, then summed over
 * ranks, and sets them as an operand of work. Returns their memory, which the caller releases. */
static tshi_block *tshi_norm_sum_means(tsh_ctx *ctx, tshi_rows *work, tshi_norm *p,
                                       const char *op) {
    const size_t size = tshi_dtype_reals(2 * work->count); /* bytes of the means (rows, 2) */
    tshi_block *block = tshi_mem_alloc(ctx, TSH_MEM_STEP, size);
    if (!block) return NULL;
    memset(tshi_mem_data(block), 0, size);
    work->x[TSHI_NORM_MEANS] = tshi_kernel_reals((tsh_real *)tshi_mem_data(block), 2);
    p->pass = TSHI_NORM_SUMS;
    if (p->d) tshi_kernel_run_rows(ctx, work, p->d);
    (void)tshi_error_comm(
        ctx, tsh_allreduce(&ctx->tp, tshi_mem_data(block), 2 * work->count, TSH_REAL, TSH_SUM), op);
    p->pass = TSHI_NORM_GIVEN;
    return block;
}

/* Backward of both norms: computes dx, dw and db, skips those that are not needed. */
static void tshi_norm_backward(tshi_node *node) {
    tsh_tensor *x = node->in[0], *out = node->out; /* shape (.., d) */
    tsh_ctx *ctx = out->ctx;
    tshi_norm p = *(const tshi_norm *)node->params;
    const int64_t d = p.d, one = 1;           /* one: the stride of dw and db */
    int64_t rows, step, stride[TSH_MAX_DIMS]; /* step: elements from row to row of x */
    int i, needed[3], pieces = tshi_kernel_parts(ctx, d ? tsh_local_numel(x) / d : 0, d);
    tshi_block *two = tshi_mem_alloc(ctx, TSH_MEM_STEP, tshi_dtype_reals(2 * d));
    tshi_block *saved[2] = {NULL, NULL};
    tshi_block *means = NULL; /* mean(h) and mean(h xh) of each row, if the features are sharded */
    /* dw: dw, then db, shape (2, d); values: those of x, shape (rows, d), and of w, shape (d) */
    tsh_real *dw, *values[2] = {NULL, NULL};
    tshi_dest dest[3]; /* where dx, dw and db go */
    tshi_rows work;
    if (!two) return;
    dw = (tsh_real *)tshi_mem_data(two);
    memset(dw, 0, tshi_dtype_reals(2 * d));
    for (i = 0; i < 3; i++) needed[i] = tshi_tape_dest(node, i, &dest[i]);
    for (i = 0; i < 2; i++)
        if (node->in[i]) values[i] = tshi_tape_saved_reals(node, i, stride, &saved[i]);
    values[1] = tshi_norm_weight(ctx, &p, values[1], &saved[1]);
    p.add = needed[0] && dest[0].add;
    (void)tshi_kernel_rows(x, &rows, &step);
    work = tshi_kernel_rows_job(tshi_norm_grad[ctx->isa], rows, &p);
    work.x[TSHI_NORM_DX] = tshi_kernel_reals(needed[0] ? dest[0].data : NULL, step);
    work.x[TSHI_NORM_X] = tshi_kernel_reals(values[0], saved[0] ? d : step); /* shape (rows, d) */
    work.x[TSHI_NORM_W] = tshi_kernel_reals(values[1], 0);                   /* shape (d) */
    work.x[TSHI_NORM_DY] = tshi_kernel_reals(tshi_tape_grad(node), d);       /* shape (rows, d) */
    work.x[TSHI_NORM_STATS] = tshi_kernel_reals((const tsh_real *)tshi_mem_data(node->aux), 2);
    work.x[TSHI_NORM_DW] = tshi_kernel_reals(needed[1] || needed[2] ? dw : NULL, 0); /* shape (d) */
    work.x[TSHI_NORM_DB] = tshi_kernel_reals(dw + d, 0);                             /* shape (d) */
    if (p.cut && needed[0] && ctx->error.code == TSH_OK)
        means = tshi_norm_sum_means(ctx, &work, &p, node->op->name);
    if (ctx->error.code == TSH_OK) tshi_norm_grads(ctx, &work, d, pieces);
    tshi_mem_release(ctx, means);
    for (i = 1; i < 3; i++)
        if (needed[i]) tshi_tape_accumulate(node->in[i], &dest[i], i == 1 ? dw : dw + d, &one);
    tshi_mem_release(ctx, saved[0]);
    tshi_mem_release(ctx, saved[1]);
    tshi_mem_release(ctx, two);
}

/* Checks the inputs x (.., d), weight (d) or NULL, bias (d) or NULL. Returns the ctx; NULL after an
 * error. */
static tsh_ctx *tshi_norm_check(const tshi_op *op, tsh_tensor *const *in) {
    /* names of the inputs in `given`: without weight and bias, with weight, with bias, with both */
    static const char *const names[] = {"x", "x weight", "x bias", "x weight bias"};
    tsh_tensor *given[3]; /* the inputs that are not NULL */
    char tx[TSHI_TEXT_SIZE], tw[TSHI_TEXT_SIZE];
    int i, count = 0;
    tsh_ctx *ctx;
    for (i = 0; i < 3; i++)
        if (in[i] || i == 0) given[count++] = in[i];
    ctx = tshi_tensor_check_floating(op->name, names[(in[1] != NULL) + 2 * (in[2] != NULL)], given,
                                     count);
    if (ctx && in[0]->ndim < 1)
        return (tsh_ctx *)tshi_error_null(ctx, TSH_ERR_SHAPE,
                                          "%s: input %s has no dimension of features", op->name,
                                          tshi_tensor_text(in[0], tx));
    for (i = 1; i < 3 && ctx; i++)
        if (in[i] && (in[i]->ndim != 1 || in[i]->dim[0] != in[0]->dim[in[0]->ndim - 1]))
            return (tsh_ctx *)tshi_error_null(
                ctx, TSH_ERR_SHAPE,
                "%s: input %s, %s %s; weight and bias must have as many elements as the input has "
                "features (its last dimension)",
                op->name, tshi_tensor_text(in[0], tx), i == 1 ? "weight" : "bias",
                tshi_tensor_text(in[i], tw));
    return ctx;
}

/* Replaces each input whose features are not adjacent in memory, or whose rows are not equally far
 * apart, by a copy. Returns 0 if there is no memory. */
static int tshi_norm_inputs(const char *op, tsh_tensor **in) {
    int64_t rows, step;
    int i;
    for (i = 0; i < 3; i++)
        if (in[i] &&
            (in[i]->stride[in[i]->ndim - 1] != 1 || !tshi_kernel_rows(in[i], &rows, &step)))
            if (!(in[i] = tshi_op_copy(op, in[i]))) return 0;
    return 1;
}

/* Normalises the rows of work, in two passes if the features are sharded. */
static void tshi_norm_forward(tsh_ctx *ctx, tshi_rows *work, tshi_norm *p) {
    tsh_real *stats = (tsh_real *)work->x[TSHI_NORM_STATS].data; /* shape (rows, 2) */
    if (p->cut) {
        p->pass = TSHI_NORM_SUMS;
        memset(stats, 0, tshi_dtype_reals(2 * work->count));
        if (p->d) tshi_kernel_run_rows(ctx, work, p->d);
        tshi_norm_combine(ctx, p, work->count, stats);
        p->pass = TSHI_NORM_GIVEN;
    }
    if (ctx->error.code == TSH_OK) tshi_kernel_run_rows(ctx, work, p->d);
    p->pass = TSHI_NORM_WHOLE;
}

/* Runs tsh_layer_norm or, if options->about_zero is 1, tsh_rms_norm. op: the tshi_op of that
 * function. */
static tsh_tensor *tshi_norm_apply(const tshi_op *op, tsh_tensor *x, tsh_tensor *weight,
                                   tsh_tensor *bias, const tshi_norm *options) {
    /* shapes: x and out (.., d), weight and bias (d) or NULL */
    tsh_tensor *in[] = {x, weight, bias}, *out;
    tsh_ctx *ctx = tshi_norm_check(op, in);
    tshi_norm p = *options; /* d, all and cut are filled in below */
    tshi_output output;
    tshi_block *stats, *scratch[3] = {NULL, NULL, NULL}, *unrounded;
    /* values: those of x, shape (rows, d), of weight and of bias, shape (d); y: shape (rows, d) */
    tsh_real *values[3] = {NULL, NULL, NULL}, *y;
    int64_t rows, step, stride[TSH_MAX_DIMS]; /* step: elements from row to row of x */
    tshi_rows work;
    int i;
    if (!ctx || !tshi_rule_run(op, in, 3, NULL, &output) || !tshi_norm_inputs(op->name, in))
        return NULL;
    output.shape = tsh_shape_of(x);
    p.d = x->local[x->ndim - 1];
    p.all = x->dim[x->ndim - 1];
    p.cut = ctx->tp.size > 1 && tshi_rule_is_sharded(x, x->ndim - 1);
    (void)tshi_kernel_rows(in[0], &rows, &step);
    out = tshi_tensor_out(ctx, op->name, x->dtype, &output.shape, &output.layout);
    stats = out ? tshi_mem_alloc(ctx, TSH_MEM_STEP, tshi_dtype_reals(2 * rows)) : NULL;
    if (!stats) return NULL;
    y = tshi_kernel_output(out, &unrounded);
    for (i = 0; i < 3; i++)
        if (in[i]) values[i] = tshi_kernel_reals_of(in[i], stride, &scratch[i]);
    values[1] = tshi_norm_weight(ctx, &p, values[1], &scratch[1]);
    work = tshi_kernel_rows_job(tshi_norm_rows[ctx->isa], rows, &p);
    work.x[TSHI_NORM_Y] = tshi_kernel_reals(y, p.d); /* the output (rows, d) */
    work.x[TSHI_NORM_X] = tshi_kernel_reals(values[0], scratch[0] ? p.d : step); /* x (rows, d) */
    work.x[TSHI_NORM_W] = tshi_kernel_reals(values[1], 0);                       /* weight (d) */
    work.x[TSHI_NORM_B] = tshi_kernel_reals(values[2], 0); /* the bias (d), or NULL */
    work.x[TSHI_NORM_STATS] = tshi_kernel_reals((tsh_real *)tshi_mem_data(stats), 2);
    if (ctx->error.code == TSH_OK) tshi_norm_forward(ctx, &work, &p);
    for (i = 0; i < 3; i++) tshi_mem_release(ctx, scratch[i]);
    tshi_kernel_output_done(out, unrounded);
    tshi_op_record(op, out, in, 3, output.partial, &p, sizeof p, stats);
    return ctx->error.code == TSH_OK ? out : NULL;
}

static const tshi_op tshi_norm_layer_op = {
    "tsh_layer_norm",   "x weight bias",      tshi_rule_norm,
    tshi_norm_backward, TSHI_X | TSHI_WEIGHT, 0};
static const tshi_op tshi_norm_rms_op = {
    "tsh_rms_norm", "x weight", tshi_rule_norm, tshi_norm_backward, TSHI_X | TSHI_WEIGHT, 0};

TSH_API tsh_tensor *tsh_layer_norm(tsh_tensor *x, tsh_tensor *weight, tsh_tensor *bias,
                                   double eps) {
    tshi_norm options;
    memset(&options, 0, sizeof options);
    options.eps = tshi_map_option(eps, 1e-5);
    return tshi_norm_apply(&tshi_norm_layer_op, x, weight, bias, &options);
}

static tsh_tensor *tshi_norm_rms(tsh_tensor *x, tsh_tensor *weight, double eps, int plus_one) {
    tshi_norm options;
    memset(&options, 0, sizeof options);
    options.eps = tshi_map_option(eps, 1e-6);
    options.about_zero = 1;
    options.plus_one = plus_one;
    return tshi_norm_apply(&tshi_norm_rms_op, x, weight, NULL, &options);
}

TSH_API tsh_tensor *tsh_rms_norm(tsh_tensor *x, tsh_tensor *weight, double eps) {
    return tshi_norm_rms(x, weight, eps, 0);
}

TSH_API tsh_tensor *tsh_rms_norm_with(tsh_tensor *x, tsh_tensor *weight,
                                      const tsh_rms_norm_desc *desc) {
    return tshi_norm_rms(x, weight, desc ? desc->eps : 0, desc && desc->plus_one);
}
