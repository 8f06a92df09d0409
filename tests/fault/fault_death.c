/* F1, F2, F15: a rank is killed, is stopped, or leaves. */
#define TSHARD_IMPLEMENTATION
#include "../../backends/tshard_uv.h"

#include "../support/processes.h"
#include "../support/collectives.h"
#include "../support/faults.h"

#include <dirent.h>

static const int sizes[] = {2, 4, 8};

/* What the survivors of many runs saw. */
typedef struct tally {
    samples ms;
    int runs, survivors, named;
} tally;

/* Every survivor's verdict should be this code and rank, in one sentence. */
static void tally_verdicts(tally *t, const world *w, int victim, int64_t since) {
    const char *sentence = NULL;
    t->runs++;
    for (int r = 0; r < w->desc.ranks; r++) {
        const job *j = &w->jobs[r];
        int named;
        if (r == victim) continue;
        if (!sentence) sentence = j->verdict.message;
        named = j->verdict.code == TSH_ERR_LOST && j->verdict.rank == victim &&
                strcmp(sentence, j->verdict.message) == 0;
        if (!named)
            fault_fail("rank %d of %d, when %d was lost, got %s of rank %d: %s (the first: %s)", r,
                       w->desc.ranks, victim, tsh_result_name(j->verdict.code), j->verdict.rank,
                       j->verdict.message, sentence);
        t->survivors++;
        t->named += named;
        sample_add(&t->ms, (double)(j->at - since) / 1e6);
    }
}

static void tally_row(tally *t, double p99, double worst) {
    fault_figure("runs", t->runs, "");
    fault_figure("p50", sample_percentile(&t->ms, 50), "ms");
    if (p99 > 0) fault_at_most("p99", sample_percentile(&t->ms, 99), "ms", p99);
    fault_at_most("max", sample_percentile(&t->ms, 100), "ms", worst);
    fault_at_least("named", 100.0 * t->named / (t->survivors ? t->survivors : 1), "%", 100);
}

/* ------------------------------------------------------------------ F1 SIGKILL */

static void kill_run(tally *t, int ranks, const doing_plan *plan, uint64_t draw) {
    world_desc desc = world_over_tcp(ranks, until_error_rank, plan, 30);
    int victim = (int)(mix(draw) % (uint64_t)ranks);
    const char *why;
    int64_t killed;
    world w;
    world_start(&w, &desc);
    if (!world_steps(&w, 3, -1, 20)) fault_fail("the ranks do not get going");
    sleep_us((int64_t)(mix(draw + 1) % 5000));
    killed = world_signal(&w, victim, SIGKILL);
    why = world_end(&w);
    if (why) fault_fail("%s", why);
    tally_verdicts(t, &w, victim, killed);
    world_free(&w);
}

static void kill_rows(void) {
    static const doing what[] = {ALLREDUCE, ALLGATHER, RECEIVE, IDLE};
    int runs = fault_full() ? 200 : 40;
    for (int d = 0; d < 4; d++) {
        for (int n = 0; n < 3; n++) {
            static tally t;
            memset(&t, 0, sizeof t);
            fault_begin("F1", "SIGKILL in %s, N=%d", doing_names[what[d]], sizes[n]);
            for (int i = 0; i < runs; i++) {
                doing_plan plan = {what[d], i % 2 ? 1000 : 300000};
                kill_run(&t, sizes[n], &plan, (uint64_t)(i * 100 + d * 10 + n));
            }
            tally_row(&t, 100, 500);
            fault_end();
        }
    }
}

/* The last rank never comes, so that all others wait in tsh_uv_open. */
static void last_is_absent(job *j, tsh_uv_desc *uv) {
    uv->timeout = 20;
    if (j->rank == j->ranks - 1) exit(0);
}

static void nothing_rank(job *j) {
    (void)j;
}

static void handshake_run(tally *t, int ranks, uint64_t draw) {
    world_desc desc = world_over_tcp(ranks + 1, nothing_rank, NULL, 30);
    int victim = (int)(mix(draw) % (uint64_t)ranks);
    const char *why;
    int64_t killed;
    world w;
    desc.may_fail = 1;
    desc.prepare = last_is_absent;
    world_start(&w, &desc);
    sleep_ms(300); /* by now all hellos were accepted */
    killed = world_signal(&w, victim, SIGKILL);
    (void)world_wait(&w, -1, 25);
    why = world_end(&w);
    if (why) fault_fail("%s", why);
    for (int r = 0; r < ranks; r++) {
        w.jobs[r].verdict = w.jobs[r].why;
        w.jobs[r].at = w.jobs[r].opened_at;
    }
    w.desc.ranks = ranks;
    tally_verdicts(t, &w, victim, killed);
    world_free(&w);
}

static void handshake_rows(void) {
    int runs = fault_full() ? 200 : 20;
    for (int n = 0; n < 3; n++) {
        static tally t;
        memset(&t, 0, sizeof t);
        fault_begin("F1", "SIGKILL in the handshake, %d ranks there", sizes[n]);
        for (int i = 0; i < runs; i++) handshake_run(&t, sizes[n], (uint64_t)(i * 10 + n));
        tally_row(&t, 100, 500);
        fault_end();
    }
}

/* ------------------------------------------------------------------ F2 SIGSTOP */

/* Survivors stay until the stopped rank has woken up and was refused. */
static void stopped_rank(job *j) {
    until_error_rank(j);
    CHECK(job_told(j, 1, 30));
}

static int all_at(const world *w, int but, double seconds) {
    double until = now_ms() + seconds * 1e3;
    for (int r = 0; r < w->desc.ranks; r++)
        while (r != but && !__atomic_load_n(&w->jobs[r].at, __ATOMIC_SEQ_CST)) {
            if (now_ms() > until) return 0;
            sleep_ms(1);
        }
    return 1;
}

static void stop_run(tally *t, int *refused, int ranks, const doing_plan *plan, uint64_t draw) {
    world_desc desc = world_over_tcp(ranks, stopped_rank, plan, 30);
    int victim = (int)(mix(draw) % (uint64_t)ranks);
    const char *why;
    int64_t stopped;
    world w;
    desc.uv.heartbeat = 2;
    world_start(&w, &desc);
    if (!world_steps(&w, 3, -1, 20)) fault_fail("the ranks do not get going");
    stopped = world_signal(&w, victim, SIGSTOP);
    if (!all_at(&w, victim, 10)) fault_fail("a survivor got no verdict within 10 s");
    (void)world_signal(&w, victim, SIGCONT);
    if (!all_at(&w, -1, 10)) fault_fail("the resumed rank got no verdict within 10 s");
    world_tell(&w, 1);
    why = world_end(&w);
    if (why) fault_fail("%s", why);
    tally_verdicts(t, &w, victim, stopped);
    *refused += w.jobs[victim].verdict.code == TSH_ERR_LOST;
    world_free(&w);
}

static void stop_rows(void) {
    static const doing what[] = {ALLREDUCE, IDLE};
    int runs = fault_full() ? 20 : 2;
    for (int d = 0; d < 2; d++) {
        for (int n = 0; n < 3; n++) {
            static tally t;
            int refused = 0;
            memset(&t, 0, sizeof t);
            fault_begin("F2", "SIGSTOP in %s, N=%d, heartbeat 2 s", doing_names[what[d]], sizes[n]);
            for (int i = 0; i < runs; i++) {
                doing_plan plan = {what[d], 100000};
                stop_run(&t, &refused, sizes[n], &plan, (uint64_t)(i * 10 + d * 3 + n));
            }
            tally_row(&t, 0, 2500);
            fault_at_least("resumed rank refused", 100.0 * refused / runs, "%", 100);
            fault_end();
        }
    }
}

/* -------------------------------------------------------------- F15 close, opens */

/* The last rank closes while the others are inside an all-reduce. */
static void closing_rank(job *j) {
    float x[1000] = {0};
    CHECK(tsh_barrier(&j->comm) == TSH_OK);
    if (j->rank == j->ranks - 1) {
        sleep_ms(30);
        j->at = now_ns();
        tsh_comm_close(&j->comm);
        return;
    }
    CHECK(tsh_allreduce(&j->comm, x, 1000, TSH_F32, TSH_SUM) == TSH_ERR_LOST);
    (void)job_verdict(j);
}

static void close_rows(void) {
    int runs = fault_full() ? 100 : 30;
    for (int n = 0; n < 3; n++) {
        static tally t;
        memset(&t, 0, sizeof t);
        fault_begin("F15", "close while others are in a call, N=%d", sizes[n]);
        for (int i = 0; i < runs; i++) {
            world_desc desc = world_over_tcp(sizes[n], closing_rank, NULL, 30);
            const char *why;
            world w;
            world_start(&w, &desc);
            why = world_end(&w);
            if (why) fault_fail("%s", why);
            tally_verdicts(&t, &w, sizes[n] - 1, w.jobs[sizes[n] - 1].at);
            world_free(&w);
        }
        tally_row(&t, 0, 100);
        fault_end();
    }
}

static int descriptors(void) {
    DIR *folder = opendir("/proc/self/fd");
    int count = 0;
    while (folder && readdir(folder)) count++;
    if (folder) (void)closedir(folder);
    return count;
}

static double resident_kib(void) {
    long pages = 0, resident = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (file && fscanf(file, "%ld %ld", &pages, &resident) != 2) resident = 0;
    if (file) (void)fclose(file);
    return (double)resident * (double)sysconf(_SC_PAGESIZE) / 1024;
}

/* Opens and closes; compares the state after a tenth with the one at the end. */
static void opens_rank(job *j) {
    int opens = *(const int *)j->user;
    tsh_uv_desc uv = job_desc(j);
    int listener = uv.listener, before = 0;
    double memory = 0;
    for (int i = 0; i < opens && !j->failure[0]; i++) {
        int64_t sum = 1;
        uv.listener = listener ? dup(listener) : 0;
        if (tsh_uv_open(&uv, &j->comm) != TSH_OK) {
            (void)snprintf(j->failure, sizeof j->failure, "rank %d, open %d: %s", j->rank, i,
                           j->why.message);
            return;
        }
        CHECK(tsh_allreduce(&j->comm, &sum, 1, TSH_I64, TSH_SUM) == TSH_OK && sum == j->ranks);
        CHECK(tsh_barrier(&j->comm) == TSH_OK);
        tsh_comm_close(&j->comm);
        if (i == opens / 10) {
            before = descriptors();
            memory = resident_kib();
        }
        job_step(j);
    }
    j->figure[0] = (uint64_t)(descriptors() - before + 1000);
    j->ms = resident_kib() - memory;
}

static void opens_row(void) {
    int opens = 1000, more = 0;
    world_desc desc = world_over_tcp(2, opens_rank, &opens, 30);
    double kib = 0;
    const char *why;
    world w;
    desc.by_itself = 1;
    desc.limit = 120;
    fault_begin("F15", "opens and closes, N=2");
    world_start(&w, &desc);
    why = world_end(&w);
    if (why) fault_fail("%s", why);
    for (int r = 0; r < 2; r++) {
        int now = (int)w.jobs[r].figure[0] - 1000;
        more = now > more ? now : more;
        kib = w.jobs[r].ms > kib ? w.jobs[r].ms : kib;
    }
    fault_figure("opens", job_steps(&w.jobs[0]), "");
    fault_at_most("more descriptors", more, "", 0);
    fault_at_most("more memory", kib, "KiB", 256); /* pages that the allocator keeps */
    fault_end();
    world_free(&w);
}

int main(void) {
    kill_rows();
    handshake_rows();
    stop_rows();
    close_rows();
    opens_row();
    return fault_result();
}
