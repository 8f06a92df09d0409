// The first example as C++11 on two ranks, each with half of the hidden layer.
#include "tshard.h"
#include "backends/tshard_threads.h"

#include <cstdio>
#include <cstring>

static int learn(tsh_ctx *ctx, void *) {
    tsh_linear_desc up = {}, down = {};
    up.in = 2;
    up.out = 32;
    up.style = TSH_COLWISE;
    down.in = 32;
    down.out = 1;
    down.style = TSH_ROWWISE;
    tsh_optim_desc adam = {};
    adam.kind = TSH_ADAM;
    adam.lr = 0.005;
    tsh_module *net = tsh_root(ctx);
    tsh_module *first = tsh_add_linear(net, "up", &up);
    tsh_module *second = tsh_add_linear(net, "down", &down);
    tsh_optim *optim = tsh_optim_new(net, &adam);
    for (int step = 0; step <= 500 && tsh_ok(ctx); step++) {
        tsh_tensor *x = tsh_randn(ctx, tsh_shape2(256, 2));
        tsh_tensor *y = tsh_mul(tsh_slice(x, 1, 0, 1), tsh_slice(x, 1, 1, 1));
        tsh_tensor *guess = tsh_forward(second, tsh_gelu(tsh_forward(first, x)));
        tsh_tensor *loss = tsh_mean(tsh_pow_scalar(tsh_sub(guess, y), 2), TSH_ALL, 0);
        tsh_backward(ctx, loss);
        if (step % 100 == 0 && tsh_tp(ctx)->rank == 0)
            std::printf("step %3d  loss %.4f\n", step, tsh_item(ctx, loss));
        tsh_optim_step(optim);
        tsh_zero_grads(net);
        tsh_step_end(ctx);
    }
    return !tsh_ok(ctx);
}

int main() {
    if (std::strcmp(tsh_version(), TSHARD_VERSION) != 0) return 2;
    return tsh_threads_run(2, nullptr, learn, nullptr);
}
