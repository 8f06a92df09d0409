/* Every seed of fuzz_index.c once, and what becomes of it; and an index of a million tensors. */
#include "fuzz_index.c"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include "../support/seeds.h"

static const struct {
    const char *name, *part; /* of the sentence; NULL: it loads */
} index_seeds[] = {
    {"whole", NULL},
    {"escapes", NULL},
    {"metadata", NULL},
    {"swapped", "holds \"a.weight\", which the index places in \"b.safetensors\""},
    {"more", "places \"c\" in \"a.safetensors\", which lacks it"},
    {"nowhere", "is named by the index and cannot be opened"},
    {"above", "which is no name of a file beside it"},
    {"twice", "\"a.bias\" is there twice"},
    {"nothing", "there is no weight_map"},
    {"deep", "there is no weight_map"},
    {"cut", "a string does not end"},
};

static void every_index_is_read(void **state) {
    static uint8_t data[65536];
    tsh_ctx *ctx = index_open();
    size_t i, size;
    (void)state;
    for (i = 0; i < sizeof index_seeds / sizeof index_seeds[0]; i++) {
        const char *part = index_seeds[i].part;
        size = seeds_read("index", index_seeds[i].name, data, sizeof data);
        assert_true(size > 0);
        if ((index_load(ctx, data, size) == TSH_OK) != !part ||
            (part && !strstr(tsh_last_error(ctx)->message, part)))
            fail_msg("%s: %s", index_seeds[i].name, tsh_last_error(ctx)->message);
        tsh_clear_error(ctx);
        assert_int_equal(LLVMFuzzerTestOneInput(data, size), 0);
    }
    assert_int_equal(LLVMFuzzerTestOneInput(data, 0), 0);
    tsh_close(ctx);
}

/* Takes time in proportion to its tensors: less than 20 s on any machine, 1 s on most. */
static void a_million_tensors_are_quick(void **state) {
    enum { TENSORS_LISTED = 1000000, LINE = 48 };
    char *text = (char *)malloc((size_t)TENSORS_LISTED * LINE + 64);
    tsh_ctx *ctx = index_open();
    const int64_t begin = tsh_now();
    size_t n;
    int i;
    (void)state;
    assert_non_null(text);
    n = (size_t)sprintf(text, "{\"weight_map\":{");
    for (i = 0; i < TENSORS_LISTED; i++)
        n += (size_t)sprintf(text + n, "\"layers.%d.w\":\"%c.safetensors\",",
                             (int)((int64_t)i * 7919 % TENSORS_LISTED), "ab"[i % 2]);
    n += (size_t)sprintf(text + n, "\"a.weight\":\"a.safetensors\",\"a.bias\":\"b.safetensors\"}}");
    assert_int_equal(index_load(ctx, (const uint8_t *)text, n), TSH_ERR_IO);
    if (!strstr(tsh_last_error(ctx)->message, "places \"layers.0.w\" in \"a.safetensors\", which"))
        fail_msg("%s", tsh_last_error(ctx)->message);
    assert_true(tsh_now() - begin < INT64_C(20000000000));
    tsh_clear_error(ctx);
    tsh_close(ctx);
    free(text);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_index_is_read),
                                       cmocka_unit_test(a_million_tensors_are_quick)};
    return cmocka_run_group_tests_name("fuzz seeds of indices", tests, NULL, NULL);
}
