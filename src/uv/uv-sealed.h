/* ========================================================================== */
/* >>uv-sealed                                    MARK: - uv-sealed (private) */
/* Sends and receives the frames of an encrypted data connection: a record    */
/* with the header, then records with pieces of the payload. A piece is       */
/* encrypted as a whole, so it is sent once all of it is ready, and stored    */
/* once there is space for all of it; the peer decrypts a piece while the     */
/* next one is encrypted. Nothing is used before its tag is checked.          */
/* Needs: >>uv-algorithm.                                                     */
/* ========================================================================== */

enum { TSHI_UV_PIECE = 64 << 10 }; /* bytes of payload in a record, at most */

/* Negative results of the functions below, which else return a number of bytes. */
enum { TSHI_UV_IO_FAILED = -1, TSHI_UV_IO_CLOSED = -2, TSHI_UV_BAD_TAG = -3, TSHI_UV_NO_ROOM = -4 };

/* Sets s->block to the end of the next piece of payload (what one record encrypts); returns its
 * size, 0 at the end of the frame. Both ends compute the same. */
static size_t tshi_uv_next_piece(const tshi_uv_op *op, int peer, tshi_uv_stream *s, int out) {
    if (s->done == s->total) return 0;
    s->block = tshi_uv_min(tshi_uv_block(op, peer, s->done, s->total, out),
                           s->done + TSHI_UV_PIECE);
    return (size_t)(s->block - s->done);
}

/* Returns 1 if the whole next piece of payload can be sent (out = 1), or stored, now. *whole:
 * address of its bytes, or of their destination; NULL: they are in several places. */
static int tshi_uv_piece_at(const tshi_uv_op *op, int peer, const tshi_uv_stream *s, int out,
                            char **whole) {
    int64_t at = s->done;
    *whole = NULL;
    while (at < s->block) {
        tshi_uv_span span = tshi_uv_bytes_at(op, peer, at, s->total, out);
        if (span.size <= 0) return 0;
        if (at == s->done && span.size >= s->block - at) *whole = span.at;
        at += span.size;
    }
    return 1;
}

/* Copies the next piece of payload from where op keeps it to `bytes` (out = 1), or from `bytes` to
 * where it belongs (out = 0). */
static void tshi_uv_copy_piece(const tshi_uv_op *op, int peer, const tshi_uv_stream *s, int out,
                               char *bytes) {
    for (int64_t at = s->done, now; at < s->block; at += now, bytes += now) {
        tshi_uv_span span = tshi_uv_bytes_at(op, peer, at, s->total, out);
        now = tshi_uv_min(span.size, s->block - at);
        memcpy(out ? bytes : span.at, out ? span.at : bytes, (size_t)now);
    }
}

/* Encrypts `left` bytes of a header (0: it is sent already), and the next piece of op's payload if
 * that is ready. op NULL: there is no payload. Returns 0 if memory is lacking. */
static int tshi_uv_seal_next(tshi_uv_link *link, const void *head, size_t left,
                             const tshi_uv_op *op, tshi_uv_stream *s) {
    tshi_uv_channel *channel = link->channel;
    tshi_uv_buffer *to = &channel->outgoing;
    size_t n = op ? tshi_uv_next_piece(op, link->peer, s, 1) : 0;
    char *whole = NULL, *at;
    if (n && !tshi_uv_piece_at(op, link->peer, s, 1, &whole)) n = 0;
    channel->sealed = left + n;
    if (!channel->sealed) return 1;
    if (!tshi_uv_reserve(to, left + n + 2 * TSHI_UV_TAG)) return 0;
    if (left) {
        tshi_uv_seal(&channel->out, head, left, to->data);
        to->used = left + TSHI_UV_TAG;
    }
    if (!n) return 1;
    at = to->data + to->used;
    if (!whole) tshi_uv_copy_piece(op, link->peer, s, 1, at);
    tshi_uv_seal(&channel->out, whole ? whole : at, n, at);
    to->used += n + TSHI_UV_TAG;
    return 1;
}

/* Sends (out = 1) or receives up to n bytes in one system call, and counts them. Returns how many;
 * 0: none for now; or TSHI_UV_IO_FAILED (errno), TSHI_UV_IO_CLOSED. */
static ssize_t tshi_uv_move_bytes(tshi_uv_link *link, char *bytes, size_t n, int out) {
    uint64_t *count = out ? &link->wrote : &link->got;
    struct msghdr message;
    struct iovec iov;
    ssize_t moved;
    memset(&message, 0, sizeof message);
    iov.iov_base = bytes;
    iov.iov_len = n;
    message.msg_iov = &iov;
    message.msg_iovlen = 1;
    moved = out ? sendmsg(link->fd, &message, TSHI_UV_NOSIGNAL) : recvmsg(link->fd, &message, 0);
    if (moved < 0 && !tshi_uv_later()) return TSHI_UV_IO_FAILED;
    if (moved == 0 && !out) return TSHI_UV_IO_CLOSED;
    if (moved < 0) moved = 0;
    if ((size_t)moved < n) link->want |= out ? UV_WRITABLE : UV_READABLE;
    TSHI_UV_PUT(count, *count + (uint64_t)moved);
    return moved;
}

/* Sends the next records: one with `left` bytes of a header, one with a piece of op's payload.
 * Returns the bytes of header and payload in them, once they are sent completely, else 0; or a
 * negative result (TSHI_UV_IO_FAILED, ...). */
static ssize_t tshi_uv_send_sealed(tshi_uv_link *link, const void *head, size_t left,
                                   const tshi_uv_op *op, tshi_uv_stream *s) {
    tshi_uv_channel *channel = link->channel;
    tshi_uv_buffer *to = &channel->outgoing;
    ssize_t n;
    if (!to->used && !tshi_uv_seal_next(link, head, left, op, s)) return TSHI_UV_NO_ROOM;
    if (!to->used) return 0; /* the next piece is not ready */
    n = tshi_uv_move_bytes(link, to->data + channel->sent, to->used - channel->sent, 1);
    if (n < 0) return n;
    channel->sent += (size_t)n;
    if (channel->sent < to->used) return 0;
    to->used = channel->sent = 0;
    return (ssize_t)channel->sealed;
}

/* Decrypts the piece of op's payload that has arrived, n bytes at `at`, to where it belongs.
 * Returns n; 0: there is no space for it yet; or TSHI_UV_BAD_TAG. */
static ssize_t tshi_uv_unseal_piece(tshi_uv_link *link, const tshi_uv_op *op, tshi_uv_stream *s,
                                    char *at, size_t n) {
    char *whole;
    if (!tshi_uv_piece_at(op, link->peer, s, 0, &whole)) return 0;
    if (!tshi_uv_unseal(&link->channel->in, at, n, whole ? whole : at)) return TSHI_UV_BAD_TAG;
    if (!whole) tshi_uv_copy_piece(op, link->peer, s, 0, at);
    return (ssize_t)n;
}

/* Receives the record with a header, `left` bytes (0: it is received already), and one with a piece
 * of op's payload (op NULL: none is expected). Decrypts one of them, the header to `head`. Returns
 * the bytes of header or payload in it; 0: it has not arrived completely; or a negative result. */
static ssize_t tshi_uv_receive_sealed(tshi_uv_link *link, void *head, size_t left,
                                      const tshi_uv_op *op, tshi_uv_stream *s) {
    tshi_uv_channel *channel = link->channel;
    tshi_uv_buffer *from = &channel->incoming;
    size_t piece = op ? tshi_uv_next_piece(op, link->peer, s, 0) : 0;
    size_t first = left ? left : piece; /* bytes in the record that is to be decrypted */
    size_t end = channel->opened + (left ? left + TSHI_UV_TAG : 0) +
                 (piece ? piece + TSHI_UV_TAG : 0); /* bytes that `from` is to hold */
    ssize_t n;
    char *at;
    if (!first) return 0;
    if (from->used < end) {
        if (!tshi_uv_reserve(from, end - from->used)) return TSHI_UV_NO_ROOM;
        n = tshi_uv_move_bytes(link, from->data + from->used, end - from->used, 0);
        if (n < 0) return n;
        from->used += (size_t)n;
    }
    if (from->used < channel->opened + first + TSHI_UV_TAG) return 0;
    at = from->data + channel->opened;
    if (!left)
        n = tshi_uv_unseal_piece(link, op, s, at, piece);
    else
        n = tshi_uv_unseal(&channel->in, at, left, head) ? (ssize_t)left : (ssize_t)TSHI_UV_BAD_TAG;
    if (n <= 0) return n;
    channel->opened += first + TSHI_UV_TAG;
    if (channel->opened == from->used) from->used = channel->opened = 0;
    return n;
}
