/* ========================================================================== */
/* >>uv-algorithm                              MARK: - uv-algorithm (private) */
/* Computes which bytes a collective sends to which peer, and where received  */
/* bytes belong. It does no I/O: >>uv-flow calls tshi_uv_bytes_at.            */
/* Needs: >>uv-group.                                                         */
/* ========================================================================== */

/* The ring. Every rank sends one stream of bytes to the next rank and receives one from the rank
 * before. Data is cut into P chunks and every chunk into segments. A stream consists of rows: row i
 * carries segment i of the chunks, one chunk per step. In step t, rank r sends that of chunk r-1-t
 * in a sum, of chunk r-t in a gather (indices mod P), and receives that of the chunk before. What
 * arrives in one step is sent in the next, while it is in the cache: in the first P-1 steps of a
 * sum with this rank's own segment added, else unchanged. So chunk k is the sum x[k+1] + x[k+2] +
 * ... + x[k+P], with x[r] from rank r mod P: the documented order (rule 5 of >>comm-api). */

/* A place in a buffer. */
typedef struct tshi_uv_span {
    char *at;     /* the first byte */
    int64_t size; /* contiguous bytes from `at` */
} tshi_uv_span;

static int64_t tshi_uv_width(const tshi_uv_op *op) { /* Returns the bytes of an element. */
    return (int64_t)tsh_dtype_size(op->coll.dtype);
}

/* Returns the size of chunk k in bytes, which may be 0. */
static int64_t tshi_uv_length(const tshi_uv_op *op, int k) {
    const tsh_coll *coll = &op->coll;
    const int size = op->group->size;
    if (coll->kind == TSH_ALLREDUCE) /* chunks of rule 5 (>>comm-api) */
        return (tshb_coll_chunk(coll->count, size, k + 1) - tshb_coll_chunk(coll->count, size, k)) *
               tshi_uv_width(op);
    return coll->recv_counts[k] * coll->blocks * tshi_uv_width(op); /* as the call's counts say */
}

/* Finds byte `offset` of rank k's part in a buffer of `blocks` rows of counts[0] + ... elements. */
static tshi_uv_span tshi_uv_in_rows(const tshi_uv_op *op, void *base, const int64_t *counts, int k,
                                    int64_t offset) {
    int64_t width = tshi_uv_width(op), row = counts[k] * width; /* row: bytes per row, of rank k */
    int64_t whole = tshb_coll_before(counts, op->group->size) * width;   /* bytes of a whole row */
    int64_t b = row ? offset / row : 0, within = row ? offset % row : 0; /* b: index of the row */
    tshi_uv_span span;
    span.at = (char *)base + b * whole + tshb_coll_before(counts, k) * width + within;
    span.size = row - within; /* to the end of the part in this row */
    return span;
}

/* Finds byte `offset` of chunk k in a buffer that holds the chunks of all ranks. */
static tshi_uv_span tshi_uv_in_whole(const tshi_uv_op *op, void *base, int k, int64_t offset) {
    const tsh_coll *coll = &op->coll;
    int64_t chunk; /* where the chunk starts, in elements */
    tshi_uv_span span;
    if (coll->kind != TSH_ALLREDUCE) return tshi_uv_in_rows(op, base, coll->recv_counts, k, offset);
    chunk = tshb_coll_chunk(coll->count, op->group->size, k);
    span.at = (char *)base + chunk * tshi_uv_width(op) + offset;
    span.size = tshi_uv_length(op, k) - offset;
    return span;
}

static void *tshi_uv_send_buffer(const tshi_uv_op *op) { /* Returns coll.send as non-const. */
    return (void *)(uintptr_t)op->coll.send;             /* const is cast away; only read */
}

static int tshi_uv_sums(const tshi_uv_op *op) { /* Returns 1 if op is a reduction. */
    return op->coll.kind == TSH_ALLREDUCE || op->coll.kind == TSH_REDUCE_SCATTER;
}

/* Returns the chunk with which a ring's outgoing stream starts. */
static int tshi_uv_first_out(const tshi_uv_op *op) {
    return tshi_uv_sums(op) ? tshi_uv_prev(op->group) : op->group->rank;
}

static int tshi_uv_first_in(const tshi_uv_op *op) { /* Returns the first chunk that is received. */
    return (tshi_uv_first_out(op) + op->group->size - 1) % op->group->size;
}

static int tshi_uv_steps(const tshi_uv_op *op) { /* Returns the number of steps of a row. */
    return (op->coll.kind == TSH_ALLREDUCE ? 2 : 1) * (op->group->size - 1);
}

/* Returns how many steps of a row, the first ones, add what is received. */
static int tshi_uv_summed(const tshi_uv_op *op) {
    return tshi_uv_sums(op) ? op->group->size - 1 : 0;
}

/* A position in a ring's stream. */
typedef struct tshi_uv_at {
    int64_t row;        /* index of the row of segments */
    int step, chunk;    /* step of the row; chunk of that step */
    int64_t done, left; /* bytes of the step before this position, and after */
    int64_t offset;     /* of this position in the chunk, in bytes */
} tshi_uv_at;

static int tshi_uv_chunk_of(const tshi_uv_op *op, int first, int step) { /* Returns step's chunk. */
    return (first + 2 * op->group->size - step) % op->group->size;
}

/* Returns the bytes of a stream before row `row`; `first` is the chunk of the stream's step 0. */
static int64_t tshi_uv_before_row(const tshi_uv_op *op, int first, int64_t row) {
    int64_t total = 0;
    for (int t = 0; t < tshi_uv_steps(op); t++)
        total += tshi_uv_min(tshi_uv_length(op, tshi_uv_chunk_of(op, first, t)),
                             row * TSHI_UV_SEGMENT);
    return total;
}

/* Returns the size in bytes of chunk k's segment in a row; 0: the chunk ends before it. */
static int64_t tshi_uv_segment(const tshi_uv_op *op, int k, int64_t row) {
    int64_t left = tshi_uv_length(op, k) - row * TSHI_UV_SEGMENT;
    return left < 0 ? 0 : tshi_uv_min(left, TSHI_UV_SEGMENT);
}

/* Returns the offset in the stream of the point `done` bytes into step `step` of row `row`. */
static int64_t tshi_uv_position(const tshi_uv_op *op, int first, int64_t row, int step,
                                int64_t done) {
    int64_t total = tshi_uv_before_row(op, first, row) + done;
    for (int t = 0; t < step; t++)
        total += tshi_uv_segment(op, tshi_uv_chunk_of(op, first, t), row);
    return total;
}

/* Finds the row, step and chunk of byte `at`, which must lie in the stream. All rows but the last
 * ones are full, so the first guess, by division, is mostly right. */
static tshi_uv_at tshi_uv_locate(const tshi_uv_op *op, int first, int64_t at) {
    tshi_uv_at place;
    int64_t low = at / (TSHI_UV_SEGMENT * (int64_t)tshi_uv_steps(op)), high = low + 1;
    while (tshi_uv_before_row(op, first, high) <= at) high = low + 2 * (high - low);
    while (high - low > 1) { /* the row sought is in [low, high) */
        int64_t middle = low + (high - low) / 2;
        if (tshi_uv_before_row(op, first, middle) <= at)
            low = middle;
        else
            high = middle;
    }
    at -= tshi_uv_before_row(op, first, low); /* now an offset in the row */
    place.row = low;
    for (place.step = 0;; place.step++) { /* walks along the steps of the row */
        int64_t n;
        place.chunk = tshi_uv_chunk_of(op, first, place.step);
        n = tshi_uv_segment(op, place.chunk, low); /* bytes of the step */
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
    span.size = TSHI_UV_WINDOW - at % TSHI_UV_WINDOW; /* to its end; the rest wraps around */
    return span;
}

/* Returns how many bytes of the outgoing stream may be sent: those of step t need the incoming ones
 * of step t-1; those of step 0 need nothing. */
static int64_t tshi_uv_ring_ready(const tshi_uv_op *op, int64_t total) {
    tshi_uv_at in;
    int first = tshi_uv_first_out(op);
    if (op->ready >= op->in[tshi_uv_prev(op->group)].total) return total; /* all has arrived */
    in = tshi_uv_locate(op, tshi_uv_first_in(op), op->ready); /* the position of op->ready */
    if (in.step + 1 < tshi_uv_steps(op))
        return tshi_uv_position(op, first, in.row, in.step + 1, in.done);
    return tshi_uv_position(op, first, in.row + 1, 1, 0); /* the next row's step 0 needs nothing */
}

/* Returns how many bytes of a reduce-scatter's incoming stream were sent on from the window. */
static int64_t tshi_uv_sent_on(const tshi_uv_op *op) {
    const tshi_uv_stream *s = &op->out[tshi_uv_next(op->group)]; /* the outgoing stream */
    int first = tshi_uv_first_in(op);
    tshi_uv_at out;
    if (s->done == s->total) return op->ready; /* all is sent */
    out = tshi_uv_locate(op, tshi_uv_first_out(op), s->done);
    if (out.step == 0) return tshi_uv_min(op->ready, tshi_uv_before_row(op, first, out.row));
    return tshi_uv_min(op->ready, tshi_uv_position(op, first, out.row, out.step - 1, out.done));
}

/* Finds byte `at` of the outgoing stream, which must be ready to send. */
static tshi_uv_span tshi_uv_ring_out(const tshi_uv_op *op, int64_t at) {
    tshi_uv_at out = tshi_uv_locate(op, tshi_uv_first_out(op), at);
    char *send = (char *)tshi_uv_send_buffer(op);
    tshi_uv_span span = {send + out.offset, out.left};       /* all-gather, step 0: its own part */
    if (out.step > 0 && op->coll.kind == TSH_REDUCE_SCATTER) /* sums lie in the window */
        span = tshi_uv_window(
            op, tshi_uv_position(op, tshi_uv_first_in(op), out.row, out.step - 1, out.done));
    else if (out.step > 0 || tshi_uv_sums(op)) /* step 0: in send; later: in recv */
        span = tshi_uv_in_whole(op, out.step ? op->coll.recv : send, out.chunk, out.offset);
    span.size = tshi_uv_min(span.size, out.left);
    return span;
}

/* Finds where byte `at` of the incoming stream is to be stored; size 0: the window is full. */
static tshi_uv_span tshi_uv_ring_in(const tshi_uv_op *op, int64_t at) {
    tshi_uv_at in = tshi_uv_locate(op, tshi_uv_first_in(op), at);
    int64_t used = op->ready; /* bytes that have left the window */
    tshi_uv_span span;
    if (in.step >= tshi_uv_summed(op)) { /* nothing to add: straight into recv */
        span = tshi_uv_in_whole(op, op->coll.recv, in.chunk, in.offset);
    } else {
        if (op->coll.kind == TSH_REDUCE_SCATTER) used = tshi_uv_sent_on(op);
        span = tshi_uv_window(op, at);
        span.size = tshi_uv_min(span.size, used + TSHI_UV_WINDOW - at); /* at most what is free */
    }
    span.size = tshi_uv_min(span.size, in.left);
    return span;
}

/* Sums `come` received bytes of a step, whole elements only. Returns how many bytes were summed. */
static int64_t tshi_uv_fold_step(tshi_uv_op *op, tshi_uv_at in, int64_t come) {
    const tsh_coll *coll = &op->coll;
    tshi_uv_span left = tshi_uv_window(op, op->ready), out = left; /* left: received partial sums */
    tshi_uv_span right = tshi_uv_in_whole(op, tshi_uv_send_buffer(op), in.chunk, in.offset);
    int64_t width = tshi_uv_width(op), most = tshi_uv_min(left.size, right.size);
    int64_t n = tshi_uv_min(most, tshi_uv_min(come, in.left)) / width; /* n: in elements */
    int last = in.step == op->group->size - 2; /* 1: this step completes the chunk */
    if (coll->kind == TSH_ALLREDUCE)
        out = tshi_uv_in_whole(op, coll->recv, in.chunk, in.offset); /* into its final place */
    else if (last)
        out.at = (char *)coll->recv + in.offset; /* the sum for this rank */
    tshb_coll_fold(out.at, left.at, right.at, n, coll->dtype, coll->redop);
    if (last) tshb_coll_finish(out.at, n, coll->dtype, coll->redop, op->group->size);
    return n * width;
}

/* Sums what has arrived on a ring, and advances op->ready, the bytes that may be sent on. */
static void tshi_uv_ring_fold(tshi_uv_op *op) {
    int64_t come = op->in[tshi_uv_prev(op->group)].good, n = 1; /* n 0: no whole element */
    while (op->ready < come && n) {
        tshi_uv_at in = tshi_uv_locate(op, tshi_uv_first_in(op), op->ready);
        n = in.step < tshi_uv_summed(op) ? tshi_uv_fold_step(op, in, come - op->ready)
                                         : tshi_uv_min(in.left, come - op->ready);
        op->ready += n;
    }
}

/* ---- each to each ---- */

/* Returns the bytes that rank `from` sends to rank `to`, directly or in pieces. */
static int64_t tshi_uv_direct_size(const tshi_uv_op *op, int from, int to) {
    const tsh_coll *coll = &op->coll;
    switch (coll->kind) {
    case TSH_ALLREDUCE:
        if (op->algorithm == TSHI_UV_PIECES) /* chunk `to`, then the sum of chunk `from` */
            return tshi_uv_length(op, to) + tshi_uv_length(op, from);
        return coll->count * tshi_uv_width(op);                 /* all of it */
    case TSH_ALLGATHER: return tshi_uv_length(op, from);        /* the part of `from` */
    case TSH_REDUCE_SCATTER: return tshi_uv_length(op, to);     /* the part of `to` */
    case TSH_ALLTOALL: /* this rank is one of the two and knows the count */
        return (from == op->group->rank ? coll->send_counts[to] : coll->recv_counts[from]) *
               coll->blocks * tshi_uv_width(op);
    case TSH_SPLIT: return coll->count; /* bytes of a ticket */
    default: return 0;                  /* a barrier: headers only */
    }
}

/* Returns the bytes of a row of scratch, which has what one rank sent. In pieces a row is a
 * circular buffer of whole elements. */
static int64_t tshi_uv_row_size(const tshi_uv_op *op) {
    const int64_t least = 4096, share = TSHI_UV_WINDOW / op->group->size / 64 * 64;
    if (op->algorithm == TSHI_UV_PIECES) return share < least ? least : share;
    return tshi_uv_direct_size(op, op->group->rank, op->group->rank);
}

/* Returns where what rank `from` sent is stored: row `from` of scratch, if it will be reduced; row
 * `from` of recv, if it is the color and key of a split. */
static char *tshi_uv_row(const tshi_uv_op *op, int from) {
    char *rows = op->coll.kind == TSH_SPLIT ? (char *)op->coll.recv : op->scratch;
    return rows + tshi_uv_row_size(op) * from;
}

/* Finds byte `offset` of what is sent to a peer (out = 1), or received from it (out = 0). */
static tshi_uv_span tshi_uv_direct_at(const tshi_uv_op *op, int peer, int64_t offset, int out) {
    const tsh_coll *coll = &op->coll;
    void *base = out ? tshi_uv_send_buffer(op) : coll->recv;
    int own = op->group->rank;
    tshi_uv_span span;
    if (coll->kind == TSH_ALLTOALL)
        return tshi_uv_in_rows(op, base, out ? coll->send_counts : coll->recv_counts, peer, offset);
    if (coll->kind == (out ? TSH_REDUCE_SCATTER : TSH_ALLGATHER)) /* cut into the ranks' parts */
        return tshi_uv_in_whole(op, base, peer, offset);
    span.at = (out ? (char *)base : tshi_uv_row(op, peer)) + offset; /* one contiguous piece */
    span.size = tshi_uv_direct_size(op, out ? own : peer, out ? peer : own) - offset;
    return span;
}

/* For tshb_coll_sum: elements of every rank's data. */
typedef struct tshi_uv_parts {
    const tshi_uv_op *op; /* the reduction */
    const char *own;      /* this rank's elements, which were not sent */
    int64_t at;           /* offset in the other ranks' data, in bytes */
} tshi_uv_parts;

static const void *tshi_uv_message_of(const void *user, int r) { /* Returns rank r's elements. */
    const tshi_uv_parts *p = (const tshi_uv_parts *)user;
    return r == p->op->group->rank ? p->own : tshi_uv_row(p->op, r) + p->at;
}

/* Sums up to `most` bytes of chunk k, from byte `at` on, into byte `to` of recv; the other ranks'
 * data are at byte `from` of their rows. The sums go through a tile, since recv may be send.
 * Returns how many bytes were summed, whole elements only. */
static int64_t tshi_uv_sum_tile(const tshi_uv_op *op, int k, int64_t at, int64_t most, int64_t from,
                                int64_t to) {
    double tile[512]; /* aligned for every dtype */
    tshi_uv_span own = tshi_uv_in_whole(op, tshi_uv_send_buffer(op), k, at);
    tshi_uv_parts parts = {op, own.at, from};
    int64_t width = tshi_uv_width(op);
    int64_t n = tshi_uv_min(tshi_uv_min(own.size, most), (int64_t)sizeof tile) / width;
    if (n <= 0) return 0;
    tshb_coll_sum(tile, n, &op->coll, op->group->size, k, tshi_uv_message_of, &parts);
    memcpy((char *)op->coll.recv + to, tile, (size_t)(n * width));
    return n * width;
}

/* Returns where the sum of chunk k is stored in recv, in bytes. */
static int64_t tshi_uv_sum_place(const tshi_uv_op *op, int k) {
    if (op->coll.kind != TSH_ALLREDUCE) return 0; /* recv is this rank's chunk */
    return tshb_coll_chunk(op->coll.count, op->group->size, k) * tshi_uv_width(op);
}

/* Sums all ranks' data once it has arrived. */
static void tshi_uv_direct_sums(const tshi_uv_op *op) {
    const tshi_uv_group *group = op->group;
    int all = op->coll.kind == TSH_ALLREDUCE; /* every chunk; reduce-scatter: this rank's only */
    for (int k = all ? 0 : group->rank; k < (all ? group->size : group->rank + 1); k++) {
        int64_t size = tshi_uv_length(op, k), base = tshi_uv_sum_place(op, k);
        for (int64_t at = 0; at < size;)
            at += tshi_uv_sum_tile(op, k, at, size - at, base + at, base + at);
    }
}

/* ---- pieces ---- */

/* Sums of 16-bit floats are rounded once, so they cannot travel unfinished, as in a ring. Instead
 * every rank sends its part of each chunk k to rank k, which sums them and, in an all-reduce, sends
 * the sum to all: as many bytes as in a ring. The stream to a peer is the peer's chunk, then the
 * sum of this rank's. In place, the sum of a chunk arrives only after this rank's part was sent. */

/* Sums what has arrived from all ranks, and advances op->ready. */
static void tshi_uv_pieces_fold(tshi_uv_op *op) {
    const int rank = op->group->rank;
    int64_t row = tshi_uv_row_size(op), base = tshi_uv_sum_place(op, rank);
    int64_t come = tshi_uv_length(op, rank), n = 1; /* come: bytes that every rank has sent */
    for (int r = 0; r < op->group->size; r++)
        if (r != rank) come = tshi_uv_min(come, op->in[r].good);
    for (; op->ready < come && n; op->ready += n) { /* n 0: no whole element */
        int64_t at = op->ready % row, most = tshi_uv_min(come - op->ready, row - at);
        n = tshi_uv_sum_tile(op, rank, op->ready, most, at, base + op->ready);
    }
}

/* Finds byte `offset` of what is sent to a peer (out = 1), or received from it (out = 0). Size 0:
 * the peer's row is full. */
static tshi_uv_span tshi_uv_pieces_at(const tshi_uv_op *op, int peer, int64_t offset, int out) {
    const int own = op->group->rank;
    int64_t part = tshi_uv_length(op, out ? peer : own), row = tshi_uv_row_size(op);
    tshi_uv_span span;
    if (offset >= part)
        return tshi_uv_in_whole(op, op->coll.recv, out ? own : peer, offset - part);
    if (out) return tshi_uv_in_whole(op, tshi_uv_send_buffer(op), peer, offset);
    span.at = tshi_uv_row(op, peer) + offset % row;
    span.size = tshi_uv_min(row - offset % row, part - offset);
    span.size = tshi_uv_min(span.size, op->ready + row - offset); /* at most what is free */
    return span;
}

/* Copies n bytes, from `offset` on, of what this rank sends to itself. */
static void tshi_uv_own_piece(const tshi_uv_op *op, int64_t offset, int64_t n) {
    const int rank = op->group->rank;
    for (int64_t end = offset + n; offset < end;) {
        tshi_uv_span from = tshi_uv_direct_at(op, rank, offset, 1);
        tshi_uv_span to = tshi_uv_direct_at(op, rank, offset, 0);
        to.size = tshi_uv_min(to.size, end - offset);
        if (to.at != from.at) memmove(to.at, from.at, (size_t)to.size); /* in place: no copy */
        offset += to.size;
    }
}

/* ---- any algorithm ---- */

/* Finds the next bytes to send to `peer` (out = 1), or room for the next ones from it (out = 0),
 * from byte `offset` of `total` on. Size 0: none are ready, or there is no room yet. */
static tshi_uv_span tshi_uv_bytes_at(const tshi_uv_op *op, int peer, int64_t offset, int64_t total,
                                     int out) {
    tshi_uv_span span = {NULL, 0};
    int64_t ready = total; /* bytes of the frame that may move so far */
    if (out && op->algorithm == TSHI_UV_RING) ready = tshi_uv_ring_ready(op, total);
    if (out && op->algorithm == TSHI_UV_CHAIN && op->group->rank != op->coll.root)
        ready = op->in[tshi_uv_prev(op->group)].good; /* a chain sends on what has arrived */
    if (out && op->algorithm == TSHI_UV_PIECES)
        ready = tshi_uv_min(total, tshi_uv_length(op, peer) + op->ready);
    if (offset >= ready) return span;
    if (op->algorithm == TSHI_UV_PIECES) {
        span = tshi_uv_pieces_at(op, peer, offset, out);
    } else if (op->algorithm == TSHI_UV_RING) {
        span = out ? tshi_uv_ring_out(op, offset) : tshi_uv_ring_in(op, offset);
    } else if (op->algorithm == TSHI_UV_DIRECT) {
        span = tshi_uv_direct_at(op, peer, offset, out);
    } else {
        int sends = out && op->algorithm == TSHI_UV_MESSAGE; /* chain, star or message */
        span.at = (char *)(sends ? tshi_uv_send_buffer(op) : op->coll.recv) + offset;
        span.size = total - offset;
    }
    span.size = tshi_uv_min(span.size, ready - offset);
    return span;
}

enum { TSHI_UV_BLOCK = 256 << 10 }; /* bytes of payload that one checksum covers, at most */

/* Returns where the block of payload ends that begins at byte `offset` of a frame to (out = 1) or
 * from a peer. Both ends compute the same. Only whole blocks are used, so a block ends before bytes
 * that may depend on what the other end makes of it: at the end of a ring's step, or of a rank's
 * part in pieces. There a block is half a row at most, so that the row has room for the next. */
static int64_t tshi_uv_block(const tshi_uv_op *op, int peer, int64_t offset, int64_t total,
                             int out) {
    int64_t most = TSHI_UV_BLOCK, left = total - offset;
    if (op->algorithm == TSHI_UV_RING) {
        left = tshi_uv_locate(op, out ? tshi_uv_first_out(op) : tshi_uv_first_in(op), offset).left;
    } else if (op->algorithm == TSHI_UV_PIECES) {
        int64_t part = tshi_uv_length(op, out ? peer : op->group->rank);
        if (offset < part) left = part - offset;
        if (offset < part) most = tshi_uv_min(most, tshi_uv_row_size(op) / 2);
    }
    return offset + tshi_uv_min(left, most);
}
