/* What ops refuse, in which words; that the first error is kept and chains go on with NULL; and
 * that values which were given back are not read. */
#include "../../tshard.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#define COUNT(a) ((int)(sizeof(a) / sizeof((a)[0])))

static tsh_ctx *open_ctx(void) {
    tsh_ctx *ctx;
    assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
    return ctx;
}

/* The kept error has this code, its sentence begins with the first word and holds the others. The
 * error is then cleared. */
static void expect_error(int line, tsh_ctx *ctx, tsh_result code, const char *const *words) {
    const tsh_error *error = tsh_last_error(ctx);
    int i;
    if (error->code != code)
        fail_msg("line %d: %s, not %s: %s", line, tsh_result_name(error->code),
                 tsh_result_name(code), error->message);
    for (i = 0; words[i]; i++) {
        const char *at = strstr(error->message, words[i]);
        if (!at || (i == 0 && at != error->message))
            fail_msg("line %d: \"%s\" is not in \"%s\"", line, words[i], error->message);
    }
    assert_int_equal(error->rank, 0);
    tsh_clear_error(ctx);
    assert_true(tsh_ok(ctx));
}

/* call gives NULL and an error; ctx is in scope. */
#define REFUSED(code, call, ...)                                                                   \
    do {                                                                                           \
        static const char *const words_[] = {__VA_ARGS__, NULL};                                   \
        if (call) fail_msg("line %d: an error was expected", __LINE__);                            \
        expect_error(__LINE__, ctx, TSH_ERR_##code, words_);                                       \
    } while (0)
/* call returns the error's code. */
#define FAILS(code, call, ...)                                                                     \
    do {                                                                                           \
        static const char *const words_[] = {__VA_ARGS__, NULL};                                   \
        assert_int_equal(call, TSH_ERR_##code);                                                    \
        expect_error(__LINE__, ctx, TSH_ERR_##code, words_);                                       \
    } while (0)

typedef struct unary_row {
    const char *name;
    tsh_tensor *(*op)(tsh_tensor *);
} unary_row;
typedef struct binary_row {
    const char *name;
    tsh_tensor *(*op)(tsh_tensor *, tsh_tensor *);
} binary_row;
typedef struct scalar_row {
    const char *name;
    tsh_tensor *(*op)(tsh_tensor *, double);
} scalar_row;
typedef struct reduce_row {
    const char *name;
    tsh_tensor *(*op)(tsh_tensor *, int, int);
} reduce_row;

static const unary_row unary[] = {
    {"tsh_neg", tsh_neg},   {"tsh_exp", tsh_exp},         {"tsh_log", tsh_log},
    {"tsh_sqrt", tsh_sqrt}, {"tsh_sigmoid", tsh_sigmoid}, {"tsh_tanh", tsh_tanh},
    {"tsh_relu", tsh_relu}, {"tsh_gelu", tsh_gelu},       {"tsh_gelu_tanh", tsh_gelu_tanh},
    {"tsh_silu", tsh_silu}, {"tsh_erf", tsh_erf},
};
static const scalar_row scalar[] = {
    {"tsh_scale", tsh_scale},
    {"tsh_add_scalar", tsh_add_scalar},
    {"tsh_pow_scalar", tsh_pow_scalar},
};
static const binary_row binary[] = {
    {"tsh_add", tsh_add}, {"tsh_sub", tsh_sub}, {"tsh_mul", tsh_mul},
    {"tsh_div", tsh_div}, {"tsh_pow", tsh_pow}, {"tsh_matmul", tsh_matmul},
};
static const binary_row compare[] = {
    {"tsh_eq", tsh_eq}, {"tsh_ne", tsh_ne}, {"tsh_lt", tsh_lt},
    {"tsh_le", tsh_le}, {"tsh_gt", tsh_gt}, {"tsh_ge", tsh_ge},
};
static const reduce_row reduce[] = {
    {"tsh_sum", tsh_sum},
    {"tsh_mean", tsh_mean},
    {"tsh_max", tsh_max},
    {"tsh_argmax", tsh_argmax},
};

static void expect_named(tsh_ctx *ctx, tsh_tensor *got, tsh_result code, const char *name,
                         const char *values) {
    const char *words[3];
    if (got) fail_msg("%s: an error was expected", name);
    words[0] = name;
    words[1] = values;
    words[2] = NULL;
    expect_error(__LINE__, ctx, code, words);
}

/* ------------------------------------------------------------------ dtypes, NULL, other ctxs */

static void test_dtypes(void **state) {
    tsh_ctx *ctx = open_ctx();
    tsh_tensor *x = tsh_ones(ctx, tsh_shape2(2, 2)), *i = tsh_cast(x, TSH_I64),
               *h = tsh_cast(x, TSH_I32);
    int k;
    (void)state;
    for (k = 0; k < COUNT(unary); k++)
        expect_named(ctx, unary[k].op(i), TSH_ERR_DTYPE, unary[k].name, ": x is i64");
    for (k = 0; k < COUNT(scalar); k++)
        expect_named(ctx, scalar[k].op(h, 2), TSH_ERR_DTYPE, scalar[k].name, ": x is i32");
    for (k = 0; k < COUNT(binary); k++)
        expect_named(ctx, binary[k].op(x, i), TSH_ERR_DTYPE, binary[k].name,
                     ": b is i64, not f32");
    for (k = 0; k < COUNT(compare); k++)
        expect_named(ctx, compare[k].op(x, i), TSH_ERR_DTYPE, compare[k].name, "f32 against i64");
    for (k = 0; k < COUNT(reduce); k++)
        expect_named(ctx, reduce[k].op(i, 0, 0), TSH_ERR_DTYPE, reduce[k].name, "i64");
    REFUSED(DTYPE, tsh_softmax(i, 0), "tsh_softmax", "i64");
    REFUSED(DTYPE, tsh_log_softmax(i, 0), "tsh_log_softmax", "i64");
    REFUSED(DTYPE, tsh_dropout(i, 0.5, NULL), "tsh_dropout", "i64");
    REFUSED(DTYPE, tsh_where(x, x, x), "tsh_where", "f32", "i32");
    REFUSED(DTYPE, tsh_where(h, x, i), "tsh_where", "i64");
    REFUSED(DTYPE, tsh_cast(x, TSH_F64), "tsh_cast", "f32");
    REFUSED(DTYPE, tsh_linear(x, i, NULL), "tsh_linear: weight is i64");
    REFUSED(DTYPE, tsh_layer_norm(x, i, NULL, 0), "tsh_layer_norm: weight is i64");
    REFUSED(DTYPE, tsh_embedding(x, x, NULL), "tsh_embedding", "f32");
    REFUSED(DTYPE, tsh_embedding(i, i, NULL), "tsh_embedding", "i64");
    REFUSED(DTYPE, tsh_tensor_new(ctx, (tsh_dtype)99, tsh_shape1(2), tsh_replicated()),
            "tsh_tensor_new", "99");
    REFUSED(ARGUMENT,
            tsh_requires_grad(tsh_tensor_new(ctx, TSH_I64, tsh_shape1(2), tsh_replicated()), 1),
            "tsh_requires_grad", "f32");
    REFUSED(ARGUMENT, tsh_requires_grad(x, 1), "tsh_requires_grad", "tsh_keep");
    tsh_close(ctx);
}

static void test_null_and_others(void **state) {
    tsh_ctx *ctx = open_ctx(), *other = open_ctx();
    tsh_tensor *x = tsh_ones(ctx, tsh_shape2(2, 2)), *far = tsh_ones(other, tsh_shape2(2, 2)),
               *parts[2];
    int k;
    (void)state;
    for (k = 0; k < COUNT(binary); k++) {
        expect_named(ctx, binary[k].op(x, NULL), TSH_ERR_ARGUMENT, binary[k].name,
                     ": b is NULL");
        expect_named(ctx, binary[k].op(NULL, x), TSH_ERR_ARGUMENT, binary[k].name,
                     ": a is NULL");
        expect_named(ctx, binary[k].op(x, far), TSH_ERR_ARGUMENT, binary[k].name,
                     ": b belongs to another ctx");
    }
    for (k = 0; k < COUNT(compare); k++)
        expect_named(ctx, compare[k].op(x, NULL), TSH_ERR_ARGUMENT, compare[k].name,
                     ": b is NULL");
    REFUSED(ARGUMENT, tsh_where(NULL, x, x), "tsh_where: cond is NULL");
    REFUSED(ARGUMENT, tsh_where(x, x, NULL), "tsh_where: no is NULL");
    REFUSED(ARGUMENT, tsh_linear(x, NULL, NULL), "tsh_linear: weight is NULL");
    REFUSED(ARGUMENT, tsh_embedding(NULL, x, NULL), "tsh_embedding: ids is NULL");
    REFUSED(ARGUMENT, tsh_layer_norm(x, far, NULL, 0), "tsh_layer_norm: weight belongs to another");
    REFUSED(ARGUMENT, tsh_layer_norm(x, NULL, far, 0), "tsh_layer_norm: bias belongs to another");
    REFUSED(ARGUMENT, tsh_rms_norm(x, far, 0), "tsh_rms_norm: weight belongs to another");
    REFUSED(ARGUMENT, tsh_attention(x, x, NULL, NULL), "tsh_attention: v is NULL");
    REFUSED(ARGUMENT, tsh_cross_entropy(x, NULL, NULL), "tsh_cross_entropy: target is NULL");
    parts[0] = x;
    parts[1] = NULL;
    REFUSED(ARGUMENT, tsh_concat(parts, 2, 0), "tsh_concat: parts[1] is NULL");
    REFUSED(ARGUMENT, tsh_custom_op(ctx, parts, 2, NULL, NULL), "tsh_custom_op");
    REFUSED(ARGUMENT, tsh_data(ctx, NULL), "tsh_data", "NULL");
    FAILS(ARGUMENT, tsh_backward(ctx, NULL), "tsh_backward", "NULL");
    FAILS(ARGUMENT, tsh_backward(ctx, far), "tsh_backward", "another ctx");
    REFUSED(ARGUMENT, tsh_data(ctx, far), "tsh_data", "another ctx");
    assert_true(isnan(tsh_item(ctx, NULL)));
    assert_int_equal(tsh_last_error(ctx)->code, TSH_ERR_ARGUMENT);
    assert_true(tsh_ok(other));
    tsh_close(other);
    tsh_close(ctx);
}

/* ------------------------------------------------------------------ shapes, dimensions, ranges */

static void test_shapes(void **state) {
    tsh_ctx *ctx = open_ctx();
    tsh_tensor *x = tsh_ones(ctx, tsh_shape2(2, 3)), *y = tsh_ones(ctx, tsh_shape1(4)),
               *s = tsh_ones(ctx, tsh_shape0()), *empty = tsh_ones(ctx, tsh_shape2(2, 0)),
               *parts[2];
    tsh_shape big = tsh_shape0();
    int k;
    (void)state;
    for (k = 0; k < 5; k++)
        expect_named(ctx, binary[k].op(x, y), TSH_ERR_SHAPE, binary[k].name, "(2, 3) R and (4) R");
    for (k = 0; k < COUNT(compare); k++)
        expect_named(ctx, compare[k].op(x, y), TSH_ERR_SHAPE, compare[k].name, "3 against 4");
    for (k = 0; k < COUNT(reduce); k++) {
        expect_named(ctx, reduce[k].op(x, 2, 0), TSH_ERR_SHAPE, reduce[k].name, "dimension 2");
        expect_named(ctx, reduce[k].op(x, -3, 0), TSH_ERR_SHAPE, reduce[k].name, "(2, 3)");
    }
    REFUSED(SHAPE, tsh_where(tsh_cast(x, TSH_I32), x, y), "tsh_where", "(4)");
    REFUSED(SHAPE, tsh_softmax(x, 2), "tsh_softmax", "(2, 3)");
    REFUSED(SHAPE, tsh_log_softmax(s, 1), "tsh_log_softmax", "dimension 1");
    REFUSED(SHAPE, tsh_max(empty, 1, 0), "tsh_max", "empty");
    REFUSED(SHAPE, tsh_argmax(empty, TSH_ALL, 0), "tsh_argmax", "empty");
    REFUSED(SHAPE, tsh_reshape(x, tsh_shape1(5)), "tsh_reshape", "(2, 3)", "6 elements");
    REFUSED(SHAPE, tsh_reshape(x, tsh_shape2(-1, -1)), "tsh_reshape");
    REFUSED(SHAPE, tsh_reshape(x, tsh_shape2(-1, 4)), "tsh_reshape");
    REFUSED(SHAPE, tsh_reshape(x, tsh_shape2(-2, -3)), "tsh_reshape");
    REFUSED(SHAPE, tsh_reshape(empty, tsh_shape2(-1, 0)), "tsh_reshape");
    big.ndim = TSH_MAX_DIMS + 1;
    REFUSED(SHAPE, tsh_reshape(x, big), "tsh_reshape");
    REFUSED(SHAPE, tsh_zeros(ctx, big), "tsh_full", "7");
    REFUSED(SHAPE, tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(3, -1), tsh_replicated()),
            "tsh_tensor_new", "-1");
    REFUSED(SHAPE, tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(INT64_MAX / 2, 64), tsh_replicated()),
            "tsh_tensor_new");
    REFUSED(SHAPE, tsh_transpose(x, 0, 2), "tsh_transpose", "0 and 2", "2");
    REFUSED(SHAPE, tsh_slice(x, 1, 2, 2), "tsh_slice", "2 elements from 2 of dimension 1",
            "(2, 3)");
    REFUSED(SHAPE, tsh_slice(x, 1, -1, 2), "tsh_slice");
    REFUSED(SHAPE, tsh_slice(x, 1, 0, -1), "tsh_slice");
    REFUSED(SHAPE, tsh_slice(x, 2, 0, 1), "tsh_slice");
    REFUSED(SHAPE, tsh_slice(x, 1, INT64_MAX, INT64_MAX), "tsh_slice");
    FAILS(SHAPE, tsh_split(x, 1, 2, parts), "tsh_split", "3", "2 equal parts");
    FAILS(SHAPE, tsh_split(x, 1, 0, parts), "tsh_split");
    FAILS(SHAPE, tsh_split(x, 2, 1, parts), "tsh_split", "no dimension 2");
    assert_null(parts[0]);
    assert_true(isnan(tsh_item(ctx, x)));
    REFUSED(SHAPE, NULL, "tsh_item", "(2, 3)");
    tsh_close(ctx);
}

static void test_permute_and_concat(void **state) {
    static const int twice[] = {0, 0}, past[] = {0, 2};
    tsh_ctx *ctx = open_ctx();
    tsh_tensor *x = tsh_ones(ctx, tsh_shape2(2, 3)), *many[31], *parts[2];
    int i;
    (void)state;
    REFUSED(SHAPE, tsh_permute(x, twice), "tsh_permute", "entry 1");
    REFUSED(SHAPE, tsh_permute(x, past), "tsh_permute", "entry 1");
    REFUSED(SHAPE, tsh_permute(x, NULL), "tsh_permute");
    for (i = 0; i < 31; i++) many[i] = x;
    REFUSED(ARGUMENT, tsh_concat(many, 31, 0), "tsh_concat", "31", "30");
    parts[0] = x;
    parts[1] = tsh_ones(ctx, tsh_shape2(3, 2));
    REFUSED(SHAPE, tsh_concat(parts, 2, 0), "tsh_concat", "(3, 2)", "(2, 3)", "dimension 0");
    parts[1] = tsh_ones(ctx, tsh_shape1(3));
    REFUSED(SHAPE, tsh_concat(parts, 2, 0), "tsh_concat", "(3)");
    parts[1] = tsh_cast(x, TSH_I64);
    REFUSED(DTYPE, tsh_concat(parts, 2, 0), "tsh_concat", "i64", "f32");
    REFUSED(SHAPE, tsh_concat(many, 2, 2), "tsh_concat", "2");
    tsh_close(ctx);
}

static void test_matrices(void **state) {
    tsh_ctx *ctx = open_ctx();
    tsh_tensor *x = tsh_ones(ctx, tsh_shape2(2, 3)), *v = tsh_ones(ctx, tsh_shape1(3)),
               *w = tsh_ones(ctx, tsh_shape2(5, 3)), *s = tsh_ones(ctx, tsh_shape0());
    const tsh_linear_desc narrow = {.in = 3, .out = 5};
    tsh_module *layer = tsh_add_linear(tsh_root(ctx), "narrow", &narrow);
    (void)state;
    REFUSED(SHAPE, tsh_matmul(x, w), "tsh_matmul", "(2, 3)", "(5, 3)");
    REFUSED(SHAPE, tsh_matmul(x, v), "tsh_matmul", "(3)");
    REFUSED(SHAPE,
            tsh_matmul(tsh_ones(ctx, tsh_shape3(2, 4, 3)), tsh_ones(ctx, tsh_shape3(3, 3, 4))),
            "tsh_matmul", "(2, 4, 3)", "(3, 3, 4)");
    REFUSED(SHAPE, tsh_linear(w, tsh_ones(ctx, tsh_shape2(4, 2)), NULL), "tsh_linear", "3 features",
            "takes 2");
    REFUSED(SHAPE, tsh_forward(layer, tsh_ones(ctx, tsh_shape2(4, 2))),
            "narrow: tsh_linear: input has 2 features, weight \"narrow.weight\" takes 3");
    REFUSED(SHAPE, tsh_linear(x, w, v), "tsh_linear", "5 features", "has 3");
    REFUSED(SHAPE, tsh_linear(x, v, NULL), "tsh_linear", "(3)");
    REFUSED(SHAPE, tsh_linear(s, w, NULL), "tsh_linear");
    REFUSED(SHAPE, tsh_linear(x, w, x), "tsh_linear");
    REFUSED(SHAPE, tsh_layer_norm(x, tsh_ones(ctx, tsh_shape1(2)), NULL, 0), "tsh_layer_norm",
            "(2, 3)", "(2)");
    REFUSED(SHAPE, tsh_layer_norm(x, v, tsh_ones(ctx, tsh_shape1(2)), 0), "tsh_layer_norm");
    REFUSED(SHAPE, tsh_layer_norm(s, v, NULL, 0), "tsh_layer_norm");
    REFUSED(SHAPE, tsh_rms_norm(x, tsh_ones(ctx, tsh_shape1(2)), 0), "tsh_rms_norm", "(2, 3)",
            "(2)");
    REFUSED(SHAPE, tsh_rms_norm(s, v, 0), "tsh_rms_norm");
    tsh_close(ctx);
}

static void test_rope(void **state) {
    const int64_t start = 0;
    tsh_ctx *ctx = open_ctx();
    tsh_tensor *x = tsh_ones(ctx, tsh_shape2(3, 6)), *odd = tsh_ones(ctx, tsh_shape2(3, 5));
    tsh_rope_desc desc;
    (void)state;
    REFUSED(SHAPE, tsh_rope(tsh_ones(ctx, tsh_shape1(4)), NULL), "tsh_rope", "(.., T, D)", "(4)");
    REFUSED(ARGUMENT, tsh_rope(odd, NULL), "tsh_rope", "5 of 5 features", "even");
    REFUSED(DTYPE, tsh_rope(tsh_cast(x, TSH_I32), NULL), "tsh_rope", "i32");
    memset(&desc, 0, sizeof desc);
    desc.dims = 8;
    REFUSED(ARGUMENT, tsh_rope(x, &desc), "tsh_rope", "8 of 6 features");
    desc.dims = -2;
    REFUSED(ARGUMENT, tsh_rope(x, &desc), "tsh_rope", "-2 of 6 features");
    desc.dims = 3;
    REFUSED(ARGUMENT, tsh_rope(x, &desc), "tsh_rope", "3 of 6 features");
    desc.dims = 2;
    desc.base = -1;
    REFUSED(ARGUMENT, tsh_rope(x, &desc), "tsh_rope", "base is -1");
    desc.base = (double)NAN;
    REFUSED(ARGUMENT, tsh_rope(x, &desc), "tsh_rope", "base is");
    desc.base = 0;
    desc.factor = -1;
    REFUSED(ARGUMENT, tsh_rope(x, &desc), "tsh_rope", "factor is -1");
    desc.factor = 0;
    desc.starts = &start;
    REFUSED(SHAPE, tsh_rope(x, &desc), "tsh_rope", "starts", "(B, .., T, D)", "(3, 6)");
    desc.starts = NULL;
    assert_non_null(tsh_rope(odd, &desc));
    tsh_close(ctx);
}

static void test_attention(void **state) {
    tsh_ctx *ctx = open_ctx();
    tsh_tensor *q = tsh_ones(ctx, tsh_shape4(1, 2, 3, 4)),
               *k = tsh_ones(ctx, tsh_shape4(1, 2, 5, 4)),
               *few = tsh_ones(ctx, tsh_shape4(1, 1, 5, 4)),
               *odd = tsh_ones(ctx, tsh_shape4(1, 3, 5, 4)),
               *flat = tsh_ones(ctx, tsh_shape2(3, 4));
    tsh_attention_desc desc;
    (void)state;
    REFUSED(SHAPE, tsh_attention(q, k, few, NULL), "tsh_attention", "(1, 2, 3, 4)", "(1, 1, 5, 4)");
    REFUSED(SHAPE, tsh_attention(q, odd, odd, NULL), "tsh_attention",
            "2 heads, no multiple of the 3", "(1, 2, 3, 4)", "(1, 3, 5, 4)");
    assert_non_null(tsh_attention(q, few, few, NULL));
    REFUSED(SHAPE, tsh_attention(flat, flat, flat, NULL), "tsh_attention", "(3, 4)");
    memset(&desc, 0, sizeof desc);
    desc.dropout = 1.5;
    REFUSED(ARGUMENT, tsh_attention(q, k, k, &desc), "tsh_attention", "1.5");
    desc.dropout = -0.5;
    REFUSED(ARGUMENT, tsh_attention(q, k, k, &desc), "tsh_attention", "-0.5");
    desc.dropout = (double)NAN;
    REFUSED(ARGUMENT, tsh_attention(q, k, k, &desc), "tsh_attention");
    desc.dropout = 0;
    desc.mask = tsh_ones(ctx, tsh_shape2(3, 4));
    REFUSED(SHAPE, tsh_attention(q, k, k, &desc), "tsh_attention", "(3, 4)", "(1, 2, 3, 5)");
    desc.mask = NULL;
    desc.cache_k = tsh_tensor_new(ctx, TSH_REAL, tsh_shape4(1, 2, 6, 4), tsh_replicated());
    REFUSED(STATE, tsh_attention(q, k, k, &desc), "tsh_attention", "both");
    desc.cache_v = tsh_tensor_new(ctx, TSH_REAL, tsh_shape4(1, 2, 6, 4), tsh_replicated());
    desc.past = 2;
    REFUSED(SHAPE, tsh_attention(q, k, k, &desc), "tsh_attention", "position 2", "(1, 2, 6, 4)");
    desc.past = -1;
    REFUSED(SHAPE, tsh_attention(q, k, k, &desc), "tsh_attention", "-1");
    tsh_close(ctx);
}

static void test_indices(void **state) {
    static const int64_t ids[] = {0, 4, 2}, low[] = {0, -1, 2};
    static const int32_t half[] = {0, 1, 2, -100};
    tsh_ctx *ctx = open_ctx();
    tsh_tensor *w = tsh_ones(ctx, tsh_shape2(4, 2)), *x = tsh_ones(ctx, tsh_shape2(3, 4)),
               *past = tsh_tensor_from(ctx, TSH_I64, tsh_shape1(3), tsh_replicated(), ids),
               *under = tsh_tensor_from(ctx, TSH_I64, tsh_shape1(3), tsh_replicated(), low),
               *four = tsh_tensor_from(ctx, TSH_I32, tsh_shape1(4), tsh_replicated(), half);
    tsh_cross_entropy_desc desc;
    (void)state;
    REFUSED(ARGUMENT, tsh_embedding(past, w, NULL), "tsh_embedding", "id 4 at position 1",
            "[0, 4)");
    REFUSED(ARGUMENT, tsh_embedding(under, w, NULL), "tsh_embedding", "id -1 at position 1");
    REFUSED(SHAPE, tsh_embedding(past, tsh_ones(ctx, tsh_shape1(3)), NULL), "tsh_embedding");
    REFUSED(ARGUMENT, tsh_cross_entropy(x, past, NULL), "tsh_cross_entropy", "target 4 at row 1",
            "[0, 4)");
    REFUSED(ARGUMENT, tsh_cross_entropy(x, under, NULL), "tsh_cross_entropy", "target -1");
    REFUSED(SHAPE, tsh_cross_entropy(x, four, NULL), "tsh_cross_entropy", "(3, 4)", "(4)");
    REFUSED(SHAPE, tsh_cross_entropy(x, tsh_cast(past, TSH_REAL), NULL), "tsh_cross_entropy",
            "f32");
    memset(&desc, 0, sizeof desc); /* all defaults, as NULL: -100 is ignored */
    x = tsh_ones(ctx, tsh_shape2(4, 4));
    assert_non_null(tsh_cross_entropy(x, four, NULL));
    assert_non_null(tsh_cross_entropy(x, four, &desc));
    desc.ignore = 1; /* another index: -100 is a class like others */
    desc.ignore_index = 2;
    REFUSED(ARGUMENT, tsh_cross_entropy(x, four, &desc), "tsh_cross_entropy", "target -100",
            "row 3");
    desc.reduction = (tsh_reduction)7;
    desc.ignore_index = -100;
    REFUSED(ARGUMENT, tsh_cross_entropy(x, four, &desc), "tsh_cross_entropy", "7");
    tsh_close(ctx);
}

static void test_arguments(void **state) {
    static const double p[] = {-0.1, 1.5, (double)NAN};
    tsh_ctx *ctx = open_ctx();
    tsh_tensor *x = tsh_ones(ctx, tsh_shape1(3)), *in[9];
    tsh_custom_op_desc desc;
    float out[4];
    int i;
    (void)state;
    for (i = 0; i < 3; i++)
        expect_named(ctx, tsh_dropout(x, p[i], NULL), TSH_ERR_ARGUMENT, "tsh_dropout", "[0, 1]");
    REFUSED(ARGUMENT, tsh_tensor_from(ctx, TSH_REAL, tsh_shape1(2), tsh_replicated(), NULL),
            "tsh_tensor_from", "NULL");
    REFUSED(ARGUMENT, tsh_arange(ctx, TSH_REAL, 0, 3, 0), "tsh_arange");
    REFUSED(ARGUMENT, tsh_arange(ctx, TSH_REAL, 0, 3, -1), "tsh_arange", "from 0 to 3 by -1");
    REFUSED(ARGUMENT, tsh_arange(ctx, TSH_REAL, 0, 3, (double)NAN), "tsh_arange");
    FAILS(ARGUMENT, tsh_read(ctx, x, TSH_LOCAL, out, 16), "tsh_read", "16 bytes", "12");
    FAILS(ARGUMENT, tsh_read(ctx, x, TSH_LOCAL, NULL, 12), "tsh_read");
    FAILS(ARGUMENT, tsh_read(ctx, NULL, TSH_LOCAL, out, 12), "tsh_read", "NULL");
    FAILS(ARGUMENT, tsh_write(ctx, x, TSH_LOCAL, out, 12), "tsh_write", "tsh_keep");
    for (i = 0; i < 9; i++) in[i] = x;
    memset(&desc, 0, sizeof desc);
    desc.name = "mine";
    REFUSED(ARGUMENT, tsh_custom_op(ctx, in, 1, NULL, &desc), "tsh_custom_op"); /* no forward */
    FAILS(SHAPE, tsh_backward(ctx, x), "tsh_backward", "(3)");
    FAILS(SHAPE, tsh_backward(ctx, tsh_cast(tsh_sum(x, 0, 0), TSH_I64)), "tsh_backward", "i64");
    FAILS(STATE, tsh_backward(ctx, tsh_sum(x, 0, 0)), "tsh_backward", "requires a gradient");
    tsh_close(ctx);
}

static void copy_forward(tsh_tensor *const *in, int n, void *const *out, void *user) {
    (void)user;
    (void)n;
    (void)tsh_read(tsh_ctx_of(in[0]), in[0], TSH_LOCAL, out[0],
                   (size_t)tsh_numel(in[0]) * sizeof(tsh_real));
}

/* A custom op takes 1 to 8 inputs, and may fail by itself. */
static void failing_forward(tsh_tensor *const *in, int n, void *const *out, void *user) {
    copy_forward(in, n, out, user);
    (void)tsh_fail(tsh_ctx_of(in[0]), TSH_ERR_ARGUMENT, "mine: %d inputs are too many", n);
}

static void test_custom(void **state) {
    tsh_ctx *ctx = open_ctx();
    tsh_tensor *x = tsh_ones(ctx, tsh_shape1(3)), *in[9];
    tsh_custom_op_desc desc;
    int i;
    (void)state;
    for (i = 0; i < 9; i++) in[i] = x;
    memset(&desc, 0, sizeof desc);
    desc.name = "mine";
    desc.forward = copy_forward;
    desc.out[0].shape = tsh_shape1(3);
    assert_non_null(tsh_custom_op(ctx, in, 8, NULL, &desc));
    REFUSED(ARGUMENT, tsh_custom_op(ctx, in, 9, NULL, &desc), "tsh_custom_op", "9");
    REFUSED(ARGUMENT, tsh_custom_op(ctx, in, 0, NULL, &desc), "tsh_custom_op", "0");
    REFUSED(ARGUMENT, tsh_custom_op(ctx, NULL, 1, NULL, &desc), "tsh_custom_op");
    in[1] = NULL;
    REFUSED(ARGUMENT, tsh_custom_op(ctx, in, 2, NULL, &desc), "mine: in[1] is NULL");
    desc.out[0].shape = tsh_shape1(-2);
    REFUSED(SHAPE, tsh_custom_op(ctx, in, 1, NULL, &desc), "mine", "-2");
    desc.out[0].shape = tsh_shape1(3);
    desc.forward = failing_forward;
    REFUSED(ARGUMENT, tsh_custom_op(ctx, in, 1, NULL, &desc), "mine: 1 inputs are too many");
    tsh_close(ctx);
}

/* ------------------------------------------------------------------ the first error, NULL chains
 */

static void test_first_error(void **state) {
    tsh_ctx *ctx = open_ctx();
    tsh_tensor *x = tsh_requires_grad(
                   tsh_tensor_new(ctx, TSH_REAL, tsh_shape1(3), tsh_replicated()), 1),
               *y = tsh_ones(ctx, tsh_shape1(4)), *bad;
    (void)state;
    bad = tsh_add(x, y);
    assert_null(bad);
    assert_null(tsh_sum(x, 5, 0)); /* another mistake, and what is right: neither is looked at */
    assert_null(tsh_exp(x));
    assert_null(tsh_exp(tsh_mul(bad, x)));
    assert_null(tsh_zeros(ctx, tsh_shape1(2)));
    assert_null(tsh_tensor_new(ctx, TSH_REAL, tsh_shape1(2), tsh_replicated()));
    assert_null(tsh_grad(x));
    assert_int_equal(tsh_fail(ctx, TSH_ERR_IO, "later"), TSH_ERR_IO);
    assert_int_equal(tsh_backward(ctx, tsh_sum(bad, TSH_ALL, 0)), TSH_ERR_SHAPE);
    assert_int_equal(tsh_step_end(ctx), TSH_ERR_SHAPE);
    assert_false(tsh_ok(ctx));
    REFUSED(SHAPE, bad, "tsh_add", "(3)", "(4)");
    /* after clearing all is as before */
    assert_non_null(tsh_exp(x));
    assert_int_equal(tsh_backward(ctx, tsh_sum(tsh_exp(x), 0, 0)), TSH_OK);
    assert_true(((const tsh_real *)tsh_data(ctx, tsh_grad(x)))[2] == 1);
    (void)tsh_fail(ctx, TSH_ERR_IO, "disk %d is %s", 3, "full");
    REFUSED(IO, NULL, "disk 3 is full");
    tsh_close(ctx);
}

/* Every op takes NULL, which is what a failed op gave, and says nothing. */
static void test_null_chains(void **state) {
    tsh_tensor *null = NULL, *parts[2] = {NULL, NULL};
    tsh_ctx *ctx = open_ctx();
    int k;
    (void)state;
    for (k = 0; k < COUNT(unary); k++) assert_null(unary[k].op(null));
    for (k = 0; k < COUNT(scalar); k++) assert_null(scalar[k].op(null, 2));
    for (k = 0; k < COUNT(binary); k++) assert_null(binary[k].op(null, null));
    for (k = 0; k < COUNT(compare); k++) assert_null(compare[k].op(null, null));
    for (k = 0; k < COUNT(reduce); k++) assert_null(reduce[k].op(null, 0, 0));
    assert_null(tsh_where(null, null, null));
    assert_null(tsh_cast(null, TSH_I32));
    assert_null(tsh_dropout(null, 0.5, NULL));
    assert_null(tsh_clone(null));
    assert_null(tsh_detach(null));
    assert_null(tsh_keep(null));
    assert_null(tsh_softmax(null, 0));
    assert_null(tsh_log_softmax(null, 0));
    assert_null(tsh_reshape(null, tsh_shape1(1)));
    assert_null(tsh_transpose(null, 0, 1));
    assert_null(tsh_permute(null, NULL));
    assert_null(tsh_slice(null, 0, 0, 1));
    assert_int_not_equal(tsh_split(null, 0, 2, parts), TSH_OK);
    assert_null(tsh_concat(parts, 2, 0));
    assert_null(tsh_redistribute(null, tsh_replicated()));
    assert_null(tsh_full_tensor(null));
    assert_null(tsh_linear(null, null, null));
    assert_null(tsh_embedding(null, null, NULL));
    assert_null(tsh_layer_norm(null, null, null, 0));
    assert_null(tsh_rms_norm(null, null, 0));
    assert_null(tsh_rms_norm_with(null, null, NULL));
    assert_null(tsh_rope(null, NULL));
    assert_null(tsh_attention(null, null, null, NULL));
    assert_null(tsh_cross_entropy(null, null, NULL));
    assert_null(tsh_requires_grad(null, 1));
    assert_null(tsh_retain_grad(null));
    assert_null(tsh_grad(null));
    tsh_zero_grad(null);
    tsh_tensor_free(null);
    assert_null(tsh_forward(NULL, null));
    assert_true(tsh_ok(ctx));
    assert_int_equal(tsh_last_error(ctx)->code, TSH_OK);
    tsh_close(ctx);
    /* and without any ctx */
    assert_false(tsh_ok(NULL));
    assert_int_not_equal(tsh_last_error(NULL)->code, TSH_OK);
    tsh_clear_error(NULL);
    assert_int_not_equal(tsh_backward(NULL, NULL), TSH_OK);
    assert_int_not_equal(tsh_step_end(NULL), TSH_OK);
    tsh_close(NULL);
}

/* ------------------------------------------------------------------ values that were given back */

/* Nothing reads t; the sentence tells how to keep it. */
static void expect_stale(tsh_ctx *ctx, tsh_tensor *t) {
    tsh_real out[4];
    REFUSED(STALE, tsh_exp(t), "tsh_exp: the values of x were", "tsh_retain_grad");
    REFUSED(STALE, tsh_add(tsh_ones(ctx, tsh_shape0()), t), "tsh_add: the values of b were");
    REFUSED(STALE, tsh_reshape(t, tsh_shape1(-1)), "tsh_reshape");
    REFUSED(STALE, tsh_slice(t, 0, 0, 1), "tsh_slice");
    REFUSED(STALE, tsh_detach(t), "tsh_detach");
    REFUSED(STALE, tsh_keep(t), "tsh_keep");
    REFUSED(STALE, tsh_data(ctx, t), "tsh_data");
    FAILS(STALE, tsh_read(ctx, t, TSH_LOCAL, out, 3 * sizeof *out), "tsh_read");
    FAILS(STALE, tsh_backward(ctx, tsh_sum(t, TSH_ALL, 0)), "tsh_sum");
    assert_int_equal(tsh_hash(ctx, t), 0);
    REFUSED(STALE, NULL, "tsh_hash");
    assert_int_equal(tsh_size(t, 0), 3); /* what it was is still known */
}

static void test_stale(void **state) {
    tsh_ctx *ctx = open_ctx();
    tsh_tensor *x = tsh_requires_grad(
                   tsh_tensor_new(ctx, TSH_REAL, tsh_shape1(3), tsh_replicated()), 1),
               *y, *view, *kept, *owned, *loss, *idle;
    (void)state;
    y = tsh_exp(x);
    view = tsh_slice(y, 0, 0, 3);
    kept = tsh_retain_grad(tsh_scale(y, 2));
    idle = tsh_ones(ctx, tsh_shape1(3));
    owned = tsh_keep(y);
    loss = tsh_sum(kept, 0, 0);
    assert_int_equal(tsh_backward(ctx, loss), TSH_OK);
    expect_stale(ctx, y);
    expect_stale(ctx, view);
    expect_stale(ctx, idle);
    assert_true(tsh_item(ctx, loss) == 6); /* the loss, what was retained, and owned tensors stay */
    assert_true(((const tsh_real *)tsh_data(ctx, kept))[1] == 2);
    assert_true(((const tsh_real *)tsh_data(ctx, owned))[1] == 1);
    assert_true(((const tsh_real *)tsh_data(ctx, x))[1] == 0);
    assert_true(((const tsh_real *)tsh_data(ctx, tsh_grad(x)))[1] == 2);
    assert_int_equal(tsh_step_end(ctx), TSH_OK);
    expect_stale(ctx, kept);
    assert_true(isnan(tsh_item(ctx, loss)));
    REFUSED(STALE, NULL, "tsh_item");
    assert_true(((const tsh_real *)tsh_data(ctx, owned))[1] == 1);
    tsh_tensor_free(owned);
    expect_stale(ctx, owned);
    tsh_close(ctx);
}

static void test_stale_scope(void **state) {
    tsh_ctx *ctx = open_ctx();
    tsh_tensor *x = tsh_tensor_new(ctx, TSH_REAL, tsh_shape1(3), tsh_replicated()), *before, *outer,
               *inner;
    (void)state;
    before = tsh_exp(x);
    tsh_scope_begin(ctx);
    outer = tsh_exp(x);
    tsh_scope_begin(ctx);
    inner = tsh_add(outer, outer);
    assert_true(((const tsh_real *)tsh_data(ctx, inner))[2] == 2);
    tsh_scope_end(ctx);
    expect_stale(ctx, inner);
    assert_true(((const tsh_real *)tsh_data(ctx, outer))[2] == 1);
    tsh_scope_end(ctx);
    expect_stale(ctx, outer);
    assert_true(((const tsh_real *)tsh_data(ctx, before))[2] == 1);
    tsh_scope_end(ctx); /* one too many does nothing */
    assert_true(tsh_ok(ctx));
    /* an op that is on the tape must not lose its values */
    (void)tsh_requires_grad(x, 1);
    tsh_scope_begin(ctx);
    outer = tsh_exp(x);
    tsh_scope_end(ctx);
    REFUSED(STATE, NULL, "tsh_scope_end", "tsh_exp", "tsh_no_grad_begin");
    assert_int_equal(tsh_backward(ctx, tsh_sum(outer, 0, 0)), TSH_OK);
    tsh_no_grad_begin(ctx);
    tsh_scope_begin(ctx);
    outer = tsh_exp(x);
    tsh_scope_end(ctx);
    tsh_no_grad_end(ctx);
    expect_stale(ctx, outer);
    tsh_close(ctx);
}

/* The tape is consumed: a second backward of the same loss has nothing to go through. */
static void test_backward_twice(void **state) {
    tsh_ctx *ctx = open_ctx();
    tsh_tensor *x = tsh_requires_grad(
                   tsh_tensor_new(ctx, TSH_REAL, tsh_shape1(3), tsh_replicated()), 1),
               *loss;
    (void)state;
    loss = tsh_sum(x, 0, 0);
    assert_int_equal(tsh_backward(ctx, loss), TSH_OK);
    FAILS(STATE, tsh_backward(ctx, loss), "tsh_backward");
    (void)tsh_requires_grad(x, 0);
    FAILS(STATE, tsh_backward(ctx, tsh_sum(x, 0, 0)), "tsh_backward", "requires a gradient");
    tsh_close(ctx);
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_dtypes),         cmocka_unit_test(test_null_and_others),
        cmocka_unit_test(test_shapes),         cmocka_unit_test(test_permute_and_concat),
        cmocka_unit_test(test_matrices),       cmocka_unit_test(test_rope),
        cmocka_unit_test(test_attention),      cmocka_unit_test(test_indices),
        cmocka_unit_test(test_arguments),      cmocka_unit_test(test_custom),
        cmocka_unit_test(test_first_error),    cmocka_unit_test(test_null_chains),
        cmocka_unit_test(test_stale),          cmocka_unit_test(test_stale_scope),
        cmocka_unit_test(test_backward_twice),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
