/* ========================================================================== */
/* >>team                                              MARK: - team (private) */
/* Runs a loop on the threads of one rank; without OpenMP on one thread.      */
/* Needs: >>base.                                                             */
/* ========================================================================== */

/* Computes piece number `piece` of a job: items `from` to `to` - 1. One piece computes all of an
 * element of the result, in the order of a single thread, so results are bitwise the same for any
 * number of threads. Runs on any thread of the rank; must not allocate or call tsh_fail. */
typedef void (*tshi_team_fn)(void *job, int piece, int64_t from, int64_t to);

/* Returns how many pieces to cut n items into: at most one per thread, and so few that each has at
 * least `min` items. */
static int tshi_team_parts(const tsh_ctx *ctx, int64_t n, int64_t min) {
#if defined(_OPENMP)
    const int64_t max = n / (min > 0 ? min : 1);
    return max < 2 ? 1 : (int)tshi_base_min(max, ctx->threads);
#else
    (void)ctx, (void)n, (void)min;
    return 1;
#endif
}

/* Cuts n items into pieces that begin at multiples of `unit`, calls fn for each, and returns when
 * all are done. (A single piece is called directly: OpenMP is slow even with one thread.) All
 * threads of the rank take part, even those that have no piece and only wait: if a parallel region
 * has fewer threads than the region before it, GNU's OpenMP ends the surplus threads, and starting
 * them again takes 100 times as long as a region. Does nothing in a dry run. */
static void tshi_team_run(const tsh_ctx *ctx, int pieces, int64_t n, int64_t unit, tshi_team_fn fn,
                          void *job) {
    if (ctx->dry) return;
    if (pieces == 1) {
        fn(job, 0, 0, n);
        return;
    }
    const int64_t units = tshi_base_ceil(n, unit);
#if defined(_OPENMP)
#pragma omp parallel for num_threads(ctx->threads) schedule(static, 1)
#endif
    for (int i = 0; i < pieces; i++)
        fn(job, i, units * i / pieces * unit, tshi_base_min(units * (i + 1) / pieces * unit, n));
}

/* Returns how many threads one call of tsh_desc.gemm, a user's matrix product, may use: with OpenMP
 * 1, because the rank's threads call it concurrently, else all threads of the rank. */
static int tshi_team_spare(const tsh_ctx *ctx) {
#if defined(_OPENMP)
    (void)ctx;
    return 1;
#else
    return ctx->threads;
#endif
}
