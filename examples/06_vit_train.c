/* 06: a vision transformer on two ranks learns where a ring lies as seen from a cross, and is
 * saved. Build: cc -O3 06_vit_train.c -lm -pthread; run: ./a.out [ranks [file]] */
#define TSHARD_IMPLEMENTATION
#include "vit.h"
#include <stdlib.h>

enum { BATCH = 64, STEPS = 400 };

static int train(tsh_ctx *ctx, void *user) {
    static const tsh_optim_desc adamw = {.kind = TSH_ADAMW, .lr = 2e-3, .weight_decay = 0.01};
    tsh_module *model = tsh_root(ctx);
    add_vit(model);
    tsh_parallelize(model, plan, 4); /* on one rank this changes nothing */
    tsh_optim *optim = tsh_optim_new(model, &adamw);
    tsh_optim_group(optim, "**.bias", 1, 0); /* the same learning rate, no weight decay */
    tsh_optim_group(optim, "**.norm*.weight", 1, 0);

    tsh_real *pixels = malloc(BATCH * PATCHES * PIXELS * sizeof *pixels);
    int64_t target[BATCH];
    double value = 0, correct = 0;
    for (int step = 1; step <= STEPS && pixels != NULL && tsh_ok(ctx); step++) {
        make_images((unsigned)step, BATCH, pixels, target);
        tsh_tensor *x = tsh_tensor_from(ctx, TSH_REAL, tsh_shape3(BATCH, PATCHES, PIXELS), NULL, pixels);
        tsh_tensor *y = tsh_tensor_from(ctx, TSH_I64, tsh_shape1(BATCH), NULL, target);
        tsh_tensor *logits = tsh_retain(vit(model, x));
        tsh_tensor *loss = tsh_cross_entropy(logits, y, NULL);
        tsh_backward(ctx, loss);
        tsh_optim_step(optim);
        value = tsh_item(ctx, loss);
        correct = tsh_item(ctx, tsh_mean(tsh_cast(tsh_eq(tsh_argmax(logits, -1, 0), y), TSH_REAL), 0, 0));
        if (step % 50 == 0 && tsh_tp(ctx)->rank == 0)
            printf("step %3d  loss %.4f  correct %3.0f %%\n", step, value, 100 * correct);
        tsh_zero_grads(model);
        tsh_step_end(ctx);
        tsh_tensor_free(x);
        tsh_tensor_free(y);
    }
    free(pixels);
    tsh_save(model, (const char *)user, NULL);
    if (tsh_ok(ctx) && tsh_tp(ctx)->rank == 0) printf("saved %s\n", (const char *)user);
    return !tsh_ok(ctx) || correct < 0.95;
}

int main(int argc, char **argv) {
    char path[512];
    int ranks = argc > 1 ? atoi(argv[1]) : 2;
    return tsh_threads_run(ranks, NULL, train,
                           argc > 2 ? argv[2] : (char *)file_beside(argv[0], path, sizeof path));
}
