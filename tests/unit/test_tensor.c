/* Handles and lifetimes, shapes, views, values in and out, the step pool, huge pages. */
/* build: double */
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../support/unit.h"
#include "../support/skip.h"

/* -------------------------------------------------------------------- shapes */

static void expect_shape(tsh_shape shape, int ndim, int64_t a, int64_t b, int64_t c, int64_t d) {
    assert_int_equal(shape.ndim, ndim);
    assert_int_equal(shape.dim[0], a);
    assert_int_equal(shape.dim[1], b);
    assert_int_equal(shape.dim[2], c);
    assert_int_equal(shape.dim[3], d);
}

static void shapes_are_made(void **state) {
    (void)state;
    expect_shape(tsh_shape0(), 0, 0, 0, 0, 0);
    expect_shape(tsh_shape1(2), 1, 2, 0, 0, 0);
    expect_shape(tsh_shape2(2, 3), 2, 2, 3, 0, 0);
    expect_shape(tsh_shape3(2, 3, 4), 3, 2, 3, 4, 0);
    expect_shape(tsh_shape4(2, 3, 4, 5), 4, 2, 3, 4, 5);
}

static void a_tensor_tells_what_it_is(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_layout layout = tsh_sharded(1);
    tsh_tensor *t = tsh_tensor_new(ctx, TSH_I64, tsh_shape3(2, 3, 4), layout);
    (void)state;
    assert_ptr_equal(tsh_ctx_of(t), ctx);
    assert_int_equal(tsh_dtype_of(t), TSH_I64);
    assert_int_equal(tsh_ndim(t), 3);
    expect_shape(tsh_shape_of(t), 3, 2, 3, 4, 0);
    assert_int_equal(tsh_numel(t), 24);
    assert_int_equal(tsh_local_numel(t), 24);
    assert_int_equal(tsh_layout_of(t).kind, TSH_SHARDED);
    assert_int_equal(tsh_layout_of(t).dim, 1);
    unit_close(ctx);
}

static void dimensions_may_be_negative(void **state) {
    static const int64_t dims[] = {2, 3, 4}, strides[] = {12, 4, 1};
    tsh_ctx *ctx = unit_open(NULL);
    tsh_tensor *t = tsh_zeros(ctx, tsh_shape3(2, 3, 4));
    int d;
    (void)state;
    for (d = 0; d < 3; d++) {
        assert_int_equal(tsh_size(t, d), dims[d]);
        assert_int_equal(tsh_size(t, d - 3), dims[d]);
        assert_int_equal(tsh_local_size(t, d - 3), dims[d]);
        assert_int_equal(tsh_stride(t, d), strides[d]);
        assert_int_equal(tsh_stride(t, d - 3), strides[d]);
    }
    for (d = -4; d <= 3; d += 7) {
        assert_int_equal(tsh_size(t, d), 0);
        assert_int_equal(tsh_local_size(t, d), 0);
        assert_int_equal(tsh_stride(t, d), 0);
    }
    unit_close(ctx);
}

static void nothing_has_no_shape(void **state) {
    (void)state;
    assert_null(tsh_ctx_of(NULL));
    assert_int_equal(tsh_ndim(NULL), 0);
    assert_int_equal(tsh_size(NULL, 0), 0);
    assert_int_equal(tsh_local_size(NULL, 0), 0);
    assert_int_equal(tsh_stride(NULL, 0), 0);
    assert_int_equal(tsh_numel(NULL), 0);
    assert_int_equal(tsh_local_numel(NULL), 0);
    expect_shape(tsh_shape_of(NULL), 0, 0, 0, 0, 0);
    assert_null(tsh_keep(NULL));
    assert_null(tsh_clone(NULL));
    assert_null(tsh_reshape(NULL, tsh_shape0()));
    tsh_tensor_free(NULL);
    tsh_zero_grad(NULL);
}

static void shapes_that_cannot_be_are_refused(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_shape shape = tsh_shape1(-1);
    (void)state;
    assert_null(tsh_zeros(ctx, shape));
    EXPECT(TSH_ERR_SHAPE, "dimension 0 is -1");
    assert_null(tsh_tensor_new(ctx, TSH_REAL, tsh_shape3(INT64_MAX / 2, 4, 4), tsh_replicated()));
    EXPECT(TSH_ERR_SHAPE, "tsh_tensor_new: dimension 0 is 4611686018427387903");
    assert_null(
        tsh_tensor_new(ctx, TSH_F64, tsh_shape3(1 << 30, 1 << 30, 1 << 30), tsh_replicated()));
    EXPECT(TSH_ERR_SHAPE, "tsh_tensor_new: dimension ");
    shape.ndim = TSH_MAX_DIMS + 1;
    assert_null(tsh_zeros(ctx, shape));
    EXPECT(TSH_ERR_SHAPE, "7 dimensions; at most 6");
    shape.ndim = -1;
    assert_null(tsh_zeros(ctx, shape));
    EXPECT(TSH_ERR_SHAPE, "-1 dimensions");
    unit_close(ctx);
}

static void empty_tensors_and_scalars_exist(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_tensor *none = tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(3, 0), tsh_replicated());
    (void)state;
    assert_int_equal(tsh_numel(none), 0);
    assert_int_equal(tsh_stride(none, 0), 1); /* a size of 0 counts as 1 */
    assert_null(tsh_data(ctx, none));
    EXPECT_TEXT(none, "(3, 0) R:");
    EXPECT_TEXT(tsh_neg(none), "(3, 0) R:");
    assert_int_equal(tsh_read(ctx, none, TSH_GLOBAL, NULL, 0), TSH_OK);
    assert_int_equal(tsh_numel(tsh_ones(ctx, tsh_shape0())), 1);
    EXPECT_TEXT(tsh_ones(ctx, tsh_shape0()), "() R: 1");
    unit_close(ctx);
}

/* -------------------------------------------------------------------- making */

static void new_is_zeros_and_from_copies(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    int32_t ids[] = {3, 1, 2};
    tsh_tensor *t = tsh_tensor_from(ctx, TSH_I32, tsh_shape1(3), tsh_replicated(), ids);
    (void)state;
    EXPECT_TEXT(tsh_tensor_new(ctx, TSH_I64, tsh_shape2(2, 2), tsh_replicated()),
                "(2, 2) R: 0 0 / 0 0");
    ids[0] = 9;
    EXPECT_TEXT(t, "(3) R: 3 1 2");
    assert_null(tsh_tensor_from(ctx, TSH_I32, tsh_shape1(3), tsh_replicated(), NULL));
    EXPECT(TSH_ERR_ARGUMENT, "tsh_tensor_from: data is NULL");
    assert_non_null(tsh_tensor_from(ctx, TSH_I32, tsh_shape1(0), tsh_replicated(), NULL));
    unit_close(ctx);
}

static void freed_tensors_give_their_memory_back(void **state) {
    unit_memory memory;
    tsh_ctx *ctx = unit_open_memory(&memory);
    tsh_tensor *t = tsh_tensor_new(ctx, TSH_REAL, tsh_shape1(1000), tsh_replicated()), *step;
    int64_t held = memory.bytes;
    (void)state;
    tsh_tensor_free(t);
    assert_true(memory.bytes <= held - 1000 * (int64_t)sizeof(tsh_real));
    tsh_tensor_free(t); /* twice is fine */
    assert_null(tsh_neg(t));
    EXPECT(TSH_ERR_STALE, "tsh_neg: the values of x were given back");
    step = tsh_ones(ctx, tsh_shape1(3));
    tsh_tensor_free(step); /* a step tensor lives until the step ends */
    EXPECT_TEXT(step, "(3) R: 1 1 1");
    assert_null(tsh_tensor_from(ctx, TSH_I32, tsh_shape1(1000), tsh_replicated(), NULL));
    EXPECT(TSH_ERR_ARGUMENT, "data is NULL");
    assert_int_equal(tsh_mem_stats(ctx).now[TSH_MEM_TENSORS], 0); /* nor is a failed one kept */
    unit_close(ctx);
}

static void step_tensors_are_filled(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    (void)state;
    EXPECT_TEXT(tsh_zeros(ctx, tsh_shape2(2, 3)), "(2, 3) R: 0 0 0 / 0 0 0");
    EXPECT_TEXT(tsh_ones(ctx, tsh_shape1(2)), "(2) R: 1 1");
    EXPECT_TEXT(tsh_full(ctx, tsh_shape1(2), -2.5), "(2) R: -2.5 -2.5");
    assert_int_equal(tsh_dtype_of(tsh_randn(ctx, tsh_shape1(2))), TSH_REAL);
    unit_close(ctx);
}

static void arange_ends_below_stop(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    (void)state;
    EXPECT_TEXT(tsh_arange(ctx, TSH_REAL, 0, 2, 0.5), "(4) R: 0 0.5 1 1.5");
    EXPECT_TEXT(tsh_arange(ctx, TSH_I64, 3, 8, 2), "(3) R: 3 5 7");
    EXPECT_TEXT(tsh_arange(ctx, TSH_I32, 2, -1, -1), "(3) R: 2 1 0");
    EXPECT_TEXT(tsh_arange(ctx, TSH_I32, 2, 2, 1), "(0) R:");
    assert_int_equal(tsh_dtype_of(tsh_arange(ctx, TSH_I64, 0, 1, 1)), TSH_I64);
    assert_null(tsh_arange(ctx, TSH_I32, 0, 1, 0));
    EXPECT(TSH_ERR_ARGUMENT, "tsh_arange: from 0 to 1 by 0 never ends");
    assert_null(tsh_arange(ctx, TSH_I32, 0, 1, -1));
    EXPECT(TSH_ERR_ARGUMENT, "from 0 to 1 by -1");
    assert_null(tsh_arange(ctx, TSH_REAL, 0, (double)INFINITY, 1));
    EXPECT(TSH_ERR_ARGUMENT, "never ends");
    unit_close(ctx);
}

static void keep_copies_a_step_tensor(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_tensor *x = tsh_arange(ctx, TSH_REAL, 0, 6, 1);
    tsh_tensor *turned = tsh_transpose(tsh_reshape(x, tsh_shape2(2, 3)), 0, 1);
    tsh_tensor *kept = tsh_keep(turned);
    (void)state;
    assert_int_equal(tsh_step_end(ctx), TSH_OK);
    EXPECT_TEXT(kept, "(3, 2) R: 0 3 / 1 4 / 2 5");
    assert_int_equal(tsh_stride(kept, 0), 2); /* dense */
    assert_null(tsh_keep(x));
    EXPECT(TSH_ERR_STALE, "tsh_keep");
    assert_ptr_equal(tsh_requires_grad(kept, 1), kept); /* owned */
    unit_close(ctx);
}

/* --------------------------------------------------------------------- views */

static void views_share_memory_and_cost_none(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_tensor *x = tsh_arange(ctx, TSH_REAL, 0, 24, 1), *parts[3];
    size_t live = tsh_mem_stats(ctx).step_live;
    uint64_t calls = tsh_mem_stats(ctx).calls;
    tsh_tensor *cube = tsh_reshape(x, tsh_shape3(2, 3, 4));
    tsh_tensor *turned = tsh_permute(cube, (const int[]){2, 0, -2});
    tsh_tensor *cut = tsh_slice(turned, 0, 1, 2);
    tsh_real *data = (tsh_real *)tsh_data(ctx, x);
    (void)state;
    assert_int_equal(tsh_split(cube, 1, 3, parts), TSH_OK);
    assert_int_equal(tsh_mem_stats(ctx).step_live, live);
    assert_int_equal(tsh_mem_stats(ctx).calls, calls);
    assert_ptr_equal(tsh_data(ctx, cut), data + 1);
    assert_ptr_equal(tsh_data(ctx, parts[2]), data + 8);
    assert_int_equal(tsh_stride(turned, 0), 1);
    assert_int_equal(tsh_stride(turned, 1), 12);
    assert_int_equal(tsh_stride(turned, 2), 4);
    data[6] = -6; /* (0, 1, 2) of the cube: (2, 0, 1) turned, (1, 0, 1) of the cut */
    EXPECT_TEXT(cut, "(2, 2, 3) R: 1 5 9 / 13 17 21 / / 2 -6 10 / 14 18 22");
    EXPECT_TEXT(parts[1], "(2, 1, 4) R: 4 5 -6 7 / / 16 17 18 19");
    unit_close(ctx);
}

static void detach_shares_and_clone_copies(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_tensor *x = tsh_ones(ctx, tsh_shape1(3));
    tsh_tensor *shared = tsh_detach(x), *copy = tsh_clone(x);
    (void)state;
    *(tsh_real *)tsh_data(ctx, x) = 5;
    EXPECT_TEXT(shared, "(3) R: 5 1 1");
    EXPECT_TEXT(copy, "(3) R: 1 1 1");
    unit_close(ctx);
}

static void reshape_works_out_one_size(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_tensor *x = tsh_arange(ctx, TSH_I32, 0, 12, 1);
    (void)state;
    expect_shape(tsh_shape_of(tsh_reshape(x, tsh_shape2(3, -1))), 2, 3, 4, 0, 0);
    expect_shape(tsh_shape_of(tsh_reshape(x, tsh_shape3(-1, 2, 6))), 3, 1, 2, 6, 0);
    expect_shape(tsh_shape_of(tsh_reshape(tsh_ones(ctx, tsh_shape0()), tsh_shape1(-1))), 1, 1, 0, 0,
                 0);
    assert_null(tsh_reshape(x, tsh_shape2(-1, 5)));
    EXPECT(TSH_ERR_SHAPE, "tsh_reshape: (12) R has 12 elements");
    assert_null(tsh_reshape(x, tsh_shape2(-1, -1)));
    EXPECT(TSH_ERR_SHAPE, "tsh_reshape");
    assert_null(tsh_reshape(x, tsh_shape1(-2)));
    EXPECT(TSH_ERR_SHAPE, "tsh_reshape");
    assert_null(tsh_reshape(x, tsh_shape1(11)));
    EXPECT(TSH_ERR_SHAPE, "tsh_reshape");
    assert_null(tsh_reshape(x, tsh_shape2((int64_t)1 << 62, 1 << 20)));
    EXPECT(TSH_ERR_SHAPE, "tsh_reshape");
    assert_null(tsh_reshape(tsh_zeros(ctx, tsh_shape1(0)), tsh_shape2(0, -1))); /* any would do */
    EXPECT(TSH_ERR_SHAPE, "tsh_reshape");
    unit_close(ctx);
}

static void reshape_copies_where_strides_do_not_allow_a_view(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_tensor *x = tsh_reshape(tsh_arange(ctx, TSH_REAL, 0, 6, 1), tsh_shape2(2, 3));
    tsh_tensor *turned = tsh_transpose(x, 0, -1);
    tsh_tensor *flat = tsh_reshape(turned, tsh_shape1(6));
    (void)state;
    EXPECT_TEXT(flat, "(6) R: 0 3 1 4 2 5");
    *(tsh_real *)tsh_data(ctx, x) = 9;
    EXPECT_TEXT(turned, "(3, 2) R: 9 3 / 1 4 / 2 5");
    EXPECT_TEXT(flat, "(6) R: 0 3 1 4 2 5");
    /* a size of 1 anywhere needs no copy */
    EXPECT_TEXT(tsh_reshape(turned, tsh_shape4(1, 3, 1, 2)), "(1, 3, 1, 2) R: 9 3 / / 1 4 / / 2 5");
    assert_ptr_equal(tsh_data(ctx, tsh_reshape(turned, tsh_shape4(1, 3, 1, 2))), tsh_data(ctx, x));
    unit_close(ctx);
}

static void views_refuse_what_is_not_there(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_tensor *x = tsh_zeros(ctx, tsh_shape2(2, 3)), *parts[2] = {x, x};
    (void)state;
    assert_null(tsh_transpose(x, 0, 2));
    EXPECT(TSH_ERR_SHAPE, "tsh_transpose: no dimensions 0 and 2 among 2");
    assert_null(tsh_permute(x, (const int[]){0, 0}));
    EXPECT(TSH_ERR_SHAPE, "tsh_permute: entry 1");
    assert_null(tsh_permute(x, NULL));
    EXPECT(TSH_ERR_SHAPE, "tsh_permute");
    assert_null(tsh_slice(x, 1, 2, 2));
    EXPECT(TSH_ERR_SHAPE, "tsh_slice: 2 elements from 2 of dimension 1 are outside (2, 3) R");
    assert_null(tsh_slice(x, 1, -1, 2));
    EXPECT(TSH_ERR_SHAPE, "tsh_slice");
    assert_null(tsh_slice(x, 0, INT64_MAX, 1));
    EXPECT(TSH_ERR_SHAPE, "tsh_slice");
    assert_null(tsh_slice(x, 2, 0, 1));
    EXPECT(TSH_ERR_SHAPE, "tsh_slice");
    assert_int_equal(tsh_split(x, 1, 2, parts), TSH_ERR_SHAPE);
    EXPECT(TSH_ERR_SHAPE, "tsh_split: a dimension of 3 has no 2 equal parts");
    assert_null(parts[0]);
    assert_null(parts[1]);
    EXPECT_TEXT(tsh_slice(x, 1, 3, 0), "(2, 0) R:");
    unit_close(ctx);
}

static void concat_lays_parts_end_to_end(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_tensor *a = tsh_reshape(tsh_arange(ctx, TSH_I32, 0, 4, 1), tsh_shape2(2, 2)), *parts[3];
    (void)state;
    parts[0] = a;
    parts[1] = tsh_slice(a, 1, 1, 1);
    parts[2] = tsh_transpose(a, 0, 1);
    EXPECT_TEXT(tsh_concat(parts, 3, -1), "(2, 5) R: 0 1 1 0 2 / 2 3 3 1 3");
    parts[1] = parts[2];
    EXPECT_TEXT(tsh_concat(parts, 2, 0), "(4, 2) R: 0 1 / 2 3 / 0 2 / 1 3");
    parts[1] = tsh_slice(a, 1, 1, 1);
    assert_null(tsh_concat(parts, 2, 0));
    EXPECT(TSH_ERR_SHAPE, "tsh_concat: part 1, i32 (2, 1) R, does not go with i32 (2, 2) R");
    assert_null(tsh_concat(parts, 2, 2));
    EXPECT(TSH_ERR_SHAPE, "tsh_concat: no dimension 2 among 2");
    assert_null(tsh_concat(parts, 0, 0));
    parts[1] = tsh_zeros(ctx, tsh_shape2(2, 2));
    assert_null(tsh_concat(parts, 2, 0));
    EXPECT(TSH_ERR_DTYPE, "tsh_concat: part 1");
    unit_close(ctx);
}

/* ---------------------------------------------------------- values in and out */

static void values_are_read_and_written(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    int64_t in[6] = {1, 2, 3, 4, 5, 6}, out[6] = {0};
    tsh_tensor *t = tsh_tensor_new(ctx, TSH_I64, tsh_shape2(2, 3), tsh_replicated());
    tsh_tensor *turned = tsh_transpose(t, 0, 1);
    (void)state;
    assert_int_equal(tsh_write(ctx, t, TSH_LOCAL, in, sizeof in), TSH_OK);
    assert_int_equal(tsh_read(ctx, turned, TSH_GLOBAL, out, sizeof out), TSH_OK);
    assert_memory_equal(out, ((const int64_t[]){1, 4, 2, 5, 3, 6}), sizeof out);
    assert_int_equal(tsh_write(ctx, turned, TSH_GLOBAL, in, sizeof in), TSH_OK);
    EXPECT_TEXT(t, "(2, 3) R: 1 3 5 / 2 4 6");
    assert_int_equal(tsh_write(ctx, t, TSH_GLOBAL, in, 40), TSH_ERR_ARGUMENT);
    EXPECT(TSH_ERR_ARGUMENT, "tsh_write: 40 bytes were given, the tensor's global shape holds 48");
    assert_int_equal(tsh_read(ctx, t, TSH_LOCAL, out, 56), TSH_ERR_ARGUMENT);
    EXPECT(TSH_ERR_ARGUMENT, "tsh_read: 56 bytes were given, the tensor's local piece holds 48");
    assert_int_equal(tsh_read(ctx, t, TSH_LOCAL, NULL, 48), TSH_ERR_ARGUMENT);
    EXPECT(TSH_ERR_ARGUMENT, "tsh_read");
    assert_int_equal(tsh_read(ctx, NULL, TSH_LOCAL, out, 0), TSH_ERR_ARGUMENT);
    EXPECT(TSH_ERR_ARGUMENT, "tsh_read: the tensor is NULL");
    assert_int_equal(tsh_write(ctx, tsh_arange(ctx, TSH_I64, 0, 6, 1), TSH_LOCAL, in, 48),
                     TSH_ERR_ARGUMENT);
    EXPECT(TSH_ERR_ARGUMENT, "tsh_write: takes an owned tensor");
    unit_close(ctx);
}

static void item_takes_one_element(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    (void)state;
    EXPECT_NEAR(tsh_item(ctx, tsh_full(ctx, tsh_shape2(1, 1), 2.5)), 2.5, 0);
    EXPECT_NEAR(tsh_item(ctx, tsh_arange(ctx, TSH_I64, 7, 8, 1)), 7, 0);
    EXPECT_NEAR(tsh_item(ctx, tsh_slice(tsh_arange(ctx, TSH_I32, 0, 8, 1), 0, 5, 1)), 5, 0);
    assert_true(isnan(tsh_item(ctx, tsh_zeros(ctx, tsh_shape1(2)))));
    EXPECT(TSH_ERR_SHAPE, "tsh_item: takes one replicated element, not (2) R");
    assert_true(isnan(tsh_item(ctx, NULL)));
    EXPECT(TSH_ERR_ARGUMENT, "tsh_item: the tensor is NULL");
    assert_null(tsh_data(ctx, NULL));
    EXPECT(TSH_ERR_ARGUMENT, "tsh_data: the tensor is NULL");
    unit_close(ctx);
}

static void another_ctx_s_tensors_are_refused(void **state) {
    tsh_ctx *ctx = unit_open(NULL), *other = unit_open(NULL);
    tsh_tensor *x = tsh_ones(ctx, tsh_shape0()), *y = tsh_ones(other, tsh_shape0());
    tsh_real value = 0;
    (void)state;
    assert_null(tsh_add(x, y));
    EXPECT(TSH_ERR_ARGUMENT, "tsh_add: b belongs to another ctx");
    assert_null(tsh_data(ctx, y));
    EXPECT(TSH_ERR_ARGUMENT, "another ctx");
    assert_true(isnan(tsh_item(ctx, y)));
    EXPECT(TSH_ERR_ARGUMENT, "another ctx");
    assert_int_equal(tsh_read(ctx, y, TSH_LOCAL, &value, sizeof value), TSH_ERR_ARGUMENT);
    EXPECT(TSH_ERR_ARGUMENT, "another ctx");
    assert_int_equal(tsh_backward(ctx, y), TSH_ERR_ARGUMENT);
    EXPECT(TSH_ERR_ARGUMENT, "another ctx");
    assert_int_equal(tsh_hash(ctx, y), 0);
    EXPECT(TSH_ERR_ARGUMENT, "another ctx");
    unit_close(other);
    unit_close(ctx);
}

static void dtypes_are_checked(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_tensor *i32 = tsh_arange(ctx, TSH_I32, 0, 3, 1), *i64 = tsh_arange(ctx, TSH_I64, 0, 3, 1);
    tsh_tensor *x = tsh_ones(ctx, tsh_shape1(3));
    (void)state;
    assert_null(tsh_neg(i32));
    EXPECT(TSH_ERR_DTYPE, "tsh_neg: x is i32");
    assert_null(tsh_add(x, i64));
    EXPECT(TSH_ERR_DTYPE, "tsh_add: b is i64");
    assert_null(tsh_eq(i32, i64));
    EXPECT(TSH_ERR_DTYPE, "tsh_eq: i32 against i64");
    assert_null(tsh_where(x, x, x));
    EXPECT(TSH_ERR_DTYPE, "tsh_where: the condition is ");
    assert_null(tsh_cast(x, TSH_REAL == TSH_F32 ? TSH_F64 : (tsh_dtype)77));
    EXPECT(TSH_ERR_DTYPE, "tsh_cast: ");
    assert_null(tsh_requires_grad(tsh_keep(i32), 1));
    EXPECT(TSH_ERR_ARGUMENT, "tsh_requires_grad");
    assert_null(tsh_add(x, NULL));
    EXPECT(TSH_ERR_ARGUMENT, "tsh_add: b is NULL");
    assert_null(tsh_tensor_new(ctx, (tsh_dtype)77, tsh_shape1(1), tsh_replicated()));
    EXPECT(TSH_ERR_DTYPE, "tsh_tensor_new");
    unit_close(ctx);
}

static void text_is_cut_at_its_size(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_tensor *t = tsh_reshape(tsh_arange(ctx, TSH_I32, 1, 7, 1), tsh_shape2(2, 3));
    char text[64] = "before";
    (void)state;
    assert_ptr_equal(tsh_to_string(t, text, 0), text);
    assert_string_equal(text, "before");
    assert_string_equal(tsh_to_string(t, text, sizeof text), "i32 (2, 3) R: 1 2 3 / 4 5 6");
    assert_string_equal(tsh_to_string(t, text, 17), "i32 (2, 3) R: 1 ");
    assert_string_equal(tsh_to_string(t, text, 1), "");
    assert_string_equal(tsh_to_string(NULL, text, sizeof text), "");
    assert_string_equal(tsh_to_string(tsh_transpose(t, 0, 1), text, sizeof text),
                        "i32 (3, 2) R: 1 4 / 2 5 / 3 6");
    unit_close(ctx);
}

/* ------------------------------------------------------------------- sharded */

/* (5, 6): element (i, j) is 10 i + j. Rank r holds what tsh_shard_range says. */
static int reads_and_writes_sharded(tsh_ctx *ctx, void *user) {
    static const int dims[] = {0, 1, -1};
    int size = tsh_tp(ctx)->size, rank = tsh_tp(ctx)->rank, k, e;
    int32_t whole[30], back[30], piece[30];
    (void)user;
    for (e = 0; e < 30; e++) whole[e] = e / 6 * 10 + e % 6;
    for (k = 0; k < 3; k++) {
        tsh_layout layout = k == 2 ? tsh_shard_segments(-1, 3, 1) : tsh_sharded(dims[k]);
        tsh_tensor *t = tsh_tensor_new(ctx, TSH_I32, tsh_shape2(5, 6), layout), *from;
        tsh_range range[TSH_MAX_SEGMENTS];
        int64_t owned = tsh_shard_range(layout, k ? 6 : 5, size, rank, range), i, j;
        size_t bytes = (size_t)tsh_local_numel(t) * sizeof *piece;
        int s, n = 0;
        CHECK(tsh_local_size(t, dims[k]) == owned && tsh_size(t, dims[k]) == (k ? 6 : 5), "sizes");
        CHECK(tsh_write(ctx, t, TSH_GLOBAL, whole, sizeof whole) == TSH_OK, "write");
        CHECK(tsh_read(ctx, t, TSH_LOCAL, piece, bytes) == TSH_OK, "read");
        for (i = 0; i < (k ? 5 : owned); i++)
            for (s = 0; s < tsh_layout_of(t).segments; s++)
                for (j = 0; j < (k ? range[s].length : 6); j++, n++)
                    CHECK(piece[n] ==
                              (k ? 10 * i + range[s].start + j : 10 * (range[0].start + i) + j),
                          "element %d of the piece is %d", n, piece[n]);
        CHECK((size_t)n * sizeof *piece == bytes, "the piece has %d elements", n);
        CHECK((tsh_data(ctx, t) == NULL) == (n == 0), "data");
        for (i = 0; i < n; i++) piece[i]++;
        CHECK(tsh_write(ctx, t, TSH_LOCAL, piece, bytes) == TSH_OK, "write");
        CHECK(tsh_read(ctx, t, TSH_GLOBAL, back, sizeof back) == TSH_OK, "read");
        for (e = 0; e < 30; e++) CHECK(back[e] == whole[e] + 1, "element %d is %d", e, back[e]);
        from = tsh_tensor_from(ctx, TSH_I32, tsh_shape2(5, 6), layout, piece);
        CHECK(tsh_hash(ctx, from) == tsh_hash(ctx, t), "from takes this rank's piece");
        CHECK(tsh_read(ctx, tsh_transpose(t, 0, 1), TSH_GLOBAL, back, sizeof back) == TSH_OK, "");
        for (i = 0; i < 5; i++)
            for (j = 0; j < 6; j++)
                CHECK(back[j * 5 + i] == 10 * i + j + 1, "turned: (%d, %d)", (int)j, (int)i);
    }
    CHECK_OK();
    return 0;
}

/* [Q|K|V] split into its segments: views, each sharded as before. */
static int splits_segments(tsh_ctx *ctx, void *user) {
    tsh_layout layout = tsh_shard_segments(1, 3, 2);
    tsh_tensor *t = tsh_tensor_new(ctx, TSH_I32, tsh_shape2(2, 18), layout), *parts[3];
    int32_t whole[36], part[12];
    int e, k;
    (void)user;
    for (e = 0; e < 36; e++) whole[e] = e;
    CHECK(tsh_write(ctx, t, TSH_GLOBAL, whole, sizeof whole) == TSH_OK, "write");
    CHECK(tsh_split(t, -1, 3, parts) == TSH_OK, "split");
    for (k = 0; k < 3; k++) {
        CHECK(tsh_layout_of(parts[k]).segments == 1 && tsh_size(parts[k], 1) == 6, "part %d", k);
        CHECK(tsh_read(ctx, parts[k], TSH_GLOBAL, part, sizeof part) == TSH_OK, "read");
        for (e = 0; e < 12; e++)
            CHECK(part[e] == e / 6 * 18 + 6 * k + e - e / 6 * 6, "part %d, element %d", k, e);
    }
    CHECK(tsh_size(tsh_slice(t, 1, 6, 12), 1) == 12, "two segments");
    CHECK_OK();
    return 0;
}

static int cuts_no_segment(tsh_ctx *ctx, void *user) {
    tsh_layout layout = tsh_shard_segments(1, 3, 2);
    tsh_tensor *t = tsh_tensor_new(ctx, TSH_I32, tsh_shape2(2, 18), layout);
    (void)user;
    (void)tsh_barrier(tsh_world(ctx)); /* nobody fails before all ranks are open */
    CHECK(!tsh_slice(t, 1, 6, 8), "not at a boundary");
    CHECK(strstr(tsh_last_error(ctx)->message, "tsh_slice"), "the sentence");
    CHECK(tsh_last_error(ctx)->code == TSH_ERR_LAYOUT, "the code");
    return 0;
}

static int reads_and_writes_partial(tsh_ctx *ctx, void *user) {
    tsh_layout layout = tsh_partial();
    tsh_tensor *t = tsh_tensor_new(ctx, TSH_I32, tsh_shape1(2), layout);
    int32_t mine[2] = {1, 0}, sum[2];
    int size = tsh_tp(ctx)->size;
    (void)user;
    mine[1] = tsh_tp(ctx)->rank;
    CHECK(tsh_local_numel(t) == 2, "every rank holds a term of each");
    CHECK(tsh_write(ctx, t, TSH_LOCAL, mine, sizeof mine) == TSH_OK, "write");
    CHECK(tsh_read(ctx, t, TSH_GLOBAL, sum, sizeof sum) == TSH_OK, "read");
    CHECK(sum[0] == size && sum[1] == size * (size - 1) / 2, "%d %d", sum[0], sum[1]);
    CHECK(tsh_read(ctx, t, TSH_LOCAL, sum, sizeof sum) == TSH_OK && sum[1] == mine[1], "local");
    return 0;
}

/* No element at all, cut along either dimension, in and out of NULL. */
static int empties_are_read_and_written(tsh_ctx *ctx, void *user) {
    tsh_layout layouts[3];
    int k;
    (void)user;
    layouts[0] = tsh_sharded(0);
    layouts[1] = tsh_shard_segments(1, 3, 1);
    layouts[2] = tsh_partial();
    for (k = 0; k < 3; k++) {
        tsh_tensor *t = tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(0, 6), layouts[k]);
        CHECK(tsh_read(ctx, t, TSH_GLOBAL, NULL, 0) == TSH_OK, "read");
        CHECK(tsh_read(ctx, t, TSH_LOCAL, NULL, 0) == TSH_OK, "read");
        CHECK(k == 2 || tsh_write(ctx, t, TSH_GLOBAL, NULL, 0) == TSH_OK, "write");
        CHECK(tsh_numel(tsh_full_tensor(t)) == 0 && tsh_ok(ctx), "full");
        CHECK(tsh_transpose(t, 0, 1) && tsh_slice(t, 0, 0, 0), "views");
        CHECK(tsh_hash(ctx, t) == 0, "hash");
    }
    CHECK_OK();
    return 0;
}

static int write_refuses_partial(tsh_ctx *ctx, void *user) {
    tsh_layout layout = tsh_partial();
    tsh_tensor *t = tsh_tensor_new(ctx, TSH_I32, tsh_shape1(2), layout);
    int32_t in[2] = {1, 2};
    (void)user;
    (void)tsh_barrier(tsh_world(ctx));
    CHECK(tsh_write(ctx, t, TSH_GLOBAL, in, sizeof in) == TSH_ERR_LAYOUT, "not defined");
    CHECK(strstr(tsh_last_error(ctx)->message, "partial sum"), "the layout is told");
    return 0;
}

static int item_refuses_pieces(tsh_ctx *ctx, void *user) {
    tsh_layout layout = tsh_sharded(0);
    tsh_tensor *t = tsh_tensor_new(ctx, TSH_REAL, tsh_shape1(1), layout);
    (void)user;
    (void)tsh_barrier(tsh_world(ctx));
    CHECK(isnan(tsh_item(ctx, t)), "sharded");
    CHECK(strstr(tsh_last_error(ctx)->message, "(1) S(0)"), "the layout is told");
    return 0;
}

static void sharded_values_are_read_and_written(void **state) {
    int i;
    (void)state;
    for (i = 0; i < COUNT(ranks_degrees); i++) {
        ranks_run(ranks_degrees[i], reads_and_writes_sharded, NULL);
        ranks_run(ranks_degrees[i], splits_segments, NULL);
        ranks_run(ranks_degrees[i], cuts_no_segment, NULL);
        if (ranks_degrees[i] > 1) ranks_run(ranks_degrees[i], reads_and_writes_partial, NULL);
    }
    ranks_run(2, empties_are_read_and_written, NULL);
    ranks_run(2, item_refuses_pieces, NULL);
    ranks_run(2, write_refuses_partial, NULL);
}

/* ----------------------------------------------------------------- lifetimes */

static void a_step_tensor_is_stale_for_a_whole_step(void **state) {
    enum { MANY = 3000 };
    static tsh_tensor *old[MANY];
    tsh_ctx *ctx = unit_open(NULL);
    int i, step;
    (void)state;
    for (step = 0; step < 3; step++) {
        for (i = 0; i < MANY; i++) old[i] = tsh_zeros(ctx, tsh_shape0());
        assert_int_equal(tsh_step_end(ctx), TSH_OK);
        for (i = 0; i < MANY; i++) (void)tsh_zeros(ctx, tsh_shape0()); /* may reuse older handles */
        for (i = 0; i < MANY; i++) {
            assert_null(tsh_neg(old[i]));
            EXPECT(TSH_ERR_STALE, "tsh_step_end");
        }
    }
    assert_true(isnan(tsh_item(ctx, old[0])));
    EXPECT(TSH_ERR_STALE, "tsh_item");
    assert_null(tsh_data(ctx, old[0]));
    EXPECT(TSH_ERR_STALE, "tsh_data");
    unit_close(ctx);
}

/* Shapes may be compared as bytes: what a handle was before does not show. */
static void a_handle_used_again_has_its_own_shape(void **state) {
    enum { MANY = 3000 };
    const tsh_shape flat = tsh_shape1(3);
    tsh_ctx *ctx = unit_open(NULL);
    int i, step;
    (void)state;
    for (step = 0; step < 6; step++) {
        for (i = 0; i < MANY; i++) {
            const tsh_shape cube = tsh_shape3(2, 2, 2);
            tsh_tensor *t = step % 2 ? tsh_zeros(ctx, flat) : tsh_zeros(ctx, cube);
            const tsh_shape shape = tsh_shape_of(t);
            assert_memory_equal(shape.dim, step % 2 ? flat.dim : cube.dim, sizeof shape.dim);
        }
        assert_int_equal(tsh_step_end(ctx), TSH_OK);
    }
    unit_close(ctx);
}

static void a_view_keeps_the_values_of_a_freed_tensor(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_real values[4] = {1, 2, 3, 4};
    tsh_tensor *t = tsh_tensor_from(ctx, TSH_REAL, tsh_shape1(4), tsh_replicated(), values);
    tsh_tensor *view = tsh_slice(t, 0, 1, 2);
    (void)state;
    tsh_tensor_free(t);
    EXPECT_TEXT(view, "(2) R: 2 3");
    assert_int_equal(tsh_step_end(ctx), TSH_OK);
    assert_int_equal(tsh_mem_stats(ctx).now[TSH_MEM_TENSORS], 0);
    unit_close(ctx);
}

/* Its gradient goes nowhere, and nothing leaks. */
static void a_leaf_may_be_freed_before_backward(void **state) {
    unit_memory memory;
    tsh_ctx *ctx = unit_open_memory(&memory);
    int k;
    (void)state;
    for (k = 0; k < 3; k++) {
        tsh_tensor *w = tsh_requires_grad(
            tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(2, 3), tsh_replicated()), 1);
        tsh_tensor *y = k == 0   ? tsh_clone(w)
                        : k == 1 ? tsh_reshape(tsh_transpose(w, 0, 1), tsh_shape1(6))
                                 : tsh_mul(w, w);
        tsh_tensor_free(w);
        assert_int_equal(tsh_backward(ctx, tsh_sum(y, TSH_ALL, 0)), TSH_OK);
        assert_int_equal(tsh_mem_stats(ctx).now[TSH_MEM_GRADIENTS], 0);
        assert_int_equal(tsh_step_end(ctx), TSH_OK);
    }
    unit_close(ctx);
    assert_int_equal(memory.bytes, 0);
}

/* tsh_grad gives a step tensor: retained, it keeps its values when the next gradient is made. */
static void scopes_nest(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_tensor *a = tsh_ones(ctx, tsh_shape1(1)), *b, *c, *d, *owned;
    (void)state;
    tsh_scope_begin(ctx);
    b = tsh_neg(a);
    tsh_scope_begin(ctx);
    c = tsh_neg(b);
    owned = tsh_keep(c);
    tsh_scope_end(ctx);
    d = tsh_neg(b);
    assert_null(tsh_neg(c));
    EXPECT(TSH_ERR_STALE, "tsh_scope_end");
    EXPECT_TEXT(d, "(1) R: 1");
    tsh_scope_end(ctx);
    assert_null(tsh_neg(d));
    EXPECT(TSH_ERR_STALE, "tsh_neg");
    assert_null(tsh_neg(b));
    EXPECT(TSH_ERR_STALE, "tsh_neg");
    EXPECT_TEXT(a, "(1) R: 1");
    EXPECT_TEXT(owned, "(1) R: 1");
    tsh_scope_end(ctx); /* one too many does nothing */
    EXPECT_TEXT(a, "(1) R: 1");
    tsh_scope_begin(NULL);
    tsh_scope_end(NULL);
    unit_close(ctx);
}

static void a_scope_may_not_end_what_is_recorded(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_tensor *w = tsh_requires_grad(
        tsh_tensor_new(ctx, TSH_REAL, tsh_shape1(2), tsh_replicated()), 1);
    (void)state;
    tsh_scope_begin(ctx);
    (void)tsh_neg(w);
    tsh_scope_end(ctx);
    EXPECT(TSH_ERR_STATE, "tsh_scope_end: tsh_neg was recorded inside the scope");
    assert_int_equal(tsh_step_end(ctx), TSH_OK);
    tsh_scope_begin(ctx);
    tsh_no_grad_begin(ctx);
    (void)tsh_neg(w);
    tsh_no_grad_end(ctx);
    tsh_scope_end(ctx);
    unit_close(ctx);
}

/* Generation without gradients: a cache that is replaced in every step, one scope per step. */
static void a_loop_with_scopes_does_not_grow(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_linear_desc d = {.in = 16, .out = 16};
    tsh_module *layer = tsh_add_linear(tsh_root(ctx), "layer", &d);
    tsh_tensor *kept = tsh_keep(tsh_randn(ctx, tsh_shape2(4, 16)));
    tsh_mem warm = tsh_mem_stats(ctx);
    int i, k;
    (void)state;
    tsh_no_grad_begin(ctx);
    for (i = 0; i < 2000; i++) {
        tsh_tensor *y = kept;
        tsh_scope_begin(ctx);
        for (k = 0; k < 5; k++) y = tsh_tanh(tsh_forward(layer, y));
        y = tsh_keep(y);
        tsh_scope_end(ctx);
        tsh_tensor_free(kept);
        kept = y;
        if (i == 100) warm = tsh_mem_stats(ctx);
    }
    tsh_no_grad_end(ctx);
    assert_int_equal(tsh_mem_stats(ctx).total, warm.total);
    assert_int_equal(tsh_mem_stats(ctx).total_peak, warm.total_peak);
    assert_int_equal(tsh_mem_stats(ctx).step_live, warm.step_live);
    unit_close(ctx);
}

/* ----------------------------------------------------------------- step pool */

/* Tensors of random size live for random times in nested scopes: what is live at once is bounded,
 * so must be what the pool took. */
static void the_step_pool_is_reused_and_joined(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    uint64_t draw = 0;
    int depth = 0, i, k;
    size_t warm = 0, live;
    (void)state;
    for (i = 0; i < 4000; i++) {
        if (depth < 8 && tshi_rng_bits(1, 2, draw++) % 2) {
            tsh_scope_begin(ctx);
            for (depth++, k = 0; k < 4; k++)
                (void)tsh_zeros(ctx, tsh_shape1(1 + tshi_rng_bits(1, 2, draw++) % 5000));
        } else if (depth) {
            tsh_scope_end(ctx);
            depth--;
        }
        if (i == 1000) warm = tsh_mem_stats(ctx).now[TSH_MEM_STEP];
    }
    for (; depth; depth--) tsh_scope_end(ctx);
    /* at most 8 scopes of 4 tensors of 5000 numbers are live: the pool took twice that at most */
    live = 8 * 4 * 5000 * sizeof(tsh_real);
    assert_true(tsh_mem_stats(ctx).step_live_peak <= live + 32 * 128);
    assert_true(tsh_mem_stats(ctx).now[TSH_MEM_STEP] <= 2 * live);
    assert_true(tsh_mem_stats(ctx).now[TSH_MEM_STEP] <= 2 * warm);
    assert_int_equal(tsh_mem_stats(ctx).step_live, 0);
    unit_close(ctx);
}

/* Every byte of the pool is either in use or in one of the free lists, and no two free pieces
 * touch. */
static void check_pool(tsh_ctx *ctx) {
    tshi_page *page;
    size_t live = 0, free = 0, listed = 0;
    int c;
    for (c = 0; c < TSHI_SIZE_CLASSES; c++) {
        tshi_block *block = ctx->pool.free[c];
        assert_int_equal(ctx->pool.filled >> c & 1, block != NULL);
        if (block) assert_null(block->prev);
        for (; block; block = block->next) {
            assert_int_equal(block->refs, 0);
            assert_int_equal(tshi_mem_class(block->size), c);
            if (block->next) assert_ptr_equal(block->next->prev, block);
            listed += block->size + sizeof *block;
        }
    }
    for (page = ctx->pool.pages; page; page = page->next) {
        tshi_block *block = (tshi_block *)(void *)((char *)page + TSHI_POOL_OFFSET), *left = NULL;
        size_t bytes = TSHI_POOL_OFFSET;
        for (;; left = block, block = tshi_mem_right(block)) {
            assert_int_equal(block->before, left ? left->size : 0);
            if (left) assert_true(left->refs || block->refs);
            bytes += block->size + sizeof *block;
            *(block->refs ? &live : &free) += block->size + sizeof *block;
            if (block->last) break;
        }
        assert_true(bytes <= page->bytes && bytes + TSHI_ALIGN > page->bytes);
    }
    assert_int_equal(listed, free);
    assert_int_equal(live, tsh_mem_stats(ctx).step_live);
}

static void the_pool_s_books_are_right(void **state) {
    enum { SLOTS = 64 };
    tshi_block *slot[SLOTS] = {NULL};
    tsh_ctx *ctx = unit_open(NULL);
    uint64_t draw = 0;
    size_t b;
    int i, at;
    (void)state;
    assert_in_range(tshi_mem_class(SIZE_MAX), 0, TSHI_SIZE_CLASSES - 1);
    assert_int_equal(TSHI_POOL_OFFSET % TSHI_ALIGN, 0);
    for (i = 0; i < 20000; i++) {
        at = (int)(tshi_rng_bits(3, 4, draw++) % SLOTS);
        if (slot[at]) {
            const unsigned char *data = (const unsigned char *)tshi_mem_data(slot[at]);
            for (b = 0; b < slot[at]->size; b += 61) assert_int_equal(data[b], at);
            tshi_mem_release(ctx, slot[at]);
            slot[at] = NULL;
        } else {
            size_t bytes = tshi_rng_bits(3, 4, draw++) % (i % 50 ? 3000u : 400000u);
            slot[at] = tshi_mem_alloc(ctx, TSH_MEM_STEP, bytes);
            assert_true(slot[at]->size >= bytes &&
                        slot[at]->size < bytes + 64 + 2 * TSHI_ALIGN + 64);
            memset(tshi_mem_data(slot[at]), at, slot[at]->size);
        }
        if (i % 100 == 0) check_pool(ctx);
    }
    for (at = 0; at < SLOTS; at++) tshi_mem_release(ctx, slot[at]);
    check_pool(ctx);
    assert_int_equal(tsh_mem_stats(ctx).step_live, 0);
    /* all joined again: one free piece per chunk */
    unit_close(ctx);
}

/* Whole pages, one after another, never reused. */
typedef struct page_memory {
    char *next, *end;
} page_memory;

static void *take_pages(void *ptr, size_t old_size, size_t new_size, size_t align, void *user) {
    page_memory *memory = (page_memory *)user;
    char *pages = memory->next;
    (void)ptr, (void)old_size, (void)align;
    if (!new_size || new_size > (size_t)(memory->end - pages) / 4096 * 4096) return NULL;
    memory->next += (new_size + 4095) / 4096 * 4096;
    return pages;
}

/* A result is not ahead of its operands, in the low 12 bits: a store to it makes none of the loads
 * that follow wait. */
static void results_lie_before_operands(void **state) {
    enum { BYTES = 4 << 20 };
    char *bytes = (char *)malloc(BYTES);
    page_memory memory = {bytes, bytes + BYTES};
    tsh_desc desc = {.allocator = {take_pages, &memory}};
    tsh_ctx *ctx;
    tsh_tensor *t[4];
    int i, j;
    (void)state;
    assert_non_null(bytes);
    memory.next += 4096 - (uintptr_t)bytes % 4096;
    ctx = unit_open(&desc);
    t[0] = tsh_keep(tsh_ones(ctx, tsh_shape1(8192)));
    assert_int_equal(tsh_step_end(ctx), TSH_OK);
    for (i = 1; i < 4; i++) t[i] = tsh_neg(t[i - 1]);
    for (i = 1; i < 4; i++)
        for (j = 0; j < i; j++) {
            const int before =
                (int)(((uintptr_t)tshi_tensor_at(t[j]) - (uintptr_t)tshi_tensor_at(t[i])) % 4096);
            if (before < 64 || before > 1024)
                fail_msg("tensor %d is %d bytes before tensor %d", i, before, j);
        }
    unit_close(ctx);
    free(bytes);
}

/* ------------------------------------------------------------------- huge pages */

/* The line VmFlags of /proc/self/smaps for the mapping that holds an address; "": there is none. */
static const char *mapping_flags(const void *address, char line[512]) {
    const unsigned long long at = (unsigned long long)(uintptr_t)address;
    unsigned long long first = 0, end = 0, from, to;
    FILE *file = fopen("/proc/self/smaps", "r");
    int found = 0;
    while (file && !found && fgets(line, 512, file)) {
        if (sscanf(line, "%llx-%llx ", &from, &to) == 2) {
            first = from;
            end = to;
        }
        found = strncmp(line, "VmFlags:", 8) == 0 && at >= first && at < end;
    }
    if (file) (void)fclose(file);
    return found ? line : "";
}

static void large_blocks_ask_for_huge_pages(void **state) {
    FILE *file = fopen("/sys/kernel/mm/transparent_hugepage/enabled", "r");
    tsh_ctx *ctx;
    const char *flags;
    char line[512];
    (void)state;
    if (!file) SKIP("this kernel has no transparent huge pages");
    (void)fclose(file);
    if (!*mapping_flags(line, line)) SKIP("this kernel does not tell the flags of mappings");
    ctx = unit_open(NULL);
    flags = mapping_flags( /* in the middle of 16 MiB */
        (const char *)tsh_data(ctx, tsh_zeros(ctx, tsh_shape2(1024, 4096))) + (8 << 20), line);
    if (!strstr(flags, " hg")) fail_msg("the mapping has the flags \"%s\"", flags);
    unit_close(ctx);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shapes_are_made),
        cmocka_unit_test(a_tensor_tells_what_it_is),
        cmocka_unit_test(dimensions_may_be_negative),
        cmocka_unit_test(nothing_has_no_shape),
        cmocka_unit_test(shapes_that_cannot_be_are_refused),
        cmocka_unit_test(empty_tensors_and_scalars_exist),
        cmocka_unit_test(new_is_zeros_and_from_copies),
        cmocka_unit_test(freed_tensors_give_their_memory_back),
        cmocka_unit_test(step_tensors_are_filled),
        cmocka_unit_test(arange_ends_below_stop),
        cmocka_unit_test(keep_copies_a_step_tensor),
        cmocka_unit_test(views_share_memory_and_cost_none),
        cmocka_unit_test(detach_shares_and_clone_copies),
        cmocka_unit_test(reshape_works_out_one_size),
        cmocka_unit_test(reshape_copies_where_strides_do_not_allow_a_view),
        cmocka_unit_test(views_refuse_what_is_not_there),
        cmocka_unit_test(concat_lays_parts_end_to_end),
        cmocka_unit_test(values_are_read_and_written),
        cmocka_unit_test(item_takes_one_element),
        cmocka_unit_test(another_ctx_s_tensors_are_refused),
        cmocka_unit_test(dtypes_are_checked),
        cmocka_unit_test(text_is_cut_at_its_size),
        cmocka_unit_test(sharded_values_are_read_and_written),
        cmocka_unit_test(a_step_tensor_is_stale_for_a_whole_step),
        cmocka_unit_test(a_handle_used_again_has_its_own_shape),
        cmocka_unit_test(a_view_keeps_the_values_of_a_freed_tensor),
        cmocka_unit_test(a_leaf_may_be_freed_before_backward),
        cmocka_unit_test(scopes_nest),
        cmocka_unit_test(a_scope_may_not_end_what_is_recorded),
        cmocka_unit_test(a_loop_with_scopes_does_not_grow),
        cmocka_unit_test(the_step_pool_is_reused_and_joined),
        cmocka_unit_test(the_pool_s_books_are_right),
        cmocka_unit_test(results_lie_before_operands),
        cmocka_unit_test(large_blocks_ask_for_huge_pages),
    };
    return cmocka_run_group_tests_name("unit/tensor", tests, NULL, NULL);
}
