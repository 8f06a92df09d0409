/* A variational autoencoder of small images, with convolutions and linear layers: it trains as in
 * PyTorch at every degree of tensor parallelism, and with the batch distributed over two
 * replicas. */
/* build: double */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "models.h"

/* ------------------------------------------------------------------ the model */

enum { BATCH = 6, SIZE = 12, HIDDEN = 20, LATENT = 4, CODE = 6 * 3 * 3 };

static void add_vae(tsh_module *root) {
    const tsh_conv_desc conv1 = {
        .in = 1, .out = 5, .kernel = {3, 3}, .stride = {2, 2}, .padding = {1, 1}};
    const tsh_conv_desc conv2 = {
        .in = 5, .out = 6, .kernel = {3, 3}, .stride = {2, 2}, .padding = {1, 1}};
    const tsh_conv_desc up1 = {
        .in = 6, .out = 5, .kernel = {4, 4}, .stride = {2, 2}, .padding = {1, 1}};
    const tsh_conv_desc up2 = {
        .in = 5, .out = 1, .kernel = {4, 4}, .stride = {2, 2}, .padding = {1, 1}};
    const tsh_linear_desc hidden = {.in = CODE, .out = HIDDEN};
    const tsh_linear_desc latent = {.in = HIDDEN, .out = LATENT};
    const tsh_linear_desc widen = {.in = LATENT, .out = HIDDEN};
    const tsh_linear_desc image = {.in = HIDDEN, .out = CODE};
    tsh_add_conv2d(root, "conv1", &conv1);
    tsh_add_conv2d(root, "conv2", &conv2);
    tsh_add_linear(root, "hidden", &hidden);
    tsh_add_linear(root, "mean", &latent);
    tsh_add_linear(root, "logvar", &latent);
    tsh_add_linear(root, "widen", &widen);
    tsh_add_linear(root, "image", &image);
    tsh_add_conv_transpose2d(root, "up1", &up1);
    tsh_add_conv_transpose2d(root, "up2", &up2);
}

static const tsh_plan_rule plan[] = {
    {.path = "conv1", .style = TSH_COLWISE},  {.path = "conv2", .style = TSH_ROWWISE},
    {.path = "hidden", .style = TSH_COLWISE}, {.path = "mean", .style = TSH_ROWWISE},
    {.path = "logvar", .style = TSH_ROWWISE}, {.path = "widen", .style = TSH_COLWISE},
    {.path = "image", .style = TSH_ROWWISE},  {.path = "up1", .style = TSH_COLWISE},
    {.path = "up2", .style = TSH_ROWWISE}};

static tsh_tensor *call_relu(tsh_module *root, const char *path, tsh_tensor *x) {
    return tsh_relu(models_call(root, path, x));
}

static tsh_tensor *vae_loss(tsh_module *root, int step) {
    const tsh_loss_desc sum = {.reduction = TSH_REDUCE_SUM};
    tsh_ctx *ctx = tsh_module_ctx(root);
    tsh_tensor *u = models_data(ctx, "image", step % 4, tsh_shape4(BATCH, 1, SIZE, SIZE));
    tsh_tensor *noise = tsh_scale(models_data(ctx, "noise", step, tsh_shape2(BATCH, LATENT)), 1.7);
    tsh_tensor *images = tsh_add_scalar(tsh_scale(u, 0.5), 0.5), *y, *mean, *logvar, *error, *terms;
    y = call_relu(root, "conv2", call_relu(root, "conv1", images));
    y = call_relu(root, "hidden", tsh_reshape(y, tsh_shape2(-1, CODE)));
    mean = models_call(root, "mean", y);
    logvar = models_call(root, "logvar", y);
    y = tsh_add(mean, tsh_mul(tsh_exp(tsh_scale(logvar, 0.5)), noise));
    y = call_relu(root, "image", call_relu(root, "widen", y));
    y = call_relu(root, "up1", tsh_reshape(y, tsh_shape4(-1, 6, 3, 3)));
    error = tsh_binary_cross_entropy_with_logits(models_call(root, "up2", y), images, &sum);
    terms = tsh_sub(tsh_sub(tsh_add_scalar(logvar, 1), tsh_pow_scalar(mean, 2)), tsh_exp(logvar));
    return tsh_scale(tsh_add(error, tsh_scale(tsh_sum(terms, TSH_ALL, 0), -0.5)),
                     1.0 / (double)tsh_size(images, 0));
}

static const model vae = {"vae",       add_vae,
                          vae_loss,    plan,
                          COUNT(plan), {.kind = TSH_ADAMW, .lr = 3e-3, .weight_decay = 0.01}};

/* ------------------------------------------------------------------ training */

static void a_vae_trains_as_in_pytorch(void **state) {
    (void)state;
    models_prove(&vae, 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_vae_trains_as_in_pytorch),
    };
    return cmocka_run_group_tests_name("vae", tests, NULL, NULL);
}
