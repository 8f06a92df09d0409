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
    {"mse", tsh_mse_loss, {.delta = 0}, 0},
    {"l1", tsh_l1_loss, {.delta = 0}, 0},
    {"huber", tsh_huber_loss, {.delta = 0}, 0},
    {"huber2", tsh_huber_loss, {.delta = 0.4}, 0},
    {"smooth", tsh_smooth_l1_loss, {.delta = 0}, 0},
    {"smooth2", tsh_smooth_l1_loss, {.beta = 0.4}, 0},
    {"smooth0", tsh_smooth_l1_loss, {.beta = TSH_ZERO}, 0},
    {"bce", tsh_binary_cross_entropy, {.delta = 0}, 1},
    {"logits", tsh_binary_cross_entropy_with_logits, {.delta = 0}, 0},
    {"kl", tsh_kl_div, {.delta = 0}, 1},
    {"kllog", tsh_kl_div, {.log_target = 1}, 0},
    {"nll", tsh_nll_loss, {.delta = 0}, 1},
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
        dim = !strcmp(name + 7, "first") || !strcmp(name + 7, "rows")      ? 0
              : !strcmp(name + 7, "middle") || !strcmp(name + 7, "single") ? 1
                                                                           : -1;
        return tsh_cosine_similarity(in[0], in[1], dim, 0);
    }
    if (!loss) fail_msg("no loss is named as %s", name);
    desc = loss->desc;
    for (int r = 0; r < COUNT(reductions); r++)
        if (strstr(name, reductions[r]))
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
    char what[16];
    for (int i = 0; i < 4; i++) {
        (void)snprintf(what, sizeof what, "in%d", i);
        if (!golden_find(file, name, what, &g)) break;
        /* an empty tensor has no address to load values to */
        in[i] = g.count ? golden_load(ctx, &g)
                        : tsh_tensor_new(ctx, g.dtype == TSH_F32 ? TSH_REAL : TSH_I64, g.shape,
                                         tsh_replicated());
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

/* ------------------------------------------------------------------ finite differences */

/* x or target of gradcheck: numbers in (low, high), none within two steps of another tensor's, so
 * that |x - target| has no kink there. */
static tsh_tensor *grid(tsh_ctx *ctx, double low, double high, int salt) {
    tsh_tensor *t = tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(3, 5), tsh_replicated());
    tsh_real *data = (tsh_real *)tsh_data(ctx, t);
    for (int64_t e = 0; e < 15; e++)
        data[e] = (tsh_real)(low + (high - low) *
                                       ((double)((e * 7 + salt * 4) % 15) + 0.5 + 0.25 * salt) /
                                       16);
    return tsh_requires_grad(t, 1);
}

typedef struct gradient_run {
    const named_loss *loss;
    tsh_loss_desc desc;
} gradient_run;

static tsh_tensor *gradient_fn(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {
    const gradient_run *run = (const gradient_run *)user;
    tsh_tensor *y = run->loss->fn(in[0], in[1], &run->desc), *w;
    (void)n;
    if (run->desc.reduction != TSH_REDUCE_NONE) return y;
    w = tsh_zeros(ctx, tsh_shape_of(y));
    for (int64_t e = 0; tsh_data(ctx, w) && e < tsh_numel(w); e++)
        ((tsh_real *)tsh_data(ctx, w))[e] = (tsh_real)ranks_number(7, (uint64_t)e) / 2;
    return tsh_sum(tsh_mul(y, w), TSH_ALL, 0);
}

/* Central differences with step h err by h^2 / 6 times the third derivative, at most 300 here (of
 * log x at 0.2), and by the rounding of a loss of up to 60: see test_gradcheck.c. */
static void gradients_are_those_of_finite_differences(void **state) {
    const double room = sizeof(tsh_real) == 8 ? 6e-9 : 1e-2;
    tsh_ctx *ctx = open_ctx();
    (void)state;
    for (int i = 0; i < COUNT(losses); i++)
        for (int r = 0; r < 4; r++)
            for (int w = 0; w < 2; w++) {
                gradient_run run = {&losses[i], losses[i].desc};
                const double low = losses[i].probable ? 0.2 : -2;
                tsh_tensor *in[2] = {grid(ctx, low, low + 0.6 + (low < 0 ? 3.4 : 0), 0),
                                     grid(ctx, low, low + 0.6 + (low < 0 ? 3.4 : 0), 1)};
                double off;
                if (losses[i].fn == tsh_nll_loss) continue;
                if (r == (int)TSH_REDUCE_BATCHMEAN && losses[i].fn != tsh_kl_div) continue;
                run.desc.reduction = (tsh_reduction)r;
                if (w) run.desc.weight = tsh_keep(tsh_scale(tsh_ones(ctx, tsh_shape1(5)), 1.5));
                if (w && losses[i].fn == tsh_binary_cross_entropy_with_logits)
                    run.desc.pos_weight = run.desc.weight;
                off = tsh_gradcheck(ctx, gradient_fn, in, 2, &run, 0, 0);
                if (!(off >= 0 && off <= room))
                    fail_msg("%s, reduction %d: off by %.3g (%s)", losses[i].name, r, off,
                             tsh_last_error(ctx)->message);
                assert_int_equal(tsh_step_end(ctx), TSH_OK);
            }
    tsh_close(ctx);
}

static tsh_tensor *cosine_fn(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {
    tsh_tensor *y = tsh_cosine_similarity(in[0], in[1], *(int *)user, 0);
    (void)ctx, (void)n;
    return tsh_sum(tsh_pow_scalar(tsh_add_scalar(y, 2), 3), TSH_ALL, 0);
}

static void gradients_of_the_cosine(void **state) {
    tsh_ctx *ctx = open_ctx();
    (void)state;
    for (int dim = -2; dim < 2; dim++) {
        tsh_tensor *in[2] = {grid(ctx, -2, 2, 0), grid(ctx, -2, 2, 1)};
        const double off = tsh_gradcheck(ctx, cosine_fn, in, 2, &dim, 0, 0);
        if (!(off >= 0 && off <= (sizeof(tsh_real) == 8 ? 2e-8 : 2e-2)))
            fail_msg("dim %d: off by %.3g (%s)", dim, off, tsh_last_error(ctx)->message);
    }
    tsh_close(ctx);
}

/* The cosine of vectors without elements is a sum of nothing, with eps 0, too. */
static int empty_cosine(tsh_ctx *ctx, void *user) {
    tsh_tensor *x = tsh_zeros(ctx, tsh_shape2(0, 2)), *y;
    (void)user;
    for (int cut = 0; cut < 2; cut++, x = tsh_redistribute(x, tsh_sharded(0))) {
        y = tsh_cosine_similarity(x, x, 0, TSH_ZERO);
        CHECK(y && tsh_item(ctx, tsh_sum(y, 0, 0)) == 0, "cut %d", cut);
    }
    return 0;
}

static void the_cosine_of_nothing_is_0(void **state) {
    (void)state;
    ranks_run(1, empty_cosine, NULL);
    ranks_run(2, empty_cosine, NULL);
}

/* ------------------------------------------------------------------ layouts */

/* The weight that the argument names: row (4), cut, as row but sharded; column (n, 1), laid out as
 * x if x is S(0); full (n, 4), of which each rank takes its shard. */
static tsh_tensor *weight_of(probe *p) {
    const tsh_layout x = tsh_layout_of(p->in[0]);
    spec s = spec_parse("4 R", p->n);
    int none = !probe_has(p, "row");
    if (probe_has(p, "cut")) {
        none = 0;
        if (!p->dense) s = spec_parse("4 S(0)", p->n);
    }
    if (probe_has(p, "column")) {
        none = 0;
        s = spec_parse("n,1 R", p->n);
        if (x.kind == TSH_SHARDED) s.layout = x;
    }
    if (probe_has(p, "full")) {
        none = 0;
        s = spec_parse("n,4 R", p->n);
    }
    return none ? NULL : tsh_pow_scalar(spec_tensor(p->ctx, &s, 40), 2); /* above 0 */
}

static tsh_tensor *op_loss(probe *p) {
    static const char *const reductions[] = {"mean", "sum", "none", "batchmean"};
    tsh_tensor *x = p->in[0], *t = p->in[1];
    tsh_loss_desc desc = {.delta = 0};
    desc.weight = weight_of(p);
    for (int r = 0; r < COUNT(reductions); r++)
        if (probe_has(p, reductions[r])) desc.reduction = (tsh_reduction)r;
    if (probe_has(p, "pos")) desc.pos_weight = desc.weight;
    for (int i = 0; i < COUNT(losses); i++) {
        if (!probe_has(p, losses[i].name)) continue;
        desc.delta = losses[i].desc.delta;
        desc.beta = losses[i].desc.beta;
        desc.log_target = losses[i].desc.log_target;
        if (losses[i].fn == tsh_nll_loss) return tsh_nll_loss(x, t, &desc);
        if (losses[i].probable) {
            x = tsh_sigmoid(x);
            t = tsh_sigmoid(t);
        }
        return losses[i].fn(x, t, &desc);
    }
    return NULL;
}

static tsh_tensor *op_cosine(probe *p) {
    return tsh_cosine_similarity(p->in[0], p->in[1], (int)probe_number(p, "dim"), 0);
}

/* Sums of up to 32 terms over ranks, in another order. */
#define ROUNDING             (sizeof(tsh_real) == 8 ? 1e-14 : 4e-6)
#define SAME(arg, out, ...)  TRIAL(op_loss, arg, out, 0, TRIAL_COUNTED, __VA_ARGS__)
#define CLOSE(arg, out, ...) TRIAL(op_loss, arg, out, ROUNDING, TRIAL_COUNTED, __VA_ARGS__)
/* clang-format off */
#define CALLS(fn, arg, out, forward, ...) \
    {fn, arg, {__VA_ARGS__}, out, ROUNDING, TRIAL_COUNTED, {forward, 0, 0}, {0}}
/* clang-format on */

/* Nothing but the loss is summed over ranks: unreduced losses and gradients have the same bits. */
static void layouts_agree(void **state) {
    const trial rows[] = {
        SAME("mse none", "S(0)", "n,4 S(0)", "n,4 S(0)"),
        SAME("mse none", "S(1)", "n,4 S(1)", "n,4 S(1)"),
        SAME("mse none", "R", "n,4 R", "n,4 R"),
        SAME("mse mean", "R", "n,4 R", "n,4 R"),
        SAME("mse sum", "P", "n,4 S(0)", "n,4 S(0)"),
        CLOSE("mse mean", "P", "n,4 S(0)", "n,4 S(0)"),
        CLOSE("mse mean", "P", "n S(0)", "n S(0)"),
        CALLS(op_loss, "mse mean row", "P", 1, "n,4 S(0)", "n,4 S(0)"),
        CALLS(op_loss, "mse mean column", "P", 1, "n,4 S(0)", "n,4 S(0)"),
        CALLS(op_loss, "l1 mean cut", "P", 1, "n,4 S(1)", "n,4 S(1)"),
        CALLS(op_loss, "l1 mean full", "P", 1, "n,4 S(1)", "n,4 S(1)"),
        SAME("mse mean row", "R", "n,4 R", "n,4 R"),
        SAME("mse none full", "S(0)", "n,4 S(0)", "n,4 S(0)"),
        SAME("l1 none row", "S(0, unit 2)", "2n,4 S(0, unit 2)", "2n,4 S(0, unit 2)"),
        SAME("l1 sum", "P", "n,4 S(1)", "n,4 S(1)"),
        SAME("huber none", "S(0)", "n,4 S(0)", "n,4 S(0)"),
        CLOSE("huber mean row", "P", "n,4 S(1)", "n,4 S(1)"),
        CLOSE("huber2 sum", "P", "n,4 S(0)", "n,4 S(0)"),
        CLOSE("smooth mean", "P", "n,4 S(0)", "n,4 S(0)"),
        SAME("smooth2 none", "S(1)", "n,4 S(1)", "n,4 S(1)"),
        CLOSE("bce mean", "P", "n,4 S(0)", "n,4 S(0)"),
        SAME("bce none row", "S(0)", "n,4 S(0)", "n,4 S(0)"),
        CLOSE("logits mean", "P", "n,4 S(0)", "n,4 S(0)"),
        CLOSE("logits mean row pos", "P", "n,4 S(0)", "n,4 S(0)"),
        CLOSE("logits sum cut pos", "P", "n,4 S(1)", "n,4 S(1)"),
        SAME("logits none cut pos", "S(1)", "n,4 S(1)", "n,4 S(1)"),
        CLOSE("kl batchmean", "P", "n,4 S(0)", "n,4 S(0)"),
        CLOSE("kllog mean", "P", "n,4 S(1)", "n,4 S(1)"),
        SAME("kllog none", "S(0)", "n,4 S(0)", "n,4 S(0)"),
        SAME("nll mean", "R", "n,4 R", "%4 n R"),
        CALLS(op_loss, "nll mean", "P", 1, "n,4 S(0)", "%4 n S(0)"),
        CALLS(op_loss, "nll mean row", "P", 1, "n,4 S(0)", "%4 n S(0)"),
        SAME("nll sum row", "P", "n,4 S(0)", "%4 n S(0)"),
        SAME("nll none row", "S(0)", "n,4 S(0)", "%4 n S(0)"),
        CALLS(op_loss, "nll mean", "R", 1, "n,4 S(1)", "%4 n R"),
        CALLS(op_loss, "nll mean row", "R", 1, "n,4 S(1)", "%4 n R"),
        CALLS(op_loss, "nll mean cut", "R", 1, "n,4 S(1)", "%4 n R"),
        CALLS(op_loss, "nll none cut", "R", 1, "n,4 S(1)", "%4 n R"),
    };
    static const int64_t lengths[] = {1, 5, 8};
    (void)state;
    trials_prove(rows, COUNT(rows), lengths, COUNT(lengths));
}

/* Backward sums the partial gradients of an input that is broadcast to all ranks' shards. */
static void layouts_of_the_cosine_agree(void **state) {
    const trial rows[] = {
        CALLS(op_cosine, "dim -1", "R", 0, "n,4 R", "n,4 R"),
        CALLS(op_cosine, "dim -1", "S(0)", 0, "n,4 S(0)", "n,4 S(0)"),
        CALLS(op_cosine, "dim -1", "R", 1, "n,4 S(1)", "n,4 S(1)"),
        CALLS(op_cosine, "dim 0", "R", 1, "n,4 S(0)", "n,4 S(0)"),
        CALLS(op_cosine, "dim 0", "S(0)", 0, "n,4 S(1)", "n,4 S(1)"),
        TRIAL(op_cosine, "dim -1", "S(0)", ROUNDING, 0, "n,1,4 S(0)", "1,3,4 R"),
        TRIAL(op_cosine, "dim -1", "S(1)", ROUNDING, 0, "3,1,4 R", "1,n,4 S(1)"),
        TRIAL(op_cosine, "dim -1", "R", ROUNDING, 0, "3,n S(1)", "3,1 R"),
    };
    static const int64_t lengths[] = {2, 5, 8};
    (void)state;
    trials_prove(rows, COUNT(rows), lengths, COUNT(lengths));
}

/* ------------------------------------------------------------------ bits, strides, threads */

enum { LONG_ROWS = 67, LONG_COLUMNS = 513 }; /* 34,371 elements: 9 parts, the last one short */

static tsh_tensor *long_leaf(tsh_ctx *ctx, int transposed, uint64_t seed, tsh_dtype dtype) {
    tsh_tensor *t = tsh_tensor_new(ctx, TSH_REAL,
                                   transposed ? tsh_shape2(LONG_COLUMNS, LONG_ROWS)
                                              : tsh_shape2(LONG_ROWS, LONG_COLUMNS),
                                   tsh_replicated());
    tsh_real *data = (tsh_real *)tsh_data(ctx, t);
    for (int64_t i = 0; i < LONG_ROWS; i++)
        for (int64_t j = 0; j < LONG_COLUMNS; j++) {
            const uint64_t mix = ranks_mix(seed, (uint64_t)(i * LONG_COLUMNS + j)) % 4096;
            data[transposed ? j * LONG_ROWS + i : i * LONG_COLUMNS + j] =
                (tsh_real)((double)mix / 512 - 4);
        }
    return tsh_requires_grad(dtype == TSH_REAL ? t : tsh_keep(tsh_cast(t, dtype)), 1);
}

/* The loss and both gradients, dense. */
typedef struct long_result {
    tsh_real loss;
    tsh_real grad[2][LONG_ROWS * LONG_COLUMNS];
} long_result;

static long_result long_one, long_other;

/* transposed: bit 0: x is a transposed view, bit 1: the target is; apart: unreduced losses, summed
 * by tsh_sum. */
static void long_call(long_result *to, const named_loss *loss, int transposed, int apart,
                      int threads) {
    tsh_desc settings = {.seed = 1};
    tsh_ctx *ctx;
    tsh_tensor *leaf[2], *in[2], *y;
    tsh_loss_desc desc = loss->desc;
    settings.threads = threads;
    assert_int_equal(tsh_open(&settings, &ctx), TSH_OK);
    for (int k = 0; k < 2; k++) {
        leaf[k] = long_leaf(ctx, transposed >> k & 1, 90 + (uint64_t)k, TSH_REAL);
        in[k] = transposed >> k & 1 ? tsh_transpose(leaf[k], 0, 1) : leaf[k];
    }
    desc.reduction = apart ? TSH_REDUCE_NONE : TSH_REDUCE_SUM;
    desc.weight = tsh_tensor_new(ctx, TSH_REAL, tsh_shape1(LONG_COLUMNS), tsh_replicated());
    for (int64_t e = 0; e < LONG_COLUMNS; e++)
        ((tsh_real *)tsh_data(ctx, desc.weight))[e] = (tsh_real)(1 + e % 7) / 4;
    y = loss->fn(in[0], in[1], &desc);
    if (apart) y = tsh_sum(y, TSH_ALL, 0);
    to->loss = (tsh_real)tsh_item(ctx, y);
    assert_int_equal(tsh_backward(ctx, y), TSH_OK);
    for (int k = 0; k < 2; k++) {
        tsh_tensor *grad = transposed >> k & 1 ? tsh_transpose(tsh_grad(leaf[k]), 0, 1)
                                               : tsh_grad(leaf[k]);
        assert_int_equal(tsh_read(ctx, grad, TSH_LOCAL, to->grad[k], sizeof to->grad[k]), TSH_OK);
    }
    assert_true(tsh_ok(ctx));
    tsh_close(ctx);
}

/* A sum has the bits of tsh_sum of the unreduced losses; strides and threads change none. */
static void bits_do_not_depend_on_how_it_is_computed(void **state) {
    (void)state;
    for (int i = 0; i < COUNT(losses); i++) {
        if (losses[i].probable) continue;
        long_call(&long_one, &losses[i], 0, 0, 1);
        for (int way = 1; way < 6; way++) {
            long_call(&long_other, &losses[i], way & 3, way & 1, way > 3 ? 3 : 1);
            if (memcmp(&long_one, &long_other, sizeof long_one))
                fail_msg("%s, way %d: other bits (%.17g, %.17g)", losses[i].name, way,
                         (double)long_one.loss, (double)long_other.loss);
        }
    }
}

/* x is the target: both gradients are added to it. */
static void an_input_may_be_both(void **state) {
    tsh_ctx *ctx = open_ctx();
    tsh_tensor *x = tsh_requires_grad(tsh_keep(tsh_ones(ctx, tsh_shape1(3))), 1);
    (void)state;
    /* kl with log_target: e^x (x - x); the gradients are -e and e (0 + 1) */
    assert_int_equal(tsh_backward(ctx, tsh_kl_div(x, x, &(tsh_loss_desc){.log_target = 1})),
                     TSH_OK);
    for (int e = 0; e < 3; e++)
        assert_true(fabs((double)((tsh_real *)tsh_data(ctx, tsh_grad(x)))[e]) < 1e-30);
    tsh_close(ctx);
}

/* 16-bit inputs are computed in tsh_real: the loss of the rounded inputs, its exact gradient. */
static void half_precision_is_rounded_once(void **state) {
    static const tsh_dtype dtypes[] = {TSH_BF16, TSH_F16};
    (void)state;
    for (int i = 0; i < COUNT(losses); i++)
        for (int k = 0; k < COUNT(dtypes) && !losses[i].probable; k++) {
            tsh_ctx *ctx = open_ctx();
            tsh_tensor *in[2] = {long_leaf(ctx, 0, 90, dtypes[k]),
                                 long_leaf(ctx, 0, 91, dtypes[k])};
            tsh_tensor *wide[2] = {tsh_requires_grad(tsh_keep(tsh_cast(in[0], TSH_REAL)), 1),
                                   tsh_requires_grad(tsh_keep(tsh_cast(in[1], TSH_REAL)), 1)};
            tsh_tensor *y = losses[i].fn(in[0], in[1], &losses[i].desc);
            tsh_tensor *want = losses[i].fn(wide[0], wide[1], &losses[i].desc);
            assert_true(tsh_dtype_of(y) == TSH_REAL);
            assert_memory_equal(tsh_data(ctx, y), tsh_data(ctx, want), sizeof(tsh_real));
            assert_int_equal(tsh_backward(ctx, tsh_add(y, want)), TSH_OK);
            for (int e = 0; e < 2; e++)
                assert_memory_equal(tsh_data(ctx, tsh_grad(in[e])),
                                    tsh_data(ctx, tsh_grad(wide[e])),
                                    (size_t)tsh_numel(in[e]) * sizeof(tsh_real));
            tsh_close(ctx);
        }
}

/* Class weights of another dtype than tsh_real. */
static void class_weights_may_be_bf16(void **state) {
    static const int64_t classes[2] = {2, 0};
    tsh_ctx *ctx = open_ctx();
    tsh_tensor *x = tsh_log_softmax(tsh_ones(ctx, tsh_shape2(2, 3)), -1);
    tsh_tensor *y = tsh_tensor_from(ctx, TSH_I64, tsh_shape1(2), tsh_replicated(), classes);
    tsh_tensor *w = tsh_cast(tsh_scale(tsh_ones(ctx, tsh_shape1(3)), 2), TSH_BF16);
    const tsh_loss_desc desc = {.reduction = TSH_REDUCE_SUM, .weight = w};
    const tsh_cross_entropy_desc same = {.reduction = TSH_REDUCE_SUM, .weight = w};
    (void)state;
    assert_true(fabs(tsh_item(ctx, tsh_nll_loss(x, y, &desc)) - 4 * log(3)) < 1e-5);
    assert_true(fabs(tsh_item(ctx, tsh_cross_entropy(x, y, &same)) - 4 * log(3)) < 1e-5);
    tsh_close(ctx);
}

/* ------------------------------------------------------------------ refusals on several ranks */

static int refuse_rank(tsh_ctx *ctx, void *user) {
    tsh_tensor *r = tsh_ones(ctx, tsh_shape2(8, 4)), *s = tsh_redistribute(r, tsh_sharded(0));
    tsh_tensor *s1 = tsh_redistribute(r, tsh_sharded(1));
    tsh_tensor *p = tsh_redistribute(r, tsh_partial());
    tsh_loss_desc desc = {.delta = 0};
    (void)user;
    desc.weight = tsh_redistribute(tsh_ones(ctx, tsh_shape1(4)), tsh_sharded(0));
    CHECK_OK();
    CHECK_TRUE(!tsh_mse_loss(p, r, NULL));
    CHECK_SAYS(TSH_ERR_LAYOUT, "tsh_mse_loss: input is a partial sum, and the loss is not linear");
    CHECK_TRUE(!tsh_mse_loss(r, p, NULL));
    CHECK_SAYS(TSH_ERR_LAYOUT, "tsh_redistribute(target, tsh_layout_of(x))");
    CHECK_TRUE(!tsh_l1_loss(s, r, NULL));
    CHECK_SAYS(TSH_ERR_LAYOUT, "the target is to be laid out as x");
    CHECK_TRUE(!tsh_l1_loss(s, s1, NULL));
    CHECK_SAYS(TSH_ERR_LAYOUT, "tsh_l1_loss: layouts of (8, 4) S(0) and (8, 4) S(1)");
    CHECK_TRUE(!tsh_l1_loss(s, s, &desc));
    CHECK_SAYS(TSH_ERR_LAYOUT, "tsh_redistribute(weight, tsh_replicated())");
    CHECK_TRUE(!tsh_l1_loss(r, r, &desc));
    CHECK_SAYS(TSH_ERR_LAYOUT, "a weight is to be replicated, or sharded as x");
    CHECK_TRUE(!tsh_cosine_similarity(p, r, 0, 0));
    CHECK_SAYS(TSH_ERR_LAYOUT, "complete the partial sum first");
    CHECK_TRUE(!tsh_cosine_similarity(s, r, 1, 0));
    CHECK_SAYS(TSH_ERR_LAYOUT, "make them alike");
    return 0;
}

static void layouts_that_do_not_fit_are_refused(void **state) {
    (void)state;
    ranks_run(1, refuse_rank, NULL);
    ranks_run(2, refuse_rank, NULL);
}

/* Only rank 1 has the element out of range; all ranks learn it. */
static int improbable_rank(tsh_ctx *ctx, void *user) {
    static const tsh_real values[4] = {(tsh_real)0.5, (tsh_real)0.25, (tsh_real)1.5, 1};
    tsh_tensor *x = tsh_tensor_from(ctx, TSH_REAL, tsh_shape1(4), tsh_replicated(), values);
    tsh_tensor *t = tsh_redistribute(tsh_ones(ctx, tsh_shape1(4)), tsh_sharded(0));
    (void)user;
    (void)tsh_barrier(tsh_world(ctx)); /* both have opened before one fails */
    x = tsh_binary_cross_entropy(tsh_redistribute(x, tsh_sharded(0)), t, NULL);
    x = tsh_redistribute(x, tsh_replicated());
    CHECK_TRUE(!x && !tsh_ok(ctx)); /* rank 1 tells the others, which wait in the all-reduce */
    CHECK_TRUE(ranks_says(ctx, TSH_ERR_ARGUMENT,
                          "tsh_binary_cross_entropy: x is 1.5 at (2), not a probability"));
    return 0;
}

static void an_element_out_of_range_is_an_error_everywhere(void **state) {
    (void)state;
    ranks_run(1, improbable_rank, NULL);
    ranks_run(2, improbable_rank, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_give_what_pytorch_gives),
        cmocka_unit_test(gradients_are_those_of_finite_differences),
        cmocka_unit_test(gradients_of_the_cosine),
        cmocka_unit_test(the_cosine_of_nothing_is_0),
        cmocka_unit_test(layouts_agree),
        cmocka_unit_test(layouts_of_the_cosine_agree),
        cmocka_unit_test(bits_do_not_depend_on_how_it_is_computed),
        cmocka_unit_test(an_input_may_be_both),
        cmocka_unit_test(half_precision_is_rounded_once),
        cmocka_unit_test(class_weights_may_be_bf16),
        cmocka_unit_test(layouts_that_do_not_fit_are_refused),
        cmocka_unit_test(an_element_out_of_range_is_an_error_everywhere),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
