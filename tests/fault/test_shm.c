/* Shared memory between ranks of one host: who uses it, that its bits are those of TCP, that it
 * gives back what it took; and the heap for tensors, from which ranks read by reference. */
#define _GNU_SOURCE /* unshare */
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"
#include "../../backends/tshard_uv.h"

#include "../support/processes.h"
#include "../support/collectives.h"

#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>
#include "../support/skip.h"

enum { MOST = 4 }; /* ranks */

#if defined(__linux__) && defined(__LP64__)
enum { HAS_SHM = 1 };
#else
enum { HAS_SHM = 0 };
#endif

static void run(world *w, const world_desc *desc) {
    const char *why;
    world_start(w, desc);
    why = world_end(w);
    if (why) fail_msg("%s", why);
}

/* Bit r: the connections to rank r are in shared memory; bit 8: all ranks share with each other. */
static uint64_t sharing(job *j, const tsh_comm *comm) {
    const tshi_uv_group *group = (const tshi_uv_group *)comm->impl;
    uint64_t bits = (uint64_t)group->whole << 8;
    for (int r = 0; r < group->size; r++) {
        CHECK(!group->link[r].pipe.out == !group->link[group->size + r].pipe.out);
        if (group->link[r].pipe.out) bits |= (uint64_t)1 << r;
    }
    return bits;
}

/* The ranks of this one's host, if rings know of them: the first and the last. */
static uint64_t range(const tsh_comm *comm) {
    const tshi_uv_group *group = (const tshi_uv_group *)comm->impl;
    return (uint64_t)(16 * group->first[group->rank] + group->last[group->rank]);
}

/* ---- bits ---- */

/* Values whose sums depend on their order; of bf16, the first halves of floats. */
static void set_values(float *x, int64_t n, int rank, tsh_dtype dtype) {
    uint16_t *half = (uint16_t *)(void *)x;
    for (int64_t i = 0; i < n; i++) {
        float value = (float)((i * 7919 + rank * 104729) % 10007) / 97.0f;
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        if (dtype == TSH_F32)
            x[i] = value;
        else
            half[i] = (uint16_t)(bits >> 16);
    }
}

/* Bit r: the payload that came from rank r last, by a collective, was given by reference. */
static uint64_t referring(const tsh_comm *comm) {
    const tshi_uv_group *group = (const tshi_uv_group *)comm->impl;
    uint64_t bits = 0;
    for (int r = 0; r < group->size; r++) bits |= (uint64_t)group->link[r].heard.refers << r;
    return bits;
}

/* The longest array: an all-reduce of more than 2 MiB goes by reference. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { LONGEST = 600007 };
#else
enum { LONGEST = 1300007 };
#endif

/* Hashes of what collectives and messages give, of many sizes: from one header to several rings. */
static void bits_rank(job *j) {
    static const int64_t sizes[] = {0, 1, 3, 500, 5003, 70001, LONGEST};
    const int next = (j->rank + 1) % j->ranks, prev = (j->rank + j->ranks - 1) % j->ranks;
    float *x = (float *)job_take(j, 2 * MOST * LONGEST * sizeof *x), *y = x + MOST * LONGEST;
    tsh_comm half;
    CHECK(tsh_comm_split(&j->comm, j->rank % 2, 0, &half) == TSH_OK);
    j->figure[0] = sharing(j, &j->comm);
    j->figure[1] = range(&j->comm);
    for (int i = 0; i < 7; i++) {
        const int64_t n = sizes[i], all = n * j->ranks;
        int64_t counts[MOST];
        for (int r = 0; r < j->ranks; r++) counts[r] = n;
        for (int d = 0; d < 2; d++) {
            const tsh_dtype dtype = d ? TSH_BF16 : TSH_F32;
            set_values(x, all, j->rank, dtype);
            CHECK(tsh_allreduce(&j->comm, x, n, dtype, TSH_SUM) == TSH_OK);
            job_hash(j, x, n, dtype);
            set_values(x, all, j->rank, dtype);
            CHECK(tsh_reduce_scatter(&j->comm, x, y, counts, 1, dtype, TSH_SUM) == TSH_OK);
            job_hash(j, y, n, dtype);
        }
        set_values(x, all, j->rank, TSH_F32);
        CHECK(tsh_allgather(&j->comm, x, y, counts, 1, TSH_F32) == TSH_OK);
        j->figure[2] = referring(&j->comm);
        CHECK(tsh_broadcast(&j->comm, y, n, TSH_F32, 1) == TSH_OK);
        CHECK(tsh_sendrecv(&j->comm, y, n, next, x, n, prev, TSH_F32) == TSH_OK);
        CHECK(tsh_allreduce(&half, x, n, TSH_F32, TSH_SUM) == TSH_OK);
        job_hash(j, x, all, TSH_F32);
        job_hash(j, y, all, TSH_F32);
    }
    tsh_comm_close(&half);
    job_give(j, x);
}

/* How what is sent over TCP is protected; HEAP << r: rank r has a heap. */
enum { CHECKED = 1 << MOST, ENCRYPTED = 2 << MOST, HEAP = 4 << MOST };

static void without(job *j, tsh_uv_desc *uv) { /* TCP for some ranks, by bits */
    const int bits = *(const int *)j->user;
    uv->tensors = bits & HEAP << j->rank ? 1 : -1;
    if (bits >> j->rank & 1) (void)setenv("TSHARD_SHM", "0", 1);
    if (bits & CHECKED) (void)setenv("TSHARD_CHECKSUM", "1", 1);
    if (bits & ENCRYPTED) (void)setenv("TSHARD_ENCRYPT", "1", 1);
}

/* What `range` gives where those of these ranks are one host that share memory, and each other rank
 * is one of its own: they must be side by side. */
static uint64_t range_of(int r, uint64_t shares) {
    int first = 0, last;
    while (first < MOST && !(shares >> first & 1)) first++;
    for (last = first; shares >> (last + 1) & 1;) last++;
    if (!(shares >> r & 1) || shares >> (last + 1)) first = last = r;
    return (uint64_t)(16 * first + last);
}

static void test_bits(void **state) {
    /* bits of ranks that use TCP only, 15: all, 0: none; and what else `without` sets */
    static const int tcp[] = {
        15,           0, 4, 8, 3, CHECKED + 2, ENCRYPTED + 2, HEAP * 15, HEAP * 5, HEAP * 15 + 4,
        HEAP * 15 + 3};
    uint64_t hash[MOST] = {0};
    (void)state;
    for (int ranks = 2; ranks <= MOST; ranks++) {
        for (size_t i = 0; i < sizeof tcp / sizeof *tcp; i++) {
            world_desc desc = world_over_tcp(ranks, bits_rank, &tcp[i], 60);
            const uint64_t every = (1u << ranks) - 1, shares = every & ~(uint64_t)tcp[i];
            world w;
            desc.prepare = without;
            run(&w, &desc);
            for (int r = 0; r < ranks; r++) {
                uint64_t mine = shares >> r & 1 ? shares & ~((uint64_t)1 << r) : 0;
                if (i == 0) hash[r] = w.jobs[r].hash;
                assert_int_equal(w.jobs[r].hash, hash[r]);
                if (HAS_SHM && shares == every)
                    assert_int_equal(w.jobs[r].figure[2], mine & (uint64_t)(tcp[i] / HEAP));
                if (shares == every) mine |= 256;
                assert_int_equal(w.jobs[r].figure[0], HAS_SHM ? mine : 0);
                assert_int_equal(w.jobs[r].figure[1],
                                 range_of(r, HAS_SHM && shares != every ? shares : 0));
            }
            world_free(&w);
        }
    }
}

/* ---- who does not share ---- */

static void lone_rank(job *j) {
    float x[1000] = {1};
    CHECK(tsh_allreduce(&j->comm, x, 1000, TSH_F32, TSH_SUM) == TSH_OK && x[0] == 2);
    j->figure[0] = sharing(j, &j->comm);
}

static int logged; /* in a rank: lines of the log */
static void count_line(const char *line, void *user) {
    (void)user;
    logged += strstr(line, "uses TCP within its host") != NULL ||
              strstr(line, "has its tensors") != NULL;
}

/* Rank 1 is of another user: 0; may have no file of a segment's size: 1. */
static void other_prepare(job *j, tsh_uv_desc *uv) {
    struct rlimit limit = {1 << 20, 1 << 20};
    uv->logger.log = count_line;
    if (j->rank != 1) return;
    if (*(const int *)j->user)
        CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
    else
        CHECK(setuid(12345) == 0);
}

static void other_rank(job *j) {
    lone_rank(j);
    CHECK(logged == (HAS_SHM && j->rank == 1 && *(const int *)j->user));
}

static void test_others(void **state) {
    (void)state;
    for (int how = 0; how < 2; how++) {
        world_desc desc = world_over_tcp(2, other_rank, &how, 30);
        world w;
        if (how == 0 && geteuid() != 0) continue; /* only root can be another user */
        desc.prepare = other_prepare;
        run(&w, &desc);
        for (int r = 0; r < 2; r++) assert_int_equal(w.jobs[r].figure[0], 0);
        world_free(&w);
    }
}

/* ---- frames in a ring ---- */

/* A frame begins only where the ring has room for all that it then counts as written: the header
 * and, if the payload does not fit into its cache line, the rest of that line. */
static void test_room(void **state) {
    enum { SIZE = 16384 };
    static char ring[SIZE];
    static tsh_uv_world none;
    static tshi_uv_group group;
    static tshi_uv_link links[2]; /* [0]: for collectives; [1]: for messages */
    static tshi_uv_shm_entry entry;
    static tshi_uv_op op;
    (void)state;
    group.world = &none;
    group.size = 1;
    group.link = links;
    links[0].group = &group;
    for (int64_t total = 0; total <= 100; total += 4) {
        for (int64_t room = 0; room <= 192; room++) {
            int64_t taken = 40 * 64 + room - SIZE; /* the frame would begin in line 40 */
            tshi_uv_pipe *pipe = &links[0].pipe;
            tshi_uv_stream s;
            const int fits = room >= (total > 8 ? 64 : (int64_t)sizeof(tshi_uv_head));
            memset(&s, 0, sizeof s);
            memset(pipe, 0, sizeof *pipe);
            s.total = total;
            pipe->out = ring;
            pipe->size = SIZE;
            pipe->theirs = &entry;
            pipe->peer_taken = &taken;
            pipe->wrote = 39 * 64 + 1 + total % 64;
            pipe->seen_taken = taken;
            assert_int_equal(tshi_uv_shm_write_head(&links[0], &op, &s, 0), fits);
            if (fits)
                assert_int_equal(pipe->wrote, 40 * 64 + (total > 8 ? 64 : sizeof(tshi_uv_head)));
            assert_true(!fits || pipe->wrote - taken <= SIZE);
        }
    }
}

/* ---- groups that come and go ---- */

static uint64_t blocks(const tsh_comm *comm) { /* of memory behind this rank's segment */
    const tshi_uv_group *group = (const tshi_uv_group *)comm->impl;
    struct stat info;
    return fstat(group->world->segment, &info) == 0 ? (uint64_t)info.st_blocks : 0;
}

static void groups_rank(job *j) {
    uint64_t before = 0;
    for (int i = 0; i < 300; i++) {
        float x[2] = {1, 1};
        tsh_comm group;
        CHECK(tsh_comm_split(&j->comm, j->rank == i % j->ranks, 0, &group) == TSH_OK);
        CHECK(tsh_allreduce(&group, x, 2, TSH_F32, TSH_SUM) == TSH_OK);
        CHECK(x[0] == (float)group.size);
        if (group.size > 1) CHECK(sharing(j, &group) >> 8 == HAS_SHM);
        tsh_comm_close(&group);
        if (i == 200) before = blocks(&j->comm);
    }
    CHECK(blocks(&j->comm) == before);
}

static void test_groups(void **state) {
    world_desc desc = world_over_tcp(3, groups_rank, NULL, 60);
    world w;
    (void)state;
    run(&w, &desc);
    world_free(&w);
}

/* ---- the heap ---- */

static void with_heap(job *j, tsh_uv_desc *uv) {
    (void)j;
    uv->tensors = 1;
}

/* Random calls on the world and on groups, messages, many at once. */
static void test_soak(void **state) {
    static const soak_plan plan = {11, 150, 0};
    (void)state;
    for (int ranks = 2; ranks <= MOST; ranks++) {
        world_desc desc = world_over_tcp(ranks, soak_rank, &plan, 100);
        world w;
        desc.prepare = with_heap;
        run(&w, &desc);
        for (int r = 0; r < ranks; r++) assert_int_equal(w.jobs[r].steps, plan.rounds);
        world_free(&w);
    }
}

enum { HELD = 40 }; /* blocks at once */

/* Fills a block with what only it has, or checks that it still has that. */
static int marked(unsigned char *block, size_t n, int i, int fill) {
    for (size_t at = 0; at < n; at += at + 1000 < n ? 999 : 1) {
        if (fill) block[at] = (unsigned char)(i * 31 + (int)(at % 251));
        if (block[at] != (unsigned char)(i * 31 + (int)(at % 251))) return 0;
    }
    return 1;
}

/* Allocates, resizes and frees at random: no block changes another, and all memory comes back. */
static void allocating_rank(job *j) {
    const tshi_uv_group *group = (const tshi_uv_group *)j->comm.impl;
    const tshi_uv_heap *heap = group->world->heap;
    const tsh_allocator a = j->memory;
    unsigned char *block[HELD] = {NULL};
    size_t size[HELD] = {0};
    const uint64_t before = blocks(&j->comm);
    int inside = 0;
    CHECK(!a.allocate == !HAS_SHM && !heap == !HAS_SHM);
    if (!heap) return;
    for (int i = 0; i < 4000; i++) {
        const uint64_t draw = mix((uint64_t)i);
        const int b = (int)(draw % HELD);
        const size_t n = draw >> 8 & 1 ? (size_t)(mix(draw) % (draw >> 9 & 1 ? 3000000 : 30000))
                                       : 0;
        unsigned char *now = (unsigned char *)a.allocate(block[b], size[b], n, 64, a.user);
        CHECK(!now == !n && (uintptr_t)now % 64 == 0);
        CHECK(!n || marked(now, n < size[b] ? n : size[b], b, 0) || n < size[b]);
        CHECK(!n || tshi_uv_in_heap(group->world, now) == (n >= 16384));
        inside += n >= 16384;
        block[b] = now;
        size[b] = n;
        if (n) CHECK(marked(now, n, b, 1));
        for (int k = 0; k < HELD; k++) CHECK(!size[k] || marked(block[k], size[k], k, 0));
    }
    for (int b = 0; b < HELD; b++) (void)a.allocate(block[b], size[b], 0, 64, a.user);
    CHECK(inside > 1000 && heap->extents == 1 && heap->blocks == 0);
    CHECK(blocks(&j->comm) == before);
}

static void test_allocator(void **state) {
    world_desc desc = world_over_tcp(2, allocating_rank, NULL, 60);
    world w;
    (void)state;
    desc.prepare = with_heap;
    run(&w, &desc);
    world_free(&w);
}

/* Rank 0 gets an error, here by hand, after which its caller may change the buffer: rank 1 must not
 * return what it reads there then, neither by a sum, nor by a copy. */
static void withdrawn_rank(job *j) {
    enum { N = 1000000 };
    const tshi_uv_group *group = (const tshi_uv_group *)j->comm.impl;
    float *x = (float *)job_take(j, 3 * N * sizeof *x);
    tsh_coll coll = tsh_coll_make(*(const int *)j->user ? TSH_ALLREDUCE : TSH_ALLGATHER, TSH_F32);
    const int64_t counts[2] = {N, N};
    tsh_req req;
    if (!HAS_SHM) return;
    coll.send = x;
    coll.recv = x + N;
    coll.count = coll.kind == TSH_ALLREDUCE ? N : 0;
    coll.recv_counts = coll.kind == TSH_ALLREDUCE ? NULL : counts;
    coll.blocks = 1;
    coll.timeout_ns = 300 * INT64_C(1000000);
    CHECK(tshi_uv_in_heap(group->world, x));
    if (j->rank == 0) tshi_uv_withdraw(group->world);
    CHECK(tsh_barrier(&j->comm) == TSH_OK);
    CHECK(tsh_start(&j->comm, &coll, &req) == TSH_OK);
    CHECK(tsh_wait(&j->comm, req) == TSH_ERR_TIMEOUT);
    job_give(j, x);
}

static void test_withdrawn(void **state) {
    (void)state;
    for (int sums = 0; sums < 2; sums++) {
        world_desc desc = world_over_tcp(2, withdrawn_rank, &sums, 30);
        world w;
        desc.prepare = with_heap;
        run(&w, &desc);
        world_free(&w);
    }
}

/* Rank 1 has read what it wants, and closes the group, before rank 0 knows that. */
static void closing_rank(job *j) {
    enum { N = 100000 };
    float *x = (float *)job_take(j, N * sizeof *x);
    tsh_coll coll = tsh_coll_make(j->rank ? TSH_RECV : TSH_SEND, TSH_F32);
    tsh_comm group;
    tsh_req req;
    CHECK(tsh_comm_split(&j->comm, 0, 0, &group) == TSH_OK);
    coll.send = x;
    coll.recv = x;
    coll.count = N;
    coll.send_to = 1;
    coll.recv_from = 0;
    if (j->rank == 0) x[N - 1] = 5;
    CHECK(tsh_start(&group, &coll, &req) == TSH_OK);
    for (int i = 0; j->rank == 0 && i < 20; i++) { /* until rank 1's clear has come */
        const tshi_uv_group *g = (const tshi_uv_group *)group.impl;
        group.ops->progress(&group);
        if (g->link[g->size + 1].writing) i = 20;
        sleep_ms(5);
    }
    if (j->rank == 0) sleep_ms(100);
    CHECK(tsh_wait(&group, req) == TSH_OK);
    CHECK(x[N - 1] == 5);
    tsh_comm_close(&group);
    sleep_ms(20); /* in which a loss would be decided on */
    CHECK(tsh_barrier(&j->comm) == TSH_OK);
    job_give(j, x);
}

/* Rank 1 closes the group in place of a long all-reduce, a broadcast, or an all-gather. */
static void missing_rank(job *j) {
    enum { N = 1000000 };
    const tsh_coll_kind kind = *(const tsh_coll_kind *)j->user;
    const int64_t counts[2] = {N, N};
    float *x = (float *)job_take(j, 3 * N * sizeof *x);
    tsh_result result = TSH_OK;
    tsh_error error;
    tsh_comm group;
    CHECK(tsh_comm_split(&j->comm, 0, 0, &group) == TSH_OK);
    if (j->rank == 1) sleep_ms(100);
    j->ms = now_ms();
    if (j->rank == 0 && kind == TSH_ALLREDUCE)
        result = tsh_allreduce(&group, x, N, TSH_F32, TSH_SUM);
    if (j->rank == 0 && kind == TSH_BROADCAST) result = tsh_broadcast(&group, x, N, TSH_F32, 0);
    if (j->rank == 0 && kind == TSH_ALLGATHER)
        result = tsh_allgather(&group, x, x + N, counts, 1, TSH_F32);
    CHECK(result == (j->rank == 0 && HAS_SHM ? TSH_ERR_LOST : result));
    tsh_comm_close(&group);
    while (j->rank == 1 && tsh_comm_error(&j->comm, &error) == TSH_OK && now_ms() < j->ms + 10e3)
        sleep_ms(1);
    j->ms = now_ms() - j->ms;
    job_give(j, x);
}

static void test_closing(void **state) {
    static const tsh_coll_kind kinds[] = {TSH_ALLREDUCE, TSH_BROADCAST, TSH_ALLGATHER};
    (void)state;
    for (int i = -1; i < 3; i++) {
        world_desc desc = world_over_tcp(2, i < 0 ? closing_rank : missing_rank,
                                         &kinds[i < 0 ? 0 : i], 30);
        world w;
        desc.prepare = with_heap;
        run(&w, &desc);
        for (int r = 0; r < 2; r++) assert_true(w.jobs[r].ms < 3000);
        world_free(&w);
    }
}

/* A rank whose files are limited has no heap, and says so once; everything else works. */
static void little_prepare(job *j, tsh_uv_desc *uv) {
    const struct rlimit limit = {(rlim_t)1 << 30, (rlim_t)1 << 30}; /* a segment without heap */
    uv->logger.log = count_line;
    uv->tensors = 1;
    if (j->rank == 1) CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
}

static void little_rank(job *j) {
    lone_rank(j);
    CHECK(!j->memory.allocate == !(HAS_SHM && j->rank == 0));
    CHECK(logged == (HAS_SHM && j->rank == 1));
}

static void test_little(void **state) {
    world_desc desc = world_over_tcp(2, little_rank, NULL, 30);
    world w;
    (void)state;
    desc.prepare = little_prepare;
    run(&w, &desc);
    for (int r = 0; r < 2; r++) assert_int_equal(w.jobs[r].figure[0] >> 8, HAS_SHM);
    world_free(&w);
}

/* A ctx of tsh_uv_run has its tensors there; it frees some memory after its comms are closed. */
static int tensors_main(tsh_ctx *ctx, void *user) {
    const tshi_uv_group *group = (const tshi_uv_group *)tsh_world(ctx)->impl;
    tsh_tensor *t = tsh_randn(ctx, tsh_shape2(100, 100));
    *(int *)user = tshi_uv_in_heap(group->world, tsh_data(ctx, t));
    return tsh_last_error(ctx)->code != TSH_OK;
}

static void tensors_rank(job *j) {
    tsh_uv_desc uv = job_desc(j);
    tsh_desc desc;
    int inside = 0;
    memset(&desc, 0, sizeof desc);
    uv.tensors = *(const int *)j->user;
    CHECK(tsh_uv_run(&uv, &desc, tensors_main, &inside) == 0);
    CHECK(inside == (HAS_SHM && uv.tensors > 0));
}

static void test_tensors(void **state) {
    (void)state;
    for (int how = -1; how < 2; how += 2) {
        world_desc desc = world_over_tcp(2, tensors_rank, &how, 30);
        world w;
        desc.by_itself = 1;
        run(&w, &desc);
        world_free(&w);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bits),      cmocka_unit_test(test_others),
        cmocka_unit_test(test_room),      cmocka_unit_test(test_groups),
        cmocka_unit_test(test_soak),      cmocka_unit_test(test_allocator),
        cmocka_unit_test(test_withdrawn), cmocka_unit_test(test_closing),
        cmocka_unit_test(test_little),    cmocka_unit_test(test_tensors)};
    return cmocka_run_group_tests_name("fault/shm", tests, NULL, NULL);
}
