/* F9: signals of the host program disturb nothing, and few descriptors give an error that says how
 * many are needed. */
#define _DEFAULT_SOURCE /* setitimer */
#define TSHARD_IMPLEMENTATION
#include "../../backends/tshard_uv.h"

#include "../support/processes.h"
#include "../support/collectives.h"
#include "../support/faults.h"

#include <sys/resource.h>
#include <sys/time.h>

/* ---------------------------------------------------------------- SIGALRM at 1 kHz */

static volatile sig_atomic_t alarms;

static void note_alarm(int number_of_signal) {
    (void)number_of_signal;
    alarms++;
}

/* Without SA_RESTART, so that system calls are interrupted; it begins before the rank joins. */
static void alarm_prepare(job *j, tsh_uv_desc *uv) {
    struct itimerval timer = {{0, 1000}, {0, 1000}};
    struct sigaction action;
    (void)uv;
    memset(&action, 0, sizeof action);
    action.sa_handler = note_alarm;
    CHECK(sigaction(SIGALRM, &action, NULL) == 0);
    CHECK(setitimer(ITIMER_REAL, &timer, NULL) == 0);
}

/* The user is the bytes to sum; every sum is checked. */
static void alarm_rank(job *j) {
    enum { LONG = 4 * 1024 * 1024 };
    struct itimerval off = {{0, 0}, {0, 0}};
    int64_t bytes = *(const int64_t *)j->user, done = 0, wrong = 0;
    float *x = (float *)malloc(LONG * sizeof *x), ranks = (float)(j->ranks * (j->ranks - 1) / 2);
    for (int round = 0; x && done < bytes && !wrong && !j->failure[0]; round++) {
        int64_t n = round % 3 == 2 ? LONG : round % 3 ? 4096 : 131072;
        for (int64_t i = 0; i < n; i++) x[i] = (float)(i % 1000 + j->rank);
        CHECK(tsh_allreduce(&j->comm, x, n, TSH_F32, TSH_SUM) == TSH_OK);
        for (int64_t i = 0; i < n; i++)
            wrong += x[i] != (float)(i % 1000) * (float)j->ranks + ranks;
        done += n * (int64_t)sizeof *x;
    }
    CHECK(wrong == 0);
    j->figure[0] = (uint64_t)done;
    j->figure[1] = (uint64_t)alarms;
    (void)setitimer(ITIMER_REAL, &off, NULL);
    free(x);
}

static void alarm_row(int ranks) {
    int64_t bytes = (int64_t)(fault_full() ? 10000 : 1500) * 1000000 / ranks;
    world_desc desc = world_over_tcp(ranks, alarm_rank, &bytes, 120);
    const char *why;
    double gb = 0, signals = 1e9;
    world w;
    desc.prepare = alarm_prepare;
    fault_begin("F9", "SIGALRM at 1 kHz, N=%d", ranks);
    world_start(&w, &desc);
    why = world_end(&w);
    if (why) fault_fail("%s", why);
    for (int r = 0; r < ranks; r++) {
        gb += (double)w.jobs[r].figure[0] / 1e9;
        if ((double)w.jobs[r].figure[1] < signals) signals = (double)w.jobs[r].figure[1];
    }
    fault_at_least("right", gb, "GB", (double)bytes * ranks / 1e9);
    fault_at_least("signals", signals, "", 100);
    fault_end();
    world_free(&w);
}

/* ------------------------------------------------------------------------ SIGPIPE */

static volatile sig_atomic_t pipes;

static void note_pipe(int number_of_signal) {
    (void)number_of_signal;
    pipes++;
}

/* The user: 1 if the host program has a handler, 0 if the signal would end it. */
static void pipe_prepare(job *j, tsh_uv_desc *uv) {
    struct sigaction action;
    (void)uv;
    memset(&action, 0, sizeof action);
    action.sa_handler = *(const int *)j->user ? note_pipe : SIG_DFL;
    CHECK(sigaction(SIGPIPE, &action, NULL) == 0);
}

/* Rank 1 dies while all send; the host's disposition and mask are what they were, and no signal
 * came. */
static void pipe_rank(job *j) {
    enum { LONG = 1000000 };
    int handled = *(const int *)j->user;
    struct sigaction now;
    sigset_t mask, waiting;
    float *x = (float *)calloc(LONG, sizeof *x);
    tsh_result result = TSH_OK;
    for (int i = 0; i < 100000 && result == TSH_OK; i++) {
        if (j->rank == 1 && i == 20) (void)raise(SIGKILL);
        result = tsh_allreduce(&j->comm, x, LONG, TSH_F32, TSH_SUM);
    }
    free(x);
    CHECK(result == TSH_ERR_LOST);
    CHECK(sigaction(SIGPIPE, NULL, &now) == 0);
    CHECK(now.sa_handler == (handled ? note_pipe : SIG_DFL));
    CHECK(pthread_sigmask(SIG_BLOCK, NULL, &mask) == 0 && !sigismember(&mask, SIGPIPE));
    CHECK(sigpending(&waiting) == 0 && !sigismember(&waiting, SIGPIPE));
    j->figure[0] = (uint64_t)pipes;
    job_step(j);
}

static void pipe_row(int handled) {
    int runs = fault_full() ? 100 : 10, signals = 0, ended = 0;
    fault_begin("F9", "a peer dies while we send, SIGPIPE %s", handled ? "handled" : "default");
    for (int i = 0; i < runs; i++) {
        world_desc desc = world_over_tcp(3, pipe_rank, &handled, 120);
        const char *why;
        world w;
        desc.prepare = pipe_prepare;
        world_start(&w, &desc);
        w.expected[1] = 1;
        why = world_end(&w);
        if (why) fault_fail("%s", why);
        signals += (int)(w.jobs[0].figure[0] + w.jobs[2].figure[0]);
        ended += job_steps(&w.jobs[0]) && job_steps(&w.jobs[2]);
        world_free(&w);
    }
    fault_figure("runs", runs, "");
    fault_at_most("signals", signals, "", 0);
    fault_at_least("survivors told", 100.0 * ended / runs, "%", 100);
    fault_end();
}

/* -------------------------------------------------------------------- descriptors */

static void few_prepare(job *j, tsh_uv_desc *uv) {
    struct rlimit limit;
    CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    limit.rlim_cur = *(const rlim_t *)j->user;
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    uv->timeout = 3;
}

static void barrier_rank(job *j) {
    CHECK(tsh_barrier(&j->comm) == TSH_OK);
}

/* How many descriptors a sentence says are needed; 0: it does not. */
static int needed(const char *sentence) {
    const char *words = strstr(sentence, "needs about ");
    return words && strstr(words, "ulimit -n") ? atoi(words + strlen("needs about ")) : 0;
}

/* 1: all ranks joined; 0: none did, and *needs is what the first sentence asks for. */
static int few_run(rlim_t limit, int *needs) {
    world_desc desc = world_over_tcp(8, barrier_rank, &limit, 120);
    const char *why, *sentence = NULL;
    int joined = 0;
    world w;
    desc.prepare = few_prepare;
    desc.may_fail = 1;
    desc.limit = 20;
    world_start(&w, &desc);
    why = world_end(&w);
    if (why) fault_fail("%s", why);
    *needs = 0;
    for (int r = 0; r < 8; r++) {
        joined += w.jobs[r].opened == TSH_OK;
        if (w.jobs[r].opened == TSH_OK) continue;
        sentence = w.jobs[r].why.message;
        if (needed(sentence) > *needs) *needs = needed(sentence);
    }
    if (joined != 8 && !*needs) fault_fail("with %d: %s", (int)limit, sentence);
    world_free(&w);
    return joined == 8;
}

static void few_row(rlim_t limit) {
    int needs, more, joined, enough = 0;
    fault_begin("F9", "%d descriptors, N=8", (int)limit);
    joined = few_run(limit, &needs);
    for (int i = 0; !joined && i < 3 && needs && !enough; i++)
        enough = few_run((rlim_t)needs, &more);
    fault_figure("joined", joined, "");
    fault_figure("asks for", needs, "");
    fault_at_least("and that is enough", joined || enough, "", 1);
    fault_end();
}

int main(void) {
    static const rlim_t limits[] = {16, 24, 32, 48, 64};
    alarm_row(2);
    alarm_row(4);
    pipe_row(0);
    pipe_row(1);
    for (int i = 0; i < 5; i++) few_row(limits[i]);
    return fault_result();
}
