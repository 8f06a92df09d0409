/* models.h - trains a small model at several degrees and compares it with how PyTorch trains it.
 *
 * tests/golden/models.py has the same models in PyTorch, and says what a golden file holds. Weights
 * and data are functions of names, by a hash, so that both sides compute them. Include it after
 * tshard.h and backends/tshard_threads.h. */
#ifndef TSHARD_TESTS_MODELS_H
#define TSHARD_TESTS_MODELS_H

#include "../support/golden.h"
#include "../support/ranks.h"

enum { MODELS_STEPS = 50, MODELS_SIGNS = 4, MODELS_NAME = 2 * TSH_PATH_SIZE };

typedef struct model {
    const char *name;                                /* its golden: model_<name> */
    void (*add)(tsh_module *root);                   /* adds the layers */
    tsh_tensor *(*loss)(tsh_module *root, int step); /* the forward of a step: its loss */
    const tsh_plan_rule *plan;
    int rules; /* number of rules of the plan */
    tsh_optim_desc optim;
} model;

/* ---------------------------------------------------------------- numbers of names */

/* FNV-1a of 64 bits. */
static uint64_t models_seed(const char *name) {
    uint64_t seed = 0xcbf29ce484222325u;
    for (; *name; name++) seed = (seed ^ (unsigned char)*name) * 0x100000001b3u;
    return seed;
}

/* SplitMix64 of seed + i. */
static uint64_t models_hash(uint64_t seed, uint64_t i) {
    uint64_t z = seed + i + 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* From -1 (included) to 1. */
static double models_uniform(uint64_t seed, uint64_t i) {
    return (double)(models_hash(seed, i) >> 11) / 4503599627370496.0 - 1;
}

/* This replica's rows of a step's data, as a step tensor: shape.dim[0] counts the rows of all
 * replicas. The name is "<name><step>". limit 0: uniform numbers; else integers below it. */
static tsh_tensor *models_rows(tsh_ctx *ctx, int64_t limit, const char *name, int step,
                               tsh_shape shape) {
    const int64_t rows = shape.dim[0] / tsh_dp(ctx)->size,
                  count = spec_numel(&shape) / tsh_dp(ctx)->size;
    const uint64_t first = (uint64_t)(count * tsh_dp(ctx)->rank);
    tsh_real *values = (tsh_real *)malloc((size_t)count * sizeof *values);
    int64_t *ids = (int64_t *)malloc((size_t)count * sizeof *ids);
    tsh_tensor *t;
    char full[64];
    uint64_t seed, i;
    (void)snprintf(full, sizeof full, "%s%d", name, step);
    seed = models_seed(full);
    for (i = 0; i < (uint64_t)count; i++) {
        values[i] = (tsh_real)models_uniform(seed, first + i);
        ids[i] = limit ? (int64_t)(models_hash(seed, first + i) % (uint64_t)limit) : 0;
    }
    shape.dim[0] = rows;
    t = limit ? tsh_from(ctx, ids, shape, TSH_I64) : tsh_from(ctx, values, shape, TSH_REAL);
    free(values);
    free(ids);
    return t;
}

UNUSED static tsh_tensor *models_data(tsh_ctx *ctx, const char *name, int step, tsh_shape shape) {
    return models_rows(ctx, 0, name, step, shape);
}

UNUSED static tsh_tensor *models_below(tsh_ctx *ctx, int64_t limit, const char *name, int step,
                                       tsh_shape shape) {
    return models_rows(ctx, limit, name, step, shape);
}

/* The forward of a module below root. */
UNUSED static tsh_tensor *models_call(tsh_module *root, const char *path, tsh_tensor *x) {
    return tsh_forward(tsh_find(root, path), x);
}

/* ---------------------------------------------------------------- parameters */

typedef struct models_run {
    const model *m;
    const golden_file *golden;
    tsh_ctx *ctx; /* of this rank, as all below */
    int failed;
    int sharded; /* number of parameters that the plan shards */
} models_run;

/* Initial values, as initial() of models.py. A tensor without a golden gradient is a buffer. */
static void models_initialise(const char *path, tsh_tensor *param, void *user) {
    models_run *run = (models_run *)user;
    const tsh_shape shape = tsh_shape_of(param);
    const int64_t count = tsh_numel(param);
    const char *dot = strrchr(path, '.'), *name = dot ? dot + 1 : path;
    const double scale = shape.ndim > 1 ? sqrt((double)(count / shape.dim[0])) : 10;
    const double mean = shape.ndim < 2 && strncmp(name, "weight", 6) == 0;
    const uint64_t seed = models_seed(path);
    golden_tensor gradient;
    tsh_real *values;
    uint64_t i;
    if (!golden_find(run->golden, "grad", path, &gradient)) return;
    run->sharded += tsh_layout_of(param).kind == TSH_SHARDED;
    values = (tsh_real *)malloc((size_t)count * sizeof *values);
    for (i = 0; i < (uint64_t)count; i++)
        values[i] = (tsh_real)(mean + models_uniform(seed, i) / scale);
    if (tsh_write(run->ctx, param, TSH_GLOBAL, values, (size_t)count * sizeof *values) != TSH_OK)
        run->failed = ranks_fail(run->ctx, __LINE__, "%s is not written", path);
    free(values);
}

/* The sum of a gradient's elements times the signs of a name. */
static double models_signed_sum(const double *gradient, int64_t count, const char *path, int k) {
    char name[MODELS_NAME];
    uint64_t seed, i;
    double sum = 0;
    (void)snprintf(name, sizeof name, "%s.sign%d", path, k);
    seed = models_seed(name);
    for (i = 0; i < (uint64_t)count; i++)
        sum += models_hash(seed, i) & 1 ? gradient[i] : -gradient[i];
    return sum;
}

/* Compares a gradient of the first step. In double to 1e-9 of 1 + |value|. In float, where golden
 * values are still those of double, to 1e-5 of the tensor's norm; a gradient that is zero but for
 * rounding, such as that of a bias before a softmax, to 1e-7. */
static void models_compare_gradient(const char *path, tsh_tensor *param, void *user) {
    models_run *run = (models_run *)user;
    golden_tensor golden;
    const double *want;
    double *got, norm = 0, tolerance;
    int k;
    int64_t i;
    if (run->failed || !golden_find(run->golden, "grad", path, &golden)) return;
    want = (const double *)golden.data;
    got = ranks_values(run->ctx, tsh_grad(param));
    if (!got) {
        run->failed = ranks_fail(run->ctx, __LINE__, "%s has no gradient", path);
        return;
    }
    for (i = 0; i < tsh_numel(param); i++) norm += got[i] * got[i];
    for (k = 0; k <= MODELS_SIGNS && !run->failed; k++) {
        double sum = k < MODELS_SIGNS ? models_signed_sum(got, tsh_numel(param), path, k)
                                      : sqrt(norm);
        tolerance = sizeof(tsh_real) == 8 ? 1e-9 * (1 + fabs(want[k]))
                                          : 1e-5 * want[MODELS_SIGNS] + 1e-7;
        if (!(fabs(sum - want[k]) <= tolerance))
            run->failed = ranks_fail(run->ctx, __LINE__, "gradient of %s, %d: %.12g, not %.12g",
                                     path, k, sum, want[k]);
    }
    free(got);
}

/* ---------------------------------------------------------------- training */

/* Compares a loss, the mean over replicas, with PyTorch's: in double to 1e-9 of 1 + |value|; in
 * float to 1e-5 at the first step, then to three times what a change of the initial weights by
 * rounding does to PyTorch's losses, and rounding of the loss itself. */
static int models_compare_loss(models_run *run, int step, double got) {
    const int wide = sizeof(tsh_real) == 8;
    const golden_tensor losses = golden_get(run->golden, wide ? "f64" : "f32", "losses");
    const golden_tensor drift = golden_get(run->golden, "f32", "drift");
    tsh_ctx *ctx = run->ctx;
    double want, tolerance;
    CHECK(step < losses.count, "there is no loss %d: write the golden file again", step);
    want = ((const double *)losses.data)[step];
    tolerance = 3 * ((const double *)drift.data)[step] + 1e-6 * fabs(want);
    if (step == 0) tolerance = 1e-5 * fabs(want);
    if (wide) tolerance = 1e-9 * (1 + fabs(want));
    CHECK(fabs(got - want) <= tolerance, "loss %d is %.12g, not %.12g (+- %.2g)", step, got, want,
          tolerance);
    return 0;
}

/* The mean over replicas of a step's loss. */
static int models_mean(tsh_ctx *ctx, tsh_tensor *loss, double *mean) {
    *mean = tsh_item(ctx, loss) / tsh_dp(ctx)->size;
    CHECK(tsh_allreduce(tsh_dp(ctx), mean, 1, TSH_F64, TSH_SUM) == TSH_OK, "no loss");
    return 0;
}

static int models_step(models_run *run, tsh_module *root, tsh_optim *optim, int step) {
    tsh_ctx *ctx = run->ctx;
    tsh_tensor *loss = run->m->loss(root, step);
    double mean;
    CHECK(tsh_backward(ctx, loss) == TSH_OK, "step %d", step);
    if (models_mean(ctx, loss, &mean)) return 1;
    if (step == 0) tsh_each_param(root, models_compare_gradient, run);
    if (run->failed || models_compare_loss(run, step, mean)) return 1;
    CHECK(tsh_optim_step(optim) == TSH_OK, "step %d", step);
    tsh_zero_grads(root);
    CHECK(tsh_step_end(ctx) == TSH_OK, "step %d", step);
    return 0;
}

/* The loss in evaluation mode, after the last step. */
static int models_evaluate(models_run *run, tsh_module *root) {
    tsh_ctx *ctx = run->ctx;
    double mean;
    tsh_train(root, 0);
    tsh_no_grad_begin(ctx);
    if (models_mean(ctx, run->m->loss(root, MODELS_STEPS), &mean)) return 1;
    if (models_compare_loss(run, MODELS_STEPS, mean)) return 1;
    tsh_no_grad_end(ctx);
    return 0;
}

static int models_train(tsh_ctx *ctx, void *user) {
    models_run run = *(const models_run *)user;
    tsh_module *root = tsh_root(ctx);
    tsh_optim *optim;
    int step;
    run.ctx = ctx;
    run.m->add(root);
    CHECK(tsh_parallelize(root, run.m->plan, run.m->rules) == TSH_OK, "plan");
    CHECK(tsh_materialize(root) == TSH_OK, "memory");
    tsh_each_param(root, models_initialise, &run);
    CHECK(run.sharded, "the plan shards no parameter");
    optim = tsh_optim_new(root, &run.m->optim);
    for (step = 0; step < MODELS_STEPS && !run.failed; step++)
        if (models_step(&run, root, optim, step)) return 1;
    if (run.failed || models_evaluate(&run, root)) return 1;
    CHECK_OK();
    return 0;
}

/* Trains on `ranks` ranks, of which tp share a replica. */
UNUSED static void models_prove_at(const model *m, const golden_file *golden, int ranks, int tp) {
    models_run run;
    tsh_desc desc;
    memset(&desc, 0, sizeof desc);
    memset(&run, 0, sizeof run);
    desc.tp = tp;
    run.m = m;
    run.golden = golden;
    ranks_run_with(ranks, &desc, models_train, &run);
}

static void models_open(const model *m, golden_file *golden) {
    char name[64];
    (void)snprintf(name, sizeof name, "model_%s", m->name);
    *golden = golden_open(name);
}

/* Every golden gradient must have been compared; losses of the other precision are not read. */
static void models_finish(golden_file *golden) {
    golden_tensor t;
    (void)golden_find(golden, "f64", "losses", &t);
    (void)golden_find(golden, "f32", "losses", &t);
    (void)golden_find(golden, "f32", "drift", &t);
    golden_finish(golden);
}

/* Trains at tp 1, 2 and 3; replicas 1: also at dp 2, with tp 1 and with tp 2. */
UNUSED static void models_prove(const model *m, int replicas) {
    golden_file golden;
    int tp;
    models_open(m, &golden);
    for (tp = 1; tp <= 3; tp++) models_prove_at(m, &golden, tp, tp);
    for (tp = 1; tp <= 2 && replicas; tp++) models_prove_at(m, &golden, 2 * tp, tp);
    models_finish(&golden);
}

#endif
