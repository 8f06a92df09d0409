/* tshard_blis.h - the matrix product by BLIS, or by any CBLAS */
/*
 * DO THIS
 *
 *     #define TSHARD_IMPLEMENTATION           // in exactly one source file
 *     #include "tshard.h"
 *     #include "backends/tshard_blis.h"
 *
 *     tsh_desc desc = {0};
 *     desc.gemm.multiply = tsh_blis_gemm;     // every product of a ctx that is opened with it
 *
 * linked with BLIS (Debian's package is libblis-pthread-dev: -lblis, and -Wl,-rpath to the folder
 * of the variant that is meant). With -DTSHARD_CBLAS the file gives tsh_cblas_gemm instead, over
 * the CBLAS that the program is linked with.
 *
 * MEASURE FIRST
 *
 * The built-in product was on a par with BLIS 0.9 and OpenBLAS 0.3.21 at the shapes of GPT-2 on an
 * AVX-512 machine. This file pays where a BLAS knows a processor that the built-in kernels do not.
 *
 * DOES
 *
 * - hand strides, alpha and beta to BLIS as they are: views are not copied, a gradient is added to
 *   in place;
 * - make the runtime object of BLIS for each call: no setting of the process counts, none is
 *   changed, and ranks that are threads do not disturb each other;
 * - turn BLIS's path for small products off where it loses, by up to half: where m and n are over
 *   64 and k is over 16.
 *
 * DOES NOT
 *
 * - use threads: a call is one thread's. tshard cuts a product along m or n, never k, into a call
 *   for each thread of the rank. BLIS's own threads wait for each other by spinning, many times per
 *   product, and came to a stand where another program ran on the same cores;
 * - promise the bits of the built-in product. The same call on the same machine with the same
 *   library gives the same bits, so all ranks and backends of tshard do. BLIS itself documents
 *   nothing about the order of its sums: an element may be summed in another order if m, n, the
 *   strides, the processor or BLIS's version change, so also by another number of threads or ranks.
 *
 * CBLAS
 *
 * A CBLAS takes matrices with unit stride in one dimension, of at most 2^31-1 rows, columns and
 * stride. Others are copied, a block of 64 x 64 at a time, through the stack; larger ones are cut.
 * tshard itself makes no such matrix of usual shapes and views. The library's own threads are
 * its affair: set them to one (OPENBLAS_NUM_THREADS=1) where ranks or OpenMP occupy the cores.
 */
#include "../tshard.h"

#ifndef TSHARD_BLIS_H
#define TSHARD_BLIS_H
/* ========================================================================== */
/* >>blis-api                                               MARK: - blis-api */
/* One tsh_gemm_fn.                                                            */
/* Needs: the public part of tshard.h.                                         */
/* ========================================================================== */

#ifdef __cplusplus
extern "C" {
#endif

/* C = alpha A B + beta C, as tsh_gemm_fn says; user and threads are not looked at. From any
 * thread. */
#ifndef TSHARD_CBLAS
TSH_API void tsh_blis_gemm(int64_t m, int64_t n, int64_t k, tsh_real alpha,
                           const tsh_real *a, int64_t rsa, int64_t csa, const tsh_real *b,
                           int64_t rsb, int64_t csb, tsh_real beta, tsh_real *c, int64_t rsc,
                           int64_t csc, int threads, void *user);
#else
/* The same by cblas_sgemm or cblas_dgemm. */
TSH_API void tsh_cblas_gemm(int64_t m, int64_t n, int64_t k, tsh_real alpha,
                            const tsh_real *a, int64_t rsa, int64_t csa, const tsh_real *b,
                            int64_t rsb, int64_t csb, tsh_real beta, tsh_real *c, int64_t rsc,
                            int64_t csc, int threads, void *user);
#endif

#ifdef __cplusplus
}
#endif
/* ========================================================================== */
/* end of header: stop here if you only want the API                           */
/* ========================================================================== */
#endif

#if defined(TSHARD_IMPLEMENTATION) && !defined(TSHARD_BLIS_IMPLEMENTED)
#define TSHARD_BLIS_IMPLEMENTED
/* ========================================================================== */
/* >>blis-call                                     MARK: - blis-call (private) */
/* One product, by the library.                                                */
/* Needs: >>blis-api.                                                           */
/* ========================================================================== */

#if defined(__has_include)
#ifndef TSHARD_CBLAS
#if !__has_include(<blis.h>)
#error "tshard_blis.h needs blis.h: install libblis-pthread-dev, or give -I its folder"
#endif
#elif !__has_include(<cblas.h>)
#error                                                                                             \
    "tshard_blis.h with TSHARD_CBLAS needs cblas.h: install libblas-dev, or name its folder with -I"
#endif
#endif

#ifndef TSHARD_CBLAS
#include <blis.h>
#else
#include <limits.h> /* INT_MAX */

#include <cblas.h>
#endif

#ifdef __cplusplus
extern "C" {
#endif

#ifndef TSHARD_CBLAS

TSH_API void tsh_blis_gemm(int64_t m, int64_t n, int64_t k, tsh_real alpha,
                           const tsh_real *a, int64_t rsa, int64_t csa, const tsh_real *b,
                           int64_t rsb, int64_t csb, tsh_real beta, tsh_real *c, int64_t rsc,
                           int64_t csc, int threads, void *user) {
    /* BLIS 0.9 takes pointers to what it only reads without const. */
    void *left = (void *)(uintptr_t)a, *right = (void *)(uintptr_t)b, *out = c;
    rntm_t runtime;
    (void)user;
    (void)threads;
    if (m <= 0 || n <= 0) return;
    bli_rntm_init(&runtime);
    bli_rntm_set_num_threads(1, &runtime);
    /* Its path for small products wins by half where packing would cost more than it saves. */
    if (m > 64 && n > 64 && k > 16) bli_rntm_disable_l3_sup(&runtime);
    if (sizeof(tsh_real) == sizeof(double)) {
        double d_alpha = (double)alpha, d_beta = (double)beta;
        bli_dgemm_ex(BLIS_NO_TRANSPOSE, BLIS_NO_TRANSPOSE, m, n, k, &d_alpha, (double *)left, rsa,
                     csa, (double *)right, rsb, csb, &d_beta, (double *)out, rsc, csc, NULL,
                     &runtime);
    } else {
        float f_alpha = (float)alpha, f_beta = (float)beta;
        bli_sgemm_ex(BLIS_NO_TRANSPOSE, BLIS_NO_TRANSPOSE, m, n, k, &f_alpha, (float *)left, rsa,
                     csa, (float *)right, rsb, csb, &f_beta, (float *)out, rsc, csc, NULL,
                     &runtime);
    }
}

#else

/* A (m, k), B (k, n), C (m, n), in the order of tsh_gemm_fn's arguments. */
typedef struct tshi_blis_job {
    int64_t m, n, k;
    tsh_real alpha;
    const tsh_real *a;
    int64_t rsa, csa;
    const tsh_real *b;
    int64_t rsb, csb;
    tsh_real beta, *c;
    int64_t rsc, csc;
} tshi_blis_job;

enum { TSHI_BLIS_BLOCK = 64 };

static int64_t tshi_blis_min(int64_t x, int64_t y) {
    return x < y ? x : y;
}

/* The step between lines of a matrix whose lines of `length` elements have unit stride; 0: a CBLAS
 * does not take it. A single line, or lines of one element, may have any step. */
static int tshi_blis_ld(int64_t lines, int64_t length, int64_t step, int64_t stride) {
    if (length > 1 && stride != 1) return 0;
    if (lines <= 1) return (int)length;
    return step >= length && step <= INT_MAX ? (int)step : 0;
}

/* Row-major C = op(A) op(B), with the steps between the lines of each. */
static void tshi_blis_call(const tshi_blis_job *j, int turn_a, int lda, int turn_b, int ldb,
                           int ldc) {
    enum CBLAS_TRANSPOSE ta = CblasNoTrans, tb = CblasNoTrans;
    const void *a = j->a, *b = j->b;
    void *c = j->c;
    const int m = (int)j->m, n = (int)j->n, k = (int)j->k;
    if (turn_a) ta = CblasTrans;
    if (turn_b) tb = CblasTrans;
    if (sizeof(tsh_real) == sizeof(double))
        cblas_dgemm(CblasRowMajor, ta, tb, m, n, k, (double)j->alpha, (const double *)a, lda,
                    (const double *)b, ldb, (double)j->beta, (double *)c, ldc);
    else
        cblas_sgemm(CblasRowMajor, ta, tb, m, n, k, (float)j->alpha, (const float *)a, lda,
                    (const float *)b, ldb, (float)j->beta, (float *)c, ldc);
}

/* 1: the library took the product. */
static int tshi_blis_taken(const tshi_blis_job *j) {
    const int a = tshi_blis_ld(j->m, j->k, j->rsa, j->csa);
    const int at = tshi_blis_ld(j->k, j->m, j->csa, j->rsa);
    const int b = tshi_blis_ld(j->k, j->n, j->rsb, j->csb);
    const int bt = tshi_blis_ld(j->n, j->k, j->csb, j->rsb);
    const int c = tshi_blis_ld(j->m, j->n, j->rsc, j->csc);
    if (!(a || at) || !(b || bt) || !c) return 0;
    tshi_blis_call(j, !a, a ? a : at, !b, b ? b : bt, c);
    return 1;
}

/* A piece of at most one block each way, through copies that have unit strides. */
static void tshi_blis_copied(const tshi_blis_job *j) {
    tsh_real a[TSHI_BLIS_BLOCK * TSHI_BLIS_BLOCK], b[TSHI_BLIS_BLOCK * TSHI_BLIS_BLOCK];
    tsh_real c[TSHI_BLIS_BLOCK * TSHI_BLIS_BLOCK];
    tshi_blis_job part = *j;
    int64_t i, p;
    for (i = 0; i < j->m; i++)
        for (p = 0; p < j->k; p++) a[i * j->k + p] = j->a[i * j->rsa + p * j->csa];
    for (p = 0; p < j->k; p++)
        for (i = 0; i < j->n; i++) b[p * j->n + i] = j->b[p * j->rsb + i * j->csb];
    for (i = 0; i < j->m && j->beta != 0; i++)
        for (p = 0; p < j->n; p++) c[i * j->n + p] = j->c[i * j->rsc + p * j->csc];
    part.a = a;
    part.b = b;
    part.c = c;
    tshi_blis_call(&part, 0, (int)j->k, 0, (int)j->n, (int)j->n);
    for (i = 0; i < j->m; i++)
        for (p = 0; p < j->n; p++) j->c[i * j->rsc + p * j->csc] = c[i * j->n + p];
}

/* Cut into pieces of at most `most` each way; those along k are added to C one after the other. */
static void tshi_blis_pieces(const tshi_blis_job *j, int64_t most,
                             void (*run)(const tshi_blis_job *)) {
    tshi_blis_job part = *j;
    int64_t i, q, p;
    for (i = 0; i < j->m; i += most)
        for (q = 0; q < j->n; q += most)
            for (p = 0; p < j->k; p += most) {
                part.m = tshi_blis_min(most, j->m - i);
                part.n = tshi_blis_min(most, j->n - q);
                part.k = tshi_blis_min(most, j->k - p);
                part.a = j->a + i * j->rsa + p * j->csa;
                part.b = j->b + p * j->rsb + q * j->csb;
                part.c = j->c + i * j->rsc + q * j->csc;
                part.beta = p == 0 ? j->beta : 1;
                run(&part);
            }
}

/* A product whose sizes are ints. */
static void tshi_blis_fits(const tshi_blis_job *j) {
    /* C^T = B^T A^T: C may have unit stride the other way. */
    const tshi_blis_job transposed = {j->n, j->m,   j->k,   j->alpha, j->b, j->csb, j->rsb,
                                      j->a, j->csa, j->rsa, j->beta,  j->c, j->csc, j->rsc};
    if (tshi_blis_taken(j)) return;
    if (!tshi_blis_taken(&transposed)) tshi_blis_pieces(j, TSHI_BLIS_BLOCK, tshi_blis_copied);
}

/* Without terms C is only scaled, which libraries do not agree on. */
static void tshi_blis_run(const tshi_blis_job *j) {
    int64_t i, q;
    if (j->k > 0) {
        tshi_blis_pieces(j, INT_MAX, tshi_blis_fits);
        return;
    }
    for (i = 0; i < j->m; i++)
        for (q = 0; q < j->n; q++) {
            tsh_real *at = j->c + i * j->rsc + q * j->csc;
            *at = j->beta != 0 ? j->beta * *at : 0;
        }
}

TSH_API void tsh_cblas_gemm(int64_t m, int64_t n, int64_t k, tsh_real alpha,
                            const tsh_real *a, int64_t rsa, int64_t csa, const tsh_real *b,
                            int64_t rsb, int64_t csb, tsh_real beta, tsh_real *c, int64_t rsc,
                            int64_t csc, int threads, void *user) {
    const tshi_blis_job job = {m, n, k, alpha, a, rsa, csa, b, rsb, csb, beta, c, rsc, csc};
    (void)user;
    (void)threads;
    if (m > 0 && n > 0) tshi_blis_run(&job);
}

#endif

#ifdef __cplusplus
}
#endif
#endif /* TSHARD_BLIS_IMPLEMENTED */
