/* ========================================================================== */
/* >>module-api                                            MARK: - module-api */
/* Models: the tree, its layers and parameters, and how they are cut over tp. */
/* Needs: >>op-api.                                                           */
/* ========================================================================== */

/* -- modules ---------------------------------------------------------------- */

typedef tsh_tensor *(*tsh_forward_fn)(tsh_module *module, tsh_tensor **in, int n, void *user);

typedef enum tsh_style {
    TSH_PLAIN,          /* every rank holds the whole layer */
    TSH_COLWISE,        /* linear: output features are sharded; embedding: embedding_dim, and the
                         * output is gathered to R (torch gives Shard(-1)) */
    TSH_ROWWISE,        /* linear: input features are sharded; embedding: the vocabulary */
    TSH_AUTO,           /* linear with a weight of its own, as its first input arrives: sharded by
                           features, row-wise, else column-wise */
    TSH_SEQUENCE,       /* norms, dropout: on activations sharded along the sequence, S(1) */
    TSH_PREPARE_INPUT,  /* any module: inputs are brought to .input, or .inputs, first */
    TSH_PREPARE_OUTPUT, /* any module: the output is brought to .output last */
    TSH_STYLES
} tsh_style;

typedef struct tsh_module_desc {
    tsh_forward_fn forward; /* NULL: its children, one after the other */
    void *user;
} tsh_module_desc;
typedef struct tsh_linear_desc {
    int64_t in, out;
    int no_bias;
    tsh_style style;
    int segments;             /* of the sharded dimension; 0: 1 */
    int64_t unit;             /* 0: 1 */
    int gather_output;        /* COLWISE: all-gather, giving R */
    int skip_bias_add;        /* the caller adds tsh_param(module, "bias") */
    int reversed;             /* the weight is stored (in, out), as GPT-2's Conv1D */
    const tsh_layout *input;  /* as in tsh_plan_rule */
    const tsh_layout *output; /* as in tsh_plan_rule */
    int regather;             /* as in tsh_plan_rule */
    tsh_init weight_init;     /* default: KAIMING_UNIFORM with a = sqrt 5, as torch.nn.Linear */
    tsh_init bias_init;       /* default: UNIFORM within 1 / sqrt(in) */
    tsh_dtype dtype;          /* of the parameters; 0: tsh_desc.dtype. So in every description */
} tsh_linear_desc;
typedef struct tsh_classifier_desc {
    int64_t in, classes;
    tsh_tensor *weight; /* an existing parameter (classes, in), such as an embedding's; NULL: own */
    int no_bias;
    tsh_style style; /* COLWISE: logits S(-1), for a vocabulary-parallel loss; ROWWISE: R */
    int gather_output;
    const tsh_layout *input; /* as in tsh_plan_rule */
    tsh_init weight_init;    /* as in tsh_linear_desc */
    tsh_init bias_init;
    tsh_dtype dtype; /* of the layer's own parameters */
} tsh_classifier_desc;
typedef struct tsh_embedding_desc {
    int64_t count, dim; /* rows (vocabulary), columns */
    tsh_style style;
    const tsh_layout *output; /* as in tsh_plan_rule */
    tsh_init init;            /* default: NORMAL(0, 1); the padding row 0 */
    tsh_lookup_desc lookup;   /* as tsh_embedding */
    tsh_tensor *weight;       /* an existing parameter: its cut stays, R takes style; NULL: own */
    tsh_dtype dtype;          /* of a weight of its own */
} tsh_embedding_desc;
typedef struct tsh_layer_norm_desc {
    int64_t dim;
    double eps; /* 0: 1e-5; TSH_ZERO: 0 */
    int no_bias;
    tsh_dtype dtype;
} tsh_layer_norm_desc;
typedef struct tsh_param_desc {
    tsh_init init;            /* default: ZEROS */
    const tsh_layout *layout; /* R or S; NULL: R. A plan may change it */
    int buffer;               /* 1: no gradient, and no optimiser's; else as a parameter */
    tsh_dtype dtype;          /* a buffer's may be TSH_I32 or TSH_I64 */
} tsh_param_desc;

/* The tree's top, made with the ctx. */
TSH_API tsh_module *tsh_root(tsh_ctx *ctx);
/* A node under parent, which may be the root. The name may hold no dot. */
TSH_API tsh_module *tsh_add_module(tsh_module *parent, const char *name,
                                   const tsh_module_desc *desc);
/* A module below by relative path ("h.0.attn"); NULL and an error that lists near names if there is
 * none. */
TSH_API tsh_module *tsh_find(tsh_module *module, const char *path);
/* A parameter by name ("weight"), or by relative path ("h.0.attn.weight"). */
TSH_API tsh_tensor *tsh_param(tsh_module *module, const char *path);
/* Calls fn once for every parameter below, with the path of its first owner. */
TSH_API void tsh_each_param(tsh_module *module,
                            void (*fn)(const char *path, tsh_tensor *param, void *user),
                            void *user);
TSH_API const char *tsh_module_path(const tsh_module *module); /* "" for the root */
/* The child at a 0-based index; NULL past the last. */
TSH_API tsh_module *tsh_child(const tsh_module *module, int index);
/* Makes the parameter `name` of module the same object as `source` (equal shapes): one tensor, used
 * twice. Before an optimiser, a pipeline or a cache is made for it: later it is TSH_ERR_STATE. */
TSH_API tsh_result tsh_tie(tsh_module *module, const char *name, tsh_tensor *source);
/* Gives memory and initial values to every parameter below that has none: the same bits at every
 * degree of tp. */
TSH_API tsh_result tsh_materialize(tsh_module *module);
/* Gives every parameter below its initial values again, tied ones once, and forgets the gradients:
 * the same bits as the first time. Between steps. torch's reset_parameters. */
TSH_API tsh_result tsh_reset_parameters(tsh_module *module);
/* Converts all floating parameters and buffers below to a dtype, with values or still without, in
 * any layout; torch.nn.Module.to. Values are rounded once, to the nearest. Initial values are those
 * of TSH_REAL, rounded, so that it makes no difference when they come. Gradients stay. Before an
 * optimiser is made. Errors, after which nothing is changed: no floating dtype; a recorded op has
 * used a parameter; an optimiser has one. */
TSH_API tsh_result tsh_to(tsh_module *module, tsh_dtype dtype);
/* Training mode on or off for all below; on at first. Dropout works in training mode only. */
TSH_API void tsh_train(tsh_module *module, int on);
TSH_API int tsh_training(const tsh_module *module);
/* On: of this module's forward only inputs and output are kept, and backward computes it again,
 * with the same dropout masks: the same bits, in the memory of one such module at a time, for a
 * third more time. For transformer blocks, mostly. Its forward must be a function of its inputs and
 * parameters, which stay as they are until then, take at most 16 tensors, and retain none; its
 * collectives run twice. An input that the output does not depend on gets zeros for a gradient.
 * Without gradients it frees what it does not return. torch.utils.checkpoint (Chen et al. 2016).
 * Off at first. */
TSH_API void tsh_checkpoint(tsh_module *module, int on);
/* tsh_zero_grad for every parameter below; torch.nn.Module.zero_grad. */
TSH_API void tsh_zero_grads(tsh_module *module);

/* The generator's state: whatever follows a tsh_set_rng_state draws what followed the tsh_rng_state
 * that wrote it, bit for bit: the same dropout masks, tsh_randn and tsh_init values. Returns the
 * bytes of the state, and writes them where `size` suffices: little-endian u64s, that is the magic
 * "tshrng01", the number of modules, the seed, the ctx's counts of draws and of dropout calls, and
 * every module's count of dropout calls, in the order of the tree. The same on every rank of tp. */
TSH_API size_t tsh_rng_state(tsh_ctx *ctx, void *state, size_t size);
/* For a tree with the same number of modules; else, and for other bytes, an error, and nothing is
 * changed. */
TSH_API tsh_result tsh_set_rng_state(tsh_ctx *ctx, const void *state, size_t size);

/* Layers. Parameters have no memory until the first forward, or tsh_materialize; a layer that
 * cannot be made leaves nothing in the tree. Norms: "weight" (dim), at first 1, and "bias" (dim),
 * at first 0; as tsh_layer_norm and tsh_rms_norm_with. Plans: COLWISE shards both, for inputs
 * S(-1); SEQUENCE brings the input to S(seq). */
TSH_API tsh_module *tsh_add_layer_norm(tsh_module *parent, const char *name,
                                       const tsh_layer_norm_desc *desc);
TSH_API tsh_module *tsh_add_rms_norm(tsh_module *parent, const char *name,
                                     const tsh_rms_norm_desc *desc);
/* tsh_dropout with probability p, keyed by the layer's path; nothing outside training mode. */
TSH_API tsh_module *tsh_add_dropout(tsh_module *parent, const char *name, double p);
/* A parameter without a layer, such as a class token: torch.nn.Parameter, and with
 * .buffer register_buffer. desc NULL: all defaults. It is a child of its own name and of kind
 * "param" or "buffer", whose forward returns its input; tsh_param, optimisers and files know it by
 * that path ("h.0.scale"). Plans: ROWWISE shards its first dimension, COLWISE the last, PLAIN none.
 * NULL and an error: a name that the module has already, or a layout that is P or does not fit. */
TSH_API tsh_tensor *tsh_add_param(tsh_module *module, const char *name, tsh_shape shape,
                                  const tsh_param_desc *desc);
/* A module's forward. A row-parallel linear and a vocabulary embedding complete to R (one
 * all-reduce), or to the output that a plan asks for. */
TSH_API tsh_tensor *tsh_forward_n(tsh_module *module, tsh_tensor **in, int n);
TSH_API tsh_tensor *tsh_forward(tsh_module *module, tsh_tensor *x);
/* A residual connection and what follows it: *x becomes tsh_add(*x, y), and the forward of that by
 * any module is returned; after an error both are NULL. */
TSH_API tsh_tensor *tsh_forward_residual(tsh_module *module, tsh_tensor **x, tsh_tensor *y);

/* -- parallelize ------------------------------------------------------------ */

/* One line of a plan: the modules whose path below the root matches get the style. */
typedef struct tsh_plan_rule {
    const char *path; /* dots separate names; *, ? and [qkv], [0-9], [!qkv] match within one, ** any
                       * number of names */
    tsh_style style;
    int segments;             /* of the sharded dimension; 0: 1 */
    int64_t unit;             /* 0: 1 */
    int gather_output;        /* COLWISE linear: the same as an output of R */
    const tsh_layout *input;  /* how the input must arrive, else it is an error; NULL: as the style
                                 takes it. SEQUENCE, PREPARE_INPUT: what it is brought to */
    const tsh_layout *output; /* how the output is given; NULL: as the style gives it. ROWWISE with
                                 S(seq): a reduce-scatter in place of the all-reduce */
    int regather;     /* COLWISE with an input S(seq): keep this rank's piece only, and gather
                                 it again in backward */
    const char *kind; /* only modules of this kind: "linear", "embedding"; NULL: any */
    const tsh_layout *const *inputs; /* PREPARE_INPUT of several inputs; NULL: as it comes */
    int input_count;
    const tsh_segment *cut; /* the segments' own lengths and units; NULL: equal ones, by unit */
} tsh_plan_rule;
/* Gives every module below that a rule matches its style. Values already there are kept and laid
 * anew (collective where they were sharded), with an optimiser's moments; their gradients are
 * forgotten. Between steps. Errors, after which nothing is changed: a rule that matches no module
 * that takes its style; two rules for one purpose (inputs, parameters, output) of one module; rules
 * that give a tied parameter two layouts. Give each module that uses a tied parameter a rule: one
 * without is not checked. torch.distributed.tensor.parallel.parallelize_module. */
TSH_API tsh_result tsh_parallelize(tsh_module *module, const tsh_plan_rule *rules, int count);
/* Writes which modules each rule matches; changes nothing. Errors as tsh_parallelize. */
TSH_API tsh_result tsh_plan_report(tsh_module *module, const tsh_plan_rule *rules, int count,
                                   FILE *file);
/* Writes the tree as a table: path, kind, dtype, global shape, layout, local shape and bytes on
 * this rank of every parameter, and totals. Tied parameters count once. Then a line for every group
 * of each optimiser of module, or of one below: how many parameters have this learning rate and
 * this weight decay, and the first of them. */
TSH_API tsh_result tsh_summary(tsh_module *module, FILE *file);
/* Layers that their description or a plan can shard. A linear, torch.nn.Linear: x (.., in) -> (..,
 * out) by "weight" (out, in), or (in, out) if reversed, and "bias" (out). Plain: no collective, or
 * partial gradients of a sharded x. COLWISE: x R -> S(-1), one all-reduce of dx backward; x
 * declared S(seq): one all-gather forward, one reduce-scatter backward. ROWWISE: x S(-1), or R,
 * which is sliced -> R by one all-reduce forward; an output S(seq): one reduce-scatter, and one
 * all-gather backward. Errors: sizes below 0, units that do not fit, contradictions in the
 * description. */
TSH_API tsh_module *tsh_add_linear(tsh_module *parent, const char *name,
                                   const tsh_linear_desc *desc);
/* The last layer: a linear to classes whose weight may be an embedding's, and then lies as that
 * one. COLWISE is ColossalAI's VocabParallelClassifier1D, ROWWISE its Classifier1D. */
TSH_API tsh_module *tsh_add_classifier(tsh_module *parent, const char *name,
                                       const tsh_classifier_desc *desc);
/* torch.nn.Embedding: ids (..) -> (.., dim) by "weight" (count, dim), as tsh_embedding, completed
 * to R: ROWWISE by one all-reduce forward (or a reduce-scatter to an output S(seq)), COLWISE by one
 * all-gather (an output S(-1): none). */
TSH_API tsh_module *tsh_add_embedding(tsh_module *parent, const char *name,
                                      const tsh_embedding_desc *desc);

/* -- layers of transformers --------------------------------------------------- */

typedef struct tsh_attention_layer_desc {
    int64_t dim;             /* features of the input and of the output */
    int64_t heads, kv_heads; /* query heads; key and value heads, a divisor of these, 0: as many */
    int64_t head_dim;        /* features of a head; 0: dim / heads */
    int qkv_bias, out_bias;  /* 1: the projections to q, k and v have biases; the output has one */
    const tsh_rope_desc *rope;        /* of q and k, copied; NULL: none. .start counts from the
                                       * positions that the cache holds */
    const tsh_rms_norm_desc *qk_norm; /* of each head of q and k, before rope: children q_norm and
                                       * k_norm, whose dim is head_dim; NULL: none */
    int norm_all_heads; /* 1: qk_norm is of all heads together, with a weight for each feature, as
                         * OLMo 2; where heads are sharded, each runs a small all-reduce forward and
                         * one backward */
    tsh_attention_desc attention;     /* its options; owner, caches, past, pasts, lengths and sinks
                                       * are the layer's, dropout works in training mode only */
    int sinks;                        /* 1: a parameter "sinks" (heads), at first 0: see there */
    const char *q, *k, *v, *out;      /* names of the linear layers; NULL: "q_proj", "k_proj",
                                       * "v_proj", "o_proj" */
    const char *fused; /* the name of one linear layer [Q|K|V] in place of three; NULL: three */
    int by_group;      /* 1: fused holds, for each key head, its query heads, key, and value */
    int reversed;      /* as in tsh_linear_desc, of all */
    tsh_init weight_init, bias_init; /* as in tsh_linear_desc, of all */
    tsh_dtype dtype;                 /* of the linear layers */
} tsh_attention_layer_desc;
/* Self-attention: x (B, T, dim) and, of tsh_forward_n, a mask as tsh_attention takes it -> (B, T,
 * dim). It is sharded as it is made: q, k and v column-parallel by whole heads, evenly or not,
 * query heads with the key head that they share; the output row-parallel. Where key heads are
 * shared and fewer than the ranks, k and v, or what is fused, stay whole on every rank, and query
 * heads are cut anywhere. A plan may change its linear layers. While a tsh_cache is attached, x
 * are the positions that follow those it holds. x R: one all-reduce forward, one backward. NULL and
 * an error: counts that do not fit, or as tsh_add_linear. */
TSH_API tsh_module *tsh_add_attention(tsh_module *parent, const char *name,
                                      const tsh_attention_layer_desc *desc);

typedef enum tsh_activation { TSH_GELU, TSH_GELU_TANH, TSH_RELU, TSH_SILU } tsh_activation;
typedef struct tsh_mlp_desc {
    int64_t dim, hidden; /* features of the input and of the output; those between */
    tsh_activation activation;
    int gated; /* 0: down(f(up x)); 1: down(f(gate x) up x), Shazeer 2020 */
    int bias;  /* 1: all have biases */
    const char *gate, *up, *down; /* names of the linear layers; NULL: "gate_proj", "up_proj",
                                   * "down_proj" */
    const char *fused; /* gated: the name of one linear layer [gate|up] in place of two */
    int reversed;      /* as in tsh_linear_desc, of all */
    tsh_init weight_init, bias_init; /* as in tsh_linear_desc, of all */
    tsh_dtype dtype;                 /* of the linear layers */
} tsh_mlp_desc;
/* x (.., dim) -> (.., dim). It is sharded as it is made: gate and up column-parallel, down
 * row-parallel, in units of 32 where hidden divides by that, as tsh_quantize needs it. x R: one
 * all-reduce forward, one backward. NULL and an error: as tsh_add_linear. */
TSH_API tsh_module *tsh_add_mlp(tsh_module *parent, const char *name, const tsh_mlp_desc *desc);

/* Keys and values of `batch` texts of at most `length` positions, for every attention layer
 * (tsh_add_attention) below module, laid out as its keys are. While the cache is there, forwards
 * append to it and see what it holds: a prompt at once or in chunks, then token by token, as one
 * forward of the whole text would; without gradients only (tsh_no_grad_begin). dtype: of the cache;
 * 0: tsh_desc.dtype. Shard the model first. NULL and an error: no layer below, one that has a cache
 * already, batch or length below 1. A forward of more than fits is TSH_ERR_SHAPE. Freed with the
 * ctx. No collective. */
TSH_API tsh_cache *tsh_cache_new(tsh_module *module, int64_t batch, int64_t length,
                                 tsh_dtype dtype);
/* Detaches the cache from its layers and frees it. NULL is fine. */
TSH_API void tsh_cache_free(tsh_cache *cache);
/* For texts that are not equally long: of the T positions of each forward to come, row b of the
 * batch has the first counts[b], 0 to T; the others are padding, which is not kept and gives
 * something finite. A row whose count is less than T goes on where it ended. counts: (batch),
 * copied; NULL: every row has all T, as at first. */
TSH_API tsh_result tsh_cache_counts(tsh_cache *cache, const int64_t *counts);
/* How many positions it holds, of the row that has most. */
TSH_API int64_t tsh_cache_length(const tsh_cache *cache);
/* Forgets what follows the first `length` positions of every row, from 0 up to those it holds; 0:
 * all. To be called after a forward that failed: layers before the error had appended already. */
TSH_API tsh_result tsh_cache_truncate(tsh_cache *cache, int64_t length);

/* -- policies --------------------------------------------------------------- */

/* A named count of a module's, such as its heads; set again, it takes the new value. */
TSH_API tsh_result tsh_set_argument(tsh_module *module, const char *name, int64_t value);
/* Its global value; 0 and an error where the module has none of that name. */
TSH_API int64_t tsh_argument(const tsh_module *module, const char *name);
/* What a policy left of it on this rank; the global value where no policy divided it. */
TSH_API int64_t tsh_local_argument(const tsh_module *module, const char *name);

/* Where the counts of one attention are: paths of arguments below a block; "attn.num_heads" is the
 * argument num_heads of module attn. */
typedef struct tsh_policy_heads {
    const char *heads;    /* query heads */
    const char *kv_heads; /* key and value heads, a divisor of heads; NULL: as many */
    const char *hidden;   /* features of all query heads, divided with them; NULL: none */
} tsh_policy_heads;
/* parallelformers' Layer. */
typedef struct tsh_policy_layer {
    const char *weight, *bias; /* paths of a layer's parameters below a block: "attn.c_fc.weight";
                                  Python's layer[0] is layer.0. bias NULL: may have none */
    int n_fused;               /* parts stored one after the other, [Q|K|V]; 0: 1 */
    tsh_style replace;         /* 0: as the list says */
    int reversed;              /* stored (in, out): as the module, else it is an error */
    int ignore_checker;        /* 1: a block without it is passed over; 0: that is an error */
    const tsh_policy_heads *heads; /* cut by whole heads; NULL: anywhere */
    int kv;                        /* with heads: keys, values, or both, and no queries */
} tsh_policy_layer;
/* Which layers of a block are sharded, and how: parallelformers' Policy. A list is ended by an
 * entry of zeros; NULL: there is none. */
typedef struct tsh_policy {
    const char *name;
    const char *blocks;               /* paths of blocks, a pattern as in tsh_plan_rule */
    const tsh_policy_layer *attn_qkv; /* column-parallel */
    const tsh_policy_layer *attn_out; /* row-parallel, the bias replicated */
    const tsh_policy_layer *mlp_in;   /* column-parallel */
    const tsh_policy_layer *mlp_out;  /* row-parallel */
    /* Paths of further arguments below a block, such as a number of features, of which each rank
     * gets its part (torch.chunk's); ended by NULL; NULL: none. */
    const char *const *arguments;
    const struct tsh_policy *next; /* of other blocks of the family, such as decoders; NULL: none */
} tsh_policy;
/* gpt2, gpt_neo, gptj, gpt_neox, opt, bloom, llama, mistral, qwen2, phi, bert, roberta,
 * distil_bert, electra, albert, bart, t5, vit, clip, deit, for modules named as those of Hugging
 * Face transformers; NULL for another name. */
TSH_API const tsh_policy *tsh_policy_find(const char *name);
/* Shards every block below root by the policy; what it does not name stays as it is. Features are
 * cut by whole heads, evenly or not; where several query heads share a key head, by such groups.
 * Where key heads are shared and fewer than the ranks, K and V stay whole on every rank and their
 * gradients are partial (one all-reduce each); that takes layers of their own. No block, a block
 * without a named layer or argument, a list that finds nothing in a block, heads or hidden sizes
 * that do not fit: an error, and nothing is changed. One all-reduce forward per row-parallel layer,
 * backward per input of column-parallel ones. */
TSH_API tsh_result tsh_parallelize_policy(tsh_module *root, const tsh_policy *policy);
