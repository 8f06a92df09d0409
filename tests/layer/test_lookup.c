/* Embedding layers with every option, under every style, against the dense layer; row-sparse
 * gradients through the optimisers, tied to a classifier, and over data-parallel replicas. */
/* build: double */
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"

/* Norms and powers, and sums in another order than one rank's, of values below 4. */
static const double rounding = sizeof(tsh_real) == 4 ? 2e-6 : 1e-12;

static int64_t calls_of(tsh_ctx *ctx, tsh_coll_kind kind) {
    return (int64_t)tsh_tp(ctx)->stats.calls[kind];
}

/* ------------------------------------------------------------------ the grid
 * Vocabularies that leave ranks uneven and empty, ids that stand there several times, a padding row
 * that another rank owns. */

typedef struct grid_case {
    tsh_lookup_desc lookup;
    int64_t gathers, reduces; /* beyond those of the plain layer, under COLWISE */
    int64_t counts;           /* all-reduces beyond, of a replicated table with sharded ids */
} grid_case;

static const grid_case grid[] = {
    {{0, 0, 0, 0, 0, 0}, 0, 0, 0},   {{1, -1, 0, 0, 0, 0}, 0, 0, 0},
    {{1, 3, 0, 0, 0, 0}, 0, 0, 0},   {{0, 0, 1, 1, 0, 0}, 0, 1, 1},
    {{0, 0, 1, 0, 0, 0}, 0, 1, 1},   {{0, 0, 1, HUGE_VAL, 0, 0}, 0, 1, 1},
    {{0, 0, 2, 3.5, 0, 0}, 0, 1, 1}, {{0, 0, 0, 0, 1, 0}, 0, 0, 1},
    {{0, 0, 0, 0, 0, 1}, 0, 0, 0},   {{1, -2, 1, 1, 1, 1}, 0, 1, 1},
};

static const int64_t vocabularies[] = {5, 7, 10};

/* The case that runs: read by all ranks, written between runs. */
static struct {
    const grid_case *row;
    int64_t vocabulary;
    tsh_style style;
    const char *ids; /* their layout */
} now;

static tsh_tensor *some_ids(tsh_ctx *ctx, int dense) {
    const int64_t v = now.vocabulary, ids[8] = {3, 0, 3, v - 1, v - 1, 3, 4, 0};
    tsh_tensor *t = tsh_tensor_from(ctx, TSH_I64, tsh_shape2(2, 4), tsh_replicated(), ids);
    return dense ? t : tsh_redistribute(t, spec_layout(now.ids, 1));
}

static int grid_case_runs(tsh_ctx *ctx, int dense, capture *got) {
    tsh_embedding_desc desc = {.count = now.vocabulary, .dim = 3};
    int64_t reduces, gathers, want_reduces, want_gathers;
    tsh_module *layer;
    tsh_tensor *w, *y;
    tsh_optim *sgd;
    desc.lookup = now.row->lookup;
    if (!dense) desc.style = now.style;
    layer = tsh_add_embedding(tsh_root(ctx), "table", &desc);
    w = tsh_param(layer, "weight");
    tsh_materialize(layer);
    ranks_set(ctx, w, 40);
    sgd = tsh_optim_new(layer, &(tsh_optim_desc){.kind = TSH_SGD, .lr = 0.5});
    y = some_ids(ctx, dense);
    reduces = calls_of(ctx, TSH_ALLREDUCE);
    gathers = calls_of(ctx, TSH_ALLGATHER);
    y = tsh_forward(layer, y);
    CHECK(y, "forward");
    reduces = calls_of(ctx, TSH_ALLREDUCE) - reduces;
    gathers = calls_of(ctx, TSH_ALLGATHER) - gathers;
    want_reduces = now.style == TSH_ROWWISE   ? 1
                   : now.style == TSH_COLWISE ? now.row->reduces
                   : *now.ids == 'S'          ? now.row->counts
                                              : 0;
    want_gathers = now.style == TSH_COLWISE;
    if (!dense && tsh_tp(ctx)->size > 1)
        CHECK(reduces == want_reduces && gathers == want_gathers,
              "%d all-reduces and %d all-gathers, not %d and %d", (int)reduces, (int)gathers,
              (int)want_reduces, (int)want_gathers);
    CHECK(!capture_add(ctx, got, y), "output");
    CHECK(!capture_add(ctx, got, w), "table after max_norm");
    CHECK(tsh_backward(ctx, ranks_loss(ctx, y)) == TSH_OK, "backward");
    CHECK(!capture_add(ctx, got, tsh_grad(w)), "gradient");
    CHECK(tsh_optim_step(sgd) == TSH_OK, "step");
    CHECK(!capture_add(ctx, got, w), "table after a step");
    return 0;
}

static void every_option_equals_the_dense_layer(void **state) {
    static const tsh_style styles[] = {TSH_PLAIN, TSH_COLWISE, TSH_ROWWISE};
    static const char *const layouts[] = {"R", "S(0)", "S(1)"};
    int c, v, s, l;
    (void)state;
    for (c = 0; c < COUNT(grid); c++)
        for (v = 0; v < COUNT(vocabularies); v++)
            for (s = 0; s < COUNT(styles); s++)
                for (l = 0; l < (styles[s] == TSH_PLAIN ? COUNT(layouts) : 1); l++) {
                    now.row = &grid[c];
                    now.vocabulary = vocabularies[v];
                    now.style = styles[s];
                    now.ids = layouts[l];
                    same_prove(grid_case_runs, rounding);
                }
}

/* ------------------------------------------------------------------ padding at birth */

/* The padding row starts as zero on its owner; all other rows are as without padding. */
static int padding_rank(tsh_ctx *ctx, void *user) {
    const int64_t padding = *(const int64_t *)user, row = padding < 0 ? padding + 7 : padding;
    static const tsh_style styles[] = {TSH_PLAIN, TSH_COLWISE, TSH_ROWWISE};
    static const char *const names[] = {"plain", "col", "row"};
    tsh_embedding_desc desc = {.count = 7, .dim = 5};
    tsh_real value[35];
    for (int i = 0; i < 3; i++) {
        /* the name decides the bits: init is keyed by the path */
        tsh_module *layer, *twin = tsh_add_module(tsh_root(ctx), names[i], NULL);
        double *plain;
        memset(&desc.lookup, 0, sizeof desc.lookup);
        desc.style = styles[i];
        layer = tsh_add_embedding(twin, "e", &desc);
        tsh_materialize(layer);
        plain = ranks_values(ctx, tsh_param(layer, "weight"));
        desc.lookup.padding = 1;
        desc.lookup.padding_idx = padding;
        layer = tsh_add_embedding(twin, "f", &desc);
        tsh_param(layer, "weight")->path = tsh_param(twin, "e.weight")->path;
        tsh_materialize(layer);
        CHECK(tsh_read(ctx, tsh_param(layer, "weight"), TSH_GLOBAL, value, sizeof value) == TSH_OK,
              "%s", names[i]);
        for (int e = 0; e < 35; e++) {
            double want = e / 5 == row ? 0 : plain[e], got = (double)value[e];
            CHECK(!(got < want) && !(got > want), "%s: element %d is %g, not %g", names[i], e, got,
                  want);
        }
        free(plain);
    }
    CHECK_OK();
    return 0;
}

static void a_padding_row_starts_as_zero(void **state) {
    static const int64_t paddings[] = {0, 3, 6, -1, -7};
    (void)state;
    for (int p = 0; p < COUNT(ranks_degrees); p++)
        for (int i = 0; i < COUNT(paddings); i++) {
            int64_t padding = paddings[i];
            ranks_run(ranks_degrees[p], padding_rank, &padding);
        }
}

/* ------------------------------------------------------------------ row-sparse gradients */

enum { ROWS = 7, WIDTH = 3 };

/* Looks up n ids and adds to the gradient: sum of (row times small integers). */
static tsh_result learn(tsh_ctx *ctx, tsh_module *layer, const int64_t *ids, int64_t n) {
    tsh_tensor *t = tsh_tensor_from(ctx, TSH_I64, tsh_shape1(n), tsh_replicated(), ids);
    tsh_result result = tsh_backward(ctx, ranks_loss(ctx, tsh_forward(layer, t)));
    tsh_tensor_free(t);
    return result;
}

static tsh_module *add_table(tsh_ctx *ctx, const char *name, tsh_style style, int sparse) {
    tsh_embedding_desc desc = {.count = ROWS, .dim = WIDTH, .style = style};
    tsh_module *layer;
    desc.lookup.sparse = sparse;
    layer = tsh_add_embedding(tsh_root(ctx), name, &desc);
    tsh_materialize(layer);
    ranks_set(ctx, tsh_param(layer, "weight"), 40);
    return layer;
}

/* The largest distance between the tables of two layers. */
static double apart(tsh_ctx *ctx, tsh_module *a, tsh_module *b) {
    double *x = ranks_values(ctx, tsh_param(a, "weight"));
    double *y = ranks_values(ctx, tsh_param(b, "weight")), gap = 0;
    for (int e = 0; e < ROWS * WIDTH; e++) gap = fabs(x[e] - y[e]) > gap ? fabs(x[e] - y[e]) : gap;
    free(x);
    free(y);
    return gap;
}

static const int64_t lessons[][4] = {{0, 5, 0, 6}, {5, 2, 2, 2}, {6, 6, 3, 1}, {4, 4, 0, 5}};

/* SGD without momentum: the same bits as with a dense gradient, also clipped, also over two
 * backwards of one step; zeroing in between leaves nothing behind. */
static int sgd_rank(tsh_ctx *ctx, void *user) {
    const tsh_style style = *(const tsh_style *)user;
    const tsh_optim_desc how = {.kind = TSH_SGD, .lr = 0.1, .clip_norm = 4};
    tsh_module *layer[2];
    tsh_optim *optim[2];
    for (int i = 0; i < 2; i++) {
        layer[i] = add_table(ctx, i ? "sparse" : "dense", style, i);
        optim[i] = tsh_optim_new(layer[i], &how);
    }
    for (int step = 0; step < 4; step++) {
        double *grad[2];
        for (int i = 0; i < 2; i++) {
            CHECK(learn(ctx, layer[i], lessons[step], 4) == TSH_OK, "a lesson");
            if (step % 2) CHECK(learn(ctx, layer[i], lessons[step - 1], 4) == TSH_OK, "another");
            grad[i] = ranks_values(ctx, tsh_grad(tsh_param(layer[i], "weight")));
            CHECK(tsh_optim_step(optim[i]) == TSH_OK, "a step");
            tsh_zero_grads(layer[i]);
            tsh_zero_grads(layer[i]); /* twice is once */
        }
        CHECK(!tsh_grad(tsh_param(layer[1], "weight")), "a gradient after zeroing");
        for (int e = 0; e < ROWS * WIDTH; e++)
            CHECK(!(grad[0][e] < grad[1][e]) && !(grad[0][e] > grad[1][e]),
                  "step %d: gradient %d is %g, not %g", step, e, grad[1][e], grad[0][e]);
        free(grad[0]);
        free(grad[1]);
        CHECK(!(apart(ctx, layer[0], layer[1]) > 0), "step %d: the tables differ", step);
        CHECK(!(fabs(tsh_optim_state(optim[0]).norm - tsh_optim_state(optim[1]).norm) > 0),
              "the norms differ");
        CHECK(tsh_step_end(ctx) == TSH_OK, "the step's end");
    }
    CHECK_OK();
    return 0;
}

/* Rows that no lesson touches keep their values, where momentum would move them: Adam, AdamW with
 * decay, SGD with momentum and decay. Touched rows move. */
static int untouched_rank(tsh_ctx *ctx, void *user) {
    const tsh_style style = *(const tsh_style *)user;
    static const tsh_optim_desc how[] = {
        {.kind = TSH_ADAM, .lr = 0.1, .weight_decay = 0.1},
        {.kind = TSH_ADAMW, .lr = 0.1, .weight_decay = 0.1},
        {.kind = TSH_SGD, .lr = 0.1, .momentum = 0.9, .weight_decay = 0.1},
    };
    static const char *const names[] = {"adam", "adamw", "sgd"};
    for (int o = 0; o < 3; o++) {
        tsh_module *layer = add_table(ctx, names[o], style, 1);
        tsh_optim *optim = tsh_optim_new(layer, &how[o]);
        for (int step = 0; step < 4; step++) {
            double *before = ranks_values(ctx, tsh_param(layer, "weight")), *after;
            CHECK(learn(ctx, layer, lessons[step], 3) == TSH_OK, "a lesson");
            CHECK(learn(ctx, layer, lessons[step] + 3, 1) == TSH_OK, "the rest of it");
            CHECK(tsh_optim_step(optim) == TSH_OK, "a step");
            tsh_zero_grads(layer);
            after = ranks_values(ctx, tsh_param(layer, "weight"));
            for (int e = 0; e < ROWS * WIDTH; e++) {
                int touched = 0, moved = before[e] < after[e] || before[e] > after[e];
                for (int i = 0; i < 4; i++) touched |= lessons[step][i] == e / WIDTH;
                CHECK(moved == touched, "%s, step %d: row %d", names[o], step, e / WIDTH);
            }
            free(before);
            free(after);
            CHECK(tsh_step_end(ctx) == TSH_OK, "the step's end");
        }
    }
    CHECK_OK();
    return 0;
}

/* A classifier that shares the table makes the gradient dense: Adam moves every row, as without
 * the option. After steps of lookups alone it is row-sparse again. */
static int tied_rank(tsh_ctx *ctx, void *user) {
    const tsh_optim_desc how = {.kind = TSH_ADAM, .lr = 0.1};
    const tsh_style style = *(const tsh_style *)user;
    tsh_module *layer[2];
    tsh_optim *optim[2];
    for (int i = 0; i < 2; i++) {
        layer[i] = add_table(ctx, i ? "sparse" : "dense", style, i);
        optim[i] = tsh_optim_new(layer[i], &how);
    }
    for (int step = 0; step < 4; step++) {
        for (int i = 0; i < 2; i++) {
            tsh_tensor *t = tsh_tensor_from(ctx, TSH_I64, tsh_shape1(4), tsh_replicated(),
                                            lessons[step]),
                       *x;
            tsh_tensor *w = tsh_param(layer[i], "weight");
            if (step == 1) /* a lookup of its own, before the one that is tied */
                CHECK(learn(ctx, layer[i], lessons[0], 4) == TSH_OK, "a lesson");
            x = tsh_linear(tsh_forward(layer[i], t), w, NULL);
            CHECK(tsh_backward(ctx, ranks_loss(ctx, x)) == TSH_OK, "backward");
            if (step == 2) CHECK(learn(ctx, layer[i], lessons[0], 4) == TSH_OK, "a lesson");
            CHECK(tsh_optim_step(optim[i]) == TSH_OK, "a step");
            tsh_zero_grads(layer[i]);
            tsh_tensor_free(t);
        }
        CHECK(!(apart(ctx, layer[0], layer[1]) > 0), "step %d: the tables differ by %g", step,
              apart(ctx, layer[0], layer[1]));
        CHECK(tsh_step_end(ctx) == TSH_OK, "the step's end");
    }
    /* lookups alone again: row 2 and others rest in the sparse table only */
    for (int i = 0; i < 2; i++) {
        double *before = ranks_values(ctx, tsh_param(layer[i], "weight")), *after;
        int moved;
        CHECK(learn(ctx, layer[i], lessons[0], 4) == TSH_OK, "a lesson");
        CHECK(tsh_optim_step(optim[i]) == TSH_OK, "a step");
        after = ranks_values(ctx, tsh_param(layer[i], "weight"));
        moved = before[2 * WIDTH] < after[2 * WIDTH] || before[2 * WIDTH] > after[2 * WIDTH];
        CHECK(moved == !i, "%s: row 2 %s", i ? "sparse" : "dense", moved ? "moved" : "rested");
        free(before);
        free(after);
    }
    CHECK_OK();
    return 0;
}

typedef int (*rank_fn)(tsh_ctx *ctx, void *user);

static void under_every_style(rank_fn fn) {
    static const tsh_style styles[] = {TSH_PLAIN, TSH_COLWISE, TSH_ROWWISE};
    for (int p = 0; p < COUNT(ranks_degrees); p++)
        for (int s = 0; s < 3; s++) {
            tsh_style style = styles[s];
            ranks_run(ranks_degrees[p], fn, &style);
        }
}

static void sgd_is_the_same_with_sparse_gradients(void **state) {
    (void)state;
    under_every_style(sgd_rank);
}

static void untouched_rows_rest(void **state) {
    (void)state;
    under_every_style(untouched_rank);
}

static void a_tied_classifier_makes_it_dense(void **state) {
    static const tsh_style styles[] = {TSH_PLAIN, TSH_ROWWISE};
    (void)state;
    for (int p = 0; p < COUNT(ranks_degrees); p++)
        for (int s = 0; s < 2; s++) {
            tsh_style style = styles[s];
            ranks_run(ranks_degrees[p], tied_rank, &style);
        }
}

/* Ids sharded along the batch: a rank's partial gradient touches its own ids' rows; the marks of
 * all ranks are united. */
static int sharded_ids_rank(tsh_ctx *ctx, void *user) {
    const tsh_optim_desc how = {.kind = TSH_ADAM, .lr = 0.1};
    tsh_module *layer[2];
    tsh_optim *optim[2];
    (void)user;
    for (int i = 0; i < 2; i++) {
        layer[i] = add_table(ctx, i ? "cut" : "whole", TSH_PLAIN, 1);
        optim[i] = tsh_optim_new(layer[i], &how);
    }
    for (int step = 0; step < 4; step++) {
        for (int i = 0; i < 2; i++) {
            tsh_tensor *t = tsh_tensor_from(ctx, TSH_I64, tsh_shape1(4), tsh_replicated(),
                                            lessons[step]);
            tsh_tensor *ids = i ? tsh_redistribute(t, tsh_sharded(0)) : t;
            CHECK(tsh_backward(ctx, ranks_loss(ctx, tsh_forward(layer[i], ids))) == TSH_OK, "%d",
                  i);
            if (step == 2) CHECK(learn(ctx, layer[i], lessons[0], 4) == TSH_OK, "a lesson");
            CHECK(tsh_optim_step(optim[i]) == TSH_OK, "a step");
            tsh_zero_grads(layer[i]);
            tsh_tensor_free(t);
        }
        /* gradients are small integers: the same bits */
        CHECK(!(apart(ctx, layer[0], layer[1]) > 0), "step %d: the tables differ by %g", step,
              apart(ctx, layer[0], layer[1]));
        CHECK(tsh_step_end(ctx) == TSH_OK, "the step's end");
    }
    CHECK_OK();
    return 0;
}

static void sharded_ids_unite_their_rows(void **state) {
    (void)state;
    for (int p = 0; p < COUNT(ranks_degrees); p++)
        ranks_run(ranks_degrees[p], sharded_ids_rank, NULL);
}

/* ------------------------------------------------------------------ replicas */

/* Each replica looks up other ids: the rows of all are updated, on all alike, by the average; and
 * max_norm shortens them all. user: 1: with max_norm. */
static int replicas_rank(tsh_ctx *ctx, void *user) {
    const int renorm = *(const int *)user, dp = tsh_dp(ctx)->rank;
    const tsh_optim_desc how = {.kind = TSH_ADAM, .lr = 0.1};
    tsh_embedding_desc desc = {.count = ROWS, .dim = WIDTH, .style = TSH_ROWWISE};
    tsh_module *layer;
    tsh_optim *optim;
    desc.lookup.sparse = 1;
    desc.lookup.max_norm = renorm ? 2 : 0;
    layer = tsh_add_embedding(tsh_root(ctx), "table", &desc);
    tsh_materialize(layer);
    ranks_set(ctx, tsh_param(layer, "weight"), 40);
    optim = tsh_optim_new(layer, &how);
    for (int step = 0; step < 3; step++) {
        double *before = ranks_values(ctx, tsh_param(layer, "weight")), *after, sum[ROWS * WIDTH];
        for (int half = 0; half < 2; half++) { /* micro-batches: 1 id each, then both are united */
            tsh_tensor *t = tsh_tensor_from(ctx, TSH_I64, tsh_shape1(1), tsh_replicated(),
                                            &lessons[step][2 * dp + half]);
            tsh_tensor *loss = ranks_loss(ctx, tsh_forward(layer, t));
            CHECK(tsh_backward_with(ctx, loss, &(tsh_backward_desc){.defer = 1}) == TSH_OK, "%d",
                  half);
            tsh_tensor_free(t);
        }
        CHECK(tsh_sync_grads(ctx) == TSH_OK, "average");
        CHECK(tsh_optim_step(optim) == TSH_OK, "a step");
        tsh_zero_grads(layer);
        after = ranks_values(ctx, tsh_param(layer, "weight"));
        for (int e = 0; e < ROWS * WIDTH; e++) {
            int touched = 0, moved = before[e] < after[e] || before[e] > after[e];
            for (int i = 0; i < 4; i++) touched |= lessons[step][i] == e / WIDTH;
            CHECK(moved == touched, "step %d: row %d %s", step, e / WIDTH,
                  moved ? "moved" : "rested");
            sum[e] = after[e];
        }
        CHECK(tsh_allreduce(tsh_dp(ctx), sum, ROWS * WIDTH, TSH_F64, TSH_SUM) == TSH_OK, "sum");
        for (int e = 0; e < ROWS * WIDTH; e++)
            CHECK(!(sum[e] > 2 * after[e]) && !(sum[e] < 2 * after[e]), "replicas differ at %d", e);
        free(before);
        free(after);
        CHECK(tsh_step_end(ctx) == TSH_OK, "the step's end");
    }
    CHECK_OK();
    return 0;
}

static void replicas_unite_their_rows(void **state) {
    (void)state;
    for (int tp = 1; tp <= 3; tp++)
        for (int renorm = 0; renorm < 2; renorm++)
            ranks_run_with(2 * tp, &(tsh_desc){.tp = tp}, replicas_rank, &renorm);
}

/* ------------------------------------------------------------------ a given table */

static int given_rank(tsh_ctx *ctx, void *user) {
    const tsh_linear_desc head = {.in = WIDTH, .out = ROWS, .bias = TSH_NO, .style = TSH_COLWISE};
    tsh_module *out = tsh_add_linear(tsh_root(ctx), "head", &head), *in, *twin;
    tsh_embedding_desc desc = {.count = ROWS, .dim = WIDTH, .weight = tsh_param(out, "weight")};
    tsh_tensor *ids = tsh_tensor_from(ctx, TSH_I64, tsh_shape1(4), tsh_replicated(), lessons[1]);
    int64_t count = 0;
    (void)user;
    in = tsh_add_embedding(tsh_root(ctx), "in", &desc);
    CHECK(in && tsh_param(in, "weight") == tsh_param(out, "weight"), "one parameter");
    CHECK(tsh_layout_of(tsh_param(in, "weight")).kind == TSH_SHARDED, "plain: its layout stays");
    desc.count = desc.dim = 0;
    desc.style = TSH_ROWWISE;
    twin = tsh_add_embedding(tsh_root(ctx), "twin", &desc);
    CHECK(twin && tsh_param(twin, "weight") == desc.weight, "the same style, sizes as they are");
    count = tsh_size(tsh_forward(in, ids), -1);
    CHECK(count == WIDTH, "forward");
    CHECK(tsh_backward(ctx, ranks_loss(ctx, tsh_forward(out, tsh_forward(in, ids)))) == TSH_OK,
          "backward");
    CHECK(tsh_grad(desc.weight), "one gradient");
    CHECK_OK();
    return 0;
}

static int refusals_rank(tsh_ctx *ctx, void *user) {
    static const tsh_lookup_desc wrong[] = {
        {1, 7, 0, 0, 0, 0},  {1, -8, 0, 0, 0, 0},          {0, 0, -1, 0, 0, 0},
        {0, 0, 1, -2, 0, 0}, {0, 0, (double)NAN, 0, 0, 0},
    };
    static const char *const why[] = {"padding_idx 7 is outside [-7, 7)",
                                      "padding_idx -8 is outside [-7, 7)", "max_norm is -1",
                                      "norm_type is -2", "max_norm is"};
    const tsh_linear_desc head = {.in = WIDTH, .out = ROWS, .style = TSH_ROWWISE};
    tsh_tensor *w = tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(ROWS, WIDTH), tsh_replicated()), *cut;
    tsh_tensor *ids = tsh_tensor_from(ctx, TSH_I64, tsh_shape1(4), tsh_replicated(), lessons[1]);
    const char *said = tsh_last_error(ctx)->message;
    tsh_embedding_desc desc = {.count = ROWS, .dim = WIDTH};
    tsh_lookup_desc short_rows = {.max_norm = 1};
    (void)user;
    for (int i = 0; i < COUNT(wrong); i++) {
        CHECK(!tsh_embedding(ids, w, &wrong[i]), "%s", why[i]);
        CHECK(strstr(said, "tsh_embedding: ") && strstr(said, why[i]), "%s", why[i]);
        tsh_clear_error(ctx);
        desc.lookup = wrong[i];
        CHECK(!tsh_add_embedding(tsh_root(ctx), "table", &desc), "%s", why[i]);
        CHECK(strstr(said, "tsh_add_embedding: ") && strstr(said, why[i]), "%s", why[i]);
        tsh_clear_error(ctx);
    }
    tsh_requires_grad(w, 1);
    CHECK(!tsh_embedding(ids, tsh_scale(w, 2), &short_rows), "not a leaf");
    CHECK(strstr(said, "in place, but it is what tsh_scale gave"), "not a leaf");
    tsh_clear_error(ctx);
    memset(&desc.lookup, 0, sizeof desc.lookup);
    desc.weight = w;
    CHECK(!tsh_add_embedding(tsh_root(ctx), "table", &desc), "not a parameter");
    CHECK(strstr(said, "takes a parameter of the same tree"), "not a parameter");
    tsh_clear_error(ctx);
    cut = tsh_param(tsh_add_linear(tsh_root(ctx), "head", &head), "weight");
    desc.weight = cut;
    desc.count = 8;
    CHECK(!tsh_add_embedding(tsh_root(ctx), "table", &desc), "another shape");
    CHECK(strstr(said, "\"head.weight\" is (7, 3) S(1), not (8, 3)"), "another shape");
    tsh_clear_error(ctx);
    desc.count = ROWS;
    desc.style = TSH_ROWWISE;
    CHECK(!tsh_add_embedding(tsh_root(ctx), "table", &desc), "sharded otherwise");
    CHECK(strstr(said, "tsh_add_embedding: \"table\" is rowwise, but its weight \"head.weight\" is "
                       "S(1) already"),
          "sharded otherwise");
    tsh_clear_error(ctx);
    CHECK_OK();
    return 0;
}

static void a_given_table_is_shared(void **state) {
    (void)state;
    for (int p = 0; p < COUNT(ranks_degrees); p++) ranks_run(ranks_degrees[p], given_rank, NULL);
}

static void what_does_not_fit_is_a_sentence(void **state) {
    (void)state;
    ranks_run(1, refusals_rank, NULL);
}

/* A row-sparse step takes no memory once the free handles suffice: 256 beyond those of a step. */
static int steady_rank(tsh_ctx *ctx, void *user) {
    const tsh_optim_desc how = {.kind = TSH_ADAM, .lr = 0.1};
    tsh_module *layer = add_table(ctx, "table", TSH_ROWWISE, 1);
    tsh_optim *optim = tsh_optim_new(layer, &how);
    uint64_t calls = 0;
    tsh_tensor *t = tsh_tensor_from(ctx, TSH_I64, tsh_shape1(4), tsh_replicated(), lessons[0]);
    (void)user;
    for (int step = 0; step < 80; step++) {
        if (step == 70) calls = tsh_mem_stats(ctx).calls;
        CHECK(tsh_backward(ctx, ranks_loss(ctx, tsh_forward(layer, t))) == TSH_OK, "backward");
        CHECK(tsh_optim_step(optim) == TSH_OK, "a step");
        tsh_zero_grads(layer);
        CHECK(tsh_step_end(ctx) == TSH_OK, "the step's end");
    }
    CHECK(tsh_mem_stats(ctx).calls == calls, "%d calls of the allocator",
          (int)(tsh_mem_stats(ctx).calls - calls));
    CHECK_OK();
    return 0;
}

static void steady_steps_take_no_memory(void **state) {
    (void)state;
    ranks_run(1, steady_rank, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_option_equals_the_dense_layer),
        cmocka_unit_test(a_padding_row_starts_as_zero),
        cmocka_unit_test(sgd_is_the_same_with_sparse_gradients),
        cmocka_unit_test(untouched_rows_rest),
        cmocka_unit_test(a_tied_classifier_makes_it_dense),
        cmocka_unit_test(sharded_ids_unite_their_rows),
        cmocka_unit_test(replicas_unite_their_rows),
        cmocka_unit_test(a_given_table_is_shared),
        cmocka_unit_test(what_does_not_fit_is_a_sentence),
        cmocka_unit_test(steady_steps_take_no_memory),
    };
    return cmocka_run_group_tests_name("layer/lookup", tests, NULL, NULL);
}
