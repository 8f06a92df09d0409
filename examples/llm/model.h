/* model.h - loads a folder of the Hugging Face hub, or a GGUF file, as a model on this rank: finds
 * its family, makes its layers, loads its weights, and computes logits. Include tshard.h first;
 * folder.h and gguf.h say which libraries they need. */
#ifndef LLM_MODEL_H
#define LLM_MODEL_H

#include "adapter.h"
#include "folder.h"
#include "gguf_parts.h"
#include "layers.h"
#include "weights.h"
#include "models/llama.h"

#include "models/bert.h"
#include "models/bloom.h"
#include "models/falcon.h"
#include "models/gemma.h"
#include "models/gemma2.h"
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

/* Returns the family for a model_type. NULL: there is none, and `names`, of `size` bytes, gets a
 * list of the types that are supported. */
static const llm_family *llm_family_find(const char *type, char *names, size_t size) {
    static const llm_family *const all[] = {
        &bert_family,     &bloom_family,   &falcon_family, &gemma_family,
        &gemma2_family,   &gemma3_family,  &gpt2_family,
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

/* Reads the metadata of the GGUF file c->gguf in place of config.json, by llm_config_take. path:
 * its name for errors. Returns 0, with c->error, on failure. */
static int llm_gguf_take(llm_config *c, const char *path) {
    cJSON *json = gguf_config(c->gguf);
    if (json) return llm_config_take(c, json, path);
    llm_refuse(c, "%s", c->gguf->error);
    return 0;
}

/* Opens the GGUF file at `path` as c->gguf, and reads its metadata by llm_gguf_take. Returns 0,
 * with c->error, on failure. */
static int llm_gguf_config(llm_config *c, const char *path) {
    char error[512];
    c->gguf = gguf_open(path, error, sizeof error);
    if (c->gguf) return llm_gguf_take(c, path);
    llm_refuse(c, "%s", error);
    return 0;
}

/* Sets in c what a GGUF file says by its tensors, not its metadata: factors of the rotary
 * frequencies, and which layers have biases; and in which form GGUF files store weights. */
static void llm_gguf_adjust(llm_config *c) {
    const unsigned char *factors = gguf_factors(c->gguf, c->rope.dims / 2);
    for (int64_t i = 0; i < c->rope.dims / 2 && factors; i++) {
        const uint32_t bits = (uint32_t)gguf_word(factors + 4 * i, 4);
        float factor;
        memcpy(&factor, &bits, sizeof factor);
        c->rope.freqs[i] /= (double)factor;
    }
    c->rows_out = 1;
    c->qkv_bias = gguf_has_bias(c->gguf, "attn_q") || gguf_has_bias(c->gguf, "attn_qkv");
    c->out_bias = gguf_has_bias(c->gguf, "attn_output");
    c->mlp_bias = gguf_has_bias(c->gguf, "ffn_up");
    /* Where a norm multiplies by weight + 1, GGUF files store the sum: it is a plain RMS norm. */
    if (c->norm == LLM_RMS_ONE) c->norm = LLM_RMS;
    if (c->gguf->error[0]) llm_refuse(c, "%s", c->gguf->error);
}

/* Makes an error that begins with "config.json: " begin with the path of the GGUF file instead. */
static void llm_gguf_rename_error(llm_config *c, const char *path) {
    static const char in_json[] = "config.json: ";
    const size_t n = sizeof in_json - 1;
    char text[TSH_MESSAGE_SIZE];
    if (strncmp(c->error, in_json, n) != 0) return;
    snprintf(text, sizeof text, "%.300s: %s", path, c->error + n);
    strcpy(c->error, text);
}

/* Called after llm_config_take: finds the model's family, which reads its keys. Returns 0, with
 * c->error, on failure. */
static int llm_config_finish(llm_config *c, const llm_family **family) {
    char names[256];
    *family = llm_family_find(c->type, names, sizeof names);
    if (!*family)
        llm_refuse(c, "config.json: model_type is \"%s\"; supported are %s", c->type, names);
    else
        (*family)->config(c);
    const cJSON *causal = cJSON_GetObjectItemCaseSensitive(c->unread, "is_causal");
    if (cJSON_IsNull(causal)) /* ambiguous: some families take null for false */
        llm_refuse_value(c, "is_causal", causal, "it must be true or false");
    c->causal = llm_config_flag(c, "is_causal", !c->encoder);
    if (c->eps < 0)
        llm_refuse(c, "config.json: the norms add %g to a mean of squares; it must not be negative",
                   c->eps);
    return c->error[0] == 0;
}

/* Called after llm_config_take: reads all other keys, and refuses unknown ones. path: the GGUF
 * file, for errors. Returns 0, with c->error, on failure. */
static int llm_config_rest(llm_config *c, const char *path, const llm_family **family) {
    if (llm_config_finish(c, family) && c->gguf) llm_gguf_adjust(c);
    const int ok = c->error[0] == 0 && llm_config_close(c);
    if (c->gguf) llm_gguf_rename_error(c, path);
    return ok;
}

/* Reads the configuration of a model, the config.json of a folder or the metadata of a GGUF file,
 * into c, and sets *family. options may be NULL. Returns 0 on failure; c->error says why. The
 * caller calls llm_config_free in either case. */
LLM_API int llm_config_read_with(llm_config *c, const char *folder, const llm_family **family,
                                 const llm_options *options) {
    const int is_file = gguf_is_file(folder);
    memset(c, 0, sizeof *c);
    if (options) c->options = *options;
    int ok = is_file ? llm_gguf_config(c, folder) : llm_config_open(c, folder);
    if (!ok && is_file) llm_gguf_rename_error(c, folder);
    char other[1024];
    ok = ok && llm_config_rest(c, folder, family);
    if (ok && !is_file && llm_found_for_weights(folder, other, sizeof other)) {
        llm_refuse(c, "%s", other);
        ok = 0;
    }
    if (ok && !is_file && c->tied) llm_check_head(c, folder, (*family)->base);
    return ok && !c->error[0];
}

/* Reads the configuration of a model as llm_config_read_with does, without options. */
LLM_API int llm_config_read(llm_config *c, const char *folder, const llm_family **family) {
    return llm_config_read_with(c, folder, family, NULL);
}

LLM_API void llm_config_free(llm_config *c) {
    cJSON_Delete(c->unread);
    cJSON_Delete(c->read);
    gguf_close(c->gguf);
    c->unread = c->read = NULL;
    c->gguf = NULL;
}

/* Returns the most tokens that a text may have; then *why says why there is a limit. 0: no
 * limit. */
LLM_API int64_t llm_longest(const llm_config *c, const char **why) {
    if (c->places) *why = "the model has no more positions";
    return c->places;
}

enum { LLM_IGNORE_MAX = 32, LLM_IGNORED = LLM_IGNORE_MAX + 32, LLM_RENAMED = 16 };

/* Tensors of the files that are not loaded, as the model has no parameter for them: masks and
 * frequencies, which are computed here, and heads of encoders, which are not used. families: whose
 * files have them; NULL: all. */
static const struct {
    const char *pattern, *families;
} llm_ignored[] = {
    {"**.rotary_emb.inv_freq", NULL},
    {"**.attn.bias", " gpt2 "},
    {"**.attn.masked_bias", " gpt2 "},
    {"**.attention.bias", " gpt_neox "},
    {"**.attention.masked_bias", " gpt_neox "},
    {"**.embeddings.position_ids", " bert roberta "},
    {"**.embeddings.token_type_ids", " bert roberta "},
    {"**.pooler.**", " bert roberta "},
    {"cls.**", " bert "},
    {"lm_head.**", " roberta "},
    {"classifier.**", " bert roberta "},
    {"qa_outputs.**", " bert roberta "},
};

/* Patterns of heads, which loading skips if the model is headless. */
static const char *const llm_heads[] = {"lm_head.**", "embed_out.**"};

/* Lists the patterns of the tensors that loading skips, ended by a NULL: those of llm_ignored for
 * the family, heads that the model does not have or that copy the embedding, and options.ignore. */
static void llm_list_ignored(const llm_config *c, const char *ignored[LLM_IGNORED]) {
    const char *const *own = c->options.ignore;
    char word[80];
    int n = 0;
    snprintf(word, sizeof word, " %.70s ", c->type);
    for (size_t i = 0; i < sizeof llm_ignored / sizeof *llm_ignored; i++)
        if (!llm_ignored[i].families || strstr(llm_ignored[i].families, word))
            ignored[n++] = llm_ignored[i].pattern;
    for (size_t i = 0; c->headless && i < sizeof llm_heads / sizeof *llm_heads; i++)
        ignored[n++] = llm_heads[i];
    if (c->tied && !c->head[0]) {
        ignored[n++] = "lm_head.weight";
        ignored[n++] = "embed_out.weight";
    }
    while (own && *own && n < LLM_IGNORED - 1) ignored[n++] = *own++;
    ignored[n] = NULL;
}

/* Names of tensors in older files, and the present ones, which llm_model_save writes. */
static const tsh_rename llm_older_names[] = {{"**.LayerNorm.gamma", "**.LayerNorm.weight"},
                                             {"**.LayerNorm.beta", "**.LayerNorm.bias"}};

/* Lists the names to change while loading, ended by a pair of NULLs: those of older files, the
 * family's, and, if the files have a head but no embedding (c->head), the head's name, which is
 * changed to the embedding's. name: a buffer for the embedding's name. */
static void llm_list_renamed(const llm_config *c, const llm_family *family,
                             tsh_rename renamed[LLM_RENAMED], char *name, size_t size) {
    const tsh_rename *pair = family->rename;
    int n = 0;
    for (; n < 2; n++) renamed[n] = llm_older_names[n];
    while (pair && pair->from && n < LLM_RENAMED - 2) renamed[n++] = *pair++;
    snprintf(name, size, "%s.%s", family->base, llm_embedding_name(c->type));
    renamed[n].from = c->head[0] ? c->head : NULL;
    renamed[n].to = name;
    renamed[n + 1].from = renamed[n + 1].to = NULL;
}

/* Returns the dtype of a name such as "f32" or "q8_0"; TSH_DTYPE_DEFAULT: there is no dtype of
 * weights of this name. */
static tsh_dtype llm_dtype_named(const char *name) {
    static const struct {
        const char *name;
        tsh_dtype dtype;
    } all[] = {{"f32", TSH_F32}, {"bf16", TSH_BF16}, {"f16", TSH_F16}, {"q8_0", TSH_Q8_0},
               {"q4_0", TSH_Q4_0}, {"q4_1", TSH_Q4_1}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (strcmp(all[i].name, name) == 0) return all[i].dtype;
    return TSH_DTYPE_DEFAULT;
}

/* Returns the layer whose weight has this name in the files, "model.layers.0.mlp.up_proj.weight";
 * NULL: none. */
static tsh_module *llm_layer_of(const llm_net *m, const char *name) {
    const size_t base = strlen(m->family->base);
    tsh_module *at = m->root;
    if (strncmp(name, m->family->base, base) == 0 && name[base] == '.') name += base + 1;
    while (at && strcmp(name, "weight") != 0) {
        const size_t n = strcspn(name, ".");
        tsh_module *child = NULL;
        for (int i = 0; (child = tsh_child(at, i)) != NULL; i++) {
            const char *path = tsh_module_path(child), *dot = strrchr(path, '.');
            const char *last = dot ? dot + 1 : path;
            if (strncmp(last, name, n) == 0 && !last[n]) break;
        }
        at = name[n] ? child : NULL;
        name += n + 1;
    }
    return at;
}

/* Callback of gguf_file_open; user: the llm_net. Returns 1 if the model's weight `name` has the
 * quantised dtype that is named `dtype`, so that the file's blocks are loaded as they are. */
static int llm_keeps(void *user, const char *name, const char *dtype) {
    tsh_module *layer = llm_layer_of((const llm_net *)user, name);
    const tsh_tensor *weight = layer ? tsh_param(layer, "weight") : NULL;
    return weight && tsh_dtype_of(weight) == llm_dtype_named(dtype);
}

/* Gives the layers' matrices the dtypes that they have in the GGUF file: quantised ones that tshard
 * computes with, F16 or BF16. The others keep the ctx's dtype, as activations do. */
static void llm_gguf_dtypes(llm_net *m) {
    const gguf *g = m->config->gguf;
    for (size_t i = 0; i < g->tensors; i++) {
        const gguf_tensor *t = &g->tensor[i];
        const tsh_dtype blocks = t->format->dtype ? llm_dtype_named(t->format->dtype)
                                                  : TSH_DTYPE_DEFAULT;
        tsh_module *layer = t->dims == 2 ? llm_layer_of(m, t->hub) : NULL;
        if (layer && blocks) tsh_quantize(layer, NULL, blocks);
        else if (layer && strcmp(t->format->hub, "F32") != 0)
            tsh_to(layer, strcmp(t->format->hub, "F16") == 0 ? TSH_F16 : TSH_BF16);
    }
}

/* Makes the model as llm_model_load does, but does not load its weights, which have no memory yet.
 * Returns the ctx's error. */
LLM_API tsh_result llm_model_make(llm_net *m, tsh_ctx *ctx, llm_config *c, const llm_family *family,
                                  int64_t rows, int64_t length, tsh_dtype weights) {
    memset(m, 0, sizeof *m);
    m->ctx = ctx;
    m->config = c;
    m->family = family;
    m->rows = rows;
    m->length = length;
    m->rope = c->rope;
    m->local = c->local;
    /* row 0 is m->past; rows 1 and 2 are scratch memory of llm_stretch */
    tsh_tensor *past = tsh_tensor_new(ctx, TSH_I64, tsh_shape2(3, rows), tsh_replicated());
    m->past = past ? (int64_t *)tsh_data(ctx, past) : NULL;
    if (c->rope.limit > 0)
        m->texts = tsh_tensor_new(ctx, TSH_I32, tsh_shape2(rows, length), tsh_replicated());
    m->root = m->base = tsh_root(ctx);
    family->add(m);
    if (weights && weights != TSH_F32) tsh_quantize(m->root, NULL, weights);
    else if (c->gguf && !weights) llm_gguf_dtypes(m);
    tsh_train(m->root, 0);
    return tsh_last_error(ctx)->code;
}

/* Returns the argument `weights` of llm_model_make for a model whose llm_model_fill gets `weights`.
 * Blocks of quantised weights lie along the input features, so matrices that the files store
 * (in, out) are loaded as TSH_F32 and quantised afterwards; others are quantised while they are
 * loaded. */
LLM_API tsh_dtype llm_made_as(const llm_config *c, tsh_dtype weights) {
    const int late = strcmp(c->type, "gpt2") == 0 && !c->rows_out;
    return weights && late ? TSH_F32 : weights;
}

/* Loads the weights of a model that llm_model_make made, with llm_made_as(c, weights), from folder:
 * in a pipeline (llm_pipeline_new), those of this rank's stage. weights: as in llm_model_load. */
LLM_API tsh_result llm_model_fill(llm_net *m, const char *folder, tsh_dtype weights) {
    tsh_ctx *ctx = m->ctx;
    const llm_config *c = m->config;
    const llm_family *family = m->family;
    gguf_file blocks;
    char embedding[128];
    const char *ignored[LLM_IGNORED];
    tsh_rename renamed[LLM_RENAMED];
    tsh_file_desc file = {.prefix = family->base,
                          .rename = renamed,
                          .ignore = ignored,
                          .strict_names = 1,
                          .broadcast = c->broadcast,
                          .cache = c->cache,
                          .hasher = c->hasher,
                          .stamp = c->stamp};
    llm_list_ignored(c, ignored);
    llm_list_renamed(c, family, renamed, embedding, sizeof embedding);
    if (c->gguf && !gguf_file_open(&blocks, c->gguf, llm_keeps, m))
        return tsh_fail(ctx, TSH_ERR_MEMORY, "not enough memory");
    if (c->gguf) file.read_at = gguf_file_read;
    file.user = &blocks;
    if (tsh_load_with(m->root, folder, NULL, &file) == TSH_OK && llm_made_as(c, weights) != weights)
        tsh_quantize(m->root, NULL, weights);
    if (c->gguf) gguf_file_close(&blocks);
    return tsh_last_error(ctx)->code;
}

/* Makes the model on this rank, for `rows` texts of at most `length` tokens each, and loads its
 * weights from folder. weights: TSH_Q8_0, TSH_Q4_0 or TSH_Q4_1 quantises them; TSH_F32: they have
 * the ctx's dtype; 0: the same, but those of a GGUF file keep the file's. Returns the ctx's
 * error. */
LLM_API tsh_result llm_model_load(llm_net *m, tsh_ctx *ctx, llm_config *c,
                                  const llm_family *family, const char *folder, int64_t rows,
                                  int64_t length, tsh_dtype weights) {
    (void)llm_model_make(m, ctx, c, family, rows, length, llm_made_as(c, weights));
    if (llm_model_fill(m, folder, weights) == TSH_OK && !c->encoder && !c->headless)
        m->cache = tsh_cache_new(m->root, rows, length, TSH_DTYPE_DEFAULT);
    return tsh_last_error(ctx)->code;
}

/* The first part of llm_forward: returns the input of the first block. It is for the .input of a
 * pipeline, which sends m->segments on to the later stages. */
LLM_API tsh_tensor *llm_forward_begin(llm_net *m, tsh_tensor *ids) {
    int64_t longest = 0;
    for (int64_t i = 0; m->places && i < tsh_numel(ids); i++)
        if (m->places[i] >= longest) longest = m->places[i] + 1;
    if (m->places) (void)llm_rope_of(&m->config->rope, &m->rope, longest);
    if (tsh_set_segments(m->root, m->segments) != TSH_OK) return NULL;
    return m->family->embed(m, ids);
}

/* The last part of llm_forward: takes the output of the last block, and returns what llm_forward
 * does. It is for the .loss of a pipeline. */
LLM_API tsh_tensor *llm_forward_end(llm_net *m, tsh_tensor *x) {
    return m->family->finish ? m->family->finish(m, x) : x;
}

/* Runs the model on ids (B, T), with m->segments and m->places. Returns logits, or vectors if the
 * model is headless or m->vectors is 1. It is for training and for whole rows; llm_logits is for
 * texts that grow. Rotary positions are those in the row, not m->places: scores
 * depend on the distance of two tokens alone, so a text that begins in the middle of a row has the
 * same result but for the rounding of sines and cosines. Frequencies that depend on the length of a
 * text are those for the batch's longest text. */
LLM_API tsh_tensor *llm_forward(llm_net *m, tsh_tensor *ids) {
    return llm_forward_end(m, tsh_forward(m->blocks, llm_forward_begin(m, ids)));
}

/* Makes a pipeline that deals the model's blocks to its stages; the first stages have one block
 * more if they do not divide evenly. Call it after llm_model_make, when the adapters are added, and
 * before llm_model_fill. desc: .input calls llm_forward_begin, .loss calls llm_forward_end; .counts
 * is set here. Texts must not be longer than m->rope.limit, if that is not 0: the stages after the
 * first keep the rotary frequencies of texts up to it. Returns NULL after an error. */
LLM_API tsh_pipeline *llm_pipeline_new(llm_net *m, const tsh_pipeline_desc *desc) {
    int counts[LLM_MOST_LAYERS];
    tsh_pipeline_desc own = *desc;
    const int stages = tsh_pp(m->ctx)->size, layers = (int)m->config->layers;
    if (stages > layers) {
        (void)tsh_fail(m->ctx, TSH_ERR_ARGUMENT, "%d stages are more than the model's %d layers",
                       stages, layers);
        return NULL;
    }
    for (int s = 0; s < stages; s++) counts[s] = layers / stages + (s < layers % stages);
    own.counts = counts;
    return tsh_pipeline_new(m->blocks, &own);
}

/* Runs the model on n tokens of each text, without a change of the rotary frequencies. ids (rows,
 * n), lengths: as in llm_logits. Returns the logits. */
static tsh_tensor *llm_compute(llm_net *m, const int32_t *ids, int64_t n, const int64_t *lengths) {
    m->lengths = lengths;
    if (m->cache) tsh_cache_counts(m->cache, lengths);
    tsh_tensor *given = tsh_from(m->ctx, ids, tsh_shape2(m->rows, n), TSH_I32);
    tsh_tensor *logits = llm_forward(m, given);
    for (int64_t b = 0; b < m->rows; b++) m->past[b] += lengths ? lengths[b] : n;
    m->positions = m->bias = NULL;
    return logits;
}

/* Called before the forward of ids if rotary frequencies depend on the length of the longest text:
 * stores the tokens in m->texts, and sets the frequencies for the length that the texts will have.
 * When a text grows beyond LongRoPE's original length, all keys in the cache are computed again;
 * with dynamic scaling they stay, as in transformers. */
static void llm_stretch(llm_net *m, const int32_t *ids, int64_t n, const int64_t *lengths) {
    /* (rows) each. past: the texts' tokens so far; own: those that the next forward adds to them */
    int64_t *const past = m->past + m->rows, *const own = past + m->rows;
    int64_t most = 0, count = m->expected;
    int32_t *texts = (int32_t *)tsh_data(m->ctx, m->texts);
    if (!texts) return;
    for (int64_t b = 0; b < m->rows; b++) {
        own[b] = lengths ? lengths[b] : n;
        past[b] = m->past[b];
        if (past[b] > most) most = past[b];
        if (past[b] + own[b] > count) count = past[b] + own[b];
        if (past[b] + own[b] <= m->length)
            memcpy(texts + b * m->length + past[b], ids + b * n, (size_t)own[b] * sizeof *ids);
    }
    const int changed = llm_rope_of(&m->config->rope, &m->rope, count);
    if (!changed || most == 0 || m->config->rope.stretch > 0) return;
    memset(m->past, 0, (size_t)m->rows * sizeof *m->past);
    tsh_cache_truncate(m->cache, 0);
    const int64_t chunk = m->config->causal ? 256 : most;
    for (int64_t at = 0; at < most && tsh_ok(m->ctx); at += chunk) {
        const int64_t some = most - at < chunk ? most - at : chunk;
        int32_t *again = (int32_t *)calloc((size_t)(m->rows * some), sizeof *again);
        if (!again) (void)tsh_fail(m->ctx, TSH_ERR_MEMORY, "not enough memory");
        for (int64_t b = 0; b < m->rows && again; b++) {
            own[b] = past[b] - at < 0 ? 0 : past[b] - at < some ? past[b] - at : some;
            memcpy(again + b * some, texts + b * m->length + at, (size_t)own[b] * sizeof *again);
        }
        if (again) (void)llm_compute(m, again, some, own);
        free(again);
    }
}

/* Runs the model on ids (rows, n), the tokens of each text b that follow its first m->past[b]. Text
 * b has the first lengths[b] of them, and the others are padding; lengths NULL: every text has all
 * n. Returns the logits (rows, 1, V) at the last of the n, with m->all (rows, n, V), sharded over
 * the vocabulary; of an encoder or a headless model the tokens' vectors (rows, n, C). They live
 * until tsh_scope_end or tsh_step_end. To take tokens of a single text back, lower m->past[0]
 * before. */
LLM_API tsh_tensor *llm_logits(llm_net *m, const int32_t *ids, int64_t n, const int64_t *lengths) {
    if (m->cache && m->rows == 1 && m->past[0] < tsh_cache_length(m->cache))
        tsh_cache_truncate(m->cache, m->past[0]);
    if (m->texts) llm_stretch(m, ids, n, lengths);
    return llm_compute(m, ids, n, lengths);
}

/* Callback (tsh_chunk_fn) that computes the losses (n) of vectors x (n, C) with targets (n). user:
 * the llm_net. */
static tsh_tensor *llm_loss_rows(tsh_tensor *x, tsh_tensor *targets, void *user) {
    const tsh_cross_entropy_desc each = {.reduction = TSH_REDUCE_NONE};
    return tsh_cross_entropy(llm_head_logits((const llm_net *)user, x), targets, &each);
}

/* Callback (tsh_chunk_fn) that computes for each target (n) a 1 if it is the most likely token,
 * else a 0. user: the llm_net. */
static tsh_tensor *llm_hits_rows(tsh_tensor *x, tsh_tensor *targets, void *user) {
    tsh_tensor *best = tsh_argmax(llm_head_logits((const llm_net *)user, x), -1, 0);
    tsh_tensor *hits = tsh_eq(tsh_cast(best, TSH_REAL), tsh_cast(targets, TSH_REAL));
    return tsh_cast(hits, TSH_REAL);
}

/* Returns the sum of all that the callback `rows` returns. It gets a few rows of the vectors
 * (B, T, C) and of the targets (B, T) at a time. */
static tsh_tensor *llm_in_chunks(llm_net *m, tsh_tensor *vectors, tsh_tensor *targets,
                                 tsh_chunk_fn rows) {
    const tsh_chunks_desc desc = {.fn = rows, .user = m};
    if (m->head) return tsh_loss_in_chunks(vectors, targets, &desc);
    (void)tsh_fail(m->ctx, TSH_ERR_STATE, "no forward of a model with a head was run");
    return NULL;
}

/* Returns the sum of the cross-entropies of all targets (B, T) that are not -100, a scalar, from
 * the vectors (B, T, C) that a forward with m->vectors gives. The head computes the logits of a few
 * tokens at a time (tsh_loss_in_chunks). NULL: an error. */
LLM_API tsh_tensor *llm_loss(llm_net *m, tsh_tensor *vectors, tsh_tensor *targets) {
    return llm_in_chunks(m, vectors, targets, llm_loss_rows);
}

/* Returns how many targets (B, T) other than -100 are the most likely token, from vectors as in
 * llm_loss; -1: an error. Collective; nothing is recorded for backward. */
LLM_API int64_t llm_accuracy(llm_net *m, tsh_tensor *vectors, tsh_tensor *targets) {
    tsh_no_grad_begin(m->ctx);
    tsh_scope_begin(m->ctx);
    tsh_tensor *hits = llm_in_chunks(m, vectors, targets, llm_hits_rows);
    const int64_t count = hits ? (int64_t)tsh_item(m->ctx, hits) : -1;
    tsh_scope_end(m->ctx);
    tsh_no_grad_end(m->ctx);
    return count;
}

/* -- adapters in the files of PEFT ------------------------------------------ */

/* Options to load and save adapters under the names that PEFT's files have: "base_model.model.",
 * then the name in the family's files. */
typedef struct llm_adapter_names {
    tsh_file_desc desc; /* its .prefix and .rename point to the fields below */
    char prefix[80], head[2][2][96];
    tsh_rename rename[LLM_RENAMED + 2];
} llm_adapter_names;

/* Fills in *names, the names in PEFT's files, for the model m. */
static void llm_adapter_name(const llm_net *m, llm_adapter_names *names) {
    const char *base = m->family->base;
    const tsh_rename *pair = m->family->rename;
    int n = 0;
    memset(names, 0, sizeof *names);
    snprintf(names->prefix, sizeof names->prefix, "base_model.model.%.60s", base);
    /* In the files, the head's name lacks the family's prefix. */
    for (; n < 2; n++) {
        snprintf(names->head[n][0], sizeof names->head[n][0], "base_model.model.%s", llm_heads[n]);
        snprintf(names->head[n][1], sizeof names->head[n][1], "%s.%s", names->prefix, llm_heads[n]);
        names->rename[n].from = names->head[n][0];
        names->rename[n].to = names->head[n][1];
    }
    while (pair && pair->from && n < LLM_RENAMED + 1) names->rename[n++] = *pair++;
    names->desc.prefix = names->prefix;
    names->desc.rename = names->rename;
    names->desc.broadcast = m->config->broadcast;
}

/* Callback (llm_adapter_name_fn) that writes the name that a module has in transformers: the
 * family's prefix, but not before a head, then its path, with the part that family->rename changes
 * changed back. user: the llm_net. */
static void llm_name_in_files(const char *path, char *name, size_t size, const void *user) {
    const llm_family *family = ((const llm_net *)user)->family;
    const char *prefix = strncmp(path, "lm_head", 7) == 0 || strncmp(path, "embed_out", 9) == 0
                             ? ""
                             : family->base;
    const tsh_rename *pair = family->rename;
    (void)snprintf(name, size, "%s%s%s", prefix, *prefix ? "." : "", path);
    for (; pair && pair->from; pair++) { /* "**.fc1.**" in the file is "**.mlp.fc1.**" here */
        const char *from = pair->from + 3, *to = pair->to + 3;
        const size_t m = strlen(from) - strlen(strrchr(from, '.')),
                     n = strlen(to) - strlen(strrchr(to, '.'));
        char *at = strchr(name, '.');
        while (at && (strncmp(at + 1, to, n) != 0 || (at[1 + n] && at[1 + n] != '.')))
            at = strchr(at + 1, '.');
        if (!at || strlen(name) + m >= size + n) continue;
        memmove(at + 1 + m, at + 1 + n, strlen(at + 1 + n) + 1);
        memcpy(at + 1, from, m);
        return;
    }
}

/* Adds adapters to the layers of the model that `a` names, as PEFT does to those of the model in
 * transformers: the layers whose name in transformers, or the end of it, is one of a->targets, or
 * matches a->pattern; with neither, all linear layers but the head. */
LLM_API tsh_result llm_model_adapter_add(llm_net *m, const llm_adapter *a) {
    return llm_adapter_add_named(m->root, a, llm_name_in_files, m);
}

/* Reads A and B of the model's adapters, which it has already, from a folder that PEFT or
 * llm_model_adapter_save wrote. */
LLM_API tsh_result llm_model_adapter_load(llm_net *m, const llm_adapter *a, const char *folder) {
    llm_adapter_names names;
    llm_adapter_name(m, &names);
    return llm_adapter_load_with(m->root, a, folder, &names.desc);
}

/* Writes the model's adapters to a folder that exists, as llm_adapter_save_with does; PEFT reads
 * it. */
LLM_API tsh_result llm_model_adapter_save(llm_net *m, const llm_adapter *a, const char *folder) {
    llm_adapter_names names;
    llm_adapter_name(m, &names);
    return llm_adapter_save_with(m->root, a, folder, &names.desc);
}

#endif
