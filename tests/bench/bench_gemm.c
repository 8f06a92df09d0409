/* Matrix products: GFLOP/s of C = A B^T (as a linear layer has it), ours and the peers' by turns.
 *
 *     cc -std=c99 -D_POSIX_C_SOURCE=200809L -O3 tests/bench/bench_gemm.c -lm -pthread -ldl
 *        -DBENCH_BLIS -L/usr/lib/x86_64-linux-gnu/blis-pthread -lblis
 *        -Wl,-rpath,/usr/lib/x86_64-linux-gnu/blis-pthread
 *     BLIS_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 ./a.out 7 1
 *
 * usage: bench_gemm ROUNDS THREADS [all] [kernel]
 * The variables' threads should be THREADS; those of ours are. Prints a line "MxNxK_tTHREADS who
 * rate" per product and round, with who among builtin (on one thread only), tsh_blis (tsh_blis_gemm,
 * with BENCH_BLIS), blis (the cblas_sgemm of BLIS) and openblas (the same of OpenBLAS, if it is
 * found). `all` adds more shapes, and A B and A^T B under names that end in _NN and _TN. kernel is a
 * name in tshi_gemm_kernels. */
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"
#ifdef BENCH_BLIS
#include "../../backends/tshard_blis.h"
#include <cblas.h>
#else
enum { CblasRowMajor = 101, CblasNoTrans = 111, CblasTrans = 112 };
#endif

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define COUNT(a) ((int)(sizeof(a) / sizeof((a)[0])))
enum { USUAL = 9, BIG = 50304 };

/* The first USUAL are run always: GPT-2's layers, then nanoGPT's, then a tile of attention. */
static const int shapes[][3] = {
    {256, 768, 768}, {256, 3072, 768}, {256, 768, 3072}, {256, BIG, 768}, {1024, 768, 768},
    {64, 768, 768},  {768, 512, 128},  {768, 128, 512},  {64, 64, 64},    {768, 128, 128},
    {768, 384, 128}, {768, 65, 128},   {128, 512, 768},  {64, 32, 64},    {64, 64, 32},
    {8, 768, 768},   {1, 768, 768},    {1, BIG, 768},    {768, 1, 128},   {256, 256, 8}};

/* cblas_sgemm with its enums as the ints that they are passed as. */
typedef void (*sgemm_fn)(int, int, int, int, int, int, float, const float *, int, const float *,
                         int, float, float *, int);

typedef struct problem {
    int m, n, k, ta, tb; /* ta, tb: whether A, B are stored transposed */
    int threads;
    const tshi_gemm_kernel *kernel;
    void *scratch;
    sgemm_fn openblas;
    tsh_real *a, *b, *c;
} problem;

static double now(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void by_builtin(const problem *p) {
    tshi_gemm_run(p->kernel, p->scratch, p->m, p->n, p->k, 1, p->a, p->ta ? 1 : p->k,
                  p->ta ? p->m : 1, p->b, p->tb ? 1 : p->n, p->tb ? p->k : 1, 0, p->c, p->n, 1);
}

static void by_openblas(const problem *p) {
    p->openblas(CblasRowMajor, p->ta ? CblasTrans : CblasNoTrans, p->tb ? CblasTrans : CblasNoTrans,
                p->m, p->n, p->k, 1, p->a, p->ta ? p->m : p->k, p->b, p->tb ? p->k : p->n, 0, p->c,
                p->n);
}

#ifdef BENCH_BLIS
static void by_tsh_blis(const problem *p) {
    tsh_blis_gemm(NULL, p->m, p->n, p->k, 1, p->a, p->ta ? 1 : p->k, p->ta ? p->m : 1, p->b,
                  p->tb ? 1 : p->n, p->tb ? p->k : 1, 0, p->c, p->n, 1, p->threads);
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
    if (programs[i].product == by_builtin) return p->threads == 1;
    return programs[i].product != by_openblas || p->openblas;
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

/* The largest difference to the built-in product's C: a benchmark of wrong results is none. */
static void check(const problem *p, const char *who, const tsh_real *right) {
    double most = 0;
    for (int64_t i = 0; i < (int64_t)p->m * p->n; i++)
        most = fmax(most, fabs((double)p->c[i] - (double)right[i]));
    if (most < 1e-5 * p->k) return;
    fprintf(stderr, "bench_gemm: %s is wrong by %g\n", who, most);
    exit(1);
}

static void bench(problem *p, int rounds) {
    const double flop = 2.0 * p->m * p->n * p->k;
    const int times = flop > 2e9 ? 1 : (int)(2e9 / flop < 20000 ? 2e9 / flop : 20000); /* 20 ms */
    const char *kind = p->tb ? "" : p->ta ? "_TN" : "_NN";
    tsh_real *right = matrix(p->m, p->n);
    p->a = matrix(p->m, p->k);
    p->b = matrix(p->k, p->n);
    p->c = right;
    by_builtin(p);
    p->c = matrix(p->m, p->n);
    for (int i = 0; i < COUNT(programs); i++) {
        if (!there(p, i)) continue;
        programs[i].product(p);
        check(p, programs[i].name, right);
    }
    for (int r = 0; r < rounds; r++)
        for (int i = 0; i < COUNT(programs); i++)
            if (there(p, i))
                printf("%dx%dx%d%s_t%d %s %.2f\n", p->m, p->n, p->k, kind, p->threads,
                       programs[i].name, rate(programs[i].product, p, times));
    (void)fflush(stdout);
    free(p->a);
    free(p->b);
    free(p->c);
    free(right);
}

/* The kernel of that name, if this processor runs it. */
static const tshi_gemm_kernel *kernel_of(const char *name) {
    for (int i = 0; i < COUNT(tshi_gemm_kernels); i++)
        if (strcmp(tshi_gemm_kernels[i].name, name) == 0 && tshi_gemm_kernels[i].supported())
            return &tshi_gemm_kernels[i];
    fprintf(stderr, "bench_gemm: no kernel \"%s\" here\n", name);
    exit(2);
}

/* Debian's, apart from whatever libblas is; NULL: not there. POSIX promises that the conversion of
 * dlsym's result works, C does not. */
static sgemm_fn find_openblas(void) {
    static const char *const paths[] = {
        "/usr/lib/x86_64-linux-gnu/openblas-pthread/libopenblas.so.0",
        "/usr/lib/aarch64-linux-gnu/openblas-pthread/libopenblas.so.0", "libopenblas.so.0"};
    sgemm_fn found = NULL;
    void *library = NULL, *symbol;
    for (int i = 0; i < COUNT(paths) && !library; i++)
        library = dlopen(paths[i], RTLD_NOW | RTLD_LOCAL);
    symbol = library ? dlsym(library, "cblas_sgemm") : NULL;
    memcpy(&found, &symbol, sizeof found);
    return found;
}

int main(int argc, char **argv) {
    const int all = argc > 3 && strcmp(argv[3], "all") == 0;
    problem p;
    memset(&p, 0, sizeof p);
    if (argc < 3) {
        fprintf(stderr, "usage: bench_gemm ROUNDS THREADS [all] [kernel]\n");
        return 2;
    }
    p.threads = atoi(argv[2]);
    p.openblas = find_openblas();
    p.kernel = argc > 3 + all ? kernel_of(argv[3 + all]) : tshi_gemm_pick();
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
            bench(&p, atoi(argv[1]));
        }
    }
    free(p.scratch);
    return 0;
}
