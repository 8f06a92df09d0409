/* Collectives between threads: bench_comm_threads RANKS, then the commands of ranks_bench.h. Where
 * there are enough cores each rank is bound to one, as mpirun does it. */
#define _GNU_SOURCE /* sched_setaffinity */
#define TSHARD_IMPLEMENTATION
#include "../../backends/tshard_threads.h"
#include "ranks_bench.h"

typedef struct job {
    tsh_threads_world *world;
    bench *b;
    int failed;
    pthread_t thread;
} job;

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
    bind_to_core(j->b->rank, j->b->ranks);
    j->failed = tsh_threads_comm(j->world, j->b->rank, &comm) != TSH_OK;
    if (j->failed) return NULL;
    j->b->call = bench_tshard_call;
    j->b->user = &comm;
    j->failed = bench_serve(j->b);
    tsh_comm_close(&comm);
    return NULL;
}

int main(int argc, char **argv) {
    const int ranks = argc == 2 ? atoi(argv[1]) : 0;
    int failed = 0;
    tsh_threads_world *world;
    bench all[BENCH_RANKS];
    job jobs[BENCH_RANKS];
    if (ranks < 1 || ranks > BENCH_RANKS || !bench_pipes(all, ranks)) return 2;
    if (tsh_threads_world_new(ranks, &world) != TSH_OK) return 2;
    for (int r = 0; r < ranks; r++) {
        jobs[r].world = world;
        jobs[r].b = &all[r];
        if (pthread_create(&jobs[r].thread, NULL, run, &jobs[r]) != 0) return 2;
    }
    for (int r = 0; r < ranks; r++) {
        (void)pthread_join(jobs[r].thread, NULL);
        failed |= jobs[r].failed;
    }
    tsh_threads_world_free(world);
    return failed;
}
