/* Mistakes with several ranks, each with the sentence it gets on every rank: a function that all
 * ranks must call, called by one alone ("if (rank == 0) tsh_save(...)"), and a tensor of another
 * rank. */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../support/files.h"
#include "../support/logs.h"

/* ------------------------------------------------------- called by one rank alone */

/* What one rank calls, and what the others do meanwhile. */
typedef struct alone {
    const char *name;               /* the function that the sentence names */
    void (*call)(tsh_module *root); /* calls it */
    int rank;                       /* the rank that does */
} alone;

static const tsh_linear_desc square = {.in = 4, .out = 4};

typedef enum meanwhile { ENDS, BARRIER, TRAINS, MEANWHILES } meanwhile;

static void save(tsh_module *root) {
    (void)tsh_save(root, files_path("alone"), NULL);
}

static void load(tsh_module *root) {
    (void)tsh_load(root, files_path("alone"), NULL);
}

static void read_values(tsh_module *root) {
    static tsh_real values[8 * 4];
    (void)tsh_read(tsh_module_ctx(root), tsh_param(root, "up.weight"), TSH_GLOBAL, values,
                   sizeof values);
}

static void hash(tsh_module *root) {
    (void)tsh_hash(tsh_module_ctx(root), tsh_param(root, "up.weight"));
}

static void check_replicas(tsh_module *root) {
    (void)tsh_check_replicas(root);
}

static const alone calls[] = {{"tsh_save", save, 0},
                              {"tsh_load", load, 0},
                              {"tsh_read", read_values, 0},
                              {"tsh_hash", hash, 0},
                              {"tsh_check_replicas", check_replicas, 0},
                              {"tsh_save", save, 1}};

typedef struct lone {
    const alone *call;
    meanwhile others;
    int trained; /* 1: a step was trained before, so that models have been compared */
} lone;

static tsh_tensor *loss_of(tsh_module *root) {
    tsh_tensor *x = tsh_ones(tsh_module_ctx(root), tsh_shape2(3, 4));
    x = tsh_forward(tsh_find(root, "down"), tsh_gelu(tsh_forward(tsh_find(root, "up"), x)));
    return tsh_mean(tsh_mul(x, x), TSH_ALL, 0);
}

static int calls_alone(tsh_ctx *ctx, void *user) {
    const lone *t = (const lone *)user;
    const tsh_linear_desc up = {.in = 4, .out = 8, .style = TSH_COLWISE};
    const tsh_linear_desc down = {.in = 8, .out = 4, .style = TSH_ROWWISE};
    const int rank = tsh_world(ctx)->rank;
    tsh_module *root = tsh_root(ctx);
    char says[96];
    tsh_add_linear(root, "up", &up);
    tsh_add_linear(root, "down", &down);
    /* Results are not checked: the error below may come while this rank is still here. */
    (void)tsh_barrier(tsh_world(ctx)); /* all ranks have opened their ctx */
    if (t->trained) (void)tsh_backward(ctx, loss_of(root));
    if (t->call->call == load) (void)tsh_save(root, files_path("alone"), NULL); /* by all ranks */
    if (rank == t->call->rank) {
        t->call->call(root);
    } else if (t->others == ENDS) {
        return 0; /* and closes its ctx */
    } else if (t->others == BARRIER) {
        (void)tsh_barrier(tsh_world(ctx));
    } else {
        (void)tsh_backward(ctx, loss_of(root));
    }
    CHECK(!tsh_ok(ctx), "an error");
    (void)snprintf(says, sizeof says, "%s, which all ranks must call: ", t->call->name);
    CHECK(strstr(tsh_last_error(ctx)->message, says), "not \"%s\"", says);
    return 0;
}

static void test_called_by_one_rank_alone(void **state) {
    (void)state;
    for (int i = 0; i < COUNT(calls); i++)
        for (int others = 0; others < MEANWHILES; others++)
            for (int ranks = 2; ranks <= 3; ranks++)
                for (int trained = 0; trained < 2; trained++) {
                    lone t;
                    t.call = &calls[i];
                    t.others = (meanwhile)others;
                    t.trained = trained;
                    ranks_run_at(RANKS_FIRST, ranks, NULL, calls_alone, &t);
                }
}

/* The whole sentences that rank 0 logs, word for word. */
static int saves_alone(tsh_ctx *ctx, void *user) {
    const meanwhile others = *(const meanwhile *)user;
    tsh_add_linear(tsh_root(ctx), "up", &square);
    (void)tsh_barrier(tsh_world(ctx));
    if (tsh_world(ctx)->rank == 0) (void)tsh_save(tsh_root(ctx), files_path("alone"), NULL);
    if (tsh_world(ctx)->rank > 0 && others == BARRIER) (void)tsh_barrier(tsh_world(ctx));
    (void)tsh_ok(ctx);
    return 0;
}

static void test_sentences_of_a_save_by_one_rank(void **state) {
    static const char *const says[] = {
        "rank 1 left while rank 0 waits for it in tsh_save, which all ranks must call: all-reduce "
        "of 3 i64 (max), collective 3 of world (TSH_ERR_LOST)",
        "rank 1 called barrier where rank 0 called tsh_save, which all ranks must call: all-reduce "
        "of 3 i64 (max) (collective 3 of world)"};
    (void)state;
    for (int i = 0; i < COUNT(says); i++) {
        static log_lines lines;
        const tsh_desc desc = {.logger = {log_keep, &lines}};
        const meanwhile others = i == 0 ? ENDS : BARRIER;
        int found = 0;
        lines.count = 0;
        ranks_run_at(RANKS_FIRST, 2, &desc, saves_alone, (void *)(uintptr_t)&others);
        for (int l = 0; l < lines.count && l < LOG_LINES; l++)
            found += strstr(lines.line[l], says[i]) != NULL;
        if (!found) fail_msg("%d lines, the first is %s", lines.count, lines.line[0]);
    }
}

/* After a call by all ranks, errors of other collectives do not name it. */
static int all_save(tsh_ctx *ctx, void *user) {
    (void)user;
    tsh_add_linear(tsh_root(ctx), "up", &square);
    CHECK(tsh_save(tsh_root(ctx), files_path("all"), NULL) == TSH_OK, "save");
    CHECK(tsh_load(tsh_root(ctx), files_path("all"), NULL) == TSH_OK, "load");
    CHECK(tsh_hash(ctx, tsh_param(tsh_root(ctx), "up.weight")) != 0, "hash");
    CHECK(tsh_check_replicas(tsh_root(ctx)), "alike");
    if (tsh_world(ctx)->rank == 0) (void)tsh_barrier(tsh_world(ctx));
    if (tsh_world(ctx)->rank > 0) {
        double one = 1;
        (void)tsh_allreduce(tsh_world(ctx), &one, 1, TSH_F64, TSH_SUM);
    }
    CHECK(!tsh_ok(ctx) && tsh_last_error(ctx)->code == TSH_ERR_MISMATCH, "a mismatch");
    CHECK(!strstr(tsh_last_error(ctx)->message, "must call"), "of two functions of one's own");
    return 0;
}

static void test_called_by_all(void **state) {
    (void)state;
    ranks_run_at(RANKS_FIRST, 3, NULL, all_save, NULL);
}

/* --------------------------------------------------------- tensors of another rank */

static tsh_tensor *shared; /* of rank 1: a variable that all ranks see */

static int uses_a_tensor_of_rank_1(tsh_ctx *ctx, void *user) {
    static const char *const sentence =
        " belongs to the ctx of rank 1, not of rank 0: ranks share no tensors (is it kept in a "
        "variable that all ranks see?); a collective, such as tsh_broadcast, copies values from "
        "rank to rank";
    const int rank = tsh_world(ctx)->rank;
    tsh_tensor *x = tsh_keep(tsh_ones(ctx, tsh_shape1(4)));
    float out[4];
    (void)user;
    if (rank == 1) shared = x;
    /* rank 1 may still be in here when rank 0 fails: then it gets that error */
    if (tsh_barrier(tsh_world(ctx)) != TSH_OK) CHECK(rank == 1, "rank 1 has made it");
    if (rank == 0) {
        (void)tsh_add(x, shared);
        CHECK(ranks_says(ctx, TSH_ERR_ARGUMENT, "tsh_add: b belongs"), "its name");
        CHECK_SAYS(TSH_ERR_ARGUMENT, sentence);
        (void)tsh_read(ctx, shared, TSH_LOCAL, out, sizeof out);
        CHECK(ranks_says(ctx, TSH_ERR_ARGUMENT, "tsh_read: the tensor belongs"), "of tsh_read");
        CHECK_SAYS(TSH_ERR_ARGUMENT, sentence);
        (void)tsh_backward(ctx, shared);
        CHECK(ranks_says(ctx, TSH_ERR_ARGUMENT, "tsh_backward: the loss belongs"), "of a loss");
        CHECK(ranks_says(ctx, TSH_ERR_ARGUMENT, sentence), "which all ranks get");
    }
    (void)tsh_barrier(tsh_world(ctx)); /* rank 1 keeps its tensor until rank 0 has failed */
    return 0;
}

static void test_a_tensor_of_another_rank(void **state) {
    (void)state;
    ranks_run_at(RANKS_FIRST, 2, NULL, uses_a_tensor_of_rank_1, NULL);
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_called_by_one_rank_alone, files_after),
        cmocka_unit_test_teardown(test_sentences_of_a_save_by_one_rank, files_after),
        cmocka_unit_test_teardown(test_called_by_all, files_after),
        cmocka_unit_test(test_a_tensor_of_another_rank),
    };
    return cmocka_run_group_tests(tests, files_begin, files_end);
}
