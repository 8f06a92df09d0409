/* LSTM and GRU: outputs, last states and all gradients against PyTorch's, by the kernels of every
 * instruction set; gradients against central differences; every layout at every degree, where
 * values keep their bits; threads; bf16; dropout; what is refused. */
/* build: double */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/golden.h"
#include "../support/library.h"
#include "../support/ranks.h"

#include <float.h>

enum { WEIGHTS = 16 };

typedef struct recurrent_case {
    const char *name; /* in the golden file, after "lstm_" or "gru_" */
    int layers, both, first, free; /* free: without biases */
} recurrent_case;

static const recurrent_case cases[] = {
    {"plain", 1, 0, 0, 0}, {"state", 1, 0, 0, 0}, {"free", 1, 0, 0, 1}, {"first", 1, 0, 1, 0},
    {"both", 1, 1, 0, 0},  {"two", 2, 0, 0, 0},   {"all", 2, 1, 1, 0},  {"all_free", 2, 1, 0, 1},
    {"step", 1, 0, 0, 0},  {"one", 1, 0, 0, 0},   {"flat", 1, 0, 0, 0}, {"wide", 1, 0, 0, 0}};

static tsh_recurrent_desc desc_of(const recurrent_case *c) {
    tsh_recurrent_desc desc = {.layers = c->layers, .bidirectional = c->both,
                               .batch_first = c->first, .bias = c->free ? TSH_NO : TSH_USUAL};
    return desc;
}

/* ------------------------------------------------------------------- PyTorch's */

static void compare(tsh_ctx *ctx, const golden_file *g, const char *name, const char *what,
                    tsh_tensor *t) {
    golden_tensor want = golden_get(g, name, what);
    double *got;
    if (!t || !tsh_ok(ctx)) fail_msg("%s.%s: %s", name, what, tsh_last_error(ctx)->message);
    assert_int_equal(tsh_numel(t), want.count);
    assert_int_equal(tsh_shape_of(t).ndim, want.shape.ndim);
    got = ranks_values(ctx, t);
    assert_non_null(got);
    for (int64_t i = 0; i < want.count; i++) {
        const double y = (double)((const float *)want.data)[i], scale = fabs(y) > 1 ? fabs(y) : 1;
        if (!(fabs(got[i] - y) <= 60 * (double)FLT_EPSILON * scale))
            fail_msg("%s.%s[%ld] is %.9g, not %.9g", name, what, (long)i, got[i], y);
    }
    free(got);
}

static tsh_tensor *golden_leaf(tsh_ctx *ctx, const golden_file *g, const char *name,
                               const char *what) {
    golden_tensor t;
    if (!golden_find(g, name, what, &t)) return NULL;
    return tsh_requires_grad(golden_load(ctx, &t), 1);
}

/* The name of weight i, in PyTorch's order. */
static const char *weight_name(const recurrent_case *c, int i, char *name) {
    static const char *const kinds[] = {"weight_ih", "weight_hh", "bias_ih", "bias_hh"};
    const int each = c->free ? 2 : 4, at = i / each;
    (void)snprintf(name, 32, "%s_l%d%s", kinds[i % each], at / (1 + c->both),
                   at % (1 + c->both) ? "_reverse" : "");
    return name;
}

/* x as a view whose rows are equally far apart, but not adjacent (1), or not even that (2). */
static tsh_tensor *spread(tsh_tensor *x, int how) {
    if (how == 0) return x;
    if (how == 1) return tsh_slice(tsh_concat((tsh_tensor *const[]){x, x}, 2, -1), -1, 0,
                                   tsh_size(x, -1));
    return tsh_transpose(tsh_clone(tsh_transpose(x, 0, 1)), 0, 1);
}

static void one_case(tsh_ctx *ctx, const golden_file *g, const recurrent_case *c, int lstm,
                     int how) {
    const tsh_recurrent_desc desc = desc_of(c);
    const int count = c->layers * (1 + c->both) * (c->free ? 2 : 4);
    tsh_tensor *w[WEIGHTS], *x, *h0, *c0, *y, *h = NULL, *cell = NULL, *loss, *given[3];
    char name[64], what[64], text[32];
    golden_tensor t;
    (void)snprintf(name, sizeof name, "%s_%s", lstm ? "lstm" : "gru", c->name);
    x = golden_leaf(ctx, g, name, "x");
    h0 = golden_leaf(ctx, g, name, "h0");
    c0 = golden_leaf(ctx, g, name, "c0");
    for (int i = 0; i < count; i++) w[i] = golden_leaf(ctx, g, name, weight_name(c, i, text));
    y = lstm ? tsh_lstm(spread(x, how), w, count, h0, c0, &desc, &h, &cell)
             : tsh_gru(spread(x, how), w, count, h0, &desc, &h);
    compare(ctx, g, name, "y", y);
    compare(ctx, g, name, "h", h);
    if (lstm) compare(ctx, g, name, "c", cell);
    for (int i = 0; i < 2 + lstm; i++) {
        t = golden_get(g, name, i == 0 ? "gy" : i == 1 ? "gh" : "gc");
        given[i] = golden_load(ctx, &t);
    }
    loss = tsh_add(tsh_sum(tsh_mul(y, given[0]), TSH_ALL, 0),
                   tsh_sum(tsh_mul(h, given[1]), TSH_ALL, 0));
    if (lstm) loss = tsh_add(loss, tsh_sum(tsh_mul(cell, given[2]), TSH_ALL, 0));
    assert_int_equal(tsh_backward(ctx, loss), TSH_OK);
    compare(ctx, g, name, "dx", tsh_grad(x));
    if (h0) compare(ctx, g, name, "dh0", tsh_grad(h0));
    if (c0) compare(ctx, g, name, "dc0", tsh_grad(c0));
    for (int i = 0; i < count; i++) {
        (void)snprintf(what, sizeof what, "d%s", weight_name(c, i, text));
        compare(ctx, g, name, what, tsh_grad(w[i]));
        tsh_tensor_free(w[i]);
    }
    (void)tsh_step_end(ctx);
    for (int i = 0; i < 2 + lstm; i++) tsh_tensor_free(given[i]);
    tsh_tensor_free(x);
    tsh_tensor_free(h0);
    tsh_tensor_free(c0);
}

static void pytorch_gives_the_same(void **state) {
    golden_file g = golden_open("recurrent");
    tsh_ctx *ctx;
    (void)state;
    assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
    for (int isa = library_isa(ctx); isa >= 0; isa--) {
        library_set_isa(ctx, isa);
        for (int i = 0; i < 2 * COUNT(cases); i++)
            for (int how = 0; how < 3; how++)
                one_case(ctx, &g, &cases[i / 2], i % 2, strcmp(cases[i / 2].name, "flat") ? how : 0);
    }
    assert_true(tsh_ok(ctx));
    tsh_close(ctx);
    golden_finish(&g);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pytorch_gives_the_same),
    };
    return cmocka_run_group_tests_name("op/recurrent", tests, NULL, NULL);
}
