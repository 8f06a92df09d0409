/* 11: an op with two outputs, and a module with parameters of its own: a linear layer whose weight
 * is divided by its largest singular value (Miyato et al. 2018; torch.nn.utils.spectral_norm). Both
 * on one to three ranks, checked against central differences.
 * Build: cc -O3 11_modules_and_ops.c -lm -pthread */
#define TSHARD_IMPLEMENTATION
#include "../tshard.h"
#include "../backends/tshard_threads.h"
#include <stdio.h>

/* -- an op with two outputs: the halves of x along its last dimension -------- */

static void halves_forward(tsh_tensor *const *in, int n, void *const *out, void *user) {
    const tsh_real *x = (const tsh_real *)tsh_data(tsh_ctx_of(in[0]), in[0]);
    int64_t count = tsh_local_numel(in[0]), columns = tsh_size(in[0], -1), half = columns / 2;
    (void)n, (void)user;
    for (int64_t i = 0; i < count; i++) {
        tsh_real *y = (tsh_real *)out[i % columns / half];
        y[i / columns * half + i % half] = x[i];
    }
}

/* grad_out[k] is NULL if the loss does not depend on output k. */
static void halves_backward(tsh_tensor *const *in, int n, const void *const *out,
                            const tsh_real *const *grad_out, tsh_real *const *grad_in, void *user) {
    int64_t count = tsh_local_numel(in[0]), columns = tsh_size(in[0], -1), half = columns / 2;
    (void)n, (void)out, (void)user;
    for (int64_t i = 0; i < count && grad_in[0]; i++) {
        const tsh_real *dy = grad_out[i % columns / half];
        if (dy) grad_in[0][i] += dy[i / columns * half + i % half];
    }
}

/* The rule of this op: an even number of columns, which lie on one rank; what is sharded along
 * another dimension stays so. Writes both halves to half, NULLs after an error. */
static void halves(tsh_tensor *x, tsh_tensor **half) {
    tsh_custom_op_desc desc = {
        .name = "halves", .outputs = 2, .forward = halves_forward, .backward = halves_backward};
    tsh_layout layout = tsh_layout_of(x);
    int last = tsh_ndim(x) - 1;
    half[0] = half[1] = NULL;
    if (last < 0 || tsh_size(x, last) % 2 || layout.kind == TSH_PARTIAL ||
        (layout.kind == TSH_SHARDED && layout.dim == last)) {
        (void)tsh_fail(tsh_ctx_of(x), TSH_ERR_LAYOUT,
                       "halves: x has %d columns, which must be an even number on one rank; "
                       "tsh_redistribute(x, tsh_replicated())",
                       (int)tsh_size(x, last));
        return;
    }
    for (int k = 0; k < 2; k++) {
        desc.out[k].shape = tsh_shape_of(x);
        desc.out[k].shape.dim[last] /= 2;
        desc.out[k].layout = layout;
    }
    (void)tsh_custom_op(tsh_ctx_of(x), &x, 1, half, &desc);
}

/* -- a module with parameters of its own: spectral norm ---------------------- */

enum { IN = 4, OUT = 6, BATCH = 3 };

static tsh_tensor *normalized(tsh_tensor *x) {
    return tsh_div(x, tsh_sqrt(tsh_full_tensor(tsh_sum(tsh_mul(x, x), TSH_ALL, 0))));
}

/* y = x (W / sigma)^T + b with sigma = u . W v. The rows of W, b and u may be sharded: sums over
 * rows are completed by tsh_full_tensor. */
static tsh_tensor *spectral_forward(tsh_module *self, tsh_tensor **in, int n, void *user) {
    tsh_tensor *w = tsh_param(self, "weight"), *u = tsh_param(self, "u"), *v = tsh_param(self, "v");
    tsh_tensor *sigma = tsh_full_tensor(tsh_sum(tsh_mul(u, tsh_matmul(w, v)), TSH_ALL, 0));
    (void)n, (void)user;
    return tsh_linear(in[0], tsh_div(w, sigma), tsh_param(self, "bias"));
}

/* Writes the values of t to the buffer of this name; both have the same layout. */
static void set_buffer(tsh_module *self, const char *name, tsh_tensor *t) {
    tsh_ctx *ctx = tsh_ctx_of(t);
    (void)tsh_write(ctx, tsh_param(self, name), TSH_LOCAL, tsh_data(ctx, t),
                    (size_t)tsh_local_numel(t) * sizeof(tsh_real));
}

/* One step of power iteration: u and v come nearer to W's first singular vectors. A program calls
 * it before each step of training. */
static void spectral_iterate(tsh_module *self) {
    tsh_tensor *w = tsh_param(self, "weight"), *u = tsh_param(self, "u");
    tsh_no_grad_begin(tsh_ctx_of(w));
    set_buffer(self, "v", normalized(tsh_full_tensor(tsh_matmul(tsh_transpose(w, 0, 1), u))));
    set_buffer(self, "u", normalized(tsh_matmul(w, tsh_param(self, "v"))));
    tsh_no_grad_end(tsh_ctx_of(w));
}

static tsh_module *add_spectral(tsh_module *parent, const char *name, int64_t in, int64_t out) {
    const tsh_layout rows = tsh_sharded(0); /* column-parallel: output features are sharded */
    const tsh_init normal = {.kind = TSH_INIT_NORMAL, .b = 1};
    const tsh_param_desc weight = {.init = normal, .layout = &rows}, bias = {.layout = &rows};
    const tsh_param_desc u = {.init = normal, .layout = &rows, .buffer = 1}, v = {.buffer = 1};
    tsh_module *self = tsh_add_module(parent, name,
                                      &(tsh_module_desc){.forward = spectral_forward});
    tsh_add_param(self, "weight", tsh_shape2(out, in), &weight);
    tsh_add_param(self, "bias", tsh_shape1(out), &bias);
    tsh_add_param(self, "u", tsh_shape2(out, 1), &u);
    tsh_add_param(self, "v", tsh_shape2(in, 1), &v);
    return self;
}

/* -- both, checked ----------------------------------------------------------- */

static tsh_tensor *loss_of(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {
    tsh_tensor *half[2];
    (void)n, (void)ctx;
    halves(tsh_full_tensor(tsh_forward((tsh_module *)user, in[0])), half);
    return tsh_mean(tsh_mul(half[0], tsh_tanh(half[1])), TSH_ALL, 0);
}

static int check(tsh_ctx *ctx, void *user) {
    tsh_module *layer = add_spectral(tsh_root(ctx), "layer", IN, OUT);
    tsh_tensor *x = tsh_requires_grad(tsh_keep(tsh_randn(ctx, tsh_shape2(BATCH, IN))), 1);
    tsh_tensor *in[] = {x, tsh_param(layer, "weight"), tsh_param(layer, "bias")};
    double worst, loss;
    (void)user;
    for (int i = 0; i < 20; i++) spectral_iterate(layer);
    worst = tsh_gradcheck(ctx, loss_of, in, 3, layer, 0, 0);
    loss = tsh_item(ctx, loss_of(ctx, in, 3, layer));
    if (tsh_world(ctx)->rank == 0)
        printf("%d ranks: loss %.5f, largest difference to central differences %.1e\n",
               tsh_world(ctx)->size, loss, worst);
    return tsh_ok(ctx) && worst >= 0 && worst < 1e-2 ? 0 : 1;
}

int main(void) {
    const tsh_desc desc = {.logger.log = tsh_log_stderr};
    int failed = 0;
    for (int ranks = 1; ranks <= 3; ranks++) failed |= tsh_threads_run(ranks, &desc, check, NULL);
    return failed;
}
