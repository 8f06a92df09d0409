/* text.h - what llm.c does with text: prompts, --tokenize and --detokenize, and what is generated,
 * by tokenizer.h. Without LLM_TOKENIZER, which the Makefile defines where PCRE2 is installed, all of
 * it is refused. */
#ifndef LLM_TEXT_H
#define LLM_TEXT_H

#ifdef LLM_TOKENIZER
#include "tokenizer.h"

/* A tokenizer, and what it has yet to print. */
typedef struct llm_words {
    llm_tokenizer *tokenizer;
    llm_stream stream;
    char error[TSH_MESSAGE_SIZE];
} llm_words;

/* Of a file, or of tokenizer.json in the model's folder. 0: words->error says why not. */
static int words_open(llm_words *words, const char *file, const char *model) {
    char path[4096];
    snprintf(path, sizeof path, "%s%s", file ? file : model, file ? "" : "/tokenizer.json");
    words->tokenizer = llm_tokenizer_open(path, words->error, sizeof words->error);
    words->stream.tokenizer = words->tokenizer;
    return words->tokenizer != NULL;
}

static void words_close(llm_words *words) {
    size_t n;
    if (words->stream.ids.at) (void)llm_stream_end(&words->stream, &n);
    llm_tokenizer_free(words->tokenizer);
    words->tokenizer = NULL;
}

/* How many ids a text has; -1: an error. *ids is for free(). */
static int64_t words_encode(llm_words *words, const char *text, size_t length, int special,
                            int32_t **ids) {
    const int64_t n = llm_tokenizer_encode(words->tokenizer, text, length, special, ids);
    if (n < 0) snprintf(words->error, sizeof words->error, "%s",
                        llm_tokenizer_error(words->tokenizer));
    return n;
}

/* The bytes of ids to stdout. */
static int words_print(llm_words *words, const int32_t *ids, size_t count) {
    size_t length = 0;
    char *text = llm_tokenizer_decode(words->tokenizer, ids, count, 1, &length);
    if (text) fwrite(text, 1, length, stdout);
    else snprintf(words->error, sizeof words->error, "%s", llm_tokenizer_error(words->tokenizer));
    free(text);
    return text != NULL;
}

/* What one more id adds to the text, to stdout; with `last`, what was held back. */
static int words_say(llm_words *words, int32_t id, int last) {
    size_t length = 0;
    const char *text = last ? llm_stream_end(&words->stream, &length)
                            : llm_stream_add(&words->stream, id, &length);
    if (text) fwrite(text, 1, length, stdout);
    if (text) fflush(stdout);
    return text != NULL;
}

static int64_t words_count(const llm_words *words) {
    return llm_tokenizer_size(words->tokenizer);
}

#else
typedef struct llm_words {
    void *tokenizer;
    char error[TSH_MESSAGE_SIZE];
} llm_words;

static int words_open(llm_words *words, const char *file, const char *model) {
    (void)file, (void)model;
    snprintf(words->error, sizeof words->error,
             "built without a tokenizer: install libpcre2-dev, and build llm again, or give --ids");
    return 0;
}

static void words_close(llm_words *words) {
    (void)words;
}

static int64_t words_encode(llm_words *words, const char *text, size_t length, int special,
                            int32_t **ids) {
    (void)words, (void)text, (void)length, (void)special, (void)ids;
    return -1;
}

static int words_print(llm_words *words, const int32_t *ids, size_t count) {
    (void)words, (void)ids, (void)count;
    return 0;
}

static int words_say(llm_words *words, int32_t id, int last) {
    (void)words, (void)id, (void)last;
    return 0;
}

static int64_t words_count(const llm_words *words) {
    (void)words;
    return 0;
}
#endif

#endif
