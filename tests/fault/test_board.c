/* Small collectives in shared memory (>>uv-board): many in flight, by ranks that lag; and what
 * happens if another rank calls something else, or closes the group. */
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"
#include "../../backends/tshard_uv.h"

#include "../support/processes.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>
#include "../support/skip.h"

enum { MOST = 8 }; /* ranks */

static void run(world *w, const world_desc *desc) {
    const char *why;
    world_start(w, desc);
    why = world_end(w);
    if (why) fail_msg("%s", why);
}

static tshi_uv_group *group_of(const tsh_comm *comm) {
    return (tshi_uv_group *)comm->impl;
}

/* ---- many in flight ---- */

enum { AT_ONCE = 64, LONGEST = 5000, BLOCKS = 3 };

/* One of several collectives in flight, and its buffers. */
typedef struct flight {
    tsh_coll coll;
    int64_t counts[MOST];
    float *send, *recv;
    tsh_req req;
} flight;

static uint64_t mix_of(uint64_t a, uint64_t b) {
    a = (a ^ b * UINT64_C(0x9E3779B97F4A7C15)) * UINT64_C(0xBF58476D1CE4E5B9);
    return a ^ a >> 31;
}

/* Element i of what rank r sends in call n: small integers, so that sums are exact. */
static float value_of(int n, int r, int64_t i) {
    return (float)(mix_of((uint64_t)(n * MOST + r), (uint64_t)i) % 1000);
}

/* Describes call n: the same on all ranks. Most are small; counts differ, and some are 0. */
static void describe(const job *j, flight *c, int n) {
    static const tsh_coll_kind kinds[] = {TSH_ALLREDUCE, TSH_ALLGATHER, TSH_REDUCE_SCATTER,
                                          TSH_BARRIER, TSH_BROADCAST};
    const uint64_t draw = mix_of(77, (uint64_t)n);
    int64_t most = draw >> 8 & 1 ? 3 : draw >> 9 & 1 ? 60 : draw >> 10 & 1 ? 600 : LONGEST;
    c->coll = tsh_coll_make(kinds[draw % 5], TSH_F32);
    c->coll.send = c->send;
    c->coll.recv = c->recv;
    if (c->coll.kind == TSH_ALLREDUCE || c->coll.kind == TSH_BROADCAST)
        c->coll.count = (int64_t)(draw >> 16) % (most + 1);
    if (c->coll.kind == TSH_BROADCAST) c->coll.root = (int)(draw >> 11 & 63) % j->ranks;
    if (c->coll.kind != TSH_ALLGATHER && c->coll.kind != TSH_REDUCE_SCATTER) return;
    c->coll.blocks = 1 + (int64_t)(draw >> 12) % BLOCKS;
    c->coll.recv_counts = c->counts;
    most /= c->coll.blocks * j->ranks;
    for (int r = 0; r < j->ranks; r++)
        c->counts[r] = (int64_t)(mix_of(draw, (uint64_t)r) >> 20) % (most + 1);
}

static void fill(const job *j, flight *c, int n) {
    const int root = c->coll.kind == TSH_BROADCAST && c->coll.root == j->rank;
    for (int64_t i = 0; i < LONGEST; i++) {
        c->send[i] = value_of(n, j->rank, i);
        c->recv[i] = root ? c->send[i] : -1;
    }
    if (c->coll.kind == TSH_ALLREDUCE && n % 2) { /* in place */
        memcpy(c->recv, c->send, LONGEST * sizeof(float));
        c->coll.send = c->recv;
    }
}

/* Element i of the sum over all ranks. */
static float sum_of(const job *j, int n, int64_t i) {
    float sum = 0;
    for (int r = 0; r < j->ranks; r++) sum += value_of(n, r, i);
    return sum;
}

/* Returns how many elements of recv are wrong. */
static int64_t wrong(const job *j, const flight *c, int n) {
    const tsh_coll *coll = &c->coll;
    const int64_t row = coll->recv_counts ? tshb_coll_before(c->counts, j->ranks) : 0;
    int64_t bad = 0, used = 0;
    for (int64_t i = 0; i < coll->count; i++)
        bad += c->recv[i] !=
               (coll->kind == TSH_ALLREDUCE ? sum_of(j, n, i) : value_of(n, coll->root, i));
    used = coll->count;
    for (int r = 0; row && r < j->ranks; r++) {
        const int64_t before = tshb_coll_before(c->counts, r);
        for (int64_t i = 0; i < c->counts[r] * coll->blocks; i++) {
            const int64_t at = i / c->counts[r] * row + before + i % c->counts[r]; /* in a whole */
            if (coll->kind == TSH_ALLGATHER) bad += c->recv[at] != value_of(n, r, i);
            if (coll->kind == TSH_REDUCE_SCATTER && r == j->rank)
                bad += c->recv[i] != sum_of(j, n, at);
        }
    }
    if (row) used = (coll->kind == TSH_ALLGATHER ? row : c->counts[j->rank]) * coll->blocks;
    for (int64_t i = used; i < used + 8 && i < LONGEST; i++) /* nothing behind it was written */
        bad += c->recv[i] != -1 && coll->send != coll->recv &&
               !(coll->kind == TSH_BROADCAST && coll->root == j->rank);
    return bad;
}

/* Starts all calls, waits in another order, and checks all results. A rank lags now and then. */
static void flight_rank(job *j) {
    const tshi_uv_group *group = group_of(&j->comm);
    float *all = (float *)job_take(j, 2 * AT_ONCE * LONGEST * sizeof *all);
    flight *calls = (flight *)calloc(AT_ONCE, sizeof *calls);
    CHECK(all && calls);
    for (int round = 0; calls && round < 6; round++) {
        for (int n = 0; n < AT_ONCE; n++) {
            flight *c = &calls[n];
            const int number = round * AT_ONCE + n;
            c->send = all + (int64_t)2 * n * LONGEST;
            c->recv = c->send + LONGEST;
            describe(j, c, number);
            fill(j, c, number);
            if (mix_of((uint64_t)number, (uint64_t)j->rank) % 40 == 0) sleep_ms(2);
            CHECK(tsh_start(&j->comm, &c->coll, &c->req) == TSH_OK);
            CHECK(!group || group->shown < group->boarded - group->board.used + 1 + TSHI_UV_AHEAD);
            if (round % 2) tsh_comm_progress(&j->comm);
        }
        for (int n = 0; n < AT_ONCE; n++) { /* 64 and 27 have no common divisor */
            const int at = (n * 27 + j->rank) % AT_ONCE;
            CHECK(tsh_wait(&j->comm, calls[at].req) == TSH_OK);
            CHECK(wrong(j, &calls[at], round * AT_ONCE + at) == 0);
        }
    }
    if (group && group->whole) CHECK(group->boarded > 100 && group->board.used == 0);
    free(calls);
    job_give(j, all);
}

static void test_flight(void **state) {
    static const int ranks[] = {1, 2, 3, 4, 8};
    (void)state;
    for (int i = 0; i < 5; i++) {
        world_desc desc = world_over_tcp(ranks[i], flight_rank, NULL, 60);
        world w;
        run(&w, &desc);
        world_free(&w);
    }
}

/* ---- calls that differ ---- */

/* What the odd rank calls where the others call an all-reduce of one element, or the other way
 * round. Only the first three are on the board. */
typedef enum odd_call {
    SHORT,
    BARRIER,
    GATHER,
    LONG,
    STAR,
    CHAIN,
    SWAP,
    SPLIT,
    ODD_CALLS
} odd_call;

typedef struct plan {
    int odd;      /* the rank that differs */
    int call;     /* an odd_call: what it calls */
    int swapped;  /* 1: it calls the all-reduce, and all others what `call` says */
    int polls;    /* 1: ranks call tsh_test until it is done, in place of tsh_wait */
    int together; /* calls of one kind before that, in flight with it */
} plan;

enum { N = 20000 };

static void describe_odd(int what, tsh_coll *coll, float *x, const int64_t *counts) {
    static const tsh_coll_kind kinds[] = {TSH_ALLREDUCE, TSH_BARRIER,   TSH_ALLGATHER,
                                          TSH_ALLREDUCE, TSH_BROADCAST, TSH_BROADCAST,
                                          TSH_ALLTOALL};
    *coll = tsh_coll_make(kinds[what], TSH_F32);
    coll->send = x;
    coll->recv = what == SHORT || what == LONG || what == STAR || what == CHAIN ? x : x + N;
    coll->count = what == SHORT || what == STAR ? 2 : what == LONG || what == CHAIN ? N : 0;
    coll->send_counts = coll->recv_counts = what == GATHER || what == SWAP ? counts : NULL;
    coll->root = 0;
}

static void differ_rank(job *j) {
    static const int64_t counts[MOST] = {1, 1, 1, 1, 1, 1, 1, 1};
    const plan *p = (const plan *)j->user;
    const int odd = (j->rank == p->odd) != p->swapped;
    float *x = (float *)job_take(j, (AT_ONCE + 2) * N * sizeof *x);
    tsh_result result = TSH_OK;
    tsh_req req[AT_ONCE];
    tsh_coll coll;
    tsh_comm half;
    int done = 0;
    for (int i = 0; i < p->together; i++)
        CHECK(tsh_allreduce_start(&j->comm, x + (int64_t)(i + 2) * N, i % 3 == 2 ? N : 3, TSH_F32,
                                  TSH_SUM, &req[i]) == TSH_OK);
    j->ms = now_ms();
    if (odd && p->call == SPLIT) {
        result = tsh_comm_split(&j->comm, 0, 0, &half);
    } else {
        describe_odd(odd ? p->call : SHORT, &coll, x, counts);
        if (!odd) coll.count = 1;
        result = tsh_start(&j->comm, &coll, &req[p->together]);
        while (p->polls && result == TSH_OK && !done && now_ms() < j->ms + 20e3)
            result = tsh_test(&j->comm, req[p->together], &done);
        if (result == TSH_OK) result = tsh_wait(&j->comm, req[p->together]);
    }
    /* a broadcast may be complete without the odd rank, which must find out by itself */
    for (int i = 0; result == TSH_OK && i < 400; i++) {
        sleep_ms(5);
        result = tsh_comm_error(&j->comm, NULL);
    }
    CHECK(result == TSH_ERR_MISMATCH);
    (void)job_verdict(j);
    j->ms = now_ms() - j->ms;
    job_give(j, x);
}

static void differ(int size, plan p) {
    world_desc desc = world_over_tcp(size, differ_rank, &p, 30);
    world w;
    run(&w, &desc);
    for (int r = 0; r < size; r++) {
        assert_int_equal(w.jobs[r].verdict.rank, p.odd);
        assert_true(w.jobs[r].ms < 3000);
    }
    world_free(&w);
}

static void test_differ(void **state) {
    (void)state;
    for (int size = 2; size <= 4; size++) {
        for (int i = 0; i < 4 * ODD_CALLS; i++) {
            const int call = i / 4, swapped = size > 2 && i & 1, polls = call != SPLIT && i & 2;
            for (int odd = 1; odd < size; odd++) {
                const plan p = {odd, call, swapped, polls, (i + odd) % 3 == 0 ? 20 : 0};
                differ(size, p);
            }
        }
    }
}

/* ---- errors that a waiting rank must look for ---- */

typedef enum errand {
    BEHIND, /* rank 0 comes late: ranks 1 and 2, whose calls differ, wait for it, too */
    LEFT,   /* rank 0 comes late: rank 1 waits for it in a group that rank 2 has closed */
    BUSY,   /* ranks 0 and 2 start a broadcast and compute; rank 1 calls an all-reduce */
    GOES,   /* as BUSY, but nobody computes: rank 0 may complete the broadcast, and leaves */
    GOES_ON /* as GOES, but rank 2 is the root */
} errand;

static tsh_result errand_call(job *j, errand what, tsh_comm *group) {
    const int root = what == GOES_ON ? 2 : 0;
    float x[4] = {1, 1, 1, 1};
    tsh_coll coll = tsh_coll_make(TSH_BROADCAST, TSH_F32);
    tsh_result result;
    tsh_req req;
    if (what == BEHIND) return tsh_allreduce(&j->comm, x, j->rank == 2 ? 2 : 1, TSH_F32, TSH_SUM);
    if (what == LEFT) return tsh_allreduce(group, x, 1, TSH_F32, TSH_SUM);
    if (j->rank == 1) return tsh_allreduce(&j->comm, x, 1, TSH_F32, TSH_SUM);
    coll.recv = x;
    coll.count = 4;
    coll.root = root;
    result = tsh_start(&j->comm, &coll, &req);
    for (int i = 0; what == BUSY && result == TSH_OK && i < 300; i++) {
        tsh_comm_progress(&j->comm);
        result = tsh_comm_error(&j->comm, NULL);
        sleep_ms(5);
    }
    return result == TSH_OK ? tsh_wait(&j->comm, req) : result;
}

static void errand_rank(job *j) {
    const errand what = *(const errand *)j->user;
    const int late = what <= LEFT && j->rank == 0, leaves = what == LEFT && j->rank == 2;
    const int goes = what >= GOES && j->rank == 0; /* may be complete before the error */
    tsh_result result = TSH_OK;
    tsh_comm group;
    CHECK(tsh_comm_split(&j->comm, 0, 0, &group) == TSH_OK);
    j->ms = now_ms();
    if (leaves) tsh_comm_close(&group);
    for (int i = 0; (late || leaves) && result == TSH_OK && i < 300; i++) {
        sleep_ms(5);
        result = tsh_comm_error(&j->comm, NULL);
    }
    if (result == TSH_OK) result = errand_call(j, what, &group);
    j->ms = now_ms() - j->ms;
    (void)job_verdict(j);
    CHECK(j->ms < 1000);
    CHECK(result == (what == LEFT ? TSH_ERR_LOST : TSH_ERR_MISMATCH) || (goes && result == TSH_OK));
    if (what == LEFT) CHECK(j->verdict.rank == 2);
    if (!leaves) tsh_comm_close(&group);
}

static void test_errands(void **state) {
    (void)state;
    for (int i = 0; i < 25; i++) {
        const errand what = (errand)(i % 5);
        world_desc desc = world_over_tcp(3, errand_rank, &what, 30);
        world w;
        run(&w, &desc);
        world_free(&w);
    }
}

/* ---- a group that is closed ---- */

/* The last rank closes the group where the others call an all-reduce; or after the same calls, of
 * which they still have to read the last. */
static void closing_rank(job *j) {
    const int missing = *(const int *)j->user, last = j->rank == j->ranks - 1;
    tsh_req req[5];
    float x[5] = {1, 1, 1, 1, 1};
    tsh_error error;
    tsh_comm group;
    CHECK(tsh_comm_split(&j->comm, 0, 0, &group) == TSH_OK);
    for (int i = 0; i < 5 - (last && missing); i++)
        CHECK(tsh_allreduce_start(&group, &x[i], 1, TSH_F32, TSH_SUM, &req[i]) == TSH_OK);
    if (!last) sleep_ms(50);
    for (int i = 0; i < 5 - (last && missing); i++) {
        const tsh_result result = tsh_wait(&group, req[i]);
        CHECK(result == (missing && !last && (i == 4 || result) ? TSH_ERR_LOST : TSH_OK));
        CHECK(result != TSH_OK || x[i] == (float)j->ranks);
    }
    if (missing && !last) {
        CHECK(tsh_comm_error(&j->comm, &error) == TSH_ERR_LOST && error.rank == j->ranks - 1);
    }
    tsh_comm_close(&group);
    if (missing) {
        for (int i = 0; i < 1000 && tsh_comm_error(&j->comm, NULL) == TSH_OK; i++) sleep_ms(5);
        CHECK(tsh_barrier(&j->comm) == TSH_ERR_LOST);
    } else {
        CHECK(tsh_barrier(&j->comm) == TSH_OK);
    }
}

static void test_closing(void **state) {
    (void)state;
    for (int ranks = 2; ranks <= 4; ranks++) {
        for (int missing = 0; missing < 2; missing++) {
            world_desc desc = world_over_tcp(ranks, closing_rank, &missing, 30);
            world w;
            run(&w, &desc);
            world_free(&w);
        }
    }
}

/* The slots of a group of any size have room where they are. */
static void test_layout(void **state) {
    (void)state;
    for (int size = 2; size <= TSHI_UV_RANKS; size++) {
        const int64_t slot = tshi_uv_slot_size(size);
        assert_true(slot % 64 == 0 && slot >= 1024);
        assert_true(slot * TSHI_UV_SLOTS <= tshi_uv_shm_row(size, 1));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_flight), cmocka_unit_test(test_differ),
                                       cmocka_unit_test(test_errands),
                                       cmocka_unit_test(test_closing),
                                       cmocka_unit_test(test_layout)};
    return cmocka_run_group_tests_name("fault/board", tests, NULL, NULL);
}
