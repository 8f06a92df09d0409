/* Every seed of fuzz_gguf.c once, whole and cut. */
#include "fuzz_gguf.c"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include "../support/seeds.h"

static int gguf_seeds_read; /* without an error */

static void gguf_seed(const char *name, uint8_t *data, size_t size) {
    char error[512];
    gguf *g = gguf_read(data, size, name, error, sizeof error);
    size_t cut;
    gguf_seeds_read += g != NULL;
    if (strncmp(name, "good_", 5) == 0 && !g) fail_msg("%s", error);
    gguf_close(g);
    for (cut = 0; cut <= size; cut += cut + 64 < size ? 64 : 1)
        assert_int_equal(LLVMFuzzerTestOneInput(data, cut), 0);
}

static void every_seed_is_answered(void **state) {
    int count;
    (void)state;
    count = seeds_each("gguf", gguf_seed);
    assert_true(count >= 12 && gguf_seeds_read >= 6 && gguf_seeds_read < count);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_seed_is_answered)};
    return cmocka_run_group_tests_name("fuzz seeds", tests, NULL, NULL);
}
