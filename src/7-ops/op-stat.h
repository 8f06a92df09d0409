/* ========================================================================== */
/* >>op-stat                                        MARK: - op-stat (private) */
/* Statistics along one dimension, or all: logsumexp, var, std, norm.         */
/* Needs: >>op-reduce.                                                        */
/* ========================================================================== */

/* A statistic of each row of x (see "rows" in >>op-reduce) is computed in three steps. A kernel
 * sums up the row in a tshi_part. If x is sharded along the row, one all-gather exchanges the parts
 * of all ranks, and `join` joins them in the order of ranks: so each rank has the same bits.
 * `finish` computes the result from the joined part, and two numbers for backward, with which
 *
 *     dx = f(x, g scale, centre),   e.g. dx = g scale (x - centre) for var
 *
 * where g is the gradient of the row's result. A kind of statistic is one tshi_stat. */

/* The partial result of a statistic over some elements of a row, such as those on one rank. */
typedef struct tshi_part {
    double n;    /* number of elements; 0: a and b mean nothing */
    double a, b; /* logsumexp: max x, sum e^(x - max); var: mean, sum (x - mean)^2; p-norm: sum
                  * |x|^p; norm for p infinity (-infinity): max |x| (max -|x|), how many elements
                  * have this maximum */
} tshi_part;

/* What `finish` computes from the part that covers a whole row. */
typedef struct tshi_stat_result {
    double value;         /* the statistic of the row */
    double centre, scale; /* for backward: see the formula of dx */
} tshi_stat_result;

typedef struct tshi_stat {
    tshi_op op; /* the first field, because backward casts node->op to tshi_stat */
    const tshi_kernel_fn *forward, *backward; /* tables of kernels, one per instruction set */
    /* joins `more` to `part`; both have at least one element. The caller adds more->n to part->n */
    void (*join)(tshi_part *part, const tshi_part *more);
    void (*finish)(const tshi_part *part, const tshi_reduce_params *p, tshi_stat_result *result);
} tshi_stat;

/* Defines the kernel of a statistic: operands are the parts of the rows and x, dense rows of p->n
 * values. part_of(x, n, p, part, fused) sets part->a and part->b of a row. */
#define TSHI_STAT_KERNEL(name, part_of)                                                            \
    TSHI_INLINE void name##_body(int64_t rows, const tshi_operand *operand,                        \
                                 const tshi_reduce_params *p, int fused) {                         \
        tshi_part *part = (tshi_part *)operand[0].data;                                            \
        const tsh_real *x = (const tsh_real *)operand[1].data;                                     \
        for (; rows > 0; rows--, part++, x += p->n) {                                              \
            part->n = (double)p->n;                                                                \
            part->b = 0;                                                                           \
            part_of(x, p->n, p, part, fused);                                                      \
        }                                                                                          \
    }                                                                                              \
    TSHI_KERNEL_AVX2(name, tshi_reduce_params)

enum { TSHI_STAT_CHUNK = 4096 }; /* values summed in tsh_real; their sums are added in double */

/* -- logsumexp: y = m + log sum e^(x - m), m = max x; dx = dy e^(x - y) ---------- */

TSHI_INLINE void tshi_stat_exps(const tsh_real *x, int64_t n, const tshi_reduce_params *p,
                                tshi_part *part, int fused) {
    const tsh_real max = tshi_kernel_max(x, n);
    (void)p;
    part->a = (double)max;
    if (max - max == 0) part->b = (double)tshi_kernel_sum_exps(x, n, max, NULL, fused);
}
TSHI_STAT_KERNEL(tshi_stat_logsumexp, tshi_stat_exps);

static void tshi_stat_join_exps(tshi_part *part, const tshi_part *more) {
    const double own = part->a;
    part->a = own > more->a || own != own ? own : more->a;
    /* a part whose maximum is -infinity adds 0: its sum is 0, and so is its factor, if part->a is
     * finite */
    if (part->a - part->a == 0)
        part->b = part->b * exp(own - part->a) + more->b * exp(more->a - part->a);
}

static void tshi_stat_finish_exps(const tshi_part *part, const tshi_reduce_params *p,
                                  tshi_stat_result *result) {
    (void)p;
    result->value = -(double)INFINITY; /* log 0, if there are no elements */
    if (part->n > 0) result->value = part->a - part->a == 0 ? part->a + log(part->b) : part->a;
    result->centre = result->value;
    result->scale = 1;
}

/* -- var, std: with M2 = sum (x - mean)^2 and f = n - correction, var = M2 / f,
 * dx = dy 2 (x - mean) / f; std = sqrt var, dx = dy (x - mean) / (f std), 0 if std is 0 ---- */

/* Adds v = x - mean of m values, at most TSHI_BLOCK, to lane[0 ...], and v^2 to lane[TSHI_BLOCK
 * ...]. */
TSHI_INLINE void tshi_stat_moments_step(double *lane, const tsh_real *x, int m, double mean) {
    int i;
    for (i = 0; i < m; i++) {
        const double v = (double)x[i] - mean;
        lane[i] += v;
        lane[i + TSHI_BLOCK] += v * v;
    }
}

/* Computes the mean, then the sum of squares about it, in double: a square may be out of a float's
 * range. The sum of all x - mean, which is not quite 0, corrects the rounding of the mean. */
TSHI_INLINE void tshi_stat_moments(const tsh_real *x, int64_t n, const tshi_reduce_params *p,
                                   tshi_part *part, int fused) {
    double lane[2 * TSHI_BLOCK], sum = 0, mean;
    int64_t i;
    int k;
    (void)p, (void)fused;
    for (i = 0; i < n; i += TSHI_STAT_CHUNK)
        sum += (double)tshi_kernel_sum(x + i, tshi_base_min(TSHI_STAT_CHUNK, n - i));
    part->a = mean = sum / (double)n;
    part->b = (double)NAN;
    if (mean - mean != 0) return; /* an infinity or NaN is among the values */
    memset(lane, 0, sizeof lane);
    for (i = 0; i + TSHI_BLOCK <= n; i += TSHI_BLOCK)
        tshi_stat_moments_step(lane, x + i, TSHI_BLOCK, mean);
    tshi_stat_moments_step(lane, x + i, (int)(n - i), mean);
    for (k = 1; k < TSHI_BLOCK; k++) { /* adds up the lanes in order */
        lane[0] += lane[k];
        lane[TSHI_BLOCK] += lane[TSHI_BLOCK + k];
    }
    part->a += lane[0] / (double)n;
    part->b = lane[TSHI_BLOCK] - lane[0] * lane[0] / (double)n;
    if (part->b < 0) part->b = 0; /* below 0 only by rounding */
}
TSHI_STAT_KERNEL(tshi_stat_var, tshi_stat_moments);

/* Joins means, and sums of squared distances from them (Chan, Golub & LeVeque 1983). */
static void tshi_stat_join_moments(tshi_part *part, const tshi_part *more) {
    const double n = part->n + more->n, apart = more->a - part->a;
    if (apart - apart == 0)
        part->a += apart * (more->n / n);
    else /* a mean is infinite or NaN; twice -infinity gives -infinity */
        part->a = part->a * (part->n / n) + more->a * (more->n / n);
    part->b += more->b + apart * apart * (part->n * more->n / n);
}

static void tshi_stat_finish_var(const tshi_part *part, const tshi_reduce_params *p,
                                 tshi_stat_result *result) {
    const double freedom = part->n - p->c; /* p->c: the correction */
    result->value = part->n > 0 ? part->b / (freedom > 0 ? freedom : 0) : (double)NAN;
    result->centre = part->a;
    /* As in torch: if all elements are reduced, freedom <= 0 makes each gradient infinite or
     * NaN. */
    result->scale = freedom <= 0 && p->axis < 0 ? (double)INFINITY : 2 / freedom;
}

static void tshi_stat_finish_std(const tshi_part *part, const tshi_reduce_params *p,
                                 tshi_stat_result *result) {
    tshi_stat_finish_var(part, p, result);
    result->value = sqrt(result->value);
    result->scale = result->value > 0 || result->value != result->value
                        ? result->scale / (2 * result->value)
                        : 0;
}

/* -- norm: y = (sum |x|^p)^(1/p); dx = dy sign(x) (|x| / y)^(p - 1) --------------
 * 0 at x = 0. For p = 0, y is the number of elements that are not 0, without a gradient. */

/* Defines the kernel that sums F(v) over the elements v of a row; `rest` is a value for which F is
 * 0, with which the last block is filled up. */
#define TSHI_STAT_SUM(name, rest, F)                                                               \
    TSHI_INLINE void tshi_stat_add_##name(tsh_real *lane, const tsh_real *x, tsh_real c) {         \
        tsh_real term[TSHI_BLOCK];                                                                 \
        int i;                                                                                     \
        (void)c; /* only a general p reads it */                                                   \
        TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) {                                              \
            const tsh_real v = x[i];                                                               \
            term[i] = F;                                                                           \
        }                                                                                          \
        TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) lane[i] += term[i];                            \
    }                                                                                              \
    TSHI_INLINE void tshi_stat_sum_##name(                                                         \
        const tsh_real *x, int64_t n, const tshi_reduce_params *p, tshi_part *part, int fused) {   \
        tsh_real lane[TSHI_BLOCK], pad[TSHI_BLOCK];                                                \
        int64_t i, e, m;                                                                           \
        (void)fused;                                                                               \
        part->a = 0;                                                                               \
        for (i = 0; i < n; i += TSHI_STAT_CHUNK) {                                                 \
            m = tshi_base_min(TSHI_STAT_CHUNK, n - i);                                             \
            memset(lane, 0, sizeof lane);                                                          \
            for (e = 0; e + TSHI_BLOCK <= m; e += TSHI_BLOCK)                                      \
                tshi_stat_add_##name(lane, x + i + e, TSHI_R(p->c));                               \
            if (e < m) {                                                                           \
                tshi_kernel_pad(x + i + e, m - e, rest, pad);                                      \
                tshi_stat_add_##name(lane, pad, TSHI_R(p->c));                                     \
            }                                                                                      \
            part->a += (double)tshi_kernel_fold(lane);                                             \
        }                                                                                          \
    }                                                                                              \
    TSHI_STAT_KERNEL(tshi_stat_norm_##name, tshi_stat_sum_##name);
TSHI_STAT_SUM(zero, 0, TSHI_R((v > 0) | (v < 0) | (v != v)))
TSHI_STAT_SUM(one, 0, tshi_math_abs(v))
TSHI_STAT_SUM(two, 0, v *v)
TSHI_STAT_SUM(any, p->c < 0 ? TSHI_R(INFINITY) : TSHI_R(0), tshi_math_pow(tshi_math_abs(v), c))
#undef TSHI_STAT_SUM

/* Finds the largest |x| of a row, or the largest -|x| if p is negative, and how many elements have
 * it. */
TSHI_INLINE void tshi_stat_largest(const tsh_real *x, int64_t n, const tshi_reduce_params *p,
                                   tshi_part *part, int fused) {
    enum { PART = 256 };
    const tsh_real sign = p->c < 0 ? TSHI_R(-1) : TSHI_R(1);
    tsh_real size[PART], best = sign * tshi_math_abs(x[0]);
    int64_t i, k, m;
    (void)fused;
    for (i = 0; i < n; i += PART) {
        m = tshi_base_min(PART, n - i);
        TSHI_LANES for (k = 0; k < m; k++) size[k] = sign * tshi_math_abs(x[i + k]);
        best = tshi_kernel_larger(tshi_kernel_max(size, m), best);
    }
    part->a = (double)best;
    for (i = 0; i < n; i += PART) {
        int32_t count = 0;
        m = tshi_base_min(PART, n - i);
        for (k = 0; k < m; k++)
            count += (sign * tshi_math_abs(x[i + k]) >= best) | (x[i + k] != x[i + k]);
        part->b += count;
    }
}
TSHI_STAT_KERNEL(tshi_stat_norm_largest, tshi_stat_largest);
#undef TSHI_STAT_KERNEL

static void tshi_stat_join_sums(tshi_part *part, const tshi_part *more) {
    part->a += more->a;
}

static void tshi_stat_join_largest(tshi_part *part, const tshi_part *more) {
    const int nan = part->a != part->a, other_nan = more->a != more->a;
    if (other_nan > nan || (!nan && more->a > part->a)) {
        part->a = more->a;
        part->b = more->b;
    } else if (other_nan == nan && !(more->a < part->a)) { /* equal, or both NaN */
        part->b += more->b;
    }
}

/* Finishes the p-norms for p = 0 and p = 1: the norm is the sum itself. */
static void tshi_stat_finish_plain(const tshi_part *part, const tshi_reduce_params *p,
                                   tshi_stat_result *result) {
    (void)p;
    result->value = result->centre = part->n > 0 ? part->a : 0;
    result->scale = 1;
}

/* Finishes the 2-norm y, the root of the sum of squares: dx = dy x / y, 0 if y is 0. */
static void tshi_stat_finish_two(const tshi_part *part, const tshi_reduce_params *p,
                                 tshi_stat_result *result) {
    (void)p;
    result->value = result->centre = part->n > 0 ? sqrt(part->a) : 0;
    result->scale = result->value <= 0 ? 0 : 1 / result->value;
}

static void tshi_stat_finish_any(const tshi_part *part, const tshi_reduce_params *p,
                                 tshi_stat_result *result) {
    result->value = result->centre = part->n > 0 ? pow(part->a, 1 / p->c) : 0;
    result->scale = 1;
}

static void tshi_stat_finish_largest(const tshi_part *part, const tshi_reduce_params *p,
                                     tshi_stat_result *result) {
    (void)p;
    result->value = result->centre = fabs(part->a);
    result->scale = 1 / part->b; /* all elements with the maximum share the gradient */
}

/* -- backward ------------------------------------------------------------------ */

/* Kernels: dx = f(x, g, s), where g is the gradient of the row's result times its scale, and s the
 * row's centre. c is p - 1 for a p-norm. */
#define TSHI_STAT_BACKWARD(name, F)                                                                \
    TSHI_MAP_KERNEL(tshi_stat_##name##_dx, tshi_backward_params, p->c, p->add, 3, x, g, s, F)
TSHI_STAT_BACKWARD(logsumexp, g *tshi_math_exp(x - s, fused))
TSHI_STAT_BACKWARD(var, g *(x - s))
TSHI_STAT_BACKWARD(norm_zero, TSHI_R(0))
TSHI_STAT_BACKWARD(norm_one, g *tshi_math_sign(x))
TSHI_STAT_BACKWARD(norm_two, g *x)
TSHI_STAT_BACKWARD(norm_any, ((x >= 0) & (x <= 0))
                                 ? TSHI_R(0)
                                 : (x < 0 ? -g : g) * tshi_math_pow(tshi_math_abs(x) / s, c))
TSHI_STAT_BACKWARD(norm_largest,
                   g *TSHI_R(tshi_math_abs(x) >= s && tshi_math_abs(x) <= s) * tshi_math_sign(x))
#undef TSHI_STAT_BACKWARD
#undef TSHI_MAP_SETS
#undef TSHI_MAP_LOAD
#undef TSHI_MAP_STORE
#undef TSHI_MAP_KERNEL

/* Computes dx of every statistic. node->aux has the centre of each row, then the scale of each. */
static void tshi_stat_backward(tshi_node *node) {
    const tshi_stat *stat = (const tshi_stat *)(const void *)node->op;
    const tshi_reduce_params *params = (const tshi_reduce_params *)node->params;
    const int64_t count = tsh_local_numel(node->out); /* number of rows */
    const tsh_tensor *x = node->in[0];
    tsh_ctx *ctx = x->ctx;
    const tsh_real *centre = (const tsh_real *)tshi_mem_data(node->aux), *scale = centre + count;
    const tsh_real *dy = tshi_tape_grad(node);
    tshi_backward_params back = TSHI_ZERO;
    tshi_block *block = tshi_mem_alloc(ctx, TSH_MEM_STEP, tshi_dtype_reals(count));
    tsh_real *g = block ? (tsh_real *)tshi_mem_data(block) : NULL;
    int64_t stride[TSH_MAX_DIMS], i;
    tshi_loop loop;
    tshi_dest dest;
    if (!g || !tshi_tape_dest(node, 0, &dest)) {
        tshi_mem_release(ctx, block);
        return;
    }
    for (i = 0; i < count; i++) g[i] = dy[i] * scale[i];
    tshi_reduce_spread(x, node->out, params->axis, stride);
    tshi_kernel_space(&loop, x);
    tshi_kernel_add_operand(&loop, x, dest.data, dest.stride, TSH_REAL);
    tshi_kernel_add_operand(&loop, x, tshi_tape_saved(node, 0), x->stride, x->dtype);
    tshi_kernel_add_operand(&loop, x, g, stride, TSH_REAL);
    tshi_kernel_add_operand(&loop, x, centre, stride, TSH_REAL);
    back.c = params->c - 1;
    back.add = dest.add;
    tshi_kernel_run(&loop, stat->backward[ctx->isa], &back);
    tshi_mem_release(ctx, block);
}

/* -- forward ------------------------------------------------------------------- */

/* Joins the parts that all ranks have of `count` rows, in the order of ranks, with one all-gather,
 * for an x whose rows are divided among the ranks. */
static void tshi_stat_gather(const tshi_stat *stat, tsh_ctx *ctx, tshi_part *parts, int64_t count) {
    const int64_t size = ctx->tp.size, each = (int64_t)(sizeof *parts / sizeof(double));
    tshi_block *block = tshi_mem_alloc(
        ctx, TSH_MEM_STEP, (size_t)(size * count) * sizeof *parts + (size_t)size * sizeof(int64_t));
    tshi_part *all;        /* all ranks' parts, shape (size, count) */
    int64_t *counts, r, i; /* counts: numbers that each rank sends, shape (size) */
    if (!block) return;
    all = (tshi_part *)tshi_mem_data(block);
    counts = (int64_t *)(void *)(all + size * count);
    for (r = 0; r < size; r++) counts[r] = count * each;
    (void)tshi_error_comm(ctx, tsh_allgather(&ctx->tp, parts, all, counts, 1, TSH_F64),
                          stat->op.name);
    for (i = 0; i < count && ctx->error.code == TSH_OK; i++) {
        parts[i] = all[i];
        for (r = 1; r < size; r++) {
            const tshi_part *more = &all[r * count + i];
            if (!(parts[i].n > 0)) {
                parts[i] = *more;
            } else if (more->n > 0) {
                stat->join(&parts[i], more);
                parts[i].n += more->n;
            }
        }
    }
    tshi_mem_release(ctx, block);
}

/* Computes the statistic of each row of x: writes results to `values`, centres and then scales to
 * aux. */
static void tshi_stat_compute(const tshi_stat *stat, tsh_tensor *x, const tshi_reduction *r,
                              int64_t count, tsh_real *values, tsh_real *aux) {
    tsh_ctx *ctx = x->ctx;
    const tsh_tensor xs = tshi_reduce_rows(x, r->params.axis); /* x with the axis last */
    const size_t bytes = (size_t)count * sizeof(tshi_part);
    tshi_block *block = tshi_mem_alloc(ctx, TSH_MEM_STEP, bytes), *scratch;
    tshi_part *parts = block ? (tshi_part *)tshi_mem_data(block) : NULL;
    tshi_rows rows = tshi_reduce_job(stat->forward, x, &r->params);
    tshi_stat_result result;
    int64_t i;
    if (!parts) return;
    memset(parts, 0, bytes); /* rows without elements on this rank keep n = 0 */
    rows.x[0] = tshi_kernel_operand(parts, 3, TSH_F64);
    rows.x[1] = tshi_kernel_reals(tshi_kernel_packed_reals(&xs, &scratch), r->params.n);
    if (ctx->error.code == TSH_OK) tshi_kernel_run_rows(ctx, &rows, r->params.n);
    tshi_mem_release(ctx, scratch);
    if (ctx->tp.size > 1 && tshi_rule_is_sharded(x, r->params.axis) && ctx->error.code == TSH_OK)
        tshi_stat_gather(stat, ctx, parts, count);
    for (i = 0; i < count; i++) {
        stat->finish(&parts[i], &r->params, &result);
        values[i] = TSHI_R(result.value);
        aux[i] = TSHI_R(result.centre);
        aux[count + i] = TSHI_R(result.scale);
    }
    tshi_mem_release(ctx, block);
}

/* Runs a statistic along dim. c: the correction of a variance, or the p of a norm. */
static tsh_tensor *tshi_stat_run(const tshi_stat *stat, tsh_tensor *x, int dim, int keepdim,
                                 double c) {
    tsh_ctx *ctx = x->ctx;
    tshi_reduction r;
    tshi_block *unrounded, *aux;
    tsh_tensor *out;
    tsh_real *values;
    int64_t count;
    if (!tshi_reduce_plan(&stat->op, x, dim, keepdim, &r)) return NULL;
    r.params.c = c;
    out = tshi_tensor_out(ctx, stat->op.name, x->dtype, &r.shape, &r.layout);
    if (!out) return NULL;
    count = tsh_local_numel(out);
    /* results go to out or, if that is not of tsh_real, to a buffer first */
    values = tshi_kernel_output(out, &unrounded);
    aux = tshi_mem_alloc(ctx, TSH_MEM_STEP, tshi_dtype_reals(2 * count));
    if (values && aux)
        tshi_stat_compute(stat, x, &r, count, values, (tsh_real *)tshi_mem_data(aux));
    tshi_kernel_output_done(out, unrounded); /* rounds to out's dtype */
    tshi_op_record(&stat->op, out, &x, 1, TSHI_NONE, &r.params, sizeof r.params, aux);
    return ctx->error.code == TSH_OK ? out : NULL;
}

/* Defines the tshi_stat of a public function, such as tsh_var. */
#define TSHI_STAT(row, public, kernel, dx, join, finish)                                           \
    static const tshi_stat tshi_stat_##row##_row = {                                               \
        {public, "x", tshi_rule_statistic, tshi_stat_backward, TSHI_X, 0},                         \
        tshi_stat_##kernel,                                                                        \
        tshi_stat_##dx##_dx,                                                                       \
        tshi_stat_join_##join,                                                                     \
        tshi_stat_finish_##finish};
TSHI_STAT(logsumexp, "tsh_logsumexp", logsumexp, logsumexp, exps, exps)
TSHI_STAT(var, "tsh_var", var, var, moments, var)
TSHI_STAT(std, "tsh_std", var, var, moments, std)
TSHI_STAT(norm_zero, "tsh_norm", norm_zero, norm_zero, sums, plain)
TSHI_STAT(norm_one, "tsh_norm", norm_one, norm_one, sums, plain)
TSHI_STAT(norm_two, "tsh_norm", norm_two, norm_two, sums, two)
TSHI_STAT(norm_any, "tsh_norm", norm_any, norm_any, sums, any)
TSHI_STAT(norm_largest, "tsh_norm", norm_largest, norm_largest, largest, largest)
#undef TSHI_STAT

TSH_API tsh_tensor *tsh_logsumexp(tsh_tensor *x, int dim, int keepdim) {
    if (!tshi_tensor_check_floating("tsh_logsumexp", "x", &x, 1)) return NULL;
    return tshi_stat_run(&tshi_stat_logsumexp_row, x, dim, keepdim, 0);
}

TSH_API tsh_tensor *tsh_var(tsh_tensor *x, int dim, double correction, int keepdim) {
    if (!tshi_tensor_check_floating("tsh_var", "x", &x, 1)) return NULL;
    return tshi_stat_run(&tshi_stat_var_row, x, dim, keepdim, tshi_map_option(correction, 1));
}

TSH_API tsh_tensor *tsh_std(tsh_tensor *x, int dim, double correction, int keepdim) {
    if (!tshi_tensor_check_floating("tsh_std", "x", &x, 1)) return NULL;
    return tshi_stat_run(&tshi_stat_std_row, x, dim, keepdim, tshi_map_option(correction, 1));
}

/* Returns the tshi_stat of the p-norm. */
static const tshi_stat *tshi_stat_norm(double p) {
    if (p - p != 0) return &tshi_stat_norm_largest_row; /* infinity or -infinity */
    if (p >= 2 && p <= 2) return &tshi_stat_norm_two_row;
    if (p >= 1 && p <= 1) return &tshi_stat_norm_one_row;
    return p < 0 || p > 0 ? &tshi_stat_norm_any_row : &tshi_stat_norm_zero_row;
}

TSH_API tsh_tensor *tsh_norm(tsh_tensor *x, double p, int dim, int keepdim) {
    tsh_ctx *ctx = tshi_tensor_check_floating("tsh_norm", "x", &x, 1);
    const double own = tshi_map_option(p, 2);
    const int axis = ctx && dim != TSH_ALL ? tshi_tensor_axis(x, dim) : -1;
    if (!ctx) return NULL;
    if (own != own) return tshi_error_null(ctx, TSH_ERR_ARGUMENT, "tsh_norm: p is NAN");
    if ((own < 0 || own - own != 0) && !(axis < 0 ? tsh_numel(x) : x->dim[axis]))
        return tshi_error_null(ctx, TSH_ERR_SHAPE,
                               "tsh_norm: the norm of no values does not exist for p = %g: the "
                               "dimension is empty",
                               own);
    return tshi_stat_run(tshi_stat_norm(own), x, dim, keepdim, own);
}
