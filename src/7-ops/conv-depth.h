/* ========================================================================== */
/* >>conv-depth                                  MARK: - conv-depth (private) */
/* Depthwise convolutions: each channel of the image for itself, by loops.    */
/* Needs: >>tape-grad >>conv.                                                 */
/* ========================================================================== */

/* The image is what a convolution reads, the map what it gives (of a transposed one, the reverse);
 * see >>conv. If a group has one channel of the image and few of the map, a matrix product would
 * have too few rows. Here each plane of the map is computed from its plane of the image, row by
 * row: each tap (element of the kernel) adds a multiple of a row of the image to a row of the
 * map. */

enum { TSHI_CONV_FEW = 4 }; /* max map channels per group of a depthwise convolution */

/* Returns 1 if c is a depthwise convolution: one image channel and at most TSHI_CONV_FEW map
 * channels per group. */
static int tshi_conv_is_depthwise(const tshi_conv *c) {
    return c->ins == 1 && c->outs <= TSHI_CONV_FEW && c->outs > 0;
}

/* What the threads of a rank share while they compute a depthwise convolution. */
typedef struct tshi_conv_depth {
    const tsh_ctx *ctx;
    const tshi_conv *c;
    tsh_real *image;      /* shape (N, groups, H, W) */
    tsh_real *map;        /* shape (N, groups * outs, OH, OW) */
    tsh_real *weight;     /* shape (groups * outs, KH, KW) */
    const tsh_real *bias; /* one value per channel of the output; or NULL */
    int add;              /* 1: adds to the output's values, 0: overwrites them */
} tshi_conv_depth;

/* Kernel: x[0] += w x[1], with w = *weight; the elements of x[i] are x[i].step apart. */
TSHI_INLINE void tshi_conv_line_body(int64_t n, const tshi_operand *x, const tsh_real *weight) {
    tsh_real *TSHI_RESTRICT to = (tsh_real *)x[0].data;
    const tsh_real *TSHI_RESTRICT from = (const tsh_real *)x[1].data;
    const int64_t st = x[0].step, sf = x[1].step;
    const tsh_real w = *weight;
    if (st == 1 && sf == 1)
        TSHI_EACH for (int64_t i = 0; i < n; i++) to[i] += w * from[i];
    else
        TSHI_EACH for (int64_t i = 0; i < n; i++) to[i * st] += w * from[i * sf];
}
TSHI_KERNEL(tshi_conv_line, tsh_real);

/* Kernel: adds the products of x[1] and x[2], element by element, to the lanes x[0] (TSHI_BLOCK
 * partial sums). x[1] is contiguous, the elements of x[2] are x[2].step apart. */
TSHI_INLINE void tshi_conv_dot_body(int64_t n, const tshi_operand *x, const void *params) {
    tsh_real *lane = (tsh_real *)x[0].data, pad[2][TSHI_BLOCK];
    const tsh_real *a = (const tsh_real *)x[1].data, *b = (const tsh_real *)x[2].data;
    (void)params;
    for (int64_t e = 0; e < n; e += TSHI_BLOCK) {
        const int64_t m = tshi_base_min(n - e, TSHI_BLOCK);
        const tsh_real *l = a + e, *r = b + e * x[2].step;
        if (m < TSHI_BLOCK) tshi_kernel_pad(l, m, 0, pad[0]);
        if (m < TSHI_BLOCK || x[2].step != 1) {
            for (int i = 0; i < TSHI_BLOCK; i++) pad[1][i] = 0;
            for (int64_t i = 0; i < m; i++) pad[1][i] = r[i * x[2].step];
            r = pad[1];
        }
        tshi_kernel_dot_step(lane, m < TSHI_BLOCK ? pad[0] : l, r);
    }
}
TSHI_KERNEL(tshi_conv_dot, void);

/* A part of a row of the map, and the elements of the image that one tap (element of the kernel)
 * relates to it: element i of the part and image element i * stride. */
typedef struct tshi_conv_stretch {
    int64_t map, image; /* index of the first element in the map's, the image's plane */
    int64_t length;
} tshi_conv_stretch;

/* Returns the part of row y of the map for which tap (ky, kx) of the kernel lies inside the image,
 * not in its padding. */
static tshi_conv_stretch tshi_conv_reach(const tshi_conv *c, int64_t y, int64_t ky, int64_t kx) {
    const int64_t iy = y * c->stride[0] + ky * c->dilation[0] - c->padding[0];
    const int64_t offset = kx * c->dilation[1] - c->padding[1], step = c->stride[1];
    const int64_t from = offset < 0 ? tshi_base_ceil(-offset, step) : 0;
    const int64_t to = c->image[1] > offset
                           ? tshi_base_min(c->map[1], tshi_base_ceil(c->image[1] - offset, step))
                           : 0;
    const tshi_conv_stretch s = {y * c->map[1] + from, iy * c->image[1] + from * step + offset,
                                 iy < 0 || iy >= c->image[0] || to < from ? 0 : to - from};
    return s;
}

/* Unless d->add is 1, fills a plane of the output with the bias of its channel, or 0. */
static void tshi_conv_depth_begin(const tshi_conv_depth *d, tsh_real *plane, int64_t area,
                                  int64_t channel) {
    const tsh_real b = d->bias ? d->bias[channel] : 0;
    for (int64_t i = 0; i < area && !d->add; i++) plane[i] = b;
}

/* Convolves one plane with its kernel, `weight`: adds the products of the image's plane to the
 * map's or, if to_image is 1, those of the map's plane to the image's. */
static void tshi_conv_depth_plane(const tshi_conv_depth *d, tsh_real *map, tsh_real *image,
                                  const tsh_real *weight, int to_image) {
    const tshi_conv *c = d->c;
    tshi_operand x[2];
    for (int64_t y = 0; y < c->map[0]; y++)
        for (int64_t t = 0; t < tshi_conv_area(c->kernel); t++) {
            const tshi_conv_stretch s = tshi_conv_reach(c, y, t / c->kernel[1], t % c->kernel[1]);
            if (s.length <= 0) continue;
            x[to_image] = tshi_kernel_reals(map + s.map, 1);
            x[!to_image] = tshi_kernel_reals(image + s.image, c->stride[1]);
            tshi_conv_line[d->ctx->isa](s.length, x, &weight[t]);
        }
}

/* Computes planes [from, to) of the map; plane number: n * channels + channel (a tshi_team_fn). */
static void tshi_conv_depth_maps(void *job, int piece, int64_t from, int64_t to) {
    const tshi_conv_depth *d = (const tshi_conv_depth *)job;
    const tshi_conv *c = d->c;
    const int64_t channels = c->groups * c->outs, area = tshi_conv_area(c->map);
    (void)piece;
    for (int64_t i = from; i < to; i++) {
        tsh_real *map = d->map + i * area;
        tshi_conv_depth_begin(d, map, area, i % channels);
        tshi_conv_depth_plane(d, map, d->image + i / c->outs * tshi_conv_area(c->image),
                              d->weight + i % channels * tshi_conv_area(c->kernel), 0);
    }
}

/* Computes planes [from, to) of the image; plane number: n * groups + channel (a tshi_team_fn). */
static void tshi_conv_depth_images(void *job, int piece, int64_t from, int64_t to) {
    const tshi_conv_depth *d = (const tshi_conv_depth *)job;
    const tshi_conv *c = d->c;
    const int64_t area = tshi_conv_area(c->image);
    (void)piece;
    for (int64_t i = from; i < to; i++) {
        tsh_real *image = d->image + i * area;
        tshi_conv_depth_begin(d, image, area, i % c->groups);
        for (int64_t o = 0; o < c->outs; o++)
            tshi_conv_depth_plane(
                d, d->map + (i * c->outs + o) * tshi_conv_area(c->map), image,
                d->weight + (i % c->groups * c->outs + o) * tshi_conv_area(c->kernel), 1);
    }
}

/* Computes the gradient of the weights of map channels [from, to) (a tshi_team_fn). Each element is
 * a sum over the images, in order. */
static void tshi_conv_depth_weights(void *job, int piece, int64_t from, int64_t to) {
    const tshi_conv_depth *d = (const tshi_conv_depth *)job;
    const tshi_conv *c = d->c;
    const int64_t channels = c->groups * c->outs;
    tsh_real lane[TSHI_BLOCK];
    tshi_operand x[3];
    (void)piece;
    memset(lane, 0, sizeof lane);
    x[0] = tshi_kernel_reals(lane, 1);
    for (int64_t oc = from; oc < to; oc++)
        for (int64_t t = 0; t < tshi_conv_area(c->kernel); t++) {
            tsh_real *sum = d->weight + oc * tshi_conv_area(c->kernel) + t;
            memset(lane, 0, sizeof lane);
            for (int64_t i = 0; i < c->batch * c->map[0]; i++) { /* over the rows of all maps */
                const int64_t n = i / c->map[0];
                const tshi_conv_stretch s = tshi_conv_reach(c, i % c->map[0], t / c->kernel[1],
                                                            t % c->kernel[1]);
                const tsh_real *map = d->map + (n * channels + oc) * tshi_conv_area(c->map);
                const tsh_real *image = d->image +
                                        (n * c->groups + oc / c->outs) * tshi_conv_area(c->image);
                if (s.length <= 0) continue;
                x[1] = tshi_kernel_reals(map + s.map, 1);
                x[2] = tshi_kernel_reals(image + s.image, c->stride[1]);
                tshi_conv_dot[d->ctx->isa](s.length, x, NULL);
            }
            *sum = tshi_kernel_fold(lane) + (d->add ? *sum : 0);
        }
}

/* Runs fn on the rank's threads, over `planes` planes (or channels), each of which takes `each`
 * multiply-adds. */
static void tshi_conv_depth_run(tshi_conv_depth *d, tshi_team_fn fn, int64_t planes, int64_t each) {
    const tsh_ctx *ctx = d->ctx;
    tshi_team_run(ctx, tshi_kernel_parts(ctx, planes, each), planes, 1, fn, d);
    if (ctx->trace) ctx->trace->flops += 2.0 * (double)planes * (double)each;
}

/* Casts const away: tshi_conv_depth has pointers that only some of the functions write through. */
static tsh_real *tshi_conv_unconst(const tsh_real *data) {
    return (tsh_real *)tshi_kernel_unconst(data);
}

/* Computes y, the output of the depthwise convolution c, from its input x. to_image 1: x is a map
 * and y an image, else the reverse. bias may be NULL; add 1: adds to y. */
static void tshi_conv_depth_apply(tsh_ctx *ctx, const tshi_conv *c, const tsh_real *x,
                                  const tsh_real *weight, const tsh_real *bias, tsh_real *y,
                                  int to_image, int add) {
    const int64_t each = tshi_conv_area(c->map) * tshi_conv_area(c->kernel);
    const int64_t planes = c->batch * c->groups;
    tshi_conv_depth d = {ctx,
                         c,
                         to_image ? y : tshi_conv_unconst(x),
                         to_image ? tshi_conv_unconst(x) : y,
                         tshi_conv_unconst(weight),
                         bias,
                         add};
    if (to_image)
        tshi_conv_depth_run(&d, tshi_conv_depth_images, planes, each * c->outs);
    else
        tshi_conv_depth_run(&d, tshi_conv_depth_maps, planes * c->outs, each);
}

/* Computes the gradient of the weight of a depthwise convolution from its image and map; one of
 * these is the gradient of the output. */
static void tshi_conv_depth_weight(tsh_ctx *ctx, const tshi_conv *c, const tsh_real *image,
                                   const tsh_real *map, const tshi_dest *dest) {
    tshi_conv_depth d = {
        ctx, c, tshi_conv_unconst(image), tshi_conv_unconst(map), dest->data, NULL, dest->add};
    tshi_conv_depth_run(&d, tshi_conv_depth_weights, c->groups * c->outs,
                        c->batch * tshi_conv_area(c->map) * tshi_conv_area(c->kernel));
}
