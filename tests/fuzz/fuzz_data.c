/* Feeds bytes to examples/llm/data.h. The first byte chooses the chat template and the options; the
 * others are a file of JSON lines. Any bytes give an error of one sentence, or documents that fit
 * into rows, each of which stands in the batches once. `make fuzz` runs it under libFuzzer;
 * test_data.c runs it once for every file of the folder data, which make_corpus.py writes. */
#if !defined(_POSIX_C_SOURCE)
#define _POSIX_C_SOURCE 200809L /* fmemopen, and what examples/llm includes */
#endif
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"
#include "../../examples/llm/data.h"

#include "tokenizers.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { DATA_LENGTH = 48, DATA_ROWS = 3 };

static text_codec data_codec;

/* Opens the first tokenizer of tests/golden/tokenizers.json, which is found from this file's own
 * place. */
static void data_begin(void) {
    const char *here = __FILE__, *slash = strrchr(here, '/');
    char path[512], error[256], *text, *json;
    size_t n = 0;
    cJSON *all;
    (void)snprintf(path, sizeof path, "%.*s../golden/tokenizers.json",
                   slash ? (int)(slash - here + 1) : 0, here);
    text = llm_read(path, 0, &n, NULL);
    must_hold(text != NULL);
    all = cJSON_Parse(text);
    json = cJSON_PrintUnformatted(cJSON_GetObjectItem(cJSON_GetArrayItem(all, 0), "tokenizer"));
    must_hold(json != NULL);
    data_codec.tokenizer = lent_tokenizer_read(json, strlen(json), "golden", error, sizeof error);
    must_hold(data_codec.tokenizer != NULL);
    cJSON_free(json);
    cJSON_Delete(all);
    free(text);
}

/* Every document stands in one row, and the targets with a loss are all there. */
static void data_check(const llm_data *d) {
    llm_reader reader;
    llm_batch batch, rejected;
    llm_batch_of of;
    int64_t documents = 0, answers = 0;
    memset(&batch, 0, sizeof batch);
    memset(&rejected, 0, sizeof rejected);
    memset(&of, 0, sizeof of);
    of.rows = DATA_ROWS;
    for (int64_t i = 0; i < d->tokens; i++) must_hold(d->ids[i] < data_codec.tokenizer->size);
    llm_reader_open(&reader, d, NULL);
    for (; of.step * DATA_ROWS < d->held.rows; of.step++) {
        must_hold(llm_data_held(&reader, &of, &batch, &rejected));
        for (int64_t i = 0; i < DATA_ROWS * DATA_LENGTH; i++)
            documents += batch.segments[i] >= 0 && batch.places[i] == 0;
        answers += batch.answers + rejected.answers;
    }
    must_hold(documents == d->documents && answers == d->held.answers && answers > 0);
    llm_batch_free(&batch);
    llm_batch_free(&rejected);
    llm_reader_close(&reader);
}

/* Returns 1 if the bytes are read; 0: they give an error. */
static int data_take(const uint8_t *data, size_t size) {
    const size_t styles = sizeof chat_styles / sizeof *chat_styles;
    const uint8_t first = size ? data[0] : 0;
    char bos[] = "<s>", eos[] = "</s>";
    chat_format format;
    llm_data d;
    llm_data_file f;
    int ok;
    if (!data_codec.tokenizer) data_begin();
    memset(&format, 0, sizeof format);
    memset(&d, 0, sizeof d);
    memset(&f, 0, sizeof f);
    format.style = &chat_styles[first % styles];
    format.bos = bos;
    format.eos = eos;
    d.desc.codec = &data_codec;
    d.desc.format = &format;
    d.desc.length = DATA_LENGTH;
    d.desc.truncate = first / styles % 2 != 0;
    d.desc.all = first / styles / 2 % 2 != 0;
    f.data = &d;
    f.path = "fuzz.jsonl";
    f.file = size > 1 ? fmemopen((void *)(uintptr_t)(data + 1), size - 1, "r") : tmpfile();
    must_hold(f.file != NULL);
    ok = llm_data_lines(&f);
    must_hold(ok == !d.error[0]);
    if (!ok) check_tokenizer_error(d.error);
    d.held.count = d.documents;
    if (ok) must_hold(llm_data_count_part(&d, &d.held));
    if (ok && d.documents) data_check(&d);
    (void)fclose(f.file);
    free(f.text);
    free(f.messages);
    free(f.spans);
    llm_data_close(&d);
    return ok;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    (void)data_take(data, size);
    return 0;
}
