/* ========================================================================== */
/* >>loss-api                                                MARK: - loss-api */
/* Losses besides cross-entropy: of numbers, of probabilities, of classes.    */
/* Needs: >>op-api.                                                           */
/* ========================================================================== */

/* -- losses -----------------------------------------------------------------
 * Each takes a prediction x and a target and returns the mean of the elements' losses, a scalar;
 * their sum; or with TSH_REDUCE_NONE one loss per element, in x's shape. The result is TSH_REAL,
 * whatever the inputs are, as that of tsh_cross_entropy is.
 *   Shapes: x and target have the same shape, any; they are not broadcast against each other, so
 * (16, 1) against (16) is TSH_ERR_SHAPE, and the error says which of tsh_squeeze and tsh_unsqueeze
 * mends it. Weights are broadcast to x's shape.
 *   Dtypes: x, target and weights are floating, each of its own dtype (else TSH_ERR_DTYPE).
 *   Layouts: x and target both R: the result is R. Both sharded alike, S(d): TSH_REDUCE_NONE gives
 * S(d), mean and sum give P, which tsh_redistribute(loss, tsh_replicated()) completes for
 * tsh_backward. P inputs are TSH_ERR_LAYOUT. A weight is R, or sharded as x. No collective runs,
 * except that a mean which divides by the sum of the weights all-reduces that sum if x is sharded.
 *   Gradients flow to x and target, not to weights. The mean of no elements is NaN, as in torch.
 * Over data-parallel ranks with batches of different sizes, use sums: see tsh_backward_desc. */

/* Options of the losses below; NULL in place of a descriptor: no options. */
typedef struct tsh_loss_desc {
    tsh_reduction reduction; /* 0: TSH_REDUCE_MEAN */
    tsh_tensor *weight;      /* factor of each element's loss, broadcast to x's shape; of
                              * tsh_nll_loss: (V), a weight per class; NULL: 1 */
    tsh_tensor *pos_weight;  /* tsh_binary_cross_entropy_with_logits: factor of target log
                              * sigmoid(x), broadcast to x's shape; NULL: 1 */
    double delta;            /* tsh_huber_loss: where the loss turns from square to linear; 0: 1 */
    double beta;             /* tsh_smooth_l1_loss: where the loss turns from square to linear; 0:
                              * 1; TSH_ZERO: 0, which gives |x - target| */
    int log_target;          /* tsh_kl_div: 1: the target is log-probabilities */
    int ignore;              /* tsh_nll_loss: 0: target -100 is ignored; 1: ignore_index is */
    int64_t ignore_index;    /* tsh_nll_loss, if ignore is 1: the target to ignore, any integer */
    int dim;                 /* tsh_nll_loss: dimension of log_probs that has the classes: 0: the
                              * last one; 1: dimension 1, as in torch */
} tsh_loss_desc;

/* Returns the squared error, (x - target)^2. With a weight, the mean divides by the sum of the
 * weights, as in torch.
 * torch: F.mse_loss, nn.MSELoss */
TSH_API tsh_tensor *tsh_mse_loss(tsh_tensor *x, tsh_tensor *target, const tsh_loss_desc *desc);
/* Returns the absolute error, |x - target|; its derivative is 0 where they are equal. With a
 * weight, the mean divides by the sum of the weights, as in torch.
 * torch: F.l1_loss, nn.L1Loss */
TSH_API tsh_tensor *tsh_l1_loss(tsh_tensor *x, tsh_tensor *target, const tsh_loss_desc *desc);
/* Returns, with d = |x - target|: d^2 / 2 if d <= delta, else delta (d - delta / 2); Huber 1964.
 * desc.delta must be above 0. With a weight, the mean divides by the number of elements.
 * torch: F.huber_loss, nn.HuberLoss */
TSH_API tsh_tensor *tsh_huber_loss(tsh_tensor *x, tsh_tensor *target, const tsh_loss_desc *desc);
/* Returns, with d = |x - target|: d^2 / (2 beta) if d < beta, else d - beta / 2; Girshick 2015,
 * "Fast R-CNN". With a weight, the mean divides by the number of elements.
 * torch: F.smooth_l1_loss, nn.SmoothL1Loss */
TSH_API tsh_tensor *tsh_smooth_l1_loss(tsh_tensor *x, tsh_tensor *target,
                                       const tsh_loss_desc *desc);
/* Returns -(target log x + (1 - target) log(1 - x)) of probabilities x. Logarithms are at least
 * -100, as in torch. An element of x or target outside [0, 1] is TSH_ERR_ARGUMENT, on every rank.
 * The mean divides by the number of elements, also with a weight. The loss of logits,
 * tsh_binary_cross_entropy_with_logits, is exact where x rounds to 0 or 1.
 * torch: F.binary_cross_entropy, nn.BCELoss */
TSH_API tsh_tensor *tsh_binary_cross_entropy(tsh_tensor *x, tsh_tensor *target,
                                             const tsh_loss_desc *desc);
/* Returns -(pos_weight target log s + (1 - target) log(1 - s)) with s = sigmoid(x), computed from
 * the logits x without overflow: (1 - target) x - (1 + (pos_weight - 1) target) log s, with log s =
 * min(x, 0) - log(1 + e^-|x|). The mean divides by the number of elements, also with weights. If x
 * is itself the result of tsh_sigmoid, a warning is logged.
 * torch: F.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss */
TSH_API tsh_tensor *tsh_binary_cross_entropy_with_logits(tsh_tensor *x, tsh_tensor *target,
                                                         const tsh_loss_desc *desc);
/* Returns the terms of the Kullback-Leibler divergence of the target from x: target (log target -
 * x), where x is log-probabilities; with .log_target = 1, e^target (target - x). TSH_REDUCE_MEAN
 * divides by the number of elements, as in torch; TSH_REDUCE_BATCHMEAN, by the length of dimension
 * 0, gives the divergence itself.
 * torch: F.kl_div, nn.KLDivLoss */
TSH_API tsh_tensor *tsh_kl_div(tsh_tensor *x, tsh_tensor *target, const tsh_loss_desc *desc);
/* Returns -weight[y] log_probs[.., y] for log-probabilities (.., V), as tsh_log_softmax gives them,
 * and classes y in the target (..), TSH_I32 or TSH_I64: a scalar, or (..) with TSH_REDUCE_NONE.
 * With .dim = 1: log_probs (V) or (N, V, d1, ..), target (N, d1, ..). A target outside [0, V) that
 * is not ignored is TSH_ERR_ARGUMENT, on every rank. The mean divides by the sum of the targets'
 * weights.
 * tsh_cross_entropy of logits is tsh_nll_loss of their tsh_log_softmax, faster and in less memory.
 * Layouts are those of tsh_cross_entropy: if log_probs is R, the result is R; sharded along the
 * classes, with a target R: R, by one all-reduce of a number (two, if the weight is sharded as the
 * classes) per row; sharded along another dimension, with the target alike: P, or S with
 * TSH_REDUCE_NONE, and the mean all-reduces its divisor. No collective in backward.
 * torch: F.nll_loss, nn.NLLLoss */
TSH_API tsh_tensor *tsh_nll_loss(tsh_tensor *log_probs, tsh_tensor *target,
                                 const tsh_loss_desc *desc);
/* Returns sum a b / (max(|a|, eps) max(|b|, eps)) along dim, where |a| is the Euclidean norm: the
 * cosine of the angle between a and b. a and b broadcast as in NumPy; dim is a dimension of the
 * broadcast shape (a negative one counts from the end) and is left out of the result's shape. eps
 * 0: 1e-8; TSH_ZERO: 0. The result has the wider dtype of a and b. Layouts: R, R -> R. S(d), S(d),
 * or S and R if the R input has length 1 along the sharded dimension: S if that is not dim; if it
 * is dim, R, by one all-reduce of three numbers per result. No collective in backward but for the
 * partial gradient of the R input. P is TSH_ERR_LAYOUT.
 * torch: F.cosine_similarity, nn.CosineSimilarity */
TSH_API tsh_tensor *tsh_cosine_similarity(tsh_tensor *a, tsh_tensor *b, int dim, double eps);
