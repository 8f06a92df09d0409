/* The tape on several ranks: which gradients are partial sums, when they are completed and by how
 * many collectives, what stays pending, and what a failing rank does to its peers. */
/* build: double */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"

#define ROUNDING 2e-5 /* layer norm, and sums in another order than one rank's */

/* ------------------------------------------------- graphs, and their collectives */

/* q, k and v of one x: three partial contributions. */
static tsh_tensor *graph_qkv(probe *p) {
    tsh_tensor *q = tsh_linear(p->in[0], p->in[1], NULL), *k = tsh_linear(p->in[0], p->in[2], NULL);
    return tsh_add(tsh_mul(q, k), tsh_linear(p->in[0], p->in[3], NULL));
}

static tsh_tensor *mlp(probe *p, tsh_tensor *x) {
    return tsh_linear(tsh_linear(x, p->in[1], NULL), p->in[2], p->in[3]);
}

static tsh_tensor *graph_residual(probe *p) {
    return tsh_add(p->in[0], mlp(p, p->in[0]));
}

static tsh_tensor *graph_two_residuals(probe *p) {
    tsh_tensor *x = tsh_add(p->in[0], mlp(p, p->in[0]));
    return tsh_add(x, mlp(p, x));
}

static tsh_tensor *graph_post_norm(probe *p) {
    tsh_tensor *ones = tsh_ones(p->ctx, tsh_shape1(4));
    tsh_tensor *x = tsh_layer_norm(tsh_add(p->in[0], mlp(p, p->in[0])), ones, NULL, 0);
    return tsh_layer_norm(tsh_add(x, mlp(p, x)), ones, NULL, 0);
}

static tsh_tensor *graph_twice(probe *p) {
    tsh_tensor *y = tsh_linear(p->in[0], p->in[1], NULL);
    return tsh_mul(y, tsh_linear(p->in[0], p->in[1], NULL));
}

/* Column-parallel branches that end in nothing, at once and later, beside one that is used. */
static tsh_tensor *graph_dead(probe *p) {
    tsh_tensor *dead = tsh_linear(p->in[0], p->in[1], NULL);
    (void)tsh_mul(dead, dead);
    (void)tsh_linear(p->in[0], p->in[1], NULL);
    return tsh_linear(p->in[0], p->in[1], NULL);
}

/* Partial contributions to x only where the loss does not see them. */
static tsh_tensor *graph_only_dead(probe *p) {
    tsh_tensor *w = tsh_redistribute(tsh_ones(p->ctx, tsh_shape2(p->n, 4)),
                                     p->dense ? tsh_replicated() : tsh_sharded(0));
    (void)tsh_linear(p->in[0], w, NULL);
    return tsh_mul(p->in[0], p->in[0]);
}

static tsh_tensor *graph_no_grad(probe *p) {
    tsh_tensor *seen;
    tsh_no_grad_begin(p->ctx);
    seen = tsh_full_tensor(tsh_linear(p->in[0], p->in[1], NULL));
    tsh_no_grad_end(p->ctx);
    return tsh_mul(tsh_sum(seen, TSH_ALL, 0), tsh_linear(p->in[0], p->in[1], NULL));
}

static tsh_tensor *graph_detach(probe *p) {
    tsh_tensor *y = tsh_linear(tsh_detach(p->in[0]), p->in[1], NULL);
    return tsh_mul(p->in[0], tsh_full_tensor(tsh_sum(y, TSH_ALL, 0)));
}

/* A gathered tensor with a partial consumer and a replicated one. */
static tsh_tensor *graph_gather(probe *p) {
    tsh_tensor *x = tsh_full_tensor(p->in[0]), *y = tsh_full_tensor(tsh_linear(x, p->in[1], NULL));
    return tsh_add(y, tsh_sum(x, -1, 1));
}

static tsh_tensor *graph_gather_replicated(probe *p) {
    tsh_tensor *x = tsh_full_tensor(p->in[0]);
    return tsh_mul(x, x);
}

static tsh_tensor *graph_gather_clone(probe *p) {
    return tsh_linear(tsh_clone(tsh_clone(tsh_full_tensor(p->in[0]))), p->in[1], NULL);
}

/* The reshape has to copy: what it copies is passed on as it is. */
static tsh_tensor *graph_gather_reshape(probe *p) {
    tsh_tensor *x = tsh_transpose(tsh_full_tensor(p->in[0]), 1, 2);
    return tsh_linear(tsh_reshape(x, tsh_shape2(2, -1)), p->in[1], NULL);
}

/* Sequence-parallel: gather, column, row, scatter. */
static tsh_tensor *graph_sequence(probe *p) {
    tsh_tensor *y = tsh_linear(tsh_full_tensor(p->in[0]), p->in[1], NULL);
    y = tsh_matmul(y, p->in[2]);
    return p->dense ? y : tsh_redistribute(y, tsh_layout_of(p->in[0]));
}

/* Views of one sharded base, each used elsewhere. */
static tsh_tensor *graph_views(probe *p) {
    tsh_tensor *part[3], *rows;
    (void)tsh_split(p->in[0], 1, 3, part);
    rows = tsh_reshape(p->in[0], tsh_shape3(2, 3, -1));
    return tsh_add(tsh_mul(part[0], part[1]), tsh_sum(rows, 1, 0));
}

/* Two views of one base, one with a partial consumer. */
static tsh_tensor *graph_view_partial(probe *p) {
    tsh_tensor *top = tsh_slice(p->in[0], 0, 0, 2), *rest = tsh_slice(p->in[0], 0, 2, 2);
    return tsh_mul(tsh_full_tensor(tsh_linear(top, p->in[1], NULL)), tsh_sum(rest, TSH_ALL, 0));
}

static tsh_tensor *graph_clone(probe *p) {
    tsh_tensor *x = tsh_clone(p->in[0]);
    return tsh_add(tsh_full_tensor(tsh_linear(x, p->in[1], NULL)), tsh_sum(x, -1, 1));
}

static tsh_tensor *graph_linear(probe *p) {
    tsh_tensor *y = tsh_linear(p->in[0], p->in[1], p->in[2]);
    return probe_has(p, "gathered") ? tsh_full_tensor(y) : y;
}

static tsh_tensor *graph_product(probe *p) {
    return tsh_mul(p->in[0], p->in[1]);
}

static tsh_tensor *graph_norm(probe *p) {
    return tsh_layer_norm(p->in[0], p->in[1], p->in[2], 0);
}

static tsh_tensor *graph_loss(probe *p) {
    return tsh_cross_entropy(p->in[0], p->in[1], NULL);
}

static tsh_tensor *graph_embedding(probe *p) {
    return tsh_full_tensor(tsh_embedding(p->in[0], p->in[1], NULL));
}

static tsh_tensor *graph_move(probe *p) {
    return tsh_redistribute(p->in[0], spec_layout(probe_arg(p), p->n));
}

/* clang-format off */
#define AR(n) n, 0, 0
#define AG(n) 0, n, 0
#define RS(n) 0, 0, n
#define NONE  0, 0, 0
#define EACH(ar, ag, rs) ar, ag, rs
#define GRAPH(fn, arg, forward, backward, ...) \
    {graph_##fn, arg, {__VA_ARGS__}, NULL, ROUNDING, TRIAL_COUNTED, {forward}, {backward}}
/* clang-format on */

static const trial graphs[] = {
    /* contributions are summed before they travel: one all-reduce per tensor, not per consumer */
    GRAPH(qkv, "", NONE, AR(1), "3,4 R", "n,4 S(0)", "n,4 S(0)", "n,4 S(0)"),
    GRAPH(twice, "", NONE, AR(1), "3,4 R", "n,4 S(0)"),
    GRAPH(residual, "", AR(1), AR(1), "3,4 R", "n,4 S(0)", "4,n S(1)", "4 R"),
    GRAPH(two_residuals, "", AR(2), AR(2), "3,4 R", "n,4 S(0)", "4,n S(1)", "4 R"),
    GRAPH(post_norm, "", AR(2), AR(2), "3,4 R", "n,4 S(0)", "4,n S(1)", "4 R"),
    /* what the loss does not see does not count */
    GRAPH(dead, "", NONE, AR(1), "3,4 R", "n,4 S(0)"),
    GRAPH(only_dead, "", NONE, NONE, "3,4 R"),
    GRAPH(no_grad, "", AG(1), AR(1), "3,4 R", "n,4 S(0)"),
    GRAPH(detach, "", AR(1), NONE, "3,4 R", "n,4 S(0)"),
    /* an all-gather slices complete gradients and reduce-scatters partial ones */
    GRAPH(gather, "", AG(2), RS(1), "3,n S(1)", "4,n S(0)"),
    GRAPH(gather_replicated, "", AG(1), NONE, "3,n S(1)"),
    GRAPH(gather_clone, "", AG(1), RS(1), "3,n S(1)", "4,n S(0)"),
    GRAPH(gather_reshape, "", AG(1), RS(1), "2,n,3 S(1)", "4,3n S(0)"),
    GRAPH(sequence, "", EACH(0, 1, 1), EACH(0, 1, 1), "n,4 S(0)", "5,4 S(0)", "5,3 S(0)"),
    /* views and copies */
    GRAPH(views, "", NONE, NONE, "2,6n S(1, 3 segments, unit 2)"),
    GRAPH(view_partial, "", AG(1), AR(1), "4,4 R", "n,4 S(0)"),
    GRAPH(clone, "", AG(1), AR(1), "3,4 R", "n,4 S(0)"),
    /* one op each */
    GRAPH(linear, "", NONE, AR(1), "3,4 R", "n,4 S(0)", "n S(0)"),
    GRAPH(linear, "gathered", AG(1), AR(1), "3,4 R", "n,4 S(0)", "n S(0)"),
    GRAPH(linear, "", AR(1), NONE, "3,n S(1)", "4,n S(1)", "4 R"),
    GRAPH(linear, "", AR(1), AG(1), "3,n R", "4,n S(1)", "4 R"),
    GRAPH(product, "", NONE, AR(1), "2,n P", "n R"),
    GRAPH(norm, "", NONE, AR(2), "n,5 S(0)", "5 R", "5 R"),
    GRAPH(loss, "", EACH(1, 1, 0), NONE, "4,n S(1)", "%n 4 R"),
    GRAPH(embedding, "", AR(1), NONE, "%n 5 R", "n,3 S(0)"),
    GRAPH(move, "R", AG(1), NONE, "2,n S(1)"),
    GRAPH(move, "S(1)", NONE, AG(1), "2,n R"),
    GRAPH(move, "R", AR(1), NONE, "2,n P"),
    GRAPH(move, "P", NONE, NONE, "2,n R"),
    GRAPH(move, "S(1)", RS(1), AG(1), "2,n P"),
    GRAPH(move, "S(1)", NONE, NONE, "2,n S(1)"),
};

static const int64_t lengths[] = {1, 3, 5, 8};

static void gradients_equal_dense_ones_in_as_few_collectives(void **state) {
    (void)state;
    trials_prove(graphs, COUNT(graphs), lengths, COUNT(lengths));
}

/* ----------------------------------------------------------- gradients of leaves */

static uint64_t allreduces(tsh_ctx *ctx) {
    return tsh_tp(ctx)->stats.calls[TSH_ALLREDUCE];
}

/* y = sum of x W^T with a column-parallel W: x's gradient is partial. */
static tsh_tensor *column_loss(tsh_ctx *ctx, tsh_tensor *x, tsh_tensor *w, double scale) {
    return tsh_scale(ranks_loss(ctx, tsh_linear(x, w, NULL)), scale);
}

/* All partial leaves complete in one all-reduce; their gradients add up over backwards. */
static int leaves(tsh_ctx *ctx, int dense, capture *got) {
    tsh_tensor *a = same_leaf(ctx, dense, "2,4 R", 1, 1), *b = same_leaf(ctx, dense, "3,4 R", 1, 2);
    tsh_tensor *w = same_leaf(ctx, dense, "7,4 S(0)", 1, 3);
    tsh_tensor *loss = tsh_add(column_loss(ctx, a, w, 1), column_loss(ctx, b, w, 2));
    uint64_t before = allreduces(ctx);
    CHECK(!tsh_grad(a), "no gradient before the first backward");
    CHECK(tsh_backward(ctx, loss) == TSH_OK, "first");
    CHECK(tsh_tp(ctx)->size == 1 || allreduces(ctx) - before == 1, "one for two leaves");
    CHECK(tsh_step_end(ctx) == TSH_OK, "step");
    CHECK(tsh_backward(ctx, column_loss(ctx, a, w, 3)) == TSH_OK, "second");
    CHECK(!capture_add(ctx, got, tsh_grad(a)), "a");
    CHECK(!capture_add(ctx, got, tsh_grad(b)), "b");
    CHECK(!capture_add(ctx, got, tsh_grad(w)), "w");
    tsh_zero_grad(a);
    CHECK(!tsh_grad(a), "tsh_zero_grad forgets");
    CHECK(tsh_backward(ctx, column_loss(ctx, a, w, 1)) == TSH_OK, "third");
    CHECK(!capture_add(ctx, got, tsh_grad(a)), "a, afresh");
    tsh_zero_grad(NULL);
    return 0;
}

static void gradients_accumulate_until_zeroed(void **state) {
    (void)state;
    same_prove(leaves, 0);
}

/* Two micro-batches with .defer: no collective until tsh_sync_grads, then one. */
static int micro_batches(tsh_ctx *ctx, int dense, capture *got) {
    const tsh_backward_desc defer = {.defer = 1};
    tsh_tensor *x = same_leaf(ctx, dense, "3,4 R", 1, 1), *y = same_leaf(ctx, dense, "2,4 R", 1, 2);
    tsh_tensor *w = same_leaf(ctx, dense, "5,4 S(0)", 1, 3);
    uint64_t before;
    int i;
    for (i = 1; i <= 2; i++) {
        tsh_tensor *loss = tsh_add(column_loss(ctx, x, w, i), column_loss(ctx, y, w, 3));
        before = allreduces(ctx);
        CHECK(tsh_backward_with(ctx, loss, &defer) == TSH_OK, "micro-batch %d", i);
        CHECK(allreduces(ctx) == before, "nothing travels yet");
        CHECK(tsh_step_end(ctx) == TSH_OK, "step");
    }
    if (tsh_tp(ctx)->size > 1) {
        CHECK(!tsh_grad(x), "a pending gradient is not to be read");
        CHECK(ranks_says(ctx, TSH_ERR_STATE, "tsh_sync_grads"), "its sentence");
        tsh_clear_error(ctx);
    }
    CHECK(tsh_sync_grads(ctx) == TSH_OK, "sync");
    CHECK(tsh_tp(ctx)->size == 1 || allreduces(ctx) - before == 1, "one in all");
    CHECK(tsh_sync_grads(ctx) == TSH_OK, "a second sync");
    CHECK(tsh_tp(ctx)->size == 1 || allreduces(ctx) - before == 1, "reduces nothing twice");
    CHECK(!capture_add(ctx, got, tsh_grad(x)), "x");
    CHECK(!capture_add(ctx, got, tsh_grad(y)), "y");
    CHECK(!capture_add(ctx, got, tsh_grad(w)), "w");
    return 0;
}

static void micro_batches_are_synced_once(void **state) {
    (void)state;
    same_prove(micro_batches, 0);
}

/* A deferred micro-batch, then one that is not: the second completes both. */
static int deferred_then_not(tsh_ctx *ctx, int dense, capture *got) {
    const tsh_backward_desc defer = {.defer = 1};
    tsh_tensor *x = same_leaf(ctx, dense, "3,4 R", 1, 1);
    tsh_tensor *w = same_leaf(ctx, dense, "5,4 S(0)", 1, 3);
    CHECK(tsh_backward_with(ctx, column_loss(ctx, x, w, 1), &defer) == TSH_OK, "deferred");
    CHECK(tsh_backward(ctx, column_loss(ctx, x, w, 2)) == TSH_OK, "not deferred");
    CHECK(!capture_add(ctx, got, tsh_grad(x)), "x");
    CHECK(!capture_add(ctx, got, tsh_grad(w)), "w");
    return 0;
}

static void the_last_backward_completes_deferred_ones(void **state) {
    (void)state;
    same_prove(deferred_then_not, 0);
}

/* Clipping and stepping on a pending gradient are errors too, on every rank. */
static int pending(tsh_ctx *ctx, void *user) {
    const tsh_backward_desc defer = {.defer = 1};
    const tsh_linear_desc plain = {.in = 4, .out = 4},
                          column = {.in = 4, .out = 5, .style = TSH_COLWISE};
    tsh_module *first = tsh_add_linear(tsh_root(ctx), "first", &plain);
    tsh_module *second = tsh_add_linear(tsh_root(ctx), "second", &column);
    tsh_module *norm = tsh_add_layer_norm(tsh_root(ctx), "norm", &(tsh_layer_norm_desc){.dim = 4});
    tsh_optim *optim = tsh_optim_new(tsh_root(ctx), NULL);
    spec s = spec_parse("7,4 S(0)", 1);
    tsh_tensor *x = spec_tensor(ctx, &s, 5); /* rows sharded: the norm's gradients are partial */
    tsh_tensor *y = tsh_full_tensor(tsh_forward(norm, x));
    y = tsh_forward(second, tsh_forward(first, y));
    CHECK(tsh_backward_with(ctx, ranks_loss(ctx, y), &defer) == TSH_OK, "backward");
    (void)tsh_barrier(tsh_world(ctx)); /* all are here before one fails */
    if (*(const int *)user)
        CHECK(tsh_clip_grad_norm(tsh_root(ctx), 1, NULL) == TSH_ERR_STATE, "clip");
    else
        CHECK(tsh_optim_step(optim) == TSH_ERR_STATE, "step");
    CHECK(strstr(tsh_last_error(ctx)->message, "norm.weight"), "names the parameter");
    CHECK(strstr(tsh_last_error(ctx)->message, "tsh_sync_grads"), "names the way out");
    return 0;
}

static void a_pending_gradient_is_not_clipped_or_stepped_on(void **state) {
    int clip;
    (void)state;
    for (clip = 0; clip < 2; clip++) ranks_run(2, pending, &clip);
}

/* --------------------------------------------------------------- data parallelism */

/* Each replica has its own batch: its loss is 1 or 2 times the first one's. */
typedef struct averaging {
    int defer;
    capture one; /* what one replica alone finds */
} averaging;

static int average_leaves(tsh_ctx *ctx, int defer, double batch, tsh_tensor **leaf) {
    const tsh_backward_desc desc = {.defer = defer};
    leaf[0] = same_leaf(ctx, 0, "3,4 R", 1, 1);
    leaf[1] = same_leaf(ctx, 0, "5,4 S(0)", 1, 3);
    CHECK(tsh_average_grad(leaf[0], 1) && tsh_average_grad(leaf[1], 1), "as parameters are");
    CHECK(tsh_backward_with(ctx, column_loss(ctx, leaf[0], leaf[1], batch), &desc) == TSH_OK,
          "backward");
    return 0;
}

static int alone(tsh_ctx *ctx, void *user) {
    averaging *a = (averaging *)user;
    tsh_tensor *leaf[2];
    if (average_leaves(ctx, 0, 1, leaf)) return 1;
    return capture_add(ctx, &a->one, tsh_grad(leaf[0])) ||
           capture_add(ctx, &a->one, tsh_grad(leaf[1]));
}

static int averages(tsh_ctx *ctx, void *user) {
    const averaging *a = (const averaging *)user;
    tsh_tensor *leaf[2];
    double *found;
    int i, e;
    CHECK(tsh_tp(ctx)->size == 2 && tsh_dp(ctx)->size == 2, "groups");
    if (average_leaves(ctx, a->defer, tsh_dp(ctx)->rank + 1, leaf)) return 1;
    if (a->defer) {
        CHECK(!tsh_grad(leaf[1]), "not averaged over dp yet");
        CHECK(ranks_says(ctx, TSH_ERR_STATE, "tsh_sync_grads"), "its sentence");
        tsh_clear_error(ctx);
        CHECK(tsh_sync_grads(ctx) == TSH_OK, "sync");
    }
    for (i = 0; i < 2; i++) {
        CHECK((found = ranks_values(ctx, tsh_grad(leaf[i]))), "gradient %d", i);
        for (e = 0; e < a->one.numel[i]; e++)
            CHECK(found[e] == 1.5 * a->one.values[i][e], "gradient %d, element %d: %g", i, e,
                  found[e]);
        free(found);
    }
    return 0;
}

static void data_parallel_gradients_are_averaged(void **state) {
    tsh_desc desc = {.tp = 2};
    averaging a = {.defer = 0};
    (void)state;
    ranks_run(1, alone, &a);
    for (a.defer = 0; a.defer < 2; a.defer++) ranks_run_with(4, &desc, averages, &a);
    capture_free(&a.one);
}

/* ------------------------------------------------------------ retained, stale, none */

/* Retained tensors keep values and a complete gradient, whoever consumes them. */
static int retained(tsh_ctx *ctx, int dense, capture *got) {
    tsh_tensor *leaf = same_leaf(ctx, dense, "3,4 R", 1, 1);
    tsh_tensor *sharded = same_leaf(ctx, dense, "3,4 S(1)", 1, 2);
    tsh_tensor *w = same_leaf(ctx, dense, "5,4 S(0)", 1, 3);
    tsh_tensor *x = tsh_retain_grad(tsh_scale(leaf, 2)); /* partial consumers */
    tsh_tensor *g = tsh_retain_grad(
        tsh_full_tensor(sharded));                       /* gathered, with partial consumers */
    tsh_tensor *c = tsh_retain_grad(tsh_clone(x));       /* a copy, with partial consumers */
    tsh_tensor *y = tsh_retain_grad(tsh_linear(x, w, NULL));
    tsh_tensor *loss = ranks_loss(ctx, tsh_mul(y, tsh_linear(g, w, NULL)));
    loss = tsh_add(loss, column_loss(ctx, c, w, 1));
    CHECK(tsh_backward(ctx, loss) == TSH_OK, "backward");
    CHECK(!capture_add(ctx, got, x), "values of x");
    CHECK(!capture_add(ctx, got, tsh_grad(x)), "x");
    CHECK(!capture_add(ctx, got, tsh_grad(y)), "y");
    CHECK(!capture_add(ctx, got, tsh_grad(g)), "g");
    CHECK(!capture_add(ctx, got, tsh_grad(c)), "c");
    CHECK(!capture_add(ctx, got, tsh_grad(leaf)), "leaf");
    CHECK(!capture_add(ctx, got, tsh_grad(sharded)), "sharded");
    return 0;
}

static void retained_tensors_keep_complete_gradients(void **state) {
    (void)state;
    same_prove(retained, 0);
}

static int holds(tsh_ctx *ctx, tsh_tensor *t, double a, double b) {
    const tsh_real *got = (const tsh_real *)tsh_data(ctx, tsh_grad(t));
    return got && fabs((double)got[0] - a) < 1e-6 && fabs((double)got[1] - b) < 1e-6;
}

/* The gradient of a sum is that of its terms. One of them may get its memory: what comes to a term
 * later, or is retained, is nobody else's. */
static int sums(tsh_ctx *ctx, void *user) {
    static const tsh_real ones[] = {1, 1}, weights[] = {1, 10};
    tsh_tensor *x = tsh_requires_grad(
        tsh_tensor_from(ctx, TSH_REAL, tsh_shape1(2), tsh_replicated(), ones), 1);
    tsh_tensor *w = tsh_tensor_from(ctx, TSH_REAL, tsh_shape1(2), tsh_replicated(), weights);
    tsh_tensor *a = tsh_retain_grad(tsh_scale(x, 2)), *b = tsh_retain_grad(tsh_scale(x, 3));
    tsh_tensor *early = tsh_sub(tsh_add(tsh_scale(a, 5), tsh_reshape(b, tsh_shape1(2))), x);
    tsh_tensor *s = tsh_add(a, b), *view = tsh_reshape(tsh_add(s, s), tsh_shape2(1, 2));
    tsh_tensor *t = tsh_retain_grad(tsh_add(s, tsh_scale(x, 7)));
    tsh_tensor *loss = tsh_mul(tsh_add(tsh_add(t, early), view), w);
    (void)user;
    CHECK(tsh_backward(ctx, tsh_sum(loss, TSH_ALL, 0)) == TSH_OK, "backward");
    CHECK(holds(ctx, t, 1, 10), "t");
    CHECK(holds(ctx, a, 1 + 2 + 5, 80), "a");
    CHECK(holds(ctx, b, 1 + 2 + 1, 40), "b");
    CHECK(holds(ctx, x, 2 * 8 + 3 * 4 + 7 - 1, 340), "x");
    return 0;
}

/* A view of a term is the other term: both add to the same. */
static int sums_of_views(tsh_ctx *ctx, void *user) {
    enum { N = 5 };
    tsh_real ones[N * N], weights[N * N];
    int form, i, j;
    (void)user;
    for (i = 0; i < N * N; i++) {
        ones[i] = 1;
        weights[i] = (tsh_real)i;
    }
    for (form = 0; form < 6; form++) {
        const double sign = form % 2 ? -1 : 1;
        tsh_tensor *w = tsh_tensor_from(ctx, TSH_REAL, tsh_shape2(N, N), tsh_replicated(), weights);
        tsh_tensor *leaf = tsh_tensor_from(ctx, TSH_REAL, tsh_shape2(N, N), tsh_replicated(), ones);
        tsh_tensor *x = tsh_scale(tsh_requires_grad(leaf, 1), 1);
        tsh_tensor *y = form < 2   ? tsh_transpose(x, 0, 1)
                        : form < 4 ? tsh_slice(x, 0, 1, 1)
                                   : tsh_reshape(x, tsh_shape2(N, N));
        const tsh_real *got;
        y = form % 2 ? tsh_sub(x, y) : tsh_add(x, y);
        CHECK(tsh_backward(ctx, tsh_sum(tsh_mul(y, w), TSH_ALL, 0)) == TSH_OK, "backward");
        got = (const tsh_real *)tsh_data(ctx, tsh_grad(leaf));
        CHECK(got, "a gradient");
        for (i = 0; i < N; i++)
            for (j = 0; j < N; j++) {
                double want = i * N + j;
                if (form < 2) want += sign * (j * N + i);
                if (form >= 2 && form < 4 && i == 1) want += sign * (5 * j + 50);
                if (form >= 4) want += sign * (i * N + j);
                CHECK(fabs((double)got[i * N + j] - want) < 1e-6, "form %d, (%d, %d): %g, not %g",
                      form, i, j, (double)got[i * N + j], want);
            }
    }
    return 0;
}

static void terms_get_the_gradient_of_their_sum(void **state) {
    (void)state;
    ranks_run(1, sums, NULL);
    ranks_run(2, sums, NULL);
    ranks_run(1, sums_of_views, NULL);
}

/* What was given back is an error to read, on one rank as on several. */
static int stale(tsh_ctx *ctx, void *user) {
    int after_step = *(const int *)user;
    tsh_tensor *x = same_leaf(ctx, 0, "3,4 R", 1, 1), *y = tsh_neg(x), *kept = tsh_keep(y);
    CHECK(tsh_backward(ctx, ranks_loss(ctx, y)) == TSH_OK, "backward");
    CHECK(!tsh_grad(kept), "a kept copy has no gradient path");
    if (after_step) CHECK(tsh_step_end(ctx) == TSH_OK, "step");
    CHECK(tsh_data(ctx, kept), "a kept copy outlives the step");
    (void)tsh_barrier(tsh_world(ctx));
    CHECK(!tsh_neg(y), "y was given back");
    CHECK(ranks_says(ctx, TSH_ERR_STALE, "tsh_neg"), "its sentence");
    CHECK(ranks_says(ctx, TSH_ERR_STALE, "tsh_retain_grad or tsh_keep"), "the way out");
    return 0;
}

static void reading_what_was_given_back_is_an_error(void **state) {
    int after_step;
    (void)state;
    for (after_step = 0; after_step < 2; after_step++) {
        ranks_run(1, stale, &after_step);
        ranks_run(2, stale, &after_step);
    }
}

/* What tsh_backward and tsh_requires_grad refuse. */
static int refused(tsh_ctx *ctx, void *user) {
    (void)user;
    CHECK(tsh_backward(ctx, NULL) == TSH_ERR_ARGUMENT, "NULL");
    CHECK(ranks_says(ctx, TSH_ERR_ARGUMENT, "the loss is NULL"), "its sentence");
    return 0;
}

static int refused_shape(tsh_ctx *ctx, void *user) {
    (void)user;
    CHECK(tsh_backward(ctx, tsh_neg(same_leaf(ctx, 0, "3,4 R", 1, 1))) == TSH_ERR_SHAPE, "(3, 4)");
    CHECK(ranks_says(ctx, TSH_ERR_SHAPE, "(3, 4) R"), "its sentence");
    return 0;
}

static int refused_constant(tsh_ctx *ctx, void *user) {
    tsh_tensor *x = same_leaf(ctx, 0, "- R", 1, 1);
    (void)user;
    tsh_no_grad_begin(ctx);
    tsh_no_grad_begin(ctx);
    tsh_no_grad_end(ctx);
    x = tsh_neg(x); /* still inside one of them */
    tsh_no_grad_end(ctx);
    CHECK(tsh_backward(ctx, x) == TSH_ERR_STATE, "nothing was recorded");
    CHECK(ranks_says(ctx, TSH_ERR_STATE, "does not depend on any tensor"), "its sentence");
    return 0;
}

static int refused_step(tsh_ctx *ctx, void *user) {
    (void)user;
    CHECK(!tsh_requires_grad(tsh_ones(ctx, tsh_shape0()), 1), "a step tensor");
    CHECK(ranks_says(ctx, TSH_ERR_ARGUMENT, "tsh_keep"), "its sentence");
    return 0;
}

static int refused_off(tsh_ctx *ctx, void *user) {
    tsh_tensor *x = tsh_requires_grad(same_leaf(ctx, 0, "- R", 1, 1), 0);
    (void)user;
    CHECK(tsh_backward(ctx, tsh_neg(x)) == TSH_ERR_STATE, "x wants no gradient any more");
    return 0;
}

/* Every function that changes values in place refuses t, and leaves it as it is; or none does. */
static int writes(tsh_ctx *ctx, tsh_tensor *t, int recorded) {
    static tsh_result (*const init[])(tsh_tensor *, const tsh_init *) = {
        tsh_init_uniform, tsh_init_normal, tsh_init_trunc_normal, tsh_init_constant,
        tsh_init_zeros, tsh_init_ones, tsh_init_kaiming_uniform, tsh_init_kaiming_normal,
        tsh_init_xavier_uniform, tsh_init_xavier_normal, tsh_init_orthogonal, tsh_init_dirac};
    const tsh_result want = recorded ? TSH_ERR_STATE : TSH_OK;
    tsh_real v[4] = {5, 6, 7, 8}, before = *(const tsh_real *)tsh_data(ctx, t);
    int i;
    for (i = 0; i < COUNT(init) + 3; i++) {
        tsh_result got = i < COUNT(init)        ? init[i](t, NULL)
                         : i == COUNT(init)     ? tsh_broadcast_batch(t)
                         : i == COUNT(init) + 1 ? tsh_write(ctx, t, TSH_LOCAL, v, sizeof v)
                                                : tsh_write(ctx, t, TSH_GLOBAL, v, sizeof v);
        CHECK(got == want, "way %d of writing, recorded %d", i, recorded);
        if (!recorded) continue;
        CHECK(ranks_says(ctx, TSH_ERR_STATE, "ops are recorded that used the tensor's values") &&
                  ranks_says(ctx, TSH_ERR_STATE, "call tsh_backward or tsh_step_end first"),
              "its sentence");
        tsh_clear_error(ctx);
        CHECK(*(const tsh_real *)tsh_data(ctx, t) == before, "nothing was written");
    }
    return 0;
}

static tsh_tensor *times_weight(tsh_module *module, tsh_tensor **in, int n, void *user) {
    (void)n;
    return tsh_forward(tsh_child(module, 0), tsh_mul(in[0], (tsh_tensor *)user));
}

/* An op that saves t's values, one that does not, one of a view, of a detached tensor, of a view
 * that is saved; a checkpoint of t, and one whose layer's weight is t. */
static int recorded(tsh_ctx *ctx, void *user) {
    tsh_tensor *x = tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(2, 2), tsh_replicated()), *t,
               *y = NULL;
    tsh_tensor *w = tsh_requires_grad(tsh_keep(tsh_ones(ctx, tsh_shape2(2, 2))), 1);
    const tsh_linear_desc d = {.in = 2, .out = 2, .bias = TSH_NO};
    const tsh_module_desc as_part = {.forward = times_weight, .user = w};
    tsh_module *part = tsh_add_module(tsh_root(ctx), "part", &as_part);
    tsh_tensor *weight = tsh_param(tsh_add_linear(part, "layer", &d), "weight");
    int i, ends;
    (void)user;
    CHECK(tsh_materialize(part) == TSH_OK, "a weight");
    tsh_checkpoint(part, 1);
    for (i = 0; i < 7; i++)
        for (ends = 0; ends < 2; ends++) {
            t = i == 2 ? w : i == 6 ? weight : x;
            CHECK(writes(ctx, t, 0) == 0, "before");
            if (i == 0) y = tsh_mul(w, x);
            if (i == 1) y = tsh_add(w, x);
            if (i == 2) y = tsh_mul(tsh_reshape(w, tsh_shape1(4)), tsh_reshape(x, tsh_shape1(4)));
            if (i == 3) y = tsh_mul(tsh_detach(x), w);
            if (i == 4) y = tsh_mul(tsh_transpose(x, 0, 1), w);
            if (i >= 5) y = tsh_forward(part, x);
            CHECK(writes(ctx, t, 1) == 0, "case %d", i);
            if (ends) CHECK(tsh_backward(ctx, tsh_sum(y, TSH_ALL, 0)) == TSH_OK, "backward");
            else CHECK(tsh_step_end(ctx) == TSH_OK, "step");
            CHECK(writes(ctx, t, 0) == 0, "after case %d", i);
            CHECK(tsh_step_end(ctx) == TSH_OK, "step");
        }
    tsh_no_grad_begin(ctx);
    y = tsh_mul(w, x);
    CHECK(writes(ctx, x, 0) == 0 && y, "nothing is recorded");
    tsh_no_grad_end(ctx);
    return 0;
}

static void recorded_values_are_not_written(void **state) {
    (void)state;
    ranks_run(1, recorded, NULL);
    ranks_run(2, recorded, NULL);
}

static void what_backward_refuses(void **state) {
    (void)state;
    ranks_run(1, refused, NULL);
    ranks_run(1, refused_shape, NULL);
    ranks_run(1, refused_constant, NULL);
    ranks_run(1, refused_step, NULL);
    ranks_run(1, refused_off, NULL);
}

/* --------------------------------------------------------------------- overlap */

typedef struct flight {
    tsh_ctx *ctx;
    int seen;
} flight;

static void flight_forward(tsh_tensor *const *in, int n, void *const *out, void *user) {
    tsh_real *y = (tsh_real *)out[0];
    (void)user, (void)n;
    memcpy(y, tsh_data(tsh_ctx_of(in[0]), in[0]), (size_t)tsh_local_numel(in[0]) * sizeof *y);
}

static void flight_backward(tsh_tensor *const *in, int n, const void *const *out,
                            const tsh_real *const *grad_out, tsh_real *const *grad_in, void *user) {
    const tsh_real *dy = grad_out[0];
    flight *f = (flight *)user;
    int64_t e;
    (void)n, (void)out;
    f->seen = tsh_tp(f->ctx)->in_flight;
    for (e = 0; grad_in[0] && e < tsh_local_numel(in[0]); e++) grad_in[0][e] += dy[e];
}

/* Three tensors whose last partial contribution came: three all-reduces travel when the op that was
 * recorded before those consumers runs its backward. */
static int overlap(tsh_ctx *ctx, void *user) {
    flight f = {ctx, -1};
    tsh_custom_op_desc desc = {
        .name = "probe", .forward = flight_forward, .backward = flight_backward};
    tsh_tensor *w = same_leaf(ctx, 0, "5,4 S(0)", 1, 3), *x[3], *probe_in, *loss;
    int i;
    (void)user;
    for (i = 0; i < 3; i++) x[i] = tsh_scale(same_leaf(ctx, 0, "3,4 R", 1, (uint64_t)i), 2);
    probe_in = same_leaf(ctx, 0, "3,4 R", 1, 9);
    desc.out[0].shape = tsh_shape_of(probe_in);
    desc.out[0].layout = tsh_replicated();
    desc.user = &f;
    loss = tsh_sum(tsh_custom_op(ctx, &probe_in, 1, NULL, &desc), TSH_ALL, 0);
    for (i = 0; i < 3; i++) loss = tsh_add(loss, column_loss(ctx, x[i], w, 1));
    CHECK(tsh_backward(ctx, loss) == TSH_OK, "backward");
    CHECK(f.seen == 3, "%d all-reduces were in flight", f.seen);
    CHECK(tsh_tp(ctx)->in_flight == 0, "none is left");
    return 0;
}

/* A gemm that notes how many collectives of its rank travel while it is called. */
typedef struct watch {
    tsh_ctx *ctx;
    int calls, in_flight[8];
} watch;

static __thread watch watching; /* of this rank */

static void watch_gemm(int64_t m, int64_t n, int64_t k, tsh_real alpha,
                       const tsh_real *a, int64_t rsa, int64_t csa, const tsh_real *b, int64_t rsb,
                       int64_t csb, tsh_real beta, tsh_real *c, int64_t rsc, int64_t csc,
                       int threads, void *user) {
    int64_t i, j, l;
    (void)user, (void)threads;
    if (watching.ctx && watching.calls < COUNT(watching.in_flight))
        watching.in_flight[watching.calls++] = tsh_tp(watching.ctx)->in_flight;
    for (i = 0; i < m; i++)
        for (j = 0; j < n; j++) {
            tsh_real sum = 0, *out = c + i * rsc + j * csc;
            for (l = 0; l < k; l++) sum += a[i * rsa + l * csa] * b[l * rsb + j * csb];
            *out = beta < 0 || beta > 0 ? alpha * sum + beta * *out : alpha * sum;
        }
}

/* Column-parallel: dX is on its way while dW is computed, in tsh_linear and in tsh_matmul. */
static int hidden(tsh_ctx *ctx, void *user) {
    int matmul = *(const int *)user;
    tsh_tensor *x = tsh_scale(same_leaf(ctx, 0, "3,4 R", 1, 1), 2);
    tsh_tensor *w = same_leaf(ctx, 0, matmul ? "4,5 S(1)" : "5,4 S(0)", 1, 3);
    tsh_tensor *loss = ranks_loss(ctx, matmul ? tsh_matmul(x, w) : tsh_linear(x, w, NULL));
    memset(&watching, 0, sizeof watching);
    watching.ctx = ctx;
    CHECK(tsh_backward(ctx, loss) == TSH_OK, "backward");
    CHECK(watching.calls == 2, "%d gemms", watching.calls);
    CHECK(watching.in_flight[0] == 0, "nothing travels during the gemm of dX");
    CHECK(watching.in_flight[1] == 1, "dX travels during the gemm of dW");
    return 0;
}

static void a_transfer_hides_behind_the_gemm_of_the_weights(void **state) {
    tsh_desc desc = {.gemm = {watch_gemm, NULL}};
    int matmul;
    (void)state;
    for (matmul = 0; matmul < 2; matmul++) ranks_run_with(2, &desc, hidden, &matmul);
}

static void completions_start_early_and_overlap(void **state) {
    (void)state;
    ranks_run(2, overlap, NULL);
    ranks_run(4, overlap, NULL);
}

/* ----------------------------------------------------------------- a rank that fails */

/* Rank 1 feeds a linear five features, and goes on to its next step; the others are inside a
 * collective or come to one. All get one sentence. */
typedef enum telling {
    TELL_OK,
    TELL_BACKWARD,
    TELL_OPTIM,
    TELL_STEP_END,
    TELL_COLLECTIVE,
    TELL_CLOSE,
    TELLINGS
} telling;

static const char *const telling_names[] = {"tsh_ok",       "tsh_backward", "tsh_optim_step",
                                            "tsh_step_end", "a collective", "tsh_close"};

static int tell(tsh_ctx *ctx, telling how, tsh_optim *optim, tsh_tensor *partial) {
    tsh_error verdict;
    switch (how) {
    case TELL_OK: CHECK(!tsh_ok(ctx), "it failed"); break;
    case TELL_BACKWARD: CHECK(tsh_backward(ctx, NULL) == TSH_ERR_SHAPE, "it failed"); break;
    case TELL_OPTIM: CHECK(tsh_optim_step(optim) == TSH_ERR_SHAPE, "it failed"); break;
    case TELL_STEP_END: CHECK(tsh_step_end(ctx) == TSH_ERR_SHAPE, "it failed"); break;
    case TELL_COLLECTIVE: CHECK(!tsh_full_tensor(partial), "it failed"); break;
    default: return 0;
    }
    CHECK(tsh_comm_error(tsh_world(ctx), &verdict) == TSH_ERR_SHAPE, "%s tells the world",
          telling_names[how]);
    return 0;
}

static int one_fails(tsh_ctx *ctx, void *user) {
    static const char sentence[] =
        "row: tsh_linear: input has 5 features, weight \"row.weight\" takes 8";
    const tsh_error *error = tsh_last_error(ctx);
    telling how = *(const telling *)user;
    const tsh_linear_desc row = {.in = 8, .out = 4, .style = TSH_ROWWISE};
    tsh_module *layer = tsh_add_linear(tsh_root(ctx), "row", &row);
    tsh_optim *optim = tsh_optim_new(layer, NULL);
    tsh_layout sum = tsh_partial();
    tsh_tensor *partial = tsh_tensor_new(ctx, TSH_REAL, tsh_shape1(3), sum);
    int wrong = tsh_world(ctx)->rank == 1, i;
    (void)tsh_barrier(tsh_world(ctx)); /* all are open before one fails */
    if (wrong) {
        CHECK(!tsh_forward(layer, tsh_ones(ctx, tsh_shape2(2, 5))), "5 is not 8");
        if (tell(ctx, how, optim, partial)) return 1;
        CHECK(error->code == TSH_ERR_SHAPE && error->rank == 1, "its own code");
        CHECK(strcmp(error->message, sentence) == 0, "its own sentence");
        return 0;
    }
    for (i = 0; i < 4 && tsh_ok(ctx); i++) {
        tsh_tensor *y = tsh_forward(layer, tsh_ones(ctx, tsh_shape2(2, 8)));
        (void)tsh_backward(ctx, ranks_loss(ctx, y));
        (void)tsh_optim_step(optim);
        (void)tsh_step_end(ctx);
    }
    CHECK(error->code == TSH_ERR_SHAPE && error->rank == 1, "the verdict's code");
    CHECK(strncmp(error->message, "rank 1: ", 8) == 0, "names the rank");
    CHECK(strcmp(error->message + 8, sentence) == 0, "the verdict's sentence");
    tsh_clear_error(ctx);
    CHECK(error->code == TSH_ERR_SHAPE, "a verdict stays");
    return 0;
}

static void a_failing_rank_ends_all_in_one_sentence(void **state) {
    static const int ranks[] = {2, 3, 8};
    int how, i;
    (void)state;
    for (how = 0; how < TELLINGS; how++)
        for (i = 0; i < COUNT(ranks); i++) {
            telling t = (telling)how;
            ranks_run(ranks[i], one_fails, &t);
        }
}

/* An error inside a deferred or ordinary backward leaves no request behind and no hang: rank 0
 * fails in a custom op's backward while an all-reduce is in flight. */
static void failing_backward(tsh_tensor *const *in, int n, const void *const *out,
                             const tsh_real *const *grad_out, tsh_real *const *grad_in,
                             void *user) {
    tsh_ctx *ctx = tsh_ctx_of(in[0]);
    (void)user, (void)n, (void)out, (void)grad_out, (void)grad_in;
    if (tsh_world(ctx)->rank == 0) (void)tsh_fail(ctx, TSH_ERR_ARGUMENT, "the probe says no");
}

static int fails_in_backward(tsh_ctx *ctx, void *user) {
    tsh_custom_op_desc desc = {
        .name = "probe", .forward = flight_forward, .backward = failing_backward};
    tsh_tensor *w = same_leaf(ctx, 0, "5,4 S(0)", 1, 3);
    tsh_tensor *x = tsh_scale(same_leaf(ctx, 0, "3,4 R", 1, 1), 2), *y = tsh_neg(x), *loss;
    (void)user;
    desc.out[0].shape = tsh_shape_of(x);
    desc.out[0].layout = tsh_replicated();
    loss = tsh_sum(tsh_custom_op(ctx, &y, 1, NULL, &desc), TSH_ALL, 0);
    loss = tsh_add(loss, column_loss(ctx, x, w, 1));
    (void)tsh_barrier(tsh_world(ctx)); /* all are here before one fails */
    (void)tsh_backward(ctx, loss);     /* a rank may be through before it hears of rank 0 */
    (void)tsh_barrier(tsh_world(ctx));
    CHECK(!tsh_ok(ctx) && tsh_last_error(ctx)->code == TSH_ERR_ARGUMENT, "all fail");
    CHECK(strstr(tsh_last_error(ctx)->message, "the probe says no"), "one sentence");
    CHECK(tsh_last_error(ctx)->rank == 0, "of rank 0");
    return 0;
}

static void an_error_inside_backward_ends_all(void **state) {
    (void)state;
    ranks_run(1, fails_in_backward, NULL);
    ranks_run(3, fails_in_backward, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_equal_dense_ones_in_as_few_collectives),
        cmocka_unit_test(gradients_accumulate_until_zeroed),
        cmocka_unit_test(micro_batches_are_synced_once),
        cmocka_unit_test(the_last_backward_completes_deferred_ones),
        cmocka_unit_test(a_pending_gradient_is_not_clipped_or_stepped_on),
        cmocka_unit_test(data_parallel_gradients_are_averaged),
        cmocka_unit_test(retained_tensors_keep_complete_gradients),
        cmocka_unit_test(terms_get_the_gradient_of_their_sum),
        cmocka_unit_test(reading_what_was_given_back_is_an_error),
        cmocka_unit_test(recorded_values_are_not_written),
        cmocka_unit_test(what_backward_refuses),
        cmocka_unit_test(completions_start_early_and_overlap),
        cmocka_unit_test(a_transfer_hides_behind_the_gemm_of_the_weights),
        cmocka_unit_test(a_failing_rank_ends_all_in_one_sentence),
        cmocka_unit_test(an_error_inside_backward_ends_all),
    };
    return cmocka_run_group_tests_name("unit/tape", tests, NULL, NULL);
}
