/* text.h - how llm.c handles text, with tokenizer.h: prompts, --tokenize and --detokenize, and
 * generated text up to a stop string. */
#ifndef LLM_TEXT_H
#define LLM_TEXT_H

#include "found.h"
#include "gguf.h"
#include "gguf_tokenizer.h"
#include "json.h"
#include "tokenizer.h"

/* TEXT_API marks the functions that a program may call. */
#if defined(__GNUC__)
#define TEXT_API __attribute__((unused)) static
#else
#define TEXT_API static
#endif

typedef struct text_codec {
    llm_tokenizer *tokenizer;
    int lower; /* 1: texts are lowercased, even if tokenizer.json does not say so */
    int raw;   /* 1: text is printed with its control characters; 0: only with newlines and tabs */
    int64_t vocabulary; /* number of the model's tokens; 0: there is no model */
    char error[4352]; /* room for a path and a sentence */
} text_codec;

/* A list of texts from the command line: at[0] to at[count - 1], then NULL. */
typedef struct text_list {
    const char **at;
    size_t count;
} text_list;

/* A text that is being generated. Initialize it with zeros, except the codec and the stop
 * strings. */
typedef struct text_out {
    text_codec *codec;
    const text_list *stops; /* stop strings: the text ends before the first that it contains */
    int live;               /* 1: print the text to stdout as it is generated */
    /* 1: the text has ended at a stop string. */
    int stopped;
    llm_stream stream;
    char *at; /* the text so far, with a zero byte at its end; NULL: none */
    /* length: bytes of the text; room: bytes of the buffer `at`; shown: bytes already shown */
    size_t length, room, shown;
} text_out;

/* Opens the tokenizer of a GGUF file. pre: name of its pre-tokenizer; NULL: as the file says.
 * Returns NULL on error, with one sentence in `error`, of `size` bytes. */
static llm_tokenizer *text_open_gguf(const char *path, const char *pre, char *error, size_t size) {
    gguf *g = gguf_open_keys(path, error, size);
    llm_tokenizer *tokenizer = NULL;
    char *json = g ? gguf_tokenizer(g, pre) : NULL;
    if (json) tokenizer = llm_tokenizer_read(json, strlen(json), path, error, size);
    else if (g) snprintf(error, size, "%s", g->error);
    if (tokenizer && g->warning[0]) fprintf(stderr, "llm: warning: %s\n", g->warning);
    cJSON_free(json);
    gguf_close(g);
    return tokenizer;
}

/* Puts the normalizer Lowercase before those of a tokenizer.json, unless one of them is Lowercase.
 * Returns 0: not enough memory. */
static int text_lower(cJSON *json) {
    cJSON *normalizer = cJSON_DetachItemFromObjectCaseSensitive(json, "normalizer");
    cJSON *all = cJSON_CreateObject(), *list = cJSON_AddArrayToObject(all, "normalizers");
    cJSON *lower = cJSON_CreateObject();
    const cJSON *item, *known = cJSON_GetObjectItemCaseSensitive(normalizer, "normalizers");
    int has = 0;
    for (item = known ? known->child : normalizer; item; item = item->next) {
        const char *type = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(item, "type"));
        has |= type && strcmp(type, "Lowercase") == 0;
    }
    int ok = list && cJSON_AddStringToObject(lower, "type", "Lowercase") &&
             cJSON_AddStringToObject(all, "type", "Sequence");
    if (ok && !has) ok = cJSON_AddItemToArray(list, lower);
    else cJSON_Delete(lower);
    if (normalizer && !cJSON_IsNull(normalizer)) ok = ok && cJSON_AddItemToArray(list, normalizer);
    else cJSON_Delete(normalizer);
    return cJSON_AddItemToObject(json, "normalizer", all) && ok;
}

/* Opens a tokenizer.json, and adds Lowercase to its normalizers. Returns NULL on error, with one
 * sentence in `error`, of `size` bytes. */
static llm_tokenizer *text_open_lower(const char *path, char *error, size_t size) {
    tsh_error why;
    size_t length;
    char *text = llm_read(path, LLM_TOKENIZER_MAX, &length, &why);
    if (!text) {
        snprintf(error, size, "%s", why.message);
        return NULL;
    }
    cJSON *json = llm_parse(text);
    llm_tokenizer *tokenizer = NULL;
    const int lacking = !json && errno == ENOMEM;
    free(text);
    if (lacking) {
        snprintf(error, size, "%.300s: not enough memory", path);
        return NULL;
    }
    if (!cJSON_IsObject(json)) {
        cJSON_Delete(json);
        return llm_tokenizer_open(path, error, size); /* fails, and writes the reason to `error` */
    }
    text = text_lower(json) ? cJSON_PrintUnformatted(json) : NULL;
    cJSON_Delete(json);
    if (text) tokenizer = llm_tokenizer_read(text, strlen(text), path, error, size);
    else snprintf(error, size, "not enough memory");
    cJSON_free(text);
    return tokenizer;
}

/* Opens the tokenizer of `file`, or, if that is NULL, of the model: tokenizer.json in its folder,
 * or the one in its GGUF file. pre: name of a GGUF file's pre-tokenizer; NULL: as the file says.
 * Returns 0: codec->error says why not. */
TEXT_API int text_open(text_codec *codec, const char *file, const char *model, const char *pre) {
    char path[4096];
    const int one = file != NULL || gguf_is_file(model);
    snprintf(path, sizeof path, "%s%s", file ? file : model, one ? "" : "/tokenizer.json");
    const int is_gguf = gguf_is_file(path);
    if (pre && !is_gguf) {
        snprintf(codec->error, sizeof codec->error, "--pre is for GGUF files, and %.300s is none",
                 path);
        return 0;
    }
    codec->tokenizer = is_gguf
                           ? text_open_gguf(path, pre, codec->error, sizeof codec->error)
                       : codec->lower
                           ? text_open_lower(path, codec->error, sizeof codec->error)
                           : llm_tokenizer_open(path, codec->error, sizeof codec->error);
    if (!codec->tokenizer && !one)
        (void)llm_found_for_tokenizer(model, codec->error, sizeof codec->error);
    return codec->tokenizer != NULL;
}

TEXT_API void text_close(text_codec *codec) {
    llm_tokenizer_free(codec->tokenizer);
    codec->tokenizer = NULL;
}

/* Appends a text to the list, without copying it. Returns 0: not enough memory. */
TEXT_API int text_append(text_list *list, const char *text) {
    const char **at = (const char **)realloc(list->at, (list->count + 2) * sizeof *at);
    if (!at) return 0;
    list->at = at;
    at[list->count++] = text;
    at[list->count] = NULL;
    return 1;
}

/* Converts a text to ids. Returns their number; -1: an error, in codec->error. *ids is to be passed
 * to free(). special: 1 adds the tokens that the tokenizer puts before and after a text. */
TEXT_API int64_t text_encode(text_codec *codec, const char *text, size_t length, int special,
                            int32_t **ids) {
    const int64_t n = llm_tokenizer_encode(codec->tokenizer, text, length, special, ids);
    if (n < 0) snprintf(codec->error, sizeof codec->error, "%s",
                        llm_tokenizer_error(codec->tokenizer));
    for (int64_t i = 0; i < n && codec->vocabulary; i++) {
        if ((*ids)[i] < codec->vocabulary) continue;
        snprintf(codec->error, sizeof codec->error,
                 "the text has the tokenizer's token %d, and the model has %lld tokens",
                 (int)(*ids)[i], (long long)codec->vocabulary);
        free(*ids);
        *ids = NULL;
        return -1;
    }
    return n;
}

/* Prints n bytes of text from a model or its files to stdout, with the control characters that
 * codec->raw allows. Returns 0: not enough memory. */
static int text_write(const text_codec *codec, const char *text, size_t n) {
    char *copy = codec->raw ? NULL : (char *)malloc(n + 1);
    if (!codec->raw && !copy) return 0;
    if (copy) memcpy(copy, text, n);
    if (copy) n = quote_drop(copy, n);
    fwrite(copy ? copy : text, 1, n, stdout);
    free(copy);
    return 1;
}

/* Prints the text of `count` ids to stdout. Returns 0 on error, in codec->error. */
TEXT_API int text_print(text_codec *codec, const int32_t *ids, size_t count) {
    size_t length = 0;
    char *text = llm_tokenizer_decode(codec->tokenizer, ids, count, 1, &length);
    const int ok = text && text_write(codec, text, length);
    if (!ok)
        snprintf(codec->error, sizeof codec->error, "%s",
                 text ? "not enough memory" : llm_tokenizer_error(codec->tokenizer));
    free(text);
    return ok;
}

/* If out->live is 1, prints the part of the text that was not shown yet, up to byte `end`. Returns
 * 0: not enough memory. */
static int text_show(text_out *out, size_t end) {
    int ok = 1;
    if (out->live && end > out->shown) {
        ok = text_write(out->codec, out->at + out->shown, end - out->shown);
        fflush(stdout);
    }
    if (end > out->shown) out->shown = end;
    return ok;
}

/* Cuts the text before the first stop string in it. Only stop strings that end after byte `from`
 * are looked for. Returns how many bytes at the end may be the beginning of a stop string. */
static size_t text_stop(text_out *out, size_t from) {
    size_t held = 0, begin = out->length;
    for (size_t i = 0; i < out->stops->count; i++) {
        const char *stop = out->stops->at[i];
        const size_t n = strlen(stop);
        for (size_t at = from >= n ? from - n + 1 : 0; at < out->length; at++) {
            const size_t rest = out->length - at, same = rest < n ? rest : n;
            if (memcmp(out->at + at, stop, same) != 0) continue;
            if (same == n && at < begin) begin = at;
            if (same == n) out->stopped = 1;
            if (same < n && rest > held) held = rest;
        }
    }
    out->length = begin;
    return out->stopped ? 0 : held;
}

/* Appends n bytes to the text, cuts it at a stop string, and shows all of it but an end that may be
 * the beginning of a stop string. Returns 0: not enough memory. */
static int text_put(text_out *out, const char *text, size_t n) {
    const size_t from = out->length;
    if (out->length + n + 1 > out->room) {
        const size_t room = 2 * (out->length + n) + 64;
        char *at = (char *)realloc(out->at, room);
        if (!at) return 0;
        out->at = at;
        out->room = room;
    }
    memcpy(out->at + out->length, text, n);
    out->length += n;
    const size_t held = text_stop(out, from);
    out->at[out->length] = 0;
    return text_show(out, out->length - held);
}

/* Appends the text of one more id; bytes of an unfinished UTF-8 character wait for the next id.
 * Returns 0 on error. */
TEXT_API int text_add(text_out *out, int32_t id) {
    size_t length = 0;
    out->stream.tokenizer = out->codec->tokenizer;
    const char *text = llm_stream_add(&out->stream, id, &length);
    return text && text_put(out, text, length);
}

/* Ends the text: appends and shows what waited for another id, or could have begun a stop string.
 * Returns 0 on error. */
TEXT_API int text_finish(text_out *out) {
    size_t length = 0;
    const char *text = out->stream.tokenizer ? llm_stream_end(&out->stream, &length) : "";
    return (out->stopped || text_put(out, text, length)) && text_show(out, out->length);
}

/* Forgets the text, so that the next one can begin. */
TEXT_API void text_clear(text_out *out) {
    size_t n;
    if (out->stream.tokenizer) (void)llm_stream_end(&out->stream, &n);
    free(out->at);
    out->at = NULL;
    out->length = out->room = out->shown = 0;
    out->stopped = 0;
}

/* Returns the tokenizer's largest id + 1; see llm_tokenizer_size. */
TEXT_API int64_t text_count(const text_codec *codec) {
    return llm_tokenizer_size(codec->tokenizer);
}

#endif
