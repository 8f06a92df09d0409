/* Cross-entropy with all its options: class weights, label smoothing, ignored rows, z-loss, indices
 * and probabilities, every reduction, against PyTorch's values and against the definition computed
 * in double, at every degree and in every layout, with the collectives counted. The tests named
 * after pain points are of mistakes that users of other systems suffer from. */
/* build: double */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/golden.h"
#include "../support/ranks.h"

enum { ROWS = 6, CLASSES = 13 };

/* One call: what goes in, how it lies, and what must come out. */
typedef struct call {
    const char *name;
    int64_t classes;
    double logits[ROWS * CLASSES], probs[ROWS * CLASSES], weight[CLASSES], up[ROWS];
    int64_t target[ROWS];
    int use_probs, use_weight;
    tsh_cross_entropy_desc desc;
    int x, t, w; /* dimensions along which logits, target and weight are sharded; -1: R */
    double out[ROWS], grad[ROWS * CLASSES];
    double tolerance; /* relative to 1 + |want| */
} call;

static tsh_tensor *make(tsh_ctx *ctx, tsh_dtype dtype, tsh_shape shape, int dim,
                        const void *values) {
    tsh_layout layout = dim < 0 ? tsh_replicated() : tsh_sharded(dim);
    tsh_tensor *t = tsh_tensor_new(ctx, dtype, shape, layout);
    size_t n = (size_t)tsh_numel(t), e;
    tsh_real real[ROWS * CLASSES];
    for (e = 0; e < n && dtype == TSH_REAL; e++) real[e] = (tsh_real)((const double *)values)[e];
    if (t)
        (void)tsh_write(ctx, t, TSH_GLOBAL, dtype == TSH_REAL ? (const void *)real : values,
                        n * tsh_dtype_size(dtype));
    return t;
}

static uint64_t all_calls(tsh_ctx *ctx) {
    uint64_t n = 0;
    int i;
    for (i = 0; i < TSH_COLL_KINDS; i++) n += tsh_tp(ctx)->stats.calls[i];
    return n;
}

static int same_numbers(tsh_ctx *ctx, const call *c, const char *what, tsh_tensor *t,
                        const double *want) {
    double *got = t ? ranks_values(ctx, t) : NULL;
    int64_t e;
    CHECK(got, "%s: there is no %s", c->name, what);
    for (e = 0; e < tsh_numel(t); e++) {
        double room = c->tolerance * (1 + fabs(want[e]));
        CHECK(got[e] == want[e] || fabs(got[e] - want[e]) <= room ||
                  (got[e] != got[e] && want[e] != want[e]),
              "%s, %d classes: %s %d is %.9g, not %.9g", c->name, (int)c->classes, what, (int)e,
              got[e], want[e]);
    }
    free(got);
    return 0;
}

/* sum(out * up), complete. */
static tsh_tensor *weigh(tsh_ctx *ctx, const call *c, tsh_tensor *out) {
    tsh_layout layout = tsh_layout_of(out);
    tsh_tensor *up = make(ctx, TSH_REAL, tsh_shape_of(out), -1, c->up);
    if (layout.kind == TSH_SHARDED) up = tsh_redistribute(up, layout);
    return tsh_full_tensor(tsh_sum(tsh_mul(out, up), TSH_ALL, 0));
}

static int run_call(tsh_ctx *ctx, const call *c) {
    tsh_tensor *x = make(ctx, TSH_REAL, tsh_shape2(ROWS, c->classes), c->x, c->logits), *t, *out;
    tsh_tensor *w = NULL, *loss;
    tsh_cross_entropy_desc desc = c->desc;
    int mean = desc.reduction == TSH_REDUCE_MEAN, many = tsh_tp(ctx)->size > 1;
    uint64_t before, forward = c->x == 1 ? 2 : c->x == 0 && mean && !c->use_probs ? 1 : 0;
    tsh_layout layout;
    if (c->use_probs)
        t = make(ctx, TSH_REAL, tsh_shape2(ROWS, c->classes), c->t, c->probs);
    else
        t = make(ctx, TSH_I64, tsh_shape1(ROWS), c->t, c->target);
    if (c->use_weight)
        w = desc.weight = make(ctx, TSH_REAL, tsh_shape1(c->classes), c->w, c->weight);
    tsh_requires_grad(x, 1);
    before = all_calls(ctx);
    out = tsh_cross_entropy(x, t, &desc);
    CHECK(out, "%s", c->name);
    CHECK(all_calls(ctx) - before == (many ? forward : 0), "%s: %d collectives forward", c->name,
          (int)(all_calls(ctx) - before));
    layout = tsh_layout_of(out);
    CHECK(layout.kind == (c->x                                ? TSH_REPLICATED
                          : desc.reduction == TSH_REDUCE_NONE ? TSH_SHARDED
                                                              : TSH_PARTIAL),
          "%s: the layout of the result", c->name);
    loss = weigh(ctx, c, out);
    if (same_numbers(ctx, c, "value", out, c->out)) return 1;
    before = all_calls(ctx);
    CHECK(tsh_backward(ctx, loss) == TSH_OK, "%s", c->name);
    CHECK(all_calls(ctx) == before, "%s: %d collectives backward", c->name,
          (int)(all_calls(ctx) - before));
    if (same_numbers(ctx, c, "gradient", tsh_grad(x), c->grad)) return 1;
    CHECK(tsh_step_end(ctx) == TSH_OK, "%s", c->name);
    tsh_tensor_free(x);
    tsh_tensor_free(t);
    tsh_tensor_free(w);
    return 0;
}

/* ---------------------------------------------------------------- PyTorch's values */

typedef struct golden_run {
    const golden_file *file;
    int x; /* layout of the logits */
} golden_run;

static int golden_read(tsh_ctx *ctx, const golden_file *file, const char *name, const char *what,
                       double *out) {
    golden_tensor g;
    int64_t e;
    CHECK(golden_find(file, name, what, &g) && g.dtype == TSH_F32, "%s.%s", name, what);
    for (e = 0; e < g.count; e++) out[e] = (double)((const float *)g.data)[e];
    return 0;
}

static int golden_call(tsh_ctx *ctx, const golden_file *file, const char *letters, const char *kind,
                       int reduction, call *c) {
    static const char *const reductions[] = {"mean", "sum", "none"};
    static char name[RANKS_MAX][64];
    char *text = name[tsh_world(ctx)->rank], key[32];
    int steep = strcmp(kind, "steep") == 0;
    golden_tensor g;
    (void)snprintf(text, sizeof name[0], "%s_%s_%s", letters, kind, reductions[reduction]);
    (void)snprintf(key, sizeof key, "%s_target", kind);
    c->name = text;
    c->classes = 7;
    c->use_probs = strcmp(kind, "probs") == 0;
    c->use_weight = strchr(letters, 'w') != NULL;
    c->desc.reduction = (tsh_reduction)reduction;
    c->desc.ignore = strcmp(kind, "inside") == 0;
    c->desc.ignore_index = 2;
    c->desc.label_smoothing = strchr(letters, 'e') ? 0.1 : 0;
    c->desc.z_loss = strchr(letters, 'z') ? 0.01 : 0;
    if (golden_read(ctx, file, "options", steep ? "steep" : "logits", c->logits) ||
        golden_read(ctx, file, "options", "probs", c->probs) ||
        golden_read(ctx, file, "options", "weight", c->weight) ||
        golden_read(ctx, file, "options", "up", c->up) ||
        golden_read(ctx, file, text, "out", c->out) ||
        golden_read(ctx, file, text, "grad", c->grad))
        return 1;
    if (c->use_probs) return 0;
    CHECK(golden_find(file, "options", key, &g), "%s", key);
    memcpy(c->target, g.data, sizeof c->target);
    return 0;
}

static int golden_rank(tsh_ctx *ctx, void *user) {
    static const char *const letters[] = {"", "w", "e", "we", "z", "wez"};
    static const char *const kinds[] = {"plain", "outside", "steep", "inside", "nothing", "probs"};
    const golden_run *run = (const golden_run *)user;
    int l, k, reduction;
    for (l = 0; l < COUNT(letters); l++)
        for (k = 0; k < COUNT(kinds); k++)
            for (reduction = 0; reduction < 3; reduction++) {
                call c;
                memset(&c, 0, sizeof c);
                if (golden_call(ctx, run->file, letters[l], kinds[k], reduction, &c)) return 1;
                c.x = run->x;
                c.t = c.x == 0 || (c.use_probs && reduction == 1) ? c.x : -1;
                c.w = c.x == 1 && l % 2 ? 0 : -1;
                /* the wanted values are rounded to float; sums of 7 rounded terms and a logarithm:
                 * 16 roundings */
                c.tolerance = 16 * 1.2e-7;
                if (run_call(ctx, &c)) return 1;
            }
    CHECK_OK();
    return 0;
}

static void every_option_gives_what_pytorch_gives(void **state) {
    golden_file file = golden_open("loss_options");
    golden_run run;
    int i;
    (void)state;
    run.file = &file;
    for (i = 0; i < COUNT(ranks_degrees); i++)
        for (run.x = -1; run.x < 2; run.x++) ranks_run(ranks_degrees[i], golden_rank, &run);
    golden_finish(&file);
}

/* ---------------------------------------------------- PyTorch's, classes in dimension 1 */

/* A golden tensor of up to ROWS * CLASSES elements, sharded along dim (-1: R); NULL: none. */
static tsh_tensor *golden_make(tsh_ctx *ctx, const golden_file *file, const char *name,
                               const char *what, int dim) {
    double values[ROWS * CLASSES];
    golden_tensor g;
    if (!golden_find(file, name, what, &g) || g.count > ROWS * CLASSES) return NULL;
    if (g.dtype == TSH_I64) return make(ctx, TSH_I64, g.shape, dim, g.data);
    if (golden_read(ctx, file, name, what, values)) return NULL;
    return make(ctx, TSH_REAL, g.shape, dim, values);
}

/* c: name, reduction, form and kind of the golden, and c->x, the layout of the logits. */
static int dim_call(tsh_ctx *ctx, const golden_file *file, const char *form, const char *kind,
                    call *c) {
    tsh_cross_entropy_desc desc = c->desc;
    const int probs = strcmp(kind, "probs") == 0, rows = c->x - (c->x > 1);
    tsh_tensor *x = golden_make(ctx, file, form, "logits", c->x);
    tsh_tensor *t = golden_make(ctx, file, form, kind, probs ? c->t : c->x == 1 ? -1 : rows);
    tsh_tensor *out;
    tsh_layout layout, slope;
    if (c->use_weight) desc.weight = golden_make(ctx, file, form, "weight", c->x == 1 ? 0 : -1);
    CHECK(x && t && (!c->use_weight || desc.weight), "%s", c->name);
    if (golden_read(ctx, file, form, "up", c->up) ||
        golden_read(ctx, file, c->name, "out", c->out) ||
        golden_read(ctx, file, c->name, "grad", c->grad))
        return 1;
    tsh_requires_grad(x, 1);
    out = tsh_cross_entropy(x, t, &desc);
    CHECK(out, "%s", c->name);
    layout = tsh_layout_of(out);
    CHECK(layout.kind == (c->x < 0 || c->x == 1               ? TSH_REPLICATED
                          : desc.reduction == TSH_REDUCE_NONE ? TSH_SHARDED
                                                              : TSH_PARTIAL),
          "%s: the layout of the result", c->name);
    CHECK(layout.kind != TSH_SHARDED || layout.dim == rows, "%s: S(%d)", c->name, layout.dim);
    if (same_numbers(ctx, c, "value", out, c->out)) return 1;
    CHECK(tsh_backward(ctx, weigh(ctx, c, out)) == TSH_OK, "%s", c->name);
    layout = tsh_layout_of(x);
    slope = tsh_layout_of(tsh_grad(x));
    CHECK(slope.kind == layout.kind && (c->x < 0 || slope.dim == c->x), "%s: gradient", c->name);
    if (same_numbers(ctx, c, "gradient", tsh_grad(x), c->grad)) return 1;
    CHECK(tsh_step_end(ctx) == TSH_OK, "%s", c->name);
    tsh_tensor_free(x);
    tsh_tensor_free(t);
    tsh_tensor_free(desc.weight);
    return 0;
}

static int dim_rank(tsh_ctx *ctx, void *user) {
    static const char *const reductions[] = {"mean", "sum", "none"};
    static const char *const kinds[] = {"outside", "inside", "probs"};
    static const char *const forms[] = {"flat", "deep"};
    const golden_file *file = (const golden_file *)user;
    int f, k, w, r, x;
    for (f = 0; f < COUNT(forms); f++)
        for (k = 0; k < COUNT(kinds); k++)
            for (w = 0; w < 2; w++)
                for (r = 0; r < 3; r++)
                    for (x = -1; x < 3 + f; x++) {
                        char name[64];
                        call c;
                        memset(&c, 0, sizeof c);
                        (void)snprintf(name, sizeof name, "%s_%s_%s_%s", forms[f], w ? "we" : "",
                                       kinds[k], reductions[r]);
                        c.name = name;
                        c.x = x;
                        c.t = r == 1 ? x : -1; /* probabilities are sharded, too */
                        c.use_weight = w;
                        c.tolerance = 16 * 1.2e-7; /* as in golden_rank */
                        c.desc.dim = 1;
                        c.desc.reduction = (tsh_reduction)r;
                        c.desc.label_smoothing = w ? 0.1 : 0;
                        c.desc.ignore = k == 1;
                        c.desc.ignore_index = 2;
                        if (dim_call(ctx, file, forms[f], kinds[k], &c)) return 1;
                    }
    CHECK_OK();
    return 0;
}

/* 6 classes: equal shards on 2 and 3 ranks, an empty one on the last of 4. 5: unequal shards. */
static void classes_in_dimension_1_give_what_pytorch_gives(void **state) {
    golden_file file = golden_open("loss_dim");
    int i;
    (void)state;
    for (i = 0; i < COUNT(ranks_degrees); i++) ranks_run(ranks_degrees[i], dim_rank, &file);
    golden_finish(&file);
}

/* Logits (2, 5, 3), a view of a tensor whose classes lie last, are not copied; others once. */
static int dim_memory(tsh_ctx *ctx, void *user) {
    static const int64_t target[6] = {0, 4, 1, 2, 3, 3};
    const tsh_cross_entropy_desc desc = {.dim = 1};
    tsh_tensor *t = make(ctx, TSH_I64, tsh_shape2(2, 3), -1, target), *x;
    size_t bytes[2];
    int transposed;
    (void)user;
    for (transposed = 0; transposed < 2; transposed++) {
        size_t before;
        x = tsh_requires_grad(tsh_tensor_new(ctx, TSH_REAL,
                                             transposed ? tsh_shape3(2, 3, 5) : tsh_shape3(2, 5, 3),
                                             tsh_replicated()),
                              1);
        before = tsh_mem_stats(ctx).step_live;
        CHECK(tsh_cross_entropy(transposed ? tsh_transpose(x, 1, 2) : x, t, &desc), "the loss");
        bytes[transposed] = tsh_mem_stats(ctx).step_live - before;
        CHECK(tsh_step_end(ctx) == TSH_OK, "the end");
        tsh_tensor_free(x);
    }
    CHECK(bytes[0] >= bytes[1] + 30 * sizeof(tsh_real), "%d bytes, and %d", (int)bytes[0],
          (int)bytes[1]);
    CHECK(bytes[0] < bytes[1] + 2 * 30 * sizeof(tsh_real) + 256, "%d bytes, and %d", (int)bytes[0],
          (int)bytes[1]);
    return 0;
}

static void logits_are_copied_once_at_most(void **state) {
    (void)state;
    ranks_run(1, dim_memory, NULL);
}

/* ------------------------------------------------- the definition, in double
 * Torch's documentation read word by word: log-probabilities, a target distribution smoothed over
 * all classes, weights, and only then the reduction. x - most - log(sum), for lse is rounded to the
 * size of most. */

static double share_of(const call *c, int64_t i, int64_t k) {
    double e = c->desc.label_smoothing;
    double t = c->use_probs ? c->probs[i * c->classes + k] : c->target[i] == k;
    return (c->use_weight ? c->weight[k] : 1) * ((1 - e) * t + e / (double)c->classes);
}

static void define(call *c) {
    double divisor = 0, total = 0, loss[ROWS], z = c->desc.z_loss;
    int64_t i, k, v = c->classes;
    int counts[ROWS];
    for (i = 0; i < ROWS; i++) {
        const double *x = c->logits + i * v;
        double most = x[0], sum = 0, lse, mass = 0;
        int64_t skip = c->desc.ignore ? c->desc.ignore_index : -100;
        counts[i] = c->use_probs || c->target[i] != skip;
        for (k = 1; k < v; k++) most = x[k] > most ? x[k] : most;
        for (k = 0; k < v; k++) sum += exp(x[k] - most);
        lse = most + log(sum);
        loss[i] = counts[i] ? z * lse * lse : 0;
        for (k = 0; k < v && counts[i]; k++) {
            loss[i] -= share_of(c, i, k) * (x[k] - most - log(sum));
            mass += share_of(c, i, k);
        }
        for (k = 0; k < v; k++)
            c->grad[i * v + k] = counts[i] ? exp(x[k] - most - log(sum)) * (mass + 2 * z * lse) -
                                                 share_of(c, i, k)
                                           : 0;
        total += loss[i];
        if (counts[i]) divisor += c->use_weight && !c->use_probs ? c->weight[c->target[i]] : 1;
    }
    for (i = 0; i < ROWS; i++) {
        double g = c->desc.reduction == TSH_REDUCE_NONE ? c->up[i] : c->up[0];
        if (c->desc.reduction == TSH_REDUCE_MEAN) g /= divisor > 0 ? divisor : 1;
        for (k = 0; k < v; k++) c->grad[i * v + k] *= g;
        c->out[i] = loss[i];
    }
    if (c->desc.reduction == TSH_REDUCE_SUM) c->out[0] = total;
    if (c->desc.reduction == TSH_REDUCE_MEAN)
        c->out[0] = divisor > 0 || !c->desc.empty_zero ? total / divisor : 0;
}

/* Numbers of call `number`: logits up to `scale`, weights and probabilities with exact halves. */
static call invent(int64_t classes, uint64_t number, double scale) {
    static const double eighth = 0.125;
    call c;
    int64_t i, k;
    memset(&c, 0, sizeof c);
    c.name = "the definition";
    c.classes = classes;
    c.x = 1;
    c.t = c.w = -1;
    for (i = 0; i < ROWS; i++) {
        c.up[i] = ranks_number(number + 3, (uint64_t)i);
        c.target[i] = (int64_t)(ranks_mix(number, (uint64_t)i) % (uint64_t)classes);
        for (k = 0; k < classes; k++) {
            uint64_t e = (uint64_t)(i * classes + k);
            c.logits[e] = scale * eighth * (double)(int64_t)(ranks_mix(number + 1, e) % 17) - scale;
            c.probs[e] = eighth * (double)(ranks_mix(number + 2, e) % 5);
        }
    }
    for (k = 0; k < classes; k++)
        c.weight[k] = 0.25 * (double)(1 + ranks_mix(number + 4, (uint64_t)k) % 7);
    /* float: sums of 13 rounded terms of size 10 and a logarithm; double: the same of its eps */
    c.tolerance = sizeof(tsh_real) == 4 ? 4e-6 : 1e-14;
    return c;
}

/* Calls f for every combination of options at one number of classes. */
static int grid(tsh_ctx *ctx, int64_t classes, int (*f)(tsh_ctx *, const call *)) {
    int w, e, left, reduction, probs, i;
    uint64_t number = (uint64_t)classes * 1000;
    for (w = 0; w < 3; w++)
        for (e = 0; e < 2; e++)
            for (probs = 0; probs < 2; probs++)
                for (left = 0; left < (probs ? 2 : 4); left++)
                    for (reduction = 0; reduction < 3; reduction++) {
                        call c = invent(classes, number += 10, 2);
                        c.use_probs = probs;
                        c.use_weight = w > 0;
                        c.w = w == 2 ? 0 : -1;
                        c.t = probs && left ? 1 : -1;
                        c.desc.reduction = (tsh_reduction)reduction;
                        c.desc.label_smoothing = e ? 0.1 : 0;
                        c.desc.z_loss = number % 20 ? 0.05 : 0;
                        c.desc.ignore = !probs && left == 1;
                        c.desc.ignore_index = c.target[2]; /* a class of the range */
                        c.desc.empty_zero = left == 3;
                        for (i = 0; i < ROWS && left > 1; i++) c.target[i] = -100;
                        define(&c);
                        if (f(ctx, &c)) return 1;
                    }
    CHECK_OK();
    return 0;
}

static int grid_rank(tsh_ctx *ctx, void *user) {
    return grid(ctx, *(const int64_t *)user, run_call);
}

static void every_option_gives_what_the_definition_says(void **state) {
    static const int64_t classes[] = {2, 5, 7, 10, 13};
    int64_t v;
    int i, j;
    (void)state;
    for (i = 0; i < COUNT(ranks_degrees); i++)
        for (j = 0; j < COUNT(classes); j++) {
            v = classes[j];
            ranks_run(ranks_degrees[i], grid_rank, &v);
        }
}

/* Rows sharded: an own grid, for the divisor is what may go wrong. */
static int by_rows(tsh_ctx *ctx, const call *given) {
    call c = *given;
    c.x = 0;
    c.t = !c.use_probs || c.t == 1 ? 0 : -1;
    c.w = -1;
    return run_call(ctx, &c);
}

static int rows_rank(tsh_ctx *ctx, void *user) {
    (void)user;
    return grid(ctx, 5, by_rows);
}

static void rows_may_be_sharded(void **state) {
    int i;
    (void)state;
    for (i = 0; i < COUNT(ranks_degrees); i++) ranks_run(ranks_degrees[i], rows_rank, NULL);
}

/* Logits up to a thousand: no option may lose more than rounding. */
static int thousand_rank(tsh_ctx *ctx, void *user) {
    int option;
    (void)user;
    for (option = 0; option < 16; option++) {
        call c = invent(10, 50 + (uint64_t)option, 1000);
        c.use_weight = option & 1;
        c.desc.label_smoothing = option & 2 ? 0.1 : 0;
        c.use_probs = (option & 4) != 0;
        c.desc.z_loss = option & 8 ? 0.001 : 0;
        c.desc.reduction = TSH_REDUCE_NONE;
        define(&c);
        if (run_call(ctx, &c)) return 1;
    }
    CHECK_OK();
    return 0;
}

static void logits_of_a_thousand_are_exact(void **state) {
    int i;
    (void)state;
    for (i = 0; i < COUNT(ranks_degrees); i++) ranks_run(ranks_degrees[i], thousand_rank, NULL);
}

/* Fused segments in the vocabulary, strides that are not dense, more dimensions. Letters: p: the
 * integers of input 1 are probabilities; x, t: that input is transposed; n: no reduction; d:
 * classes are in dimension 1. */
static tsh_tensor *op_options(probe *p) {
    tsh_cross_entropy_desc desc = {.label_smoothing = 0.25, .z_loss = 0.125};
    tsh_tensor *x = p->in[0], *t = p->in[1];
    if (probe_has(p, "x")) x = tsh_transpose(x, 0, 1);
    if (probe_has(p, "t")) t = tsh_transpose(t, 0, 1);
    if (probe_has(p, "p")) t = tsh_cast(t, TSH_REAL);
    if (probe_has(p, "n")) desc.reduction = TSH_REDUCE_NONE;
    if (probe_has(p, "d")) desc.dim = 1;
    if (p->in[2]) desc.weight = tsh_add_scalar(tsh_cast(p->in[2], TSH_REAL), 0.5);
    return tsh_cross_entropy(x, t, &desc);
}

static void every_form_of_the_inputs_gives_the_same(void **state) {
#define FUSED(dim) "S(" #dim ", 3 segments, unit 2)"
/* sums in another order than one rank's */
#define ROW(arg, out, ...) TRIAL(op_options, arg, out, 2e-5, 0, __VA_ARGS__)
    static const trial rows[] = {
        ROW("", "R", "4,6n " FUSED(1), "%6n 4 R", "%4 6n " FUSED(0)),
        ROW("", "R", "4,6n " FUSED(1), "%6n 4 R", "%4 6n R"),
        ROW("n", "R", "2,3,6n " FUSED(2), "%6n 2,3 R", "%4 6n R"),
        ROW("p", "R", "4,6n " FUSED(1), "%3 4,6n " FUSED(1), "%4 6n R"),
        ROW("p", "R", "4,6n " FUSED(1), "%3 4,6n R", "%4 6n " FUSED(0)),
        ROW("p x", "R", "6n,4 " FUSED(0), "%3 4,6n R"),
        ROW("p x t", "R", "6n,4 " FUSED(0), "%3 6n,4 " FUSED(0), "%4 6n R"),
        ROW("p t", "R", "4,5n S(1)", "%3 5n,4 R", "%4 5n S(0)"),
        ROW("p t", "R", "4,5n R", "%3 5n,4 R", "%4 5n R"),
        ROW("p n", "S(1)", "2,n,5 S(1)", "%3 2,n,5 R", "%4 5 R"),
        ROW("p n", "S(1)", "2,n,5 S(1)", "%3 2,n,5 S(1)", "%4 5 R"),
        ROW("p x t", "P", "5,n S(1)", "%3 5,n R", "%4 5 R"),
        ROW("", "P", "2,n,5 S(1)", "%5 2,n S(1)", "%4 5 R"),
        ROW("d", "R", "2,6n,3 R", "%6n 2,3 R", "%4 6n R"),
        ROW("d", "R", "2,6n,3 " FUSED(1), "%6n 2,3 R", "%4 6n " FUSED(0)),
        ROW("d n", "R", "2,5n,3,2 S(1)", "%5n 2,3,2 R", "%4 5n R"),
        ROW("d n", "S(1)", "2,5,n,3 S(2)", "%5 2,n,3 S(1)", "%4 5 R"),
        ROW("d n", "S(0)", "n,5,3 S(0)", "%5 n,3 S(0)"),
        ROW("d", "P", "2,5,n S(2)", "%5 2,n S(1)", "%4 5 R"),
        ROW("d", "P", "n,5 S(0)", "%5 n S(0)", "%4 5 R"),
        ROW("d p", "R", "2,5n,3 S(1)", "%3 2,5n,3 S(1)", "%4 5n S(0)"),
        ROW("d p n", "S(1)", "2,5,n S(2)", "%3 2,5,n R", "%4 5 R"),
        ROW("d p n", "S(1)", "2,5,n S(2)", "%3 2,5,n S(2)"),
        ROW("d p x t", "P", "5,n,2 S(1)", "%3 5,n,2 R"),
    };
    static const int64_t lengths[] = {1, 2, 5};
    (void)state;
    trials_prove(rows, COUNT(rows), lengths, COUNT(lengths));
}

/* ------------------------------------------------------------- pain points */

/* Megatron smooths by the local number of classes: each rank has another loss. Its numbers are V =
 * 8, e = 0.1: here they are torch's at every degree, and no degree changes them. */
static int pain_1(tsh_ctx *ctx, void *user) {
    static const double logits[8] = {2, -1, 0.5, 3, -2, 1, 0, -0.5};
    call c = invent(8, 1, 1);
    int64_t k;
    (void)user;
    for (k = 0; k < ROWS * 8; k++) c.logits[k] = logits[(k + k / 8) % 8];
    c.desc.label_smoothing = 0.1;
    define(&c);
    return run_call(ctx, &c);
}

static void test_pain_1_label_smoothing_under_tp(void **state) {
    int i;
    (void)state;
    for (i = 0; i < COUNT(ranks_degrees); i++) ranks_run(ranks_degrees[i], pain_1, NULL);
}

/* Gathered logits fed to a vocabulary-parallel loss make it log P too large. Here the layout says
 * that they are whole; what is a partial sum is refused. */
static int pain_2(tsh_ctx *ctx, void *user) {
    call c = invent(10, 2, 2);
    tsh_tensor *x = make(ctx, TSH_REAL, tsh_shape2(ROWS, 10), 1, c.logits);
    tsh_tensor *t = make(ctx, TSH_I64, tsh_shape1(ROWS), -1, c.target), *partial;
    (void)user;
    c.desc.reduction = TSH_REDUCE_SUM;
    define(&c);
    if (same_numbers(ctx, &c, "gathered", tsh_cross_entropy(tsh_full_tensor(x), t, &c.desc),
                     c.out) ||
        same_numbers(ctx, &c, "sharded", tsh_cross_entropy(x, t, &c.desc), c.out))
        return 1;
    (void)tsh_barrier(tsh_world(ctx));
    partial = tsh_redistribute(tsh_full_tensor(x), tsh_partial());
    CHECK(!tsh_cross_entropy(partial, t, &c.desc), "a partial sum is no logit");
    CHECK(strstr(tsh_last_error(ctx)->message, "(6, 10) P are a partial sum") &&
              strstr(tsh_last_error(ctx)->message, "tsh_redistribute(logits, tsh_replicated())"),
          "its sentence");
    tsh_clear_error(ctx);
    (void)tsh_barrier(tsh_world(ctx));
    return 0;
}

static void test_pain_2_gathered_logits_are_not_counted_twice(void **state) {
    int i;
    (void)state;
    for (i = 0; i < COUNT(ranks_degrees); i++) ranks_run(ranks_degrees[i], pain_2, NULL);
}

/* A vocabulary that does not divide is cut unevenly; one padded by hand, with -inf, has the loss
 * and the gradient of the one without padding, smoothing too. */
static int pain_4(tsh_ctx *ctx, void *user) {
    int probs, weights;
    (void)user;
    for (probs = 0; probs < 2; probs++)
        for (weights = 0; weights < 2; weights++) {
            call small = invent(7, 4, 2), c = invent(12, 4, 2);
            int64_t i, k;
            small.use_probs = c.use_probs = probs;
            small.use_weight = c.use_weight = weights;
            small.desc.label_smoothing = c.desc.label_smoothing = 0.1;
            small.desc.z_loss = c.desc.z_loss = 0.01;
            define(&small);
            for (i = 0; i < ROWS; i++)
                for (k = 0; k < 12; k++) {
                    c.logits[i * 12 + k] = k < 7 ? small.logits[i * 7 + k] : -(double)INFINITY;
                    c.probs[i * 12 + k] = k < 7 ? small.probs[i * 7 + k] : 0;
                    c.grad[i * 12 + k] = k < 7 ? small.grad[i * 7 + k] : 0;
                }
            memcpy(c.weight, small.weight, sizeof small.weight);
            for (k = 7; k < 12; k++) c.weight[k] = 3;
            memcpy(c.target, small.target, sizeof c.target);
            memcpy(c.up, small.up, sizeof c.up);
            memcpy(c.out, small.out, sizeof c.out);
            if (run_call(ctx, &small) || run_call(ctx, &c)) return 1;
        }
    return 0;
}

static void test_pain_4_padding_does_not_leak_into_the_loss(void **state) {
    int i;
    (void)state;
    for (i = 0; i < COUNT(ranks_degrees); i++) ranks_run(ranks_degrees[i], pain_4, NULL);
}

/* Rows sharded so that one rank has nothing to count, and the weights differ: numerator and divisor
 * are global. Nothing to count anywhere: NaN as torch, or 0; the gradients are 0 either way. */
static int pain_5(tsh_ctx *ctx, void *user) {
    int x, zero, all, i;
    (void)user;
    for (x = -1; x < 2; x++)
        for (all = 0; all < 2; all++)
            for (zero = 0; zero < 2; zero++) {
                call c = invent(5, 5, 2);
                c.x = x;
                c.t = x ? -1 : 0;
                c.use_weight = 1;
                c.desc.empty_zero = zero;
                c.desc.label_smoothing = 0.1;
                for (i = 0; i < (all ? ROWS : 3); i++) c.target[i] = -100;
                define(&c);
                if (run_call(ctx, &c)) return 1;
            }
    CHECK_OK();
    return 0;
}

static void test_pain_5_ignored_rows_and_weighted_means(void **state) {
    int i;
    (void)state;
    for (i = 0; i < COUNT(ranks_degrees); i++) ranks_run(ranks_degrees[i], pain_5, NULL);
}

/* ------------------------------------------------------------------- refused */

/* Weights of 0: the divisor is 0 though rows count. */
static int weights_of_nothing(tsh_ctx *ctx, void *user) {
    int zero;
    (void)user;
    for (zero = 0; zero < 2; zero++) {
        call c = invent(5, 6, 2);
        tsh_tensor *x = make(ctx, TSH_REAL, tsh_shape2(ROWS, 5), 1, c.logits);
        tsh_tensor *t = make(ctx, TSH_I64, tsh_shape1(ROWS), -1, c.target);
        double value;
        memset(c.weight, 0, sizeof c.weight);
        c.desc.weight = make(ctx, TSH_REAL, tsh_shape1(5), -1, c.weight);
        c.desc.empty_zero = zero;
        value = tsh_item(ctx, tsh_cross_entropy(x, t, &c.desc));
        CHECK(zero ? value == 0 : value != value, "%g", value);
    }
    CHECK_OK();
    return 0;
}

/* A bad target is an error on every rank; where rows are sharded, on the ranks that do not hold it
 * through their peer, with its global row. */
static int out_of_range(tsh_ctx *ctx, void *user) {
    int x = *(const int *)user;
    call c = invent(5, 7, 2);
    const char *sentence = "target 5 at row 5 is outside [0, 5)";
    tsh_tensor *logits = make(ctx, TSH_REAL, tsh_shape2(ROWS, 5), x, c.logits), *t;
    c.target[5] = 5;
    t = make(ctx, TSH_I64, tsh_shape1(ROWS), x == 0 ? 0 : -1, c.target);
    (void)tsh_barrier(tsh_world(ctx));
    CHECK(!tsh_cross_entropy(logits, t, NULL) || x == 0, "target 5 of 5 classes");
    if (tsh_ok(ctx)) (void)tsh_barrier(tsh_world(ctx)); /* where another rank has the row */
    (void)tsh_ok(ctx);
    CHECK(strstr(tsh_last_error(ctx)->message, sentence), "its sentence");
    return 0;
}

static void a_bad_target_is_an_error_on_every_rank(void **state) {
    int i, x;
    (void)state;
    for (i = 0; i < COUNT(ranks_degrees); i++) {
        for (x = -1; x < 2; x++) ranks_run(ranks_degrees[i], out_of_range, &x);
        ranks_run(ranks_degrees[i], weights_of_nothing, NULL);
    }
}

static int refuses(tsh_ctx *ctx, tsh_tensor *x, tsh_tensor *t, const tsh_cross_entropy_desc *desc,
                   tsh_result code, const char *part) {
    (void)tsh_barrier(tsh_world(ctx));
    CHECK(!tsh_cross_entropy(x, t, desc), "%s", part);
    CHECK(tsh_last_error(ctx)->code == code, "%s", part);
    CHECK(strstr(tsh_last_error(ctx)->message, part), "%s", part);
    tsh_clear_error(ctx);
    (void)tsh_barrier(tsh_world(ctx));
    return 0;
}

/* whole: (ROWS, 6) */
static int refusals_of_dim(tsh_ctx *ctx, tsh_tensor *whole) {
    const tsh_cross_entropy_desc last = {.reduction = TSH_REDUCE_MEAN}, first = {.dim = 1};
    tsh_tensor *x = tsh_reshape(whole, tsh_shape3(2, 6, 3)), *cut; /* classes: 6 */
    tsh_tensor *y = tsh_reshape(whole, tsh_shape3(2, 3, 6));
    static const int64_t ids[6] = {0};
    tsh_tensor *t = make(ctx, TSH_I64, tsh_shape2(2, 3), -1, ids);
    tsh_cross_entropy_desc weighted = {.dim = 1};
    weighted.weight = make(ctx, TSH_REAL, tsh_shape1(3), -1, (const double[3]){1, 1, 1});
    cut = tsh_redistribute(x, tsh_sharded(2));
    return refuses(ctx, x, t, &last, TSH_ERR_SHAPE,
                   "logits (2, 6, 3) R and target i64 (2, 3) R; takes (.., V) and integers (..), "
                   "or probabilities (.., V); if classes are in dimension 1, as here, give "
                   ".dim = 1") ||
           refuses(ctx, y, t, &first, TSH_ERR_SHAPE,
                   "with .dim = 1, takes (N, V, d1, ..) and integers (N, d1, ..), or "
                   "probabilities of the logits' shape; if classes are last, as here, give "
                   ".dim = 0") ||
           refuses(ctx, x, y, &first, TSH_ERR_SHAPE, "or probabilities of the logits' shape") ||
           refuses(ctx, x, t, &weighted, TSH_ERR_SHAPE, "have 6 classes, weight is (3) R") ||
           refuses(ctx, cut, t, &first, TSH_ERR_LAYOUT,
                   "(2, 6, 3) S(2) and (2, 3) R do not go together; the target is to be sharded as "
                   "the logits' rows: tsh_redistribute(target, tsh_sharded(1))") ||
           refuses(ctx, cut, y, &first, TSH_ERR_SHAPE, "(2, 3, 6)");
}

static int refusals(tsh_ctx *ctx, void *user) {
    call c = invent(6, 8, 2);
    const tsh_shape form = tsh_shape2(ROWS, 6);
    tsh_tensor *x = make(ctx, TSH_REAL, form, 1, c.logits);
    tsh_tensor *whole = make(ctx, TSH_REAL, form, -1, c.logits);
    tsh_tensor *t = make(ctx, TSH_I64, tsh_shape1(ROWS), -1, c.target);
    tsh_tensor *p = make(ctx, TSH_REAL, form, 0, c.probs);
    tsh_cross_entropy_desc d, usual = {.reduction = TSH_REDUCE_MEAN};
    (void)user;
    d = usual;
    d.label_smoothing = 1.5;
    if (refuses(ctx, x, t, &d, TSH_ERR_ARGUMENT, "label_smoothing is 1.5, not within [0, 1]"))
        return 1;
    d.label_smoothing = (double)NAN;
    if (refuses(ctx, x, t, &d, TSH_ERR_ARGUMENT, "label_smoothing")) return 1;
    d = usual;
    d.z_loss = -1;
    if (refuses(ctx, x, t, &d, TSH_ERR_ARGUMENT, "z_loss is -1")) return 1;
    d = usual;
    d.ignore = 1;
    d.ignore_index = 3;
    if (refuses(ctx, x, whole, &d, TSH_ERR_ARGUMENT, "ignore_index 3 is for integer targets"))
        return 1;
    if (refuses(ctx, x, p, NULL, TSH_ERR_LAYOUT, "laid out as the logits")) return 1;
    if (refuses(ctx, whole, p, NULL, TSH_ERR_LAYOUT, "laid out as the logits")) return 1;
    d = usual;
    d.weight = make(ctx, TSH_REAL, tsh_shape1(5), -1, c.weight);
    if (refuses(ctx, x, t, &d, TSH_ERR_SHAPE, "have 6 classes, weight is (5) R")) return 1;
    d.weight = make(ctx, TSH_REAL, tsh_shape1(6), 0, c.weight);
    if (refuses(ctx, whole, t, &d, TSH_ERR_LAYOUT, "tsh_redistribute(weight, tsh_replicated())"))
        return 1;
    d.weight = t;
    if (refuses(ctx, x, t, &d, TSH_ERR_DTYPE, "weight")) return 1;
    d = usual;
    d.dim = 2;
    if (refuses(ctx, x, t, &d, TSH_ERR_ARGUMENT, "dim is 2; classes are in the last dimension (0)"))
        return 1;
    d.dim = 1;
    CHECK(tsh_cross_entropy(x, t, &d), "of (N, V), dimension 1 is the last");
    CHECK(tsh_cross_entropy(tsh_reshape(tsh_slice(whole, 0, 0, 1), tsh_shape1(6)),
                            tsh_reshape(tsh_slice(t, 0, 0, 1), tsh_shape0()), &d),
          "of (V), the only one");
    if (refusals_of_dim(ctx, whole)) return 1;
    d.weight = make(ctx, TSH_REAL, tsh_shape1(6), -1, c.weight);
    if (refuses(ctx, x, tsh_reshape(whole, tsh_shape3(3, 2, 6)), NULL, TSH_ERR_SHAPE,
                "probabilities (.., V)"))
        return 1;
    CHECK(tsh_cross_entropy(x, t, &d), "what is left is legal");
    return 0;
}

static void mistakes_are_sentences(void **state) {
    int i;
    (void)state;
    for (i = 0; i < COUNT(ranks_degrees); i++) ranks_run(ranks_degrees[i], refusals, NULL);
}

/* ------------------------------------------- differences, and no gradient where none is due */

typedef struct checked {
    tsh_tensor *target;
    const call *c;
    tsh_cross_entropy_desc desc;
} checked;

static tsh_tensor *checked_loss(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {
    const checked *u = (const checked *)user;
    (void)n;
    return weigh(ctx, u->c, tsh_cross_entropy(in[0], u->target, &u->desc));
}

static int check_gradient(tsh_ctx *ctx, const call *c) {
    tsh_tensor *x = make(ctx, TSH_REAL, tsh_shape2(ROWS, c->classes), c->x, c->logits);
    checked u;
    double off;
    u.c = c;
    u.desc = c->desc;
    if (c->use_weight) u.desc.weight = make(ctx, TSH_REAL, tsh_shape1(c->classes), c->w, c->weight);
    u.target = c->use_probs ? make(ctx, TSH_REAL, tsh_shape2(ROWS, c->classes), c->t, c->probs)
                            : make(ctx, TSH_I64, tsh_shape1(ROWS), -1, c->target);
    if (!c->use_probs && c->target[0] == -100) u.desc.empty_zero = 1; /* NaN has no slope */
    tsh_requires_grad(x, 1);
    off = tsh_gradcheck(ctx, checked_loss, &x, 1, &u, 0, 5);
    /* central differences: third derivatives times 1e-4, and rounding of a loss of 50 over 2e-2 in
     * float; 1e-10 and 1e-16 * 50 / 2e-5 in double */
    CHECK(off >= 0 && off < (sizeof(tsh_real) == 4 ? 8e-3 : 1e-8), "off by %g", off);
    tsh_tensor_free(x);
    return 0;
}

static int check_rank(tsh_ctx *ctx, void *user) {
    (void)user;
    return grid(ctx, 5, check_gradient);
}

static void finite_differences_agree(void **state) {
    (void)state;
    ranks_run(1, check_rank, NULL);
    ranks_run(3, check_rank, NULL);
}

static int only_the_logits(tsh_ctx *ctx, void *user) {
    call c = invent(6, 9, 2);
    tsh_tensor *x = tsh_requires_grad(make(ctx, TSH_REAL, tsh_shape2(ROWS, 6), 1, c.logits), 1);
    tsh_tensor *p = tsh_requires_grad(make(ctx, TSH_REAL, tsh_shape2(ROWS, 6), 1, c.probs), 1);
    tsh_tensor *w = tsh_requires_grad(make(ctx, TSH_REAL, tsh_shape1(6), -1, c.weight), 1);
    (void)user;
    c.desc.weight = w;
    CHECK(tsh_backward(ctx, tsh_cross_entropy(x, p, &c.desc)) == TSH_OK, "backward");
    CHECK(tsh_grad(x) && !tsh_grad(p) && !tsh_grad(w), "whose gradient");
    CHECK_OK();
    return 0;
}

static void targets_and_weights_get_no_gradient(void **state) {
    (void)state;
    ranks_run(1, only_the_logits, NULL);
    ranks_run(4, only_the_logits, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_option_gives_what_pytorch_gives),
        cmocka_unit_test(classes_in_dimension_1_give_what_pytorch_gives),
        cmocka_unit_test(logits_are_copied_once_at_most),
        cmocka_unit_test(every_option_gives_what_the_definition_says),
        cmocka_unit_test(rows_may_be_sharded),
        cmocka_unit_test(logits_of_a_thousand_are_exact),
        cmocka_unit_test(every_form_of_the_inputs_gives_the_same),
        cmocka_unit_test(test_pain_1_label_smoothing_under_tp),
        cmocka_unit_test(test_pain_2_gathered_logits_are_not_counted_twice),
        cmocka_unit_test(test_pain_4_padding_does_not_leak_into_the_loss),
        cmocka_unit_test(test_pain_5_ignored_rows_and_weighted_means),
        cmocka_unit_test(a_bad_target_is_an_error_on_every_rank),
        cmocka_unit_test(mistakes_are_sentences),
        cmocka_unit_test(finite_differences_agree),
        cmocka_unit_test(targets_and_weights_get_no_gradient),
    };
    return cmocka_run_group_tests_name("op/loss", tests, NULL, NULL);
}
