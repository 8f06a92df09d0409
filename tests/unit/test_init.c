/* Initial values: every kind's distribution against its definition, shards bit for bit the slices
 * of the whole, and what is refused. */
/* build: double */
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../support/unit.h"

typedef tsh_result (*init_fn)(tsh_tensor *t, const tsh_init *desc);

static const init_fn every_init[] = {
    tsh_init_uniform,         tsh_init_normal,         tsh_init_trunc_normal,
    tsh_init_constant,        tsh_init_zeros,          tsh_init_ones,
    tsh_init_kaiming_uniform, tsh_init_kaiming_normal, tsh_init_xavier_uniform,
    tsh_init_xavier_normal,   tsh_init_orthogonal,     tsh_init_dirac,
};
static const tsh_init_kind every_kind[] = {
    TSH_INIT_UNIFORM,         TSH_INIT_NORMAL,         TSH_INIT_TRUNC_NORMAL,
    TSH_INIT_CONSTANT,        TSH_INIT_ZEROS,          TSH_INIT_ONES,
    TSH_INIT_KAIMING_UNIFORM, TSH_INIT_KAIMING_NORMAL, TSH_INIT_XAVIER_UNIFORM,
    TSH_INIT_XAVIER_NORMAL,   TSH_INIT_ORTHOGONAL,     TSH_INIT_DIRAC,
};

/* ------------------------------------------------------------------ same bits */

enum { MOST = 12 * 5 * 3 * 2 };

static const char *const forms[] = {
    "12,6 R",
    "12,6 S(0)",
    "12,6 S(1)",
    "12,6 S(0, 3 segments, unit 2)",
    "12,6 S(1, unit 3)",
    "2,6 S(0)",
    "12,5,3 S(1)",
    "12,5,3,2 S(0)",
};

/* Values and hash of each form under each kind, at one rank. */
typedef struct same {
    int dense;
    uint64_t hash[COUNT(every_init)][COUNT(forms)];
    double values[COUNT(every_init)][COUNT(forms)][MOST];
} same;

static same whole;

static int draws_the_same(tsh_ctx *ctx, void *user) {
    static const tsh_init desc = {.a = 0.25, .b = 2, .gain = 1.5, .low = -1, .high = 3};
    same *s = (same *)user;
    int i, f;
    for (i = 0; i < COUNT(every_init); i++)
        for (f = 0; f < COUNT(forms); f++) {
            spec form = spec_parse(forms[f], 1);
            tsh_tensor *t = tsh_tensor_new(ctx, TSH_REAL, form.shape, form.layout);
            double *values;
            uint64_t hash;
            size_t bytes = (size_t)tsh_numel(t) * sizeof *values;
            CHECK(every_init[i](t, f & 1 ? &desc : NULL) == TSH_OK, "kind %d, %s", i, forms[f]);
            values = ranks_values(ctx, t);
            hash = tsh_hash(ctx, t);
            if (s->dense) {
                s->hash[i][f] = hash;
                memcpy(s->values[i][f], values, bytes);
            } else {
                CHECK(memcmp(s->values[i][f], values, bytes) == 0, "kind %d, %s", i, forms[f]);
                CHECK(s->hash[i][f] == hash, "kind %d, %s: hash", i, forms[f]);
            }
            free(values);
            tsh_tensor_free(t);
        }
    CHECK_OK();
    return 0;
}

static void shards_are_slices_of_the_whole(void **state) {
    tsh_desc desc = {.seed = 3};
    int i, a, b;
    (void)state;
    whole.dense = 1;
    ranks_run_with(1, &desc, draws_the_same, &whole);
    whole.dense = 0;
    for (i = 0; i < COUNT(ranks_degrees); i++)
        ranks_run_with(ranks_degrees[i], &desc, draws_the_same, &whole);
    /* those that draw differ by kind, and by the count of draws */
    for (a = 0; a < COUNT(every_init); a++)
        for (b = 0; b < a; b++) assert_true(whole.hash[a][1] != whole.hash[b][1]);
    assert_true(whole.hash[1][1] != whole.hash[1][3]);
}

/* Parameters through their description and through the functions; a bias has the weight's fan. */
typedef struct layer_run {
    int dense, kind;
    uint64_t hash[4];
} layer_run;

static int layer_rank(tsh_ctx *ctx, void *user) {
    layer_run *run = (layer_run *)user;
    tsh_linear_desc desc = {.in = 9, .out = 14, .segments = 2};
    tsh_module *layer;
    tsh_tensor *w;
    uint64_t hash[4];
    int i;
    desc.weight_init.kind = every_kind[run->kind];
    desc.weight_init.a = 0.5;
    desc.weight_init.b = 3;
    desc.style = run->dense ? TSH_PLAIN : TSH_COLWISE;
    layer = tsh_add_linear(tsh_root(ctx), "layer", &desc);
    w = tsh_param(layer, "weight");
    CHECK(tsh_materialize(layer) == TSH_OK, "materialize");
    hash[0] = tsh_hash(ctx, w);
    desc.style = run->dense ? TSH_PLAIN : TSH_ROWWISE;
    desc.segments = 1;
    layer = tsh_add_linear(tsh_root(ctx), "row", &desc);
    w = tsh_param(layer, "weight");
    CHECK(every_init[run->kind](w, &desc.weight_init) == TSH_OK, "without memory");
    hash[1] = tsh_hash(ctx, w);
    CHECK(every_init[run->kind](w, NULL) == TSH_OK, "with memory");
    hash[2] = tsh_hash(ctx, w);
    CHECK(every_init[run->kind](w, &desc.weight_init) == TSH_OK, "again");
    CHECK(tsh_hash(ctx, w) == hash[1], "a parameter's draws are keyed by its path alone");
    CHECK(tsh_reset_parameters(tsh_root(ctx)) == TSH_OK, "reset");
    CHECK(tsh_hash(ctx, w) == hash[1], "reset");
    CHECK(tsh_hash(ctx, tsh_param(tsh_root(ctx), "layer.weight")) == hash[0], "reset");
    hash[3] = tsh_hash(ctx, tsh_param(layer, "bias"));
    for (i = 0; i < 4; i++) {
        if (run->dense) run->hash[i] = hash[i];
        CHECK(run->hash[i] == hash[i], "hash %d of kind %d", i, run->kind);
    }
    CHECK_OK();
    return 0;
}

static void parameters_are_the_same_at_every_degree(void **state) {
    layer_run run;
    int i;
    (void)state;
    for (run.kind = 0; run.kind < COUNT(every_kind); run.kind++) {
        run.dense = 1;
        ranks_run(1, layer_rank, &run);
        run.dense = 0;
        for (i = 0; i < COUNT(ranks_degrees); i++) ranks_run(ranks_degrees[i], layer_rank, &run);
    }
}

/* ------------------------------------------------------------------ distributions */

/* Mean, deviation, least and greatest of t. */
typedef struct moments {
    double mean, deviation, least, most;
} moments;

static moments moments_of(tsh_ctx *ctx, tsh_tensor *t) {
    const tsh_real *x = (const tsh_real *)tsh_data(ctx, t);
    double n = (double)tsh_numel(t);
    moments m = {0, 0, (double)INFINITY, -(double)INFINITY};
    int64_t e;
    for (e = 0; e < tsh_numel(t); e++) {
        double v = (double)x[e];
        m.mean += v / n;
        m.least = v < m.least ? v : m.least;
        m.most = v > m.most ? v : m.most;
    }
    for (e = 0; e < tsh_numel(t); e++)
        m.deviation += ((double)x[e] - m.mean) * ((double)x[e] - m.mean) / n;
    m.deviation = sqrt(m.deviation);
    return m;
}

/* A weight (out, in, k) of so many values that the mean is good to 5 deviations / sqrt n. */
enum { OUT = 120, IN = 80, K = 5, VALUES = OUT * IN * K };

static void expect_moments(tsh_ctx *ctx, init_fn fn, const tsh_init *desc, double mean,
                           double deviation, double least, double most) {
    tsh_tensor *t = tsh_tensor_new(ctx, TSH_REAL, tsh_shape3(OUT, IN, K), tsh_replicated());
    double room = 5 / sqrt(VALUES);
    moments m;
    assert_int_equal(fn(t, desc), TSH_OK);
    m = moments_of(ctx, t);
    EXPECT_NEAR(m.mean, mean, room * deviation + 1e-7);
    EXPECT_NEAR(m.deviation, deviation, room * deviation + 1e-7);
    assert_true(m.least >= least - 1e-6 && m.most <= most + 1e-6);
    if (least > -(double)INFINITY) { /* the ends are nearly reached */
        EXPECT_NEAR(m.least, least, 0.01 * (most - least) + 1e-7);
        EXPECT_NEAR(m.most, most, 0.01 * (most - least) + 1e-7);
    }
    tsh_tensor_free(t);
}

static void uniform_around(tsh_ctx *ctx, init_fn fn, const tsh_init *desc, double bound) {
    expect_moments(ctx, fn, desc, 0, bound / sqrt(3), -bound, bound);
}

static void every_kind_has_its_distribution(void **state) {
    const double no_end = (double)INFINITY, fan_in = IN * K, fan_out = OUT * K;
    tsh_init d = {.a = 2, .b = 5};
    tsh_ctx *ctx = unit_open(NULL);
    (void)state;
    expect_moments(ctx, tsh_init_uniform, NULL, 0.5, sqrt(1.0 / 12), 0, 1);
    expect_moments(ctx, tsh_init_uniform, &d, 3.5, sqrt(9.0 / 12), 2, 5);
    expect_moments(ctx, tsh_init_normal, NULL, 0, 1, -no_end, no_end);
    expect_moments(ctx, tsh_init_normal, &d, 2, 5, -no_end, no_end); /* ml's biased_normal */
    expect_moments(ctx, tsh_init_constant, &d, 2, 0, 2, 2);
    expect_moments(ctx, tsh_init_constant, NULL, 0, 0, 0, 0);
    expect_moments(ctx, tsh_init_zeros, &d, 0, 0, 0, 0);
    expect_moments(ctx, tsh_init_ones, &d, 1, 0, 1, 1);
    uniform_around(ctx, tsh_init_kaiming_uniform, NULL, sqrt(6 / fan_in));
    uniform_around(ctx, tsh_init_xavier_uniform, NULL, sqrt(6 / (fan_in + fan_out)));
    expect_moments(ctx, tsh_init_kaiming_normal, NULL, 0, sqrt(2 / fan_in), -no_end, no_end);
    expect_moments(ctx, tsh_init_xavier_normal, NULL, 0, sqrt(2 / (fan_in + fan_out)), -no_end,
                   no_end);
    d.gain = 3;
    d.fan_out = 1;
    uniform_around(ctx, tsh_init_kaiming_uniform, &d, 3 * sqrt(6 / (5 * fan_out)));
    uniform_around(ctx, tsh_init_xavier_uniform, &d, 3 * sqrt(6 / (fan_in + fan_out)));
    expect_moments(ctx, tsh_init_kaiming_normal, &d, 0, 3 * sqrt(2 / (5 * fan_out)), -no_end,
                   no_end);
    /* a normal cut at 2 deviations has deviation 0.8796256610342398 */
    expect_moments(ctx, tsh_init_trunc_normal, NULL, 0, 0.8796256610342398, -2, 2);
    d.a = 1;
    d.b = 3;
    d.low = -5;
    d.high = 7;
    expect_moments(ctx, tsh_init_trunc_normal, &d, 1, 3 * 0.8796256610342398, -5, 7);
    d.b = 0;
    expect_moments(ctx, tsh_init_trunc_normal, &d, 1, 0, 1, 1);
    unit_close(ctx);
}

/* Where a normal is cut far out: P(x < v) follows from the tails alone, whichever side. */
static void far_tails_keep_their_shape(void **state) {
    tsh_init up = {.a = 0, .b = 1, .low = 6, .high = 7};
    tsh_init down = {.a = 0, .b = 1, .low = -7, .high = -6};
    tsh_ctx *ctx = unit_open(NULL);
    tsh_tensor *t = tsh_tensor_new(ctx, TSH_REAL, tsh_shape1(VALUES), tsh_replicated());
    const double cut[] = {6.05, 6.1, 6.2, 6.5};
    const double all = erfc(6 / sqrt(2.0)) - erfc(7 / sqrt(2.0));
    int64_t e;
    int i, side;
    (void)state;
    for (side = 0; side < 2; side++)
        for (i = 0; i < COUNT(cut); i++) {
            double share = 0, p = (erfc(6 / sqrt(2.0)) - erfc(cut[i] / sqrt(2.0))) / all;
            const tsh_real *x = (const tsh_real *)tsh_data(ctx, t);
            assert_int_equal(tsh_init_trunc_normal(t, side ? &down : &up), TSH_OK);
            for (e = 0; e < VALUES; e++) {
                double v = fabs((double)x[e]);
                assert_true(v >= 6 && v <= 7 && (x[e] < 0) == side);
                share += v < cut[i] ? 1.0 / VALUES : 0;
            }
            EXPECT_NEAR(share, p, 5 * sqrt(p * (1 - p) / VALUES));
        }
    unit_close(ctx);
}

static void the_quantile_is_the_inverse(void **state) {
    double x;
    (void)state;
    for (x = -8; x <= 5; x += 0.0625) /* above, 1 - p has no more digits */
        EXPECT_NEAR(tshi_rng_quantile(tshi_rng_cdf(x)), x, x > 2 ? 1e-9 : 1e-13);
    assert_true(tshi_rng_quantile(0.5) == 0 || fabs(tshi_rng_quantile(0.5)) < 1e-15);
    assert_true(isinf(tshi_rng_quantile(0)) && isinf(tshi_rng_quantile(1)));
}

/* ------------------------------------------------------------------ orthogonal, dirac */

static double at(const tsh_real *q, int64_t cols, int turned, int64_t vector, int64_t i) {
    return (double)(turned ? q[vector * cols + i] : q[i * cols + vector]);
}

/* Q's shorter side is orthonormal, and R = Q^T A is upper triangular with a positive diagonal: so
 * it is the Q that torch.nn.init.orthogonal_ makes of the same normal matrix A. */
static void check_orthogonal(tsh_ctx *ctx, tsh_shape shape, double gain) {
    tsh_init desc = {.gain = gain};
    tsh_tensor *t = tsh_tensor_new(ctx, TSH_REAL, shape, tsh_replicated());
    const tsh_real *q = (const tsh_real *)tsh_data(ctx, t);
    int64_t rows = shape.dim[0], cols = tsh_numel(t) / rows, i, j, k;
    int wide = rows < cols;
    int64_t n = wide ? rows : cols, m = wide ? cols : rows;
    uint64_t stream = tshi_rng_hash(ctx->randn_calls, "init", 4);
    double scale = gain > 0 ? gain : 1;
    assert_int_equal(tsh_init_orthogonal(t, &desc), TSH_OK);
    for (i = 0; i < n; i++)
        for (j = 0; j < n; j++) {
            double dot = 0, r = 0;
            for (k = 0; k < m; k++) {
                uint64_t e = (uint64_t)(wide ? j * cols + k : k * cols + j);
                dot += at(q, cols, wide, i, k) * at(q, cols, wide, j, k);
                r += at(q, cols, wide, i, k) / scale * tshi_rng_normal(ctx->seed, stream, e);
            }
            EXPECT_NEAR(dot, i == j ? scale * scale : 0, 1e-6 * scale * scale);
            if (i > j) EXPECT_NEAR(r, 0, 1e-5);
            if (i == j) assert_true(r > 0);
        }
    tsh_tensor_free(t);
}

static void orthogonal_is_the_q_of_qr(void **state) {
    tsh_desc desc = {.seed = 12};
    tsh_ctx *ctx = unit_open(&desc);
    (void)state;
    check_orthogonal(ctx, tsh_shape2(7, 7), 0);
    check_orthogonal(ctx, tsh_shape2(60, 13), 1);
    check_orthogonal(ctx, tsh_shape2(13, 60), 2.5);
    check_orthogonal(ctx, tsh_shape3(6, 4, 3), 0.5);
    check_orthogonal(ctx, tsh_shape4(30, 2, 3, 2), 0);
    check_orthogonal(ctx, tsh_shape2(1, 9), 0);
    check_orthogonal(ctx, tsh_shape2(9, 1), 0);
    check_orthogonal(ctx, tsh_shape2(96, 96), 0);
    unit_close(ctx);
}

static void dirac_keeps_channels(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_tensor *t = tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(3, 2), tsh_replicated());
    int64_t e, i, j, k, l;
    const tsh_real *x;
    (void)state;
    assert_int_equal(tsh_init_dirac(t, NULL), TSH_OK);
    EXPECT_TEXT(t, "(3, 2) R: 1 0 / 0 1 / 0 0");
    t = tsh_tensor_new(ctx, TSH_REAL, tsh_shape3(2, 3, 4), tsh_replicated());
    assert_int_equal(tsh_init_dirac(t, NULL), TSH_OK);
    EXPECT_TEXT(t, "(2, 3, 4) R: 0 0 1 0 / 0 0 0 0 / 0 0 0 0 / / 0 0 0 0 / 0 0 1 0 / 0 0 0 0");
    t = tsh_tensor_new(ctx, TSH_REAL, tsh_shape4(5, 3, 2, 5), tsh_replicated());
    assert_int_equal(tsh_init_dirac(t, NULL), TSH_OK);
    x = (const tsh_real *)tsh_data(ctx, t);
    for (e = 0, i = 0; i < 5; i++)
        for (j = 0; j < 3; j++)
            for (k = 0; k < 2; k++)
                for (l = 0; l < 5; l++, e++)
                    assert_true(x[e] == (i == j && k == 1 && l == 2 ? 1 : 0));
    unit_close(ctx);
}

/* ------------------------------------------------------------------ reset, refusals */

static tsh_tensor *loss_of(tsh_ctx *ctx, tsh_module *root) {
    tsh_tensor *x = tsh_ones(ctx, tsh_shape2(2, 4));
    x = tsh_forward(tsh_find(root, "b"), tsh_forward(tsh_find(root, "a"), x));
    return tsh_full_tensor(tsh_sum(x, TSH_ALL, 0));
}

static int resets(tsh_ctx *ctx, void *user) {
    tsh_linear_desc desc = {.in = 4, .out = 4, .weight_init = {.kind = TSH_INIT_ORTHOGONAL}};
    tsh_module *root = tsh_root(ctx);
    tsh_tensor *w, *bias;
    uint64_t hash, bias_hash;
    int step;
    (void)user;
    desc.style = TSH_COLWISE;
    desc.gather_output = 1;
    CHECK(tsh_add_linear(root, "a", &desc) && tsh_add_linear(root, "b", &desc), "two layers");
    w = tsh_param(root, "a.weight");
    bias = tsh_param(root, "b.bias");
    CHECK(tsh_tie(tsh_find(root, "b"), "weight", w) == TSH_OK, "tied");
    CHECK(tsh_reset_parameters(root) == TSH_OK, "also where there is no memory yet");
    hash = tsh_hash(ctx, w);
    bias_hash = tsh_hash(ctx, bias);
    for (step = 0; step < 3; step++) {
        CHECK(tsh_backward(ctx, loss_of(ctx, root)) == TSH_OK, "backward");
        CHECK(tsh_grad(w) && tsh_grad(bias), "gradients");
        CHECK(tsh_init_ones(w, NULL) == TSH_OK && tsh_init_zeros(bias, NULL) == TSH_OK, "other");
        CHECK(tsh_hash(ctx, w) != hash && tsh_hash(ctx, bias) != bias_hash, "other values");
        CHECK(tsh_reset_parameters(root) == TSH_OK, "reset");
        CHECK(tsh_hash(ctx, w) == hash && tsh_hash(ctx, bias) == bias_hash, "the first values");
        CHECK(!tsh_grad(w) && !tsh_grad(bias), "gradients are forgotten");
        CHECK(tsh_step_end(ctx) == TSH_OK, "step");
    }
    return 0;
}

/* A padding row starts at 0, and does again; tsh_init_normal overwrites it, as torch's normal_. */
static int padding_row(tsh_ctx *ctx, void *user) {
    tsh_embedding_desc desc = {.count = 5, .dim = 2, .style = TSH_ROWWISE};
    tsh_module *table;
    tsh_tensor *w;
    double *first, *drawn, *again;
    (void)user;
    desc.lookup.padding = 1;
    desc.lookup.padding_idx = -2;
    table = tsh_add_embedding(tsh_root(ctx), "table", &desc);
    w = tsh_param(table, "weight");
    CHECK(tsh_materialize(table) == TSH_OK, "materialize");
    first = ranks_values(ctx, w);
    CHECK(tsh_init_normal(w, NULL) == TSH_OK, "normal");
    drawn = ranks_values(ctx, w);
    CHECK(tsh_reset_parameters(table) == TSH_OK, "reset");
    again = ranks_values(ctx, w);
    CHECK(first[6] == 0 && first[7] == 0 && first[5] != 0, "row 3 of 5 starts at 0");
    CHECK(drawn[6] != 0 && drawn[7] != 0 && drawn[5] == first[5], "drawn");
    CHECK(memcmp(first, again, 10 * sizeof *first) == 0, "and does again");
    free(first);
    free(drawn);
    free(again);
    return 0;
}

static void reset_gives_the_first_values(void **state) {
    int i;
    (void)state;
    for (i = 0; i < COUNT(ranks_degrees); i++) {
        ranks_run(ranks_degrees[i], resets, NULL);
        ranks_run(ranks_degrees[i], padding_row, NULL);
    }
    assert_int_equal(tsh_reset_parameters(NULL), TSH_ERR_ARGUMENT);
}

static void mistakes_are_sentences(void **state) {
    tsh_init bad = {.b = 1, .low = 3, .high = 3}, negative = {.b = -1};
    tsh_linear_desc layer = {.in = 3, .out = 2};
    tsh_layout partial = tsh_partial();
    tsh_ctx *ctx = unit_open(NULL);
    tsh_tensor *t = tsh_tensor_new(ctx, TSH_REAL, tsh_shape1(5), tsh_replicated());
    tsh_tensor *p = tsh_tensor_new(ctx, TSH_REAL, tsh_shape1(5), partial), *bias;
    int i;
    (void)state;
    for (i = 0; i < COUNT(every_init); i++) {
        assert_int_equal(every_init[i](NULL, NULL), TSH_ERR_ARGUMENT);
        assert_int_equal(every_init[i](tsh_ones(ctx, tsh_shape2(2, 2)), NULL), TSH_ERR_ARGUMENT);
        EXPECT(TSH_ERR_ARGUMENT, "takes an owned tensor");
        assert_int_equal(every_init[i](p, NULL), TSH_ERR_ARGUMENT);
        EXPECT(TSH_ERR_ARGUMENT, "not f");
        if (i < 6) continue;
        assert_int_equal(every_init[i](t, NULL), TSH_ERR_SHAPE);
        EXPECT(TSH_ERR_SHAPE, "two dimensions or more");
    }
    assert_int_equal(tsh_init_normal(tsh_tensor_new(ctx, TSH_I64, tsh_shape1(5), tsh_replicated()),
                                     NULL), TSH_ERR_ARGUMENT);
    EXPECT(TSH_ERR_ARGUMENT, "tsh_init_normal: takes an owned tensor");
    (void)tsh_init_trunc_normal(t, &bad);
    EXPECT(TSH_ERR_ARGUMENT, "of deviation 1 cannot be cut to [3, 3]");
    (void)tsh_init_trunc_normal(t, &negative);
    EXPECT(TSH_ERR_ARGUMENT, "of deviation -1 cannot be cut to [-2, 2]");
    /* what a parameter held, it holds */
    bias = tsh_param(tsh_add_linear(tsh_root(ctx), "kept", &layer), "bias");
    assert_int_equal(tsh_init_constant(bias, &(tsh_init){.a = 7}), TSH_OK);
    (void)tsh_init_trunc_normal(bias, &bad);
    EXPECT(TSH_ERR_ARGUMENT, "cannot be cut to [3, 3]");
    assert_true(tsh_item(ctx, tsh_max(bias, TSH_ALL, 0)) == 7);
    /* a layer's bias knows its fan_in; it has no fan_out */
    layer.bias_init.kind = TSH_INIT_XAVIER_UNIFORM;
    bias = tsh_param(tsh_add_linear(tsh_root(ctx), "a", &layer), "bias");
    assert_int_equal(tsh_materialize(tsh_root(ctx)), TSH_OK);
    assert_true(fabs(tsh_item(ctx, tsh_max(bias, TSH_ALL, 0))) <= sqrt(6.0 / 3));
    layer.bias_init.kind = TSH_INIT_KAIMING_NORMAL;
    layer.bias_init.fan_out = 1;
    (void)tsh_add_linear(tsh_root(ctx), "b", &layer);
    assert_int_equal(tsh_materialize(tsh_root(ctx)), TSH_ERR_SHAPE);
    EXPECT(TSH_ERR_SHAPE, "b.bias: kaiming and xavier take their fans from two dimensions");
    unit_close(ctx);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shards_are_slices_of_the_whole),
        cmocka_unit_test(parameters_are_the_same_at_every_degree),
        cmocka_unit_test(every_kind_has_its_distribution),
        cmocka_unit_test(far_tails_keep_their_shape),
        cmocka_unit_test(the_quantile_is_the_inverse),
        cmocka_unit_test(orthogonal_is_the_q_of_qr),
        cmocka_unit_test(dirac_keeps_channels),
        cmocka_unit_test(reset_gives_the_first_values),
        cmocka_unit_test(mistakes_are_sentences),
    };
    return cmocka_run_group_tests_name("unit/init", tests, NULL, NULL);
}
