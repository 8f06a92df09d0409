/* Shared memory between ranks of one host: who uses it, that its bits are those of TCP, and that it
 * gives back what it took. */
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

/* Hashes of what collectives and messages give, of many sizes: from one header to several rings. */
static void bits_rank(job *j) {
    static const int64_t sizes[] = {0, 1, 3, 500, 5003, 70001, 600007};
    enum { LONGEST = 600007 };
    const int next = (j->rank + 1) % j->ranks, prev = (j->rank + j->ranks - 1) % j->ranks;
    float *x = (float *)calloc(2 * MOST * LONGEST, sizeof *x), *y = x + MOST * LONGEST;
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
        CHECK(tsh_broadcast(&j->comm, y, n, TSH_F32, 1) == TSH_OK);
        CHECK(tsh_sendrecv(&j->comm, y, n, next, x, n, prev, TSH_F32) == TSH_OK);
        CHECK(tsh_allreduce(&half, x, n, TSH_F32, TSH_SUM) == TSH_OK);
        job_hash(j, x, all, TSH_F32);
        job_hash(j, y, all, TSH_F32);
    }
    tsh_comm_close(&half);
    free(x);
}

enum { CHECKED = 1 << MOST, ENCRYPTED = 2 << MOST }; /* what is sent over TCP */

static void without(job *j, tsh_uv_desc *uv) { /* TCP for some ranks, by bits */
    const int bits = *(const int *)j->user;
    (void)uv;
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
    static const int tcp[] = {15, 0, 4, 8, 3, CHECKED + 2, ENCRYPTED + 2}; /* 15: all, 0: none */
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
    logged += strstr(line, "uses TCP within its host") != NULL;
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

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_bits), cmocka_unit_test(test_others),
                                       cmocka_unit_test(test_groups)};
    return cmocka_run_group_tests_name("fault/shm", tests, NULL, NULL);
}
