/* The built-in matrix multiply: every kernel that this processor runs, against a product computed
 * in double, and against itself: the bits of an element do not depend on where it stands. */
/* build: double nosimd */
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "../support/skip.h"

#define COUNT(a) ((int)(sizeof(a) / sizeof((a)[0])))
#define R(x)     ((tsh_real)(x))

/* A matrix with its strides; `size` elements from data. */
typedef struct matrix {
    tsh_real *data;
    int64_t rs, cs;
    size_t size;
} matrix;

/* How a matrix lies: row-major, column-major, both with room to spare, and neither. */
enum { ROWS, COLUMNS, ROWS_PADDED, COLUMNS_PADDED, SPREAD, LAYOUTS };

static const tsh_real guard = R(12345);

static matrix matrix_new(int64_t m, int64_t n, int layout) {
    matrix x;
    x.rs = layout == ROWS ? n : layout == ROWS_PADDED ? n + 3 : layout == SPREAD ? 2 * n + 5 : 1;
    x.cs = layout == COLUMNS ? m : layout == COLUMNS_PADDED ? m + 3 : layout == SPREAD ? 2 : 1;
    x.size = (size_t)(m * x.rs + n * x.cs + 1);
    x.data = (tsh_real *)malloc(x.size * sizeof(tsh_real));
    assert_non_null(x.data);
    for (size_t i = 0; i < x.size; i++) x.data[i] = guard;
    return x;
}

static tsh_real *at(const matrix *x, int64_t i, int64_t j) {
    return x->data + i * x->rs + j * x->cs;
}

/* The same values for the same seed, whatever the layout. Integers of -3..3, so that sums are
 * exact; or halves of a random fraction. */
static void matrix_fill(const matrix *x, int64_t m, int64_t n, uint32_t seed, int exact) {
    for (int64_t i = 0; i < m; i++) {
        for (int64_t j = 0; j < n; j++) {
            uint32_t h = seed * 2654435761u + (uint32_t)i * 40503u + (uint32_t)j * 97u;
            h = (h ^ (h >> 15)) * 2246822519u;
            h = (h ^ (h >> 13)) * 3266489917u;
            h ^= h >> 16;
            *at(x, i, j) = exact ? R((int)(h % 7u) - 3) : R((double)h / 4294967296.0 - 0.5);
        }
    }
}

/* Scratch for the hungriest kernel, and a guard behind what each asks for. */
static unsigned char *scratch;

static int scratch_new(void **state) {
    size_t most = 0;
    (void)state;
    for (int i = 0; i < COUNT(tshi_isas); i++) {
        const size_t size = tshi_gemm_scratch(tshi_isas[i].gemm, 1 << 20, 1 << 20, 1 << 20, 1 << 20,
                                              1);
        if (size > most) most = size;
    }
    scratch = (unsigned char *)malloc(most + 64);
    return scratch == NULL;
}

static int scratch_free(void **state) {
    (void)state;
    free(scratch);
    return 0;
}

static tshi_matrix seen(const matrix *x) {
    return tshi_gemm_matrix(x->data, x->rs, x->cs);
}

static void run(const tshi_gemm_kernel *kernel, void *memory, const tshi_gemm_progress *progress,
                int64_t m, int64_t n, int64_t k, tsh_real alpha, tshi_matrix a, tshi_matrix b,
                tsh_real beta, tshi_matrix d, tshi_matrix c) {
    const tshi_product product = {m, n, k, alpha, beta, a, b, d, c, progress};
    tshi_gemm_run(kernel, memory, product);
}

/* C = alpha A B + beta D. */
static void gemm_from(const tshi_gemm_kernel *kernel, int64_t m, int64_t n, int64_t k,
                      tsh_real alpha, const matrix *a, const matrix *b, tsh_real beta,
                      const matrix *d, const matrix *c) {
    unsigned char *end = scratch + tshi_gemm_scratch(kernel, m, n, k, c->rs, c->cs);
    memset(end, 0xa5, 64);
    run(kernel, scratch, NULL, m, n, k, alpha, seen(a), seen(b), beta, seen(d), seen(c));
    for (int i = 0; i < 64; i++) assert_int_equal(end[i], 0xa5);
}

static void gemm(const tshi_gemm_kernel *kernel, int64_t m, int64_t n, int64_t k, tsh_real alpha,
                 const matrix *a, const matrix *b, tsh_real beta, const matrix *c) {
    gemm_from(kernel, m, n, k, alpha, a, b, beta, c, c);
}

/* C against beta C0 + alpha A B in double: within `tolerance`, and what lies between the elements
 * of C untouched. */
static void check(const char *name, int64_t m, int64_t n, int64_t k, double alpha, const matrix *a,
                  const matrix *b, double beta, const matrix *c0, const matrix *c,
                  double tolerance) {
    size_t guards = 0;
    for (int64_t i = 0; i < m; i++) {
        for (int64_t j = 0; j < n; j++) {
            double sum = 0, want, got = (double)*at(c, i, j);
            for (int64_t p = 0; p < k; p++) sum += (double)*at(a, i, p) * (double)*at(b, p, j);
            want = alpha * sum + (beta == 0 ? 0 : beta * (double)*at(c0, i, j));
            if (!(fabs(got - want) <= tolerance))
                fail_msg("%s %dx%dx%d (%d, %d): %.9g, not %.9g", name, (int)m, (int)n, (int)k,
                         (int)i, (int)j, got, want);
        }
    }
    for (size_t i = 0; i < c->size; i++) guards += memcmp(c->data + i, &guard, sizeof guard) == 0;
    assert_int_equal(guards, c->size - (size_t)(m * n));
}

/* One product with the given layouts, exact. */
static void try_exact(const tshi_gemm_kernel *kernel, int64_t m, int64_t n, int64_t k,
                      const int layout[3], tsh_real alpha, tsh_real beta) {
    matrix a = matrix_new(m, k, layout[0]), b = matrix_new(k, n, layout[1]);
    matrix c = matrix_new(m, n, layout[2]), c0 = matrix_new(m, n, ROWS);
    matrix_fill(&a, m, k, 1, 1);
    matrix_fill(&b, k, n, 2, 1);
    matrix_fill(&c, m, n, 3, 1);
    matrix_fill(&c0, m, n, 3, 1);
    gemm(kernel, m, n, k, alpha, &a, &b, beta, &c);
    check(kernel->name, m, n, k, (double)alpha, &a, &b, (double)beta, &c0, &c, 0);
    free(a.data);
    free(b.data);
    free(c.data);
    free(c0.data);
}

#ifndef EACH_KERNEL /* test_amx.c has one of its own */
/* The kernel of the i-th instruction set; NULL: this processor does not have it, or the set before
 * it has the same kernel. */
static const tshi_gemm_kernel *kernel_of(int i) {
    const int again = i > 0 && tshi_isas[i - 1].gemm == tshi_isas[i].gemm;
    return again || !tshi_isa_runs(&tshi_isas[i]) ? NULL : tshi_isas[i].gemm;
}

#define EACH_KERNEL(kernel)                                                                        \
    for (int row = 0; row < COUNT(tshi_isas); row++)                                               \
        for (const tshi_gemm_kernel *kernel = kernel_of(row); kernel; kernel = NULL)
#endif

/* ------------------------------------------------------------- tests */

static void test_small_sizes(void **state) {
    static const int sizes[] = {1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 16, 17, 25, 31, 32, 33, 47, 65};
    static const int depths[] = {1, 2, 3, 4, 7, 16, 33};
    static const tsh_real scales[][2] = {{1, 0}, {1, 1}, {-2, R(0.5)}, {R(0.5), -1}};
    int turn = 0; /* walks through layouts and scales, so that all meet all sizes */
    (void)state;
    EACH_KERNEL(kernel) {
        for (int i = 0; i < COUNT(sizes); i++) {
            for (int j = 0; j < COUNT(sizes); j++) {
                for (int l = 0; l < COUNT(depths); l++, turn++) {
                    const int layout[3] = {turn % LAYOUTS, turn / 3 % LAYOUTS, turn / 7 % LAYOUTS};
                    const tsh_real *scale = scales[turn / 2 % 4];
                    try_exact(kernel, sizes[i], sizes[j], depths[l], layout, scale[0], scale[1]);
                }
            }
        }
    }
}

static void test_all_layouts(void **state) {
    static const int sizes[][3] = {{37, 71, 23}, {1, 70, 19}, {2, 64, 64}, {70, 1, 19}, {64, 3, 9}};
    (void)state;
    EACH_KERNEL(kernel) {
        for (int s = 0; s < COUNT(sizes); s++) {
            for (int l = 0; l < LAYOUTS * LAYOUTS * LAYOUTS; l++) {
                const int layout[3] = {l % LAYOUTS, l / LAYOUTS % LAYOUTS, l / LAYOUTS / LAYOUTS};
                try_exact(kernel, sizes[s][0], sizes[s][1], sizes[s][2], layout, 1, 0);
                try_exact(kernel, sizes[s][0], sizes[s][1], sizes[s][2], layout, 2, -1);
            }
        }
    }
}

/* What the product is added to lies apart: a bias by columns or by rows, one number, a matrix. */
static void test_bias(void **state) {
    static const int64_t strides[][2] = {{0, 1}, {0, 3}, {2, 0}, {0, 0}, {41, 2}};
    (void)state;
    EACH_KERNEL(kernel) {
        const int64_t sizes[][3] = {{kernel->mr * 3 + 1, kernel->nr * 3 + 5, kernel->kc + 7},
                                    {kernel->mc + 2, kernel->nr * 5, 9},
                                    {3, kernel->nc + 5, 2 * kernel->kc + 1},
                                    {1, 70, 4000},
                                    {33, 1, 12},
                                    {5, 7, 0}};
        for (int l = 0; l < COUNT(sizes) * LAYOUTS * COUNT(strides); l++) {
            const int64_t *size = sizes[l % COUNT(sizes)];
            const int64_t *stride = strides[l / COUNT(sizes) % COUNT(strides)];
            const int64_t m = size[0], n = size[1], k = size[2];
            const tsh_real beta = l % 2 ? 1 : R(-0.5);
            matrix a = matrix_new(m, k, ROWS), b = matrix_new(k, n, l % 3 ? ROWS : COLUMNS);
            matrix c = matrix_new(m, n, l / COUNT(sizes) / COUNT(strides)), d;
            d.rs = stride[0];
            d.cs = stride[1];
            d.size = (size_t)(m * d.rs + n * d.cs + 1);
            d.data = (tsh_real *)malloc(d.size * sizeof *d.data);
            assert_non_null(d.data);
            matrix_fill(&a, m, k, 1, 1);
            matrix_fill(&b, k, n, 2, 1);
            for (size_t i = 0; i < d.size; i++) d.data[i] = R(i % 64);
            for (int64_t e = 0; e < m * n; e++) *at(&c, e / n, e % n) = R(NAN);
            gemm_from(kernel, m, n, k, 2, &a, &b, beta, &d, &c);
            check(kernel->name, m, n, k, 2, &a, &b, (double)beta, &d, &c, 0);
            free(a.data);
            free(b.data);
            free(c.data);
            free(d.data);
        }
    }
}

/* Sizes on both sides of every block. The sum of kc + 5 products of at most 9 is exact. */
static void test_blocks(void **state) {
    static const int layouts[][3] = {{ROWS, ROWS, ROWS},
                                     {ROWS, COLUMNS, ROWS},
                                     {COLUMNS, ROWS, COLUMNS},
                                     {SPREAD, SPREAD, SPREAD}};
    (void)state;
    EACH_KERNEL(kernel) {
        const int64_t mc = kernel->mc, kc = kernel->kc, nc = kernel->nc;
        for (int l = 0; l < COUNT(layouts); l++) {
            try_exact(kernel, mc + 1, kernel->nr * 5 + 3, 17, layouts[l], 1, 1);
            try_exact(kernel, mc, kernel->nr * 5, kc + 1, layouts[l], 1, 0);
            try_exact(kernel, 2 * mc + 5, 9, 2 * kc + 5, layouts[l], 1, -1);
            try_exact(kernel, mc + 3, nc + 5, 7, layouts[l], -1, 1);
            try_exact(kernel, 1, nc + 5, kc + 3, layouts[l], -1, 1);
            try_exact(kernel, nc + 5, 2, kc + 3, layouts[l], 1, 0);
        }
    }
}

/* beta 0 does not read C, alpha 0 does not read A and B. */
static void test_nan(void **state) {
    static const int sizes[][3] = {{5, 7, 3}, {33, 65, 9}, {1, 64, 8}, {64, 1, 8}, {3, 3, 0}};
    (void)state;
    EACH_KERNEL(kernel) {
        for (int s = 0; s < COUNT(sizes) * LAYOUTS; s++) {
            const int *size = sizes[s / LAYOUTS];
            const int64_t m = size[0], n = size[1], k = size[2];
            matrix a = matrix_new(m, k, ROWS), b = matrix_new(k, n, ROWS);
            matrix c = matrix_new(m, n, s % LAYOUTS);
            matrix_fill(&a, m, k, 1, 1);
            matrix_fill(&b, k, n, 2, 1);
            for (int64_t i = 0; i < m * n; i++) *at(&c, i / n, i % n) = R(NAN);
            gemm(kernel, m, n, k, 1, &a, &b, 0, &c);
            check("beta 0", m, n, k, 1, &a, &b, 0, &c, &c, 0);
            for (size_t i = 0; i < a.size; i++) a.data[i] = R(NAN);
            gemm(kernel, m, n, k, 0, &a, &b, 2, &c); /* C = 2 C, twice what it was */
            gemm(kernel, m, n, k, 0, &a, &b, 0, &c);
            for (int64_t i = 0; i < m * n; i++) assert_true(*at(&c, i / n, i % n) == 0);
            free(a.data);
            free(b.data);
            free(c.data);
        }
    }
}

/* A NaN in A or B reaches its row or column, and nothing else. */
static void test_nan_spreads(void **state) {
    const int64_t m = 29, n = 67, k = 21;
    (void)state;
    EACH_KERNEL(kernel) {
        matrix a = matrix_new(m, k, ROWS), b = matrix_new(k, n, COLUMNS),
               c = matrix_new(m, n, ROWS);
        matrix_fill(&a, m, k, 1, 1);
        matrix_fill(&b, k, n, 2, 1);
        *at(&a, 28, 20) = R(NAN);
        *at(&b, 3, 66) = R(INFINITY);
        gemm(kernel, m, n, k, 1, &a, &b, 0, &c);
        for (int64_t i = 0; i < m * n; i++) {
            const tsh_real x = *at(&c, i / n, i % n);
            assert_int_equal(isfinite((double)x) == 0, i / n == 28 || i % n == 66);
        }
        free(a.data);
        free(b.data);
        free(c.data);
    }
}

static void test_empty(void **state) {
    (void)state;
    EACH_KERNEL(kernel) {
        matrix a = matrix_new(4, 4, ROWS), c = matrix_new(4, 4, ROWS);
        gemm(kernel, 0, 4, 4, 1, &a, &a, 0, &c);
        gemm(kernel, 4, 0, 4, 1, &a, &a, 0, &c);
        for (size_t i = 0; i < c.size; i++) assert_true(c.data[i] == guard);
        matrix_fill(&c, 4, 4, 3, 1);
        gemm(kernel, 4, 4, 0, 1, &a, &a, 2, &c);
        matrix_fill(&a, 4, 4, 3, 1);
        for (int64_t i = 0; i < 16; i++) assert_true(c.data[i] == 2 * a.data[i]);
        gemm(kernel, 0, 0, 0, 1, &a, &a, 0, &c);
        free(a.data);
        free(c.data);
    }
}

/* Fractions: each of k roundings errs by at most eps of a sum below k/4, which is generous. */
static void test_rounding(void **state) {
    static const int sizes[][3] = {{64, 64, 64}, {13, 129, 1000}, {300, 70, 800}, {1, 200, 777}};
    const double eps = sizeof(tsh_real) == 4 ? 1.2e-7 : 2.3e-16;
    (void)state;
    for (int s = 0; s < COUNT(sizes); s++) {
        const int64_t m = sizes[s][0], n = sizes[s][1], k = sizes[s][2];
        const double tolerance = eps * (double)k * sqrt((double)k);
        const tshi_gemm_kernel *plain = &tshi_gemm_kernel_c;
        matrix a = matrix_new(m, k, ROWS), b = matrix_new(k, n, COLUMNS);
        matrix c = matrix_new(m, n, ROWS), twin = matrix_new(m, n, ROWS);
        matrix_fill(&a, m, k, 1, 0);
        matrix_fill(&b, k, n, 2, 0);
        gemm(plain, m, n, k, R(0.7), &a, &b, 0, &twin);
        check("c", m, n, k, (double)R(0.7), &a, &b, 0, &twin, &twin, tolerance);
        EACH_KERNEL(kernel) {
            gemm(kernel, m, n, k, R(0.7), &a, &b, 0, &c);
            for (int64_t i = 0; i < m * n; i++)
                assert_true(fabs((double)c.data[i] - (double)twin.data[i]) <= tolerance);
        }
        free(a.data);
        free(b.data);
        free(c.data);
        free(twin.data);
    }
}

/* A part of C, computed alone: rows [i, i + m), columns [j, j + n); strides, alignment, and whether
 * A, B, C are packed, turned or read in place all differ from the whole. Bit for bit the same. */
static void check_part(const tshi_gemm_kernel *kernel, int64_t i, int64_t m, int64_t j, int64_t n,
                       int64_t k, const matrix *a, const matrix *b, const matrix *whole,
                       int layout) {
    matrix pa = matrix_new(m, k, layout % 2 ? COLUMNS_PADDED : SPREAD), pb = *b;
    matrix c = matrix_new(m, n, layout);
    pb.data += j * b->cs;
    for (int64_t e = 0; e < m * k; e++) *at(&pa, e / k, e % k) = *at(a, i + e / k, e % k);
    for (int64_t e = 0; e < m * n; e++) *at(&c, e / n, e % n) = R(0.3);
    gemm(kernel, m, n, k, R(0.7), &pa, &pb, R(1.1), &c);
    for (int64_t e = 0; e < m * n; e++) {
        const tsh_real *x = at(whole, i + e / n, j + e % n), *y = at(&c, e / n, e % n);
        if (memcmp(x, y, sizeof *x))
            fail_msg("%s: (%d, %d) of a part (%d, %d) of layout %d: %.9g, not %.9g", kernel->name,
                     (int)(i + e / n), (int)(j + e % n), (int)m, (int)n, layout, (double)*y,
                     (double)*x);
    }
    free(pa.data);
    free(c.data);
}

static void test_bits(void **state) {
    static const int parts[][4] = {{0, 300, 0, 97}, {0, 1, 0, 333},    {5, 2, 1, 64},
                                   {7, 1, 3, 1},    {0, 300, 9, 1},    {3, 200, 5, 2},
                                   {1, 13, 65, 7},  {250, 50, 0, 333}, {11, 64, 64, 64},
                                   {8, 2, 0, 331},  {9, 1, 1, 331}};
    const int64_t m = 300, n = 333, k = 401;
    (void)state;
    EACH_KERNEL(kernel) {
        matrix a = matrix_new(m, k, ROWS), whole = matrix_new(m, n, ROWS);
        matrix_fill(&a, m, k, 1, 0);
        for (int l = 0; l < LAYOUTS; l++) {
            matrix b = matrix_new(k, n, l);
            matrix_fill(&b, k, n, 2, 0);
            for (int64_t e = 0; e < m * n; e++) whole.data[e] = R(0.3);
            gemm(kernel, m, n, k, R(0.7), &a, &b, R(1.1), &whole);
            for (int p = 0; p < COUNT(parts); p++) {
                for (int layout = 0; layout < LAYOUTS; layout++)
                    check_part(kernel, parts[p][0], parts[p][1], parts[p][2], parts[p][3], k, &a,
                               &b, &whole, layout);
            }
            free(b.data);
        }
        free(a.data);
        free(whole.data);
    }
}

/* ------------------------------------------------ what is fetched meanwhile */

#ifndef TSHARD_NO_SIMD /* portable kernels prefetch nothing */
/* Every line of the next sliver once, then the last one again and again; nothing behind n. */
static void test_fetch(void **state) {
    enum { LINE = 64 / sizeof(tsh_real), N = 7 * LINE, K = 11 * LINE };
    static tsh_real b[N * K];
    (void)state;
    EACH_KERNEL(kernel) {
        for (int across = 0; across < 2; across++) {
            for (int64_t j = 0; j <= N; j += kernel->nr) {
                tshi_gemm_job job = {.kernel = kernel, .n = N, .k = K};
                const int64_t cols = tshi_base_min(kernel->nr, N - j);
                const int64_t lines = across ? K * tshi_base_ceil(cols, LINE)
                                             : cols * tshi_base_ceil(K, LINE);
                static char fetched[N * K / LINE];
                tshi_gemm_walk walk;
                memset(fetched, 0, sizeof fetched);
                job.b = tshi_gemm_matrix(b, across ? N : 1, across ? 1 : K);
                walk = tshi_gemm_next(&job, j);
                for (int64_t i = 0; i < lines; i++) {
                    const int64_t at = (const tsh_real *)(const void *)walk.at - b;
                    const int64_t col = across ? at % N : at / K;
                    assert_in_range(at, 0, N * K - 1);
                    assert_true(col >= j && col < j + cols);
                    assert_int_equal(fetched[at / LINE]++, 0);
                    tshi_gemm_fetch(&walk);
                }
                assert_ptr_equal(walk.at, walk.last);
                assert_int_equal(walk.left, 0);
            }
        }
    }
}
#endif

/* ------------------------------------------------------------- streams */

static const tshi_gemm_kernel *streaming;
static int streamed; /* how often the next one was called */

static void count_stream(const tshi_gemm_tile *t, int rows, int cols) {
    streamed++;
    streaming->stream(t, rows, cols);
}

/* The bits of a product of few rows that reads B from end to end are those of the tiles'; also
 * where it is added to a bias. */
static void check_stream(const tshi_gemm_kernel *kernel, int64_t m, int64_t n, int64_t k,
                         int layout_a, int layout_b, tsh_real beta, int biased) {
    matrix a = matrix_new(m, k, layout_a), b = matrix_new(k, n, layout_b);
    matrix c[2] = {matrix_new(m, n, ROWS_PADDED), matrix_new(m, n, ROWS_PADDED)};
    matrix bias = {b.data, 0, 1, 0};
    const int unit = kernel->nr < 16 ? kernel->nr / 2 : 8; /* columns that are streamed at least */
    const int registers = n == kernel->nr || n == kernel->nr / 2; /* a tile has all columns */
    const int expect = m <= TSHI_GEMM_FEW && n >= unit && k >= m && !registers;
    matrix_fill(&a, m, k, 1, 0);
    matrix_fill(&b, k, n, 2, 0);
    for (int stream = 0; stream < 2; stream++) {
        tshi_gemm_kernel one = *kernel;
        one.stream = stream ? count_stream : NULL;
        streaming = kernel;
        streamed = 0;
        matrix_fill(&c[stream], m, n, 3, 0);
        gemm_from(&one, m, n, k, R(0.7), &a, &b, beta, biased ? &bias : &c[stream], &c[stream]);
        assert_int_equal(streamed > 0, stream && expect);
    }
    if (memcmp(c[0].data, c[1].data, c[0].size * sizeof *c[0].data))
        fail_msg("%s: %dx%dx%d has other bits when streamed", kernel->name, (int)m, (int)n, (int)k);
    free(a.data);
    free(b.data);
    free(c[0].data);
    free(c[1].data);
}

static void test_streams(void **state) {
    static const int layouts[] = {ROWS, COLUMNS, SPREAD};
    int tried = 0;
    (void)state;
    EACH_KERNEL(kernel) {
        const int64_t kc = kernel->kc, width = kernel->nr / 2;
        if (!kernel->stream) continue;
        tried++;
        for (int m = 1; m <= TSHI_GEMM_FEW + 1; m++) {
            const int64_t stripe = kernel->nr * (kc / m);
            const int layout = layouts[m % 3];
            check_stream(kernel, m, 2 * stripe + 3 * width + 1, kc - 1, layout, ROWS, 0, 0);
            check_stream(kernel, m, stripe + width - 1, 2 * kc + 5, layout, ROWS_PADDED, 1, 0);
            check_stream(kernel, m, stripe + 3 * width, 2 * kc + 5, layout, ROWS_PADDED, 1, 1);
            check_stream(kernel, m, stripe - width, 2 * kc, layout, ROWS_PADDED, R(-0.5), 0);
            check_stream(kernel, m, width, kc + 1, layout, ROWS, 1, 0);
            check_stream(kernel, m, width - 1, kc + 1, layout, ROWS, 1, 0);
            check_stream(kernel, m, 7, kc + 1, layout, ROWS, 1, 0);
            check_stream(kernel, m, 8, kc - 1, layout, ROWS_PADDED, 1, 1);
            check_stream(kernel, m, 3 * width, m, layout, ROWS, 1, 0);
            check_stream(kernel, m, 3 * width, m - 1, layout, ROWS, 1, 0);
        }
    }
    if (!tried) SKIP("no kernel that this processor runs streams its operands");
}

/* ------------------------------------------------------------- dtypes */

/* An operand: its dtype, and whether a product with bf16 may round it. */
typedef struct kind {
    tsh_dtype dtype;
    int rounds;
} kind;

enum { KINDS = 4, TYPED_GUARD = 0x5a };

static kind kind_of(int i) {
    const kind kinds[KINDS] = {{TSH_REAL, 0}, {TSH_REAL, 1}, {TSH_BF16, 0}, {TSH_F16, 0}};
    return kinds[i];
}

/* A matrix of any dtype; its values are matrix_fill's, rounded, its gaps are of guard bytes. */
typedef struct typed {
    tshi_matrix m;
    int64_t rows, columns;
    size_t bytes;
} typed;

static typed typed_new(int64_t rows, int64_t columns, kind k, int layout, uint32_t seed,
                       int exact) {
    const matrix shape = matrix_new(rows, columns, layout);
    const size_t bytes = shape.size * tsh_dtype_size(k.dtype);
    typed t = {{NULL, 0, 0, TSH_F32, 0}, 0, 0, 0};
    t.m = tshi_gemm_matrix_of(malloc(bytes), k.dtype, shape.rs, shape.cs);
    t.m.rounds = k.rounds;
    t.rows = rows;
    t.columns = columns;
    t.bytes = bytes;
    assert_non_null(t.m.data);
    memset(t.m.data, TYPED_GUARD, bytes);
    matrix_fill(&shape, rows, columns, seed, exact);
    for (int64_t e = 0; e < rows * columns; e++)
        tshi_dtype_put(k.dtype, t.m.data, e / columns * shape.rs + e % columns * shape.cs,
                       (double)*at(&shape, e / columns, e % columns));
    free(shape.data);
    return t;
}

static double typed_get(const typed *t, int64_t i, int64_t j) {
    return tshi_dtype_get(t->m.dtype, t->m.data, i * t->m.row + j * t->m.column);
}

/* All values as a product sees them: rounded to bf16, if they are to be. Transposed: column by
 * column. */
static double *typed_seen(const typed *t, int pairs, int transposed) {
    double *values = (double *)malloc((size_t)(t->rows * t->columns + 1) * sizeof *values);
    assert_non_null(values);
    for (int64_t i = 0; i < t->rows; i++)
        for (int64_t j = 0; j < t->columns; j++) {
            const double value = typed_get(t, i, j);
            values[transposed ? j * t->rows + i : i * t->columns + j] =
                pairs ? (double)tshi_dtype_from_bf16(tshi_dtype_to_bf16(R(value))) : value;
        }
    return values;
}

static double rounded_to(tsh_dtype dtype, double value) {
    int64_t memory = 0;
    tshi_dtype_put(dtype, &memory, 0, value);
    return tshi_dtype_get(dtype, &memory, 0);
}

/* C = alpha A B + beta D; the guards behind scratch and between C's elements stay. */
static void typed_gemm(const tshi_gemm_kernel *kernel, tsh_real alpha, const typed *a,
                       const typed *b, tsh_real beta, const typed *d, const typed *c) {
    const int64_t m = c->rows, n = c->columns, k = a->columns;
    const size_t size = tshi_gemm_scratch(kernel, m, n, k, c->m.row, c->m.column) +
                        tshi_gemm_scratch_sums(kernel, m, n, k, c->m);
    unsigned char *memory = (unsigned char *)malloc(size + 128), *from, *bytes;
    size_t guards = 0;
    assert_non_null(memory);
    from = memory + (64 - (uintptr_t)memory % 64) % 64;
    memset(from, 0xff, size); /* NaN: scratch that is read before it is written shows */
    memset(from + size, 0xa5, 64);
    run(kernel, from, NULL, m, n, k, alpha, a->m, b->m, beta, d->m, c->m);
    for (int i = 0; i < 64; i++) assert_int_equal(from[size + (size_t)i], 0xa5);
    free(memory);
    bytes = (unsigned char *)malloc(c->bytes);
    assert_non_null(bytes);
    memcpy(bytes, c->m.data, c->bytes);
    for (int64_t e = 0; e < m * n; e++)
        memset(bytes +
                   (e / n * c->m.row + e % n * c->m.column) * (int64_t)tsh_dtype_size(c->m.dtype),
               TYPED_GUARD, tsh_dtype_size(c->m.dtype));
    for (size_t i = 0; i < c->bytes; i++) guards += bytes[i] == TYPED_GUARD;
    assert_int_equal(guards, c->bytes);
    free(bytes);
}

/* What is added to a product: nothing, a row of tsh_real to each row, C in its own dtype. */
typedef enum addend { NOTHING, BIAS, ITSELF, ADDENDS } addend;

/* One product of the given kinds and layouts, against the sum in double. A tolerance of 0: values
 * are small integers, so that only C's dtype rounds. */
static void try_typed(const tshi_gemm_kernel *kernel, const int64_t size[3], const kind kinds[2],
                      tsh_dtype dtype, const int layout[3], addend added, double tolerance) {
    const kind of_c = {dtype, 0}, reals = {TSH_REAL, 0};
    const int64_t m = size[0], n = size[1], k = size[2];
    typed a = typed_new(m, k, kinds[0], layout[0], 1, tolerance == 0);
    typed b = typed_new(k, n, kinds[1], layout[1], 2, tolerance == 0);
    typed c = typed_new(m, n, of_c, layout[2], 3, 1), d = typed_new(1, n, reals, ROWS, 4, 1);
    const int pairs = tshi_gemm_pairs(kernel, a.m, b.m);
    double *as = typed_seen(&a, pairs, 0), *bs = typed_seen(&b, pairs, 1);
    double *ds = typed_seen(&c, 0, 0); /* what is added, of C's shape */
    d.m.row = 0;
    for (int64_t e = 0; e < m * n && added != ITSELF; e++)
        ds[e] = added == BIAS ? typed_get(&d, 0, e % n) : 0;
    typed_gemm(kernel, -2, &a, &b, R(added != NOTHING), added == BIAS ? &d : &c, &c);
    for (int64_t e = 0; e < m * n; e++) {
        const int64_t i = e / n, j = e % n;
        double sum = 0, want, error;
        for (int64_t p = 0; p < k; p++) sum += as[i * k + p] * bs[j * k + p];
        want = -2 * sum + ds[e];
        error = fabs(typed_get(&c, i, j) - (tolerance == 0 ? rounded_to(dtype, want) : want));
        if (!(error <= tolerance + (tolerance == 0 || dtype == TSH_REAL ? 0 : fabs(want) / 256)))
            fail_msg("%s: %s%s x %s%s -> %s, %dx%dx%d, layouts %d %d %d, addend %d, (%d, %d): "
                     "%.9g, not %.9g",
                     kernel->name, tshi_dtype_name(a.m.dtype), a.m.rounds ? " rounded" : "",
                     tshi_dtype_name(b.m.dtype), b.m.rounds ? " rounded" : "",
                     tshi_dtype_name(dtype), (int)m, (int)n, (int)k, layout[0], layout[1],
                     layout[2], (int)added, (int)i, (int)j, typed_get(&c, i, j), want);
    }
    free(as);
    free(bs);
    free(ds);
    free(a.m.data);
    free(b.m.data);
    free(c.m.data);
    free(d.m.data);
}

/* All kinds of A and B with all dtypes of C, at sizes on both sides of tiles, blocks and slices. */
static void test_dtypes(void **state) {
    static const int64_t small[][3] = {{1, 1, 1},   {1, 16, 31}, {1, 70, 64},  {3, 33, 65},
                                       {8, 49, 40}, {9, 32, 17}, {13, 31, 2},  {25, 65, 33},
                                       {70, 3, 19}, {65, 1, 50}, {12, 32, 63}, {1, 33, 1}};
    const tsh_dtype outs[] = {TSH_REAL, TSH_BF16, TSH_F16};
    int turn = 0;
    (void)state;
    EACH_KERNEL(kernel) {
        const int64_t kc = kernel->kc, big[][3] = {{kernel->mc + 1, 70, 2 * kc + 6},
                                                   {5, kernel->nc + 7, 2 * kc + 35},
                                                   {14, kernel->nc + 35, 4 * kc + 1},
                                                   {1, 40, 4 * kc + 3}};
        for (int i = 0; i < KINDS * KINDS * COUNT(outs); i++) {
            const kind kinds[2] = {kind_of(i % KINDS), kind_of(i / KINDS % KINDS)};
            const tsh_dtype out = outs[i / KINDS / KINDS];
            for (int s = 0; s < COUNT(small); s++, turn++) {
                const int layout[3] = {turn % LAYOUTS, turn / 3 % LAYOUTS, turn / 7 % LAYOUTS};
                try_typed(kernel, small[s % COUNT(small)], kinds, out, layout,
                          (addend)(turn % ADDENDS), 0);
            }
            for (int s = 0; s < COUNT(big) && i % 11 == kernel->mr % 11; s++, turn++) {
                const int layout[3] = {turn % 2, turn / 2 % 2, 0};
                try_typed(kernel, big[s], kinds, out, layout, (addend)(turn % ADDENDS), 0);
            }
        }
        for (int s = 0; s < COUNT(big); s++) { /* those that matter most, always */
            const int transposed[3] = {ROWS, COLUMNS, ROWS}, plain[3] = {COLUMNS, ROWS, ROWS};
            const kind bf16[2] = {kind_of(2), kind_of(2)}, gradient[2] = {kind_of(1), kind_of(2)};
            try_typed(kernel, big[s], bf16, TSH_BF16, transposed, BIAS, 0);
            try_typed(kernel, big[s], bf16, TSH_BF16, transposed, ITSELF, 0);
            try_typed(kernel, big[s], gradient, TSH_REAL, plain, NOTHING, 0);
        }
    }
}

/* Fractions. Products of bf16 are exact, and each of k sums errs by half a unit in the last place
 * of a sum below k / 4: less than eps k^1.5, twice because of alpha. */
static void test_dtypes_rounding(void **state) {
    static const int64_t sizes[][3] = {
        {64, 64, 64}, {13, 129, 1000}, {300, 70, 900}, {1, 80, 1777}};
    const double eps = sizeof(tsh_real) == 4 ? 1.2e-7 : 2.3e-16;
    (void)state;
    EACH_KERNEL(kernel)
    for (int s = 0; s < COUNT(sizes) * KINDS * KINDS; s++) {
        const int64_t *size = sizes[s % COUNT(sizes)];
        const int i = s / COUNT(sizes), layout[3] = {i % 2, 1 - i / 2 % 2, 0};
        const kind kinds[2] = {kind_of(i % KINDS), kind_of(i / KINDS)};
        const double tolerance = 2 * eps * (double)size[2] * sqrt((double)size[2]);
        try_typed(kernel, size, kinds, TSH_REAL, layout, BIAS, tolerance);
        try_typed(kernel, size, kinds, TSH_BF16, layout, NOTHING, tolerance);
    }
}

/* A part of C, alone: few rows or many, elsewhere in the tile, other strides: the same bits. */
static void check_typed_part(const tshi_gemm_kernel *kernel, const typed *a, const typed *b,
                             const typed *whole, const int part[4], int layout) {
    const kind of_a = {a->m.dtype, a->m.rounds}, of_c = {whole->m.dtype, 0};
    const int64_t i = part[0], m = part[1], j = part[2], n = part[3], k = a->columns;
    const typed d = typed_new(m, n, kind_of(0), ROWS, 9, 1);
    typed pa = typed_new(m, k, of_a, layout, 1, 1), pb = *b;
    typed c = typed_new(m, n, of_c, layout % 3 == 2 ? ROWS : layout, 5, 1);
    pb.m = tshi_gemm_from(b->m, 0, j);
    pb.columns = n;
    for (int64_t e = 0; e < m * k; e++) {
        const tshi_matrix from = tshi_gemm_from(a->m, i + e / k, e % k);
        memcpy(tshi_gemm_from(pa.m, e / k, e % k).data, from.data, tsh_dtype_size(a->m.dtype));
    }
    typed_gemm(kernel, R(0.7), &pa, &pb, 0, &d, &c);
    for (int64_t e = 0; e < m * n; e++) {
        const double got = typed_get(&c, e / n, e % n);
        const double want = typed_get(whole, i + e / n, j + e % n);
        if (memcmp(&got, &want, sizeof got) != 0)
            fail_msg("%s: %s x %s: (%d, %d) of a part (%d, %d) of layout %d: %.9g, not %.9g",
                     kernel->name, tshi_dtype_name(a->m.dtype), tshi_dtype_name(b->m.dtype),
                     (int)(i + e / n), (int)(j + e % n), (int)m, (int)n, layout, got, want);
    }
    free(pa.m.data);
    free(c.m.data);
    free(d.m.data);
}

static void test_dtypes_bits(void **state) {
    static const int parts[][4] = {{0, 40, 0, 49}, {0, 1, 0, 99},   {5, 2, 1, 64},  {7, 1, 3, 1},
                                   {0, 40, 9, 1},  {3, 30, 5, 2},   {1, 13, 65, 7}, {9, 3, 2, 97},
                                   {8, 4, 0, 80},  {11, 5, 17, 64}, {20, 8, 0, 99}, {2, 9, 3, 33}};
    static const int64_t terms[] = {1601, 7, 16, 37, 53, 111}; /* whole cache lines: even, odd, 0 */
    const int64_t m = 40, n = 99;
    (void)state;
    EACH_KERNEL(kernel)
    for (int round = 0; round < KINDS * KINDS * 2 * LAYOUTS * COUNT(terms); round++) {
        const int i = round / COUNT(terms);
        const int64_t k = terms[round % COUNT(terms)];
        const kind of_a = kind_of(i % KINDS), of_b = kind_of(i / KINDS % KINDS);
        const kind of_c = i / KINDS / KINDS % 2 ? kind_of(2) : kind_of(0);
        const int layout = i / KINDS / KINDS / 2;
        typed a, b, whole;
        if (!kernel->pack && i % 11) continue; /* it has one way only */
        a = typed_new(m, k, of_a, ROWS, 1, 0);
        b = typed_new(k, n, of_b, layout, 2, 0);
        whole = typed_new(m, n, of_c, ROWS, 3, 1);
        typed_gemm(kernel, R(0.7), &a, &b, 0, &whole, &whole);
        for (int p = 0; p < COUNT(parts); p++)
            check_typed_part(kernel, &a, &b, &whole, parts[p], (layout + p) % LAYOUTS);
        free(a.m.data);
        free(b.m.data);
        free(whole.m.data);
    }
}

/* If B has 16 bits, a streamed product has the bits of a packed one: with contiguous rows of B and
 * with gaps between them, for odd and even k, and for a k of several slices. After B comes a row of
 * NaN, which an odd k must not pair its last row with. */
static void test_streams_short(void **state) {
    static const int64_t columns[] = {7, 8, 16, 24, 64, 72, 331};
    int tried = 0;
    (void)state;
    EACH_KERNEL(kernel)
    for (int round = 0; round < 2 * 2 * COUNT(columns) * (TSHI_GEMM_FEW + 1); round++) {
        const int64_t m = 1 + round / 4 / COUNT(columns), n = columns[round / 4 % COUNT(columns)];
        const kind of_a = kind_of(round % 4), of_b = kind_of(2 + round / 4 % 2);
        const int layout = round % 3 ? ROWS : ROWS_PADDED;
        for (int t = 0; t < 4 && kernel->stream && kernel->pack; t++) {
            const int64_t k = t < 2 ? 40 + t : 2 * kernel->kc + 10 + t;
            typed a = typed_new(m, k, of_a, layout, 1, 0);
            typed b = typed_new(k + 1, n, of_b, layout, 2, 0);
            typed c = typed_new(m, n, kind_of(0), ROWS, 3, 1),
                  packed = typed_new(m, n, kind_of(0), ROWS, 3, 1);
            const int unit = kernel->nr < 16                       ? kernel->nr / 2
                             : tshi_gemm_pairs(kernel, a.m, b.m) ? 16
                                                                   : 8;
            tshi_gemm_kernel one = *kernel;
            for (int64_t j = 0; j < n; j++)
                tshi_dtype_put(of_b.dtype, b.m.data, k * b.m.row + j, (double)NAN);
            tried++;
            streaming = kernel;
            streamed = 0;
            one.stream = count_stream;
            typed_gemm(&one, R(0.7), &a, &b, R(t % 2), &c, &c);
            assert_int_equal(streamed > 0, m <= TSHI_GEMM_FEW && n >= unit);
            one.stream = NULL;
            typed_gemm(&one, R(0.7), &a, &b, R(t % 2), &packed, &packed);
            if (memcmp(c.m.data, packed.m.data, c.bytes) != 0)
                fail_msg("%s: %s x %s, %dx%dx%d has other bits when streamed", kernel->name,
                         tshi_dtype_name(of_a.dtype), tshi_dtype_name(of_b.dtype), (int)m, (int)n,
                         (int)k);
            free(a.m.data);
            free(b.m.data);
            free(c.m.data);
            free(packed.m.data);
        }
    }
    if (!tried) SKIP("no kernel that this processor runs streams operands of 16 bits");
}

#if defined(__aarch64__)
/* The sum of x and y, rounded to odd: an inexact one is the neighbour whose last bit is 1. */
static float odd_sum(float x, float y) {
    const double sum = (double)x + (double)y, rest = sum - (double)x;
    const double lost = ((double)x - (sum - rest)) + ((double)y - rest); /* exact: Knuth's sum */
    /* if double rounded the sum to a float, moves it by one bit, so that it is not one */
    const double near = lost > 0   ? nextafter(sum, INFINITY)
                        : lost < 0 ? nextafter(sum, -INFINITY)
                                   : sum;
    return tshi_dtype_float_of(tshi_dtype_odd_bits(near));
}

/* The sum after one more pair of products, as bfdot and bfmmla add them. */
static float add_pair(float sum, float first, float second) {
    return odd_sum(sum, odd_sum(first, second));
}
#else
/* The sum after one more pair of products, as AVX512_BF16 adds them. */
static float add_pair(float sum, float first, float second) {
    volatile float part = sum + second; /* no wider than float */
    return part + first;
}
#endif

/* The products [p, k) of one step of pairs, added to `part`: apart 0: of one pair; 1: of 16 pairs,
 * whose even and odd elements AMX sums apart. No sum is wider than float or fused (products of bf16
 * are exact). */
static float add_pairs(const typed *a, int64_t i, const typed *b, int64_t j, int64_t p, int64_t k,
                       int apart, float part) {
    volatile float halves[2] = {0, 0}, product; /* sums of even, of odd elements */
    for (int odd = 0; odd < 2; odd++)
        for (int64_t q = p + odd; q < k; q += 2) {
            product = (float)(typed_get(a, i, q) * typed_get(b, q, j));
            halves[odd] = halves[odd] + product;
        }
    if (!apart) return add_pair(part, halves[0], halves[1]);
    halves[0] = halves[0] + halves[1];
    return part + halves[0];
}

/* The order of the sums of pairs, step by step, in float. */
static void test_pairs_order(void **state) {
    const int64_t m = 13, n = 40, k = 1601;
    int tried = 0;
    (void)state;
    EACH_KERNEL(kernel) {
        typed a = typed_new(m, k, kind_of(2), ROWS, 1, 0);
        typed b = typed_new(k, n, kind_of(2), COLUMNS, 2, 0);
        typed c = typed_new(m, n, kind_of(0), ROWS, 3, 1);
        const int64_t slice = tshi_gemm_slice(kernel, TSHI_GEMM_PAIRS, k);
        const int64_t step = kernel->tiles ? 32 : 2;
        if (kernel->pairs) {
            tried++;
            typed_gemm(kernel, 1, &a, &b, 0, &c, &c);
            for (int64_t e = 0; e < m * n; e++) {
                volatile float sum = 0, part = 0;
                for (int64_t p = 0; p < k; p += step) {
                    const int64_t end = p + step < k ? p + step : k;
                    if (p % slice == 0) part = 0;
                    part = add_pairs(&a, e / n, &b, e % n, p, end, kernel->tiles != NULL, part);
                    if (end == k || end % slice == 0) sum = sum + part;
                }
                if ((double)sum != typed_get(&c, e / n, e % n))
                    fail_msg("%s: element %d is %.9g, not %.9g", kernel->name, (int)e,
                             typed_get(&c, e / n, e % n), (double)sum);
            }
        }
        free(a.m.data);
        free(b.m.data);
        free(c.m.data);
    }
    if (!tried) SKIP("this processor has neither AVX512_BF16 nor AMX nor FEAT_BF16");
}

#if defined(__GNUC__) && defined(__x86_64__) && !defined(_WIN32) && !defined(TSHARD_NO_SIMD) && \
    !defined(TESTS_DOUBLE) && (defined(__clang__) ? __clang_major__ >= 9 : __GNUC__ >= 10)
/* Stores pairs as what bf16 tensors hold, uint16_t, and multiplies them by b, in one function: an
 * optimiser that takes a word for nothing but a float removes the stores. */
__attribute__((noinline, target("avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))
static float product_of_shorts(const float *b, uint16_t x) {
    enum { WORDS = 8, LANES = 16 };
    uint16_t *a = (uint16_t *)malloc(2 * WORDS * sizeof *a);
    float c[LANES] = {0};
    tshi_gemm_walk walk = {(const char *)b, (const char *)b, (const char *)b, 0, 0, 0};
    tshi_gemm_tile t;
    if (!a) return 0;
    for (int i = 0; i < 2 * WORDS; i++) a[i] = x;
    memset(&t, 0, sizeof t);
    t.k = WORDS;
    t.a = (const tsh_real *)(const void *)a;
    t.csa = 1;
    t.b = b;
    t.rsb = LANES;
    t.alpha = 1;
    t.c = c;
    t.rsc = LANES;
    t.walk = &walk;
    tshi_gemm_rows_bf16(&t, 1, 1);
    free(a);
    return c[0];
}

static void test_pairs_stored_as_shorts(void **state) {
    float b[8 * 16];
    const uint32_t ones = 0x3F803F80u; /* two bf16 of 1 */
    (void)state;
    if (!__builtin_cpu_supports("avx512bf16")) SKIP("no AVX512_BF16");
    for (int i = 0; i < 8 * 16; i++) memcpy(&b[i], &ones, sizeof ones);
    assert_true(product_of_shorts(b, 0x3F80) == 16);
    assert_true(product_of_shorts(b, 0x4000) == 32);
}
#else
static void test_pairs_stored_as_shorts(void **state) {
    (void)state;
    SKIP("no AVX512_BF16");
}
#endif

/* A pair of bf16 whose NaNs are quiet. */
static uint32_t quiet(tsh_real pair) {
    uint32_t bits;
    memcpy(&bits, &pair, sizeof bits);
    if ((bits & 0x7FFFu) > 0x7F80u) bits |= 0x40u;
    return (bits & 0x7FFF0000u) > 0x7F800000u ? bits | 0x400000u : bits;
}

/* A pair of bf16 whose subnormal numbers are zeros, which is what the product of pairs takes them
 * for, and what the processor's rounding makes of them. */
static uint32_t flushed(tsh_real pair) {
    uint32_t bits;
    memcpy(&bits, &pair, sizeof bits);
    if ((bits & 0x7F80u) == 0) bits &= 0xFFFF8000u;
    return (bits & 0x7F800000u) == 0 ? bits & 0x8000FFFFu : bits;
}

/* Packing by vectors gives the bits of packing by elements: any width, valid rows, steps, strides;
 * numbers that are not finite, subnormal, and in the middle of two of bf16. */
static void test_pack_dtypes(void **state) {
    static const uint32_t special[] = {0x7FC00000u, 0x7F800001u, 0xFF800000u, 0x7F7FFFFFu,
                                       0x00000001u, 0x80018000u, 0x3F808000u, 0x3F818000u,
                                       0x3F808001u, 0x80000000u};
    static tsh_real fast[40 * 80], plain[40 * 80];
    static uint32_t source[40 * 90];
    (void)state;
    for (int i = 0; i < COUNT(source); i++)
        source[i] = i % 7 ? (uint32_t)i * 2654435761u : special[i / 7 % COUNT(special)];
    EACH_KERNEL(kernel) {
        tshi_gemm_kernel slow = *kernel;
        slow.pack = NULL;
        for (int turn = 0; turn < 3000 && kernel->pack; turn++) {
            const int forms[] = {TSHI_GEMM_BF16, TSHI_GEMM_F16, TSHI_GEMM_PAIRS, TSHI_GEMM_ROUNDED};
            const tshi_gemm_form form = (tshi_gemm_form)forms[turn % 4];
            const int widths[] = {1, 4, 8, 12, 16, 32}, width = widths[turn / 4 % 6];
            const int valid = 1 + turn / 24 % width, along = turn / 3 % 2;
            const int64_t k = 1 + turn * 7 % 79, odd = turn / 5 % 2;
            const tsh_dtype dtype = form == TSHI_GEMM_F16       ? TSH_F16
                                    : form == TSHI_GEMM_ROUNDED ? TSH_F32
                                                                : TSH_BF16;
            const tshi_matrix m = tshi_gemm_matrix_of((char *)source + 4 * odd, dtype,
                                                      along ? k + odd : 1, along ? 1 : width + odd);
            memset(fast, 1, sizeof fast);
            memset(plain, 1, sizeof plain);
            tshi_gemm_pack_matrix(kernel, fast, width, valid, k, m, form);
            tshi_gemm_pack_matrix(&slow, plain, width, valid, k, m, form);
            for (int i = 0; i < COUNT(fast); i++) /* a NaN may have another payload */
                if (memcmp(&fast[i], &plain[i], sizeof *fast) != 0 &&
                    !(form == TSHI_GEMM_F16 && fast[i] != fast[i] && plain[i] != plain[i]) &&
                    !(form == TSHI_GEMM_PAIRS && quiet(fast[i]) == quiet(plain[i])) &&
                    !(form == TSHI_GEMM_ROUNDED && flushed(fast[i]) == flushed(plain[i])))
                    fail_msg("%s: form %d, width %d, %d rows, %d steps, word %d", kernel->name,
                             (int)form, width, valid, (int)k, i);
        }
    }
}

/* Storing by vectors rounds as the dtype does. */
static void test_store(void **state) {
    static const uint32_t special[] = {0x7FC00000u, 0xFF800001u, 0xFF800000u, 0x7F7FFFFFu,
                                       0x00000001u, 0x80018000u, 0x3F808000u, 0x3F818000u,
                                       0x477FF000u, 0x33000000u};
    (void)state;
    EACH_KERNEL(kernel)
    for (int turn = 0; turn < 4000 && kernel->store; turn++) {
        const tsh_dtype dtype = turn % 2 ? TSH_F16 : TSH_BF16;
        const int n = 1 + turn / 2 % 40;
        uint16_t fast[41], plain[41];
        tsh_real from[40];
        for (int i = 0; i < n; i++) {
            const uint32_t any = (uint32_t)(turn * 40 + i) * 2654435761u;
            const uint32_t near = (any & 0x8FFFFFFFu) | 0x30000000u; /* of the exponents of f16 */
            const uint32_t bits = i % 5 == 0 ? special[(turn + i) % COUNT(special)]
                                  : i % 2    ? any
                                             : near;
            from[i] = R(tshi_dtype_float_of(bits));
        }
        memset(fast, 1, sizeof fast);
        memset(plain, 1, sizeof plain);
        kernel->store(fast, from, n, dtype);
        tshi_dtypes[dtype].store(plain, 1, n, from);
        for (int i = 0; i < COUNT(fast); i++)
            if (fast[i] != plain[i] &&
                !(i < n && dtype == TSH_F16 && from[i] != from[i] && (fast[i] & 0x7FFFu) > 0x7C00u))
                fail_msg("%s: %.9g is stored as %x, not %x", kernel->name, (double)from[i], fast[i],
                         plain[i]);
    }
}

/* NaN and infinity of either operand reach C; subnormal numbers of bf16 may count as 0. */
static void test_dtypes_nan(void **state) {
    (void)state;
    EACH_KERNEL(kernel)
    for (int i = 0; i < KINDS * KINDS * 3; i++) {
        static const int rows[] = {1, 5, 30};
        const int64_t m = rows[i % 3], n = 40, k = 70;
        typed a = typed_new(m, k, kind_of(i / 3 % KINDS), ROWS, 1, 1);
        typed b = typed_new(k, n, kind_of(i / 3 / KINDS), i % 2 ? ROWS : COLUMNS, 2, 1);
        typed c = typed_new(m, n, kind_of(i % 2 ? 0 : 2), ROWS, 3, 1);
        tshi_dtype_put(b.m.dtype, tshi_gemm_from(b.m, 69, 33).data, 0, (double)NAN);
        tshi_dtype_put(a.m.dtype, tshi_gemm_from(a.m, m - 1, 68).data, 0, (double)INFINITY);
        for (int64_t j = 0; j < n; j++)
            tshi_dtype_put(b.m.dtype, tshi_gemm_from(b.m, 68, j).data, 0, 1);
        typed_gemm(kernel, 1, &a, &b, 0, &c, &c);
        for (int64_t e = 0; e < m * n; e++) {
            const double got = typed_get(&c, e / n, e % n);
            if (e % n == 33)
                assert_true(got != got);
            else if (e / n == m - 1)
                assert_true(got == (double)INFINITY);
            else
                assert_true(fabs(got) < 1000);
        }
        free(a.m.data);
        free(b.m.data);
        free(c.m.data);
    }
}

static void test_pack(void **state) {
    static const int steps[][2] = {{1, 50}, {50, 1}, {3, 70}, {1, 1}, {0, 1}};
    static tsh_real source[64 * 70], fast[64 * 40], plain[64 * 40];
    (void)state;
    for (int i = 0; i < COUNT(source); i++) source[i] = R(i);
    for (int width = 4; width <= 32; width += 2) {
        for (int valid = 1; valid <= width; valid++) {
            for (int s = 0; s < COUNT(steps); s++) {
                const int64_t k = 1 + (width * valid + s) % 39;
                memset(fast, 1, sizeof fast);
                memset(plain, 1, sizeof plain);
                tshi_gemm_pack(fast, width, valid, k, source, steps[s][0], steps[s][1]);
                tshi_gemm_pack_lanes(plain, width, 0, valid, k, source, steps[s][0], steps[s][1]);
                assert_memory_equal(fast, plain, sizeof fast);
            }
        }
    }
}

static void test_table(void **state) {
    (void)state;
    EACH_KERNEL(kernel) {
        assert_true(kernel->mr * kernel->nr <= TSHI_GEMM_TILE_MAX);
        assert_int_equal(kernel->mc % kernel->mr, 0);
        assert_int_equal(kernel->kc % 32, 0);
        assert_int_equal(kernel->nc % kernel->nr, 0);
        assert_int_equal(kernel->nr % 2, 0);
        assert_true(tshi_gemm_scratch(kernel, 1 << 20, 1 << 20, 1 << 20, 1 << 20, 1) <= (size_t)8
                                                                                            << 20);
    }
}

/* A product of one's own takes the place of the built-in one: here float32 that is rounded to
 * TensorFloat32, of 10 bits after the binary point. */
static float to_tf32(tsh_real x) {
    float value = (float)x;
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    bits = (bits + 0x1000u) & ~0x1FFFu;
    memcpy(&value, &bits, sizeof bits);
    return value;
}

static void tf32_gemm(int64_t m, int64_t n, int64_t k, tsh_real alpha,
                      const tsh_real *a, int64_t rsa, int64_t csa, const tsh_real *b, int64_t rsb,
                      int64_t csb, tsh_real beta, tsh_real *c, int64_t rsc, int64_t csc,
                      int threads, void *user) {
    int64_t i, j, l;
    (void)threads;
    for (i = 0; i < m; i++)
        for (j = 0; j < n; j++) {
            tsh_real *at = c + i * rsc + j * csc, sum = 0;
            for (l = 0; l < k; l++)
                sum += (tsh_real)(to_tf32(a[i * rsa + l * csa]) * to_tf32(b[l * rsb + j * csb]));
            *at = alpha * sum + (beta != 0 ? beta * *at : 0);
        }
    ++*(int *)user;
}

static void test_own_gemm(void **state) {
    const double more = 1 + 1.0 / 4096; /* TensorFloat32 has no such value */
    int own, calls = 0;
    (void)state;
    for (own = 0; own < 2; own++) {
        tsh_desc desc = {.seed = 4};
        tsh_tensor *a, *b, *c;
        tsh_ctx *ctx;
        if (own) desc.gemm.multiply = tf32_gemm;
        desc.gemm.user = &calls;
        assert_int_equal(tsh_open(&desc, &ctx), TSH_OK);
        a = tsh_requires_grad(tsh_keep(tsh_full(ctx, tsh_shape2(3, 4), more)), 1);
        b = tsh_full(ctx, tsh_shape2(4, 2), 1);
        c = tsh_retain_grad(tsh_matmul(a, b));
        assert_true(((tsh_real *)tsh_data(ctx, c))[0] == (tsh_real)(own ? 4 : 4 * more));
        assert_int_equal(tsh_backward(ctx, tsh_sum(tsh_scale(c, more), TSH_ALL, 0)), TSH_OK);
        assert_true(((tsh_real *)tsh_data(ctx, tsh_grad(a)))[0] == (tsh_real)(own ? 2 : 2 * more));
        assert_int_equal(calls, own ? 2 : 0);
        tsh_close(ctx);
    }
}

static void count_chore(void *user) {
    ++*(int *)user;
}

/* A long product does what it is told to now and then: here after each column of tiles. */
static void test_chore(void **state) {
    const int64_t m = 130, n = 700, k = 1100;
    matrix a = matrix_new(m, k, ROWS), b = matrix_new(k, n, ROWS);
    matrix c = matrix_new(m, n, ROWS), turned = matrix_new(m, n, COLUMNS);
    (void)state;
    matrix_fill(&a, m, k, 1, 1);
    matrix_fill(&b, k, n, 2, 1);
    EACH_KERNEL(kernel) {
        int count = 0;
        const tshi_gemm_progress progress = {count_chore, &count, 0};
        const int most = (int)(m * n * k / TSHI_GEMM_INTERVAL);
        run(kernel, scratch, &progress, m, n, k, 1, seen(&a), seen(&b), 0, seen(&c), seen(&c));
        check(kernel->name, m, n, k, 1, &a, &b, 0, &c, &c, 0);
        assert_in_range(count, most / 2, most);
        count = 0;
        run(kernel, scratch, &progress, m, n, k, 1, seen(&a), seen(&b), 0, seen(&turned),
            seen(&turned));
        assert_in_range(count, most / 2, most);
        count = 0;
        run(kernel, scratch, &progress, 30, 40, 50, 1, seen(&a), seen(&b), 0, seen(&c), seen(&c));
        assert_int_equal(count, 0);
    }
    free(a.data);
    free(b.data);
    free(c.data);
    free(turned.data);
}

static int progressed;

static void count_progress(tsh_comm *comm) {
    progressed += comm->in_flight;
}

/* While something travels, products move it on; by the rank's own thread, with several, too. */
static void test_progress(void **state) {
    tsh_comm_ops ops;
    tsh_ctx *ctx;
    int threads;
    (void)state;
    memset(&ops, 0, sizeof ops);
    ops.progress = count_progress;
    for (threads = 1; threads <= 3; threads += 2) {
        tsh_desc desc;
        tsh_comm dp;
        tsh_tensor *x;
        int most;
        memset(&desc, 0, sizeof desc);
        desc.threads = threads;
        assert_int_equal(tsh_open(&desc, &ctx), TSH_OK);
        dp = ctx->dp;
        x = tsh_randn(ctx, tsh_shape2(600, 600));
        progressed = 0;
        ctx->dp.ops = &ops;
        (void)tsh_matmul(x, x);
        assert_int_equal(progressed, 0);
        ctx->dp.in_flight = 1;
        (void)tsh_matmul(x, x);
        most = 600 * 600 * 600 / TSHI_GEMM_INTERVAL * tshi_team_spare(ctx) / threads;
        assert_in_range(progressed, most / 2, most);
        ctx->dp = dp;
        assert_true(tsh_ok(ctx));
        tsh_close(ctx);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_table),
        cmocka_unit_test(test_pack),
        cmocka_unit_test(test_small_sizes),
        cmocka_unit_test(test_all_layouts),
        cmocka_unit_test(test_blocks),
        cmocka_unit_test(test_bias),
        cmocka_unit_test(test_nan),
        cmocka_unit_test(test_nan_spreads),
        cmocka_unit_test(test_empty),
        cmocka_unit_test(test_rounding),
        cmocka_unit_test(test_bits),
        cmocka_unit_test(test_streams),
        cmocka_unit_test(test_streams_short),
        cmocka_unit_test(test_chore),
        cmocka_unit_test(test_progress),
        cmocka_unit_test(test_own_gemm),
        cmocka_unit_test(test_dtypes),
        cmocka_unit_test(test_dtypes_bits),
        cmocka_unit_test(test_dtypes_rounding),
        cmocka_unit_test(test_pairs_order),
        cmocka_unit_test(test_pairs_stored_as_shorts),
        cmocka_unit_test(test_pack_dtypes),
        cmocka_unit_test(test_store),
        cmocka_unit_test(test_dtypes_nan),
#ifndef TSHARD_NO_SIMD
        cmocka_unit_test(test_fetch),
#endif
    };
    return cmocka_run_group_tests(tests, scratch_new, scratch_free);
}
