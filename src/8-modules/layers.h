/* ========================================================================== */
/* >>layers                                          MARK: - layers (private) */
/* Layers of transformers, sharded by their constructors: attention and MLP.  */
/* The cache of keys and values for generating with attention layers.         */
/* Needs: >>tensor-make >>op-rope >>op-attention >>nn.                        */
/* ========================================================================== */

/* These layers are modules whose children are linear layers: plans, files and tsh_quantize treat
 * the children like any other linear layer. module->user points to the struct of the layer. */

/* Adds a linear layer from `in` to `out` features, with the other options of `like`, and shards it
 * by style: TSH_PLAIN (replicated), TSH_COLWISE or TSH_ROWWISE. The sharded dimension consists of
 * `segments` segments, such as Q, K and V; cut[i] has the length of segment i and its unit, the
 * number of elements that sharding keeps together. Returns NULL after an error. */
static tsh_module *tshi_layers_linear(tsh_module *parent, const char *name,
                                      const tsh_linear_desc *like, int64_t in, int64_t out,
                                      tsh_style style, const tsh_segment *cut, int segments) {
    tsh_linear_desc desc = *like;
    tsh_plan_rule rule = tshi_parallel_rule(style);
    tsh_module *module;
    desc.in = in;
    desc.out = out;
    rule.segments = segments;
    rule.cut = cut;
    module = tsh_add_linear(parent, name, &desc);
    return module && tsh_parallelize(module, &rule, 1) == TSH_OK ? module : NULL;
}

/* Ends the constructor of a layer with children: returns the module or, after an error, removes it
 * and its children and returns NULL. */
static tsh_module *tshi_layers_finish(tsh_module *module) {
    while (module->ctx->error.code != TSH_OK && module->first)
        (void)tshi_module_finish(module->first);
    return tshi_module_finish(module);
}

/* -- the attention layer: tsh_add_attention --------------------------------- */

typedef struct tshi_attention_layer {
    /* the user's options; kv_heads and head_dim have their defaults if the user gave 0 */
    tsh_attention_layer_desc desc;
    tsh_rope_desc rope; /* copy of the options to which desc.rope points; unused if that is NULL */
    /* children: the linear layers of q, k and v, or a fused one; the norms of q and k; the output
     * layer. NULL: the layer has no such child */
    tsh_module *qkv[3], *fused, *norm[2], *out;
    tsh_module *sinks;         /* child that holds the parameter "sinks"; NULL: none */
    tsh_cache *cache;          /* the cache attached to the layer; NULL: none */
    tsh_tensor *keys, *values; /* cached keys and values: (batch, kv_heads, length, head_dim) */
    tsh_tensor *held;          /* int64, (batch): number of cached positions of each sequence */
} tshi_attention_layer;

struct tsh_cache {
    tsh_cache *next;    /* the next cache in the list ctx->caches; NULL: this is the last */
    tsh_module *module; /* the attention layers below it use the cache; NULL: freed, to be reused */
    /* batch: number of sequences; length: how many positions of a sequence fit into the cache;
     * longest: how many positions of the longest sequence are in the cache */
    int64_t batch, length, longest;
    /* int64, (batch): how many positions of each sequence a forward gets, those after them being
     * padding; NULL: no padding */
    tsh_tensor *counts;
};

/* Returns an array of `batch` entries: how many positions of each sequence the layer's cache
 * holds. */
static int64_t *tshi_layers_held(const tshi_attention_layer *a) {
    return (int64_t *)tshi_tensor_at(a->held);
}

/* Returns an array of `batch` entries: how many positions of each sequence a forward gets, those
 * after them being padding. NULL: there is no padding. */
static const int64_t *tshi_layers_counted(const tsh_cache *cache) {
    return cache->counts ? (const int64_t *)tshi_tensor_at(cache->counts) : NULL;
}

/* Splits y (B, T, features), the output of the fused layer, into q, k and v, each (B, T, heads D).
 * The features are [Q|K|V] or, with by_group, for each key head its query heads, key and value. */
static void tshi_layers_split(const tshi_attention_layer *a, tsh_tensor *y, tsh_tensor **qkv) {
    const tsh_attention_layer_desc *desc = &a->desc;
    const int64_t kv = desc->kv_heads, group = desc->heads / kv, d = desc->head_dim;
    /* How much of dimension 2 of y belongs to one head of every group, where a group is the query
     * heads that share a key head. With by_group, the reshape below makes dimension 2 count the
     * heads of a group; else it counts features. */
    const int64_t unit = desc->by_group ? 1 : kv * d;
    const tsh_shape whole = tsh_shape_of(y);
    int64_t at = 0; /* how many heads of each group were split off so far */
    if (desc->by_group)
        y = tsh_reshape(y, tsh_shape4(whole.dim[0] * whole.dim[1], kv, group + 2, d));
    for (int i = 0; i < 3; i++) {
        const int64_t heads = i ? 1 : group; /* number of heads of q, k or v per group */
        qkv[i] = tsh_slice(y, 2, at * unit, heads * unit);
        if (desc->by_group)
            qkv[i] = tsh_reshape(qkv[i], tsh_shape3(whole.dim[0], whole.dim[1], kv * heads * d));
        at += heads;
    }
}

/* Returns x (B, T, heads D) as (B, heads, T, D), normalised by `norm`, which may be NULL. together
 * 1: the norm is over the features of all heads; 0: over the d features of each head. */
static tsh_tensor *tshi_layers_heads(tsh_tensor *x, int64_t d, tsh_module *norm, int together) {
    if (x && norm && together) x = tsh_forward(norm, x);
    if (!x) return NULL;
    x = tsh_reshape(x, tsh_shape4(x->dim[0], x->dim[1], x->dim[2] / d, d));
    return tsh_transpose(norm && !together ? tsh_forward(norm, x) : x, 1, 2);
}

/* Computes q, k and v, (B, heads, T, D), from x (B, T, dim), with the norms and rotary positions
 * that the layer has. Returns 0 after an error. */
static int tshi_layers_project(const tshi_attention_layer *a, tsh_tensor *x, tsh_tensor **qkv) {
    const tsh_attention_layer_desc *desc = &a->desc;
    tsh_rope_desc rope = a->rope;
    tsh_tensor *y = a->fused ? tsh_forward(a->fused, x) : NULL;
    if (a->cache) rope.starts = tshi_layers_held(a);
    if (y) tshi_layers_split(a, y, qkv);
    for (int i = 0; i < 3; i++) {
        if (!a->fused) qkv[i] = tsh_forward(a->qkv[i], x);
        qkv[i] = tshi_layers_heads(qkv[i], desc->head_dim, i < 2 ? a->norm[i] : NULL,
                                   desc->norm_all_heads);
        if (i < 2 && desc->rope) qkv[i] = tsh_rope(qkv[i], &rope);
    }
    if (!qkv[2] || x->ctx->error.code != TSH_OK) return 0;
    /* q and k are replicated, but the output layer is sharded by heads: keep the query heads of
     * this rank only. */
    if (qkv[0]->layout.kind == TSH_REPLICATED && qkv[1]->layout.kind == TSH_REPLICATED &&
        a->out->param[0]->layout.kind == TSH_SHARDED)
        qkv[0] = tsh_redistribute(qkv[0], tsh_sharded(1));
    return qkv[0] != NULL;
}

/* Checks that the cache has space for x (B, T, dim). Returns 0 and sets an error if not. */
static int tshi_layers_fits(const tshi_attention_layer *a, const tsh_tensor *x) {
    const int64_t *counts = tshi_layers_counted(a->cache), *held = tshi_layers_held(a);
    if (x->dim[0] != a->cache->batch)
        return tshi_error_zero(x->ctx, TSH_ERR_SHAPE,
                               "tsh_forward: x has %lld texts, the cache %lld",
                               (long long)x->dim[0], (long long)a->cache->batch);
    for (int64_t b = 0; b < a->cache->batch; b++) {
        const int64_t n = counts ? counts[b] : x->dim[1];
        if (n > x->dim[1])
            return tshi_error_zero(x->ctx, TSH_ERR_SHAPE,
                                   "tsh_forward: of %lld positions text %lld has %lld "
                                   "(tsh_cache_counts)",
                                   (long long)x->dim[1], (long long)b, (long long)n);
        if (held[b] + n > a->cache->length)
            return tshi_error_zero(x->ctx, TSH_ERR_SHAPE,
                                   "tsh_forward: the cache of %lld positions holds %lld, and %lld "
                                   "more do not fit; make a longer one (tsh_cache_new), or forget "
                                   "some (tsh_cache_truncate)",
                                   (long long)a->cache->length, (long long)held[b], (long long)n);
    }
    return 1;
}

/* Checks that a layer with a cache is not being trained. Returns 0 and sets an error if it is. */
static int tshi_layers_generates(const tshi_attention_layer *a, const tsh_tensor *x) {
    const tsh_module *first = a->fused ? a->fused : a->qkv[0];
    const tshi_tape *tape = &x->ctx->tape;
    /* the forward of a checkpoint sets no_grad, too, although it belongs to training */
    const int trains = tape->no_grad || x->base->requires_grad || first->adapter ||
                       first->param[0]->requires_grad;
    if (tape->evaluating || !trains) return 1;
    return tshi_error_zero(x->ctx, TSH_ERR_STATE,
                           "tsh_forward: training with a cache of %lld positions: it is for "
                           "generating, between tsh_no_grad_begin and tsh_no_grad_end; "
                           "tsh_cache_free it to train",
                           (long long)a->cache->length);
}

/* Fills in the fields of desc that give tsh_attention the layer's cache, if it has one. */
static void tshi_layers_cached(const tshi_attention_layer *a, tsh_attention_desc *desc) {
    desc->cache_k = a->keys;
    desc->cache_v = a->values;
    if (!a->cache) return;
    desc->pasts = tshi_layers_held(a);
    desc->lengths = tshi_layers_counted(a->cache);
}

/* Called after a forward of n positions: adds to the number of cached positions of each sequence
 * those that the forward has appended, n or, with padding, the sequence's count. */
static void tshi_layers_hold(const tshi_attention_layer *a, int64_t n) {
    const int64_t *counts = tshi_layers_counted(a->cache);
    for (int64_t b = 0; b < a->cache->batch; b++) {
        int64_t *const held = tshi_layers_held(a) + b;
        *held += counts ? counts[b] : n;
        if (*held > a->cache->longest) a->cache->longest = *held;
    }
}

/* Forward of an attention layer: in[0] is x (B, T, dim), in[1], if there is one, a mask. Returns
 * (B, T, dim). */
static tsh_tensor *tshi_layers_attend(tsh_module *module, tsh_tensor **in, int n) {
    tshi_attention_layer *a = (tshi_attention_layer *)module->user;
    tsh_attention_desc desc = a->desc.attention;
    tsh_tensor *qkv[3] = {NULL, NULL, NULL}, *x = in[0], *y;
    char text[TSHI_TEXT_SIZE];
    if (n > 2 || !x || x->ndim != 3 || x->dim[2] != a->desc.dim)
        return tshi_error_null(module->ctx, x ? TSH_ERR_SHAPE : TSH_ERR_ARGUMENT,
                               "tsh_forward: takes x (B, T, %lld) and, if any, a mask; there are "
                               "%d inputs, x is %s",
                               (long long)a->desc.dim, n, x ? tshi_tensor_text(x, text) : "NULL");
    if (a->cache && !(tshi_layers_generates(a, x) && tshi_layers_fits(a, x))) return NULL;
    if (!tshi_layers_project(a, x, qkv)) return NULL;
    desc.owner = module;
    if (module->evaluating) desc.dropout = 0;
    if (n > 1) desc.mask = in[1];
    desc.segments = module->segments;
    tshi_layers_cached(a, &desc);
    desc.sinks = a->sinks ? a->sinks->param[0] : NULL; /* read anew: tsh_tie may have replaced it */
    if (a->sinks && qkv[0]->layout.kind == TSH_REPLICATED) desc.sinks = tsh_full_tensor(desc.sinks);
    y = tsh_transpose(tsh_attention(qkv[0], qkv[1], qkv[2], &desc), 1, 2);
    if (!y) return NULL;
    if (a->cache) tshi_layers_hold(a, x->dim[1]);
    y = tsh_reshape(y, tsh_shape3(y->dim[0], y->dim[1], y->dim[2] * y->dim[3]));
    return tsh_forward(a->out, y);
}

static const tshi_kind tshi_layers_attention = {"attention", tshi_layers_attend, 0, NULL};

/* Fills in kv_heads and head_dim where they are 0. Returns 0 and sets an error if the numbers of
 * heads and features do not fit together. */
static int tshi_layers_counts(const tsh_module *module, tsh_attention_layer_desc *desc) {
    const int64_t heads = desc->heads, divided = heads > 0 ? desc->dim / heads : 0;
    const int fits = desc->head_dim || (heads > 0 && desc->dim % heads == 0);
    if (!desc->kv_heads) desc->kv_heads = heads;
    if (!desc->head_dim) desc->head_dim = divided;
    if (heads > 0 && desc->head_dim > INT64_MAX / 4 / heads)
        return tshi_error_zero(module->ctx, TSH_ERR_SHAPE,
                               "tsh_add_attention: \"%s\" has %lld heads of %lld features, which "
                               "is beyond 64 bits",
                               module->path, (long long)heads, (long long)desc->head_dim);
    if (heads > 0 && desc->kv_heads > 0 && heads % desc->kv_heads == 0 && desc->dim > 0 &&
        desc->head_dim > 0 && fits)
        return 1;
    return tshi_error_zero(module->ctx, TSH_ERR_SHAPE,
                           "tsh_add_attention: \"%s\" has %lld heads, %lld key and value heads and "
                           "%lld features; heads must be a multiple of key and value heads, and "
                           "divide the features unless .head_dim is given",
                           module->path, (long long)heads, (long long)desc->kv_heads,
                           (long long)desc->dim);
}

/* Adds the linear layers of an attention layer and, if desc->sinks is 1, the parameter "sinks": an
 * attention score per head that belongs to no key. */
static void tshi_layers_add_linears(tsh_module *module, tshi_attention_layer *a) {
    static const char *const usual[3] = {"q_proj", "k_proj", "v_proj"};
    const tsh_attention_layer_desc *desc = &a->desc;
    const char *const given[3] = {desc->q, desc->k, desc->v};
    const int64_t d = desc->head_dim, kv = desc->kv_heads, group = desc->heads / kv;
    /* 1: k and v stay replicated, as there are fewer key heads than query heads and than ranks */
    const int whole = kv < desc->heads && kv < module->ctx->tp.size;
    /* How the features of q, k and v are sharded. Query heads that share a key head stay on one
     * rank, unless k and v are replicated. */
    tsh_segment cut[3];
    tsh_linear_desc like;
    memset(&like, 0, sizeof like);
    like.reversed = desc->reversed;
    like.weight_init = desc->weight_init;
    like.bias_init = desc->bias_init;
    like.dtype = desc->dtype;
    like.bias = desc->qkv_bias == TSH_YES ? TSH_YES : TSH_NO;
    for (int i = 0; i < 3; i++) {
        cut[i].length = (i ? kv : desc->heads) * d;
        cut[i].unit = (i || whole ? 1 : group) * d;
        if (!desc->fused)
            a->qkv[i] = tshi_layers_linear(module, given[i] ? given[i] : usual[i], &like, desc->dim,
                                           cut[i].length, i && whole ? TSH_PLAIN : TSH_COLWISE,
                                           &cut[i], 1);
    }
    if (desc->fused) {
        const tsh_segment by_group = {(desc->heads + 2 * kv) * d, (group + 2) * d};
        a->fused = tshi_layers_linear(module, desc->fused, &like, desc->dim, by_group.length,
                                      whole ? TSH_PLAIN : TSH_COLWISE,
                                      desc->by_group ? &by_group : cut, desc->by_group ? 1 : 3);
    }
    if (desc->sinks) {
        const tsh_layout layout = tsh_shard_units(0, whole ? 1 : group);
        tsh_param_desc param;
        memset(&param, 0, sizeof param);
        param.layout = &layout;
        (void)tsh_add_param(module, "sinks", tsh_shape1(desc->heads), &param);
        a->sinks = module->last;
    }
    like.bias = desc->out_bias == TSH_YES ? TSH_YES : TSH_NO;
    a->out = tshi_layers_linear(module, desc->out ? desc->out : "o_proj", &like, desc->heads * d,
                                desc->dim, TSH_ROWWISE, cut, 1);
}

/* Adds the norms of q and k. A norm over all heads together is sharded like the linear layer before
 * it. */
static void tshi_layers_add_norms(tsh_module *module, tshi_attention_layer *a) {
    static const char *const names[2] = {"q_norm", "k_norm"};
    const tsh_attention_layer_desc *desc = &a->desc;
    const int64_t d = desc->head_dim, kv = desc->kv_heads;
    /* 1: k stays replicated, as there are fewer key heads than query heads and than ranks */
    const int whole = kv < desc->heads && kv < module->ctx->tp.size;
    tsh_plan_rule rule = tshi_parallel_rule(TSH_COLWISE);
    for (int i = 0; i < 2 && module->ctx->error.code == TSH_OK; i++) {
        tsh_rms_norm_desc norm = *desc->qk_norm;
        norm.dim = desc->norm_all_heads ? (i ? kv : desc->heads) * d : d;
        a->norm[i] = tsh_add_rms_norm(module, names[i], &norm);
        rule.unit = (i || whole ? 1 : desc->heads / kv) * d;
        if (desc->norm_all_heads && (desc->fused ? a->fused : a->qkv[i])->style == TSH_COLWISE)
            (void)tsh_parallelize(a->norm[i], &rule, 1);
    }
}

/* Sets an error if a module above the new attention layer already has a cache: that cache would not
 * hold the keys of the new layer. */
static void tshi_layers_check_caches(const tsh_module *module) {
    for (const tsh_cache *cache = module->ctx->caches; cache; cache = cache->next)
        for (const tsh_module *m = module; m; m = m->parent)
            if (m == cache->module)
                (void)tsh_fail(module->ctx, TSH_ERR_STATE,
                               "tsh_add_attention: the cache of \"%s\" would hold no keys of "
                               "\"%s\"; add the layer before tsh_cache_new",
                               m->path, module->path);
}

TSH_API TSHI_COLD tsh_module *tsh_add_attention(tsh_module *parent, const char *name,
                                                const tsh_attention_layer_desc *desc) {
    tsh_module *module = tshi_nn_add(parent, name, &tshi_layers_attention, desc);
    tsh_ctx *ctx = module ? module->ctx : NULL;
    tshi_attention_layer *a;
    if (!ctx) return NULL;
    tshi_layers_check_caches(module);
    a = (tshi_attention_layer *)tshi_mem_arena_alloc(ctx, &ctx->books, sizeof *a);
    module->user = a;
    if (!a || ctx->error.code != TSH_OK) return tshi_layers_finish(module);
    a->desc = *desc;
    if (desc->rope) a->rope = *desc->rope;
    if (desc->rope) a->desc.rope = &a->rope;
    if (tshi_layers_counts(module, &a->desc)) tshi_layers_add_linears(module, a);
    if (desc->qk_norm) tshi_layers_add_norms(module, a);
    module = tshi_layers_finish(module);
    if (module) tshi_tensor_ref(desc->attention.mask); /* keeps the mask: each forward reads it */
    return module;
}

TSH_API tsh_result tsh_set_segments(tsh_module *module, tsh_tensor *segments) {
    char text[TSHI_TEXT_SIZE];
    if (!module) return TSH_ERR_ARGUMENT;
    if (segments && segments->ctx != module->ctx) {
        (void)tshi_tensor_refuse_ctx(module->ctx, "tsh_set_segments", "segments", segments->ctx);
        return module->ctx->error.code;
    }
    if (segments && !tshi_tensor_check("tsh_set_segments", "segments", &segments, 1))
        return module->ctx->error.code;
    if (segments && (segments->dtype != TSH_I32 || segments->ndim != 2))
        return tsh_fail(module->ctx, TSH_ERR_SHAPE,
                        "tsh_set_segments: segments %s %s; takes i32 of shape (B, T)",
                        tshi_dtype_name(segments->dtype), tshi_tensor_text(segments, text));
    /* Sets the segments of all modules below, since pipelines and checkpoints may ask any of
     * them. */
    for (tsh_module *m = module; m; m = tshi_module_next(module, m)) {
        tshi_tensor_ref(segments);
        tshi_tensor_unref(m->segments);
        m->segments = segments;
    }
    return module->ctx->error.code;
}

/* -- the MLP layer: tsh_add_mlp --------------------------------------------- */

typedef struct tshi_mlp_layer {
    tsh_module *gate, *up, *down; /* gate NULL: not gated; up NULL: gate is the fused [gate|up] */
    tsh_tensor *(*activation)(tsh_tensor *x);
} tshi_mlp_layer;

/* Forward of an MLP with activation f, from x (.., dim) to (.., dim): down(f(up x)) or, if gated,
 * down(f(gate x) up x). */
static tsh_tensor *tshi_layers_mlp(tsh_module *module, tsh_tensor **in, int n) {
    const tshi_mlp_layer *mlp = (const tshi_mlp_layer *)module->user;
    /* part[0], part[1]: the outputs of gate and of up */
    tsh_tensor *x = tshi_nn_input(module, in, n), *part[2] = {NULL, NULL};
    if (!x) return NULL;
    if (!mlp->up) {
        (void)tsh_split(tsh_forward(mlp->gate, x), -1, 2, part);
    } else {
        if (mlp->gate) part[0] = tsh_forward(mlp->gate, x);
        part[1] = tsh_forward(mlp->up, x);
    }
    if (!mlp->gate) return tsh_forward(mlp->down, mlp->activation(part[1]));
    return tsh_forward(mlp->down, tsh_mul(mlp->activation(part[0]), part[1]));
}

TSH_API TSHI_COLD tsh_module *tsh_add_mlp(tsh_module *parent, const char *name,
                                          const tsh_mlp_desc *desc) {
    static tsh_tensor *(*const activations[])(tsh_tensor *) = {tsh_gelu, tsh_gelu_tanh, tsh_relu,
                                                               tsh_silu};
    static const tshi_kind kind = {"mlp", tshi_layers_mlp, 0, NULL};
    tsh_module *module = tshi_nn_add(parent, name, &kind, desc);
    tsh_ctx *ctx = module ? module->ctx : NULL;
    const int fused = ctx && desc->gated && desc->fused;
    tsh_segment cut[2]; /* how the hidden features of gate and of up are sharded */
    tsh_linear_desc like;
    tshi_mlp_layer *mlp;
    if (!ctx) return NULL;
    if ((unsigned)desc->activation > (unsigned)TSH_SILU || (desc->fused && !desc->gated))
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT,
                       "tsh_add_mlp: \"%s\" has activation %d, fused %s: activations are TSH_GELU "
                       "to TSH_SILU, and only gated layers are fused",
                       module->path, (int)desc->activation, desc->fused ? desc->fused : "NULL");
    if (desc->hidden > INT64_MAX / 2) /* [gate|up] has twice as many features */
        (void)tsh_fail(ctx, TSH_ERR_SHAPE, "tsh_add_mlp: \"%s\" has %lld hidden features",
                       module->path, (long long)desc->hidden);
    mlp = (tshi_mlp_layer *)tshi_mem_arena_alloc(ctx, &ctx->books, sizeof *mlp);
    module->user = mlp;
    if (!mlp || ctx->error.code != TSH_OK) return tshi_layers_finish(module);
    mlp->activation = activations[desc->activation];
    cut[0].length = cut[1].length = desc->hidden;
    /* Shards in units of 32 features, the length of a block of quantised weights, if 32 divides the
     * number of hidden features. */
    cut[0].unit = cut[1].unit = desc->hidden % 32 ? 1 : 32;
    memset(&like, 0, sizeof like);
    like.reversed = desc->reversed;
    like.weight_init = desc->weight_init;
    like.bias_init = desc->bias_init;
    like.dtype = desc->dtype;
    like.bias = desc->bias == TSH_YES ? TSH_YES : TSH_NO;
    if (desc->gated)
        mlp->gate = tshi_layers_linear(module,
                                       fused        ? desc->fused
                                       : desc->gate ? desc->gate
                                                    : "gate_proj",
                                       &like, desc->dim, (1 + fused) * desc->hidden, TSH_COLWISE,
                                       cut, 1 + fused);
    if (!fused)
        mlp->up = tshi_layers_linear(module, desc->up ? desc->up : "up_proj", &like, desc->dim,
                                     desc->hidden, TSH_COLWISE, cut, 1);
    mlp->down = tshi_layers_linear(module, desc->down ? desc->down : "down_proj", &like,
                                   desc->hidden, desc->dim, TSH_ROWWISE, cut, 1);
    return tshi_layers_finish(module);
}

/* -- caches of keys and values: tsh_cache_new ------------------------------- */

/* Steps *m to the next attention layer below root, in pre-order (from NULL: to the first), and
 * returns that layer's struct; NULL: there are no more. */
static tshi_attention_layer *tshi_layers_next(tsh_module *root, tsh_module **m) {
    do {
        *m = *m ? tshi_module_next(root, *m) : root;
    } while (*m && (*m)->kind != &tshi_layers_attention);
    return *m ? (tshi_attention_layer *)(*m)->user : NULL;
}

/* Returns the weight that computes the keys (i = 1) or values (i = 2) of a layer. The layer's cache
 * is sharded by the same heads as the outputs of this weight. */
static tsh_tensor *tshi_layers_weight(const tshi_attention_layer *a, int i) {
    return (a->fused ? a->fused : a->qkv[i])->param[0];
}

/* Flags (TSHI_CACHED) the weights that compute keys and values in the layers that use a cache, so
 * that their layout, which the cache shares, cannot change. Does nothing if the cache has been
 * freed. */
static void tshi_layers_mark(const tsh_cache *cache) {
    tsh_module *m = NULL;
    tshi_attention_layer *a;
    while (cache->module && (a = tshi_layers_next(cache->module, &m)) != NULL)
        for (int i = 1; i < 3 && a->cache == cache; i++)
            tshi_layers_weight(a, i)->flags |= TSHI_CACHED;
}

/* Attaches a cache to one attention layer: allocates the layer's keys and values, (batch, kv_heads,
 * length, head_dim). */
static void tshi_layers_attach(tsh_module *module, tshi_attention_layer *a, tsh_cache *cache,
                               int64_t batch, tsh_dtype dtype) {
    const tsh_tensor *w = tshi_layers_weight(a, 1); /* keys are sharded like w's outputs */
    const tsh_layout layout = w->layout.kind == TSH_SHARDED ? tsh_sharded(1) : tsh_replicated();
    const tsh_shape shape = tsh_shape4(batch, a->desc.kv_heads, cache->length, a->desc.head_dim);
    if (a->cache) {
        (void)tsh_fail(module->ctx, TSH_ERR_STATE,
                       "tsh_cache_new: \"%s\" has a cache already; tsh_cache_free it first",
                       module->path);
        return;
    }
    if (w->absent) return; /* another stage of the pipeline has the layer */
    if (tshi_tensor_on_tape(w, tshi_tensor_in_checkpoint)) {
        (void)tsh_fail(module->ctx, TSH_ERR_STATE,
                       "tsh_cache_new: a checkpoint is recorded, and backward will run \"%s\" "
                       "again; end the step first: tsh_step_end",
                       module->path);
        return;
    }
    a->cache = cache;
    a->keys = tsh_tensor_new(module->ctx, dtype, shape, layout);
    a->values = tsh_tensor_new(module->ctx, dtype, shape, layout);
    a->held = tsh_tensor_new(module->ctx, TSH_I64, tsh_shape1(batch), tsh_replicated());
}

/* Returns a tsh_cache that was freed, to be reused, or else a new one; NULL: no memory. */
static tsh_cache *tshi_layers_handle(tsh_ctx *ctx) {
    tsh_cache *cache = ctx->caches;
    while (cache && cache->module) cache = cache->next;
    if (cache) return cache;
    cache = (tsh_cache *)tshi_mem_arena_alloc(ctx, &ctx->books, sizeof *cache);
    if (cache) cache->next = ctx->caches;
    if (cache) ctx->caches = cache;
    return cache;
}

TSH_API TSHI_COLD tsh_cache *tsh_cache_new(tsh_module *module, int64_t batch, int64_t length,
                                           tsh_dtype dtype) {
    tsh_ctx *ctx = module ? module->ctx : NULL;
    tsh_module *m = NULL;
    tshi_attention_layer *a;
    tsh_cache *cache;
    if (!ctx || ctx->error.code != TSH_OK) return NULL;
    if (dtype == TSH_DTYPE_DEFAULT) dtype = ctx->dtype;
    if (batch < 1 || length < 1 || !tshi_dtype_exists(dtype) || !tshi_dtype_computes(dtype))
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT,
                       "tsh_cache_new: %lld texts of %lld positions in dtype %d; takes at least "
                       "one of each, in %s, bf16 or f16",
                       (long long)batch, (long long)length, (int)dtype, tshi_dtype_name(TSH_REAL));
    else if (!tshi_layers_next(module, &m))
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT,
                       "tsh_cache_new: \"%s\" has no attention layer; tsh_add_attention makes one",
                       module->path);
    cache = ctx->error.code == TSH_OK ? tshi_layers_handle(ctx) : NULL;
    if (!cache) return NULL;
    cache->module = module;
    cache->batch = batch;
    cache->length = length;
    cache->longest = 0;
    for (m = NULL; (a = tshi_layers_next(module, &m)) != NULL && ctx->error.code == TSH_OK;)
        tshi_layers_attach(m, a, cache, batch, dtype);
    tshi_layers_mark(cache);
    if (ctx->error.code == TSH_OK) return cache;
    tsh_cache_free(cache);
    return NULL;
}

TSH_API TSHI_COLD void tsh_cache_free(tsh_cache *cache) {
    tsh_module *m = NULL;
    tshi_attention_layer *a;
    if (!cache || !cache->module) return;
    while ((a = tshi_layers_next(cache->module, &m)) != NULL) {
        if (a->cache != cache) continue;
        tsh_tensor_free(a->keys);
        tsh_tensor_free(a->values);
        tsh_tensor_free(a->held);
        a->keys = a->values = a->held = NULL;
        a->cache = NULL;
        for (int i = 1; i < 3; i++) tshi_layers_weight(a, i)->flags &= ~(unsigned)TSHI_CACHED;
    }
    tsh_tensor_free(cache->counts);
    cache->counts = NULL;
    const tsh_cache *other = cache->module->ctx->caches;
    cache->module = NULL;
    /* The loop above has also cleared the flags of weights that are tied to those of layers with
     * another cache: sets them again. */
    for (; other; other = other->next) tshi_layers_mark(other);
}

TSH_API tsh_result tsh_cache_counts(tsh_cache *cache, const int64_t *counts) {
    if (!cache || !cache->module) return TSH_ERR_ARGUMENT;
    for (int64_t b = 0; b < cache->batch && counts; b++)
        if (counts[b] < 0 || counts[b] > cache->length)
            return tsh_fail(cache->module->ctx, TSH_ERR_ARGUMENT,
                            "tsh_cache_counts: text %lld has %lld positions; takes 0 to %lld",
                            (long long)b, (long long)counts[b], (long long)cache->length);
    if (counts && cache->counts) {
        memcpy(tshi_tensor_at(cache->counts), counts, (size_t)cache->batch * sizeof *counts);
        return TSH_OK;
    }
    tsh_tensor_free(cache->counts);
    cache->counts = counts ? tsh_tensor_from(cache->module->ctx, TSH_I64,
                                             tsh_shape1(cache->batch), tsh_replicated(), counts)
                           : NULL;
    return cache->module->ctx->error.code;
}

TSH_API int64_t tsh_cache_length(const tsh_cache *cache) {
    return cache && cache->module ? cache->longest : 0;
}

TSH_API tsh_result tsh_cache_truncate(tsh_cache *cache, int64_t length) {
    const int64_t held = tsh_cache_length(cache);
    tshi_attention_layer *a;
    tsh_module *m = NULL;
    if (!cache || !cache->module) return TSH_ERR_ARGUMENT;
    if (length < 0 || length > held)
        return tsh_fail(cache->module->ctx, TSH_ERR_ARGUMENT,
                        "tsh_cache_truncate: the cache holds %lld positions, of which %lld cannot "
                        "be kept",
                        (long long)held, (long long)length);
    while ((a = tshi_layers_next(cache->module, &m)) != NULL)
        for (int64_t b = 0; b < cache->batch && a->cache == cache; b++)
            tshi_layers_held(a)[b] = tshi_base_min(tshi_layers_held(a)[b], length);
    cache->longest = length;
    return TSH_OK;
}
