/* Mistakes that a new user makes: each gets a sentence that says what is wrong and what to call. */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../support/unit.h"

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

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_backward_twice),
        cmocka_unit_test(test_reshape_to_another_size),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
