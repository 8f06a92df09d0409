/* families.h - small models of the families that have a policy, with the parameter names of Hugging
 * Face transformers, and one forward for all of them: families differ in their names, in where the
 * norms are, in how q, k and v are stored, and in the activation.
 *
 * Include it after ranks.h. */
#ifndef TSHARD_TESTS_FAMILIES_H
#define TSHARD_TESTS_FAMILIES_H

enum {
    FAMILY_BATCH = 2,
    FAMILY_TOKENS = 3,
    FAMILY_SOURCE = 4, /* tokens that cross-attention looks at */
    FAMILY_TOWERS = 2,
    FAMILY_PATH = 160
};

enum { /* how q, k, v are stored */
       FAMILY_APART,
       FAMILY_FUSED, /* [Q|K|V], by names.q */
       FAMILY_HEADS  /* [head][q|k|v], by names.q */
};
enum { /* the order of norms and residuals */
       FAMILY_PRE,
       FAMILY_POST,
       FAMILY_ONE_NORM, /* attention and MLP side by side, behind one norm */
       FAMILY_TWO_NORMS /* ... behind one each */
};
enum { FAMILY_GELU, FAMILY_GELU_TANH, FAMILY_RELU, FAMILY_SILU, FAMILY_QUICK_GELU };
enum { /* which layers have a bias, and other marks */
       FAMILY_BIAS_QKV = 1,
       FAMILY_BIAS_OUT = 2,
       FAMILY_BIAS_MLP = 4,
       FAMILY_BIASES = 7,
       FAMILY_RMS = 8,
       FAMILY_ROPE = 16,       /* of all features of a head */
       FAMILY_ROPE_HALF = 32,  /* of the first half, as GPT-NeoX and Phi */
       FAMILY_ROPE_PAIRS = 64, /* interleaved, of the first half, as GPT-J */
       FAMILY_SCORES = 128,   /* a bias on the scores that each head has of its own, as BLOOM, T5 */
       FAMILY_UNSCALED = 256, /* scores are not divided by sqrt(D), as GPT-Neo, T5 */
       FAMILY_REVERSED = 512, /* linears store (in, out), as GPT-2 */
       FAMILY_CAUSAL = 1024,
       FAMILY_DECODER = 2048 /* the second tower: with cross-attention */
};

/* Where the layers of an attention are, below a block; "at" holds its arguments. */
typedef struct family_attention {
    const char *at, *q, *k, *v, *out, *norm, *heads, *kv_heads;
} family_attention;

typedef struct family {
    const char *policy, *note;
    const char *tower[FAMILY_TOWERS]; /* path of the list of blocks; NULL: none */
    int64_t heads, kv, head, hidden, inner;
    int stored, order, activation, marks, marks2; /* marks2: of the second tower, besides */
    family_attention self, cross;
    const char *norm, *up, *gate, *down; /* of the MLP */
    const char *up2, *down2, *norm2;     /* in the second tower; NULL: the same */
    int64_t heads2;                      /* in the second tower; 0: the same */
} family;

/* -- the tree --------------------------------------------------------------- */

/* The child of that name, made a container where there is none. */
static tsh_module *family_child(tsh_module *parent, const char *name) {
    tsh_module *child;
    const tsh_module_desc none = {NULL, NULL};
    int i;
    for (i = 0; (child = tsh_child(parent, i)); i++) {
        const char *path = tsh_module_path(child), *dot = strrchr(path, '.');
        if (strcmp(dot ? dot + 1 : path, name) == 0) return child;
    }
    return tsh_add_module(parent, name, &none);
}

/* The container at path; with leaf, the one above it, and *leaf the last name. */
static tsh_module *family_way(tsh_module *at, const char *path, const char **leaf) {
    char name[FAMILY_PATH];
    for (;;) {
        size_t n = strcspn(path, ".");
        if (leaf && !path[n]) {
            *leaf = path;
            return at;
        }
        memcpy(name, path, n);
        name[n] = '\0';
        at = family_child(at, name);
        if (!path[n]) return at;
        path += n + 1;
    }
}

static void family_linear(tsh_module *block, const char *path, int64_t in, int64_t out, int bias,
                          int marks) {
    tsh_linear_desc desc = {.in = in, .out = out};
    const char *leaf;
    tsh_module *parent = family_way(block, path, &leaf);
    desc.bias = marks & bias ? TSH_YES : TSH_NO;
    desc.reversed = (marks & FAMILY_REVERSED) != 0;
    tsh_add_linear(parent, leaf, &desc);
}

static void family_norm(tsh_module *block, const char *path, int64_t dim, int marks) {
    const tsh_layer_norm_desc layer = {.dim = dim};
    const tsh_rms_norm_desc rms = {.dim = dim};
    const char *leaf;
    tsh_module *parent = family_way(block, path, &leaf);
    if (marks & FAMILY_RMS)
        tsh_add_rms_norm(parent, leaf, &rms);
    else
        tsh_add_layer_norm(parent, leaf, &layer);
}

static void family_add_attention(tsh_module *block, const family *f, const family_attention *a,
                                 int64_t heads, int marks) {
    const int64_t kv = f->kv ? f->kv : heads, wide = heads * f->head, narrow = kv * f->head;
    tsh_module *at = *a->at ? family_way(block, a->at, NULL) : block;
    tsh_set_argument(at, a->heads, heads);
    if (a->kv_heads) tsh_set_argument(at, a->kv_heads, kv);
    if (a == &f->cross && f->stored == FAMILY_FUSED) { /* GPT-2: q, and [K|V] */
        family_linear(block, a->k, f->hidden, 2 * narrow, FAMILY_BIAS_QKV, marks);
        family_linear(block, a->q, f->hidden, wide, FAMILY_BIAS_QKV, marks);
    } else if (f->stored != FAMILY_APART && a == &f->self) {
        family_linear(block, a->q, f->hidden, wide + 2 * narrow, FAMILY_BIAS_QKV, marks);
    } else {
        family_linear(block, a->q, f->hidden, wide, FAMILY_BIAS_QKV, marks);
        family_linear(block, a->k, f->hidden, narrow, FAMILY_BIAS_QKV, marks);
        family_linear(block, a->v, f->hidden, narrow, FAMILY_BIAS_QKV, marks);
    }
    family_linear(block, a->out, wide, f->hidden, FAMILY_BIAS_OUT, marks);
    family_norm(block, a->norm, f->hidden, marks);
}

static void family_add_block(tsh_module *block, const family *f, int tower) {
    const int marks = f->marks | (tower ? f->marks2 : 0);
    family_add_attention(block, f, &f->self, tower && f->heads2 ? f->heads2 : f->heads, marks);
    if (marks & FAMILY_DECODER) family_add_attention(block, f, &f->cross, f->heads, marks);
    family_linear(block, tower && f->up2 ? f->up2 : f->up, f->hidden, f->inner, FAMILY_BIAS_MLP,
                  marks);
    if (f->gate) family_linear(block, f->gate, f->hidden, f->inner, FAMILY_BIAS_MLP, marks);
    family_linear(block, tower && f->down2 ? f->down2 : f->down, f->inner, f->hidden,
                  FAMILY_BIAS_MLP, marks);
    if (f->order != FAMILY_ONE_NORM)
        family_norm(block, tower && f->norm2 ? f->norm2 : f->norm, f->hidden, marks);
}

/* Two blocks in each tower, without values, not sharded. */
static void family_build(tsh_ctx *ctx, const family *f) {
    int tower, i;
    for (tower = 0; tower < FAMILY_TOWERS && f->tower[tower]; tower++) {
        tsh_module *list = family_way(tsh_root(ctx), f->tower[tower], NULL);
        for (i = 0; i < 2; i++) family_add_block(family_child(list, i ? "1" : "0"), f, tower);
    }
}

/* -- the forward ------------------------------------------------------------ */

static tsh_tensor *family_call(tsh_module *block, const char *path, tsh_tensor *x) {
    return tsh_forward(tsh_find(block, path), x);
}

/* (B, T, n D) -> (B, n, T, D) */
static tsh_tensor *family_split(const family *f, tsh_tensor *x) {
    tsh_shape shape = tsh_shape4(tsh_size(x, 0), tsh_size(x, 1), tsh_size(x, 2) / f->head, f->head);
    return x ? tsh_transpose(tsh_reshape(x, shape), 1, 2) : NULL;
}

static tsh_tensor *family_rope(const family *f, int marks, tsh_tensor *x) {
    tsh_rope_desc desc;
    if (!(marks & (FAMILY_ROPE | FAMILY_ROPE_HALF | FAMILY_ROPE_PAIRS))) return x;
    memset(&desc, 0, sizeof desc);
    desc.dims = marks & FAMILY_ROPE ? 0 : f->head / 2;
    desc.interleaved = (marks & FAMILY_ROPE_PAIRS) != 0;
    return tsh_rope(x, &desc);
}

/* A bias on the scores (1, H, T, T): farther keys weigh less, by another slope for every head. */
static tsh_tensor *family_scores(tsh_ctx *ctx, int64_t heads, int64_t queries, int64_t keys) {
    tsh_tensor *mask = tsh_zeros(ctx, tsh_shape4(1, heads, queries, keys));
    tsh_real *at = (tsh_real *)tsh_data(ctx, mask);
    int64_t h, i, j;
    for (h = 0; at && h < heads; h++)
        for (i = 0; i < queries; i++)
            for (j = 0; j < keys; j++, at++)
                *at = (tsh_real)(-0.25 * (double)(h + 1) * fabs((double)(i - j)));
    return mask;
}

/* q, k, v (B, heads, T, D) of x and of what is looked at. */
static void family_project(tsh_module *block, const family *f, const family_attention *a,
                           tsh_tensor *x, tsh_tensor *source, int64_t heads, tsh_tensor **qkv) {
    const int64_t kv = f->kv ? f->kv : heads, d = f->head;
    tsh_tensor *y = family_call(block, a->q, x);
    int i;
    if (a == &f->cross && f->stored == FAMILY_FUSED) {
        tsh_tensor *both = family_call(block, a->k, source);
        qkv[0] = family_split(f, y);
        for (i = 1; i < 3; i++)
            qkv[i] = family_split(f, tsh_slice(both, 2, (i - 1) * kv * d, kv * d));
    } else if (f->stored == FAMILY_FUSED) {
        for (i = 0; i < 3; i++)
            qkv[i] = family_split(f, i ? tsh_slice(y, 2, (heads + (i - 1) * kv) * d, kv * d)
                                       : tsh_slice(y, 2, 0, heads * d));
    } else if (f->stored == FAMILY_HEADS) {
        tsh_shape shape = tsh_shape4(tsh_size(y, 0), tsh_size(y, 1), heads, 3 * d);
        y = tsh_reshape(y, shape);
        for (i = 0; i < 3; i++) qkv[i] = tsh_transpose(tsh_slice(y, 3, i * d, d), 1, 2);
    } else {
        qkv[0] = family_split(f, y);
        qkv[1] = family_split(f, family_call(block, a->k, source));
        qkv[2] = family_split(f, family_call(block, a->v, source));
    }
}

static tsh_tensor *family_attend(tsh_module *block, const family *f, const family_attention *a,
                                 int marks, tsh_tensor *x, tsh_tensor *source) {
    tsh_module *at = *a->at ? tsh_find(block, a->at) : block;
    const int64_t heads = tsh_argument(at, a->heads);
    tsh_tensor *qkv[3] = {NULL, NULL, NULL}, *y;
    tsh_attention_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.causal = (marks & FAMILY_CAUSAL) && a == &f->self;
    if (marks & FAMILY_UNSCALED) desc.scale = 1;
    if (marks & FAMILY_SCORES && a == &f->self)
        desc.mask = family_scores(tsh_ctx_of(x), heads, tsh_size(x, 1), tsh_size(source, 1));
    family_project(block, f, a, x, source, heads, qkv);
    qkv[0] = family_rope(f, marks, qkv[0]);
    qkv[1] = family_rope(f, marks, qkv[1]);
    y = tsh_transpose(tsh_attention(qkv[0], qkv[1], qkv[2], &desc), 1, 2);
    if (!y) return NULL;
    y = tsh_reshape(y, tsh_shape3(tsh_size(y, 0), tsh_size(y, 1), heads * f->head));
    return family_call(block, a->out, y);
}

static tsh_tensor *family_activate(const family *f, tsh_tensor *x) {
    switch (f->activation) {
    case FAMILY_GELU: return tsh_gelu(x);
    case FAMILY_GELU_TANH: return tsh_gelu_tanh(x);
    case FAMILY_RELU: return tsh_relu(x);
    case FAMILY_SILU: return tsh_silu(x);
    case FAMILY_QUICK_GELU: return tsh_mul(x, tsh_sigmoid(tsh_scale(x, 1.702)));
    }
    return NULL;
}

static tsh_tensor *family_mlp(tsh_module *block, const family *f, int tower, tsh_tensor *x) {
    tsh_tensor *up = family_call(block, tower && f->up2 ? f->up2 : f->up, x);
    if (f->gate) {
        up = tsh_mul(family_activate(f, family_call(block, f->gate, x)), up);
    } else {
        up = family_activate(f, up);
    }
    return family_call(block, tower && f->down2 ? f->down2 : f->down, up);
}

static tsh_tensor *family_block(tsh_module *block, const family *f, int tower, tsh_tensor *x,
                                tsh_tensor *source) {
    const int marks = f->marks | (tower ? f->marks2 : 0), post = f->order == FAMILY_POST;
    const char *norm = tower && f->norm2 ? f->norm2 : f->norm;
    tsh_tensor *n = post ? x : family_call(block, f->self.norm, x), *y;
    y = tsh_add(x, family_attend(block, f, &f->self, marks, n, n));
    if (f->order == FAMILY_ONE_NORM) return tsh_add(y, family_mlp(block, f, tower, n));
    if (f->order == FAMILY_TWO_NORMS)
        return tsh_add(y, family_mlp(block, f, tower, family_call(block, norm, x)));
    if (post) y = family_call(block, f->self.norm, y);
    if (marks & FAMILY_DECODER) {
        n = post ? y : family_call(block, f->cross.norm, y);
        y = tsh_add(y, family_attend(block, f, &f->cross, marks, n, source));
        if (post) y = family_call(block, f->cross.norm, y);
    }
    n = post ? y : family_call(block, norm, y);
    y = tsh_add(y, family_mlp(block, f, tower, n));
    return post ? family_call(block, norm, y) : y;
}

/* One tower on x; the other on what the first gives (a decoder looks at it), or on x too, and then
 * their sum. A decoder alone looks at the source. */
static tsh_tensor *family_run(tsh_ctx *ctx, const family *f, tsh_tensor *x, tsh_tensor *source) {
    tsh_tensor *y[FAMILY_TOWERS] = {NULL, NULL};
    int tower, i;
    for (tower = 0; tower < FAMILY_TOWERS && f->tower[tower]; tower++) {
        tsh_module *list = tsh_find(tsh_root(ctx), f->tower[tower]);
        const int decoder = tower && f->marks2 & FAMILY_DECODER;
        y[tower] = tower || !(f->marks2 & FAMILY_DECODER) ? x : source;
        for (i = 0; i < 2; i++)
            y[tower] = family_block(tsh_child(list, i), f, tower, y[tower],
                                    decoder ? y[0] : source);
    }
    if (!f->tower[1] || f->marks2 & FAMILY_DECODER) return y[f->tower[1] != NULL];
    return tsh_add(y[0], y[1]);
}

/* -- values ----------------------------------------------------------------- */

/* Eighths, by path: the same at every degree. */
static void family_fill(const char *path, tsh_tensor *param, void *user) {
    tsh_ctx *ctx = (tsh_ctx *)user;
    size_t n = (size_t)tsh_numel(param), e;
    tsh_real *values = (tsh_real *)malloc((n + 1) * sizeof *values);
    uint64_t seed = 1;
    for (; *path; path++) seed = seed * 131 + (uint64_t)(unsigned char)*path;
    for (e = 0; e < n; e++) values[e] = (tsh_real)(ranks_number(seed, e) / 8);
    (void)tsh_write(ctx, param, TSH_GLOBAL, values, n * sizeof *values);
    free(values);
}

/* What is compared: the output, the gradients of the inputs and of every parameter. */
typedef struct family_record {
    int count;
    int64_t numel[128];
    double *values[128];
    char name[128][FAMILY_PATH];
    tsh_ctx *ctx;
} family_record;

static void family_add(family_record *r, const char *name, tsh_tensor *t) {
    if (r->count == 128) return;
    (void)snprintf(r->name[r->count], FAMILY_PATH, "%s", name);
    r->numel[r->count] = tsh_numel(t);
    r->values[r->count++] = ranks_values(r->ctx, t);
}

static void family_gradient(const char *path, tsh_tensor *param, void *user) {
    family_add((family_record *)user, path, tsh_grad(param));
}

static void family_free(family_record *r) {
    while (r->count > 0) free(r->values[--r->count]);
}

UNUSED static tsh_tensor *family_input(tsh_ctx *ctx, const family *f, int64_t tokens,
                                       uint64_t seed) {
    const tsh_shape shape = tsh_shape3(FAMILY_BATCH, tokens, f->hidden);
    tsh_tensor *t = tsh_tensor_new(ctx, TSH_REAL, shape, tsh_replicated());
    ranks_set(ctx, t, seed);
    return tsh_requires_grad(t, 1);
}

/* Forward and backward; 0 with everything recorded. forward, backward: all-reduces of the tensor-
 * parallel group. */
UNUSED static int family_step(tsh_ctx *ctx, const family *f, family_record *got, int *forward,
                              int *backward) {
    tsh_tensor *x = family_input(ctx, f, FAMILY_TOKENS, 10), *loss,
               *source = family_input(ctx, f, FAMILY_SOURCE, 11), *y;
    const uint64_t *calls = tsh_tp(ctx)->stats.calls;
    uint64_t before = calls[TSH_ALLREDUCE];
    tsh_each_param(tsh_root(ctx), family_fill, ctx);
    y = family_run(ctx, f, x, source);
    *forward = (int)(calls[TSH_ALLREDUCE] - before);
    memset(got, 0, sizeof *got);
    got->ctx = ctx;
    family_add(got, "output", y);
    loss = ranks_loss(ctx, y);
    before = calls[TSH_ALLREDUCE];
    CHECK(tsh_backward(ctx, loss) == TSH_OK, "%s", f->policy);
    *backward = (int)(calls[TSH_ALLREDUCE] - before);
    family_add(got, "input", tsh_grad(x));
    if ((f->marks | f->marks2) & FAMILY_DECODER) family_add(got, "source", tsh_grad(source));
    tsh_each_param(tsh_root(ctx), family_gradient, got);
    CHECK_OK();
    return 0;
}

UNUSED static int family_compare(tsh_ctx *ctx, const family *f, const family_record *want,
                                 const family_record *got, double tolerance) {
    int i;
    int64_t e;
    CHECK(want->count == got->count, "%s: %d tensors, not %d", f->policy, got->count, want->count);
    for (i = 0; i < want->count; i++) {
        double most = 1;
        CHECK(want->numel[i] == got->numel[i], "%s: %s", f->policy, want->name[i]);
        CHECK(got->values[i] && want->values[i], "%s: %s", f->policy, want->name[i]);
        for (e = 0; e < want->numel[i]; e++)
            most = fabs(want->values[i][e]) > most ? fabs(want->values[i][e]) : most;
        for (e = 0; e < want->numel[i]; e++)
            CHECK(fabs(want->values[i][e] - got->values[i][e]) <= tolerance * most,
                  "%s, %s: %s, element %ld is %.9g, not %.9g", f->policy, f->note, want->name[i],
                  (long)e, got->values[i][e], want->values[i][e]);
    }
    return 0;
}

/* -- the table -------------------------------------------------------------- */

/* Self-attentions whose names several families share. */
#define FAMILY_LLAMA_SELF(dense)                                                                   \
    {                                                                                              \
        .at = "self_attn", .q = "self_attn.q_proj", .k = "self_attn.k_proj",                       \
        .v = "self_attn.v_proj", .out = dense, .norm = "input_layernorm", .heads = "num_heads",    \
        .kv_heads = "num_key_value_heads"                                                          \
    }
#define FAMILY_OPT_SELF(place)                                                                     \
    {                                                                                              \
        .at = "self_attn", .q = "self_attn.q_proj", .k = "self_attn.k_proj",                       \
        .v = "self_attn.v_proj", .out = "self_attn.out_proj", .norm = place, .heads = "num_heads"  \
    }
#define FAMILY_BERT_SELF                                                                           \
    {                                                                                              \
        .at = "attention.self", .q = "attention.self.query", .k = "attention.self.key",            \
        .v = "attention.self.value", .out = "attention.output.dense",                              \
        .norm = "attention.output.LayerNorm", .heads = "num_attention_heads"                       \
    }
#define FAMILY_BERT_CROSS                                                                          \
    {                                                                                              \
        .at = "crossattention.self", .q = "crossattention.self.query",                             \
        .k = "crossattention.self.key", .v = "crossattention.self.value",                          \
        .out = "crossattention.output.dense", .norm = "crossattention.output.LayerNorm",           \
        .heads = "num_attention_heads"                                                             \
    }
#define FAMILY_VIT_SELF                                                                            \
    {                                                                                              \
        .at = "attention.attention", .q = "attention.attention.query",                             \
        .k = "attention.attention.key", .v = "attention.attention.value",                          \
        .out = "attention.output.dense", .norm = "layernorm_before",                               \
        .heads = "num_attention_heads"                                                             \
    }
#define FAMILY_GPT2_SELF                                                                           \
    { .at = "attn", .q = "attn.c_attn", .out = "attn.c_proj", .norm = "ln_1", .heads = "num_heads" }
#define FAMILY_T5_SELF                                                                             \
    {                                                                                              \
        .at = "layer.0.SelfAttention", .q = "layer.0.SelfAttention.q",                             \
        .k = "layer.0.SelfAttention.k", .v = "layer.0.SelfAttention.v",                            \
        .out = "layer.0.SelfAttention.o", .norm = "layer.0.layer_norm", .heads = "n_heads"         \
    }
#define FAMILY_T5_CROSS                                                                            \
    {                                                                                              \
        .at = "layer.1.EncDecAttention", .q = "layer.1.EncDecAttention.q",                         \
        .k = "layer.1.EncDecAttention.k", .v = "layer.1.EncDecAttention.v",                        \
        .out = "layer.1.EncDecAttention.o", .norm = "layer.1.layer_norm", .heads = "n_heads"       \
    }
#define FAMILY_SIZES(h, k, d, c, f) .heads = h, .kv = k, .head = d, .hidden = c, .inner = f
#define FAMILY_LLAMA_MLP                                                                           \
    .norm = "post_attention_layernorm", .gate = "mlp.gate_proj", .up = "mlp.up_proj",              \
    .down = "mlp.down_proj"
#define FAMILY_BERT_MLP .up = "intermediate.dense", .down = "output.dense"

/* Heads and inner sizes are even, uneven and fewer than the ranks; inner 5 on 4 ranks leaves one
 * of them empty. */
static const family families[] = {
    {.policy = "gpt2",
     .note = "",
     .tower = {"transformer.h"},
     FAMILY_SIZES(3, 0, 4, 12, 10),
     .stored = FAMILY_FUSED,
     .activation = FAMILY_GELU_TANH,
     .marks = FAMILY_BIASES | FAMILY_REVERSED | FAMILY_CAUSAL,
     .self = FAMILY_GPT2_SELF,
     .norm = "ln_2",
     .up = "mlp.c_fc",
     .down = "mlp.c_proj"},
    {.policy = "gpt2",
     .note = "cross",
     .tower = {"h"},
     FAMILY_SIZES(3, 0, 4, 12, 10),
     .stored = FAMILY_FUSED,
     .activation = FAMILY_GELU_TANH,
     .marks = FAMILY_BIASES | FAMILY_REVERSED | FAMILY_CAUSAL | FAMILY_DECODER,
     .self = FAMILY_GPT2_SELF,
     .cross = {.at = "crossattention",
               .q = "crossattention.q_attn",
               .k = "crossattention.c_attn",
               .out = "crossattention.c_proj",
               .norm = "ln_cross_attn",
               .heads = "num_heads"},
     .norm = "ln_2",
     .up = "mlp.c_fc",
     .down = "mlp.c_proj"},
    {.policy = "gpt_neo",
     .note = "",
     .tower = {"transformer.h"},
     FAMILY_SIZES(5, 0, 2, 10, 5),
     .activation = FAMILY_GELU_TANH,
     .marks = FAMILY_BIAS_OUT | FAMILY_BIAS_MLP | FAMILY_UNSCALED | FAMILY_CAUSAL,
     .self = {.at = "attn.attention",
              .q = "attn.attention.q_proj",
              .k = "attn.attention.k_proj",
              .v = "attn.attention.v_proj",
              .out = "attn.attention.out_proj",
              .norm = "ln_1",
              .heads = "num_heads"},
     .norm = "ln_2",
     .up = "mlp.c_fc",
     .down = "mlp.c_proj"},
    {.policy = "gptj",
     .note = "",
     .tower = {"transformer.h"},
     FAMILY_SIZES(3, 0, 4, 12, 10),
     .order = FAMILY_ONE_NORM,
     .activation = FAMILY_GELU_TANH,
     .marks = FAMILY_BIAS_MLP | FAMILY_ROPE_PAIRS | FAMILY_CAUSAL,
     .self = {.at = "attn",
              .q = "attn.q_proj",
              .k = "attn.k_proj",
              .v = "attn.v_proj",
              .out = "attn.out_proj",
              .norm = "ln_1",
              .heads = "num_attention_heads"},
     .up = "mlp.fc_in",
     .down = "mlp.fc_out"},
    {.policy = "gpt_neox",
     .note = "",
     .tower = {"gpt_neox.layers"},
     FAMILY_SIZES(3, 0, 4, 12, 10),
     .stored = FAMILY_HEADS,
     .order = FAMILY_TWO_NORMS,
     .activation = FAMILY_GELU,
     .marks = FAMILY_BIASES | FAMILY_ROPE_HALF | FAMILY_CAUSAL,
     .self = {.at = "attention",
              .q = "attention.query_key_value",
              .out = "attention.dense",
              .norm = "input_layernorm",
              .heads = "num_attention_heads"},
     .norm = "post_attention_layernorm",
     .up = "mlp.dense_h_to_4h",
     .down = "mlp.dense_4h_to_h"},
    {.policy = "opt",
     .note = "",
     .tower = {"model.decoder.layers"},
     FAMILY_SIZES(3, 0, 2, 6, 5),
     .activation = FAMILY_RELU,
     .marks = FAMILY_BIASES | FAMILY_CAUSAL,
     .self = FAMILY_OPT_SELF("self_attn_layer_norm"),
     .norm = "final_layer_norm",
     .up = "fc1",
     .down = "fc2"},
    {.policy = "bloom",
     .note = "",
     .tower = {"transformer.h"},
     FAMILY_SIZES(5, 0, 2, 10, 12),
     .stored = FAMILY_HEADS,
     .activation = FAMILY_GELU_TANH,
     .marks = FAMILY_BIASES | FAMILY_SCORES | FAMILY_CAUSAL,
     .self = {.at = "self_attention",
              .q = "self_attention.query_key_value",
              .out = "self_attention.dense",
              .norm = "input_layernorm",
              .heads = "num_heads"},
     .norm = "post_attention_layernorm",
     .up = "mlp.dense_h_to_4h",
     .down = "mlp.dense_4h_to_h"},
    {.policy = "llama",
     .note = "3 groups of 2",
     .tower = {"model.layers"},
     FAMILY_SIZES(6, 3, 2, 12, 10),
     .activation = FAMILY_SILU,
     .marks = FAMILY_RMS | FAMILY_ROPE | FAMILY_CAUSAL,
     .self = FAMILY_LLAMA_SELF("self_attn.o_proj"),
     FAMILY_LLAMA_MLP},
    {.policy = "llama",
     .note = "a bias that the policy does not name",
     .tower = {"model.layers"},
     FAMILY_SIZES(4, 0, 2, 8, 10),
     .activation = FAMILY_SILU,
     .marks = FAMILY_RMS | FAMILY_ROPE | FAMILY_CAUSAL | FAMILY_BIASES,
     .self = FAMILY_LLAMA_SELF("self_attn.o_proj"),
     FAMILY_LLAMA_MLP},
    {.policy = "mistral",
     .note = "fewer kv heads than ranks",
     .tower = {"model.layers"},
     FAMILY_SIZES(6, 2, 2, 12, 7),
     .activation = FAMILY_SILU,
     .marks = FAMILY_RMS | FAMILY_ROPE | FAMILY_CAUSAL,
     .self = FAMILY_LLAMA_SELF("self_attn.o_proj"),
     FAMILY_LLAMA_MLP},
    {.policy = "qwen2",
     .note = "one kv head",
     .tower = {"model.layers"},
     FAMILY_SIZES(3, 1, 4, 12, 10),
     .activation = FAMILY_SILU,
     .marks = FAMILY_RMS | FAMILY_ROPE | FAMILY_CAUSAL | FAMILY_BIAS_QKV,
     .self = FAMILY_LLAMA_SELF("self_attn.o_proj"),
     FAMILY_LLAMA_MLP},
    {.policy = "qwen2",
     .note = "4 groups of 2",
     .tower = {"layers"},
     FAMILY_SIZES(8, 4, 2, 8, 10),
     .activation = FAMILY_SILU,
     .marks = FAMILY_RMS | FAMILY_ROPE | FAMILY_CAUSAL | FAMILY_BIAS_QKV,
     .self = FAMILY_LLAMA_SELF("self_attn.o_proj"),
     FAMILY_LLAMA_MLP},
    {.policy = "phi",
     .note = "",
     .tower = {"model.layers"},
     FAMILY_SIZES(5, 0, 4, 20, 10),
     .order = FAMILY_ONE_NORM,
     .activation = FAMILY_GELU_TANH,
     .marks = FAMILY_BIASES | FAMILY_ROPE_HALF | FAMILY_CAUSAL,
     .self = FAMILY_LLAMA_SELF("self_attn.dense"),
     .up = "mlp.fc1",
     .down = "mlp.fc2"},
    {.policy = "bert",
     .note = "",
     .tower = {"bert.encoder.layer"},
     FAMILY_SIZES(3, 0, 4, 12, 10),
     .order = FAMILY_POST,
     .marks = FAMILY_BIASES,
     .self = FAMILY_BERT_SELF,
     .norm = "output.LayerNorm",
     FAMILY_BERT_MLP},
    {.policy = "bert",
     .note = "cross",
     .tower = {"encoder.layer"},
     FAMILY_SIZES(3, 0, 2, 6, 10),
     .order = FAMILY_POST,
     .marks = FAMILY_BIASES | FAMILY_DECODER | FAMILY_CAUSAL,
     .self = FAMILY_BERT_SELF,
     .cross = FAMILY_BERT_CROSS,
     .norm = "output.LayerNorm",
     FAMILY_BERT_MLP},
    {.policy = "roberta",
     .note = "",
     .tower = {"roberta.encoder.layer"},
     FAMILY_SIZES(5, 0, 2, 10, 10),
     .order = FAMILY_POST,
     .marks = FAMILY_BIASES,
     .self = FAMILY_BERT_SELF,
     .norm = "output.LayerNorm",
     FAMILY_BERT_MLP},
    {.policy = "distil_bert",
     .note = "",
     .tower = {"distilbert.transformer.layer"},
     FAMILY_SIZES(3, 0, 4, 12, 10),
     .order = FAMILY_POST,
     .marks = FAMILY_BIASES,
     .self = {.at = "attention",
              .q = "attention.q_lin",
              .k = "attention.k_lin",
              .v = "attention.v_lin",
              .out = "attention.out_lin",
              .norm = "sa_layer_norm",
              .heads = "n_heads"},
     .norm = "output_layer_norm",
     .up = "ffn.lin1",
     .down = "ffn.lin2"},
    {.policy = "electra",
     .note = "",
     .tower = {"electra.encoder.layer"},
     FAMILY_SIZES(2, 0, 4, 8, 5),
     .order = FAMILY_POST,
     .marks = FAMILY_BIASES,
     .self = FAMILY_BERT_SELF,
     .norm = "output.LayerNorm",
     FAMILY_BERT_MLP},
    {.policy = "albert",
     .note = "",
     .tower = {"albert.encoder.albert_layer_groups.0.albert_layers"},
     FAMILY_SIZES(3, 0, 4, 12, 10),
     .order = FAMILY_POST,
     .activation = FAMILY_GELU_TANH,
     .marks = FAMILY_BIASES,
     .self = {.at = "attention",
              .q = "attention.query",
              .k = "attention.key",
              .v = "attention.value",
              .out = "attention.dense",
              .norm = "attention.LayerNorm",
              .heads = "num_attention_heads"},
     .norm = "full_layer_layer_norm",
     .up = "ffn",
     .down = "ffn_output"},
    {.policy = "bart",
     .note = "",
     .tower = {"model.encoder.layers", "model.decoder.layers"},
     FAMILY_SIZES(3, 0, 4, 12, 10),
     .order = FAMILY_POST,
     .marks = FAMILY_BIASES,
     .marks2 = FAMILY_DECODER | FAMILY_CAUSAL,
     .self = FAMILY_OPT_SELF("self_attn_layer_norm"),
     .cross = {.at = "encoder_attn",
               .q = "encoder_attn.q_proj",
               .k = "encoder_attn.k_proj",
               .v = "encoder_attn.v_proj",
               .out = "encoder_attn.out_proj",
               .norm = "encoder_attn_layer_norm",
               .heads = "num_heads"},
     .norm = "final_layer_norm",
     .up = "fc1",
     .down = "fc2"},
    {.policy = "t5",
     .note = "",
     .tower = {"encoder.block", "decoder.block"},
     FAMILY_SIZES(3, 0, 4, 8, 10),
     .activation = FAMILY_RELU,
     .marks = FAMILY_RMS | FAMILY_SCORES | FAMILY_UNSCALED,
     .marks2 = FAMILY_DECODER | FAMILY_CAUSAL,
     .self = FAMILY_T5_SELF,
     .cross = FAMILY_T5_CROSS,
     .norm = "layer.1.layer_norm",
     .up = "layer.1.DenseReluDense.wi",
     .down = "layer.1.DenseReluDense.wo",
     .norm2 = "layer.2.layer_norm",
     .up2 = "layer.2.DenseReluDense.wi",
     .down2 = "layer.2.DenseReluDense.wo"},
    {.policy = "t5",
     .note = "gated, an encoder alone",
     .tower = {"encoder.block"},
     FAMILY_SIZES(5, 0, 2, 6, 10),
     .activation = FAMILY_GELU_TANH,
     .marks = FAMILY_RMS | FAMILY_SCORES | FAMILY_UNSCALED,
     .self = FAMILY_T5_SELF,
     .norm = "layer.1.layer_norm",
     .gate = "layer.1.DenseReluDense.wi_0",
     .up = "layer.1.DenseReluDense.wi_1",
     .down = "layer.1.DenseReluDense.wo"},
    {.policy = "vit",
     .note = "",
     .tower = {"vit.encoder.layer"},
     FAMILY_SIZES(3, 0, 4, 12, 10),
     .marks = FAMILY_BIASES,
     .self = FAMILY_VIT_SELF,
     .norm = "layernorm_after",
     FAMILY_BERT_MLP},
    {.policy = "clip",
     .note = "",
     .tower = {"text_model.encoder.layers", "vision_model.encoder.layers"},
     FAMILY_SIZES(3, 0, 4, 12, 10),
     .activation = FAMILY_QUICK_GELU,
     .marks = FAMILY_BIASES,
     .self = FAMILY_OPT_SELF("layer_norm1"),
     .norm = "layer_norm2",
     .up = "mlp.fc1",
     .down = "mlp.fc2",
     .heads2 = 2},
    {.policy = "deit",
     .note = "",
     .tower = {"deit.encoder.layer"},
     FAMILY_SIZES(5, 0, 2, 10, 10),
     .marks = FAMILY_BIASES,
     .self = FAMILY_VIT_SELF,
     .norm = "layernorm_after",
     FAMILY_BERT_MLP},
};

#endif
