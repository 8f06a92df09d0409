/* ========================================================================== */
/* >>training-api                                        MARK: - training-api */
/* Training: optimisers and schedules; quantising; pipelines.                 */
/* Needs: >>module-api.                                                       */
/* ========================================================================== */

/* -- optimisers ------------------------------------------------------------- */

typedef enum tsh_optim_kind { TSH_SGD, TSH_ADAM, TSH_ADAMW } tsh_optim_kind;
typedef struct tsh_optim_desc {
    tsh_optim_kind kind;
    double lr;                /* 0: 1e-3; TSH_ZERO: 0 */
    double momentum;          /* SGD */
    int nesterov;             /* SGD */
    double beta1, beta2, eps; /* Adam; 0: 0.9, 0.999, 1e-8; TSH_ZERO: 0 */
    double weight_decay;      /* ADAMW: decoupled; the others: added to the gradient */
    double clip_norm;         /* 0: none; else tsh_clip_grad_norm comes first */
    int zero; /* 1: moments are cut over dp (ZeRO stage 1, Rajbhandari et al. 2020): each rank keeps
                 those of its chunk of every parameter (rule 5 of >>comm-api, of local elements),
                 whatever the sizes */
    /* Of gradients between backward and step, and of moments. 0: TSH_REAL. TSH_BF16: half the
     * memory; they are rounded up or down at random, so that sums stay right on average (stochastic
     * rounding, Gupta et al. 2015), keyed as dropout is: the same bits at every degree of tp and
     * number of threads. */
    tsh_dtype grad_dtype, moments_dtype;
    int round_weights; /* 1: no exact weights are kept of bf16 parameters; an update rounds them at
                          random, too. With both dtypes above, PyTorch's memory of pure bf16 */
} tsh_optim_desc;
/* For every parameter below module; torch.optim.SGD, Adam, AdamW. A bf16 parameter is the rounded
 * value of a float weight whose other 16 bits the optimiser keeps and updates, too, so that no
 * small step is lost: the same memory as of a float. (What tsh_write or tsh_init_* writes is the
 * float; tsh_data writes to its upper half.) A parameter of TSH_F16 is an error: its range is too
 * small. Where a gradient is row-sparse
 * (tsh_lookup_desc), values, moments and weight decay of the rows it touches only;
 * torch.optim.SparseAdam. Closed with the ctx,
 * or by tsh_optim_free. With .zero, backward reduce-scatters the gradients
 * of these parameters in place of the all-reduce, so that tsh_grad cannot read them, and a step
 * all-gathers the parameters, in the same buckets: the bytes of an all-reduce and the same bits. A
 * row-sparse gradient cannot be cut: TSH_ERR_UNSUPPORTED by tsh_backward. A parameter is one
 * optimiser's then. */
TSH_API tsh_optim *tsh_optim_new(tsh_module *module, const tsh_optim_desc *desc);
/* Releases the moments, and of each parameter that no other optimiser has, its gradient and what
 * tsh_optim_new keeps beside it: a bf16 parameter is what its 16 bits say from now on. Then
 * tsh_quantize may be called, or training goes on with a new optimiser. NULL: does nothing. */
TSH_API void tsh_optim_free(tsh_optim *optim);
/* Parameters whose path below the module matches: learning rate times lr_scale, this weight decay.
 * Later groups win. A pattern is that of tsh_plan_rule: "**.bias" are all biases, "*.bias" only
 * those of the module's own children; tsh_summary says how many a group has. TSH_ERR_ARGUMENT: it
 * matches none, or a value is below 0. */
TSH_API tsh_result tsh_optim_group(tsh_optim *optim, const char *pattern, double lr_scale,
                                   double weight_decay);
/* The learning rate of the steps to come, 0 too; groups scale it. */
TSH_API void tsh_optim_set_lr(tsh_optim *optim, double lr);
/* One step with the gradients there are. One all-reduce over tp and pp (norm); with .zero it is
 * over dp too, and all-gathers of the parameters follow. Where any gradient is not finite, the step
 * is skipped on every rank. */
TSH_API tsh_result tsh_optim_step(tsh_optim *optim);

typedef struct tsh_optim_info {
    int64_t steps, skipped; /* done, and left out for a gradient that was not finite */
    double norm;            /* global 2-norm at the last step, before clipping */
    double lr;
} tsh_optim_info;
/* Steps so far, the last norm and the learning rate. */
TSH_API tsh_optim_info tsh_optim_state(const tsh_optim *optim);
/* Scales the gradients below module so that their global 2-norm is at most max_norm: replicated and
 * tied parameters count once; torch.nn.utils.clip_grad_norm_. *norm (may be NULL): before
 * clipping. max_norm 0 gives zeros. */
TSH_API tsh_result tsh_clip_grad_norm(tsh_module *module, double max_norm, double *norm);

typedef enum tsh_schedule_kind { TSH_CONSTANT, TSH_LINEAR, TSH_COSINE } tsh_schedule_kind;
typedef struct tsh_schedule {
    tsh_schedule_kind kind;
    double lr, lr_min;
    int64_t warmup, total; /* steps: linear from lr / warmup to lr, then down to lr_min at total */
} tsh_schedule;
/* The learning rate of step 0, 1, ...; below 0 that of step 0. schedule NULL: 0. */
TSH_API double tsh_schedule_lr(const tsh_schedule *schedule, int64_t step);

/* -- quantised weights ------------------------------------------------------ */

/* Quantises the weights of the linear, classifier and embedding layers whose path below module
 * matches the pattern, that of tsh_plan_rule; NULL: all. dtype: TSH_Q8_0, TSH_Q4_0 or TSH_Q4_1; the
 * bytes are ggml's, and those of the whole weight at every degree of tp. For inference: such a
 * weight has no gradient, optimisers made later leave it out, and the gradient of a layer's input
 * is that of the weight as it is stored. Weights that are quantised already stay as they are; tied
 * ones are quantised for all their layers. One stored (in, out) becomes (out, in).
 * tsh_linear of such a weight gives x's dtype. It quantises x, too, to 8 bits by blocks of 32, and
 * sums the products within a block exactly: the same bits for any number of rows. tsh_embedding
 * gives TSH_REAL. Shard the model first; a plan that lays such a weight anew is an error.
 * No collective. Errors, after which nothing is changed: TSH_ERR_ARGUMENT (no layer matches; a
 * weight is tied to what takes none), TSH_ERR_SHAPE (input features are no multiple of 32),
 * TSH_ERR_LAYOUT (a row-parallel cut within a block: .unit = 32 in the rules of the layer and of
 * the one before it), TSH_ERR_STATE (an optimiser has it; ops are recorded that use it). */
TSH_API tsh_result tsh_quantize(tsh_module *module, const char *pattern, tsh_dtype dtype);

/* -- pipeline --------------------------------------------------------------- */

/* The order in which a stage does its forwards and backwards. Both give the same bits, and the same
 * share of time, (p - 1) / (m + p - 1) of p equal stages and m micro-batches, in which a stage has
 * nothing to do. */
typedef enum tsh_pipeline_schedule {
    TSH_PIPELINE_1F1B, /* p - 1 - stage forwards, then one forward and one backward in turn: a stage
                          holds what p - stage forwards keep; Narayanan et al. 2021 */
    TSH_PIPELINE_GPIPE /* all forwards, then all backwards: it holds what m forwards keep; Huang et
                          al. 2019 */
} tsh_pipeline_schedule;
typedef struct tsh_pipeline_desc {
    int micro_batches;
    const int *counts; /* children of each stage, a number per rank of pp; NULL: equally many */
    tsh_pipeline_schedule schedule;
    /* Of micro-batch 0, 1, ...: what the first child takes, on the first stage; and on the last
     * one, from what the last child gave, the loss, a replicated scalar. Step tensors that they
     * make end with the micro-batch. */
    tsh_tensor *(*input)(tsh_ctx *ctx, int micro_batch, void *user);
    tsh_tensor *(*loss)(tsh_ctx *ctx, tsh_tensor *output, int micro_batch, void *user);
    /* NULL: losses are means, of which all count alike. Else a loss is the sum over so many
     * elements, such as the targets that are not ignored; it is asked after .loss. Then the mean is
     * over all elements of all micro-batches and replicas, however unevenly they lie. */
    double (*weight)(tsh_ctx *ctx, int micro_batch, void *user);
    void *user;
} tsh_pipeline_desc;
/* Deals the children of a container, which its forward calls one after the other, to the ranks of
 * pp, the stages. Modules before the container in the tree, such as embeddings, belong to the first
 * stage and are for .input to call, those after it to the last one and .loss. A rank holds
 * parameters of its own stage only: others get no memory, or give back what they had, and are no
 * longer met by tsh_each_param; initial values and dropout masks are those of one rank. A parameter
 * tied across stages is held by each of these. The tree is whole by then, and the same on every
 * rank. Further pipelines of a ctx deal the same children alike. One all-reduce over the world.
 * Closed with the ctx. NULL and an error: callbacks missing, micro_batches below 1, a container
 * with a forward of its own, children that do not divide into stages, a stage without any, counts
 * that do not add up, ranks that differ. */
TSH_API tsh_pipeline *tsh_pipeline_new(tsh_module *container, const tsh_pipeline_desc *desc);
/* Forwards and backwards of all micro-batches: gradients of the mean of their losses, summed into
 * every leaf, as tsh_backward of each loss / micro_batches in turn would (with .weight: of each
 * loss, .summed), all but the last one with .defer: the average over dp travels while the last
 * backward goes on, but for parameters tied across stages, whose gradients are summed over these
 * first. *loss (may be NULL): that mean, on every rank of pp, and with .weight of dp; NaN after an
 * error. The norm that follows (tsh_optim_step, tsh_clip_grad_norm) is that of all stages, too.
 * Collectives over pp: what crosses from one stage to the next, of any shape, dtype and layout, is
 * sent by every rank of tp for itself, behind 160 bytes that describe it, and its gradient comes
 * back; tied gradients are exchanged; one broadcast of the loss. With .weight, two all-reduces over
 * dp, of weights and of the loss. TSH_ERR_STATE: ops are recorded already, or within
 * tsh_no_grad_begin. */
TSH_API tsh_result tsh_pipeline_train(tsh_pipeline *pipeline, double *loss);
/* The mean loss of micro_batches (0: as many as the description says) by forwards alone, on every
 * rank of pp, and with .weight of dp. tsh_train says whether modules train. */
TSH_API tsh_result tsh_pipeline_evaluate(tsh_pipeline *pipeline, int micro_batches, double *loss);
