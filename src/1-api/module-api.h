/* ========================================================================== */
/* >>module-api                                            MARK: - module-api */
/* Models: the module tree, its layers and parameters; sharding over tp.      */
/* Needs: >>op-api.                                                           */
/* ========================================================================== */

/* -- modules: the tree, parameters, layers ---------------------------------- */

typedef tsh_tensor *(*tsh_forward_fn)(tsh_module *module, tsh_tensor **in, int n, void *user);

typedef enum tsh_style {
    TSH_PLAIN,          /* every rank holds all parameters */
    TSH_COLWISE,        /* linear: output features are sharded; embedding: its features are, and
                         * the output is gathered to R (torch's stays Shard(-1)) */
    TSH_ROWWISE,        /* linear: input features are sharded; embedding: the vocabulary is */
    TSH_AUTO,           /* linear whose weight is not tied: the style is chosen at the first
                         * forward: ROWWISE if the input is sharded along its features, else
                         * COLWISE */
    TSH_SEQUENCE,       /* norms, dropout: sequence parallelism: the input is redistributed to S(1),
                         * its sequence dimension, or to .input */
    TSH_PREPARE_INPUT,  /* any module: before forward, redistributes its inputs to the rule's .input
                         * or .inputs */
    TSH_PREPARE_OUTPUT, /* any module: after forward, redistributes its output to the rule's
                         * .output */
    TSH_STYLES
} tsh_style;

typedef struct tsh_module_desc {
    tsh_forward_fn forward; /* NULL: runs the children one after the other */
    void *user;
} tsh_module_desc;
typedef struct tsh_linear_desc {
    int64_t in, out;
    const tsh_layout *input;  /* layout that the input must have; NULL: that of the style (see
                               * tsh_plan_rule) */
    const tsh_layout *output; /* layout of the output; NULL: that of the style (see
                               * tsh_plan_rule) */
    tsh_choice bias;          /* TSH_NO: no bias; TSH_USUAL: a bias */
    tsh_style style;
    int segments;             /* number of segments of the sharded dimension; 0 means 1 */
    int64_t unit;             /* elements of a unit, which is not split (tsh_segment); 0 means 1 */
    int gather_output;        /* 1, with COLWISE: the output is all-gathered to R */
    int skip_bias_add;        /* 1: forward does not add the bias; the caller adds
                               * tsh_param(module, "bias") */
    int reversed;             /* 1: the weight is stored as (in, out), as in GPT-2's Conv1D */
    int regather;             /* 1, with COLWISE and an input S(seq): saves only this rank's shard
                               * of the input for backward, which gathers it again */
    tsh_init weight_init;     /* default: KAIMING_UNIFORM with a = sqrt 5, as torch.nn.Linear */
    tsh_init bias_init;       /* default: UNIFORM in [-s, s), s = 1 / sqrt(in) */
    tsh_dtype dtype;          /* dtype of the parameters; 0: tsh_desc.dtype, as in the descriptors
                               * of all layers */
} tsh_linear_desc;
typedef struct tsh_classifier_desc {
    int64_t in, classes;
    tsh_tensor *weight; /* an existing parameter (classes, in), such as an embedding's weight;
                         * NULL: a new one */
    const tsh_layout *input; /* layout that the input must have; NULL: that of the style */
    tsh_choice bias;         /* TSH_NO: no bias; TSH_USUAL: a bias */
    tsh_style style; /* COLWISE: logits are S(-1), for a vocabulary-parallel loss; ROWWISE: R */
    int gather_output;
    tsh_init weight_init;    /* default: that of tsh_linear_desc */
    tsh_init bias_init;
    tsh_dtype dtype; /* dtype of new parameters */
} tsh_classifier_desc;
typedef struct tsh_embedding_desc {
    int64_t count, dim; /* rows (vocabulary size) and columns (features) of the weight */
    tsh_style style;
    const tsh_layout *output; /* layout of the output; NULL: that of the style (see
                               * tsh_plan_rule) */
    tsh_init init;            /* default: NORMAL with a = 0, b = 1; the padding row is 0 */
    tsh_lookup_desc lookup;   /* options of tsh_embedding */
    tsh_tensor *weight;       /* an existing parameter (count, dim): keeps its layout if sharded,
                               * else gets that of style; NULL: a new one */
    tsh_dtype dtype;          /* dtype of a new weight */
} tsh_embedding_desc;
typedef struct tsh_layer_norm_desc {
    int64_t dim;
    double eps; /* added to the variance; 0: 1e-5; TSH_ZERO: 0 */
    tsh_dtype dtype;
    tsh_choice bias; /* TSH_NO: no bias; TSH_USUAL: a bias */
} tsh_layer_norm_desc;
typedef struct tsh_param_desc {
    tsh_init init;            /* initial values; default: ZEROS */
    const tsh_layout *layout; /* R or S; NULL: R. A plan may change it later */
    int buffer;               /* 1: a buffer: no gradient, and optimisers leave it alone */
    tsh_dtype dtype;          /* dtype; 0: tsh_desc.dtype; a buffer may also be TSH_I32 or
                               * TSH_I64 */
} tsh_param_desc;

/* Returns the root of the module tree, which is made with the ctx. */
TSH_API tsh_module *tsh_root(tsh_ctx *ctx);
/* Adds a container module below parent. The name must not contain a dot.
 * torch: nn.Module, nn.Module.add_module, nn.Sequential, nn.ModuleList, nn.ModuleDict */
TSH_API tsh_module *tsh_add_module(tsh_module *parent, const char *name,
                                   const tsh_module_desc *desc);
/* Returns the module at a path below `module` ("h.0.attn"). If there is none: NULL, and an error
 * that lists similar names.
 * torch: nn.Module.get_submodule */
TSH_API tsh_module *tsh_find(tsh_module *module, const char *path);
/* Returns the parameter with this name ("weight"), or at this path below module
 * ("h.0.attn.weight"). If there is none: NULL, and an error that lists the names.
 * torch: nn.Module.get_parameter */
TSH_API tsh_tensor *tsh_param(tsh_module *module, const char *path);
/* Calls fn once for every parameter below module that this rank's pipeline stage holds, with its
 * path; a tied parameter has the path of the first module that owns it.
 * torch: nn.Module.parameters, nn.Module.named_parameters */
TSH_API void tsh_each_param(tsh_module *module,
                            void (*fn)(const char *path, tsh_tensor *param, void *user),
                            void *user);
/* Returns the ctx of a module; NULL: module is NULL. */
TSH_API tsh_ctx *tsh_module_ctx(const tsh_module *module);
/* Returns the path of a module from the root; "" for the root. */
TSH_API const char *tsh_module_path(const tsh_module *module);
/* Returns a child by its index from 0; NULL past the last.
 * torch: nn.Module.children, nn.Module.named_children */
TSH_API tsh_module *tsh_child(const tsh_module *module, int index);
/* Ties a parameter: the parameter `name` of module becomes the same object as `source`, a parameter
 * of the same shape. Call it before tsh_optim_new, tsh_pipeline_new or tsh_cache_new uses the
 * replaced parameter; later it is TSH_ERR_STATE. */
TSH_API tsh_result tsh_tie(tsh_module *module, const char *name, tsh_tensor *source);
/* Allocates every parameter below module that has no memory yet and sets it to its initial values:
 * the same bits at every degree of tp.
 * torch: nn.Module.to_empty */
TSH_API tsh_result tsh_materialize(tsh_module *module);
/* Sets every parameter below module to its initial values again, with the same bits as the first
 * time, and clears the gradients; a tied parameter is set once. Call it between steps. torch's
 * reset_parameters.
 * torch: nn.Linear.reset_parameters */
TSH_API tsh_result tsh_reset_parameters(tsh_module *module);
/* Converts all floating parameters and buffers below module to a dtype, in any layout, allocated or
 * not; torch.nn.Module.to. Values are rounded once, to the nearest. Initial values are computed in
 * TSH_REAL and rounded, so converting before or after initialisation gives the same bits. Gradients
 * stay. Call it before tsh_optim_new. Errors, after which nothing is changed: the dtype is not
 * floating; a recorded op has used a parameter; an optimiser has one.
 * torch: nn.Module.to, nn.Module.float, nn.Module.half, nn.Module.bfloat16 */
TSH_API tsh_result tsh_to(tsh_module *module, tsh_dtype dtype);
/* Turns training mode on or off for module and all modules below; it is on at first. Dropout layers
 * drop values in training mode only.
 * torch: nn.Module.train, nn.Module.eval */
TSH_API void tsh_train(tsh_module *module, int on);
/* Returns 1 if the module is in training mode, else 0.
 * torch: nn.Module.training */
TSH_API int tsh_training(const tsh_module *module);
/* Turns activation checkpointing of a module on or off (off at first); torch.utils.checkpoint (Chen
 * et al. 2016). While it is on, forward keeps only the module's inputs and outputs, and backward
 * runs the forward again, with the same dropout masks: the same bits, in the memory of one such
 * module at a time, for a third more time. It is mostly used for transformer blocks. The forward
 * must depend only on its inputs and parameters, which must not change until backward; it takes at
 * most 16 tensors and must not call tsh_retain_grad; its collectives run twice. An input that the
 * output does not depend on gets a gradient of zeros. Without gradients, forward frees everything
 * but the outputs.
 * torch: torch.utils.checkpoint.checkpoint */
TSH_API void tsh_checkpoint(tsh_module *module, int on);
/* Calls tsh_zero_grad for every parameter below module; torch.nn.Module.zero_grad.
 * torch: nn.Module.zero_grad, optim.Optimizer.zero_grad */
TSH_API void tsh_zero_grads(tsh_module *module);

/* Writes the state of the random numbers to `state` if its `size` bytes suffice, and returns the
 * number of bytes of the state. After tsh_set_rng_state with it, dropout, tsh_randn and
 * tsh_init_... draw the same bits again as after this call. The state is the same on every rank of
 * tp and consists of little-endian u64s: the magic "tshrng01", the number of modules, the seed, the
 * ctx's counts of draws and of dropout calls, and every module's count of dropout calls in the
 * order of the tree.
 * torch: torch.get_rng_state */
TSH_API size_t tsh_rng_state(tsh_ctx *ctx, void *state, size_t size);
/* Restores a state that tsh_rng_state wrote, in a tree with the same number of modules. Any other
 * state is an error, and nothing is changed.
 * torch: torch.set_rng_state */
TSH_API tsh_result tsh_set_rng_state(tsh_ctx *ctx, const void *state, size_t size);

/* Adds a layer-norm layer (tsh_layer_norm) below parent, with parameters "weight" (dim), initially
 * 1, and "bias" (dim), initially 0. In plans, COLWISE shards both, for inputs S(-1); SEQUENCE
 * redistributes the input to S(seq). As for all layers, parameters get memory at the first forward
 * or by tsh_materialize, and a layer that cannot be made leaves nothing in the tree.
 * torch: nn.LayerNorm */
TSH_API tsh_module *tsh_add_layer_norm(tsh_module *parent, const char *name,
                                       const tsh_layer_norm_desc *desc);
/* Adds an RMS-norm layer (tsh_rms_norm_with), with a parameter "weight" (dim), initially 1 (0 with
 * .plus_one). Plans as for tsh_add_layer_norm.
 * torch: nn.RMSNorm */
TSH_API tsh_module *tsh_add_rms_norm(tsh_module *parent, const char *name,
                                     const tsh_rms_norm_desc *desc);
/* Adds a dropout layer (tsh_dropout) with probability p, whose mask is keyed by the layer's path.
 * Outside training mode its forward returns the input.
 * torch: nn.Dropout */
TSH_API tsh_module *tsh_add_dropout(tsh_module *parent, const char *name, double p);
/* Adds a parameter without a layer, such as a class token: torch.nn.Parameter, or register_buffer
 * if .buffer is 1. desc NULL: all defaults. In the tree it is a child of module, of kind "param" or
 * "buffer", whose forward returns its input; tsh_param, optimisers and files know it by that
 * child's path ("h.0.scale"). In plans, ROWWISE shards its first dimension, COLWISE the last, PLAIN
 * none. NULL and an error: the module has that name already, or the layout is P or does not fit.
 * torch: nn.Parameter, nn.Buffer, nn.Module.register_parameter, nn.Module.register_buffer */
TSH_API tsh_tensor *tsh_add_param(tsh_module *module, const char *name, tsh_shape shape,
                                  const tsh_param_desc *desc);
/* Runs a module's forward on n inputs. A row-parallel linear or a sharded embedding returns R (by
 * one collective), or the output layout that a plan asks for. */
TSH_API tsh_tensor *tsh_forward_n(tsh_module *module, tsh_tensor **in, int n);
/* Runs a module's forward on one input; see tsh_forward_n.
 * torch: nn.Module.forward, nn.Module.__call__ */
TSH_API tsh_tensor *tsh_forward(tsh_module *module, tsh_tensor *x);
/* Adds a residual and runs the module that follows, such as a norm: *x becomes tsh_add(*x, y), and
 * the forward of module on it is returned. After an error both are NULL. */
TSH_API tsh_tensor *tsh_forward_residual(tsh_module *module, tsh_tensor **x, tsh_tensor *y);

/* -- sharding a model by a plan --------------------------------------------- */

/* One rule of a plan: gives its style to all modules whose path matches. Paths begin below the
 * module that tsh_parallelize is given. */
typedef struct tsh_plan_rule {
    const char *path; /* pattern of names separated by dots; *, ? and [qkv], [0-9], [!qkv] match
                       * within a name, ** matches any number of names */
    tsh_style style;
    int segments;             /* number of segments of the sharded dimension; 0 means 1 */
    int64_t unit;             /* elements of a unit, which is not split (tsh_segment); 0 means 1 */
    int gather_output;        /* 1, for a COLWISE linear: the same as .output = R */
    const tsh_layout *input;  /* layout that the input must have, else an error; NULL: that of
                               * the style. SEQUENCE, PREPARE_INPUT: the layout that it is
                               * redistributed to */
    const tsh_layout *output; /* layout of the output; NULL: that of the style. ROWWISE with
                               * S(seq): a reduce-scatter in place of the all-reduce */
    int regather;     /* 1, with COLWISE and an input S(seq): saves only this rank's shard of the
                       * input for backward, which gathers it again */
    const char *kind; /* only for modules of this kind, such as "linear" or "embedding"; NULL:
                       * any */
    const tsh_layout *const *inputs; /* PREPARE_INPUT of several inputs: array of their layouts; a
                                      * NULL entry leaves its input as it is */
    int input_count;
    const tsh_segment *cut; /* array of the lengths and units of the segments; NULL: equal segments
                             * with .unit */
} tsh_plan_rule;
/* Applies a plan: gives its style to every module below that a rule matches. Existing values are
 * kept and redistributed (collectively if they were sharded), with the moments of optimisers;
 * gradients are cleared. Call it between steps. Errors, after which nothing is changed: a rule that
 * matches no module that supports its style; two rules for one purpose (inputs, parameters, output)
 * of one module; rules that give a tied parameter two layouts. Give a rule to each module that uses
 * a tied parameter: one without a rule is not checked.
 * torch.distributed.tensor.parallel.parallelize_module.
 * torch: dist.tensor.parallel.parallelize_module */
TSH_API tsh_result tsh_parallelize(tsh_module *module, const tsh_plan_rule *rules, int count);
/* Writes which modules each rule of a plan matches, and changes nothing. Errors as in
 * tsh_parallelize. */
TSH_API tsh_result tsh_plan_report(tsh_module *module, const tsh_plan_rule *rules, int count,
                                   FILE *file);
/* Writes the module tree as a table: path, kind, dtype, global shape, layout, local shape and bytes
 * on this rank of every parameter, which are frozen, and totals: of all, of this rank, of those
 * that are trained. Tied parameters count once. Then one line for every group of each optimiser of
 * module, or of a module below: how many parameters have this learning rate and this weight decay,
 * and the path of the first. */
TSH_API tsh_result tsh_summary(tsh_module *module, FILE *file);
/* Adds a linear layer, torch.nn.Linear: x (.., in) -> (.., out), with parameters "weight" (out,
 * in), or (in, out) if .reversed, and "bias" (out). PLAIN: no collective; if x is sharded, the
 * gradients of the parameters are partial. COLWISE: x R -> S(-1), with one all-reduce of dx in
 * backward; with .input S(seq): one all-gather in forward, one reduce-scatter in backward. ROWWISE:
 * x S(-1), or R, which is sliced -> R, with one all-reduce in forward; with .output S(seq): one
 * reduce-scatter in forward, one all-gather in backward. Errors: sizes below 0, units that do not
 * fit, contradictions in the descriptor.
 * torch: nn.Linear */
TSH_API tsh_module *tsh_add_linear(tsh_module *parent, const char *name,
                                   const tsh_linear_desc *desc);
/* Adds a classifier, the last layer of a model: a linear layer whose weight may be tied to an
 * existing parameter, such as an embedding's; it then has that parameter's layout. COLWISE is
 * ColossalAI's VocabParallelClassifier1D, ROWWISE its Classifier1D. */
TSH_API tsh_module *tsh_add_classifier(tsh_module *parent, const char *name,
                                       const tsh_classifier_desc *desc);
/* Adds an embedding layer, torch.nn.Embedding: ids (..) -> (.., dim), with a parameter "weight"
 * (count, dim); see tsh_embedding. The output is R: ROWWISE by one all-reduce in forward (with
 * .output S(seq): a reduce-scatter), COLWISE by one all-gather (with .output S(-1): no
 * collective).
 * torch: nn.Embedding */
TSH_API tsh_module *tsh_add_embedding(tsh_module *parent, const char *name,
                                      const tsh_embedding_desc *desc);

/* -- layers of transformers --------------------------------------------------- */

typedef struct tsh_attention_layer_desc {
    int64_t dim;             /* features of the input and of the output */
    int64_t heads, kv_heads; /* heads: number of query heads; kv_heads: number of key and value
                              * heads, which divides heads; 0: heads */
    int64_t head_dim;        /* features of a head; 0: dim / heads */
    tsh_choice qkv_bias, out_bias; /* TSH_YES: the linear layers of q, k and v, and of the output,
                                    * have biases; TSH_USUAL: no */
    const tsh_rope_desc *rope;        /* rotary embedding of q and k, copied; NULL: none.
                                       * Positions are .start plus the number of positions that
                                       * the cache holds */
    const tsh_rms_norm_desc *qk_norm; /* RMS norm of each head of q and k, before rope: children
                                       * q_norm and k_norm, with dim = head_dim; NULL: none */
    int norm_all_heads; /* 1: qk_norm normalises all heads together, with a weight for each
                         * feature, as in OLMo 2; if heads are sharded, each of the two norms
                         * runs a small all-reduce in forward and one in backward */
    tsh_attention_desc attention;     /* options of tsh_attention; the layer sets owner, cache_k,
                                       * cache_v, past, pasts, lengths, sinks and segments; dropout
                                       * acts in training mode only */
    int sinks;                        /* 1: adds a parameter "sinks" (heads), initially 0: see
                                       * tsh_attention_desc */
    const char *q, *k, *v, *out;      /* names of the linear layers; NULL: "q_proj", "k_proj",
                                       * "v_proj", "o_proj" */
    const char *fused; /* name of one linear layer [Q|K|V] that replaces the three; NULL: three
                        * layers */
    int by_group;      /* 1: the output features of the fused layer are grouped by key head: the
                        * query heads that use it, the key head, its value head */
    int reversed;      /* 1: the weights of all linear layers are stored as (in, out) */
    tsh_init weight_init, bias_init; /* initial values in all linear layers; defaults: see
                                      * tsh_linear_desc */
    tsh_dtype dtype;                 /* dtype of the linear layers' parameters */
} tsh_attention_layer_desc;
/* Adds a self-attention layer: x (B, T, dim) -> (B, T, dim). tsh_forward_n takes a mask as second
 * input, as tsh_attention does. The layer is sharded when it is made: q, k and v are
 * column-parallel by whole heads, evenly or not, with query heads on the rank of their key head;
 * the output is row-parallel. If query heads share key heads and there are fewer key heads than
 * ranks, k and v, or the fused layer, are whole on every rank, and query heads are sharded
 * anywhere. A plan may change its linear layers. While a tsh_cache is attached, x holds the
 * positions after those in the cache. With x R: one all-reduce in forward, one in backward. NULL
 * and an error: head counts that do not fit, or as in tsh_add_linear.
 * torch: nn.MultiheadAttention */
TSH_API tsh_module *tsh_add_attention(tsh_module *parent, const char *name,
                                      const tsh_attention_layer_desc *desc);
/* Sets the segments (tsh_attention_desc) of the attention layers that are below module now: their
 * next forwards use them, until other segments are set, or NULL, which is the initial state. For
 * rows that hold several sequences, and for rows of unequal length, whose padding has segment -1.
 * Rotary positions need not begin anew with each sequence, as they act by distance. The tensor is
 * not copied: it must live until the last of these forwards; in a later one, a step tensor whose
 * step has ended is an error. Backward of a checkpoint (tsh_checkpoint) uses the segments of its
 * forward, whatever was set since. In a pipeline, .input sets those of its micro-batch, at the
 * container or above it: they are sent to the later stages with the tensors. No collective. */
TSH_API tsh_result tsh_set_segments(tsh_module *module, tsh_tensor *segments);

typedef enum tsh_activation { TSH_GELU, TSH_GELU_TANH, TSH_RELU, TSH_SILU } tsh_activation;
typedef struct tsh_mlp_desc {
    int64_t dim, hidden; /* dim: features of the input and of the output; hidden: features between
                          * up and down */
    tsh_activation activation;
    int gated; /* 0: down(f(up x)); 1: down(f(gate x) up x), Shazeer 2020; f: the activation */
    tsh_choice bias; /* TSH_YES: all linear layers have biases; TSH_USUAL: no */
    const char *gate, *up, *down; /* names of the linear layers; NULL: "gate_proj", "up_proj",
                                   * "down_proj" */
    const char *fused; /* if gated: name of one linear layer [gate|up] that replaces the two;
                        * NULL: two layers */
    int reversed;      /* 1: the weights of all linear layers are stored as (in, out) */
    tsh_init weight_init, bias_init; /* initial values in all linear layers; defaults: see
                                      * tsh_linear_desc */
    tsh_dtype dtype;                 /* dtype of the linear layers' parameters */
} tsh_mlp_desc;
/* Adds an MLP (feed-forward) layer: x (.., dim) -> (.., dim). It is sharded when it is made: gate
 * and up are column-parallel, down is row-parallel, in units of 32 features if 32 divides hidden,
 * as tsh_quantize needs it. With x R: one all-reduce in forward, one in backward. Returns NULL
 * after the errors of tsh_add_linear. */
TSH_API tsh_module *tsh_add_mlp(tsh_module *parent, const char *name, const tsh_mlp_desc *desc);

/* Makes a cache of keys and values for every attention layer (tsh_add_attention) below module:
 * `batch` sequences of at most `length` positions, laid out as the layers' keys. While a cache is
 * attached, each forward appends its keys and values to it and attends to all that it holds: a
 * prompt at once or in chunks, then token by token, gives what one forward of the whole sequence
 * would. Only without gradients (tsh_no_grad_begin). dtype: dtype of the cache; 0: tsh_desc.dtype.
 * Shard the model first. NULL and an error: there is no such layer, one has a cache already, batch
 * or length is below 1. A forward that does not fit into the cache is TSH_ERR_SHAPE. Freed with the
 * ctx. No collective.
 * torch: transformers.StaticCache, transformers.DynamicCache */
TSH_API tsh_cache *tsh_cache_new(tsh_module *module, int64_t batch, int64_t length,
                                 tsh_dtype dtype);
/* Detaches the cache from its layers and frees it; does nothing if cache is NULL. */
TSH_API void tsh_cache_free(tsh_cache *cache);
/* Sets how many positions each sequence has in the forwards to come, for batches of different
 * lengths: of the T positions of a forward, row b has the first counts[b], 0 to T. The others are
 * padding, which is not kept; its outputs are unspecified but finite. A row goes on where its own
 * positions ended. counts has `batch` entries and is copied; NULL: every row has all T, as
 * initially. */
TSH_API tsh_result tsh_cache_counts(tsh_cache *cache, const int64_t *counts);
/* Returns the number of positions that the cache holds of its longest row. */
TSH_API int64_t tsh_cache_length(const tsh_cache *cache);
/* Removes all but the first `length` positions of every row; 0: all positions. length is at most
 * that of the longest row. Call it after a forward that failed, as layers before the error have
 * appended already. */
TSH_API tsh_result tsh_cache_truncate(tsh_cache *cache, int64_t length);

/* -- policies: plans for families of models --------------------------------- */

/* Sets a named integer of a module, such as its number of heads, or changes its value. */
TSH_API tsh_result tsh_set_argument(tsh_module *module, const char *name, int64_t value);
/* Returns the global value of an argument set by tsh_set_argument; 0 and an error if the module has
 * none of that name. */
TSH_API int64_t tsh_argument(const tsh_module *module, const char *name);
/* Returns this rank's part of an argument after tsh_parallelize_policy; the global value if no
 * policy has divided it. */
TSH_API int64_t tsh_local_argument(const tsh_module *module, const char *name);

/* Names the head counts of one attention layer, as paths of arguments (tsh_set_argument) below a
 * block: "attn.num_heads" is the argument num_heads of module attn. */
typedef struct tsh_policy_heads {
    const char *heads;    /* argument that counts the query heads */
    const char *kv_heads; /* argument that counts the key and value heads, a divisor of heads;
                           * NULL: equal to it */
    const char *hidden;   /* argument that counts the features of all query heads, divided as
                           * these are; NULL: none */
} tsh_policy_heads;
/* How a policy shards one layer; the counterpart of parallelformers' Layer. */
typedef struct tsh_policy_layer {
    const char *weight, *bias; /* paths of a layer's parameters below a block:
                                * "attn.c_fc.weight"; Python's layer[0] is layer.0. bias NULL:
                                * the layer need not have one */
    int n_fused;               /* how many weights are fused in one: 3 in [Q|K|V]; 0 means 1 */
    tsh_style replace;         /* style of the layer; 0: that of the list in which this entry
                                * stands */
    int reversed;              /* 1: the weight is stored (in, out); an error if the module's weight
                                * is not */
    int ignore_checker;        /* 1: a block may lack the layer; 0: that is an error */
    const tsh_policy_heads *heads; /* heads that stay whole when the layer is sharded; NULL:
                                    * features are split anywhere */
    int kv;                        /* 1, if heads is given: the layer makes keys, values, or both,
                                    * but no queries */
} tsh_policy_layer;
/* Which layers of a block are sharded, and how; the counterpart of parallelformers' Policy. Each
 * list ends with an entry of zeros; NULL: an empty list. */
typedef struct tsh_policy {
    const char *name;
    const char *blocks;               /* pattern of the paths of blocks, as in tsh_plan_rule */
    const tsh_policy_layer *attn_qkv; /* layers that make queries, keys and values:
                                       * column-parallel */
    const tsh_policy_layer *attn_out; /* output layer of attention: row-parallel, bias replicated */
    const tsh_policy_layer *mlp_in;   /* first layers of the MLP: column-parallel */
    const tsh_policy_layer *mlp_out;  /* last layer of the MLP: row-parallel */
    /* Paths of further arguments below a block, such as a number of features, of which each rank
     * gets its part by torch.chunk's rule. Ends with NULL; NULL: none. */
    const char *const *arguments;
    const struct tsh_policy *next; /* policy of other blocks of the same model family, such as
                                    * decoders; NULL: none */
} tsh_policy;
/* Returns the policy of a model family, for modules named as in Hugging Face transformers: gpt2,
 * gpt_neo, gptj, gpt_neox, opt, bloom, llama, mistral, qwen2, phi, bert, roberta, distil_bert,
 * electra, albert, bart, t5, vit, clip, deit, resnet. NULL for another name. */
TSH_API const tsh_policy *tsh_policy_find(const char *name);
/* Shards every block below root by a policy; layers that it does not name stay as they are.
 * Features are sharded by whole heads, evenly or not; if several query heads share a key head, by
 * such groups of heads. If query heads share key heads and there are fewer key heads than ranks, K
 * and V stay whole on every rank and their gradients are partial (one all-reduce each); K and V
 * must then be layers of their own. Errors, after which nothing is changed: no path matches
 * .blocks; a block lacks a named layer or argument, or all layers of a list; heads or hidden sizes
 * that do not fit. Collectives: one all-reduce in forward per row-parallel layer, one in backward
 * per input of column-parallel layers. */
TSH_API tsh_result tsh_parallelize_policy(tsh_module *root, const tsh_policy *policy);
