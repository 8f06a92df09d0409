/* ========================================================================== */
/* >>uv-post                                        MARK: - uv-post (private) */
/* Sends control messages. tshi_uv_write begins one, in world->outgoing.      */
/* The *_field functions append fields to it; tshi_uv_post sends it.          */
/* Needs: >>uv-check >>uv-secret >>uv-socket.                                 */
/* ========================================================================== */

/* limit of unsent bytes to one peer: above it, new messages to that peer are discarded */
enum { TSHI_UV_BACKLOG = 1 << 20 };

/* Begins a control message; returns the cursor for its payload. */
static tshi_uv_cursor *tshi_uv_write(tsh_uv_world *world, tshi_uv_type type) {
    tshi_uv_outgoing *outgoing = &world->outgoing;
    outgoing->c = tshi_uv_cursor_over(outgoing->bytes, sizeof outgoing->bytes, 1);
    /* 0 in place of the payload's length, which tshi_uv_post fills in */
    (void)tshi_uv_field(&outgoing->c, 0, 4);
    (void)tshi_uv_field(&outgoing->c, type, 1);
    (void)tshi_uv_field(&outgoing->c, 0, 4); /* 0 for the checksum: tshi_uv_post fills it in */
    return &outgoing->c;
}

/* Makes sure that the buffer has capacity for n more bytes. Returns 0 if memory is lacking. */
static int tshi_uv_reserve(tshi_uv_buffer *bytes, size_t n) {
    size_t room = bytes->room ? bytes->room : 1024;
    char *data;
    while (room < bytes->used + n) room *= 2;
    if (room == bytes->room) return 1;
    data = (char *)realloc(bytes->data, room);
    if (!data) return 0;
    bytes->data = data;
    bytes->room = room;
    return 1;
}

/* Removes the first n bytes of the buffer. */
static void tshi_uv_drop(tshi_uv_buffer *bytes, size_t n) {
    memmove(bytes->data, bytes->data + n, bytes->used - n);
    bytes->used -= n;
}

/* Sends as much of peer->out as the socket takes now; tshi_uv_watch_peers waits until the rest can
 * be sent. If sending fails, discards the bytes: reading will report that the peer is gone. */
static void tshi_uv_flush(tshi_uv_peer *peer) {
    tshi_uv_buffer *out = &peer->out;
    while (out->used) {
        ssize_t n = send(peer->fd, out->data, out->used, TSHI_UV_NOSIGNAL);
        if (n < 0 && tshi_uv_later()) return;
        if (n > 0) {
            peer->sent += (uint64_t)n;
            if (!peer->mark) peer->marked = tsh_now();
            if (!peer->mark) peer->mark = peer->sent;
        }
        tshi_uv_drop(out, n > 0 ? (size_t)n : out->used);
    }
}

/* Encrypts and sends world->outgoing, a message of n bytes, as two records: length and type; the
 * payload. The place of a checksum between these is left out. */
static void tshi_uv_post_sealed(tshi_uv_peer *peer, size_t n) {
    const unsigned char *bytes = peer->world->outgoing.bytes;
    const size_t head = TSHI_UV_MESSAGE_HEAD - TSHI_UV_MESSAGE_TAIL; /* length and type */
    const size_t payload = n - TSHI_UV_MESSAGE_HEAD;
    char *to = peer->out.data + peer->out.used;
    tshi_uv_seal(&peer->channel->out, bytes, head, to);
    tshi_uv_seal(&peer->channel->out, bytes + TSHI_UV_MESSAGE_HEAD, payload,
                 to + head + TSHI_UV_TAG);
    peer->out.used += head + payload + 2 * TSHI_UV_TAG;
    tshi_uv_flush(peer);
}

/* Sends world->outgoing, the message that tshi_uv_write began, to the peer. No-op if there is no
 * connection to it (the peer may be this rank), if too much is unsent (a peer that does not read
 * will be found silent), or if memory is lacking. */
static void tshi_uv_post(tshi_uv_peer *peer) {
    tsh_uv_world *world = peer->world;
    tshi_uv_outgoing *outgoing = &world->outgoing;
    /* size of the message without the checksum at its end */
    size_t n = (size_t)(outgoing->c.at - outgoing->bytes);
    /* bytes of the message before the checksum of its head */
    size_t before = TSHI_UV_MESSAGE_HEAD - TSHI_UV_MESSAGE_TAIL;
    tshi_uv_cursor c = tshi_uv_cursor_over(outgoing->bytes, n + TSHI_UV_MESSAGE_TAIL, 1);
    if (peer->fd < 0 || outgoing->c.bad || n > TSHI_UV_MESSAGE_HEAD + TSHI_UV_PAYLOAD ||
        peer->out.used > TSHI_UV_BACKLOG || !tshi_uv_reserve(&peer->out, n + 2 * TSHI_UV_TAG))
        return;
    (void)tshi_uv_field(&c, n - TSHI_UV_MESSAGE_HEAD, 4);
    if (peer->channel) {
        tshi_uv_post_sealed(peer, n);
        return;
    }
    c.at = outgoing->bytes + before;
    (void)tshi_uv_field(&c, tshi_uv_crc(world, 0, outgoing->bytes, before), 4);
    c.at = outgoing->bytes + n;
    (void)tshi_uv_field(&c, tshi_uv_crc(world, 0, outgoing->bytes, n), 4);
    n += TSHI_UV_MESSAGE_TAIL;
    memcpy(peer->out.data + peer->out.used, outgoing->bytes, n);
    peer->out.used += n;
    tshi_uv_flush(peer);
}

static void tshi_uv_post_all(tsh_uv_world *world) {
    for (int r = 0; r < world->size; r++) tshi_uv_post(&world->peer[r]);
}
