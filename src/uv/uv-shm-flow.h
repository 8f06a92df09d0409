/* ========================================================================== */
/* >>uv-shm-flow                                MARK: - uv-shm-flow (private) */
/* Moves frames through the rings of a connection in shared memory, as        */
/* >>uv-flow does on a socket, but without checksums. A header is at the      */
/* beginning of a cache line (64 bytes). A payload that fits into the rest of */
/* that line follows at once; a longer one begins with the next line.         */
/* With TSHI_UV_PIECES in a group that shares memory as a whole, data to be   */
/* summed is read where it lies.                                              */
/* A payload that lies in the sender's heap is sent by reference: the ring    */
/* has references to its parts, as they become ready, and the receiver reads  */
/* the heap. Such a frame is complete once the receiver has read everything.  */
/* Needs: >>uv-flow.                                                          */
/* ========================================================================== */

/* A part of a payload by reference: the ring has these in place of the bytes. */
typedef struct tshi_uv_reference {
    int64_t at, size; /* offset in the sender's segment; bytes */
} tshi_uv_reference;

/* Returns the position of the first cache line at or after `at`. */
static int64_t tshi_uv_shm_line(int64_t at) {
    return (at + 63) / 64 * 64;
}

/* Returns the position of a payload whose header ends at `at`: there, if all of it fits into the
 * header's cache line, else the next line's. */
static int64_t tshi_uv_shm_payload(int64_t at, uint64_t bytes) {
    const int64_t line = tshi_uv_shm_line(at);
    return bytes <= (uint64_t)(line - at) ? at : line;
}

/* Tells the peer how far this rank has written, if that is new to it. */
static void tshi_uv_shm_tell_sent(tshi_uv_link *link) {
    tshi_uv_pipe *pipe = &link->pipe;
    if (*pipe->sent == pipe->wrote) return;
    TSHI_UV_PUT(pipe->sent, pipe->wrote);
    tshi_uv_shm_wake(link->group->world, link->group->ranks[link->peer]);
}

/* Tells the peer that its ring is free up to position `taken`, once that frees `least` bytes. */
static void tshi_uv_shm_tell_taken(tshi_uv_link *link, int64_t taken, int64_t least) {
    if (taken - *link->pipe.taken < least) return;
    TSHI_UV_PUT(link->pipe.taken, taken);
    tshi_uv_shm_wake(link->group->world, link->group->ranks[link->peer]);
}

/* Returns how many bytes of a ring are to be free before the peer is told: not every few bytes. */
static int64_t tshi_uv_shm_some(const tshi_uv_link *link) {
    return link->pipe.size / 4;
}

/* Returns how many bytes can be written from position pipe->wrote on (out = 1), or read from
 * pipe->read on, by the peer's counter as this rank has read it last. `look` 1: reads that counter
 * again first. */
static int64_t tshi_uv_shm_count(tshi_uv_pipe *pipe, int out, int look) {
    if (look && out) pipe->seen_taken = TSHI_UV_GET(pipe->peer_taken);
    if (look && !out) pipe->seen_sent = TSHI_UV_GET(pipe->peer_sent);
    return out ? pipe->size - (pipe->wrote - pipe->seen_taken) : pipe->seen_sent - pipe->read;
}

/* Returns 1 if all references of a payload are written, and the last time that this rank looked the
 * peer had not read all. If the peer has closed the group since, the next write sees whether it had
 * done so before. */
static int tshi_uv_shm_unread(const tshi_uv_link *link) {
    const tshi_uv_stream *s;
    if (!link->writing || !link->pipe.refers) return 0;
    s = &tshi_uv_first(link->group, link->writing)->out[link->peer];
    return s->done == s->total;
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
    else if (closed && (out || !tshi_uv_shm_unread(link)))
        tshi_uv_broke(link, tshi_uv_in_use(link), "closed its connection");
    return 0;
}

/* Writes a byte of each cache line of n bytes that have arrived in a ring, as it was. So this core
 * gets the lines as their only owner, not to share them with the sender's: of lines that both have,
 * the sender would later write an eighth as many in the same time (AMD Zen 4). */
static void tshi_uv_shm_own(char *at, int64_t n) {
    for (int64_t i = 0; i < n; i += 64) *(volatile char *)(at + i) = *(volatile char *)(at + i);
}

/* Copies n bytes from `at` into the ring (out = 1), or out of the ring to `at`, and advances
 * pipe->wrote or pipe->read. */
static void tshi_uv_shm_copy(tshi_uv_pipe *pipe, char *at, int64_t n, int out) {
    while (n > 0) {
        int64_t *position = out ? &pipe->wrote : &pipe->read, offset = *position & (pipe->size - 1);
        const int64_t now = tshi_uv_min(n, pipe->size - offset);
        memcpy(out ? pipe->out + offset : at, out ? at : pipe->in + offset, (size_t)now);
        *position += now;
        at += now;
        n -= now;
    }
}

/* Returns 1 if the payload that op sends to a peer is long, and lies in this rank's heap in parts
 * that are not short. */
static int tshi_uv_shm_refers(const tshi_uv_link *link, const tshi_uv_op *op,
                              const tshi_uv_stream *s) {
    const tsh_uv_world *world = link->group->world;
    const tsh_coll *coll = &op->coll;
    const int rows = coll->kind == TSH_ALLGATHER || coll->kind == TSH_REDUCE_SCATTER ||
                     coll->kind == TSH_ALLTOALL;
    /* where bytes are sent from; a sum by TSHI_UV_PIECES from recv, too */
    const void *first = coll->kind == TSH_BROADCAST ? coll->recv : coll->send;
    const void *second = coll->kind == TSH_ALLREDUCE ? coll->recv : first;
    const int64_t least = coll->kind == TSH_ALLREDUCE ? TSHI_UV_SHM_REFERS_SUM : TSHI_UV_SHM_REFERS;
    if (s->total < least || !tshi_uv_in_heap(world, first) || !tshi_uv_in_heap(world, second))
        return 0;
    if (op->algorithm == TSHI_UV_RING) return 0; /* it sends from scratch, too */
    return !rows || tshi_uv_bytes_at(op, link->peer, 0, s->total, 1).size >= TSHI_UV_SHM_PAGE;
}

/* Begins a frame: writes its header to the ring. Returns 0 if there is no room. */
static int tshi_uv_shm_write_head(tshi_uv_link *link, const tshi_uv_op *op, tshi_uv_stream *s,
                                  int clear) {
    tshi_uv_pipe *pipe = &link->pipe;
    tshi_uv_head head = tshi_uv_for_messages(link) ? tshi_uv_message_head(op, clear) : op->head;
    int64_t need; /* bytes that the ring must have room for */
    pipe->wrote = tshi_uv_shm_line(pipe->wrote);
    /* the header; if the payload begins with the next line, all of the header's line */
    need = tshi_uv_shm_payload((int64_t)sizeof head, (uint64_t)s->total);
    if (!tshi_uv_shm_room(link, need, 1)) return 0;
    pipe->refers = tshi_uv_shm_refers(link, op, s);
    head.bytes = (uint64_t)s->total;
    head.refers = (uint8_t)pipe->refers;
    tshi_uv_shm_copy(pipe, (char *)&head, (int64_t)sizeof head, 1);
    pipe->wrote = tshi_uv_shm_payload(pipe->wrote, head.bytes);
    s->head = sizeof head;
    return 1;
}

/* Writes a part of a payload to the ring, as far as there is room: its bytes or, by reference,
 * where they lie. Returns how many bytes of the payload that is; 0: there is no room. */
static int64_t tshi_uv_shm_put(tshi_uv_link *link, tshi_uv_span span) {
    const tsh_uv_world *world = link->group->world;
    tshi_uv_pipe *pipe = &link->pipe;
    tshi_uv_reference part = {0, span.size};
    const int64_t room = tshi_uv_shm_room(link, pipe->refers ? (int64_t)sizeof part : 1, 1);
    if (!room) return 0;
    if (pipe->refers) {
        part.at = span.at - world->near[world->rank].base;
        tshi_uv_shm_copy(pipe, (char *)&part, (int64_t)sizeof part, 1);
        return span.size;
    }
    span.size = tshi_uv_min(span.size, tshi_uv_min(room, TSHI_UV_SHM_PIECE));
    tshi_uv_shm_copy(pipe, span.at, span.size, 1);
    return span.size;
}

/* Writes once to a connection in shared memory: what is ready of its first frame, as far as the
 * ring has room. Returns 0 if nothing could be written. */
static int tshi_uv_shm_write(tshi_uv_link *link) {
    tshi_uv_fifo *fifo = link->writing = tshi_uv_choose(link);
    tshi_uv_op *op = fifo ? tshi_uv_first(link->group, fifo) : NULL;
    tshi_uv_pipe *pipe = &link->pipe;
    tshi_uv_stream *s;
    const int64_t before = pipe->wrote;
    if (!op) return 0;
    s = fifo == &link->clears ? &op->clear : &op->out[link->peer];
    if (s->head == 0 && !tshi_uv_shm_write_head(link, op, s, fifo == &link->clears)) return 0;
    while (s->done < s->total) {
        tshi_uv_span span = tshi_uv_bytes_at(op, link->peer, s->done, s->total, 1);
        if (span.size <= 0) { /* no more bytes are ready yet */
            link->want |= UV_WRITABLE;
            break;
        }
        span.size = tshi_uv_shm_put(link, span);
        if (!span.size) break;
        tshi_uv_payload_went(op, link->peer, s, (size_t)span.size);
        if (s->done < s->total) tshi_uv_shm_tell_sent(link);
    }
    s->good = s->done;
    tshi_uv_shm_tell_sent(link);
    /* by reference: it is complete once the peer has taken everything from the ring */
    if (s->done < s->total || (pipe->refers && !tshi_uv_shm_room(link, pipe->size, 1)))
        return pipe->wrote != before;
    link->writing = NULL;
    tshi_uv_frame_done(op, fifo);
    return 1;
}

/* Reads the header of a frame from the ring. Returns 0 if it has not arrived yet, or after an
 * error. */
static int tshi_uv_shm_read_head(tshi_uv_link *link) {
    tshi_uv_pipe *pipe = &link->pipe;
    const int64_t head = (int64_t)sizeof link->heard;
    pipe->read = tshi_uv_shm_line(pipe->read);
    if (!tshi_uv_shm_room(link, head, 0)) return 0;
    tshi_uv_shm_copy(pipe, (char *)&link->heard, head, 0);
    pipe->payload = pipe->read = tshi_uv_shm_payload(pipe->read, link->heard.bytes);
    memset(&pipe->summed, 0, sizeof pipe->summed);
    memset(&pipe->copied, 0, sizeof pipe->copied);
    link->heard_done = sizeof link->heard; /* tshi_uv_check_head sets it to 0 after a clear */
    return tshi_uv_check_head(link);
}

/* Reads the next reference of a payload into *source. Returns 0 if it has not arrived, or if it is
 * none that a rank sends: then an error is reported. */
static int tshi_uv_shm_read_reference(tshi_uv_link *link, const tshi_uv_stream *s,
                                      tshi_uv_source *source) {
    const tshi_uv_near *near = &link->group->world->near[link->group->ranks[link->peer]];
    tshi_uv_reference part;
    if (!tshi_uv_shm_room(link, (int64_t)sizeof part, 0)) return 0;
    tshi_uv_shm_copy(&link->pipe, (char *)&part, (int64_t)sizeof part, 0);
    if (part.size <= 0 || part.size > s->total - s->done || part.at < TSHI_UV_SHM_SIZE ||
        part.at > near->size - part.size) {
        tshi_uv_broke(link, tshi_uv_in_use(link), "sent what nobody asked for");
        return 0;
    }
    source->at = near->base + part.at;
    source->begin = s->done;
    source->end = s->done + part.size;
    return 1;
}

/* Finds the next bytes of op's payload, of which `summed` bytes are summed where they lie. Size 0:
 * they have not arrived, or those before them are not summed yet. */
static tshi_uv_span tshi_uv_shm_next(tshi_uv_link *link, const tshi_uv_op *op,
                                     const tshi_uv_stream *s, int64_t summed) {
    tshi_uv_pipe *pipe = &link->pipe;
    const int64_t offset = pipe->read & (pipe->size - 1);
    tshi_uv_source *source = s->done < summed ? &pipe->summed : &pipe->copied;
    /* the casts remove const; the bytes are only read */
    tshi_uv_span span = {(char *)(uintptr_t)pipe->in + offset, 0};
    if (!link->heard.refers) {
        span.size = tshi_uv_min(tshi_uv_shm_room(link, 1, 0), pipe->size - offset);
        return span;
    }
    if (s->done == source->end || source->end == 0) {
        const int64_t used = tshi_uv_min(s->done, summed); /* all that is to be summed before */
        if (op->ready < used && source == &pipe->summed) return span;
        if (op->ready >= used) tshi_uv_shm_tell_taken(link, pipe->read, tshi_uv_shm_some(link));
        if (!tshi_uv_shm_read_reference(link, s, source)) return span;
    }
    span.at = (char *)(uintptr_t)source->at + (s->done - source->begin);
    span.size = tshi_uv_min(source->end - s->done, TSHI_UV_SHM_STEP);
    return span;
}

/* Reads what has arrived of op's payload. */
static void tshi_uv_shm_read_payload(tshi_uv_link *link, tshi_uv_op *op) {
    tshi_uv_stream *s = &op->in[link->peer];
    tshi_uv_pipe *pipe = &link->pipe;
    const int refers = link->heard.refers;
    /* bytes of payload that are not copied, but summed where they lie */
    const int64_t summed = tshi_uv_summed_in_place(op);
    while (s->done < s->total) {
        tshi_uv_span from = tshi_uv_shm_next(link, op, s, summed), to;
        if (from.size <= 0) break;
        if (s->done < summed) {
            from.size = tshi_uv_min(from.size, summed - s->done);
            if (!refers) tshi_uv_shm_own(from.at, from.size);
        } else {
            to = tshi_uv_bytes_at(op, link->peer, s->done, s->total, 0);
            if (to.size <= 0) break; /* scratch has no space */
            from.size = tshi_uv_min(from.size, to.size);
            if (!refers) from.size = tshi_uv_min(from.size, TSHI_UV_SHM_PIECE);
            if (!refers) tshi_uv_shm_own(from.at, from.size);
            memcpy(to.at, from.at, (size_t)from.size);
            if (refers && !tshi_uv_unchanged(link->group->world, link->group->ranks[link->peer]))
                break; /* the world has failed */
        }
        if (!refers) pipe->read += from.size;
        s->good = s->done += from.size;
        if (!refers && op->ready >= summed)
            tshi_uv_shm_tell_taken(link, pipe->read, tshi_uv_shm_some(link));
        if (op->algorithm == TSHI_UV_RING) tshi_uv_ring_fold(op);
        if (op->algorithm == TSHI_UV_PIECES && !summed) tshi_uv_pieces_fold(op);
        if (refers && s->done > summed) break; /* other connections come first */
    }
}

/* Sums what has arrived in the rings of all peers, and then frees its place in them. summed: bytes
 * of each payload that are summed in the rings; 0: none. */
static void tshi_uv_shm_fold(tshi_uv_op *op, int64_t summed) {
    tshi_uv_group *group = op->group;
    const int64_t before = op->ready;
    if (before < summed) tshi_uv_pieces_fold(op);
    for (int r = 0; op->ready != before && r < group->size; r++) {
        tshi_uv_link *link = &group->link[r];
        const tshi_uv_pipe *pipe = &link->pipe;
        if (r != group->rank && !link->heard.refers)
            tshi_uv_shm_tell_taken(link,
                                   op->ready < summed ? pipe->payload + op->ready : pipe->read,
                                   tshi_uv_shm_some(link));
    }
}

/* Reads once from a connection in shared memory. Returns 2: more bytes may be there; 1: no more for
 * now; 0: nothing was read. */
static int tshi_uv_shm_read(tshi_uv_link *link) {
    tshi_uv_op *op = link->in.used ? tshi_uv_first(link->group, &link->in) : NULL;
    tshi_uv_stream *s = op ? &op->in[link->peer] : NULL;
    const int64_t read = link->pipe.read, done = s ? s->done : 0, ready = op ? op->ready : 0;
    int64_t summed;
    if (!link->heard_done && !tshi_uv_shm_read_head(link)) return 0;
    if (!link->heard_done) { /* the frame was a clear, without payload */
        tshi_uv_shm_tell_taken(link, link->pipe.read, tshi_uv_shm_some(link));
        return 2;
    }
    if (!op) return 0;
    tshi_uv_shm_read_payload(link, op);
    summed = tshi_uv_summed_in_place(op);
    tshi_uv_shm_fold(op, summed);
    if (s->good == s->total && op->ready >= summed) {
        link->heard_done = 0; /* a header comes next */
        /* by reference: the sender waits until all is read */
        tshi_uv_shm_tell_taken(link, link->pipe.read,
                               link->heard.refers ? 1 : tshi_uv_shm_some(link));
        tshi_uv_frame_done(op, &link->in);
        return link->in.used ? 2 : 1;
    }
    return link->pipe.read != read || s->done != done || op->ready != ready;
}
