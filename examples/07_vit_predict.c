/* 07: loads the model that 06_vit_train.c saved into a tree of its own, on one rank or any other
 * number, and reads new digits.
 * Build: cc -O3 07_vit_predict.c -lm -pthread; run: ./a.out [ranks [file]] */
#define TSHARD_IMPLEMENTATION
#include "vit.h"
#include <stdlib.h>

enum { IMAGES = 500, SHOWN = 5 };

static int predict(tsh_ctx *ctx, void *user) {
    tsh_module *model = tsh_add_module(tsh_root(ctx), "reader", NULL);
    add_vit(model);
    tsh_parallelize(model, plan, sizeof plan / sizeof *plan);
    tsh_load_with(model, (const char *)user, NULL, &(tsh_file_desc){.prefix = "vit"});
    tsh_train(model, 0); /* torch's model.eval() */

    tsh_tensor *x = tsh_tensor_new(ctx, TSH_REAL, tsh_shape3(IMAGES, PATCHES, PIXELS),
                                   tsh_replicated());
    tsh_tensor *target = tsh_tensor_new(ctx, TSH_I64, tsh_shape1(IMAGES), tsh_replicated());
    if (!tsh_ok(ctx)) return 1; /* on every rank, whichever failed */
    make_images(123456789, IMAGES, tsh_data(ctx, x), tsh_data(ctx, target));

    tsh_real logits[IMAGES * CLASSES];
    int64_t guess[IMAGES];
    tsh_no_grad_begin(ctx);
    tsh_tensor *y = vit(model, x);
    tsh_read(ctx, y, TSH_GLOBAL, logits, sizeof logits);
    tsh_read(ctx, tsh_argmax(y, -1, 0), TSH_GLOBAL, guess, sizeof guess);
    tsh_no_grad_end(ctx);
    if (!tsh_ok(ctx)) return 1;

    const int64_t *truth = (const int64_t *)tsh_data(ctx, target);
    int right = 0, speaks = tsh_world(ctx)->rank == 0;
    for (int i = 0; i < IMAGES; i++) right += guess[i] == truth[i];
    for (int i = 0; i < SHOWN && speaks; i++)
        printf("image %d: %d (it is %d), logit %.4f\n", i, (int)guess[i], (int)truth[i],
               (double)logits[i * CLASSES + guess[i]]);
    if (speaks) printf("%d of %d right\n", right, IMAGES);
    return right < IMAGES * 95 / 100;
}

int main(int argc, char **argv) {
    char path[512];
    const tsh_desc desc = {.logger.log = tsh_log_stderr};
    char *file = argc > 2 ? argv[2] : file_beside(argv[0], path, sizeof path);
    FILE *found = fopen(file, "rb");
    if (found == NULL) {
        fprintf(stderr, "%s is missing: 06_vit_train writes it, run that first\n", file);
        return 1;
    }
    fclose(found);
    return tsh_threads_run(argc > 1 ? atoi(argv[1]) : 1, &desc, predict, file);
}
