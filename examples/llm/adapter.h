/* adapter.h - adapters of low rank (tsh_lora) in the files of the Python library PEFT: a folder
 * with adapter_config.json and adapter_model.safetensors
 *
 *     llm_adapter a = {.lora = {.rank = 8, .alpha = 16},
 *                      .targets = {"q_proj", "v_proj"}, .count = 2};
 *     if (llm_adapter_add(root, &a) == TSH_OK) ...                      // train, then
 *     llm_adapter_save(root, &a, "out", NULL);                          // PEFT reads it
 *     if (llm_adapter_read(&a, "out", &why) && llm_adapter_add(root, &a) == TSH_OK)
 *         llm_adapter_load(root, &a, "out", NULL);                      // and what PEFT wrote
 *
 * Link with tshard, cJSON and PCRE2. */
#ifndef LLM_ADAPTER_H
#define LLM_ADAPTER_H

#include "files.h"
#include "json.h"
#include "quote.h"

#ifndef PCRE2_CODE_UNIT_WIDTH
#define PCRE2_CODE_UNIT_WIDTH 8
#endif
#include <pcre2.h>

#if defined(__GNUC__)
#define LLM_ADAPTER_API __attribute__((unused)) static
#else
#define LLM_ADAPTER_API static
#endif

enum { LLM_ADAPTER_TARGETS = 32, LLM_ADAPTER_PATTERN = 1 << 15 };

/* What adapter_config.json says. The layers that get an adapter are those that `targets` names or
 * whose path `pattern` matches; with neither, all linear layers, except a classifier. */
typedef struct llm_adapter {
    tsh_lora_desc lora;                    /* a file has only .rank, .alpha, .dropout and .rslora */
    char targets[LLM_ADAPTER_TARGETS][64]; /* names of layers, or ends of paths: "q_proj" */
    int count;                             /* length of targets */
    char pattern[LLM_ADAPTER_PATTERN]; /* used if count is 0: a regular expression that matches the
                                        * whole path of a layer; llm_adapter_read turns a list that
                                        * does not fit into `targets` into one; "": none */
    char base[256]; /* name or path of the model that the adapter was made for; "": unknown */
    char task[32];  /* what the model is for, as PEFT names it: "CAUSAL_LM"; "": not said */
} llm_adapter;

/* Sets *why to "FOLDER/adapter_config.json: KEY WHAT". Returns 0. */
static int llm_adapter_refuse(tsh_error *why, const char *folder, const char *key,
                              const char *what) {
    (void)tsh_error_set(why, TSH_ERR_UNSUPPORTED, -1, "%.300s/adapter_config.json: %.80s %s",
                        folder, key, what);
    (void)quote_message(why->message);
    return 0;
}

/* Returns 1 if a key that may change the result has a value with which it does not: false, null,
 * "none", or an empty text, list or object. */
static int llm_adapter_usual(const cJSON *item) {
    return cJSON_IsNull(item) || cJSON_IsFalse(item) ||
           ((cJSON_IsArray(item) || cJSON_IsObject(item)) && !item->child) ||
           (cJSON_IsString(item) &&
            (!item->valuestring[0] || strcmp(item->valuestring, "none") == 0));
}

/* Returns 0 and sets *why if the config has a key, such as one of a later version of PEFT, that may
 * change what an adapter computes, or add tensors other than A and B. */
static int llm_adapter_keys(const cJSON *json, const char *folder, tsh_error *why) {
    /* the keys that llm_adapter_parse reads, and those that matter only before or while the adapter
     * is trained */
    static const char *const known[] = {
        "peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules",
        "init_lora_weights", "base_model_name_or_path", "task_type", "auto_mapping",
        "peft_version", "revision", "inference_mode", "fan_in_fan_out", "megatron_config",
        "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
        "qalora_group_size", "runtime_config"};
    const cJSON *item;
    cJSON_ArrayForEach(item, json) {
        size_t i = 0;
        while (i < sizeof known / sizeof *known && strcmp(item->string, known[i]) != 0) i++;
        if (i == sizeof known / sizeof *known && !llm_adapter_usual(item))
            return llm_adapter_refuse(why, folder, item->string,
                                      "may change what the adapter computes, or add other tensors; "
                                      "plain LoRA alone is read");
    }
    return 1;
}

/* Returns the string of a key; "" if the key is absent or its value is no string. */
static const char *llm_adapter_string(const cJSON *json, const char *key) {
    const char *text = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(json, key));
    return text ? text : "";
}

/* Sets *value to the number of a key; to `otherwise` if the key is absent or null. Returns 0 and
 * sets *why if the key has no number from `least` to `most`. */
static int llm_adapter_number(const cJSON *json, const char *key, double least, double most,
                              double otherwise, double *value, const char *folder,
                              tsh_error *why) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, key);
    char what[100];
    *value = otherwise;
    if (!item || cJSON_IsNull(item)) return 1;
    *value = item->valuedouble;
    if (cJSON_IsNumber(item) && *value >= least && *value <= most) return 1;
    (void)snprintf(what, sizeof what, "is no number from %.10g to %.10g", least, most);
    return llm_adapter_refuse(why, folder, key, what);
}

/* Reads r, lora_alpha, lora_dropout and use_rslora to a->lora. Returns 0 and sets *why if tsh_lora
 * does not take their values. */
static int llm_adapter_values(llm_adapter *a, const cJSON *json, const char *folder,
                              tsh_error *why) {
    const cJSON *rslora = cJSON_GetObjectItemCaseSensitive(json, "use_rslora");
    double rank, alpha;
    if (!llm_adapter_number(json, "r", 1, 1 << 20, 8, &rank, folder, why) ||
        !llm_adapter_number(json, "lora_alpha", 0, 1e9, 8, &alpha, folder, why) ||
        !llm_adapter_number(json, "lora_dropout", 0, 1, 0, &a->lora.dropout, folder, why))
        return 0;
    a->lora.rank = (int)rank;
    a->lora.alpha = alpha > 0 ? alpha : TSH_ZERO;
    a->lora.rslora = cJSON_IsTrue(rslora);
    if (a->lora.rank != rank) return llm_adapter_refuse(why, folder, "r", "is no whole number");
    return !rslora || cJSON_IsBool(rslora) || cJSON_IsNull(rslora) ||
           llm_adapter_refuse(why, folder, "use_rslora", "is not true or false");
}

/* Appends a text to the regular expression a->pattern; quotes 1: with backslashes, so that the text
 * matches itself. Returns 0 if there is no room. */
static int llm_adapter_append(llm_adapter *a, const char *text, int quotes) {
    size_t n = strlen(a->pattern);
    for (; *text; text++) {
        const int special = quotes && strchr("\\.^$|()[]{}*+?", *text);
        if (n + 3 > sizeof a->pattern) return 0;
        if (special) a->pattern[n++] = '\\';
        a->pattern[n++] = *text;
    }
    a->pattern[n] = 0;
    return 1;
}

/* Returns the regular expression a->pattern, compiled; the caller frees it. Returns NULL and sets
 * *why if it is invalid, or there is not enough memory. */
static pcre2_code *llm_adapter_compile(const llm_adapter *a, tsh_error *why) {
    int number;
    size_t at;
    unsigned char text[128] = "";
    pcre2_code *code = pcre2_compile((PCRE2_SPTR)a->pattern, PCRE2_ZERO_TERMINATED,
                                     PCRE2_ANCHORED | PCRE2_ENDANCHORED | PCRE2_UTF, &number, &at,
                                     NULL);
    if (code) return code;
    (void)pcre2_get_error_message(number, text, sizeof text);
    (void)tsh_error_set(why, TSH_ERR_UNSUPPORTED, -1,
                        "target_modules is a regular expression that cannot be read: %s, after %d "
                        "characters",
                        (const char *)text, (int)at);
    return NULL;
}

/* Sets a->targets or a->pattern from target_modules: "all-linear", a regular expression, or a list
 * of names. Returns 0 and sets *why if it is none of these. */
static int llm_adapter_targets(llm_adapter *a, const cJSON *targets, const char *folder,
                               tsh_error *why) {
    const char *text = cJSON_GetStringValue(targets);
    const cJSON *name;
    int fits = 1; /* the list fits into a->targets */
    a->count = 0;
    a->pattern[0] = 0;
    if (text && strcmp(text, "all-linear") == 0) return 1;
    if (text && *text) {
        tsh_error wrong;
        pcre2_code *code;
        if (!llm_adapter_append(a, text, 0))
            return llm_adapter_refuse(why, folder, "target_modules", "is too long");
        code = llm_adapter_compile(a, &wrong);
        pcre2_code_free(code);
        if (!code)
            (void)tsh_error_set(why, TSH_ERR_UNSUPPORTED, -1, "%.300s/adapter_config.json: %s",
                                folder, wrong.message);
        return code != NULL;
    }
    if (!cJSON_IsArray(targets) || !targets->child)
        return llm_adapter_refuse(why, folder, "target_modules",
                                  "is no list of names, no regular expression and not "
                                  "\"all-linear\"");
    cJSON_ArrayForEach(name, targets) {
        if (!cJSON_IsString(name) || !name->valuestring[0] || strpbrk(name->valuestring, "*?["))
            return llm_adapter_refuse(why, folder, "target_modules",
                                      "has an entry that is no name of a layer");
        fits = fits && a->count < LLM_ADAPTER_TARGETS &&
               strlen(name->valuestring) < sizeof a->targets[0];
        if (fits) (void)strcpy(a->targets[a->count++], name->valuestring);
    }
    if (fits) return 1;
    a->count = 0;
    fits = llm_adapter_append(a, "(?:.*\\.)?(?:", 0);
    cJSON_ArrayForEach(name, targets)
        fits = fits && (name == targets->child || llm_adapter_append(a, "|", 0)) &&
               llm_adapter_append(a, name->valuestring, 1);
    return (fits && llm_adapter_append(a, ")", 0)) ||
           llm_adapter_refuse(why, folder, "target_modules", "has too many names");
}

/* Fills in *a from a folder's config, parsed. Returns 0 and sets *why if tsh_lora cannot compute
 * such an adapter. */
static int llm_adapter_parse(llm_adapter *a, const cJSON *json, const char *folder,
                             tsh_error *why) {
    const char *init = llm_adapter_string(json, "init_lora_weights");
    const char *twice = cJSON_IsObject(json) ? llm_json_twice(json, 0) : NULL;
    if (!cJSON_IsObject(json)) return llm_adapter_refuse(why, folder, "it", "is no object");
    if (twice) return llm_adapter_refuse(why, folder, twice, "occurs twice");
    if (strcmp(llm_adapter_string(json, "peft_type"), "LORA") != 0)
        return llm_adapter_refuse(why, folder, "peft_type", "is not \"LORA\"");
    if (!llm_adapter_keys(json, folder, why) || !llm_adapter_values(a, json, folder, why)) return 0;
    /* with other methods of initialization, such as "pissa", PEFT also changes the base model */
    if (*init && strcmp(init, "gaussian") != 0)
        return llm_adapter_refuse(why, folder, "init_lora_weights",
                                  "names initial values that change the base model");
    (void)snprintf(a->base, sizeof a->base, "%.255s",
                   llm_adapter_string(json, "base_model_name_or_path"));
    (void)snprintf(a->task, sizeof a->task, "%.31s", llm_adapter_string(json, "task_type"));
    return llm_adapter_targets(a, cJSON_GetObjectItemCaseSensitive(json, "target_modules"), folder,
                               why);
}

/* Reads folder/adapter_config.json to *a. Returns 0 and *why if that fails. */
LLM_ADAPTER_API int llm_adapter_read(llm_adapter *a, const char *folder, tsh_error *why) {
    char *text = llm_read_text(folder, "adapter_config.json", why), sentence[160];
    cJSON *json;
    int ok = 0;
    if (!text) return 0;
    if (llm_json_explain(text, sentence, sizeof sentence)) {
        (void)llm_adapter_refuse(why, folder, "is no JSON:", sentence);
    } else {
        json = llm_parse(text);
        ok = json ? llm_adapter_parse(a, json, folder, why)
                  : llm_adapter_refuse(why, folder, "needs", "more memory than there is");
        cJSON_Delete(json);
    }
    free(text);
    return ok;
}

/* Callback of llm_adapter_add_named: writes into `name` (`size` bytes) the name that PEFT has for
 * the module at `path`, a path below the module that llm_adapter_add_named is given. */
typedef void (*llm_adapter_name_fn)(const char *path, char *name, size_t size, const void *user);

/* State of llm_adapter_add_named while it walks through the modules. */
typedef struct llm_adapter_adding {
    const llm_adapter *a;
    tsh_module *root;
    pcre2_code *code; /* a->pattern compiled, or NULL */
    pcre2_match_data *match;
    llm_adapter_name_fn name;
    const void *user;
    int found[LLM_ADAPTER_TARGETS]; /* found[i]: 1 if a layer with the name a->targets[i] was met */
    int added;                      /* number of layers that got an adapter so far */
} llm_adapter_adding;

/* Returns 1 if a layer of this name is to have an adapter. */
static int llm_adapter_wants(llm_adapter_adding *w, const char *name) {
    const size_t n = strlen(name);
    int wanted = 0;
    if (w->code) return pcre2_match(w->code, (PCRE2_SPTR)name, n, 0, 0, w->match, NULL) >= 0;
    for (int i = 0; i < w->a->count; i++) {
        const size_t length = strlen(w->a->targets[i]);
        if (length > n || strcmp(name + n - length, w->a->targets[i]) != 0 ||
            (length < n && name[n - length - 1] != '.'))
            continue;
        wanted = w->found[i] = 1;
    }
    return wanted;
}

/* Adds adapters to the layers below `module` that are to have one. */
static void llm_adapter_walk(llm_adapter_adding *w, tsh_module *module) {
    const size_t skip = strlen(tsh_module_path(w->root));
    tsh_module *child;
    char name[512];
    for (int i = 0; (child = tsh_child(module, i)) != NULL; i++) {
        const char *path = tsh_module_path(child) + skip + (skip > 0);
        const char *dot = strrchr(path, '.'), *last = dot ? dot + 1 : path;
        if (strcmp(last, "lora_A") == 0 || strcmp(last, "lora_B") == 0) continue;
        (void)snprintf(name, sizeof name, "%.500s", path);
        if (w->name) w->name(path, name, sizeof name, w->user);
        if (!llm_adapter_wants(w, name))
            llm_adapter_walk(w, child);
        else if (tsh_lora(w->root, path, &w->a->lora) != TSH_OK)
            return;
        else
            w->added++;
    }
}

/* Adds the adapters to all layers below module that `a` names, as PEFT does. name: callback that
 * gives the name of a layer, to be compared with those in `a`; NULL: the layer's path below
 * module. */
LLM_ADAPTER_API tsh_result llm_adapter_add_named(tsh_module *module, const llm_adapter *a,
                                                 llm_adapter_name_fn name, const void *user) {
    llm_adapter_adding w;
    tsh_ctx *ctx = tsh_module_ctx(module);
    tsh_error why;
    char pattern[80];
    if (!a->count && !a->pattern[0]) return tsh_lora(module, NULL, &a->lora);
    memset(&w, 0, sizeof w);
    w.a = a;
    w.root = module;
    w.name = name;
    w.user = user;
    if (!a->count) {
        w.code = llm_adapter_compile(a, &why);
        w.match = w.code ? pcre2_match_data_create_from_pattern(w.code, NULL) : NULL;
        if (!w.code)
            (void)tsh_fail(ctx, why.code, "%s", why.message);
        else if (!w.match)
            (void)tsh_fail(ctx, TSH_ERR_MEMORY, "not enough memory");
    }
    if (tsh_ok(ctx)) llm_adapter_walk(&w, module);
    pcre2_match_data_free(w.match);
    pcre2_code_free(w.code);
    for (int i = 0; i < a->count && tsh_ok(ctx); i++) {
        (void)snprintf(pattern, sizeof pattern, "**.%s", a->targets[i]);
        /* no layer has this name: tsh_lora records the error */
        if (!w.found[i]) (void)tsh_lora(module, pattern, &a->lora);
    }
    if (tsh_ok(ctx) && !a->count && !w.added)
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT,
                       "target_modules: \"%.200s\" matches no layer of the model", a->pattern);
    return tsh_last_error(ctx)->code;
}

/* Adds the adapters to all layers below module whose path, or the end of it, is one of the targets,
 * or whose path the pattern matches, as PEFT does. */
LLM_ADAPTER_API tsh_result llm_adapter_add(tsh_module *module, const llm_adapter *a) {
    return llm_adapter_add_named(module, a, NULL, NULL);
}

/* Sets path to folder/adapter_model.safetensors, and *desc to the options for loading and saving
 * it: a copy of `names` with the adapter's name (PEFT: "default"). */
static void llm_adapter_file(const llm_adapter *a, const char *folder, const tsh_file_desc *names,
                             tsh_file_desc *desc, char path[4096]) {
    *desc = *names;
    desc->adapter = a->lora.name ? a->lora.name : "default";
    (void)snprintf(path, 4096, "%.3900s/adapter_model.safetensors", folder);
}

/* Reads A and B of the adapters, which the module has already, from
 * folder/adapter_model.safetensors. names: options for tsh_load_with; .prefix and .rename map the
 * names in the file to those in the module. */
LLM_ADAPTER_API tsh_result llm_adapter_load_with(tsh_module *module, const llm_adapter *a,
                                                 const char *folder, const tsh_file_desc *names) {
    char path[4096];
    tsh_file_desc desc;
    llm_adapter_file(a, folder, names, &desc, path);
    return tsh_load_with(module, path, NULL, &desc);
}

/* Reads the adapters like llm_adapter_load_with, into a module whose layers are named as in the
 * file. prefix: what names in the file begin with, such as "base_model.model.transformer"; NULL:
 * "base_model.model". */
LLM_ADAPTER_API tsh_result llm_adapter_load(tsh_module *module, const llm_adapter *a,
                                            const char *folder, const char *prefix) {
    const tsh_file_desc names = {.prefix = prefix};
    return llm_adapter_load_with(module, a, folder, &names);
}

/* Returns a text as a JSON string; as null if it is empty. */
static cJSON *llm_adapter_text(const char *text) {
    return *text ? cJSON_CreateString(text) : cJSON_CreateNull();
}

/* Writes folder/adapter_config.json. Returns an error and *why if that fails. */
static tsh_result llm_adapter_write_config(const llm_adapter *a, const char *folder,
                                           tsh_error *why) {
    char path[4096];
    cJSON *json = cJSON_CreateObject();
    cJSON *targets = a->count ? cJSON_AddArrayToObject(json, "target_modules") : NULL;
    char *text;
    tsh_writer writer;
    tsh_result result;
    if (!a->count)
        (void)cJSON_AddStringToObject(json, "target_modules",
                                      a->pattern[0] ? a->pattern : "all-linear");
    for (int i = 0; i < a->count; i++)
        (void)cJSON_AddItemToArray(targets, cJSON_CreateString(a->targets[i]));
    (void)cJSON_AddStringToObject(json, "peft_type", "LORA");
    (void)cJSON_AddItemToObject(json, "task_type", llm_adapter_text(a->task));
    (void)cJSON_AddItemToObject(json, "base_model_name_or_path", llm_adapter_text(a->base));
    (void)cJSON_AddStringToObject(json, "bias", "none");
    (void)cJSON_AddNumberToObject(json, "r", a->lora.rank);
    (void)cJSON_AddNumberToObject(json, "lora_alpha",
                                  a->lora.alpha > 0   ? a->lora.alpha
                                  : a->lora.alpha < 0 ? 0
                                                      : 8);
    (void)cJSON_AddNumberToObject(json, "lora_dropout", a->lora.dropout);
    (void)cJSON_AddBoolToObject(json, "use_rslora", a->lora.rslora);
    (void)cJSON_AddBoolToObject(json, "inference_mode", 1);
    text = cJSON_Print(json);
    cJSON_Delete(json);
    if (!text) return tsh_error_set(why, TSH_ERR_MEMORY, -1, "%.300s: not enough memory", folder);
    (void)snprintf(path, sizeof path, "%.3900s/adapter_config.json", folder);
    result = tsh_writer_open(&writer, path, 0);
    (void)tsh_writer_add(&writer, text, strlen(text));
    (void)tsh_writer_add(&writer, "\n", 1);
    if (tsh_writer_close(&writer, 1) != TSH_OK) result = writer.error.code;
    if (result != TSH_OK) *why = writer.error;
    free(text);
    return result;
}

/* Writes adapter_model.safetensors and adapter_config.json to a folder that exists; names as in
 * llm_adapter_load_with. Rank 0 writes the config last, so a folder that has one is complete. Call
 * it on every rank. */
LLM_ADAPTER_API tsh_result llm_adapter_save_with(tsh_module *module, const llm_adapter *a,
                                                 const char *folder, const tsh_file_desc *names) {
    tsh_ctx *ctx = tsh_module_ctx(module);
    char path[4096];
    tsh_file_desc desc;
    tsh_error why;
    llm_adapter_file(a, folder, names, &desc, path);
    if (tsh_save_with(module, path, NULL, &desc) != TSH_OK) return tsh_last_error(ctx)->code;
    memset(&why, 0, sizeof why);
    if (tsh_world(ctx)->rank == 0) (void)llm_adapter_write_config(a, folder, &why);
    return llm_agree(ctx, &why);
}

/* Writes the files like llm_adapter_save_with, with the module's own names of layers after a
 * prefix, which is as in llm_adapter_load. */
LLM_ADAPTER_API tsh_result llm_adapter_save(tsh_module *module, const llm_adapter *a,
                                            const char *folder, const char *prefix) {
    const tsh_file_desc names = {.prefix = prefix};
    return llm_adapter_save_with(module, a, folder, &names);
}
#endif
