/* ========================================================================== */
/* >>uv-admit                                      MARK: - uv-admit (private) */
/* Dials and accepts connections, and hands them over once authenticated.     */
/* A connection then belongs to a peer (control), or to a link of a group.    */
/* A dialled connection that fails is dialled again; an accepted one, freed.  */
/* Needs: >>uv-hear.                                                          */
/* ========================================================================== */

/* Makes fd the control connection to world rank `rank`. Returns 0 if memory is lacking, which it
 * reports. */
static int tshi_uv_attach(tsh_uv_world *world, int rank, int fd, tshi_uv_channel *channel,
                          const char *name) {
    tshi_uv_peer *peer = &world->peer[rank];
#ifdef TCP_THIN_LINEAR_TIMEOUTS
    /* Switches on that TCP, after a short break of the network, resends at even intervals, not at
     * doubled ones. Data connections do without: on a slow link they would leave no room for these
     * messages. */
    int one = 1;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_THIN_LINEAR_TIMEOUTS, &one, sizeof one);
#endif
    peer->poll = tshi_uv_watch(&world->control, fd, UV_READABLE, peer, tshi_uv_peer_event);
    if (!peer->poll) {
        tshi_uv_lacks_memory(world, rank);
        return 0;
    }
    peer->fd = fd;
    peer->channel = channel;
    peer->used = peer->deaf = peer->opened = 0;
    peer->events = UV_READABLE; /* the events that peer->poll watches now */
    peer->state = TSHI_UV_THERE;
    /* the peer's silence is counted from here on */
    peer->heard.last = peer->acked.last = tsh_now();
    (void)snprintf(peer->name, sizeof peer->name, "%s", name);
    return 1;
}

/* Returns 1 if both ends of the connection fd are on this host. */
static int tshi_uv_is_local(int fd) {
    tshi_uv_address ends[2];
    char text[2][64];
    for (int i = 0; i < 2; i++) { /* 0: this end; 1: the other */
        if (!tshi_uv_end_of(fd, i, &ends[i])) return 0;
        tshi_uv_host_text(&ends[i], text[i], sizeof text[i]);
    }
    /* both ends have the same address: one host */
    return tshi_uv_loopback(&ends[0]) || strcmp(text[0], text[1]) == 0;
}

/* Assigns a data connection to its tshi_uv_link; returns 0 if no link needs it. Between ranks of
 * one host a small send buffer lets the receiver read bytes while they are in the cache. */
static int tshi_uv_place_link(tsh_uv_world *world, const tshi_uv_hello *hello, int rank, int fd,
                              tshi_uv_channel *channel) {
    tshi_uv_link *link = tshi_uv_meant(world, hello, rank);
    int near = TSHI_UV_NEAR; /* size of the send buffer in bytes */
    if (!link) return 0;     /* no group needs this connection any more */
    if (tshi_uv_is_local(fd)) (void)setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &near, sizeof near);
    if (link->fd < 0) link->group->missing--; /* one connection less is missing */
    tshi_uv_close_fd(&link->fd);              /* the connection of an earlier attempt, if any */
    link->fd = fd;
    link->checks = (hello->options & TSHI_UV_CHECKED) != 0;
    tshi_uv_channel_free(&link->channel);
    link->channel = channel;
    return 1;
}

/* Sends the message LINKED to a lower rank, once this rank has both connections to it that a new
 * group needs. While the world forms, ranks send READY to rank 0 instead. */
static void tshi_uv_tell_linked(tsh_uv_world *world, int rank) {
    tshi_uv_group *group = world->making;
    if (!group || tshi_uv_unlinked(group, tshi_uv_member(group, rank))) return;
    (void)tshi_uv_field(tshi_uv_write(world, TSHI_UV_LINKED), group->id, 8);
    tshi_uv_post(&world->peer[rank]);
}

/* Hands an authenticated connection over to its tshi_uv_peer or tshi_uv_link. Ends it if no link
 * needs it, or if memory is lacking. */
static void tshi_uv_proven(tshi_uv_conn *conn) {
    tsh_uv_world *world = conn->world;
    int rank = conn->dialled ? conn->hello.server : conn->hello.client, kept;
    tshi_uv_channel *channel = NULL;
    tshi_uv_unwatch(&conn->poll);
    if (conn->hello.options & TSHI_UV_SEALED) {
        channel = tshi_uv_channel_new(conn->session, conn->dialled, conn->hello.options);
        if (!channel) {
            tshi_uv_lacks_memory(world, rank);
            tshi_uv_conn_end(conn);
            return;
        }
    }
    if (!conn->dialled) world->peer[rank].process = conn->hello.process;
    if (conn->hello.purpose <= TSHI_UV_CONTROL) { /* a control connection */
        /* closes the connection of an earlier attempt, if any */
        tshi_uv_peer_end(&world->peer[rank], TSHI_UV_ABSENT);
        kept = tshi_uv_attach(world, rank, conn->fd, channel, conn->name);
        if (kept && conn->hello.purpose == TSHI_UV_CONTROL && conn->dialled)
            tshi_uv_add_share(world, rank);
        if (kept && rank == 0) tshi_uv_joined(world); /* rank 0 has accepted this rank */
        /* sends all ranks the list of absent ranks, which has changed */
        if (kept && world->rank == 0) tshi_uv_tell_absent(world);
    } else {
        kept = tshi_uv_place_link(world, &conn->hello, rank, conn->fd, channel);
        if (kept && conn->dialled) tshi_uv_tell_linked(world, rank);
    }
    if (kept) {
        conn->fd = -1; /* the peer or the link owns the socket now */
        tshi_uv_conn_free(conn);
    } else {
        tshi_uv_channel_free(&channel);
        tshi_uv_conn_end(conn); /* if this rank dialled, it dials again */
    }
}

/* Callback when the socket of an unauthenticated connection is ready: goes on with its
 * handshake. */
static void tshi_uv_conn_event(uv_poll_t *poll, int status, int events) {
    tshi_uv_conn *conn = (tshi_uv_conn *)poll->data;
    int share = 1, done;
    (void)status;
    (void)events;
    if (conn->phase == TSHI_UV_SHARES) {
        done = tshi_uv_share_step(conn);
    } else {
        done = conn->dialled ? tshi_uv_client_step(conn) : tshi_uv_server_step(conn);
        share = conn->hello.purpose == TSHI_UV_SHARE; /* known from the client hello */
        if (done == 1 && share) done = tshi_uv_share_begin(conn);
    }
    if (done > 0 && share) {
        tshi_uv_conn_free(conn); /* the two ranks have each other's segment, or use TCP */
    } else if (done < 0) {       /* the handshake failed */
        tshi_uv_conn_end(conn);
    } else if (done) { /* both ends are authenticated */
        tshi_uv_proven(conn);
    } else if (conn->phase == TSHI_UV_HAS_HELLO) { /* the handshake waits for rank 0's table */
        (void)uv_poll_stop(poll);                  /* tshi_uv_tend continues the handshake */
    } else {
        int writes = conn->out_used || conn->phase == TSHI_UV_CONNECTS;
        (void)uv_poll_start(poll, UV_READABLE | (writes ? UV_WRITABLE : 0), tshi_uv_conn_event);
    }
}

/* Starts the handshake on fd, whose other end is `peer`. If this rank accepted the connection,
 * sends the server hello. */
static void tshi_uv_conn_begin(tshi_uv_conn *conn, int fd, const tshi_uv_address *peer) {
    /* a dialled socket becomes writable (UV_WRITABLE) when it has connected */
    int events = UV_READABLE | (conn->dialled ? UV_WRITABLE : 0);
    /* time limit of the handshake in seconds */
    int patience = conn->dialled ? TSHI_UV_DIAL_S : TSHI_UV_PATIENCE_S;
    conn->fd = fd;
    conn->phase = conn->dialled ? TSHI_UV_CONNECTS : TSHI_UV_AWAITS_HELLO;
    conn->until = tsh_now() + patience * TSHI_UV_SECOND; /* tshi_uv_tend ends the handshake then */
    tshi_uv_address_text(peer, conn->name, sizeof conn->name);
    conn->poll = tshi_uv_watch(&conn->world->control, fd, events, conn, tshi_uv_conn_event);
    if (!conn->poll) {
        tshi_uv_conn_end(conn); /* there is no memory to watch the socket */
    } else if (!conn->dialled) {
        uint32_t version = TSHI_UV_VERSION;
        tshi_uv_give_share(conn); /* new keys, so no client hello can be replayed */
        (void)tshi_uv_server_hello(conn->out, 1, &version, conn->hello.server_share);
        conn->out_used = TSHI_UV_SERVER_HELLO;
        conn->in_need = TSHI_UV_CLIENT_HELLO; /* bytes of the client hello, to be read */
        tshi_uv_conn_event(conn->poll, 0, 0); /* writes the server hello at once */
    }
}

/* Closes one accepted, unauthenticated connection, chosen at random. Returns 0 if there is none.
 * Closing the oldest would shut out ranks whose round trip takes longer than others need to fill
 * all n places (world->unproven_limit). At random, a connection survives n arrivals with
 * probability 1/e, and a rank dials again. */
static int tshi_uv_drop_unproven(tsh_uv_world *world) {
    tshi_uv_conn *conn = world->conns; /* this list has dialled connections, too */
    int skip;
    if (!world->unproven) return 0;
    /* number of accepted connections in the list before the one to be closed */
    skip = (int)randombytes_uniform((uint32_t)world->unproven);
    while (conn->dialled || skip--) conn = conn->next; /* skips dialled ones, too */
    tshi_uv_note(world, TSHI_UV_OF_UNPROVEN,
                 "rank %d refused %s: %d connections wait for their proof", world->rank, conn->name,
                 world->unproven);
    tshi_uv_conn_end(conn);
    return 1;
}

/* Handles a lack of file descriptors. While the world forms, it is only recorded in
 * world->obstacle, since descriptors may become free; later it is an error. */
static void tshi_uv_too_few(tsh_uv_world *world) {
    /* number of file descriptors that the world needs; below, those of its groups are added */
    int need = tshi_uv_descriptors(world->size);
    uv_mutex_lock(&world->lock);
    for (const tshi_uv_group *group = world->groups; group; group = group->next)
        if (group != world->world_group) need += 2 * (group->size - 1); /* 2 per member */
    uv_mutex_unlock(&world->lock);
    tshi_uv_hindered(world, "too few descriptors: rank %d needs about %d (ulimit -n)", world->rank,
                     need);
    if (!world->forming) /* before the world has formed, accepting is tried again */
        tshi_uv_suspect(world, TSHI_UV_ABORT, TSH_ERR_IO, world->rank, "%s", world->obstacle);
}

/* Callback when connections arrive on world->listener: accepts them and starts their handshakes. */
static void tshi_uv_accept(uv_poll_t *poll, int status, int events) {
    tsh_uv_world *world = (tsh_uv_world *)poll->data;
    const int near = poll == world->shm_listening; /* 1: connections of this host's ranks */
    const int *listener = near ? &world->shm_listener : &world->listener;
    (void)status;
    (void)events;
    /* accepts up to TSHI_UV_ACCEPTS connections per event */
    for (int i = 0; i < TSHI_UV_ACCEPTS && *listener >= 0; i++) {
        tshi_uv_address from;
        tshi_uv_conn *conn;
        int fd;
        from.size = (socklen_t)sizeof from.storage;
        fd = accept(*listener, (struct sockaddr *)&from.storage, &from.size);
        if (fd < 0) {
            if (!tshi_uv_out_of_descriptors(errno)) return; /* no connection waits to be accepted */
            if (tshi_uv_drop_unproven(world)) continue;     /* frees a descriptor: try again */
            tshi_uv_too_few(world);
            tshi_uv_unwatch(near ? &world->shm_listening
                                 : &world->listening); /* a later tick tries again */
            world->accept_at = tsh_now() + 100 * TSHI_UV_MS;
            return;
        }
        if (world->unproven >= world->unproven_limit) (void)tshi_uv_drop_unproven(world);
        conn = tshi_uv_prepare_fd(fd) && (!near || tshi_uv_same_user(fd))
                   ? tshi_uv_conn_new(world, 0)
                   : NULL;
        if (conn) {
            conn->address = from;
            tshi_uv_conn_begin(conn, fd, &from);
        } else
            (void)close(fd); /* no memory, another user, or the system refused */
    }
}

/* Starts to connect conn to its address. If that fails at once, it is dialled again later. */
static void tshi_uv_dial(tshi_uv_conn *conn) {
    tsh_uv_world *world = conn->world;
    const tshi_uv_address *address = &conn->address;
    char name[80]; /* host:port, for the error */
    int fd, why;
    if (conn->hello.purpose == TSHI_UV_JOIN) /* tries all addresses of rank 0's host in turn */
        address = &world->address[conn->attempts % world->addresses];
    fd = tshi_uv_connect(address);
    why = errno; /* saved before another call changes errno */
    if (conn->hello.purpose == TSHI_UV_SHARE &&
        (fd >= 0 ? !tshi_uv_same_user(fd) : why == ECONNREFUSED)) {
        tshi_uv_close_fd(&fd); /* peer of another user, or on another host: TCP is used */
        tshi_uv_conn_free(conn);
        return;
    }
    if (fd >= 0) {
        tshi_uv_conn_begin(conn, fd, address);
        return;
    }
    tshi_uv_address_text(address, name, sizeof name);
    if (tshi_uv_out_of_descriptors(why))
        tshi_uv_too_few(world);
    else
        tshi_uv_hindered(world, "%s: %s", name, tshi_uv_why(why));
    tshi_uv_conn_end(conn); /* dialled again later */
}
