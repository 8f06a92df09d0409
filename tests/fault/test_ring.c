/* Rings through several hosts: the same values on every grid of hosts, and how many bytes leave a
 * host. The hosts are told, not found: ranks of different hosts use TCP. test_hosts.py has real
 * ones. */
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"
#include "../../backends/tshard_uv.h"

#include "../support/processes.h"
#include "../support/collectives.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#if defined(__SANITIZE_THREAD__)
enum { EVERY = 3 }; /* of the placements, of which each takes ten times as long */
#else
enum { EVERY = 1 };
#endif

/* hosts[r]: the host of rank r. */
typedef struct plan {
    const char *hosts, *checksum, *encrypt, *shm; /* "1" or "0" */
} plan;

static void prepare(job *j, tsh_uv_desc *uv) {
    const plan *p = (const plan *)j->user;
    (void)uv;
    (void)setenv("TSHARD_CHECKSUM", p->checksum, 1);
    (void)setenv("TSHARD_ENCRYPT", p->encrypt, 1);
    (void)setenv("TSHARD_SHM", p->shm, 1);
}

/* Places the ranks of a new world, or group, on hosts. */
static void place(const tsh_comm *comm, const char *hosts) {
    tshi_uv_group *group = (tshi_uv_group *)comm->impl;
    group->whole = 0;
    for (int r = 0; r < group->size; r++) {
        const char *first = strchr(hosts, hosts[group->ranks[r]]);
        group->world->peer[group->ranks[r]].host = (int)(first - hosts);
        if (hosts[group->ranks[r]] != hosts[group->world->rank])
            group->link[r].pipe.out = group->link[group->size + r].pipe.out = NULL;
    }
    tshi_uv_find_hosts(group);
}

/* Bytes that this rank has written to sockets of ranks on other hosts. */
static uint64_t left(const tsh_comm *comm, const char *hosts) {
    const tshi_uv_group *group = (const tshi_uv_group *)comm->impl;
    uint64_t sum = 0;
    for (int r = 0; r < group->size; r++)
        if (hosts[r] != hosts[group->rank])
            sum += __atomic_load_n(&group->link[r].wrote, __ATOMIC_SEQ_CST);
    return sum;
}

/* ---- values ---- */

static void values_rank(job *j) {
    static const int64_t counts[] = {0, 7, 30011}; /* the longest one: by rings and pieces */
    static const tsh_dtype dtypes[] = {TSH_F32, TSH_BF16, TSH_I64};
    static const int64_t rows = 1100003; /* several rows of segments, the last of which is short */
    const plan *p = (const plan *)j->user;
    grid_case c;
    memset(&c, 0, sizeof c);
    place(&j->comm, p->hosts);
    for (int i = 0; i < 3; i++)
        for (int d = 0; d < 3; d++) {
            c.count = counts[i];
            c.dtype = dtypes[d];
            c.blocks = 1;
            c.in_place = d == 0;
            if (i < 2) grid_one(j, c);
            grid_allreduce(j, c);
            grid_allgather(j, c);
            grid_broadcast(j, c);
            c.blocks = 3;
            grid_reduce_scatter(j, c);
            grid_allgather(j, c);
        }
    c.count = rows;
    c.dtype = TSH_F32;
    grid_allreduce(j, c);
    c.count = rows / j->ranks;
    grid_allgather(j, c);
    grid_reduce_scatter(j, c);
}

static void run(const plan *p, int ranks, rank_fn fn, world *w) {
    world_desc desc = world_over_tcp(ranks, fn, p, 60);
    const char *why;
    desc.prepare = prepare;
    world_start(w, &desc);
    why = world_end(w);
    if (why) fail_msg("%s: %s", p->hosts, why);
}

static void test_values(void **state) {
    static const plan plans[] = {
        {"0011", "0", "0", "1"},  {"0011", "1", "0", "1"},   {"0011", "0", "1", "1"},
        {"0001", "0", "0", "0"},  {"0111", "0", "0", "1"},   {"0122", "0", "0", "0"},
        {"01122", "0", "0", "1"}, {"000111", "1", "0", "0"}, {"0101", "0", "0", "1"},
        {"0110", "0", "0", "1"},  {"01", "0", "0", "1"}};
    (void)state;
    for (size_t i = 0; i < sizeof plans / sizeof *plans; i += EVERY) {
        world w;
        run(&plans[i], (int)strlen(plans[i].hosts), values_rank, &w);
        world_free(&w);
    }
}

/* ---- bytes ---- */

enum { ELEMENTS = 1 << 18 };

static void bytes_rank(job *j) {
    const plan *p = (const plan *)j->user;
    float *x = (float *)calloc(2 * ELEMENTS, sizeof *x);
    int64_t counts[MAX_RANKS];
    uint64_t before;
    CHECK(x != NULL);
    place(&j->comm, p->hosts);
    for (int r = 0; r < j->ranks; r++) counts[r] = ELEMENTS / j->ranks;
    CHECK(tsh_allreduce(&j->comm, x, ELEMENTS, TSH_F32, TSH_SUM) == TSH_OK);
    j->figure[0] = left(&j->comm, p->hosts);
    CHECK(tsh_allgather(&j->comm, x + ELEMENTS, x, counts, 1, TSH_F32) == TSH_OK);
    j->figure[1] = left(&j->comm, p->hosts) - j->figure[0];
    CHECK(tsh_reduce_scatter(&j->comm, x, x + ELEMENTS, counts, 1, TSH_F32, TSH_SUM) == TSH_OK);
    j->figure[2] = left(&j->comm, p->hosts) - j->figure[1] - j->figure[0];
    before = left(&j->comm, p->hosts);
    CHECK(tsh_allreduce(&j->comm, x, ELEMENTS, TSH_BF16, TSH_SUM) == TSH_OK);
    j->figure[3] = left(&j->comm, p->hosts) - before;
    free(x);
}

/* H hosts of R ranks: an all-reduce of n bytes sends (H-1)/H n + (P-1)/P n from each host to the
 * next, an all-gather the first, a reduce-scatter the second. Of bf16, which is not rounded before
 * all is summed, (P-R)/H n go to the ranks that sum, and each sum to one rank of a host. */
static void test_bytes(void **state) {
    static const plan plans[] = {{"0011", "0", "0", "1"},
                                 {"00001111", "0", "0", "1"},
                                 {"00112233", "0", "0", "1"},
                                 {"0123", "0", "0", "1"},
                                 {"0101", "0", "0", "1"}};
    (void)state;
    for (size_t i = 0; i < sizeof plans / sizeof *plans; i++) {
        const char *hosts = plans[i].hosts;
        const int ranks = (int)strlen(hosts);
        const int alone = hosts[1] != hosts[0]; /* no two ranks of a host are neighbours */
        const int several = alone ? ranks : hosts[ranks - 1] - '0' + 1;
        const double n = 4.0 * ELEMENTS, sums = n * (ranks - 1) / ranks;
        const double gathers = n * (several - 1) / several;
        const double halves = n / 2 * (ranks - ranks / several) / several + gathers / 2;
        const double want[4] = {sums + gathers, gathers, sums, halves};
        world w;
        run(&plans[i], ranks, bytes_rank, &w);
        for (char host = '0'; host < '0' + several && !alone; host++)
            for (int k = 0; k < 4; k++) {
                double sent = 0;
                for (int r = 0; r < ranks; r++)
                    if (hosts[r] == host) sent += (double)w.jobs[r].figure[k];
                if (sent < want[k] || sent > want[k] + 2000)
                    fail_msg("%s: host %c sends %.0f bytes, not %.0f", hosts, host, sent, want[k]);
            }
        for (int r = 0; r < ranks && alone; r++)
            assert_true((double)w.jobs[r].figure[0] < 2 * sums + 2000);
        world_free(&w);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_bytes),
    };
    return cmocka_run_group_tests_name("fault/ring", tests, NULL, NULL);
}
