/* Feeds bytes to the TCP backend as if the network had brought them: to those who come to its
 * listener, to what answers its own calls, on the control and the data connections of its peers.
 * An input is the state of one rank of four, and a list of what happens to it. `make fuzz` runs it
 * under libFuzzer, test_wire.c once for every file of the folder wire, which make_wire.py writes.
 *
 * The code under test is the real one; what it runs on is pretend.h. */
#if !defined(_POSIX_C_SOURCE)
#define _POSIX_C_SOURCE 200809L
#endif
#define TSHARD_IMPLEMENTATION
#include "../../backends/tshard_backend.h"

#include "pretend.h"
#include "../../backends/tshard_uv.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { RANKS = 4, REQUESTS = 12, GROUP = 7 };

typedef struct request {
    tsh_req id;
    void *send, *recv;
    int64_t counts[RANKS];
} request;

typedef struct wire {
    const uint8_t *at, *end; /* what is left of the input */
    tsh_uv_world *world;
    tsh_comm comm;
    /* by connection: the share of the side that greeted; the private key of one that greeted or
     * claimed here; the ciphers of the other end, NULL: not encrypted */
    unsigned char share[SOCKETS][32], scalar[SOCKETS][32];
    tshi_uv_channel *twin[SOCKETS];
    int data[2 * RANKS];              /* which connection that is; -1: none */
    request requests[REQUESTS];
    int started, linked;
    int proofs; /* right ones that were given; without one nobody is let in */
    /* What came of it: */
    int peers, links;   /* connections that were let in, of all that are there */
    int complete, done; /* the world; requests without an error */
    tsh_error error;
    char heard[TSH_MESSAGE_SIZE]; /* of strangers, or what hindered a call */
} wire;

static unsigned take(wire *w) {
    return w->at < w->end ? *w->at++ : 0;
}

static unsigned take2(wire *w) {
    unsigned low = take(w);
    return low | take(w) << 8;
}

/* A connection to a peer, ready for use; returns its descriptor. */
static int wire_connection(void) {
    int fd = pretend_open();
    must(fd >= 0);
    return fd;
}

/* The random numbers of every run are the same. */
static uint32_t wire_random(void) {
    return 0x9e3779b9u;
}

static void wire_random_bytes(void *bytes, size_t size) {
    static uint32_t next;
    for (size_t i = 0; i < size; i++) {
        next = next * 1664525u + 1013904223u;
        ((unsigned char *)bytes)[i] = (unsigned char)(next >> 24);
    }
}

static const char *wire_random_name(void) {
    return "fuzz";
}

static void wire_once(void) {
    static randombytes_implementation numbers = {wire_random_name,  wire_random, NULL, NULL,
                                                 wire_random_bytes, NULL};
    static int done;
    if (done) return;
    done = 1;
    must(randombytes_set_implementation(&numbers) == 0 && sodium_init() == 0);
}

static void wire_log(const char *text, void *user) {
    wire *w = (wire *)user;
    must(text[0] != 0);
    (void)snprintf(w->heard, sizeof w->heard, "%s", text);
}

/* ---- a world ---- */

/* The ciphers of a connection, and their twins of its other end. */
static tshi_uv_channel *wire_seal(wire *w, int fd, int agreed) {
    static const unsigned char session[32] = {'e'};
    tshi_uv_channel *channel = tshi_uv_channel_new(session, 1, agreed);
    w->twin[fd - FIRST_FD] = tshi_uv_channel_new(session, 0, agreed);
    must(channel != NULL && w->twin[fd - FIRST_FD] != NULL);
    return channel;
}

/* A handshake has agreed on these options: from here on the other end encrypts, or does not. */
static void wire_agree(wire *w, int which, const unsigned char session[32], int client,
                       int options) {
    tshi_uv_channel_free(&w->twin[which]);
    if (!(options & TSHI_UV_SEALED)) return;
    w->twin[which] = tshi_uv_channel_new(session, client, options);
    must(w->twin[which] != NULL);
}

static int wire_aes(void) {
    return crypto_aead_aes256gcm_is_available() ? TSHI_UV_AES : 0;
}

/* The data connections of the world: collectives, then messages. Made when they are needed.
 * options: bits of tshi_uv_option. */
static void wire_link(wire *w, int options) {
    tshi_uv_group *group = w->world->world_group;
    if (w->world->forming || w->linked || pretend.sockets + 2 * RANKS > SOCKETS) return;
    w->linked = 1;
    for (int i = 0; i < 2 * RANKS; i++) {
        if (i % RANKS == w->world->rank || group->link[i].fd >= 0) continue;
        group->link[i].fd = wire_connection();
        group->link[i].checks = (options & TSHI_UV_CHECKED) != 0;
        if (options & TSHI_UV_SEALED)
            group->link[i].channel = wire_seal(w, group->link[i].fd, options & ~TSHI_UV_CHECKED);
        w->data[i] = group->link[i].fd - FIRST_FD;
        w->links--;
    }
}

/* peers: bit r: rank r's control connection is there. sealed: it is encrypted. */
static void wire_attach(wire *w, unsigned peers, int sealed) {
    for (int r = 0; r < RANKS; r++)
        if (r != w->world->rank && peers >> r & 1) {
            int fd = wire_connection();
            tshi_uv_channel *channel = sealed ? wire_seal(w, fd, TSHI_UV_SEALED) : NULL;
            must(tshi_uv_attach(w->world, r, fd, channel, "a peer"));
            w->peers--;
        }
}

/* As tshi_uv_main begins, and tshi_uv_joined where rank 0 has answered. */
static void wire_begin(wire *w, unsigned how) {
    tsh_uv_world *world = w->world;
    int complete = how >> 2 & 1, tabled = how >> 3 & 1;
    world->forming = !complete;
    if (complete || tabled) tshi_uv_set_mesh(world);
    wire_attach(w, complete ? ~0u : how >> 4, complete && how >> 4 & 1);
    if (complete) world->world_group->missing = 0;
    world->told_ready = complete;
    if (!complete && (world->rank == 0 || world->peer[0].state != TSHI_UV_ABSENT))
        world->listener = tshi_uv_listen(&world->own);
    if (!complete && world->rank && world->peer[0].state == TSHI_UV_ABSENT)
        tshi_uv_add_dial(world, TSHI_UV_JOIN, 0, 0, &world->address[0]);
    if (!complete && tabled && world->rank) tshi_uv_dial_group(world, world->world_group);
}

static void wire_address(tshi_uv_address *address) {
    struct sockaddr_in *in = (struct sockaddr_in *)(void *)&address->storage;
    memset(address, 0, sizeof *address);
    in->sin_family = AF_INET;
    in->sin_port = htons(4000);
    in->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address->size = (socklen_t)sizeof *in;
}

/* how: bits 0, 1 the rank; 2 the world is complete; 3 the table is here; 4 to 7 the ranks that are
 * there while it forms; 4 if it is complete: control connections are encrypted. */
static void wire_open(wire *w, unsigned how) {
    tsh_uv_world *world = (tsh_uv_world *)calloc(1, sizeof *world);
    tsh_error error;
    pretend_begin();
    for (int i = 0; i < 2 * RANKS; i++) w->data[i] = -1;
    must(world != NULL);
    w->world = world;
    world->rank = (int)(how & 3);
    world->size = RANKS;
    world->timeout = 20 * INT64_C(1000000000);
    world->heartbeat = world->notice = 10 * INT64_C(1000000000);
    world->keyed = 1;
    world->listener = world->shm_listener = world->segment = -1;
    world->logger.log = wire_log;
    world->logger.user = w;
    tshi_uv_crc_tables(world->crc_table);
    memset(world->secret, 's', sizeof world->secret);
    memset(world->token, 't', sizeof world->token);
    world->job = 77;
    (void)snprintf(world->jobname, sizeof world->jobname, "job");
    (void)snprintf(world->host, sizeof world->host, "127.0.0.1");
    (void)snprintf(world->bind_host, sizeof world->bind_host, "127.0.0.1");
    wire_address(&world->address[0]);
    wire_address(&world->own);
    world->addresses = 1;
    world->unproven_limit = 64;
    must(tshi_uv_world_alloc(world) && tshi_uv_open_loops(world, &error) == TSH_OK);
    for (int r = 0; r < RANKS; r++) wire_address(&world->peer[r].address);
    world->due = tsh_now() + world->timeout;
    world->notice_at = tsh_now() + world->notice;
    tshi_uv_add_group(world->world_group, &tshi_uv_ops, &w->comm);
    wire_begin(w, how);
}

static void wire_count(wire *w) {
    const tsh_uv_world *world = w->world;
    for (int r = 0; r < RANKS; r++) w->peers += world->peer[r].state != TSHI_UV_ABSENT;
    for (const tshi_uv_group *group = world->groups; group; group = group->next)
        for (int i = 0; i < 2 * group->size; i++) w->links += group->link[i].fd >= 0;
}

/* As tshi_uv_main ends, and tshi_uv_world_close. */
static void wire_close(wire *w) {
    tsh_uv_world *world = w->world;
    while (world->conns) tshi_uv_conn_free(world->conns);
    for (int r = 0; r < RANKS; r++) {
        tshi_uv_peer_end(&world->peer[r], TSHI_UV_LEFT);
        free(world->peer[r].in.data);
        free(world->peer[r].out.data);
    }
    for (int i = 0; i < SOCKETS; i++) tshi_uv_channel_free(&w->twin[i]);
    tshi_uv_close_listener(world);
    while (world->groups) {
        tshi_uv_group *group = world->groups;
        world->groups = group->next;
        tshi_uv_group_free(group);
    }
    tshi_uv_world_end(world);
    for (int i = 0; i < w->started; i++) {
        free(w->requests[i].send);
        free(w->requests[i].recv);
    }
}

/* The control thread's turn: what came, and what follows from it. */
static void wire_turn(wire *w) {
    for (int i = 0; i < 2; i++) pretend_turn(&w->world->control);
}

/* ---- what happens ---- */

static int take_connection(wire *w) {
    return (int)take(w) % (pretend.sockets + !pretend.sockets);
}

/* Bytes that the other end of a connection sends: as a record, if that is encrypted. */
static void say_record(wire *w, int which, const void *bytes, size_t n) {
    static unsigned char record[OUT_ROOM + TSHI_UV_TAG];
    tshi_uv_channel *twin = w->twin[which];
    if (!twin) {
        pretend_say(which, bytes, n);
        return;
    }
    tshi_uv_seal(&twin->out, bytes, n, record);
    pretend_say(which, record, n + TSHI_UV_TAG);
}

/* Bytes of the input as they are. */
static void happens_bytes(wire *w) {
    int which = take_connection(w);
    size_t n = take2(w), left = (size_t)(w->end - w->at);
    n = n < left ? n : left;
    pretend_say(which, w->at, n);
    w->at += n;
}

/* A control message of the right length, with right checksums. */
static void happens_message(wire *w) {
    int which = take_connection(w);
    unsigned type = take(w) % (TSHI_UV_TYPES + 1);
    size_t n = take2(w), left = (size_t)(w->end - w->at);
    unsigned char head[TSHI_UV_MESSAGE_HEAD], tail[TSHI_UV_MESSAGE_TAIL];
    tshi_uv_cursor c = tshi_uv_cursor_over(head, sizeof head, 1);
    tshi_uv_cursor end = tshi_uv_cursor_over(tail, sizeof tail, 1);
    uint32_t check;
    n = n < left ? n : left;
    (void)tshi_uv_field(&c, n, 4);
    (void)tshi_uv_field(&c, type, 1);
    if (w->twin[which]) {
        say_record(w, which, head, 5);
        say_record(w, which, w->at, n);
        w->at += n;
        return;
    }
    (void)tshi_uv_field(&c, tshi_uv_crc(w->world, 0, head, 5), 4);
    check = tshi_uv_crc(w->world, tshi_uv_crc(w->world, 0, head, sizeof head), w->at, n);
    (void)tshi_uv_field(&end, check, 4);
    pretend_say(which, head, sizeof head);
    pretend_say(which, w->at, n);
    pretend_say(which, tail, sizeof tail);
    w->at += n;
}

/* Somebody comes to the listener. */
static void happens_stranger(wire *w) {
    if (w->world->listener >= 0) pretend_at(w->world->listener)->waiting++;
}

/* Bytes of the input change what is sent. */
static void tamper(wire *w, void *bytes, size_t size) {
    for (unsigned n = take(w) % 8; n; n--) {
        size_t at = take(w) % size;
        ((unsigned char *)bytes)[at] ^= (unsigned char)take(w);
    }
}

/* The proof fits what was sent (0), is taken over from elsewhere (1, 2), or made of nothing.
 * session: the secret that it is made with, by the private key of this side of the connection. */
static int take_proof(wire *w, int which, const tshi_uv_hello *hello, char who, uint32_t status,
                      int64_t value, unsigned char proof[32], unsigned char session[32]) {
    const tsh_uv_world *world = w->world;
    unsigned how = take(w) % 4;
    unsigned char secret[32], scalar[32];
    tshi_uv_hello other = *hello;
    int valid;
    memcpy(secret, world->secret, sizeof secret);
    if (hello->purpose != TSHI_UV_JOIN) /* also before the table has come */
        (void)crypto_auth_hmacsha256(secret, world->token, sizeof world->token, world->secret);
    if (how == 1) memset(other.server_share, 0, sizeof other.server_share);
    memcpy(scalar, w->scalar[which], sizeof scalar);
    valid = tshi_uv_agree(secret, scalar, who == 'C' ? hello->server_share : hello->client_share,
                          &other, session);
    if (how == 2) who = who == 'C' ? 'S' : 'C';
    if (how == 3)
        memset(proof, 0, 32);
    else
        tshi_uv_proof(session, who, status, value, &other, proof);
    return how == 0 && valid;
}

/* A stranger claims to be a rank. */
static void happens_claim(wire *w) {
    int which = take_connection(w);
    unsigned char greeting[TSHI_UV_SERVER_HELLO], bytes[TSHI_UV_CLIENT_HELLO], proof[32] = {0};
    unsigned char session[32];
    tshi_uv_hello hello;
    uint32_t version;
    memset(&hello, 0, sizeof hello);
    hello.version = 0x74730004;
    hello.client = (int)(take(w) % RANKS);
    hello.server = w->world->rank;
    hello.size = RANKS;
    hello.purpose = take(w) % (TSHI_UV_MESSAGES + 1);
    hello.group = hello.purpose <= TSHI_UV_CONTROL ? 0 : w->world->forming ? 1 : GROUP;
    hello.job = w->world->job;
    hello.process = 1 + (uint64_t)hello.client;
    if (pretend_hear(which, greeting, sizeof greeting))
        (void)tshi_uv_server_hello(greeting, 0, &version, w->share[which]);
    memcpy(hello.server_share, w->share[which], sizeof hello.server_share);
    tshi_uv_new_share(w->world->secret, w->scalar[which], hello.client_share);
    tshi_uv_client_hello(bytes, 1, &hello, proof);
    tamper(w, bytes, TSHI_UV_CLIENT_HELLO - 32);
    tshi_uv_client_hello(bytes, 0, &hello, proof);
    w->proofs += take_proof(w, which, &hello, 'C', 0, 0, bytes + TSHI_UV_CLIENT_HELLO - 32,
                            session);
    pretend_say(which, bytes, sizeof bytes);
    wire_agree(w, which, session, 1, tshi_uv_agreed(hello.options, wire_aes()));
}

/* Who was called greets. */
static void happens_greeting(wire *w) {
    unsigned char bytes[TSHI_UV_SERVER_HELLO], share[32];
    int which = take_connection(w);
    uint32_t version = 0x74730004;
    tshi_uv_new_share(w->world->secret, w->scalar[which], share);
    (void)tshi_uv_server_hello(bytes, 1, &version, share);
    tamper(w, bytes, sizeof bytes);
    if (!pretend.socket[which].called) return;
    (void)tshi_uv_server_hello(bytes, 0, &version, w->share[which]);
    pretend_say(which, bytes, sizeof bytes);
}

/* Who was called answers the claim that has come. */
static void happens_answer(wire *w) {
    unsigned char claim[TSHI_UV_CLIENT_HELLO], bytes[TSHI_UV_REPLY], proof[32], session[32];
    int which = take_connection(w);
    unsigned status = take(w) % (TSHI_UV_UNKNOWN + 2);
    int64_t value;
    tshi_uv_hello hello;
    if (!pretend.socket[which].called || !pretend_hear(which, claim, sizeof claim)) return;
    tshi_uv_client_hello(claim, 0, &hello, proof);
    memcpy(hello.server_share, w->share[which], sizeof hello.server_share);
    value = take(w);
    w->proofs += take_proof(w, which, &hello, 'S', status, value, proof, session);
    tshi_uv_put_reply(bytes, (tshi_uv_reply)status, value, &hello, session);
    memcpy(bytes + TSHI_UV_REPLY - 32, proof, 32);
    tamper(w, bytes, TSHI_UV_REPLY - 32);
    pretend_say(which, bytes, sizeof bytes);
    if (status == TSHI_UV_WELCOME) wire_agree(w, which, session, 0, (int)value & (2 | wire_aes()));
}

/* The caller's thread starts a collective; its buffers are hardly too long. */
static void happens_start(wire *w) {
    static const int sizes[] = {0, 1, 3, 64, TSHI_UV_DIRECT_MOST / 12 + 1, OUT_ROOM / 4 + 1};
    request *r = &w->requests[w->started];
    tsh_coll coll = tsh_coll_make((tsh_coll_kind)(take(w) % TSH_SPLIT), TSH_F32);
    int alone = coll.kind == TSH_SEND || coll.kind == TSH_RECV, all = coll.kind == TSH_ALLTOALL;
    int64_t n = sizes[take(w) % (alone ? 6 : 5)];
    unsigned more = take(w);
    int peer = (int)(more % RANKS);
    wire_link(w, (int)(more >> 7) | (int)(more >> 6 & 1) * TSHI_UV_SEALED |
                     ((int)(more >> 5 & 1) * wire_aes()));
    if (w->started == REQUESTS || !w->linked) return;
    r->send = calloc((size_t)n + 1, all || coll.kind == TSH_REDUCE_SCATTER ? 4 * RANKS : 4);
    r->recv = calloc((size_t)n + 1, all || coll.kind == TSH_ALLGATHER ? 4 * RANKS : 4);
    must(r->send != NULL && r->recv != NULL);
    for (int i = 0; i < RANKS; i++) r->counts[i] = n;
    coll.send = r->send;
    coll.recv = r->recv;
    coll.count = n;
    coll.send_counts = coll.recv_counts = r->counts;
    if (coll.kind == TSH_BROADCAST) coll.root = peer;
    if (coll.kind == TSH_SEND || coll.kind == TSH_SENDRECV) coll.send_to = peer;
    if (coll.kind == TSH_RECV || coll.kind == TSH_SENDRECV) coll.recv_from = peer;
    (void)tsh_start(&w->comm, &coll, &r->id);
    w->started++;
}

/* Payload of zeros, n bytes, with the checksums or tags that belong to it. op NULL: of no call. */
static void say_payload(wire *w, int which, const tshi_uv_link *link, const tshi_uv_op *op,
                        size_t n) {
    static const char payload[OUT_ROOM] = {0};
    int64_t total = op ? op->in[link->peer].total : 0, at = 0;
    uint32_t check = 0;
    while ((link->checks || link->channel) && at < total && at < (int64_t)n) {
        int64_t end = tshi_uv_block(op, link->peer, at, total, 0);
        if (link->channel) end = tshi_uv_min(end, at + TSHI_UV_PIECE);
        end = end < (int64_t)n ? end : (int64_t)n;
        check = tshi_uv_crc(w->world, check, payload, (size_t)(end - at));
        say_record(w, which, payload, (size_t)(end - at));
        if (link->checks) pretend_say(which, &check, sizeof check);
        at = end;
    }
    pretend_say(which, payload, n - (size_t)at);
}

/* The header that the backend waits for on a data connection, then payload: of a length, or (65535)
 * what belongs to it. */
static void happens_data(wire *w) {
    unsigned i = take(w) % (2 * RANKS);
    tshi_uv_link *link = &w->world->world_group->link[i];
    tshi_uv_fifo *fifo = link->in.used ? &link->in : &link->out;
    const tshi_uv_op *op = fifo->used ? tshi_uv_first(link->group, fifo) : NULL;
    tshi_uv_head head;
    size_t n, length;
    memset(&head, 0, sizeof head);
    if (op) {
        int receives = fifo == &link->in;
        head = i < RANKS ? op->head : tshi_uv_message_head(op, receives);
        if (i >= RANKS) head.kind = receives ? TSH_SEND : TSH_RECV;
        head.bytes = receives ? (uint64_t)op->in[link->peer].total : 0;
    }
    n = head.bytes;
    tamper(w, &head, sizeof head);
    if (link->checks) head.check ^= tshi_uv_head_check(w->world, &head); /* right, or changed */
    if (w->data[i] < 0) return;
    say_record(w, w->data[i], &head, sizeof head);
    length = take2(w);
    n = length < 65535 ? length : n < OUT_ROOM ? n : OUT_ROOM;
    say_payload(w, w->data[i], link, fifo == &link->in ? op : NULL, n);
}

/* The caller's thread looks after its requests. */
static void happens_test(wire *w) {
    for (int i = 0; i < w->started; i++) {
        request *r = &w->requests[i];
        int done = 0;
        if (!r->id) continue;
        (void)tsh_test(&w->comm, r->id, &done);
        if (!done) continue;
        w->done += tsh_wait(&w->comm, r->id) == TSH_OK;
        r->id = 0;
    }
}

/* Time passes, at once or in steps; the peers beat meanwhile, or do not. */
static void happens_later(wire *w) {
    unsigned how = take(w), ms = 1u << how % 16;
    int64_t steps = how & 64 ? 1 : ms / 500 + 1;
    for (int64_t i = 0; i < steps; i++) {
        pretend.now += ms * INT64_C(1000000) / steps;
        for (int r = 0; r < RANKS && how & 128; r++) w->world->peer[r].heard.last = pretend.now;
        wire_turn(w);
    }
}

static void happens_end(wire *w) {
    pretend.socket[take_connection(w)].ended = 1;
}

/* The caller's thread splits the world; the tickets come from the peers. */
static void happens_split(wire *w) {
    tsh_uv_world *world = w->world;
    tshi_uv_ticket tickets[RANKS];
    tshi_uv_group *group;
    tsh_comm comm;
    for (int r = 0; r < RANKS; r++) {
        tickets[r].color = (int32_t)(take(w) & 1);
        tickets[r].key = (int32_t)take(w);
        tickets[r].port = (int32_t)take2(w);
        tickets[r].id = GROUP;
    }
    if (world->forming || world->making || world->requested ||
        tshi_uv_find_group(world, GROUP) != NULL)
        return;
    group = tshi_uv_color_group(world->world_group, tickets);
    must(group != NULL);
    group->listener = tshi_uv_listen(&world->own);
    if (group->size == 1) {
        tshi_uv_group_free(group);
        return;
    }
    tshi_uv_add_group(group, w->comm.ops, &comm);
    world->requested = group;
    (void)uv_async_send(&world->wake_control);
}

/* The caller's thread has waited for long. */
static void happens_blocked(wire *w) {
    const tshi_uv_group *group = w->world->world_group;
    const tshi_uv_op *op = NULL;
    unsigned at = take(w);
    for (int i = 0; i < TSHI_UV_OPS; i++)
        if (group->op[i].used) op = &group->op[i];
    if (!op || w->world->forming) return;
    if (!(at & 1))
        tshi_uv_note_blocked(op);
    else if (w->world->blocked.wait)
        tshi_uv_unblock(w->world);
}

static void happens_abort(wire *w) {
    if (!w->world->forming) tsh_comm_abort(&w->comm, TSH_ERR_STATE, "the caller has enough");
}

/* ---- a run ---- */

static void wire_run(wire *w, const uint8_t *data, size_t size) {
    static void (*const happens[])(wire *) = {
        happens_bytes,  happens_message, happens_stranger, happens_claim, happens_greeting,
        happens_answer, happens_start,   happens_data,     happens_test,  happens_later,
        happens_end,    happens_split,   happens_blocked,  happens_abort};
    wire_once();
    memset(w, 0, sizeof *w);
    w->at = data;
    w->end = data + size;
    wire_open(w, take(w));
    wire_turn(w);
    while (w->at < w->end) {
        happens[take(w) % (sizeof happens / sizeof happens[0])](w);
        wire_turn(w);
    }
    happens_test(w);
    wire_turn(w);
    wire_count(w);
    w->complete = !w->world->forming;
    if (w->world->obstacle[0]) (void)snprintf(w->heard, sizeof w->heard, "%s", w->world->obstacle);
    if (tsh_comm_error(&w->comm, &w->error) != TSH_OK)
        must(w->error.rank >= -1 && w->error.rank < RANKS);
    if (!w->proofs) must(!w->peers && !w->links);
    wire_close(w);
    pretend_end();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static wire w;
    wire_run(&w, data, size);
    return 0;
}
