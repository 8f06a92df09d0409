/* encoder.h - texts for the fine-tuning of an encoder, such as BERT: their tokens, batches of texts
 * of unequal lengths, and the mean of each text's vectors, with gradients. Before the ranks start:
 *
 *     llm_encoder e;
 *     if (!llm_encoder_open(&e, folder) || !llm_encoder_add(&e, "a text") || ...) puts(e.error);
 *
 * On each rank, with a model that llm_model_load makes of e.config, e.family and e.how.folder:
 *
 *     x = llm_encoder_means(&model, &e, first, rows);          (rows, width)
 *
 * After they have ended: llm_encoder_close(&e). Include tshard.h first; link with it, cJSON and
 * PCRE2. */
#ifndef LLM_ENCODER_H
#define LLM_ENCODER_H

#include "embed.h"
#include "model.h"
#include "tokenizer.h"

typedef struct llm_encoder {
    embed_model how; /* what modules.json says: the prompt before each text, the longest length */
    llm_config config;
    const llm_family *family;
    llm_tokenizer *tokenizer;
    int64_t count;    /* number of texts */
    int64_t longest;  /* number of tokens of the longest text */
    int32_t **ids;    /* ids[i]: the tokens of text i */
    int64_t *lengths; /* lengths[i]: number of tokens of text i */
    char error[TSH_MESSAGE_SIZE];
} llm_encoder;

/* Opens the model's folder without its weights: config, tokenizer, how texts are cut. Returns 0:
 * e->error says why not. Call llm_encoder_close in either case. */
LLM_API int llm_encoder_open(llm_encoder *e, const char *folder) {
    char path[4200];
    memset(e, 0, sizeof *e);
    const int ok = embed_open(&e->how, folder) &&
                   llm_config_read(&e->config, e->how.folder, &e->family) &&
                   embed_begin(&e->how, &e->config);
    e->config.headless = 1; /* the model gives vectors, no logits */
    (void)snprintf(path, sizeof path, "%s/tokenizer.json", e->how.folder);
    if (ok) e->tokenizer = llm_tokenizer_open(path, e->error, sizeof e->error);
    else (void)snprintf(e->error, sizeof e->error, "%s",
                        e->how.error[0] ? e->how.error : e->config.error);
    return e->tokenizer != NULL;
}

/* Appends a text. Returns 0: e->error says why not. */
LLM_API int llm_encoder_add(llm_encoder *e, const char *text) {
    const size_t n = (size_t)e->count + 1;
    int32_t **ids = (int32_t **)realloc(e->ids, n * sizeof *ids);
    if (ids) e->ids = ids;
    int64_t *lengths = (int64_t *)realloc(e->lengths, n * sizeof *lengths);
    if (lengths) e->lengths = lengths;
    if (!ids || !lengths) {
        (void)snprintf(e->error, sizeof e->error, "not enough memory");
        return 0;
    }
    ids[n - 1] = NULL;
    lengths[n - 1] = embed_encode(&e->how, e->tokenizer, text, strlen(text), 1, &ids[n - 1]);
    if (lengths[n - 1] < 1) {
        const int empty = lengths[n - 1] == 0;
        free(ids[n - 1]);
        (void)snprintf(e->error, sizeof e->error, "\"%.100s\" %.300s", text,
                       empty ? "has no token" : e->how.error);
        return 0;
    }
    if (lengths[n - 1] > e->longest) e->longest = lengths[n - 1];
    e->count++;
    return 1;
}

LLM_API void llm_encoder_close(llm_encoder *e) {
    for (int64_t i = 0; i < e->count; i++) free(e->ids[i]);
    free(e->ids);
    free(e->lengths);
    llm_tokenizer_free(e->tokenizer);
    embed_close(&e->how);
    llm_config_free(&e->config);
    memset(e, 0, sizeof *e);
}

/* Runs the model on the texts [first, first + rows). Returns for each text the mean of its tokens'
 * vectors, a tensor (rows, width); NULL: an error. Shorter texts are padded to the longest one; no
 * token attends to padding, which has segment -1. */
LLM_API tsh_tensor *llm_encoder_means(llm_net *m, const llm_encoder *e, int64_t first,
                                      int64_t rows) {
    int64_t n = 1;
    if (first < 0 || rows < 1 || rows > e->count - first) {
        (void)tsh_fail(m->ctx, TSH_ERR_ARGUMENT,
                       "llm_encoder_means: %lld texts from text %lld on, of %lld; at least one, "
                       "all of which llm_encoder_add has added",
                       (long long)rows, (long long)first, (long long)e->count);
        return NULL;
    }
    for (int64_t b = 0; b < rows; b++)
        if (e->lengths[first + b] > n) n = e->lengths[first + b];
    const tsh_shape shape = tsh_shape2(rows, n);
    const size_t tokens = (size_t)rows * (size_t)n;
    int32_t *ids = (int32_t *)calloc(tokens, 3 * sizeof *ids);
    int32_t *segments = ids ? ids + tokens : NULL, *places = ids ? segments + tokens : NULL;
    float *weight = (float *)calloc(tokens, sizeof *weight); /* each token's share in the mean */
    tsh_tensor *x = NULL;
    for (int64_t i = 0; i < rows * n && ids && weight; i++) {
        const int64_t text = first + i / n, at = i % n;
        segments[i] = at < e->lengths[text] ? 0 : -1;
        places[i] = (int32_t)at;
        if (segments[i] < 0) continue;
        ids[i] = e->ids[text][at];
        weight[i] = 1 / (float)e->lengths[text];
    }
    if (ids && weight) {
        m->segments = tsh_from(m->ctx, segments, shape, TSH_I32);
        m->places = places;
        x = llm_forward(m, tsh_from(m->ctx, ids, shape, TSH_I32)); /* (rows, n, width) */
        m->segments = NULL;
        m->places = NULL;
        x = tsh_mul(x, tsh_from(m->ctx, weight, tsh_shape3(rows, n, 1), TSH_F32));
        x = tsh_sum(x, 1, 0);
    } else {
        (void)tsh_fail(m->ctx, TSH_ERR_MEMORY, "not enough memory");
    }
    free(weight);
    free(ids);
    return x;
}

#endif
