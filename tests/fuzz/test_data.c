/* Every seed of fuzz_data.c with every chat template, whole and cut. */
#if !defined(_POSIX_C_SOURCE)
#define _POSIX_C_SOURCE 200809L /* opendir */
#endif
#include "fuzz_data.c"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include "../support/seeds.h"

static int data_taken; /* number of inputs that were read without an error */

static void data_seed(const char *name, uint8_t *data, size_t size) {
    (void)name;
    assert_true(size >= 1);
    for (int i = 0; i < 100; i += 3) {
        data[0] = (uint8_t)i;
        data_taken += data_take(data, size);
        (void)data_take(data, size - size / 3);
    }
}

static void every_seed_is_read(void **state) {
    int seeds;
    (void)state;
    seeds = seeds_each("data", data_seed);
    assert_true(seeds >= 12 && data_taken > 10 * seeds);
    assert_int_equal(data_take(NULL, 0), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_seed_is_read)};
    return cmocka_run_group_tests_name("fuzz seeds", tests, NULL, NULL);
}
