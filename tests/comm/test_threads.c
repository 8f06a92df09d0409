/* The threads backend: every kind of collective against a reference that adds in the documented
 * order, bit for bit; many requests at once; groups; and every way in which a world may end. */
#define TSHARD_IMPLEMENTATION
#include "../../backends/tshard_threads.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <cmocka.h>

/* ------------------------------------------------------------------ harness */

typedef struct job job;
typedef void (*rank_fn)(job *j);
struct job {
    tsh_comm comm;
    int rank, ranks;
    rank_fn fn;
    const void *user;
    tsh_threads_world *world;
    char failure[256]; /* the first one */
    tsh_error verdict;
    uint64_t hash;
    double ms;
    pthread_t thread;
};

#define MAX_RANKS 64
#define LIMIT_MS  500 /* to find a mismatch: 100 on an idle machine */

/* cmocka's assertions leave by longjmp, which must not happen outside the main thread. */
#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition) && !j->failure[0])                                                        \
            (void)snprintf(j->failure, sizeof j->failure, "rank %d, line %d: %s", j->rank,         \
                           __LINE__, #condition);                                                  \
    } while (0)

static double now_ms(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

static void sleep_ms(long ms) {
    struct timespec t;
    t.tv_sec = ms / 1000;
    t.tv_nsec = ms % 1000 * 1000000;
    (void)nanosleep(&t, NULL);
}

static void *thread_main(void *argument) {
    job *j = (job *)argument;
    if (tsh_threads_comm(j->world, j->rank, &j->comm) != TSH_OK) {
        (void)snprintf(j->failure, sizeof j->failure, "rank %d has no comm", j->rank);
        return NULL;
    }
    j->fn(j);
    tsh_comm_close(&j->comm);
    return NULL;
}

/* Runs fn on `ranks` threads; the jobs are static so that tests may look at them. */
static job jobs[MAX_RANKS];
static void world_run(int ranks, rank_fn fn, const void *user) {
    tsh_threads_world *world = NULL;
    assert_int_equal(tsh_threads_world_new(ranks, &world), TSH_OK);
    memset(jobs, 0, sizeof jobs);
    for (int r = 0; r < ranks; r++) {
        jobs[r].rank = r;
        jobs[r].ranks = ranks;
        jobs[r].fn = fn;
        jobs[r].user = user;
        jobs[r].world = world;
        assert_int_equal(pthread_create(&jobs[r].thread, NULL, thread_main, &jobs[r]), 0);
    }
    for (int r = 0; r < ranks; r++) assert_int_equal(pthread_join(jobs[r].thread, NULL), 0);
    tsh_threads_world_free(world);
    for (int r = 0; r < ranks; r++)
        if (jobs[r].failure[0]) fail_msg("%d ranks: %s", ranks, jobs[r].failure);
}

/* Every rank got the same verdict: this code, this rank, one sentence. */
static void assert_verdict(int ranks, tsh_result code, int rank) {
    for (int r = 0; r < ranks; r++) {
        assert_int_equal(jobs[r].verdict.code, code);
        assert_string_equal(jobs[r].verdict.message, jobs[0].verdict.message);
        if (jobs[r].verdict.rank != rank)
            fail_msg("rank %d is blamed, not %d: %s", jobs[r].verdict.rank, rank,
                     jobs[r].verdict.message);
    }
}

/* ---------------------------------------------------------------- reference */

typedef union value {
    float f32;
    double f64;
    int32_t i32;
    int64_t i64;
} value;

static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 31)) * UINT64_C(0x7FB5D329728EA185);
    x = (x ^ (x >> 27)) * UINT64_C(0x81DADEF4BC2DD44D);
    return x ^ (x >> 33);
}

/* Element i of the message of `rank`: floats in [-1, 1), integers of all sizes. */
static value element(tsh_dtype dtype, int rank, int64_t i) {
    uint64_t bits = mix((uint64_t)i * 1000003u + (uint64_t)rank + 1);
    double real = (double)(bits >> 11) / 4503599627370496.0 - 1.0;
    value v;
    memset(&v, 0, sizeof v);
    switch (dtype) {
    case TSH_F32: v.f32 = (float)real; break;
    case TSH_F64: v.f64 = real; break;
    case TSH_I32: memcpy(&v.i32, &bits, sizeof v.i32); break;
    case TSH_I64: memcpy(&v.i64, &bits, sizeof v.i64); break;
    }
    return v;
}

#define APPLY(field, SUM, PROD)                                                                    \
    switch (op) {                                                                                  \
    case TSH_SUM:                                                                                  \
    case TSH_AVG: a.field = SUM; break;                                                            \
    case TSH_PROD: a.field = PROD; break;                                                          \
    case TSH_MIN: a.field = b.field < a.field ? b.field : a.field; break;                          \
    case TSH_MAX: a.field = b.field > a.field ? b.field : a.field; break;                          \
    }

static value combine(tsh_dtype dtype, tsh_redop op, value a, value b) {
    switch (dtype) {
    case TSH_F32: APPLY(f32, a.f32 + b.f32, a.f32 * b.f32) break;
    case TSH_F64: APPLY(f64, a.f64 + b.f64, a.f64 * b.f64) break;
    case TSH_I32:
        APPLY(i32, (int32_t)((uint32_t)a.i32 + (uint32_t)b.i32),
              (int32_t)((uint32_t)a.i32 * (uint32_t)b.i32))
        break;
    case TSH_I64:
        APPLY(i64, (int64_t)((uint64_t)a.i64 + (uint64_t)b.i64),
              (int64_t)((uint64_t)a.i64 * (uint64_t)b.i64))
        break;
    }
    return a;
}

/* x[k+1] + x[k+2] + ... + x[k+P] of element i. */
static value ordered(tsh_dtype dtype, tsh_redop op, int ranks, int k, int64_t i) {
    value acc = element(dtype, (k + 1) % ranks, i);
    for (int n = 2; n <= ranks; n++)
        acc = combine(dtype, op, acc, element(dtype, (k + n) % ranks, i));
    if (op == TSH_AVG && dtype == TSH_F32) acc.f32 /= (float)ranks;
    if (op == TSH_AVG && dtype == TSH_F64) acc.f64 /= (double)ranks;
    return acc;
}

static int same(tsh_dtype dtype, const void *buffer, int64_t i, value expected) {
    size_t width = tsh_dtype_size(dtype);
    return memcmp((const char *)buffer + (size_t)i * width, &expected, width) == 0;
}

static void *filled(tsh_dtype dtype, int rank, int64_t n) {
    size_t width = tsh_dtype_size(dtype);
    char *p = (char *)malloc((size_t)n * width + 1);
    for (int64_t i = 0; p && i < n; i++) {
        value v = element(dtype, rank, i);
        memcpy(p + (size_t)i * width, &v, width);
    }
    return p;
}

static int64_t total(const int64_t *counts, int n) {
    int64_t sum = 0;
    for (int i = 0; i < n; i++) sum += counts[i];
    return sum;
}

/* --------------------------------------------------------------------- grid */

typedef struct grid_case {
    int64_t count, blocks;
    tsh_dtype dtype;
    tsh_redop op;
    int in_place;
} grid_case;

static void grid_allreduce(job *j, grid_case c) {
    tsh_coll coll = tsh_coll_make(TSH_ALLREDUCE, c.dtype);
    void *send = filled(c.dtype, j->rank, c.count);
    void *recv = c.in_place ? send : filled(c.dtype, 99, c.count);
    int64_t chunk = (c.count + j->ranks - 1) / j->ranks, wrong = 0;
    tsh_req req;
    coll.send = send;
    coll.recv = recv;
    coll.count = c.count;
    coll.redop = c.op;
    CHECK(tsh_start(&j->comm, &coll, &req) == TSH_OK);
    CHECK(tsh_wait(&j->comm, req) == TSH_OK);
    for (int64_t i = 0; i < c.count; i++)
        wrong += !same(c.dtype, recv, i, ordered(c.dtype, c.op, j->ranks, (int)(i / chunk), i));
    CHECK(wrong == 0);
    if (recv != send) free(recv);
    free(send);
}

/* Uneven, some empty. */
static void grid_counts(int ranks, int64_t count, int64_t *counts) {
    for (int r = 0; r < ranks; r++) counts[r] = count == 0 || r % 3 == 1 ? 0 : count + r;
}

static void grid_reduce_scatter(job *j, grid_case c) {
    int64_t counts[MAX_RANKS], whole, before, wrong = 0;
    void *send, *recv;
    grid_counts(j->ranks, c.count, counts);
    whole = total(counts, j->ranks);
    before = total(counts, j->rank);
    send = filled(c.dtype, j->rank, whole * c.blocks);
    recv = filled(c.dtype, 99, counts[j->rank] * c.blocks);
    CHECK(tsh_reduce_scatter(&j->comm, send, recv, counts, c.blocks, c.dtype, c.op) == TSH_OK);
    for (int64_t b = 0; b < c.blocks; b++)
        for (int64_t i = 0; i < counts[j->rank]; i++)
            wrong += !same(c.dtype, recv, b * counts[j->rank] + i,
                           ordered(c.dtype, c.op, j->ranks, j->rank, b * whole + before + i));
    CHECK(wrong == 0);
    free(send);
    free(recv);
}

static void grid_allgather(job *j, grid_case c) {
    int64_t counts[MAX_RANKS], whole, wrong = 0;
    size_t width = tsh_dtype_size(c.dtype);
    char *send, *recv;
    int in_place = c.in_place && c.blocks == 1;
    grid_counts(j->ranks, c.count, counts);
    whole = total(counts, j->ranks);
    send = (char *)filled(c.dtype, j->rank, counts[j->rank] * c.blocks);
    recv = (char *)filled(c.dtype, 99, whole * c.blocks);
    if (in_place)
        memcpy(recv + (size_t)total(counts, j->rank) * width, send,
               (size_t)counts[j->rank] * width);
    CHECK(tsh_allgather(&j->comm, in_place ? recv + (size_t)total(counts, j->rank) * width : send,
                        recv, counts, c.blocks, c.dtype) == TSH_OK);
    for (int64_t b = 0; b < c.blocks; b++)
        for (int r = 0; r < j->ranks; r++)
            for (int64_t i = 0; i < counts[r]; i++)
                wrong += !same(c.dtype, recv, b * whole + total(counts, r) + i,
                               element(c.dtype, r, b * counts[r] + i));
    CHECK(wrong == 0);
    free(send);
    free(recv);
}

static int64_t alltoall_count(int64_t count, int from, int to) {
    return count == 0 || (from + to) % 3 == 1 ? 0 : count + from + 2 * to;
}

static void grid_alltoall(job *j, grid_case c) {
    int64_t out[MAX_RANKS], in[MAX_RANKS], its[MAX_RANKS], row, wrong = 0;
    void *send, *recv;
    for (int r = 0; r < j->ranks; r++) {
        out[r] = alltoall_count(c.count, j->rank, r);
        in[r] = alltoall_count(c.count, r, j->rank);
    }
    row = total(in, j->ranks);
    send = filled(c.dtype, j->rank, total(out, j->ranks) * c.blocks);
    recv = filled(c.dtype, 99, row * c.blocks);
    CHECK(tsh_alltoall(&j->comm, send, out, recv, in, c.blocks, c.dtype) == TSH_OK);
    for (int r = 0; r < j->ranks; r++) {
        for (int m = 0; m < j->ranks; m++) its[m] = alltoall_count(c.count, r, m);
        for (int64_t b = 0; b < c.blocks; b++)
            for (int64_t i = 0; i < in[r]; i++)
                wrong += !same(
                    c.dtype, recv, b * row + total(in, r) + i,
                    element(c.dtype, r, b * total(its, j->ranks) + total(its, j->rank) + i));
    }
    CHECK(wrong == 0);
    free(send);
    free(recv);
}

static void grid_broadcast(job *j, grid_case c) {
    int root = (int)(c.count + c.blocks) % j->ranks;
    void *buffer = filled(c.dtype, j->rank, c.count);
    int64_t wrong = 0;
    CHECK(tsh_broadcast(&j->comm, buffer, c.count, c.dtype, root) == TSH_OK);
    for (int64_t i = 0; i < c.count; i++)
        wrong += !same(c.dtype, buffer, i, element(c.dtype, root, i));
    CHECK(wrong == 0);
    free(buffer);
}

/* Round the ring; then between neighbours 0-1, 2-3, ... with send and recv. */
static void grid_pairwise(job *j, grid_case c) {
    int to = (j->rank + 1) % j->ranks, from = (j->rank + j->ranks - 1) % j->ranks;
    int partner = j->rank ^ 1;
    int64_t wrong = 0, mine = c.count + j->rank, its = c.count + from;
    void *send = filled(c.dtype, j->rank, mine), *recv = filled(c.dtype, 99, its + MAX_RANKS);
    CHECK(tsh_sendrecv(&j->comm, send, mine, to, recv, its, from, c.dtype) == TSH_OK);
    for (int64_t i = 0; i < its; i++) wrong += !same(c.dtype, recv, i, element(c.dtype, from, i));
    if (partner < j->ranks && j->rank % 2 == 0) {
        CHECK(tsh_send(&j->comm, send, mine, c.dtype, partner) == TSH_OK);
    } else if (partner < j->ranks) {
        its = c.count + partner;
        CHECK(tsh_recv(&j->comm, recv, its, c.dtype, partner) == TSH_OK);
        for (int64_t i = 0; i < its; i++)
            wrong += !same(c.dtype, recv, i, element(c.dtype, partner, i));
    }
    CHECK(wrong == 0);
    free(send);
    free(recv);
}

static int integer(tsh_dtype dtype) {
    return dtype == TSH_I32 || dtype == TSH_I64;
}

static void grid_one(job *j, grid_case c) {
    for (c.in_place = 0; c.in_place < 2; c.in_place++) {
        for (int op = TSH_SUM; op <= TSH_AVG; op++) {
            if (op == TSH_AVG && integer(c.dtype)) continue;
            c.op = (tsh_redop)op;
            grid_allreduce(j, c);
            if (!c.in_place)
                for (c.blocks = 1; c.blocks <= 3; c.blocks += 2) grid_reduce_scatter(j, c);
        }
        for (c.blocks = 1; c.blocks <= 3; c.blocks += 2) {
            grid_allgather(j, c);
            grid_alltoall(j, c);
            grid_broadcast(j, c);
        }
        grid_pairwise(j, c);
        CHECK(tsh_barrier(&j->comm) == TSH_OK);
    }
}

static void grid_rank(job *j) {
    static const int64_t counts[] = {0, 1, 7, 1000};
    grid_case c;
    memset(&c, 0, sizeof c);
    for (int n = 0; n < 4; n++) {
        for (int dtype = TSH_F32; dtype <= TSH_I64; dtype++) {
            c.count = counts[n];
            c.dtype = (tsh_dtype)dtype;
            grid_one(j, c);
        }
    }
    CHECK(j->comm.in_flight == 0);
}

static void test_grid(void **state) {
    static const int ranks[] = {1, 2, 3, 4, 7, 8};
    (void)state;
    for (int i = 0; i < 6; i++) world_run(ranks[i], grid_rank, NULL);
}

static void large_rank(job *j) {
    grid_case c;
    memset(&c, 0, sizeof c);
    c.count = 1000000;
    c.blocks = 1;
    grid_allreduce(j, c);
    c.in_place = 1;
    grid_allreduce(j, c);
    grid_broadcast(j, c);
    grid_pairwise(j, c);
    c.count = 200000;
    c.blocks = 3;
    grid_allgather(j, c);
    grid_reduce_scatter(j, c);
}

static void test_large(void **state) {
    (void)state;
    world_run(2, large_rank, NULL);
    world_run(3, large_rank, NULL);
}

/* ----------------------------------------------------------------- requests */

enum { MANY = 64, LENGTH = 300 };

/* 64 at once, small ones among large ones, waited for in another order on every rank. */
static void overlap_rank(job *j) {
    static const int strides[] = {1, 63, 37, 11};
    float *buffer[MANY];
    tsh_req req[MANY], more;
    for (int i = 0; i < MANY; i++) {
        buffer[i] = (float *)filled(TSH_F32, j->rank + i, LENGTH);
        CHECK(tsh_allreduce_start(&j->comm, buffer[i], i % 3 ? LENGTH : 5, TSH_F32, TSH_SUM,
                                  &req[i]) == TSH_OK);
    }
    CHECK(j->comm.in_flight == MANY);
    CHECK(tsh_allreduce_start(&j->comm, buffer[0], 1, TSH_F32, TSH_SUM, &more) == TSH_ERR_STATE);
    for (int n = 0; n < MANY; n++) {
        int i = (n * strides[j->rank % 4] + j->rank) % MANY, done = n % 5;
        while (n % 5 == 0 && !done) CHECK(tsh_test(&j->comm, req[i], &done) == TSH_OK);
        CHECK(tsh_wait(&j->comm, req[i]) == TSH_OK);
    }
    for (int i = 0; i < MANY; i++) {
        int64_t n = i % 3 ? LENGTH : 5, chunk = (n + j->ranks - 1) / j->ranks;
        for (int64_t e = 0; e < n; e++) {
            int k = (int)(e / chunk);
            float sum = element(TSH_F32, (k + 1) % j->ranks + i, e).f32;
            for (int r = 2; r <= j->ranks; r++)
                sum += element(TSH_F32, (k + r) % j->ranks + i, e).f32;
            CHECK(memcmp(&sum, &buffer[i][e], sizeof sum) == 0);
        }
        free(buffer[i]);
    }
}

static void test_overlap(void **state) {
    (void)state;
    world_run(2, overlap_rank, NULL);
    world_run(4, overlap_rank, NULL);
    world_run(7, overlap_rank, NULL);
}

/* One request stays open over a thousand others, and rank 0 runs ahead as far as it may. */
static void ahead_rank(job *j) {
    float first[200], x = 1;
    tsh_req req[MANY], open;
    for (int i = 0; i < 200; i++) first[i] = 1;
    CHECK(tsh_allreduce_start(&j->comm, first, 200, TSH_F32, TSH_SUM, &open) == TSH_OK);
    for (int round = 0; round < 20; round++) {
        for (int i = 0; i < MANY - 1; i++)
            CHECK(tsh_allreduce_start(&j->comm, &x, 0, TSH_F32, TSH_SUM, &req[i]) == TSH_OK);
        if (j->rank != 0 && round % 5 == 1) sleep_ms(2);
        for (int i = 0; i < MANY - 1; i++) {
            CHECK(tsh_wait(&j->comm, req[i]) == TSH_OK);
            if (j->rank == 0)
                CHECK(tsh_allreduce_start(&j->comm, &x, 0, TSH_F32, TSH_SUM, &req[i]) == TSH_OK);
        }
        for (int i = 0; j->rank != 0 && i < MANY - 1; i++)
            CHECK(tsh_allreduce_start(&j->comm, &x, 0, TSH_F32, TSH_SUM, &req[i]) == TSH_OK);
        for (int i = 0; i < MANY - 1; i++) CHECK(tsh_wait(&j->comm, req[i]) == TSH_OK);
    }
    CHECK(tsh_wait(&j->comm, open) == TSH_OK);
    for (int i = 0; i < 200; i++) CHECK(first[i] == (float)j->ranks);
}

static void test_run_ahead(void **state) {
    (void)state;
    world_run(2, ahead_rank, NULL);
    world_run(5, ahead_rank, NULL);
}

/* Sends and receives are numbered per pair, whatever the order of waits. */
static void messages_rank(job *j) {
    int out[20], in[20], peer = j->rank ^ 1;
    tsh_req sent[20], received[20];
    for (int i = 0; i < 20; i++) {
        tsh_coll coll = tsh_coll_make(TSH_SEND, TSH_I32);
        out[i] = 100 * j->rank + i;
        in[i] = -1;
        coll.count = 1;
        coll.send = &out[i];
        coll.send_to = peer;
        CHECK(tsh_start(&j->comm, &coll, &sent[i]) == TSH_OK);
        coll = tsh_coll_make(TSH_RECV, TSH_I32);
        coll.count = 1;
        coll.recv = &in[i];
        coll.recv_from = peer;
        CHECK(tsh_start(&j->comm, &coll, &received[i]) == TSH_OK);
    }
    for (int i = 19; i >= 0; i--) {
        CHECK(tsh_wait(&j->comm, received[i]) == TSH_OK);
        CHECK(tsh_wait(&j->comm, sent[19 - i]) == TSH_OK);
    }
    for (int i = 0; i < 20; i++) CHECK(in[i] == 100 * peer + i);
}

static void test_messages(void **state) {
    (void)state;
    for (int i = 0; i < 20; i++) world_run(2, messages_rank, NULL);
    world_run(8, messages_rank, NULL);
}

static void self_rank(job *j) {
    int out = 7 + j->rank, in = 0;
    CHECK(tsh_sendrecv(&j->comm, &out, 1, j->rank, &in, 1, j->rank, TSH_I32) == TSH_OK);
    CHECK(in == out);
}

static void test_self(void **state) {
    (void)state;
    world_run(1, self_rank, NULL);
    world_run(3, self_rank, NULL);
}

/* ------------------------------------------------------------------- groups */

/* Even and odd ranks, in falling order; then crossed with the world: each rank starts on both and
 * waits in its own order. */
static void split_rank(job *j) {
    tsh_comm half, none;
    int64_t a[50], b[50], evens = (j->ranks + 1) / 2;
    int64_t members = j->rank % 2 ? j->ranks - evens : evens;
    tsh_req first, second;
    CHECK(tsh_split(&j->comm, j->rank % 2, -j->rank, &half) == TSH_OK);
    CHECK(half.size == members && half.rank == (j->ranks - 1 - j->rank) / 2);
    CHECK(half.id != j->comm.id && half.id != 0);
    for (int i = 0; i < 50; i++) {
        a[i] = 1;
        b[i] = j->rank;
    }
    CHECK(tsh_allreduce_start(&half, a, 50, TSH_I64, TSH_SUM, &first) == TSH_OK);
    CHECK(tsh_allreduce_start(&j->comm, b, 50, TSH_I64, TSH_SUM, &second) == TSH_OK);
    if (j->rank % 3) {
        CHECK(tsh_wait(&half, first) == TSH_OK);
        CHECK(tsh_wait(&j->comm, second) == TSH_OK);
    } else {
        CHECK(tsh_wait(&j->comm, second) == TSH_OK);
        CHECK(tsh_wait(&half, first) == TSH_OK);
    }
    for (int i = 0; i < 50; i++)
        CHECK(a[i] == members && b[i] == (int64_t)j->ranks * (j->ranks - 1) / 2);
    CHECK(tsh_split(&j->comm, j->rank == 0 ? 3 : -1, 0, &none) == TSH_OK);
    CHECK(none.size == (j->rank == 0));
    j->hash = half.id;
    tsh_comm_close(&none);
    tsh_comm_close(&half);
    for (int i = 0; i < 100; i++) {
        CHECK(tsh_split(&j->comm, j->rank % 2, 0, &half) == TSH_OK);
        CHECK(tsh_barrier(&half) == TSH_OK);
        tsh_comm_close(&half);
    }
}

static void test_split(void **state) {
    static const int ranks[] = {1, 2, 3, 8};
    (void)state;
    for (int i = 0; i < 4; i++) {
        world_run(ranks[i], split_rank, NULL);
        if (ranks[i] > 2) assert_int_equal(jobs[0].hash, jobs[2].hash);
        if (ranks[i] > 1) assert_int_not_equal(jobs[0].hash, jobs[1].hash);
    }
}

/* ------------------------------------------------------------------- faults */

typedef enum fault { KIND, COUNT, DTYPE, REDOP, ROOT, BLOCKS, COUNTS, SPLIT, PIECES, FAULTS } fault;
typedef struct odd_one {
    fault what;
    int odd;
} odd_one;

static tsh_result faulty_call(job *j, fault what, int odd) {
    static float buffer[MAX_RANKS][4096];
    int64_t counts[MAX_RANKS], other[MAX_RANKS];
    float *mine = buffer[j->rank];
    for (int r = 0; r < j->ranks; r++) counts[r] = other[r] = 2;
    counts[j->ranks - 1] = odd ? 3 : 2;
    switch (what) {
    case KIND:
        if (odd) return tsh_barrier(&j->comm);
        return tsh_allreduce(&j->comm, mine, 100, TSH_F32, TSH_SUM);
    case COUNT: return tsh_allreduce(&j->comm, mine, odd ? 6 : 7, TSH_F32, TSH_SUM);
    case DTYPE: return tsh_allreduce(&j->comm, mine, 100, odd ? TSH_I32 : TSH_F32, TSH_SUM);
    case REDOP: return tsh_allreduce(&j->comm, mine, 100, TSH_F32, odd ? TSH_MAX : TSH_SUM);
    case ROOT: return tsh_broadcast(&j->comm, mine, 100, TSH_F32, odd ? 1 : 0);
    case BLOCKS: return tsh_allgather(&j->comm, mine, mine + 8, other, odd ? 2 : 1, TSH_F32);
    case COUNTS: return tsh_allgather(&j->comm, mine, mine + 8, counts, 1, TSH_F32);
    case SPLIT: {
        tsh_comm out;
        if (odd) return tsh_barrier(&j->comm);
        return tsh_split(&j->comm, 0, 0, &out);
    }
    default:
        counts[j->ranks - 1] = 2;
        for (int r = 0; odd && r < j->ranks; r++) counts[r] = 1;
        return tsh_alltoall(&j->comm, mine, counts, mine + 256, other, 1, TSH_F32);
    }
}

static void mismatch_rank(job *j) {
    const odd_one *o = (const odd_one *)j->user;
    tsh_error again;
    tsh_result result;
    CHECK(tsh_barrier(&j->comm) == TSH_OK);
    j->ms = now_ms();
    result = faulty_call(j, o->what, j->rank == o->odd);
    j->ms = now_ms() - j->ms;
    CHECK(tsh_comm_error(&j->comm, &j->verdict) == result);
    CHECK(tsh_barrier(&j->comm) == result);
    CHECK(tsh_comm_error(&j->comm, &again) == result);
    CHECK(strcmp(again.message, j->verdict.message) == 0);
    CHECK(j->comm.in_flight == 0);
}

static void test_mismatch(void **state) {
    static const int ranks[] = {2, 3, 4, 8};
    (void)state;
    for (int n = 0; n < 4; n++) {
        for (int what = KIND; what < FAULTS; what++) {
            for (int odd = ranks[n] > 2 ? 0 : 1; odd < ranks[n]; odd += 2) {
                odd_one o;
                o.what = (fault)what;
                o.odd = odd;
                world_run(ranks[n], mismatch_rank, &o);
                assert_verdict(ranks[n], TSH_ERR_MISMATCH, odd);
                for (int r = 0; r < ranks[n]; r++) assert_true(jobs[r].ms < LIMIT_MS);
            }
        }
    }
}

/* Two against two: the part without rank 0 is odd, and its lowest rank is named. */
static void tie_rank(job *j) {
    float x[7] = {0};
    CHECK(tsh_allreduce(&j->comm, x, j->rank % 2 ? 6 : 7, TSH_F32, TSH_SUM) == TSH_ERR_MISMATCH);
    (void)tsh_comm_error(&j->comm, &j->verdict);
}

static void test_tie(void **state) {
    (void)state;
    world_run(4, tie_rank, NULL);
    assert_verdict(4, TSH_ERR_MISMATCH, 1);
    assert_string_equal(jobs[3].verdict.message,
                        "rank 1 called all-reduce of 6 f32 (sum) where rank 0 called all-reduce of "
                        "7 f32 (sum) (collective 0 of group 1)");
}

static void message_mismatch_rank(job *j) {
    int x[4] = {0}, y[4];
    if (j->rank == 0) CHECK(tsh_send(&j->comm, x, 3, TSH_I32, 2) == TSH_ERR_MISMATCH);
    if (j->rank == 1) CHECK(tsh_barrier(&j->comm) == TSH_ERR_MISMATCH);
    if (j->rank == 2) CHECK(tsh_recv(&j->comm, y, 4, TSH_I32, 0) == TSH_ERR_MISMATCH);
    (void)tsh_comm_error(&j->comm, &j->verdict);
}

static void test_message_mismatch(void **state) {
    (void)state;
    world_run(3, message_mismatch_rank, NULL);
    assert_verdict(3, TSH_ERR_MISMATCH, 2);
}

/* The user's number is the rank that leaves. */
static void leave_rank(job *j) {
    int odd = *(const int *)j->user;
    float x[100] = {0};
    tsh_comm all;
    tsh_result split = tsh_split(&j->comm, 0, 0, &all); /* a slow rank may learn it here */
    CHECK(split == TSH_OK || split == TSH_ERR_LOST);
    if (j->rank == odd) {
        sleep_ms(odd % 2 ? 0 : 30);
        tsh_comm_close(&all);
        return;
    }
    if (split == TSH_OK) CHECK(tsh_allreduce(&all, x, 100, TSH_F32, TSH_SUM) == TSH_ERR_LOST);
    (void)tsh_comm_error(&j->comm, &j->verdict);
    CHECK(tsh_barrier(&j->comm) == TSH_ERR_LOST);
    tsh_comm_close(&all);
}

static void test_leave(void **state) {
    static const int ranks[] = {2, 3, 8};
    (void)state;
    for (int n = 0; n < 3; n++) {
        for (int odd = 0; odd < ranks[n]; odd++) {
            world_run(ranks[n], leave_rank, &odd);
            jobs[odd].verdict = jobs[(odd + 1) % ranks[n]].verdict;
            assert_verdict(ranks[n], TSH_ERR_LOST, odd);
        }
    }
}

/* Rank 1 closes with a request that it has not waited for. */
static void careless_rank(job *j) {
    float x[100] = {0}, y = 0;
    tsh_req req;
    int done = 0;
    tsh_result result = tsh_allreduce_start(&j->comm, x, 100, TSH_F32, TSH_SUM, &req);
    if (j->rank == 1) {
        CHECK(result == TSH_OK);
        sleep_ms(20); /* the others start, too */
        tsh_comm_close(&j->comm);
        return;
    }
    while (!done && result == TSH_OK) result = tsh_test(&j->comm, req, &done);
    CHECK(result == TSH_ERR_LOST);
    if (req) CHECK(done && tsh_wait(&j->comm, req) == TSH_ERR_LOST);
    CHECK(tsh_send(&j->comm, &y, 1, TSH_F32, 1) == TSH_ERR_LOST);
    CHECK(tsh_comm_error(&j->comm, &j->verdict) == TSH_ERR_LOST && j->verdict.rank == 1);
}

static void test_careless_close(void **state) {
    (void)state;
    world_run(2, careless_rank, NULL);
    world_run(4, careless_rank, NULL);
}

static void abort_rank(job *j) {
    float x[100] = {0};
    if (j->rank == 1) {
        sleep_ms(20);
        tsh_comm_abort(&j->comm, TSH_ERR_SHAPE, "rank 1: 5 features, 8 wanted");
    }
    CHECK(tsh_allreduce(&j->comm, x, 100, TSH_F32, TSH_SUM) == TSH_ERR_SHAPE);
    (void)tsh_comm_error(&j->comm, &j->verdict);
}

static void test_abort(void **state) {
    static const int ranks[] = {2, 8};
    (void)state;
    for (int n = 0; n < 2; n++) {
        world_run(ranks[n], abort_rank, NULL);
        assert_verdict(ranks[n], TSH_ERR_SHAPE, 1);
        assert_string_equal(jobs[0].verdict.message, "rank 1: 5 features, 8 wanted");
    }
}

static void *abort_thread(void *comm) {
    sleep_ms(10);
    tsh_comm_abort((tsh_comm *)comm, TSH_ERR_IO, "the disk is full");
    return NULL;
}

/* All but rank 0 add on, in buffers that live on their stacks, while another thread aborts. */
static void abort_busy_rank(job *j) {
    float x[20000];
    pthread_t other;
    tsh_result result = TSH_OK;
    for (int i = 0; i < 20000; i++) x[i] = 0;
    if (j->rank == 0) CHECK(pthread_create(&other, NULL, abort_thread, &j->comm) == 0);
    while (result == TSH_OK) result = tsh_allreduce(&j->comm, x, 20000, TSH_F32, TSH_SUM);
    memset(x, 1, sizeof x);
    (void)tsh_comm_error(&j->comm, &j->verdict);
    if (j->rank == 0) CHECK(pthread_join(other, NULL) == 0);
}

static void test_abort_from_thread(void **state) {
    (void)state;
    for (int i = 0; i < 5; i++) {
        world_run(4, abort_busy_rank, NULL);
        assert_verdict(4, TSH_ERR_IO, 0);
    }
}

static void late_rank(job *j) {
    float x[100] = {0};
    tsh_coll coll = tsh_coll_make(TSH_ALLREDUCE, TSH_F32);
    tsh_req req;
    coll.send = coll.recv = x;
    coll.count = 100;
    coll.timeout_ns = 50000000;
    j->ms = now_ms();
    if (j->rank % 2) sleep_ms(600);
    if (tsh_start(&j->comm, &coll, &req) == TSH_OK)
        CHECK(tsh_wait(&j->comm, req) == TSH_ERR_TIMEOUT);
    j->ms = now_ms() - j->ms;
    CHECK(tsh_comm_error(&j->comm, &j->verdict) == TSH_ERR_TIMEOUT);
}

static void test_timeout(void **state) {
    (void)state;
    world_run(4, late_rank, NULL);
    assert_verdict(4, TSH_ERR_TIMEOUT, 1);
    assert_non_null(strstr(jobs[0].verdict.message, "absent ranks: 1 3"));
    assert_true(jobs[0].ms >= 49 || jobs[2].ms >= 49); /* whichever started first */
    assert_true(jobs[0].ms < 599 && jobs[2].ms < 599);
}

/* Rank 1 waits in a group of two, the others in the world. */
static void crossed_rank(job *j) {
    tsh_comm pair;
    tsh_comm *mine = j->rank == 1 ? &pair : &j->comm;
    tsh_result split = tsh_split(&j->comm, j->rank / 2, 0, &pair); /* see leave_rank */
    CHECK(split == TSH_OK || split == TSH_ERR_MISMATCH);
    j->ms = now_ms();
    if (split == TSH_OK) CHECK(tsh_barrier(mine) == TSH_ERR_MISMATCH);
    j->ms = now_ms() - j->ms;
    (void)tsh_comm_error(&j->comm, &j->verdict);
    tsh_comm_close(&pair);
}

/* Everybody sends to the next rank before it receives. */
static void circle_rank(job *j) {
    float x = 0;
    j->ms = now_ms();
    CHECK(tsh_send(&j->comm, &x, 1, TSH_F32, (j->rank + 1) % j->ranks) == TSH_ERR_MISMATCH);
    j->ms = now_ms() - j->ms;
    (void)tsh_comm_error(&j->comm, &j->verdict);
}

static void test_circle(void **state) {
    static const int ranks[] = {2, 3, 4, 8};
    (void)state;
    for (int n = 0; n < 4; n++) {
        world_run(ranks[n], crossed_rank, NULL);
        assert_verdict(ranks[n], TSH_ERR_MISMATCH, 1);
        for (int r = 0; r < ranks[n]; r++) assert_true(jobs[r].ms < LIMIT_MS);
        world_run(ranks[n], circle_rank, NULL);
        assert_verdict(ranks[n], TSH_ERR_MISMATCH, 1);
        for (int r = 0; r < ranks[n]; r++) assert_true(jobs[r].ms < LIMIT_MS);
    }
}

/* ------------------------------------------------------------- values, scale */

static void nan_rank(job *j) {
    float x[6] = {1, 2, 3, 4, 5, 6}, y[6];
    int plain = 0;
    for (int op = TSH_SUM; op <= TSH_AVG; op++) {
        memcpy(y, x, sizeof y);
        for (int i = 0; i < 6; i++)
            if (j->rank == i % j->ranks) y[i] = (float)NAN;
        CHECK(tsh_allreduce(&j->comm, y, 6, TSH_F32, (tsh_redop)op) == TSH_OK);
        for (int i = 0; i < 6; i++) plain += y[i] == y[i];
    }
    CHECK(plain == 0);
    /* Of equal values the left one stays: chunk k starts with rank k + 1. */
    for (int i = 0; i < j->ranks; i++) y[i] = j->rank == (i + 1) % j->ranks ? -0.0f : 0.0f;
    CHECK(tsh_allreduce(&j->comm, y, j->ranks, TSH_F32, TSH_MAX) == TSH_OK);
    for (int i = 0; i < j->ranks; i++) CHECK(signbit(y[i]));
}

static void test_nan(void **state) {
    (void)state;
    world_run(2, nan_rank, NULL);
    world_run(3, nan_rank, NULL);
}

static void repeat_rank(job *j) {
    float *start = (float *)filled(TSH_F32, j->rank, 1000), x[1000];
    uint64_t first = 0;
    for (int n = 0; n < 1000; n++) {
        uint64_t hash = 0;
        memcpy(x, start, sizeof x);
        CHECK(tsh_allreduce(&j->comm, x, 1000, TSH_F32, TSH_SUM) == TSH_OK);
        for (int i = 0; i < 1000; i++) {
            uint32_t bits;
            memcpy(&bits, &x[i], sizeof bits);
            hash = mix(hash + bits);
        }
        if (n == 0) first = hash;
        CHECK(hash == first);
    }
    j->hash = first;
    free(start);
}

static void test_repeat(void **state) {
    (void)state;
    world_run(4, repeat_rank, NULL);
    for (int r = 1; r < 4; r++) assert_int_equal(jobs[r].hash, jobs[0].hash);
}

static void crowd_rank(job *j) {
    grid_case c;
    memset(&c, 0, sizeof c);
    c.count = 1000;
    grid_allreduce(j, c);
}

static void test_crowd(void **state) {
    (void)state;
    world_run(64, crowd_rank, NULL);
}

/* --------------------------------------------------------- front door, runner */

static void door_rank(job *j) {
    float x[8] = {0};
    int64_t bad[2] = {1, -1}, good[2] = {4, 4};
    tsh_coll coll = tsh_coll_make(TSH_ALLREDUCE, TSH_F32);
    tsh_comm *comm = &j->comm;
    tsh_req req;
    CHECK(tsh_allreduce(NULL, x, 1, TSH_F32, TSH_SUM) == TSH_ERR_ARGUMENT);
    CHECK(tsh_allreduce(comm, NULL, 1, TSH_F32, TSH_SUM) == TSH_ERR_ARGUMENT);
    CHECK(tsh_allreduce(comm, x, -1, TSH_F32, TSH_SUM) == TSH_ERR_ARGUMENT);
    CHECK(tsh_allreduce(comm, x, INT64_MAX, TSH_F32, TSH_SUM) == TSH_ERR_ARGUMENT);
    CHECK(tsh_allreduce(comm, x, 1, TSH_I32, TSH_AVG) == TSH_ERR_ARGUMENT);
    CHECK(tsh_broadcast(comm, x, 1, TSH_F32, 2) == TSH_ERR_ARGUMENT);
    CHECK(tsh_send(comm, x, 1, TSH_F32, -1) == TSH_ERR_ARGUMENT);
    CHECK(tsh_recv(comm, x, 1, TSH_F32, 2) == TSH_ERR_ARGUMENT);
    CHECK(tsh_allgather(comm, x, x, bad, 1, TSH_F32) == TSH_ERR_ARGUMENT);
    CHECK(tsh_allgather(comm, x, x, NULL, 1, TSH_F32) == TSH_ERR_ARGUMENT);
    CHECK(tsh_allgather(comm, x, x, good, -1, TSH_F32) == TSH_ERR_ARGUMENT);
    CHECK(tsh_start(comm, NULL, &req) == TSH_ERR_ARGUMENT);
    CHECK(tsh_start(comm, &coll, NULL) == TSH_ERR_ARGUMENT);
    coll.size = 1;
    CHECK(tsh_start(comm, &coll, &req) == TSH_ERR_ARGUMENT);
    CHECK(tsh_wait(comm, 0) == TSH_OK);
    CHECK(comm->stats.calls[TSH_ALLREDUCE] == 0 && comm->next_seq == 0);
    CHECK(tsh_allreduce(comm, x, 8, TSH_F32, TSH_SUM) == TSH_OK);
    CHECK(tsh_allgather(comm, x + 4 * j->rank, x, good, 1, TSH_F32) == TSH_OK);
    CHECK(comm->stats.calls[TSH_ALLREDUCE] == 1 && comm->stats.bytes[TSH_ALLREDUCE] == 32);
    CHECK(comm->stats.bytes[TSH_ALLGATHER] == 16 && comm->next_seq == 2);
    tsh_comm_progress(comm);
}

static void test_front_door(void **state) {
    (void)state;
    world_run(2, door_rank, NULL);
}

static void test_group_of_one(void **state) {
    tsh_comm comm, child;
    tsh_error error;
    float x[4] = {1, 2, 3, 4}, y[4] = {0};
    int64_t two = 2, three = 3;
    tsh_req req = 1;
    (void)state;
    memset(&comm, 0, sizeof comm);
    assert_int_equal(tsh_barrier(&comm), TSH_ERR_ARGUMENT); /* size 0: no group */
    comm.size = 1;
    assert_int_equal(tsh_allreduce_start(&comm, x, 4, TSH_F32, TSH_AVG, &req), TSH_OK);
    assert_int_equal(req, 0);
    assert_int_equal(tsh_wait(&comm, req), TSH_OK);
    assert_int_equal(tsh_reduce_scatter(&comm, x, y, &two, 2, TSH_F32, TSH_SUM), TSH_OK);
    assert_memory_equal(x, y, sizeof x);
    assert_int_equal(tsh_alltoall(&comm, x, &two, y, &three, 1, TSH_F32), TSH_ERR_ARGUMENT);
    assert_int_equal(tsh_send(&comm, x, 1, TSH_F32, 0), TSH_ERR_ARGUMENT);
    assert_int_equal(tsh_sendrecv(&comm, x, 1, 0, y + 3, 1, 0, TSH_F32), TSH_OK);
    assert_true(y[3] == 1);
    assert_int_equal(tsh_split(&comm, 5, 0, &child), TSH_OK);
    assert_int_equal(child.size, 1);
    assert_int_equal(tsh_split(&comm, -1, 0, &child), TSH_OK);
    assert_int_equal(child.size, 0);
    tsh_comm_abort(&comm, TSH_ERR_IO, "nobody hears this");
    assert_int_equal(tsh_comm_error(&comm, &error), TSH_OK);
    assert_int_equal(error.rank, -1);
    assert_int_equal(comm.stats.bytes[TSH_ALLREDUCE], 0);
    tsh_comm_close(&comm);
}

static int runner_rank(tsh_ctx *ctx, void *user) {
    int *seen = (int *)user;
    int64_t sum = tsh_world(ctx)->rank;
    if (tsh_allreduce(tsh_world(ctx), &sum, 1, TSH_I64, TSH_SUM) != TSH_OK) return 1;
    seen[tsh_world(ctx)->rank] = (int)sum + 1;
    return tsh_world(ctx)->rank == 2 ? 9 : 0;
}

static void test_runner(void **state) {
    int seen[4] = {0};
    (void)state;
    assert_int_equal(tsh_threads_run(2, NULL, runner_rank, seen), 0);
    assert_int_equal(tsh_threads_run(4, NULL, runner_rank, seen), 9);
    for (int r = 0; r < 4; r++) assert_int_equal(seen[r], 7);
    assert_int_equal(tsh_threads_run(0, NULL, runner_rank, seen), 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_grid),         cmocka_unit_test(test_large),
        cmocka_unit_test(test_overlap),      cmocka_unit_test(test_run_ahead),
        cmocka_unit_test(test_messages),     cmocka_unit_test(test_self),
        cmocka_unit_test(test_split),        cmocka_unit_test(test_mismatch),
        cmocka_unit_test(test_tie),          cmocka_unit_test(test_message_mismatch),
        cmocka_unit_test(test_leave),        cmocka_unit_test(test_careless_close),
        cmocka_unit_test(test_abort),        cmocka_unit_test(test_abort_from_thread),
        cmocka_unit_test(test_timeout),      cmocka_unit_test(test_circle),
        cmocka_unit_test(test_nan),          cmocka_unit_test(test_repeat),
        cmocka_unit_test(test_crowd),        cmocka_unit_test(test_front_door),
        cmocka_unit_test(test_group_of_one), cmocka_unit_test(test_runner),
    };
    return cmocka_run_group_tests_name("comm/threads", tests, NULL, NULL);
}
