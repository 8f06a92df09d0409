/* All-reduce of f32 on threads: microseconds per call, best round of several, by size.
 * usage: bench_comm_threads [ranks] [largest bytes]; prints "allreduce_threads_<ranks>_<size> us".
 * Where there are enough cores each rank is bound to one, as mpirun does it. */
#define _GNU_SOURCE /* sched_setaffinity */
#define TSHARD_IMPLEMENTATION
#include "../../backends/tshard_threads.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define ROUNDS 7

typedef struct job {
    tsh_threads_world *world;
    int rank, ranks;
    long largest;
    int failed;
    pthread_t thread;
} job;

static double now_us(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static void size_text(long bytes, char *text, size_t room) {
    if (bytes >= 1048576)
        (void)snprintf(text, room, "%ldMiB", bytes / 1048576);
    else if (bytes >= 1024)
        (void)snprintf(text, room, "%ldKiB", bytes / 1024);
    else
        (void)snprintf(text, room, "%ldB", bytes);
}

/* Iterations of one round: about 20 ms, at most 20,000. */
static int repeats(long bytes) {
    long n = 400L * 1048576 / (bytes + 20000);
    return n > 20000 ? 20000 : n < 4 ? 4 : (int)n;
}

static double measure(tsh_comm *comm, float *buffer, long bytes, int *failed) {
    double best = 1e30;
    int n = repeats(bytes);
    for (int round = 0; round < ROUNDS; round++) {
        double start, took;
        *failed |= tsh_barrier(comm) != TSH_OK;
        start = now_us();
        for (int i = 0; i < n; i++)
            *failed |= tsh_allreduce(comm, buffer, bytes / 4, TSH_F32, TSH_SUM) != TSH_OK;
        took = (now_us() - start) / n;
        if (took < best) best = took;
    }
    return best;
}

static void bind_to_core(int rank, int ranks) {
#ifdef __linux__
    cpu_set_t mine, all;
    size_t core = 0;
    CPU_ZERO(&mine);
    if (sched_getaffinity(0, sizeof all, &all) != 0 || CPU_COUNT(&all) < ranks) return;
    for (int before = rank; before > 0 || !CPU_ISSET(core, &all); core++)
        before -= CPU_ISSET(core, &all) != 0;
    CPU_SET(core, &mine);
    (void)sched_setaffinity(0, sizeof mine, &mine);
#else
    (void)rank;
    (void)ranks;
#endif
}

static void *run(void *argument) {
    job *j = (job *)argument;
    tsh_comm comm;
    char text[32];
    float *buffer = (float *)malloc((size_t)j->largest);
    bind_to_core(j->rank, j->ranks);
    j->failed = !buffer || tsh_threads_comm(j->world, j->rank, &comm) != TSH_OK;
    if (j->failed) return NULL;
    for (long i = 0; i < j->largest / 4; i++) buffer[i] = 0;
    for (long bytes = 4; bytes <= j->largest; bytes *= bytes == 4 ? 256 : 4) {
        double us = measure(&comm, buffer, bytes, &j->failed);
        if (bytes == 65536) continue;
        size_text(bytes, text, sizeof text);
        if (j->rank == 0) printf("allreduce_threads_%d_%s %.3f\n", j->ranks, text, us);
    }
    tsh_comm_close(&comm);
    free(buffer);
    return NULL;
}

int main(int argc, char **argv) {
    int ranks = argc > 1 ? atoi(argv[1]) : 2, failed = 0;
    long largest = argc > 2 ? atol(argv[2]) : 16L * 1048576;
    tsh_threads_world *world;
    job *jobs = (job *)calloc((size_t)(ranks > 0 ? ranks : 1), sizeof *jobs);
    if (!jobs || largest < 4 || tsh_threads_world_new(ranks, &world) != TSH_OK) return 2;
    for (int r = 0; r < ranks; r++) {
        jobs[r].world = world;
        jobs[r].rank = r;
        jobs[r].ranks = ranks;
        jobs[r].largest = largest;
        if (pthread_create(&jobs[r].thread, NULL, run, &jobs[r]) != 0) return 2;
    }
    for (int r = 0; r < ranks; r++) {
        (void)pthread_join(jobs[r].thread, NULL);
        failed |= jobs[r].failed;
    }
    tsh_threads_world_free(world);
    free(jobs);
    return failed;
}
