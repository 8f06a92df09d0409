/* save.h - writes a model back as a folder of the Hugging Face hub, which transformers loads: the
 * weights under the names of the files that they came from, config.json, tokenizer
 *
 *     if (!llm_out_check("out", &why)) ...              before anything is computed
 *     llm_model_save(&net, "model", "out", TSH_BF16);   on every rank
 *
 * and folders that are there as a whole or not at all, for adapters, too:
 *
 *     llm_out folder;
 *     if (llm_out_begin(ctx, &folder, "out") == TSH_OK &&
 *         llm_adapter_save(net.root, &a, folder.temporary, prefix) == TSH_OK &&
 *         llm_out_tokenizer(ctx, &folder, "model") == TSH_OK)
 *         llm_out_commit(ctx, &folder);
 *     llm_out_abort(&folder);                           does nothing after a commit
 *
 * Include tshard.h first. Link with tshard and cJSON; needs POSIX. */
#ifndef LLM_SAVE_H
#define LLM_SAVE_H

#include "model.h"
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

/* LLM_SHARD_BYTES: most bytes of tensors in one file; LLM_OUT_PATH: most bytes of a folder's path;
 * LLM_OUT_NAME: most bytes of the folder's name alone (the temporary folder has a longer one);
 * LLM_OUT_DEPTH: levels of folders within a folder that is written. */
#ifndef LLM_SHARD_BYTES
#define LLM_SHARD_BYTES ((int64_t)5000000000)
#endif
enum { LLM_OUT_PATH = 4096, LLM_OUT_NAME = 150, LLM_OUT_DEPTH = 2 };

/* -- a folder that is there as a whole or not at all --------------------------- */

/* A folder that is being written. All files are written to a temporary folder beside it, which
 * llm_out_commit renames. */
typedef struct llm_out {
    char path[LLM_OUT_PATH];          /* the folder's path, without a slash at its end */
    char temporary[2 * LLM_OUT_PATH]; /* the temporary folder's path; "": there is none */
    int lock; /* on rank 0: 1 + the descriptor that locks the temporary folder; else 0 */
} llm_out;

/* Records the error "PATH WHAT", with the system's text for `number`, an errno, if that is not 0.
 * Returns 0. */
static int llm_out_refuse(tsh_error *why, const char *path, const char *what, int number) {
    (void)tsh_error_set(why, TSH_ERR_IO, -1, "%.300s %s%s%s", path, what, number ? ": " : "",
                        number ? strerror(number) : "");
    return 0;
}

/* Copies `out` to `path` without slashes at its end, and sets *name to where the folder's name
 * begins in `path`. Returns 0 and *why if a new folder cannot have this name, or it is too long. */
static int llm_out_split(const char *out, char path[LLM_OUT_PATH], const char **name,
                         tsh_error *why) {
    size_t n = strlen(out);
    while (n > 1 && out[n - 1] == '/') n--;
    if (n >= LLM_OUT_PATH) return llm_out_refuse(why, out, "is too long a path", 0);
    memcpy(path, out, n);
    path[n] = 0;
    *name = strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
    if (!**name || strcmp(*name, ".") == 0 || strcmp(*name, "..") == 0)
        return llm_out_refuse(why, *out ? out : "\"\"", "is no name of a new folder", 0);
    if (strlen(*name) > LLM_OUT_NAME)
        return llm_out_refuse(why, out, "has too long a name for a folder", 0);
    return 1;
}

/* Returns 1 if a folder is empty. */
static int llm_out_is_empty(const char *folder) {
    DIR *list = opendir(folder);
    struct dirent *entry;
    int files = 0;
    while (list && (entry = readdir(list)) != NULL)
        files += strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0;
    if (list) (void)closedir(list);
    return list && !files;
}

/* Returns 1 if `out` can be written: it is an empty folder, or does not exist, and the folder above
 * it may be written to. Returns 0 and *why if not. Call it before long computations. */
LLM_API int llm_out_check(const char *out, tsh_error *why) {
    char path[LLM_OUT_PATH], parent[LLM_OUT_PATH + 2];
    const char *name;
    struct stat info;
    if (!llm_out_split(out, path, &name, why)) return 0;
    (void)snprintf(parent, sizeof parent, "%.*s.", (int)(name - path), path);
    if (lstat(path, &info) == 0) {
        if (!S_ISDIR(info.st_mode))
            return llm_out_refuse(why, path, "is there already, and is no folder", 0);
        if (!llm_out_is_empty(path))
            return llm_out_refuse(why, path, "is a folder with files, which stay as they are; give "
                                             "the name of a new or an empty folder", 0);
    } else if (errno != ENOENT) {
        return llm_out_refuse(why, path, "cannot be written", errno);
    }
    errno = 0;
    if (access(parent, W_OK | X_OK) != 0)
        return llm_out_refuse(why, path, "cannot be written", errno);
    return 1;
}

/* Removes a folder with its files, and folders in it, at most `depth` levels deep. */
static void llm_out_remove(const char *folder, int depth) {
    char path[3 * LLM_OUT_PATH];
    DIR *list = opendir(folder);
    struct dirent *entry;
    while (list && (entry = readdir(list)) != NULL) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        (void)snprintf(path, sizeof path, "%.8200s/%.255s", folder, entry->d_name);
        if (unlink(path) != 0 && depth > 0) llm_out_remove(path, depth - 1);
    }
    if (list) (void)closedir(list);
    (void)rmdir(folder);
}

/* Opens a folder, and locks it, which tells other processes that its writer is alive. Returns 1 +
 * the descriptor, or 0 if another process has locked or removed the folder; with must 1, also if
 * the file system has no locks. */
static int llm_out_lock(const char *folder, int must) {
    const int file = open(folder, O_RDONLY);
    int locked = 1;
    if (file < 0) return 0;
    (void)fcntl(file, F_SETFD, FD_CLOEXEC);
#ifdef LOCK_EX
    struct stat info;
    if (flock(file, LOCK_EX | LOCK_NB) != 0) locked = !must && errno != EWOULDBLOCK;
    locked = locked && stat(folder, &info) == 0;
#endif
    if (!locked) (void)close(file);
    return locked ? file + 1 : 0;
}

/* Removes temporary folders that killed processes of this host have left: those whose path begins
 * with `start`, and that no process has locked. */
static void llm_out_sweep(const char *start) {
#ifdef LOCK_EX
    char folder[2 * LLM_OUT_PATH], path[3 * LLM_OUT_PATH];
    const char *name = strrchr(start, '/') + 1;
    (void)snprintf(folder, sizeof folder, "%.*s", (int)(name - start), start);
    DIR *list = opendir(folder);
    struct dirent *entry;
    while (list && (entry = readdir(list)) != NULL) {
        const size_t n = strlen(name), digits = strlen(entry->d_name) > n
                                                    ? strspn(entry->d_name + n, "0123456789-")
                                                    : 0;
        if (!digits || strncmp(entry->d_name, name, n) != 0 || entry->d_name[n + digits]) continue;
        (void)snprintf(path, sizeof path, "%.8200s%.255s", folder, entry->d_name);
        const int lock = llm_out_lock(path, 1);
        if (lock) llm_out_remove(path, LLM_OUT_DEPTH);
        if (lock) (void)close(lock - 1);
    }
    if (list) (void)closedir(list);
#else
    (void)start;
#endif
}

/* On rank 0: makes and locks the temporary folder ".<name>.tmp-<host>-<process>-<number>" beside
 * o->path. Returns 0 and *why if it cannot. */
static int llm_out_make(llm_out *o, const char *out, tsh_error *why) {
    char start[LLM_OUT_PATH + 300], host[65] = "";
    const char *name;
    if (!llm_out_check(out, why) || !llm_out_split(out, o->path, &name, why)) return 0;
    (void)gethostname(host, sizeof host - 1);
    (void)snprintf(start, sizeof start, "%s%.*s.%s.tmp-%s-", name == o->path ? "./" : "",
                   (int)(name - o->path), o->path, name, host);
    llm_out_sweep(start);
    for (int i = 0; i < 100; i++) {
        (void)snprintf(o->temporary, sizeof o->temporary, "%s%ld-%d", start, (long)getpid(), i);
        errno = 0;
        if (mkdir(o->temporary, 0777) != 0) {
            if (errno == EEXIST) continue;
            break;
        }
        o->lock = llm_out_lock(o->temporary, 0);
        if (o->lock) return 1;
    }
    o->temporary[0] = 0;
    return llm_out_refuse(why, o->path, "cannot be written", errno);
}

/* Begins to write the folder `out`. Call it on every rank: rank 0 makes the temporary folder, whose
 * path all ranks get. All ranks get the same error if llm_out_check refuses `out`, or the temporary
 * folder cannot be made. */
LLM_API tsh_result llm_out_begin(tsh_ctx *ctx, llm_out *o, const char *out) {
    tsh_error why;
    memset(&why, 0, sizeof why);
    memset(o, 0, sizeof *o);
    if (!tsh_ok(ctx)) return tsh_last_error(ctx)->code;
    if (tsh_world(ctx)->rank == 0) (void)llm_out_make(o, out, &why);
    if (llm_agree(ctx, &why) != TSH_OK) return tsh_last_error(ctx)->code;
    return llm_share(ctx, o->temporary, sizeof o->temporary);
}

/* Removes the temporary folder, if there is one. */
LLM_API void llm_out_abort(llm_out *o) {
    if (o->lock && o->temporary[0]) llm_out_remove(o->temporary, LLM_OUT_DEPTH);
    if (o->lock) (void)close(o->lock - 1);
    o->lock = 0;
    o->temporary[0] = 0;
}

/* Syncs a folder, its list of files, to disk. Returns 0 if that fails. */
static int llm_out_sync(const char *folder) {
    const int file = open(folder, O_RDONLY);
    /* EINVAL: the file system cannot sync folders, which is no error */
    const int synced = file >= 0 && (fsync(file) == 0 || errno == EINVAL);
    if (file >= 0) (void)close(file);
    return synced;
}

/* On rank 0: renames the temporary folder to o->path. Returns 0 and *why if that fails. */
static int llm_out_rename(llm_out *o, tsh_error *why) {
    char parent[LLM_OUT_PATH + 2];
    const char *slash = strrchr(o->path, '/');
    (void)snprintf(parent, sizeof parent, "%.*s.", slash ? (int)(slash - o->path) + 1 : 0, o->path);
    errno = 0;
    if (!llm_out_sync(o->temporary) || rename(o->temporary, o->path) != 0)
        return llm_out_refuse(why, o->path, "cannot be written", errno);
    (void)llm_out_sync(parent); /* a failure is no error: the folder is in place */
    o->temporary[0] = 0;
    return 1;
}

/* Renames the temporary folder to o->path, so that it is there with all its files. Call it on every
 * rank. After an error, which all ranks get, o->path does not exist, or is empty as it was. */
LLM_API tsh_result llm_out_commit(tsh_ctx *ctx, llm_out *o) {
    tsh_error why;
    memset(&why, 0, sizeof why);
    if (tsh_world(ctx)->rank == 0 && tsh_ok(ctx)) (void)llm_out_rename(o, &why);
    llm_out_abort(o);
    return llm_agree(ctx, &why);
}

/* -- files that are copied ------------------------------------------------------ */

/* Names of a tokenizer's files, as llm_found_is takes them. */
static const char *const llm_tokenizer_files[] = {
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json", "*.model",
    "*.tiktoken", NULL};
/* Names of a model's other files, except its weights and config.json; all but the first are files
 * of sentence-transformers. */
static const char *const llm_model_files[] = {
    "generation_config.json", "modules.json", "config_sentence_transformers.json",
    "sentence_bert_config.json", "sentence_roberta_config.json", NULL};
/* Names of the files in a folder that modules.json names, such as 1_Pooling. */
static const char *const llm_module_files[] = {"config.json", "*.safetensors", "pytorch_model.bin",
                                               NULL};
static const char *const llm_template_files[] = {"*.jinja", NULL};

/* Copies the file from/name to the folder `to`. Returns 0 and *why if that fails. */
static int llm_out_copy(const char *from, const char *to, const char *name, tsh_error *why) {
    char path[3 * LLM_OUT_PATH], bytes[1 << 14];
    tsh_writer writer;
    size_t n = 1;
    (void)snprintf(path, sizeof path, "%.8200s/%.255s", from, name);
    FILE *file = tsh_file_open(path, 0, why);
    if (!file) return 0;
    (void)snprintf(path, sizeof path, "%.8200s/%.255s", to, name);
    (void)tsh_writer_open(&writer, path, 0);
    while (writer.error.code == TSH_OK && n > 0) {
        errno = 0;
        n = fread(bytes, 1, sizeof bytes, file);
        (void)tsh_writer_add(&writer, bytes, n);
    }
    const int read = !ferror(file), number = errno;
    (void)fclose(file);
    if (tsh_writer_close(&writer, read) != TSH_OK) *why = writer.error;
    if (!read && writer.error.code == TSH_OK)
        return llm_out_refuse(why, name, "cannot be read", number);
    return writer.error.code == TSH_OK;
}

/* Copies the files of the folder `from` that match a pattern to the folder `to`. Returns 0 and *why
 * if that fails. */
static int llm_out_copy_all(const char *from, const char *to, const char *const *pattern,
                            tsh_error *why) {
    DIR *list = opendir(from);
    struct dirent *entry;
    int ok = 1;
    while (list && ok && (entry = readdir(list)) != NULL) {
        int i = 0;
        if (entry->d_name[0] == '.') continue;
        while (pattern[i] && !llm_found_is(pattern[i], entry->d_name)) i++;
        if (pattern[i]) ok = llm_out_copy(from, to, entry->d_name, why);
    }
    if (list) (void)closedir(list);
    return ok;
}

/* Copies the files of the folder from/name that match a pattern to the folder to/name, which it
 * makes; from/name may be absent. Returns 0 and *why if that fails. */
static int llm_out_copy_part(const char *from, const char *to, const char *name,
                             const char *const *pattern, tsh_error *why) {
    char source[3 * LLM_OUT_PATH], target[3 * LLM_OUT_PATH];
    struct stat info;
    (void)snprintf(source, sizeof source, "%.8200s/%.255s", from, name);
    (void)snprintf(target, sizeof target, "%.8200s/%.255s", to, name);
    if (stat(source, &info) != 0 || !S_ISDIR(info.st_mode)) return 1;
    if (mkdir(target, 0777) != 0 && errno != EEXIST)
        return llm_out_refuse(why, target, "cannot be written", errno);
    if (!llm_out_copy_all(source, target, pattern, why)) return 0;
    return llm_out_sync(target) || llm_out_refuse(why, target, "cannot be written", errno);
}

/* Copies the files of a tokenizer, if the folder `from` has any. Returns 0 and *why if that
 * fails. */
static int llm_out_copy_tokenizer(const char *from, const char *to, tsh_error *why) {
    return llm_out_copy_all(from, to, llm_tokenizer_files, why) &&
           llm_out_copy_part(from, to, "additional_chat_templates", llm_template_files, why);
}

/* Copies the tokenizer of the model's folder `from`, byte for byte, on every rank; rank 0 alone
 * needs the folder. A GGUF file has no such files: nothing is copied. */
LLM_API tsh_result llm_out_tokenizer(tsh_ctx *ctx, llm_out *o, const char *from) {
    tsh_error why;
    memset(&why, 0, sizeof why);
    if (tsh_ok(ctx) && tsh_world(ctx)->rank == 0)
        (void)llm_out_copy_tokenizer(from, o->temporary, &why);
    return llm_agree(ctx, &why);
}

/* Copies the folders that modules.json of sentence-transformers names. Returns 0 and *why if that
 * fails. */
static int llm_out_copy_modules(const char *from, const char *to, tsh_error *why) {
    tsh_error unused;
    char *text = llm_read_text(from, "modules.json", &unused);
    cJSON *list = text ? llm_parse(text) : NULL;
    const cJSON *module;
    int ok = 1;
    cJSON_ArrayForEach(module, list) {
        const char *part = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(module, "path"));
        if (ok && part && *part && *part != '.' && !strchr(part, '/'))
            ok = llm_out_copy_part(from, to, part, llm_module_files, why);
    }
    cJSON_Delete(list);
    free(text);
    return ok;
}

/* -- config.json ------------------------------------------------------------------ */

/* Returns the name that config.json has for a dtype; NULL: weights are not written in this
 * dtype. */
static const char *llm_dtype_in_config(tsh_dtype dtype) {
    return dtype == TSH_F32    ? "float32"
           : dtype == TSH_BF16 ? "bfloat16"
           : dtype == TSH_F16  ? "float16"
           : dtype == TSH_F64  ? "float64"
                               : NULL;
}

/* Finds the next key dtype or torch_dtype of a JSON object whose value is a string or null, and
 * sets *value and *end to where the value begins and ends. Begins at s->at, which is after the
 * object's { in the first call. Returns 0 if there is none. */
static int llm_config_next_dtype(llm_json_scan *s, const char **value, const char **end) {
    for (;;) {
        llm_json_skip(s);
        const char *key = s->at;
        if (*key == ',') {
            s->at++;
            continue;
        }
        if (*key != '"' || !llm_json_string(s)) return 0;
        const int found = strncmp(key, "\"dtype\"", 7) == 0 ||
                          strncmp(key, "\"torch_dtype\"", 13) == 0;
        llm_json_skip(s);
        s->at += *s->at == ':';
        llm_json_skip(s);
        *value = s->at;
        if (!llm_json_value(s, 1)) return 0;
        for (*end = s->at; *end > *value && strchr(" \t\r\n", (*end)[-1]);) --*end;
        if (found && (**value == '"' || **value == 'n')) return 1;
    }
}

/* Copies config.json from the folder `from` to the folder `to`. If it names the dtype of the
 * weights, the copy names `dtype` instead. Returns 0 and *why if that fails. */
static int llm_out_config(const char *from, const char *to, tsh_dtype dtype, tsh_error *why) {
    char path[3 * LLM_OUT_PATH], name[24];
    char *text = llm_read_text(from, "config.json", why);
    const char *at = text, *value, *end;
    tsh_writer writer;
    if (!text) return 0;
    llm_json_scan s = {text, NULL};
    (void)snprintf(name, sizeof name, "\"%s\"", llm_dtype_in_config(dtype));
    (void)snprintf(path, sizeof path, "%.8200s/config.json", to);
    (void)tsh_writer_open(&writer, path, 0);
    llm_json_skip(&s);
    s.at += *s.at == '{';
    for (; llm_config_next_dtype(&s, &value, &end); at = end) {
        (void)tsh_writer_add(&writer, at, (size_t)(value - at));
        (void)tsh_writer_add(&writer, name, strlen(name));
    }
    (void)tsh_writer_add(&writer, at, strlen(at));
    if (tsh_writer_close(&writer, 1) != TSH_OK) *why = writer.error;
    free(text);
    return writer.error.code == TSH_OK;
}

/* -- the model ---------------------------------------------------------------------- */

/* What llm_look_at_dtype finds out about the dtypes of a model's parameters. */
typedef struct llm_param_dtypes {
    tsh_dtype first; /* dtype of the first parameter that is not quantised */
    int quantised;   /* 1: some parameters are quantised */
} llm_param_dtypes;

/* Callback of tsh_each_param: notes a parameter's dtype in `user`, an llm_param_dtypes. */
static void llm_look_at_dtype(const char *path, tsh_tensor *param, void *user) {
    llm_param_dtypes *found = (llm_param_dtypes *)user;
    const tsh_dtype dtype = tsh_dtype_of(param);
    (void)path;
    if (!llm_dtype_in_config(dtype)) found->quantised = 1;
    else if (!found->first) found->first = dtype;
}

/* Checks that the model can be written, and sets *why if not. If *dtype is 0, sets it to the dtype
 * of the model's weights. */
static void llm_model_may_save(const llm_net *m, const char *from, tsh_dtype *dtype,
                               tsh_error *why) {
    const llm_config *c = m->config;
    llm_param_dtypes found = {TSH_DTYPE_DEFAULT, 0};
    tsh_each_param(m->root, llm_look_at_dtype, &found);
    const char *what =
        c->gguf ? "is a GGUF file, which has no config.json to write a folder with: train an "
                  "adapter of it, which can be written alone"
        : c->headless && !c->encoder && !c->tied
            ? "was loaded without its head, so the model cannot be written"
        : found.quantised && !*dtype
            ? "has quantised weights here, which transformers does not read: name a dtype to write "
              "them in, such as bf16"
        : *dtype && !llm_dtype_in_config(*dtype)
            ? "cannot be written in this dtype; possible are f32, f64, bf16 and f16"
            : NULL;
    if (!*dtype) *dtype = found.first;
    if (what) (void)tsh_error_set(why, TSH_ERR_UNSUPPORTED, -1, "%.300s %s", from, what);
}

/* On rank 0: writes all files of the model but its weights. Sets *plain to 1 if the tensors in the
 * folder `from` have names without the family's prefix. Returns 0 and *why if that fails. */
static int llm_model_copy(const llm_net *m, const char *from, const char *to, tsh_dtype dtype,
                          int32_t *plain, tsh_error *why) {
    const size_t n = strlen(m->family->base);
    llm_stored found;
    llm_weights_find(m->config, &found, from, m->family->base,
                     llm_embedding_name(m->config->type));
    *plain = found.name[0] &&
             (strncmp(found.name, m->family->base, n) != 0 || found.name[n] != '.');
    return llm_out_config(from, to, dtype, why) &&
           llm_out_copy_all(from, to, llm_model_files, why) &&
           llm_out_copy_modules(from, to, why) && llm_out_copy_tokenizer(from, to, why);
}

/* Writes the weights to the folder. Called on every rank. plain: as in llm_model_copy. */
static tsh_result llm_model_save_weights(const llm_net *m, const char *folder, tsh_dtype dtype,
                                         int plain) {
    char head[2][2 * sizeof m->config->type];
    tsh_rename renamed[LLM_RENAMED];
    const tsh_rename *pair = m->family->rename;
    int n = 0;
    const tsh_file_desc file = {.prefix = plain ? "" : m->family->base,
                                .dtype = dtype,
                                .rename = renamed,
                                .adapter = "",
                                .shard_bytes = LLM_SHARD_BYTES};
    for (; n < 2; n++) { /* in the files, the head's name lacks the family's prefix */
        (void)snprintf(head[n], sizeof head[n], "%s.%s", m->family->base, llm_heads[n]);
        renamed[n].from = llm_heads[n];
        renamed[n].to = head[n];
    }
    while (pair && pair->from && n < LLM_RENAMED - 1) renamed[n++] = *pair++;
    renamed[n].from = renamed[n].to = NULL;
    return tsh_save_with(m->root, folder, NULL, &file);
}

/* Writes the model m, which llm_model_load loaded from the folder `from`, as the folder `out`,
 * which transformers loads. It has the weights, rounded to dtype (0: that of the model's weights),
 * under the names that they have in `from`, in files of at most 5 GB; config.json with the dtype's
 * name; and copies of generation_config.json, the tokenizer's files and those of
 * sentence-transformers. Weights include adapters that are merged. An active adapter that is not
 * merged is an error: llm_model_adapter_save writes it, and after tsh_lora_use(m->root, NULL) the
 * model is written without it. Tensors of `from` that the model does not have, such as the pooler
 * of BERT, are not written. Call it on every rank; rank 0 writes, and it alone needs the folders.
 * An error is one of all ranks, and leaves no `out`: the files are written to a folder beside it,
 * which is renamed at the end. */
LLM_API tsh_result llm_model_save(llm_net *m, const char *from, const char *out, tsh_dtype dtype) {
    tsh_ctx *ctx = m->ctx;
    llm_out folder;
    tsh_error why;
    int32_t plain = 0;
    memset(&why, 0, sizeof why);
    llm_model_may_save(m, from, &dtype, &why);
    if (llm_agree(ctx, &why) != TSH_OK || llm_out_begin(ctx, &folder, out) != TSH_OK)
        return tsh_last_error(ctx)->code;
    if (tsh_world(ctx)->rank == 0)
        (void)llm_model_copy(m, from, folder.temporary, dtype, &plain, &why);
    if (llm_agree(ctx, &why) == TSH_OK &&
        llm_share(ctx, &plain, sizeof plain) == TSH_OK &&
        llm_model_save_weights(m, folder.temporary, dtype, plain) == TSH_OK)
        (void)llm_out_commit(ctx, &folder);
    llm_out_abort(&folder);
    return tsh_last_error(ctx)->code;
}

#endif
