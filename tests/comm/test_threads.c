/* The threads backend: every kind of collective against a reference that adds in the documented
 * order, bit for bit; many requests at once; groups; and every way in which a world may end. */
#include "../../backends/tshard_threads.h"

#include "../support/processes.h"
#include "../support/logs.h"
#include "../support/collectives.h"
#include "../support/comm_tests.h"
#include "../support/skip.h"

#include <sched.h> /* sched_yield */
#include <sys/resource.h>

static void crowd_rank(job *j) {
    grid_case c;
    memset(&c, 0, sizeof c);
    c.dtype = TSH_F32;
    c.count = 1000;
    grid_allreduce(j, c);
}

static void test_crowd(void **state) {
    (void)state;
    world_run(64, crowd_rank, NULL);
}

/* ------------------------------------------------------------- a busy machine */

enum { BUSY_MOST = 16, BUSY_BARRIERS = 2000 };

static void busy_rank(job *j) {
    for (int i = 0; i < BUSY_BARRIERS; i++) {
        for (volatile int k = 0; k < 10000; k++) {}
        CHECK(tsh_barrier(&j->comm) == TSH_OK);
    }
}

/* Every core has another process to run, which would run for milliseconds if a waiting rank offered
 * its core. */
static void test_busy(void **state) {
    pid_t other[BUSY_MOST];
    int cores = (int)sysconf(_SC_NPROCESSORS_ONLN);
    int64_t begin;
    (void)state;
    if (cores > BUSY_MOST) cores = BUSY_MOST;
    for (int i = 0; i < cores; i++) {
        other[i] = fork();
        assert_true(other[i] >= 0);
        if (other[i] == 0) {
            (void)alarm(20); /* ends it if this program is killed */
            for (volatile int k = 0;; k++) {}
        }
    }
    begin = tsh_now();
    world_run(2, busy_rank, NULL);
    begin = tsh_now() - begin;
    for (int i = 0; i < cores; i++) {
        (void)kill(other[i], SIGKILL);
        (void)waitpid(other[i], NULL, 0);
    }
    if (begin > (int64_t)4 * 1000000000)
        fail_msg("%d barriers take %.1f s", BUSY_BARRIERS, (double)begin / 1e9);
}

/* ------------------------------------------------- values before peers have read */

static int arrived; /* atomic: 1 once rank 0 has its values */

/* An all-gather of 1 and 2, or a reduce-scatter to the sum 3. Rank 1 does its part only after rank
 * 0 has received its values. */
static void receive_early(job *j, tsh_coll_kind kind) {
    const int64_t each[2] = {1, 1};
    float send[2] = {(float)j->rank + 1, (float)j->rank + 1}, recv[2] = {0, 0};
    tsh_coll coll = tsh_coll_make(kind, TSH_F32);
    const int64_t limit = tsh_now() + 20000000000;
    tsh_req req;
    coll.send = send;
    coll.recv = recv;
    coll.recv_counts = each;
    CHECK(tsh_start(&j->comm, &coll, &req) == TSH_OK);
    if (j->rank == 0) {
        CHECK(j->comm.ops->receive(&j->comm, req) == TSH_OK);
        CHECK(kind == TSH_ALLGATHER ? recv[0] == 1 && recv[1] == 2 : recv[0] == 3);
        __atomic_store_n(&arrived, 1, __ATOMIC_SEQ_CST);
    } else {
        while (!__atomic_load_n(&arrived, __ATOMIC_SEQ_CST) && tsh_now() < limit)
            (void)sched_yield();
        CHECK(__atomic_load_n(&arrived, __ATOMIC_SEQ_CST) == 1);
    }
    CHECK(tsh_wait(&j->comm, req) == TSH_OK);
    CHECK(kind == TSH_ALLGATHER ? recv[0] == 1 && recv[1] == 2 : recv[0] == 3);
    CHECK(tsh_barrier(&j->comm) == TSH_OK);
    if (j->rank == 0) __atomic_store_n(&arrived, 0, __ATOMIC_SEQ_CST);
    CHECK(tsh_barrier(&j->comm) == TSH_OK);
}

static void receive_rank(job *j) {
    float sum = (float)j->rank + 1;
    tsh_req req;
    receive_early(j, TSH_ALLGATHER);
    receive_early(j, TSH_REDUCE_SCATTER);
    /* peers write an all-reduce's sums: they are here only when peers have done their part */
    for (int i = 0; i < 100; i++) {
        float sums[200] = {0};
        sums[199] = sum;
        CHECK(tsh_allreduce_start(&j->comm, sums, 200, TSH_F32, TSH_SUM, &req) == TSH_OK);
        CHECK(j->comm.ops->receive(&j->comm, req) == TSH_OK && sums[199] == 3);
        CHECK(tsh_wait(&j->comm, req) == TSH_OK);
    }
}

/* receive returns while a peer has only started its part of the collective. */
static void test_receive(void **state) {
    (void)state;
    arrived = 0;
    world_run(2, receive_rank, NULL);
}

/* Rank 1 aborts while its peers may read what it sends, or it what they send. */
static void receive_abort_rank(job *j) {
    const int64_t each[3] = {5000, 5000, 5000};
    float *send = (float *)calloc(5000, sizeof *send), *recv = (float *)calloc(15000, sizeof *recv);
    tsh_coll coll = tsh_coll_make(TSH_ALLGATHER, TSH_F32);
    tsh_req req;
    coll.send = send;
    coll.recv = recv;
    coll.recv_counts = each;
    CHECK(send && recv);
    if (tsh_start(&j->comm, &coll, &req) == TSH_OK) {
        if (j->rank == 1) tsh_comm_abort(&j->comm, TSH_ERR_ABORTED, "enough");
        (void)j->comm.ops->receive(&j->comm, req);
        (void)tsh_wait(&j->comm, req);
    }
    CHECK(tsh_barrier(&j->comm) == TSH_ERR_ABORTED);
    free(send);
    free(recv);
}

static void test_receive_abort(void **state) {
    (void)state;
    for (int i = 0; i < 20; i++) world_run(3, receive_abort_rank, NULL);
}

/* ------------------------------------------ values of which all ranks read one copy */

enum { LENDING = 4, LENT_BLOCKS = 3, LENT_MOST = 700, LENT_ROW = LENT_MOST + 0 + 1 + 350 };
static const int64_t lent_counts[LENDING] = {LENT_MOST, 0, 1, 350};
static const void *lent_address[LENDING]; /* what rank r got */

/* Starts an all-gather of the values seed, seed + 1, ..., by rank, block and element. */
static tsh_result lend_start(job *j, float seed, float *send, tsh_req *req) {
    tsh_coll coll = tsh_coll_make(TSH_ALLGATHER, TSH_F32);
    const int64_t n = lent_counts[j->rank];
    for (int64_t i = 0; i < LENT_BLOCKS * n; i++) send[i] = seed + (float)(j->rank * 10000 + i);
    coll.send = n ? send : NULL;
    coll.recv_counts = lent_counts;
    coll.blocks = LENT_BLOCKS;
    return tsh_start(&j->comm, &coll, req);
}

/* Returns 1 if `values` are those of all ranks. */
static int lend_holds(const void *values, float seed) {
    const float *at = (const float *)values;
    for (int64_t b = 0; b < LENT_BLOCKS; b++)
        for (int r = 0; r < LENDING; r++)
            for (int64_t i = 0; i < lent_counts[r]; i++)
                if (*at++ != seed + (float)(r * 10000 + b * lent_counts[r] + i)) return 0;
    return 1;
}

/* Two at a time, given back in either order; ranks differ in how long they read. */
static void lend_rank(job *j) {
    static float send[LENDING][LENT_BLOCKS * LENT_MOST];
    for (int turn = 0; turn < 60; turn++) {
        const int first = turn % 2; /* which is given back first */
        const void *values[2] = {NULL, NULL};
        tsh_req req[2];
        float sum[200] = {1};
        for (int i = 0; i < 2; i++) {
            CHECK(lend_start(j, (float)(turn + 7 * i), send[j->rank], &req[i]) == TSH_OK);
            CHECK(j->comm.ops->lend(&j->comm, req[i], &values[i]) == TSH_OK);
        }
        lent_address[j->rank] = values[1];
        /* another collective, while values are read */
        CHECK(tsh_allreduce(&j->comm, sum, 200, TSH_F32, TSH_SUM) == TSH_OK && sum[0] == LENDING);
        for (int r = 0; r < LENDING; r++) CHECK(lent_address[r] == values[1]);
        for (int spin = 0; spin < 20 * ((j->rank + turn) % LENDING); spin++) (void)sched_yield();
        for (int i = 0; i < 2; i++) CHECK(lend_holds(values[i], (float)(turn + 7 * i)));
        CHECK(tsh_wait(&j->comm, req[first]) == TSH_OK);
        CHECK(lend_holds(values[!first], (float)(turn + 7 * !first)));
        CHECK(tsh_wait(&j->comm, req[!first]) == TSH_OK);
    }
}

static void test_lend(void **state) {
    (void)state;
    world_run(LENDING, lend_rank, NULL);
}

/* More than 3 at a time: the values of the first stay until all ranks have waited for it. */
static void lend_many_rank(job *j) {
    enum { LENT = 8, LOANS = 3 };
    static float send[LENDING][LENT][LENT_BLOCKS * LENT_MOST];
    const void *values[LENT];
    tsh_req req[LENT];
    int done;
    for (int i = 0; i < LENT; i++)
        CHECK(lend_start(j, (float)i, send[j->rank][i], &req[i]) == TSH_OK);
    for (int i = 0; i < LOANS; i++)
        CHECK(j->comm.ops->lend(&j->comm, req[i], &values[i]) == TSH_OK);
    CHECK(tsh_test(&j->comm, req[LOANS], &done) == TSH_OK && !done);
    for (int i = 0; i < LENT; i++) {
        if (i >= LOANS) CHECK(j->comm.ops->lend(&j->comm, req[i], &values[i]) == TSH_OK);
        if (j->rank == 0)
            for (int spin = 0; spin < 100; spin++) (void)sched_yield();
        for (int k = i; k < LENT && k < LOANS; k++) CHECK(lend_holds(values[k], (float)k));
        CHECK(lend_holds(values[i], (float)i));
        CHECK(tsh_wait(&j->comm, req[i]) == TSH_OK);
    }
}

static void test_lend_many(void **state) {
    (void)state;
    world_run(LENDING, lend_many_rank, NULL);
}

/* Rank 2 aborts while its peers may read, or before they have the values. */
static void lend_abort_rank(job *j) {
    static float send[LENDING][LENT_BLOCKS * LENT_MOST];
    const void *values;
    tsh_req req;
    if (lend_start(j, 1, send[j->rank], &req) == TSH_OK) {
        const tsh_result result = j->comm.ops->lend(&j->comm, req, &values);
        if (j->rank == 2) tsh_comm_abort(&j->comm, TSH_ERR_ABORTED, "enough");
        if (result == TSH_OK)
            CHECK(lend_holds(values, 1));
        else
            CHECK(values == NULL);
        (void)tsh_wait(&j->comm, req);
    }
    CHECK(tsh_barrier(&j->comm) == TSH_ERR_ABORTED);
}

static void test_lend_abort(void **state) {
    (void)state;
    for (int i = 0; i < 20; i++) world_run(LENDING, lend_abort_rank, NULL);
}

/* Rank 1 has its own recv, or other counts. */
static void lend_mismatch_rank(job *j) {
    static float send[LENDING][LENT_BLOCKS * LENT_MOST], recv[LENT_BLOCKS * LENT_ROW];
    const int64_t more[LENDING] = {LENT_MOST, 1, 1, LENT_MOST};
    tsh_coll coll = tsh_coll_make(TSH_ALLGATHER, TSH_F32);
    tsh_req req;
    coll.send = send[j->rank];
    coll.recv = j->rank == 1 && !j->user ? recv : NULL;
    coll.recv_counts = j->rank == 1 && j->user ? more : lent_counts;
    coll.blocks = LENT_BLOCKS;
    if (tsh_start(&j->comm, &coll, &req) == TSH_OK)
        CHECK(tsh_wait(&j->comm, req) == TSH_ERR_MISMATCH);
    CHECK(tsh_barrier(&j->comm) == TSH_ERR_MISMATCH);
}

static void test_lend_mismatch(void **state) {
    int counts = 1;
    (void)state;
    world_run(LENDING, lend_mismatch_rank, NULL);
    for (int i = 0; i < 10; i++) world_run(LENDING, lend_mismatch_rank, &counts);
}

/* A backend that does not lend, like a group of one, wants a recv; no values need none. */
static void lend_none_rank(job *j) {
    static float send[LENDING][LENT_BLOCKS * LENT_MOST];
    static const int64_t none[LENDING] = {0, 0, 0, 0};
    const tsh_comm_ops *const all = j->comm.ops;
    tsh_comm_ops ops = *all;
    tsh_req req;
    ops.lend = NULL;
    j->comm.ops = &ops;
    CHECK(lend_start(j, 1, send[j->rank], &req) == TSH_ERR_ARGUMENT);
    j->comm.ops = all;
    CHECK(tsh_allgather(&j->comm, NULL, NULL, none, 2, TSH_F32) == TSH_OK);
    CHECK(tsh_allgather(&j->comm, NULL, j->rank ? send[j->rank] : NULL, none, 2, TSH_F32) ==
          TSH_OK);
}

static void test_lend_none(void **state) {
    (void)state;
    world_run(LENDING, lend_none_rank, NULL);
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
    for (int dtype = TSH_BF16; dtype <= TSH_F16; dtype++) { /* half of f32's bytes */
        CHECK(tsh_allreduce(comm, x, 8, (tsh_dtype)dtype, TSH_SUM) == TSH_OK);
        CHECK(tsh_allgather(comm, x + 2 * j->rank, x, good, 1, (tsh_dtype)dtype) == TSH_OK);
        CHECK(tsh_reduce_scatter(comm, x, x + 4, good, 1, (tsh_dtype)dtype, TSH_SUM) == TSH_OK);
        CHECK(comm->stats.bytes[TSH_ALLREDUCE] == 32 + 16 * (uint64_t)(dtype - TSH_F32 - 1));
        CHECK(comm->stats.bytes[TSH_ALLGATHER] == 16 + 8 * (uint64_t)(dtype - TSH_F32 - 1));
        CHECK(comm->stats.bytes[TSH_REDUCE_SCATTER] == 8 * (uint64_t)(dtype - TSH_F32 - 1));
    }
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
    assert_int_equal(tsh_comm_split(&comm, 5, 0, &child), TSH_OK);
    assert_int_equal(child.size, 1);
    assert_int_equal(tsh_comm_split(&comm, -1, 0, &child), TSH_OK);
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

/* ------------------------------------------------ why the runner did not run */

static int runs; /* atomic */

static int count_runs(tsh_ctx *ctx, void *user) {
    (void)ctx, (void)user;
    (void)__atomic_add_fetch(&runs, 1, __ATOMIC_SEQ_CST);
    return 0;
}

/* One message, and fn was not called. */
static void expect_why(int nranks, const tsh_desc *desc, int (*fn)(tsh_ctx *ctx, void *user),
                       const char *line) {
    log_lines *log = (log_lines *)desc->logger.user;
    log->count = runs = 0;
    assert_int_equal(tsh_threads_run(nranks, desc, fn, NULL), 1);
    assert_int_equal(log->count, 1);
    assert_string_equal(log->line[0], line);
    assert_int_equal(runs, 0);
}

/* A program of another version is refused, as is one that does not say what it is. */
static void test_other_builds(void **state) {
    static log_lines log;
    const tsh_desc desc = {.logger = {log_keep, &log}};
    (void)state;
    runs = 0;
    assert_int_equal(tsh_threads_run_built(7003, sizeof(tsh_real), sizeof desc, 2, &desc,
                                           count_runs, NULL), 1);
    assert_int_equal(log.count, 1);
    assert_non_null(strstr(log.line[0], "tsh_threads_run: the program was compiled with tshard.h "
                                        "7.3, the library is 0."));
    assert_int_equal((tsh_threads_run)(2, NULL, count_runs, NULL), 1);
    assert_int_equal(runs, 0);
    assert_int_equal(tshb_same_build("x", TSH_BUILT, &desc), 1);
    assert_int_equal(tshb_same_build("x", TSHARD_VERSION_MAJOR * 1000 + TSHARD_VERSION_MINOR,
                                     sizeof(tsh_real), 0, &desc), 0);
    assert_int_equal(log.count, 2); /* 0 bytes, and yet a tsh_desc */
    assert_int_equal(tsh_run_on_built(TSH_BUILT, NULL, NULL, count_runs, NULL, NULL), 1);
    assert_int_equal(tsh_open_built(TSH_BUILT, NULL, NULL), TSH_ERR_ARGUMENT);
}

/* What a backend reads from the environment. */
static void test_variables(void **state) {
    tsh_error error;
    char text[4] = "";
    int64_t ns = 7;
    int n = 7;
    (void)state;
    (void)setenv("TSHARD_TEST", "", 1);
    assert_int_equal(tshb_env_int("TSHARD_TEST", 0, 9, &n, &error), 0);
    assert_int_equal(tshb_env_seconds("TSHARD_TEST", &ns, &error), 0);
    assert_int_equal(tshb_env_text("TSHARD_TEST", text, sizeof text, &error), 0);
    (void)setenv("TSHARD_TEST", "1.25", 1);
    assert_int_equal(tshb_env_int("TSHARD_TEST", 0, 9, &n, &error), -1);
    assert_string_equal(error.message,
                        "TSHARD_TEST is \"1.25\"; it takes a whole number from 0 to 9");
    assert_int_equal(tshb_env_text("TSHARD_TEST", text, sizeof text, &error), -1);
    assert_string_equal(error.message, "TSHARD_TEST has 4 bytes; it takes at most 3");
    assert_true(n == 7 && ns == 7);
    assert_int_equal(tshb_env_seconds("TSHARD_TEST", &ns, &error), 1);
    assert_true(ns == 1250000000);
    (void)setenv("TSHARD_TEST", "0.00000000000000001", 1); /* not 0 */
    assert_true(tshb_env_seconds("TSHARD_TEST", &ns, &error) == 1 && ns == 1);
    (void)setenv("TSHARD_TEST", "9", 1);
    assert_true(tshb_env_int("TSHARD_TEST", 0, 9, &n, &error) == 1 && n == 9);
    assert_true(tshb_env_text("TSHARD_TEST", text, sizeof text, &error) == 1 && text[0] == '9');
    (void)unsetenv("TSHARD_TEST");
}

static void test_runner_says_why(void **state) {
    static log_lines log;
    tsh_desc desc = {.logger = {log_keep, &log}};
    static const char *const bad[] = {"5 min", "x",    "1x",  " 1",  "-1",    "nan",
                                      "inf",   "1e400", "1e3", "01", ".", "1000000001"};
    tsh_threads_world *made;
    char before[32], why[200];
    (void)state;
    expect_why(2, &desc, NULL, "tsh_threads_run: fn is NULL (TSH_ERR_ARGUMENT)");
    expect_why(0, &desc, count_runs,
               "tsh_threads_run: 0 ranks are asked for; there can be 1 to 1024 (TSH_ERR_ARGUMENT)");
    expect_why(-3, &desc, count_runs,
               "tsh_threads_run: -3 ranks are asked for; there can be 1 to 1024 "
               "(TSH_ERR_ARGUMENT)");
    expect_why(1025, &desc, count_runs,
               "tsh_threads_run: 1025 ranks are asked for; there can be 1 to 1024 "
               "(TSH_ERR_ARGUMENT)");
    (void)snprintf(before, sizeof before, "%s",
                   getenv("TSHARD_TIMEOUT") ? getenv("TSHARD_TIMEOUT") : "");
    (void)setenv("TSHARD_TIMEOUT", "5 min", 1);
    assert_int_equal(tsh_threads_world_new(2, &made), TSH_ERR_ARGUMENT);
    for (int i = 0; i < (int)(sizeof bad / sizeof *bad); i++) {
        (void)setenv("TSHARD_TIMEOUT", bad[i], 1);
        (void)snprintf(why, sizeof why,
                       "tsh_threads_run: TSHARD_TIMEOUT is \"%s\"; it takes a number of seconds, "
                       "such as 30 or 0.5, up to 1000000000 (TSH_ERR_ARGUMENT)",
                       bad[i]);
        expect_why(2, &desc, count_runs, why);
    }
    (void)setenv("TSHARD_TIMEOUT", before, 1); /* empty is unset */
    desc.tp = 3;                               /* each rank says so */
    log.count = runs = 0;
    assert_int_equal(tsh_threads_run(2, &desc, count_runs, NULL), 1);
    assert_int_equal(log.count, 2);
    for (int r = 0; r < 2; r++) {
        char line[160];
        (void)snprintf(line, sizeof line,
                       "rank %d: tsh_open: 2 ranks do not divide into tp 3 times pp 1; tp may be 1 "
                       "or 2 (TSH_ERR_ARGUMENT)",
                       r);
        assert_int_equal(log_holds(&log, line), 1);
    }
    desc.tp = 0;
    log.count = 0;
    assert_int_equal(tsh_threads_run(2, &desc, count_runs, NULL), 0);
    assert_int_equal(log.count + 2 * runs, 4);
}

/* From here on this process gets `kib` more address space and no more. 0: it cannot be limited. */
static int limit_memory(int64_t kib) {
    struct rlimit limit;
    long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (!file) return 0;
    if (fscanf(file, "%ld", &pages) != 1) pages = 0;
    (void)fclose(file);
    if (pages <= 0 || getrlimit(RLIMIT_AS, &limit) != 0) return 0;
    limit.rlim_cur = (rlim_t)(pages * sysconf(_SC_PAGESIZE) + kib * 1024);
    return setrlimit(RLIMIT_AS, &limit) == 0;
}

/* What a child process with tsh_log_stderr prints, in which an address space of `kib` is left (0:
 * as much as there is). Returns its exit code; 99: the limit could not be set. */
static int run_and_read(int nranks, int tp, int64_t kib, char *text, size_t size) {
    int ends[2], status = 0;
    size_t used = 0;
    ssize_t got = 1;
    pid_t child;
    assert_int_equal(pipe(ends), 0);
    (void)fflush(NULL);
    child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        tsh_desc desc = {.logger = {tsh_log_stderr, NULL}, .tp = tp};
        if (dup2(ends[1], 2) < 0 || (kib && !limit_memory(kib))) _exit(99);
        _exit(tsh_threads_run(nranks, &desc, count_runs, NULL));
    }
    (void)close(ends[1]);
    while (got > 0 && used + 1 < size) {
        got = read(ends[0], text + used, size - 1 - used);
        used += got > 0 ? (size_t)got : 0;
    }
    text[used] = '\0';
    (void)close(ends[0]);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static void test_log_stderr(void **state) {
    char text[4096];
    (void)state;
    assert_int_equal(run_and_read(0, 0, 0, text, sizeof text), 1);
    assert_string_equal(text, "tshard: tsh_threads_run: 0 ranks are asked for; there can be 1 to "
                              "1024 (TSH_ERR_ARGUMENT)\n");
    assert_int_equal(run_and_read(1, 2, 0, text, sizeof text), 1);
    assert_string_equal(text, "tshard: tsh_open: 1 ranks do not divide into tp 2 times pp 1; tp "
                              "may be 1 (TSH_ERR_ARGUMENT)\n");
    assert_int_equal(run_and_read(2, 2, 0, text, sizeof text), 0);
    assert_string_equal(text, "");
}

/* A world that does not fit in memory; then one of whose threads only some fit. */
static void test_scarce(void **state) {
    static char text[65536];
    int code;
    (void)state;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    SKIP("the sanitizers' own memory does not fit into a limit");
#endif
    code = run_and_read(1000, 0, 65536, text, sizeof text);
    if (code == 99) SKIP("this system does not limit a process's memory");
    assert_int_equal(code, 1);
    assert_string_equal(text, "tshard: tsh_threads_run: no memory for a world of 1000 ranks (about "
                              "272 MiB) (TSH_ERR_MEMORY)\n");
    code = run_and_read(60, 0, 65536, text, sizeof text);
    assert_int_equal(code, 1);
    assert_non_null(strstr(text, "tshard: tsh_threads_run: rank "));
    assert_non_null(strstr(text, " of 60 has no thread: "));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        COMM_TESTS,
        cmocka_unit_test(test_crowd),
        cmocka_unit_test(test_busy),
        cmocka_unit_test(test_receive),
        cmocka_unit_test(test_receive_abort),
        cmocka_unit_test(test_lend),
        cmocka_unit_test(test_lend_many),
        cmocka_unit_test(test_lend_abort),
        cmocka_unit_test(test_lend_mismatch),
        cmocka_unit_test(test_lend_none),
        cmocka_unit_test(test_front_door),
        cmocka_unit_test(test_group_of_one),
        cmocka_unit_test(test_runner),
        cmocka_unit_test(test_runner_says_why), cmocka_unit_test(test_other_builds),
        cmocka_unit_test(test_variables),
        cmocka_unit_test(test_log_stderr),
        cmocka_unit_test(test_scarce),
    };
    return cmocka_run_group_tests_name("comm/threads", tests, NULL, NULL);
}
