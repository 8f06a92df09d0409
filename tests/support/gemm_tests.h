/* gemm_tests.h - what a tsh_gemm_fn must do: exact products of small integers in every layout, what
 * alpha and beta say, pieces on threads; then a model that trains with it.
 *
 * Include it after tshard.h, backends/tshard_threads.h and the definition of GEMM; where there is
 * none, it skips and says what is missing. */
#ifndef TSHARD_TESTS_GEMM_TESTS_H
#define TSHARD_TESTS_GEMM_TESTS_H

#include "ranks.h"
#include "skip.h"

#ifdef GEMM

#include "small_gpt.h"

/* How a matrix lies: row-major, column-major, both with room to spare, and neither. */
enum { ROWS, COLUMNS, ROWS_PADDED, COLUMNS_PADDED, SPREAD, LAYOUTS };

typedef struct matrix {
    tsh_real *data;
    int64_t rs, cs, size;
} matrix;

static const tsh_real guard = (tsh_real)12345;

/* Integers of -3 .. 3: the same for the same seed, whatever the layout. */
static double value(int seed, int64_t i, int64_t j) {
    return (double)(ranks_mix((uint64_t)seed, (uint64_t)(i * 1000 + j)) % 7) - 3;
}

static matrix matrix_new(int64_t m, int64_t n, int layout, int seed) {
    matrix x;
    int64_t i, j;
    x.rs = layout == ROWS ? n : layout == ROWS_PADDED ? n + 3 : layout == SPREAD ? 2 * n + 5 : 1;
    x.cs = layout == COLUMNS ? m : layout == COLUMNS_PADDED ? m + 3 : layout == SPREAD ? 2 : 1;
    x.size = m * x.rs + n * x.cs + 1;
    x.data = (tsh_real *)malloc((size_t)x.size * sizeof *x.data);
    assert_non_null(x.data);
    for (i = 0; i < x.size; i++) x.data[i] = guard;
    for (i = 0; i < m; i++)
        for (j = 0; j < n; j++) x.data[i * x.rs + j * x.cs] = (tsh_real)value(seed, i, j);
    return x;
}

static void multiply(int64_t m, int64_t n, int64_t k, double alpha, const matrix *a,
                     const matrix *b, double beta, const matrix *c) {
    GEMM(m, n, k, (tsh_real)alpha, a->data, a->rs, a->cs, b->data, b->rs, b->cs,
         (tsh_real)beta, c->data, c->rs, c->cs, 1, NULL);
}

/* Every element, and that nothing between them was written. The product is computed once per
 * element in int64_t; all layouts share it by `expect`. */
static void expect_product(int64_t m, int64_t n, int64_t k, int64_t *expect) {
    int64_t i, j, p;
    for (i = 0; i < m; i++)
        for (j = 0; j < n; j++) {
            expect[i * n + j] = 0;
            for (p = 0; p < k; p++) expect[i * n + j] += (int64_t)(value(1, i, p) * value(2, p, j));
        }
}

static void check_product(const char *what, int64_t m, int64_t n, const int64_t *expect,
                          double alpha, double beta, const matrix *c) {
    int64_t i, j, others = 0;
    for (i = 0; i < m; i++)
        for (j = 0; j < n; j++) {
            double got = (double)c->data[i * c->rs + j * c->cs];
            double want = alpha * (double)expect[i * n + j] + beta * value(3, i, j);
            if (!(got == want))
                fail_msg("%s: element (%d, %d) is %g, not %g", what, (int)i, (int)j, got, want);
        }
    for (i = 0; i < c->size; i++) others += c->data[i] == guard;
    assert_int_equal(others, c->size - m * n);
}

/* beta 0 must not read C: it holds NaN then. */
static void poison(const matrix *c, int64_t m, int64_t n) {
    int64_t i, j;
    for (i = 0; i < m; i++)
        for (j = 0; j < n; j++) c->data[i * c->rs + j * c->cs] = (tsh_real)NAN;
}

static void try_product(int64_t m, int64_t n, int64_t k, const int64_t *expect, const int layout[3],
                        double alpha, double beta) {
    matrix a = matrix_new(m, k, layout[0], 1), b = matrix_new(k, n, layout[1], 2);
    matrix c = matrix_new(m, n, layout[2], 3);
    char what[96];
    (void)snprintf(what, sizeof what, "%dx%dx%d, layouts %d %d %d, alpha %g, beta %g", (int)m,
                   (int)n, (int)k, layout[0], layout[1], layout[2], alpha, beta);
    if (beta == 0) poison(&c, m, n);
    multiply(m, n, k, alpha, &a, &b, beta, &c);
    check_product(what, m, n, expect, alpha, beta, &c);
    free(a.data);
    free(b.data);
    free(c.data);
}

static const double factors[][2] = {{1, 0}, {1, 1}, {2, -1}, {-1, 3}, {0, 2}, {0, 0}};

static int64_t *expected(int64_t m, int64_t n, int64_t k) {
    int64_t *expect = (int64_t *)malloc((size_t)(m * n) * sizeof *expect);
    assert_non_null(expect);
    expect_product(m, n, k, expect);
    return expect;
}

static void products_are_exact_in_every_layout(void **state) {
    static const int shapes[][3] = {{1, 1, 1}, {1, 9, 70},  {9, 1, 70},   {13, 7, 1},
                                    {5, 6, 7}, {64, 3, 65}, {65, 66, 67}, {70, 130, 18}};
    int s, l, f;
    (void)state;
    for (s = 0; s < COUNT(shapes); s++) {
        const int64_t m = shapes[s][0], n = shapes[s][1], k = shapes[s][2];
        int64_t *expect = expected(m, n, k);
        for (l = 0; l < LAYOUTS * LAYOUTS * LAYOUTS; l++) {
            const int layout[3] = {l % LAYOUTS, l / LAYOUTS % LAYOUTS, l / LAYOUTS / LAYOUTS};
            for (f = 0; f < COUNT(factors); f++)
                try_product(m, n, k, expect, layout, factors[f][0], factors[f][1]);
        }
        free(expect);
    }
}

/* What the rank's threads compute side by side. */
typedef struct shared_product {
    int64_t m, n, k;
    const int64_t *expect;
} shared_product;

static int by_threads(tsh_ctx *ctx, void *user) {
    const shared_product *p = (const shared_product *)user;
    matrix a = matrix_new(p->m, p->k, ROWS, 1), b = matrix_new(p->k, p->n, COLUMNS, 2);
    tsh_tensor *x, *y, *z;
    int64_t i;
    x = tsh_tensor_from(ctx, TSH_REAL, tsh_shape2(p->m, p->k), tsh_replicated(), a.data);
    y = tsh_tensor_from(ctx, TSH_REAL, tsh_shape2(p->n, p->k), tsh_replicated(), b.data);
    z = tsh_matmul(x, tsh_transpose(y, 0, 1));
    CHECK_OK();
    for (i = 0; i < p->m * p->n; i++)
        CHECK(((const tsh_real *)tsh_data(ctx, z))[i] == (tsh_real)p->expect[i], "product");
    free(a.data);
    free(b.data);
    return 0;
}

/* Large enough for several threads, cut along m and along n, and more threads than pieces. */
static void threads_share_a_product(void **state) {
    static const int shapes[][3] = {
        {301, 210, 200}, {210, 301, 200}, {1000, 30, 400}, {49, 700, 390}};
    static const int threads[] = {1, 2, 3, 4, 100};
    int s, t;
    (void)state;
    for (s = 0; s < COUNT(shapes); s++) {
        const int64_t m = shapes[s][0], n = shapes[s][1], k = shapes[s][2];
        int64_t *expect = expected(m, n, k);
        shared_product product = {m, n, k, expect};
        for (t = 0; t < COUNT(threads); t++) {
            tsh_desc desc = {.threads = threads[t], .gemm = {GEMM, NULL}};
            ranks_run_with(1, &desc, by_threads, &product);
        }
        free(expect);
    }
}

static void empty_products(void **state) {
    const int64_t none[6] = {0, 0, 0, 0, 0, 0};
    int layout, f;
    (void)state;
    for (layout = 0; layout < LAYOUTS; layout++) {
        matrix a = matrix_new(2, 3, layout, 1), b = matrix_new(2, 3, layout, 2);
        matrix c = matrix_new(2, 3, layout, 3);
        multiply(0, 3, 2, 1, &a, &b, 0, &c);
        multiply(2, 0, 2, 1, &a, &b, 0, &c);
        check_product("no rows, no columns", 2, 3, none, 1, 1, &c); /* C as it was */
        for (f = 0; f < COUNT(factors); f++) {                      /* no terms: beta C */
            const int layouts[3] = {layout, layout, layout};
            try_product(2, 3, 0, none, layouts, factors[f][0], factors[f][1]);
        }
        free(a.data);
        free(b.data);
        free(c.data);
    }
    GEMM(0, 0, 0, 1, NULL, 0, 0, NULL, 0, 0, 0, NULL, 0, 0, 1, NULL);
}

/* Lines that are all the same one (stride 0), and lengths of one with any stride. */
static void odd_strides(void **state) {
    const tsh_real row[3] = {1, 2, 3}, column[2] = {5, 7};
    tsh_real c[4] = {0, 0, 0, 0}, one = 0;
    (void)state;
    GEMM(2, 2, 3, 1, row, 0, 1, row, 1, 0, 0, c, 2, 1, 1, NULL); /* [row; row] [row^T row^T] */
    for (int i = 0; i < 4; i++) assert_true(c[i] == 14);
    GEMM(2, 2, 1, 1, column, 1, 0, row, 0, 1, 0, c, 2, 1, 1, NULL); /* outer product */
    assert_true(c[0] == 5 && c[1] == 10 && c[2] == 7 && c[3] == 14);
    GEMM(2, 2, 1, 1, column, 1, 1, row, 1, 1, 0, c, 1, 2, 1, NULL); /* and its transpose */
    assert_true(c[0] == 5 && c[2] == 10 && c[1] == 7 && c[3] == 14);
    GEMM(1, 1, 3, 1, row, 0, 1, row, 1, 0, 0, &one, 0, 0, 1, NULL);
    assert_true(one == 14);
}

/* ------------------------------------------------------------------------ a model */

enum { STEPS = 8 };

typedef struct training {
    double loss[STEPS];
} training;

static int train(tsh_ctx *ctx, void *user) {
    training *out = (training *)user;
    const tsh_optim_desc adamw = {.kind = TSH_ADAMW, .lr = 1e-2};
    const tsh_shape shape = tsh_shape2(GPT_BATCH, GPT_CONTEXT);
    tsh_tensor *ids = tsh_tensor_new(ctx, TSH_I32, shape, tsh_replicated());
    tsh_tensor *targets = tsh_tensor_new(ctx, TSH_I32, shape, tsh_replicated());
    tsh_module *gpt = gpt_add(ctx);
    tsh_optim *optim;
    CHECK(tsh_parallelize(gpt, gpt_plan, GPT_RULES) == TSH_OK, "plan");
    CHECK(tsh_materialize(gpt) == TSH_OK, "values");
    optim = tsh_optim_new(gpt, &adamw);
    for (int step = 0; step < STEPS; step++) {
        double loss = gpt_step(ctx, optim, ids, targets, step);
        CHECK_OK();
        if (tsh_world(ctx)->rank == 0) out->loss[step] = loss;
    }
    return 0;
}

/* Attention's products have strides of whole sequences, weights' gradients are turned. What differs
 * from the built-in product's losses is the order of sums, which training amplifies: 1e-4 of a
 * float after 8 steps. */
static void a_model_trains(void **state) {
    (void)state;
    for (int ranks = 1; ranks <= 3; ranks++) {
        training built_in, other, again;
        tsh_desc desc = {.seed = 3};
        ranks_run_with(ranks, &desc, train, &built_in);
        desc.gemm.multiply = GEMM;
        desc.threads = ranks;
        ranks_run_with(ranks, &desc, train, &other);
        ranks_run_with(ranks, &desc, train, &again);
        for (int i = 0; i < STEPS; i++)
            if (!(fabs(built_in.loss[i] - other.loss[i]) < 1e-4))
                fail_msg("%d ranks, step %d: loss %g, not %g", ranks, i, other.loss[i],
                         built_in.loss[i]);
        assert_memory_equal(&other, &again, sizeof other);
        assert_true(other.loss[STEPS - 1] < other.loss[0]);
    }
}

static int gemm_tests(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products_are_exact_in_every_layout),
        cmocka_unit_test(threads_share_a_product),
        cmocka_unit_test(empty_products),
        cmocka_unit_test(odd_strides),
        cmocka_unit_test(a_model_trains),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#else /* GEMM */

static void needs_blis(void **state) {
    (void)state;
    SKIP("needs libblis-pthread-dev");
}

static int gemm_tests(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(needs_blis)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#endif /* GEMM */

#endif /* TSHARD_TESTS_GEMM_TESTS_H */
