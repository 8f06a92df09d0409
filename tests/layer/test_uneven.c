/* Pipelines whose micro-batches weigh: the loss, the gradients and the norm are those of the whole
 * batch on one rank, however unevenly its rows, and the targets that count, lie over micro-batches
 * and replicas. */
/* build: double */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"

/* Sums over rows in another order than one rank's. */
#define ROUNDING (sizeof(tsh_real) == 4 ? 4e-6 : 1e-13)

enum { ROWS = 7, TOKENS = 5, VOCABULARY = 11, WIDTH = 6, HIDDEN = 9, LAYERS = 4 };
enum { IGNORED = -100 };

typedef struct setup {
    int tp, pp, dp, m, zero, tied;
    tsh_pipeline_schedule schedule;
    int apart;   /* micro-batch 0 goes by itself, before the pipeline */
    int nothing; /* all targets are ignored */
} setup;

typedef struct model {
    const setup *how;
    tsh_ctx *ctx;
    tsh_module *net;
    int first; /* of this replica's slots */
} model;

static tsh_tensor *call(tsh_module *m, const char *child, tsh_tensor *x) {
    return tsh_forward(tsh_find(m, child), x);
}

static tsh_tensor *block(tsh_module *self, tsh_tensor **in, int n, void *user) {
    (void)n, (void)user;
    return tsh_add(in[0], call(self, "down", tsh_gelu(call(self, "up", in[0]))));
}

static void make_model(tsh_ctx *ctx, model *t, const setup *how) {
    static const tsh_plan_rule plan[] = {{.path = "table", .style = TSH_ROWWISE},
                                         {.path = "h.*.up", .style = TSH_COLWISE},
                                         {.path = "h.*.down", .style = TSH_ROWWISE},
                                         {.path = "head", .style = TSH_COLWISE}};
    const tsh_embedding_desc table = {.count = VOCABULARY, .dim = WIDTH};
    const tsh_linear_desc up = {.in = WIDTH, .out = HIDDEN}, down = {.in = HIDDEN, .out = WIDTH};
    const tsh_linear_desc head = {.in = WIDTH, .out = VOCABULARY, .bias = TSH_NO};
    const tsh_layer_norm_desc norm = {.dim = WIDTH};
    const tsh_module_desc as_block = {block, NULL};
    tsh_module *h, *part;
    int i;
    t->how = how;
    t->ctx = ctx;
    t->net = tsh_root(ctx);
    t->first = tsh_dp(ctx)->rank * how->m;
    (void)tsh_add_embedding(t->net, "table", &table);
    h = tsh_add_module(t->net, "h", NULL);
    for (i = 0; i < LAYERS; i++) {
        const char name[2] = {(char)('0' + i), 0};
        part = tsh_add_module(h, name, &as_block);
        (void)tsh_add_linear(part, "up", &up);
        (void)tsh_add_linear(part, "down", &down);
    }
    (void)tsh_add_layer_norm(t->net, "norm", &norm);
    part = tsh_add_linear(t->net, "head", &head);
    if (how->tied) (void)tsh_tie(part, "weight", tsh_param(t->net, "table.weight"));
    (void)tsh_parallelize(t->net, plan, COUNT(plan));
}

/* ------------------------------------------------------------------------ its rows */

/* Slot s of n has rows as torch.chunk deals them: the last ones may have none. */
static int first_row(int s, int n) {
    const int each = (ROWS + n - 1) / n;
    return s * each < ROWS ? s * each : ROWS;
}

static int slots(const model *t) {
    return t->how->m * tsh_dp(t->ctx)->size;
}

static int32_t token(int row, int at) {
    return (int32_t)(ranks_mix(3, (uint64_t)(row * TOKENS + at)) % VOCABULARY);
}

/* A third is ignored, and all of row 2. */
static int32_t target(const model *t, int row, int at) {
    const uint64_t draw = ranks_mix(4, (uint64_t)(row * TOKENS + at));
    if (t->how->nothing || row == 2 || draw % 3 == 0) return IGNORED;
    return (int32_t)(draw / 3 % VOCABULARY);
}

/* Of every row of slot s. */
static tsh_tensor *tokens(const model *t, int s, int as_targets) {
    const int from = first_row(s, slots(t)), to = first_row(s + 1, slots(t));
    int32_t values[ROWS * TOKENS + 1];
    tsh_tensor *x, *copy;
    int i;
    for (i = 0; i < (to - from) * TOKENS; i++)
        values[i] = as_targets ? target(t, from + i / TOKENS, i % TOKENS)
                               : token(from + i / TOKENS, i % TOKENS);
    x = tsh_tensor_from(t->ctx, TSH_I32, tsh_shape2(to - from, TOKENS), tsh_replicated(), values);
    copy = tsh_clone(x);
    tsh_tensor_free(x);
    return copy;
}

static double weight_of(const model *t, int s) {
    double sum = 0;
    int row, i;
    for (row = first_row(s, slots(t)); row < first_row(s + 1, slots(t)); row++)
        for (i = 0; i < TOKENS; i++) sum += target(t, row, i) != IGNORED;
    return sum;
}

static tsh_tensor *input(tsh_ctx *ctx, int k, void *user) {
    const model *t = (const model *)user;
    (void)ctx;
    return call(t->net, "table", tokens(t, t->first + k + t->how->apart, 0));
}

static tsh_tensor *loss_by(const model *t, tsh_tensor *y, int s, tsh_reduction reduction) {
    const tsh_cross_entropy_desc desc = {.reduction = reduction};
    return tsh_cross_entropy(call(t->net, "head", call(t->net, "norm", y)), tokens(t, s, 1), &desc);
}

static tsh_tensor *sum_of_losses(tsh_ctx *ctx, tsh_tensor *y, int k, void *user) {
    const model *t = (const model *)user;
    (void)ctx;
    return loss_by(t, y, t->first + k + t->how->apart, TSH_REDUCE_SUM);
}

static double weight(tsh_ctx *ctx, int k, void *user) {
    const model *t = (const model *)user;
    (void)ctx;
    return weight_of(t, t->first + k + t->how->apart);
}

static tsh_pipeline *make_pipeline(model *t) {
    const tsh_pipeline_desc desc = {.micro_batches = t->how->m - t->how->apart,
                                    .schedule = t->how->schedule,
                                    .input = input,
                                    .loss = sum_of_losses,
                                    .weight = weight,
                                    .user = t};
    const int counts[3] = {1, 2, 1};
    tsh_pipeline_desc uneven = desc;
    uneven.counts = t->how->pp == 3 ? counts : NULL;
    return tsh_pipeline_new(tsh_find(t->net, "h"), &uneven);
}

/* -------------------------------------------------------------------- what is found */

typedef struct outcome {
    double loss, norm, evaluated;
    kept_params params; /* gradients; values after a step */
} outcome;

typedef struct job {
    const setup *how;
    outcome *want;
} job;

static int near(double a, double b) {
    return a == b || fabs(a - b) <= ROUNDING * fmax(1, fabs(a));
}

static tsh_optim *make_optim(const model *t) {
    const tsh_optim_desc sgd = {
        .kind = TSH_SGD, .lr = 0.5, .momentum = 0.9, .clip_norm = 0.25, .zero = t->how->zero};
    return tsh_optim_new(t->net, &sgd);
}

static void finish(model *t, tsh_optim *optim, outcome *o) {
    (void)tsh_optim_step(optim);
    o->norm = tsh_optim_state(optim).norm;
    tsh_zero_grads(t->net);
    (void)tsh_step_end(t->ctx);
    tsh_each_param(t->net, params_keep_value, &o->params);
}

/* The whole batch on one rank, as one mean. */
static int whole_batch(tsh_ctx *ctx, void *user) {
    const job *j = (const job *)user;
    const setup alone = {.m = 1, .tied = j->how->tied};
    outcome *o = j->want;
    tsh_optim *optim;
    tsh_tensor *loss;
    model t;
    make_model(ctx, &t, &alone);
    optim = make_optim(&t);
    loss = loss_by(&t, tsh_forward(tsh_find(t.net, "h"), input(ctx, 0, &t)), 0, TSH_REDUCE_MEAN);
    o->loss = tsh_item(ctx, loss);
    CHECK(tsh_backward(ctx, loss) == TSH_OK, "backward");
    tsh_each_param(t.net, params_keep_gradient, &o->params);
    finish(&t, optim, o);
    loss = loss_by(&t, tsh_forward(tsh_find(t.net, "h"), input(ctx, 0, &t)), 0, TSH_REDUCE_MEAN);
    o->evaluated = tsh_item(ctx, loss);
    (void)tsh_step_end(ctx);
    CHECK_OK();
    return 0;
}

static int compare(tsh_ctx *ctx, const job *j, const outcome *got) {
    const outcome *want = j->want;
    CHECK(near(want->norm, got->norm), "norm %.17g, not %.17g", got->norm, want->norm);
    if (params_compare(ctx, &want->params, &got->params, j->how->zero ? -1 : ROUNDING, ROUNDING))
        return 1;
    if (j->how->apart) return 0; /* the loss is of the others */
    CHECK(near(want->loss, got->loss), "loss %.17g, not %.17g", got->loss, want->loss);
    CHECK(near(want->evaluated, got->evaluated), "evaluated: %.17g, not %.17g", got->evaluated,
          want->evaluated);
    return 0;
}

static int dealt_batch(tsh_ctx *ctx, void *user) {
    const job *j = (const job *)user;
    tsh_pipeline *pipeline;
    tsh_optim *optim;
    outcome got;
    model t;
    int failed;
    memset(&got, 0, sizeof got);
    make_model(ctx, &t, j->how);
    optim = make_optim(&t);
    pipeline = make_pipeline(&t);
    CHECK(pipeline, "pipeline");
    if (j->how->apart) {
        const setup first = {.m = j->how->m};
        const model alone = {&first, ctx, t.net, t.first};
        const tsh_backward_desc how = {
            .defer = 1, .summed = 1, .weight = weight_of(&alone, t.first)};
        tsh_tensor *y = call(t.net, "table", tokens(&alone, t.first, 0));
        y = loss_by(&alone, tsh_forward(tsh_find(t.net, "h"), y), t.first, TSH_REDUCE_SUM);
        CHECK(tsh_backward_with(ctx, y, &how) == TSH_OK, "before");
        (void)tsh_step_end(ctx);
    }
    CHECK(tsh_pipeline_train(pipeline, &got.loss) == TSH_OK, "train");
    if (!j->how->zero) tsh_each_param(t.net, params_keep_gradient, &got.params);
    finish(&t, optim, &got);
    CHECK(tsh_pipeline_evaluate(pipeline, 0, &got.evaluated) == TSH_OK, "evaluate");
    CHECK_OK();
    failed = compare(ctx, j, &got);
    params_free(&got.params);
    return failed;
}

static void prove(const setup *how) {
    const tsh_desc desc = {.tp = how->tp, .pp = how->pp, .seed = 3}, one = {.seed = 3};
    outcome want;
    job j = {how, &want};
    memset(&want, 0, sizeof want);
    ranks_run_at(RANKS_EACH, 1, &one, whole_batch, &j);
    ranks_run_with(how->tp * how->pp * how->dp, &desc, dealt_batch, &j);
    params_free(&want.params);
}

static void the_mean_is_exact_for_any_dealing(void **state) {
    static const setup rows[] = {
        {.tp = 1, .pp = 1, .dp = 1, .m = 3},
        {.tp = 1, .pp = 1, .dp = 4, .m = 3}, /* the last replica has no rows */
        {.tp = 1, .pp = 2, .dp = 1, .m = 3},
        {.tp = 1, .pp = 2, .dp = 1, .m = 16, .tied = 1}, /* more than there are rows */
        {.tp = 1, .pp = 3, .dp = 1, .m = 4, .schedule = TSH_PIPELINE_GPIPE},
        {.tp = 1, .pp = 2, .dp = 2, .m = 2, .tied = 1},
        {.tp = 1, .pp = 2, .dp = 3, .m = 2, .tied = 1, .zero = 1},
        {.tp = 1, .pp = 4, .dp = 2, .m = 4},
        {.tp = 2, .pp = 2, .dp = 2, .m = 3, .tied = 1},
        {.tp = 2, .pp = 2, .dp = 2, .m = 2, .tied = 1, .zero = 1},
        {.tp = 3, .pp = 2, .dp = 1, .m = 2, .tied = 1},
        {.tp = 1, .pp = 1, .dp = 1, .m = 2, .apart = 1},
        {.tp = 1, .pp = 1, .dp = 2, .m = 3, .apart = 1},
    };
    int i;
    (void)state;
    for (i = 0; i < COUNT(rows); i++) prove(&rows[i]);
}

/* ------------------------------------------------------------------ nothing, and worse */

static int counts_nothing(tsh_ctx *ctx, void *user) {
    const setup *how = (const setup *)user;
    double loss, norm = -1;
    model t;
    make_model(ctx, &t, how);
    CHECK(tsh_pipeline_train(make_pipeline(&t), &loss) == TSH_OK, "train");
    CHECK(!(fabs(loss) > 0), "loss %g", loss);
    CHECK(tsh_clip_grad_norm(t.net, 1, &norm) == TSH_OK && !(fabs(norm) > 0), "norm %g", norm);
    return 0;
}

static void a_batch_without_elements_gives_zeros(void **state) {
    static const setup how = {.tp = 1, .pp = 2, .dp = 2, .m = 2, .tied = 1, .nothing = 1};
    const tsh_desc desc = {.tp = how.tp, .pp = how.pp};
    setup copy = how;
    (void)state;
    ranks_run_with(4, &desc, counts_nothing, &copy);
}

enum { BAD_SIGN, BAD_NAN, BAD_LARGE, BAD_ALONE, BADS };

static int bad_now;

static double bad_weight(tsh_ctx *ctx, int k, void *user) {
    static const double weights[BADS] = {-1, (double)NAN, (double)INFINITY, 1};
    (void)ctx, (void)user;
    return k == 1 ? weights[bad_now] : 1;
}

/* Of the last stage, or on one rank alone: an error on all. */
static int weighs_badly(tsh_ctx *ctx, void *user) {
    const setup *how = (const setup *)user;
    const int alone = bad_now == BAD_ALONE;
    tsh_pipeline_desc desc = {
        .micro_batches = 3, .input = input, .loss = sum_of_losses, .weight = bad_weight};
    const char *message = tsh_last_error(ctx)->message;
    tsh_pipeline *pipeline;
    double loss = 0;
    model t;
    make_model(ctx, &t, how);
    desc.user = &t;
    if (alone && tsh_world(ctx)->rank > 0) desc.weight = NULL;
    pipeline = tsh_pipeline_new(tsh_find(t.net, "h"), &desc);
    (void)tsh_barrier(tsh_world(ctx)); /* nobody fails before the others have one */
    CHECK((pipeline == NULL) == alone, "a pipeline");
    if (pipeline && how->apart) CHECK(tsh_pipeline_evaluate(pipeline, 0, &loss) != TSH_OK, "no");
    if (pipeline && !how->apart) CHECK(tsh_pipeline_train(pipeline, &loss) != TSH_OK, "no");
    CHECK(!pipeline || loss != loss, "no loss");
    CHECK(tsh_last_error(ctx)->code == TSH_ERR_ARGUMENT, "%s", message);
    CHECK(strstr(message, alone ? "ranks differ in their" : "the weight of micro-batch 1 is "),
          "%s", message);
    (void)tsh_step_end(ctx);
    CHECK(tsh_mem_stats(ctx).step_live == 0, "%zu bytes are left", tsh_mem_stats(ctx).step_live);
    return 0;
}

static void weights_that_cannot_be_are_one_error(void **state) {
    setup how = {.tp = 1, .pp = 2, .dp = 2, .m = 3, .tied = 1};
    const tsh_desc desc = {.tp = 1, .pp = 2};
    (void)state;
    for (bad_now = 0; bad_now < BADS; bad_now++)
        for (how.apart = 0; how.apart < 2; how.apart++)
            ranks_run_with(4, &desc, weighs_badly, &how);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_mean_is_exact_for_any_dealing),
        cmocka_unit_test(a_batch_without_elements_gives_zeros),
        cmocka_unit_test(weights_that_cannot_be_are_one_error),
    };
    return cmocka_run_group_tests_name("layer/uneven", tests, NULL, NULL);
}
