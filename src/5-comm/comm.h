/* ========================================================================== */
/* >>comm                                              MARK: - comm (private) */
/* The public entry points of collectives, which the backend carries out.     */
/* A group of one rank without a backend is served here.                      */
/* Needs: >>trace >>coll.                                                     */
/* ========================================================================== */

/* Every collective of the library passes through tsh_start and tsh_wait; the blocking functions
 * fill a tsh_coll and call both (tshi_comm_run). tsh_start checks the descriptor, numbers it, and
 * passes it to the backend, which need not check it again; then it counts calls and bytes for
 * tsh_comm_stats and the trace. A group of one without a backend (ops is NULL) is served by
 * tshi_comm_alone. */

enum { TSHI_COMM_IN_FLIGHT = 64 }; /* limit of requests in flight: rule 1 of >>comm-api */

/* The numbers of elements that a collective reads from this rank's send buffer and writes to its
 * recv buffer. -1: a count, or the root or the rank to send to or receive from, is not valid. */
typedef struct tshi_comm_size {
    int64_t send, recv; /* numbers of elements */
} tshi_comm_size;

/* Returns the sum of n counts times `blocks`; -1 if a count is negative or the bytes overflow. */
static int64_t tshi_comm_total(const int64_t *counts, int n, int64_t blocks) {
    /* max number of elements: the widest dtype has 8 bytes */
    int64_t limit = (int64_t)(PTRDIFF_MAX / 8), total = 0;
    if (!counts || blocks < 0) return -1;
    for (int r = 0; r < n; r++) {
        if (counts[r] < 0 || counts[r] > limit - total) return -1;
        total += counts[r];
    }
    return total && blocks > limit / total ? -1 : total * blocks;
}

/* Returns the sizes of this rank's buffers in a collective. */
static tshi_comm_size tshi_comm_measure(const tsh_comm *comm, const tsh_coll *coll) {
    tshi_comm_size size = {0, 0};
    int n = comm->size;
    int64_t count = tshi_comm_total(&coll->count, 1, 1), whole, own;
    int root = coll->root >= 0 && coll->root < n;           /* 1: root is a rank of comm */
    int to = coll->send_to >= 0 && coll->send_to < n;       /* 1: send_to is a rank of comm */
    int from = coll->recv_from >= 0 && coll->recv_from < n; /* 1: recv_from is a rank of comm */
    switch (coll->kind) {
    case TSH_ALLREDUCE: size.send = size.recv = count; break;
    case TSH_ALLGATHER:
    case TSH_REDUCE_SCATTER:
        whole = tshi_comm_total(coll->recv_counts, n, coll->blocks); /* elements of all ranks */
        /* elements of this rank */
        own = whole < 0 ? -1 : coll->recv_counts[comm->rank] * coll->blocks;
        size.send = coll->kind == TSH_ALLGATHER ? own : whole;
        size.recv = coll->kind == TSH_ALLGATHER ? whole : own;
        break;
    case TSH_BROADCAST: size.recv = root ? count : -1; break;
    case TSH_ALLTOALL:
        size.send = tshi_comm_total(coll->send_counts, n, coll->blocks);
        size.recv = tshi_comm_total(coll->recv_counts, n, coll->blocks);
        break;
    case TSH_SEND: size.send = to ? count : -1; break;
    case TSH_RECV: size.recv = from ? count : -1; break;
    case TSH_SENDRECV:
        size.send = to ? tshi_comm_total(coll->send_counts, 1, 1) : -1;
        size.recv = from ? tshi_comm_total(coll->recv_counts, 1, 1) : -1;
        break;
    case TSH_BARRIER: break; /* no buffers */
    case TSH_SPLIT:
    case TSH_COLL_KINDS: size.send = -1; break; /* tsh_start refuses these kinds */
    }
    return size;
}

/* What tsh_world(NULL), tsh_tp(NULL), ... return: a group of one that refuses calls. It is const,
 * so no function may write to it. */
static const tsh_comm tshi_comm_none = {NULL, NULL, 0, 1, 0, 0, 0, 0, {{0}, {0}}, NULL, NULL};

/* Returns 1 if comm is open. A comm of zeros, size 0, is closed, or was returned by tsh_comm_split
 * for color -1. */
static int tshi_comm_usable(const tsh_comm *comm) {
    return comm && comm != &tshi_comm_none && comm->size >= 1 && comm->rank >= 0 &&
           comm->rank < comm->size && (comm->ops || comm->size == 1); /* no ops: a group of one */
}

/* Returns 1 if dtype, counts, reduction, buffers and time limit of a collective are valid. */
static int tshi_comm_valid(const tsh_comm *comm, const tsh_coll *coll, tshi_comm_size size) {
    /* lends 1: an all-gather whose recv may be NULL, as the backend lends its own buffer */
    const int lends = coll->kind == TSH_ALLGATHER && comm->ops && comm->ops->lend;
    if (!tshi_dtype_exists(coll->dtype) || tshi_dtype_in_blocks(coll->dtype)) return 0;
    if (size.send < 0 || size.recv < 0) return 0;
    if (tshi_coll_reduces(coll->kind) &&
        ((unsigned)coll->redop > TSH_AVG ||
         (coll->redop == TSH_AVG && !tshi_dtypes[coll->dtype].floating))) /* AVG needs floats */
        return 0;
    return (!size.send || coll->send) && (!size.recv || lends || coll->recv) &&
           coll->timeout_ns >= 0;
}

/* Returns n (P - 1) / P without overflow, P = size: n = q P + r gives q (P - 1) + r (P - 1) / P. */
static uint64_t tshi_comm_share(uint64_t n, int size) {
    uint64_t p = (uint64_t)size;
    return n / p * (p - 1) + n % p * (p - 1) / p;
}

/* Returns the bytes that this rank sends in a collective if the ranks of the group form a ring. */
static uint64_t tshi_comm_bytes(const tsh_comm *comm, const tsh_coll *coll, tshi_comm_size size) {
    uint64_t width = tsh_dtype_size(coll->dtype);
    uint64_t send = (uint64_t)size.send * width, recv = (uint64_t)size.recv * width;
    switch (coll->kind) {
    /* an all-reduce sends as much as a reduce-scatter and an all-gather together */
    case TSH_ALLREDUCE: return tshi_comm_share(2 * send, comm->size);
    case TSH_ALLGATHER: return tshi_comm_share(recv, comm->size);
    case TSH_REDUCE_SCATTER: return tshi_comm_share(send, comm->size);
    case TSH_BROADCAST: return comm->size > 1 ? recv : 0; /* each rank passes all of it on */
    case TSH_ALLTOALL:
        return send - (uint64_t)(coll->send_counts[comm->rank] * coll->blocks) * width;
    default: return comm->size > 1 ? send : 0; /* sends its whole buffer */
    }
}

/* Runs a collective of a group of one: copies send to recv. */
static tsh_result tshi_comm_alone(const tsh_coll *coll, tshi_comm_size size) {
    /* 1: collectives of this kind copy the send buffer to the recv buffer */
    int moves = coll->kind != TSH_BROADCAST && coll->kind != TSH_BARRIER;
    /* a group of one has no other rank to send to or to receive from */
    if (coll->kind == TSH_SEND || coll->kind == TSH_RECV) return TSH_ERR_ARGUMENT;
    /* buffers of different sizes cannot be copied */
    if (moves && size.send != size.recv) return TSH_ERR_ARGUMENT;
    if (moves && size.send && coll->send != coll->recv)
        memmove(coll->recv, coll->send, (size_t)size.send * tsh_dtype_size(coll->dtype));
    return TSH_OK;
}

/* Compares the models of the group's ranks if this rank's model has changed since the last
 * comparison. */
static tsh_result tshi_comm_compare(tsh_comm *comm) {
    tsh_ctx *ctx = comm ? comm->unchecked : NULL; /* NULL: the models were compared already */
    if (!ctx) return TSH_OK;
    comm->unchecked = NULL; /* before the comparison, which itself runs a collective on comm */
    return ctx->compare(comm, ctx);
}

/* Sets the public function that error messages name as the caller of ctx's collectives, until the
 * next call of this function. */
static void tshi_comm_set_caller(tsh_ctx *ctx, tshi_coll_caller caller) {
    ctx->world.caller = ctx->tp.caller = ctx->dp.caller = ctx->pp.caller = (int)caller;
}

/* Starts a collective, after a comparison of the models if one is due. */
static tsh_result tshi_comm_begin(tsh_comm *comm, tsh_coll *coll, tsh_req *req) {
    tsh_result result = tshi_coll_pairwise(coll->kind) ? TSH_OK : tshi_comm_compare(comm);
    return result != TSH_OK ? result : tsh_start(comm, coll, req);
}

/* Runs a blocking collective, after a comparison of the models if one is due. */
TSHI_OUTLINE tsh_result tshi_comm_run(tsh_comm *comm, tsh_coll *coll) {
    tsh_req req;
    const tsh_result result = tshi_comm_begin(comm, coll, &req);
    return result != TSH_OK ? result : tsh_wait(comm, req);
}

/* Returns a tsh_coll with these buffers and this dtype. count: number of elements; 0: the caller
 * sets recv_counts or send_counts instead. */
static tsh_coll tshi_comm_coll(tsh_coll_kind kind, const void *send, void *recv, int64_t count,
                               tsh_dtype dtype) {
    tsh_coll coll = tsh_coll_make(kind, dtype);
    coll.send = send;
    coll.recv = recv;
    coll.count = count;
    return coll;
}

TSH_API tsh_result tsh_allreduce(tsh_comm *comm, void *buffer, int64_t count, tsh_dtype dtype,
                                 tsh_redop op) {
    tsh_req req;
    tsh_result result = tshi_comm_compare(comm);
    if (result == TSH_OK) result = tsh_allreduce_start(comm, buffer, count, dtype, op, &req);
    return result != TSH_OK ? result : tsh_wait(comm, req);
}

TSH_API tsh_result tsh_allgather(tsh_comm *comm, const void *send, void *recv,
                                 const int64_t *counts, int64_t blocks, tsh_dtype dtype) {
    tsh_coll coll = tshi_comm_coll(TSH_ALLGATHER, send, recv, 0, dtype);
    coll.recv_counts = counts;
    coll.blocks = blocks;
    return tshi_comm_run(comm, &coll);
}

TSH_API tsh_result tsh_reduce_scatter(tsh_comm *comm, const void *send, void *recv,
                                      const int64_t *counts, int64_t blocks, tsh_dtype dtype,
                                      tsh_redop op) {
    tsh_coll coll = tshi_comm_coll(TSH_REDUCE_SCATTER, send, recv, 0, dtype);
    coll.recv_counts = counts;
    coll.blocks = blocks;
    coll.redop = op;
    return tshi_comm_run(comm, &coll);
}

TSH_API tsh_result tsh_broadcast(tsh_comm *comm, void *buffer, int64_t count, tsh_dtype dtype,
                                 int root) {
    tsh_coll coll = tshi_comm_coll(TSH_BROADCAST, NULL, buffer, count, dtype);
    coll.root = root;
    return tshi_comm_run(comm, &coll);
}

TSH_API tsh_result tsh_alltoall(tsh_comm *comm, const void *send, const int64_t *send_counts,
                                void *recv, const int64_t *recv_counts, int64_t blocks,
                                tsh_dtype dtype) {
    tsh_coll coll = tshi_comm_coll(TSH_ALLTOALL, send, recv, 0, dtype);
    coll.send_counts = send_counts;
    coll.recv_counts = recv_counts;
    coll.blocks = blocks;
    return tshi_comm_run(comm, &coll);
}

TSH_API tsh_result tsh_send(tsh_comm *comm, const void *buffer, int64_t count, tsh_dtype dtype,
                            int to) {
    tsh_coll coll = tshi_comm_coll(TSH_SEND, buffer, NULL, count, dtype);
    coll.send_to = to;
    return tshi_comm_run(comm, &coll);
}

TSH_API tsh_result tsh_recv(tsh_comm *comm, void *buffer, int64_t count, tsh_dtype dtype,
                            int from) {
    tsh_coll coll = tshi_comm_coll(TSH_RECV, NULL, buffer, count, dtype);
    coll.recv_from = from;
    return tshi_comm_run(comm, &coll);
}

TSH_API tsh_result tsh_sendrecv(tsh_comm *comm, const void *send, int64_t send_count, int to,
                                void *recv, int64_t recv_count, int from, tsh_dtype dtype) {
    tsh_coll coll = tshi_comm_coll(TSH_SENDRECV, send, recv, 0, dtype);
    coll.send_counts = &send_count;
    coll.recv_counts = &recv_count; /* arrays of one count */
    coll.send_to = to;
    coll.recv_from = from;
    return tshi_comm_run(comm, &coll);
}

TSH_API tsh_result tsh_barrier(tsh_comm *comm) {
    tsh_coll coll = tsh_coll_make(TSH_BARRIER, TSH_F32);
    return tshi_comm_run(comm, &coll);
}

TSH_API tsh_coll tsh_coll_make(tsh_coll_kind kind, tsh_dtype dtype) {
    tsh_coll coll;
    memset(&coll, 0, sizeof coll);
    coll.size = (uint32_t)sizeof coll;
    coll.kind = kind;
    coll.dtype = dtype;
    coll.blocks = 1; /* one block: the counts are not repeated */
    coll.root = coll.send_to = coll.recv_from = coll.tag = -1;
    return coll;
}

TSH_API tsh_result tsh_start(tsh_comm *comm, tsh_coll *coll, tsh_req *req) {
    tsh_result result;
    tshi_comm_size size;
    uint64_t bytes;
    int64_t begin;
    int pairwise;
    if (!coll || !req) return TSH_ERR_ARGUMENT;
    *req = 0;
    if (!tshi_comm_usable(comm) || coll->size != sizeof *coll) return TSH_ERR_ARGUMENT;
    if ((unsigned)coll->kind >= (unsigned)TSH_COLL_KINDS) return TSH_ERR_ARGUMENT;
    if (!tshi_coll_rows(coll->kind) || coll->blocks == 0) coll->blocks = 1;
    size = tshi_comm_measure(comm, coll);
    if (!tshi_comm_valid(comm, coll, size)) return TSH_ERR_ARGUMENT;
    if (comm->in_flight >= TSHI_COMM_IN_FLIGHT) return TSH_ERR_STATE; /* too many requests */
    /* 1: a collective between two ranks; the backend numbers these */
    pairwise = tshi_coll_pairwise(coll->kind);
    coll->seq = pairwise ? 0 : comm->next_seq; /* number of the collective in its group */
    if (!pairwise) coll->tag = comm->caller ? comm->caller : -1; /* errors name the caller */
    begin = tshi_trace_now(comm->trace);
    result = comm->ops ? comm->ops->start(comm, coll, req) : tshi_comm_alone(coll, size);
    if (result != TSH_OK) return result;
    if (!pairwise) comm->next_seq++;
    if (*req) comm->in_flight++; /* *req 0: the collective is complete already */
    bytes = tshi_comm_bytes(comm, coll, size);
    comm->stats.calls[coll->kind]++; /* counted for tsh_comm_stats */
    comm->stats.bytes[coll->kind] += bytes;
    if (comm->trace) tshi_trace_sent(comm, tshi_coll_kinds[coll->kind], begin, bytes, *req);
    return TSH_OK;
}

TSH_API tsh_result tsh_test(tsh_comm *comm, tsh_req req, int *done) {
    if (!tshi_comm_usable(comm) || !done) return TSH_ERR_ARGUMENT;
    /* req is 0: the collective is complete already */
    *done = 1;
    if (!req) return TSH_OK;
    return comm->ops ? comm->ops->test(comm, req, done) : TSH_ERR_ARGUMENT;
}

TSH_API tsh_result tsh_wait(tsh_comm *comm, tsh_req req) {
    int64_t begin;
    tsh_result result;
    if (!req) return TSH_OK;
    if (!tshi_comm_usable(comm) || !comm->ops || comm->in_flight < 1) return TSH_ERR_ARGUMENT;
    comm->in_flight--; /* the request ends here, also if the wait fails */
    begin = tshi_trace_now(comm->trace);
    result = comm->ops->wait(comm, req);
    if (comm->trace) tshi_trace_waited(comm, req, begin);
    return result;
}

/* Waits until a collective has filled this rank's recv buffer. The send buffer must not change
 * until tsh_wait has returned for *req. If the backend cannot wait for recv alone, calls tsh_wait
 * and sets *req to 0. */
static tsh_result tshi_comm_receive(tsh_comm *comm, tsh_req *req) {
    const tsh_req started = *req;
    const int64_t begin = tshi_trace_now(comm->trace);
    tsh_result result;
    if (!started || !comm->ops->receive) {
        *req = 0;
        return tsh_wait(comm, started);
    }
    result = comm->ops->receive(comm, started);
    if (comm->trace) tshi_trace_waited(comm, started, begin);
    return result;
}

/* Waits until the result of an all-gather whose recv is NULL is complete, and sets *values to the
 * backend's buffer that has it, which this rank may read until it calls tsh_wait for the
 * request. */
static tsh_result tshi_comm_lend(tsh_comm *comm, tsh_req req, const void **values) {
    const int64_t begin = tshi_trace_now(comm->trace);
    const tsh_result result = req ? comm->ops->lend(comm, req, values) : TSH_OK;
    if (comm->trace) tshi_trace_waited(comm, req, begin);
    return result;
}

TSH_API tsh_result tsh_allreduce_start(tsh_comm *comm, void *buffer, int64_t count, tsh_dtype dtype,
                                       tsh_redop op, tsh_req *req) {
    tsh_coll coll = tshi_comm_coll(TSH_ALLREDUCE, buffer, buffer, count, dtype);
    coll.redop = op;
    return tsh_start(comm, &coll, req);
}

TSH_API void tsh_comm_progress(tsh_comm *comm) {
    if (comm && comm->ops) comm->ops->progress(comm);
}

/* Does what tsh_comm_split does. name: the axis of the new groups, 't', 'd' or 'p', shifted left by
 * TSHI_COLL_AXIS; 0: none. It becomes part of the new groups' ids, so that errors can name the
 * groups (tshb_group_text). */
static tsh_result tshi_comm_split(tsh_comm *comm, uint64_t name, int color, int key,
                                  tsh_comm *out) {
    tsh_result result = TSH_OK;
    if (!out) return TSH_ERR_ARGUMENT;
    memset(out, 0, sizeof *out); /* after an error, *out is a closed comm */
    out->id = name;              /* the backend's split puts it into the new group's id */
    if (!tshi_comm_usable(comm) || color < -1) return TSH_ERR_ARGUMENT;
    if (comm->in_flight >= TSHI_COMM_IN_FLIGHT) return TSH_ERR_STATE;
    if (comm->ops) {
        result = comm->ops->split(comm, color, key, out);
        if (result != TSH_OK) return result;
    } else if (color >= 0) {
        out->size = 1; /* a group of one */
    }
    comm->next_seq++; /* a split is numbered like a collective */
    comm->stats.calls[TSH_SPLIT]++;
    return TSH_OK;
}

TSH_API tsh_result tsh_comm_split(tsh_comm *comm, int color, int key, tsh_comm *out) {
    return tshi_comm_split(comm, 0, color, key, out);
}

TSH_API tsh_result tsh_comm_error(tsh_comm *comm, tsh_error *error) {
    if (error) { /* *error says "no error" unless the backend overwrites it */
        memset(error, 0, sizeof *error);
        error->rank = -1;
    }
    return comm && comm->ops ? comm->ops->status(comm, error) : TSH_OK;
}

TSH_API void tsh_comm_abort(tsh_comm *comm, tsh_result code, const char *message) {
    tsh_error why;
    if (!comm || !comm->ops) return;
    /* if code is no error code, TSH_ERR_ABORTED replaces it */
    if (code <= TSH_OK || code >= TSH_RESULT_COUNT) code = TSH_ERR_ABORTED;
    memset(&why, 0, sizeof why); /* clears padding, too: a backend may send the struct */
    /* rank -1: the backend replaces it by this rank's number */
    (void)tsh_error_set(&why, code, -1, "%s", message ? message : "");
    comm->ops->abort(comm, &why);
}

TSH_API void tsh_comm_close(tsh_comm *comm) {
    if (!comm || comm == &tshi_comm_none) return; /* tshi_comm_none is const */
    if (comm->ops) comm->ops->close(comm);        /* the backend ends the group */
    memset(comm, 0, sizeof *comm);                /* size 0: closed, see tshi_comm_usable */
}
