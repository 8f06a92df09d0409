/* A mixture of experts: a router sends every token to the best two of four MLPs, as in Mixtral, and
 * a loss balances their loads (Fedus et al. 2021). It trains as in PyTorch at 1, 2 and 3 ranks, and
 * where an expert gets no token. The hidden features of each expert are sharded. */
/* build: double */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "models.h"

enum { TOKENS = 12, WIDTH = 6, HIDDEN = 7, EXPERTS = 4, TOP = 2, CLASSES = 5 };

static const tsh_plan_rule plan[] = {{.path = "experts.*.up", .style = TSH_COLWISE},
                                     {.path = "experts.*.down", .style = TSH_ROWWISE}};

static void build(tsh_module *root) {
    tsh_add_linear(root, "router", &(tsh_linear_desc){.in = WIDTH, .out = EXPERTS, .bias = TSH_NO});
    tsh_module *experts = tsh_add_module(root, "experts", NULL);
    for (int e = 0; e < EXPERTS; e++) {
        const char name[] = {(char)('0' + e), 0};
        tsh_module *expert = tsh_add_module(experts, name, NULL);
        tsh_add_linear(expert, "up", &(tsh_linear_desc){.in = WIDTH, .out = HIDDEN});
        tsh_add_linear(expert, "down", &(tsh_linear_desc){.in = HIDDEN, .out = WIDTH});
    }
    tsh_add_linear(root, "head", &(tsh_linear_desc){.in = WIDTH, .out = CLASSES});
}

/* Returns y plus what expert e makes of the rows of x (n, WIDTH) that chose it: `chosen` (n, TOP)
 * are the experts of each row, weight (n, TOP) their weights. */
static tsh_tensor *add_expert(tsh_tensor *y, tsh_module *expert, int e, tsh_tensor *x,
                              const int64_t *chosen, tsh_tensor *weight) {
    tsh_ctx *ctx = tsh_ctx_of(x);
    int64_t place[TOKENS * TOP], row[TOKENS * TOP], n = 0;
    tsh_tensor *rows, *out;
    for (int64_t i = 0; i < tsh_size(x, 0) * TOP; i++)
        if (chosen[i] == e) {
            place[n] = i;
            row[n++] = i / TOP;
        }
    rows = tsh_from(ctx, row, tsh_shape1(n), TSH_I64);
    weight = tsh_index_select(tsh_reshape(weight, tsh_shape2(-1, 1)), 0,
                              tsh_from(ctx, place, tsh_shape1(n), TSH_I64));
    out = tsh_gelu(models_call(expert, "up", tsh_index_select(x, 0, rows)));
    out = tsh_mul(models_call(expert, "down", out), weight);
    rows = tsh_expand(tsh_unsqueeze(rows, -1), tsh_shape2(n, WIDTH));
    return tsh_scatter_add(y, 0, rows, out);
}

/* Every third step has just one token. */
static tsh_tensor *loss(tsh_module *root, int step) {
    tsh_ctx *ctx = tsh_module_ctx(root);
    const int64_t n = step % 3 == 2 ? 1 : TOKENS;
    tsh_tensor *x = models_data(ctx, "x", step, tsh_shape2(n, WIDTH)), *y = x;
    const tsh_real *at = (const tsh_real *)tsh_data(ctx, x);
    tsh_tensor *logits, *index, *weight, *load;
    int64_t chosen[TOKENS * TOP], target[TOKENS];
    for (int64_t i = 0; i < n; i++, at += WIDTH) target[i] = 2 * (at[0] > 0) + (at[1] > at[2]);
    logits = models_call(root, "router", x);
    weight = tsh_softmax(tsh_topk(logits, TOP, -1, 1, &index), -1);
    tsh_read(ctx, index, TSH_GLOBAL, chosen, (size_t)(n * TOP) * sizeof *chosen);
    for (int e = 0; e < EXPERTS && tsh_ok(ctx); e++)
        y = add_expert(y, tsh_child(tsh_find(root, "experts"), e), e, x, chosen, weight);
    load = tsh_mean(tsh_sum(tsh_cast(tsh_one_hot(index, EXPERTS), TSH_REAL), 1, 0), 0, 0);
    load = tsh_sum(tsh_mul(load, tsh_mean(tsh_softmax(logits, -1), 0, 0)), TSH_ALL, 0);
    y = tsh_cross_entropy(models_call(root, "head", y),
                          tsh_from(ctx, target, tsh_shape1(n), TSH_I64), NULL);
    return tsh_add(y, tsh_scale(load, 0.1));
}

static const tsh_optim_desc optim = {.kind = TSH_ADAMW, .lr = 1e-2, .weight_decay = 0.01};

static void a_mixture_trains_as_in_pytorch(void **state) {
    model m = {"moe", build, loss, plan, COUNT(plan), optim};
    (void)state;
    models_prove(&m, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_mixture_trains_as_in_pytorch)};
    return cmocka_run_group_tests_name("moe", tests, NULL, NULL);
}
