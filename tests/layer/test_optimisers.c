/* Every optimiser computes what PyTorch's does, in 200 steps, with the same bits at every degree of
 * tp and dp, with .zero, with bf16 weights and moments, and after it was saved and loaded at
 * another degree; groups of several kinds; optimisers of one's own; learning rates and averages of
 * weights are PyTorch's. */
/* build: double */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../support/files.h"
#include "../support/golden.h"

enum { IN = 10, OUT = 7, N = 2 * IN * OUT + IN + OUT, PARAMS = 4, STEPS = 200 };
static const char *const paths[PARAMS] = {"a.weight", "a.bias", "b.weight", "b.bias"};
static golden_file golden;

static double begin_value(int e) {
    return 0.1 * cos(0.7 * e);
}

/* ------------------------------------------------------------- optimisers of one's own */

/* AdamW with torch's betas, by elements. */
static void my_adamw(const tsh_update *u, void *user) {
    const double *eps = (const double *)user;
    const double step = (double)u->step;
    int64_t i;
    for (i = 0; i < u->n; i++) {
        tsh_real *m = &u->moment[0][i], *v = &u->moment[1][i];
        const double g = (double)u->grad[i];
        *m = (tsh_real)(0.9 * (double)*m + (1 - 0.9) * g);
        *v = (tsh_real)(0.999 * (double)*v + (1 - 0.999) * g * g);
        u->x[i] = (tsh_real)((double)u->x[i] * (1 - u->lr * u->weight_decay) -
                             u->lr * ((double)*m / (1 - pow(0.9, step))) /
                                 (sqrt((double)*v / (1 - pow(0.999, step))) + *eps));
    }
}

/* The same, given whole parameters; it uses a third moment, and checks what it is given. */
static void my_whole(const tsh_update *u, void *user) {
    int64_t i, n = 1;
    for (i = 0; i < u->shape.ndim; i++) n *= u->shape.dim[i];
    if (n != u->n || !u->path) return;
    for (i = 0; i < n; i++)
        if (u->moment[2][i] != (tsh_real)(u->step - 1)) return;
    my_adamw(u, user);
    for (i = 0; i < n; i++) u->moment[2][i] += 1;
}

static double eps_of_mine = 1e-8;
#define MINE                                                                                       \
    { "mine", 2, 0, my_adamw, &eps_of_mine }
#define MINE_WHOLE                                                                                 \
    { "mine", 3, 1, my_whole, &eps_of_mine }

/* ------------------------------------------------------------------------ the problem */

typedef struct test_case {
    const char *name;
    tsh_optim_desc desc;
    double tolerance; /* of float builds; those of double have 1e-10, except for PyTorch's own Muon,
                       * which sums floats in another order */
} test_case;

/* Float: roundings of 200 steps, which the gradient pulls back; lion's sign, and the bf16 products
 * of muon, turn them into errors of a step or of half a percent of it. */
static const test_case cases[] = {
    {"lion", {.kind = TSH_LION, .lr = 0.01, .weight_decay = 0.1}, 4e-2},
    {"lion_betas", {.kind = TSH_LION, .beta1 = 0.8, .beta2 = 0.9}, 4e-4},
    {"rmsprop", {.kind = TSH_RMSPROP}, 2e-5},
    {"rmsprop_momentum",
     {.kind = TSH_RMSPROP, .lr = 0.005, .momentum = 0.9, .weight_decay = 0.1},
     2e-5},
    {"rmsprop_centered",
     {.kind = TSH_RMSPROP, .lr = 0.005, .alpha = 0.9, .eps = 1e-3, .centered = 1},
     2e-3},
    {"rmsprop_all",
     {.kind = TSH_RMSPROP, .lr = 0.005, .momentum = 0.5, .centered = 1, .weight_decay = 0.01},
     2e-3},
    {"adagrad", {.kind = TSH_ADAGRAD}, 2e-5},
    {"adagrad_decay",
     {.kind = TSH_ADAGRAD, .lr = 0.1, .lr_decay = 0.01, .weight_decay = 0.1, .eps = 1e-3},
     2e-5},
    {"adamax", {.kind = TSH_ADAMAX}, 2e-5},
    {"adamax_decay",
     {.kind = TSH_ADAMAX,
      .lr = 0.05,
      .beta1 = 0.8,
      .beta2 = 0.99,
      .weight_decay = 0.1,
      .eps = 1e-4},
     2e-5},
    {"nadam", {.kind = TSH_NADAM}, 2e-5},
    {"nadam_decoupled",
     {.kind = TSH_NADAM, .lr = 0.05, .weight_decay = 0.1, .momentum_decay = 0.01, .decoupled = 1},
     2e-4},
    {"radam", {.kind = TSH_RADAM}, 2e-5},
    {"radam_decay", {.kind = TSH_RADAM, .lr = 0.05, .weight_decay = 0.1}, 2e-4},
    {"radam_decoupled",
     {.kind = TSH_RADAM,
      .lr = 0.05,
      .weight_decay = 0.1,
      .beta1 = 0.8,
      .beta2 = 0.95,
      .decoupled = 1},
     2e-4},
    {"adafactor", {.kind = TSH_ADAFACTOR}, 2e-5},
    {"adafactor_options",
     {.kind = TSH_ADAFACTOR,
      .lr = 0.1,
      .beta2_decay = -0.5,
      .eps = 1e-3,
      .eps2 = 0.1,
      .d = 1.25,
      .weight_decay = 0.2},
     2e-5},
    {"muon", {.kind = TSH_MUON, .lr = 0.02}, 4e-3},
    {"muon_rms",
     {.kind = TSH_MUON,
      .lr = 0.02,
      .adjust_lr_fn = TSH_ADJUST_MATCH_RMS_ADAMW,
      .nesterov = TSH_NO,
      .momentum = 0.4,
      .weight_decay = TSH_ZERO},
     4e-3},
    {"muon_steps",
     {.kind = TSH_MUON,
      .lr = 0.02,
      .ns_steps = 3,
      .ns_coefficients = {3, -4, 2},
      .eps = 1e-3,
      .weight_decay = 0.3},
     4e-3},
    {"custom", {.kind = TSH_CUSTOM, .lr = 0.05, .weight_decay = 0.1, .custom = MINE}, 2e-4},
    {"custom", {.kind = TSH_CUSTOM, .lr = 0.05, .weight_decay = 0.1, .custom = MINE_WHOLE}, 2e-4},
};

static const tsh_plan_rule plan[] = {{.path = "a", .style = TSH_COLWISE},
                                     {.path = "b", .style = TSH_ROWWISE}};

static int make_net(tsh_ctx *ctx, tsh_dtype dtype) {
    const tsh_linear_desc a = {.in = IN, .out = OUT}, b = {.in = OUT, .out = IN};
    tsh_module *root = tsh_root(ctx);
    int p, e = 0;
    tsh_add_linear(root, "a", &a);
    tsh_add_linear(root, "b", &b);
    for (p = 0; p < PARAMS; p++) {
        tsh_tensor *param = tsh_param(root, paths[p]);
        tsh_real values[IN * OUT];
        int64_t i;
        for (i = 0; i < tsh_numel(param); i++) values[i] = (tsh_real)begin_value(e++);
        CHECK(tsh_write(ctx, param, TSH_GLOBAL, values, (size_t)i * sizeof *values) == TSH_OK,
              "write");
    }
    CHECK(tsh_to(root, dtype) == TSH_OK, "to");
    CHECK(tsh_parallelize(root, plan, COUNT(plan)) == TSH_OK, "plan");
    return 0;
}

static tsh_optim *make_optim(tsh_ctx *ctx, const tsh_optim_desc *desc) {
    const tsh_optim_desc rest = {.kind = TSH_ADAMW, .lr = 0.03, .weight_decay = 0.2};
    tsh_optim *optim = tsh_optim_new(tsh_root(ctx), desc);
    if (desc->kind == TSH_MUON) (void)tsh_optim_group_with(optim, "**.bias", &rest);
    return optim;
}

/* What step s pulls element e of all parameters to. */
static double target(int s, int e) {
    return sin(0.37 * e * e + 0.3 * s * e + s);
}

/* Gives element e of all parameters the gradient x - target. */
static void give(tsh_ctx *ctx, int s) {
    tsh_tensor *loss = NULL;
    int p, e = 0;
    for (p = 0; p < PARAMS; p++) {
        tsh_tensor *x = tsh_param(tsh_root(ctx), paths[p]), *part;
        tsh_tensor *c = tsh_zeros(ctx, tsh_shape_of(x));
        tsh_real *values = (tsh_real *)tsh_data(ctx, c);
        int64_t i;
        for (i = 0; values && i < tsh_numel(x); i++, e++) values[i] = (tsh_real)target(s, e);
        c = tsh_sub(tsh_cast(x, TSH_REAL), tsh_redistribute(c, tsh_layout_of(x)));
        part = tsh_redistribute(tsh_sum(tsh_pow_scalar(c, 2), TSH_ALL, 0), tsh_replicated());
        loss = loss ? tsh_add(loss, part) : part;
    }
    (void)tsh_backward(ctx, tsh_scale(loss, 0.5));
}

static tsh_result step(tsh_ctx *ctx, tsh_optim *optim, int s) {
    give(ctx, s);
    (void)tsh_optim_step(optim);
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

static double golden_value(const char *name, const char *what, int i) {
    golden_tensor g = {.data = NULL};
    double value = 0;
    if (!golden_find(&golden, name, what, &g)) fail_msg("there is no \"%s.%s\"", name, what);
    memcpy(&value, (const char *)g.data + (size_t)i * sizeof value, sizeof value);
    return value;
}

/* --------------------------------------------------------------------------- 200 steps */

static int follows(tsh_ctx *ctx, void *user) {
    const test_case *c = (const test_case *)user;
    const int muon = c->desc.kind == TSH_MUON;
    const double exact = sizeof(tsh_real) == 8 ? 1e-10 : c->tolerance;
    char name[64];
    tsh_real got[N];
    tsh_optim *optim;
    int s, i;
    if (make_net(ctx, TSH_REAL)) return 1;
    optim = make_optim(ctx, &c->desc);
    for (s = 1; s <= STEPS; s++) CHECK(step(ctx, optim, s) == TSH_OK, "%s, step %d", c->name, s);
    if (read_all(ctx, got)) return 1;
    (void)snprintf(name, sizeof name, "%s%s", c->name, muon ? "_exact" : "");
    for (i = 0; i < N; i++) {
        const double want = golden_value(name, "last", i);
        const double theirs = golden_value(c->name, "last", i);
        CHECK(fabs((double)got[i] - want) <= exact, "%s: element %d is %.17g, not %.17g", name, i,
              (double)got[i], want);
        CHECK(fabs((double)got[i] - theirs) <= (muon ? c->tolerance : exact),
              "%s: element %d is %.17g, PyTorch's %.17g", name, i, (double)got[i], theirs);
    }
    return 0;
}

static void optimisers_are_pytorchs(void **state) {
    int i;
    (void)state;
    for (i = 0; i < COUNT(cases); i++) ranks_run(1, follows, (void *)(size_t)&cases[i]);
}

/* ------------------------------------------------------------------------ the same bits */

enum { FEW = 5, SAVED = 2 };

typedef struct course {
    const test_case *c;
    int zero, loads, saves; /* loads 1: goes on from the file of a course with .saves */
    tsh_dtype dtype, moments;
    char path[2 * FILES_SIZE];
    tsh_real want[N];
    int known;
} course;

static int goes(tsh_ctx *ctx, void *user) {
    course *c = (course *)user;
    tsh_optim_desc desc = c->c->desc;
    tsh_real got[N];
    tsh_optim *optim;
    int s = 1;
    desc.zero = c->zero;
    desc.moments_dtype = c->moments;
    if (make_net(ctx, c->dtype)) return 1;
    optim = make_optim(ctx, &desc);
    if (c->loads) {
        CHECK(tsh_load(tsh_root(ctx), c->path, optim) == TSH_OK, "%s: load", c->c->name);
        s = SAVED + 1;
    }
    for (; s <= FEW; s++) {
        CHECK(step(ctx, optim, s) == TSH_OK, "%s, step %d", c->c->name, s);
        if (s == SAVED && c->saves)
            CHECK(tsh_save(tsh_root(ctx), c->path, optim) == TSH_OK, "%s: save", c->c->name);
    }
    if (read_all(ctx, got)) return 1;
    CHECK(tsh_check_replicas(tsh_root(ctx)) == 1, "%s: replicas", c->c->name);
    if (!c->known) {
        if (tsh_world(ctx)->rank == 0) memcpy(c->want, got, sizeof got);
    } else {
        CHECK(memcmp(c->want, got, sizeof got) == 0, "%s: tp %d, dp %d, zero %d, loads %d",
              c->c->name, tsh_tp(ctx)->size, tsh_dp(ctx)->size, c->zero, c->loads);
    }
    return 0;
}

static void compare(int i, tsh_dtype dtype, tsh_dtype moments) {
    /* ranks, tp, zero, loads, saves; the file is that of tp 2, dp 2 with .zero */
    static const int ways[][5] = {{1, 1, 0, 0, 0}, {2, 2, 0, 0, 0}, {3, 3, 0, 0, 0},
                                  {4, 4, 0, 0, 0}, {8, 8, 0, 0, 0}, {2, 1, 0, 0, 0},
                                  {4, 2, 1, 0, 1}, {1, 1, 0, 1, 0}, {3, 3, 0, 1, 1},
                                  {2, 1, 1, 1, 0}, {8, 4, 1, 1, 0}};
    course c = {.c = &cases[i], .dtype = dtype, .moments = moments};
    int w;
    (void)snprintf(c.path, sizeof c.path, "%s/%d.safetensors", files_here, i);
    for (w = 0; w < COUNT(ways); w++) {
        const tsh_desc desc = {.tp = ways[w][1]};
        if (dtype != TSH_REAL && w > 0 && w < 4) continue; /* for time */
        c.zero = ways[w][2];
        c.loads = ways[w][3];
        c.saves = ways[w][4] && !ways[w][3];
        if (!w)
            ranks_run_at(RANKS_EACH, ways[w][0], &desc, goes, &c);
        else
            ranks_run_with(ways[w][0], &desc, goes, &c);
        c.known = 1;
    }
}

static void every_degree_has_the_same_bits(void **state) {
    int i;
    (void)state;
    for (i = 0; i < COUNT(cases); i++) compare(i, TSH_REAL, TSH_REAL);
}

static void so_has_half_precision(void **state) {
    int i;
    (void)state;
    for (i = 0; i < COUNT(cases); i++) {
        compare(i, TSH_BF16, TSH_REAL);
        if (cases[i].desc.kind != TSH_CUSTOM || !cases[i].desc.custom.whole)
            compare(i, TSH_BF16, TSH_BF16);
    }
}

/* A bf16 parameter follows the float one: small updates are not lost. */
static int follows_in_bf16(tsh_ctx *ctx, void *user) {
    const test_case *c = (const test_case *)user;
    tsh_real got[N];
    tsh_optim *optim;
    int s, i;
    if (make_net(ctx, TSH_BF16)) return 1;
    optim = make_optim(ctx, &c->desc);
    for (s = 1; s <= STEPS; s++) CHECK(step(ctx, optim, s) == TSH_OK, "step %d", s);
    if (read_all(ctx, got)) return 1;
    for (i = 0; i < N; i++) {
        const double want = golden_value(c->name, "last", i);
        CHECK(fabs((double)got[i] - want) <= 2e-2 * fabs(want) + 4e-2, "%s: %d is %g, not %g",
              c->name, i, (double)got[i], want);
    }
    return 0;
}

static void bf16_weights_follow(void **state) {
    int i;
    (void)state;
    for (i = 0; i < COUNT(cases); i++) ranks_run(1, follows_in_bf16, (void *)(size_t)&cases[i]);
}

/* -------------------------------------------------------------------------- learning rates */

static double divided(int64_t t, void *user) {
    return *(const double *)user / (double)(1 + t);
}

static double endless(int64_t t, void *user) {
    (void)t, (void)user;
    return (double)INFINITY;
}

static double one = 1;

static void schedules_are_pytorchs(void **state) {
    static const struct {
        const char *name;
        int steps;
        tsh_schedule s;
    } rows[] = {
        {"step", 50, {.kind = TSH_STEP, .lr = 0.4, .period = 7, .gamma = 0.5}},
        {"step_usual", 50, {.kind = TSH_STEP, .lr = 0.4, .period = 30}},
        {"exponential", 50, {.kind = TSH_EXPONENTIAL, .lr = 0.4, .gamma = 0.97}},
        {"cosine", 50, {.kind = TSH_COSINE, .lr = 0.4, .lr_min = 0.01, .total = 50}},
        {"one_cycle", 50, {.kind = TSH_ONE_CYCLE, .lr = 0.4, .total = 50}},
        {"one_cycle_options",
         37,
         {.kind = TSH_ONE_CYCLE,
          .lr = 0.4,
          .total = 37,
          .pct_start = 0.45,
          .div_factor = 10,
          .final_div_factor = 100}},
        {"one_cycle_rises", 20, {.kind = TSH_ONE_CYCLE, .lr = 0.4, .total = 20, .pct_start = 1}},
        {"lambda", 50, {.kind = TSH_LAMBDA, .lr = 0.4, .factor = divided, .user = &one}},
    };
    int i, t;
    (void)state;
    for (i = 0; i < COUNT(rows); i++)
        for (t = 0; t < rows[i].steps; t++) {
            const double want = golden_value(rows[i].name, "rates", t);
            const double got = tsh_schedule_lr(&rows[i].s, t);
            if (!(fabs(got - want) <= 1e-12))
                fail_msg("%s: step %d has %.17g, not %.17g", rows[i].name, t, got, want);
        }
}

static void wsd_has_three_parts(void **state) {
    tsh_schedule s = {.kind = TSH_WSD, .lr = 0.5, .lr_min = 0.1, .warmup = 5, .total = 100};
    (void)state;
    assert_true(tsh_schedule_lr(&s, 0) == 0.1 && tsh_schedule_lr(&s, 4) == 0.5);
    assert_true(tsh_schedule_lr(&s, 5) == 0.5 && tsh_schedule_lr(&s, 90) == 0.5);
    assert_true(fabs(tsh_schedule_lr(&s, 95) - 0.3) < 1e-15); /* half of the last tenth */
    assert_true(tsh_schedule_lr(&s, 100) == 0.1 && tsh_schedule_lr(&s, 1000) == 0.1);
    s.decay = 40;
    assert_true(tsh_schedule_lr(&s, 60) == 0.5);
    assert_true(fabs(tsh_schedule_lr(&s, 70) - 0.4) < 1e-15);
    s.shape = TSH_COSINE;
    assert_true(fabs(tsh_schedule_lr(&s, 70) - (0.3 + 0.2 * cos(acos(-1) / 4))) < 1e-15);
}

static void plateaus_are_pytorchs(void **state) {
    static const struct {
        const char *name;
        tsh_plateau p;
    } rows[] = {
        {"plateau", {.lr = 0.4, .patience = 3}},
        {"plateau_usual", {.lr = 0.4}},
        {"plateau_max",
         {.lr = 0.4, .largest = 1, .patience = -1, .factor = 0.5, .cooldown = 2, .lr_min = 0.01}},
        {"plateau_absolute",
         {.lr = 0.4, .patience = 2, .threshold = 0.2, .absolute = 1, .factor = 0.3}},
        {"plateau_exact",
         {.lr = 0.4, .largest = 1, .patience = 1, .threshold = TSH_ZERO, .absolute = 1}},
    };
    int i, t;
    (void)state;
    for (i = 0; i < COUNT(rows); i++) {
        tsh_plateau p = rows[i].p;
        for (t = 0; t < 60; t++) {
            const double want = golden_value(rows[i].name, "rates", t);
            const double got = tsh_plateau_step(&p, 2.0 / (1 + t % 23) + 0.1 * sin(t));
            if (!(fabs(got - want) <= 1e-12) || got != p.lr)
                fail_msg("%s: call %d gives %.17g, not %.17g", rows[i].name, t, got, want);
        }
    }
    assert_true(tsh_plateau_step(NULL, 1) == 0);
}

/* A schedule in the optimiser: each step has its rate, groups keep their ratio, and it goes on
 * after loading. */
static int steps_by_schedule(tsh_ctx *ctx, void *user) {
    const tsh_schedule s = {.kind = TSH_LINEAR, .warmup = 2, .total = 10};
    const tsh_optim_desc desc = {.kind = TSH_SGD, .lr = 0.5, .schedule = &s};
    const tsh_optim_desc group = {.kind = TSH_SGD, .lr = 0.125};
    tsh_schedule full = s;
    char path[2 * FILES_SIZE];
    tsh_optim *optim, *again;
    int i;
    (void)user;
    full.lr = 0.5;
    (void)snprintf(path, sizeof path, "%s", files_path("schedule"));
    if (make_net(ctx, TSH_REAL)) return 1;
    optim = tsh_optim_new(tsh_root(ctx), &desc);
    CHECK(tsh_optim_state(optim).lr == 0.25, "the first rate is %g", tsh_optim_state(optim).lr);
    CHECK(tsh_optim_group_with(optim, "**.bias", &group) == TSH_OK, "group");
    for (i = 0; i < 4; i++) {
        tsh_real before, after, weight[2];
        tsh_tensor *bias = tsh_param(tsh_root(ctx), "a.bias");
        before = *(tsh_real *)tsh_data(ctx, bias);
        weight[0] = *(tsh_real *)tsh_data(ctx, tsh_param(tsh_root(ctx), "a.weight"));
        CHECK(step(ctx, optim, i) == TSH_OK, "step");
        after = *(tsh_real *)tsh_data(ctx, bias);
        weight[1] = *(tsh_real *)tsh_data(ctx, tsh_param(tsh_root(ctx), "a.weight"));
        CHECK(tsh_optim_state(optim).lr == tsh_schedule_lr(&full, i), "step %d", i);
        /* the gradients of a.weight[0] and a.bias[0], the 70th element */
        CHECK(fabs((double)(weight[1] - weight[0]) +
                   tsh_schedule_lr(&full, i) * ((double)weight[0] - target(i, 0))) < 1e-6,
              "weight");
        CHECK(fabs((double)(after - before) +
                   0.25 * tsh_schedule_lr(&full, i) * ((double)before - target(i, 70))) < 1e-6,
              "bias");
    }
    CHECK(tsh_save(tsh_root(ctx), path, optim) == TSH_OK, "save");
    tsh_optim_free(optim);
    again = tsh_optim_new(tsh_root(ctx), &desc);
    CHECK(tsh_optim_group_with(again, "**.bias", &group) == TSH_OK, "group");
    CHECK(tsh_load(tsh_root(ctx), path, again) == TSH_OK, "load");
    CHECK(step(ctx, again, 4) == TSH_OK && tsh_optim_state(again).lr == tsh_schedule_lr(&full, 4),
          "it goes on");
    return 0;
}

static void schedules_drive_optimisers(void **state) {
    (void)state;
    ranks_run(1, steps_by_schedule, NULL);
}

/* ---------------------------------------------------------------------------- averages */

typedef struct averaging {
    const char *name;
    double decay;
    int zero, loads, again;
    tsh_dtype dtype;
    char path[2 * FILES_SIZE];
} averaging;

static int averages(tsh_ctx *ctx, void *user) {
    const averaging *a = (const averaging *)user;
    const tsh_optim_desc desc = {
        .kind = TSH_ADAMW, .lr = 0.05, .weight_decay = 0.1, .zero = a->zero};
    const tsh_plan_rule other[] = {{.path = "a", .style = TSH_ROWWISE},
                                   {.path = "b", .style = TSH_COLWISE}};
    const double most = a->dtype == TSH_BF16 ? 2e-2 : sizeof(tsh_real) == 8 ? 1e-12 : 2e-5;
    tsh_file_desc file = {0};
    tsh_real before[N], got[N], after[N];
    tsh_optim *optim;
    int s = 1, i;
    if (make_net(ctx, a->dtype)) return 1;
    optim = tsh_optim_new(tsh_root(ctx), &desc);
    file.ema = tsh_ema_new(tsh_root(ctx), a->decay);
    if (a->loads) {
        CHECK(tsh_load_with(tsh_root(ctx), a->path, optim, &file) == TSH_OK, "load");
        CHECK(tsh_ema_updates(file.ema) == 10, "10 updates");
        s = 11;
    }
    for (; s <= 20; s++) {
        CHECK(step(ctx, optim, s) == TSH_OK && tsh_ema_update(file.ema) == TSH_OK, "step %d", s);
        if (s == 10 && !a->loads)
            CHECK(tsh_save_with(tsh_root(ctx), a->path, optim, &file) == TSH_OK, "save");
        if (s == 15 && a->again)
            CHECK(tsh_parallelize(tsh_root(ctx), other, COUNT(other)) == TSH_OK, "laid anew");
    }
    if (read_all(ctx, before)) return 1;
    CHECK(tsh_ema_swap(file.ema) == TSH_OK, "swap in");
    if (read_all(ctx, got)) return 1;
    for (i = 0; i < N; i++) {
        const double want = golden_value(a->name, "average", i);
        CHECK(fabs((double)got[i] - want) <= most * (1 + fabs(want)), "%s: %d is %.17g, not %.17g",
              a->name, i, (double)got[i], want);
    }
    CHECK(tsh_check_replicas(tsh_root(ctx)) == 1, "replicas");
    tsh_step_end(ctx);
    CHECK(tsh_ema_swap(file.ema) == TSH_OK, "swap out");
    if (read_all(ctx, after)) return 1;
    CHECK(memcmp(before, after, sizeof after) == 0, "the weights are back");
    CHECK(memcmp(before, got, sizeof got) != 0, "averages differ from weights");
    tsh_step_end(ctx);
    CHECK(step(ctx, optim, 21) == TSH_OK && tsh_ema_update(file.ema) == TSH_OK, "it goes on");
    return 0;
}

static void averages_are_pytorchs(void **state) {
    static const averaging rows[] = {{.name = "ema", .decay = 0.9, .dtype = TSH_F32},
                                     {.name = "ema_usual", .dtype = TSH_F32},
                                     {.name = "ema_low", .decay = 0.3, .dtype = TSH_F32},
                                     {.name = "ema", .decay = 0.9, .dtype = TSH_BF16}};
    static const int ways[][4] = {{1, 1, 0, 0}, {2, 2, 0, 0}, {3, 3, 0, 1}, {8, 8, 0, 1},
                                  {4, 2, 1, 0}, {4, 2, 1, 1}, {1, 1, 0, 1}};
    int i, w;
    (void)state;
    for (i = 0; i < COUNT(rows); i++)
        for (w = 0; w < COUNT(ways); w++) {
            const tsh_desc desc = {.tp = ways[w][1]};
            averaging a = rows[i];
            if (a.dtype == TSH_F32) a.dtype = TSH_REAL;
            a.zero = ways[w][2];
            a.loads = ways[w][3];
            a.again = w == 1 || w == 3;
            (void)snprintf(a.path, sizeof a.path, "%s/ema%d", files_here, i);
            ranks_run_with(ways[w][0], &desc, averages, &a);
        }
}

/* An average of bf16 weights follows the exact floats: its steps are below a bf16's last bit. */
static int averages_exactly(tsh_ctx *ctx, void *user) {
    const tsh_linear_desc one_by_one = {.in = 1, .out = 1, .bias = TSH_NO};
    const tsh_optim_desc sgd = {.kind = TSH_SGD, .lr = 1e-4};
    tsh_module *layer = tsh_add_linear(tsh_root(ctx), "l", &one_by_one);
    tsh_tensor *w = tsh_param(layer, "weight");
    files_bytes bytes;
    float got; /* the average */
    tsh_optim *optim;
    tsh_ema *ema;
    tsh_real value = 1;
    double x = 1, average = 0;
    int s;
    (void)user;
    CHECK(tsh_write(ctx, w, TSH_GLOBAL, &value, sizeof value) == TSH_OK, "write");
    CHECK(tsh_to(tsh_root(ctx), TSH_BF16) == TSH_OK, "to");
    optim = tsh_optim_new(tsh_root(ctx), &sgd);
    ema = tsh_ema_new(layer, 0.5);
    for (s = 0; s < 8; s++) {
        CHECK(tsh_backward(ctx, tsh_sum(tsh_cast(w, TSH_REAL), TSH_ALL, 0)) == TSH_OK, "backward");
        CHECK(tsh_optim_step(optim) == TSH_OK && tsh_ema_update(ema) == TSH_OK, "step");
        tsh_zero_grads(tsh_root(ctx));
        tsh_step_end(ctx);
        x = (double)(float)(x - 1e-4);
        average = s ? 0.5 * average + 0.5 * x : x;
    }
    /* with an optimiser, a bf16 parameter has an exact float weight, which tsh_save writes: the
     * last four bytes */
    CHECK(tsh_ema_swap(ema) == TSH_OK, "swap");
    CHECK(tsh_save(tsh_root(ctx), files_path("exact"), NULL) == TSH_OK, "save");
    bytes = files_read("exact");
    memcpy(&got, bytes.at + bytes.size - sizeof got, sizeof got);
    files_free(&bytes);
    CHECK(fabs((double)got - average) < 1e-6, "%.9g, not %.9g", (double)got, average);
    CHECK(average < 1 - 4e-4 && average > 1 - 8e-4, "%g", average);
    return 0;
}

static void averages_of_bf16_are_exact(void **state) {
    (void)state;
    ranks_run(1, averages_exactly, NULL);
}

/* --------------------------------------------------------------------------- refusals */

static int refuses(tsh_ctx *ctx, void *user) {
    const tsh_optim_desc muon = {.kind = TSH_MUON}, adamw = {.kind = TSH_ADAMW};
    const tsh_schedule none = {.kind = TSH_COSINE, .lr = 1}, cycle = {.kind = TSH_ONE_CYCLE};
    const tsh_schedule stairs = {.kind = TSH_STEP}, decay = {.kind = TSH_EXPONENTIAL};
    const tsh_schedule own = {.kind = TSH_LAMBDA}, wsd = {.kind = TSH_WSD};
    const tsh_schedule warm = {.kind = TSH_ONE_CYCLE, .total = 9, .warmup = 1};
    const tsh_schedule wild = {.kind = TSH_LAMBDA, .factor = endless};
    const tsh_schedule odd = {.kind = (tsh_schedule_kind)77};
    tsh_optim_desc d = adamw, clips = adamw;
    tsh_file_desc file = {0};
    tsh_module *root = tsh_root(ctx);
    tsh_optim *optim;
    tsh_ema *ema, *other;
    char path[2 * FILES_SIZE];
    (void)user;
    (void)snprintf(path, sizeof path, "%s", files_path("refused"));
    if (make_net(ctx, TSH_REAL)) return 1;
    optim = tsh_optim_new(root, &muon);
    give(ctx, 1);
    CHECK(tsh_optim_step(optim) == TSH_ERR_SHAPE, "a vector");
    CHECK_SAYS(TSH_ERR_SHAPE, "Muon is for parameters of two dimensions, but \"a.bias\" is (7)");
    clips.clip_norm = 1;
    (void)tsh_optim_group_with(optim, "**", &clips);
    CHECK_SAYS(TSH_ERR_ARGUMENT, ".schedule are those of the optimiser");
    (void)tsh_optim_group_with(optim, "nothing", &adamw);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "\"nothing\" matches none of the 4 parameters");
    (void)tsh_optim_group_with(optim, "**", NULL);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "desc is NULL");
    tsh_optim_free(optim);
    optim = tsh_optim_new(root, &adamw);
    CHECK(step(ctx, optim, 1) == TSH_OK, "step");
    (void)tsh_optim_group_with(optim, "*.weight", &muon);
    CHECK_SAYS(TSH_ERR_STATE, "\"a.weight\" has been updated by adamw");
    tsh_optim_set_lr(optim, tsh_schedule_lr(&none, 3));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "COSINE, ONE_CYCLE and WSD need .total");
    tsh_optim_set_lr(optim, -1);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "may not be below 0");
    tsh_optim_set_lr(optim, 0);
    (void)tsh_optim_group_with(optim, "*.weight", &muon);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "learning rate is 0");
    d.schedule = &none;
    CHECK_TRUE(!tsh_optim_new(root, &d));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "the schedule (kind TSH_COSINE) needs .total");
    d.schedule = &cycle;
    CHECK_TRUE(!tsh_optim_new(root, &d) && isnan(tsh_schedule_lr(&cycle, 0)));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "TSH_ONE_CYCLE) needs .total");
    d.schedule = &warm;
    CHECK_TRUE(!tsh_optim_new(root, &d));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "has its own warm-up");
    d.schedule = &wsd;
    CHECK_TRUE(!tsh_optim_new(root, &d));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "TSH_WSD) needs .total");
    d.schedule = &stairs;
    CHECK_TRUE(!tsh_optim_new(root, &d));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "TSH_STEP) needs .period");
    d.schedule = &decay;
    CHECK_TRUE(!tsh_optim_new(root, &d));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "needs .gamma");
    d.schedule = &own;
    CHECK_TRUE(!tsh_optim_new(root, &d));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "needs .factor");
    d.schedule = &odd;
    CHECK_TRUE(!tsh_optim_new(root, &d));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "kind unknown");
    tsh_optim_free(optim);
    d.schedule = &wild;
    optim = tsh_optim_new(root, &d);
    give(ctx, 1);
    CHECK(tsh_optim_step(optim) == TSH_ERR_ARGUMENT, "an infinite rate");
    CHECK_SAYS(TSH_ERR_ARGUMENT, "the learning rate is inf");
    d = adamw;
    d.kind = TSH_CUSTOM;
    CHECK_TRUE(!tsh_optim_new(root, &d));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "TSH_CUSTOM with 0 moments and no .custom.update");
    d = muon;
    d.beta2_decay = 1;
    CHECK_TRUE(!tsh_optim_new(root, &d));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "beta2_decay 1");
    tsh_optim_free(optim);
    tsh_step_end(ctx);

    CHECK_TRUE(!tsh_ema_new(root, 1.5));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "decay is 1.5");
    CHECK_TRUE(!tsh_ema_new(NULL, 0.5) && tsh_ema_update(NULL) == TSH_ERR_ARGUMENT);
    ema = tsh_ema_new(root, 0.5);
    (void)tsh_ema_swap(ema);
    CHECK_SAYS(TSH_ERR_STATE, "there are no averages yet");
    CHECK_TRUE(tsh_save(root, path, NULL) == TSH_OK);
    file.ema = ema;
    (void)tsh_load_with(root, path, NULL, &file);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "holds no averages of weights");
    CHECK_TRUE(tsh_ema_update(ema) == TSH_OK && tsh_save_with(root, path, NULL, &file) == TSH_OK);
    CHECK(tsh_load(root, path, NULL) == TSH_OK, "averages are skipped");
    file.ema = other = tsh_ema_new(tsh_find(root, "a"), 0);
    (void)tsh_save_with(root, path, NULL, &file);
    CHECK_SAYS(TSH_ERR_ARGUMENT, ".ema has the averages of another module, \"a\"");
    CHECK_TRUE(tsh_ema_update(other) == TSH_OK && tsh_ema_swap(ema) == TSH_OK);
    (void)tsh_ema_swap(other);
    CHECK_SAYS(TSH_ERR_STATE, "\"a.weight\" has the values of another tsh_ema");
    (void)tsh_ema_update(ema);
    CHECK_SAYS(TSH_ERR_STATE, "restore the weights first: tsh_ema_swap");
    (void)tsh_load(root, path, NULL);
    CHECK_SAYS(TSH_ERR_STATE, "tsh_load: the parameters");
    optim = tsh_optim_new(root, &adamw);
    give(ctx, 1);
    CHECK(tsh_optim_step(optim) == TSH_ERR_STATE, "a step of averages");
    CHECK_SAYS(TSH_ERR_STATE, "\"a.weight\" has the values of its average");
    (void)tsh_parallelize(root, plan, COUNT(plan));
    CHECK_OK(); /* the plan changes nothing */
    tsh_optim_free(optim);
    tsh_step_end(ctx);
    (void)tsh_to(root, TSH_BF16);
    CHECK_SAYS(TSH_ERR_STATE, "tsh_to: a tsh_ema has \"a.weight\"");
    tsh_ema_free(ema);
    (void)tsh_to(root, TSH_BF16);
    CHECK_SAYS(TSH_ERR_STATE, "tsh_to: a tsh_ema has \"a.weight\""); /* the other one */
    tsh_ema_free(other);
    CHECK(tsh_to(root, TSH_BF16) == TSH_OK, "no average is left");
    return 0;
}

static void what_is_refused(void **state) {
    (void)state;
    ranks_run(1, refuses, NULL);
}

static int begin_all(void **state) {
    golden = golden_open("optimisers");
    return files_begin(state);
}

static int end_all(void **state) {
    golden_finish(&golden);
    return files_end(state);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(optimisers_are_pytorchs), cmocka_unit_test(every_degree_has_the_same_bits),
        cmocka_unit_test(so_has_half_precision),   cmocka_unit_test(bf16_weights_follow),
        cmocka_unit_test(schedules_are_pytorchs),  cmocka_unit_test(wsd_has_three_parts),
        cmocka_unit_test(plateaus_are_pytorchs),   cmocka_unit_test(schedules_drive_optimisers),
        cmocka_unit_test(averages_are_pytorchs),   cmocka_unit_test(averages_of_bf16_are_exact),
        cmocka_unit_test(what_is_refused),
    };
    return cmocka_run_group_tests_name("layer/test_optimisers", tests, begin_all, end_all);
}
