/* F18: random kinds, sizes and groups against a reference. Built with a sanitizer, all ranks are
 * threads of one process, whose reports end it with another code than 0. */
#define TSHARD_IMPLEMENTATION
#include "../../backends/tshard_threads.h"
#include "../../backends/tshard_uv.h"

#include "../support/processes.h"
#include "../support/collectives.h"
#include "../support/faults.h"

#if defined(__SANITIZE_THREAD__)
#define SANITIZER "TSan"
#elif defined(__SANITIZE_ADDRESS__)
#define SANITIZER "ASan"
#endif

static void soak_row(const char *name, world_way way, int ranks, double seconds) {
    soak_plan plan;
    world_desc desc = world_of(way, ranks, soak_rank, &plan, seconds + 100);
    const char *why;
    world w;
    memset(&plan, 0, sizeof plan);
    plan.seed = (uint64_t)now_ns();
    plan.rounds = 100000000;
    plan.seconds = seconds;
    desc.uv.timeout = 60;
    fault_begin("F18", "soak, %s", name);
    world_start(&w, &desc);
    why = world_end(&w);
    if (why) fault_fail("seed %llu: %s", (unsigned long long)plan.seed, why);
    fault_figure("seconds", seconds, "s");
    fault_at_least("right rounds", job_steps(&w.jobs[0]), "", 50);
    fault_end();
    world_free(&w);
}

int main(void) {
    double seconds = fault_full() ? 600 : 15;
#ifdef SANITIZER
    soak_row("8 TCP ranks in one process, " SANITIZER, WORLD_TCP_THREADS, 8, seconds);
    soak_row("8 threads, " SANITIZER, WORLD_THREADS, 8, seconds);
#else
    soak_row("8 TCP ranks", WORLD_TCP, 8, seconds);
    soak_row("3 TCP ranks", WORLD_TCP, 3, seconds);
    soak_row("8 TCP ranks in one process", WORLD_TCP_THREADS, 8, seconds);
    soak_row("64 threads", WORLD_THREADS, 64, seconds);
#endif
    return fault_result();
}
