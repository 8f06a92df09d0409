/* Pools, interpolation and pixel shuffle: values and gradients against PyTorch's, by the kernels of
 * every instruction set; against central differences; in every layout and at every degree against
 * the dense ones; odd inputs; and what is refused, with its sentence. */
/* build: double */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/golden.h"
#include "../support/library.h"
#include "../support/ranks.h"

/* ------------------------------------------------------------- against PyTorch */

/* The op of a golden case, from the name and the numbers in its "options". */
static tsh_tensor *run_case(const char *name, tsh_tensor *x, const int64_t *o) {
    const int one = strstr(name, "1d") != NULL;
    tsh_pool_options pool;
    tsh_interpolate_options size;
    memset(&pool, 0, sizeof pool);
    memcpy(pool.kernel, o, sizeof pool.kernel);
    if (strncmp(name, "max", 3) == 0 || strncmp(name, "avg", 3) == 0) {
        memcpy(pool.stride, o + 2, sizeof pool.stride);
        memcpy(pool.padding, o + 4, sizeof pool.padding);
        memcpy(pool.dilation, o + 6, sizeof pool.dilation);
        pool.ceil_mode = (int)o[8];
    }
    if (strncmp(name, "max", 3) == 0)
        return one ? tsh_max_pool1d(x, &pool) : tsh_max_pool2d(x, &pool);
    if (strncmp(name, "avg", 3) == 0) {
        pool.count_include_pad = (tsh_choice)o[9];
        pool.divisor_override = o[10];
        return one ? tsh_avg_pool1d(x, &pool) : tsh_avg_pool2d(x, &pool);
    }
    if (strncmp(name, "adaptive", 8) == 0)
        return one ? tsh_adaptive_avg_pool1d(x, o[1]) : tsh_adaptive_avg_pool2d(x, o[0], o[1]);
    if (strncmp(name, "shuffle", 7) == 0) return tsh_pixel_shuffle(x, o[0]);
    memset(&size, 0, sizeof size);
    size.size[0] = o[0];
    size.size[1] = o[1];
    size.scale[0] = (double)o[2] / 100;
    size.scale[1] = (double)o[3] / 100;
    size.mode = o[4] ? TSH_BILINEAR : TSH_NEAREST;
    size.align_corners = (int)o[5];
    return tsh_interpolate(x, &size);
}

/* Sums of up to 49 terms of magnitude one, and positions that are rounded to float. */
static void compare(const char *name, const char *what, tsh_ctx *ctx, tsh_tensor *t,
                    const golden_tensor *want) {
    double *got = ranks_values(ctx, t);
    int64_t i;
    if (!got) fail_msg("%s.%s: %s", name, what, tsh_last_error(ctx)->message);
    assert_int_equal(tsh_numel(t), want->count);
    for (i = 0; i < want->count; i++) {
        const double b = (double)((const float *)want->data)[i];
        if (fabs(got[i] - b) > 4e-6 * (1 + fabs(b)) || isnan(got[i]) != isnan(b))
            fail_msg("%s.%s[%ld] is %.9g, not %.9g", name, what, (long)i, got[i], b);
    }
    free(got);
}

static void golden_case(tsh_ctx *ctx, const golden_file *g, const char *name) {
    const golden_tensor options = golden_get(g, name, "options"), out = golden_get(g, name, "out"),
                        grad = golden_get(g, name, "g"), in = golden_get(g, name, "in0"),
                        back = golden_get(g, name, "grad0");
    tsh_tensor *x = tsh_requires_grad(golden_load(ctx, &in), 1), *w = golden_load(ctx, &grad), *y;
    int64_t o[11] = {0};
    memcpy(o, options.data, (size_t)options.count * sizeof *o);
    y = run_case(name, x, o);
    compare(name, "out", ctx, y, &out);
    assert_int_equal(tsh_backward(ctx, tsh_sum(tsh_mul(y, w), TSH_ALL, 0)), TSH_OK);
    compare(name, "grad0", ctx, tsh_grad(x), &back);
    tsh_tensor_free(x);
    tsh_tensor_free(w);
    assert_int_equal(tsh_step_end(ctx), TSH_OK);
}

static void values_and_gradients_are_pytorchs(void **state) {
    static const char *const form[][2] = {
        {"max", ""},           {"avg", "_0"},         {"avg", "_1"},        {"adaptive", ""},
        {"interpolate", "_0"}, {"interpolate", "_1"}, {"interpolate", "_2"}};
    golden_file g = golden_open("conv");
    tsh_ctx *ctx;
    int i, dims, f, isa, best = 0, cases = 0;
    (void)state;
    for (isa = 0; isa <= best; isa++) {
        assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
        if (!isa) best = library_isa(ctx);
        library_set_isa(ctx, isa);
        for (f = 0; f < COUNT(form) * 14; f++) {
            char name[32];
            golden_tensor t;
            dims = 1 + f / 7 % 2;
            i = f / 14;
            (void)snprintf(name, sizeof name, "%s%dd_%d%s", form[f % 7][0], dims, i,
                           form[f % 7][1]);
            if (!golden_find(&g, name, "out", &t)) continue;
            golden_case(ctx, &g, name);
            cases++;
        }
        golden_case(ctx, &g, "shuffle_0");
        golden_case(ctx, &g, "shuffle_1");
        tsh_close(ctx);
    }
    assert_int_equal(cases, (best + 1) * (12 + 21 + 8 + 36));
    golden_close(&g);
}

/* --------------------------------------------------- against central differences */

static tsh_tensor *check_fn(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {
    const int which = *(const int *)user;
    static const int64_t pool[11] = {3, 2, 2, 1, 1, 1, 1, 1, 1, 2, 0};
    static const int64_t size[6] = {7, 4, 0, 0, 1, 0};
    static const int64_t small[2] = {3, 2};
    tsh_tensor *y = which == 0   ? run_case("max2d", in[0], pool)
                    : which == 1 ? run_case("avg2d", in[0], pool)
                    : which == 2 ? run_case("adaptive2d", in[0], small)
                                 : run_case("interpolate2d", in[0], size);
    (void)n;
    return ranks_loss(ctx, tsh_tanh(tsh_scale(y, 0.1)));
}

static void gradients_are_those_of_differences(void **state) {
    tsh_ctx *ctx;
    int which;
    (void)state;
    assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
    for (which = 0; which < 4; which++) {
        tsh_tensor *x = tsh_requires_grad(
            tsh_tensor_new(ctx, TSH_REAL, tsh_shape4(2, 2, 5, 5), tsh_replicated()), 1);
        double worst;
        int64_t e;
        for (e = 0; e < tsh_numel(x); e++) /* all different: a maximum is no tie */
            ((tsh_real *)tsh_data(ctx, x))[e] = (tsh_real)((e * 37) % 101) / 10 - 5;
        worst = tsh_gradcheck(ctx, check_fn, &x, 1, &which, 0, 0);
        if (worst < 0 || worst > (sizeof(tsh_real) == 4 ? 1e-2 : 1e-8))
            fail_msg("op %d: off by %g (%s)", which, worst, tsh_last_error(ctx)->message);
    }
    tsh_close(ctx);
}

/* ------------------------------------------------------------- layouts */

static tsh_tensor *op_pool(probe *p) {
    static const int64_t pool[11] = {3, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0};
    static const int64_t size[6] = {7, 4, 0, 0, 1, 0}, nearest[6] = {7, 4, 0, 0, 0, 0};
    static const int64_t small[2] = {3, 2};
    if (probe_has(p, "max")) return run_case("max2d", p->in[0], pool);
    if (probe_has(p, "avg")) return run_case("avg2d", p->in[0], pool);
    if (probe_has(p, "adaptive")) return run_case("adaptive2d", p->in[0], small);
    if (probe_has(p, "nearest")) return run_case("interpolate2d", p->in[0], nearest);
    if (probe_has(p, "shuffle")) return tsh_pixel_shuffle(p->in[0], 2);
    return probe_has(p, "bilinear") ? run_case("interpolate2d", p->in[0], size) : NULL;
}

#define EACH_LAYOUT(name, tolerance)                                                               \
    TRIAL(op_pool, name, "R", tolerance, 0, "n,2,5,6 R"),                                          \
        TRIAL(op_pool, name, "S(0)", tolerance, 0, "n,2,5,6 S(0)"),                                \
        TRIAL(op_pool, name, "S(1)", tolerance, 0, "2,n,5,6 S(1)"),                                \
        TRIAL(op_pool, name, "S(1, unit 2)", tolerance, 0, "2,2n,5,6 S(1, unit 2)")
#define LINEAR(name) EACH_LAYOUT(name, 1e-5), TRIAL(op_pool, name, "P", 1e-5, 0, "2,n,5,6 P")

static const trial rows[] = {
    EACH_LAYOUT("max", 0),
    LINEAR("avg"),
    LINEAR("adaptive"),
    LINEAR("nearest"),
    LINEAR("bilinear"),
    TRIAL(op_pool, "shuffle", "S(0)", 0, 0, "n,4,2,3 S(0)"),
    TRIAL(op_pool, "shuffle", "S(1)", 0, 0, "2,4n,2,3 S(1, unit 4)"),
};

static void every_layout_gives_the_dense_result(void **state) {
    static const int64_t lengths[] = {1, 2, 3, 8, 11};
    (void)state;
    trials_prove(rows, COUNT(rows), lengths, COUNT(lengths));
}

/* ------------------------------------------------------------- odd inputs */

/* Ties go to the first element, NaN to the last one; a window that lies in the padding alone is
 * -infinity; a view is read as it lies; no images give none. */
static void odd_inputs_are_computed(void **state) {
    tsh_pool_options o;
    tsh_ctx *ctx;
    tsh_tensor *x, *y;
    double *a;
    tsh_real *v;
    (void)state;
    memset(&o, 0, sizeof o);
    o.kernel[0] = o.kernel[1] = 2;
    assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
    x = tsh_requires_grad(tsh_tensor_new(ctx, TSH_REAL, tsh_shape3(1, 1, 6), tsh_replicated()), 1);
    v = (tsh_real *)tsh_data(ctx, x);
    v[0] = v[1] = 5;
    v[2] = v[3] = (tsh_real)NAN;
    v[4] = v[5] = -(tsh_real)INFINITY;
    y = tsh_max_pool1d(x, &o);
    a = ranks_values(ctx, y);
    assert_true(a && a[0] == 5 && isnan(a[1]) && isinf(a[2]));
    free(a);
    assert_int_equal(tsh_backward(ctx, tsh_sum(y, TSH_ALL, 0)), TSH_OK);
    a = ranks_values(ctx, tsh_grad(x));
    assert_true(a && a[0] == 1 && a[1] == 0 && a[2] == 0 && a[3] == 1 && a[4] == 1 && a[5] == 0);
    free(a);
    o.padding[0] = 1;
    o.dilation[0] = 5;
    o.stride[0] = 1;
    x = tsh_tensor_new(ctx, TSH_REAL, tsh_shape3(1, 1, 4), tsh_replicated());
    x = tsh_requires_grad(x, 1);
    y = tsh_max_pool1d(x, &o);
    a = ranks_values(ctx, y);
    assert_true(a && isinf(a[0]) && tsh_numel(y) == 1);
    free(a);
    assert_int_equal(tsh_backward(ctx, tsh_sum(y, TSH_ALL, 0)), TSH_OK);
    memset(&o, 0, sizeof o);
    o.kernel[0] = o.kernel[1] = 2;
    x = tsh_tensor_new(ctx, TSH_REAL, tsh_shape4(1, 1, 2, 4), tsh_replicated());
    v = (tsh_real *)tsh_data(ctx, x);
    v[0] = v[1] = v[4] = v[5] = 1;
    v[2] = v[3] = v[6] = v[7] = 3;
    y = tsh_avg_pool2d(tsh_transpose(x, 2, 3), &o);
    a = ranks_values(ctx, y);
    assert_true(a && a[0] == 1 && a[1] == 3 && tsh_size(y, 2) == 2 && tsh_size(y, 3) == 1);
    free(a);
    y = tsh_max_pool2d(tsh_zeros(ctx, tsh_shape4(0, 3, 4, 4)), &o);
    assert_true(y && tsh_numel(y) == 0);
    y = tsh_cast(tsh_max_pool2d(tsh_cast(x, TSH_BF16), &o), TSH_REAL);
    a = ranks_values(ctx, y);
    assert_true(a && a[0] == 1 && a[1] == 3);
    free(a);
    tsh_close(ctx);
}

/* ------------------------------------------------------------- refusals */

typedef struct refusal {
    const char *name, *in;
    int64_t options[11];
    tsh_result code;
    const char *sentence;
} refusal;

static int refuse(tsh_ctx *ctx, void *user) {
    const refusal *r = (const refusal *)user;
    spec s = spec_parse(r->in, 1);
    CHECK_TRUE(!run_case(r->name, spec_tensor(ctx, &s, 1), r->options));
    CHECK(ranks_says(ctx, r->code, r->sentence), "not: %s", r->sentence);
    (void)tsh_barrier(tsh_world(ctx));
    return 0;
}

static void what_does_not_fit_is_refused(void **state) {
    static const refusal all[] = {
        {"max2d", "2,3,4,5 P", {2, 2}, TSH_ERR_LAYOUT, "is a partial sum"},
        {"max2d", "2,3,4,5 S(2)", {2, 2}, TSH_ERR_LAYOUT, "that the op works along"},
        {"avg2d", "2,3,4,5 S(3)", {2, 2}, TSH_ERR_LAYOUT, "that the op works along"},
        {"interpolate2d", "2,3,4,5 S(3)", {2, 2}, TSH_ERR_LAYOUT, "that the op works along"},
        {"max2d", "2,3,4 R", {2, 2}, TSH_ERR_SHAPE, "takes (N, C, H, W)"},
        {"max1d", "2,3,4,5 R", {2}, TSH_ERR_SHAPE, "takes (N, C, L)"},
        {"max2d", "2,3,4,5 R", {0, 2}, TSH_ERR_ARGUMENT, "kernel[0] is 0"},
        {"max2d", "2,3,4,5 R", {3, 2, 0, 0, 2, 0}, TSH_ERR_ARGUMENT, "more than half"},
        {"avg2d", "2,3,4,5 R", {2, 2, 0, 0, 0, 0, 2, 1}, TSH_ERR_ARGUMENT, "dilation is 2, 1"},
        {"avg2d", "2,3,4,5 R", {5, 2}, TSH_ERR_SHAPE, "leaves no output of 4"},
        {"adaptive2d", "2,3,4,5 R", {0, 2}, TSH_ERR_ARGUMENT, "is to have 0 elements"},
        {"interpolate2d", "2,3,4,5 R", {0, 2}, TSH_ERR_ARGUMENT, "size[0] is 0"},
        {"interpolate2d", "2,3,4,5 R", {2, 2, 100}, TSH_ERR_ARGUMENT, "takes one of them"},
        {"interpolate2d", "2,3,4,5 R", {2, 2, 0, 0, 0, 1}, TSH_ERR_ARGUMENT, "align_corners"},
        {"shuffle", "2,3,4,5 R", {2}, TSH_ERR_SHAPE, "divide by its square"},
    };
    int i, ranks;
    (void)state;
    for (i = 0; i < COUNT(all); i++)
        for (ranks = 1; ranks <= 2; ranks++) {
            refusal r = all[i];
            ranks_run(ranks, refuse, &r);
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(values_and_gradients_are_pytorchs),
        cmocka_unit_test(gradients_are_those_of_differences),
        cmocka_unit_test(every_layout_gives_the_dense_result),
        cmocka_unit_test(odd_inputs_are_computed),
        cmocka_unit_test(what_does_not_fit_is_refused),
    };
    return cmocka_run_group_tests_name("op/pool", tests, NULL, NULL);
}
