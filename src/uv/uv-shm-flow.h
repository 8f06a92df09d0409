/* ========================================================================== */
/* >>uv-shm-flow                                MARK: - uv-shm-flow (private) */
/* Moves frames through the rings of a connection in shared memory, as        */
/* >>uv-flow does on a socket, but without checksums. A frame begins so that  */
/* its payload is aligned to 64 bytes. With TSHI_UV_PIECES in a group that    */
/* shares memory as a whole, data to be summed is read where it lies.         */
/* Needs: >>uv-flow.                                                          */
/* ========================================================================== */

/* Returns the position at or after `at` where the next frame begins. */
static int64_t tshi_uv_shm_next_frame(int64_t at) {
    const int64_t head = (int64_t)sizeof(tshi_uv_head);
    return (at + head + 63) / 64 * 64 - head;
}

/* Tells the peer how far this rank has written, if that is new to it. */
static void tshi_uv_shm_tell_sent(tshi_uv_link *link) {
    tshi_uv_pipe *pipe = &link->pipe;
    if (*pipe->sent == pipe->wrote) return;
    TSHI_UV_PUT(pipe->sent, pipe->wrote);
    tshi_uv_shm_wake(link->group->world, link->group->ranks[link->peer]);
}

/* Tells the peer that its ring is free up to position `taken`, once that frees a quarter of the
 * ring: not for every few bytes. */
static void tshi_uv_shm_tell_taken(tshi_uv_link *link, int64_t taken) {
    if (taken - *link->pipe.taken < link->pipe.size / 4) return;
    TSHI_UV_PUT(link->pipe.taken, taken);
    tshi_uv_shm_wake(link->group->world, link->group->ranks[link->peer]);
}

/* Returns how many bytes can be written from position pipe->wrote on (out = 1), or read from
 * pipe->read on, by the peer's counter as this rank has read it last. `look` 1: reads that counter
 * again first. */
static int64_t tshi_uv_shm_count(tshi_uv_pipe *pipe, int out, int look) {
    if (look && out) pipe->seen_taken = TSHI_UV_GET(pipe->peer_taken);
    if (look && !out) pipe->seen_sent = TSHI_UV_GET(pipe->peer_sent);
    return out ? pipe->size - (pipe->wrote - pipe->seen_taken) : pipe->seen_sent - pipe->read;
}

/* Returns how many bytes can be written (out = 1) or read; 0 if fewer than `need`: then link->want
 * has the event to wait for. Reports an error if the peer has closed the group, or if its counter
 * is impossible. */
static int64_t tshi_uv_shm_room(tshi_uv_link *link, int64_t need, int out) {
    tshi_uv_pipe *pipe = &link->pipe;
    int64_t n = tshi_uv_shm_count(pipe, out, 0);
    int closed;
    if (n >= need && n <= pipe->size) return n;
    /* read first: once the peer has set it, the counters read below are final */
    closed = TSHI_UV_GET(&pipe->theirs->closed) != 0;
    n = tshi_uv_shm_count(pipe, out, 1);
    if (n >= need && n <= pipe->size) return n;
    link->want |= out ? UV_WRITABLE : UV_READABLE;
    if (n > pipe->size)
        tshi_uv_broke(link, tshi_uv_in_use(link), "sent what nobody asked for");
    else if (closed)
        tshi_uv_broke(link, tshi_uv_in_use(link), "closed its connection");
    return 0;
}

/* Copies n bytes from `at` into the ring (out = 1), or out of the ring to `at`, and advances
 * pipe->wrote or pipe->read. */
static void tshi_uv_shm_copy(tshi_uv_pipe *pipe, char *at, int64_t n, int out) {
    while (n > 0) {
        int64_t *position = out ? &pipe->wrote : &pipe->read, offset = *position % pipe->size;
        const int64_t now = tshi_uv_min(n, pipe->size - offset);
        memcpy(out ? pipe->out + offset : at, out ? at : pipe->in + offset, (size_t)now);
        *position += now;
        at += now;
        n -= now;
    }
}

/* Writes once to a connection in shared memory: what is ready of its first frame, as far as the
 * ring has room. Returns 0 if nothing could be written. */
static int tshi_uv_shm_write(tshi_uv_link *link) {
    tshi_uv_fifo *fifo = link->writing = tshi_uv_choose(link);
    tshi_uv_op *op = fifo ? tshi_uv_first(link->group, fifo) : NULL;
    tshi_uv_pipe *pipe = &link->pipe;
    tshi_uv_stream *s;
    int64_t room, before = pipe->wrote;
    if (!op) return 0;
    s = fifo == &link->clears ? &op->clear : &op->out[link->peer];
    if (s->head == 0) {
        tshi_uv_head head = tshi_uv_for_messages(link)
                                ? tshi_uv_message_head(op, fifo == &link->clears)
                                : op->head;
        head.bytes = (uint64_t)s->total;
        pipe->wrote = before = tshi_uv_shm_next_frame(pipe->wrote);
        if (!tshi_uv_shm_room(link, (int64_t)sizeof head, 1)) return 0;
        tshi_uv_shm_copy(pipe, (char *)&head, (int64_t)sizeof head, 1);
        s->head = sizeof head;
    }
    while (s->done < s->total) {
        tshi_uv_span span = tshi_uv_bytes_at(op, link->peer, s->done, s->total, 1);
        if (span.size <= 0) { /* no more bytes are ready yet */
            link->want |= UV_WRITABLE;
            break;
        }
        room = tshi_uv_shm_room(link, 1, 1);
        if (!room) break;
        span.size = tshi_uv_min(span.size, tshi_uv_min(room, TSHI_UV_SHM_PIECE));
        tshi_uv_shm_copy(pipe, span.at, span.size, 1);
        tshi_uv_payload_went(op, link->peer, s, (size_t)span.size);
        if (s->done < s->total) tshi_uv_shm_tell_sent(link);
    }
    s->good = s->done;
    tshi_uv_shm_tell_sent(link);
    before = pipe->wrote - before;
    if (s->done == s->total) { /* the frame is complete */
        link->writing = NULL;
        tshi_uv_frame_done(op, fifo);
    }
    return before != 0;
}

/* Reads the header of a frame from the ring. Returns 0 if it has not arrived yet, or after an
 * error. */
static int tshi_uv_shm_read_head(tshi_uv_link *link) {
    tshi_uv_pipe *pipe = &link->pipe;
    const int64_t head = (int64_t)sizeof link->heard;
    pipe->read = tshi_uv_shm_next_frame(pipe->read);
    if (!tshi_uv_shm_room(link, head, 0)) return 0;
    tshi_uv_shm_copy(pipe, (char *)&link->heard, head, 0);
    pipe->payload = pipe->read;
    link->heard_done = sizeof link->heard; /* tshi_uv_check_head sets it to 0 after a clear */
    return tshi_uv_check_head(link);
}

/* Reads what has arrived of op's payload. */
static void tshi_uv_shm_read_payload(tshi_uv_link *link, tshi_uv_op *op) {
    tshi_uv_stream *s = &op->in[link->peer];
    tshi_uv_pipe *pipe = &link->pipe;
    /* bytes of payload that are not copied, but summed where they lie */
    const int64_t summed = tshi_uv_summed_in_place(op);
    while (s->done < s->total) {
        tshi_uv_span span = {NULL, summed - s->done};
        const int64_t there = tshi_uv_shm_room(link, 1, 0);
        if (!there) break;
        if (span.size > 0) {
            span.size = tshi_uv_min(span.size, there);
            pipe->read += span.size;
        } else {
            span = tshi_uv_bytes_at(op, link->peer, s->done, s->total, 0);
            if (span.size <= 0) break; /* scratch has no space */
            span.size = tshi_uv_min(span.size, tshi_uv_min(there, TSHI_UV_SHM_PIECE));
            tshi_uv_shm_copy(pipe, span.at, span.size, 0);
        }
        s->good = s->done += span.size;
        if (op->ready >= summed) tshi_uv_shm_tell_taken(link, pipe->read);
        if (op->algorithm == TSHI_UV_RING) tshi_uv_ring_fold(op);
        if (op->algorithm == TSHI_UV_PIECES && !summed) tshi_uv_pieces_fold(op);
    }
}

/* Sums what has arrived in the rings of all peers, and then frees its place in them. summed: bytes
 * of each payload that are summed in the rings; 0: none. */
static void tshi_uv_shm_fold(tshi_uv_op *op, int64_t summed) {
    tshi_uv_group *group = op->group;
    const int64_t before = op->ready;
    if (before < summed) tshi_uv_pieces_fold(op);
    for (int r = 0; op->ready != before && r < group->size; r++) {
        const tshi_uv_pipe *pipe = &group->link[r].pipe;
        if (r != group->rank)
            tshi_uv_shm_tell_taken(&group->link[r],
                                   op->ready < summed ? pipe->payload + op->ready : pipe->read);
    }
}

/* Reads once from a connection in shared memory. Returns 2: more bytes may be there; 1: no more for
 * now; 0: nothing was read. */
static int tshi_uv_shm_read(tshi_uv_link *link) {
    tshi_uv_op *op = link->in.used ? tshi_uv_first(link->group, &link->in) : NULL;
    tshi_uv_stream *s = op ? &op->in[link->peer] : NULL;
    const int64_t before = link->pipe.read, ready = op ? op->ready : 0;
    int64_t summed;
    if (!link->heard_done && !tshi_uv_shm_read_head(link)) return 0;
    if (!link->heard_done) { /* the frame was a clear, without payload */
        tshi_uv_shm_tell_taken(link, link->pipe.read);
        return 2;
    }
    if (!op) return 0;
    tshi_uv_shm_read_payload(link, op);
    summed = tshi_uv_summed_in_place(op);
    tshi_uv_shm_fold(op, summed);
    if (s->good == s->total && op->ready >= summed) {
        link->heard_done = 0; /* a header comes next */
        tshi_uv_shm_tell_taken(link, link->pipe.read);
        tshi_uv_frame_done(op, &link->in);
        return link->in.used ? 2 : 1;
    }
    return link->pipe.read != before || op->ready != ready;
}
