/* Runs the recipes of examples/RECIPES.md on 1 and 2 ranks, and prints what each gives on rank 0:
 * "ranks name numbers". test_recipes.py writes recipes.h, the functions of that page, and compares
 * the numbers with PyTorch's. The exit code is 1 after an error. */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "recipes.h"

enum { VALUES = 64 };

/* Begins a line: of one tensor or more. */
static void begin(tsh_ctx *ctx, const char *name) {
    if (tsh_world(ctx)->rank == 0) printf("%d %s", tsh_world(ctx)->size, name);
}

static void end(tsh_ctx *ctx) {
    if (tsh_world(ctx)->rank == 0) printf("\n");
}

static void put(tsh_ctx *ctx, tsh_tensor *t) {
    tsh_real values[VALUES];
    int64_t n;
    t = t ? tsh_cast(t, TSH_REAL) : NULL;
    n = t ? tsh_numel(t) : 0;
    if (!t || n > VALUES || tsh_read(ctx, t, TSH_GLOBAL, values, (size_t)n * sizeof *values))
        return;
    for (int64_t i = 0; i < n && tsh_world(ctx)->rank == 0; i++)
        printf(" %.7g", (double)values[i]);
}

static void put_one(tsh_ctx *ctx, const char *name, tsh_tensor *t) {
    begin(ctx, name);
    put(ctx, t);
    end(ctx);
}

static tsh_tensor *floats(tsh_ctx *ctx, int n, const float *from) {
    tsh_real values[VALUES];
    for (int i = 0; i < n; i++) values[i] = (tsh_real)from[i];
    return tsh_tensor_from(ctx, TSH_REAL, tsh_shape1(n), tsh_replicated(), values);
}

static void put_modules(tsh_ctx *ctx, tsh_tensor *x) {
    tsh_module *m = tsh_add_module(tsh_root(ctx), "identity",
                                   &(tsh_module_desc){.forward = identity});
    put_one(ctx, "identity", tsh_forward(m, x));
}

static void put_indices(tsh_ctx *ctx, tsh_tensor *x, tsh_tensor *w) {
    static const int64_t places[] = {2, 0, 1, 2};
    static const float source[] = {7, 8, 9, 10, 5, 6, 7};
    static const int32_t marks[] = {1, 0, 1, 1};
    tsh_tensor *index = tsh_tensor_from(ctx, TSH_I64, tsh_shape2(2, 2), tsh_replicated(), places);
    tsh_tensor *mask = tsh_tensor_from(ctx, TSH_I32, tsh_shape1(4), tsh_replicated(), marks);
    put_one(ctx, "scatter",
            scatter(x, 1, index, tsh_reshape(floats(ctx, 4, source), tsh_shape2(2, 2))));
    put_one(ctx, "masked_scatter", masked_scatter(w, mask, floats(ctx, 3, source + 4)));
}

static void put_values(tsh_ctx *ctx, tsh_tensor *x, tsh_tensor *v, tsh_tensor *w) {
    static const float odd[] = {1, INFINITY, -INFINITY, NAN};
    tsh_tensor *parts[2];
    put_one(ctx, "repeat", repeat(x, 3, 1));
    put_one(ctx, "repeat_interleave", repeat_interleave(x, 2, 1));
    begin(ctx, "any");
    put(ctx, any(x));
    put(ctx, any(tsh_zeros(ctx, tsh_shape1(3))));
    end(ctx);
    begin(ctx, "all");
    put(ctx, all(x));
    put(ctx, all(tsh_ones(ctx, tsh_shape1(3))));
    end(ctx);
    meshgrid(v, w, parts);
    begin(ctx, "meshgrid");
    put(ctx, parts[0]);
    put(ctx, parts[1]);
    end(ctx);
    put_one(ctx, "linspace", linspace(ctx, -1, 2, 7));
    put_one(ctx, "eye", eye(ctx, 3));
    parts[0] = x;
    parts[1] = tsh_zeros(ctx, tsh_shape2(1, 3));
    put_one(ctx, "normalize", normalize(tsh_concat(parts, 2, 0)));
    put_one(ctx, "is_finite", is_finite(floats(ctx, 4, odd)));
    put_one(ctx, "is_inf", is_inf(floats(ctx, 4, odd)));
    put_one(ctx, "is_nan", is_nan(floats(ctx, 4, odd)));
    put_one(ctx, "unfold", unfold(x, 2, 1));
}

static int run(tsh_ctx *ctx, void *user) {
    static const float xs[] = {-1, -0.5F, 0, 0.5F, 1, 1.5F}, vs[] = {1, 2, 3}, ws[] = {-1, 0, 1, 2};
    tsh_tensor *x = tsh_reshape(floats(ctx, 6, xs), tsh_shape2(2, 3));
    tsh_tensor *v = floats(ctx, 3, vs), *w = floats(ctx, 4, ws);
    (void)user;
    put_values(ctx, x, v, w);
    put_indices(ctx, x, w);
    put_modules(ctx, tsh_keep(x)); /* backward gives values of others back */
    return !tsh_ok(ctx);
}

int main(void) {
    static const tsh_desc desc = {.logger.log = tsh_log_stderr};
    return tsh_threads_run(1, &desc, run, NULL) || tsh_threads_run(2, &desc, run, NULL);
}
