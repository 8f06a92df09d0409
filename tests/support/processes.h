/* processes.h - worlds of ranks for tests of collectives: every rank a thread of the threads
 * backend, a process that joins over TCP, or a thread of one such process (for sanitizers), or
 * (TESTS_MPI) a process of an mpirun.
 *
 * Include it after the backends; TCP is there if tshard_uv.h is. Ranks report into shared memory,
 * with CHECK; nothing here is cmocka's, whose assertions leave by longjmp, which must not happen in
 * a rank. A world of processes that does not end within its limit is killed, and has failed. */
#ifndef TSHARD_TESTS_PROCESSES_H
#define TSHARD_TESTS_PROCESSES_H

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>
#ifndef _WIN32
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#endif

#ifdef TESTS_MPI
#include "mpi_world.h"
#endif

#ifndef UNUSED
#define UNUSED __attribute__((unused))
#endif

enum { MAX_RANKS = 64 };

typedef enum world_way {
    WORLD_THREADS,
    WORLD_TCP,
    WORLD_TCP_THREADS,
    WORLD_MPI,
    WORLD_OWN /* processes of the test's own backend (TESTS_OWN): net_prepare, net_open, sockets */
} world_way;

typedef struct job job;
typedef struct world world;
typedef void (*rank_fn)(job *j);

/* One rank, in memory that it shares with the test. */
struct job {
    tsh_comm comm;
    int rank, ranks;
    const void *user;
    const world *of;
    tsh_allocator memory; /* of buffers; empty: malloc */
    pthread_t thread;
    /* what it reports */
    char failure[1024]; /* the first one */
    tsh_result opened;  /* how joining ended, */
    tsh_error why;      /* in a sentence, */
    int64_t opened_at;  /* and when (ns, monotonic) */
    tsh_error verdict;
    int64_t at; /* when the verdict was seen */
    double ms;
    uint64_t hash;
    uint64_t figure[4];
    int steps; /* atomic */
    int told;  /* atomic: by the test */
};

typedef struct world_desc {
    world_way way;
    int ranks;
    rank_fn fn;
    const void *user;
    double limit;  /* seconds until the watchdog ends it; 0: 60 */
    int by_itself; /* fn joins (or not) by itself */
    int may_fail;  /* joining may fail: then fn does not run */
    int unbound;   /* the port is only chosen: rank 0 binds it */
#ifdef TSHARD_UV_H
    tsh_uv_desc uv;                             /* what is zero gets a value that fits */
    void (*prepare)(job *j, tsh_uv_desc *uv);   /* (optional) in the rank, before it joins */
    void (*spawned)(const job *j, pid_t child); /* (optional) in the test, after each fork */
#endif
} world_desc;

UNUSED static world_desc world_of(world_way way, int ranks, rank_fn fn, const void *user,
                                  double limit) {
    world_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.way = way;
    desc.ranks = ranks;
    desc.fn = fn;
    desc.user = user;
    desc.limit = limit;
    return desc;
}

/* The ranks are processes that join over TCP. */
UNUSED static world_desc world_over_tcp(int ranks, rank_fn fn, const void *user, double limit) {
    return world_of(WORLD_TCP, ranks, fn, user, limit);
}

struct world {
    world_desc desc;
    job *jobs;
    int64_t began;
    int listener, port;
    char name[64];           /* of the job */
    pid_t pid[MAX_RANKS];    /* 0: none, or it has ended */
    int expected[MAX_RANKS]; /* that a signal ends it */
    char failure[1100];
#ifdef TSHARD_THREADS_H
    tsh_threads_world *threads;
#endif
};

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) job_fail(j, __LINE__, #condition);                                       \
    } while (0)

/* ---------------------------------------------------------------------- time */

UNUSED static int64_t now_ns(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + (int64_t)t.tv_nsec;
}

UNUSED static double now_ms(void) {
    return (double)now_ns() / 1e6;
}

/* Sleeps on where a signal interrupts. */
UNUSED static void sleep_us(int64_t us) {
    int64_t until = now_ns() + us * 1000, left;
    while ((left = until - now_ns()) > 0) {
        struct timespec t;
        t.tv_sec = (time_t)(left / 1000000000);
        t.tv_nsec = (long)(left % 1000000000);
        (void)nanosleep(&t, NULL);
    }
}

UNUSED static void sleep_ms(long ms) {
    sleep_us((int64_t)ms * 1000);
}

/* -------------------------------------------------------------------- a rank */

UNUSED static void job_fail(job *j, int line, const char *what) {
    tsh_error error;
    size_t used;
    if (j->failure[0]) return;
    (void)snprintf(j->failure, sizeof j->failure, "rank %d, line %d: %s", j->rank, line, what);
    used = strlen(j->failure);
    if (tsh_comm_error(&j->comm, &error) != TSH_OK)
        (void)snprintf(j->failure + used, sizeof j->failure - used, " (%s: %s)",
                       tsh_result_name(error.code), error.message);
}

UNUSED static int job_over_tcp(const job *j) {
    return j->of->desc.way == WORLD_TCP || j->of->desc.way == WORLD_TCP_THREADS;
}

UNUSED static void job_step(job *j) {
    (void)__atomic_add_fetch(&j->steps, 1, __ATOMIC_SEQ_CST);
}

UNUSED static int job_steps(const job *j) {
    return __atomic_load_n(&j->steps, __ATOMIC_SEQ_CST);
}

UNUSED static void job_tell(job *j, int what) {
    __atomic_store_n(&j->told, what, __ATOMIC_SEQ_CST);
}

/* 1 if the test has told at least this, within so many seconds. */
UNUSED static int job_told(const job *j, int what, double seconds) {
    double until = now_ms() + seconds * 1e3;
    while (__atomic_load_n(&j->told, __ATOMIC_SEQ_CST) < what) {
        if (now_ms() > until) return 0;
        sleep_ms(1);
    }
    return 1;
}

/* Notes the world's verdict and the moment. */
UNUSED static tsh_result job_verdict(job *j) {
    tsh_result code = tsh_comm_error(&j->comm, &j->verdict);
    j->at = now_ns();
    return code;
}

#ifdef TSHARD_UV_H
/* How this rank joins. */
static tsh_uv_desc job_desc(job *j) {
    const world *w = j->of;
    tsh_uv_desc uv = w->desc.uv;
    uv.rank = j->rank;
    uv.size = j->ranks;
    if (!uv.host) uv.host = "127.0.0.1";
    if (!uv.port) uv.port = w->port;
    if (!uv.listener && j->rank == 0) uv.listener = w->listener;
    if (!uv.job) uv.job = w->name;
    if (!uv.key) {
        uv.key = "a key of all tests";
        uv.key_size = 18;
    }
    if (uv.timeout <= 0) uv.timeout = 30;
    uv.error = &j->why;
    if (w->desc.prepare) w->desc.prepare(j, &uv);
    return uv;
}
#endif

static tsh_result job_join(job *j) {
    (void)j;
#ifdef TSHARD_UV_H
    if (job_over_tcp(j)) {
        tsh_uv_desc uv = job_desc(j);
        const tsh_result result = tsh_uv_open(&uv, &j->comm);
        if (result == TSH_OK) j->memory = tsh_uv_allocator(&j->comm);
        return result;
    }
#endif
#ifdef TESTS_MPI
    if (j->of->desc.way == WORLD_MPI) return mpi_join(&j->comm);
#endif
#ifdef TESTS_OWN
    if (j->of->desc.way == WORLD_OWN) return net_open(j->rank, j->ranks, &j->comm, &j->why);
#endif
#ifdef TSHARD_THREADS_H
    if (!job_over_tcp(j)) return tsh_threads_comm(j->of->threads, j->rank, &j->comm);
#endif
    return TSH_ERR_UNSUPPORTED;
}

/* A buffer for collectives: with TSHARD_SHM=2 it is where ranks of this host read it, if it is not
 * small. */
UNUSED static void *job_take(const job *j, size_t bytes) {
    const tsh_allocator *memory = &j->memory;
    void *p = memory->allocate ? memory->allocate(NULL, 0, bytes + 1, 64, memory->user)
                               : malloc(bytes + 1);
    if (p) memset(p, 0, bytes + 1);
    return p;
}

UNUSED static void job_give(const job *j, void *p) {
    if (p && j->memory.allocate)
        (void)j->memory.allocate(p, 1, 0, 64, j->memory.user);
    else
        free(p);
}

static void *job_main(void *argument) {
    job *j = (job *)argument;
    const world_desc *desc = &j->of->desc;
    if (!desc->by_itself) {
        j->opened = job_join(j);
        j->opened_at = now_ns();
        if (j->opened != TSH_OK && !desc->may_fail)
            (void)snprintf(j->failure, sizeof j->failure, "rank %d cannot join: %s: %s", j->rank,
                           tsh_result_name(j->opened), j->why.message);
        if (j->opened != TSH_OK) return NULL;
    }
    desc->fn(j);
    tsh_comm_close(&j->comm);
    return NULL;
}

/* ------------------------------------------------------------------- a world */

#ifdef _WIN32 /* where worlds are of threads only */
UNUSED static void *shared_memory(size_t bytes) {
    return calloc(1, bytes);
}

UNUSED static void shared_free(void *p, size_t bytes) {
    (void)bytes;
    free(p);
}
#else
UNUSED static void *shared_memory(size_t bytes) {
    int zero = open("/dev/zero", O_RDWR);
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, zero, 0);
    (void)close(zero);
    return p == MAP_FAILED ? NULL : p;
}

UNUSED static void shared_free(void *p, size_t bytes) {
    (void)munmap(p, bytes);
}

/* A listening socket on 127.0.0.1 and a port of the system's choice; -1: none. */
UNUSED static int listen_anywhere(int *port) {
    struct sockaddr_in address;
    socklen_t size = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof address) != 0 ||
        listen(fd, 128) != 0 || getsockname(fd, (struct sockaddr *)&address, &size) != 0) {
        if (fd >= 0) (void)close(fd);
        return -1;
    }
    *port = ntohs(address.sin_port);
    return fd;
}
#endif

TSH_PRINTF(2, 3) static void world_fail(world *w, const char *format, ...) {
    va_list list;
    if (w->failure[0]) return;
    va_start(list, format);
    (void)vsnprintf(w->failure, sizeof w->failure, format, list);
    va_end(list);
}

/* Ranks first to last as threads of this process. */
UNUSED static void world_threads(world *w, int first, int last) {
    for (int r = first; r < last; r++)
        if (pthread_create(&w->jobs[r].thread, NULL, job_main, &w->jobs[r]) != 0)
            world_fail(w, "no thread for rank %d", r);
}

UNUSED static void world_join(world *w, int first, int last) {
    for (int r = first; r < last; r++) (void)pthread_join(w->jobs[r].thread, NULL);
}

#if defined(TSHARD_UV_H) || defined(TESTS_OWN)
static void world_child(world *w, int rank) {
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGSYS};
    for (int i = 0; i < 5; i++) (void)signal(faults[i], SIG_DFL); /* a crash is a crash */
    if (w->desc.way == WORLD_TCP_THREADS) {
        world_threads(w, 0, w->desc.ranks);
        world_join(w, 0, w->desc.ranks);
    } else {
        if (rank != 0 && w->listener) (void)close(w->listener);
        if (rank != 0) w->listener = 0;
        (void)job_main(&w->jobs[rank]);
    }
    exit(w->failure[0] ? 1 : 0); /* not _exit: sanitizers look for leaks here */
}

static void world_fork(world *w) {
    int processes = w->desc.way == WORLD_TCP_THREADS ? 1 : w->desc.ranks;
    static int number;
#ifdef TESTS_OWN
    if (!net_prepare(processes)) world_fail(w, "no sockets: %s", strerror(errno));
#endif
    w->listener = listen_anywhere(&w->port);
    if (w->listener < 0) world_fail(w, "no listening socket: %s", strerror(errno));
    if (w->desc.unbound) {
        (void)close(w->listener);
        w->listener = 0;
    }
    (void)snprintf(w->name, sizeof w->name, "test %ld.%d", (long)getpid(), number++);
    (void)fflush(NULL);
    for (int r = 0; r < processes && !w->failure[0]; r++) {
        w->pid[r] = fork();
        if (w->pid[r] == 0) world_child(w, r);
        if (w->pid[r] < 0) world_fail(w, "no process for rank %d: %s", r, strerror(errno));
#ifdef TSHARD_UV_H
        if (w->desc.spawned) w->desc.spawned(&w->jobs[r], w->pid[r]);
#endif
    }
    if (w->listener) (void)close(w->listener);
#ifdef TESTS_OWN
    for (int i = 0; i < 2 * processes; i++) (void)close(sockets[i / 2][i % 2]);
#endif
}
#endif

/* Starts it. Whatever fails is told by world_end. */
UNUSED static void world_start(world *w, const world_desc *desc) {
    memset(w, 0, sizeof *w);
    w->desc = *desc;
    w->jobs = (job *)shared_memory(sizeof(job) * MAX_RANKS);
    if (!w->jobs) {
        world_fail(w, "no shared memory");
        return;
    }
    for (int r = 0; r < desc->ranks; r++) {
        w->jobs[r].rank = r;
        w->jobs[r].ranks = desc->ranks;
        w->jobs[r].user = desc->user;
        w->jobs[r].of = w;
    }
    w->began = now_ns();
#ifdef TSHARD_THREADS_H
    if (desc->way == WORLD_THREADS) {
        if (tsh_threads_world_new(desc->ranks, &w->threads) != TSH_OK) world_fail(w, "no world");
        if (w->threads) world_threads(w, 0, desc->ranks);
    }
#endif
#if defined(TSHARD_UV_H) || defined(TESTS_OWN)
    if (desc->way != WORLD_THREADS) world_fork(w);
#endif
#ifdef TESTS_MPI
    if (desc->way == WORLD_MPI && desc->ranks != mpi_size()) world_fail(w, "no such world");
    if (w->failure[0] || desc->way != WORLD_MPI) return;
    (void)job_main(&w->jobs[mpi_rank()]);
    mpi_share(w->jobs, sizeof *w->jobs);
#endif
}

/* 1 where a test cannot have a world of so many ranks: another mpirun has it. */
UNUSED static int world_elsewhere(world_way way, int ranks) {
#ifdef TESTS_MPI
    return way == WORLD_MPI && ranks != mpi_size();
#else
    (void)way, (void)ranks;
    return 0;
#endif
}

/* 1 when every rank but `but` (-1: none) has made so many steps, within so many seconds. */
UNUSED static int world_steps(const world *w, int steps, int but, double seconds) {
    double until = now_ms() + seconds * 1e3;
    for (int r = 0; r < w->desc.ranks; r++) {
        while (r != but && job_steps(&w->jobs[r]) < steps) {
            if (now_ms() > until) return 0;
            sleep_us(200);
        }
    }
    return 1;
}

UNUSED static void world_tell(const world *w, int what) {
    for (int r = 0; r < w->desc.ranks; r++) job_tell(&w->jobs[r], what);
}

#ifndef _WIN32
/* To the process of a rank. Returns the moment. */
UNUSED static int64_t world_signal(world *w, int rank, int signal) {
    int64_t now = now_ns();
    if (signal == SIGKILL) w->expected[rank] = 1;
    if (w->pid[rank] > 0) (void)kill(w->pid[rank], signal);
    return now;
}

/* Looks whether the process of a rank has ended; with `patient`, waits for it. */
static void world_reap(world *w, int rank, int patient) {
    int status = 0;
    if (w->pid[rank] <= 0 || waitpid(w->pid[rank], &status, patient ? 0 : WNOHANG) == 0) return;
    w->pid[rank] = 0;
    if (WIFSIGNALED(status) && !w->expected[rank])
        world_fail(w, "the process of rank %d died of signal %d", rank, WTERMSIG(status));
    if (WIFEXITED(status) && WEXITSTATUS(status) != 0)
        world_fail(w, "the process of rank %d ended with code %d", rank, WEXITSTATUS(status));
}

static void world_kill(world *w, int rank) {
    if (w->pid[rank] <= 0) return;
    (void)world_signal(w, rank, SIGKILL);
    world_reap(w, rank, 1);
}
#else
static void world_reap(world *w, int rank, int patient) {
    (void)w, (void)rank, (void)patient;
}

static void world_kill(world *w, int rank) {
    (void)w, (void)rank;
}
#endif

/* 1 when the processes of all ranks but `but` have ended, within so many seconds. */
UNUSED static int world_wait(world *w, int but, double seconds) {
    double until = now_ms() + seconds * 1e3;
    for (;;) {
        int alive = 0;
        for (int r = 0; r < w->desc.ranks; r++) {
            world_reap(w, r, 0);
            alive += r != but && w->pid[r] > 0;
        }
        if (!alive) return 1;
        if (now_ms() > until) return 0;
        sleep_ms(1);
    }
}

/* Waits until all ranks are done; returns the first failure, or NULL. The jobs stay readable until
 * world_free. */
UNUSED static const char *world_end(world *w) {
    double limit = w->desc.limit > 0 ? w->desc.limit : 60;
#ifdef TSHARD_THREADS_H
    if (w->threads) {
        world_join(w, 0, w->desc.ranks);
        tsh_threads_world_free(w->threads);
    }
#endif
    if (!world_wait(w, -1, limit)) {
        for (int r = 0; r < w->desc.ranks; r++) {
            if (w->pid[r] <= 0) continue;
            world_fail(w, "rank %d did not end within %g s", r, limit);
            world_kill(w, r);
        }
    }
    for (int r = 0; w->jobs && r < w->desc.ranks; r++)
        if (w->jobs[r].failure[0]) world_fail(w, "%d ranks: %s", w->desc.ranks, w->jobs[r].failure);
    return w->failure[0] ? w->failure : NULL;
}

/* Ends whatever a failed test left running. */
UNUSED static void world_free(world *w) {
    for (int r = 0; r < w->desc.ranks; r++) world_kill(w, r);
    if (w->jobs) shared_free(w->jobs, sizeof(job) * MAX_RANKS);
    w->jobs = NULL;
}

#endif
