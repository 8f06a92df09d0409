/* data.h - reads texts and JSON lines that a model learns from, and makes batches of tokens
 *
 *     llm_data_desc desc = {.path = "chats.jsonl", .codec = &codec, .format = &format,
 *                           .length = 1024, .held_every = 10};
 *     llm_data data;
 *     if (!llm_data_open(&data, &desc)) puts(data.error);         once, before the ranks start
 *
 *     llm_reader reader;                                          each rank has its own
 *     llm_batch batch = {0};
 *     llm_batch_of which = {.step = 0, .rows = 4};
 *     llm_reader_open(&reader, &data, ctx);
 *     while (llm_data_batch(&reader, &which, &batch, NULL)) ...   which.step++
 *     llm_batch_free(&batch);
 *     llm_reader_close(&reader);
 *     llm_data_close(&data);
 *
 * A file whose name ends in .jsonl, .ndjson or .json has one JSON object on each line, in one of
 * the forms of TRL; other keys of an object are passed over. A text is a string, and a conversation
 * a list [{"role": "user", "content": "..."}, ...], which the chat template renders.
 *
 *     {"text": text}                                                        all tokens have a loss
 *     {"messages": conversation}                                            the assistant's answers
 *     {"prompt": text, "completion": text}                                  the completion
 *     {"prompt": conversation, "completion": conversation}                  the completion
 *     {"prompt": ..., "chosen": ..., "rejected": ...}   a preference: texts or conversations
 *     {"chosen": ..., "rejected": ...}                  what both begin with is the prompt
 *
 * Tokens and losses are those of TRL 1.16: {"text"}, completions, chosen and rejected texts that
 * are no conversations get the end-of-text token, unless they end with it; a completion begins
 * where the tokens of prompt and completion, joined, differ from those of the prompt alone; an
 * answer includes what the template writes after it, so that the model learns to stop.
 *
 * Any other file is one text, cut into rows of `length` tokens.
 *
 * Include tshard.h first, and link with it; needs cJSON and PCRE2. */
#ifndef LLM_DATA_H
#define LLM_DATA_H

#include "chat.h"
#include "files.h"
#include "json.h"
#include "quote.h"
#include "text.h"

#include <stdarg.h>

#if defined(__GNUC__)
#define LLM_DATA_API __attribute__((unused)) static
#else
#define LLM_DATA_API static
#endif

/* What is read, and how. 0 is the default of every field after `length`. */
typedef struct llm_data_desc {
    const char *path;    /* file to learn from */
    text_codec *codec;   /* tokenizer; used by llm_data_open only */
    int64_t length;      /* tokens in a row of a batch: the longest context that is learnt */
    chat_format *format; /* template of conversations; NULL: they are refused */
    const char *eos;     /* end-of-text token, as text; NULL: that of `format`; "": none is added */
    const char *held_path; /* file of held-out documents; NULL: see held_every */
    int64_t held_every;    /* N: the last 1 in N documents, or tokens of a text, are held out */
    uint64_t seed;         /* of the order of the documents; 0: the ctx's seed */
    int all;               /* 1: prompts have a loss, too; not those of preferences */
    int unpacked;          /* 1: a row has one sequence; 0: as many as there is room for */
    int truncate;          /* 1: a sequence that is too long is cut; 0: it is an error */
    int32_t padding;       /* token at places of a row that are left over */
} llm_data_desc;

/* A sequence of tokens: a document, one answer of a preference, or a row of a text. The model reads
 * all of its tokens but the last, which is a target only. */
typedef struct llm_sequence {
    int64_t at;      /* index of its first token in llm_data.ids */
    int32_t inputs;  /* number of tokens that the model reads */
    int32_t answers; /* number of targets with a loss */
} llm_sequence;

/* The documents to learn from, or the held-out ones. */
typedef struct llm_data_part {
    int64_t first, count;    /* documents [first, first + count) of llm_data */
    int64_t rows;            /* rows that they fill */
    int64_t inputs, answers; /* tokens that a model reads; targets with a loss */
} llm_data_part;

/* All that was read. Nothing changes it after llm_data_open: ranks that are threads share one. */
typedef struct llm_data {
    llm_data_desc desc;
    llm_data_part train, held;
    int pairs;    /* 1: documents are preferences: sequence 2 i is the chosen one of document i, and
                   * sequence 2 i + 1 the rejected one; 0: sequence i is document i */
    int32_t *ids; /* tokens of all sequences; ~token: it has no loss */
    llm_sequence *sequences;
    int64_t tokens, documents; /* number of ids; of documents */
    int64_t dropped;  /* documents that were left out: they have no target with a loss, or, with
                       * desc.truncate, none within the context */
    int64_t ids_room; /* capacity of `ids`; of `sequences` */
    int64_t room;
    char error[1024];
} llm_data;

/* A batch: arrays of rows * length, row by row. All zeros: an empty one. */
typedef struct llm_batch {
    int64_t rows, length;
    int32_t *ids, *targets; /* the token; the one that follows it, -100: it has no loss (no answer,
                             * padding) */
    int32_t *segments; /* which of its row's sequences a token belongs to, from 0 on; -1: padding */
    int32_t *places;   /* the token's position in its own sequence */
    int32_t *documents; /* the document that the token is of; -1: padding */
    int64_t answers;    /* targets other than -100 */
} llm_batch;

/* Which rows a batch takes: those of a step are split among the replicas of data parallelism, and
 * those of a replica into micro-batches. The same seed and step give the same rows, however they
 * are split. */
typedef struct llm_batch_of {
    int64_t step;              /* from 0 on */
    int64_t rows;              /* of this batch */
    int64_t micro, micros;     /* micro-batch `micro` of `micros`; 0, 0: there is one */
    int64_t replica, replicas; /* the replica `replica` of `replicas`; 0, 0: there is one */
} llm_batch_of;

/* Which documents stand in which row: lists, from the last one in a row to the first. */
typedef struct llm_rows {
    int64_t count, epoch;   /* number of rows; the epoch they were made for, -1: none */
    int64_t *last, *before; /* last[row], before[document]: a document of the part, -1: none */
} llm_rows;

/* Makes the batches of one rank. */
typedef struct llm_reader {
    const llm_data *data;
    tsh_ctx *ctx;
    llm_rows train, held;
} llm_reader;

/* -- reading a file line by line ----------------------------------------------- */

/* A file that is being read, and what is made of its lines. */
typedef struct llm_data_file {
    llm_data *data;
    const char *path;
    FILE *file;
    int64_t line;            /* number of the line that was read last, from 1 on; 0: none */
    char *text;              /* what was read of the file; the rest of it is [begin, end) */
    size_t begin, end, room; /* room: bytes that `text` has */
    int ended;               /* 1: all of the file was read */
    chat_message *messages;  /* a conversation; their texts belong to the line's JSON */
    chat_span *spans;        /* as many, see chat_render_answers */
    size_t count, most;      /* number of messages; how many there is room for */
} llm_data_file;

/* Tokens of a document. prompt: how many of them are the prompt's. */
typedef struct llm_data_tokens {
    int32_t *ids;
    int64_t count, prompt;
} llm_data_tokens;

/* Sets the error: a sentence, after the file and the line. Returns 0. */
TSH_PRINTF(2, 3)
static int llm_data_wrong(llm_data_file *f, const char *format, ...) {
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

/* Reads more of the file, after the bytes [begin, end), which move to the front of the buffer. */
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

/* Returns the next line, *length bytes and a zero byte; NULL: there is none, or an error. */
static char *llm_data_line(llm_data_file *f, size_t *length) {
    char *newline = NULL, *line;
    while (!f->text || !(newline = (char *)memchr(f->text + f->begin, '\n', f->end - f->begin)))
        if (f->ended || !llm_data_more(f)) break;
    if (f->data->error[0] || (!newline && f->begin == f->end)) return NULL;
    line = f->text + f->begin;
    *length = newline ? (size_t)(newline - line) : f->end - f->begin;
    line[*length] = 0; /* the buffer has room for it: llm_data_more leaves a byte */
    f->begin += *length + (newline != NULL);
    f->line++;
    return line;
}

/* Returns how many bytes a byte-order mark at the beginning of a file has; 0: there is none. */
static size_t llm_data_mark(const char *text, size_t length) {
    return length >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0 ? 3 : 0;
}

/* -- from texts to sequences ---------------------------------------------------- */

/* Makes room for one more of n things. Returns 0: not enough memory. */
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
 * after an error; else ids is to be passed to free(). */
static int llm_data_encode(llm_data_file *f, const char *text, size_t length, int special,
                           llm_data_tokens *tokens) {
    text_codec *codec = f->data->desc.codec;
    tokens->count = text_encode(codec, text, length, special, &tokens->ids);
    tokens->prompt = 0;
    if (tokens->count >= 0) return 1;
    tokens->ids = NULL;
    tokens->count = 0;
    return llm_data_wrong(f, "%s", codec->error);
}

/* Returns how many of the tokens at the beginning are also those of the first `length` bytes of the
 * text alone; -1: an error. */
static int64_t llm_data_shared(llm_data_file *f, const llm_data_tokens *tokens, const char *text,
                               size_t length, int special) {
    llm_data_tokens alone;
    int64_t same = 0;
    if (!llm_data_encode(f, text, length, special, &alone)) return -1;
    while (same < alone.count && same < tokens->count && alone.ids[same] == tokens->ids[same])
        same++;
    free(alone.ids);
    return same;
}

/* Turns tokens [from, to) into such without a loss, or back. */
static void llm_data_turn(llm_data_tokens *tokens, int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++) tokens->ids[i] = ~tokens->ids[i];
}

/* Cuts off the tokens after the last one with a loss, and those beyond the context. Returns 1; 0
 * after an error; -1: no target with a loss is left. */
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

/* Makes sequence `index` of `count` tokens that stand in data->ids from index `at` on. */
static int llm_data_sequence(llm_data_file *f, int64_t index, int64_t at, int64_t count) {
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
static int64_t llm_data_put(llm_data_file *f, const llm_data_tokens *tokens) {
    llm_data *d = f->data;
    const int64_t at = d->tokens;
    void *ids = d->ids;
    if (!llm_data_grow(f, &ids, &d->ids_room, at + tokens->count, sizeof *d->ids)) return -1;
    d->ids = (int32_t *)ids;
    if (tokens->count > 0) memcpy(d->ids + at, tokens->ids, (size_t)tokens->count * sizeof *d->ids);
    d->tokens += tokens->count;
    return at;
}

/* Appends a document of one sequence. Returns 0 after an error. */
static int llm_data_document(llm_data_file *f, llm_data_tokens *tokens) {
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

/* Appends a preference. Returns 0 after an error. */
static int llm_data_preference(llm_data_file *f, llm_data_tokens pair[2]) {
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

/* -- texts that are no conversations --------------------------------------------- */

/* Returns the length of the end-of-text token that is to be appended to a text; 0: none. */
static size_t llm_data_eos(const llm_data *d, const char *text, const char **eos) {
    const size_t length = strlen(text);
    *eos = d->desc.eos ? d->desc.eos : d->desc.format ? d->desc.format->eos : NULL;
    const size_t n = *eos ? strlen(*eos) : 0;
    return n > 0 && (n > length || strcmp(text + length - n, *eos) != 0) ? n : 0;
}

/* Tokenizes prompt and answer, joined, with the end-of-text token after them. prompt: its first n
 * bytes, of which the tokens at the beginning are the prompt's. */
static int llm_data_join(llm_data_file *f, const char *prompt, size_t n, const char *answer,
                         llm_data_tokens *tokens) {
    const char *eos = NULL;
    const size_t more = strlen(answer), ends = llm_data_eos(f->data, answer, &eos);
    char *text = (char *)malloc(n + more + ends + 1);
    int ok;
    if (!text) return llm_data_wrong(f, "not enough memory");
    memcpy(text, prompt, n);
    memcpy(text + n, answer, more);
    if (ends > 0) memcpy(text + n + more, eos, ends);
    ok = llm_data_encode(f, text, n + more + ends, 1, tokens);
    if (ok) tokens->prompt = llm_data_shared(f, tokens, text, n, 1);
    free(text);
    return ok && tokens->prompt >= 0;
}

/* {"text": ...} */
static int llm_data_text(llm_data_file *f, const cJSON *item) {
    const char *text = cJSON_GetStringValue(item);
    llm_data_tokens tokens = {NULL, 0, 0};
    int ok;
    if (!text) return llm_data_wrong(f, "\"text\" is no string");
    if (!*text) return llm_data_wrong(f, "\"text\" is empty");
    ok = llm_data_join(f, "", 0, text, &tokens) && llm_data_document(f, &tokens);
    free(tokens.ids);
    return ok;
}

/* -- conversations ------------------------------------------------------------------ */

/* Appends a message to the conversation. key: the key of its list, of which it has index i. */
static int llm_data_message(llm_data_file *f, const char *key, int i, const cJSON *item) {
    static const char *const roles[] = {"system", "user", "assistant"};
    const char *role = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(item, "role"));
    const char *text = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(item, "content"));
    int which = 0;
    if (!role || !text)
        return llm_data_wrong(f, "message %d of \"%s\" has no \"%s\" that is a string", i + 1, key,
                              role ? "content" : "role");
    while (which < 3 && strcmp(role, roles[which]) != 0) which++;
    if (which == 3)
        return llm_data_wrong(f,
                              "message %d of \"%s\" has the role \"%.40s\", and the template %s "
                              "knows system, user and assistant",
                              i + 1, key, role, f->data->desc.format->style->name);
    if (f->count == f->most) {
        const size_t most = 2 * f->most + 16;
        chat_message *messages = (chat_message *)realloc(f->messages, most * sizeof *messages);
        chat_span *spans = (chat_span *)realloc(f->spans, most * sizeof *spans);
        if (messages) f->messages = messages;
        if (spans) f->spans = spans;
        if (!messages || !spans) return llm_data_wrong(f, "not enough memory");
        f->most = most;
    }
    f->messages[f->count].role = (chat_role)which;
    f->messages[f->count++].text = text;
    return 1;
}

/* Appends a list of messages to the conversation. */
static int llm_data_messages(llm_data_file *f, const char *key, const cJSON *list) {
    const cJSON *item;
    int i = 0;
    const chat_format *format = f->data->desc.format;
    if (!cJSON_IsArray(list)) return llm_data_wrong(f, "\"%s\" is no list of messages", key);
    if (!format || !format->style)
        return llm_data_wrong(f, "\"%s\" is a conversation, and %s", key,
                              format && format->error[0] ? format->error
                                                         : "there is no chat template");
    if (!list->child) return llm_data_wrong(f, "\"%s\" has no message", key);
    cJSON_ArrayForEach(item, list) {
        if (!llm_data_message(f, key, i++, item)) return 0;
    }
    return 1;
}

/* Checks the order of the messages, and that no answer among messages[first] and those after it is
 * empty. */
static int llm_data_check(llm_data_file *f, size_t first) {
    const chat_style *style = f->data->desc.format->style;
    const size_t system = f->messages[0].role == CHAT_SYSTEM;
    /* the templates that refuse a conversation in which the roles do not take turns */
    const int turns = style->place != CHAT_OWN || !*style->prompt;
    for (size_t i = system; i < f->count; i++) {
        const chat_message *m = &f->messages[i];
        const char *text = m->text;
        if (m->role == CHAT_SYSTEM)
            return llm_data_wrong(f, "message %zu is a system message, which only the first may be",
                                  i + 1);
        if (turns && m->role != ((i - system) % 2 ? CHAT_ASSISTANT : CHAT_USER))
            return llm_data_wrong(f,
                                  "message %zu is one of the %s; with the template %s user and "
                                  "assistant take turns, and the user begins",
                                  i + 1, m->role == CHAT_USER ? "user" : "assistant", style->name);
        if (m->role == CHAT_ASSISTANT && i >= first && chat_trim(&text, strlen(text)) == 0)
            return llm_data_wrong(f, "message %zu, an answer, is empty", i + 1);
    }
    return 1;
}

/* Renders the conversation, and tokenizes it. The answers are those among messages[first] and the
 * ones after it; spans then have their tokens. tokens->prompt: the tokens before the first of
 * them. */
static int llm_data_render(llm_data_file *f, size_t first, llm_data_tokens *tokens) {
    chat_format *format = f->data->desc.format;
    char *text = chat_render_answers(format, f->messages, f->count, first, f->spans);
    size_t length, i;
    int ok;
    if (!text) return llm_data_wrong(f, "%s", format->error);
    length = strlen(text);
    ok = llm_data_encode(f, text, length, 0, tokens);
    tokens->prompt = -1;
    for (i = first; ok && i < f->count; i++) {
        chat_span *span = &f->spans[i];
        int64_t begin, end = tokens->count;
        if (f->messages[i].role != CHAT_ASSISTANT) continue;
        begin = llm_data_shared(f, tokens, text, span->begin, 0);
        if (span->end < length) end = llm_data_shared(f, tokens, text, span->end, 0);
        ok = begin >= 0 && end >= 0;
        if (!ok) break;
        span->begin = (size_t)begin;
        span->end = (size_t)(end > begin ? end : begin);
        if (tokens->prompt < 0) tokens->prompt = begin;
    }
    free(text);
    return ok;
}

/* {"messages": [...]} */
static int llm_data_chat(llm_data_file *f, const cJSON *list) {
    llm_data_tokens tokens = {NULL, 0, 0};
    size_t first = 0;
    int ok;
    f->count = 0;
    if (!llm_data_messages(f, "messages", list)) return 0;
    while (first < f->count && f->messages[first].role != CHAT_ASSISTANT) first++;
    if (first == f->count)
        return llm_data_wrong(f, "\"messages\" has no answer: no message has the role assistant");
    if (!llm_data_check(f, first)) return 0;
    /* With .all only the last answer shows thoughts, if the template has any, as in TRL. */
    for (size_t i = first; f->data->desc.all && i < f->count; i++)
        if (f->messages[i].role == CHAT_ASSISTANT) first = i;
    ok = llm_data_render(f, first, &tokens);
    if (ok && !f->data->desc.all) {
        llm_data_turn(&tokens, 0, tokens.count);
        for (size_t i = first; i < f->count; i++)
            if (f->messages[i].role == CHAT_ASSISTANT)
                llm_data_turn(&tokens, (int64_t)f->spans[i].begin, (int64_t)f->spans[i].end);
    }
    ok = ok && llm_data_document(f, &tokens);
    free(tokens.ids);
    return ok;
}

/* -- prompts with an answer, and preferences ------------------------------------------ */

/* Tokenizes an answer after its prompt: two texts, or two conversations. prompt NULL: the answer
 * begins with the prompt, `shared` bytes or messages. key: of the answer. */
static int llm_data_answer(llm_data_file *f, const cJSON *prompt, const char *key,
                           const cJSON *answer, size_t shared, llm_data_tokens *tokens) {
    const char *text = cJSON_GetStringValue(answer);
    const char *before = prompt ? cJSON_GetStringValue(prompt) : text;
    size_t first = shared;
    if (text && before) {
        const size_t n = prompt ? strlen(before) : shared;
        const char *rest = prompt ? text : text + shared;
        if (!*rest) return llm_data_wrong(f, "\"%s\" is empty", key);
        return llm_data_join(f, before, n, rest, tokens);
    }
    if (text || before)
        return llm_data_wrong(f,
                              "\"prompt\" and \"%s\" are to be two strings, or two lists of "
                              "messages",
                              key);
    f->count = 0;
    if (prompt) {
        if (!llm_data_messages(f, "prompt", prompt)) return 0;
        first = f->count;
    }
    if (!llm_data_messages(f, key, answer)) return 0;
    if (first == f->count || f->messages[first].role != CHAT_ASSISTANT)
        return llm_data_wrong(f, "\"%s\" does not go on with a message of the assistant", key);
    if (first == 0) return llm_data_wrong(f, "there is no prompt before \"%s\"", key);
    return llm_data_check(f, first) && llm_data_render(f, first, tokens);
}

/* {"prompt": ..., "completion": ...} */
static int llm_data_completion(llm_data_file *f, const cJSON *prompt, const cJSON *completion) {
    llm_data_tokens tokens = {NULL, 0, 0};
    int ok = llm_data_answer(f, prompt, "completion", completion, 0, &tokens);
    if (ok && !f->data->desc.all) llm_data_turn(&tokens, 0, tokens.prompt);
    ok = ok && llm_data_document(f, &tokens);
    free(tokens.ids);
    return ok;
}

/* Returns how many bytes or messages both answers of a preference begin with, at most all but the
 * last character or message of the shorter one, so that none of them is empty. A space before the
 * place where texts differ counts as the answers', as in TRL. */
static size_t llm_data_common(const cJSON *chosen, const cJSON *rejected) {
    const char *a = cJSON_GetStringValue(chosen), *b = cJSON_GetStringValue(rejected);
    size_t n = 0;
    int differ;
    if (!a || !b) {
        const cJSON *x = chosen->child, *y = rejected->child;
        for (; x && y && x->next && y->next && cJSON_Compare(x, y, 1); x = x->next, y = y->next)
            n++;
        return n;
    }
    while (a[n] && a[n] == b[n]) n++;
    differ = a[n] && b[n];
    if (n > 0 && !differ) n--;
    while (n > 0 && ((unsigned char)a[n] & 0xC0) == 0x80) n--; /* to where the character begins */
    return n > 0 && differ && a[n - 1] == ' ' ? n - 1 : n;
}

/* {"prompt": ..., "chosen": ..., "rejected": ...}; prompt NULL, or a text before conversations: the
 * prompt is what both begin with. */
static int llm_data_pair(llm_data_file *f, const cJSON *prompt, const cJSON *chosen,
                         const cJSON *rejected) {
    llm_data_tokens pair[2] = {{NULL, 0, 0}, {NULL, 0, 0}};
    size_t shared = 0;
    int ok;
    if (prompt && cJSON_IsString(prompt) && cJSON_IsArray(chosen) && cJSON_IsArray(rejected))
        prompt = NULL;
    if (cJSON_IsString(chosen) != cJSON_IsString(rejected))
        return llm_data_wrong(f, "\"chosen\" and \"rejected\" are to be two strings, or two lists "
                                 "of messages");
    if (!prompt) shared = llm_data_common(chosen, rejected);
    ok = llm_data_answer(f, prompt, "chosen", chosen, shared, &pair[0]) &&
         llm_data_answer(f, prompt, "rejected", rejected, shared, &pair[1]);
    if (ok) {
        const int64_t same = pair[0].prompt < pair[1].prompt ? pair[0].prompt : pair[1].prompt;
        for (int k = 0; k < 2; k++) llm_data_turn(&pair[k], 0, same);
        ok = llm_data_preference(f, pair);
    }
    free(pair[0].ids);
    free(pair[1].ids);
    return ok;
}

/* -- lines of JSON ----------------------------------------------------------------------- */

/* Adds the document of a line. */
static int llm_data_object(llm_data_file *f, const cJSON *json) {
    const cJSON *prompt = cJSON_GetObjectItemCaseSensitive(json, "prompt");
    const cJSON *chosen = cJSON_GetObjectItemCaseSensitive(json, "chosen");
    const cJSON *rejected = cJSON_GetObjectItemCaseSensitive(json, "rejected");
    const cJSON *messages = cJSON_GetObjectItemCaseSensitive(json, "messages");
    const cJSON *completion = cJSON_GetObjectItemCaseSensitive(json, "completion");
    const cJSON *text = cJSON_GetObjectItemCaseSensitive(json, "text");
    const int pair = chosen && rejected;
    const char *twice = cJSON_IsObject(json) ? llm_json_twice(json, 0) : NULL;
    if (!cJSON_IsObject(json))
        return llm_data_wrong(f, "this line is no object; each line is one {...}");
    if (twice) return llm_data_wrong(f, "the key \"%.100s\" occurs twice", twice);
    if (f->data->documents + f->data->dropped == 0) f->data->pairs = pair;
    if (pair != f->data->pairs)
        return llm_data_wrong(f,
                              "this line %s a preference, and the lines before it %s; keep them "
                              "in files of their own",
                              pair ? "is" : "is not", pair ? "are not" : "are");
    if (pair) return llm_data_pair(f, prompt, chosen, rejected);
    if (messages) return llm_data_chat(f, messages);
    if (prompt && completion) return llm_data_completion(f, prompt, completion);
    if (text) return llm_data_text(f, text);
    return llm_data_wrong(f,
                          "the object has none of these forms: {\"text\"}, {\"messages\"}, "
                          "{\"prompt\", \"completion\"}, {\"prompt\", \"chosen\", \"rejected\"}, "
                          "{\"chosen\", \"rejected\"}");
}

/* Returns 1 if a string of the JSON text has the escape \u0000, at which a C string would end. */
static int llm_data_zero(const char *line) {
    for (const char *at = line; (at = strchr(at, '\\')) != NULL; at += at[1] ? 2 : 1)
        if (strncmp(at, "\\u0000", 6) == 0) return 1;
    return 0;
}

/* Checks a line of JSON, `length` bytes. */
static int llm_data_line_check(llm_data_file *f, const char *line, size_t length) {
    const size_t valid = llm_valid_prefix(line, length), ends = strlen(line);
    if (ends < length) return llm_data_wrong(f, "byte %zu of the line is 0", ends + 1);
    if (valid < length)
        return llm_data_wrong(f,
                              "byte %zu of the line is not UTF-8; convert the file, for example "
                              "by iconv -t UTF-8",
                              valid + 1);
    if (llm_data_zero(line)) return llm_data_wrong(f, "a string has a \\u0000, which is no text");
    return 1;
}

/* Parses a line of JSON. Returns NULL after an error. */
static cJSON *llm_data_parse(llm_data_file *f, const char *line) {
    char why[256] = "", *sentence;
    cJSON *json;
    errno = 0; /* to tell lack of memory (malloc sets ENOMEM) from malformed JSON */
    json = cJSON_ParseWithOpts(line, NULL, 1);
    if (json) return json;
    if (errno == ENOMEM) {
        (void)llm_data_wrong(f, "not enough memory");
        return NULL;
    }
    (void)llm_json_explain(line, why, sizeof why);
    sentence = strstr(why, "column"); /* after "line 1, ", as the text is one line */
    (void)llm_data_wrong(f, "this line is not JSON%s%s", sentence ? ": " : "",
                         sentence ? sentence : "");
    return NULL;
}

/* Reads the lines of a file of JSON lines. */
static int llm_data_lines(llm_data_file *f) {
    size_t length;
    char *line;
    int any = 0;
    while ((line = llm_data_line(f, &length)) != NULL) {
        const size_t mark = f->line == 1 ? llm_data_mark(line, length) : 0;
        cJSON *json;
        int ok;
        line += mark;
        length -= mark;
        if (strspn(line, " \t\r") == length) continue;
        any = 1;
        if (!llm_data_line_check(f, line, length)) return 0;
        json = llm_data_parse(f, line);
        ok = json && llm_data_object(f, json);
        cJSON_Delete(json);
        if (!ok) return 0;
    }
    f->line = 0;
    if (f->data->error[0]) return 0;
    return any || llm_data_wrong(f, "the file is empty");
}

/* -- opening ------------------------------------------------------------------------------ */

static int llm_data_ends(const char *path, const char *end) {
    const size_t n = strlen(path), m = strlen(end);
    return n >= m && strcmp(path + n - m, end) == 0;
}

/* Cuts tokens [from, to) of a text into sequences that a row has room for. The token after the last
 * one that a row reads is its target, and the first of the next row. */
static int llm_data_cut(llm_data_file *f, int64_t from, int64_t to) {
    const int64_t length = f->data->desc.length;
    for (int64_t at = from; at + 1 < to; at += length) {
        const int64_t left = to - at, count = left < length + 1 ? left : length + 1;
        if (!llm_data_sequence(f, f->data->documents, at, count)) return 0;
        f->data->documents++;
    }
    return 1;
}

/* Reads a file that is one text. every: see held_every. *begin: the held-out documents begin with
 * this one. */
static int llm_data_plain(llm_data_file *f, int64_t every, int64_t *begin) {
    llm_data *d = f->data;
    llm_data_tokens tokens = {NULL, 0, 0};
    const int64_t from = d->tokens;
    int64_t ends;
    size_t length = 0, mark, valid;
    char *text = llm_read_all(f->file, 0, &length);
    int ok;
    if (!text) return llm_data_wrong(f, "the file cannot be read: %s", strerror(errno));
    mark = llm_data_mark(text, length);
    valid = llm_valid_prefix(text, length);
    if (valid < length) {
        f->line = 1;
        for (size_t i = 0; i < valid; i++) f->line += text[i] == '\n';
        ok = llm_data_wrong(f, "this line is not UTF-8; convert the file, for example by iconv -t "
                               "UTF-8");
    } else {
        ok = length > mark || llm_data_wrong(f, "the file is empty");
    }
    if (d->documents > 0 && d->pairs)
        ok = ok && llm_data_wrong(f, "this is a text, and %.300s has preferences", d->desc.path);
    ok = ok && llm_data_encode(f, text + mark, length - mark, 1, &tokens) &&
         llm_data_put(f, &tokens) >= 0;
    free(text);
    free(tokens.ids);
    ends = d->tokens - (every > 0 ? (d->tokens - from) / every : 0);
    ok = ok && llm_data_cut(f, from, ends);
    *begin = d->documents;
    return ok && llm_data_cut(f, ends, d->tokens);
}

/* Reads a file, all of it into `part`, but for 1 document in `every`, which go into `held`. */
static int llm_data_read(llm_data *d, const char *path, int64_t every, llm_data_part *part,
                         llm_data_part *held) {
    llm_data_file f;
    const int64_t first = d->documents;
    int64_t begin = 0;
    tsh_error why;
    int ok;
    memset(&f, 0, sizeof f);
    f.data = d;
    f.path = path;
    f.file = tsh_file_open(path, 0, &why);
    if (!f.file) {
        (void)snprintf(d->error, sizeof d->error, "%s", why.message);
        return 0;
    }
    if (llm_data_ends(path, ".jsonl") || llm_data_ends(path, ".ndjson") ||
        llm_data_ends(path, ".json")) {
        ok = llm_data_lines(&f);
        begin = d->documents;
        if (every > 0 && begin - first > 1)
            begin -= (begin - first) / every > 0 ? (begin - first) / every : 1;
    } else {
        ok = llm_data_plain(&f, every, &begin);
    }
    if (ok && d->documents == first && d->desc.truncate)
        ok = llm_data_wrong(&f,
                            "no answer begins within the context of %lld tokens; take a longer "
                            "one (--context N)",
                            (long long)d->desc.length);
    if (ok && d->documents == first)
        ok = llm_data_wrong(&f, "no text has two tokens, of which the second has a loss");
    if (ok && every > 0 && begin == d->documents)
        ok = llm_data_wrong(&f,
                            "1 in %lld cannot be held out of so little; give another file of "
                            "held-out text (--held-out FILE)",
                            (long long)every);
    part->first = first;
    part->count = (every > 0 ? begin : d->documents) - first;
    if (every > 0) {
        held->first = begin;
        held->count = d->documents - begin;
    }
    (void)fclose(f.file);
    free(f.text);
    free(f.messages);
    free(f.spans);
    return ok;
}

/* -- rows --------------------------------------------------------------------------------- */

/* Returns how many places of a row a document needs. */
static int64_t llm_data_size(const llm_data *d, int64_t document) {
    if (!d->pairs) return d->sequences[document].inputs;
    const int64_t chosen = d->sequences[2 * document].inputs;
    const int64_t rejected = d->sequences[2 * document + 1].inputs;
    return chosen > rejected ? chosen : rejected;
}

/* Returns the number that stands at `place` in the order of an epoch of `count`; ctx NULL: `place`
 * itself. -1: the ctx has an error. */
static int64_t llm_data_order(tsh_ctx *ctx, const llm_data *d, int64_t epoch, int64_t count,
                              int64_t place) {
    tsh_sampler sampler;
    if (!ctx) return place;
    memset(&sampler, 0, sizeof sampler);
    sampler.count = count;
    sampler.batch = sampler.mine = 1;
    sampler.seed = d->desc.seed;
    sampler.epoch = epoch;
    sampler.first = place;
    return tsh_sampler_index(ctx, &sampler, 0);
}

/* The packing while it is made: best fit decreasing, as TRL's "bfd". */
typedef struct llm_packing {
    int64_t leaves; /* a power of 2 above the number of places of a row */
    /* space[leaves + s]: s, if there is a row with s places left, else 0; space[i]: the maximum of
     * space[2 i] and space[2 i + 1] */
    int64_t *space;
    int64_t *open;           /* open[s]: a row with s places left; -1: none */
    int64_t *next;           /* next[row]: another row with as many places left; -1: none */
    int64_t *order, *starts; /* documents, the longest first; starts[s]: where those of a size go */
} llm_packing;

/* Sets or clears the leaf of rows with s places left. */
static void llm_pack_mark(llm_packing *p, int64_t s, int64_t value) {
    int64_t i = p->leaves + s;
    p->space[i] = value;
    for (i /= 2; i > 0; i /= 2)
        p->space[i] = p->space[2 * i] > p->space[2 * i + 1] ? p->space[2 * i] : p->space[2 * i + 1];
}

/* Takes a row with the fewest places left that are at least `size` (> 0). *left: its places.
 * Returns -1: there is none. */
static int64_t llm_pack_take(llm_packing *p, int64_t size, int64_t *left) {
    int64_t i = 1, row;
    if (p->space[1] < size) return -1;
    while (i < p->leaves) i = p->space[2 * i] >= size ? 2 * i : 2 * i + 1;
    *left = i - p->leaves;
    row = p->open[*left];
    p->open[*left] = p->next[row];
    if (p->open[*left] < 0) llm_pack_mark(p, *left, 0);
    return row;
}

/* Gives a row back, with `left` places. */
static void llm_pack_give(llm_packing *p, int64_t row, int64_t left) {
    p->next[row] = p->open[left];
    p->open[left] = row;
    if (left > 0) llm_pack_mark(p, left, left);
}

/* Orders the documents of the part by size, the longest first; those of one size as the epoch
 * orders them. Returns 0 if the ctx has an error. */
static int llm_pack_sort(llm_packing *p, const llm_data *d, const llm_data_part *part, tsh_ctx *ctx,
                         int64_t epoch) {
    const int64_t length = d->desc.length;
    memset(p->starts, 0, (size_t)(length + 2) * sizeof *p->starts);
    for (int64_t i = 0; i < part->count; i++)
        p->starts[length - llm_data_size(d, part->first + i) + 1]++;
    for (int64_t s = 0; s <= length; s++) p->starts[s + 1] += p->starts[s];
    for (int64_t i = 0; i < part->count; i++) {
        const int64_t u = llm_data_order(ctx, d, epoch, part->count, i);
        if (u < 0) return 0;
        p->order[p->starts[length - llm_data_size(d, part->first + u)]++] = u;
    }
    return 1;
}

/* Puts the ordered documents into rows. */
static void llm_pack_fill(llm_packing *p, const llm_data *d, const llm_data_part *part,
                          llm_rows *rows) {
    rows->count = 0;
    for (int64_t i = 0; i < part->count; i++) {
        const int64_t u = p->order[i], size = llm_data_size(d, part->first + u);
        int64_t left = d->desc.length, row = llm_pack_take(p, size, &left);
        if (row < 0) {
            row = rows->count++;
            rows->last[row] = -1;
        }
        rows->before[u] = rows->last[row];
        rows->last[row] = u;
        llm_pack_give(p, row, left - size);
    }
}

static void llm_rows_free(llm_rows *rows) {
    free(rows->last);
    free(rows->before);
    memset(rows, 0, sizeof *rows);
    rows->epoch = -1;
}

static void *llm_rows_new(int64_t count) {
    return (uint64_t)count > SIZE_MAX / sizeof(int64_t) ? NULL
                                                        : malloc((size_t)count * sizeof(int64_t));
}

/* Packs the documents of the part. Returns 0: not enough memory, or the ctx has an error. */
static int llm_data_pack(const llm_data *d, const llm_data_part *part, tsh_ctx *ctx, int64_t epoch,
                         llm_rows *rows) {
    const int64_t n = part->count, length = d->desc.length;
    llm_packing p;
    int ok;
    memset(&p, 0, sizeof p);
    for (p.leaves = 1; p.leaves <= length;) p.leaves *= 2;
    p.space = (int64_t *)llm_rows_new(2 * p.leaves);
    p.open = (int64_t *)llm_rows_new(length + 1);
    p.next = (int64_t *)llm_rows_new(n);
    p.order = (int64_t *)llm_rows_new(n);
    p.starts = (int64_t *)llm_rows_new(length + 2);
    ok = p.space && p.open && p.next && p.order && p.starts;
    if (ok) {
        memset(p.space, 0, (size_t)(2 * p.leaves) * sizeof *p.space);
        for (int64_t s = 0; s <= length; s++) p.open[s] = -1;
        ok = llm_pack_sort(&p, d, part, ctx, epoch);
    }
    if (ok) llm_pack_fill(&p, d, part, rows);
    rows->epoch = ok ? epoch : -1;
    free(p.space);
    free(p.open);
    free(p.next);
    free(p.order);
    free(p.starts);
    return ok;
}

/* Makes the rows of an epoch. Returns 0: not enough memory, or the ctx has an error. */
static int llm_data_arrange(const llm_data *d, const llm_data_part *part, tsh_ctx *ctx,
                            int64_t epoch, llm_rows *rows) {
    if (rows->epoch == epoch) return 1;
    if (!rows->last) rows->last = (int64_t *)llm_rows_new(part->count);
    if (!rows->before) rows->before = (int64_t *)llm_rows_new(part->count);
    if (!rows->last || !rows->before) return 0;
    if (!d->desc.unpacked) return llm_data_pack(d, part, ctx, epoch, rows);
    for (int64_t i = 0; i < part->count; i++) {
        rows->last[i] = i;
        rows->before[i] = -1;
    }
    rows->count = part->count;
    rows->epoch = epoch;
    return 1;
}

/* Counts what the part has. Its number of rows is that of every epoch, as it depends on the sizes
 * alone. */
static int llm_data_count_part(llm_data *d, llm_data_part *part) {
    const int64_t each = d->pairs ? 2 : 1;
    llm_rows rows;
    int ok;
    memset(&rows, 0, sizeof rows);
    rows.epoch = -1;
    for (int64_t i = each * part->first; i < each * (part->first + part->count); i++) {
        part->inputs += d->sequences[i].inputs;
        part->answers += d->sequences[i].answers;
    }
    ok = part->count == 0 || llm_data_arrange(d, part, NULL, 0, &rows);
    if (!ok) (void)snprintf(d->error, sizeof d->error, "not enough memory");
    part->rows = rows.count;
    llm_rows_free(&rows);
    return ok;
}

/* -- what a program calls ------------------------------------------------------------------ */

/* Reads the file or files. Returns 0: data->error is one sentence, with file and line. Call
 * llm_data_close in either case. */
LLM_DATA_API int llm_data_open(llm_data *data, const llm_data_desc *desc) {
    memset(data, 0, sizeof *data);
    data->desc = *desc;
    if (!desc->path || !desc->codec || desc->length < 1 || desc->length > INT32_MAX - 1 ||
        desc->held_every < 0 || desc->held_every == 1) {
        (void)snprintf(data->error, sizeof data->error,
                       "llm_data_open: .path and .codec are needed, .length is at least 1, and "
                       ".held_every is 0, or at least 2");
        return 0;
    }
    return llm_data_read(data, desc->path, desc->held_path ? 0 : desc->held_every, &data->train,
                         &data->held) &&
           (!desc->held_path || llm_data_read(data, desc->held_path, 0, &data->held, NULL)) &&
           llm_data_count_part(data, &data->train) && llm_data_count_part(data, &data->held);
}

LLM_DATA_API void llm_data_close(llm_data *data) {
    free(data->ids);
    free(data->sequences);
    memset(data, 0, sizeof *data);
}

/* Begins to make batches. The data stay open, and the same, until the reader is closed. ctx: of
 * this rank; its seed orders the documents if desc.seed is 0; NULL: they stay in the order of the
 * file. */
LLM_DATA_API void llm_reader_open(llm_reader *reader, const llm_data *data, tsh_ctx *ctx) {
    memset(reader, 0, sizeof *reader);
    reader->data = data;
    reader->ctx = ctx;
    reader->train.epoch = reader->held.epoch = -1;
}

LLM_DATA_API void llm_reader_close(llm_reader *reader) {
    llm_rows_free(&reader->train);
    llm_rows_free(&reader->held);
}

LLM_DATA_API void llm_batch_free(llm_batch *batch) {
    free(batch->ids);
    free(batch->targets);
    free(batch->segments);
    free(batch->places);
    free(batch->documents);
    memset(batch, 0, sizeof *batch);
}

/* Makes the batch one of `rows` rows of padding. Returns 0: not enough memory. */
static int llm_batch_clear(llm_batch *batch, int64_t rows, int64_t length, int32_t padding) {
    const size_t n = (size_t)(rows * length);
    if (batch->rows * batch->length != rows * length) {
        llm_batch_free(batch);
        batch->ids = (int32_t *)calloc(n, sizeof *batch->ids);
        batch->targets = (int32_t *)calloc(n, sizeof *batch->targets);
        batch->segments = (int32_t *)calloc(n, sizeof *batch->segments);
        batch->places = (int32_t *)calloc(n, sizeof *batch->places);
        batch->documents = (int32_t *)calloc(n, sizeof *batch->documents);
    }
    if (!batch->ids || !batch->targets || !batch->segments || !batch->places || !batch->documents) {
        llm_batch_free(batch);
        return 0;
    }
    batch->rows = rows;
    batch->length = length;
    batch->answers = 0;
    for (size_t i = 0; i < n; i++) {
        batch->ids[i] = padding;
        batch->targets[i] = -100;
        batch->segments[i] = batch->documents[i] = -1;
        batch->places[i] = 0;
    }
    return 1;
}

/* Appends a sequence to a row of the batch, at place `at` of the batch. Returns the place after
 * it. */
static int64_t llm_batch_add(llm_batch *batch, const llm_data *d, const llm_sequence *s, int64_t at,
                             int32_t segment, int64_t document) {
    const int32_t *ids = d->ids + s->at;
    for (int32_t i = 0; i < s->inputs; i++, at++) {
        batch->ids[at] = ids[i] < 0 ? ~ids[i] : ids[i];
        batch->targets[at] = ids[i + 1] < 0 ? -100 : ids[i + 1];
        batch->segments[at] = segment;
        batch->places[at] = i;
        batch->documents[at] = (int32_t)document;
    }
    batch->answers += s->answers;
    return at;
}

/* Writes row `row` of the part to row `to` of the batches. */
static void llm_batch_row(const llm_data *d, const llm_data_part *part, const llm_rows *rows,
                          int64_t row, int64_t to, llm_batch *batch, llm_batch *rejected) {
    int64_t at = to * d->desc.length, other = at;
    int32_t segment = 0;
    for (int64_t u = rows->last[row]; u >= 0; u = rows->before[u], segment++) {
        const int64_t document = part->first + u;
        const llm_sequence *s = &d->sequences[d->pairs ? 2 * document : document];
        at = llm_batch_add(batch, d, s, at, segment, document);
        if (d->pairs) other = llm_batch_add(rejected, d, s + 1, other, segment, document);
    }
}

/* Returns the index of the batch's first row among those of all steps; -1: the numbers are wrong. */
static int64_t llm_batch_first(const llm_batch_of *of) {
    const int64_t micros = of->micros > 0 ? of->micros : 1;
    const int64_t replicas = of->replicas > 0 ? of->replicas : 1;
    if (of->step < 0 || of->rows < 1 || of->rows > INT32_MAX || of->micro < 0 ||
        of->micro >= micros || of->replica < 0 || of->replica >= replicas)
        return -1;
    return ((of->step * replicas + of->replica) * micros + of->micro) * of->rows;
}

/* Makes a batch of the documents to learn from. All epochs, each of which has every document once,
 * in an order of its own, follow each other; the batch may be of two. Preferences: `batch` has the
 * chosen ones, and `rejected` the rejected ones of the same documents in the same rows and
 * segments; otherwise `rejected` may be NULL. Returns 0: not enough memory, the numbers of `of` are
 * out of range, or the ctx has an error. */
LLM_DATA_API int llm_data_batch(llm_reader *reader, const llm_batch_of *of, llm_batch *batch,
                                llm_batch *rejected) {
    const llm_data *d = reader->data;
    const int64_t first = llm_batch_first(of);
    if (first < 0 || d->train.rows < 1 || (d->pairs && !rejected)) return 0;
    if (!llm_batch_clear(batch, of->rows, d->desc.length, d->desc.padding) ||
        (d->pairs && !llm_batch_clear(rejected, of->rows, d->desc.length, d->desc.padding)))
        return 0;
    for (int64_t i = 0; i < of->rows; i++) {
        const int64_t epoch = (first + i) / d->train.rows, place = (first + i) % d->train.rows;
        const int64_t row = llm_data_order(reader->ctx, d, epoch, d->train.rows, place);
        if (row < 0 || !llm_data_arrange(d, &d->train, reader->ctx, epoch, &reader->train))
            return 0;
        llm_batch_row(d, &d->train, &reader->train, row, i, batch, rejected);
    }
    return 1;
}

/* Makes a batch of the held-out documents, always in the same order. Rows past the last one are
 * padding: all replicas may make equally many batches, llm_data_held_steps. Otherwise as
 * llm_data_batch. */
LLM_DATA_API int llm_data_held(llm_reader *reader, const llm_batch_of *of, llm_batch *batch,
                               llm_batch *rejected) {
    const llm_data *d = reader->data;
    const int64_t first = llm_batch_first(of);
    if (first < 0 || d->held.rows < 1 || (d->pairs && !rejected)) return 0;
    if (!llm_data_arrange(d, &d->held, NULL, 0, &reader->held) ||
        !llm_batch_clear(batch, of->rows, d->desc.length, d->desc.padding) ||
        (d->pairs && !llm_batch_clear(rejected, of->rows, d->desc.length, d->desc.padding)))
        return 0;
    for (int64_t i = 0; i < of->rows && first + i < d->held.rows; i++)
        llm_batch_row(d, &d->held, &reader->held, first + i, i, batch, rejected);
    return 1;
}

/* Returns how many steps of `rows` rows, over all replicas and micro-batches, have all held-out
 * documents. */
LLM_DATA_API int64_t llm_data_held_steps(const llm_data *data, int64_t rows) {
    return rows > 0 ? (data->held.rows + rows - 1) / rows : 0;
}

#endif
