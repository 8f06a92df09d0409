/* ========================================================================== */
/* >>data-api                                                MARK: - data-api */
/* A program's data: tensors of a step, batches, inputs that must be equal.   */
/* Needs: >>tensor-api.                                                       */
/* ========================================================================== */

/* All ranks of tp work on the same samples, each replica (rank of dp) on its own: choose data by
 * tsh_dp(ctx)->rank, never by the rank of the world. */

/* Makes a replicated step tensor with a copy of data, which is dense and row-major, of this dtype
 * (0: TSH_REAL), the same on all ranks of tp. It ends with its step; tsh_tensor_from makes one that
 * stays. Returns NULL, with an error, if data is NULL and the tensor is not empty.
 * torch: torch.tensor, torch.from_numpy, torch.as_tensor */
TSH_API tsh_tensor *tsh_from(tsh_ctx *ctx, const void *data, tsh_shape shape, tsh_dtype dtype);

/* Which samples each step takes. Fill in the first fields, the rest is 0 at first. epoch and at are
 * the state: a program that saves them goes on where it was when it puts them back, also with
 * another number of replicas. All ranks must use the same values. */
typedef struct tsh_sampler {
    int64_t count;       /* number of samples in the data; at least 1 */
    int64_t batch;       /* number of samples of a step, over all replicas; at least 1 */
    tsh_choice shuffle;  /* TSH_NO: samples come in order; 0: each epoch shuffles them anew */
    int drop_last;       /* 1: only whole batches; 0: the last one of an epoch may be smaller */
    uint64_t seed;       /* seed of the random orders; 0: the ctx's seed */
    int64_t epoch, at;   /* epoch: number of epochs that are finished; at: number of samples taken
                          * of the current one */
    int64_t first, mine; /* this replica's part of the batch: the place of its first sample in the
                          * order of the epoch, and how many it has; tsh_sampler_next sets them */
} tsh_sampler;
/* Goes on to the next batch: sets sampler->mine, the number of this replica's samples, which
 * tsh_sampler_index returns. Replica r gets chunk r of the batch by torch.chunk's rule. Returns the
 * number of samples of the whole batch; 0 at the end of an epoch, after which the next call begins
 * another; -1 and an error if the sampler's values are wrong. No collective runs.
 * Where a batch is not a multiple of dp, replicas have unequal numbers of samples, perhaps none:
 * the loss is then a sum of terms (tsh_backward_desc.summed).
 * torch: data.DataLoader, data.DistributedSampler, data.RandomSampler */
TSH_API int64_t tsh_sampler_next(tsh_ctx *ctx, tsh_sampler *sampler);
/* Returns the number, from 0 to count - 1, of this replica's sample i of the batch; i is below
 * sampler->mine. -1 and an error if it is not. The order of an epoch is a function of seed, epoch
 * and count: a Feistel network with Philox as its rounds, applied until the number is below count
 * (Black & Rogaway 2002), which needs no memory.
 * torch: torch.randperm */
TSH_API int64_t tsh_sampler_index(tsh_ctx *ctx, const tsh_sampler *sampler, int64_t i);

/* on 1: from now on each op compares those of its inputs that the program filled and that are
 * replicated (made by tsh_from, tsh_tensor_new, tsh_tensor_from, tsh_keep, or written through
 * tsh_data) over tp, by one all-gather of a hash for each. TSH_ERR_STATE names the op, the input
 * and a rank with other values: it was given other data, perhaps by a generator that every rank
 * seeds with its own number. For debugging: it reads each input once more. */
TSH_API void tsh_check_inputs(tsh_ctx *ctx, int on);
