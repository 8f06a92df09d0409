/* Training in bf16: what parameters are made in and converted to, and steps that give the bits or
 * the losses of float wherever float's do: at any degree of tp, with checkpoints, clipping, groups,
 * tied weights, new layouts; in the memory that is promised. (Pipelines: test_pipeline.c; ZeRO:
 * test_zero.c.) */
/* build: double */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../support/small_gpt.h"

#define BOTH_DOUBLE (sizeof(tsh_real) == 8)

/* ------------------------------------------------------------ dtypes of parameters */

static int is_of(tsh_module *root, const char *path, tsh_dtype dtype) {
    return tsh_dtype_of(tsh_param(root, path)) == dtype;
}

static int every_layer_takes_one(tsh_ctx *ctx, void *user) {
    const tsh_linear_desc linear = {.in = 4, .out = 6}, own = {.in = 4, .out = 6, .dtype = TSH_F16};
    const tsh_embedding_desc table = {.count = 5, .dim = 4, .dtype = TSH_REAL};
    const tsh_layer_norm_desc norm = {.dim = 4, .dtype = TSH_F16};
    const tsh_rms_norm_desc rms = {.dim = 4, .dtype = TSH_REAL};
    const tsh_classifier_desc classes = {.in = 4, .classes = 3, .dtype = TSH_F16};
    const tsh_param_desc counts = {.buffer = 1, .dtype = TSH_I64}, scale = {.dtype = TSH_REAL};
    tsh_module *root = tsh_root(ctx);
    tsh_classifier_desc tied = {.in = 4, .classes = 5, .dtype = TSH_F16};
    (void)user;
    tsh_add_linear(root, "a", &linear);
    tsh_add_linear(root, "b", &own);
    tsh_add_embedding(root, "c", &table);
    tsh_add_layer_norm(root, "d", &norm);
    tsh_add_rms_norm(root, "e", &rms);
    tsh_add_classifier(root, "f", &classes);
    tsh_add_param(root, "g", tsh_shape1(3), &counts);
    tsh_add_param(root, "h", tsh_shape1(3), &scale);
    tsh_add_param(root, "i", tsh_shape1(3), NULL);
    tied.weight = tsh_param(root, "c.weight");
    tsh_add_classifier(root, "j", &tied);
    CHECK_OK();
    CHECK(is_of(root, "a.weight", TSH_BF16) && is_of(root, "a.bias", TSH_BF16), "the ctx's");
    CHECK(is_of(root, "b.weight", TSH_F16) && is_of(root, "b.bias", TSH_F16), "linear");
    CHECK(is_of(root, "c.weight", TSH_REAL) && is_of(root, "d.weight", TSH_F16), "embedding, norm");
    CHECK(is_of(root, "d.bias", TSH_F16) && is_of(root, "e.weight", TSH_REAL), "norms");
    CHECK(is_of(root, "f.weight", TSH_F16) && is_of(root, "f.bias", TSH_F16), "classifier");
    CHECK(is_of(root, "g", TSH_I64) && is_of(root, "h", TSH_REAL), "bare parameters");
    CHECK(is_of(root, "i", TSH_BF16), "a bare one without a description");
    CHECK(is_of(root, "j.weight", TSH_REAL) && is_of(root, "j.bias", TSH_F16), "an existing one");
    CHECK(tsh_dtype_of(tsh_zeros(ctx, tsh_shape1(2))) == TSH_REAL, "tensors stay");
    CHECK(!tsh_add_param(root, "k", tsh_shape1(3), &(tsh_param_desc){.dtype = TSH_I32}), "no");
    CHECK_SAYS(TSH_ERR_DTYPE, "\"k\" are");
    CHECK(!tsh_add_linear(root, "l", &(tsh_linear_desc){.in = 2, .out = 2, .dtype = TSH_I64}), "");
    CHECK_SAYS(TSH_ERR_DTYPE, "tsh_add_linear: the parameters of \"l\" are");
    tied.dtype = (tsh_dtype)99;
    CHECK(!tsh_add_classifier(root, "m", &tied), "no such dtype");
    CHECK_SAYS(TSH_ERR_DTYPE, "dtype 99");
    return 0;
}

static void descriptions_say_it(void **state) {
    const tsh_desc desc = {.dtype = TSH_BF16}, wrong = {.dtype = TSH_I32};
    tsh_ctx *ctx = NULL;
    (void)state;
    ranks_run_with(1, &desc, every_layer_takes_one, NULL);
    ranks_run_with(2, &desc, every_layer_takes_one, NULL);
    assert_int_equal(tsh_open(&wrong, &ctx), TSH_ERR_DTYPE);
    assert_non_null(strstr(tsh_last_error(ctx)->message, "bf16 or f16, not dtype"));
    tsh_close(ctx);
}

/* ------------------------------------------------------------ conversion */

/* The global values of every parameter, as float. */
static int all_values(tsh_ctx *ctx, capture *c) {
    static const char *const path[] = {"wte.weight",          "wpe.weight",
                                       "h.0.ln_1.weight",     "h.1.attn.c_attn.weight",
                                       "h.1.attn.c_attn.bias", "h.0.mlp.c_proj.weight"};
    int i;
    for (i = 0; i < COUNT(path); i++)
        CHECK(!capture_add(ctx, c, tsh_param(tsh_root(ctx), path[i])), "%s", path[i]);
    return 0;
}

typedef struct conversion {
    int late, sharded; /* values exist before; are sharded before */
    capture want;
} conversion;

static int converts(tsh_ctx *ctx, void *user) {
    conversion *c = (conversion *)user;
    tsh_module *gpt = gpt_add(ctx);
    const tsh_param_desc counts = {.buffer = 1, .dtype = TSH_I32};
    tsh_tensor *steps = tsh_add_param(gpt, "steps", tsh_shape1(2), &counts);
    capture got = {.count = 0};
    if (c->sharded) tsh_parallelize(gpt, gpt_plan, GPT_RULES);
    if (c->late) tsh_materialize(gpt);
    CHECK(tsh_to(gpt, TSH_BF16) == TSH_OK, "to bf16");
    CHECK(tsh_dtype_of(steps) == TSH_I32, "integers stay");
    CHECK(is_of(gpt, "lm_head.weight", TSH_BF16), "tied");
    if (!c->sharded) tsh_parallelize(gpt, gpt_plan, GPT_RULES);
    if (all_values(ctx, &got)) return 1;
    if (capture_compare(ctx, "bf16", &c->want, &got, 0)) return 1;
    CHECK(tsh_to(tsh_find(gpt, "h"), TSH_REAL) == TSH_OK, "back");
    CHECK(is_of(gpt, "h.0.ln_1.weight", TSH_REAL) && is_of(gpt, "wte.weight", TSH_BF16), "below");
    capture_free(&got);
    if (all_values(ctx, &got) || capture_compare(ctx, "back", &c->want, &got, 0)) return 1;
    capture_free(&got);
    CHECK_OK();
    return 0;
}

/* A bf16 model is the float model, rounded. */
static int rounded(tsh_ctx *ctx, void *user) {
    conversion *c = (conversion *)user;
    capture all = {.count = 0};
    int i;
    int64_t e;
    gpt_add(ctx);
    if (all_values(ctx, &all)) return 1;
    for (i = 0; i < all.count; i++) {
        tsh_tensor *t = tsh_tensor_new(ctx, TSH_REAL, tsh_shape1(all.numel[i]), tsh_replicated());
        for (e = 0; e < all.numel[i]; e++)
            ((tsh_real *)tsh_data(ctx, t))[e] = (tsh_real)all.values[i][e];
        CHECK(!capture_add(ctx, &c->want, tsh_cast(t, TSH_BF16)), "rounded");
    }
    capture_free(&all);
    CHECK_OK();
    return 0;
}

static void values_are_rounded_once_whenever(void **state) {
    conversion c = {.late = 0};
    int i;
    (void)state;
    ranks_run_at(RANKS_EACH, 1, NULL, rounded, &c);
    for (i = 0; i < COUNT(ranks_degrees) && ranks_degrees[i] <= 4; i++)
        for (c.late = 0; c.late < 2; c.late++)
            for (c.sharded = 0; c.sharded < 2; c.sharded++)
                ranks_run(ranks_degrees[i], converts, &c);
    capture_free(&c.want);
}

static int refuses(tsh_ctx *ctx, void *user) {
    const tsh_linear_desc linear = {.in = 4, .out = 4};
    const tsh_optim_desc bad = {.grad_dtype = TSH_F16}, worse = {.moments_dtype = TSH_I32};
    tsh_module *root = tsh_root(ctx), *a = tsh_add_linear(root, "a", &linear);
    tsh_module *b = tsh_add_linear(root, "b", &linear);
    tsh_tensor *w = tsh_param(b, "weight");
    tsh_gradcheck_fn none = NULL;
    (void)user;
    CHECK(tsh_to(NULL, TSH_BF16) == TSH_ERR_ARGUMENT, "no module");
    CHECK(tsh_to(root, TSH_I32) == TSH_ERR_DTYPE, "an integer");
    CHECK_SAYS(TSH_ERR_DTYPE, "tsh_to: takes");
    CHECK(tsh_to(root, (tsh_dtype)77) == TSH_ERR_DTYPE, "no dtype");
    CHECK_SAYS(TSH_ERR_DTYPE, "not dtype 77");
    CHECK(tsh_forward(b, tsh_ones(ctx, tsh_shape2(2, 4))) != NULL, "forward");
    CHECK(tsh_to(root, TSH_BF16) == TSH_ERR_STATE, "recorded");
    CHECK_SAYS(TSH_ERR_STATE, "\"b.weight\"; end the step first");
    CHECK(is_of(a, "weight", TSH_REAL), "nothing is changed");
    CHECK(tsh_to(a, TSH_F16) == TSH_OK, "another module");
    (void)tsh_step_end(ctx);
    CHECK(!tsh_optim_new(root, NULL), "f16");
    CHECK_SAYS(TSH_ERR_DTYPE, "\"a.weight\" is f16");
    CHECK(!tsh_optim_new(b, &bad), "gradients");
    CHECK_SAYS(TSH_ERR_DTYPE, "or bf16");
    CHECK(!tsh_optim_new(b, &worse), "moments");
    CHECK_SAYS(TSH_ERR_DTYPE, "or bf16");
    CHECK(tsh_to(b, TSH_BF16) == TSH_OK && tsh_optim_new(b, NULL) != NULL, "bf16 trains");
    CHECK(tsh_to(root, TSH_REAL) == TSH_ERR_STATE, "an optimiser");
    CHECK_SAYS(TSH_ERR_STATE, "an optimiser has \"b.weight\"");
    CHECK(is_of(a, "weight", TSH_F16), "nothing is changed");
    (void)none, (void)w;
    return 0;
}

static void wrong_uses_are_sentences(void **state) {
    (void)state;
    ranks_run(1, refuses, NULL);
    ranks_run(2, refuses, NULL);
}

/* ------------------------------------------------------------ exact weights
 * The loss sum(p c) gives the parameter p the gradient c, whatever p's dtype is: a float twin gets
 * the same gradients, so that a bf16 parameter is its rounded values in every step. */

enum { ROWS = 7, COLUMNS = 12, STEPS = 60 };

typedef struct twin {
    tsh_optim_desc optim;
    tsh_dtype dtype;
    int cut;             /* 0: R; 1 + d: S(d); 3: R, from the middle on S(1) with segments */
    double *values;      /* shape (STEPS, ROWS * COLUMNS): the float twin's */
    double worst, moved; /* how far bf16 values are off, relatively; how far values have gone */
} twin;

static double twin_gradient(int step, int e) {
    return 1e-3 * (1.5 + sin(1.0 + 0.37 * step + e)) * (1 + e % 5);
}

static tsh_tensor *twin_loss(tsh_ctx *ctx, tsh_tensor *p, int step) {
    tsh_tensor *c = tsh_zeros(ctx, tsh_shape_of(p));
    tsh_real *values = (tsh_real *)tsh_data(ctx, c);
    int e;
    for (e = 0; values && e < ROWS * COLUMNS; e++) values[e] = (tsh_real)twin_gradient(step, e);
    return tsh_full_tensor(tsh_sum(tsh_mul(p, tsh_redistribute(c, tsh_layout_of(p))), TSH_ALL, 0));
}

static int trains_a_twin(tsh_ctx *ctx, void *user) {
    twin *t = (twin *)user;
    const tsh_init init = {.kind = TSH_INIT_UNIFORM, .a = 0.5, .b = 1.5};
    const tsh_layout sharded = tsh_sharded(t->cut == 2), fused = tsh_shard_segments(1, 3, 2);
    const tsh_param_desc desc = {
        .init = init, .layout = t->cut == 1 || t->cut == 2 ? &sharded : NULL, .dtype = t->dtype};
    const tsh_plan_rule plan = {.path = "p", .style = TSH_COLWISE, .segments = 3, .unit = 2};
    tsh_module *root = tsh_root(ctx);
    tsh_tensor *p = tsh_add_param(root, "p", tsh_shape2(ROWS, COLUMNS), &desc), *copy;
    tsh_optim *optim;
    capture now;
    int step, e;
    (void)fused;
    if (t->dtype == TSH_REAL) { /* starts from bf16 values, too */
        tsh_materialize(root);
        copy = tsh_keep(tsh_cast(tsh_detach(p), TSH_BF16));
        copy = tsh_keep(tsh_cast(copy, TSH_REAL));
        CHECK(tsh_write(ctx, p, TSH_LOCAL, tsh_data(ctx, copy),
                        (size_t)tsh_local_numel(p) * sizeof(tsh_real)) == TSH_OK, "write");
        tsh_tensor_free(copy);
    }
    optim = tsh_optim_new(root, &t->optim);
    for (step = 0; step < STEPS; step++) {
        if (t->cut == 3 && step == STEPS / 2) CHECK(tsh_parallelize(root, &plan, 1) == TSH_OK, "");
        CHECK(tsh_backward(ctx, twin_loss(ctx, p, step)) == TSH_OK, "backward");
        CHECK(tsh_optim_step(optim) == TSH_OK, "step %d", step);
        tsh_zero_grads(root);
        (void)tsh_step_end(ctx);
        memset(&now, 0, sizeof now);
        CHECK(!capture_add(ctx, &now, p), "values");
        for (e = 0; e < ROWS * COLUMNS; e++) {
            double *want = &t->values[step * ROWS * COLUMNS + e];
            const double got = now.values[0][e];
            if (t->dtype == TSH_REAL && tsh_world(ctx)->rank == 0) *want = got;
            if (t->dtype == TSH_REAL) continue;
            CHECK(fabs(got - *want) <= t->worst * fabs(*want), "step %d: [%d] is %.9g, not %.9g",
                  step, e, got, *want);
        }
        capture_free(&now);
    }
    CHECK(tsh_check_replicas(root), "replicas");
    CHECK_OK();
    return 0;
}

static void small_steps_are_not_lost(void **state) {
    static const tsh_optim_desc descs[] = {
        {.kind = TSH_SGD, .lr = 0.1},
        {.kind = TSH_SGD, .lr = 0.01, .momentum = 0.9, .nesterov = 1, .weight_decay = 0.01},
        {.kind = TSH_ADAM, .lr = 1e-4},
        {.kind = TSH_ADAMW, .lr = 1e-4, .weight_decay = 0.1, .clip_norm = 0.01},
    };
    static double values[STEPS * ROWS * COLUMNS];
    int i, k, e;
    (void)state;
    for (i = 0; i < COUNT(descs); i++) {
        twin t = {.optim = descs[i], .dtype = TSH_REAL, .values = values};
        double gone = 0, most = 0;
        ranks_run_at(RANKS_EACH, 1, NULL, trains_a_twin, &t);
        for (e = 0; e < ROWS * COLUMNS; e++) {
            const double far = fabs(values[(STEPS - 1) * ROWS * COLUMNS + e] - values[e]);
            const double step = fabs(values[ROWS * COLUMNS + e] - values[e]);
            gone = fmax(gone, far);
            most = fmax(most, step);
        }
        assert_true(gone > 1.0 / 256); /* more than half an ulp of a bf16 ... */
        assert_true(most < 1.0 / 512); /* ... by steps that each would be rounded away */
        t.dtype = TSH_BF16;
        t.worst = 1.0 / 256 + 1e-5; /* rounding of the value that is shown, nothing more */
        for (k = 0; k < COUNT(ranks_degrees) && ranks_degrees[k] <= 4; k++)
            for (t.cut = 0; t.cut < 4; t.cut++) ranks_run(ranks_degrees[k], trains_a_twin, &t);
    }
}

/* What a program writes is the exact weight: no bits of an older one are left. */
static int writes(tsh_ctx *ctx, void *user) {
    const tsh_optim_desc sgd = {.kind = TSH_SGD, .lr = 1e-4};
    const tsh_init one = {.kind = TSH_INIT_CONSTANT, .a = 1};
    const uint16_t ones[4] = {0x3F80, 0x3F80, 0x3F80, 0x3F80};
    const tsh_param_desc desc = {.init = one, .dtype = TSH_BF16};
    tsh_tensor *p = tsh_add_param(tsh_root(ctx), "p", tsh_shape1(4), &desc);
    tsh_optim *optim = tsh_optim_new(tsh_root(ctx), &sgd);
    int way, i, moved[3] = {0, 0, 0};
    (void)user;
    /* steps of 1e-4: the value moves at the 20th, where 1 - 0.002 is nearer to 0.99609375 */
    for (way = 0; way < 3; way++) {
        for (i = 0; i < 40 && !moved[way]; i++) {
            CHECK(tsh_backward(ctx, tsh_sum(p, TSH_ALL, 0)) == TSH_OK, "backward");
            (void)tsh_optim_step(optim);
            tsh_zero_grads(tsh_root(ctx));
            (void)tsh_step_end(ctx);
            if (memcmp(tsh_data(ctx, p), ones, sizeof ones) != 0) moved[way] = i + 1;
        }
        CHECK(moved[way] == moved[0] && moved[0] > 10, "way %d: at step %d", way, moved[way]);
        if (way == 0) CHECK(tsh_write(ctx, p, TSH_GLOBAL, ones, sizeof ones) == TSH_OK, "write");
        if (way == 1) CHECK(tsh_init_constant(p, &one) == TSH_OK, "init");
    }
    CHECK(tsh_reset_parameters(tsh_root(ctx)) == TSH_OK, "reset");
    CHECK(memcmp(tsh_data(ctx, p), ones, sizeof ones) == 0, "values");
    CHECK_OK();
    return 0;
}

static void written_values_are_exact(void **state) {
    (void)state;
    ranks_run(1, writes, NULL);
    ranks_run(2, writes, NULL);
}

/* A row that max_norm scales again and again, by less than bf16 could show, goes where it must. */
static int renorms(tsh_ctx *ctx, void *user) {
    const tsh_optim_desc sgd = {.kind = TSH_SGD, .lr = 0.0012};
    const tsh_init init = {.kind = TSH_INIT_CONSTANT, .a = 0.5};
    const tsh_embedding_desc desc = {
        .count = 3, .dim = 4, .init = init, .lookup = {.max_norm = 1}, .dtype = TSH_BF16};
    tsh_module *table = tsh_add_embedding(tsh_root(ctx), "table", &desc);
    tsh_optim *optim = tsh_optim_new(tsh_root(ctx), &sgd);
    int i;
    (void)user;
    for (i = 0; i < 30; i++) {
        tsh_tensor *ids = tsh_arange(ctx, TSH_I32, 0, 2, 1);
        tsh_tensor *y = tsh_cast(tsh_forward(table, ids), TSH_REAL);
        CHECK(tsh_backward(ctx, tsh_neg(tsh_sum(y, TSH_ALL, 0))) == TSH_OK, "backward");
        (void)tsh_optim_step(optim);
        tsh_zero_grads(tsh_root(ctx));
        (void)tsh_step_end(ctx);
    }
    CHECK_OK();
    return 0;
}

static void max_norm_keeps_exact_weights(void **state) {
    (void)state;
    ranks_run(1, renorms, NULL);
}

/* ------------------------------------------------------------ a GPT */

typedef struct training {
    tsh_dtype dtype, grads, moments;
    int sequence, checkpoint, groups, inexact;
    double clip, last; /* last: loss of the last step */
    uint64_t hash[8];  /* of some parameters afterwards */
} training;

enum { GPT_STEPS = 12 };

static int trains(tsh_ctx *ctx, void *user) {
    training *t = (training *)user, own = *t;
    const tsh_optim_desc adamw = {.kind = TSH_ADAMW,
                                  .lr = 0.01,
                                  .weight_decay = 0.1,
                                  .clip_norm = t->clip,
                                  .grad_dtype = t->grads,
                                  .moments_dtype = t->moments,
                                  .round_weights = t->inexact};
    const tsh_shape shape = tsh_shape2(GPT_BATCH, GPT_CONTEXT);
    tsh_tensor *ids = tsh_tensor_new(ctx, TSH_I32, shape, tsh_replicated());
    tsh_tensor *targets = tsh_tensor_new(ctx, TSH_I32, shape, tsh_replicated());
    tsh_module *gpt = gpt_add(ctx);
    tsh_optim *optim;
    int step, i;
    for (i = 0; i < GPT_LAYERS; i++)
        tsh_checkpoint(tsh_child(tsh_find(gpt, "h"), i), t->checkpoint);
    tsh_parallelize(gpt, t->sequence ? gpt_sequence_plan : gpt_plan,
                    t->sequence ? GPT_SEQUENCE_RULES : GPT_RULES);
    optim = tsh_optim_new(gpt, &adamw);
    if (t->groups) CHECK(tsh_optim_group(optim, "**.bias", 0, 0) == TSH_OK, "group");
    for (step = 0; step < GPT_STEPS; step++)
        own.last = gpt_step(ctx, optim, ids, targets, step % 3);
    CHECK(isfinite(own.last), "loss %g", own.last);
    CHECK(tsh_check_replicas(gpt), "replicas");
    own.hash[0] = tsh_hash(ctx, tsh_param(gpt, "wte.weight"));
    own.hash[1] = tsh_hash(ctx, tsh_param(gpt, "h.0.attn.c_attn.weight"));
    own.hash[2] = tsh_hash(ctx, tsh_param(gpt, "h.1.ln_2.weight"));
    own.hash[3] = tsh_hash(ctx, tsh_param(gpt, "h.1.mlp.c_fc.bias"));
    if (tsh_world(ctx)->rank == 0) *t = own;
    CHECK_OK();
    return 0;
}

static void run_training(int ranks, training *t) {
    const tsh_desc desc = {.seed = 3, .dtype = t->dtype};
    ranks_run_at(RANKS_EACH, ranks, &desc, trains, t);
}

static void losses_are_those_of_float(void **state) {
    training plain = {.clip = 1};
    int i, kind;
    (void)state;
    run_training(1, &plain);
    if (!(plain.last < 4)) fail_msg("loss %g", plain.last);
    for (i = 0; i < COUNT(ranks_degrees) && ranks_degrees[i] <= 4; i++)
        for (kind = 0; kind < 5; kind++) {
            training half = {.dtype = TSH_BF16, .clip = 1, .sequence = kind == 1};
            if (kind >= 2) half.grads = half.moments = TSH_BF16;
            half.checkpoint = kind == 3;
            half.inexact = kind == 4;
            if (half.sequence && GPT_CONTEXT % ranks_degrees[i]) continue;
            run_training(ranks_degrees[i], &half);
            if (!(fabs(half.last - plain.last) <= 0.03 * plain.last))
                fail_msg("%d ranks, kind %d: loss %g, not near %g", ranks_degrees[i], kind,
                         half.last, plain.last);
        }
}

/* Checkpoints change no bit; neither do groups that stand still. */
static void checkpoints_change_no_bit(void **state) {
    int i, pure;
    (void)state;
    for (i = 1; i <= 3; i++)
        for (pure = 0; pure < 2; pure++) {
            training a = {.dtype = TSH_BF16, .groups = pure}, b;
            if (pure) a.grads = a.moments = TSH_BF16;
            b = a;
            b.checkpoint = 1;
            run_training(i, &a);
            run_training(i, &b);
            assert_memory_equal(a.hash, b.hash, sizeof a.hash);
        }
}

/* ------------------------------------------------------------ gradients and moments in bf16 */

typedef struct drawn {
    int cut, micro, inexact;
    uint64_t hash[STEPS];
    double off; /* mean of what values are off from the float twin's */
    const double *values;
} drawn;

/* The same loss as above at any degree: noise that is keyed by global index gives the same bits. */
static int draws(tsh_ctx *ctx, void *user) {
    drawn *d = (drawn *)user;
    const tsh_optim_desc adam = {.kind = TSH_ADAM,
                                 .lr = 1e-3,
                                 .grad_dtype = TSH_BF16,
                                 .moments_dtype = TSH_BF16,
                                 .round_weights = d->inexact};
    const tsh_init init = {.kind = TSH_INIT_UNIFORM, .a = 0.5, .b = 1.5};
    const tsh_layout sharded = tsh_sharded(d->cut == 2);
    const tsh_param_desc desc = {
        .init = init, .layout = d->cut ? &sharded : NULL, .dtype = TSH_BF16};
    tsh_tensor *p = tsh_add_param(tsh_root(ctx), "p", tsh_shape2(ROWS, COLUMNS), &desc);
    tsh_optim *optim = tsh_optim_new(tsh_root(ctx), &adam);
    const tsh_backward_desc defer = {.defer = 1};
    int step;
    for (step = 0; step < 12; step++) {
        uint64_t hash;
        CHECK(tsh_backward_with(ctx, twin_loss(ctx, p, step), d->micro ? &defer : NULL) == TSH_OK,
              "backward");
        if (d->micro) CHECK(tsh_backward_with(ctx, twin_loss(ctx, p, 99 + step), NULL) == TSH_OK,
                            "the second");
        CHECK(tsh_dtype_of(tsh_grad(p)) == TSH_BF16, "the gradient's dtype");
        hash = tsh_hash(ctx, tsh_grad(p));
        CHECK(tsh_optim_step(optim) == TSH_OK, "step %d", step);
        tsh_zero_grads(tsh_root(ctx));
        (void)tsh_step_end(ctx);
        hash = hash * 31 + tsh_hash(ctx, p);
        if (tsh_world(ctx)->size == 1 && !d->cut && tsh_world(ctx)->rank == 0)
            d->hash[step] = hash;
        CHECK(hash == d->hash[step], "step %d: other bits", step);
    }
    CHECK(tsh_check_replicas(tsh_root(ctx)), "replicas");
    CHECK_OK();
    return 0;
}

static void rounding_at_random_is_the_same_everywhere(void **state) {
    int i, threads;
    (void)state;
    for (i = 0; i < 4; i++) {
        drawn d = {.micro = i % 2, .inexact = i / 2};
        int k;
        ranks_run_at(RANKS_EACH, 1, NULL, draws, &d);
        for (k = 0; k < COUNT(ranks_degrees) && ranks_degrees[k] <= 4; k++)
            for (threads = 1; threads <= 3; threads++)
                for (d.cut = 0; d.cut < 3; d.cut++) {
                    const tsh_desc desc = {.threads = threads};
                    ranks_run_with(ranks_degrees[k], &desc, draws, &d);
                }
    }
}

/* Without exact weights, steps of a tenth of an ulp still move the mean as far as they should. */
static int wanders(tsh_ctx *ctx, void *user) {
    enum { LONG = 4000, MANY = 40 };
    const tsh_optim_desc sgd = {.kind = TSH_SGD, .lr = 1.0 / 2560, .round_weights = 1};
    const tsh_param_desc desc = {
        .init = {.kind = TSH_INIT_CONSTANT, .a = 1.5}, .dtype = TSH_BF16};
    tsh_tensor *p = tsh_add_param(tsh_root(ctx), "p", tsh_shape1(LONG), &desc);
    tsh_optim *optim = tsh_optim_new(tsh_root(ctx), &sgd);
    double mean;
    int i;
    (void)user;
    for (i = 0; i < MANY; i++) {
        CHECK(tsh_backward(ctx, tsh_sum(tsh_cast(p, TSH_REAL), TSH_ALL, 0)) == TSH_OK, "backward");
        (void)tsh_optim_step(optim);
        tsh_zero_grads(tsh_root(ctx));
        (void)tsh_step_end(ctx);
    }
    mean = tsh_item(ctx, tsh_mean(tsh_cast(tsh_detach(p), TSH_REAL), TSH_ALL, 0));
    CHECK(fabs(mean - (1.5 - MANY / 2560.0)) < 1e-3, "mean %g", mean);
    CHECK(tsh_mem_stats(ctx).now[TSH_MEM_PARAMETERS] < 2 * LONG + 256, "no exact weights");
    CHECK(tsh_check_replicas(tsh_root(ctx)), "replicas");
    CHECK_OK();
    return 0;
}

static void rounded_weights_move_on_average(void **state) {
    (void)state;
    ranks_run(1, wanders, NULL);
    ranks_run(2, wanders, NULL);
}

/* ------------------------------------------------------------ steps that are left out, memory */

static int skips(tsh_ctx *ctx, void *user) {
    const tsh_optim_desc descs[2] = {
        {.kind = TSH_ADAM}, {.kind = TSH_ADAM, .grad_dtype = TSH_BF16, .moments_dtype = TSH_BF16}};
    const tsh_param_desc desc = {.init = {.kind = TSH_INIT_ONES}, .dtype = TSH_BF16};
    tsh_tensor *p = tsh_add_param(tsh_root(ctx), "p", tsh_shape1(40), &desc);
    tsh_optim *optim = tsh_optim_new(tsh_root(ctx), &descs[*(const int *)user]);
    uint64_t before;
    tsh_materialize(tsh_root(ctx));
    before = tsh_hash(ctx, p);
    CHECK(tsh_backward(ctx, tsh_sum(tsh_scale(p, (double)INFINITY), TSH_ALL, 0)) == TSH_OK, "");
    CHECK(tsh_optim_step(optim) == TSH_OK, "step");
    CHECK(tsh_optim_state(optim).skipped == 1 && tsh_optim_state(optim).steps == 0, "skipped");
    CHECK(tsh_hash(ctx, p) == before, "values");
    tsh_zero_grads(tsh_root(ctx));
    CHECK(tsh_backward(ctx, tsh_sum(tsh_scale(p, 3), TSH_ALL, 0)) == TSH_OK, "backward");
    CHECK(tsh_optim_step(optim) == TSH_OK && tsh_optim_state(optim).steps == 1, "goes on");
    CHECK(fabs(tsh_optim_state(optim).norm - 3 * sqrt(40.0)) < 1e-3 * (BOTH_DOUBLE ? 1e-9 : 1),
          "norm %g", tsh_optim_state(optim).norm);
    CHECK_OK();
    return 0;
}

static void infinite_steps_are_left_out(void **state) {
    int pure;
    (void)state;
    for (pure = 0; pure < 2; pure++) {
        ranks_run(1, skips, &pure);
        ranks_run(3, skips, &pure);
    }
}

static int holds(tsh_ctx *ctx, void *user) {
    enum { N = 128 };
    const int pure = *(const int *)user;
    const tsh_linear_desc linear = {.in = N, .out = N, .bias = TSH_NO, .dtype = TSH_BF16};
    tsh_optim_desc adam = {.kind = TSH_ADAM};
    const size_t n = N * N, slack = 256; /* headers of blocks */
    tsh_module *m = tsh_add_linear(tsh_root(ctx), "a", &linear);
    tsh_optim *optim;
    tsh_mem mem;
    uint64_t calls = 0;
    int step;
    if (pure) adam.grad_dtype = adam.moments_dtype = TSH_BF16;
    optim = tsh_optim_new(tsh_root(ctx), &adam);
    for (step = 0; step < 120; step++) {
        tsh_tensor *x = tsh_cast(tsh_randn(ctx, tsh_shape2(2, N)), TSH_BF16);
        tsh_tensor *y = tsh_cast(tsh_forward(m, x), TSH_REAL);
        CHECK(tsh_backward(ctx, tsh_sum(y, TSH_ALL, 0)) == TSH_OK, "backward");
        (void)tsh_optim_step(optim);
        (void)tsh_step_end(ctx);
        CHECK(tsh_mem_stats(ctx).step_live <= (pure ? 2 : sizeof(tsh_real)) * n + slack, "%zu",
              tsh_mem_stats(ctx).step_live);
        tsh_zero_grads(tsh_root(ctx));
        if (step == 100) calls = tsh_mem_stats(ctx).calls;
    }
    mem = tsh_mem_stats(ctx);
    CHECK(mem.calls == calls, "the allocator is called no more");
    CHECK(mem.now[TSH_MEM_PARAMETERS] <= 4 * n + slack, "%zu", mem.now[TSH_MEM_PARAMETERS]);
    CHECK(mem.now[TSH_MEM_GRADIENTS] == 0 && mem.step_live == 0, "gradients are given back: %zu",
          mem.step_live);
    CHECK(mem.now[TSH_MEM_OPTIMISER] <= 2 * (pure ? 2 : sizeof(tsh_real)) * n + slack, "%zu",
          mem.now[TSH_MEM_OPTIMISER]);
    CHECK(mem.now[TSH_MEM_OPTIMISER] >= 4 * n, "%zu", mem.now[TSH_MEM_OPTIMISER]);
    CHECK_OK();
    return 0;
}

static void memory_is_as_promised(void **state) {
    int pure;
    (void)state;
    for (pure = 0; pure < 2; pure++) ranks_run_at(RANKS_FIRST, 1, NULL, holds, &pure);
}

/* ------------------------------------------------------------ the gradient check */

static tsh_tensor *check_loss(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {
    tsh_tensor *x = tsh_cast(tsh_arange(ctx, TSH_F32, -3, 3, 0.5), TSH_REAL);
    tsh_tensor *y = tsh_forward((tsh_module *)user, tsh_reshape(x, tsh_shape2(3, 4)));
    (void)in, (void)n;
    return tsh_full_tensor(tsh_sum(tsh_mul(y, y), TSH_ALL, 0));
}

static int checks(tsh_ctx *ctx, void *user) {
    const tsh_linear_desc linear = {.in = 4, .out = 6};
    tsh_module *m = tsh_add_linear(tsh_root(ctx), "a", &linear);
    tsh_tensor *in[2];
    double off;
    (void)user;
    in[0] = tsh_param(m, "weight");
    in[1] = tsh_param(m, "bias");
    CHECK(is_of(m, "weight", TSH_BF16), "bf16 at first");
    CHECK(tsh_gradcheck(ctx, check_loss, in, 2, m, 0, 0) < 0, "bf16 is too coarse");
    CHECK_SAYS(TSH_ERR_DTYPE, "too coarse for differences");
    CHECK(tsh_to(m, TSH_REAL) == TSH_OK, "the twin");
    off = tsh_gradcheck(ctx, check_loss, in, 2, m, 0, 0);
    CHECK(off >= 0 && off < 0.01, "%g", off);
    CHECK_OK();
    return 0;
}

static void the_twin_is_checked(void **state) {
    const tsh_desc desc = {.dtype = TSH_BF16};
    (void)state;
    ranks_run_with(1, &desc, checks, NULL);
    ranks_run_with(2, &desc, checks, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(descriptions_say_it),
        cmocka_unit_test(values_are_rounded_once_whenever),
        cmocka_unit_test(wrong_uses_are_sentences),
        cmocka_unit_test(small_steps_are_not_lost),
        cmocka_unit_test(written_values_are_exact),
        cmocka_unit_test(max_norm_keeps_exact_weights),
        cmocka_unit_test(losses_are_those_of_float),
        cmocka_unit_test(checkpoints_change_no_bit),
        cmocka_unit_test(rounding_at_random_is_the_same_everywhere),
        cmocka_unit_test(rounded_weights_move_on_average),
        cmocka_unit_test(infinite_steps_are_left_out),
        cmocka_unit_test(memory_is_as_promised),
        cmocka_unit_test(the_twin_is_checked),
    };
    return cmocka_run_group_tests_name("half", tests, NULL, NULL);
}
