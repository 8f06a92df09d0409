/* For test_consumer.py: a program whose tsh_real is not the library's, and one of version 0.1, are
 * refused by tsh_open and the runners. Compiled against libtshard.so with a TSHARD_REAL of its own,
 * or against a library of another version. Prints each sentence. */
#include "tshard.h"
#include "backends/tshard_threads.h"
#include <stdio.h>

static int called;

static int rank_main(tsh_ctx *ctx, void *user) {
    (void)ctx, (void)user;
    called++;
    return 0;
}

static void print(const char *message, void *user) {
    (void)user;
    (void)printf("logged: %s\n", message);
}

/* A logger of version 0.1. */
static void print_old(void *user, const char *message) {
    print(message, user);
}

int main(void) {
    const tsh_desc desc = {.logger = {print, NULL}};
    const tsh_desc was = {.logger = {(void (*)(const char *, void *))print_old, NULL}};
    tsh_ctx *ctx = NULL, *old = NULL;
    tsh_comm comm = {0};
    tsh_error error = {TSH_OK, -1, ""};
    (void)printf("open %s\n", tsh_result_name(tsh_open(&desc, &ctx)));
    (void)printf("kept: %s\n", tsh_last_error(ctx)->message);
    (void)printf("run %d\n", tsh_run(&desc, rank_main, NULL));
    (void)printf("run_on %d\n", tsh_run_on(&comm, &desc, rank_main, NULL, &error));
    (void)printf("given: %s\n", error.message);
    (void)printf("threads_run %d\n", tsh_threads_run(2, &desc, rank_main, NULL));
    /* what a program of 0.1 calls, by a link or dlsym */
    (void)printf("old open %s\n", tsh_result_name((tsh_open)(NULL, &old)));
    (void)printf("kept: %s\n", tsh_last_error(old)->message);
    (void)printf("old run %d\n", (tsh_run)(&was, rank_main, NULL));
    (void)printf("old run_on %d\n", (tsh_run_on)(&comm, &was, rank_main, NULL, NULL));
    (void)printf("old threads_run %d\n", (tsh_threads_run)(2, &was, rank_main, NULL));
    (void)printf("called %d\n", called);
    tsh_close(ctx);
    tsh_close(old);
    return 0;
}
