// 08: program 02 in C++17: descs that compile without warnings, a lambda as the rank's function,
// errors as exceptions. Build: c++ -std=c++17 -O3 08_cxx.cpp -pthread
//
// A desc's zeros are its defaults, so `tsh_linear_desc up{}` and a line per field is the form that
// compiles without warnings: {.in = 2} is C or C++20, and {2, 32} warns of every field left out.
#define TSHARD_IMPLEMENTATION
#include "../backends/tshard_threads.h"
#include <cstdio>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>

// make<tsh_linear_desc>([](auto &d) { d.in = 2; }): the same as one expression.
template <class Desc, class Fill> Desc make(Fill fill) {
    Desc desc{};
    fill(desc);
    return desc;
}

// Throws the error that ctx holds, if any.
static void check(tsh_ctx *ctx) {
    if (!tsh_ok(ctx)) throw std::runtime_error(tsh_last_error(ctx)->message);
}

// No op is recorded while one of these lives.
class NoGrad {
public:
    explicit NoGrad(tsh_ctx *ctx) : ctx_(ctx) { tsh_no_grad_begin(ctx_); }
    ~NoGrad() { tsh_no_grad_end(ctx_); }
    NoGrad(const NoGrad &) = delete;
    NoGrad &operator=(const NoGrad &) = delete;

private:
    tsh_ctx *ctx_;
};

// An owned tensor that is freed at the end of its scope.
struct Free {
    void operator()(tsh_tensor *t) const { tsh_tensor_free(t); }
};
using Tensor = std::unique_ptr<tsh_tensor, Free>;

// Runs body(ctx) on so many threads. An exception may not leave through the library's C functions,
// so it becomes an error of the ctx, which stops the other ranks, too; it is thrown again here, as
// the first rank's sentence.
template <class Body> void run(int ranks, const tsh_desc &desc, Body body) {
    struct Run {
        Body &body;
        std::string error; // written by rank 0 alone
    } state{body, {}};
    auto rank = [](tsh_ctx *ctx, void *user) -> int {
        auto &self = *static_cast<Run *>(user);
        try {
            self.body(ctx);
        } catch (const std::exception &e) {
            tsh_fail(ctx, TSH_ERR_STATE, "%s", e.what());
        }
        const bool ok = tsh_ok(ctx) != 0;
        if (!ok && tsh_world(ctx)->rank == 0) self.error = tsh_last_error(ctx)->message;
        return ok ? 0 : 1;
    };
    if (tsh_threads_run(ranks, &desc, rank, &state) != 0)
        throw std::runtime_error(state.error.empty() ? "the ranks could not start" : state.error);
}

static double learn(tsh_ctx *ctx) {
    tsh_linear_desc up{}, down{};
    up.in = 2, up.out = 32, up.style = TSH_COLWISE;
    down.in = 32, down.out = 1, down.style = TSH_ROWWISE;
    tsh_module *net = tsh_root(ctx);
    tsh_module *first = tsh_add_linear(net, "up", &up);
    tsh_module *second = tsh_add_linear(net, "down", &down);
    const auto adam = make<tsh_optim_desc>([](auto &d) { d.kind = TSH_ADAM, d.lr = 0.005; });
    tsh_optim *optim = tsh_optim_new(net, &adam);
    const auto loss_of = [&](tsh_tensor *x) {
        tsh_tensor *y = tsh_mul(tsh_slice(x, 1, 0, 1), tsh_slice(x, 1, 1, 1));
        tsh_tensor *guess = tsh_forward(second, tsh_gelu(tsh_forward(first, x)));
        return tsh_mean(tsh_pow_scalar(tsh_sub(guess, y), 2), TSH_ALL, 0);
    };
    for (int step = 0; step < 500; step++) {
        tsh_backward(ctx, loss_of(tsh_randn(ctx, tsh_shape2(256, 2))));
        tsh_optim_step(optim);
        tsh_zero_grads(net);
        tsh_step_end(ctx);
        check(ctx);
    }
    const Tensor unseen(tsh_keep(tsh_randn(ctx, tsh_shape2(1000, 2))));
    const NoGrad guard(ctx);
    const double loss = tsh_item(ctx, loss_of(unseen.get()));
    check(ctx);
    return loss;
}

int main() {
    tsh_desc desc{};
    desc.logger.log = tsh_log_stderr;
    double loss = 1; // what guessing 0 has
    try {
        run(2, desc, [&loss](tsh_ctx *ctx) {
            const double mine = learn(ctx);
            if (tsh_world(ctx)->rank == 0) loss = mine;
        });
        std::printf("loss on unseen points %.4f\n", loss);

        desc.logger.log = nullptr; // the next error is meant: it is caught below
        run(2, desc, [](tsh_ctx *ctx) {
            tsh_add(tsh_zeros(ctx, tsh_shape2(2, 3)), tsh_zeros(ctx, tsh_shape2(3, 2)));
            check(ctx);
        });
    } catch (const std::exception &e) {
        std::printf("caught: %s\n", e.what());
        return loss < 0.1 ? 0 : 1;
    }
    return 1; // the second run must have thrown
}
