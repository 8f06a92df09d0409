/* ========================================================================== */
/* >>op-api                                                    MARK: - op-api */
/* Every op, in the order of the rooms that define them.                      */
/* Needs: >>tensor-api.                                                       */
/* ========================================================================== */

/* -- elementwise ops --------------------------------------------------------
 * Shapes broadcast as NumPy's. Layouts: unary ops keep R and S, linear ones P too. Binary: equal
 * layouts; S with R of length 1 there; P with P under + and -; P times or over R. Anything else is
 * TSH_ERR_LAYOUT. No collective runs. Each equals the torch function of its name. */
TSH_API tsh_tensor *tsh_add(tsh_tensor *a, tsh_tensor *b);
TSH_API tsh_tensor *tsh_sub(tsh_tensor *a, tsh_tensor *b);
TSH_API tsh_tensor *tsh_mul(tsh_tensor *a, tsh_tensor *b);
TSH_API tsh_tensor *tsh_div(tsh_tensor *a, tsh_tensor *b);
TSH_API tsh_tensor *tsh_pow(tsh_tensor *a, tsh_tensor *b);
TSH_API tsh_tensor *tsh_neg(tsh_tensor *x);
TSH_API tsh_tensor *tsh_scale(tsh_tensor *x, double factor);
TSH_API tsh_tensor *tsh_add_scalar(tsh_tensor *x, double term);
TSH_API tsh_tensor *tsh_pow_scalar(tsh_tensor *x, double exponent);
TSH_API tsh_tensor *tsh_exp(tsh_tensor *x);
TSH_API tsh_tensor *tsh_log(tsh_tensor *x);
TSH_API tsh_tensor *tsh_sqrt(tsh_tensor *x);
TSH_API tsh_tensor *tsh_sigmoid(tsh_tensor *x);
TSH_API tsh_tensor *tsh_tanh(tsh_tensor *x);
TSH_API tsh_tensor *tsh_relu(tsh_tensor *x);
/* 2 / sqrt(pi) times the integral of e^-t^2 from 0 to x. */
TSH_API tsh_tensor *tsh_erf(tsh_tensor *x);
TSH_API tsh_tensor *tsh_gelu(tsh_tensor *x);      /* 0.5 x (1 + erf(x / sqrt 2)) */
TSH_API tsh_tensor *tsh_gelu_tanh(tsh_tensor *x); /* GPT-2's; torch's approximate="tanh" */
TSH_API tsh_tensor *tsh_silu(tsh_tensor *x);      /* x sigmoid(x) */
/* Comparisons give TSH_I32, 1 or 0; no gradient. Both of one dtype. */
TSH_API tsh_tensor *tsh_eq(tsh_tensor *a, tsh_tensor *b);
TSH_API tsh_tensor *tsh_ne(tsh_tensor *a, tsh_tensor *b);
TSH_API tsh_tensor *tsh_lt(tsh_tensor *a, tsh_tensor *b);
TSH_API tsh_tensor *tsh_le(tsh_tensor *a, tsh_tensor *b);
TSH_API tsh_tensor *tsh_gt(tsh_tensor *a, tsh_tensor *b);
TSH_API tsh_tensor *tsh_ge(tsh_tensor *a, tsh_tensor *b);
/* cond (TSH_I32) ? yes : no. P with an R cond and P branches. */
TSH_API tsh_tensor *tsh_where(tsh_tensor *cond, tsh_tensor *yes, tsh_tensor *no);
/* To an integer: towards zero, clamped to its ends, NaN to 0. To a floating dtype (0: the ctx's),
 * TSH_REAL or one that it holds exactly: rounded once; gradients pass between floating ones. */
TSH_API tsh_tensor *tsh_cast(tsh_tensor *x, tsh_dtype dtype);
/* x / (1 - p) with probability 1 - p, else 0 (torch.nn.functional.dropout, training). The mask is
 * keyed by seed, the owner's path and count of calls (owner NULL: the ctx's), dp rank and global
 * element index. p 0: x itself. */
TSH_API tsh_tensor *tsh_dropout(tsh_tensor *x, double p, tsh_module *owner);
/* Copies: clone keeps the gradient path, detach shares the values and cuts it. */
TSH_API tsh_tensor *tsh_clone(tsh_tensor *x);
TSH_API tsh_tensor *tsh_detach(tsh_tensor *x);
/* An owned, detached copy of a step tensor. */
TSH_API tsh_tensor *tsh_keep(const tsh_tensor *t);

/* -- reductions -------------------------------------------------------------
 * dim may be negative, or TSH_ALL; scalars take 0 and -1, in tsh_transpose too. Over a sharded
 * dimension sum and mean give P, argmax (not of TSH_ALL) R; the others are TSH_ERR_LAYOUT. */
#define TSH_ALL (-1000)
TSH_API tsh_tensor *tsh_sum(tsh_tensor *x, int dim, int keepdim);
TSH_API tsh_tensor *tsh_mean(tsh_tensor *x, int dim, int keepdim);
/* The largest value; the gradient goes to the first place that holds it, as torch.max(x, dim). NaN
 * wins. */
TSH_API tsh_tensor *tsh_max(tsh_tensor *x, int dim, int keepdim);
/* The first place of the largest value, TSH_I64; NaN wins (tsh_sample refuses it). Over a sharded
 * dimension, the result is R, by one all-gather of a value and a place from each rank. */
TSH_API tsh_tensor *tsh_argmax(tsh_tensor *x, int dim, int keepdim);
/* e^x / sum e^x along dim, and its logarithm. */
TSH_API tsh_tensor *tsh_softmax(tsh_tensor *x, int dim);
TSH_API tsh_tensor *tsh_log_softmax(tsh_tensor *x, int dim);

/* -- views ------------------------------------------------------------------
 * No copy where strides allow. reshape: one -1 is worked out; it may split a sharded dimension (the
 * sharding moves to the outer factor, whose unit must hold the inner ones; k equal segments may
 * become a leading dimension k), or merge it as the outermost factor. slice and split along a
 * sharded dimension are legal exactly at segment boundaries. */
TSH_API tsh_tensor *tsh_reshape(tsh_tensor *x, tsh_shape shape);
TSH_API tsh_tensor *tsh_transpose(tsh_tensor *x, int dim0, int dim1);
TSH_API tsh_tensor *tsh_permute(tsh_tensor *x, const int *dims);
TSH_API tsh_tensor *tsh_slice(tsh_tensor *x, int dim, int64_t start, int64_t length);
/* n equal parts of x along dim into parts[0 .. n). */
TSH_API tsh_result tsh_split_dim(tsh_tensor *x, int dim, int n, tsh_tensor **parts);
/* n tensors one after the other along dim; along a sharded one they become segments. */
TSH_API tsh_tensor *tsh_concat(tsh_tensor *const *parts, int n, int dim);

/* -- layouts ---------------------------------------------------------------- */

/* The same values in another layout: S to R all-gather, P to R all-reduce, P to S reduce-scatter, S
 * to S all-to-all, R to S a slice, R to P rank 0 keeps. Values are sent in their dtype. Gradients
 * go the opposite way (S to R: reduce-scatter of partial gradients, slice of complete ones); those
 * of bf16 activations (step tensors) are sent in bf16, others in tsh_real. S to P is an error. The
 * same layout: x itself. */
TSH_API tsh_tensor *tsh_redistribute(tsh_tensor *x, tsh_layout layout);
/* Redistribute to replicated. */
TSH_API tsh_tensor *tsh_full(tsh_tensor *x);
/* Says how the values that each rank already holds lie; nothing moves (torchshard's
 * RegisterParallelDim). R to S(d): the pieces, one per rank and all of one length, of a tensor that
 * is P times as long; S(d) to R: this rank's piece is the whole, all being of one length; R to P
 * and P to R: the same shape; others by way of R. Nothing moves backward either: each rank's
 * gradient is that of the values it holds, also where R became S or P (of values that really are
 * replicated, tsh_tp_copy(t, TSH_SUM) first gives the sum over ranks). An owned tensor is changed
 * in place and returned, whether it requires a gradient or not; a step tensor or a parameter stays
 * as it is, and a step tensor is returned. In place, TSH_ERR_STATE: ops are recorded or views there
 * that take it as it lies, or it has a gradient. */
TSH_API tsh_tensor *tsh_set_layout(tsh_tensor *t, tsh_layout layout);

/* The operators that other systems build their layers on, applied to what each rank holds; here a
 * replicated tensor may differ between ranks. At one rank they do nothing. They equal Megatron's f
 * and g, torchshard.distributed's copy, reduce, scatter and gather, and the mp_ functions of ml.
 * copy: R -> R, x unchanged; backward all-reduces the gradients by op, once.
 * reduce: R or P -> R, an all-reduce by op; backward passes the gradient on.
 * scatter: R -> S(dim), this rank's slice; backward all-gathers.
 * gather: S(dim) -> R, or R -> R where each rank's x is one of equal pieces: an all-gather along
 * dim; backward takes this rank's slice of complete gradients and reduce-scatters partial ones. */
TSH_API tsh_tensor *tsh_tp_copy(tsh_tensor *x, tsh_redop op);
TSH_API tsh_tensor *tsh_tp_reduce(tsh_tensor *x, tsh_redop op);
TSH_API tsh_tensor *tsh_tp_scatter(tsh_tensor *x, int dim);
TSH_API tsh_tensor *tsh_tp_gather(tsh_tensor *x, int dim);
/* From the tensor-parallel rank 0: the same batch on all ranks of tp, in place; owned tensors, R.
 * One broadcast. TSH_ERR_STATE: as tsh_write. */
TSH_API tsh_result tsh_broadcast_batch(tsh_tensor *t);

typedef enum tsh_extent { TSH_LOCAL, TSH_GLOBAL } tsh_extent;
/* Copy values out and in, dense and row-major, `bytes` in all (checked). TSH_LOCAL: this rank's
 * piece. TSH_GLOBAL: the whole tensor on every rank; reading a sharded one is an all-gather, a
 * partial one an all-reduce, writing takes this rank's slice (partial: an error). Writing is for
 * owned tensors that no recorded op has used: TSH_ERR_STATE between an op and the tsh_backward or
 * tsh_step_end that ends its tape. */
TSH_API tsh_result tsh_read(tsh_ctx *ctx, tsh_tensor *t, tsh_extent extent, void *out,
                            size_t bytes);
TSH_API tsh_result tsh_write(tsh_ctx *ctx, tsh_tensor *t, tsh_extent extent, const void *in,
                             size_t bytes);
/* Writes the local piece, "f32 (2, 3) S(1): 1 2 3 / 4 5 6", cut at size; text NULL: does not. */
TSH_API char *tsh_to_string(tsh_tensor *t, char *text, size_t size);

/* -- matmul, linear, embedding ---------------------------------------------- */

/* (.., m, k) x (.., k, n) -> (.., m, n); leading dimensions broadcast (torch.matmul of two tensors
 * with at least two dimensions). Layouts: S(k) S(k): P. S(m) R: S(m). R S(n): S(n). batch
 * dimensions like elementwise. P R, R P: P. Dtypes may differ: the result has a's. Two bf16 inputs,
 * and the result's gradient with them, are multiplied as bf16, with sums of float; any other 16-bit
 * input is converted to tsh_real first. */
TSH_API tsh_tensor *tsh_matmul(tsh_tensor *a, tsh_tensor *b);
/* x (.., in), weight w (out, in), bias b (out) or NULL -> x w^T + b (.., out), torch's F.linear. w
 * S(0), x R, b S(0): column-parallel, gives S(-1); backward all-reduces dx. w S(1), x S(-1) or R, b
 * R: row-parallel, gives R by one all-reduce in its dtype, b added after it. w R: x R, or S along
 * another dimension, kept. Dtypes may differ, as of tsh_matmul: the result has x's. */
TSH_API tsh_tensor *tsh_linear(tsh_tensor *x, tsh_tensor *weight, tsh_tensor *bias);

typedef struct tsh_lookup_desc {
    int padding;            /* 1: row padding_idx gets no gradient */
    int64_t padding_idx;    /* negative counts from the end */
    double max_norm;        /* rows looked up that are longer are scaled to it, in w; 0: none */
    double norm_type;       /* p of that norm, INFINITY too; 0: 2 */
    int scale_grad_by_freq; /* gradients are divided by how often their id stands in ids */
    int sparse;             /* w a leaf: optimisers change only the rows that were looked up */
} tsh_lookup_desc;
/* ids (..), TSH_I32 or TSH_I64, each in [0, V); weight w (V, D) -> (.., D), torch's F.embedding;
 * desc NULL: no options. w R: as ids. w S(0), ids R: P (rows of other ranks are zero; redistribute
 * to complete). w S(1): S(-1). Forward, max_norm runs one all-reduce of norms where w is S(1), and
 * one over dp; it and scale_grad_by_freq one of counts where ids are sharded. A row-sparse gradient
 * lies dense in memory with a mark per row; a contribution of another op makes it dense. */
TSH_API tsh_tensor *tsh_embedding(tsh_tensor *ids, tsh_tensor *weight, const tsh_lookup_desc *desc);

/* -- norms, attention, loss ------------------------------------------------- */

/* torch.nn.functional.layer_norm over the last dimension (D), with weight and bias (D) or NULL. eps
 * 0 means 1e-5, TSH_ZERO means 0. Layouts: x R or S along another dimension, weight and bias R (if
 * x is S, their gradients are partial); or x S(-1), weight and bias sharded by the same units: two
 * all-reduces of a number per row forward, one of two backward. */
TSH_API tsh_tensor *tsh_layer_norm(tsh_tensor *x, tsh_tensor *weight, tsh_tensor *bias, double eps);
/* x weight / sqrt(mean x^2 + eps) over the last dimension (D), weight (D) or NULL: 1; Zhang &
 * Sennrich 2019. eps 0: 1e-6; TSH_ZERO: 0. Layouts as tsh_layer_norm; x S(-1): one all-reduce of a
 * number per row forward, one backward. */
TSH_API tsh_tensor *tsh_rms_norm(tsh_tensor *x, tsh_tensor *weight, double eps);
typedef struct tsh_rms_norm_desc {
    int64_t dim;  /* features; of a layer only */
    double eps;   /* 0: 1e-6; TSH_ZERO: 0 */
    int plus_one; /* 1: x (weight + 1) / sqrt(mean x^2 + eps), as Gemma; a layer's weight is at
                   * first 0; without a weight: as 0 */
    tsh_dtype dtype; /* of a layer's weight */
} tsh_rms_norm_desc;
/* tsh_rms_norm with the options of desc; NULL: none. */
TSH_API tsh_tensor *tsh_rms_norm_with(tsh_tensor *x, tsh_tensor *weight,
                                      const tsh_rms_norm_desc *desc);

typedef struct tsh_rope_desc {
    double base;     /* 0: 10000 */
    int64_t dims;    /* rotated features, the first ones, an even number; 0: all of D */
    int interleaved; /* 0: pairs (i, i + dims / 2), as GPT-NeoX and LLaMA; 1: (2 i, 2 i + 1), as
                        GPT-J */
    int64_t start;   /* global position of x's first row */
    const double *freqs; /* (dims / 2), read during the call: the angle of pair i at position t is
                            t freqs[i], for scalings such as Llama 3's; NULL: by base */
    double factor;       /* of cosines and sines, as YaRN's attention factor; 0: 1 */
    const int64_t *starts; /* read during the call: for each index of x's first dimension the
                              position of its first row, added to start, as texts of a batch need
                              it that are not equally long; x has three dimensions or more; NULL:
                              start for all */
} tsh_rope_desc;
/* Rotary position embedding (Su et al. 2021) of x (.., T, D): pair i of the row at position t is
 * rotated by the angle t base^(-2 i / dims), and multiplied by factor. Linear: keeps R, P, and S of
 * every dimension but D; positions are global where T is sharded. No collective; backward rotates
 * by minus the angle. */
TSH_API tsh_tensor *tsh_rope(tsh_tensor *x, const tsh_rope_desc *desc);

typedef struct tsh_attention_desc {
    int causal;        /* query i sees keys up to i + Tk - Tq */
    double scale;      /* 0: 1 / sqrt(D) */
    double dropout;    /* of the probabilities */
    tsh_module *owner; /* of the dropout key; NULL: the ctx */
    /* Broadcasts to (B, H, Tq, Tk), R or sharded as q's heads: values are added to scores, TSH_I32
     * keeps where not 0. If it requires a gradient (T5's bias), that is summed where the mask
     * broadcasts; it is partial if q is sharded and the mask is R. */
    tsh_tensor *mask;
    /* Owned, (B, Hkv, Tmax, D), laid out as k, of any floating dtype no wider than tsh_real: k and
     * v are appended at `past`, rounded to it, and keys [0, past + Tk) are seen. Without gradients
     * only. */
    tsh_tensor *cache_k, *cache_v;
    int64_t past;
    /* Ragged batches, read during the call, one entry for each row of the whole batch; NULL: all
     * rows alike. */
    const int64_t *pasts;   /* (B): a row's own `past` */
    const int64_t *lengths; /* (B): of a row's Tk new positions only the first ones, so many, are
                               its own: the others are not appended, and no query sees them */
    int64_t window;    /* query i, at position p = i + Tk - Tq, sees key j if p - j < window and,
                          unless causal, j - p < window; its cost is T window. 0: no window */
    double soft_cap;   /* scores s, scaled, become soft_cap tanh(s / soft_cap), before the mask
                          (Gemma 2); 0: they do not */
    tsh_tensor *sinks; /* (H), R or sharded as q's heads: a score per head that takes part in each
                          softmax, with no value (gpt-oss); NULL: none */
} tsh_attention_desc;
/* q (B, H, Tq, D), k and v (B, Hkv, Tk, D) -> (B, H, Tq, D),
 * torch.nn.functional.scaled_dot_product_attention, in tiles with an online softmax (Milakov &
 * Gimelshein 2018, Dao et al. 2022); a query that sees no key gives 0. A row of a ragged batch has
 * the bits that it has alone; queries of padding give something finite. H is a multiple of Hkv:
 * query head i uses head i / (H / Hkv) of k and v (grouped queries, Ainslie et al. 2023). Layouts:
 * R; all three alike by batch S(0); by heads S(1), q in whole groups (tsh_shard_units(1, H / Hkv));
 * or q S(1) with k and v R, cut anywhere: then dk and dv are partial. No collective forward. The
 * result has q's dtype, sums are tsh_real; if q, k and v are bf16 and the processor has
 * AVX512_BF16, probabilities and gradients are rounded to bf16 before they are multiplied. */
TSH_API tsh_tensor *tsh_attention(tsh_tensor *q, tsh_tensor *k, tsh_tensor *v,
                                  const tsh_attention_desc *desc);

typedef enum tsh_reduction { TSH_REDUCE_MEAN, TSH_REDUCE_SUM, TSH_REDUCE_NONE } tsh_reduction;
typedef struct tsh_cross_entropy_desc {
    tsh_reduction reduction;
    int ignore;           /* rows left out: 0: those with target -100, as torch; 1: ignore_index */
    int64_t ignore_index; /* any integer */
    int empty_zero;       /* mean where the divisor is 0: 0 gives NaN as torch, 1 gives 0 */
    double label_smoothing; /* e, in [0, 1]: the target becomes (1 - e) target + e / V */
    double z_loss;          /* adds z_loss (log sum exp)^2 to each row's loss */
    tsh_tensor *weight;     /* of the classes, (V), R or cut as the classes; NULL: 1. No gradient */
    int dim;                /* of the classes: 0: the last; 1: dimension 1, as torch */
} tsh_cross_entropy_desc;
/* logits (.., V), target (..) of integers or (.., V) of probabilities -> a scalar, or (..)
 * unreduced. With .dim = 1 as torch.nn.functional.cross_entropy: logits (V) or (N, V, d1, ..),
 * target (N, d1, ..) or probabilities of the logits' shape, unreduced (N, d1, ..); logits of three
 * dimensions or more are copied, unless their classes lie side by side in memory. Logits R; or
 * sharded along the classes: an all-reduce of the row maxima and one of all row sums, whatever the
 * options; or along another dimension: mean and sum give P, and the mean of integer targets
 * all-reduces its divisor. No collective backward. Integer targets are R, or sharded where rows
 * are; one outside [0, V) that is not ignored is an error on every rank. Probabilities are R or
 * laid out as the logits and get no gradient. The mean divides by the sum of the weights of the
 * targets' classes, or by the number of rows of probabilities. A class with logit -inf is padding:
 * smoothing leaves it out. */
TSH_API tsh_tensor *tsh_cross_entropy(tsh_tensor *logits, tsh_tensor *target,
                                      const tsh_cross_entropy_desc *desc);

/* -- sampling ---------------------------------------------------------------- */

/* The options apply in this order, which is transformers'. */
typedef struct tsh_sample_desc {
    /* Of the ids in .previous, logits above 0 are divided by it, others multiplied, each id once;
     * Keskar et al. 2019. 0: 1 */
    double penalty;
    /* (.., n), TSH_I32 or TSH_I64: the last n ids of each row; those outside [0, V), such as -1,
     * stand for none. NULL: none. */
    tsh_tensor *previous;
    double temperature; /* divides the logits; 0: 1; TSH_ZERO: 0, which takes the largest logit */
    int64_t top_k;      /* keeps the k largest logits, and those equal to the last; 0: all */
    double top_p;       /* keeps the smallest set of the largest probabilities, none of them equal
                         * to one left out, whose sum is at least top_p (Holtzman et al. 2020);
                         * 0: 1 */
    double min_p;       /* keeps probabilities from min_p times the largest one up; 0: all */
    uint64_t seed;      /* of row 0; row i is drawn as a single row with seed + i is */
    int64_t position;   /* which draw of its row: give each token of a text another one */
} tsh_sample_desc;
/* logits (.., V) -> (..), TSH_I64, R: ids drawn from softmax(logits) after the filters of desc
 * (NULL: none). The random number of a row is Philox's of seed and position, so that the same
 * logits give the same ids on every rank, degree and backend. Logits in any layout, gathered first
 * (of S(-1) by one all-gather; at temperature 0 without .previous, as by tsh_argmax). No gradient.
 * TSH_ERR_ANOMALY, at temperature 0, too: a row's largest logit is not finite, or one is NaN. */
TSH_API tsh_tensor *tsh_sample(tsh_tensor *logits, const tsh_sample_desc *desc);

/* -- an op of one's own ------------------------------------------------------ */

typedef struct tsh_custom_desc {
    const char *name;
    tsh_shape shape;   /* of the output */
    tsh_layout layout; /* of the output */
    unsigned partial;  /* bit i: backward gives input i's gradient as a partial sum */
    /* Inputs arrive dense, floating ones as TSH_REAL. forward fills out; backward adds to
     * grad_in[i], local and dense, NULL where not wanted. */
    void (*forward)(void *user, tsh_tensor *const *in, int n, tsh_real *out);
    void (*backward)(void *user, tsh_tensor *const *in, int n, const tsh_real *out,
                     const tsh_real *grad_out, tsh_real *const *grad_in);
    void *user; /* must live until backward */
} tsh_custom_desc;
/* An op of n inputs with the caller's own forward and backward. */
TSH_API tsh_tensor *tsh_custom_op(tsh_ctx *ctx, tsh_tensor *const *in, int n,
                                  const tsh_custom_desc *desc);
