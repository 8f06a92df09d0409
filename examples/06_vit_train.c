/* 06: a vision transformer on two ranks learns to read digits, and is saved.
 * Build: cc -O3 06_vit_train.c -lm -pthread; run: ./a.out [ranks [file]] */
#define TSHARD_IMPLEMENTATION
#include "vit.h"
#include <stdlib.h>

enum { BATCH = 64, STEPS = 500 };

static int train(tsh_ctx *ctx, void *user) {
    tsh_module *model = tsh_add_module(tsh_root(ctx), "vit", NULL);
    add_vit(model);
    tsh_parallelize(model, plan, sizeof plan / sizeof *plan);

    tsh_schedule cosine = {.kind = TSH_COSINE, .lr = 1e-3, .total = STEPS};
    tsh_optim_desc adamw = {.kind = TSH_ADAMW, .weight_decay = 0.01, .clip_norm = 1};
    tsh_optim *optim = tsh_optim_new(model, &adamw);
    tsh_optim_group(optim, "**.bias", 1, 0); /* the same learning rate, no weight decay */
    tsh_optim_group(optim, "**.norm*.weight", 1, 0);

    tsh_real pixels[BATCH * PATCHES * PIXELS];
    int64_t digits[BATCH];
    double value = 1e9;
    for (int step = 0; step < STEPS && tsh_ok(ctx); step++) {
        make_images((unsigned)step, BATCH, pixels, digits);
        tsh_tensor *x = tsh_from(ctx, pixels, tsh_shape3(BATCH, PATCHES, PIXELS), TSH_REAL);
        tsh_tensor *target = tsh_from(ctx, digits, tsh_shape1(BATCH), TSH_I64);
        tsh_tensor *loss = tsh_cross_entropy(vit(model, x), target, NULL);
        tsh_backward(ctx, loss);
        tsh_optim_set_lr(optim, tsh_schedule_lr(&cosine, step));
        tsh_optim_step(optim);
        tsh_zero_grads(model);
        value = tsh_item(ctx, loss);
        if (step % 50 == 49 && tsh_world(ctx)->rank == 0)
            printf("step %3d  loss %.4f\n", step + 1, value);
        tsh_step_end(ctx);
    }
    tsh_save(tsh_root(ctx), (const char *)user, NULL); /* "vit.cls_token" and so on */
    return !tsh_ok(ctx) || !(value < 0.5); /* guessing has loss log 10 = 2.3 */
}

int main(int argc, char **argv) {
    char path[512];
    const tsh_desc desc = {.logger.log = tsh_log_stderr};
    int ranks = argc > 1 ? atoi(argv[1]) : 2;
    file_beside(argv[0], path, sizeof path);
    return tsh_threads_run(ranks, &desc, train, argc > 2 ? argv[2] : path);
}
