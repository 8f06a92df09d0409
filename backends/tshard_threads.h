/* tshard_threads.h - every rank a thread of one process */
/*
 * DO THIS
 *
 *     #define TSHARD_IMPLEMENTATION           // in exactly one source file
 *     #include "tshard.h"
 *     #include "backends/tshard_threads.h"
 *
 *     static int rank_main(tsh_ctx *ctx, void *user) { ...; return 0; }
 *     int main(void) {
 *         tsh_desc desc = {.logger.log = tsh_log_stderr};      // prints errors
 *         return tsh_threads_run(4, &desc, rank_main, NULL);
 *     }
 *
 * and compile with -pthread, in any standard from C99 on; no other flag is needed (on Windows, with
 * mingw-w64's gcc, not even that). The same rank_main runs on any other backend.
 *
 * DOES
 *
 * - every collective of tshard.h in its documented order of sums: the bits equal any other ordered
 *   backend's, so that a run on many hosts replays here in one debugger;
 * - move bytes once: a rank sums its own chunk straight out of its peers' buffers and writes the
 *   result into all of theirs. An all-reduce costs two barriers (all started, all finished); one of
 *   at most 480 bytes is copied when it is started and costs only the first, as does a barrier. A
 *   matrix product of all-gathered rows does not wait for the second barrier: it begins when this
 *   rank has all rows. If the rows are many, all ranks write to and read from one shared copy;
 * - poll while waiting, longer if every rank has a core of its own, then sleep: 64 ranks on 2 cores
 *   work well;
 * - report one error, the same on every rank, when ranks call different collectives, a rank closes
 *   its comm early, ranks wait for each other in a cycle (searched for after 20 ms of waiting), a
 *   collective exceeds its time limit, or a rank aborts.
 *
 * DOES NOT
 *
 * - work in the background: data moves only inside test, wait and progress. A non-blocking
 *   collective hides that ranks arrive at different times, not the time of copying;
 * - protect one rank's memory from another's bugs, or survive a crash: it is one process;
 * - use a rank's comms from several threads; only tsh_comm_abort may come from any thread;
 * - run more than 1,024 ranks.
 *
 * COSTS
 *
 * About 90 KiB per rank and group, and 192 bytes per pair of ranks and group, from libc's malloc.
 * With sequence parallelism, a group keeps up to 3 copies of the largest activations of a layer.
 *
 * CORES
 *
 *     tsh_threads_desc threads = {.ranks = 4, .bind = 1};
 *     return tsh_threads_run_with(&threads, &desc, rank_main, NULL);
 *
 * runs 4 ranks, each bound to cores of its own: as many as it has threads (tsh_desc.threads). This
 * is for a program that has its cores to itself: threads that are bound do not move away from a
 * core that another program uses, and two programs that bind threads use the same cores, unless
 * taskset gives them different ones. Only Linux binds threads; elsewhere `bind` changes nothing.
 *
 * ENVIRONMENT
 *
 * The variable TSHARD_TIMEOUT: after how many seconds a collective without timeout_ns fails; 0:
 * never; unset or empty: 300. Any other value is an error: no world is made.
 *
 * ONE'S OWN THREADS
 *
 *     tsh_threads_world *world;
 *     tsh_threads_world_new(4, &world);
 *     tsh_comm comm;                          // in the thread of rank r
 *     tsh_threads_comm(world, r, &comm);      // use it, or give it to tsh_open as desc.comm
 *     tsh_comm_close(&comm);
 *     tsh_threads_world_free(world);          // when all threads are done
 *
 * A rank whose thread was never started is missed in the first collective of the others (in
 * tsh_open, if the ctx has groups): its error after TSHARD_TIMEOUT lists the absent ranks.
 */
#include "tshard_backend.h"

#ifndef TSHARD_THREADS_H
#define TSHARD_THREADS_H
/* ========================================================================== */
/* >>threads-api                                         MARK: - threads-api */
/* Runs a function on n threads, or makes a world for threads of the caller.   */
/* Needs: the public part of tshard.h.                                         */
/* ========================================================================== */

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tsh_threads_world tsh_threads_world;

/* Runs fn on nranks threads, one per rank, each with a ctx of its own. The ctx is opened by desc
 * (NULL: all defaults; desc->comm is ignored) and closed after fn. Returns 0 if fn returned 0 on
 * all ranks, else the first result, by rank, that is not 0. Returns 1, and logs the reason to
 * desc->logger, if a ctx, thread or memory is not available, nranks is not 1 to 1024, or the
 * variable TSHARD_TIMEOUT is not a time. */
TSH_API int tsh_threads_run(int nranks, const tsh_desc *desc, int (*fn)(tsh_ctx *ctx, void *user),
                            void *user);
TSH_API int tsh_threads_run_built(int version, size_t real, size_t size, int nranks,
                                  const tsh_desc *desc, int (*fn)(tsh_ctx *ctx, void *user),
                                  void *user);
#define tsh_threads_run(...) tsh_threads_run_built(TSH_BUILT, __VA_ARGS__)

/* How to run ranks; all 0: one rank per core, not bound. */
typedef struct tsh_threads_desc {
    int ranks; /* number of ranks, 1 to 1024; 0: as many as tsh_threads_cores returns */
    int bind;  /* 1: binds the threads of each rank (tsh_desc.threads) to cores of its own. Cores
                * get a second thread, on their other hyperthread, after all have one. Nothing is
                * bound, which is no error, if the process may use fewer hyperthreads than there are
                * threads, if a CPU quota allows less time than that of all hyperthreads, or if the
                * system is not Linux. 0: the system moves threads between cores */
} tsh_threads_desc;

/* Does what tsh_threads_run does, as *threads says (NULL: all 0). The affinity of the calling
 * thread, which runs no rank, does not change. */
TSH_API int tsh_threads_run_with(const tsh_threads_desc *threads, const tsh_desc *desc,
                                 int (*fn)(tsh_ctx *ctx, void *user), void *user);
TSH_API int tsh_threads_run_with_built(int version, size_t real, size_t size,
                                       const tsh_threads_desc *threads, const tsh_desc *desc,
                                       int (*fn)(tsh_ctx *ctx, void *user), void *user);
#define tsh_threads_run_with(...) tsh_threads_run_with_built(TSH_BUILT, __VA_ARGS__)

/* Returns how many cores the calling thread may use, at least 1. On Linux it counts the cores that
 * taskset or a cpuset leaves to it, a core with several hyperthreads once, but not more than the
 * CPU quota of its control group, rounded up to whole cores (cgroup v2: cpu.max, v1:
 * cpu.cfs_quota_us). Elsewhere it counts all hyperthreads of the host. */
TSH_API int tsh_threads_cores(void);

/* Makes a world for nranks threads of the caller. Errors: TSH_ERR_ARGUMENT (out is NULL, nranks is
 * not 1 to 1024, TSHARD_TIMEOUT is not a time), TSH_ERR_MEMORY, TSH_ERR_IO (the system has no mutex
 * left). */
TSH_API tsh_result tsh_threads_world_new(int nranks, tsh_threads_world **out);
/* Outputs the comm of one rank, for one thread to use and close. Errors: TSH_ERR_ARGUMENT,
 * TSH_ERR_STATE (this rank's comm has been handed out before). */
TSH_API tsh_result tsh_threads_comm(tsh_threads_world *world, int rank, tsh_comm *out);
/* Frees a world (NULL: does nothing). No thread may be in a call; comms that are still open become
 * invalid. */
TSH_API void tsh_threads_world_free(tsh_threads_world *world);

#ifdef __cplusplus
}
#endif
/* ========================================================================== */
/* end of header: stop here if you only want the API                           */
/* ========================================================================== */
#endif

#if defined(TSHARD_IMPLEMENTATION) && !defined(TSHARD_THREADS_IMPLEMENTED)
#define TSHARD_THREADS_IMPLEMENTED
/* ========================================================================== */
/* >>threads-system                           MARK: - threads-system (private) */
/* Threads, locks, timed waits, the clock: once for Windows, once for POSIX.   */
/* Needs: >>threads-api.                                                        */
/* ========================================================================== */

#if !defined(__GNUC__)
#error "tshard_threads.h needs the __atomic builtins of gcc or clang"
#endif

#include <stdlib.h> /* calloc */
#include <string.h>

#if defined(_WIN32)
#include <process.h> /* _beginthreadex */
#else
#include <pthread.h>
#if defined(__linux__)
#include <stdio.h>       /* fopen */
#include <sys/prctl.h>   /* prctl */
#include <sys/syscall.h> /* SYS_sched_getaffinity */
#endif
#include <sched.h>  /* sched_yield */
#include <time.h>   /* clock_gettime */
#include <unistd.h> /* sysconf */
#endif

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
/* -- threads and locks on Windows, from Vista on ---------------------------- */

/* windows.h is not included, as its macros (IN, OUT, near, small, ...) would reach the program. */
struct _RTL_SRWLOCK;
struct _RTL_CONDITION_VARIABLE;
#define TSHI_THREADS_DLL(type) __declspec(dllimport) type __stdcall
TSHI_THREADS_DLL(void) AcquireSRWLockExclusive(struct _RTL_SRWLOCK *lock);
TSHI_THREADS_DLL(void) ReleaseSRWLockExclusive(struct _RTL_SRWLOCK *lock);
TSHI_THREADS_DLL(void) WakeConditionVariable(struct _RTL_CONDITION_VARIABLE *cond);
TSHI_THREADS_DLL(int)
SleepConditionVariableSRW(struct _RTL_CONDITION_VARIABLE *cond, struct _RTL_SRWLOCK *lock,
                          unsigned long milliseconds, unsigned long flags);
TSHI_THREADS_DLL(unsigned long) GetActiveProcessorCount(unsigned short group);
TSHI_THREADS_DLL(int) SwitchToThread(void);
TSHI_THREADS_DLL(unsigned long) WaitForSingleObject(void *handle, unsigned long milliseconds);
TSHI_THREADS_DLL(int) CloseHandle(void *handle);
#undef TSHI_THREADS_DLL

/* A mutex (SRWLOCK) and the CONDITION_VARIABLE used with it: one pointer each, NULL at first. */
typedef struct tshi_threads_monitor {
    void *lock, *condition;
} tshi_threads_monitor;

typedef struct tshi_threads_thread {
    void *handle;          /* handle of the running thread; closed when it is joined */
    void *(*body)(void *); /* the function that the thread runs */
    void *argument;        /* what `body` is called with */
} tshi_threads_thread;

static void tshi_threads_set_name(const char *name) {
    (void)name; /* does nothing: debuggers on Windows show threads by number */
}

static int tshi_threads_online(void) {
    return (int)GetActiveProcessorCount(0xffff); /* hyperthreads online, of all processor groups */
}

static void tshi_threads_yield(void) { /* offers the core to another thread */
    (void)SwitchToThread();
}

/* Returns 1; 0 if the system cannot create the mutex or the condition variable. */
static int tshi_threads_monitor_init(tshi_threads_monitor *monitor) {
    monitor->lock = monitor->condition = NULL;
    return 1;
}

static void tshi_threads_monitor_destroy(tshi_threads_monitor *monitor) {
    (void)monitor;
}

static unsigned __stdcall tshi_threads_begin(void *argument) { /* runs thread->body */
    tshi_threads_thread *thread = (tshi_threads_thread *)argument;
    (void)thread->body(thread->argument);
    return 0;
}

/* Starts a thread that runs body(argument), with a stack of 8 MiB, as on Linux. Returns 0 if the
 * system cannot start it. *thread must not move until it is joined. */
static int tshi_threads_start_thread(tshi_threads_thread *thread, void *(*body)(void *),
                                     void *argument) {
    const unsigned reservation = 0x10000; /* STACK_SIZE_PARAM_IS_A_RESERVATION: 8 MiB of
                                           * addresses, not of memory */
    thread->body = body;
    thread->argument = argument;
    thread->handle = (void *)_beginthreadex(NULL, 8u << 20, tshi_threads_begin, thread, reservation,
                                            NULL);
    return thread->handle != NULL;
}

static void tshi_threads_join_thread(tshi_threads_thread *thread) {
    (void)WaitForSingleObject(thread->handle, 0xffffffff /* no time limit */);
    (void)CloseHandle(thread->handle);
}

static void tshi_threads_lock(tshi_threads_monitor *monitor) {
    AcquireSRWLockExclusive((struct _RTL_SRWLOCK *)&monitor->lock);
}

static void tshi_threads_unlock(tshi_threads_monitor *monitor) {
    ReleaseSRWLockExclusive((struct _RTL_SRWLOCK *)&monitor->lock);
}

static void tshi_threads_signal(tshi_threads_monitor *monitor) {
    WakeConditionVariable((struct _RTL_CONDITION_VARIABLE *)&monitor->condition);
}

/* Sleeps until signalled, or until the time `until`. The caller holds the lock. Returns 1 if
 * tsh_now() has reached `until`, else 0, also after a spurious wakeup. Sleeps for whole
 * milliseconds, a minute at most. */
static int tshi_threads_monitor_wait(tshi_threads_monitor *monitor, int64_t until) {
    int64_t left = until - tsh_now(); /* time left in ns; below in ms */
    if (left <= 0) return 1;
    left = left / 1000000 + 1;
    (void)SleepConditionVariableSRW((struct _RTL_CONDITION_VARIABLE *)&monitor->condition,
                                    (struct _RTL_SRWLOCK *)&monitor->lock,
                                    left < 60000 ? (unsigned long)left : 60000, 0);
    return tsh_now() >= until;
}

#else
/* -- threads and locks on POSIX systems ------------------------------------- */

/* Timed waits must use the clock of tsh_now, CLOCK_MONOTONIC: with the clock of the time of day, a
 * rank would sleep past its time limit if that were set back. Under -std=c99 the headers of glibc
 * and musl hide CLOCK_MONOTONIC and pthread_condattr_setclock, but libc has both. In C++ neither is
 * hidden. */
#if defined(CLOCK_MONOTONIC)
#define TSHI_THREADS_CLOCK CLOCK_MONOTONIC
#elif defined(__linux__)
#define TSHI_THREADS_CLOCK 1 /* CLOCK_MONOTONIC in Linux's numbering */
#else
#error "tshard_threads.h needs POSIX: compile with -D_POSIX_C_SOURCE=200809L (or -std=gnu99)"
#endif
#if defined(__linux__) && !defined(__cplusplus)
extern int pthread_condattr_setclock(pthread_condattr_t *attr, int clock);
#endif
#if defined(__APPLE__) && !defined(_SC_NPROCESSORS_ONLN)
#error "tshard_threads.h: where _POSIX_C_SOURCE is defined on macOS, define _DARWIN_C_SOURCE, too"
#endif

/* A mutex and the condition variable used with it. */
typedef struct tshi_threads_monitor {
    pthread_mutex_t lock;
    pthread_cond_t condition;
} tshi_threads_monitor;

typedef pthread_t tshi_threads_thread;

/* Names the calling thread, as debuggers and top show it, on Linux. name: at most 15 characters. */
static void tshi_threads_set_name(const char *name) {
#if defined(__linux__)
    (void)prctl(PR_SET_NAME, name, 0L, 0L, 0L); /* glibc hides pthread_setname_np */
#else
    (void)name;
#endif
}

static int tshi_threads_online(void) {
    return (int)sysconf(_SC_NPROCESSORS_ONLN); /* hyperthreads online */
}

static void tshi_threads_yield(void) { /* offers the core to another thread */
    (void)sched_yield();
}

/* Returns 1; 0 if the system cannot create the mutex or the condition variable. */
static int tshi_threads_monitor_init(tshi_threads_monitor *monitor) {
    int done;
#if defined(__APPLE__) /* its timed wait takes a duration, so there is no clock to choose */
    done = pthread_cond_init(&monitor->condition, NULL) == 0;
#else
    pthread_condattr_t attr; /* chooses the clock of timed waits */
    if (pthread_condattr_init(&attr) != 0) return 0;
    done = pthread_condattr_setclock(&attr, TSHI_THREADS_CLOCK) == 0 &&
           pthread_cond_init(&monitor->condition, &attr) == 0;
    (void)pthread_condattr_destroy(&attr);
#endif
    /* if there is no mutex, the condition variable is destroyed again */
    if (!done || pthread_mutex_init(&monitor->lock, NULL) == 0) return done;
    (void)pthread_cond_destroy(&monitor->condition);
    return 0;
}

static void tshi_threads_monitor_destroy(tshi_threads_monitor *monitor) {
    (void)pthread_mutex_destroy(&monitor->lock);
    (void)pthread_cond_destroy(&monitor->condition);
}

static int tshi_threads_start_thread(tshi_threads_thread *thread, void *(*body)(void *),
                                     void *argument) {
    /* returns 0 if the system cannot start a thread */
    return pthread_create(thread, NULL, body, argument) == 0;
}

static void tshi_threads_join_thread(tshi_threads_thread *thread) {
    (void)pthread_join(*thread, NULL);
}

static void tshi_threads_lock(tshi_threads_monitor *monitor) {
    (void)pthread_mutex_lock(&monitor->lock);
}

static void tshi_threads_unlock(tshi_threads_monitor *monitor) {
    (void)pthread_mutex_unlock(&monitor->lock);
}

static void tshi_threads_signal(tshi_threads_monitor *monitor) {
    (void)pthread_cond_signal(&monitor->condition);
}

/* Sleeps until signalled, or until the time `until`. The caller holds the lock. Returns 1 if
 * tsh_now() has reached `until`, else 0, also after a spurious wakeup. */
static int tshi_threads_monitor_wait(tshi_threads_monitor *monitor, int64_t until) {
    struct timespec t; /* macOS: time left; else the time `until` */
#if defined(__APPLE__)
    const int64_t left = until - tsh_now();
    if (left <= 0) return 1;
    t.tv_sec = (time_t)(left / 1000000000);
    t.tv_nsec = (long)(left % 1000000000);
    return pthread_cond_timedwait_relative_np(&monitor->condition, &monitor->lock, &t) != 0;
#else
    t.tv_sec = (time_t)(until / 1000000000);
    t.tv_nsec = (long)(until % 1000000000);
    return pthread_cond_timedwait(&monitor->condition, &monitor->lock, &t) != 0;
#endif
}

#endif
/* -- memory, on all systems ------------------------------------------------- */

/* Allocates zeroed memory that starts on a cache line. The byte in front of it holds its distance
 * from malloc's block, 1 to 64, for tshi_threads_free. NULL: out of memory. */
static void *tshi_threads_alloc(size_t bytes) {
    unsigned char *block = (unsigned char *)malloc(bytes + 64);
    size_t offset = block ? 64 - ((uintptr_t)block & 63) : 0; /* 1 to 64: to the next cache line */
    if (!block) return NULL;
    block[offset - 1] = (unsigned char)offset;
    return memset(block + offset, 0, bytes);
}

static void tshi_threads_free(void *p) { /* frees memory of tshi_threads_alloc; p NULL: does
                                          * nothing */
    unsigned char *bytes = (unsigned char *)p;
    if (bytes) free(bytes - bytes[-1]);
}

/* ========================================================================== */
/* >>threads-cores                             MARK: - threads-cores (private) */
/* Which cores the process may use, and binding the threads of a rank to them. */
/* Needs: >>threads-system.                                                     */
/* ========================================================================== */

enum { TSHI_THREADS_CPUS = 4096 }; /* max CPUs; what Linux calls a CPU is one hyperthread */

/* To which CPUs tsh_threads_run_with binds its ranks. */
typedef struct tshi_threads_binding {
    int each;                     /* CPUs of each rank; 0: ranks are not bound */
    int order[TSHI_THREADS_CPUS]; /* rank r runs on CPUs order[r * each + i], 0 <= i < each */
} tshi_threads_binding;

#if defined(__linux__)
#if !defined(__cplusplus)
extern long syscall(long number, ...); /* hidden under -std=c99, as is sched_getaffinity */
#endif

enum { TSHI_THREADS_BITS = 8 * (int)sizeof(unsigned long) }; /* number of CPUs per word of a set */

/* A set of CPUs, in the format of the system call sched_getaffinity: bit c is CPU c. */
typedef struct tshi_threads_set {
    unsigned long word[TSHI_THREADS_CPUS / (8 * sizeof(unsigned long))];
} tshi_threads_set;

static int tshi_threads_has(const tshi_threads_set *set, int cpu) {
    return (int)(set->word[cpu / TSHI_THREADS_BITS] >> (cpu % TSHI_THREADS_BITS) & 1);
}

/* Outputs the CPUs on which the calling thread may run. Returns how many these are; 0: unknown. */
static int tshi_threads_affinity(tshi_threads_set *set) {
    int count = 0;
    memset(set, 0, sizeof *set);
    if (syscall(SYS_sched_getaffinity, 0L, sizeof *set, set) < 0) return 0;
    for (int cpu = 0; cpu < TSHI_THREADS_CPUS; cpu++) count += tshi_threads_has(set, cpu);
    return count;
}

/* Binds the calling thread to n CPUs. It stays as it was if the system refuses. */
static void tshi_threads_bind_thread(const int *cpus, int n) {
    tshi_threads_set set;
    memset(&set, 0, sizeof set);
    for (int i = 0; i < n; i++)
        set.word[cpus[i] / TSHI_THREADS_BITS] |= 1ul << (cpus[i] % TSHI_THREADS_BITS);
    (void)syscall(SYS_sched_setaffinity, 0L, sizeof set, &set);
}

/* Reads the file "folder/name" into text, cut to `capacity` bytes with its final 0. If there is no
 * such file, text is "". Returns text. */
static char *tshi_threads_read(const char *folder, const char *name, char *text, size_t capacity) {
    char path[4096] = "";
    FILE *file;
    text[0] = '\0';
    tsh_text_add(path, sizeof path, "%s/%s", folder, name);
    file = fopen(path, "r");
    if (!file) return text;
    text[fread(text, 1, capacity - 1, file)] = '\0';
    (void)fclose(file);
    return text;
}

/* Returns how many CPUs of `set` with lower numbers than `cpu` belong to the same core: 0 for a
 * core's first hyperthread. system: "/sys/devices/system/cpu". */
static int tshi_threads_place(const char *system, const tshi_threads_set *set, int cpu) {
    char name[64] = "", text[256];
    char *at = text; /* a list of numbers and ranges, such as "0,16" or "0-1" */
    int place = 0;
    tsh_text_add(name, sizeof name, "cpu%d/topology/thread_siblings_list", cpu);
    (void)tshi_threads_read(system, name, text, sizeof text);
    while (*at >= '0' && *at <= '9') {
        const long first = strtol(at, &at, 10);
        const long last = *at == '-' ? strtol(at + 1, &at, 10) : first;
        for (long k = first; k <= last && k < cpu; k++) place += tshi_threads_has(set, (int)k);
        at += *at == ',';
    }
    return place;
}

/* Sets `order` to the CPUs of `set`: first one of each core, then their second hyperthreads, and so
 * on. Returns how many cores these are. system: "/sys/devices/system/cpu". */
static int tshi_threads_order(const char *system, const tshi_threads_set *set,
                              int order[TSHI_THREADS_CPUS]) {
    unsigned char place[TSHI_THREADS_CPUS]; /* 0: not in the set; else 1 + tshi_threads_place */
    int n = 0, cores = 0, before;
    for (int cpu = 0; cpu < TSHI_THREADS_CPUS; cpu++)
        place[cpu] = (unsigned char)(tshi_threads_has(set, cpu)
                                         ? 1 + tshi_threads_place(system, set, cpu)
                                         : 0);
    for (int p = 1; p < 256; p++) {
        before = n;
        for (int cpu = 0; cpu < TSHI_THREADS_CPUS; cpu++)
            if (place[cpu] == p) order[n++] = cpu;
        if (p == 1) cores = n;
        if (n == before) break;
    }
    return cores;
}

/* Returns the CPU quota of one control group in CPUs, rounded up; 0: it has none. v1: 1 if the
 * group is of cgroup v1, 0 if of v2. */
static int tshi_threads_group_quota(const char *folder, int v1) {
    char text[64];
    char *at = text;
    long quota, period;
    (void)tshi_threads_read(folder, v1 ? "cpu.cfs_quota_us" : "cpu.max", text, sizeof text);
    quota = strtol(text, &at, 10); /* v2: "200000 100000" or "max 100000"; v1: "-1" for none */
    if (v1) at = tshi_threads_read(folder, "cpu.cfs_period_us", text, sizeof text);
    period = strtol(at, NULL, 10);
    if (quota <= 0 || period <= 0) return 0;
    return quota / period >= TSHI_THREADS_CPUS ? 0 : (int)((quota - 1) / period + 1);
}

/* Returns 1 if the controller "cpu" is in kinds, a list of cgroup v1 such as "cpuset" (no) or
 * "cpu,cpuacct" (yes). */
static int tshi_threads_has_cpu(const char *kinds) {
    while (*kinds != '\0') {
        const size_t length = strcspn(kinds, ",");
        if (length == 3 && strncmp(kinds, "cpu", 3) == 0) return 1;
        kinds += length + (kinds[length] == ',');
    }
    return 0;
}

/* Returns the lowest CPU quota of the process's control groups and of the groups above them, in
 * CPUs, rounded up; 0: none. process: "/proc/self", whose file cgroup has lines such as "0::/a/b"
 * (cgroup v2) and "4:cpu,cpuacct:/a/b" (v1); root: "/sys/fs/cgroup". In a container the path may be
 * one that only the host has: then the group at the root is the container's. */
static int tshi_threads_quota(const char *process, const char *root) {
    char text[4096], folder[4096];
    int lowest = 0;
    for (char *line = tshi_threads_read(process, "cgroup", text, sizeof text); *line != '\0';) {
        const size_t length = strcspn(line, "\n");
        char *next = line + length + (line[length] == '\n'), *kinds, *path;
        line[length] = '\0';
        kinds = strchr(line, ':');
        path = kinds ? strchr(kinds + 1, ':') : NULL;
        line = next;
        if (!path) continue;
        *path++ = '\0';
        const int v1 = tshi_threads_has_cpu(++kinds);
        if (!v1 && *kinds != '\0') continue; /* groups of v1 that limit memory or other things, not
                                              * CPU time */
        for (;;) { /* from the group up to the root */
            char *slash = strrchr(path, '/');
            int quota;
            folder[0] = '\0';
            tsh_text_add(folder, sizeof folder, "%s%s%s", root, v1 ? "/cpu" : "", path);
            quota = tshi_threads_group_quota(folder, v1);
            if (quota > 0 && (lowest == 0 || quota < lowest)) lowest = quota;
            if (!slash) break;
            *slash = '\0';
        }
    }
    return lowest;
}

/* Returns how many of n CPUs or cores the quota of this process leaves. */
static int tshi_threads_within_quota(int n) {
    const int quota = tshi_threads_quota("/proc/self", "/sys/fs/cgroup");
    return quota > 0 && quota < n ? quota : n;
}

/* Returns how many threads of this process can run at the same time. */
static int tshi_threads_usable(void) {
    tshi_threads_set set;
    const int count = tshi_threads_affinity(&set);
    return tshi_threads_within_quota(count > 0 ? count : tshi_threads_online());
}

TSH_API int tsh_threads_cores(void) {
    tshi_threads_set set;
    tshi_threads_binding all;
    if (tshi_threads_affinity(&set) == 0) return tshi_threads_usable();
    return tshi_threads_within_quota(
        tshi_threads_order("/sys/devices/system/cpu", &set, all.order));
}

/* Chooses the CPUs of `ranks` ranks with `threads` threads each. Chooses none (binding->each is 0)
 * if there are fewer CPUs than threads, or if the process has a CPU quota: other programs may then
 * run on the same CPUs, so its threads must be free to move. */
static void tshi_threads_choose_cpus(int ranks, int threads, tshi_threads_binding *binding) {
    tshi_threads_set set;
    const int count = tshi_threads_affinity(&set);
    binding->each = 0;
    if ((int64_t)ranks * threads > count || tshi_threads_within_quota(count) < count) return;
    (void)tshi_threads_order("/sys/devices/system/cpu", &set, binding->order);
    binding->each = threads;
}

/* Binds the calling thread, which runs `rank`, and the OpenMP threads that it shares work with.
 * Each of these gets one CPU; the calling thread keeps all CPUs of the rank, because threads that
 * it starts later inherit its CPUs. */
static void tshi_threads_bind(const tshi_threads_binding *binding, int rank) {
    const int n = binding->each;
    const int *cpus = binding->order + rank * n;
    if (n == 0) return;
#if defined(_OPENMP)
    if (n > 1) {
#pragma omp parallel for num_threads(n) schedule(static, 1)
        for (int i = 0; i < n; i++) tshi_threads_bind_thread(cpus + i, 1);
    }
#endif
    tshi_threads_bind_thread(cpus, n);
}

#else
static int tshi_threads_usable(void) {
    return tshi_threads_online() > 0 ? tshi_threads_online() : 1;
}

TSH_API int tsh_threads_cores(void) {
    return tshi_threads_usable();
}

static void tshi_threads_choose_cpus(int ranks, int threads, tshi_threads_binding *binding) {
    (void)ranks, (void)threads;
    binding->each = 0; /* threads are not bound on this system */
}

static void tshi_threads_bind(const tshi_threads_binding *binding, int rank) {
    (void)binding, (void)rank;
}
#endif

/* ========================================================================== */
/* >>threads-types                             MARK: - threads-types (private) */
/* A world of ranks, groups of members, and the slots that members post in.    */
/* A member is one rank in one group. Collectives of a group are numbered from */
/* 0. To start number n, a member fills slot n % RING and sets its stamp; when */
/* all stamps are set, each member does its part. Only a member writes to its  */
/* own slots; messages between two ranks go through a mailbox instead.         */
/* Needs: >>threads-system.                                                     */
/* ========================================================================== */

/* Atomic operations, sequentially consistent. In two places, one thread writes a variable and then
 * reads another, a second thread the other way round, and at least one must see the other's write:
 * a poster sets `stamp`, then reads `sleepers`, a sleeper counts itself in `sleepers`, then reads
 * `stamp`; a worker sets `working`, then reads `failed`, a failing rank the reverse. */
#define TSHI_THREADS_GET(place)        __atomic_load_n((place), __ATOMIC_SEQ_CST)
#define TSHI_THREADS_PUT(place, value) __atomic_store_n((place), (value), __ATOMIC_SEQ_CST)
#define TSHI_THREADS_ADD(place, value) __atomic_add_fetch((place), (value), __ATOMIC_SEQ_CST)
#define TSHI_THREADS_APART             __attribute__((aligned(64))) /* a cache line of its own */

/* A slot is reused RING collectives later, when no peer reads it any more: a rank may have 64
 * collectives in flight, and a peer may be 64 behind. An eager call (a barrier, or an all-reduce of
 * at most EAGER bytes) is copied into the slot, so its rank does not wait until all peers have read
 * it. */
enum {
    TSHI_THREADS_RING = 128,    /* number of slots of a member */
    TSHI_THREADS_PAIRWISE = 64, /* number of pair records of a member: the limit of messages in
                                 * flight on a comm */
    TSHI_THREADS_EAGER = 480    /* max bytes of an eager all-reduce */
};
enum { TSHI_THREADS_TEXT = 320 };   /* bytes of the description of a call */
enum { TSHI_THREADS_RANKS = 1024 }; /* max ranks of a world; its mailboxes are then 192 MiB */
enum { TSHI_THREADS_TILE = 4096 };  /* bytes summed at once: they stay in the L1 cache */

/* This bit is set in the requests of messages (SEND, RECV, SENDRECV). */
#define TSHI_THREADS_REQ_PAIR ((tsh_req)1 << 63)

enum { TSHI_THREADS_LOANS = 3 }; /* max all-gathers of a group that use shared memory at a time */

/* What peers read of a posted collective; only the member that posts it writes here. */
typedef struct TSHI_THREADS_APART tshi_threads_slot {
    uint64_t stamp;   /* atomic: the collective's number + 1, written last */
    uint64_t digest;  /* tshb_coll_digest of the call: if two ranks' differ, it is a mismatch */
    const char *send; /* send and recv: the buffers of the call */
    char *recv;
    char eager[TSHI_THREADS_EAGER]; /* values of an eager all-reduce; color and key of a split */
} tshi_threads_slot;

typedef struct tshi_threads_group tshi_threads_group;

/* A call that was started: a collective, or a SEND, RECV or SENDRECV (in a pair record, below). */
typedef struct tshi_threads_call {
    tsh_coll coll;            /* a copy of the caller's descriptor; its count arrays are the
                               * caller's own */
    int64_t deadline;         /* the time (tsh_now) at which it times out */
    int eager;                /* 1: no peer reads or writes the buffers of this rank */
    int late;       /* 1: an all-gather that is not posted yet: a rank still reads earlier values in
                     * the shared memory (tshi_threads_loan) that it needs */
    uint64_t round; /* of an all-gather into shared memory: its number among those of the group,
                     * from 1 on; 0: it is another collective, or this rank has waited for it */
    tshi_threads_group *made; /* split: on the first rank of a color: the new group of this color */
} tshi_threads_call;

/* Memory that all ranks of a group share for the values of an all-gather without recv (see lend in
 * tsh_comm_ops). All ranks write to it before they post the collective, and read it until they wait
 * for the request. All fields but the values themselves are protected by the world's lock. */
typedef struct tshi_threads_loan {
    char *values;   /* `size` bytes, allocated when they are needed */
    size_t size;
    uint64_t round; /* number (tshi_threads_call.round) of the all-gather that uses it or used it
                     * last; 0: none so far */
    uint64_t digest; /* digest of that all-gather's call on the first rank that wrote */
    int users;      /* number of ranks that may still read the lent values: tsh_wait is to come */
} tshi_threads_loan;

/* A pair record: a SEND, RECV or SENDRECV that was started. Its request holds the record's
 * index. */
typedef struct tshi_threads_pair {
    tshi_threads_call call;
    uint64_t send_number, recv_number; /* send_number: index of the sent message among those to
                                        * its receiver; recv_number: of the received one among
                                        * those from its sender */
    int used;                          /* 1: in use, from start until the wait has returned */
    int receiving; /* atomic: 1 until this rank has copied the message that it receives */
    int sending;   /* atomic: 1 until the peer has copied the message that this rank sends */
} tshi_threads_pair;

/* The messages from one rank of a group to another: a ring of indices of the sender's pair records,
 * in the order in which the messages were started. */
typedef struct TSHI_THREADS_APART tshi_threads_mailbox {
    uint64_t posted; /* atomic, written only by the sender: how many messages it has posted */
    unsigned char record[TSHI_THREADS_PAIRWISE]; /* [n % PAIRWISE]: index of message n's record */
    TSHI_THREADS_APART uint64_t wanted; /* atomic, written only by the receiver: how many receives
                                         * it has started */
    uint64_t taken; /* used only by the receiver: how many messages it has copied */
} tshi_threads_mailbox;

/* One rank in one group; tsh_comm.impl points to it. The only field that peers write is `sending`
 * of its pair records. */
typedef struct TSHI_THREADS_APART tshi_threads_member {
    tshi_threads_slot slot[TSHI_THREADS_RING];     /* collective n uses entry n % RING */
    tshi_threads_call call[TSHI_THREADS_RING];     /* collective n uses entry n % RING */
    tshi_threads_pair pair[TSHI_THREADS_PAIRWISE]; /* messages that this rank has started */
    TSHI_THREADS_APART uint64_t finished; /* atomic: number of collectives of which this rank has
                                           * done its part */
    int closed;                           /* atomic: 1 once the comm is closed */
    TSHI_THREADS_APART uint64_t started;  /* atomic: number of collectives that it has started */
    uint64_t shared; /* 1 + the number of the last collective that was not eager; 0: none */
    int seen;        /* number of members known to have posted the collective with number
                      * `finished` */
    int receiving;   /* number of messages that this rank still has to receive */
    int late;        /* number of its calls with `late` set, which are not posted yet */
    uint64_t rounds; /* number of all-gathers it has started into the group's shared copy */
    int rank;        /* rank in the group */
    uint64_t name;   /* name of the groups that this rank's split makes, as bits of their ids; 0:
                      * none */
    tshi_threads_group *group;
    struct tshi_threads_member *next; /* member of the same world rank in another group; NULL:
                                       * none */
} tshi_threads_member;

struct TSHI_THREADS_APART tshi_threads_group {
    tsh_threads_world *world;
    tshi_threads_group *next; /* next group in the world's list */
    uint64_t id;              /* number, from 1 (the whole world) on, plus the bits of its name */
    int size;
    int open;                      /* atomic: number of members that are not closed yet */
    int *ranks;                    /* the world rank of each member */
    tshi_threads_mailbox *mailbox; /* [i * size + j]: messages from rank i to rank j of the group */
    tshi_threads_member *member;   /* array of one member for each rank of the group */
    tshi_threads_loan loan[TSHI_THREADS_LOANS]; /* the n-th all-gather without recv uses loan[n %
                                                 * LOANS] */
};

/* One rank of the world. */
typedef struct TSHI_THREADS_APART tshi_threads_rank {
    int working; /* atomic: 1 while this rank may touch buffers of peers */
    int asleep;  /* atomic: 1 while this rank sleeps, or is about to */
    TSHI_THREADS_APART tshi_threads_monitor wake; /* mutex and condition variable on which this
                                                   * rank sleeps */
    int woken;                    /* under wake's lock: 1 if a peer has woken this rank */
    tshi_threads_member *members; /* list of members, one for each open comm of this rank */
    tshi_threads_member *root;    /* this rank's member in the group of the whole world */
    tshi_threads_member *blocked; /* under the world's lock: the member in whose group this rank
                                   * has waited for over 20 ms; NULL: none */
    tsh_req blocked_req;          /* the request that this rank waits for; valid with `blocked` */
    int taken;                    /* 1 once tsh_threads_comm has handed out this rank's comm */
} tshi_threads_rank;

struct tsh_threads_world {
    TSHI_THREADS_APART int failed; /* atomic: the error's code, set after `error`; 0: none */
    int sleepers;                  /* atomic: number of ranks that sleep, or are about to */
    int size, spins;               /* number of ranks; number of polls before a sleep */
    int64_t timeout;               /* time limit in ns of collectives without timeout_ns */
    tshi_threads_rank *rank;       /* array: the state of each rank */
    tshb_coll_search *search;       /* one for each rank: state of the search for a cycle of
                                     * blocked ranks */
    tsh_error error;               /* the world's error; never changes after `failed` is set */
    tshi_threads_monitor lock;     /* protects error, groups, ids and blocked ranks */
    tshi_threads_group *groups;
    uint64_t ids; /* number of groups made so far */
};

static tshi_threads_rank *tshi_threads_self(const tshi_threads_member *member) {
    return &member->group->world->rank[member->group->ranks[member->rank]];
}

static tshi_threads_mailbox *tshi_threads_between(const tshi_threads_group *group, int from,
                                                  int to) {
    return &group->mailbox[(size_t)from * (size_t)group->size + (size_t)to];
}

static tshi_threads_slot *tshi_threads_slot_of(tshi_threads_member *member, uint64_t number) {
    return &member->slot[number % TSHI_THREADS_RING];
}

static tshi_threads_call *tshi_threads_call_of(tshi_threads_member *member, uint64_t number) {
    return &member->call[number % TSHI_THREADS_RING];
}

/* Returns 1 if rank m of the group has posted collective `number`, else 0. */
static int tshi_threads_posted(const tshi_threads_group *group, int m, uint64_t number) {
    return TSHI_THREADS_GET(&tshi_threads_slot_of(&group->member[m], number)->stamp) > number;
}

/* ========================================================================== */
/* >>threads-sleep                             MARK: - threads-sleep (private) */
/* A waiting rank polls, then sleeps; the last to post or to finish wakes it.  */
/* Needs: >>threads-types.                                                      */
/* ========================================================================== */

/* Wakes a rank if it sleeps or is about to. */
static void tshi_threads_wake(tshi_threads_rank *rank) {
    if (!TSHI_THREADS_GET(&rank->asleep)) return;
    tshi_threads_lock(&rank->wake);
    rank->woken = 1;
    tshi_threads_signal(&rank->wake);
    tshi_threads_unlock(&rank->wake);
}

static void tshi_threads_wake_group(const tshi_threads_group *group) {
    for (int r = 0; r < group->size; r++) tshi_threads_wake(&group->world->rank[group->ranks[r]]);
}

/* Sleeps until another rank wakes this one, or until the time `until`. Returns 1 if that time was
 * reached, else 0. */
static int tshi_threads_nap(tshi_threads_rank *rank, int64_t until) {
    int expired = 0;
    tshi_threads_lock(&rank->wake);
    while (!rank->woken && !expired) expired = tshi_threads_monitor_wait(&rank->wake, until);
    rank->woken = 0;
    tshi_threads_unlock(&rank->wake);
    return expired;
}

/* Pauses between two polls. It does not offer the core to another thread: on a busy machine, that
 * thread would run for milliseconds before this one polls again. A sleeping thread, once woken,
 * runs before those that have not slept. */
static void tshi_threads_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause(); /* frees the core's resources for its other hardware thread */
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* ========================================================================== */
/* >>threads-error                             MARK: - threads-error (private) */
/* The first error is the world's error. After it, no call returns while a     */
/* rank is between enter and leave, where it may touch buffers of its peers.   */
/* Needs: >>threads-sleep.                                                      */
/* ========================================================================== */

/* Sets the world's error, unless it has one already, and wakes all ranks. Any thread may call
 * it. */
static void tshi_threads_raise(tsh_threads_world *world, const tsh_error *error) {
    tshi_threads_lock(&world->lock);
    if (TSHI_THREADS_GET(&world->failed) == TSH_OK) {
        world->error = *error;
        TSHI_THREADS_PUT(&world->failed, (int)error->code);
    }
    tshi_threads_unlock(&world->lock);
    for (int r = 0; r < world->size; r++) tshi_threads_wake(&world->rank[r]);
}

/* For use after the world has failed: returns 1 while any rank may still touch buffers of its
 * peers. */
static int tshi_threads_touched(const tsh_threads_world *world) {
    for (int r = 0; r < world->size; r++)
        if (TSHI_THREADS_GET(&world->rank[r].working)) return 1;
    return 0;
}

static tsh_result tshi_threads_settle(const tsh_threads_world *world) {
    /* waits for ranks that still touch buffers of peers; after an error no rank begins to */
    while (tshi_threads_touched(world)) tshi_threads_yield();
    return (tsh_result)TSHI_THREADS_GET(&world->failed);
}

/* Begins a section in which this rank may touch buffers of its peers; tshi_threads_leave ends it.
 * Meanwhile no rank returns with an error. Returns 1; 0 if the world has failed, so that buffers
 * must not be touched. */
static int tshi_threads_enter(const tshi_threads_member *member) {
    tshi_threads_rank *self = tshi_threads_self(member);
    TSHI_THREADS_PUT(&self->working, 1);
    if (TSHI_THREADS_GET(&member->group->world->failed) == TSH_OK) return 1;
    TSHI_THREADS_PUT(&self->working, 0);
    return 0;
}

/* Ends the section that tshi_threads_enter began. Returns 1 if the world has not failed. */
static int tshi_threads_leave(const tshi_threads_member *member) {
    TSHI_THREADS_PUT(&tshi_threads_self(member)->working, 0);
    return TSHI_THREADS_GET(&member->group->world->failed) == TSH_OK;
}

/* Callback of tshb_calls_match: outputs the call that rank r of the group has made as the
 * collective that `user`, a member of the group, executes now. */
static int tshi_threads_called(const void *user, int r, tshb_call *out) {
    const tshi_threads_member *member = (const tshi_threads_member *)user;
    const tshi_threads_group *group = member->group;
    out->coll = tshi_threads_call_of(&group->member[r], member->finished)->coll;
    out->digest = tshi_threads_slot_of(&group->member[r], member->finished)->digest;
    out->rank = group->ranks[r];
    out->counts = out->coll.recv_counts ? group->size : 0; /* 0: a call without counts */
    return 1;
}

/* Compares the calls of all ranks. If they do not fit, sets the world's error and returns 1. */
static int tshi_threads_mismatch(const tshi_threads_member *member) {
    const tshi_threads_group *group = member->group;
    tsh_error error;
    if (tshb_calls_match(tshi_threads_called, member, group->size, member->finished, group->id,
                         &error))
        return 0;
    tshi_threads_raise(group->world, &error);
    return 1;
}

/* ========================================================================== */
/* >>threads-work                               MARK: - threads-work (private) */
/* This rank's part of a collective of each kind, once all have posted it.     */
/* Needs: >>threads-error.                                                      */
/* ========================================================================== */

typedef struct TSHI_THREADS_APART tshi_threads_tile {
    char bytes[TSHI_THREADS_TILE]; /* sums, before they are copied to the recv of every rank */
} tshi_threads_tile;

/* What tshb_coll_sum passes to tshi_threads_part: which collective, and which elements of its
 * buffers are summed. */
typedef struct tshi_threads_parts {
    tshi_threads_member *member;
    uint64_t number; /* number of the collective */
    size_t offset;   /* offset in bytes of the elements in the buffers; the same on all ranks */
} tshi_threads_parts;

static const void *tshi_threads_part(const void *user, int r) {
    const tshi_threads_parts *p = (const tshi_threads_parts *)user;
    const tshi_threads_slot *slot = tshi_threads_slot_of(&p->member->group->member[r], p->number);
    const int eager = tshi_threads_call_of(p->member, p->number)->eager;
    return (eager ? slot->eager : slot->send) + p->offset;
}

static int64_t tshi_threads_min(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* Sums elements [at, at + n) of all ranks' send buffers (or eager values), tile by tile. They lie
 * in chunk k, which determines the order of the sums (rule 5 of >>comm-api). The sums go to `to`;
 * if that is NULL, to the same elements of every rank's recv. */
static void tshi_threads_sum(tshi_threads_member *member, uint64_t number, int k, int64_t at,
                             int64_t n, char *to) {
    const tshi_threads_group *group = member->group;
    const tsh_coll *coll = &tshi_threads_call_of(member, number)->coll;
    size_t width = tsh_dtype_size(coll->dtype), bytes;
    tshi_threads_tile tile;
    tshi_threads_parts parts;
    parts.member = member;
    parts.number = number;
    parts.offset = (size_t)at * width;
    for (int64_t left = n; left > 0; left -= n, parts.offset += bytes) {
        n = tshi_threads_min(left, (int64_t)(TSHI_THREADS_TILE / width));
        bytes = (size_t)n * width;
        tshb_coll_sum(tile.bytes, n, coll, group->size, k, tshi_threads_part, &parts);
        for (int j = 1; j <= group->size && !to; j++) { /* every rank's recv, this rank's last */
            int r = (member->rank + j) % group->size;   /* each rank begins at another peer */
            memcpy(tshi_threads_slot_of(&group->member[r], number)->recv + parts.offset, tile.bytes,
                   bytes);
        }
        if (to) to = (char *)memcpy(to, tile.bytes, bytes) + bytes;
    }
}

/* All-reduce. Eager values are in the slots: this rank sums all chunks into its own recv. Otherwise
 * this rank alone reads and writes chunk `rank` of every rank's buffers, so send and recv may be
 * the same. */
static void tshi_threads_allreduce(tshi_threads_member *member, uint64_t number,
                                   const tsh_coll *coll) {
    const int eager = tshi_threads_call_of(member, number)->eager, size = member->group->size;
    for (int k = eager ? 0 : member->rank; k < (eager ? size : member->rank + 1); k++) {
        /* at: index of chunk k's first element; n: number of its elements */
        int64_t at = tshb_coll_chunk(coll->count, size, k);
        int64_t n = tshb_coll_chunk(coll->count, size, k + 1) - at;
        char *to = eager && n ? (char *)coll->recv + (size_t)at * tsh_dtype_size(coll->dtype)
                              : NULL;
        tshi_threads_sum(member, number, k, at, n, to);
    }
}

static void tshi_threads_reduce_scatter(tshi_threads_member *member, uint64_t number,
                                        const tsh_coll *coll) {
    int64_t mine = coll->recv_counts[member->rank]; /* number of elements of a block that this
                                                     * rank receives */
    /* offset of this rank's elements in a block of send, in elements */
    int64_t before = tshb_coll_before(coll->recv_counts, member->rank);
    /* number of elements of a block of send */
    int64_t whole = tshb_coll_before(coll->recv_counts, member->group->size);
    for (int64_t b = 0; b < coll->blocks && mine; b++)
        tshi_threads_sum(member, number, member->rank, b * whole + before, mine,
                         (char *)coll->recv + (size_t)(b * mine) * tsh_dtype_size(coll->dtype));
}

static void tshi_threads_broadcast(tshi_threads_member *member, uint64_t number,
                                   const tsh_coll *coll) {
    if (member->rank == coll->root || coll->count == 0) return;
    memcpy(coll->recv, tshi_threads_slot_of(&member->group->member[coll->root], number)->recv,
           (size_t)coll->count * tsh_dtype_size(coll->dtype));
}

/* For an all-to-all: returns 1 if, between this rank and some peer, the count that one side sends
 * is not what the other side expects. */
static int tshi_threads_unequal(const tshi_threads_member *member, uint64_t number,
                                const tsh_coll *coll) {
    for (int m = 0; m < member->group->size; m++) {
        const tsh_coll *peer = &tshi_threads_call_of(&member->group->member[m], number)->coll;
        if (coll->send_counts[m] != peer->recv_counts[member->rank] ||
            coll->recv_counts[m] != peer->send_counts[member->rank])
            return 1;
    }
    return 0;
}

/* All-gather, all-to-all: copies to recv what each peer sends to this rank: of every block of
 * `step` elements of the peer's send, the n elements from `at` on. */
static void tshi_threads_collect(tshi_threads_member *member, uint64_t number,
                                 const tsh_coll *coll) {
    const tshi_threads_group *group = member->group;
    size_t width = tsh_dtype_size(coll->dtype);
    int all_to_all = coll->kind == TSH_ALLTOALL; /* 1: all-to-all; 0: all-gather */
    int64_t row = tshb_coll_before(coll->recv_counts,
                                   group->size); /* number of elements of a block of recv */
    if (all_to_all && tshi_threads_unequal(member, number, coll) && tshi_threads_mismatch(member))
        return;
    for (int j = 0; j < group->size; j++) {
        int from = (member->rank + j) % group->size;
        const tsh_coll *peer = &tshi_threads_call_of(&group->member[from], number)->coll;
        int64_t n = coll->recv_counts[from], step = n, at = 0;
        const char *send;
        char *recv;
        if (n == 0) continue; /* nothing to copy; peer->send may be NULL */
        if (all_to_all) {
            at = tshb_coll_before(peer->send_counts, member->rank);
            step = tshb_coll_before(peer->send_counts, group->size);
        }
        send = (const char *)peer->send + (size_t)at * width;
        recv = (char *)coll->recv + (size_t)tshb_coll_before(coll->recv_counts, from) * width;
        /* if recv == send, this rank's own part is in place already */
        for (int64_t b = 0; b < coll->blocks && recv != send; b++)
            memcpy(recv + (size_t)(b * row) * width, send + (size_t)(b * step) * width,
                   (size_t)n * width);
    }
}

/* ========================================================================== */
/* >>threads-group                             MARK: - threads-group (private) */
/* In a split, the first rank of each color makes the color's group and puts   */
/* it in `made` of its call. When all ranks have done their part of the split,  */
/* the others of the color read it there. The last member to close frees it.    */
/* Needs: >>threads-work.                                                       */
/* ========================================================================== */

/* Allocates a group with its members, mailboxes and ranks in one block of memory, and adds it to
 * the world's list. name: the group's name, as bits of its id, or 0. The caller fills in `ranks`.
 * NULL: out of memory. */
static tshi_threads_group *tshi_threads_group_new(tsh_threads_world *world, int size,
                                                  uint64_t name) {
    size_t n = (size_t)size;
    tshi_threads_group *group = (tshi_threads_group *)tshi_threads_alloc(
        sizeof *group + n * sizeof *group->member + n * n * sizeof *group->mailbox +
        n * sizeof *group->ranks);
    if (!group) return NULL;
    group->world = world;
    group->size = group->open = size;
    group->member = (tshi_threads_member *)(void *)(group + 1);
    group->mailbox = (tshi_threads_mailbox *)(void *)(group->member + n);
    group->ranks = (int *)(void *)(group->mailbox + n * n);
    for (int r = 0; r < size; r++) {
        group->member[r].group = group;
        group->member[r].rank = r;
    }
    tshi_threads_lock(&world->lock);
    group->id = name | ++world->ids;
    group->next = world->groups;
    world->groups = group;
    tshi_threads_unlock(&world->lock);
    return group;
}

static void tshi_threads_group_free(tsh_threads_world *world, tshi_threads_group *group) {
    tshi_threads_group **at = &world->groups;
    tshi_threads_lock(&world->lock);
    while (*at != group) at = &(*at)->next; /* at: the pointer to group in the list */
    *at = group->next;
    tshi_threads_unlock(&world->lock);
    for (int i = 0; i < TSHI_THREADS_LOANS; i++) tshi_threads_free(group->loan[i].values);
    tshi_threads_free(group);
}

static int tshi_threads_color(const tshi_threads_group *group, uint64_t number, int r) {
    tshb_ticket ticket; /* color and key that rank r has posted in its slot */
    memcpy(&ticket, tshi_threads_slot_of(&group->member[r], number)->eager, sizeof ticket);
    return ticket.color;
}

/* Returns the first rank with this color, which makes the color's group. */
static int tshi_threads_leader(const tshi_threads_group *group, uint64_t number, int color) {
    int r = 0;
    while (tshi_threads_color(group, number, r) != color) r++;
    return r;
}

/* If this rank is the first of its color, makes the color's group and sets `made` of its call. */
static void tshi_threads_split_work(tshi_threads_member *member, uint64_t number) {
    tshi_threads_group *group = member->group, *made = NULL;
    const void *tickets = tshi_threads_slot_of(group->member, number)->eager;
    int color = tshi_threads_color(group, number, member->rank), size = 0, *order;
    if (color < 0 || tshi_threads_leader(group, number, color) != member->rank) return;
    order = (int *)tshi_threads_alloc((size_t)group->size * sizeof *order);
    if (order) size = tshb_split_order(tickets, sizeof *member, group->size, color, order);
    if (order) made = tshi_threads_group_new(group->world, size, member->name);
    for (int i = 0; made && i < size; i++) made->ranks[i] = group->ranks[order[i]];
    tshi_threads_free(order);
    tshi_threads_call_of(member, number)->made = made;
    if (!made) {
        tsh_error error;
        (void)tsh_error_set(&error, TSH_ERR_MEMORY, group->ranks[member->rank],
                            "no memory for the group of a split");
        tshi_threads_raise(group->world, &error);
    }
}

/* Outputs the comm of one rank of the group and adds the member to its world rank's list. */
static void tshi_threads_join(tshi_threads_group *group, int rank, const tsh_comm_ops *ops,
                              tsh_comm *out) {
    tshi_threads_member *member = &group->member[rank];
    tshi_threads_rank *self = tshi_threads_self(member);
    member->next = self->members;
    self->members = member;
    *out = tshb_comm_make(ops, member, rank, group->size, group->id);
}

/* ========================================================================== */
/* >>threads-progress                       MARK: - threads-progress (private) */
/* Does this rank's part of every collective that all members have posted, in  */
/* the order of their numbers, and copies the messages that have arrived.      */
/* Needs: >>threads-group.                                                      */
/* ========================================================================== */

/* Returns 1 if every member has posted the collective with number `finished`, the next one that
 * this member executes. */
static int tshi_threads_gathered(tshi_threads_member *member) {
    while (member->seen < member->group->size &&
           tshi_threads_posted(member->group, member->seen, member->finished))
        member->seen++;
    return member->seen == member->group->size;
}

/* Returns 1 if every member has done its part of collective `number`, so that nobody touches its
 * buffers any more. */
static int tshi_threads_all_finished(const tshi_threads_group *group, uint64_t number) {
    for (int m = 0; m < group->size; m++)
        if (TSHI_THREADS_GET(&group->member[m].finished) <= number) return 0;
    return 1;
}

static int tshi_threads_fits(tshi_threads_member *member, uint64_t number) {
    /* returns 1 if the calls of all ranks fit each other: their digests are equal */
    uint64_t digest = tshi_threads_slot_of(member, number)->digest;
    for (int m = 0; m < member->group->size; m++)
        if (tshi_threads_slot_of(&member->group->member[m], number)->digest != digest) return 0;
    return 1;
}

static void tshi_threads_work(tshi_threads_member *member, uint64_t number) {
    const tsh_coll *coll = &tshi_threads_call_of(member, number)->coll;
    if (tshi_threads_call_of(member, number)->round) return; /* all values are in the loan */
    switch (coll->kind) {
    case TSH_ALLREDUCE: tshi_threads_allreduce(member, number, coll); break;
    case TSH_REDUCE_SCATTER: tshi_threads_reduce_scatter(member, number, coll); break;
    case TSH_BROADCAST: tshi_threads_broadcast(member, number, coll); break;
    case TSH_ALLGATHER:
    case TSH_ALLTOALL: tshi_threads_collect(member, number, coll); break;
    case TSH_SPLIT: tshi_threads_split_work(member, number); break;
    default: break; /* a barrier */
    }
}

/* Does this rank's part of its next collective, which all ranks have posted. Returns 0 if the world
 * has failed. */
static int tshi_threads_execute(tshi_threads_member *member) {
    uint64_t number = member->finished;
    const tshi_threads_call *call = tshi_threads_call_of(member, number);
    int fits = tshi_threads_fits(member, number), eager = fits && call->eager;
    if (!eager && !tshi_threads_enter(member)) return 0;
    if (fits)
        tshi_threads_work(member, number);
    else
        (void)tshi_threads_mismatch(member);
    if (!eager && !tshi_threads_leave(member)) return 0;
    member->seen = 0;
    TSHI_THREADS_PUT(&member->finished, number + 1);
    if (TSHI_THREADS_GET(&member->group->world->sleepers) &&
        tshi_threads_all_finished(member->group, number))
        tshi_threads_wake_group(member->group);
    return 1;
}

/* Receives a message: copies the oldest message of the mailbox to the recv of `record`, and marks
 * it as sent. If the SEND and the RECV do not fit, fails the world. Returns 0 if the world has
 * failed, else 1. */
static int tshi_threads_take(tshi_threads_member *member, tshi_threads_pair *record,
                             tshi_threads_mailbox *mailbox) {
    tshi_threads_group *group = member->group;
    int from = record->call.coll.recv_from;
    tshi_threads_pair *sent =
        &group->member[from].pair[mailbox->record[record->recv_number % TSHI_THREADS_PAIRWISE]];
    tsh_coll a, b; /* a: the SEND; b: the RECV */
    if (!tshi_threads_enter(member)) return 0;
    a = tshb_coll_half(&sent->call.coll, 0);
    b = tshb_coll_half(&record->call.coll, 1);
    if (a.count != b.count || a.dtype != b.dtype || a.tag != b.tag) {
        tsh_error error;
        tshb_message_mismatch(&a, &b, group->ranks[from], group->ranks[member->rank],
                              record->recv_number, group->id, &error);
        tshi_threads_raise(group->world, &error);
    } else if (b.count) {
        memcpy(b.recv, a.send, (size_t)b.count * tsh_dtype_size(b.dtype));
    }
    if (!tshi_threads_leave(member)) return 0;
    TSHI_THREADS_PUT(&record->receiving, 0);
    member->receiving--;
    mailbox->taken++;
    TSHI_THREADS_PUT(&sent->sending, 0);
    tshi_threads_wake(&group->world->rank[group->ranks[from]]);
    return 1;
}

/* Copies all messages that have arrived. Those of one sender are copied in order, so one copy may
 * make another possible: passes over the records are repeated until a pass copies nothing. */
static void tshi_threads_match(tshi_threads_member *member) {
    int moved = 1; /* 1: the pass has copied a message */
    while (moved && member->receiving) {
        moved = 0;
        for (int i = 0; i < TSHI_THREADS_PAIRWISE; i++) {
            tshi_threads_pair *record = &member->pair[i];
            tshi_threads_mailbox *mailbox;
            if (!TSHI_THREADS_GET(&record->receiving)) continue;
            mailbox = tshi_threads_between(member->group, record->call.coll.recv_from,
                                           member->rank);
            if (record->recv_number != mailbox->taken ||
                TSHI_THREADS_GET(&mailbox->posted) <= record->recv_number)
                continue;
            if (!tshi_threads_take(member, record, mailbox)) return;
            moved = 1;
        }
    }
}

/* Outputs the shared memory for the values of the all-gather with number `round`. Returns 0 if a
 * rank still reads the values of an earlier all-gather there, else 1. Outputs NULL if there is no
 * memory (then the world fails), or if this rank's call differs from that of the first rank (a
 * mismatch, reported once all ranks have posted). */
static int tshi_threads_borrow(tshi_threads_group *group, uint64_t round, uint64_t digest,
                               size_t bytes, char **values) {
    tsh_threads_world *world = group->world;
    tshi_threads_loan *loan = &group->loan[round % TSHI_THREADS_LOANS];
    int found, refused = 0; /* refused: 1: there is no memory */
    tshi_threads_lock(&world->lock);
    if (loan->round != round && loan->users == 0) { /* this rank is the first to write to it */
        loan->round = round;
        loan->users = group->size;
        loan->digest = digest;
        if (loan->size < bytes) {
            tshi_threads_free(loan->values);
            loan->values = (char *)tshi_threads_alloc(bytes);
            loan->size = loan->values ? bytes : 0;
            refused = !loan->values;
        }
    }
    found = loan->round == round;
    *values = loan->digest == digest ? loan->values : NULL;
    tshi_threads_unlock(&world->lock);
    if (refused) {
        tsh_error error;
        (void)tsh_error_set(&error, TSH_ERR_MEMORY, -1, "no memory for %llu bytes of an all-gather",
                            (unsigned long long)bytes);
        tshi_threads_raise(world, &error);
    }
    return found;
}

/* Copies this rank's values into the shared memory (loan) of an all-gather without recv. Returns 0
 * if a rank still reads earlier values there, else 1. */
static int tshi_threads_contribute(tshi_threads_member *member, uint64_t number) {
    const tshi_threads_call *call = tshi_threads_call_of(member, number);
    const tsh_coll *coll = &call->coll;
    const size_t width = tsh_dtype_size(coll->dtype);
    const size_t own = (size_t)coll->recv_counts[member->rank] * width; /* bytes of a block */
    const size_t row = (size_t)tshb_coll_before(coll->recv_counts, member->group->size) * width;
    char *to;
    const uint64_t digest = tshi_threads_slot_of(member, number)->digest;
    if (!tshi_threads_borrow(member->group, call->round, digest, row * (size_t)coll->blocks, &to))
        return 0;
    if (!to || !own) return 1; /* nothing to copy, or nowhere to copy it */
    to += (size_t)tshb_coll_before(coll->recv_counts, member->rank) * width;
    for (size_t b = 0; b < (size_t)coll->blocks; b++)
        memcpy(to + b * row, (const char *)coll->send + b * own, own);
    return 1;
}

/* Lets the peers read what this rank has posted as collective `number`. */
static void tshi_threads_publish(tshi_threads_member *member, uint64_t number) {
    const tshi_threads_group *group = member->group;
    int m = 0;
    TSHI_THREADS_PUT(&tshi_threads_slot_of(member, number)->stamp, number + 1);
    if (!TSHI_THREADS_GET(&group->world->sleepers)) return;
    while (m < group->size && tshi_threads_posted(group, m, number)) m++;
    if (m == group->size) tshi_threads_wake_group(group);
}

/* Posts this rank's late all-gathers, in order, if the shared memory that they need is free now. */
static void tshi_threads_post_late(tshi_threads_member *member) {
    for (uint64_t number = member->finished; number < member->started && member->late; number++) {
        tshi_threads_call *call = tshi_threads_call_of(member, number);
        if (!call->late) continue;
        if (!tshi_threads_contribute(member, number)) return;
        call->late = 0;
        member->late--;
        tshi_threads_publish(member, number);
    }
}

/* Does everything that this rank can do now on any of its comms, without blocking. */
static void tshi_threads_advance(tshi_threads_rank *self) {
    for (tshi_threads_member *member = self->members; member; member = member->next) {
        if (member->late) tshi_threads_post_late(member);
        while (member->finished < member->started && tshi_threads_gathered(member))
            if (!tshi_threads_execute(member)) return;
        if (member->receiving) tshi_threads_match(member);
    }
}

/* ========================================================================== */
/* >>threads-wait                               MARK: - threads-wait (private) */
/* Waiting: a rank polls, then sleeps. It fails the world if a rank that it    */
/* needs has closed its comm, at its deadline, or if ranks wait for each other */
/* in a cycle, for which it searches after 20 ms, then every 500 ms.           */
/* Needs: >>threads-progress.                                                   */
/* ========================================================================== */

/* A request of a collective is (number + 1) * 2, plus 1 if it is eager; of a message, the index of
 * its pair record plus TSHI_THREADS_REQ_PAIR. Returns the number of the collective. */
static uint64_t tshi_threads_number_of(tsh_req req) {
    return (req >> 1) - 1;
}

static tshi_threads_pair *tshi_threads_pair_of(tshi_threads_member *member, tsh_req req) {
    if (!(req & TSHI_THREADS_REQ_PAIR)) return NULL; /* the request of a collective */
    return &member->pair[req % TSHI_THREADS_PAIRWISE];
}

/* Returns the call that a request belongs to. */
static const tshi_threads_call *tshi_threads_request(tshi_threads_member *member, tsh_req req) {
    const tshi_threads_pair *pair = tshi_threads_pair_of(member, req);
    return pair ? &pair->call : tshi_threads_call_of(member, tshi_threads_number_of(req));
}

/* Returns 1 if req is complete: recv is filled, and no peer touches this rank's buffers any
 * more. */
static int tshi_threads_complete(tshi_threads_member *member, tsh_req req) {
    const tshi_threads_pair *pair = tshi_threads_pair_of(member, req);
    if (pair) return !TSHI_THREADS_GET(&pair->receiving) && !TSHI_THREADS_GET(&pair->sending);
    if (member->finished <= tshi_threads_number_of(req)) return 0;
    return (req & 1) || tshi_threads_all_finished(member->group, tshi_threads_number_of(req));
}

/* Returns 0 if request req still waits for rank m of the group to start its part: to post the
 * collective; to start the RECV of a message that this rank sends to m; to start the SEND of a
 * message that it receives from m. Else 1, also if the message is not between this rank and m. */
static int tshi_threads_came(tshi_threads_member *member, tsh_req req, int m) {
    const tshi_threads_pair *pair = tshi_threads_pair_of(member, req);
    /* a late call counts: its rank posts it as soon as peers give back the memory it needs */
    if (!pair)
        return TSHI_THREADS_GET(&member->group->member[m].started) > tshi_threads_number_of(req);
    if (TSHI_THREADS_GET(&pair->sending) && pair->call.coll.send_to == m &&
        TSHI_THREADS_GET(&tshi_threads_between(member->group, member->rank, m)->wanted) <=
            pair->send_number)
        return 0;
    return !(TSHI_THREADS_GET(&pair->receiving) && pair->call.coll.recv_from == m &&
             TSHI_THREADS_GET(&tshi_threads_between(member->group, m, member->rank)->posted) <=
                 pair->recv_number);
}

/* Writes the call that belongs to req: "all-reduce of 7 f32 (sum), collective 3 of tp". Returns
 * text, which has TSHI_THREADS_TEXT bytes. */
static char *tshi_threads_where(char *text, tshi_threads_member *member, tsh_req req) {
    text[0] = '\0';
    tshb_coll_where(&tshi_threads_request(member, req)->coll, member->group->size,
                    tshi_threads_number_of(req), member->group->id, text, TSHI_THREADS_TEXT);
    return text;
}

/* If a rank has closed its comm without starting its part of req, fails the world and returns 1,
 * else returns 0. */
static int tshi_threads_check_lost(tshi_threads_member *member, tsh_req req) {
    const tshi_threads_group *group = member->group;
    char text[TSHI_THREADS_TEXT];
    tsh_error error;
    int m = 0;
    while (m < group->size &&
           (!TSHI_THREADS_GET(&group->member[m].closed) || tshi_threads_came(member, req, m)))
        m++;
    if (m == group->size) return 0;
    (void)tsh_error_set(&error, TSH_ERR_LOST, group->ranks[m],
                        "rank %d left while rank %d waits for it in %s", group->ranks[m],
                        group->ranks[member->rank], tshi_threads_where(text, member, req));
    tshi_threads_raise(group->world, &error);
    return 1;
}

/* Fails the world because req has timed out. The error lists the ranks that have not started their
 * part; if all have, those that have not finished. It blames the first rank of the list. */
static void tshi_threads_time_out(tshi_threads_member *member, tsh_req req) {
    const tshi_threads_group *group = member->group;
    uint64_t number = tshi_threads_number_of(req);
    int pairwise = (req & TSHI_THREADS_REQ_PAIR) != 0, absent = 0;
    char text[TSHI_THREADS_TEXT];
    tsh_error error;
    for (int m = 0; m < group->size; m++) absent += !tshi_threads_came(member, req, m);
    (void)tsh_error_set(&error, TSH_ERR_TIMEOUT, -1,
                        "rank %d ran out of time in %s; %s:", group->ranks[member->rank],
                        tshi_threads_where(text, member, req),
                        absent ? "absent ranks" : "ranks that have not finished");
    for (int m = 0; m < group->size; m++) {
        int late = absent ? !tshi_threads_came(member, req, m)
                          : !pairwise && TSHI_THREADS_GET(&group->member[m].finished) <= number;
        if (!late) continue;
        if (error.rank < 0) error.rank = group->ranks[m];
        tsh_text_add(error.message, sizeof error.message, " %d", group->ranks[m]);
    }
    if (error.rank < 0) tsh_text_add(error.message, sizeof error.message, " none");
    tshi_threads_raise(group->world, &error);
}

/* Callback of tshb_coll_cycle. Returns the world rank of rank i of the group in which rank r of the
 * world is blocked, if r waits for that rank; else -1. The caller holds the world's lock. */
static int tshi_threads_awaits(const void *user, int r, int i) {
    const tsh_threads_world *world = (const tsh_threads_world *)user;
    tshi_threads_member *member = world->rank[r].blocked;
    if (!member || i >= member->group->size ||
        tshi_threads_came(member, world->rank[r].blocked_req, i))
        return -1;
    return member->group->ranks[i];
}

/* Callback of tshb_coll_blame. Returns how many ranks, r included, are blocked in the same
 * collective as rank r of the world. Messages count as the same if their pair records have the same
 * index. The caller holds the world's lock. */
static int tshi_threads_together(const void *user, int r) {
    const tsh_threads_world *world = (const tsh_threads_world *)user;
    const tshi_threads_rank *self = &world->rank[r];
    int count = 0;
    for (int m = 0; m < world->size; m++)
        count += world->rank[m].blocked && world->rank[m].blocked->group == self->blocked->group &&
                 world->rank[m].blocked_req == self->blocked_req;
    return count;
}

/* Fills *error for a cycle that contains rank r. The caller holds the world's lock. */
static void tshi_threads_tell_cycle(const tsh_threads_world *world, int r, tsh_error *error) {
    char texts[2][TSHI_THREADS_TEXT];
    int waits, blamed = tshb_coll_blame(world->search, r, tshi_threads_together, world, &waits);
    const tshi_threads_rank *a = &world->rank[blamed], *b = &world->rank[waits];
    tshb_cycle_error(blamed, tshi_threads_where(texts[0], a->blocked, a->blocked_req), waits,
                     tshi_threads_where(texts[1], b->blocked, b->blocked_req), error);
}

/* Marks this rank as blocked in req; fails the world if ranks wait for each other in a cycle. The
 * cycle is real: a blocked rank goes on only after the rank it waits for starts its part, and on a
 * cycle that rank is blocked as well. A blocked rank takes the lock to unmark itself before its
 * call returns. */
static void tshi_threads_check_cycle(tshi_threads_member *member, tsh_req req) {
    tsh_threads_world *world = member->group->world;
    tshi_threads_rank *self = tshi_threads_self(member);
    int r = member->group->ranks[member->rank]; /* this rank; later a rank of the cycle, or -1 */
    tsh_error error;
    tshi_threads_lock(&world->lock);
    self->blocked = member;
    self->blocked_req = req;
    memset(world->search, 0, (size_t)world->size * sizeof *world->search);
    r = tshb_coll_cycle(world->search, world->size, r, tshi_threads_awaits, world);
    if (r >= 0) tshi_threads_tell_cycle(world, r, &error);
    tshi_threads_unlock(&world->lock);
    if (r >= 0) tshi_threads_raise(world, &error);
}

static void tshi_threads_unblock(tsh_threads_world *world, tshi_threads_rank *self) {
    if (!self->blocked) return; /* tshi_threads_check_cycle has not marked this rank */
    tshi_threads_lock(&world->lock);
    self->blocked = NULL;
    tshi_threads_unlock(&world->lock);
}

/* Makes progress, then returns 1 if req is complete or the world has failed. */
static int tshi_threads_ready(tshi_threads_member *member, tsh_req req) {
    tshi_threads_advance(tshi_threads_self(member));
    return TSHI_THREADS_GET(&member->group->world->failed) != TSH_OK ||
           tshi_threads_complete(member, req);
}

/* For a request that is not complete: if its deadline has passed, or a rank that it needs has
 * closed its comm, fails the world and returns 1; else returns 0. */
static int tshi_threads_hopeless(tshi_threads_member *member, tsh_req req, int64_t now) {
    if (now < tshi_threads_request(member, req)->deadline)
        return tshi_threads_check_lost(member, req);
    tshi_threads_time_out(member, req);
    return 1;
}

/* Sleeps until another rank wakes this one, but not past the deadline and not for more than
 * *patience ns. After a sleep of *patience ns, searches for a cycle. *patience is 20 ms at first,
 * then 500 ms. */
static void tshi_threads_sleep(tshi_threads_member *member, tsh_req req, int64_t *patience) {
    tsh_threads_world *world = member->group->world;
    tshi_threads_rank *self = tshi_threads_self(member);
    int64_t now = tsh_now();
    TSHI_THREADS_PUT(&self->asleep, 1);
    (void)TSHI_THREADS_ADD(&world->sleepers, 1); /* from here on, peers wake this rank */
    if (!tshi_threads_ready(member, req) && !tshi_threads_hopeless(member, req, now)) {
        int64_t deadline = tshi_threads_request(member, req)->deadline;
        int64_t until = tshi_threads_min(deadline, now + *patience);
        if (tshi_threads_nap(self, until) && until < deadline) {
            tshi_threads_check_cycle(member, req);
            *patience = 500000000;
        }
    }
    (void)TSHI_THREADS_ADD(&world->sleepers, -1);
    TSHI_THREADS_PUT(&self->asleep, 0);
}

/* ========================================================================== */
/* >>threads-ops                                 MARK: - threads-ops (private) */
/* start, test, wait, progress, split, status, abort, close: see >>comm-api.   */
/* Needs: >>threads-wait.                                                       */
/* ========================================================================== */

static tshi_threads_member *tshi_threads_member_of(const tsh_comm *comm) {
    return (tshi_threads_member *)comm->impl;
}

/* Returns 1 for an all-gather whose values are lent: it has no recv. */
static int tshi_threads_lends(const tsh_coll *coll, int size) {
    return coll->kind == TSH_ALLGATHER && !coll->recv &&
           tshb_coll_before(coll->recv_counts, size) > 0 && coll->blocks > 0;
}

/* Posts a collective and returns its request. Copies `bytes` bytes of `load` into the slot: the
 * values of an eager all-reduce, or a split's ticket, its color and key. */
static tsh_req tshi_threads_post(tshi_threads_member *member, const tsh_coll *coll,
                                 const void *load, size_t bytes, int eager) {
    tshi_threads_group *group = member->group;
    uint64_t number = member->started;
    tshi_threads_slot *slot = tshi_threads_slot_of(member, number);
    tshi_threads_call *call = tshi_threads_call_of(member, number);
    call->coll = *coll;
    call->deadline = tshb_deadline(coll->timeout_ns, group->world->timeout);
    call->eager = eager;
    call->late = 0;
    call->round = tshi_threads_lends(coll, group->size) ? ++member->rounds : 0;
    call->made = NULL;
    slot->digest = tshb_coll_digest(coll, group->size) ^ (uint64_t)(call->round > 0);
    slot->send = (const char *)coll->send;
    slot->recv = (char *)coll->recv;
    if (bytes) memcpy(slot->eager, load, bytes);
    TSHI_THREADS_PUT(&member->started, number + 1);
    /* if this rank closes the comm before all have finished this collective, the world fails */
    if (!eager) member->shared = number + 1;
    if (call->round && !tshi_threads_contribute(member, number)) {
        call->late = 1;
        member->late++;
    } else {
        tshi_threads_publish(member, number);
    }
    return (tsh_req)(number + 1) << 1 | (tsh_req)eager;
}

/* Starts a SEND, RECV or SENDRECV in a free pair record. TSH_ERR_STATE: all records are in use. */
static tsh_result tshi_threads_message(tshi_threads_member *member, const tsh_coll *coll,
                                       tsh_req *req) {
    int i = 0;
    tshi_threads_pair *pair;
    while (i < TSHI_THREADS_PAIRWISE && member->pair[i].used) i++;
    if (i == TSHI_THREADS_PAIRWISE) return TSH_ERR_STATE;
    pair = &member->pair[i];
    pair->call.coll = *coll;
    pair->call.deadline = tshb_deadline(coll->timeout_ns, member->group->world->timeout);
    pair->used = 1;
    *req = TSHI_THREADS_REQ_PAIR | (tsh_req)i;
    if (coll->kind != TSH_SEND) { /* receives a message */
        tshi_threads_mailbox *mailbox = tshi_threads_between(member->group, coll->recv_from,
                                                             member->rank);
        pair->recv_number = mailbox->wanted;
        TSHI_THREADS_PUT(&pair->receiving, 1);
        member->receiving++;
        TSHI_THREADS_PUT(&mailbox->wanted, pair->recv_number + 1);
    }
    if (coll->kind != TSH_RECV) { /* sends a message */
        tshi_threads_mailbox *mailbox = tshi_threads_between(member->group, member->rank,
                                                             coll->send_to);
        pair->send_number = mailbox->posted;
        TSHI_THREADS_PUT(&pair->sending, 1);
        mailbox->record[pair->send_number % TSHI_THREADS_PAIRWISE] = (unsigned char)i;
        /* from now on the peer may copy the message */
        TSHI_THREADS_PUT(&mailbox->posted, pair->send_number + 1);
        tshi_threads_wake(&member->group->world->rank[member->group->ranks[coll->send_to]]);
    }
    return TSH_OK;
}

static tsh_result tshi_threads_start(tsh_comm *comm, const tsh_coll *coll, tsh_req *req) {
    tshi_threads_member *member = tshi_threads_member_of(comm);
    int failed = TSHI_THREADS_GET(&member->group->world->failed);
    size_t bytes = 0;
    int eager = coll->kind == TSH_BARRIER; /* 1: a barrier, or (below) a small all-reduce */
    *req = 0;
    if (failed != TSH_OK) return (tsh_result)failed;
    if (coll->kind == TSH_SEND || coll->kind == TSH_RECV || coll->kind == TSH_SENDRECV)
        return tshi_threads_message(member, coll, req);
    if (coll->kind == TSH_ALLREDUCE &&
        coll->count <= (int64_t)(TSHI_THREADS_EAGER / tsh_dtype_size(coll->dtype))) {
        eager = 1;
        bytes = (size_t)coll->count * tsh_dtype_size(coll->dtype);
    }
    if (tshi_threads_lends(coll, comm->size)) eager = 1; /* peers read shared memory, not this
                                                          * rank's buffers */
    *req = tshi_threads_post(member, coll, coll->send, bytes, eager);
    return TSH_OK;
}

/* Ends this rank's use of the values that an all-gather has lent to it. */
static void tshi_threads_give_back(tshi_threads_member *member, tshi_threads_call *call) {
    tshi_threads_group *group = member->group;
    tshi_threads_loan *loan = &group->loan[call->round % TSHI_THREADS_LOANS];
    int used; /* 0: the memory is free for another all-gather */
    tshi_threads_lock(&group->world->lock);
    used = loan->round != call->round || --loan->users > 0;
    tshi_threads_unlock(&group->world->lock);
    call->round = 0;
    if (!used && TSHI_THREADS_GET(&group->world->sleepers)) tshi_threads_wake_group(group);
}

/* Blocks until req is complete. */
static tsh_result tshi_threads_await(tshi_threads_member *member, tsh_req req) {
    tsh_threads_world *world = member->group->world;
    int64_t patience = 20000000; /* max length of a sleep, in ns: see tshi_threads_sleep */
    int spins = 0, failed;
    while (!tshi_threads_ready(member, req)) {
        if (spins++ < world->spins) {
            tshi_threads_pause();
        } else {
            tshi_threads_sleep(member, req, &patience);
            spins = 0;
        }
    }
    tshi_threads_unblock(world, tshi_threads_self(member));
    failed = TSHI_THREADS_GET(&world->failed);
    /* after an error, waits until no rank touches buffers of peers (rule 4 of >>comm-api) */
    if (failed != TSH_OK) (void)tshi_threads_settle(world);
    return (tsh_result)failed;
}

static tsh_result tshi_threads_wait(tsh_comm *comm, tsh_req req) {
    tshi_threads_member *member = tshi_threads_member_of(comm);
    tshi_threads_pair *pair = tshi_threads_pair_of(member, req);
    const tsh_result result = tshi_threads_await(member, req);
    if (pair)
        pair->used = 0;
    else if (tshi_threads_request(member, req)->round)
        tshi_threads_give_back(member, tshi_threads_call_of(member, tshi_threads_number_of(req)));
    return result;
}

/* Waits until this rank's recv is filled. That is so when this rank has done its part, except in an
 * all-reduce, where peers write to recv: it waits for the whole request. */
static tsh_result tshi_threads_receive(tsh_comm *comm, tsh_req req) {
    tshi_threads_member *member = tshi_threads_member_of(comm);
    const tsh_coll_kind kind = tshi_threads_request(member, req)->coll.kind;
    return tshi_threads_await(member, kind == TSH_ALLREDUCE ? req : req | 1);
}

/* Waits until all ranks have copied their values to the loan, and outputs its address. */
static tsh_result tshi_threads_lend(tsh_comm *comm, tsh_req req, const void **values) {
    tshi_threads_member *member = tshi_threads_member_of(comm);
    const uint64_t round = tshi_threads_request(member, req)->round;
    const tsh_result result = tshi_threads_await(member, req);
    *values = result == TSH_OK ? member->group->loan[round % TSHI_THREADS_LOANS].values : NULL;
    return result;
}

static tsh_result tshi_threads_test(tsh_comm *comm, tsh_req req, int *done) {
    tshi_threads_member *member = tshi_threads_member_of(comm);
    const tsh_threads_world *world = member->group->world;
    int failed;
    *done = tshi_threads_ready(member, req);
    if (!*done) (void)tshi_threads_hopeless(member, req, tsh_now());
    failed = TSHI_THREADS_GET(&world->failed);
    if (failed == TSH_OK) return TSH_OK;
    *done = !tshi_threads_touched(world); /* the error is returned only once buffers are free */
    return *done ? (tsh_result)failed : TSH_OK;
}

static void tshi_threads_progress(tsh_comm *comm) {
    tshi_threads_advance(tshi_threads_self(tshi_threads_member_of(comm)));
}

static tsh_result tshi_threads_status(tsh_comm *comm, tsh_error *error) {
    const tsh_threads_world *world = tshi_threads_member_of(comm)->group->world;
    int failed = TSHI_THREADS_GET(&world->failed);
    if (failed != TSH_OK && error) *error = world->error;
    return (tsh_result)failed;
}

static void tshi_threads_abort(tsh_comm *comm, const tsh_error *why) {
    const tshi_threads_member *member = tshi_threads_member_of(comm);
    tsh_error error = *why;
    if (error.rank < 0) error.rank = member->group->ranks[member->rank];
    tshi_threads_raise(member->group->world, &error);
}

/* Returns 1 if peers may still need this rank or its buffers, because it has not waited for all of
 * its requests. */
static int tshi_threads_owes(tshi_threads_member *member) {
    if (member->finished < member->started) return 1;
    if (member->shared && !tshi_threads_all_finished(member->group, member->shared - 1)) return 1;
    for (int i = 0; i < TSHI_THREADS_PAIRWISE; i++)
        if (TSHI_THREADS_GET(&member->pair[i].receiving) ||
            TSHI_THREADS_GET(&member->pair[i].sending))
            return 1;
    return 0;
}

static void tshi_threads_close(tsh_comm *comm) {
    tshi_threads_member *member = tshi_threads_member_of(comm), **at;
    tshi_threads_group *group = member->group;
    tsh_threads_world *world = group->world;
    tshi_threads_rank *self = tshi_threads_self(member);
    int rank = group->ranks[member->rank];
    if (TSHI_THREADS_GET(&world->failed) == TSH_OK && tshi_threads_owes(member)) {
        char name[32]; /* name of the group */
        tsh_error error;
        (void)tsh_error_set(&error, TSH_ERR_LOST, rank,
                            "rank %d closed %s before it waited for its requests", rank,
                            tshb_group_text(group->id, name, sizeof name));
        tshi_threads_raise(world, &error);
    }
    if (TSHI_THREADS_GET(&world->failed) != TSH_OK) (void)tshi_threads_settle(world);
    /* removes member from the rank's list; at: the pointer to it */
    for (at = &self->members; *at != member;) at = &(*at)->next;
    *at = member->next;
    TSHI_THREADS_PUT(&member->closed, 1);
    tshi_threads_wake_group(group);
    if (TSHI_THREADS_ADD(&group->open, -1) == 0) tshi_threads_group_free(group->world, group);
    comm->impl = NULL;
}

static tsh_result tshi_threads_split(tsh_comm *comm, int color, int key, tsh_comm *out) {
    tshi_threads_member *member = tshi_threads_member_of(comm);
    tshi_threads_group *group = member->group, *made;
    tsh_result result = (tsh_result)TSHI_THREADS_GET(&group->world->failed);
    tsh_coll coll = tsh_coll_make(TSH_SPLIT, TSH_F32);
    tshb_ticket ticket;
    int place = 0; /* this rank's number in the new group */
    tsh_req req;
    uint64_t number;
    if (result != TSH_OK) return result;
    ticket.color = color;
    ticket.key = key;
    member->name = out->id;
    req = tshi_threads_post(member, &coll, &ticket, sizeof ticket, 0);
    number = tshi_threads_number_of(req);
    result = tshi_threads_wait(comm, req);
    if (result != TSH_OK || color < 0) return result;
    made = tshi_threads_call_of(&group->member[tshi_threads_leader(group, number, color)], number)
               ->made;
    while (made->ranks[place] != group->ranks[member->rank]) place++;
    tshi_threads_join(made, place, comm->ops, out);
    return TSH_OK;
}

/* The backend's functions: those that TSH_COMM_OPS lists, with receive and lend added. */
static const tsh_comm_ops tshi_threads_ops = {
    (uint32_t)sizeof(tsh_comm_ops), TSH_COMM_ABI,          "threads",
    TSH_CAP_ORDERED,                tshi_threads_start,    tshi_threads_test,
    tshi_threads_wait,              tshi_threads_progress, tshi_threads_split,
    tshi_threads_status,            tshi_threads_abort,    tshi_threads_close,
    NULL,                           tshi_threads_receive,  tshi_threads_lend};

/* ========================================================================== */
/* >>threads-world                             MARK: - threads-world (private) */
/* Creating and destroying a world; tsh_threads_run().                         */
/* Needs: >>threads-ops.                                                        */
/* ========================================================================== */

/* Frees a world in which only the first `ready` ranks have an initialised monitor. */
static void tshi_threads_world_drop(tsh_threads_world *world, int ready) {
    while (world->groups) tshi_threads_group_free(world, world->groups);
    for (int r = 0; r < ready; r++) tshi_threads_monitor_destroy(&world->rank[r].wake);
    tshi_threads_monitor_destroy(&world->lock);
    tshi_threads_free(world);
}

/* Makes a world for tsh_threads_world_new and tsh_threads_run; after a failure, error has the
 * reason. */
static tsh_result tshi_threads_world_make(int nranks, tsh_threads_world **out, tsh_error *error) {
    tsh_threads_world *world;
    tshi_threads_group *root = NULL;
    int64_t timeout;
    int ready = 0;
    if (nranks < 1 || nranks > TSHI_THREADS_RANKS)
        return tsh_error_set(error, TSH_ERR_ARGUMENT, -1,
                             "%d ranks are asked for; there can be 1 to %d", nranks,
                             (int)TSHI_THREADS_RANKS);
    if (!tshb_timeout(0, "", &timeout, error)) return error->code;
    world = (tsh_threads_world *)tshi_threads_alloc(
        sizeof *world + (size_t)nranks * (sizeof *world->rank + sizeof *world->search));
    if (!world) return tsh_error_set(error, TSH_ERR_MEMORY, -1, "no memory for a world");
    if (!tshi_threads_monitor_init(&world->lock)) {
        tshi_threads_free(world);
        return tsh_error_set(error, TSH_ERR_IO, -1, "the system refused a mutex");
    }
    world->size = nranks;
    world->spins = nranks > tshi_threads_usable() ? 30 : 2000; /* 30: ranks share cores */
    world->timeout = timeout;
    world->rank = (tshi_threads_rank *)(void *)(world + 1);
    world->search = (tshb_coll_search *)(void *)(world->rank + nranks);
    while (ready < nranks && tshi_threads_monitor_init(&world->rank[ready].wake)) ready++;
    /* the group of all ranks */
    if (ready == nranks) root = tshi_threads_group_new(world, nranks, 0);
    if (!root) {
        tshi_threads_world_drop(world, ready);
        return tsh_error_set(error, TSH_ERR_MEMORY, -1,
                             "no memory for a world of %d ranks (about %d MiB)", nranks,
                             (int)(((size_t)nranks * sizeof *root->member +
                                    (size_t)nranks * (size_t)nranks * sizeof *root->mailbox) >>
                                   20) +
                                 1);
    }
    for (int r = 0; r < nranks; r++) {
        root->ranks[r] = r;
        world->rank[r].root = &root->member[r];
    }
    *out = world;
    return TSH_OK;
}

TSH_API tsh_result tsh_threads_world_new(int nranks, tsh_threads_world **out) {
    tsh_error error;
    if (!out) return TSH_ERR_ARGUMENT;
    *out = NULL;
    return tshi_threads_world_make(nranks, out, &error);
}

TSH_API tsh_result tsh_threads_comm(tsh_threads_world *world, int rank, tsh_comm *out) {
    if (!world || !out || rank < 0 || rank >= world->size) return TSH_ERR_ARGUMENT;
    if (world->rank[rank].taken) return TSH_ERR_STATE;
    world->rank[rank].taken = 1;
    tshi_threads_join(world->rank[rank].root->group, rank, &tshi_threads_ops, out);
    return TSH_OK;
}

TSH_API void tsh_threads_world_free(tsh_threads_world *world) {
    if (world) tshi_threads_world_drop(world, world->size);
}

/* Arguments and result of one thread of tsh_threads_run. */
typedef struct tshi_threads_job {
    tsh_threads_world *world;
    const tsh_desc *desc;
    int (*fn)(tsh_ctx *ctx, void *user);
    void *user;
    const tshi_threads_binding *binding;
    int rank, result; /* result: what fn returned; 1: the ctx could not be opened */
    tshi_threads_thread thread;
} tshi_threads_job;

static void *tshi_threads_main(void *argument) { /* runs one rank; argument: its job */
    tshi_threads_job *job = (tshi_threads_job *)argument;
    tsh_comm comm;
    char name[16] = ""; /* Linux takes at most 15 characters and a final 0 */
    tsh_text_add(name, sizeof name, "tsh rank %d", job->rank);
    tshi_threads_set_name(name);
    tshi_threads_bind(job->binding, job->rank);
    job->result = 1;
    if (tsh_threads_comm(job->world, job->rank, &comm) == TSH_OK)
        job->result = tsh_run_on(&comm, job->desc, job->fn, job->user, NULL);
    return NULL;
}

/* Runs fn on nranks threads, one per rank. name: the public function, for errors; bind: see
 * tsh_threads_desc.bind. */
static int tshi_threads_run_ranks(const char *name, int nranks, int bind, const tsh_desc *desc,
                                  int (*fn)(tsh_ctx *ctx, void *user), void *user) {
    tsh_threads_world *world = NULL;
    tshi_threads_job *jobs = NULL;
    tshi_threads_binding binding;
    tsh_error error;
    int started = 0, result; /* started: number of threads that were started */
    binding.each = 0;
    if (bind)
        tshi_threads_choose_cpus(nranks, desc && desc->threads > 0 ? desc->threads : 1, &binding);
    (void)tsh_error_set(&error, TSH_ERR_ARGUMENT, -1, "fn is NULL");
    if (fn && tshi_threads_world_make(nranks, &world, &error) == TSH_OK && world) {
        jobs = (tshi_threads_job *)calloc((size_t)nranks, sizeof *jobs);
        (void)tsh_error_set(&error, TSH_ERR_MEMORY, -1, "no memory for %d threads", nranks);
    }
    for (; jobs && started < nranks; started++) {
        tshi_threads_job *job = &jobs[started];
        if (!job) break; /* for gcc's analyser, which does not see that jobs is not NULL */
        job->world = world;
        job->desc = desc;
        job->fn = fn;
        job->user = user;
        job->binding = &binding;
        job->rank = started;
        if (!tshi_threads_start_thread(&job->thread, tshi_threads_main, job)) break;
    }
    if (jobs && started < nranks) { /* a thread did not start: the ranks that run get the error */
        (void)tsh_error_set(&error, TSH_ERR_IO, started,
                            "rank %d of %d has no thread: the system has no more memory or "
                            "threads",
                            started, nranks);
        tshi_threads_raise(world, &error);
    }
    if (desc && (!jobs || started < nranks))
        tsh_log_message(&desc->logger, "%s: %s (%s)", name, error.message,
                        tsh_result_name(error.code));
    result = !jobs;
    for (int r = 0; r < started; r++) tshi_threads_join_thread(&jobs[r].thread);
    for (int r = 0; jobs && r < nranks && result == 0; r++)
        result = r < started ? jobs[r].result : 1;
    free(jobs);
    tsh_threads_world_free(world);
    return result;
}

TSH_API int tsh_threads_run_built(int version, size_t real, size_t size, int nranks,
                                  const tsh_desc *desc, int (*fn)(tsh_ctx *ctx, void *user),
                                  void *user) {
    if (!tshb_same_build("tsh_threads_run", version, real, size, desc)) return 1;
    return tshi_threads_run_ranks("tsh_threads_run", nranks, 0, desc, fn, user);
}

TSH_API int(tsh_threads_run)(int nranks, const tsh_desc *desc,
                             int (*fn)(tsh_ctx *ctx, void *user), void *user) {
    return tsh_threads_run_built(1, 0, 0, nranks, desc, fn, user);
}

TSH_API int tsh_threads_run_with_built(int version, size_t real, size_t size,
                                       const tsh_threads_desc *threads, const tsh_desc *desc,
                                       int (*fn)(tsh_ctx *ctx, void *user), void *user) {
    const int ranks = threads && threads->ranks != 0 ? threads->ranks : tsh_threads_cores();
    if (!tshb_same_build("tsh_threads_run_with", version, real, size, desc)) return 1;
    return tshi_threads_run_ranks("tsh_threads_run_with", ranks, threads && threads->bind, desc, fn,
                                  user);
}

TSH_API int(tsh_threads_run_with)(const tsh_threads_desc *threads, const tsh_desc *desc,
                                  int (*fn)(tsh_ctx *ctx, void *user), void *user) {
    return tsh_threads_run_with_built(1, 0, 0, threads, desc, fn, user);
}

#undef TSHI_THREADS_CLOCK
#undef TSHI_THREADS_GET
#undef TSHI_THREADS_PUT
#undef TSHI_THREADS_ADD
#undef TSHI_THREADS_APART
#undef TSHI_THREADS_REQ_PAIR

#ifdef __cplusplus
}
#endif
#endif
