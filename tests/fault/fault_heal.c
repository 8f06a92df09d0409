/* F3: networks that break and heal again near the heartbeat. */
#define _GNU_SOURCE /* unshare */
#define TSHARD_IMPLEMENTATION
#include "../../backends/tshard_uv.h"

#include "../support/processes.h"
#include "../support/collectives.h"
#include "../support/faults.h"
#include "../support/relay.h"
#include "../support/heal.h"

enum { MOST_RUNS = 240, SIDE_BY_SIDE = 10 };

static void heal_row(const heal_plan *plans, const heal_result *results, int count, int ranks) {
    int runs = 0, ended = 0, one = 0, sentence = 0, innocent = 0;
    double least = 0;
    fault_begin("F3", "partition heals, heartbeat x 0.6 to 1.3, N=%d", ranks);
    for (int i = 0; i < count; i++) {
        const heal_result *result = &results[i];
        int wrong;
        if (plans[i].ranks != ranks) continue;
        if (result->refused) {
            fault_skip("no network namespace or TUN device: %s", strerror(result->refused));
            return;
        }
        wrong = result->errors && result->named != heal_lowest(heal_minority(&plans[i]));
        runs++;
        ended += result->errors > 0;
        if (result->errors && (least <= 0 || result->ms / plans[i].heartbeat < least))
            least = result->ms / plans[i].heartbeat;
        one += result->one;
        sentence += result->sentence;
        if (result->one && !result->sentence)
            (void)fprintf(stderr, "run %d: %s\n", i, result->differ);
        innocent += wrong;
        if (wrong || !result->one || result->failure[0])
            fault_fail("run %d (side %#x, heartbeat %g s, heals at %.2f s, calls %d, leaves %d): "
                       "%d errors, rank %d named; %s%s",
                       i, plans[i].side, plans[i].heartbeat, plans[i].heals, plans[i].calls,
                       plans[i].leaves, result->errors, result->named, result->differ,
                       result->failure);
    }
    fault_figure("runs", runs, "");
    fault_figure("ended", ended, "");
    fault_at_least("soonest", least / 1e3, "heartbeats", 0.999);
    fault_at_least("one error on all", 100.0 * one / (runs ? runs : 1), "%", 100);
    fault_figure("one sentence", 100.0 * sentence / (runs ? runs : 1), "%");
    fault_at_most("innocent named", innocent, "", 0);
    fault_end();
}

int main(void) {
    static heal_plan plans[MOST_RUNS];
    static heal_result results[MOST_RUNS];
    int count = fault_full() ? 200 : 60;
    for (int i = 0; i < count; i++) plans[i] = heal_draw(i);
    heal_runs(plans, results, count, SIDE_BY_SIDE);
    for (int ranks = 2; ranks <= 8; ranks *= 2) heal_row(plans, results, count, ranks);
    return fault_result();
}
