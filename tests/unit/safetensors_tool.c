/* For test_safetensors.py: `tool save FILE RANKS` writes a model's file, `tool load FILE RANKS`
 * reads one; both print every parameter's values. */
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"

typedef struct job {
    const char *path;
    int loads;
} job;

static void show(const char *path, tsh_tensor *t, void *user) {
    tsh_ctx *ctx = tsh_ctx_of(t);
    tsh_real values[64];
    int64_t i;
    (void)user;
    if (tsh_read(ctx, t, TSH_GLOBAL, values, (size_t)tsh_numel(t) * sizeof *values) != TSH_OK)
        return;
    if (tsh_world(ctx)->rank) return;
    printf("%s", path);
    for (i = 0; i < tsh_numel(t); i++) printf(" %.9g", (double)values[i]);
    printf("\n");
}

static int work(tsh_ctx *ctx, void *user) {
    const job *j = (const job *)user;
    const tsh_linear_desc qkv = {.in = 4, .out = 9, .style = TSH_COLWISE, .segments = 3};
    const tsh_linear_desc row = {.in = 3, .out = 4, .style = TSH_ROWWISE};
    const tsh_optim_desc adam = {.kind = TSH_ADAM};
    tsh_module *root = tsh_root(ctx), *h = tsh_add_module(root, "h", NULL);
    tsh_tensor *y;
    tsh_optim *optim;
    tsh_add_linear(h, "qkv", &qkv);
    tsh_add_linear(h, "\xc3\xa9t\xc3\xa9 \"row\"", &row);
    optim = tsh_optim_new(root, &adam);
    if (j->loads) {
        (void)tsh_load(root, j->path, NULL);
    } else {
        y = tsh_forward(tsh_child(h, 0), tsh_ones(ctx, tsh_shape2(2, 4)));
        (void)tsh_backward(ctx, tsh_full_tensor(tsh_sum(tsh_mul(y, y), TSH_ALL, 0)));
        (void)tsh_optim_step(optim);
        (void)tsh_step_end(ctx);
        (void)tsh_save(root, j->path, optim);
    }
    if (tsh_ok(ctx)) tsh_each_param(root, show, NULL);
    if (!tsh_ok(ctx)) fprintf(stderr, "%s\n", tsh_last_error(ctx)->message);
    return !tsh_ok(ctx);
}

int main(int count, char **words) {
    job j;
    if (count != 4 || (strcmp(words[1], "load") != 0 && strcmp(words[1], "save") != 0)) return 2;
    j.path = words[2];
    j.loads = strcmp(words[1], "load") == 0;
    return tsh_threads_run(atoi(words[3]), NULL, work, &j);
}
