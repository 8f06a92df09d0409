/* files.h - reads the files of a model's folder, and text from files and pipes; shares rank 0's
 * errors
 *
 *     tsh_error why;
 *     char *text = llm_read("model/config.json", LLM_JSON_MAX, &length, &why);
 *     if (!text && !llm_is_absent(errno)) puts(why.message);
 *
 * A model's files are opened by tsh_file_open, which refuses those that are not regular files, or
 * exceed a size limit. Link with tshard. */
#ifndef LLM_FILES_H
#define LLM_FILES_H

#include "../../tshard.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__GNUC__)
#define LLM_FILES_API __attribute__((unused)) static
#else
#define LLM_FILES_API static
#endif

enum {
    LLM_JSON_MAX = 1 << 24,     /* most bytes of config.json, chat templates and the like */
    LLM_TOKENIZER_MAX = 1 << 28 /* most bytes of tokenizer.json; the largest known have 35 MB */
};

/* Reads the rest of an open file or pipe, at most max bytes (0: any number), and appends a 0 byte,
 * which *length does not count. Free the result with free(). Returns NULL and sets errno if that
 * fails (EFBIG: there are more than max bytes). */
LLM_FILES_API char *llm_read_all(FILE *file, int64_t max, size_t *length) {
    size_t size = 1 << 16, n = 0;
    char *text = (char *)malloc(size), *more;
    int why = text ? 0 : ENOMEM;
    while (!why) {
        errno = 0;
        const size_t got = fread(text + n, 1, size - 1 - n, file);
        n += got;
        if (got == 0) {
            why = !ferror(file) ? 0 : errno ? errno : EIO;
            break;
        }
        if (max > 0 && n > (size_t)max) why = EFBIG;
        if (why || n + 1 < size) continue;
        more = (char *)realloc(text, size *= 2);
        if (more) text = more;
        else why = ENOMEM;
    }
    if (!why) {
        text[n] = 0;
        *length = n;
        return text;
    }
    free(text);
    errno = why;
    return NULL;
}

/* Reads a regular file of at most max bytes, as llm_read_all does. Returns NULL and sets *why if
 * that fails; then llm_is_absent(errno) is 1 if there is no such file. */
LLM_FILES_API char *llm_read(const char *path, int64_t max, size_t *length, tsh_error *why) {
    FILE *file = tsh_file_open(path, max, why);
    char *text = file ? llm_read_all(file, max, length) : NULL;
    if (!file) return NULL;
    if (!text)
        (void)tsh_error_set(why, TSH_ERR_IO, -1, "%.300s cannot be read: %s", path,
                            strerror(errno));
    (void)fclose(file);
    if (!text) errno = EIO;
    return text;
}

/* Reads the text file folder/name (folder "": name) by llm_read, at most LLM_JSON_MAX bytes. */
LLM_FILES_API char *llm_read_text(const char *folder, const char *name, tsh_error *why) {
    char path[8200]; /* room for a folder and a name */
    size_t length;
    (void)snprintf(path, sizeof path, "%s%s%s", folder, *folder ? "/" : "", name);
    return llm_read(path, LLM_JSON_MAX, &length, why);
}

/* Returns 1 if `number`, an errno, says that a file does not exist. ENOTDIR: its folder is a file,
 * such as a GGUF file. */
LLM_FILES_API int llm_is_absent(int number) {
    return number == ENOENT || number == ENOTDIR;
}

/* -- errors of one rank ----------------------------------------------------------- */

/* Broadcasts data, whose size in bytes is a multiple of 4, from rank 0 to all ranks. If that fails,
 * ctx has the error, too. */
LLM_FILES_API tsh_result llm_share(tsh_ctx *ctx, void *data, size_t size) {
    const tsh_result result = tsh_broadcast(tsh_world(ctx), data, (int64_t)(size / 4), TSH_I32, 0);
    if (result == TSH_OK) return TSH_OK;
    return tsh_ok(ctx) ? tsh_fail(ctx, result, NULL) : tsh_last_error(ctx)->code;
}

/* Collective over the world: rank 0's error, if it has one, becomes the error of all ranks. */
LLM_FILES_API tsh_result llm_agree(tsh_ctx *ctx, const tsh_error *own) {
    tsh_error why = *own;
    if (!tsh_ok(ctx)) return tsh_last_error(ctx)->code;
    /* A rank that receives an error may stop before rank 0's broadcast has ended, and make it fail.
     * So rank 0 ignores the broadcast's result: it reports its own error below, the same one. */
    if (own->code != TSH_OK)
        (void)tsh_broadcast(tsh_world(ctx), &why, (int64_t)(sizeof why / 4), TSH_I32, 0);
    else if (llm_share(ctx, &why, sizeof why) != TSH_OK)
        return tsh_last_error(ctx)->code;
    return why.code == TSH_OK ? TSH_OK : tsh_fail(ctx, why.code, "%s", why.message);
}

#endif
