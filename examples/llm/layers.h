/* layers.h - what the models of this folder are made of: attention with a cache, MLPs, norms,
 * embedding and head, each sharded over the ranks as part of its description. Include tshard.h and
 * folder.h first.
 *
 * Shapes: B texts, T tokens, C width, H heads, K key and value heads, G = H / K, D head size. */
#ifndef LLM_LAYERS_H
#define LLM_LAYERS_H

struct llm_net;

/* What a header of models/ has. */
typedef struct llm_family {
    const char *type, *base;         /* model_type; what names of tensors begin with */
    void (*config)(llm_config *c);   /* reads the keys of config.json */
    void (*add)(struct llm_net *m); /* makes the tree of modules */
    tsh_tensor *(*forward)(struct llm_net *m, tsh_tensor *ids); /* ids (B, T) -> (B, T, V) */
} llm_family;

/* How a file stores the weights of queries, keys and values. */
typedef enum llm_fused {
    LLM_SEPARATE,  /* three layers */
    LLM_FUSED_ROWS,   /* one, [Q|K|V] */
    LLM_FUSED_HEADS /* one; for each key head its G queries, its key, its value */
} llm_fused;

typedef struct llm_attention_desc {
    llm_fused fused;
    const char *q, *k, *v, *o; /* names of the layers; q is the fused one */
    int reversed;              /* weights are stored (in, out) */
    int head_norm;             /* q_norm and k_norm of each head, before the rotation */
    int whole_norm;            /* of all heads at once */
    int no_rope;
} llm_attention_desc;

typedef struct llm_attention {
    struct llm_net *model;
    llm_attention_desc desc;
    int whole_kv;               /* K and V on every rank: fewer heads than ranks */
    tsh_tensor *keys, *values; /* of all tokens so far, (B, K, length, D) */
} llm_attention;

typedef struct llm_mlp_desc {
    const char *gate, *in, *out; /* names of the layers; gate NULL: there is none */
    int fused;                   /* in is [gate|in] */
    int reversed;
} llm_mlp_desc;

typedef struct llm_mlp {
    struct llm_net *model;
    llm_mlp_desc desc;
} llm_mlp;

/* A model on one rank. */
typedef struct llm_net {
    tsh_ctx *ctx;
    llm_config *config;
    const llm_family *family;
    tsh_module *root, *base; /* of the head, of all else: the same, as names have no prefix here */
    int64_t rows, length;    /* texts in the caches; room for so many tokens of each */
    int64_t past[LLM_MOST_ROWS]; /* tokens of each in the caches */
    const int64_t *lengths;  /* of this forward's tokens, those of each text; NULL: all */
    tsh_tensor *positions;   /* those of this forward's tokens, or NULL */
    int64_t unit;            /* features that a row-parallel cut keeps together: 32 if quantised */
    int all;                 /* 1: logits of every token, 0: of the last one */
    tsh_tensor *slopes, *bias; /* ALiBi: (1, H, 1, 1), and its mask of this forward, or NULL */
    llm_attention attention[LLM_MOST_LAYERS];
    llm_mlp mlp[LLM_MOST_LAYERS];
    int attentions, mlps;
} llm_net;

/* The output of a module's child. */
static tsh_tensor *llm_call(tsh_module *module, const char *child, tsh_tensor *x) {
    return tsh_forward(tsh_find(module, child), x);
}

/* x factor; factor 0: x. */
static tsh_tensor *llm_scale(tsh_tensor *x, double factor) {
    return factor == 0 || factor == 1 ? x : tsh_scale(x, factor);
}

/* -- norms ------------------------------------------------------------------ */

static tsh_tensor *llm_rms_one(tsh_module *self, tsh_tensor **in, int n, void *user) {
    const llm_config *c = (const llm_config *)user;
    (void)n;
    return tsh_rms_norm(in[0], tsh_add_scalar(tsh_param(self, "weight"), 1), c->eps);
}

/* An RMS norm over a last dimension that may be sharded, as the weight then is. */
static tsh_tensor *llm_rms_sharded(tsh_module *self, tsh_tensor **in, int n, void *user) {
    const llm_config *c = (const llm_config *)user;
    tsh_tensor *square = tsh_full(tsh_mean(tsh_mul(in[0], in[0]), -1, 1)); /* (1, T, 1) */
    (void)n;
    square = tsh_pow_scalar(tsh_add_scalar(square, c->eps), -0.5);
    return tsh_mul(tsh_mul(in[0], square), tsh_param(self, "weight"));
}

static void llm_add_norm(llm_net *m, tsh_module *parent, const char *name, int64_t dim) {
    const llm_config *c = m->config;
    const double eps = c->eps > 0 ? c->eps : TSH_ZERO;
    const tsh_layer_norm_desc layer = {.dim = dim, .eps = eps};
    const tsh_rms_norm_desc rms = {.dim = dim, .eps = eps};
    const tsh_module_desc one = {.forward = llm_rms_one, .user = m->config};
    if (c->norm == LLM_LAYER) {
        tsh_add_layer_norm(parent, name, &layer);
    } else if (c->norm == LLM_RMS) {
        tsh_add_rms_norm(parent, name, &rms);
    } else {
        tsh_add_param(tsh_add_module(parent, name, &one), "weight", tsh_shape1(dim), NULL);
    }
}

static void llm_add_sharded_norm(llm_net *m, tsh_module *parent, const char *name, int64_t dim,
                                 const tsh_layout *layout) {
    const tsh_module_desc norm = {.forward = llm_rms_sharded, .user = m->config};
    const tsh_param_desc weight = {.layout = layout};
    tsh_add_param(tsh_add_module(parent, name, &norm), "weight", tsh_shape1(dim), &weight);
}

/* -- attention -------------------------------------------------------------- */

/* (B, T, n D) -> (B, n, T, D) */
static tsh_tensor *llm_heads(tsh_tensor *x, int64_t heads) {
    const tsh_shape shape = tsh_shape4(tsh_dim(x, 0), tsh_dim(x, 1), heads, tsh_dim(x, -1) / heads);
    return tsh_transpose(tsh_reshape(x, shape), 1, 2);
}

/* Queries, keys and values of x (B, T, C), as (B, H or K, T, D), from the layers. */
static void llm_project(llm_attention *a, tsh_module *self, tsh_tensor *x, tsh_tensor *qkv[3]) {
    const llm_config *c = a->model->config;
    const llm_attention_desc *d = &a->desc;
    const int64_t size = c->head_size, kv = c->kv_heads, groups = c->heads / kv;
    const int64_t features[3] = {c->heads * size, kv * size, kv * size};
    tsh_tensor *y = llm_call(self, d->q, x);
    int64_t at = 0;
    if (d->fused == LLM_FUSED_HEADS) {
        const tsh_shape shape = {5, {tsh_dim(x, 0), tsh_dim(x, 1), kv, groups + 2, size, 0}};
        y = tsh_reshape(y, shape);
        for (int i = 0; i < 3; i++) {
            const int64_t n = i == 0 ? groups : 1;
            qkv[i] = tsh_reshape(tsh_slice(y, 3, i == 0 ? 0 : groups + i - 1, n),
                                 tsh_shape4(tsh_dim(x, 0), tsh_dim(x, 1), kv * n, size));
            qkv[i] = tsh_transpose(qkv[i], 1, 2);
        }
        return;
    }
    for (int i = 0; i < 3; at += features[i++]) {
        if (d->fused == LLM_FUSED_ROWS) qkv[i] = tsh_slice(y, -1, at, features[i]);
        else qkv[i] = i == 0 ? y : llm_call(self, i == 1 ? d->k : d->v, x);
        if (d->whole_norm && i < 2) qkv[i] = llm_call(self, i == 0 ? "q_norm" : "k_norm", qkv[i]);
        qkv[i] = llm_heads(qkv[i], i == 0 ? c->heads : kv);
    }
    /* K and V are whole here, and so is Q if it is fused with them: each rank takes its heads. */
    if (d->fused == LLM_FUSED_ROWS && a->whole_kv)
        qkv[0] = tsh_redistribute(qkv[0], tsh_sharded(1));
}

static tsh_tensor *llm_attend(tsh_module *self, tsh_tensor **in, int n, void *user) {
    llm_attention *a = (llm_attention *)user;
    llm_net *m = a->model;
    const llm_config *c = m->config;
    const tsh_rope_desc rope = {.dims = c->rope.dims, .start = m->past[0], .freqs = c->rope.freqs,
                                .factor = c->rope.factor};
    tsh_tensor *qkv[3] = {NULL, NULL, NULL};
    (void)n;
    llm_project(a, self, in[0], qkv);
    for (int i = 0; i < 2 && a->desc.head_norm; i++)
        qkv[i] = llm_call(self, i == 0 ? "q_norm" : "k_norm", qkv[i]);
    for (int i = 0; i < 2 && c->rope.on && !a->desc.no_rope; i++)
        qkv[i] = tsh_rope(qkv[i], &rope);
    if (!tsh_ok(m->ctx)) return NULL;
    if (!a->keys && !c->encoder) {
        const tsh_shape shape = tsh_shape4(m->rows, c->kv_heads, m->length, c->head_size);
        const tsh_layout layout = tsh_layout_of(qkv[1]);
        a->keys = tsh_tensor_new(m->ctx, tsh_dtype_of(qkv[1]), shape, &layout);
        a->values = tsh_tensor_new(m->ctx, tsh_dtype_of(qkv[1]), shape, &layout);
    }
    const tsh_attention_desc desc = {.causal = !c->encoder, .scale = c->scale, .mask = m->bias,
                                     .cache_k = a->keys, .cache_v = a->values, .past = m->past[0]};
    tsh_tensor *y = tsh_transpose(tsh_attention(qkv[0], qkv[1], qkv[2], &desc), 1, 2);
    y = tsh_reshape(y, tsh_shape3(tsh_dim(y, 0), tsh_dim(y, 1), c->heads * c->head_size));
    return llm_call(self, a->desc.o, y);
}

/* Of a name "self.query" the part after the last dot is left, and the module before it returned. */
static tsh_module *llm_within(tsh_module *parent, const char **name) {
    const char *dot;
    while ((dot = strchr(*name, '.')) != NULL) {
        const size_t n = (size_t)(dot - *name);
        tsh_module *child = NULL;
        char part[64];
        snprintf(part, sizeof part, "%.*s", (int)n, *name);
        for (int i = 0; (child = tsh_child(parent, i)) != NULL; i++) {
            const char *last = strrchr(tsh_module_path(child), '.');
            if (strcmp(last ? last + 1 : tsh_module_path(child), part) == 0) break;
        }
        parent = child ? child : tsh_add_module(parent, part, NULL);
        *name = dot + 1;
    }
    return parent;
}

/* A column-parallel layer, or with unit 0 a whole one. */
static void llm_add_columns(llm_net *m, tsh_module *parent, const char *name, int64_t out,
                            int bias, int64_t unit, int reversed, int segments) {
    const tsh_linear_desc desc = {.in = m->config->width, .out = out, .no_bias = !bias,
                                  .style = unit ? TSH_COLWISE : TSH_PLAIN,
                                  .segments = unit ? segments : 0, .unit = unit,
                                  .reversed = reversed};
    parent = llm_within(parent, &name);
    tsh_add_linear(parent, name, &desc);
}

/* The row-parallel layer after it, cut alike. */
static void llm_add_rows(llm_net *m, tsh_module *parent, const char *name, int64_t in, int bias,
                         int64_t unit, int reversed) {
    const tsh_linear_desc desc = {.in = in, .out = m->config->width, .no_bias = !bias,
                                  .style = TSH_ROWWISE, .unit = unit, .reversed = reversed};
    parent = llm_within(parent, &name);
    tsh_add_linear(parent, name, &desc);
}

/* Heads are cut by whole groups. With fewer key heads than ranks, K and V are whole on every rank
 * and queries are cut anywhere. */
static void llm_add_qkv(llm_net *m, tsh_module *self, llm_attention *a) {
    const llm_config *c = m->config;
    const llm_attention_desc *d = &a->desc;
    const int64_t size = c->head_size, kv = c->kv_heads, groups = c->heads / kv;
    const int64_t unit = a->whole_kv ? size : groups * size, whole = a->whole_kv ? 0 : size;
    const tsh_segment cut[TSH_MAX_SEGMENTS] = {
        {c->heads * size, unit}, {kv * size, size}, {kv * size, size}, {0, 0}};
    const tsh_plan_rule rule = {.path = d->q, .style = TSH_COLWISE, .segments = 3, .cut = cut};
    if (d->fused == LLM_SEPARATE) {
        llm_add_columns(m, self, d->q, c->heads * size, c->qkv_bias, unit, d->reversed, 1);
        llm_add_columns(m, self, d->k, kv * size, c->qkv_bias, whole, d->reversed, 1);
        llm_add_columns(m, self, d->v, kv * size, c->qkv_bias, whole, d->reversed, 1);
        return;
    }
    const int64_t all = (c->heads + 2 * kv) * size;
    const int64_t by_head = d->fused == LLM_FUSED_HEADS ? (groups + 2) * size : 0;
    llm_add_columns(m, self, d->q, all, c->qkv_bias, by_head, d->reversed, 1);
    if (d->fused == LLM_FUSED_ROWS && !a->whole_kv) tsh_parallelize(self, &rule, 1);
}

static void llm_add_attention(llm_net *m, tsh_module *parent, const char *name,
                              const llm_attention_desc *desc) {
    llm_attention *a = &m->attention[m->attentions++];
    const llm_config *c = m->config;
    const tsh_module_desc as_attention = {.forward = llm_attend, .user = a};
    const int64_t size = c->head_size, groups = c->heads / c->kv_heads;
    tsh_module *self = tsh_add_module(parent, name, &as_attention);
    a->model = m;
    a->desc = *desc;
    a->whole_kv = groups > 1 && desc->fused != LLM_FUSED_HEADS &&
                  c->kv_heads < tsh_tp(m->ctx)->size;
    llm_add_qkv(m, self, a);
    const int64_t unit = a->whole_kv ? size : groups * size;
    llm_add_rows(m, self, desc->o, c->heads * size, c->out_bias, unit, desc->reversed);
    if (desc->head_norm) llm_add_norm(m, self, "q_norm", size);
    if (desc->head_norm) llm_add_norm(m, self, "k_norm", size);
    if (desc->whole_norm) {
        const tsh_layout q = tsh_shard_units(0, unit), whole = tsh_replicated();
        const tsh_layout k = a->whole_kv ? whole : tsh_shard_units(0, size);
        llm_add_sharded_norm(m, self, "q_norm", c->heads * size, &q);
        llm_add_sharded_norm(m, self, "k_norm", c->kv_heads * size, &k);
    }
}

/* -- MLP -------------------------------------------------------------------- */

static tsh_tensor *llm_feed(tsh_module *self, tsh_tensor **in, int n, void *user) {
    const llm_mlp *mlp = (const llm_mlp *)user;
    const llm_mlp_desc *d = &mlp->desc;
    const llm_activation act = mlp->model->config->act;
    tsh_tensor *half[2] = {NULL, NULL}, *y = llm_call(self, d->in, in[0]);
    (void)n;
    if (d->fused) {
        tsh_split_dim(y, -1, 2, half);
        y = tsh_mul(act(half[0]), half[1]);
    } else {
        y = d->gate ? tsh_mul(act(llm_call(self, d->gate, in[0])), y) : act(y);
    }
    return llm_call(self, d->out, y);
}

/* out(act(in(x))), or out(act(gate(x)) in(x)). With name NULL the layers are parent's own, and its
 * forward calls them. */
static void llm_add_mlp(llm_net *m, tsh_module *parent, const char *name,
                        const llm_mlp_desc *desc) {
    llm_mlp *mlp = &m->mlp[m->mlps++];
    const llm_config *c = m->config;
    const tsh_module_desc as_mlp = {.forward = llm_feed, .user = mlp};
    const int64_t unit = c->hidden % m->unit == 0 ? m->unit : 1;
    tsh_module *self = name ? tsh_add_module(parent, name, &as_mlp) : parent;
    mlp->model = m;
    mlp->desc = *desc;
    if (desc->gate)
        llm_add_columns(m, self, desc->gate, c->hidden, c->mlp_bias, unit, desc->reversed, 1);
    llm_add_columns(m, self, desc->in, (desc->fused ? 2 : 1) * c->hidden, c->mlp_bias, unit,
                    desc->reversed, desc->fused ? 2 : 1);
    llm_add_rows(m, self, desc->out, c->hidden, c->mlp_bias, unit, desc->reversed);
}

/* -- embedding, blocks, head ------------------------------------------------ */

static void llm_add_embedding(llm_net *m, tsh_module *parent, const char *name) {
    const tsh_embedding_desc desc = {.count = m->config->vocabulary, .dim = m->config->width,
                                     .style = TSH_ROWWISE};
    tsh_add_embedding(parent, name, &desc);
}

/* Learned positions, the first `skip` of which no token has. */
static void llm_add_places(llm_net *m, tsh_module *parent, const char *name, int64_t skip) {
    const tsh_embedding_desc desc = {.count = m->config->places + skip, .dim = m->config->width};
    tsh_add_embedding(parent, name, &desc);
}

/* The positions of ids (B, T), as ids of llm_add_places. llm_logits frees them. */
static tsh_tensor *llm_places(llm_net *m, tsh_tensor *ids, int64_t skip) {
    const int64_t rows = tsh_dim(ids, 0), n = tsh_dim(ids, 1);
    int32_t *at = (int32_t *)malloc((size_t)(rows * n) * sizeof *at);
    for (int64_t i = 0; i < rows * n && at; i++)
        at[i] = (int32_t)(m->past[i / n] + skip + i % n);
    if (at) m->positions = tsh_tensor_from(m->ctx, TSH_I32, tsh_shape2(rows, n), NULL, at);
    else (void)tsh_fail(m->ctx, TSH_ERR_MEMORY, "not enough memory");
    free(at);
    return m->positions;
}

/* How many tokens a text has, at most, with those of this forward, ids (B, T). */
static int64_t llm_keys(const llm_net *m, tsh_tensor *ids) {
    int64_t most = 0;
    for (int64_t b = 0; b < m->rows; b++) {
        const int64_t n = m->past[b] + (m->lengths ? m->lengths[b] : tsh_dim(ids, 1));
        if (n > most) most = n;
    }
    return most;
}

/* A container of blocks, whose forward is `block`; add gives each its layers. */
static void llm_add_blocks(llm_net *m, tsh_module *parent, const char *name,
                           tsh_forward_fn block,
                           void (*add)(llm_net *m, tsh_module *self, int64_t index)) {
    const tsh_module_desc desc = {.forward = block, .user = m};
    tsh_module *blocks = tsh_add_module(parent, name, NULL);
    for (int64_t i = 0; i < m->config->layers; i++) {
        char number[24];
        snprintf(number, sizeof number, "%d", (int)i);
        tsh_module *self = tsh_add_module(blocks, number, &desc);
        tsh_checkpoint(self, 1); /* frees a block's activations before the next */
        add(m, self, i);
    }
}

/* Logits, over the vocabulary; with `embedding`'s weight if they are tied. */
static void llm_add_head(llm_net *m, const char *name, int bias, const char *embedding) {
    const llm_config *c = m->config;
    const tsh_linear_desc desc = {.in = c->width, .out = c->vocabulary, .no_bias = !bias,
                                  .style = TSH_COLWISE};
    tsh_module *head = tsh_add_linear(m->root, name, &desc);
    if (c->tied) tsh_tie(head, "weight", tsh_param(tsh_find(m->base, embedding), "weight"));
}

/* Of x (B, T, C) what the head is to read: all, or the last token. */
static tsh_tensor *llm_last(const llm_net *m, tsh_tensor *x) {
    const int64_t count = tsh_dim(x, 1);
    return m->all || count < 2 ? x : tsh_slice(x, 1, count - 1, 1);
}

/* ALiBi's slopes (Press et al. 2022): powers of 2^(-8 / n) for the largest power of two n up to the
 * heads, then every other one of those of 2 n. */
static void llm_add_slopes(llm_net *m) {
    float slope[LLM_MOST_HEADS];
    const int64_t heads = m->config->heads;
    int64_t n = 1;
    while (2 * n <= heads) n *= 2;
    for (int64_t i = 0; i < heads; i++)
        slope[i] = (float)(i < n ? pow(2, -8.0 * (double)(i + 1) / (double)n)
                                 : pow(2, -4.0 * (double)(2 * (i - n) + 1) / (double)n));
    m->slopes = tsh_tensor_from(m->ctx, TSH_F32, tsh_shape4(1, heads, 1, 1), NULL, slope);
}

/* Its mask for keys at all positions so far: slope times position, which differs from slope times
 * distance by what the softmax does not see. */
static tsh_tensor *llm_alibi(const llm_net *m, int64_t keys) {
    tsh_tensor *place = tsh_arange(m->ctx, TSH_REAL, 0, (double)keys, 1);
    return tsh_mul(m->slopes, tsh_reshape(place, tsh_shape4(1, 1, 1, keys)));
}

#endif
