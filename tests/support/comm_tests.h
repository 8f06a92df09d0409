/* comm_tests.h - the tests that every backend passes, as cmocka tests: each kind of collective,
 * many requests at once, groups, and every way in which a world may end.
 *
 * Include it after collectives.h. comm_way says where the ranks live. */
#ifndef TSHARD_TESTS_COMM_TESTS_H
#define TSHARD_TESTS_COMM_TESTS_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <cmocka.h>

/* To find a mismatch or a loss: 100 ms on an idle machine. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || defined(TESTS_EMULATED)
#define LIMIT_MS 3000 /* everything is slower then, by as much */
#else
#define LIMIT_MS 500
#endif

static world_way comm_way;

/* ------------------------------------------------------------------ harness */

/* The last world; its jobs stay readable. */
static world world_last;
static job *jobs;

UNUSED static world *world_begin(const world_desc *desc) {
    world_free(&world_last);
    world_start(&world_last, desc);
    jobs = world_last.jobs;
    return &world_last;
}

UNUSED static void world_finish(void) {
    const char *why = world_end(&world_last);
    if (why) fail_msg("%s", why);
}

static void world_run_desc(const world_desc *desc) {
    (void)world_begin(desc);
    world_finish();
}

/* Not here: another mpirun has worlds of so many ranks. */
static int elsewhere(int ranks) {
    const int yes = world_elsewhere(comm_way, ranks);
#ifdef TESTS_MPI
    plain_elsewhere += yes; /* a test of which nothing runs here is skipped */
    plain_here += !yes;
#endif
    return yes;
}

static void world_run(int ranks, rank_fn fn, const void *user) {
    world_desc desc = world_of(comm_way, ranks, fn, user, 60);
    if (elsewhere(ranks)) return;
    world_run_desc(&desc);
}

/* Every rank got the same verdict: this code, this rank, one sentence. */
static void assert_verdict(int ranks, tsh_result code, int rank) {
    for (int r = 0; r < ranks; r++) {
        if (jobs[r].verdict.code != code || jobs[r].verdict.rank != rank)
            fail_msg("%d ranks: rank %d got %s of rank %d, not %s of rank %d: %s", ranks, r,
                     tsh_result_name(jobs[r].verdict.code), jobs[r].verdict.rank,
                     tsh_result_name(code), rank, jobs[r].verdict.message);
        assert_string_equal(jobs[r].verdict.message, jobs[0].verdict.message);
    }
}

/* --------------------------------------------------------------------- grid */

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
    c.dtype = TSH_F32;
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
        buffer[i] = (float *)filled(j, TSH_F32, j->rank + i, LENGTH);
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
        job_give(j, buffer[i]);
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
    CHECK(tsh_comm_split(&j->comm, j->rank % 2, -j->rank, &half) == TSH_OK);
    CHECK(half.size == members && half.rank == (j->ranks - 1 - j->rank) / 2);
    if (j->comm.ops) CHECK(half.id != j->comm.id && half.id != 0);
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
    CHECK(tsh_comm_split(&j->comm, j->rank == 0 ? 3 : -1, 0, &none) == TSH_OK);
    CHECK(none.size == (j->rank == 0));
    j->hash = half.id;
    tsh_comm_close(&none);
    tsh_comm_close(&half);
    for (int i = 0; i < 100; i++) {
        CHECK(tsh_comm_split(&j->comm, j->rank % 2, 0, &half) == TSH_OK);
        CHECK(tsh_barrier(&half) == TSH_OK);
        tsh_comm_close(&half);
    }
}

static void test_split(void **state) {
    static const int ranks[] = {1, 2, 3, 8};
    (void)state;
    for (int i = 0; i < 4; i++) {
        if (elsewhere(ranks[i])) continue;
        world_run(ranks[i], split_rank, NULL);
        if (ranks[i] > 2) assert_int_equal(jobs[0].hash, jobs[2].hash);
        if (ranks[i] > 1) assert_int_not_equal(jobs[0].hash, jobs[1].hash);
    }
}

/* ------------------------------------------------------------------- faults */

static void test_mismatch(void **state) {
    static const int ranks[] = {2, 3, 4, 8};
    (void)state;
    for (int n = 0; n < 4; n++) {
        if (elsewhere(ranks[n])) continue;
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
    (void)job_verdict(j);
}

static void test_tie(void **state) {
    (void)state;
    if (elsewhere(4)) return;
    world_run(4, tie_rank, NULL);
    assert_verdict(4, TSH_ERR_MISMATCH, 1);
    assert_string_equal(jobs[3].verdict.message,
                        "rank 1 called all-reduce of 6 f32 (sum) where rank 0 called all-reduce of "
                        "7 f32 (sum) (collective 0 of world)");
}

/* A collective in a group of a ctx, or (group NULL) in one that the program has split off, to which
 * the last rank brings another count. */
typedef struct named_case {
    tsh_comm *(*group)(tsh_ctx *ctx);
    int ranks, tp, pp, right; /* right: the lowest rank of the last rank's group */
    const char *says;
} named_case;

static void named_rank(job *j) {
    const named_case *c = (const named_case *)j->user;
    float x[7] = {0};
    tsh_comm own, *group = &own;
    tsh_desc desc;
    tsh_ctx *ctx;
    memset(&desc, 0, sizeof desc);
    desc.tp = c->tp;
    desc.pp = c->pp;
    desc.comm = j->comm;
    memset(&j->comm, 0, sizeof j->comm); /* the ctx closes it */
    CHECK(tsh_open(&desc, &ctx) == TSH_OK);
    memset(&own, 0, sizeof own);
    if (!c->group) CHECK(tsh_comm_split(tsh_world(ctx), j->rank / 2, 0, &own) == TSH_OK);
    if (c->group) group = c->group(ctx);
    (void)tsh_barrier(tsh_world(ctx)); /* all have their groups; some may be in the error already */
    (void)tsh_allreduce(group, x, j->rank == j->ranks - 1 ? 6 : 7, TSH_F32, TSH_SUM);
    CHECK(tsh_barrier(tsh_world(ctx)) == TSH_ERR_MISMATCH); /* of other groups' ranks, too */
    CHECK(tsh_comm_error(tsh_world(ctx), &j->verdict) == TSH_ERR_MISMATCH);
    tsh_comm_close(&own);
    tsh_close(ctx);
}

/* Two groups of four ranks have the same name; rank 0, which may decide, is not in the one that
 * differs. */
static void test_named_groups(void **state) {
    static const named_case cases[] = {
        {tsh_tp, 2, 2, 1, 0, " (collective 0 of tp)"},
        {tsh_tp, 3, 3, 1, 0, " (collective 0 of tp)"},
        {tsh_tp, 4, 2, 1, 2, " (collective 0 of tp)"},
        {tsh_dp, 2, 1, 1, 0, " (collective 0 of dp)"},
        {tsh_dp, 4, 2, 1, 1, " (collective 0 of dp)"},
        {tsh_pp, 4, 1, 2, 2, " (collective 0 of pp)"},
        {tsh_world, 4, 2, 1, 0, " (collective 3 of world)"}, /* 2 splits, a barrier */
        {NULL, 4, 2, 1, 2, " (collective 0 of group "},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const named_case *c = &cases[i];
        char want[160];
        if (elsewhere(c->ranks)) continue;
        world_run(c->ranks, named_rank, c);
        assert_verdict(c->ranks, TSH_ERR_MISMATCH, c->ranks - 1);
        (void)snprintf(want, sizeof want,
                       "rank %d called all-reduce of 6 f32 (sum) where rank %d called all-reduce "
                       "of 7 f32 (sum)%s",
                       c->ranks - 1, c->right, c->says);
        for (int r = 0; r < c->ranks; r++)
            if (strncmp(jobs[r].verdict.message, want, strlen(want)) != 0)
                fail_msg("%s\n", jobs[r].verdict.message);
    }
}

static void message_mismatch_rank(job *j) {
    int x[4] = {0}, y[4];
    if (j->rank == 0) CHECK(tsh_send(&j->comm, x, 3, TSH_I32, 2) == TSH_ERR_MISMATCH);
    if (j->rank == 1) CHECK(tsh_barrier(&j->comm) == TSH_ERR_MISMATCH);
    if (j->rank == 2) CHECK(tsh_recv(&j->comm, y, 4, TSH_I32, 0) == TSH_ERR_MISMATCH);
    (void)job_verdict(j);
}

static void test_message_mismatch(void **state) {
    (void)state;
    if (elsewhere(3)) return;
    world_run(3, message_mismatch_rank, NULL);
    assert_verdict(3, TSH_ERR_MISMATCH, 2);
}

/* Errors name the public function that runs the collectives of a group: tsh_save of rank 0 here, as
 * in "if (rank == 0) tsh_save(...)". */
static void caller_rank(job *j) {
    int64_t x[3] = {0};
    j->comm.caller = j->rank == 0; /* TSHI_CALLER_SAVE */
    if (j->rank == 0)
        CHECK(tsh_allreduce(&j->comm, x, 3, TSH_I64, TSH_MAX) == TSH_ERR_MISMATCH);
    else
        CHECK(tsh_barrier(&j->comm) == TSH_ERR_MISMATCH || job_over_tcp(j));
    (void)job_verdict(j);
}

static void test_caller(void **state) {
    (void)state;
    if (elsewhere(2)) return;
    world_run(2, caller_rank, NULL);
    assert_string_equal(jobs[0].verdict.message,
                        "rank 1 called barrier where rank 0 called tsh_save, which all ranks must "
                        "call: all-reduce of 3 i64 (max) (collective 0 of world)");
}

/* The user's number is the rank that leaves. */
static void leave_rank(job *j) {
    int odd = *(const int *)j->user;
    float x[100] = {0};
    tsh_comm all;
    tsh_result split = tsh_comm_split(&j->comm, 0, 0, &all); /* a slow rank may learn it here */
    CHECK(split == TSH_OK || split == TSH_ERR_LOST);
    if (j->rank == odd) {
        sleep_ms(odd % 2 ? 0 : 30);
        tsh_comm_close(&all);
        return;
    }
    if (split == TSH_OK) CHECK(tsh_allreduce(&all, x, 100, TSH_F32, TSH_SUM) == TSH_ERR_LOST);
    (void)job_verdict(j);
    CHECK(tsh_barrier(&j->comm) == TSH_ERR_LOST);
    tsh_comm_close(&all);
}

static void test_leave(void **state) {
    static const int ranks[] = {2, 3, 8};
    (void)state;
    for (int n = 0; n < 3; n++) {
        if (elsewhere(ranks[n])) continue;
        for (int odd = 0; odd < ranks[n]; odd++) {
            world_run(ranks[n], leave_rank, &odd);
            jobs[odd].verdict = jobs[(odd + 1) % ranks[n]].verdict;
            assert_verdict(ranks[n], TSH_ERR_LOST, odd);
        }
    }
}

/* Rank 1 closes with a request that it has not waited for. The message is a long one: over TCP a
 * short one may be complete by then. */
static void careless_rank(job *j) {
    static float x[MAX_RANKS][400000];
    float y = 0;
    tsh_req req;
    int done = 0;
    tsh_result result = tsh_allreduce_start(&j->comm, x[j->rank], 400000, TSH_F32, TSH_SUM, &req);
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
    CHECK(strcmp(j->verdict.message, "rank 1 closed world before it waited for its requests") == 0);
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
    (void)job_verdict(j);
}

static void test_abort(void **state) {
    static const int ranks[] = {2, 8};
    (void)state;
    for (int n = 0; n < 2; n++) {
        if (elsewhere(ranks[n])) continue;
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
    (void)job_verdict(j);
    if (j->rank == 0) CHECK(pthread_join(other, NULL) == 0);
}

static void test_abort_from_thread(void **state) {
    (void)state;
    for (int i = 0; i < 5 && !elsewhere(4); i++) {
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
    if (elsewhere(4)) return;
    world_run(4, late_rank, NULL);
    assert_verdict(4, TSH_ERR_TIMEOUT, 1);
    assert_non_null(strstr(jobs[0].verdict.message, "absent ranks: 1 3"));
    assert_true(jobs[0].ms >= 49 || jobs[2].ms >= 49); /* whichever started first */
    assert_true(jobs[0].ms < 99 + LIMIT_MS && jobs[2].ms < 99 + LIMIT_MS);
}

static void test_circle(void **state) {
    static const int ranks[] = {2, 3, 4, 8};
    (void)state;
    for (int n = 0; n < 4; n++) {
        if (elsewhere(ranks[n])) continue;
        world_run(ranks[n], crossed_rank, NULL);
        assert_verdict(ranks[n], TSH_ERR_MISMATCH, 1);
        for (int r = 0; r < ranks[n]; r++) assert_true(jobs[r].ms < LIMIT_MS);
        world_run(ranks[n], circle_rank, NULL);
        assert_verdict(ranks[n], TSH_ERR_MISMATCH, 1);
        for (int r = 0; r < ranks[n]; r++) assert_true(jobs[r].ms < LIMIT_MS);
    }
    if (elsewhere(4)) return;
    world_run(4, hidden_circle_rank, NULL);
    assert_verdict(4, TSH_ERR_MISMATCH, 2);
    for (int r = 0; r < 4; r++) assert_true(jobs[r].ms < LIMIT_MS);
}

/* Rank 0 waits for itself: sends and does not receive, or the other way round, alone or in a call
 * whose other half ends; in the world or a group. It is told at once, and what to call instead. */
typedef struct own_case {
    int to, from; /* of rank 0; -1: that half is not called */
    int group;    /* 1: in a group of all ranks, in falling order */
} own_case;

static void own_rank(job *j) {
    const own_case *c = (const own_case *)j->user;
    const int own = c->group, other = !c->group; /* ranks 0 and 1 of the world, in the group */
    tsh_comm group, *comm = &j->comm;
    tsh_result result = TSH_OK;
    float x = 1, y = 0;
    memset(&group, 0, sizeof group);
    if (c->group) CHECK(tsh_comm_split(&j->comm, 0, -j->rank, &group) == TSH_OK);
    if (c->group) comm = &group;
    j->ms = now_ms();
    if (j->rank == 0 && c->from < 0)
        result = tsh_send(comm, &x, 1, TSH_F32, own);
    else if (j->rank == 0 && c->to < 0)
        result = tsh_recv(comm, &y, 1, TSH_F32, own);
    else if (j->rank == 0)
        result = tsh_sendrecv(comm, &x, 1, c->to ? other : own, &y, 1, c->from ? other : own,
                              TSH_F32);
    else if (c->to == 1)
        CHECK(tsh_recv(comm, &y, 1, TSH_F32, own) == TSH_OK);
    else if (c->from == 1)
        CHECK(tsh_send(comm, &x, 1, TSH_F32, own) == TSH_OK);
    CHECK(result == (j->rank == 0 ? TSH_ERR_MISMATCH : TSH_OK));
    CHECK(tsh_barrier(&j->comm) == TSH_ERR_MISMATCH);
    j->ms = now_ms() - j->ms;
    (void)job_verdict(j);
    tsh_comm_close(&group);
}

static void test_waits_for_itself(void **state) {
    static const own_case cases[] = {{0, -1, 0}, {-1, 0, 0}, {0, 1, 0},
                                     {1, 0, 0},  {0, -1, 1}, {-1, 0, 1}};
    (void)state;
    if (elsewhere(2)) return;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        world_run(2, own_rank, &cases[i]);
        assert_verdict(2, TSH_ERR_MISMATCH, 0);
        assert_non_null(strstr(jobs[1].verdict.message, "rank 0 waits for itself in "));
        assert_non_null(strstr(jobs[1].verdict.message, "tsh_sendrecv"));
        for (int r = 0; r < 2; r++) assert_true(jobs[r].ms < LIMIT_MS);
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
    float *start = (float *)filled(j, TSH_F32, j->rank, 1000), x[1000];
    uint64_t first = 0;
    for (int n = 0; n < 1000; n++) {
        uint64_t hash;
        memcpy(x, start, sizeof x);
        CHECK(tsh_allreduce(&j->comm, x, 1000, TSH_F32, TSH_SUM) == TSH_OK);
        hash = hash_of(x, 1000, TSH_F32);
        if (n == 0) first = hash;
        CHECK(hash == first);
    }
    j->hash = first;
    job_give(j, start);
}

static void test_repeat(void **state) {
    (void)state;
    if (elsewhere(4)) return;
    world_run(4, repeat_rank, NULL);
    for (int r = 1; r < 4; r++) assert_int_equal(jobs[r].hash, jobs[0].hash);
}

/* 1,000 rounds of random collectives of all dtypes give the same bits on every backend: these
 * hashes, of the first and the last rank's. */
static void test_random(void **state) {
    static const struct {
        int ranks;
        uint64_t first, last;
    } worlds[] = {{2, UINT64_C(0x69F153E8C4DD813D), UINT64_C(0x6EC46496818EA5AF)},
                  {3, UINT64_C(0x9599EC9EF4308E00), UINT64_C(0x2ACFAC17C1AB2B7B)},
                  {4, UINT64_C(0x2B83ED2DC7AAD49B), UINT64_C(0x2A53A9081BA13C1D)},
                  {8, UINT64_C(0x4A76A07B01E7D1F8), UINT64_C(0x03D33FD1C9AB88EA)}};
    const soak_plan plan = {30, 1000, 0};
    char wrong[400] = "";
    (void)state;
    for (int i = 0; i < 4; i++) {
        const int ranks = worlds[i].ranks;
        if (elsewhere(ranks)) continue;
        world_run(ranks, soak_rank, &plan);
        if (sizeof(tsh_real) > sizeof(float)) continue; /* sums of 16-bit floats are more exact */
        if (jobs[0].hash != worlds[i].first || jobs[ranks - 1].hash != worlds[i].last)
            tsh_text_add(wrong, sizeof wrong, "{%d, UINT64_C(0x%016llX), UINT64_C(0x%016llX)}, ",
                         ranks, (unsigned long long)jobs[0].hash,
                         (unsigned long long)jobs[ranks - 1].hash);
    }
    if (wrong[0]) fail_msg("hashes are: %s", wrong);
}

enum { SHORT_SUMS = 24000 }; /* elements: 48 KB, which TCP sends in pieces */

/* Sums of bf16 are rounded once: off by half a unit in the last place at most, and by what the
 * sum in float is off. Sums that are rounded at every rank are not. */
static void short_error_rank(job *j) {
    static const tsh_redop ops[] = {TSH_SUM, TSH_AVG};
    for (int o = 0; o < 2; o++) {
        uint16_t *x = (uint16_t *)filled(j, TSH_BF16, j->rank, SHORT_SUMS);
        int wrong = 0, hops_wrong = 0;
        CHECK(tsh_allreduce(&j->comm, x, SHORT_SUMS, TSH_BF16, ops[o]) == TSH_OK);
        for (int64_t i = 0; i < SHORT_SUMS; i++) {
            const double by = ops[o] == TSH_AVG ? j->ranks : 1;
            double exact = 0, size = 0, bound, hops = 0;
            for (int r = 0; r < j->ranks; r++) {
                const double value = short_value(&short_bf16, element(TSH_BF16, r, i).u16);
                exact += value / by;
                size += fabs(value) / by;
                hops = short_value(&short_bf16, short_bits(&short_bf16, hops + value));
            }
            bound = ldexp(size, -24) * j->ranks;                   /* float's own */
            bound += ldexp(1, ilogb(fabs(exact) + bound) - 7) / 2; /* half a unit of bf16 */
            wrong += fabs(short_value(&short_bf16, x[i]) - exact) > bound;
            hops_wrong += fabs(hops / by - exact) > bound;
        }
        CHECK(wrong == 0 && hops_wrong > SHORT_SUMS / 20);
        job_give(j, x);
    }
}

static void test_short_error(void **state) {
    (void)state;
    world_run(4, short_error_rank, NULL);
    world_run(8, short_error_rank, NULL);
}

/* All of them, in a list of tests. */
#define COMM_TESTS                                                                                 \
    cmocka_unit_test(test_grid), cmocka_unit_test(test_large), cmocka_unit_test(test_overlap),     \
        cmocka_unit_test(test_run_ahead), cmocka_unit_test(test_messages),                         \
        cmocka_unit_test(test_self), cmocka_unit_test(test_split),                                 \
        cmocka_unit_test(test_mismatch), cmocka_unit_test(test_tie),                               \
        cmocka_unit_test(test_message_mismatch), cmocka_unit_test(test_leave),                     \
        cmocka_unit_test(test_named_groups), cmocka_unit_test(test_caller),                        \
        cmocka_unit_test(test_careless_close), cmocka_unit_test(test_abort),                       \
        cmocka_unit_test(test_abort_from_thread), cmocka_unit_test(test_timeout),                  \
        cmocka_unit_test(test_circle), cmocka_unit_test(test_waits_for_itself),                    \
        cmocka_unit_test(test_nan), cmocka_unit_test(test_repeat),                                 \
        cmocka_unit_test(test_random), cmocka_unit_test(test_short_error)

#endif
