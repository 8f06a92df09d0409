/* ranks_bench.h - what the programs that time collectives have in common; C99 and C++.
 *
 * Such a program starts its ranks, then answers commands, one line each, until its input ends:
 *
 *     allreduce|allgather|reduce_scatter|new BYTES CALLS
 *
 * `new` is an all-reduce of what the rank has just written: it copies the values to its buffer
 * before each call, as a layer computes them. BYTES is the whole f32 buffer: what an all-gather
 * fills and a reduce-scatter is given, at least one element per rank. The answer is microseconds
 * per call, of the slowest rank; with CALLS 0 it says whether the result is "right" or "wrong".
 * After "failed" the program ends. Between commands every rank sleeps in read(), so that programs
 * which are compared take turns within milliseconds.
 */
#ifndef TSHARD_TESTS_RANKS_BENCH_H
#define TSHARD_TESTS_RANKS_BENCH_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h> /* waitpid */
#include <time.h>     /* clock_gettime */
#include <unistd.h>   /* alarm, fork, pipe, read, write */

enum { BENCH_ALLREDUCE, BENCH_ALLGATHER, BENCH_REDUCE_SCATTER, BENCH_NEW, BENCH_KINDS };
enum { BENCH_RANKS = 64, BENCH_LINE = 64, BENCH_SECONDS = 60 };

/* One rank. */
typedef struct bench {
    int rank, ranks;
    int in;                 /* commands come from here ...                                */
    int relay[BENCH_RANKS]; /* ... and rank 0 passes them on to the others; -1: not there */
    /* A collective of `count` elements in all; says where its result lies, NULL if it failed.
     * In an all-reduce send is recv; send may be overwritten. */
    const float *(*call)(struct bench *b, int kind, float *send, float *recv, long count);
    void *user;
    /* Allocates and frees buffers, as tsh_allocator_fn does; NULL: malloc and free. */
    void *(*allocate)(void *ptr, size_t old_size, size_t new_size, size_t align, void *memory);
    void *memory; /* of allocate */
    long bytes;   /* of each buffer */
    float *send, *recv;
    float shared[BENCH_RANKS]; /* what ranks tell each other */
} bench;

static inline double bench_now_us(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

/* Frees a buffer, or NULL, and allocates one of other size, 0: none. */
static inline float *bench_buffer(bench *b, float *old, long bytes) {
    if (b->allocate && old) (void)b->allocate(old, (size_t)b->bytes, 0, 64, b->memory);
    if (!b->allocate) free(old);
    if (!bytes) return NULL;
    return (float *)(b->allocate ? b->allocate(NULL, 0, (size_t)bytes, 64, b->memory)
                                 : malloc((size_t)bytes));
}

static inline int bench_room(bench *b, long bytes) {
    if (bytes <= b->bytes) return 1;
    b->send = bench_buffer(b, b->send, bytes);
    b->recv = bench_buffer(b, b->recv, bytes);
    b->bytes = b->send && b->recv ? bytes : 0;
    if (b->send) memset(b->send, 0, (size_t)b->bytes); /* pages are there before the clock runs */
    if (b->recv) memset(b->recv, 0, (size_t)b->bytes);
    return b->bytes != 0;
}

static inline int bench_call(bench *b, int kind, long count) {
    if (kind == BENCH_NEW) memcpy(b->recv, b->send, (size_t)count * sizeof(float));
    if (kind == BENCH_NEW) kind = BENCH_ALLREDUCE;
    return b->call(b, kind, kind == BENCH_ALLREDUCE ? b->recv : b->send, b->recv, count) != NULL;
}

/* Every rank learns the others' values. This is a barrier, too. */
static inline int bench_share(bench *b, float mine) {
    int r;
    for (r = 0; r < b->ranks; r++) b->shared[r] = r == b->rank ? mine : 0;
    return b->call(b, BENCH_ALLREDUCE, b->shared, b->shared, b->ranks) != NULL;
}

/* Microseconds per call, of the slowest rank; negative: a call failed. */
static inline double bench_time(bench *b, int kind, long count, long calls) {
    float worst = 0;
    double start;
    int r, ok = 1;
    long i;
    for (i = 0; ok && i <= calls / 8; i++) ok &= bench_call(b, kind, count);
    ok &= bench_share(b, 0);
    start = bench_now_us();
    for (i = 0; ok && i < calls; i++) ok &= bench_call(b, kind, count);
    ok &= bench_share(b, (float)((bench_now_us() - start) / (double)calls));
    for (r = 0; r < b->ranks; r++) worst = b->shared[r] > worst ? b->shared[r] : worst;
    return ok ? (double)worst : -1;
}

/* Element i of rank r: small integers, so that sums are exact. */
static inline float bench_value(int r, long i) {
    return (float)((i % 61 + 1) * (r + 1));
}

/* What a call on every rank's bench_value leaves in element i of the result. */
static inline float bench_expected(const bench *b, int kind, long count, long i) {
    const long piece = count / b->ranks;
    const float sum_of_ranks = (float)(b->ranks * (b->ranks + 1) / 2);
    if (kind == BENCH_ALLGATHER) return bench_value((int)(i / piece), i);
    return sum_of_ranks * bench_value(0, kind == BENCH_REDUCE_SCATTER ? b->rank * piece + i : i);
}

/* One call with values that are known; *right if the result is, on every rank. */
static inline int bench_check(bench *b, int kind, long count, int *right) {
    const long piece = count / b->ranks, first = kind == BENCH_ALLGATHER ? b->rank * piece : 0;
    const float *got;
    long i, good = 0, all = kind == BENCH_REDUCE_SCATTER ? piece : count;
    int r, ok;
    for (i = 0; i < count; i++) b->send[i] = bench_value(b->rank, first + i);
    for (i = 0; i < count; i++) b->recv[i] = kind == BENCH_ALLREDUCE ? b->send[i] : -1;
    got = b->call(b, kind, kind == BENCH_ALLREDUCE ? b->recv : b->send, b->recv, count);
    for (i = 0; got && i < all; i++) good += got[i] == bench_expected(b, kind, count, i);
    memset(b->send, 0, (size_t)count * sizeof(float)); /* repeated sums stay finite */
    memset(b->recv, 0, (size_t)count * sizeof(float));
    ok = bench_share(b, good == all ? 1 : 0) && got;
    for (r = 0, *right = 1; r < b->ranks; r++) *right &= b->shared[r] > 0;
    return ok;
}

/* Obeys one line; 0 after a failure. */
static inline int bench_obey(bench *b, const char *line) {
    static const char *const names[BENCH_KINDS] = {"allreduce", "allgather", "reduce_scatter",
                                                   "new"};
    char name[16] = "";
    long bytes = 0, calls = 0, count;
    double us = 0;
    int kind, ok, right = 0;
    if (sscanf(line, "%15s %ld %ld", name, &bytes, &calls) != 3 || bytes < 4 || calls < 0) return 0;
    for (kind = 0; kind < BENCH_KINDS && strcmp(name, names[kind]) != 0;) kind++;
    count = bytes / 4 < b->ranks && kind != BENCH_ALLREDUCE ? b->ranks : bytes / 4;
    if (kind == BENCH_KINDS || !bench_room(b, count * 4)) return 0;
    if (calls == 0) {
        ok = bench_check(b, kind, count, &right);
    } else {
        us = bench_time(b, kind, count, calls);
        ok = us >= 0;
    }
    if (b->rank != 0) return ok;
    if (!ok || calls == 0)
        (void)printf("%s\n", !ok ? "failed" : right ? "right" : "wrong");
    else
        (void)printf("%.3f\n", us);
    (void)fflush(stdout);
    return ok;
}

/* A line, passed on to the other ranks; 0 at the end. Sleeps until it comes. */
static inline int bench_next(bench *b, char line[BENCH_LINE]) {
    size_t n = 0;
    int r;
    do {
        if (n + 1 >= BENCH_LINE || read(b->in, line + n, 1) != 1) return 0;
    } while (line[n++] != '\n');
    line[n] = 0;
    for (r = 0; r < b->ranks; r++)
        if (b->relay[r] >= 0 && write(b->relay[r], line, n) != (ssize_t)n) return 0;
    return 1;
}

/* Ends the other ranks' input. */
static inline void bench_hang_up(bench *b) {
    int r;
    for (r = 0; r < b->ranks; r++) {
        if (b->relay[r] >= 0) (void)close(b->relay[r]);
        b->relay[r] = -1;
    }
}

/* Obeys until the input ends; 0 if no call failed. A rank that takes too long is ended. */
static inline int bench_serve(bench *b) {
    char line[BENCH_LINE];
    int ok = 1;
    (void)alarm(0);
    while (ok && bench_next(b, line)) {
        (void)alarm(BENCH_SECONDS);
        ok = bench_obey(b, line);
        (void)alarm(0);
    }
    bench_hang_up(b);
    b->send = bench_buffer(b, b->send, 0);
    b->recv = bench_buffer(b, b->recv, 0);
    (void)alarm(BENCH_SECONDS); /* leaving takes no longer either */
    return !ok;
}

/* Ranks that read rank 0's standard input through pipes. */
static inline int bench_pipes(bench *all, int ranks) {
    int r, ends[2];
    memset(all, 0, BENCH_RANKS * sizeof *all);
    memset(all[0].relay, -1, sizeof all[0].relay);
    for (r = 0; r < ranks; r++) {
        memset(all[r].relay, -1, sizeof all[r].relay);
        all[r].rank = r;
        all[r].ranks = ranks;
        if (r == 0) continue; /* its input is descriptor 0 */
        if (pipe(ends) != 0) return 0;
        all[r].in = ends[0];
        all[0].relay[r] = ends[1];
    }
    return 1;
}

/* Runs fn as processes, rank 0 in this one; 0 if all returned 0. */
static inline int bench_processes(int ranks, int (*fn)(bench *b, void *user), void *user) {
    bench all[BENCH_RANKS];
    pid_t children[BENCH_RANKS];
    int r, status, failed;
    if (ranks < 2 || ranks > BENCH_RANKS || !bench_pipes(all, ranks)) return 2;
    for (r = 1; r < ranks; r++) {
        children[r] = fork();
        if (children[r] < 0) return 2; /* the others' input ends with this process */
        if (children[r] > 0) continue;
        (void)alarm(BENCH_SECONDS);
        bench_hang_up(&all[0]);
        _exit(fn(&all[r], user));
    }
    (void)alarm(BENCH_SECONDS);
    failed = fn(&all[0], user);
    bench_hang_up(&all[0]);
    for (r = 1; r < ranks; r++)
        if (waitpid(children[r], &status, 0) != children[r] || status != 0) failed = 1;
    return failed;
}

#ifdef TSHARD_H /* where tshard.h is included before */
/* user is a tsh_comm. */
static inline const float *bench_tshard_call(bench *b, int kind, float *send, float *recv,
                                             long count) {
    tsh_comm *comm = (tsh_comm *)b->user;
    int64_t pieces[BENCH_RANKS];
    tsh_result result;
    int r;
    for (r = 0; r < b->ranks; r++) pieces[r] = count / b->ranks;
    if (kind == BENCH_ALLREDUCE)
        result = tsh_allreduce(comm, recv, count, TSH_F32, TSH_SUM);
    else if (kind == BENCH_ALLGATHER)
        result = tsh_allgather(comm, send, recv, pieces, 1, TSH_F32);
    else
        result = tsh_reduce_scatter(comm, send, recv, pieces, 1, TSH_F32, TSH_SUM);
    return result == TSH_OK ? recv : NULL;
}
#endif

#endif
