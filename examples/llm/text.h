/* text.h - what llm.c does with text: prompts, --tokenize and --detokenize, and what is generated,
 * by tokenizer.h. */
#ifndef LLM_TEXT_H
#define LLM_TEXT_H

#include "tokenizer.h"

/* A tokenizer, and what it has yet to print. */
typedef struct text_codec {
    llm_tokenizer *tokenizer;
    llm_stream stream;
    char error[4352]; /* a path and a sentence */
} text_codec;

/* Of a file, or of tokenizer.json in the model's folder. 0: codec->error says why not. */
static int text_open(text_codec *codec, const char *file, const char *model) {
    char path[4096];
    snprintf(path, sizeof path, "%s%s", file ? file : model, file ? "" : "/tokenizer.json");
    codec->tokenizer = llm_tokenizer_open(path, codec->error, sizeof codec->error);
    codec->stream.tokenizer = codec->tokenizer;
    return codec->tokenizer != NULL;
}

static void text_close(text_codec *codec) {
    size_t n;
    if (codec->stream.ids.at) (void)llm_stream_end(&codec->stream, &n);
    llm_tokenizer_free(codec->tokenizer);
    codec->tokenizer = NULL;
}

/* How many ids a text has; -1: an error. *ids is for free(). */
static int64_t text_encode(text_codec *codec, const char *text, size_t length, int special,
                            int32_t **ids) {
    const int64_t n = llm_tokenizer_encode(codec->tokenizer, text, length, special, ids);
    if (n < 0) snprintf(codec->error, sizeof codec->error, "%s",
                        llm_tokenizer_error(codec->tokenizer));
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

/* What one more id adds to the text, to stdout; with `last`, what was held back. */
static int text_say(text_codec *codec, int32_t id, int last) {
    size_t length = 0;
    const char *text = last ? llm_stream_end(&codec->stream, &length)
                            : llm_stream_add(&codec->stream, id, &length);
    if (text) fwrite(text, 1, length, stdout);
    if (text) fflush(stdout);
    return text != NULL;
}

static int64_t text_count(const text_codec *codec) {
    return llm_tokenizer_size(codec->tokenizer);
}

#endif
