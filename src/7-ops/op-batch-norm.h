/* ========================================================================== */
/* >>op-batch-norm                            MARK: - op-batch-norm (private) */
/* Batch norm (Ioffe & Szegedy 2015).                                         */
/* Needs: >>rule-net >>op-map >>op-channel.                                   */
/* ========================================================================== */

/* With xh = (x - mean) rstd and rstd = 1 / sqrt(variance + eps), of each channel:
 *
 *     y = w xh + b,   dw += sum(dy xh),   db += sum(dy)
 *     dx = (dy - mean(dy) - xh mean(dy xh)) w rstd,    outside of training: dx = dy w rstd
 *
 * Where the batch or another dimension but the channels is sharded, or with .over_dp, the moments
 * are those of several ranks together: every rank gathers all of them and combines them in rank
 * order, so that all have the same bits; the means in dx are summed by an all-reduce. */
typedef struct tshi_batch_norm {
    int training;
    int over_tp, over_dp; /* 1: the statistics are over all ranks of tp, of dp */
    double n;             /* number of values of a channel, on all ranks that share statistics */
    double momentum, eps;
} tshi_batch_norm;

/* Combines the moments of two parts of a channel, of na and nb values, into a (Chan, Golub &
 * LeVeque 1983). Moments are the mean, a[0], and the sum of squared distances from it, a[1]. */
static void tshi_batch_norm_join(double *a, double na, const double *b, double nb) {
    const double n = na + nb, apart = b[0] - a[0];
    if (nb <= 0) return;
    a[0] = na > 0 ? a[0] + apart * (nb / n) : b[0];
    a[1] = na > 0 ? a[1] + b[1] + apart * apart * (na * (nb / n)) : b[1];
}

/* Turns moments (count, 2), the mean and the sum of squared distances from it of each channel over
 * *n values on this rank, into those over all ranks of comm, and *n into the number of all values:
 * by one all-gather. */
static void tshi_batch_norm_gather(tsh_ctx *ctx, tsh_comm *comm, int64_t count, double *moments,
                                   double *n) {
    const int64_t each = 2 * count + 1; /* numbers that a rank sends: its moments and its n */
    const size_t size = tshi_base_mul((size_t)each, sizeof(double));
    const size_t ranks = (size_t)comm->size;
    tshi_block *block = tshi_mem_alloc(ctx, TSH_MEM_STEP, tshi_base_mul(size, ranks + 1));
    tshi_block *lengths = tshi_mem_alloc(ctx, TSH_MEM_STEP, ranks * sizeof(int64_t));
    if (block && lengths) {
        double *all = (double *)tshi_mem_data(block), *own = all + each * comm->size;
        int64_t *counts = (int64_t *)tshi_mem_data(lengths);
        for (int r = 0; r < comm->size; r++) counts[r] = each;
        memcpy(own, moments, size - sizeof(double));
        own[each - 1] = *n;
        (void)tshi_error_comm(ctx, tsh_allgather(comm, own, all, counts, 1, TSH_F64),
                              "tsh_batch_norm: all-gather of the statistics");
        *n = 0;
        for (int r = 0; r < comm->size && ctx->error.code == TSH_OK; r++, all += each) {
            for (int64_t c = 0; c < count; c++)
                tshi_batch_norm_join(moments + 2 * c, *n, all + 2 * c, all[each - 1]);
            *n += all[each - 1];
        }
    }
    tshi_mem_release(ctx, lengths);
    tshi_mem_release(ctx, block);
}

/* All-reduces `sums` (count, 2) over the ranks that share statistics. */
static void tshi_batch_norm_reduce(tsh_ctx *ctx, const tshi_batch_norm *p, int64_t count,
                                   double *sums) {
    static const char what[] = "tsh_batch_norm: all-reduce of the sums of a gradient";
    if (p->over_tp)
        (void)tshi_error_comm(ctx, tsh_allreduce(&ctx->tp, sums, 2 * count, TSH_F64, TSH_SUM),
                              what);
    if (p->over_dp && ctx->error.code == TSH_OK)
        (void)tshi_error_comm(ctx, tsh_allreduce(&ctx->dp, sums, 2 * count, TSH_F64, TSH_SUM),
                              what);
}

/* Returns 1 if the recorded op `node` used the values of t. (The node of a checkpoint, which only
 * lists t among its parameters, does not count: training does not read the running statistics.) */
static int tshi_batch_norm_uses(const tshi_node *node, const tsh_tensor *t) {
    for (int i = 0; i < node->n; i++)
        if (node->in[i] && (node->in[i]->base == t || node->saved[i] == t->block)) return 1;
    return 0;
}

/* Updates a running statistic (C), with the momentum: the new value of channel c, a mean or a
 * variance, is moments[2 c + second] / by. Fails if backward of a recorded op needs the old
 * values. */
static void tshi_batch_norm_update(tsh_tensor *running, const tshi_batch_norm *p,
                                   const double *moments, int second, double by) {
    char *values = (char *)tshi_tensor_at(running);
    if (tshi_tensor_on_tape(running, tshi_batch_norm_uses)) {
        (void)tshi_error_zero(running->ctx, TSH_ERR_STATE,
                              "tsh_batch_norm: ops are recorded that used the running statistics, "
                              "and backward needs these; call tsh_backward or tsh_step_end first");
        return;
    }
    for (int64_t c = 0; c < running->local[0]; c++) {
        const int64_t at = c * running->stride[0];
        const double old = tshi_dtype_get(running->dtype, values, at);
        tshi_dtype_put(running->dtype, values, at,
                       (1 - p->momentum) * old + p->momentum * (moments[2 * c + second] / by));
    }
}

/* Computes the moments (count, 2), mean and sum of squared distances from it, of each channel over
 * all ranks that share statistics, and p->n; updates the running statistics. */
static void tshi_batch_norm_train(tsh_ctx *ctx, tshi_channels shape, const tsh_real *x,
                                  tsh_real *pivot, tsh_tensor *const *in, tshi_batch_norm *p,
                                  double *moments) {
    p->n = (double)(shape.outer * shape.inner);
    tshi_channel_moments(ctx, shape, x, pivot, moments);
    if (p->over_tp) tshi_batch_norm_gather(ctx, &ctx->tp, shape.count, moments, &p->n);
    if (p->over_dp && ctx->error.code == TSH_OK)
        tshi_batch_norm_gather(ctx, &ctx->dp, shape.count, moments, &p->n);
    if (ctx->error.code == TSH_OK && p->n == 1)
        (void)tsh_fail(ctx, TSH_ERR_SHAPE,
                       "tsh_batch_norm: in training a channel needs several values, and has one; "
                       "give a larger batch, or normalise with running statistics: .training = 0");
    if (!in[3] || p->n <= 0 || ctx->tape.replaying || ctx->error.code != TSH_OK) return;
    tshi_batch_norm_update(in[3], p, moments, 0, 1);
    if (ctx->error.code == TSH_OK) tshi_batch_norm_update(in[4], p, moments, 1, p->n - 1);
}

/* Writes three planes, with a number per channel each, for tshi_channel_scale: mean, rstd w and b;
 * and the mean and rstd of each channel to stats (2, count). moments: see tshi_batch_norm_train;
 * outside of training, the running statistics are used instead. w and b: shape (count) or NULL. */
static void tshi_batch_norm_planes(const tshi_batch_norm *p, int64_t count, tsh_tensor *const *in,
                                   const double *moments, const tsh_real *w, const tsh_real *b,
                                   tsh_real *stats, tsh_real *planes) {
    for (int64_t c = 0; c < count; c++) {
        double mean, variance;
        if (p->training) {
            mean = moments[2 * c];
            variance = p->n > 0 ? moments[2 * c + 1] / p->n : 0;
        } else {
            mean = tshi_dtype_get(in[3]->dtype, tshi_tensor_at(in[3]), c * in[3]->stride[0]);
            variance = tshi_dtype_get(in[4]->dtype, tshi_tensor_at(in[4]), c * in[4]->stride[0]);
        }
        stats[c] = planes[c] = TSHI_R(mean);
        stats[count + c] = TSHI_R(1 / sqrt(variance + p->eps));
        planes[count + c] = w ? w[c] * stats[count + c] : stats[count + c];
        planes[2 * count + c] = b ? b[c] : 0;
    }
}

/* Backward: writes the four planes for tshi_channel_back, with a number per channel each, and dw
 * and db, shape (2, count), to `grads`. sums: each channel's sums of dy and of dy (x - mean) on
 * this rank; if reduce is 1, they become those of all ranks that share statistics. */
static void tshi_batch_norm_back(tsh_ctx *ctx, const tshi_batch_norm *p, int64_t count,
                                 const tsh_real *stats, const tsh_real *w, double *sums, int reduce,
                                 tsh_real *grads, tsh_real *planes) {
    const tsh_real *rstd = stats + count;
    for (int64_t c = 0; c < count; c++) {
        grads[c] = TSHI_R(sums[2 * c + 1] * (double)rstd[c]);
        grads[count + c] = TSHI_R(sums[2 * c]);
    }
    if (reduce) tshi_batch_norm_reduce(ctx, p, count, sums);
    for (int64_t c = 0; c < count; c++) {
        const double r = (double)rstd[c], a = w ? r * (double)w[c] : r;
        const double share = p->training && p->n > 0 ? a / p->n : 0;
        planes[c] = stats[c];
        planes[count + c] = TSHI_R(a);
        planes[2 * count + c] = TSHI_R(share * sums[2 * c]);
        planes[3 * count + c] = TSHI_R(share * r * r * sums[2 * c + 1]);
    }
}

static void tshi_batch_norm_backward(tshi_node *node) {
    const tshi_batch_norm *p = (const tshi_batch_norm *)node->params;
    tsh_tensor *x = node->in[0];
    tsh_ctx *ctx = x->ctx;
    const tshi_channels shape = tshi_channel_shape(x);
    const int64_t count = shape.count, one = 1;
    tshi_block *sums = tshi_mem_alloc(ctx, TSH_MEM_STEP, (size_t)(2 * count) * sizeof(double));
    tshi_block *room = tshi_mem_alloc(ctx, TSH_MEM_STEP, tshi_dtype_reals(6 * count));
    tshi_block *saved[2] = {NULL, NULL}, *scratch = NULL;
    const tsh_real *stats = (const tsh_real *)tshi_mem_data(node->aux), *w = NULL;
    tsh_real *dx = NULL, *planes = (tsh_real *)tshi_channel_memory(room);
    int64_t stride[TSH_MAX_DIMS];
    tshi_dest dest[3];
    int needed[3];
    for (int i = 0; i < 3; i++) needed[i] = tshi_tape_dest(node, i, &dest[i]);
    const tsh_real *values = tshi_tape_saved_reals(node, 0, stride, &saved[0]);
    if (node->in[1]) w = tshi_tape_saved_reals(node, 1, stride, &saved[1]);
    if (needed[0]) dx = tshi_op_dense_dest(x, &dest[0], &scratch);
    if (sums && planes && values && ctx->error.code == TSH_OK) {
        const tsh_real *dy = tshi_tape_grad(node);
        const tsh_real *const data[] = {dx, dy, values, planes};
        double *total = (double *)tshi_mem_data(sums);
        tsh_real *grads = planes + 4 * count; /* memory for dw and db */
        tshi_channel_sum(ctx, shape, dy, NULL, values, stats, total);
        tshi_batch_norm_back(ctx, p, count, stats, w, total, p->training && needed[0], grads,
                             planes);
        if (dx && ctx->error.code == TSH_OK)
            tshi_channel_apply(ctx, shape, tshi_channel_back, data, 4, count);
        if (needed[0]) tshi_op_accumulate(x, &dest[0], scratch);
        for (int i = 1; i < 3; i++)
            if (needed[i])
                tshi_tape_accumulate(node->in[i], &dest[i], grads + (i - 1) * count, &one);
    }
    tshi_mem_release(ctx, saved[0]);
    tshi_mem_release(ctx, saved[1]);
    tshi_mem_release(ctx, room);
    tshi_mem_release(ctx, sums);
}

/* Computes out from in: x, weight, bias, running_mean, running_var. Returns stats (2, count), the
 * mean and rstd of each channel, for backward. NULL: an error. */
static tshi_block *tshi_batch_norm_forward(tsh_tensor *const *in, tsh_tensor *out,
                                           tshi_batch_norm *p) {
    tsh_ctx *ctx = out->ctx;
    const tshi_channels shape = tshi_channel_shape(out);
    const int64_t count = shape.count;
    tshi_block *stats = tshi_mem_alloc(ctx, TSH_MEM_STEP, tshi_dtype_reals(2 * count));
    tshi_block *room = tshi_mem_alloc(ctx, TSH_MEM_STEP, tshi_dtype_reals(3 * count));
    tshi_block *sums = tshi_mem_alloc(ctx, TSH_MEM_STEP, (size_t)(2 * count) * sizeof(double));
    tshi_block *scratch[3] = {NULL, NULL, NULL}, *unrounded = NULL;
    tsh_real *values[3] = {NULL, NULL, NULL}; /* x, weight and bias, dense */
    tsh_real *y = tshi_kernel_output(out, &unrounded);
    for (int i = 0; i < 3; i++)
        if (in[i]) values[i] = tshi_kernel_packed_reals(in[i], &scratch[i]);
    if (ctx->error.code == TSH_OK && stats && room && sums) {
        double *moments = (double *)tshi_mem_data(sums);
        tsh_real *planes = (tsh_real *)tshi_mem_data(room);
        const tsh_real *const data[] = {y, values[0], planes};
        if (p->training) tshi_batch_norm_train(ctx, shape, values[0], planes, in, p, moments);
        tshi_batch_norm_planes(p, count, in, moments, values[1], values[2],
                               (tsh_real *)tshi_mem_data(stats), planes);
        if (ctx->error.code == TSH_OK)
            tshi_channel_apply(ctx, shape, tshi_channel_scale, data, 3, count);
    }
    for (int i = 0; i < 3; i++) tshi_mem_release(ctx, scratch[i]);
    tshi_mem_release(ctx, sums);
    tshi_mem_release(ctx, room);
    tshi_kernel_output_done(out, unrounded);
    if (ctx->error.code == TSH_OK) return stats;
    tshi_mem_release(ctx, stats);
    return NULL;
}

/* Checks that running_mean and running_var are both given or both NULL, and, outside of training,
 * given. Returns 0 after an error. */
static int tshi_batch_norm_running(tsh_ctx *ctx, tsh_tensor *const *in, int training) {
    if ((in[3] != NULL) != (in[4] != NULL))
        return tshi_error_zero(ctx, TSH_ERR_ARGUMENT,
                               "tsh_batch_norm: of running_mean and running_var one is NULL; give "
                               "both or neither");
    return training || in[3] ||
           tshi_error_zero(ctx, TSH_ERR_ARGUMENT,
                           "tsh_batch_norm: without .training = 1 it needs running_mean and "
                           "running_var, and they are NULL");
}

static const tshi_op tshi_batch_norm_op = {"tsh_batch_norm",     "x weight bias",
                                           tshi_rule_batch_norm, tshi_batch_norm_backward,
                                           TSHI_X | TSHI_WEIGHT, 0};

TSH_API tsh_tensor *tsh_batch_norm(tsh_tensor *x, tsh_tensor *weight, tsh_tensor *bias,
                                   tsh_tensor *running_mean, tsh_tensor *running_var,
                                   const tsh_batch_norm_options *options) {
    static const char *const names[] = {"x", "weight", "bias", "running_mean", "running_var"};
    const tshi_op *op = &tshi_batch_norm_op;
    tsh_tensor *in[] = {x, weight, bias, running_mean, running_var}, *out;
    tsh_ctx *ctx = tshi_channel_check(op->name, names, in, 5);
    tshi_batch_norm p;
    tshi_output output;
    tshi_block *stats;
    memset(&p, 0, sizeof p);
    if (options) p.training = options->training != 0;
    if (!ctx || !tshi_batch_norm_running(ctx, in, p.training) ||
        !tshi_rule_run(op, in, 5, NULL, &output) || !(in[0] = tshi_channel_dense(op->name, x)))
        return NULL;
    p.momentum = tshi_map_option(options ? options->momentum : 0, 0.1);
    p.eps = tshi_map_option(options ? options->eps : 0, 1e-5);
    p.over_tp = ctx->tp.size > 1 && x->layout.kind == TSH_SHARDED && x->layout.dim != 1;
    p.over_dp = ctx->dp.size > 1 && options && options->over_dp;
    output.shape = tsh_shape_of(x);
    out = tshi_tensor_out(ctx, op->name, x->dtype, &output.shape, &output.layout);
    stats = out ? tshi_batch_norm_forward(in, out, &p) : NULL;
    if (!stats) return NULL;
    tshi_op_record(op, out, in, 3, output.partial, &p, sizeof p, stats);
    return ctx->error.code == TSH_OK ? out : NULL;
}
