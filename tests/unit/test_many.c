/* Models of many parameters: eight times as many take about eight times as long, in processor time,
 * wherever a walk over the parameters takes a tied one once. Where each parameter was looked for
 * from the first on, it was 64 times. */
#include "../../tshard.h"
#include "../support/unit.h"

#include <time.h>

enum { FEW = 1000, MANY = 8 * FEW, BLOCK = 64, MOST = 20 }; /* MOST: times as long */

enum { MAKE, OPTIM, TRAIN, NORM, GROUP, SUMMARY, FREE, PARTS };
static const char *const part_names[PARTS] = {"tsh_add_linear", "tsh_optim_new", "a step",
                                              "tsh_clip_grad_norm", "tsh_optim_group",
                                              "tsh_summary", "tsh_optim_free"};

static double since(clock_t *from) {
    const clock_t now = clock();
    const double seconds = (double)(now - *from) / CLOCKS_PER_SEC;
    *from = now;
    return seconds;
}

/* Seconds of each part with so many layers, of two parameters each; two weights are tied. */
static void measure(int layers, double *seconds) {
    const tsh_linear_desc desc = {.in = 4, .out = 4};
    const tsh_optim_desc adam = {.kind = TSH_ADAM};
    tsh_ctx *ctx = unit_open(NULL);
    tsh_module *root = tsh_root(ctx), *block = NULL, *last = NULL;
    FILE *file = tmpfile();
    double norm;
    char name[32];
    clock_t clock_at = clock();
    assert_non_null(file);
    for (int i = 0; i < layers; i++) {
        (void)snprintf(name, sizeof name, "%d", i);
        if (i % BLOCK == 0) block = tsh_add_module(root, name, NULL);
        last = tsh_add_linear(block, name, &desc);
    }
    assert_int_equal(tsh_tie(last, "weight", tsh_param(root, "0.0.weight")), TSH_OK);
    seconds[MAKE] = since(&clock_at);
    tsh_optim *optim = tsh_optim_new(root, &adam);
    assert_non_null(optim);
    seconds[OPTIM] = since(&clock_at);
    tsh_tensor *x = tsh_requires_grad(tsh_keep(tsh_ones(ctx, tsh_shape2(1, 4))), 1);
    assert_int_equal(tsh_backward(ctx, tsh_sum(tsh_forward(last, x), TSH_ALL, 0)), TSH_OK);
    assert_int_equal(tsh_optim_step(optim), TSH_OK);
    tsh_zero_grads(root);
    tsh_step_end(ctx);
    seconds[TRAIN] = since(&clock_at);
    assert_int_equal(tsh_clip_grad_norm(root, 1, &norm), TSH_OK);
    seconds[NORM] = since(&clock_at);
    assert_int_equal(tsh_optim_group(optim, "**.bias", 1, 0), TSH_OK);
    seconds[GROUP] = since(&clock_at);
    assert_int_equal(tsh_summary(root, file), TSH_OK);
    seconds[SUMMARY] = since(&clock_at);
    tsh_optim_free(optim);
    seconds[FREE] = since(&clock_at);
    fclose(file);
    unit_close(ctx);
}

static void time_grows_with_the_number_of_parameters(void **state) {
    double few[PARTS], many[PARTS], again[PARTS];
    (void)state;
    measure(FEW, few);
    measure(MANY, many);
    measure(MANY, again); /* of two, the shorter time: others compute beside */
    for (int i = 0; i < PARTS; i++) {
        const double took = many[i] < again[i] ? many[i] : again[i];
        printf("%s: %d layers %.1f ms, %d layers %.1f ms\n", part_names[i], FEW, 1e3 * few[i], MANY,
               1e3 * took);
        if (took > MOST * few[i] && took > 0.05) /* a clock's tick is no measure */
            fail_msg("%s takes %.0f times as long", part_names[i], took / few[i]);
    }
}

/* A tied parameter is counted once from every root that reaches it twice. */
static void ties_are_counted_once(void **state) {
    const tsh_linear_desc desc = {.in = 4, .out = 4, .bias = TSH_NO};
    const char *const names[] = {"a", "b", "c"};
    tsh_ctx *ctx = unit_open(NULL);
    tsh_module *box[2], *layer[2][3];
    double norm;
    (void)state;
    for (int k = 0; k < 2; k++) {
        box[k] = tsh_add_module(tsh_root(ctx), k ? "two" : "one", NULL);
        for (int i = 0; i < 3; i++) layer[k][i] = tsh_add_linear(box[k], names[i], &desc);
    }
    tsh_tie(layer[0][2], "weight", tsh_param(layer[0][0], "weight")); /* within a box */
    tsh_tie(layer[1][1], "weight", tsh_param(layer[0][1], "weight")); /* between both */
    tsh_tensor *x = tsh_ones(ctx, tsh_shape2(1, 4)), *loss = NULL;
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < 3; i++) {
            tsh_tensor *sum = tsh_sum(tsh_forward(layer[k][i], x), TSH_ALL, 0);
            loss = loss ? tsh_add(loss, sum) : sum;
        }
    tsh_backward(ctx, loss);
    /* each use adds 16 ones: two tied weights have 2 everywhere, the two others 1 */
    assert_int_equal(tsh_clip_grad_norm(tsh_root(ctx), 1e9, &norm), TSH_OK);
    assert_true(fabs(norm * norm - (2 * 4 + 2 * 1) * 16) < 1e-3);
    assert_int_equal(tsh_clip_grad_norm(box[0], 1e9, &norm), TSH_OK);
    assert_true(fabs(norm * norm - (4 + 4) * 16) < 1e-3);
    assert_int_equal(tsh_clip_grad_norm(box[1], 1e9, &norm), TSH_OK);
    assert_true(fabs(norm * norm - (1 + 4 + 1) * 16) < 1e-3);
    unit_close(ctx);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(time_grows_with_the_number_of_parameters),
        cmocka_unit_test(ties_are_counted_once),
    };
    return cmocka_run_group_tests_name("unit/many", tests, NULL, NULL);
}
