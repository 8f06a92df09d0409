/* F3, F4: networks that break, and those that are only slow. The ranks live on hosts of their own:
 * network namespaces with a relay between them. */
#define _GNU_SOURCE /* unshare */
#define TSHARD_IMPLEMENTATION
#include "../../backends/tshard_uv.h"

#include "../support/processes.h"
#include "../support/collectives.h"
#include "../support/faults.h"
#include "../support/relay.h"
#include "../support/heal.h"

/* Ends the world and the hosts; 1 if the row is to be skipped, which it then is. */
static int host_end(world *w) {
    const char *why = world_end(w);
    int refused = net_get(&hosts->refused);
    if (refused)
        fault_skip("no network namespace or TUN device: %s", strerror(refused));
    else if (why)
        fault_fail("%s", why);
    net_end(hosts);
    return refused != 0;
}

/* ------------------------------------------------------------------ F3 partitions */

typedef enum breakage { HOLE, LINK, HALF } breakage;

typedef struct partition {
    const char *name;
    int ranks;
    unsigned side; /* ranks on the other side than 0, or the one whose link breaks */
    breakage how;
    doing what;
} partition;

static void partition_break(const partition *p) {
    unsigned rest = ~p->side;
    net_link cut = {1, 0, 0, 0};
    if (p->how == LINK) {
        for (int h = 0; h < p->ranks; h++) net_put(&hosts->down[h], p->side >> h & 1);
        return;
    }
    net_rule(hosts, rest, p->side, cut);
    if (p->how == HOLE) net_rule(hosts, p->side, rest, cut);
}

/* Both sides name the lowest rank of the one without a majority; of two ranks, rank 1. */
static int partition_named(const partition *p, const job *j) {
    heal_plan plan;
    memset(&plan, 0, sizeof plan);
    plan.ranks = p->ranks;
    plan.side = p->side;
    return j->verdict.code == TSH_ERR_LOST && j->verdict.rank == heal_lowest(heal_minority(&plan));
}

static void partition_row(const partition *p) {
    doing_plan plan = {p->what, 1000};
    world_desc desc = host_desc(p->ranks, until_error_rank, &plan);
    double worst = 0, least = 1e9;
    int named = 0;
    int64_t broken;
    world w;
    desc.uv.heartbeat = 2;
    fault_begin("F3", "%s, in %s, heartbeat 2 s", p->name, doing_names[p->what]);
    hosts = net_start(p->ranks, 1500);
    if (!hosts) {
        fault_skip("no relay: %s", strerror(errno));
        return;
    }
    world_start(&w, &desc);
    (void)world_steps(&w, 3, -1, net_get(&hosts->refused) ? 1 : 20);
    sleep_ms(700); /* beats were seen */
    broken = now_ns();
    partition_break(p);
    if (!host_end(&w)) {
        for (int r = 0; r < p->ranks; r++) {
            const job *j = &w.jobs[r];
            double ms = (double)(j->at - broken) / 1e6;
            worst = ms > worst ? ms : worst;
            least = ms < least ? ms : least;
            named += partition_named(p, j);
            if (!partition_named(p, j))
                fault_fail("rank %d got %s of rank %d: %s", r, tsh_result_name(j->verdict.code),
                           j->verdict.rank, j->verdict.message);
        }
        fault_at_least("min", least, "ms", 1999);
        fault_at_most("max", worst, "ms", 2500);
        fault_at_least("named", 100.0 * named / p->ranks, "%", 100);
        fault_end();
    }
    world_free(&w);
}

/* ------------------------------------------------------------------ F4 false alarms */

/* All compute for the user's seconds without a call; then the world must still be there. */
static void silent_rank(job *j) {
    double until = now_ms() + *(const double *)j->user * 1e3;
    volatile uint64_t x = 1;
    grid_case c;
    memset(&c, 0, sizeof c);
    c.dtype = TSH_F32;
    c.count = 1000;
    grid_allreduce(j, c);
    while (now_ms() < until)
        for (int i = 0; i < 100000; i++) x = mix(x);
    grid_allreduce(j, c);
}

static void silence_row(void) {
    double seconds = fault_full() ? 60 : 12;
    world_desc desc = host_desc(4, silent_rank, &seconds);
    const char *why;
    world w;
    fault_begin("F4", "%g s of computing, N=4, heartbeat 2 s", seconds);
    desc.prepare = NULL;
    desc.unbound = 0;
    desc.uv.heartbeat = 2;
    world_start(&w, &desc);
    why = world_end(&w);
    if (why) fault_fail("%s", why);
    fault_at_most("false alarms", why != NULL, "", 0);
    fault_end();
    world_free(&w);
}

typedef struct slow {
    const char *name;
    int ranks, mtu;
    net_link rule;
    int from_start; /* 1: also while the world forms */
    int64_t count;
    int rounds;
} slow;

/* Every sum is compared with the documented order, bit for bit. */
static void slow_rank(job *j) {
    const slow *s = (const slow *)j->user;
    grid_case c;
    memset(&c, 0, sizeof c);
    c.dtype = TSH_F32;
    c.blocks = 1;
    job_step(j);
    CHECK(job_told(j, 1, 20));
    for (int i = 0; i < s->rounds; i++) {
        c.count = s->count;
        c.in_place = i % 2;
        grid_allreduce(j, c);
        c.count = s->count / 10;
        grid_allgather(j, c);
        grid_broadcast(j, c);
        grid_pairwise(j, c);
        job_step(j);
    }
}

static void slow_row(const slow *s) {
    world_desc desc = host_desc(s->ranks, slow_rank, s);
    double begin;
    world w;
    fault_begin("F4", "%s, N=%d", s->name, s->ranks);
    hosts = net_start(s->ranks, s->mtu);
    if (!hosts) {
        fault_skip("no relay: %s", strerror(errno));
        return;
    }
    if (s->from_start) net_rule(hosts, ~0u, ~0u, s->rule);
    world_start(&w, &desc);
    (void)world_steps(&w, 1, -1, 20);
    net_rule(hosts, ~0u, ~0u, s->rule);
    world_tell(&w, 1);
    begin = now_ms();
    if (!host_end(&w)) {
        fault_figure("took", (now_ms() - begin) / 1e3, "s");
        fault_at_least("right rounds", job_steps(&w.jobs[0]) - 1, "", s->rounds);
        fault_end();
    }
    world_free(&w);
}

int main(void) {
    static const partition partitions[] = {
        {"a black hole between 0 1 and 2 3", 4, 0xc, HOLE, ALLREDUCE},
        {"a black hole around 2 of 3", 3, 0x4, HOLE, IDLE},
        {"the link of 1 of 3 is down", 3, 0x2, LINK, ALLREDUCE},
        {"the link of 0 of 4 is down", 4, 0x1, LINK, IDLE},
        {"half open, 0 to 1", 2, 0x2, HALF, ALLREDUCE},
        {"half open, 1 to 0", 2, 0x1, HALF, IDLE},
        {"half open, to 2 of 4", 4, 0x4, HALF, ALLREDUCE},
    };
    static const slow slows[] = {
        {"1 byte per ms", 2, 576, {0, 0, 0, 1000000}, 0, 600, 2},
        {"1 % loss, 100 ms delay", 3, 1500, {0, 1, 100000, 0}, 1, 20000, 5},
        {"10 % loss, 5 ms delay", 4, 1500, {0, 10, 5000, 0}, 1, 2000, 5},
    };
    for (int i = 0; i < (int)(sizeof partitions / sizeof partitions[0]); i++)
        partition_row(&partitions[i]);
    silence_row();
    for (int i = 0; i < (int)(sizeof slows / sizeof slows[0]); i++) slow_row(&slows[i]);
    return fault_result();
}
