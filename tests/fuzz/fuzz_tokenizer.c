/* Feeds bytes to examples/llm/tokenizer.h: a tokenizer.json, the byte 0xFF, and a text. Whatever
 * they are, the answer is an error of one sentence, or ids whose text is UTF-8. `make fuzz` runs it
 * under libFuzzer, test_tokenizer.c once for every seed, which tests/llm/make_goldens.py writes. */
#include "../../examples/llm/tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void must_hold(int condition) {
    if (!condition) abort();
}

static void check_error(const char *error) {
    must_hold(strlen(error) > 10 && strlen(error) < 256);
}

/* Id by id, never with half a character. */
static void check_stream(llm_tokenizer *t, const int32_t *ids, size_t count, int special) {
    llm_stream stream;
    size_t i, n;
    memset(&stream, 0, sizeof stream);
    stream.tokenizer = t;
    stream.special = special;
    for (i = 0; i <= count; i++) {
        const char *part = i < count ? llm_stream_add(&stream, ids[i], &n)
                                     : llm_stream_end(&stream, &n);
        if (part) must_hold(llm_valid_prefix(part, n) == n);
    }
}

static void check_text(llm_tokenizer *t, const char *text, size_t size) {
    int32_t *ids, *again;
    size_t n;
    int special;
    for (special = 0; special < 2; special++) {
        const int64_t count = llm_tokenizer_encode(t, text, size, special, &ids);
        char *back;
        int64_t i;
        if (count < 0) {
            check_error(llm_tokenizer_error(t));
            continue;
        }
        for (i = 0; i < count; i++) must_hold(ids[i] >= 0);
        must_hold(llm_tokenizer_encode(t, text, size, special, &again) == count); /* now cached */
        must_hold(count == 0 || memcmp(ids, again, (size_t)count * sizeof *ids) == 0);
        back = llm_tokenizer_decode(t, ids, (size_t)count, special, &n);
        if (back)
            must_hold(llm_valid_prefix(back, n) == n);
        else
            check_error(llm_tokenizer_error(t));
        free(back);
        check_stream(t, ids, (size_t)(count < 50 ? count : 50), special);
        free(ids);
        free(again);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const uint8_t *end = size ? (const uint8_t *)memchr(data, 0xFF, size) : NULL;
    const size_t json = end ? (size_t)(end - data) : size;
    char error[256] = "", *copy = (char *)malloc(size + 1); /* so that reading beyond is seen */
    llm_tokenizer *t;
    must_hold(copy != NULL);
    if (size) memcpy(copy, data, size);
    t = llm_tokenizer_read(copy, json, "input", error, sizeof error);
    if (t)
        check_text(t, copy + json + (end != NULL), size - json - (end != NULL));
    else
        check_error(error);
    llm_tokenizer_free(t);
    free(copy);
    return 0;
}
