/* Values and gradients of every op that PyTorch has, of a small GPT-2, and of the optimisers,
 * against files that tests/golden/generate.py wrote with PyTorch; all by the kernels of every
 * instruction set that this processor has. */
/* build: nosimd */
#include "../../tshard.h"
#include "../support/golden.h"
#include "../support/library.h"

#include <float.h>
#include <math.h>

#define COUNT(a) ((int)(sizeof(a) / sizeof((a)[0])))

enum { INPUTS = 5, PATH = 64 };

static int golden_isa; /* the kernels that are tested now */

static tsh_ctx *open_ctx(void) {
    tsh_ctx *ctx;
    assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
    library_set_isa(ctx, golden_isa);
    return ctx;
}

/* ------------------------------------------------------------------ comparing
 * The golden values are exact to half an ulp. A result that goes through k roundings, or sums k
 * terms of magnitude one in random order (k terms of size sqrt k together, errors growing as their
 * square root), is within k eps of it, relative to the values' magnitude or to 1. */

static int close_to(double got, double want, double k) {
    double room = k * (double)FLT_EPSILON * (1 + fabs(want));
    return got == want || (isnan(got) && isnan(want)) || fabs(got - want) <= room;
}

static void compare_values(const char *name, const char *what, const void *got, tsh_dtype dtype,
                           const golden_tensor *want, double k) {
    int64_t i, a, b;
    for (i = 0; i < want->count; i++) {
        if (want->dtype == TSH_I64) {
            memcpy(&a, (const char *)got + i * 8, 8);
            memcpy(&b, (const char *)want->data + i * 8, 8);
            if (a != b)
                fail_msg("%s.%s[%ld] is %ld, not %ld", name, what, (long)i, (long)a, (long)b);
        } else {
            double x = dtype == TSH_F32 ? (double)((const float *)got)[i] : 0,
                   y = (double)((const float *)want->data)[i];
            if (!close_to(x, y, k))
                fail_msg("%s.%s[%ld] is %.9g, not %.9g (off by %.3g eps)", name, what, (long)i, x,
                         y, fabs(x - y) / (1 + fabs(y)) / (double)FLT_EPSILON);
        }
    }
}

/* Shape, dtype and values of t. */
static void compare(tsh_ctx *ctx, const char *name, const char *what, tsh_tensor *t,
                    const golden_tensor *want, double k) {
    size_t bytes = (size_t)want->count * tsh_dtype_size(want->dtype);
    tsh_shape shape = tsh_shape_of(t);
    void *got = malloc(bytes + 1);
    int d;
    if (!t || !tsh_ok(ctx))
        fail_msg("%s.%s: %s", name, what, t ? tsh_last_error(ctx)->message : "is NULL");
    assert_non_null(got);
    if (tsh_dtype_of(t) != want->dtype || shape.ndim != want->shape.ndim)
        fail_msg("%s.%s: another dtype or number of dimensions (%d)", name, what, shape.ndim);
    for (d = 0; d < shape.ndim; d++)
        if (shape.dim[d] != want->shape.dim[d])
            fail_msg("%s.%s: dimension %d is %ld, not %ld", name, what, d, (long)shape.dim[d],
                     (long)want->shape.dim[d]);
    if (tsh_read(ctx, t, TSH_LOCAL, got, bytes) != TSH_OK)
        fail_msg("%s.%s: %s", name, what, tsh_last_error(ctx)->message);
    compare_values(name, what, got, want->dtype, want, k);
    free(got);
}

/* ------------------------------------------------------------------ cases */

typedef tsh_tensor *(*case_fn)(tsh_tensor **in, const int *arg);

typedef struct test_case {
    const char *name;
    case_fn fn;
    double k; /* see above; 0: 8 roundings */
    int arg[5];
} test_case;

/* The value of one case and, where it has a cotangent, the gradients of its inputs. */
static void run_case(const golden_file *file, const test_case *c) {
    tsh_ctx *ctx = open_ctx();
    golden_tensor g;
    tsh_tensor *in[INPUTS], *out, *loss;
    char what[16];
    double k = c->k > 0 ? c->k : 8;
    int i, n;
    for (n = 0; n < INPUTS; n++) {
        (void)snprintf(what, sizeof what, "in%d", n);
        if (!golden_find(file, c->name, what, &g)) break;
        in[n] = golden_load(ctx, &g);
        if (g.dtype == TSH_F32) assert_ptr_equal(tsh_requires_grad(in[n], 1), in[n]);
    }
    assert_true(n > 0);
    out = c->fn(in, c->arg);
    g = golden_get(file, c->name, "out");
    compare(ctx, c->name, "out", out, &g, k);
    if (golden_find(file, c->name, "w", &g)) {
        loss = tsh_sum(tsh_mul(out, golden_load(ctx, &g)), TSH_ALL, 0);
        if (tsh_backward(ctx, loss) != TSH_OK)
            fail_msg("%s: %s", c->name, tsh_last_error(ctx)->message);
        for (i = 0; i < n; i++) {
            (void)snprintf(what, sizeof what, "grad%d", i);
            if (golden_find(file, c->name, what, &g))
                compare(ctx, c->name, what, tsh_grad(in[i]), &g, k);
        }
    }
    tsh_close(ctx);
}

/* How many cases a golden file holds: each must be run. */
static int count_cases(const golden_file *file) {
    const char *at = file->header;
    int n = 0;
    while ((at = strstr(at, ".out\":{")) != NULL) {
        n++;
        at++;
    }
    return n;
}

static void run_cases(const char *name, const test_case *cases, int n) {
    golden_file file = golden_open(name);
    int i;
    assert_int_equal(n, count_cases(&file));
    for (i = 0; i < n; i++) run_case(&file, &cases[i]);
    golden_finish(&file);
}

/* ------------------------------------------------------------------ elementwise */

#define UNARY(op)                                                                                  \
    static tsh_tensor *do_##op(tsh_tensor **in, const int *arg) {                                  \
        (void)arg;                                                                                 \
        return tsh_##op(in[0]);                                                                    \
    }
#define BINARY(op)                                                                                 \
    static tsh_tensor *do_##op(tsh_tensor **in, const int *arg) {                                  \
        (void)arg;                                                                                 \
        return tsh_##op(in[0], in[1]);                                                             \
    }
UNARY(neg)
UNARY(exp)
UNARY(log)
UNARY(sqrt)
UNARY(sigmoid)
UNARY(tanh)
UNARY(relu)
UNARY(erf)
UNARY(gelu)
UNARY(gelu_tanh)
UNARY(silu)
BINARY(add)
BINARY(sub)
BINARY(mul)
BINARY(div)
BINARY(pow)
BINARY(matmul)

static tsh_tensor *do_embedding(tsh_tensor **in, const int *arg) {
    (void)arg;
    return tsh_embedding(in[0], in[1], NULL);
}

static tsh_tensor *do_scale(tsh_tensor **in, const int *arg) {
    return tsh_scale(in[0], arg[0] / 100.0);
}

static tsh_tensor *do_add_scalar(tsh_tensor **in, const int *arg) {
    return tsh_add_scalar(in[0], arg[0] / 100.0);
}

static tsh_tensor *do_pow_scalar(tsh_tensor **in, const int *arg) {
    return tsh_pow_scalar(in[0], arg[0] / 100.0);
}

static tsh_tensor *do_where(tsh_tensor **in, const int *arg) {
    (void)arg;
    return tsh_where(tsh_cast(in[0], TSH_I32), in[1], in[2]);
}

static tsh_tensor *do_cast(tsh_tensor **in, const int *arg) {
    (void)arg;
    return tsh_cast(tsh_cast(in[0], TSH_I32), TSH_I64);
}

/* x used five times: x x + x - x / (x x + 1). */
static tsh_tensor *do_twice(tsh_tensor **in, const int *arg) {
    tsh_tensor *x = in[0], *square = tsh_mul(x, x);
    (void)arg;
    return tsh_sub(tsh_add(square, x), tsh_div(x, tsh_add_scalar(square, 1)));
}

#define CASE(name, op, k)                                                                          \
    {                                                                                              \
        name, do_##op, k, {                                                                        \
            0                                                                                      \
        }                                                                                          \
    }
#define PAIRS(op, k)                                                                               \
    CASE(#op "_same", op, k), CASE(#op "_row", op, k), CASE(#op "_column", op, k),                 \
        CASE(#op "_outer", op, k), CASE(#op "_single", op, k)

static void test_map(void **state) {
    static const test_case cases[] = {
        PAIRS(add, 16), /* broadcast gradients sum up to 12 terms */
        PAIRS(sub, 16),
        PAIRS(mul, 16),
        PAIRS(div, 32), /* and divisors down to 0.5 enlarge them: g a / b^2 */
        PAIRS(pow, 64), /* 2.5^2.5 ln 2.5 = 9 times a cotangent of 2 */
        {"neg", do_neg, 0, {0}},
        {"scale", do_scale, 0, {-175}},
        {"add_scalar", do_add_scalar, 0, {30}},
        {"cube", do_pow_scalar, 0, {300}},
        {"square", do_pow_scalar, 0, {200}},
        {"power", do_pow_scalar, 0, {-150}},
        {"exp", do_exp, 0, {0}},
        {"log", do_log, 0, {0}},
        {"sqrt", do_sqrt, 0, {0}},
        {"sigmoid", do_sigmoid, 0, {0}},
        {"tanh", do_tanh, 0, {0}},
        {"relu", do_relu, 0, {0}},
        {"erf", do_erf, 0, {0}},
        {"gelu", do_gelu, 0, {0}},
        {"gelu_tanh", do_gelu_tanh, 0, {0}},
        {"silu", do_silu, 0, {0}},
        {"where", do_where, 16, {0}},
        {"cast", do_cast, 0, {0}},
        {"twice", do_twice, 16, {0}},
    };
    (void)state;
    run_cases("map", cases, COUNT(cases));
}

/* ------------------------------------------------------------------ along a dimension */

/* arg: dim, keepdim. */
#define REDUCTION(op)                                                                              \
    static tsh_tensor *do_##op(tsh_tensor **in, const int *arg) {                                  \
        return tsh_##op(in[0], arg[0], arg[1]);                                                    \
    }
REDUCTION(sum)
REDUCTION(mean)
REDUCTION(max)
REDUCTION(argmax)

static tsh_tensor *do_softmax(tsh_tensor **in, const int *arg) {
    return tsh_softmax(in[0], arg[0]);
}

static tsh_tensor *do_log_softmax(tsh_tensor **in, const int *arg) {
    return tsh_log_softmax(in[0], arg[0]);
}

static const test_case reductions[] = {
#define DIMS(op)                                                                                   \
    {#op "_0_0", do_##op, 0, {0, 0}}, {#op "_0_1", do_##op, 0, {0, 1}},                            \
        {#op "_1_0", do_##op, 0, {1, 0}}, {#op "_1_1", do_##op, 0, {1, 1}},                        \
        {#op "_-1_0", do_##op, 0, {-1, 0}}, {#op "_-1_1", do_##op, 0, {-1, 1}},
    DIMS(sum)    /* */
    DIMS(mean)   /* */
    DIMS(max)    /* */
    DIMS(argmax) /* */
#undef DIMS
    {"sum_all", do_sum, 60, {TSH_ALL, 0}},
    {"mean_all", do_mean, 0, {TSH_ALL, 0}},
    {"max_all", do_max, 0, {TSH_ALL, 0}},
    {"argmax_all", do_argmax, 0, {TSH_ALL, 0}},
    {"softmax_0", do_softmax, 0, {0}},
    {"softmax_1", do_softmax, 0, {1}},
    {"softmax_-1", do_softmax, 0, {-1}},
    {"softmax_long", do_softmax, 0, {-1}},
    {"log_softmax_0", do_log_softmax, 16, {0}},
    {"log_softmax_1", do_log_softmax, 16, {1}},
    {"log_softmax_-1", do_log_softmax, 16, {-1}},
    {"log_softmax_long", do_log_softmax, 131, {-1}}, /* backward sums 131 cotangents */
    {"sum_long", do_sum, 64, {TSH_ALL, 0}},          /* 16 lanes and blocks of 4096, in double */
    {"mean_long", do_mean, 0, {0, 0}},
};

static void test_reduce(void **state) {
    (void)state;
    run_cases("reduce", reductions, COUNT(reductions));
}

/* ------------------------------------------------------------------ views */

static tsh_tensor *do_permute(tsh_tensor **in, const int *arg) {
    static const int order[] = {2, 0, 3, 1};
    (void)arg;
    return tsh_scale(tsh_permute(in[0], order), 2);
}

static tsh_tensor *do_turned(tsh_tensor **in, const int *arg) {
    (void)arg;
    return tsh_transpose(tsh_reshape(tsh_transpose(in[0], 0, 2), tsh_shape2(4, 6)), 0, 1);
}

static tsh_tensor *do_regroup(tsh_tensor **in, const int *arg) {
    tsh_tensor *x = tsh_reshape(in[0], tsh_shape4(3, -1, 2, 1));
    (void)arg;
    return tsh_reshape(tsh_transpose(x, 1, -2), tsh_shape2(-1, 4));
}

static tsh_tensor *do_slice(tsh_tensor **in, const int *arg) {
    tsh_tensor *a = tsh_transpose(tsh_slice(in[0], 1, 1, 3), 1, 2),
               *b = tsh_transpose(tsh_slice(in[0], 1, 2, 3), 1, 2);
    (void)arg;
    return tsh_mul(tsh_slice(a, 1, 2, 3), tsh_slice(b, 1, 0, 3));
}

static tsh_tensor *do_split(tsh_tensor **in, const int *arg) {
    tsh_tensor *part[3];
    (void)arg;
    assert_int_equal(tsh_split(in[0], 1, 3, part), TSH_OK);
    return tsh_add(tsh_mul(part[0], part[1]), tsh_exp(part[2]));
}

static tsh_tensor *do_concat(tsh_tensor **in, const int *arg) {
    tsh_tensor *part[3];
    (void)arg;
    part[0] = part[2] = in[0];
    part[1] = tsh_transpose(in[1], 0, 1);
    return tsh_concat(part, 3, 1);
}

static tsh_tensor *do_chain(tsh_tensor **in, const int *arg) {
    tsh_tensor *part[2], *x;
    (void)arg;
    part[0] = tsh_reshape(in[0], tsh_shape2(2, 6));
    part[1] = in[1];
    x = tsh_slice(tsh_transpose(tsh_concat(part, 2, 0), 0, 1), 0, 1, 4);
    return tsh_tanh(tsh_reshape(x, tsh_shape2(2, 10)));
}

/* (2, 5, 18) -> q, k, v of (2, 3 heads, 5, 2) -> q k^T v. */
static tsh_tensor *do_heads(tsh_tensor **in, const int *arg) {
    tsh_tensor *part[3];
    int i;
    (void)arg;
    assert_int_equal(tsh_split(in[0], -1, 3, part), TSH_OK);
    for (i = 0; i < 3; i++)
        part[i] = tsh_transpose(tsh_reshape(part[i], tsh_shape4(2, 5, 3, 2)), 1, 2);
    return tsh_matmul(tsh_matmul(part[0], tsh_transpose(part[1], -1, -2)), part[2]);
}

static void test_view(void **state) {
    static const test_case cases[] = {
        {"permute", do_permute, 0, {0}}, {"turned", do_turned, 0, {0}},
        {"regroup", do_regroup, 0, {0}}, {"slice", do_slice, 0, {0}},
        {"split", do_split, 0, {0}},     {"concat", do_concat, 0, {0}},
        {"chain", do_chain, 0, {0}},     {"heads", do_heads, 16, {0}},
    };
    (void)state;
    run_cases("view", cases, COUNT(cases));
}

/* ------------------------------------------------------------------ matrices */

static tsh_tensor *do_matmul_turned(tsh_tensor **in, const int *arg) {
    (void)arg;
    return tsh_matmul(tsh_transpose(in[0], 0, 1), tsh_transpose(in[1], 0, 1));
}

static tsh_tensor *do_matmul_self(tsh_tensor **in, const int *arg) {
    (void)arg;
    return tsh_matmul(in[0], in[0]);
}

/* arg: 1: without a bias. */
static tsh_tensor *do_linear(tsh_tensor **in, const int *arg) {
    return tsh_linear(in[0], in[1], arg[0] ? NULL : in[2]);
}

static tsh_tensor *do_linear_turned(tsh_tensor **in, const int *arg) {
    (void)arg;
    return tsh_linear(tsh_transpose(in[0], 0, 1), in[1], in[2]);
}

static void test_matmul(void **state) {
    static const test_case cases[] = {
        {"matmul_2d", do_matmul, 16, {0}},        {"matmul_odd", do_matmul, 67, {0}},
        {"matmul_batch", do_matmul, 16, {0}},     {"matmul_broadcast", do_matmul, 24, {0}},
        {"matmul_shared", do_matmul, 24, {0}}, /* dB sums 24 rows */
        {"matmul_wide", do_matmul, 16, {0}},      {"matmul_turned", do_matmul_turned, 16, {0}},
        {"matmul_self", do_matmul_self, 16, {0}}, {"linear_1d", do_linear, 16, {0}},
        {"linear_2d", do_linear, 16, {0}},        {"linear_3d", do_linear, 16, {0}},
        {"linear_1d_plain", do_linear, 16, {1}},  {"linear_2d_plain", do_linear, 16, {1}},
        {"linear_3d_plain", do_linear, 16, {1}},  {"linear_turned", do_linear_turned, 16, {0}},
        {"embedding", do_embedding, 0, {0}},      {"embedding_1d", do_embedding, 0, {0}},
    };
    (void)state;
    run_cases("matmul", cases, COUNT(cases));
}

/* ------------------------------------------------------------------ lookups with options */

typedef struct lookup_case {
    const char *name;
    tsh_lookup_desc desc;
} lookup_case;

static void run_lookup(const golden_file *file, const lookup_case *c) {
    tsh_ctx *ctx = open_ctx();
    golden_tensor ids = golden_get(file, c->name, "in0"), table = golden_get(file, c->name, "in1");
    golden_tensor g = golden_get(file, c->name, "w");
    tsh_tensor *w = tsh_requires_grad(golden_load(ctx, &table), 1), *out;
    out = tsh_retain_grad(tsh_embedding(golden_load(ctx, &ids), w, &c->desc));
    if (tsh_backward(ctx, tsh_sum(tsh_mul(out, golden_load(ctx, &g)), TSH_ALL, 0)) != TSH_OK)
        fail_msg("%s: %s", c->name, tsh_last_error(ctx)->message);
    g = golden_get(file, c->name, "out");
    compare(ctx, c->name, "out", out, &g, 4);
    g = golden_get(file, c->name, "grad1");
    compare(ctx, c->name, "grad1", tsh_grad(w), &g, 4);
    g = golden_get(file, c->name, "after");
    compare(ctx, c->name, "after", w, &g, 4);
    tsh_close(ctx);
}

static void test_lookup(void **state) {
    /* padding, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse */
    static const lookup_case cases[] = {
        {"plain", {0, 0, 0, 0, 0, 0}},         {"padding", {1, 3, 0, 0, 0, 0}},
        {"padding_back", {1, -1, 0, 0, 0, 0}}, {"norm_1", {0, 0, 1, 1, 0, 0}},
        {"norm_2", {0, 0, 1, 0, 0, 0}},        {"norm_inf", {0, 0, 1, HUGE_VAL, 0, 0}},
        {"norm_odd", {0, 0, 2.5, 3.5, 0, 0}},  {"freq", {0, 0, 0, 0, 1, 0}},
        {"sparse", {0, 0, 0, 0, 0, 1}},        {"sparse_padding", {1, 0, 0, 0, 0, 1}},
        {"all", {1, -4, 1, 0, 1, 0}},
    };
    golden_file file = golden_open("lookup");
    int i;
    (void)state;
    assert_int_equal(COUNT(cases), count_cases(&file));
    for (i = 0; i < COUNT(cases); i++) run_lookup(&file, &cases[i]);
    golden_finish(&file);
}

/* ------------------------------------------------------------------ norm, attention, loss */

/* arg: with a bias, eps in percent. */
static tsh_tensor *do_norm(tsh_tensor **in, const int *arg) {
    return tsh_layer_norm(in[0], in[1], arg[0] ? in[2] : NULL, arg[1] / 100.0);
}

/* arg: eps in percent, weight + 1. */
static tsh_tensor *do_rms(tsh_tensor **in, const int *arg) {
    tsh_rms_norm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.eps = arg[0] / 100.0;
    desc.plus_one = arg[1];
    return arg[1] ? tsh_rms_norm_with(in[0], in[1], &desc)
                  : tsh_rms_norm(in[0], in[1], arg[0] / 100.0);
}

static void test_norm(void **state) {
    /* 1 / sqrt(var) up to 4 enlarges the roundings of about 33 terms */
    static const test_case cases[] = {
        {"norm_small", do_norm, 16, {1, 0}}, {"norm_small_plain", do_norm, 16, {0, 0}},
        {"norm_odd", do_norm, 33, {1, 0}},   {"norm_odd_plain", do_norm, 33, {0, 0}},
        {"norm_row", do_norm, 16, {1, 0}},   {"norm_row_plain", do_norm, 16, {0, 0}},
        {"norm_eps", do_norm, 16, {1, 25}},  {"rms_small", do_rms, 16, {0}},
        {"rms_odd", do_rms, 33, {0}},        {"rms_row", do_rms, 16, {0}},
        {"rms_eps", do_rms, 16, {25}},       {"rms_one", do_rms, 33, {25, 1}},
    };
    (void)state;
    run_cases("norm", cases, COUNT(cases));
}

/* arg: interleaved, dims, and 1: base 500 from position 4000 on; 2: rows from 17, 0 and 3 on. */
static tsh_tensor *do_rope(tsh_tensor **in, const int *arg) {
    static const int64_t starts[] = {17, 0, 3};
    tsh_rope_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.interleaved = arg[0];
    desc.dims = arg[1];
    desc.base = arg[2] == 1 ? 500 : 0;
    desc.start = arg[2] == 1 ? 4000 : 0;
    desc.starts = arg[2] == 2 ? starts : NULL;
    return tsh_rope(in[0], arg[0] || arg[1] || arg[2] ? &desc : NULL);
}

static void test_rope(void **state) {
    static const test_case cases[] = {
        {"rope_halves", do_rope, 4, {0, 0, 0}},      {"rope_halves_flat", do_rope, 4, {0, 0, 0}},
        {"rope_halves_part", do_rope, 4, {0, 4, 0}}, {"rope_halves_late", do_rope, 4, {0, 6, 1}},
        {"rope_pairs", do_rope, 4, {1, 0, 0}},       {"rope_pairs_flat", do_rope, 4, {1, 0, 0}},
        {"rope_pairs_part", do_rope, 4, {1, 4, 0}},  {"rope_pairs_late", do_rope, 4, {1, 6, 1}},
        {"rope_halves_rows", do_rope, 4, {0, 0, 2}}, {"rope_pairs_rows", do_rope, 4, {1, 0, 2}},
    };
    (void)state;
    run_cases("rope", cases, COUNT(cases));
}

/* arg: causal, scale in percent. */
static tsh_tensor *do_attention(tsh_tensor **in, const int *arg) {
    tsh_attention_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.causal = arg[0];
    desc.scale = arg[1] / 100.0;
    return tsh_attention(in[0], in[1], in[2], arg[0] || arg[1] ? &desc : NULL);
}

/* arg: 1: the mask is added in eighths; 0: it keeps. */
static tsh_tensor *do_mask(tsh_tensor **in, const int *arg) {
    tsh_attention_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.mask = arg[0] ? tsh_scale(tsh_cast(in[0], TSH_REAL), 0.125) : tsh_cast(in[0], TSH_I32);
    return tsh_attention(in[1], in[2], in[3], &desc);
}

static void test_attention(void **state) {
    /* Softmax weights sum to 1, so outputs carry few roundings; gradients of keys sum over up to
     * 130 queries with weights that sum to about 130 x 2 at most. */
    static const test_case cases[] = {
        {"attention_small_full", do_attention, 16, {0, 0}},
        {"attention_tiles_full", do_attention, 130, {0, 0}},
        {"attention_late_full", do_attention, 16, {0, 0}},
        {"attention_one_full", do_attention, 16, {0, 0}},
        {"attention_wide_full", do_attention, 67, {0, 0}},
        {"attention_small_causal", do_attention, 16, {1, 0}},
        {"attention_tiles_causal", do_attention, 130, {1, 0}},
        {"attention_late_causal", do_attention, 16, {1, 0}},
        {"attention_one_causal", do_attention, 16, {1, 0}},
        {"attention_wide_causal", do_attention, 67, {1, 0}},
        {"attention_mask_added", do_mask, 16, {1}},
        {"attention_mask_kept", do_mask, 16, {0}},
        {"attention_scale", do_attention, 16, {1, 150}},
        {"attention_grouped_two", do_attention, 16, {1, 0}},
        {"attention_grouped_one", do_attention, 16, {1, 0}},
        {"attention_grouped_tiles", do_attention, 140, {1, 0}},
        /* scores up to 19 are rounded to 2^-20 before exp, and weigh keys up to 37 */
        {"attention_rising", do_attention, 150, {0, 0}},
    };
    (void)state;
    run_cases("attention", cases, COUNT(cases));
}

/* arg: causal, window, soft cap in tenths, 1 + the index of the bias, of the sinks. */
static tsh_tensor *do_options(tsh_tensor **in, const int *arg) {
    tsh_attention_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.causal = arg[0];
    desc.window = arg[1];
    desc.soft_cap = arg[2] / 10.0;
    if (arg[3]) desc.mask = in[arg[3] - 1];
    if (arg[4]) desc.sinks = in[arg[4] - 1];
    return tsh_attention(in[0], in[1], in[2], &desc);
}

static void test_attention_options(void **state) {
    static const test_case cases[] = {
        {"window_causal", do_options, 140, {1, 20}},
        {"window_both", do_options, 140, {0, 33}},
        {"window_one", do_options, 16, {1, 1}},
        {"window_late", do_options, 40, {1, 40}},
        {"window_all", do_options, 18, {1, 9}},
        {"cap", do_options, 16, {1, 0, 15}},
        {"sinks", do_options, 16, {1, 0, 0, 0, 4}},
        {"sinks_late", do_options, 16, {1, 0, 0, 0, 4}},
        {"bias_heads", do_options, 16, {0, 0, 0, 4}},
        {"bias_rows", do_options, 16, {0, 0, 0, 4}},
        {"bias_plain", do_options, 16, {0, 0, 0, 4}},
        {"bias_keys", do_options, 16, {0, 0, 0, 4}},
        {"bias_slopes", do_options, 16, {0, 0, 0, 4}},
        {"bias_full", do_options, 16, {0, 0, 0, 4}},
        {"together", do_options, 18, {1, 4, 20, 4, 5}},
    };
    (void)state;
    run_cases("attention_options", cases, COUNT(cases));
}

/* arg: reduction, ignore (0: desc NULL where the mean, else -100; 1: 2). */
static tsh_tensor *do_loss(tsh_tensor **in, const int *arg) {
    tsh_cross_entropy_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.reduction = (tsh_reduction)arg[0];
    desc.ignore = 1;
    desc.ignore_index = arg[1] ? 2 : -100;
    return tsh_cross_entropy(in[0], in[1], !arg[0] && !arg[1] ? NULL : &desc);
}

static void test_loss(void **state) {
    static const test_case cases[] = {
#define KINDS(name, reduction)                                                                     \
    {"loss_" name, do_loss, 16, {reduction, 0}},                                                   \
        {"loss_" name "_outside", do_loss, 16, {reduction, 0}},                                    \
        {"loss_" name "_inside", do_loss, 16, {reduction, 1}},                                     \
        {"loss_" name "_3d", do_loss, 37, {reduction, 0}},                                         \
        {"loss_" name "_steep", do_loss, 16, {reduction, 0}},
        KINDS("none", TSH_REDUCE_NONE) /* */
        KINDS("sum", TSH_REDUCE_SUM)   /* */
        KINDS("mean", TSH_REDUCE_MEAN) /* */
#undef KINDS
    };
    (void)state;
    run_cases("loss", cases, COUNT(cases));
}

/* ------------------------------------------------------------------ a GPT-2 of two blocks */

enum { VOCABULARY = 11, WIDTH = 8, HEADS = 2, BLOCKS = 2, BATCH = 2, LENGTH = 6 };

static void fill_param(const char *path, tsh_tensor *param, void *user) {
    golden_tensor g = golden_get((const golden_file *)user, "model", path);
    assert_int_equal(tsh_write(tsh_ctx_of(param), param, TSH_GLOBAL, g.data, (size_t)g.count * 4),
                     TSH_OK);
}

/* Every gradient sums over 12 positions and goes through some 20 ops of values near 1; the errors
 * of one op pass through the next as they are or smaller, but layer norms enlarge them by
 * 1 / sqrt(var), about 2. 256 eps = 3e-5. */
static const double model_k = 256;

static void check_param(const char *path, tsh_tensor *param, void *user) {
    char what[PATH];
    golden_tensor g;
    (void)snprintf(what, sizeof what, "grad.%s", path);
    g = golden_get((const golden_file *)user, "model", what);
    compare(tsh_ctx_of(param), "model", what, tsh_grad(param), &g, model_k);
}

static void add_linear(tsh_module *parent, const char *name, int64_t in, int64_t out) {
    tsh_linear_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.in = in;
    desc.out = out;
    assert_non_null(tsh_add_linear(parent, name, &desc));
}

static void add_norm(tsh_module *parent, const char *name) {
    tsh_layer_norm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.dim = WIDTH;
    assert_non_null(tsh_add_layer_norm(parent, name, &desc));
}

static tsh_module *add_table(tsh_module *parent, const char *name, int64_t count) {
    tsh_embedding_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.count = count;
    desc.dim = WIDTH;
    return tsh_add_embedding(parent, name, &desc);
}

static tsh_tensor *block_forward(tsh_module *h, tsh_tensor **in, int n, void *user) {
    tsh_attention_desc causal;
    tsh_tensor *x = in[0], *part[3], *y;
    int i;
    (void)n;
    (void)user;
    memset(&causal, 0, sizeof causal);
    causal.causal = 1;
    y = tsh_forward(tsh_find(h, "c_attn"), tsh_forward(tsh_find(h, "ln_1"), x));
    (void)tsh_split(y, 2, 3, part);
    for (i = 0; i < 3; i++)
        part[i] = tsh_transpose(
            tsh_reshape(part[i], tsh_shape4(BATCH, LENGTH, HEADS, WIDTH / HEADS)), 1, 2);
    y = tsh_transpose(tsh_attention(part[0], part[1], part[2], &causal), 1, 2);
    y = tsh_forward(tsh_find(h, "c_proj"), tsh_reshape(y, tsh_shape3(BATCH, LENGTH, WIDTH)));
    x = tsh_add(x, y);
    y = tsh_forward(tsh_find(h, "c_fc"), tsh_forward(tsh_find(h, "ln_2"), x));
    return tsh_add(x, tsh_forward(tsh_find(h, "mlp_proj"), tsh_gelu_tanh(y)));
}

static void build_model(tsh_module *root) {
    tsh_module_desc desc;
    char name[8];
    int i;
    memset(&desc, 0, sizeof desc);
    desc.forward = block_forward;
    assert_non_null(add_table(root, "wte", VOCABULARY));
    assert_non_null(add_table(root, "wpe", LENGTH));
    for (i = 0; i < BLOCKS; i++) {
        tsh_module *h;
        (void)snprintf(name, sizeof name, "h%d", i);
        h = tsh_add_module(root, name, &desc);
        add_norm(h, "ln_1");
        add_linear(h, "c_attn", WIDTH, 3 * WIDTH);
        add_linear(h, "c_proj", WIDTH, WIDTH);
        add_norm(h, "ln_2");
        add_linear(h, "c_fc", WIDTH, 4 * WIDTH);
        add_linear(h, "mlp_proj", 4 * WIDTH, WIDTH);
    }
    add_norm(root, "ln_f");
}

static void test_model(void **state) {
    tsh_ctx *ctx = open_ctx();
    golden_file file = golden_open("model");
    golden_tensor ids = golden_get(&file, "model", "ids"), g;
    tsh_module *root = tsh_root(ctx);
    tsh_tensor *x, *wte, *logits, *loss;
    (void)state;
    build_model(root);
    wte = tsh_param(root, "wte.weight");
    assert_int_equal(tsh_materialize(root), TSH_OK);
    tsh_each_param(root, fill_param, &file);
    x = tsh_forward(tsh_find(root, "wte"), golden_load(ctx, &ids));
    x = tsh_add(x, tsh_forward(tsh_find(root, "wpe"), tsh_arange(ctx, TSH_I64, 0, LENGTH, 1)));
    x = tsh_forward(tsh_find(root, "h1"), tsh_forward(tsh_find(root, "h0"), x));
    logits = tsh_linear(tsh_forward(tsh_find(root, "ln_f"), x), wte, NULL);
    g = golden_get(&file, "model", "logits");
    compare(ctx, "model", "logits", logits, &g, model_k);
    g = golden_get(&file, "model", "target");
    loss = tsh_cross_entropy(logits, golden_load(ctx, &g), NULL);
    g = golden_get(&file, "model", "loss");
    compare(ctx, "model", "loss", loss, &g, model_k);
    assert_int_equal(tsh_backward(ctx, loss), TSH_OK);
    tsh_each_param(root, check_param, &file);
    assert_true(tsh_ok(ctx));
    golden_finish(&file);
    tsh_close(ctx);
}

/* ------------------------------------------------------------------ optimisers */

enum { STEPS = 5 };

typedef struct optim_case {
    const char *name;
    tsh_optim_desc desc;
} optim_case;

/* Slice `step` of a golden stack of tensors. */
static golden_tensor golden_step(golden_tensor g, int step) {
    int d;
    g.count /= g.shape.dim[0];
    g.data = (const float *)g.data + g.count * step;
    for (d = 1; d < g.shape.ndim; d++) g.shape.dim[d - 1] = g.shape.dim[d];
    g.shape.ndim--;
    return g;
}

/* A layer with weight (4, 3) and bias (4) of the golden start values. */
static tsh_module *optim_layer(tsh_ctx *ctx, const golden_file *file) {
    static const char *const name[] = {"weight", "bias"};
    tsh_module *layer;
    char what[PATH];
    int i;
    add_linear(tsh_root(ctx), "layer", 3, 4);
    layer = tsh_find(tsh_root(ctx), "layer");
    assert_int_equal(tsh_materialize(layer), TSH_OK);
    for (i = 0; i < 2; i++) {
        golden_tensor g;
        (void)snprintf(what, sizeof what, "start%d", i);
        g = golden_get(file, "all", what);
        assert_int_equal(
            tsh_write(ctx, tsh_param(layer, name[i]), TSH_GLOBAL, g.data, (size_t)g.count * 4),
            TSH_OK);
    }
    return layer;
}

/* Gives both parameters the gradients of a step: those of sum(param * gradient). */
static void optim_gradients(tsh_ctx *ctx, const golden_file *file, tsh_module *layer, int step) {
    golden_tensor w = golden_step(golden_get(file, "all", "grad0"), step),
                  b = golden_step(golden_get(file, "all", "grad1"), step);
    tsh_tensor *loss, *gw = golden_load(ctx, &w), *gb = golden_load(ctx, &b);
    loss = tsh_add(tsh_sum(tsh_mul(tsh_param(layer, "weight"), gw), TSH_ALL, 0),
                   tsh_sum(tsh_mul(tsh_param(layer, "bias"), gb), TSH_ALL, 0));
    tsh_zero_grads(tsh_root(ctx));
    assert_int_equal(tsh_backward(ctx, loss), TSH_OK);
    tsh_tensor_free(gw);
    tsh_tensor_free(gb);
}

/* Values stay near 1; a step adds about 6 roundings, of which Adam's early steps (m / sqrt v, near
 * 1, times a rate of 0.05) show a twentieth. */
static const double optim_k = 16;

static void run_optim(const golden_file *file, const optim_case *c) {
    tsh_ctx *ctx = open_ctx();
    tsh_module *layer = optim_layer(ctx, file);
    tsh_optim *optim = tsh_optim_new(layer, &c->desc);
    golden_tensor g;
    int step;
    assert_non_null(optim);
    for (step = 0; step < STEPS; step++) {
        optim_gradients(ctx, file, layer, step);
        assert_int_equal(tsh_optim_step(optim), TSH_OK);
        g = golden_step(golden_get(file, c->name, "after0"), step);
        compare(ctx, c->name, "after0", tsh_param(layer, "weight"), &g, optim_k);
        g = golden_step(golden_get(file, c->name, "after1"), step);
        compare(ctx, c->name, "after1", tsh_param(layer, "bias"), &g, optim_k);
        if (golden_find(file, c->name, "norms", &g))
            assert_true(
                close_to(tsh_optim_state(optim).norm, (double)((const float *)g.data)[step], 2));
        assert_int_equal(tsh_step_end(ctx), TSH_OK);
    }
    assert_int_equal(tsh_optim_state(optim).steps, STEPS);
    tsh_close(ctx);
}

/* Clipping by a call of one's own, without an optimiser. */
static void run_clip(const golden_file *file) {
    tsh_ctx *ctx = open_ctx();
    tsh_module *layer = optim_layer(ctx, file);
    golden_tensor g;
    double norm = 0;
    optim_gradients(ctx, file, layer, 0);
    assert_int_equal(tsh_clip_grad_norm(layer, 1.5, &norm), TSH_OK);
    g = golden_get(file, "clip", "norm");
    assert_true(close_to(norm, (double)*(const float *)g.data, 2));
    assert_true(norm > 1.5);
    g = golden_get(file, "clip", "grad0");
    compare(ctx, "clip", "grad0", tsh_grad(tsh_param(layer, "weight")), &g, 4);
    g = golden_get(file, "clip", "grad1");
    compare(ctx, "clip", "grad1", tsh_grad(tsh_param(layer, "bias")), &g, 4);
    /* below the limit nothing changes, bit for bit */
    optim_gradients(ctx, file, layer, 0);
    assert_int_equal(tsh_clip_grad_norm(layer, norm + 1, NULL), TSH_OK);
    g = golden_step(golden_get(file, "all", "grad0"), 0);
    compare(ctx, "clip", "unclipped", tsh_grad(tsh_param(layer, "weight")), &g, 0);
    tsh_close(ctx);
}

static void test_optim(void **state) {
    static const optim_case cases[] = {
        {"sgd", {.kind = TSH_SGD, .lr = 0.1}},
        {"sgd_momentum", {.kind = TSH_SGD, .lr = 0.1, .momentum = 0.9}},
        {"sgd_nesterov", {.kind = TSH_SGD, .lr = 0.1, .momentum = 0.9, .nesterov = 1}},
        {"sgd_decay", {.kind = TSH_SGD, .lr = 0.1, .momentum = 0.5, .weight_decay = 0.2}},
        {"adam", {.kind = TSH_ADAM, .lr = 0.05}},
        {"adam_decay",
         {.kind = TSH_ADAM,
          .lr = 0.05,
          .beta1 = 0.7,
          .beta2 = 0.9,
          .eps = 1e-3,
          .weight_decay = 0.2}},
        {"adamw", {.kind = TSH_ADAMW, .lr = 0.05, .weight_decay = 0.3}},
        {"adamw_clip",
         {.kind = TSH_ADAMW,
          .lr = 0.05,
          .beta1 = 0.8,
          .beta2 = 0.95,
          .weight_decay = 0.1,
          .clip_norm = 1.5}},
        {"sgd_clip", {.kind = TSH_SGD, .lr = 0.1, .clip_norm = 1.5}},
    };
    golden_file file = golden_open("optim");
    int i;
    (void)state;
    for (i = 0; i < COUNT(cases); i++) run_optim(&file, &cases[i]);
    run_clip(&file);
    golden_finish(&file);
}

static void run_sparse(const golden_file *file, const optim_case *c) {
    tsh_ctx *ctx = open_ctx();
    const tsh_embedding_desc desc = {.count = 6, .dim = 3, .lookup = {.sparse = 1}};
    tsh_module *layer = tsh_add_embedding(tsh_root(ctx), "table", &desc);
    tsh_tensor *table = tsh_param(layer, "weight"), *ids, *w;
    tsh_optim *optim = tsh_optim_new(layer, &c->desc);
    golden_tensor g = golden_get(file, "all", "start");
    int step;
    assert_int_equal(tsh_materialize(layer), TSH_OK);
    assert_int_equal(tsh_write(ctx, table, TSH_GLOBAL, g.data, (size_t)g.count * 4), TSH_OK);
    for (step = 0; step < STEPS; step++) {
        golden_tensor i = golden_get(file, "all", "ids"), x = golden_get(file, "all", "w");
        i.count = 4;
        i.data = (const int64_t *)i.data + 4 * step;
        i.shape = tsh_shape1(4);
        x = golden_step(x, step);
        ids = golden_load(ctx, &i);
        w = golden_load(ctx, &x);
        tsh_zero_grads(layer);
        tsh_backward(ctx, tsh_sum(tsh_mul(tsh_forward(layer, ids), w), TSH_ALL, 0));
        assert_int_equal(tsh_optim_step(optim), TSH_OK);
        g = golden_step(golden_get(file, c->name, "after"), step);
        compare(ctx, c->name, "after", table, &g, optim_k);
        assert_int_equal(tsh_step_end(ctx), TSH_OK);
    }
    tsh_close(ctx);
}

static void test_sparse(void **state) {
    static const optim_case cases[] = {
        {"sgd", {.kind = TSH_SGD, .lr = 0.1}},
        {"adam", {.kind = TSH_ADAM, .lr = 0.05}},
        {"adam_eps", {.kind = TSH_ADAM, .lr = 0.05, .beta1 = 0.8, .beta2 = 0.9, .eps = 0.1}},
    };
    golden_file file = golden_open("sparse");
    int i;
    (void)state;
    for (i = 0; i < COUNT(cases); i++) run_sparse(&file, &cases[i]);
    golden_finish(&file);
}

/* ------------------------------------------------------------------ bf16
 * Ops round once: an output is the bf16 next to the exact value, or what the rounding of float
 * before makes of a tie; PyTorch, which rounds in between, is within two units. Gradients are
 * float; those that are computed from the rounded output (arg[2] is 1) are as far off as that.
 * Attention (arg[3] is 1) rounds probabilities to bf16 for its second product, as PyTorch does. */

/* t, converted to bf16, as a leaf. */
static tsh_tensor *half_leaf(tsh_ctx *ctx, const golden_tensor *g) {
    tsh_tensor *x = golden_load(ctx, g);
    return g->dtype == TSH_I64 ? x : tsh_requires_grad(tsh_keep(tsh_cast(x, TSH_BF16)), 1);
}

static double half_most(const golden_tensor *g) {
    double most = 0;
    int64_t e;
    for (e = 0; e < g->count; e++) most = fmax(most, fabs((double)((const float *)g->data)[e]));
    return most;
}

/* The values of t differ from golden ones by at most `room` of their size, and `least` more. */
static void half_compare_to(tsh_ctx *ctx, const char *name, const char *what, tsh_tensor *t,
                            const golden_tensor *want, double room, double least) {
    const float *y = (const float *)want->data;
    const tsh_real *x;
    int64_t i;
    if (!t) fail_msg("%s.%s: %s", name, what, tsh_last_error(ctx)->message);
    t = tsh_cast(tsh_detach(t), TSH_REAL);
    assert_int_equal(tsh_numel(t), want->count);
    x = (const tsh_real *)tsh_data(ctx, t);
    for (i = 0; i < want->count; i++)
        if (!(fabs((double)x[i] - (double)y[i]) <= room * fabs((double)y[i]) + least))
            fail_msg("%s.%s[%ld] is %.9g, not %.9g", name, what, (long)i, (double)x[i],
                     (double)y[i]);
}

static void run_half(const golden_file *file, const test_case *c) {
    const double ulp = 1.0 / 256; /* half a unit in the last place of 1; of 1.99: twice that */
    tsh_ctx *ctx = open_ctx();
    golden_tensor g;
    tsh_tensor *in[INPUTS], *out, *loss;
    char what[16];
    int i, n;
    for (n = 0; n < INPUTS; n++) {
        (void)snprintf(what, sizeof what, "in%d", n);
        if (!golden_find(file, c->name, what, &g)) break;
        in[n] = half_leaf(ctx, &g);
    }
    out = c->fn(in, c->arg);
    if (!out) fail_msg("%s: %s", c->name, tsh_last_error(ctx)->message);
    assert_int_equal(tsh_dtype_of(out), c->k > 0 ? TSH_F32 : TSH_BF16);
    g = golden_get(file, c->name, "out");
    half_compare_to(ctx, c->name, "out", out, &g, c->k > 0 ? 1e-5 : ulp,
                    c->arg[3] ? ulp * half_most(&g) : 1e-6);
    g = golden_get(file, c->name, "torch");
    half_compare_to(ctx, c->name, "torch", out, &g, 4 * ulp, ulp * half_most(&g));
    g = golden_get(file, c->name, "w");
    loss = tsh_sum(tsh_mul(tsh_cast(out, TSH_REAL), golden_load(ctx, &g)), TSH_ALL, 0);
    if (tsh_backward(ctx, loss) != TSH_OK)
        fail_msg("%s: %s", c->name, tsh_last_error(ctx)->message);
    for (i = 0; i < n; i++) {
        (void)snprintf(what, sizeof what, "grad%d", i);
        if (!golden_find(file, c->name, what, &g)) continue;
        assert_int_equal(tsh_dtype_of(tsh_grad(in[i])), TSH_F32);
        half_compare_to(ctx, c->name, what, tsh_grad(in[i]), &g, 1e-5,
                        half_most(&g) * (c->arg[2] ? 3 * ulp : 1e-5));
    }
    tsh_close(ctx);
}

/* AdamW on a bf16 parameter: PyTorch's on its float master weights, rounded, in every step. */
static void run_master(const golden_file *file) {
    const tsh_param_desc desc = {.dtype = TSH_BF16};
    const tsh_optim_desc adamw = {.kind = TSH_ADAMW, .lr = 2e-4, .weight_decay = 0.1};
    golden_tensor start = golden_get(file, "master", "start");
    golden_tensor grads = golden_get(file, "master", "grads"), g;
    golden_tensor after = golden_get(file, "master", "after");
    const int64_t steps = grads.shape.dim[0];
    tsh_ctx *ctx = open_ctx();
    tsh_tensor *p = tsh_add_param(tsh_root(ctx), "p", start.shape, &desc);
    tsh_tensor *first = tsh_keep(tsh_cast(golden_load(ctx, &start), TSH_BF16));
    tsh_optim *optim = tsh_optim_new(tsh_root(ctx), &adamw);
    int step;
    assert_int_equal(tsh_materialize(tsh_root(ctx)), TSH_OK);
    assert_int_equal(
        tsh_write(ctx, p, TSH_GLOBAL, tsh_data(ctx, first), (size_t)start.count * 2), TSH_OK);
    for (step = 0; step < (int)steps; step++) {
        tsh_tensor *given;
        g = golden_step(grads, step);
        given = golden_load(ctx, &g);
        assert_int_equal(tsh_backward(ctx, tsh_sum(tsh_mul(p, given), TSH_ALL, 0)), TSH_OK);
        assert_int_equal(tsh_optim_step(optim), TSH_OK);
        tsh_zero_grads(tsh_root(ctx));
        tsh_tensor_free(given);
        assert_int_equal(tsh_step_end(ctx), TSH_OK);
        g = golden_step(after, step);
        half_compare_to(ctx, "master", "after", p, &g, 1.0 / 256 + 1e-5, 0);
        assert_int_equal(tsh_step_end(ctx), TSH_OK);
    }
    tsh_close(ctx);
}

static void test_half(void **state) {
    static const test_case cases[] = {
        {"add", do_add, 0, {0}},
        {"mul", do_mul, 0, {0}},
        {"div", do_div, 0, {0}},
        {"exp", do_exp, 0, {0, 0, 1}},
        {"sigmoid", do_sigmoid, 0, {0, 0, 1}},
        {"tanh", do_tanh, 0, {0, 0, 1}},
        {"gelu", do_gelu, 0, {0}},
        {"gelu_tanh", do_gelu_tanh, 0, {0}},
        {"silu", do_silu, 0, {0}},
        {"sum", do_sum, 0, {1, 0}},
        {"mean", do_mean, 0, {0, 0}},
        {"softmax", do_softmax, 0, {-1, 0, 1}},
        {"log_softmax", do_log_softmax, 0, {-1, 0, 1}},
        {"norm", do_norm, 0, {1}},
        {"rms", do_rms, 0, {0}},
        {"matmul", do_matmul, 0, {0}},
        {"linear", do_linear, 0, {0}},
        {"embedding", do_embedding, 0, {0}},
        {"attention", do_attention, 0, {1, 0, 1, 1}},
        {"loss", do_loss, 1, {0}}, /* k: a loss is float */
    };
    golden_file file = golden_open("half");
    int i;
    (void)state;
    assert_int_equal(COUNT(cases), count_cases(&file));
    for (i = 0; i < COUNT(cases); i++) run_half(&file, &cases[i]);
    run_master(&file);
    golden_finish(&file);
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_map),    cmocka_unit_test(test_reduce),
        cmocka_unit_test(test_view),   cmocka_unit_test(test_matmul),
        cmocka_unit_test(test_norm),   cmocka_unit_test(test_attention),
        cmocka_unit_test(test_attention_options),
        cmocka_unit_test(test_loss),   cmocka_unit_test(test_model),
        cmocka_unit_test(test_optim),  cmocka_unit_test(test_rope),
        cmocka_unit_test(test_lookup), cmocka_unit_test(test_sparse),
        cmocka_unit_test(test_half),
    };
    tsh_ctx *ctx;
    int isa, failed = 0;
    char name[32];
    if (tsh_open(NULL, &ctx) != TSH_OK) return 1;
    isa = library_isa(ctx);
    tsh_close(ctx);
    for (; isa >= 0; isa--) {
        golden_isa = isa;
        (void)snprintf(name, sizeof name, "op/golden, kernels %d", isa);
        failed += cmocka_run_group_tests_name(name, tests, NULL, NULL);
    }
    return failed;
}
