/* Batch, group and instance norm as layers: several steps in training and one in evaluation as
 * PyTorch does them; files with PyTorch's names; plans; checkpoints, which count a batch once;
 * optimisers, which leave the running statistics alone. */
/* build: double */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/golden.h"
#include "../support/files.h"
#include "../support/ranks.h"

#include <float.h>

static int close_to(tsh_ctx *ctx, tsh_tensor *t, const golden_tensor *want, const char *what) {
    double *got = ranks_values(ctx, t);
    CHECK(got && tsh_numel(t) == want->count, "%s", what);
    for (int64_t i = 0; i < want->count; i++) {
        const double y = want->dtype == TSH_I64 ? (double)((const int64_t *)want->data)[i]
                                                : (double)((const float *)want->data)[i];
        CHECK(fabs(got[i] - y) <= 100 * (double)FLT_EPSILON * (fabs(y) > 1 ? fabs(y) : 1),
              "%s[%ld]: %.9g, not %.9g", what, (long)i, got[i], y);
    }
    free(got);
    return 0;
}

typedef struct steps_run {
    golden_file file;
    const char *name; /* "steps" or "average" */
    int cut;          /* 1: channels are sharded; 2: the batch is */
    int checkpoint;
} steps_run;

/* The golden tensor name.what<i> as a tensor. */
static tsh_tensor *step_tensor(tsh_ctx *ctx, const steps_run *r, const char *what, int i) {
    char key[32];
    golden_tensor t;
    (void)snprintf(key, sizeof key, "%s%d", what, i);
    t = golden_get(&r->file, r->name, key);
    return golden_load(ctx, &t);
}

static int steps_rank(tsh_ctx *ctx, void *user) {
    static const char *const kept[] = {"running_mean", "running_var", "num_batches_tracked"};
    static const tsh_plan_rule plan = {.path = "norm", .style = TSH_COLWISE};
    const steps_run *r = (const steps_run *)user;
    const tsh_batch_norm_desc desc = {.dim = 4, .cumulative = strcmp(r->name, "average") == 0};
    const tsh_layout layout = r->cut == 1   ? tsh_sharded(1)
                              : r->cut == 2 ? tsh_sharded(0)
                                            : tsh_replicated();
    tsh_module *norm = tsh_add_batch_norm(tsh_root(ctx), "norm", &desc);
    golden_tensor t;
    CHECK_TRUE(norm && tsh_training(norm));
    if (r->cut == 1) tsh_parallelize(tsh_root(ctx), &plan, 1);
    for (int i = 0; i < 2; i++) {
        t = golden_get(&r->file, r->name, i ? "bias" : "weight");
        tsh_real values[4];
        for (int k = 0; k < 4; k++) values[k] = (tsh_real)((const float *)t.data)[k];
        CHECK_TRUE(tsh_write(ctx, tsh_param(norm, i ? "bias" : "weight"), TSH_GLOBAL, values,
                             sizeof values) == TSH_OK);
    }
    tsh_checkpoint(norm, r->checkpoint);
    for (int i = 0; i < 4; i++) {
        tsh_tensor *x = tsh_requires_grad(step_tensor(ctx, r, "x", i), 1);
        tsh_tensor *g = step_tensor(ctx, r, "g", i), *y;
        char name[16];
        if (i == 3) tsh_train(norm, 0);
        y = tsh_redistribute(tsh_forward(norm, tsh_redistribute(x, layout)), tsh_replicated());
        (void)snprintf(name, sizeof name, "y%d", i);
        t = golden_get(&r->file, r->name, name);
        if (close_to(ctx, y, &t, name)) return 1;
        CHECK_TRUE(tsh_backward(ctx, tsh_sum(tsh_mul(y, g), TSH_ALL, 0)) == TSH_OK);
        (void)snprintf(name, sizeof name, "dx%d", i);
        t = golden_get(&r->file, r->name, name);
        if (close_to(ctx, tsh_grad(x), &t, name)) return 1;
        CHECK_TRUE(tsh_step_end(ctx) == TSH_OK);
        tsh_tensor_free(x);
        tsh_tensor_free(g);
    }
    for (int i = 0; i < COUNT(kept); i++) {
        t = golden_get(&r->file, r->name, kept[i]);
        if (close_to(ctx, tsh_param(norm, kept[i]), &t, kept[i])) return 1;
        CHECK_TRUE(!tsh_grad(tsh_param(norm, kept[i])));
    }
    for (int i = 0; i < 2; i++) {
        t = golden_get(&r->file, r->name, i ? "dbias" : "dweight");
        if (close_to(ctx, tsh_grad(tsh_param(norm, i ? "bias" : "weight")), &t, "gradient"))
            return 1;
    }
    return 0;
}

static void steps_are_pytorchs(void **state) {
    steps_run r = {golden_open("channel_norm"), NULL, 0, 0};
    (void)state;
    for (int i = 0; i < 12; i++) {
        r.name = i % 2 ? "average" : "steps";
        r.cut = i / 2 % 3;
        r.checkpoint = i / 6;
        for (int k = 0; k < COUNT(ranks_degrees); k++) ranks_run(ranks_degrees[k], steps_rank, &r);
    }
    golden_close(&r.file);
}

/* ----------------------------------------------------------------------- files */

static tsh_module *add_norms(tsh_ctx *ctx) {
    const tsh_batch_norm_desc batch = {.dim = 6},
                              bare = {.dim = 6, .affine = TSH_NO, .running = TSH_NO};
    const tsh_group_norm_desc group = {.groups = 3, .dim = 6};
    const tsh_instance_norm_desc instance = {.dim = 6}, affine = {.dim = 6, .affine = TSH_YES};
    tsh_module *root = tsh_root(ctx);
    tsh_add_batch_norm(root, "bn", &batch);
    tsh_add_batch_norm(root, "bare", &bare);
    tsh_add_group_norm(root, "gn", &group);
    tsh_add_instance_norm(root, "in", &instance);
    tsh_add_instance_norm(root, "affine", &affine);
    return root;
}

static int save_rank(tsh_ctx *ctx, void *user) {
    tsh_module *root = add_norms(ctx);
    tsh_tensor *x = same_leaf(ctx, 1, "5,6,3", 1, 3), *y;
    const tsh_optim_desc desc = {.kind = TSH_ADAMW, .lr = 0.1, .weight_decay = 0.5};
    tsh_optim *optim = tsh_optim_new(root, &desc);
    tsh_real before[6], after[6];
    for (int i = 0; i < 3; i++) {
        y = tsh_forward(root, x);
        CHECK_TRUE(tsh_backward(ctx, ranks_loss(ctx, y)) == TSH_OK);
        CHECK_TRUE(tsh_read(ctx, tsh_param(root, "bn.running_var"), TSH_GLOBAL, before,
                            sizeof before) == TSH_OK);
        CHECK_TRUE(tsh_optim_step(optim) == TSH_OK);
        CHECK_TRUE(tsh_read(ctx, tsh_param(root, "bn.running_var"), TSH_GLOBAL, after,
                            sizeof after) == TSH_OK);
        CHECK_TRUE(memcmp(before, after, sizeof before) == 0);
        tsh_zero_grads(root);
        (void)tsh_step_end(ctx);
    }
    CHECK_TRUE(tsh_check_replicas(root));
    CHECK_TRUE(tsh_save(root, (const char *)user, optim) == TSH_OK);
    return 0;
}

static int load_rank(tsh_ctx *ctx, void *user) {
    static const tsh_plan_rule plan[] = {{.path = "bn", .style = TSH_COLWISE},
                                         {.path = "gn", .style = TSH_COLWISE},
                                         {.path = "affine", .style = TSH_COLWISE}};
    tsh_module *root = add_norms(ctx);
    const char *const *files = (const char *const *)user;
    CHECK_TRUE(tsh_parallelize(root, plan, COUNT(plan)) == TSH_OK);
    CHECK_TRUE(tsh_load(root, files[0], NULL) == TSH_OK);
    CHECK_TRUE(tsh_item(ctx, tsh_redistribute(
                                 tsh_cast(tsh_param(root, "bn.num_batches_tracked"), TSH_REAL),
                                 tsh_replicated())) == 3);
    CHECK_TRUE(tsh_layout_of(tsh_param(root, "bn.running_mean")).kind == TSH_SHARDED);
    CHECK_TRUE(tsh_save(root, files[1], NULL) == TSH_OK);
    return 0;
}

static void files_have_pytorchs_names(void **state) {
    static const char *const names[] = {"\"bn.weight\"",
                                        "\"bn.bias\"",
                                        "\"bn.running_mean\"",
                                        "\"bn.running_var\"",
                                        "\"bn.num_batches_tracked\"",
                                        "\"gn.weight\"",
                                        "\"gn.bias\"",
                                        "\"affine.weight\""};
    const char *files[2] = {files_path("one"), files_path("two")}, *at;
    files_bytes bytes;
    (void)state;
    ranks_run(1, save_rank, (void *)(size_t)(const void *)files[0]);
    bytes = files_read("one");
    for (int i = 0; i < COUNT(names); i++)
        if (!strstr(bytes.at + 8, names[i])) fail_msg("%s is not saved", names[i]);
    at = strstr(bytes.at + 8, "\"bn.num_batches_tracked\"");
    assert_non_null(strstr(at, "\"shape\":[]"));
    assert_null(strstr(bytes.at + 8, "\"bare."));
    assert_null(strstr(bytes.at + 8, "\"in."));
    files_free(&bytes);
    ranks_run(3, load_rank, files);
}

/* ----------------------------------------------------------------------- plans */

static tsh_tensor *layer(probe *p) {
    static const tsh_plan_rule plan = {.path = "", .style = TSH_COLWISE};
    const int64_t channels = tsh_size(p->in[0], 1);
    const tsh_batch_norm_desc batch = {.dim = channels, .eps = 0.5};
    const tsh_group_norm_desc group = {
        .groups = probe_number(p, "groups"), .dim = channels, .eps = 0.5};
    char name[32];
    tsh_module *m;
    (void)snprintf(name, sizeof name, "layer%d", p->number);
    m = probe_has(p, "batch") ? tsh_add_batch_norm(tsh_root(p->ctx), name, &batch)
                              : tsh_add_group_norm(tsh_root(p->ctx), name, &group);
    if (probe_has(p, "col") && !p->dense) tsh_parallelize(m, &plan, 1);
    tsh_materialize(m);
    for (int i = 0; i < 2; i++) {
        p->watched[i] = tsh_param(m, i ? "bias" : "weight");
        ranks_set(p->ctx, p->watched[i], 40 + (uint64_t)i);
    }
    return tsh_forward(m, p->in[0]);
}

static const trial rows[] = {
    TRIAL(layer, "batch", "R", 0, 0, "4,n,3 R"),
    TRIAL(layer, "batch col", "S(1)", 0, 0, "4,n,3 S(1)"),
    TRIAL(layer, "batch", "S(0)", 3e-5, 0, "3n,4,3 S(0)"),
    TRIAL(layer, "groups n", "R", 0, 0, "4,2n,3 R"),
    TRIAL(layer, "groups n col", "S(1, unit 2)", 0, 0, "4,2n,3 S(1, unit 2)"),
    TRIAL(layer, "groups 2", "S(0)", 3e-5, 0, "3n,4,3 S(0)"),
};

static void plans_give_the_dense_result(void **state) {
    static const int64_t lengths[] = {1, 5};
    (void)state;
    trials_prove(rows, COUNT(rows), lengths, COUNT(lengths));
}

static int refusals(tsh_ctx *ctx, void *user) {
    const tsh_group_norm_desc four = {.groups = 4, .dim = 6}, three = {.groups = 3, .dim = 6};
    const tsh_batch_norm_desc batch = {.dim = 6};
    tsh_module *norm;
    (void)user;
    CHECK_TRUE(!tsh_add_group_norm(tsh_root(ctx), "n", &four));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "tsh_add_group_norm: \"n\" has 6 channels in 4 groups; takes "
                                 "groups that divide the channels");
    CHECK_TRUE(!tsh_add_batch_norm(tsh_root(ctx), "n", NULL));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "tsh_add_batch_norm: there is no description");
    norm = tsh_add_group_norm(tsh_root(ctx), "n", &three);
    CHECK_TRUE(!tsh_forward(norm, same_leaf(ctx, 1, "2,9,2", 1, 1)));
    CHECK_SAYS(TSH_ERR_SHAPE, "n: tsh_group_norm: input (2, 9, 2) R; the layer takes 6 channels");
    norm = tsh_add_batch_norm(tsh_root(ctx), "b", &batch);
    CHECK_TRUE(!tsh_forward(norm, same_leaf(ctx, 1, "2,9,2", 1, 1)));
    CHECK_SAYS(TSH_ERR_SHAPE, "b: tsh_batch_norm: input (2, 9, 2) R, weight (6) R");
    return 0;
}

static void mistakes_are_named(void **state) {
    (void)state;
    ranks_run(1, refusals, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(steps_are_pytorchs),
        cmocka_unit_test_teardown(files_have_pytorchs_names, files_after),
        cmocka_unit_test(plans_give_the_dense_result),
        cmocka_unit_test(mistakes_are_named),
    };
    return cmocka_run_group_tests_name("layer/norm_layers", tests, files_begin, files_end);
}
