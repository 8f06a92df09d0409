/* examples/llm/data.h: tokens and losses of documents against TRL's (golden/data/trl.json, which
 * make_data.py writes), packing into rows, batches of steps and replicas, held-out documents, and
 * the errors for files that are malformed. */
#if !defined(_POSIX_C_SOURCE)
#define _POSIX_C_SOURCE 200809L
#endif
#include "../../tshard.h"
#include "../../examples/llm/data.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include "../support/files.h"

enum { LONGEST = 4096, DOCUMENTS = 200 };

/* A tokenizer and the style of a chat template. */
typedef struct model {
    text_codec codec;
    chat_format format;
} model;

static cJSON *goldens;

static int open_goldens(void **state) {
    const char *here = __FILE__, *slash = strrchr(here, '/');
    char path[512], *text;
    size_t n;
    tsh_error why;
    (void)snprintf(path, sizeof path, "%.*sgolden/data/trl.json",
                   slash ? (int)(slash - here + 1) : 0, here);
    text = llm_read(path, 0, &n, &why);
    if (!text) return 1;
    goldens = cJSON_Parse(text);
    free(text);
    return !goldens || files_begin(state);
}

static int close_goldens(void **state) {
    cJSON_Delete(goldens);
    return files_end(state);
}

static const char *string_of(const cJSON *o, const char *key) {
    return cJSON_GetStringValue(cJSON_GetObjectItem(o, key));
}

/* Opens the tokenizer of a golden model. style NULL: the model's own. */
static void open_model(model *m, const cJSON *golden, const char *style) {
    char *json = cJSON_PrintUnformatted(cJSON_GetObjectItem(golden, "tokenizer"));
    memset(m, 0, sizeof *m);
    m->codec.tokenizer = llm_tokenizer_read(json, strlen(json), "golden", m->codec.error,
                                            sizeof m->codec.error);
    cJSON_free(json);
    if (!m->codec.tokenizer) fail_msg("%s", m->codec.error);
    if (!chat_open(&m->format, "{\"bos_token\":\"<s>\",\"eos_token\":\"</s>\"}", NULL,
                   style ? style : string_of(golden, "style")))
        fail_msg("%s", m->format.error);
}

static const cJSON *golden_model(int i) {
    return cJSON_GetArrayItem(cJSON_GetObjectItem(goldens, "models"), i);
}

static void close_model(model *m) {
    text_close(&m->codec);
    chat_close(&m->format);
}

static void write_text(const char *name, const char *text) {
    files_write(name, text, strlen(text));
}

/* Rows of `length` of the file "data.jsonl". */
static llm_data_desc describe(model *m, int64_t length) {
    llm_data_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.path = files_path("data.jsonl");
    desc.codec = &m->codec;
    desc.format = &m->format;
    desc.length = length;
    return desc;
}

static void open_data(llm_data *data, const llm_data_desc *desc) {
    if (!llm_data_open(data, desc)) fail_msg("%s", data->error);
}

/* ------------------------------------------------------------------------ tokens */

static void write_lines(const cJSON *lines) {
    const cJSON *line;
    FILE *file = fopen(files_path("data.jsonl"), "w");
    assert_non_null(file);
    cJSON_ArrayForEach(line, lines) {
        char *text = cJSON_PrintUnformatted(line);
        assert_true(fprintf(file, "%s\r\n\n", text) > 0);
        cJSON_free(text);
    }
    assert_int_equal(fclose(file), 0);
}

/* The sequence has the golden's tokens, up to the last one with a loss. */
static void expect_tokens(const llm_data *data, int64_t index, const cJSON *want, const char *name,
                          const char *form) {
    const llm_sequence *s = &data->sequences[index];
    int n = cJSON_GetArraySize(want), answers = 0;
    while (n > 0 && cJSON_GetArrayItem(want, n - 1)->valueint < 0) n--;
    if (n != s->inputs + 1)
        fail_msg("%s, %s, %d: %d tokens, not %d", name, form, (int)index, s->inputs + 1, n);
    for (int i = 0; i < n; i++) {
        const int32_t id = cJSON_GetArrayItem(want, i)->valueint;
        answers += i > 0 && id >= 0;
        if (data->ids[s->at + i] != id)
            fail_msg("%s, %s, %d: token %d is %d, not %d", name, form, (int)index, i,
                     data->ids[s->at + i], id);
    }
    assert_int_equal(s->answers, answers);
}

static void tokens_and_losses_are_those_of_trl(void **state) {
    const cJSON *golden, *item, *document, *tokens;
    int count = 0;
    (void)state;
    cJSON_ArrayForEach(golden, cJSON_GetObjectItem(goldens, "models")) {
        model m;
        open_model(&m, golden, NULL);
        cJSON_ArrayForEach(item, cJSON_GetObjectItem(golden, "cases")) {
            const char *form = string_of(item, "form");
            llm_data_desc desc = describe(&m, LONGEST);
            llm_data data;
            int64_t i = 0;
            write_lines(cJSON_GetObjectItem(item, "lines"));
            desc.all = cJSON_GetObjectItem(item, "all")->valueint;
            open_data(&data, &desc);
            assert_int_equal(data.documents,
                             cJSON_GetArraySize(cJSON_GetObjectItem(item, "lines")));
            cJSON_ArrayForEach(document, cJSON_GetObjectItem(item, "tokens")) {
                assert_int_equal(cJSON_GetArraySize(document), data.pairs ? 2 : 1);
                cJSON_ArrayForEach(tokens, document) {
                    expect_tokens(&data, i++, tokens, m.format.style->name, form);
                    count++;
                }
            }
            assert_int_equal(i, data.documents * (data.pairs ? 2 : 1));
            llm_data_close(&data);
        }
        close_model(&m);
    }
    assert_true(count > 400);
}

/* The text of the tokens with a loss, and '|' for each run of others. */
static void expect_answers(const char *style, const char *line, const char *want) {
    char got[1024] = "";
    llm_data_desc desc;
    llm_data data;
    model m;
    open_model(&m, golden_model(0), style);
    write_text("data.jsonl", line);
    desc = describe(&m, LONGEST);
    open_data(&data, &desc);
    for (int64_t i = 0, run = 0; i < data.tokens; i++) {
        size_t n = 0;
        char *text = llm_tokenizer_decode(m.codec.tokenizer, &data.ids[i], 1, 1, &n);
        if (data.ids[i] >= 0) {
            assert_non_null(text);
            (void)strncat(got, text, sizeof got - strlen(got) - 1);
        } else if (i == 0 || !run) {
            (void)strncat(got, "|", sizeof got - strlen(got) - 1);
        }
        run = data.ids[i] < 0;
        free(text);
    }
    if (strcmp(got, want) != 0) fail_msg("%s: \"%s\", not \"%s\"", style, got, want);
    llm_data_close(&data);
    close_model(&m);
}

#define CHAT                                                                                       \
    "{\"messages\":[{\"role\":\"system\",\"content\":\"S\"},{\"role\":\"user\",\"content\":"       \
    "\"one\"},{\"role\":\"assistant\",\"content\":\"1\"},{\"role\":\"user\",\"content\":\"two\"}," \
    "{\"role\":\"assistant\",\"content\":\"2\"}]}\n"

/* Styles that TRL has no training template of. */
static void every_answer_ends(void **state) {
    (void)state;
    expect_answers("chatml", CHAT, "|1<|im_end|>\n|2<|im_end|>\n");
    expect_answers("zephyr", CHAT, "|1</s>\n|2</s>\n");
    expect_answers("llama2", CHAT, "| 1 </s>| 2 </s>");
    expect_answers("none", CHAT, "|1</s>|2</s>");
    expect_answers("qwen3", CHAT,
                   "|<think>\n\n</think>\n\n1<|im_end|>\n|<think>\n\n</think>\n\n2<|im_end|>\n");
    expect_answers("mistral-v7", CHAT, "|1</s>|2</s>");
}

/* A template that puts the system message into the last message has it in the last question. */
static void a_system_message_stays(void **state) {
    chat_message messages[] = {{CHAT_SYSTEM, "S"}, {CHAT_USER, "one"}, {CHAT_ASSISTANT, "1"}};
    chat_span spans[3];
    chat_format format;
    char *text;
    (void)state;
    assert_true(
        chat_open(&format, "{\"bos_token\":\"<s>\",\"eos_token\":\"</s>\"}", NULL, "mistral-v3"));
    text = chat_render_answers(&format, messages, 3, 2, spans);
    assert_string_equal(text, "<s>[INST] S\n\none[/INST] 1</s>");
    assert_int_equal(spans[2].begin, strlen("<s>[INST] S\n\none[/INST]"));
    assert_int_equal(spans[2].end, strlen(text));
    free(text);
    chat_close(&format);
}

/* -------------------------------------------------------------------------- rows */

/* A text of `words` words, none of which the tokenizers of the goldens join with another. */
static void write_words(FILE *file, int words) {
    for (int i = 0; i < words; i++) assert_true(fprintf(file, "%c ", 'a' + i % 26) > 0);
}

/* So many documents of unequal lengths. */
static void write_documents(int count) {
    FILE *file = fopen(files_path("data.jsonl"), "w");
    assert_non_null(file);
    for (int i = 0; i < count; i++) {
        (void)fprintf(file, "{\"prompt\":\"%d \",\"completion\":\"", i);
        write_words(file, 1 + i * 7919 % 23);
        (void)fprintf(file, "\"}\n");
    }
    assert_int_equal(fclose(file), 0);
}

static tsh_ctx *open_ctx(uint64_t seed) {
    tsh_desc desc;
    tsh_ctx *ctx;
    memset(&desc, 0, sizeof desc);
    desc.seed = seed;
    assert_int_equal(tsh_open(&desc, &ctx), TSH_OK);
    return ctx;
}

/* Row r of the batch holds whole documents side by side, and padding after them. counts: how often
 * each document was seen so far. */
static void expect_row(const llm_data *d, const llm_batch *batch, int64_t r, int *counts) {
    int64_t at = r * batch->length, end = at + batch->length;
    for (int32_t segment = 0; at < end && batch->segments[at] >= 0; segment++) {
        const int32_t document = batch->documents[at];
        const llm_sequence *s = &d->sequences[document];
        const int32_t *ids = d->ids + s->at;
        counts[document]++;
        assert_true(at + s->inputs <= end);
        for (int32_t i = 0; i < s->inputs; i++, at++) {
            assert_int_equal(batch->segments[at], segment);
            assert_int_equal(batch->documents[at], document);
            assert_int_equal(batch->places[at], i);
            assert_int_equal(batch->ids[at], ids[i] < 0 ? ~ids[i] : ids[i]);
            assert_int_equal(batch->targets[at], ids[i + 1] < 0 ? -100 : ids[i + 1]);
        }
    }
    for (; at < end; at++) {
        assert_int_equal(batch->segments[at], -1);
        assert_int_equal(batch->documents[at], -1);
        assert_int_equal(batch->targets[at], -100);
        assert_int_equal(batch->ids[at], 7);
        assert_int_equal(batch->places[at], 0);
    }
}

/* Walks an epoch in batches of 1 row: each document once. order: the first document of each row. */
static void walk_epoch(llm_reader *reader, int64_t epoch, int32_t *order) {
    const llm_data *d = reader->data;
    llm_batch batch;
    int counts[DOCUMENTS] = {0};
    int64_t answers = 0;
    memset(&batch, 0, sizeof batch);
    for (int64_t r = 0; r < d->train.rows; r++) {
        llm_batch_of of;
        memset(&of, 0, sizeof of);
        of.rows = 1;
        of.step = epoch * d->train.rows + r;
        assert_true(llm_data_batch(reader, &of, &batch, NULL));
        expect_row(d, &batch, 0, counts);
        order[r] = batch.documents[0];
        answers += batch.answers;
    }
    for (int64_t i = 0; i < d->train.count; i++) assert_int_equal(counts[i], 1);
    assert_int_equal(answers, d->train.answers);
    llm_batch_free(&batch);
}

/* Packed, or one document a row; orders of epochs and seeds differ. */
static void check_epochs(model *m, int64_t length, int unpacked) {
    static int32_t order[4][DOCUMENTS];
    tsh_ctx *ctx = open_ctx(3);
    llm_data_desc desc = describe(m, length);
    llm_data data;
    llm_reader reader;
    size_t size;
    desc.unpacked = unpacked;
    desc.padding = 7;
    for (int k = 0; k < 3; k++) {
        desc.seed = k == 2 ? 8 : 0;
        open_data(&data, &desc);
        assert_int_equal(data.train.count, DOCUMENTS);
        llm_reader_open(&reader, &data, ctx);
        if (k == 1) walk_epoch(&reader, 5, order[3]); /* what came before does not matter */
        walk_epoch(&reader, 0, order[k]);
        if (k == 0) walk_epoch(&reader, 1, order[3]);
        size = (size_t)data.train.rows * sizeof **order;
        if (unpacked)
            assert_int_equal(data.train.rows, DOCUMENTS);
        else
            assert_true((data.train.rows - 1) * length < data.train.inputs * 102 / 100);
        llm_reader_close(&reader);
        llm_data_close(&data);
        if (k == 0) assert_memory_not_equal(order[0], order[3], size);
    }
    assert_memory_equal(order[0], order[1], size);
    assert_memory_not_equal(order[0], order[2], size);
    tsh_close(ctx);
}

static void an_epoch_has_every_document_once(void **state) {
    model m;
    (void)state;
    open_model(&m, golden_model(0), NULL);
    write_documents(DOCUMENTS);
    check_epochs(&m, 128, 0);
    check_epochs(&m, 255, 0);
    check_epochs(&m, 100, 1);
    close_model(&m);
}

/* However a step is split into replicas and micro-batches, it has the same rows. */
static void replicas_and_micro_batches_split_a_step(void **state) {
    tsh_ctx *ctx = open_ctx(0);
    llm_batch whole, part;
    llm_batch_of of;
    llm_data_desc desc;
    llm_data data;
    llm_reader reader, other;
    model m;
    (void)state;
    open_model(&m, golden_model(0), NULL);
    write_documents(DOCUMENTS);
    desc = describe(&m, 90);
    open_data(&data, &desc);
    llm_reader_open(&reader, &data, ctx);
    llm_reader_open(&other, &data, ctx);
    memset(&whole, 0, sizeof whole);
    memset(&part, 0, sizeof part);
    for (int64_t step = 0; step < 20; step++) { /* some steps are of two epochs */
        int64_t answers = 0;
        memset(&of, 0, sizeof of);
        of.step = step;
        of.rows = 12;
        assert_true(llm_data_batch(&reader, &of, &whole, NULL));
        of.rows = 2;
        of.micros = 3;
        of.replicas = 2;
        for (int64_t i = 0; i < 6; i++) {
            const size_t n = 2 * 90 * sizeof(int32_t);
            of.replica = i / 3;
            of.micro = i % 3;
            assert_true(llm_data_batch(&other, &of, &part, NULL));
            assert_memory_equal(part.ids, whole.ids + i * 180, n);
            assert_memory_equal(part.targets, whole.targets + i * 180, n);
            assert_memory_equal(part.segments, whole.segments + i * 180, n);
            answers += part.answers;
        }
        assert_int_equal(answers, whole.answers);
    }
    assert_true(20 * 12 > 2 * data.train.rows);
    of.replica = 2;
    assert_false(llm_data_batch(&other, &of, &part, NULL));
    llm_batch_free(&whole);
    llm_batch_free(&part);
    llm_reader_close(&reader);
    llm_reader_close(&other);
    llm_data_close(&data);
    close_model(&m);
    tsh_close(ctx);
}

/* Without a ctx rows stay in the order of the file: they are the text again. */
static void a_text_is_cut_into_rows(void **state) {
    int32_t *ids;
    int64_t n;
    llm_batch batch;
    llm_batch_of of;
    llm_data_desc desc;
    llm_data data;
    llm_reader reader;
    FILE *file = fopen(files_path("text.txt"), "w");
    files_bytes text;
    model m;
    (void)state;
    assert_non_null(file);
    write_words(file, 500);
    assert_int_equal(fclose(file), 0);
    text = files_read("text.txt");
    open_model(&m, golden_model(0), NULL);
    n = text_encode(&m.codec, text.at, text.size, 1, &ids);
    files_free(&text);
    assert_true(n > 400);
    desc = describe(&m, 64);
    desc.path = files_path("text.txt");
    desc.unpacked = 1; /* so that the row that is not full stays the last */
    desc.held_every = 4;
    open_data(&data, &desc);
    assert_int_equal(data.tokens, n);
    llm_reader_open(&reader, &data, NULL);
    memset(&batch, 0, sizeof batch);
    memset(&of, 0, sizeof of);
    of.rows = data.train.rows;
    assert_true(llm_data_batch(&reader, &of, &batch, NULL));
    for (int64_t i = 0; i < n - n / 4 - 1; i++) {
        assert_int_equal(batch.ids[i], ids[i]);
        assert_int_equal(batch.targets[i], ids[i + 1]);
        assert_int_equal(batch.places[i], i % 64);
        assert_int_equal(batch.segments[i], 0);
    }
    assert_int_equal(batch.answers, n - n / 4 - 1);
    of.rows = data.held.rows + 1; /* a row of padding */
    assert_int_equal(llm_data_held_steps(&data, 1), data.held.rows);
    assert_true(llm_data_held(&reader, &of, &batch, NULL));
    for (int64_t i = 0; i < n / 4 - 1; i++) assert_int_equal(batch.ids[i], ids[n - n / 4 + i]);
    assert_int_equal(batch.answers, n / 4 - 1);
    assert_int_equal(batch.segments[data.held.rows * 64], -1);
    free(ids);
    llm_batch_free(&batch);
    llm_reader_close(&reader);
    llm_data_close(&data);
    close_model(&m);
}

static void documents_are_held_out(void **state) {
    llm_data_desc desc;
    llm_data data;
    model m;
    (void)state;
    open_model(&m, golden_model(0), NULL);
    write_documents(45);
    desc = describe(&m, 64);
    desc.held_every = 10;
    open_data(&data, &desc);
    assert_int_equal(data.train.count, 41);
    assert_int_equal(data.held.first, 41);
    assert_int_equal(data.held.count, 4);
    llm_data_close(&data);
    desc.held_every = 100; /* one at least */
    open_data(&data, &desc);
    assert_int_equal(data.held.count, 1);
    llm_data_close(&data);
    write_text("held.txt", "a b c d e f g h");
    desc.held_path = files_path("held.txt");
    open_data(&data, &desc);
    assert_int_equal(data.train.count, 45);
    assert_int_equal(data.held.first, 45);
    assert_int_equal(data.held.count, 1);
    assert_int_equal(data.held.answers, data.held.inputs);
    llm_data_close(&data);
    close_model(&m);
}

/* Both batches have the same documents in the same rows and segments. */
static void preferences_stay_side_by_side(void **state) {
    tsh_ctx *ctx = open_ctx(0);
    FILE *file = fopen(files_path("data.jsonl"), "w");
    int seen[60] = {0};
    llm_batch chosen, rejected;
    llm_batch_of of;
    llm_data_desc desc;
    llm_data data;
    llm_reader reader;
    model m;
    (void)state;
    assert_non_null(file);
    for (int i = 0; i < 60; i++) {
        (void)fprintf(file, "{\"prompt\":\"%d\",\"chosen\":\" ", i);
        write_words(file, 1 + i % 9);
        (void)fprintf(file, "\",\"rejected\":\" ");
        write_words(file, 1 + i % 7);
        (void)fprintf(file, "\"}\n");
    }
    assert_int_equal(fclose(file), 0);
    open_model(&m, golden_model(0), NULL);
    desc = describe(&m, 50);
    open_data(&data, &desc);
    assert_true(data.pairs && data.documents == 60);
    llm_reader_open(&reader, &data, ctx);
    memset(&chosen, 0, sizeof chosen);
    memset(&rejected, 0, sizeof rejected);
    memset(&of, 0, sizeof of);
    of.rows = data.train.rows;
    assert_false(llm_data_batch(&reader, &of, &chosen, NULL));
    assert_true(llm_data_batch(&reader, &of, &chosen, &rejected));
    for (int64_t r = 0; r < of.rows; r++) {
        int32_t of_segment[2][50];
        memset(of_segment, -1, sizeof of_segment);
        for (int64_t i = r * 50; i < (r + 1) * 50; i++) {
            if (chosen.segments[i] >= 0) of_segment[0][chosen.segments[i]] = chosen.documents[i];
            if (rejected.segments[i] >= 0)
                of_segment[1][rejected.segments[i]] = rejected.documents[i];
        }
        assert_memory_equal(of_segment[0], of_segment[1], sizeof of_segment[0]);
        for (int i = 0; i < 50; i++)
            if (of_segment[0][i] >= 0) seen[of_segment[0][i]]++;
    }
    for (int i = 0; i < 60; i++) assert_int_equal(seen[i], 1);
    llm_batch_free(&chosen);
    llm_batch_free(&rejected);
    llm_reader_close(&reader);
    llm_data_close(&data);
    close_model(&m);
    tsh_close(ctx);
}

/* ------------------------------------------------------------------------ errors */

/* The file, a line that is right and then `text`, is refused by a sentence with these words. */
static void refuses(const char *style, const char *text, const char *words) {
    char all[2048], where[64];
    llm_data_desc desc;
    llm_data data;
    model m;
    open_model(&m, golden_model(0), style);
    (void)snprintf(all, sizeof all, "{\"text\":\"a b c\"}\n%s\n", text);
    write_text("data.jsonl", all);
    desc = describe(&m, 40);
    assert_false(llm_data_open(&data, &desc));
    (void)snprintf(where, sizeof where, "data.jsonl:2: ");
    if (!strstr(data.error, where) || !strstr(data.error, words))
        fail_msg("\"%s\" has no \"%s\" or \"%s\"", data.error, where, words);
    llm_data_close(&data);
    close_model(&m);
}

#define USER            "{\"role\":\"user\",\"content\":\"u\"}"
#define ASSISTANT       "{\"role\":\"assistant\",\"content\":\"a\"}"
#define SAYS(x)         "{\"role\":\"assistant\",\"content\":\"" x "\"}"
#define CONVERSATION(x) "{\"messages\":[" x "]}"

static void lines_that_are_wrong(void **state) {
    static const char *const rows[][3] = {
        {NULL, "{\"text\": \"a\" \"b\"}", "this line is not JSON: column 14: "},
        {NULL, "{\"text\": \"a\"", "this line is not JSON: column 13: "},
        {NULL, "{\"text\":\"a\"} {\"text\":\"b\"}", "is not JSON: column 14: something follows"},
        {NULL, "{\"text\":\"\\ud800\"}", "column 10: this escape is half a character"},
        {NULL, "{\"text\":\"\\udc00\\ud800\"}", "column 10: this escape is half a character"},
        {NULL, "{\"text\":\"C:\\new\\x\"}", "column 16: this is no escape of JSON"},
        {NULL, "{\"text\":\"\\u12g4\"}", "column 10: this is no escape of JSON"},
        {NULL, "{\"text\":\"a\tb\"}", "column 11: a control character in a string is an escape"},
        {NULL, CONVERSATION("{\"role\":\"user\",\"content\":\"a\",\"role\":\"assistant\"}"),
         "the key \"role\" occurs twice"},
        {NULL, "[1, 2]", "this line is no object; each line is one {...}"},
        {NULL, "{\"text\":\"a\",\"text\":\"b\"}", "the key \"text\" occurs twice"},
        {NULL, "{\"txt\":\"a\"}", "none of these forms: {\"text\"}, {\"messages\"}, "},
        {NULL, "{\"prompt\":\"a\"}", "{\"prompt\", \"chosen\", \"rejected\"}"},
        {NULL, "{\"text\":\"\"}", "\"text\" is empty"},
        {NULL, "{\"text\":3}", "\"text\" is no string"},
        {NULL, "{\"text\":\"a\\u0000b\"}", "\\u0000"},
        {NULL, "{\"text\":\"a\xff\"}", "byte 11 of the line is not UTF-8; convert the file"},
        {NULL, "{\"prompt\":\"a\",\"completion\":\"\"}", "\"completion\" is empty"},
        {NULL, "{\"prompt\":\"a\",\"completion\":[" ASSISTANT "]}", "are to be two strings, or"},
        {NULL, "{\"prompt\":1,\"completion\":2}", "\"prompt\" is no list of messages"},
        {NULL, "{\"prompt\":[" USER "],\"completion\":[" USER "]}",
         "\"completion\" does not go on with a message of the assistant"},
        {NULL, "{\"prompt\":[" USER "],\"completion\":[]}", "\"completion\" has no message"},
        {NULL, "{\"prompt\":\"a\",\"chosen\":\"b\",\"rejected\":\"c\"}",
         "this line is a preference, and the lines before it are not"},
        {NULL, CONVERSATION(""), "\"messages\" has no message"},
        {NULL, CONVERSATION(USER), "\"messages\" has no answer"},
        {NULL, CONVERSATION(USER "," SAYS("")), "message 2, an answer, is empty"},
        {NULL, CONVERSATION(USER "," SAYS(" \\n")), "message 2, an answer, is empty"},
        {NULL, CONVERSATION(USER ",{\"role\":\"tool\",\"content\":\"x\"}"),
         "the role \"tool\", and the template smollm2 knows system, user and assistant"},
        {NULL, CONVERSATION(USER ",{\"role\":\"assistant\",\"content\":null}"),
         "message 2 of \"messages\" has no \"content\" that is a string"},
        {NULL, CONVERSATION("{\"content\":\"a\"}"), "has no \"role\" that is a string"},
        {NULL, CONVERSATION(USER ",{\"role\":\"system\",\"content\":\"s\"}," ASSISTANT),
         "message 2 is a system message, which only the first may be"},
        {"gemma", CONVERSATION("{\"role\":\"system\",\"content\":\"s\"}," USER "," ASSISTANT),
         "the template gemma takes no system message"},
        {"gemma3", CONVERSATION(USER "," USER "," ASSISTANT),
         "message 2 is one of the user; with the template gemma3 user and assistant take turns"},
        {"mistral-v7", CONVERSATION(ASSISTANT), "message 1 is one of the assistant; "},
        {NULL,
         "{\"text\":\"a b c d e f g h i j k l m n o p q r s t u v w x y z a b c d e f g h i j k l "
         "m n o p q r s t u v w x y z\"}",
         "tokens are more than the context of 40; take a longer context (--context N), shorten"}};
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        refuses(rows[i][0], rows[i][1], rows[i][2]);
}

/* A whole file is refused; its name has an end of its own. */
static void refuses_file(const char *name, const void *bytes, size_t size, int64_t every,
                         const char *words) {
    llm_data_desc desc;
    llm_data data;
    model m;
    open_model(&m, golden_model(0), NULL);
    files_write(name, bytes, size);
    desc = describe(&m, 40);
    desc.path = files_path(name);
    desc.held_every = every;
    assert_false(llm_data_open(&data, &desc));
    if (!strstr(data.error, name) || !strstr(data.error, words))
        fail_msg("\"%s\" has no \"%s\" or \"%s\"", data.error, name, words);
    llm_data_close(&data);
    close_model(&m);
}

static void files_that_are_wrong(void **state) {
    llm_data_desc desc;
    llm_data data;
    model m;
    (void)state;
    refuses_file("a.jsonl", "", 0, 0, "a.jsonl: the file is empty");
    refuses_file("a.jsonl", " \n\r\n", 4, 0, "a.jsonl: the file is empty");
    refuses_file("a.txt", "", 0, 0, "a.txt: the file is empty");
    refuses_file("a.txt", "\xEF\xBB\xBF", 3, 0, "a.txt: the file is empty");
    refuses_file("a.txt", "one\ntwo\nthr\xe9\xe8\n", 14, 0, "a.txt:3: this line is not UTF-8");
    refuses_file("a.txt", "one\ntw\0o\n", 9, 0, "a.txt:2: this line has a byte that is 0");
    refuses_file("a.jsonl", "{\"text\":\"a\0\"}", 13, 0, "a.jsonl:1: byte 11 of the line is 0");
    refuses_file("a.json", "[\n{\"text\":\"a\"}]", 16, 0, "a.json:1: this line is not JSON");
    refuses_file("a.jsonl", "{\"text\":\"a b\"}", 14, 10,
                 "1 in 10 cannot be held out of so little");
    refuses_file("a.txt", "a b c", 5, 100, "1 in 100 cannot be held out of so little");
    refuses_file("a.JSONL", "{\"text\"", 7, 0, "a.JSONL:1: this line is not JSON");
    open_model(&m, golden_model(0), NULL);
    desc = describe(&m, 40);
    desc.path = files_path("none.jsonl");
    assert_false(llm_data_open(&data, &desc));
    assert_non_null(strstr(data.error, "none.jsonl"));
    llm_data_close(&data);
    desc.format = NULL;
    desc.path = files_path("data.jsonl");
    write_text("data.jsonl", CHAT);
    assert_false(llm_data_open(&data, &desc));
    assert_non_null(strstr(data.error, ":1: \"messages\" is a conversation, and there is no chat "
                                       "template"));
    llm_data_close(&data);
    desc.length = 0;
    assert_false(llm_data_open(&data, &desc));
    llm_data_close(&data);
    close_model(&m);
}

/* With .truncate the beginning is kept; a document whose answer is cut off is left out. */
static void long_sequences_are_cut(void **state) {
    llm_data_desc desc;
    llm_data data;
    model m;
    (void)state;
    open_model(&m, golden_model(0), NULL);
    write_text("data.jsonl", "\xEF\xBB\xBF{\"prompt\":\"a b c d e f g\",\"completion\":\" h i\"}\n"
                             "{\"text\":\"a b c d e f g h i j k l m n o p\"}");
    desc = describe(&m, 5);
    desc.truncate = 1;
    open_data(&data, &desc);
    assert_int_equal(data.dropped, 1);
    assert_int_equal(data.documents, 1);
    assert_int_equal(data.train.answers, 5);
    llm_data_close(&data);
    write_text("data.jsonl", "{\"prompt\":\"a b c d e f g\",\"completion\":\" h i\"}\n");
    assert_false(llm_data_open(&data, &desc));
    assert_non_null(strstr(data.error, "no answer begins within the context of 5 tokens"));
    llm_data_close(&data);
    close_model(&m);
}

/* A context that is longer than all that was read takes no memory. */
static void a_context_may_be_long(void **state) {
    const llm_batch_of which = {.rows = 2}, last = {.step = INT64_MAX, .rows = 2},
                       many = {.rows = INT32_MAX, .replicas = INT64_MAX};
    llm_batch batch = {0};
    llm_reader reader;
    llm_data_desc desc;
    llm_data data;
    model m;
    (void)state;
    open_model(&m, golden_model(0), NULL);
    write_text("data.jsonl", "{\"text\":\"a b\"}\n{\"text\":\"c d e\"}\n");
    desc = describe(&m, INT32_MAX - 1);
    open_data(&data, &desc);
    assert_int_equal(data.train.rows, 1);
    llm_reader_open(&reader, &data, NULL);
    assert_true(llm_data_batch(&reader, &which, &batch, NULL));
    assert_int_equal(batch.length, data.tokens);
    assert_int_equal(batch.answers, 2 * data.train.answers);
    assert_false(llm_data_batch(&reader, &last, &batch, NULL));
    assert_false(llm_data_batch(&reader, &many, &batch, NULL));
    llm_batch_free(&batch);
    llm_reader_close(&reader);
    llm_data_close(&data);
    close_model(&m);
}

/* A line that is longer than what is read at once. */
static void a_line_may_be_long(void **state) {
    FILE *file = fopen(files_path("data.jsonl"), "w");
    llm_data_desc desc;
    llm_data data;
    model m;
    (void)state;
    assert_non_null(file);
    (void)fprintf(file, "{\"text\":\"a b\", \"other\":\"");
    for (int i = 0; i < 300000; i++) (void)fputc('x', file);
    (void)fprintf(file, "\"}\n{\"text\":\"c d\"}");
    assert_int_equal(fclose(file), 0);
    open_model(&m, golden_model(0), NULL);
    desc = describe(&m, 40);
    open_data(&data, &desc);
    assert_int_equal(data.documents, 2);
    llm_data_close(&data);
    close_model(&m);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(tokens_and_losses_are_those_of_trl),
                                       cmocka_unit_test(every_answer_ends),
                                       cmocka_unit_test(a_system_message_stays),
                                       cmocka_unit_test(an_epoch_has_every_document_once),
                                       cmocka_unit_test(replicas_and_micro_batches_split_a_step),
                                       cmocka_unit_test(a_text_is_cut_into_rows),
                                       cmocka_unit_test(documents_are_held_out),
                                       cmocka_unit_test(preferences_stay_side_by_side),
                                       cmocka_unit_test(lines_that_are_wrong),
                                       cmocka_unit_test(files_that_are_wrong),
                                       cmocka_unit_test(long_sequences_are_cut),
                                       cmocka_unit_test(a_line_may_be_long),
                                       cmocka_unit_test(a_context_may_be_long)};
    return cmocka_run_group_tests_name("data", tests, open_goldens, close_goldens);
}
