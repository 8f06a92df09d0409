/* ========================================================================== */
/* >>conv                                              MARK: - conv (private) */
/* Convolutions: their sizes, and what is checked of inputs and options.      */
/* Needs: >>tensor.                                                           */
/* ========================================================================== */

/* Convolutions and transposed convolutions are computed from the same two tensors: the image (N,
 * IC, H, W), over which the kernel slides, and the map (N, OC, OH, OW), which has an element for
 * each position of the kernel. The weight is (OC, IC / groups, KH, KW). With S the stride, D the
 * dilation and P the padding, and ci over the image's channels of oc's group:
 *
 *     map[n, oc, y, x] = sum over ci, ky, kx of
 *         weight[oc, ci, ky, kx] image[n, ci, y SY + ky DY - PY, x SX + kx DX - PX]
 *
 * A convolution reads the image and gives the map. A transposed one reads the map and gives the
 * image, as the gradient of a convolution's input does; its weight is (in, out / groups, KH, KW).
 * One-dimensional ones have an image of height 1. */

/* The sizes of a convolution on this rank. Arrays: [0] height, [1] width. */
typedef struct tshi_conv {
    int64_t batch, groups;
    int64_t ins, outs; /* channels of the image and of the map, per group */
    int64_t image[2], map[2], kernel[2], stride[2], padding[2], dilation[2];
    int transposed; /* 1: a transposed convolution: the input is the map */
    int reduce;     /* 1: row-parallel: the output is all-reduced */
} tshi_conv;

enum { TSHI_CONV_MOST = 1 << 30 }; /* max length of an image or kernel, max value of an option */

/* Returns the number of elements of a plane of size (height, width). */
static int64_t tshi_conv_area(const int64_t *size) {
    return size[0] * size[1];
}

/* Sets to[], (height, width), to an option such as stride, given in from[] for `dims` dimensions:
 * if dims is 1, from[0] is that of the width. A value that is 0, or not given, becomes `usual`.
 * Returns 0 and an error if a value is below `least` or above TSHI_CONV_MOST. */
static int tshi_conv_pair(tsh_ctx *ctx, const char *op, const char *name, const int64_t *from,
                          int dims, int64_t usual, int64_t least, int64_t *to) {
    to[0] = usual;
    for (int d = 0; d < dims; d++) {
        to[2 - dims + d] = from[d] ? from[d] : usual;
        if (from[d] && (from[d] < least || from[d] > TSHI_CONV_MOST))
            return tsh_fail(ctx, TSH_ERR_ARGUMENT,
                            "%s: %s[%d] is %lld, not 0 (for %lld) or %lld "
                            "to %d",
                            op, name, d, (long long)from[d], (long long)usual,
                            (long long)(least ? least : 1), TSHI_CONV_MOST) == TSH_OK;
    }
    return 1;
}

/* Returns how many elements, from its first to its last, a dilated kernel covers along a
 * dimension. */
static int64_t tshi_conv_span(int64_t kernel, int64_t dilation) {
    return dilation * (kernel - 1) + 1;
}

/* Sets the output's length along d (0: height, 1: width) from the input's. Returns 0 and an error
 * if the output is empty. extra: output_padding of a transposed convolution. */
static int tshi_conv_length(tsh_ctx *ctx, const char *op, tshi_conv *c, int d, int64_t extra) {
    const int64_t span = tshi_conv_span(c->kernel[d], c->dilation[d]);
    if (c->transposed)
        c->image[d] = (c->map[d] - 1) * c->stride[d] - 2 * c->padding[d] + span + extra;
    else
        c->map[d] = c->image[d] + 2 * c->padding[d] < span
                        ? 0
                        : (c->image[d] + 2 * c->padding[d] - span) / c->stride[d] + 1;
    if (c->transposed ? c->image[d] > 0 : c->map[d] > 0) return 1;
    return tsh_fail(ctx, TSH_ERR_SHAPE,
                    "%s: a kernel that covers %lld elements leaves no output of %lld with padding "
                    "%lld; a larger padding or a smaller kernel would",
                    op, (long long)span, (long long)(c->transposed ? c->map[d] : c->image[d]),
                    (long long)c->padding[d]) == TSH_OK;
}

/* Checks that the dimensions and channels of x, weight and bias fit together. Returns 0 and an
 * error if they do not. */
static int tshi_conv_fits(const char *op, tsh_tensor *const *in, int dims, int64_t groups,
                          int transposed) {
    const tsh_tensor *x = in[0], *w = in[1], *b = in[2];
    char tx[TSHI_TEXT_SIZE], tw[TSHI_TEXT_SIZE];
    const char *const shape[] = {"L", "H, W"}, *const kernel[] = {"K", "KH, KW"};
    const int fits = x->ndim == dims + 2 && w->ndim == dims + 2 && (!b || b->ndim == 1);
    const int64_t outs = fits ? transposed ? w->dim[1] * groups : w->dim[0] : 0;
    if (!fits || x->dim[1] != (transposed ? w->dim[0] : w->dim[1] * groups) || w->dim[0] % groups)
        return tsh_fail(x->ctx, TSH_ERR_SHAPE,
                        "%s: input %s and weight %s do not fit with %lld groups; takes (N, in, %s) "
                        "and (%s, %s) with channels that divide by groups",
                        op, tshi_tensor_text(x, tx), tshi_tensor_text(w, tw), (long long)groups,
                        shape[dims - 1], transposed ? "in, out / groups" : "out, in / groups",
                        kernel[dims - 1]) == TSH_OK;
    if (b && b->dim[0] != outs)
        return tsh_fail(x->ctx, TSH_ERR_SHAPE, "%s: weight gives %lld channels, bias has %lld", op,
                        (long long)outs, (long long)b->dim[0]) == TSH_OK;
    return 1;
}

/* Fills in the sizes of c, except the batch and the channels (tshi_conv_local), from the options
 * and the shapes of in[]: x, weight, and bias or NULL. Returns 0 after an error. op: the caller's
 * name; dims: 1 or 2. */
static int tshi_conv_sizes(const char *op, tsh_tensor *const *in, int dims,
                           const tsh_conv_options *o, int transposed, tshi_conv *c) {
    const tsh_tensor *x = in[0], *w = in[1];
    tsh_ctx *ctx = x->ctx;
    int64_t extra[2]; /* output_padding along height and width */
    int d;
    c->groups = o->groups ? o->groups : 1;
    c->transposed = transposed;
    c->reduce = 0;
    if (c->groups < 1 || c->groups > TSHI_CONV_MOST)
        return tsh_fail(ctx, TSH_ERR_ARGUMENT, "%s: groups is %lld, not 0 (for 1) or above", op,
                        (long long)c->groups) == TSH_OK;
    if (!tshi_conv_pair(ctx, op, "stride", o->stride, dims, 1, 1, c->stride) ||
        !tshi_conv_pair(ctx, op, "padding", o->padding, dims, 0, 0, c->padding) ||
        !tshi_conv_pair(ctx, op, "dilation", o->dilation, dims, 1, 1, c->dilation) ||
        !tshi_conv_pair(ctx, op, "output_padding", o->output_padding, dims, 0, 0, extra) ||
        !tshi_conv_fits(op, in, dims, c->groups, transposed))
        return 0;
    for (d = 0; d < 2; d++) {
        const int axis = d + dims; /* dimension of x and weight: 2 and 3; if dims is 1: none, 2 */
        int64_t *const length = transposed ? &c->map[d] : &c->image[d];
        *length = axis < 2 ? 1 : x->dim[axis];
        c->kernel[d] = axis < 2 ? 1 : w->dim[axis];
        if (*length > TSHI_CONV_MOST || c->kernel[d] > TSHI_CONV_MOST || c->kernel[d] < 1)
            return tsh_fail(ctx, TSH_ERR_SHAPE,
                            "%s: input or kernel has %lld or %lld elements along dimension %d; "
                            "a kernel has 1 to %d",
                            op, (long long)*length, (long long)c->kernel[d], axis,
                            TSHI_CONV_MOST) == TSH_OK;
        if (extra[d] && (!transposed || (extra[d] >= c->stride[d] && extra[d] >= c->dilation[d])))
            return tsh_fail(ctx, TSH_ERR_ARGUMENT,
                            "%s: output_padding %lld is to be 0, or in a transposed convolution "
                            "below stride %lld or dilation %lld",
                            op, (long long)extra[d], (long long)c->stride[d],
                            (long long)c->dilation[d]) == TSH_OK;
        if (!tshi_conv_length(ctx, op, c, d, extra[d])) return 0;
    }
    return 1;
}

/* Sets the groups, the channels and the batch that this rank computes, after x has got its final
 * layout. A rank without a channel of a grouped weight gets 0 groups. */
static void tshi_conv_local(tshi_conv *c, const tsh_tensor *x, const tsh_tensor *w) {
    const int64_t per = w->dim[0] / c->groups; /* weight's dimension 0 per group, over all ranks */
    c->batch = x->local[0];
    if (c->groups > 1) c->groups = per ? w->local[0] / per : 0;
    c->outs = c->groups > 0 ? w->local[0] / c->groups : 0;
    c->ins = w->local[1];
}
