/* ========================================================================== */
/* >>training-api                                        MARK: - training-api */
/* Training: schedules, optimisers, averages; quantising; pipelines.          */
/* Needs: >>module-api.                                                       */
/* ========================================================================== */

/* -- learning rates --------------------------------------------------------- */

/* How a learning rate changes from step to step. t: number of the step, 0, 1, ..., counted from the
 * end of the warm-up if there is one; `total` counts the warm-up, too. TSH_ONE_CYCLE has no other
 * warm-up than its own. */
typedef enum tsh_schedule_kind {
    TSH_CONSTANT,   /* always lr */
    TSH_LINEAR,     /* falls from lr at the end of the warm-up to lr_min at step `total` */
    TSH_COSINE,     /* falls from lr to lr_min as TSH_LINEAR does, but along half a cosine; torch:
                     * CosineAnnealingLR */
    TSH_STEP,       /* lr gamma^floor(t / period); torch: StepLR */
    TSH_EXPONENTIAL, /* lr gamma^t; torch: ExponentialLR */
    TSH_ONE_CYCLE,  /* lr is the peak: rises to it from lr / div_factor in the first part pct_start
                     * of all steps, then falls to lr / div_factor / final_div_factor at step
                     * total - 1, both along half a cosine; Smith & Topin 2018; torch: OneCycleLR */
    TSH_WSD,        /* warm-up, stable, decay: lr until step total - decay, then falls to lr_min at
                     * step `total`; Hu et al. 2024 */
    TSH_LAMBDA      /* lr factor(t, user); torch: LambdaLR */
} tsh_schedule_kind;
typedef struct tsh_schedule {
    tsh_schedule_kind kind;
    double lr, lr_min;     /* lr 0, in tsh_optim_desc.schedule: the optimiser's lr; lr_min: the last
                            * rate of LINEAR, COSINE, WSD */
    int64_t warmup, total; /* numbers of steps: the learning rate rises linearly from lr / warmup to
                            * lr in the first `warmup` steps. total: LINEAR, COSINE, ONE_CYCLE and
                            * WSD need it */
    int64_t period;        /* STEP needs it: number of steps between two changes */
    double gamma;          /* factor of each change; STEP: 0 means 0.1; EXPONENTIAL needs it */
    double pct_start, div_factor, final_div_factor; /* ONE_CYCLE: 0 means 0.3, 25, 1e4 */
    int64_t decay;         /* WSD: number of steps of the decay; 0: total / 10 */
    tsh_schedule_kind shape; /* WSD: the decay is TSH_LINEAR (0 means this) or TSH_COSINE */
    double (*factor)(int64_t t, void *user); /* LAMBDA needs it: returns the factor of lr at step
                                              * t */
    void *user;
} tsh_schedule;
/* Returns the learning rate of a step: 0, 1, ...; a negative step counts as 0. schedule NULL:
 * returns 0. NaN, which tsh_optim_set_lr refuses: the schedule lacks a field that its kind needs
 * (.total, .period, .gamma, .factor), or ONE_CYCLE has a warm-up.
 * torch: lr_scheduler.StepLR, lr_scheduler.ExponentialLR, lr_scheduler.CosineAnnealingLR,
 * lr_scheduler.OneCycleLR, lr_scheduler.LambdaLR, lr_scheduler.LinearLR */
TSH_API double tsh_schedule_lr(const tsh_schedule *schedule, int64_t step);

/* A learning rate that falls when a metric, such as the loss of a validation set, has stopped
 * improving. The first fields are the caller's; all others are private, and 0 at first. */
typedef struct tsh_plateau {
    double lr;        /* the learning rate: the first one, then the current one */
    double factor;    /* factor of a change of lr; 0: 0.1 */
    int64_t patience; /* number of calls without improvement that change nothing; 0: 10; -1: none */
    double threshold; /* improvements below it do not count; 0: 1e-4; TSH_ZERO: 0 */
    int absolute;     /* 1: threshold is a difference; 0: a fraction of the best metric so far */
    int largest;      /* 1: larger metrics are better (mode "max"); 0: smaller ones */
    int64_t cooldown; /* number of calls after a change in which none counts as bad; 0: none */
    double lr_min;    /* lr does not fall below it */
    double eps;       /* smaller changes of lr are not made; 0: 1e-8; TSH_ZERO: 0 */
    double best;      /* private, as the fields below */
    int64_t bad, cooling, calls;
} tsh_plateau;
/* Takes the metric of, for example, an epoch, and returns the learning rate from now on, which is
 * also in plateau->lr, for tsh_optim_set_lr. Give it the same metric on every rank. No collective.
 * plateau NULL: returns 0.
 * torch: lr_scheduler.ReduceLROnPlateau */
TSH_API double tsh_plateau_step(tsh_plateau *plateau, double metric);

/* -- optimisers ------------------------------------------------------------- */

/* g: the gradient, clipped; wd: weight decay. Where torch.optim has the optimiser, the updates are
 * its own. "Decoupled": a step first multiplies the parameter by 1 - lr wd; others add wd times the
 * parameter to g. */
typedef enum tsh_optim_kind {
    TSH_SGD,
    TSH_ADAM,
    TSH_ADAMW,     /* decoupled */
    TSH_LION,      /* decoupled; x -= lr sign(beta1 m + (1 - beta1) g); Chen et al. 2023 */
    TSH_RMSPROP,
    TSH_ADAGRAD,
    TSH_ADAMAX,
    TSH_NADAM,     /* decoupled, if .decoupled */
    TSH_RADAM,     /* decoupled, if .decoupled */
    TSH_ADAFACTOR, /* decoupled; of the squares of a gradient with two dimensions or more, it keeps
                    * only the means of rows and of columns; a step gathers each parameter on every
                    * rank */
    TSH_MUON,      /* decoupled; for parameters of two dimensions, such as the weights of linear
                    * layers; a step gathers each parameter on every rank; Jordan et al. 2024 */
    TSH_CUSTOM     /* the caller's own: .custom */
} tsh_optim_kind;

/* How Muon's learning rate depends on the shape (rows, columns) of a parameter. */
typedef enum tsh_adjust_lr {
    TSH_ADJUST_ORIGINAL,        /* lr sqrt(max(1, rows / columns)) */
    TSH_ADJUST_MATCH_RMS_ADAMW, /* 0.2 lr sqrt(max(rows, columns)); Liu et al. 2025 */
    TSH_ADJUST_NONE
} tsh_adjust_lr;

enum { TSH_MAX_MOMENTS = 3 }; /* the most moments of a parameter */

/* One call of an optimiser of the caller's own. Arrays have n elements of tsh_real; what is written
 * to x and the moments is kept, in the dtypes of the parameter and of moments. */
typedef struct tsh_update {
    const char *path;        /* path of the parameter */
    int64_t n;               /* number of elements */
    tsh_real *x;             /* the parameter */
    const tsh_real *grad;    /* its gradient, clipped */
    tsh_real *moment[TSH_MAX_MOMENTS]; /* its moments, 0 before the first step */
    tsh_shape shape;         /* the parameter's global shape */
    double lr, weight_decay; /* learning rate and weight decay of the parameter's group
                              * (tsh_optim_group) */
    int64_t step;            /* number of this update of the parameter, from 1 on */
} tsh_update;

/* An optimiser of the caller's own. */
typedef struct tsh_custom_optim {
    const char *name; /* its name in files and in tsh_summary; NULL: "custom" */
    int moments;      /* number of moments of each parameter, at most TSH_MAX_MOMENTS */
    int whole;        /* 1: update needs whole parameters: arrays are row-major and hold all of a
                       * parameter, at every degree. A step gathers each parameter on every rank */
    /* Without .whole, called for any number of any elements of a parameter, each once, by several
     * threads at a time if the rank has them: an element's result must depend on that element
     * alone. With .whole, every rank calls it for every parameter and must compute the same. */
    void (*update)(const tsh_update *update, void *user);
    void *user; /* passed to update; must stay valid as long as the optimiser */
} tsh_custom_optim;

typedef struct tsh_optim_desc {
    tsh_optim_kind kind;
    double lr; /* learning rate; 0: RMSprop, Adagrad, Adafactor 1e-2; Adamax, NAdam 2e-3; Lion 1e-4;
                * others 1e-3; TSH_ZERO: 0 */
    double momentum; /* SGD, RMSprop: momentum factor; 0: none. Muon: 0: 0.95; TSH_ZERO: 0 */
    int nesterov;    /* TSH_YES: uses Nesterov momentum; 0: SGD does not, Muon does */
    /* beta1, beta2: Adam, AdamW, Adamax, NAdam, RAdam 0 means 0.9, 0.999; Lion 0.9, 0.99. eps:
     * added to a root; 0: Adagrad 1e-10, Muon 1e-7, Adafactor the distance from 1 to the next
     * tsh_real, others 1e-8. TSH_ZERO: 0 */
    double beta1, beta2, eps;
    double weight_decay; /* wd of tsh_optim_kind; 0: none, Muon 0.1; TSH_ZERO: 0 */
    double clip_norm;    /* above 0: a step first clips the gradients, as
                          * tsh_clip_grad_norm; 0: no clipping */
    int zero; /* 1: moments are sharded over dp (ZeRO stage 1, Rajbhandari et al. 2020): each
               * rank keeps those of its chunk of every parameter (a chunk as in rule 5 of
               * >>comm-api, of the rank's local elements), whatever the sizes */
    /* dtypes of gradients between backward and step, and of moments (but Adafactor's are always
     * TSH_REAL). 0: TSH_REAL. TSH_BF16: half the memory; values are rounded up or down at random,
     * so that sums are right on average (stochastic rounding, Gupta et al. 2015). The random
     * numbers are keyed as those of dropout: the same bits at every degree of tp and for any number
     * of threads. */
    tsh_dtype grad_dtype, moments_dtype;
    int round_weights; /* 1: keeps no exact float weights of bf16 parameters: an update rounds
                        * the parameter at random, too. With TSH_BF16 in both fields above, the
                        * memory is that of pure bf16 in PyTorch */
    /* The schedule of the learning rate, which is copied. tsh_optim_step first sets the learning
     * rate to the schedule's rate at step .steps + .skipped (see tsh_optim_info). NULL: the
     * learning rate changes by tsh_optim_set_lr only. */
    const tsh_schedule *schedule;
    double alpha;          /* RMSprop: decay rate of the mean of squares; 0: 0.99; TSH_ZERO: 0 */
    int centered;          /* RMSprop: 1: divides by the root of the variance */
    double lr_decay;       /* Adagrad: step s divides lr by 1 + (s - 1) lr_decay; 0: does not */
    double momentum_decay; /* NAdam: 0: 4e-3; TSH_ZERO: 0 */
    int decoupled;         /* NAdam, RAdam: 1: weight decay is decoupled */
    double beta2_decay;    /* Adafactor: step s weighs new squares by s^beta2_decay; 0: -0.8 */
    double eps2, d;        /* Adafactor: eps2: least RMS of a parameter, by which its update is
                            * scaled; 0: 1e-3; TSH_ZERO: 0; d: greatest RMS of an update; 0: 1 */
    /* Muon: coefficients and number of the steps of Newton and Schulz, which are computed in bf16;
     * all 0: 3.4445, -4.775, 2.0315; ns_steps 0: 5 */
    double ns_coefficients[3];
    int ns_steps;
    tsh_adjust_lr adjust_lr_fn; /* Muon: lr by the shape */
    tsh_custom_optim custom;    /* TSH_CUSTOM needs .update */
} tsh_optim_desc;
/* Makes an optimiser for all parameters below module. desc NULL: SGD.
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
 * parameter. Muon, Adafactor and a custom optimiser with .whole take no row-sparse gradient either.
 * Freed by tsh_optim_free or with the ctx.
 * NULL and an error: TSH_ERR_ARGUMENT (a field out of range; .custom without update; a schedule
 * that lacks a field), TSH_ERR_DTYPE.
 * torch: optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.Adagrad, optim.Adamax,
 * optim.NAdam, optim.RAdam, optim.Adafactor, optim.Muon */
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
/* Makes a parameter group with an optimiser of its own, such as AdamW for all that Muon does not
 * take:
 *
 *     tsh_optim_desc muon = {.kind = TSH_MUON, .lr = 0.02}, rest = {.kind = TSH_ADAMW, .lr = 3e-4};
 *     tsh_optim *optim = tsh_optim_new(root, &muon);
 *     tsh_optim_group_with(optim, "**.bias", &rest);
 *     tsh_optim_group_with(optim, "wte.weight", &rest);
 *
 * Parameters that match the pattern (see tsh_optim_group) get the kind, its options and the weight
 * decay of desc. Their learning rate keeps the ratio desc.lr / lr of the optimiser now, also under
 * a schedule. .clip_norm, .zero, .grad_dtype, .moments_dtype, .round_weights and .schedule are
 * those of the optimiser, and must be 0 here. Call it before the first step and before tsh_load.
 * TSH_ERR_ARGUMENT: desc is NULL or out of range, the pattern matches none, the optimiser's
 * learning rate is 0; TSH_ERR_STATE: a parameter that matches has moments already.
 * torch: optim.Optimizer.add_param_group */
TSH_API tsh_result tsh_optim_group_with(tsh_optim *optim, const char *pattern,
                                        const tsh_optim_desc *desc);
/* Sets the learning rate of the steps to come, which may be 0; groups scale it. With a schedule in
 * the optimiser it lasts until the next step only. A rate that is negative or not finite, as that
 * of a tsh_schedule without a field that it needs, is TSH_ERR_ARGUMENT in the ctx. */
TSH_API void tsh_optim_set_lr(tsh_optim *optim, double lr);
/* Updates the parameters with their gradients. One all-reduce over tp and pp for the gradient norm;
 * with .zero it is over dp, too, and all-gathers of the parameters follow. Optimisers that need
 * whole parameters (Adafactor, Muon, .whole) gather each sharded parameter, its gradient and its
 * moments over tp and, with .zero, over dp; results are the same bits at every degree. If any
 * gradient is not finite, the step is skipped on every rank.
 * TSH_ERR_SHAPE: a parameter of Muon has not two dimensions (see tsh_optim_group_with);
 * TSH_ERR_STATE: weights are swapped with averages (tsh_ema_swap). */
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

/* -- frozen parameters -------------------------------------------------------- */

/* Freezes the parameters below module whose path matches the pattern (see tsh_optim_group; "**":
 * all; buffers and quantised weights are never trained, and stay as they are). A frozen parameter
 * is a constant: it gets no gradient, no optimiser updates it, and it has no memory for a gradient
 * or for moments (those that it has are released). Backward skips gradients that no trained
 * parameter needs: it ends at the first layer, in the order of forward, that has one. Of a frozen
 * linear layer's input, nothing is saved. A parameter that is tied is frozen in all its modules.
 * Weight decay does not change it either. Call it between steps, on every rank, before or after
 * tsh_optim_new.
 * Errors, after which nothing is changed: TSH_ERR_ARGUMENT (no parameter matches), TSH_ERR_STATE (a
 * recorded op uses one).
 * torch: nn.Module.requires_grad_ */
TSH_API tsh_result tsh_freeze(tsh_module *module, const char *pattern);
/* Undoes tsh_freeze. An optimiser that was made before updates the parameters again, with moments
 * that begin at 0. Errors as of tsh_freeze, and TSH_ERR_DTYPE: an optimiser has the parameter,
 * whose dtype is TSH_F16. */
TSH_API tsh_result tsh_unfreeze(tsh_module *module, const char *pattern);

/* -- adapters of low rank ------------------------------------------------------ */

/* A part of a layer's output features that has an A and a B of its own. */
typedef struct tsh_lora_part {
    const char *name; /* name of the layer in files: "q_proj" */
    int64_t length;   /* number of output features */
} tsh_lora_part;
typedef struct tsh_lora_desc {
    int rank;       /* rank of the adapter: rows of A, columns of B; at least 1 */
    double alpha;   /* the factor s of B A in the layer's output is alpha / rank; 0: 8, as in PEFT;
                     * TSH_ZERO: 0 */
    double dropout; /* probability of a zero in the adapter's input, in training mode; 0: none */
    int rslora;     /* 1: s is alpha / sqrt(rank) instead (rsLoRA); Kalajdzievski 2023 */
    const char *name; /* name of the adapter; NULL: "default" */
    tsh_dtype dtype;  /* dtype of A and B; 0: tsh_desc.dtype */
    /* For a fused layer, whose output features are those of several layers of a file, such as
     * q_proj, k_proj and v_proj, one after the other: array of these layers, `part_count` of them.
     * Each has an A and a B. A column-parallel weight must have them as its segments. NULL: one A
     * and one B */
    const tsh_lora_part *parts;
    int part_count;
} tsh_lora_desc;
/* Adds adapters (LoRA, Hu et al. 2021), which fine-tune a model, to the linear and classifier
 * layers whose path below module matches the pattern (see tsh_plan_rule; NULL: all linear layers,
 * but no classifier), and freezes all other parameters below module, as PEFT does; tsh_unfreeze
 * lets some be trained, too. Such a layer computes y = W x + b + s B A dropout(x). W may have any
 * dtype, also a quantised one: outside of tsh_no_grad_begin and tsh_no_grad_end, x is then
 * multiplied as it is, not rounded to 8 bits.
 * A (rank, in) is "<layer>.lora_A.<name>.weight", uniform in [-1 / sqrt(in), 1 / sqrt(in)); B (out,
 * rank) is "<layer>.lora_B.<name>.weight", zeros at first; with .parts,
 * "<layer>.<part>.lora_A.<name>.weight" and so on.
 * If W is column-parallel, B is sharded as W's outputs, A is replicated, and backward all-reduces
 * the gradient of A x (rank numbers per row). If W is row-parallel, A is sharded as W's inputs, B
 * is replicated, and forward all-reduces A x. Plans may be applied before or after it.
 * A layer may have several adapters, of different names; the one added last is active (see
 * tsh_lora_use). Call it when the model is complete, before tsh_optim_new and tsh_pipeline_new.
 * tsh_load after it reads the adapters of a name if the files have some of these, and else leaves
 * them as they are: so the base model's own files can be loaded before or after.
 * Errors, after which nothing is changed: TSH_ERR_ARGUMENT (desc is out of range, no layer matches,
 * parts that do not add up), TSH_ERR_STATE (a layer has an adapter of this name; recorded ops use a
 * parameter). */
TSH_API tsh_result tsh_lora(tsh_module *module, const char *pattern, const tsh_lora_desc *desc);
/* Makes the adapters of this name active in all layers below module; layers that have none of this
 * name, and with name NULL all layers, compute without an adapter. Adapters that are not active
 * stay in the model, but get no gradient meanwhile. With none active, the model is its own frozen
 * reference, without a second copy. Call it on every rank; it may be called during a step: backward
 * recomputes a checkpoint with the adapters of its forward. The next collective compares the ranks'
 * models, and ranks with other adapters get TSH_ERR_MISMATCH. TSH_ERR_ARGUMENT: no layer has one of
 * this name; TSH_ERR_STATE: an adapter is merged. */
TSH_API tsh_result tsh_lora_use(tsh_module *module, const char *name);
/* Merges the active adapters into the weights below module: W becomes W + s B A, rounded once to
 * its dtype, and forward computes with W alone. The old values are kept, which takes their memory
 * again. No collective. Errors, after which nothing is changed: TSH_ERR_ARGUMENT (no active
 * adapter), TSH_ERR_DTYPE (a weight is quantised), TSH_ERR_STATE (a weight is shared with another
 * layer, or is trained; recorded ops use it). */
TSH_API tsh_result tsh_lora_merge(tsh_module *module);
/* Undoes tsh_lora_merge: the weights below module have their old bits again. TSH_ERR_STATE:
 * recorded ops use a weight. */
TSH_API tsh_result tsh_lora_unmerge(tsh_module *module);
/* Removes the adapters of this name (NULL: all) below module, with their parameters. The weights
 * keep what is merged into them: after tsh_lora_merge, the model is an ordinary one. Call it
 * between steps. TSH_ERR_ARGUMENT: there is none of this name; TSH_ERR_STATE: an optimiser, a
 * tsh_ema or a pipeline has them; recorded ops use them. */
TSH_API tsh_result tsh_lora_free(tsh_module *module, const char *name);

/* -- averages of weights ------------------------------------------------------ */

/* An exponential moving average of the weights of a module. */
typedef struct tsh_ema tsh_ema;
/* Makes averages for all parameters below module; buffers have none. decay 0: 0.999; TSH_ZERO: 0.
 * They are TSH_REAL, also those of bf16 parameters, of which an optimiser's exact float weights are
 * averaged; each rank keeps those of its shards. Freed by tsh_ema_free or with the ctx. Make it
 * when the model is complete. No collective. NULL and TSH_ERR_ARGUMENT: decay is not from 0 to 1.
 * torch: optim.swa_utils.AveragedModel, optim.swa_utils.get_ema_multi_avg_fn */
TSH_API tsh_ema *tsh_ema_new(tsh_module *module, double decay);
/* Frees averages. If they are swapped in, swaps first. Does nothing if ema is NULL. */
TSH_API void tsh_ema_free(tsh_ema *ema);
/* Updates the averages, usually after each tsh_optim_step: average = decay average + (1 - decay)
 * weight; the first time, average = weight. No collective, unless tsh_parallelize has changed a
 * layout since. TSH_ERR_STATE: the averages are swapped in.
 * torch: optim.swa_utils.AveragedModel.update_parameters */
TSH_API tsh_result tsh_ema_update(tsh_ema *ema);
/* Exchanges the weights and their averages, rounded to the parameter's dtype: to evaluate the
 * averaged model, or to save it alone with tsh_save. The second call restores the weights, bit by
 * bit; until then a copy of them is kept, and tsh_optim_step, tsh_ema_update, tsh_load and saving
 * with .ema are errors. TSH_ERR_STATE: no update so far; recorded ops use a parameter. */
TSH_API tsh_result tsh_ema_swap(tsh_ema *ema);
/* Returns the number of updates so far; 0 if ema is NULL. */
TSH_API int64_t tsh_ema_updates(const tsh_ema *ema);

/* -- replicas that seldom communicate ---------------------------------------- */

typedef struct tsh_outer_desc {
    int64_t every;   /* H: number of steps between two exchanges of a parameter; at least 1 */
    double lr;       /* learning rate of the outer step; 0: 0.7; TSH_ZERO: 0 */
    double momentum; /* its Nesterov momentum; 0: 0.9; TSH_ZERO: 0 */
    tsh_dtype wire;  /* dtype in which changes are sent: any floating one but TSH_F16, also those of
                      * quantised weights, such as TSH_Q8_0; 0: TSH_REAL */
    int fragments;   /* F: number of parts in which the parameters are exchanged, one part every H /
                      * F steps, so that each message is shorter; at most 32 and H; 0: 1 */
    int64_t delay;   /* number of steps during which a fragment is sent; it is used after them;
                      * below H; 0: a step waits for it */
    double mix;      /* what a replica keeps of its own parameter when the new one arrives: it
                      * becomes mix own + (1 - mix) new. 0: with a delay 0.5, without 0; TSH_ZERO:
                      * 0 */
} tsh_outer_desc;
/* Lets each replica train on its own and exchange its changes every H steps only, for slow links
 * between the ranks of dp (DiLoCo, Douillard et al. 2023; fragments, delay and mix: Streaming
 * DiLoCo, Douillard et al. 2025). While the tsh_outer exists, backward averages no gradient over
 * dp, and each replica takes steps of its own with moments of its own. After every H steps, the
 * mean over dp of what the parameters have changed since the last exchange is the gradient of an
 * outer step, that of torch.optim.SGD with nesterov=True on the outer weights. These and their
 * momentum are floats, of which each rank keeps those of its shards; they have the same bits on all
 * replicas. Without .fragments and .delay, the parameters then get the outer weights, so that all
 * replicas are equal after an exchange.
 * What the replicas send is rounded to .wire, summed as tsh_real (rule 5 of >>comm-api, with
 * chunks of blocks of 32 elements), and the mean is rounded once. An exchange of n bytes in .wire
 * sends those of an all-reduce of n bytes.
 * optim: an optimiser of module, without .zero. Frozen parameters take no part; one that is frozen
 * later gets its value of the last exchange. tsh_save and tsh_load with this optimiser have the
 * state of all replicas, too; load or set parameters without it before the first step only, as
 * outer weights begin with what the parameters are then. Freed by tsh_outer_free or with the ctx.
 * No collective. NULL and an error: TSH_ERR_ARGUMENT (a field out of range; another module's
 * optimiser; .zero), TSH_ERR_DTYPE (.wire), TSH_ERR_STATE (the optimiser has a tsh_outer). */
TSH_API tsh_outer *tsh_outer_new(tsh_module *module, tsh_optim *optim, const tsh_outer_desc *desc);
/* Takes a step of the optimiser (tsh_optim_step), then does the part of the exchange that is due.
 * Call it in place of tsh_optim_step, on every rank. A step that one replica skips, for a gradient
 * that is not finite, counts on all. Collectives over dp, in the steps that exchange a fragment: an
 * all-to-all and an all-gather; with .delay they run during the steps between, the all-gather in
 * the second half of them. Errors as of tsh_optim_step; TSH_ERR_STATE: the optimiser was freed; a
 * parameter got another layout while its changes were on their way. */
TSH_API tsh_result tsh_outer_step(tsh_outer *outer);
typedef struct tsh_outer_info {
    int64_t steps;     /* number of calls of tsh_outer_step */
    int64_t exchanges; /* number of outer steps, of one fragment each */
} tsh_outer_info;
/* Returns the numbers of steps so far; all 0 if outer is NULL. */
TSH_API tsh_outer_info tsh_outer_state(const tsh_outer *outer);
/* Ends the outer steps: the parameters get the outer weights, and backward averages gradients
 * again. The optimiser's moments still differ between replicas: go on with a new one. Changes that
 * are being sent are lost. Does nothing if outer is NULL. */
TSH_API void tsh_outer_free(tsh_outer *outer);

/* -- quantised weights ------------------------------------------------------ */

/* Quantises the weights of the linear, classifier and embedding layers whose path below module
 * matches the pattern (see tsh_plan_rule; NULL: all). dtype: TSH_Q8_0, TSH_Q4_0 or TSH_Q4_1. The
 * bytes are those of ggml, and, at every degree of tp, those of the whole weight. A
 * quantised weight has no gradient, optimisers made later leave it out, and the gradient of a
 * layer's input is computed from the quantised values. Weights that are quantised already stay as
 * they are; tied weights are quantised for all their layers. A weight stored (in, out) becomes
 * (out, in).
 * tsh_linear with such a weight returns x's dtype. Between tsh_no_grad_begin and tsh_no_grad_end it
 * quantises x, too, to 8 bits in blocks of 32, and sums the products within a block exactly: the
 * bits of a row do not depend on the number of rows. Elsewhere, as in training (tsh_lora), it
 * converts the weight, some rows at a time, and multiplies x as it is. tsh_embedding
 * returns TSH_REAL. Shard the model first; a plan that changes the layout of a quantised weight is
 * an error.
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
                        * backward in turn: it holds the saved activations of at most p - s
                        * forwards; Narayanan et al. 2021 */
    TSH_PIPELINE_GPIPE /* all forwards, then all backwards: a stage holds the saved activations of
                        * all micro-batches; Huang et al. 2019 */
} tsh_pipeline_schedule;
typedef struct tsh_pipeline_desc {
    int micro_batches;
    const int *counts; /* counts[s]: number of children of stage s; NULL: equally many for each */
    tsh_pipeline_schedule schedule;
    /* Called for each micro-batch. input, on the first stage: returns the input of the container's
     * first child; it may call tsh_set_segments for the container, which other stages then get.
     * loss, on the last stage: takes the output of the last child and returns the
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
 * of tp sends the tensors that cross stages, of any shape, dtype and layout, after 168 bytes that
 * describe them, and receives their gradients; gradients of tied parameters are exchanged; the loss
 * is broadcast once. With .weight, two all-reduces over dp: of the weights and of the loss; none
 * with a tsh_outer, whose replicas get losses of their own.
 * TSH_ERR_STATE: ops are recorded already, or the call is between tsh_no_grad_begin and
 * tsh_no_grad_end. */
TSH_API tsh_result tsh_pipeline_train(tsh_pipeline *pipeline, double *loss);
/* Outputs in *loss the mean loss of `micro_batches` micro-batches (0: as many as in the
 * descriptor), by forwards alone, on every rank of pp, with .weight also of dp. tsh_train decides
 * whether modules are in training mode. */
TSH_API tsh_result tsh_pipeline_evaluate(tsh_pipeline *pipeline, int micro_batches, double *loss);
