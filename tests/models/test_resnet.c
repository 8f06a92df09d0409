/* A narrow ResNet-18 with a small stem classifies small images: it trains as in PyTorch at every
 * degree of tensor parallelism, and with the batch distributed over two replicas, whose batch norms
 * share their statistics. */
/* build: double */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "models.h"

/* ------------------------------------------------------------------ the model */

enum { BATCH = 8, SIZE = 32, CLASSES = 10 };
static const char *const layers[] = {"layer1", "layer2", "layer3", "layer4"};
static const int64_t widths[] = {5, 5, 10, 20, 40}; /* channels of the stem and of each layer */

/* A convolution without a bias, padded so that a stride of 1 keeps the size; its batch norm. */
static void add_conv(tsh_module *parent, const char *conv, const char *norm, int64_t in,
                     int64_t out, int64_t kernel, int64_t stride) {
    const tsh_conv_desc c = {.in = in,
                             .out = out,
                             .kernel = {kernel, kernel},
                             .stride = {stride, stride},
                             .padding = {kernel / 2, kernel / 2},
                             .bias = TSH_NO};
    const tsh_batch_norm_desc n = {.dim = out, .over_dp = 1};
    tsh_add_conv2d(parent, conv, &c);
    tsh_add_batch_norm(parent, norm, &n);
}

static tsh_tensor *block_forward(tsh_module *self, tsh_tensor **in, int n, void *user) {
    tsh_tensor *y = tsh_relu(models_call(self, "bn1", models_call(self, "conv1", in[0])));
    (void)n, (void)user;
    y = models_call(self, "bn2", models_call(self, "conv2", y));
    return tsh_relu(tsh_add(y, models_call(self, "downsample", in[0])));
}

/* Without children, the module "downsample" returns its input. */
static void add_block(tsh_module *layer, const char *name, int64_t in, int64_t out) {
    const tsh_module_desc desc = {block_forward, NULL};
    tsh_module *block = tsh_add_module(layer, name, &desc);
    tsh_module *shortcut = tsh_add_module(block, "downsample", NULL);
    add_conv(block, "conv1", "bn1", in, out, 3, in == out ? 1 : 2);
    add_conv(block, "conv2", "bn2", out, out, 3, 1);
    if (in != out) add_conv(shortcut, "0", "1", in, out, 1, 2);
}

static void add_resnet(tsh_module *root) {
    const tsh_linear_desc fc = {.in = widths[4], .out = CLASSES};
    add_conv(root, "conv1", "bn1", 3, widths[0], 3, 1);
    for (int i = 0; i < COUNT(layers); i++) {
        tsh_module *layer = tsh_add_module(root, layers[i], NULL);
        add_block(layer, "0", widths[i], widths[i + 1]);
        add_block(layer, "1", widths[i + 1], widths[i + 1]);
    }
    tsh_add_linear(root, "fc", &fc);
}

static const tsh_plan_rule plan[] = {{.path = "layer*.*.conv1", .style = TSH_COLWISE},
                                     {.path = "layer*.*.bn1", .style = TSH_COLWISE},
                                     {.path = "layer*.*.conv2", .style = TSH_ROWWISE},
                                     {.path = "fc", .style = TSH_ROWWISE}};

static tsh_tensor *resnet_loss(tsh_module *root, int step) {
    const tsh_pool_options half = {.kernel = {3, 3}, .stride = {2, 2}, .padding = {1, 1}};
    tsh_ctx *ctx = tsh_module_ctx(root);
    tsh_tensor *x = models_data(ctx, "image", step % 4, tsh_shape4(BATCH, 3, SIZE, SIZE));
    tsh_tensor *classes = models_below(ctx, CLASSES, "class", step % 4, tsh_shape1(BATCH));
    x = tsh_relu(models_call(root, "bn1", models_call(root, "conv1", x)));
    x = tsh_max_pool2d(x, &half);
    for (int i = 0; i < COUNT(layers); i++) x = models_call(root, layers[i], x);
    x = tsh_reshape(tsh_adaptive_avg_pool2d(x, 1, 1), tsh_shape2(-1, widths[4]));
    return tsh_cross_entropy(models_call(root, "fc", x), classes, NULL);
}

static const model resnet = {
    "resnet", add_resnet,  resnet_loss,
    plan,     COUNT(plan), {.kind = TSH_SGD, .lr = 0.01, .momentum = 0.5, .weight_decay = 5e-4}};

/* ------------------------------------------------------------------ training */

static void a_resnet_trains_as_in_pytorch(void **state) {
    (void)state;
    models_prove(&resnet, 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_resnet_trains_as_in_pytorch),
    };
    return cmocka_run_group_tests_name("resnet", tests, NULL, NULL);
}
