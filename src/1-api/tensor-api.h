/* ========================================================================== */
/* >>tensor-api                                            MARK: - tensor-api */
/* Making tensors and asking about them; gradients; the end of a step.        */
/* Needs: >>context-api.                                                      */
/* ========================================================================== */

/* -- tensors ---------------------------------------------------------------- */

/* Global shapes of 0 (a scalar) to 4 dimensions. */
TSH_API tsh_shape tsh_shape0(void);
TSH_API tsh_shape tsh_shape1(int64_t a);
TSH_API tsh_shape tsh_shape2(int64_t a, int64_t b);
TSH_API tsh_shape tsh_shape3(int64_t a, int64_t b, int64_t c);
TSH_API tsh_shape tsh_shape4(int64_t a, int64_t b, int64_t c, int64_t d);

/* Owned tensors: they live until freed or until the ctx closes. layout NULL: replicated.
 * new: zeros. from: copies this rank's piece from data (the whole tensor where replicated: the
 * caller promises that all ranks of tp give the same). */
TSH_API tsh_tensor *tsh_tensor_new(tsh_ctx *ctx, tsh_dtype dtype, tsh_shape shape,
                                   const tsh_layout *layout);
TSH_API tsh_tensor *tsh_tensor_from(tsh_ctx *ctx, tsh_dtype dtype, tsh_shape shape,
                                    const tsh_layout *layout, const void *data);
TSH_API void tsh_tensor_free(tsh_tensor *t);

/* Step tensors, replicated; values are tsh_real, but for arange of an integer dtype.
 * arange: start, start + step, ... below stop. randn: standard normal, keyed by the ctx's seed and
 * a count of calls. */
TSH_API tsh_tensor *tsh_zeros(tsh_ctx *ctx, tsh_shape shape);
TSH_API tsh_tensor *tsh_ones(tsh_ctx *ctx, tsh_shape shape);
TSH_API tsh_tensor *tsh_filled(tsh_ctx *ctx, tsh_shape shape, double value);
TSH_API tsh_tensor *tsh_arange(tsh_ctx *ctx, tsh_dtype dtype, double start, double stop,
                               double step);
TSH_API tsh_tensor *tsh_randn(tsh_ctx *ctx, tsh_shape shape);

/* What a tensor is. Dimensions may be negative: -1 is the last one; a wrong one gives 0. */
TSH_API tsh_ctx *tsh_ctx_of(const tsh_tensor *t);
TSH_API tsh_dtype tsh_dtype_of(const tsh_tensor *t);
TSH_API int tsh_ndim(const tsh_tensor *t);
TSH_API tsh_shape tsh_shape_of(const tsh_tensor *t);
TSH_API int64_t tsh_dim(const tsh_tensor *t, int dim);
TSH_API int64_t tsh_local_dim(const tsh_tensor *t, int dim);
TSH_API int64_t tsh_stride(const tsh_tensor *t, int dim); /* in elements, of the local piece */
TSH_API int64_t tsh_numel(const tsh_tensor *t);
TSH_API int64_t tsh_local_numel(const tsh_tensor *t);
TSH_API tsh_layout tsh_layout_of(const tsh_tensor *t);

/* The local piece in place: element (i, j, ...) at tsh_stride. NULL where it is empty, and on an
 * error. */
TSH_API void *tsh_data(tsh_ctx *ctx, tsh_tensor *t);
/* A one-element tensor's value as double. Replicated only. */
TSH_API double tsh_item(tsh_ctx *ctx, tsh_tensor *t);

/* Initial values. fan_in and fan_out are those of the whole weight (out, in, ..) at every degree:
 * in or out times the product of the dimensions behind; a bias of a layer has its weight's fan_in
 * and no fan_out. */
typedef enum tsh_init_kind {
    TSH_INIT_DEFAULT, /* what the layer's doc says */
    TSH_INIT_ZEROS,
    TSH_INIT_ONES,
    TSH_INIT_CONSTANT,        /* a */
    TSH_INIT_UNIFORM,         /* in [a, b) */
    TSH_INIT_NORMAL,          /* mean a, standard deviation b */
    TSH_INIT_KAIMING_UNIFORM, /* bound gain sqrt(6 / ((1 + a^2) fan)); He et al. 2015 */
    TSH_INIT_TRUNC_NORMAL,    /* as NORMAL, drawn within [low, high] */
    TSH_INIT_KAIMING_NORMAL,  /* standard deviation gain sqrt(2 / ((1 + a^2) fan)) */
    TSH_INIT_XAVIER_UNIFORM,  /* bound gain sqrt(6 / (fan_in + fan_out)); Glorot & Bengio 2010 */
    TSH_INIT_XAVIER_NORMAL,   /* standard deviation gain sqrt(2 / (fan_in + fan_out)) */
    TSH_INIT_ORTHOGONAL, /* gain Q of the QR of a normal matrix (out, rest); Saxe et al. 2013 */
    TSH_INIT_DIRAC       /* 1 at (i, i, middle of the rest), else 0; an identity in 2-D */
} tsh_init_kind;
typedef struct tsh_init {
    tsh_init_kind kind;
    double a, b;
    double gain;      /* a factor of kaiming, xavier, orthogonal; 0: 1 */
    int fan_out;      /* of kaiming: 0: fan is fan_in, 1: fan_out */
    double low, high; /* of TRUNC_NORMAL; both 0: -2 and 2 */
} tsh_init;

/* Give an owned tensor of values, R or S, or a parameter's shard, initial values:
 * torch.nn.init.<name>_. Element e gets the same bits at every degree of tp: draws are keyed by the
 * ctx's seed, e, and a parameter's path or the count of the ctx's draws. desc NULL: torch's
 * defaults (0 to 1; mean 0, deviation 1; a 0; constant: 0); its kind is not read. orthogonal: every
 * rank holds the whole matrix for a moment, in double. No collective. TSH_ERR_STATE: as tsh_write.
 */
TSH_API tsh_result tsh_init_uniform(tsh_tensor *t, const tsh_init *desc);
TSH_API tsh_result tsh_init_normal(tsh_tensor *t, const tsh_init *desc);
TSH_API tsh_result tsh_init_trunc_normal(tsh_tensor *t, const tsh_init *desc);
TSH_API tsh_result tsh_init_constant(tsh_tensor *t, const tsh_init *desc);
TSH_API tsh_result tsh_init_zeros(tsh_tensor *t, const tsh_init *desc);
TSH_API tsh_result tsh_init_ones(tsh_tensor *t, const tsh_init *desc);
TSH_API tsh_result tsh_init_kaiming_uniform(tsh_tensor *t, const tsh_init *desc);
TSH_API tsh_result tsh_init_kaiming_normal(tsh_tensor *t, const tsh_init *desc);
TSH_API tsh_result tsh_init_xavier_uniform(tsh_tensor *t, const tsh_init *desc);
TSH_API tsh_result tsh_init_xavier_normal(tsh_tensor *t, const tsh_init *desc);
TSH_API tsh_result tsh_init_orthogonal(tsh_tensor *t, const tsh_init *desc);
TSH_API tsh_result tsh_init_dirac(tsh_tensor *t, const tsh_init *desc);

/* -- autograd --------------------------------------------------------------- */

/* Nothing is recorded between begin and end. May be nested. */
TSH_API void tsh_no_grad_begin(tsh_ctx *ctx);
TSH_API void tsh_no_grad_end(tsh_ctx *ctx);
/* Marks an owned tensor as a leaf whose gradient is wanted (on 0: no longer). Returns t. */
TSH_API tsh_tensor *tsh_requires_grad(tsh_tensor *t, int on);
/* on 1: averages the leaf's gradient over dp, as is always done for parameters. For weights of your
 * own, which every replica holds and trains. on 0: the gradient is that of this rank's own loss.
 * Call it on every rank of dp, before the backward. Returns t; 0 on a parameter is an error. */
TSH_API tsh_tensor *tsh_average_grad(tsh_tensor *t, int on);
/* Keeps a step tensor's values and gradient through tsh_backward. Returns t. A view (reshape,
 * slice; tsh_redistribute on one rank) shares the gradient of what it views: tsh_clone it first. */
TSH_API tsh_tensor *tsh_retain(tsh_tensor *t);

/* Several micro-batches are one step: .defer for all but the last, or for all, then
 * tsh_sync_grads.
 * summed 0: a loss is a mean. Micro-batches add up, and the average over dp counts every rank
 * alike, as torch's DistributedDataParallel does.
 * summed 1: a loss is the sum over `weight` elements, such as the targets that are not ignored.
 * Gradients of all micro-batches and of all ranks of dp are summed and divided once, by the sum of
 * their weights: the gradient of the mean over all elements, however unevenly they lie (Megatron's
 * calculate_per_token_loss). A rank that has no elements runs the same ops, on an empty batch or
 * with all targets ignored, with weight 0; where all weights are 0, nothing is divided. */
typedef struct tsh_backward_desc {
    int defer; /* leave gradients of leaves pending, for micro-batches; then tsh_sync_grads */
    int summed;
    double weight; /* of this loss; the same on all ranks of tp */
} tsh_backward_desc;
/* Gradients of a replicated scalar, summed into every leaf. Consumes the tape. Runs one all-reduce
 * over tp per tensor that feeds sharded consumers (each started as early as it can be), and one
 * flat one for leaves whose gradients are partial. Then the average over dp, of parameters and of
 * leaves after tsh_average_grad; other leaves keep the gradient of this rank's loss (summed:
 * divided by all weights, too). Gradients are collected in buckets (tsh_desc.bucket_bytes), each of
 * which is all-reduced as soon as it is full, while backward goes on (large built-in products move
 * it on now and then); summed, one all-reduce of the weights. The sum of an element has the order
 * that an all-reduce of its leaf alone gives it, whatever bucket it is in. */
TSH_API tsh_result tsh_backward(tsh_ctx *ctx, tsh_tensor *loss);
TSH_API tsh_result tsh_backward_with(tsh_ctx *ctx, tsh_tensor *loss, const tsh_backward_desc *desc);
/* Completes gradients that .defer left pending: partial ones over tp, then the average over dp.
 * Nothing, and no collective, where none are. */
TSH_API tsh_result tsh_sync_grads(tsh_ctx *ctx);
/* A leaf's or retained tensor's gradient, a detached step tensor, TSH_REAL (TSH_BF16 where its
 * optimiser's .grad_dtype says so); NULL while it has none. Pending: an error. It is a window on
 * the accumulator that the next backward writes again: tsh_keep copies. */
TSH_API tsh_tensor *tsh_grad(tsh_tensor *t);
/* Forgets a leaf's gradient. Its memory is kept for the next; that of a leaf of 16 bits, or with
 * .grad_dtype, is step memory, which is given back. */
TSH_API void tsh_zero_grad(tsh_tensor *t);

/* Writes what is recorded for backward to an open file, one line per op:
 *   #2 up tsh_linear(#1: x (256, 2) R, weight (32, 2) S(0), bias (32) S(0)) = (256, 32) S(1); saves
 *   x weight, 2176 bytes; partial gradient: x
 * its number, the path of the module whose forward called it, its inputs and the ops that made
 * them, its output, the values that are kept for backward with their bytes on this rank, and the
 * inputs whose gradient is a partial sum over tp. Views are not recorded: they share their base's
 * gradient. For calls between forward and backward, which consumes the tape. */
TSH_API tsh_result tsh_tape_dump(tsh_ctx *ctx, FILE *file);
/* The same as a graph: `dot -Tsvg` of Graphviz draws it. Red arrows: partial gradients. */
TSH_API tsh_result tsh_tape_dot(tsh_ctx *ctx, FILE *file);
/* From now on (on 1) until switched off (on 0), the first op whose output, or whose gradient of
 * an input, has a NaN or an infinity is an error, TSH_ERR_ANOMALY, that names the module, the op,
 * the input and the place; tsh_last_error has the rank. torch.autograd.set_detect_anomaly. Every
 * value is looked at once more, also between tsh_no_grad_begin and end. */
TSH_API void tsh_detect_anomaly(tsh_ctx *ctx, int on);

/* -- steps ------------------------------------------------------------------ */

/* Ends a step: every step tensor is given back, a tape not consumed is dropped. */
TSH_API tsh_result tsh_step_end(tsh_ctx *ctx);
/* Step tensors made between begin and end are given back at end; for loops without gradients. May
 * be nested. */
TSH_API void tsh_scope_begin(tsh_ctx *ctx);
TSH_API void tsh_scope_end(tsh_ctx *ctx);
