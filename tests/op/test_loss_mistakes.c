/* The mistakes that new users make with losses, each with the whole sentence it gets: an error, or,
 * where the numbers could be meant, a warning that is logged once. */
#include "../../tshard.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#define COUNT(a) ((int)(sizeof(a) / sizeof((a)[0])))

/* A tensor of ones whose shape is up to three lengths; 0 ends them. */
static tsh_tensor *ones(tsh_ctx *ctx, int a, int b, int c) {
    return tsh_ones(ctx, c ? tsh_shape3(a, b, c) : b ? tsh_shape2(a, b) : tsh_shape1(a));
}

static tsh_tensor *ids(tsh_ctx *ctx, int a, int b, int c) {
    return tsh_cast(ones(ctx, a, b, c), TSH_I64);
}

/* A leaf, so that what is computed from it is recorded. */
static tsh_tensor *leaf(tsh_ctx *ctx, int a, int b) {
    return tsh_requires_grad(tsh_keep(ones(ctx, a, b, 0)), 1);
}

/* ------------------------------------------------------------------ the mistakes */

static tsh_tensor *column_against_row(tsh_ctx *ctx) {
    return tsh_mse_loss(ones(ctx, 16, 1, 0), ones(ctx, 16, 0, 0), NULL);
}
static tsh_tensor *row_against_column(tsh_ctx *ctx) {
    return tsh_binary_cross_entropy_with_logits(ones(ctx, 16, 0, 0), ones(ctx, 16, 1, 0), NULL);
}
static tsh_tensor *deep_against_flat(tsh_ctx *ctx) {
    return tsh_l1_loss(ones(ctx, 4, 3, 0), ones(ctx, 4, 3, 1), NULL);
}
static tsh_tensor *row_against_rows(tsh_ctx *ctx) {
    return tsh_huber_loss(ones(ctx, 4, 3, 0), ones(ctx, 3, 0, 0), NULL);
}
static tsh_tensor *integers_as_numbers(tsh_ctx *ctx) {
    return tsh_mse_loss(ones(ctx, 4, 0, 0), ids(ctx, 4, 0, 0), NULL);
}
static tsh_tensor *classes_for_binary(tsh_ctx *ctx) {
    return tsh_binary_cross_entropy_with_logits(ones(ctx, 4, 3, 0), ids(ctx, 4, 0, 0), NULL);
}
static tsh_tensor *logits_as_probabilities(tsh_ctx *ctx) {
    return tsh_binary_cross_entropy(tsh_scale(ones(ctx, 2, 2, 0), 2.5), ones(ctx, 2, 2, 0), NULL);
}
static tsh_tensor *classes_as_probabilities(tsh_ctx *ctx) {
    return tsh_binary_cross_entropy(ones(ctx, 2, 2, 0), tsh_scale(ones(ctx, 2, 2, 0), -1), NULL);
}
static tsh_tensor *positive_weight_elsewhere(tsh_ctx *ctx) {
    tsh_loss_desc desc = {.delta = 0};
    desc.pos_weight = ones(ctx, 2, 0, 0);
    return tsh_binary_cross_entropy(ones(ctx, 2, 2, 0), ones(ctx, 2, 2, 0), &desc);
}
static tsh_tensor *weight_per_row(tsh_ctx *ctx) {
    tsh_loss_desc desc = {.delta = 0};
    desc.weight = ones(ctx, 4, 0, 0);
    return tsh_mse_loss(ones(ctx, 4, 3, 0), ones(ctx, 4, 3, 0), &desc);
}
static tsh_tensor *mean_of_the_batch(tsh_ctx *ctx) {
    const tsh_loss_desc desc = {.reduction = TSH_REDUCE_BATCHMEAN};
    return tsh_mse_loss(ones(ctx, 4, 0, 0), ones(ctx, 4, 0, 0), &desc);
}
static tsh_tensor *delta_below_0(tsh_ctx *ctx) {
    const tsh_loss_desc desc = {.delta = -1};
    return tsh_huber_loss(ones(ctx, 4, 0, 0), ones(ctx, 4, 0, 0), &desc);
}
static tsh_tensor *beta_below_0(tsh_ctx *ctx) {
    const tsh_loss_desc desc = {.beta = -1};
    return tsh_smooth_l1_loss(ones(ctx, 4, 0, 0), ones(ctx, 4, 0, 0), &desc);
}
static tsh_tensor *no_such_reduction(tsh_ctx *ctx) {
    const tsh_loss_desc desc = {.reduction = (tsh_reduction)7};
    return tsh_l1_loss(ones(ctx, 4, 0, 0), ones(ctx, 4, 0, 0), &desc);
}
static tsh_tensor *no_target(tsh_ctx *ctx) {
    return tsh_kl_div(ones(ctx, 4, 0, 0), NULL, NULL);
}
static tsh_tensor *classes_from_1(tsh_ctx *ctx) {
    return tsh_cross_entropy(ones(ctx, 2, 1, 0), ids(ctx, 2, 0, 0), NULL);
}
static tsh_tensor *likelihood_of_class_2(tsh_ctx *ctx) {
    tsh_tensor *y = tsh_cast(tsh_scale(ones(ctx, 2, 0, 0), 2), TSH_I32);
    return tsh_nll_loss(ones(ctx, 2, 1, 0), y, NULL);
}
static tsh_tensor *classes_in_a_column(tsh_ctx *ctx) {
    return tsh_cross_entropy(ones(ctx, 4, 3, 0), ids(ctx, 4, 1, 0), NULL);
}
static tsh_tensor *likelihood_in_a_column(tsh_ctx *ctx) {
    return tsh_nll_loss(ones(ctx, 4, 3, 0), ids(ctx, 4, 1, 0), NULL);
}
static tsh_tensor *classes_as_numbers(tsh_ctx *ctx) {
    return tsh_cross_entropy(ones(ctx, 4, 3, 0), ones(ctx, 4, 0, 0), NULL);
}
static tsh_tensor *likelihood_of_numbers(tsh_ctx *ctx) {
    return tsh_nll_loss(ones(ctx, 4, 3, 0), ones(ctx, 4, 0, 0), NULL);
}
static tsh_tensor *one_hot_integers(tsh_ctx *ctx) {
    return tsh_cross_entropy(ones(ctx, 4, 3, 0), ids(ctx, 4, 3, 0), NULL);
}
static tsh_tensor *deep_logits(tsh_ctx *ctx) {
    return tsh_cross_entropy(ones(ctx, 4, 3, 1), ids(ctx, 4, 0, 0), NULL);
}
static tsh_tensor *classes_in_dimension_1(tsh_ctx *ctx) {
    return tsh_cross_entropy(ones(ctx, 4, 3, 5), ids(ctx, 4, 5, 0), NULL);
}
static tsh_tensor *likelihood_in_dimension_1(tsh_ctx *ctx) {
    return tsh_nll_loss(ones(ctx, 4, 3, 5), ids(ctx, 4, 5, 0), NULL);
}
static tsh_tensor *too_few_class_weights(tsh_ctx *ctx) {
    tsh_loss_desc desc = {.delta = 0};
    desc.weight = ones(ctx, 2, 0, 0);
    return tsh_nll_loss(ones(ctx, 4, 3, 0), ids(ctx, 4, 0, 0), &desc);
}
static tsh_tensor *likelihood_of_the_batch(tsh_ctx *ctx) {
    const tsh_loss_desc desc = {.reduction = TSH_REDUCE_BATCHMEAN};
    return tsh_nll_loss(ones(ctx, 4, 3, 0), ids(ctx, 4, 0, 0), &desc);
}
static tsh_tensor *rows_that_do_not_broadcast(tsh_ctx *ctx) {
    return tsh_cosine_similarity(ones(ctx, 4, 3, 0), ones(ctx, 4, 2, 0), -1, 0);
}
static tsh_tensor *no_such_dimension(tsh_ctx *ctx) {
    return tsh_cosine_similarity(ones(ctx, 4, 0, 0), ones(ctx, 4, 0, 0), 1, 0);
}
static tsh_tensor *eps_below_0(tsh_ctx *ctx) {
    return tsh_cosine_similarity(ones(ctx, 4, 0, 0), ones(ctx, 4, 0, 0), 0, -1);
}
static tsh_tensor *backward_of_many(tsh_ctx *ctx) {
    const tsh_loss_desc desc = {.reduction = TSH_REDUCE_NONE};
    (void)tsh_backward(ctx, tsh_mse_loss(leaf(ctx, 2, 2), ones(ctx, 2, 2, 0), &desc));
    return NULL;
}

typedef struct mistake {
    tsh_tensor *(*fn)(tsh_ctx *ctx);
    tsh_result code;
    const char *sentence;
} mistake;

static const mistake mistakes[] = {
    {column_against_row, TSH_ERR_SHAPE,
     "tsh_mse_loss: x (16, 1) R and target (16) R must have the same shape, they are not "
     "broadcast: "
     "tsh_squeeze(x, -1), or tsh_unsqueeze(target, -1)"},
    {row_against_column, TSH_ERR_SHAPE,
     "tsh_binary_cross_entropy_with_logits: x (16) R and target (16, 1) R must have the same "
     "shape, "
     "they are not broadcast: tsh_squeeze(target, -1), or tsh_unsqueeze(x, -1)"},
    {deep_against_flat, TSH_ERR_SHAPE,
     "tsh_l1_loss: x (4, 3) R and target (4, 3, 1) R must have the same shape, they are not "
     "broadcast: tsh_squeeze(target, -1), or tsh_unsqueeze(x, -1)"},
    {row_against_rows, TSH_ERR_SHAPE,
     "tsh_huber_loss: x (4, 3) R and target (3) R must have the same shape, they are not "
     "broadcast; "
     "tsh_reshape gives one of them that of the other"},
    {integers_as_numbers, TSH_ERR_DTYPE,
     "tsh_mse_loss: target is i64, not f32; of numbers: tsh_cast(target, TSH_REAL); class indices "
     "are for tsh_cross_entropy"},
    {classes_for_binary, TSH_ERR_DTYPE,
     "tsh_binary_cross_entropy_with_logits: target is i64, not f32; of numbers: tsh_cast(target, "
     "TSH_REAL); class indices are for tsh_cross_entropy"},
    {logits_as_probabilities, TSH_ERR_ARGUMENT,
     "tsh_binary_cross_entropy: x is 2.5 at (0, 0), not a probability from 0 to 1; if x is logits, "
     "without tsh_sigmoid: tsh_binary_cross_entropy_with_logits"},
    {classes_as_probabilities, TSH_ERR_ARGUMENT,
     "tsh_binary_cross_entropy: target is -1 at (0, 0), not a probability from 0 to 1"},
    {positive_weight_elsewhere, TSH_ERR_ARGUMENT,
     "tsh_binary_cross_entropy: pos_weight is for tsh_binary_cross_entropy_with_logits; here: "
     "weight, a factor per element"},
    {weight_per_row, TSH_ERR_SHAPE,
     "tsh_mse_loss: weight (4) R is not broadcast to x's shape (4, 3) R; of one number per row: "
     "tsh_unsqueeze(weight, -1)"},
    {mean_of_the_batch, TSH_ERR_ARGUMENT,
     "tsh_mse_loss: TSH_REDUCE_BATCHMEAN is for tsh_kl_div; here: TSH_REDUCE_SUM, and tsh_scale by "
     "1 / the batch size"},
    {delta_below_0, TSH_ERR_ARGUMENT,
     "tsh_huber_loss: delta is -1, not a finite number above 0 (0: 1)"},
    {beta_below_0, TSH_ERR_ARGUMENT,
     "tsh_smooth_l1_loss: beta is -1, not a finite number from 0 up (0: 1; TSH_ZERO: 0)"},
    {no_such_reduction, TSH_ERR_ARGUMENT, "tsh_l1_loss: 7 is no reduction"},
    {no_target, TSH_ERR_ARGUMENT, "tsh_kl_div: target is NULL"},
    {classes_from_1, TSH_ERR_ARGUMENT,
     "tsh_cross_entropy: target 1 at row 0 is outside [0, 1): classes are counted from 0; to leave "
     "such rows out: .ignore = 1, .ignore_index = 1"},
    {likelihood_of_class_2, TSH_ERR_ARGUMENT,
     "tsh_nll_loss: target 2 at row 0 is outside [0, 1); to leave such rows out: .ignore = 1, "
     ".ignore_index = 2"},
    {classes_in_a_column, TSH_ERR_SHAPE,
     "tsh_cross_entropy: logits (4, 3) R and target i64 (4, 1) R; takes (.., V) and integers (..), "
     "or probabilities (.., V); leave out the target's last dimension: tsh_squeeze(target, -1)"},
    {likelihood_in_a_column, TSH_ERR_SHAPE,
     "tsh_nll_loss: log_probs (4, 3) R and target (4, 1) R; takes (.., V) and (..); leave out the "
     "target's last dimension: tsh_squeeze(target, -1)"},
    {classes_as_numbers, TSH_ERR_SHAPE,
     "tsh_cross_entropy: logits (4, 3) R and target f32 (4) R; takes (.., V) and integers (..), or "
     "probabilities (.., V); class indices are integers: tsh_cast(target, TSH_I64)"},
    {likelihood_of_numbers, TSH_ERR_DTYPE,
     "tsh_nll_loss: target is f32, not class indices, which are i32 or i64: tsh_cast(target, "
     "TSH_I64); probabilities are for tsh_kl_div, or, of logits, for tsh_cross_entropy"},
    {one_hot_integers, TSH_ERR_SHAPE,
     "tsh_cross_entropy: logits (4, 3) R and target i64 (4, 3) R; takes (.., V) and integers (..), "
     "or probabilities (.., V); a one-hot target is probabilities, for tsh_cross_entropy: "
     "tsh_cast(target, TSH_REAL)"},
    {deep_logits, TSH_ERR_SHAPE,
     "tsh_cross_entropy: logits (4, 3, 1) R and target i64 (4) R; takes (.., V) and integers (..), "
     "or probabilities (.., V); leave out the first tensor's last dimension: tsh_squeeze(.., -1)"},
    {classes_in_dimension_1, TSH_ERR_SHAPE,
     "tsh_cross_entropy: logits (4, 3, 5) R and target i64 (4, 5) R; takes (.., V) and integers "
     "(..), or probabilities (.., V); if classes are in dimension 1, as here, give .dim = 1"},
    {likelihood_in_dimension_1, TSH_ERR_SHAPE,
     "tsh_nll_loss: log_probs (4, 3, 5) R and target (4, 5) R; takes (.., V) and (..); if classes "
     "are in dimension 1, as here, give .dim = 1"},
    {too_few_class_weights, TSH_ERR_SHAPE,
     "tsh_nll_loss: log_probs (4, 3) R have 3 classes, weight is (2) R"},
    {likelihood_of_the_batch, TSH_ERR_ARGUMENT,
     "tsh_nll_loss: reduction 3, dim 0; takes TSH_REDUCE_MEAN, _SUM or _NONE, and classes in the "
     "last dimension (0) or in dimension 1 (1)"},
    {rows_that_do_not_broadcast, TSH_ERR_SHAPE,
     "tsh_cosine_similarity: shapes (4, 3) R and (4, 2) R do not broadcast (3 against 2); counted "
     "from the last one, sizes must be equal or 1: tsh_reshape"},
    {no_such_dimension, TSH_ERR_SHAPE,
     "tsh_cosine_similarity: there is no dimension 1 in (4) R and (4) R"},
    {eps_below_0, TSH_ERR_ARGUMENT,
     "tsh_cosine_similarity: eps is -1, not a finite number from 0 up"},
    {backward_of_many, TSH_ERR_SHAPE,
     "tsh_backward: the loss must be one replicated value, not f32 (2, 2) R, as tsh_mean(loss, "
     "TSH_ALL, 0) gives"},
};

static void each_mistake_gets_its_sentence(void **state) {
    tsh_ctx *ctx;
    (void)state;
    assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
    for (int i = 0; i < COUNT(mistakes); i++) {
        const tsh_error *error = tsh_last_error(ctx);
        assert_null(mistakes[i].fn(ctx));
        assert_string_equal(error->message, mistakes[i].sentence);
        assert_int_equal(error->code, mistakes[i].code);
        tsh_clear_error(ctx);
    }
    tsh_close(ctx);
}

/* ------------------------------------------------------------------ warnings */

enum { LOG = 1024 };

static void keep_message(const char *message, void *user) {
    char *text = (char *)user;
    const size_t used = strlen(text);
    (void)snprintf(text + used, LOG - used, "%s|", message);
}

static tsh_tensor *sigmoid_twice(tsh_ctx *ctx) {
    return tsh_binary_cross_entropy_with_logits(tsh_sigmoid(leaf(ctx, 2, 3)), ones(ctx, 2, 3, 0),
                                                NULL);
}
static tsh_tensor *softmax_twice(tsh_ctx *ctx) {
    return tsh_cross_entropy(tsh_softmax(leaf(ctx, 2, 3), -1), ids(ctx, 2, 0, 0), NULL);
}
static tsh_tensor *no_logarithm(tsh_ctx *ctx) {
    return tsh_nll_loss(tsh_softmax(leaf(ctx, 2, 3), -1), ids(ctx, 2, 0, 0), NULL);
}
static tsh_tensor *no_logarithm_of_x(tsh_ctx *ctx) {
    return tsh_kl_div(tsh_softmax(leaf(ctx, 2, 3), -1), ones(ctx, 2, 3, 0), NULL);
}
static tsh_tensor *as_it_should_be(tsh_ctx *ctx) {
    tsh_tensor *x = leaf(ctx, 2, 3), *y = ids(ctx, 2, 0, 0), *t = ones(ctx, 2, 3, 0);
    tsh_tensor *sum = tsh_binary_cross_entropy(tsh_sigmoid(x), t, NULL);
    sum = tsh_add(sum, tsh_binary_cross_entropy_with_logits(x, t, NULL));
    sum = tsh_add(sum, tsh_nll_loss(tsh_log_softmax(x, -1), y, NULL));
    sum = tsh_add(sum, tsh_kl_div(tsh_log_softmax(x, -1), t, NULL));
    return tsh_add(sum, tsh_cross_entropy(x, y, NULL));
}

typedef struct warning {
    tsh_tensor *(*fn)(tsh_ctx *ctx);
    const char *sentence; /* what the logger gets of two calls */
} warning;

static const warning warnings[] = {
    {sigmoid_twice,
     "warning: tsh_binary_cross_entropy_with_logits: x is the result of tsh_sigmoid, "
     "which this loss applies itself; give it the logits|"},
    {softmax_twice, "warning: tsh_cross_entropy: the logits are the result of tsh_softmax, which "
                    "this loss applies itself; give it what tsh_softmax was given|"},
    {no_logarithm, "warning: tsh_nll_loss: log_probs is the result of tsh_softmax, but this loss "
                   "takes logarithms: tsh_log_softmax|"},
    {no_logarithm_of_x, "warning: tsh_kl_div: x is the result of tsh_softmax, but this loss takes "
                        "logarithms: tsh_log_softmax|"},
    {as_it_should_be, ""},
};

static void what_may_be_meant_gets_a_warning_once(void **state) {
    (void)state;
    for (int i = 0; i < COUNT(warnings); i++) {
        static char text[LOG];
        tsh_desc desc = {.seed = 0};
        tsh_ctx *ctx;
        text[0] = '\0';
        desc.logger.log = keep_message;
        desc.logger.user = text;
        assert_int_equal(tsh_open(&desc, &ctx), TSH_OK);
        assert_non_null(warnings[i].fn(ctx));
        assert_non_null(warnings[i].fn(ctx));
        assert_string_equal(text, warnings[i].sentence);
        tsh_close(ctx);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_mistake_gets_its_sentence),
        cmocka_unit_test(what_may_be_meant_gets_a_warning_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
