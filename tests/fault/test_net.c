/* Networks that break, heal, and forget a connection: ranks over TCP on hosts of their own, with a
 * relay between them. `make faults` does the same at length. */
/* run: alone */
#define _GNU_SOURCE /* unshare */
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"
#include "../../backends/tshard_uv.h"

#include "../support/processes.h"
#include "../support/collectives.h"
#include "../support/relay.h"
#include "../support/heal.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>
#include "../support/skip.h"

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { RUNS = 6, SIDE_BY_SIDE = 2, HEARTBEAT_S = 2, LIMIT_MS = 3000 }; /* everything is slower */
#else
enum { RUNS = 12, SIDE_BY_SIDE = 6, HEARTBEAT_S = 1, LIMIT_MS = 500 };
#endif

/* Both sides of a partition that heals near the heartbeat get one error, which names no rank of the
 * side that has the majority; or the world lives on. */
static void test_heal(void **state) {
    heal_plan plans[RUNS];
    heal_result results[RUNS];
    (void)state;
    for (int i = 0; i < RUNS; i++) {
        plans[i] = heal_draw(i);
        plans[i].heals *= HEARTBEAT_S / plans[i].heartbeat;
        plans[i].heartbeat = HEARTBEAT_S;
    }
    heal_runs(plans, results, RUNS, SIDE_BY_SIDE);
    for (int i = 0; i < RUNS; i++) {
        const heal_result *result = &results[i];
        if (result->refused)
            SKIP("no network namespace or TUN device: %s", strerror(result->refused));
        if (!result->one || result->failure[0] ||
            (result->errors && result->named != heal_lowest(heal_minority(&plans[i]))))
            fail_msg("run %d (%d ranks, side %#x, heals at %.2f s): %d errors, rank %d named, %s%s",
                     i, plans[i].ranks, plans[i].side, plans[i].heals, result->errors,
                     result->named,
                     result->differ, result->failure);
        if (result->errors && result->ms < HEARTBEAT_S * 999)
            fail_msg("run %d: an error %.0f ms after the cut, before the heartbeat", i,
                     result->ms);
    }
}

/* Hosts and a world on them, whose ranks have made their first step. */
static void hosts_begin(world *w, const world_desc *desc) {
    hosts = net_start(desc->ranks, 1500);
    if (!hosts) SKIP("no relay: %s", strerror(errno));
    world_start(w, desc);
    (void)world_steps(w, 1, -1, net_get(&hosts->refused) ? 1 : 10);
    if (!net_get(&hosts->refused)) return;
    (void)world_end(w);
    world_free(w);
    SKIP("no network namespace or TUN device: %s", strerror(net_get(&hosts->refused)));
}

static void hosts_end(world *w) {
    const char *why = world_end(w);
    net_end(hosts);
    if (why) fail_msg("%s", why);
}

/* Ranks 0 and 1 use their data connection, compute, and use it again. */
typedef struct forget_plan {
    int64_t count;
    int messages; /* 1: the connection of messages */
} forget_plan;

static int own_port(const tsh_comm *comm, int peer, int messages) {
    tshi_uv_group *group = (tshi_uv_group *)comm->impl;
    tshi_uv_address end;
    return tshi_uv_end_of(tshi_uv_link_to(group, peer, messages)->fd, 0, &end) ? tshi_uv_port(&end)
                                                                              : 0;
}

static tsh_result forget_call(job *j, const forget_plan *p, float *x) {
    if (!p->messages) return tsh_allreduce(&j->comm, x, p->count, TSH_F32, TSH_SUM);
    if (j->rank == 0) return tsh_send(&j->comm, x, p->count, TSH_F32, 1);
    if (j->rank == 1) return tsh_recv(&j->comm, x, p->count, TSH_F32, 0);
    return tsh_barrier(&j->comm); /* which never ends */
}

static void forget_rank(job *j) {
    const forget_plan *p = (const forget_plan *)j->user;
    float *x = (float *)calloc((size_t)p->count, sizeof *x);
    tsh_result result;
    CHECK(tsh_allreduce(&j->comm, x, p->count, TSH_F32, TSH_SUM) == TSH_OK);
    if (j->rank == 1) j->figure[0] = (uint64_t)own_port(&j->comm, 0, p->messages);
    job_step(j);
    CHECK(job_told(j, 1, 20));
    sleep_ms(HEARTBEAT_S * 1300); /* nothing is under way in it, so nothing is wrong */
    CHECK(tsh_comm_error(&j->comm, NULL) == TSH_OK);
    j->ms = now_ms();
    result = forget_call(j, p, x);
    if (result == TSH_OK) result = tsh_barrier(&j->comm); /* rank 2 had what it needs */
    CHECK(result == TSH_ERR_LOST);
    j->ms = now_ms() - j->ms;
    (void)job_verdict(j);
    free(x);
}

static void forget(int64_t count, int messages) {
    forget_plan plan = {count, messages};
    world_desc desc = host_desc(3, forget_rank, &plan);
    world w;
    desc.uv.heartbeat = HEARTBEAT_S;
    desc.uv.timeout = 20;
    hosts_begin(&w, &desc);
    net_put(&hosts->forgotten, (int)w.jobs[1].figure[0]);
    world_tell(&w, 1);
    hosts_end(&w);
    for (int r = 0; r < 3; r++) {
        const tsh_error *v = &w.jobs[r].verdict;
        char port[16];
        (void)snprintf(port, sizeof port, ":%d)", (int)w.jobs[1].figure[0]);
        if (v->code != TSH_ERR_LOST || v->rank != 1 || !strstr(v->message, port) ||
            !strstr(v->message, "rank 0 (10.77.0.1:") || !strstr(v->message, "rank 1 (10.77.0.2:"))
            fail_msg("rank %d: %s of rank %d: %s", r, tsh_result_name(v->code), v->rank,
                     v->message);
        assert_string_equal(v->message, w.jobs[0].verdict.message);
        if (w.jobs[r].ms < HEARTBEAT_S * 950 || w.jobs[r].ms > HEARTBEAT_S * 1000 + LIMIT_MS)
            fail_msg("rank %d: after %.0f ms", r, w.jobs[r].ms);
    }
    world_free(&w);
}

static void test_forgotten(void **state) {
    (void)state;
    forget(10, 0);
    forget(1000000, 0);
    forget(10, 1);
}

/* Rank 1 does not come for three heartbeats: what rank 0 sends fills the connection up to a window
 * of zero, and both are well. */
static void busy_rank(job *j) {
    const int64_t count = 4000000;
    int64_t *x = (int64_t *)malloc((size_t)count * sizeof *x);
    tsh_coll coll = tsh_coll_make(TSH_ALLREDUCE, TSH_I64);
    tsh_req req;
    for (int64_t i = 0; i < count; i++) x[i] = i;
    CHECK(tsh_barrier(&j->comm) == TSH_OK);
    job_step(j);
    coll.send = x;
    coll.recv = x;
    coll.count = count;
    if (j->rank == 1) { /* starts it, so that bytes come in, and does not read them */
        CHECK(tsh_start(&j->comm, &coll, &req) == TSH_OK);
        sleep_ms(HEARTBEAT_S * 3300);
        CHECK(tsh_wait(&j->comm, req) == TSH_OK);
    } else {
        CHECK(tsh_allreduce(&j->comm, x, count, TSH_I64, TSH_SUM) == TSH_OK);
    }
    CHECK(x[0] == 0 && x[count - 1] == 3 * (count - 1));
    free(x);
}

static void test_busy(void **state) {
    world_desc desc = host_desc(3, busy_rank, NULL);
    world w;
    (void)state;
    desc.uv.heartbeat = HEARTBEAT_S;
    hosts_begin(&w, &desc);
    hosts_end(&w);
    world_free(&w);
}

/* Rank 0 leaves while the network loses what it sends to rank 1: ranks 1 and 2 go on, and learn
 * that it left in good order. */
static void leaving_rank(job *j) {
    CHECK(tsh_barrier(&j->comm) == TSH_OK);
    job_step(j);
    CHECK(job_told(j, 1, 20));
    for (int i = 0; j->rank != 0 && i < HEARTBEAT_S * 150; i++) {
        float mine = 1, its = 0;
        const int peer = 3 - j->rank;
        CHECK(tsh_sendrecv(&j->comm, &mine, 1, peer, &its, 1, peer, TSH_F32) == TSH_OK);
        if (j->failure[0]) return;
        sleep_ms(10);
    }
}

static void test_leaving(void **state) {
    static const net_link cut = {1, 0, 0, 0}, whole = {0, 0, 0, 0};
    world_desc desc = host_desc(3, leaving_rank, NULL);
    world w;
    (void)state;
    desc.uv.heartbeat = HEARTBEAT_S;
    hosts_begin(&w, &desc);
    net_rule(hosts, 1u << 0, 1u << 1, cut);
    world_tell(&w, 1);
    sleep_ms(250);
    net_rule(hosts, 1u << 0, 1u << 1, whole);
    hosts_end(&w);
    world_free(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_heal),
        cmocka_unit_test(test_forgotten),
        cmocka_unit_test(test_busy),
        cmocka_unit_test(test_leaving),
    };
    return cmocka_run_group_tests_name("fault/net", tests, NULL, NULL);
}
