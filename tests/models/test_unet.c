/* A U-Net in one dimension, with batch and group norms and skip connections, removes noise: it
 * trains as in PyTorch at every degree of tensor parallelism, and with the batch distributed over
 * two replicas, whose batch norms share their statistics. */
/* build: double */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "models.h"

/* ------------------------------------------------------------------ the model */

static tsh_tensor *level_forward(tsh_module *self, tsh_tensor **in, int n, void *user) {
    tsh_tensor *y = models_call(self, "norm", models_call(self, "first", in[0]));
    (void)n, (void)user;
    return models_call(self, "last", tsh_relu(y));
}

/* kernel 1, 3: the last layer is a convolution; 2: a transposed one, which doubles the length.
 * groups 0: batch norm. */
static void add_level(tsh_module *root, const char *name, int64_t in, int64_t middle, int64_t out,
                      int64_t kernel, int64_t groups) {
    const tsh_module_desc forward = {level_forward, NULL};
    const tsh_conv_desc first = {
        .in = in, .out = middle, .kernel = {3}, .padding = {1}, .bias = TSH_NO};
    const tsh_conv_desc same = {
        .in = middle, .out = out, .kernel = {kernel}, .padding = {kernel / 2}};
    const tsh_conv_desc up = {.in = middle, .out = out, .kernel = {2}, .stride = {2}};
    const tsh_batch_norm_desc batch = {.dim = middle, .over_dp = 1};
    const tsh_group_norm_desc group = {.groups = groups, .dim = middle};
    tsh_module *level = tsh_add_module(root, name, &forward);
    tsh_add_conv1d(level, "first", &first);
    if (groups) tsh_add_group_norm(level, "norm", &group);
    if (!groups) tsh_add_batch_norm(level, "norm", &batch);
    if (kernel == 2) tsh_add_conv_transpose1d(level, "last", &up);
    if (kernel != 2) tsh_add_conv1d(level, "last", &same);
}

static void add_unet(tsh_module *root) {
    add_level(root, "down1", 2, 6, 6, 3, 0);
    add_level(root, "down2", 6, 8, 8, 3, 4);
    add_level(root, "middle", 8, 9, 8, 2, 0);
    add_level(root, "up2", 16, 8, 6, 2, 4);
    add_level(root, "up1", 12, 5, 2, 1, 0);
}

/* The convolutions of a level are a pair: channels between them are sharded, by whole groups. */
static const tsh_plan_rule plan[] = {{.path = "*[!2].first", .style = TSH_COLWISE},
                                     {.path = "*2.first", .style = TSH_COLWISE, .unit = 2},
                                     {.path = "*.norm", .style = TSH_COLWISE},
                                     {.path = "*[!2].last", .style = TSH_ROWWISE},
                                     {.path = "*2.last", .style = TSH_ROWWISE, .unit = 2}};

static tsh_tensor *unet_loss(tsh_module *root, int step) {
    const tsh_pool_options half = {.kernel = {2}};
    tsh_tensor *clean = models_data(tsh_module_ctx(root), "clean", step, tsh_shape3(4, 2, 16));
    tsh_tensor *noise = models_data(tsh_module_ctx(root), "noise", step, tsh_shape3(4, 2, 16));
    tsh_tensor *x, *skip[2], *both[2];
    skip[0] = tsh_relu(models_call(root, "down1", tsh_add(clean, tsh_scale(noise, 0.5))));
    skip[1] = tsh_relu(models_call(root, "down2", tsh_max_pool1d(skip[0], &half)));
    both[0] = models_call(root, "middle", tsh_max_pool1d(skip[1], &half));
    both[1] = skip[1];
    both[0] = models_call(root, "up2", tsh_concat(both, 2, 1));
    both[1] = skip[0];
    x = models_call(root, "up1", tsh_concat(both, 2, 1));
    return tsh_mse_loss(x, clean, NULL);
}

static const model unet = {"unet",      add_unet,
                           unet_loss,   plan,
                           COUNT(plan), {.kind = TSH_ADAMW, .lr = 3e-3, .weight_decay = 0.01}};

/* ------------------------------------------------------------------ training */

static void a_unet_trains_as_in_pytorch(void **state) {
    (void)state;
    models_prove(&unet, 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_unet_trains_as_in_pytorch),
    };
    return cmocka_run_group_tests_name("unet", tests, NULL, NULL);
}
