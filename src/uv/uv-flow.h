/* ========================================================================== */
/* >>uv-flow                                        MARK: - uv-flow (private) */
/* Moves bytes on the data connections, in frames: a header and a payload.    */
/* Each connection has a queue of operations per direction (in, out). A       */
/* connection for messages also has a queue of clears. A clear is a frame     */
/* without a payload, by which the receiver of a message tells the sender     */
/* that it may send it.                                                       */
/* Needs: >>uv-sealed.                                                        */
/* ========================================================================== */

/* Returns 1 if the connection is for SEND and RECV, 0 if it is for collectives. */
static int tshi_uv_for_messages(const tshi_uv_link *link) {
    return link >= link->group->link + link->group->size;
}

/* Describes op in `text`: "all-reduce of 7 f32 (sum), collective 3 of tp". If op is NULL, writes
 * "the connections of tp". */
static void tshi_uv_op_text(const tshi_uv_group *group, const tshi_uv_op *op, char *text,
                            size_t room) {
    char name[TSHI_UV_NAME];
    text[0] = 0;
    if (op)
        tshb_coll_where(&op->coll, group->size, op->head.seq, group->id, text, room);
    else
        tsh_text_add(text, room, "the connections of %s",
                     tshb_group_text(group->id, name, sizeof name));
}

/* Returns a queue of the connection that is not empty: an error names its first operation. */
static tshi_uv_fifo *tshi_uv_in_use(tshi_uv_link *link) {
    return link->in.used ? &link->in : link->out.used ? &link->out : &link->clears;
}

/* Reports that a data connection is lost, and which call (the first in fifo) needed it. how:
 * "closed its connection", for example. */
static void tshi_uv_broke(tshi_uv_link *link, const tshi_uv_fifo *fifo, const char *how) {
    tshi_uv_group *group = link->group;
    tsh_uv_world *world = group->world;
    int peer = group->ranks[link->peer]; /* world rank of the peer */
    char text[200];
    tshi_uv_op_text(group, tshi_uv_first(group, fifo), text, sizeof text);
    tshi_uv_report_error(world, TSHI_UV_GONE, 0, 0, TSH_ERR_LOST, peer,
                         "rank %d at %s %s while rank %d waits for it in %s", peer,
                         world->peer[peer].name, how, world->rank, text);
}

/* Reports that a message and the receive for it differ in count, dtype or tag. from, to: sender
 * and receiver, as ranks of the group. */
static void tshi_uv_unfit(tshi_uv_link *link, const tshi_uv_head *sent, const tshi_uv_head *wanted,
                          int from, int to) {
    tshi_uv_group *group = link->group;
    tsh_coll a = tsh_coll_make(TSH_SEND, (tsh_dtype)sent->dtype);
    tsh_coll b = tsh_coll_make(TSH_RECV, (tsh_dtype)wanted->dtype);
    tsh_error error;
    a.count = sent->count;
    a.send_to = to;
    a.tag = sent->tag;
    b.count = wanted->count;
    b.recv_from = from;
    b.tag = wanted->tag;
    tshb_message_mismatch(&a, &b, group->ranks[from], group->ranks[to], sent->seq, group->id,
                          &error);
    tshi_uv_report_error(group->world, TSHI_UV_MISMATCH, 0, 0, error.code, error.rank, "%s",
                         error.message);
}

/* Returns 1 if the header of a message and that of its receive or clear agree in count, dtype, tag
 * and number. */
static int tshi_uv_fits(const tshi_uv_head *sent, const tshi_uv_head *wanted) {
    return sent->count == wanted->count && sent->dtype == wanted->dtype &&
           sent->tag == wanted->tag && sent->seq == wanted->seq;
}

/* Returns the header of a message (receives = 0), or of the clear for it (receives = 1). */
static tshi_uv_head tshi_uv_message_head(const tshi_uv_op *op, int receives) {
    /* the call itself or, of a SENDRECV, its RECV (receives = 1) or its SEND (receives = 0) */
    const tsh_coll half = tshb_coll_half(&op->coll, receives);
    tshi_uv_head head;
    memset(&head, 0, sizeof head);
    head.group = op->group->id;
    head.kind = (uint8_t)half.kind;
    head.dtype = (uint8_t)half.dtype;
    head.tag = half.tag;
    head.seq = op->number[receives]; /* messages are numbered per peer and direction */
    head.count = half.count;
    if (!receives) head.bytes = (uint64_t)(half.count * op->width);
    return head;
}

/* Removes op's finished frame from its queue. After op's last frame, TSHI_UV_DIRECT sums what has
 * arrived. */
static void tshi_uv_frame_done(tshi_uv_op *op, tshi_uv_fifo *fifo) {
    tshi_uv_pop(fifo);
    if (--op->pending == 0 && op->algorithm == TSHI_UV_DIRECT && tshi_uv_sums(op))
        tshi_uv_direct_sums(op);
}

/* Reports that a checksum, or tag, of received bytes is wrong. what: "the header" or "the
 * payload". */
static void tshi_uv_damaged(tshi_uv_link *link, const char *what) {
    const tshi_uv_group *group = link->group;
    const tshi_uv_fifo *fifo = tshi_uv_in_use(link);
    int a = group->world->rank, b = group->ranks[link->peer]; /* world ranks of both ends */
    tshi_uv_address ends[2];
    char texts[2][80], text[200] = " of "; /* texts: both ends as host:port; text: the call */
    for (int i = 0; i < 2; i++) {
        (void)tshi_uv_end_of(link->fd, i, &ends[i]);
        tshi_uv_address_text(&ends[i], texts[i], sizeof texts[i]);
    }
    tshi_uv_op_text(group, tshi_uv_first(link->group, fifo), text + 4, sizeof text - 4);
    tshi_uv_report_error(group->world, TSHI_UV_DAMAGED, 0, 0, TSH_ERR_LOST, tshb_blamed(a, b),
                         TSHI_UV_DAMAGED_TEXT, "data", a, texts[0], b, texts[1],
                         TSHI_UV_CHECK_OF(link->channel), what, text);
}

/* Reports that the peer has called another collective than op, or the same one with another number:
 * its number is `seq`. */
static void tshi_uv_differ(const tshi_uv_link *link, const tshi_uv_op *op, uint64_t seq) {
    const tshi_uv_group *group = link->group;
    const int peer = group->ranks[link->peer], own = group->world->rank;
    char name[TSHI_UV_NAME];
    if (op->head.seq < seq) seq = op->head.seq; /* the earlier one */
    tshi_uv_report_error(
        group->world, TSHI_UV_MISMATCH, group->id, seq, TSH_ERR_MISMATCH, tshb_blamed(peer, own),
        "rank %d and rank %d called different collectives (collective %llu of %s)", peer, own,
        (unsigned long long)seq, tshb_group_text(group->id, name, sizeof name));
}

/* Checks the header of a frame that is being received. Returns 0 after reporting an error, else 1.
 * If the peer's collective is not this rank's, the coordinator asks all ranks what they called. */
static int tshi_uv_check_head(tshi_uv_link *link) {
    tshi_uv_group *group = link->group;
    const tshi_uv_head *head = &link->heard;
    const tshi_uv_op *op = link->in.used ? tshi_uv_first(group, &link->in) : NULL;
    /* what came through shared memory has no checksum */
    if (link->checks && !link->pipe.out &&
        head->check != tshi_uv_head_check(group->world, head)) {
        tshi_uv_damaged(link, "the header");
        return 0;
    }
    if (!tshi_uv_for_messages(link)) {
        if (head->seq == op->head.seq && head->digest == op->head.digest &&
            head->group == group->id && head->bytes == (uint64_t)op->in[link->peer].total)
            return 1; /* both called the same collective */
        tshi_uv_differ(link, op, head->seq);
        return 0;
    }
    /* a header of kind RECV is a clear: the peer is ready to receive a message */
    if (head->kind == TSH_RECV && link->cleared - link->sent < TSHI_UV_OPS) {
        link->clear[link->cleared++ % TSHI_UV_OPS] = *head; /* lets this rank send the message */
        link->heard_done = 0;                               /* expect the next header */
        return 1;
    }
    if (op && head->kind == TSH_SEND && head->bytes == (uint64_t)op->in[link->peer].total) {
        tshi_uv_head wanted = tshi_uv_message_head(op, 1);
        if (tshi_uv_fits(head, &wanted)) return 1; /* it is op's message */
    }
    tshi_uv_broke(link, tshi_uv_in_use(link), "sent what nobody asked for");
    return 0;
}

/* What one sendmsg or recvmsg moves: a header, spans of payload, a checksum. */
typedef struct tshi_uv_batch {
    struct iovec iov[TSHI_UV_IO_SPANS + 2];
    int used;               /* number of valid entries of iov */
    int head;               /* number of entries of iov that hold the header: 0 or 1 */
    int64_t payload, asked; /* payload: its bytes in iov; asked: all bytes in iov */
} tshi_uv_batch;

static void tshi_uv_batch_add(tshi_uv_batch *batch, void *at, size_t n) {
    batch->iov[batch->used].iov_base = at;
    batch->iov[batch->used].iov_len = n;
    batch->used += n != 0;
    batch->asked += (int64_t)n;
}

/* Adds to batch the next payload of op's frame, up to the end of the current block (the bytes that
 * one checksum covers), and the block's checksum. Outgoing bytes enter the checksum here: they do
 * not change any more. */
static void tshi_uv_batch_fill(tshi_uv_batch *batch, const tshi_uv_link *link, const tshi_uv_op *op,
                               tshi_uv_stream *s, int out) {
    const tsh_uv_world *world = link->group->world;
    int64_t at = s->done, most, now;
    if (s->done == s->good) /* a new block begins */
        s->block = link->checks && s->done < s->total
                       ? tshi_uv_block(op, link->peer, s->done, s->total, out)
                       : s->total;
    most = tshi_uv_min(TSHI_UV_IO_BYTES, s->block - s->done);
    while (batch->used < TSHI_UV_IO_SPANS && batch->payload < most) {
        tshi_uv_span span = tshi_uv_bytes_at(op, link->peer, at, s->total, out);
        if (span.size <= 0) break; /* no bytes are ready to send, or no space for received ones */
        span.size = tshi_uv_min(span.size, most - batch->payload);
        tshi_uv_batch_add(batch, span.at, (size_t)span.size);
        at += span.size;
        batch->payload += span.size;
        now = at - s->summed; /* bytes of the span that the checksum does not cover yet */
        if (!link->checks || !out || now <= 0) continue;
        s->check = tshi_uv_crc(world, s->check, span.at + span.size - now, (size_t)now);
        s->summed = at;
    }
    if (link->checks && at == s->block && s->good < s->total)
        tshi_uv_batch_add(batch, (char *)(out ? &s->check : &s->received) + s->tail,
                          sizeof s->check - s->tail);
}

/* Updates the payload's checksum for the n bytes just received, leaving out those of the header. */
static void tshi_uv_batch_sum(const tshi_uv_batch *batch, const tsh_uv_world *world,
                              tshi_uv_stream *s, size_t n) {
    size_t left = (size_t)batch->payload;
    for (int i = 0; n && left && i < batch->used; i++) {
        size_t now = batch->iov[i].iov_len < n ? batch->iov[i].iov_len : n;
        n -= now;
        if (i < batch->head) continue;
        now = now < left ? now : left;
        s->check = tshi_uv_crc(world, s->check, batch->iov[i].iov_base, now);
        left -= now;
    }
}

/* Same as tshi_uv_transfer, for an encrypted connection. */
static size_t tshi_uv_transfer_sealed(tshi_uv_link *link, const tshi_uv_fifo *fifo, void *head,
                                      size_t left, const tshi_uv_op *op, tshi_uv_stream *s,
                                      int out) {
    tsh_uv_world *world = link->group->world;
    ssize_t n = out ? tshi_uv_send_sealed(link, head, left, op, s)
                    : tshi_uv_receive_sealed(link, head, left, op, s);
    if (n == TSHI_UV_IO_FAILED) tshi_uv_broke(link, fifo, "lost its connection");
    if (n == TSHI_UV_IO_CLOSED) tshi_uv_broke(link, fifo, "closed its connection");
    if (n == TSHI_UV_BAD_TAG) tshi_uv_damaged(link, left ? "the header" : "the payload");
    if (n == TSHI_UV_NO_ROOM)
        tshi_uv_report_error(world, TSHI_UV_ABORT, 0, 0, TSH_ERR_MEMORY, world->rank,
                             "rank %d: no memory to encrypt what it sends", world->rank);
    return n > 0 ? (size_t)n : 0;
}

/* Sends (out = 1) or receives, in one system call, `left` bytes of a header and then payload of op
 * (NULL: none). Returns how many bytes were moved; if that was not all, link->want has the event to
 * wait for. */
static size_t tshi_uv_transfer(tshi_uv_link *link, const tshi_uv_fifo *fifo, void *head,
                               size_t left, const tshi_uv_op *op, int out) {
    tshi_uv_batch batch;
    struct msghdr message;
    tshi_uv_stream *s = !op ? NULL : out ? &op->out[link->peer] : &op->in[link->peer];
    /* counts the bytes sent, or received, on this connection, so that a dead one is noticed */
    uint64_t *count = out ? &link->wrote : &link->got;
    ssize_t n;
    if (link->channel) return tshi_uv_transfer_sealed(link, fifo, head, left, op, s, out);
    batch.used = 0;
    batch.payload = batch.asked = 0;
    tshi_uv_batch_add(&batch, head, left);
    batch.head = batch.used;
    if (op) tshi_uv_batch_fill(&batch, link, op, s, out);
    if (!batch.used) return 0;
    memset(&message, 0, sizeof message);
    message.msg_iov = batch.iov;
    message.msg_iovlen = (size_t)batch.used;
    n = out ? sendmsg(link->fd, &message, TSHI_UV_NOSIGNAL) : recvmsg(link->fd, &message, 0);
    if ((n < 0 && !tshi_uv_later()) || (n == 0 && !out)) { /* an error, or the peer closed */
        tshi_uv_broke(link, fifo, n < 0 ? "lost its connection" : "closed its connection");
        return 0;
    }
    if (n < 0) n = 0; /* nothing was moved: try again later */
    TSHI_UV_PUT(count, *count + (uint64_t)n);
    if (n < batch.asked) link->want |= out ? UV_WRITABLE : UV_READABLE;
    if (link->checks && op && !out) tshi_uv_batch_sum(&batch, link->group->world, s, (size_t)n);
    return (size_t)n;
}

/* Counts n bytes of payload just sent to a peer. All-gather on a ring also copies this rank's own
 * part among them from send to recv now, while it is in the cache. */
static void tshi_uv_payload_went(const tshi_uv_op *op, int peer, tshi_uv_stream *s, size_t n) {
    const int ring = op->algorithm == TSHI_UV_RING && peer == tshi_uv_next(op->group);
    int64_t end = s->done + (int64_t)n;
    while (ring && op->coll.kind == TSH_ALLGATHER && s->done < end) {
        const tshi_uv_lane lane = tshi_uv_lane_of(op, peer, 1);
        tshi_uv_at at = tshi_uv_locate(op, &lane, s->done);
        int64_t now = tshi_uv_min(at.left, end - s->done);
        if (at.step == 0) tshi_uv_own_piece(op, at.offset, now); /* step 0 sends this rank's part */
        s->done += now;
    }
    s->done = end;
}

/* Counts n bytes just sent or received, of a block's payload and its checksum. Returns 1 if they
 * complete the block (without checksums: always). */
static int tshi_uv_block_moved(const tshi_uv_link *link, const tshi_uv_op *op, tshi_uv_stream *s,
                               size_t n, int out) {
    size_t payload = (size_t)tshi_uv_min((int64_t)n, s->block - s->done);
    if (out)
        tshi_uv_payload_went(op, link->peer, s, payload);
    else
        s->done += (int64_t)payload;
    s->tail += n - payload;
    if (link->checks && s->good < s->total && s->tail < sizeof s->check) return 0;
    s->tail = 0;
    s->good = s->done;
    return 1;
}

/* Reads from the connection once. Returns 2: all bytes asked for have arrived, so more may be
 * there; 1: fewer have; 0: none, or no space for them, or an error. */
static int tshi_uv_read_once(tshi_uv_link *link) {
    tshi_uv_op *op = link->in.used ? tshi_uv_first(link->group, &link->in) : NULL;
    tshi_uv_stream *s = op ? &op->in[link->peer] : NULL;
    /* head: bytes of the header not received yet */
    size_t head = sizeof link->heard - link->heard_done, n, got;
    /* The header of a message is read alone: only if it fits op, the payload belongs to op. */
    got = tshi_uv_transfer(link, tshi_uv_in_use(link), (char *)&link->heard + link->heard_done,
                           head, !head || !tshi_uv_for_messages(link) ? op : NULL, 0);
    if (!got) return 0;
    n = got < head ? got : head; /* header bytes among those received */
    link->heard_done += n;
    if (head && n == head && !tshi_uv_check_head(link)) return 0; /* the header is complete */
    if (op && link->heard_done == sizeof link->heard) {
        if (tshi_uv_block_moved(link, op, s, got - n, 0) && link->checks &&
            s->check != s->received) {
            tshi_uv_damaged(link, "the payload");
            return 0;
        }
        if (op->algorithm == TSHI_UV_RING) tshi_uv_ring_fold(op); /* sums what has arrived */
        if (op->algorithm == TSHI_UV_PIECES) tshi_uv_pieces_fold(op);
        if (s->good == s->total) {
            link->heard_done = 0; /* a header comes next */
            tshi_uv_frame_done(op, &link->in);
        }
    }
    return link->want & UV_READABLE ? 1 : 2; /* 1: fewer bytes than asked for */
}

/* Returns the queue whose first frame is to be written next; NULL: none may be sent now. */
static tshi_uv_fifo *tshi_uv_choose(tshi_uv_link *link) {
    /* the clear for the next message to be sent */
    const tshi_uv_head *wanted = &link->clear[link->sent % TSHI_UV_OPS];
    tshi_uv_head sent;
    if (link->writing) return link->writing; /* a frame that was begun must be finished first */
    if (!tshi_uv_for_messages(link)) return link->out.used ? &link->out : NULL;
    if (link->clears.used) return &link->clears; /* clears go before messages */
    /* no message is to be sent, or its receiver has not sent the clear for it yet */
    if (!link->out.used || link->cleared == link->sent) return NULL;
    sent = tshi_uv_message_head(tshi_uv_first(link->group, &link->out), 0);
    if (tshi_uv_fits(&sent, wanted)) {
        link->sent++; /* the message uses up this clear */
        return &link->out;
    }
    /* an error: the message and its clear differ */
    tshi_uv_unfit(link, &sent, wanted, link->group->rank, link->peer);
    return NULL;
}

/* Writes once, as much as the socket takes. Returns 0 if nothing could be sent. */
static int tshi_uv_write_once(tshi_uv_link *link) {
    /* link->writing stays set until the whole frame is sent */
    tshi_uv_fifo *fifo = link->writing = tshi_uv_choose(link);
    tshi_uv_op *op = fifo ? tshi_uv_first(link->group, fifo) : NULL;
    tshi_uv_stream *s;
    tshi_uv_head head;
    size_t left, n, put;
    if (!op) return 0;
    s = fifo == &link->clears ? &op->clear : &op->out[link->peer]; /* a clear has no payload */
    head = tshi_uv_for_messages(link) ? tshi_uv_message_head(op, fifo == &link->clears) : op->head;
    head.bytes = (uint64_t)s->total;
    if (link->checks) head.check = tshi_uv_head_check(link->group->world, &head);
    left = sizeof head - s->head; /* header bytes still to send */
    put = tshi_uv_transfer(link, fifo, (char *)&head + s->head, left, s->total ? op : NULL, 1);
    if (!put) return 0;
    n = put < left ? put : left; /* header bytes among those sent */
    s->head += n;
    if (s->total) (void)tshi_uv_block_moved(link, op, s, put - n, 1);
    if (s->head == sizeof head && s->good == s->total) { /* the frame is complete */
        link->writing = NULL;
        tshi_uv_frame_done(op, fifo);
    }
    return 1;
}
