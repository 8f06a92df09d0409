/* vit.h - a small vision transformer and its images, for 06 and 07; FROM_PYTORCH.md shows both. */
#ifndef VIT_H
#define VIT_H
#include "../tshard.h"
#include "../backends/tshard_threads.h"
#include <stdio.h>
#include <string.h>

/* Images of 8 x 8 pixels, cut into 4 x 4 patches of 2 x 2 pixels; a class token precedes these. */
enum { PATCHES = 16, PIXELS = 4, TOKENS = 1 + PATCHES, WIDTH = 32, HEADS = 4, LAYERS = 2 };
enum { CLASSES = 10 };

static tsh_tensor *call(tsh_module *self, const char *child, tsh_tensor *x) {
    return tsh_forward(tsh_find(self, child), x);
}

static tsh_tensor *attention(tsh_module *self, tsh_tensor **in, int n, void *user) {
    tsh_shape heads = tsh_shape4(tsh_size(in[0], 0), TOKENS, HEADS, WIDTH / HEADS);
    tsh_tensor *qkv[3] = {NULL}, *y;
    (void)n, (void)user;
    tsh_split(call(self, "qkv", in[0]), -1, 3, qkv);
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
    int64_t batch = tsh_size(patches, 0);
    tsh_tensor *zeros = tsh_zeros(tsh_ctx_of(patches), tsh_shape3(batch, 1, WIDTH));
    tsh_tensor *token = tsh_add(zeros, tsh_param(self, "cls_token")); /* one for each image */
    tsh_tensor *x = tsh_concat((tsh_tensor *[]){token, call(self, "embed", patches)}, 2, 1);
    x = call(self, "blocks", tsh_add(x, tsh_param(self, "pos_embed")));
    token = tsh_reshape(tsh_slice(x, 1, 0, 1), tsh_shape2(batch, WIDTH));
    return call(self, "head", call(self, "norm", token));
}

static void add_vit(tsh_module *self) {
    tsh_param_desc normal = {.init = {.kind = TSH_INIT_NORMAL, .b = 1}};
    tsh_layer_norm_desc norm = {.dim = WIDTH};
    tsh_linear_desc embed = {.in = PIXELS, .out = WIDTH}, head = {.in = WIDTH, .out = CLASSES};
    tsh_linear_desc qkv = {.in = WIDTH, .out = 3 * WIDTH}, proj = {.in = WIDTH, .out = WIDTH};
    tsh_linear_desc fc1 = {.in = WIDTH, .out = 4 * WIDTH}, fc2 = {.in = 4 * WIDTH, .out = WIDTH};
    tsh_add_linear(self, "embed", &embed);
    tsh_add_param(self, "cls_token", tsh_shape3(1, 1, WIDTH), &normal);
    tsh_add_param(self, "pos_embed", tsh_shape3(1, TOKENS, WIDTH), &normal);
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

/* Digits of 5 x 7 pixels, one every 6 columns. */
static const char *const font[7] = {
    " ###    #    ###   ###     #  #####   ##  #####  ###   ### ",
    "#   #  ##   #   # #   #   ##  #      #        # #   # #   #",
    "#   #   #       #     #  # #  ####  #        #  #   # #   #",
    "#   #   #      #    ##  #  #      # ####    #    ###   ####",
    "#   #   #     #       # #####     # #   #  #    #   #     #",
    "#   #   #    #    #   #    #  #   # #   #  #    #   #    # ",
    " ###   ###  #####  ###     #   ###   ###   #     ###   ##  "};

static unsigned draw(unsigned *state, unsigned n) { /* 0 .. n - 1 */
    *state = (*state * 1664525u + 1013904223u) & 0xFFFFFFFFu;
    return (*state >> 16) % n;
}

/* Each shows a digit at one of four places, in noise; the class is the digit. */
static void make_images(unsigned seed, int count, void *values, void *truth) {
    tsh_real *pixels = (tsh_real *)values;
    int64_t *target = (int64_t *)truth;
    for (int i = 0; i < count && values != NULL && truth != NULL; i++, pixels += PATCHES * PIXELS) {
        unsigned digit = draw(&seed, CLASSES), left = 1 + draw(&seed, 2), top = draw(&seed, 2);
        target[i] = digit;
        for (unsigned p = 0; p < PATCHES; p++)
            for (unsigned k = 0; k < PIXELS; k++) {
                unsigned row = p / 4 * 2 + k / 2 - top, column = p % 4 * 2 + k % 2 - left;
                int ink = row < 7 && column < 5 && font[row][6 * digit + column] == '#';
                pixels[p * PIXELS + k] = (tsh_real)draw(&seed, 192) / 256 + (tsh_real)ink;
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
