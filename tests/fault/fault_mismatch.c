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
    world_desc desc = world_of(way, ranks, fn, o, 20);
    const char *why;
    world w;
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

/* What checking adds to a collective: its digest, the record that the arbiter may ask for, the
 * comparison; and the header's bytes beside the payload's. ms: of an all-reduce of 1 MiB;
 * figure[0]: ns of what is added to 1,000. */
static void cost_rank(job *j) {
    enum { WARM = 50, SUMS = 200, CHECKS = 200000 };
    static float x[262144];
    static tshi_uv_op op;
    tshi_uv_group *group = (tshi_uv_group *)j->comm.impl;
    uint64_t wrong = 0;
    double begin = 0;
    for (int i = 0; i < WARM + SUMS; i++) {
        if (i == WARM) begin = now_ms();
        CHECK(tsh_allreduce(&j->comm, x, 262144, TSH_F32, TSH_SUM) == TSH_OK);
    }
    j->ms = (now_ms() - begin) / SUMS;
    op.group = group;
    op.coll = tsh_coll_make(TSH_ALLREDUCE, TSH_F32);
    op.coll.count = 262144;
    op.head.seq = group->started - 1;
    begin = now_ms();
    for (int i = 0; i < CHECKS; i++) {
        tshi_uv_head heard = op.head;
        op.head.digest = tshb_coll_digest(&op.coll, j->ranks);
        tshi_uv_remember(&op);
        wrong += i && (heard.seq != op.head.seq || heard.digest != op.head.digest);
    }
    j->figure[0] = (uint64_t)((now_ms() - begin) * 1e6 / CHECKS * 1e3);
    CHECK(wrong == 0);
    CHECK(tsh_barrier(&j->comm) == TSH_OK);
}

static void cost_row(void) {
    world_desc desc = world_over_tcp(2, cost_rank, NULL, 60);
    double us, added, bytes = 100.0 * (double)sizeof(tshi_uv_head) / 1048576;
    const char *why;
    world w;
    fault_begin("F5", "what checking costs an all-reduce of 1 MiB, N=2");
    world_start(&w, &desc);
    why = world_end(&w);
    if (why) fault_fail("%s", why);
    us = w.jobs[0].ms * 1e3;
    added = (double)w.jobs[0].figure[0] / 1e6;
    fault_figure("all-reduce", us, "us");
    fault_figure("checks", added, "us");
    fault_at_most("share", 100 * added / us + bytes, "%", 1);
    fault_end();
    world_free(&w);
}

int main(void) {
    cost_row();
    for (int i = 0; i < 2; i++) {
        kind_rows(ways[i]);
        group_rows(ways[i]);
    }
    return fault_result();
}
