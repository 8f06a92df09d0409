/* folder_model.h - a small model whose parameters have values that follow from their names: for
 * tests that save it as files, or load it from them. Include ranks.h first. */
#ifndef FOLDER_MODEL_H
#define FOLDER_MODEL_H

enum { WORDS = 7, WIDTH = 6, HIDDEN = 9 };

/* Element e of the parameter at this path: a number that all floating dtypes hold exactly. */
static double number(const char *path, int64_t e) {
    int64_t sum = 0;
    for (; *path; path++) sum += (unsigned char)*path;
    return (double)((e * 37 + sum) % 256 - 128) / 64;
}

/* Adds embed, h.0.norm, h.0.up, h.0.down and head. */
static void add_model(tsh_ctx *ctx) {
    const tsh_embedding_desc embed = {.count = WORDS, .dim = WIDTH, .style = TSH_ROWWISE};
    const tsh_layer_norm_desc norm = {.dim = WIDTH};
    const tsh_linear_desc up = {.in = WIDTH, .out = HIDDEN, .style = TSH_COLWISE, .segments = 3},
                          down = {.in = HIDDEN, .out = WIDTH, .style = TSH_ROWWISE, .segments = 3},
                          head = {.in = WIDTH, .out = WORDS, .bias = TSH_NO, .style = TSH_COLWISE};
    tsh_module *root = tsh_root(ctx), *block;
    tsh_add_embedding(root, "embed", &embed);
    block = tsh_add_module(tsh_add_module(root, "h", NULL), "0", NULL);
    tsh_add_layer_norm(block, "norm", &norm);
    tsh_add_linear(block, "up", &up);
    tsh_add_linear(block, "down", &down);
    tsh_add_linear(root, "head", &head);
}

/* What a walk over all parameters finds: how many elements are wrong, and the first of them. */
typedef struct walk {
    int wrong;
    char path[64];
} walk;

/* Callback of tsh_each_param: compares a parameter with its numbers. */
static void compare(const char *path, tsh_tensor *param, void *user) {
    walk *w = (walk *)user;
    double *values = ranks_values(tsh_ctx_of(param), param);
    int64_t e;
    for (e = 0; values && e < tsh_numel(param); e++)
        if (values[e] != number(path, e) && !w->wrong++)
            (void)snprintf(w->path, sizeof w->path, "%s[%d] is %g", path, (int)e, values[e]);
    if (!values && !w->wrong++) (void)snprintf(w->path, sizeof w->path, "%s", path);
    free(values);
}

#endif
