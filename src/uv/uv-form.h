/* ========================================================================== */
/* >>uv-form                                        MARK: - uv-form (private) */
/* Sets up all connections. First, each rank connects to rank 0.              */
/* A rank sends its own address to rank 0 (HERE), which sends all (TABLE).    */
/* Each rank then dials all lower ranks; in a new group, the lower members.   */
/* A rank that has all its connections sends READY to rank 0.                 */
/* When all ranks are ready, rank 0 sends GO: the world has formed.           */
/* Needs: >>uv-share.                                                         */
/* ========================================================================== */

/* Returns an error if other hosts can reach `address`, and neither a key nor TSHARD_INSECURE is
 * set; else TSH_OK. */
static tsh_result tshi_uv_need_key(tsh_uv_world *world, const tshi_uv_address *address,
                                   tsh_error *error) {
    char host[64]; /* the address as numbers, for the error */
    if (world->keyed || world->insecure || tshi_uv_loopback(address)) return TSH_OK;
    tshi_uv_host_text(address, host, sizeof host);
    return tsh_error_set(error, TSH_ERR_ARGUMENT, world->rank,
                         "rank %d: %s is not a loopback address: set TSHARD_KEY or "
                         "TSHARD_KEY_FILE, the same on every rank (or TSHARD_INSECURE=1 to let "
                         "anybody in)",
                         world->rank, host);
}

static void tshi_uv_close_listener(tsh_uv_world *world) { /* Stops accepting connections. */
    tshi_uv_unwatch(&world->listening);
    tshi_uv_close_fd(&world->listener);
}

/* Adds a connection to world rank `rank` at `address`, which the control thread dials in its next
 * tick. A lack of memory is reported. */
static void tshi_uv_add_dial(tsh_uv_world *world, tshi_uv_purpose purpose, uint64_t group, int rank,
                             const tshi_uv_address *address) {
    tshi_uv_conn *conn = tshi_uv_conn_new(world, 1); /* 1: dialled by this rank */
    if (!conn) {
        tshi_uv_lacks_memory(world, rank);
        return;
    }
    conn->hello.purpose = purpose; /* what the connection will be used for */
    conn->hello.group = group;
    conn->hello.server = rank; /* the rank that should answer */
    conn->address = *address;
}

#if TSHI_UV_SHM
/* Adds a Unix-socket connection by which this rank asks a lower rank to share memory. The lower
 * rank listens by now, if it is on this host. */
static void tshi_uv_add_share(tsh_uv_world *world, int rank) {
    tshi_uv_address address = tshi_uv_share_address(world, rank);
    if (world->shm) tshi_uv_add_dial(world, TSHI_UV_SHARE, 0, rank, &address);
}
#else
static void tshi_uv_add_share(tsh_uv_world *world, int rank) {
    (void)world, (void)rank;
}
#endif

/* Dials the data connections to the group's lower ranks; the higher ranks dial this rank. */
static void tshi_uv_dial_group(tsh_uv_world *world, const tshi_uv_group *group) {
    for (int r = 0; r < group->rank; r++) {
        int rank = group->ranks[r]; /* world rank of member r */
        tshi_uv_address address = world->peer[rank].address;
        /* 0: for this group, too, member r listens on its port in the address table */
        if (group->ports[r]) tshi_uv_set_port(&address, group->ports[r]);
        /* adds the connection for collectives */
        tshi_uv_add_dial(world, TSHI_UV_DATA, group->id, rank, &address);
        /* adds the connection for messages */
        tshi_uv_add_dial(world, TSHI_UV_MESSAGES, group->id, rank, &address);
    }
}

/* Called when rank 0 has accepted this rank: starts to listen, and tells rank 0 the address. */
static void tshi_uv_joined(tsh_uv_world *world) {
    tsh_error error;
    tshi_uv_cursor *c;
    char host[64] = "";        /* "": rank 0 takes the host that this rank connects from */
    if (world->bind_host[0]) { /* the user chose an address (TSHARD_BIND) */
        tshi_uv_host_text(&world->own, host, sizeof host);
        if (strcmp(host, "0.0.0.0") == 0 || strcmp(host, "::") == 0) host[0] = 0;
    } else {
        /* listens on the address of this rank's end of the connection to rank 0 */
        (void)tshi_uv_end_of(world->peer[0].fd, 0, &world->own);
        tshi_uv_set_port(&world->own, 0); /* the system picks a port */
    }
    if (tshi_uv_need_key(world, &world->own, &error) != TSH_OK) {
        tshi_uv_suspect(world, TSHI_UV_ABORT, error.code, error.rank, "%s", error.message);
        return;
    }
    world->listener = tshi_uv_listen(&world->own); /* -1: a system call failed (errno) */
    if (world->listener < 0) {
        tshi_uv_host_text(&world->own, host, sizeof host);
        tshi_uv_suspect(world, TSHI_UV_ABORT, TSH_ERR_IO, world->rank,
                        "rank %d cannot listen on %s: %s; set TSHARD_BIND to an address of this "
                        "host",
                        world->rank, host, tshi_uv_why(errno));
        return;
    }
    (void)tshi_uv_end_of(world->listener, 0, &world->own); /* world->own now has the port */
    (void)tshi_uv_end_of(world->peer[0].fd, 1, &world->peer[0].address); /* rank 0's address */
    c = tshi_uv_write(world, TSHI_UV_HERE);
    tshi_uv_text_field(c, host, sizeof host); /* rank 0 reads it in tshi_uv_read_place */
    (void)tshi_uv_field(c, (uint64_t)tshi_uv_port(&world->own), 2);
    tshi_uv_post(&world->peer[0]);
}

/* Reads a host and a port from c into *address. Returns 0 if the host is missing or not an address:
 * then only the port is set. */
static int tshi_uv_read_place(tshi_uv_cursor *c, tshi_uv_address *address) {
    tshi_uv_address found[TSHI_UV_ADDRESSES]; /* only the first one is used */
    const char *why;
    char host[64];
    int port, told; /* told: 1 if a valid host was read */
    tshi_uv_text_field(c, host, sizeof host);
    port = (int)tshi_uv_field(c, 0, 2);
    told = !c->bad && host[0] && tshi_uv_resolve(host, port, 1, found, &why); /* no DNS lookup */
    if (told) *address = found[0];
    tshi_uv_set_port(address, port);
    return told;
}

/* Handles HERE, on rank 0: stores the address where the peer listens: the host that it sent, else
 * the one that it connects from, and its port. */
static void tshi_uv_on_here(tshi_uv_peer *peer, tshi_uv_cursor *c) {
    if (peer->world->rank != 0) return; /* only rank 0 collects addresses */
    /* default: the host that the peer connects from */
    (void)tshi_uv_end_of(peer->fd, 1, &peer->address);
    (void)tshi_uv_read_place(c, &peer->address);
    peer->placed = !c->bad; /* the address is known and may go into the table */
}

/* Writes the ranks that have not connected to this rank yet, as " 1 3"; "": none. */
static void tshi_uv_list_absent(const tsh_uv_world *world, char *text, size_t room) {
    text[0] = 0;
    for (int r = 0; r < world->size; r++)
        if (r != world->rank && world->peer[r].state == TSHI_UV_ABSENT)
            tsh_text_add(text, room, " %d", r);
}

/* Rank 0: sends all ranks the list of the ranks that are absent (MISSING). */
static void tshi_uv_tell_absent(tsh_uv_world *world) {
    char text[256];
    tshi_uv_list_absent(world, text, sizeof text);
    tshi_uv_text_field(tshi_uv_write(world, TSHI_UV_MISSING), text, sizeof text);
    tshi_uv_post_all(world);
}

/* Derives world->mesh, the key of all connections but JOIN. It needs the token in rank 0's address
 * table, which only ranks that have joined receive. */
static void tshi_uv_set_mesh(tsh_uv_world *world) {
    (void)crypto_auth_hmacsha256(world->mesh, world->token, sizeof world->token, world->secret);
    tshi_uv_share_listen(world); /* listens before any rank can dial it */
    world->tabled = 1;           /* rank 0's address table is known now */
}

static void tshi_uv_send_table(tsh_uv_world *world) { /* Rank 0: sends all ranks' addresses. */
    tshi_uv_cursor *c = tshi_uv_write(world, TSHI_UV_TABLE);
    char host[64];
    randombytes_buf(world->token, sizeof world->token); /* random bytes for tshi_uv_set_mesh */
    tshi_uv_set_mesh(world);
    tshi_uv_bytes_field(c, world->token, sizeof world->token);
    for (int r = 1; r < world->size; r++) { /* all ranks know rank 0's address already */
        tshi_uv_host_text(&world->peer[r].address, host, sizeof host);
        tshi_uv_text_field(c, host, sizeof host);
        (void)tshi_uv_field(c, (uint64_t)tshi_uv_port(&world->peer[r].address), 2);
    }
    tshi_uv_post_all(world);
}

/* Handles TABLE: reads the addresses on which the ranks listen, and dials the lower ranks. */
static void tshi_uv_on_table(tsh_uv_world *world, tshi_uv_cursor *c) {
    if (world->tabled) return; /* a second table is ignored */
    tshi_uv_bytes_field(c, world->token, sizeof world->token);
    for (int r = 1; r < world->size && !c->bad; r++) /* reads rank r's host and port */
        if (!tshi_uv_read_place(c, &world->peer[r].address)) c->bad = 1;
    if (c->bad) return; /* the message is malformed: tshi_uv_next_message ends the connection */
    tshi_uv_set_mesh(world);
    for (int r = 1; r < world->rank; r++) /* lower ranks; the higher ones dial this rank */
        tshi_uv_add_dial(world, TSHI_UV_CONTROL, 0, r, &world->peer[r].address);
    tshi_uv_add_share(world, 0); /* other ranks: by tshi_uv_proven */
    tshi_uv_dial_group(world, world->world_group); /* the data connections, to rank 0 as well */
}

static void tshi_uv_completed(tsh_uv_world *world) { /* The world has formed: wakes the caller. */
    tshi_uv_log_counted(world, INT64_MAX);           /* logs the refusals counted so far */
    tshi_uv_close_listener(world);
    tshi_uv_share_end(world);
    uv_mutex_lock(&world->lock);
    world->forming = 0;                 /* read by tshi_uv_await_world */
    uv_cond_broadcast(&world->changed); /* wakes tshi_uv_await_world */
    uv_mutex_unlock(&world->lock);
}

/* Returns the number that stands for this rank's host: the lowest rank with which it shares memory,
 * or its own rank. */
static int tshi_uv_own_host(const tsh_uv_world *world) {
    int r = 0;
    while (r < world->rank && !tshi_uv_shm_pair(world, world->rank, r)) r++;
    return r;
}

/* Reads peer->host, the lowest rank on the peer's host: a number above the peer's own rank is
 * malformed. */
static void tshi_uv_read_host(tshi_uv_peer *peer, tshi_uv_cursor *c) {
    peer->host = (int)tshi_uv_field(c, 0, 2);
    if (peer->host > peer->rank) c->bad = 1;
}

/* Handles GO: reads the hosts of all ranks; the world has formed. */
static void tshi_uv_on_go(tsh_uv_world *world, tshi_uv_cursor *c) {
    for (int r = 0; r < world->size && !c->bad; r++) tshi_uv_read_host(&world->peer[r], c);
    if (!c->bad) tshi_uv_completed(world);
}

/* ready 1: returns 1 if every other rank has sent READY. ready 0: returns 1 if every other rank has
 * a control connection to this one and, if placed is 1, a known address. */
static int tshi_uv_all(const tsh_uv_world *world, int placed, int ready) {
    for (int r = 0; r < world->size; r++) {
        const tshi_uv_peer *peer = &world->peer[r];
        int there = peer->state == TSHI_UV_THERE && (!placed || peer->placed);
        if (r != world->rank && !(ready ? peer->ready : there)) return 0;
    }
    return 1;
}

/* Called at every tick: finishes a new group once it has all its connections, and takes the next
 * step of forming the world (sends TABLE, READY or GO) once what that step needs has happened. */
static void tshi_uv_form(tsh_uv_world *world) {
    tshi_uv_group *group = world->making;
    if (group && group->missing == 0) { /* all connections of the group are made */
        world->making = NULL;
        tshi_uv_close_listener(world);
        TSHI_UV_PUT(&group->linked, 1); /* from here on the caller's thread uses the group */
        (void)uv_async_send(&world->wake_caller); /* wakes tshi_uv_wait_for */
    }
    if (!world->forming) return; /* the world has formed: no steps are left */
    if (world->rank == 0 && !world->tabled && tshi_uv_all(world, 1, 0)) tshi_uv_send_table(world);
    if (!world->told_ready && world->tabled && tshi_uv_all(world, 0, 0) &&
        world->world_group->missing == 0 &&
        !tshi_uv_sharing(world)) { /* all of this rank's connections are made */
        world->told_ready = 1;
        world->peer[world->rank].host = tshi_uv_own_host(world);
        (void)tshi_uv_field(tshi_uv_write(world, TSHI_UV_READY),
                            (uint64_t)world->peer[world->rank].host, 2);
        tshi_uv_post(&world->peer[0]); /* no-op if this is rank 0 */
    }
    if (world->rank == 0 && world->told_ready && tshi_uv_all(world, 0, 1)) { /* all sent READY */
        tshi_uv_cursor *c = tshi_uv_write(world, TSHI_UV_GO);
        for (int r = 0; r < world->size; r++)
            (void)tshi_uv_field(c, (uint64_t)world->peer[r].host, 2);
        tshi_uv_post_all(world);
        tshi_uv_completed(world);
    }
}
