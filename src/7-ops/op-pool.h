/* ========================================================================== */
/* >>op-pool                                        MARK: - op-pool (private) */
/* Pools: the maximum or the mean of windows of each channel.                 */
/* Needs: >>rule-net >>op >>conv-depth.                                       */
/* ========================================================================== */

/* A pool has the geometry of a depthwise convolution. Each row of the output is computed tap by tap
 * (element of the window): one tap is combined with all elements of the row at once. The windows of
 * adaptive pools differ in size, so they are summed one by one. */

typedef enum tshi_pool_kind { TSHI_POOL_MAX, TSHI_POOL_MEAN, TSHI_POOL_ADAPTIVE } tshi_pool_kind;

/* The params of the node. c: the sizes; c.batch is the number of planes: channels of all images. */
typedef struct tshi_pool_desc {
    tshi_conv c;
    tshi_pool_kind kind;
    int without_padding; /* 1: a mean does not count padding as elements */
    int64_t divisor;     /* divisor of means; 0: the number of elements */
} tshi_pool_desc;

/* What the threads share in forward or backward of a pool. Arrays are dense. */
typedef struct tshi_pooling {
    const tsh_ctx *ctx;
    const tshi_pool_desc *pool;
    tsh_real *x, *y; /* planes of the input and of the output, or their gradients */
    int32_t *index;  /* max pools: index in its input plane of each output element's maximum */
    int add;         /* backward: 1: adds to x's gradient, 0: overwrites it */
} tshi_pooling;

/* -- windows ----------------------------------------------------------------- */

/* A window along one dimension: covers elements [from, to) of the image, and `padded` elements if
 * those in the padding count. */
typedef struct tshi_window {
    int64_t from, to, padded;
} tshi_window;

/* Returns window i of an average pool along dimension d: 0, rows, or 1, columns. */
static tshi_window tshi_pool_window(const tshi_pool_desc *pool, int d, int64_t i) {
    const tshi_conv *c = &pool->c;
    const int64_t n = c->image[d], outs = c->map[d];
    tshi_window w;
    if (pool->kind == TSHI_POOL_ADAPTIVE) {
        w.from = i / outs * n + i % outs * n / outs;
        w.to = (i + 1) / outs * n + ((i + 1) % outs * n + outs - 1) / outs;
        w.padded = w.to - w.from;
        return w;
    }
    w.from = i * c->stride[d] - c->padding[d];
    w.to = tshi_base_min(w.from + c->kernel[d], n + c->padding[d]);
    w.padded = w.to - w.from;
    w.from = w.from < 0 ? 0 : w.from;
    w.to = tshi_base_min(w.to, n);
    return w;
}

/* Returns the number that the sum of window (y, x) is divided by; 1 if the window is empty. */
static tsh_real tshi_pool_divisor(const tshi_pool_desc *pool, int64_t y, int64_t x) {
    const tshi_window rows = tshi_pool_window(pool, 0, y), columns = tshi_pool_window(pool, 1, x);
    const int64_t inside = (rows.to - rows.from) * (columns.to - columns.from);
    if (rows.to <= rows.from || columns.to <= columns.from) return 1;
    return TSHI_R(pool->divisor           ? pool->divisor
                  : pool->without_padding ? inside
                                          : rows.padded * columns.padded);
}

/* -- the maximum --------------------------------------------------------------- */

/* Parameters of the kernel below. place: for each element of x[0], its index in the input plane;
 * first: the index of the first element of x[1] there. */
typedef struct tshi_pool_place {
    int32_t *place;
    int64_t first;
} tshi_pool_place;

/* Kernel: replaces each element of x[0] by that of x[1], and its place too, if x[1] is larger; the
 * elements of x[1] are x[1].step apart. NaN is larger than anything; a place below 0: no value
 * yet. */
TSHI_INLINE void tshi_pool_max_body(int64_t n, const tshi_operand *x, const tshi_pool_place *p) {
    tsh_real *TSHI_RESTRICT best = (tsh_real *)x[0].data;
    const tsh_real *TSHI_RESTRICT from = (const tsh_real *)x[1].data;
    int32_t *TSHI_RESTRICT place = p->place;
    const int32_t first = (int32_t)p->first, step = (int32_t)x[1].step;
    TSHI_EACH for (int32_t i = 0; i < (int32_t)n; i++) {
        const tsh_real v = from[(int64_t)i * step], b = best[i];
        const int take = (v > b) | (v != v) | (place[i] < 0);
        best[i] = take ? v : b;
        place[i] = take ? first + i * step : place[i];
    }
}
TSHI_KERNEL(tshi_pool_max, tshi_pool_place);

/* Computes row y of an output plane of maxima, and their indices in the input plane, `image`. */
static void tshi_pool_max_row(const tshi_pooling *p, const tsh_real *image, tsh_real *row,
                              int32_t *index, int64_t y) {
    const tshi_conv *c = &p->pool->c;
    for (int64_t i = 0; i < c->map[1]; i++) {
        row[i] = -TSHI_R(INFINITY);
        index[i] = -1;
    }
    for (int64_t t = 0; t < tshi_conv_area(c->kernel); t++) {
        const tshi_conv_stretch s = tshi_conv_reach(c, y, t / c->kernel[1], t % c->kernel[1]);
        /* the first output column that tap t reaches */
        const int64_t at = s.map - y * c->map[1];
        const tshi_pool_place place = {index + at, s.image};
        tshi_operand x[2];
        if (s.length <= 0) continue;
        x[0] = tshi_kernel_reals(row + at, 1);
        x[1] = tshi_kernel_reals(image + s.image, c->stride[1]);
        tshi_pool_max[p->ctx->isa](s.length, x, &place);
    }
}

/* -- the mean --------------------------------------------------------------------- */

/* Computes row y of an output plane of means, whose windows have one size. */
static void tshi_pool_mean_row(const tshi_pooling *p, const tsh_real *image, tsh_real *row,
                               int64_t y) {
    const tshi_conv *c = &p->pool->c;
    const tsh_real one = 1;
    for (int64_t i = 0; i < c->map[1]; i++) row[i] = 0;
    for (int64_t t = 0; t < tshi_conv_area(c->kernel); t++) {
        const tshi_conv_stretch s = tshi_conv_reach(c, y, t / c->kernel[1], t % c->kernel[1]);
        tshi_operand x[2];
        if (s.length <= 0) continue;
        x[0] = tshi_kernel_reals(row + (s.map - y * c->map[1]), 1);
        x[1] = tshi_kernel_reals(image + s.image, c->stride[1]);
        tshi_conv_line[p->ctx->isa](s.length, x, &one);
    }
    for (int64_t i = 0; i < c->map[1]; i++) row[i] /= tshi_pool_divisor(p->pool, y, i);
}

/* Computes row y of an output plane of means over adaptive windows. */
static void tshi_pool_adaptive_row(const tshi_pooling *p, const tsh_real *image, tsh_real *row,
                                   int64_t y) {
    const int64_t width = p->pool->c.image[1];
    const tshi_window rows = tshi_pool_window(p->pool, 0, y);
    for (int64_t i = 0; i < p->pool->c.map[1]; i++) {
        const tshi_window columns = tshi_pool_window(p->pool, 1, i);
        const int64_t length = columns.to - columns.from;
        tsh_real sum = 0;
        if (length == width) /* whole rows, which are contiguous */
            sum = tshi_kernel_sum(image + rows.from * width, (rows.to - rows.from) * width);
        for (int64_t r = rows.from; r < rows.to && length < width; r++)
            for (int64_t j = columns.from; j < columns.to; j++) sum += image[r * width + j];
        row[i] = sum / TSHI_R((rows.to - rows.from) * length);
    }
}

/* Computes rows [from, to) of the output, counted over all planes (a tshi_team_fn). */
static void tshi_pool_rows(void *job, int piece, int64_t from, int64_t to) {
    const tshi_pooling *p = (const tshi_pooling *)job;
    const tshi_conv *c = &p->pool->c;
    (void)piece;
    for (int64_t i = from; i < to; i++) {
        const tsh_real *image = p->x + i / c->map[0] * tshi_conv_area(c->image);
        tsh_real *row = p->y + i * c->map[1];
        if (p->pool->kind == TSHI_POOL_MAX)
            tshi_pool_max_row(p, image, row, p->index + i * c->map[1], i % c->map[0]);
        else if (p->pool->kind == TSHI_POOL_MEAN)
            tshi_pool_mean_row(p, image, row, i % c->map[0]);
        else
            tshi_pool_adaptive_row(p, image, row, i % c->map[0]);
    }
}

/* -- backward ---------------------------------------------------------------------- */

/* Adds g / divisor to all elements of window (y, x) of a plane. */
static void tshi_pool_spread(const tshi_pool_desc *pool, tsh_real *image, int64_t y, int64_t x,
                             tsh_real g) {
    const tshi_window rows = tshi_pool_window(pool, 0, y), columns = tshi_pool_window(pool, 1, x);
    g /= tshi_pool_divisor(pool, y, x);
    for (int64_t r = rows.from; r < rows.to; r++) {
        tsh_real *row = image + r * pool->c.image[1];
        for (int64_t j = columns.from; j < columns.to; j++) row[j] += g;
    }
}

/* Computes the gradient of planes [from, to) of the input (a tshi_team_fn). */
static void tshi_pool_planes(void *job, int piece, int64_t from, int64_t to) {
    const tshi_pooling *p = (const tshi_pooling *)job;
    const tshi_conv *c = &p->pool->c;
    const int64_t image = tshi_conv_area(c->image), map = tshi_conv_area(c->map);
    (void)piece;
    for (int64_t n = from; n < to; n++) {
        tsh_real *x = p->x + n * image;
        const tsh_real *g = p->y + n * map;
        if (!p->add) memset(x, 0, (size_t)image * sizeof *x);
        for (int64_t i = 0; i < map; i++)
            if (!p->index)
                tshi_pool_spread(p->pool, x, i / c->map[1], i % c->map[1], g[i]);
            else if (p->index[n * map + i] >= 0) /* the window has an element of the image */
                x[p->index[n * map + i]] += g[i];
    }
}

static void tshi_pool_backward(tshi_node *node) {
    const tshi_pool_desc *pool = (const tshi_pool_desc *)node->params;
    tshi_dest dest;
    if (!tshi_tape_dest(node, 0, &dest)) return;
    tshi_pooling p = {node->out->ctx,
                      pool,
                      dest.data,
                      tshi_tape_grad(node),
                      node->aux ? (int32_t *)tshi_mem_data(node->aux) : NULL,
                      dest.add};
    tshi_team_run(node->out->ctx,
                  tshi_kernel_parts(node->out->ctx, pool->c.batch, tshi_conv_area(pool->c.image)),
                  pool->c.batch, 1, tshi_pool_planes, &p);
}

/* -- the ops ------------------------------------------------------------------------- */

/* Sets the length of the output along dimension d. Returns 0 and an error if that is 0, or if there
 * is so much padding that a window could have no element of the image. */
static int tshi_pool_length(tsh_ctx *ctx, const char *op, tshi_conv *c, int d, int ceil_mode) {
    const int64_t span = tshi_conv_span(c->kernel[d], c->dilation[d]);
    const int64_t room = c->image[d] + 2 * c->padding[d] - span;
    if (c->padding[d] > c->kernel[d] / 2)
        return tsh_fail(ctx, TSH_ERR_ARGUMENT,
                        "%s: padding %lld is more than half of a window of %lld", op,
                        (long long)c->padding[d], (long long)c->kernel[d]) == TSH_OK;
    c->map[d] = room < 0 ? 0 : (room + (ceil_mode ? c->stride[d] - 1 : 0)) / c->stride[d] + 1;
    if (room < 0 && ceil_mode && room + c->stride[d] - 1 >= 0) c->map[d] = 1;
    if (c->map[d] > 0 && ceil_mode && (c->map[d] - 1) * c->stride[d] >= c->image[d] + c->padding[d])
        c->map[d]--; /* the last window would begin in the padding at the end */
    if (c->map[d] > 0) return 1;
    return tsh_fail(ctx, TSH_ERR_SHAPE,
                    "%s: a window that covers %lld elements leaves no output of %lld with padding "
                    "%lld; a smaller kernel would",
                    op, (long long)span, (long long)c->image[d],
                    (long long)c->padding[d]) == TSH_OK;
}

/* Sets the sizes in c for x, with windows of one element. Returns 0 and an error if x does not have
 * dims + 2 dimensions, or its images are empty or too large. */
static int tshi_pool_image(const char *op, const tsh_tensor *x, int dims, tshi_conv *c) {
    char text[TSHI_TEXT_SIZE];
    memset(c, 0, sizeof *c);
    c->groups = c->ins = c->outs = 1;
    if (x->ndim != dims + 2)
        return tsh_fail(x->ctx, TSH_ERR_SHAPE, "%s: x is %s; takes %s: tsh_reshape", op,
                        tshi_tensor_text(x, text),
                        dims == 1 ? "(N, C, L)" : "(N, C, H, W)") == TSH_OK;
    c->batch = x->local[0] * x->local[1];
    for (int d = 0; d < 2; d++) {
        c->image[d] = d + dims < 2 ? 1 : x->dim[d + dims];
        c->kernel[d] = c->stride[d] = c->dilation[d] = 1;
        if (c->image[d] > TSHI_CONV_MOST || c->image[d] < 1)
            return tsh_fail(x->ctx, TSH_ERR_SHAPE,
                            "%s: dimension %d of x has %lld elements, not 1 "
                            "to %d",
                            op, d + dims, (long long)c->image[d], TSHI_CONV_MOST) == TSH_OK;
    }
    if (tshi_conv_area(c->image) <= INT32_MAX) return 1;
    return tsh_fail(x->ctx, TSH_ERR_SHAPE,
                    "%s: a channel of x has %lld elements; at most %d are "
                    "possible",
                    op, (long long)tshi_conv_area(c->image), INT32_MAX) == TSH_OK;
}

/* Fills in *pool from the options, for a pool whose windows have one size. Returns 0 after an
 * error. */
static int tshi_pool_sizes(const char *op, const tsh_tensor *x, int dims, const tsh_pool_options *o,
                           tshi_pool_desc *pool) {
    tshi_conv *c = &pool->c;
    tsh_ctx *ctx = x->ctx;
    if (!tshi_pool_image(op, x, dims, c)) return 0;
    if (!o)
        return tsh_fail(ctx, TSH_ERR_ARGUMENT,
                        "%s: there are no options, and no size of the window", op) == TSH_OK;
    for (int d = 0; d < dims; d++)
        if (o->kernel[d] < 1 || o->kernel[d] > TSHI_CONV_MOST)
            return tsh_fail(ctx, TSH_ERR_ARGUMENT, "%s: kernel[%d] is %lld, not 1 to %d", op, d,
                            (long long)o->kernel[d], TSHI_CONV_MOST) == TSH_OK;
    if (!tshi_conv_pair(ctx, op, "kernel", o->kernel, dims, 1, 1, c->kernel) ||
        !tshi_conv_pair(ctx, op, "padding", o->padding, dims, 0, 0, c->padding) ||
        !tshi_conv_pair(ctx, op, "dilation", o->dilation, dims, 1, 1, c->dilation))
        return 0;
    for (int d = 0; d < dims; d++) {
        const int64_t kernel = o->kernel[d], stride = o->stride[d];
        int64_t own[2];
        if (!tshi_conv_pair(ctx, op, "stride", &stride, 1, kernel, 1, own)) return 0;
        c->stride[2 - dims + d] = own[1];
    }
    if (pool->kind == TSHI_POOL_MEAN && (c->dilation[0] > 1 || c->dilation[1] > 1))
        return tsh_fail(ctx, TSH_ERR_ARGUMENT, "%s: dilation is %lld, %lld; a mean takes 0 or 1",
                        op, (long long)c->dilation[0], (long long)c->dilation[1]) == TSH_OK;
    pool->without_padding = o->count_include_pad == TSH_NO;
    pool->divisor = pool->kind == TSHI_POOL_MEAN ? o->divisor_override : 0;
    return tshi_pool_length(ctx, op, c, 0, o->ceil_mode) &&
           tshi_pool_length(ctx, op, c, 1, o->ceil_mode);
}

/* Runs a pool; *pool is filled in. */
static tsh_tensor *tshi_pool_run(const tshi_op *op, tsh_tensor *x, int dims,
                                 const tshi_pool_desc *pool) {
    tsh_ctx *ctx = x->ctx;
    const int linear = pool->kind != TSHI_POOL_MAX;
    tsh_tensor *out;
    tshi_output output;
    tshi_block *scratch[2] = {NULL, NULL}, *index = NULL;
    tshi_pooling p = {ctx, pool, NULL, NULL, NULL, 0};
    if (!tshi_rule_run(op, &x, 1, &linear, &output)) return NULL;
    output.shape = tsh_shape_of(x);
    for (int d = 0; d < dims; d++) output.shape.dim[2 + d] = pool->c.map[2 - dims + d];
    if (!tshi_tensor_is_dense(x) && !(x = tshi_op_copy(op->name, x))) return NULL;
    out = tshi_tensor_out(ctx, op->name, x->dtype, &output.shape, &output.layout);
    if (!out) return NULL;
    if (!linear)
        index = tshi_mem_alloc(ctx, TSH_MEM_STEP, (size_t)tsh_local_numel(out) * sizeof(int32_t));
    p.index = index ? (int32_t *)tshi_mem_data(index) : NULL;
    p.x = tshi_kernel_packed_reals(x, &scratch[0]);
    p.y = tshi_kernel_output(out, &scratch[1]);
    if (p.x && p.y && ctx->error.code == TSH_OK)
        tshi_team_run(ctx,
                      tshi_kernel_parts(ctx, pool->c.batch * pool->c.map[0],
                                        pool->c.map[1] * tshi_conv_area(pool->c.kernel)),
                      pool->c.batch * pool->c.map[0], 1, tshi_pool_rows, &p);
    if (p.y) tshi_kernel_output_done(out, scratch[1]);
    tshi_mem_release(ctx, scratch[0]);
    tshi_op_record(op, out, &x, 1, output.partial, pool, sizeof *pool, index);
    return ctx->error.code == TSH_OK ? out : NULL;
}

/* Runs a pool whose windows have one size, which the options give. */
static tsh_tensor *tshi_pool_fixed(const tshi_op *op, tsh_tensor *x, int dims,
                                   const tsh_pool_options *options, tshi_pool_kind kind) {
    tshi_pool_desc pool;
    if (!tshi_tensor_check_floating(op->name, "x", &x, 1)) return NULL;
    memset(&pool, 0, sizeof pool);
    pool.kind = kind;
    return tshi_pool_sizes(op->name, x, dims, options, &pool) ? tshi_pool_run(op, x, dims, &pool)
                                                              : NULL;
}

/* Runs an adaptive pool, whose output has the size (height, width). */
static tsh_tensor *tshi_pool_adaptive(const tshi_op *op, tsh_tensor *x, int dims, int64_t height,
                                      int64_t width) {
    const int64_t size[2] = {height, width};
    tshi_pool_desc pool;
    if (!tshi_tensor_check_floating(op->name, "x", &x, 1)) return NULL;
    memset(&pool, 0, sizeof pool);
    pool.kind = TSHI_POOL_ADAPTIVE;
    if (!tshi_pool_image(op->name, x, dims, &pool.c)) return NULL;
    for (int d = 0; d < 2; d++) {
        pool.c.map[d] = size[d];
        if (size[d] < 1 || size[d] > TSHI_CONV_MOST)
            return tshi_error_null(
                x->ctx, TSH_ERR_ARGUMENT,
                "%s: the output is to have %lld elements along dimension %d, not "
                "1 to %d",
                op->name, (long long)size[d], d + dims, TSHI_CONV_MOST);
    }
    return tshi_pool_run(op, x, dims, &pool);
}

/* Defines the op of tsh_<name>. */
#define TSHI_POOL_OP(name)                                                                         \
    static const tshi_op tshi_##name##_op = {"tsh_" #name,       "x",       tshi_rule_pool,        \
                                             tshi_pool_backward, TSHI_NONE, 0};
/* Defines tsh_<name>, a pool that is not adaptive, so all its windows have one size; and its op. */
#define TSHI_POOL(name, dims, kind)                                                                \
    TSHI_POOL_OP(name)                                                                             \
    TSH_API tsh_tensor *tsh_##name(tsh_tensor *x, const tsh_pool_options *options) {               \
        return tshi_pool_fixed(&tshi_##name##_op, x, dims, options, kind);                         \
    }
TSHI_POOL(max_pool1d, 1, TSHI_POOL_MAX)
TSHI_POOL(max_pool2d, 2, TSHI_POOL_MAX)
TSHI_POOL(avg_pool1d, 1, TSHI_POOL_MEAN)
TSHI_POOL(avg_pool2d, 2, TSHI_POOL_MEAN)
#undef TSHI_POOL

TSHI_POOL_OP(adaptive_avg_pool1d)
TSHI_POOL_OP(adaptive_avg_pool2d)
#undef TSHI_POOL_OP
TSH_API tsh_tensor *tsh_adaptive_avg_pool1d(tsh_tensor *x, int64_t length) {
    return tshi_pool_adaptive(&tshi_adaptive_avg_pool1d_op, x, 1, 1, length);
}

TSH_API tsh_tensor *tsh_adaptive_avg_pool2d(tsh_tensor *x, int64_t height, int64_t width) {
    return tshi_pool_adaptive(&tshi_adaptive_avg_pool2d_op, x, 2, height, width);
}
