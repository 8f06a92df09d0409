/* ========================================================================== */
/* >>uv-connect                                  MARK: - uv-connect (private) */
/* The handshake of a connection, by which both ends are authenticated.       */
/* The end that dialled advances it by tshi_uv_client_step.                   */
/* The end that accepted the connection advances it by tshi_uv_server_step.   */
/* >>uv-admit calls these when the socket is ready.                           */
/* Needs: >>uv-decide.                                                        */
/* ========================================================================== */

/* Time limits in seconds. PATIENCE: on the server, for the whole handshake. DIAL: on the client,
 * until the server hello arrives, and for the reply to a JOIN. REPLY: on the client, for the reply
 * to any other hello, which may wait for rank 0's address table. */
enum { TSHI_UV_PATIENCE_S = 5, TSHI_UV_DIAL_S = 2, TSHI_UV_REPLY_S = 6 };
enum { TSHI_UV_SHARE_TRIES = 20 }; /* attempts to share memory with a rank; then TCP is used */

static void tshi_uv_freed(uv_handle_t *handle) {
    free(handle);
}

/* Returns 1 if so many bytes can be allocated now. This is tested before libuv enlarges its table
 * of descriptors, since libuv aborts the process if it gets no memory. */
static int tshi_uv_has_memory(size_t bytes) {
    void *volatile probe = malloc(bytes); /* volatile: else compilers remove malloc and free */
    free(probe);
    return probe != NULL;
}

/* Makes loop call `callback` when libuv's `events` (UV_READABLE, ...) occur on fd; poll->data is
 * `data`. Returns NULL if memory is lacking. */
static uv_poll_t *tshi_uv_watch(uv_loop_t *loop, int fd, int events, void *data,
                                uv_poll_cb callback) {
    uv_poll_t *poll = (uv_poll_t *)calloc(1, sizeof *poll);
    /* size of libuv's table, which grows to a power of 2 entries */
    size_t table = 2 * ((size_t)fd + 4) * sizeof(void *);
    if (!poll || ((unsigned)fd >= loop->nwatchers && !tshi_uv_has_memory(table)) ||
        uv_poll_init(loop, poll, fd) != 0) {
        free(poll);
        return NULL;
    }
    poll->data = data;
    (void)uv_poll_start(poll, events, callback);
    return poll;
}

static void tshi_uv_unwatch(uv_poll_t **poll) {
    if (!*poll) return;
    (void)uv_poll_stop(*poll);
    uv_close((uv_handle_t *)*poll, tshi_uv_freed);
    *poll = NULL;
}

/* Adds a connection to world->conns: an accepted one (`dialled` 0), or one that is to be dialled
 * (`dialled` 1). Returns NULL if memory is lacking. */
static tshi_uv_conn *tshi_uv_conn_new(tsh_uv_world *world, int dialled) {
    tshi_uv_conn *conn = (tshi_uv_conn *)calloc(1, sizeof *conn);
    if (!conn) return NULL;
    conn->world = world;
    conn->fd = conn->earlier = -1;
    conn->dialled = dialled;
    conn->next = world->conns;
    world->conns = conn;
    world->unproven += !dialled;
    return conn;
}

/* Gives an accepted connection its ephemeral keys: unused ones of an earlier connection, if there
 * are any, since new keys take 50 us, more than all else that is done for a peer that
 * may not have the key. */
static void tshi_uv_give_share(tshi_uv_conn *conn) {
    tsh_uv_world *world = conn->world;
    int64_t now = tsh_now();
    while (world->spares) {
        tshi_uv_share *spare = &world->spare[--world->spares];
        if (now >= spare->until) continue;
        memcpy(conn->scalar, spare->scalar, sizeof conn->scalar);
        memcpy(conn->hello.server_share, spare->share, sizeof spare->share);
        conn->share_until = spare->until;
        return;
    }
    tshi_uv_new_share(world->secret, conn->scalar, conn->hello.server_share);
    conn->share_until = now + TSHI_UV_PATIENCE_S * TSHI_UV_SECOND;
}

/* Keeps the ephemeral keys of an accepted connection that ends, if no client has used them. */
static void tshi_uv_keep_share(const tshi_uv_conn *conn) {
    tsh_uv_world *world = conn->world;
    tshi_uv_share *spare = &world->spare[world->spares];
    if (conn->phase != TSHI_UV_AWAITS_HELLO || world->spares == TSHI_UV_SPARES) return;
    memcpy(spare->scalar, conn->scalar, sizeof spare->scalar);
    memcpy(spare->share, conn->hello.server_share, sizeof spare->share);
    spare->until = conn->share_until;
    world->spares++;
}

static void tshi_uv_conn_free(tshi_uv_conn *conn) {
    tshi_uv_conn **at = &conn->world->conns;
    tshi_uv_keep_share(conn);
    while (*at != conn) at = &(*at)->next;
    *at = conn->next;
    conn->world->unproven -= !conn->dialled;
    tshi_uv_unwatch(&conn->poll);
    tshi_uv_close_fd(&conn->fd);
    tshi_uv_close_fd(&conn->earlier);
    sodium_memzero(conn, sizeof *conn); /* the session's secrets are in it */
    free(conn);
}

/* Ends a handshake that failed. Frees an accepted connection; a dialled one is dialled again after
 * a random delay, which grows with each attempt from 5 ms to 160 ms on average. */
static void tshi_uv_conn_end(tshi_uv_conn *conn) {
    int shift = conn->attempts < 5 ? conn->attempts : 5;
    int64_t step = TSHI_UV_MS * 5 << shift; /* mean delay in ns */
    if (!conn->dialled ||
        (conn->hello.purpose == TSHI_UV_SHARE && conn->attempts >= TSHI_UV_SHARE_TRIES)) {
        tshi_uv_conn_free(conn);
        return;
    }
    tshi_uv_unwatch(&conn->poll);
    /* While the reply is awaited, the server may have accepted the connection: keeps it open. */
    if (conn->phase == TSHI_UV_AWAITS_REPLY) {
        tshi_uv_close_fd(&conn->earlier);
        conn->earlier = conn->fd;
        conn->fd = -1;
    }
    tshi_uv_close_fd(&conn->fd);
    conn->in_used = conn->out_used = 0;
    conn->phase = TSHI_UV_WAITS;
    conn->attempts++;
    conn->until = tsh_now() + step / 2 + (int64_t)randombytes_uniform((uint32_t)step);
}

/* Records in world->obstacle why a connection could not be made, for the error after a timeout. */
TSH_PRINTF(2, 3) static void tshi_uv_hindered(tsh_uv_world *world, const char *format, ...) {
    va_list list;
    va_start(list, format);
    tsh_text_format(world->obstacle, sizeof world->obstacle, format, list);
    va_end(list);
}

/* Computes conn->session, the session secret, from this end's private key and the other end's
 * public one (its share). Returns 0 if the share is not valid. */
static int tshi_uv_set_session(tshi_uv_conn *conn) {
    const tsh_uv_world *world = conn->world;
    const tshi_uv_hello *hello = &conn->hello;
    return tshi_uv_agree(hello->purpose == TSHI_UV_JOIN ? world->secret : world->mesh, conn->scalar,
                         conn->dialled ? hello->server_share : hello->client_share, hello,
                         conn->session);
}

/* Returns the data connection to `peer`, a rank of the group: for SEND and RECV if `messages` is 1,
 * else for collectives. */
static tshi_uv_link *tshi_uv_link_to(tshi_uv_group *group, int peer, int messages) {
    return &group->link[(messages ? group->size : 0) + peer];
}

/* Returns the data connection with this purpose to a world rank; NULL if that is this rank or not a
 * member of the group. */
static tshi_uv_link *tshi_uv_link_for(tshi_uv_group *group, uint32_t purpose, int world_rank) {
    int r = tshi_uv_member(group, world_rank);
    return r < 0 || r == group->rank ? NULL
                                     : tshi_uv_link_to(group, r, purpose == TSHI_UV_MESSAGES);
}

/* Returns 1 if a group that is being made still lacks a connection to member r or, if r is above
 * this rank, r's LINKED message. */
static int tshi_uv_unlinked(tshi_uv_group *group, int r) {
    return tshi_uv_link_to(group, r, 0)->fd < 0 || tshi_uv_link_to(group, r, 1)->fd < 0 ||
           (r > group->rank && !group->link[r].confirmed);
}

/* Returns the data connection to world rank `rank` that a hello asks for, in the group that is
 * being set up; NULL: it asks for another group, or the rank is not in it. */
static tshi_uv_link *tshi_uv_meant(const tsh_uv_world *world, const tshi_uv_hello *hello,
                                   int rank) {
    tshi_uv_group *group = world->forming ? world->world_group : world->making;
    if (!group || group->id != hello->group) return NULL;
    return tshi_uv_link_for(group, hello->purpose, rank);
}

/* ---- the server's side of the handshake ---- */

/* Returns 1 if the connection is a Unix socket. */
static int tshi_uv_is_unix(const tshi_uv_conn *conn) {
    return conn->address.storage.ss_family == AF_UNIX;
}

/* Returns the reply to a client hello with a valid proof. *value: if it is a refusal, what this
 * rank has in the field that differs. */
static tshi_uv_reply tshi_uv_check_hello(const tshi_uv_conn *conn, int64_t *value) {
    const tsh_uv_world *world = conn->world;
    const tshi_uv_hello *hello = &conn->hello;
    const tshi_uv_peer *peer;
    const tshi_uv_link *link;
    int same; /* 1: the client's process has connected to this rank before */
    *value = 0;
    if (hello->job != world->job) return TSHI_UV_OTHER_JOB;
    *value = world->size;
    if (hello->size != world->size) return TSHI_UV_OTHER_SIZE;
    *value = world->rank;
    if (hello->server != world->rank || hello->client < 0 || hello->client >= world->size ||
        hello->client == world->rank)
        return TSHI_UV_OTHER_RANK;
    *value = hello->client;
    if (hello->purpose > TSHI_UV_SHARE ||
        (hello->purpose == TSHI_UV_SHARE) != tshi_uv_is_unix(conn))
        return TSHI_UV_UNKNOWN;
    if (hello->purpose == TSHI_UV_SHARE) return world->forming ? TSHI_UV_WELCOME : TSHI_UV_UNKNOWN;
    peer = &world->peer[hello->client];
    same = peer->process == hello->process;
    if (hello->purpose <= TSHI_UV_CONTROL) { /* a control connection */
        if (peer->state != TSHI_UV_ABSENT &&
            (!same || !world->forming || peer->state != TSHI_UV_THERE || peer->used))
            return TSHI_UV_TAKEN;
        return world->forming ? TSHI_UV_WELCOME : TSHI_UV_UNKNOWN;
    }
    /* link belongs to a group that is still being made, so nothing was sent on it yet */
    link = tshi_uv_meant(world, hello, hello->client);
    if (!link) return TSHI_UV_UNKNOWN;
    return link->fd < 0 || same ? TSHI_UV_WELCOME : TSHI_UV_TAKEN;
}

/* Returns bits of tshi_uv_option: whether this rank wants checksums or encryption on the connection
 * fd, and whether it has instructions for AES. */
static int tshi_uv_wants(const tsh_uv_world *world, int fd) {
    tshi_uv_address own;
    int far = !tshi_uv_end_of(fd, 0, &own) || !tshi_uv_loopback(&own);
    int options = crypto_aead_aes256gcm_is_available() ? TSHI_UV_AES : 0;
    if (world->checksum ? world->checksum > 0 : far) options |= TSHI_UV_CHECKED;
    if (world->encrypt ? world->encrypt > 0 : far && world->keyed) options |= TSHI_UV_SEALED;
    return options;
}

/* Returns the options of a connection whose ends want `a` and `b`: checksums, or encryption, if
 * either end wants it. */
static int tshi_uv_agreed(int a, int b) {
    if ((a | b) & TSHI_UV_SEALED) return TSHI_UV_SEALED | (a & b & TSHI_UV_AES);
    return (a | b) & TSHI_UV_CHECKED;
}

static const char *tshi_uv_status_text(uint32_t status) {
    static const char *const texts[] = {"welcome",
                                        "it has another key",
                                        "it speaks another version",
                                        "it belongs to another job",
                                        "it belongs to a world of another size",
                                        "it means another rank",
                                        "that rank is here already",
                                        "no such group is being made"};
    return texts[status];
}

/* Checks the client hello in conn->in, puts the reply into conn->out and logs a refusal. Returns 0
 * if this must wait for rank 0's address table, since the key (world->mesh) is derived from the
 * token in it. */
static int tshi_uv_reply_to_hello(tshi_uv_conn *conn) {
    tsh_uv_world *world = conn->world;
    tshi_uv_hello *hello = &conn->hello;
    unsigned char proof[32], expected[32];
    tshi_uv_reply status;
    int64_t value = 0;
    tshi_uv_client_hello(conn->in, 0, hello, proof);
    if (hello->purpose != TSHI_UV_JOIN && world->forming && !world->tabled) return 0;
    if (hello->version != TSHI_UV_VERSION) {
        status = TSHI_UV_OTHER_VERSION;
    } else {
        int valid = tshi_uv_set_session(conn);
        tshi_uv_proof(conn->session, 'C', 0, 0, hello, expected);
        status = !valid || sodium_memcmp(proof, expected, 32) != 0
                     ? TSHI_UV_OTHER_KEY
                     : tshi_uv_check_hello(conn, &value);
    }
    if (status == TSHI_UV_OTHER_KEY || status == TSHI_UV_OTHER_VERSION)
        tshi_uv_note(world, TSHI_UV_OF_UNPROVEN, "rank %d refused %s: %s", world->rank, conn->name,
                     tshi_uv_status_text(status));
    else if (status != TSHI_UV_WELCOME)
        tshi_uv_note(world, TSHI_UV_OF_KEY_HOLDERS,
                     "rank %d refused %s, which says that it is rank %d of %d: %s", world->rank,
                     conn->name, hello->client, hello->size, tshi_uv_status_text(status));
    if (status == TSHI_UV_WELCOME)
        value = tshi_uv_agreed(hello->options, tshi_uv_wants(world, conn->fd));
    tshi_uv_put_reply(conn->out, status, value, hello, conn->session);
    hello->options = (int)value; /* matters only if the reply is a welcome */
    conn->out_used = TSHI_UV_REPLY;
    conn->welcome = status == TSHI_UV_WELCOME;
    conn->phase = TSHI_UV_REPLIES;
    return 1;
}

/* ---- the client's side of the handshake ---- */

/* Logs that a server refused this rank without a proof that it has the key. Anybody could have sent
 * such a refusal, so this rank dials again. */
static void tshi_uv_unproven(tshi_uv_conn *conn, const char *why) {
    tsh_uv_world *world = conn->world;
    tshi_uv_hindered(world,
                     "%s, where rank %d was expected, refuses without a proof that it has the key: "
                     "%s",
                     conn->name, conn->hello.server, why);
    tshi_uv_note(world, TSHI_UV_OF_SERVERS, "rank %d tries again: %s", world->rank,
                 world->obstacle);
}

/* Reads the server hello in conn->in and puts the client hello into conn->out. Returns 0 if the
 * server hello is wrong, so that the connection is to end. */
static int tshi_uv_make_hello(tshi_uv_conn *conn) {
    tsh_uv_world *world = conn->world;
    tshi_uv_hello *hello = &conn->hello;
    unsigned char proof[32];
    if (!tshi_uv_server_hello(conn->in, 0, &hello->version, hello->server_share)) {
        tshi_uv_hindered(world, "something else than tshard answers at %s", conn->name);
        return 0;
    }
    if (hello->version != TSHI_UV_VERSION) {
        tshi_uv_unproven(conn, "it speaks another version of the protocol");
        return 0;
    }
    hello->client = world->rank;
    hello->size = world->size;
    hello->job = world->job;
    hello->process = world->process;
    hello->options = tshi_uv_wants(world, conn->fd);
    tshi_uv_new_share(world->secret, conn->scalar, hello->client_share);
    if (!tshi_uv_set_session(conn)) {
        tshi_uv_unproven(conn, "it sent a share that is not valid");
        return 0;
    }
    tshi_uv_proof(conn->session, 'C', 0, 0, hello, proof);
    tshi_uv_client_hello(conn->out, 1, hello, proof);
    conn->out_used = TSHI_UV_CLIENT_HELLO;
    conn->in_used = 0;
    conn->in_need = TSHI_UV_REPLY;
    conn->until = tsh_now() + (hello->purpose == TSHI_UV_JOIN ? TSHI_UV_DIAL_S : TSHI_UV_REPLY_S) *
                                  TSHI_UV_SECOND;
    conn->phase = TSHI_UV_AWAITS_REPLY;
    return 1;
}

/* Handles a server's refusal: the world fails if the refusal has a proof and dialling again cannot
 * help; else this rank dials again. */
static void tshi_uv_refused(tshi_uv_conn *conn, uint32_t status, int64_t value) {
    tsh_uv_world *world = conn->world;
    int to = conn->hello.server;
    switch (status) {
    case TSHI_UV_OTHER_VERSION:
        tshi_uv_unproven(conn, "it speaks another version of the protocol");
        break;
    case TSHI_UV_OTHER_KEY:
        tshi_uv_unproven(conn, "the two do not have the same key (TSHARD_KEY or TSHARD_KEY_FILE)");
        break;
    case TSHI_UV_OTHER_SIZE:
        tshi_uv_suspect(world, TSHI_UV_ABORT, TSH_ERR_ARGUMENT, world->rank,
                        "rank %d was started for a world of %d ranks (TSHARD_SIZE), rank %d at %s "
                        "for %lld",
                        world->rank, world->size, to, conn->name, (long long)value);
        break;
    case TSHI_UV_TAKEN:
        if (conn->hello.purpose != TSHI_UV_JOIN) break; /* an earlier attempt has succeeded */
        tshi_uv_suspect(world, TSHI_UV_ABORT, TSH_ERR_ARGUMENT, world->rank,
                        "rank %d is already in the world of rank %d at %s: each rank needs its own "
                        "TSHARD_RANK",
                        world->rank, to, conn->name);
        break;
    case TSHI_UV_OTHER_RANK:
        tshi_uv_hindered(world, "rank %lld answers at %s, where rank %d was expected",
                         (long long)value, conn->name, to);
        break;
    default:
        tshi_uv_hindered(world, "rank %d at %s refused: %s (this rank's job is \"%s\")", to,
                         conn->name, tshi_uv_status_text(status), world->jobname);
    }
}

/* Checks the server's reply in conn->in. Returns 1 if it is a welcome: both ends are
 * authenticated. */
static int tshi_uv_accept_reply(tshi_uv_conn *conn) {
    uint32_t status;
    int64_t value;
    if (!tshi_uv_get_reply(conn->in, &conn->hello, conn->session, &status, &value))
        status = TSHI_UV_OTHER_KEY;
    if (status != TSHI_UV_WELCOME) tshi_uv_refused(conn, status, value);
    /* AES-256-GCM only if this rank has it; matters only if the reply is a welcome */
    conn->hello.options = (int)value & (conn->hello.options | TSHI_UV_SEALED | TSHI_UV_CHECKED);
    return status == TSHI_UV_WELCOME;
}

/* ---- the handshake's sends and receives, and the steps of both sides ---- */

/* Sends the bytes in conn->out. Returns 1: all are sent; 0: call again later; -1: the connection
 * broke. */
static int tshi_uv_conn_write(tshi_uv_conn *conn) {
    ssize_t n;
    if (!conn->out_used) return 1;
    n = send(conn->fd, conn->out, conn->out_used, TSHI_UV_NOSIGNAL);
    if (n < 0) return tshi_uv_later() ? 0 : -1;
    conn->out_used -= (size_t)n;
    memmove(conn->out, conn->out + n, conn->out_used);
    return conn->out_used == 0;
}

/* Receives until conn->in has in_need bytes, and no more than that. Returns 1: it has them; 0: call
 * again later; -1: the connection broke or ended. */
static int tshi_uv_conn_read(tshi_uv_conn *conn) {
    ssize_t n;
    if (conn->in_used == conn->in_need) return 1;
    n = recv(conn->fd, conn->in + conn->in_used, conn->in_need - conn->in_used, 0);
    if (n < 0) return tshi_uv_later() ? 0 : -1;
    if (n == 0) return -1;
    conn->in_used += (size_t)n;
    return conn->in_used == conn->in_need;
}

/* Advances the server's side of a handshake as far as possible now. Returns 1: both ends are
 * authenticated; 0: call again when the socket is ready; -1: the connection is to end. */
static int tshi_uv_server_step(tshi_uv_conn *conn) {
    int done = tshi_uv_conn_write(conn);
    if (done < 0) return -1;
    if (conn->phase == TSHI_UV_AWAITS_HELLO) {
        done = tshi_uv_conn_read(conn);
        if (memcmp(conn->in, "TSHD", conn->in_used < 4 ? conn->in_used : 4) != 0) done = -1;
        if (done < 0)
            tshi_uv_note(conn->world, TSHI_UV_OF_UNPROVEN, "rank %d refused %s: it %s",
                         conn->world->rank, conn->name,
                         conn->in_used ? "does not speak the protocol" : "came and went");
        if (done <= 0) return done;
        conn->phase = TSHI_UV_HAS_HELLO;
    }
    if (conn->phase == TSHI_UV_HAS_HELLO) {
        /* the reply must wait for rank 0's address table; then tshi_uv_tend goes on */
        if (!tshi_uv_reply_to_hello(conn)) return 0;
        done = tshi_uv_conn_write(conn);
    }
    /* a refused connection ends once the refusal is sent */
    return done == 1 && !conn->welcome ? -1 : done;
}

/* Advances the client's side of a handshake. Returns the same as tshi_uv_server_step. */
static int tshi_uv_client_step(tshi_uv_conn *conn) {
    int failed = 0, done;
    socklen_t size = (socklen_t)sizeof failed;
    if (conn->phase == TSHI_UV_CONNECTS) {
        if (getsockopt(conn->fd, SOL_SOCKET, SO_ERROR, &failed, &size) != 0) failed = errno;
        if (failed) {
            tshi_uv_hindered(conn->world, "%s%s: %s",
                             failed == ECONNREFUSED ? "nobody listens at " : "", conn->name,
                             tshi_uv_why(failed));
            return -1;
        }
        conn->phase = TSHI_UV_AWAITS_GREETING;
        conn->in_need = TSHI_UV_SERVER_HELLO;
    }
    if (tshi_uv_conn_write(conn) < 0) return -1;
    done = tshi_uv_conn_read(conn);
    if (done < 0) tshi_uv_hindered(conn->world, "%s closed the connection", conn->name);
    if (done <= 0) return done;
    if (conn->phase == TSHI_UV_AWAITS_REPLY) return tshi_uv_accept_reply(conn) ? 1 : -1;
    return tshi_uv_make_hello(conn) ? tshi_uv_client_step(conn) : -1;
}
