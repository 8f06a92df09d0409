/* LSTM and GRU: outputs, last states and all gradients against PyTorch's, by the kernels of every
 * instruction set; gradients against central differences; every layout at every degree, where
 * values keep their bits; threads; bf16; dropout; what is refused. */
/* build: double */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/golden.h"
#include "../support/library.h"
#include "../support/ranks.h"

#include <float.h>

enum { WEIGHTS = 16 };

typedef struct recurrent_case {
    const char *name;              /* in the golden file, after "lstm_" or "gru_" */
    int layers, both, first, free; /* free: without biases */
} recurrent_case;

static const recurrent_case cases[] = {
    {"plain", 1, 0, 0, 0}, {"state", 1, 0, 0, 0}, {"free", 1, 0, 0, 1}, {"first", 1, 0, 1, 0},
    {"both", 1, 1, 0, 0},  {"two", 2, 0, 0, 0},   {"all", 2, 1, 1, 0},  {"all_free", 2, 1, 0, 1},
    {"step", 1, 0, 0, 0},  {"one", 1, 0, 0, 0},   {"flat", 1, 0, 0, 0}, {"wide", 1, 0, 0, 0}};

static tsh_recurrent_desc desc_of(const recurrent_case *c) {
    tsh_recurrent_desc desc = {.layers = c->layers,
                               .bidirectional = c->both,
                               .batch_first = c->first,
                               .bias = c->free ? TSH_NO : TSH_USUAL};
    return desc;
}

/* ------------------------------------------------------------------- PyTorch's */

static void compare(tsh_ctx *ctx, const golden_file *g, const char *name, const char *what,
                    tsh_tensor *t) {
    golden_tensor want = golden_get(g, name, what);
    double *got;
    if (!t || !tsh_ok(ctx)) fail_msg("%s.%s: %s", name, what, tsh_last_error(ctx)->message);
    assert_int_equal(tsh_numel(t), want.count);
    assert_int_equal(tsh_shape_of(t).ndim, want.shape.ndim);
    got = ranks_values(ctx, t);
    assert_non_null(got);
    for (int64_t i = 0; i < want.count; i++) {
        const double y = (double)((const float *)want.data)[i], scale = fabs(y) > 1 ? fabs(y) : 1;
        if (!(fabs(got[i] - y) <= 60 * (double)FLT_EPSILON * scale))
            fail_msg("%s.%s[%ld] is %.9g, not %.9g", name, what, (long)i, got[i], y);
    }
    free(got);
}

static tsh_tensor *golden_leaf(tsh_ctx *ctx, const golden_file *g, const char *name,
                               const char *what) {
    golden_tensor t;
    if (!golden_find(g, name, what, &t)) return NULL;
    return tsh_requires_grad(golden_load(ctx, &t), 1);
}

/* The name of weight i, in PyTorch's order. */
static const char *weight_name(const recurrent_case *c, int i, char *name) {
    static const char *const kinds[] = {"weight_ih", "weight_hh", "bias_ih", "bias_hh"};
    const int each = c->free ? 2 : 4, at = i / each;
    (void)snprintf(name, 32, "%s_l%d%s", kinds[i % each], at / (1 + c->both),
                   at % (1 + c->both) ? "_reverse" : "");
    return name;
}

/* x as a view whose rows are equally far apart, but not adjacent (1), or not even that (2). */
static tsh_tensor *spread(tsh_tensor *x, int how) {
    if (how == 0) return x;
    if (how == 1)
        return tsh_slice(tsh_concat((tsh_tensor *const[]){x, x}, 2, -1), -1, 0, tsh_size(x, -1));
    return tsh_transpose(tsh_clone(tsh_transpose(x, 0, 1)), 0, 1);
}

static void one_case(tsh_ctx *ctx, const golden_file *g, const recurrent_case *c, int lstm,
                     int how) {
    const tsh_recurrent_desc desc = desc_of(c);
    const int count = c->layers * (1 + c->both) * (c->free ? 2 : 4);
    tsh_tensor *w[WEIGHTS], *x, *h0, *c0, *y, *h = NULL, *cell = NULL, *loss, *given[3];
    char name[64], what[64], text[32];
    golden_tensor t;
    (void)snprintf(name, sizeof name, "%s_%s", lstm ? "lstm" : "gru", c->name);
    x = golden_leaf(ctx, g, name, "x");
    h0 = golden_leaf(ctx, g, name, "h0");
    c0 = golden_leaf(ctx, g, name, "c0");
    for (int i = 0; i < count; i++) w[i] = golden_leaf(ctx, g, name, weight_name(c, i, text));
    y = lstm ? tsh_lstm(spread(x, how), w, count, h0, c0, &desc, &h, &cell)
             : tsh_gru(spread(x, how), w, count, h0, &desc, &h);
    compare(ctx, g, name, "y", y);
    compare(ctx, g, name, "h", h);
    if (lstm) compare(ctx, g, name, "c", cell);
    for (int i = 0; i < 2 + lstm; i++) {
        t = golden_get(g, name, i == 0 ? "gy" : i == 1 ? "gh" : "gc");
        given[i] = golden_load(ctx, &t);
    }
    loss = tsh_add(tsh_sum(tsh_mul(y, given[0]), TSH_ALL, 0),
                   tsh_sum(tsh_mul(h, given[1]), TSH_ALL, 0));
    if (lstm) loss = tsh_add(loss, tsh_sum(tsh_mul(cell, given[2]), TSH_ALL, 0));
    assert_int_equal(tsh_backward(ctx, loss), TSH_OK);
    compare(ctx, g, name, "dx", tsh_grad(x));
    if (h0) compare(ctx, g, name, "dh0", tsh_grad(h0));
    if (c0) compare(ctx, g, name, "dc0", tsh_grad(c0));
    for (int i = 0; i < count; i++) {
        (void)snprintf(what, sizeof what, "d%s", weight_name(c, i, text));
        compare(ctx, g, name, what, tsh_grad(w[i]));
        tsh_tensor_free(w[i]);
    }
    (void)tsh_step_end(ctx);
    for (int i = 0; i < 2 + lstm; i++) tsh_tensor_free(given[i]);
    tsh_tensor_free(x);
    tsh_tensor_free(h0);
    tsh_tensor_free(c0);
}

static void pytorch_gives_the_same(void **state) {
    golden_file g = golden_open("recurrent");
    tsh_ctx *ctx;
    (void)state;
    assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
    for (int isa = library_isa(ctx); isa >= 0; isa--) {
        library_set_isa(ctx, isa);
        for (int i = 0; i < 2 * COUNT(cases); i++)
            for (int how = 0; how < 3; how++)
                one_case(ctx, &g, &cases[i / 2], i % 2,
                         strcmp(cases[i / 2].name, "flat") ? how : 0);
    }
    assert_true(tsh_ok(ctx));
    tsh_close(ctx);
    golden_finish(&g);
}

/* --------------------------------------------------------- central differences */

static tsh_tensor *checked_loss(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {
    const int lstm = *(const int *)user;
    const tsh_recurrent_desc desc = {.bidirectional = 1};
    tsh_tensor *h, *c, *y, *w[8];
    for (int i = 0; i < 8; i++) w[i] = tsh_scale(in[2 + i % 4], i < 4 ? 0.2 : -0.15);
    y = lstm ? tsh_lstm(in[0], w, 8, in[1], in[n - 1], &desc, &h, &c)
             : tsh_gru(in[0], w, 8, in[1], &desc, &h);
    y = tsh_add(ranks_loss(ctx, y), ranks_loss(ctx, h));
    return lstm ? tsh_add(y, ranks_loss(ctx, c)) : y;
}

static void differences_are_the_gradients(void **state) {
    static const char *const shapes[][7] = {{"3,2,3", "2,2,2", "6,3", "6,2", "6", "6", "2,2,2"},
                                            {"3,2,3", "2,2,2", "8,3", "8,2", "8", "8", "2,2,2"}};
    /* h^2 / 6 times the third derivative, and u |L| / h, as in test_gradcheck.c */
    const double most = sizeof(tsh_real) == 8 ? 1e-7 : 3e-2;
    tsh_ctx *ctx;
    (void)state;
    assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
    for (int lstm = 0; lstm < 2; lstm++) {
        tsh_tensor *in[7];
        double worst;
        for (int i = 0; i < 7; i++) in[i] = same_leaf(ctx, 1, shapes[lstm][i], 1, 3 + (uint64_t)i);
        worst = tsh_gradcheck(ctx, checked_loss, in, 6 + lstm, &lstm, 0, 0);
        if (!(worst >= 0 && worst <= most))
            fail_msg("%d: off by %g (%s)", lstm, worst, tsh_last_error(ctx)->message);
        for (int i = 0; i < 7; i++) tsh_tensor_free(in[i]);
        (void)tsh_step_end(ctx);
    }
    tsh_close(ctx);
}

/* --------------------------------------------------------------------- layouts */

/* "lstm" or "gru"; "first", "both", "two"; "state": with h0 and c0, "cut" as the last h is. Inputs:
 * x, W_ih, W_hh, the bias, of all layers and directions. Gives h of all steps plus the last h and
 * c. */
static tsh_tensor *op_recurrent(probe *p) {
    const int lstm = probe_has(p, "lstm"), first = probe_has(p, "first");
    const tsh_recurrent_desc desc = {.bidirectional = probe_has(p, "both"),
                                     .batch_first = first,
                                     .layers = probe_has(p, "two") ? 2 : 1};
    const int64_t batch = tsh_size(p->in[0], !first), hidden = tsh_size(p->in[2], 1);
    const int units = tsh_layout_of(p->in[1]).kind == TSH_SHARDED, cut = probe_has(p, "cut");
    const int count = 4 * desc.layers * (1 + desc.bidirectional);
    tsh_tensor *w[WEIGHTS], *h, *c = NULL, *y, *state[2] = {NULL, NULL};
    if (!lstm && !probe_has(p, "gru")) return NULL;
    for (int i = 0; i < count; i++)
        w[i] = tsh_scale(p->in[i % 4 == 3 ? 3 : 1 + i % 4], i < 4 ? 0.125 : -0.0625);
    for (int k = 0; k < 1 + lstm && probe_has(p, "state"); k++) {
        const tsh_shape shape = tsh_shape3(count / 4, batch, hidden);
        const tsh_layout layout = !cut || p->dense ? tsh_replicated()
                                  : units ? tsh_shard_units(2, probe_has(p, "pairs") ? 2 : 1)
                                          : tsh_sharded(1);
        state[k] = tsh_requires_grad(tsh_tensor_new(p->ctx, TSH_REAL, shape, layout), 1);
        p->watched[k] = state[k];
        ranks_set(p->ctx, state[k], 20 + (uint64_t)k);
    }
    (void)probe_has(p, "pairs");
    y = lstm ? tsh_lstm(p->in[0], w, count, state[0], state[1], &desc, &h, &c)
             : tsh_gru(p->in[0], w, count, state[0], &desc, &h);
    if (count > 4) return y; /* whose last dimension is longer than that of h */
    if (c) h = tsh_add(h, c);
    return tsh_add(y, first ? tsh_transpose(h, 0, 1) : h);
}

/* The gradient of x is summed over ranks where units are sharded, those of the weights where
 * samples are. */
#define ROUNDING             3e-5
#define ROUND(arg, out, ...) TRIAL(op_recurrent, arg, out, ROUNDING, 0, __VA_ARGS__)
#define EXACT(arg, out, ...) TRIAL(op_recurrent, arg, out, 0, TRIAL_VALUES, __VA_ARGS__)
#define CUT4(unit)           "S(0, 4 segments, unit " #unit ")"
#define CUT3                 "S(0, 3 segments, unit 1)"
#define UNITS4               "4n,3 " CUT4(1), "4n,n " CUT4(1), "4n " CUT4(1)
#define UNITS3               "3n,3 " CUT3, "3n,n " CUT3, "3n " CUT3
#define PAIRS4               "8n,3 " CUT4(2), "8n,2n " CUT4(2), "8n " CUT4(2)

static const trial rows[] = {
    EXACT("lstm state", "R", "3,2,3 R", "4n,3 R", "4n,n R", "4n R"),
    EXACT("lstm state", "S(1)", "3,n,3 S(1)", "8,3 R", "8,2 R", "8 R"),
    EXACT("gru state cut", "S(1)", "3,n,3 S(1)", "6,3 R", "6,2 R", "6 R"),
    EXACT("lstm first state", "S(0)", "n,3,3 S(0)", "8,3 R", "8,2 R", "8 R"),
    EXACT("lstm state", "S(2)", "3,2,3 R", UNITS4),
    EXACT("lstm state cut pairs", "S(2, unit 2)", "3,2,3 R", PAIRS4),
    EXACT("gru state cut", "S(2)", "3,2,3 R", UNITS3),
    EXACT("gru first", "S(2)", "2,3,3 R", UNITS3),
    EXACT("gru both", "S(2, 2 segments, unit 1)", "3,2,3 R", UNITS3),
    ROUND("lstm state", "R", "3,2,3 R", "4n,3 R", "4n,n R", "4n R"),
    ROUND("lstm state", "S(1)", "3,n,3 S(1)", "8,3 R", "8,2 R", "8 R"),
    ROUND("gru state", "S(1)", "3,n,3 S(1)", "6,3 R", "6,2 R", "6 R"),
    ROUND("lstm", "S(2)", "3,2,3 R", UNITS4),
    ROUND("lstm state", "S(2)", "3,2,3 R", UNITS4),
    ROUND("lstm first state", "S(2, unit 2)", "2,3,3 R", PAIRS4),
    ROUND("gru state", "S(2)", "3,2,3 R", UNITS3),
    ROUND("gru first", "S(2)", "2,3,3 R", UNITS3),
    ROUND("lstm both state", "S(2, 2 segments, unit 1)", "3,2,3 R", UNITS4),
    /* two layers, whose inputs have as many features as h */
    ROUND("lstm two state", "S(2)", "3,2,n R", "4n,n " CUT4(1), "4n,n " CUT4(1), "4n " CUT4(1)),
};

static void layouts_give_the_dense_result(void **state) {
    static const int64_t lengths[] = {1, 5, 8};
    (void)state;
    trials_prove(rows, COUNT(rows), lengths, COUNT(lengths));
}

/* ------------------------------------------------------------- the other cases */

/* h of all steps, and the gradients of x and W_hh, of units and a batch that fill several tiles and
 * end within one. */
static void threads_run(int threads, int lstm, double **got) {
    static const char *const shapes[] = {"450,20", "450,150", "450", "450",
                                         "600,20", "600,150", "600", "600"};
    tsh_tensor *x, *h0, *w[4], *scaled[4], *h, *c, *y;
    tsh_desc desc;
    tsh_ctx *ctx;
    memset(&desc, 0, sizeof desc);
    desc.threads = threads;
    assert_int_equal(tsh_open(&desc, &ctx), TSH_OK);
    x = same_leaf(ctx, 1, "3,40,20", 1, 1);
    h0 = same_leaf(ctx, 1, "1,40,150", 1, 9);
    for (int i = 0; i < 4; i++) {
        w[i] = same_leaf(ctx, 1, shapes[4 * lstm + i], 1, 2 + (uint64_t)i);
        scaled[i] = tsh_scale(w[i], 0.01);
    }
    y = lstm ? tsh_lstm(x, scaled, 4, h0, NULL, NULL, &h, &c) : tsh_gru(x, scaled, 4, h0, NULL, &h);
    got[0] = ranks_values(ctx, y);
    assert_int_equal(tsh_backward(ctx, tsh_add(ranks_loss(ctx, y), ranks_loss(ctx, h))), TSH_OK);
    got[1] = ranks_values(ctx, tsh_grad(x));
    got[2] = ranks_values(ctx, tsh_grad(w[1]));
    tsh_close(ctx);
}

static void threads_change_no_bit(void **state) {
    const size_t counts[3] = {3 * 40 * 150, 3 * 40 * 20, 450 * 150};
    (void)state;
    for (int lstm = 0; lstm < 2; lstm++) {
        double *want[3], *got[3];
        threads_run(1, lstm, want);
        for (int threads = 2; threads <= 3; threads++) {
            threads_run(threads, lstm, got);
            for (int k = 0; k < 3; k++)
                assert_memory_equal(got[k], want[k], counts[k] * sizeof(double));
            for (int k = 0; k < 3; k++) free(got[k]);
        }
        for (int k = 0; k < 3; k++) free(want[k]);
    }
}

/* bf16 and f16: h and c stay in tsh_real from step to step, and outputs are rounded once. */
static void halves_are_rounded_once(void **state) {
    static const tsh_dtype dtypes[] = {TSH_BF16, TSH_F16};
    static const char *const shapes[] = {"6,3", "6,2", "6", "6", "8,3", "8,2", "8", "8"};
    tsh_ctx *ctx;
    (void)state;
    assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
    for (int i = 0; i < 4; i++) {
        const int lstm = i % 2;
        tsh_tensor *x = same_leaf(ctx, 1, "4,2,3", 1, 1), *w[4], *low[4], *h, *c, *a, *b, *lx;
        double *want, *got;
        lx = tsh_cast(x, dtypes[i / 2]); /* small integers are exact */
        for (int k = 0; k < 4; k++) {
            w[k] = tsh_scale(same_leaf(ctx, 1, shapes[4 * lstm + k], 1, 2 + (uint64_t)k), 0.25);
            low[k] = tsh_cast(w[k], dtypes[i / 2]);
        }
        a = lstm ? tsh_lstm(x, w, 4, NULL, NULL, NULL, &h, &c) : tsh_gru(x, w, 4, NULL, NULL, &h);
        b = lstm ? tsh_lstm(lx, low, 4, NULL, NULL, NULL, &h, &c)
                 : tsh_gru(lx, low, 4, NULL, NULL, &h);
        assert_int_equal(tsh_dtype_of(b), dtypes[i / 2]);
        assert_int_equal(tsh_dtype_of(h), dtypes[i / 2]);
        want = ranks_values(ctx, tsh_cast(tsh_cast(a, dtypes[i / 2]), TSH_REAL));
        got = ranks_values(ctx, tsh_cast(b, TSH_REAL));
        for (int64_t e = 0; e < tsh_numel(a); e++)
            if (got[e] != want[e]) fail_msg("%ld: %g, not %g", (long)e, got[e], want[e]);
        free(want);
        free(got);
        assert_int_equal(tsh_backward(ctx, tsh_sum(tsh_cast(b, TSH_REAL), TSH_ALL, 0)), TSH_OK);
        assert_non_null(tsh_grad(x));
        (void)tsh_step_end(ctx);
    }
    assert_true(tsh_ok(ctx));
    tsh_close(ctx);
}

/* Between two layers, dropout draws another mask at each call; an empty batch gives empty results
 * and gradients of 0. */
static int dropout_rank(tsh_ctx *ctx, void *user) {
    tsh_recurrent_desc desc = {.layers = 2, .dropout = 0.5};
    tsh_tensor *x = same_leaf(ctx, 1, "3,4,5", 1, 1), *w[8], *y, *h;
    double *got[4];
    (void)user;
    for (int k = 0; k < 8; k++)
        w[k] = tsh_scale(same_leaf(ctx, 1, k % 4 < 2 ? "15,5" : "15", 1, 2 + (uint64_t)k), 0.1);
    for (int i = 0; i < 4; i++) {
        if (i == 2) desc.dropout = 0;
        y = tsh_gru(x, w, 8, NULL, &desc, &h);
        CHECK_TRUE(y && tsh_size(h, 0) == 2);
        got[i] = ranks_values(ctx, y);
    }
    CHECK_TRUE(memcmp(got[0], got[1], 60 * sizeof(double)) != 0);
    CHECK_TRUE(memcmp(got[1], got[2], 60 * sizeof(double)) != 0);
    CHECK_TRUE(memcmp(got[2], got[3], 60 * sizeof(double)) == 0);
    for (int i = 0; i < 4; i++) free(got[i]);
    x = tsh_requires_grad(tsh_tensor_new(ctx, TSH_REAL, tsh_shape3(3, 0, 5), tsh_replicated()), 1);
    y = tsh_gru(x, w, 8, NULL, &desc, &h);
    CHECK_TRUE(y && tsh_size(y, 1) == 0 && tsh_size(h, 1) == 0);
    CHECK_TRUE(tsh_backward(ctx, tsh_sum(y, TSH_ALL, 0)) == TSH_OK);
    return 0;
}

static void dropout_acts_between_layers(void **state) {
    (void)state;
    ranks_run(1, dropout_rank, NULL);
}

/* ------------------------------------------------------------- what is refused */

static int refusals(tsh_ctx *ctx, void *user) {
    const tsh_recurrent_desc two = {.layers = 2}, odd = {.dropout = 1.5};
    static const char *const shapes[] = {"24,5", "24,6", "24", "24"};
    const tsh_layout by_units = tsh_shard_segments(0, 4, 1);
    tsh_tensor *x = same_leaf(ctx, 0, "3,4,5 R", 1, 1), *none = same_leaf(ctx, 1, "0,4,5", 1, 1);
    tsh_tensor *first = same_leaf(ctx, 1, "1,4,6", 1, 1), *more = same_leaf(ctx, 1, "2,4,6", 1, 1);
    tsh_tensor *narrow = same_leaf(ctx, 1, "1,4,5", 1, 1), *line = same_leaf(ctx, 1, "5", 1, 1);
    tsh_tensor *w[4], *cut[4], *h;
    (void)user;
    for (int i = 0; i < 4; i++) w[i] = same_leaf(ctx, 1, shapes[i], 1, 2);
    for (int i = 0; i < 4; i++) cut[i] = tsh_redistribute(w[i], tsh_sharded(0));
    CHECK_TRUE(!tsh_lstm(x, w, 4, NULL, NULL, &two, &h, NULL) && !h);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "tsh_lstm: 4 weights for 2 layers in 1 directions; takes 8");
    CHECK_TRUE(!tsh_lstm(x, NULL, 4, NULL, NULL, NULL, &h, NULL));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "tsh_lstm: 0 weights");
    CHECK_TRUE(!tsh_lstm(line, w, 4, NULL, NULL, NULL, &h, NULL));
    CHECK_SAYS(TSH_ERR_SHAPE, "tsh_lstm: x (5) R; takes (T, B, in)");
    CHECK_TRUE(!tsh_lstm(none, w, 4, NULL, NULL, NULL, &h, NULL));
    CHECK_SAYS(TSH_ERR_SHAPE, "with T of at least 1");
    CHECK_TRUE(!tsh_gru(x, w, 4, NULL, NULL, &h));
    CHECK_SAYS(TSH_ERR_SHAPE, "tsh_gru: x (3, 4, 5) R, weight_ih (24, 5) R; takes W_ih (3 H, "
                              "features of x), W_hh (3 H, H) and biases (3 H)");
    CHECK_TRUE(!tsh_lstm(x, w, 4, more, NULL, NULL, &h, NULL));
    CHECK_SAYS(TSH_ERR_SHAPE, "h0 (2, 4, 6) R; takes (1, B, H), for every layer and direction");
    CHECK_TRUE(!tsh_lstm(x, w, 4, NULL, narrow, NULL, &h, NULL));
    CHECK_SAYS(TSH_ERR_SHAPE, "has 4 samples, of 6 units each, but c0 of a layer is (1, 4, 5) R");
    CHECK_TRUE(!tsh_lstm(x, w, 4, NULL, NULL, &odd, &h, NULL));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "tsh_lstm: dropout is 1.5, not within [0, 1]");
    CHECK_TRUE(!tsh_lstm(tsh_redistribute(x, tsh_sharded(0)), w, 4, NULL, NULL, NULL, &h, NULL));
    CHECK_SAYS(TSH_ERR_LAYOUT, "replicated or sharded by samples");
    CHECK_TRUE(!tsh_lstm(tsh_redistribute(x, tsh_partial()), w, 4, NULL, NULL, NULL, &h, NULL));
    CHECK_SAYS(TSH_ERR_LAYOUT, "is a partial sum");
    CHECK_TRUE(!tsh_lstm(x, cut, 4, NULL, NULL, NULL, &h, NULL));
    CHECK_SAYS(TSH_ERR_LAYOUT, "sharded by units: tsh_shard_segments(0, 4, unit)");
    cut[0] = tsh_redistribute(w[0], by_units);
    CHECK_TRUE(!tsh_lstm(x, cut, 4, NULL, NULL, NULL, &h, NULL));
    CHECK_SAYS(TSH_ERR_LAYOUT, "all weights and biases are replicated, or all are sharded");
    for (int i = 0; i < 4; i++) cut[i] = tsh_redistribute(w[i], by_units);
    CHECK_TRUE(!tsh_lstm(tsh_redistribute(x, tsh_sharded(1)), cut, 4, NULL, NULL, NULL, &h, NULL));
    CHECK_SAYS(TSH_ERR_LAYOUT, "others a replicated one");
    CHECK_TRUE(!tsh_lstm(x, cut, 4, tsh_redistribute(first, tsh_sharded(1)), NULL, NULL, &h, NULL));
    CHECK_SAYS(TSH_ERR_LAYOUT, "h0 and c0 are replicated, or sharded as the last h is");
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
        cmocka_unit_test(threads_change_no_bit),
        cmocka_unit_test(halves_are_rounded_once),
        cmocka_unit_test(dropout_acts_between_layers),
        cmocka_unit_test(mistakes_are_named),
    };
    return cmocka_run_group_tests_name("op/recurrent", tests, NULL, NULL);
}
