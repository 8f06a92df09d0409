/* Optimisers against their formulas in double, schedules, the global norm at any degree, and steps
 * that are left out. */
/* build: double */
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../support/unit.h"

/* A few roundings of tsh_real per value and step; values are near 1. */
#define ROUNDING (sizeof(tsh_real) == 4 ? 2e-6 : 1e-14)

/* ------------------------------------------------------- gradients at will
 * The loss sum(p c) gives parameter p the gradient c. */

static tsh_tensor *weighed(tsh_ctx *ctx, tsh_tensor *p, const double *c) {
    tsh_tensor *t = tsh_zeros(ctx, tsh_shape_of(p));
    tsh_real *values = (tsh_real *)tsh_data(ctx, t);
    int64_t e;
    for (e = 0; values && e < tsh_numel(t); e++) values[e] = (tsh_real)c[e];
    t = tsh_redistribute(t, tsh_layout_of(p));
    return tsh_full_tensor(tsh_sum(tsh_mul(p, t), TSH_ALL, 0));
}

static void give(tsh_ctx *ctx, tsh_tensor *p, const double *c) {
    tsh_zero_grad(p);
    assert_int_equal(tsh_backward(ctx, weighed(ctx, p, c)), TSH_OK);
    assert_int_equal(tsh_step_end(ctx), TSH_OK);
}

/* A module with parameters "weight" and "bias" of N numbers each. */
enum { N = 43, STEPS = 4 };

static tsh_module *vectors(tsh_ctx *ctx) {
    tsh_layer_norm_desc d = {.dim = N};
    return tsh_add_layer_norm(tsh_root(ctx), "v", &d);
}

static double gradient(int step, int e) {
    return sin(1.0 + step * 11 + e);
}

/* One parameter's values by the formulas of torch.optim, in double. */
typedef struct reference {
    double x[N], m[N], v[N];
    int steps;
} reference;

/* An option of which 0 means the default, and TSH_ZERO 0. */
static double option(double given, double usual) {
    return given > 0 ? given : given < 0 ? 0 : usual;
}

static void reference_step(reference *r, const tsh_optim_desc *d, const double *g_of, double lr,
                           double decay) {
    double b1 = option(d->beta1, 0.9), b2 = option(d->beta2, 0.999), eps = option(d->eps, 1e-8);
    int e;
    r->steps++;
    for (e = 0; e < N; e++) {
        double g = g_of[e] + (d->kind == TSH_ADAMW ? 0 : decay * r->x[e]);
        if (d->kind == TSH_SGD) {
            r->m[e] = r->steps == 1 ? g : d->momentum * r->m[e] + g;
            if (d->momentum > 0) g = d->nesterov ? g + d->momentum * r->m[e] : r->m[e];
            r->x[e] -= lr * g;
            continue;
        }
        if (d->kind == TSH_ADAMW) r->x[e] *= 1 - lr * decay;
        r->m[e] = b1 * r->m[e] + (1 - b1) * g;
        r->v[e] = b2 * r->v[e] + (1 - b2) * g * g;
        r->x[e] -= lr * (r->m[e] / (1 - pow(b1, r->steps))) /
                   (sqrt(r->v[e] / (1 - pow(b2, r->steps))) + eps);
    }
}

static void expect_values(tsh_ctx *ctx, tsh_tensor *t, const double *want, double tolerance) {
    const tsh_real *got = (const tsh_real *)tsh_data(ctx, t);
    int e;
    assert_non_null(got);
    for (e = 0; e < N; e++) EXPECT_NEAR((double)got[e], want[e], tolerance);
}

static void optimisers_follow_their_formulas(void **state) {
    static const tsh_optim_desc descs[] = {
        {.kind = TSH_SGD, .lr = 0.1},
        {.kind = TSH_SGD, .lr = 0.1, .weight_decay = 0.3},
        {.kind = TSH_SGD, .lr = 0.1, .momentum = 0.9},
        {.kind = TSH_SGD, .lr = 0.1, .momentum = 0.9, .nesterov = 1, .weight_decay = 0.01},
        {.kind = TSH_ADAM}, /* lr 1e-3, betas 0.9 and 0.999, eps 1e-8 */
        {.kind = TSH_ADAM, .lr = 0.05, .weight_decay = 0.2},
        {.kind = TSH_ADAM, .lr = 0.05, .beta1 = 0.5, .beta2 = 0.75, .eps = 0.1},
        {.kind = TSH_ADAMW, .lr = 0.05},
        {.kind = TSH_ADAMW, .lr = 0.05, .weight_decay = 0.2, .beta1 = 0.8},
        {.kind = TSH_ADAM, .lr = 0.05, .beta1 = TSH_ZERO},
        {.kind = TSH_ADAM, .lr = 0.05, .beta2 = TSH_ZERO, .eps = 0.1},
        {.kind = TSH_ADAMW, .lr = 0.05, .eps = TSH_ZERO, .weight_decay = 0.1},
        {.kind = TSH_ADAM, .lr = 0.05, .beta1 = TSH_ZERO, .beta2 = TSH_ZERO, .eps = TSH_ZERO},
        {.kind = TSH_SGD, .lr = TSH_ZERO, .momentum = 0.9},
        {.kind = TSH_ADAMW, .lr = TSH_ZERO, .weight_decay = 0.1},
    };
    int i, s, e;
    (void)state;
    for (i = 0; i < COUNT(descs); i++) {
        tsh_ctx *ctx = unit_open(NULL);
        tsh_module *module = vectors(ctx);
        tsh_optim *optim = tsh_optim_new(module, &descs[i]);
        tsh_tensor *weight = tsh_param(module, "weight");
        reference r;
        memset(&r, 0, sizeof r);
        for (e = 0; e < N; e++) r.x[e] = 1; /* layer norm's */
        for (s = 0; s < STEPS; s++) {
            double g[N];
            for (e = 0; e < N; e++) g[e] = (double)(tsh_real)gradient(s, e);
            give(ctx, weight, g);
            assert_int_equal(tsh_optim_step(optim), TSH_OK);
            reference_step(&r, &descs[i], g, option(descs[i].lr, 1e-3), descs[i].weight_decay);
            expect_values(ctx, weight, r.x, ROUNDING);
        }
        unit_close(ctx);
    }
}

static void the_usual_optimiser_is_sgd(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_module *module = vectors(ctx);
    tsh_optim *optim = tsh_optim_new(module, NULL);
    double g[N], want[N];
    int e;
    (void)state;
    for (e = 0; e < N; e++) want[e] = 1 - 1e-3 * (g[e] = e);
    give(ctx, tsh_param(module, "weight"), g);
    assert_int_equal(tsh_optim_step(optim), TSH_OK);
    expect_values(ctx, tsh_param(module, "weight"), want, ROUNDING);
    EXPECT_NEAR(tsh_optim_state(optim).lr, 1e-3, 0);
    assert_null(tsh_optim_new(NULL, NULL));
    assert_null(tsh_optim_new(module, &(tsh_optim_desc){.kind = (tsh_optim_kind)99}));
    EXPECT(TSH_ERR_ARGUMENT, "tsh_optim_new: kind 99");
    assert_null(tsh_optim_new(module, &(tsh_optim_desc){.lr = -1}));
    EXPECT(TSH_ERR_ARGUMENT, "lr -1");
    EXPECT_NEAR(tsh_optim_state(tsh_optim_new(module, &(tsh_optim_desc){.lr = TSH_ZERO})).lr, 0, 0);
    assert_null(tsh_optim_new(module, &(tsh_optim_desc){.eps = -1e-8}));
    EXPECT(TSH_ERR_ARGUMENT, "for 0 itself where 0 is the default: TSH_ZERO");
    assert_null(tsh_optim_new(module, &(tsh_optim_desc){.kind = TSH_ADAM, .beta1 = 1}));
    EXPECT(TSH_ERR_ARGUMENT, "betas 1 and 0");
    assert_int_equal(tsh_optim_step(NULL), TSH_ERR_ARGUMENT);
    assert_int_equal(tsh_optim_state(NULL).steps, 0);
    unit_close(ctx);
}

static void parameters_without_a_gradient_stay(void **state) {
    tsh_optim_desc d = {.kind = TSH_ADAMW, .lr = 0.1, .weight_decay = 0.5};
    tsh_ctx *ctx = unit_open(NULL);
    tsh_module *module = vectors(ctx);
    tsh_optim *optim = tsh_optim_new(module, &d);
    tsh_tensor *weight = tsh_param(module, "weight"), *bias = tsh_param(module, "bias");
    double g[N] = {1, 2, 3};
    uint64_t before;
    (void)state;
    (void)tsh_materialize(module);
    before = tsh_hash(ctx, weight);
    give(ctx, bias, g);
    assert_int_equal(tsh_optim_step(optim), TSH_OK);
    assert_true(before == tsh_hash(ctx, weight));
    before = tsh_hash(ctx, bias);
    tsh_zero_grads(module);
    assert_int_equal(tsh_optim_step(optim), TSH_OK);
    assert_true(before == tsh_hash(ctx, bias));
    assert_int_equal(tsh_optim_state(optim).steps, 2);
    unit_close(ctx);
}

/* Adam's bias correction counts a parameter's own steps. */
static void a_late_parameter_starts_at_its_first_step(void **state) {
    tsh_optim_desc d = {.kind = TSH_ADAM, .lr = 0.1};
    tsh_ctx *ctx = unit_open(NULL);
    tsh_module *module = vectors(ctx);
    tsh_optim *optim = tsh_optim_new(module, &d);
    tsh_tensor *weight = tsh_param(module, "weight"), *bias = tsh_param(module, "bias");
    double g[N], want[N];
    int e;
    (void)state;
    for (e = 0; e < N; e++) g[e] = e + 1;
    give(ctx, weight, g);
    assert_int_equal(tsh_optim_step(optim), TSH_OK);
    tsh_zero_grads(module);
    give(ctx, bias, g);
    assert_int_equal(tsh_optim_step(optim), TSH_OK);
    for (e = 0; e < N; e++) want[e] = -0.1 * g[e] / (g[e] + 1e-8); /* a first step */
    expect_values(ctx, bias, want, ROUNDING);
    unit_close(ctx);
}

static void groups_change_rate_and_decay(void **state) {
    tsh_optim_desc d = {.kind = TSH_SGD, .lr = 0.5, .weight_decay = 0.25};
    tsh_ctx *ctx = unit_open(NULL);
    tsh_module *module = vectors(ctx);
    tsh_optim *optim = tsh_optim_new(tsh_root(ctx), &d);
    tsh_tensor *weight = tsh_param(module, "weight"), *bias = tsh_param(module, "bias");
    double g[N], want_weight[N], want_bias[N];
    int e;
    (void)state;
    assert_int_equal(tsh_optim_group(optim, "**", 8, 8), TSH_OK);
    assert_int_equal(tsh_optim_group(optim, "v.bias", 2, 0), TSH_OK);
    assert_int_equal(tsh_optim_group(optim, "*.w*", 0.5, 4), TSH_OK); /* later groups win */
    assert_int_equal(tsh_optim_group(optim, "bias", 1, 0), TSH_ERR_ARGUMENT);
    EXPECT(TSH_ERR_ARGUMENT, "tsh_optim_group: \"bias\" matches none of the 2 parameters, the "
                             "first of which is \"v.weight\"; * stays within a name, ** is any "
                             "number of names, as in \"**.bias\"");
    for (e = 0; e < N; e++) {
        g[e] = e;
        want_weight[e] = 1 - 0.25 * (e + 4);
        want_bias[e] = -1.0 * e;
    }
    give(ctx, weight, g);
    give(ctx, bias, g);
    assert_int_equal(tsh_optim_step(optim), TSH_OK);
    expect_values(ctx, weight, want_weight, 0);
    expect_values(ctx, bias, want_bias, 0);
    assert_int_equal(tsh_optim_group(NULL, "x", 1, 1), TSH_ERR_ARGUMENT);
    unit_close(ctx);
}

/* Paths of groups are told from the optimiser's module on. */
static void groups_match_below_the_module(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_optim *optim = tsh_optim_new(vectors(ctx), NULL);
    (void)state;
    assert_int_equal(tsh_optim_group(optim, "bias", 1, 0), TSH_OK);
    assert_int_equal(tsh_optim_group(optim, "v.bias", 1, 0), TSH_ERR_ARGUMENT);
    EXPECT(TSH_ERR_ARGUMENT, "tsh_optim_group");
    unit_close(ctx);
}

/* A weight that belongs elsewhere keeps its whole path. */
static void groups_know_tied_weights_by_their_path(void **state) {
    const tsh_embedding_desc table = {.count = 3, .dim = 2};
    const tsh_linear_desc head = {.in = 2, .out = 3, .bias = TSH_NO};
    tsh_ctx *ctx = unit_open(NULL);
    tsh_module *wte = tsh_add_embedding(tsh_root(ctx), "table", &table),
               *part = tsh_add_module(tsh_root(ctx), "ta", NULL);
    tsh_optim *optim;
    (void)state;
    tsh_tie(tsh_add_linear(part, "head", &head), "weight", tsh_param(wte, "weight"));
    optim = tsh_optim_new(part, NULL);
    assert_int_equal(tsh_optim_group(optim, "le.weight", 1, 0), TSH_ERR_ARGUMENT);
    EXPECT(TSH_ERR_ARGUMENT, "tsh_optim_group");
    assert_int_equal(tsh_optim_group(optim, "table.weight", 1, 0), TSH_OK);
    unit_close(ctx);
}

static void the_rate_may_be_set(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_module *module = vectors(ctx);
    tsh_optim *optim = tsh_optim_new(module, NULL);
    tsh_tensor *bias = tsh_param(module, "bias");
    double g[N], want[N];
    int e;
    (void)state;
    for (e = 0; e < N; e++) want[e] = -0.25 * (g[e] = e);
    give(ctx, bias, g);
    tsh_optim_set_lr(optim, 0); /* a schedule may end at 0 */
    assert_int_equal(tsh_optim_step(optim), TSH_OK);
    tsh_optim_set_lr(optim, 0.25);
    assert_int_equal(tsh_optim_step(optim), TSH_OK);
    expect_values(ctx, bias, want, 0);
    EXPECT_NEAR(tsh_optim_state(optim).lr, 0.25, 0);
    tsh_optim_set_lr(NULL, 1);
    unit_close(ctx);
}

/* ----------------------------------------------------------------- schedules */

static void schedules_follow_their_closed_forms(void **state) {
    static const double pi = 3.14159265358979324;
    static const tsh_schedule rows[] = {
        {.lr = 0.5, .lr_min = 0.1},
        {.lr = 0.5, .lr_min = 0.1, .warmup = 4, .total = 20},
        {.kind = TSH_LINEAR, .lr = 0.5, .lr_min = 0.1, .total = 10},
        {.kind = TSH_LINEAR, .lr = 0.5, .warmup = 4, .total = 20},
        {.kind = TSH_COSINE, .lr = 0.5, .lr_min = 0.1, .total = 10},
        {.kind = TSH_COSINE, .lr = 0.5, .warmup = 4, .total = 20},
        {.kind = TSH_COSINE, .lr = 1e-3, .lr_min = 1e-4, .warmup = 1, .total = 2},
        {.kind = TSH_LINEAR, .lr = 0.5, .lr_min = 0.1, .warmup = 5, .total = 5}};
    int i;
    int64_t step;
    (void)state;
    for (i = 0; i < COUNT(rows); i++) {
        const tsh_schedule *s = &rows[i];
        for (step = 0; step < 25; step++) {
            double done = (double)(step - s->warmup) / (double)(s->total - s->warmup), want;
            if (step < s->warmup)
                want = s->lr * (double)(step + 1) / (double)s->warmup;
            else if (s->kind == TSH_CONSTANT)
                want = s->lr;
            else if (step >= s->total)
                want = s->lr_min;
            else if (s->kind == TSH_LINEAR)
                want = s->lr * (1 - done) + s->lr_min * done;
            else
                want = s->lr_min + (s->lr - s->lr_min) * (1 + cos(pi * done)) / 2;
            EXPECT_NEAR(tsh_schedule_lr(s, step), want, 1e-15);
        }
    }
    EXPECT_NEAR(tsh_schedule_lr(&rows[3], 0), 0.125, 0); /* lr / warmup */
    EXPECT_NEAR(tsh_schedule_lr(&rows[3], 3), 0.5, 0);   /* lr at the end of the warm-up */
    EXPECT_NEAR(tsh_schedule_lr(&rows[3], 12), 0.25, 0); /* half way */
    EXPECT_NEAR(tsh_schedule_lr(&rows[5], 12), 0.25, 1e-16);
    EXPECT_NEAR(tsh_schedule_lr(&rows[5], 20), 0, 0);
}

/* ---------------------------------------------------------- the global norm */

/* A tied vocabulary, column and row layers of uneven sizes, replicated vectors. */
static tsh_module *mixed(tsh_ctx *ctx) {
    static const tsh_plan_rule plan[] = {
        {.path = "wte", .style = TSH_ROWWISE},
        {.path = "head", .style = TSH_COLWISE},
        {.path = "up", .style = TSH_COLWISE, .segments = 3, .unit = 1},
        {.path = "down", .style = TSH_ROWWISE, .unit = 3}};
    tsh_embedding_desc wte = {.count = 7, .dim = 6};
    tsh_layer_norm_desc ln = {.dim = 6};
    tsh_linear_desc up = {.in = 6, .out = 9}, down = {.in = 9, .out = 6},
                    head = {.in = 6, .out = 7, .bias = TSH_NO};
    tsh_module *root = tsh_root(ctx);
    (void)tsh_add_embedding(root, "wte", &wte);
    (void)tsh_add_layer_norm(root, "ln", &ln);
    (void)tsh_add_linear(root, "up", &up);
    (void)tsh_add_linear(root, "down", &down);
    (void)tsh_tie(tsh_add_linear(root, "head", &head), "weight", tsh_param(root, "wte.weight"));
    (void)tsh_parallelize(root, plan, COUNT(plan));
    return root;
}

enum { PARAMS = 7, NUMEL = 54 };

typedef struct filling {
    tsh_ctx *ctx;
    tsh_tensor *loss, *param[PARAMS];
    double c[PARAMS][NUMEL], squares, factor;
    int count;
} filling;

static void fill(const char *path, tsh_tensor *param, void *user) {
    filling *f = (filling *)user;
    int64_t e, n = tsh_numel(param);
    double *c = f->c[f->count];
    (void)path;
    for (e = 0; e < n; e++) {
        c[e] = f->factor * ranks_number((uint64_t)f->count + 1, (uint64_t)e);
        f->squares += c[e] * c[e];
    }
    f->param[f->count++] = param;
    f->loss = f->loss ? tsh_add(f->loss, weighed(f->ctx, param, c)) : weighed(f->ctx, param, c);
}

/* Gives every parameter below root a gradient of small integers. */
static void fill_all(tsh_ctx *ctx, tsh_module *root, double factor, filling *f) {
    memset(f, 0, sizeof *f);
    f->ctx = ctx;
    f->factor = factor;
    tsh_zero_grads(root);
    tsh_each_param(root, fill, f);
    (void)tsh_backward(ctx, f->loss);
}

static int clips_exactly(tsh_ctx *ctx, void *user) {
    tsh_module *root = mixed(ctx);
    filling f;
    double norm = 0, most, *got;
    int k, i;
    int64_t e;
    (void)user;
    for (k = 0; k < 3; k++) {
        fill_all(ctx, root, 1, &f);
        CHECK(f.count == PARAMS, "%d parameters", f.count); /* the tied one counts once */
        most = k == 0 ? 1e6 : k == 1 ? 2.5 : 0;             /* no need; clipped; zeroed */
        CHECK(tsh_clip_grad_norm(root, most, k == 2 ? NULL : &norm) == TSH_OK, "clip");
        CHECK(norm == sqrt(f.squares), "the norm is %.17g, not %.17g", norm, sqrt(f.squares));
        for (i = 0; i < f.count; i++) {
            double factor = k == 0 ? 1 : most / (norm + 1e-6);
            got = ranks_values(ctx, tsh_grad(f.param[i]));
            CHECK(got, "parameter %d has a gradient", i);
            for (e = 0; e < tsh_numel(f.param[i]); e++)
                if (fabs(got[e] - f.c[i][e] * factor) > (k == 1 ? ROUNDING : 0)) break;
            CHECK(e == tsh_numel(f.param[i]), "clip to %g: parameter %d, element %d is %.9g", most,
                  i, (int)e, got[e]);
            free(got);
        }
        (void)tsh_step_end(ctx);
    }
    CHECK_OK();
    return 0;
}

static void clipping_is_exact_at_every_degree(void **state) {
    int ranks;
    (void)state;
    for (ranks = 1; ranks <= 4; ranks++) ranks_run(ranks, clips_exactly, NULL);
}

/* Pipeline stages hold different parameters: stage 1's gradients are twice stage 0's. */
static int counts_all_stages(tsh_ctx *ctx, void *user) {
    tsh_module *root = mixed(ctx);
    tsh_optim_desc d = {.lr = 0.5, .clip_norm = 1};
    tsh_optim *optim = tsh_optim_new(root, &d);
    filling f;
    double norm, one;
    (void)user;
    fill_all(ctx, root, 1 + tsh_pp(ctx)->rank, &f);
    one = f.squares / (tsh_pp(ctx)->rank ? 4 : 1);
    CHECK(tsh_optim_step(optim) == TSH_OK, "step");
    CHECK(tsh_optim_state(optim).norm == sqrt(5 * one), "%.17g", tsh_optim_state(optim).norm);
    CHECK(tsh_clip_grad_norm(root, 1e9, &norm) == TSH_OK && norm == sqrt(5 * one),
          "the step left gradients alone: %.17g", norm);
    CHECK_OK();
    return 0;
}

static void the_norm_spans_pipeline_stages(void **state) {
    tsh_desc desc = {.tp = 2, .pp = 2};
    (void)state;
    ranks_run_with(4, &desc, counts_all_stages, NULL);
}

static void a_step_clips_first(void **state) {
    tsh_optim_desc d = {.lr = 0.5, .clip_norm = 2};
    tsh_ctx *ctx = unit_open(NULL);
    tsh_module *module = vectors(ctx);
    tsh_optim *optim = tsh_optim_new(module, &d);
    tsh_tensor *bias = tsh_param(module, "bias");
    double g[N] = {3, 0, 4}, want[N] = {0};
    (void)state;
    want[0] = -0.5 * 3 * (2 / (5 + 1e-6));
    want[2] = -0.5 * 4 * (2 / (5 + 1e-6));
    give(ctx, bias, g);
    assert_int_equal(tsh_optim_step(optim), TSH_OK);
    expect_values(ctx, bias, want, ROUNDING);
    EXPECT_NEAR(tsh_optim_state(optim).norm, 5, 0);
    unit_close(ctx);
}

/* Training at any degree: the same numbers up to the rounding of a norm. */
typedef struct outcome {
    double values[PARAMS][NUMEL];
    int steps;
} outcome;

static int trains(tsh_ctx *ctx, void *user) {
    outcome *out = (outcome *)user, mine;
    tsh_module *root = mixed(ctx);
    tsh_optim_desc d = {.kind = TSH_ADAMW, .lr = 0.1, .weight_decay = 0.1, .clip_norm = 1};
    tsh_optim *optim = tsh_optim_new(root, &d);
    filling f;
    int i, k;
    memset(&mine, 0, sizeof mine);
    for (k = 0; k < STEPS; k++) {
        fill_all(ctx, root, k + 1, &f);
        CHECK(tsh_optim_step(optim) == TSH_OK, "step");
        CHECK(tsh_step_end(ctx) == TSH_OK, "end");
    }
    mine.steps = (int)tsh_optim_state(optim).steps;
    for (i = 0; i < f.count; i++) {
        double *got = ranks_values(ctx, f.param[i]);
        CHECK(got, "values");
        memcpy(mine.values[i], got, (size_t)tsh_numel(f.param[i]) * sizeof *got);
        free(got);
    }
    CHECK(tsh_check_replicas(root), "replicas");
    if (tsh_world(ctx)->rank == 0) *out = mine;
    CHECK_OK();
    return 0;
}

static void steps_are_the_same_at_every_degree(void **state) {
    static outcome dense, sharded;
    int ranks;
    (void)state;
    ranks_run(1, trains, &dense);
    assert_int_equal(dense.steps, STEPS);
    assert_true(dense.values[0][0] > 0 || dense.values[0][0] < 0);
    for (ranks = 2; ranks <= 4; ranks++) {
        ranks_run(ranks, trains, &sharded);
        assert_memory_equal(&sharded, &dense, sizeof dense); /* sums of squares are exact */
    }
}

/* ------------------------------------------------------- steps left out */

typedef struct poison {
    int rank, axis; /* the rank of tp (0), pp (1) or dp (2) whose gradient is spoilt */
    double value;
} poison;

static void hash_one(const char *path, tsh_tensor *param, void *user) {
    uint64_t *hash = (uint64_t *)user;
    (void)path;
    *hash += tshi_hash_part(param); /* this rank's piece */
}

static uint64_t hash_all(tsh_module *root) {
    uint64_t hash = 0;
    tsh_each_param(root, hash_one, &hash);
    return hash;
}

/* The bias of "up" is sharded in 3 segments of 3: elements 0, 1, 2 lie on ranks 0, 1, 2 of 3. The
 * poison goes to an element of one rank's shard. */
static int skips(tsh_ctx *ctx, void *user) {
    const poison *p = (const poison *)user;
    tsh_module *root = mixed(ctx);
    tsh_optim_desc d = {.kind = TSH_ADAM, .lr = 0.5};
    tsh_optim *optim = tsh_optim_new(root, &d);
    tsh_comm *axis = p->axis == 0 ? tsh_tp(ctx) : p->axis == 1 ? tsh_pp(ctx) : tsh_dp(ctx);
    double c[9] = {1, 1, 1, 1, 1, 1, 1, 1, 1};
    filling f;
    uint64_t before;
    tsh_tensor *bias = tsh_param(root, "up.bias");
    fill_all(ctx, root, 1, &f);
    CHECK(tsh_optim_step(optim) == TSH_OK, "a good step");
    before = hash_all(root);
    fill_all(ctx, root, 1, &f);
    if (p->axis == 0) c[p->rank == axis->size - 1 ? 2 : 0] = p->value;
    if (p->axis && p->rank == axis->rank) c[4] = p->value;
    (void)tsh_backward(ctx, weighed(ctx, bias, c));
    CHECK(tsh_optim_step(optim) == TSH_OK, "a step left out is no error");
    CHECK(tsh_optim_state(optim).steps == 1 && tsh_optim_state(optim).skipped == 1, "counts");
    CHECK(!(tsh_optim_state(optim).norm < 1e300), "the norm tells: %g",
          tsh_optim_state(optim).norm);
    CHECK(hash_all(root) == before, "nothing changes on rank %d", axis->rank);
    fill_all(ctx, root, 1, &f);
    CHECK(tsh_optim_step(optim) == TSH_OK, "a good step");
    CHECK(tsh_optim_state(optim).steps == 2 && tsh_optim_state(optim).skipped == 1, "counts");
    CHECK(hash_all(root) != before, "it goes on");
    CHECK_OK();
    return 0;
}

static void a_gradient_that_is_not_finite_skips_every_rank(void **state) {
    static const double values[] = {(double)INFINITY, -(double)INFINITY, (double)NAN};
    static const tsh_desc descs[] = {{.tp = 3}, {.tp = 2, .pp = 2}, {.tp = 2}};
    int axis, rank, v;
    (void)state;
    for (axis = 0; axis < 3; axis++)
        for (rank = 0; rank < (axis ? 2 : 3); rank += axis ? 1 : 2)
            for (v = 0; v < COUNT(values); v++) {
                poison p;
                p.axis = axis;
                p.rank = rank;
                p.value = values[v];
                ranks_run_with(axis ? 4 : 3, &descs[axis], skips, &p);
            }
}

static void count_line(const char *message, void *user) {
    if (strstr(message, "tsh_optim_step")) ++*(int *)user;
}

static void a_skipped_step_is_logged(void **state) {
    int lines = 0;
    tsh_desc desc = {.logger = {count_line, &lines}};
    tsh_ctx *ctx = unit_open(&desc);
    tsh_module *module = vectors(ctx);
    tsh_optim *optim = tsh_optim_new(module, NULL);
    double g[N] = {1};
    (void)state;
    give(ctx, tsh_param(module, "bias"), g);
    assert_int_equal(tsh_optim_step(optim), TSH_OK);
    assert_int_equal(lines, 0);
    g[3] = (double)NAN;
    give(ctx, tsh_param(module, "bias"), g);
    assert_int_equal(tsh_optim_step(optim), TSH_OK);
    assert_int_equal(lines, 1);
    unit_close(ctx);
}

/* ------------------------------------------------------- pending gradients */

/* What is done with pending gradients: 0 step, 1 clip, 2 read. The error may come from a peer that
 * was faster. */
static int uses_pending(tsh_ctx *ctx, void *user) {
    tsh_backward_desc defer = {.defer = 1};
    tsh_linear_desc d = {.in = 2, .out = 4, .style = TSH_COLWISE};
    tsh_layer_norm_desc n = {.dim = 2};
    tsh_module *root = tsh_root(ctx), *ln = tsh_add_layer_norm(root, "ln", &n);
    tsh_optim *optim;
    int what = *(const int *)user;
    tsh_layout rows = tsh_sharded(0);
    tsh_tensor *x;
    (void)tsh_barrier(tsh_world(ctx)); /* nobody fails before all ranks are open */
    (void)tsh_add_linear(root, "up", &d);
    optim = tsh_optim_new(root, NULL);
    x = tsh_redistribute(tsh_ones(ctx, tsh_shape2(4, 2)), rows); /* so ln's are partial sums */
    (void)tsh_backward_with(ctx, tsh_full_tensor(tsh_sum(tsh_forward(ln, x), TSH_ALL, 0)), &defer);
    if (what == 0) CHECK(tsh_optim_step(optim) != TSH_OK, "step");
    if (what == 1) CHECK(tsh_clip_grad_norm(root, 1, NULL) != TSH_OK, "clip");
    if (what == 2) CHECK(!tsh_grad(tsh_param(ln, "bias")), "read");
    CHECK(tsh_last_error(ctx)->code == TSH_ERR_STATE, "the code");
    CHECK(strstr(tsh_last_error(ctx)->message, "tsh_sync_grads"), "the way out");
    return 0;
}

static int syncs_pending(tsh_ctx *ctx, void *user) {
    tsh_backward_desc defer = {.defer = 1};
    tsh_layer_norm_desc n = {.dim = 2};
    tsh_module *ln = tsh_add_layer_norm(tsh_root(ctx), "ln", &n);
    tsh_optim_desc d = {.lr = 1};
    tsh_optim *optim = tsh_optim_new(ln, &d);
    tsh_tensor *x;
    const tsh_real *bias;
    int k;
    (void)user;
    for (k = 0; k < 3; k++) { /* micro-batches: 4 rows, of dp rank r weighed r + 1 */
        x = tsh_redistribute(tsh_ones(ctx, tsh_shape2(4, 2)), tsh_sharded(0));
        x = tsh_scale(tsh_forward(ln, x), 1 + tsh_dp(ctx)->rank);
        CHECK(tsh_backward_with(ctx, tsh_full_tensor(tsh_sum(x, TSH_ALL, 0)), &defer) == TSH_OK,
              "");
    }
    CHECK(tsh_sync_grads(ctx) == TSH_OK, "sync");
    CHECK(tsh_optim_step(optim) == TSH_OK, "step");
    bias = (const tsh_real *)tsh_data(ctx, tsh_param(ln, "bias"));
    CHECK(bias && bias[0] == -12 * (tsh_real)(tsh_dp(ctx)->size + 1) / 2, "%g", (double)bias[0]);
    CHECK_OK();
    return 0;
}

static void pending_gradients_are_an_error(void **state) {
    static const tsh_desc descs[] = {{.tp = 2}, {.tp = 1}, {.tp = 2}};
    static const int ranks[] = {2, 2, 4};
    int i, what;
    (void)state;
    for (i = 0; i < COUNT(descs); i++) {
        for (what = 0; what < 3; what++) ranks_run_with(ranks[i], &descs[i], uses_pending, &what);
        ranks_run_with(ranks[i], &descs[i], syncs_pending, NULL);
    }
    ranks_run(1, syncs_pending, NULL); /* at one rank nothing is pending */
}

/* ------------------------------------------------------------ exact weights of bf16 parameters */

/* Halves of a float: the value is rounded to the nearest, and both give all bits back. */
static void floats_are_split_in_halves(void **state) {
    uint32_t bits = 0, i;
    (void)state;
    for (i = 0; i < 3000000; i++) {
        uint16_t value, low;
        tsh_real back;
        float x, near;
        bits = i < 0x20000 ? i << 15 : bits * 1664525u + 1013904223u; /* all values and middles */
        x = tshi_dtype_float_of(bits);
        tshi_tensor_split((tsh_real)x, &value, &low);
        back = tshi_tensor_join(value, low);
        near = (float)tshi_dtype_from_bf16(value);
        if (x != x) {
            assert_true(back != back && near != near);
            continue;
        }
        if (tshi_dtype_float_bits((float)back) != bits)
            fail_msg("%08x comes back as %08x", bits, tshi_dtype_float_bits((float)back));
        if (value == tshi_dtype_to_bf16((tsh_real)x)) continue;
        assert_int_equal(bits & 0xFFFFu, 0x8000u); /* a tie, which goes away from 0 */
        assert_true(fabsf(near) > fabsf(x));
    }
}

/* A bf16 parameter's exact weights are, bit for bit, those of a float parameter under the same
 * gradients; its values are these, rounded. */
static void exact_weights_are_the_floats(void **state) {
    static const tsh_optim_desc descs[] = {
        {.kind = TSH_SGD, .lr = 1e-3, .weight_decay = 0.1},
        {.kind = TSH_SGD, .lr = 1e-3, .momentum = 0.9, .nesterov = 1},
        {.kind = TSH_ADAM, .lr = 1e-4},
        {.kind = TSH_ADAMW, .lr = 1e-4, .weight_decay = 0.2, .clip_norm = 0.7},
    };
    int i, s, e;
    (void)state;
    for (i = 0; i < COUNT(descs) && sizeof(tsh_real) == 4; i++) {
        tsh_ctx *ctx[2];
        tsh_tensor *p[2];
        tsh_optim *optim[2];
        tsh_real exact[2][N];
        int half;
        for (half = 0; half < 2; half++) {
            ctx[half] = unit_open(NULL);
            optim[half] = NULL;
            p[half] = tsh_param(vectors(ctx[half]), "weight");
            if (half) assert_int_equal(tsh_to(tsh_root(ctx[half]), TSH_BF16), TSH_OK);
            optim[half] = tsh_optim_new(tsh_root(ctx[half]), &descs[i]);
        }
        for (s = 0; s < 50; s++) {
            double g[N];
            for (e = 0; e < N; e++) g[e] = (double)(float)gradient(s, e);
            for (half = 0; half < 2; half++) {
                give(ctx[half], p[half], g);
                assert_int_equal(tsh_optim_step(optim[half]), TSH_OK);
                tshi_tensor_exact(p[half], 0, N, exact[half]);
            }
            assert_memory_equal(exact[0], exact[1], sizeof exact[0]);
            for (e = 0; e < N; e++) {
                const float shown = (float)tshi_dtype_get(TSH_BF16, tshi_tensor_at(p[1]), e);
                assert_true(fabsf(shown - (float)exact[0][e]) <= fabsf(shown) / 256);
            }
        }
        assert_true(exact[1][0] < 1 && exact[1][1] != exact[1][0]);
        tshi_tensor_set_exact(p[1], 2, 3, exact[0] + 5); /* as a file does */
        tshi_tensor_exact(p[1], 0, N, exact[1]);
        assert_memory_equal(exact[1] + 2, exact[0] + 5, 3 * sizeof exact[0][0]);
        for (half = 0; half < 2; half++) unit_close(ctx[half]);
    }
}

/* 1 + 2^-9 lies a quarter of the way from 1 to the next bf16: a quarter of all are rounded up, in
 * every step others. */
static void rounding_is_right_on_average(void **state) {
    enum { LONG = 20000 };
    const tsh_optim_desc sgd = {
        .kind = TSH_SGD, .lr = TSH_ZERO, .momentum = 0.5, .grad_dtype = TSH_BF16,
        .moments_dtype = TSH_BF16};
    tsh_ctx *ctx = unit_open(NULL);
    tsh_tensor *p = tsh_add_param(tsh_root(ctx), "p", tsh_shape1(LONG), NULL);
    tsh_optim *optim = tsh_optim_new(tsh_root(ctx), &sgd);
    const double quarter = 1 + 1.0 / 512;
    static uint16_t before[LONG];
    int step, e;
    (void)state;
    for (step = 0; step < 3; step++) {
        int up = 0, same = 0;
        const uint16_t *grad, *moment;
        double sum = 0;
        assert_int_equal(tsh_backward(ctx, tsh_sum(tsh_scale(p, quarter), TSH_ALL, 0)), TSH_OK);
        assert_int_equal(tsh_dtype_of(tsh_grad(p)), TSH_BF16);
        grad = (const uint16_t *)tsh_data(ctx, tsh_grad(p));
        for (e = 0; e < LONG; e++) {
            assert_true(grad[e] == 0x3F80 || grad[e] == 0x3F81);
            up += grad[e] == 0x3F81;
            same += grad[e] == before[e];
        }
        assert_true(abs(up - LONG / 4) < 300); /* 5 standard deviations */
        assert_true(step == 0 || abs(same - LONG * 10 / 16) < 400);
        memcpy(before, grad, sizeof before);
        assert_int_equal(tsh_optim_step(optim), TSH_OK);
        assert_int_equal(optim->each[0].moment[0]->dtype, TSH_BF16);
        moment = (const uint16_t *)tshi_tensor_at(optim->each[0].moment[0]);
        for (e = 0; e < LONG; e++) sum += (double)tshi_dtype_from_bf16(moment[e]);
        EXPECT_NEAR(sum / LONG, quarter * (2 - pow(0.5, step)), 5e-4);
        tsh_zero_grads(tsh_root(ctx));
        assert_int_equal(tsh_step_end(ctx), TSH_OK);
    }
    unit_close(ctx);
}

/* One of two optimisers is freed: nothing of it is left in memory, the parameters that only it had
 * may be quantised or get a new one, and the other goes on. */
static void an_optimiser_is_freed(void **state) {
    const tsh_optim_desc adam = {.kind = TSH_ADAM, .lr = 0.5, .grad_dtype = TSH_BF16};
    const tsh_linear_desc linear = {.in = 32, .out = 3, .bias = TSH_NO, .dtype = TSH_BF16};
    tsh_ctx *ctx = unit_open(NULL);
    tsh_module *both = vectors(ctx), *layer = tsh_add_linear(tsh_root(ctx), "up", &linear);
    tsh_tensor *weight = tsh_param(layer, "weight"), *bias = tsh_param(both, "bias");
    tsh_optim *first = tsh_optim_new(tsh_root(ctx), &adam), *second = tsh_optim_new(both, NULL);
    uint16_t before[96];
    double g[96], want[N];
    tsh_mem mem;
    (void)state;
    for (int e = 0; e < 96; e++) g[e] = gradient(0, e);
    give(ctx, bias, g);
    give(ctx, weight, g);
    assert_int_equal(tsh_optim_step(first), TSH_OK);
    assert_non_null(weight->low);
    memcpy(before, tsh_data(ctx, weight), sizeof before);
    tsh_optim_free(first);
    mem = tsh_mem_stats(ctx);
    assert_int_equal(mem.now[TSH_MEM_OPTIMISER], 0);
    assert_null(weight->low);
    assert_null(tsh_grad(weight));
    assert_non_null(tsh_grad(bias)); /* the second's, too */
    assert_memory_equal(before, tsh_data(ctx, weight), sizeof before);
    tsh_optim_free(first); /* does nothing any more */
    tsh_optim_free(NULL);
    for (int e = 0; e < N; e++)
        want[e] = (double)((tsh_real *)tsh_data(ctx, bias))[e] - 0.25 * (g[e] = e);
    tsh_optim_set_lr(second, 0.25);
    give(ctx, bias, g);
    assert_int_equal(tsh_optim_step(second), TSH_OK);
    expect_values(ctx, bias, want, ROUNDING);
    tsh_optim_free(second);
    assert_ptr_equal(ctx->optims, NULL);
    second = tsh_optim_new(layer, &adam);
    give(ctx, weight, g);
    assert_int_equal(tsh_optim_step(second), TSH_OK);
    assert_int_equal(tsh_optim_state(second).steps, 1);
    assert_memory_not_equal(before, tsh_data(ctx, weight), sizeof before);
    assert_int_equal(tsh_quantize(layer, NULL, TSH_Q8_0), TSH_ERR_STATE);
    tsh_clear_error(ctx);
    tsh_optim_free(second);
    assert_int_equal(tsh_quantize(layer, NULL, TSH_Q8_0), TSH_OK);
    unit_close(ctx);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_optimiser_is_freed),
        cmocka_unit_test(floats_are_split_in_halves),
        cmocka_unit_test(exact_weights_are_the_floats),
        cmocka_unit_test(rounding_is_right_on_average),
        cmocka_unit_test(optimisers_follow_their_formulas),
        cmocka_unit_test(the_usual_optimiser_is_sgd),
        cmocka_unit_test(parameters_without_a_gradient_stay),
        cmocka_unit_test(a_late_parameter_starts_at_its_first_step),
        cmocka_unit_test(groups_change_rate_and_decay),
        cmocka_unit_test(groups_match_below_the_module),
        cmocka_unit_test(groups_know_tied_weights_by_their_path),
        cmocka_unit_test(the_rate_may_be_set),
        cmocka_unit_test(schedules_follow_their_closed_forms),
        cmocka_unit_test(clipping_is_exact_at_every_degree),
        cmocka_unit_test(the_norm_spans_pipeline_stages),
        cmocka_unit_test(a_step_clips_first),
        cmocka_unit_test(steps_are_the_same_at_every_degree),
        cmocka_unit_test(a_gradient_that_is_not_finite_skips_every_rank),
        cmocka_unit_test(a_skipped_step_is_logged),
        cmocka_unit_test(pending_gradients_are_an_error),
    };
    return cmocka_run_group_tests_name("unit/optim", tests, NULL, NULL);
}
