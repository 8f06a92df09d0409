/* Feeds bytes to examples/llm/tokenizer.h: a tokenizer.json, the byte 0xFF, and a text. Whatever
 * they are, the answer is an error of one sentence, or ids whose text is UTF-8. `make fuzz` runs it
 * under libFuzzer, test_tokenizer.c once for every seed, which tests/llm/make_goldens.py writes. */
#include "../../examples/llm/tokenizer.h"

#include "tokenizers.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const uint8_t *end = size ? (const uint8_t *)memchr(data, 0xFF, size) : NULL;
    const size_t json = end ? (size_t)(end - data) : size;
    char error[256] = "", *copy = (char *)malloc(size + 1); /* so that reading beyond is seen */
    llm_tokenizer *t;
    int special;
    must_hold(copy != NULL);
    if (size) memcpy(copy, data, size);
    t = lent_tokenizer_read(copy, json, "input", error, sizeof error);
    for (special = 0; t && special < 2; special++)
        check_text(t, copy + json + (end != NULL), size - json - (end != NULL), special);
    if (!t) check_tokenizer_error(error);
    lent_tokenizer_free(t);
    free(copy);
    return 0;
}
