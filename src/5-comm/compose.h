/* ========================================================================== */
/* >>compose                                        MARK: - compose (private) */
/* Every kind of collective, groups and errors, made of a backend's SEND and  */
/* RECV: tsh_comm_compose. What is sent, and how an op goes on.               */
/* Needs: >>env >>coll-agree >>comm.                                          */
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
    TSHI_COMPOSE_REPORTS,     /* reports of where a rank waits (tsh_wait_report) */
    TSHI_COMPOSE_CHANNELS = 8 /* factor in tshi_compose_seq; more than the channels above */
} tshi_compose_channel;

enum { TSHI_COMPOSE_MARKS = 64 };           /* limit of the marks in a report */
#define TSHI_COMPOSE_MS    INT64_C(1000000) /* a millisecond, in ns */

/* Describes a rank's call to the others. 2 P counts follow in memory: how many elements the rank
 * sends to each of the P ranks of the group, then how many it receives from each. The pointers in
 * call.coll are valid on the rank that wrote them only. */
typedef struct tshi_compose_header {
    tsh_call call;     /* what the rank has called */
    uint64_t made;     /* of a split: id of the new group, if the rank is the first of its color */
    tsh_ticket ticket; /* of a split: its color and key */
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
    struct tshi_compose_op *next;  /* the op that this rank started after it; NULL: none */
    struct tshi_compose_op *other; /* the other half of a SENDRECV; else NULL */
    tshi_compose_group *group;     /* the group in which the op was started */
    tsh_coll coll;                 /* what the caller asked for */
    tsh_coll part;       /* the current round as an ALLGATHER, REDUCE_SCATTER or ALLTOALL */
    uint64_t id, number; /* id: the request; number: of the collective in group, of the message */
    int64_t deadline;    /* the time (tsh_now) at which it times out */
    tshi_compose_state state; /* how far the op has come */
    int peer, sends; /* peer: the other rank of a message, -1 for collectives; sends: 1: a SEND */
    int round;       /* 1: the second round, in which an all-reduce sends its summed chunks */
    tsh_coll *recv;  /* (P): the receives that are not complete */
    int recvs;       /* number of entries of recv */
    char *headers;   /* one per rank; for a message two: the SEND's, then the RECV's */
    int64_t *counts; /* (P): elements of each rank's part of an all-reduce or a broadcast */
    int64_t *to, *from; /* (P) each: number of elements for, from each rank */
    char *out, *in;     /* these elements, rank by rank; `in` lies in the block that `out` owns */
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
    uint64_t splits, made;      /* number of splits that this rank has started; the last's `made` */
    tshi_compose_group *groups; /* list of groups, the newest first */
    size_t report_bytes;        /* bytes of one report with its marks and awaited ranks */
    tsh_wait_report **report;  /* per rank of the world: its last report; NULL: not known to wait */
    tsh_wait_report *incoming; /* memory of the report being received, then of one per rank */
    tsh_coll_search *search;   /* for the search for cycles: one entry per rank of the world */
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

/* Returns a SEND to, or a RECV from, rank `peer` of the world, as the backend takes it. The caller
 * adds buffer and count. */
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
    tsh_coll coll = tshi_compose_message(TSH_SEND, to, seq, dtype); /* becomes each segment */
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
    tsh_coll_where(&op->coll, group->size, op->number, group->id, text, sizeof text);
    (void)tsh_error_set(&error, TSH_ERR_LOST, lost,
                        "rank %d is gone while rank %d waits for it in %s", lost,
                        group->ranks[group->rank], text);
    tshi_compose_raise(group->world, &error);
}

/* Receives the segments that have arrived. Returns 1 if the message is complete. */
static int tshi_compose_receive(const tshi_compose_op *op, tsh_coll *recv) {
    tsh_comm *messages = &op->group->world->messages;
    while (recv->count > 0) {
        tsh_coll next = *recv; /* becomes the next segment */
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
            op->recv[i] = op->recv[--op->recvs]; /* the last one takes its place */
        else
            i++;
    }
    return op->recvs == 0;
}

/* ---- headers ---- */

/* Sends this rank's header for op to the peer of a message, or to all other ranks, and posts
 * receives of their headers. */
static void tshi_compose_send_header(tshi_compose_op *op, const tsh_ticket *ticket) {
    tshi_compose_group *group = op->group;
    const tsh_coll *coll = &op->coll;
    int64_t words = (int64_t)(tshi_compose_header_bytes(group) / sizeof(int64_t));
    int message = op->peer >= 0, n = group->size; /* message: 1: op is a SEND or a RECV */
    tshi_compose_header *header = tshi_compose_header_of(op, message ? !op->sends : group->rank);
    int64_t *counts = (int64_t *)(void *)(header + 1);            /* elements sent, then received */
    tshi_compose_channel mine = TSHI_COMPOSE_HEADERS, its = mine; /* its: the peer's channel */
    if (message) {
        mine = op->sends ? TSHI_COMPOSE_SENDS : TSHI_COMPOSE_RECVS;
        its = op->sends ? TSHI_COMPOSE_RECVS : TSHI_COMPOSE_SENDS;
    }
    header->call.coll = *coll;
    header->call.digest = tsh_coll_digest(coll, n);
    header->call.rank = group->ranks[group->rank];
    header->call.counts = tshi_coll_rows(coll->kind) ? n : 0;
    if (ticket) header->ticket = *ticket; /* only a split has a ticket */
    header->made = group->world->made;
    if (coll->kind == TSH_ALLTOALL) memcpy(counts, coll->send_counts, (size_t)n * sizeof *counts);
    if (tshi_coll_rows(coll->kind))
        memcpy(counts + n, coll->recv_counts, (size_t)n * sizeof *counts);
    for (int i = 0; i < n; i++) {
        int r = (group->rank + i) % n; /* each rank begins with another peer */
        if (message ? r != op->peer : r == group->rank) continue;
        tshi_compose_send(group->world, group->ranks[r], tshi_compose_seq(group, mine), header,
                          words, TSH_I64);
        tshi_compose_post_recv(op, r, its, tshi_compose_header_of(op, message ? op->sends : r),
                               words, TSH_I64);
    }
}

/* For tsh_call_mismatch: copies rank r's call from its header. Returns 1: r has made a call. */
static int tshi_compose_called(const void *user, int r, tsh_call *out) {
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
        const tsh_call *sent = &tshi_compose_header_of(op, 0)->call;
        const tsh_call *wanted = &tshi_compose_header_of(op, 1)->call;
        if (sent->digest == wanted->digest) return 1;
        tsh_message_mismatch(&sent->coll, &wanted->coll, sent->rank, wanted->rank, op->number,
                             group->id, &error);
    } else if (!tsh_call_mismatch(tshi_compose_called, op, group->size, op->number, group->id,
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
        int64_t start = tsh_coll_chunk(coll->count, n, me); /* where this rank's chunk starts */
        char *chunk = (char *)coll->recv + (size_t)start * tsh_dtype_size(coll->dtype);
        part->kind = op->round ? TSH_ALLGATHER : TSH_REDUCE_SCATTER;
        part->send = op->round ? chunk : coll->send;
        part->recv = op->round ? coll->recv : chunk;
        for (int k = 0; k < n; k++) /* the lengths of the chunks */
            op->counts[k] = tsh_coll_chunk(coll->count, n, k + 1) -
                            tsh_coll_chunk(coll->count, n, k);
    }
    for (int k = 0; k < n; k++) { /* [me]: the same number for every k */
        op->to[k] = part->blocks * part->send_counts[part->kind == TSH_ALLGATHER ? me : k];
        op->from[k] = part->blocks * part->recv_counts[part->kind == TSH_REDUCE_SCATTER ? me : k];
    }
}

/* Copies rank k's shard, `blocks` rows of counts[k] elements, from a buffer whose rows hold
 * counts[0] + counts[1] + ... elements to `packed`, without gaps; unpacks: the other way. */
static void tshi_compose_rows(const tshi_compose_op *op, const int64_t *counts, int k, void *whole,
                              char *packed, int unpacks) {
    size_t width = tsh_dtype_size(op->coll.dtype), n = (size_t)counts[k] * width;
    size_t row = (size_t)tsh_coll_before(counts, op->group->size) * width; /* bytes of a row */
    char *at = (char *)whole + (size_t)tsh_coll_before(counts, k) * width; /* rank k's first row */
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
    out = (size_t)tsh_coll_before(op->to, group->size) * width;
    in = (size_t)tsh_coll_before(op->from, group->size) * width;
    free(op->out);
    op->out = (char *)malloc(out + in + 1); /* + 1: malloc(0) may return NULL */
    op->state = TSHI_COMPOSE_MOVING;
    if (!op->out) {
        (void)tshi_compose_no_memory(group->world);
        return;
    }
    op->in = op->out + out;
    for (int i = 0; i < group->size; i++) {
        int k = (group->rank + i) % group->size; /* begins with this rank */
        char *from = op->out + (size_t)tsh_coll_before(op->to, k) * width;
        char *into = op->in + (size_t)tsh_coll_before(op->from, k) * width;
        tshi_compose_pack(op, k, from);
        if (i == 0) { /* this rank's part for itself */
            if (op->from[k]) memcpy(into, from, (size_t)op->from[k] * width);
            continue;
        }
        tshi_compose_send(group->world, group->ranks[k],
                          tshi_compose_seq(group, TSHI_COMPOSE_DATA), from, op->to[k],
                          op->coll.dtype);
        tshi_compose_post_recv(op, k, TSHI_COMPOSE_DATA, into, op->from[k], op->coll.dtype);
    }
}

/* For tsh_coll_sum: returns the elements that rank r has sent to this rank in this round. */
static const void *tshi_compose_part(const void *user, int r) {
    const tshi_compose_op *op = (const tshi_compose_op *)user;
    return op->in + (size_t)tsh_coll_before(op->from, r) * tsh_dtype_size(op->coll.dtype);
}

/* Ends a round whose data has arrived: sums it, or copies it to the caller's buffer. */
static void tshi_compose_finish(tshi_compose_op *op) {
    const tsh_coll *part = &op->part;
    int me = op->group->rank, n = op->group->size;
    op->state = TSHI_COMPOSE_DONE; /* unless a second round follows */
    if (part->kind == TSH_REDUCE_SCATTER) {
        if (op->from[me])
            tsh_coll_sum(part->recv, op->from[me], part, n, me, tshi_compose_part, op);
    } else {
        for (int k = 0; k < n; k++)
            tshi_compose_rows(op, part->recv_counts, k, part->recv,
                              (char *)(uintptr_t)tshi_compose_part(op, k), 1);
    }
    if (op->coll.kind == TSH_ALLREDUCE && !op->round++) tshi_compose_round(op);
}

/* ---- ops ---- */

/* Appends an op to the group and sends its header. coll: a collective, a message, a close, or half
 * of a SENDRECV; ticket: of a split, else NULL. Returns NULL if there is no memory; then the world
 * has failed. */
static tshi_compose_op *tshi_compose_add(tshi_compose_group *group, const tsh_coll *coll,
                                         const tsh_ticket *ticket) {
    size_t n = (size_t)group->size, recv = n * sizeof(tsh_coll);
    size_t counts = 3 * n * sizeof(int64_t);
    size_t headers = (n < 2 ? 2 : n) * tshi_compose_header_bytes(group); /* a message has two */
    tshi_compose_op **at = &group->first;
    tshi_compose_op *op =
        (tshi_compose_op *)calloc(1, sizeof(tshi_compose_op) + recv + counts + headers);
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
    op->deadline = tsh_deadline(coll->timeout_ns, group->world->timeout);
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
