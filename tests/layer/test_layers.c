/* Every layer under every style against the same layer on one rank: values, gradients of input and
 * parameters, collectives forward and backward; at every degree, with sizes that divide, that do
 * not, and that leave ranks empty; inputs of one to three dimensions; biases that are not zero. */
/* build: double */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"

#define ROUNDING 2e-5 /* exponentials, and sums in another order than one rank's */

/* ------------------------------------------------------------- layers, by text */

/* "col", "row" or "plain"; norms have none of them. */
static tsh_style style_of(probe *p) {
    (void)probe_has(p, "plain");
    return probe_has(p, "col") ? TSH_COLWISE : probe_has(p, "row") ? TSH_ROWWISE : TSH_PLAIN;
}

/* A name that no other layer of this ctx has, and the same one at every degree. */
static const char *name_of(const probe *p, const char *what, char *name) {
    (void)snprintf(name, 32, "%s_%d", what, p->number);
    return name;
}

/* Gives the layer integer values, watches its gradients, and shards it by a plan: "plan" before it
 * holds values, "late" when it does. A layer with neither was sharded at birth. */
static void prepare(probe *p, tsh_module *layer, int params) {
    tsh_plan_rule rule = {.path = "", .style = style_of(p)};
    int i;
    rule.segments = (int)probe_number(p, "segments");
    rule.unit = probe_number(p, "unit");
    rule.gather_output = probe_has(p, "gather");
    if (probe_has(p, "plan") && !p->dense) tsh_parallelize(layer, &rule, 1);
    tsh_materialize(layer);
    for (i = 0; i < params; i++) {
        p->watched[i] = tsh_param(layer, i ? "bias" : "weight");
        ranks_set(p->ctx, p->watched[i], 40 + (uint64_t)i);
    }
    if (probe_has(p, "late") && !p->dense) tsh_parallelize(layer, &rule, 1);
}

static tsh_tensor *layer_linear(probe *p) {
    char name[32];
    tsh_linear_desc desc = {.in = tsh_size(p->in[0], -1), .out = probe_number(p, "out")};
    tsh_module *layer;
    tsh_tensor *y;
    desc.bias = probe_has(p, "no bias") ? TSH_NO : TSH_YES;
    desc.skip_bias_add = probe_has(p, "skip");
    if (!probe_has(p, "plan") && !probe_has(p, "late") && !p->dense) {
        desc.style = style_of(p);
        desc.segments = (int)probe_number(p, "segments");
        desc.unit = probe_number(p, "unit");
        desc.gather_output = probe_has(p, "gather");
    }
    layer = tsh_add_linear(tsh_root(p->ctx), name_of(p, "linear", name), &desc);
    prepare(p, layer, desc.bias == TSH_NO ? 1 : 2);
    y = tsh_forward(layer, p->in[0]);
    return desc.skip_bias_add ? tsh_add(y, tsh_param(layer, "bias")) : y;
}

static tsh_tensor *layer_embedding(probe *p) {
    char name[32];
    tsh_embedding_desc desc = {.count = probe_number(p, "count"), .dim = probe_number(p, "dim")};
    tsh_module *layer;
    if (!probe_has(p, "plan") && !probe_has(p, "late") && !p->dense) desc.style = style_of(p);
    layer = tsh_add_embedding(tsh_root(p->ctx), name_of(p, "embedding", name), &desc);
    prepare(p, layer, 1);
    return tsh_forward(layer, p->in[0]);
}

static tsh_tensor *layer_norm(probe *p) {
    char name[32];
    const tsh_layer_norm_desc desc = {.dim = tsh_size(p->in[0], -1),
                                      .bias = probe_has(p, "no bias") ? TSH_NO : TSH_USUAL};
    tsh_module *layer = tsh_add_layer_norm(tsh_root(p->ctx), name_of(p, "norm", name), &desc);
    prepare(p, layer, desc.bias == TSH_NO ? 1 : 2);
    return tsh_forward(layer, p->in[0]);
}

static tsh_tensor *layer_rms(probe *p) {
    char name[32];
    const tsh_rms_norm_desc desc = {.dim = tsh_size(p->in[0], -1),
                                    .eps = probe_has(p, "eps") ? 0.5 : 0,
                                    .plus_one = probe_has(p, "one")};
    tsh_module *layer = tsh_add_rms_norm(tsh_root(p->ctx), name_of(p, "rms", name), &desc);
    prepare(p, layer, 1);
    return tsh_forward(layer, p->in[0]);
}

/* Twice in training mode, with another mask each time, and once without. */
static tsh_tensor *layer_dropout(probe *p) {
    char name[32];
    tsh_module *layer = tsh_add_dropout(tsh_root(p->ctx), name_of(p, "dropout", name), 0.5);
    tsh_tensor *y = tsh_add(tsh_forward(layer, p->in[0]),
                            tsh_scale(tsh_forward(layer, p->in[0]), 3));
    tsh_train(layer, 0);
    return tsh_add(y, tsh_scale(tsh_forward(layer, p->in[0]), 16));
}

/* q, k and v as three column-parallel layers of one input. */
static tsh_tensor *layer_qkv(probe *p) {
    tsh_tensor *part[3];
    char name[32];
    int i;
    for (i = 0; i < 3; i++) {
        const tsh_linear_desc desc = {
            .in = 4, .out = probe_number(p, "out"), .style = p->dense ? TSH_PLAIN : TSH_COLWISE};
        tsh_module *layer = tsh_add_linear(tsh_root(p->ctx),
                                           name_of(p,
                                                   i == 0   ? "q"
                                                   : i == 1 ? "k"
                                                            : "v",
                                                   name),
                                           &desc);
        tsh_materialize(layer);
        ranks_set(p->ctx, tsh_param(layer, "weight"), 40 + (uint64_t)i);
        ranks_set(p->ctx, tsh_param(layer, "bias"), 50 + (uint64_t)i);
        if (i < 2) p->watched[i] = tsh_param(layer, i ? "bias" : "weight");
        part[i] = tsh_forward(layer, p->in[0]);
    }
    return tsh_add(tsh_mul(part[0], part[1]), part[2]);
}

static tsh_tensor *heads_of(tsh_tensor *x, int64_t heads) {
    tsh_shape shape = tsh_shape4(tsh_size(x, 0), tsh_size(x, 1), heads, tsh_size(x, -1) / heads);
    return tsh_transpose(tsh_reshape(x, shape), 1, 2);
}

/* A whole attention layer: fused projection, heads, projection back. Heads of 2. */
static tsh_tensor *layer_attention(probe *p) {
    const int64_t heads = probe_number(p, "heads"), width = 2 * heads;
    const tsh_attention_desc how = {.causal = probe_has(p, "causal")};
    const tsh_linear_desc fused = {.in = width, .out = 3 * width},
                          back = {.in = width, .out = width};
    const tsh_plan_rule plan[] = {
        {.path = "in", .style = TSH_COLWISE, .segments = 3, .unit = 2},
        {.path = "out", .style = TSH_ROWWISE, .unit = 2},
    };
    char name[32];
    tsh_module *self = tsh_add_module(tsh_root(p->ctx), name_of(p, "attention", name), NULL);
    tsh_module *in = tsh_add_linear(self, "in", &fused), *out = tsh_add_linear(self, "out", &back);
    tsh_tensor *qkv[3] = {NULL, NULL, NULL}, *y;
    int i;
    if (!p->dense) tsh_parallelize(self, plan, 2);
    tsh_materialize(self); /* its own random values: the same at every degree */
    p->watched[0] = tsh_param(in, "weight");
    p->watched[1] = tsh_param(out, "weight");
    tsh_split(tsh_forward(in, p->in[0]), -1, 3, qkv);
    for (i = 0; i < 3; i++) qkv[i] = heads_of(qkv[i], heads);
    y = tsh_transpose(tsh_attention(qkv[0], qkv[1], qkv[2], &how), 1, 2);
    return tsh_forward(out, tsh_reshape(y, tsh_shape_of(p->in[0])));
}

/* A classifier over a sharded vocabulary, and its loss. */
static tsh_tensor *layer_classifier(probe *p) {
    char name[32];
    const tsh_linear_desc desc = {
        .in = 3, .out = probe_number(p, "out"), .style = p->dense ? TSH_PLAIN : TSH_COLWISE};
    tsh_module *layer = tsh_add_linear(tsh_root(p->ctx), name_of(p, "head", name), &desc);
    prepare(p, layer, 2);
    return tsh_cross_entropy(tsh_forward(layer, p->in[0]), p->in[1], NULL);
}

/* "mean", "sum" or "none"; "ignore": class 2 does not count; "all": nothing counts; "zero": then
 * the mean is 0; "large": logits times 300 */
static tsh_tensor *layer_loss(probe *p) {
    tsh_cross_entropy_desc desc = {.ignore_index = 2};
    tsh_tensor *logits = tsh_scale(p->in[0], probe_has(p, "large") ? 300 : 1), *target = p->in[1];
    if (probe_has(p, "sum"))
        desc.reduction = TSH_REDUCE_SUM;
    else if (probe_has(p, "none"))
        desc.reduction = TSH_REDUCE_NONE;
    else if (!probe_has(p, "mean"))
        return NULL;
    desc.ignore = probe_has(p, "ignore") || probe_has(p, "all");
    desc.empty_zero = probe_has(p, "zero");
    if (probe_has(p, "all")) {
        tsh_layout layout = tsh_layout_of(target);
        int32_t *ids;
        int64_t e;
        target = tsh_tensor_new(p->ctx, TSH_I32, tsh_shape_of(target), layout);
        ids = (int32_t *)tsh_data(p->ctx, target);
        for (e = 0; ids && e < tsh_local_numel(target); e++) ids[e] = 2;
    }
    return tsh_cross_entropy(logits, target, &desc);
}

/* ------------------------------------------------------------------- the table */

/* clang-format off */
#define NONE  0, 0, 0
#define AR(n) n, 0, 0
#define AG(n) 0, n, 0
#define LAYER(fn, arg, out, forward, backward, tolerance, ...) \
    {layer_##fn, arg, {__VA_ARGS__}, out, tolerance, TRIAL_COUNTED, {forward}, {backward}}
#define COLUMN(arg, out, ...)   LAYER(linear, "col " arg, out, NONE, AR(1), 0, __VA_ARGS__)
#define GATHERED(arg, ...)      LAYER(linear, "col gather " arg, "R", AG(1), AR(1), 0, __VA_ARGS__)
#define ROW(arg, ...)           LAYER(linear, "row " arg, "R", AR(1), NONE, 0, __VA_ARGS__)
#define ROW_OF_FULL(arg, ...)   LAYER(linear, "row " arg, "R", AR(1), AG(1), 0, __VA_ARGS__)
#define ONE_EACH 1, 1, 0 /* an all-reduce, of maxima, and an all-gather, of sums */
#define LOSS(arg, out, ...)     LAYER(loss, arg, out, ONE_EACH, NONE, ROUNDING, __VA_ARGS__)
/* clang-format on */

static const trial layers[] = {
    LAYER(linear, "plain out n", "R", NONE, NONE, 0, "3,4 R"),
    LAYER(linear, "plain out 5 no bias", "R", NONE, NONE, 0, "2,3,n R"),
    LAYER(linear, "plain out 5", "S(0)", NONE, AR(1), 0, "n,4 S(0)"),
    LAYER(linear, "plain out 5", "S(1)", NONE, AR(1), 0, "2,n,4 S(1)"),

    /* column-parallel: nothing forward, one all-reduce backward */
    COLUMN("out n", "S(0)", "4 R"),
    COLUMN("out n", "S(1)", "3,4 R"),
    COLUMN("out n plan", "S(2)", "2,3,4 R"),
    COLUMN("out n late", "S(2)", "2,3,4 R"),
    COLUMN("out n no bias", "S(1)", "3,4 R"),
    COLUMN("out n skip", "S(1)", "3,4 R"),
    COLUMN("out 6n unit 3", "S(1, unit 3)", "3,4 R"),
    COLUMN("out 6n segments 3 unit 2", "S(1, 3 segments, unit 2)", "3,4 R"),
    COLUMN("out 6n segments 2 plan", "S(2, 2 segments, unit 1)", "2,3,4 R"),
    COLUMN("out 6n segments 3 unit 2 late", "S(1, 3 segments, unit 2)", "3,4 R"),
    GATHERED("out n", "4 R"),
    GATHERED("out n plan", "3,4 R"),
    GATHERED("out n late", "2,3,4 R"),
    GATHERED("out n no bias", "3,4 R"),
    GATHERED("out 6n segments 3 unit 2", "3,4 R"),

    /* row-parallel: one all-reduce forward; a full input is sliced, and gathered backward */
    ROW("out 4", "n S(0)"),
    ROW("out 4", "3,n S(1)"),
    ROW("out 4 plan", "2,3,n S(2)"),
    ROW("out 4 late", "2,3,n S(-1)"),
    ROW("out 4 no bias", "3,n S(1)"),
    ROW("out 4 skip", "3,n S(1)"),
    ROW("out 4 unit 3", "3,6n S(1, unit 3)"),
    ROW("out 4 segments 3 unit 2", "3,6n S(1, 3 segments, unit 2)"),
    ROW("out 4 segments 3 unit 2 late", "3,6n S(1, 3 segments, unit 2)"),
    ROW_OF_FULL("out 4", "n R"),
    ROW_OF_FULL("out 4", "3,n R"),
    ROW_OF_FULL("out 4 plan", "2,3,n R"),
    ROW_OF_FULL("out 4 skip", "3,n R"),
    ROW_OF_FULL("out 4 segments 3 unit 2", "3,6n R"),

    LAYER(qkv, "out n", "S(1)", NONE, AR(1), 0, "3,4 R"),

    /* embedding: by vocabulary one all-reduce forward, by columns one all-gather */
    LAYER(embedding, "plain count 5n dim 4", "R", NONE, NONE, 0, "%5n 2,3 R"),
    LAYER(embedding, "plain count 5 dim 4", "S(0)", NONE, AR(1), 0, "%5 n S(0)"),
    LAYER(embedding, "row count n dim 4", "R", AR(1), NONE, 0, "%n 7 R"),
    LAYER(embedding, "row count 5n dim 4 plan", "R", AR(1), NONE, 0, "%5n 2,3 R"),
    LAYER(embedding, "row count 5n dim 4 late", "R", AR(1), NONE, 0, "%5n 2,1,3 R"),
    LAYER(embedding, "col count 5 dim n", "R", AG(1), NONE, 0, "%5 7 R"),
    LAYER(embedding, "col count 5 dim n late", "R", AG(1), NONE, 0, "%5 2,3 R"),

    /* norm and dropout: parameters of sharded activations get partial gradients */
    LAYER(norm, "", "R", NONE, NONE, ROUNDING, "5 R"),
    LAYER(norm, "", "R", NONE, NONE, ROUNDING, "2,3,n R"),
    LAYER(norm, "", "S(0)", NONE, AR(1), ROUNDING, "n,5 S(0)"),
    LAYER(norm, "no bias", "S(1)", NONE, AR(1), ROUNDING, "2,n,5 S(1)"),
    LAYER(rms, "", "R", NONE, NONE, ROUNDING, "5 R"),
    LAYER(rms, "eps", "R", NONE, NONE, ROUNDING, "2,3,n R"),
    LAYER(rms, "", "S(0)", NONE, AR(1), ROUNDING, "n,5 S(0)"),
    LAYER(rms, "eps", "S(1)", NONE, AR(1), ROUNDING, "2,n,5 S(1)"),
    LAYER(rms, "one", "R", NONE, NONE, ROUNDING, "2,3,n R"),
    LAYER(rms, "one", "S(1)", NONE, AR(1), ROUNDING, "2,n,5 S(1)"),

    /* of features that are sharded: all-reduces of a number per row */
    LAYER(norm, "col plan", "S(-1)", AR(2), AR(1), ROUNDING, "2,3,5n S(2)"),
    LAYER(norm, "col no bias late", "S(-1)", AR(2), AR(1), ROUNDING, "5n S(0)"),
    LAYER(rms, "col plan", "S(-1)", AR(1), AR(1), ROUNDING, "2,3,n S(2)"),
    LAYER(rms, "col one eps late", "S(-1)", AR(1), AR(1), ROUNDING, "3,n S(1)"),
    LAYER(rms, "col segments 3 unit 2 plan", "S(1, 3 segments, unit 2)", AR(1), AR(1), ROUNDING,
          "4,6n S(1, 3 segments, unit 2)"),
    LAYER(dropout, "", "R", NONE, NONE, 0, "2,n R"),
    LAYER(dropout, "", "S(1)", NONE, NONE, 0, "2,n,3 S(1)"),
    LAYER(dropout, "", "S(1, 3 segments, unit 2)", NONE, NONE, 0, "2,6n S(1, 3 segments, unit 2)"),
    LAYER(dropout, "", "P", NONE, NONE, 0, "2,n P"),

    /* attention: n heads on any number of ranks, one all-reduce each way */
    LAYER(attention, "heads n", "R", AR(1), AR(1), ROUNDING, "2,3,2n R"),
    LAYER(attention, "heads n causal", "R", AR(1), AR(1), ROUNDING, "1,5,2n R"),

    /* the loss: two all-reduces over a sharded vocabulary; over a sharded batch one for the mean */
    LAYER(classifier, "out 5n", "R", ONE_EACH, AR(1), ROUNDING, "4,3 R", "%5n 4 R"),
    LAYER(classifier, "out n", "R", ONE_EACH, AR(1), ROUNDING, "2,2,3 R", "%n 2,2 R"),
    LOSS("mean", "R", "4,n S(1)", "%n 4 R"),
    LOSS("sum", "R", "4,5n S(1)", "%5n 4 R"),
    LOSS("none", "R", "2,3,5n S(2)", "%5n 2,3 R"),
    LOSS("mean ignore", "R", "9,5n S(1)", "%5n 9 R"),
    LOSS("sum ignore", "R", "9,5n S(1)", "%5n 9 R"),
    LOSS("none ignore", "R", "9,5n S(1)", "%5n 9 R"),
    LOSS("mean all", "R", "4,3n S(1)", "%3n 4 R"),
    LOSS("mean all zero", "R", "4,3n S(1)", "%3n 4 R"),
    LOSS("none all", "R", "4,3n S(1)", "%3n 4 R"),
    LOSS("mean large", "R", "4,5n S(1)", "%5n 4 R"),
    LOSS("mean", "R", "4,6n S(1, 3 segments, unit 2)", "%6n 4 R"),
    LAYER(loss, "mean", "P", AR(1), NONE, ROUNDING, "n,5 S(0)", "%5 n S(0)"),
    LAYER(loss, "mean ignore", "P", AR(1), NONE, ROUNDING, "2,n,5 S(1)", "%5 2,n S(1)"),
    LAYER(loss, "mean all zero", "P", AR(1), NONE, ROUNDING, "n,5 S(0)", "%5 n S(0)"),
    LAYER(loss, "sum ignore", "P", NONE, NONE, ROUNDING, "n,5 S(0)", "%5 n S(0)"),
    LAYER(loss, "none", "S(0)", NONE, NONE, ROUNDING, "n,5 S(0)", "%5 n S(0)"),
};

static const int64_t lengths[] = {1, 2, 3, 4, 5, 7, 8};

static void every_layer_equals_its_dense_self(void **state) {
    (void)state;
    trials_prove(layers, COUNT(layers), lengths, COUNT(lengths));
}

/* ------------------------------------------------------------ who holds which heads */

/* 4 heads on 3 ranks are 2, 2, 0; 3 on 2 are 2, 1; 3 on 8 are 1, 1, 1 and nothing. */
typedef struct share {
    int ranks;
    int64_t heads, own[RANKS_MAX];
} share;

static const share shares[] = {
    {3, 4, {2, 2, 0}},
    {2, 3, {2, 1}},
    {8, 3, {1, 1, 1, 0, 0, 0, 0, 0}},
    {4, 8, {2, 2, 2, 2}},
};

static int holds(tsh_ctx *ctx, void *user) {
    const share *s = (const share *)user;
    int64_t own = s->own[tsh_tp(ctx)->rank];
    const tsh_linear_desc desc = {
        .in = 6, .out = 3 * 2 * s->heads, .style = TSH_COLWISE, .segments = 3, .unit = 2};
    tsh_module *layer = tsh_add_linear(tsh_root(ctx), "in", &desc);
    tsh_tensor *part[3], *y = tsh_forward(layer, tsh_ones(ctx, tsh_shape3(1, 5, 6)));
    CHECK(tsh_local_size(tsh_param(layer, "weight"), 0) == 3 * 2 * own, "rows of the weight");
    CHECK(tsh_local_size(tsh_param(layer, "bias"), 0) == 3 * 2 * own, "the bias");
    CHECK(tsh_size(y, -1) == 6 * s->heads && tsh_local_size(y, -1) == 6 * own, "the output");
    CHECK(tsh_split(y, -1, 3, part) == TSH_OK, "split");
    y = heads_of(part[2], s->heads);
    CHECK(tsh_size(y, 1) == s->heads && tsh_local_size(y, 1) == own, "heads");
    CHECK_OK();
    return 0;
}

static void heads_are_never_cut(void **state) {
    int i;
    (void)state;
    for (i = 0; i < COUNT(shares); i++) {
        share s = shares[i];
        ranks_run(s.ranks, holds, &s);
    }
}

/* ------------------------------------------------------------------ bad numbers */

/* A target or an id outside the vocabulary is an error on every rank, though none owns it. */
static int outside(tsh_ctx *ctx, void *user) {
    int loss = *(const int *)user;
    spec s = spec_parse(loss ? "2,6 S(1)" : "6,2 S(0)", 1);
    tsh_tensor *x = spec_tensor(ctx, &s, 1);
    const int32_t numbers[2] = {5, 6};
    tsh_tensor *ids = tsh_tensor_from(ctx, TSH_I32, tsh_shape1(2), tsh_replicated(), numbers);
    (void)tsh_barrier(tsh_world(ctx));
    if (loss)
        CHECK(!tsh_cross_entropy(x, ids, NULL), "target 6 of 6 classes");
    else
        CHECK(!tsh_embedding(ids, x, NULL), "id 6 of 6 rows");
    CHECK(tsh_last_error(ctx)->code == TSH_ERR_ARGUMENT, "its code");
    CHECK(strstr(tsh_last_error(ctx)->message, "outside [0, 6)"), "its sentence");
    CHECK(strstr(tsh_last_error(ctx)->message, loss ? "target 6 at row 1" : "id 6 at position 1"),
          "its place");
    (void)tsh_barrier(tsh_world(ctx));
    return 0;
}

/* Nothing counts: NaN as torch, or 0 where asked for. */
static int empty_mean(tsh_ctx *ctx, void *user) {
    tsh_cross_entropy_desc desc = {.ignore = 1, .ignore_index = -100};
    spec s = spec_parse("2,6 S(1)", 1);
    tsh_tensor *x = spec_tensor(ctx, &s, 1);
    const int32_t numbers[2] = {-100, -100};
    tsh_tensor *ids = tsh_tensor_from(ctx, TSH_I32, tsh_shape1(2), tsh_replicated(), numbers);
    double value = tsh_item(ctx, tsh_cross_entropy(x, ids, NULL));
    (void)user;
    CHECK(value != value, "%g, not NaN", value);
    desc.empty_zero = 1;
    value = tsh_item(ctx, tsh_cross_entropy(x, ids, &desc));
    CHECK(value == 0, "%g, not 0", value);
    desc.reduction = TSH_REDUCE_SUM;
    value = tsh_item(ctx, tsh_cross_entropy(x, ids, &desc));
    CHECK(value == 0, "%g, not 0", value);
    CHECK_OK();
    return 0;
}

static void numbers_outside_the_vocabulary(void **state) {
    int loss, i;
    (void)state;
    for (i = 0; i < COUNT(ranks_degrees); i++) {
        for (loss = 0; loss < 2; loss++) ranks_run(ranks_degrees[i], outside, &loss);
        ranks_run(ranks_degrees[i], empty_mean, NULL);
    }
}

/* ------------------------------------------------------ sums before a norm */

typedef struct residual_case {
    const char *x, *y; /* x turned where it has 3 columns */
    const char *layer; /* layer, rms or linear */
    tsh_style style;
    int checkpoint;
} residual_case;

static const residual_case residuals[] = {{"6,5,4 S(0)", "6,5,4 S(0)", "layer", TSH_PLAIN, 0},
                                          {"2,1,4 R", "2,5,4 S(1)", "rms", TSH_SEQUENCE, 0},
                                          {"4,3 R", "3,4 R", "layer", TSH_PLAIN, 0},
                                          {"7,4 R", "7,4 R", "linear", TSH_PLAIN, 1}};

static tsh_module *residual_layer(tsh_ctx *ctx, const residual_case *c, int64_t dim) {
    const tsh_layer_norm_desc layer = {.dim = dim};
    const tsh_rms_norm_desc rms = {.dim = dim};
    const tsh_linear_desc linear = {.in = dim, .out = dim};
    const tsh_plan_rule rule = {.path = "", .style = c->style};
    tsh_module *module = c->layer[0] == 'r'   ? tsh_add_rms_norm(tsh_root(ctx), "n", &rms)
                         : c->layer[1] == 'a' ? tsh_add_layer_norm(tsh_root(ctx), "n", &layer)
                                              : tsh_add_linear(tsh_root(ctx), "n", &linear);
    tsh_parallelize(module, &rule, 1);
    tsh_materialize(module);
    ranks_set(ctx, tsh_param(module, "weight"), 3);
    if (c->layer[0] == 'l') ranks_set(ctx, tsh_param(module, "bias"), 4);
    tsh_checkpoint(module, c->checkpoint);
    return module;
}

/* In one call or in two: the same bits of the sum, the output and all gradients. */
static int residual(tsh_ctx *ctx, void *user) {
    const residual_case *c = (const residual_case *)user;
    uint64_t hash[2][8] = {{0}};
    tsh_tensor *leaf = same_leaf(ctx, 0, c->x, 1, 1), *y = same_leaf(ctx, 0, c->y, 1, 2);
    const int turned = tsh_size(leaf, -1) == 3;
    tsh_module *layer = residual_layer(ctx, c, tsh_size(leaf, turned ? 0 : -1));
    int fused, i;
    for (fused = 0; fused < 2; fused++) {
        tsh_tensor *x = turned ? tsh_transpose(leaf, 0, 1) : leaf, *out, *loss;
        const tsh_tensor *given = x;
        if (fused) {
            out = tsh_forward_residual(layer, &x, y);
        } else {
            x = tsh_add(x, y);
            out = tsh_forward(layer, x);
        }
        CHECK(out && x != given, "x is the sum");
        tsh_retain_grad(out);
        tsh_retain_grad(x);
        loss = tsh_add(ranks_loss(ctx, out), ranks_loss(ctx, x));
        CHECK(tsh_backward(ctx, loss) == TSH_OK, "backward");
        hash[fused][0] = tsh_hash(ctx, out);
        hash[fused][1] = tsh_hash(ctx, x);
        hash[fused][2] = tsh_hash(ctx, tsh_grad(leaf));
        hash[fused][3] = tsh_hash(ctx, tsh_grad(y));
        hash[fused][4] = tsh_hash(ctx, tsh_grad(x));
        hash[fused][5] = tsh_hash(ctx, tsh_grad(out));
        hash[fused][6] = tsh_hash(ctx, tsh_grad(tsh_param(layer, "weight")));
        if (c->layer[0] == 'l') hash[fused][7] = tsh_hash(ctx, tsh_grad(tsh_param(layer, "bias")));
        CHECK_OK();
        tsh_zero_grad(leaf);
        tsh_zero_grad(y);
        tsh_zero_grads(layer);
        tsh_step_end(ctx);
    }
    for (i = 0; i < 8; i++) CHECK(hash[0][i] == hash[1][i], "%s, hash %d", c->x, i);
    return 0;
}

static int residual_refuses(tsh_ctx *ctx, void *user) {
    const residual_case *c = &residuals[0];
    tsh_module *layer = residual_layer(ctx, c, 4);
    tsh_tensor *x = same_leaf(ctx, 0, "2,4 R", 1, 1), *wrong = same_leaf(ctx, 0, "3,4 R", 1, 1);
    tsh_tensor *part = tsh_set_layout(tsh_scale(x, 1), tsh_partial()), *first = part, *two[2];
    (void)user;
    two[0] = two[1] = x;
    CHECK(!tsh_forward_n(layer, two, 2), "two inputs");
    CHECK(strstr(tsh_last_error(ctx)->message, "n: tsh_forward: takes one input, not 2"),
          "its sentence");
    tsh_clear_error(ctx);
    CHECK(!tsh_forward_residual(layer, &x, wrong) && !x, "shapes");
    CHECK(strstr(tsh_last_error(ctx)->message, "tsh_add: shapes (2, 4)"), "its sentence");
    tsh_clear_error(ctx);
    x = same_leaf(ctx, 0, "2,4 R", 1, 1);
    CHECK(!tsh_forward_residual(layer, &x, NULL), "no y");
    CHECK(strstr(tsh_last_error(ctx)->message, "tsh_add: b is NULL"), "its sentence");
    tsh_clear_error(ctx);
    CHECK(!tsh_forward_residual(layer, &first, part) && !first, "a partial sum");
    CHECK(strstr(tsh_last_error(ctx)->message, "tsh_layer_norm: input is a partial sum"), "its");
    tsh_clear_error(ctx);
    CHECK(!tsh_forward_residual(NULL, &wrong, wrong), "no module");
    CHECK(strstr(tsh_last_error(ctx)->message, "the module is NULL"), "its sentence");
    tsh_clear_error(ctx);
    CHECK(!tsh_forward_residual(layer, NULL, NULL), "no x");
    CHECK(strstr(tsh_last_error(ctx)->message, "takes one input, not 1 that is NULL"), "its");
    tsh_clear_error(ctx);
    return 0;
}

static void a_residual_norm_is_an_addition_and_a_norm(void **state) {
    int i, k;
    (void)state;
    for (i = 0; i < COUNT(ranks_degrees); i++)
        for (k = 0; k < COUNT(residuals); k++) {
            residual_case c = residuals[k];
            ranks_run(ranks_degrees[i], residual, &c);
        }
    ranks_run(1, residual_refuses, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_layer_equals_its_dense_self),
        cmocka_unit_test(heads_are_never_cut),
        cmocka_unit_test(numbers_outside_the_vocabulary),
        cmocka_unit_test(a_residual_norm_is_an_addition_and_a_norm),
    };
    return cmocka_run_group_tests_name("layer/layers", tests, NULL, NULL);
}
