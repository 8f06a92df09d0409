/* The tests that every backend passes, on the backend of examples/05_write_a_backend.c. A backend of
 * your own needs net_prepare(ranks), called before the processes are made, and net_open(rank, ranks,
 * comm, error), called in each. */
#define main example_main
#include "../../examples/05_write_a_backend.c"
#undef main

#define TESTS_OWN
#include "../support/processes.h"
#include "../support/collectives.h"
#include "../support/comm_tests.h"

static void test_example(void **state) {
    (void)state;
    (void)fflush(NULL);
    assert_int_equal(example_main(), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {COMM_TESTS, cmocka_unit_test(test_example)};
    comm_way = WORLD_OWN;
    return cmocka_run_group_tests_name("comm/own_backend", tests, NULL, NULL);
}
