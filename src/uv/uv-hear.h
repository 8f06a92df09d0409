/* ========================================================================== */
/* >>uv-hear                                        MARK: - uv-hear (private) */
/* Handles, on the control thread, what peers send on control connections.    */
/* Each type of message has a handler, which sets c->bad if it is malformed.  */
/* A peer that sends a malformed message counts as lost.                      */
/* Needs: >>uv-cycle >>uv-form.                                               */
/* ========================================================================== */

/* Closes the control connection of a peer, whose state becomes `state`. */
static void tshi_uv_peer_end(tshi_uv_peer *peer, tshi_uv_state state) {
    tshi_uv_unwatch(&peer->poll);
    tshi_uv_close_fd(&peer->fd);
    tshi_uv_channel_free(&peer->channel);
    peer->in.used = peer->out.used = 0; /* discards unread and unsent bytes */
    peer->state = state;                /* why the connection ended */
}

/* Handles TELL: stores the peer's answer to this rank's ASK, unless it is about another
 * collective. */
static void tshi_uv_on_tell(tshi_uv_peer *peer, tshi_uv_cursor *c) {
    const tshi_uv_report *held = &peer->world->held; /* the report that this rank asked about */
    tshi_uv_answer answer;
    uint64_t group = 0, seq = 0;
    memset(&answer, 0, sizeof answer);
    answer.record.coll = tsh_coll_make(TSH_BARRIER, TSH_F32); /* values of fields that TELL lacks */
    tshi_uv_answer_fields(c, &group, &seq, &answer);
    if (!c->bad && group == held->group && seq == held->seq) peer->answer = answer;
}

/* Handles ASK: sends the coordinator this rank's answer (TELL). */
static void tshi_uv_on_ask(tshi_uv_peer *peer, tshi_uv_cursor *c) {
    tshi_uv_answer answer;
    uint64_t group = tshi_uv_field(c, 0, 8), seq = tshi_uv_field(c, 0, 8);
    tshi_uv_answer_for(peer->world, group, seq, &answer);
    tshi_uv_answer_fields(tshi_uv_write(peer->world, TSHI_UV_TELL), &group, &seq, &answer);
    tshi_uv_post(peer);
}

/* Handles REPORT, an error report: the peer takes this rank for its coordinator. If the world has
 * failed already, the peer gets that error. Else this rank holds the report, unless it holds a more
 * severe one, and forwards it to its own coordinator if that is another rank. */
static void tshi_uv_on_report(tshi_uv_peer *peer, tshi_uv_cursor *c) {
    tsh_uv_world *world = peer->world;
    tshi_uv_report e;
    memset(&e, 0, sizeof e);
    tshi_uv_report_fields(c, &e, world->size);
    if (c->bad) return;
    peer->reported = 1; /* tshi_uv_pass_on sends it the decision */
    if (tshi_uv_failed(world) != TSH_OK)
        tshi_uv_pass_on(world); /* the error is decided already */
    else
        tshi_uv_hold(world, &e);
}

/* Handles CONFIRM, which names a wait of this rank: answers (STILL) whether that wait goes on. */
static void tshi_uv_on_confirm(tshi_uv_peer *peer, tshi_uv_cursor *c) {
    uint64_t wait = tshi_uv_field(c, 0, 8); /* number of the wait that is asked about */
    tshi_uv_cursor *out = tshi_uv_write(peer->world, TSHI_UV_STILL);
    (void)tshi_uv_field(out, wait, 8);
    (void)tshi_uv_field(out, (uint64_t)tshi_uv_still(peer->world, wait), 1);
    tshi_uv_post(peer);
}

/* Handles STILL, the peer's answer to this rank's CONFIRM. */
static void tshi_uv_on_still(tshi_uv_peer *peer, tshi_uv_cursor *c) {
    uint64_t wait = tshi_uv_field(c, 0, 8);
    int still = (int)tshi_uv_field(c, 0, 1);
    if (!c->bad && tshi_uv_confirmed(peer->world, peer->rank, wait, still))
        tshi_uv_follow(peer->world, -1); /* the cycle is gone: looks for another */
}

/* Handles LINKED: a higher member of the group that is being made has both its connections to this
 * rank. Until it says so, it may dial again, since this rank's reply may have been damaged. */
static void tshi_uv_on_linked(tshi_uv_peer *peer, tshi_uv_cursor *c) {
    tshi_uv_group *group = peer->world->making;
    uint64_t id = tshi_uv_field(c, 0, 8);
    int r = group && group->id == id ? tshi_uv_member(group, peer->rank) : -1;
    if (r <= (group ? group->rank : 0) || group->link[r].confirmed) return;
    group->link[r].confirmed = 1;
    group->missing--;
}

/* Returns 1 if the group that is being made still lacks a connection to world rank `rank`. */
static int tshi_uv_misses(const tsh_uv_world *world, int rank) {
    int r = world->making ? tshi_uv_member(world->making, rank) : -1;
    return r >= 0 && r != world->making->rank && tshi_uv_unlinked(world->making, r);
}

/* Handles BYE: the peer has shut down in good order. That is an error only if a connection to it is
 * still to be made. */
static void tshi_uv_on_bye(tshi_uv_peer *peer) {
    tsh_uv_world *world = peer->world;
    tshi_uv_peer_end(peer, TSHI_UV_LEFT); /* closes the connection */
    if ((world->forming && !world->told_ready) || tshi_uv_misses(world, peer->rank))
        tshi_uv_suspect(world, TSHI_UV_GONE, TSH_ERR_LOST, peer->rank,
                        "rank %d at %s left while its connections were made", peer->rank,
                        peer->name);
    uv_mutex_lock(&world->lock);
    /* If this rank waits, reports that again: another rank may be the coordinator now. */
    TSHI_UV_PUT(&world->blocked_new, world->blocked.wait != 0);
    uv_mutex_unlock(&world->lock);
}

/* Writes this rank's latest collective for an error: "; rank 0 last called barrier, collective 3 of
 * tp", or "" if it has called none. Returns text. */
static const char *tshi_uv_last_call(tsh_uv_world *world, char *text, size_t room) {
    const tshi_uv_group *group;
    tshi_uv_record record;
    uint64_t id = 0, seq = 0; /* id 0: no collective yet */
    uv_mutex_lock(&world->lock);
    /* NULL: no collective yet, or its group is closed */
    group = tshi_uv_find_group(world, world->last);
    if (group) {
        id = group->id;
        seq = group->started - 1;                      /* number of the group's latest collective */
        record = group->record[seq % TSHI_UV_RECORDS]; /* copied: the caller may overwrite it */
    }
    uv_mutex_unlock(&world->lock);
    text[0] = 0;
    if (id) tsh_text_add(text, room, "; rank %d last called ", world->rank);
    if (id) tshb_coll_where(&record.coll, 0, seq, id, text, room);
    return text;
}

/* Reports that a data connection is dead: bytes that this rank wrote never reach the peer. ends:
 * addresses of this rank's end and the peer's. */
static void tshi_uv_suspect_link(tshi_uv_peer *peer, const tshi_uv_address ends[2]) {
    tsh_uv_world *world = peer->world;
    char texts[2][80], last[240]; /* texts: both ends as host:port */
    for (int i = 0; i < 2; i++) tshi_uv_address_text(&ends[i], texts[i], sizeof texts[i]);
    tshi_uv_suspect(world, TSHI_UV_SILENT, TSH_ERR_LOST, tshb_blamed(world->rank, peer->rank),
                    "the data connection of rank %d (%s) and rank %d (%s) is dead: for %.1f s "
                    "(TSHARD_HEARTBEAT) no byte has come through, though both ranks answer; has a "
                    "firewall or NAT between them dropped it?%s",
                    world->rank, texts[0], peer->rank, texts[1], (double)world->heartbeat / 1e9,
                    tshi_uv_last_call(world, last, sizeof last));
}

/* Handles AWAIT: a peer waits on a data connection, and says how many bytes it has received. If
 * this rank has written more, some are in flight; if none of them arrives for TSHARD_HEARTBEAT, the
 * connection is dead. TCP does not report that: it retries for minutes while bytes are
 * unacknowledged, does nothing if none are, and TCP_USER_TIMEOUT also ends a connection whose
 * reader is only busy. */
static void tshi_uv_on_await(tshi_uv_peer *peer, tshi_uv_cursor *c) {
    tsh_uv_world *world = peer->world;
    /* got: bytes that the peer has received */
    uint64_t id = tshi_uv_field(c, 0, 8), got = tshi_uv_field(c, 0, 8);
    uint32_t purpose = (uint32_t)tshi_uv_field(c, 0, 1); /* TSHI_UV_DATA or TSHI_UV_MESSAGES */
    int64_t now = tsh_now();
    tshi_uv_group *group;
    tshi_uv_link *link = NULL; /* NULL: its group is closed or unknown */
    tshi_uv_address ends[2];   /* addresses of both ends, for the error */
    int dead = 0;              /* 1: the connection is dead, to be reported after unlocking */
    uv_mutex_lock(&world->lock);
    group = c->bad ? NULL : tshi_uv_find_group(world, id);
    if (group) link = tshi_uv_link_for(group, purpose, peer->rank);
    if (link) {
        /* same: 1: the peer has received nothing since its previous AWAIT message, a short time
         * ago */
        int same = got == link->peer_got && now - link->peer_got_at < world->heartbeat / 2;
        /* The time just after a cut of the network does not count: before TCP resends, it may wait
         * for as long again as the cut lasted. */
        if (!same || TSHI_UV_GET(&link->wrote) <= got || tshi_uv_missed(world, &peer->heard))
            link->stalled_since = 0; /* bytes arrive, or none are in flight */
        else if (!link->stalled_since)
            link->stalled_since = now; /* the first AWAIT without new bytes */
        link->peer_got = got;
        link->peer_got_at = now;
        dead = link->stalled_since && now - link->stalled_since >= world->heartbeat;
        for (int i = 0; i < 2 && dead; i++) (void)tshi_uv_end_of(link->fd, i, &ends[i]);
    }
    uv_mutex_unlock(&world->lock);
    /* called only after unlocking, since it takes the lock itself */
    if (dead) tshi_uv_suspect_link(peer, ends);
}

/* Handles one message of a peer. Sets c->bad if it is malformed or of an unknown type. */
static void tshi_uv_dispatch(tshi_uv_peer *peer, unsigned type, tshi_uv_cursor *c) {
    tsh_uv_world *world = peer->world;
    tsh_error error;
    switch (type) {
    case TSHI_UV_BEAT: break; /* tshi_uv_read_peer has noted that the peer is alive */
    case TSHI_UV_HERE: tshi_uv_on_here(peer, c); break; /* to rank 0: where the peer listens */
    case TSHI_UV_MISSING: tshi_uv_text_field(c, world->absent, sizeof world->absent); break;
    case TSHI_UV_TABLE: tshi_uv_on_table(world, c); break; /* from rank 0: all addresses */
    case TSHI_UV_READY: /* to rank 0: the peer has all its connections */
        tshi_uv_read_host(peer, c);
        peer->ready = !c->bad;
        break;
    case TSHI_UV_GO: /* from rank 0: the world has formed */
        if (world->forming) tshi_uv_on_go(world, c);
        break;
    /* the peer reports an error to this rank, its coordinator */
    case TSHI_UV_REPORT: tshi_uv_on_report(peer, c); break;
    /* the coordinator asks what this rank called */
    case TSHI_UV_ASK: tshi_uv_on_ask(peer, c); break;
    case TSHI_UV_TELL: tshi_uv_on_tell(peer, c); break; /* the answer to an ASK */
    case TSHI_UV_BLOCKED: /* to this rank as coordinator: what the peer waits for */
        tshi_uv_blocked_fields(c, &peer->blocked, world->size);
        if (!c->bad) tshi_uv_follow(world, peer->rank); /* looks for a cycle */
        break;
    /* the coordinator asks if this rank still waits */
    case TSHI_UV_CONFIRM: tshi_uv_on_confirm(peer, c); break;
    case TSHI_UV_STILL: tshi_uv_on_still(peer, c); break; /* the answer to a CONFIRM */
    case TSHI_UV_DECISION: /* the world's error, from a coordinator */
        memset(&error, 0, sizeof error);
        tshi_uv_error_fields(c, &error, world->size);
        if (!c->bad) tshi_uv_on_decision(peer, &error);
        break;
    /* the peer shuts down */
    case TSHI_UV_BYE: tshi_uv_on_bye(peer); break;
    /* the peer says how many bytes it has received from this rank */
    case TSHI_UV_AWAIT: tshi_uv_on_await(peer, c); break;
    /* the peer says that it has both connections of a new group to this rank */
    case TSHI_UV_LINKED: tshi_uv_on_linked(peer, c); break;
    default: c->bad = 1; /* unknown type */
    }
}

/* Checks n bytes of the first message in peer->in, from byte `from` on: by the checksum behind
 * them, which covers the message from its beginning; or, on an encrypted connection, by decrypting
 * them in place. Returns 0 if the checksum, or the tag, is wrong. */
static int tshi_uv_intact(const tshi_uv_peer *peer, size_t from, size_t n) {
    char *message = peer->in.data, *at = message + from;
    tshi_uv_cursor c = tshi_uv_cursor_over(at + n, TSHI_UV_MESSAGE_TAIL, 0);
    if (peer->channel) return tshi_uv_unseal(&peer->channel->in, at, n, at);
    return tshi_uv_field(&c, 0, 4) == tshi_uv_crc(peer->world, 0, message, from + n);
}

/* Handles a wrong checksum or tag of a control message: what follows on this connection cannot be
 * read. The connection stays open, so that the peer still gets this rank's report and decision. */
static void tshi_uv_deafen(tshi_uv_peer *peer) {
    tsh_uv_world *world = peer->world;
    tshi_uv_address ends[2];
    char texts[2][80]; /* both ends as host:port */
    peer->deaf = 1;
    for (int i = 0; i < 2; i++) {
        (void)tshi_uv_end_of(peer->fd, i, &ends[i]);
        tshi_uv_address_text(&ends[i], texts[i], sizeof texts[i]);
    }
    if (world->parting) return; /* this rank shuts down: no error */
    tshi_uv_suspect(world, TSHI_UV_DAMAGED, TSH_ERR_LOST, tshb_blamed(world->rank, peer->rank),
                    TSHI_UV_DAMAGED_TEXT, "control", world->rank, texts[0], peer->rank, texts[1],
                    TSHI_UV_CHECK_OF(peer->channel), "a control message", "");
}

/* Handles the first message in peer->in. Returns 1: handled, or it is damaged; 0: incomplete;
 * -1: malformed. */
static int tshi_uv_next_message(tshi_uv_peer *peer) {
    const size_t tail = peer->channel ? (size_t)TSHI_UV_TAG : (size_t)TSHI_UV_MESSAGE_TAIL;
    const size_t head = 5 + tail; /* length and type, then their checksum or tag */
    tshi_uv_cursor c = tshi_uv_cursor_over(peer->in.data, peer->in.used, 0);
    size_t n; /* length of the payload */
    unsigned type;
    if (peer->in.used < head) return 0; /* the head is incomplete */
    if (!peer->opened && !tshi_uv_intact(peer, 0, 5)) {
        tshi_uv_deafen(peer);
        return 1;
    }
    peer->opened = 1; /* a head is decrypted only once, also if its payload arrives later */
    n = (size_t)tshi_uv_field(&c, 0, 4);
    type = (unsigned)tshi_uv_field(&c, 0, 1);
    /* the payload is too long, or the type unknown */
    if (n > TSHI_UV_PAYLOAD || type >= TSHI_UV_TYPES) return -1;
    if (peer->in.used < head + n + tail) return 0;
    peer->opened = 0;
    if (!tshi_uv_intact(peer, head, n)) {
        tshi_uv_deafen(peer);
        return 1;
    }
    c.at += tail;
    c.end = c.at + n; /* the message's handler reads no further */
    tshi_uv_dispatch(peer, type, &c);
    if (c.bad) return -1;
    if (peer->fd >= 0) /* unless a handler closed the connection: removes the message */
        tshi_uv_drop(&peer->in, head + n + tail);
    return 1;
}

/* Ends the connection of a peer that is lost, and reports the loss, unless this rank shuts down. */
static void tshi_uv_peer_gone(tshi_uv_peer *peer, const char *how) {
    tsh_uv_world *world = peer->world;
    char last[240];
    tshi_uv_peer_end(peer, TSHI_UV_LOST);
    if (world->parting) return; /* expected while this rank shuts down */
    if (tshi_uv_is_cut(peer))   /* the network broke; else the process ended */
        tshi_uv_suspect_cut(world);
    else
        tshi_uv_suspect(world, TSHI_UV_GONE, TSH_ERR_LOST, peer->rank,
                        "rank %d at %s is gone: %s%s", peer->rank, peer->name, how,
                        tshi_uv_last_call(world, last, sizeof last));
}

/* Reads from a control connection and handles all messages that have arrived. */
static void tshi_uv_read_peer(tshi_uv_peer *peer) {
    for (;;) {
        ssize_t n;
        int heard = 0;                           /* latest result of tshi_uv_next_message */
        if (!tshi_uv_reserve(&peer->in, 4096)) { /* 0: no memory for 4 KiB more */
            if (!peer->world->parting) tshi_uv_lacks_memory(peer->world, peer->rank);
            return;
        }
        n = recv(peer->fd, peer->in.data + peer->in.used, peer->in.room - peer->in.used, 0);
        if (n < 0 && tshi_uv_later()) return; /* nothing more for now */
        if (n <= 0) {                         /* 0: the peer closed; -1: an error */
            tshi_uv_peer_gone(peer, n == 0 ? "its connection ended" : tshi_uv_why(errno));
            return;
        }
        peer->in.used += (size_t)n;
        peer->used = 1;
        tshi_uv_beats(peer, &peer->heard, tsh_now()); /* the peer is alive */
        tshi_uv_look(peer);                           /* updates peer->acked */
        while (peer->fd >= 0 && !peer->deaf && (heard = tshi_uv_next_message(peer)) > 0) {
        }
        if (peer->deaf) peer->in.used = 0;
        if (heard < 0) tshi_uv_peer_gone(peer, "it sent what is not a control message");
        if (peer->fd < 0) return; /* a handler closed the connection */
    }
}

/* Callback when a control connection is ready: receives, then sends. */
static void tshi_uv_peer_event(uv_poll_t *poll, int status, int events) {
    tshi_uv_peer *peer = (tshi_uv_peer *)poll->data;
    (void)status;
    (void)events;
    tshi_uv_read_peer(peer);
    if (peer->fd >= 0) tshi_uv_flush(peer); /* sends what waits in peer->out */
}
