/* F10: every n-th allocation of the TCP backend fails, in one of three ranks. All ranks end in
 * time, with the right sums or an error, and nothing leaks (make asan looks). What libuv allocates
 * is left alone: it ends the process where it gets none. */
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"

#include <sodium.h>
#include <stdlib.h>
#include <uv.h>

static int scarce_taken;   /* atomic: allocations of this process */
static int scarce_fail_at; /* the one that fails, counted from 1; 0: none */

static int scarce(void) {
    return __atomic_add_fetch(&scarce_taken, 1, __ATOMIC_SEQ_CST) == scarce_fail_at;
}

static void *scarce_malloc(size_t bytes) {
    return scarce() ? NULL : malloc(bytes);
}

static void *scarce_calloc(size_t n, size_t size) {
    return scarce() ? NULL : calloc(n, size);
}

static void *scarce_realloc(void *p, size_t bytes) {
    return scarce() ? NULL : realloc(p, bytes);
}

#define malloc  scarce_malloc
#define calloc  scarce_calloc
#define realloc scarce_realloc
#include "../../backends/tshard_uv.h"
#undef malloc
#undef calloc
#undef realloc

#include "../support/processes.h"
#include "../support/collectives.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

enum { POOR = 1, RANKS = 3 }; /* the rank that runs out of memory */

static void poor_prepare(job *j, tsh_uv_desc *uv) {
    int fail_at = *(const int *)j->user;
    if (j->rank == POOR) scarce_fail_at = fail_at;
    uv->timeout = fail_at ? 0.5 : 10;
}

/* Everything that allocates: sums of several sizes, messages, a group. figure[0]: 1 if all is
 * right. */
static void poor_rank(job *j) {
    int64_t counts[RANKS] = {20000, 20000, 20000};
    float *x = (float *)calloc(60000, sizeof *x);
    double sum = j->rank;
    tsh_comm group;
    tsh_result result = tsh_split(&j->comm, 0, -j->rank, &group);
    if (result == TSH_OK) result = tsh_allreduce(&group, &sum, 1, TSH_F64, TSH_SUM);
    if (result == TSH_OK) result = tsh_allreduce(&j->comm, x, 60000, TSH_F32, TSH_MAX);
    if (result == TSH_OK)
        result = tsh_allgather(&j->comm, x + 20000 * j->rank, x, counts, 1, TSH_F32);
    if (result == TSH_OK)
        result = tsh_sendrecv(&j->comm, x, 9, (j->rank + 1) % RANKS, x + 9, 9,
                              (j->rank + RANKS - 1) % RANKS, TSH_F32);
    if (result == TSH_OK) result = tsh_barrier(&j->comm);
    j->figure[0] = result == TSH_OK && sum == 3;
    CHECK(result != TSH_OK || sum == 3);
    CHECK(job_verdict(j) == result || result == TSH_ERR_MEMORY);
    tsh_comm_close(&group);
    free(x);
    j->figure[1] = (uint64_t)__atomic_load_n(&scarce_taken, __ATOMIC_SEQ_CST);
}

/* 1 if the allocation was needed: there were as many. */
static int poor_world(int fail_at) {
    world_desc desc;
    const char *why;
    world w;
    int right = 0, taken;
    memset(&desc, 0, sizeof desc);
    desc.way = WORLD_TCP;
    desc.ranks = RANKS;
    desc.fn = poor_rank;
    desc.user = &fail_at;
    desc.may_fail = 1;
    desc.prepare = poor_prepare;
    desc.limit = 15;
    world_start(&w, &desc);
    why = world_end(&w);
    if (why) fail_msg("allocation %d: %s", fail_at, why);
    for (int r = 0; r < RANKS; r++) right += (int)w.jobs[r].figure[0];
    for (int r = 0; r < RANKS && right; r++) {
        const tsh_error *v = &w.jobs[r].verdict;
        /* One that cannot even say goodbye is missed by those that still need it. */
        if (!w.jobs[r].figure[0] &&
            (!fail_at || v->code == TSH_OK || (v->rank != POOR && r != POOR)))
            fail_msg("allocation %d: %d ranks are right, rank %d got: %s%s", fail_at, right, r,
                     w.jobs[r].why.message, v->message);
    }
    if (right == 0 && w.jobs[POOR].opened != TSH_OK && !w.jobs[POOR].why.message[0])
        fail_msg("allocation %d: no sentence", fail_at);
    taken = (int)w.jobs[POOR].figure[1];
    world_free(&w);
    return right != RANKS || taken >= fail_at;
}

static void test_memory(void **state) {
    int n = 1;
    (void)state;
    while (n < 500 && poor_world(n)) n++;
    assert_true(n > 20 && n < 500);
    (void)poor_world(0);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_memory)};
    return cmocka_run_group_tests_name("fault/uv memory", tests, NULL, NULL);
}
