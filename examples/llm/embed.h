/* embed.h - computes one vector per text from a model's folder, as sentence-transformers does
 *
 * modules.json lists the steps: Transformer (the model itself), Pooling (makes one vector of the
 * tokens' vectors), then Dense and Normalize steps, at most 16. Each has a folder of its own.
 * Without that file, a text's vector is the mean of its tokens' vectors, or for a causal language
 * model the last token's vector.
 *
 *     embed_model e;
 *     if (embed_open(&e, folder) &&
 *         llm_config_read(&config, e.folder, &family) && embed_begin(&e, &config)) ...
 *     config.headless = 1;                             the model gives vectors, no logits
 *     n = embed_encode(&e, tokenizer, text, length, 1, &ids);
 *     embed_vector(&e, vectors, n, out);               vectors (n, width): of all tokens
 *     embed_close(&e);
 *
 * If a function returns 0 (embed_encode: -1), e.error says why. Include tshard.h first. */
#ifndef LLM_EMBED_H
#define LLM_EMBED_H

#include "folder.h"
#include "gguf.h"
#include "quote.h"
#include "tokenizer.h"

/* Ways to pool the vectors of all tokens to one, in the order in which configs of the older form
 * concatenate them. */
typedef enum embed_mode {
    EMBED_FIRST,
    EMBED_MAX,
    EMBED_MEAN,
    EMBED_MEAN_SQRT, /* the sum divided by the square root of the number of tokens */
    EMBED_WEIGHTED, /* the mean, with the weights 1, 2, 3 ... for the first token, the second ... */
    EMBED_LAST,
    EMBED_MODES
} embed_mode;

typedef enum embed_activation {
    EMBED_IDENTITY,
    EMBED_TANH,
    EMBED_RELU,
    EMBED_GELU,
    EMBED_SIGMOID,
    EMBED_SILU
} embed_activation;

/* A Dense step, y = act(W x + b), to which x or V x is added if it is residual; or, if weight is
 * NULL, a Normalize step, which scales x to length 1. */
typedef struct embed_step {
    float *weight, *bias, *shortcut; /* W (out, in), b (out), V (out, in); NULL: none */
    int64_t in, out;
    int residual;
    embed_activation act;
} embed_step;

/* The largest number of Dense and Normalize steps together. */
enum { EMBED_STEPS = 16 };

typedef struct embed_model {
    char folder[4096]; /* folder of the Transformer step */
    embed_mode mode[2 * EMBED_MODES];
    int modes;       /* number of modes, whose vectors are concatenated; 0: none known so far */
    int no_prompt;   /* 1: the tokens of the prompt are left out of the pooling */
    int lower;       /* 1: texts are lowercased */
    int cut_left;    /* 1: texts that are too long lose their beginning; 0: their end */
    int64_t limit;   /* most tokens of a text, longer ones are cut; 0: any number */
    char *prompt;    /* text that is put before every text; NULL: none */
    int64_t skipped; /* number of the prompt's tokens that the pooling leaves out */
    embed_step step[EMBED_STEPS];
    int steps;
    int64_t width, size; /* elements of a token's vector, and of a text's */
    char error[TSH_MESSAGE_SIZE];
} embed_model;

/* Records an error, unless there is one already. Returns 0. */
TSH_PRINTF(2, 3)
static int embed_fail(embed_model *e, const char *format, ...) {
    va_list list;
    if (e->error[0]) return 0;
    va_start(list, format);
    vsnprintf(e->error, sizeof e->error, format, list);
    va_end(list);
    (void)quote_message(e->error);
    return 0;
}

/* -- JSON files and their keys ---------------------------------------------- */

/* Reads the JSON file folder/part/name. NULL: it does not exist; or, with an error, it is not JSON,
 * cannot be read, or is `needed` and does not exist. */
static cJSON *embed_json(embed_model *e, const char *folder, const char *part, const char *name,
                         int needed) {
    char path[4096];
    snprintf(path, sizeof path, "%s%s%s", part, *part ? "/" : "", name);
    tsh_error why;
    char *text = llm_read_text(folder, path, &why);
    const int there = text || needed || !llm_is_absent(errno);
    cJSON *json = text ? llm_parse(text) : NULL;
    if (!text && there)
        (void)embed_fail(e, "%s", why.message);
    else if (text && !json)
        (void)embed_fail(e, "%.300s/%.200s %s", folder, path,
                         errno == ENOMEM ? "needs more memory than there is"
                                         : "is not valid JSON");
    free(text);
    return json;
}

/* Returns 0 and an error if config has a key that is not in `keys` (a list with a blank before and
 * after each key), unless the key's value is empty: null, false, 0, "", [] or {}. where: the file's
 * name for errors. */
static int embed_known(embed_model *e, const char *where, const cJSON *config, const char *keys) {
    const cJSON *item;
    cJSON_ArrayForEach(item, config) {
        char word[80], value[80];
        const int empty = cJSON_IsNull(item) || cJSON_IsFalse(item) ||
                          (cJSON_IsNumber(item) && item->valuedouble == 0) ||
                          (cJSON_IsString(item) && !item->valuestring[0]) ||
                          ((cJSON_IsArray(item) || cJSON_IsObject(item)) && !item->child);
        snprintf(word, sizeof word, " %.70s ", item->string);
        if (!empty && !strstr(keys, word))
            return embed_fail(e, "%s: %.70s is %s; a key that is not known, and may change the "
                                 "vectors", where, item->string,
                              llm_json_text(item, value, sizeof value));
    }
    return 1;
}

/* Returns the string of a key; `otherwise` if the key is missing or null; NULL and an error if it
 * is no string. where: the file's name for errors. */
static const char *embed_string(embed_model *e, const char *where, const cJSON *config,
                                const char *key, const char *otherwise) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(config, key);
    char value[80];
    if (!item || cJSON_IsNull(item)) return otherwise;
    if (cJSON_IsString(item)) return item->valuestring;
    (void)embed_fail(e, "%s: %s is %s, not a string", where, key,
                     llm_json_text(item, value, sizeof value));
    return NULL;
}

/* Returns the whole number of a key, from 1 to 1e9; `otherwise` if the key is missing or null; 0
 * and an error if it is something else. where: the file's name for errors. */
static int64_t embed_count(embed_model *e, const char *where, const cJSON *config, const char *key,
                           int64_t otherwise) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(config, key);
    char value[80];
    if (!item || cJSON_IsNull(item)) return otherwise;
    if (cJSON_IsNumber(item) && item->valuedouble >= 1 && item->valuedouble <= 1e9 &&
        floor(item->valuedouble) == item->valuedouble)
        return (int64_t)item->valuedouble;
    return embed_fail(e, "%s: %s is %s, not a whole number from 1 to 1e9", where, key,
                      llm_json_text(item, value, sizeof value));
}

/* Returns 0 and an error unless a Normalize or Dense step takes the text's vector and replaces it,
 * the only form that is supported. */
static int embed_in_place(embed_model *e, const char *where, const cJSON *config) {
    static const char *const keys[] = {"module_input_name", "module_output_name"};
    for (int i = 0; i < 2; i++) {
        const char *name = embed_string(e, where, config, keys[i], "sentence_embedding");
        if (name && strcmp(name, "sentence_embedding") != 0)
            return embed_fail(e, "%s: %s is \"%s\"; supported is sentence_embedding", where,
                              keys[i], name);
    }
    return e->error[0] == 0;
}

/* -- the Transformer's config ----------------------------------------------- */

/* Reads the Transformer step's sentence_bert_config.json, or a file with one of the older names.
 * Returns 0 and an error if that fails. */
static int embed_transformer(embed_model *e, const char *folder, const char *part) {
    static const char *const names[] = {
        "sentence_bert_config.json",       "sentence_roberta_config.json",
        "sentence_distilbert_config.json", "sentence_camembert_config.json",
        "sentence_albert_config.json",     "sentence_xlm-roberta_config.json",
        "sentence_xlnet_config.json"};
    cJSON *config = NULL;
    const char *name = names[0], *wants;
    for (size_t i = 0; i < sizeof names / sizeof *names && !config && !e->error[0]; i++)
        config = embed_json(e, folder, part, name = names[i], 0);
    const cJSON *text =
        cJSON_GetObjectItem(cJSON_GetObjectItem(config, "modality_config"), "text");
    wants = embed_string(e, name, config, "transformer_task", "feature-extraction");
    if (wants && strcmp(wants, "feature-extraction") != 0)
        (void)embed_fail(e, "%s: transformer_task is \"%s\"; supported is feature-extraction", name,
                         wants);
    wants = embed_string(e, name, text, "method_output_name", "last_hidden_state");
    if (wants && strcmp(wants, "last_hidden_state") != 0)
        (void)embed_fail(e, "%s: the text's method_output_name is \"%s\"; supported is "
                            "last_hidden_state", name, wants);
    wants = embed_string(e, name, config, "module_output_name", "token_embeddings");
    if (wants && strcmp(wants, "token_embeddings") != 0)
        (void)embed_fail(e, "%s: module_output_name is \"%s\"; supported is token_embeddings", name,
                         wants);
    e->limit = embed_count(e, name, config, "max_seq_length", 0);
    e->lower = cJSON_IsTrue(cJSON_GetObjectItem(config, "do_lower_case"));
    (void)embed_known(e, name, config,
                      " transformer_task modality_config module_output_name max_seq_length "
                      "do_lower_case unpad_inputs query_length document_length ");
    cJSON_Delete(config);
    return e->error[0] == 0;
}

/* -- the Pooling's config --------------------------------------------------- */

static const struct {
    const char *older, *name;
} embed_modes[EMBED_MODES] = {{"pooling_mode_cls_token", "cls"},
                              {"pooling_mode_max_tokens", "max"},
                              {"pooling_mode_mean_tokens", "mean"},
                              {"pooling_mode_mean_sqrt_len_tokens", "mean_sqrt_len_tokens"},
                              {"pooling_mode_weightedmean_tokens", "weightedmean"},
                              {"pooling_mode_lasttoken", "lasttoken"}};

static int embed_add_mode(embed_model *e, const char *where, const cJSON *item) {
    const char *name = cJSON_GetStringValue(item);
    char value[80];
    int mode = 0;
    while (name && mode < EMBED_MODES && strcmp(embed_modes[mode].name, name) != 0) mode++;
    if (!name || mode == EMBED_MODES || e->modes == 2 * EMBED_MODES)
        return embed_fail(e, "%s: pooling_mode is %s; known are at most %d of cls, max, mean, "
                             "mean_sqrt_len_tokens, weightedmean and lasttoken", where,
                          llm_json_text(item, value, sizeof value), 2 * EMBED_MODES);
    e->mode[e->modes++] = (embed_mode)mode;
    return 1;
}

/* Reads the Pooling step's config.json. Its modes are a name or a list of names (pooling_mode), or
 * in the older form one flag for each mode. Returns 0 and an error if that fails. */
static int embed_pooling(embed_model *e, const char *folder, const char *part) {
    char where[300];
    cJSON *config = embed_json(e, folder, part, "config.json", 1);
    const cJSON *mode = cJSON_GetObjectItemCaseSensitive(config, "pooling_mode"), *one;
    snprintf(where, sizeof where, "%.200s/config.json", part);
    e->width = embed_count(e, where, config, "word_embedding_dimension", 0);
    e->width = embed_count(e, where, config, "embedding_dimension", e->width);
    e->no_prompt = cJSON_IsFalse(cJSON_GetObjectItemCaseSensitive(config, "include_prompt"));
    const cJSON *const list = cJSON_IsArray(mode) ? mode : NULL;
    cJSON_ArrayForEach(one, list) (void)embed_add_mode(e, where, one);
    if (mode && !cJSON_IsArray(mode)) (void)embed_add_mode(e, where, mode);
    for (int i = 0; i < EMBED_MODES && !mode; i++)
        if (cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(config, embed_modes[i].older)))
            e->mode[e->modes++] = (embed_mode)i;
    if (e->modes == 0) e->mode[e->modes++] = EMBED_MEAN;
    (void)embed_known(e, where, config,
                      " word_embedding_dimension embedding_dimension pooling_mode include_prompt "
                      "pooling_mode_cls_token pooling_mode_max_tokens pooling_mode_mean_tokens "
                      "pooling_mode_mean_sqrt_len_tokens pooling_mode_weightedmean_tokens "
                      "pooling_mode_lasttoken ");
    cJSON_Delete(config);
    return e->error[0] == 0;
}

/* -- config and weights of a Dense layer ------------------------------------ */

/* The argument of embed_read_dense, which loads the weights of a Dense in a world of one rank. */
typedef struct embed_dense {
    embed_model *e;
    embed_step *step;
    char path[4096];
    int no_bias;
} embed_dense;

/* Logger of the world that runs embed_read_dense: keeps an error in e->error, ignores warnings. */
static void embed_heed(const char *message, void *user) {
    if (!strstr(message, "warning: "))
        (void)embed_fail(((embed_dense *)user)->e, "%s", message);
}

/* Returns a copy of a parameter's values, to be passed to free(); NULL: an error, or `wanted` is
 * 0. */
static float *embed_values(tsh_ctx *ctx, const char *name, int wanted) {
    tsh_tensor *t = wanted ? tsh_param(tsh_root(ctx), name) : NULL;
    const size_t bytes = t ? (size_t)tsh_numel(t) * sizeof(float) : 0;
    float *values = t ? (float *)malloc(bytes) : NULL;
    if (t && !values) (void)tsh_fail(ctx, TSH_ERR_MEMORY, "not enough memory");
    if (values) (void)tsh_read(ctx, t, TSH_LOCAL, values, bytes);
    return values;
}

static int embed_read_dense(tsh_ctx *ctx, void *user) {
    embed_dense *d = (embed_dense *)user;
    embed_step *step = d->step;
    const int projects = step->residual && step->in != step->out;
    const tsh_linear_desc linear = {
        .in = step->in, .out = step->out, .bias = d->no_bias ? TSH_NO : TSH_YES};
    const tsh_linear_desc shortcut = {.in = step->in, .out = step->out, .bias = TSH_NO};
    tsh_add_linear(tsh_root(ctx), "linear", &linear);
    if (projects) tsh_add_linear(tsh_root(ctx), "residual", &shortcut);
    if (tsh_load(tsh_root(ctx), d->path, NULL) == TSH_OK) {
        step->weight = embed_values(ctx, "linear.weight", 1);
        step->bias = embed_values(ctx, "linear.bias", !d->no_bias);
        step->shortcut = embed_values(ctx, "residual.weight", projects);
    }
    return !tsh_ok(ctx);
}

static int embed_activation_named(embed_model *e, const char *where, const char *name) {
    static const char *const names[] = {
        "torch.nn.modules.linear.Identity",    "torch.nn.modules.activation.Tanh",
        "torch.nn.modules.activation.ReLU",    "torch.nn.modules.activation.GELU",
        "torch.nn.modules.activation.Sigmoid", "torch.nn.modules.activation.SiLU"};
    for (int i = 0; i < (int)(sizeof names / sizeof *names); i++)
        if (strcmp(names[i], name) == 0) return i;
    return embed_fail(e, "%s: activation_function is \"%s\"; known are Identity, Tanh, ReLU, GELU, "
                         "Sigmoid and SiLU of torch.nn.modules", where, name);
}

static int embed_add_dense(embed_model *e, embed_step *step, const char *folder,
                           const char *part) {
    embed_dense d = {.e = e, .step = step};
    const tsh_desc desc = {.dtype = TSH_F32, .logger = {embed_heed, &d}};
    char where[300];
    cJSON *config = embed_json(e, folder, part, "config.json", 1);
    snprintf(where, sizeof where, "%.200s/config.json", part);
    step->in = embed_count(e, where, config, "in_features", 0);
    step->out = embed_count(e, where, config, "out_features", 0);
    if (!step->in || !step->out)
        (void)embed_fail(e, "%s needs in_features and out_features", where);
    const char *act = embed_string(e, where, config, "activation_function",
                                   "torch.nn.modules.activation.Tanh");
    if (act) step->act = (embed_activation)embed_activation_named(e, where, act);
    step->residual = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(config, "use_residual"));
    d.no_bias = cJSON_IsFalse(cJSON_GetObjectItemCaseSensitive(config, "bias"));
    (void)embed_in_place(e, where, config);
    (void)embed_known(e, where, config, " in_features out_features bias activation_function "
                                        "use_residual module_input_name module_output_name ");
    cJSON_Delete(config);
    snprintf(d.path, sizeof d.path, "%s/%s", folder, part);
    if (e->error[0] == 0 && tsh_run(&desc, embed_read_dense, &d) != 0)
        (void)embed_fail(e, "%.300s cannot be read", d.path);
    return e->error[0] == 0;
}

/* -- reading modules.json, and the files it names ---------------------------- */

static int embed_add_normalize(embed_model *e, const char *folder, const char *part) {
    char where[300];
    cJSON *config = *part ? embed_json(e, folder, part, "config.json", 0) : NULL;
    snprintf(where, sizeof where, "%.200s/config.json", part);
    const int ok = embed_in_place(e, where, config);
    cJSON_Delete(config);
    return ok && e->error[0] == 0;
}

/* Reads module number i (from 0) of modules.json, and its files. Returns 0 and an error if it
 * cannot. */
static int embed_add(embed_model *e, const char *folder, const cJSON *module, int i) {
    const char *type = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(module, "type"));
    const char *part = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(module, "path"));
    const char *dot = type ? strrchr(type, '.') : NULL;
    const int ours = dot && strncmp(type, "sentence_transformers.", 22) == 0;
    embed_step *step = &e->step[e->steps];
    if (!type || !part)
        return embed_fail(e, "modules.json: module %d has no type, or no path", i);
    if (part[0] == '/' || strstr(part, "..") || strlen(part) > 200)
        return embed_fail(e, "modules.json: the path \"%.80s\" leads out of the folder", part);
    if (ours && strcmp(dot, ".Transformer") == 0 && i == 0) {
        snprintf(e->folder, sizeof e->folder, "%s%s%s", folder, *part ? "/" : "", part);
        return embed_transformer(e, folder, part);
    }
    if (ours && strcmp(dot, ".Pooling") == 0 && i == 1) return embed_pooling(e, folder, part);
    if (ours && i > 1 && e->steps < EMBED_STEPS) {
        if (strcmp(dot, ".Normalize") == 0) e->steps++;
        if (strcmp(dot, ".Normalize") == 0) return embed_add_normalize(e, folder, part);
        if (strcmp(dot, ".Dense") == 0) e->steps++;
        if (strcmp(dot, ".Dense") == 0) return embed_add_dense(e, step, folder, part);
    }
    return embed_fail(e, "modules.json: module %d is of the type %.120s; supported are "
                         "Transformer, then Pooling, then at most %d of Dense and Normalize, of "
                         "sentence_transformers", i, type, EMBED_STEPS);
}

/* Reads the default prompt of config_sentence_transformers.json, which is put before every text. */
static int embed_read_prompt(embed_model *e, const char *folder) {
    static const char where[] = "config_sentence_transformers.json";
    cJSON *config = embed_json(e, folder, "", where, 0);
    const char *type = embed_string(e, where, config, "model_type", "SentenceTransformer");
    const char *name = embed_string(e, where, config, "default_prompt_name", "");
    const cJSON *prompts = cJSON_GetObjectItemCaseSensitive(config, "prompts");
    if (type && strcmp(type, "SentenceTransformer") != 0)
        (void)embed_fail(e, "%s: model_type is \"%s\"; supported is SentenceTransformer", where,
                         type);
    if (name && *name && !e->error[0]) {
        const cJSON *item = cJSON_GetObjectItemCaseSensitive(prompts, name);
        const char *prompt = cJSON_GetStringValue(item);
        const size_t size = prompt ? strlen(prompt) + 1 : 0;
        if (!prompt && !cJSON_IsNull(item))
            (void)embed_fail(e, "%s: default_prompt_name is \"%.80s\", which is none of its "
                                "prompts", where, name);
        e->prompt = size > 1 ? (char *)malloc(size) : NULL;
        if (size > 1 && !e->prompt) (void)embed_fail(e, "not enough memory");
        if (e->prompt) memcpy(e->prompt, prompt, size);
    }
    cJSON_Delete(config);
    return e->error[0] == 0;
}

/* Opens a model's folder, or a GGUF file. Returns 0: e->error says why not. Call embed_close in
 * either case. */
LLM_API int embed_open(embed_model *e, const char *folder) {
    int i = 0;
    memset(e, 0, sizeof *e);
    snprintf(e->folder, sizeof e->folder, "%s", folder);
    if (gguf_is_file(folder)) return 1;
    cJSON *const modules = embed_json(e, folder, "", "modules.json", 0);
    const cJSON *module;
    if (modules && (!cJSON_IsArray(modules) || cJSON_GetArraySize(modules) < 2))
        (void)embed_fail(e, "modules.json is no list of at least a Transformer and a Pooling");
    cJSON_ArrayForEach(module, modules) {
        if (!e->error[0]) (void)embed_add(e, folder, module, i++);
    }
    cJSON_Delete(modules);
    return !e->error[0] && (!modules || embed_read_prompt(e, folder));
}

LLM_API void embed_close(embed_model *e) {
    for (int i = 0; i < e->steps; i++) {
        free(e->step[i].weight);
        free(e->step[i].bias);
        free(e->step[i].shortcut);
    }
    free(e->prompt);
    e->prompt = NULL;
    e->steps = 0;
}

/* -- what the model's own config.json determines ------------------------------- */

/* Returns the value of a key of config.json, whether llm_config_read has used the key (c->read) or
 * not (c->unread); NULL: the key is missing. */
static const cJSON *embed_config_key(const llm_config *c, const char *key) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(c->read, key);
    return item ? item : cJSON_GetObjectItemCaseSensitive(c->unread, key);
}

/* Sets e->limit, unless sentence_bert_config.json has set it, and e->cut_left: which end of a text
 * that is too long is cut. */
static void embed_read_limit(embed_model *e, const llm_config *c) {
    static const char *const keys[] = {"max_position_embeddings", "n_positions"};
    cJSON *config = c->gguf ? NULL : embed_json(e, e->folder, "", "tokenizer_config.json", 0);
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(config, "model_max_length");
    const char *side = embed_string(e, "tokenizer_config.json", config, "truncation_side", "right");
    e->cut_left = side && strcmp(side, "left") == 0;
    if (!e->limit) {
        double most = cJSON_IsNumber(item) ? item->valuedouble : 1e30;
        for (int i = 0; i < 2; i++) {
            item = embed_config_key(c, keys[i]);
            if (cJSON_IsNumber(item) && item->valuedouble < most) most = item->valuedouble;
        }
        if (c->places > 0 && most > 1e9) most = (double)c->places;
        if (most >= 1 && most <= 1e9) e->limit = (int64_t)most;
    }
    cJSON_Delete(config);
}

/* Returns the pooling of a model without modules.json: the last token's vector for a causal
 * language model, else the mean. */
static embed_mode embed_usual(const llm_config *c) {
    const cJSON *names = embed_config_key(c, "architectures");
    const char *name = cJSON_GetStringValue(cJSON_GetArrayItem(names, 0));
    const size_t n = name ? strlen(name) : 0, suffix = strlen("ForCausalLM");
    if (c->gguf) return c->encoder ? EMBED_MEAN : EMBED_LAST;
    return n >= suffix && strcmp(name + n - suffix, "ForCausalLM") == 0 &&
                   !cJSON_IsFalse(embed_config_key(c, "is_causal"))
               ? EMBED_LAST
               : EMBED_MEAN;
}

/* Sets what depends on the model's config: e->limit, the default pooling, e->width and e->size.
 * Call it after llm_config_read. Returns 0 and e->error if a step does not fit the size of the
 * vectors before it. */
LLM_API int embed_begin(embed_model *e, const llm_config *c) {
    embed_read_limit(e, c);
    if (e->modes == 0) e->mode[e->modes++] = embed_usual(c);
    if (e->width && e->width != c->width)
        (void)embed_fail(e, "modules.json: the Pooling takes vectors of %lld, the model gives %lld",
                         (long long)e->width, (long long)c->width);
    e->width = c->width;
    e->size = e->modes * e->width;
    for (int i = 0; i < e->steps; i++) {
        if (!e->step[i].weight) continue;
        if (e->step[i].in != e->size)
            (void)embed_fail(e, "modules.json: a Dense takes vectors of %lld, what is before it "
                                "gives %lld", (long long)e->step[i].in, (long long)e->size);
        e->size = e->step[i].out;
    }
    return e->error[0] == 0;
}

/* -- from a text to token ids ------------------------------------------------ */

/* Cuts the n ids of a text to e->limit, as `tokenizers` does: removes ids only from `content`, the
 * text's `count` ids without special tokens, and keeps the special tokens around them. Returns how
 * many ids are left. */
static int64_t embed_cut(const embed_model *e, int32_t *ids, int64_t n, const int32_t *content,
                         int64_t count) {
    int64_t before = 0, keep = e->limit - (n - count), dropped;
    if (keep < 0) keep = 0;
    while (before < n - count &&
           memcmp(ids + before, content, (size_t)count * sizeof *ids) != 0)
        before++;
    dropped = count - keep;
    int32_t *gap = ids + before + (e->cut_left ? 0 : keep);
    memmove(gap, gap + dropped, (size_t)(n - (gap - ids) - dropped) * sizeof *ids);
    return n - dropped;
}

/* Sets e->skipped to the number of the prompt's tokens, not counting a special token at its end.
 * Returns 0 on error. */
static int embed_skip_prompt(embed_model *e, llm_tokenizer *t, int special) {
    int32_t *ids = NULL;
    size_t length = 1;
    const int64_t n = llm_tokenizer_encode(t, e->prompt, strlen(e->prompt), special, &ids);
    char *last = n > 0 ? llm_tokenizer_decode(t, ids + n - 1, 1, 0, &length) : NULL;
    /* `last` is "" if the last token is special, which is not counted */
    if (n > 0) e->skipped = n - (last && length == 0);
    free(last);
    free(ids);
    return n >= 0 ? 1 : embed_fail(e, "%s", llm_tokenizer_error(t));
}

/* Encodes a text with the prompt before it, and cuts it to the limit. Returns the number of ids;
 * -1: an error. special: 1 adds the tokens that begin and end a text. *ids is to be passed to
 * free(). */
LLM_API int64_t embed_encode(embed_model *e, llm_tokenizer *t, const char *text, size_t length,
                             int special, int32_t **ids) {
    const size_t more = e->prompt ? strlen(e->prompt) : 0;
    char *whole = (char *)malloc(more + length + 1);
    int32_t *content = NULL;
    int64_t n = -1, count;
    int ok = whole != NULL;
    *ids = NULL;
    if (ok && more && e->no_prompt && !e->skipped) ok = embed_skip_prompt(e, t, special);
    if (ok) {
        if (more) memcpy(whole, e->prompt, more);
        memcpy(whole + more, text, length);
        n = llm_tokenizer_encode(t, whole, more + length, special, ids);
    }
    if (n > e->limit && e->limit > 0) {
        count = llm_tokenizer_encode(t, whole, more + length, 0, &content);
        n = count < 0 ? -1 : embed_cut(e, *ids, n, content, count);
        free(content);
    }
    if (n < 0) (void)embed_fail(e, "%s", whole ? llm_tokenizer_error(t) : "not enough memory");
    free(whole);
    return n;
}

/* -- from the tokens' vectors to the text's vector --------------------------- */

/* Pools x (n, width), without its first `skip` rows, to one vector, out (width). */
static void embed_pool(embed_mode mode, const float *x, int64_t n, int64_t skip, int64_t width,
                       double *out) {
    /* EMBED_FIRST: takes row 0 if `skip` leaves no row, as sentence-transformers does */
    const int64_t first = skip < n ? skip : 0;
    double sum = 0;
    for (int64_t k = 0; k < width; k++) out[k] = mode == EMBED_MAX ? -(double)INFINITY : 0;
    if (mode == EMBED_FIRST || mode == EMBED_LAST) {
        const float *row = x + (mode == EMBED_FIRST ? first : n - 1) * width;
        for (int64_t k = 0; k < width; k++) out[k] = (double)row[k];
        return;
    }
    for (int64_t t = skip; t < n; t++) {
        const double weight = mode == EMBED_WEIGHTED ? (double)(t + 1) : 1;
        const float *row = x + t * width;
        sum += weight;
        for (int64_t k = 0; k < width; k++) {
            const double v = (double)row[k];
            if (mode != EMBED_MAX) out[k] += weight * v;
            else if (out[k] == out[k] && !(v <= out[k])) out[k] = v; /* NaN if any v is NaN */
        }
    }
    if (mode == EMBED_MAX) return;
    if (mode == EMBED_MEAN_SQRT) sum = sqrt(sum);
    for (int64_t k = 0; k < width; k++) out[k] /= sum > 1e-9 ? sum : 1e-9;
}

static double embed_activate(embed_activation act, double x) {
    switch (act) {
    case EMBED_TANH: return tanh(x);
    case EMBED_RELU: return x > 0 ? x : x != x ? x : 0;
    case EMBED_GELU: return 0.5 * x * (1 + erf(x * 0.70710678118654752440));
    case EMBED_SIGMOID: return 1 / (1 + exp(-x));
    case EMBED_SILU: return x / (1 + exp(-x));
    case EMBED_IDENTITY: break;
    }
    return x;
}

/* Computes a Dense layer: x (in) -> y (out). */
static void embed_apply(const embed_step *step, const double *x, double *y) {
    for (int64_t o = 0; o < step->out; o++) {
        double sum = step->bias ? (double)step->bias[o] : 0;
        double shortcut = step->residual && !step->shortcut ? x[o] : 0;
        for (int64_t i = 0; i < step->in; i++) {
            sum += (double)step->weight[o * step->in + i] * x[i];
            if (step->shortcut) shortcut += (double)step->shortcut[o * step->in + i] * x[i];
        }
        y[o] = embed_activate(step->act, sum) + shortcut;
    }
}

/* Computes the vector of a text, out (e->size), from the vectors of its n tokens, x (n, e->width).
 * Returns 0: not enough memory. */
LLM_API int embed_vector(embed_model *e, const float *x, int64_t n, double *out) {
    int64_t size = e->modes * e->width, most = size;
    for (int i = 0; i < e->steps; i++)
        if (e->step[i].out > most) most = e->step[i].out;
    double *at = (double *)malloc(2 * (size_t)most * sizeof *at), *held = at, *next;
    if (!at) return embed_fail(e, "not enough memory");
    for (int i = 0; i < e->modes; i++)
        embed_pool(e->mode[i], x, n, e->skipped, e->width, at + i * e->width);
    for (int i = 0; i < e->steps; i++) {
        if (e->step[i].weight) {
            next = at == held ? held + most : held;
            embed_apply(&e->step[i], at, next);
            at = next;
            size = e->step[i].out;
        } else {
            double square = 0, norm;
            for (int64_t k = 0; k < size; k++) square += at[k] * at[k];
            norm = sqrt(square);
            for (int64_t k = 0; k < size; k++) at[k] /= norm > 1e-12 ? norm : 1e-12;
        }
    }
    memcpy(out, at, (size_t)size * sizeof *out);
    free(held);
    return 1;
}

#endif
