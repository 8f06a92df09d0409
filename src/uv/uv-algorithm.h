/* ========================================================================== */
/* >>uv-algorithm                              MARK: - uv-algorithm (private) */
/* Computes which bytes a collective sends to which peer, and where received  */
/* bytes belong. It does no I/O: >>uv-flow calls tshi_uv_bytes_at.            */
/* Needs: >>uv-heap >>uv-group.                                               */
/* ========================================================================== */

/* The ring algorithm. Every rank sends one stream of bytes to the next rank and receives one from
 * the previous rank. The data is cut into P chunks, one per rank, and every chunk into segments of
 * TSHI_UV_SEGMENT bytes. A stream is a sequence of rows, and row i a sequence of steps, each of
 * which carries segment i of one chunk. In step t, rank r sends a segment of chunk r-1-t if it
 * sums, of chunk r-t if it gathers (indices mod P), and receives one of the chunk before. What
 * arrives in one step is sent in the next, while it is in the cache: in the first P-1 steps of a
 * sum with this rank's own segment added, else unchanged. So chunk k is the sum x[k+1] + x[k+2] +
 * ... + x[k+P], with x[r] from rank r mod P: the documented order (rule 5 of >>comm-api).
 *
 * With several hosts, each of which has a range of ranks, the first rank of a host gathers what
 * began on its own host (the last steps of its row) from the host's last rank, not from the
 * previous rank: so no chunk that a host has crosses a link to it. On a link between H hosts of R
 * ranks an all-gather of n bytes takes (H-1)/H n, an all-reduce (P-1)/P n more. */

/* Contiguous bytes in a buffer. */
typedef struct tshi_uv_span {
    char *at;     /* address of the first byte */
    int64_t size; /* number of bytes */
} tshi_uv_span;

/* Returns the bytes of rank k's chunk of op's data; 0 if the chunk is empty. */
static int64_t tshi_uv_length(const tshi_uv_op *op, int k) {
    const tsh_coll *coll = &op->coll;
    const int size = op->group->size;
    if (coll->kind == TSH_ALLREDUCE) /* chunks of rule 5 (>>comm-api) */
        return (tshb_coll_chunk(coll->count, size, k + 1) - tshb_coll_chunk(coll->count, size, k)) *
               op->width;
    /* chunk k is recv_counts[k] elements of each of `blocks` rows */
    return coll->recv_counts[k] * coll->blocks * op->width;
}

/* Finds byte `offset` of rank k's part of a buffer. The buffer is coll.blocks rows of counts[0] +
 * counts[1] + ... elements; rank k's part is the k-th range of every row, counts[k] elements. */
static tshi_uv_span tshi_uv_in_rows(const tshi_uv_op *op, void *base, const int64_t *counts, int k,
                                    int64_t offset) {
    /* row: size in bytes of rank k's range in each row */
    int64_t width = op->width, row = counts[k] * width;
    /* whole: size in bytes of a row, which has one range per rank */
    int64_t whole = tshb_coll_before(counts, op->group->size) * width;
    /* b: index of the row that holds the byte; within: its offset in rank k's range of that row */
    int64_t b = row ? offset / row : 0, within = row ? offset % row : 0;
    tshi_uv_span span;
    span.at = (char *)base + b * whole + tshb_coll_before(counts, k) * width + within;
    span.size = row - within; /* up to the end of the range in this row */
    return span;
}

/* Finds byte `offset` of chunk k in a buffer that holds the chunks of all ranks. */
static tshi_uv_span tshi_uv_in_whole(const tshi_uv_op *op, void *base, int k, int64_t offset) {
    const tsh_coll *coll = &op->coll;
    int64_t chunk; /* index in the buffer of chunk k's first element */
    tshi_uv_span span;
    if (coll->kind != TSH_ALLREDUCE) return tshi_uv_in_rows(op, base, coll->recv_counts, k, offset);
    chunk = tshb_coll_chunk(coll->count, op->group->size, k);
    span.at = (char *)base + chunk * op->width + offset;
    span.size = tshi_uv_length(op, k) - offset;
    return span;
}

static void *tshi_uv_send_buffer(const tshi_uv_op *op) { /* Returns coll.send as non-const. */
    return (void *)(uintptr_t)op->coll.send; /* removes const; the bytes are only read */
}

static int tshi_uv_sums(const tshi_uv_op *op) { /* Returns 1 if op is a reduction. */
    return op->coll.kind == TSH_ALLREDUCE || op->coll.kind == TSH_REDUCE_SCATTER;
}

/* Returns the chunk that this rank sends in step 0 of a ring. */
static int tshi_uv_first_out(const tshi_uv_op *op) {
    return tshi_uv_sums(op) ? tshi_uv_prev(op->group) : op->group->rank;
}

/* Returns the chunk that this rank receives in step 0 of a ring. */
static int tshi_uv_first_in(const tshi_uv_op *op) {
    return (tshi_uv_first_out(op) + op->group->size - 1) % op->group->size;
}

/* Returns the number of steps that each row of a ring's stream has (row i: a sequence of steps, of
 * which each carries segment i of one chunk). */
static int tshi_uv_steps(const tshi_uv_op *op) {
    return (op->coll.kind == TSH_ALLREDUCE ? 2 : 1) * (op->group->size - 1);
}

/* Returns how many steps of a ring, the first ones of each row, receive bytes that are added to
 * this rank's own; 0: op is no reduction. */
static int tshi_uv_summed(const tshi_uv_op *op) {
    return tshi_uv_sums(op) ? op->group->size - 1 : 0;
}

/* A lane is what one rank sends to another in a ring: steps [from, to) of each row of its stream.
 * first: the chunk of step 0. */
typedef struct tshi_uv_lane {
    int first, from, to;
} tshi_uv_lane;

/* Returns the lane (steps of a ring's rows) that this rank sends to a peer (out = 1), or receives
 * from it. */
static tshi_uv_lane tshi_uv_lane_of(const tshi_uv_op *op, int peer, int out) {
    const tshi_uv_group *group = op->group;
    const int rank = group->rank, receiver = out ? peer : rank, sender = out ? rank : peer;
    const int steps = tshi_uv_steps(op), others = group->last[receiver] - group->first[receiver];
    tshi_uv_lane lane = {out ? tshi_uv_first_out(op) : tshi_uv_first_in(op), 0, steps};
    if (op->coll.kind == TSH_REDUCE_SCATTER || receiver != group->first[receiver]) return lane;
    if (sender != group->last[receiver]) { /* sender: the ring's previous rank */
        lane.to = steps - others;
    } else {
        /* the receiver's last steps of each row are the sender's first ones after its sums */
        lane.from = out ? tshi_uv_summed(op) : steps - others;
        lane.to = lane.from + others;
    }
    return lane;
}

/* Returns 1 if op is an all-gather or all-reduce and this rank's host has several ranks: then the
 * host's last rank sends to its first the chunks that the first does not get from the previous
 * rank. */
static int tshi_uv_closes(const tshi_uv_op *op) {
    const tshi_uv_group *group = op->group;
    return group->last[group->rank] > group->first[group->rank] &&
           op->coll.kind != TSH_REDUCE_SCATTER;
}

/* A position in the stream of bytes that a rank sends, or receives, in the ring algorithm. */
typedef struct tshi_uv_at {
    int64_t row;        /* index of the row of the stream */
    int step, chunk;    /* step within the row; chunk whose segment that step carries */
    int64_t done, left; /* done, left: bytes of the step before this position, and from it on */
    int64_t offset;     /* offset of this position in the chunk, in bytes */
} tshi_uv_at;

/* Returns the chunk of which step `step` of a lane carries a segment. */
static int tshi_uv_chunk_of(const tshi_uv_op *op, const tshi_uv_lane *lane, int step) {
    return (lane->first + 2 * op->group->size - step) % op->group->size;
}

/* Returns the number of bytes of a lane's stream that precede row `row` (row i: a sequence of
 * steps, of which each carries segment i of one chunk). */
static int64_t tshi_uv_before_row(const tshi_uv_op *op, const tshi_uv_lane *lane, int64_t row) {
    int64_t total = 0;
    for (int t = lane->from; t < lane->to; t++)
        total += tshi_uv_min(tshi_uv_length(op, tshi_uv_chunk_of(op, lane, t)),
                             row * TSHI_UV_SEGMENT);
    return total;
}

/* Returns the size in bytes of a lane's whole stream. */
static int64_t tshi_uv_lane_total(const tshi_uv_op *op, const tshi_uv_lane *lane) {
    return tshi_uv_before_row(op, lane, INT64_MAX / TSHI_UV_SEGMENT);
}

/* Returns the size in bytes of segment `row` of chunk k; 0: the chunk has fewer segments. All but
 * a chunk's last segment have TSHI_UV_SEGMENT bytes. */
static int64_t tshi_uv_segment(const tshi_uv_op *op, int k, int64_t row) {
    int64_t left = tshi_uv_length(op, k) - row * TSHI_UV_SEGMENT;
    return left < 0 ? 0 : tshi_uv_min(left, TSHI_UV_SEGMENT);
}

/* Returns the offset in a lane's stream of the point `done` bytes into step `step` of row `row`. */
static int64_t tshi_uv_position(const tshi_uv_op *op, const tshi_uv_lane *lane, int64_t row,
                                int step, int64_t done) {
    int64_t total = tshi_uv_before_row(op, lane, row) + done;
    for (int t = lane->from; t < step; t++)
        total += tshi_uv_segment(op, tshi_uv_chunk_of(op, lane, t), row);
    return total;
}

/* Finds the row, step and chunk of byte `at` of a lane's stream. Rows have the same size, but for
 * the last ones, so a division mostly finds the row. */
static tshi_uv_at tshi_uv_locate(const tshi_uv_op *op, const tshi_uv_lane *lane, int64_t at) {
    tshi_uv_at place;
    int64_t low = at / (TSHI_UV_SEGMENT * (int64_t)(lane->to - lane->from)), high = low + 1;
    while (tshi_uv_before_row(op, lane, high) <= at) high = low + 2 * (high - low);
    while (high - low > 1) { /* the row sought is in [low, high) */
        int64_t middle = low + (high - low) / 2;
        if (tshi_uv_before_row(op, lane, middle) <= at)
            low = middle;
        else
            high = middle;
    }
    at -= tshi_uv_before_row(op, lane, low); /* now the offset in row `low` */
    place.row = low;
    for (place.step = lane->from;; place.step++) { /* goes through the steps of the row */
        int64_t n;
        place.chunk = tshi_uv_chunk_of(op, lane, place.step);
        n = tshi_uv_segment(op, place.chunk, low); /* bytes that this step of the ring carries */
        place.done = at;
        place.left = n - at;
        place.offset = low * TSHI_UV_SEGMENT + at;
        if (at < n) return place;
        at -= n;
    }
}

/* Finds byte `at` of the incoming stream in the window: a circular buffer in scratch for bytes that
 * wait to be summed or, in a reduce-scatter, to be sent on. */
static tshi_uv_span tshi_uv_window(const tshi_uv_op *op, int64_t at) {
    tshi_uv_span span;
    span.at = op->scratch + at % TSHI_UV_WINDOW;
    /* up to the end of scratch, where the window wraps around */
    span.size = TSHI_UV_WINDOW - at % TSHI_UV_WINDOW;
    return span;
}

/* Returns how many bytes of the outgoing lane may be sent, given that `ready` bytes of what `peer`
 * sends may be forwarded. INT64_MAX: the rest of the lane does not depend on `peer`. */
static int64_t tshi_uv_lane_ready(const tshi_uv_op *op, const tshi_uv_lane *out, int peer,
                                  int64_t ready) {
    const tshi_uv_lane lane = tshi_uv_lane_of(op, peer, 0);
    tshi_uv_at in;
    int again; /* the first step of each row of `out` that needs bytes from the peer */
    if (ready >= op->in[peer].total) return INT64_MAX;
    in = tshi_uv_locate(op, &lane, ready);
    again = lane.from + 1 < out->from ? out->from : lane.from + 1;
    if (in.step + 1 < out->from) return tshi_uv_position(op, out, in.row, out->from, 0);
    if (in.step + 1 < out->to) return tshi_uv_position(op, out, in.row, in.step + 1, in.done);
    /* byte `ready` is in a step that is not forwarded: nothing waits for it before the next row */
    return again < out->to ? tshi_uv_position(op, out, in.row + 1, again, 0) : INT64_MAX;
}

/* Returns how many bytes of the ring's stream to a peer may be sent so far: bytes of step t need
 * the bytes received in step t-1; those of step 0 need none. */
static int64_t tshi_uv_ring_ready(const tshi_uv_op *op, int peer, int64_t total) {
    const tshi_uv_group *group = op->group;
    const int last = group->last[group->rank];
    const tshi_uv_lane out = tshi_uv_lane_of(op, peer, 1);
    int64_t ready = tshi_uv_lane_ready(op, &out, tshi_uv_prev(group), op->ready);
    if (group->rank == group->first[last] && tshi_uv_closes(op))
        ready = tshi_uv_min(ready, tshi_uv_lane_ready(op, &out, last, op->in[last].good));
    return tshi_uv_min(ready, total);
}

/* Returns how many bytes of a reduce-scatter's incoming stream have been forwarded, so that their
 * place in the window (op->scratch) is free. */
static int64_t tshi_uv_sent_on(const tshi_uv_op *op) {
    const int prev = tshi_uv_prev(op->group), next = tshi_uv_next(op->group);
    const tshi_uv_stream *s = &op->out[next];
    const tshi_uv_lane in = tshi_uv_lane_of(op, prev, 0), lane = tshi_uv_lane_of(op, next, 1);
    tshi_uv_at out;
    if (s->done == s->total) return op->ready; /* the whole outgoing stream is sent */
    out = tshi_uv_locate(op, &lane, s->done);
    if (out.step == 0) return tshi_uv_min(op->ready, tshi_uv_before_row(op, &in, out.row));
    return tshi_uv_min(op->ready, tshi_uv_position(op, &in, out.row, out.step - 1, out.done));
}

/* Finds byte `at` of the ring's stream to a peer, which must be ready to send. */
static tshi_uv_span tshi_uv_ring_out(const tshi_uv_op *op, int peer, int64_t at) {
    const tshi_uv_lane in = tshi_uv_lane_of(op, tshi_uv_prev(op->group), 0);
    const tshi_uv_lane lane = tshi_uv_lane_of(op, peer, 1);
    tshi_uv_at out = tshi_uv_locate(op, &lane, at);
    char *send = (char *)tshi_uv_send_buffer(op);
    tshi_uv_span span = {send + out.offset, out.left}; /* for an all-gather's step 0 */
    /* later steps of a reduce-scatter send the sums that are in the window */
    if (out.step > 0 && op->coll.kind == TSH_REDUCE_SCATTER)
        span = tshi_uv_window(op, tshi_uv_position(op, &in, out.row, out.step - 1, out.done));
    else if (out.step > 0 || tshi_uv_sums(op)) /* step 0: from send; later: from recv */
        span = tshi_uv_in_whole(op, out.step ? op->coll.recv : send, out.chunk, out.offset);
    span.size = tshi_uv_min(span.size, out.left);
    return span;
}

/* Finds where byte `at` of the ring's stream from a peer is to be stored; size 0: the window
 * (op->scratch) is full. */
static tshi_uv_span tshi_uv_ring_in(const tshi_uv_op *op, int peer, int64_t at) {
    const tshi_uv_lane lane = tshi_uv_lane_of(op, peer, 0);
    tshi_uv_at in = tshi_uv_locate(op, &lane, at);
    int64_t used = op->ready; /* bytes received so far whose place in the window is free again */
    tshi_uv_span span;
    if (in.step >= tshi_uv_summed(op)) { /* bytes that are not to be summed go straight into recv */
        span = tshi_uv_in_whole(op, op->coll.recv, in.chunk, in.offset);
    } else {
        if (op->coll.kind == TSH_REDUCE_SCATTER) used = tshi_uv_sent_on(op);
        span = tshi_uv_window(op, at);
        /* limits the span to the free space of the window */
        span.size = tshi_uv_min(span.size, used + TSHI_UV_WINDOW - at);
    }
    span.size = tshi_uv_min(span.size, in.left);
    return span;
}

/* Adds at most `come` received bytes of one step, from op->ready on, to this rank's own elements;
 * only whole elements are added. in: the position of op->ready in the incoming stream. Returns how
 * many bytes were added. */
static int64_t tshi_uv_fold_step(tshi_uv_op *op, tshi_uv_at in, int64_t come) {
    const tsh_coll *coll = &op->coll;
    /* left: the received partial sums; out: where the new sums are stored; right: this rank's own
     * elements */
    tshi_uv_span left = tshi_uv_window(op, op->ready), out = left;
    tshi_uv_span right = tshi_uv_in_whole(op, tshi_uv_send_buffer(op), in.chunk, in.offset);
    int64_t width = op->width, most = tshi_uv_min(left.size, right.size);
    int64_t n = tshi_uv_min(most, tshi_uv_min(come, in.left)) / width; /* n: number of elements */
    int last = in.step == op->group->size - 2; /* 1: this step completes the chunk */
    if (coll->kind == TSH_ALLREDUCE)
        out = tshi_uv_in_whole(op, coll->recv, in.chunk, in.offset); /* the sum's final place */
    else if (last)
        out.at = (char *)coll->recv + in.offset; /* recv holds this rank's chunk only */
    tshb_coll_fold(out.at, left.at, right.at, n, coll->dtype, coll->redop);
    if (last) tshb_coll_finish(out.at, n, coll->dtype, coll->redop, op->group->size);
    return n * width;
}

/* Sums what has arrived from the previous rank of a ring, and advances op->ready, the bytes that
 * may be sent on. */
static void tshi_uv_ring_fold(tshi_uv_op *op) {
    const tshi_uv_lane lane = tshi_uv_lane_of(op, tshi_uv_prev(op->group), 0);
    /* come: bytes received; n: bytes that one turn of the loop summed, or kept unchanged; 0: not
     * even one whole element is left */
    int64_t come = op->in[tshi_uv_prev(op->group)].good, n = 1;
    while (op->ready < come && n) {
        tshi_uv_at in = tshi_uv_locate(op, &lane, op->ready);
        n = in.step < tshi_uv_summed(op) ? tshi_uv_fold_step(op, in, come - op->ready)
                                         : tshi_uv_min(in.left, come - op->ready);
        op->ready += n;
    }
}

/* ---- TSHI_UV_DIRECT: every rank sends its data to every other rank ---- */

/* Returns 1 if rank `from` sends the sum of chunk k to rank `to` in TSHI_UV_PIECES. Rank k sends it
 * to all ranks of its host and to one rank of each other host, which sends it to the others
 * there. */
static int tshi_uv_carries(const tshi_uv_op *op, int from, int to, int k) {
    const int *first = op->group->first, *last = op->group->last;
    const int at = first[to] == first[from] ? from : to; /* a rank of `to`'s host */
    /* the rank of that host to which rank k sends the sum of chunk k */
    const int twin = first[at] + (k - first[k]) % (last[at] - first[at] + 1);
    if (first[to] != first[from]) return k == from && twin == to;
    return k == from || (first[k] != first[from] && twin == from);
}

/* Returns the bytes of all sums that rank `from` sends to rank `to` by TSHI_UV_PIECES. */
static int64_t tshi_uv_carried(const tshi_uv_op *op, int from, int to) {
    int64_t sum = 0;
    for (int k = 0; k < op->group->size; k++)
        if (tshi_uv_carries(op, from, to, k)) sum += tshi_uv_length(op, k);
    return sum;
}

/* Returns how many bytes rank `from` sends to rank `to` by TSHI_UV_DIRECT or TSHI_UV_PIECES. */
static int64_t tshi_uv_direct_size(const tshi_uv_op *op, int from, int to) {
    const tsh_coll *coll = &op->coll;
    switch (coll->kind) {
    case TSH_ALLREDUCE:
        if (op->algorithm == TSHI_UV_PIECES) /* data of chunk `to`, then sums */
            return tshi_uv_length(op, to) + tshi_uv_carried(op, from, to);
        return coll->count * op->width;                     /* the whole send buffer */
    case TSH_ALLGATHER: return tshi_uv_length(op, from);    /* all that rank `from` has */
    case TSH_REDUCE_SCATTER: return tshi_uv_length(op, to); /* the chunk that rank `to` sums */
    case TSH_ALLTOALL: /* this rank is `from` or `to`, so it knows the count */
        return (from == op->group->rank ? coll->send_counts[to] : coll->recv_counts[from]) *
               coll->blocks * op->width;
    case TSH_SPLIT: return coll->count; /* bytes of a ticket (tshi_uv_ticket) */
    default: return 0;                  /* a barrier: headers without payload */
    }
}

/* Returns the size in bytes of a row of scratch. Row r stores what rank r has sent; with
 * TSHI_UV_PIECES it is a circular buffer, which holds a whole number of elements. */
static int64_t tshi_uv_row_size(const tshi_uv_op *op) {
    const int64_t least = 4096, share = TSHI_UV_WINDOW / op->group->size / 64 * 64;
    if (op->algorithm == TSHI_UV_PIECES) return share < least ? least : share;
    return tshi_uv_direct_size(op, op->group->rank, op->group->rank);
}

/* Returns where the bytes sent by rank `from` are stored: row `from` of scratch or, in a split,
 * ticket `from` in recv. */
static char *tshi_uv_row(const tshi_uv_op *op, int from) {
    char *rows = op->coll.kind == TSH_SPLIT ? (char *)op->coll.recv : op->scratch;
    return rows + tshi_uv_row_size(op) * from;
}

/* Finds byte `offset` of the data that is sent to a peer (out = 1), or received from it (out = 0),
 * by TSHI_UV_DIRECT. */
static tshi_uv_span tshi_uv_direct_at(const tshi_uv_op *op, int peer, int64_t offset, int out) {
    const tsh_coll *coll = &op->coll;
    void *base = out ? tshi_uv_send_buffer(op) : coll->recv;
    int own = op->group->rank;
    tshi_uv_span span;
    if (coll->kind == TSH_ALLTOALL)
        return tshi_uv_in_rows(op, base, out ? coll->send_counts : coll->recv_counts, peer, offset);
    /* `base` has a part for each rank; finds that of the peer */
    if (coll->kind == (out ? TSH_REDUCE_SCATTER : TSH_ALLGATHER))
        return tshi_uv_in_whole(op, base, peer, offset);
    /* otherwise the data sent to a peer, or received from it, is contiguous */
    span.at = (out ? (char *)base : tshi_uv_row(op, peer)) + offset;
    span.size = tshi_uv_direct_size(op, out ? own : peer, out ? peer : own) - offset;
    return span;
}

/* Returns the slot in which rank r shows what it sends in collective `number` on the board. The
 * bytes are behind the struct. */
static tshi_uv_slot *tshi_uv_slot_of(const tshi_uv_group *group, int r, uint64_t number) {
    const int64_t offset = (int64_t)(number % TSHI_UV_SLOTS) * group->slot;
    return (tshi_uv_slot *)(void *)(group->link[r].slots + offset);
}

/* Returns the bytes that rank r shows in op. */
static char *tshi_uv_slot_data(const tshi_uv_op *op, int r) {
    return (char *)(tshi_uv_slot_of(op->group, r, op->boarded) + 1);
}

/* Argument of tshi_uv_message_of, the callback that gives tshb_coll_sum each rank's elements. */
typedef struct tshi_uv_parts {
    const tshi_uv_op *op; /* the reduction that is computed */
    const char *own;      /* this rank's own elements, in its send buffer */
    int64_t at; /* offset in bytes in what each other rank has sent: a row of scratch, a payload in
                 * a ring of shared memory, or the data of a slot */
} tshi_uv_parts;

/* Returns how many bytes of the payload from a peer are summed where they lie, in the rings of
 * shared memory, and not copied to rows of scratch before. */
static int64_t tshi_uv_summed_in_place(const tshi_uv_op *op) {
    const tshi_uv_group *group = op->group;
    return op->algorithm == TSHI_UV_PIECES && group->whole ? tshi_uv_length(op, group->rank) : 0;
}

/* Finds byte `offset` of the payload of op that has arrived from rank r in shared memory: in the
 * ring or, by reference, in that rank's heap. The casts remove const; the bytes are only read. */
static tshi_uv_span tshi_uv_arrived(const tshi_uv_op *op, int r, int64_t offset) {
    const tshi_uv_link *link = &op->group->link[r];
    const tshi_uv_pipe *pipe = &link->pipe;
    const int64_t at = (pipe->payload + offset) & (pipe->size - 1);
    tshi_uv_span span = {(char *)(uintptr_t)pipe->in + at, pipe->size - at};
    if (!link->heard.refers) return span;
    span.at = (char *)(uintptr_t)pipe->summed.at + (offset - pipe->summed.begin);
    span.size = pipe->summed.end - offset;
    return span;
}

/* Returns 0 if a rank whose bytes were just read in its heap has withdrawn them. */
static int tshi_uv_all_unchanged(const tshi_uv_op *op) {
    const tshi_uv_group *group = op->group;
    int intact = 1;
    for (int r = 0; r < group->size && intact; r++)
        if (r != group->rank && group->link[r].heard.refers)
            intact = tshi_uv_unchanged(group->world, group->ranks[r]);
    return intact;
}

static const void *tshi_uv_message_of(const void *user, int r) { /* Returns rank r's elements. */
    const tshi_uv_parts *p = (const tshi_uv_parts *)user;
    if (r == p->op->group->rank) return p->own;
    if (p->op->algorithm == TSHI_UV_BOARD) return tshi_uv_slot_data(p->op, r) + p->at;
    if (tshi_uv_summed_in_place(p->op)) return tshi_uv_arrived(p->op, r, p->at).at;
    return tshi_uv_row(p->op, r) + p->at;
}

/* Sums up to `most` bytes of chunk k over all ranks, from byte `at` of the chunk on, and stores the
 * sums at byte `to` of recv. The other ranks' data begins at byte `from` of their rows of scratch.
 * Sums are computed in a tile and then copied, since recv may be the same buffer as send. Returns
 * how many bytes were summed, whole elements only. */
static int64_t tshi_uv_sum_tile(const tshi_uv_op *op, int k, int64_t at, int64_t most, int64_t from,
                                int64_t to) {
    double tile[512]; /* buffer for sums, as double, so that it is aligned for every dtype */
    /* this rank's own data: in an all-reduce at the same offset of send as the sums in recv */
    tshi_uv_span own = {(char *)tshi_uv_send_buffer(op) + to, most};
    tshi_uv_parts parts = {op, NULL, from};
    int64_t width = op->width, n;
    if (op->coll.kind != TSH_ALLREDUCE)
        own = tshi_uv_in_rows(op, tshi_uv_send_buffer(op), op->coll.recv_counts, k, at);
    parts.own = own.at;
    /* a slot has the data of a whole send buffer */
    if (op->algorithm == TSHI_UV_BOARD) parts.at = own.at - (const char *)op->coll.send;
    n = tshi_uv_min(tshi_uv_min(own.size, most), (int64_t)sizeof tile) / width;
    if (n <= 0) return 0;
    tshb_coll_sum(tile, n, &op->coll, op->group->size, k, tshi_uv_message_of, &parts);
    memcpy((char *)op->coll.recv + to, tile, (size_t)(n * width));
    return n * width;
}

/* Returns the offset in recv, in bytes, at which the sum of chunk k is stored. */
static int64_t tshi_uv_sum_place(const tshi_uv_op *op, int k) {
    if (op->coll.kind != TSH_ALLREDUCE) return 0; /* recv is that chunk only */
    return tshb_coll_chunk(op->coll.count, op->group->size, k) * op->width;
}

/* Sums the data of all ranks (TSHI_UV_DIRECT, _BOARD). Called once all of it has arrived. */
static void tshi_uv_direct_sums(const tshi_uv_op *op) {
    const tshi_uv_group *group = op->group;
    /* 1: sums every chunk; 0 (reduce-scatter): only this rank's */
    int all = op->coll.kind == TSH_ALLREDUCE;
    int64_t base = 0; /* offset in recv at which the sum of chunk k is stored */
    for (int k = all ? 0 : group->rank; k < (all ? group->size : group->rank + 1); k++) {
        int64_t size = all ? tshi_uv_sum_place(op, k + 1) - base : tshi_uv_length(op, k);
        for (int64_t at = 0; at < size;)
            at += tshi_uv_sum_tile(op, k, at, size - at, base + at, base + at);
        base += size;
    }
}

/* ---- TSHI_UV_PIECES: rank k sums chunk k of all ranks ---- */

/* Sums of 16-bit floats are to be rounded only once, at their end, so partial sums cannot be sent
 * on in 16 bits, as in a ring. Instead every rank sends its chunk k to rank k, which sums them and,
 * in an all-reduce, sends the sum to all ranks: as many bytes as in a ring. On each other host only
 * one rank gets the sum from rank k, and sends it to the others there. The stream to a peer is this
 * rank's data of the peer's chunk, then the sum of this rank's chunk, then the sums that it
 * forwards. In place (recv is send) that works too: the sum of a chunk, which overwrites this
 * rank's data, arrives only after that data was sent. */

/* A position in the sum of a chunk. */
typedef struct tshi_uv_sum {
    int chunk;
    int64_t at, left; /* at, left: bytes of the sum before the position, and from it on */
} tshi_uv_sum;

/* Finds byte `offset` of all sums that rank `from` sends to rank `to`: the sum of its own chunk
 * comes first. */
static tshi_uv_sum tshi_uv_sum_at(const tshi_uv_op *op, int from, int to, int64_t offset) {
    const int size = op->group->size;
    tshi_uv_sum sum = {from, offset, tshi_uv_length(op, from) - offset};
    if (tshi_uv_carries(op, from, to, from) && sum.left > 0) return sum;
    if (tshi_uv_carries(op, from, to, from)) offset -= tshi_uv_length(op, from);
    for (sum.chunk = 0; sum.chunk < size; sum.chunk++) {
        const int64_t length = tshi_uv_length(op, sum.chunk);
        if (sum.chunk == from || !tshi_uv_carries(op, from, to, sum.chunk)) continue;
        sum.at = offset;
        sum.left = length - offset;
        if (sum.left > 0) break;
        offset -= length;
    }
    return sum;
}

/* Returns how many of the `total` bytes of the stream to a peer may be sent so far, in
 * TSHI_UV_PIECES. */
static int64_t tshi_uv_pieces_ready(const tshi_uv_op *op, int peer, int64_t total) {
    const int own = op->group->rank;
    int64_t ready = tshi_uv_length(op, peer);
    while (ready < total) {
        const tshi_uv_sum sum = tshi_uv_sum_at(op, own, peer, ready - tshi_uv_length(op, peer));
        /* bytes of this sum that this rank has: computed here, or received from rank sum.chunk,
         * which first sends its data of this rank's chunk */
        const int64_t there = sum.chunk == own ? op->ready
                                               : op->in[sum.chunk].good - tshi_uv_length(op, own);
        if (there < sum.at + sum.left) return there > sum.at ? ready + there - sum.at : ready;
        ready += sum.left;
    }
    return total;
}

/* Sums those elements of this rank's chunk that have arrived from all ranks, and advances
 * op->ready, the bytes of the chunk that are summed. */
static void tshi_uv_pieces_fold(tshi_uv_op *op) {
    const int rank = op->group->rank, in_place = tshi_uv_summed_in_place(op) > 0;
    int64_t row = tshi_uv_row_size(op), base = tshi_uv_sum_place(op, rank);
    /* come: bytes of this rank's chunk that have arrived from every rank; n: bytes that one turn of
     * the loop below sums */
    int64_t come = tshi_uv_length(op, rank), n = 1;
    for (int r = 0; r < op->group->size; r++)
        if (r != rank) come = tshi_uv_min(come, op->in[r].good);
    /* the caller sends the sums on before it calls again */
    if (in_place) come = tshi_uv_min(come, op->ready + TSHI_UV_SHM_STEP);
    for (; op->ready < come && n; op->ready += n) { /* n is 0 if no whole element has arrived */
        int64_t at = op->ready % row, most = tshi_uv_min(come - op->ready, row - at);
        if (in_place) {
            at = op->ready;
            most = come - at;
            for (int r = 0; r < op->group->size; r++)
                if (r != rank) most = tshi_uv_min(most, tshi_uv_arrived(op, r, at).size);
        }
        n = tshi_uv_sum_tile(op, rank, op->ready, most, at, base + op->ready);
        if (in_place && !tshi_uv_all_unchanged(op)) return; /* the world has failed */
    }
}

/* Finds byte `offset` of the stream to a peer (out = 1), or from it (out = 0), by TSHI_UV_PIECES.
 * Size 0: the peer's row of scratch is full. */
static tshi_uv_span tshi_uv_pieces_at(const tshi_uv_op *op, int peer, int64_t offset, int out) {
    const int own = op->group->rank;
    int64_t part = tshi_uv_length(op, out ? peer : own), row = tshi_uv_row_size(op);
    tshi_uv_span span;
    if (offset >= part) {
        const tshi_uv_sum sum = tshi_uv_sum_at(op, out ? own : peer, out ? peer : own,
                                               offset - part);
        return tshi_uv_in_whole(op, op->coll.recv, sum.chunk, sum.at);
    }
    if (out) return tshi_uv_in_whole(op, tshi_uv_send_buffer(op), peer, offset);
    span.at = tshi_uv_row(op, peer) + offset % row;
    span.size = tshi_uv_min(row - offset % row, part - offset);
    /* limits the span to the free space of the row */
    span.size = tshi_uv_min(span.size, op->ready + row - offset);
    return span;
}

/* Copies the part of send that this rank would send to itself to its place in recv: n bytes from
 * byte `offset` of that part on. */
static void tshi_uv_own_piece(const tshi_uv_op *op, int64_t offset, int64_t n) {
    const int rank = op->group->rank;
    for (int64_t end = offset + n; offset < end;) {
        tshi_uv_span from = tshi_uv_direct_at(op, rank, offset, 1);
        tshi_uv_span to = tshi_uv_direct_at(op, rank, offset, 0);
        to.size = tshi_uv_min(to.size, end - offset);
        /* if send and recv are one buffer, the bytes are there already */
        if (to.at != from.at) memmove(to.at, from.at, (size_t)to.size);
        offset += to.size;
    }
}

/* ---- where the next bytes of a frame are, whatever the algorithm ---- */

/* Finds where byte `offset` of a frame's payload of `total` bytes is taken from, if the frame goes
 * to `peer` (out = 1), or stored, if it comes from `peer` (out = 0), and how many bytes can be
 * moved there at once. Size 0: no byte is ready to be sent, or there is no space for received ones
 * yet. */
static tshi_uv_span tshi_uv_bytes_at(const tshi_uv_op *op, int peer, int64_t offset, int64_t total,
                                     int out) {
    tshi_uv_span span = {NULL, 0};
    int64_t ready = total; /* bytes of payload that may be sent or stored so far */
    if (out && op->algorithm == TSHI_UV_RING) ready = tshi_uv_ring_ready(op, peer, total);
    if (out && op->algorithm == TSHI_UV_CHAIN && op->group->rank != op->coll.root)
        ready = op->in[tshi_uv_prev(op->group)].good; /* a chain sends on what has arrived */
    if (out && op->algorithm == TSHI_UV_PIECES) ready = tshi_uv_pieces_ready(op, peer, total);
    if (offset >= ready) return span;
    if (op->algorithm == TSHI_UV_PIECES) {
        span = tshi_uv_pieces_at(op, peer, offset, out);
    } else if (op->algorithm == TSHI_UV_RING) {
        span = out ? tshi_uv_ring_out(op, peer, offset) : tshi_uv_ring_in(op, peer, offset);
    } else if (op->algorithm == TSHI_UV_DIRECT) {
        span = tshi_uv_direct_at(op, peer, offset, out);
    } else {
        /* TSHI_UV_CHAIN, _STAR or _MESSAGE: the payload is one contiguous buffer. sends: 1: the
         * buffer is coll.send (of a message to send); 0: coll.recv (broadcasts are sent from it) */
        int sends = out && op->algorithm == TSHI_UV_MESSAGE;
        span.at = (char *)(sends ? tshi_uv_send_buffer(op) : op->coll.recv) + offset;
        span.size = total - offset;
    }
    span.size = tshi_uv_min(span.size, ready - offset);
    return span;
}

enum { TSHI_UV_BLOCK = 256 << 10 }; /* bytes of payload that one checksum covers, at most */

/* Returns where a block of payload ends that begins at byte `offset` of a frame to (out = 1) or
 * from (out = 0) a peer; both ends compute the same. A receiver uses only whole blocks. So a block
 * must end before bytes that the sender can compute only from what the receiver makes of the block:
 * it ends with the step of a ring, and with the peer's chunk in TSHI_UV_PIECES. In that chunk a
 * block is half a row of scratch at most, so that the row has space for the next block. */
static int64_t tshi_uv_block(const tshi_uv_op *op, int peer, int64_t offset, int64_t total,
                             int out) {
    int64_t most = TSHI_UV_BLOCK, left = total - offset;
    if (op->algorithm == TSHI_UV_RING) {
        const tshi_uv_lane lane = tshi_uv_lane_of(op, peer, out);
        left = tshi_uv_locate(op, &lane, offset).left;
    } else if (op->algorithm == TSHI_UV_PIECES) {
        int64_t part = tshi_uv_length(op, out ? peer : op->group->rank);
        if (offset < part) left = part - offset;
        if (offset < part) most = tshi_uv_min(most, tshi_uv_row_size(op) / 2);
    }
    return offset + tshi_uv_min(left, most);
}
