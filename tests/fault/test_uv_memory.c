/* F10: every n-th allocation of the TCP backend, and of a ctx on it, fails, in one of three ranks;
 * or there are only so many bytes for the backend and libuv together, which aborts the process
 * where it gets none. All ranks end in time, right or with an error that every way to ask for it
 * tells in a sentence, and nothing leaks (make asan looks). */
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

#include "../support/files.h"

enum { POOR = 1, RANKS = 3 }; /* the rank that runs out of memory */

/* Which allocation of fn fails (0: none); how many bytes there are (-1: any number). */
typedef struct poverty {
    rank_fn fn;
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

/* What a call on this comm returned. If that is an error, the comm tells it at once. */
static int poor_call(job *j, tsh_comm *comm, tsh_result result) {
    tsh_error error;
    tsh_result code = tsh_comm_error(comm, &error);
    if (result == TSH_OK) return 1;
    CHECK(code == result && error.code == result && error.message[0]);
    return 0;
}

/* Everything that allocates: sums of several sizes, messages, a group. figure[0]: 1 if all is
 * right. */
static void poor_rank(job *j) {
    int64_t counts[RANKS] = {20000, 20000, 20000};
    float *x = (float *)calloc(60000, sizeof *x);
    double sum = j->rank;
    tsh_comm group;
    int next = (j->rank + 1) % RANKS, last = (j->rank + RANKS - 1) % RANKS;
    int right =
        poor_call(j, &j->comm, tsh_comm_split(&j->comm, 0, -j->rank, &group)) &&
        poor_call(j, &group, tsh_allreduce(&group, &sum, 1, TSH_F64, TSH_SUM)) &&
        poor_call(j, &j->comm, tsh_allreduce(&j->comm, x, 60000, TSH_F32, TSH_MAX)) &&
        poor_call(j, &j->comm,
                  tsh_allgather(&j->comm, x + 20000 * j->rank, x, counts, 1, TSH_F32)) &&
        poor_call(j, &j->comm, tsh_sendrecv(&j->comm, x, 9, next, x + 9, 9, last, TSH_F32)) &&
        poor_call(j, &j->comm, tsh_barrier(&j->comm));
    j->figure[0] = right && sum == 3;
    CHECK(!right || sum == 3);
    (void)job_verdict(j);
    tsh_comm_close(&group);
    free(x);
    j->figure[1] = (uint64_t)__atomic_load_n(&scarce_taken, __ATOMIC_SEQ_CST);
}

/* For tsh_desc.allocator. *user: the allocation that fails, counted from that of the ctx. */
static void *scarce_ctx(void *old, size_t old_size, size_t new_size, size_t align, void *user) {
    int *fail_at = (int *)user;
    void *block = NULL;
    if (*fail_at) {
        __atomic_store_n(&scarce_taken, 0, __ATOMIC_SEQ_CST);
        scarce_fail_at = *fail_at;
        *fail_at = 0;
    }
    if (new_size && (scarce() || posix_memalign(&block, align, new_size) != 0)) return NULL;
    if (old && block) memcpy(block, old, old_size < new_size ? old_size : new_size);
    free(old);
    return block;
}

/* What a call of the core came to. If that is a failure, the ctx tells why at once. */
static int model_call(job *j, tsh_ctx *ctx, int right) {
    CHECK(right || (!tsh_ok(ctx) && tsh_last_error(ctx)->message[0]));
    return right;
}

static int model_step(job *j, tsh_ctx *ctx, tsh_optim *optim) {
    tsh_tensor *x = tsh_randn(ctx, tsh_shape2(RANKS, 4));
    tsh_tensor *y = tsh_gelu(tsh_forward(tsh_find(tsh_root(ctx), "up"), x)), *loss;
    y = tsh_forward(tsh_find(tsh_root(ctx), "down"), y);
    loss = tsh_mean(tsh_mul(y, y), TSH_ALL, 0);
    return model_call(j, ctx, loss != NULL) &&
           model_call(j, ctx, tsh_backward(ctx, loss) == TSH_OK) &&
           model_call(j, ctx, tsh_optim_step(optim) == TSH_OK) &&
           model_call(j, ctx, tsh_step_end(ctx) == TSH_OK);
}

/* A step of a model that is sharded, a file, a group. */
static int model_train(tsh_ctx *ctx, void *user) {
    static const tsh_plan_rule plan[] = {{.path = "up", .style = TSH_COLWISE},
                                         {.path = "down", .style = TSH_ROWWISE}};
    const tsh_optim_desc adam = {.kind = TSH_ADAM, .lr = 0.01};
    const tsh_linear_desc wide = {.in = 4, .out = 8}, narrow = {.in = 8, .out = 4};
    job *j = (job *)user;
    tsh_module *root = tsh_root(ctx);
    tsh_optim *optim = NULL;
    tsh_comm group;
    int right = model_call(j, ctx, tsh_add_linear(root, "up", &wide) != NULL) &&
                model_call(j, ctx, tsh_add_linear(root, "down", &narrow) != NULL) &&
                model_call(j, ctx, tsh_parallelize(root, plan, 2) == TSH_OK);
    optim = right ? tsh_optim_new(root, &adam) : NULL;
    right = right && model_call(j, ctx, optim != NULL) && model_step(j, ctx, optim) &&
            model_call(j, ctx, tsh_save(root, files_path("x"), optim) == TSH_OK) &&
            model_call(j, ctx, tsh_load(root, files_path("x"), optim) == TSH_OK);
    if (right) {
        right = poor_call(j, tsh_world(ctx), tsh_comm_split(tsh_world(ctx), 0, 0, &group));
        tsh_comm_close(&group);
    }
    (void)tsh_ok(ctx);
    j->verdict = *tsh_last_error(ctx);
    j->figure[2] = 1;
    return !right;
}

static void model_log(const char *message, void *user) {
    (void)snprintf((char *)user, TSH_MESSAGE_SIZE + 80, "%s", message);
}

/* Every error of tsh_uv_run has a sentence, which the logger gets: until the function runs that of
 * tsh_uv_desc.error, then the ctx's. */
static void model_rank(job *j) {
    char line[TSH_MESSAGE_SIZE + 80] = "";
    tsh_uv_desc uv = job_desc(j);
    tsh_desc desc;
    int fail_at = scarce_fail_at;
    scarce_fail_at = 0;
    memset(&desc, 0, sizeof desc);
    desc.logger.log = model_log;
    desc.logger.user = line;
    desc.allocator.allocate = scarce_ctx;
    desc.allocator.user = &fail_at;
    j->figure[0] = tsh_uv_run(&uv, &desc, model_train, j) == 0;
    j->figure[1] = (uint64_t)__atomic_load_n(&scarce_taken, __ATOMIC_SEQ_CST);
    if (!j->figure[2]) j->verdict = j->why;
    CHECK(j->figure[0] || (j->verdict.code != TSH_OK && j->verdict.message[0] &&
                           strstr(line, j->verdict.message)));
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
    desc.fn = p.fn;
    desc.by_itself = p.fn == model_rank;
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
    poverty p = {poor_rank, 1, -1};
    (void)state;
    while (p.fail_at < 500 && poor_world(p)) p.fail_at++;
    assert_true(p.fail_at > 20 && p.fail_at < 500);
    p.fail_at = 0;
    (void)poor_world(p);
}

static void test_run(void **state) {
    poverty p = {model_rank, 1, -1};
    (void)state;
    while (p.fail_at < 500 && poor_world(p)) p.fail_at++;
    assert_true(p.fail_at > 40 && p.fail_at < 500);
    p.fail_at = 0;
    (void)poor_world(p);
}

/* Just too little for each request of libuv's in turn, and some bytes less: libuv never comes to
 * ask in vain, which aborts the process. */
static void test_bytes(void **state) {
    poverty p = {poor_rank, 0, -1};
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

/* ---- bytes on the wire: here, since this file sees the backend's own counts ---- */

static uint64_t wire_wrote(const tsh_comm *comm) {
    const tshi_uv_group *group = (const tshi_uv_group *)comm->impl;
    uint64_t bytes = 0;
    for (int r = 0; r < group->size; r++) /* by a socket, or in shared memory */
        bytes += group->link[r].wrote + (uint64_t)group->link[r].pipe.wrote;
    return bytes;
}

/* Long sums of bf16 are half of f32's: 2 (P-1)/P n bytes and some headers; a reduce-scatter's half
 * of that. */
static void wire_rank(job *j) {
    static const tsh_dtype dtypes[] = {TSH_F32, TSH_BF16, TSH_F16};
    enum { EACH = 60000 };
    int64_t counts[RANKS] = {EACH, EACH, EACH};
    float *x = (float *)calloc(2 * RANKS * EACH, sizeof *x);
    for (int d = 0; d < 3; d++) {
        const uint64_t part = EACH * tsh_dtype_size(dtypes[d]) * (RANKS - 1);
        uint64_t before = wire_wrote(&j->comm), wrote;
        CHECK(tsh_allreduce(&j->comm, x, RANKS * EACH, dtypes[d], TSH_SUM) == TSH_OK);
        wrote = wire_wrote(&j->comm) - before;
        CHECK(wrote >= 2 * part && wrote < 2 * part + 500);
        before = wire_wrote(&j->comm);
        CHECK(tsh_reduce_scatter(&j->comm, x, x + RANKS * EACH, counts, 1, dtypes[d], TSH_SUM) ==
              TSH_OK);
        wrote = wire_wrote(&j->comm) - before;
        CHECK(wrote >= part && wrote < part + 500);
    }
    CHECK(((tshi_uv_group *)j->comm.impl)->op[0].scratch_size <= TSHI_UV_WINDOW);
    free(x);
}

static void test_wire(void **state) {
    world_desc desc = world_over_tcp(RANKS, wire_rank, NULL, 15);
    const char *why;
    world w;
    (void)state;
    world_start(&w, &desc);
    why = world_end(&w);
    if (why) fail_msg("%s", why);
    world_free(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_memory), cmocka_unit_test(test_run),
                                       cmocka_unit_test(test_bytes), cmocka_unit_test(test_wire)};
    if (uv_replace_allocator(scarce_uv_malloc, scarce_uv_realloc, scarce_uv_calloc,
                             scarce_free) != 0)
        return 1;
    return cmocka_run_group_tests_name("fault/uv memory", tests, files_begin, files_end);
}
