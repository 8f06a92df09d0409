/* heal.h - worlds on hosts of their own (relay.h) whose network breaks and heals again, as one run
 * that reports what each rank was told. Runs are processes, so that many may go side by side.
 * Include it after relay.h. */
#ifndef TSHARD_TESTS_HEAL_H
#define TSHARD_TESTS_HEAL_H

static net *hosts; /* of the world that runs */

static void host_prepare(job *j, tsh_uv_desc *uv) {
    if (!net_enter(hosts, j->rank)) exit(0);
    uv->host = "10.77.0.1";
    uv->port = 29400;
}

UNUSED static world_desc host_desc(int ranks, rank_fn fn, const void *user) {
    world_desc desc = world_over_tcp(ranks, fn, user, 100);
    desc.prepare = host_prepare;
    desc.unbound = 1;
    return desc;
}

/* A network that is cut into two sides for a while. */
typedef struct heal_plan {
    int ranks;
    unsigned side; /* ranks on one side; the others are on the other one */
    double heartbeat, heals; /* seconds; heals: after the cut */
    int calls;               /* 1: ranks are in all-reduces; 0: they compute */
    int leaves;              /* 1: a rank that got its error closes at once */
} heal_plan;

typedef struct heal_result {
    int refused;        /* there can be no hosts: an errno */
    int errors;         /* ranks whose world ended; 0: it lived on */
    int one;            /* 1: they have one code and one rank, */
    int sentence;       /* and one sentence */
    int named;          /* of the first error */
    double ms;          /* from the cut to the first error; 0: there was none */
    char differ[1100];  /* else two of them */
    char failure[1200]; /* what went wrong beside that; "": nothing */
} heal_result;

/* The side that is named when the network is cut: the one without a majority of ranks, at a tie the
 * one without rank 0. */
static unsigned heal_minority(const heal_plan *p) {
    unsigned all = (1u << p->ranks) - 1, side = p->side & all;
    int in = 0;
    for (int r = 0; r < p->ranks; r++) in += (int)(side >> r & 1);
    if (2 * in == p->ranks) return side & 1 ? all & ~side : side;
    return 2 * in < p->ranks ? side : all & ~side;
}

static int heal_lowest(unsigned side) {
    int r = 0;
    while (!(side >> r & 1)) r++;
    return r;
}

/* Goes on until the world ends, or the test says that it has lived on. */
static void heal_rank(job *j) {
    const heal_plan *p = (const heal_plan *)j->user;
    double until = now_ms() + 60e3;
    int64_t told[1000];
    tsh_result result = TSH_OK;
    memset(told, 0, sizeof told);
    while (result == TSH_OK && told[0] == 0 && now_ms() < until) {
        sleep_ms(10);
        told[0] = __atomic_load_n(&j->told, __ATOMIC_SEQ_CST) != 0;
        result = p->calls ? tsh_allreduce(&j->comm, told, 1000, TSH_I64, TSH_MAX)
                          : tsh_comm_error(&j->comm, NULL);
        if (result == TSH_OK) job_step(j);
    }
    if (result == TSH_OK) result = tsh_barrier(&j->comm);
    (void)job_verdict(j);
    if (!p->leaves) sleep_ms(1500);
}

/* Ranks that have their error. */
static int heal_errors(const world *w) {
    int count = 0;
    for (int r = 0; r < w->desc.ranks; r++)
        count += __atomic_load_n(&w->jobs[r].at, __ATOMIC_SEQ_CST) != 0;
    return count;
}

static void heal_compare(const world *w, int64_t cut_at, heal_result *result) {
    const tsh_error *first = NULL;
    result->one = result->sentence = 1;
    result->errors = 0;
    for (int r = 0; r < w->desc.ranks; r++) {
        const tsh_error *v = &w->jobs[r].verdict;
        double ms = (double)(w->jobs[r].at - cut_at) / 1e6;
        result->errors += v->code != TSH_OK;
        if (v->code != TSH_OK && (result->ms <= 0 || ms < result->ms)) result->ms = ms;
        if (!first) first = v;
        if (v->code == first->code && v->rank == first->rank) {
            if (strcmp(v->message, first->message) == 0) continue;
            result->sentence = 0;
        } else {
            result->one = result->sentence = 0;
        }
        (void)snprintf(result->differ, sizeof result->differ, "rank %d got: %s; rank 0: %s", r,
                       v->message, first->message);
    }
    result->named = first && first->code != TSH_OK ? first->rank : -1;
    if (result->one && first)
        (void)snprintf(result->differ, sizeof result->differ, "%s; ", first->message);
}

static void heal_run(const heal_plan *p, heal_result *result) {
    world_desc desc = host_desc(p->ranks, heal_rank, p);
    net_link cut = {1, 0, 0, 0}, whole = {0, 0, 0, 0};
    double since, settled;
    const char *why;
    int64_t cut_at;
    world w;
    memset(result, 0, sizeof *result);
    desc.uv.heartbeat = p->heartbeat;
    hosts = net_start(p->ranks, 1500);
    if (!hosts) {
        result->refused = errno;
        return;
    }
    world_start(&w, &desc);
    if (!world_steps(&w, 3, -1, net_get(&hosts->refused) ? 1 : 20) && !net_get(&hosts->refused))
        (void)snprintf(result->failure, sizeof result->failure, "the ranks do not get going");
    sleep_ms(600); /* beats were seen */
    since = now_ms();
    cut_at = now_ns();
    net_rule(hosts, p->side, ~p->side, cut);
    net_rule(hosts, ~p->side, p->side, cut);
    sleep_us((int64_t)(p->heals * 1e6));
    net_rule(hosts, ~0u, ~0u, whole);
    /* TCP tries again after up to twice the time of the cut. */
    settled = since + 1e3 * (2 * p->heals + 0.5);
    if (settled < since + 1e3 * (p->heartbeat + 1)) settled = since + 1e3 * (p->heartbeat + 1);
    while (now_ms() < settled && heal_errors(&w) < p->ranks) sleep_ms(5);
    if (!heal_errors(&w)) world_tell(&w, 1);
    why = world_end(&w);
    result->refused = net_get(&hosts->refused);
    if (why && !result->failure[0])
        (void)snprintf(result->failure, sizeof result->failure, "%s", why);
    heal_compare(&w, cut_at, result);
    net_end(hosts);
    world_free(&w);
}

/* All plans, at most `most` at a time. */
UNUSED static void heal_runs(const heal_plan *plans, heal_result *results, int count, int most) {
    heal_result *shared = (heal_result *)shared_memory(sizeof *shared * (size_t)count);
    int running = 0;
    (void)fflush(NULL);
    for (int i = 0; shared && i < count; i++) {
        pid_t pid;
        if (running == most && wait(NULL) > 0) running--;
        pid = fork();
        if (pid == 0) {
            heal_run(&plans[i], &shared[i]);
            _exit(0);
        }
        running += pid > 0;
    }
    while (running > 0 && wait(NULL) > 0) running--;
    for (int i = 0; i < count && shared; i++) results[i] = shared[i];
    if (shared) shared_free(shared, sizeof *shared * (size_t)count);
}

/* Plan number i of many: 2, 4 or 8 ranks, of which one or a few are cut off for 0.6 to 1.3
 * heartbeats. */
UNUSED static heal_plan heal_draw(int i) {
    static const int sizes[] = {2, 4, 8};
    uint64_t draw = (uint64_t)i * 16;
    heal_plan p;
    unsigned all;
    memset(&p, 0, sizeof p);
    p.ranks = sizes[i % 3];
    all = (1u << p.ranks) - 1;
    p.side = 1u << mix(draw) % (uint64_t)p.ranks;
    if (mix(draw + 1) % 4 == 0) p.side = 1 + (unsigned)(mix(draw + 2) % (all - 1));
    p.heartbeat = mix(draw + 3) % 2 ? 2 : 1;
    p.heals = p.heartbeat * (0.6 + 0.7 * (double)(mix(draw + 4) % 1000) / 1000);
    p.calls = (int)(mix(draw + 5) % 2);
    p.leaves = (int)(mix(draw + 6) % 2);
    return p;
}

#endif
