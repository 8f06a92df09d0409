/* vit.h - a small vision transformer and its images, for 06 and 07; FROM_PYTORCH.md shows both. */
#ifndef VIT_H
#define VIT_H
#include "../tshard.h"
#include "../backends/tshard_threads.h"
#include <stdio.h>
#include <string.h>

/* Images of 16 x 16 pixels, cut into 4 x 4 patches of 4 x 4 pixels. */
enum { PATCHES = 16, PIXELS = 16, WIDTH = 32, HEADS = 4, LAYERS = 2, CLASSES = 4 };
static const char *const classes[CLASSES] = {"right", "left", "down", "up"};

static tsh_tensor *call(tsh_module *self, const char *child, tsh_tensor *x) {
    return tsh_forward(tsh_find(self, child), x);
}

static tsh_tensor *attention(tsh_module *self, tsh_tensor **in, int n, void *user) {
    tsh_shape heads = tsh_shape4(tsh_dim(in[0], 0), PATCHES, HEADS, WIDTH / HEADS);
    tsh_tensor *qkv[3] = {NULL}, *y;
    (void)n, (void)user;
    tsh_split_dim(call(self, "qkv", in[0]), -1, 3, qkv);
    for (int i = 0; i < 3; i++) qkv[i] = tsh_transpose(tsh_reshape(qkv[i], heads), 1, 2);
    y = tsh_transpose(tsh_attention(qkv[0], qkv[1], qkv[2], NULL), 1, 2);
    return call(self, "proj", tsh_reshape(y, tsh_shape_of(in[0])));
}

static tsh_tensor *block(tsh_module *self, tsh_tensor **in, int n, void *user) {
    tsh_tensor *x = tsh_add(in[0], call(self, "attn", call(self, "norm1", in[0])));
    (void)n, (void)user;
    return tsh_add(x, call(self, "fc2", tsh_gelu(call(self, "fc1", call(self, "norm2", x)))));
}

/* patches (B, PATCHES, PIXELS) -> logits (B, CLASSES) */
static tsh_tensor *vit(tsh_module *self, tsh_tensor *patches) {
    tsh_tensor *index = tsh_arange(tsh_ctx_of(patches), TSH_I64, 0, PATCHES, 1);
    tsh_tensor *x = tsh_add(call(self, "embed", patches), call(self, "position", index));
    return call(self, "head", tsh_mean(call(self, "norm", call(self, "blocks", x)), 1, 0));
}

static void add_vit(tsh_module *self) {
    tsh_layer_norm_desc norm = {.dim = WIDTH};
    tsh_linear_desc embed = {.in = PIXELS, .out = WIDTH}, head = {.in = WIDTH, .out = CLASSES};
    tsh_linear_desc qkv = {.in = WIDTH, .out = 3 * WIDTH}, proj = {.in = WIDTH, .out = WIDTH};
    tsh_linear_desc fc1 = {.in = WIDTH, .out = 4 * WIDTH}, fc2 = {.in = 4 * WIDTH, .out = WIDTH};
    tsh_add_linear(self, "embed", &embed);
    tsh_add_embedding(self, "position", &(tsh_embedding_desc){.count = PATCHES, .dim = WIDTH});
    tsh_module *blocks = tsh_add_module(self, "blocks", NULL); /* calls its children in turn */
    for (int i = 0; i < LAYERS; i++) {
        const char name[] = {(char)('0' + i), '\0'};
        tsh_module *b = tsh_add_module(blocks, name, &(tsh_module_desc){.forward = block});
        tsh_add_layer_norm(b, "norm1", &norm);
        tsh_module *attn = tsh_add_module(b, "attn", &(tsh_module_desc){.forward = attention});
        tsh_add_linear(attn, "qkv", &qkv);
        tsh_add_linear(attn, "proj", &proj);
        tsh_add_layer_norm(b, "norm2", &norm);
        tsh_add_linear(b, "fc1", &fc1);
        tsh_add_linear(b, "fc2", &fc2);
    }
    tsh_add_layer_norm(self, "norm", &norm);
    tsh_add_linear(self, "head", &head);
}

/* How ranks share it: whole heads of [Q|K|V], and the hidden features of the MLP. */
static const tsh_plan_rule plan[] = {
    {.path = "blocks.*.attn.qkv", .style = TSH_COLWISE, .segments = 3, .unit = WIDTH / HEADS},
    {.path = "blocks.*.attn.proj", .style = TSH_ROWWISE, .unit = WIDTH / HEADS},
    {.path = "blocks.*.fc1", .style = TSH_COLWISE},
    {.path = "blocks.*.fc2", .style = TSH_ROWWISE}};

static unsigned draw(unsigned *state, unsigned n) { /* 0 .. n - 1 */
    *state = (*state * 1664525u + 1013904223u) & 0xFFFFFFFFu;
    return (*state >> 16) % n;
}

/* Each shows a cross and a ring in noise; the class is the direction from the cross to the ring. */
static void make_images(unsigned seed, int count, void *values, void *truth) {
    static const char cross[] = "#..#.##..##.#..#", ring[] = "#####..##..#####";
    tsh_real *pixels = (tsh_real *)values;
    int64_t *target = (int64_t *)truth;
    for (int i = 0; i < count && values != NULL && truth != NULL; i++, pixels += PATCHES * PIXELS) {
        unsigned line = draw(&seed, 4), a = draw(&seed, 3), b = a + 1 + draw(&seed, 3 - a);
        unsigned way = draw(&seed, CLASSES), down = way / 2; /* a line is a row, or a column */
        target[i] = way;
        for (unsigned p = 0; p < PATCHES; p++) {
            unsigned at = down ? p / 4 : p % 4, on = (down ? p % 4 : p / 4) == line;
            const char *first = way % 2 ? ring : cross, *second = way % 2 ? cross : ring;
            const char *stamp = on && at == a ? first : on && at == b ? second : NULL;
            for (unsigned k = 0; k < PIXELS; k++)
                pixels[p * PIXELS + k] = (tsh_real)draw(&seed, 256) / 512 +
                                         (stamp != NULL && stamp[k] == '#' ? 1 : 0);
        }
    }
}

/* The model's file lies beside the programs: no other place is known to both. */
static char *file_beside(const char *program, char *path, size_t size) {
    const char *slash = strrchr(program, '/');
    int folder = slash != NULL ? (int)(slash - program) + 1 : 0;
    (void)snprintf(path, size, "%.*svit.safetensors", folder, program);
    return path;
}

#endif
