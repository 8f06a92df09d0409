/* tsh_freeze: frozen parameters stay as they are, without gradients and moments, and backward does
 * not go below the lowest trained one; what is trained gets the bits that it gets in a model
 * without frozen parameters, at every degree of tp, dp and pp. */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../support/files.h"

enum { VOCAB = 11, DIM = 12, HIDDEN = 20, OUT = 5, ROWS = 6 };

static const tsh_plan_rule plan[] = {{.path = "embed", .style = TSH_ROWWISE},
                                     {.path = "h.*.up", .style = TSH_COLWISE},
                                     {.path = "h.*.down", .style = TSH_ROWWISE}};

static tsh_tensor *block(tsh_module *module, tsh_tensor **in, int n, void *user) {
    tsh_tensor *y = tsh_forward(tsh_find(module, "norm"), in[0]);
    (void)n, (void)user;
    y = tsh_gelu(tsh_forward(tsh_find(module, "up"), y));
    return tsh_add(in[0], tsh_forward(tsh_find(module, "down"), y));
}

/* Two blocks between an embedding and a head, and their plan. */
static tsh_module *add_net(tsh_ctx *ctx) {
    const tsh_linear_desc up = {.in = DIM, .out = HIDDEN}, down = {.in = HIDDEN, .out = DIM};
    const tsh_linear_desc head = {.in = DIM, .out = OUT};
    const tsh_layer_norm_desc norm = {.dim = DIM};
    const tsh_embedding_desc table = {.count = VOCAB, .dim = DIM};
    const tsh_module_desc own = {.forward = block};
    tsh_module *root = tsh_root(ctx), *h;
    tsh_add_embedding(root, "embed", &table);
    h = tsh_add_module(root, "h", NULL);
    for (int i = 0; i < 2; i++) {
        tsh_module *m = tsh_add_module(h, i ? "1" : "0", &own);
        tsh_add_layer_norm(m, "norm", &norm);
        tsh_add_linear(m, "up", &up);
        tsh_add_linear(m, "down", &down);
    }
    tsh_add_linear(root, "head", &head);
    tsh_parallelize(root, plan, COUNT(plan));
    tsh_materialize(root);
    return root;
}

static tsh_tensor *net_ids(tsh_ctx *ctx, int step) {
    int32_t ids[ROWS];
    for (int i = 0; i < ROWS; i++)
        ids[i] = (int32_t)(ranks_mix(5, (uint64_t)(step * 31 + i)) % VOCAB);
    return tsh_from(ctx, ids, tsh_shape1(ROWS), TSH_I32);
}

static tsh_tensor *loss_of(tsh_tensor *y) {
    return tsh_mean(tsh_mul(y, y), TSH_ALL, 0);
}

static tsh_tensor *net_loss(tsh_ctx *ctx, int step) {
    tsh_module *root = tsh_root(ctx);
    tsh_tensor *x = tsh_forward(tsh_find(root, "embed"), net_ids(ctx, step));
    return loss_of(tsh_forward(tsh_find(root, "head"), tsh_forward(tsh_find(root, "h"), x)));
}

static uint64_t hash_of(tsh_ctx *ctx, const char *path) {
    return tsh_hash(ctx, tsh_param(tsh_root(ctx), path));
}

/* ------------------------------------------------------------ gradients and memory */

static const char *const watched[] = {"head.weight", "head.bias", "h.1.up.weight", "h.1.down.bias",
                                      "h.0.norm.weight"};

/* Hashes of the watched gradients; 0 where there is none. */
static void grads_of(tsh_ctx *ctx, uint64_t *hash) {
    for (int i = 0; i < COUNT(watched); i++) {
        tsh_tensor *g = tsh_grad(tsh_param(tsh_root(ctx), watched[i]));
        hash[i] = g ? tsh_hash(ctx, g) : 0;
    }
}

/* Gradients with all but `from` watched ones frozen, against those without. */
static int gradients(tsh_ctx *ctx, void *user) {
    static const char *const frozen[] = {"**", "h.0.**", "**.weight"};
    uint64_t want[COUNT(watched)], got[COUNT(watched)];
    const int checkpoint = *(const int *)user;
    tsh_module *root = add_net(ctx);
    tsh_checkpoint(tsh_find(root, "h.0"), checkpoint);
    CHECK_TRUE(tsh_backward(ctx, net_loss(ctx, 0)) == TSH_OK);
    grads_of(ctx, want);
    for (int k = 0; k < COUNT(frozen); k++) {
        tsh_zero_grads(root);
        (void)tsh_step_end(ctx);
        CHECK_TRUE(tsh_freeze(root, frozen[k]) == TSH_OK);
        if (k == 0) CHECK_TRUE(tsh_unfreeze(root, "head.*") == TSH_OK);
        CHECK_TRUE(tsh_backward(ctx, net_loss(ctx, 0)) == TSH_OK);
        grads_of(ctx, got);
        for (int i = 0; i < COUNT(watched); i++) {
            const int trained = k == 0   ? i < 2
                                : k == 1 ? i < 4
                                         : strstr(watched[i], "weight") == NULL;
            CHECK(trained ? got[i] == want[i] : !got[i], "%s, %s", frozen[k], watched[i]);
        }
        CHECK_TRUE(tsh_unfreeze(root, "**") == TSH_OK);
    }
    CHECK_OK();
    return 0;
}

static void gradients_are_those_of_a_model_without_frozen_ones(void **state) {
    (void)state;
    for (int d = 0; d < COUNT(ranks_degrees); d++)
        for (int checkpoint = 0; checkpoint < 2; checkpoint++)
            ranks_run(ranks_degrees[d], gradients, &checkpoint);
}

/* Collectives of tp in backward, and memory, with everything but the head frozen. */
static int costs(tsh_ctx *ctx, void *user) {
    tsh_module *root = add_net(ctx);
    const tsh_optim_desc adamw = {.kind = TSH_ADAMW, .weight_decay = 0.1};
    tsh_optim *optim = tsh_optim_new(root, &adamw);
    size_t gradients, moments;
    uint64_t calls;
    tsh_tensor *loss;
    (void)user;
    CHECK_TRUE(tsh_backward(ctx, net_loss(ctx, 0)) == TSH_OK && tsh_optim_step(optim) == TSH_OK);
    gradients = tsh_mem_stats(ctx).now[TSH_MEM_GRADIENTS];
    moments = tsh_mem_stats(ctx).now[TSH_MEM_OPTIMISER];
    (void)tsh_step_end(ctx);
    CHECK_TRUE(gradients > 0 && moments > 0);
    CHECK_TRUE(tsh_freeze(root, "**") == TSH_OK);
    CHECK(tsh_mem_stats(ctx).now[TSH_MEM_GRADIENTS] == 0, "%zu bytes of gradients",
          tsh_mem_stats(ctx).now[TSH_MEM_GRADIENTS]);
    CHECK(tsh_mem_stats(ctx).now[TSH_MEM_OPTIMISER] == 0, "%zu bytes of moments",
          tsh_mem_stats(ctx).now[TSH_MEM_OPTIMISER]);
    CHECK_TRUE(tsh_unfreeze(root, "head.weight") == TSH_OK);
    loss = net_loss(ctx, 1);
    calls = tsh_tp(ctx)->stats.calls[TSH_ALLREDUCE];
    CHECK_TRUE(tsh_backward(ctx, loss) == TSH_OK);
    CHECK(tsh_tp(ctx)->stats.calls[TSH_ALLREDUCE] == calls, "backward ends at the head");
    CHECK_TRUE(tsh_optim_step(optim) == TSH_OK);
    CHECK(tsh_mem_stats(ctx).now[TSH_MEM_GRADIENTS] < gradients / 2, "one weight's");
    CHECK(tsh_mem_stats(ctx).now[TSH_MEM_OPTIMISER] < moments / 2, "one weight's");
    (void)tsh_step_end(ctx);
    CHECK_OK();
    return 0;
}

static void frozen_parameters_cost_no_memory_and_no_work(void **state) {
    (void)state;
    for (int d = 0; d < COUNT(ranks_degrees); d++) ranks_run(ranks_degrees[d], costs, NULL);
}

/* The most step memory of a backward through a linear layer, which user says to freeze or not. */
static size_t live_peak[2];

static int saved(tsh_ctx *ctx, void *user) {
    const tsh_linear_desc layer = {.in = 4096, .out = 8, .bias = TSH_NO};
    const tsh_shape shape = tsh_shape2(64, 4096);
    tsh_module *m = tsh_add_linear(tsh_root(ctx), "layer", &layer);
    tsh_tensor *x = tsh_tensor_new(ctx, TSH_REAL, shape, tsh_replicated()), *y;
    const int frozen = *(const int *)user;
    CHECK_TRUE(tsh_requires_grad(x, 1));
    if (frozen) CHECK_TRUE(tsh_freeze(m, "weight") == TSH_OK);
    y = tsh_forward(m, tsh_scale(x, 2));
    CHECK_TRUE(tsh_backward(ctx, tsh_sum(y, TSH_ALL, 0)) == TSH_OK);
    live_peak[frozen] = tsh_mem_stats(ctx).step_live_peak;
    return 0;
}

static void the_input_of_a_frozen_layer_is_not_saved(void **state) {
    (void)state;
    for (int frozen = 0; frozen < 2; frozen++) ranks_run(1, saved, &frozen);
    /* X is released before the memory of dX is needed; the rest is a few numbers */
    if (live_peak[1] + 60 * 4096 * sizeof(tsh_real) > live_peak[0])
        fail_msg("%zu bytes, %zu without", live_peak[0], live_peak[1]);
}

/* -------------------------------------------------------------------- training */

typedef struct course {
    int tp, zero, micro;
    tsh_dtype dtype;
} course;

/* Three steps with a frozen block, then three with the head frozen in its place. */
static int trains(tsh_ctx *ctx, void *user) {
    const course *c = (const course *)user;
    const tsh_optim_desc adamw = {
        .kind = TSH_ADAMW, .lr = 0.01, .weight_decay = 0.1, .clip_norm = 1, .zero = c->zero};
    tsh_module *root = add_net(ctx);
    tsh_optim *optim;
    uint64_t block0, head, up;
    double norm = 0;
    if (c->dtype) CHECK_TRUE(tsh_to(root, c->dtype) == TSH_OK);
    optim = tsh_optim_new(root, &adamw);
    for (int half = 0; half < 2; half++) {
        CHECK_TRUE(tsh_unfreeze(root, "**") == TSH_OK);
        CHECK_TRUE(tsh_freeze(root, half ? "head.*" : "h.0.**") == TSH_OK);
        block0 = hash_of(ctx, "h.0.down.weight");
        head = hash_of(ctx, "head.weight");
        up = hash_of(ctx, "h.1.up.weight");
        for (int step = 0; step < 3; step++) {
            for (int m = 0; m < c->micro; m++) {
                const tsh_backward_desc how = {.defer = m < c->micro - 1};
                tsh_tensor *loss = net_loss(ctx, step * 5 + m + tsh_dp(ctx)->rank);
                CHECK_TRUE(tsh_backward_with(ctx, loss, &how) == TSH_OK);
                (void)tsh_step_end(ctx);
            }
            CHECK_TRUE(tsh_clip_grad_norm(root, 10, &norm) == TSH_OK && norm > 0);
            CHECK_TRUE(tsh_optim_step(optim) == TSH_OK);
            tsh_zero_grads(root);
            (void)tsh_step_end(ctx);
        }
        CHECK((hash_of(ctx, "h.0.down.weight") == block0) == !half, "the first block");
        CHECK((hash_of(ctx, "head.weight") == head) == half, "the head");
        CHECK_TRUE(hash_of(ctx, "h.1.up.weight") != up);
        CHECK_TRUE(tsh_check_replicas(root));
    }
    CHECK_OK();
    return 0;
}

static void frozen_parameters_stay_through_training(void **state) {
    static const course courses[] = {{1, 0, 1, TSH_DTYPE_DEFAULT},
                                     {2, 0, 2, TSH_DTYPE_DEFAULT},
                                     {1, 1, 2, TSH_DTYPE_DEFAULT},
                                     {2, 1, 1, TSH_BF16},
                                     {1, 0, 1, TSH_BF16}};
    (void)state;
    for (int k = 0; k < COUNT(courses); k++)
        for (int dp = 1; dp <= 3; dp++) {
            course c = courses[k];
            const tsh_desc desc = {.tp = c.tp};
            ranks_run_with(c.tp * dp, &desc, trains, &c);
        }
}

/* A classifier tied to the embedding: frozen under one name, it is so in both layers. */
static int tied(tsh_ctx *ctx, void *user) {
    const tsh_embedding_desc table = {.count = VOCAB, .dim = DIM};
    tsh_module *root = tsh_root(ctx), *e = tsh_add_embedding(root, "embed", &table);
    tsh_classifier_desc head = {.in = DIM, .classes = VOCAB};
    tsh_module *c;
    tsh_tensor *y;
    (void)user;
    head.weight = tsh_param(e, "weight");
    c = tsh_add_classifier(root, "head", &head);
    CHECK_TRUE(tsh_freeze(c, "head.weight") == TSH_ERR_ARGUMENT);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "tsh_freeze: \"head.weight\" matches no parameter");
    CHECK_TRUE(tsh_freeze(root, "embed.weight") == TSH_OK);
    y = tsh_forward(c, tsh_forward(e, net_ids(ctx, 0)));
    CHECK_TRUE(tsh_backward(ctx, loss_of(y)) == TSH_OK);
    CHECK_TRUE(!tsh_grad(head.weight) && tsh_grad(tsh_param(c, "bias")));
    CHECK_OK();
    return 0;
}

static void a_tied_parameter_is_frozen_in_all_its_layers(void **state) {
    (void)state;
    ranks_run(1, tied, NULL);
    ranks_run(2, tied, NULL);
}

static tsh_tensor *piped_input(tsh_ctx *ctx, int micro, void *user) {
    (void)user;
    return tsh_forward(tsh_find(tsh_root(ctx), "embed"), net_ids(ctx, micro));
}

static tsh_tensor *piped_loss(tsh_ctx *ctx, tsh_tensor *y, int micro, void *user) {
    (void)micro, (void)user;
    return loss_of(tsh_forward(tsh_find(tsh_root(ctx), "head"), y));
}

/* user: what is trained; the other stage's parameters are all frozen, or some of both. */
static int piped(tsh_ctx *ctx, void *user) {
    const char *const trained = (const char *)user;
    const tsh_pipeline_desc desc = {.micro_batches = 3, .input = piped_input, .loss = piped_loss};
    const tsh_optim_desc adamw = {.kind = TSH_ADAMW, .lr = 0.01};
    tsh_module *root = add_net(ctx);
    tsh_pipeline *pipeline;
    tsh_optim *optim;
    double first = 0, loss = 0;
    CHECK_TRUE(tsh_freeze(root, "**") == TSH_OK && tsh_unfreeze(root, trained) == TSH_OK);
    pipeline = tsh_pipeline_new(tsh_find(root, "h"), &desc);
    optim = tsh_optim_new(root, &adamw);
    for (int step = 0; step < 3; step++) {
        CHECK_TRUE(tsh_pipeline_train(pipeline, step ? &loss : &first) == TSH_OK);
        CHECK_TRUE(tsh_optim_step(optim) == TSH_OK);
        tsh_zero_grads(root);
        (void)tsh_step_end(ctx);
    }
    CHECK(loss < first, "%g, then %g", first, loss);
    CHECK_TRUE(tsh_check_replicas(root));
    CHECK_OK();
    return 0;
}

static void stages_of_a_pipeline_may_be_frozen(void **state) {
    static const char *const trained[] = {"head.*", "h.0.**", "h.*.up.*"};
    const tsh_desc desc = {.tp = 1, .pp = 2};
    (void)state;
    for (int k = 0; k < COUNT(trained); k++)
        ranks_run_with(2, &desc, piped, (void *)(uintptr_t)trained[k]);
}

/* ----------------------------------------------------------------------- files */

/* A run that goes on from a file has the bits of one that was not interrupted. */
static int resumed(tsh_ctx *ctx, void *user) {
    const tsh_optim_desc adamw = {.kind = TSH_ADAMW, .lr = 0.01};
    tsh_module *root = add_net(ctx);
    tsh_optim *optim;
    uint64_t want;
    char path[FILES_SIZE + 32];
    (void)user;
    (void)snprintf(path, sizeof path, "%s/run.safetensors", files_here);
    CHECK_TRUE(tsh_to(root, TSH_BF16) == TSH_OK && tsh_freeze(root, "h.**") == TSH_OK);
    optim = tsh_optim_new(root, &adamw);
    for (int step = 0; step < 4; step++) {
        if (step == 2) CHECK_TRUE(tsh_save(root, path, optim) == TSH_OK);
        CHECK_TRUE(tsh_backward(ctx, net_loss(ctx, step)) == TSH_OK);
        CHECK_TRUE(tsh_optim_step(optim) == TSH_OK);
        tsh_zero_grads(root);
        (void)tsh_step_end(ctx);
    }
    want = hash_of(ctx, "head.weight");
    CHECK_TRUE(tsh_load(root, path, optim) == TSH_OK);
    for (int step = 2; step < 4; step++) {
        CHECK_TRUE(tsh_backward(ctx, net_loss(ctx, step)) == TSH_OK);
        CHECK_TRUE(tsh_optim_step(optim) == TSH_OK);
        tsh_zero_grads(root);
        (void)tsh_step_end(ctx);
    }
    CHECK_TRUE(hash_of(ctx, "head.weight") == want);
    CHECK_OK();
    return 0;
}

static void a_run_with_frozen_parameters_resumes(void **state) {
    (void)state;
    ranks_run_at(RANKS_FIRST, 1, NULL, resumed, NULL);
    ranks_run_at(RANKS_FIRST, 2, NULL, resumed, NULL);
}

/* --------------------------------------------------------------- reports, errors */

static int reports(tsh_ctx *ctx, void *user) {
    tsh_module *root = add_net(ctx);
    char text[8192];
    size_t n;
    FILE *file = tmpfile();
    (void)user;
    CHECK_TRUE(file && tsh_freeze(root, "**") == TSH_OK && tsh_unfreeze(root, "head.*") == TSH_OK);
    CHECK_TRUE(tsh_summary(root, file) == TSH_OK);
    rewind(file);
    n = fread(text, 1, sizeof text - 1, file);
    text[n] = 0;
    (void)fclose(file);
    CHECK(strstr(text, " frozen\n"), "%s", text);
    CHECK(strstr(text, "; 65 are trained\n"), "%s", text);
    CHECK_OK();
    return 0;
}

static void the_summary_says_what_is_trained(void **state) {
    (void)state;
    ranks_run(1, reports, NULL);
    ranks_run(2, reports, NULL);
}

static int refuses(tsh_ctx *ctx, void *user) {
    tsh_module *root = add_net(ctx);
    tsh_tensor *loss;
    (void)user;
    CHECK_TRUE(tsh_freeze(NULL, "**") == TSH_ERR_ARGUMENT);
    CHECK_TRUE(tsh_freeze(root, NULL) == TSH_ERR_ARGUMENT);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "tsh_freeze: the pattern is NULL");
    CHECK_TRUE(tsh_unfreeze(root, "x.*") == TSH_ERR_ARGUMENT);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "tsh_unfreeze: \"x.*\" matches no parameter, the first of which "
                                 "is \"embed.weight\"");
    loss = net_loss(ctx, 0);
    CHECK_TRUE(loss && tsh_freeze(root, "**.bias") == TSH_ERR_STATE);
    CHECK_SAYS(TSH_ERR_STATE, "are recorded that use \"h.0.norm.bias\"; end the step first");
    (void)tsh_step_end(ctx);
    CHECK_TRUE(tsh_freeze(root, "h.0.**") == TSH_OK);
    CHECK_TRUE(tsh_to(tsh_find(root, "h.0"), TSH_F16) == TSH_OK);
    CHECK(tsh_optim_new(root, NULL), "f16 is fine for frozen parameters");
    CHECK_TRUE(tsh_unfreeze(root, "h.0.**") == TSH_ERR_DTYPE);
    CHECK_SAYS(TSH_ERR_DTYPE, "\"h.0.norm.weight\" is f16, whose range is too small to train");
    return 0;
}

static void mistakes_are_told(void **state) {
    (void)state;
    ranks_run(1, refuses, NULL);
}

/* Ranks that freeze different parameters are told before a collective goes wrong. */
static int differ(tsh_ctx *ctx, void *user) {
    tsh_module *root = add_net(ctx);
    (void)user;
    CHECK_TRUE(tsh_freeze(root, tsh_tp(ctx)->rank ? "head.*" : "head.bias") == TSH_OK);
    CHECK_TRUE(tsh_backward(ctx, net_loss(ctx, 0)) != TSH_OK);
    CHECK_TRUE(ranks_says(ctx, TSH_ERR_MISMATCH, "frozen"));
    return 0;
}

static void ranks_must_freeze_the_same(void **state) {
    (void)state;
    ranks_run(3, differ, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_are_those_of_a_model_without_frozen_ones),
        cmocka_unit_test(frozen_parameters_cost_no_memory_and_no_work),
        cmocka_unit_test(the_input_of_a_frozen_layer_is_not_saved),
        cmocka_unit_test(frozen_parameters_stay_through_training),
        cmocka_unit_test(a_tied_parameter_is_frozen_in_all_its_layers),
        cmocka_unit_test(stages_of_a_pipeline_may_be_frozen),
        cmocka_unit_test_teardown(a_run_with_frozen_parameters_resumes, files_after),
        cmocka_unit_test(the_summary_says_what_is_trained),
        cmocka_unit_test(mistakes_are_told),
        cmocka_unit_test(ranks_must_freeze_the_same),
    };
    return cmocka_run_group_tests(tests, files_begin, files_end);
}
