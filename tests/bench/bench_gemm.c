/* Matrix products: GFLOP/s of C = A B^T (as a linear layer has it), ours and the peers' by turns.
 *
 *     cc -std=c99 -D_POSIX_C_SOURCE=200809L -O3 -fopenmp tests/bench/bench_gemm.c -lm -ldl
 *        -DBENCH_BLIS -L/usr/lib/x86_64-linux-gnu/blis-pthread -lblis
 *        -Wl,-rpath,/usr/lib/x86_64-linux-gnu/blis-pthread
 *     BLIS_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 ./a.out 7 1
 *
 * usage: bench_gemm ROUNDS THREADS [all]
 *        bench_gemm ROUNDS THREADS bf16 MxNxK...
 * The variables' threads should be THREADS; those of ours are. Prints a line "MxNxK_tTHREADS who
 * rate" per product and round, with who among builtin, tsh_blis, blis and openblas. `all` adds more
 * shapes, and A B and A^T B under names that end in _NN and _TN. `bf16` compares the built-in
 * product of two bf16 with that of floats: who is bf16 or f32. TSHARD_ISA=avx2 takes the kernels for
 * AVX2, and so on. */
#include "products.h"

#include <sys/wait.h> /* waitpid */
#include <unistd.h>   /* fork, pipe, read, write, close, alarm */

enum { USUAL = 9, BIG = 50304 };

/* The first USUAL are run always: GPT-2's layers, then nanoGPT's, then a tile of attention. */
static const int shapes[][3] = {
    {256, 768, 768}, {256, 3072, 768}, {256, 768, 3072}, {256, BIG, 768}, {1024, 768, 768},
    {64, 768, 768},  {768, 512, 128},  {768, 128, 512},  {64, 64, 64},    {768, 128, 128},
    {768, 384, 128}, {768, 65, 128},   {128, 512, 768},  {64, 32, 64},    {64, 64, 32},
    {8, 768, 768},   {1, 768, 768},    {1, BIG, 768},    {768, 1, 128},   {256, 256, 8}};

enum { WARM = 20, MEASURED = 40, LONG = 200 }; /* ms */
enum { PATIENCE = 20 };                        /* seconds */

/* GFLOP/s. Threads that begin on one core are taken apart by the system while products run that do
 * not count. (One that takes long by itself is measured at once.) */
static double rate(void (*product)(const problem *), const problem *p) {
    const double flop = 2e-9 * p->m * p->n * p->k;
    double start, seconds;
    int warm = 0, times;
    product(p); /* libraries and pages are new yet */
    start = now();
    do {
        product(p);
        warm++;
        seconds = now() - start;
    } while (1000 * seconds < WARM);
    if (warm == 1 && 1000 * seconds > LONG) return flop / seconds;
    times = (int)(MEASURED / (1000 * seconds / warm)) + 1;
    start = now();
    for (int i = 0; i < times; i++) product(p);
    return flop * times / (now() - start);
}

/* Whether C is the built-in product's: a benchmark of wrong results is none. */
static int check(const problem *p, const char *who, const tsh_real *right) {
    double most = 0;
    for (int64_t i = 0; i < (int64_t)p->m * p->n; i++)
        most = fmax(most, fabs((double)p->c[i] - (double)right[i]));
    if (most < 1e-5 * p->k) return 1;
    fprintf(stderr, "bench_gemm: %s is wrong by %g\n", who, most);
    return 0;
}

/* The rate of a program in a process of its own: threads that another one leaves spinning after its
 * product, or makes anew for each, would take cores from this one's. */
static double rate_apart(const problem *p, int program, const tsh_real *right) {
    double found = 0;
    int ends[2], size = 0;
    pid_t child;
    (void)fflush(stdout);
    child = pipe(ends) == 0 ? fork() : -1;
    if (child == 0) {
        (void)alarm(PATIENCE);
        found = rate(programs[program].product, p);
        _exit(!check(p, programs[program].name, right) ||
              write(ends[1], &found, sizeof found) != (ssize_t)sizeof found);
    }
    if (child > 0) {
        (void)close(ends[1]);
        size = (int)read(ends[0], &found, sizeof found);
        (void)close(ends[0]);
        (void)waitpid(child, NULL, 0);
    }
    if (size == (int)sizeof found) return found;
    fprintf(stderr, "bench_gemm: %s gave no rate\n", programs[program].name);
    exit(1);
}

static void bench(problem *p, int threads, int rounds) {
    const char *kind = p->tb ? "" : p->ta ? "_TN" : "_NN";
    tsh_real *right = matrix(p->m, p->n);
    p->a = matrix(p->m, p->k);
    p->b = matrix(p->k, p->n);
    p->c = right;
    p->builtin->threads = 1; /* a process with threads of OpenMP is not to be forked */
    by_builtin(p);
    p->builtin->threads = threads;
    p->c = matrix(p->m, p->n);
    for (int r = 0; r < rounds; r++)
        for (int i = 0; i < COUNT(programs); i++)
            if (there(p, i))
                printf("%dx%dx%d%s_t%d %s %.2f\n", p->m, p->n, p->k, kind, threads,
                       programs[i].name, rate_apart(p, i, right));
    (void)fflush(stdout);
    free(p->a);
    free(p->b);
    free(p->c);
    free(right);
}

/* The built-in C = A B^T, all of one dtype. */
static void by_dtype(const problem *p, tsh_dtype dtype) {
    tshi_matmul_gemm(p->builtin, p->m, p->n, p->k, 1, tshi_gemm_matrix_of(p->a, dtype, p->k, 1),
                     tshi_gemm_matrix_of(p->b, dtype, 1, p->k), 0,
                     tshi_gemm_matrix_of(p->c, dtype, p->n, 1));
}

static void by_bf16(const problem *p) {
    by_dtype(p, TSH_BF16);
}

static void by_f32(const problem *p) {
    by_dtype(p, TSH_F32);
}

/* One shape in bf16 and in float by turns, of the same bytes. (bf16 reads the first half of
 * them; the speed does not depend on values.) */
static void bench_bf16(problem *p, const char *shape, int threads, int rounds) {
    char *end = NULL;
    p->m = (int)strtol(shape, &end, 10);
    p->n = (int)strtol(end + (*end == 'x'), &end, 10);
    p->k = (int)strtol(end + (*end == 'x'), &end, 10);
    p->a = matrix(p->m, p->k);
    p->b = matrix(p->k, p->n);
    p->c = matrix(p->m, p->n);
    for (int r = 0; r < rounds; r++) {
        printf("%s_t%d f32 %.2f\n", shape, threads, rate(by_f32, p));
        printf("%s_t%d bf16 %.2f\n", shape, threads, rate(by_bf16, p));
    }
    free(p->a);
    free(p->b);
    free(p->c);
}

int main(int argc, char **argv) {
    const int all = argc > 3 && strcmp(argv[3], "all") == 0;
    problem p;
    if (argc < 3) {
        fprintf(stderr, "usage: bench_gemm ROUNDS THREADS [all]\n");
        return 2;
    }
    p = programs_open(atoi(argv[2]));
    if (argc > 3 && strcmp(argv[3], "bf16") == 0) {
        for (int i = 4; i < argc; i++) bench_bf16(&p, argv[i], atoi(argv[2]), atoi(argv[1]));
        tsh_close(p.builtin);
        tsh_close(p.blis);
        return 0;
    }
    fprintf(stderr, "%s\n", tsh_cpu_text(p.builtin));
    for (int s = 0; s < (all ? COUNT(shapes) : USUAL); s++) {
        for (int kind = 0; kind < (all && shapes[s][1] != BIG ? 3 : 1); kind++) {
            p.m = shapes[s][0];
            p.n = shapes[s][1];
            p.k = shapes[s][2];
            p.tb = kind == 0;
            p.ta = kind == 2;
            bench(&p, atoi(argv[2]), atoi(argv[1]));
        }
    }
    tsh_close(p.builtin);
    tsh_close(p.blis);
    return 0;
}
