/* ========================================================================== */
/* >>policy                                          MARK: - policy (private) */
/* Sharding plans for families of models, such as GPT-2 and Llama.            */
/* Made from the names of parameters and the numbers of attention heads.      */
/* Needs: >>parallel.                                                         */
/* ========================================================================== */

/* A policy lists the layers of a block by the names of their parameters. tsh_parallelize_policy
 * makes three passes over the blocks: the first counts the rules of the plan, the second writes
 * them, and the third, after tsh_parallelize has applied the plan, divides the modules' arguments
 * (such as numbers of heads) by ranks. To add a family, write its lists with the TSHI_POLICY_
 * macros and a row in tshi_policy_shipped. */

/* -- arguments of modules, such as numbers of heads ------------------------- */

/* Returns the module's argument with this name; NULL if it has none. */
static tshi_argument *tshi_policy_named(const tsh_module *module, const char *name) {
    tshi_argument *argument = module->arguments; /* a linked list */
    while (argument && strcmp(argument->name, name) != 0) argument = argument->next;
    return argument;
}

TSH_API TSHI_COLD tsh_result tsh_set_argument(tsh_module *module, const char *name, int64_t value) {
    tshi_argument *argument;
    if (!module) return TSH_ERR_ARGUMENT;
    if (module->ctx->error.code != TSH_OK) return module->ctx->error.code;
    if (!name || !*name || strchr(name, '.') || value < 0)
        return tsh_fail(
            module->ctx, TSH_ERR_ARGUMENT,
            "tsh_set_argument: \"%s\" cannot have \"%.64s\" = %lld: a name is not empty "
            "and holds no dot, a count is not negative",
            module->path, name ? name : "", (long long)value);
    argument = tshi_policy_named(module, name);
    if (!argument) { /* a new argument: prepended to the list */
        argument = (tshi_argument *)tshi_mem_arena_alloc(module->ctx, &module->ctx->books,
                                                         sizeof *argument);
        if (argument) argument->name = tshi_module_text(module->ctx, name, "");
        if (!argument || !argument->name) return module->ctx->error.code;
        argument->next = module->arguments;
        module->arguments = argument;
    }
    /* local, this rank's part, is the whole value until a policy divides it by ranks */
    argument->value = argument->local = value;
    return TSH_OK;
}

/* Returns the module's argument with this name. If it has none, returns NULL and sets an error that
 * begins with `op`; if module is NULL, returns NULL without an error. */
static const tshi_argument *tshi_policy_get(const tsh_module *module, const char *name,
                                            const char *op) {
    const tshi_argument *argument = module && name ? tshi_policy_named(module, name) : NULL;
    if (module && !argument)
        (void)tsh_fail(module->ctx, TSH_ERR_ARGUMENT, "%s: \"%s\" has no argument \"%.64s\"", op,
                       module->path, name ? name : "");
    return argument;
}

TSH_API int64_t tsh_argument(const tsh_module *module, const char *name) {
    const tshi_argument *argument = tshi_policy_get(module, name, "tsh_argument");
    return argument ? argument->value : 0;
}

TSH_API int64_t tsh_local_argument(const tsh_module *module, const char *name) {
    const tshi_argument *argument = tshi_policy_get(module, name, "tsh_local_argument");
    return argument ? argument->local : 0;
}

/* -- the policies that the library has, by families of models --------------- */

/* The lists .attn_qkv and .attn_out of a tsh_policy. Entries after the last layer are zeros, which
 * end a list. */
typedef struct tshi_attention_lists {
    /* names of the arguments with the numbers of heads: [0] of self-attention, [1] of
     * cross-attention */
    tsh_policy_heads heads[2];
    /* qkv: column-parallel layers (queries, keys, values); out: row-parallel output layers */
    tsh_policy_layer qkv[7], out[3];
} tshi_attention_lists;
/* The lists .mlp_in and .mlp_out of a tsh_policy, which end with an entry of zeros. */
typedef struct tshi_mlp_lists {
    tsh_policy_layer in[4], out[2]; /* in: column-parallel layers; out: row-parallel layers */
} tshi_mlp_lists;

/* Macros that write the tables. f: the name of the table. names: WB for a layer with weight and
 * bias, W for a layer whose bias is optional. maybe: 1 for a layer that a block may lack. heads:
 * the tsh_policy_heads by whose numbers of heads the layer is sharded; NULL: sharded at any
 * feature. kv: 1 for a layer that computes keys or values. SPLIT: an attention with separate layers
 * for queries, keys and values, whose paths begin with `at`; CROSS: the same, and once more the
 * same layers for cross-attention, whose paths begin with `cross`. */
#define TSHI_POLICY_WB(path) path ".weight", path ".bias"
#define TSHI_POLICY_W(path)  path ".weight", NULL
#define TSHI_POLICY_LAYER(names, path, maybe, heads, kv)                                           \
    { TSHI_POLICY_##names(path), 0, TSH_PLAIN, 0, maybe, heads, kv }
#define TSHI_POLICY_QKV(names, at, q, k, v, maybe, heads)                                          \
    TSHI_POLICY_LAYER(names, at q, maybe, heads, 0),                                               \
        TSHI_POLICY_LAYER(names, at k, maybe, heads, 1),                                           \
        TSHI_POLICY_LAYER(names, at v, maybe, heads, 1)
#define TSHI_POLICY_SPLIT(f, at, count, kv_count, names, q, k, v, out_names, o)                    \
    static const tshi_attention_lists tshi_policy_##f = {                                          \
        {{at count, kv_count, NULL}},                                                              \
        {TSHI_POLICY_QKV(names, at, q, k, v, 0, &tshi_policy_##f.heads[0])},                       \
        {TSHI_POLICY_LAYER(out_names, at o, 0, &tshi_policy_##f.heads[0], 0)}}
#define TSHI_POLICY_CROSS(f, at, cross, maybe, count, names, q, k, v, o)                           \
    static const tshi_attention_lists tshi_policy_##f = {                                          \
        {{at count, NULL, NULL}, {cross count, NULL, NULL}},                                       \
        {TSHI_POLICY_QKV(names, at, q, k, v, 0, &tshi_policy_##f.heads[0]),                        \
         TSHI_POLICY_QKV(names, cross, q, k, v, maybe, &tshi_policy_##f.heads[1])},                \
        {TSHI_POLICY_LAYER(names, at o, 0, &tshi_policy_##f.heads[0], 0),                          \
         TSHI_POLICY_LAYER(names, cross o, maybe, &tshi_policy_##f.heads[1], 0)}}
#define TSHI_POLICY_MLP(f, names, in, out)                                                         \
    static const tshi_mlp_lists tshi_policy_##f##_mlp = {                                          \
        {TSHI_POLICY_LAYER(names, in, 0, NULL, 0)}, {TSHI_POLICY_LAYER(names, out, 0, NULL, 0)}}

/* In Hugging Face transformers, GPT-2's layers are Conv1D, whose weights are (in, out): .reversed
 * is 1. Layers of cross-attention are optional: only some decoders have them. */
static const tshi_attention_lists tshi_policy_gpt2 = {
    {{"attn.num_heads", NULL, NULL}, {"crossattention.num_heads", NULL, NULL}},
    {{TSHI_POLICY_WB("attn.c_attn"), 3, TSH_PLAIN, 1, 0, &tshi_policy_gpt2.heads[0], 0},
     {TSHI_POLICY_WB("crossattention.c_attn"), 2, TSH_PLAIN, 1, 1, &tshi_policy_gpt2.heads[1], 1},
     {TSHI_POLICY_WB("crossattention.q_attn"), 0, TSH_PLAIN, 1, 1, &tshi_policy_gpt2.heads[1], 0}},
    {{TSHI_POLICY_WB("attn.c_proj"), 0, TSH_PLAIN, 1, 0, &tshi_policy_gpt2.heads[0], 0},
     {TSHI_POLICY_WB("crossattention.c_proj"), 0, TSH_PLAIN, 1, 1, &tshi_policy_gpt2.heads[1], 0}}};
static const tshi_mlp_lists tshi_policy_gpt2_mlp = {
    {{TSHI_POLICY_WB("mlp.c_fc"), 0, TSH_PLAIN, 1, 0, NULL, 0}},
    {{TSHI_POLICY_WB("mlp.c_proj"), 0, TSH_PLAIN, 1, 0, NULL, 0}}};

/* GPT-NeoX and BLOOM: query_key_value holds, head by head, the D features each of q, k and v. So it
 * is one segment, sharded in units of a head, which has 3 D features. */
static const tshi_attention_lists tshi_policy_gpt_neox = {
    {{"attention.num_attention_heads", NULL, NULL}},
    {TSHI_POLICY_LAYER(WB, "attention.query_key_value", 0, &tshi_policy_gpt_neox.heads[0], 0)},
    {TSHI_POLICY_LAYER(WB, "attention.dense", 0, &tshi_policy_gpt_neox.heads[0], 0)}};
static const tshi_attention_lists tshi_policy_bloom = {
    {{"self_attention.num_heads", NULL, NULL}},
    {TSHI_POLICY_LAYER(WB, "self_attention.query_key_value", 0, &tshi_policy_bloom.heads[0], 0)},
    {TSHI_POLICY_LAYER(WB, "self_attention.dense", 0, &tshi_policy_bloom.heads[0], 0)}};

TSHI_POLICY_SPLIT(gpt_neo, "attn.attention.", "num_heads", NULL,
                  W, "q_proj", "k_proj", "v_proj", WB, "out_proj");
TSHI_POLICY_SPLIT(gptj, "attn.", "num_attention_heads", NULL,
                  W, "q_proj", "k_proj", "v_proj", W, "out_proj");
TSHI_POLICY_SPLIT(llama, "self_attn.", "num_heads", "self_attn.num_key_value_heads",
                  W, "q_proj", "k_proj", "v_proj", W, "o_proj");
TSHI_POLICY_SPLIT(qwen2, "self_attn.", "num_heads", "self_attn.num_key_value_heads",
                  WB, "q_proj", "k_proj", "v_proj", W, "o_proj");
TSHI_POLICY_SPLIT(phi, "self_attn.", "num_heads", "self_attn.num_key_value_heads",
                  WB, "q_proj", "k_proj", "v_proj", WB, "dense");
TSHI_POLICY_SPLIT(opt, "self_attn.", "num_heads", NULL,
                  WB, "q_proj", "k_proj", "v_proj", WB, "out_proj");
TSHI_POLICY_SPLIT(vit, "attention.", "attention.num_attention_heads", NULL,
                  WB, "attention.query", "attention.key", "attention.value", WB, "output.dense");
TSHI_POLICY_SPLIT(distil_bert, "attention.", "n_heads", NULL,
                  WB, "q_lin", "k_lin", "v_lin", WB, "out_lin");
TSHI_POLICY_SPLIT(albert, "attention.", "num_attention_heads", NULL,
                  WB, "query", "key", "value", WB, "dense");
TSHI_POLICY_SPLIT(t5, "layer.0.SelfAttention.", "n_heads", NULL, W, "q", "k", "v", W, "o");
TSHI_POLICY_CROSS(t5_decoder, "layer.0.SelfAttention.", "layer.1.EncDecAttention.", 0, "n_heads",
                  W, "q", "k", "v", "o");
TSHI_POLICY_CROSS(bart_decoder, "self_attn.", "encoder_attn.", 0, "num_heads",
                  WB, "q_proj", "k_proj", "v_proj", "out_proj");
TSHI_POLICY_CROSS(bert, "attention.", "crossattention.", 1, "self.num_attention_heads",
                  WB, "self.query", "self.key", "self.value", "output.dense");

TSHI_POLICY_MLP(gpt_neo, WB, "mlp.c_fc", "mlp.c_proj");
TSHI_POLICY_MLP(gptj, WB, "mlp.fc_in", "mlp.fc_out");
TSHI_POLICY_MLP(bloom, WB, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h");
TSHI_POLICY_MLP(opt, WB, "fc1", "fc2");
TSHI_POLICY_MLP(clip, WB, "mlp.fc1", "mlp.fc2");
TSHI_POLICY_MLP(bert, WB, "intermediate.dense", "output.dense");
TSHI_POLICY_MLP(distil_bert, WB, "ffn.lin1", "ffn.lin2");
TSHI_POLICY_MLP(albert, WB, "ffn", "ffn_output");
static const tshi_mlp_lists tshi_policy_llama_mlp = {
    {TSHI_POLICY_LAYER(W, "mlp.gate_proj", 0, NULL, 0),
     TSHI_POLICY_LAYER(W, "mlp.up_proj", 0, NULL, 0)},
    {TSHI_POLICY_LAYER(W, "mlp.down_proj", 0, NULL, 0)}};

/* T5: an MLP has one input layer, wi, or, if it is gated, two: wi_0 and wi_1. */
#define TSHI_POLICY_T5_MLP(f, at)                                                                  \
    static const tshi_mlp_lists tshi_policy_##f##_mlp = {                                          \
        {TSHI_POLICY_LAYER(W, at "wi", 1, NULL, 0), TSHI_POLICY_LAYER(W, at "wi_0", 1, NULL, 0),   \
         TSHI_POLICY_LAYER(W, at "wi_1", 1, NULL, 0)},                                             \
        {TSHI_POLICY_LAYER(W, at "wo", 0, NULL, 0)}}
TSHI_POLICY_T5_MLP(t5, "layer.1.DenseReluDense.");
TSHI_POLICY_T5_MLP(t5_decoder, "layer.2.DenseReluDense.");

/* torchvision's ResNets: between conv1, which is column-parallel, and conv2, which is row-parallel,
 * the batch norm has shards of its channels. The stem, shortcuts and a third convolution are
 * replicated. */
static const tshi_mlp_lists tshi_policy_resnet_mlp = {
    {TSHI_POLICY_LAYER(W, "conv1", 0, NULL, 0),
     {TSHI_POLICY_WB("bn1"), 0, TSH_COLWISE, 0, 1, NULL, 0}},
    {TSHI_POLICY_LAYER(W, "conv2", 0, NULL, 0)}};

#define TSHI_POLICY_FAMILY(name, blocks, attention, mlp, next)                                     \
    { name, blocks, tshi_policy_##attention.qkv, tshi_policy_##attention.out,                      \
      tshi_policy_##mlp##_mlp.in, tshi_policy_##mlp##_mlp.out, NULL, next }
/* The policies of decoders that follow an encoder: .next of the encoder's policy points to them. */
static const tsh_policy tshi_policy_decoders[] = {
    TSHI_POLICY_FAMILY("bart", "**.decoder.layers.*", bart_decoder, opt, NULL),
    TSHI_POLICY_FAMILY("t5", "**.decoder.block.*", t5_decoder, t5_decoder, NULL),
};
/* The policies that tsh_policy_find looks up by name. */
static const tsh_policy tshi_policy_shipped[] = {
    TSHI_POLICY_FAMILY("gpt2", "**.h.*", gpt2, gpt2, NULL),
    TSHI_POLICY_FAMILY("gpt_neo", "**.h.*", gpt_neo, gpt_neo, NULL),
    TSHI_POLICY_FAMILY("gptj", "**.h.*", gptj, gptj, NULL),
    TSHI_POLICY_FAMILY("gpt_neox", "**.layers.*", gpt_neox, bloom, NULL),
    TSHI_POLICY_FAMILY("opt", "**.layers.*", opt, opt, NULL),
    TSHI_POLICY_FAMILY("bloom", "**.h.*", bloom, bloom, NULL),
    TSHI_POLICY_FAMILY("llama", "**.layers.*", llama, llama, NULL),
    TSHI_POLICY_FAMILY("mistral", "**.layers.*", llama, llama, NULL),
    TSHI_POLICY_FAMILY("qwen2", "**.layers.*", qwen2, llama, NULL),
    TSHI_POLICY_FAMILY("phi", "**.layers.*", phi, clip, NULL),
    TSHI_POLICY_FAMILY("bert", "**.layer.*", bert, bert, NULL),
    TSHI_POLICY_FAMILY("roberta", "**.layer.*", bert, bert, NULL),
    TSHI_POLICY_FAMILY("distil_bert", "**.layer.*", distil_bert, distil_bert, NULL),
    TSHI_POLICY_FAMILY("electra", "**.layer.*", bert, bert, NULL),
    TSHI_POLICY_FAMILY("albert", "**.albert_layers.*", albert, albert, NULL),
    TSHI_POLICY_FAMILY("bart", "**.encoder.layers.*", opt, opt, &tshi_policy_decoders[0]),
    TSHI_POLICY_FAMILY("t5", "**.encoder.block.*", t5, t5, &tshi_policy_decoders[1]),
    TSHI_POLICY_FAMILY("vit", "**.layer.*", vit, bert, NULL),
    TSHI_POLICY_FAMILY("clip", "**.layers.*", opt, clip, NULL),
    TSHI_POLICY_FAMILY("deit", "**.layer.*", vit, bert, NULL),
    {"resnet", "**.layer?.*", NULL, NULL, tshi_policy_resnet_mlp.in, tshi_policy_resnet_mlp.out,
     NULL, NULL},
};

#undef TSHI_POLICY_WB
#undef TSHI_POLICY_W
#undef TSHI_POLICY_LAYER
#undef TSHI_POLICY_QKV
#undef TSHI_POLICY_SPLIT
#undef TSHI_POLICY_CROSS
#undef TSHI_POLICY_MLP
#undef TSHI_POLICY_T5_MLP
#undef TSHI_POLICY_FAMILY

TSH_API TSHI_COLD const tsh_policy *tsh_policy_find(const char *name) {
    for (size_t i = 0; name && i < sizeof tshi_policy_shipped / sizeof *tshi_policy_shipped; i++)
        if (strcmp(tshi_policy_shipped[i].name, name) == 0) return &tshi_policy_shipped[i];
    return NULL;
}

/* -- the rule for one layer of one block ------------------------------------ */

/* One pass over the blocks of a model: the first (rules NULL) counts rules, the second writes them,
 * the third (divide 1), after the plan was applied, divides the arguments. */
typedef struct tshi_policy_pass {
    /* root: the module below which the policy is applied; block: the current block */
    tsh_module *root, *block;
    const tsh_policy *policy;                  /* the policy that the block belongs to */
    tsh_plan_rule *rules;                      /* the plan; NULL in the first pass */
    tsh_segment (*segments)[TSH_MAX_SEGMENTS]; /* segments[i]: .cut of rule i points there */
    int count;                                 /* number of rules so far */
    int divide;                                /* 1: this is the third pass */
} tshi_policy_pass;

/* Sets an error that begins with the policy and the current block; format and what follows are as
 * for printf. Returns 0. */
TSH_PRINTF(3, 4)
static int tshi_policy_fail(const tshi_policy_pass *pass, tsh_result code, const char *format,
                            ...) {
    char text[TSH_MESSAGE_SIZE] = "";
    va_list list;
    va_start(list, format);
    tsh_text_format(text, sizeof text, format, list);
    va_end(list);
    (void)tsh_fail(pass->root->ctx, code, "tsh_parallelize_policy: %s: block \"%s\" %s",
                   pass->policy->name ? pass->policy->name : "", pass->block->path, text);
    return 0;
}

/* Returns 1 if the entry is all zeros, which ends a list. */
static int tshi_policy_is_end(const tsh_policy_layer *layer) {
    return !layer->weight && !layer->bias && !layer->n_fused && layer->replace == TSH_PLAIN &&
           !layer->reversed && !layer->ignore_checker && !layer->heads && !layer->kv;
}

/* Returns the argument that `path` names below the current block ("attn.num_heads": argument
 * num_heads of module attn). NULL and an error if there is none or it is 0. */
static tshi_argument *tshi_policy_count(const tshi_policy_pass *pass, const char *path) {
    const char *dot = strrchr(path, '.'), *name = dot ? dot + 1 : path;
    tsh_module *module = tshi_module_at(pass->block, path, dot ? (size_t)(dot - path) : 0);
    tshi_argument *argument = module ? tshi_policy_named(module, name) : NULL;
    if (argument && argument->value > 0) return argument;
    (void)tshi_policy_fail(
        pass, TSH_ERR_ARGUMENT,
        "has no argument \"%s\" above 0: tsh_set_argument(module, \"%s\", count)", path, name);
    return NULL;
}

/* The numbers of heads of one attention. Query heads that share a key head stay on one rank, except
 * if `whole` is 1. */
typedef struct tshi_policy_counts {
    int64_t heads, kv; /* number of query heads; number of key heads, and of value heads */
    int64_t group;     /* unit of sharding: query heads per key head; 1 if `whole` */
    int64_t hidden;    /* number of features of all query heads; 0: unknown */
    /* 1: keys and values stay R: there are fewer key heads than ranks and than query heads */
    int whole;
} tshi_policy_counts;

/* Fills in *c, the numbers of heads, from the block's arguments that `at` names. Returns 0 and sets
 * an error if one is missing or they do not fit together. */
static int tshi_policy_read_counts(const tshi_policy_pass *pass, const tsh_policy_heads *at,
                                   tshi_policy_counts *c) {
    const tshi_argument *heads = at->heads ? tshi_policy_count(pass, at->heads) : NULL, *kv,
                        *hidden;
    if (!heads && !at->heads)
        return tshi_policy_fail(pass, TSH_ERR_ARGUMENT, "is to be cut by heads that have no name");
    kv = heads && at->kv_heads ? tshi_policy_count(pass, at->kv_heads) : heads;
    hidden = kv && at->hidden ? tshi_policy_count(pass, at->hidden) : kv;
    if (!hidden) return 0;
    c->heads = heads->value;
    c->kv = kv->value;
    c->hidden = at->hidden ? hidden->value : 0;
    if (c->heads % c->kv || c->hidden % c->heads)
        return tshi_policy_fail(pass, TSH_ERR_SHAPE,
                                "has %lld heads (\"%s\"), which must be a multiple of %lld key and "
                                "value heads and divide %lld hidden features",
                                (long long)c->heads, at->heads, (long long)c->kv,
                                (long long)c->hidden);
    /* 1 if query heads share key heads, of which there are fewer than ranks */
    c->whole = c->kv < c->heads && c->kv < pass->root->ctx->tp.size;
    c->group = c->whole ? 1 : c->heads / c->kv;
    return 1;
}

/* Sets .local of an attention's arguments (heads, kv_heads, hidden) to what this rank holds.
 * Returns 0 and sets an error if they do not fit together. */
static int tshi_policy_divide(const tshi_policy_pass *pass, const tsh_policy_heads *at) {
    const tsh_ctx *ctx = pass->root->ctx;
    tshi_policy_counts c; /* numbers of heads over all ranks */
    tsh_layout cut;       /* how the query heads are sharded */
    int64_t owned;        /* number of this rank's query heads */
    if (!tshi_policy_read_counts(pass, at, &c)) return 0;
    cut = tsh_shard_units(0, c.group);
    owned = tshi_layout_own(&cut, c.heads, &ctx->deal, ctx->tp.rank, NULL);
    tshi_policy_count(pass, at->heads)->local = owned;
    if (at->kv_heads)
        tshi_policy_count(pass, at->kv_heads)->local = c.whole ? c.kv : owned / c.group;
    if (at->hidden) tshi_policy_count(pass, at->hidden)->local = owned * (c.hidden / c.heads);
    return 1;
}

/* Sets the lengths and units, in features, of the *n segments of a layer that is sharded by heads.
 * features: size of the sharded dimension. row: 1 for a row-parallel layer. Sets *n to 0 if the
 * layer stays replicated. Returns 0 and sets an error if the heads do not fit. */
static int tshi_policy_segments(const tshi_policy_pass *pass, const tsh_policy_layer *layer,
                                const char *path, int64_t features, int row, tsh_segment *segment,
                                int *n) {
    tshi_policy_counts c;
    int64_t total = 0, head; /* total: heads of all segments; head: features of one head */
    int s, grouped = *n == 3 && !layer->kv; /* grouped 1: the layer is a fused [Q|K|V] */
    if (!tshi_policy_read_counts(pass, layer->heads, &c)) return 0;
    for (s = 0; s < *n; s++) {
        int queries = !layer->kv && (s == 0 || !grouped); /* 1: segment s holds query heads */
        segment[s].length = queries ? c.heads : c.kv;     /* in heads; below, in features */
        segment[s].unit = queries ? c.group : 1;
        total += segment[s].length;
    }
    head = features / total;
    if (features % total)
        return tshi_policy_fail(
            pass, TSH_ERR_SHAPE,
            "cuts \"%s\" by heads, but its %lld features do not divide into %lld heads (\"%s\")",
            path, (long long)features, (long long)total, layer->heads->heads);
    if (row ? c.hidden && c.hidden != features : c.hidden && head * c.heads % c.hidden)
        return tshi_policy_fail(
            pass, TSH_ERR_SHAPE,
            "has %lld hidden features (\"%s\"), but \"%s\" has %lld for %lld heads",
            (long long)c.hidden, layer->heads->hidden, path, (long long)features, (long long)total);
    if (c.whole && grouped)
        return tshi_policy_fail(
            pass, TSH_ERR_LAYOUT,
            "fuses %lld query heads with %lld key and value heads in \"%s\", but there are %d "
            "ranks: make it three layers, of queries, keys and values; those of keys and values "
            "stay whole",
            (long long)c.heads, (long long)c.kv, path, pass->root->ctx->tp.size);
    for (s = 0; s < *n; s++) {
        segment[s].length *= head; /* convert heads to features */
        segment[s].unit *= head;
    }
    if (c.whole && layer->kv) *n = 0; /* keys and values stay replicated */
    return 1;
}

/* Returns the module in the block that has the layer's weight and bias. NULL if there is none, with
 * an error unless the layer is optional. */
static tsh_module *tshi_policy_find_layer(const tshi_policy_pass *pass,
                                          const tsh_policy_layer *layer) {
    tsh_module *owner[2] = {NULL, NULL}; /* the modules that have the weight and the bias */
    const char *const name[2] = {layer->weight, layer->bias};
    char similar[TSH_MESSAGE_SIZE / 2] = "";
    if (!name[0] && !name[1])
        (void)tshi_policy_fail(pass, TSH_ERR_ARGUMENT,
                               "has a layer whose weight and bias are both empty");
    for (int i = 0; i < 2; i++) {
        if (!name[i] || tshi_module_lookup(pass->block, name[i], &owner[i]) ||
            layer->ignore_checker)
            continue;
        tshi_module_suggest(pass->block, name[i], similar, sizeof similar);
        (void)tshi_policy_fail(pass, TSH_ERR_ARGUMENT, "has no parameter \"%.64s\"; %s", name[i],
                               similar);
        return NULL;
    }
    if (owner[0] && owner[1] && owner[0] != owner[1])
        (void)tshi_policy_fail(pass, TSH_ERR_ARGUMENT,
                               "has \"%s\" and \"%s\" in different layers: give each its own entry",
                               name[0], name[1]);
    return owner[0] ? owner[0] : owner[1]; /* the layer may lack its weight or its bias */
}

/* Appends to the plan the rule for m, the module that `layer` names. style: used if layer->replace
 * is 0. Returns 0 and sets an error if the model does not fit the policy. */
static int tshi_policy_rule(tshi_policy_pass *pass, const tsh_policy_layer *layer, tsh_module *m,
                            tsh_style style) {
    tsh_plan_rule *rule = &pass->rules[pass->count]; /* the rule to write */
    const char *path = layer->weight ? layer->weight : layer->bias;
    /* layouts[0].dim: the weight's sharded dimension */
    tsh_layout layouts[TSHI_MODULE_PARAMS];
    int n = layer->n_fused ? layer->n_fused : 1; /* segments of the fused weight; 1: not fused */
    memset(layouts, 0, sizeof layouts);          /* remain zero if the style shards nothing */
    if (!m->reversed != !layer->reversed)        /* the policy would shard the wrong dimension */
        return tshi_policy_fail(pass, TSH_ERR_ARGUMENT,
                                "stores \"%s\" %s, but the policy says %s: see "
                                "tsh_linear_desc.reversed",
                                path, m->reversed ? "reversed" : "(out, in)",
                                m->reversed ? "(out, in)" : "reversed");
    if (n < 1 || n > TSH_MAX_SEGMENTS)
        return tshi_policy_fail(pass, TSH_ERR_ARGUMENT,
                                "fuses %d parts in \"%s\"; a layer has at most %d", n, path,
                                TSH_MAX_SEGMENTS);
    *rule = tshi_parallel_rule(layer->replace == TSH_PLAIN ? style : layer->replace);
    rule->path = tshi_module_below(pass->root, m->path);
    rule->segments = n;
    if (layer->heads && (rule->style == TSH_COLWISE || rule->style == TSH_ROWWISE) &&
        m->kind->layouts && m->param[0]) {
        m->kind->layouts(m, rule, layouts); /* layouts[0] is that of the weight */
        if (!tshi_policy_segments(pass, layer, path, m->param[0]->dim[layouts[0].dim],
                                  rule->style == TSH_ROWWISE, pass->segments[pass->count], &n))
            return 0;
        rule->cut = (const tsh_segment *)pass->segments[pass->count];
        if (n == 0) rule->style = TSH_PLAIN; /* replicated, even if it was sharded before */
    } else if (layer->heads) {
        return tshi_policy_fail(pass, TSH_ERR_ARGUMENT,
                                "is to cut \"%s\" by heads, but under its style nothing is cut",
                                path);
    }
    pass->count++;
    return 1;
}

/* -- the three passes over all blocks and their layers ---------------------- */

/* Runs the pass over one list of the policy, for the current block. list: its name, for errors;
 * style: that of layers whose .replace is 0. Returns 0 and sets an error if the block does not fit
 * the list. */
static int tshi_policy_layers(tshi_policy_pass *pass, const tsh_policy_layer *layer,
                              const char *list, tsh_style style) {
    int found = !layer || !pass->rules; /* 1: the block has a layer of the list, or needs none */
    for (; layer && !tshi_policy_is_end(layer); layer++) {
        tsh_module *m = pass->rules ? tshi_policy_find_layer(pass, layer) : NULL;
        if (pass->root->ctx->error.code != TSH_OK) return 0;
        if (!pass->rules) pass->count++; /* first pass: counts all layers, even missing ones */
        if (!m) continue;
        found = 1;
        if (!pass->divide && !tshi_policy_rule(pass, layer, m, style)) return 0;
        if (pass->divide && layer->heads && !tshi_policy_divide(pass, layer->heads)) return 0;
    }
    return found || tshi_policy_fail(pass, TSH_ERR_ARGUMENT, "has no layer of the list %s", list);
}

/* Checks that the current block has all arguments that policy->arguments lists, such as numbers of
 * features; in the third pass also divides them by ranks. Returns 0 and sets an error if one is
 * missing. */
static int tshi_policy_arguments(const tshi_policy_pass *pass) {
    const tsh_ctx *ctx = pass->root->ctx;
    const char *const *path = pass->policy->arguments; /* paths of arguments, ended by NULL */
    tsh_layout cut = tsh_sharded(0);                   /* sharded like features */
    tshi_argument *argument;
    for (; path && *path; path++) {
        if (!(argument = tshi_policy_count(pass, *path))) return 0;
        if (pass->divide)
            argument->local = tshi_layout_own(&cut, argument->value, &ctx->deal, ctx->tp.rank,
                                              NULL);
    }
    return 1;
}

/* Runs one pass over all blocks. Returns the number of blocks, or -1 and an error if one does not
 * fit. */
static int tshi_policy_blocks(tshi_policy_pass *pass, const tsh_policy *family) {
    const tsh_policy *p;
    int blocks = 0;                  /* number of blocks that the policy applies to */
    for (p = family; p; p = p->next) /* p: the policy of encoders, then that of decoders */
        for (tsh_module *m = pass->root; m; m = tshi_module_next(pass->root, m)) {
            const char *path = tshi_module_below(pass->root, m->path);
            if (!p->blocks || !tshi_glob_match(p->blocks, path)) continue;
            blocks++;
            pass->policy = p;
            pass->block = m; /* read by the functions called below */
            if (!tshi_policy_layers(pass, p->attn_qkv, "attn_qkv", TSH_COLWISE) ||
                !tshi_policy_layers(pass, p->attn_out, "attn_out", TSH_ROWWISE) ||
                !tshi_policy_layers(pass, p->mlp_in, "mlp_in", TSH_COLWISE) ||
                !tshi_policy_layers(pass, p->mlp_out, "mlp_out", TSH_ROWWISE) ||
                (pass->rules && !tshi_policy_arguments(pass)))
                return -1;
        }
    return blocks;
}

TSH_API TSHI_COLD tsh_result tsh_parallelize_policy(tsh_module *root, const tsh_policy *policy) {
    tshi_policy_pass pass; /* state that the three passes share */
    tshi_block *block;
    size_t rule = sizeof *pass.rules, cut = sizeof *pass.segments, capacity;
    char similar[TSH_MESSAGE_SIZE / 2] = "";
    tsh_ctx *ctx = root ? root->ctx : NULL;
    if (!ctx) return TSH_ERR_ARGUMENT;
    if (ctx->error.code != TSH_OK) return ctx->error.code;
    if (!policy) {
        for (size_t i = 0; i < sizeof tshi_policy_shipped / sizeof *tshi_policy_shipped; i++)
            tsh_text_add(similar, sizeof similar, " %s", tshi_policy_shipped[i].name);
        return tsh_fail(ctx, TSH_ERR_ARGUMENT,
                        "tsh_parallelize_policy: there is no policy (NULL is what tsh_policy_find "
                        "returns for an unknown name); those it knows are%s",
                        similar);
    }
    memset(&pass, 0, sizeof pass); /* first pass: rules is NULL */
    pass.root = root;
    if (tshi_policy_blocks(&pass, policy) == 0) { /* first pass: counts the rules */
        const char *blocks = policy->blocks ? policy->blocks : "";
        tshi_module_suggest(root, blocks, similar, sizeof similar);
        return tsh_fail(ctx, TSH_ERR_ARGUMENT,
                        "tsh_parallelize_policy: %s: \"%.64s\" matches no block below \"%s\"; %s",
                        policy->name ? policy->name : "", blocks, root->path, similar);
    }
    capacity = (size_t)pass.count; /* max number of rules */
    block = tshi_mem_alloc(ctx, TSH_MEM_STEP, capacity * (rule + cut) + 1);
    if (!block) return ctx->error.code;
    pass.rules = (tsh_plan_rule *)tshi_mem_data(block); /* `block` holds rules, then segments */
    pass.segments = (tsh_segment(*)[TSH_MAX_SEGMENTS])(void *)(pass.rules + capacity);
    pass.count = 0;                              /* counts the rules as they are written */
    if (tshi_policy_blocks(&pass, policy) > 0 && /* second pass: writes the rules */
        tsh_parallelize(root, pass.rules, pass.count) == TSH_OK) {
        pass.divide = 1; /* third pass: divides the arguments */
        (void)tshi_policy_blocks(&pass, policy);
    }
    tshi_mem_release(ctx, block);
    return ctx->error.code;
}
