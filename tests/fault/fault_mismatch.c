/* F5: ranks that call different collectives, over TCP and on threads, and what checking costs. */
#define TSHARD_IMPLEMENTATION
#include "../../backends/tshard_threads.h"
#include "../../backends/tshard_uv.h"

#include "../support/processes.h"
#include "../support/collectives.h"
#include "../support/faults.h"

static const int sizes[] = {2, 3, 4, 8};
static const world_way ways[] = {WORLD_TCP, WORLD_THREADS};

static const char *way_name(world_way way) {
    return way == WORLD_THREADS ? "threads" : "TCP";
}

typedef struct tally {
    samples ms;
    int runs, ranks, found, named;
} tally;

static void mismatch_run(tally *t, world_way way, int ranks, rank_fn fn, const odd_one *o) {
    world_desc desc;
    const char *why;
    world w;
    memset(&desc, 0, sizeof desc);
    desc.way = way;
    desc.ranks = ranks;
    desc.fn = fn;
    desc.user = o;
    desc.limit = 20;
    world_start(&w, &desc);
    why = world_end(&w);
    if (why) fault_fail("odd rank %d: %s", o->odd, why);
    t->runs++;
    for (int r = 0; r < ranks; r++) {
        const tsh_error *v = &w.jobs[r].verdict;
        int found = v->code == TSH_ERR_MISMATCH;
        int named = v->rank == o->odd && strcmp(v->message, w.jobs[0].verdict.message) == 0;
        if (!found || !named)
            fault_fail("rank %d of %d, odd is %d, got %s of rank %d: %s", r, ranks, o->odd,
                       tsh_result_name(v->code), v->rank, v->message);
        t->ranks++;
        t->found += found;
        t->named += named;
        sample_add(&t->ms, w.jobs[r].ms);
    }
    world_free(&w);
}

static void mismatch_end(tally *t) {
    fault_figure("runs", t->runs, "");
    fault_at_least("found", 100.0 * t->found / t->ranks, "%", 100);
    fault_at_least("odd rank named", 100.0 * t->named / t->ranks, "%", 100);
    fault_figure("p50", sample_percentile(&t->ms, 50), "ms");
    fault_at_most("max", sample_percentile(&t->ms, 100), "ms", 100);
    fault_end();
}

static void kind_rows(world_way way) {
    int repeats = fault_full() ? 5 : 1;
    for (int what = KIND; what < FAULTS; what++) {
        static tally t;
        memset(&t, 0, sizeof t);
        fault_begin("F5", "mismatch of %s, N=2 to 8, %s", fault_names[what], way_name(way));
        for (int n = 0; n < 4; n++) {
            for (int odd = sizes[n] > 2 ? 0 : 1; odd < sizes[n]; odd += 2) {
                odd_one o = {(fault)what, odd};
                for (int i = 0; i < repeats; i++)
                    mismatch_run(&t, way, sizes[n], mismatch_rank, &o);
            }
        }
        mismatch_end(&t);
    }
}

static void group_rows(world_way way) {
    static tally t;
    odd_one o = {KIND, 1};
    memset(&t, 0, sizeof t);
    fault_begin("F5", "crossed groups, N=2 to 8, %s", way_name(way));
    for (int n = 0; n < 4; n++) mismatch_run(&t, way, sizes[n], crossed_rank, &o);
    mismatch_end(&t);
    memset(&t, 0, sizeof t);
    fault_begin("F5", "a circle of sends, N=2 to 8, %s", way_name(way));
    for (int n = 0; n < 4; n++) mismatch_run(&t, way, sizes[n], circle_rank, &o);
    mismatch_end(&t);
}

int main(void) {
    for (int i = 0; i < 2; i++) {
        kind_rows(ways[i]);
        group_rows(ways[i]);
    }
    return fault_result();
}
