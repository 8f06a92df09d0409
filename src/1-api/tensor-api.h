/* ========================================================================== */
/* >>tensor-api                                            MARK: - tensor-api */
/* Making tensors and asking about them; gradients; the end of a step.        */
/* Needs: >>context-api.                                                      */
/* ========================================================================== */

/* -- making tensors, their properties, initial values ----------------------- */

/* Returns a global shape with as many dimensions as the name says, of these lengths; tsh_shape0
 * returns that of a scalar. */
TSH_API tsh_shape tsh_shape0(void);
TSH_API tsh_shape tsh_shape1(int64_t a);
TSH_API tsh_shape tsh_shape2(int64_t a, int64_t b);
TSH_API tsh_shape tsh_shape3(int64_t a, int64_t b, int64_t c);
TSH_API tsh_shape tsh_shape4(int64_t a, int64_t b, int64_t c, int64_t d);

/* Makes an owned tensor of zeros, which lives until it is freed or the ctx is closed. */
TSH_API tsh_tensor *tsh_tensor_new(tsh_ctx *ctx, tsh_dtype dtype, tsh_shape shape,
                                   tsh_layout layout);
/* Makes an owned tensor with a copy of this rank's shard in data, which is dense and row-major. For
 * a replicated tensor, data must be the same on all ranks of tp. For the data of a step take
 * tsh_from. */
TSH_API tsh_tensor *tsh_tensor_from(tsh_ctx *ctx, tsh_dtype dtype, tsh_shape shape,
                                    tsh_layout layout, const void *data);
/* Frees an owned tensor that is no parameter; does nothing for others, and if t is NULL. */
TSH_API void tsh_tensor_free(tsh_tensor *t);

/* Makes a step tensor of zeros. This function and the next five return replicated tensors; except
 * for tsh_arange their dtype is TSH_REAL.
 * torch: torch.zeros, torch.zeros_like */
TSH_API tsh_tensor *tsh_zeros(tsh_ctx *ctx, tsh_shape shape);
/* Makes a step tensor of ones.
 * torch: torch.ones, torch.ones_like */
TSH_API tsh_tensor *tsh_ones(tsh_ctx *ctx, tsh_shape shape);
/* Makes a step tensor whose elements are all `value`.
 * torch: torch.full, torch.full_like */
TSH_API tsh_tensor *tsh_full(tsh_ctx *ctx, tsh_shape shape, double value);
/* Makes a step tensor of start, start + step, ..., without stop.
 * torch: torch.arange */
TSH_API tsh_tensor *tsh_arange(tsh_ctx *ctx, tsh_dtype dtype, double start, double stop,
                               double step);
/* Makes a step tensor of standard normal numbers, keyed by the ctx's seed and count of draws.
 * torch: torch.randn, torch.randn_like */
TSH_API tsh_tensor *tsh_randn(tsh_ctx *ctx, tsh_shape shape);
/* Makes a step tensor of uniform random numbers in [low, high), keyed as those of tsh_randn.
 * (Rounding low + (high - low) u may give high.) TSH_ERR_ARGUMENT: low is above high, or their
 * difference is not finite.
 * torch: torch.rand, torch.rand_like, Tensor.uniform_ */
TSH_API tsh_tensor *tsh_uniform(tsh_ctx *ctx, tsh_shape shape, double low, double high);

/* This function and the next nine return a property of t: with "local" in the name, and tsh_stride,
 * that of this rank's shard; else that of the whole tensor. A dim may be negative: -1 is the last
 * dimension. A dimension that does not exist gives 0.
 * torch: Tensor.dtype, Tensor.dim, Tensor.ndim, Tensor.shape, Tensor.size, Tensor.stride,
 * Tensor.numel, DTensor.placements */
TSH_API tsh_ctx *tsh_ctx_of(const tsh_tensor *t);
TSH_API tsh_dtype tsh_dtype_of(const tsh_tensor *t);
TSH_API int tsh_ndim(const tsh_tensor *t);
TSH_API tsh_shape tsh_shape_of(const tsh_tensor *t);
TSH_API int64_t tsh_size(const tsh_tensor *t, int dim);
TSH_API int64_t tsh_local_size(const tsh_tensor *t, int dim);
TSH_API int64_t tsh_stride(const tsh_tensor *t, int dim); /* stride of the shard, in elements */
TSH_API int64_t tsh_numel(const tsh_tensor *t);
TSH_API int64_t tsh_local_numel(const tsh_tensor *t);
TSH_API tsh_layout tsh_layout_of(const tsh_tensor *t);

/* Returns a pointer to this rank's shard, not a copy. Element (i, j, ...) is i tsh_stride(t, 0) + j
 * tsh_stride(t, 1) + ... elements after it. Returns NULL if the shard is empty, and after an
 * error.
 * torch: Tensor.data_ptr, DTensor.to_local */
TSH_API void *tsh_data(tsh_ctx *ctx, tsh_tensor *t);
/* Returns the value of a replicated tensor of one element as a double; NaN after an error.
 * torch: Tensor.item */
TSH_API double tsh_item(tsh_ctx *ctx, tsh_tensor *t);

/* How to compute initial values. a, b, gain, low and high are fields of tsh_init; fan is fan_in or,
 * if .fan_out is 1, fan_out. fan_in and fan_out are those of the whole weight (out, in, ..) at
 * every degree of tp: in or out, times the product of all further dimensions. The bias of a layer
 * has the fan_in of its weight and no fan_out. */
typedef enum tsh_init_kind {
    TSH_INIT_DEFAULT, /* what the layer takes by default */
    TSH_INIT_ZEROS,
    TSH_INIT_ONES,
    TSH_INIT_CONSTANT,        /* every value is tsh_init.a */
    TSH_INIT_UNIFORM,         /* uniform in [a, b) */
    TSH_INIT_NORMAL,          /* normal, mean a, standard deviation b */
    TSH_INIT_KAIMING_UNIFORM, /* uniform in [-s, s), s = gain sqrt(6 / ((1 + a^2) fan)); He et
                               * al. 2015 */
    TSH_INIT_TRUNC_NORMAL,    /* normal, mean a, standard deviation b, truncated to [low, high] */
    TSH_INIT_KAIMING_NORMAL,  /* normal, standard deviation gain sqrt(2 / ((1 + a^2) fan)) */
    TSH_INIT_XAVIER_UNIFORM,  /* uniform in [-s, s), s = gain sqrt(6 / (fan_in + fan_out));
                               * Glorot & Bengio 2010 */
    TSH_INIT_XAVIER_NORMAL,   /* normal, standard deviation gain sqrt(2 / (fan_in + fan_out)) */
    TSH_INIT_ORTHOGONAL, /* gain times Q of the QR decomposition of a normal matrix (out, product
                          * of the other dimensions); Saxe et al. 2013 */
    TSH_INIT_DIRAC       /* 1 at (i, i, middle of each further dimension), else 0; in 2-D the
                          * identity */
} tsh_init_kind;
typedef struct tsh_init {
    tsh_init_kind kind;
    double a, b;
    double gain;      /* kaiming, xavier, orthogonal: factor of the values; 0 means 1 */
    int fan_out;      /* kaiming: fan is fan_in if this is 0, fan_out if 1 */
    double low, high; /* TRUNC_NORMAL: values lie in [low, high]; both 0: -2 and 2 */
} tsh_init;

/* Fills a tensor with initial values, as torch.nn.init.<name>_ does. This function and those below
 * take a parameter or another owned tensor, replicated or sharded. Element e gets the same bits at
 * every degree of tp: random numbers are keyed by the ctx's seed, e, and the parameter's path
 * (other tensors: the ctx's count of draws). desc->kind is not read; desc NULL: torch's defaults
 * (uniform: 0 to 1; normal: mean 0, standard deviation 1; kaiming: a 0; constant: 0). For
 * orthogonal values, every rank computes the whole matrix in double, in temporary memory. No
 * collective. TSH_ERR_STATE: a recorded op has used t; see tsh_write.
 * torch: nn.init.uniform_, nn.init.normal_, nn.init.trunc_normal_, nn.init.constant_,
 * nn.init.zeros_, nn.init.ones_, nn.init.kaiming_uniform_, nn.init.kaiming_normal_,
 * nn.init.xavier_uniform_, nn.init.xavier_normal_, nn.init.orthogonal_, nn.init.dirac_ */
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

/* Stops recording ops for backward until tsh_no_grad_end. Calls may be nested.
 * torch: torch.no_grad, torch.inference_mode */
TSH_API void tsh_no_grad_begin(tsh_ctx *ctx);
/* Ends the effect of the last tsh_no_grad_begin: after as many ends as begins, ops are recorded
 * again. */
TSH_API void tsh_no_grad_end(tsh_ctx *ctx);
/* Makes an owned tensor a leaf, for which backward computes a gradient (on 0: no longer). Returns
 * t.
 * torch: Tensor.requires_grad_ */
TSH_API tsh_tensor *tsh_requires_grad(tsh_tensor *t, int on);
/* Averages the leaf's gradient over dp if on is 1, as is always done for parameters; meant for
 * weights of your own that every replica holds and trains. If on is 0, the gradient is that of this
 * rank's own loss. Call it on every rank of dp, before tsh_backward. Returns t; on 0 is an error
 * for a parameter. */
TSH_API tsh_tensor *tsh_average_grad(tsh_tensor *t, int on);
/* Keeps a step tensor's values and gradient through tsh_backward. Returns t. A view (of
 * tsh_reshape, tsh_slice; of tsh_redistribute on one rank) shares the gradient of its base:
 * tsh_clone it first.
 * torch: Tensor.retain_grad */
TSH_API tsh_tensor *tsh_retain_grad(tsh_tensor *t);

/* How losses and micro-batches are combined. Several micro-batches make one step: set .defer for
 * all but the last one, or for all of them and then call tsh_sync_grads.
 * summed 0: each loss is a mean. The gradients of micro-batches add up. The average over dp gives
 * every rank the same weight, as torch's DistributedDataParallel does.
 * summed 1: each loss is a sum over `weight` elements, such as the targets that are not ignored.
 * The gradients of all micro-batches and all ranks of dp are summed and divided once, by the sum of
 * all weights. The result is the gradient of the mean over all elements, however unevenly they are
 * distributed (Megatron's calculate_per_token_loss). A rank without elements runs the same ops with
 * weight 0, on an empty batch or with all targets ignored. If all weights are 0, nothing is
 * divided. */
typedef struct tsh_backward_desc {
    int defer; /* 1: leaves the gradients pending, to be completed by a later backward without
                * .defer or by tsh_sync_grads */
    int summed;
    double weight; /* number of elements in this loss; the same on all ranks of tp */
} tsh_backward_desc;
/* Computes the gradients of loss, a replicated scalar, adds them to those of all leaves, and clears
 * the tape. Over tp it runs one all-reduce per tensor with sharded consumers, each as early as
 * possible, and one all-reduce of all leaves whose gradients are partial. Then it averages over dp
 * the gradients of parameters and of leaves after tsh_average_grad. Other leaves keep the gradient
 * of this rank's loss (if losses are summed, it is divided by the sum of all weights, too). For dp,
 * gradients are collected in buckets (tsh_desc.bucket_bytes); each is all-reduced as soon as it is
 * full, while backward goes on (large built-in matrix products make progress on it now and then).
 * Summed losses add one all-reduce of the weights. The order in which an element is summed is that
 * of an all-reduce of its leaf alone, whatever its bucket.
 * torch: Tensor.backward */
TSH_API tsh_result tsh_backward(tsh_ctx *ctx, tsh_tensor *loss);
/* Runs tsh_backward with options; desc NULL: none. */
TSH_API tsh_result tsh_backward_with(tsh_ctx *ctx, tsh_tensor *loss, const tsh_backward_desc *desc);
/* Completes the gradients that .defer left pending: all-reduces partial ones over tp, then averages
 * over dp. If none are pending, it does nothing and runs no collective. */
TSH_API tsh_result tsh_sync_grads(tsh_ctx *ctx);
/* Returns the gradient of a leaf or retained tensor, NULL if it has none: a detached step tensor of
 * dtype TSH_REAL (TSH_BF16 if .grad_dtype of the leaf's optimiser says so). A pending gradient is
 * an error. The result shares memory with the gradient, which the next backward changes: tsh_keep
 * makes a copy.
 * torch: Tensor.grad */
TSH_API tsh_tensor *tsh_grad(tsh_tensor *t);
/* Clears a leaf's gradient. Its memory is kept for the next gradient; that of a 16-bit leaf, or of
 * a leaf with .grad_dtype, is step memory, which is released. */
TSH_API void tsh_zero_grad(tsh_tensor *t);

/* Writes the recorded ops to an open file, one line per op. An example, wrapped:
 *   #2 up tsh_linear(#1: x (256, 2) R, weight (32, 2) S(0), bias (32) S(0)) = (256, 32) S(1); saves
 *   x weight, 2176 bytes; partial gradient: x
 * A line has the op's number; the path of the module whose forward called it; its name; its inputs,
 * each after the number of the op that made it; its output; the values saved for backward, with
 * their bytes on this rank; the inputs whose gradient is a partial sum over tp. Views are not
 * recorded: they share the gradient of their base. Call it between forward and backward, which
 * clears the tape. */
TSH_API tsh_result tsh_tape_dump(tsh_ctx *ctx, FILE *file);
/* Writes the recorded ops as a graph in Graphviz's dot language: `dot -Tsvg` draws it. Red arrows:
 * partial gradients. */
TSH_API tsh_result tsh_tape_dot(tsh_ctx *ctx, FILE *file);
/* Turns anomaly detection on or off, as torch.autograd.set_detect_anomaly. While it is on, the
 * first op whose output, or whose gradient of an input, has a NaN or an infinity is an error,
 * TSH_ERR_ANOMALY, which names the module, the op, the input and the element; tsh_last_error has
 * the rank. Every value is read once more, also between tsh_no_grad_begin and tsh_no_grad_end.
 * torch: torch.autograd.set_detect_anomaly */
TSH_API void tsh_detect_anomaly(tsh_ctx *ctx, int on);

/* -- the ends of steps and scopes ------------------------------------------- */

/* Ends a step: releases all step tensors, and the tape if no backward has cleared it. */
TSH_API tsh_result tsh_step_end(tsh_ctx *ctx);
/* Begins a scope, for loops without gradients: tsh_scope_end releases the step tensors made in it.
 * Scopes may be nested. */
TSH_API void tsh_scope_begin(tsh_ctx *ctx);
/* Ends a scope and releases the step tensors made in it. An op recorded in it is an error. */
TSH_API void tsh_scope_end(tsh_ctx *ctx);
