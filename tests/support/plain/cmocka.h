/* cmocka.h - what the tests use of cmocka, for compilers of other processors, whose libraries are
 * seldom installed, and under MPI: the first assertion that fails ends the program. Only `make
 * test-arm` and `make test-mpi` put this folder on the path. */
#ifndef TSHARD_TESTS_PLAIN_H
#define TSHARD_TESTS_PLAIN_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct CMUnitTest {
    const char *name;
    void (*run)(void **state);
};

#define cmocka_unit_test(function)                                                                 \
    { #function, function }

#ifdef TESTS_MPI
#include "../mpi_world.h"
#define PLAIN_COUNTS (mpi_rank() == 0)
#else
#define PLAIN_COUNTS 1
#endif

#define fail_msg(...)                                                                              \
    do {                                                                                           \
        if (!PLAIN_COUNTS) break;                                                                  \
        printf("%s:%d: ", __FILE__, __LINE__);                                                     \
        printf(__VA_ARGS__);                                                                       \
        printf("\n");                                                                              \
        exit(1);                                                                                   \
    } while (0)
#define assert_true(x)                                                                             \
    do {                                                                                           \
        if (!(x)) fail_msg("%s", #x);                                                              \
    } while (0)
#define assert_false(x)                 assert_true(!(x))
#define assert_null(x)                  assert_true((x) == NULL)
#define assert_non_null(x)              assert_true((x) != NULL)
#define assert_ptr_equal(a, b)          assert_true((a) == (b))
#define assert_ptr_not_equal(a, b)      assert_true((a) != (b))
#define assert_int_equal(a, b)          assert_true((long long)(a) == (long long)(b))
#define assert_int_not_equal(a, b)      assert_true((long long)(a) != (long long)(b))
#define assert_in_range(x, low, high)   assert_true((x) >= (low) && (x) <= (high))
#define assert_string_equal(a, b)       assert_true(strcmp(a, b) == 0)
#define assert_memory_equal(a, b, size) assert_true(memcmp(a, b, size) == 0)
#define print_message                   printf

static int cmocka_run_all(const struct CMUnitTest *tests, size_t count, int (*setup)(void **),
                          int (*teardown)(void **)) {
    size_t i;
    void *state = NULL;
    if (setup && setup(&state)) fail_msg("%s", "setup");
    for (i = 0; i < count; i++) {
        printf("%s\n", tests[i].name);
        (void)fflush(stdout);
        tests[i].run(&state);
    }
    if (teardown && teardown(&state)) fail_msg("%s", "teardown");
    printf("%d passed\n", (int)count);
    return 0;
}

#define cmocka_run_group_tests(tests, setup, teardown)                                             \
    cmocka_run_all(tests, sizeof(tests) / sizeof *(tests), setup, teardown)
#define cmocka_run_group_tests_name(name, tests, setup, teardown)                                  \
    cmocka_run_group_tests(tests, setup, teardown)

#endif
