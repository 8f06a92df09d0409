/* Convolutions: time of forward and backward of a model's layers, each by itself.
 *
 *     cc -std=c99 -D_POSIX_C_SOURCE=200809L -O3 -fopenmp tests/bench/conv.c -lm -o build/conv
 *     build/conv ROUNDS THREADS 32       (or 224: the size of the images)
 *     build/conv ROUNDS 1 32 cpu         (time of the processor: for a machine that others use)
 *
 * The layers are those of ResNet-18, with a 3x3 stem for images of 32x32 and torchvision's for
 * 224x224. The input of the stem needs no gradient. Prints, per layer, "name count forward
 * backward_x backward_w" in ms, the best of the rounds, then "sum forward backward" weighted by how
 * often each stands in the network. tests/bench/conv.py does the same with PyTorch. */
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static int cpu; /* 1: time of the processor */

/* The time in ms. */
static double now(void) {
    return cpu ? 1e3 * (double)clock() / CLOCKS_PER_SEC : (double)tsh_now() / 1e6;
}

typedef struct layer {
    int in, out, size, kernel, stride, padding, count;
} layer;

enum { LAYERS = 11, BATCH = 16 };

/* {in, out, height of the input as a fraction of the image, ...} */
static void layers_of(int image, layer *l) {
    const int base = image == 32 ? 32 : image / 4;
    const layer stem = image == 32 ? (layer){3, 64, 32, 3, 1, 1, 1}
                                   : (layer){3, 64, 224, 7, 2, 3, 1};
    int n = 0, s, c = 64, size = base;
    l[n++] = stem;
    l[n++] = (layer){64, 64, base, 3, 1, 1, 4};
    for (s = 0; s < 3; s++, c *= 2, size /= 2) {
        l[n++] = (layer){c, 2 * c, size, 3, 2, 1, 1};
        l[n++] = (layer){c, 2 * c, size, 1, 2, 0, 1};
        l[n++] = (layer){2 * c, 2 * c, size / 2, 3, 1, 1, 3};
    }
}

static double best[3];

static void keep(int i, double ms) {
    if (ms < best[i]) best[i] = ms;
}

static void measure(tsh_ctx *ctx, const layer *l, int rounds, int stem) {
    tsh_shape sx = tsh_shape4(BATCH, l->in, l->size, l->size);
    tsh_shape sw = tsh_shape4(l->out, l->in, l->kernel, l->kernel);
    tsh_tensor *x = tsh_tensor_new(ctx, TSH_F32, sx, tsh_replicated());
    tsh_tensor *w = tsh_tensor_new(ctx, TSH_F32, sw, tsh_replicated());
    tsh_conv_options o;
    int i, r;
    memset(&o, 0, sizeof o);
    for (i = 0; i < 2; i++) {
        o.stride[i] = l->stride;
        o.padding[i] = l->padding;
    }
    for (i = 0; i < tsh_numel(x); i++) ((float *)tsh_data(ctx, x))[i] = (float)(i % 13 - 6) / 7;
    for (i = 0; i < tsh_numel(w); i++) ((float *)tsh_data(ctx, w))[i] = (float)(i % 11 - 5) / 50;
    for (i = 0; i < 3; i++) best[i] = 1e9;
    for (r = 0; r < rounds; r++)
        for (i = 0; i < 2; i++) { /* the gradient of x alone, of w alone */
            double begin, middle, end;
            tsh_tensor *y, *g;
            if (i == 0 && stem) {
                best[1] = 0;
                continue;
            }
            tsh_requires_grad(x, i == 0);
            tsh_requires_grad(w, i == 1);
            begin = now();
            y = tsh_conv2d(x, w, NULL, &o);
            middle = now();
            keep(0, middle - begin);
            g = tsh_sum(y, TSH_ALL, 0);
            middle = now();
            tsh_backward(ctx, g);
            end = now();
            keep(1 + i, end - middle);
            tsh_zero_grad(x);
            tsh_zero_grad(w);
            tsh_step_end(ctx);
        }
    tsh_tensor_free(x);
    tsh_tensor_free(w);
}

int main(int argc, char **argv) {
    const int rounds = argc > 1 ? atoi(argv[1]) : 5, image = argc > 3 ? atoi(argv[3]) : 32;
    double forward = 0, backward = 0;
    tsh_desc desc;
    tsh_ctx *ctx;
    layer all[LAYERS];
    int i;
    cpu = argc > 4;
    memset(&desc, 0, sizeof desc);
    desc.threads = argc > 2 ? atoi(argv[2]) : 2;
    if (tsh_open(&desc, &ctx) != TSH_OK) return 1;
    layers_of(image, all);
    for (i = 0; i < LAYERS; i++) {
        const layer *l = &all[i];
        const double gflop = 2e-9 * BATCH * l->in * l->out * l->kernel * l->kernel *
                             (l->size / l->stride) * (l->size / l->stride);
        measure(ctx, l, rounds, i == 0);
        printf("%dx%d_s%d_%d_%d_%d %d %.3f %.3f %.3f   %.0f %.0f %.0f GFLOP/s\n", l->kernel,
               l->kernel, l->stride, l->in, l->out, l->size, l->count, best[0], best[1], best[2],
               gflop / best[0] * 1e3, best[1] > 0 ? gflop / best[1] * 1e3 : 0,
               gflop / best[2] * 1e3);
        forward += l->count * best[0];
        backward += l->count * (best[1] + best[2]);
    }
    printf("sum %.2f %.2f %.2f\n", forward, backward, forward + backward);
    tsh_close(ctx);
    return 0;
}
