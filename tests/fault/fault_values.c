/* F11, F12, F13: every count, every value, every repeat gives the documented bits. */
#define TSHARD_IMPLEMENTATION
#include "../../backends/tshard_threads.h"
#include "../../backends/tshard_uv.h"

#include "../support/processes.h"
#include "../support/collectives.h"
#include "../support/faults.h"

#include <float.h>

/* Runs it and tells the row of a failure. */
static void values_run(world *w, world_way way, int ranks, rank_fn fn, const void *user) {
    world_desc desc = world_of(way, ranks, fn, user, 200);
    const char *why;
    desc.uv.timeout = 100;
    world_start(w, &desc);
    why = world_end(w);
    if (why) fault_fail("%s", why);
}

/* ---------------------------------------------------------------------- F11 counts */

static void counts_rank(job *j) {
    const int64_t counts[] = {0,  1,  j->ranks - 1, j->ranks, j->ranks + 1, 2,    3,    5,    7,
                              11, 13, 31,           97,       997,          4093, 9973, 99991};
    static const tsh_dtype dtypes[] = {TSH_F32, TSH_I64};
    grid_case c;
    memset(&c, 0, sizeof c);
    for (int n = 0; n < (int)(sizeof counts / sizeof counts[0]); n++) {
        for (int d = 0; d < 2; d++) {
            c.count = counts[n];
            c.dtype = dtypes[d];
            c.blocks = 1 + n % 2;
            c.in_place = d;
            grid_allreduce(j, c);
            grid_reduce_scatter(j, c);
            grid_allgather(j, c);
            grid_alltoall(j, c);
            grid_broadcast(j, c);
            grid_pairwise(j, c);
            j->figure[0] += 7;
        }
    }
}

static void counts_row(void) {
    double calls = 0;
    fault_begin("F11", "counts 0, 1, P-1 to P+1, primes, N=1 to 8");
    for (int ranks = 1; ranks <= 8; ranks++) {
        world w;
        values_run(&w, WORLD_TCP, ranks, counts_rank, NULL);
        calls += (double)w.jobs[0].figure[0];
        world_free(&w);
    }
    fault_at_least("right collectives", calls, "", 8 * 17 * 2 * 7);
    fault_end();
}

static float big_element(int rank, int64_t i) {
    return (float)((uint32_t)((uint64_t)i * UINT64_C(2654435761) >> 13) % 1000 + (uint32_t)rank);
}

static void big_fill(float *x, int64_t n, int rank) {
    for (int64_t i = 0; i < n; i++) x[i] = big_element(rank, i);
}

/* Two ranks, one buffer each; sums of small integers are exact. */
static void big_rank(job *j) {
    int64_t n = *(const int64_t *)j->user, wrong = 0, counts[2];
    float *x = (float *)job_take(j, (size_t)n * sizeof *x);
    CHECK(x != NULL);
    if (!x) return;
    big_fill(x, n, j->rank);
    CHECK(tsh_allreduce(&j->comm, x, n, TSH_F32, TSH_SUM) == TSH_OK);
    for (int64_t i = 0; i < n; i++) wrong += x[i] != 2 * big_element(0, i) + 1;
    CHECK(wrong == 0);
    big_fill(x, n, j->rank);
    CHECK(tsh_broadcast(&j->comm, x, n, TSH_F32, 1) == TSH_OK);
    for (int64_t i = 0; i < n; i++) wrong += x[i] != big_element(1, i);
    CHECK(wrong == 0);
    big_fill(x, n, j->rank);
    CHECK((j->rank ? tsh_recv(&j->comm, x, n, TSH_F32, 0) : tsh_send(&j->comm, x, n, TSH_F32, 1)) ==
          TSH_OK);
    for (int64_t i = 0; i < n; i++) wrong += x[i] != big_element(0, i);
    CHECK(wrong == 0);
    counts[0] = 1;
    counts[1] = n - 1;
    big_fill(x, n, j->rank);
    CHECK(tsh_allgather(&j->comm, x + j->rank, x, counts, 1, TSH_F32) == TSH_OK);
    for (int64_t i = 0; i < n; i++) wrong += x[i] != big_element(i > 0, i);
    CHECK(wrong == 0);
    j->figure[0] = 4;
    job_give(j, x);
}

static double available_gib(void) {
    char line[128];
    long kib = 0;
    FILE *file = fopen("/proc/meminfo", "r");
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "MemAvailable: %ld kB", &kib) == 1) break;
    if (file) (void)fclose(file);
    return (double)kib / 1048576;
}

static void big_row(int64_t n) {
    world w;
    fault_begin("F11", "messages of 2^31%+d bytes, N=2", (int)(n * 4 - INT64_C(2147483648)));
    if (available_gib() < 6) {
        fault_skip("%.1f GiB are free, 6 are needed", available_gib());
        return;
    }
    values_run(&w, WORLD_TCP, 2, big_rank, &n);
    fault_at_least("right collectives", (double)w.jobs[0].figure[0], "", 4);
    fault_end();
    world_free(&w);
}

/* ---------------------------------------------------------------------- F12 values */

enum { SPECIALS = 14 };

static double special(tsh_dtype dtype, int i) {
    int narrow = dtype == TSH_F32;
    double tiny = narrow ? 1.4e-45 : 4.9e-324, least = narrow ? (double)FLT_MIN : DBL_MIN;
    double most = narrow ? (double)FLT_MAX : DBL_MAX;
    const double values[SPECIALS] = {(double)NAN, HUGE_VAL, -HUGE_VAL, 0.0,   -0.0, tiny, -tiny,
                                     least,       -least,   most,      -most, 1.0,  -1.0, 1e-30};
    return values[i];
}

static number special_number(tsh_dtype dtype, int rank, int64_t e) {
    int i = (int)(mix((uint64_t)e * 64 + (uint64_t)rank) % SPECIALS);
    number v;
    memset(&v, 0, sizeof v);
    if (dtype == TSH_F32)
        v.f32 = (float)special(dtype, i);
    else
        v.f64 = special(dtype, i);
    return v;
}

static int is_nan(tsh_dtype dtype, number v) {
    return dtype == TSH_F32 ? isnan(v.f32) : isnan(v.f64);
}

/* NaN anywhere is NaN; else the operation, in the documented order. */
static number special_expected(tsh_dtype dtype, tsh_redop op, int ranks, int k, int64_t e) {
    number acc = special_number(dtype, (k + 1) % ranks, e);
    for (int n = 2; n <= ranks; n++) {
        number next = special_number(dtype, (k + n) % ranks, e);
        if (is_nan(dtype, acc)) break;
        acc = is_nan(dtype, next) ? next : combine(dtype, op, acc, next);
    }
    if (op == TSH_AVG && dtype == TSH_F32) acc.f32 /= (float)ranks;
    if (op == TSH_AVG && dtype == TSH_F64) acc.f64 /= (double)ranks;
    return acc;
}

static void specials_one(job *j, tsh_dtype dtype, tsh_redop op, int64_t n) {
    size_t width = tsh_dtype_size(dtype);
    char *x = (char *)malloc((size_t)n * width);
    int64_t chunk = (n + j->ranks - 1) / j->ranks, wrong = 0;
    for (int64_t e = 0; e < n; e++) {
        number v = special_number(dtype, j->rank, e);
        memcpy(x + (size_t)e * width, &v, width);
    }
    CHECK(tsh_allreduce(&j->comm, x, n, dtype, op) == TSH_OK);
    for (int64_t e = 0; e < n; e++) {
        number want = special_expected(dtype, op, j->ranks, (int)(e / chunk), e), got;
        memset(&got, 0, sizeof got);
        memcpy(&got, x + (size_t)e * width, width);
        wrong += is_nan(dtype, want) ? !is_nan(dtype, got) : memcmp(&want, &got, width) != 0;
    }
    CHECK(wrong == 0);
    j->figure[0] += (uint64_t)n;
    free(x);
}

static void specials_rank(job *j) {
    for (int dtype = TSH_F32; dtype <= TSH_F64; dtype++) {
        for (int op = TSH_SUM; op <= TSH_AVG; op++) {
            specials_one(j, (tsh_dtype)dtype, (tsh_redop)op, 200);   /* the small messages' way */
            specials_one(j, (tsh_dtype)dtype, (tsh_redop)op, 40000); /* the ring */
        }
    }
}

static void specials_row(void) {
    static const int ranks[] = {2, 3, 4, 8};
    double values = 0;
    fault_begin("F12", "NaN, Inf, -0, denormals on every rank, N=2 to 8");
    for (int i = 0; i < 4; i++) {
        world w;
        values_run(&w, WORLD_TCP, ranks[i], specials_rank, NULL);
        values += (double)w.jobs[0].figure[0];
        world_free(&w);
    }
    fault_at_least("right values", values, "", 4 * 2 * 5 * 40200);
    fault_end();
}

/* --------------------------------------------------------------------- F13 repeats */

typedef struct repeats {
    int64_t count;
    int times;
} repeats;

static void repeat_rank(job *j) {
    const repeats *p = (const repeats *)j->user;
    size_t bytes = (size_t)p->count * sizeof(float);
    float *start = (float *)filled(j, TSH_F32, j->rank, p->count), *x = (float *)job_take(j, bytes);
    for (int i = 0; i < p->times && !j->failure[0]; i++) {
        uint64_t hash;
        memcpy(x, start, bytes);
        CHECK(tsh_allreduce(&j->comm, x, p->count, TSH_F32, TSH_SUM) == TSH_OK);
        hash = hash_of(x, p->count, TSH_F32);
        if (i == 0) j->hash = hash;
        CHECK(hash == j->hash);
    }
    job_give(j, start);
    job_give(j, x);
}

static void repeat_row(int64_t count, int times) {
    int different = 0;
    repeats p;
    p.count = count;
    p.times = times;
    fault_begin("F13", "%d sums of %ld, N=2 to 8, threads and TCP", times, (long)count);
    for (int ranks = 2; ranks <= 8; ranks += ranks > 4 ? 3 : 1) {
        world tcp, threads;
        values_run(&tcp, WORLD_TCP, ranks, repeat_rank, &p);
        values_run(&threads, WORLD_THREADS, ranks, repeat_rank, &p);
        for (int r = 0; r < ranks; r++)
            different += tcp.jobs[r].hash != threads.jobs[0].hash ||
                         threads.jobs[r].hash != threads.jobs[0].hash;
        world_free(&tcp);
        world_free(&threads);
    }
    fault_at_most("other hashes", different, "", 0);
    fault_end();
}

int main(void) {
    static const int64_t two_gib = INT64_C(1) << 29;
    counts_row();
    specials_row();
    repeat_row(3, 1000);
    repeat_row(1000, 1000);
    repeat_row(100000, fault_full() ? 1000 : 50);
    if (fault_full()) {
        big_row(two_gib - 1);
        big_row(two_gib);
    }
    big_row(two_gib + 1);
    return fault_result();
}
