/* Bare parameters and buffers: the same values at every degree, trained, sharded by plans, saved
 * and loaded at another degree or under another prefix; and what tsh_add_param refuses. */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../support/files.h"

enum { WIDTH = 8, STEPS = 3, HASHES = 16 };

/* x (2, WIDTH) times a scale, plus a token and a buffer, then a linear layer. */
static tsh_tensor *net_forward(tsh_module *net, tsh_tensor **in, int n, void *user) {
    const char *const added[2] = {"cls_token", "offset"};
    tsh_tensor *x = in[0], *t;
    int i;
    (void)n;
    (void)user;
    t = tsh_redistribute(tsh_param(net, "scale"), tsh_replicated());
    x = tsh_mul(x, t);
    for (i = 0; i < 2; i++)
        x = tsh_add(x, tsh_redistribute(tsh_param(net, added[i]), tsh_replicated()));
    return tsh_forward(tsh_find(net, "out"), x);
}

static tsh_module *net_add_to(tsh_module *parent) {
    static const tsh_module_desc forward = {.forward = net_forward};
    const tsh_layout cut = tsh_sharded(0);
    const tsh_linear_desc out = {.in = WIDTH, .out = WIDTH};
    const tsh_param_desc normal = {.init = {.kind = TSH_INIT_NORMAL, .b = 0.5}};
    const tsh_param_desc ones = {.init = {.kind = TSH_INIT_ONES}, .layout = &cut};
    const tsh_param_desc buffer = {.init = {.kind = TSH_INIT_UNIFORM, .b = 1}, .buffer = 1};
    tsh_module *net = tsh_add_module(parent, "net", &forward);
    tsh_add_param(net, "cls_token", tsh_shape2(1, WIDTH), &normal);
    tsh_add_param(net, "scale", tsh_shape1(WIDTH), &ones);
    tsh_add_param(net, "offset", tsh_shape1(WIDTH), &buffer);
    tsh_add_param(net, "unused", tsh_shape1(3), NULL);
    tsh_add_linear(net, "out", &out);
    return net;
}

static tsh_module *net_add(tsh_ctx *ctx) {
    return net_add_to(tsh_root(ctx));
}

typedef struct outcome {
    uint64_t hash[HASHES]; /* of all values, at first and at the end */
    int hashes;
    char paths[256];
    double loss[STEPS];
} outcome;

static void hash_param(const char *path, tsh_tensor *param, void *user) {
    outcome *o = (outcome *)user;
    strcat(o->paths, path);
    strcat(o->paths, " ");
    if (o->hashes < HASHES) o->hash[o->hashes++] = tsh_hash(tsh_ctx_of(param), param);
}

static int train_steps(tsh_ctx *ctx, tsh_module *net, tsh_optim *optim, outcome *o) {
    int i;
    for (i = 0; i < STEPS; i++) {
        tsh_tensor *x = tsh_randn(ctx, tsh_shape2(2, WIDTH)), *y = tsh_forward(net, x);
        tsh_tensor *loss = tsh_mean(tsh_mul(y, y), TSH_ALL, 0);
        o->loss[i] = tsh_item(ctx, loss);
        CHECK(tsh_backward(ctx, loss) == TSH_OK, "step %d", i);
        CHECK(tsh_grad(tsh_param(net, "offset")) == NULL, "a buffer has a gradient");
        CHECK(tsh_grad(tsh_param(net, "cls_token")) != NULL, "the token has none");
        CHECK(tsh_optim_step(optim) == TSH_OK, "step %d", i);
        tsh_zero_grads(net);
        (void)tsh_step_end(ctx);
    }
    return 0;
}

/* At degree 1 writes what is wanted, and a file; else compares and loads the file. */
static int trains(tsh_ctx *ctx, void *user) {
    static const tsh_plan_rule plan[] = {{.path = "net.cls_token", .style = TSH_COLWISE},
                                         {.path = "net.offset", .style = TSH_ROWWISE}};
    const tsh_optim_desc adamw = {.kind = TSH_ADAMW, .lr = 0.01, .weight_decay = 0.1};
    outcome mine, *want = (outcome *)user;
    const int tp = tsh_tp(ctx)->size;
    tsh_module *net = net_add(ctx);
    tsh_optim *optim;
    uint64_t offset;
    memset(&mine, 0, sizeof mine);
    CHECK(tsh_parallelize(tsh_root(ctx), plan, COUNT(plan)) == TSH_OK, "plan");
    CHECK(tsh_layout_of(tsh_param(net, "cls_token")).kind == TSH_SHARDED, "by the plan");
    CHECK(tsh_layout_of(tsh_param(net, "cls_token")).dim == 1, "by the plan");
    CHECK(tsh_layout_of(tsh_param(net, "scale")).kind == TSH_SHARDED, "by the description");
    CHECK(tsh_layout_of(tsh_param(net, "unused")).kind == TSH_REPLICATED, "by default");
    CHECK(tsh_param(tsh_root(ctx), "net.offset") == tsh_param(net, "offset"), "by path");
    optim = tsh_optim_new(net, &adamw);
    CHECK(tsh_optim_group(optim, "cls_token", 0.5, 0) == TSH_OK, "a group");
    tsh_each_param(net, hash_param, &mine);
    offset = tsh_hash(ctx, tsh_param(net, "offset"));
    if (train_steps(ctx, net, optim, &mine)) return 1;
    CHECK(tsh_hash(ctx, tsh_param(net, "offset")) == offset, "an optimiser changed the buffer");
    CHECK(tsh_hash(ctx, tsh_param(net, "scale")) != mine.hash[1], "the scale has not learned");
    CHECK(tsh_check_replicas(tsh_root(ctx)), "replicas");
    CHECK_OK();
    if (tp == 1) {
        CHECK(tsh_save(tsh_root(ctx), files_path("model"), optim) == TSH_OK, "saved");
        mine.hashes = 6;
        tsh_each_param(net, hash_param, &mine);
        *want = mine;
        return 0;
    }
    for (int i = 0; i < STEPS; i++)
        CHECK(fabs(mine.loss[i] - want->loss[i]) < 1e-5, "%g, not %g", mine.loss[i], want->loss[i]);
    CHECK(memcmp(mine.hash, want->hash, 6 * sizeof mine.hash[0]) == 0, "initial values");
    CHECK(tsh_load(tsh_root(ctx), files_path("model"), optim) == TSH_OK, "loaded");
    tsh_each_param(net, hash_param, &mine);
    CHECK(memcmp(mine.hash, want->hash, 12 * sizeof mine.hash[0]) == 0, "loaded values");
    CHECK(strcmp(mine.paths, want->paths) == 0, "%s, not %s", mine.paths, want->paths);
    return 0;
}

static void parameters_train_and_are_saved_at_every_degree(void **state) {
    outcome want;
    (void)state;
    memset(&want, 0, sizeof want);
    for (int i = 0; i < 4; i++) ranks_run(i + 1, trains, &want);
    assert_string_equal(want.paths,
                        "net.cls_token net.scale net.offset net.unused net.out.weight "
                        "net.out.bias "
                        "net.cls_token net.scale net.offset net.unused net.out.weight "
                        "net.out.bias ");
}

/* One block of a tree is saved under a prefix and loaded into a block elsewhere: at another degree,
 * with its moments, and out of a file that holds more. */
static int moves(tsh_ctx *ctx, void *user) {
    const tsh_file_desc block = {.prefix = "vit.block"}, strange = {.prefix = "vit"},
                        inside = {.prefix = "net"};
    const tsh_optim_desc adam = {.kind = TSH_ADAM, .lr = 0.01};
    const int saves = tsh_tp(ctx)->size == 1;
    outcome mine, *want = (outcome *)user;
    tsh_module *at = tsh_add_module(tsh_root(ctx), saves ? "a" : "other", NULL), *net;
    tsh_optim *optim;
    memset(&mine, 0, sizeof mine);
    if (!saves) at = tsh_add_module(at, "deep", NULL);
    net = net_add_to(at);
    optim = tsh_optim_new(net, &adam);
    if (saves && train_steps(ctx, net, optim, &mine)) return 1;
    if (saves) {
        tsh_each_param(net, hash_param, &mine);
        CHECK(tsh_save_with(net, files_path("block"), optim, &block) == TSH_OK, "saved");
        CHECK(tsh_save(net, files_path("plain"), NULL) == TSH_OK, "saved");
        CHECK(tsh_save(at, files_path("whole"), NULL) == TSH_OK, "saved");
        *want = mine;
        return 0;
    }
    CHECK(tsh_load_with(net, files_path("block"), optim, &block) == TSH_OK, "loaded");
    CHECK(tsh_optim_state(optim).steps == STEPS, "%d", (int)tsh_optim_state(optim).steps);
    tsh_each_param(net, hash_param, &mine);
    CHECK(memcmp(mine.hash, want->hash, 6 * sizeof mine.hash[0]) == 0, "values of the block");
    CHECK(tsh_save_with(net, files_path("again"), optim, &block) == TSH_OK, "saved");
    tsh_reset_parameters(net);
    CHECK(tsh_load(net, files_path("plain"), NULL) == TSH_OK, "without a prefix");
    tsh_reset_parameters(net);
    CHECK(tsh_load_with(net, files_path("whole"), NULL, &inside) == TSH_OK,
          "out of a larger file");
    mine.hashes = 0;
    tsh_each_param(net, hash_param, &mine);
    CHECK(memcmp(mine.hash, want->hash, 6 * sizeof mine.hash[0]) == 0, "values of the whole");
    CHECK(tsh_load_with(net, files_path("block"), NULL, &strange) == TSH_ERR_ARGUMENT, "loaded");
    CHECK_SAYS(TSH_ERR_ARGUMENT, "(\"vit.cls_token\")");
    return 0;
}

static void a_block_moves_under_another_prefix(void **state) {
    outcome want;
    (void)state;
    memset(&want, 0, sizeof want);
    for (int i = 0; i < 4; i++) {
        ranks_run(i + 1, moves, &want);
        if (i) files_expect_same("block", "again");
    }
}

static int has_a_long_prefix(tsh_ctx *ctx, void *user) {
    char text[TSH_PATH_SIZE + 1];
    const tsh_file_desc too_long = {.prefix = text};
    (void)user;
    memset(text, 'x', TSH_PATH_SIZE);
    text[TSH_PATH_SIZE] = '\0';
    CHECK(tsh_save_with(net_add(ctx), files_path("no"), NULL, &too_long) == TSH_ERR_ARGUMENT, "no");
    tsh_clear_error(ctx);
    return 0;
}

static void a_prefix_has_a_limit(void **state) {
    (void)state;
    ranks_run(2, has_a_long_prefix, NULL);
}

/* Without a forward of its own, a container passes a bare parameter over. */
static int is_passed_over(tsh_ctx *ctx, void *user) {
    tsh_module *list = tsh_add_module(tsh_root(ctx), "list", NULL);
    const tsh_layer_norm_desc norm = {.dim = 4};
    tsh_tensor *x, *y;
    (void)user;
    tsh_add_param(list, "bare", tsh_shape1(4), NULL);
    tsh_add_layer_norm(list, "norm", &norm);
    x = tsh_randn(ctx, tsh_shape2(2, 4));
    y = tsh_forward(list, x);
    CHECK(tsh_hash(ctx, y) == tsh_hash(ctx, tsh_forward(tsh_find(list, "norm"), x)), "passed");
    CHECK_OK();
    return 0;
}

static int expect_error(tsh_ctx *ctx, tsh_tensor *got, tsh_result code, const char *text) {
    CHECK(got == NULL, "made");
    CHECK_SAYS(code, text);
    return 0;
}

static int is_refused(tsh_ctx *ctx, void *user) {
    const tsh_layout partial = {.kind = TSH_PARTIAL}, beyond = tsh_sharded(3);
    const tsh_param_desc no = {.layout = &partial}, far = {.layout = &beyond};
    const tsh_shape four = tsh_shape1(4);
    tsh_module *net = net_add(ctx), *out = tsh_find(net, "out");
    (void)user;
    return expect_error(ctx, tsh_add_param(net, "scale", four, NULL), TSH_ERR_ARGUMENT,
                        "tsh_add_param: \"net\" has a child \"scale\" already") ||
           expect_error(ctx, tsh_add_param(out, "bias", four, NULL), TSH_ERR_ARGUMENT,
                        "tsh_add_param: \"net.out\" has a parameter \"bias\" already") ||
           expect_error(ctx, tsh_add_param(net, "a.b", four, NULL), TSH_ERR_ARGUMENT, "no name") ||
           expect_error(ctx, tsh_add_param(net, "p", four, &no), TSH_ERR_LAYOUT, "partial") ||
           expect_error(ctx, tsh_add_param(net, "p", four, &far), TSH_ERR_LAYOUT, "not fit") ||
           expect_error(ctx, tsh_param(net, "p"), TSH_ERR_ARGUMENT, "no parameter \"p\"") ||
           tsh_add_param(net, "p", four, NULL) == NULL;
}

static void containers_pass_them_over(void **state) {
    (void)state;
    ranks_run(1, is_passed_over, NULL);
}

static void mistakes_are_told(void **state) {
    (void)state;
    ranks_run(1, is_refused, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parameters_train_and_are_saved_at_every_degree),
        cmocka_unit_test(a_block_moves_under_another_prefix),
        cmocka_unit_test(a_prefix_has_a_limit),
        cmocka_unit_test(containers_pass_them_over),
        cmocka_unit_test(mistakes_are_told),
    };
    return cmocka_run_group_tests(tests, files_begin, files_end);
}
