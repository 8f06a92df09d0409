/* Networks without attention: time of a training step of ResNet-18, and of forward and backward of
 * an LSTM and of ops on indices.
 *
 *     cc -std=c99 -D_POSIX_C_SOURCE=200809L -O3 -fopenmp tests/bench/nets.c -lm -o build/nets
 *     build/nets THREADS ROUNDS NAME...       prints "NAME ms", the median of the rounds
 *
 * resnet32, resnet224: a step with SGD and momentum, batch 16, images of 32x32 (with a 3x3 stem) or
 * of 224x224. lstm: width 256, batch 32, 64 time steps. gather0, gather1, scatter0, scatter1: along
 * dimension 0 or 1 of (65536, 64). topk: 50 of 50257, 64 rows. tests/bench/nets.py does the same
 * with PyTorch, by turns with this program. */
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BATCH = 16, ROWS = 65536, COLUMNS = 64, MOST = 1000 };
static const int64_t widths[] = {64, 64, 128, 256, 512};

/* Numbers that look random, in [0, 1). */
static double number(void) {
    static uint64_t state = 1;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (double)(state >> 40) / 16777216.0;
}

/* ------------------------------------------------------------------ ResNet-18 */

static void add_conv(tsh_module *parent, const char *conv, const char *norm, int64_t in,
                     int64_t out, int64_t kernel, int64_t stride) {
    tsh_conv_desc c;
    tsh_batch_norm_desc n;
    int d;
    memset(&c, 0, sizeof c);
    memset(&n, 0, sizeof n);
    c.in = in;
    c.out = n.dim = out;
    for (d = 0; d < 2; d++) {
        c.kernel[d] = kernel;
        c.stride[d] = stride;
        c.padding[d] = kernel / 2;
    }
    c.bias = TSH_NO;
    tsh_add_conv2d(parent, conv, &c);
    tsh_add_batch_norm(parent, norm, &n);
}

static tsh_tensor *call(tsh_module *parent, const char *name, tsh_tensor *x) {
    return tsh_forward(tsh_find(parent, name), x);
}

static tsh_tensor *block_forward(tsh_module *self, tsh_tensor **in, int n, void *user) {
    tsh_tensor *y = tsh_relu(call(self, "bn1", call(self, "conv1", in[0])));
    (void)n, (void)user;
    y = call(self, "bn2", call(self, "conv2", y));
    return tsh_relu(tsh_add(y, call(self, "downsample", in[0])));
}

static void add_resnet(tsh_module *root, int image) {
    tsh_linear_desc fc;
    int i, b;
    memset(&fc, 0, sizeof fc);
    fc.in = widths[4];
    fc.out = image == 32 ? 10 : 1000;
    add_conv(root, "conv1", "bn1", 3, widths[0], image == 32 ? 3 : 7, image == 32 ? 1 : 2);
    for (i = 1; i <= 4; i++)
        for (b = 0; b < 2; b++) {
            const int64_t in = widths[b ? i : i - 1], out = widths[i];
            const tsh_module_desc desc = {block_forward, NULL};
            char name[16];
            tsh_module *block, *shortcut;
            (void)snprintf(name, sizeof name, "layer%d_%d", i, b);
            block = tsh_add_module(root, name, &desc);
            shortcut = tsh_add_module(block, "downsample", NULL); /* empty: returns its input */
            add_conv(block, "conv1", "bn1", in, out, 3, in == out ? 1 : 2);
            add_conv(block, "conv2", "bn2", out, out, 3, 1);
            if (in != out) add_conv(shortcut, "0", "1", in, out, 1, 2);
        }
    tsh_add_linear(root, "fc", &fc);
}

static tsh_tensor *resnet_loss(tsh_module *root, tsh_tensor *x, tsh_tensor *classes, int image) {
    int i, b;
    x = tsh_relu(call(root, "bn1", call(root, "conv1", x)));
    if (image > 32) {
        tsh_pool_options half;
        memset(&half, 0, sizeof half);
        half.kernel[0] = half.kernel[1] = 3;
        half.stride[0] = half.stride[1] = 2;
        half.padding[0] = half.padding[1] = 1;
        x = tsh_max_pool2d(x, &half);
    }
    for (i = 1; i <= 4; i++)
        for (b = 0; b < 2; b++) {
            char name[16];
            (void)snprintf(name, sizeof name, "layer%d_%d", i, b);
            x = call(root, name, x);
        }
    x = tsh_reshape(tsh_adaptive_avg_pool2d(x, 1, 1), tsh_shape2(-1, widths[4]));
    return tsh_cross_entropy(call(root, "fc", x), classes, NULL);
}

/* ------------------------------------------------------------------ what is measured */

typedef struct work {
    const char *name;
    tsh_ctx *ctx;
    tsh_module *root;
    tsh_optim *optim;
    tsh_tensor *x, *y, *index; /* y, index: NULL if there is none */
} work;

/* An owned tensor of random numbers; below: integers below it instead. */
static tsh_tensor *owned(tsh_ctx *ctx, tsh_shape shape, int64_t below) {
    tsh_tensor *t = tsh_tensor_new(ctx, below ? TSH_I64 : TSH_F32, shape, tsh_replicated());
    void *data = tsh_data(ctx, t);
    int64_t i;
    for (i = 0; i < tsh_numel(t); i++)
        if (below)
            ((int64_t *)data)[i] = (int64_t)(number() * (double)below);
        else
            ((float *)data)[i] = (float)number() - 0.5f;
    return t;
}

static int resnet_image(const char *name) {
    return strncmp(name, "resnet", 6) == 0 ? atoi(name + 6) : 0;
}

static void prepare(work *w) {
    const int image = resnet_image(w->name), along = w->name[strlen(w->name) - 1] == '0' ? 0 : 1;
    if (image) {
        tsh_optim_desc sgd;
        memset(&sgd, 0, sizeof sgd);
        sgd.kind = TSH_SGD;
        sgd.lr = 0.01;
        sgd.momentum = 0.9;
        add_resnet(w->root, image);
        w->optim = tsh_optim_new(w->root, &sgd);
        w->x = owned(w->ctx, tsh_shape4(BATCH, 3, image, image), 0);
        w->index = owned(w->ctx, tsh_shape1(BATCH), image == 32 ? 10 : 1000);
    } else if (strcmp(w->name, "lstm") == 0) {
        tsh_recurrent_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.in = desc.hidden = 256;
        (void)tsh_add_lstm(w->root, "lstm", &desc);
        w->x = tsh_requires_grad(owned(w->ctx, tsh_shape3(64, 32, 256), 0), 1);
    } else if (strcmp(w->name, "topk") == 0) {
        w->x = tsh_requires_grad(owned(w->ctx, tsh_shape2(64, 50257), 0), 1);
    } else {
        w->x = tsh_requires_grad(owned(w->ctx, tsh_shape2(ROWS, COLUMNS), 0), 1);
        w->y = tsh_requires_grad(owned(w->ctx, tsh_shape2(ROWS, COLUMNS), 0), 1);
        w->index = owned(w->ctx, tsh_shape2(ROWS, COLUMNS), along ? COLUMNS : ROWS);
    }
}

static tsh_tensor *forward(const work *w) {
    const int image = resnet_image(w->name), along = w->name[strlen(w->name) - 1] == '0' ? 0 : 1;
    tsh_tensor *y;
    if (image) return resnet_loss(w->root, w->x, w->index, image);
    if (strcmp(w->name, "lstm") == 0)
        y = tsh_forward(tsh_find(w->root, "lstm"), w->x);
    else if (strcmp(w->name, "topk") == 0)
        y = tsh_topk(w->x, 50, -1, 1, NULL);
    else if (w->name[0] == 'g')
        y = tsh_gather(w->x, along, w->index);
    else
        y = tsh_scatter_add(w->x, along, w->index, w->y);
    return tsh_sum(y, TSH_ALL, 0);
}

static int compare(const void *a, const void *b) {
    const double l = *(const double *)a, r = *(const double *)b;
    return (l > r) - (l < r);
}

/* Returns the ms of the median round, after two that do not count. */
static double measure(work *w, int rounds) {
    double ms[MOST];
    int r;
    for (r = -2; r < rounds; r++) {
        const int64_t begin = tsh_now();
        tsh_backward(w->ctx, forward(w));
        if (w->optim) (void)tsh_optim_step(w->optim);
        if (r >= 0) ms[r] = (double)(tsh_now() - begin) / 1e6;
        tsh_step_end(w->ctx);
        tsh_zero_grads(w->root);
        tsh_zero_grad(w->x);
        tsh_zero_grad(w->y);
    }
    qsort(ms, (size_t)rounds, sizeof ms[0], compare);
    return ms[rounds / 2];
}

int main(int argc, char **argv) {
    const int rounds = argc > 2 ? atoi(argv[2]) : 0;
    int i;
    if (argc < 4 || rounds < 1 || rounds > MOST) {
        fprintf(stderr, "usage: %s THREADS ROUNDS NAME...\n", argv[0]);
        return 1;
    }
    for (i = 3; i < argc; i++) {
        work w;
        tsh_desc desc;
        double ms;
        memset(&w, 0, sizeof w);
        memset(&desc, 0, sizeof desc);
        desc.threads = atoi(argv[1]);
        w.name = argv[i];
        if (tsh_open(&desc, &w.ctx) == TSH_OK) {
            w.root = tsh_root(w.ctx);
            prepare(&w);
            ms = measure(&w, rounds);
            if (tsh_ok(w.ctx)) printf("%s %.3f\n", w.name, ms);
        }
        if (!tsh_ok(w.ctx)) fprintf(stderr, "%s\n", tsh_last_error(w.ctx)->message);
        tsh_close(w.ctx);
    }
    return 0;
}
