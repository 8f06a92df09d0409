/* skip.h - a test that cannot run here says why, and counts as skipped, not as passed. Include it
 * after cmocka.h. */
#ifndef TSHARD_TESTS_SKIP_H
#define TSHARD_TESTS_SKIP_H

/* Ends the test. The reason, printf-style, is on the line "skip: ..." that tests/run.sh shows. */
#define SKIP(...)                                                                                  \
    do {                                                                                           \
        char skip_why[256];                                                                        \
        (void)snprintf(skip_why, sizeof skip_why, __VA_ARGS__);                                    \
        print_message("skip: %s\n", skip_why);                                                     \
        skip();                                                                                    \
    } while (0)

#endif
