/* Ranks that built different models: one error, on all of them, that names the rank and the first
 * place that differs, before a number is wrong. */
/* build: double */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"

enum { WIDTH = 8, HIDDEN = 64 };

/* What one rank does otherwise. */
typedef enum change {
    SEED,
    WIDER,
    NO_PLAN,
    OTHER_PLAN,
    OTHER_KIND,
    OTHER_EPS,
    OTHER_NAME,
    MISSING,
    EXTRA,
    TIED,
    ACTIVE, /* another adapter is active */
    LATER,  /* in a second model */
    CHANGES,
    NONE = CHANGES
} change;

/* Text of the error: on the rank whose model differs, and on the others. */
static const char *const says[CHANGES][2] = {
    {"the seed 7", "the seed 0"},
    {"\"up\" linear: weight f32 (65, 8) S(0)", "\"up\" linear: weight f32 (64, 8) S(0)"},
    {"\"up\" linear: weight f32 (64, 8) R", "\"up\" linear: weight f32 (64, 8) S(0)"},
    {"\"up\" linear: weight f32 (64, 8) S(0, unit 16)", "\"up\" linear: weight f32 (64, 8) S(0)"},
    {"\"norm\" rms_norm: weight", "\"norm\" layer_norm: weight"},
    {"\"norm\" layer_norm (0.001): weight", "\"norm\" layer_norm: weight"},
    {"\"norms\" layer_norm", "\"norm\" layer_norm"},
    {"has nothing", "\"norm\" layer_norm"},
    {"\"extra\" linear", "has nothing"},
    {"\"two\" linear: weight f32 (8, 8) R", "\"two\" linear: weight f32 (8, 8) S(0)"},
    {"\"one\" linear with the adapter \"a\": weight",
     "\"one\" linear with the adapter \"b\": weight"},
    {"\"late\" linear: weight f32 (9, 8) R", "\"late\" linear: weight f32 (8, 8) R"},
};

typedef struct oddity {
    change what;
    int odd; /* the world rank whose model differs */
    int meet; /* 1: the first collective is a barrier of the world, not one of training */
    int blamed;
} oddity;

static void set_seed(tsh_ctx *ctx, unsigned char seed) {
    unsigned char state[1024];
    const size_t size = tsh_rng_state(ctx, state, sizeof state);
    state[16] = seed; /* the third little-endian word */
    (void)tsh_set_rng_state(ctx, state, size);
}

static void build(tsh_ctx *ctx, change c) {
    const tsh_linear_desc up = {.in = WIDTH, .out = HIDDEN + (c == WIDER)};
    const tsh_linear_desc down = {.in = HIDDEN + (c == WIDER), .out = WIDTH};
    const tsh_linear_desc square = {.in = WIDTH, .out = WIDTH};
    const tsh_layer_norm_desc norm = {.dim = WIDTH, .eps = c == OTHER_EPS ? 1e-3 : 0};
    const tsh_rms_norm_desc rms = {.dim = WIDTH};
    const tsh_plan_rule plan[] = {
        {.path = "up", .style = TSH_COLWISE, .unit = c == OTHER_PLAN ? 16 : 0},
        {.path = "down", .style = TSH_ROWWISE, .unit = c == OTHER_PLAN ? 16 : 0},
        {.path = "two", .style = TSH_COLWISE, .gather_output = 1}};
    tsh_module *root = tsh_root(ctx);
    (void)tsh_add_linear(root, "up", &up);
    (void)tsh_add_linear(root, "down", &down);
    (void)tsh_add_linear(root, "one", &square);
    (void)tsh_add_linear(root, "two", &square);
    if (c == TIED) (void)tsh_tie(tsh_find(root, "two"), "weight", tsh_param(root, "one.weight"));
    if (c == OTHER_KIND) (void)tsh_add_rms_norm(root, "norm", &rms);
    else if (c == OTHER_NAME) (void)tsh_add_layer_norm(root, "norms", &norm);
    else if (c != MISSING) (void)tsh_add_layer_norm(root, "norm", &norm);
    if (c == EXTRA) (void)tsh_add_linear(root, "extra", &square);
    if (c != NO_PLAN) (void)tsh_parallelize(root, plan, c == TIED ? 2 : 3);
    if (c == SEED) set_seed(ctx, 7);
}

static void one_step(tsh_ctx *ctx, tsh_optim *optim) {
    tsh_tensor *x = tsh_randn(ctx, tsh_shape2(3, WIDTH));
    x = tsh_forward(tsh_root(ctx), x);
    (void)tsh_backward(ctx, tsh_mean(tsh_mul(x, x), TSH_ALL, 0));
    (void)tsh_optim_step(optim);
    tsh_zero_grads(tsh_root(ctx));
    (void)tsh_step_end(ctx);
}

static int differ(tsh_ctx *ctx, void *user) {
    const oddity *t = (const oddity *)user;
    const int odd = tsh_world(ctx)->rank == t->odd;
    const change c = odd && t->what != LATER ? t->what : NONE;
    const tsh_error *error = tsh_last_error(ctx);
    const tsh_optim_desc adam = {.kind = TSH_ADAM};
    char text[TSH_MESSAGE_SIZE], *at;
    int i;
    build(ctx, c);
    CHECK(error->code == TSH_OK, "the model");
    if (t->what == ACTIVE) {
        const tsh_lora_desc a = {.rank = 2, .name = "a"}, b = {.rank = 2, .name = "b"};
        CHECK_TRUE(tsh_lora(tsh_root(ctx), "one", &a) == TSH_OK);
        CHECK_TRUE(tsh_lora(tsh_root(ctx), "one", &b) == TSH_OK);
        CHECK_TRUE(!odd || tsh_lora_use(tsh_root(ctx), "a") == TSH_OK);
    }
    if (t->what == LATER) {
        const tsh_linear_desc late = {.in = WIDTH, .out = odd ? WIDTH + 1 : WIDTH};
        (void)tsh_barrier(tsh_tp(ctx));
        (void)tsh_barrier(tsh_dp(ctx));
        (void)tsh_barrier(tsh_world(ctx));
        CHECK(tsh_ok(ctx), "the first model is the same");
        (void)tsh_add_linear(tsh_root(ctx), "late", &late);
    }
    if (t->meet)
        CHECK(tsh_barrier(tsh_world(ctx)) == TSH_ERR_MISMATCH, "a barrier");
    else
        one_step(ctx, tsh_optim_new(tsh_root(ctx), &adam));
    CHECK(!tsh_ok(ctx), "an error on every rank");
    CHECK(error->code == TSH_ERR_MISMATCH && error->rank == t->blamed, "of rank %d", error->rank);
    (void)snprintf(text, sizeof text, "%s", error->message);
    for (at = text; sizeof(tsh_real) == 8 && (at = strstr(at, "f64")); at++) memcpy(at, "f32", 3);
    CHECK(strstr(text, "built different models: rank "), "%s", text);
    for (i = 0; i < 2; i++)
        CHECK(strstr(text, says[t->what][t->odd == t->blamed ? i : 1 - i]), "it lacks %s",
              says[t->what][i]);
    return 0;
}

static void try_all(int tp, int dp, int odd, int blamed) {
    const tsh_desc desc = {.tp = tp};
    oddity t = {.odd = odd, .blamed = blamed};
    int what;
    for (t.meet = 0; t.meet < 2; t.meet++)
        for (what = 0; what < CHANGES; what++) {
            t.what = (change)what;
            ranks_run_with(tp * dp, &desc, differ, &t);
        }
}

/* At two ranks the one that is not rank 0 is named, else the one that differs from most. */
static void over_tp_the_odd_rank_is_named(void **state) {
    (void)state;
    try_all(2, 1, 1, 1);
    try_all(2, 1, 0, 1);
    try_all(4, 1, 2, 2);
    try_all(4, 1, 0, 0);
}

static void over_dp_the_odd_rank_is_named(void **state) {
    (void)state;
    try_all(1, 2, 1, 1);
    try_all(1, 4, 0, 0);
    try_all(1, 4, 3, 3);
}

/* Over tp and dp at once only one replica sees that its ranks differ; the others learn of it. */
static int differ_in_a_grid(tsh_ctx *ctx, void *user) {
    const tsh_optim_desc adam = {.kind = TSH_ADAM};
    const tsh_error *error = tsh_last_error(ctx);
    (void)user;
    /* a rank that is still in tsh_open, which needs its own groups only, would learn of it there */
    (void)tsh_barrier(tsh_world(ctx));
    build(ctx, tsh_world(ctx)->rank == 3 ? WIDER : NONE);
    one_step(ctx, tsh_optim_new(tsh_root(ctx), &adam));
    CHECK(!tsh_ok(ctx) && error->code == TSH_ERR_MISMATCH, "an error on every rank");
    CHECK(error->rank == 3 && strstr(error->message, "\"up\" linear: weight"), "that names it");
    return 0;
}

static void in_a_grid_all_ranks_learn_of_it(void **state) {
    const tsh_desc desc = {.tp = 2};
    (void)state;
    ranks_run_with(4, &desc, differ_in_a_grid, NULL);
}

/* -- pipelines --------------------------------------------------------------- */

static tsh_tensor *first(tsh_ctx *ctx, int k, void *user) {
    (void)k, (void)user;
    return tsh_randn(ctx, tsh_shape2(3, WIDTH));
}

static tsh_tensor *last(tsh_ctx *ctx, tsh_tensor *y, int k, void *user) {
    (void)ctx, (void)k, (void)user;
    return tsh_mean(tsh_mul(y, y), TSH_ALL, 0);
}

/* Stages hold different layers of one tree; a rank with another tree is named. */
static int stages(tsh_ctx *ctx, void *user) {
    const int odd = *(const int *)user;
    const tsh_linear_desc square = {.in = WIDTH, .out = WIDTH, .bias = TSH_NO};
    const tsh_linear_desc wider = {.in = WIDTH, .out = WIDTH + 1, .bias = TSH_NO};
    const tsh_pipeline_desc d = {.micro_batches = 2, .input = first, .loss = last};
    const tsh_error *error = tsh_last_error(ctx);
    tsh_module *h = tsh_add_module(tsh_root(ctx), "h", NULL);
    tsh_pipeline *pipe;
    double loss;
    (void)tsh_add_linear(h, "0", &square);
    (void)tsh_add_linear(h, "1", tsh_world(ctx)->rank == odd ? &wider : &square);
    pipe = tsh_pipeline_new(h, &d);
    if (odd < 0) {
        CHECK(pipe && tsh_pipeline_train(pipe, &loss) == TSH_OK, "the same tree");
        CHECK(tsh_barrier(tsh_world(ctx)) == TSH_OK, "a barrier");
        CHECK_OK();
        return 0;
    }
    CHECK(!pipe && error->code == TSH_ERR_MISMATCH && error->rank == odd, "rank %d", error->rank);
    CHECK(strstr(error->message, "\"h.1\" linear: weight"), "its layer");
    return 0;
}

static void trees_are_compared_between_stages(void **state) {
    const tsh_desc desc = {.tp = 1, .pp = 2};
    int odd;
    (void)state;
    for (odd = -1; odd < 2; odd += 2) {
        ranks_run_with(2, &desc, stages, &odd);
        ranks_run_with(4, &desc, stages, &odd);
    }
}

/* -- no false alarm ----------------------------------------------------------- */

/* Only the first replica evaluates before training; nothing is counted, nothing waits. */
static int some_evaluate(tsh_ctx *ctx, void *user) {
    const tsh_optim_desc adam = {.kind = TSH_ADAM};
    tsh_comm_stats before;
    tsh_optim *optim;
    (void)user;
    build(ctx, NONE);
    optim = tsh_optim_new(tsh_root(ctx), &adam);
    if (tsh_dp(ctx)->rank == 0)
        CHECK(tsh_forward(tsh_root(ctx), tsh_ones(ctx, tsh_shape2(1, WIDTH))), "a forward");
    CHECK(tsh_step_end(ctx) == TSH_OK, "step");
    before = tsh_world(ctx)->stats;
    CHECK(tsh_barrier(tsh_world(ctx)) == TSH_OK, "a barrier");
    before.calls[TSH_BARRIER]++;
    CHECK(memcmp(&before, &tsh_world(ctx)->stats, sizeof before) == 0, "it is not counted");
    one_step(ctx, optim);
    CHECK_OK();
    return 0;
}

static void ranks_may_begin_with_different_collectives(void **state) {
    const tsh_desc desc = {.tp = 2}, replicas = {.tp = 1};
    (void)state;
    ranks_run_with(4, &desc, some_evaluate, NULL);
    ranks_run_with(2, &replicas, some_evaluate, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(over_tp_the_odd_rank_is_named),
        cmocka_unit_test(over_dp_the_odd_rank_is_named),
        cmocka_unit_test(in_a_grid_all_ranks_learn_of_it),
        cmocka_unit_test(trees_are_compared_between_stages),
        cmocka_unit_test(ranks_may_begin_with_different_collectives),
    };
    return cmocka_run_group_tests_name("layer/same_model", tests, NULL, NULL);
}
