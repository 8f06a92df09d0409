/* data.h - reads texts and JSON lines that a model learns from, and makes batches of tokens
 *
 * Before the ranks start:
 *
 *     llm_data_desc desc = {.path = "chats.jsonl", .codec = &codec, .format = &format,
 *                           .length = 1024, .held_every = 10};
 *     llm_data data;
 *     if (!llm_data_open(&data, &desc)) puts(data.error);
 *
 * On each rank:
 *
 *     llm_reader reader;
 *     llm_batch batch = {0};
 *     llm_batch_of which = {.rows = 4};
 *     llm_reader_open(&reader, &data, ctx);
 *     for (; which.step < steps && llm_data_batch(&reader, &which, &batch, NULL); which.step++) ...
 *     llm_batch_free(&batch);
 *     llm_reader_close(&reader);
 *
 * After they have ended: llm_data_close(&data).
 *
 * A file whose name ends in .jsonl, .ndjson or .json has one JSON object on each line, in one of
 * the forms of TRL; other keys of an object are ignored. A text is a string, and a conversation
 * a list [{"role": "user", "content": "..."}, ...], which the chat template renders.
 *
 *     {"text": text}                                         all tokens have a loss
 *     {"messages": conversation}                             the assistant's answers have a loss
 *     {"prompt": text, "completion": text}                   the completion has a loss
 *     {"prompt": conversation, "completion": conversation}   the completion has a loss
 *     {"prompt": ..., "chosen": ..., "rejected": ...}        a preference: texts or conversations
 *     {"chosen": ..., "rejected": ...}                       what both begin with is the prompt
 *
 * Tokens and losses are those of TRL 1.16. Texts that are no conversations get the end-of-text
 * token at their end, unless they have it. Prompt and completion are tokenized as one text; the
 * completion begins at the first token that differs from those of the prompt alone. An answer
 * includes what the template writes after it, so that the model learns to stop.
 *
 * Any other file is one text, cut into rows of `length` tokens.
 *
 * Include tshard.h first, and link with it; needs cJSON and PCRE2. */
#ifndef LLM_DATA_H
#define LLM_DATA_H

#include "data_json.h"
#include "data_rows.h"

#include <ctype.h>

/* A batch of tokens: arrays of shape (rows, length). All zeros: an empty one. */
typedef struct llm_batch {
    int64_t rows, length;
    int32_t *ids;       /* ids of the tokens that the model reads */
    int32_t *targets;   /* the token after each token; -100: it has no loss, or is padding */
    int32_t *segments;  /* index of each token's sequence among those of its row; -1: padding */
    int32_t *places;    /* position of each token in its sequence */
    int32_t *documents; /* index of each token's document in the data; -1: padding */
    int64_t answers;    /* number of targets other than -100 */
} llm_batch;

/* Which rows a batch takes: those of a step are split among the replicas of data parallelism, and
 * those of a replica into micro-batches. The same seed and step give the same rows, however they
 * are split. */
typedef struct llm_batch_of {
    int64_t step;              /* step of training, from 0 on */
    int64_t rows;              /* number of rows of this batch */
    int64_t micro, micros;     /* micro-batch `micro` of `micros`; 0, 0: there is one */
    int64_t replica, replicas; /* replica `replica` of `replicas`; 0, 0: there is one */
} llm_batch_of;

/* The state of a rank that makes batches of the documents. */
typedef struct llm_reader {
    const llm_data *data;
    tsh_ctx *ctx;
    llm_rows train, held; /* train: rows of the current epoch; held: of the held-out documents */
} llm_reader;

/* -- opening ------------------------------------------------------------------------------ */

/* Returns 1 if a file has lines of JSON, by the end of its name; 0: it is one text. */
LLM_DATA_API int llm_data_is_json(const char *path) {
    static const char *const ends[] = {".jsonl", ".ndjson", ".json"};
    const size_t n = strlen(path);
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        size_t k = 0, m = strlen(ends[i]);
        while (k < m && k < n && tolower((unsigned char)path[n - 1 - k]) == ends[i][m - 1 - k]) k++;
        if (k == m) return 1;
    }
    return 0;
}

/* Cuts tokens [from, to) of a text into sequences of a row each. The last token of a sequence is a
 * target only; the next sequence begins with it. Returns 0 after an error. */
static int llm_data_cut(llm_data_file *f, int64_t from, int64_t to) {
    const int64_t length = f->data->desc.length;
    for (int64_t at = from; at + 1 < to; at += length) {
        const int64_t left = to - at, count = left < length + 1 ? left : length + 1;
        if (!llm_data_sequence(f, f->data->documents, at, count)) return 0;
        f->data->documents++;
    }
    return 1;
}

/* Reads a file that is one text. every: as desc.held_every. Sets *begin to the index of the first
 * held-out document. Returns 0 after an error. */
static int llm_data_plain(llm_data_file *f, int64_t every, int64_t *begin) {
    llm_data *d = f->data;
    llm_data_tokens tokens = {NULL, 0, 0};
    const int64_t from = d->tokens;
    int64_t ends;
    size_t length = 0;
    const char *text = llm_data_whole(f, &length);
    int ok = text != NULL;
    if (d->documents > 0 && d->pairs)
        ok = ok && llm_data_wrong(f, "this is a text, and %.300s has preferences", d->desc.path);
    ok = ok && llm_data_encode(f, text, length, 1, &tokens) && llm_data_put(f, &tokens) >= 0;
    free(tokens.ids);
    ends = d->tokens - (every > 0 ? (d->tokens - from) / every : 0);
    ok = ok && llm_data_cut(f, from, ends);
    *begin = d->documents;
    return ok && llm_data_cut(f, ends, d->tokens);
}

/* Reads a file into `part`, but the last 1/every of its documents into `held` (desc.held_every);
 * every 0: all into `part`. Returns 0 after an error. */
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
    if (llm_data_is_json(path)) {
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

/* -- what a program calls ------------------------------------------------------------------ */

/* Reads desc->path and desc->held_path. Returns 0: data->error says why, with file and line. Call
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
    if (!llm_data_read(data, desc->path, desc->held_path ? 0 : desc->held_every, &data->train,
                       &data->held) ||
        (desc->held_path && !llm_data_read(data, desc->held_path, 0, &data->held, NULL)))
        return 0;
    /* saves memory: a row longer than all tokens together would only have more padding */
    if (data->desc.length > data->tokens) data->desc.length = data->tokens;
    return llm_data_count_part(data, &data->train) && llm_data_count_part(data, &data->held);
}

LLM_DATA_API void llm_data_close(llm_data *data) {
    free(data->ids);
    free(data->sequences);
    memset(data, 0, sizeof *data);
}

/* Initializes a reader, which makes the batches of one rank. Close it before the data. ctx: the
 * rank's; its seed orders the documents if desc.seed is 0; NULL: they stay in the file's order. */
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

/* Sets the batch to `rows` rows of `length` padding tokens. Returns 0: not enough memory. */
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

/* Writes a sequence to the batch's arrays, from index `at` on. Returns the index after its end. */
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

/* Writes the documents in row `row` of the part to row `to` of the batch. Of preferences, `batch`
 * gets the chosen answers, and `rejected` the rejected ones in the same row. */
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

/* Returns the index of the batch's first row among those of all steps; -1: a number of `of` is out
 * of range. */
static int64_t llm_batch_first(const llm_batch_of *of) {
    const int64_t micros = of->micros > 0 ? of->micros : 1;
    const int64_t replicas = of->replicas > 0 ? of->replicas : 1;
    const int64_t most = INT32_MAX; /* limit of steps, and of a step's rows: no product overflows */
    if (of->step < 0 || of->step > most || of->rows < 1 || of->micro < 0 || of->micro >= micros ||
        of->replica < 0 || of->replica >= replicas || micros > most / replicas ||
        of->rows > most / (replicas * micros))
        return -1;
    return ((of->step * replicas + of->replica) * micros + of->micro) * of->rows;
}

/* Makes a batch of the documents to learn from. Epochs follow each other without a gap, so a batch
 * may have the end of one and the beginning of the next; each has every document once, in an order
 * of its own. Preferences: `batch` has the chosen answers, and `rejected` the rejected ones of the
 * same documents in the same rows and segments; otherwise `rejected` may be NULL. Returns 0: not
 * enough memory, a number of `of` is out of range, or the ctx has an error. */
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

/* Makes a batch of the held-out documents, in the order of the file. Rows after the last one are
 * padding, so that all replicas can make the same number of batches (llm_data_held_steps).
 * Otherwise as llm_data_batch. */
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

/* Returns how many steps it takes to go through all held-out documents, if the replicas and
 * micro-batches of a step have `rows` rows together. */
LLM_DATA_API int64_t llm_data_held_steps(const llm_data *data, int64_t rows) {
    return rows > 0 ? (data->held.rows + rows - 1) / rows : 0;
}

#endif
