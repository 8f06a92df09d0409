/* tsh_pipeline: layers dealt to stages give the losses, gradients and weights of one rank, bit for
 * bit where no parameter is tied across stages; memory and time are those of the schedule. */
/* run: alone */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../support/small_gpt.h"
#include "../support/files.h"
#include <time.h>

enum { STEPS = 3, LAYERS = 5 };

/* --------------------------------------------- a GPT, on stages and without them */

typedef struct setup {
    int tp, pp, dp, m;
    const int *counts; /* of LAYERS layers */
    tsh_pipeline_schedule schedule;
    int tied, sequence, dropout, checkpoint, sparse; /* sparse: the embedding's gradient */
    double clip;
    int half; /* 1: bf16, with exact weights; 2: gradients and moments, too */
} setup;

typedef struct model {
    tsh_module *gpt;
    tsh_tensor *ids, *targets; /* (B, T) of every micro-batch, one after the other */
    int m;
} model;

typedef struct outcome {
    double loss[STEPS], norm[STEPS], evaluated;
    kept_params params; /* gradients of the first step; values at the end */
} outcome;

typedef struct job {
    const setup *how;
    outcome *want; /* written without a pipeline, compared to with one */
    int pipeline;
    double tolerance; /* 0: the same bits */
} job;

static tsh_tensor *first_input(tsh_ctx *ctx, int k, void *user) {
    const model *t = (const model *)user;
    tsh_tensor *place = tsh_arange(ctx, TSH_I32, 0, GPT_CONTEXT, 1);
    tsh_tensor *ids = tsh_slice(t->ids, 0, k * GPT_BATCH, GPT_BATCH);
    return gpt_call(t->gpt, "drop",
                    tsh_add(gpt_call(t->gpt, "wte", ids), gpt_call(t->gpt, "wpe", place)));
}

static tsh_tensor *last_loss(tsh_ctx *ctx, tsh_tensor *y, int k, void *user) {
    const model *t = (const model *)user;
    tsh_tensor *targets = tsh_slice(t->targets, 0, k * GPT_BATCH, GPT_BATCH);
    (void)ctx;
    y = gpt_call(t->gpt, "lm_head", gpt_call(t->gpt, "ln_f", y));
    if (tsh_layout_of(y).dim == 1) targets = tsh_redistribute(targets, gpt_along);
    return tsh_full_tensor(tsh_cross_entropy(y, targets, NULL));
}

enum { WHOLE_HEAD = 2 };

/* The plan that a setup asks for. WHOLE_HEAD: embedding and head are not cut, so that the head's
 * gradient, of a piece of the sequence, is partial. */
static void shard(tsh_module *gpt, int sequence) {
    tsh_plan_rule plan[GPT_SEQUENCE_RULES];
    int n = GPT_SEQUENCE_RULES;
    memcpy(plan, gpt_sequence_plan, sizeof plan);
    if (sequence == WHOLE_HEAD) {
        plan[0].style = TSH_PLAIN;
        plan[--n - 1].output = NULL;
    }
    (void)tsh_parallelize(gpt, sequence ? plan : gpt_plan, sequence ? n : GPT_RULES);
}

static void make_model(tsh_ctx *ctx, model *t, const setup *how, int m) {
    const gpt_form form = {.layers = LAYERS, .own_head = !how->tied, .sparse = how->sparse};
    const tsh_shape shape = tsh_shape2((int64_t)m * GPT_BATCH, GPT_CONTEXT);
    int i;
    t->gpt = gpt_add_form(ctx, &form);
    t->m = m;
    for (i = 0; i < LAYERS; i += 2)
        tsh_checkpoint(tsh_child(tsh_find(t->gpt, "h"), i), how->checkpoint);
    shard(t->gpt, how->sequence);
    tsh_train(t->gpt, how->dropout);
    t->ids = tsh_tensor_new(ctx, TSH_I32, shape, tsh_replicated());
    t->targets = tsh_tensor_new(ctx, TSH_I32, shape, tsh_replicated());
}

/* Micro-batches [first, first + m) of a step, from gpt_load. */
static void load(tsh_ctx *ctx, model *t, int first) {
    tsh_tensor *x = tsh_tensor_new(ctx, TSH_I32, tsh_shape2(GPT_BATCH, GPT_CONTEXT),
                                   tsh_replicated());
    tsh_tensor *y = tsh_tensor_new(ctx, TSH_I32, tsh_shape2(GPT_BATCH, GPT_CONTEXT),
                                   tsh_replicated());
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

static void free_outcome(outcome *o) {
    params_free(&o->params);
    free(o);
}

static int near(double a, double b, double tolerance) {
    return a == b || fabs(a - b) <= tolerance * fmax(1, fabs(a));
}

/* What this rank holds against what there is without a pipeline. */
static int compare(tsh_ctx *ctx, const job *j, const outcome *got) {
    const outcome *want = j->want;
    const double rounding = j->tolerance > 0 ? j->tolerance : 1e-12; /* the norm's sum of stages */
    int step;
    for (step = 0; step < STEPS; step++) {
        CHECK(near(want->loss[step], got->loss[step], j->tolerance), "step %d: loss %.9g, not %.9g",
              step, got->loss[step], want->loss[step]);
        CHECK(near(want->norm[step], got->norm[step], rounding), "step %d: norm %.17g, not %.17g",
              step, got->norm[step], want->norm[step]);
    }
    CHECK(near(want->evaluated, got->evaluated, j->tolerance), "evaluated: %.9g, not %.9g",
          got->evaluated, want->evaluated);
    /* Adam's first steps are near lr whatever the gradient's size */
    return params_compare(ctx, &want->params, &got->params, j->tolerance,
                          j->tolerance > 0 ? 0.02 : 0);
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
    const tsh_dtype kept = how->half > 1 ? TSH_BF16 : TSH_DTYPE_DEFAULT;
    const tsh_optim_desc adamw = {.kind = TSH_ADAMW,
                                  .lr = 0.01,
                                  .clip_norm = how->clip,
                                  .grad_dtype = kept,
                                  .moments_dtype = kept};
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
        if (step == 0) tsh_each_param(t.gpt, params_keep_gradient, &o->params);
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
    tsh_each_param(t.gpt, params_keep_value, &o->params);
    CHECK_OK();
    CHECK(tsh_mem_stats(ctx).step_live == 0, "%zu bytes are left", tsh_mem_stats(ctx).step_live);
    if (j->pipeline) failed = compare(ctx, j, o);
    if (o != j->want) free_outcome(o);
    return failed;
}

static void prove(const setup *how, double tolerance) {
    const tsh_dtype dtype = how->half ? TSH_BF16 : TSH_DTYPE_DEFAULT;
    const tsh_desc plain = {.tp = how->tp, .seed = 3, .dtype = dtype},
                   staged = {.tp = how->tp, .pp = how->pp, .seed = 3, .dtype = dtype};
    outcome *want = (outcome *)calloc(1, sizeof *want);
    job j = {how, want, 0, tolerance};
    ranks_run_at(RANKS_EACH, how->tp, &plain, train, &j);
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
        {.tp = 1, .pp = 3, .dp = 1, .m = 3, .counts = three, .half = 1, .dropout = 1},
        {.tp = 2, .pp = 2, .dp = 1, .m = 4, .counts = two, .half = 1, .sequence = 1},
        {.tp = 3, .pp = 2, .dp = 1, .m = 2, .counts = two, .half = 1, .checkpoint = 1},
        {.tp = 2, .pp = 2, .dp = 1, .m = 3, .counts = two, .half = 2, .checkpoint = 1},
    };
    int i;
    (void)state;
    for (i = 0; i < COUNT(rows); i++) prove(&rows[i], 0);
}

/* A tied weight's gradient is summed by stage, not by micro-batch; replicas divide theirs; the norm
 * that clips is summed by stage; three ranks of tp add partial gradients in an order that depends
 * on how many there are: other orders, so other last bits. */
static void ties_and_replicas_give_the_same_numbers(void **state) {
    static const int two[] = {2, 3}, three[] = {1, 2, 2}, four[] = {1, 1, 2, 1};
    static const setup rows[] = {
        {.tp = 1, .pp = 2, .dp = 1, .m = 3, .counts = two, .tied = 1, .dropout = 1, .clip = 0.5},
        {.tp = 1, .pp = 3, .dp = 1, .m = 4, .counts = three, .tied = 1, .clip = 0.5},
        {.tp = 1, .pp = 2, .dp = 1, .m = 2, .counts = two, .tied = 1, .sparse = 1},
        {.tp = 2, .pp = 2, .dp = 2, .m = 2, .counts = two, .sparse = 1},
        {.tp = 2, .pp = 2, .dp = 1, .m = 2, .counts = two, .tied = 1, .sequence = WHOLE_HEAD},
        {.tp = 1, .pp = 4, .dp = 1, .m = 7, .counts = four, .tied = 1, .clip = 1},
        {.tp = 3, .pp = 2, .dp = 1, .m = 2, .counts = two, .tied = 1, .sequence = WHOLE_HEAD},
        {.tp = 4, .pp = 2, .dp = 1, .m = 3, .counts = two, .tied = 1, .sequence = WHOLE_HEAD},
        {.tp = 2, .pp = 2, .dp = 2, .m = 2, .counts = two, .tied = 1, .sequence = WHOLE_HEAD},
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

/* ------------------------------------------------------------ what a stage holds */

typedef struct holding {
    char paths[1024];
    size_t bytes;
} holding;

static void hold(const char *path, tsh_tensor *param, void *user) {
    holding *h = (holding *)user;
    const size_t used = strlen(h->paths);
    (void)snprintf(h->paths + used, sizeof h->paths - used, "%s ", path);
    h->bytes += (size_t)tsh_local_numel(param) * sizeof(tsh_real);
}

static int holds_its_own(tsh_ctx *ctx, void *user) {
    static const int counts[] = {1, 2, 2};
    static const char *const marks[3][2] = {
        {"wte.weight ", "h.0."}, {"h.1.", "h.2."}, {"wte.weight ", "ln_f."}};
    const setup how = {.m = 2, .counts = counts, .tied = 1};
    const int stage = tsh_pp(ctx)->rank;
    holding h = {"", 0};
    static const char *const names[] = {"summary 0", "summary 1", "summary 2"};
    files_bytes text;
    size_t blocks = 0, i;
    FILE *file;
    model t;
    make_model(ctx, &t, &how, how.m);
    if (*(const int *)user) (void)tsh_materialize(t.gpt); /* then the others' are given back */
    CHECK(make_pipeline(&t, &how), "pipeline");
    CHECK(tsh_materialize(t.gpt) == TSH_OK, "materialize");
    tsh_each_param(t.gpt, hold, &h);
    for (i = 0; h.paths[i]; i++) blocks += h.paths[i] == ' ';
    CHECK(strstr(h.paths, marks[stage][0]) && strstr(h.paths, marks[stage][1]), "%s", h.paths);
    CHECK((strstr(h.paths, "h.1.") != NULL) == (stage == 1), "%s", h.paths);
    CHECK((strstr(h.paths, "h.4.") != NULL) == (stage == 2), "%s", h.paths);
    CHECK(tsh_mem_stats(ctx).now[TSH_MEM_PARAMETERS] >= h.bytes &&
              tsh_mem_stats(ctx).now[TSH_MEM_PARAMETERS] <= h.bytes + 128 * blocks,
          "%zu bytes of parameters, %zu expected", tsh_mem_stats(ctx).now[TSH_MEM_PARAMETERS],
          h.bytes);
    file = fopen(files_path(names[stage]), "wb");
    CHECK(file && tsh_summary(t.gpt, file) == TSH_OK && fclose(file) == 0, "summary");
    text = files_read(names[stage]);
    (void)remove(files_path(names[stage]));
    CHECK((strstr(text.at, "on stage 1\n") != NULL) == (stage != 1), "%s", text.at);
    files_free(&text);
    CHECK(tsh_init_zeros(tsh_param(t.gpt, "h.1.ln_1.weight"), NULL) == TSH_OK, "nothing elsewhere");
    (void)tsh_barrier(tsh_world(ctx)); /* an error ends the world */
    if (stage == 1) return 0;
    CHECK(!tsh_forward(tsh_find(t.gpt, "h.1.ln_1"), tsh_zeros(ctx, tsh_shape2(1, GPT_WIDTH))),
          "another stage's layer");
    CHECK(strstr(tsh_last_error(ctx)->message, "\"h.1.ln_1.weight\" is held by stage 1"), "");
    return 0;
}

static void a_rank_holds_its_own_stage(void **state) {
    const tsh_desc desc = {.tp = 1, .pp = 3};
    int before;
    (void)state;
    for (before = 0; before < 2; before++) ranks_run_with(3, &desc, holds_its_own, &before);
}

/* ------------------------------------------------- memory of activations, and calls */

enum { STAGES = 4 };

typedef struct usage {
    tsh_pipeline_schedule schedule;
    int m;
    size_t peak[STAGES];
} usage;

static int measure(tsh_ctx *ctx, void *user) {
    static const int counts[STAGES] = {1, 1, 1, 2};
    usage *u = (usage *)user;
    const setup how = {.m = u->m, .counts = counts, .schedule = u->schedule, .dropout = 1};
    uint64_t calls = 0;
    tsh_pipeline *pipeline;
    double loss;
    model t;
    int step;
    make_model(ctx, &t, &how, how.m);
    pipeline = make_pipeline(&t, &how);
    for (step = 0; step < 8; step++) {
        if (step == 3) calls = tsh_mem_stats(ctx).calls;
        (void)tsh_pipeline_train(pipeline, &loss);
        tsh_zero_grads(t.gpt);
        (void)tsh_step_end(ctx);
        (void)tsh_pipeline_evaluate(pipeline, 3, &loss);
        CHECK_OK();
    }
    CHECK(tsh_mem_stats(ctx).calls == calls, "%lu calls of the allocator in 5 steps",
          (unsigned long)(tsh_mem_stats(ctx).calls - calls));
    u->peak[tsh_pp(ctx)->rank] = tsh_mem_stats(ctx).step_live_peak;
    return 0;
}

static void activations_are_bounded_by_the_stages(void **state) {
    static const int batches[] = {4, 8, 16};
    const tsh_desc desc = {.tp = 1, .pp = STAGES};
    usage u[2][COUNT(batches)];
    int i, s, kind;
    (void)state;
    for (kind = 0; kind < 2; kind++)
        for (i = 0; i < COUNT(batches); i++) {
            u[kind][i].schedule = kind ? TSH_PIPELINE_GPIPE : TSH_PIPELINE_1F1B;
            u[kind][i].m = batches[i];
            ranks_run_with(STAGES, &desc, measure, &u[kind][i]);
            ranks_share(STAGES, u[kind][i].peak, sizeof u[kind][i].peak[0]);
        }
    for (s = 0; s < STAGES; s++) {
        /* beside what backward needs, messages that a neighbour has not taken yet */
        const size_t message = GPT_BATCH * GPT_CONTEXT * GPT_WIDTH * sizeof(tsh_real) + 320;
        const size_t slack = STAGES * 2 * message, one = u[1][0].peak[s] / 4;
        for (i = 1; i < COUNT(batches); i++)
            if (u[0][i].peak[s] > u[0][0].peak[s] + slack)
                fail_msg("1F1B, stage %d: %zu bytes with %d micro-batches, %zu with 4", s,
                         u[0][i].peak[s], batches[i], u[0][0].peak[s]);
        if (u[1][2].peak[s] < 3 * u[1][0].peak[s]) /* the test sees what it looks for */
            fail_msg("GPipe, stage %d: %zu bytes with 16, %zu with 4", s, u[1][2].peak[s],
                     u[1][0].peak[s]);
        if (u[0][2].peak[s] > (size_t)(STAGES - s) * one + one / 2 + slack)
            fail_msg("1F1B, stage %d: %zu bytes, GPipe takes %zu per micro-batch", s,
                     u[0][2].peak[s], one);
    }
}

/* A layer whose backward needs its input, and ten ops whose backward needs nothing. */
static tsh_tensor *long_way(tsh_module *self, tsh_tensor **in, int n, void *user) {
    tsh_tensor *x = tsh_forward(tsh_child(self, 0), in[0]);
    int i;
    (void)n, (void)user;
    for (i = 0; i < 10; i++) x = tsh_neg(x);
    return x;
}

static tsh_tensor *wide_input(tsh_ctx *ctx, int k, void *user) {
    (void)k, (void)user;
    return tsh_ones(ctx, tsh_shape2(64, 64));
}

static tsh_tensor *mean_of(tsh_ctx *ctx, tsh_tensor *y, int k, void *user) {
    (void)ctx, (void)k, (void)user;
    return tsh_mean(y, TSH_ALL, 0);
}

static int go_a_long_way(tsh_ctx *ctx, void *user) {
    usage *u = (usage *)user;
    const tsh_linear_desc d = {.in = 64, .out = 64};
    const tsh_module_desc as_long = {long_way, NULL};
    const tsh_pipeline_desc desc = {.micro_batches = u->m,
                                    .schedule = TSH_PIPELINE_GPIPE,
                                    .input = wide_input,
                                    .loss = mean_of};
    tsh_module *h = tsh_add_module(tsh_root(ctx), "h", NULL);
    (void)tsh_add_linear(tsh_add_module(h, "0", &as_long), "fc", &d);
    (void)tsh_add_linear(tsh_add_module(h, "1", &as_long), "fc", &d);
    CHECK(tsh_pipeline_train(tsh_pipeline_new(h, &desc), NULL) == TSH_OK, "train");
    u->peak[tsh_pp(ctx)->rank] = tsh_mem_stats(ctx).step_live_peak;
    return 0;
}

static void a_micro_batch_keeps_what_backward_needs(void **state) {
    const tsh_desc desc = {.tp = 1, .pp = 2};
    const size_t one = 64 * 64 * sizeof(tsh_real);
    usage few = {.m = 2}, many = {.m = 10};
    int s;
    (void)state;
    ranks_run_with(2, &desc, go_a_long_way, &few);
    ranks_run_with(2, &desc, go_a_long_way, &many);
    ranks_share(2, few.peak, sizeof few.peak[0]);
    ranks_share(2, many.peak, sizeof many.peak[0]);
    for (s = 0; s < 2; s++) /* the layer's input, and what the next stage has not taken yet */
        if (many.peak[s] > few.peak[s] + 8 * 2 * (one + 1024))
            fail_msg("stage %d: %zu bytes with 10 micro-batches, %zu with 2, activations have %zu",
                     s, many.peak[s], few.peak[s], one);
}

/* ----------------------------------------------------------- the order, and the time */

enum { SLEEPS = 64, TRIES = 30 };

static const double idle_tolerance = 0.03;

typedef struct sleeper {
    int forward_ms, backward_ms;
    char order[SLEEPS + 1];
    int events;
} sleeper;

static double seconds(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void doze(sleeper *s, char what, int ms) {
    const struct timespec t = {0, ms * 1000000L};
    if (ms) (void)nanosleep(&t, NULL);
    if (s->events < SLEEPS) s->order[s->events++] = what;
}

static void doze_forward(tsh_tensor *const *in, int n, void *const *out, void *user) {
    tsh_real *y = (tsh_real *)out[0];
    sleeper *s = (sleeper *)user;
    (void)n;
    doze(s, 'F', s->forward_ms);
    memcpy(y, tsh_data(tsh_ctx_of(in[0]), in[0]), (size_t)tsh_local_numel(in[0]) * sizeof *y);
}

static void doze_backward(tsh_tensor *const *in, int n, const void *const *out,
                          const tsh_real *const *grad_out, tsh_real *const *grad_in, void *user) {
    const tsh_real *dy = grad_out[0];
    sleeper *s = (sleeper *)user;
    int64_t i;
    (void)n, (void)out;
    doze(s, 'B', s->backward_ms);
    for (i = 0; grad_in[0] && i < tsh_local_numel(in[0]); i++) grad_in[0][i] += dy[i];
}

static tsh_tensor *sleepy(tsh_module *self, tsh_tensor **in, int n, void *user) {
    tsh_custom_op_desc desc = {
        .name = "doze", .forward = doze_forward, .backward = doze_backward, .user = user};
    tsh_tensor *x = tsh_forward(tsh_child(self, 0), in[0]);
    (void)n;
    desc.out[0].shape = tsh_shape_of(x);
    desc.out[0].layout = tsh_layout_of(x);
    return tsh_custom_op(tsh_ctx_of(in[0]), &x, 1, NULL, &desc);
}

static tsh_tensor *ones(tsh_ctx *ctx, int k, void *user) {
    (void)k, (void)user;
    return tsh_ones(ctx, tsh_shape2(2, 4));
}

typedef struct timing {
    int m, forward_ms, backward_ms;
    tsh_pipeline_schedule schedule;
    double formula, idle; /* share of a step; the least that was seen */
} timing;

static int sleep_through(tsh_ctx *ctx, void *user) {
    timing *t = (timing *)user;
    const tsh_linear_desc d = {.in = 4, .out = 4};
    const int p = tsh_pp(ctx)->size, stage = tsh_pp(ctx)->rank;
    const double busy = 1e-3 * t->m * (t->forward_ms + t->backward_ms);
    sleeper s = {t->forward_ms, t->backward_ms, "", 0};
    const tsh_module_desc as_sleepy = {sleepy, &s};
    tsh_pipeline_desc desc = {
        .micro_batches = t->m, .schedule = t->schedule, .input = ones, .loss = mean_of};
    tsh_module *h = tsh_add_module(tsh_root(ctx), "h", NULL);
    tsh_pipeline *pipeline;
    char want[SLEEPS + 1] = "";
    int i, f = 0, warm = t->schedule == TSH_PIPELINE_GPIPE ? t->m : p - 1 - stage;
    double begin, took, idle = 2;
    for (i = 0; i < p; i++) {
        const char name[2] = {(char)('0' + i), 0};
        (void)tsh_add_linear(tsh_add_module(h, name, &as_sleepy), "fc", &d);
    }
    pipeline = tsh_pipeline_new(h, &desc);
    for (i = 0; i < (busy > 0 ? TRIES : 1) && idle > t->formula + idle_tolerance; i++) {
        s.events = 0;
        (void)tsh_barrier(tsh_world(ctx));
        begin = seconds();
        CHECK(tsh_pipeline_train(pipeline, NULL) == TSH_OK, "train");
        (void)tsh_step_end(ctx);
        took = seconds() - begin;
        (void)tsh_allreduce(tsh_world(ctx), &took, 1, TSH_F64, TSH_MAX);
        if (1 - busy / took < idle) idle = 1 - busy / took;
    }
    for (i = 0; i < t->m; i++) {
        for (; f < t->m && f < warm + i + 1; f++) want[strlen(want)] = 'F';
        want[strlen(want)] = 'B';
    }
    CHECK(strcmp(s.order, want) == 0, "stage %d of %d: %s, not %s", stage, p, s.order, want);
    if (stage == 0) t->idle = idle;
    return 0;
}

static void stages_follow_their_schedule(void **state) {
    int p, m, kind;
    (void)state;
    for (p = 1; p <= 5; p++)
        for (m = 1; m <= 7; m += 2)
            for (kind = 0; kind < 2; kind++) {
                const tsh_desc desc = {.tp = 1, .pp = p};
                timing t = {.m = m,
                            .schedule = kind ? TSH_PIPELINE_GPIPE : TSH_PIPELINE_1F1B,
                            .formula = 0.5};
                ranks_run_with(p, &desc, sleep_through, &t);
            }
}

/* The formula of both schedules. A stage that waited for one micro-batch more would be idle for 1 /
 * (m + p) more, 0.08 and above. Nobody sleeps less than asked: who else works on this machine can
 * only make a step longer, so that the shortest of several is the truest, and one that is too short
 * is wrong at once. Only on threads, which wait asleep: processes of an MPI are busy while they
 * wait, so that others' stages wake up late where cores are few. */
static void the_bubble_is_that_of_the_formula(void **state) {
    static const int rows[][2] = {{2, 4}, {3, 7}, {4, 8}};
    int i, kind;
    (void)state;
    for (i = 0; i < COUNT(rows); i++)
        for (kind = 0; kind < 2; kind++) {
            const int p = rows[i][0], m = rows[i][1];
            const tsh_desc desc = {.tp = 1, .pp = p};
            const double formula = (double)(p - 1) / (m + p - 1);
            timing t = {.m = m,
                        .forward_ms = 20,
                        .backward_ms = 40,
                        .schedule = kind ? TSH_PIPELINE_GPIPE : TSH_PIPELINE_1F1B,
                        .formula = formula};
            ranks_run_at(RANKS_FIRST, p, &desc, sleep_through, &t);
            print_message("%s, %d stages, %d micro-batches: idle %.4f, formula %.4f\n",
                          kind ? "GPipe" : "1F1B", p, m, t.idle, formula);
            if (t.idle > formula + idle_tolerance || t.idle < formula - 0.001) /* clocks */
                fail_msg("%d stages, %d micro-batches: idle for %.4f, not %.4f", p, m, t.idle,
                         formula);
        }
}

/* ------------------------------------------------------------ what travels meanwhile */

/* An op between a stage's two layers, whose backward sees what has gone to the other replicas. */
typedef struct witness {
    tsh_coll_kind kind;
    uint64_t before;
    int seen[3], passed;
} witness;

static void witness_backward(tsh_tensor *const *in, int n, const void *const *out,
                             const tsh_real *const *grad_out, tsh_real *const *grad_in,
                             void *user) {
    const tsh_real *dy = grad_out[0];
    witness *w = (witness *)user;
    const tsh_comm *dp = tsh_dp(tsh_ctx_of(in[0]));
    int64_t i;
    (void)n, (void)out;
    w->seen[w->passed++] = (int)(dp->stats.calls[w->kind] - w->before);
    for (i = 0; i < tsh_local_numel(in[0]); i++) grad_in[0][i] += dy[i];
}

static void witness_forward(tsh_tensor *const *in, int n, void *const *out, void *user) {
    tsh_real *y = (tsh_real *)out[0];
    (void)user, (void)n;
    memcpy(y, tsh_data(tsh_ctx_of(in[0]), in[0]), (size_t)tsh_local_numel(in[0]) * sizeof *y);
}

static tsh_tensor *witnessed(tsh_module *self, tsh_tensor **in, int n, void *user) {
    tsh_custom_op_desc desc = {
        .name = "witness", .forward = witness_forward, .backward = witness_backward, .user = user};
    tsh_tensor *x = tsh_forward(tsh_child(self, 0), in[0]);
    (void)n;
    desc.out[0].shape = tsh_shape_of(x);
    desc.out[0].layout = tsh_layout_of(x);
    return tsh_forward(tsh_child(self, 1), tsh_custom_op(tsh_ctx_of(x), &x, 1, NULL, &desc));
}

typedef struct travel {
    tsh_pipeline_schedule schedule;
    int zero, seen; /* collectives until the last micro-batch's witness */
} travel;

static int travels(tsh_ctx *ctx, void *user) {
    const travel *t = (const travel *)user;
    const tsh_linear_desc d = {.in = 4, .out = 4};
    const tsh_optim_desc adam = {.kind = TSH_ADAM, .zero = t->zero};
    const tsh_pipeline_desc desc = {
        .micro_batches = 3, .schedule = t->schedule, .input = ones, .loss = mean_of};
    witness w = {t->zero ? TSH_REDUCE_SCATTER : TSH_ALLREDUCE, 0, {0}, 0};
    const tsh_module_desc as_witnessed = {witnessed, &w};
    tsh_module *h = tsh_add_module(tsh_root(ctx), "h", NULL);
    tsh_pipeline *pipeline;
    int i;
    for (i = 0; i < 2; i++) {
        tsh_module *child = tsh_add_module(h, i ? "1" : "0", &as_witnessed);
        (void)tsh_add_linear(child, "a", &d);
        (void)tsh_add_linear(child, "b", &d);
    }
    (void)tsh_optim_new(h, &adam);
    pipeline = tsh_pipeline_new(h, &desc);
    w.before = tsh_dp(ctx)->stats.calls[w.kind];
    CHECK(tsh_pipeline_train(pipeline, NULL) == TSH_OK, "train");
    CHECK(w.passed == 3, "%d micro-batches", w.passed);
    CHECK(w.seen[0] == 0 && w.seen[1] == 0, "nothing travels between micro-batches");
    CHECK(w.seen[2] == t->seen, "%d on their way, not %d", w.seen[2], t->seen);
    CHECK(tsh_dp(ctx)->stats.calls[w.kind] - w.before == 4, "each leaf once");
    CHECK(tsh_dp(ctx)->in_flight == 0 && tsh_pp(ctx)->in_flight == 0, "all are waited for");
    return 0;
}

/* A weight and a bias of the layer behind the witness are there before the one in front has any. */
static void gradients_travel_while_the_last_backward_goes_on(void **state) {
    int kind, zero, late;
    (void)state;
    for (kind = 0; kind < 2; kind++)
        for (zero = 0; zero < 2; zero++)
            for (late = 0; late < 2; late++) {
                const tsh_desc desc = {.tp = 1, .pp = 2, .bucket_bytes = 1, .no_overlap = late};
                travel t = {kind ? TSH_PIPELINE_GPIPE : TSH_PIPELINE_1F1B, zero, late ? 0 : 2};
                ranks_run_with(4, &desc, travels, &t);
            }
}

/* -------------------------------------------------------------- what else may cross */

typedef struct sharing {
    int calls;             /* of tsh_pipeline_train, whose gradients add up */
    double want[16], norm; /* of one rank */
    double got[STAGES][16];
} sharing;

/* Three stages share one weight: its gradient is the sum of all three, in the same bits. */
static int shares(tsh_ctx *ctx, void *user) {
    const tsh_linear_desc d = {.in = 4, .out = 4, .bias = TSH_NO};
    tsh_pipeline_desc desc = {.micro_batches = 3, .input = ones, .loss = mean_of};
    sharing *s = (sharing *)user;
    const int stage = tsh_pp(ctx)->rank, alone = tsh_pp(ctx)->size == 1;
    tsh_module *h = tsh_add_module(tsh_root(ctx), "h", NULL);
    tsh_pipeline *pipeline;
    tsh_tensor *shared, *x;
    double *got, norm = 0;
    int i, call;
    for (i = 0; i < 4; i++) {
        const char name[2] = {(char)('0' + i), 0};
        (void)tsh_add_linear(h, name, &d);
    }
    shared = tsh_param(h, "0.weight");
    (void)tsh_tie(tsh_find(h, "1"), "weight", shared);
    (void)tsh_tie(tsh_find(h, "3"), "weight", shared);
    pipeline = alone ? NULL : tsh_pipeline_new(h, &desc);
    for (call = 0; call < s->calls; call++) {
        if (!alone) {
            CHECK(tsh_pipeline_train(pipeline, NULL) == TSH_OK, "train");
            continue;
        }
        x = ones(ctx, 0, NULL);
        for (i = 0; i < 4; i++) x = tsh_forward(tsh_child(h, i), x);
        (void)tsh_backward(ctx, mean_of(ctx, x, 0, NULL));
    }
    (void)tsh_clip_grad_norm(tsh_root(ctx), 1e9, &norm);
    CHECK_OK();
    CHECK(alone || near(s->norm, norm, 1e-6), "norm %.9g, not %.9g", norm, s->norm);
    if (alone) s->norm = norm;
    if (stage == 2) return 0;
    got = ranks_values(ctx, tsh_grad(shared));
    for (i = 0; i < 16; i++)
        CHECK(alone || near(s->want[i], got[i], 1e-5), "%d: %.9g, not %.9g", i, got[i], s->want[i]);
    memcpy(alone ? s->want : s->got[stage], got, sizeof s->want);
    free(got);
    return 0;
}

static void more_than_two_stages_may_share(void **state) {
    const tsh_desc desc = {.tp = 1, .pp = STAGES};
    sharing s = {.calls = 0};
    (void)state;
    for (s.calls = 1; s.calls <= 3; s.calls++) {
        ranks_run(1, shares, &s);
        ranks_run_with(STAGES, &desc, shares, &s);
        ranks_share(STAGES, s.got, sizeof s.got[0]);
        assert_memory_equal(s.got[0], s.got[1], sizeof s.got[0]);
        assert_memory_equal(s.got[0], s.got[3], sizeof s.got[0]);
    }
}

enum { CROWD = 40 };

/* More stages share than may send to each other at once. More ranks than CHECK knows of. */
static int crowds(tsh_ctx *ctx, void *user) {
    const tsh_linear_desc d = {.in = 4, .out = 4, .bias = TSH_NO};
    const tsh_pipeline_desc desc = {.micro_batches = 2, .input = ones, .loss = mean_of};
    tsh_module *h = tsh_add_module(tsh_root(ctx), "h", NULL);
    char name[4];
    int i;
    (void)user;
    for (i = 0; i < CROWD; i++) {
        (void)snprintf(name, sizeof name, "%d", i);
        (void)tsh_add_linear(h, name, &d);
        if (i) (void)tsh_tie(tsh_child(h, i), "weight", tsh_param(h, "0.weight"));
    }
    return tsh_pipeline_train(tsh_pipeline_new(h, &desc), NULL) != TSH_OK || !tsh_check_replicas(h);
}

static void many_stages_may_share(void **state) {
    const tsh_desc desc = {.tp = 1, .pp = CROWD};
    (void)state;
    (void)setenv("TSHARD_TIMEOUT", "30", 1);
    assert_int_equal(tsh_threads_run(CROWD, &desc, crowds, NULL), 0);
}

/* What several stages hold, and its moments, may not drift apart. */
typedef struct drift {
    int stage, of; /* of the rank; 0: nothing drifts, 1: the weight, 2: the first moments */
    int zero;
} drift;

static int drifts(tsh_ctx *ctx, void *user) {
    static const char *const sentence[] = {
        "", "\"h.0.weight\" differs between the 4 ranks of pp: rank ",
        "the first moments of \"h.0.weight\" differ between the 4 ranks of pp: rank "};
    const drift *w = (const drift *)user;
    const tsh_linear_desc d = {.in = 4, .out = 4, .bias = TSH_NO};
    const tsh_optim_desc sgd = {.kind = TSH_SGD, .momentum = 0.5, .zero = w->zero};
    tsh_pipeline_desc desc = {.micro_batches = 3, .input = ones, .loss = mean_of};
    const int odd = tsh_pp(ctx)->rank == w->stage && tsh_dp(ctx)->rank == 0;
    tsh_module *h = tsh_add_module(tsh_root(ctx), "h", NULL);
    tsh_pipeline *pipeline;
    tsh_optim *optim;
    char text[128];
    int i;
    for (i = 0; i < STAGES; i++) {
        const char name[2] = {(char)('0' + i), 0};
        (void)tsh_add_linear(h, name, &d);
        if (i % 3) (void)tsh_tie(tsh_child(h, i), "weight", tsh_param(h, "0.weight"));
    }
    optim = tsh_optim_new(h, &sgd);
    pipeline = tsh_pipeline_new(h, &desc);
    CHECK(tsh_pipeline_train(pipeline, NULL) == TSH_OK, "train");
    if (odd && w->of == 2) /* its rate is 0, but its moments move */
        ((tsh_real *)tsh_data(ctx, tsh_grad(tsh_param(h, "0.weight"))))[1] += 1;
    if (w->of == 2) tsh_optim_set_lr(optim, 0);
    CHECK(tsh_optim_step(optim) == TSH_OK, "step");
    if (odd && w->of == 1) {
        tsh_real *values = (tsh_real *)tsh_data(ctx, tsh_param(h, "0.weight"));
        values[1] += 1;
    }
    CHECK(tsh_check_replicas(tsh_root(ctx)) == !w->of, "what drifted");
    if (!w->of) return 0;
    (void)snprintf(text, sizeof text, "%s%d differs", sentence[w->of], w->stage);
    CHECK(strstr(tsh_last_error(ctx)->message, text), "%s", tsh_last_error(ctx)->message);
    return 0;
}

static void stages_that_share_are_compared(void **state) {
    const tsh_desc desc = {.tp = 1, .pp = STAGES};
    drift w;
    (void)state;
    for (w.stage = 1; w.stage < 3; w.stage++)
        for (w.of = 0; w.of < 3; w.of++) {
            w.zero = 0;
            ranks_run_with(STAGES, &desc, drifts, &w);
            w.zero = 1;
            if (!w.of) ranks_run_with(2 * STAGES, &desc, drifts, &w);
        }
}

static tsh_tensor *few_ids(tsh_ctx *ctx, int k, void *user) {
    (void)user;
    return tsh_arange(ctx, TSH_I32, k, k + 2 + k, 1); /* shapes differ, too */
}

static tsh_tensor *same(tsh_module *self, tsh_tensor **in, int n, void *user) {
    (void)self, (void)n, (void)user;
    return in[0];
}

static tsh_tensor *unmoved(tsh_module *self, tsh_tensor **in, int n, void *user) {
    tsh_tensor *w = tsh_ones(tsh_ctx_of(in[0]), tsh_shape2(2, 4));
    (void)n, (void)user;
    return tsh_forward(tsh_child(self, 0), w);
}

/* Integers, of one stage; a layer that learns; a frozen one; one whose output depends on none
 * before: then nobody waits for a gradient that does not come. */
static int crosses(tsh_ctx *ctx, void *user) {
    const tsh_embedding_desc table = {.count = 16, .dim = 4};
    const tsh_linear_desc d = {.in = 4, .out = 4, .bias = TSH_NO};
    const tsh_module_desc as_same = {same, NULL}, as_unmoved = {unmoved, NULL};
    tsh_pipeline_desc desc = {.micro_batches = 3,
                              .schedule = *(const tsh_pipeline_schedule *)user,
                              .input = few_ids,
                              .loss = mean_of};
    const int stage = tsh_pp(ctx)->rank;
    tsh_module *h = tsh_add_module(tsh_root(ctx), "h", NULL);
    tsh_tensor *table_grad, *head_grad;
    double loss;
    (void)tsh_add_module(h, "same", &as_same);
    (void)tsh_add_embedding(h, "table", &table);
    (void)tsh_add_linear(h, "frozen", &d);
    (void)tsh_requires_grad(tsh_param(h, "frozen.weight"), 0);
    (void)tsh_add_linear(tsh_add_module(h, "unmoved", &as_unmoved), "fc", &d);
    CHECK(tsh_pipeline_train(tsh_pipeline_new(h, &desc), &loss) == TSH_OK, "train");
    CHECK(loss == loss, "a loss");
    table_grad = stage == 1 ? tsh_grad(tsh_param(h, "table.weight")) : NULL;
    head_grad = stage == 3 ? tsh_grad(tsh_param(h, "unmoved.fc.weight")) : NULL;
    CHECK(stage != 1 || tsh_item(ctx, tsh_sum(table_grad, TSH_ALL, 0)) == 0, "zeros");
    CHECK(stage != 3 || near(8, tsh_item(ctx, tsh_sum(head_grad, TSH_ALL, 0)) * 2, 1e-6),
          "the sum over the mean of 8 of 2 rows of ones");
    CHECK(tsh_mem_stats(ctx).now[TSH_MEM_GRADIENTS] == 0 || stage == 1 || stage == 3,
          "only two stages learn");
    return 0;
}

/* A callback that writes every micro-batch into the tensor of the one before, of which a tape still
 * holds the values. */
static tsh_tensor *overwrites(tsh_ctx *ctx, int k, void *user) {
    const tsh_real next[4] = {(tsh_real)k, 1, 2, 3};
    tsh_tensor *x = *(tsh_tensor **)user;
    (void)tsh_write(ctx, x, TSH_LOCAL, next, sizeof next);
    return tsh_reshape(x, tsh_shape2(1, 4)); /* NULL after an error */
}

static int reuses_an_input(tsh_ctx *ctx, void *user) {
    const tsh_linear_desc d = {.in = 4, .out = 4};
    tsh_tensor *x = tsh_tensor_new(ctx, TSH_REAL, tsh_shape1(4), tsh_replicated());
    tsh_pipeline_desc desc = {.micro_batches = 2, .schedule = TSH_PIPELINE_GPIPE,
                              .input = overwrites, .loss = mean_of, .user = &x};
    tsh_module *h = tsh_add_module(tsh_root(ctx), "h", NULL);
    double loss;
    (void)user;
    (void)tsh_add_linear(h, "0", &d);
    (void)tsh_add_linear(h, "1", &d);
    CHECK(tsh_pipeline_train(tsh_pipeline_new(h, &desc), &loss) != TSH_OK, "an error");
    CHECK(tsh_last_error(ctx)->code == TSH_ERR_STATE, "an error");
    CHECK(strstr(tsh_last_error(ctx)->message, "tsh_write: ops are recorded"), "of the write");
    return 0;
}

static void an_input_of_a_micro_batch_under_way_is_not_written(void **state) {
    const tsh_desc desc = {.tp = 1, .pp = 2};
    (void)state;
    ranks_run_with(2, &desc, reuses_an_input, NULL);
}

/* A callback that ends the step before it begins. */
static tsh_tensor *afresh(tsh_ctx *ctx, int k, void *user) {
    (void)tsh_step_end(ctx);
    return ones(ctx, k, user);
}

static int ends_steps(tsh_ctx *ctx, void *user) {
    const tsh_linear_desc d = {.in = 4, .out = 4};
    tsh_pipeline_desc desc = {.micro_batches = 3, .input = ones, .loss = mean_of};
    double want, got;
    tsh_module *h = tsh_add_module(tsh_root(ctx), "h", NULL);
    (void)user;
    (void)tsh_add_linear(h, "0", &d);
    (void)tsh_add_linear(h, "1", &d);
    CHECK(tsh_pipeline_train(tsh_pipeline_new(h, &desc), &want) == TSH_OK, "train");
    (void)tsh_zeros(ctx, tsh_shape1(3));
    desc.input = afresh;
    CHECK(tsh_pipeline_train(tsh_pipeline_new(h, &desc), &got) == TSH_OK, "again");
    CHECK(got == want, "%.9g, not %.9g", got, want);
    (void)tsh_step_end(ctx);
    CHECK(tsh_mem_stats(ctx).step_live == 0, "%zu bytes are left", tsh_mem_stats(ctx).step_live);
    return 0;
}

static void a_callback_may_end_a_step(void **state) {
    const tsh_desc desc = {.tp = 1, .pp = 2};
    (void)state;
    ranks_run_with(2, &desc, ends_steps, NULL);
}

static void anything_may_cross(void **state) {
    static const tsh_pipeline_schedule kinds[] = {TSH_PIPELINE_1F1B, TSH_PIPELINE_GPIPE};
    const tsh_desc desc = {.tp = 1, .pp = 4};
    tsh_pipeline_schedule kind;
    int i;
    (void)state;
    for (i = 0; i < 2; i++) {
        kind = kinds[i];
        ranks_run_with(4, &desc, crosses, &kind);
    }
}

/* A hundred micro-batches: more messages than a comm takes at a time, all before any backward. */
static void many_micro_batches_pass(void **state) {
    static const int five[] = {1, 1, 1, 2};
    const setup how = {
        .tp = 1, .pp = 4, .dp = 1, .m = 100, .counts = five, .schedule = TSH_PIPELINE_GPIPE};
    (void)state;
    prove(&how, 0);
}

/* ---------------------------------------------------------------------------- files */

typedef struct filing {
    const setup *how;
    int zero;              /* of the optimiser */
    const char *from, *to; /* files; from NULL: none is loaded */
    int first, steps;
    double loss;
} filing;

static int train_from_file(tsh_ctx *ctx, void *user) {
    filing *f = (filing *)user;
    const tsh_optim_desc adam = {
        .kind = TSH_ADAM, .lr = 0.01, .clip_norm = f->how->clip, .zero = f->zero};
    tsh_pipeline *pipeline;
    tsh_optim *optim;
    double loss = 0;
    model t;
    int step;
    make_model(ctx, &t, f->how, f->how->m);
    optim = tsh_optim_new(t.gpt, &adam);
    pipeline = make_pipeline(&t, f->how);
    if (f->from) CHECK(tsh_load(t.gpt, files_path(f->from), optim) == TSH_OK, "load");
    for (step = f->first; step < f->first + f->steps; step++) {
        load(ctx, &t, (step * tsh_dp(ctx)->size + tsh_dp(ctx)->rank) * f->how->m);
        CHECK(tsh_pipeline_train(pipeline, &loss) == TSH_OK, "train");
        (void)tsh_optim_step(optim);
        tsh_zero_grads(t.gpt);
        (void)tsh_step_end(ctx);
    }
    CHECK(tsh_save(t.gpt, files_path(f->to), optim) == TSH_OK, "save");
    CHECK_OK();
    if (tsh_world(ctx)->rank == 0) f->loss = loss;
    return 0;
}

static double file_run_zero(const setup *how, int zero, const char *from, const char *to, int first,
                            int steps) {
    const tsh_desc desc = {.tp = how->tp, .pp = how->pp, .seed = 3};
    filing f = {how, zero, from, to, first, steps, 0};
    const int ranks = how->tp * how->pp * how->dp;
    /* one process writes the file of one rank */
    ranks_run_at(ranks == 1 ? RANKS_FIRST : RANKS_ANY, ranks, &desc, train_from_file, &f);
    return f.loss;
}

static double file_run(const setup *how, const char *from, const char *to, int first, int steps) {
    return file_run_zero(how, 0, from, to, first, steps);
}

/* All stages' parameters and moments are in one file, the one that a single rank writes; stages go
 * on from it where others stopped. */
static void stages_save_one_file_and_load_it(void **state) {
    static const int two[] = {1, 4}, three[] = {2, 2, 1}, four[] = {1, 1, 1, 2}, five[] = {5};
    static const setup one = {.tp = 1, .pp = 1, .dp = 1, .m = 3, .counts = five, .dropout = 1};
    setup other = one;
    double loss;
    (void)state;
    (void)file_run(&one, NULL, "one", 0, 2);
    loss = file_run(&one, NULL, "end", 0, 4);
    other.pp = 3;
    other.counts = three;
    (void)file_run(&other, NULL, "three", 0, 2);
    files_expect_same("one", "three");
    other.pp = 2;
    other.counts = two;
    assert_true(file_run(&other, "three", "two", 2, 2) == loss);
    files_expect_same("end", "two");
    other.pp = 4;
    other.counts = four;
    assert_true(file_run(&other, "one", "four", 2, 2) == loss);
    files_expect_same("end", "four");
    (void)file_run(&one, "four", "again", 4, 0);
    files_expect_same("end", "again");
}

/* The same of sharded, tied and replicated parameters. */
static void grids_save_one_file_and_load_it(void **state) {
    static const int two[] = {3, 2}, five[] = {5};
    static const setup one = {.tp = 1, .pp = 1, .dp = 1, .m = 2, .counts = five, .tied = 1};
    static const setup grid = {.tp = 2, .pp = 2, .dp = 2, .m = 2, .counts = two, .tied = 1};
    (void)state;
    (void)file_run(&grid, NULL, "grid", 0, 2);
    (void)file_run(&one, "grid", "one", 2, 0);
    files_expect_same("grid", "one");
    (void)file_run(&grid, "one", "again", 2, 0);
    files_expect_same("grid", "again");
}

/* Moments that are cut over the replicas of every stage: the same values, the same file. */
static void replicas_of_stages_may_cut_their_moments(void **state) {
    static const int two[] = {3, 2};
    static const setup grid = {
        .tp = 2, .pp = 2, .dp = 2, .m = 2, .counts = two, .tied = 1, .clip = 0.5};
    double loss;
    (void)state;
    loss = file_run_zero(&grid, 0, NULL, "plain", 0, 3);
    assert_true(file_run_zero(&grid, 1, NULL, "cut", 0, 3) == loss);
    files_expect_same("plain", "cut");
    loss = file_run_zero(&grid, 0, "cut", "plain", 3, 1);
    assert_true(file_run_zero(&grid, 1, "cut", "cut", 3, 1) == loss);
    files_expect_same("plain", "cut");
}

/* The writer is of stage 0; the others learn that it cannot write, and go on. */
static int saves_nowhere(tsh_ctx *ctx, void *user) {
    static const int two[] = {3, 2};
    const setup how = {.m = 2, .counts = two, .tied = 1};
    const int first = tsh_world(ctx)->rank == 0;
    model t;
    (void)user;
    make_model(ctx, &t, &how, how.m);
    CHECK(make_pipeline(&t, &how), "pipeline");
    CHECK(tsh_save(t.gpt, files_path("nowhere/file"), NULL) == TSH_ERR_IO, "no folder");
    CHECK(strstr(tsh_last_error(ctx)->message, "cannot be written"), "a sentence");
    tsh_clear_error(ctx);
    CHECK(tsh_save(t.gpt, files_path(first ? "" : "file"), NULL) != TSH_OK, "no file");
    tsh_clear_error(ctx);
    CHECK(tsh_save(t.gpt, files_path("file"), NULL) == TSH_OK, "a file");
    return 0;
}

static void a_file_that_cannot_be_written_is_one_error(void **state) {
    const tsh_desc desc = {.tp = 2, .pp = 2};
    (void)state;
    ranks_run_with(4, &desc, saves_nowhere, NULL);
}

/* ------------------------------------------------------------------------ mistakes */

typedef struct mistake {
    int pp, layers, m, counts[4]; /* counts[0] 0: none given */
    tsh_result code;
    const char *sentence;
} mistake;

static int makes_mistake(tsh_ctx *ctx, void *user) {
    const mistake *w = (const mistake *)user;
    const tsh_linear_desc d = {.in = 4, .out = 4};
    tsh_pipeline_desc desc = {.micro_batches = w->m,
                              .counts = w->counts[0] ? w->counts : NULL,
                              .input = ones,
                              .loss = mean_of};
    const char *message = tsh_last_error(ctx)->message;
    tsh_module *h = tsh_add_module(tsh_root(ctx), "h", NULL);
    int i;
    for (i = 0; i < w->layers; i++) {
        const char name[2] = {(char)('0' + i), 0};
        (void)tsh_add_linear(h, name, &d);
    }
    (void)tsh_barrier(tsh_world(ctx)); /* all are open */
    if (strstr(w->sentence, ".input")) desc.input = NULL;
    if (strstr(w->sentence, ".loss")) desc.loss = NULL;
    CHECK(!tsh_pipeline_new(h, &desc), "no pipeline");
    CHECK(tsh_last_error(ctx)->code == w->code, "%s", message);
    CHECK(strstr(message, w->sentence), "%s", message);
    return 0;
}

static void a_pipeline_that_cannot_be_is_one_sentence(void **state) {
    static const mistake rows[] = {
        {2, 3, 1, {0}, TSH_ERR_ARGUMENT, "3 children of \"h\" do not divide into 2 stages"},
        {4, 3, 1, {0}, TSH_ERR_ARGUMENT, "stage 0 of 4 would have 0 of the 3 children of \"h\""},
        {3, 3, 1, {1, 0, 2}, TSH_ERR_ARGUMENT, "stage 1 of 3 would have 0 of the 3"},
        {2, 3, 1, {3, -1}, TSH_ERR_ARGUMENT, "stage 1 of 2 would have -1"},
        {2, 3, 1, {1, 1}, TSH_ERR_ARGUMENT, "add up to 2, but \"h\" has 3 children"},
        {2, 2, 0, {0}, TSH_ERR_ARGUMENT, "micro_batches is 0"},
        {2, 2, -3, {0}, TSH_ERR_ARGUMENT, "micro_batches is -3"},
        {2, 2, 1, {0}, TSH_ERR_ARGUMENT, "\"h\" lacks .input"},
        {2, 2, 1, {0}, TSH_ERR_ARGUMENT, "\"h\" lacks .loss"},
    };
    int i;
    (void)state;
    for (i = 0; i < COUNT(rows); i++) {
        const tsh_desc desc = {.tp = 1, .pp = rows[i].pp};
        mistake w = rows[i];
        ranks_run_with(w.pp, &desc, makes_mistake, &w);
    }
}

enum {
    BAD_SHAPE,
    BAD_NULL,
    BAD_LOSS,
    BAD_INPUT,
    BAD_BATCHES,
    BAD_TAPE,
    BAD_NO_GRAD,
    BAD_DEAL,
    BADS
};

static tsh_tensor *bad_input(tsh_ctx *ctx, int k, void *user) {
    const int bad = *(const int *)user;
    if (bad == BAD_INPUT && k == 2) return NULL;
    return tsh_ones(ctx, tsh_shape2(2, bad == BAD_SHAPE && k == 2 ? 3 : 4));
}

static tsh_tensor *bad_loss(tsh_ctx *ctx, tsh_tensor *y, int k, void *user) {
    const int bad = *(const int *)user;
    (void)ctx;
    if (bad == BAD_LOSS && k == 2) return y;
    if (bad == BAD_NULL && k == 2) return NULL;
    return tsh_mean(y, TSH_ALL, 0);
}

/* A mistake on one stage while the others wait for it. */
static int goes_wrong(tsh_ctx *ctx, void *user) {
    static const char *const sentence[BADS] = {"3 features",
                                               "the loss is NULL",
                                               "the loss must be one replicated value",
                                               "stage 0 has no input of micro-batch 2",
                                               "ranks differ in their micro-batches",
                                               "ops are recorded already",
                                               "gradients are off",
                                               "dealt to the stages already"};
    const int bad = *(const int *)user, evaluating = *((const int *)user + 1);
    const tsh_linear_desc d = {.in = 4, .out = 4};
    const int stage = tsh_pp(ctx)->rank, other[3] = {1, 1, 2};
    tsh_pipeline_desc desc = {.micro_batches = 4 + (bad == BAD_BATCHES && stage == 1),
                              .input = bad_input,
                              .loss = bad_loss,
                              .user = user};
    tsh_module *h = tsh_add_module(tsh_root(ctx), "h", NULL);
    const char *message = tsh_last_error(ctx)->message;
    tsh_pipeline *pipeline;
    double loss = 0;
    int i;
    for (i = 0; i < 3; i++) {
        const char name[2] = {(char)('0' + i), 0};
        (void)tsh_add_linear(h, name, &d);
    }
    if (bad == BAD_DEAL) (void)tsh_add_linear(h, "3", &d);
    if (bad == BAD_DEAL) desc.counts = other;
    pipeline = tsh_pipeline_new(h, &desc);
    if (bad == BAD_DEAL) {
        static const int another[3] = {2, 1, 1};
        CHECK(pipeline && tsh_pipeline_new(h, &desc), "the same deal");
        (void)tsh_barrier(tsh_world(ctx));
        desc.counts = another;
        CHECK(!tsh_pipeline_new(h, &desc), "another one");
    }
    if (bad == BAD_TAPE) (void)tsh_forward(tsh_child(h, stage), tsh_ones(ctx, tsh_shape2(2, 4)));
    if (bad == BAD_NO_GRAD) tsh_no_grad_begin(ctx);
    if (pipeline && evaluating)
        CHECK(tsh_pipeline_evaluate(pipeline, 0, &loss) != TSH_OK, "evaluate");
    else if (pipeline)
        CHECK(tsh_pipeline_train(pipeline, &loss) != TSH_OK, "train");
    CHECK(!pipeline || loss != loss, "no loss");
    CHECK(!tsh_ok(ctx) && strstr(message, sentence[bad]), "%s", message);
    (void)tsh_step_end(ctx);
    CHECK(tsh_mem_stats(ctx).step_live == 0, "%zu bytes are left", tsh_mem_stats(ctx).step_live);
    return 0;
}

static void a_mistake_on_one_stage_is_one_error_on_all(void **state) {
    const tsh_desc desc = {.tp = 1, .pp = 3};
    int bad[2];
    (void)state;
    for (bad[0] = 0; bad[0] < BADS; bad[0]++)
        for (bad[1] = 0; bad[1] < (bad[0] == BAD_NULL || bad[0] > BAD_INPUT ? 1 : 2); bad[1]++)
            if (!(bad[0] == BAD_LOSS && bad[1])) ranks_run_with(3, &desc, goes_wrong, bad);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stages_give_the_same_bits),
        cmocka_unit_test(stages_of_sharded_layers_give_the_same_bits),
        cmocka_unit_test(ties_and_replicas_give_the_same_numbers),
        cmocka_unit_test(many_micro_batches_pass),
        cmocka_unit_test(more_than_two_stages_may_share),
        cmocka_unit_test(many_stages_may_share),
        cmocka_unit_test(stages_that_share_are_compared),
        cmocka_unit_test(anything_may_cross),
        cmocka_unit_test(a_callback_may_end_a_step),
        cmocka_unit_test(stages_save_one_file_and_load_it),
        cmocka_unit_test(grids_save_one_file_and_load_it),
        cmocka_unit_test(replicas_of_stages_may_cut_their_moments),
        cmocka_unit_test(a_file_that_cannot_be_written_is_one_error),
        cmocka_unit_test_teardown(a_rank_holds_its_own_stage, files_after),
        cmocka_unit_test(activations_are_bounded_by_the_stages),
        cmocka_unit_test(a_micro_batch_keeps_what_backward_needs),
        cmocka_unit_test(stages_follow_their_schedule),
        cmocka_unit_test(the_bubble_is_that_of_the_formula),
        cmocka_unit_test(gradients_travel_while_the_last_backward_goes_on),
        cmocka_unit_test(an_input_of_a_micro_batch_under_way_is_not_written),
        cmocka_unit_test(a_pipeline_that_cannot_be_is_one_sentence),
        cmocka_unit_test(a_mistake_on_one_stage_is_one_error_on_all),
    };
    return cmocka_run_group_tests_name("pipeline", tests, files_begin, files_end);
}
