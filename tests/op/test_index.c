/* Ops on shapes and indices: their values and gradients against PyTorch's, by
 * tests/golden/index.py. */
/* build: double nosimd */
#include "../../tshard.h"
#include "../support/golden.h"

#include <float.h>
#include <math.h>

#define COUNT(a) ((int)(sizeof(a) / sizeof((a)[0])))

enum { INPUTS = 3, NAME = 64 };

/* ------------------------------------------------------------------ cases by name */

typedef struct call {
    const golden_file *file;
    const char *name; /* of the case */
    tsh_ctx *ctx;
    tsh_tensor *in[INPUTS], *indices;
    int n; /* number of inputs */
} call;

static const int64_t no = INT64_MAX; /* a slice's stop that is the end */

static int named(const call *c, const char *name) {
    return strcmp(c->name, name) == 0;
}

static tsh_tensor *shapes(call *c) {
    static const int64_t three[] = {2, 1, 3}, two[] = {2};
    tsh_tensor *x = c->in[0];
    if (named(c, "stack")) return tsh_stack(c->in, 3, 1);
    if (named(c, "stack_last")) return tsh_stack(c->in, 2, -1);
    if (named(c, "squeeze")) return tsh_squeeze(x, 1);
    if (named(c, "squeeze_all")) return tsh_squeeze(x, TSH_ALL);
    if (named(c, "squeeze_not")) return tsh_squeeze(x, 0);
    if (named(c, "unsqueeze")) return tsh_unsqueeze(x, -2);
    if (named(c, "expand")) return tsh_expand(x, tsh_shape4(2, 4, -1, 5));
    if (named(c, "expand_scalar")) return tsh_expand(x, tsh_shape2(2, 3));
    if (named(c, "tile")) return tsh_tile(x, three, 3);
    if (named(c, "tile_inner")) return tsh_tile(x, two, 1);
    if (named(c, "repeat")) return tsh_repeat_interleave(x, 3, 1);
    if (named(c, "flip")) return tsh_flip(x, 1);
    if (named(c, "roll")) return tsh_roll(x, 2, 1);
    if (named(c, "roll_back")) return tsh_roll(x, -7, -1);
    if (named(c, "slice_step")) return tsh_slice_step(x, 1, 1, 6, 2);
    if (named(c, "slice_step_end")) return tsh_slice_step(x, 0, -5, no, 3);
    if (named(c, "slice_step_none")) return tsh_slice_step(x, 0, 4, 2, 3);
    if (named(c, "tril")) return tsh_tril(x, -1);
    if (named(c, "triu")) return tsh_triu(x, 2);
    return named(c, "one_hot") ? tsh_one_hot(x, 6) : NULL;
}

typedef struct pad_case {
    const char *name;
    int64_t pad[4];
    int n;
    tsh_pad_mode mode;
    double value;
} pad_case;

static const pad_case pads[] = {
    {"pad_constant", {1, 2, 3, 0}, 2, TSH_PAD_CONSTANT, 1.5},
    {"pad_cut", {-1, 2, 1, -2}, 2, TSH_PAD_CONSTANT, 0},
    {"pad_reflect", {3, 2, 1, 2}, 2, TSH_PAD_REFLECT, 0},
    {"pad_reflect_cut", {2, -1}, 1, TSH_PAD_REFLECT, 0},
    {"pad_replicate", {3, 5, 1, 0}, 2, TSH_PAD_REPLICATE, 0},
    {"pad_circular", {4, 1, 2, 3}, 2, TSH_PAD_CIRCULAR, 0},
    {"pad_circular_cut", {2, -1}, 1, TSH_PAD_CIRCULAR, 0},
};

static tsh_tensor *padded(call *c) {
    int i;
    for (i = 0; i < COUNT(pads); i++)
        if (named(c, pads[i].name))
            return tsh_pad(c->in[0], pads[i].pad, pads[i].n, pads[i].mode, pads[i].value);
    return NULL;
}

static tsh_tensor *indexed(call *c) {
    tsh_tensor *x = c->in[0], *index = c->in[1];
    if (named(c, "gather_0") || named(c, "gather_scalar")) return tsh_gather(x, 0, index);
    if (named(c, "gather_1")) return tsh_gather(x, 1, index);
    if (named(c, "gather_2")) return tsh_gather(x, -1, tsh_cast(index, TSH_I32));
    if (named(c, "gather_turned"))
        return tsh_gather(tsh_transpose(x, 0, 1), 1, tsh_transpose(index, 0, 1));
    if (named(c, "scatter_0")) return tsh_scatter_add(x, 0, index, c->in[2]);
    if (named(c, "scatter_2")) return tsh_scatter_add(x, -1, index, c->in[2]);
    if (named(c, "scatter_1") || named(c, "scatter_part"))
        return tsh_scatter_add(x, 1, tsh_cast(index, TSH_I32), c->in[2]);
    if (named(c, "select_0")) return tsh_index_select(x, 0, index);
    if (named(c, "select_1")) return tsh_index_select(x, 1, tsh_cast(index, TSH_I32));
    return named(c, "select_2") ? tsh_index_select(x, -1, index) : NULL;
}

typedef struct sort_case {
    const char *name;
    int64_t k; /* 0: tsh_sort */
    int dim, down;
} sort_case;

static const sort_case sorts[] = {
    {"topk", 5, -1, 1},        {"topk_1", 3, 1, 0},
    {"topk_ties", 9, 1, 1},    {"topk_ties_small", 9, 1, 0},
    {"topk_special", 6, 1, 1}, {"topk_special_small", 6, 1, 0},
    {"topk_long", 40, 1, 1},   {"topk_long_small", 40, 1, 0},
    {"sort", 0, -1, 0},        {"sort_down", 0, 1, 1},
    {"sort_ties", 0, 1, 0},    {"sort_ties_down", 0, 1, 1},
    {"sort_special", 0, 1, 0}, {"sort_special_down", 0, 1, 1},
    {"sort_long", 0, 1, 0},    {"sort_integers", 0, 1, 1},
};

static tsh_tensor *sorted(call *c) {
    const sort_case *s;
    int i;
    for (i = 0; i < COUNT(sorts); i++) {
        s = &sorts[i];
        if (!named(c, s->name)) continue;
        return s->k ? tsh_topk(c->in[0], s->k, s->dim, s->down, &c->indices)
                    : tsh_sort(c->in[0], s->dim, s->down, &c->indices);
    }
    return NULL;
}

static tsh_tensor *einsum(call *c) {
    const golden_tensor g = golden_get(c->file, c->name, "equation");
    char equation[NAME];
    int64_t i;
    assert_true(g.count < NAME);
    for (i = 0; i < g.count; i++) equation[i] = (char)((const int64_t *)g.data)[i];
    equation[g.count] = '\0';
    return tsh_einsum(equation, c->in[0], c->in[1]);
}

static tsh_tensor *compute(call *c) {
    if (strncmp(c->name, "einsum", 6) == 0) return einsum(c);
    if (strncmp(c->name, "pad", 3) == 0) return padded(c);
    if (strncmp(c->name, "topk", 4) == 0 || strncmp(c->name, "sort", 4) == 0) return sorted(c);
    return c->n > 1 && strncmp(c->name, "stack", 5) != 0 ? indexed(c) : shapes(c);
}

/* ------------------------------------------------------------------ running them */

/* Within k roundings of the golden value. */
static int close_to(double got, double want, double k) {
    return got == want || (isnan(got) && isnan(want)) ||
           fabs(got - want) <= k * (double)FLT_EPSILON * (1 + fabs(want));
}

static void compare(call *c, const char *what, tsh_tensor *t, const golden_tensor *want, double k) {
    tsh_shape shape = tsh_shape_of(t);
    double *got = (double *)calloc((size_t)want->count + 1, sizeof *got);
    int64_t i;
    int d;
    if (!t || !tsh_ok(c->ctx))
        fail_msg("%s.%s: %s", c->name, what, t ? tsh_last_error(c->ctx)->message : "is NULL");
    assert_non_null(got);
    assert_int_equal(tsh_dtype_of(t), want->dtype == TSH_I64 ? TSH_I64 : TSH_REAL);
    if (shape.ndim != want->shape.ndim) fail_msg("%s.%s: %d dims", c->name, what, shape.ndim);
    for (d = 0; d < shape.ndim; d++)
        if (shape.dim[d] != want->shape.dim[d])
            fail_msg("%s.%s: dimension %d is %ld, not %ld", c->name, what, d, (long)shape.dim[d],
                     (long)want->shape.dim[d]);
    assert_int_equal(
        tsh_read(c->ctx, t, TSH_LOCAL, got, (size_t)want->count * tsh_dtype_size(tsh_dtype_of(t))),
        TSH_OK);
    for (i = 0; i < want->count; i++) {
        if (want->dtype == TSH_I64 &&
            ((int64_t *)(void *)got)[i] != ((const int64_t *)want->data)[i])
            fail_msg("%s.%s[%ld] is %ld, not %ld", c->name, what, (long)i,
                     (long)((int64_t *)(void *)got)[i], (long)((const int64_t *)want->data)[i]);
        if (want->dtype != TSH_I64 && !close_to((double)((tsh_real *)(void *)got)[i],
                                                (double)((const float *)want->data)[i], k))
            fail_msg("%s.%s[%ld] is %.9g, not %.9g", c->name, what, (long)i,
                     (double)((tsh_real *)(void *)got)[i], (double)((const float *)want->data)[i]);
    }
    free(got);
}

/* Runs one case of the file: the result, its indices, and the gradients. */
static void run(const golden_file *file, const char *name) {
    const double k = 8; /* roundings: sums have at most 36 terms of magnitude 1 */
    call c;
    golden_tensor g;
    tsh_tensor *out;
    char what[16];
    int i;
    memset(&c, 0, sizeof c);
    c.name = name;
    c.file = file;
    assert_int_equal(tsh_open(NULL, &c.ctx), TSH_OK);
    for (; c.n < INPUTS; c.n++) {
        (void)snprintf(what, sizeof what, "in%d", c.n);
        if (!golden_find(file, name, what, &g)) break;
        c.in[c.n] = golden_load(c.ctx, &g);
        (void)snprintf(what, sizeof what, "grad%d", c.n);
        if (golden_find(file, name, what, &g)) (void)tsh_requires_grad(c.in[c.n], 1);
    }
    out = compute(&c);
    g = golden_get(file, name, "out");
    compare(&c, "out", out, &g, k);
    if (golden_find(file, name, "indices", &g)) compare(&c, "indices", c.indices, &g, 0);
    if (golden_find(file, name, "w", &g)) {
        tsh_tensor *w = g.count ? golden_load(c.ctx, &g) : tsh_zeros(c.ctx, g.shape);
        tsh_tensor *loss = tsh_sum(tsh_mul(out, w), TSH_ALL, 0);
        /* NaN times the cotangent: the loss is NaN, the gradients are not */
        if (tsh_backward(c.ctx, loss) != TSH_OK)
            fail_msg("%s: %s", name, tsh_last_error(c.ctx)->message);
        for (i = 0; i < c.n; i++) {
            (void)snprintf(what, sizeof what, "grad%d", i);
            if (golden_find(file, name, what, &g)) compare(&c, what, tsh_grad(c.in[i]), &g, k);
        }
    }
    tsh_close(c.ctx);
}

/* Every case that the file has: what ends in ".out". */
static void cases_equal_pytorch(void **state) {
    static const char after[] = ".out\":{";
    golden_file file = golden_open("index");
    const char *end = file.header, *begin;
    int count = 0;
    (void)state;
    for (; (end = strstr(end, after)) != NULL; end++, count++) {
        char name[NAME];
        for (begin = end; begin[-1] != '"'; begin--) continue;
        assert_true(end - begin < NAME);
        (void)snprintf(name, sizeof name, "%.*s", (int)(end - begin), begin);
        run(&file, name);
    }
    assert_true(count > 80);
    golden_finish(&file);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cases_equal_pytorch),
    };
    return cmocka_run_group_tests_name("op/index", tests, NULL, NULL);
}
