/* collectives.h - what tests of a backend compare with: messages, sums in the documented order,
 * every kind of collective checked bit for bit, and calls that do not fit.
 *
 * Include it after processes.h. */
#ifndef TSHARD_TESTS_COLLECTIVES_H
#define TSHARD_TESTS_COLLECTIVES_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "short_floats.h"

/* ---------------------------------------------------------------- reference */

typedef union number {
    float f32;
    double f64;
    int32_t i32;
    int64_t i64;
    uint16_t u16; /* a float of 16 bits */
} number;

static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 31)) * UINT64_C(0x7FB5D329728EA185);
    x = (x ^ (x >> 27)) * UINT64_C(0x81DADEF4BC2DD44D);
    return x ^ (x >> 33);
}

/* Element i of the message of `rank`: floats in [-1, 1), integers of all sizes. */
static number element(tsh_dtype dtype, int rank, int64_t i) {
    uint64_t bits = mix((uint64_t)i * 1000003u + (uint64_t)rank + 1);
    double real = (double)(bits >> 11) / 4503599627370496.0 - 1.0;
    number v;
    memset(&v, 0, sizeof v);
    switch (dtype) {
    case TSH_F32: v.f32 = (float)real; break;
    case TSH_F64: v.f64 = real; break;
    case TSH_I32: memcpy(&v.i32, &bits, sizeof v.i32); break;
    case TSH_I64: memcpy(&v.i64, &bits, sizeof v.i64); break;
    case TSH_BF16: v.u16 = short_bits(&short_bf16, real); break;
    case TSH_F16: v.u16 = short_bits(&short_f16, real); break;
    default: break; /* none that collectives take */
    }
    return v;
}

#define APPLY(field, SUM, PROD)                                                                    \
    switch (op) {                                                                                  \
    case TSH_SUM:                                                                                  \
    case TSH_AVG: a.field = SUM; break;                                                            \
    case TSH_PROD: a.field = PROD; break;                                                          \
    case TSH_MIN: a.field = b.field < a.field ? b.field : a.field; break;                          \
    case TSH_MAX: a.field = b.field > a.field ? b.field : a.field; break;                          \
    }

static number combine(tsh_dtype dtype, tsh_redop op, number a, number b) {
    switch (dtype) {
    case TSH_F32: APPLY(f32, a.f32 + b.f32, a.f32 * b.f32) break;
    case TSH_F64: APPLY(f64, a.f64 + b.f64, a.f64 * b.f64) break;
    case TSH_I32:
        APPLY(i32, (int32_t)((uint32_t)a.i32 + (uint32_t)b.i32),
              (int32_t)((uint32_t)a.i32 * (uint32_t)b.i32))
        break;
    case TSH_I64:
        APPLY(i64, (int64_t)((uint64_t)a.i64 + (uint64_t)b.i64),
              (int64_t)((uint64_t)a.i64 * (uint64_t)b.i64))
        break;
    default: break; /* of 16 bits: see ordered_short */
    }
    return a;
}

/* The same of 16-bit floats, as below: in float, or double where tsh_real is, rounded once. */
static number ordered_short(const short_format *f, tsh_dtype dtype, tsh_redop op, int ranks, int k,
                            int64_t i) {
    tsh_real acc = (tsh_real)short_value(f, element(dtype, (k + 1) % ranks, i).u16);
    number v;
    memset(&v, 0, sizeof v);
    for (int n = 2; n <= ranks; n++) {
        const tsh_real x = (tsh_real)short_value(f, element(dtype, (k + n) % ranks, i).u16);
        acc = op == TSH_PROD  ? acc * x
              : op == TSH_MIN ? (x < acc ? x : acc)
              : op == TSH_MAX ? (x > acc ? x : acc)
                              : acc + x;
    }
    if (op == TSH_AVG) acc /= (tsh_real)ranks;
    v.u16 = short_bits(f, (double)acc);
    return v;
}

/* x[k+1] + x[k+2] + ... + x[k+P] of element i. */
static number ordered(tsh_dtype dtype, tsh_redop op, int ranks, int k, int64_t i) {
    number acc = element(dtype, (k + 1) % ranks, i);
    if (dtype == TSH_BF16) return ordered_short(&short_bf16, dtype, op, ranks, k, i);
    if (dtype == TSH_F16) return ordered_short(&short_f16, dtype, op, ranks, k, i);
    for (int n = 2; n <= ranks; n++)
        acc = combine(dtype, op, acc, element(dtype, (k + n) % ranks, i));
    if (op == TSH_AVG && dtype == TSH_F32) acc.f32 /= (float)ranks;
    if (op == TSH_AVG && dtype == TSH_F64) acc.f64 /= (double)ranks;
    return acc;
}

static int same(tsh_dtype dtype, const void *buffer, int64_t i, number expected) {
    size_t width = tsh_dtype_size(dtype);
    return memcmp((const char *)buffer + (size_t)i * width, &expected, width) == 0;
}

static void *filled(const job *j, tsh_dtype dtype, int rank, int64_t n) {
    size_t width = tsh_dtype_size(dtype);
    char *p = (char *)job_take(j, (size_t)n * width);
    for (int64_t i = 0; p && i < n; i++) {
        number v = element(dtype, rank, i);
        memcpy(p + (size_t)i * width, &v, width);
    }
    return p;
}

/* Hash of n elements. */
static uint64_t hash_of(const void *buffer, int64_t n, tsh_dtype dtype) {
    size_t width = tsh_dtype_size(dtype);
    uint64_t hash = 0;
    for (int64_t i = 0; i < n; i++) {
        uint64_t bits = 0;
        memcpy(&bits, (const char *)buffer + (size_t)i * width, width);
        hash = mix(hash + bits);
    }
    return hash;
}

/* Adds the n elements that a collective gave to the hash of the rank. */
static void job_hash(job *j, const void *buffer, int64_t n, tsh_dtype dtype) {
    j->hash = mix(j->hash + hash_of(buffer, n, dtype));
}

static int64_t total(const int64_t *counts, int n) {
    int64_t sum = 0;
    for (int i = 0; i < n; i++) sum += counts[i];
    return sum;
}

/* --------------------------------------------------------------------- grid */

typedef struct grid_case {
    int64_t count, blocks;
    tsh_dtype dtype;
    tsh_redop op;
    int in_place;
} grid_case;

static void grid_allreduce(job *j, grid_case c) {
    tsh_coll coll = tsh_coll_make(TSH_ALLREDUCE, c.dtype);
    void *send = filled(j, c.dtype, j->rank, c.count);
    void *recv = c.in_place ? send : filled(j, c.dtype, 99, c.count);
    int64_t chunk = (c.count + j->ranks - 1) / j->ranks, wrong = 0;
    tsh_req req;
    coll.send = send;
    coll.recv = recv;
    coll.count = c.count;
    coll.redop = c.op;
    CHECK(tsh_start(&j->comm, &coll, &req) == TSH_OK);
    CHECK(tsh_wait(&j->comm, req) == TSH_OK);
    for (int64_t i = 0; i < c.count; i++)
        wrong += !same(c.dtype, recv, i, ordered(c.dtype, c.op, j->ranks, (int)(i / chunk), i));
    CHECK(wrong == 0);
    job_hash(j, recv, c.count, c.dtype);
    if (recv != send) job_give(j, recv);
    job_give(j, send);
}

/* Uneven, some empty. */
static void grid_counts(int ranks, int64_t count, int64_t *counts) {
    for (int r = 0; r < ranks; r++) counts[r] = count == 0 || r % 3 == 1 ? 0 : count + r;
}

static void grid_reduce_scatter(job *j, grid_case c) {
    int64_t counts[MAX_RANKS], whole, before, wrong = 0;
    void *send, *recv;
    grid_counts(j->ranks, c.count, counts);
    whole = total(counts, j->ranks);
    before = total(counts, j->rank);
    send = filled(j, c.dtype, j->rank, whole * c.blocks);
    recv = filled(j, c.dtype, 99, counts[j->rank] * c.blocks);
    CHECK(tsh_reduce_scatter(&j->comm, send, recv, counts, c.blocks, c.dtype, c.op) == TSH_OK);
    for (int64_t b = 0; b < c.blocks; b++)
        for (int64_t i = 0; i < counts[j->rank]; i++)
            wrong += !same(c.dtype, recv, b * counts[j->rank] + i,
                           ordered(c.dtype, c.op, j->ranks, j->rank, b * whole + before + i));
    CHECK(wrong == 0);
    job_hash(j, recv, counts[j->rank] * c.blocks, c.dtype);
    job_give(j, send);
    job_give(j, recv);
}

static void grid_allgather(job *j, grid_case c) {
    int64_t counts[MAX_RANKS], whole, wrong = 0;
    size_t width = tsh_dtype_size(c.dtype);
    char *send, *recv;
    int in_place = c.in_place && c.blocks == 1;
    grid_counts(j->ranks, c.count, counts);
    whole = total(counts, j->ranks);
    send = (char *)filled(j, c.dtype, j->rank, counts[j->rank] * c.blocks);
    recv = (char *)filled(j, c.dtype, 99, whole * c.blocks);
    if (in_place)
        memcpy(recv + (size_t)total(counts, j->rank) * width, send,
               (size_t)counts[j->rank] * width);
    CHECK(tsh_allgather(&j->comm, in_place ? recv + (size_t)total(counts, j->rank) * width : send,
                        recv, counts, c.blocks, c.dtype) == TSH_OK);
    for (int64_t b = 0; b < c.blocks; b++)
        for (int r = 0; r < j->ranks; r++)
            for (int64_t i = 0; i < counts[r]; i++)
                wrong += !same(c.dtype, recv, b * whole + total(counts, r) + i,
                               element(c.dtype, r, b * counts[r] + i));
    CHECK(wrong == 0);
    job_hash(j, recv, whole * c.blocks, c.dtype);
    job_give(j, send);
    job_give(j, recv);
}

static int64_t alltoall_count(int64_t count, int from, int to) {
    return count == 0 || (from + to) % 3 == 1 ? 0 : count + from + 2 * to;
}

static void grid_alltoall(job *j, grid_case c) {
    int64_t out[MAX_RANKS], in[MAX_RANKS], its[MAX_RANKS], row, wrong = 0;
    void *send, *recv;
    for (int r = 0; r < j->ranks; r++) {
        out[r] = alltoall_count(c.count, j->rank, r);
        in[r] = alltoall_count(c.count, r, j->rank);
    }
    row = total(in, j->ranks);
    send = filled(j, c.dtype, j->rank, total(out, j->ranks) * c.blocks);
    recv = filled(j, c.dtype, 99, row * c.blocks);
    CHECK(tsh_alltoall(&j->comm, send, out, recv, in, c.blocks, c.dtype) == TSH_OK);
    for (int r = 0; r < j->ranks; r++) {
        for (int m = 0; m < j->ranks; m++) its[m] = alltoall_count(c.count, r, m);
        for (int64_t b = 0; b < c.blocks; b++)
            for (int64_t i = 0; i < in[r]; i++)
                wrong += !same(
                    c.dtype, recv, b * row + total(in, r) + i,
                    element(c.dtype, r, b * total(its, j->ranks) + total(its, j->rank) + i));
    }
    CHECK(wrong == 0);
    job_hash(j, recv, row * c.blocks, c.dtype);
    job_give(j, send);
    job_give(j, recv);
}

static void grid_broadcast(job *j, grid_case c) {
    int root = (int)(c.count + c.blocks) % j->ranks;
    void *buffer = filled(j, c.dtype, j->rank, c.count);
    int64_t wrong = 0;
    CHECK(tsh_broadcast(&j->comm, buffer, c.count, c.dtype, root) == TSH_OK);
    for (int64_t i = 0; i < c.count; i++)
        wrong += !same(c.dtype, buffer, i, element(c.dtype, root, i));
    CHECK(wrong == 0);
    job_hash(j, buffer, c.count, c.dtype);
    job_give(j, buffer);
}

/* Round the ring; then between neighbours 0-1, 2-3, ... with send and recv. */
static void grid_pairwise(job *j, grid_case c) {
    int to = (j->rank + 1) % j->ranks, from = (j->rank + j->ranks - 1) % j->ranks;
    int partner = j->rank ^ 1;
    int64_t wrong = 0, mine = c.count + j->rank, its = c.count + from;
    void *send = filled(j, c.dtype, j->rank, mine), *recv = filled(j, c.dtype, 99, its + MAX_RANKS);
    CHECK(tsh_sendrecv(&j->comm, send, mine, to, recv, its, from, c.dtype) == TSH_OK);
    for (int64_t i = 0; i < its; i++) wrong += !same(c.dtype, recv, i, element(c.dtype, from, i));
    job_hash(j, recv, its, c.dtype);
    if (partner < j->ranks && j->rank % 2 == 0) {
        CHECK(tsh_send(&j->comm, send, mine, c.dtype, partner) == TSH_OK);
    } else if (partner < j->ranks) {
        its = c.count + partner;
        CHECK(tsh_recv(&j->comm, recv, its, c.dtype, partner) == TSH_OK);
        for (int64_t i = 0; i < its; i++)
            wrong += !same(c.dtype, recv, i, element(c.dtype, partner, i));
    }
    CHECK(wrong == 0);
    job_give(j, send);
    job_give(j, recv);
}

static int integer(tsh_dtype dtype) {
    return dtype == TSH_I32 || dtype == TSH_I64;
}

UNUSED static void grid_one(job *j, grid_case c) {
    for (c.in_place = 0; c.in_place < 2; c.in_place++) {
        for (int op = TSH_SUM; op <= TSH_AVG; op++) {
            if (op == TSH_AVG && integer(c.dtype)) continue;
            c.op = (tsh_redop)op;
            grid_allreduce(j, c);
            if (!c.in_place)
                for (c.blocks = 1; c.blocks <= 3; c.blocks += 2) grid_reduce_scatter(j, c);
        }
        for (c.blocks = 1; c.blocks <= 3; c.blocks += 2) {
            grid_allgather(j, c);
            grid_alltoall(j, c);
            grid_broadcast(j, c);
        }
        grid_pairwise(j, c);
        CHECK(tsh_barrier(&j->comm) == TSH_OK);
    }
}

/* --------------------------------------------------------------------- soak
 * Rounds of random kinds and sizes on the world, on a half of it, and on a half of that; all ranks
 * draw the same numbers. */

typedef struct soak_plan {
    uint64_t seed;
    int rounds;     /* at most */
    double seconds; /* rank 0 says when it is over, if it is over before; 0: never */
} soak_plan;

enum { SOAK_GROUPS = 3, SOAK_BURST = 12, SOAK_LONGEST = 20000 };

static int64_t soak_length(uint64_t draw) {
    static const int64_t longest[] = {2, 30, 30, 1000, 1000, SOAK_LONGEST};
    return (int64_t)(draw / 8 % (uint64_t)longest[draw % 6]);
}

/* Sums of doubles under way on all groups at once, waited for in another order on every rank. */
static void soak_burst(job *group, uint64_t draw) {
    double *buffer[SOAK_BURST];
    tsh_req req[SOAK_BURST];
    int64_t length[SOAK_BURST], wrong = 0;
    int turn = group[0].rank % SOAK_BURST;
    for (int i = 0; i < SOAK_BURST; i++) {
        job *j = &group[i % SOAK_GROUPS];
        length[i] = soak_length(mix(draw + (uint64_t)i));
        buffer[i] = (double *)filled(j, TSH_F64, j->rank, length[i]);
        CHECK(tsh_allreduce_start(&j->comm, buffer[i], length[i], TSH_F64, TSH_SUM, &req[i]) ==
              TSH_OK);
    }
    for (int n = 0; n < SOAK_BURST; n++) {
        int i = (n * 5 + turn) % SOAK_BURST;
        job *j = &group[i % SOAK_GROUPS];
        CHECK(tsh_wait(&j->comm, req[i]) == TSH_OK);
    }
    for (int i = 0; i < SOAK_BURST; i++) {
        job *j = &group[i % SOAK_GROUPS];
        int64_t chunk = (length[i] + j->ranks - 1) / j->ranks;
        for (int64_t e = 0; e < length[i]; e++)
            wrong += !same(TSH_F64, buffer[i], e,
                           ordered(TSH_F64, TSH_SUM, j->ranks, (int)(e / chunk), e));
        CHECK(wrong == 0);
        job_give(j, buffer[i]);
    }
}

static void soak_round(job *group, uint64_t draw) {
    job *j = &group[mix(draw) % SOAK_GROUPS];
    grid_case c;
    memset(&c, 0, sizeof c);
    c.count = soak_length(mix(draw + 1));
    c.dtype = (tsh_dtype)(TSH_F32 + mix(draw + 2) % 6);
    c.op = (tsh_redop)(mix(draw + 3) % (integer(c.dtype) ? 4 : 5));
    c.in_place = (int)(mix(draw + 4) % 2);
    c.blocks = 1 + (int64_t)(mix(draw + 5) % 3);
    switch (mix(draw + 6) % 8) {
    case 0: grid_reduce_scatter(j, c); break;
    case 1: grid_allgather(j, c); break;
    case 2: grid_alltoall(j, c); break;
    case 3: grid_broadcast(j, c); break;
    case 4: grid_pairwise(j, c); break;
    case 5: CHECK(tsh_barrier(&j->comm) == TSH_OK); break;
    case 6: soak_burst(group, draw); break;
    case 7: grid_allreduce(j, c); break;
    default: CHECK(0 && "one of eight");
    }
}

/* group[0] is the world; j itself stays out of use until soak_leave. */
static void soak_enter(job *j, job *group, uint64_t draw) {
    group[0] = *j;
    for (int g = 1; g < SOAK_GROUPS; g++) {
        job *from = &group[g - 1];
        int halves = from->ranks > 1 ? 2 : 1, color = from->rank % halves;
        group[g] = *from;
        if (tsh_comm_split(&from->comm, color, draw % 2 ? -from->rank : 0, &group[g].comm) !=
            TSH_OK)
            job_fail(from, __LINE__, "tsh_comm_split");
        group[g].rank = group[g].comm.rank;
        group[g].ranks = group[g].comm.size;
    }
}

static void soak_leave(job *j, job *group) {
    for (int g = 0; g < SOAK_GROUPS; g++) {
        if (group[g].failure[0] && !j->failure[0])
            (void)snprintf(j->failure, sizeof j->failure, "group %d: %.900s", g, group[g].failure);
        j->hash = mix(j->hash + group[g].hash);
    }
    for (int g = SOAK_GROUPS - 1; g > 0; g--) tsh_comm_close(&group[g].comm);
    j->comm = group[0].comm;
}

/* The user is a soak_plan. New groups every 50 rounds; j->steps tells the rounds done, j->hash what
 * they gave. */
UNUSED static void soak_rank(job *j) {
    const soak_plan *plan = (const soak_plan *)j->user;
    double until = now_ms() + plan->seconds * 1e3;
    job group[SOAK_GROUPS];
    int32_t over = 0;
    for (int round = 0; round < plan->rounds && !over && !j->failure[0]; round += 50) {
        uint64_t draw = mix(plan->seed * 1000000u + (uint64_t)round);
        soak_enter(j, group, draw);
        for (int i = 0; i < 50; i++) {
            soak_round(group, draw + 100u * (uint64_t)i);
            job_step(j);
        }
        soak_leave(j, group);
        if (plan->seconds > 0) {
            over = now_ms() > until;
            CHECK(tsh_broadcast(&j->comm, &over, 1, TSH_I32, 0) == TSH_OK);
        }
    }
}

/* ------------------------------------------------------------------- faults */

typedef enum fault {
    KIND,
    COUNT,
    DTYPE,
    REDOP,
    ROOT,
    BLOCKS,
    COUNTS,
    SPLIT,
    PIECES,
    OWN,
    FAULTS
} fault;
UNUSED static const char *const fault_names[] = {"kind",   "count",  "dtype", "reduction", "root",
                                                 "blocks", "counts", "split", "pieces",    "own"};
typedef struct odd_one {
    fault what;
    int odd;
} odd_one;

static tsh_result faulty_call(job *j, fault what, int odd) {
    static float buffer[MAX_RANKS][4096];
    int64_t counts[MAX_RANKS], other[MAX_RANKS];
    float *mine = buffer[j->rank];
    for (int r = 0; r < j->ranks; r++) counts[r] = other[r] = 2;
    counts[j->ranks - 1] = odd ? 3 : 2;
    switch (what) {
    case KIND:
        if (odd) return tsh_barrier(&j->comm);
        return tsh_allreduce(&j->comm, mine, 100, TSH_F32, TSH_SUM);
    case COUNT: return tsh_allreduce(&j->comm, mine, odd ? 6 : 7, TSH_F32, TSH_SUM);
    case DTYPE: return tsh_allreduce(&j->comm, mine, 100, odd ? TSH_I32 : TSH_F32, TSH_SUM);
    case REDOP: return tsh_allreduce(&j->comm, mine, 100, TSH_F32, odd ? TSH_MAX : TSH_SUM);
    case ROOT: return tsh_broadcast(&j->comm, mine, 100, TSH_F32, odd ? 1 : 0);
    case BLOCKS: return tsh_allgather(&j->comm, mine, mine + 8, other, odd ? 2 : 1, TSH_F32);
    case COUNTS: return tsh_allgather(&j->comm, mine, mine + 8, counts, 1, TSH_F32);
    case SPLIT: {
        tsh_comm out;
        if (odd) return tsh_barrier(&j->comm);
        return tsh_comm_split(&j->comm, 0, 0, &out);
    }
    case PIECES:
        counts[j->ranks - 1] = 2;
        for (int r = 0; odd && r < j->ranks; r++) counts[r] = 1;
        return tsh_alltoall(&j->comm, mine, counts, mine + 256, other, 1, TSH_F32);
    case OWN: /* what the rank sends to itself and what it expects from itself differ */
        counts[j->ranks - 1] = 2;
        if (odd) other[j->rank] = 0;
        return tsh_alltoall(&j->comm, mine, counts, mine + 256, other, 1, TSH_F32);
    case FAULTS: break;
    }
    return TSH_OK; /* where an error is due */
}

UNUSED static void mismatch_rank(job *j) {
    const odd_one *o = (const odd_one *)j->user;
    tsh_error again;
    tsh_result result;
    (void)tsh_barrier(&j->comm); /* fails, too, if peers disagree before this rank leaves it */
    j->ms = now_ms();
    result = faulty_call(j, o->what, j->rank == o->odd);
    /* Over TCP a rank may have returned before its peers disagreed: its next call tells. */
    if (result == TSH_OK && job_over_tcp(j)) result = tsh_barrier(&j->comm);
    j->ms = now_ms() - j->ms;
    CHECK(result == TSH_ERR_MISMATCH);
    CHECK(job_verdict(j) == result);
    CHECK(tsh_barrier(&j->comm) == result);
    CHECK(tsh_comm_error(&j->comm, &again) == result);
    CHECK(strcmp(again.message, j->verdict.message) == 0);
    CHECK(j->comm.in_flight == 0);
}

/* Rank 1 waits in a group of two, the others in the world. */
UNUSED static void crossed_rank(job *j) {
    tsh_comm pair;
    tsh_comm *mine = j->rank == 1 ? &pair : &j->comm;
    tsh_result split = tsh_comm_split(&j->comm, j->rank / 2, 0,
                                 &pair); /* a slow rank may learn it here */
    CHECK(split == TSH_OK || split == TSH_ERR_MISMATCH);
    j->ms = now_ms();
    if (split == TSH_OK) CHECK(tsh_barrier(mine) == TSH_ERR_MISMATCH);
    j->ms = now_ms() - j->ms;
    (void)job_verdict(j);
    tsh_comm_close(&pair);
}

/* Of 4 ranks, 0 and 2 wait for each other; 0 waits for 1, too, and 1 for 3, which is only late. */
UNUSED static void hidden_circle_rank(job *j) {
    tsh_comm pair;
    CHECK(tsh_comm_split(&j->comm, j->rank % 2, 0, &pair) == TSH_OK);
    CHECK(tsh_barrier(&j->comm) == TSH_OK); /* all are out of it long before rank 3 is missed */
    if (j->rank == 3) sleep_ms(1200);
    j->ms = now_ms();
    CHECK(tsh_barrier(j->rank == 0 ? &j->comm : &pair) == TSH_ERR_MISMATCH);
    j->ms = now_ms() - j->ms;
    (void)job_verdict(j);
    tsh_comm_close(&pair);
}

/* Everybody sends to the next rank before it receives. */
UNUSED static void circle_rank(job *j) {
    float x = 0;
    j->ms = now_ms();
    CHECK(tsh_send(&j->comm, &x, 1, TSH_F32, (j->rank + 1) % j->ranks) == TSH_ERR_MISMATCH);
    j->ms = now_ms() - j->ms;
    (void)job_verdict(j);
}

/* -------------------------------------------------------------- until it ends */

typedef enum doing { ALLREDUCE, ALLGATHER, IDLE, RECEIVE, DOINGS } doing;
UNUSED static const char *const doing_names[] = {"all-reduce", "all-gather", "idle", "receive"};

typedef struct doing_plan {
    doing what;
    int64_t count; /* elements of a message */
} doing_plan;

static tsh_result do_once(job *j, const doing_plan *plan, float *buffer) {
    int64_t counts[MAX_RANKS], each = plan->count / j->ranks;
    for (int r = 0; r < j->ranks; r++) counts[r] = each;
    switch (plan->what) {
    case ALLREDUCE: return tsh_allreduce(&j->comm, buffer, plan->count, TSH_F32, TSH_SUM);
    case ALLGATHER:
        return tsh_allgather(&j->comm, buffer + each * j->rank, buffer, counts, 1, TSH_F32);
    case RECEIVE: /* which nobody sends */
        if (job_steps(j) > 2)
            return tsh_recv(&j->comm, buffer, 1, TSH_F32, (j->rank + 1) % j->ranks);
        return tsh_barrier(&j->comm);
    case IDLE: /* computes, and looks now and then */
        sleep_ms(1);
        return tsh_comm_error(&j->comm, NULL);
    case DOINGS: break;
    }
    return TSH_ERR_ARGUMENT;
}

/* Until the world ends, for at most 100 s; notes the verdict. The user is a doing_plan. */
UNUSED static void until_error_rank(job *j) {
    const doing_plan *plan = (const doing_plan *)j->user;
    double until = now_ms() + 100e3;
    float *buffer = (float *)job_take(j, ((size_t)plan->count + 1) * sizeof(float));
    tsh_result result = TSH_OK;
    while (result == TSH_OK && now_ms() < until) {
        result = do_once(j, plan, buffer);
        if (result == TSH_OK) job_step(j);
    }
    CHECK(result != TSH_OK);
    CHECK(job_verdict(j) == result);
    job_give(j, buffer);
}

#endif
