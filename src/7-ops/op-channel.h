/* ========================================================================== */
/* >>op-channel                                  MARK: - op-channel (private) */
/* Sums over channels, and maps with numbers per channel: for norms.          */
/* Needs: >>op.                                                               */
/* ========================================================================== */

/* A dense x (N, C, ..) is seen as (outer, count, inner): count channels, of which each has outer
 * runs of inner adjacent values. */
typedef struct tshi_channels {
    int64_t outer, count, inner;
} tshi_channels;

/* Returns x (N, C, ..), this rank's shard, as channels. */
static tshi_channels tshi_channel_shape(const tsh_tensor *x) {
    const tshi_channels shape = {x->local[0], x->local[1],
                                 tshi_tensor_product(x->local + 2, x->ndim - 2)};
    return shape;
}

/* A job that computes, for every channel c, the sums of u' and of u' v' over its values, where u'
 * is u - from_u[c] and v' is v - from_v[c]. At most 2048 values are added up in tsh_real before the
 * sum goes on in double; the order of additions depends on the shape alone. */
typedef struct tshi_channel_sums {
    tshi_channels shape;
    const tsh_real *u, *v;           /* shape (outer, count, inner) */
    const tsh_real *from_u, *from_v; /* shape (count); NULL: 0 */
    double *sums;                    /* shape (count, 2): results */
    int64_t first;                   /* the first channel that the kernel computes */
    int isa;                         /* which kernels run: TSHI_ISA_... */
} tshi_channel_sums;

/* Adds the sums of u' and of u' v' (see tshi_channel_sums) over n adjacent values to sum[0] and
 * sum[1]. */
TSHI_INLINE void tshi_channel_run(const tsh_real *u, const tsh_real *v, int64_t n, tsh_real from_u,
                                  tsh_real from_v, double *sum) {
    tsh_real lane[2 * TSHI_BLOCK], pad[2][TSHI_BLOCK];
    int i;
    memset(lane, 0, sizeof lane);
    for (int64_t e = 0; e < n; e += TSHI_BLOCK) {
        const tsh_real *us = u + e, *vs = v + e;
        if (n - e < TSHI_BLOCK) { /* padding adds 0 to both sums */
            tshi_kernel_pad(us, n - e, from_u, pad[0]);
            tshi_kernel_pad(vs, n - e, from_v, pad[1]);
            us = pad[0];
            vs = pad[1];
        }
        TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) {
            const tsh_real x = us[i] - from_u;
            lane[i] += x;
            lane[i + TSHI_BLOCK] += x * (vs[i] - from_v);
        }
    }
    sum[0] += (double)tshi_kernel_fold(lane);
    sum[1] += (double)tshi_kernel_fold(lane + TSHI_BLOCK);
}

/* Kernel for long runs: computes the sums of n channels from p->first on, one after the other. */
TSHI_INLINE void tshi_channel_rows_body(int64_t n, const tshi_operand *x,
                                        const tshi_channel_sums *p) {
    enum { RUN = 2048 }; /* most values that are added up in tsh_real */
    const int64_t inner = p->shape.inner;
    (void)x;
    for (int64_t c = p->first; c < p->first + n; c++) {
        const tsh_real from_u = p->from_u ? p->from_u[c] : 0, from_v = p->from_v ? p->from_v[c] : 0;
        double sum[2] = {0, 0};
        for (int64_t o = 0; o < p->shape.outer; o++) {
            const int64_t at = (o * p->shape.count + c) * inner; /* start of the run */
            for (int64_t e = 0; e < inner; e += RUN)
                tshi_channel_run(p->u + at + e, p->v + at + e, tshi_base_min(RUN, inner - e),
                                 from_u, from_v, sum);
        }
        p->sums[2 * c] = sum[0];
        p->sums[2 * c + 1] = sum[1];
    }
}
TSHI_KERNEL(tshi_channel_rows, tshi_channel_sums);

/* Adds u' and u' v' (see tshi_channel_sums) of up to TSHI_BLOCK columns, from column j on, over all
 * `outer` rows, to sum[0 ..] and sum[TSHI_BLOCK ..], an element per column. A row has count times
 * inner columns. from_u, from_v: one value per column. */
TSHI_INLINE void tshi_channel_block(const tshi_channel_sums *p, int64_t j, int64_t columns,
                                    const tsh_real *from_u, const tsh_real *from_v, double *sum) {
    const int64_t width = p->shape.count * p->shape.inner;
    tsh_real pad[2][TSHI_BLOCK];
    int i;
    for (int64_t o = 0; o < p->shape.outer; o++) {
        const tsh_real *us = tshi_kernel_load_block(p->u + o * width + j, 1, 0, columns, pad[0]);
        const tsh_real *vs = tshi_kernel_load_block(p->v + o * width + j, 1, 0, columns, pad[1]);
        TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) {
            const tsh_real x = us[i] - from_u[i];
            sum[i] += (double)x;
            sum[i + TSHI_BLOCK] += (double)(x * (vs[i] - from_v[i]));
        }
    }
}

/* Kernel for short runs: computes the sums of n channels from p->first on. It first sums each
 * column over all rows, then the columns of each channel. */
TSHI_INLINE void tshi_channel_columns_body(int64_t n, const tshi_operand *x,
                                           const tshi_channel_sums *p) {
    const int64_t inner = p->shape.inner, end = (p->first + n) * inner;
    tsh_real from_u[TSHI_BLOCK], from_v[TSHI_BLOCK];
    double sum[2 * TSHI_BLOCK];
    (void)x;
    memset(p->sums + 2 * p->first, 0, (size_t)(2 * n) * sizeof(double));
    for (int64_t j = p->first * inner; j < end; j += TSHI_BLOCK) {
        const int64_t columns = tshi_base_min(TSHI_BLOCK, end - j);
        memset(sum, 0, sizeof sum);
        for (int i = 0; i < TSHI_BLOCK; i++) {
            const int64_t c = (j + (i < columns ? i : 0)) / inner; /* channel of column j + i */
            from_u[i] = p->from_u ? p->from_u[c] : 0;
            from_v[i] = p->from_v ? p->from_v[c] : 0;
        }
        tshi_channel_block(p, j, columns, from_u, from_v, sum);
        for (int64_t i = 0; i < columns; i++) {
            p->sums[2 * ((j + i) / inner)] += sum[i];
            p->sums[2 * ((j + i) / inner) + 1] += sum[i + TSHI_BLOCK];
        }
    }
}
TSHI_KERNEL(tshi_channel_columns, tshi_channel_sums);

/* A tshi_team_fn: computes the sums of channels [from, to). */
static void tshi_channel_piece(void *job, int piece, int64_t from, int64_t to) {
    tshi_channel_sums part = *(const tshi_channel_sums *)job;
    (void)piece;
    part.first = from;
    (part.shape.inner < TSHI_BLOCK ? tshi_channel_columns
                                   : tshi_channel_rows)[part.isa](to - from, NULL, &part);
}

/* Computes the sums of all channels on the rank's threads. u, v, from_u, from_v and sums are those
 * of tshi_channel_sums. */
static void tshi_channel_sum(const tsh_ctx *ctx, tshi_channels shape, const tsh_real *u,
                             const tsh_real *from_u, const tsh_real *v, const tsh_real *from_v,
                             double *sums) {
    tshi_channel_sums all = {shape, u, v, from_u, from_v, sums, 0, ctx->isa};
    memset(sums, 0, (size_t)(2 * shape.count) * sizeof *sums);
    if (shape.outer && shape.count && shape.inner)
        tshi_team_run(ctx, tshi_kernel_parts(ctx, shape.count, shape.outer * shape.inner),
                      shape.count, shape.inner < TSHI_BLOCK ? TSHI_BLOCK : 1, tshi_channel_piece,
                      &all);
}

/* Writes the mean of each channel of x to moments[2 c], and the sum of squared distances from the
 * mean to moments[2 c + 1]. The first pass finds a number near the mean; the second sums distances
 * from it, so that little is lost if the mean is far from 0. pivot: scratch, shape (count). */
static void tshi_channel_moments(const tsh_ctx *ctx, tshi_channels shape, const tsh_real *x,
                                 tsh_real *pivot, double *moments) {
    const double n = (double)(shape.outer * shape.inner); /* values of a channel */
    tshi_channel_sum(ctx, shape, x, NULL, x, NULL, moments);
    for (int64_t c = 0; c < shape.count; c++) pivot[c] = n > 0 ? TSHI_R(moments[2 * c] / n) : 0;
    tshi_channel_sum(ctx, shape, x, pivot, x, pivot, moments);
    for (int64_t c = 0; c < shape.count; c++) {
        const double shift = n > 0 ? moments[2 * c] / n : 0; /* mean - pivot */
        const double square = moments[2 * c + 1] - shift * moments[2 * c];
        moments[2 * c] = (double)pivot[c] + shift;
        moments[2 * c + 1] = square < 0 ? 0 : square; /* below 0 only by rounding */
    }
}

/* The params of the two kernels below. Their factors, a number per channel each, are in arrays
 * (planes) that follow each other. */
typedef struct tshi_channel_map {
    int64_t plane; /* number of values in a plane */
} tshi_channel_map;

/* Kernel: y = (x - mean) scale + shift. Operands: y, x, the planes mean, scale and shift. */
TSHI_INLINE void tshi_channel_scale_body(int64_t n, const tshi_operand *x,
                                         const tshi_channel_map *p) {
    const tsh_real *in = (const tsh_real *)x[1].data, *mean = (const tsh_real *)x[2].data;
    const tsh_real *scale = mean + p->plane, *shift = scale + p->plane;
    const int64_t step = x[2].step;
    tsh_real pad[4][TSHI_BLOCK], out[TSHI_BLOCK];
    int i;
    for (int64_t e = 0; e < n; e += TSHI_BLOCK) {
        const tsh_real *xs = tshi_kernel_load_block(in, x[1].step, e, n, pad[0]);
        const tsh_real *ms = tshi_kernel_load_block(mean, step, e, n, pad[1]);
        const tsh_real *ss = tshi_kernel_load_block(scale, step, e, n, pad[2]);
        const tsh_real *bs = tshi_kernel_load_block(shift, step, e, n, pad[3]);
        TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) out[i] = (xs[i] - ms[i]) * ss[i] + bs[i];
        tshi_kernel_store_block((tsh_real *)x[0].data, x[0].step, e, n, out, 0);
    }
}
TSHI_KERNEL(tshi_channel_scale, tshi_channel_map);

/* Kernel: dx = dy a - b - (x - mean) k. Operands: dx, dy, x, the planes mean, a, b and k. */
TSHI_INLINE void tshi_channel_back_body(int64_t n, const tshi_operand *x,
                                        const tshi_channel_map *p) {
    const tsh_real *dy = (const tsh_real *)x[1].data, *in = (const tsh_real *)x[2].data;
    const tsh_real *mean = (const tsh_real *)x[3].data, *a = mean + p->plane;
    const tsh_real *b = a + p->plane, *k = b + p->plane;
    const int64_t step = x[3].step;
    tsh_real pad[6][TSHI_BLOCK], out[TSHI_BLOCK];
    int i;
    for (int64_t e = 0; e < n; e += TSHI_BLOCK) {
        const tsh_real *gs = tshi_kernel_load_block(dy, x[1].step, e, n, pad[0]);
        const tsh_real *xs = tshi_kernel_load_block(in, x[2].step, e, n, pad[1]);
        const tsh_real *ms = tshi_kernel_load_block(mean, step, e, n, pad[2]);
        const tsh_real *as = tshi_kernel_load_block(a, step, e, n, pad[3]);
        const tsh_real *bs = tshi_kernel_load_block(b, step, e, n, pad[4]);
        const tsh_real *ks = tshi_kernel_load_block(k, step, e, n, pad[5]);
        TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++)
            out[i] = gs[i] * as[i] - bs[i] - (xs[i] - ms[i]) * ks[i];
        tshi_kernel_store_block((tsh_real *)x[0].data, x[0].step, e, n, out, 0);
    }
}
TSHI_KERNEL(tshi_channel_back, tshi_channel_map);

/* Runs tshi_channel_scale or tshi_channel_back over all values. data: its n operands, dense and of
 * shape (outer, count, inner), and last the planes, with `plane` numbers each: one per channel, or
 * one per sample and channel. */
static void tshi_channel_apply(const tsh_ctx *ctx, tshi_channels shape,
                               const tshi_kernel_fn *kernel, const tsh_real *const *data, int n,
                               int64_t plane) {
    const tshi_channel_map map = {plane};
    tshi_loop loop;
    memset(&loop, 0, sizeof loop);
    loop.ctx = ctx;
    loop.ndim = 3;
    loop.n = n;
    loop.dim[0] = shape.outer;
    loop.dim[1] = shape.count;
    loop.dim[2] = shape.inner;
    for (int i = 0; i < n; i++) {
        const int planes = i == n - 1;
        loop.x[i] = tshi_kernel_reals(data[i], 0);
        loop.stride[i][0] = planes ? (plane > shape.count ? shape.count : 0)
                                   : shape.count * shape.inner;
        loop.stride[i][1] = planes ? 1 : shape.inner;
        loop.stride[i][2] = !planes;
    }
    tshi_kernel_run(&loop, kernel[ctx->isa], &map);
}

/* -- what norms over channels check ------------------------------------------ */

/* Checks n inputs of a norm: in[0], x (N, C, ..), and the others, each of shape (C) or NULL.
 * Returns the ctx; NULL after an error. */
static tsh_ctx *tshi_channel_check(const char *op, const char *const *names, tsh_tensor *const *in,
                                   int n) {
    enum { MOST = 5 };
    tsh_tensor *given[MOST]; /* the inputs that are not NULL */
    char list[TSHI_TEXT_SIZE] = "", tx[TSHI_TEXT_SIZE], tw[TSHI_TEXT_SIZE];
    tsh_ctx *ctx;
    int count = 0;
    for (int i = 0; i < n; i++) {
        if (!in[i] && i > 0) continue;
        given[count++] = in[i];
        tsh_text_add(list, sizeof list, "%s%s", i ? " " : "", names[i]);
    }
    ctx = tshi_tensor_check_floating(op, list, given, count);
    if (ctx && in[0]->ndim < 2)
        return (tsh_ctx *)tshi_error_null(ctx, TSH_ERR_SHAPE,
                                          "%s: input %s has no dimension of channels; takes (N, C) "
                                          "or (N, C, ..)",
                                          op, tshi_tensor_text(in[0], tx));
    for (int i = 1; i < n && ctx; i++)
        if (in[i] && (in[i]->ndim != 1 || in[i]->dim[0] != in[0]->dim[1]))
            return (tsh_ctx *)tshi_error_null(
                ctx, TSH_ERR_SHAPE,
                "%s: input %s, %s %s; it must have as many elements as the input has channels (its "
                "dimension 1)",
                op, tshi_tensor_text(in[0], tx), names[i], tshi_tensor_text(in[i], tw));
    return ctx;
}

/* Returns x, or a dense copy of it. NULL: no memory. */
static tsh_tensor *tshi_channel_dense(const char *op, tsh_tensor *x) {
    return tshi_tensor_is_dense(x) ? x : tshi_op_copy(op, x);
}

/* Returns the memory of a block; NULL if there is no block. */
static void *tshi_channel_memory(tshi_block *block) {
    return block ? tshi_mem_data(block) : NULL;
}
