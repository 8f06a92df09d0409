/* The built-in matrix multiply on one thread: GFLOP/s of C = A B^T (as a linear layer has it), and
 * with BENCH_BLIS against BLIS's cblas_sgemm, the two by turns.
 *
 *     cc -std=c99 -D_POSIX_C_SOURCE=200809L -O3 tests/bench/bench_gemm.c -lm -DBENCH_BLIS \
 *        -I/usr/include/x86_64-linux-gnu/blis-pthread -L/usr/lib/x86_64-linux-gnu/blis-pthread \
 *        -Wl,-rpath,/usr/lib/x86_64-linux-gnu/blis-pthread -lblis
 *
 * Run it with BLIS_NUM_THREADS=1. usage: bench_gemm [all] [kernel]
 * Prints "gemm_builtin_MxNxK ours peer ratio": medians of the rounds, and the median of their
 * ratios (above 1: ours is faster). `all` adds more shapes, and A B and A^T B under names that end
 * in _NN and _TN. kernel is a name in tshi_gemm_kernels. */
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#ifdef BENCH_BLIS
#include <cblas.h>
#endif

#define COUNT(a) ((int)(sizeof(a) / sizeof((a)[0])))
enum { ROUNDS = 9, USUAL = 7, BIG = 50304 };

/* The first USUAL are run always: GPT-2's layers, then nanoGPT's, then a tile of attention. */
static const int shapes[][3] = {
    {256, 768, 768}, {256, 3072, 768}, {256, 768, 3072}, {256, BIG, 768}, {768, 512, 128},
    {768, 128, 512}, {64, 64, 64},     {1024, 768, 768}, {64, 768, 768},  {768, 128, 128},
    {768, 384, 128}, {768, 65, 128},   {128, 512, 768},  {64, 32, 64},    {64, 64, 32},
    {8, 768, 768},   {1, 768, 768},    {1, BIG, 768},    {768, 1, 128},   {256, 256, 8}};

typedef struct problem {
    int m, n, k, ta, tb; /* ta, tb: whether A, B are stored transposed */
    const tshi_gemm_kernel *kernel;
    void *scratch;
    tsh_real *a, *b, *c;
} problem;

static double now(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int by_value(const void *x, const void *y) {
    const double a = *(const double *)x, b = *(const double *)y;
    return (a > b) - (a < b);
}

static double median(double *values) {
    qsort(values, ROUNDS, sizeof *values, by_value);
    return values[ROUNDS / 2];
}

static void ours(const problem *p) {
    tshi_gemm_run(p->kernel, p->scratch, p->m, p->n, p->k, 1, p->a, p->ta ? 1 : p->k,
                  p->ta ? p->m : 1, p->b, p->tb ? 1 : p->n, p->tb ? p->k : 1, 0, p->c, p->n, 1);
}

static void peer(const problem *p) {
#ifdef BENCH_BLIS
    cblas_sgemm(CblasRowMajor, p->ta ? CblasTrans : CblasNoTrans, p->tb ? CblasTrans : CblasNoTrans,
                p->m, p->n, p->k, 1, p->a, p->ta ? p->m : p->k, p->b, p->tb ? p->k : p->n, 0, p->c,
                p->n);
#else
    (void)p;
#endif
}

/* GFLOP/s of `times` products. */
static double rate(void (*product)(const problem *), const problem *p, int times) {
    const double start = now();
    for (int i = 0; i < times; i++) product(p);
    return 2e-9 * p->m * p->n * p->k * times / (now() - start);
}

static tsh_real *matrix(int rows, int columns) {
    const size_t size = (size_t)rows * (size_t)columns;
    tsh_real *x = (tsh_real *)malloc(size * sizeof *x);
    if (!x) {
        fprintf(stderr, "bench_gemm: no memory for %d x %d\n", rows, columns);
        exit(1);
    }
    for (size_t i = 0; i < size; i++)
        x[i] = (tsh_real)((double)(i * 2654435761u % 1000) / 1000 - 0.5);
    return x;
}

static void bench(problem *p) {
    double mine[ROUNDS], theirs[ROUNDS], ratios[ROUNDS];
    const double flop = 2.0 * p->m * p->n * p->k;
    const int times = flop > 2e9 ? 1 : (int)(2e9 / flop < 20000 ? 2e9 / flop : 20000); /* 20 ms */
    const char *kind = p->tb ? "" : p->ta ? "_TN" : "_NN";
    p->a = matrix(p->m, p->k);
    p->b = matrix(p->k, p->n);
    p->c = matrix(p->m, p->n);
    ours(p);
    peer(p);
    for (int r = 0; r < ROUNDS; r++) {
        mine[r] = rate(ours, p, times);
#ifdef BENCH_BLIS
        theirs[r] = rate(peer, p, times);
        ratios[r] = mine[r] / theirs[r];
#else
        theirs[r] = ratios[r] = 0;
#endif
    }
#ifdef BENCH_BLIS
    printf("gemm_builtin_%dx%dx%d%s %.1f %.1f %.3f\n", p->m, p->n, p->k, kind, median(mine),
           median(theirs), median(ratios));
#else
    (void)theirs, (void)ratios;
    printf("gemm_builtin_%dx%dx%d%s %.1f\n", p->m, p->n, p->k, kind, median(mine));
#endif
    (void)fflush(stdout);
    free(p->a);
    free(p->b);
    free(p->c);
}

int main(int argc, char **argv) {
    const int all = argc > 1 && strcmp(argv[1], "all") == 0;
    const char *name = argc > 1 + all ? argv[1 + all] : NULL;
    problem p;
    p.kernel = tshi_gemm_pick();
    if (name) {
        p.kernel = tshi_gemm_kernels;
        while (p.kernel < tshi_gemm_kernels + COUNT(tshi_gemm_kernels) &&
               (strcmp(p.kernel->name, name) != 0 || !p.kernel->supported()))
            p.kernel++;
        if (p.kernel == tshi_gemm_kernels + COUNT(tshi_gemm_kernels)) {
            fprintf(stderr, "bench_gemm: no kernel \"%s\" here\n", name);
            return 2;
        }
    }
    if (posix_memalign(&p.scratch, 64,
                       tshi_gemm_scratch(p.kernel, 1 << 20, 1 << 20, 1 << 20, 1 << 20, 1)))
        return 1;
    fprintf(stderr, "kernel %s\n", p.kernel->name);
    for (int s = 0; s < (all ? COUNT(shapes) : USUAL); s++) {
        for (int kind = 0; kind < (all && shapes[s][1] != BIG ? 3 : 1); kind++) {
            p.m = shapes[s][0];
            p.n = shapes[s][1];
            p.k = shapes[s][2];
            p.tb = kind == 0;
            p.ta = kind == 2;
            bench(&p);
        }
    }
    free(p.scratch);
    return 0;
}
