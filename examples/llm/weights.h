/* weights.h - finds out, for a model whose config.json ties the head to the embedding, whether its
 * files have a separate head, and whether that differs from the embedding. Include tshard.h first;
 * needs cJSON. */
#ifndef LLM_WEIGHTS_H
#define LLM_WEIGHTS_H

#include "folder.h"

/* The place of a tensor's values in a safetensors file. */
typedef struct llm_stored {
    char path[8200], name[96]; /* the file; the tensor's name in it, "": it was not found */
    char dtype[16];
    int64_t begin, bytes; /* where its values begin in the file, and how many bytes they have */
} llm_stored;

/* Records in c->error that there is not enough memory to read a file. */
static void llm_weights_lack(llm_config *c, const char *path) {
    llm_refuse(c, "%.300s: not enough memory", path);
}

/* Returns the JSON header of a safetensors file; *data: the offset at which values begin. NULL: no
 * valid header, which tsh_load will report, or not enough memory, which is in c->error. */
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

/* Returns 1 if a tensor's name is one of `names`, such as "a|b", either alone or after the prefix
 * `base` and a dot. */
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

/* Looks in the safetensors file `path` for a tensor whose name is one of `names` (see
 * llm_weights_named), and writes to *found where it is. */
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

/* Calls llm_weights_look for each *.safetensors of a folder. */
static void llm_weights_list(llm_config *c, llm_stored *found, const char *folder,
                             const char *base, const char *names) {
    DIR *list = opendir(folder);
    struct dirent *entry;
    char path[8200]; /* room for a folder and a name */
    if (!list && errno == ENOMEM) llm_weights_lack(c, folder);
    while (list && (entry = readdir(list)) != NULL) {
        if (entry->d_name[0] == '.' || !llm_found_is("*.safetensors", entry->d_name)) continue;
        snprintf(path, sizeof path, "%s/%.255s", folder, entry->d_name);
        llm_weights_look(c, found, path, base, names);
    }
    if (list) (void)closedir(list);
}

/* Looks for a tensor with one of `names` in the files that tsh_load reads of a folder:
 * model.safetensors, else those that the index names, else all *.safetensors. found->name is "" if
 * there is no such tensor. */
static void llm_weights_find(llm_config *c, llm_stored *found, const char *folder, const char *base,
                             const char *names) {
    char path[8200]; /* room for a folder and a name */
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

/* Returns 1 if two tensors have the same dtype and bytes. Bytes that cannot be read count as equal:
 * tsh_load will report the error. */
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

/* Returns the name of the embedding's weight in a family's files, without the prefix
 * llm_family.base. */
static const char *llm_embedding_name(const char *type) {
    return strcmp(type, "gpt2") == 0       ? "wte.weight"
           : strcmp(type, "gpt_neox") == 0 ? "embed_in.weight"
           : strcmp(type, "opt") == 0      ? "decoder.embed_tokens.weight"
           : strcmp(type, "bert") == 0 || strcmp(type, "roberta") == 0
               ? "embeddings.word_embeddings.weight"
           : strcmp(type, "bloom") == 0 || strcmp(type, "falcon") == 0 ? "word_embeddings.weight"
                                                                       : "embed_tokens.weight";
}

/* If the files have a head that differs from the embedding, unties it, as transformers does, and
 * warns. If they have a head, but no embedding, c->head names it, to be loaded as the embedding. */
LLM_API void llm_check_head(llm_config *c, const char *folder, const char *base) {
    llm_stored head, embedding;
    llm_weights_find(c, &head, folder, base, "lm_head.weight|embed_out.weight");
    if (!head.name[0]) return;
    llm_weights_find(c, &embedding, folder, base, llm_embedding_name(c->type));
    snprintf(c->head, sizeof c->head, "%s", embedding.name[0] ? "" : head.name);
    if (!embedding.name[0] || llm_weights_equal(c, &head, &embedding)) return;
    c->tied = 0;
    llm_warn(c, "tie_word_embeddings is true, but %s differs from %s: the head of the file is "
                "used, as transformers does", head.name, embedding.name);
}

#endif
