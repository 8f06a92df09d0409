/* Convolutions as layers: a network with PyTorch's weights, read by tsh_load, gives PyTorch's
 * values and gradients in every style and at every degree, where shards are uneven or empty;
 * default initial values; the policy of ResNets; and what is refused. */
/* build: double */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/golden.h"
#include "../support/ranks.h"

static golden_file golden;

/* ------------------------------------------------------- a network of PyTorch's */

static void add_net(tsh_module *root) {
    const tsh_conv_desc stem = {
        .in = 3, .out = 6, .kernel = {3, 3}, .stride = {2, 2}, .padding = {1, 1}};
    const tsh_conv_desc up = {.in = 6,
                              .out = 4,
                              .kernel = {2, 3},
                              .stride = {2, 2},
                              .output_padding = {1, 1},
                              .groups = 2};
    const tsh_conv_desc line = {.in = 4, .out = 5, .kernel = {3}, .padding = {1}, .bias = TSH_NO};
    const tsh_conv_desc back = {.in = 5, .out = 2, .kernel = {2}, .stride = {2}};
    (void)tsh_add_conv2d(root, "stem", &stem);
    (void)tsh_add_conv_transpose2d(root, "up", &up);
    (void)tsh_add_conv1d(root, "line", &line);
    (void)tsh_add_conv_transpose1d(root, "back", &back);
}

static tsh_tensor *run_net(tsh_module *root, tsh_tensor *x) {
    tsh_tensor *y = tsh_forward(tsh_find(root, "up"),
                                tsh_relu(tsh_forward(tsh_find(root, "stem"), x)));
    y = tsh_reshape(y, tsh_shape3(tsh_size(y, 0), tsh_size(y, 1), -1));
    return tsh_forward(tsh_find(root, "back"), tsh_forward(tsh_find(root, "line"), y));
}

static const tsh_plan_rule plans[][4] = {
    {{.path = "stem", .style = TSH_PLAIN}},
    {{.path = "stem", .style = TSH_COLWISE, .unit = 3},
     {.path = "up", .style = TSH_COLWISE},
     {.path = "line", .style = TSH_ROWWISE, .unit = 2},
     {.path = "back", .style = TSH_COLWISE, .gather_output = 1}},
    {{.path = "stem", .style = TSH_ROWWISE},
     {.path = "up", .style = TSH_COLWISE, .gather_output = 1},
     {.path = "line", .style = TSH_COLWISE},
     {.path = "back", .style = TSH_ROWWISE}},
};

/* 0 where t has the golden values; sums of up to 100 terms of magnitude ten. */
static int has_values(tsh_ctx *ctx, const char *name, const char *what, tsh_tensor *t) {
    const golden_tensor want = golden_get(&golden, name, what);
    double *got = ranks_values(ctx, t);
    int64_t i;
    CHECK(got, "%s.%s", name, what);
    CHECK(tsh_numel(t) == want.count, "%s.%s", name, what);
    for (i = 0; i < want.count; i++) {
        const double b = (double)((const float *)want.data)[i];
        CHECK(fabs(got[i] - b) < 2e-5 * (1 + fabs(b)), "%s.%s[%ld] is %.9g, not %.9g", name, what,
              (long)i, got[i], b);
    }
    free(got);
    return 0;
}

static int net_is_pytorchs(tsh_ctx *ctx, void *user) {
    static const char *const params[] = {"stem.weight", "stem.bias",   "up.weight", "up.bias",
                                         "line.weight", "back.weight", "back.bias"};
    const int plan = *(const int *)user;
    const golden_tensor in = golden_get(&golden, "net", "in");
    const char *here = __FILE__, *slash = strrchr(here, '/');
    char path[512];
    tsh_module *root = tsh_root(ctx);
    tsh_tensor *x = golden_load(ctx, &in), *y;
    int i, rules = plan ? 4 : 1;
    (void)snprintf(path, sizeof path, "%.*s../golden/conv_model.safetensors",
                   slash ? (int)(slash - here + 1) : 0, here);
    add_net(root);
    if (plan < 2) CHECK(tsh_parallelize(root, plans[plan], rules) == TSH_OK, "plan %d", plan);
    CHECK(tsh_load(root, path, NULL) == TSH_OK, "plan %d", plan);
    if (plan == 2) CHECK(tsh_parallelize(root, plans[plan], rules) == TSH_OK, "after loading");
    y = run_net(root, x);
    CHECK(y, "plan %d", plan);
    if (has_values(ctx, "net", "out", y)) return 1;
    CHECK(tsh_backward(ctx, tsh_sum(tsh_mul(y, y), TSH_ALL, 0)) == TSH_OK, "plan %d", plan);
    for (i = 0; i < COUNT(params); i++)
        if (has_values(ctx, params[i], "grad", tsh_grad(tsh_param(root, params[i])))) return 1;
    tsh_tensor_free(x);
    CHECK_OK();
    return 0;
}

static void a_network_is_pytorchs_in_every_style(void **state) {
    int plan, i;
    (void)state;
    golden = golden_open("conv_layers");
    for (plan = 0; plan < COUNT(plans); plan++)
        for (i = 0; i < COUNT(ranks_degrees); i++)
            ranks_run(ranks_degrees[i], net_is_pytorchs, &plan);
    golden_finish(&golden);
}

/* ------------------------------------------------------------- initial values */

/* The same bits at every degree, within torch's bounds, and not all alike. */
static int initial_values(tsh_ctx *ctx, int dense, capture *got) {
    static const char *const params[] = {"stem.weight", "stem.bias", "up.weight", "up.bias"};
    static const double fans[] = {27, 27, 2 * 6, 2 * 6}; /* channels times elements of the kernel */
    tsh_module *root = tsh_root(ctx);
    int i;
    add_net(root);
    if (!dense) CHECK(tsh_parallelize(root, plans[1], 4) == TSH_OK, "plan");
    CHECK(tsh_materialize(root) == TSH_OK, "values");
    for (i = 0; i < COUNT(params); i++) {
        tsh_tensor *t = tsh_param(root, params[i]);
        double most = 0;
        int64_t e;
        CHECK_TRUE(!capture_add(ctx, got, t));
        for (e = 0; e < tsh_numel(t); e++) most = fmax(most, fabs(got->values[i][e]));
        CHECK(most <= 1 / sqrt(fans[i]) && most > 0.5 / sqrt(fans[i]), "%s: %g", params[i], most);
    }
    return 0;
}

static void initial_values_are_those_of_torch(void **state) {
    (void)state;
    same_prove(initial_values, 0);
}

/* ------------------------------------------------------------- ResNet's policy */

static tsh_tensor *block_forward(tsh_module *self, tsh_tensor **in, int n, void *user) {
    tsh_tensor *y = tsh_relu(tsh_forward(tsh_find(self, "conv1"), in[0]));
    (void)n, (void)user;
    return tsh_add(in[0], tsh_forward(tsh_find(self, "conv2"), y));
}

static int resnet(tsh_ctx *ctx, int dense, capture *got) {
    const tsh_conv_desc conv = {
        .in = 5, .out = 5, .kernel = {3, 3}, .padding = {1, 1}, .bias = TSH_NO};
    const tsh_module_desc block = {block_forward, NULL};
    tsh_module *root = tsh_root(ctx), *layer, *one;
    tsh_tensor *x, *y;
    tsh_layout layout;
    spec s = spec_parse("2,5,4,3 R", 1);
    char name[2] = "0";
    (void)tsh_add_conv2d(root, "conv1", &conv);
    layer = tsh_add_module(root, "layer1", NULL);
    for (; name[0] < '2'; name[0]++) {
        one = tsh_add_module(layer, name, &block);
        (void)tsh_add_conv2d(one, "conv1", &conv);
        (void)tsh_add_conv2d(one, "conv2", &conv);
    }
    if (!dense) {
        CHECK(tsh_parallelize_policy(root, tsh_policy_find("resnet")) == TSH_OK, "policy");
        layout = tsh_layout_of(tsh_param(root, "layer1.1.conv1.weight"));
        CHECK_TRUE(layout.kind == TSH_SHARDED && layout.dim == 0);
        layout = tsh_layout_of(tsh_param(root, "layer1.0.conv2.weight"));
        CHECK_TRUE(layout.kind == TSH_SHARDED && layout.dim == 1);
        CHECK_TRUE(tsh_layout_of(tsh_param(root, "conv1.weight")).kind == TSH_REPLICATED);
    }
    x = tsh_requires_grad(spec_tensor(ctx, &s, 1), 1);
    y = tsh_forward(root, x);
    CHECK(y, "forward");
    CHECK_TRUE(!capture_add(ctx, got, y));
    CHECK_TRUE(tsh_backward(ctx, ranks_loss(ctx, y)) == TSH_OK);
    CHECK_TRUE(!capture_add(ctx, got, tsh_grad(x)));
    CHECK_TRUE(!capture_add(ctx, got, tsh_grad(tsh_param(root, "conv1.weight"))));
    CHECK_TRUE(!capture_add(ctx, got, tsh_grad(tsh_param(root, "layer1.0.conv1.weight"))));
    CHECK_TRUE(!capture_add(ctx, got, tsh_grad(tsh_param(root, "layer1.1.conv2.weight"))));
    tsh_tensor_free(x);
    return 0;
}

static void the_policy_of_resnets_gives_the_dense_result(void **state) {
    (void)state;
    same_prove(resnet, sizeof(tsh_real) == 4 ? 2e-5 : 1e-12); /* sums in another order */
}

/* ------------------------------------------------------------- refusals */

static int refusals(tsh_ctx *ctx, void *user) {
    const tsh_conv_desc good = {.in = 4, .out = 6, .kernel = {3, 3}, .groups = 2};
    tsh_conv_desc desc = good;
    tsh_module *root = tsh_root(ctx), *layer;
    spec s = spec_parse("2,4,5,5 S(2)", 1);
    (void)user;
    CHECK_TRUE(!tsh_add_conv2d(root, "c", NULL));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "tsh_add_conv2d: there is no description");
    desc.in = 5;
    CHECK_TRUE(!tsh_add_conv2d(root, "c", &desc));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "\"c\" has 5 channels in, 6 out, 2 groups");
    desc = good;
    desc.kernel[1] = 0;
    CHECK_TRUE(!tsh_add_conv2d(root, "c", &desc));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "a kernel of 3, 0");
    CHECK_TRUE(tsh_add_conv1d(root, "line", &desc)); /* one dimension does not read [1] */
    desc = good;
    desc.style = TSH_ROWWISE;
    CHECK_TRUE(!tsh_add_conv2d(root, "c", &desc));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "2 groups and cannot be ROWWISE");
    desc = good;
    desc.style = TSH_SEQUENCE;
    CHECK_TRUE(!tsh_add_conv2d(root, "c", &desc));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "takes its style");
    layer = tsh_add_conv2d(root, "c", &good);
    CHECK_TRUE(!tsh_forward(layer, spec_tensor(ctx, &s, 1)));
    CHECK_SAYS(TSH_ERR_LAYOUT, "c: tsh_conv2d: ");
    return 0;
}

static void what_does_not_fit_is_refused(void **state) {
    (void)state;
    ranks_run(1, refusals, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_network_is_pytorchs_in_every_style),
        cmocka_unit_test(initial_values_are_those_of_torch),
        cmocka_unit_test(the_policy_of_resnets_gives_the_dense_result),
        cmocka_unit_test(what_does_not_fit_is_refused),
    };
    return cmocka_run_group_tests_name("layer/conv_layers", tests, NULL, NULL);
}
