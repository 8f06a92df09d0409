/* tsh_pipeline: layers dealt to stages give the losses, gradients and weights of one rank, bit for
 * bit where no parameter is tied across stages; memory and time are those of the schedule. */
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../support/small_gpt.h"
#include <time.h>

enum { STEPS = 3, LAYERS = 5, PARAMS = 96 };

/* --------------------------------------------- a GPT, on stages and without them */

typedef struct setup {
    int tp, pp, dp, m;
    const int *counts; /* of LAYERS layers */
    tsh_pipeline_schedule schedule;
    int tied, sequence, dropout, checkpoint;
    double clip;
} setup;

typedef struct model {
    tsh_module *gpt;
    tsh_tensor *ids, *targets; /* (B, T) of every micro-batch, one after the other */
    int m;
} model;

typedef struct outcome {
    double loss[STEPS], norm[STEPS], evaluated;
    int count;
    const char *path[PARAMS];
    char text[PARAMS][TSH_PATH_SIZE];
    capture gradient[PARAMS], value[PARAMS]; /* of the first step; at the end */
} outcome;

typedef struct job {
    const setup *how;
    outcome *want; /* written without a pipeline, compared to with one */
    int pipeline;
    double tolerance; /* 0: the same bits */
} job;

static const tsh_layout whole = {TSH_REPLICATED, 0, 0, {{0, 0}}};
static const tsh_layout places = {TSH_SHARDED, 0, 1, {{0, 1}}};
static const tsh_layout along = {TSH_SHARDED, 1, 1, {{0, 1}}};
static const tsh_plan_rule sequence_plan[] = {
    {.path = "wte", .style = TSH_ROWWISE, .output = &along},
    {.path = "wpe", .style = TSH_PLAIN, .output = &places},
    {.path = "drop", .style = TSH_SEQUENCE},
    {.path = "h.*.ln_?", .style = TSH_SEQUENCE},
    {.path = "h.*.attn.c_attn",
     .style = TSH_COLWISE,
     .segments = 3,
     .unit = GPT_WIDTH / GPT_HEADS,
     .input = &along,
     .regather = 1},
    {.path = "h.*.attn.c_proj",
     .style = TSH_ROWWISE,
     .unit = GPT_WIDTH / GPT_HEADS,
     .output = &along},
    {.path = "h.*.attn.dropout", .style = TSH_SEQUENCE},
    {.path = "h.*.mlp.c_fc", .style = TSH_COLWISE, .input = &along, .regather = 1},
    {.path = "h.*.mlp.c_proj", .style = TSH_ROWWISE, .output = &along},
    {.path = "ln_f", .style = TSH_SEQUENCE, .output = &whole},
    {.path = "lm_head", .style = TSH_COLWISE},
};

static tsh_tensor *first_input(tsh_ctx *ctx, int k, void *user) {
    const model *t = (const model *)user;
    tsh_tensor *place = tsh_arange(ctx, TSH_I32, 0, GPT_CONTEXT, 1);
    tsh_tensor *ids = tsh_slice(t->ids, 0, k * GPT_BATCH, GPT_BATCH);
    return gpt_call(t->gpt, "drop",
                    tsh_add(gpt_call(t->gpt, "wte", ids), gpt_call(t->gpt, "wpe", place)));
}

static tsh_tensor *last_loss(tsh_ctx *ctx, tsh_tensor *y, int k, void *user) {
    const model *t = (const model *)user;
    (void)ctx;
    return tsh_cross_entropy(gpt_call(t->gpt, "lm_head", gpt_call(t->gpt, "ln_f", y)),
                             tsh_slice(t->targets, 0, k * GPT_BATCH, GPT_BATCH), NULL);
}

/* As gpt_add, with LAYERS layers and a head that may be of its own. */
static void make_model(tsh_ctx *ctx, model *t, const setup *how, int m) {
    const tsh_linear_desc head = {.in = GPT_WIDTH, .out = GPT_VOCABULARY, .no_bias = 1};
    const tsh_embedding_desc wte = {.count = GPT_VOCABULARY, .dim = GPT_WIDTH};
    const tsh_embedding_desc wpe = {.count = GPT_CONTEXT, .dim = GPT_WIDTH};
    const tsh_layer_norm_desc norm = {.dim = GPT_WIDTH};
    const tsh_shape shape = tsh_shape2((int64_t)m * GPT_BATCH, GPT_CONTEXT);
    tsh_module *h;
    int i;
    t->gpt = tsh_root(ctx);
    t->m = m;
    (void)tsh_add_embedding(t->gpt, "wte", &wte);
    (void)tsh_add_embedding(t->gpt, "wpe", &wpe);
    (void)tsh_add_dropout(t->gpt, "drop", gpt_dropout);
    h = tsh_add_module(t->gpt, "h", NULL);
    for (i = 0; i < LAYERS; i++) gpt_add_block(h, i);
    for (i = 0; i < LAYERS; i += 2) tsh_checkpoint(tsh_child(h, i), how->checkpoint);
    (void)tsh_add_layer_norm(t->gpt, "ln_f", &norm);
    (void)tsh_add_linear(t->gpt, "lm_head", &head);
    if (how->tied)
        (void)tsh_tie(tsh_find(t->gpt, "lm_head"), "weight", tsh_param(t->gpt, "wte.weight"));
    (void)tsh_parallelize(t->gpt, how->sequence ? sequence_plan : gpt_plan,
                          how->sequence ? COUNT(sequence_plan) : GPT_RULES);
    tsh_train(t->gpt, how->dropout);
    t->ids = tsh_tensor_new(ctx, TSH_I32, shape, NULL);
    t->targets = tsh_tensor_new(ctx, TSH_I32, shape, NULL);
}

/* Micro-batches [first, first + m) of a step, from gpt_load. */
static void load(tsh_ctx *ctx, model *t, int first) {
    tsh_tensor *x = tsh_tensor_new(ctx, TSH_I32, tsh_shape2(GPT_BATCH, GPT_CONTEXT), NULL);
    tsh_tensor *y = tsh_tensor_new(ctx, TSH_I32, tsh_shape2(GPT_BATCH, GPT_CONTEXT), NULL);
    int32_t *ids = (int32_t *)tsh_data(ctx, t->ids);
    int32_t *targets = (int32_t *)tsh_data(ctx, t->targets);
    const size_t n = GPT_BATCH * GPT_CONTEXT;
    int k;
    for (k = 0; ids && targets && k < t->m; k++) {
        gpt_load(ctx, x, y, first + k);
        memcpy(ids + (size_t)k * n, tsh_data(ctx, x), n * sizeof *ids);
        memcpy(targets + (size_t)k * n, tsh_data(ctx, y), n * sizeof *targets);
    }
    tsh_tensor_free(x);
    tsh_tensor_free(y);
}

/* What tsh_pipeline_train promises to equal, said by other functions. */
static double plain_train(tsh_ctx *ctx, model *t) {
    const tsh_backward_desc defer = {.defer = 1};
    double sum = 0;
    int k, i;
    for (k = 0; k < t->m; k++) {
        tsh_tensor *x = first_input(ctx, k, t), *loss;
        for (i = 0; i < LAYERS; i++) x = tsh_forward(tsh_child(tsh_find(t->gpt, "h"), i), x);
        loss = last_loss(ctx, x, k, t);
        sum += tsh_item(ctx, loss);
        (void)tsh_backward_with(ctx, tsh_scale(loss, 1.0 / t->m), &defer);
        (void)tsh_step_end(ctx);
    }
    (void)tsh_sync_grads(ctx);
    return sum / t->m;
}

static double plain_evaluate(tsh_ctx *ctx, model *t) {
    double sum = 0;
    int k;
    tsh_no_grad_begin(ctx);
    for (k = 0; k < t->m; k++) {
        tsh_tensor *x = tsh_forward(tsh_find(t->gpt, "h"), first_input(ctx, k, t));
        sum += tsh_item(ctx, last_loss(ctx, x, k, t));
        (void)tsh_step_end(ctx);
    }
    tsh_no_grad_end(ctx);
    return sum / t->m;
}

static void keep_gradient(const char *path, tsh_tensor *param, void *user) {
    outcome *o = (outcome *)user;
    (void)snprintf(o->text[o->count], TSH_PATH_SIZE, "%s", path);
    (void)capture_add(tsh_ctx_of(param), &o->gradient[o->count++], tsh_grad(param));
}

static void keep_value(const char *path, tsh_tensor *param, void *user) {
    outcome *o = (outcome *)user;
    int i = 0;
    while (i < o->count && strcmp(o->text[i], path) != 0) i++;
    if (i < o->count) (void)capture_add(tsh_ctx_of(param), &o->value[i], param);
}

static void free_outcome(outcome *o) {
    int i;
    for (i = 0; i < o->count; i++) {
        capture_free(&o->gradient[i]);
        capture_free(&o->value[i]);
    }
    free(o);
}

static int near(double a, double b, double tolerance) {
    return a == b || fabs(a - b) <= tolerance * fmax(1, fabs(a));
}

/* What this rank holds against what there is without a pipeline. */
static int compare(tsh_ctx *ctx, const job *j, const outcome *got) {
    const outcome *want = j->want;
    const double rounding = j->tolerance > 0 ? j->tolerance : 1e-12; /* the norm's sum of stages */
    int i, w, step;
    for (step = 0; step < STEPS; step++) {
        CHECK(near(want->loss[step], got->loss[step], j->tolerance), "step %d: loss %.9g, not %.9g",
              step, got->loss[step], want->loss[step]);
        CHECK(near(want->norm[step], got->norm[step], rounding), "step %d: norm %.17g, not %.17g",
              step, got->norm[step], want->norm[step]);
    }
    CHECK(near(want->evaluated, got->evaluated, j->tolerance), "evaluated: %.9g, not %.9g",
          got->evaluated, want->evaluated);
    for (i = 0; i < got->count; i++) {
        for (w = 0; w < want->count && strcmp(want->text[w], got->text[i]) != 0;) w++;
        CHECK(w < want->count, "%s is no parameter", got->text[i]);
        if (capture_compare(ctx, got->text[i], &want->gradient[w], &got->gradient[i], j->tolerance))
            return 1;
        /* Adam's first steps are near lr whatever the gradient's size */
        if (capture_compare(ctx, got->text[i], &want->value[w], &got->value[i],
                            j->tolerance > 0 ? 0.02 : 0))
            return 1;
    }
    return 0;
}

static tsh_pipeline *make_pipeline(model *t, const setup *how) {
    const tsh_pipeline_desc desc = {.micro_batches = t->m,
                                    .counts = how->counts,
                                    .schedule = how->schedule,
                                    .input = first_input,
                                    .loss = last_loss,
                                    .user = t};
    return tsh_pipeline_new(tsh_find(t->gpt, "h"), &desc);
}

static int train(tsh_ctx *ctx, void *user) {
    const job *j = (const job *)user;
    const setup *how = j->how;
    const tsh_optim_desc adamw = {.kind = TSH_ADAMW, .lr = 0.01, .clip_norm = how->clip};
    outcome *o = j->pipeline || tsh_world(ctx)->rank > 0 ? (outcome *)calloc(1, sizeof *o)
                                                         : j->want;
    const int m = j->pipeline ? how->m : how->m * how->dp;
    tsh_pipeline *pipeline = NULL;
    tsh_optim *optim;
    model t;
    int step, failed = 0;
    make_model(ctx, &t, how, m);
    if (j->pipeline) pipeline = make_pipeline(&t, how);
    optim = tsh_optim_new(t.gpt, &adamw);
    for (step = 0; step < STEPS; step++) {
        load(ctx, &t, step * how->m * how->dp + (j->pipeline ? tsh_dp(ctx)->rank * m : 0));
        if (pipeline)
            (void)tsh_pipeline_train(pipeline, &o->loss[step]);
        else
            o->loss[step] = plain_train(ctx, &t);
        if (tsh_dp(ctx)->size > 1)
            (void)tsh_allreduce(tsh_dp(ctx), &o->loss[step], 1, TSH_F64, TSH_AVG);
        if (step == 0) tsh_each_param(t.gpt, keep_gradient, o);
        (void)tsh_optim_step(optim);
        o->norm[step] = tsh_optim_state(optim).norm;
        tsh_zero_grads(t.gpt);
        (void)tsh_step_end(ctx);
        CHECK_OK();
    }
    tsh_train(t.gpt, 0);
    if (pipeline)
        (void)tsh_pipeline_evaluate(pipeline, 0, &o->evaluated);
    else
        o->evaluated = plain_evaluate(ctx, &t);
    if (tsh_dp(ctx)->size > 1) (void)tsh_allreduce(tsh_dp(ctx), &o->evaluated, 1, TSH_F64, TSH_AVG);
    tsh_each_param(t.gpt, keep_value, o);
    CHECK_OK();
    CHECK(tsh_mem_stats(ctx).step_live == 0, "%zu bytes are left", tsh_mem_stats(ctx).step_live);
    if (j->pipeline) failed = compare(ctx, j, o);
    if (o != j->want) free_outcome(o);
    return failed;
}

static void prove(const setup *how, double tolerance) {
    const tsh_desc plain = {.tp = how->tp, .seed = 3},
                   staged = {.tp = how->tp, .pp = how->pp, .seed = 3};
    outcome *want = (outcome *)calloc(1, sizeof *want);
    job j = {how, want, 0, tolerance};
    ranks_run_with(how->tp, &plain, train, &j);
    j.pipeline = 1;
    ranks_run_with(how->tp * how->pp * how->dp, &staged, train, &j);
    free_outcome(want);
}

/* Nothing is tied, so every sum has the same terms in the same order as on one rank. */
static void stages_give_the_same_bits(void **state) {
    static const int two[] = {1, 4}, three[] = {2, 2, 1}, four[] = {1, 2, 1, 1}, five[] = {5};
    static const int batches[] = {1, 2, 4, 7};
    static const int *const counts[] = {five, two, three, four};
    int pp, i, s;
    (void)state;
    for (pp = 1; pp <= 4; pp++)
        for (i = 0; i < COUNT(batches); i++)
            for (s = 0; s < 2; s++) {
                const setup how = {.tp = 1,
                                   .pp = pp,
                                   .dp = 1,
                                   .m = batches[i],
                                   .counts = counts[pp - 1],
                                   .schedule = s ? TSH_PIPELINE_GPIPE : TSH_PIPELINE_1F1B,
                                   .dropout = 1,
                                   .checkpoint = i % 2};
                prove(&how, 0);
            }
}

/* The same with sharded layers, against tensor parallelism alone. */
static void stages_of_sharded_layers_give_the_same_bits(void **state) {
    static const int two[] = {3, 2}, three[] = {1, 3, 1};
    static const setup rows[] = {
        {.tp = 2, .pp = 2, .dp = 1, .m = 4, .counts = two, .dropout = 1},
        {.tp = 2, .pp = 3, .dp = 1, .m = 3, .counts = three, .sequence = 1, .dropout = 1},
        {.tp = 3, .pp = 2, .dp = 1, .m = 3, .counts = two, .dropout = 1, .checkpoint = 1},
        {.tp = 4,
         .pp = 2,
         .dp = 1,
         .m = 2,
         .counts = two,
         .schedule = TSH_PIPELINE_GPIPE,
         .dropout = 1},
    };
    int i;
    (void)state;
    for (i = 0; i < COUNT(rows); i++) prove(&rows[i], 0);
}

/* A tied weight's gradient is summed by stage, not by micro-batch; replicas divide theirs; the norm
 * that clips is summed by stage; three ranks of tp add partial gradients in an order that depends on
 * how many there are: other orders, so other last bits. */
static void ties_and_replicas_give_the_same_numbers(void **state) {
    static const int two[] = {2, 3}, three[] = {1, 2, 2}, four[] = {1, 1, 2, 1};
    static const setup rows[] = {
        {.tp = 1, .pp = 2, .dp = 1, .m = 3, .counts = two, .tied = 1, .dropout = 1, .clip = 0.5},
        {.tp = 1, .pp = 3, .dp = 1, .m = 4, .counts = three, .tied = 1, .clip = 0.5},
        {.tp = 1, .pp = 4, .dp = 1, .m = 7, .counts = four, .tied = 1, .clip = 1},
        {.tp = 1, .pp = 2, .dp = 2, .m = 2, .counts = two, .clip = 0.5},
        {.tp = 3, .pp = 2, .dp = 1, .m = 3, .counts = two, .sequence = 1, .checkpoint = 1},
        {.tp = 2, .pp = 2, .dp = 2, .m = 4, .counts = two, .tied = 1, .clip = 0.5},
        {.tp = 2, .pp = 2, .dp = 2, .m = 3, .counts = two, .tied = 1, .sequence = 1, .clip = 0.5},
        {.tp = 2,
         .pp = 2,
         .dp = 2,
         .m = 3,
         .counts = two,
         .schedule = TSH_PIPELINE_GPIPE,
         .tied = 1,
         .checkpoint = 1,
         .clip = 0.5},
    };
    int i;
    (void)state;
    for (i = 0; i < COUNT(rows); i++) prove(&rows[i], 1e-5);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stages_give_the_same_bits),
        cmocka_unit_test(stages_of_sharded_layers_give_the_same_bits),
        cmocka_unit_test(ties_and_replicas_give_the_same_numbers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
