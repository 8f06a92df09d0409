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
    char what[8];
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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(values_and_gradients_are_pytorchs),
    };
    return cmocka_run_group_tests_name("op/conv", tests, NULL, NULL);
}
