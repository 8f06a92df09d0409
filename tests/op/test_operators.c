/* The four operators of what each rank holds, and tsh_set_layout: values, gradients and collectives
 * at every degree, alone and as the layers that other systems build of them, which must equal the
 * dense ones. */
/* build: double */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"

static const tsh_redop every_op[] = {TSH_SUM, TSH_PROD, TSH_MIN, TSH_MAX, TSH_AVG};

/* Element e on rank r: a small integer, exact in sums and products of 8. */
static double held(int rank, int64_t e) {
    return 1 + (double)(ranks_mix(40 + (uint64_t)rank, (uint64_t)e) % 3);
}

/* A tensor whose values differ between ranks, though its layout says R; or this rank's piece. */
static tsh_tensor *own(tsh_ctx *ctx, tsh_shape shape, const tsh_layout *layout) {
    tsh_tensor *t = tsh_tensor_new(ctx, TSH_REAL, shape, layout ? *layout : tsh_replicated());
    tsh_real *x = (tsh_real *)tsh_data(ctx, t);
    int64_t e;
    for (e = 0; e < tsh_local_numel(t); e++) x[e] = (tsh_real)held(tsh_tp(ctx)->rank, e);
    return t;
}

static tsh_tensor *same(tsh_ctx *ctx, tsh_shape shape, uint64_t seed) {
    tsh_tensor *t = tsh_tensor_new(ctx, TSH_REAL, shape, tsh_replicated());
    (void)ranks_set(ctx, t, seed);
    return t;
}

static double reduced(tsh_redop op, int ranks, int64_t e) {
    double y = held(0, e);
    int r;
    for (r = 1; r < ranks; r++) {
        double x = held(r, e);
        y = op == TSH_PROD  ? y * x
            : op == TSH_MIN ? fmin(y, x)
            : op == TSH_MAX ? fmax(y, x)
                            : y + x;
    }
    return op == TSH_AVG ? y / ranks : y;
}

static uint64_t calls(tsh_ctx *ctx, tsh_coll_kind kind) {
    return tsh_tp(ctx)->stats.calls[kind];
}

static uint64_t all_calls(tsh_ctx *ctx) {
    uint64_t n = 0;
    int i;
    for (i = 0; i < TSH_COLL_KINDS; i++) n += calls(ctx, (tsh_coll_kind)i);
    return n;
}

static int equals(tsh_ctx *ctx, const char *what, tsh_tensor *a, tsh_tensor *b) {
    const tsh_real *x = (const tsh_real *)tsh_data(ctx, a), *y;
    int64_t e;
    CHECK(a && b, "%s", what);
    y = (const tsh_real *)tsh_data(ctx, b);
    CHECK(tsh_local_numel(a) == tsh_local_numel(b), "%s: %d elements, not %d", what,
          (int)tsh_local_numel(a), (int)tsh_local_numel(b));
    for (e = 0; e < tsh_local_numel(a); e++)
        CHECK(x[e] == y[e], "%s: element %d is %g, not %g", what, (int)e, (double)x[e],
              (double)y[e]);
    return 0;
}

/* sum(y * c) with c as large as y, which lies as y and may differ between ranks. */
static tsh_tensor *loss_of(tsh_tensor *y, tsh_tensor *c) {
    return tsh_sum(tsh_mul(y, c), TSH_ALL, 0);
}

/* ------------------------------------------------------------------ copy, reduce */

/* Forward: itself. Backward: one all-reduce by op of what each rank's consumers gave, those that
 * know only a part included, and also where the gradient is kept for the user. */
static int copies(tsh_ctx *ctx, void *user) {
    int ranks = tsh_tp(ctx)->size, i, way;
    tsh_tensor *c = own(ctx, tsh_shape2(3, 5), NULL);
    (void)user;
    for (i = 0; i < COUNT(every_op); i++)
        for (way = 0; way < 6; way++) {
            tsh_tensor *x = tsh_requires_grad(same(ctx, tsh_shape2(3, 5), 1), 1), *y, *loss, *part;
            uint64_t before = all_calls(ctx), reduces = calls(ctx, TSH_ALLREDUCE);
            const tsh_real *g;
            int64_t e;
            y = tsh_tp_copy(way & 1 ? tsh_scale(x, 1) : x, every_op[i]);
            CHECK(y && tsh_layout_of(y).kind == TSH_REPLICATED, "copy");
            if (ranks == 1 && !(way & 1)) CHECK(y == x, "nothing at one rank");
            if (way & 2) tsh_retain_grad(y);
            loss = way & 4 ? loss_of(tsh_mul(y, tsh_ones(ctx, tsh_shape1(1))), c) : loss_of(y, c);
            CHECK(all_calls(ctx) == before, "a collective forward");
            CHECK(equals(ctx, "copy", y, x) == 0, "values");
            CHECK(tsh_backward(ctx, loss) == TSH_OK, "backward");
            CHECK(calls(ctx, TSH_ALLREDUCE) - reduces == (ranks > 1) &&
                      all_calls(ctx) - before == (ranks > 1),
                  "%d collectives", (int)(all_calls(ctx) - before));
            g = (const tsh_real *)tsh_data(ctx, tsh_grad(x));
            CHECK(g, "a gradient");
            for (e = 0; e < 15; e++)
                CHECK(fabs((double)g[e] - reduced(every_op[i], ranks, e)) < 1e-5,
                      "op %d, way %d: %g, not %g", i, way, (double)g[e],
                      reduced(every_op[i], ranks, e));
            if ((way & 2) && ranks > 1) {
                part = tsh_grad(y);
                CHECK(part && equals(ctx, "what this rank gave", part, c) == 0, "kept");
            }
            CHECK(tsh_step_end(ctx) == TSH_OK, "step");
            tsh_tensor_free(x);
        }
    return 0;
}

/* reduce: what each rank holds, by op; the gradient passes as it is. A partial sum is reduced too.
 */
static int reduces(tsh_ctx *ctx, void *user) {
    int ranks = tsh_tp(ctx)->size, i, way;
    tsh_layout partial = tsh_partial();
    (void)user;
    for (i = 0; i < COUNT(every_op); i++)
        for (way = 0; way < 4; way++) {
            tsh_tensor *x = own(ctx, tsh_shape2(3, 5), way & 1 ? &partial : NULL), *y, *c, *in;
            uint64_t before;
            const tsh_real *v;
            int64_t e;
            tsh_requires_grad(x, 1);
            in = way & 2 ? tsh_transpose(tsh_transpose(tsh_scale(x, 1), 0, 1), 0, 1) : x;
            before = all_calls(ctx);
            y = tsh_tp_reduce(in, every_op[i]);
            CHECK(y && tsh_layout_of(y).kind == TSH_REPLICATED, "reduce");
            if (ranks == 1 && !way) CHECK(y == x, "nothing at one rank");
            CHECK(all_calls(ctx) - before == (ranks > 1), "one collective");
            v = (const tsh_real *)tsh_data(ctx, y);
            for (e = 0; e < 15; e++)
                CHECK(fabs((double)v[e] - reduced(every_op[i], ranks, e)) < 1e-5, "op %d", i);
            c = same(ctx, tsh_shape2(3, 5), 3);
            before = all_calls(ctx);
            CHECK(tsh_backward(ctx, loss_of(y, c)) == TSH_OK, "backward");
            CHECK(all_calls(ctx) == before, "a collective backward");
            CHECK(equals(ctx, "gradient of reduce", tsh_grad(x), c) == 0, "gradient");
            CHECK(tsh_step_end(ctx) == TSH_OK, "step");
            tsh_tensor_free(x);
        }
    return 0;
}

/* A copy with a replicated and a sharded consumer: gP + gR go out once, also where they are kept.
 */
static int mixed_once(tsh_ctx *ctx, int kept) {
    int ranks = tsh_tp(ctx)->size;
    tsh_layout rows = tsh_sharded(0);
    tsh_tensor *x = tsh_requires_grad(same(ctx, tsh_shape2(3, 4), 1), 1), *y, *g;
    tsh_tensor *w = tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(5, 4), rows), *whole, *want, *loss;
    uint64_t before;
    (void)ranks_set(ctx, w, 2);
    whole = same(ctx, tsh_shape2(5, 4), 2);
    y = tsh_tp_copy(x, TSH_SUM);
    if (kept) tsh_retain_grad(y);
    loss = tsh_add(tsh_full_tensor(tsh_sum(tsh_linear(y, w, NULL), TSH_ALL, 0)),
                   tsh_sum(y, TSH_ALL, 0));
    before = all_calls(ctx);
    CHECK(tsh_backward(ctx, loss) == TSH_OK, "backward");
    CHECK(all_calls(ctx) - before == (ranks > 1), "once");
    g = tsh_keep(tsh_grad(x));
    /* the partial consumer's sum over ranks, and P times the replicated one's */
    tsh_zero_grad(x);
    want = tsh_add(tsh_sum(tsh_linear(x, whole, NULL), TSH_ALL, 0),
                   tsh_scale(tsh_sum(x, TSH_ALL, 0), ranks));
    CHECK(tsh_backward(ctx, want) == TSH_OK, "dense");
    CHECK(equals(ctx, "mixed", g, tsh_grad(x)) == 0, "gradient");
    return 0;
}

static int mixed(tsh_ctx *ctx, void *user) {
    (void)user;
    return mixed_once(ctx, 0) || mixed_once(ctx, 1);
}

/* ------------------------------------------------------------------ scatter, gather */

static int scatters(tsh_ctx *ctx, void *user) {
    int ranks = tsh_tp(ctx)->size, dim;
    (void)user;
    for (dim = -2; dim < 2; dim++) {
        tsh_tensor *x = tsh_requires_grad(same(ctx, tsh_shape2(5, 7), 1), 1), *y, *c;
        tsh_layout cut = tsh_sharded(dim), have;
        uint64_t before = all_calls(ctx);
        y = tsh_tp_scatter(x, dim);
        have = tsh_layout_of(y);
        CHECK(y && spec_same_layout(&have, &cut, tsh_shape_of(x), ranks), "scatter");
        CHECK(all_calls(ctx) == before, "a collective forward");
        if (ranks == 1) CHECK(tsh_data(ctx, y) == tsh_data(ctx, x), "nothing moves at one rank");
        CHECK(equals(ctx, "slice", y, tsh_redistribute(x, cut)) == 0, "values");
        c = same(ctx, tsh_shape2(5, 7), 2);
        before = calls(ctx, TSH_ALLGATHER);
        CHECK(tsh_backward(ctx, tsh_full_tensor(loss_of(y, tsh_redistribute(c, cut)))) == TSH_OK,
              "back");
        CHECK(calls(ctx, TSH_ALLGATHER) - before == (ranks > 1), "an all-gather backward");
        CHECK(equals(ctx, "gradient of scatter", tsh_grad(x), c) == 0, "gradient");
        CHECK(tsh_step_end(ctx) == TSH_OK, "step");
    }
    return 0;
}

/* Pieces that a layout knows of, fused ones too: in the order of the whole. */
static int gathers_shards(tsh_ctx *ctx, void *user) {
    static const char *const forms[] = {"5,7 S(1)", "5,6 S(1, 3 segments, unit 2)", "2,3 S(0)"};
    int i;
    (void)user;
    for (i = 0; i < COUNT(forms); i++) {
        spec form = spec_parse(forms[i], 1);
        tsh_tensor *x = tsh_requires_grad(spec_tensor(ctx, &form, 1), 1);
        tsh_tensor *want = same(ctx, form.shape, 1), *c = same(ctx, form.shape, 2), *y;
        uint64_t before;
        y = tsh_tp_gather(x, form.layout.dim);
        CHECK(equals(ctx, "gather", y, want) == 0, "%s", forms[i]);
        before = all_calls(ctx);
        CHECK(tsh_backward(ctx, loss_of(y, c)) == TSH_OK, "backward");
        CHECK(all_calls(ctx) == before, "a slice needs no collective");
        CHECK(equals(ctx, "gradient", tsh_grad(x), tsh_redistribute(c, form.layout)) == 0, "%s",
              forms[i]);
        CHECK(tsh_step_end(ctx) == TSH_OK, "step");
    }
    return 0;
}

/* Element (i, j) of pieces (2, 3) that were put one after the other along dim. */
static double piece_of(int dim, int64_t i, int64_t j) {
    return held(dim ? (int)j / 3 : (int)i / 2, i % 2 * 3 + j % 3);
}

/* Pieces that each rank holds as R: put one after the other. Complete gradients are sliced, partial
 * ones reduce-scattered, whether the gathered gradient is kept or not. */
static int gathers_pieces(tsh_ctx *ctx, void *user) {
    int ranks = tsh_tp(ctx)->size, rank = tsh_tp(ctx)->rank, dim, way;
    (void)user;
    for (dim = 0; dim < 2; dim++)
        for (way = 0; way < 4; way++) {
            tsh_shape shape = tsh_shape2(2, 3), big = shape;
            tsh_layout rows = tsh_sharded(0);
            tsh_tensor *x = tsh_requires_grad(own(ctx, shape, NULL), 1), *y, *c, *w, *whole, *want;
            uint64_t before;
            int64_t i, j;
            const tsh_real *v;
            big.dim[dim] *= ranks;
            y = tsh_tp_gather(way & 1 ? tsh_scale(x, 1) : x, dim - 2);
            CHECK(y && tsh_size(y, dim) == big.dim[dim], "gather");
            if (ranks == 1 && !(way & 1)) CHECK(y == x, "nothing at one rank");
            v = (const tsh_real *)tsh_data(ctx, y);
            for (i = 0; i < big.dim[0]; i++)
                for (j = 0; j < big.dim[1]; j++)
                    CHECK(v[i * big.dim[1] + j] == (tsh_real)piece_of(dim, i, j), "piece (%d, %d)",
                          (int)i, (int)j);
            if (way & 2) tsh_retain_grad(y);
            c = same(ctx, big, 2);
            w = tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(5, big.dim[1]), rows);
            (void)ranks_set(ctx, w, 3);
            whole = same(ctx, tsh_shape2(5, big.dim[1]), 3);
            before = calls(ctx, TSH_REDUCE_SCATTER);
            CHECK(tsh_backward(
                      ctx, tsh_add(loss_of(y, c), tsh_full_tensor(tsh_sum(tsh_linear(y, w, NULL),
                                                                          TSH_ALL, 0)))) == TSH_OK,
                  "backward");
            if (!(way & 2))
                CHECK(calls(ctx, TSH_REDUCE_SCATTER) - before == (ranks > 1), "partial ones");
            /* the dense gradient of the gathered tensor, of which this rank has its slice */
            want = tsh_requires_grad(same(ctx, big, 1), 1);
            CHECK(tsh_backward(ctx, tsh_add(loss_of(want, c), tsh_sum(tsh_linear(want, whole, NULL),
                                                                      TSH_ALL, 0))) == TSH_OK,
                  "dense");
            want = tsh_clone(tsh_slice(tsh_grad(want), dim, rank * shape.dim[dim], shape.dim[dim]));
            CHECK(equals(ctx, "gradient of gather", tsh_grad(x), want) == 0, "way %d", way);
            CHECK(tsh_step_end(ctx) == TSH_OK, "step");
        }
    return 0;
}

/* ------------------------------------------------- layers as other systems build them */

/* This rank's slice of a weight, as a replicated tensor: what a rank of Megatron's holds. */
static tsh_tensor *shard_of(tsh_ctx *ctx, tsh_shape shape, int dim, uint64_t seed) {
    tsh_layout cut = tsh_sharded(dim);
    tsh_tensor *w = tsh_tensor_new(ctx, TSH_REAL, shape, cut);
    (void)ranks_set(ctx, w, seed);
    return tsh_requires_grad(tsh_set_layout(w, tsh_replicated()), 1);
}

/* copy, a local matrix, gelu's place (a square), scatter of nothing, a local matrix, reduce, bias:
 * values and all gradients are those of the dense layers. */
static int megatron(tsh_ctx *ctx, void *user) {
    int ranks = tsh_tp(ctx)->size, rank = tsh_tp(ctx)->rank;
    tsh_shape up = tsh_shape2(2 * ranks, 4), down = tsh_shape2(3, 2 * ranks);
    tsh_tensor *x = tsh_requires_grad(same(ctx, tsh_shape2(3, 4), 1), 1), *y, *h;
    tsh_tensor *a = shard_of(ctx, up, 0, 2), *b = shard_of(ctx, down, 1, 3);
    tsh_tensor *bias = tsh_requires_grad(same(ctx, tsh_shape1(3), 4), 1);
    tsh_tensor *x2 = tsh_requires_grad(same(ctx, tsh_shape2(3, 4), 1), 1), *y2, *h2;
    tsh_tensor *a2 = tsh_requires_grad(same(ctx, up, 2), 1);
    tsh_tensor *b2 = tsh_requires_grad(same(ctx, down, 3), 1);
    tsh_tensor *bias2 = tsh_requires_grad(same(ctx, tsh_shape1(3), 4), 1);
    uint64_t before = all_calls(ctx);
    (void)user;
    h = tsh_linear(tsh_tp_copy(x, TSH_SUM), a, NULL);
    y = tsh_add(tsh_tp_reduce(tsh_linear(tsh_mul(h, h), b, NULL), TSH_SUM), bias);
    CHECK(all_calls(ctx) - before == (ranks > 1), "column 0, row 1 forward");
    before = all_calls(ctx);
    CHECK(tsh_backward(ctx, ranks_loss(ctx, y)) == TSH_OK, "backward");
    CHECK(all_calls(ctx) - before == (ranks > 1), "column 1, row 0 backward");
    h2 = tsh_linear(x2, a2, NULL);
    y2 = tsh_retain_grad(tsh_linear(tsh_mul(h2, h2), b2, bias2));
    CHECK(tsh_backward(ctx, ranks_loss(ctx, y2)) == TSH_OK, "dense");
    CHECK(equals(ctx, "dx", tsh_grad(x), tsh_grad(x2)) == 0, "dx");
    CHECK(equals(ctx, "da", tsh_grad(a), tsh_slice(tsh_grad(a2), 0, 2 * rank, 2)) == 0, "da");
    CHECK(equals(ctx, "db", tsh_grad(b), tsh_clone(tsh_slice(tsh_grad(b2), 1, 2 * rank, 2))) == 0,
          "db");
    CHECK(equals(ctx, "dbias", tsh_grad(bias), tsh_grad(bias2)) == 0, "dbias");
    return 0;
}

/* ml's RowParallelLinear of a full input, and its ColumnParallelLinear(gather_output=True): scatter
 * and gather, with their gradients. */
static int master(tsh_ctx *ctx, void *user) {
    int ranks = tsh_tp(ctx)->size, rank = tsh_tp(ctx)->rank;
    tsh_tensor *x = tsh_requires_grad(same(ctx, tsh_shape2(3, 2 * ranks), 1), 1), *y, *piece;
    tsh_tensor *w = shard_of(ctx, tsh_shape2(5, 2 * ranks), 1, 2);
    tsh_tensor *v = shard_of(ctx, tsh_shape2(2 * ranks, 5), 0, 3);
    tsh_tensor *x2 = tsh_requires_grad(same(ctx, tsh_shape2(3, 2 * ranks), 1), 1), *y2;
    tsh_tensor *w2 = tsh_requires_grad(same(ctx, tsh_shape2(5, 2 * ranks), 2), 1);
    tsh_tensor *v2 = tsh_requires_grad(same(ctx, tsh_shape2(2 * ranks, 5), 3), 1);
    (void)user;
    piece = tsh_set_layout(tsh_tp_scatter(x, -1), tsh_replicated());
    y = tsh_tp_reduce(tsh_linear(piece, w, NULL), TSH_SUM);
    y = tsh_tp_gather(tsh_linear(tsh_tp_copy(y, TSH_SUM), v, NULL), -1);
    y2 = tsh_linear(tsh_linear(x2, w2, NULL), v2, NULL);
    CHECK(equals(ctx, "y", y, y2) == 0, "y");
    CHECK(tsh_backward(ctx, tsh_add(ranks_loss(ctx, y), ranks_loss(ctx, y2))) == TSH_OK, "both");
    CHECK(equals(ctx, "dx", tsh_grad(x), tsh_grad(x2)) == 0, "dx");
    CHECK(equals(ctx, "dw", tsh_grad(w), tsh_clone(tsh_slice(tsh_grad(w2), 1, 2 * rank, 2))) == 0,
          "dw");
    CHECK(equals(ctx, "dv", tsh_grad(v), tsh_slice(tsh_grad(v2), 0, 2 * rank, 2)) == 0, "dv");
    return 0;
}

/* ------------------------------------------------------------------ set_layout */

/* In place: nothing moves, shapes follow, and there and back is where it was. */
static int in_place(tsh_ctx *ctx, void *user) {
    int ranks = tsh_tp(ctx)->size, i, d;
    static const char *const ways[] = {"S(0)", "S(1)",        "S(-1)", "S(1, 3 segments, unit 2)",
                                       "P",    "S(0, unit 2)"};
    (void)user;
    for (i = 0; i < COUNT(ways); i++) {
        tsh_layout layout = spec_layout(ways[i], 1), have;
        tsh_tensor *x = own(ctx, tsh_shape2(2, 6), NULL), *copy = tsh_keep(x);
        void *data = tsh_data(ctx, x);
        uint64_t before = all_calls(ctx);
        CHECK(tsh_set_layout(x, layout) == x, "%s: in place", ways[i]);
        have = tsh_layout_of(x);
        CHECK(spec_same_layout(&have, &layout, tsh_shape_of(x), ranks), "%s", ways[i]);
        for (d = 0; d < 2; d++)
            CHECK(tsh_size(x, d) == (have.kind == TSH_SHARDED && have.dim == d ? ranks : 1) *
                                        tsh_local_size(x, d),
                  "%s: its shape", ways[i]);
        CHECK(tsh_data(ctx, x) == data && equals(ctx, ways[i], x, copy) == 0, "nothing moves");
        CHECK(tsh_set_layout(x, layout) == x, "the same again");
        /* to another sharding by way of the whole */
        CHECK(tsh_set_layout(x, tsh_sharded(1)) == x && tsh_local_size(x, 1) == 6 &&
                  tsh_size(x, 1) == 6 * ranks && tsh_size(x, 0) == 2,
              "%s to S(1)", ways[i]);
        CHECK(tsh_set_layout(x, tsh_replicated()) == x && tsh_size(x, 1) == 6, "back");
        CHECK(tsh_data(ctx, x) == data && equals(ctx, ways[i], x, copy) == 0, "nothing moves");
        CHECK(all_calls(ctx) == before, "a collective");
    }
    return 0;
}

/* What the values mean then: pieces of a whole, or terms of a sum. */
static int meaning(tsh_ctx *ctx, void *user) {
    int ranks = tsh_tp(ctx)->size;
    tsh_tensor *x = own(ctx, tsh_shape1(3), NULL), *y;
    const tsh_real *v;
    int64_t e;
    (void)user;
    y = tsh_full_tensor(tsh_set_layout(x, tsh_sharded(0)));
    CHECK(tsh_size(y, 0) == 3 * ranks, "pieces");
    v = (const tsh_real *)tsh_data(ctx, y);
    for (e = 0; e < 3 * ranks; e++) CHECK(v[e] == (tsh_real)piece_of(1, 0, e), "pieces");
    CHECK(tsh_step_end(ctx) == TSH_OK, "no views of x are left");
    y = tsh_full_tensor(tsh_set_layout(x, tsh_partial()));
    v = (const tsh_real *)tsh_data(ctx, y);
    for (e = 0; e < 3; e++) CHECK(v[e] == (tsh_real)reduced(TSH_SUM, ranks, e), "terms");
    return 0;
}

/* How a tensor comes by its layout. */
typedef enum laying { LAID_BEFORE, LAID_AFTER, LAID_STEP, LAID_STRIDED, LAYINGS } laying;

/* Gradients: each rank's is that of the values it holds, whatever they are declared to be, and
 * whether that is before tsh_requires_grad, after it, or within the graph. */
static int slope(tsh_ctx *ctx, const char *from, const char *to, laying way) {
    const tsh_layout layouts[3] = {tsh_replicated(), tsh_partial(), tsh_sharded(0)};
    const tsh_layout a = layouts[*from == 'P' ? 1 : *from == 'S' ? 2 : 0];
    const tsh_layout b = *to == 'T'
                             ? tsh_sharded(1)
                             : layouts[*to == 'P' ? 1 : *to == 'S' ? 2 : 0];
    const int ranks = tsh_tp(ctx)->size;
    tsh_tensor *x = own(ctx, tsh_shape2(*from == 'S' ? 2 * ranks : 2, 3), &a), *y, *c, *loss;
    tsh_tensor *before = tsh_keep(x);
    uint64_t all = all_calls(ctx);
    tsh_layout have;
    if (way == LAID_BEFORE) CHECK(tsh_set_layout(x, b) == x, "%s to %s: in place", from, to);
    tsh_requires_grad(x, 1);
    y = x;
    if (way == LAID_STEP) y = tsh_scale(x, 1);
    if (way == LAID_STRIDED) y = tsh_transpose(tsh_clone(tsh_transpose(x, 0, 1)), 0, 1);
    if (way != LAID_BEFORE) y = tsh_set_layout(y, b);
    CHECK(y && (way < LAID_STEP) == (y == x), "%s to %s: in place", from, to);
    have = tsh_layout_of(y);
    CHECK(spec_same_layout(&have, &b, tsh_shape_of(y), ranks), "%s to %s", from, to);
    CHECK(equals(ctx, "values", y, before) == 0, "%s to %s", from, to);
    /* c lies as y's gradient: this rank's own numbers where y is sharded or whole */
    c = own(ctx, tsh_shape_of(y), b.kind == TSH_SHARDED ? &b : NULL);
    if (b.kind == TSH_PARTIAL) c = same(ctx, tsh_shape_of(y), 5);
    loss = loss_of(y, c);
    CHECK(all_calls(ctx) == all, "a collective");
    if (b.kind != TSH_REPLICATED) loss = tsh_full_tensor(loss);
    all = all_calls(ctx);
    CHECK(tsh_backward(ctx, loss) == TSH_OK, "backward");
    CHECK(all_calls(ctx) == all, "%s to %s: a collective backward", from, to);
    CHECK(equals(ctx, "gradient", tsh_grad(x), c) == 0, "%s to %s, way %d", from, to, (int)way);
    CHECK(tsh_step_end(ctx) == TSH_OK, "step");
    return 0;
}

static int slopes(tsh_ctx *ctx, void *user) {
    static const char *const from[] = {"R", "R", "S", "P", "S", "P", "S"};
    static const char *const to[] = {"S", "P", "R", "R", "P", "S", "T"};
    int i, way;
    (void)user;
    for (i = 0; i < COUNT(from); i++)
        for (way = 0; way < LAYINGS; way++)
            if (slope(ctx, from[i], to[i], (laying)way)) return 1;
    return 0;
}

/* ------------------------------------------------------------------ refused */

#define REFUSED(call, code_, part)                                                                 \
    do {                                                                                           \
        (void)tsh_barrier(tsh_world(ctx));                                                         \
        CHECK(!(call), "%s", part);                                                                \
        CHECK(tsh_last_error(ctx)->code == code_, "%s", part);                                     \
        CHECK(strstr(tsh_last_error(ctx)->message, part), "%s", part);                             \
        tsh_clear_error(ctx);                                                                      \
        (void)tsh_barrier(tsh_world(ctx));                                                         \
    } while (0)

static int refusals(tsh_ctx *ctx, void *user) {
    tsh_layout rows = tsh_sharded(0), partial = tsh_partial();
    tsh_tensor *s = tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(5, 4), rows);
    tsh_tensor *p = tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(5, 4), partial);
    tsh_tensor *r = tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(5, 4), tsh_replicated());
    tsh_tensor *ids = tsh_tensor_new(ctx, TSH_I32, tsh_shape1(4), tsh_replicated());
    (void)user;
    REFUSED(tsh_tp_copy(s, TSH_SUM), TSH_ERR_LAYOUT, "tsh_tp_copy: takes what each rank holds");
    REFUSED(tsh_tp_copy(p, TSH_SUM), TSH_ERR_LAYOUT, "tsh_set_layout(x, tsh_replicated())");
    REFUSED(tsh_tp_reduce(s, TSH_SUM), TSH_ERR_LAYOUT, "(5, 4) S(0)");
    REFUSED(tsh_tp_scatter(p, 0), TSH_ERR_LAYOUT, "tsh_tp_scatter: takes");
    REFUSED(tsh_tp_scatter(s, 0), TSH_ERR_LAYOUT, "tsh_tp_scatter: takes");
    REFUSED(tsh_tp_gather(p, 0), TSH_ERR_LAYOUT, "tsh_tp_gather: takes");
    REFUSED(tsh_tp_gather(s, 1), TSH_ERR_LAYOUT, "(5, 4) S(0) is not cut along dimension 1");
    REFUSED(tsh_tp_gather(r, 2), TSH_ERR_ARGUMENT, "(5, 4) R has no dimension 2");
    REFUSED(tsh_tp_scatter(r, -3), TSH_ERR_ARGUMENT, "has no dimension -3");
    REFUSED(tsh_tp_copy(r, (tsh_redop)5), TSH_ERR_ARGUMENT, "5 is no reduction");
    REFUSED(tsh_tp_reduce(ids, TSH_AVG), TSH_ERR_ARGUMENT, "is no reduction of i32");
    REFUSED(tsh_set_layout(r, tsh_sharded(2)), TSH_ERR_LAYOUT, "cannot lie as S(2)");
    REFUSED(tsh_set_layout(r, tsh_shard_units(0, 7)), TSH_ERR_LAYOUT,
            tsh_tp(ctx)->size == 7 ? "" : "cannot lie as S(0, unit 7)");
    if (tsh_tp(ctx)->size > 1) {
        REFUSED(tsh_set_layout(s, tsh_replicated()), TSH_ERR_LAYOUT,
                "all pieces must be of one length");
        REFUSED(tsh_set_layout(s, tsh_sharded(1)), TSH_ERR_LAYOUT, "cannot become R");
        CHECK(tsh_layout_of(s).kind == TSH_SHARDED && tsh_size(s, 0) == 5, "as it was");
    }
    CHECK(!tsh_set_layout(NULL, rows) && !tsh_tp_copy(NULL, TSH_SUM) &&
              !tsh_tp_reduce(NULL, TSH_SUM) && !tsh_tp_scatter(NULL, 0) && !tsh_tp_gather(NULL, 0),
          "NULL gives NULL");
    CHECK(tsh_tp_reduce(ids, TSH_MAX) && tsh_tp_gather(ids, 0) && tsh_tp_copy(ids, TSH_SUM) == ids,
          "integers travel too");
    CHECK_OK();
    return 0;
}

/* What already refers to a tensor would not learn of another layout. */
static int referred(tsh_ctx *ctx, void *user) {
    const tsh_layout rows = tsh_sharded(0), units = tsh_shard_units(0, 2);
    tsh_tensor *x = own(ctx, tsh_shape2(2, 3), NULL), *w = own(ctx, tsh_shape2(2, 3), NULL);
    tsh_tensor *s = tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(2 * tsh_tp(ctx)->size, 3), rows);
    int i;
    (void)user;
    tsh_requires_grad(w, 1);
    for (i = 0; i < 2; i++) {
        CHECK(i ? tsh_reshape(x, tsh_shape1(6)) : tsh_detach(x), "it shares x's values");
        REFUSED(tsh_set_layout(x, rows), TSH_ERR_STATE, "there are views or detached tensors");
        CHECK(tsh_step_end(ctx) == TSH_OK, "step");
    }
    for (i = 0; i < 4; i++) { /* nodes that save the values, those of a view, none */
        tsh_tensor *y = i == 0   ? tsh_mul(x, w)
                        : i == 1 ? tsh_mul(tsh_transpose(x, 0, 1), tsh_transpose(w, 0, 1))
                        : i == 2 ? tsh_add(w, x)
                                 : tsh_mul(tsh_detach(x), w);
        CHECK(y, "an op");
        REFUSED(tsh_set_layout(x, rows), TSH_ERR_STATE, "tsh_set_layout: ops are recorded");
        REFUSED(tsh_set_layout(w, rows), TSH_ERR_STATE, "end the step first (tsh_step_end)");
        CHECK(tsh_backward(ctx, tsh_sum(y, TSH_ALL, 0)) == TSH_OK, "backward");
        REFUSED(tsh_set_layout(w, rows), TSH_ERR_STATE, "forget that first: tsh_zero_grad");
        tsh_zero_grad(w);
        CHECK(tsh_set_layout(w, rows) == w && tsh_set_layout(w, tsh_replicated()) == w, "now");
        CHECK(tsh_set_layout(x, rows) == x && tsh_set_layout(x, tsh_replicated()) == x, "now");
    }
    CHECK(tsh_reshape(s, tsh_shape1(tsh_numel(s))), "a view");
    REFUSED(tsh_set_layout(s, units), TSH_ERR_STATE, "there are views");
    CHECK(tsh_set_layout(s, rows) == s, "nothing changes");
    CHECK(tsh_step_end(ctx) == TSH_OK && tsh_set_layout(s, units) == s, "in other units");
    CHECK_OK();
    return 0;
}

/* The same cut in other units is another layout at every degree: a reshape to heads needs them. */
static int units(tsh_ctx *ctx, void *user) {
    const tsh_layout plain = tsh_sharded(1), heads = tsh_shard_units(1, 4);
    const int p = tsh_tp(ctx)->size;
    tsh_tensor *x = tsh_ones(ctx, tsh_shape2(3, 8 * p)), *y, *own;
    (void)user;
    CHECK(tsh_redistribute(x, tsh_replicated()) == x, "the same layout: x itself");
    y = tsh_redistribute(tsh_redistribute(x, plain), heads);
    CHECK(tsh_layout_of(y).segment[0].unit == 4, "the units");
    CHECK(tsh_reshape(y, tsh_shape3(3, 2 * p, 4)), "heads of 4");
    own = tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(3, 8 * p), plain);
    CHECK(tsh_set_layout(own, heads) == own, "in place");
    CHECK(tsh_reshape(own, tsh_shape3(3, 2 * p, 4)), "heads of 4 again");
    CHECK_OK();
    return 0;
}

/* Each function on every degree. */
static void everywhere(int (*fn)(tsh_ctx *, void *)) {
    int i;
    for (i = 0; i < COUNT(ranks_degrees); i++) ranks_run(ranks_degrees[i], fn, NULL);
}

#define TEST(name, fn)                                                                             \
    static void name(void **state) {                                                               \
        (void)state;                                                                               \
        everywhere(fn);                                                                            \
    }
TEST(copy_reduces_its_gradient, copies)
TEST(reduce_passes_its_gradient, reduces)
TEST(copy_takes_whole_and_partial_gradients, mixed)
TEST(scatter_slices, scatters)
TEST(gather_joins_shards, gathers_shards)
TEST(gather_joins_what_each_rank_holds, gathers_pieces)
TEST(megatron_layers_equal_dense_ones, megatron)
TEST(ml_layers_equal_dense_ones, master)
TEST(set_layout_moves_nothing, in_place)
TEST(set_layout_says_what_values_mean, meaning)
TEST(set_layout_has_gradients, slopes)
TEST(set_layout_refuses_what_is_referred_to, referred)
TEST(units_alone_are_another_layout, units)
TEST(mistakes_are_sentences, refusals)

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(copy_reduces_its_gradient),
        cmocka_unit_test(reduce_passes_its_gradient),
        cmocka_unit_test(copy_takes_whole_and_partial_gradients),
        cmocka_unit_test(scatter_slices),
        cmocka_unit_test(gather_joins_shards),
        cmocka_unit_test(gather_joins_what_each_rank_holds),
        cmocka_unit_test(megatron_layers_equal_dense_ones),
        cmocka_unit_test(ml_layers_equal_dense_ones),
        cmocka_unit_test(set_layout_moves_nothing),
        cmocka_unit_test(set_layout_says_what_values_mean),
        cmocka_unit_test(set_layout_has_gradients),
        cmocka_unit_test(set_layout_refuses_what_is_referred_to),
        cmocka_unit_test(units_alone_are_another_layout),
        cmocka_unit_test(mistakes_are_sentences),
    };
    return cmocka_run_group_tests_name("op/operators", tests, NULL, NULL);
}
