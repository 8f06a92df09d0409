/* TSHARD_WHERE with backends/tshard_where.h: errors end with the file and line of the call that
 * failed, of the innermost one where calls are nested or a module's forward runs; arguments are
 * evaluated once. */
#define TSHARD_WHERE
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../../backends/tshard_where.h"
#include "../support/ranks.h"

/* The error of ctx ends with "(FILE:line)"; it is cleared. */
#define ENDS_AT(line)                                                                              \
    do {                                                                                           \
        char place[256];                                                                           \
        (void)snprintf(place, sizeof place, " (%s:%d)", __FILE__, line);                           \
        if (!ends_with(tsh_last_error(ctx)->message, place))                                       \
            fail_msg("line %d: \"%s\" does not end with \"%s\"", __LINE__,                         \
                     tsh_last_error(ctx)->message, place);                                         \
        tsh_clear_error(ctx);                                                                      \
    } while (0)

static int ends_with(const char *text, const char *end) {
    const size_t a = strlen(text), b = strlen(end);
    return a >= b && strcmp(text + a - b, end) == 0;
}

static void test_a_call(void **state) {
    tsh_ctx *ctx = NULL;
    (void)state;
    assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
    tsh_tensor *a = tsh_ones(ctx, tsh_shape1(2)), *b = tsh_ones(ctx, tsh_shape1(3)), *parts[2];
    parts[0] = a;
    parts[1] = b;
    assert_null(tsh_add(a, b)); ENDS_AT(__LINE__);
    assert_null(tsh_add(NULL, b)); ENDS_AT(__LINE__);
    assert_null(tsh_zeros(ctx, tsh_shape1(-1))); ENDS_AT(__LINE__);
    assert_null(tsh_find(tsh_root(ctx), "none")); ENDS_AT(__LINE__);
    assert_null(tsh_concat(parts, 2, 5)); ENDS_AT(__LINE__);
    assert_int_equal(tsh_backward(ctx, a), TSH_ERR_SHAPE); ENDS_AT(__LINE__);
    assert_null(tsh_keep(tsh_add(NULL, NULL))); /* no ctx to have an error */
    assert_int_equal(tsh_last_error(ctx)->code, TSH_OK);
    assert_non_null(tsh_add(a, a));
    tsh_close(ctx);
}

/* Each call of an expression over several lines has its own line. */
static void test_nested(void **state) {
    tsh_ctx *ctx = NULL;
    int line;
    (void)state;
    assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
    tsh_tensor *a = tsh_ones(ctx, tsh_shape1(2)), *b = tsh_ones(ctx, tsh_shape1(3)), *y;
    line = __LINE__ + 2; /* of the inner one */
    y = tsh_add(tsh_relu(a),
                tsh_mul(a, b));
    assert_null(y);
    ENDS_AT(line);
    line = __LINE__ + 1; /* of the outer one, though an inner call comes later */
    y = tsh_add(tsh_relu(a), tsh_relu(
        b));
    assert_null(y);
    ENDS_AT(line);
    tsh_close(ctx);
}

static int inner_line;

static tsh_tensor *forward(tsh_module *self, tsh_tensor **in, int n, void *user) {
    (void)self, (void)n, (void)user;
    inner_line = __LINE__ + 1;
    return tsh_reshape(in[0], tsh_shape1(7));
}

static tsh_tensor *forward_without_a_result(tsh_module *self, tsh_tensor **in, int n, void *user) {
    (void)self, (void)in, (void)n, (void)user;
    return NULL;
}

static void test_in_a_module(void **state) {
    const tsh_module_desc fails = {.forward = forward};
    const tsh_module_desc none = {.forward = forward_without_a_result};
    tsh_ctx *ctx = NULL;
    (void)state;
    assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
    tsh_tensor *x = tsh_ones(ctx, tsh_shape1(2));
    assert_null(tsh_forward(tsh_add_module(tsh_root(ctx), "a", &fails), x));
    assert_int_equal(strncmp(tsh_last_error(ctx)->message, "a: tsh_reshape: ", 16), 0);
    ENDS_AT(inner_line);
    assert_null(tsh_forward(tsh_add_module(tsh_root(ctx), "b", &none), x)); ENDS_AT(__LINE__);
    tsh_close(ctx);
}

static void test_arguments_are_evaluated_once(void **state) {
    tsh_ctx *ctx = NULL;
    int evaluated = 0;
    (void)state;
    assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
    assert_non_null(tsh_relu((evaluated++, tsh_ones(ctx, tsh_shape1(2)))));
    assert_int_equal(evaluated, 1);
    tsh_close(ctx);
}

/* Functions as values, and tsh_set_place without the header's macros. */
static void test_places_of_ones_own(void **state) {
    tsh_tensor *(*op)(tsh_tensor *) = tsh_relu;
    tsh_ctx *ctx = NULL;
    tsh_place before;
    (void)state;
    assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
    before = tsh_set_place(ctx, "one.c", 7);
    assert_null(before.file);
    assert_null((tsh_reshape)(op(tsh_ones(ctx, tsh_shape1(2))), tsh_shape1(3)));
    assert_true(ends_with(tsh_last_error(ctx)->message, " (one.c:7)"));
    tsh_clear_error(ctx);
    before = tsh_set_place(ctx, NULL, 0);
    assert_string_equal(before.file, "one.c");
    assert_int_equal(before.line, 7);
    assert_null((tsh_reshape)(op(tsh_ones(ctx, tsh_shape1(2))), tsh_shape1(3)));
    assert_null(strstr(tsh_last_error(ctx)->message, ".c:"));
    before = tsh_set_place(NULL, "one.c", 7);
    assert_null(before.file);
    tsh_close(ctx);
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_call),
        cmocka_unit_test(test_nested),
        cmocka_unit_test(test_in_a_module),
        cmocka_unit_test(test_arguments_are_evaluated_once),
        cmocka_unit_test(test_places_of_ones_own),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
