/* For test_added.py: TSH_F8, the dtype of one byte that float8.diff adds to tshard.h: conversions,
 * views, elementwise ops, products, collectives, files. */
#include "check.h"

enum { CODES = 256, WIDTH = 64, N = WIDTH * WIDTH };
#define FILE_NAME "float8.safetensors"

/* The value of a code, by the definition of E4M3. */
static double value_of(int code) {
    const int exponent = code >> 3 & 15, fraction = code & 7;
    const double size = exponent ? ldexp(8 + fraction, exponent - 10) : ldexp(fraction, -9);
    if ((code & 127) == 127) return (double)NAN;
    return code & 128 ? -size : size;
}

/* The code nearest to x, of two equally near the even one; NaN beyond 464, as 480 would be next. */
static int code_of(double x) {
    const int sign = signbit(x) ? 128 : 0;
    int code, nearest = 0;
    if (!(fabs(x) <= 464)) return 127 | sign;
    for (code = 1; code < 127; code++) {
        const double off = fabs(value_of(code) - fabs(x)), best = fabs(value_of(nearest) - fabs(x));
        if (off < best || (off <= best && code % 2 == 0)) nearest = code;
    }
    return nearest | sign;
}

static int same(double a, double b) {
    return (a != a && b != b) || (a <= b && a >= b);
}

static tsh_tensor *random_f8(tsh_ctx *ctx, int64_t rows, int64_t columns) {
    return tsh_cast(tsh_randn(ctx, tsh_shape2(rows, columns)), TSH_F8);
}

/* x and y, of any layout, have the same values. */
static int equal(tsh_ctx *ctx, tsh_tensor *x, tsh_tensor *y) {
    tsh_real a[N], b[N];
    const size_t bytes = (size_t)tsh_numel(x) * sizeof *a;
    return x && y && tsh_numel(x) == tsh_numel(y) &&
           tsh_read(ctx, tsh_cast(x, TSH_REAL), TSH_GLOBAL, a, bytes) == TSH_OK &&
           tsh_read(ctx, tsh_cast(y, TSH_REAL), TSH_GLOBAL, b, bytes) == TSH_OK &&
           memcmp(a, b, bytes) == 0;
}

static int conversions(tsh_ctx *ctx, void *user) {
    static const double edges[] = {-0.0, 464,          464.1,      -500,  1e300, 456,
                                   457,  0.0009765625, 0.00097657, 0.015, 0.0155, 0.01563};
    tsh_tensor *x = tsh_zeros(ctx, tsh_shape1(4 * CODES)), *y;
    unsigned char codes[4 * CODES];
    tsh_real *values = (tsh_real *)tsh_data(ctx, x);
    int i;
    (void)user;
    for (i = 0; i < 4 * CODES; i++) values[i] = (tsh_real)(3.3 * sin(i) * i);
    for (i = 0; i < CODES; i++) { /* every code, and the middle between it and the next */
        values[i] = (tsh_real)value_of(i);
        values[CODES + i] = (tsh_real)(value_of(i) + value_of((i + 1) % CODES)) / 2;
    }
    for (i = 0; i < (int)(sizeof edges / sizeof *edges); i++)
        values[2 * CODES + i] = (tsh_real)edges[i];
    y = tsh_cast(x, TSH_F8);
    CHECK(tsh_dtype_size(TSH_F8) == 1 && tsh_dtype_of(y) == TSH_F8);
    CHECK(tsh_read(ctx, y, TSH_GLOBAL, codes, sizeof codes) == TSH_OK);
    for (i = 0; i < 4 * CODES; i++) {
        if ((codes[i] & 127) == 127 && values[i] != values[i]) continue; /* a NaN of either sign */
        if (codes[i] != code_of((double)values[i]))
            (void)fprintf(stderr, "%d: %g became %02x\n", i, (double)values[i], codes[i]);
        CHECK(codes[i] == code_of((double)values[i]));
    }
    values = (tsh_real *)tsh_data(ctx, tsh_cast(y, TSH_REAL));
    for (i = 0; i < 4 * CODES; i++) CHECK(same((double)values[i], value_of(codes[i])));
    y = random_f8(ctx, 8, 8);
    CHECK(equal(ctx, tsh_cast(tsh_cast(y, TSH_BF16), TSH_F8), y));
    CHECK(!equal(ctx, random_f8(ctx, 8, 8), y)); /* equal sees a difference */
    return 0;
}

/* What op does to y, a tensor of TSH_F8, it does to its values, rounded. */
static int views_and_ops(tsh_ctx *ctx, void *user) {
    tsh_tensor *y = random_f8(ctx, WIDTH, WIDTH), *x = tsh_cast(y, TSH_REAL);
    tsh_tensor *z = random_f8(ctx, WIDTH, WIDTH), *w = tsh_cast(z, TSH_REAL);
    tsh_tensor *halves[2][2] = {{tsh_slice(y, 1, 40, 24), tsh_slice(z, 1, 0, 40)},
                                {tsh_slice(x, 1, 40, 24), tsh_slice(w, 1, 0, 40)}};
    tsh_real *values = (tsh_real *)tsh_data(ctx, x);
    unsigned char codes[N];
    int i;
    (void)user;
    CHECK(equal(ctx, tsh_transpose(y, 0, 1), tsh_transpose(x, 0, 1)));
    CHECK(equal(ctx, tsh_slice(y, 1, 3, 37), tsh_slice(x, 1, 3, 37)));
    CHECK(equal(ctx, tsh_reshape(tsh_transpose(y, 0, 1), tsh_shape1(N)),
                tsh_reshape(tsh_transpose(x, 0, 1), tsh_shape1(N))));
    CHECK(equal(ctx, tsh_concat(halves[0], 2, 1), tsh_concat(halves[1], 2, 1)));
    CHECK(equal(ctx, tsh_add(y, z), tsh_cast(tsh_add(x, w), TSH_F8)));
    CHECK(equal(ctx, tsh_gelu(tsh_transpose(y, 0, 1)),
                tsh_cast(tsh_gelu(tsh_transpose(x, 0, 1)), TSH_F8)));
    CHECK(equal(ctx, tsh_mul(y, tsh_slice(z, 0, 5, 1)),
                tsh_cast(tsh_mul(x, tsh_slice(w, 0, 5, 1)), TSH_F8)));
    CHECK(equal(ctx, tsh_softmax(y, 1), tsh_cast(tsh_softmax(x, 1), TSH_F8)));
    CHECK(equal(ctx, tsh_sum(y, 0, 0), tsh_cast(tsh_sum(x, 0, 0), TSH_F8)));
    CHECK(equal(ctx, tsh_matmul(y, z), tsh_cast(tsh_matmul(x, w), TSH_F8)));
    CHECK(equal(ctx, tsh_matmul(tsh_transpose(y, 0, 1), z),
                tsh_cast(tsh_matmul(tsh_transpose(x, 0, 1), w), TSH_F8)));
    CHECK(equal(ctx, tsh_linear(y, z, NULL), tsh_cast(tsh_linear(x, w, NULL), TSH_F8)));
    /* strided elements are copied by bytes */
    CHECK(tsh_read(ctx, tsh_transpose(y, 0, 1), TSH_GLOBAL, codes, sizeof codes) == TSH_OK);
    for (i = 0; i < N; i++)
        CHECK(same(value_of(codes[i]), (double)values[i % WIDTH * WIDTH + i / WIDTH]));
    return 0;
}

/* Collectives, sharded tensors and files, on some ranks. */
static int ranks(tsh_ctx *ctx, void *user) {
    const tsh_linear_desc linear = {.in = 12, .out = 9, .dtype = TSH_F8};
    const tsh_plan_rule plan = {.path = "fc", .style = TSH_COLWISE};
    tsh_tensor *y = random_f8(ctx, 15, 21), *x = tsh_cast(y, TSH_REAL), *weight;
    tsh_module *fc = tsh_add_linear(tsh_root(ctx), "fc", &linear);
    static const unsigned char zeros[12 * 9];
    tsh_real before[12 * 9], after[12 * 9];
    int d;
    (void)user;
    for (d = 0; d < 2; d++) {
        tsh_tensor *cut = tsh_redistribute(y, tsh_sharded(d));
        CHECK(equal(ctx, cut, y) && equal(ctx, tsh_full_tensor(tsh_silu(cut)), tsh_silu(y)));
        CHECK(equal(ctx, tsh_redistribute(cut, tsh_sharded(1 - d)), x));
    }
    CHECK(tsh_allreduce(tsh_tp(ctx), tsh_data(ctx, y), tsh_numel(y), TSH_F8, TSH_MAX) == TSH_OK);
    CHECK(equal(ctx, y, x)); /* the maximum of equal values */
    CHECK(tsh_parallelize(tsh_root(ctx), &plan, 1) == TSH_OK);
    weight = tsh_param(fc, "weight");
    CHECK(tsh_dtype_of(weight) == TSH_F8);
    CHECK(tsh_read(ctx, tsh_cast(weight, TSH_REAL), TSH_GLOBAL, before, sizeof before) == TSH_OK);
    CHECK(tsh_save(tsh_root(ctx), FILE_NAME, NULL) == TSH_OK);
    tsh_step_end(ctx);
    CHECK(tsh_write(ctx, weight, TSH_GLOBAL, zeros, sizeof zeros) == TSH_OK);
    CHECK(tsh_load(tsh_root(ctx), FILE_NAME, NULL) == TSH_OK);
    CHECK(tsh_read(ctx, tsh_cast(weight, TSH_REAL), TSH_GLOBAL, after, sizeof after) == TSH_OK);
    CHECK(memcmp(before, after, sizeof before) == 0);
    CHECK(tsh_forward(fc, tsh_ones(ctx, tsh_shape2(2, 12))) != NULL);
    return 0;
}

int main(void) {
    static const int sizes[] = {1, 2, 3, 4, 8};
    const tsh_desc desc = {.logger.log = tsh_log_stderr};
    int i, failed = tsh_run(&desc, conversions, NULL) || tsh_run(&desc, views_and_ops, NULL);
    for (i = 0; i < 5 && !failed; i++) failed = tsh_threads_run(sizes[i], &desc, ranks, NULL) != 0;
    return failed;
}
