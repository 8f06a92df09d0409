/* A program of version 0.1, for test_compile.py: it does not compile any more, and does after
 * rename_0_2.sed. It has one use of every name that 0.2 changed. */
#define TSHARD_IMPLEMENTATION
#include "tshard.h"
#include "backends/tshard_threads.h"
#include <string.h>

static void hear(void *user, const char *message) {
    ++*(int *)user;
    tsh_log_stderr(NULL, message);
}

static void *allocate(void *user, void *ptr, size_t old_size, size_t new_size, size_t align) {
    ++*(int *)user;
    (void)ptr, (void)old_size, (void)new_size, (void)align;
    return NULL; /* there is no memory */
}

static void copy(void *user, tsh_tensor *const *in, int n, tsh_real *out) {
    (void)user, (void)n;
    memcpy(out, tsh_data(tsh_ctx_of(in[0]), in[0]), 6 * sizeof *out);
}

static void copy_back(void *user, tsh_tensor *const *in, int n, const tsh_real *out,
                      const tsh_real *grad_out, tsh_real *const *grad_in) {
    (void)user, (void)in, (void)n, (void)out;
    memcpy(grad_in[0], grad_out, 6 * sizeof *grad_out);
}

static int rank_main(tsh_ctx *ctx, void *user) {
    static const float six[] = {1, 2, 3, 4, 5, 6};
    const tsh_linear_desc linear = {.in = 3, .out = 2, .no_bias = 1};
    const tsh_mlp_desc mlp = {.dim = 3, .hidden = 4, .bias = 1};
    const tsh_layout rows = tsh_sharded(0);
    tsh_custom_desc custom = {.shape = {2, {2, 3}}, .forward = copy, .backward = copy_back};
    tsh_tensor *x = tsh_tensor_from(ctx, TSH_F32, tsh_shape2(2, 3), NULL, six), *y, *parts[3];
    tsh_tensor *owned = tsh_tensor_new(ctx, TSH_F32, tsh_shape2(2, 3), &rows);
    tsh_tensor *plain = tsh_tensor_new(ctx, TSH_F32, tsh_shape1(2), NULL);
    tsh_comm comm;
    char text[64];
    (void)user;
    (void)tsh_add_linear(tsh_root(ctx), "linear", &linear);
    (void)tsh_add_mlp(tsh_root(ctx), "mlp", &mlp);
    custom.name = "copy";
    y = tsh_retain(tsh_custom_op(ctx, &x, 1, &custom));
    y = tsh_full(tsh_add(y, tsh_filled(ctx, tsh_shape2(2, 3), 1)));
    (void)tsh_split_dim(y, 1, 3, parts);
    (void)tsh_split(tsh_world(ctx), 0, 0, &comm);
    tsh_comm_close(&comm);
    return !tsh_ok(ctx) || tsh_dim(owned, 1) != 3 || tsh_local_dim(owned, 0) != 1 ||
           tsh_dim(plain, 0) != 2 || tsh_chunk(&rows, 2, 2, 0, NULL) != 1 ||
           strcmp(tsh_layout_text(&rows, text, sizeof text), "S(0)") != 0;
}

int main(void) {
    int heard = 0, called = 0;
    tsh_desc desc = {0};
    desc.logger.fn = hear;
    desc.logger.user = &heard;
    desc.allocator.fn = allocate;
    desc.allocator.user = &called;
    if (tsh_run(&desc, rank_main, NULL) != 1 || heard != 1 || called != 1) return 1;
    desc.allocator.fn = NULL;
    return tsh_threads_run(2, &desc, rank_main, NULL);
}
