/* Every op's and layer's gradient against central differences. */
/* build: double */
#define TSHARD_IMPLEMENTATION
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

/* Central differences of a loss L with step h err by h^2 |L'''| / 6 and by the rounding of L, about
 * u |L| / h. Here |L| is below 100 and |L'''| below 300 (tsh_pow_scalar with exponent -1.5 at 0.5;
 * most are below 10).
 *   double: h = 1e-5, u = 1.1e-16: 5e-9 and 1e-9.
 *   float:  h = 1e-2, u = 6e-8:    5e-3 and 6e-4 (sums of 60 terms: some units in the last place).
 */
static const double room_double = 6e-9, room_float = 6e-3;

static double room(void) {
    return sizeof(tsh_real) == 8 ? room_double : room_float;
}

static double worst_of_all;

static void check(tsh_ctx *ctx, const char *name, tsh_gradcheck_fn fn, tsh_tensor **in, int n,
                  void *user) {
    double worst = tsh_gradcheck(ctx, fn, in, n, user, 0, 0);
    if (!tsh_ok(ctx)) fail_msg("%s: %s", name, tsh_last_error(ctx)->message);
    if (!(worst >= 0 && worst <= room()))
        fail_msg("%s: gradients are off by %.3g (room %.3g)", name, worst, room());
    if (worst > worst_of_all) worst_of_all = worst;
    assert_int_equal(tsh_step_end(ctx), TSH_OK);
}

/* ------------------------------------------------------------------ inputs */

/* A leaf of values in (low, high) that are all different by more than 2 h, and 0 by more than h: a
 * shuffled grid. So max and relu have no kink within a step. */
static tsh_tensor *leaf(tsh_ctx *ctx, tsh_shape shape, double low, double high, int salt) {
    tsh_tensor *t = tsh_tensor_new(ctx, TSH_REAL, shape, tsh_replicated());
    tsh_real *data = (tsh_real *)tsh_data(ctx, t);
    int64_t i;
    for (i = 0; i < tsh_numel(t); i++) {
        int64_t place = (i * 37 + salt * 23 + i / 64) % 64;
        data[i] = (tsh_real)(low + (high - low) * ((double)place + 0.5) / 64);
    }
    return tsh_requires_grad(t, 1);
}

/* The scalar sum(y * w) with weights w of both signs, all different over a row. */
static tsh_tensor *weigh(tsh_tensor *y) {
    tsh_ctx *ctx = tsh_ctx_of(y);
    tsh_tensor *w = tsh_zeros(ctx, tsh_shape_of(y));
    tsh_real *data = (tsh_real *)tsh_data(ctx, w);
    int64_t i;
    for (i = 0; data && i < tsh_numel(w); i++) data[i] = (tsh_real)((i * 29 + 5) % 31 - 14) / 16;
    return tsh_sum(tsh_mul(y, w), TSH_ALL, 0);
}

/* ------------------------------------------------------------------ ops */

enum { INPUTS = 3 };

typedef struct op_case {
    const char *name;
    tsh_gradcheck_fn fn;
    tsh_shape shape[INPUTS]; /* inputs end at ndim -1 */
    double low, high;
} op_case;

#define OP(name, expression)                                                                       \
    static tsh_tensor *op_##name(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {               \
        tsh_tensor *a = in[0], *b = n > 1 ? in[1] : NULL, *c = n > 2 ? in[2] : NULL;               \
        (void)ctx;                                                                                 \
        (void)b;                                                                                   \
        (void)c;                                                                                   \
        (void)user;                                                                                \
        return weigh(expression);                                                                  \
    }

OP(add, tsh_add(a, b))
OP(sub, tsh_sub(a, b))
OP(mul, tsh_mul(a, b))
OP(div, tsh_div(a, b))
OP(pow, tsh_pow(a, b))
OP(same, tsh_div(tsh_mul(a, a), tsh_add_scalar(a, 4)))
OP(neg, tsh_neg(a))
OP(scale, tsh_scale(a, -1.7))
OP(add_scalar, tsh_add_scalar(a, 0.3))
OP(cube, tsh_pow_scalar(a, 3))
OP(root, tsh_pow_scalar(a, -1.5))
OP(exp, tsh_exp(a))
OP(log, tsh_log(a))
OP(sqrt, tsh_sqrt(a))
OP(sigmoid, tsh_sigmoid(a))
OP(tanh, tsh_tanh(a))
OP(relu, tsh_relu(a))
OP(erf, tsh_erf(a))
OP(gelu, tsh_gelu(a))
OP(gelu_tanh, tsh_gelu_tanh(a))
OP(silu, tsh_silu(a))
OP(where, tsh_where(tsh_lt(tsh_detach(a), tsh_zeros(ctx, tsh_shape0())), tsh_mul(a, a), b))
OP(clone, tsh_mul(tsh_clone(a), a))
OP(sum, tsh_mul(tsh_sum(a, 1, 0), tsh_sum(tsh_mul(a, a), -2, 0)))
OP(sum_keep, tsh_mul(tsh_sum(a, 0, 1), a))
OP(sum_all, tsh_mul(tsh_sum(a, TSH_ALL, 1), a))
OP(mean, tsh_mul(tsh_mean(a, -1, 1), a))
OP(mean_all, tsh_mul(tsh_mean(a, TSH_ALL, 0), a))
OP(max, tsh_mul(tsh_max(a, 1, 1), a))
OP(max_all, tsh_mul(tsh_max(a, TSH_ALL, 0), a))
OP(softmax, tsh_softmax(a, -1))
OP(softmax_first, tsh_softmax(a, 0))
OP(log_softmax, tsh_log_softmax(a, -1))
OP(log_softmax_middle, tsh_log_softmax(a, 1))
OP(transpose, tsh_mul(tsh_transpose(a, 0, 1), tsh_transpose(b, -1, 0)))
OP(reshape, tsh_mul(tsh_reshape(a, tsh_shape3(2, -1, 2)), tsh_exp(b)))
OP(reshape_copies, tsh_exp(tsh_reshape(tsh_transpose(a, 0, 2), tsh_shape2(6, -1))))
OP(slice, tsh_mul(tsh_slice(a, 1, 1, 2), tsh_slice(a, 1, 0, 2)))
OP(slice_of_slice, tsh_exp(tsh_slice(tsh_transpose(tsh_slice(a, 2, 1, 2), 0, 1), 0, 1, 2)))
OP(matmul, tsh_matmul(a, b))
OP(matmul_square, tsh_matmul(a, tsh_matmul(a, tsh_transpose(a, 0, 1))))
OP(linear, tsh_linear(a, b, c))
OP(linear_plain, tsh_linear(a, b, NULL))
OP(linear_turned, tsh_linear(tsh_transpose(a, 0, 1), tsh_transpose(b, 0, 1), c))
OP(layer_norm, tsh_layer_norm(a, b, c, 0))
OP(layer_norm_plain, tsh_layer_norm(a, b, NULL, 0.1))
OP(layer_norm_turned, tsh_layer_norm(tsh_transpose(a, 0, 1), b, c, 0))
OP(rms_norm, tsh_rms_norm(a, b, 0))
OP(rms_norm_turned, tsh_rms_norm(tsh_transpose(a, 0, 1), b, 0.1))
static const tsh_rms_norm_desc plus_one = {0, 0.1, 1, TSH_DTYPE_DEFAULT};
OP(rms_norm_one, tsh_rms_norm_with(a, b, &plus_one))
OP(rms_norm_one_shared, tsh_rms_norm_with(tsh_mul(a, b), b, &plus_one))
OP(rope, tsh_mul(tsh_rope(a, NULL), a))
OP(rope_turned, tsh_rope(tsh_transpose(tsh_mul(a, a), 0, 2), NULL))
OP(full, tsh_mul(tsh_full_tensor(a), tsh_redistribute(a, tsh_replicated())))
OP(attention, tsh_attention(a, b, c, NULL))
OP(attention_self, tsh_attention(a, a, a, NULL))

static tsh_tensor *op_rope_pairs(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {
    tsh_rope_desc desc;
    (void)ctx;
    (void)n;
    (void)user;
    memset(&desc, 0, sizeof desc);
    desc.base = 50;
    desc.dims = 4;
    desc.interleaved = 1;
    desc.start = 11;
    return weigh(tsh_mul(tsh_rope(in[0], &desc), in[0]));
}

static tsh_tensor *op_rope_freqs(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {
    static const double freqs[] = {0.7, 0.11, 0.02};
    tsh_rope_desc desc;
    (void)ctx;
    (void)n;
    (void)user;
    memset(&desc, 0, sizeof desc);
    desc.dims = 6;
    desc.start = 3;
    desc.freqs = freqs;
    desc.factor = 1.25;
    return weigh(tsh_mul(tsh_rope(in[0], &desc), in[0]));
}

static tsh_tensor *op_rope_starts(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {
    static const int64_t starts[] = {5, 0};
    tsh_rope_desc desc;
    (void)ctx;
    (void)n;
    (void)user;
    memset(&desc, 0, sizeof desc);
    desc.base = 3;
    desc.start = 1;
    desc.starts = starts;
    return weigh(tsh_mul(tsh_rope(in[0], &desc), in[0]));
}

static tsh_tensor *op_permute(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {
    static const int order[] = {2, -4, 3, 1};
    (void)ctx;
    (void)n;
    (void)user;
    return weigh(tsh_mul(tsh_permute(in[0], order), in[1]));
}

static tsh_tensor *op_split(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {
    tsh_tensor *part[3];
    (void)n;
    (void)user;
    if (tsh_split(in[0], 1, 3, part) != TSH_OK) return NULL;
    (void)ctx;
    return weigh(tsh_sub(tsh_mul(part[0], part[2]), part[1]));
}

static tsh_tensor *op_concat(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {
    tsh_tensor *part[4];
    (void)ctx;
    (void)n;
    (void)user;
    part[0] = in[0];
    part[1] = tsh_transpose(in[1], 0, 1);
    part[2] = tsh_mul(in[0], in[0]);
    part[3] = in[0];
    return weigh(tsh_concat(part, 4, -1));
}

static tsh_tensor *op_attention_causal(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {
    tsh_attention_desc desc;
    (void)ctx;
    (void)n;
    (void)user;
    memset(&desc, 0, sizeof desc);
    desc.causal = 1;
    desc.scale = 0.9;
    return weigh(tsh_attention(in[0], in[1], in[2], &desc));
}

/* A mask that broadcasts over batch and heads; the last query sees no key: its slopes are 0. */
static tsh_tensor *op_attention_masked(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {
    tsh_attention_desc desc;
    tsh_tensor *i = tsh_reshape(tsh_arange(ctx, TSH_REAL, 0, 4, 1), tsh_shape2(4, 1));
    (void)n;
    (void)user;
    memset(&desc, 0, sizeof desc);
    desc.mask = tsh_gt(tsh_scale(tsh_arange(ctx, TSH_REAL, 1, 6, 1), 2), tsh_mul(i, i));
    desc.mask = tsh_mul(tsh_cast(desc.mask, TSH_REAL), tsh_add_scalar(i, -3));
    desc.mask = tsh_cast(desc.mask, TSH_I32);
    return weigh(tsh_attention(in[0], in[1], in[2], &desc));
}

/* A window, a soft cap; in[0] is a mask that broadcasts over keys, too, in[1] are sinks and, with
 * batches, queries, keys and values of a head each. */
static tsh_tensor *op_attention_options(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {
    tsh_attention_desc desc;
    tsh_tensor *x[3];
    (void)ctx;
    (void)n;
    (void)user;
    memset(&desc, 0, sizeof desc);
    desc.causal = 1;
    desc.window = 3;
    desc.soft_cap = 1.5;
    desc.mask = in[0];
    desc.sinks = in[1];
    for (int i = 0; i < 3; i++) x[i] = tsh_slice(in[2], 0, i, 1);
    return weigh(tsh_attention(x[0], x[1], x[2], &desc));
}

/* q, k and v out of one projection, as models do it: (B, T, 3 H D). */
static tsh_tensor *op_attention_fused(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {
    tsh_attention_desc desc;
    tsh_tensor *part[3], *y;
    int i;
    (void)ctx;
    (void)n;
    (void)user;
    memset(&desc, 0, sizeof desc);
    desc.causal = 1;
    if (tsh_split(in[0], 2, 3, part) != TSH_OK) return NULL;
    for (i = 0; i < 3; i++)
        part[i] = tsh_transpose(tsh_reshape(part[i], tsh_shape4(2, 3, 2, 2)), 1, 2);
    y = tsh_attention(part[0], part[1], part[2], &desc);
    return weigh(tsh_reshape(tsh_transpose(y, 1, 2), tsh_shape3(2, 3, 4)));
}

#define S0          tsh_shape0()
#define S1(a)       tsh_shape1(a)
#define S2(a, b)    tsh_shape2(a, b)
#define S3(a, b, c) tsh_shape3(a, b, c)

/* Copies, since shapes are made by functions: no initialiser of a static table. */
static int add_case(op_case *cases, int n, const char *name, tsh_gradcheck_fn fn, tsh_shape a,
                    tsh_shape b, tsh_shape c, double low, double high) {
    cases[n].name = name;
    cases[n].fn = fn;
    cases[n].shape[0] = a;
    cases[n].shape[1] = b;
    cases[n].shape[2] = c;
    cases[n].low = low;
    cases[n].high = high;
    return n + 1;
}

static tsh_shape none(void) {
    tsh_shape shape = tsh_shape0();
    shape.ndim = -1;
    return shape;
}

static void run_cases(const op_case *cases, int n) {
    tsh_ctx *ctx;
    int i, inputs;
    for (i = 0; i < n; i++) {
        tsh_tensor *in[INPUTS];
        assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
        for (inputs = 0; inputs < INPUTS && cases[i].shape[inputs].ndim >= 0; inputs++)
            in[inputs] = leaf(ctx, cases[i].shape[inputs], cases[i].low, cases[i].high, inputs);
        check(ctx, cases[i].name, cases[i].fn, in, inputs, NULL);
        tsh_close(ctx);
    }
}

#define ONE(op, a, low, high)    n = add_case(cases, n, #op, op_##op, a, none(), none(), low, high)
#define TWO(op, a, b, low, high) n = add_case(cases, n, #op, op_##op, a, b, none(), low, high)
#define THREE(op, a, b, c)       n = add_case(cases, n, #op, op_##op, a, b, c, -2, 2)
#define UNARY(op, low, high)     ONE(op, S1(37), low, high)
#define BROADCAST(op, low, high)                                                                   \
    do {                                                                                           \
        TWO(op, S2(3, 4), S2(3, 4), low, high);                                                    \
        TWO(op, S2(3, 4), S1(4), low, high);                                                       \
        TWO(op, S2(4, 1), S3(2, 1, 3), low, high);                                                 \
        TWO(op, S0, S2(2, 3), low, high);                                                          \
    } while (0)

static void test_map(void **state) {
    op_case cases[48];
    int n = 0;
    (void)state;
    BROADCAST(add, -2, 2);
    BROADCAST(sub, -2, 2);
    BROADCAST(mul, -2, 2);
    BROADCAST(div, 0.5, 2);
    BROADCAST(pow, 0.5, 2);
    UNARY(neg, -2, 2);
    UNARY(scale, -2, 2);
    UNARY(add_scalar, -2, 2);
    UNARY(cube, -2, 2);
    UNARY(root, 0.5, 3);
    UNARY(exp, -3, 3);
    UNARY(log, 0.5, 4);
    UNARY(sqrt, 0.5, 4);
    UNARY(sigmoid, -4, 4);
    UNARY(tanh, -2, 2);
    UNARY(relu, -2, 2);
    UNARY(erf, -2, 2);
    UNARY(gelu, -3, 3);
    UNARY(gelu_tanh, -3, 3);
    UNARY(silu, -4, 4);
    ONE(same, S2(3, 5), -2, 2);
    ONE(clone, S2(3, 5), -2, 2);
    ONE(full, S2(3, 5), -2, 2);
    TWO(where, S3(2, 3, 4), S2(3, 1), -2, 2);
    run_cases(cases, n);
}

static void test_reduce_and_view(void **state) {
    op_case cases[40];
    int n = 0;
    (void)state;
    ONE(sum, S2(4, 4), -2, 2);
    ONE(sum_keep, S3(2, 3, 4), -2, 2);
    ONE(sum_all, S2(3, 4), -2, 2);
    ONE(mean, S3(2, 3, 4), -2, 2);
    ONE(mean_all, S2(3, 4), -2, 2);
    ONE(max, S3(2, 5, 3), -2, 2);
    ONE(max_all, S3(2, 5, 3), -2, 2);
    ONE(softmax, S2(3, 19), -3, 3);
    ONE(softmax_first, S2(5, 3), -3, 3);
    ONE(log_softmax, S2(3, 19), -3, 3);
    ONE(log_softmax_middle, S3(2, 5, 3), -3, 3);
    TWO(transpose, S2(3, 4), S2(3, 4), -2, 2);
    TWO(permute, tsh_shape4(2, 3, 2, 4), tsh_shape4(2, 2, 4, 3), -2, 2);
    TWO(reshape, S2(4, 6), S3(2, 6, 2), -2, 2);
    ONE(reshape_copies, S3(2, 3, 4), -2, 2);
    ONE(slice, S3(2, 3, 4), -2, 2);
    ONE(slice_of_slice, S3(2, 4, 3), -2, 2);
    ONE(split, S2(3, 9), -2, 2);
    TWO(concat, S2(3, 2), S2(4, 3), -2, 2);
    run_cases(cases, n);
}

static void test_matrix(void **state) {
    op_case cases[48];
    int n = 0;
    (void)state;
    TWO(matmul, S2(3, 5), S2(5, 4), -2, 2);
    TWO(matmul, S3(2, 3, 5), S2(5, 2), -2, 2);
    TWO(matmul, tsh_shape4(2, 1, 3, 2), S3(3, 2, 2), -2, 2);
    ONE(matmul_square, S2(3, 3), -2, 2);
    THREE(linear, S1(5), S2(3, 5), S1(3));
    THREE(linear, S2(4, 5), S2(3, 5), S1(3));
    THREE(linear, S3(2, 3, 5), S2(4, 5), S1(4));
    TWO(linear_plain, S3(2, 3, 5), S2(4, 5), -2, 2);
    THREE(linear_turned, S3(2, 3, 5), S2(5, 4), S1(4));
    THREE(layer_norm, S2(3, 7), S1(7), S1(7));
    THREE(layer_norm, S3(2, 2, 18), S1(18), S1(18));
    TWO(layer_norm_plain, S2(3, 7), S1(7), -2, 2);
    THREE(layer_norm_turned, S2(5, 3), S1(5), S1(5));
    TWO(rms_norm, S2(3, 7), S1(7), -2, 2);
    TWO(rms_norm, S3(2, 2, 18), S1(18), -2, 2);
    TWO(rms_norm_turned, S2(5, 3), S1(5), -2, 2);
    TWO(rms_norm_one, S3(2, 2, 18), S1(18), -2, 2);
    TWO(rms_norm_one_shared, S2(3, 7), S1(7), -2, 2);
    ONE(rope, S3(2, 3, 6), -2, 2);
    ONE(rope_turned, S3(4, 2, 3), -2, 2);
    ONE(rope_pairs, S3(2, 3, 7), -2, 2);
    ONE(rope_freqs, S3(2, 3, 7), -2, 2);
    ONE(rope_starts, S3(2, 3, 4), -2, 2);
    THREE(attention, tsh_shape4(2, 2, 3, 2), tsh_shape4(2, 2, 4, 2), tsh_shape4(2, 2, 4, 2));
    THREE(attention, tsh_shape4(1, 6, 3, 2), tsh_shape4(1, 2, 4, 2), tsh_shape4(1, 2, 4, 2));
    THREE(attention_causal, tsh_shape4(2, 3, 3, 2), tsh_shape4(2, 1, 4, 2), tsh_shape4(2, 1, 4, 2));
    THREE(attention_causal, tsh_shape4(1, 2, 3, 3), tsh_shape4(1, 2, 5, 3), tsh_shape4(1, 2, 5, 3));
    THREE(attention_causal, tsh_shape4(1, 1, 66, 1), tsh_shape4(1, 1, 66, 1),
          tsh_shape4(1, 1, 66, 1));
    THREE(attention_masked, tsh_shape4(2, 1, 4, 2), tsh_shape4(2, 1, 5, 2), tsh_shape4(2, 1, 5, 2));
    THREE(attention_options, S3(2, 5, 1), S1(2), tsh_shape4(3, 2, 5, 3));
    THREE(attention_options, S2(5, 5), S1(2), tsh_shape4(3, 2, 5, 3));
    ONE(attention_self, tsh_shape4(1, 2, 3, 2), -2, 2);
    ONE(attention_fused, S3(2, 3, 12), -2, 2);
    run_cases(cases, n);
}

/* ------------------------------------------------------------------ loss, embedding */

typedef struct loss_user {
    tsh_tensor *target;
    tsh_cross_entropy_desc desc;
} loss_user;

static tsh_tensor *loss_fn(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {
    const loss_user *u = (const loss_user *)user;
    (void)ctx;
    (void)n;
    return weigh(tsh_cross_entropy(in[0], u->target, &u->desc));
}

static tsh_tensor *loss_turned_fn(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {
    tsh_tensor *x = tsh_transpose(in[0], 0, 1);
    (void)n;
    return loss_fn(ctx, &x, 1, user);
}

static void test_loss(void **state) {
    static const int32_t target[] = {3, 0, 4, 2, 2};
    static const tsh_reduction reduction[] = {TSH_REDUCE_NONE, TSH_REDUCE_SUM, TSH_REDUCE_MEAN};
    tsh_ctx *ctx;
    tsh_tensor *in;
    loss_user u;
    int i, ignore;
    (void)state;
    assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
    memset(&u, 0, sizeof u);
    u.target = tsh_tensor_from(ctx, TSH_I32, tsh_shape1(5), tsh_replicated(), target);
    for (i = 0; i < 3; i++)
        for (ignore = 0; ignore < 2; ignore++) {
            u.desc.reduction = reduction[i];
            u.desc.ignore = ignore;
            u.desc.ignore_index = 2;
            in = leaf(ctx, tsh_shape2(5, 5), -3, 3, i);
            check(ctx, "cross_entropy", loss_fn, &in, 1, &u);
            check(ctx, "cross_entropy turned", loss_turned_fn, &in, 1, &u);
        }
    u.target = tsh_tensor_from(ctx, TSH_I32, tsh_shape2(1, 5), tsh_replicated(), target);
    u.desc.dim = 1;
    u.desc.label_smoothing = 0.1;
    for (i = 0; i < 3; i++) {
        u.desc.reduction = reduction[i];
        in = leaf(ctx, tsh_shape3(1, 6, 5), -3, 3, i);
        check(ctx, "cross_entropy in dimension 1", loss_fn, &in, 1, &u);
    }
    tsh_close(ctx);
}

static tsh_tensor *embedding_fn(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {
    tsh_tensor *y = tsh_embedding((tsh_tensor *)user, in[0], NULL);
    (void)ctx;
    (void)n;
    return weigh(tsh_mul(y, y));
}

static tsh_tensor *embedding_turned_fn(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {
    tsh_tensor *w = tsh_transpose(in[0], 0, 1);
    (void)n;
    return embedding_fn(ctx, &w, 1, user);
}

static tsh_tensor *embedding_sparse_fn(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {
    tsh_lookup_desc desc;
    tsh_tensor *y;
    (void)ctx;
    (void)n;
    memset(&desc, 0, sizeof desc);
    desc.sparse = 1;
    y = tsh_embedding((tsh_tensor *)user, in[0], &desc);
    return weigh(tsh_mul(y, y));
}

static void test_embedding(void **state) {
    static const int64_t ids[] = {3, 0, 3, 4, 4, 3};
    tsh_ctx *ctx;
    tsh_tensor *t, *in;
    (void)state;
    assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
    t = tsh_tensor_from(ctx, TSH_I64, tsh_shape2(2, 3), tsh_replicated(), ids);
    in = leaf(ctx, tsh_shape2(5, 3), -2, 2, 0);
    check(ctx, "embedding", embedding_fn, &in, 1, t);
    check(ctx, "embedding sparse", embedding_sparse_fn, &in, 1, t);
    in = leaf(ctx, tsh_shape2(3, 5), -2, 2, 0);
    check(ctx, "embedding turned", embedding_turned_fn, &in, 1, t);
    tsh_close(ctx);
}

/* ------------------------------------------------------------------ dropout
 * A mask is keyed by the owner's count of calls. Each evaluation must see the same one, so the
 * count is put back first; that it moves on by itself is tested below. */

static tsh_tensor *dropout_fn(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {
    tsh_module *owner = (tsh_module *)user;
    (void)ctx;
    (void)n;
    owner->dropout_calls = 7;
    return weigh(tsh_dropout(tsh_mul(in[0], in[0]), 0.4, owner));
}

static tsh_tensor *dropout_layer_fn(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {
    tsh_module *layer = (tsh_module *)user;
    (void)ctx;
    (void)n;
    layer->dropout_calls = 3;
    return weigh(tsh_forward(layer, tsh_transpose(in[0], 0, 1)));
}

static tsh_tensor *attention_dropout_fn(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {
    tsh_attention_desc desc;
    (void)ctx;
    (void)n;
    memset(&desc, 0, sizeof desc);
    desc.causal = 1;
    desc.dropout = 0.3;
    desc.owner = (tsh_module *)user;
    desc.owner->dropout_calls = 1;
    return weigh(tsh_attention(in[0], in[1], in[2], &desc));
}

static void test_dropout(void **state) {
    tsh_ctx *ctx;
    tsh_module *layer;
    tsh_tensor *in[3];
    int i;
    (void)state;
    assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
    layer = tsh_add_dropout(tsh_root(ctx), "drop", 0.5);
    in[0] = leaf(ctx, tsh_shape2(5, 7), -2, 2, 0);
    check(ctx, "dropout", dropout_fn, in, 1, layer);
    check(ctx, "dropout layer", dropout_layer_fn, in, 1, layer);
    for (i = 0; i < 3; i++) in[i] = leaf(ctx, tsh_shape4(1, 2, 6, 2), -2, 2, i);
    check(ctx, "attention with dropout", attention_dropout_fn, in, 3, layer);
    tsh_close(ctx);
}

/* The mask itself: what dropout of ones shows is what dropout of x uses, forward and backward. */
static void test_dropout_mask(void **state) {
    tsh_ctx *ctx;
    tsh_module *owner;
    tsh_tensor *x, *ones, *again, *y, *g;
    const tsh_real *m, *next, *v, *slope, *data;
    int64_t i, zeros = 0, moved = 0, n = 1000;
    (void)state;
    assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
    owner = tsh_add_dropout(tsh_root(ctx), "drop", 0.25);
    x = leaf(ctx, tsh_shape1(n), 1, 2, 0);
    ones = tsh_retain_grad(tsh_dropout(tsh_ones(ctx, tsh_shape1(n)), 0.25, owner));
    again = tsh_retain_grad(tsh_dropout(tsh_ones(ctx, tsh_shape1(n)), 0.25, owner));
    owner->dropout_calls = 0;
    y = tsh_retain_grad(tsh_dropout(x, 0.25, owner));
    assert_int_equal(tsh_backward(ctx, tsh_sum(y, TSH_ALL, 0)), TSH_OK);
    g = tsh_grad(x);
    data = (const tsh_real *)tsh_data(ctx, x);
    m = (const tsh_real *)tsh_data(ctx, ones);
    next = (const tsh_real *)tsh_data(ctx, again);
    v = (const tsh_real *)tsh_data(ctx, y);
    slope = (const tsh_real *)tsh_data(ctx, g);
    assert_non_null(slope);
    for (i = 0; i < n; i++) {
        zeros += !(m[i] > 0);
        moved += (m[i] > 0) != (next[i] > 0);
        assert_true(!(m[i] > 0) || m[i] == (tsh_real)(1 / 0.75));
        assert_true(v[i] == (tsh_real)(data[i] * m[i]));
        assert_true(slope[i] == m[i]);
    }
    /* binomial, mean 250 and standard deviation 14: five of them to either side */
    assert_in_range(zeros, 180, 320);
    /* two independent masks differ at 2 * 0.25 * 0.75 of the places: 375, deviation 15 */
    assert_in_range(moved, 300, 450);
    tsh_close(ctx);
}

/* ------------------------------------------------------------------ custom ops */

/* y = a b^2 + user, summed over nothing. */
static void custom_forward(tsh_tensor *const *in, int n, void *const *out, void *user) {
    tsh_real *y = (tsh_real *)out[0];
    tsh_ctx *ctx = tsh_ctx_of(in[0]);
    const tsh_real *a = (const tsh_real *)tsh_data(ctx, in[0]),
                   *b = (const tsh_real *)tsh_data(ctx, in[n - 1]);
    int64_t i;
    for (i = 0; i < tsh_numel(in[0]); i++) y[i] = a[i] * b[i] * b[i] + *(tsh_real *)user;
}

static void custom_backward(tsh_tensor *const *in, int n, const void *const *out,
                            const tsh_real *const *grad_out, tsh_real *const *grad_in, void *user) {
    const tsh_real *dy = grad_out[0];
    const tsh_real *y = (const tsh_real *)out[0];
    tsh_ctx *ctx = tsh_ctx_of(in[0]);
    const tsh_real *a = (const tsh_real *)tsh_data(ctx, in[0]),
                   *b = (const tsh_real *)tsh_data(ctx, in[n - 1]);
    int64_t i;
    (void)user;
    for (i = 0; i < tsh_numel(in[0]); i++) {
        tsh_real square = (y[i] - *(tsh_real *)user) / a[i]; /* uses the kept output too */
        if (grad_in[0]) grad_in[0][i] += dy[i] * square;
        if (grad_in[n - 1]) grad_in[n - 1][i] += dy[i] * 2 * a[i] * b[i];
    }
}

/* A wrong gradient: the first element's is 1 too large. And one that is NaN there. */
static void wrong_backward(tsh_tensor *const *in, int n, const void *const *out,
                           const tsh_real *const *grad_out, tsh_real *const *grad_in, void *user) {
    custom_backward(in, n, out, grad_out, grad_in, user);
    if (grad_in[0]) grad_in[0][0] += 1;
}

static void nan_backward(tsh_tensor *const *in, int n, const void *const *out,
                         const tsh_real *const *grad_out, tsh_real *const *grad_in, void *user) {
    custom_backward(in, n, out, grad_out, grad_in, user);
    if (grad_in[0]) grad_in[0][0] = (tsh_real)NAN;
}

static tsh_real custom_term = 2;

static tsh_custom_op_desc custom_desc(tsh_shape shape) {
    tsh_custom_op_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.name = "my_op";
    desc.out[0].shape = shape;
    desc.out[0].layout = tsh_replicated();
    desc.forward = custom_forward;
    desc.backward = custom_backward;
    desc.user = &custom_term;
    return desc;
}

static tsh_tensor *custom_fn(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {
    return weigh(tsh_custom_op(ctx, in, n, NULL, (const tsh_custom_op_desc *)user));
}

/* A view that is not dense, and the same base twice. */
static tsh_tensor *custom_view_fn(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {
    tsh_tensor *both[2];
    (void)n;
    both[0] = tsh_transpose(tsh_slice(in[0], 0, 0, 3), 0, 1);
    both[1] = tsh_transpose(tsh_slice(in[0], 0, 1, 3), 0, 1);
    return weigh(tsh_custom_op(ctx, both, 2, NULL, (const tsh_custom_op_desc *)user));
}

static void test_custom(void **state) {
    tsh_ctx *ctx;
    tsh_tensor *in[2];
    tsh_custom_op_desc desc = custom_desc(tsh_shape2(3, 4)), turned = custom_desc(tsh_shape2(5, 3));
    double worst;
    int i;
    (void)state;
    assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
    for (i = 0; i < 2; i++) in[i] = leaf(ctx, tsh_shape2(3, 4), 0.5, 2, i);
    check(ctx, "custom", custom_fn, in, 2, &desc);
    check(ctx, "custom of one input twice", custom_fn, in, 1, &desc);
    in[0] = leaf(ctx, tsh_shape2(4, 5), 0.5, 2, 0);
    check(ctx, "custom of views", custom_view_fn, in, 1, &turned);
    /* what gradcheck is for */
    for (i = 0; i < 2; i++) in[i] = leaf(ctx, tsh_shape2(3, 4), 0.5, 2, i);
    desc.backward = wrong_backward;
    worst = tsh_gradcheck(ctx, custom_fn, in, 2, &desc, 0, 0);
    /* off by 1, in units of a gradient of at most 4 */
    assert_true(worst > 0.2);
    desc.backward = nan_backward;
    worst = tsh_gradcheck(ctx, custom_fn, in, 2, &desc, 0, 0);
    assert_false(worst >= 0 && worst <= 1); /* NaN, infinite or negative: not a small deviation */
    desc.backward = NULL;                   /* no gradient flows: the loss depends on no leaf */
    tsh_clear_error(ctx);
    assert_true(tsh_gradcheck(ctx, custom_fn, in, 2, &desc, 0, 0) < 0);
    assert_int_equal(tsh_last_error(ctx)->code, TSH_ERR_STATE);
    tsh_close(ctx);
}

/* ------------------------------------------------------------------ layers */

static tsh_tensor *layer_fn(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {
    (void)ctx;
    (void)n;
    return weigh(tsh_forward((tsh_module *)user, in[0]));
}

/* The layer's input and its parameters, moved off their initial values (ones and zeros too). */
static void check_layer(tsh_ctx *ctx, const char *name, tsh_module *layer, tsh_shape shape) {
    tsh_tensor *in[3], *p;
    int n = 1, i;
    int64_t e;
    assert_int_equal(tsh_materialize(layer), TSH_OK);
    in[0] = leaf(ctx, shape, -2, 2, 0);
    in[n++] = tsh_param(layer, "weight");
    if (layer->param[1]) in[n++] = tsh_param(layer, "bias");
    for (i = 1; i < n; i++) {
        p = in[i];
        for (e = 0; e < tsh_numel(p); e++)
            ((tsh_real *)tsh_data(ctx, p))[e] += (tsh_real)((e * 13 + i) % 17 + 1) / 32;
    }
    check(ctx, name, layer_fn, in, n, layer);
}

static void test_layers(void **state) {
    tsh_ctx *ctx;
    tsh_linear_desc linear;
    tsh_layer_norm_desc norm;
    tsh_rms_norm_desc rms;
    tsh_module *root;
    (void)state;
    assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
    root = tsh_root(ctx);
    memset(&linear, 0, sizeof linear);
    memset(&norm, 0, sizeof norm);
    memset(&rms, 0, sizeof rms);
    linear.in = 5;
    linear.out = 4;
    norm.dim = 6;
    memset(&rms, 0, sizeof rms);
    rms.dim = 6;
    rms.eps = 0.05;
    check_layer(ctx, "linear", tsh_add_linear(root, "a", &linear), tsh_shape3(2, 3, 5));
    linear.bias = TSH_NO;
    check_layer(ctx, "linear without bias", tsh_add_linear(root, "b", &linear), tsh_shape1(5));
    check_layer(ctx, "rms_norm", tsh_add_rms_norm(root, "e", &rms), tsh_shape2(3, 6));
    rms.plus_one = 1;
    check_layer(ctx, "rms_norm plus one", tsh_add_rms_norm(root, "f", &rms), tsh_shape2(3, 6));
    check_layer(ctx, "layer_norm", tsh_add_layer_norm(root, "c", &norm), tsh_shape2(3, 6));
    norm.bias = TSH_NO;
    norm.eps = 0.1;
    check_layer(ctx, "layer_norm without bias", tsh_add_layer_norm(root, "d", &norm),
                tsh_shape2(3, 6));
    tsh_close(ctx);
}

static tsh_tensor *table_fn(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {
    tsh_module *root = tsh_root(ctx);
    tsh_tensor *x;
    (void)n;
    (void)in;
    x = tsh_forward(tsh_find(root, "table"), (tsh_tensor *)user);
    return weigh(tsh_linear(tsh_tanh(x), tsh_param(root, "table.weight"), NULL));
}

/* A table that is looked up and multiplied with: one parameter used twice. */
static void test_tied(void **state) {
    static const int64_t ids[] = {3, 0, 3, 4};
    tsh_ctx *ctx;
    tsh_embedding_desc desc;
    tsh_tensor *t, *in;
    (void)state;
    assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
    memset(&desc, 0, sizeof desc);
    desc.count = 5;
    desc.dim = 3;
    assert_int_equal(tsh_materialize(tsh_add_embedding(tsh_root(ctx), "table", &desc)), TSH_OK);
    t = tsh_tensor_from(ctx, TSH_I64, tsh_shape1(4), tsh_replicated(), ids);
    in = tsh_param(tsh_root(ctx), "table.weight");
    check(ctx, "tied table", table_fn, &in, 1, t);
    tsh_close(ctx);
}

/* ------------------------------------------------------------------ gradcheck itself */

static int calls;
static tsh_tensor *counting_fn(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {
    calls++;
    return op_cube(ctx, in, n, user);
}

static void test_gradcheck(void **state) {
    tsh_ctx *ctx;
    tsh_tensor *in, *plain;
    double coarse, fine;
    (void)state;
    assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
    in = leaf(ctx, tsh_shape1(12), 1, 2, 0);
    /* x^3 errs by h^2 exactly: the step that is asked for is the one taken */
    coarse = tsh_gradcheck(ctx, op_cube, &in, 1, NULL, 0.5, 0);
    fine = tsh_gradcheck(ctx, op_cube, &in, 1, NULL, 0.25, 0);
    assert_true(coarse > 3.9 * fine && coarse < 4.1 * fine);
    calls = 0;
    assert_true(tsh_gradcheck(ctx, counting_fn, &in, 1, NULL, 0, 0) <= room());
    assert_int_equal(calls, 1 + 2 * 12);
    calls = 0;
    assert_true(tsh_gradcheck(ctx, counting_fn, &in, 1, NULL, 0, 3) <= room());
    assert_int_equal(calls, 1 + 2 * 3);
    plain = tsh_tensor_new(ctx, TSH_REAL, tsh_shape1(3), tsh_replicated());
    assert_true(tsh_gradcheck(ctx, op_cube, &plain, 1, NULL, 0, 0) < 0);
    assert_int_equal(tsh_last_error(ctx)->code, TSH_ERR_ARGUMENT);
    assert_non_null(strstr(tsh_last_error(ctx)->message, "tsh_requires_grad"));
    tsh_close(ctx);
}

static int report(void **state) {
    (void)state;
    print_message("largest deviation of all: %.3g (room %.3g)\n", worst_of_all, room());
    return 0;
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_map),          cmocka_unit_test(test_reduce_and_view),
        cmocka_unit_test(test_matrix),       cmocka_unit_test(test_loss),
        cmocka_unit_test(test_embedding),    cmocka_unit_test(test_dropout),
        cmocka_unit_test(test_dropout_mask), cmocka_unit_test(test_custom),
        cmocka_unit_test(test_layers),       cmocka_unit_test(test_tied),
        cmocka_unit_test(test_gradcheck),
    };
    return cmocka_run_group_tests(tests, NULL, report);
}
