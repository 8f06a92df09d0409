/* tsh_outer: replicas that train apart follow the papers' algorithms as PyTorch computes them, at
 * every degree of tp; they are equal to the bit after each exchange, in every dtype of parameters
 * and of what is sent; a run that was saved and loaded goes on with the same bits; bytes sent are
 * counted; frozen parameters; other numbers of replicas; errors. */
/* build: double */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../support/files.h"
#include "../support/golden.h"

enum { IN = 10, OUT = 7, N = 2 * IN * OUT + IN + OUT, PARAMS = 4, STEPS = 24 };
static const char *const paths[PARAMS] = {"a.weight", "a.bias", "b.weight", "b.bias"};
static golden_file golden;

static const tsh_optim_desc adamw = {.kind = TSH_ADAMW, .lr = 0.05, .weight_decay = 0.1};

static int make_net(tsh_ctx *ctx, tsh_dtype dtype) {
    static const tsh_plan_rule plan[] = {{.path = "a", .style = TSH_COLWISE},
                                         {.path = "b", .style = TSH_ROWWISE}};
    const tsh_linear_desc a = {.in = IN, .out = OUT}, b = {.in = OUT, .out = IN};
    tsh_module *root = tsh_root(ctx);
    int p, e = 0;
    tsh_add_linear(root, "a", &a);
    tsh_add_linear(root, "b", &b);
    for (p = 0; p < PARAMS; p++) {
        tsh_tensor *param = tsh_param(root, paths[p]);
        tsh_real values[IN * OUT];
        int64_t i;
        for (i = 0; i < tsh_numel(param); i++) values[i] = (tsh_real)(0.1 * cos(0.7 * e++));
        CHECK(tsh_write(ctx, param, TSH_GLOBAL, values, (size_t)i * sizeof *values) == TSH_OK,
              "write");
    }
    CHECK(tsh_to(root, dtype) == TSH_OK, "to");
    CHECK(tsh_parallelize(root, plan, COUNT(plan)) == TSH_OK, "plan");
    return 0;
}

/* Gives element e of all parameters the gradient x - sin(...), which differs between replicas. */
static void give(tsh_ctx *ctx, int s) {
    const double own = 1.7 * tsh_dp(ctx)->rank;
    tsh_tensor *loss = NULL;
    int p, e = 0;
    for (p = 0; p < PARAMS; p++) {
        tsh_tensor *x = tsh_param(tsh_root(ctx), paths[p]), *part;
        tsh_tensor *c = tsh_zeros(ctx, tsh_shape_of(x));
        tsh_real *values = (tsh_real *)tsh_data(ctx, c);
        int64_t i;
        for (i = 0; values && i < tsh_numel(x); i++, e++)
            values[i] = (tsh_real)sin(0.37 * e * e + 0.3 * s * e + s + own);
        c = tsh_sub(tsh_cast(x, TSH_REAL), tsh_redistribute(c, tsh_layout_of(x)));
        part = tsh_redistribute(tsh_sum(tsh_pow_scalar(c, 2), TSH_ALL, 0), tsh_replicated());
        loss = loss ? tsh_add(loss, part) : part;
    }
    (void)tsh_backward(ctx, tsh_scale(loss, 0.5));
}

static tsh_result step(tsh_ctx *ctx, tsh_outer *outer, int s) {
    give(ctx, s);
    (void)tsh_outer_step(outer);
    tsh_zero_grads(tsh_root(ctx));
    tsh_step_end(ctx);
    return tsh_last_error(ctx)->code;
}

static int read_all(tsh_ctx *ctx, tsh_real *all) {
    int p;
    for (p = 0; p < PARAMS; p++) {
        tsh_tensor *param = tsh_param(tsh_root(ctx), paths[p]);
        const size_t bytes = (size_t)tsh_numel(param) * sizeof *all;
        CHECK(tsh_read(ctx, tsh_cast(param, TSH_REAL), TSH_GLOBAL, all, bytes) == TSH_OK, "read");
        all += tsh_numel(param);
    }
    CHECK(tsh_step_end(ctx) == TSH_OK, "step end");
    return 0;
}

/* Returns 1 if all replicas have the same parameters, to the bit. */
static int replicas_equal(tsh_ctx *ctx) {
    static const int64_t counts[RANKS_MAX] = {N, N, N, N, N, N, N, N};
    tsh_real mine[N], all[RANKS_MAX * N];
    int r, equal = 1;
    if (read_all(ctx, mine)) return 0;
    if (tsh_allgather(tsh_dp(ctx), mine, all, counts, 1, TSH_REAL) != TSH_OK) return 0;
    for (r = 0; r < tsh_dp(ctx)->size; r++) equal &= memcmp(all + r * N, mine, sizeof mine) == 0;
    return equal;
}

static double golden_value(const char *name, const char *what, int i) {
    golden_tensor g = {.data = NULL};
    double value = 0;
    if (!golden_find(&golden, name, what, &g)) fail_msg("there is no \"%s.%s\"", name, what);
    memcpy(&value, (const char *)g.data + (size_t)i * sizeof value, sizeof value);
    return value;
}

/* ------------------------------------------------------------------------ the algorithms */

typedef struct test_case {
    const char *name;
    int dp;
    tsh_optim_desc inner;
    tsh_outer_desc desc;
} test_case;

static const test_case cases[] = {
    {"usual2", 2, {.kind = TSH_ADAMW, .lr = 0.05, .weight_decay = 0.1}, {.every = 6}},
    {"usual3", 3, {.kind = TSH_ADAMW, .lr = 0.05, .weight_decay = 0.1}, {.every = 6}},
    {"usual4", 4, {.kind = TSH_ADAMW, .lr = 0.05, .weight_decay = 0.1}, {.every = 5}},
    {"average", 2, {.lr = 0.1}, {.every = 1, .lr = 1, .momentum = TSH_ZERO}},
    {"fragments",
     2,
     {.kind = TSH_ADAMW, .lr = 0.05, .weight_decay = 0.1},
     {.every = 6, .fragments = 3}},
    {"streams2",
     2,
     {.kind = TSH_ADAMW, .lr = 0.05, .weight_decay = 0.1},
     {.every = 6, .fragments = 2, .delay = 2}},
    {"streams3",
     3,
     {.kind = TSH_ADAMW, .lr = 0.05, .weight_decay = 0.1},
     {.every = 7, .fragments = 3, .delay = 5, .mix = 0.25, .lr = 0.4, .momentum = 0.8}},
};

typedef struct course {
    const test_case *c;
    tsh_dtype dtype, wire;
    int pure;         /* no exact floats of bf16 parameters */
    double tolerance; /* of the values against the golden ones */
} course;

static int near_golden(tsh_ctx *ctx, const course *run, const char *what) {
    tsh_real got[N];
    int i;
    if (read_all(ctx, got)) return 1;
    for (i = 0; i < N; i++) {
        const double want = golden_value(run->c->name, what, i);
        CHECK(fabs((double)got[i] - want) <= run->tolerance, "%s.%s: %d is %.17g, not %.17g",
              run->c->name, what, i, (double)got[i], want);
    }
    return 0;
}

static int follows(tsh_ctx *ctx, void *user) {
    const course *run = (const course *)user;
    tsh_optim_desc inner = run->c->inner;
    tsh_outer_desc desc = run->c->desc;
    tsh_outer *outer;
    int s, meets; /* meets: 1: replicas are equal after this step */
    if (make_net(ctx, run->dtype)) return 1;
    desc.wire = run->wire;
    inner.round_weights = run->pure;
    outer = tsh_outer_new(tsh_root(ctx), tsh_optim_new(tsh_root(ctx), &inner), &desc);
    for (s = 1; s <= STEPS; s++) {
        CHECK(step(ctx, outer, s) == TSH_OK, "step %d", s);
        CHECK(tsh_check_replicas(tsh_root(ctx)) == 1, "outer weights, step %d", s);
        if (desc.fragments > 1) continue;
        meets = s % (int)desc.every == 0;
        CHECK(replicas_equal(ctx) == meets, "step %d", s);
    }
    CHECK(tsh_outer_state(outer).steps == STEPS, "steps");
    CHECK(tsh_outer_state(outer).exchanges ==
              (STEPS - desc.delay) * (desc.fragments ? desc.fragments : 1) / desc.every,
          "%d exchanges", (int)tsh_outer_state(outer).exchanges);
    if (tsh_dp(ctx)->rank == 0 && !run->pure && near_golden(ctx, run, "replica")) return 1;
    tsh_outer_free(outer);
    CHECK(replicas_equal(ctx), "outer weights");
    return run->pure ? 0 : near_golden(ctx, run, "outer");
}

static void run_course(const course *run) {
    int tp;
    for (tp = 1; tp <= 2; tp++) {
        const tsh_desc desc = {.tp = tp};
        ranks_run_with(run->c->dp * tp, &desc, follows, (void *)(size_t)run);
    }
}

static void replicas_follow_the_papers(void **state) {
    int i;
    (void)state;
    for (i = 0; i < COUNT(cases); i++) {
        const course run = {&cases[i], TSH_REAL, TSH_DTYPE_DEFAULT, 0,
                            sizeof(tsh_real) == 8 ? 1e-12 : 3e-5};
        run_course(&run);
    }
}

/* Rounded on the way, as the wire's dtype has it: of changes of up to 0.3, a bf16 loses 2^-9, a
 * block of 8 bits 1/254, one of 4 bits 1/14. */
static void wires_round(void **state) {
    static const tsh_dtype wires[] = {TSH_F32, TSH_BF16, TSH_Q8_0, TSH_Q4_0};
    static const double lost[] = {3e-5, 8e-3, 1e-2, 0.2};
    int i, w;
    (void)state;
    for (w = 0; w < COUNT(wires); w++)
        for (i = 0; i < COUNT(cases); i += 2) {
            const course run = {&cases[i], TSH_REAL, wires[w], 0, lost[w]};
            run_course(&run);
        }
}

static void parameters_of_bf16(void **state) {
    int i;
    (void)state;
    for (i = 0; i < COUNT(cases); i++) {
        const course exact = {&cases[i], TSH_BF16, TSH_DTYPE_DEFAULT, 0, 2e-2};
        const course pure = {&cases[i], TSH_BF16, TSH_Q8_0, 1, 0};
        run_course(&exact);
        run_course(&pure);
    }
}

/* ------------------------------------------------------------------------ save and load */

enum { SAVED = 13 };

typedef struct saving {
    tsh_outer_desc desc;
    int tp;            /* of the run that saved */
    int loads, faults; /* faults: a step of replica 1 is skipped, for a NaN */
    char path[2 * FILES_SIZE];
    tsh_real want[RANKS_MAX][N]; /* of every rank of that run */
} saving;

static int goes_on(tsh_ctx *ctx, void *user) {
    saving *a = (saving *)user;
    const int dp = tsh_dp(ctx)->rank;
    tsh_optim *optim;
    tsh_outer *outer;
    tsh_real got[N];
    int s = 1;
    if (make_net(ctx, TSH_REAL)) return 1;
    optim = tsh_optim_new(tsh_root(ctx), &adamw);
    outer = tsh_outer_new(tsh_root(ctx), optim, &a->desc);
    if (a->loads) {
        for (; s < 4; s++) CHECK(step(ctx, outer, 7 * s) == TSH_OK, "another run");
        CHECK(tsh_load(tsh_root(ctx), a->path, optim) == TSH_OK, "load");
        CHECK(tsh_outer_state(outer).steps == SAVED, "steps");
        CHECK(tsh_optim_state(optim).skipped == (a->faults && dp == 1), "skipped");
        s = SAVED + 1;
    }
    for (; s <= STEPS; s++) {
        if (a->faults && s == 1 && dp == 1) {
            give(ctx, s);
            ((tsh_real *)tsh_data(ctx,
                                  tsh_grad(tsh_param(tsh_root(ctx), "b.bias"))))[0] = (tsh_real)NAN;
            (void)tsh_outer_step(outer);
            tsh_zero_grads(tsh_root(ctx));
            tsh_step_end(ctx);
        } else {
            CHECK(step(ctx, outer, s) == TSH_OK, "step %d", s);
        }
        if (s == SAVED && !a->loads)
            CHECK(tsh_save(tsh_root(ctx), a->path, optim) == TSH_OK, "save");
    }
    if (read_all(ctx, got)) return 1;
    if (!a->loads) memcpy(a->want[tsh_world(ctx)->rank], got, sizeof got);
    if (a->loads) CHECK(memcmp(a->want[dp * a->tp], got, sizeof got) == 0, "the same bits");
    return 0;
}

static void loaded_runs_go_on(void **state) {
    static const tsh_outer_desc rows[] = {
        {.every = 6},
        {.every = 6, .wire = TSH_Q8_0},
        {.every = 6, .fragments = 2, .delay = 3},
        {.every = 8, .fragments = 3, .delay = 7, .wire = TSH_BF16},
        {.every = 6, .fragments = 3, .delay = 1, .wire = TSH_Q8_0}};
    static const int ways[][2] = {{2, 1}, {3, 1}, {2, 2}, {1, 1}};
    int i, w, faults;
    (void)state;
    for (i = 0; i < COUNT(rows); i++)
        for (w = 0; w < COUNT(ways); w++)
            for (faults = 0; faults < 2; faults++) {
                const tsh_desc desc = {.tp = ways[w][1]};
                const int ranks = ways[w][0] * ways[w][1];
                /* under MPI, processes of their own would write to one file */
                const ranks_place place = ranks == 1 ? RANKS_FIRST : RANKS_ANY;
                static saving a;
                memset(&a, 0, sizeof a);
                a.desc = rows[i];
                a.tp = ways[w][1];
                a.faults = faults;
                (void)snprintf(a.path, sizeof a.path, "%s/outer", files_here);
                ranks_run_at(place, ranks, &desc, goes_on, &a);
                ranks_share(ranks, a.want, sizeof a.want[0]);
                a.loads = 1;
                ranks_run_at(place, ranks, &desc, goes_on, &a);
            }
}

/* With two replicas and floats on the wire, tp changes no bit of what is sent. */
static void another_tp_gives_the_same_bits(void **state) {
    static saving a;
    const tsh_desc one = {.tp = 1}, two = {.tp = 2}, four = {.tp = 4};
    (void)state;
    memset(&a, 0, sizeof a);
    a.desc.every = 6;
    a.desc.fragments = 2;
    a.desc.delay = 3;
    (void)snprintf(a.path, sizeof a.path, "%s/outer", files_here);
    a.tp = 2;
    ranks_run_at(RANKS_FIRST, 4, &two, goes_on, &a);
    a.loads = 1;
    ranks_run_at(RANKS_FIRST, 2, &one, goes_on, &a);
    ranks_run_at(RANKS_FIRST, 8, &four, goes_on, &a);
}

/* Files with another number of replicas, or without outer steps. */
typedef struct change {
    int saves, plain; /* plain: without a tsh_outer */
    char path[2 * FILES_SIZE];
} change;

static int changes(tsh_ctx *ctx, void *user) {
    const change *c = (const change *)user;
    const tsh_outer_desc desc = {.every = 4, .fragments = 2};
    tsh_optim *optim;
    tsh_outer *outer = NULL;
    int s;
    if (make_net(ctx, TSH_REAL)) return 1;
    optim = tsh_optim_new(tsh_root(ctx), &adamw);
    if (!c->plain) outer = tsh_outer_new(tsh_root(ctx), optim, &desc);
    if (!c->saves) CHECK(tsh_load(tsh_root(ctx), c->path, optim) == TSH_OK, "load");
    CHECK(tsh_check_replicas(tsh_root(ctx)), "replicas");
    if (c->plain && !c->saves) return 0;
    for (s = 1; s <= 7; s++) {
        if (outer) CHECK(step(ctx, outer, s) == TSH_OK, "step");
        if (outer) continue;
        give(ctx, s);
        CHECK(tsh_optim_step(optim) == TSH_OK, "plain step");
        tsh_zero_grads(tsh_root(ctx));
        tsh_step_end(ctx);
    }
    CHECK(tsh_check_replicas(tsh_root(ctx)), "replicas");
    if (c->saves) CHECK(tsh_save(tsh_root(ctx), c->path, optim) == TSH_OK, "save");
    tsh_outer_free(outer);
    CHECK(replicas_equal(ctx), "the end");
    return 0;
}

static void other_numbers_of_replicas(void **state) {
    static const int dp[] = {1, 2, 3, 5};
    change c = {.saves = 1};
    const tsh_desc desc = {.tp = 1};
    int i, plain;
    (void)state;
    (void)snprintf(c.path, sizeof c.path, "%s/outer", files_here);
    for (plain = 0; plain < 2; plain++) {
        c.saves = 1;
        c.plain = plain;
        ranks_run_at(RANKS_FIRST, 3, &desc, changes, &c);
        c.saves = 0;
        for (i = 0; i < COUNT(dp); i++) {
            c.plain = 0;
            ranks_run_at(RANKS_FIRST, dp[i], &desc, changes, &c);
            c.plain = 1;
            if (!plain) ranks_run_at(RANKS_FIRST, dp[i], &desc, changes, &c);
        }
    }
}

/* ------------------------------------------------------------------------------ bytes */

enum { WIDE = 64, HIGH = 96, EVERY = 6 };

static uint64_t bytes_sent(tsh_ctx *ctx) {
    const tsh_comm *dp = tsh_dp(ctx);
    uint64_t sent = 0;
    int k;
    for (k = 0; k < TSH_COLL_KINDS; k++) sent += dp->stats.bytes[k];
    return sent;
}

static tsh_optim *make_wide(tsh_ctx *ctx) {
    const tsh_linear_desc a = {.in = WIDE, .out = HIGH, .bias = TSH_NO};
    tsh_add_linear(tsh_root(ctx), "a", &a);
    return tsh_optim_new(tsh_root(ctx), &adamw);
}

static void backward_wide(tsh_ctx *ctx) {
    tsh_tensor *x = tsh_ones(ctx, tsh_shape2(3, WIDE));
    tsh_tensor *y = tsh_forward(tsh_find(tsh_root(ctx), "a"), x);
    (void)tsh_backward(ctx, tsh_mean(tsh_pow_scalar(y, 2), TSH_ALL, 0));
}

static int counts_bytes(tsh_ctx *ctx, void *user) {
    static const tsh_dtype wires[] = {TSH_F32, TSH_BF16, TSH_Q8_0};
    static const uint64_t block[] = {128, 64, 34}; /* bytes of 32 elements */
    const uint64_t size = (uint64_t)tsh_dp(ctx)->size, blocks = WIDE * HIGH / 32;
    tsh_optim *optim = make_wide(ctx);
    uint64_t before, sent, want;
    int w, s, sends;
    (void)user;
    backward_wide(ctx); /* compares the models, once */
    tsh_zero_grads(tsh_root(ctx));
    tsh_step_end(ctx);
    before = bytes_sent(ctx);
    backward_wide(ctx);
    CHECK_TRUE(tsh_optim_step(optim) == TSH_OK && tsh_step_end(ctx) == TSH_OK);
    tsh_zero_grads(tsh_root(ctx));
    sent = bytes_sent(ctx) - before; /* of a step of replicas that train together */
    CHECK(sent == 2 * (size - 1) * WIDE * HIGH * sizeof(tsh_real) / size, "%d bytes", (int)sent);
    for (w = 0; w < COUNT(wires); w++) {
        const tsh_outer_desc desc = {.every = EVERY, .wire = wires[w], .fragments = w};
        tsh_outer *outer = tsh_outer_new(tsh_root(ctx), optim, &desc);
        for (s = 1; s <= 2 * EVERY; s++) {
            before = bytes_sent(ctx);
            backward_wide(ctx);
            CHECK_TRUE(tsh_outer_step(outer) == TSH_OK && tsh_step_end(ctx) == TSH_OK);
            tsh_zero_grads(tsh_root(ctx));
            sent = bytes_sent(ctx) - before;
            /* the only parameter is in the first of the two fragments of w 2 */
            sends = s % EVERY == (w < 2 ? 0 : EVERY / 2);
            want = sends ? 2 * (size - 1) * block[w] * blocks / size : 0;
            CHECK(sent == want, "step %d: %d bytes, not %d", s, (int)sent, (int)want);
        }
        tsh_outer_free(outer);
    }
    backward_wide(ctx); /* gradients are averaged again */
    CHECK_TRUE(bytes_sent(ctx) - before >= WIDE * HIGH * sizeof(tsh_real));
    return 0;
}

static void bytes_are_few(void **state) {
    const tsh_desc desc = {.tp = 1};
    (void)state;
    ranks_run_with(2, &desc, counts_bytes, NULL);
    ranks_run_with(4, &desc, counts_bytes, NULL);
}

/* ------------------------------------------------------------------- the order of sums */

enum { BLOCK = 32 };

/* The changes of the three replicas are 1, large and -large: whether the 1 is lost depends on the
 * order of the sum. Element e is in chunk e / 32. */
static int adds_in_order(tsh_ctx *ctx, void *user) {
    const tsh_real large = (tsh_real)(sizeof(tsh_real) == 8 ? 1e17 : 1e9);
    const tsh_real changes[3] = {1, large, -large};
    const tsh_linear_desc row = {.in = 3 * BLOCK, .out = 1, .bias = TSH_NO};
    const tsh_optim_desc sgd = {.lr = 1};
    const tsh_outer_desc desc = {.every = 1, .lr = 1, .momentum = TSH_ZERO};
    tsh_real got[3 * BLOCK];
    tsh_tensor *w, *c;
    tsh_outer *outer;
    int e;
    (void)user;
    tsh_add_linear(tsh_root(ctx), "a", &row);
    w = tsh_param(tsh_root(ctx), "a.weight");
    memset(got, 0, sizeof got);
    CHECK_TRUE(tsh_write(ctx, w, TSH_GLOBAL, got, sizeof got) == TSH_OK);
    outer = tsh_outer_new(tsh_root(ctx), tsh_optim_new(tsh_root(ctx), &sgd), &desc);
    c = tsh_full(ctx, tsh_shape_of(w), (double)changes[tsh_dp(ctx)->rank]);
    (void)tsh_backward(ctx, tsh_sum(tsh_mul(w, c), TSH_ALL, 0));
    CHECK_TRUE(tsh_outer_step(outer) == TSH_OK);
    CHECK_TRUE(tsh_read(ctx, w, TSH_GLOBAL, got, sizeof got) == TSH_OK);
    for (e = 0; e < 3 * BLOCK; e++) {
        const int k = e / BLOCK;
        tsh_real sum = changes[(k + 1) % 3];
        sum += changes[(k + 2) % 3];
        sum += changes[k];
        CHECK(got[e] == -(sum / 3), "element %d is %g", e, (double)got[e]);
        CHECK((sum == 0) == (k > 0), "chunk %d", k);
    }
    return 0;
}

static void sums_have_the_documented_order(void **state) {
    const tsh_desc desc = {.tp = 1};
    (void)state;
    ranks_run_with(3, &desc, adds_in_order, NULL);
}

/* ------------------------------------------------------------------- frozen parameters */

static int freezes(tsh_ctx *ctx, void *user) {
    const tsh_outer_desc desc = {.every = 3};
    tsh_real begin[N], now[N];
    tsh_optim *optim;
    tsh_outer *outer;
    int s;
    (void)user;
    if (make_net(ctx, TSH_REAL)) return 1;
    CHECK_TRUE(tsh_freeze(tsh_root(ctx), "a.weight") == TSH_OK);
    optim = tsh_optim_new(tsh_root(ctx), &adamw);
    outer = tsh_outer_new(tsh_root(ctx), optim, &desc);
    if (read_all(ctx, begin)) return 1;
    for (s = 1; s <= 3; s++) CHECK_TRUE(step(ctx, outer, s) == TSH_OK);
    if (read_all(ctx, now)) return 1;
    CHECK(memcmp(begin, now, IN * OUT * sizeof *now) == 0, "frozen");
    CHECK(memcmp(begin + IN * OUT, now + IN * OUT, OUT * sizeof *now) != 0, "trained");
    memcpy(begin, now, sizeof now);
    CHECK_TRUE(step(ctx, outer, 4) == TSH_OK); /* replicas differ now */
    CHECK_TRUE(tsh_freeze(tsh_root(ctx), "a.bias") == TSH_OK);
    for (s = 5; s <= 6; s++) CHECK_TRUE(step(ctx, outer, s) == TSH_OK);
    if (read_all(ctx, now)) return 1;
    CHECK(memcmp(begin, now, (IN * OUT + OUT) * sizeof *now) == 0, "its value of step 3");
    CHECK_TRUE(replicas_equal(ctx));
    CHECK_TRUE(tsh_unfreeze(tsh_root(ctx), "**") == TSH_OK);
    for (s = 7; s <= 9; s++) CHECK_TRUE(step(ctx, outer, s) == TSH_OK);
    if (read_all(ctx, now)) return 1;
    CHECK(memcmp(begin, now, sizeof *now) != 0, "trained again");
    CHECK_TRUE(replicas_equal(ctx) && tsh_check_replicas(tsh_root(ctx)));
    return 0;
}

static void frozen_parameters(void **state) {
    const tsh_desc desc = {.tp = 2};
    (void)state;
    ranks_run_with(4, &desc, freezes, NULL);
}

/* ------------------------------------------------------------------------------ errors */

static int refuses(tsh_ctx *ctx, void *user) {
    static const tsh_outer_desc bad[] = {{.every = 0},
                                         {.every = -1},
                                         {.every = 4, .fragments = 5},
                                         {.every = 400, .fragments = 33},
                                         {.every = 4, .fragments = -1},
                                         {.every = 4, .delay = 4},
                                         {.every = 4, .delay = -1},
                                         {.every = 4, .lr = -1},
                                         {.every = 4, .momentum = 1},
                                         {.every = 4, .mix = 1.5},
                                         {.every = 4, .lr = (double)NAN}};
    static const tsh_outer_desc good = {.every = 4}, wire = {.every = 4, .wire = TSH_I32};
    const tsh_optim_desc zero = {.zero = 1};
    const char *path = (const char *)user;
    const tsh_outer_desc streams = {.every = 4, .delay = 2}, others = {.every = 5, .delay = 2};
    const tsh_file_desc file = {.broadcast = 1};
    tsh_module *root = tsh_root(ctx);
    tsh_optim *optim;
    tsh_outer *outer;
    int i;
    if (make_net(ctx, TSH_REAL)) return 1;
    optim = tsh_optim_new(root, &adamw);
    for (i = 0; i < COUNT(bad); i++) {
        CHECK(!tsh_outer_new(root, optim, &bad[i]), "row %d", i);
        CHECK_SAYS(TSH_ERR_ARGUMENT, "tsh_outer_new: ");
    }
    CHECK_TRUE(!tsh_outer_new(root, optim, NULL));
    CHECK_SAYS(TSH_ERR_ARGUMENT, ".every is 0");
    CHECK_TRUE(!tsh_outer_new(root, optim, &wire));
    CHECK_SAYS(TSH_ERR_DTYPE, ".wire is i32");
    CHECK_TRUE(!tsh_outer_new(root, NULL, &good));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "the optimiser is NULL");
    CHECK_TRUE(!tsh_outer_new(tsh_find(root, "a"), optim, &good));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "that of another module");
    CHECK_TRUE(!tsh_outer_new(NULL, optim, &good) && !tsh_outer_new(NULL, NULL, NULL));
    CHECK_TRUE(tsh_outer_step(NULL) == TSH_ERR_ARGUMENT && tsh_outer_state(NULL).steps == 0);
    tsh_outer_free(NULL);
    outer = tsh_outer_new(root, optim, &streams);
    CHECK_TRUE(outer && !tsh_outer_new(root, optim, &good));
    CHECK_SAYS(TSH_ERR_STATE, "the optimiser has a tsh_outer");
    for (i = 1; i <= 5; i++) CHECK_TRUE(step(ctx, outer, i) == TSH_OK);
    CHECK_TRUE(tsh_save(root, path, optim) == TSH_OK);
    CHECK_TRUE(tsh_load_with(root, path, optim, &file) == TSH_ERR_UNSUPPORTED);
    CHECK_SAYS(TSH_ERR_UNSUPPORTED, "let every rank read it");
    tsh_outer_free(outer);
    tsh_outer_free(outer); /* once more does nothing */
    outer = tsh_outer_new(root, optim, &others);
    CHECK_TRUE(tsh_load(root, path, optim) == TSH_ERR_ARGUMENT);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "sent with .every 4, .fragments 1, .delay 2");
    give(ctx, 1);
    tsh_optim_free(optim);
    CHECK_TRUE(tsh_outer_step(outer) == TSH_ERR_STATE);
    CHECK_SAYS(TSH_ERR_STATE, "the optimiser was freed");
    tsh_outer_free(outer);
    tsh_step_end(ctx);
    optim = tsh_optim_new(root, &zero);
    CHECK_TRUE(!tsh_outer_new(root, optim, &good));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "has .zero");
    return 0;
}

static void mistakes(void **state) {
    const tsh_desc desc = {.tp = 1};
    char path[2 * FILES_SIZE];
    (void)state;
    (void)snprintf(path, sizeof path, "%s/outer", files_here);
    ranks_run_with(2, &desc, refuses, path);
}

/* A ctx may be closed while a fragment is on its way. */
static int leaves(tsh_ctx *ctx, void *user) {
    const tsh_outer_desc desc = {.every = 4, .fragments = 2, .delay = 3};
    tsh_outer *outer;
    (void)user;
    if (make_net(ctx, TSH_REAL)) return 1;
    outer = tsh_outer_new(tsh_root(ctx), tsh_optim_new(tsh_root(ctx), &adamw), &desc);
    CHECK_TRUE(step(ctx, outer, 1) == TSH_OK && step(ctx, outer, 2) == TSH_OK);
    return 0;
}

static void closed_on_the_way(void **state) {
    const tsh_desc desc = {.tp = 1};
    (void)state;
    ranks_run_with(3, &desc, leaves, NULL);
}

static int open_golden(void **state) {
    golden = golden_open("outer");
    return files_begin(state);
}

static int close_golden(void **state) {
    golden_finish(&golden);
    return files_end(state);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(replicas_follow_the_papers),
        cmocka_unit_test(wires_round),
        cmocka_unit_test(parameters_of_bf16),
        cmocka_unit_test(loaded_runs_go_on),
        cmocka_unit_test(another_tp_gives_the_same_bits),
        cmocka_unit_test(other_numbers_of_replicas),
        cmocka_unit_test(bytes_are_few),
        cmocka_unit_test(sums_have_the_documented_order),
        cmocka_unit_test(frozen_parameters),
        cmocka_unit_test(mistakes),
        cmocka_unit_test(closed_on_the_way),
    };
    return cmocka_run_group_tests_name("layer/test_outer", tests, open_golden, close_golden);
}
