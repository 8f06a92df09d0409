/* Mistakes that a new user makes: each gets a sentence that says what is wrong and what to call. */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../support/unit.h"

/* ctx has an error of this code whose sentence has `part`. */
static int says(tsh_ctx *ctx, tsh_result code, const char *part) {
    const tsh_error *error = tsh_last_error(ctx);
    return error->code == code && strstr(error->message, part) != NULL;
}

/* ------------------------------------------------------------- backward, shapes */

static tsh_tensor *leaf(tsh_ctx *ctx) {
    return tsh_requires_grad(tsh_keep(tsh_ones(ctx, tsh_shape2(2, 6))), 1);
}

static void test_backward_twice(void **state) {
    static const char sentence[] =
        "tsh_backward: a tsh_backward before has consumed the graph of the loss; record it again, "
        "or add up all losses and call tsh_backward once";
    tsh_ctx *ctx = unit_open(NULL);
    tsh_tensor *x = leaf(ctx), *y = tsh_mul(x, x);
    tsh_tensor *loss = tsh_sum(y, TSH_ALL, 0), *other = tsh_mean(y, TSH_ALL, 0);
    (void)state;
    assert_int_equal(tsh_backward(ctx, loss), TSH_OK);
    assert_int_equal(tsh_backward(ctx, loss), TSH_ERR_STATE);
    EXPECT(TSH_ERR_STATE, sentence);
    assert_int_equal(tsh_backward(ctx, other), TSH_ERR_STATE); /* of the same graph */
    EXPECT(TSH_ERR_STATE, sentence);
    assert_int_equal(tsh_backward(ctx, tsh_sum(tsh_ones(ctx, tsh_shape1(3)), 0, 0)), TSH_ERR_STATE);
    EXPECT(TSH_ERR_STATE, "the loss does not depend on any tensor that requires a gradient");
    assert_int_equal(tsh_backward(ctx, tsh_sum(tsh_mul(x, x), TSH_ALL, 0)), TSH_OK);
    unit_close(ctx);
}

static void test_reshape_to_another_size(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_tensor *x = leaf(ctx);
    tsh_shape deep = tsh_shape1(12);
    (void)state;
    assert_null(tsh_reshape(x, tsh_shape2(3, 5)));
    EXPECT(TSH_ERR_SHAPE,
           "tsh_reshape: (2, 6) R has 12 elements, which do not fit the new shape (3, 5)");
    assert_null(tsh_reshape(x, tsh_shape3(-1, 5, 1)));
    EXPECT(TSH_ERR_SHAPE, "which do not fit the new shape (-1, 5, 1)");
    deep.ndim = 99;
    assert_null(tsh_reshape(x, deep));
    EXPECT(TSH_ERR_SHAPE, "tsh_reshape: (2, 6) R to 99 dimensions");
    unit_close(ctx);
}

/* ----------------------------------------------------------------- several ranks */

/* Splits the output of a fused QKV, three parts of two heads of 4 features. user: the .segments of
 * its rule; 1 is an error. */
static int fused(tsh_ctx *ctx, void *user) {
    const int segments = *(const int *)user;
    const tsh_linear_desc desc = {.in = 8, .out = 24};
    const tsh_plan_rule plan[] = {
        {.path = "qkv", .style = TSH_COLWISE, .segments = segments, .unit = 4}};
    tsh_module *root = tsh_root(ctx), *qkv = tsh_add_linear(root, "qkv", &desc);
    tsh_tensor *y, *part[3];
    CHECK(tsh_parallelize(root, plan, 1) == TSH_OK && tsh_materialize(root) == TSH_OK, "the model");
    y = tsh_forward(qkv, tsh_ones(ctx, tsh_shape2(5, 8)));
    if (segments == 3) {
        CHECK(tsh_split_dim(y, 1, 3, part) == TSH_OK, "three segments");
        return 0;
    }
    CHECK(tsh_split_dim(y, 1, 3, part) == TSH_ERR_LAYOUT, "one segment");
    CHECK(says(ctx, TSH_ERR_LAYOUT,
               "tsh_slice: [0, 8) does not begin and end at segment boundaries of the sharded "
               "dimension of (5, 24) S(1, unit 4); if these are 3 fused parts, as [Q|K|V], give "
               "the rule of their linear .segments = 3 in the plan (and .unit = head size); else "
               "gather it first: tsh_redistribute(x, tsh_replicated())"), "split");
    tsh_clear_error(ctx);
    CHECK(!tsh_slice(y, 1, 2, 7), "no part of a fused one");
    CHECK(says(ctx, TSH_ERR_LAYOUT, "S(1, unit 4); gather it first"), "slice");
    tsh_clear_error(ctx);
    return 0;
}

static void test_fused_without_segments(void **state) {
    int segments, ranks;
    (void)state;
    for (ranks = 1; ranks <= 4; ranks++)
        for (segments = 1; segments <= 3; segments += 2) ranks_run(ranks, fused, &segments);
}

/* One rank has a layer more, which is never called; before the first step or after it. */
typedef struct extra_case {
    int after, odd; /* odd: that rank */
} extra_case;

static int extra_layer(tsh_ctx *ctx, void *user) {
    const extra_case *c = (const extra_case *)user;
    const tsh_linear_desc square = {.in = 4, .out = 4};
    const int rank = tsh_world(ctx)->rank;
    tsh_module *root = tsh_root(ctx), *one = tsh_add_linear(root, "one", &square);
    char blames[96];
    CHECK(one && tsh_materialize(root) == TSH_OK, "the model");
    if (c->after) CHECK(tsh_check_replicas(root), "all are alike");
    if (c->after) CHECK(tsh_check_replicas(one), "and below a module");
    if (rank == c->odd) CHECK(tsh_add_linear(root, "extra", &square), "never called");
    CHECK(!tsh_check_replicas(one), "one rank has more");
    (void)snprintf(blames, sizeof blames, "rank %d has \"extra\" linear: weight %s (4, 4) R",
                   c->odd, sizeof(tsh_real) == 4 ? "f32" : "f64");
    CHECK(says(ctx, TSH_ERR_MISMATCH, blames), "%s", blames);
    CHECK(says(ctx, TSH_ERR_MISMATCH, "has nothing; build the same model on each"), "the way out");
    CHECK(tsh_last_error(ctx)->rank == c->odd, "rank %d", tsh_last_error(ctx)->rank);
    return 0;
}

static void test_extra_layer_on_one_rank(void **state) {
    extra_case c = {0, 1};
    tsh_desc desc;
    int ranks;
    (void)state;
    memset(&desc, 0, sizeof desc);
    for (ranks = 2; ranks <= 4; ranks++)
        for (c.after = 0; c.after < 2; c.after++)
            for (desc.tp = 1; desc.tp <= ranks; desc.tp++) {
                if (ranks % desc.tp) continue;
                c.odd = ranks - 1;
                ranks_run_with(ranks, &desc, extra_layer, &c);
            }
}

/* -------------------------------------------------------------------- warnings */

/* What a training loop forgets. */
typedef enum forgotten { NOTHING, ZERO_GRADS, STEP_END, BOTH } forgotten;

/* What the logger got: rank 0 alone warns, so that one thread writes here. */
typedef struct heard {
    int grads, steps, other;
} heard;

static void hear(void *user, const char *message) {
    heard *h = (heard *)user;
    if (strcmp(message, "warning: tsh_backward adds to gradients that tsh_optim_step has used; "
                        "call tsh_zero_grads after each tsh_optim_step") == 0)
        h->grads++;
    else if (strcmp(message, "warning: memory grows: many calls of tsh_optim_step, and no "
                             "tsh_step_end between them; call tsh_step_end at the end of each "
                             "step") == 0)
        h->steps++;
    else
        h->other++;
}

static tsh_tensor *forget_loss(tsh_ctx *ctx, const char *name) {
    tsh_tensor *x = tsh_forward(tsh_find(tsh_root(ctx), name), tsh_ones(ctx, tsh_shape2(3, 4)));
    return tsh_mean(tsh_mul(x, x), TSH_ALL, 0);
}

/* 100 steps of two micro-batches, the first deferred. Gradients of "b" stay from the first on. */
static int forget(tsh_ctx *ctx, void *user) {
    const forgotten f = *(const forgotten *)user;
    const tsh_linear_desc square = {.in = 4, .out = 4};
    const tsh_optim_desc sgd = {.kind = TSH_SGD, .lr = 1e-3};
    const tsh_backward_desc defer = {.defer = 1};
    tsh_module *root = tsh_root(ctx), *a = tsh_add_linear(root, "a", &square);
    tsh_module *b = tsh_add_linear(root, "b", &square);
    tsh_optim *first, *second;
    CHECK(tsh_materialize(root) == TSH_OK, "the model");
    first = tsh_optim_new(a, &sgd);
    second = tsh_optim_new(b, &sgd);
    CHECK(tsh_backward(ctx, forget_loss(ctx, "b")) == TSH_OK, "b");
    CHECK(tsh_optim_step(second) == TSH_OK && tsh_step_end(ctx) == TSH_OK, "b");
    for (int i = 0; i < 100; i++) {
        CHECK(tsh_backward_with(ctx, forget_loss(ctx, "a"), &defer) == TSH_OK, "step %d", i);
        CHECK(tsh_backward(ctx, forget_loss(ctx, "a")) == TSH_OK, "step %d", i);
        CHECK(tsh_optim_step(first) == TSH_OK, "step %d", i);
        if (!(f & ZERO_GRADS)) tsh_zero_grads(a);
        if (!(f & STEP_END)) (void)tsh_step_end(ctx);
    }
    return 0;
}

static void test_forgotten_calls(void **state) {
    int f, ranks;
    (void)state;
    for (ranks = 1; ranks <= 4; ranks++)
        for (f = NOTHING; f <= BOTH; f++) {
            heard h = {0, 0, 0};
            forgotten what = (forgotten)f;
            tsh_desc desc;
            memset(&desc, 0, sizeof desc);
            desc.tp = 1;
            desc.logger.fn = hear;
            desc.logger.user = &h;
            ranks_run_with(ranks, &desc, forget, &what);
            assert_int_equal(h.grads, (f & ZERO_GRADS) != 0);
            assert_int_equal(h.steps, (f & STEP_END) != 0);
            assert_int_equal(h.other, 0);
        }
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_backward_twice),
        cmocka_unit_test(test_reshape_to_another_size),
        cmocka_unit_test(test_fused_without_segments),
        cmocka_unit_test(test_extra_layer_on_one_rank),
        cmocka_unit_test(test_forgotten_calls),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
