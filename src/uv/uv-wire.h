/* ========================================================================== */
/* >>uv-wire                                        MARK: - uv-wire (private) */
/* Encodes and decodes the messages of handshakes and control connections.    */
/* For each message one function writes its fields, or reads them.            */
/* A field that is invalid or does not fit sets cursor->bad.                  */
/* The fields after it are read as 0. Nothing received is trusted.            */
/* Needs: >>uv-types.                                                         */
/* ========================================================================== */

/* Returns a cursor at the beginning of bytes. `writes` 1: fields will be written, 0: read. */
static tshi_uv_cursor tshi_uv_cursor_over(void *bytes, size_t size, int writes) {
    unsigned char *at = (unsigned char *)bytes;
    tshi_uv_cursor c = {at, at + size, writes, 0};
    return c;
}

/* Returns the next n bytes and moves the cursor past them. If fewer are left: sets c->bad and
 * returns NULL. */
static unsigned char *tshi_uv_take(tshi_uv_cursor *c, size_t n) {
    unsigned char *at = c->at;
    if (c->bad || n > (size_t)(c->end - c->at)) {
        c->bad = 1;
        return NULL;
    }
    c->at += n;
    return at;
}

/* Writes `value` as a number of n bytes, little endian, or reads such a number. Returns the number;
 * 0 if fewer bytes are left. */
static uint64_t tshi_uv_field(tshi_uv_cursor *c, uint64_t value, size_t n) {
    unsigned char *at = tshi_uv_take(c, n);
    uint64_t there = 0; /* the number that the bytes hold */
    for (size_t i = 0; at && i < n; i++) {
        if (c->writes) at[i] = (unsigned char)(value >> 8 * i);
        there |= (uint64_t)at[i] << 8 * i;
    }
    return there;
}

static int tshi_uv_int_field(tshi_uv_cursor *c, int value) {
    return (int)(int32_t)(uint32_t)tshi_uv_field(c, (uint64_t)value, 4);
}

static int64_t tshi_uv_i64_field(tshi_uv_cursor *c, int64_t value) {
    return (int64_t)tshi_uv_field(c, (uint64_t)value, 8);
}

static void tshi_uv_bytes_field(tshi_uv_cursor *c, void *bytes, size_t n) {
    unsigned char *at = tshi_uv_take(c, n);
    if (at) memcpy(c->writes ? at : bytes, c->writes ? bytes : at, n);
}

/* Writes or reads the length of a text (2 bytes), then the text. Reading cuts the text to `room`
 * bytes, with a final 0, and replaces control characters by '?'. */
static void tshi_uv_text_field(tshi_uv_cursor *c, char *text, size_t room) {
    size_t n = (size_t)tshi_uv_field(c, c->writes ? strlen(text) : 0, 2), kept = 0;
    unsigned char *at = tshi_uv_take(c, n);
    if (c->writes) {
        if (at) memcpy(at, text, n);
        return;
    }
    for (; at && kept < n && kept + 1 < room; kept++)
        text[kept] = (char)(at[kept] < 32 || at[kept] == 127 ? '?' : at[kept]);
    text[kept] = 0;
}

/* Writes or reads a rank of a world of `size` ranks, or -1. Sets c->bad if it is anything else. */
static int tshi_uv_rank_field(tshi_uv_cursor *c, int rank, int size) {
    rank = tshi_uv_int_field(c, rank);
    if (rank < -1 || rank >= size) c->bad = 1;
    return rank;
}

/* Writes or reads a number of entries, 0 to `most`, and returns it. If it is out of range: sets
 * c->bad and returns 0. */
static int tshi_uv_count_field(tshi_uv_cursor *c, int count, int most) {
    count = tshi_uv_int_field(c, count);
    if (count < 0 || count > most) c->bad = 1;
    return c->bad ? 0 : count;
}

/* ---- the three messages of the handshake ---- */

/* The handshake:
 * 1. Server hello: "tshd", version, share (the server's ephemeral public key).
 * 2. Client hello: "TSHD", version, share, the fields of tshi_uv_hello, proof.
 * 3. Server reply: status, value, proof. If the client is accepted, value is what both ends have
 *    agreed on (tshi_uv_option); if it is refused, what the server has in the field that differs.
 * A proof is an HMAC over both hellos (tshi_uv_proof) under the session secret, which both ends
 * compute if they have the same key (>>uv-secret). */
#define TSHI_UV_VERSION UINT32_C(0x74730004) /* "ts", then the version of the protocol, 4 */

/* sizes of the three handshake messages in bytes */
enum { TSHI_UV_SERVER_HELLO = 40, TSHI_UV_CLIENT_HELLO = 116, TSHI_UV_REPLY = 44 };

typedef enum tshi_uv_reply {
    TSHI_UV_WELCOME,       /* the client is accepted */
    TSHI_UV_OTHER_KEY,     /* the client has another key, so its proof is wrong */
    TSHI_UV_OTHER_VERSION, /* the client has another version of the protocol */
    TSHI_UV_OTHER_JOB,     /* client and server belong to jobs of different names */
    TSHI_UV_OTHER_SIZE,    /* client and server belong to worlds of different sizes */
    TSHI_UV_OTHER_RANK,    /* the client expected another rank at this address */
    TSHI_UV_TAKEN,         /* the client's rank has made this connection already */
    TSHI_UV_UNKNOWN        /* the server is not setting up the group (or world) now */
} tshi_uv_reply;

static void tshi_uv_hello_fields(tshi_uv_cursor *c, tshi_uv_hello *hello) {
    hello->client = tshi_uv_int_field(c, hello->client);
    hello->server = tshi_uv_int_field(c, hello->server);
    hello->size = tshi_uv_int_field(c, hello->size);
    hello->purpose = (uint32_t)tshi_uv_field(c, hello->purpose, 4);
    hello->group = tshi_uv_field(c, hello->group, 8);
    hello->job = tshi_uv_field(c, hello->job, 8);
    hello->process = tshi_uv_field(c, hello->process, 8);
    hello->options = tshi_uv_int_field(c, hello->options);
}

/* Computes a proof, HMAC-SHA256 (RFC 2104) over: who proves ('C'lient or 'S'erver), the reply's
 * status and value (client: 0, 0), and the fields of hello. session: the session secret. */
static void tshi_uv_proof(const unsigned char session[32], char who, uint32_t status, int64_t value,
                          const tshi_uv_hello *hello, unsigned char proof[32]) {
    /* bytes of: who (1), status (4), value (8); then of hello: its version and 5 ints (4 each), its
     * group, job and process (8 each), its client_share and server_share (32 each) */
    unsigned char bytes[13 + 4 * 6 + 24 + 64];
    tshi_uv_cursor c = tshi_uv_cursor_over(bytes, sizeof bytes, 1);
    tshi_uv_hello all = *hello;
    (void)tshi_uv_field(&c, (uint64_t)who, 1);
    (void)tshi_uv_field(&c, status, 4);
    (void)tshi_uv_i64_field(&c, value);
    (void)tshi_uv_field(&c, all.version, 4);
    tshi_uv_hello_fields(&c, &all);
    tshi_uv_bytes_field(&c, all.client_share, 32);
    tshi_uv_bytes_field(&c, all.server_share, 32);
    (void)crypto_auth_hmacsha256(proof, bytes, sizeof bytes, session);
}

/* Writes or reads the beginning of a hello: `word` (4 bytes), the version and the share of the end
 * that wrote it. Returns 0 if it read another word. */
static int tshi_uv_hello_start(tshi_uv_cursor *c, const char *word, uint32_t *version,
                               unsigned char share[32]) {
    char magic[4];
    memcpy(magic, word, 4);
    tshi_uv_bytes_field(c, magic, 4);
    *version = (uint32_t)tshi_uv_field(c, *version, 4);
    tshi_uv_bytes_field(c, share, 32);
    return memcmp(magic, word, 4) == 0;
}

/* Writes or reads the server hello. Returns 0 if the bytes that it read are no server hello. */
static int tshi_uv_server_hello(unsigned char bytes[TSHI_UV_SERVER_HELLO], int writes,
                                uint32_t *version, unsigned char share[32]) {
    tshi_uv_cursor c = tshi_uv_cursor_over(bytes, TSHI_UV_SERVER_HELLO, writes);
    return tshi_uv_hello_start(&c, "tshd", version, share);
}

/* Writes or reads the client hello, which has all fields but the server's share. Reading does not
 * check "TSHD": tshi_uv_server_step does that as soon as these bytes arrive. */
static void tshi_uv_client_hello(unsigned char bytes[TSHI_UV_CLIENT_HELLO], int writes,
                                 tshi_uv_hello *hello, unsigned char proof[32]) {
    tshi_uv_cursor c = tshi_uv_cursor_over(bytes, TSHI_UV_CLIENT_HELLO, writes);
    (void)tshi_uv_hello_start(&c, "TSHD", &hello->version, hello->client_share);
    tshi_uv_hello_fields(&c, hello);
    tshi_uv_bytes_field(&c, proof, 32);
}

/* Returns 1 if a server's reply with this status has a proof. It has none if keys or versions
 * differ. */
static int tshi_uv_is_proven(uint32_t status) {
    return status != TSHI_UV_OTHER_KEY && status != TSHI_UV_OTHER_VERSION;
}

/* Writes the server's reply. value: for TSHI_UV_WELCOME, what both ends have agreed on; for a
 * refusal, what the server has in the field that differs. */
static void tshi_uv_put_reply(unsigned char bytes[TSHI_UV_REPLY], tshi_uv_reply status,
                              int64_t value, const tshi_uv_hello *hello,
                              const unsigned char session[32]) {
    tshi_uv_cursor c = tshi_uv_cursor_over(bytes, TSHI_UV_REPLY, 1);
    unsigned char proof[32] = {0};
    int proven = tshi_uv_is_proven(status);
    if (proven) tshi_uv_proof(session, 'S', status, value, hello, proof);
    (void)tshi_uv_field(&c, status, 4);
    (void)tshi_uv_i64_field(&c, proven ? value : 0);
    tshi_uv_bytes_field(&c, proof, 32);
}

/* Reads the server's reply. Returns 0 if the bytes are not a reply, or its proof is wrong. */
static int tshi_uv_get_reply(unsigned char bytes[TSHI_UV_REPLY], const tshi_uv_hello *hello,
                             const unsigned char session[32], uint32_t *status, int64_t *value) {
    tshi_uv_cursor c = tshi_uv_cursor_over(bytes, TSHI_UV_REPLY, 0);
    unsigned char proof[32], expected[32];
    *status = (uint32_t)tshi_uv_field(&c, 0, 4);
    *value = tshi_uv_i64_field(&c, 0);
    tshi_uv_bytes_field(&c, proof, 32);
    if (*status > TSHI_UV_UNKNOWN) return 0;
    if (!tshi_uv_is_proven(*status)) return 1;
    tshi_uv_proof(session, 'S', *status, *value, hello, expected);
    return sodium_memcmp(proof, expected, 32) == 0;
}

/* ---- the messages on control connections ---- */

/* A control message is: length of the payload (4 bytes), type (1), checksum of these 5 bytes (4);
 * payload; checksum of all bytes before it (4). Control messages always have checksums: they are
 * few. On an encrypted connection a message is two records (>>uv-secret): length and type; the
 * payload. */

typedef enum tshi_uv_type {
    TSHI_UV_BEAT,    /* heartbeat, to all */
    TSHI_UV_HERE,    /* to rank 0: where the sender listens */
    TSHI_UV_MISSING, /* from rank 0: which ranks have not joined yet */
    TSHI_UV_TABLE,   /* from rank 0: the address table (where each rank listens), and the token */
    TSHI_UV_READY,   /* to rank 0: the sender has all its connections; its host */
    TSHI_UV_GO,      /* from rank 0: all ranks have all their connections; the hosts of all */
    TSHI_UV_REPORT,  /* to the coordinator: an error report */
    TSHI_UV_ASK,     /* from the coordinator: which call was collective seq of a group? */
    TSHI_UV_TELL,    /* answer to ASK: what the sender called as that collective */
    /* to the coordinator: the sender has been blocked for 20 ms (tshi_uv_blocked) */
    TSHI_UV_BLOCKED,
    TSHI_UV_CONFIRM, /* from the coordinator: is the receiver still in the wait that it reported? */
    TSHI_UV_STILL,   /* answers CONFIRM: 1 if the rank is still in the wait that it reported */
    TSHI_UV_DECISION, /* the world's error, on which the sender has decided */
    TSHI_UV_BYE,      /* the sender shuts down in good order */
    TSHI_UV_AWAIT,    /* number of bytes that the sender has received; it waits for more */
    TSHI_UV_LINKED,   /* the sender, which dialled the receiver, has both connections of a group */
    TSHI_UV_TYPES     /* number of types of control messages */
} tshi_uv_type;

static void tshi_uv_error_fields(tshi_uv_cursor *c, tsh_error *error, int size) {
    unsigned code = (unsigned)tshi_uv_field(c, (uint64_t)error->code, 1);
    error->code = code > TSH_OK && code < TSH_RESULT_COUNT ? (tsh_result)code : TSH_ERR_ABORTED;
    error->rank = tshi_uv_rank_field(c, error->rank, size);
    tshi_uv_text_field(c, error->message, sizeof error->message);
}

static void tshi_uv_report_fields(tshi_uv_cursor *c, tshi_uv_report *e, int size) {
    e->kind = (tshi_uv_error_kind)tshi_uv_field(c, (uint64_t)e->kind, 1);
    if (e->kind == TSHI_UV_NOTHING || e->kind > TSHI_UV_ABORT) c->bad = 1;
    e->group = tshi_uv_field(c, e->group, 8);
    e->seq = tshi_uv_field(c, e->seq, 8);
    tshi_uv_error_fields(c, &e->error, size);
}

/* Writes or reads the payload of a TELL message: id of the group and number of the collective that
 * it is about, then the answer. */
static void tshi_uv_answer_fields(tshi_uv_cursor *c, uint64_t *group, uint64_t *seq,
                                  tshi_uv_answer *answer) {
    tshi_uv_record *record = &answer->record;
    tsh_coll *coll = &record->coll;
    /* member and started share one byte */
    unsigned bits = (unsigned)(answer->member | answer->started << 1);
    *group = tshi_uv_field(c, *group, 8);
    *seq = tshi_uv_field(c, *seq, 8);
    bits = (unsigned)tshi_uv_field(c, bits, 1);
    answer->told = 1;
    answer->member = (int)(bits & 1);
    answer->started = (int)(bits >> 1 & 1);
    answer->rank = tshi_uv_int_field(c, answer->rank);
    record->digest = tshi_uv_field(c, record->digest, 8);
    coll->kind = (tsh_coll_kind)tshi_uv_field(c, (uint64_t)coll->kind, 1);
    coll->dtype = (tsh_dtype)tshi_uv_field(c, (uint64_t)coll->dtype, 1);
    coll->redop = (tsh_redop)tshi_uv_field(c, (uint64_t)coll->redop, 1);
    coll->count = tshi_uv_i64_field(c, coll->count);
    coll->blocks = tshi_uv_i64_field(c, coll->blocks);
    coll->root = tshi_uv_int_field(c, coll->root);
    coll->tag = tshi_uv_int_field(c, coll->tag);
    record->counts = (int)tshi_uv_field(c, (uint64_t)record->counts, 1);
    if (record->counts > TSHI_UV_COUNTS || answer->rank < 0) c->bad = 1;
    for (int i = 0; i < record->counts && !c->bad; i++) {
        record->send_counts[i] = tshi_uv_i64_field(c, record->send_counts[i]);
        record->recv_counts[i] = tshi_uv_i64_field(c, record->recv_counts[i]);
    }
}

/* Writes or reads the payload of a BLOCKED message in a world of `size` ranks. s->member must have
 * room for `size` entries. */
static void tshi_uv_blocked_fields(tshi_uv_cursor *c, tshi_uv_blocked *s, int size) {
    s->wait = tshi_uv_field(c, s->wait, 8);
    s->group = tshi_uv_field(c, s->group, 8);
    s->seq = tshi_uv_field(c, s->seq, 8);
    s->peer = tshi_uv_rank_field(c, s->peer, size);
    s->sends = (int)tshi_uv_field(c, (uint64_t)s->sends, 1);
    tshi_uv_text_field(c, s->text, sizeof s->text);
    s->members = tshi_uv_count_field(c, s->members, size);
    for (int i = 0; i < s->members && !c->bad; i++) {
        s->member[i] = tshi_uv_rank_field(c, s->member[i], size);
        if (s->member[i] < 0) c->bad = 1;
    }
    s->groups = tshi_uv_count_field(c, s->groups, TSHI_UV_BLOCKED_GROUPS);
    for (int i = 0; i < s->groups && !c->bad; i++) {
        s->groups_of[i].id = tshi_uv_field(c, s->groups_of[i].id, 8);
        s->groups_of[i].started = tshi_uv_field(c, s->groups_of[i].started, 8);
    }
    s->pairs = tshi_uv_count_field(c, s->pairs, TSHI_UV_BLOCKED_PAIRS);
    for (int i = 0; i < s->pairs && !c->bad; i++) {
        s->pairs_of[i].group = tshi_uv_field(c, s->pairs_of[i].group, 8);
        s->pairs_of[i].sends = tshi_uv_field(c, s->pairs_of[i].sends, 8);
        s->pairs_of[i].receives = tshi_uv_field(c, s->pairs_of[i].receives, 8);
        s->pairs_of[i].peer = tshi_uv_int_field(c, s->pairs_of[i].peer);
    }
    /* the message is invalid: the rank that sent it counts as not blocked */
    if (c->bad && !c->writes) s->wait = 0;
}
