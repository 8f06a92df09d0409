/* weights.h - what the files of a folder have for the head of a model whose config.json ties it to
 * the embedding. Include tshard.h first; needs cJSON. */
#ifndef LLM_WEIGHTS_H
#define LLM_WEIGHTS_H

#include "folder.h"

/* A tensor in a file. */
typedef struct llm_stored {
    char path[8200], name[96]; /* the file; the tensor's name there, "": it was not found */
    char dtype[16];
    int64_t begin, bytes; /* of its values in the file */
} llm_stored;

/* Without memory nothing is known of a file: an error. */
static void llm_weights_lack(llm_config *c, const char *path) {
    llm_refuse(c, "%.300s: not enough memory", path);
}

/* The JSON at the beginning of a safetensors file; *data: where its values begin. NULL: it has
 * none, which tsh_load will say, or c->error says that memory is missing. */
static cJSON *llm_weights_header(llm_config *c, const char *path, int64_t *data) {
    tsh_error unused;
    unsigned char size[8];
    uint64_t n = 0;
    FILE *file = tsh_file_open(path, 0, &unused);
    char *text = NULL;
    cJSON *json = NULL;
    int lacking = !file && errno == ENOMEM;
    if (file && fread(size, 1, sizeof size, file) == sizeof size)
        for (int i = 8; i-- > 0;) n = n << 8 | size[i];
    if (n > 1 && n <= 100000000) {
        text = (char *)malloc((size_t)n + 1);
        lacking = !text;
    }
    if (text && fread(text, 1, (size_t)n, file) == n) {
        text[n] = 0;
        json = llm_parse(text);
        lacking = !json && errno == ENOMEM;
    }
    free(text);
    if (file) (void)fclose(file);
    if (lacking) llm_weights_lack(c, path);
    *data = 8 + (int64_t)n;
    return json;
}

/* 1 if a tensor is one of the names "a|b", after `base` and a dot or without. */
static int llm_weights_named(const char *tensor, const char *base, const char *names) {
    const size_t n = strlen(base);
    if (strncmp(tensor, base, n) == 0 && tensor[n] == '.') tensor += n + 1;
    while (*names) {
        const size_t k = strcspn(names, "|");
        if (strlen(tensor) == k && strncmp(tensor, names, k) == 0) return 1;
        names += names[k] == '|' ? k + 1 : k;
    }
    return 0;
}

/* Finds a tensor with one of these names in a file. */
static void llm_weights_look(llm_config *c, llm_stored *found, const char *path, const char *base,
                             const char *names) {
    int64_t data;
    cJSON *json = llm_weights_header(c, path, &data);
    const cJSON *item;
    cJSON_ArrayForEach(item, json) {
        const cJSON *dtype = cJSON_GetObjectItemCaseSensitive(item, "dtype");
        const cJSON *range = cJSON_GetObjectItemCaseSensitive(item, "data_offsets");
        const double begin = cJSON_GetNumberValue(cJSON_GetArrayItem(range, 0));
        const double end = cJSON_GetNumberValue(cJSON_GetArrayItem(range, 1));
        if (!item->string || !llm_weights_named(item->string, base, names) ||
            !cJSON_IsString(dtype) || !(begin >= 0 && end >= begin && end < 1e15))
            continue;
        snprintf(found->name, sizeof found->name, "%s", item->string);
        snprintf(found->dtype, sizeof found->dtype, "%s", dtype->valuestring);
        snprintf(found->path, sizeof found->path, "%s", path);
        found->begin = data + (int64_t)begin;
        found->bytes = (int64_t)end - (int64_t)begin;
    }
    cJSON_Delete(json);
}

/* The same in all *.safetensors of a folder. */
static void llm_weights_list(llm_config *c, llm_stored *found, const char *folder,
                             const char *base, const char *names) {
    DIR *list = opendir(folder);
    struct dirent *entry;
    char path[8200]; /* of two names */
    if (!list && errno == ENOMEM) llm_weights_lack(c, folder);
    while (list && (entry = readdir(list)) != NULL) {
        if (entry->d_name[0] == '.' || !llm_found_is("*.safetensors", entry->d_name)) continue;
        snprintf(path, sizeof path, "%s/%.255s", folder, entry->d_name);
        llm_weights_look(c, found, path, base, names);
    }
    if (list) (void)closedir(list);
}

/* The same in the files of a folder, as tsh_load finds them: one, those of an index, or all. */
static void llm_weights_find(llm_config *c, llm_stored *found, const char *folder, const char *base,
                             const char *names) {
    char path[8200]; /* of two names */
    const cJSON *item;
    tsh_error unused;
    memset(found, 0, sizeof *found);
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    FILE *file = tsh_file_open(path, 0, &unused);
    if (file) {
        (void)fclose(file);
        llm_weights_look(c, found, path, base, names);
        return;
    }
    char *text = llm_read_text(folder, "model.safetensors.index.json", &unused);
    const int there = text || !llm_is_absent(errno);
    cJSON *index = text ? llm_parse(text) : NULL;
    if (!text && there) llm_refuse(c, "%s", unused.message);
    if (text && !index && errno == ENOMEM) llm_weights_lack(c, folder);
    cJSON_ArrayForEach(item, cJSON_GetObjectItemCaseSensitive(index, "weight_map")) {
        if (!cJSON_IsString(item) || !llm_weights_named(item->string, base, names)) continue;
        snprintf(path, sizeof path, "%s/%s", folder, item->valuestring);
        llm_weights_look(c, found, path, base, names);
    }
    if (!text && !there) llm_weights_list(c, found, folder, base, names);
    cJSON_Delete(index);
    free(text);
}

/* 1 if both have the same dtype and bytes; where they cannot be read, too, as tsh_load will say. */
static int llm_weights_equal(llm_config *c, const llm_stored *a, const llm_stored *b) {
    enum { PIECE = 1 << 18 };
    tsh_error unused;
    FILE *one = tsh_file_open(a->path, 0, &unused), *two = tsh_file_open(b->path, 0, &unused);
    char *left = (char *)malloc(PIECE), *right = (char *)malloc(PIECE);
    int equal = strcmp(a->dtype, b->dtype) == 0 && a->bytes == b->bytes;
    if (one && two && left && right && equal && fseek(one, (long)a->begin, SEEK_SET) == 0 &&
        fseek(two, (long)b->begin, SEEK_SET) == 0)
        for (int64_t done = 0; done < a->bytes && equal; done += PIECE) {
            const size_t n = a->bytes - done < PIECE ? (size_t)(a->bytes - done) : PIECE;
            if (fread(left, 1, n, one) != n || fread(right, 1, n, two) != n) break;
            equal = memcmp(left, right, n) == 0;
        }
    if (!left || !right || ((!one || !two) && errno == ENOMEM)) llm_weights_lack(c, a->path);
    free(left);
    free(right);
    if (one) (void)fclose(one);
    if (two) (void)fclose(two);
    return equal;
}

/* The name of the embedding's weight, after the prefix. */
static const char *llm_embedding_name(const char *type) {
    return strcmp(type, "gpt2") == 0       ? "wte.weight"
           : strcmp(type, "gpt_neox") == 0 ? "embed_in.weight"
           : strcmp(type, "opt") == 0      ? "decoder.embed_tokens.weight"
           : strcmp(type, "bloom") == 0 || strcmp(type, "falcon") == 0 ? "word_embeddings.weight"
                                                                       : "embed_tokens.weight";
}

/* Unties the head where the files have one that differs from the embedding, as transformers does,
 * and says so; where they have a head alone, it stands for the embedding, too. */
static void llm_check_head(llm_config *c, const char *folder, const char *base) {
    llm_stored head, embedding;
    llm_weights_find(c, &head, folder, base, "lm_head.weight|embed_out.weight");
    if (!head.name[0]) return;
    llm_weights_find(c, &embedding, folder, base, llm_embedding_name(c->type));
    snprintf(c->head, sizeof c->head, "%s", embedding.name[0] ? "" : head.name);
    if (!embedding.name[0] || llm_weights_equal(c, &head, &embedding)) return;
    c->tied = 0;
    llm_warn(c, "tie_word_embeddings is true, but %s differs from %s: the head of the file is used, "
                "as transformers does", head.name, embedding.name);
}

#endif
