/* adapter.h - adapters of low rank (tsh_lora) in the files of the Python library PEFT: a folder with
 * adapter_config.json and adapter_model.safetensors
 *
 *     llm_adapter a = {.lora = {.rank = 8, .alpha = 16}, .targets = {"q_proj", "v_proj"}, .count = 2};
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
    (void)tsh_error_set(why, TSH_ERR_UNSUPPORTED, -1, "%.300s/adapter_config.json: %s %s", folder,
                        key, what);
    return 0;
}

/* Returns 1 if a key that changes the result has the value that tsh_lora computes with: false, null,
 * 0, "none", or an empty list or object. */
static int llm_adapter_usual(const cJSON *item) {
    return !item || cJSON_IsNull(item) || cJSON_IsFalse(item) ||
           ((cJSON_IsArray(item) || cJSON_IsObject(item)) && !item->child) ||
           (cJSON_IsString(item) && strcmp(item->valuestring, "none") == 0);
}

/* Adds a name to a->targets. Returns 0 if it is no name, or one too many. */
static int llm_adapter_target(llm_adapter *a, const cJSON *name) {
    if (!cJSON_IsString(name) || a->count == LLM_ADAPTER_TARGETS ||
        strlen(name->valuestring) >= sizeof a->targets[0] || !name->valuestring[0])
        return 0;
    (void)strcpy(a->targets[a->count++], name->valuestring);
    return 1;
}

/* Fills in *a from the parsed config of a folder. Returns 0 and *why if it is none that tsh_lora can
 * compute. */
static int llm_adapter_parse(llm_adapter *a, const cJSON *json, const char *folder,
                             tsh_error *why) {
    static const char *const unusual[] = {"use_dora",
                                          "bias",
                                          "rank_pattern",
                                          "alpha_pattern",
                                          "layers_to_transform",
                                          "layers_pattern",
                                          "modules_to_save",
                                          "layer_replication",
                                          "lora_bias",
                                          "exclude_modules",
                                          "target_parameters",
                                          "trainable_token_indices",
                                          "use_qalora",
                                          "use_bdlora",
                                          "alora_invocation_tokens",
                                          "arrow_config",
                                          "kasa_config",
                                          "velora_config",
                                          "monteclora_config"};
    /* PEFT changes the base model, too, by initial values of some names */
    const cJSON *init = cJSON_GetObjectItemCaseSensitive(json, "init_lora_weights");
    const cJSON *type = cJSON_GetObjectItemCaseSensitive(json, "peft_type");
    const cJSON *rank = cJSON_GetObjectItemCaseSensitive(json, "r");
    const cJSON *alpha = cJSON_GetObjectItemCaseSensitive(json, "lora_alpha");
    const cJSON *dropout = cJSON_GetObjectItemCaseSensitive(json, "lora_dropout");
    const cJSON *targets = cJSON_GetObjectItemCaseSensitive(json, "target_modules");
    const cJSON *base = cJSON_GetObjectItemCaseSensitive(json, "base_model_name_or_path");
    const cJSON *task = cJSON_GetObjectItemCaseSensitive(json, "task_type");
    if (!cJSON_IsString(type) || strcmp(type->valuestring, "LORA") != 0)
        return llm_adapter_refuse(why, folder, "peft_type", "is not \"LORA\"");
    if (!cJSON_IsNumber(rank) || !(rank->valuedouble >= 1 && rank->valuedouble <= 1 << 20))
        return llm_adapter_refuse(why, folder, "r", "is no rank");
    for (size_t i = 0; i < sizeof unusual / sizeof unusual[0]; i++)
        if (!llm_adapter_usual(cJSON_GetObjectItemCaseSensitive(json, unusual[i])))
            return llm_adapter_refuse(why, folder, unusual[i],
                                      "changes what an adapter computes, or adds other tensors; "
                                      "plain LoRA is read alone");
    if (cJSON_IsString(init) && strcmp(init->valuestring, "gaussian") != 0)
        return llm_adapter_refuse(why, folder, "init_lora_weights",
                                  "names initial values that change the base model");
    a->lora.rank = (int)rank->valuedouble;
    a->lora.alpha = !cJSON_IsNumber(alpha)   ? 0
                    : alpha->valuedouble > 0 ? alpha->valuedouble
                                             : TSH_ZERO;
    a->lora.dropout = cJSON_IsNumber(dropout) ? dropout->valuedouble : 0;
    a->lora.rslora = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(json, "use_rslora"));
    a->count = 0;
    (void)snprintf(a->base, sizeof a->base, "%.255s",
                   cJSON_IsString(base) ? base->valuestring : "");
    (void)snprintf(a->task, sizeof a->task, "%.31s", cJSON_IsString(task) ? task->valuestring : "");
    if (cJSON_IsString(targets) && strcmp(targets->valuestring, "all-linear") == 0) return 1;
    if (!cJSON_IsArray(targets) || !targets->child)
        return llm_adapter_refuse(why, folder, "target_modules",
                                  "is no list of names and not \"all-linear\"");
    for (targets = targets->child; targets; targets = targets->next)
        if (!llm_adapter_target(a, targets))
            return llm_adapter_refuse(why, folder, "target_modules",
                                      "has an entry that is no name, or too many of them");
    return 1;
}

/* Reads folder/adapter_config.json to *a. Returns 0 and *why if that fails. */
LLM_ADAPTER_API int llm_adapter_read(llm_adapter *a, const char *folder, tsh_error *why) {
    char *text = llm_read_text(folder, "adapter_config.json", why);
    cJSON *json = text ? llm_parse(text) : NULL;
    int ok = 0;
    if (text && !json)
        (void)llm_adapter_refuse(why, folder, "it", "is no JSON, or there is not enough memory");
    if (json) ok = llm_adapter_parse(a, json, folder, why);
    cJSON_Delete(json);
    free(text);
    return ok;
}

/* Adds the adapters to all layers below module whose name, or the end of whose path, is one of the
 * targets, as PEFT does. */
LLM_ADAPTER_API tsh_result llm_adapter_add(tsh_module *module, const llm_adapter *a) {
    tsh_result result = a->count ? TSH_OK : tsh_lora(module, NULL, &a->lora);
    for (int i = 0; i < a->count && result == TSH_OK; i++) {
        char pattern[80];
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
    tsh_file_desc names;
    memset(&names, 0, sizeof names);
    names.prefix = prefix;
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
    tsh_file_desc names;
    memset(&names, 0, sizeof names);
    names.prefix = prefix;
    return llm_adapter_save_with(module, a, folder, &names);
}
#endif
