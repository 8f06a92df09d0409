/* The library for op_db.py, with functions that take no structures, for ctypes. */
#define TSHARD_IMPLEMENTATION
#define TSHARD_THREADS_IMPLEMENTATION
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"

/* A leaf of these global values, sharded along dimension `cut` (negative: replicated). */
tsh_tensor *od_leaf(tsh_ctx *ctx, int dtype, int ndim, const int64_t *dim, int cut,
                    const void *values, size_t bytes);
int od_backward(tsh_ctx *ctx, tsh_tensor *y, const void *weights, size_t bytes);
tsh_tensor *od_reshape(tsh_tensor *x, int ndim, const int64_t *dim);
tsh_tensor *od_full(tsh_tensor *x);
int od_layout(const tsh_tensor *t);
void od_barrier(tsh_ctx *ctx);
int od_rank(tsh_ctx *ctx);
int od_has_error(tsh_ctx *ctx);
const char *od_message(tsh_ctx *ctx);
tsh_tensor *od_attention(tsh_tensor *q, tsh_tensor *k, tsh_tensor *v, tsh_tensor *mask, int causal,
                         double scale);
tsh_tensor *od_embedding(tsh_tensor *ids, tsh_tensor *w, int padding, int64_t padding_idx,
                         double max_norm, double norm_type, int by_frequency);
tsh_tensor *od_cross_entropy(tsh_tensor *logits, tsh_tensor *target, tsh_tensor *weight,
                             int reduction, int ignores, int64_t ignore, double smoothing);
typedef tsh_tensor *(*od_loss_fn)(tsh_tensor *x, tsh_tensor *target, const tsh_loss_desc *desc);
tsh_tensor *od_loss(od_loss_fn fn, tsh_tensor *x, tsh_tensor *target, int reduction,
                    tsh_tensor *weight, tsh_tensor *pos_weight, double turn, int log_target,
                    int64_t ignore);
typedef tsh_tensor *(*od_conv_fn)(tsh_tensor *x, tsh_tensor *weight, tsh_tensor *bias,
                                  const tsh_conv_options *options);
tsh_tensor *od_conv(od_conv_fn fn, tsh_tensor *x, tsh_tensor *weight, tsh_tensor *bias,
                    const int64_t *options);
typedef tsh_tensor *(*od_pool_fn)(tsh_tensor *x, const tsh_pool_options *options);
tsh_tensor *od_pool(od_pool_fn fn, tsh_tensor *x, const int64_t *options);
tsh_tensor *od_interpolate(tsh_tensor *x, const int64_t *size, const double *scale, int bilinear,
                           int align_corners);
tsh_tensor *od_batch_norm(tsh_tensor *x, tsh_tensor *weight, tsh_tensor *bias, tsh_tensor *mean,
                          tsh_tensor *variance, int training, double momentum, double eps);
tsh_tensor *od_expand(tsh_tensor *x, int ndim, const int64_t *dim);
int od_run(int ranks, int (*fn)(tsh_ctx *ctx, void *user));

static tsh_shape od_shape(int ndim, const int64_t *dim) {
    tsh_shape shape = tsh_shape0();
    shape.ndim = ndim;
    for (int d = 0; d < ndim && d < TSH_MAX_DIMS; d++) shape.dim[d] = dim[d];
    return shape;
}

tsh_tensor *od_leaf(tsh_ctx *ctx, int dtype, int ndim, const int64_t *dim, int cut,
                    const void *values, size_t bytes) {
    const tsh_layout layout = cut < 0 ? tsh_replicated() : tsh_sharded(cut);
    tsh_tensor *t = tsh_tensor_new(ctx, (tsh_dtype)dtype, od_shape(ndim, dim), layout);
    if (t) (void)tsh_write(ctx, t, TSH_GLOBAL, values, bytes);
    return t;
}

/* Backward of sum(y weights); weights: of y's global shape. */
int od_backward(tsh_ctx *ctx, tsh_tensor *y, const void *weights, size_t bytes) {
    tsh_tensor *w = tsh_tensor_new(ctx, TSH_F32, tsh_shape_of(y), tsh_replicated()), *loss;
    (void)tsh_write(ctx, w, TSH_GLOBAL, weights, bytes);
    if (tsh_layout_of(y).kind == TSH_SHARDED) w = tsh_redistribute(w, tsh_layout_of(y));
    loss = tsh_full_tensor(tsh_sum(tsh_mul(y, w), TSH_ALL, 0));
    return loss ? (int)tsh_backward(ctx, loss) : (int)tsh_last_error(ctx)->code;
}

tsh_tensor *od_reshape(tsh_tensor *x, int ndim, const int64_t *dim) {
    return tsh_reshape(x, od_shape(ndim, dim));
}

tsh_tensor *od_full(tsh_tensor *x) {
    return tsh_redistribute(x, tsh_replicated());
}

/* The sharded dimension; -1: replicated; -2: a partial sum. */
int od_layout(const tsh_tensor *t) {
    const tsh_layout layout = tsh_layout_of(t);
    return layout.kind == TSH_SHARDED ? layout.dim : layout.kind == TSH_PARTIAL ? -2 : -1;
}

void od_barrier(tsh_ctx *ctx) {
    (void)tsh_barrier(tsh_world(ctx));
}

int od_rank(tsh_ctx *ctx) {
    return tsh_world(ctx)->rank;
}

int od_has_error(tsh_ctx *ctx) {
    return tsh_last_error(ctx)->code != TSH_OK;
}

const char *od_message(tsh_ctx *ctx) {
    return tsh_last_error(ctx)->message;
}

tsh_tensor *od_attention(tsh_tensor *q, tsh_tensor *k, tsh_tensor *v, tsh_tensor *mask, int causal,
                         double scale) {
    const tsh_attention_desc desc = {.causal = causal, .scale = scale, .mask = mask};
    return tsh_attention(q, k, v, &desc);
}

tsh_tensor *od_embedding(tsh_tensor *ids, tsh_tensor *w, int padding, int64_t padding_idx,
                         double max_norm, double norm_type, int by_frequency) {
    const tsh_lookup_desc desc = {.padding = padding,
                                  .padding_idx = padding_idx,
                                  .max_norm = max_norm,
                                  .norm_type = norm_type,
                                  .scale_grad_by_freq = by_frequency};
    return tsh_embedding(ids, w, &desc);
}

tsh_tensor *od_cross_entropy(tsh_tensor *logits, tsh_tensor *target, tsh_tensor *weight,
                             int reduction, int ignores, int64_t ignore, double smoothing) {
    const tsh_cross_entropy_desc desc = {.reduction = (tsh_reduction)reduction,
                                         .ignore = ignores,
                                         .ignore_index = ignore,
                                         .label_smoothing = smoothing,
                                         .weight = weight,
                                         .dim = 1};
    return tsh_cross_entropy(logits, target, &desc);
}

/* turn: delta of tsh_huber_loss, beta of tsh_smooth_l1_loss. Classes are dimension 1. */
tsh_tensor *od_loss(od_loss_fn fn, tsh_tensor *x, tsh_tensor *target, int reduction,
                    tsh_tensor *weight, tsh_tensor *pos_weight, double turn, int log_target,
                    int64_t ignore) {
    const tsh_loss_desc desc = {.reduction = (tsh_reduction)reduction,
                                .weight = weight,
                                .pos_weight = pos_weight,
                                .delta = turn,
                                .beta = turn,
                                .log_target = log_target,
                                .ignore = 1,
                                .ignore_index = ignore,
                                .dim = 1};
    return fn(x, target, &desc);
}

/* options: stride, padding, output padding and dilation, two numbers each, then groups. */
tsh_tensor *od_conv(od_conv_fn fn, tsh_tensor *x, tsh_tensor *weight, tsh_tensor *bias,
                    const int64_t *options) {
    const tsh_conv_options o = {.stride = {options[0], options[1]},
                                .padding = {options[2], options[3]},
                                .output_padding = {options[4], options[5]},
                                .dilation = {options[6], options[7]},
                                .groups = options[8]};
    return fn(x, weight, bias, &o);
}

/* options: kernel, stride, padding and dilation, two numbers each; then whether the size is rounded
 * up, whether the padding counts in a mean, and the mean's divisor. */
tsh_tensor *od_pool(od_pool_fn fn, tsh_tensor *x, const int64_t *options) {
    const tsh_pool_options o = {.kernel = {options[0], options[1]},
                                .stride = {options[2], options[3]},
                                .padding = {options[4], options[5]},
                                .dilation = {options[6], options[7]},
                                .ceil_mode = (int)options[8],
                                .count_include_pad = options[9] ? TSH_YES : TSH_NO,
                                .divisor_override = options[10]};
    return fn(x, &o);
}

tsh_tensor *od_interpolate(tsh_tensor *x, const int64_t *size, const double *scale, int bilinear,
                           int align_corners) {
    const tsh_interpolate_options o = {.size = {size[0], size[1]},
                                       .scale = {scale[0], scale[1]},
                                       .mode = bilinear ? TSH_BILINEAR : TSH_NEAREST,
                                       .align_corners = align_corners};
    return tsh_interpolate(x, &o);
}

tsh_tensor *od_batch_norm(tsh_tensor *x, tsh_tensor *weight, tsh_tensor *bias, tsh_tensor *mean,
                          tsh_tensor *variance, int training, double momentum, double eps) {
    const tsh_batch_norm_options o = {.training = training, .momentum = momentum, .eps = eps};
    return tsh_batch_norm(x, weight, bias, mean, variance, &o);
}

tsh_tensor *od_expand(tsh_tensor *x, int ndim, const int64_t *dim) {
    return tsh_expand(x, od_shape(ndim, dim));
}

int od_run(int ranks, int (*fn)(tsh_ctx *ctx, void *user)) {
    return tsh_threads_run(ranks, NULL, fn, NULL);
}
