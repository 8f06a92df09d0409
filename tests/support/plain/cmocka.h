/* cmocka.h - what the tests use of cmocka, for where that is not installed: on a bare machine, for
 * other processors and systems, and under MPI. It reports in cmocka's words. An assertion that
 * fails ends its test, and under MPI the program. The Makefile puts this folder on the path where
 * it is needed. */
#ifndef TSHARD_TESTS_PLAIN_H
#define TSHARD_TESTS_PLAIN_H

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct CMUnitTest {
    const char *name;
    void (*run)(void **state);
    int (*before)(void **state);
    int (*after)(void **state);
};

#define cmocka_unit_test(function) cmocka_unit_test_setup_teardown(function, NULL, NULL)
#define cmocka_unit_test_teardown(function, after)                                                 \
    cmocka_unit_test_setup_teardown(function, NULL, after)
#define cmocka_unit_test_setup_teardown(function, before, after)                                   \
    { #function, function, before, after }

typedef enum plain_end { PLAIN_PASSED, PLAIN_FAILED, PLAIN_SKIPPED, PLAIN_ENDS } plain_end;

#ifdef TESTS_MPI
#include "../mpi_world.h"
#define PLAIN_COUNTS     (mpi_rank() == 0)
#define PLAIN_LEAVE(end) exit(1)
#else
static jmp_buf plain_test; /* where a test that does not reach its end goes on */
#define PLAIN_COUNTS     1
#define PLAIN_LEAVE(end) longjmp(plain_test, (end))
#define skip()           PLAIN_LEAVE(PLAIN_SKIPPED) /* not under MPI: only this process would */
#endif

#define fail_msg(...)                                                                              \
    do {                                                                                           \
        if (!PLAIN_COUNTS) break;                                                                  \
        printf("%s:%d: ", __FILE__, __LINE__);                                                     \
        printf(__VA_ARGS__);                                                                       \
        printf("\n");                                                                              \
        PLAIN_LEAVE(PLAIN_FAILED);                                                                 \
    } while (0)
#define assert_true(x)                                                                             \
    do {                                                                                           \
        if (!(x)) fail_msg("%s", #x);                                                              \
    } while (0)
#define assert_false(x)                  assert_true(!(x))
#define assert_null(x)                   assert_true((x) == NULL)
#define assert_non_null(x)               assert_true((x) != NULL)
#define assert_ptr_equal(a, b)           assert_true((a) == (b))
#define assert_ptr_not_equal(a, b)       assert_true((a) != (b))
#define assert_int_equal(a, b)           assert_true((long long)(a) == (long long)(b))
#define assert_int_not_equal(a, b)       assert_true((long long)(a) != (long long)(b))
#define assert_in_range(x, low, high)    assert_true((x) >= (low) && (x) <= (high))
#define assert_string_equal(a, b)        assert_true(strcmp(a, b) == 0)
#define assert_memory_equal(a, b, size)  assert_true(memcmp(a, b, size) == 0)
#define assert_memory_not_equal(a, b, n) assert_true(memcmp(a, b, n) != 0)
#define print_message                    printf

#ifdef TESTS_MPI
static int plain_here, plain_elsewhere; /* parts of the test that ran, that another mpirun runs */

static plain_end plain_run(const struct CMUnitTest *test, void **state) {
    plain_here = plain_elsewhere = 0;
    if (test->before && test->before(state)) fail_msg("%s", "setup");
    test->run(state);
    if (test->after && test->after(state)) fail_msg("%s", "teardown");
    if (!plain_elsewhere || plain_here) return PLAIN_PASSED;
    printf("skip: all of it takes another number of processes\n");
    return PLAIN_SKIPPED;
}
#else
static plain_end plain_run(const struct CMUnitTest *test, void **state) {
    volatile plain_end end = PLAIN_PASSED;
    const int left = setjmp(plain_test);
    if (left)
        end = (plain_end)left;
    else if (test->before && test->before(state))
        end = PLAIN_FAILED;
    else
        test->run(state);
    if (test->after && test->after(state)) end = PLAIN_FAILED;
    return end;
}
#endif

static int cmocka_run_all(const char *group, const struct CMUnitTest *tests, size_t count,
                          int (*setup)(void **), int (*teardown)(void **)) {
    static const char *const word[] = {"      OK", "FAILED", "SKIPPED"};
    int ends[PLAIN_ENDS] = {0};
    size_t i;
    void *state = NULL;
    if (setup && setup(&state)) {
        printf("[  FAILED  ] GROUP SETUP\n[  FAILED  ] %s: 1 test(s), listed below:\n", group);
        return 1;
    }
    for (i = 0; i < count; i++) {
        plain_end end;
        printf("[ RUN      ] %s\n", tests[i].name);
        (void)fflush(stdout);
        end = plain_run(&tests[i], &state);
        ends[end]++;
        printf("[ %-8s ] %s\n", word[end], tests[i].name);
        (void)fflush(stdout);
    }
    if (teardown && teardown(&state)) {
        printf("%s: teardown failed\n", group);
        ends[PLAIN_FAILED]++;
    }
    printf("[  PASSED  ] %d test(s).\n", ends[PLAIN_PASSED]);
    for (i = PLAIN_FAILED; i < PLAIN_ENDS; i++)
        if (ends[i])
            printf("[  %-8s] %s: %d test(s), listed below:\n", word[i], group, ends[i]);
    return ends[PLAIN_FAILED];
}

#define cmocka_run_group_tests_name(name, tests, setup, teardown)                                  \
    cmocka_run_all(name, tests, sizeof(tests) / sizeof *(tests), setup, teardown)
#define cmocka_run_group_tests(tests, setup, teardown)                                             \
    cmocka_run_group_tests_name(#tests, tests, setup, teardown)

#endif
