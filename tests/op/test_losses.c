/* The losses besides cross-entropy: values and gradients of x and target against PyTorch's, for all
 * reductions and weights and where formulas break; by finite differences; in every layout at every
 * degree; in bf16 and f16; of transposed and of long inputs; and what they refuse. */
/* build: double */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/golden.h"
#include "../support/ranks.h"

#include <float.h>

static const double eps = (double)FLT_EPSILON;

typedef tsh_tensor *(*loss_fn)(tsh_tensor *, tsh_tensor *, const tsh_loss_desc *);

typedef struct named_loss {
    const char *name;
    loss_fn fn;
    tsh_loss_desc desc;
    int probable; /* x and target are probabilities: tests of layouts leave it out */
} named_loss;

static const named_loss losses[] = {
    {"mse", tsh_mse_loss, {0}, 0},
    {"l1", tsh_l1_loss, {0}, 0},
    {"huber", tsh_huber_loss, {0}, 0},
    {"huber2", tsh_huber_loss, {.delta = 0.4}, 0},
    {"smooth", tsh_smooth_l1_loss, {0}, 0},
    {"smooth2", tsh_smooth_l1_loss, {.beta = 0.4}, 0},
    {"smooth0", tsh_smooth_l1_loss, {.beta = TSH_ZERO}, 0},
    {"bce", tsh_binary_cross_entropy, {0}, 1},
    {"logits", tsh_binary_cross_entropy_with_logits, {0}, 0},
    {"kl", tsh_kl_div, {0}, 1},
    {"kllog", tsh_kl_div, {.log_target = 1}, 0},
    {"nll", tsh_nll_loss, {0}, 1},
};

static const named_loss *find_loss(const char *name, size_t length) {
    for (int i = 0; i < COUNT(losses); i++)
        if (strlen(losses[i].name) == length && !strncmp(losses[i].name, name, length))
            return &losses[i];
    return NULL;
}

static tsh_ctx *open_ctx(void) {
    tsh_ctx *ctx;
    assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
    return ctx;
}

/* ------------------------------------------------------------------ PyTorch's values */

/* Golden values are rounded to float; a loss goes through up to 16 roundings, relative to the size
 * of its terms, at most 8 here, or to that of the result. */
static void compare(tsh_ctx *ctx, const char *name, const char *what, tsh_tensor *t,
                    const golden_tensor *want) {
    const tsh_real *got;
    if (!t || !tsh_ok(ctx))
        fail_msg("%s.%s: %s", name, what, t ? tsh_last_error(ctx)->message : "is NULL");
    if (tsh_numel(t) != want->count || tsh_ndim(t) != want->shape.ndim)
        fail_msg("%s.%s: another shape", name, what);
    for (int d = 0; d < want->shape.ndim; d++)
        if (tsh_size(t, d) != want->shape.dim[d]) fail_msg("%s.%s: dimension %d", name, what, d);
    got = (const tsh_real *)tsh_data(ctx, t);
    for (int64_t e = 0; e < want->count; e++) {
        const double a = (double)((const float *)want->data)[e], b = (double)(float)got[e];
        if (!(a == b || (a != a && b != b) || fabs(a - b) <= 16 * eps * (1 + fabs(a))))
            fail_msg("%s.%s[%ld] is %.9g, not %.9g", name, what, (long)e, b, a);
    }
}

static tsh_tensor *call_case(tsh_ctx *ctx, const char *name, tsh_tensor **in) {
    static const char *const reductions[] = {"_mean", "_sum", "_none", "_batchmean"};
    const named_loss *loss = find_loss(name, strcspn(name, "_"));
    tsh_loss_desc desc;
    int dim = -1;
    if (!strncmp(name, "cosine_", 7)) {
        dim = !strcmp(name + 7, "first") || !strcmp(name + 7, "rows") ? 0
              : !strcmp(name + 7, "middle") || !strcmp(name + 7, "single") ? 1 : -1;
        return tsh_cosine_similarity(in[0], in[1], dim, 0);
    }
    if (!loss) fail_msg("no loss is named as %s", name);
    desc = loss->desc;
    for (int r = 0; r < COUNT(reductions); r++)
        if (!strcmp(name + strlen(name) - strlen(reductions[r]), reductions[r]))
            desc.reduction = (tsh_reduction)r;
    desc.weight = in[2];
    desc.pos_weight = in[3];
    desc.ignore = !strncmp(name, "nll_inside", 10) || !strncmp(name, "nll_deep", 8);
    desc.ignore_index = !strncmp(name, "nll_deep", 8) ? 2 : 3;
    desc.dim = !strncmp(name, "nll_deep", 8);
    (void)ctx;
    return loss->fn(in[0], in[1], &desc);
}

static void run_case(const golden_file *file, const char *name) {
    tsh_ctx *ctx = open_ctx();
    tsh_tensor *in[4] = {NULL}, *out;
    golden_tensor g;
    char what[8];
    for (int i = 0; i < 4; i++) {
        (void)snprintf(what, sizeof what, "in%d", i);
        if (!golden_find(file, name, what, &g)) break;
        in[i] = golden_load(ctx, &g);
        if (i < 2 && g.dtype == TSH_F32) tsh_requires_grad(in[i], 1);
    }
    out = call_case(ctx, name, in);
    g = golden_get(file, name, "out");
    compare(ctx, name, "out", out, &g);
    g = golden_get(file, name, "w");
    out = tsh_sum(tsh_mul(out, golden_load(ctx, &g)), TSH_ALL, 0);
    if (tsh_backward(ctx, out) != TSH_OK) fail_msg("%s: %s", name, tsh_last_error(ctx)->message);
    for (int i = 0; i < 2; i++) {
        (void)snprintf(what, sizeof what, "grad%d", i);
        if (golden_find(file, name, what, &g)) compare(ctx, name, what, tsh_grad(in[i]), &g);
    }
    tsh_close(ctx);
}

static void all_give_what_pytorch_gives(void **state) {
    golden_file file = golden_open("losses");
    int n = 0;
    (void)state;
    for (const char *at = file.header; (at = strstr(at, ".out\":{")) != NULL; at++, n++) {
        char name[64];
        const char *begin = at;
        while (begin[-1] != '"') begin--;
        (void)snprintf(name, sizeof name, "%.*s", (int)(at - begin), begin);
        run_case(&file, name);
    }
    assert_true(n > 100);
    golden_finish(&file);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_give_what_pytorch_gives),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
