/* Every seed of fuzz_tokenizer.c once: all of them are tokenizers. */
#if !defined(_POSIX_C_SOURCE)
#define _POSIX_C_SOURCE 200809L /* opendir */
#endif
#include "fuzz_tokenizer.c"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include "../support/seeds.h"

static void tokenizer_seed(const char *name, uint8_t *data, size_t size) {
    const size_t json = (size_t)((const uint8_t *)memchr(data, 0xFF, size) - data);
    char error[256];
    llm_tokenizer *t =
        llm_tokenizer_read((const char *)data, json, name, error, sizeof error);
    if (!t) fail_msg("%s", error);
    llm_tokenizer_free(t);
    assert_int_equal(LLVMFuzzerTestOneInput(data, size), 0);
    assert_int_equal(LLVMFuzzerTestOneInput(data, size / 2), 0);
}

static void every_seed_is_read(void **state) {
    (void)state;
    assert_true(seeds_each("tokenizer", tokenizer_seed) >= 20);
    assert_int_equal(LLVMFuzzerTestOneInput(NULL, 0), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_seed_is_read)};
    return cmocka_run_group_tests_name("fuzz seeds", tests, NULL, NULL);
}
