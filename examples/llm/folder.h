/* folder.h - reads config.json of a model's folder from the Hugging Face hub into an llm_config, in
 * its older form (rope_theta, rope_scaling, torch_dtype, rotary_pct) and in that of transformers 5
 * (rope_parameters, dtype). Include tshard.h first; needs cJSON.
 *
 * Every key is either read by the family, or known not to change results (keys.h), or refused, so
 * that a model never runs if a key might make it compute something else. An absent key has the
 * family's default. */
#ifndef LLM_FOLDER_H
#define LLM_FOLDER_H

#include "files.h"
#include "found.h"
#include "json.h"
#include "keys.h"
#include "quote.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

/* Marks functions for programs to call: the compiler does not warn if one is unused. */
#if defined(__GNUC__)
#define LLM_API __attribute__((unused)) static
#else
#define LLM_API static
#endif

/* The largest numbers of end-of-text tokens, blocks, heads, and rotary pairs of a head. */
enum {
    LLM_MOST_EOS = 16,
    LLM_MOST_LAYERS = 256,
    LLM_MOST_HEADS = 1024,
    LLM_MOST_PAIRS = 512
};
#define LLM_NEEDED (-1e300) /* a key with this default must be present */

typedef enum llm_norm_kind {
    LLM_RMS,     /* x weight / sqrt(mean x^2 + eps) */
    LLM_RMS_ONE, /* x (weight + 1) / sqrt(mean x^2 + eps), as Gemma */
    LLM_LAYER    /* layer norm */
} llm_norm_kind;

/* RMS norm of queries and keys before rotary positions: none, of each head separately, or one over
 * all heads. */
typedef enum llm_qk_norm { LLM_NO_NORM, LLM_NORM_OF_EACH, LLM_NORM_OF_ALL } llm_qk_norm;

/* Rotary positions: feature pair i of queries and keys at position t is rotated by t freqs[i]. */
typedef struct llm_rope {
    int on;       /* 1: the model has rotary positions */
    int64_t dims; /* features of a head that are rotated */
    /* freqs: frequencies for texts of up to `limit` tokens; factor: multiplies cosines and sines */
    double freqs[LLM_MOST_PAIRS], factor;
    double longer[LLM_MOST_PAIRS]; /* longrope: the frequencies of texts longer than `limit` */
    /* base: theta, freqs[i] = base^(-2 i / dims) before scaling; stretch: the factor by which
     * dynamic scaling changes the base for texts longer than `limit`; 0: another scaling */
    double base, stretch;
    int64_t limit; /* longest text, in tokens, that freqs are for; 0: texts of any length */
    char kind[24]; /* the scaling: default, linear, llama3, yarn, longrope or dynamic */
} llm_rope;

/* Options for reading a model. All zero: unknown keys and tensors are refused. */
typedef struct llm_options {
    int unknown_keys;          /* 1: unknown keys of config.json are a warning, not an error */
    const char *const *ignore; /* patterns of tensor names that loading skips, ended by a NULL;
                                * NULL: none */
    void (*warn)(void *user, const char *sentence); /* gets each warning; NULL: they are dropped */
    void *user;                                     /* passed to warn */
} llm_options;

/* The configuration of a model, which its family reads from config.json or a GGUF file. */
typedef struct llm_config {
    llm_options options;
    char type[64];        /* value of the key model_type, such as "llama" */
    cJSON *unread, *read; /* JSON objects: the keys that were not read yet, and those that were */
    char error[TSH_MESSAGE_SIZE]; /* the first error; "": none */
    /* vocabulary: number of tokens; width: features of a token's vector; hidden: features inside
     * the MLP; layers: number of blocks; heads: query heads; kv_heads: key and value heads;
     * head_size: features of a head */
    int64_t vocabulary, width, hidden, layers, heads, kv_heads, head_size;
    /* places: number of learned positions, 0: none; skip: number of unused rows in their table,
     * before that of position 0 */
    int64_t places, skip;
    int encoder;  /* 1: as BERT: it has no head, and generates no text */
    int causal;   /* 1: a token attends to itself and those before it; 0: to all */
    int headless; /* 1: llm_logits returns the tokens' vectors, not logits; set it before
                   * llm_model_load, which then loads no head */
    int64_t kinds; /* number of token types (BERT's segments) */
    llm_norm_kind norm;
    llm_qk_norm qk_norm;
    double eps;
    tsh_activation act;
    int turns_part;       /* 1: the family may rotate a part of each head (partial_rotary_factor) */
    llm_rope rope, local; /* rope: rotary positions of all layers; but if local.on, layers with the
                           * sliding window use `local` */
    int tied;             /* 1: the head shares the embedding's weight */
    char head[96];        /* name of the head's tensor, if tied and the files do not have the
                           * embedding's; else "" */
    int qkv_bias, out_bias, mlp_bias; /* 1: the projections to q, k and v have biases; the output
                                       * projection of attention has one; the MLP's layers have */
    int parallel;      /* 1: attention and MLP read the same x; 0: the MLP follows the attention */
    int rows_out;      /* 1 (GGUF): all weights are stored (out, in), also those that safetensors
                        * files of the Hugging Face hub store (in, out) */
    struct gguf *gguf; /* the GGUF file that the model is read from; NULL: it is a folder */
    int variant;       /* for the family's own use, such as flags of its variants */
    double scale;      /* multiplies q k^T; 0: 1 / sqrt(head_size) */
    /* Factors that multiply the embeddings, the outputs of attention and MLP, and the logits; 0
     * stands for 1. */
    double embed_scale, branch_scale, logit_scale;
    int64_t window; /* keys that a token attends to in a layer with a sliding window; 0: all */
    unsigned char slides[LLM_MOST_LAYERS];  /* slides[i]: 1: layer i has the sliding window */
    double score_cap, logit_cap;            /* soft caps c tanh(x / c) of attention scores and of
                                             * logits; 0: none */
    unsigned char no_rope[LLM_MOST_LAYERS]; /* no_rope[i]: 1: layer i has no rotary positions */
    tsh_dtype dtype; /* dtype of the weights in config.json; TSH_F32 if the key is missing */
    int broadcast;   /* 1: rank 0 alone has the files, and sends the others their shards */
    const char *cache;        /* .cache, .hasher and .stamp of tsh_file_desc; NULL: none */
    const tsh_hasher *hasher;
    uint64_t stamp;
    int64_t eos[LLM_MOST_EOS]; /* the tokens that end a text */
    int eos_count;
} llm_config;

/* -- reading keys of config.json -------------------------------------------- */

/* Records in c->error why a model is refused, unless there is an error already. */
TSH_PRINTF(2, 3)
static void llm_refuse(llm_config *c, const char *format, ...) {
    va_list list;
    if (c->error[0] != 0) return;
    va_start(list, format);
    tsh_text_format(c->error, sizeof c->error, format, list);
    va_end(list);
    (void)quote_message(c->error);
}

/* Passes a warning to c->options.warn, unless that is NULL. */
TSH_PRINTF(2, 3)
static void llm_warn(const llm_config *c, const char *format, ...) {
    char sentence[TSH_MESSAGE_SIZE];
    va_list list;
    va_start(list, format);
    vsnprintf(sentence, sizeof sentence, format, list);
    va_end(list);
    if (c->options.warn) c->options.warn(c->options.user, sentence);
}

/* Writes a value as JSON to text, at most 60 bytes of it. Returns text. */
static const char *llm_json_text(const cJSON *item, char *text, size_t size) {
    char *whole = cJSON_PrintUnformatted(item);
    snprintf(text, size, "%.60s%s", whole ? whole : "?", whole && strlen(whole) > 60 ? "..." : "");
    cJSON_free(whole);
    return text;
}

static void llm_refuse_value(llm_config *c, const char *key, const cJSON *item, const char *why) {
    char text[80];
    llm_refuse(c, "config.json: %s is %s; %s", key, llm_json_text(item, text, sizeof text), why);
}

/* Returns the value of the first of the keys "a|b" that is present and not null, else NULL. Marks
 * them all as read: moves them from c->unread to c->read. */
static const cJSON *llm_config_key(llm_config *c, const char *keys) {
    const cJSON *found = NULL;
    while (*keys) {
        char key[64];
        const size_t n = strcspn(keys, "|");
        snprintf(key, sizeof key, "%.*s", (int)n, keys);
        cJSON *item = cJSON_DetachItemFromObjectCaseSensitive(c->unread, key);
        /* adds the item with its key to the object c->read, without allocating memory */
        if (item) cJSON_AddItemToArray(c->read, item);
        item = cJSON_GetObjectItemCaseSensitive(c->read, key);
        if (!found && item && !cJSON_IsNull(item)) found = item;
        keys += keys[n] == '|' ? n + 1 : n;
    }
    return found;
}

/* Returns the number in item. If item is no number, or above 1e12 in magnitude, records an error
 * and returns 1. */
static double llm_json_number(llm_config *c, const cJSON *item) {
    if (cJSON_IsNumber(item) && fabs(item->valuedouble) <= 1e12) return item->valuedouble;
    llm_refuse_value(c, item->string ? item->string : "an element", item,
                     "it must be a number of at most 1e12");
    return 1;
}

/* Returns the number that llm_config_key finds; `otherwise` if no key is present (LLM_NEEDED: an
 * error). */
static double llm_config_number(llm_config *c, const char *keys, double otherwise) {
    const cJSON *item = llm_config_key(c, keys);
    if (item) return llm_json_number(c, item);
    if (otherwise > LLM_NEEDED) return otherwise;
    llm_refuse(c, "config.json: %s needs the key %s, which is not there", c->type, keys);
    return 1;
}

/* Returns the whole number, from 0 to 1e9, that llm_config_key finds; `otherwise` if no key is
 * present (LLM_NEEDED: an error). Any other number is an error; then returns 0. */
static int64_t llm_config_count(llm_config *c, const char *keys, double otherwise) {
    const double value = llm_config_number(c, keys, otherwise);
    if (value >= 0 && value <= 1e9 && floor(value) == value) return (int64_t)value;
    if (!c->error[0]) llm_refuse(c, "config.json: %s is %g, not a whole number", keys, value);
    return 0;
}

static int llm_config_flag(llm_config *c, const char *keys, int otherwise) {
    const cJSON *item = llm_config_key(c, keys);
    if (item && !cJSON_IsBool(item))
        llm_refuse_value(c, item->string, item, "it must be true or false");
    return item ? cJSON_IsTrue(item) : otherwise;
}

/* Refuses a model whose flag `key` is not `value`. An absent flag counts as `otherwise`. */
LLM_API void llm_config_must(llm_config *c, const char *key, int value, int otherwise) {
    if (llm_config_flag(c, key, otherwise) != value)
        llm_refuse(c, "config.json: %s is %s, which is not supported for %s", key,
                   value ? "false" : "true", c->type);
}

static const char *llm_config_string(llm_config *c, const char *keys, const char *otherwise) {
    const cJSON *item = llm_config_key(c, keys);
    if (item && !cJSON_IsString(item))
        llm_refuse_value(c, item->string, item, "it must be a string");
    return item && cJSON_IsString(item) ? item->valuestring : otherwise;
}

LLM_API void llm_read_activation(llm_config *c, const char *key, const char *otherwise) {
    static const struct {
        const char *name;
        tsh_activation act;
    } all[] = {{"silu", TSH_SILU}, {"swish", TSH_SILU}, {"relu", TSH_RELU}, {"gelu", TSH_GELU},
               {"gelu_new", TSH_GELU_TANH}, {"gelu_pytorch_tanh", TSH_GELU_TANH},
               {"gelu_fast", TSH_GELU_TANH}};
    const char *name = llm_config_string(c, key, otherwise);
    const size_t count = sizeof all / sizeof *all;
    size_t i = 0;
    if (!name) return; /* llm_config_string has refused it: not a string */
    while (i < count && strcmp(all[i].name, name) != 0) i++;
    if (i < count)
        c->act = all[i].act;
    else
        llm_refuse(c, "config.json: %s is \"%s\"; known are silu, relu, gelu, gelu_new, "
                      "gelu_pytorch_tanh and gelu_fast", key, name);
}

/* Reads the sizes that nearly all families have, under their usual keys. Refuses a number of query
 * heads that is no multiple of the number of key heads. */
LLM_API void llm_read_sizes(llm_config *c) {
    c->vocabulary = llm_config_count(c, "vocab_size", LLM_NEEDED);
    c->width = llm_config_count(c, "hidden_size|n_embd|n_embed", LLM_NEEDED);
    c->layers = llm_config_count(c, "num_hidden_layers|n_layer", LLM_NEEDED);
    c->heads = llm_config_count(c, "num_attention_heads|n_head", LLM_NEEDED);
    c->kv_heads = llm_config_count(c, "num_key_value_heads", (double)c->heads);
    c->head_size = llm_config_count(c, "head_dim", c->heads ? (double)(c->width / c->heads) : 0);
    if (c->layers > LLM_MOST_LAYERS || c->heads > LLM_MOST_HEADS)
        llm_refuse(c, "config.json: %d layers of %d heads are more than %d of %d", (int)c->layers,
                   (int)c->heads, LLM_MOST_LAYERS, LLM_MOST_HEADS);
    if (!c->error[0] && (!c->heads || !c->kv_heads || c->heads % c->kv_heads || !c->head_size))
        llm_refuse(c, "config.json: %d heads do not divide into %d groups, or %d features into "
                      "heads", (int)c->heads, (int)c->kv_heads, (int)c->width);
}

/* Reads which layers have a sliding window, and its length; `absent` is the length if config.json
 * has no sliding_window (null: no window). layer_types names the layers; without it they are those
 * from index `from` on, except each `every`-th of all layers (0: no exceptions). */
LLM_API void llm_read_window(llm_config *c, int64_t absent, int64_t from, int64_t every) {
    const int there = cJSON_GetObjectItemCaseSensitive(c->unread, "sliding_window") != NULL;
    const cJSON *types = llm_config_key(c, "layer_types"), *type;
    const int same = strcmp(c->type, "phi3") == 0 || strcmp(c->type, "starcoder2") == 0;
    int64_t i = 0;
    c->window = llm_config_count(c, "sliding_window", there ? 0 : (double)absent);
    if (types && cJSON_GetArraySize(types) != c->layers)
        llm_refuse(c, "config.json: layer_types has %d values for %d layers",
                   cJSON_GetArraySize(types), (int)c->layers);
    for (i = 0; i < c->layers && i < LLM_MOST_LAYERS; i++)
        c->slides[i] = !types && i >= from && (every == 0 || (i + 1) % every != 0);
    i = 0;
    cJSON_ArrayForEach(type, types) {
        const char *name = cJSON_IsString(type) ? type->valuestring : "";
        const int slides = strcmp(name, "sliding_attention") == 0;
        if (!slides && strcmp(name, "full_attention") != 0)
            llm_refuse_value(c, "layer_types", types, "known are full and sliding attention");
        /* refused, as transformers ignores layer_types for phi3 and starcoder2 */
        if (!slides && c->window > 0 && same)
            llm_refuse(c, "config.json: layer_types has %s; all layers of %s have the window", name,
                       c->type);
        if (i < LLM_MOST_LAYERS) c->slides[i++] = (unsigned char)slides;
    }
}

/* -- rotary positions, and how their frequencies are scaled ----------------- */

static double llm_rope_number(llm_config *c, const cJSON *scaling, const char *key,
                              double otherwise) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(scaling, key);
    if (item && !cJSON_IsNull(item)) return llm_json_number(c, item);
    if (otherwise > LLM_NEEDED) return otherwise;
    llm_refuse(c, "config.json: rotary scaling \"%s\" needs the key %s", c->rope.kind, key);
    return 1;
}

/* Llama 3.1: divides low frequencies by the scaling's factor, keeps high ones, and interpolates
 * between. old: tokens of the longest text before the context was extended. */
static void llm_rope_llama3(llm_config *c, const cJSON *scaling, double old) {
    const double factor = llm_rope_number(c, scaling, "factor", LLM_NEEDED);
    const double low = llm_rope_number(c, scaling, "low_freq_factor", LLM_NEEDED);
    const double high = llm_rope_number(c, scaling, "high_freq_factor", LLM_NEEDED);
    for (int64_t i = 0; i < c->rope.dims / 2; i++) {
        const double turns = old * c->rope.freqs[i] / (2 * 3.14159265358979323846);
        /* part: 1: the frequency is kept; 0: divided by factor; between: interpolated */
        double part = (turns - low) / (high - low);
        part = part < 0 ? 0 : part > 1 ? 1 : part;
        c->rope.freqs[i] *= (1 - part) / factor + part;
    }
}

/* Returns YaRN's factor for cosines and sines when the context is `factor` times as long: 0.1 scale
 * log(factor) + 1, or 1 if factor is at most 1. */
static double llm_yarn_scale(double factor, double scale) {
    return factor > 1 ? 0.1 * scale * log(factor) + 1 : 1;
}

/* YaRN (Peng et al. 2023): keeps the high frequencies of the first feature pairs, and divides the
 * low ones of the last pairs by the scaling's factor, with a linear ramp over the pairs between.
 * places: tokens of the longest text; old: the same before the context was extended. */
static void llm_rope_yarn(llm_config *c, const cJSON *scaling, double places, double old) {
    /* a factor that is null stands for places / old; one that is missing is an error */
    const int there = cJSON_GetObjectItemCaseSensitive(scaling, "factor") != NULL;
    const double factor = llm_rope_number(c, scaling, "factor", there ? places / old : LLM_NEEDED);
    const double fast = llm_rope_number(c, scaling, "beta_fast", 32);
    const double slow = llm_rope_number(c, scaling, "beta_slow", 1);
    const double one = llm_rope_number(c, scaling, "mscale", 0);
    const double all = llm_rope_number(c, scaling, "mscale_all_dim", 0);
    const double dims = (double)c->rope.dims, turn = 2 * 3.14159265358979323846;
    const double rate = 2 * log(c->rope.base);
    double from = dims * log(old / ((fast == 0 ? 32 : fast) * turn)) / rate;
    double to = dims * log(old / ((slow == 0 ? 1 : slow) * turn)) / rate;
    if (!cJSON_IsFalse(cJSON_GetObjectItemCaseSensitive(scaling, "truncate"))) {
        from = floor(from);
        to = ceil(to);
    }
    from = from < 0 ? 0 : from;
    to = to > dims - 1 ? dims - 1 : to;
    to = to == from ? to + 0.001 : to;
    c->rope.factor = llm_rope_number(c, scaling, "attention_factor",
                                     one != 0 && all != 0
                                         ? llm_yarn_scale(factor, one) / llm_yarn_scale(factor, all)
                                         : llm_yarn_scale(factor, 1));
    for (int64_t i = 0; i < c->rope.dims / 2; i++) {
        double part = ((double)i - from) / (to - from);
        part = part < 0 ? 0 : part > 1 ? 1 : part;
        c->rope.freqs[i] *= part / factor + 1 - part;
    }
}

/* LongRoPE (Ding et al. 2024): divides each pair's frequency by a factor of its own, from one list
 * for texts of up to `old` tokens, and from another for longer texts. places: tokens of the longest
 * text. */
static void llm_rope_long(llm_config *c, const cJSON *scaling, double places, double old) {
    const double factor = llm_rope_number(c, scaling, "factor", places / old);
    c->rope.factor = llm_rope_number(c, scaling, "attention_factor",
                                     factor > 1 ? sqrt(1 + log(factor) / log(old)) : 1);
    c->rope.limit = (int64_t)old;
    for (int far = 0; far < 2; far++) {
        const char *key = far ? "long_factor" : "short_factor";
        const cJSON *list = cJSON_GetObjectItemCaseSensitive(scaling, key);
        double *freqs = far ? c->rope.longer : c->rope.freqs;
        for (int i = 0; i < c->rope.dims / 2; i++) {
            const cJSON *item = cJSON_IsArray(list) ? cJSON_GetArrayItem(list, i) : NULL;
            const double by = item ? llm_json_number(c, item) : 0;
            if (by <= 0 || cJSON_GetArraySize(list) != c->rope.dims / 2)
                llm_refuse(c, "config.json: %s must be a list of %d positive numbers", key,
                           (int)c->rope.dims / 2);
            freqs[i] = pow(c->rope.base, -2 * (double)i / (double)c->rope.dims) / by;
        }
    }
}

/* Sets rope->freqs for texts of n tokens, if the scaling depends on the length: dynamic scaling
 * changes the base, as in transformers, LongRoPE has a second list. Returns 1 if they changed. */
LLM_API int llm_rope_of(const llm_rope *config, llm_rope *rope, int64_t n) {
    const double dims = (double)config->dims, limit = (double)config->limit;
    const double *freqs = n > config->limit ? config->longer : config->freqs;
    double own[LLM_MOST_PAIRS], base;
    if (config->limit == 0) return 0;
    if (config->stretch > 0 && n > config->limit) {
        base = config->base * pow(config->stretch * (double)n / limit - (config->stretch - 1),
                                  dims / (dims - 2));
        for (int64_t i = 0; i < config->dims / 2; i++) own[i] = pow(base, -2 * (double)i / dims);
        freqs = own;
    }
    const size_t bytes = (size_t)(config->dims / 2) * sizeof *freqs;
    if (memcmp(rope->freqs, freqs, bytes) == 0) return 0;
    memcpy(rope->freqs, freqs, bytes);
    return 1;
}

/* Refuses a rotary scaling that is no object, or has a key that is not known. */
static void llm_rope_known(llm_config *c, const cJSON *scaling) {
    static const char known[] =
        " type rope_type rope_theta partial_rotary_factor factor low_freq_factor high_freq_factor "
        "original_max_position_embeddings attention_factor beta_fast beta_slow short_factor "
        "long_factor ";
    static const char of_yarn[] = " mscale mscale_all_dim truncate ";
    const int yarn = strcmp(c->rope.kind, "yarn") == 0;
    const cJSON *item;
    if (scaling && !cJSON_IsObject(scaling) && !cJSON_IsNull(scaling))
        llm_refuse_value(c, scaling->string, scaling, "it must be an object, as {\"rope_type\": "
                                                      "\"default\"}");
    cJSON_ArrayForEach(item, scaling) {
        char word[80];
        snprintf(word, sizeof word, " %.70s ", item->string ? item->string : "");
        if (!strstr(known, word) && !(yarn && strstr(of_yarn, word)) && !cJSON_IsNull(item))
            llm_refuse_value(c, item->string, item, "this part of the rotary scaling is not known");
    }
}

/* Sets c->rope.kind to the scaling's rope_type, in older files its type; "default" if it has
 * neither. In phi3, "su" and "yarn" are older names of longrope, and no other kind is supported but
 * default. */
static void llm_rope_name(llm_config *c, const cJSON *scaling) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(scaling, "rope_type");
    const int phi3 = strcmp(c->type, "phi3") == 0;
    if (!item) item = cJSON_GetObjectItemCaseSensitive(scaling, "type");
    const char *kind = cJSON_IsString(item) ? item->valuestring : "default";
    if (item && !cJSON_IsString(item) && !cJSON_IsNull(item))
        llm_refuse_value(c, item->string, item, "it must be a string");
    if (phi3 && (strcmp(kind, "su") == 0 || strcmp(kind, "yarn") == 0)) kind = "longrope";
    if (phi3 && strcmp(kind, "longrope") != 0 && strcmp(kind, "default") != 0)
        llm_refuse(c, "config.json: the rotary scaling is \"%.60s\"; phi3 has default and longrope",
                   kind);
    snprintf(c->rope.kind, sizeof c->rope.kind, "%s", kind);
}

/* Scales c->rope's frequencies as its kind says. places, old: tokens of the longest text, now and
 * before the context was extended. */
static void llm_rope_scale(llm_config *c, const cJSON *scaling, double places, double old) {
    const char *kind = c->rope.kind;
    if (strcmp(kind, "linear") == 0) {
        const double factor = llm_rope_number(c, scaling, "factor", LLM_NEEDED);
        for (int64_t i = 0; i < c->rope.dims / 2; i++) c->rope.freqs[i] /= factor;
    } else if (strcmp(kind, "llama3") == 0) {
        llm_rope_llama3(c, scaling, old);
    } else if (strcmp(kind, "yarn") == 0) {
        llm_rope_yarn(c, scaling, places, old);
    } else if (strcmp(kind, "longrope") == 0) {
        llm_rope_long(c, scaling, places, old);
    } else if (strcmp(kind, "dynamic") == 0) {
        c->rope.limit = (int64_t)places; /* texts of up to `places` tokens are not scaled */
        c->rope.stretch = llm_rope_number(c, scaling, "factor", LLM_NEEDED);
    } else if (strcmp(kind, "default") != 0) {
        llm_refuse(c, "config.json: the rotary scaling is \"%s\"; known are default, linear, "
                      "llama3, yarn, longrope and dynamic", kind);
    }
    for (int64_t i = 0; i < c->rope.dims / 2; i++)
        if (!(fabs(c->rope.freqs[i]) <= DBL_MAX && fabs(c->rope.longer[i]) <= DBL_MAX))
            llm_refuse(c, "config.json: the rotary scaling \"%s\" gives frequencies that are not "
                          "finite; check its numbers", kind);
}

/* Sets c->rope from the scaling, an object of config.json or NULL. base, part: theta, and the
 * fraction of a head's features that is rotated, if the scaling does not have them. old:
 * original_max_position_embeddings from outside the scaling, which overrides that inside; 0:
 * none. */
static void llm_set_rope(llm_config *c, const cJSON *scaling, double base, double part,
                         double old) {
    const double places = llm_config_number(c, "max_position_embeddings", 2048);
    base = llm_rope_number(c, scaling, "rope_theta", base);
    part = llm_rope_number(c, scaling, "partial_rotary_factor", part);
    const double own = llm_rope_number(c, scaling, "original_max_position_embeddings", places);
    memset(&c->rope, 0, sizeof c->rope);
    llm_rope_name(c, scaling);
    if (strcmp(c->rope.kind, "default") != 0 && strcmp(c->rope.kind, "linear") != 0 &&
        !llm_config_key(c, "max_position_embeddings")) /* needed: families differ in its default */
        llm_refuse(c, "config.json: rotary scaling \"%s\" needs the key max_position_embeddings",
                   c->rope.kind);
    c->rope.on = 1;
    c->rope.factor = 1;
    c->rope.base = base;
    if (part != 1 && !c->turns_part && !c->gguf) /* refused, as transformers would ignore `part` */
        llm_refuse(c, "config.json: partial_rotary_factor is %g; %s turns all features of a head",
                   part, c->type);
    part *= (double)c->head_size;
    c->rope.dims = part >= 2 && part < 2 * LLM_MOST_PAIRS + 1 ? (int64_t)part : 0;
    if (c->rope.dims < 2 || c->rope.dims % 2 || base <= 0) {
        llm_refuse(c, "config.json: %g features of a head cannot turn with base %g", part, base);
        c->rope.dims = 0;
        return;
    }
    llm_rope_known(c, scaling);
    for (int64_t i = 0; i < c->rope.dims / 2; i++)
        c->rope.freqs[i] = pow(base, -2 * (double)i / (double)c->rope.dims);
    llm_rope_scale(c, scaling, places, old > 0 ? old : own);
}

/* Returns the object with the rotary parameters: rope_scaling, the older name, unless it is absent,
 * null or empty, else rope_parameters. NULL: there is none. */
static const cJSON *llm_rope_object(llm_config *c) {
    const cJSON *newer = llm_config_key(c, "rope_parameters");
    const cJSON *older = llm_config_key(c, "rope_scaling");
    if (older && (older->child || !cJSON_IsObject(older))) return older;
    return newer ? newer : older;
}

/* Reads rotary positions that are the same in all layers. If several keys give a value, takes the
 * same one as transformers. base_key, part_key: the top-level keys of theta and of the rotated
 * fraction of a head; base, part: their defaults. */
static void llm_read_rope_named(llm_config *c, const char *base_key, double base,
                                const char *part_key, double part) {
    const int phi3 = strcmp(c->type, "phi3") == 0 && !c->gguf;
    const cJSON *scaling = llm_rope_object(c);
    base = llm_config_number(c, base_key, base);
    part = llm_config_number(c, part_key, part);
    llm_set_rope(c, scaling, base, part,
                 llm_config_number(c, "original_max_position_embeddings", phi3 ? 4096 : 0));
}

LLM_API void llm_read_rope(llm_config *c, double base, double part) {
    llm_read_rope_named(c, "rope_theta", base, "partial_rotary_factor", part);
}

/* -- opening and closing config.json ---------------------------------------- */

static int llm_is_token(const cJSON *json) {
    return cJSON_IsNumber(json) && json->valuedouble == json->valueint;
}

/* Reads eos_token_id, the tokens that end a text: a number, or a list of numbers. If the key is
 * absent, c->eos stays. */
static void llm_read_eos(llm_config *c, const cJSON *json) {
    const cJSON *eos = cJSON_GetObjectItemCaseSensitive(json, "eos_token_id"), *one;
    if (!eos) return;
    c->eos_count = 0;
    if (llm_is_token(eos)) c->eos[c->eos_count++] = eos->valueint;
    else if (!cJSON_IsArray(eos) && !cJSON_IsNull(eos))
        llm_refuse_value(c, "eos_token_id", eos,
                         "it must be a whole number, or a list of whole numbers");
    cJSON_ArrayForEach(one, eos) {
        if (!llm_is_token(one) || c->eos_count == LLM_MOST_EOS) {
            llm_refuse_value(c, "eos_token_id", eos,
                             "it must be a list of at most 16 whole numbers");
            return;
        }
        c->eos[c->eos_count++] = one->valueint;
    }
}

/* Takes over json, the parsed config.json (NULL: llm_parse failed, and errno says why), and reads
 * the keys that all families share. where: the name of the file in errors. Returns 0, with
 * c->error, on failure. */
static int llm_config_take(llm_config *c, cJSON *json, const char *where) {
    const char *type, *dtype, *twice;
    c->unread = json;
    c->read = cJSON_CreateObject();
    if (!c->read || (!json && errno == ENOMEM)) {
        llm_refuse(c, "%.300s: not enough memory", where);
        return 0;
    }
    if (!cJSON_IsObject(json)) {
        llm_refuse(c, "%.300s is not a JSON object", where);
        return 0;
    }
    /* refuses a key that is there twice, as parsers differ in which of the two counts */
    if ((twice = llm_json_twice(json, 0)) != NULL) {
        llm_refuse(c, "%.300s has the key %.60s twice", where, twice);
        return 0;
    }
    llm_read_eos(c, json);
    dtype = llm_config_string(c, "dtype|torch_dtype", "float32");
    c->dtype = strcmp(dtype, "bfloat16") == 0  ? TSH_BF16
               : strcmp(dtype, "float16") == 0 ? TSH_F16
                                               : TSH_F32;
    type = llm_config_string(c, "model_type", NULL);
    if (!type) llm_refuse(c, "%.300s has no model_type", where);
    snprintf(c->type, sizeof c->type, "%s", type ? type : "");
    return c->error[0] == 0;
}

/* Refuses a text that is no JSON, or has something after its value. */
static void llm_check_json(llm_config *c, const char *text, const char *where) {
    char why[160];
    if (llm_json_explain(text, why, sizeof why)) llm_refuse(c, "%.300s: %s", where, why);
}

/* Reads a folder's config.json by llm_config_take, then the tokens that end a text from its
 * generation_config.json, if it has one. Returns 0, with c->error, on failure. */
LLM_API int llm_config_open(llm_config *c, const char *folder) {
    tsh_error why;
    char *text = llm_read_text(folder, "config.json", &why), where[340], other[1024];
    if (!text) {
        const int absent = llm_is_absent(errno) &&
                           llm_found_for_config(folder, other, sizeof other);
        llm_refuse(c, "%s", absent ? other : why.message);
        return 0;
    }
    snprintf(where, sizeof where, "%.300s/config.json", folder);
    llm_check_json(c, text, where);
    cJSON *json = llm_parse(text);
    int lacking = !json && errno == ENOMEM;
    free(text);
    errno = lacking ? ENOMEM : 0;
    if (!llm_config_take(c, json, where)) return 0;
    text = llm_read_text(folder, "generation_config.json", &why);
    if (!text && !llm_is_absent(errno)) llm_refuse(c, "%s", why.message);
    snprintf(where, sizeof where, "%.300s/generation_config.json", folder);
    if (text) llm_check_json(c, text, where);
    cJSON *generation = text ? llm_parse(text) : NULL;
    if (text && !generation && errno == ENOMEM) llm_refuse(c, "%s: not enough memory", where);
    llm_read_eos(c, generation);
    cJSON_Delete(generation);
    free(text);
    return c->error[0] == 0;
}

/* Checks the keys that were not read: refuses those that may change results, or warns of them if
 * options.unknown_keys is set. Returns 0, with c->error, if it refused one. */
LLM_API int llm_config_close(llm_config *c) {
    const cJSON *item;
    cJSON_ArrayForEach(item, c->unread) {
        const llm_fixed_key *fixed = llm_fixed_key_find(item->string, c->type);
        char value[80], why[160];
        llm_json_text(item, value, sizeof value);
        if (llm_key_is_harmless(item) || (fixed && strcmp(value, fixed->value) == 0)) continue;
        if (fixed) {
            snprintf(why, sizeof why, "supported for %s is %s", c->type, fixed->value);
            llm_refuse_value(c, item->string, item, why);
        } else if (c->options.unknown_keys) {
            llm_warn(c, "config.json: %.60s is %s; this key is not known and is passed over, as "
                        "--allow-unknown-keys says", item->string, value);
        } else {
            llm_refuse_value(c, item->string, item,
                             "a key that is not known, and may change what the model computes; "
                             "--allow-unknown-keys passes over it");
        }
    }
    return c->error[0] == 0;
}

#endif
