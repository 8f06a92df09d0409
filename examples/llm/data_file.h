/* data_file.h - reads the lines of a file for data.h, and stores the sequences of tokens that are
 * made of them. Include data.h. */
#ifndef LLM_DATA_FILE_H
#define LLM_DATA_FILE_H

#include "chat.h"
#include "files.h"
#include "quote.h"
#include "text.h"

#include <stdarg.h>

/* Marks functions that other files call. */
#if defined(__GNUC__)
#define LLM_DATA_API __attribute__((unused)) static
#else
#define LLM_DATA_API static
#endif

/* Options of llm_data_open: the files to read, and how to read them. 0 is the default of every
 * field after `length`. */
typedef struct llm_data_desc {
    const char *path;    /* file of documents to train on (with --evaluate: to evaluate on) */
    text_codec *codec;   /* tokenizer; used by llm_data_open only */
    int64_t length;      /* tokens in a row of a batch: the longest context that is learnt. If the
                          * files have fewer tokens in all, a row has that many */
    chat_format *format; /* chat template; NULL: conversations are refused */
    const char *eos;     /* end-of-text token, as text; NULL: that of `format`; "": none is added */
    const char *held_path; /* file of held-out documents; NULL: see held_every */
    int64_t held_every;    /* N: the last 1/N of `path` is held out: of its documents, or of the
                            * tokens of a plain text; 0: nothing is */
    uint64_t seed;         /* seed of the order of documents; 0: the ctx's seed */
    int all;               /* 1: the tokens of prompts have a loss, too, but not in preferences */
    int unpacked;          /* 1: a row has one sequence; 0: as many as there is room for */
    int truncate;          /* 1: a sequence longer than `length` is cut; 0: it is an error */
    int32_t padding;       /* token that fills the end of a row */
} llm_data_desc;

/* A sequence of tokens: a document; the chosen or rejected answer of a preference after its prompt;
 * or a row of a plain text. The model reads all of its tokens but the last, which is a target
 * only. */
typedef struct llm_sequence {
    int64_t at;      /* index of the sequence's first token in llm_data.ids */
    int32_t inputs;  /* number of tokens that the model reads */
    int32_t answers; /* number of targets with a loss */
} llm_sequence;

/* A part of all documents: those to learn from, or the held-out ones. */
typedef struct llm_data_part {
    int64_t first, count;    /* documents [first, first + count) of llm_data */
    int64_t rows;            /* number of rows that these documents fill */
    int64_t inputs, answers; /* numbers of tokens that a model reads, and of targets with a loss */
} llm_data_part;

/* All documents of the files. They do not change after llm_data_open, so ranks that are threads
 * share them. */
typedef struct llm_data {
    llm_data_desc desc;
    llm_data_part train, held;
    int pairs;    /* 1: documents are preferences: sequence 2 i is the chosen one of document i, and
                   * sequence 2 i + 1 the rejected one; 0: sequence i is document i */
    int32_t *ids; /* tokens of all sequences; a token without a loss is stored as ~token */
    llm_sequence *sequences;
    int64_t tokens, documents; /* length of `ids`; number of documents */
    int64_t dropped;  /* number of documents that were left out because no target (desc.truncate:
                       * none of the first desc.length targets) has a loss */
    int64_t ids_room; /* capacity of `ids` */
    int64_t room;     /* capacity of `sequences` */
    char error[1024]; /* one sentence; "": no error so far */
} llm_data;

/* -- reading a file line by line ----------------------------------------------- */

/* A data file that is being read, and the conversation on its current line. */
typedef struct llm_data_file {
    llm_data *data;
    const char *path;
    FILE *file;
    int64_t line;            /* number of the line that was read last, from 1 on; 0: none */
    char *text;              /* buffer; bytes [begin, end) wait to be returned as lines */
    size_t begin, end, room; /* room: capacity of `text`, in bytes */
    int ended;               /* 1: all of the file was read */
    chat_message *messages;  /* the line's conversation; its texts belong to the line's JSON */
    chat_span *spans;        /* spans[i]: bytes of answer messages[i], see chat_render_answers */
    size_t count, most;      /* number of messages; capacity of `messages` and `spans` */
} llm_data_file;

/* Tokens of a document. The first `prompt` of its `count` tokens are the prompt's. */
typedef struct llm_data_tokens {
    int32_t *ids;
    int64_t count, prompt;
} llm_data_tokens;

/* Sets the error to "FILE:LINE: " and a sentence, without LINE if no line was read. Returns 0. */
TSH_PRINTF(2, 3)
LLM_DATA_API int llm_data_wrong(llm_data_file *f, const char *format, ...) {
    llm_data *d = f->data;
    va_list list;
    size_t n;
    if (f->line)
        (void)snprintf(d->error, sizeof d->error, "%.300s:%lld: ", f->path, (long long)f->line);
    else
        (void)snprintf(d->error, sizeof d->error, "%.300s: ", f->path);
    n = strlen(d->error);
    va_start(list, format);
    tsh_text_format(d->error + n, sizeof d->error - n, format, list);
    va_end(list);
    (void)quote_message(d->error);
    return 0;
}

/* Reads more of the file into the buffer, after the bytes [begin, end), which move to its front.
 * Returns 0 after an error. */
static int llm_data_more(llm_data_file *f) {
    const size_t left = f->end - f->begin;
    size_t got;
    if (left > 0) memmove(f->text, f->text + f->begin, left);
    f->begin = 0;
    f->end = left;
    if (left + 1 >= f->room) {
        const size_t room = f->room ? 2 * f->room : (size_t)1 << 16;
        char *text = room > f->room ? (char *)realloc(f->text, room) : NULL;
        f->line++;
        if (!text)
            return llm_data_wrong(f,
                                  "the line has over %zu bytes, more than there is "
                                  "memory for; split it",
                                  left);
        f->line--;
        f->text = text;
        f->room = room;
    }
    errno = 0;
    got = fread(f->text + left, 1, f->room - 1 - left, f->file);
    f->end += got;
    f->ended = got == 0;
    if (got == 0 && ferror(f->file))
        return llm_data_wrong(f, "the file cannot be read: %s", strerror(errno));
    return 1;
}

/* Returns the next line, *length bytes and a zero byte; NULL: the file has ended, or an error. */
LLM_DATA_API char *llm_data_line(llm_data_file *f, size_t *length) {
    char *newline = NULL, *line;
    while (!f->text || !(newline = (char *)memchr(f->text + f->begin, '\n', f->end - f->begin)))
        if (f->ended || !llm_data_more(f)) break;
    if (f->data->error[0] || (!newline && f->begin == f->end)) return NULL;
    line = f->text + f->begin;
    *length = newline ? (size_t)(newline - line) : f->end - f->begin;
    line[*length] = 0; /* llm_data_more leaves a byte free for this 0 */
    f->begin += *length + (newline != NULL);
    f->line++;
    return line;
}

/* Returns the number of bytes of the byte-order mark that a file begins with; 0: it has none. */
LLM_DATA_API size_t llm_data_mark(const char *text, size_t length) {
    return length >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0 ? 3 : 0;
}

/* Reads all of an open file or pipe as UTF-8 text, without a byte-order mark, to f->text. Returns
 * the text, *length bytes; NULL: an error. */
LLM_DATA_API const char *llm_data_whole(llm_data_file *f, size_t *length) {
    size_t all = 0, valid, mark;
    f->text = llm_read_all(f->file, 0, &all);
    if (!f->text) {
        (void)llm_data_wrong(f, "the file cannot be read: %s", strerror(errno));
        return NULL;
    }
    valid = llm_valid_prefix(f->text, all);
    if (strlen(f->text) < valid) valid = strlen(f->text);
    mark = llm_data_mark(f->text, all);
    *length = all - mark;
    if (valid == all && *length > 0) return f->text + mark;
    f->line = valid < all; /* 0 (the error names no line) if the file is empty */
    for (size_t i = 0; i < valid; i++) f->line += f->text[i] == '\n';
    if (valid == all)
        (void)llm_data_wrong(f, "the file is empty");
    else if (!f->text[valid])
        (void)llm_data_wrong(f, "this line has a byte that is 0, which is no text");
    else
        (void)llm_data_wrong(f, "this line is not UTF-8; convert the file, for example by iconv "
                                "-t UTF-8");
    return NULL;
}

/* -- from texts to sequences ---------------------------------------------------- */

/* Makes room for `needed` elements of `size` bytes in the array *at, whose capacity is *room.
 * Returns 0: not enough memory. */
static int llm_data_grow(llm_data_file *f, void **at, int64_t *room, int64_t needed, size_t size) {
    const int64_t more = needed > *room ? needed + needed / 2 + 16 : *room;
    void *grown;
    if (needed <= *room) return 1;
    grown = (uint64_t)more > SIZE_MAX / size ? NULL : realloc(*at, (size_t)more * size);
    if (!grown) return llm_data_wrong(f, "not enough memory for the tokens so far");
    *at = grown;
    *room = more;
    return 1;
}

/* Tokenizes a text. special: 1 adds the tokens that the tokenizer puts around a text. Returns 0
 * after an error; else tokens->ids is to be passed to free(). */
LLM_DATA_API int llm_data_encode(llm_data_file *f, const char *text, size_t length, int special,
                           llm_data_tokens *tokens) {
    text_codec *codec = f->data->desc.codec;
    tokens->count = text_encode(codec, text, length, special, &tokens->ids);
    tokens->prompt = 0;
    if (tokens->count >= 0) return 1;
    tokens->ids = NULL;
    tokens->count = 0;
    return llm_data_wrong(f, "%s", codec->error);
}

/* Tokenizes the first `length` bytes of a text alone. Returns how many of their first tokens are
 * also the first ones of the whole text (`tokens`); -1: an error. */
LLM_DATA_API int64_t llm_data_shared(llm_data_file *f, const llm_data_tokens *tokens,
                                     const char *text, size_t length, int special) {
    llm_data_tokens alone;
    int64_t same = 0;
    if (!llm_data_encode(f, text, length, special, &alone)) return -1;
    while (same < alone.count && same < tokens->count && alone.ids[same] == tokens->ids[same])
        same++;
    free(alone.ids);
    return same;
}

/* Switches the loss of tokens [from, to) off, or on for those that have none: id becomes ~id. */
LLM_DATA_API void llm_data_turn(llm_data_tokens *tokens, int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++) tokens->ids[i] = ~tokens->ids[i];
}

/* Cuts off the tokens after the last one with a loss. If more than desc.length + 1 are left, cuts
 * off the others (desc.truncate), or makes that an error. Returns 1; 0 after an error; -1: no
 * target with a loss is left. */
static int llm_data_fit(llm_data_file *f, llm_data_tokens *tokens) {
    const llm_data_desc *desc = &f->data->desc;
    while (tokens->count > 0 && tokens->ids[tokens->count - 1] < 0) tokens->count--;
    if (tokens->count - 1 > desc->length && !desc->truncate)
        return llm_data_wrong(f,
                              "%lld tokens are more than the context of %lld; take a longer "
                              "context (--context N), shorten the text, or have it cut off "
                              "(--truncate)",
                              (long long)tokens->count, (long long)desc->length);
    if (tokens->count - 1 > desc->length) tokens->count = desc->length + 1;
    while (tokens->count > 0 && tokens->ids[tokens->count - 1] < 0) tokens->count--;
    return tokens->count > 1 ? 1 : -1;
}

/* Sets sequence `index` to the `count` tokens in data->ids from index `at` on. Returns 0 after an
 * error. */
LLM_DATA_API int llm_data_sequence(llm_data_file *f, int64_t index, int64_t at, int64_t count) {
    llm_data *d = f->data;
    llm_sequence *s;
    void *all = d->sequences;
    if (!llm_data_grow(f, &all, &d->room, index + 1, sizeof *d->sequences)) return 0;
    d->sequences = (llm_sequence *)all;
    s = &d->sequences[index];
    s->at = at;
    s->inputs = (int32_t)(count - 1);
    s->answers = 0;
    for (int64_t i = 1; i < count; i++) s->answers += d->ids[at + i] >= 0;
    return 1;
}

/* Appends tokens to data->ids. Returns the index of the first; -1 after an error. */
LLM_DATA_API int64_t llm_data_put(llm_data_file *f, const llm_data_tokens *tokens) {
    llm_data *d = f->data;
    const int64_t at = d->tokens;
    void *ids = d->ids;
    if (!llm_data_grow(f, &ids, &d->ids_room, at + tokens->count, sizeof *d->ids)) return -1;
    d->ids = (int32_t *)ids;
    if (tokens->count > 0) memcpy(d->ids + at, tokens->ids, (size_t)tokens->count * sizeof *d->ids);
    d->tokens += tokens->count;
    return at;
}

/* Appends a document of one sequence, or counts it as dropped. Returns 0 after an error. */
LLM_DATA_API int llm_data_document(llm_data_file *f, llm_data_tokens *tokens) {
    const int fits = llm_data_fit(f, tokens);
    int64_t at;
    if (fits < 1) {
        f->data->dropped += fits < 0;
        return fits < 0;
    }
    at = llm_data_put(f, tokens);
    if (at < 0 || !llm_data_sequence(f, f->data->documents, at, tokens->count)) return 0;
    f->data->documents++;
    return 1;
}

/* Appends a preference, its chosen and rejected tokens, or counts it as dropped. Returns 0 after an
 * error. */
LLM_DATA_API int llm_data_preference(llm_data_file *f, llm_data_tokens pair[2]) {
    llm_data *d = f->data;
    const int chosen = llm_data_fit(f, &pair[0]), rejected = chosen ? llm_data_fit(f, &pair[1]) : 0;
    if (!chosen || !rejected) return 0;
    if (chosen < 0 || rejected < 0) {
        d->dropped++;
        return 1;
    }
    for (int k = 0; k < 2; k++) {
        const int64_t at = llm_data_put(f, &pair[k]);
        if (at < 0 || !llm_data_sequence(f, 2 * d->documents + k, at, pair[k].count)) return 0;
    }
    d->documents++;
    return 1;
}

#endif
