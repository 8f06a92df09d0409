/* What a bf16 model sends over tp: activations in their dtype, and gradients of activations too;
 * those of leaves stay tsh_real. Values against the f32 twin, bytes against its bytes. */
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"

#include "../support/ranks.h"

enum { SENT_ROWS = 12, SENT_IN = 24, SENT_HIDDEN = 36, SENT_OUT = 20, SENT_RESULTS = 6 };
enum { SENT_MOST = SENT_HIDDEN * SENT_IN };

typedef enum mode {
    PLAIN,    /* tsh_linear, column- then row-parallel */
    SEQUENCE, /* with sequence parallelism */
    MOVES,    /* tsh_redistribute and tsh_tp_copy */
    MODES
} mode;

/* Results of a run, whole: y, and the gradients of x, w1, b1, w2, b2; bytes sent, by kind. */
typedef struct results {
    double value[SENT_RESULTS][SENT_MOST];
    uint64_t bytes[TSH_COLL_KINDS];
} results;

static const int64_t result_sizes[SENT_RESULTS] = {
    SENT_ROWS * SENT_OUT, SENT_ROWS *SENT_IN,     SENT_MOST,
    SENT_HIDDEN,          SENT_OUT *SENT_HIDDEN, SENT_OUT};

/* Value i of tensor `which`, which bf16 represents; absolute: its size. */
static float value_of(int which, int64_t i, int absolute) {
    uint64_t bits = (uint64_t)(i + 1) * UINT64_C(0x9E3779B97F4A7C15) + (uint64_t)which * 77777u;
    float value;
    bits ^= bits >> 29;
    bits *= UINT64_C(0xBF58476D1CE4E5B9);
    value = (float)((int)(bits >> 40 & 255) - 128) / 128.0f;
    return absolute ? fabsf(value) : value;
}

static tsh_tensor *leaf(tsh_ctx *ctx, tsh_dtype dtype, int which, tsh_shape shape,
                        tsh_layout layout, int absolute) {
    tsh_tensor *t = tsh_tensor_new(ctx, dtype, shape, layout);
    float values[SENT_MOST];
    uint16_t halves[SENT_MOST];
    int64_t n = 1;
    for (int d = 0; d < shape.ndim; d++) n *= shape.dim[d];
    for (int64_t i = 0; i < n; i++) {
        values[i] = value_of(which, i, absolute);
        halves[i] = tshi_dtype_to_bf16((tsh_real)values[i]);
    }
    (void)tsh_write(ctx, t, TSH_GLOBAL, dtype == TSH_BF16 ? (void *)halves : (void *)values,
                    (size_t)n * tsh_dtype_size(dtype));
    return tsh_requires_grad(t, 1);
}

static void read_whole(tsh_ctx *ctx, tsh_tensor *t, double *to) {
    tsh_tensor *whole = t ? tsh_full_tensor(tsh_cast(t, TSH_REAL)) : NULL;
    for (int64_t i = 0; whole && i < tsh_numel(whole); i++)
        to[i] = (double)((tsh_real *)tsh_data(ctx, whole))[i];
}

/* y = linear(linear(x, w1, b1), w2, b2), or moves between layouts; x is an activation. */
static tsh_tensor *chain(mode m, tsh_tensor *x, tsh_tensor *const *w) {
    const tsh_layout rows = tsh_sharded(0);
    tsh_layout given = rows;
    tsh_tensor *y;
    (void)tshi_layout_resolve(&given, 2, tsh_shape2(SENT_ROWS, SENT_OUT).dim);
    if (m == PLAIN) return tsh_linear(tsh_linear(x, w[0], w[1]), w[2], w[3]);
    if (m == SEQUENCE) {
        y = tshi_linear_run(tsh_redistribute(x, rows), w[0], w[1], NULL, 1);
        y = tshi_linear_run(y, w[2], w[3], &given, 0);
        return tsh_full_tensor(y);
    }
    y = tsh_linear(tsh_tp_copy(x, TSH_SUM), w[0], w[1]); /* whose partial dx becomes a sum */
    y = tsh_matmul(y, tsh_transpose(w[2], 0, 1));        /* P */
    y = tsh_redistribute(tsh_redistribute(y, rows), tsh_sharded(1)); /* scatter, all to all */
    return tsh_add(tsh_full_tensor(y), w[3]);                                /* gather */
}

static void run(tsh_ctx *ctx, mode m, tsh_dtype dtype, int absolute, results *r) {
    const tsh_layout whole = tsh_replicated();
    tsh_tensor *x = leaf(ctx, dtype, 0, tsh_shape2(SENT_ROWS, SENT_IN), whole, absolute);
    tsh_tensor *w[4] = {
        leaf(ctx, dtype, 1, tsh_shape2(SENT_HIDDEN, SENT_IN), tsh_sharded(0), absolute),
        leaf(ctx, dtype, 2, tsh_shape1(SENT_HIDDEN), tsh_sharded(0), absolute),
        leaf(ctx, dtype, 3, tsh_shape2(SENT_OUT, SENT_HIDDEN), tsh_sharded(1), absolute),
        leaf(ctx, dtype, 4, tsh_shape1(SENT_OUT), whole, absolute)};
    tsh_tensor *seed = leaf(ctx, dtype, 5, tsh_shape2(SENT_ROWS, SENT_OUT), whole, absolute);
    uint64_t before[TSH_COLL_KINDS];
    tsh_tensor *y, *act;
    tsh_requires_grad(seed, 0);
    memcpy(before, ctx->tp.stats.bytes, sizeof before);
    act = tsh_retain_grad(tsh_scale(x, 1)); /* an activation, not a leaf */
    y = tsh_retain_grad(chain(m, act, w));
    (void)tsh_backward(ctx, tsh_sum(tsh_mul(y, seed), TSH_ALL, 0));
    for (int k = 0; k < TSH_COLL_KINDS; k++) r->bytes[k] = ctx->tp.stats.bytes[k] - before[k];
    read_whole(ctx, y, r->value[0]);
    read_whole(ctx, tsh_grad(x), r->value[1]);
    for (int i = 0; i < 4; i++) read_whole(ctx, tsh_grad(w[i]), r->value[2 + i]);
    (void)tsh_step_end(ctx);
    tsh_tensor_free(x);
    tsh_tensor_free(seed);
    for (int i = 0; i < 4; i++) tsh_tensor_free(w[i]);
}

/* Roundings by 2^-9 that a result has: y of the hidden values, the partial sums, their sum, moves
 * and the bias; dx of the partial sums and their sum, twice where it moves; weights' gradients, of
 * the values that they are computed from and of gradients that moved. */
static double roundings(mode m, int result) {
    return result == 0 ? 5 : result == 1 ? (m == MOVES ? 5 : 3) : result == 5 ? 0 : 2;
}

static int compare(tsh_ctx *ctx, void *user) {
    results *all = (results *)calloc(3, sizeof *all); /* bf16, f32, of absolute values */
    (void)user;
    CHECK(all != NULL, "memory");
    for (int m = 0; m < MODES; m++) {
        run(ctx, (mode)m, TSH_BF16, 0, &all[0]);
        run(ctx, (mode)m, TSH_F32, 0, &all[1]);
        run(ctx, (mode)m, TSH_F32, 1, &all[2]);
        CHECK_OK();
        for (int i = 0; i < SENT_RESULTS; i++) {
            double different = 0;
            for (int64_t e = 0; e < result_sizes[i]; e++) {
                const double size = all[2].value[i][e];
                const double off = fabs(all[0].value[i][e] - all[1].value[i][e]);
                const double bound = size * (roundings((mode)m, i) / 512 + 1e-5);
                CHECK(off <= bound, "mode %d, result %d, element %d: %g is not %g within %g", m, i,
                      (int)e, all[0].value[i][e], all[1].value[i][e], bound);
                different += off > 0;
            }
            CHECK(i > 1 || ctx->tp.size == 1 || different > 0, "mode %d: nothing was rounded", m);
        }
        for (int k = 0; k < TSH_COLL_KINDS; k++) {
            const uint64_t halves = all[0].bytes[k], reals = all[1].bytes[k];
            const int leaves = k == TSH_ALLREDUCE && m == SEQUENCE; /* of b2 */
            CHECK(leaves ? halves <= reals : 2 * halves == reals,
                  "mode %d, kind %d: %d bytes, not half of %d", m, k, (int)halves, (int)reals);
        }
        CHECK(ctx->tp.size == 1 || m != PLAIN || all[0].bytes[TSH_ALLREDUCE] > 0, "none sent");
        CHECK(ctx->tp.size == 1 || m == PLAIN || all[0].bytes[TSH_ALLGATHER] > 0, "none sent");
    }
    free(all);
    return 0;
}

static void activations_travel_in_their_dtype(void **state) {
    (void)state;
    for (int ranks = 1; ranks <= 4; ranks++) {
        ranks_run(ranks, compare, NULL);
    }
}

/* In place, of every length around a block. */
static void values_are_narrowed_in_place(void **state) {
    static tsh_real x[1030];
    (void)state;
    for (int64_t n = 0; n <= 1025; n += n < 250 || n > 1000 ? 1 : 51) {
        for (int64_t i = 0; i < 1030; i++) x[i] = (tsh_real)value_of(7, i, 0);
        tshi_kernel_narrow(x, n, TSH_BF16);
        for (int64_t i = 0; i < n; i++)
            assert_int_equal(((uint16_t *)(void *)x)[i],
                             tshi_dtype_to_bf16((tsh_real)value_of(7, i, 0)));
        tshi_kernel_widen(x, n, TSH_BF16);
        for (int64_t i = 0; i < 1030; i++) assert_true(x[i] == (tsh_real)value_of(7, i, 0));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(activations_travel_in_their_dtype),
        cmocka_unit_test(values_are_narrowed_in_place),
    };
    return cmocka_run_group_tests_name("unit/messages", tests, NULL, NULL);
}
