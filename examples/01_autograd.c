/* 01: a small network learns y = x0 x1 from random points. Build: cc 01_autograd.c -lm */
#define TSHARD_IMPLEMENTATION
#include "../tshard.h"
#include <stdio.h>

static int learn(tsh_ctx *ctx, void *user) {
    tsh_linear_desc up = {.in = 2, .out = 32}, down = {.in = 32, .out = 1};
    tsh_module *net = tsh_root(ctx);
    tsh_module *first = tsh_add_linear(net, "up", &up);
    tsh_module *second = tsh_add_linear(net, "down", &down);
    tsh_optim *adam = tsh_optim_new(net, &(tsh_optim_desc){.kind = TSH_ADAM, .lr = 0.005});
    double value = 1;
    for (int step = 0; step <= 500 && tsh_ok(ctx); step++) {
        tsh_tensor *x = tsh_randn(ctx, tsh_shape2(256, 2));
        tsh_tensor *y = tsh_mul(tsh_slice(x, 1, 0, 1), tsh_slice(x, 1, 1, 1));
        tsh_tensor *guess = tsh_forward(second, tsh_gelu(tsh_forward(first, x)));
        tsh_tensor *loss = tsh_mean(tsh_pow_scalar(tsh_sub(guess, y), 2), TSH_ALL, 0);
        tsh_backward(ctx, loss);
        value = tsh_item(ctx, loss);
        if (step % 100 == 0 && tsh_tp(ctx)->rank == 0) printf("step %3d  loss %.4f\n", step, value);
        tsh_optim_step(adam);
        tsh_zero_grads(net);
        tsh_step_end(ctx);
    }
    return user != NULL || !tsh_ok(ctx) || value > 0.1; /* guessing 0 has loss 1 */
}

int main(void) {
    tsh_desc desc = {.logger.log = tsh_log_stderr}; /* prints errors */
    return tsh_run(&desc, learn, NULL);
}
