/* ========================================================================== */
/* >>norm-api                                                MARK: - norm-api */
/* Norms over channels: batch norm, group norm, instance norm; their layers.  */
/* Needs: >>module-api.                                                       */
/* ========================================================================== */

/* In all ops of this section, x is (N, C) or (N, C, ..), with channels in dimension 1, and the
 * result has x's shape and dtype. Sums are in double. */

/* -- batch norm ------------------------------------------------------------- */

typedef struct tsh_batch_norm_options {
    int training;    /* 1: normalises with the mean and variance of x, and updates the running
                      * ones; 0: normalises with the running ones */
    double momentum; /* weight of x's statistics in an update of the running ones: running = (1 -
                      * momentum) running + momentum new; 0: 0.1; TSH_ZERO: 0, which leaves them as
                      * they are */
    double eps;      /* added to the variance; 0: 1e-5; TSH_ZERO: 0 */
    int over_dp;     /* 1: in training, the statistics are those of the batches of all replicas
                      * (dp), as in SyncBatchNorm */
} tsh_batch_norm_options;
/* Normalises every channel of x: (x - mean) / sqrt(variance + eps) weight + bias, with weight and
 * bias (C) or NULL: 1 and 0; Ioffe & Szegedy 2015. options NULL: all 0. In training, the mean and
 * the biased variance are those of x; running_mean and running_var (C), both of them or NULL, are
 * updated in place: running = (1 - momentum) running + momentum new, where the new variance is the
 * unbiased one. The running ones get no gradient; the recomputation of a checkpoint does not update
 * them. Outside of training they are required.
 * Layouts of x: R, with all others R. S(1): the others are sharded by the same units, and no
 * collective runs. S along another dimension: the others are R, and the gradients of weight and
 * bias are partial; in training, forward all-gathers the statistics over tp, and backward
 * all-reduces two sums per channel. With .over_dp, the same two collectives run over dp, and the
 * gradient of x is that of the sum of all replicas' losses.
 * Errors: x has less than 2 dimensions, or is P; in training a channel has just one value; a size
 * does not fit; a recorded op has used a running tensor that is to be updated.
 * torch: F.batch_norm, nn.SyncBatchNorm */
TSH_API tsh_tensor *tsh_batch_norm(tsh_tensor *x, tsh_tensor *weight, tsh_tensor *bias,
                                   tsh_tensor *running_mean, tsh_tensor *running_var,
                                   const tsh_batch_norm_options *options);

typedef struct tsh_batch_norm_desc {
    int64_t dim;        /* number of channels */
    double eps;         /* added to the variance; 0: 1e-5; TSH_ZERO: 0 */
    double momentum;    /* see tsh_batch_norm_options; 0: 0.1; TSH_ZERO: 0 */
    int cumulative;     /* 1: the running statistics are the averages over all batches so far, and
                         * momentum is not used; torch's momentum=None */
    tsh_choice affine;  /* TSH_NO: no weight and bias; TSH_USUAL: both */
    tsh_choice running; /* TSH_NO: no running statistics: those of x are used in evaluation, too;
                         * torch's track_running_stats=False */
    int over_dp;        /* see tsh_batch_norm_options */
    tsh_dtype dtype;    /* dtype of the parameters and running statistics; 0: tsh_desc.dtype */
} tsh_batch_norm_desc;
/* Adds a batch-norm layer (tsh_batch_norm) for x (N, dim, ..), with parameters "weight" (dim),
 * initially 1, and "bias" (dim), initially 0, and the buffers "running_mean" (dim), initially 0,
 * "running_var" (dim), initially 1, and "num_batches_tracked", a scalar of TSH_I64 that counts the
 * forwards in training. In training mode (tsh_train) it normalises with the statistics of x, else
 * with the running ones. In plans, COLWISE shards all of these but the scalar, for inputs S(1);
 * SEQUENCE redistributes the input to S(1) or .input. Buffers are saved and loaded with the model,
 * and no optimiser changes them; without .over_dp each replica has those of its own batches, and
 * tsh_save writes those of the first replica.
 * torch: nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm */
TSH_API tsh_module *tsh_add_batch_norm(tsh_module *parent, const char *name,
                                       const tsh_batch_norm_desc *desc);

/* -- group norm, instance norm ---------------------------------------------- */

/* Normalises every group of C / groups channels of each sample: (x - mean) / sqrt(variance + eps)
 * weight + bias, with the mean and the biased variance of the group's values, weight and bias (C)
 * or NULL: 1 and 0; Wu & He 2018. eps 0: 1e-5; TSH_ZERO: 0. No collective. Layouts of x: R, with
 * weight and bias R. S(0): they are R, and their gradients are partial. S(1), with whole groups on
 * every rank (tsh_shard_units(1, C / groups)): they are sharded by the same units. Errors: x has
 * less than 2 dimensions; groups does not divide C; a size does not fit; another layout.
 * torch: F.group_norm */
TSH_API tsh_tensor *tsh_group_norm(tsh_tensor *x, int64_t groups, tsh_tensor *weight,
                                   tsh_tensor *bias, double eps);
/* Normalises every channel of each sample: tsh_group_norm with a group per channel. It is also an
 * error if x has less than 3 dimensions, or if a channel of a sample has just one value.
 * torch: F.instance_norm */
TSH_API tsh_tensor *tsh_instance_norm(tsh_tensor *x, tsh_tensor *weight, tsh_tensor *bias,
                                      double eps);

typedef struct tsh_group_norm_desc {
    int64_t groups, dim; /* dim: number of channels, a multiple of groups */
    double eps;          /* added to the variance; 0: 1e-5; TSH_ZERO: 0 */
    tsh_choice affine;   /* TSH_NO: no weight and bias; TSH_USUAL: both */
    tsh_dtype dtype;     /* dtype of the parameters; 0: tsh_desc.dtype */
} tsh_group_norm_desc;
/* Adds a group-norm layer (tsh_group_norm), with parameters "weight" (dim), initially 1, and "bias"
 * (dim), initially 0. In plans, COLWISE shards both by whole groups, for inputs S(1); SEQUENCE
 * redistributes the input to .input, S(0) or S(1).
 * torch: nn.GroupNorm */
TSH_API tsh_module *tsh_add_group_norm(tsh_module *parent, const char *name,
                                       const tsh_group_norm_desc *desc);

typedef struct tsh_instance_norm_desc {
    int64_t dim;       /* number of channels */
    double eps;        /* added to the variance; 0: 1e-5; TSH_ZERO: 0 */
    tsh_choice affine; /* TSH_YES: weight and bias; TSH_USUAL: none */
    tsh_dtype dtype;   /* dtype of the parameters; 0: tsh_desc.dtype */
} tsh_instance_norm_desc;
/* Adds an instance-norm layer (tsh_instance_norm), without running statistics; with .affine =
 * TSH_YES it has parameters and plans as tsh_add_group_norm.
 * torch: nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d */
TSH_API tsh_module *tsh_add_instance_norm(tsh_module *parent, const char *name,
                                          const tsh_instance_norm_desc *desc);
