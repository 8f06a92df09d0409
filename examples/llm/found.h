/* found.h - explains in one sentence why a folder cannot be loaded as a model: what is there in
 * place of the missing file or folder, and what to do. Needs POSIX. */
#ifndef LLM_FOUND_H
#define LLM_FOUND_H

#include "files.h"
#include <dirent.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

/* Returns 1 if a file's name matches row, which is a name, or "*" and the end of a name, such as
 * "*.gguf". */
static int llm_found_is(const char *row, const char *name) {
    const size_t n = strlen(name), k = strlen(row);
    return row[0] == '*' ? n >= k && strcmp(name + n - (k - 1), row + 1) == 0
                         : strcmp(row, name) == 0;
}

/* Writes to name the alphabetically first file name in a folder that matches row (llm_found_is),
 * hidden files aside. Returns 0 if there is none, or no such folder. */
static int llm_found_in(const char *folder, const char *row, char *name, size_t size) {
    DIR *list = opendir(folder);
    struct dirent *entry;
    *name = 0;
    while (list && (entry = readdir(list)) != NULL)
        if (entry->d_name[0] != '.' && llm_found_is(row, entry->d_name) &&
            (!*name || strcmp(entry->d_name, name) < 0))
            (void)snprintf(name, size, "%.200s", entry->d_name);
    if (list) (void)closedir(list);
    return *name != 0;
}

/* A file that a folder may have in place of the one that is missing, and what to do then. */
typedef struct llm_found_row {
    const char *name, *advice;
} llm_found_row;

/* Writes "FOLDER has NAME, but no LACKS: ADVICE" for the first row whose file is in the folder. The
 * last row has the name NULL. Returns 0 if the folder has none of these files. */
static int llm_found_say(const char *folder, const llm_found_row *row, const char *lacks,
                         char *sentence, size_t size) {
    char name[256];
    for (; row->name; row++) {
        if (!llm_found_in(folder, row->name, name, sizeof name)) continue;
        (void)snprintf(sentence, size, "%.300s has %s, but no %s: %s", folder, name, lacks,
                       row->advice);
        return 1;
    }
    return 0;
}

/* Writes a sentence that says why path has no config.json: what it has instead, or that it does not
 * exist. Returns 0 if no explanation is known. */
LLM_FILES_API int llm_found_for_config(const char *path, char *sentence, size_t size) {
    static const llm_found_row rows[] = {
        {"*.gguf", "give that file itself, with its path"},
        {"adapter_config.json", "these are the changes of a fine-tuned model alone; give the model "
                                "that they are of with --model, and this folder with --adapter"},
        {"params.json", "this is the form of those who trained it; take the one for transformers"},
        {"model_index.json", "this is a pipeline of diffusers, not a language model"},
        {NULL, NULL}};
    char name[256], snapshots[4096];
    struct stat info;
    const char *slash = strchr(path, '/');
    const int there = stat(path, &info) == 0;
    (void)snprintf(snapshots, sizeof snapshots, "%.3800s/snapshots", path);
    if (llm_found_in(snapshots, "*", name, sizeof name)) {
        (void)snprintf(sentence, size, "%.300s is a folder of the hub's cache; the model is in "
                                       "%.300s/%s", path, snapshots, name);
        return 1;
    }
    if (there && S_ISREG(info.st_mode)) {
        (void)snprintf(sentence, size, "%.300s is a file, and no GGUF file; give the folder that "
                                       "has config.json", path);
        return 1;
    }
    if (there) return llm_found_say(path, rows, "config.json", sentence, size);
    if (path[0] == '/' || path[0] == '.' || path[0] == '~' ||
        (slash && (!slash[1] || strchr(slash + 1, '/'))))
        return 0; /* not a model on the Hugging Face hub: those are "name" or "owner/name" */
    (void)snprintf(sentence, size, "there is no folder %.200s; if that is a name on the Hugging "
                                   "Face hub, download it: hf download %.200s --local-dir DIR, and "
                                   "give --model DIR", path, path);
    return 1;
}

/* Writes a sentence that says which weights a folder has in place of *.safetensors. Returns 0 if it
 * has *.safetensors, or no weights in a known format. */
LLM_FILES_API int llm_found_for_weights(const char *folder, char *sentence, size_t size) {
    static const llm_found_row rows[] = {
        {"pytorch_model.bin", "write it anew with transformers: "
                              "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW)"},
        {"pytorch_model.bin.index.json", "write it anew with transformers: "
                              "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW)"},
        {"*.gguf", "give that file itself, with its path"},
        {"*.bin", "write it anew with transformers, which writes *.safetensors: save_pretrained"},
        {"*.pth", "take the files for transformers"},
        {"*.pt", "take the files for transformers"},
        {"tf_model.h5", "take the files for PyTorch"},
        {"flax_model.msgpack", "take the files for PyTorch"},
        {"rust_model.ot", "take the files for PyTorch"},
        {NULL, NULL}};
    char name[256];
    if (llm_found_in(folder, "*.safetensors", name, sizeof name) ||
        llm_found_in(folder, "model.safetensors.index.json", name, sizeof name))
        return 0;
    return llm_found_say(folder, rows, "*.safetensors", sentence, size);
}

/* Writes a sentence that says which tokenizer a folder has in place of tokenizer.json. Returns 0 if
 * it has tokenizer.json, or no tokenizer in a known format. */
LLM_FILES_API int llm_found_for_tokenizer(const char *folder, char *sentence, size_t size) {
    static const char again[] = "make one with transformers: "
                                "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)";
    static const llm_found_row rows[] = {{"tokenizer.model", again}, {"vocab.json", again},
                                         {"vocab.txt", again}, {"*.model", again},
                                         {"*.tiktoken", again}, {NULL, NULL}};
    char name[256];
    if (llm_found_in(folder, "tokenizer.json", name, sizeof name)) return 0;
    return llm_found_say(folder, rows, "tokenizer.json", sentence, size);
}

#endif
