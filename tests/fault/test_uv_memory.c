/* F10: every n-th allocation of the TCP backend fails, in one of three ranks; or there are only so
 * many bytes for it and libuv together, which aborts the process where it gets none. All ranks end
 * in time, with the right sums or an error in a sentence, and nothing leaks (make asan looks). */
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"

#include <sodium.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <uv.h>

static int scarce_taken;          /* atomic: allocations of this process, without libuv's */
static int scarce_fail_at;        /* the one that fails, counted from 1; 0: none */
static int64_t scarce_used;       /* atomic: bytes, also libuv's */
static int64_t scarce_bytes = -1; /* there are; negative: any number */

enum { SCARCE_MARKS = 64 };

/* In memory that ranks share, or NULL: what the poor rank had after each request of libuv's. */
typedef struct scarce_log {
    int count; /* atomic */
    int64_t used[SCARCE_MARKS];
} scarce_log;

static scarce_log *scarce_marks;

/* Before each block stands its size. */
typedef union scarce_block {
    size_t size;
    long double aligned;
} scarce_block;

/* Of libuv and of the backend. */
static void *scarce_get(void *old, size_t bytes) {
    scarce_block *block = old ? (scarce_block *)old - 1 : NULL;
    int64_t more = (int64_t)bytes - (block ? (int64_t)block->size : 0);
    int64_t used = __atomic_add_fetch(&scarce_used, more, __ATOMIC_SEQ_CST);
    scarce_block *grown = NULL;
    if (scarce_bytes < 0 || used <= scarce_bytes)
        grown = (scarce_block *)realloc(block, sizeof *block + bytes);
    if (!grown) {
        (void)__atomic_sub_fetch(&scarce_used, more, __ATOMIC_SEQ_CST);
        return NULL;
    }
    grown->size = bytes;
    return grown + 1;
}

static void scarce_free(void *p) {
    scarce_block *block = p ? (scarce_block *)p - 1 : NULL;
    if (block) (void)__atomic_sub_fetch(&scarce_used, (int64_t)block->size, __ATOMIC_SEQ_CST);
    free(block);
}

static void *scarce_zeros(size_t n, size_t size) {
    void *p = scarce_get(NULL, n * size);
    if (p) memset(p, 0, n * size);
    return p;
}

/* Notes a request of libuv's, which was granted. */
static void *scarce_mark(void *p) {
    int at = p && scarce_marks ? __atomic_fetch_add(&scarce_marks->count, 1, __ATOMIC_SEQ_CST) : 0;
    if (p && scarce_marks && at < SCARCE_MARKS)
        scarce_marks->used[at] = __atomic_load_n(&scarce_used, __ATOMIC_SEQ_CST);
    return p;
}

static void *scarce_uv_malloc(size_t bytes) {
    return scarce_mark(scarce_get(NULL, bytes));
}

static void *scarce_uv_calloc(size_t n, size_t size) {
    return scarce_mark(scarce_zeros(n, size));
}

static void *scarce_uv_realloc(void *p, size_t bytes) {
    return scarce_mark(scarce_get(p, bytes));
}

static int scarce(void) {
    return __atomic_add_fetch(&scarce_taken, 1, __ATOMIC_SEQ_CST) == scarce_fail_at;
}

static void *scarce_malloc(size_t bytes) {
    return scarce() ? NULL : scarce_get(NULL, bytes);
}

static void *scarce_calloc(size_t n, size_t size) {
    return scarce() ? NULL : scarce_zeros(n, size);
}

static void *scarce_realloc(void *p, size_t bytes) {
    return scarce() ? NULL : scarce_get(p, bytes);
}

#define malloc  scarce_malloc
#define calloc  scarce_calloc
#define realloc scarce_realloc
#define free    scarce_free
#include "../../backends/tshard_uv.h"
#undef malloc
#undef calloc
#undef realloc
#undef free

#include "../support/processes.h"
#include "../support/collectives.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

enum { POOR = 1, RANKS = 3 }; /* the rank that runs out of memory */

/* Which allocation fails (0: none); how many bytes there are (-1: any number). */
typedef struct poverty {
    int fail_at;
    int64_t bytes;
} poverty;

static void poor_prepare(job *j, tsh_uv_desc *uv) {
    const poverty *p = (const poverty *)j->user;
    if (j->rank == POOR) scarce_fail_at = p->fail_at;
    if (j->rank == POOR) scarce_bytes = p->bytes;
    if (j->rank != POOR || p->bytes >= 0) scarce_marks = NULL;
    uv->timeout = p->fail_at || p->bytes >= 0 ? 0.5 : 10;
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

/* 1 if the allocation, or a byte more, was needed. */
static int poor_world(poverty p) {
    int fail_at = p.fail_at, poor = fail_at || p.bytes >= 0;
    world_desc desc;
    const char *why;
    world w;
    int right = 0, taken;
    memset(&desc, 0, sizeof desc);
    desc.way = WORLD_TCP;
    desc.ranks = RANKS;
    desc.fn = poor_rank;
    desc.user = &p;
    desc.may_fail = 1;
    desc.prepare = poor_prepare;
    desc.limit = 15;
    world_start(&w, &desc);
    why = world_end(&w);
    if (why) fail_msg("allocation %d, %ld bytes: %s", fail_at, (long)p.bytes, why);
    for (int r = 0; r < RANKS; r++) right += (int)w.jobs[r].figure[0];
    for (int r = 0; r < RANKS && right; r++) {
        const tsh_error *v = &w.jobs[r].verdict;
        /* One that cannot even say goodbye is missed by those that still need it. */
        if (!w.jobs[r].figure[0] &&
            (!poor || v->code == TSH_OK || (v->rank != POOR && r != POOR)))
            fail_msg("allocation %d, %ld bytes: %d ranks are right, rank %d got: %s%s", fail_at,
                     (long)p.bytes, right, r, w.jobs[r].why.message, v->message);
    }
    for (int r = 0; r < RANKS; r++)
        if ((w.jobs[r].opened != TSH_OK && !w.jobs[r].why.message[0]) ||
            (w.jobs[r].verdict.code != TSH_OK && !w.jobs[r].verdict.message[0]))
            fail_msg("allocation %d, %ld bytes: rank %d has no sentence", fail_at, (long)p.bytes,
                     r);
    taken = (int)w.jobs[POOR].figure[1];
    world_free(&w);
    return right != RANKS || (fail_at && taken >= fail_at);
}

static void test_memory(void **state) {
    poverty p = {1, -1};
    (void)state;
    while (p.fail_at < 500 && poor_world(p)) p.fail_at++;
    assert_true(p.fail_at > 20 && p.fail_at < 500);
    p.fail_at = 0;
    (void)poor_world(p);
}

/* Just too little for each request of libuv's in turn, and some bytes less: libuv never comes to
 * ask in vain, which aborts the process. */
static void test_bytes(void **state) {
    poverty p = {0, -1};
    int64_t used[SCARCE_MARKS];
    int count;
    (void)state;
    scarce_marks = (scarce_log *)shared_memory(sizeof *scarce_marks);
    assert_non_null(scarce_marks);
    (void)poor_world(p);
    count = scarce_marks->count < SCARCE_MARKS ? scarce_marks->count : SCARCE_MARKS;
    memcpy(used, scarce_marks->used, sizeof used);
    shared_free(scarce_marks, sizeof *scarce_marks);
    scarce_marks = NULL;
    assert_true(count >= 4); /* two tables of two loops */
    for (int i = 0; i < count; i++) {
        p.bytes = used[i] - 1;
        (void)poor_world(p); /* a table that is given back later may come first: all may be right */
        p.bytes = used[i] - 200;
        (void)poor_world(p);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_memory), cmocka_unit_test(test_bytes)};
    if (uv_replace_allocator(scarce_uv_malloc, scarce_uv_realloc, scarce_uv_calloc,
                             scarce_free) != 0)
        return 1;
    return cmocka_run_group_tests_name("fault/uv memory", tests, NULL, NULL);
}
