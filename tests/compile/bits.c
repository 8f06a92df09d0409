/* Trains a small transformer in bf16, and in float, and prints hashes of all that it computes: the
 * same from every build of the library on one processor (test_compile.py). */
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"

#include <stdio.h>

static void add_hash(const char *path, tsh_tensor *param, void *user) {
    uint64_t *sum = (uint64_t *)user;
    (void)path;
    *sum = *sum * 31 + tsh_hash(tsh_ctx_of(param), param);
}

/* x (B, T, 64): 70 positions, so that no block of a product or of attention is whole. */
static int train(tsh_ctx *ctx, void *user) {
    tsh_attention_layer_desc attention = {0};
    tsh_mlp_desc mlp = {0};
    tsh_layer_norm_desc norm = {0};
    tsh_rope_desc rope = {0};
    tsh_optim_desc desc = {TSH_ADAMW};
    tsh_module *root = tsh_root(ctx), *one, *two, *three;
    tsh_optim *optim;
    uint64_t sum = 0;
    (void)user;
    attention.dim = mlp.dim = norm.dim = 64;
    attention.heads = 4;
    attention.kv_heads = 2;
    attention.rope = &rope;
    attention.attention.causal = 1;
    mlp.hidden = 150;
    mlp.gated = 1;
    one = tsh_add_attention(root, "attn", &attention);
    two = tsh_add_layer_norm(root, "norm", &norm);
    three = tsh_add_mlp(root, "mlp", &mlp);
    optim = tsh_optim_new(root, &desc);
    for (int step = 0; step < 3 && tsh_ok(ctx); step++) {
        tsh_tensor *x = tsh_cast(tsh_randn(ctx, tsh_shape3(2, 70, 64)), TSH_DTYPE_DEFAULT);
        tsh_tensor *y = tsh_add(x, tsh_forward(one, x));
        y = tsh_forward(three, tsh_forward(two, y));
        sum = sum * 31 + tsh_hash(ctx, y);
        (void)tsh_backward(ctx, tsh_mean(tsh_pow_scalar(tsh_softmax(y, -1), 2), TSH_ALL, 0));
        (void)tsh_optim_step(optim);
        tsh_zero_grads(root);
        (void)tsh_step_end(ctx);
    }
    tsh_no_grad_begin(ctx);
    for (int64_t rows = 1; rows < 6; rows++) { /* products of few rows */
        tsh_tensor *x = tsh_cast(tsh_randn(ctx, tsh_shape2(rows, 64)), TSH_DTYPE_DEFAULT);
        sum = sum * 31 + tsh_hash(ctx, tsh_forward(three, x));
    }
    tsh_each_param(root, add_hash, &sum);
    printf("%016llx%s\n", (unsigned long long)sum, tsh_ok(ctx) ? "" : tsh_last_error(ctx)->message);
    return !tsh_ok(ctx);
}

int main(void) {
    tsh_desc desc = {0};
    int failed = 0;
    for (int bf16 = 0; bf16 < 2; bf16++) {
        desc.dtype = bf16 ? TSH_BF16 : TSH_DTYPE_DEFAULT;
        failed |= tsh_run(&desc, train, NULL);
    }
    return failed;
}
