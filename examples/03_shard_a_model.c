/* 03: a model written for one device is sharded by a plan, and computes the same numbers.
 *
 * Four ranks, ten hidden features: the ranks own 3, 3, 3 and 1 of them. */
#define TSHARD_IMPLEMENTATION
#include "../tshard.h"
#include "../backends/tshard_threads.h"
#include <math.h>
#include <stdio.h>

enum { BATCH = 5, IN = 4, HIDDEN = 10, OUT = 3 };

static tsh_tensor *mlp(tsh_module *self, tsh_tensor **in, int n, void *user) {
    (void)n, (void)user;
    return tsh_forward(tsh_find(self, "down"), tsh_relu(tsh_forward(tsh_find(self, "up"), in[0])));
}

static void print_param(const char *path, tsh_tensor *param, void *user) {
    char text[64];
    tsh_layout layout = tsh_layout_of(param);
    int ranks = *(const int *)user;
    printf("%-16s %-5s", path, tsh_layout_text(layout, text, sizeof text));
    for (int r = 0; r < ranks && layout.kind == TSH_SHARDED; r++) {
        tsh_range own[TSH_MAX_SEGMENTS];
        tsh_shard_range(layout, tsh_size(param, layout.dim), ranks, r, own);
        printf("  rank %d: %d..%d", r, (int)own[0].start, (int)(own[0].start + own[0].length - 1));
    }
    printf("\n");
}

/* The model's output, whole, on every rank. */
static void compute(tsh_ctx *ctx, tsh_module *model, tsh_tensor *x, tsh_real out[BATCH * OUT]) {
    tsh_read(ctx, tsh_forward(model, x), TSH_GLOBAL, out, BATCH * OUT * sizeof *out);
    tsh_step_end(ctx);
}

static int shard(tsh_ctx *ctx, void *user) {
    static const tsh_plan_rule plan[] = {
        {.path = "mlp.up", .style = TSH_COLWISE},   /* output features are cut ... */
        {.path = "mlp.down", .style = TSH_ROWWISE}, /* ... and are the input features here */
    };
    tsh_real dense[BATCH * OUT] = {0}, sharded[BATCH * OUT] = {0};
    double worst = 0;
    int ranks = tsh_tp(ctx)->size, first = tsh_tp(ctx)->rank == 0;
    tsh_module *model = tsh_add_module(tsh_root(ctx), "mlp", &(tsh_module_desc){.forward = mlp});
    (void)user;
    tsh_add_linear(model, "up", &(tsh_linear_desc){.in = IN, .out = HIDDEN});
    tsh_add_linear(model, "down", &(tsh_linear_desc){.in = HIDDEN, .out = OUT});

    tsh_tensor *x = tsh_keep(tsh_randn(ctx, tsh_shape2(BATCH, IN)));
    compute(ctx, model, x, dense);
    tsh_parallelize(tsh_root(ctx), plan, 2); /* values that are there already are sliced in place */
    compute(ctx, model, x, sharded);
    for (int i = 0; i < BATCH * OUT; i++)
        worst = fmax(worst, fabs((double)sharded[i] - (double)dense[i]));
    if (first) tsh_each_param(tsh_root(ctx), print_param, &ranks);
    if (first) printf("output (0, 0) %g, dense %g\n", (double)sharded[0], (double)dense[0]);
    if (first) printf("largest difference to the dense model: %.1e\n", worst);
    return tsh_ok(ctx) && sharded[0] != 0 && worst < 1e-5 ? 0 : 1;
}

int main(void) {
    tsh_desc desc = {.logger.log = tsh_log_stderr}; /* prints errors */
    return tsh_threads_run(4, &desc, shard, NULL);
}
