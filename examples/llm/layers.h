/* layers.h - the layers of all models in this folder: tshard's attention and MLP with the sizes and
 * options of config.json, norms, embedding and head, each sharded over the ranks. Include tshard.h
 * first. */
#ifndef LLM_LAYERS_H
#define LLM_LAYERS_H

#include "folder.h"

struct llm_net;

/* A family of models, which a header of models/ defines. */
typedef struct llm_family {
    const char *type, *base;        /* model_type in config.json; prefix of names in the files */
    void (*config)(llm_config *c);  /* reads the keys of config.json */
    void (*add)(struct llm_net *m); /* makes the tree of modules */
    /* takes ids (B, T), returns the input of the first block (B, T, C) */
    tsh_tensor *(*embed)(struct llm_net *m, tsh_tensor *ids);
    /* takes the output of the last block (B, T, C), returns logits: (B, T, V) if m->all is 1, else
     * (B, 1, V). NULL for encoders, which return the output of the last block */
    tsh_tensor *(*finish)(struct llm_net *m, tsh_tensor *x);
    const tsh_rename *rename; /* maps names in the files to the tree's; NULL: they are the same */
} llm_family;

/* A model on one rank, and the batch of texts that it runs. */
typedef struct llm_net {
    tsh_ctx *ctx;
    llm_config *config;
    const llm_family *family;
    tsh_module *root, *base; /* parents of the head, and of all other modules: both are the ctx's
                              * root, as the tree's names have no prefix */
    tsh_module *blocks;      /* the container of the blocks, which run one after the other */
    tsh_cache *cache; /* keys and values of all tokens so far; NULL: none, as in training */
    int64_t rows;     /* number of texts in the batch */
    int64_t *past;    /* (rows): number of each text's tokens that the model has run; the ctx frees
                       * it */
    const int64_t *lengths; /* (rows): how many tokens of each text this forward has; the others in
                             * its row are padding; NULL: there is no padding */
    tsh_tensor *positions;  /* i32 (rows, n): rows of this forward's tokens in the table of learned
                             * positions; NULL: none */
    tsh_tensor *segments;   /* i32 (rows, n): for each token of this forward, the index of its text
                             * among those in its row; -1: padding; NULL: each row is one text */
    const int32_t *places;  /* (rows, n): the position of each token of this forward in its text;
                             * NULL: they follow those that the model has run */
    tsh_tensor *texts; /* (rows, length): all tokens so far, if rotary frequencies depend on the
                        * length of the text; else NULL */
    int64_t length;    /* most tokens that a text may have */
    int64_t expected;  /* a text will have so many tokens at least: while a prompt is run in chunks,
                        * rotary frequencies are already those of its whole length */
    llm_rope rope, local; /* as in config, but with the frequencies of the texts' length */
    int64_t layer;        /* index of the block that is being added */
    int all;              /* 1: logits of every token; 0: of the last one */
    int vectors; /* 1: forward returns the vectors (B, T, C) of every token that the head would
                  * read, for llm_loss and llm_accuracy */
    const char *head; /* name of the head's module, set by the first forward; NULL: none was run */
    tsh_tensor *slopes; /* ALiBi's slopes (1, H, 1, 1); NULL: none */
    tsh_tensor *bias;   /* ALiBi's mask of this forward, if there is a cache; else NULL */
} llm_net;

/* Runs the child with this name on x. */
LLM_API tsh_tensor *llm_call(tsh_module *module, const char *child, tsh_tensor *x) {
    return tsh_forward(tsh_find(module, child), x);
}

/* Returns x times factor; a factor of 0 stands for 1. */
LLM_API tsh_tensor *llm_scale(tsh_tensor *x, double factor) {
    return factor == 0 || factor == 1 ? x : tsh_scale(x, factor);
}

/* Soft cap: returns c tanh(x / c), or x if c is 0. */
LLM_API tsh_tensor *llm_cap(tsh_tensor *x, double c) {
    return c == 0 ? x : tsh_scale(tsh_tanh(tsh_scale(x, 1 / c)), c);
}

/* -- adding norms ----------------------------------------------------------- */

LLM_API void llm_add_norm(llm_net *m, tsh_module *parent, const char *name, int64_t dim) {
    const llm_config *c = m->config;
    const double eps = c->eps > 0 ? c->eps : TSH_ZERO;
    const tsh_layer_norm_desc layer = {.dim = dim, .eps = eps};
    const tsh_rms_norm_desc rms = {.dim = dim, .eps = eps, .plus_one = c->norm == LLM_RMS_ONE};
    if (c->norm == LLM_LAYER) tsh_add_layer_norm(parent, name, &layer);
    else tsh_add_rms_norm(parent, name, &rms);
}

/* -- adding attention and MLP ------------------------------------------------- */

/* Adds the attention of block m->layer. names: its linear layers' names, and how they are fused;
 * all other options are those of config.json. */
LLM_API void llm_add_attention(llm_net *m, tsh_module *parent, const char *name,
                              const tsh_attention_layer_desc *names) {
    const llm_config *c = m->config;
    const int slides = c->slides[m->layer] && c->window > 0;
    const llm_rope *turns = slides && c->local.on ? &m->local : &m->rope;
    const tsh_rope_desc rope = {.dims = turns->dims, .freqs = turns->freqs,
                                .factor = turns->factor};
    const tsh_rms_norm_desc norm = {.eps = c->eps > 0 ? c->eps : TSH_ZERO,
                                    .plus_one = c->norm == LLM_RMS_ONE};
    tsh_attention_layer_desc desc = *names;
    desc.dim = c->width;
    desc.heads = c->heads;
    desc.kv_heads = c->kv_heads;
    desc.head_dim = c->head_size;
    desc.qkv_bias = c->qkv_bias ? TSH_YES : TSH_NO;
    desc.out_bias = c->out_bias ? TSH_YES : TSH_NO;
    desc.reversed = names->reversed && !c->rows_out;
    if (turns->on && !c->no_rope[m->layer]) desc.rope = &rope;
    if (c->qk_norm != LLM_NO_NORM) desc.qk_norm = &norm;
    desc.norm_all_heads = c->qk_norm == LLM_NORM_OF_ALL;
    desc.attention.causal = c->causal;
    desc.attention.scale = c->scale;
    /* A window of w keeps keys at distances below w. Models without a causal mask also see the keys
     * at distance c->window. */
    desc.attention.window = slides ? c->window + !c->causal : 0;
    desc.attention.soft_cap = c->score_cap;
    tsh_add_attention(parent, name, &desc);
}

/* Adds an MLP. names: its linear layers' names, whether it has a gate, and whether that is fused;
 * all other options are those of config.json. */
LLM_API void llm_add_mlp(llm_net *m, tsh_module *parent, const char *name,
                        const tsh_mlp_desc *names) {
    const llm_config *c = m->config;
    tsh_mlp_desc desc = *names;
    desc.dim = c->width;
    desc.hidden = c->hidden;
    desc.activation = c->act;
    desc.bias = c->mlp_bias ? TSH_YES : TSH_NO;
    desc.reversed = names->reversed && !c->rows_out;
    tsh_add_mlp(parent, name, &desc);
}

/* -- adding and running embeddings, blocks and head ------------------------- */

LLM_API void llm_add_embedding(llm_net *m, tsh_module *parent, const char *name) {
    const tsh_embedding_desc desc = {.count = m->config->vocabulary, .dim = m->config->width,
                                     .style = TSH_ROWWISE};
    tsh_add_embedding(parent, name, &desc);
}

/* Runs the embedding `name` on ids. The result has the ctx's dtype, though the weight of a GGUF
 * file may have another. */
LLM_API tsh_tensor *llm_embed(llm_net *m, const char *name, tsh_tensor *ids) {
    return tsh_cast(llm_call(m->base, name, ids), TSH_DTYPE_DEFAULT);
}

/* Adds an embedding of learned positions: row `skip` is that of position 0, and the rows before it
 * are not used. */
LLM_API void llm_add_places(llm_net *m, tsh_module *parent, const char *name, int64_t skip) {
    const tsh_embedding_desc desc = {.count = m->config->places + skip, .dim = m->config->width};
    tsh_add_embedding(parent, name, &desc);
}

/* Returns for each token of ids (B, T) the row of its position in the table of llm_add_places, with
 * the same `skip`, as int32 (B, T). */
LLM_API tsh_tensor *llm_places(llm_net *m, tsh_tensor *ids, int64_t skip) {
    const int64_t rows = tsh_size(ids, 0), n = tsh_size(ids, 1);
    int32_t *at = (int32_t *)malloc((size_t)(rows * n) * sizeof *at);
    for (int64_t i = 0; i < rows * n && at; i++)
        at[i] = (int32_t)(skip + (m->places ? m->places[i] : m->past[i / n] + i % n));
    if (at)
        m->positions = tsh_from(m->ctx, at, tsh_shape2(rows, n), TSH_I32);
    else (void)tsh_fail(m->ctx, TSH_ERR_MEMORY, "not enough memory");
    free(at);
    return m->positions;
}

/* Returns how many tokens the longest text of the batch has after the forward of ids (B, T), which
 * is the number of keys that its attention reads. */
LLM_API int64_t llm_keys(const llm_net *m, tsh_tensor *ids) {
    int64_t most = 0;
    for (int64_t b = 0; b < m->rows; b++) {
        const int64_t n = m->past[b] + (m->lengths ? m->lengths[b] : tsh_size(ids, 1));
        if (n > most) most = n;
    }
    return most;
}

/* Adds m->blocks, which contains the model's blocks, named "0", "1" ...; `block` is the forward of
 * each, and `add` adds its layers. Add what runs before the blocks before them, and what runs after
 * them later: a pipeline gives the former to its first stage, the latter to its last. */
LLM_API void llm_add_blocks(llm_net *m, tsh_module *parent, const char *name,
                           tsh_forward_fn block, void (*add)(llm_net *m, tsh_module *self)) {
    const tsh_module_desc desc = {.forward = block, .user = m};
    tsh_module *blocks = m->blocks = tsh_add_module(parent, name, NULL);
    for (int64_t i = 0; i < m->config->layers; i++) {
        char number[24];
        snprintf(number, sizeof number, "%d", (int)i);
        tsh_module *self = tsh_add_module(blocks, number, &desc);
        tsh_checkpoint(self, 1); /* frees a block's activations before the next block runs */
        m->layer = i;
        add(m, self);
    }
}

/* Adds the head, a classifier that gives logits, sharded over the vocabulary. If c->tied, its
 * weight is that of the module `embedding`. A headless model gets no head. */
LLM_API void llm_add_head(llm_net *m, const char *name, int bias, const char *embedding) {
    const llm_config *c = m->config;
    if (c->headless) return;
    const tsh_classifier_desc desc = {.in = c->width,
                                      .classes = c->vocabulary,
                                      .bias = bias ? TSH_YES : TSH_NO,
                                      .style = TSH_COLWISE};
    tsh_module *head = tsh_add_classifier(m->root, name, &desc);
    if (c->tied) tsh_tie(head, "weight", tsh_param(tsh_find(m->base, embedding), "weight"));
}

/* Returns the logits (.., V) of vectors x (.., C), by the head m->head. */
static tsh_tensor *llm_head_logits(const llm_net *m, tsh_tensor *x) {
    const llm_config *c = m->config;
    return llm_cap(llm_scale(llm_call(m->root, m->head, x), c->logit_scale), c->logit_cap);
}

/* Runs the head: x (B, T, C) -> logits (B, T, V). A headless model returns x, and so does a forward
 * with m->vectors. */
LLM_API tsh_tensor *llm_head(llm_net *m, const char *name, tsh_tensor *x) {
    if (m->config->headless) return x;
    m->head = name;
    return m->vectors ? x : llm_head_logits(m, x);
}

/* Returns the vectors of x (B, T, C) that the head reads: all of them if m->all or m->vectors is 1
 * or the model is headless, else that of the last token, (B, 1, C). */
LLM_API tsh_tensor *llm_last(const llm_net *m, tsh_tensor *x) {
    const int64_t count = tsh_size(x, 1);
    const int every = m->all || m->vectors || m->config->headless;
    return every || count < 2 ? x : tsh_slice(x, 1, count - 1, 1);
}

/* Sets m->slopes to the slopes of ALiBi (Press et al. 2022). With n the largest power of two up to
 * the number of heads, head i < n has the slope 2^(-8 (i + 1) / n); head i >= n has
 * 2^(-4 (2 (i - n) + 1) / n), every other slope of a model with 2 n heads. */
LLM_API void llm_add_slopes(llm_net *m) {
    float slope[LLM_MOST_HEADS];
    const int64_t heads = m->config->heads;
    int64_t n = 1;
    while (2 * n <= heads) n *= 2;
    for (int64_t i = 0; i < heads; i++)
        slope[i] = (float)(i < n ? pow(2, -8.0 * (double)(i + 1) / (double)n)
                                 : pow(2, -4.0 * (double)(2 * (i - n) + 1) / (double)n));
    m->slopes = tsh_tensor_from(m->ctx, TSH_F32, tsh_shape4(1, heads, 1, 1), tsh_replicated(),
                                slope);
}

/* Returns ALiBi's mask (1, H, 1, keys): slope times the key's position. For each query it differs
 * from slope times (key's minus query's position) by a constant, which softmax ignores. So texts in
 * the middle of a row (m->segments) need no other mask: theirs differs by another constant. */
LLM_API tsh_tensor *llm_alibi(const llm_net *m, int64_t keys) {
    tsh_tensor *place = tsh_arange(m->ctx, TSH_REAL, 0, (double)keys, 1);
    return tsh_mul(m->slopes, tsh_reshape(place, tsh_shape4(1, 1, 1, keys)));
}

#endif
