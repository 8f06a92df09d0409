/* What users of tensor-parallel systems suffer from, a test each, named after the complaint. Those
 * that concern the loss (1, 2, 4, 5) stand in tests/op/test_loss.c. */
/* build: double */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"

#define ROUNDING 2e-5 /* exponentials, and sums in another order than one rank's */

static void at_every_degree(int (*fn)(tsh_ctx *, void *), void *user) {
    int i;
    for (i = 0; i < COUNT(ranks_degrees); i++) ranks_run(ranks_degrees[i], fn, user);
}

static tsh_module *add_linear(tsh_ctx *ctx, const char *name, int64_t in, int64_t out) {
    const tsh_linear_desc desc = {.in = in, .out = out};
    return tsh_add_linear(tsh_root(ctx), name, &desc);
}

/* 3. Uneven shards keep their global shape through ops, views and back. */
static int uneven(tsh_ctx *ctx, void *user) {
    tsh_tensor *x = tsh_arange(ctx, TSH_REAL, 0, 35, 1), *s, *y;
    tsh_real values[35];
    int64_t local;
    int e;
    (void)user;
    s = tsh_redistribute(tsh_reshape(x, tsh_shape2(5, 7)), tsh_sharded(1));
    y = tsh_reshape(tsh_transpose(tsh_add(s, s), 0, 1), tsh_shape3(7, 5, 1));
    CHECK(tsh_size(y, 0) == 7 && tsh_size(y, 1) == 5, "the shape is global");
    local = tsh_local_size(y, 0);
    CHECK(tsh_allreduce(tsh_tp(ctx), &local, 1, TSH_I64, TSH_SUM) == TSH_OK && local == 7,
          "pieces");
    CHECK(tsh_read(ctx, y, TSH_GLOBAL, values, sizeof values) == TSH_OK, "read");
    for (e = 0; e < 35; e++) {
        int want = 2 * (e % 5 * 7 + e / 5);
        CHECK(values[e] == (tsh_real)want, "element %d", e);
    }
    CHECK_OK();
    return 0;
}

static void test_pain_3_uneven_shards_keep_their_shape(void **state) {
    (void)state;
    at_every_degree(uneven, NULL);
}

/* 6. Initial weights and dropout are those of one device at every degree. */
static int drawn(tsh_ctx *ctx, void *user) {
    uint64_t *want = (uint64_t *)user, got[3];
    const tsh_plan_rule plan[] = {{.path = "up", .style = TSH_COLWISE},
                                  {.path = "down", .style = TSH_ROWWISE}};
    tsh_module *up = add_linear(ctx, "up", 5, 7), *down = add_linear(ctx, "down", 7, 3), *drop;
    tsh_tensor *y;
    int i;
    drop = tsh_add_dropout(tsh_root(ctx), "drop", 0.5);
    CHECK(tsh_parallelize(tsh_root(ctx), plan, 2) == TSH_OK, "plan");
    CHECK(tsh_materialize(tsh_root(ctx)) == TSH_OK, "values");
    got[0] = tsh_hash(ctx, tsh_param(up, "weight"));
    got[1] = tsh_hash(ctx, tsh_param(down, "weight"));
    y = tsh_redistribute(tsh_ones(ctx, tsh_shape2(6, 7)), tsh_sharded(1));
    got[2] = tsh_hash(ctx, tsh_forward(drop, y)); /* the mask, on sharded activations */
    for (i = 0; i < 3; i++) {
        if (tsh_tp(ctx)->size == 1) want[i] = got[i];
        CHECK(got[i] == want[i], "hash %d", i);
    }
    CHECK(got[0] != got[1], "layers draw their own");
    return 0;
}

static void test_pain_6_weights_and_masks_do_not_depend_on_tp(void **state) {
    uint64_t hash[3] = {0, 0, 0};
    (void)state;
    at_every_degree(drawn, hash);
}

/* 7. Replicated parameters stay equal on all ranks, also those whose gradients are partial: norms
 * and row biases under sequence parallelism. And where one drifts, it is found. */
static int replicas(tsh_ctx *ctx, void *user) {
    const tsh_layout sequence = tsh_sharded(0);
    const tsh_plan_rule plan[] = {{.path = "norm", .style = TSH_SEQUENCE, .input = &sequence},
                                  {.path = "up", .style = TSH_COLWISE, .input = &sequence},
                                  {.path = "down", .style = TSH_ROWWISE, .output = &sequence}};
    const tsh_layer_norm_desc four = {.dim = 4};
    const tsh_optim_desc adam = {.kind = TSH_ADAM, .lr = 0.01};
    tsh_module *root = tsh_root(ctx), *norm = tsh_add_layer_norm(root, "norm", &four),
               *up = add_linear(ctx, "up", 4, 6), *down = add_linear(ctx, "down", 6, 4);
    tsh_optim *optim;
    tsh_tensor *y, *bias = tsh_param(down, "bias");
    tsh_real *values;
    int step;
    (void)user;
    CHECK(tsh_parallelize(root, plan, 3) == TSH_OK, "plan");
    optim = tsh_optim_new(root, &adam);
    for (step = 0; step < 5; step++) {
        y = tsh_forward(norm, tsh_randn(ctx, tsh_shape2(7, 4)));
        y = tsh_forward(down, tsh_gelu(tsh_forward(up, y)));
        CHECK(tsh_backward(ctx, tsh_full_tensor(tsh_mean(tsh_mul(y, y), TSH_ALL, 0))) == TSH_OK,
              "backward");
        CHECK(tsh_optim_step(optim) == TSH_OK, "step");
        tsh_zero_grads(root);
        CHECK(tsh_step_end(ctx) == TSH_OK, "end");
    }
    CHECK(tsh_check_replicas(root), "all are alike");
    values = (tsh_real *)tsh_data(ctx, bias);
    if (tsh_tp(ctx)->rank == tsh_tp(ctx)->size - 1) values[0] += 1;
    CHECK(tsh_tp(ctx)->size == 1 || !tsh_check_replicas(root), "one drifted");
    CHECK(tsh_tp(ctx)->size == 1 || strstr(tsh_last_error(ctx)->message, "\"down.bias\""), "named");
    (void)tsh_barrier(tsh_world(ctx));
    return 0;
}

static void test_pain_7_replicated_parameters_do_not_drift(void **state) {
    (void)state;
    at_every_degree(replicas, NULL);
}

/* 8. The gradient norm counts replicated and tied parameters once. */
static int norm_of(tsh_ctx *ctx, void *user) {
    double *want = (double *)user, norm;
    const tsh_plan_rule plan[] = {{.path = "wte", .style = TSH_ROWWISE},
                                  {.path = "head", .style = TSH_COLWISE},
                                  {.path = "down", .style = TSH_ROWWISE}};
    const tsh_embedding_desc table = {.count = 7, .dim = 4};
    tsh_classifier_desc last = {.in = 4, .classes = 7};
    static const int32_t tokens[3] = {6, 1, 1};
    tsh_module *root = tsh_root(ctx), *wte = tsh_add_embedding(root, "wte", &table), *head, *down;
    tsh_tensor *ids = tsh_tensor_from(ctx, TSH_I32, tsh_shape1(3), tsh_replicated(), tokens), *x;
    last.weight = tsh_param(wte, "weight");
    head = tsh_add_classifier(root, "head", &last);
    down = add_linear(ctx, "down", 4, 4);
    CHECK(tsh_parallelize(root, plan, 3) == TSH_OK, "plan");
    x = tsh_forward(head, tsh_forward(down, tsh_forward(wte, ids)));
    CHECK(tsh_backward(ctx, tsh_cross_entropy(x, ids, NULL)) == TSH_OK, "backward");
    CHECK(tsh_clip_grad_norm(root, 1e9, &norm) == TSH_OK, "norm");
    if (tsh_tp(ctx)->size == 1) *want = norm;
    CHECK(norm > 0 && fabs(norm - *want) <= ROUNDING * *want, "norm %.9g, not %.9g", norm, *want);
    return 0;
}

static void test_pain_8_the_gradient_norm_counts_replicas_once(void **state) {
    double norm = 0;
    (void)state;
    at_every_degree(norm_of, &norm);
}

/* 10. A fused [Q|K|V] weight is cut within each part: rank r holds its rows of all three. */
static int fused(tsh_ctx *ctx, void *user) {
    const tsh_plan_rule rule = {.path = "qkv", .style = TSH_COLWISE, .segments = 3, .unit = 2};
    tsh_module *layer = add_linear(ctx, "qkv", 1, 18); /* three heads of 2, for each of q, k, v */
    tsh_tensor *w = tsh_param(layer, "weight"), *part[3];
    const int p = tsh_tp(ctx)->size, r = tsh_tp(ctx)->rank, each = (3 + p - 1) / p;
    const int from = r * each < 3 ? r * each : 3, to = from + each < 3 ? from + each : 3;
    tsh_real values[18], *mine;
    int e, s;
    (void)user;
    CHECK(tsh_materialize(layer) == TSH_OK, "values");
    for (e = 0; e < 18; e++) values[e] = (tsh_real)e;
    CHECK(tsh_write(ctx, w, TSH_GLOBAL, values, sizeof values) == TSH_OK, "write");
    CHECK(tsh_parallelize(tsh_root(ctx), &rule, 1) == TSH_OK, "plan");
    CHECK(tsh_local_size(w, 0) == 6 * (to - from), "rows here");
    mine = (tsh_real *)tsh_data(ctx, w);
    for (s = 0; s < 3; s++)
        for (e = 0; e < 2 * (to - from); e++)
            CHECK(mine[s * 2 * (to - from) + e] == (tsh_real)(6 * s + 2 * from + e), "part %d", s);
    CHECK(tsh_split(tsh_transpose(w, 0, 1), 1, 3, part) == TSH_OK, "q, k and v without a copy");
    CHECK(tsh_read(ctx, part[1], TSH_GLOBAL, values, 6 * sizeof *values) == TSH_OK, "read k");
    for (e = 0; e < 6; e++) CHECK(values[e] == (tsh_real)(6 + e), "k's row %d", e);
    return 0;
}

static void test_pain_10_fused_weights_are_cut_part_by_part(void **state) {
    (void)state;
    at_every_degree(fused, NULL);
}

/* 11. The bias of a row-parallel layer is added once. */
static int row_bias(tsh_ctx *ctx, void *user) {
    const tsh_plan_rule rule = {.path = "down", .style = TSH_ROWWISE};
    tsh_module *layer = add_linear(ctx, "down", 5, 2);
    static const tsh_real bias[2] = {3, -2};
    tsh_tensor *y;
    tsh_real values[2];
    (void)user;
    CHECK(tsh_parallelize(tsh_root(ctx), &rule, 1) == TSH_OK, "plan");
    CHECK(tsh_materialize(layer) == TSH_OK, "values");
    CHECK(tsh_write(ctx, tsh_param(layer, "bias"), TSH_GLOBAL, bias, sizeof bias) == TSH_OK,
          "bias");
    y = tsh_forward(layer, tsh_zeros(ctx, tsh_shape2(1, 5)));
    CHECK(tsh_read(ctx, y, TSH_GLOBAL, values, sizeof values) == TSH_OK, "read");
    CHECK(values[0] == bias[0] && values[1] == bias[1], "%g %g", (double)values[0],
          (double)values[1]);
    CHECK(tsh_backward(ctx, tsh_sum(y, TSH_ALL, 0)) == TSH_OK, "backward");
    CHECK(tsh_item(ctx, tsh_slice(tsh_grad(tsh_param(layer, "bias")), 0, 0, 1)) == 1,
          "its gradient");
    CHECK_OK();
    return 0;
}

static void test_pain_11_a_row_bias_is_added_once(void **state) {
    (void)state;
    at_every_degree(row_bias, NULL);
}

/* 12. Fewer key-value heads than ranks, and heads that do not divide: 5 query heads over one pair
 * of keys and values, which every rank holds; their gradients are sums over the ranks. */
static int few_keys(tsh_ctx *ctx, int dense, capture *got) {
    const tsh_layout heads = tsh_sharded(1);
    tsh_tensor *q = same_leaf(ctx, 1, "2,5,3,4 R", 1, 1), *k = same_leaf(ctx, 1, "2,1,3,4 R", 1, 2),
               *v = same_leaf(ctx, 1, "2,1,3,4 R", 1, 3), *y;
    y = tsh_attention(dense ? q : tsh_redistribute(q, heads), k, v, NULL);
    if (capture_add(ctx, got, y)) return 1;
    CHECK(tsh_backward(ctx, ranks_loss(ctx, y)) == TSH_OK, "backward");
    return capture_add(ctx, got, tsh_grad(q)) || capture_add(ctx, got, tsh_grad(k)) ||
           capture_add(ctx, got, tsh_grad(v));
}

static void test_pain_12_fewer_kv_heads_than_ranks(void **state) {
    (void)state;
    same_prove(few_keys, ROUNDING);
}

/* 13. A tied embedding and head stay one parameter: one object, one gradient from both uses. */
static int tied(tsh_ctx *ctx, int dense, capture *got) {
    const tsh_plan_rule plan[] = {{.path = "wte", .style = TSH_ROWWISE},
                                  {.path = "head", .style = TSH_COLWISE}};
    const tsh_embedding_desc table = {.count = 5, .dim = 3};
    tsh_classifier_desc last = {.in = 3, .classes = 5};
    static const int32_t tokens[4] = {4, 0, 2, 4};
    tsh_module *root = tsh_root(ctx), *wte = tsh_add_embedding(root, "wte", &table), *head;
    tsh_tensor *ids = tsh_tensor_from(ctx, TSH_I32, tsh_shape1(4), tsh_replicated(), tokens), *loss;
    last.weight = tsh_param(wte, "weight");
    head = tsh_add_classifier(root, "head", &last);
    if (!dense) CHECK(tsh_parallelize(root, plan, 2) == TSH_OK, "plan");
    CHECK(tsh_materialize(root) == TSH_OK, "values");
    CHECK(tsh_param(root, "head.weight") == tsh_param(root, "wte.weight"), "one object");
    loss = tsh_cross_entropy(tsh_forward(head, tsh_forward(wte, ids)), ids, NULL);
    if (capture_add(ctx, got, loss)) return 1;
    CHECK(tsh_backward(ctx, loss) == TSH_OK, "backward");
    return capture_add(ctx, got, tsh_grad(last.weight));
}

static void test_pain_13_tied_weights_stay_tied(void **state) {
    (void)state;
    same_prove(tied, ROUNDING);
}

/* 15. A plan with a typo is an error that lists near names, and changes nothing. */
static int typo(tsh_ctx *ctx, void *user) {
    const tsh_plan_rule plan[] = {{.path = "c_fc", .style = TSH_COLWISE},
                                  {.path = "c_porj", .style = TSH_ROWWISE}};
    (void)user;
    add_linear(ctx, "c_fc", 4, 8);
    add_linear(ctx, "c_proj", 8, 4);
    CHECK(tsh_parallelize(tsh_root(ctx), plan, 2) == TSH_ERR_ARGUMENT, "refused");
    CHECK(strstr(tsh_last_error(ctx)->message, "\"c_porj\"") &&
              strstr(tsh_last_error(ctx)->message, "\"c_proj\""),
          "both names");
    CHECK(tsh_layout_of(tsh_param(tsh_root(ctx), "c_fc.weight")).kind == TSH_REPLICATED, "nothing");
    (void)tsh_barrier(tsh_world(ctx));
    return 0;
}

static void test_pain_15_a_typo_in_a_plan_is_an_error(void **state) {
    (void)state;
    at_every_degree(typo, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pain_3_uneven_shards_keep_their_shape),
        cmocka_unit_test(test_pain_6_weights_and_masks_do_not_depend_on_tp),
        cmocka_unit_test(test_pain_7_replicated_parameters_do_not_drift),
        cmocka_unit_test(test_pain_8_the_gradient_norm_counts_replicas_once),
        cmocka_unit_test(test_pain_10_fused_weights_are_cut_part_by_part),
        cmocka_unit_test(test_pain_11_a_row_bias_is_added_once),
        cmocka_unit_test(test_pain_12_fewer_kv_heads_than_ranks),
        cmocka_unit_test(test_pain_13_tied_weights_stay_tied),
        cmocka_unit_test(test_pain_15_a_typo_in_a_plan_is_an_error),
    };
    return cmocka_run_group_tests_name("layer/pains", tests, NULL, NULL);
}
