/* 04: an op of one's own, relu(x)^2, with its backward; checked against central differences. */
#define TSHARD_IMPLEMENTATION
#include "../tshard.h"
#include <stdio.h>

/* out = max(x, 0)^2. Inputs arrive dense: this rank's piece, row-major. */
static void relu2_forward(tsh_tensor *const *in, int n, void *const *out, void *user) {
    tsh_real *y = (tsh_real *)out[0];
    const tsh_real *x = (const tsh_real *)tsh_data(tsh_ctx_of(in[0]), in[0]);
    (void)user, (void)n;
    for (int64_t i = 0; i < tsh_local_numel(in[0]); i++) y[i] = x[i] > 0 ? x[i] * x[i] : 0;
}

/* dx += 2 max(x, 0) dout. grad_in[0] is NULL where nobody wants it. */
static void relu2_backward(tsh_tensor *const *in, int n, const void *const *out,
                           const tsh_real *const *grad_out, tsh_real *const *grad_in, void *user) {
    const tsh_real *dy = grad_out[0];
    const tsh_real *x = (const tsh_real *)tsh_data(tsh_ctx_of(in[0]), in[0]);
    (void)user, (void)n, (void)out;
    for (int64_t i = 0; i < tsh_local_numel(in[0]) && grad_in[0] != NULL; i++)
        if (x[i] > 0) grad_in[0][i] += 2 * x[i] * dy[i];
}

/* An elementwise op: the output has the shape and the layout of the input. */
static tsh_tensor *relu2(tsh_tensor *x) {
    const tsh_custom_op_desc desc = {.name = "relu2",
                                     .out[0].shape = tsh_shape_of(x),
                                     .out[0].layout = tsh_layout_of(x),
                                     .forward = relu2_forward,
                                     .backward = relu2_backward};
    return tsh_custom_op(tsh_ctx_of(x), &x, 1, NULL, &desc);
}

static tsh_tensor *scalar(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {
    (void)ctx, (void)n, (void)user;
    return tsh_mean(relu2(in[0]), TSH_ALL, 0);
}

static int check(tsh_ctx *ctx, void *user) {
    static const tsh_real values[] = {-2, -1, (tsh_real)-0.5, (tsh_real)0.5, 1, 2};
    char text[128];
    tsh_tensor *x = tsh_tensor_from(ctx, TSH_REAL, tsh_shape2(2, 3), tsh_replicated(), values);
    (void)user;
    tsh_requires_grad(x, 1);
    printf("x        %s\n", tsh_to_string(x, text, sizeof text));
    printf("relu2(x) %s\n", tsh_to_string(relu2(x), text, sizeof text));
    tsh_step_end(ctx);
    double worst = tsh_gradcheck(ctx, scalar, &x, 1, NULL, 0, 0);
    printf("largest difference to central differences: %.1e\n", worst);
    return tsh_ok(ctx) && worst >= 0 && worst < 1e-3 ? 0 : 1;
}

int main(void) {
    tsh_desc desc = {.logger.log = tsh_log_stderr}; /* prints errors */
    return tsh_run(&desc, check, NULL);
}
