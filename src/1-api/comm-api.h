/* ========================================================================== */
/* >>comm-api                                                MARK: - comm-api */
/* Groups of ranks, what a backend must do, and the collectives.              */
/* Needs: >>types.                                                            */
/* ========================================================================== */

/* HOW A BACKEND WORKS
 *
 * A backend is a const table of functions (tsh_comm_ops) and a tsh_comm per group. The public entry
 * points (tsh_allreduce and so on) check the arguments, number the call, count it, and pass the
 * descriptor (tsh_coll) to the backend.
 *
 *  1. start(comm, coll, req) posts a collective and never waits for a peer. It copies the
 * descriptor, but not the counts and buffers: these must stay valid and unchanged until wait. At
 * least 64 collectives may be in flight on one comm (the core counts them and refuses a 65th). Each
 * collective is waited for exactly once, in any order.
 *  2. All ranks of a group start the same collectives in the same order; the order between groups
 * is free. SEND, RECV and SENDRECV are numbered per pair of ranks and direction instead. split is
 * posted and checked like a collective. Before it is called, the core sets out->id to the name of
 * the new groups, in the form that tshb_group_text reads, or to 0; split ORs this into the ids of
 * the new groups.
 *  3. test and progress never block. A wait on any request makes progress on every outstanding
 * request of this rank, on all comms, so that no order of waits can deadlock.
 *  4. No call returns, not even with an error, while a peer or a pending write may still touch its
 * buffers.
 *  5. Order of sums: an element of chunk k is x[k+1] + x[k+2] + ... + x[k+P], indices mod P, summed
 * left to right, as in a ring; x[r] is the value of rank r. In ALLREDUCE, chunks are those of
 * torch.chunk's rule over the flat buffer; in REDUCE_SCATTER, chunk k is what rank k receives.
 * Segmentation, message size and threads never change a bit of the result. AVG divides the finished
 * sum by P once, and is for floating dtypes only. Integers wrap. NaN on any rank gives NaN, also
 * with MIN and MAX; of equal values, MIN and MAX keep the left one.
 *  6. Zero is a legal count everywhere. recv may equal send in ALLREDUCE; in ALLGATHER, send may
 * point to this rank's part of recv. Other overlaps are errors of the caller.
 *  7. The world's error is the first one (a mismatch, a lost rank, an abort). With it the world and
 * every group split from it have failed: every rank that is in a call, or makes one later, gets the
 * same code, rank and sentence. status returns it without blocking. abort may be called from any
 * thread.
 *  8. close releases the comm; its requests must have been waited for, or the world must have
 * failed.
 *  9. A backend may do no more than send messages between ranks of a world, also from a rank to
 * itself: tshb_comm_compose builds collectives, groups and errors on top of that
 * (examples/05_write_a_backend.c). Such a backend has start, progress, status, abort, close, and
 * idle, which sleeps until there may be something to do, for at most ns nanoseconds. start gets a
 * SEND or a RECV of at most TSH_MESSAGE_BYTES. A SEND is copied before start returns. A RECV takes
 * the oldest message from its sender that has the same seq; the lengths of the two are equal. If
 * none has arrived yet, start sets *req to 1 and is called again later; if the sender is gone for
 * good, it returns TSH_ERR_LOST. progress sends and receives without blocking, close sends what is
 * left. status and abort are those of rule 7. */

/* Kinds of collectives, and how many elements the buffers send and recv of this rank hold, by the
 * fields of tsh_coll. `rank` is this rank of the group. */
typedef enum tsh_coll_kind {
    TSH_ALLREDUCE,      /* send and recv hold `count` elements each */
    TSH_ALLGATHER,      /* send holds recv_counts[rank] elements, recv the sum of recv_counts */
    TSH_REDUCE_SCATTER, /* send holds the sum of recv_counts, recv holds recv_counts[rank]
                         * elements */
    TSH_BROADCAST,      /* recv holds `count` elements, copied from the root's recv; no send
                         * buffer */
    TSH_ALLTOALL,       /* sends send_counts[r] to and receives recv_counts[r] from each rank r */
    TSH_SEND,           /* sends `count` elements to rank send_to */
    TSH_RECV,           /* receives `count` elements from rank recv_from */
    TSH_SENDRECV,       /* sends send_counts[0] and receives recv_counts[0] elements at once */
    TSH_BARRIER,        /* waits for all ranks of the group; no buffers */
    TSH_SPLIT,          /* splits the group: for tsh_comm_split only; tsh_start refuses it */
    TSH_COLL_KINDS
} tsh_coll_kind;

typedef enum tsh_redop { TSH_SUM, TSH_PROD, TSH_MIN, TSH_MAX, TSH_AVG } tsh_redop;

/* Describes one collective. Counts are in elements of dtype. */
typedef struct tsh_coll {
    uint32_t size; /* sizeof(tsh_coll), which tsh_start checks */
    tsh_coll_kind kind;
    tsh_dtype dtype;
    tsh_redop redop;
    const void *send;
    void *recv;
    int64_t count;
    const int64_t *send_counts, *recv_counts; /* entry r: number of elements sent to, or received
                                               * from, rank r */
    int64_t blocks; /* ALLGATHER, REDUCE_SCATTER, ALLTOALL: send and recv consist of this many
                     * blocks, each with as many elements as the counts say; 0 means 1. tsh_start
                     * sets it to 1 for other kinds */
    int root, send_to, recv_from, tag; /* root, send_to, recv_from: ranks of the group; tag: any
                                        * number, the same in a SEND and its RECV. -1: none. In
                                        * collectives, tsh_start sets tag to a number from which
                                        * tshb_coll_text gets the name of the calling function, such
                                        * as tsh_save */
    uint64_t seq;                      /* set by tsh_start: number of the collective in its group */
    int64_t timeout_ns;                /* time limit in ns from tsh_start on; 0: the backend's
                                        * default */
} tsh_coll;

typedef uint64_t tsh_req; /* handle of a started collective; 0: it is complete already */
typedef struct tsh_comm tsh_comm;

enum {
    TSH_COMM_ABI = 1,          /* version of the struct tsh_comm_ops */
    TSH_MESSAGE_BYTES = 32768, /* max bytes of a message, for backends that only send messages */
    TSH_CAP_ORDERED = 1,       /* bit of .caps: sums in the documented order (rule 5 above) */
    TSH_CAP_DEATH = 2          /* bit of .caps: the backend notices when a rank's process dies */
};

typedef struct tsh_comm_ops {
    uint32_t size, abi; /* size: sizeof(tsh_comm_ops); abi: TSH_COMM_ABI */
    const char *name;
    uint64_t caps;
    tsh_result (*start)(tsh_comm *comm, const tsh_coll *coll, tsh_req *req);
    tsh_result (*test)(tsh_comm *comm, tsh_req req, int *done);
    tsh_result (*wait)(tsh_comm *comm, tsh_req req);
    void (*progress)(tsh_comm *comm);
    tsh_result (*split)(tsh_comm *comm, int color, int key, tsh_comm *out);
    /* Copies the world's error to *error and returns its code; returns TSH_OK if there is none. */
    tsh_result (*status)(tsh_comm *comm, tsh_error *error);
    void (*abort)(tsh_comm *comm, const tsh_error *why);
    void (*close)(tsh_comm *comm);
    /* Sleeps until there may be something to do, for at most ns nanoseconds. NULL in backends that
     * do every kind of collective; see rule 9. */
    void (*idle)(tsh_comm *comm,
                 int64_t ns);
    /* Blocks until the recv buffer of a collective is filled. Peers may still read its send buffer,
     * which must not change until wait, called after this, has returned. Not called for SEND, RECV
     * and SENDRECV. NULL: the core calls wait instead. */
    tsh_result (*receive)(tsh_comm *comm, tsh_req req);
    /* For backends whose ranks share memory. On these, all ranks may call an ALLGATHER with recv
     * NULL: the backend gathers the values once, in memory of its own. lend blocks until they are
     * complete and outputs their address; this rank may read them until it calls wait. At most 3
     * all-gathers of a group are lent at a time: the 4th waits until all ranks have called wait for
     * the first. After an error *values is NULL. NULL: ALLGATHER needs a recv. */
    tsh_result (*lend)(tsh_comm *comm, tsh_req req, const void **values);
} tsh_comm_ops;

/* Initialises the tsh_comm_ops of a backend that does every kind of collective, with the functions
 * prefix_start, prefix_test and so on. */
#define TSH_COMM_OPS(prefix, name, caps)                                                           \
    {                                                                                              \
        (uint32_t)sizeof(tsh_comm_ops), TSH_COMM_ABI, name, caps, prefix##_start, prefix##_test,   \
            prefix##_wait, prefix##_progress, prefix##_split, prefix##_status, prefix##_abort,     \
            prefix##_close, NULL, NULL, NULL                                                       \
    }
/* Initialises the tsh_comm_ops of a backend that only sends messages (rule 9). It has no functions
 * test, wait and split. */
#define TSH_MESSAGE_OPS(prefix, name, caps)                                                        \
    {                                                                                              \
        (uint32_t)sizeof(tsh_comm_ops), TSH_COMM_ABI, name, caps, prefix##_start, NULL, NULL,      \
            prefix##_progress, NULL, prefix##_status, prefix##_abort, prefix##_close,              \
            prefix##_idle, NULL, NULL                                                              \
    }

/* Statistics of the collectives of this rank in one group, by kind: how many were started, and the
 * bytes that this rank sends if the ranks form a ring (an all-reduce of n bytes: 2 n (P - 1) /
 * P). */
typedef struct tsh_comm_stats {
    uint64_t calls[TSH_COLL_KINDS];
    uint64_t bytes[TSH_COLL_KINDS];
} tsh_comm_stats;

struct tsh_comm {
    const tsh_comm_ops *ops; /* NULL: a group of one rank, without a backend */
    void *impl;
    int rank, size;
    uint64_t id; /* identifies the group, equally on all its ranks; tshb_group_text names it */
    uint64_t next_seq;
    int in_flight;
    int caller; /* set by the core: a number for the public function, such as tsh_save, whose
                 * collectives run now; errors name it. 0: none */
    tsh_comm_stats stats;
    struct tshi_trace *trace; /* set by the core: the trace that is being recorded; NULL: none */
    tsh_ctx *unchecked; /* set by the core: the ctx whose model the ranks compare before the next
                         * collective; NULL: none */
};

/* -- collectives ------------------------------------------------------------
 * Blocking collectives. Buffers hold `count` elements of dtype. A call returns when this rank's
 * buffers may be used again. Errors: the world's error (TSH_ERR_MISMATCH, LOST, TIMEOUT, ABORTED,
 * MEMORY), whose sentence tsh_comm_error outputs, or TSH_ERR_ARGUMENT before anything starts. Each
 * equals the torch.distributed function of its name. */
/* Reduces the buffers of all ranks element by element by op; every rank's buffer gets the
 * result.
 * torch: dist.all_reduce */
TSH_API tsh_result tsh_allreduce(tsh_comm *comm, void *buffer, int64_t count, tsh_dtype dtype,
                                 tsh_redop op);
/* Gathers counts[r] elements of each rank r, in rank order, into recv on every rank. With `blocks`
 * above 1, send and recv consist of that many blocks, each gathered separately (0 means 1).
 * torch: dist.all_gather, dist.all_gather_into_tensor */
TSH_API tsh_result tsh_allgather(tsh_comm *comm, const void *send, void *recv,
                                 const int64_t *counts, int64_t blocks, tsh_dtype dtype);
/* Reduces the send buffers of all ranks by op; rank r receives its counts[r] elements of the
 * result. send holds counts[0] + counts[1] + ... elements. With `blocks` above 1, send and recv
 * consist of that many blocks, each scattered separately (0 means 1).
 * torch: dist.reduce_scatter, dist.reduce_scatter_tensor */
TSH_API tsh_result tsh_reduce_scatter(tsh_comm *comm, const void *send, void *recv,
                                      const int64_t *counts, int64_t blocks, tsh_dtype dtype,
                                      tsh_redop op);
/* Copies the root's buffer to the buffers of all ranks.
 * torch: dist.broadcast */
TSH_API tsh_result tsh_broadcast(tsh_comm *comm, void *buffer, int64_t count, tsh_dtype dtype,
                                 int root);
/* Sends send_counts[r] elements to each rank r and receives recv_counts[r] elements from it. Both
 * buffers are in rank order, and consist of `blocks` such blocks (0 means 1).
 * torch: dist.all_to_all, dist.all_to_all_single */
TSH_API tsh_result tsh_alltoall(tsh_comm *comm, const void *send, const int64_t *send_counts,
                                void *recv, const int64_t *recv_counts, int64_t blocks,
                                tsh_dtype dtype);
/* Sends `count` elements to rank `to`.
 * torch: dist.send */
TSH_API tsh_result tsh_send(tsh_comm *comm, const void *buffer, int64_t count, tsh_dtype dtype,
                            int to);
/* Receives `count` elements from rank `from`.
 * torch: dist.recv */
TSH_API tsh_result tsh_recv(tsh_comm *comm, void *buffer, int64_t count, tsh_dtype dtype, int from);
/* Sends to rank `to` and receives from rank `from` at the same time.
 * torch: dist.batch_isend_irecv */
TSH_API tsh_result tsh_sendrecv(tsh_comm *comm, const void *send, int64_t send_count, int to,
                                void *recv, int64_t recv_count, int from, tsh_dtype dtype);
/* Returns once every rank of the group has called it.
 * torch: dist.barrier */
TSH_API tsh_result tsh_barrier(tsh_comm *comm);

/* Returns a descriptor of this kind and dtype with defaults in all other fields. For a non-blocking
 * collective: fill it in, pass it to tsh_start, and call tsh_wait once. */
TSH_API tsh_coll tsh_coll_make(tsh_coll_kind kind, tsh_dtype dtype);
/* Starts a collective without blocking and outputs its request. The counts and buffers must stay
 * valid and unchanged until tsh_wait.
 * torch: dist.isend, dist.irecv */
TSH_API tsh_result tsh_start(tsh_comm *comm, tsh_coll *coll, tsh_req *req);
/* Sets *done to 1 if the request is complete, else to 0. Never blocks. The request must still be
 * waited for.
 * torch: dist.Work.is_completed */
TSH_API tsh_result tsh_test(tsh_comm *comm, tsh_req req, int *done);
/* Blocks until the request is complete. Each request is waited for exactly once.
 * torch: dist.Work.wait */
TSH_API tsh_result tsh_wait(tsh_comm *comm, tsh_req req);
/* Starts an all-reduce in place without blocking; see tsh_start. */
TSH_API tsh_result tsh_allreduce_start(tsh_comm *comm, void *buffer, int64_t count, tsh_dtype dtype,
                                       tsh_redop op, tsh_req *req);
/* Makes progress on all requests of this rank without blocking. */
TSH_API void tsh_comm_progress(tsh_comm *comm);

/* Splits the group: ranks of one color form a new group, ordered by key, then by rank. color -1:
 * this rank joins no group (out gets size 0). Collective.
 * torch: dist.new_group, dist.split_group */
TSH_API tsh_result tsh_comm_split(tsh_comm *comm, int color, int key, tsh_comm *out);
/* Returns the code of the world's error, or TSH_OK, and copies the error to *error if that is not
 * NULL. Never blocks. */
TSH_API tsh_result tsh_comm_error(tsh_comm *comm, tsh_error *error);
/* Makes an error with this code and message the world's error, which every rank gets; does nothing
 * if the world has an error already.
 * torch: dist.ProcessGroup.abort */
TSH_API void tsh_comm_abort(tsh_comm *comm, tsh_result code, const char *message);
/* Releases the comm. Its requests must have been waited for, unless its world has failed.
 * torch: dist.destroy_process_group */
TSH_API void tsh_comm_close(tsh_comm *comm);
