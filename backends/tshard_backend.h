/* tshard_backend.h - functions that backends share, for those who write one */
/*
 * A program that only uses tshard needs none of this. A backend includes it (the three beside it
 * do, and examples/05_write_a_backend.c) and calls the functions that begin with tshb_. What a
 * backend must do is described in tshard.h, HOW A BACKEND WORKS; "rule 5" and so on are the rules
 * there.
 *
 * DO THIS, in the source file that compiles the library
 *
 *     #define TSHARD_IMPLEMENTATION
 *     #include "tshard.h"
 *     #include "backends/tshard_backend.h"    // or any backend, which includes it
 *
 * It needs nothing beyond tshard.h.
 */

#include "../tshard.h"

#ifndef TSHARD_BACKEND_H
#define TSHARD_BACKEND_H

/* ========================================================================== */
/* >>backend-api                                          MARK: - backend-api */
/* What backends share: making a comm, time limits, sums, comparing the calls */
/* of all ranks, finding ranks that wait for each other.                      */
/* Needs: the public part of tshard.h.                                        */
/* ========================================================================== */

#ifdef __cplusplus
extern "C" {
#endif

/* For those who write a backend: making a comm, time limits, sums in the order of rule 5, calls as
 * text, comparing the calls of all ranks, finding ranks that wait for each other in a cycle, and
 * settings from the environment. Arguments dtype and op must be ones that tsh_start accepts. */

/* Returns a comm for rank `rank` of a group of `size` ranks, on which nothing has been started.
 * ops: the backend's functions; impl: the backend's own data; id: the group's (see
 * tshb_group_text). */
TSH_API tsh_comm tshb_comm_make(const tsh_comm_ops *ops, void *impl, int rank, int size,
                               uint64_t id);
/* Makes a comm for the whole world, with all collectives, groups and errors, from one that only
 * sends and receives messages (rule 9). Sums are in the order of rule 5. Closing *out closes
 * `messages`; after an error, `messages` stays the caller's. The time limit is TSHARD_TIMEOUT, else
 * 300 s. Errors: TSH_ERR_ARGUMENT (TSHARD_TIMEOUT is not a time), TSH_ERR_MEMORY, with a sentence
 * in error. */
TSH_API tsh_result tshb_comm_compose(const tsh_comm *messages, tsh_comm *out, tsh_error *error);

/* Sets *ns to the time limit of a world, in ns; 2^61 stands for no limit. given: the limit in
 * seconds, from the field of a desc that is called `name`; negative: no limit. If given is 0: that
 * of the environment variable TSHARD_TIMEOUT ("0": no limit); if that is unset: 300 s. Returns 1;
 * or 0, with a sentence in error, if `given` is NaN or the variable is not a time. */
TSH_API int tshb_timeout(double given, const char *name, int64_t *ns, tsh_error *error);
/* Does what tshb_timeout does, with this environment variable and `otherwise` seconds in place of
 * TSHARD_TIMEOUT and 300 s. */
TSH_API int tshb_time_limit(double given, const char *name, const char *variable, double otherwise,
                           int64_t *ns, tsh_error *error);
/* Returns the time (as tsh_now counts) at which a call that starts now times out: timeout_ns from
 * now, or `otherwise` ns from now if timeout_ns is 0. */
TSH_API int64_t tshb_deadline(int64_t timeout_ns, int64_t otherwise);

/* Combines n elements by op: out = left op right (AVG adds). out may be left or right, but must not
 * overlap them otherwise. */
TSH_API void tshb_coll_fold(void *out, const void *left, const void *right, int64_t n,
                           tsh_dtype dtype, tsh_redop op);
/* Returns 1 if tshb_coll_fold rounds its results to dtype, as in a SUM of bf16. A sum over several
 * ranks must be rounded only once, at its end: such dtypes need tshb_coll_sum. */
TSH_API int tshb_coll_rounds(tsh_dtype dtype, tsh_redop op);
/* Divides n finished sums by the number of ranks, `size`, if op is AVG; does nothing for other
 * ops. */
TSH_API void tshb_coll_finish(void *sums, int64_t n, tsh_dtype dtype, tsh_redop op, int size);
/* Combines the n elements of chunk k of all ranks, in the order of rule 5: out = x[k+1] + x[k+2] +
 * ... + x[k+P], indices modulo P = size, with coll->redop in place of +. bf16 and f16 are summed in
 * float and rounded once; AVG is divided. part(user, r) returns the address of rank r's n elements.
 * out may be that of x[k+1], but must not overlap any other. */
TSH_API void tshb_coll_sum(void *out, int64_t n, const tsh_coll *coll, int size, int k,
                          const void *(*part)(const void *user, int r), const void *user);
/* Returns counts[0] + ... + counts[r-1]: where rank r's part of a row starts. */
TSH_API int64_t tshb_coll_before(const int64_t *counts, int r);
/* Returns where chunk k of n elements starts, of `size` chunks (rule 5); n if k is size. */
TSH_API int64_t tshb_coll_chunk(int64_t n, int size, int k);
/* Returns a hash of a call in a group of `size` ranks. The calls of two ranks match if their hashes
 * are equal (up to a chance of 2^-64), and only then. Both must have been accepted by tsh_start. A
 * SEND matches the RECV of its dtype, count and tag; of a SENDRECV, hash the halves
 * (tshb_coll_half). The counts of an ALLTOALL, which differ from rank to rank, are not hashed: they
 * must be compared pair by pair, as tshb_calls_match does. */
TSH_API uint64_t tshb_coll_digest(const tsh_coll *coll, int size);
/* Writes a call as text, such as "all-reduce of 7 f32 (sum)", into `text`, cut to `capacity` bytes.
 * If `other` is not NULL, adds the first of coll's `size` counts that differs from other's. Invalid
 * values and counts that are NULL do no harm: coll may come from a broken peer. Returns text. */
TSH_API char *tshb_coll_text(const tsh_coll *coll, const tsh_coll *other, int size, char *text,
                            size_t capacity);

/* Writes the name of a group, found from its id, into `text`, cut to `capacity` bytes: "tp", "dp"
 * or "pp" if tsh_open made the group (the highest byte of its id is the name's first letter),
 * "world" for id 1, and "group 7" for another id, 7. Groups of one axis have one name, such as the
 * tp groups of two replicas. Returns text. */
TSH_API char *tshb_group_text(uint64_t group, char *text, size_t capacity);
/* Appends a call, its number and its group to `text`: "all-reduce of 7 f32 (sum), collective 3 of
 * tp". For messages (SEND, RECV, SENDRECV) seq is left out. group: the group's id. */
TSH_API void tshb_coll_where(const tsh_coll *coll, int size, uint64_t seq, uint64_t group,
                            char *text, size_t capacity);
/* Returns a SENDRECV's SEND (receives 0) or RECV (receives 1), with its count in .count. Of a SEND
 * or a RECV, whose kind `receives` must agree with, returns a copy without count arrays. */
TSH_API tsh_coll tshb_coll_half(const tsh_coll *coll, int receives);

/* What one rank of a group has called, as others see it. */
typedef struct tshb_call {
    tsh_coll coll;   /* the call; kind TSH_COLL_KINDS: the rank closes the group */
    uint64_t digest; /* tshb_coll_digest of the call */
    int rank;        /* the rank's number in the world */
    int counts;      /* length of coll's arrays of counts; 0: they are not known, and may be NULL */
} tshb_call;
/* Compares the calls of the `size` ranks of a group. call(user, r, out) fills *out with the call of
 * rank r, or returns 0 if r has made none. Returns 1 if the calls match; else 0, with the world's
 * error in *error. The call that most ranks have made is taken as right (of several such, that of
 * the lowest rank), and the lowest rank with another call is blamed. If all have called all-to-all
 * with counts that do not fit, the rank with the most counts that disagree is blamed (of several
 * such, the lowest but rank 0). If some ranks have closed the group while others make a call in it,
 * the error is TSH_ERR_LOST, and blames the lowest rank that has closed it. seq, group: number of
 * the collective and id of the group, for the sentence. */
TSH_API int tshb_calls_match(int (*call)(const void *user, int r, tshb_call *out),
                             const void *user, int size, uint64_t seq, uint64_t group,
                             tsh_error *error);
/* Fills *error for a SEND and a RECV (or halves of SENDRECVs) that do not match. from, to: the
 * ranks in the world of sender and receiver; number: number of the message between them; group: the
 * group's id. */
TSH_API void tshb_message_mismatch(const tsh_coll *sent, const tsh_coll *wanted, int from, int to,
                                  uint64_t number, uint64_t group, tsh_error *error);
/* Returns which of two ranks that disagree is blamed: the one that is not rank 0, else the
 * lower. */
TSH_API int tshb_blamed(int a, int b);

/* What a rank passes to tsh_comm_split. */
typedef struct tshb_ticket {
    int32_t color, key;
} tshb_ticket;
/* Fills `order` with the ranks of a new group: those of `size` ranks whose color is `color`, sorted
 * by key, then by rank. Returns how many there are. Rank r's ticket is r * stride bytes after
 * `tickets`, perhaps within a larger struct. */
TSH_API int tshb_split_order(const void *tickets, size_t stride, int size, int color, int *order);

/* The state of one rank in a search for ranks that wait for each other in a cycle. */
typedef struct tshb_coll_search {
    int seen;       /* 0: not visited; 1: on the current path; 2: done, it leads to no cycle */
    int from, next; /* the ranks before and after it on the path; -1: none */
    int edge;       /* index of the rank to try next, of those that it waits for */
} tshb_coll_search;

/* Searches, depth first, for a cycle of ranks that wait for each other, beginning with rank r of
 * `size`: such ranks wait forever. Returns a rank of the cycle, from which search[...].next leads
 * around it; -1: r leads to no cycle. awaits(user, r, i) returns the i-th rank that r waits for, 0
 * <= i < size; -1: no such rank. search has one entry per rank, all zeros before the first search;
 * further searches with the same entries skip ranks that were visited before. */
TSH_API int tshb_coll_cycle(tshb_coll_search *search, int size, int r,
                           int (*awaits)(const void *user, int r, int i), const void *user);
/* Returns the rank of a cycle that is out of step, and so is blamed: the one that the fewest ranks
 * are in the same call with; of several such the lowest, rank 0 last. r: any rank of the cycle.
 * together(user, r) returns how many ranks wait in r's call. *waits: the rank of the cycle that
 * waits for the blamed one. */
TSH_API int tshb_coll_blame(const tshb_coll_search *search, int r,
                           int (*together)(const void *user, int r), const void *user, int *waits);
/* Fills *error for a cycle: rank `blamed` waits in the call `in` while rank `waits` waits for it in
 * the call `other` (both as tshb_coll_where writes them). If both ranks are the same, it waits for
 * itself. */
TSH_API void tshb_cycle_error(int blamed, const char *in, int waits, const char *other,
                             tsh_error *error);

/* For backends whose ranks report to each other which call they wait in. A mark counts what a rank
 * has started in one group: its collectives, or its messages with one peer. */
typedef struct tshb_wait_mark {
    /* sends: number of collectives or of messages to peer; recvs: of messages from peer */
    uint64_t group, sends, recvs;
    int64_t peer; /* -1: the mark counts collectives; else the peer's rank in the world */
} tshb_wait_mark;
/* What one rank waits for. In the same block of memory follow `marks` tshb_wait_mark and then
 * `awaited` ints, the ranks of the world that it waits for. */
typedef struct tshb_wait_report {
    /* group: id of the group; the others are the numbers of the collective, of the message that it
     * sends and of the one that it receives */
    uint64_t group, seq, send_number, recv_number;
    /* pairwise 1: it waits for a message; send_to, recv_from: peer's rank in the world, -1: none */
    int32_t pairwise, send_to, recv_from;
    int32_t awaited, marks; /* number of awaited ranks, and of marks, that follow */
    char text[256];         /* the call, as tshb_coll_where writes it */
} tshb_wait_report;
/* Returns 1 if rank m has not started its part of the call that rank r waits in, as far as m's last
 * report says, and waits itself. report[i]: the last report of rank i; NULL: i is not known to
 * wait. */
TSH_API int tshb_wait_missing(tshb_wait_report *const *report, int r, int m);
/* Returns 1, with the world's error in *error, if rank r of `size` waits in a cycle, which then
 * never ends; else 0. search: memory for one entry per rank; need not be initialised. (Old reports
 * suffice. A rank goes on only after those that it waits for, so no rank of a cycle can have been
 * the first to go on since it reported.) */
TSH_API int tshb_wait_cycle(tshb_wait_report *const *report, int size, int r,
                            tshb_coll_search *search, tsh_error *error);
/* Appends "; absent ranks: 1 3" to the error of rank r's timeout, and blames the first of them.
 * Absent are those ranks that r waits for and that are not known to have started their part. If r
 * is not known to wait, or no rank is absent: " none". */
TSH_API void tshb_wait_absent(tshb_wait_report *const *report, int r, tsh_error *error);

/* For a runner tsh_x_run, op, a macro that passes TSH_BUILT to tsh_x_run_built: returns 1 if these
 * three are what the library was compiled with; else 0, and logs why to desc->logger (desc may be
 * NULL). */
TSH_API int tshb_same_build(const char *op, int version, size_t real, size_t size,
                            const tsh_desc *desc);

/* Settings of a backend that come from the environment. Each function reads the variable `name`
 * and returns 1 if it is set; 0 if it is unset or empty; -1, with a sentence in error
 * (TSH_ERR_ARGUMENT), if its value is not accepted. Unless it returns 1, the result stays as it
 * was. No blanks, signs or exponents are accepted, and the locale does not matter. */
/* Reads the variable as an integer from low to high; low is at least 0. */
TSH_API int tshb_env_int(const char *name, int low, int high, int *value, tsh_error *error);
/* Reads the variable as a time in seconds, with an optional fraction ("30", "0.5"), at most 1e9.
 * *ns: the time in nanoseconds. */
TSH_API int tshb_env_seconds(const char *name, int64_t *ns, tsh_error *error);
/* Copies the variable's value to `text`, which has `capacity` bytes, the final 0 included. The
 * error does not repeat the value, as it may be a secret. */
TSH_API int tshb_env_text(const char *name, char *text, size_t capacity, tsh_error *error);


#ifdef __cplusplus
}
#endif

/* ========================================================================== */
/* end of header: stop here if you only want the API                          */
/* ========================================================================== */
#endif /* TSHARD_BACKEND_H */

/* With TSHARD_IMPLEMENTED, nothing below is compiled: the file that compiles the library must
 * include this header, too, and has these functions. */
#if defined(TSHARD_IMPLEMENTATION) && defined(TSHARD_IMPLEMENTED_HERE) &&                          \
    !defined(TSHARD_BACKEND_IMPLEMENTED)
#define TSHARD_BACKEND_IMPLEMENTED

#ifdef __cplusplus
extern "C" {
#endif

/* ========================================================================== */
/* >>coll-sum                                      MARK: - coll-sum (private) */
/* Making a comm; settings and time limits; sums in the order of rule 5.      */
/* Needs: the implementation of tshard.h.                                     */
/* ========================================================================== */

TSH_API tsh_comm tshb_comm_make(const tsh_comm_ops *ops, void *impl, int rank, int size,
                                uint64_t id) {
    tsh_comm comm;
    memset(&comm, 0, sizeof comm);
    comm.ops = ops;
    comm.impl = impl;
    comm.rank = rank;
    comm.size = size;
    comm.id = id;
    return comm;
}

TSH_API int tshb_same_build(const char *op, int version, size_t real, size_t size,
                            const tsh_desc *desc) {
    tsh_error error;
    const int same = tshi_context_same_build(op, version, real, size, desc, &error);
    if (!same) tshi_context_log_refusal(desc, version, &error);
    return same;
}

TSH_API int tshb_env_int(const char *name, int low, int high, int *value, tsh_error *error) {
    return tshi_env_int(name, low, high, value, error);
}

TSH_API int tshb_env_seconds(const char *name, int64_t *ns, tsh_error *error) {
    const int64_t second = INT64_C(1000000000);
    const char *text = tshi_env_text(name), *at = text;
    int64_t number = 0, unit = second; /* unit: value in ns of a digit 1 at *at */
    int right;                         /* 1: the text is valid so far */
    if (!text) return 0;
    right = tshi_env_digits(&at, second, &number);
    number *= second;
    if (right && *at == '.') {
        const char *point = at++;
        for (; *at >= '0' && *at <= '9'; at++) {
            unit /= 10;
            if (unit) number += unit * (*at - '0');
            /* less than 1 ns: rounded up, as 0 means no limit */
            if (*at > '0' && number == 0) number = 1;
        }
        right = at > point + 1; /* at least one digit after the point */
    }
    if (!right || *at)
        return tshi_env_refuse(name, text, error,
                               "a number of seconds, such as 30 or 0.5, up to %lld",
                               (long long)second);
    *ns = number;
    return 1;
}

TSH_API int tshb_time_limit(double given, const char *name, const char *variable, double otherwise,
                            int64_t *ns, tsh_error *error) {
    const int64_t never = INT64_C(1) << 61; /* in ns: 73 years */
    *ns = (int64_t)(otherwise * 1e9);
    if (given != given) {
        (void)tsh_error_set(error, TSH_ERR_ARGUMENT, -1, "%s is not a number (NaN)", name);
        return 0;
    }
    if (given != 0)
        *ns = given < 0 || given > 1e9 ? never /* negative: no limit */
              : given < 1e-9           ? 1
                                       : (int64_t)(given * 1e9);
    else if (tshb_env_seconds(variable, ns, error) < 0)
        return 0;
    if (given == 0 && *ns == 0) *ns = never; /* 0 in the environment: no limit */
    return 1;
}

TSH_API int tshb_timeout(double given, const char *name, int64_t *ns, tsh_error *error) {
    return tshb_time_limit(given, name, "TSHARD_TIMEOUT", 300, ns, error);
}

TSH_API int64_t tshb_deadline(int64_t timeout_ns, int64_t otherwise) {
    int64_t now = tsh_now(), wait = timeout_ns ? timeout_ns : otherwise;
    return wait > INT64_MAX - now ? INT64_MAX : now + wait; /* the sum must not overflow */
}

TSH_API int tshb_env_text(const char *name, char *text, size_t capacity, tsh_error *error) {
    const char *value = tshi_env_text(name);
    if (!value) return 0;
    if (strlen(value) < capacity) { /* fits, with its final 0 */
        memcpy(text, value, strlen(value) + 1);
        return 1;
    }
    (void)tsh_error_set(error, TSH_ERR_ARGUMENT, -1, "%s has %lu bytes; it takes at most %lu", name,
                        (unsigned long)strlen(value), (unsigned long)capacity - 1);
    return -1;
}

TSH_API void tshb_coll_fold(void *out, const void *left, const void *right, int64_t n,
                            tsh_dtype dtype, tsh_redop op) {
    tshi_dtype_fold(out, left, right, n, dtype, op);
}

TSH_API int tshb_coll_rounds(tsh_dtype dtype, tsh_redop op) {
    return !tshi_dtypes[dtype].fold && op != TSH_MIN && op != TSH_MAX;
}

TSH_API void tshb_coll_finish(void *sums, int64_t n, tsh_dtype dtype, tsh_redop op, int size) {
    const tshi_dtype *row = &tshi_dtypes[dtype];
    tsh_real run[TSHI_DTYPE_RUN]; /* up to TSHI_DTYPE_RUN of the sums */
    int64_t e, m;                 /* first element, and number of elements, of the current run */
    if (op != TSH_AVG) return;
    if (row->divide) row->divide(sums, n, size);
    for (e = 0; e < n && !row->divide; e += m) {
        m = tshi_base_min(TSHI_DTYPE_RUN, n - e);
        row->load((char *)sums + e * row->size, 1, m, run);
        tshi_dtypes[TSH_REAL].divide(run, m, size);
        row->store((char *)sums + e * row->size, 1, m, run);
    }
}

/* tshb_coll_sum for a dtype to which tshb_coll_fold would round every partial sum: sums in
 * tsh_real, TSHI_DTYPE_RUN elements at a time, and rounds once. */
static void tshi_coll_sum_wide(void *out, int64_t n, const tsh_coll *coll, int size, int k,
                               const void *(*part)(const void *user, int r), const void *user) {
    const tshi_dtype *row = &tshi_dtypes[coll->dtype];
    tsh_real sum[TSHI_DTYPE_RUN], next[TSHI_DTYPE_RUN];
    int64_t m; /* number of elements in this run */
    for (int64_t e = 0; e < n; e += m) {
        m = tshi_base_min(TSHI_DTYPE_RUN, n - e);
        row->load((const char *)part(user, (k + 1) % size) + e * row->size, 1, m, sum);
        for (int j = 2; j <= size; j++) {
            row->load((const char *)part(user, (k + j) % size) + e * row->size, 1, m, next);
            tshi_dtypes[TSH_REAL].fold[coll->redop](sum, sum, next, m);
        }
        tshb_coll_finish(sum, m, TSH_REAL, coll->redop, size);
        row->store((char *)out + e * row->size, 1, m, sum);
    }
}

TSH_API void tshb_coll_sum(void *out, int64_t n, const tsh_coll *coll, int size, int k,
                           const void *(*part)(const void *user, int r), const void *user) {
    const void *left = part(user, (k + 1) % size); /* x[k+1] (rule 5), then the sum so far */
    if (tshb_coll_rounds(coll->dtype, coll->redop)) {
        tshi_coll_sum_wide(out, n, coll, size, k, part, user);
        return;
    }
    for (int j = 2; j <= size; j++) { /* left to right, in the order of a ring */
        tshb_coll_fold(out, left, part(user, (k + j) % size), n, coll->dtype, coll->redop);
        left = out;
    }
    if (left != out && n > 0) memcpy(out, left, (size_t)n * tsh_dtype_size(coll->dtype));
    tshb_coll_finish(out, n, coll->dtype, coll->redop, size);
}

TSH_API int64_t tshb_coll_before(const int64_t *counts, int r) {
    int64_t sum = 0;
    for (int i = 0; i < r; i++) sum += counts[i];
    return sum;
}

TSH_API int64_t tshb_coll_chunk(int64_t n, int size, int k) {
    return tshi_coll_chunk(n, size, k);
}

/* ========================================================================== */
/* >>coll-text                                    MARK: - coll-text (private) */
/* Collectives and groups as text; equal calls have equal digests.            */
/* Needs: >>coll-sum.                                                         */
/* ========================================================================== */

/* Apart from >>compose, no function from here on sends, waits or allocates: a backend passes in
 * what its ranks have called, through a callback such as call(user, r, &out), and gets back a
 * number or a tsh_error to raise. So threads, sockets and MPI report the same mistake in the same
 * sentence. A new kind of collective needs its name in tshi_coll_kinds of tshard.h, and its
 * arguments in tshb_coll_digest and tshb_coll_text. */

enum { TSHI_COLL_TEXT = 256 }; /* bytes of a call's description */
enum { TSHI_COLL_NAME = 32 };  /* bytes of a group's name: "group ", 20 digits, a final 0 */

TSH_API uint64_t tshb_coll_digest(const tsh_coll *coll, int size) {
    /* hashed alike: a SEND matches its RECV */
    int pairwise = coll->kind == TSH_SEND || coll->kind == TSH_RECV;
    uint64_t hash, kind = (uint64_t)(pairwise ? TSH_SEND : coll->kind);
    if (coll->kind >= TSH_BARRIER) return kind; /* no arguments */
    kind |= (uint64_t)coll->dtype << 8;         /* the arguments, above the kind */
    if (tshi_coll_reduces(coll->kind)) kind |= (uint64_t)coll->redop << 16;
    if (coll->kind == TSH_BROADCAST) kind |= (uint64_t)coll->root << 24;
    if (pairwise) kind |= (uint64_t)(uint32_t)coll->tag << 24;
    hash = tshi_coll_mix(1, kind);
    if (!tshi_coll_rows(coll->kind)) return tshi_coll_mix(hash, (uint64_t)coll->count);
    hash = tshi_coll_mix(hash, (uint64_t)coll->blocks);
    /* an all-to-all's counts differ by rank */
    for (int r = 0; r < size && coll->kind != TSH_ALLTOALL; r++)
        hash = tshi_coll_mix(hash, (uint64_t)coll->recv_counts[r]);
    return hash;
}

/* Appends names[value] to text or, if value is n or more, `what` and the number, such as "kind
 * 77". */
static void tshi_coll_name(char *text, size_t capacity, const char *const *names, unsigned n,
                           const char *what, unsigned value) {
    if (value < n)
        tsh_text_add(text, capacity, "%s", names[value]);
    else
        tsh_text_add(text, capacity, "%s %d", what, (int)value);
}

TSH_API char *tshb_coll_text(const tsh_coll *coll, const tsh_coll *other, int size, char *text,
                             size_t capacity) {
    static const char *const redops[] = {"sum", "product", "min", "max", "average"};
    if (!capacity || !text) return text; /* no byte for the terminating 0 */
    text[0] = '\0';
    if (!coll) return text;
    unsigned kind = (unsigned)coll->kind;
    /* theirs: the counts of `other`; NULL: not comparable */
    const int64_t *mine = coll->recv_counts, *theirs = NULL;
    if (tshi_coll_rows(coll->kind) && kind != TSH_ALLTOALL && other && other->kind == coll->kind)
        theirs = other->recv_counts;
    if (!tshi_coll_pairwise(coll->kind) && coll->tag > 0 && coll->tag < TSHI_CALLERS)
        tsh_text_add(text, capacity, "%s, which all ranks must call: ",
                     tshi_coll_callers[coll->tag]);
    tshi_coll_name(text, capacity, tshi_coll_kinds, TSH_COLL_KINDS, "kind", kind);
    if (kind >= TSH_BARRIER) return text; /* no arguments to describe */
    tsh_text_add(text, capacity, " of ");
    if (!tshi_coll_rows(coll->kind) && kind != TSH_SENDRECV)
        tsh_text_add(text, capacity, "%lld ", (long long)coll->count);
    if (tshi_dtype_exists(coll->dtype)) /* a broken peer may send another value */
        tsh_text_add(text, capacity, "%s", tshi_dtypes[coll->dtype].name);
    else
        tsh_text_add(text, capacity, "dtype %d", (int)coll->dtype);
    if (tshi_coll_reduces(coll->kind)) {
        tsh_text_add(text, capacity, " (");
        tshi_coll_name(text, capacity, redops, TSH_AVG + 1, "reduction", (unsigned)coll->redop);
        tsh_text_add(text, capacity, ")");
    }
    if (coll->blocks > 1) tsh_text_add(text, capacity, " in %lld blocks", (long long)coll->blocks);
    if (kind == TSH_BROADCAST) tsh_text_add(text, capacity, " from rank %d", coll->root);
    if (coll->send_to >= 0) tsh_text_add(text, capacity, " to rank %d", coll->send_to);
    if (coll->recv_from >= 0) tsh_text_add(text, capacity, " from rank %d", coll->recv_from);
    if (coll->tag >= 0 && tshi_coll_pairwise(coll->kind))
        tsh_text_add(text, capacity, " with tag %d", coll->tag);
    for (int r = 0; mine && theirs && r < size; r++) {
        if (mine[r] == theirs[r]) continue;
        tsh_text_add(text, capacity, " with counts[%d] = %lld", r, (long long)mine[r]);
        break; /* only the first that differs */
    }
    return text;
}

TSH_API char *tshb_group_text(uint64_t group, char *text, size_t capacity) {
    const int axis = (int)(group >> TSHI_COLL_AXIS);
    if (!capacity || !text) return text; /* no byte for the terminating 0 */
    text[0] = '\0';
    if (axis == 't' || axis == 'd' || axis == 'p')
        tsh_text_add(text, capacity, "%cp", axis);
    else if (group == 1)
        tsh_text_add(text, capacity, "world");
    else
        tsh_text_add(text, capacity, "group %llu", (unsigned long long)group);
    return text;
}

TSH_API void tshb_coll_where(const tsh_coll *coll, int size, uint64_t seq, uint64_t group,
                             char *text, size_t capacity) {
    char name[TSHI_COLL_NAME];
    size_t used = strlen(text);
    (void)tshb_coll_text(coll, NULL, size, text + used, capacity - used);
    if (!tshi_coll_pairwise(coll->kind))
        tsh_text_add(text, capacity, ", collective %llu", (unsigned long long)seq);
    tsh_text_add(text, capacity, " of %s", tshb_group_text(group, name, sizeof name));
}

TSH_API tsh_coll tshb_coll_half(const tsh_coll *coll, int receives) {
    tsh_coll half = *coll;
    half.kind = receives ? TSH_RECV : TSH_SEND;
    half.send_counts = half.recv_counts = NULL;
    if (coll->kind == TSH_SENDRECV)
        /* this half's number of elements */
        half.count = *(receives ? coll->recv_counts : coll->send_counts);
    if (receives) half.send_to = -1;    /* a RECV has no send_to */
    if (!receives) half.recv_from = -1; /* a SEND has no recv_from */
    return half;
}

/* ========================================================================== */
/* >>coll-agree                                  MARK: - coll-agree (private) */
/* Comparing the calls of all ranks; ranks that wait in a cycle; whom to      */
/* blame.                                                                     */
/* Needs: >>coll-text.                                                        */
/* ========================================================================== */

/* What the ranks of a group have called, for the functions below. */
typedef struct tshi_coll_calls {
    int (*call)(const void *user, int r, tshb_call *out); /* returns 0 if rank r has made no call */
    const void *user;                                    /* first argument of call */
    int size;                                            /* number of ranks */
} tshi_coll_calls;

/* Returns how many ranks have made the same call as rank r, r included; 0 if r has made none. */
static int tshi_coll_agree(const tshi_coll_calls *all, int r) {
    tshb_call mine, its;
    int count = 0;
    if (!all->call(all->user, r, &mine)) return 0;
    for (int m = 0; m < all->size; m++)
        count += all->call(all->user, m, &its) && its.digest == mine.digest;
    return count;
}

/* Returns 1 if ranks `from` and `to` disagree on how many elements `from` sends to `to` in an
 * all-to-all. Returns 0 if one of the two counts is not known. */
static int tshi_coll_unequal(const tshi_coll_calls *all, int from, int to) {
    tshb_call a, b;
    return all->call(all->user, from, &a) && all->call(all->user, to, &b) && to < a.counts &&
           from < b.counts && a.coll.send_counts[to] != b.coll.recv_counts[from];
}

/* Compares the counts of an all-to-all, pair by pair. If some differ, fills error, which blames the
 * rank with the most differences (of several the lowest, rank 0 last), and returns 1. */
static int tshi_coll_alltoall(const tshi_coll_calls *all, uint64_t seq, uint64_t group,
                              tsh_error *error) {
    char name[TSHI_COLL_NAME];
    int blamed = -1, max = 0, m = 0, sends; /* m: a rank that disagrees with the one blamed */
    const int64_t *mine, *theirs;
    tshb_call a, b;
    for (int r = all->size - 1; r >= 0; r--) {
        int wrong = 0; /* number of counts on which r and the others disagree */
        for (int i = 0; i < all->size; i++) /* the count that r sends to i, and i to r */
            wrong += tshi_coll_unequal(all, r, i) + tshi_coll_unequal(all, i, r);
        if (!wrong || wrong < max || (wrong == max && r == 0)) continue;
        blamed = r;
        max = wrong;
    }
    if (blamed < 0) return 0; /* all counts agree */
    while (!tshi_coll_unequal(all, blamed, m) && !tshi_coll_unequal(all, m, blamed)) m++;
    /* 1: they disagree on what `blamed` sends; 0: on what it receives */
    sends = tshi_coll_unequal(all, blamed, m);
    (void)all->call(all->user, blamed, &a);
    (void)all->call(all->user, m, &b);
    mine = sends ? a.coll.send_counts : a.coll.recv_counts;
    theirs = sends ? b.coll.recv_counts : b.coll.send_counts;
    (void)tsh_error_set(
        error, TSH_ERR_MISMATCH, a.rank,
        "rank %d called all-to-all with %s_counts[%d] = %lld where rank %d has %s_counts[%d] = "
        "%lld (collective %llu of %s)",
        a.rank, sends ? "send" : "recv", m, (long long)mine[m], b.rank, sends ? "recv" : "send",
        blamed, (long long)theirs[blamed], (unsigned long long)seq,
        tshb_group_text(group, name, sizeof name));
    return 1;
}

/* If some ranks have closed the group (TSH_COLL_KINDS) while others make a call in it, fills error,
 * which names the lowest rank of both, and returns 1. */
static int tshi_coll_left(const tshi_coll_calls *all, uint64_t seq, uint64_t group,
                          tsh_error *error) {
    char text[TSHI_COLL_TEXT] = "";
    tshb_call call, lowest[2]; /* the call of the lowest rank that waits [0], that closed [1] */
    int found[2] = {0, 0};     /* found[i] 1: lowest[i] is such a rank */
    memset(lowest, 0, sizeof lowest);
    for (int r = all->size - 1; r >= 0; r--) {
        int closed;
        if (!all->call(all->user, r, &call)) continue;
        closed = call.coll.kind == TSH_COLL_KINDS;
        found[closed] = 1;
        lowest[closed] = call;
    }
    if (!found[0] || !found[1]) return 0;
    tshb_coll_where(&lowest[0].coll, all->size, seq, group, text, sizeof text);
    (void)tsh_error_set(error, TSH_ERR_LOST, lowest[1].rank,
                        "rank %d left while rank %d waits for it in %s", lowest[1].rank,
                        lowest[0].rank, text);
    return 1;
}

/* Fills error, which blames rank_a: "rank 1 called A where rank 0 called B (collective 3 of tp)".
 * known: number of entries known in the count arrays of both; unit, number: "collective", 3. */
static void tshi_coll_mismatch(const tsh_coll *a, const tsh_coll *b, int known, int rank_a,
                               int rank_b, const char *unit, uint64_t number, uint64_t group,
                               tsh_error *error) {
    char texts[2][TSHI_COLL_TEXT], name[TSHI_COLL_NAME];
    (void)tshb_coll_text(a, b, known, texts[0], sizeof texts[0]);
    (void)tshb_coll_text(b, a, known, texts[1], sizeof texts[1]);
    (void)tsh_error_set(error, TSH_ERR_MISMATCH, rank_a,
                        "rank %d called %s where rank %d called %s (%s %llu of %s)", rank_a,
                        texts[0], rank_b, texts[1], unit, (unsigned long long)number,
                        tshb_group_text(group, name, sizeof name));
}

TSH_API int tshb_calls_match(int (*call)(const void *user, int r, tshb_call *out),
                             const void *user, int size, uint64_t seq, uint64_t group,
                             tsh_error *error) {
    tshi_coll_calls all = {call, user, size};
    tshb_call a, b;
    int right = 0, r; /* right: a rank whose call the most ranks have made */
    if (tshi_coll_left(&all, seq, group, error)) return 0;
    for (r = 1; r < size; r++)
        if (tshi_coll_agree(&all, r) > tshi_coll_agree(&all, right)) right = r;
    if (!call(user, right, &b)) return 1; /* no rank has made a call */
    for (r = 0; r < size; r++)
        if (call(user, r, &a) && a.digest != b.digest) break; /* the lowest rank that differs */
    if (r == size)                                            /* all calls are the same */
        return b.coll.kind != TSH_ALLTOALL || !tshi_coll_alltoall(&all, seq, group, error);
    tshi_coll_mismatch(&a.coll, &b.coll, a.counts < b.counts ? a.counts : b.counts, a.rank, b.rank,
                       "collective", seq, group, error);
    return 0;
}

TSH_API int tshb_blamed(int a, int b) {
    int low = a < b ? a : b;
    return low == 0 ? a + b : low; /* a + b: the one that is not 0 */
}

TSH_API void tshb_message_mismatch(const tsh_coll *sent, const tsh_coll *wanted, int from, int to,
                                   uint64_t number, uint64_t group, tsh_error *error) {
    tshi_coll_mismatch(sent, wanted, 0, from, to, "message", number, group, error);
    error->rank = tshb_blamed(from, to);
}

/* Returns rank r's ticket; tickets lie `stride` bytes apart, perhaps inside larger structs. */
static tshb_ticket tshi_coll_ticket(const void *tickets, size_t stride, int r) {
    tshb_ticket ticket;
    memcpy(&ticket, (const char *)tickets + (size_t)r * stride, sizeof ticket);
    return ticket;
}

TSH_API int tshb_split_order(const void *tickets, size_t stride, int size, int color, int *order) {
    int n = 0;
    for (int r = 0; r < size; r++) {
        tshb_ticket mine = tshi_coll_ticket(tickets, stride, r);
        int at = n; /* insertion sort by key; stable, so equal keys stay in the order of ranks */
        if (mine.color != color) continue; /* rank r is not in the group */
        for (; at > 0 && tshi_coll_ticket(tickets, stride, order[at - 1]).key > mine.key; at--)
            order[at] = order[at - 1];
        order[at] = r;
        n++;
    }
    return n;
}

/* ---- ranks that wait for each other ---- */

TSH_API int tshb_coll_cycle(tshb_coll_search *search, int size, int r,
                            int (*awaits)(const void *user, int r, int i), const void *user) {
    if (search[r].seen) return -1; /* r has been searched before */
    search[r].from = -1;           /* where the search begins */
    while (r >= 0) {
        int m = -1;
        search[r].seen = 1; /* on the path from the first rank to r */
        while (search[r].edge < size && (m < 0 || search[m].seen == 2))
            m = awaits(user, r, search[r].edge++); /* skips ranks that lead to no cycle */
        if (m >= 0 && search[m].seen == 2) m = -1;
        search[r].next = m;
        if (m < 0) { /* r leads to no cycle: back to the rank before it */
            search[r].seen = 2;
            r = search[r].from;
        } else if (search[m].seen) { /* m is on the path already: a cycle */
            return m;
        } else { /* m is new: follow it */
            search[m].from = r;
            r = m;
        }
    }
    return -1;
}

TSH_API int tshb_coll_blame(const tshb_coll_search *search, int r,
                            int (*together)(const void *user, int r), const void *user,
                            int *waits) {
    int blamed = r, at = r; /* at: each rank of the cycle in turn */
    do {
        /* > 0: fewer ranks are in the call of `at` */
        int more = together(user, blamed) - together(user, at);
        if (more > 0 || (more == 0 && (blamed == 0 || (at < blamed && at > 0)))) blamed = at;
        at = search[at].next;
    } while (at != r);
    while (search[at].next != blamed) at = search[at].next; /* the rank that waits for `blamed` */
    *waits = at;
    return blamed;
}

TSH_API void tshb_cycle_error(int blamed, const char *in, int waits, const char *other,
                              tsh_error *error) {
    if (blamed == waits)
        (void)tsh_error_set(error, TSH_ERR_MISMATCH, blamed,
                            "rank %d waits for itself in %s: a rank that sends to itself receives "
                            "in the same call, tsh_sendrecv",
                            blamed, in);
    else
        (void)tsh_error_set(error, TSH_ERR_MISMATCH, blamed,
                            "rank %d waits in %s while rank %d waits for it in %s", blamed, in,
                            waits, other);
}

/* ========================================================================== */
/* >>coll-wait                                    MARK: - coll-wait (private) */
/* Reports of ranks that wait: who is missing, who waits for whom.            */
/* Needs: >>coll-agree.                                                       */
/* ========================================================================== */

/* Returns the marks (what the rank has started), which follow a report in memory. */
static const tshb_wait_mark *tshi_coll_marks(const tshb_wait_report *report) {
    return (const tshb_wait_mark *)(const void *)(report + 1);
}

/* Returns the ranks that the reporting rank waits for; they follow the marks in memory. */
static const int *tshi_coll_awaited(const tshb_wait_report *report) {
    return (const int *)(const void *)(tshi_coll_marks(report) + report->marks);
}

/* Returns the mark of the rank's collectives in a group (peer -1), or of its messages with `peer`.
 * NULL: it is not in the group (any more), or has exchanged no message with the peer. */
static const tshb_wait_mark *tshi_coll_mark(const tshb_wait_report *report, uint64_t group,
                                            int peer) {
    const tshb_wait_mark *mark = tshi_coll_marks(report);
    for (int i = 0; i < report->marks; i++, mark++)
        if (mark->group == group && mark->peer == peer) return mark;
    return NULL;
}

TSH_API int tshb_wait_missing(tshb_wait_report *const *report, int r, int m) {
    const tshb_wait_report *a = report[r], *b = report[m];
    const tshb_wait_mark *here, *pair; /* what m has started: in r's group; messages with r */
    if (!a || !b) return 0;            /* r or m is not known to wait */
    here = tshi_coll_mark(b, a->group, -1);
    if (!here) return 0;                            /* m is not in the group */
    if (!a->pairwise) return here->sends <= a->seq; /* 1: m has not started the collective */
    pair = tshi_coll_mark(b, a->group, r); /* below, 1: m has not started the RECV or the SEND */
    return (a->send_to == m && (pair ? pair->recvs : 0) <= a->send_number) ||
           (a->recv_from == m && (pair ? pair->sends : 0) <= a->recv_number);
}

/* The reports of all ranks, for the two callbacks below. */
typedef struct tshi_coll_reports {
    tshb_wait_report *const *report; /* one per rank; NULL: the rank is not known to wait */
    int size;                       /* number of ranks */
} tshi_coll_reports;

/* For tshb_coll_cycle: returns the i-th rank that r waits for; -1 if there is none, or if that rank
 * has done its part already. */
static int tshi_coll_awaits(const void *user, int r, int i) {
    tshb_wait_report *const *report = ((const tshi_coll_reports *)user)->report;
    int m = report[r] && i < report[r]->awaited ? tshi_coll_awaited(report[r])[i] : -1;
    return m >= 0 && tshb_wait_missing(report, r, m) ? m : -1;
}

/* For tshb_coll_blame: returns how many ranks wait in the same call as r. */
static int tshi_coll_together(const void *user, int r) {
    const tshi_coll_reports *all = (const tshi_coll_reports *)user;
    const tshb_wait_report *a = all->report[r];
    int count = 0;
    for (int m = 0; m < all->size; m++) {
        const tshb_wait_report *b = all->report[m];
        count += b && b->group == a->group && b->pairwise == a->pairwise && b->seq == a->seq;
    }
    return count;
}

TSH_API int tshb_wait_cycle(tshb_wait_report *const *report, int size, int r,
                            tshb_coll_search *search, tsh_error *error) {
    tshi_coll_reports all = {report, size};
    int blamed, waits;
    memset(search, 0, (size_t)size * sizeof *search);
    r = tshb_coll_cycle(search, size, r, tshi_coll_awaits, &all);
    if (r < 0) return 0; /* r waits in no cycle */
    blamed = tshb_coll_blame(search, r, tshi_coll_together, &all, &waits);
    tshb_cycle_error(blamed, report[blamed]->text, waits, report[waits]->text, error);
    return 1;
}

TSH_API void tshb_wait_absent(tshb_wait_report *const *report, int r, tsh_error *error) {
    int absent = 0;
    tsh_text_add(error->message, sizeof error->message, "; absent ranks:");
    for (int i = 0; report[r] && i < report[r]->awaited; i++) {
        int m = tshi_coll_awaited(report[r])[i];
        if (m == r || (report[m] && !tshb_wait_missing(report, r, m))) continue;
        if (!absent++) error->rank = m; /* the first absent rank is blamed */
        tsh_text_add(error->message, sizeof error->message, " %d", m);
    }
    if (!absent) tsh_text_add(error->message, sizeof error->message, " none");
}

/* ========================================================================== */
/* >>compose                                        MARK: - compose (private) */
/* tshb_comm_compose: collectives, groups and errors, made of a backend's     */
/* SEND and RECV. Here: what is sent, and the steps of an op.                 */
/* Needs: >>coll-wait.                                                        */
/* ========================================================================== */

/* How a collective runs:
 *  1. Each rank sends every other one a header, which describes its call. When all have arrived,
 *     every rank compares them: no data moves between calls that do not match.
 *  2. Once the group's earlier collectives are done, each rank sends every other one its part of
 *     the data, and sums what it receives, or stores it in the place of that rank.
 *  3. An all-reduce has a second round: each rank sends its summed chunk to all others.
 * SEND and RECV exchange headers in the same way, then the message. Between two ranks, each channel
 * of a group delivers in order, so no message needs a number:
 *
 *     rank a                           rank b
 *     header ----- HEADERS ---------> compares it with its own, as a does
 *     part   ----- DATA ------------> sums
 *     chunk  <---- DATA ------------- sum (only of an all-reduce)
 *
 * An op only takes a step when the backend has data for it (tshi_compose_step); any wait, test or
 * progress advances every op of this rank. */
typedef enum tshi_compose_channel {
    TSHI_COMPOSE_HEADERS,     /* headers of collectives */
    TSHI_COMPOSE_DATA,        /* data of collectives */
    TSHI_COMPOSE_SENDS,       /* headers of SENDs */
    TSHI_COMPOSE_RECVS,       /* headers of RECVs */
    TSHI_COMPOSE_BODIES,      /* contents of messages */
    TSHI_COMPOSE_REPORTS,     /* reports of where a rank waits (tshb_wait_report) */
    TSHI_COMPOSE_CHANNELS = 8 /* factor in tshi_compose_seq; more than the channels above */
} tshi_compose_channel;

enum { TSHI_COMPOSE_MARKS = 64 };           /* max number of marks in a report */
#define TSHI_COMPOSE_MS    INT64_C(1000000) /* a millisecond, in ns */

/* Describes a rank's call to the others. 2 P counts follow in memory: how many elements the rank
 * sends to each of the P ranks of the group, then how many it receives from each. The pointers in
 * call.coll are valid on the rank that wrote them only. */
typedef struct tshi_compose_header {
    tshb_call call;     /* what the rank has called */
    /* split: id of the new group, as the rank proposes it; the first rank of a color decides */
    uint64_t made;
    tshb_ticket ticket; /* split: the rank's color and key */
} tshi_compose_header;

typedef enum tshi_compose_state {
    TSHI_COMPOSE_MATCHING, /* headers are being exchanged */
    TSHI_COMPOSE_QUEUED,   /* headers match; waits for the group's earlier collectives */
    TSHI_COMPOSE_MOVING,   /* data, or a message, is being sent and received */
    TSHI_COMPOSE_DONE      /* complete */
} tshi_compose_state;

typedef struct tshi_compose_world tshi_compose_world;
typedef struct tshi_compose_group tshi_compose_group;

/* A collective, a SEND, a RECV or the closing of a group; a SENDRECV is two ops. (P) marks arrays
 * with one entry per rank of the group. */
typedef struct tshi_compose_op {
    struct tshi_compose_op *next;  /* the op started after this one in the group; NULL: none */
    struct tshi_compose_op *other; /* the other half of a SENDRECV; else NULL */
    tshi_compose_group *group;     /* the group in which the op was started */
    tsh_coll coll;                 /* what the caller asked for */
    tsh_coll part;       /* the current round as an ALLGATHER, REDUCE_SCATTER or ALLTOALL */
    /* id: the tsh_req; number: of the collective in the group, or of the message with the peer */
    uint64_t id, number;
    int64_t deadline;    /* the time (tsh_now) at which it times out */
    tshi_compose_state state; /* how far the op has proceeded */
    /* peer: the other rank of a message, -1: a collective; sends 1: the op is a SEND */
    int peer, sends;
    int round;       /* 1: the second round, in which an all-reduce sends its summed chunks */
    tsh_coll *recv;  /* (P): the receives that are not complete */
    int recvs;       /* number of entries of recv */
    char *headers;   /* one header per rank; for a message two: the SEND's, then the RECV's */
    int64_t *counts; /* (P): elements of each rank's part of an all-reduce or a broadcast */
    int64_t *to, *from; /* (P) each: number of elements to send to, to receive from each rank */
    /* out: the elements to send, in: those received, packed rank by rank; `in` points into the
     * block of `out` */
    char *out, *in;
} tshi_compose_op;

/* A group, as this rank sees it. */
struct tshi_compose_group {
    tshi_compose_group *next;  /* the next in the world's list */
    tshi_compose_world *world; /* the world that the group belongs to */
    uint64_t id, started, ids; /* started: number of collectives so far; ids: id of the newest op */
    int rank, size, closing;   /* closing: 1: this rank has closed it */
    uint64_t *sends, *recvs;   /* (P) each: number of messages started to, from each peer */
    int *ranks;                /* (P): each member's rank in the world */
    tshi_compose_op *first;    /* list of ops, the oldest first */
};

/* The backend's comm, and the groups that this rank has in it. */
struct tshi_compose_world {
    tsh_comm_ops ops;           /* functions of the composed comms */
    tsh_comm messages;          /* the backend's comm, of SEND and RECV only; owned */
    int64_t timeout;            /* default time limit in ns */
    int open_comms;             /* number of this rank's comms that are not closed */
    /* splits: number of splits that this rank has started; made: the id that it proposed in the
     * last one */
    uint64_t splits, made;
    tshi_compose_group *groups; /* list of groups, the newest first */
    size_t report_bytes;        /* bytes of one report with its marks and awaited ranks */
    tshb_wait_report **report; /* per rank of the world: its last report; NULL: not known to wait */
    tshb_wait_report *incoming; /* memory of the report being received, then of one per rank */
    tshb_coll_search *search;   /* for the search for cycles: one entry per rank of the world */
};

/* Returns the world's error code as the backend knows it; TSH_OK: no error. */
static tsh_result tshi_compose_code(tshi_compose_world *world) {
    return world->messages.ops->status(&world->messages, NULL);
}

/* Raises an error: makes it the world's, which every rank gets, unless the world has failed. */
static void tshi_compose_raise(tshi_compose_world *world, const tsh_error *error) {
    if (tshi_compose_code(world) == TSH_OK) world->messages.ops->abort(&world->messages, error);
}

/* Raises the error that this rank has no memory. Returns TSH_ERR_MEMORY. */
static tsh_result tshi_compose_no_memory(tshi_compose_world *world) {
    tsh_error error;
    (void)tsh_error_set(&error, TSH_ERR_MEMORY, world->messages.rank,
                        "rank %d has no memory for a collective", world->messages.rank);
    tshi_compose_raise(world, &error);
    return TSH_ERR_MEMORY;
}

/* Returns the bytes of a header with its counts. */
static size_t tshi_compose_header_bytes(const tshi_compose_group *group) {
    return sizeof(tshi_compose_header) + 2 * (size_t)group->size * sizeof(int64_t);
}

/* Returns rank r's header in op. In the op of a message, r = 0 is the SEND's, r = 1 the RECV's. */
static tshi_compose_header *tshi_compose_header_of(const tshi_compose_op *op, int r) {
    size_t bytes = tshi_compose_header_bytes(op->group) * (size_t)r;
    return (tshi_compose_header *)(void *)(op->headers + bytes);
}

/* ---- sending and receiving ---- */

/* Returns the descriptor of a SEND to, or of a RECV from, rank `peer` of the world, for the
 * backend. The caller adds buffer and count. */
static tsh_coll tshi_compose_message(tsh_coll_kind kind, int peer, uint64_t seq, tsh_dtype dtype) {
    tsh_coll coll = tsh_coll_make(kind, dtype);
    *(kind == TSH_SEND ? &coll.send_to : &coll.recv_from) = peer;
    coll.seq = seq;
    return coll;
}

/* Returns how many of the `left` elements of a message fit in its next segment. */
static int64_t tshi_compose_segment(int64_t left, tsh_dtype dtype) {
    return tshi_base_min(left, (int64_t)(TSH_MESSAGE_BYTES / tsh_dtype_size(dtype)));
}

/* Sends n elements to rank `to` of the world, in segments. The backend copies the elements, so the
 * caller may overwrite them at once. */
static void tshi_compose_send(tshi_compose_world *world, int to, uint64_t seq, const void *at,
                              int64_t n, tsh_dtype dtype) {
    /* describes one segment after the other */
    tsh_coll coll = tshi_compose_message(TSH_SEND, to, seq, dtype);
    tsh_result result = TSH_OK;
    tsh_error error;
    coll.send = at;
    for (; n > 0 && result == TSH_OK; n -= coll.count) {
        tsh_req req;
        coll.count = tshi_compose_segment(n, dtype);
        result = world->messages.ops->start(&world->messages, &coll, &req);
        coll.send = (const char *)coll.send + (size_t)coll.count * tsh_dtype_size(dtype);
    }
    if (result == TSH_OK) return;
    (void)tsh_error_set(&error, result, world->messages.rank, "rank %d cannot send to rank %d: %s",
                        world->messages.rank, to, tsh_result_text(result));
    tshi_compose_raise(world, &error);
}

/* Returns the seq of a group's messages on a channel, by which the backend matches them. */
static uint64_t tshi_compose_seq(const tshi_compose_group *group, tshi_compose_channel channel) {
    return group->id * TSHI_COMPOSE_CHANNELS + (uint64_t)channel;
}

/* Adds a receive of n elements (no receive if n is 0) from a rank of the group to those that op
 * waits for. */
static void tshi_compose_post_recv(tshi_compose_op *op, int peer, tshi_compose_channel channel,
                                   void *at, int64_t n, tsh_dtype dtype) {
    tsh_coll recv = tshi_compose_message(TSH_RECV, op->group->ranks[peer],
                                         tshi_compose_seq(op->group, channel), dtype);
    recv.recv = at;
    recv.count = n;
    if (n > 0) op->recv[op->recvs++] = recv;
}

/* Raises the error that rank `lost` is gone while this rank waits for it in op. */
static void tshi_compose_lost(const tshi_compose_op *op, int lost) {
    const tshi_compose_group *group = op->group;
    char text[TSHI_COLL_TEXT] = "";
    tsh_error error;
    tshb_coll_where(&op->coll, group->size, op->number, group->id, text, sizeof text);
    (void)tsh_error_set(&error, TSH_ERR_LOST, lost,
                        "rank %d is gone while rank %d waits for it in %s", lost,
                        group->ranks[group->rank], text);
    tshi_compose_raise(group->world, &error);
}

/* Receives the segments that have arrived. Returns 1 if the message is complete. */
static int tshi_compose_receive(const tshi_compose_op *op, tsh_coll *recv) {
    tsh_comm *messages = &op->group->world->messages;
    while (recv->count > 0) {
        tsh_coll next = *recv; /* describes the next segment */
        tsh_req again = 0;
        tsh_result result;
        next.count = tshi_compose_segment(recv->count, recv->dtype);
        result = messages->ops->start(messages, &next, &again);
        if (result == TSH_ERR_LOST) tshi_compose_lost(op, recv->recv_from);
        if (result != TSH_OK || again) return 0; /* again: has not arrived yet */
        recv->count -= next.count;
        recv->recv = (char *)recv->recv + (size_t)next.count * tsh_dtype_size(recv->dtype);
    }
    return 1;
}

/* Receives what has arrived for op. Returns 1 if op has no receive left. */
static int tshi_compose_arrived(tshi_compose_op *op) {
    for (int i = 0; i < op->recvs;) {
        if (tshi_compose_receive(op, &op->recv[i]))
            /* the last receive takes the place of this one */
            op->recv[i] = op->recv[--op->recvs];
        else
            i++;
    }
    return op->recvs == 0;
}

/* ---- headers ---- */

/* Sends this rank's header for op to the peer of a message, or to all other ranks, and posts
 * receives of their headers. */
static void tshi_compose_send_header(tshi_compose_op *op, const tshb_ticket *ticket) {
    tshi_compose_group *group = op->group;
    const tsh_coll *coll = &op->coll;
    int64_t words = (int64_t)(tshi_compose_header_bytes(group) / sizeof(int64_t));
    int message = op->peer >= 0, n = group->size; /* message: 1: op is a SEND or a RECV */
    tshi_compose_header *header = tshi_compose_header_of(op, message ? !op->sends : group->rank);
    int64_t *counts = (int64_t *)(void *)(header + 1);            /* elements sent, then received */
    /* its: the channel of the peer's header */
    tshi_compose_channel mine = TSHI_COMPOSE_HEADERS, its = mine;
    if (message) {
        mine = op->sends ? TSHI_COMPOSE_SENDS : TSHI_COMPOSE_RECVS;
        its = op->sends ? TSHI_COMPOSE_RECVS : TSHI_COMPOSE_SENDS;
    }
    header->call.coll = *coll;
    header->call.digest = tshb_coll_digest(coll, n);
    header->call.rank = group->ranks[group->rank];
    header->call.counts = tshi_coll_rows(coll->kind) ? n : 0;
    if (ticket) header->ticket = *ticket; /* only a split has a ticket */
    header->made = group->world->made;
    if (coll->kind == TSH_ALLTOALL) memcpy(counts, coll->send_counts, (size_t)n * sizeof *counts);
    if (tshi_coll_rows(coll->kind))
        memcpy(counts + n, coll->recv_counts, (size_t)n * sizeof *counts);
    for (int i = 0; i < n; i++) {
        int r = (group->rank + i) % n; /* every rank begins with a different peer */
        if (message ? r != op->peer : r == group->rank) continue;
        tshi_compose_send(group->world, group->ranks[r], tshi_compose_seq(group, mine), header,
                          words, TSH_I64);
        tshi_compose_post_recv(op, r, its, tshi_compose_header_of(op, message ? op->sends : r),
                               words, TSH_I64);
    }
}

/* For tshb_calls_match: copies rank r's call from its header. Returns 1: r has made a call. */
static int tshi_compose_called(const void *user, int r, tshb_call *out) {
    const tshi_compose_op *op = (const tshi_compose_op *)user;
    const tshi_compose_header *header = tshi_compose_header_of(op, r);
    *out = header->call;
    out->coll.send_counts = (const int64_t *)(const void *)(header + 1);
    out->coll.recv_counts = out->coll.send_counts + op->group->size;
    return 1;
}

/* Returns 1 if the calls in all headers match. Else raises the error, and returns 0. */
static int tshi_compose_match(const tshi_compose_op *op) {
    const tshi_compose_group *group = op->group;
    tsh_error error;
    if (op->peer >= 0) {
        const tshb_call *sent = &tshi_compose_header_of(op, 0)->call;
        const tshb_call *wanted = &tshi_compose_header_of(op, 1)->call;
        if (sent->digest == wanted->digest) return 1;
        tshb_message_mismatch(&sent->coll, &wanted->coll, sent->rank, wanted->rank, op->number,
                              group->id, &error);
    } else if (tshb_calls_match(tshi_compose_called, op, group->size, op->number, group->id,
                                &error)) {
        return 1;
    }
    tshi_compose_raise(group->world, &error);
    return 0;
}

/* ---- data ---- */

/* Plans the round that starts: fills op->part, and op->to and op->from with the number of elements
 * for and from each rank. An all-reduce is a reduce-scatter of its chunks, then an all-gather; a
 * broadcast is an all-gather in which only the root has elements. */
static void tshi_compose_plan(tshi_compose_op *op) {
    const tsh_coll *coll = &op->coll;
    tsh_coll *part = &op->part;
    int me = op->group->rank, n = op->group->size;
    *part = *coll;
    if (!tshi_coll_rows(coll->kind)) part->recv_counts = op->counts;
    if (coll->kind != TSH_ALLTOALL) part->send_counts = part->recv_counts;
    if (coll->kind == TSH_BROADCAST) {
        part->kind = TSH_ALLGATHER;
        part->send = coll->recv;
        op->counts[coll->root] = coll->count; /* the other counts are 0 */
    } else if (coll->kind == TSH_ALLREDUCE) {
        int64_t start = tshb_coll_chunk(coll->count, n, me); /* where this rank's chunk starts */
        char *chunk = (char *)coll->recv + (size_t)start * tsh_dtype_size(coll->dtype);
        part->kind = op->round ? TSH_ALLGATHER : TSH_REDUCE_SCATTER;
        part->send = op->round ? chunk : coll->send;
        part->recv = op->round ? coll->recv : chunk;
        for (int k = 0; k < n; k++) /* the lengths of the chunks */
            op->counts[k] = tshb_coll_chunk(coll->count, n, k + 1) -
                            tshb_coll_chunk(coll->count, n, k);
    }
    for (int k = 0; k < n; k++) { /* index me: the same number for every k */
        op->to[k] = part->blocks * part->send_counts[part->kind == TSH_ALLGATHER ? me : k];
        op->from[k] = part->blocks * part->recv_counts[part->kind == TSH_REDUCE_SCATTER ? me : k];
    }
}

/* Copies rank k's shard between `whole`, a buffer of `blocks` rows with counts[0] + counts[1] + ...
 * elements each, and `packed`, where its blocks * counts[k] elements are without gaps. unpacks 0:
 * to packed; 1: to whole. */
static void tshi_compose_rows(const tshi_compose_op *op, const int64_t *counts, int k, void *whole,
                              char *packed, int unpacks) {
    size_t width = tsh_dtype_size(op->coll.dtype), n = (size_t)counts[k] * width;
    size_t row = (size_t)tshb_coll_before(counts, op->group->size) * width; /* bytes of a row */
    char *at = (char *)whole + (size_t)tshb_coll_before(counts, k) * width; /* rank k's first row */
    for (int64_t b = 0; b < op->coll.blocks && n; b++, at += row, packed += n)
        memcpy(unpacks ? at : packed, unpacks ? packed : at, n);
}

/* Copies the elements that rank k gets from this rank to `packed`, without gaps. */
static void tshi_compose_pack(const tshi_compose_op *op, int k, char *packed) {
    const tsh_coll *part = &op->part;
    void *send = (void *)(uintptr_t)part->send; /* const is cast away: only read */
    if (part->kind != TSH_ALLGATHER)
        tshi_compose_rows(op, part->send_counts, k, send, packed, 0);
    else if (op->to[k])
        memcpy(packed, send, (size_t)op->to[k] * tsh_dtype_size(part->dtype));
}

/* Starts a round: packs and sends this rank's parts to all ranks, and posts receives of theirs. */
static void tshi_compose_round(tshi_compose_op *op) {
    const tshi_compose_group *group = op->group;
    size_t width = tsh_dtype_size(op->coll.dtype), out, in; /* out, in: in bytes */
    tshi_compose_plan(op);
    out = (size_t)tshb_coll_before(op->to, group->size) * width;
    in = (size_t)tshb_coll_before(op->from, group->size) * width;
    free(op->out);
    op->out = (char *)malloc(out + in + 1); /* + 1: malloc(0) may return NULL */
    op->state = TSHI_COMPOSE_MOVING;
    if (!op->out) {
        (void)tshi_compose_no_memory(group->world);
        return;
    }
    op->in = op->out + out;
    for (int i = 0; i < group->size; i++) {
        int k = (group->rank + i) % group->size; /* k begins with this rank */
        char *from = op->out + (size_t)tshb_coll_before(op->to, k) * width;
        char *into = op->in + (size_t)tshb_coll_before(op->from, k) * width;
        tshi_compose_pack(op, k, from);
        if (i == 0) { /* this rank's part for itself */
            if (op->from[k]) memcpy(into, from, (size_t)op->from[k] * width);
            continue;
        }
        tshi_compose_send(group->world, group->ranks[k], tshi_compose_seq(group, TSHI_COMPOSE_DATA),
                          from, op->to[k], op->coll.dtype);
        tshi_compose_post_recv(op, k, TSHI_COMPOSE_DATA, into, op->from[k], op->coll.dtype);
    }
}

/* For tshb_coll_sum: returns the elements that rank r has sent to this rank in this round. */
static const void *tshi_compose_part(const void *user, int r) {
    const tshi_compose_op *op = (const tshi_compose_op *)user;
    return op->in + (size_t)tshb_coll_before(op->from, r) * tsh_dtype_size(op->coll.dtype);
}

/* Ends a round whose data has arrived: sums it, or copies it to the caller's buffer. */
static void tshi_compose_finish(tshi_compose_op *op) {
    const tsh_coll *part = &op->part;
    int me = op->group->rank, n = op->group->size;
    op->state = TSHI_COMPOSE_DONE; /* unless a second round follows */
    if (part->kind == TSH_REDUCE_SCATTER) {
        if (op->from[me])
            tshb_coll_sum(part->recv, op->from[me], part, n, me, tshi_compose_part, op);
    } else {
        for (int k = 0; k < n; k++)
            tshi_compose_rows(op, part->recv_counts, k, part->recv,
                              (char *)(uintptr_t)tshi_compose_part(op, k), 1);
    }
    if (op->coll.kind == TSH_ALLREDUCE && !op->round++) tshi_compose_round(op);
}

/* ---- ops ---- */

/* Appends an op to the group and sends its header. coll: a collective, a message, half of a
 * SENDRECV, or the closing of the group; ticket: for a split, else NULL. Returns NULL if there is
 * no memory; then the world has failed. */
static tshi_compose_op *tshi_compose_add(tshi_compose_group *group, const tsh_coll *coll,
                                         const tshb_ticket *ticket) {
    size_t n = (size_t)group->size, recv = n * sizeof(tsh_coll);
    size_t counts = 3 * n * sizeof(int64_t);
    size_t headers = (n < 2 ? 2 : n) * tshi_compose_header_bytes(group); /* a message has two */
    tshi_compose_op **at = &group->first;
    tshi_compose_op *op = (tshi_compose_op *)calloc(1, sizeof(tshi_compose_op) + recv + counts +
                                                           headers);
    if (!op) {
        (void)tshi_compose_no_memory(group->world);
        return NULL;
    }
    op->group = group;
    op->recv = (tsh_coll *)(void *)(op + 1);
    op->counts = (int64_t *)(void *)(op->recv + n);
    op->to = op->counts + n;
    op->from = op->to + n;
    op->headers = (char *)(op->from + n);
    op->coll = *coll;
    op->id = ++group->ids;
    op->deadline = tshb_deadline(coll->timeout_ns, group->world->timeout);
    op->sends = coll->kind == TSH_SEND;
    op->peer = op->sends ? coll->send_to : coll->kind == TSH_RECV ? coll->recv_from : -1;
    op->number = op->sends       ? group->sends[op->peer]++
                 : op->peer >= 0 ? group->recvs[op->peer]++
                                 : group->started++;
    while (*at) at = &(*at)->next; /* finds the end of the list */
    *at = op;
    tshi_compose_send_header(op, ticket);
    return op;
}

/* Returns 1 if op, and the other half of a SENDRECV, is done. */
static int tshi_compose_is_done(const tshi_compose_op *op) {
    return op->state == TSHI_COMPOSE_DONE && (!op->other || op->other->state == TSHI_COMPOSE_DONE);
}

/* Removes op, with its other half, from its group and frees it. */
static void tshi_compose_release(tshi_compose_op *op) {
    tshi_compose_op **at = &op->group->first;
    while (*at != op) at = &(*at)->next;
    *at = op->next;
    if (op->other) tshi_compose_release(op->other);
    free(op->out);
    free(op);
}

/* Returns 1 if the data that arrives next on op's channels belongs to op: no older op on the same
 * channels (collectives, or messages to or from the same peer) still receives. Headers and data
 * have channels of their own. */
static int tshi_compose_is_next(const tshi_compose_op *op) {
    for (const tshi_compose_op *b = op->group->first; b != op; b = b->next) {
        if (b->peer != op->peer || b->sends != op->sends || b->state == TSHI_COMPOSE_DONE) continue;
        if (op->state != TSHI_COMPOSE_MATCHING || b->state == TSHI_COMPOSE_MATCHING) return 0;
    }
    return 1;
}

/* Takes the steps of op that are possible now, without waiting. */
static void tshi_compose_step(tshi_compose_op *op) {
    const tsh_coll *coll = &op->coll;
    if (op->state == TSHI_COMPOSE_MATCHING && tshi_compose_is_next(op) &&
        tshi_compose_arrived(op) && tshi_compose_match(op))
        op->state = TSHI_COMPOSE_QUEUED;
    if (op->state == TSHI_COMPOSE_QUEUED && tshi_compose_is_next(op)) {
        op->state = TSHI_COMPOSE_MOVING;
        if (coll->kind == TSH_SEND)
            tshi_compose_send(op->group->world, op->group->ranks[op->peer],
                              tshi_compose_seq(op->group, TSHI_COMPOSE_BODIES), coll->send,
                              coll->count, coll->dtype);
        else if (coll->kind == TSH_RECV)
            tshi_compose_post_recv(op, op->peer, TSHI_COMPOSE_BODIES, coll->recv, coll->count,
                                   coll->dtype);
        else if (coll->kind < TSH_BARRIER) /* a barrier has no data */
            tshi_compose_round(op);
    }
    while (op->state == TSHI_COMPOSE_MOVING && tshi_compose_arrived(op)) {
        if (op->peer >= 0 || coll->kind >= TSH_BARRIER) /* a message, or no data */
            op->state = TSHI_COMPOSE_DONE;
        else
            tshi_compose_finish(op);
    }
}

/* ========================================================================== */
/* >>compose-wait                              MARK: - compose-wait (private) */
/* Groups and waiting of composed collectives, and the functions of their     */
/* comm.                                                                      */
/* Needs: >>compose.                                                          */
/* ========================================================================== */

/* Returns a group with its arrays, in one block of memory; NULL: no memory. */
static tshi_compose_group *tshi_compose_group_new(tshi_compose_world *world, int size) {
    size_t n = (size_t)size;
    tshi_compose_group *group = (tshi_compose_group *)calloc(
        1, sizeof *group + 2 * n * sizeof(uint64_t) + n * sizeof(int));
    if (!group) return NULL;
    group->world = world;
    group->size = size;
    group->sends = (uint64_t *)(void *)(group + 1);
    group->recvs = group->sends + n;
    group->ranks = (int *)(void *)(group->recvs + n);
    return group;
}

/* Removes a group from its world and frees it with its ops. */
static void tshi_compose_group_free(tshi_compose_group *group) {
    tshi_compose_group **at = &group->world->groups;
    while (group->first) tshi_compose_release(group->first);
    while (*at != group) at = &(*at)->next;
    *at = group->next;
    free(group);
}

/* Adds a group, whose ranks are filled in, to its world, and sets *out to this rank's comm. */
static void tshi_compose_open(tshi_compose_group *group, uint64_t id, tsh_comm *out) {
    tshi_compose_world *world = group->world;
    group->id = id;
    while (group->ranks[group->rank] != world->messages.rank) group->rank++;
    group->next = world->groups;
    world->groups = group;
    world->open_comms++;
    *out = tshb_comm_make(&world->ops, group, group->rank, group->size, id);
}

/* ---- waiting ---- */

/* Raises an error if rank r, whose report is new, waits in a cycle. */
static void tshi_compose_check_cycle(tshi_compose_world *world, int r) {
    tsh_error error;
    if (tshb_wait_cycle(world->report, world->messages.size, r, world->search, &error))
        tshi_compose_raise(world, &error);
}

/* Returns the memory for rank r's report, and sets report[r] to it: r is known to wait. */
static tshb_wait_report *tshi_compose_report_of(tshi_compose_world *world, int r) {
    world->report[r] = (tshb_wait_report *)(void *)((char *)world->incoming +
                                                    (size_t)(r + 1) * world->report_bytes);
    return world->report[r];
}

/* Receives the reports that have arrived from other ranks, at most one per rank. */
static void tshi_compose_read_reports(tshi_compose_world *world) {
    tsh_comm *messages = &world->messages;
    for (int r = 0; r < messages->size && tshi_compose_code(world) == TSH_OK; r++) {
        tsh_coll coll = tshi_compose_message(TSH_RECV, r, TSHI_COMPOSE_REPORTS, TSH_I64);
        tsh_req again = 0;
        coll.recv = world->incoming;
        coll.count = (int64_t)(world->report_bytes / sizeof(int64_t));
        if (r == messages->rank || messages->ops->start(messages, &coll, &again) != TSH_OK || again)
            continue; /* not arrived, or r is gone, perhaps after an orderly shutdown */
        memcpy(tshi_compose_report_of(world, r), world->incoming, world->report_bytes);
        tshi_compose_check_cycle(world, r);
    }
}

/* Takes every step that is possible now, on all comms of this rank. */
static void tshi_compose_advance(tshi_compose_world *world) {
    world->messages.ops->progress(&world->messages);
    tshi_compose_read_reports(world);
    for (tshi_compose_group *group = world->groups, *next; group; group = next) {
        next = group->next;
        for (tshi_compose_op *op = group->first; op; op = op->next) {
            if (tshi_compose_code(world) != TSH_OK) return;
            tshi_compose_step(op);
        }
        if (group->closing && group->first && group->first->state == TSHI_COMPOSE_DONE)
            tshi_compose_group_free(group);
    }
}

/* Writes marks: how many collectives this rank has started in each group, and how many messages
 * with each peer. Returns the number of marks. */
static int tshi_compose_marks(const tshi_compose_world *world, tshb_wait_mark *mark) {
    int n = 0;
    for (const tshi_compose_group *g = world->groups; g; g = g->next) {
        for (int peer = -1; peer < g->size && n < TSHI_COMPOSE_MARKS; peer++) {
            if (peer >= 0 && !g->sends[peer] && !g->recvs[peer]) continue; /* no messages */
            mark[n].group = g->id;
            mark[n].peer = peer < 0 ? -1 : g->ranks[peer];
            mark[n].sends = peer < 0 ? g->started : g->sends[peer];
            mark[n++].recvs = peer < 0 ? 0 : g->recvs[peer];
        }
    }
    return n;
}

/* Fills r with the report that this rank waits in op. */
static void tshi_compose_fill_report(const tshi_compose_op *op, tshb_wait_report *r) {
    const tshi_compose_group *group = op->group;
    int *awaited;
    memset(r, 0, group->world->report_bytes);
    r->group = group->id;
    r->seq = op->peer >= 0 ? 0 : op->number; /* number of the collective; 0: a message */
    r->pairwise = op->peer >= 0;
    r->send_to = r->recv_from = -1; /* -1: no message is awaited */
    r->marks = tshi_compose_marks(group->world, (tshb_wait_mark *)(void *)(r + 1));
    awaited = (int *)(void *)((tshb_wait_mark *)(void *)(r + 1) + r->marks);
    if (op->peer >= 0) {
        awaited[0] = group->ranks[op->peer]; /* a message awaits its peer only */
        *(op->sends ? &r->send_to : &r->recv_from) = awaited[0];
        *(op->sends ? &r->send_number : &r->recv_number) = op->number;
    } else {
        memcpy(awaited, group->ranks, (size_t)group->size * sizeof *awaited);
    }
    r->awaited = op->peer >= 0 ? 1 : group->size;
    tshb_coll_where(&op->coll, group->size, op->number, group->id, r->text, sizeof r->text);
}

/* Sends all ranks a report that this rank waits in op, and looks for a cycle. */
static void tshi_compose_send_report(const tshi_compose_op *op) {
    tshi_compose_world *world = op->group->world;
    int me = world->messages.rank;
    tshi_compose_fill_report(op, tshi_compose_report_of(world, me));
    for (int to = 0; to < world->messages.size; to++)
        if (to != me)
            tshi_compose_send(world, to, TSHI_COMPOSE_REPORTS, world->report[me],
                              (int64_t)(world->report_bytes / sizeof(int64_t)), TSH_I64);
    tshi_compose_check_cycle(world, me);
}

/* Raises the error that op has timed out, and names the ranks that op waits for. */
static void tshi_compose_time_out(const tshi_compose_op *op) {
    const tshi_compose_group *group = op->group;
    tsh_error error;
    (void)tsh_error_set(&error, TSH_ERR_TIMEOUT, -1, "rank %d ran out of time in ",
                        group->ranks[group->rank]);
    tshb_coll_where(&op->coll, group->size, op->number, group->id, error.message,
                    sizeof error.message);
    tsh_text_add(error.message, sizeof error.message, "; %s:",
                 op->state == TSHI_COMPOSE_MATCHING ? "absent ranks"
                                                    : "ranks that have not finished");
    for (int r = 0; r < group->size; r++) {
        int i = 0;
        /* looks for a receive from r */
        while (i < op->recvs && op->recv[i].recv_from != group->ranks[r]) i++;
        if (i == op->recvs) continue;                     /* op does not wait for r */
        if (error.rank < 0) error.rank = group->ranks[r]; /* the first one is blamed */
        tsh_text_add(error.message, sizeof error.message, " %d", group->ranks[r]);
    }
    if (error.rank < 0) tsh_text_add(error.message, sizeof error.message, " none");
    tshi_compose_raise(group->world, &error);
}

/* Waits until op is done or the world has failed. Returns the world's error code. A rank that has
 * waited for 20 ms sends a report, so that cycles are found. */
static tsh_result tshi_compose_await(tshi_compose_op *op) {
    tshi_compose_world *world = op->group->world;
    int64_t begin = tsh_now();
    int reported = 0; /* 1: the report has been sent */
    for (;;) {
        int64_t now;
        tsh_result code;
        tshi_compose_advance(world);
        code = tshi_compose_code(world);
        if (code != TSH_OK || tshi_compose_is_done(op)) return code;
        now = tsh_now();
        if (now >= op->deadline) tshi_compose_time_out(op);
        if (now - begin > 20 * TSHI_COMPOSE_MS && !reported++)
            tshi_compose_send_report(op->state == TSHI_COMPOSE_DONE ? op->other : op);
        world->messages.ops->idle(&world->messages, TSHI_COMPOSE_MS);
    }
}

/* ---- the composed comm's tsh_comm_ops ---- */

static tshi_compose_group *tshi_compose_group_of(const tsh_comm *comm) {
    return (tshi_compose_group *)comm->impl;
}

/* Returns the op of a request; NULL: the group has none. */
static tshi_compose_op *tshi_compose_find(const tshi_compose_group *group, tsh_req req) {
    tshi_compose_op *op = group->first;
    while (op && op->id != req) op = op->next;
    return op;
}

/* Starts a collective, or both halves of a SENDRECV: op and op->other. */
static tsh_result tshi_compose_start(tsh_comm *comm, const tsh_coll *coll, tsh_req *req) {
    tshi_compose_group *group = tshi_compose_group_of(comm);
    tsh_result code = tshi_compose_code(group->world);
    tsh_coll half = coll->kind == TSH_SENDRECV ? tshb_coll_half(coll, 1) : *coll;
    tshi_compose_op *op;
    if (code != TSH_OK) return code; /* the world has failed */
    op = tshi_compose_add(group, &half, NULL);
    if (!op) return TSH_ERR_MEMORY;
    if (coll->kind == TSH_SENDRECV) {
        half = tshb_coll_half(coll, 0);
        op->other = tshi_compose_add(group, &half, NULL);
        if (!op->other) return TSH_ERR_MEMORY; /* the world has failed, too */
    }
    *req = op->id;
    return TSH_OK;
}

static tsh_result tshi_compose_wait(tsh_comm *comm, tsh_req req) {
    tshi_compose_op *op = tshi_compose_find(tshi_compose_group_of(comm), req);
    tsh_result code;
    if (!op) return TSH_ERR_ARGUMENT;
    code = tshi_compose_await(op);
    tshi_compose_release(op); /* frees op also after an error */
    return code;
}

static tsh_result tshi_compose_test(tsh_comm *comm, tsh_req req, int *done) {
    tshi_compose_world *world = tshi_compose_group_of(comm)->world;
    tshi_compose_op *op = tshi_compose_find(tshi_compose_group_of(comm), req);
    tsh_result code;
    if (!op) return TSH_ERR_ARGUMENT;
    tshi_compose_advance(world);
    if (!tshi_compose_is_done(op) && tsh_now() >= op->deadline) tshi_compose_time_out(op);
    code = tshi_compose_code(world);
    *done = code != TSH_OK || tshi_compose_is_done(op);
    return code;
}

static void tshi_compose_progress(tsh_comm *comm) {
    tshi_compose_advance(tshi_compose_group_of(comm)->world);
}

static tsh_result tshi_compose_status(tsh_comm *comm, tsh_error *error) {
    tsh_comm *messages = &tshi_compose_group_of(comm)->world->messages;
    return messages->ops->status(messages, error);
}

static void tshi_compose_abort(tsh_comm *comm, const tsh_error *why) {
    tsh_comm *messages = &tshi_compose_group_of(comm)->world->messages;
    tsh_error error = *why;
    if (error.rank < 0) error.rank = messages->rank; /* -1: the error of this rank */
    messages->ops->abort(messages, &error);
}

/* Returns the new group of this rank's color, from the colors and keys that all ranks have sent in
 * the headers of a split. Sets *id to the id that the lowest of its ranks in the old group has
 * proposed. NULL: no memory. */
static tshi_compose_group *tshi_compose_color_group(const tshi_compose_op *op, int color,
                                                    uint64_t *id) {
    const tshi_compose_group *group = op->group;
    const tshi_compose_header *header = tshi_compose_header_of(op, 0);
    tshi_compose_group *made = NULL;
    int *order = (int *)calloc((size_t)group->size, sizeof *order), n, first = 0;
    if (!order) return NULL;
    n = tshb_split_order(&header->ticket, tshi_compose_header_bytes(group), group->size, color,
                         order);
    made = tshi_compose_group_new(group->world, n);
    for (int i = 0; made && i < n; i++) made->ranks[i] = group->ranks[order[i]];
    while (tshi_compose_header_of(op, first)->ticket.color != color) first++;
    *id = tshi_compose_header_of(op, first)->made;
    free(order);
    return made;
}

static tsh_result tshi_compose_split(tsh_comm *comm, int color, int key, tsh_comm *out) {
    tshi_compose_group *group = tshi_compose_group_of(comm), *made = NULL; /* made: the new group */
    tshi_compose_world *world = group->world;
    tsh_result code = tshi_compose_code(world);
    tsh_coll coll = tsh_coll_make(TSH_SPLIT, TSH_F32);
    tshb_ticket ticket = {color, key};
    tshi_compose_op *op;
    uint64_t id = 0;
    if (code != TSH_OK) return code;
    /* an id that no other group has */
    world->made = 1 + (uint64_t)world->messages.rank +
                  (uint64_t)world->messages.size * ++world->splits;
    world->made |= out->id; /* adds the new group's name to its id */
    op = tshi_compose_add(group, &coll, &ticket);
    if (!op) return TSH_ERR_MEMORY;
    code = tshi_compose_await(op);
    if (code == TSH_OK && color >= 0) made = tshi_compose_color_group(op, color, &id);
    tshi_compose_release(op);
    if (code != TSH_OK || color < 0) return code;
    if (!made) return tshi_compose_no_memory(world);
    tshi_compose_open(made, id, out);
    return TSH_OK;
}

/* Closes a group. Closing is sent as a collective of its own kind, which no rank waits for: its
 * headers inform ranks that call something else in the group. A rank that closes its last comm
 * waits until all ranks have closed theirs, or the world has failed. */
static void tshi_compose_close(tsh_comm *comm) {
    tshi_compose_group *group = tshi_compose_group_of(comm);
    tshi_compose_world *world = group->world;
    tsh_coll coll = tsh_coll_make(TSH_BARRIER, TSH_F32);
    char name[TSHI_COLL_NAME];
    tsh_error error;
    coll.kind = TSH_COLL_KINDS; /* not a collective: this rank closes the group */
    if (group->first && tshi_compose_code(world) == TSH_OK) {
        (void)tsh_error_set(&error, TSH_ERR_LOST, world->messages.rank,
                            "rank %d closed %s before it waited for its requests",
                            world->messages.rank, tshb_group_text(group->id, name, sizeof name));
        tshi_compose_raise(world, &error);
    }
    if (tshi_compose_code(world) == TSH_OK && tshi_compose_add(group, &coll, NULL))
        group->closing = 1; /* the group is freed when the close is done */
    tshi_compose_advance(world);
    comm->impl = NULL;
    if (--world->open_comms > 0) return;                          /* this rank has other comms */
    while (world->groups && tshi_compose_code(world) == TSH_OK) { /* until all groups are closed */
        if (tsh_now() >= world->groups->first->deadline)
            tshi_compose_time_out(world->groups->first);
        world->messages.ops->idle(&world->messages, TSHI_COMPOSE_MS);
        tshi_compose_advance(world);
    }
    while (world->groups) tshi_compose_group_free(world->groups);
    world->messages.ops->close(&world->messages);
    free(world);
}

TSH_API tsh_result tshb_comm_compose(const tsh_comm *messages, tsh_comm *out, tsh_error *error) {
    static const tsh_comm_ops all = TSH_COMM_OPS(tshi_compose, "", TSH_CAP_ORDERED);
    size_t n = (size_t)messages->size;                          /* ranks of the world */
    size_t marks = TSHI_COMPOSE_MARKS * sizeof(tshb_wait_mark); /* bytes of the marks */
    size_t report = (sizeof(tshb_wait_report) + marks + n * sizeof(int) + 7) / 8 * 8;
    tshi_compose_world *world = (tshi_compose_world *)calloc(
        1, sizeof *world + (n + 1) * report + n * (sizeof *world->report + sizeof *world->search));
    tshi_compose_group *group = tshi_compose_group_new(world, messages->size);
    if (!world || !group) (void)tsh_error_set(error, TSH_ERR_MEMORY, -1, "no memory for a world");
    if (!world || !group || !tshb_timeout(0, "", &world->timeout, error)) {
        free(world);
        free(group);
        return error->code;
    }
    world->messages = *messages;
    world->report_bytes = report;
    world->incoming = (tshb_wait_report *)(void *)(world + 1);
    world->report = (tshb_wait_report **)(void *)((char *)world->incoming + (n + 1) * report);
    world->search = (tshb_coll_search *)(void *)(world->report + n);
    for (int r = 0; r < messages->size; r++) group->ranks[r] = r;
    world->ops = all;
    world->ops.name = messages->ops->name;
    world->ops.caps |= messages->ops->caps;
    tshi_compose_open(group, 1, out); /* 1: id of the world's group */
    return TSH_OK;
}

#undef TSHI_COMPOSE_MS

#ifdef __cplusplus
}
#endif
#endif /* TSHARD_BACKEND_IMPLEMENTED */
