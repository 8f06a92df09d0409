/* tsh_add_attention and tsh_add_mlp against the same written with plain ops on whole weights, with
 * gradients, at every degree; a cache of keys and values (tsh_cache_new) against one forward of the
 * whole text; and mistakes. */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"

enum { B = 2, T = 7, DIM = 20, WEIGHTS = 10 };

static const double near_by = 2e-5; /* outputs are below 10, gradients below 100 */

/* A copy of a parameter's whole values that requires a gradient; NULL if there is no such one. */
static tsh_tensor *whole(tsh_ctx *ctx, tsh_module *module, const char *path) {
    tsh_tensor *copy = NULL, *param = tsh_param(module, path);
    if (!param) {
        tsh_clear_error(ctx);
        return NULL;
    }
    tsh_no_grad_begin(ctx);
    copy = tsh_keep(tsh_cast(tsh_full_tensor(param), TSH_REAL));
    tsh_no_grad_end(ctx);
    return tsh_requires_grad(copy, 1);
}

/* The largest distance of two tensors of one shape. */
static double apart(tsh_ctx *ctx, tsh_tensor *a, tsh_tensor *b) {
    double *x = ranks_values(ctx, a), *y = ranks_values(ctx, b), most = 0;
    if (!x || !y || tsh_numel(a) != tsh_numel(b)) most = 1e30;
    for (int64_t e = 0; most < 1e30 && e < tsh_numel(a); e++)
        most = isnan(x[e] - y[e]) ? 1e30 : fmax(most, fabs(x[e] - y[e]));
    free(x);
    free(y);
    return most;
}

/* Weights and their gradients: of a module with shards, and of whole copies. */
typedef struct pairs {
    int count;
    tsh_tensor *param[WEIGHTS], *copy[WEIGHTS];
    const char *path[WEIGHTS];
} pairs;

/* Adds a parameter with values of its own, and returns its whole copy; NULL: there is none. */
static tsh_tensor *paired(tsh_ctx *ctx, pairs *p, tsh_module *module, const char *path) {
    tsh_tensor *param = tsh_param(module, path);
    tsh_init init = {.kind = TSH_INIT_UNIFORM, .a = -0.5, .b = 0.5};
    if (!param) {
        tsh_clear_error(ctx);
        return NULL;
    }
    if (tsh_ndim(param) == 1) tsh_init_uniform(param, &init); /* norms are no ones */
    p->param[p->count] = param;
    p->path[p->count] = path;
    return p->copy[p->count++] = whole(ctx, module, path);
}

static int gradients_agree(tsh_ctx *ctx, const pairs *p) {
    for (int i = 0; i < p->count; i++) {
        const double gap = apart(ctx, tsh_grad(p->param[i]), tsh_grad(p->copy[i]));
        CHECK(gap < 5 * near_by, "the gradient of %s is off by %g", p->path[i], gap);
    }
    return 0;
}

/* ------------------------------------------------------------------- attention */

typedef struct shape_of_layer {
    tsh_attention_layer_desc desc;
    int rope, norm, mask; /* norm: 2: weight + 1; mask: given to forward, says what causal says */
} shape_of_layer;

static const tsh_rope_desc half_rope = {.base = 500, .dims = 2}, full_rope = {.interleaved = 1};
static const tsh_rms_norm_desc norm_of_heads = {.eps = 1e-3};
static const tsh_rms_norm_desc norm_plus_one = {.eps = 1e-3, .plus_one = 1};

static const shape_of_layer layers[] = {
    {.desc = {.heads = 5}},
    {.desc = {.heads = 10, .qkv_bias = TSH_YES, .attention = {.causal = 1}}},
    {.desc = {.heads = 6, .kv_heads = 3, .head_dim = 4, .attention = {.causal = 1}}, .rope = 1},
    {.desc = {.heads = 9,
              .kv_heads = 3,
              .head_dim = 4,
              .out_bias = TSH_YES,
              .attention = {.causal = 1}},
     .rope = 2,
     .norm = 1},
    {.desc = {.heads = 4,
              .kv_heads = 1,
              .head_dim = 6,
              .qkv_bias = TSH_YES,
              .attention = {.scale = 0.3}},
     .norm = 1,
     .mask = 1},
    {.desc = {.heads = 6,
              .kv_heads = 2,
              .head_dim = 4,
              .q = "query",
              .k = "key",
              .v = "value",
              .out = "dense"},
     .rope = 1},
    /* fused: [Q|K|V], as GPT-2's and Phi-3's; by groups of heads, as GPT-NeoX's and Falcon's */
    {.desc = {.heads = 5,
              .fused = "c_attn",
              .out = "c_proj",
              .reversed = 1,
              .qkv_bias = TSH_YES,
              .out_bias = TSH_YES,
              .attention = {.causal = 1}}},
    {.desc = {.heads = 8, .kv_heads = 4, .head_dim = 4, .fused = "qkv_proj"}, .rope = 2},
    {.desc = {.heads = 6, .kv_heads = 2, .head_dim = 4, .fused = "qkv_proj"}, .rope = 1, .norm = 1},
    {.desc = {.heads = 5, .fused = "query_key_value", .by_group = 1, .qkv_bias = TSH_YES},
     .rope = 1},
    {.desc = {.heads = 9,
              .kv_heads = 3,
              .head_dim = 2,
              .fused = "query_key_value",
              .by_group = 1,
              .qkv_bias = TSH_YES,
              .attention = {.causal = 1}},
     .rope = 1},
    /* norms of all heads together, as OLMo 2's; of weight + 1, as Gemma 3's */
    {.desc = {.heads = 5, .norm_all_heads = 1, .qkv_bias = TSH_YES}, .rope = 1, .norm = 1},
    {.desc = {.heads = 6, .kv_heads = 3, .head_dim = 4, .norm_all_heads = 1}, .rope = 2, .norm = 2},
    {.desc = {.heads = 6, .kv_heads = 2, .head_dim = 2, .fused = "qkv_proj", .norm_all_heads = 1},
     .norm = 1},
    {.desc = {.heads = 6,
              .kv_heads = 3,
              .head_dim = 2,
              .fused = "qkv",
              .by_group = 1,
              .norm_all_heads = 1},
     .norm = 1},
    {.desc = {.heads = 6, .kv_heads = 3, .head_dim = 4}, .rope = 1, .norm = 2},
    /* windows, soft caps, sinks */
    {.desc = {.heads = 4,
              .kv_heads = 2,
              .head_dim = 4,
              .attention = {.causal = 1, .window = 3, .soft_cap = 2}},
     .rope = 1},
    {.desc = {.heads = 9, .kv_heads = 3, .head_dim = 2, .sinks = 1, .attention = {.causal = 1}}},
    {.desc = {.heads = 6,
              .kv_heads = 2,
              .head_dim = 4,
              .fused = "qkv_proj",
              .sinks = 1,
              .attention = {.causal = 1, .window = 2, .soft_cap = 1}}},
};

/* Rows (features) `from` on of a whole weight or bias, which may be NULL. */
static tsh_tensor *rows(tsh_tensor *w, int64_t from, int64_t count) {
    return w ? tsh_slice(w, 0, from, count) : NULL;
}

/* Weight or bias i of q, k, v from the fused one. */
static tsh_tensor *unfused(const shape_of_layer *s, tsh_tensor *w, int i) {
    const int64_t heads = s->desc.heads, kv = s->desc.kv_heads ? s->desc.kv_heads : heads;
    const int64_t d = s->desc.head_dim ? s->desc.head_dim : DIM / heads, group = heads / kv;
    tsh_tensor *part[16];
    if (!w) return NULL;
    if (!s->desc.by_group)
        return rows(w, i == 0 ? 0 : (heads + (i - 1) * kv) * d, (i ? kv : heads) * d);
    for (int64_t g = 0; g < kv; g++)
        part[g] = rows(w, (g * (group + 2) + (i ? group + i - 1 : 0)) * d, (i ? 1 : group) * d);
    return tsh_concat(part, (int)kv, 0);
}

/* (B, T, heads D) -> (B, heads, T, D), each head `times` times. */
static tsh_tensor *heads_of(tsh_tensor *x, int64_t heads, int64_t times, const shape_of_layer *s,
                            tsh_tensor *norm) {
    tsh_tensor *part[16];
    if (norm && s->norm == 2) norm = tsh_add_scalar(norm, 1);
    if (norm && s->desc.norm_all_heads) x = tsh_rms_norm(x, norm, norm_of_heads.eps);
    x = tsh_reshape(x, tsh_shape4(B, tsh_size(x, 1), heads, tsh_size(x, 2) / heads));
    if (norm && !s->desc.norm_all_heads) x = tsh_rms_norm(x, norm, norm_of_heads.eps);
    for (int64_t h = 0; h < heads * times; h++) part[h] = tsh_slice(x, 2, h / times, 1);
    return tsh_transpose(tsh_concat(part, (int)(heads * times), 2), 1, 2);
}

/* (T, T): 0, or -1e30 where the key comes after the query, or not within `window` before it. */
static tsh_tensor *causal_mask(tsh_ctx *ctx, int64_t window) {
    tsh_tensor *mask = tsh_zeros(ctx, tsh_shape2(T, T));
    tsh_real *values = (tsh_real *)tsh_data(ctx, mask);
    for (int i = 0; values && i < T * T; i++)
        if (i % T > i / T || (window && i / T - i % T >= window)) values[i] = (tsh_real)-1e30;
    return mask;
}

/* The layer by plain ops: softmax(q k^T scale + mask) v on whole weights. */
static tsh_tensor *composed(tsh_ctx *ctx, const shape_of_layer *s, tsh_tensor *x, pairs *p,
                            tsh_module *layer) {
    static const char *const usual[3] = {"q_proj", "k_proj", "v_proj"};
    const tsh_attention_layer_desc *desc = &s->desc;
    const char *const given[3] = {desc->q, desc->k, desc->v};
    const int64_t heads = desc->heads, kv = desc->kv_heads ? desc->kv_heads : heads;
    tsh_tensor *w[3], *b[3], *y, *qkv[3];
    static char path[WEIGHTS * RANKS_MAX][32];
    char (*text)[32] = path + WEIGHTS * tsh_world(ctx)->rank;
    for (int i = 0; i < 3; i++) {
        const char *name = desc->fused ? desc->fused : given[i] ? given[i] : usual[i];
        if (i && desc->fused) continue;
        (void)snprintf(text[2 * i], sizeof *text, "%s.weight", name);
        (void)snprintf(text[2 * i + 1], sizeof *text, "%s.bias", name);
        w[i] = paired(ctx, p, layer, text[2 * i]);
        b[i] = paired(ctx, p, layer, text[2 * i + 1]);
        if (desc->reversed) w[i] = tsh_transpose(w[i], 0, 1);
    }
    for (int i = 2; i >= 0 && desc->fused; i--) {
        w[i] = unfused(s, w[0], i);
        b[i] = unfused(s, b[0], i);
    }
    for (int i = 0; i < 3; i++) {
        static const char *const norms[2] = {"q_norm.weight", "k_norm.weight"};
        tsh_tensor *norm = i < 2 && s->norm ? paired(ctx, p, layer, norms[i]) : NULL;
        qkv[i] = heads_of(tsh_linear(x, w[i], b[i]), i ? kv : heads, i ? heads / kv : 1, s, norm);
        if (i < 2 && s->rope) qkv[i] = tsh_rope(qkv[i], s->rope == 1 ? &half_rope : &full_rope);
    }
    y = tsh_matmul(qkv[0], tsh_transpose(qkv[1], 2, 3));
    y = tsh_scale(y, desc->attention.scale > 0 ? desc->attention.scale
                                               : 1 / sqrt((double)tsh_size(qkv[0], 3)));
    if (desc->attention.soft_cap > 0)
        y = tsh_scale(tsh_tanh(tsh_scale(y, 1 / desc->attention.soft_cap)),
                      desc->attention.soft_cap);
    if (desc->attention.causal || s->mask)
        y = tsh_add(y, causal_mask(ctx, desc->attention.window));
    if (desc->sinks) {
        tsh_tensor *sinks = paired(ctx, p, layer, "sinks");
        tsh_tensor *both[2] = {y, tsh_add(tsh_zeros(ctx, tsh_shape4(B, heads, T, 1)),
                                          tsh_reshape(sinks, tsh_shape4(1, heads, 1, 1)))};
        y = tsh_slice(tsh_softmax(tsh_concat(both, 2, -1), -1), 3, 0, T);
    } else {
        y = tsh_softmax(y, -1);
    }
    y = tsh_transpose(tsh_matmul(y, qkv[2]), 1, 2);
    y = tsh_reshape(y, tsh_shape3(B, T, tsh_size(y, 2) * tsh_size(y, 3)));
    (void)snprintf(text[6], sizeof *text, "%s.weight", desc->out ? desc->out : "o_proj");
    (void)snprintf(text[7], sizeof *text, "%s.bias", desc->out ? desc->out : "o_proj");
    w[0] = paired(ctx, p, layer, text[6]);
    b[0] = paired(ctx, p, layer, text[7]);
    return tsh_linear(y, desc->reversed ? tsh_transpose(w[0], 0, 1) : w[0], b[0]);
}

static tsh_module *add_layer(tsh_ctx *ctx, const char *name, const shape_of_layer *s) {
    tsh_attention_layer_desc desc = s->desc;
    tsh_rope_desc rope = s->rope == 1 ? half_rope : full_rope; /* copied */
    desc.dim = DIM;
    if (s->rope) desc.rope = &rope;
    if (s->norm) desc.qk_norm = s->norm == 2 ? &norm_plus_one : &norm_of_heads;
    return tsh_add_attention(tsh_root(ctx), name, &desc);
}

/* Forward: one of the output, and one of each norm of all heads that is sharded. */
static uint64_t all_reduces(const shape_of_layer *s, int size) {
    const int64_t kv = s->desc.kv_heads ? s->desc.kv_heads : s->desc.heads;
    const int whole = kv < s->desc.heads && kv < size; /* k and v are, and all that is fused */
    if (size == 1) return 0;
    return !s->desc.norm_all_heads ? 1 : !whole ? 3 : s->desc.fused ? 1 : 2;
}

static int attention_rank(tsh_ctx *ctx, void *user) {
    (void)user;
    for (int c = 0; c < COUNT(layers); c++) {
        const shape_of_layer *s = &layers[c];
        char name[24];
        pairs p = {0};
        tsh_tensor *x, *in[2], *y, *want, *grad;
        uint64_t calls;
        (void)snprintf(name, sizeof name, "layer%d", c);
        tsh_module *layer = add_layer(ctx, name, s);
        CHECK(layer, "case %d", c);
        x = tsh_requires_grad(tsh_keep(tsh_randn(ctx, tsh_shape3(B, T, DIM))), 1);
        want = tsh_retain_grad(composed(ctx, s, x, &p, layer));
        tsh_backward(ctx, ranks_loss(ctx, want));
        CHECK_OK();
        grad = tsh_keep(tsh_grad(x));
        tsh_zero_grad(x);
        in[0] = x;
        in[1] = s->mask ? causal_mask(ctx, 0) : NULL;
        calls = tsh_tp(ctx)->stats.calls[TSH_ALLREDUCE];
        y = tsh_retain_grad(tsh_forward_n(layer, in, s->mask ? 2 : 1));
        calls = tsh_tp(ctx)->stats.calls[TSH_ALLREDUCE] - calls;
        CHECK(calls == all_reduces(s, tsh_tp(ctx)->size), "case %d: %d all-reduces", c, (int)calls);
        CHECK(y && apart(ctx, y, want) < near_by, "case %d is off by %g", c, apart(ctx, y, want));
        tsh_backward(ctx, ranks_loss(ctx, y));
        CHECK_OK();
        CHECK(p.count >= 2 && apart(ctx, tsh_grad(x), grad) < 5 * near_by,
              "case %d: the gradient of x is off by %g", c, apart(ctx, tsh_grad(x), grad));
        if (gradients_agree(ctx, &p)) return 1;
        tsh_step_end(ctx);
    }
    CHECK_TRUE(tsh_check_replicas(tsh_root(ctx)));
    CHECK_OK();
    return 0;
}

static void attention_equals_plain_ops(void **state) {
    (void)state;
    for (int d = 0; d < COUNT(ranks_degrees); d++)
        ranks_run(ranks_degrees[d], attention_rank, NULL);
}

/* How much of q, k and the output's weight each rank has. */
static int shards_rank(tsh_ctx *ctx, void *user) {
    const int size = tsh_tp(ctx)->size, rank = tsh_tp(ctx)->rank;
    const shape_of_layer s = {.desc = {.heads = 9, .kv_heads = 3, .head_dim = 4}};
    tsh_module *layer = add_layer(ctx, "layer", &s);
    const tsh_layout groups = tsh_shard_units(0, 12), heads = tsh_shard_units(0, 4);
    const int64_t q = tsh_shard_range(size > 3 ? heads : groups, 36, size, rank, NULL);
    const int64_t k = size > 3 ? 12 : tsh_shard_range(heads, 12, size, rank, NULL);
    (void)user;
    CHECK_TRUE(layer && tsh_local_size(tsh_param(layer, "q_proj.weight"), 0) == q);
    CHECK_TRUE(tsh_local_size(tsh_param(layer, "k_proj.weight"), 0) == k);
    CHECK_TRUE(tsh_local_size(tsh_param(layer, "v_proj.weight"), 0) == k);
    CHECK_TRUE(tsh_local_size(tsh_param(layer, "o_proj.weight"), 1) == q);
    CHECK_OK();
    return 0;
}

static void weights_are_sharded_by_whole_heads(void **state) {
    (void)state;
    for (int d = 0; d < COUNT(ranks_degrees); d++) ranks_run(ranks_degrees[d], shards_rank, NULL);
}

/* ------------------------------------------------------------------------- MLP */

static const tsh_mlp_desc mlps[] = {
    {.hidden = 10, .bias = TSH_YES},
    {.hidden = 64, .activation = TSH_GELU_TANH, .up = "c_fc", .down = "c_proj", .reversed = 1},
    {.hidden = 7, .activation = TSH_RELU},
    {.hidden = 5, .activation = TSH_SILU, .gated = 1},
    {.hidden = 96,
     .activation = TSH_SILU,
     .gated = 1,
     .bias = TSH_YES,
     .gate = "w1",
     .up = "w3",
     .down = "w2"},
    {.hidden = 11,
     .activation = TSH_GELU_TANH,
     .gated = 1,
     .fused = "gate_up_proj",
     .bias = TSH_YES},
};

static tsh_tensor *activate(tsh_activation f, tsh_tensor *x) {
    return f == TSH_GELU        ? tsh_gelu(x)
           : f == TSH_GELU_TANH ? tsh_gelu_tanh(x)
           : f == TSH_RELU      ? tsh_relu(x)
                                : tsh_silu(x);
}

/* What linear layer `name` gives, by its whole weight; NULL if there is none. */
static tsh_tensor *linear_of(tsh_ctx *ctx, pairs *p, tsh_module *mlp, const char *name,
                             int reversed, tsh_tensor *x) {
    static char path[RANKS_MAX][WEIGHTS][32];
    char (*text)[32] = &path[tsh_world(ctx)->rank][p->count];
    (void)snprintf(text[0], sizeof *text, "%s.weight", name);
    (void)snprintf(text[1], sizeof *text, "%s.bias", name);
    tsh_tensor *w = paired(ctx, p, mlp, text[0]), *b = paired(ctx, p, mlp, text[1]);
    return w ? tsh_linear(x, reversed ? tsh_transpose(w, 0, 1) : w, b) : NULL;
}

static int mlp_rank(tsh_ctx *ctx, void *user) {
    (void)user;
    for (int c = 0; c < COUNT(mlps); c++) {
        tsh_mlp_desc desc = mlps[c];
        char name[24];
        pairs p = {0};
        tsh_tensor *x, *y, *want, *grad, *part[2] = {NULL, NULL};
        uint64_t calls;
        desc.dim = DIM;
        (void)snprintf(name, sizeof name, "mlp%d", c);
        tsh_module *mlp = tsh_add_mlp(tsh_root(ctx), name, &desc);
        CHECK(mlp, "case %d", c);
        x = tsh_requires_grad(tsh_keep(tsh_randn(ctx, tsh_shape3(B, T, DIM))), 1);
        if (desc.fused) {
            y = linear_of(ctx, &p, mlp, desc.fused, 0, x);
            tsh_split(y, -1, 2, part);
        } else {
            if (desc.gated)
                part[0] = linear_of(ctx, &p, mlp, desc.gate ? desc.gate : "gate_proj", 0, x);
            part[1] = linear_of(ctx, &p, mlp, desc.up ? desc.up : "up_proj", desc.reversed, x);
        }
        y = activate(desc.activation, part[!desc.gated]);
        if (desc.gated) y = tsh_mul(y, part[1]);
        want = tsh_retain_grad(
            linear_of(ctx, &p, mlp, desc.down ? desc.down : "down_proj", desc.reversed, y));
        tsh_backward(ctx, ranks_loss(ctx, want));
        CHECK_OK();
        CHECK(p.count == (2 + (desc.gated && !desc.fused)) * (1 + (desc.bias == TSH_YES)),
              "case %d", c);
        grad = tsh_keep(tsh_grad(x));
        tsh_zero_grad(x);
        calls = tsh_tp(ctx)->stats.calls[TSH_ALLREDUCE];
        y = tsh_retain_grad(tsh_forward(mlp, x));
        calls = tsh_tp(ctx)->stats.calls[TSH_ALLREDUCE] - calls;
        CHECK(calls == (tsh_tp(ctx)->size > 1), "case %d: %d all-reduces", c, (int)calls);
        CHECK(y && apart(ctx, y, want) < near_by, "case %d is off by %g", c, apart(ctx, y, want));
        tsh_backward(ctx, ranks_loss(ctx, y));
        CHECK_OK();
        CHECK(apart(ctx, tsh_grad(x), grad) < 5 * near_by, "case %d: the gradient of x", c);
        if (gradients_agree(ctx, &p)) return 1;
        tsh_step_end(ctx);
    }
    CHECK_OK();
    return 0;
}

static void mlp_equals_plain_ops(void **state) {
    (void)state;
    for (int d = 0; d < COUNT(ranks_degrees); d++) ranks_run(ranks_degrees[d], mlp_rank, NULL);
}

/* A hidden size of whole blocks is cut between blocks, so that it can be quantised. */
static int quantised_rank(tsh_ctx *ctx, void *user) {
    const tsh_mlp_desc desc = {.dim = 64, .hidden = 160, .gated = 1, .activation = TSH_SILU};
    tsh_module *mlp = tsh_add_mlp(tsh_root(ctx), "mlp", &desc);
    tsh_tensor *x = tsh_keep(tsh_randn(ctx, tsh_shape2(3, 64))), *want, *got;
    (void)user;
    tsh_no_grad_begin(ctx);
    want = tsh_forward(mlp, x);
    CHECK_TRUE(tsh_quantize(mlp, NULL, TSH_Q8_0) == TSH_OK);
    got = tsh_forward(mlp, x);
    CHECK(apart(ctx, got, want) < 0.02, "off by %g", apart(ctx, got, want));
    tsh_no_grad_end(ctx);
    CHECK_OK();
    return 0;
}

static void an_mlp_can_be_quantised_at_every_degree(void **state) {
    (void)state;
    for (int d = 0; d < COUNT(ranks_degrees); d++)
        ranks_run(ranks_degrees[d], quantised_rank, NULL);
}

/* ----------------------------------------------------------------------- caches */

enum { LONG = 16, DEEP = 3 };

typedef struct decoding {
    shape_of_layer layer;
    tsh_dtype dtype;
    double off; /* how far apart the two ways may be */
} decoding;

/* x + attention(norm x), then x + mlp(x), DEEP times. */
static tsh_tensor *run_block(tsh_module *self, tsh_tensor **in, int n, void *user) {
    (void)n, (void)user;
    tsh_tensor *x = tsh_add(
        in[0], tsh_forward(tsh_find(self, "attn"), tsh_forward(tsh_find(self, "norm"), in[0])));
    return tsh_add(x, tsh_forward(tsh_find(self, "mlp"), x));
}

static void add_blocks(tsh_module *root, const shape_of_layer *s) {
    for (int i = 0; i < DEEP; i++) {
        const tsh_module_desc block = {.forward = run_block};
        const tsh_rms_norm_desc norm = {.dim = DIM};
        const tsh_mlp_desc mlp = {.dim = DIM, .hidden = 13, .gated = 1, .activation = TSH_SILU};
        tsh_attention_layer_desc desc = s->desc;
        char name[8];
        (void)snprintf(name, sizeof name, "%d", i);
        tsh_module *self = tsh_add_module(root, name, &block);
        desc.dim = DIM;
        desc.attention.causal = 1;
        if (s->rope) desc.rope = s->rope == 1 ? &half_rope : &full_rope;
        if (s->norm) desc.qk_norm = &norm_of_heads;
        tsh_add_rms_norm(self, "norm", &norm);
        tsh_add_attention(self, "attn", &desc);
        tsh_add_mlp(self, "mlp", &mlp);
    }
}

static int decode_rank(tsh_ctx *ctx, void *user) {
    static const int steps[] = {5, 3, 1, 1, 4, 1, 1}; /* LONG in all */
    const decoding *d = (const decoding *)user;
    tsh_module *root = tsh_root(ctx);
    tsh_tensor *x, *want, *y, *again[COUNT(steps)];
    tsh_cache *cache;
    size_t bytes;
    int64_t at = 0;
    add_blocks(root, &d->layer);
    tsh_train(root, 0);
    tsh_no_grad_begin(ctx);
    x = tsh_keep(tsh_cast(tsh_randn(ctx, tsh_shape3(B, LONG, DIM)), d->dtype));
    want = tsh_keep(tsh_forward(root, x));
    bytes = tsh_mem_stats(ctx).now[TSH_MEM_TENSORS];
    tsh_scope_begin(ctx); /* what it ends refers to the cache */
    cache = tsh_cache_new(root, B, LONG, TSH_DTYPE_DEFAULT);
    CHECK_TRUE(cache && tsh_cache_length(cache) == 0);
    CHECK(!tsh_cache_new(tsh_find(root, "1"), B, LONG, TSH_DTYPE_DEFAULT), "a second one");
    CHECK_SAYS(TSH_ERR_STATE, "\"1.attn\" has a cache already");
    for (int turn = 0; turn < 2; turn++) {
        at = 0;
        for (int i = 0; i < COUNT(steps); at += steps[i++]) {
            const int64_t after = at + steps[i];
            if (turn == 1 && after <= 8) continue; /* the first 8 are still there */
            y = tsh_forward(root, tsh_slice(x, 1, at, steps[i]));
            CHECK(y && tsh_cache_length(cache) == after, "position %d", (int)at);
            CHECK(apart(ctx, y, tsh_slice(want, 1, at, steps[i])) <= d->off,
                  "from position %d on it is off by %g", (int)at,
                  apart(ctx, y, tsh_slice(want, 1, at, steps[i])));
            if (turn == 0) again[i] = tsh_keep(y);
            if (turn == 1) CHECK(apart(ctx, y, again[i]) <= 0, "other bits the second time");
        }
        if (turn == 0) {
            CHECK(!tsh_forward(root, tsh_slice(x, 1, 0, 1)), "it is full");
            CHECK_SAYS(TSH_ERR_SHAPE, "the cache of 16 positions holds 16, and 1 more do not fit");
            CHECK_TRUE(tsh_cache_length(cache) == LONG);
            CHECK_TRUE(tsh_cache_truncate(cache, LONG + 1) == TSH_ERR_ARGUMENT);
            CHECK_SAYS(TSH_ERR_ARGUMENT, "holds 16 positions, of which 17 cannot");
            CHECK_TRUE(tsh_cache_truncate(cache, 8) == TSH_OK && tsh_cache_length(cache) == 8);
            CHECK_TRUE(tsh_cache_truncate(cache, -1) == TSH_ERR_ARGUMENT);
            tsh_clear_error(ctx);
        }
    }
    for (int i = 0; i < COUNT(steps); i++) tsh_tensor_free(again[i]);
    CHECK_TRUE(tsh_cache_truncate(cache, 0) == TSH_OK && tsh_cache_length(cache) == 0);
    y = tsh_forward(root, tsh_slice(x, 1, 0, 6));
    CHECK(apart(ctx, y, tsh_slice(want, 1, 0, 6)) <= d->off, "from the start again");
    CHECK(!tsh_forward(root, tsh_slice(tsh_slice(x, 0, 0, 1), 1, 0, 2)), "another batch");
    CHECK_SAYS(TSH_ERR_SHAPE, "x has 1 texts, the cache 2");
    CHECK_TRUE(tsh_cache_truncate(cache, 6) == TSH_OK);
    tsh_cache_free(cache);
    tsh_scope_end(ctx);
    CHECK(tsh_mem_stats(ctx).now[TSH_MEM_TENSORS] == bytes, "memory is given back");
    CHECK(apart(ctx, tsh_forward(root, x), want) <= 0, "no cache: the same bits as at first");
    /* of one block alone; the others have none */
    cache = tsh_cache_new(tsh_find(root, "1"), B, 4, TSH_DTYPE_DEFAULT);
    y = tsh_forward(tsh_find(root, "1"), tsh_slice(x, 1, 0, 4));
    CHECK_TRUE(cache && y && tsh_cache_length(cache) == 4);
    tsh_no_grad_end(ctx);
    tsh_train(root, 1); /* and is left there */
    CHECK(!tsh_forward(tsh_find(root, "1"), tsh_slice(x, 1, 0, 4)), "a forward of training");
    CHECK_SAYS(TSH_ERR_STATE, "training with a cache of 4 positions: it is for generating");
    tsh_clear_error(ctx);
    tsh_cache_free(cache);
    CHECK(tsh_forward(tsh_find(root, "1"), tsh_slice(x, 1, 0, 4)), "without it");
    CHECK_OK();
    return 0;
}

/* Positions [at[b], at[b] + counts[b]) of row b of x, with padding up to n. */
static tsh_tensor *ragged_input(tsh_ctx *ctx, tsh_tensor *x, const int64_t *at,
                                const int64_t *counts, int64_t n) {
    tsh_tensor *rows[B];
    for (int b = 0; b < B; b++) {
        tsh_tensor *part[2] = {tsh_slice(tsh_slice(x, 0, b, 1), 1, at[b], counts[b]),
                               tsh_cast(tsh_full(ctx, tsh_shape3(1, n - counts[b], DIM), 3),
                                        tsh_dtype_of(x))};
        rows[b] = tsh_concat(part, 2, 1);
    }
    return tsh_concat(rows, B, 0);
}

static int ragged_rank(tsh_ctx *ctx, void *user) {
    static const int64_t steps[][B] = {{5, 2}, {0, 3}, {1, 1}, {2, 0}, {0, 0}, {4, 6}, {1, 1}};
    const decoding *d = (const decoding *)user;
    const int64_t most[B] = {6, 0};
    tsh_module *root = tsh_root(ctx);
    int64_t at[B] = {0, 0};
    tsh_tensor *x, *want, *y;
    tsh_cache *cache;
    add_blocks(root, &d->layer);
    tsh_train(root, 0);
    tsh_no_grad_begin(ctx);
    x = tsh_keep(tsh_cast(tsh_randn(ctx, tsh_shape3(B, LONG, DIM)), d->dtype));
    want = tsh_keep(tsh_forward(root, x));
    cache = tsh_cache_new(root, B, LONG, TSH_DTYPE_DEFAULT);
    for (int i = 0; i < COUNT(steps); i++) {
        const int64_t n = i == 4 ? 2 : steps[i][steps[i][1] > steps[i][0]];
        CHECK_TRUE(tsh_cache_counts(cache, steps[i]) == TSH_OK);
        y = tsh_forward(root, ragged_input(ctx, x, at, steps[i], n));
        for (int b = 0; b < B; b++) {
            if (steps[i][b] == 0) continue;
            const double off =
                apart(ctx, tsh_slice(tsh_slice(y, 0, b, 1), 1, 0, steps[i][b]),
                      tsh_slice(tsh_slice(want, 0, b, 1), 1, at[b], steps[i][b]));
            CHECK(off <= d->off, "step %d, row %d is off by %g", i, b, off);
        }
        for (int b = 0; b < B; b++) at[b] += steps[i][b];
        CHECK_TRUE(tsh_cache_length(cache) == (at[0] > at[1] ? at[0] : at[1]));
    }
    CHECK_TRUE(tsh_cache_counts(cache, NULL) == TSH_OK);
    CHECK(!tsh_forward(root, tsh_slice(x, 1, 0, 4)), "13 and 4 are more than 16");
    CHECK_SAYS(TSH_ERR_SHAPE, "the cache of 16 positions holds 13, and 4 more do not fit");
    CHECK_TRUE(tsh_cache_truncate(cache, 3) == TSH_OK && tsh_cache_length(cache) == 3);
    y = tsh_forward(root, tsh_slice(x, 1, 3, 4));
    CHECK(apart(ctx, y, tsh_slice(want, 1, 3, 4)) <= d->off, "rows of one length again");
    CHECK_TRUE(tsh_cache_counts(cache, most) == TSH_OK);
    CHECK(!tsh_forward(root, tsh_slice(x, 1, 0, 4)), "6 of 4 positions");
    CHECK_SAYS(TSH_ERR_SHAPE, "of 4 positions text 0 has 6 (tsh_cache_counts)");
    CHECK_TRUE(tsh_cache_counts(cache, (const int64_t[]){1, -1}) == TSH_ERR_ARGUMENT);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "text 1 has -1 positions; takes 0 to 16");
    tsh_cache_free(cache);
    CHECK(tsh_cache_counts(cache, most) == TSH_ERR_ARGUMENT, "it is gone");
    CHECK(tsh_cache_counts(NULL, most) == TSH_ERR_ARGUMENT, "there is none");
    tsh_no_grad_end(ctx);
    CHECK_OK();
    return 0;
}

/* Rows of a batch that are not equally long give what each gives in the whole text. */
static void rows_of_a_cache_have_lengths_of_their_own(void **state) {
    static const int chosen[] = {1, 3, 4, 6, 8, 10};
    (void)state;
    for (int d = 0; d < COUNT(ranks_degrees); d++)
        for (int c = 0; c < COUNT(chosen); c++) {
            decoding run = {.layer = layers[chosen[c]], .dtype = TSH_REAL, .off = near_by};
            ranks_run(ranks_degrees[d], ragged_rank, &run);
        }
}

static void a_cache_equals_the_whole_text(void **state) {
    static const int chosen[] = {1, 3, 4, 6, 8, 10, 16, 17, 18};
    (void)state;
    for (int d = 0; d < COUNT(ranks_degrees); d++)
        for (int c = 0; c < COUNT(chosen); c++) {
            decoding run = {.layer = layers[chosen[c]], .dtype = TSH_REAL, .off = near_by};
            ranks_run(ranks_degrees[d], decode_rank, &run);
        }
}

/* Weights, activations and cache in bf16: values up to 8, rounded to 2^-6 in several layers. */
static void a_cache_in_bf16(void **state) {
    const tsh_desc desc = {.dtype = TSH_BF16};
    (void)state;
    for (int d = 0; d < COUNT(ranks_degrees); d++) {
        decoding run = {.layer = layers[3], .dtype = TSH_BF16, .off = 0.15};
        ranks_run_with(ranks_degrees[d], &desc, decode_rank, &run);
    }
}

/* --------------------------------------------------------------------- mistakes */

static int refused_rank(tsh_ctx *ctx, void *user) {
    static const tsh_attention_layer_desc wrong[] = {
        {.dim = 20},
        {.dim = 20, .heads = 6},
        {.dim = 20, .heads = 5, .kv_heads = 2},
        {.dim = 20, .heads = 5, .kv_heads = -1},
        {.heads = 5, .head_dim = 4},
        {.dim = 20, .heads = 5, .head_dim = -4}};
    const tsh_mlp_desc fused = {.dim = 20, .hidden = 8, .fused = "both"};
    const tsh_mlp_desc strange = {.dim = 20, .hidden = 8, .activation = (tsh_activation)4};
    const tsh_mlp_desc twice = {.dim = 20, .hidden = 8, .up = "same", .down = "same"};
    const shape_of_layer good = {.desc = {.heads = 5}};
    tsh_module *root = tsh_root(ctx), *layer;
    tsh_tensor *x, *in[3];
    tsh_cache *cache;
    (void)user;
    for (int i = 0; i < COUNT(wrong); i++) {
        CHECK(!tsh_add_attention(root, "layer", &wrong[i]), "number %d", i);
        CHECK_SAYS(TSH_ERR_SHAPE, "tsh_add_attention: \"layer\" has ");
    }
    CHECK_TRUE(!tsh_add_attention(root, "layer", NULL));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "no description");
    tsh_attention_layer_desc same = {.dim = 20, .heads = 5, .k = "q_proj"};
    CHECK_TRUE(!tsh_add_attention(root, "layer", &same));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "\"layer\" has a child \"q_proj\" already");
    CHECK_TRUE(!tsh_add_mlp(root, "mlp", &fused) && !tsh_add_mlp(root, "mlp", NULL));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "only gated layers are fused");
    CHECK_TRUE(!tsh_add_mlp(root, "mlp", &strange));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "has activation 4");
    CHECK_TRUE(!tsh_add_mlp(root, "mlp", &twice));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "has a child \"same\" already");
    CHECK(!tsh_child(root, 0), "what cannot be made leaves nothing in the tree");
    CHECK_TRUE(!tsh_cache_new(root, 1, 4, TSH_DTYPE_DEFAULT));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "has no attention layer");
    layer = add_layer(ctx, "layer", &good);
    CHECK_TRUE(!tsh_cache_new(root, 0, 4, TSH_DTYPE_DEFAULT));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "0 texts of 4 positions");
    CHECK_TRUE(!tsh_cache_new(root, 1, 4, TSH_I32));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "bf16 or f16");
    x = tsh_keep(tsh_randn(ctx, tsh_shape3(B, 2, DIM)));
    CHECK_TRUE(!tsh_forward(layer, tsh_slice(x, 2, 0, 4)));
    CHECK_SAYS(TSH_ERR_SHAPE, "takes x (B, T, 20)");
    in[0] = in[1] = in[2] = x;
    CHECK_TRUE(!tsh_forward_n(layer, in, 3));
    CHECK_SAYS(TSH_ERR_SHAPE, "3 inputs");
    cache = tsh_cache_new(root, B, 4, TSH_DTYPE_DEFAULT);
    CHECK(cache && !tsh_forward(layer, x), "it would be recorded");
    CHECK_SAYS(TSH_ERR_STATE, "tsh_no_grad_begin");
    CHECK_TRUE(tsh_cache_length(cache) == 0);
    tsh_cache_free(cache);
    CHECK_TRUE(tsh_cache_length(cache) == 0 && tsh_cache_truncate(cache, 0) == TSH_ERR_ARGUMENT);
    tsh_cache_free(NULL);
    CHECK_TRUE(tsh_cache_length(NULL) == 0 && tsh_forward(layer, x));
    for (int i = 0; i < 3; i++) { /* left for tsh_close */
        tsh_cache_free(cache);
        cache = tsh_cache_new(root, B, 4 + i, TSH_DTYPE_DEFAULT);
    }
    CHECK_OK();
    return 0;
}

static void mistakes_are_told_and_leave_nothing(void **state) {
    (void)state;
    ranks_run(1, refused_rank, NULL);
    ranks_run(2, refused_rank, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(attention_equals_plain_ops),
        cmocka_unit_test(weights_are_sharded_by_whole_heads),
        cmocka_unit_test(mlp_equals_plain_ops),
        cmocka_unit_test(an_mlp_can_be_quantised_at_every_degree),
        cmocka_unit_test(a_cache_equals_the_whole_text),
        cmocka_unit_test(a_cache_in_bf16),
        cmocka_unit_test(rows_of_a_cache_have_lengths_of_their_own),
        cmocka_unit_test(mistakes_are_told_and_leave_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
