/* Every seed of fuzz_safetensors.c once, and which of them are files of its model. */
#include "fuzz_safetensors.c"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

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

/* Reads a seed; the folder is found from this file's own place. */
static size_t read_seed(const char *name, uint8_t *data, size_t size) {
    const char *here = __FILE__, *slash = strrchr(here, '/');
    char path[512];
    FILE *file;
    (void)snprintf(path, sizeof path, "%.*ssafetensors/%s", slash ? (int)(slash - here + 1) : 0,
                   here, name);
    file = fopen(path, "rb");
    if (!file) fail_msg("%s cannot be opened (make_corpus.py writes it)", path);
    size = fread(data, 1, size, file);
    (void)fclose(file);
    return size;
}

static void every_seed_is_read(void **state) {
    static uint8_t data[4096];
    target t = open_target();
    size_t i, size;
    (void)state;
    for (i = 0; i < sizeof seeds / sizeof seeds[0]; i++) {
        size = read_seed(seeds[i].name, data, sizeof data);
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
