/* A comm hands descriptors to its backend. What backends share: the operation of sums, its chunks,
 * how descriptors are compared and told. */
#include "../../backends/tshard_backend.h"
#include "../support/unit.h"

#define COUNT(a) ((int)(sizeof(a) / sizeof((a)[0])))

/* ---------------------------------------------------------------------- comm */

/* Rows of counts are of three kinds; a backend sees one row of every other. */
static tsh_result sees_one_row(tsh_comm *comm, const tsh_coll *coll, tsh_req *req) {
    int rows = coll->kind == TSH_ALLGATHER || coll->kind == TSH_REDUCE_SCATTER ||
               coll->kind == TSH_ALLTOALL;
    assert_int_equal(coll->blocks, rows ? 3 : 1);
    assert_ptr_equal(comm->impl, req);
    *req = 0;
    return TSH_OK;
}

static void a_comm_hands_descriptors_to_its_backend(void **state) {
    static const int64_t counts[] = {1, 1};
    float x[6] = {0};
    tsh_comm_ops ops;
    tsh_comm comm;
    tsh_coll coll;
    tsh_req req;
    (void)state;
    memset(&ops, 0, sizeof ops);
    ops.start = sees_one_row;
    comm = tshb_comm_make(&ops, &req, 1, 2, 77);
    assert_true(comm.rank == 1 && comm.size == 2 && comm.id == 77);
    for (int kind = TSH_ALLREDUCE; kind < TSH_SPLIT; kind++) {
        coll = tsh_coll_make((tsh_coll_kind)kind, TSH_F32);
        coll.blocks = 3;
        coll.count = 6;
        coll.send = coll.recv = x;
        coll.send_counts = coll.recv_counts = counts;
        coll.root = coll.send_to = coll.recv_from = 0;
        assert_int_equal(tsh_start(&comm, &coll, &req), TSH_OK);
        assert_int_equal(comm.stats.calls[kind], 1);
    }
    assert_true(comm.next_seq == 6 && comm.in_flight == 0);
}

/* ---------------------------------------------------------------------- fold */

enum { MOST = 1000, ROOM = MOST + 2, KINDS = 12 };

typedef union element {
    float f32;
    double f64;
    int32_t i32;
    int64_t i64;
} element;

/* Of every 144 elements, each value meets each; the first 31 have NaN and both zeros on both
 * sides. */
static element value(tsh_dtype dtype, int which) {
    static const double floats[KINDS] = {
        (double)NAN, -0.0,  0.0, (double)INFINITY, -(double)INFINITY, 1, -1.5, 0.1, 1e30,
        -1e30,       1e-40, 3};
    static const int64_t integers[KINDS] = {INT64_MIN, INT64_MAX, 0,          1,
                                            -1,        7,         INT32_MIN,  INT32_MAX,
                                            -46341,    65537,     4294967311, -3037000500};
    element e;
    memset(&e, 0, sizeof e);
    if (dtype == TSH_F32) e.f32 = (float)floats[which];
    if (dtype == TSH_F64) e.f64 = floats[which];
    if (dtype == TSH_I32) e.i32 = (int32_t)(integers[which] % 2147483648);
    if (dtype == TSH_I64) e.i64 = integers[which];
    return e;
}

static element load(tsh_dtype dtype, const char *buffer, int i) {
    element e;
    memset(&e, 0, sizeof e);
    memcpy(&e, buffer + (size_t)i * tsh_dtype_size(dtype), tsh_dtype_size(dtype));
    return e;
}

static void store(tsh_dtype dtype, char *buffer, int i, element e) {
    memcpy(buffer + (size_t)i * tsh_dtype_size(dtype), &e, tsh_dtype_size(dtype));
}

static double plain_float(double l, double r, tsh_redop op) {
    if (op != TSH_MIN && op != TSH_MAX) return op == TSH_PROD ? l * r : l + r;
    if (isnan(l) || isnan(r)) return (double)NAN;
    return op == TSH_MIN ? (r < l ? r : l) : (r > l ? r : l);
}

static int64_t plain_integer(int64_t l, int64_t r, tsh_redop op) {
    if (op == TSH_MIN) return r < l ? r : l;
    if (op == TSH_MAX) return r > l ? r : l;
    return (int64_t)(op == TSH_PROD ? (uint64_t)l * (uint64_t)r : (uint64_t)l + (uint64_t)r);
}

/* The sum or product of two floats is exact enough in double to be rounded once more. */
static element plain(element l, element r, tsh_dtype dtype, tsh_redop op) {
    element e;
    memset(&e, 0, sizeof e);
    if (dtype == TSH_F32) e.f32 = (float)plain_float((double)l.f32, (double)r.f32, op);
    if (dtype == TSH_F64) e.f64 = plain_float(l.f64, r.f64, op);
    if (dtype == TSH_I32) e.i32 = (int32_t)(uint32_t)(uint64_t)plain_integer(l.i32, r.i32, op);
    if (dtype == TSH_I64) e.i64 = plain_integer(l.i64, r.i64, op);
    return e;
}

/* The same bits; of NaNs, any. */
static int same(element a, element b, tsh_dtype dtype) {
    if (dtype == TSH_F32 && isnan(a.f32)) return isnan(b.f32);
    if (dtype == TSH_F64 && isnan(a.f64)) return isnan(b.f64);
    return memcmp(&a, &b, sizeof a) == 0;
}

/* Which of out, left and right are one buffer. */
static const char *const forms[][3] = {
    {"o", "l", "r"}, {"l", "l", "r"}, {"r", "l", "r"}, {"o", "l", "l"}, {"l", "l", "l"}};

/* Buffers begin one element into an aligned one; the elements before and after are not written. */
static void check_fold(tsh_dtype dtype, tsh_redop op, int n, int form) {
    static union {
        element align;
        char bytes[ROOM * sizeof(element)];
    } buffers[3];
    const char *names = "olr";
    char *at[3];
    element want[ROOM];
    int i, k;
    for (k = 0; k < 3; k++) at[k] = buffers[strchr(names, forms[form][k][0]) - names].bytes;
    for (i = 0; i < ROOM; i++) {
        store(dtype, buffers[0].bytes, i, value(dtype, 5));
        store(dtype, buffers[1].bytes, i, value(dtype, i % KINDS));
        store(dtype, buffers[2].bytes, i, value(dtype, i / KINDS % KINDS));
    }
    for (i = 0; i < ROOM; i++)
        want[i] = i > 0 && i <= n ? plain(load(dtype, at[1], i), load(dtype, at[2], i), dtype, op)
                                  : load(dtype, at[0], i);
    for (k = 0; k < 3; k++) at[k] += tsh_dtype_size(dtype);
    tshb_coll_fold(at[0], at[1], at[2], n, dtype, op);
    for (i = 0; i < ROOM; i++)
        if (!same(want[i], load(dtype, at[0], i - 1), dtype))
            fail_msg("dtype %d, op %d, %d elements, form %d: element %d", dtype, op, n, form, i);
}

static void fold_is_the_plain_loop(void **state) {
    static const int lengths[] = {0, 1, 31, 32, 33, MOST};
    int dtype, op, i, form;
    (void)state;
    for (dtype = TSH_F32; dtype <= TSH_I64; dtype++)
        for (op = TSH_SUM; op <= TSH_AVG && dtype != TSH_BF16 && dtype != TSH_F16; op++)
            for (i = 0; i < COUNT(lengths); i++)
                for (form = 0; form < COUNT(forms); form++)
                    check_fold((tsh_dtype)dtype, (tsh_redop)op, lengths[i], form);
}

/* Sums of 16-bit floats are rounded, so collectives keep them in float until their end. */
static void fold_says_what_it_rounds(void **state) {
    int dtype, op;
    (void)state;
    for (dtype = TSH_F32; dtype <= TSH_I64; dtype++)
        for (op = TSH_SUM; op <= TSH_AVG; op++)
            assert_int_equal(tshb_coll_rounds((tsh_dtype)dtype, (tsh_redop)op),
                             (dtype == TSH_BF16 || dtype == TSH_F16) && op != TSH_MIN &&
                                 op != TSH_MAX);
}

/* What the plain loop says, said once more in numbers. */
static void fold_wraps_and_keeps_the_left(void **state) {
    const int32_t most = INT32_MAX, one = 1, two = 2;
    const int64_t least = INT64_MIN, minus = -1;
    const double nought = 0.0, minus_nought = -0.0, nan = (double)NAN;
    int32_t i32;
    int64_t i64;
    double f64;
    (void)state;
    tshb_coll_fold(&i32, &most, &one, 1, TSH_I32, TSH_SUM);
    assert_int_equal(i32, INT32_MIN);
    tshb_coll_fold(&i32, &most, &two, 1, TSH_I32, TSH_PROD);
    assert_int_equal(i32, -2);
    tshb_coll_fold(&i64, &least, &minus, 1, TSH_I64, TSH_SUM);
    assert_true(i64 == INT64_MAX);
    tshb_coll_fold(&i64, &least, &minus, 1, TSH_I64, TSH_PROD);
    assert_true(i64 == INT64_MIN);
    tshb_coll_fold(&f64, &minus_nought, &nought, 1, TSH_F64, TSH_MAX);
    assert_true(f64 == 0 && signbit(f64));
    tshb_coll_fold(&f64, &nought, &minus_nought, 1, TSH_F64, TSH_MIN);
    assert_true(f64 == 0 && !signbit(f64));
    tshb_coll_fold(&f64, &nan, &nought, 1, TSH_F64, TSH_MIN);
    assert_true(isnan(f64));
    tshb_coll_fold(&f64, &nought, &nan, 1, TSH_F64, TSH_MAX);
    assert_true(isnan(f64));
}

static void finish_divides_averages_only(void **state) {
    static const int lengths[] = {0, 1, 31, 32, 33, MOST};
    float f32[ROOM];
    double f64[ROOM];
    int i, k;
    (void)state;
    for (k = 0; k < COUNT(lengths); k++) {
        for (i = 0; i < ROOM; i++) f64[i] = (double)(f32[i] = (float)(i + 1));
        tshb_coll_finish(f32, lengths[k], TSH_F32, TSH_SUM, 3);
        tshb_coll_finish(f64, lengths[k], TSH_F64, TSH_MAX, 3);
        for (i = 0; i < ROOM; i++) assert_true(f32[i] == (float)(i + 1) && f64[i] == i + 1);
        tshb_coll_finish(f32, lengths[k], TSH_F32, TSH_AVG, 3);
        tshb_coll_finish(f64, lengths[k], TSH_F64, TSH_AVG, 3);
        for (i = 0; i < lengths[k]; i++) {
            const float third32 = (float)(i + 1) / 3.0f; /* in variables: rounded */
            const double third64 = (i + 1) / 3.0;
            assert_true(f32[i] == third32 && f64[i] == third64);
        }
        for (; i < ROOM; i++) assert_true(f32[i] == (float)(i + 1) && f64[i] == i + 1);
    }
}

/* -------------------------------------------------------------------- chunks */

static void chunks_are_those_of_a_plain_dimension(void **state) {
    tsh_layout layout = tsh_sharded(0);
    tsh_range range[TSH_MAX_SEGMENTS];
    int64_t n, length;
    int size, k;
    (void)state;
    for (size = 1; size <= 9; size++)
        for (n = 0; n <= 100; n++) {
            for (k = 0; k < size; k++) {
                length = tsh_shard_range(layout, n, size, k, range);
                assert_int_equal(tshb_coll_chunk(n, size, k), range[0].start);
                assert_int_equal(tshb_coll_chunk(n, size, k + 1), range[0].start + length);
            }
            assert_int_equal(tshb_coll_chunk(n, size, 0), 0);
            assert_int_equal(tshb_coll_chunk(n, size, size), n);
        }
    assert_true(tshb_coll_chunk(INT64_MAX, 4, 3) == INT64_C(3) << 61);
    assert_true(tshb_coll_chunk(INT64_MAX, 4, 4) == INT64_MAX);
    assert_true(tshb_coll_chunk(2, 100, 99) == 2);
}

/* --------------------------------------------------------------- descriptors */

/* As tsh_start takes it, on 3 ranks. */
static tsh_coll taken(tsh_coll_kind kind) {
    static const int64_t counts[] = {4, 0, 5};
    tsh_coll coll = tsh_coll_make(kind, TSH_F32);
    int rows = kind == TSH_ALLGATHER || kind == TSH_REDUCE_SCATTER || kind == TSH_ALLTOALL;
    if (rows || kind == TSH_SENDRECV) coll.recv_counts = counts;
    if (kind == TSH_ALLTOALL || kind == TSH_SENDRECV) coll.send_counts = counts;
    if (!coll.recv_counts && kind < TSH_BARRIER) coll.count = 7;
    if (kind == TSH_BROADCAST) coll.root = 2;
    if (kind == TSH_SEND || kind == TSH_SENDRECV) coll.send_to = 1;
    if (kind == TSH_RECV || kind == TSH_SENDRECV) coll.recv_from = 2;
    return coll;
}

static int fit(tsh_coll a, tsh_coll b) {
    return tshb_coll_digest(&a, 3) == tshb_coll_digest(&b, 3);
}

static void a_digest_is_of_what_ranks_must_agree_on(void **state) {
    static const int64_t other[] = {4, 1, 4};
    int k;
    (void)state;
    for (k = 0; k < TSH_COLL_KINDS; k++) {
        tsh_coll_kind kind = (tsh_coll_kind)k;
        tsh_coll a = taken(kind), b = a;
        int empty = kind == TSH_BARRIER || kind == TSH_SPLIT;
        int gathers = kind == TSH_ALLGATHER || kind == TSH_REDUCE_SCATTER;
        char buffer[1];
        if (kind == TSH_SENDRECV) continue; /* its halves are compared as SEND and RECV */
        b.send = b.recv = buffer;
        b.seq = 9;
        b.timeout_ns = 1;
        assert_true(fit(a, b)); /* these are each rank's own */
        b = a;
        b.dtype = TSH_I32;
        assert_int_equal(fit(a, b), empty);
        b = a;
        b.redop = TSH_MAX;
        assert_int_equal(fit(a, b), kind != TSH_ALLREDUCE && kind != TSH_REDUCE_SCATTER);
        b = a;
        b.count = 8;
        assert_int_equal(fit(a, b), empty || gathers || kind == TSH_ALLTOALL);
        b = a;
        b.blocks = 2;
        assert_int_equal(fit(a, b), !gathers && kind != TSH_ALLTOALL);
        b = a;
        b.root = 1;
        assert_int_equal(fit(a, b), kind != TSH_BROADCAST);
        b = a;
        b.tag = 1;
        assert_int_equal(fit(a, b), kind != TSH_SEND && kind != TSH_RECV);
        b = a;
        if (a.recv_counts) b.recv_counts = other;
        assert_int_equal(fit(a, b), !gathers);
    }
}

static void digests_of_two_kinds_differ_but_for_a_pair(void **state) {
    int i, k;
    (void)state;
    for (i = 0; i < TSH_COLL_KINDS; i++)
        for (k = 0; k < TSH_COLL_KINDS; k++) {
            int pair = (i == TSH_SEND || i == TSH_RECV) && (k == TSH_SEND || k == TSH_RECV);
            if (i == TSH_SENDRECV || k == TSH_SENDRECV) continue;
            assert_int_equal(fit(taken((tsh_coll_kind)i), taken((tsh_coll_kind)k)), i == k || pair);
        }
}

static int by_value(const void *a, const void *b) {
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* Counts that differ little and sum up alike are what ranks get wrong. */
static void digests_of_near_counts_differ(void **state) {
    static uint64_t digests[64 * 64 * 64];
    int64_t counts[3];
    tsh_coll coll = taken(TSH_ALLGATHER);
    int i, n = COUNT(digests);
    (void)state;
    coll.recv_counts = counts;
    for (i = 0; i < n; i++) {
        counts[0] = i % 64;
        counts[1] = i / 64 % 64;
        counts[2] = i / 4096;
        digests[i] = tshb_coll_digest(&coll, 3);
    }
    qsort(digests, (size_t)n, sizeof *digests, by_value);
    for (i = 1; i < n; i++) assert_true(digests[i - 1] != digests[i]);
}

/* ------------------------------------------------------------------- cycle */

enum { WAITING = 6 };

/* Bit m of waits_for[r]: rank r waits for m. */
static int nth_awaited(const void *user, int r, int i) {
    return ((const unsigned *)user)[r] >> i & 1 ? i : -1;
}

static int company_of(const void *user, int r) {
    return ((const int *)user)[r];
}

/* Which ranks can be reached from r. */
static unsigned reached_from(const unsigned *waits_for, int r) {
    unsigned reached = waits_for[r], before = 0;
    int m;
    while (reached != before) {
        before = reached;
        for (m = 0; m < WAITING; m++)
            if (reached >> m & 1) reached |= waits_for[m];
    }
    return reached;
}

static int leads_to_a_circle(const unsigned *waits_for, int r) {
    unsigned reached = reached_from(waits_for, r) | 1u << r;
    int m;
    for (m = 0; m < WAITING; m++)
        if ((reached >> m & 1) && (reached_from(waits_for, m) >> m & 1)) return 1;
    return 0;
}

static void a_circle_is_found_if_and_only_if_there_is_one(void **state) {
    unsigned waits_for[WAITING], random = 1;
    int n, r, found = 0, none = 0;
    (void)state;
    for (n = 0; n < 20000; n++) {
        tshb_coll_search search[WAITING];
        int on = -1;
        memset(search, 0, sizeof search);
        for (r = 0; r < WAITING; r++) {
            random = random * 1664525u + 1013904223u;
            waits_for[r] = random >> 26 & random >> 20 & (n % 2 ? ~0u : random >> 14) & 63u;
        }
        for (r = 0; on < 0 && r < WAITING; r++) { /* ranks that were visited are not again */
            on = tshb_coll_cycle(search, WAITING, r, nth_awaited, waits_for);
            assert_int_equal(on >= 0, leads_to_a_circle(waits_for, r));
        }
        found += on >= 0;
        none += on < 0;
        for (r = 0; on >= 0 && r < WAITING; r++) { /* follows it around, more than once perhaps */
            assert_true(waits_for[on] >> search[on].next & 1);
            on = search[on].next;
        }
        if (on >= 0) assert_true(reached_from(waits_for, on) >> on & 1);
    }
    assert_true(found > 1000 && none > 1000);
}

static void the_odd_rank_has_the_least_together(void **state) {
    const unsigned cycle[WAITING] = {0, 8, 2, 16, 4, 0}; /* 1, 3, 4, 2, and again 1 */
    const unsigned pair[WAITING] = {2, 1};
    const int alike[WAITING] = {1, 1, 1, 1, 1, 1}, alone[WAITING] = {1, 3, 3, 3, 2, 1};
    tshb_coll_search search[WAITING];
    tsh_error error;
    int waits;
    (void)state;
    memset(search, 0, sizeof search);
    assert_int_equal(tshb_coll_cycle(search, WAITING, 3, nth_awaited, cycle), 3);
    assert_int_equal(tshb_coll_blame(search, 3, company_of, alone, &waits), 4);
    assert_int_equal(waits, 3);
    assert_int_equal(tshb_coll_blame(search, 3, company_of, alike, &waits), 1);
    assert_int_equal(waits, 2);
    memset(search, 0, sizeof search);
    assert_int_equal(tshb_coll_cycle(search, WAITING, 0, nth_awaited, pair), 0);
    assert_int_equal(tshb_coll_blame(search, 0, company_of, alike, &waits), 1);
    assert_int_equal(waits, 0);
    tshb_cycle_error(1, "send", 0, "receive", &error);
    assert_string_equal(error.message, "rank 1 waits in send while rank 0 waits for it in receive");
    assert_int_equal(error.rank, 1);
    tshb_cycle_error(1, "send", 1, "send", &error);
    assert_non_null(strstr(error.message, "rank 1 waits for itself in send: "));
}

/* ------------------------------------------------------- a backend of messages */

static tsh_error lonely_error;

/* Rank 1 is gone: nothing comes from it. */
static tsh_result lonely_start(tsh_comm *comm, const tsh_coll *coll, tsh_req *req) {
    assert_true(coll->seq != 0 && coll->count > 0);
    assert_true((size_t)coll->count * tsh_dtype_size(coll->dtype) <= TSH_MESSAGE_BYTES);
    *req = coll->kind == TSH_RECV;
    return coll->kind == TSH_RECV && comm->rank == 0 ? TSH_ERR_LOST : TSH_OK;
}

static void lonely_progress(tsh_comm *comm) {
    (void)comm;
}

static void lonely_idle(tsh_comm *comm, int64_t ns) {
    (void)comm, (void)ns;
}

static tsh_result lonely_status(tsh_comm *comm, tsh_error *error) {
    (void)comm;
    if (error) *error = lonely_error;
    return lonely_error.code;
}

static void lonely_abort(tsh_comm *comm, const tsh_error *why) {
    (void)comm;
    assert_int_equal(lonely_error.code, TSH_OK); /* once */
    lonely_error = *why;
}

static void lonely_close(tsh_comm *comm) {
    (void)comm;
}

static void a_rank_that_is_gone_is_the_error_of_what_waits_for_it(void **state) {
    static const tsh_comm_ops ops = TSH_MESSAGE_OPS(lonely, "lonely", 0);
    tsh_comm messages = tshb_comm_make(&ops, NULL, 0, 2, 1), comm;
    static float x[100000];
    tsh_error error;
    int done = 0;
    tsh_req req;
    (void)state;
    memset(&lonely_error, 0, sizeof lonely_error);
    assert_int_equal(tshb_comm_compose(&messages, &comm, &error), TSH_OK);
    assert_int_equal(tsh_allreduce(&comm, x, 100000, TSH_F32, TSH_SUM), TSH_ERR_LOST);
    assert_int_equal(tsh_comm_error(&comm, &error), TSH_ERR_LOST);
    assert_int_equal(error.rank, 1);
    assert_string_equal(error.message,
                        "rank 1 is gone while rank 0 waits for it in all-reduce of 100000 f32 "
                        "(sum), collective 0 of world");
    assert_int_equal(tsh_barrier(&comm), TSH_ERR_LOST);
    tsh_comm_close(&comm);
    messages.rank = 1; /* whose peer is slow: time runs out in test */
    memset(&lonely_error, 0, sizeof lonely_error);
    (void)setenv("TSHARD_TIMEOUT", "0.001", 1);
    assert_int_equal(tshb_comm_compose(&messages, &comm, &error), TSH_OK);
    (void)unsetenv("TSHARD_TIMEOUT");
    assert_int_equal(tsh_allreduce_start(&comm, x, 3, TSH_F32, TSH_SUM, &req), TSH_OK);
    while (!done) (void)tsh_test(&comm, req, &done);
    assert_int_equal(tsh_wait(&comm, req), TSH_ERR_TIMEOUT);
    assert_string_equal(lonely_error.message,
                        "rank 1 ran out of time in all-reduce of 3 f32 (sum), collective 0 of "
                        "world; absent ranks: 0");
    assert_int_equal(lonely_error.rank, 0);
    tsh_comm_close(&comm);
}

/* ----------------------------------------------------- calls that do not fit */

enum { CALLERS = 4 };

static int nth_call(const void *user, int r, tshb_call *out) {
    *out = ((const tshb_call *)user)[r];
    return out->rank >= 0;
}

/* World ranks 10, 11, ... have all called coll. */
static void all_call(tshb_call *calls, tsh_coll coll) {
    for (int r = 0; r < CALLERS; r++) {
        calls[r].coll = coll;
        calls[r].digest = tshb_coll_digest(&coll, CALLERS);
        calls[r].rank = 10 + r;
        calls[r].counts = coll.recv_counts ? CALLERS : 0;
    }
}

static void one_calls(tshb_call *call, tsh_coll coll) {
    call->coll = coll;
    call->digest = tshb_coll_digest(&coll, CALLERS);
}

static int mismatch_of(const tshb_call *calls, tsh_error *error) {
    return !tshb_calls_match(nth_call, calls, CALLERS, 5, 2, error);
}

static void the_smaller_part_is_blamed(void **state) {
    tshb_call calls[CALLERS];
    tsh_coll coll = taken(TSH_ALLREDUCE), other = coll;
    tsh_error error;
    (void)state;
    coll.recv_counts = NULL;
    other.recv_counts = NULL;
    other.count = 6;
    all_call(calls, coll);
    assert_int_equal(mismatch_of(calls, &error), 0);
    one_calls(&calls[0], other);
    assert_int_equal(mismatch_of(calls, &error), 1);
    assert_true(error.code == TSH_ERR_MISMATCH && error.rank == 10);
    assert_string_equal(error.message,
                        "rank 10 called all-reduce of 6 f32 (sum) where rank 11 called all-reduce "
                        "of 7 f32 (sum) (collective 5 of group 2)");
    one_calls(&calls[3], other); /* two against two: rank 0's part is right */
    assert_int_equal(mismatch_of(calls, &error), 1);
    assert_int_equal(error.rank, 11);
    calls[1].rank = calls[2].rank = -1; /* these have not called: the others agree */
    assert_int_equal(mismatch_of(calls, &error), 0);
    calls[0].rank = calls[3].rank = -1;
    assert_int_equal(mismatch_of(calls, &error), 0);
}

static void unequal_counts_of_an_alltoall_are_blamed_on_most(void **state) {
    static const int64_t twos[] = {2, 2, 2, 2}, ones[] = {1, 1, 1, 1};
    tshb_call calls[CALLERS];
    tsh_coll coll = taken(TSH_ALLTOALL);
    tsh_error error;
    (void)state;
    coll.send_counts = coll.recv_counts = twos;
    all_call(calls, coll);
    assert_int_equal(mismatch_of(calls, &error), 0);
    coll.send_counts = ones;
    one_calls(&calls[2], coll);
    assert_int_equal(mismatch_of(calls, &error), 1);
    assert_int_equal(error.rank, 12);
    assert_string_equal(error.message,
                        "rank 12 called all-to-all with send_counts[0] = 1 where rank 10 has "
                        "recv_counts[2] = 2 (collective 5 of group 2)");
}

static void a_rank_that_closes_the_group_is_lost(void **state) {
    tshb_call calls[CALLERS];
    tsh_coll coll = taken(TSH_BARRIER), closes = coll;
    tsh_error error;
    (void)state;
    closes.kind = TSH_COLL_KINDS;
    all_call(calls, closes);
    assert_int_equal(mismatch_of(calls, &error), 0);
    one_calls(&calls[1], coll);
    one_calls(&calls[2], coll);
    assert_int_equal(mismatch_of(calls, &error), 1);
    assert_true(error.code == TSH_ERR_LOST && error.rank == 10);
    assert_string_equal(error.message, "rank 10 left while rank 11 waits for it in barrier, "
                                       "collective 5 of group 2");
}

static void messages_that_do_not_fit(void **state) {
    static const int64_t three = 3, four = 4;
    tsh_coll both = taken(TSH_SENDRECV), sent, wanted;
    tsh_error error;
    (void)state;
    both.send_counts = &three;
    both.recv_counts = &four;
    sent = tshb_coll_half(&both, 0);
    wanted = tshb_coll_half(&both, 1);
    assert_true(sent.kind == TSH_SEND && sent.count == 3 && sent.recv_from == -1);
    assert_true(wanted.kind == TSH_RECV && wanted.count == 4 && wanted.send_to == -1);
    tshb_message_mismatch(&sent, &wanted, 3, 0, 9, 1, &error);
    assert_true(error.code == TSH_ERR_MISMATCH && error.rank == 3);
    assert_string_equal(error.message, "rank 3 called send of 3 f32 to rank 1 where rank 0 called "
                                       "receive of 4 f32 from rank 2 (message 9 of world)");
    assert_true(tshb_blamed(2, 1) == 1 && tshb_blamed(0, 5) == 5 && tshb_blamed(4, 0) == 4);
}

/* ------------------------------------------------------- reports, and the rest */

typedef struct report_of_two {
    tshb_wait_report head;
    tshb_wait_mark marks[2];
    int awaited[2];
} report_of_two;

/* Rank r of three waits for rank `awaited` in collective `seq` of a group, and has started so many
 * of groups 1 and 2. */
static void waits_in(report_of_two *r, uint64_t group, uint64_t seq, int awaited, uint64_t one,
                     uint64_t two) {
    memset(r, 0, sizeof *r);
    r->head.group = group;
    r->head.seq = seq;
    r->head.send_to = r->head.recv_from = -1;
    r->head.marks = 2;
    r->head.awaited = 1;
    r->marks[0].group = 1;
    r->marks[0].sends = one;
    r->marks[1].group = 2;
    r->marks[1].sends = two;
    r->marks[0].peer = r->marks[1].peer = -1;
    r->awaited[0] = awaited;
    (void)snprintf(r->head.text, sizeof r->head.text, "barrier of group %d", (int)group);
}

static void reports_tell_of_cycles_and_absent_ranks(void **state) {
    report_of_two r[3];
    tshb_wait_report *report[3];
    tshb_coll_search search[3];
    tsh_error error;
    (void)state;
    for (int i = 0; i < 3; i++) report[i] = &r[i].head;
    waits_in(&r[0], 1, 0, 1, 1, 0); /* 0 waits in group 1 for 1, which has not started there */
    waits_in(&r[1], 2, 0, 2, 0, 1); /* and so on */
    waits_in(&r[2], 1, 0, 1, 1, 0);
    assert_true(tshb_wait_missing(report, 0, 1) && tshb_wait_missing(report, 1, 2));
    assert_int_equal(tshb_wait_cycle(report, 3, 0, search, &error), 1);
    assert_true(error.code == TSH_ERR_MISMATCH && error.rank == 1);
    assert_string_equal(error.message, "rank 1 waits in barrier of group 2 while rank 2 waits for "
                                       "it in barrier of group 1");
    r[1].marks[0].sends = 1; /* rank 1 had been in group 1 */
    assert_int_equal(tshb_wait_missing(report, 0, 1), 0);
    assert_int_equal(tshb_wait_cycle(report, 3, 0, search, &error), 0);
    (void)tsh_error_set(&error, TSH_ERR_TIMEOUT, -1, "late");
    tshb_wait_absent(report, 0, &error);
    assert_string_equal(error.message, "late; absent ranks: none");
    report[1] = NULL; /* it computes */
    assert_int_equal(tsh_error_set(&error, TSH_ERR_TIMEOUT, -1, "late"), TSH_ERR_TIMEOUT);
    tshb_wait_absent(report, 0, &error);
    assert_true(error.rank == 1);
    assert_string_equal(error.message, "late; absent ranks: 1");
}

static void ranks_of_a_color_are_sorted_by_key(void **state) {
    static const tshb_ticket tickets[] = {{1, 5}, {0, 0}, {1, -3}, {1, 5}, {1, 0}};
    int order[5];
    (void)state;
    assert_int_equal(tshb_split_order(tickets, sizeof *tickets, 5, 1, order), 4);
    assert_true(order[0] == 2 && order[1] == 4 && order[2] == 0 && order[3] == 3);
    assert_int_equal(tshb_split_order(tickets, sizeof *tickets, 5, 7, order), 0);
}

static const void *nth_part(const void *user, int r) {
    return (const float *)user + 2 * r;
}

static void a_sum_begins_behind_its_chunk(void **state) {
    const float parts[] = {1e8f, 1, 1, 2, -1e8f, 3};
    tsh_coll coll = taken(TSH_ALLREDUCE);
    const int64_t counts[] = {3, 0, 4};
    float sum[2];
    (void)state;
    tshb_coll_sum(sum, 2, &coll, 3, 0, nth_part, parts); /* (1 - 1e8) + 1e8 */
    assert_true(sum[0] == (1.0f + -1e8f) + 1e8f && sum[1] == 6);
    tshb_coll_sum(sum, 2, &coll, 3, 1, nth_part, parts); /* (-1e8 + 1e8) + 1 */
    assert_true(sum[0] == 1);
    assert_true(tshb_coll_before(counts, 0) == 0 && tshb_coll_before(counts, 3) == 7);
}

static void time_limits(void **state) {
    tsh_error error;
    int64_t ns, now = tsh_now();
    (void)state;
    (void)setenv("TSHARD_TIMEOUT", "2.5", 1);
    assert_true(tshb_timeout(0, "desc.timeout", &ns, &error) && ns == INT64_C(2500000000));
    assert_true(tshb_timeout(7, "desc.timeout", &ns, &error) && ns == INT64_C(7000000000));
    assert_true(tshb_timeout(1e-300, "desc.timeout", &ns, &error) && ns == 1); /* 0: no limit */
    assert_true(tshb_timeout(-1, "desc.timeout", &ns, &error) && ns == INT64_C(1) << 61);
    (void)setenv("TSHARD_TIMEOUT", "0", 1);
    assert_true(tshb_timeout(0, "desc.timeout", &ns, &error) && ns == INT64_C(1) << 61);
    (void)setenv("TSHARD_TIMEOUT", "soon", 1);
    assert_int_equal(tshb_timeout(0, "desc.timeout", &ns, &error), 0);
    assert_non_null(strstr(error.message, "TSHARD_TIMEOUT is \"soon\"; it takes"));
    (void)unsetenv("TSHARD_TIMEOUT");
    assert_true(tshb_timeout(0, "desc.timeout", &ns, &error) && ns == INT64_C(300000000000));
    assert_int_equal(tshb_time_limit((double)NAN, "desc.x", "TSHARD_X", 1, &ns, &error), 0);
    assert_string_equal(error.message, "desc.x is not a number (NaN)");
    assert_true(tshb_deadline(5, 9) >= now + 5 && tshb_deadline(0, INT64_MAX) == INT64_MAX);
}

/* ---------------------------------------------------------------------- text */

static void a_call_is_told_with_its_place(void **state) {
    tsh_coll coll = taken(TSH_ALLREDUCE);
    char text[64] = "in ";
    (void)state;
    tshb_coll_where(&coll, 3, 4, 7, text, sizeof text);
    assert_string_equal(text, "in all-reduce of 7 f32 (sum), collective 4 of group 7");
    tsh_text_add(text, 56, "%d", 1234); /* cut */
    assert_string_equal(text, "in all-reduce of 7 f32 (sum), collective 4 of group 712");
    text[0] = '\0';
    tshb_coll_where(&coll, 3, 4, UINT64_C(0x74) << 56 | 7, text, sizeof text);
    assert_string_equal(text, "all-reduce of 7 f32 (sum), collective 4 of tp");
}

static void groups_have_names(void **state) {
    static const struct {
        uint64_t id;
        const char *name;
    } rows[] = {
        {1, "world"}, /* highest byte: 't' is 0x74, 'd' 0x64, 'p' 0x70 */
        {UINT64_C(0x74) << 56 | 1, "tp"},
        {UINT64_C(0x64) << 56 | 12, "dp"},
        {UINT64_C(0x70) << 56 | 3, "pp"},
        {0, "group 0"},
        {2, "group 2"},
        {UINT64_C(0x0a) << 56, "group 720575940379279360"}, /* a highest byte that names no axis */
        {UINT64_MAX, "group 18446744073709551615"},
    };
    char text[32];
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        assert_string_equal(tshb_group_text(rows[i].id, text, sizeof text), rows[i].name);
    assert_string_equal(tshb_group_text(1, text, 4), "wor"); /* cut */
    assert_ptr_equal(tshb_group_text(2, text, 0), text);     /* nothing is written */
    assert_string_equal(text, "wor");
}

#define EXPECT_COLL(coll, other, want)                                                             \
    assert_string_equal(tshb_coll_text(coll, other, 3, text, sizeof text), want)

static void descriptors_have_text(void **state) {
    static const char *const texts[] = {"all-reduce of 7 f32 (sum)",
                                        "all-gather of f32",
                                        "reduce-scatter of f32 (sum)",
                                        "broadcast of 7 f32 from rank 2",
                                        "all-to-all of f32",
                                        "send of 7 f32 to rank 1",
                                        "receive of 7 f32 from rank 2",
                                        "send-receive of f32 to rank 1 from rank 2",
                                        "barrier",
                                        "split"};
    static const char *const dtypes[] = {
        "send of 7 dtype 0 to rank 1 with tag 4", "send of 7 f32 to rank 1 with tag 4",
        "send of 7 f64 to rank 1 with tag 4",     "send of 7 bf16 to rank 1 with tag 4",
        "send of 7 f16 to rank 1 with tag 4",     "send of 7 i32 to rank 1 with tag 4",
        "send of 7 i64 to rank 1 with tag 4"};
    static const char *const redops[] = {
        "all-reduce of 7 f32 (sum)", "all-reduce of 7 f32 (product)", "all-reduce of 7 f32 (min)",
        "all-reduce of 7 f32 (max)", "all-reduce of 7 f32 (average)"};
    char text[128];
    tsh_coll coll;
    int k;
    (void)state;
    assert_int_equal(COUNT(texts), TSH_COLL_KINDS);
    for (k = 0; k < TSH_COLL_KINDS; k++) {
        coll = taken((tsh_coll_kind)k);
        EXPECT_COLL(&coll, NULL, texts[k]);
        EXPECT_COLL(&coll, &coll, texts[k]);
    }
    coll = taken(TSH_SEND);
    coll.tag = 4;
    for (k = 0; k < COUNT(dtypes); k++) {
        coll.dtype = (tsh_dtype)k;
        EXPECT_COLL(&coll, NULL, dtypes[k]);
    }
    coll = taken(TSH_ALLREDUCE);
    for (k = 0; k < COUNT(redops); k++) {
        coll.redop = (tsh_redop)k;
        EXPECT_COLL(&coll, NULL, redops[k]);
    }
}

static void the_first_count_that_differs_is_told(void **state) {
    static const int64_t counts[] = {4, 1, 4};
    tsh_coll a = taken(TSH_ALLGATHER), b = a, c = taken(TSH_REDUCE_SCATTER);
    char text[128];
    (void)state;
    b.recv_counts = c.recv_counts = counts;
    b.blocks = 6;
    EXPECT_COLL(&a, &b, "all-gather of f32 with counts[1] = 0");
    EXPECT_COLL(&b, &a, "all-gather of f32 in 6 blocks with counts[1] = 1");
    EXPECT_COLL(&a, &c, "all-gather of f32"); /* another kind's counts mean something else */
    assert_string_equal(tshb_coll_text(&a, &b, 1, text, sizeof text), "all-gather of f32");
    b.recv_counts = NULL;
    EXPECT_COLL(&a, &b, "all-gather of f32");
    EXPECT_COLL(&b, &a, "all-gather of f32 in 6 blocks");
}

/* A descriptor may come from a broken peer. */
static void values_that_mean_nothing_are_told_as_numbers(void **state) {
    tsh_coll coll = taken(TSH_ALLREDUCE);
    char text[128];
    (void)state;
    coll.dtype = (tsh_dtype)99;
    coll.redop = (tsh_redop)12;
    EXPECT_COLL(&coll, NULL, "all-reduce of 7 dtype 99 (reduction 12)");
    coll.kind = (tsh_coll_kind)77;
    EXPECT_COLL(&coll, &coll, "kind 77");
    coll.kind = TSH_COLL_KINDS;
    EXPECT_COLL(&coll, NULL, "kind 10");
    coll.kind = (tsh_coll_kind)-1;
    EXPECT_COLL(&coll, NULL, "kind -1");
    coll = taken(TSH_ALLGATHER);
    coll.recv_counts = NULL;
    EXPECT_COLL(&coll, &coll, "all-gather of f32");
}

static void text_is_cut_to_its_room(void **state) {
    const char *whole = "all-reduce of 7 f32 (sum)";
    tsh_coll coll = taken(TSH_ALLREDUCE);
    char text[64];
    size_t room;
    (void)state;
    for (room = 0; room < sizeof text; room++) {
        memset(text, '#', sizeof text);
        assert_ptr_equal(tshb_coll_text(&coll, NULL, 3, text, room), text);
        if (room) assert_int_equal(strlen(text), room <= strlen(whole) ? room - 1 : strlen(whole));
        assert_memory_equal(text, room ? whole : "", room ? strlen(text) : 0);
        assert_int_equal(text[room], '#');
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_comm_hands_descriptors_to_its_backend),
        cmocka_unit_test(fold_is_the_plain_loop),
        cmocka_unit_test(fold_says_what_it_rounds),
        cmocka_unit_test(fold_wraps_and_keeps_the_left),
        cmocka_unit_test(finish_divides_averages_only),
        cmocka_unit_test(chunks_are_those_of_a_plain_dimension),
        cmocka_unit_test(a_digest_is_of_what_ranks_must_agree_on),
        cmocka_unit_test(digests_of_two_kinds_differ_but_for_a_pair),
        cmocka_unit_test(digests_of_near_counts_differ),
        cmocka_unit_test(a_circle_is_found_if_and_only_if_there_is_one),
        cmocka_unit_test(the_odd_rank_has_the_least_together),
        cmocka_unit_test(a_rank_that_is_gone_is_the_error_of_what_waits_for_it),
        cmocka_unit_test(the_smaller_part_is_blamed),
        cmocka_unit_test(unequal_counts_of_an_alltoall_are_blamed_on_most),
        cmocka_unit_test(a_rank_that_closes_the_group_is_lost),
        cmocka_unit_test(messages_that_do_not_fit),
        cmocka_unit_test(reports_tell_of_cycles_and_absent_ranks),
        cmocka_unit_test(ranks_of_a_color_are_sorted_by_key),
        cmocka_unit_test(a_sum_begins_behind_its_chunk),
        cmocka_unit_test(time_limits),
        cmocka_unit_test(a_call_is_told_with_its_place),
        cmocka_unit_test(groups_have_names),
        cmocka_unit_test(descriptors_have_text),
        cmocka_unit_test(the_first_count_that_differs_is_told),
        cmocka_unit_test(values_that_mean_nothing_are_told_as_numbers),
        cmocka_unit_test(text_is_cut_to_its_room),
    };
    return cmocka_run_group_tests_name("unit/comm", tests, NULL, NULL);
}
