/* Convolutions, plain and transposed, in one and two dimensions: values and gradients against
 * PyTorch's, by the kernels of every instruction set; against central differences; in every layout
 * and at every degree against the dense ones; with any number of threads the same bits; and what is
 * refused, with its sentence. */
/* build: double */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/golden.h"
#include "../support/library.h"
#include "../support/ranks.h"

typedef tsh_tensor *(*conv_fn)(tsh_tensor *x, tsh_tensor *w, tsh_tensor *b,
                               const tsh_conv_options *options);

static const struct named_conv {
    const char *name;
    conv_fn fn;
} convs[] = {{"conv1d", tsh_conv1d},
             {"conv2d", tsh_conv2d},
             {"convT1d", tsh_conv_transpose1d},
             {"convT2d", tsh_conv_transpose2d}};

/* ------------------------------------------------------------- against PyTorch */

static void compare(const char *name, const char *what, tsh_ctx *ctx, tsh_tensor *t,
                    const golden_tensor *want) {
    double *got = ranks_values(ctx, t);
    int64_t i;
    if (!got) fail_msg("%s.%s: %s", name, what, tsh_last_error(ctx)->message);
    assert_int_equal(tsh_numel(t), want->count);
    for (i = 0; i < want->count; i++)
        if (got[i] != (double)((const float *)want->data)[i])
            fail_msg("%s.%s[%ld] is %.9g, not %.9g", name, what, (long)i, got[i],
                     (double)((const float *)want->data)[i]);
    free(got);
}

static void golden_case(tsh_ctx *ctx, const golden_file *g, const char *name, conv_fn fn) {
    const golden_tensor options = golden_get(g, name, "options"), out = golden_get(g, name, "out"),
                        grad = golden_get(g, name, "g");
    tsh_tensor *in[3] = {NULL, NULL, NULL}, *y, *w;
    tsh_conv_options o;
    golden_tensor t;
    char what[16];
    int i;
    memcpy(&o, options.data, sizeof o);
    for (i = 0; i < 3; i++) {
        (void)snprintf(what, sizeof what, "in%d", i);
        if (golden_find(g, name, what, &t)) in[i] = tsh_requires_grad(golden_load(ctx, &t), 1);
    }
    y = fn(in[0], in[1], in[2], &o);
    compare(name, "out", ctx, y, &out);
    w = golden_load(ctx, &grad);
    assert_int_equal(tsh_backward(ctx, tsh_sum(tsh_mul(y, w), TSH_ALL, 0)), TSH_OK);
    for (i = 0; i < 3; i++) {
        (void)snprintf(what, sizeof what, "grad%d", i);
        if (!golden_find(g, name, what, &t)) continue;
        compare(name, what, ctx, tsh_grad(in[i]), &t);
        tsh_tensor_free(in[i]);
    }
    tsh_tensor_free(w);
    assert_int_equal(tsh_step_end(ctx), TSH_OK);
}

static void values_and_gradients_are_pytorchs(void **state) {
    golden_file g = golden_open("conv");
    tsh_ctx *ctx;
    int i, c, isa, best = 0;
    (void)state;
    for (isa = 0; isa <= best; isa++) {
        assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
        if (!isa) best = library_isa(ctx);
        library_set_isa(ctx, isa);
        for (c = 0; c < COUNT(convs); c++)
            for (i = 0; i < 11; i++) {
                char name[32];
                golden_tensor t;
                (void)snprintf(name, sizeof name, "%s_%d", convs[c].name, i);
                if (golden_find(&g, name, "out", &t)) golden_case(ctx, &g, name, convs[c].fn);
            }
        tsh_close(ctx);
    }
    golden_close(&g);
}

/* --------------------------------------------------- against central differences */

typedef struct check_case {
    conv_fn fn;
    tsh_shape x, w;
    int64_t bias; /* channels; 0: none */
    tsh_conv_options options;
} check_case;

static tsh_tensor *check_fn(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {
    const check_case *c = (const check_case *)user;
    return ranks_loss(
        ctx, tsh_tanh(tsh_scale(c->fn(in[0], in[1], n > 2 ? in[2] : NULL, &c->options), 0.02)));
}

static tsh_tensor *small(tsh_ctx *ctx, tsh_shape shape, uint64_t seed) {
    spec s = {shape, tsh_replicated(), 0};
    return tsh_requires_grad(spec_tensor(ctx, &s, seed), 1);
}

static void gradients_are_those_of_differences(void **state) {
    check_case cases[] = {
        {tsh_conv1d, {3, {2, 4, 7}}, {3, {6, 2, 3}}, 6, {{2, 0}, {1, 0}, {0, 0}, {2, 0}, 2}},
        {tsh_conv2d, {4, {2, 2, 5, 4}}, {4, {3, 2, 3, 2}}, 3, {{2, 1}, {1, 1}, {0, 0}, {1, 2}, 1}},
        {tsh_conv2d, {4, {1, 3, 4, 5}}, {4, {6, 1, 2, 3}}, 6, {{1, 2}, {1, 0}, {0, 0}, {1, 1}, 3}},
        {tsh_conv_transpose1d,
         {3, {2, 4, 5}},
         {3, {4, 3, 3}},
         6,
         {{3, 0}, {1, 0}, {2, 0}, {1, 0}, 2}},
        {tsh_conv_transpose2d,
         {4, {1, 2, 3, 4}},
         {4, {2, 3, 3, 2}},
         0,
         {{2, 3}, {1, 0}, {1, 2}, {2, 1}, 1}},
    };
    tsh_ctx *ctx;
    int i;
    (void)state;
    assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
    for (i = 0; i < COUNT(cases); i++) {
        check_case *c = &cases[i];
        tsh_tensor *in[3] = {small(ctx, c->x, 1), small(ctx, c->w, 2), NULL};
        double worst;
        if (c->bias) in[2] = small(ctx, tsh_shape1(c->bias), 3);
        worst = tsh_gradcheck(ctx, check_fn, in, c->bias ? 3 : 2, c, 0, 0);
        if (worst < 0 || worst > (sizeof(tsh_real) == 4 ? 1e-2 : 1e-8))
            fail_msg("case %d: off by %g (%s)", i, worst, tsh_last_error(ctx)->message);
    }
    tsh_close(ctx);
}

/* ------------------------------------------------------------- layouts */

/* "conv2d": its name, then options: padding 1, "stride n", "groups n", "out n" */
static tsh_tensor *op_conv(probe *p) {
    tsh_conv_options o;
    int i;
    memset(&o, 0, sizeof o);
    o.groups = probe_number(p, "groups");
    o.stride[0] = o.stride[1] = probe_number(p, "stride");
    o.output_padding[0] = probe_number(p, "extra");
    o.padding[0] = o.padding[1] = 1;
    for (i = 0; i < COUNT(convs); i++)
        if (probe_has(p, convs[i].name)) return convs[i].fn(p->in[0], p->in[1], p->in[2], &o);
    return NULL;
}

#define EXACT(fn, arg, out, ...) TRIAL(op_##fn, arg, out, 0, 0, __VA_ARGS__)

/* stride, padding, output_padding, groups */
#define OPTIONS(s0, s1, p0, p1, e0, e1, g)                                                         \
    { {s0, s1}, {p0, p1}, {e0, e1}, {0, 0}, g }
#define NONE OPTIONS(0, 0, 0, 0, 0, 0, 0)

static const trial rows[] = {
    EXACT(conv, "conv2d", "R", "2,3,4,5 R", "n,3,3,3 R", "n R"),
    EXACT(conv, "conv2d stride 2", "S(0)", "n,3,4,5 S(0)", "2,3,3,3 R", "2 R"),
    EXACT(conv, "conv2d", "P", "2,2,4,4 P", "3,2,3,3 R"),
    EXACT(conv, "conv2d", "S(1)", "2,3,4,5 R", "n,3,3,3 S(0)", "n S(0)"),
    EXACT(conv, "conv2d stride 2", "S(1, unit 2)", "2,3,4,5 R", "2n,3,3,3 S(0, unit 2)",
          "2n S(0, unit 2)"),
    EXACT(conv, "conv2d", "R", "2,n,4,5 S(1)", "4,n,3,3 S(1)", "4 R"),
    EXACT(conv, "conv2d stride 2", "R", "2,n,4,5 R", "4,n,3,3 S(1)", "4 R"),
    EXACT(conv, "conv2d groups 2n", "S(1)", "2,2n,4,5 S(1)", "2n,1,3,3 S(0)", "2n S(0)"),
    EXACT(conv, "conv2d groups 2n", "S(1, unit 2)", "2,4n,4,5 R", "4n,2,3,3 S(0, unit 2)",
          "4n S(0, unit 2)"),
    EXACT(conv, "conv2d groups 2n", "S(1, unit 6)", "2,2n,4,5 R", "12n,1,3,3 S(0, unit 6)"),
    EXACT(conv, "conv1d stride 2", "S(1)", "2,3,9 R", "n,3,3 S(0)", "n S(0)"),
    EXACT(conv, "conv1d", "R", "2,n,6 S(1)", "2,n,3 S(1)", "2 R"),
    EXACT(conv, "conv1d", "S(0)", "n,2,6 S(0)", "2,2,3 R", "2 R"),
    EXACT(conv, "convT2d stride 2", "S(1)", "2,3,3,4 R", "3,n,3,3 S(1)", "n S(0)"),
    EXACT(conv, "convT2d stride 2 extra 1", "R", "2,n,3,4 S(1)", "n,3,3,3 S(0)", "3 R"),
    EXACT(conv, "convT2d groups 2n", "S(1, unit 3)", "2,4n,3,4 R", "4n,3,3,3 S(0, unit 2)",
          "6n S(0, unit 3)"),
    EXACT(conv, "convT1d stride 3", "R", "2,n,4 R", "n,3,3 S(0)", "3 R"),
    EXACT(conv, "convT1d stride 2", "S(0)", "n,2,4 S(0)", "2,3,3 R", "3 R"),
};

static void every_layout_gives_the_dense_result(void **state) {
    static const int64_t lengths[] = {1, 2, 3, 8, 11};
    (void)state;
    trials_prove(rows, COUNT(rows), lengths, COUNT(lengths));
}

/* ------------------------------------------------------------- refusals */

typedef struct refusal {
    const char *in[3];
    tsh_conv_options options;
    tsh_result code;
    const char *sentence;
} refusal;

static int refuse(tsh_ctx *ctx, void *user) {
    const refusal *r = (const refusal *)user;
    tsh_tensor *in[3] = {NULL, NULL, NULL};
    int i;
    for (i = 0; i < 3 && r->in[i]; i++) {
        spec s = spec_parse(r->in[i], 1);
        in[i] = spec_tensor(ctx, &s, (uint64_t)i);
    }
    CHECK_TRUE(!tsh_conv2d(in[0], in[1], in[2], &r->options));
    CHECK(ranks_says(ctx, r->code, r->sentence), "not: %s", r->sentence);
    (void)tsh_barrier(tsh_world(ctx));
    return 0;
}

static void what_does_not_fit_is_refused(void **state) {
    static const refusal all[] = {
        {{"2,3,4,5 S(2)", "2,3,3,3 R"}, NONE, TSH_ERR_LAYOUT, "the kernel slides along"},
        {{"2,3,4,5 S(1)", "2,3,3,3 R"}, NONE, TSH_ERR_LAYOUT, "sharded channels want"},
        {{"2,3,4,5 S(0)", "2,3,3,3 S(0)"}, NONE, TSH_ERR_LAYOUT, "takes a replicated input"},
        {{"2,3,4,5 R", "2,3,3,3 S(2)"}, NONE, TSH_ERR_LAYOUT, "output or its input channels"},
        {{"2,4,4,5 R", "4,2,3,3 S(1)"},
         OPTIONS(0, 0, 0, 0, 0, 0, 2),
         TSH_ERR_LAYOUT,
         "in whole groups"},
        {{"2,3,4,5 P", "2,3,3,3 R", "2 R"}, NONE, TSH_ERR_LAYOUT, "added once per rank"},
        {{"2,3,4,5 R", "2,3,3,3 P"}, NONE, TSH_ERR_LAYOUT, "complete the weight"},
        {{"2,3,4,5 R", "4,3,3,3 S(0)", "4 R"}, NONE, TSH_ERR_LAYOUT, "the bias is sharded like"},
        {{"2,3,4,5 R", "2,4,3,3 R"}, NONE, TSH_ERR_SHAPE, "do not fit with 1 groups"},
        {{"3,4,5 R", "2,4,3,3 R"}, NONE, TSH_ERR_SHAPE, "takes (N, in, H, W)"},
        {{"2,4,4,5 R", "3,2,3,3 R"},
         OPTIONS(0, 0, 0, 0, 0, 0, 2),
         TSH_ERR_SHAPE,
         "divide by groups"},
        {{"2,3,4,5 R", "2,3,3,3 R", "3 R"}, NONE, TSH_ERR_SHAPE, "bias has 3"},
        {{"2,3,2,5 R", "2,3,3,3 R"}, NONE, TSH_ERR_SHAPE, "leaves no output of 2"},
        {{"2,3,4,5 R", "2,3,3,3 R"},
         OPTIONS(-1, 0, 0, 0, 0, 0, 0),
         TSH_ERR_ARGUMENT,
         "stride[0] is -1"},
        {{"2,3,4,5 R", "2,3,3,3 R"},
         OPTIONS(0, 0, 0, -2, 0, 0, 0),
         TSH_ERR_ARGUMENT,
         "padding[1] is -2"},
        {{"2,3,4,5 R", "2,3,3,3 R"},
         OPTIONS(0, 0, 0, 0, 1, 0, 0),
         TSH_ERR_ARGUMENT,
         "output_padding 1 is to be 0"},
        {{"2,3,4,5 R", "2,3,3,3 R"},
         OPTIONS(0, 0, 0, 0, 0, 0, -1),
         TSH_ERR_ARGUMENT,
         "groups is -1"},
    };
    int i, ranks;
    (void)state;
    for (i = 0; i < COUNT(all); i++)
        for (ranks = 1; ranks <= 2; ranks++) {
            refusal r = all[i];
            ranks_run(ranks, refuse, &r);
        }
}

/* ------------------------------------------------ threads, dtypes, odd inputs */

/* y and the gradients of x and w, with so many threads. */
static void with_threads(int threads, int64_t batch, conv_fn fn, double *out[3]) {
    tsh_conv_options o;
    tsh_desc desc;
    tsh_ctx *ctx;
    tsh_tensor *x, *w, *y;
    int64_t e;
    memset(&desc, 0, sizeof desc);
    memset(&o, 0, sizeof o);
    desc.threads = threads;
    o.stride[0] = 2;
    o.padding[0] = o.padding[1] = 1;
    assert_int_equal(tsh_open(&desc, &ctx), TSH_OK);
    x = small(ctx, tsh_shape4(batch, 20, 17, 18), 1);
    w = small(ctx, tsh_shape4(20, 20, 3, 3), 2);
    for (e = 0; e < tsh_numel(w); e++) /* sums that are rounded */
        ((tsh_real *)tsh_data(ctx, w))[e] /= (tsh_real)7;
    y = fn(x, w, NULL, &o);
    out[0] = ranks_values(ctx, y);
    assert_int_equal(tsh_backward(ctx, tsh_sum(tsh_mul(y, y), TSH_ALL, 0)), TSH_OK);
    out[1] = ranks_values(ctx, tsh_grad(x));
    out[2] = ranks_values(ctx, tsh_grad(w));
    tsh_close(ctx);
}

static void no_bit_depends_on_threads(void **state) {
    const int64_t map = 20 * 9 * 18, image = 20 * 33 * 18;
    int t, i, c;
    (void)state;
    for (c = 1; c < 4; c += 2)
        for (i = 1; i <= 3; i += 2) {
            double *want[3], *got[3];
            with_threads(1, i, convs[c].fn, want);
            for (t = 2; t <= 5; t += 3) {
                with_threads(t, i, convs[c].fn, got);
                assert_memory_equal(got[0], want[0], (size_t)(i * (c == 1 ? map : image)) * 8);
                assert_memory_equal(got[1], want[1], (size_t)(i * 20 * 17 * 18) * 8);
                assert_memory_equal(got[2], want[2], 20 * 20 * 9 * 8);
                free(got[0]);
                free(got[1]);
                free(got[2]);
            }
            free(want[0]);
            free(want[1]);
            free(want[2]);
        }
}

/* In bf16 the result is that of floats, rounded once. */
static void short_floats_are_rounded_once(void **state) {
    tsh_ctx *ctx;
    tsh_tensor *x, *w, *b, *y, *wide;
    double *got, *want;
    int64_t e;
    int d;
    (void)state;
    assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
    for (d = 0; d < 2; d++) {
        const tsh_dtype dtype = d ? TSH_F16 : TSH_BF16;
        x = tsh_cast(small(ctx, tsh_shape4(2, 3, 5, 6), 1), dtype);
        w = tsh_cast(tsh_scale(small(ctx, tsh_shape4(4, 3, 3, 3), 2), 0.3), dtype);
        b = tsh_cast(small(ctx, tsh_shape1(4), 3), dtype);
        y = tsh_conv2d(x, w, b, NULL);
        assert_true(y && tsh_dtype_of(y) == dtype);
        wide = tsh_cast(
            tsh_conv2d(tsh_cast(x, TSH_REAL), tsh_cast(w, TSH_REAL), tsh_cast(b, TSH_REAL), NULL),
            dtype);
        got = ranks_values(ctx, tsh_cast(y, TSH_REAL));
        want = ranks_values(ctx, tsh_cast(wide, TSH_REAL));
        assert_non_null(got);
        assert_non_null(want);
        for (e = 0; e < tsh_numel(y); e++) assert_true(got[e] == want[e]);
        assert_int_equal(tsh_backward(ctx, tsh_cast(tsh_sum(tsh_mul(y, y), TSH_ALL, 0), TSH_REAL)),
                         TSH_OK);
        free(got);
        free(want);
        assert_int_equal(tsh_step_end(ctx), TSH_OK);
    }
    tsh_close(ctx);
}

/* A transposed view as input and weight; no images; no channels; an infinity that meets padding. */
static void odd_inputs_are_computed(void **state) {
    tsh_ctx *ctx;
    tsh_tensor *x, *w, *y, *z;
    double *a, *b;
    tsh_conv_options o;
    int64_t e;
    (void)state;
    memset(&o, 0, sizeof o);
    o.padding[0] = o.padding[1] = 1;
    assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
    x = small(ctx, tsh_shape4(2, 5, 4, 3), 1);
    w = small(ctx, tsh_shape4(3, 3, 2, 3), 2);
    y = tsh_conv2d(tsh_transpose(x, 1, 3), tsh_transpose(w, 2, 3), NULL, &o);
    z = tsh_conv2d(tsh_clone(tsh_transpose(x, 1, 3)), tsh_clone(tsh_transpose(w, 2, 3)), NULL, &o);
    a = ranks_values(ctx, y);
    b = ranks_values(ctx, z);
    assert_true(a && b);
    for (e = 0; e < tsh_numel(y); e++) assert_true(a[e] == b[e]);
    free(a);
    free(b);
    assert_int_equal(tsh_backward(ctx, tsh_sum(tsh_sub(y, z), TSH_ALL, 0)), TSH_OK);
    a = ranks_values(ctx, tsh_grad(x));
    b = ranks_values(ctx, tsh_grad(w));
    for (e = 0; e < tsh_numel(x); e++) assert_true(a[e] == 0);
    for (e = 0; e < tsh_numel(w); e++) assert_true(b[e] == 0);
    free(a);
    free(b);
    x = small(ctx, tsh_shape4(0, 3, 4, 4), 1);
    tsh_zero_grad(w);
    y = tsh_conv2d(x, w, NULL, &o);
    assert_true(y && tsh_size(y, 0) == 0 && tsh_size(y, 1) == 3);
    assert_int_equal(tsh_backward(ctx, tsh_sum(y, TSH_ALL, 0)), TSH_OK);
    b = ranks_values(ctx, tsh_grad(w));
    for (e = 0; e < tsh_numel(w); e++) assert_true(b[e] == 0);
    free(b);
    x = small(ctx, tsh_shape4(1, 0, 4, 4), 1);
    w = small(ctx, tsh_shape4(2, 0, 3, 3), 1);
    y = tsh_conv2d(x, w, small(ctx, tsh_shape1(2), 9), &o);
    a = ranks_values(ctx, y);
    assert_true(a && a[0] == ranks_number(9, 0) && a[31] == ranks_number(9, 1));
    free(a);
    x = small(ctx, tsh_shape4(1, 1, 1, 40), 1);
    w = small(ctx, tsh_shape4(8, 1, 3, 3), 2);
    ((tsh_real *)tsh_data(ctx, x))[39] = (tsh_real)INFINITY;
    a = ranks_values(ctx, tsh_conv2d(x, w, NULL, &o));
    assert_true(a && !isnan(a[37]) && !isinf(a[37]) && isinf(a[38]) && isinf(a[39]));
    free(a);
    tsh_close(ctx);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(values_and_gradients_are_pytorchs),
        cmocka_unit_test(gradients_are_those_of_differences),
        cmocka_unit_test(every_layout_gives_the_dense_result),
        cmocka_unit_test(what_does_not_fit_is_refused),
        cmocka_unit_test(no_bit_depends_on_threads),
        cmocka_unit_test(short_floats_are_rounded_once),
        cmocka_unit_test(odd_inputs_are_computed),
    };
    return cmocka_run_group_tests_name("op/conv", tests, NULL, NULL);
}
