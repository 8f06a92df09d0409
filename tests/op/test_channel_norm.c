/* Batch, group and instance norm: values, gradients and running statistics against PyTorch's, by
 * the kernels of every instruction set; gradients against central differences; every layout at
 * every degree; statistics over replicas; bf16; what is refused. */
/* build: double */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/golden.h"
#include "../support/library.h"
#include "../support/ranks.h"

#include <float.h>

/* ------------------------------------------------------------------- PyTorch's */

static const char *const batch_cases[] = {
    "train_rows",   "train_wide",    "train_runs",   "train_images", "train_long",
    "train_volume", "train_one",     "eval_rows",    "eval_wide",    "eval_runs",
    "eval_images",  "eval_long",     "eval_volume",  "eval_one",     "train_plain",
    "eval_plain",   "train_options", "eval_options", "train_far"};
static const char *const group_cases[] = {"group_runs",    "group_images",    "group_long",
                                          "group_volume",  "group_one",       "group_rows",
                                          "group_all",     "group_plain",     "group_far",
                                          "instance_runs", "instance_images", "instance_long"};

/* An error of so many float epsilons, relative to max(1, |want|): golden values are rounded to
 * float. At a mean of 1000 with a deviation of 1, the output is rounded by 500 epsilons of 1. In a
 * group of two values that are nearly equal, dx is a difference of large terms. */
static double room(const char *name) {
    if (strstr(name, "far")) return 1000 * (double)FLT_EPSILON;
    return (strcmp(name, "group_rows") == 0 ? 400 : 40) * (double)FLT_EPSILON;
}

static void compare(tsh_ctx *ctx, const golden_file *g, const char *name, const char *what,
                    tsh_tensor *t) {
    golden_tensor want = golden_get(g, name, what);
    double *got;
    if (!t || !tsh_ok(ctx)) fail_msg("%s.%s: %s", name, what, tsh_last_error(ctx)->message);
    assert_int_equal(tsh_numel(t), want.count);
    got = ranks_values(ctx, t);
    assert_non_null(got);
    for (int64_t i = 0; i < want.count; i++) {
        const double y = (double)((const float *)want.data)[i], scale = fabs(y) > 1 ? fabs(y) : 1;
        if (!(fabs(got[i] - y) <= room(name) * scale))
            fail_msg("%s.%s[%ld] is %.9g, not %.9g", name, what, (long)i, got[i], y);
    }
    free(got);
}

/* A tensor of the case as a leaf; NULL: the case has none. turned 1: its storage is that of the
 * transposed tensor, dimensions 0 and 1 exchanged. */
static tsh_tensor *golden_leaf(tsh_ctx *ctx, const golden_file *g, const char *name,
                               const char *what, tsh_tensor **leaf) {
    golden_tensor t;
    *leaf = NULL;
    if (!golden_find(g, name, what, &t)) return NULL;
    *leaf = tsh_requires_grad(golden_load(ctx, &t), 1);
    return *leaf;
}

static tsh_tensor *turned(tsh_tensor *x) {
    return tsh_transpose(tsh_clone(tsh_transpose(x, 0, 1)), 0, 1);
}

static void one_case(tsh_ctx *ctx, const golden_file *g, const char *name, int turn) {
    const int training = strncmp(name, "train", 5) == 0, batch = training || name[0] == 'e';
    const int options_of = strstr(name, "options") != NULL;
    tsh_batch_norm_options options = {.training = training};
    tsh_tensor *x, *w, *b, *dy, *mean = NULL, *var = NULL, *none, *y, *in;
    golden_tensor t;
    golden_leaf(ctx, g, name, "x", &x);
    golden_leaf(ctx, g, name, "w", &w);
    golden_leaf(ctx, g, name, "b", &b);
    t = golden_get(g, name, "g");
    dy = golden_load(ctx, &t);
    if (batch) mean = tsh_requires_grad(golden_leaf(ctx, g, name, "mean", &none), 0);
    if (batch) var = tsh_requires_grad(golden_leaf(ctx, g, name, "var", &none), 0);
    if (options_of) options.momentum = 0.25;
    if (options_of) options.eps = 0.5;
    in = turn ? turned(x) : x;
    if (batch)
        y = tsh_batch_norm(in, w, b, mean, var, &options);
    else if (name[0] == 'i')
        y = tsh_instance_norm(in, w, b, 0);
    else
        y = tsh_group_norm(in,
                           strstr(name, "all")                         ? 1
                           : tsh_size(x, 1) % 2 || tsh_size(x, 1) == 6 ? 3
                                                                       : 2,
                           w, b, strstr(name, "plain") ? 0.5 : 0);
    compare(ctx, g, name, "y", y);
    (void)tsh_backward(ctx, tsh_sum(tsh_mul(y, dy), TSH_ALL, 0));
    compare(ctx, g, name, "dx", tsh_grad(x));
    if (w) compare(ctx, g, name, "dw", tsh_grad(w));
    if (w) compare(ctx, g, name, "db", tsh_grad(b));
    if (batch) compare(ctx, g, name, "mean_after", mean);
    if (batch) compare(ctx, g, name, "var_after", var);
    (void)tsh_step_end(ctx);
    tsh_tensor *all[] = {x, w, b, dy, mean, var};
    for (int i = 0; i < COUNT(all); i++) tsh_tensor_free(all[i]);
}

static void pytorch_gives_the_same(void **state) {
    golden_file g = golden_open("channel_norm");
    tsh_ctx *ctx;
    (void)state;
    assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
    for (int isa = library_isa(ctx); isa >= 0; isa--) {
        library_set_isa(ctx, isa);
        for (int turn = 0; turn < 2; turn++) {
            for (int i = 0; i < COUNT(batch_cases); i++) one_case(ctx, &g, batch_cases[i], turn);
            for (int i = 0; i < COUNT(group_cases); i++) one_case(ctx, &g, group_cases[i], turn);
        }
    }
    assert_true(tsh_ok(ctx));
    tsh_close(ctx);
    golden_close(&g);
}

/* --------------------------------------------------------- central differences */

typedef struct checked {
    int groups; /* 0: batch norm in training; -1: outside of it */
    tsh_tensor *mean, *var;
} checked;

static tsh_tensor *checked_loss(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {
    const checked *c = (const checked *)user;
    const tsh_batch_norm_options options = {
        .training = c->groups == 0, .eps = 0.1, .momentum = TSH_ZERO};
    tsh_tensor *y = c->groups > 0 ? tsh_group_norm(in[0], c->groups, in[1], in[2], 0.1)
                                  : tsh_batch_norm(in[0], in[1], in[2], c->mean, c->var, &options);
    (void)n;
    return ranks_loss(ctx, y);
}

static void differences_are_the_gradients(void **state) {
    static const char *const shapes[] = {"5,4", "3,4,5", "2,4,3,13"};
    static const int groups[] = {0, -1, 1, 2, 4};
    /* h^2 |L'''| / 6 and u |L| / h, as in test_gradcheck.c */
    const double most = sizeof(tsh_real) == 8 ? 1e-7 : 3e-2;
    tsh_ctx *ctx;
    (void)state;
    assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
    for (int i = 0; i < COUNT(shapes) * COUNT(groups); i++) {
        checked c = {groups[i % COUNT(groups)], NULL, NULL};
        tsh_tensor *in[3];
        double worst;
        in[0] = same_leaf(ctx, 1, shapes[i / COUNT(groups)], 1, 5);
        in[1] = same_leaf(ctx, 1, "4", 1, 6);
        in[2] = same_leaf(ctx, 1, "4", 1, 7);
        c.mean = tsh_requires_grad(same_leaf(ctx, 1, "4", 1, 8), 0);
        c.var = tsh_ones(ctx, tsh_shape1(4));
        c.var = tsh_keep(c.var);
        worst = tsh_gradcheck(ctx, checked_loss, in, 3, &c, 0, 0);
        if (!(worst >= 0 && worst <= most))
            fail_msg("%s, %d groups: off by %g (%s)", shapes[i / COUNT(groups)], c.groups, worst,
                     tsh_last_error(ctx)->message);
        for (int k = 0; k < 3; k++) tsh_tensor_free(in[k]);
        tsh_tensor_free(c.mean);
        tsh_tensor_free(c.var);
        (void)tsh_step_end(ctx);
    }
    tsh_close(ctx);
}

/* --------------------------------------------------------------------- layouts */

/* "train" or "eval", "stats"; inputs x, weight, bias. The running statistics are laid out as the
 * weight. */
static tsh_tensor *op_batch(probe *p) {
    const tsh_batch_norm_options options = {.training = probe_has(p, "train"), .eps = 0.5};
    const tsh_layout layout = tsh_layout_of(p->in[1]);
    const int64_t channels = tsh_size(p->in[0], 1);
    tsh_tensor *mean = tsh_tensor_new(p->ctx, TSH_REAL, tsh_shape1(channels), layout);
    tsh_tensor *var = tsh_tensor_new(p->ctx, TSH_REAL, tsh_shape1(channels), layout), *y, *z;
    tsh_real *data = (tsh_real *)malloc((size_t)(channels + 1) * sizeof *data);
    ranks_set(p->ctx, mean, 3);
    for (int64_t c = 0; c < channels; c++) data[c] = (tsh_real)fabs(ranks_number(4, (uint64_t)c));
    (void)tsh_write(p->ctx, var, TSH_GLOBAL, data, (size_t)channels * sizeof *data);
    free(data);
    (void)probe_has(p, "eval");
    y = tsh_batch_norm(p->in[0], p->in[1], p->in[2], mean, var, &options);
    /* "stats": the running statistics are compared, too, as a term of the result */
    if (probe_has(p, "stats") && y) {
        z = tsh_add(tsh_redistribute(tsh_clone(mean), tsh_replicated()),
                    tsh_redistribute(tsh_clone(var), tsh_replicated()));
        z = tsh_reshape(z, tsh_shape3(1, channels, 1));
        if (layout.kind == TSH_SHARDED) z = tsh_redistribute(z, tsh_layout_of(y));
        y = tsh_add(y, z);
    }
    tsh_tensor_free(mean);
    tsh_tensor_free(var);
    return y;
}

static tsh_tensor *op_group(probe *p) {
    if (probe_has(p, "instance")) return tsh_instance_norm(p->in[0], p->in[1], p->in[2], 0.5);
    return tsh_group_norm(p->in[0], probe_number(p, "groups"), p->in[1], p->in[2], 0.5);
}

/* Rounding: sums in float, in another order than one rank's where they go over ranks. */
#define ROUNDING                 3e-5
#define ROUND(op, arg, out, ...) TRIAL(op_##op, arg, out, ROUNDING, 0, __VA_ARGS__)
#define EXACT(op, arg, out, ...) TRIAL(op_##op, arg, out, 0, 0, __VA_ARGS__)

static const trial rows[] = {
    EXACT(batch, "train stats", "R", "4,n,3 R", "n R", "n R"),
    EXACT(batch, "train stats", "S(1)", "4,n,3 S(1)", "n S(0)", "n S(0)"),
    EXACT(batch, "train stats", "S(1)", "4,n,40 S(1)", "n S(0)", "n S(0)"),
    EXACT(batch, "train stats", "S(1, unit 3)", "4,6n,1 S(1, unit 3)", "6n S(0, unit 3)",
          "6n S(0, unit 3)"),
    EXACT(batch, "eval", "S(1)", "4,n,3 S(1)", "n S(0)", "n S(0)"),
    ROUND(batch, "train stats", "S(0)", "n,5,3 S(0)", "5 R", "5 R"),
    ROUND(batch, "train stats", "S(0)", "n,5,33 S(0)", "5 R", "5 R"),
    ROUND(batch, "eval", "S(0)", "n,5,3 S(0)", "5 R", "5 R"),
    ROUND(batch, "train stats", "S(2)", "3,5,n S(2)", "5 R", "5 R"),
    EXACT(group, "groups n", "R", "3,2n,5 R", "2n R", "2n R"),
    ROUND(group, "groups 2", "S(0)", "n,4,5 S(0)", "4 R", "4 R"),
    ROUND(group, "instance", "S(0)", "n,4,5 S(0)", "4 R", "4 R"),
    EXACT(group, "groups n", "S(1, unit 2)", "3,2n,5 S(1, unit 2)", "2n S(0, unit 2)",
          "2n S(0, unit 2)"),
    EXACT(group, "groups n", "S(1, unit 2)", "3,2n,40 S(1, unit 2)", "2n S(0, unit 2)",
          "2n S(0, unit 2)"),
    EXACT(group, "instance", "S(1)", "3,n,5 S(1)", "n S(0)", "n S(0)"),
};

static void layouts_give_the_dense_result(void **state) {
    static const int64_t lengths[] = {1, 5, 8};
    (void)state;
    trials_prove(rows, COUNT(rows), lengths, COUNT(lengths));
}

/* In training: one all-gather forward and one all-reduce backward where the batch is sharded, else
 * no collective. */
static const trial counted[] = {
    {op_batch,
     "train",
     {"16,3,2 S(0)", "3 R", "3 R"},
     "S(0)",
     ROUNDING,
     TRIAL_COUNTED,
     {0, 1, 0},
     {3, 0, 0}}, /* those of the weight and bias, too */
    {op_batch,
     "train",
     {"4,16,2 S(1)", "16 S(0)", "16 S(0)"},
     "S(1)",
     0,
     TRIAL_COUNTED,
     {0, 0, 0},
     {0, 0, 0}},
};

static void collectives_are_few(void **state) {
    static const int64_t lengths[] = {1};
    (void)state;
    trials_prove(counted, COUNT(counted), lengths, 1);
}

/* ------------------------------------------------------------------- replicas */

enum { BATCH = 8, CHANNELS = 3, INNER = 5 };

/* The whole batch on one rank, or with .over_dp a part on each replica: the same values, running
 * statistics and gradients. */
static int over_replicas(tsh_ctx *ctx, void *user) {
    double **want = (double **)user; /* y, dx, mean, var of the whole batch, filled by one rank */
    const int size = tsh_dp(ctx)->size, rank = tsh_dp(ctx)->rank;
    const int64_t from = rank ? BATCH * (rank + 1) / (size + 1) : 0;
    const int64_t to = rank == size - 1 ? BATCH : BATCH * (rank + 2) / (size + 1);
    const int64_t each = CHANNELS * INNER, n = (to - from) * each;
    const tsh_batch_norm_options options = {.training = 1, .over_dp = 1};
    tsh_tensor *x = tsh_tensor_new(ctx, TSH_REAL, tsh_shape3(to - from, CHANNELS, INNER),
                                   tsh_replicated());
    tsh_tensor *w = same_leaf(ctx, 1, "3", 1, 6), *g = tsh_zeros(ctx, tsh_shape_of(x)), *y, *dx;
    tsh_tensor *mean = tsh_tensor_new(ctx, TSH_REAL, tsh_shape1(CHANNELS), tsh_replicated());
    tsh_tensor *var = tsh_tensor_new(ctx, TSH_REAL, tsh_shape1(CHANNELS), tsh_replicated());
    double *got[4];
    for (int64_t e = 0; e < n; e++) {
        const uint64_t at = (uint64_t)(from * each + e);
        ((tsh_real *)tsh_data(ctx, x))[e] = (tsh_real)ranks_number(1, at);
        ((tsh_real *)tsh_data(ctx, g))[e] = (tsh_real)ranks_number(2, at);
    }
    x = tsh_requires_grad(x, 1);
    y = tsh_batch_norm(x, w, NULL, mean, var, &options);
    (void)tsh_retain_grad(y);
    CHECK_TRUE(tsh_backward(ctx, tsh_sum(tsh_mul(y, g), TSH_ALL, 0)) == TSH_OK);
    dx = tsh_grad(x);
    got[0] = ranks_values(ctx, y);
    got[1] = ranks_values(ctx, dx);
    got[2] = ranks_values(ctx, mean);
    got[3] = ranks_values(ctx, var);
    CHECK_OK();
    for (int k = 0; k < 4; k++) {
        if (size == 1) {
            want[k] = got[k];
            continue;
        }
        for (int64_t e = 0; e < (k < 2 ? n : CHANNELS); e++) {
            const double a = want[k][e + (k < 2 ? from * each : 0)], b = got[k][e];
            CHECK(fabs(a - b) <= 1e-5, "%d of %ld: %g, not %g", k, (long)e, b, a);
        }
        free(got[k]);
    }
    return 0;
}

static void replicas_share_statistics(void **state) {
    double *want[4];
    const tsh_desc desc = {.tp = 1};
    (void)state;
    ranks_run_with(1, &desc, over_replicas, want);
    for (int ranks = 2; ranks <= 4; ranks++) ranks_run_with(ranks, &desc, over_replicas, want);
    for (int k = 0; k < 4; k++) free(want[k]);
}

/* -------------------------------------------------------------- the other cases */

static void halves_are_rounded_once(void **state) {
    const tsh_batch_norm_options options = {.training = 1};
    static const tsh_dtype dtypes[] = {TSH_BF16, TSH_F16};
    tsh_ctx *ctx;
    (void)state;
    assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
    for (int i = 0; i < 4; i++) {
        tsh_tensor *x = same_leaf(ctx, 1, "6,4,5", 1, 1), *w = same_leaf(ctx, 1, "4", 1, 2);
        tsh_tensor *low = tsh_cast(x, dtypes[i / 2]), *a, *b; /* small integers: exact */
        a = i % 2 ? tsh_group_norm(x, 2, w, w, 0) : tsh_batch_norm(x, w, w, NULL, NULL, &options);
        b = i % 2 ? tsh_group_norm(low, 2, w, w, 0)
                  : tsh_batch_norm(low, w, w, NULL, NULL, &options);
        assert_int_equal(tsh_dtype_of(b), dtypes[i / 2]);
        {
            double *want = ranks_values(ctx, tsh_cast(tsh_cast(a, dtypes[i / 2]), TSH_REAL));
            double *got = ranks_values(ctx, tsh_cast(b, TSH_REAL));
            for (int64_t e = 0; e < tsh_numel(a); e++)
                if (got[e] != want[e]) fail_msg("%ld: %g, not %g", (long)e, got[e], want[e]);
            free(want);
            free(got);
        }
        assert_int_equal(tsh_backward(ctx, tsh_sum(tsh_cast(b, TSH_REAL), TSH_ALL, 0)), TSH_OK);
        (void)tsh_step_end(ctx);
    }
    assert_true(tsh_ok(ctx));
    tsh_close(ctx);
}

/* Empty batches and channels: no values, no change of the running statistics, gradients of 0. */
static void empty_inputs_are_taken(void **state) {
    static const char *const shapes[] = {"0,4,3", "2,4,0", "3,0,2"};
    const tsh_batch_norm_options options = {.training = 1};
    tsh_ctx *ctx;
    (void)state;
    assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
    for (int i = 0; i < COUNT(shapes); i++) {
        const char *channels = i == 2 ? "0" : "4";
        tsh_tensor *x = tsh_requires_grad(
            tsh_tensor_new(ctx, TSH_REAL,
                           tsh_shape3(shapes[i][0] - '0', shapes[i][2] - '0', shapes[i][4] - '0'),
                           tsh_replicated()),
            1);
        tsh_tensor *w = tsh_requires_grad(
            tsh_tensor_new(ctx, TSH_REAL, tsh_shape1(channels[0] - '0'), tsh_replicated()), 1);
        tsh_tensor *mean = tsh_tensor_new(ctx, TSH_REAL, tsh_shape1(channels[0] - '0'),
                                          tsh_replicated());
        tsh_tensor *var = tsh_keep(tsh_ones(ctx, tsh_shape_of(mean))), *y;
        y = tsh_add(tsh_batch_norm(x, w, w, mean, var, &options), tsh_group_norm(x, 2, w, w, 0));
        y = tsh_add(y, tsh_instance_norm(x, w, w, TSH_ZERO)); /* 1 / deviation is infinite */
        assert_non_null(y);
        assert_int_equal(tsh_backward(ctx, tsh_sum(y, TSH_ALL, 0)), TSH_OK);
        for (int64_t c = 0; c < tsh_numel(var); c++) {
            assert_true(((tsh_real *)tsh_data(ctx, var))[c] == 1);
            assert_true(((tsh_real *)tsh_data(ctx, tsh_grad(w)))[c] == 0);
        }
        (void)tsh_step_end(ctx);
    }
    assert_true(tsh_ok(ctx));
    tsh_close(ctx);
}

/* Of the values 0, 2, 0, 2 the mean is 1 and the variance 1; of 0, 0, 2, 2 the mean square is 2. A
 * negative eps is added to it, and a negative momentum is the share of the statistics. */
static void negative_options_are_taken_as_they_are(void **state) {
    static const tsh_real values[4] = {0, 2, 0, 2}, start[1] = {3};
    const tsh_batch_norm_options options = {.training = 1, .momentum = -1, .eps = -0.75};
    tsh_ctx *ctx;
    tsh_tensor *row, *channel, *mean, *var, *y[4];
    (void)state;
    assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
    row = tsh_tensor_from(ctx, TSH_REAL, tsh_shape2(1, 4), tsh_replicated(), values);
    channel = tsh_tensor_from(ctx, TSH_REAL, tsh_shape2(4, 1), tsh_replicated(), values);
    mean = tsh_tensor_from(ctx, TSH_REAL, tsh_shape1(1), tsh_replicated(), start);
    var = tsh_tensor_from(ctx, TSH_REAL, tsh_shape1(1), tsh_replicated(), start);
    y[0] = tsh_batch_norm(channel, NULL, NULL, mean, var, &options);
    y[1] = tsh_group_norm(row, 1, NULL, NULL, -0.75);
    y[2] = tsh_layer_norm(row, NULL, NULL, -0.75);
    y[3] = tsh_rms_norm(row, NULL, -1.75);
    for (int i = 0; i < 4; i++) {
        if (!y[i]) fail_msg("%d: %s", i, tsh_last_error(ctx)->message);
        assert_true(((tsh_real *)tsh_data(ctx, y[i]))[1] == (i < 3 ? 2 : 4)); /* 1 or 2 / 0.5 */
    }
    assert_true(((tsh_real *)tsh_data(ctx, mean))[0] == 2 * 3 - 1);
    assert_true(fabs((double)((tsh_real *)tsh_data(ctx, var))[0] - (2 * 3 - 4.0 / 3)) < 1e-5);
    tsh_close(ctx);
}

/* A NaN makes its own channel NaN, and no other. */
static void nan_stays_in_its_channel(void **state) {
    const tsh_batch_norm_options options = {.training = 1};
    tsh_ctx *ctx;
    tsh_tensor *x, *y;
    (void)state;
    assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
    x = same_leaf(ctx, 1, "4,3,2", 1, 1);
    ((tsh_real *)tsh_data(ctx, x))[3] = (tsh_real)NAN; /* sample 0, channel 1 */
    for (int k = 0; k < 2; k++) {
        y = k ? tsh_instance_norm(x, NULL, NULL, 0)
              : tsh_batch_norm(x, NULL, NULL, NULL, NULL, &options);
        for (int e = 0; e < 24; e++) {
            const tsh_real v = ((tsh_real *)tsh_data(ctx, y))[e];
            assert_int_equal(v != v, e / 2 % 3 == 1 && (!k || e < 6));
        }
    }
    tsh_close(ctx);
}

/* ------------------------------------------------------------- what is refused */

static int refusals(tsh_ctx *ctx, void *user) {
    const tsh_batch_norm_options training = {.training = 1};
    tsh_tensor *x = same_leaf(ctx, 0, "4,6,2 R", 1, 1), *w = same_leaf(ctx, 0, "6 R", 1, 2);
    tsh_tensor *five = same_leaf(ctx, 0, "5 R", 1, 2), *flat = same_leaf(ctx, 0, "4 R", 1, 2);
    tsh_tensor *single = same_leaf(ctx, 0, "1,6,1 R", 1, 2), *y;
    (void)user;
    CHECK_TRUE(!tsh_batch_norm(flat, NULL, NULL, NULL, NULL, &training));
    CHECK_SAYS(TSH_ERR_SHAPE, "tsh_batch_norm: input (4) R has no dimension of channels; takes (N, "
                              "C) or (N, C, ..)");
    CHECK_TRUE(!tsh_batch_norm(x, five, NULL, NULL, NULL, &training));
    CHECK_SAYS(TSH_ERR_SHAPE, "weight (5) R; it must have as many elements as the input has "
                              "channels");
    CHECK_TRUE(!tsh_batch_norm(x, w, NULL, NULL, NULL, NULL));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "without .training = 1 it needs running_mean and running_var");
    CHECK_TRUE(!tsh_batch_norm(x, w, NULL, w, NULL, &training));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "of running_mean and running_var one is NULL");
    CHECK_TRUE(!tsh_batch_norm(single, w, NULL, NULL, NULL, &training));
    CHECK_SAYS(TSH_ERR_SHAPE, "in training a channel needs several values, and has one");
    CHECK_TRUE(!tsh_group_norm(x, 4, w, NULL, 0));
    CHECK_SAYS(TSH_ERR_SHAPE, "4 groups do not divide the channels of input (4, 6, 2) R; groups "
                              "must be a divisor of 6");
    CHECK_TRUE(!tsh_group_norm(x, 0, w, NULL, 0));
    CHECK_SAYS(TSH_ERR_SHAPE, "0 groups");
    CHECK_TRUE(!tsh_instance_norm(single, w, NULL, 0));
    CHECK_SAYS(TSH_ERR_SHAPE, "takes (N, C, ..) with several values of each channel");
    CHECK_TRUE(
        !tsh_batch_norm(tsh_redistribute(x, tsh_sharded(1)), w, NULL, NULL, NULL, &training));
    CHECK_SAYS(TSH_ERR_LAYOUT, "all that has a number per channel must be sharded alike");
    CHECK_TRUE(
        !tsh_batch_norm(x, tsh_redistribute(w, tsh_sharded(0)), NULL, NULL, NULL, &training));
    CHECK_SAYS(TSH_ERR_LAYOUT, "must be replicated");
    CHECK_TRUE(!tsh_group_norm(tsh_redistribute(x, tsh_sharded(2)), 2, w, NULL, 0));
    CHECK_SAYS(TSH_ERR_LAYOUT, "is sharded within groups");
    CHECK_TRUE(!tsh_group_norm(tsh_redistribute(x, tsh_partial()), 2, w, NULL, 0));
    CHECK_SAYS(TSH_ERR_LAYOUT, "is a partial sum");
    if (tsh_tp(ctx)->size > 1) {
        CHECK_TRUE(!tsh_group_norm(tsh_redistribute(x, tsh_sharded(1)), 1,
                                   tsh_redistribute(w, tsh_sharded(0)), NULL, 0));
        CHECK_SAYS(TSH_ERR_LAYOUT, "which are no whole groups of 6; cut it in whole groups: "
                                   "tsh_redistribute(x, tsh_shard_units(1, 6))");
    }
    y = tsh_mul(w, five ? w : w); /* an op that used the running mean */
    CHECK_TRUE(y && !tsh_batch_norm(x, NULL, NULL, w, w, &training));
    CHECK_SAYS(TSH_ERR_STATE, "ops are recorded that used the running statistics");
    return 0;
}

static void mistakes_are_named(void **state) {
    (void)state;
    ranks_run(1, refusals, NULL);
    ranks_run(2, refusals, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pytorch_gives_the_same),
        cmocka_unit_test(differences_are_the_gradients),
        cmocka_unit_test(layouts_give_the_dense_result),
        cmocka_unit_test(collectives_are_few),
        cmocka_unit_test(replicas_share_statistics),
        cmocka_unit_test(halves_are_rounded_once),
        cmocka_unit_test(empty_inputs_are_taken),
        cmocka_unit_test(negative_options_are_taken_as_they_are),
        cmocka_unit_test(nan_stays_in_its_channel),
        cmocka_unit_test(mistakes_are_named),
    };
    return cmocka_run_group_tests_name("op/channel_norm", tests, NULL, NULL);
}
