/* tsh_lora: what adapters add to a linear layer, and its gradients, are PyTorch's (golden/lora.py)
 * at every degree and style, on weights of any dtype; they alone are trained; they can be merged,
 * taken out again with the old bits, chosen and removed. */
/* build: double */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../support/golden.h"
#include "../support/files.h"

enum { IN = 64, OUT = 12, RANK = 3, PARTS = 3 };

static golden_file golden;

/* A layer and its adapter. */
typedef struct setup {
    const char *name; /* of the golden: "one", "four", "rs", "parts" */
    tsh_style style;
    tsh_dtype dtype; /* of the weight; 0: TSH_REAL */
    int reversed;    /* the weight is (in, out) */
    int segments;    /* the output features are sharded in as many segments, as q, k and v */
    int sequence;    /* 1: x or y is S(1); 2: x is gathered again in backward */
    int late;        /* the plan is applied after tsh_lora */
    uint64_t y, a;   /* hashes on one rank */
} setup;

static const tsh_lora_part parts[PARTS] = {{"q_proj", 6}, {"k_proj", 4}, {"v_proj", 2}};
static const tsh_segment cuts[PARTS] = {{6, 2}, {4, 2}, {2, 2}};

static int in_blocks(tsh_dtype dtype) {
    return dtype == TSH_Q8_0 || dtype == TSH_Q4_0;
}

/* Writes a golden tensor to t; transposed 1: t is its transpose. */
static int put(tsh_ctx *ctx, tsh_tensor *t, const char *name, const char *what,
               int transposed) {
    const golden_tensor g = golden_get(&golden, name, what);
    tsh_real *values = (tsh_real *)malloc((size_t)(g.count + 1) * sizeof *values);
    tsh_result result;
    for (int64_t e = 0; e < g.count; e++) {
        const int64_t rows = g.shape.dim[0], r = e % rows, c = e / rows;
        values[e] = (tsh_real)((const float *)g.data)[transposed ? r * g.shape.dim[1] + c : e];
    }
    result = tsh_write(ctx, t, TSH_GLOBAL, values, (size_t)g.count * sizeof *values);
    free(values);
    return result == TSH_OK;
}

/* The largest difference of t's global values and a golden, relative to the largest of these. */
static double off(tsh_ctx *ctx, tsh_tensor *t, const char *name, const char *what) {
    const golden_tensor g = golden_get(&golden, name, what);
    double *values = t ? ranks_values(ctx, t) : NULL, most = 0, size = 1e-30;
    if (!values || tsh_numel(t) != g.count) most = 1e9;
    for (int64_t e = 0; most < 1e9 && e < g.count; e++) {
        const double want = (double)((const float *)g.data)[e];
        most = fmax(most, fabs(values[e] - want));
        size = fmax(size, fabs(want));
    }
    free(values);
    return most / size;
}

static tsh_tensor *leaf(tsh_ctx *ctx, const char *what, tsh_layout layout) {
    tsh_tensor *t = tsh_tensor_new(ctx, TSH_REAL, tsh_shape3(2, 5, what[0] == 'x' ? IN : OUT),
                                   layout);
    return put(ctx, t, "base", what, 0) ? tsh_requires_grad(t, what[0] == 'x') : NULL;
}

static int lay_out(tsh_module *layer, const setup *s) {
    static const tsh_layout along = {.kind = TSH_SHARDED, .dim = 1, .segments = 1};
    tsh_plan_rule rule = {.path = "", .style = s->style};
    const int row = s->style == TSH_ROWWISE;
    rule.unit = row ? 32 : s->segments ? 2 : 0;
    rule.segments = s->segments;
    if (strcmp(s->name, "parts") == 0 && !row) {
        rule.segments = PARTS;
        rule.cut = cuts;
    }
    if (s->sequence && !row) rule.input = &along;
    if (s->sequence && row) rule.output = &along;
    rule.regather = s->sequence == 2;
    return s->style == TSH_PLAIN || tsh_parallelize(layer, &rule, 1) == TSH_OK;
}

static tsh_tensor *adapter_param(tsh_module *layer, int part, char of) {
    char path[64];
    (void)snprintf(path, sizeof path, "%s%slora_%c.default.weight",
                   part < 0 ? "" : parts[part].name, part < 0 ? "" : ".", of);
    return tsh_param(layer, path);
}

/* The layer with weights and adapter of the golden. */
static tsh_module *add_layer(tsh_ctx *ctx, const setup *s, const tsh_lora_desc *more) {
    const int split = strcmp(s->name, "parts") == 0;
    const tsh_linear_desc d = {.in = IN, .out = OUT, .reversed = s->reversed};
    tsh_module *layer = tsh_add_linear(tsh_root(ctx), "layer", &d);
    tsh_lora_desc desc = {.rank = RANK};
    const char *w = strcmp(s->name, "four") == 0 ? "w4" : "w";
    int ok;
    if (more) desc = *more;
    desc.rank = RANK;
    desc.rslora = strcmp(s->name, "rs") == 0;
    if (split) {
        desc.parts = parts;
        desc.part_count = PARTS;
    }
    ok = put(ctx, tsh_param(layer, "weight"), "base", w, s->reversed) &&
         put(ctx, tsh_param(layer, "bias"), "base", "bias", 0);
    if (s->dtype == TSH_BF16) ok &= tsh_to(layer, TSH_BF16) == TSH_OK;
    if (!s->late) ok &= lay_out(layer, s);
    if (in_blocks(s->dtype)) ok &= tsh_quantize(layer, NULL, s->dtype) == TSH_OK;
    ok &= tsh_lora(tsh_root(ctx), "layer", &desc) == TSH_OK;
    if (s->late) ok &= lay_out(layer, s);
    for (int i = 0; i < (split ? PARTS : 1) && ok; i++) {
        char a[16], b[16];
        (void)snprintf(a, sizeof a, "a%d", i);
        (void)snprintf(b, sizeof b, "b%d", i);
        ok = put(ctx, adapter_param(layer, split ? i : -1, 'A'), s->name, a, 0) &&
             put(ctx, adapter_param(layer, split ? i : -1, 'B'), s->name, b, 0);
    }
    return ok ? layer : NULL;
}

static tsh_tensor *weighed(tsh_tensor *y, tsh_tensor *g) {
    y = tsh_sum(tsh_mul(y, tsh_redistribute(g, tsh_layout_of(y))), TSH_ALL, 0);
    return tsh_redistribute(y, tsh_replicated());
}

/* --------------------------------------------------------- values and gradients */

static int agrees(tsh_ctx *ctx, void *user) {
    setup *s = (setup *)user;
    const double near = 2e-6;
    const int split = strcmp(s->name, "parts") == 0;
    const tsh_layout along = tsh_sharded(1);
    tsh_module *layer = add_layer(ctx, s, NULL);
    tsh_tensor *x, *g, *y;
    uint64_t hash;
    CHECK_TRUE(layer != NULL);
    x = leaf(ctx, "x", s->sequence && s->style == TSH_COLWISE ? along : tsh_replicated());
    g = leaf(ctx, "g", tsh_replicated());
    CHECK_TRUE(x && g);
    y = tsh_forward(layer, x);
    CHECK_OK();
    CHECK(off(ctx, y, s->name, "y") < near, "y: %g", off(ctx, y, s->name, "y"));
    hash = tsh_hash(ctx, y);
    if (tsh_world(ctx)->size == 1) s->y = hash;
    if (s->style != TSH_ROWWISE) CHECK(hash == s->y, "the bits of one rank");
    CHECK_TRUE(tsh_backward(ctx, weighed(y, g)) == TSH_OK);
    CHECK(off(ctx, tsh_grad(x), s->name, "dx") < near, "dx: %g",
          off(ctx, tsh_grad(x), s->name, "dx"));
    for (int i = 0; i < (split ? PARTS : 1); i++) {
        char a[16], b[16];
        (void)snprintf(a, sizeof a, "da%d", i);
        (void)snprintf(b, sizeof b, "db%d", i);
        x = tsh_grad(adapter_param(layer, split ? i : -1, 'A'));
        CHECK(off(ctx, x, s->name, a) < near, "%s: %g", a, off(ctx, x, s->name, a));
        x = tsh_grad(adapter_param(layer, split ? i : -1, 'B'));
        CHECK(off(ctx, x, s->name, b) < near, "%s: %g", b, off(ctx, x, s->name, b));
    }
    CHECK(in_blocks(s->dtype) || !tsh_grad(tsh_param(layer, "weight")), "it is frozen");
    CHECK_TRUE(!tsh_grad(tsh_param(layer, "bias")));
    CHECK_TRUE(tsh_check_replicas(tsh_root(ctx)));
    CHECK_OK();
    return 0;
}

static void adapters_are_those_of_torch(void **state) {
    static const setup setups[] = {
        {.name = "one"},
        {.name = "one", .style = TSH_COLWISE},
        {.name = "one", .style = TSH_ROWWISE},
        {.name = "one", .style = TSH_COLWISE, .late = 1},
        {.name = "one", .style = TSH_ROWWISE, .late = 1},
        {.name = "one", .style = TSH_COLWISE, .reversed = 1},
        {.name = "one", .style = TSH_ROWWISE, .reversed = 1},
        {.name = "one", .style = TSH_COLWISE, .segments = 3},
        {.name = "one", .style = TSH_COLWISE, .segments = 3, .reversed = 1, .dtype = TSH_Q8_0},
        {.name = "one", .style = TSH_COLWISE, .sequence = 1},
        {.name = "one", .style = TSH_COLWISE, .sequence = 2},
        {.name = "one", .style = TSH_ROWWISE, .sequence = 1},
        {.name = "rs", .style = TSH_COLWISE},
        {.name = "parts"},
        {.name = "parts", .style = TSH_COLWISE},
        {.name = "parts", .style = TSH_ROWWISE},
        {.name = "parts", .style = TSH_COLWISE, .dtype = TSH_Q8_0, .sequence = 2},
        {.name = "one", .style = TSH_COLWISE, .dtype = TSH_BF16},
        {.name = "one", .style = TSH_ROWWISE, .dtype = TSH_Q8_0},
        {.name = "one", .style = TSH_COLWISE, .dtype = TSH_Q8_0, .reversed = 1},
        {.name = "four", .style = TSH_COLWISE, .dtype = TSH_Q4_0},
        {.name = "four", .style = TSH_ROWWISE, .dtype = TSH_Q4_0, .sequence = 1},
    };
    (void)state;
    for (int k = 0; k < COUNT(setups); k++) {
        setup s = setups[k];
        for (int d = 0; d < COUNT(ranks_degrees); d++) ranks_run(ranks_degrees[d], agrees, &s);
    }
}

/* A function of x, A and B. */
static tsh_tensor *checked(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {
    tsh_tensor *y = tsh_forward((tsh_module *)user, in[0]);
    (void)ctx, (void)n;
    return tsh_redistribute(tsh_sum(tsh_mul(y, y), TSH_ALL, 0), tsh_replicated());
}

static int differentiates(tsh_ctx *ctx, void *user) {
    const setup *s = (const setup *)user;
    tsh_module *layer = add_layer(ctx, s, NULL);
    tsh_tensor *in[3];
    CHECK_TRUE(layer != NULL);
    in[0] = leaf(ctx, "x", tsh_replicated());
    in[1] = adapter_param(layer, -1, 'A');
    in[2] = adapter_param(layer, -1, 'B');
    if (sizeof(tsh_real) == 8) {
        const double error = tsh_gradcheck(ctx, checked, in, 3, layer, 0, 20);
        CHECK(error >= 0 && error < 1e-6, "%g", error);
    }
    CHECK_OK();
    return 0;
}

static void gradients_are_those_of_differences(void **state) {
    static const setup setups[] = {{.name = "one", .style = TSH_COLWISE},
                                   {.name = "one", .style = TSH_ROWWISE},
                                   {.name = "four", .style = TSH_COLWISE, .dtype = TSH_Q4_0}};
    (void)state;
    for (int k = 0; k < COUNT(setups); k++)
        for (int ranks = 1; ranks <= 3; ranks++) {
            setup s = setups[k];
            ranks_run(ranks, differentiates, &s);
        }
}

/* Initial values and dropout have the same bits at every degree; a checkpoint draws the same. */
static int draws(tsh_ctx *ctx, void *user) {
    setup *s = (setup *)user;
    const tsh_lora_desc desc = {.rank = 5, .dropout = 0.5};
    const tsh_linear_desc d = {.in = 40, .out = 21, .style = s->style};
    tsh_module *layer = tsh_add_linear(tsh_root(ctx), "layer", &d);
    tsh_tensor *x = tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(7, 40), tsh_replicated());
    uint64_t a, y[3], grads[2];
    double *zeros;
    CHECK_TRUE(tsh_lora(layer, "", &desc) == TSH_OK && ranks_set(ctx, x, 3) == TSH_OK);
    CHECK_TRUE(tsh_materialize(layer) == TSH_OK);
    a = tsh_hash(ctx, adapter_param(layer, -1, 'A'));
    if (tsh_world(ctx)->size == 1) s->a = a;
    CHECK(a == s->a, "A");
    zeros = ranks_values(ctx, adapter_param(layer, -1, 'B'));
    for (int e = 0; e < 21 * 5; e++) CHECK(zeros[e] == 0, "B");
    free(zeros);
    CHECK_TRUE(ranks_set(ctx, adapter_param(layer, -1, 'B'), 4) == TSH_OK);
    for (int k = 0; k < 2; k++) {
        tsh_tensor *out;
        unsigned char state[1024];
        const size_t size = tsh_rng_state(ctx, state, sizeof state);
        CHECK_TRUE(size > 0 && size <= sizeof state);
        tsh_checkpoint(layer, k);
        out = tsh_forward(layer, x);
        y[k] = tsh_hash(ctx, out);
        out = tsh_redistribute(tsh_sum(tsh_mul(out, out), TSH_ALL, 0), tsh_replicated());
        CHECK_TRUE(tsh_backward(ctx, out) == TSH_OK);
        grads[k] = tsh_hash(ctx, tsh_grad(adapter_param(layer, -1, 'A')));
        tsh_zero_grads(layer);
        (void)tsh_step_end(ctx);
        CHECK_TRUE(tsh_set_rng_state(ctx, state, size) == TSH_OK);
    }
    CHECK(y[0] == y[1] && grads[0] == grads[1], "a checkpoint");
    tsh_train(layer, 0);
    y[2] = tsh_hash(ctx, tsh_forward(layer, x));
    CHECK_TRUE(y[2] != y[0]);
    if (tsh_world(ctx)->size == 1) s->y = y[0];
    if (s->style == TSH_COLWISE) CHECK(y[0] == s->y, "dropout");
    CHECK_OK();
    return 0;
}

static void draws_are_the_same_at_every_degree(void **state) {
    static const tsh_style styles[] = {TSH_COLWISE, TSH_ROWWISE, TSH_AUTO};
    (void)state;
    for (int k = 0; k < COUNT(styles); k++) {
        setup s = {.name = "one", .style = styles[k]};
        for (int d = 0; d < COUNT(ranks_degrees); d++) ranks_run(ranks_degrees[d], draws, &s);
    }
}

/* -------------------------------------------------------------------- training */

static int trains(tsh_ctx *ctx, void *user) {
    const setup *s = (const setup *)user;
    const tsh_optim_desc adamw = {
        .kind = TSH_ADAMW, .lr = 0.01, .weight_decay = 0.1, .zero = tsh_dp(ctx)->size > 1};
    const golden_tensor losses = golden_get(&golden, "train", "losses");
    tsh_module *layer = add_layer(ctx, s, NULL);
    tsh_tensor *x = leaf(ctx, "x", tsh_replicated()), *y, *loss, *a, *b;
    const size_t before = tsh_mem_stats(ctx).now[TSH_MEM_GRADIENTS];
    tsh_optim *optim;
    uint64_t weight;
    double most;
    CHECK_TRUE(layer && x);
    (void)tsh_requires_grad(x, 0);
    a = adapter_param(layer, -1, 'A');
    b = adapter_param(layer, -1, 'B');
    CHECK_TRUE(tsh_init_zeros(b, NULL) == TSH_OK);
    weight = tsh_hash(ctx, tsh_param(layer, "weight"));
    optim = tsh_optim_new(tsh_root(ctx), &adamw);
    for (int step = 0; step < 5; step++) {
        y = tsh_forward(layer, x);
        loss = tsh_mean(tsh_redistribute(tsh_mul(y, y), tsh_replicated()), TSH_ALL, 0);
        most = (double)((const float *)losses.data)[step];
        CHECK(fabs(tsh_item(ctx, loss) - most) < 1e-5 * most, "step %d: %g, not %g", step,
              tsh_item(ctx, loss), most);
        CHECK_TRUE(tsh_backward(ctx, loss) == TSH_OK && tsh_optim_step(optim) == TSH_OK);
        tsh_zero_grads(tsh_root(ctx));
        (void)tsh_step_end(ctx);
    }
    y = tsh_forward(layer, x);
    CHECK(off(ctx, y, "train", "y") < 1e-5, "%g", off(ctx, y, "train", "y"));
    CHECK_TRUE(tsh_hash(ctx, tsh_param(layer, "weight")) == weight);
    CHECK(tsh_mem_stats(ctx).now[TSH_MEM_GRADIENTS] - before <=
              (size_t)(tsh_local_numel(a) + tsh_local_numel(b)) * sizeof(tsh_real) + 512,
          "gradients of A and B alone");
    CHECK(tsh_mem_stats(ctx).now[TSH_MEM_OPTIMISER] <=
              (size_t)(tsh_local_numel(a) + tsh_local_numel(b)) * 2 * sizeof(tsh_real) + 1024,
          "moments of A and B alone");
    CHECK_TRUE(tsh_check_replicas(tsh_root(ctx)));
    CHECK_OK();
    return 0;
}

static void adapters_are_trained_as_by_torch(void **state) {
    static const setup setups[] = {{.name = "one", .style = TSH_COLWISE},
                                   {.name = "one", .style = TSH_ROWWISE},
                                   {.name = "one", .style = TSH_COLWISE, .dtype = TSH_Q8_0},
                                   {.name = "one", .style = TSH_ROWWISE, .dtype = TSH_BF16}};
    (void)state;
    for (int k = 0; k < COUNT(setups); k++)
        for (int tp = 1; tp <= 3; tp++)
            for (int dp = 1; dp <= 2; dp++) {
                const tsh_desc desc = {.tp = tp};
                setup s = setups[k];
                ranks_run_with(tp * dp, &desc, trains, &s);
            }
}

/* Between tsh_no_grad_begin and tsh_no_grad_end, x is rounded to 8 bits; elsewhere it is not. */
static int rounds(tsh_ctx *ctx, void *user) {
    setup *s = (setup *)user;
    tsh_module *layer = add_layer(ctx, s, NULL);
    tsh_tensor *x, *y;
    CHECK_TRUE(layer && (x = leaf(ctx, "x", tsh_replicated())) != NULL);
    (void)tsh_requires_grad(x, 0);
    tsh_no_grad_begin(ctx);
    y = tsh_forward(layer, x);
    CHECK_TRUE(off(ctx, y, "one", "y") > 1e-5 && off(ctx, y, "one", "y") < 0.02);
    tsh_no_grad_end(ctx);
    CHECK_TRUE(tsh_lora_use(layer, NULL) == TSH_OK);
    y = tsh_forward(layer, x); /* nothing in it is trained */
    CHECK_TRUE(tsh_lora_use(layer, "default") == TSH_OK);
    y = tsh_forward(layer, x);
    CHECK_TRUE(off(ctx, y, "one", "y") < 2e-6);
    CHECK_OK();
    return 0;
}

static void inputs_of_quantised_weights_are_rounded_without_gradients(void **state) {
    setup s = {.name = "one", .style = TSH_COLWISE, .dtype = TSH_Q8_0};
    (void)state;
    ranks_run(1, rounds, &s);
    ranks_run(2, rounds, &s);
}

/* A weight of more rows than are converted at a time, whose values 8 bits hold, against its twin:
 * the same outputs, bit by bit, and gradients of x. */
static int converts(tsh_ctx *ctx, void *user) {
    enum { OUTS = 1120 };
    const tsh_style style = *(const tsh_style *)user;
    const tsh_linear_desc d = {.in = IN, .out = OUTS, .style = style, .unit = 32};
    tsh_module *layer[2] = {tsh_add_linear(tsh_root(ctx), "plain", &d),
                            tsh_add_linear(tsh_root(ctx), "blocks", &d)};
    tsh_tensor *x = leaf(ctx, "x", tsh_replicated()), *y, *bias;
    tsh_real *w = (tsh_real *)malloc(sizeof *w * OUTS * IN);
    double *dx[2], most = 0, size = 0;
    uint64_t hash[2];
    for (int e = 0; e < OUTS * IN; e++)
        w[e] = (tsh_real)(e % 32 ? (double)(ranks_mix(7, (uint64_t)e) % 255) / 128 - 127.0 / 128
                                 : 127.0 / 128);
    for (int k = 0; k < 2; k++) {
        CHECK_TRUE(tsh_write(ctx, tsh_param(layer[k], "weight"), TSH_GLOBAL, w,
                             sizeof *w * OUTS * IN) == TSH_OK);
        bias = tsh_param(layer[k], "bias");
        CHECK_TRUE(ranks_set(ctx, bias, 5) == TSH_OK);
        if (k) CHECK_TRUE(tsh_quantize(layer[k], NULL, TSH_Q8_0) == TSH_OK);
        y = tsh_forward(layer[k], x);
        hash[k] = tsh_hash(ctx, y);
        y = tsh_redistribute(tsh_sum(tsh_mul(y, y), TSH_ALL, 0), tsh_replicated());
        CHECK_TRUE(tsh_backward(ctx, y) == TSH_OK);
        dx[k] = ranks_values(ctx, tsh_grad(x));
        tsh_zero_grad(x);
        (void)tsh_step_end(ctx);
    }
    CHECK(hash[0] == hash[1], "y");
    for (int64_t e = 0; e < tsh_numel(x); e++) {
        most = fmax(most, fabs(dx[1][e] - dx[0][e]));
        size = fmax(size, fabs(dx[0][e]));
    }
    CHECK(most < 2e-6 * size, "%g of %g", most, size);
    free(w);
    free(dx[0]);
    free(dx[1]);
    CHECK_OK();
    return 0;
}

static void quantised_weights_compute_with_their_values(void **state) {
    static const tsh_style styles[] = {TSH_COLWISE, TSH_ROWWISE};
    (void)state;
    for (int k = 0; k < COUNT(styles); k++)
        for (int ranks = 1; ranks <= 3; ranks++)
            ranks_run(ranks, converts, (void *)(uintptr_t)&styles[k]);
}

/* ------------------------------------------------- merging, several, removing */

static int merges(tsh_ctx *ctx, void *user) {
    const setup *s = (const setup *)user;
    tsh_module *layer = add_layer(ctx, s, NULL);
    tsh_tensor *x, *y, *w;
    uint64_t weight, out;
    CHECK_TRUE(layer && (x = leaf(ctx, "x", tsh_replicated())) != NULL);
    (void)tsh_requires_grad(x, 0);
    w = tsh_param(layer, "weight");
    weight = tsh_hash(ctx, w);
    out = tsh_hash(ctx, tsh_forward(layer, x));
    (void)tsh_step_end(ctx);
    for (int again = 0; again < 2; again++) {
        CHECK_TRUE(tsh_lora_merge(tsh_root(ctx)) == TSH_OK);
        CHECK_TRUE(tsh_lora_merge(tsh_root(ctx)) == TSH_OK);
        CHECK_TRUE(tsh_hash(ctx, w) != weight);
        if (!s->reversed && strcmp(s->name, "one") == 0)
            CHECK_TRUE(off(ctx, w, "one", "merged") < (s->dtype ? 0.01 : 1e-6));
        y = tsh_forward(layer, x);
        CHECK(off(ctx, y, s->name, "y") < (s->dtype ? 0.02 : 2e-6), "%g",
              off(ctx, y, s->name, "y"));
        (void)tsh_step_end(ctx);
        CHECK_TRUE(tsh_load(tsh_root(ctx), "/nonexistent", NULL) != TSH_OK);
        tsh_clear_error(ctx);
        CHECK_TRUE(tsh_unfreeze(layer, "weight") == TSH_ERR_STATE);
        CHECK_SAYS(TSH_ERR_STATE, "an adapter is merged into \"layer.weight\"");
        if (again) break;
        CHECK_TRUE(tsh_lora_unmerge(tsh_root(ctx)) == TSH_OK);
        CHECK(tsh_hash(ctx, w) == weight, "the old bits");
        CHECK_TRUE(tsh_hash(ctx, tsh_forward(layer, x)) == out);
        (void)tsh_step_end(ctx);
    }
    CHECK_TRUE(tsh_lora_free(tsh_root(ctx), NULL) == TSH_OK);
    y = tsh_forward(layer, x);
    CHECK(off(ctx, y, s->name, "y") < (s->dtype ? 0.02 : 2e-6), "an ordinary layer");
    (void)tsh_step_end(ctx);
    CHECK_TRUE(!tsh_child(layer, 0) && tsh_unfreeze(layer, "weight") == TSH_OK);
    CHECK_TRUE(tsh_quantize(layer, NULL, TSH_Q8_0) == TSH_OK || s->style == TSH_ROWWISE);
    CHECK_OK();
    return 0;
}

static void adapters_are_merged_and_taken_out_again(void **state) {
    static const setup setups[] = {{.name = "one", .style = TSH_COLWISE},
                                   {.name = "one", .style = TSH_ROWWISE},
                                   {.name = "parts", .style = TSH_COLWISE},
                                   {.name = "parts", .style = TSH_ROWWISE},
                                   {.name = "one", .style = TSH_COLWISE, .reversed = 1},
                                   {.name = "one", .style = TSH_ROWWISE, .reversed = 1},
                                   {.name = "one", .style = TSH_COLWISE, .dtype = TSH_BF16}};
    (void)state;
    for (int k = 0; k < COUNT(setups); k++)
        for (int d = 0; d < COUNT(ranks_degrees); d++) {
            setup s = setups[k];
            ranks_run(ranks_degrees[d], merges, &s);
        }
}

/* A second adapter, chosen and not, beside a plain layer. */
static int several(tsh_ctx *ctx, void *user) {
    const setup s = {.name = "one", .style = TSH_COLWISE};
    const tsh_lora_desc other = {.rank = 2, .alpha = 16, .name = "other"};
    const tsh_linear_desc plain = {.in = OUT, .out = OUT};
    tsh_module *root = tsh_root(ctx), *layer = add_layer(ctx, &s, NULL);
    tsh_tensor *x, *g;
    uint64_t one, two, none;
    (void)user;
    CHECK_TRUE(layer && (x = leaf(ctx, "x", tsh_replicated())) != NULL);
    g = leaf(ctx, "g", tsh_replicated());
    CHECK_TRUE(g && tsh_add_linear(root, "plain", &plain));
    one = tsh_hash(ctx, tsh_forward(layer, x));
    (void)tsh_step_end(ctx);
    CHECK_TRUE(tsh_lora(root, NULL, &other) == TSH_OK);
    CHECK_TRUE(ranks_set(ctx, tsh_param(layer, "lora_B.other.weight"), 8) == TSH_OK);
    two = tsh_hash(ctx, tsh_forward(layer, x));
    CHECK_TRUE(tsh_lora_use(root, NULL) == TSH_OK);
    none = tsh_hash(ctx, tsh_forward(layer, x));
    CHECK_TRUE(one != two && two != none && none != one);
    CHECK_TRUE(tsh_lora_use(root, "default") == TSH_OK);
    CHECK_TRUE(tsh_hash(ctx, tsh_forward(layer, x)) == one);
    CHECK_TRUE(tsh_backward(ctx, weighed(tsh_forward(layer, x), g)) == TSH_OK);
    CHECK_TRUE(tsh_grad(tsh_param(layer, "lora_A.default.weight")));
    CHECK_TRUE(!tsh_grad(tsh_param(layer, "lora_A.other.weight")));
    (void)tsh_step_end(ctx);
    CHECK_TRUE(tsh_lora_free(root, "default") == TSH_OK);
    CHECK_TRUE(tsh_hash(ctx, tsh_forward(layer, x)) == none);
    CHECK_TRUE(tsh_lora_use(root, "other") == TSH_OK);
    CHECK_TRUE(tsh_hash(ctx, tsh_forward(layer, x)) == two);
    CHECK_TRUE(tsh_check_replicas(root));
    CHECK_OK();
    return 0;
}

static void a_layer_may_have_several(void **state) {
    (void)state;
    ranks_run(1, several, NULL);
    ranks_run(3, several, NULL);
}

/* Backward computes a checkpoint with the adapter of its forward, though none is active since. */
static int recomputes(tsh_ctx *ctx, void *user) {
    const setup s = {.name = "one", .style = *(const tsh_style *)user};
    tsh_module *root = tsh_root(ctx), *layer = add_layer(ctx, &s, NULL);
    tsh_tensor *x, *g, *y;
    CHECK_TRUE(layer && (x = leaf(ctx, "x", tsh_replicated())) != NULL);
    g = leaf(ctx, "g", tsh_replicated());
    tsh_checkpoint(layer, 1);
    y = tsh_forward(layer, x);
    CHECK_TRUE(tsh_lora_use(root, NULL) == TSH_OK);
    CHECK_TRUE(tsh_backward(ctx, weighed(y, g)) == TSH_OK);
    CHECK_TRUE(off(ctx, tsh_grad(adapter_param(layer, -1, 'A')), "one", "da0") < 2e-6);
    CHECK_TRUE(off(ctx, tsh_grad(x), "one", "dx") < 2e-6);
    (void)tsh_step_end(ctx);
    y = tsh_forward(layer, x);
    CHECK_TRUE(off(ctx, y, "one", "y") > 1e-3); /* backward has left no adapter active */
    CHECK_OK();
    return 0;
}

static void checkpoints_keep_their_adapters(void **state) {
    static const tsh_style styles[] = {TSH_COLWISE, TSH_ROWWISE};
    (void)state;
    for (int k = 0; k < COUNT(styles); k++)
        for (int ranks = 1; ranks <= 3; ranks++) {
            tsh_style style = styles[k];
            ranks_run(ranks, recomputes, &style);
        }
}

/* ------------------------------------------------------------ pipelines, files */

/* The files of a base model are loaded into a model that has adapters, and leave these as they are;
 * files that have adapters are loaded into them. */
static int loads_late(tsh_ctx *ctx, void *user) {
    const setup s = {.name = "one", .style = TSH_COLWISE};
    const tsh_lora_desc lora = {.rank = 2}, other = {.rank = 2, .name = "other"};
    const tsh_linear_desc d = {.in = IN, .out = OUT};
    tsh_module *root = tsh_root(ctx), *layer;
    tsh_tensor *w, *b;
    uint64_t weight, up;
    (void)user;
    CHECK_TRUE(tsh_add_linear(root, "plain", &d) && tsh_materialize(root) == TSH_OK);
    layer = tsh_add_linear(root, "layer", &d);
    w = tsh_param(layer, "weight");
    CHECK_TRUE(lay_out(layer, &s) && ranks_set(ctx, w, 3) == TSH_OK);
    weight = tsh_hash(ctx, w);
    CHECK_TRUE(tsh_save(root, files_path("base"), NULL) == TSH_OK);
    CHECK_TRUE(tsh_lora(root, "layer", &lora) == TSH_OK);
    b = adapter_param(layer, -1, 'B');
    CHECK_TRUE(ranks_set(ctx, b, 4) == TSH_OK && tsh_init_zeros(w, NULL) == TSH_OK);
    up = tsh_hash(ctx, b);
    CHECK_TRUE(tsh_load(root, files_path("base"), NULL) == TSH_OK);
    CHECK_TRUE(tsh_hash(ctx, w) == weight && tsh_hash(ctx, b) == up);
    CHECK_TRUE(tsh_save(root, files_path("both"), NULL) == TSH_OK);
    CHECK_TRUE(tsh_init_zeros(b, NULL) == TSH_OK);
    CHECK_TRUE(tsh_load(root, files_path("both"), NULL) == TSH_OK && tsh_hash(ctx, b) == up);
    CHECK_TRUE(tsh_lora(root, "plain", &other) == TSH_OK); /* none of this name is in the file */
    CHECK_TRUE(tsh_load(root, files_path("both"), NULL) == TSH_OK);
    CHECK_TRUE(tsh_lora(root, "plain", &lora) == TSH_OK); /* the file has some, but not these */
    CHECK_TRUE(tsh_load(root, files_path("both"), NULL) == TSH_ERR_ARGUMENT);
    CHECK_SAYS(TSH_ERR_ARGUMENT,
               "lacks 2 of the model's tensors (\"plain.lora_A.default.weight\")");
    CHECK_OK();
    return 0;
}

static void base_models_are_loaded_under_adapters(void **state) {
    (void)state;
    ranks_run(1, loads_late, NULL);
    files_clear();
    ranks_run(3, loads_late, NULL);
}


static tsh_tensor *piped_input(tsh_ctx *ctx, int micro, void *user) {
    (void)user;
    return tsh_full(ctx, tsh_shape2(4, OUT), 1 + micro);
}

static tsh_tensor *piped_loss(tsh_ctx *ctx, tsh_tensor *y, int micro, void *user) {
    (void)ctx, (void)micro, (void)user;
    return tsh_mean(tsh_mul(y, y), TSH_ALL, 0);
}

/* Adapters on both stages, or on the second alone; a file of the run is read again. */
static int piped(tsh_ctx *ctx, void *user) {
    const char *const pattern = (const char *)user;
    const tsh_pipeline_desc desc = {.micro_batches = 2, .input = piped_input, .loss = piped_loss};
    const tsh_optim_desc adamw = {.kind = TSH_ADAMW, .lr = 0.01};
    const tsh_linear_desc d = {.in = OUT, .out = OUT};
    const tsh_lora_desc lora = {.rank = 2};
    tsh_module *root = tsh_root(ctx), *h = tsh_add_module(root, "h", NULL);
    char path[FILES_SIZE + 32];
    tsh_pipeline *pipeline;
    tsh_optim *optim;
    double first = 0, loss = 0, again = 0;
    (void)tsh_add_linear(h, "0", &d);
    (void)tsh_add_linear(h, "1", &d);
    CHECK_TRUE(tsh_lora(root, pattern, &lora) == TSH_OK);
    pipeline = tsh_pipeline_new(h, &desc);
    optim = tsh_optim_new(root, &adamw);
    (void)snprintf(path, sizeof path, "%s/run.safetensors", files_here);
    for (int step = 0; step < 4; step++) {
        if (step == 3) CHECK_TRUE(tsh_save(root, path, optim) == TSH_OK);
        CHECK_TRUE(tsh_pipeline_train(pipeline, step ? &loss : &first) == TSH_OK);
        CHECK_TRUE(tsh_optim_step(optim) == TSH_OK);
        tsh_zero_grads(root);
        (void)tsh_step_end(ctx);
    }
    CHECK(loss < first, "%g, then %g", first, loss);
    CHECK_TRUE(tsh_load(root, path, optim) == TSH_OK);
    CHECK_TRUE(tsh_pipeline_train(pipeline, &again) == TSH_OK);
    CHECK(again == loss, "%g, then %g", loss, again);
    CHECK_TRUE(tsh_lora(root, "h.*", &lora) == TSH_ERR_STATE);
    CHECK_SAYS(TSH_ERR_STATE, "call tsh_lora before tsh_pipeline_new");
    return 0;
}

static void pipelines_and_files_have_adapters(void **state) {
    static const char *const patterns[] = {"h.*", "h.1"};
    const tsh_desc desc = {.tp = 1, .pp = 2};
    (void)state;
    for (int k = 0; k < COUNT(patterns); k++) {
        ranks_run_at(RANKS_FIRST, 2, &desc, piped, (void *)(uintptr_t)patterns[k]);
        ranks_run_at(RANKS_FIRST, 1, NULL, piped, (void *)(uintptr_t)patterns[k]);
    }
}

/* The model of the golden "peft" reads PEFT's file and gives its output; the file that it writes
 * has the same tensors, byte by byte, at every degree. */
static tsh_tensor *peft_forward(tsh_module *root, tsh_tensor *x) {
    x = tsh_relu(tsh_forward(tsh_find(root, "h.0.q_proj"), x));
    return tsh_forward(tsh_find(root, "head"), tsh_forward(tsh_find(root, "h.0.c_fc"), x));
}

static int reads_peft(tsh_ctx *ctx, void *user) {
    static const char *const params[] = {"h.0.q_proj.weight", "h.0.q_proj.bias", "h.0.c_fc.weight",
                                         "h.0.c_fc.bias",     "head.weight",     "head.bias"};
    static const char *const tensors[] = {"h.0.c_fc.lora_A", "h.0.c_fc.lora_B", "h.0.q_proj.lora_A",
                                          "h.0.q_proj.lora_B"};
    const tsh_linear_desc q = {.in = IN, .out = OUT, .style = TSH_COLWISE};
    const tsh_linear_desc c = {.in = OUT, .out = 9, .style = TSH_ROWWISE, .reversed = 1};
    const tsh_linear_desc head = {.in = 9, .out = 4};
    const tsh_lora_desc lora = {.rank = RANK};
    const tsh_file_desc desc = {.adapter = "default"}, none = {.adapter = "x"};
    tsh_module *root = tsh_root(ctx), *h = tsh_add_module(root, "h", NULL), *block;
    tsh_tensor *x, *y;
    char path[2 * FILES_SIZE], ours[FILES_SIZE + 32];
    golden_file file;
    (void)user;
    block = tsh_add_module(h, "0", NULL);
    (void)tsh_add_linear(block, "q_proj", &q);
    (void)tsh_add_linear(block, "c_fc", &c);
    (void)tsh_add_linear(root, "head", &head);
    for (int i = 0; i < COUNT(params); i++)
        CHECK_TRUE(put(ctx, tsh_param(root, params[i]), "peft", params[i], 0));
    CHECK_TRUE(tsh_lora(root, "h.**", &lora) == TSH_OK);
    (void)snprintf(path, sizeof path, "%.*s../golden/peft.safetensors",
                   (int)(strrchr(__FILE__, '/') - __FILE__ + 1), __FILE__);
    (void)snprintf(ours, sizeof ours, "%s/adapter_model.safetensors", files_here);
    CHECK_TRUE(tsh_load_with(root, path, NULL, &none) == TSH_ERR_ARGUMENT);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "has an adapter \"x\"; tsh_lora adds one");
    CHECK_TRUE(tsh_load_with(root, path, NULL, &desc) == TSH_OK);
    x = leaf(ctx, "x", tsh_replicated());
    y = peft_forward(root, x);
    CHECK(off(ctx, y, "peft", "y") < 2e-6, "%g", off(ctx, y, "peft", "y"));
    (void)tsh_step_end(ctx);
    CHECK_TRUE(tsh_save_with(root, ours, NULL, &desc) == TSH_OK);
    if (tsh_world(ctx)->rank == 0 && sizeof(tsh_real) == 4) {
        golden_file mine = golden_open_at(ours);
        file = golden_open_at(path);
        for (int i = 0; i < COUNT(tensors); i++) {
            char name[64];
            (void)snprintf(name, sizeof name, "base_model.model.%s", tensors[i]);
            const golden_tensor a = golden_get(&file, name, "weight");
            const golden_tensor b = golden_get(&mine, name, "weight");
            CHECK(a.count == b.count && memcmp(a.data, b.data, (size_t)a.count * 4) == 0, "%s",
                  name);
        }
        golden_finish(&mine);
        golden_close(&file);
    }
    CHECK_TRUE(tsh_barrier(tsh_world(ctx)) == TSH_OK);
    CHECK_OK();
    return 0;
}

static void adapters_are_read_and_written_as_by_peft(void **state) {
    (void)state;
    for (int ranks = 1; ranks <= 3; ranks++)
        ranks_run_at(RANKS_FIRST, ranks, NULL, reads_peft, NULL);
}

/* --------------------------------------------------------------------- mistakes */

static int refuses(tsh_ctx *ctx, void *user) {
    static const tsh_lora_part wrong[] = {{"a", 3}, {"b", 4}}, unnamed[] = {{NULL, 3}},
                               same[] = {{"a", 3}, {"a", 3}}, taken[] = {{"weight", 3}, {"b", 3}},
                               huge[] = {{"a", INT64_MAX}, {"b", INT64_MAX}};
    static char name[2 * TSH_PATH_SIZE];
    const tsh_embedding_desc table = {.count = 7, .dim = 32};
    const tsh_linear_desc d = {.in = 32, .out = 6};
    tsh_module *root = tsh_root(ctx), *layer = tsh_add_linear(root, "layer", &d);
    tsh_lora_desc lora = {.rank = 0};
    tsh_tensor *x = tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(2, 32), tsh_replicated());
    tsh_optim *optim;
    (void)user;
    CHECK_TRUE(tsh_add_embedding(root, "embed", &table) != NULL);
    CHECK_TRUE(tsh_lora(NULL, "layer", &lora) == TSH_ERR_ARGUMENT);
    CHECK_TRUE(tsh_lora(root, "layer", NULL) == TSH_ERR_ARGUMENT);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "tsh_lora: there is no description");
    CHECK_TRUE(tsh_lora(root, "layer", &lora) == TSH_ERR_ARGUMENT);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "rank 0, alpha 0, dropout 0; the rank is at least 1, such as 8");
    lora.rank = 2;
    lora.dropout = 1;
    CHECK_TRUE(tsh_lora(root, "layer", &lora) == TSH_ERR_ARGUMENT);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "dropout 1");
    lora.dropout = 0;
    lora.name = "a.b";
    CHECK_TRUE(tsh_lora(root, "layer", &lora) == TSH_ERR_ARGUMENT);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "\"a.b\" is no name");
    lora.name = NULL;
    CHECK_TRUE(tsh_lora(root, "lay*.x", &lora) == TSH_ERR_ARGUMENT);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "\"lay*.x\" matches no linear layer; near it are \"layer\"");
    CHECK_TRUE(tsh_lora(root, "embed", &lora) == TSH_ERR_ARGUMENT);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "matches no linear layer; \"embed\" is of kind \"embedding\"");
    lora.parts = wrong;
    lora.part_count = 2;
    CHECK_TRUE(tsh_lora(root, "layer", &lora) == TSH_ERR_ARGUMENT);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "the parts have 7 output features, \"layer\" has 6");
    lora.parts = unnamed;
    lora.part_count = 1;
    CHECK_TRUE(tsh_lora(root, "layer", &lora) == TSH_ERR_ARGUMENT);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "part 0 has no name");
    lora.part_count = 2;
    lora.parts = same;
    CHECK_TRUE(tsh_lora(root, "layer", &lora) == TSH_ERR_ARGUMENT);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "parts 0 and 1 are both \"a\"");
    lora.parts = taken;
    CHECK_TRUE(tsh_lora(root, "layer", &lora) == TSH_ERR_ARGUMENT);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "part 0 is \"weight\", which is a parameter of \"layer\"");
    lora.parts = huge;
    CHECK_TRUE(tsh_lora(root, "layer", &lora) == TSH_ERR_ARGUMENT);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "the parts have 9223372036854775807 output features");
    lora.part_count = 0;
    lora.dtype = TSH_Q8_0;
    CHECK_TRUE(tsh_lora(root, "layer", &lora) == TSH_ERR_DTYPE);
    CHECK_SAYS(TSH_ERR_DTYPE, "tsh_lora: A and B are f");
    lora.dtype = TSH_DTYPE_DEFAULT;
    lora.name = (const char *)memset(name, 'n', sizeof name - 1);
    CHECK_TRUE(tsh_lora(root, "layer", &lora) == TSH_ERR_ARGUMENT);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "makes a path of");
    lora.name = NULL;
    CHECK(tsh_forward(layer, x) != NULL, "recorded");
    CHECK_TRUE(tsh_lora(root, "layer", &lora) == TSH_ERR_STATE);
    CHECK_SAYS(TSH_ERR_STATE, "tsh_lora: ops are recorded that use \"layer.weight\"");
    (void)tsh_step_end(ctx);
    CHECK(!tsh_child(layer, 0), "nothing is changed");
    CHECK_TRUE(tsh_lora_merge(root) == TSH_ERR_ARGUMENT);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "tsh_lora_merge: no layer below \"\" has an active adapter");
    CHECK_TRUE(tsh_lora_free(root, NULL) == TSH_ERR_ARGUMENT);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "tsh_lora_free: no layer below \"\" has an adapter");
    CHECK_TRUE(tsh_lora(root, "layer", &lora) == TSH_OK);
    CHECK_TRUE(tsh_lora(root, "**", &lora) == TSH_ERR_STATE);
    CHECK_SAYS(TSH_ERR_STATE, "\"layer\" has an adapter \"default\" already");
    CHECK_TRUE(tsh_lora_use(root, "x") == TSH_ERR_ARGUMENT);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "no layer below \"\" has an adapter \"x\"; tsh_lora adds one");
    optim = tsh_optim_new(root, NULL);
    CHECK_TRUE(optim && tsh_lora_free(root, NULL) == TSH_ERR_STATE);
    CHECK_SAYS(TSH_ERR_STATE, "\"layer.lora_A.default.weight\" is updated by an optimiser");
    tsh_optim_free(optim);
    CHECK_TRUE(tsh_unfreeze(layer, "weight") == TSH_OK);
    CHECK_TRUE(tsh_lora_merge(root) == TSH_ERR_STATE);
    CHECK_SAYS(TSH_ERR_STATE, "tsh_lora_merge: \"layer.weight\" is trained; tsh_freeze it first");
    CHECK_TRUE(tsh_freeze(layer, "weight") == TSH_OK && tsh_lora_merge(root) == TSH_OK);
    CHECK_TRUE(tsh_lora_use(root, NULL) == TSH_ERR_STATE);
    CHECK_SAYS(TSH_ERR_STATE, "the adapter \"default\" is merged into \"layer\"");
    CHECK_TRUE(tsh_quantize(root, "layer", TSH_Q8_0) == TSH_ERR_STATE);
    CHECK_SAYS(TSH_ERR_STATE, "tsh_quantize: an adapter is merged into \"layer.weight\"");
    CHECK_TRUE(tsh_to(root, TSH_BF16) == TSH_ERR_STATE);
    CHECK_SAYS(TSH_ERR_STATE, "tsh_to: an adapter is merged into \"layer.weight\"");
    CHECK_TRUE(tsh_lora_unmerge(root) == TSH_OK);
    CHECK_TRUE(tsh_quantize(root, "layer", TSH_Q8_0) == TSH_OK);
    CHECK_TRUE(tsh_lora_merge(root) == TSH_ERR_DTYPE);
    CHECK_SAYS(TSH_ERR_DTYPE, "\"layer.weight\" is q8_0, which a sum cannot be stored in");
    CHECK_OK();
    return 0;
}

static void mistakes_are_told(void **state) {
    (void)state;
    ranks_run(1, refuses, NULL);
}

static int begin(void **state) {
    golden = golden_open("lora");
    return files_begin(state);
}

static int end(void **state) {
    golden_finish(&golden);
    return files_end(state);
}

/* -------------------------------------------------------------- bf16 activations */

/* In bf16, a layer's output with an adapter equals its output without the adapter plus s B A x, as
 * computed in float, to the precision of bf16: for a batch of few rows, and for one of many. */
static int adds_to_bf16(tsh_ctx *ctx, void *user) {
    const tsh_linear_desc d = {.in = 40, .out = 50, .style = *(const tsh_style *)user};
    const tsh_lora_desc desc = {.rank = RANK, .alpha = 2 * RANK}; /* s = 2 */
    const int64_t rows[] = {1, 3, 70};
    tsh_module *layer = tsh_add_linear(tsh_root(ctx), "layer", &d);
    CHECK_TRUE(tsh_lora(tsh_root(ctx), NULL, &desc) == TSH_OK);
    tsh_tensor *a = tsh_param(layer, "lora_A.default.weight");
    tsh_tensor *b = tsh_param(layer, "lora_B.default.weight");
    CHECK_TRUE(tsh_init_normal(b, NULL) == TSH_OK);
    tsh_no_grad_begin(ctx);
    for (int i = 0; i < COUNT(rows); i++) {
        tsh_tensor *x = tsh_cast(tsh_randn(ctx, tsh_shape2(rows[i], 40)), TSH_BF16), *h, *want;
        CHECK_TRUE(tsh_lora_use(layer, NULL) == TSH_OK);
        want = tsh_cast(tsh_full_tensor(tsh_forward(layer, x)), TSH_REAL);
        CHECK_TRUE(tsh_lora_use(layer, "default") == TSH_OK);
        h = tsh_linear(tsh_cast(x, TSH_REAL), tsh_cast(tsh_full_tensor(a), TSH_REAL), NULL);
        h = tsh_linear(h, tsh_cast(tsh_full_tensor(b), TSH_REAL), NULL);
        want = tsh_add(want, tsh_scale(h, 2));
        x = tsh_sub(want, tsh_cast(tsh_full_tensor(tsh_forward(layer, x)), TSH_REAL));
        const double off = tsh_item(ctx, tsh_max(tsh_abs(x), TSH_ALL, 0));
        const double most = tsh_item(ctx, tsh_max(tsh_abs(want), TSH_ALL, 0));
        CHECK(off <= most / 64, "%d rows: %g of %g", (int)rows[i], off, most);
        (void)tsh_step_end(ctx);
    }
    tsh_no_grad_end(ctx);
    CHECK_OK();
    return 0;
}

static void adapters_add_to_bf16(void **state) {
    const tsh_desc desc = {.dtype = TSH_BF16};
    tsh_style style[] = {TSH_COLWISE, TSH_ROWWISE};
    (void)state;
    for (int ranks = 1; ranks <= 2; ranks++)
        for (int i = 0; i < COUNT(style); i++)
            ranks_run_with(ranks, &desc, adds_to_bf16, &style[i]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(adapters_are_those_of_torch),
        cmocka_unit_test(adapters_add_to_bf16),
        cmocka_unit_test(gradients_are_those_of_differences),
        cmocka_unit_test(draws_are_the_same_at_every_degree),
        cmocka_unit_test(adapters_are_trained_as_by_torch),
        cmocka_unit_test(inputs_of_quantised_weights_are_rounded_without_gradients),
        cmocka_unit_test(quantised_weights_compute_with_their_values),
        cmocka_unit_test(adapters_are_merged_and_taken_out_again),
        cmocka_unit_test(a_layer_may_have_several),
        cmocka_unit_test(checkpoints_keep_their_adapters),
        cmocka_unit_test_teardown(base_models_are_loaded_under_adapters, files_after),
        cmocka_unit_test_teardown(pipelines_and_files_have_adapters, files_after),
        cmocka_unit_test_teardown(adapters_are_read_and_written_as_by_peft, files_after),
        cmocka_unit_test(mistakes_are_told),
    };
    return cmocka_run_group_tests(tests, begin, end);
}
