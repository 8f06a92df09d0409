/* ========================================================================== */
/* >>op-api                                                    MARK: - op-api */
/* All ops, by topic: the topics stand in the order of the files in src/7-ops. */
/* Needs: >>tensor-api.                                                       */
/* ========================================================================== */

/* -- elementwise ops --------------------------------------------------------
 * Each op equals the torch function of its name. Shapes broadcast as in NumPy. Layouts: unary ops
 * keep R and S; tsh_neg and tsh_scale, which are linear, keep P, too. Binary ops take two inputs of
 * the same layout R or S; S and R, if the R input has length 1 along the sharded dimension; P + P,
 * P - P, P * R, R * P and P / R, with result P. Any other combination is TSH_ERR_LAYOUT. No
 * collective runs. Inputs are floating; inputs of two dtypes give the wider one. */

/* Arithmetic.
 * torch: torch.add, torch.sub, torch.mul, torch.div, torch.pow, torch.neg, Tensor.add, Tensor.sub,
 * Tensor.mul, Tensor.div, Tensor.pow, Tensor.neg */
TSH_API tsh_tensor *tsh_add(tsh_tensor *a, tsh_tensor *b);
TSH_API tsh_tensor *tsh_sub(tsh_tensor *a, tsh_tensor *b);
TSH_API tsh_tensor *tsh_mul(tsh_tensor *a, tsh_tensor *b);
TSH_API tsh_tensor *tsh_div(tsh_tensor *a, tsh_tensor *b);
TSH_API tsh_tensor *tsh_pow(tsh_tensor *a, tsh_tensor *b);
TSH_API tsh_tensor *tsh_neg(tsh_tensor *x);
TSH_API tsh_tensor *tsh_scale(tsh_tensor *x, double factor);
TSH_API tsh_tensor *tsh_add_scalar(tsh_tensor *x, double term);
TSH_API tsh_tensor *tsh_pow_scalar(tsh_tensor *x, double exponent);
/* Return the larger, or the smaller, of a and b; NaN if either is NaN. Where a and b are equal,
 * each gets half of the gradient.
 * torch: torch.maximum, torch.minimum, Tensor.maximum, Tensor.minimum */
TSH_API tsh_tensor *tsh_maximum(tsh_tensor *a, tsh_tensor *b);
TSH_API tsh_tensor *tsh_minimum(tsh_tensor *a, tsh_tensor *b);
/* Returns min(max(x, min), max). NAN for min or max: no limit on that side (for both: an error).
 * The gradient passes where min <= x <= max. If min is above max, every result is max. The limits
 * are rounded to the dtype of x first.
 * torch: torch.clamp, torch.clip, torch.clamp_min, torch.clamp_max, Tensor.clamp, Tensor.clip */
TSH_API tsh_tensor *tsh_clamp(tsh_tensor *x, double min, double max);

/* Functions of one number. tsh_round rounds halves to the even integer. tsh_sign gives -1, 0 or 1,
 * and 0 for NaN. The gradients of tsh_sign, tsh_floor, tsh_ceil and tsh_round are 0, that of
 * tsh_abs at 0 is 0.
 * torch: torch.exp, torch.expm1, torch.log, torch.log1p, torch.sqrt, torch.rsqrt,
 * torch.reciprocal, torch.sin, torch.cos, torch.abs, torch.sign, torch.floor, torch.ceil,
 * torch.round, Tensor.exp, Tensor.expm1, Tensor.log, Tensor.log1p, Tensor.sqrt,
 * Tensor.rsqrt, Tensor.reciprocal, Tensor.sin, Tensor.cos, Tensor.abs, Tensor.sign,
 * Tensor.floor, Tensor.ceil, Tensor.round */
TSH_API tsh_tensor *tsh_exp(tsh_tensor *x);
TSH_API tsh_tensor *tsh_expm1(tsh_tensor *x); /* e^x - 1, exact near 0 */
TSH_API tsh_tensor *tsh_log(tsh_tensor *x);
TSH_API tsh_tensor *tsh_log1p(tsh_tensor *x); /* log(1 + x), exact near 0 */
TSH_API tsh_tensor *tsh_sqrt(tsh_tensor *x);
TSH_API tsh_tensor *tsh_rsqrt(tsh_tensor *x); /* 1 / sqrt(x) */
TSH_API tsh_tensor *tsh_reciprocal(tsh_tensor *x);
TSH_API tsh_tensor *tsh_sin(tsh_tensor *x);
TSH_API tsh_tensor *tsh_cos(tsh_tensor *x);
TSH_API tsh_tensor *tsh_abs(tsh_tensor *x);
TSH_API tsh_tensor *tsh_sign(tsh_tensor *x);
TSH_API tsh_tensor *tsh_floor(tsh_tensor *x);
TSH_API tsh_tensor *tsh_ceil(tsh_tensor *x);
TSH_API tsh_tensor *tsh_round(tsh_tensor *x);
/* Returns the error function of each element x: 2 / sqrt(pi) times the integral of e^-t^2 from 0 to
 * x.
 * torch: torch.erf, Tensor.erf */
TSH_API tsh_tensor *tsh_erf(tsh_tensor *x);

/* Activations.
 * torch: torch.sigmoid, torch.tanh, torch.relu, Tensor.sigmoid, Tensor.tanh, Tensor.relu,
 * F.sigmoid, F.tanh, F.relu, F.relu6, F.gelu, F.silu, F.mish, F.selu, F.hardsigmoid,
 * F.hardswish, F.logsigmoid, nn.Sigmoid, nn.Tanh, nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU,
 * nn.Mish, nn.SELU, nn.Hardsigmoid, nn.Hardswish, nn.LogSigmoid */
TSH_API tsh_tensor *tsh_sigmoid(tsh_tensor *x);
TSH_API tsh_tensor *tsh_tanh(tsh_tensor *x);
TSH_API tsh_tensor *tsh_relu(tsh_tensor *x);
TSH_API tsh_tensor *tsh_relu6(tsh_tensor *x);     /* min(max(x, 0), 6) */
TSH_API tsh_tensor *tsh_gelu(tsh_tensor *x);      /* 0.5 x (1 + erf(x / sqrt 2)) */
TSH_API tsh_tensor *tsh_gelu_tanh(tsh_tensor *x); /* approximates GELU by tanh, as in GPT-2; torch:
                                                   * approximate="tanh" */
TSH_API tsh_tensor *tsh_silu(tsh_tensor *x);      /* x sigmoid(x) */
TSH_API tsh_tensor *tsh_mish(tsh_tensor *x);      /* x tanh(log(1 + e^x)); Misra 2019 */
TSH_API tsh_tensor *tsh_selu(tsh_tensor *x);      /* about 1.0507 x if x > 0, else 1.7581 (e^x - 1);
                                                   * Klambauer et al. 2017 */
TSH_API tsh_tensor *tsh_hardsigmoid(tsh_tensor *x); /* min(max(x + 3, 0), 6) / 6 */
TSH_API tsh_tensor *tsh_hardswish(tsh_tensor *x);   /* x hardsigmoid(x) */
TSH_API tsh_tensor *tsh_log_sigmoid(tsh_tensor *x); /* log(sigmoid(x)), also where that is tiny */
/* Returns log(1 + e^(beta x)) / beta, or x itself where beta x is above 20, as torch does by
 * default. beta 0: 1.
 * torch: F.softplus, nn.Softplus */
TSH_API tsh_tensor *tsh_softplus(tsh_tensor *x, double beta);
/* Returns x where it is above 0, else alpha (e^x - 1); Clevert et al. 2016. alpha 0: 1; TSH_ZERO:
 * 0.
 * torch: F.elu, nn.ELU */
TSH_API tsh_tensor *tsh_elu(tsh_tensor *x, double alpha);
/* Returns x where it is above 0, else slope times x. slope 0: 0.01; TSH_ZERO: 0.
 * torch: F.leaky_relu, nn.LeakyReLU */
TSH_API tsh_tensor *tsh_leaky_relu(tsh_tensor *x, double slope);

/* Comparisons return TSH_I32 tensors of 1 (true) and 0, without a gradient. The inputs must have
 * the same dtype.
 * torch: torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge, Tensor.eq, Tensor.ne,
 * Tensor.lt, Tensor.le, Tensor.gt, Tensor.ge */
TSH_API tsh_tensor *tsh_eq(tsh_tensor *a, tsh_tensor *b);
TSH_API tsh_tensor *tsh_ne(tsh_tensor *a, tsh_tensor *b);
TSH_API tsh_tensor *tsh_lt(tsh_tensor *a, tsh_tensor *b);
TSH_API tsh_tensor *tsh_le(tsh_tensor *a, tsh_tensor *b);
TSH_API tsh_tensor *tsh_gt(tsh_tensor *a, tsh_tensor *b);
TSH_API tsh_tensor *tsh_ge(tsh_tensor *a, tsh_tensor *b);
/* Returns, element by element, cond ? yes : no; cond is an integer tensor, such as a comparison's
 * result. yes and no may be P if cond is R; the result is P, too.
 * torch: torch.where, Tensor.where */
TSH_API tsh_tensor *tsh_where(tsh_tensor *cond, tsh_tensor *yes, tsh_tensor *no);
/* Returns x with `value` where mask, an integer tensor, is not 0; x and mask broadcast. The result
 * has x's dtype; these elements get no gradient.
 * torch: torch.masked_fill, Tensor.masked_fill */
TSH_API tsh_tensor *tsh_masked_fill(tsh_tensor *x, tsh_tensor *mask, double value);
/* Converts x to another dtype; 0: the ctx's dtype (tsh_desc.dtype). To an integer dtype: rounds
 * towards zero and clamps to its range; NaN becomes 0. To TSH_REAL or a floating dtype no wider
 * than it: rounds once; gradients pass through if x is floating, too.
 * torch: Tensor.to, Tensor.type, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.int,
 * Tensor.long */
TSH_API tsh_tensor *tsh_cast(tsh_tensor *x, tsh_dtype dtype);
/* Sets each element to 0 with probability p and to x / (1 - p) otherwise, as
 * torch.nn.functional.dropout in training. The mask is keyed by the seed, the path of the owner and
 * its count of dropout calls (owner NULL: the ctx's count), the dp rank and the global element
 * index. p 0: returns x itself.
 * torch: F.dropout, nn.Dropout */
TSH_API tsh_tensor *tsh_dropout(tsh_tensor *x, double p, tsh_module *owner);
/* Returns a copy of x; gradients flow back to x.
 * torch: torch.clone, Tensor.clone */
TSH_API tsh_tensor *tsh_clone(tsh_tensor *x);
/* Returns a tensor that shares x's values; no gradient flows back to x.
 * torch: torch.detach, Tensor.detach */
TSH_API tsh_tensor *tsh_detach(tsh_tensor *x);
/* Returns an owned copy of a tensor, without a gradient path to it. */
TSH_API tsh_tensor *tsh_keep(const tsh_tensor *t);

/* -- reductions -------------------------------------------------------------
 * dim: the dimension to reduce, negative: counts from the end; or TSH_ALL. Scalars accept dims 0
 * and -1, also in tsh_transpose. keepdim 1: the result keeps that dimension, with length 1. If x is
 * sharded along dim, the result of sum and mean is P; that of argmax, argmin (not with TSH_ALL),
 * logsumexp, var, std and norm is R, by one small all-gather; the other ops fail with
 * TSH_ERR_LAYOUT. Of a P input, only sum, mean and cumsum, which are linear, can be computed. */
enum { TSH_ALL = -1000 };
/* Return the sums, or the means, along dim.
 * torch: torch.sum, torch.mean, Tensor.sum, Tensor.mean */
TSH_API tsh_tensor *tsh_sum(tsh_tensor *x, int dim, int keepdim);
TSH_API tsh_tensor *tsh_mean(tsh_tensor *x, int dim, int keepdim);
/* Return the largest, or the smallest, value along dim, which must not be empty. Its gradient goes
 * to the first element that has it, as in torch.max(x, dim). NaN counts as largest, and as
 * smallest.
 * torch: torch.max, torch.min, Tensor.max, Tensor.min */
TSH_API tsh_tensor *tsh_max(tsh_tensor *x, int dim, int keepdim);
TSH_API tsh_tensor *tsh_min(tsh_tensor *x, int dim, int keepdim);
/* Return the index along dim of the first largest, or first smallest, element, as TSH_I64. NaN
 * counts as largest, and as smallest. If x is sharded along dim, one all-gather of a value and an
 * index from each rank runs.
 * torch: torch.argmax, torch.argmin, Tensor.argmax, Tensor.argmin */
TSH_API tsh_tensor *tsh_argmax(tsh_tensor *x, int dim, int keepdim);
TSH_API tsh_tensor *tsh_argmin(tsh_tensor *x, int dim, int keepdim);
/* Returns log sum e^x along dim, without overflow; of no values, -infinity.
 * torch: torch.logsumexp, Tensor.logsumexp */
TSH_API tsh_tensor *tsh_logsumexp(tsh_tensor *x, int dim, int keepdim);
/* Return the variance along dim, sum (x - mean)^2 / (n - correction) of n values, and its square
 * root, the standard deviation. correction 0: 1, for an estimate from a sample; TSH_ZERO: 0. If
 * n - correction is below 0, the divisor is 0. Where tsh_std is 0, its gradient is 0.
 * torch: torch.var, torch.std, Tensor.var, Tensor.std */
TSH_API tsh_tensor *tsh_var(tsh_tensor *x, int dim, double correction, int keepdim);
TSH_API tsh_tensor *tsh_std(tsh_tensor *x, int dim, double correction, int keepdim);
/* Returns the p-norm along dim, (sum |x|^p)^(1/p). p 0: 2; TSH_ZERO: 0, the number of elements that
 * are not 0; INFINITY: max |x|; -INFINITY: min |x|. The gradient at x = 0 is 0; for p INFINITY and
 * -INFINITY, elements with the same |x| share it. Of no values, the norm is 0, and an error if p is
 * infinite or negative.
 * torch: torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm */
TSH_API tsh_tensor *tsh_norm(tsh_tensor *x, double p, int dim, int keepdim);
/* Returns the product along dim, computed in double.
 * torch: torch.prod, Tensor.prod */
TSH_API tsh_tensor *tsh_prod(tsh_tensor *x, int dim, int keepdim);
/* Returns the sums x_0, x_0 + x_1, ... along dim, which is not TSH_ALL, in the shape of x. x is
 * floating (then sums are in double, and rounded to x's dtype) or an integer tensor (then the
 * result is TSH_I64, without a gradient). Keeps R, P, and S along another dimension.
 * torch: torch.cumsum, Tensor.cumsum */
TSH_API tsh_tensor *tsh_cumsum(tsh_tensor *x, int dim);
/* Returns e^x / sum e^x along dim.
 * torch: torch.softmax, Tensor.softmax, F.softmax, nn.Softmax */
TSH_API tsh_tensor *tsh_softmax(tsh_tensor *x, int dim);
/* Returns the logarithm of tsh_softmax.
 * torch: torch.log_softmax, Tensor.log_softmax, F.log_softmax, nn.LogSoftmax */
TSH_API tsh_tensor *tsh_log_softmax(tsh_tensor *x, int dim);

/* -- views ------------------------------------------------------------------
 * These ops return a view without a copy if strides can describe it; tsh_concat always copies. */
/* Returns x with another shape of as many elements; one dimension may be -1, and is computed. A
 * sharded dimension may be split: the outermost part is then the sharded one, and whole inner parts
 * must fit in its units (or k equal segments become a leading dimension of length k). It may be
 * merged with the dimensions after it, but not with one before it.
 * torch: torch.reshape, Tensor.reshape, Tensor.view, torch.flatten, Tensor.flatten */
TSH_API tsh_tensor *tsh_reshape(tsh_tensor *x, tsh_shape shape);
/* Swaps two dimensions.
 * torch: torch.transpose, Tensor.transpose, torch.swapaxes, Tensor.t, Tensor.mT */
TSH_API tsh_tensor *tsh_transpose(tsh_tensor *x, int dim0, int dim1);
/* Reorders all dimensions: dimension d of the result is dimension dims[d] of x.
 * torch: torch.permute, Tensor.permute */
TSH_API tsh_tensor *tsh_permute(tsh_tensor *x, const int *dims);
/* Returns elements [start, start + length) along dim. Along a sharded dimension they must be whole
 * segments.
 * torch: torch.narrow, Tensor.narrow, torch.select */
TSH_API tsh_tensor *tsh_slice(tsh_tensor *x, int dim, int64_t start, int64_t length);
/* Splits x along dim into n equal parts, written to parts[0 .. n). Along a sharded dimension, parts
 * must consist of whole segments.
 * torch: torch.split, torch.chunk, Tensor.split, Tensor.chunk */
TSH_API tsh_result tsh_split(tsh_tensor *x, int dim, int n, tsh_tensor **parts);
/* Concatenates n tensors along dim. If they are sharded along dim, their segments become segments
 * of the result; else all must have the same layout.
 * torch: torch.cat, torch.concat */
TSH_API tsh_tensor *tsh_concat(tsh_tensor *const *parts, int n, int dim);

/* -- layouts, reading and writing values ------------------------------------ */

/* Returns x with another layout. S to R: all-gather; P to R: all-reduce; P to S: reduce-scatter; S
 * to S along another dimension: all-to-all; R to S: each rank takes its slice; R to P: rank 0 keeps
 * the values, other ranks get zeros; S to P: an error. The same layout: returns x itself. Values
 * are sent in x's dtype. Backward does the opposite (S to R: a reduce-scatter of partial gradients,
 * a slice of complete ones). Gradients of bf16 activations (step tensors) are sent in bf16, others
 * in tsh_real.
 * torch: DTensor.redistribute */
TSH_API tsh_tensor *tsh_redistribute(tsh_tensor *x, tsh_layout layout);
/* Returns x in layout R: tsh_redistribute(x, tsh_replicated()).
 * torch: DTensor.full_tensor */
TSH_API tsh_tensor *tsh_full_tensor(tsh_tensor *x);
/* Declares the layout of the values that each rank already holds; nothing is sent (torchshard's
 * RegisterParallelDim). R to S(d): each rank's tensor becomes one of P shards of equal length, so
 * the whole is P times as long along d. S(d) to R: this rank's shard becomes the whole tensor; all
 * shards must have the same length. R to P, P to R: the shape stays. Any other change is done by
 * way of R. Nothing is sent in backward either: each rank's gradient is that of the values it
 * holds, also if R became S or P. (If the values really are replicated, call tsh_tp_copy(t,
 * TSH_SUM) first: it sums the gradients over ranks.) An owned tensor that is no parameter is
 * changed in place and returned; this is TSH_ERR_STATE if it has views or a gradient, or a recorded
 * op has used it. For a parameter or a step tensor, returns a step tensor with the same values.
 * torch: DTensor.from_local */
TSH_API tsh_tensor *tsh_set_layout(tsh_tensor *t, tsh_layout layout);

/* Returns x unchanged, R -> R; backward all-reduces its gradient by op, once. The four tsh_tp_
 * functions are the operators on which other systems build tensor-parallel layers: Megatron's f and
 * g; copy, reduce, scatter and gather of torchshard.distributed; the mp_ functions of ml. They act
 * on what each rank holds, so here a replicated tensor may differ between ranks. At one rank they
 * do nothing. */
TSH_API tsh_tensor *tsh_tp_copy(tsh_tensor *x, tsh_redop op);
/* All-reduces x by op, R or P -> R; backward passes the gradient on unchanged. */
TSH_API tsh_tensor *tsh_tp_reduce(tsh_tensor *x, tsh_redop op);
/* Returns this rank's slice of x, R -> S(dim); backward all-gathers the gradient. */
TSH_API tsh_tensor *tsh_tp_scatter(tsh_tensor *x, int dim);
/* All-gathers x along dim, S(dim) -> R; or R -> R, if the ranks' tensors are equal parts of the
 * result. Backward takes this rank's slice of a complete gradient, and reduce-scatters a partial
 * one. */
TSH_API tsh_tensor *tsh_tp_gather(tsh_tensor *x, int dim);
/* Copies an owned replicated tensor, such as a batch, from rank 0 of tp to all ranks of tp, in
 * place. One broadcast. TSH_ERR_STATE: a recorded op has used t; see tsh_write.
 * torch: torch.distributed.broadcast */
TSH_API tsh_result tsh_broadcast_batch(tsh_tensor *t);

typedef enum tsh_extent { TSH_LOCAL, TSH_GLOBAL } tsh_extent;
/* Copies the values of t to out, dense and row-major. `bytes` must be the size of those values.
 * TSH_LOCAL: this rank's shard. TSH_GLOBAL: the whole tensor, on every rank; of a sharded tensor by
 * an all-gather, of a partial one by an all-reduce.
 * torch: Tensor.numpy, Tensor.tolist */
TSH_API tsh_result tsh_read(tsh_ctx *ctx, tsh_tensor *t, tsh_extent extent, void *out,
                            size_t bytes);
/* Copies values into an owned tensor, dense and row-major; `bytes` must be their size. TSH_LOCAL:
 * this rank's shard. TSH_GLOBAL: the whole tensor, of which this rank takes its slice; an error if
 * t is P. TSH_ERR_STATE: a recorded op has used t; wait for the tsh_backward or tsh_step_end that
 * clears the tape.
 * torch: Tensor.copy_ */
TSH_API tsh_result tsh_write(tsh_ctx *ctx, tsh_tensor *t, tsh_extent extent, const void *in,
                             size_t bytes);
/* Writes this rank's shard as text, "f32 (2, 3) S(1): 1 2 3 / 4 5 6", into text, which has `size`
 * bytes; cuts off what does not fit. Returns text. Does nothing if text is NULL. Unlike other
 * functions, works after an error of the ctx, too: for debuggers and error messages. */
TSH_API char *tsh_to_string(tsh_tensor *t, char *text, size_t size);

/* -- matmul, linear, embedding ---------------------------------------------- */

/* Returns the matrix product (.., m, k) x (.., k, n) -> (.., m, n); leading (batch) dimensions
 * broadcast, as in torch.matmul of two tensors with at least two dimensions. Layouts of a, b ->
 * result, where S(k) is sharded along the dimension of length k: S(k), S(k) -> P; S(m), R -> S(m);
 * R, S(n) -> S(n); P, R or R, P -> P; batch dimensions as in elementwise ops. Dtypes may differ:
 * the result has a's. Two bf16 inputs, and the result's gradient with them, are multiplied as bf16
 * and summed in float; any other 16-bit input is converted to tsh_real first.
 * torch: torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm */
TSH_API tsh_tensor *tsh_matmul(tsh_tensor *a, tsh_tensor *b);
/* Returns x w^T + b (.., out) for x (.., in), weight w (out, in) and bias b (out) or NULL; torch's
 * F.linear. Column-parallel: w S(0), b S(0), x R; the result is S(-1), and backward all-reduces dx.
 * Row-parallel: w S(1), b R, x S(-1) or R; the result is R by one all-reduce in its dtype, and b is
 * added after that. w R: x is R, or S along another dimension than the last; the result has its
 * layout. Dtypes may differ, as in tsh_matmul: the result has x's.
 * torch: F.linear, nn.Linear */
TSH_API tsh_tensor *tsh_linear(tsh_tensor *x, tsh_tensor *weight, tsh_tensor *bias);

typedef struct tsh_lookup_desc {
    int padding;            /* 1: row padding_idx of the weight gets no gradient */
    int64_t padding_idx;    /* row of the weight; negative: counts from the end */
    double max_norm;        /* rows that are looked up and whose norm is larger are scaled down to
                             * it, in the weight itself; 0: none */
    double norm_type;       /* p of the p-norm that max_norm limits, may be INFINITY; 0 means 2 */
    int scale_grad_by_freq; /* 1: the gradient of a row is divided by how often its id occurs in
                             * ids */
    int sparse;             /* 1: the gradient of the weight, a leaf, is row-sparse: optimisers
                             * update only the rows that were looked up */
} tsh_lookup_desc;
/* Looks up rows of the weight w (V, D): ids (..) -> (.., D); torch's F.embedding. ids are TSH_I32
 * or TSH_I64, each in [0, V). desc NULL: no options. Layouts: w R: the result has the layout of
 * ids. w S(0), ids R: P, where rows of other ranks are zero (tsh_redistribute completes it). w
 * S(1): S(-1). Collectives in forward: max_norm all-reduces the norms if w is S(1), and over dp;
 * max_norm and scale_grad_by_freq all-reduce counts if ids are sharded. A row-sparse gradient is
 * dense in memory, with a mark per row; once another op contributes to it, it is no longer
 * row-sparse.
 * torch: F.embedding, nn.Embedding */
TSH_API tsh_tensor *tsh_embedding(tsh_tensor *ids, tsh_tensor *weight, const tsh_lookup_desc *desc);

/* -- norms, attention, loss ------------------------------------------------- */

/* Applies layer normalisation over the last dimension (D), with weight and bias (D) or NULL;
 * torch.nn.functional.layer_norm. eps 0: 1e-5; TSH_ZERO: 0. Layouts: x R or S along another
 * dimension, weight and bias R (if x is S, their gradients are partial). Or x S(-1), weight and
 * bias sharded by the same units; then forward runs two all-reduces of one number per row, backward
 * one of two numbers per row.
 * torch: F.layer_norm, nn.LayerNorm */
TSH_API tsh_tensor *tsh_layer_norm(tsh_tensor *x, tsh_tensor *weight, tsh_tensor *bias, double eps);
/* Applies RMS normalisation over the last dimension (D): x weight / sqrt(mean x^2 + eps), weight
 * (D) or NULL: 1; Zhang & Sennrich 2019. eps 0: 1e-6; TSH_ZERO: 0. Layouts as in tsh_layer_norm;
 * with x S(-1), forward and backward each run one all-reduce of a number per row.
 * torch: F.rms_norm, nn.RMSNorm */
TSH_API tsh_tensor *tsh_rms_norm(tsh_tensor *x, tsh_tensor *weight, double eps);
typedef struct tsh_rms_norm_desc {
    int64_t dim;  /* tsh_add_rms_norm: number of features; the op does not read it */
    double eps;   /* added to mean x^2; 0: 1e-6; TSH_ZERO: 0 */
    int plus_one; /* 1: x (weight + 1) / sqrt(mean x^2 + eps), as in Gemma; a layer's weight is
                   * then initialised to 0; weight NULL counts as 0 */
    tsh_dtype dtype; /* tsh_add_rms_norm: dtype of the weight */
} tsh_rms_norm_desc;
/* Applies RMS normalisation with options; desc NULL: as tsh_rms_norm with eps 0. */
TSH_API tsh_tensor *tsh_rms_norm_with(tsh_tensor *x, tsh_tensor *weight,
                                      const tsh_rms_norm_desc *desc);

typedef struct tsh_rope_desc {
    double base;     /* base of the rotation frequencies; 0: 10000 */
    int64_t dims;    /* how many features of a row, from the first, are rotated; even; 0: all */
    int interleaved; /* 0: pair i is features i and i + dims / 2, as in GPT-NeoX and LLaMA; 1:
                      * features 2 i and 2 i + 1, as in GPT-J */
    int64_t start;   /* position of the first row of the whole x */
    const double *freqs; /* dims / 2 frequencies, read during the call: the angle of pair i at
                          * position t is t freqs[i], for scalings such as Llama 3's; NULL:
                          * computed from base */
    double factor;       /* cosines and sines are multiplied by it (YaRN's attention factor); 0
                          * means 1 */
    /* For batches of sequences at different positions: starts[b], added to start, is the position
     * of the first row for index b of x's first dimension. x then has three dimensions or more.
     * Read during the call. NULL: start for all. */
    const int64_t *starts;
} tsh_rope_desc;
/* Applies rotary position embedding (Su et al. 2021) to x (.., T, D): rotates pair i of the row at
 * position t by the angle t base^(-2 i / dims), and multiplies it by factor. It is linear: keeps P,
 * R, and S along any dimension but D; if T is sharded, positions are still global. No collective.
 * Backward rotates by minus the angle. */
TSH_API tsh_tensor *tsh_rope(tsh_tensor *x, const tsh_rope_desc *desc);

typedef struct tsh_attention_desc {
    int causal;        /* 1: query i sees only keys up to i + Tk - Tq, of Tk keys and Tq queries */
    double scale;      /* factor of the scores; 0: 1 / sqrt(D) */
    double dropout;    /* dropout probability of the attention weights */
    tsh_module *owner; /* module that keys the dropout mask; NULL: the ctx */
    /* The mask, broadcast to (B, H, Tq, Tk): batch, heads, queries, keys; R, or sharded as q's
     * heads; NULL: none. A floating mask is added to the scores; with a TSH_I32 mask, a query sees
     * a key where it is not 0. If the mask requires a gradient (T5's bias), this is summed over
     * broadcast dimensions; it is partial if q is sharded and the mask is R. */
    tsh_tensor *mask;
    /* Key and value cache: owned tensors (B, Hkv, Tmax, D), for up to Tmax positions, laid out as
     * k, of any floating dtype no wider than tsh_real. k and v are rounded to that dtype and
     * appended at position `past`; queries see keys [0, past + Tk) of the cache. Only without
     * gradients. NULL: no cache. */
    tsh_tensor *cache_k, *cache_v;
    int64_t past;
    /* For ragged batches: arrays with an entry for each row of the whole batch, read during the
     * call; NULL: all rows are the same. */
    const int64_t *pasts;   /* B entries: pasts[b] replaces `past` in row b of the batch */
    const int64_t *lengths; /* B entries: only the first lengths[b] of the Tk new positions of row b
                             * belong to its sequence; the others are not appended, and no query
                             * sees them */
    int64_t window;    /* sliding window: query i, at position p = i + Tk - Tq (Tk keys, Tq
                        * queries), sees key j only if p - j < window and, unless causal, j - p <
                        * window; the cost is Tq times window. 0: no window */
    double soft_cap;   /* each scaled score s becomes soft_cap tanh(s / soft_cap), before the
                        * mask (Gemma 2); 0: off */
    tsh_tensor *sinks; /* (H), R or sharded as q's heads: a score per head that is part of every
                        * softmax of that head but has no value (gpt-oss); NULL: none */
    /* The segment of each position, for rows that hold several sequences: TSH_I32, (B, T), T = Tq =
     * Tk, R or sharded as the batch; NULL: each row is one sequence. A query sees only keys of its
     * own segment, as far as causal, window and mask let it; positions, and indices of the mask and
     * of dropout masks, stay those of the row. A negative segment is padding: it sees no key, gives
     * 0, and no query sees it. So segments also mask the padding of texts of unequal length, with
     * gradients, where `lengths` would give padding queries some keys. If the positions of each
     * segment follow each other, the cost is that of the sequences alone, and padding has none; if
     * not, all positions between the segment's first and last are computed and masked. Not with a
     * cache or lengths. */
    tsh_tensor *segments;
} tsh_attention_desc;
/* Computes attention of q (B, H, Tq, D), k and v (B, Hkv, Tk, D) -> (B, H, Tq, D);
 * torch.nn.functional.scaled_dot_product_attention. It runs in tiles with an online softmax
 * (Milakov & Gimelshein 2018, Dao et al. 2022). A query that sees no key gets 0. A row of a ragged
 * batch gets the same bits as alone; the results of padding queries are unspecified but finite. H
 * is a multiple of Hkv: query head i uses head i / (H / Hkv) of k and v (grouped queries, Ainslie
 * et al. 2023). Layouts: all R; all sharded by batch, S(0); all sharded by heads, S(1), with the
 * query heads of a key head on one rank (q: tsh_shard_units(1, H / Hkv)); or q S(1), sharded at any
 * head, and k and v R: then dk and dv are partial. No collective in forward. The result has q's
 * dtype; sums are in tsh_real. If q, k and v are bf16 and the processor has AVX512_BF16,
 * probabilities and gradients are rounded to bf16 before they are multiplied.
 * torch: F.scaled_dot_product_attention */
TSH_API tsh_tensor *tsh_attention(tsh_tensor *q, tsh_tensor *k, tsh_tensor *v,
                                  const tsh_attention_desc *desc);

/* What a loss does with the losses of its rows or elements. TSH_REDUCE_BATCHMEAN, only in
 * tsh_kl_div: their sum divided by the length of dimension 0. */
typedef enum tsh_reduction {
    TSH_REDUCE_MEAN,
    TSH_REDUCE_SUM,
    TSH_REDUCE_NONE,
    TSH_REDUCE_BATCHMEAN
} tsh_reduction;
typedef struct tsh_cross_entropy_desc {
    tsh_reduction reduction;
    int ignore;           /* 0: target -100 is ignored, as in torch; 1: target ignore_index is */
    int64_t ignore_index; /* if ignore is 1: the target to ignore, any integer */
    int empty_zero;       /* what a mean with divisor 0 is: NaN, as in torch, if this is 0; 0 if it
                           * is 1 */
    double label_smoothing; /* e, in [0, 1]: each target distribution becomes (1 - e) target + e /
                             * V, where V is the number of classes */
    double z_loss;          /* z_loss times (log sum exp logits)^2 is added to each row's loss */
    tsh_tensor *weight;     /* (V): a weight per class, R or sharded as the classes, without a
                             * gradient; NULL: 1 */
    int dim;                /* dimension of logits that has the classes: 0: the last one; 1:
                             * dimension 1, as in torch */
} tsh_cross_entropy_desc;
/* Returns the cross-entropy of logits (.., V) and targets, integers (..) or probabilities (.., V):
 * a scalar, or (..) with TSH_REDUCE_NONE. With .dim = 1, shapes are those of
 * torch.nn.functional.cross_entropy: logits (V) or (N, V, d1, ..), target (N, d1, ..) or
 * probabilities of the logits' shape, unreduced (N, d1, ..); logits of three dimensions or more are
 * copied, unless their classes are contiguous in memory. Layouts: logits R; or sharded along the
 * classes, with one all-reduce of the row maxima and one all-gather of all row sums, whatever the
 * options, so that the loss of a row does not depend on the other rows; or sharded along another
 * dimension: then mean and sum are P, and the mean of integer targets all-reduces its divisor. No
 * collective in backward. Integer targets are R, or sharded as the rows; one outside [0, V) that is
 * not ignored is an error on every rank. Probabilities are R or laid out as the logits and get no
 * gradient. The mean divides by the sum of the class weights of the targets, or, with
 * probabilities, by the number of rows. A class with logit -inf is padding: label smoothing leaves
 * it out.
 * torch: F.cross_entropy, nn.CrossEntropyLoss */
TSH_API tsh_tensor *tsh_cross_entropy(tsh_tensor *logits, tsh_tensor *target,
                                      const tsh_cross_entropy_desc *desc);

/* Computes the losses of a few rows: x (n, C), target (n, ..) -> losses of any shape, R, such as
 * tsh_cross_entropy(head(x), target) with TSH_REDUCE_NONE gives. */
typedef tsh_tensor *(*tsh_chunk_fn)(tsh_tensor *x, tsh_tensor *target, void *user);
typedef struct tsh_chunks_desc {
    tsh_chunk_fn fn; /* computes the losses of a chunk of rows; must not be NULL */
    void *user;      /* given to fn */
    int64_t rows;    /* number of rows of a chunk (the last one may have fewer); 0: 256 */
} tsh_chunks_desc;
/* Returns the sum of the losses of all rows, a scalar TSH_REAL, R. x (.., C) and target (..) or
 * (.., d1, ..) are cut into chunks of .rows rows, where (..) are the rows; fn computes the losses
 * of one chunk after the other. The tensors that fn makes are released before the next chunk, so
 * that the logits (.., V) of a large vocabulary V are never in memory all at once: of 2,048 rows
 * and V = 49,152, 50 MB instead of 403. Each chunk reads the head's weights again, so that chunks
 * of few rows are slow.
 *   Losses are added in double in the order of the rows: if fn returns a loss per row, the sum has
 * the bits that tsh_cross_entropy with TSH_REDUCE_SUM has of the whole. (All-reduces of fn over
 * three ranks or more, as of a row-parallel head, add in an order that depends on the rows.)
 *   Gradients flow to x and to whatever else fn reads, such as the head's weights, 16 tensors at
 * most (else TSH_ERR_UNSUPPORTED). They are computed at once, with each chunk, so that nothing is
 * computed twice, and kept until backward: the gradient of x, and one of the size of each weight of
 * fn that is trained. fn must not end the step or call tsh_backward, and must end the scopes and
 * no-grad sections that it begins (tsh_scope_begin, tsh_no_grad_begin). Within tsh_no_grad_begin
 * nothing is kept.
 *   x and target are replicated along their rows. Collectives: those of fn, for each chunk. */
TSH_API tsh_tensor *tsh_loss_in_chunks(tsh_tensor *x, tsh_tensor *target,
                                       const tsh_chunks_desc *desc);

/* -- sampling token ids ------------------------------------------------------ */

/* Options of tsh_sample. Its filters are applied in the order of these fields, which is that of
 * transformers. */
typedef struct tsh_sample_desc {
    /* Repetition penalty (Keskar et al. 2019): the logit of each id in .previous is divided by it
     * if the logit is above 0, else multiplied by it; once per id. 0 means 1. */
    double penalty;
    /* (.., n), TSH_I32 or TSH_I64: the last n ids of each row. Entries outside [0, V), such as -1,
     * are skipped. NULL: none. */
    tsh_tensor *previous;
    double temperature; /* divides the logits; 0 means 1. TSH_ZERO: 0, which takes the largest
                         * logit */
    int64_t top_k;      /* keeps the k largest logits, and those equal to the k-th; 0: all */
    double top_p;       /* keeps the largest probabilities, as few as sum to at least top_p, and
                         * those equal to the smallest of them (Holtzman et al. 2020); 0 means 1 */
    double min_p;       /* keeps probabilities of at least min_p times the largest; 0: all */
    uint64_t seed;      /* seed of row 0; row i is drawn as a single row with seed + i would be */
    int64_t position;   /* index of this draw within its row: use another one for each token of a
                         * sequence */
} tsh_sample_desc;
/* Draws an id for each row of logits (.., V), from softmax(logits) after the filters of desc (NULL:
 * none). Returns (..), TSH_I64, R, without a gradient. The random number of a row is Philox's for
 * its seed and position, so the same logits give the same ids on every rank, degree and backend.
 * Logits may have any layout and are gathered first (S(-1): one all-gather; at temperature 0
 * without .previous, as in tsh_argmax). TSH_ERR_ANOMALY, also at temperature 0: the largest logit
 * of a row is not finite, or a logit is NaN.
 * torch: torch.multinomial */
TSH_API tsh_tensor *tsh_sample(tsh_tensor *logits, const tsh_sample_desc *desc);

/* -- an op of one's own ------------------------------------------------------ */

enum { TSH_MAX_OUTPUTS = 8 }; /* the most outputs of one tsh_custom_op */

/* One output of tsh_custom_op. */
typedef struct tsh_output {
    tsh_shape shape;   /* global shape */
    tsh_layout layout;
    tsh_dtype dtype;   /* 0: TSH_REAL. No gradient flows through an integer output */
} tsh_output;

typedef struct tsh_custom_op_desc {
    const char *name;
    int outputs; /* the number of outputs; 0: 1 */
    tsh_output out[TSH_MAX_OUTPUTS];
    unsigned partial; /* bit i: what backward adds to the gradient of input i is a partial sum
                       * over tp */
    /* All values are this rank's shards, dense. Floating ones are tsh_real, whatever the dtype of
     * the tensor: inputs are converted before forward, outputs rounded after it; integers are those
     * of the dtype. forward writes output k to out[k]. backward reads the gradient of output k in
     * grad_out[k], NULL if the loss does not depend on it, and adds the gradient of input i to
     * grad_in[i], NULL if input i needs none. */
    void (*forward)(tsh_tensor *const *in, int n, void *const *out, void *user);
    void (*backward)(tsh_tensor *const *in, int n, const void *const *out,
                     const tsh_real *const *grad_out, tsh_real *const *grad_in, void *user);
    void *user; /* passed to forward and backward; must stay valid until backward */
} tsh_custom_op_desc;
/* Runs an op of the caller's own, with 1 to 8 inputs, and records it for backward. Returns the
 * first output; writes all desc->outputs of them to out, NULLs after an error. out may be NULL.
 * torch: torch.autograd.Function, torch.library.custom_op */
TSH_API tsh_tensor *tsh_custom_op(tsh_ctx *ctx, tsh_tensor *const *in, int n, tsh_tensor **out,
                                  const tsh_custom_op_desc *desc);
