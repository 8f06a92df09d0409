/* model.h - a folder from the Hugging Face hub as a model on this rank: which family, its layers,
 * its weights, and the logits of tokens. Include tshard.h first; folder.h tells what it needs. */
#ifndef LLM_MODEL_H
#define LLM_MODEL_H

#include "folder.h"
#include "layers.h"
#include "models/llama.h"

#include "models/bert.h"
#include "models/bloom.h"
#include "models/falcon.h"
#include "models/gemma.h"
#include "models/gpt2.h"
#include "models/gpt_neox.h"
#include "models/granite.h"
#include "models/mistral.h"
#include "models/olmo2.h"
#include "models/opt.h"
#include "models/phi.h"
#include "models/phi3.h"
#include "models/qwen2.h"
#include "models/qwen3.h"
#include "models/smollm3.h"
#include "models/starcoder2.h"

/* The family of a model_type; NULL. */
static const llm_family *llm_family_find(const char *type, char *names, size_t size) {
    static const llm_family *const all[] = {
        &bert_family,     &bloom_family,   &falcon_family, &gemma_family, &gpt2_family,
        &gpt_neox_family, &granite_family, &llama_family,  &mistral_family, &olmo2_family,
        &opt_family,      &phi_family,     &phi3_family,   &qwen2_family, &qwen3_family,
        &roberta_family,  &smollm3_family, &starcoder2_family};
    size_t n = 0;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        if (strcmp(all[i]->type, type) == 0) return all[i];
        n += (size_t)snprintf(names + n, n < size ? size - n : 0, "%s%s", i ? ", " : "",
                              all[i]->type);
    }
    return NULL;
}

/* Reads a folder's config.json; 0: c->error says why not. llm_config_free in either case. */
static int llm_config_read(llm_config *c, const char *folder, const llm_family **family) {
    char names[256];
    if (!llm_config_open(c, folder)) return 0;
    *family = llm_family_find(c->type, names, sizeof names);
    if (!*family)
        llm_refuse(c, "config.json: model_type is \"%s\"; supported are %s", c->type, names);
    else
        (*family)->config(c);
    return c->error[0] == 0 && llm_config_close(c);
}

/* The most tokens that a text may have; 0: any. */
static int64_t llm_longest(const llm_config *c, const char **why) {
    int64_t most = 0;
    const struct {
        int64_t n;
        const char *why;
    } limit[] = {{c->places, "the model has no more positions"},
                 {c->window, "sliding_window is that long, and a longer text is not supported"},
                 {c->rope.limit, "rotary scaling beyond the original length is not supported"}};
    for (int i = 0; i < 3; i++) {
        if (limit[i].n == 0 || (most && limit[i].n >= most)) continue;
        most = limit[i].n;
        *why = limit[i].why;
    }
    return most;
}

/* Tensors that are no parameters, or the embedding once more where the head is tied to it. */
enum { LLM_TIED = 2 };
static const char *const llm_ignored[] = {
    "lm_head.weight", "embed_out.weight", "**.inv_freq", "**.attn.bias", "**.attention.bias",
    "**.masked_bias", "**.position_ids", "**.pooler.**", "pooler.**", "cls.**", NULL};

/* Makes the model, for `rows` texts of at most `length` tokens, and loads its weights. weights:
 * TSH_Q8_0 or TSH_Q4_0, or 0: as they are, in the dtype of the ctx. Errors are the ctx's. */
static tsh_result llm_model_load(llm_net *m, tsh_ctx *ctx, llm_config *c,
                                 const llm_family *family, const char *folder, int64_t rows,
                                 int64_t length, tsh_dtype weights) {
    const tsh_file_desc file = {.prefix = family->base,
                                .rename = family->rename,
                                .ignore = llm_ignored + (c->tied || c->encoder ? 0 : LLM_TIED)};
    memset(m, 0, sizeof *m);
    m->ctx = ctx;
    m->config = c;
    m->family = family;
    m->rows = rows;
    m->root = m->base = tsh_root(ctx);
    family->add(m);
    if (weights) tsh_quantize(m->root, NULL, weights);
    tsh_train(m->root, 0);
    if (tsh_load_with(m->root, folder, NULL, &file) == TSH_OK && !c->encoder)
        m->cache = tsh_cache_new(m->root, rows, length, TSH_DTYPE_DEFAULT);
    return tsh_last_error(ctx)->code;
}

/* The logits (rows, T or 1, V), sharded over the vocabulary, of ids (rows, n) that follow the
 * m->past[b] before: of text b the first lengths[b], NULL: all; the others are padding. A single
 * text goes back if a caller lowers m->past[0]. The logits live until the scope ends. */
static tsh_tensor *llm_logits(llm_net *m, const int32_t *ids, int64_t n, const int64_t *lengths) {
    tsh_tensor *owned = tsh_tensor_from(m->ctx, TSH_I32, tsh_shape2(m->rows, n), NULL, ids);
    m->lengths = lengths;
    if (m->cache && m->rows == 1 && m->past[0] < tsh_cache_length(m->cache))
        tsh_cache_truncate(m->cache, m->past[0]);
    if (m->cache) tsh_cache_counts(m->cache, lengths);
    tsh_tensor *logits = m->family->forward(m, owned);
    tsh_tensor_free(owned);
    for (int64_t b = 0; b < m->rows; b++) m->past[b] += lengths ? lengths[b] : n;
    if (m->positions) tsh_tensor_free(m->positions);
    m->positions = m->bias = NULL;
    return logits;
}

#endif
