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
 * (tshb_group_text) or is 0, into the new group's id.
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
 * to itself: tshb_comm_compose makes collectives, groups and errors of that
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
    uint64_t id; /* the same on all ranks of the group: see tshb_group_text */
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
