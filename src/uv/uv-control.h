/* ========================================================================== */
/* >>uv-control                                  MARK: - uv-control (private) */
/* The loop of the control thread, which runs until the world has shut down.  */
/* After each batch of events, at least every 100 ms, it calls tshi_uv_tick.  */
/* That does what is due: heartbeats, dialling, error reports and decisions.  */
/* The loop ends once the last group is closed and the peers were told.       */
/* Needs: >>uv-admit.                                                         */
/* ========================================================================== */

/* ms between heartbeats; ms of silence after which a heartbeat is overdue */
enum { TSHI_UV_BEAT_MS = 250, TSHI_UV_MISSING_MS = 300 };
/* AWAIT: ms between two AWAIT messages (tshi_uv_tell_awaited). OVERSLEPT: if this thread wakes up
 * later than planned by more ms than this, it starts to count the silence of all peers anew. */
enum { TSHI_UV_AWAIT_MS = 120, TSHI_UV_OVERSLEPT_MS = 1000 };

/* Sends a heartbeat (BEAT) to every peer, if one is due. */
static void tshi_uv_beat(tsh_uv_world *world, int64_t now) {
    if (now < world->beat) return;
    for (int r = 0; r < world->size; r++)
        if (world->peer[r].fd >= 0) tshi_uv_look(&world->peer[r]); /* updates peer->acked */
    (void)tshi_uv_write(world, TSHI_UV_BEAT);
    for (int r = 0; r < world->size; r++)
        /* a peer to which bytes are still to be sent needs no heartbeat */
        if (!world->peer[r].out.used) tshi_uv_post(&world->peer[r]);
    world->beat = now + TSHI_UV_BEAT_MS * TSHI_UV_MS;
}

/* While the caller's thread is blocked, sends each peer whose data it waits for an AWAIT message,
 * with the number of bytes received from it so far. A peer gets the next one only after it has
 * acknowledged the previous one, so that they do not pile up on slow networks. */
static void tshi_uv_tell_awaited(tsh_uv_world *world, int64_t now) {
    if (now < world->await_at) return;
    world->await_at = now + TSHI_UV_AWAIT_MS * TSHI_UV_MS;
    uv_mutex_lock(&world->lock);
    for (tshi_uv_group *group = world->groups; group; group = group->next) {
        for (int i = 0; world->blocked.wait && i < 2 * group->size; i++) {
            tshi_uv_link *link = &group->link[i];
            tshi_uv_peer *peer = &world->peer[group->ranks[link->peer]];
            tshi_uv_cursor *c;
            /* no control connection to the peer, or no bytes of this link are awaited */
            if (peer->fd < 0 || !TSHI_UV_GET(&link->awaits)) continue;
            tshi_uv_look(peer); /* updates peer->acked */
            /* waits until the peer's system has acknowledged the previous messages */
            if (peer->mark && peer->marked < now) continue;
            c = tshi_uv_write(world, TSHI_UV_AWAIT);
            (void)tshi_uv_field(c, group->id, 8);               /* id of the link's group */
            (void)tshi_uv_field(c, TSHI_UV_GET(&link->got), 8); /* bytes received so far */
            (void)tshi_uv_field(c, i < group->size ? TSHI_UV_DATA : TSHI_UV_MESSAGES, 1);
            tshi_uv_post(peer);
        }
    }
    uv_mutex_unlock(&world->lock);
}

/* Reports peers that have been silent for TSHARD_HEARTBEAT. Time in which this thread did not run
 * does not count. */
static void tshi_uv_note_silence(tsh_uv_world *world, int64_t now) {
    /* overslept: 1: this thread woke so late that messages of peers may be unread; cut: 1: the
     * network to a peer is cut */
    int overslept = world->ticked && now - world->ticked > TSHI_UV_OVERSLEPT_MS * TSHI_UV_MS, cut;
    int64_t due; /* when this peer's silence becomes an error */
    char last[240];
    world->silent_at = INT64_MAX; /* set below to the earliest `due` of all peers */
    for (int r = 0; r < world->size; r++) {
        tshi_uv_peer *peer = &world->peer[r];
        if (peer->state != TSHI_UV_THERE) continue;
        /* counts the silence anew from now on */
        if (overslept) peer->heard.last = peer->acked.last = now;
        /* after BYE or an error, silence is not reported */
        if (world->parting || tshi_uv_failed(world) != TSH_OK) continue;
        cut = tshi_uv_is_cut(peer);
        /* Silence starts when a heartbeat is overdue. On a half-open connection the peer is still
         * heard after it ceased to receive: there silence starts with the first bytes that it does
         * not acknowledge. */
        due = peer->heard.last + TSHI_UV_MISSING_MS * TSHI_UV_MS + world->heartbeat;
        if (cut && peer->mark) due = tshi_uv_min(due, peer->marked + world->heartbeat);
        if (now < due) {
            world->silent_at = tshi_uv_min(world->silent_at, due);
            continue;
        }
        peer->state = TSHI_UV_MUTE; /* so that the silence is reported only once */
        if (cut)
            tshi_uv_suspect_cut(world);
        else
            tshi_uv_suspect(world, TSHI_UV_SILENT, TSH_ERR_LOST, r,
                            "rank %d at %s has been silent for %.1f s (TSHARD_HEARTBEAT)%s", r,
                            peer->name, (double)(now - peer->heard.last) / 1e9,
                            tshi_uv_last_call(world, last, sizeof last));
    }
}

/* Continues handshakes that waited for rank 0's address table, dials the connections that are due,
 * and ends handshakes that take too long. */
static void tshi_uv_tend(tsh_uv_world *world, int64_t now) {
    tshi_uv_conn *conn = world->conns, *next;
    for (; conn; conn = next) {
        next = conn->next; /* conn may be freed below */
        if (conn->phase == TSHI_UV_HAS_HELLO && world->tabled) {
            tshi_uv_conn_event(conn->poll, 0, 0); /* the table has arrived: replies now */
            continue;
        }
        if (now < conn->until) continue;
        if (conn->phase == TSHI_UV_WAITS) {
            if (tshi_uv_failed(world) == TSH_OK) tshi_uv_dial(conn);
            continue;
        }
        if (conn->dialled)
            tshi_uv_hindered(world, "%s does not answer", conn->name);
        else
            tshi_uv_note(world, TSHI_UV_OF_UNPROVEN, "rank %d refused %s: no proof within %d s",
                         world->rank, conn->name, TSHI_UV_PATIENCE_S);
        tshi_uv_conn_end(conn); /* dialled again later, or freed */
    }
}

/* Appends to `text` the ranks that may still lack connections to others. Called when all ranks have
 * joined, but the world is not complete. */
static void tshi_uv_list_unready(const tsh_uv_world *world, char *text, size_t room) {
    tsh_text_add(text, room, "; a firewall between hosts? Still connecting:");
    /* a rank other than 0 knows only that it is not ready itself */
    if (world->rank) tsh_text_add(text, room, " %d", world->rank);
    for (int r = 1; r < world->size && !world->rank; r++)
        /* rank 0 lists the ranks that have not sent READY */
        if (!world->peer[r].ready) tsh_text_add(text, room, " %d", r);
}

/* Fills error with a sentence that says that the world is not complete after `passed` ns, which
 * ranks are absent, and what prevents connections. how: the sentence's verb, "did not form in" or
 * "is not complete after". */
static void tshi_uv_not_formed(const tsh_uv_world *world, const char *how, int64_t passed,
                               tsh_error *error) {
    char absent[256], where[340], hint[256] = "", host[64]; /* parts of the error's sentence */
    int there = world->rank == 0 || world->peer[0].state == TSHI_UV_THERE;
    const char *obstacle; /* why a connection of this rank last failed, or "" */
    long first;           /* lowest absent rank; -1: none */
    if (world->rank == 0)
        tshi_uv_list_absent(world, absent, sizeof absent); /* rank 0 knows who is absent */
    else
        (void)snprintf(absent, sizeof absent, "%s", there ? world->absent : "");
    first = absent[0] ? strtol(absent, NULL, 10) : -1; /* the list is sorted by rank */
    /* rank 0 sent world->absent: check that it names a rank */
    if (first < 0 || first >= world->size) first = -1;
    tshi_uv_name(world->host, world->port, where, sizeof where);
    tshi_uv_host_text(&world->own, host, sizeof host);
    if (world->rank == 0 && tshi_uv_loopback(&world->own) && strcmp(world->host, host) != 0)
        (void)snprintf(hint, sizeof hint,
                       "; rank 0 listens on %s, where other hosts cannot reach it: set TSHARD_HOST "
                       "or TSHARD_BIND to an address of its network",
                       host);
    else if (!there) /* no control connection to rank 0 */
        (void)snprintf(hint, sizeof hint,
                       "; rank 0 has not started, does not listen at %.60s (TSHARD_HOST, "
                       "TSHARD_PORT), or its world is complete already",
                       where);
    else if (!absent[0] && !world->obstacle[0]) /* all have joined, nothing was refused */
        tshi_uv_list_unready(world, hint, sizeof hint);
    /* the obstacle is left out if ranks are absent: they are the reason, not this rank's failed
     * attempts */
    obstacle = there && absent[0] ? "" : world->obstacle;
    if (there)
        (void)tsh_error_set(error, TSH_ERR_TIMEOUT, (int)first,
                            "the world of %d ranks %s %.1f s%s%s%s%s%s", world->size, how,
                            (double)passed / 1e9, absent[0] ? "; absent ranks:" : "", absent,
                            obstacle[0] ? "; " : "", obstacle, hint);
    else
        (void)tsh_error_set(error, TSH_ERR_TIMEOUT, -1,
                            "rank %d of %d did not reach rank 0 in %.1f s%s%s%s", world->rank,
                            world->size, (double)passed / 1e9, obstacle[0] ? ": " : "", obstacle,
                            hint);
}

/* Logs that the world is not complete yet. Rank 0 knows which ranks are absent; another rank logs
 * something only if it cannot reach rank 0, or if all have joined but it cannot reach some. */
static void tshi_uv_give_notice(const tsh_uv_world *world) {
    /* joined: 1 if this rank, which is not 0, is connected to rank 0 */
    int joined = world->rank && world->peer[0].state == TSHI_UV_THERE;
    tsh_error error;
    if (joined && (world->absent[0] || world->told_ready)) return;
    tshi_uv_not_formed(world, "is not complete after", world->notice, &error);
    /* a timeout of 10^9 s or more stands for no time limit */
    if (world->timeout < INT64_C(1000000000) * TSHI_UV_SECOND)
        tsh_log_message(&world->logger, "%s; waiting until %g s are over (TSHARD_TIMEOUT)",
                        error.message, (double)world->timeout / 1e9);
    else
        tsh_log_message(&world->logger, "%s; waiting without a time limit", error.message);
}

/* While the world forms: logs once that this takes long, and reports an error when the time is
 * over. */
static void tshi_uv_watch_forming(tsh_uv_world *world, int64_t now) {
    tsh_error error;
    if (!world->forming || tshi_uv_failed(world) != TSH_OK) return;
    if (now >= world->due) {
        tshi_uv_not_formed(world, "did not form in", world->timeout, &error);
        tshi_uv_suspect(world, TSHI_UV_LATE, error.code, error.rank, "%s", error.message);
    } else if (now >= world->notice_at) {
        world->notice_at = INT64_MAX; /* logged only once */
        tshi_uv_give_notice(world);
    }
}

static void tshi_uv_tick(tsh_uv_world *world) { /* Does all periodic work that is due now. */
    int64_t now = tsh_now();
    tshi_uv_beat(world, now);         /* sends heartbeats every 250 ms */
    tshi_uv_tell_awaited(world, now); /* sends AWAIT every 120 ms while the caller is blocked */
    tshi_uv_note_silence(world, now); /* reports peers that have been silent too long */
    tshi_uv_take_offer(world, now);   /* adopts a decision held back, if its time has come */
    tshi_uv_send_report(world);       /* sends world->held, again if the coordinator has changed */
    tshi_uv_form(world);              /* completes the world or a group */
    tshi_uv_tend(world, now);         /* continues handshakes, dials the connections that are due */
    tshi_uv_log_counted(world, now);  /* logs refused connections, once a second */
    if (tshi_uv_failed(world) == TSH_OK && world->listener >= 0 && !world->listening &&
        now >= world->accept_at) /* starts or resumes accepting */
        world->listening = tshi_uv_watch(&world->control, world->listener, UV_READABLE, world,
                                         tshi_uv_accept);
    if (world->shm_listener >= 0 && !world->shm_listening)
        world->shm_listening = tshi_uv_watch(&world->control, world->shm_listener, UV_READABLE,
                                             world, tshi_uv_accept);
    tshi_uv_watch_forming(world, now); /* logs that joining takes long, or has timed out */
    /* sends world->blocked to the coordinator */
    if (TSHI_UV_GET(&world->blocked_new)) tshi_uv_send_blocked(world);
    tshi_uv_decide(world, now); /* chooses the world's error, if that is due */
}

/* Returns 1 if the shutdown can end: all peers have closed their connections, or 20 ms have passed
 * since this rank sent BYE (200 ms if bytes still wait to be sent; 2 s if a peer's system has not
 * acknowledged BYE: once the connection is closed, a lost BYE is not sent again, and the peer would
 * take this rank for lost). */
static int tshi_uv_parted(tsh_uv_world *world, int64_t now) {
    int unsent = 0, unheard = 0, there = 0;
    for (int r = 0; r < world->size; r++) {
        const tshi_uv_peer *peer = &world->peer[r];
        if (peer->fd < 0) continue;
        there++;
        unsent += peer->out.used != 0;
        unheard += tshi_uv_unacknowledged(peer->fd) > 0 && !tshi_uv_is_cut(peer);
    }
    return !there || now - world->parting > (unheard ? 2000 : unsent ? 200 : 20) * TSHI_UV_MS;
}

static void tshi_uv_part(tsh_uv_world *world) { /* Begins the shutdown: sends BYE to all. */
    if (tshi_uv_has_reported(world)) return;    /* first awaits the decision on its error */
    world->parting = tsh_now();
    (void)tshi_uv_write(world, TSHI_UV_BYE);
    tshi_uv_post_all(world);
    for (int r = 0; r < world->size; r++)
        if (world->peer[r].fd >= 0 && !world->peer[r].out.used)
            /* tells the peer's system that no more bytes will be sent */
            (void)shutdown(world->peer[r].fd, SHUT_WR);
}

/* Tells libuv for which events (UV_READABLE, UV_WRITABLE) to watch each control connection. */
static void tshi_uv_watch_peers(tsh_uv_world *world) {
    for (int r = 0; r < world->size; r++) {
        tshi_uv_peer *peer = &world->peer[r];
        /* UV_WRITABLE only if bytes wait to be sent to the peer */
        int events = UV_READABLE | (peer->out.used ? UV_WRITABLE : 0);
        if (peer->fd < 0 || events == peer->events) continue; /* no connection, or no change */
        (void)uv_poll_start(peer->poll, events, tshi_uv_peer_event);
        peer->events = events;
    }
}

/* Callback of world->tick. It does nothing: the event itself ends the loop's sleep. */
static void tshi_uv_on_tick(uv_timer_t *timer) {
    (void)timer;
}

/* Runs before the loop of the control thread sleeps: does what is due (tshi_uv_tick), then sets a
 * timer for the next time. */
static void tshi_uv_on_turn(uv_prepare_t *turn) {
    tsh_uv_world *world = (tsh_uv_world *)turn->data;
    int ended = tshi_uv_failed(world) != TSH_OK, leaving = TSHI_UV_GET(&world->leaving), wait;
    int64_t next; /* when the next heartbeat, or the next error for silence, is due */
    tshi_uv_tick(world);
    if (leaving && !world->parting) tshi_uv_part(world);
    if (world->parting && tshi_uv_parted(world, tsh_now())) {
        uv_stop(&world->control); /* ends uv_run in tshi_uv_main */
        return;
    }
    tshi_uv_watch_peers(world);
    next = tshi_uv_min(world->silent_at, world->beat);
    wait = world->forming || world->making || world->conns || leaving || /* next tick in 5 ms */
                   tshi_uv_has_reported(world) || (!ended && world->offered_at)
               ? 5 /* ms until the next tick */
               /* ms until `next`, at most 100 */
               : (int)tshi_uv_min(100, (next - tsh_now()) / TSHI_UV_MS + 1);
    if (wait < 1) wait = 1;
    world->ticked = tsh_now() + wait * TSHI_UV_MS; /* when this thread should wake up */
    (void)uv_timer_start(&world->tick, tshi_uv_on_tick, (uint64_t)wait, 0);
}

/* After a timeout of a new group's connections: appends to error the lowest rank that is not
 * connected, and why. */
static void tshi_uv_name_missing(tshi_uv_group *group, tsh_error *error) {
    const tsh_uv_world *world = group->world;
    for (int r = group->size - 1; r >= 0; r--) /* sets the lowest missing rank last */
        if (r != group->rank && tshi_uv_unlinked(group, r)) error->rank = group->ranks[r];
    if (error->rank < 0) return; /* no rank is missing */
    tsh_text_add(error->message, sizeof error->message, "; absent ranks: %d", error->rank);
    if (world->obstacle[0]) /* says why the last attempt to connect failed */
        tsh_text_add(error->message, sizeof error->message, " (%s)", world->obstacle);
}

/* Callback of wake_control: takes the error report of the caller's thread, and the group that it
 * wants connected. Other reasons to wake this thread, a long wait or a shutdown, are seen by the
 * next tick. */
static void tshi_uv_on_request(uv_async_t *async) {
    tsh_uv_world *world = (tsh_uv_world *)async->data;
    tshi_uv_report e;
    tshi_uv_group *made = NULL;
    uv_mutex_lock(&world->lock);
    e = world->reported;
    world->reported.kind = TSHI_UV_NOTHING;
    if (world->requested) {
        /* the control thread owns the group until it is connected */
        made = world->making = world->requested;
        world->requested = NULL;
        made->missing += made->size - 1 - made->rank; /* one LINKED from each higher rank */
        world->listener = made->listener;             /* the higher ranks dial this listener */
        made->listener = -1;
    }
    uv_mutex_unlock(&world->lock);
    if (e.kind == TSHI_UV_LATE && world->making) tshi_uv_name_missing(world->making, &e.error);
    /* holds the report and sends it to the coordinator */
    if (e.kind != TSHI_UV_NOTHING) tshi_uv_hold(world, &e);
    if (made) tshi_uv_dial_group(world, made); /* dials the lower ranks */
}

/* Main function of the control thread: runs its loop until it is stopped, then closes all. */
static void tshi_uv_main(void *argument) {
    tsh_uv_world *world = (tsh_uv_world *)argument;
    if (world->rank) tshi_uv_add_dial(world, TSHI_UV_JOIN, 0, 0, &world->address[0]);
    (void)uv_run(&world->control, UV_RUN_DEFAULT); /* until tshi_uv_on_turn stops it */
    while (world->conns) tshi_uv_conn_free(world->conns);
    tshi_uv_log_counted(world, INT64_MAX); /* logs the counted messages that are not logged yet */
    for (int r = 0; r < world->size; r++) {
        tshi_uv_peer_end(&world->peer[r], TSHI_UV_LEFT);
        free(world->peer[r].in.data);
        free(world->peer[r].out.data);
    }
    tshi_uv_close_listener(world);
    tshi_uv_share_end(world);
}
