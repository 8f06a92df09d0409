/* Every seed of fuzz_safetensors.c once, and which of them are files of its model. */
#include "fuzz_safetensors.c"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include "../support/seeds.h"

typedef struct seed {
    const char *name;
    tsh_result with, without; /* an optimiser */
} seed;

static const seed seeds[] = {
    {"parameters", TSH_ERR_ARGUMENT, TSH_OK},
    {"state", TSH_OK, TSH_OK},
    {"escapes", TSH_ERR_ARGUMENT, TSH_OK},
    {"types", TSH_ERR_ARGUMENT, TSH_ERR_ARGUMENT},
    {"empty", TSH_ERR_ARGUMENT, TSH_ERR_SHAPE},
    {"nothing", TSH_ERR_ARGUMENT, TSH_ERR_ARGUMENT},
    {"gap", TSH_ERR_IO, TSH_ERR_IO},
    {"long", TSH_ERR_IO, TSH_ERR_IO},
    {"cut", TSH_ERR_IO, TSH_ERR_IO},
};

static void every_seed_is_read(void **state) {
    static uint8_t data[4096];
    target t = open_target();
    size_t i, size;
    (void)state;
    for (i = 0; i < sizeof seeds / sizeof seeds[0]; i++) {
        size = seeds_read("safetensors", seeds[i].name, data, sizeof data);
        assert_true(size > 0);
        assert_int_equal(load(t, data, size, t.optim), seeds[i].with);
        assert_int_equal(load(t, data, size, NULL), seeds[i].without);
        assert_int_equal(LLVMFuzzerTestOneInput(data, size), 0);
    }
    assert_int_equal(LLVMFuzzerTestOneInput(data, 0), 0);
    tsh_close(t.ctx);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_seed_is_read)};
    return cmocka_run_group_tests_name("fuzz seeds", tests, NULL, NULL);
}
