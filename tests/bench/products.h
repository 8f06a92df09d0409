/* products.h - the programs for matrix products that benchmarks compare: the built-in one and
 * tsh_blis_gemm (with BENCH_BLIS), both on the threads of a rank; BLIS's cblas_sgemm (with
 * BENCH_BLIS), OpenBLAS's cblas_sgemm (if it is found).
 *
 * Defines the implementation of tshard.h. Link with -ldl, or define BENCH_STATIC for a program that
 * loads no library. */
#ifndef TSHARD_TESTS_PRODUCTS_H
#define TSHARD_TESTS_PRODUCTS_H

#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"
#ifdef BENCH_BLIS
#include "../../backends/tshard_blis.h"
#include <cblas.h>
#else
enum { CblasRowMajor = 101, CblasNoTrans = 111, CblasTrans = 112 };
#endif

#ifndef BENCH_STATIC
#include <dlfcn.h>
#endif
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define COUNT(a) ((int)(sizeof(a) / sizeof((a)[0])))

/* cblas_sgemm with its enums as the ints that they are passed as. */
typedef void (*sgemm_fn)(int, int, int, int, int, int, float, const float *, int, const float *,
                         int, float, float *, int);

typedef struct problem {
    int m, n, k, ta, tb; /* ta, tb: whether A, B are stored transposed */
    tsh_ctx *builtin, *blis;
    sgemm_fn openblas;
    tsh_real *a, *b, *c;
} problem;

static double now(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void by_ctx(tsh_ctx *ctx, const problem *p) {
    tshi_matmul_gemm(ctx, p->m, p->n, p->k, 1,
                     tshi_gemm_matrix(p->a, p->ta ? 1 : p->k, p->ta ? p->m : 1),
                     tshi_gemm_matrix(p->b, p->tb ? 1 : p->n, p->tb ? p->k : 1), 0,
                     tshi_gemm_matrix(p->c, p->n, 1));
}

static void by_builtin(const problem *p) {
    by_ctx(p->builtin, p);
}

static void by_openblas(const problem *p) {
    p->openblas(CblasRowMajor, p->ta ? CblasTrans : CblasNoTrans, p->tb ? CblasTrans : CblasNoTrans,
                p->m, p->n, p->k, 1, p->a, p->ta ? p->m : p->k, p->b, p->tb ? p->k : p->n, 0, p->c,
                p->n);
}

#ifdef BENCH_BLIS
static void by_tsh_blis(const problem *p) {
    by_ctx(p->blis, p);
}

static void by_blis(const problem *p) {
    cblas_sgemm(CblasRowMajor, p->ta ? CblasTrans : CblasNoTrans, p->tb ? CblasTrans : CblasNoTrans,
                p->m, p->n, p->k, 1, p->a, p->ta ? p->m : p->k, p->b, p->tb ? p->k : p->n, 0, p->c,
                p->n);
}
#endif

static const struct {
    const char *name;
    void (*product)(const problem *);
} programs[] = {{"builtin", by_builtin},
#ifdef BENCH_BLIS
                {"tsh_blis", by_tsh_blis},
                {"blis", by_blis},
#endif
                {"openblas", by_openblas}};

static int there(const problem *p, int i) {
    return programs[i].product != by_openblas || p->openblas;
}

/* Debian's, apart from whatever libblas is; NULL: not there. POSIX promises that the conversion of
 * dlsym's result works, C does not. */
static sgemm_fn find_openblas(void) {
    sgemm_fn found = NULL;
#ifndef BENCH_STATIC
    static const char *const paths[] = {
        "/usr/lib/x86_64-linux-gnu/openblas-pthread/libopenblas.so.0",
        "/usr/lib/aarch64-linux-gnu/openblas-pthread/libopenblas.so.0", "libopenblas.so.0"};
    void *library = NULL, *symbol;
    for (int i = 0; i < COUNT(paths) && !library; i++)
        library = dlopen(paths[i], RTLD_NOW | RTLD_LOCAL);
    symbol = library ? dlsym(library, "cblas_sgemm") : NULL;
    memcpy(&found, &symbol, sizeof found);
#endif
    return found;
}

/* The programs, on so many threads. */
static problem programs_open(int threads) {
    tsh_desc desc;
    problem p;
    memset(&desc, 0, sizeof desc);
    memset(&p, 0, sizeof p);
    desc.threads = threads;
    if (tsh_open(&desc, &p.builtin) != TSH_OK) exit(1);
#ifdef BENCH_BLIS
    desc.gemm.multiply = tsh_blis_gemm;
    if (tsh_open(&desc, &p.blis) != TSH_OK) exit(1);
#endif
    p.openblas = find_openblas();
    return p;
}

/* Begins with a cache line, as every tensor does. */
static tsh_real *matrix(int rows, int columns) {
    const size_t size = (size_t)rows * (size_t)columns;
    void *memory = NULL;
    tsh_real *x;
    if (posix_memalign(&memory, 64, size * sizeof *x) != 0) {
        fprintf(stderr, "no memory for %d x %d\n", rows, columns);
        exit(1);
    }
    x = (tsh_real *)memory;
    for (size_t i = 0; i < size; i++)
        x[i] = (tsh_real)((double)(i * 2654435761u % 1000) / 1000 - 0.5);
    return x;
}

#endif /* TSHARD_TESTS_PRODUCTS_H */
