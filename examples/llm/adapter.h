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
 * Link with tshard and cJSON. */
#ifndef LLM_ADAPTER_H
#define LLM_ADAPTER_H

#include "files.h"
#include "json.h"
#include "quote.h"

#if defined(__GNUC__)
#define LLM_ADAPTER_API __attribute__((unused)) static
#else
#define LLM_ADAPTER_API static
#endif

enum { LLM_ADAPTER_TARGETS = 32 };

/* What adapter_config.json says. */
typedef struct llm_adapter {
    tsh_lora_desc lora;                    /* .name is kept; .parts are not in the file */
    char targets[LLM_ADAPTER_TARGETS][64]; /* names of the layers: "q_proj" */
    int count;      /* length of targets; 0: all linear layers, but no classifier */
    char base[256]; /* name or path of the model that it was made for; "": unknown */
    char task[32];  /* what the model is for, as PEFT names it: "CAUSAL_LM"; "": not said */
} llm_adapter;

/* Records an error about the config of a folder. Returns 0. */
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

/* Refuses keys, of later versions of PEFT too, that may change what an adapter computes, or add
 * tensors other than A and B. Returns 0 and *why then. */
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

/* Returns a key's text; "" if it is no text. */
static const char *llm_adapter_string(const cJSON *json, const char *key) {
    const char *text = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(json, key));
    return text ? text : "";
}

/* Reads a number from `least` to `most`; `otherwise` if the key is absent or null. Returns 0 and
 * *why if it is another one, or no number. */
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

/* Reads rank, alpha and so on. Returns 0 and *why if tsh_lora takes no such values. */
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

/* Reads the names of the layers. Returns 0 and *why if there are none. */
static int llm_adapter_targets(llm_adapter *a, const cJSON *json, const char *folder,
                               tsh_error *why) {
    static const char key[] = "target_modules";
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(json, key), *item;
    a->count = 0;
    if (strcmp(llm_adapter_string(json, key), "all-linear") == 0) return 1;
    if (!cJSON_IsArray(list) || !list->child)
        return llm_adapter_refuse(why, folder, key, "is no list of names and not \"all-linear\"");
    cJSON_ArrayForEach(item, list) {
        const char *name = cJSON_GetStringValue(item);
        if (!name || !*name || strpbrk(name, "*?[") || strlen(name) >= sizeof a->targets[0])
            return llm_adapter_refuse(why, folder, key, "has an entry that is no name of a layer");
        if (a->count == LLM_ADAPTER_TARGETS)
            return llm_adapter_refuse(why, folder, key, "has more than 32 names");
        (void)strcpy(a->targets[a->count++], name);
    }
    return 1;
}

/* Fills in *a from the parsed config of a folder. Returns 0 and *why if it is none that tsh_lora
 * can compute. */
static int llm_adapter_parse(llm_adapter *a, const cJSON *json, const char *folder,
                             tsh_error *why) {
    const char *init = llm_adapter_string(json, "init_lora_weights");
    const char *twice = cJSON_IsObject(json) ? llm_json_twice(json, 0) : NULL;
    if (!cJSON_IsObject(json)) return llm_adapter_refuse(why, folder, "it", "is no object");
    if (twice) return llm_adapter_refuse(why, folder, twice, "occurs twice");
    if (strcmp(llm_adapter_string(json, "peft_type"), "LORA") != 0)
        return llm_adapter_refuse(why, folder, "peft_type", "is not \"LORA\"");
    if (!llm_adapter_keys(json, folder, why) || !llm_adapter_values(a, json, folder, why)) return 0;
    /* PEFT changes the base model, too, by initial values of some names */
    if (*init && strcmp(init, "gaussian") != 0)
        return llm_adapter_refuse(why, folder, "init_lora_weights",
                                  "names initial values that change the base model");
    (void)snprintf(a->base, sizeof a->base, "%.255s",
                   llm_adapter_string(json, "base_model_name_or_path"));
    (void)snprintf(a->task, sizeof a->task, "%.31s", llm_adapter_string(json, "task_type"));
    return llm_adapter_targets(a, json, folder, why);
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

/* Returns 1 if another target names all layers that target i names: the same name, or the end of
 * it, as "proj" of "mlp.proj". */
static int llm_adapter_covered(const llm_adapter *a, int i) {
    const char *own = a->targets[i];
    for (int k = 0; k < a->count; k++) {
        const char *other = a->targets[k];
        const size_t n = strlen(own), m = strlen(other);
        if (k == i || m > n || strcmp(own + n - m, other) != 0) continue;
        if (m == n ? k < i : own[n - m - 1] == '.') return 1;
    }
    return 0;
}

/* Adds the adapters to all layers below module whose name, or the end of whose path, is one of the
 * targets, as PEFT does. */
LLM_ADAPTER_API tsh_result llm_adapter_add(tsh_module *module, const llm_adapter *a) {
    tsh_result result = a->count ? TSH_OK : tsh_lora(module, NULL, &a->lora);
    for (int i = 0; i < a->count && result == TSH_OK; i++) {
        char pattern[80];
        if (llm_adapter_covered(a, i)) continue;
        (void)snprintf(pattern, sizeof pattern, "**.%s", a->targets[i]);
        result = tsh_lora(module, pattern, &a->lora);
    }
    return result;
}

/* Sets path to folder/adapter_model.safetensors, and *desc to the options of loading and saving it:
 * those of `names`, and the name of the adapter. */
static void llm_adapter_file(const llm_adapter *a, const char *folder, const tsh_file_desc *names,
                             tsh_file_desc *desc, char path[4096]) {
    *desc = *names;
    desc->adapter = a->lora.name ? a->lora.name : "default";
    (void)snprintf(path, 4096, "%.3900s/adapter_model.safetensors", folder);
}

/* Reads A and B of the adapters, which the module has already, from
 * folder/adapter_model.safetensors. names: its .prefix and .rename lead from the names in the file
 * to those in the module, as in tsh_load_with; .broadcast. */
LLM_ADAPTER_API tsh_result llm_adapter_load_with(tsh_module *module, const llm_adapter *a,
                                                 const char *folder, const tsh_file_desc *names) {
    char path[4096];
    tsh_file_desc desc;
    llm_adapter_file(a, folder, names, &desc, path);
    return tsh_load_with(module, path, NULL, &desc);
}

/* The same for a module with the names of the file. prefix: what names in the file begin with, such
 * as "base_model.model.transformer"; NULL: "base_model.model". */
LLM_ADAPTER_API tsh_result llm_adapter_load(tsh_module *module, const llm_adapter *a,
                                            const char *folder, const char *prefix) {
    const tsh_file_desc names = {.prefix = prefix};
    return llm_adapter_load_with(module, a, folder, &names);
}

/* Returns a text as JSON, null if it is empty. */
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
    if (!a->count) (void)cJSON_AddStringToObject(json, "target_modules", "all-linear");
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

/* Writes both files to a folder that exists; names as in llm_adapter_load_with. The config is
 * written by rank 0, and last: a folder that has one is complete. Call it on every rank. */
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

/* The same for a module with the names of the file; prefix as in llm_adapter_load. */
LLM_ADAPTER_API tsh_result llm_adapter_save(tsh_module *module, const llm_adapter *a,
                                            const char *folder, const char *prefix) {
    const tsh_file_desc names = {.prefix = prefix};
    return llm_adapter_save_with(module, a, folder, &names);
}
#endif
