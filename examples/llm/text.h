/* text.h - what llm.c does with text, by tokenizer.h: prompts, --tokenize and --detokenize, and what
 * is generated, up to a stop string. */
#ifndef LLM_TEXT_H
#define LLM_TEXT_H

#include "gguf.h"
#include "gguf_tokenizer.h"
#include "tokenizer.h"

typedef struct text_codec {
    llm_tokenizer *tokenizer;
    int64_t vocabulary; /* how many tokens the model has; 0: no model is there */
    char error[4352]; /* a path and a sentence */
} text_codec;

/* Texts of the command line. */
typedef struct text_list {
    const char **at;
    size_t count;
} text_list;

/* A text that is generated. Begin it with zeros, codec and stops. */
typedef struct text_out {
    text_codec *codec;
    const text_list *stops; /* it ends before the first of these that it has */
    int live;               /* 1: to stdout as it comes */
    int stopped;
    llm_stream stream;
    char *at; /* the text so far; NULL: none */
    size_t length, room, shown;
} text_out;

/* A GGUF file's tokenizer; pre: as gguf_tokenizer's. NULL: *error says why not. */
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

/* Of a file, or of the model's: tokenizer.json in its folder, or what the GGUF file has, of which
 * `pre` sets the pre-tokenizer, unless it is NULL. 0: codec->error says why not. */
static int text_open(text_codec *codec, const char *file, const char *model, const char *pre) {
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
                           : llm_tokenizer_open(path, codec->error, sizeof codec->error);
    return codec->tokenizer != NULL;
}

static void text_close(text_codec *codec) {
    llm_tokenizer_free(codec->tokenizer);
    codec->tokenizer = NULL;
}

/* 0: not enough memory. */
static int text_append(text_list *list, const char *text) {
    const char **at = (const char **)realloc(list->at, (list->count + 1) * sizeof *at);
    if (!at) return 0;
    list->at = at;
    at[list->count++] = text;
    return 1;
}

/* How many ids a text has; -1: an error. *ids is for free(). */
static int64_t text_encode(text_codec *codec, const char *text, size_t length, int special,
                            int32_t **ids) {
    const int64_t n = llm_tokenizer_encode(codec->tokenizer, text, length, special, ids);
    if (n < 0) snprintf(codec->error, sizeof codec->error, "%s",
                        llm_tokenizer_error(codec->tokenizer));
    for (int64_t i = 0; i < n && codec->vocabulary; i++) {
        if ((*ids)[i] < codec->vocabulary) continue;
        snprintf(codec->error, sizeof codec->error, "the text has the tokenizer's token %d, and the "
                 "model has %lld tokens", (int)(*ids)[i], (long long)codec->vocabulary);
        free(*ids);
        *ids = NULL;
        return -1;
    }
    return n;
}

/* The bytes of ids to stdout. */
static int text_print(text_codec *codec, const int32_t *ids, size_t count) {
    size_t length = 0;
    char *text = llm_tokenizer_decode(codec->tokenizer, ids, count, 1, &length);
    if (text) fwrite(text, 1, length, stdout);
    else snprintf(codec->error, sizeof codec->error, "%s", llm_tokenizer_error(codec->tokenizer));
    free(text);
    return text != NULL;
}

/* Shows what is new of the text, up to `end`. */
static void text_show(text_out *out, size_t end) {
    if (out->live && end > out->shown) {
        fwrite(out->at + out->shown, 1, end - out->shown, stdout);
        fflush(stdout);
    }
    if (end > out->shown) out->shown = end;
}

/* Cuts the text before the first stop string, which ends after `from` at the earliest. Returns how
 * many bytes at its end may be the beginning of one. */
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

/* Appends n bytes. 0: not enough memory. */
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
    text_show(out, out->length - held);
    return 1;
}

/* Appends what one more id adds to the text; never half a character. 0: an error. */
static int text_add(text_out *out, int32_t id) {
    size_t length = 0;
    out->stream.tokenizer = out->codec->tokenizer;
    const char *text = llm_stream_add(&out->stream, id, &length);
    return text && text_put(out, text, length);
}

/* Appends what was held back. 0: an error. */
static int text_finish(text_out *out) {
    size_t length = 0;
    const char *text = out->stream.tokenizer ? llm_stream_end(&out->stream, &length) : "";
    const int ok = out->stopped || text_put(out, text, length);
    if (ok) text_show(out, out->length);
    return ok;
}

/* Forgets the text; the next one begins. */
static void text_clear(text_out *out) {
    size_t n;
    if (out->stream.tokenizer) (void)llm_stream_end(&out->stream, &n);
    free(out->at);
    out->at = NULL;
    out->length = out->room = out->shown = 0;
    out->stopped = 0;
}

static int64_t text_count(const text_codec *codec) {
    return llm_tokenizer_size(codec->tokenizer);
}

#endif
