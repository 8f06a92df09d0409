/* ========================================================================== */
/* >>comm-api                                                MARK: - comm-api */
/* Groups of ranks, what a backend must do, and the collectives.              */
/* Needs: >>types.                                                            */
/* ========================================================================== */

/* HOW A BACKEND WORKS
 *
 * A backend is a const table of functions (tsh_comm_ops) and a tsh_comm per group. The
 * public entry points (tsh_allreduce and so on) check the arguments, number the call, count it, and
 * hand the descriptor (tsh_coll) on.
 *
 *  1. start(comm, coll, req) posts a collective and never waits for a peer. It copies the
 * descriptor; counts and buffers stay the caller's, valid and untouched until wait. At least 64 may
 * be in flight on one comm (tsh_comm counts them; past 64 start is refused), each is waited for
 * exactly once, in any order.
 *  2. All ranks of a group start the same collectives in the same order; between groups any order
 * goes. SEND, RECV and SENDRECV are numbered per pair of ranks and direction instead. split is
 * posted and checked like a collective. It ORs out->id, which has the name of the new group
 * (tsh_group_text) or is 0, into the new group's id.
 *  3. test and progress never block. A wait on any request progresses every outstanding request of
 * this rank, on all comms, so that no order of waits can deadlock.
 *  4. No call returns, not even with an error, while a peer or a pending write may still touch its
 * buffers.
 *  5. Order of sums: element e in chunk k (torch.chunk's rule over the flat buffer; in
 * REDUCE_SCATTER rank k's piece by counts) is x[k+1] + x[k+2] + ... + x[k+P], indices mod P, left
 * to right: a ring's order. Segmentation, message size and threads never change bits. AVG divides
 * the finished sum by P once, floats only. Integers wrap. NaN in any rank gives NaN, for MIN and
 * MAX too; MIN and MAX of equal values keep the left one.
 *  6. Zero is a legal count everywhere. recv may equal send in ALLREDUCE; in ALLGATHER, send may
 * point to its own place in recv. Other overlaps are errors of the caller.
 *  7. The world's error is the first one (a mismatch, a lost rank, an abort). With it the world and
 * every group split from it have failed, and every rank that is in a call, or makes one later, gets
 * the same code, rank and sentence. status returns it without blocking. abort may be called from
 * any thread.
 *  8. close releases the comm; its requests must have been waited for, or the world must have
 * failed.
 *  9. A backend may do no more than bring messages from rank to rank of a world, also from a rank
 * to itself: tsh_comm_compose makes collectives, groups and errors of that
 * (examples/05_write_a_backend.c). It has start, progress, status, abort, close, and idle, which
 * sleeps until there may be something to do, for ns at most. start gets a SEND or a RECV of at most
 * TSH_MESSAGE_BYTES. A SEND is copied before start returns. A RECV takes the oldest message of its
 * sender with its seq, which has its length. If none has arrived yet, start sets *req to 1 and is
 * called again later; if the sender is gone for good, it returns TSH_ERR_LOST. progress sends and
 * receives without blocking, close sends what is left. status and abort are those of rule 7. */

typedef enum tsh_coll_kind {
    TSH_ALLREDUCE,      /* send count, recv count */
    TSH_ALLGATHER,      /* send recv_counts[rank], recv the sum of recv_counts */
    TSH_REDUCE_SCATTER, /* send the sum of recv_counts, recv recv_counts[rank] */
    TSH_BROADCAST,      /* recv count, from root's recv */
    TSH_ALLTOALL,       /* send send_counts[r] to, recv recv_counts[r] from each r, in order */
    TSH_SEND,           /* send count to send_to */
    TSH_RECV,           /* recv count from recv_from */
    TSH_SENDRECV,       /* both at once: send send_counts[0], recv recv_counts[0] */
    TSH_BARRIER,        /* nothing moves */
    TSH_SPLIT,          /* posted by tsh_split */
    TSH_COLL_KINDS
} tsh_coll_kind;

typedef enum tsh_redop { TSH_SUM, TSH_PROD, TSH_MIN, TSH_MAX, TSH_AVG } tsh_redop;

/* One collective, described. Counts are in elements of dtype. */
typedef struct tsh_coll {
    uint32_t size; /* sizeof(tsh_coll) */
    tsh_coll_kind kind;
    tsh_dtype dtype;
    tsh_redop redop;
    const void *send;
    void *recv;
    int64_t count;
    const int64_t *send_counts, *recv_counts; /* per rank */
    int64_t blocks; /* ALLGATHER, REDUCE_SCATTER, ALLTOALL: rows of counts (an inner dim); 0: 1;
                       of other kinds tsh_start makes it 1 */
    int root, send_to, recv_from, tag; /* -1: none */
    uint64_t seq;                      /* tsh_start numbers the collectives of a group */
    int64_t timeout_ns;                /* from start; 0: the backend's default */
} tsh_coll;

typedef uint64_t tsh_req; /* 0: nothing to wait for */
typedef struct tsh_comm tsh_comm;

#define TSH_COMM_ABI    1u
#define TSH_MESSAGE_BYTES 32768 /* the longest message that rule 9 asks for */
#define TSH_CAP_ORDERED 1u /* sums in the documented order */
#define TSH_CAP_DEATH   2u /* notices a rank that dies      */

typedef struct tsh_comm_ops {
    uint32_t size, abi; /* sizeof(tsh_comm_ops), TSH_COMM_ABI */
    const char *name;
    uint64_t caps;
    tsh_result (*start)(tsh_comm *comm, const tsh_coll *coll, tsh_req *req);
    tsh_result (*test)(tsh_comm *comm, tsh_req req, int *done);
    tsh_result (*wait)(tsh_comm *comm, tsh_req req);
    void (*progress)(tsh_comm *comm);
    tsh_result (*split)(tsh_comm *comm, int color, int key, tsh_comm *out);
    tsh_result (*status)(tsh_comm *comm, tsh_error *error); /* the world's error; TSH_OK: none */
    void (*abort)(tsh_comm *comm, const tsh_error *why);
    void (*close)(tsh_comm *comm);
    void (*idle)(tsh_comm *comm,
                 int64_t ns); /* of a backend of messages only (rule 9); else NULL */
} tsh_comm_ops;

/* The table of a backend that does every kind: its functions are prefix_start, prefix_test and so
 * on. */
#define TSH_COMM_OPS(prefix, name, caps)                                                           \
    {                                                                                              \
        (uint32_t)sizeof(tsh_comm_ops), TSH_COMM_ABI, name, caps, prefix##_start, prefix##_test,   \
            prefix##_wait, prefix##_progress, prefix##_split, prefix##_status, prefix##_abort,     \
            prefix##_close, NULL                                                                   \
    }
/* That of a backend of messages only (rule 9). */
#define TSH_MESSAGE_OPS(prefix, name, caps)                                                        \
    {                                                                                              \
        (uint32_t)sizeof(tsh_comm_ops), TSH_COMM_ABI, name, caps, prefix##_start, NULL, NULL,      \
            prefix##_progress, NULL, prefix##_status, prefix##_abort, prefix##_close,              \
            prefix##_idle                                                                          \
    }

/* What was started, by kind. bytes: what a ring sends per rank (all-reduce 2
 * (P-1)/P n). */
typedef struct tsh_comm_stats {
    uint64_t calls[TSH_COLL_KINDS];
    uint64_t bytes[TSH_COLL_KINDS];
} tsh_comm_stats;

struct tsh_comm {
    const tsh_comm_ops *ops; /* NULL: a group of one, built in */
    void *impl;
    int rank, size;
    uint64_t id; /* the same on all ranks of the group: see tsh_group_text */
    uint64_t next_seq;
    int in_flight;
    tsh_comm_stats stats;
    struct tshi_trace *trace; /* the core's; NULL: none runs */
    tsh_ctx *unchecked; /* set by the core: the ctx whose model the ranks compare before the next
                         * collective; NULL: none */
};

/* -- collectives ------------------------------------------------------------
 * Blocking collectives. Buffers hold `count` elements of dtype; all return when this rank's buffers
 * are free again. Errors: the world's error (TSH_ERR_MISMATCH, LOST, TIMEOUT, ABORTED, MEMORY),
 * whose sentence tsh_comm_error tells, or TSH_ERR_ARGUMENT before anything starts. Each equals the
 * torch.distributed function of its name. */
/* Combines the buffers of all ranks element by element by op; every buffer gets the result. */
TSH_API tsh_result tsh_allreduce(tsh_comm *comm, void *buffer, int64_t count, tsh_dtype dtype,
                                 tsh_redop op);
/* recv holds counts[0] + counts[1] + ... elements, rank order, `blocks` (0: 1) times over. */
TSH_API tsh_result tsh_allgather(tsh_comm *comm, const void *send, void *recv,
                                 const int64_t *counts, int64_t blocks, tsh_dtype dtype);
/* send holds counts[0] + counts[1] + ... elements, `blocks` times over; recv takes the sum over the
 * ranks of this rank's counts[rank] of each block. */
TSH_API tsh_result tsh_reduce_scatter(tsh_comm *comm, const void *send, void *recv,
                                      const int64_t *counts, int64_t blocks, tsh_dtype dtype,
                                      tsh_redop op);
/* root's buffer to all ranks. */
TSH_API tsh_result tsh_broadcast(tsh_comm *comm, void *buffer, int64_t count, tsh_dtype dtype,
                                 int root);
/* send_counts[r] elements to each rank r and recv_counts[r] from it, in rank order, `blocks` times
 * over. */
TSH_API tsh_result tsh_alltoall(tsh_comm *comm, const void *send, const int64_t *send_counts,
                                void *recv, const int64_t *recv_counts, int64_t blocks,
                                tsh_dtype dtype);
/* To or from one rank; tsh_sendrecv does both at once. */
TSH_API tsh_result tsh_send(tsh_comm *comm, const void *buffer, int64_t count, tsh_dtype dtype,
                            int to);
TSH_API tsh_result tsh_recv(tsh_comm *comm, void *buffer, int64_t count, tsh_dtype dtype, int from);
TSH_API tsh_result tsh_sendrecv(tsh_comm *comm, const void *send, int64_t send_count, int to,
                                void *recv, int64_t recv_count, int from, tsh_dtype dtype);
/* Returns when every rank has called it. */
TSH_API tsh_result tsh_barrier(tsh_comm *comm);

/* The general, non-blocking form: fill a descriptor (start from tsh_coll_make), start it, wait for
 * it once. */
TSH_API tsh_coll tsh_coll_make(tsh_coll_kind kind, tsh_dtype dtype);
TSH_API tsh_result tsh_start(tsh_comm *comm, tsh_coll *coll, tsh_req *req);
TSH_API tsh_result tsh_test(tsh_comm *comm, tsh_req req, int *done);
TSH_API tsh_result tsh_wait(tsh_comm *comm, tsh_req req);
TSH_API tsh_result tsh_allreduce_start(tsh_comm *comm, void *buffer, int64_t count, tsh_dtype dtype,
                                       tsh_redop op, tsh_req *req);
TSH_API void tsh_comm_progress(tsh_comm *comm);

/* Ranks of one color form a group, ordered by key, then by rank. color -1: none (out gets size 0).
 * Collective. */
TSH_API tsh_result tsh_split(tsh_comm *comm, int color, int key, tsh_comm *out);
/* The world's error: its code, and the sentence where error is not NULL. Never blocks. */
TSH_API tsh_result tsh_comm_error(tsh_comm *comm, tsh_error *error);
/* Ends the world with this error on every rank. */
TSH_API void tsh_comm_abort(tsh_comm *comm, tsh_result code, const char *message);
/* Releases the comm, whose requests must have been waited for, unless its world has failed. */
TSH_API void tsh_comm_close(tsh_comm *comm);

/* -- writing a backend ------------------------------------------------------ */

/* What backends share, for those who write one: a comm and a runner, time, sentences, rule 5's
 * arithmetic, comparing calls, and ranks that wait for each other. dtype and op are ones that
 * tsh_start took. */

/* Rank `rank` of a group of `size`; nothing has been started on it. */
TSH_API tsh_comm tsh_comm_make(const tsh_comm_ops *ops, void *impl, int rank, int size,
                               uint64_t id);
/* Makes of a comm of messages (rule 9) for the whole world one that has everything,
 * in rule 5's order; it owns that one. The time limit is TSHARD_TIMEOUT's, else 300 s. Errors:
 * TSH_ERR_ARGUMENT (TSHARD_TIMEOUT is not a time), TSH_ERR_MEMORY, with a sentence in error. */
TSH_API tsh_result tsh_comm_compose(const tsh_comm *messages, tsh_comm *out, tsh_error *error);

/* Nanoseconds of a clock that is never set back; -1: the system has none. */
TSH_API int64_t tsh_now(void);
/* The time limit of a world in ns, at most 2^61: `given` seconds (negative: no limit) where a desc
 * has them in a field called `name`; if that is 0, TSHARD_TIMEOUT (0: no limit), else 300 s.
 * Returns 0 with a sentence in error if the number is NaN or the variable is not a time. */
TSH_API int tsh_timeout(double given, const char *name, int64_t *ns, tsh_error *error);
/* The same of another variable and default. */
TSH_API int tsh_time_limit(double given, const char *name, const char *variable, double otherwise,
                           int64_t *ns, tsh_error *error);
/* The time (tsh_now) at which a call that starts now times out: timeout_ns from now, or `otherwise`
 * from now if timeout_ns is 0. */
TSH_API int64_t tsh_deadline(int64_t timeout_ns, int64_t otherwise);

/* Fills *error. Returns code. */
TSH_API tsh_result tsh_error_set(tsh_error *error, tsh_result code, int rank, const char *format,
                                 ...) TSH_PRINTF(4, 5);
/* As vsnprintf, but numbers have a decimal point in every locale. What a program writes for others
 * to read (files, messages) it writes with this or with tsh_text_add. */
TSH_API void tsh_text_format(char *text, size_t capacity, const char *format, va_list list)
    TSH_PRINTF(3, 0);
/* Appends to text, which has `capacity` bytes, as tsh_text_format; cuts what does not fit. */
TSH_API void tsh_text_add(char *text, size_t capacity, const char *format, ...) TSH_PRINTF(3, 4);

/* Rule 5's operation on n elements: out = left op right (AVG adds). out may be left or right, but
 * not overlap them otherwise. */
TSH_API void tsh_coll_fold(void *out, const void *left, const void *right, int64_t n,
                           tsh_dtype dtype, tsh_redop op);
/* 1 if out of tsh_coll_fold may be rounded, as of the SUM of two bf16: a sum of several ranks is to
 * be rounded once, at its end, so it takes tsh_coll_sum. */
TSH_API int tsh_coll_rounds(tsh_dtype dtype, tsh_redop op);
/* AVG's division of n finished sums by the number of ranks; nothing for other ops. */
TSH_API void tsh_coll_finish(void *sums, int64_t n, tsh_dtype dtype, tsh_redop op, int size);
/* Rule 5's sum of n elements of chunk k: out = x[k+1] + x[k+2] + ... + x[k+P], of bf16 and f16 in
 * float, rounded once. part(user, r) is where those of rank r are; out may be the first of them,
 * and overlaps no other. */
TSH_API void tsh_coll_sum(void *out, int64_t n, const tsh_coll *coll, int size, int k,
                          const void *(*part)(const void *user, int r), const void *user);
/* counts[0] + ... + counts[r-1]: where rank r's part of a row starts. */
TSH_API int64_t tsh_coll_before(const int64_t *counts, int r);
/* Rule 5's chunks: where chunk k of n elements over `size` ranks starts; of k = size: n. */
TSH_API int64_t tsh_coll_chunk(int64_t n, int size, int k);
/* Equal exactly where the descriptors of two ranks of `size`, both taken by tsh_start, fit (up to a
 * chance of 2^-64). A SEND fits the RECV of its dtype, count and tag; of a SENDRECV, describe the
 * halves. An ALLTOALL's counts are not in it: they are to be compared pair by pair. */
TSH_API uint64_t tsh_coll_digest(const tsh_coll *coll, int size);
/* Writes "all-reduce of 7 f32 (sum)" into text, cut to `capacity` bytes; of counts that differ from
 * other's (may be NULL), the first of `size`. Any values will do, and counts may be NULL: coll may
 * come from a broken peer. Returns text. */
TSH_API char *tsh_coll_text(const tsh_coll *coll, const tsh_coll *other, int size, char *text,
                            size_t capacity);

/* Writes the name of a group, by its id, into text, cut to `capacity` bytes: "tp", "dp" or "pp" of
 * a ctx, whose ids have the name's first letter in their highest byte; "world" of id 1; "group 7"
 * of another id. Groups of one axis, as the tp of two replicas, have one name. Returns text. */
TSH_API char *tsh_group_text(uint64_t group, char *text, size_t capacity);
/* Appends "all-reduce of 7 f32 (sum), collective 3 of tp"; messages have no number. */
TSH_API void tsh_coll_where(const tsh_coll *coll, int size, uint64_t seq, uint64_t group,
                            char *text, size_t capacity);
/* The SEND or the RECV that a message is, or that a SENDRECV has: its count is in .count. */
TSH_API tsh_coll tsh_coll_half(const tsh_coll *coll, int receives);

/* What a rank of a group has called. */
typedef struct tsh_call {
    tsh_coll coll; /* its counts may be NULL; kind TSH_COLL_KINDS: it closes the group */
    uint64_t digest;
    int rank;   /* of the world */
    int counts; /* how many of coll's counts are known */
} tsh_call;
/* Compares the calls of `size` ranks; call(user, r, out) returns 0 if rank r has made none. Returns
 * 1, and the world's error, if they do not fit: the largest part is right (of several, the one with
 * the lowest rank), and the lowest rank that is not in it is blamed. Of all-to-alls with different
 * counts, the rank with the most of them; of several, the lowest but rank 0. */
TSH_API int tsh_call_mismatch(int (*call)(const void *user, int r, tsh_call *out), const void *user,
                              int size, uint64_t seq, uint64_t group, tsh_error *error);
/* The error of a SEND and a RECV (halves) that do not fit, by world rank `from` and `to`. */
TSH_API void tsh_message_mismatch(const tsh_coll *sent, const tsh_coll *wanted, int from, int to,
                                  uint64_t number, uint64_t group, tsh_error *error);
/* Of two ranks that disagree, which is blamed: the one that is not rank 0, else the lower. */
TSH_API int tsh_blamed(int a, int b);

/* Where ranks of one color are in their new group: fills order with the ranks r of `size` whose
 * color is `color`, sorted by key, then by rank. Returns how many there are. */
typedef struct tsh_ticket {
    int32_t color, key;
} tsh_ticket;
TSH_API int tsh_split_order(const void *tickets, size_t stride, int size, int color, int *order);

/* A rank in a search for ranks that wait for each other. */
typedef struct tsh_coll_search {
    int seen;       /* 1: it is on the path, 2: it leads to no cycle */
    int from, next; /* the ranks before and after it; -1: none */
    int edge;       /* which of those that it waits for is tried next */
} tsh_coll_search;

/* A rank of a cycle to which rank r of `size` leads, -1 if there is none: on a cycle all wait for
 * ever. Around it leads .next of search, which has an entry per rank, zeros before the first of
 * several searches. awaits(user, r, i) is the i-th rank, i < size, that r waits for, or -1. Depth
 * first. */
TSH_API int tsh_coll_cycle(tsh_coll_search *search, int size, int r,
                           int (*awaits)(const void *user, int r, int i), const void *user);
/* Which rank of a cycle, r is another, is out of step and blamed: the one in whose call the fewest
 * ranks wait (together(user, r)); of several the lowest, rank 0 last. *waits: a rank that waits for
 * it. */
TSH_API int tsh_coll_blame(const tsh_coll_search *search, int r,
                           int (*together)(const void *user, int r), const void *user, int *waits);
/* The error of a cycle: `blamed` waits in the call `in` while `waits` waits for it in `other` (both
 * as tsh_coll_where has them), or for itself, if they are one rank. */
TSH_API void tsh_cycle_error(int blamed, const char *in, int waits, const char *other,
                             tsh_error *error);

/* For backends whose ranks tell each other where they wait. How far a rank has come: collectives
 * that it has started in a group (peer -1), or messages to and from a peer, a rank of the world. */
typedef struct tsh_wait_mark {
    uint64_t group, sends, recvs; /* of collectives: sends */
    int64_t peer;
} tsh_wait_mark;
/* Where a rank waits, in one piece of memory: marks follow, then the `awaited` ranks of the world
 * that it waits for (ints). */
typedef struct tsh_wait_report {
    uint64_t group, seq, send_number, recv_number;
    int32_t pairwise, send_to, recv_from; /* pairwise: ranks of the world; -1: not awaited */
    int32_t awaited, marks;
    char text[256]; /* the call, in words */
} tsh_wait_report;
/* 1 if rank m has not done its part of what rank r waits for, as far as its last report tells, and
 * waits itself. report: of each rank the last one; NULL: it does not wait, as far as is known. */
TSH_API int tsh_wait_missing(tsh_wait_report *const *report, int r, int m);
/* Whether rank r of `size` waits in a cycle, which then never ends: 1, and the world's error. (A
 * rank goes on only when those that it waits for have. So of a cycle none can have been the first
 * to go on since it reported, and old reports do.) search has an entry per rank. */
TSH_API int tsh_wait_cycle(tsh_wait_report *const *report, int size, int r, tsh_coll_search *search,
                           tsh_error *error);
/* Appends "; absent ranks: 1 3" to the error of rank r's time limit, and names the first of them:
 * those that it waits for, and that do not wait where it does. */
TSH_API void tsh_wait_absent(tsh_wait_report *const *report, int r, tsh_error *error);

/* Settings of a backend that come from the environment. Each function reads the variable `name`
 * and returns 1 if it is set; 0 if it is unset or empty; -1, with a sentence in error
 * (TSH_ERR_ARGUMENT), if its value is not accepted. Unless it returns 1, the result stays as it
 * was. No blanks, signs or exponents are accepted, and the locale does not matter. */
/* Reads a whole number from low to high; low is at least 0. */
TSH_API int tsh_env_int(const char *name, int low, int high, int *value, tsh_error *error);
/* Reads a time in seconds with an optional fraction ("30", "0.5"), at most 1e9, as nanoseconds. */
TSH_API int tsh_env_seconds(const char *name, int64_t *ns, tsh_error *error);
/* Copies the variable into text, `capacity` bytes with its final 0. The error does not repeat
 * it, as it may be a secret. */
TSH_API int tsh_env_text(const char *name, char *text, size_t capacity, tsh_error *error);
