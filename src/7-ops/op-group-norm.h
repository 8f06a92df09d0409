/* ========================================================================== */
/* >>op-group-norm                            MARK: - op-group-norm (private) */
/* Group norm (Wu & He 2018); instance norm, its case of one channel a group. */
/* Needs: >>rule-net >>op-map >>op-channel.                                   */
/* ========================================================================== */

/* The channels of each sample are normalised in groups. A group of d values has one mean, and one
 * rstd = 1 / sqrt(variance + eps). With xh = (x - mean) rstd, h = w dy, and mean() over the group:
 *
 *     y = w xh + b,   dx = (h - mean(h) - xh mean(h xh)) rstd
 *     dw += sum(dy xh),   db += sum(dy),   over samples and the values of a channel */
typedef struct tshi_group_norm {
    int64_t groups, each; /* number of groups on this rank; channels per group */
    double eps;           /* added to the variance */
} tshi_group_norm;

/* Writes mean and rstd of each group of each sample to stats (samples, groups, 2). Returns 0 if
 * there is no memory. */
static int tshi_group_norm_stats(tsh_ctx *ctx, const tshi_group_norm *p, tshi_channels shape,
                                 const tsh_real *x, tsh_real *stats) {
    const int64_t rows = shape.outer * p->groups, d = p->each * shape.inner;
    const tshi_channels groups = {1, rows, d}; /* seen as a channel: a group of one sample */
    tshi_block *sums = tshi_mem_alloc(ctx, TSH_MEM_STEP, (size_t)(2 * rows) * sizeof(double));
    if (!sums) return 0;
    double *moments = (double *)tshi_mem_data(sums);
    tshi_channel_moments(ctx, groups, x, stats, moments);
    for (int64_t r = 0; r < rows; r++) {
        const double variance = d > 0 ? moments[2 * r + 1] / (double)d : 0;
        stats[2 * r] = TSHI_R(moments[2 * r]);
        stats[2 * r + 1] = TSHI_R(1 / sqrt(variance + p->eps));
    }
    tshi_mem_release(ctx, sums);
    return 1;
}

/* Writes the three planes that tshi_channel_scale reads, mean, rstd w and b, each with a number per
 * sample and channel. w and b: one number per channel, or NULL. */
static void tshi_group_norm_planes(const tshi_group_norm *p, tshi_channels shape,
                                   const tsh_real *stats, const tsh_real *w, const tsh_real *b,
                                   tsh_real *planes) {
    const int64_t plane = shape.outer * shape.count;
    for (int64_t i = 0; i < plane; i++) {
        const tsh_real *of = stats + 2 * (i / p->each); /* mean and rstd of the channel's group */
        const int64_t c = i % shape.count;
        planes[i] = of[0];
        planes[plane + i] = w ? w[c] * of[1] : of[1];
        planes[2 * plane + i] = b ? b[c] : 0;
    }
}

/* Backward for one group of one sample: adds to dw and db of its channels, in grads (2, count), and
 * writes its part of the four planes for tshi_channel_back. at: index of the group's first channel
 * among the channels of all samples; c: its index in the sample. sums: those of dy and of dy (x -
 * mean), for every sample and channel. d: number of values of the group. */
static void tshi_group_norm_group(const tshi_group_norm *p, int64_t at, int64_t c, double d,
                                  const tsh_real *stats, const tsh_real *w, const double *sums,
                                  double *grads, int64_t count, int64_t plane, tsh_real *planes) {
    const double mean = (double)stats[0], rstd = (double)stats[1];
    double h = 0, hx = 0; /* sums of h, and of h (x - mean), over the group */
    for (int64_t i = 0; i < p->each; i++) {
        const double factor = w ? (double)w[c + i] : 1, *sum = sums + 2 * (at + i);
        h += factor * sum[0];
        hx += factor * sum[1];
        grads[c + i] += d > 0 ? sum[1] * rstd : 0; /* if d is 0, rstd may be infinite */
        grads[count + c + i] += sum[0];
    }
    for (int64_t i = at; i < at + p->each; i++) {
        planes[i] = TSHI_R(mean);
        planes[plane + i] = TSHI_R((w ? (double)w[c + i - at] : 1) * rstd);
        planes[2 * plane + i] = d > 0 ? TSHI_R(rstd * h / d) : 0;
        planes[3 * plane + i] = d > 0 ? TSHI_R(rstd * rstd * rstd * hx / d) : 0;
    }
}

/* Backward: writes the four planes for tshi_channel_back, and dw and db, shape (2, count), to
 * grads. sums: scratch, shape (samples, count, 2). Before it gets its planes, `planes` is scratch
 * for a mean per sample and channel. */
static void tshi_group_norm_back(tsh_ctx *ctx, const tshi_group_norm *p, tshi_channels shape,
                                 const tsh_real *dy, const tsh_real *x, const tsh_real *stats,
                                 const tsh_real *w, double *sums, double *grads, tsh_real *planes) {
    const int64_t count = shape.count, plane = shape.outer * count;
    const tshi_channels each = {1, plane, shape.inner}; /* a channel of one sample */
    for (int64_t i = 0; i < plane; i++) planes[i] = stats[2 * (i / p->each)];
    tshi_channel_sum(ctx, each, dy, NULL, x, planes, sums);
    memset(grads, 0, (size_t)(2 * count) * sizeof *grads);
    for (int64_t i = 0; i < plane; i += p->each)
        tshi_group_norm_group(p, i, i % count, (double)(p->each * shape.inner),
                              stats + 2 * (i / p->each), w, sums, grads, count, plane, planes);
}

/* Adds `grad`, n numbers in double, to the gradient of input i. room: scratch, shape (n). */
static void tshi_group_norm_add(tshi_node *node, int i, const tshi_dest *dest, const double *grad,
                                int64_t n, tsh_real *room) {
    const int64_t one = 1;
    for (int64_t c = 0; c < n; c++) room[c] = TSHI_R(grad[c]);
    tshi_tape_accumulate(node->in[i], dest, room, &one);
}

static void tshi_group_norm_backward(tshi_node *node) {
    const tshi_group_norm *p = (const tshi_group_norm *)node->params;
    tsh_tensor *x = node->in[0];
    tsh_ctx *ctx = x->ctx;
    const tshi_channels shape = tshi_channel_shape(x);
    const int64_t count = shape.count, plane = shape.outer * count;
    tshi_block *room = tshi_mem_alloc(ctx, TSH_MEM_STEP, tshi_dtype_reals(4 * plane + count));
    tshi_block *more = tshi_mem_alloc(ctx, TSH_MEM_STEP,
                                      (size_t)(2 * plane + 2 * count) * sizeof(double));
    tshi_block *saved[2] = {NULL, NULL}, *scratch = NULL;
    tsh_real *planes = (tsh_real *)tshi_channel_memory(room), *dx = NULL;
    double *sums = (double *)tshi_channel_memory(more);
    const tsh_real *w = NULL;
    int64_t stride[TSH_MAX_DIMS];
    tshi_dest dest[3];
    int needed[3];
    for (int i = 0; i < 3; i++) needed[i] = tshi_tape_dest(node, i, &dest[i]);
    const tsh_real *values = tshi_tape_saved_reals(node, 0, stride, &saved[0]);
    if (node->in[1]) w = tshi_tape_saved_reals(node, 1, stride, &saved[1]);
    if (needed[0]) dx = tshi_op_dense_dest(x, &dest[0], &scratch);
    if (planes && sums && values && ctx->error.code == TSH_OK) {
        const tsh_real *dy = tshi_tape_grad(node);
        const tsh_real *const data[] = {dx, dy, values, planes};
        double *grads = sums + 2 * plane; /* memory for dw and db */
        tshi_group_norm_back(ctx, p, shape, dy, values, (const tsh_real *)tshi_mem_data(node->aux),
                             w, sums, grads, planes);
        if (dx) tshi_channel_apply(ctx, shape, tshi_channel_back, data, 4, plane);
        if (needed[0]) tshi_op_accumulate(x, &dest[0], scratch);
        for (int i = 1; i < 3; i++)
            if (needed[i])
                tshi_group_norm_add(node, i, &dest[i], grads + (i - 1) * count, count,
                                    planes + 4 * plane);
    }
    tshi_mem_release(ctx, saved[0]);
    tshi_mem_release(ctx, saved[1]);
    tshi_mem_release(ctx, room);
    tshi_mem_release(ctx, more);
}

/* Computes out from the inputs x, weight and bias. Returns mean and rstd of each group, for
 * backward. NULL: an error. */
static tshi_block *tshi_group_norm_forward(tsh_tensor *const *in, tsh_tensor *out,
                                           const tshi_group_norm *p) {
    tsh_ctx *ctx = out->ctx;
    const tshi_channels shape = tshi_channel_shape(out);
    const int64_t plane = shape.outer * shape.count;
    tshi_block *stats = tshi_mem_alloc(ctx, TSH_MEM_STEP,
                                       tshi_dtype_reals(2 * shape.outer * p->groups));
    tshi_block *room = tshi_mem_alloc(ctx, TSH_MEM_STEP, tshi_dtype_reals(3 * plane));
    tshi_block *scratch[3] = {NULL, NULL, NULL}, *unrounded = NULL;
    tsh_real *values[3] = {NULL, NULL, NULL}; /* x, weight and bias, dense */
    tsh_real *y = tshi_kernel_output(out, &unrounded);
    for (int i = 0; i < 3; i++)
        if (in[i]) values[i] = tshi_kernel_packed_reals(in[i], &scratch[i]);
    if (ctx->error.code == TSH_OK && stats && room) {
        tsh_real *planes = (tsh_real *)tshi_mem_data(room);
        tsh_real *of = (tsh_real *)tshi_mem_data(stats);
        const tsh_real *const data[] = {y, values[0], planes};
        if (tshi_group_norm_stats(ctx, p, shape, values[0], of)) {
            tshi_group_norm_planes(p, shape, of, values[1], values[2], planes);
            tshi_channel_apply(ctx, shape, tshi_channel_scale, data, 3, plane);
        }
    }
    for (int i = 0; i < 3; i++) tshi_mem_release(ctx, scratch[i]);
    tshi_mem_release(ctx, room);
    tshi_kernel_output_done(out, unrounded);
    if (ctx->error.code == TSH_OK) return stats;
    tshi_mem_release(ctx, stats);
    return NULL;
}

static const tshi_op tshi_group_norm_op = {"tsh_group_norm",     "x weight bias",
                                           tshi_rule_group_norm, tshi_group_norm_backward,
                                           TSHI_X | TSHI_WEIGHT, 0};
static const tshi_op tshi_group_norm_instance_op = {"tsh_instance_norm",  "x weight bias",
                                                    tshi_rule_group_norm, tshi_group_norm_backward,
                                                    TSHI_X | TSHI_WEIGHT, 0};

/* Runs tsh_group_norm, or tsh_instance_norm if `op` is its op: then each channel is a group, and
 * `groups` is not read. */
static tsh_tensor *tshi_group_norm_run(const tshi_op *op, tsh_tensor *x, int64_t groups,
                                       tsh_tensor *weight, tsh_tensor *bias, double eps) {
    static const char *const names[] = {"x", "weight", "bias"};
    tsh_tensor *in[] = {x, weight, bias}, *out;
    tsh_ctx *ctx = tshi_channel_check(op->name, names, in, 3);
    tshi_group_norm p = {0, 0, tshi_map_option(eps, 1e-5)};
    tshi_output output;
    tshi_block *stats;
    char text[TSHI_TEXT_SIZE];
    if (!ctx) return NULL;
    if (op == &tshi_group_norm_instance_op) groups = x->dim[1] ? x->dim[1] : 1;
    if (groups < 1 || x->dim[1] % groups)
        return tshi_error_null(
            ctx, TSH_ERR_SHAPE,
            "%s: %lld groups do not divide the channels of input %s; groups must "
            "be a divisor of %lld",
            op->name, (long long)groups, tshi_tensor_text(x, text), (long long)x->dim[1]);
    p.each = x->dim[1] ? x->dim[1] / groups : 1;
    if (!tshi_rule_run(op, in, 3, &p.each, &output) || !(in[0] = tshi_channel_dense(op->name, x)))
        return NULL;
    p.groups = x->local[1] / p.each;
    output.shape = tsh_shape_of(x);
    out = tshi_tensor_out(ctx, op->name, x->dtype, &output.shape, &output.layout);
    stats = out ? tshi_group_norm_forward(in, out, &p) : NULL;
    if (!stats) return NULL;
    tshi_op_record(op, out, in, 3, output.partial, &p, sizeof p, stats);
    return ctx->error.code == TSH_OK ? out : NULL;
}

TSH_API tsh_tensor *tsh_group_norm(tsh_tensor *x, int64_t groups, tsh_tensor *weight,
                                   tsh_tensor *bias, double eps) {
    return tshi_group_norm_run(&tshi_group_norm_op, x, groups, weight, bias, eps);
}

TSH_API tsh_tensor *tsh_instance_norm(tsh_tensor *x, tsh_tensor *weight, tsh_tensor *bias,
                                      double eps) {
    char text[TSHI_TEXT_SIZE];
    if (x && x->ctx->error.code == TSH_OK &&
        (x->ndim < 3 || tshi_tensor_product(x->dim + 2, x->ndim - 2) == 1))
        return tshi_error_null(x->ctx, TSH_ERR_SHAPE,
                               "tsh_instance_norm: input %s; takes (N, C, ..) with several values "
                               "of each channel",
                               tshi_tensor_text(x, text));
    return tshi_group_norm_run(&tshi_group_norm_instance_op, x, 0, weight, bias, eps);
}
