/* cmocka.h - what the tests use of cmocka, for where that is not installed: on a bare machine, for
 * the compilers of other processors, and under MPI. It reports in cmocka's words, but the first
 * assertion that fails ends the program. The Makefile puts this folder on the path where it is
 * needed. */
#ifndef TSHARD_TESTS_PLAIN_H
#define TSHARD_TESTS_PLAIN_H

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct CMUnitTest {
    const char *name;
    void (*run)(void **state);
    int (*after)(void **state);
};

#define cmocka_unit_test(function) cmocka_unit_test_teardown(function, NULL)
#define cmocka_unit_test_teardown(function, after)                                                 \
    { #function, function, after }

#ifdef TESTS_MPI
#include "../mpi_world.h"
#define PLAIN_COUNTS (mpi_rank() == 0)
#define PLAIN_FAILED "" /* the script that started mpirun counts */
#else
#define PLAIN_COUNTS 1
#define PLAIN_FAILED "[  FAILED  ] tests: 1 test(s), listed below:\n"
#endif

#define fail_msg(...)                                                                              \
    do {                                                                                           \
        if (!PLAIN_COUNTS) break;                                                                  \
        printf("%s:%d: ", __FILE__, __LINE__);                                                     \
        printf(__VA_ARGS__);                                                                       \
        printf("\n" PLAIN_FAILED);                                                              \
        exit(1);                                                                                   \
    } while (0)
#define skip() longjmp(plain_skip, 1)
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

static jmp_buf plain_skip; /* where skip() returns to; only the thread that runs the tests calls it */

/* Runs one test; 1 if it called skip(). */
static int plain_run(const struct CMUnitTest *test, void **state) {
    if (setjmp(plain_skip)) return 1;
    test->run(state);
    return 0;
}

static int cmocka_run_all(const struct CMUnitTest *tests, size_t count, int (*setup)(void **),
                          int (*teardown)(void **)) {
    size_t i;
    int skipped = 0;
    void *state = NULL;
    if (setup && setup(&state)) fail_msg("%s", "setup");
    for (i = 0; i < count; i++) {
        printf("[ RUN      ] %s\n", tests[i].name);
        (void)fflush(stdout);
        if (plain_run(&tests[i], &state)) {
            skipped++;
        } else {
            printf("[       OK ] %s\n", tests[i].name);
        }
        if (tests[i].after && tests[i].after(&state)) fail_msg("%s", "teardown");
    }
    if (teardown && teardown(&state)) fail_msg("%s", "teardown");
    printf("[  PASSED  ] %d test(s).\n", (int)count - skipped);
    if (skipped) printf("[  SKIPPED ] tests: %d test(s), listed below:\n", skipped);
    return 0;
}

#define cmocka_run_group_tests(tests, setup, teardown)                                             \
    cmocka_run_all(tests, sizeof(tests) / sizeof *(tests), setup, teardown)
#define cmocka_run_group_tests_name(name, tests, setup, teardown)                                  \
    cmocka_run_group_tests(tests, setup, teardown)

#endif
