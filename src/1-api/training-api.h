/* ========================================================================== */
/* >>training-api                                        MARK: - training-api */
/* Training: optimisers and schedules; quantising; pipelines.                 */
/* Needs: >>module-api.                                                       */
/* ========================================================================== */

/* -- optimisers and learning rates ------------------------------------------ */

typedef enum tsh_optim_kind { TSH_SGD, TSH_ADAM, TSH_ADAMW } tsh_optim_kind;
typedef struct tsh_optim_desc {
    tsh_optim_kind kind;
    double lr;                /* learning rate; 0: 1e-3; TSH_ZERO: 0 */
    double momentum;          /* SGD: momentum factor; 0: none */
    int nesterov;             /* SGD: 1: uses Nesterov momentum */
    double beta1, beta2, eps; /* Adam, AdamW; 0 means 0.9, 0.999, 1e-8; TSH_ZERO: 0 */
    double weight_decay;      /* AdamW: decoupled weight decay; others: added to the gradient */
    double clip_norm;         /* above 0: a step first clips the gradients, as
                               * tsh_clip_grad_norm; 0: no clipping */
    int zero; /* 1: moments are sharded over dp (ZeRO stage 1, Rajbhandari et al. 2020): each
               * rank keeps those of its chunk of every parameter (a chunk as in rule 5 of
               * >>comm-api, of the rank's local elements), whatever the sizes */
    /* dtypes of gradients between backward and step, and of moments. 0: TSH_REAL. TSH_BF16: half
     * the memory; values are rounded up or down at random, so that sums are right on average
     * (stochastic rounding, Gupta et al. 2015). The random numbers are keyed as those of dropout:
     * the same bits at every degree of tp and for any number of threads. */
    tsh_dtype grad_dtype, moments_dtype;
    int round_weights; /* 1: keeps no exact float weights of bf16 parameters: an update rounds
                        * the parameter at random, too. With TSH_BF16 in both fields above, the
                        * memory is that of pure bf16 in PyTorch */
} tsh_optim_desc;
/* Makes an optimiser for all parameters below module; torch.optim.SGD, Adam, AdamW.
 * Of a bf16 parameter, the optimiser keeps an exact float weight: the parameter is its rounded
 * value, and the other 16 bits are stored beside it, so that no small update is lost. This takes
 * the memory of a float. (tsh_write and tsh_init_* set the float weight; writing through tsh_data
 * changes its upper half.) A parameter of dtype TSH_F16 is an error: its range is too small.
 * If the gradient is row-sparse (tsh_lookup_desc), values, moments and weight decay change only in
 * the rows that have a gradient; torch.optim.SparseAdam.
 * With .zero, backward reduce-scatters the gradients of these parameters instead of all-reducing
 * them, so tsh_grad cannot return them; a step all-gathers the parameters, in the same buckets. The
 * bytes are those of an all-reduce, the bits are the same. A row-sparse gradient cannot be
 * scattered: tsh_backward fails with TSH_ERR_UNSUPPORTED. No other optimiser may have such a
 * parameter.
 * Freed by tsh_optim_free or with the ctx. */
TSH_API tsh_optim *tsh_optim_new(tsh_module *module, const tsh_optim_desc *desc);
/* Frees an optimiser: releases the moments; and, of each parameter that no other optimiser has, its
 * gradient and its exact weight (a bf16 parameter is from now on what its 16 bits say). After that,
 * tsh_quantize may be called, or training may go on with a new optimiser. Does nothing if optim is
 * NULL. */
TSH_API void tsh_optim_free(tsh_optim *optim);
/* Makes a parameter group: parameters whose path below the optimiser's module matches the pattern
 * get the learning rate times lr_scale, and this weight decay. Later groups override earlier ones.
 * Patterns are those of tsh_plan_rule: "**.bias" matches all biases, "*.bias" only those of the
 * module's own children. tsh_summary prints the number of parameters of each group.
 * TSH_ERR_ARGUMENT: the pattern matches none, or a value is below 0. */
TSH_API tsh_result tsh_optim_group(tsh_optim *optim, const char *pattern, double lr_scale,
                                   double weight_decay);
/* Sets the learning rate of the steps to come, which may be 0; groups scale it. */
TSH_API void tsh_optim_set_lr(tsh_optim *optim, double lr);
/* Updates the parameters with their gradients. One all-reduce over tp and pp for the gradient norm;
 * with .zero it is over dp, too, and all-gathers of the parameters follow. If any gradient is not
 * finite, the step is skipped on every rank. */
TSH_API tsh_result tsh_optim_step(tsh_optim *optim);

typedef struct tsh_optim_info {
    int64_t steps, skipped; /* number of steps done; number of steps skipped for a gradient that
                             * was not finite */
    double norm;            /* 2-norm of all gradients at the last step, before clipping */
    double lr;
} tsh_optim_info;
/* Returns the number of steps so far, the last gradient norm and the learning rate. */
TSH_API tsh_optim_info tsh_optim_state(const tsh_optim *optim);
/* Scales the gradients of all parameters below module so that their global 2-norm is at most
 * max_norm; torch.nn.utils.clip_grad_norm_. Replicated and tied parameters count once. *norm (may
 * be NULL) gets the norm before clipping. max_norm 0 sets the gradients to zero. */
TSH_API tsh_result tsh_clip_grad_norm(tsh_module *module, double max_norm, double *norm);

typedef enum tsh_schedule_kind { TSH_CONSTANT, TSH_LINEAR, TSH_COSINE } tsh_schedule_kind;
typedef struct tsh_schedule {
    tsh_schedule_kind kind;
    double lr, lr_min;
    int64_t warmup, total; /* numbers of steps: the learning rate rises linearly from lr / warmup to
                            * lr in the first `warmup` steps, then falls to lr_min at step `total`
                            * (TSH_CONSTANT: stays) */
} tsh_schedule;
/* Returns the learning rate of a step: 0, 1, ...; a negative step counts as 0. schedule NULL:
 * returns 0. */
TSH_API double tsh_schedule_lr(const tsh_schedule *schedule, int64_t step);

/* -- quantised weights ------------------------------------------------------ */

/* Quantises the weights of the linear, classifier and embedding layers whose path below module
 * matches the pattern (see tsh_plan_rule; NULL: all). dtype: TSH_Q8_0, TSH_Q4_0 or TSH_Q4_1. The
 * bytes are those of ggml, and, at every degree of tp, those of the whole weight. For inference: a
 * quantised weight has no gradient, optimisers made later leave it out, and the gradient of a
 * layer's input is computed from the quantised values. Weights that are quantised already stay as
 * they are; tied weights are quantised for all their layers. A weight stored (in, out) becomes
 * (out, in).
 * tsh_linear with such a weight returns x's dtype. It quantises x, too, to 8 bits in blocks of 32,
 * and sums the products within a block exactly: the bits of a row do not depend on the number of
 * rows. tsh_embedding returns TSH_REAL. Shard the model first; a plan that changes the layout of a
 * quantised weight is an error.
 * No collective. Errors, after which nothing is changed: TSH_ERR_DTYPE (dtype is none of these),
 * TSH_ERR_ARGUMENT (no layer matches; a weight is tied to a parameter of another kind of layer),
 * TSH_ERR_SHAPE (the number of input features is not a multiple of 32), TSH_ERR_LAYOUT (a
 * row-parallel weight is sharded within a block: set .unit = 32 in the rules of this layer and of
 * the one before it), TSH_ERR_STATE (an optimiser has the weight; a recorded op uses it). */
TSH_API tsh_result tsh_quantize(tsh_module *module, const char *pattern, tsh_dtype dtype);

/* -- pipeline --------------------------------------------------------------- */

/* The order in which a pipeline stage runs its forwards and backwards. Both orders give the same
 * bits, and with p equal stages and m micro-batches a stage is idle for the same share of the time,
 * (p - 1) / (m + p - 1). */
typedef enum tsh_pipeline_schedule {
    TSH_PIPELINE_1F1B, /* of p stages, stage s runs p - 1 - s forwards, then one forward and one
                        * backward in turn: it keeps what at most p - s forwards save; Narayanan et
                        * al. 2021 */
    TSH_PIPELINE_GPIPE /* all forwards, then all backwards: a stage keeps what the forwards of all
                        * micro-batches save; Huang et al. 2019 */
} tsh_pipeline_schedule;
typedef struct tsh_pipeline_desc {
    int micro_batches;
    const int *counts; /* counts[s]: number of children of stage s; NULL: equally many for each */
    tsh_pipeline_schedule schedule;
    /* Called for each micro-batch. input, on the first stage: returns the input of the container's
     * first child. loss, on the last stage: takes the output of the last child and returns the
     * loss, a replicated scalar. Step tensors that these functions make are released with the
     * micro-batch. */
    tsh_tensor *(*input)(tsh_ctx *ctx, int micro_batch, void *user);
    tsh_tensor *(*loss)(tsh_ctx *ctx, tsh_tensor *output, int micro_batch, void *user);
    /* Called after loss: returns the number of elements that this loss, a sum, was summed over,
     * such as the targets that are not ignored. The result is then the mean over all elements of
     * all micro-batches and replicas, however unevenly they are distributed. NULL: each loss is a
     * mean, and all count the same. */
    double (*weight)(tsh_ctx *ctx, int micro_batch, void *user);
    void *user;
} tsh_pipeline_desc;
/* Makes a pipeline: distributes the children of a container, which its forward calls one after the
 * other, over the ranks of pp, the stages. Modules before the container in the tree, such as
 * embeddings, belong to the first stage and are called by .input; those after it belong to the last
 * stage and are called by .loss. A rank holds the parameters of its own stage only: others get no
 * memory, or release it, and tsh_each_param skips them. Initial values and dropout masks are those
 * of one rank. A parameter tied across stages is held by each of them. The tree must be complete by
 * then and the same on every rank. Further pipelines of a ctx distribute the children in the same
 * way. One all-reduce over the world. Freed with the ctx. NULL and an error: callbacks missing,
 * micro_batches below 1, a container with a forward of its own, a number of children that the
 * stages do not divide (without .counts), a stage without any, counts that do not add up, ranks
 * that differ. */
TSH_API tsh_pipeline *tsh_pipeline_new(tsh_module *container, const tsh_pipeline_desc *desc);
/* Runs forward and backward of all micro-batches and adds the gradients of the mean of their losses
 * to those of all leaves. The gradients are those of tsh_backward of each loss / micro_batches in
 * turn (with .weight: of each loss, with .summed), with .defer for all but the last one. The
 * average over dp is sent while the last backward goes on, except for parameters tied across
 * stages, whose gradients are summed over these stages first. *loss (may be NULL) gets the mean
 * loss on every rank of pp, with .weight also of dp; NaN after an error. The norm in the following
 * tsh_optim_step or tsh_clip_grad_norm is that of all stages, too. Collectives over pp: each rank
 * of tp sends the tensors that cross stages, of any shape, dtype and layout, after 160 bytes that
 * describe them, and receives their gradients; gradients of tied parameters are exchanged; the loss
 * is broadcast once. With .weight, two all-reduces over dp: of the weights and of the loss.
 * TSH_ERR_STATE: ops are recorded already, or the call is between tsh_no_grad_begin and
 * tsh_no_grad_end. */
TSH_API tsh_result tsh_pipeline_train(tsh_pipeline *pipeline, double *loss);
/* Returns in *loss the mean loss of micro_batches (0: the number in the descriptor) by forwards
 * alone, on every rank of pp, with .weight also of dp. tsh_train decides whether modules are in
 * training mode. */
TSH_API tsh_result tsh_pipeline_evaluate(tsh_pipeline *pipeline, int micro_batches, double *loss);
