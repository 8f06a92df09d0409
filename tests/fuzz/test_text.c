/* Every seed of fuzz_text.c with every tokenizer, whole and cut. */
#if !defined(_POSIX_C_SOURCE)
#define _POSIX_C_SOURCE 200809L /* opendir */
#endif
#include "fuzz_text.c"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include "../support/seeds.h"

static void text_seed(const char *name, uint8_t *data, size_t size) {
    size_t i;
    (void)name;
    assert_true(size >= 1);
    for (i = 0; i == 0 || i < 2 * text_tokenizers; i++) {
        data[0] = (uint8_t)i;
        assert_int_equal(LLVMFuzzerTestOneInput(data, size), 0);
        assert_int_equal(LLVMFuzzerTestOneInput(data, size - size / 3), 0);
    }
}

static void every_seed_is_encoded(void **state) {
    (void)state;
    assert_true(seeds_each("text", text_seed) >= 40);
    assert_true(text_tokenizers >= 20 && text_exact[0]);
    assert_int_equal(LLVMFuzzerTestOneInput(NULL, 0), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_seed_is_encoded)};
    return cmocka_run_group_tests_name("fuzz seeds", tests, NULL, NULL);
}
