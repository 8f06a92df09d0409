/* decoder.h - a Llama or a GPT-2 of random weights that keeps keys and values: make it, read a
 * prompt, decode a token. Include tshard.h first.
 *
 * Shapes: B = 1, T tokens, C width, H heads, D = C / H. */
#ifndef TSHARD_TESTS_DECODER_H
#define TSHARD_TESTS_DECODER_H

#include "llama_shapes.h"

enum { DECODER_PLACES = 1024 }; /* the longest text */

/* Modules of a layer, and its keys and values of all places so far. */
typedef struct decoder_layer {
    tsh_module *norm, *qkv, *q, *k, *v, *o, *feed_norm, *gate, *up, *down;
    tsh_tensor *keys, *values;
} decoder_layer;

typedef struct decoder {
    const llama_shape *s;
    tsh_dtype activations, cache; /* cache: of keys and values */
    tsh_module *embed, *places, *norm, *head;
    decoder_layer layer[LLAMA_MOST_LAYERS];
} decoder;

/* unit: features that stay together, 0: any; segments: equal parts that are cut alike. */
static tsh_module *decoder_linear(tsh_module *parent, const char *name, const llama_shape *s,
                                  tsh_dtype dtype, int in, int out, tsh_style style, int unit,
                                  int segments) {
    const tsh_linear_desc desc = {.in = in,
                                  .out = out,
                                  .bias = s->gpt2 ? TSH_YES : TSH_NO,
                                  .style = style,
                                  .unit = unit,
                                  .segments = segments,
                                  .dtype = dtype};
    return tsh_add_linear(parent, name, &desc);
}

static tsh_module *decoder_norm(tsh_module *parent, const char *name, const llama_shape *s) {
    const tsh_layer_norm_desc layer = {.dim = s->dim};
    const tsh_rms_norm_desc rms = {.dim = s->dim};
    return s->gpt2 ? tsh_add_layer_norm(parent, name, &layer)
                   : tsh_add_rms_norm(parent, name, &rms);
}

static void decoder_add_layer(tsh_module *self, decoder_layer *l, const llama_shape *s,
                              tsh_dtype dtype) {
    const int head = s->dim / s->heads, kv = head * s->kv_heads, all = s->hidden;
    l->norm = decoder_norm(self, "norm", s);
    if (s->gpt2) {
        l->qkv = decoder_linear(self, "qkv", s, dtype, s->dim, 3 * s->dim, TSH_COLWISE, head, 3);
    } else {
        l->q = decoder_linear(self, "q", s, dtype, s->dim, s->dim, TSH_COLWISE, head, 0);
        l->k = decoder_linear(self, "k", s, dtype, s->dim, kv, TSH_COLWISE, head, 0);
        l->v = decoder_linear(self, "v", s, dtype, s->dim, kv, TSH_COLWISE, head, 0);
        l->gate = decoder_linear(self, "gate", s, dtype, s->dim, all, TSH_COLWISE, 0, 0);
    }
    l->o = decoder_linear(self, "o", s, dtype, s->dim, s->dim, TSH_ROWWISE, head, 0);
    l->feed_norm = decoder_norm(self, "feed_norm", s);
    l->up = decoder_linear(self, "up", s, dtype, s->dim, all, TSH_COLWISE, 0, 0);
    l->down = decoder_linear(self, "down", s, dtype, all, s->dim, TSH_ROWWISE, 0, 0);
}

/* The dtype of activations, which tsh_desc.dtype should be: bf16 with weights in bf16, as products
 * of both are faster; else f32. */
static tsh_dtype decoder_activations(tsh_dtype weights) {
    return weights == TSH_BF16 ? TSH_BF16 : TSH_F32;
}

/* The model, without values yet, its weights in their dtype at once. GPT-2's head has the
 * embedding's weight. */
static void decoder_add(tsh_ctx *ctx, decoder *m, const llama_shape *s, tsh_dtype weights) {
    const int in_blocks = weights == TSH_Q8_0 || weights == TSH_Q4_0;
    const tsh_dtype dtype = in_blocks ? TSH_F32 : weights; /* quantised before it has values */
    const tsh_init init = {.kind = TSH_INIT_UNIFORM, .a = -1, .b = 1};
    const tsh_embedding_desc embed = {.count = s->vocab, .dim = s->dim, .init = init,
                                      .style = s->gpt2 ? TSH_ROWWISE : TSH_PLAIN, .dtype = dtype};
    const tsh_embedding_desc places = {.count = DECODER_PLACES, .dim = s->dim, .init = init};
    const tsh_linear_desc head = {.in = s->dim, .out = s->vocab, .bias = TSH_NO,
                                  .style = s->gpt2 ? TSH_PLAIN : TSH_COLWISE, .dtype = dtype};
    tsh_module *root = tsh_root(ctx);
    memset(m, 0, sizeof *m);
    m->s = s;
    m->activations = decoder_activations(weights);
    m->cache = weights == TSH_BF16 ? TSH_BF16 : in_blocks || weights == TSH_F16 ? TSH_F16 : TSH_F32;
    m->embed = tsh_add_embedding(root, "embed", &embed);
    if (s->gpt2) m->places = tsh_add_embedding(root, "places", &places);
    for (int i = 0; i < s->layers; i++) {
        char name[24];
        snprintf(name, sizeof name, "layer%d", i);
        decoder_add_layer(tsh_add_module(root, name, NULL), &m->layer[i], s, dtype);
    }
    m->norm = decoder_norm(root, "norm", s);
    m->head = tsh_add_linear(root, "head", &head);
    if (s->gpt2) tsh_tie(m->head, "weight", tsh_param(m->embed, "weight"));
    if (in_blocks) tsh_quantize(root, "embed", weights);
    if (in_blocks) tsh_quantize(root, "layer*.*", weights);
    if (in_blocks) tsh_quantize(root, "head", weights);
    tsh_train(root, 0);
}

/* The same with random values. */
static void decoder_make(tsh_ctx *ctx, decoder *m, const llama_shape *s, tsh_dtype weights) {
    decoder_add(ctx, m, s, weights);
    tsh_materialize(tsh_root(ctx));
}

/* (1, T, C) -> (1, H, T, D) */
static tsh_tensor *decoder_heads(tsh_tensor *x, int64_t features) {
    const tsh_shape shape = tsh_shape4(1, tsh_size(x, 1), tsh_size(x, -1) / features, features);
    return tsh_transpose(tsh_reshape(x, shape), 1, 2);
}

/* x: (1, T, C), T tokens from `place` on. */
static tsh_tensor *decoder_attend(decoder *m, decoder_layer *l, tsh_tensor *x, int64_t place) {
    const llama_shape *s = m->s;
    const tsh_rope_desc rope = {.interleaved = 1, .start = place};
    const int64_t features = s->dim / s->heads;
    tsh_tensor *qkv[3] = {NULL, NULL, NULL}, *y;
    if (s->gpt2) {
        tsh_split(tsh_forward(l->qkv, x), -1, 3, qkv);
    } else {
        qkv[0] = tsh_forward(l->q, x);
        qkv[1] = tsh_forward(l->k, x);
        qkv[2] = tsh_forward(l->v, x);
    }
    for (int i = 0; i < 3; i++) qkv[i] = decoder_heads(qkv[i], features);
    for (int i = 0; i < 2 && !s->gpt2; i++) qkv[i] = tsh_rope(qkv[i], &rope);
    if (l->keys == NULL) {
        const tsh_shape shape = tsh_shape4(1, s->kv_heads, DECODER_PLACES, features);
        const tsh_layout layout = tsh_layout_of(qkv[1]);
        l->keys = tsh_tensor_new(tsh_ctx_of(x), m->cache, shape, layout);
        l->values = tsh_tensor_new(tsh_ctx_of(x), m->cache, shape, layout);
    }
    const tsh_attention_desc desc = {
        .causal = 1, .cache_k = l->keys, .cache_v = l->values, .past = place};
    y = tsh_transpose(tsh_attention(qkv[0], qkv[1], qkv[2], &desc), 1, 2);
    return tsh_forward(l->o, tsh_reshape(y, tsh_shape3(1, tsh_size(x, 1), s->dim)));
}

/* ids (1, T), from `place` on -> the last one's logits (1, 1, V). */
__attribute__((unused)) static tsh_tensor *decoder_run(decoder *m, tsh_tensor *ids, int64_t place) {
    const int64_t count = tsh_size(ids, 1);
    tsh_tensor *x = tsh_cast(tsh_forward(m->embed, ids), m->activations);
    if (m->places) {
        tsh_tensor *at = tsh_arange(tsh_ctx_of(ids), TSH_I32, (double)place,
                                    (double)(place + count), 1);
        x = tsh_add(x, tsh_forward(m->places, at));
    }
    for (int i = 0; i < m->s->layers; i++) {
        decoder_layer *l = &m->layer[i];
        tsh_tensor *y = decoder_attend(m, l, tsh_forward(l->norm, x), place);
        if (i + 1 == m->s->layers && count > 1) { /* nothing reads the others any more */
            x = tsh_slice(x, 1, count - 1, 1);
            y = tsh_slice(y, 1, count - 1, 1);
        }
        y = tsh_forward_residual(l->feed_norm, &x, y); /* x += y; of that the norm */
        if (m->s->gpt2)
            y = tsh_gelu_tanh(tsh_forward(l->up, y));
        else
            y = tsh_mul(tsh_silu(tsh_forward(l->gate, y)), tsh_forward(l->up, y));
        x = tsh_add(x, tsh_forward(l->down, y));
    }
    return tsh_forward(m->head, tsh_forward(m->norm, x));
}

#endif
