/* ========================================================================== */
/* >>uv-secret                                    MARK: - uv-secret (private) */
/* Keys of a connection, and the ciphers that encrypt what it carries.        */
/* A handshake gives both ends a session secret, by CPace: ephemeral keys of  */
/* a group (ristretto255) whose generator is a hash of the shared key. Who    */
/* records a handshake cannot test guesses of the key; who takes part in it   */
/* can test one. Who learns the key later cannot read what was recorded.      */
/* Bytes are sealed in records: the encrypted bytes, then a tag of 16 bytes.  */
/* Records are numbered, so a record that is changed, repeated, left out or   */
/* moved has a wrong tag. Each direction of each connection has its own key.  */
/* Needs: >>uv-wire.                                                          */
/* ========================================================================== */

/* TAG: bytes of the tag at a record's end. RECORDS_PER_KEY: records after which a direction takes
 * its next key. */
enum { TSHI_UV_TAG = 16, TSHI_UV_RECORDS_PER_KEY = 1 << 24 };

/* ---- CPace (draft-irtf-cfrg-cpace, CPaceRistretto255 with SHA-512) ---- */

/* A text to be hashed, of less than 128 bytes. */
typedef struct tshi_uv_hashed {
    const void *at;
    size_t size; /* length of the text in bytes */
} tshi_uv_hashed;

/* Hashes n texts, each with its length before it. */
static void tshi_uv_hash_all(crypto_hash_sha512_state *hash, const tshi_uv_hashed *parts, int n) {
    for (int i = 0; i < n; i++) {
        unsigned char length = (unsigned char)parts[i].size;
        (void)crypto_hash_sha512_update(hash, &length, 1);
        (void)crypto_hash_sha512_update(hash, (const unsigned char *)parts[i].at, parts[i].size);
    }
}

/* Computes the generator of the group that belongs to a key (or password). channel, id: the draft's
 * CI and sid. */
static void tshi_uv_cpace_generator(tshi_uv_hashed key, tshi_uv_hashed channel, tshi_uv_hashed id,
                                    unsigned char generator[32]) {
    static const unsigned char zeros[128] = {0};
    tshi_uv_hashed parts[5];
    crypto_hash_sha512_state hash;
    unsigned char digest[64];
    parts[0].at = "CPaceRistretto255";
    parts[0].size = 17;
    parts[1] = key;
    parts[2].at = zeros; /* zeros fill up the first block of SHA-512 (128 bytes) */
    parts[2].size = 128 - 18 - (1 + key.size) - 1;
    parts[3] = channel;
    parts[4] = id;
    (void)crypto_hash_sha512_init(&hash);
    tshi_uv_hash_all(&hash, parts, 5);
    (void)crypto_hash_sha512_final(&hash, digest);
    (void)crypto_core_ristretto255_from_hash(generator, digest);
}

/* Computes the key that both ends share (the draft's ISK) from this end's private key (scalar) and
 * the other end's public one (share). transcript: the client's share and what it says, the server's
 * share and what it says. Returns 0 if the share is not a valid point. */
static int tshi_uv_cpace_key(const unsigned char scalar[32], const unsigned char share[32],
                             tshi_uv_hashed id, const tshi_uv_hashed transcript[4],
                             unsigned char key[64]) {
    unsigned char point[32];
    tshi_uv_hashed parts[3] = {{"CPaceRistretto255_ISK", 21}, {NULL, 0}, {NULL, 32}};
    crypto_hash_sha512_state hash;
    int valid = crypto_scalarmult_ristretto255(point, scalar, share) == 0;
    parts[1] = id;
    parts[2].at = point;
    (void)crypto_hash_sha512_init(&hash);
    tshi_uv_hash_all(&hash, parts, 3);
    tshi_uv_hash_all(&hash, transcript, 4);
    (void)crypto_hash_sha512_final(&hash, key);
    sodium_memzero(point, sizeof point);
    sodium_memzero(&hash, sizeof hash);
    return valid;
}

/* ---- the session secret of a connection ---- */

/* Draws an ephemeral private key (scalar), and computes the public one (share), which the hello
 * carries to the other end. secret: hash of the shared key. The server sends its hello before it
 * knows who the client is, so the share's generator does not depend on the ranks; the session
 * secret does. */
static void tshi_uv_new_share(const unsigned char secret[32], unsigned char scalar[32],
                              unsigned char share[32]) {
    unsigned char generator[32];
    tshi_uv_hashed key = {NULL, 32}, channel = {"tshard 3", 8}, none = {"", 0};
    key.at = secret;
    tshi_uv_cpace_generator(key, channel, none, generator);
    crypto_core_ristretto255_scalar_random(scalar);
    /* fails only for a scalar of 0, which is never drawn; a share of zeros would be refused */
    if (crypto_scalarmult_ristretto255(share, scalar, generator) != 0) memset(share, 0, 32);
    sodium_memzero(generator, sizeof generator);
}

/* Computes the session secret from this end's private key and the other end's share, and erases the
 * private key. It depends on all fields of hello, and on `base`: world->secret, or world->mesh.
 * Returns 0 if the share is not a valid point. */
static int tshi_uv_agree(const unsigned char base[32], unsigned char scalar[32],
                         const unsigned char share[32], const tshi_uv_hello *hello,
                         unsigned char session[32]) {
    unsigned char fields[44], key[64];
    tshi_uv_cursor c = tshi_uv_cursor_over(fields, sizeof fields, 1);
    tshi_uv_hello all = *hello;
    tshi_uv_hashed none = {"", 0};
    tshi_uv_hashed transcript[4] = {{NULL, 32}, {NULL, sizeof fields}, {NULL, 32}, {"", 0}};
    int valid;
    tshi_uv_hello_fields(&c, &all);
    transcript[0].at = hello->client_share;
    transcript[1].at = fields;
    transcript[2].at = hello->server_share;
    valid = tshi_uv_cpace_key(scalar, share, none, transcript, key);
    (void)crypto_auth_hmacsha256(session, key, sizeof key, base);
    sodium_memzero(scalar, 32);
    sodium_memzero(key, sizeof key);
    return valid;
}

/* ---- records ---- */

/* Encrypts, or decrypts, the records of one direction of a connection. */
typedef struct tshi_uv_cipher {
    crypto_aead_aes256gcm_state state; /* AES-256-GCM: the expanded key */
    unsigned char key[32];             /* ChaCha20-Poly1305: the key */
    unsigned char chain[32];           /* secret from which the next key is made */
    uint64_t count;                    /* number of records under this key, the next one's nonce */
    int aes;                           /* 1: AES-256-GCM, 0: ChaCha20-Poly1305 */
} tshi_uv_cipher;

/* What an encrypted connection has beside its socket. A control connection uses the ciphers
 * only. */
struct tshi_uv_channel {
    tshi_uv_cipher out, in; /* for records that this end sends, and receives */
    /* records of a data connection that are to be sent, and that have arrived */
    tshi_uv_buffer outgoing, incoming;
    size_t sent;   /* bytes of `outgoing` that are sent */
    size_t sealed; /* bytes of header and payload that are in `outgoing` */
    size_t opened; /* bytes of `incoming` whose records are decrypted */
};

/* Makes the key of the cipher's next records from its chain. */
static void tshi_uv_cipher_key(tshi_uv_cipher *cipher) {
    (void)crypto_auth_hmacsha256(cipher->key, (const unsigned char *)"key", 3, cipher->chain);
    (void)crypto_auth_hmacsha256(cipher->chain, (const unsigned char *)"next", 4, cipher->chain);
    cipher->count = 0;
    if (!cipher->aes) return;
    (void)crypto_aead_aes256gcm_beforenm(&cipher->state, cipher->key);
    sodium_memzero(cipher->key, sizeof cipher->key);
}

/* Sets the first key of a cipher. who: the end that sends the records, 'C' for client or 'S' for
 * server. agreed: what the handshake has agreed on (TSHI_UV_SEALED, ...). */
static void tshi_uv_cipher_begin(tshi_uv_cipher *cipher, const unsigned char session[32], char who,
                                 int agreed) {
    unsigned char label[3] = {'k', (unsigned char)who, (unsigned char)agreed};
    cipher->aes = (agreed & TSHI_UV_AES) != 0;
    (void)crypto_auth_hmacsha256(cipher->chain, label, sizeof label, session);
    tshi_uv_cipher_key(cipher);
}

/* Returns the ciphers of a connection whose handshake gave the secret `session`. client 1: this end
 * is the client. NULL: no memory. */
static tshi_uv_channel *tshi_uv_channel_new(const unsigned char session[32], int client,
                                            int agreed) {
    tshi_uv_channel *channel = (tshi_uv_channel *)calloc(1, sizeof *channel);
    if (!channel) return NULL;
    tshi_uv_cipher_begin(&channel->out, session, client ? 'C' : 'S', agreed);
    tshi_uv_cipher_begin(&channel->in, session, client ? 'S' : 'C', agreed);
    return channel;
}

static void tshi_uv_channel_free(tshi_uv_channel **channel) { /* Erases the keys. */
    if (!*channel) return;
    free((*channel)->outgoing.data);
    free((*channel)->incoming.data);
    sodium_memzero(*channel, sizeof **channel);
    free(*channel);
    *channel = NULL;
}

/* Writes the nonce (record number) of the cipher's next record; takes a new key first if that is
 * due. Both ends count alike, so no nonce is sent. */
static void tshi_uv_cipher_nonce(tshi_uv_cipher *cipher, unsigned char nonce[12]) {
    tshi_uv_cursor c = tshi_uv_cursor_over(nonce, 12, 1);
    if (cipher->count == TSHI_UV_RECORDS_PER_KEY) tshi_uv_cipher_key(cipher);
    (void)tshi_uv_field(&c, cipher->count++, 8);
    (void)tshi_uv_field(&c, 0, 4);
}

/* Encrypts n bytes into `record`, n + TSHI_UV_TAG bytes, which may begin where the bytes do. */
static void tshi_uv_seal(tshi_uv_cipher *cipher, const void *bytes, size_t n, void *record) {
    const unsigned char *from = (const unsigned char *)bytes;
    unsigned char *to = (unsigned char *)record, nonce[12];
    tshi_uv_cipher_nonce(cipher, nonce);
    if (cipher->aes)
        (void)crypto_aead_aes256gcm_encrypt_detached_afternm(to, to + n, NULL, from, n, NULL, 0,
                                                             NULL, nonce, &cipher->state);
    else
        (void)crypto_aead_chacha20poly1305_ietf_encrypt_detached(to, to + n, NULL, from, n, NULL, 0,
                                                                 NULL, nonce, cipher->key);
}

/* Decrypts a record of n bytes and a tag into `bytes`, which may begin where the record does.
 * Returns 0 if the tag is wrong; what `bytes` has then is not to be used. */
static int tshi_uv_unseal(tshi_uv_cipher *cipher, const void *record, size_t n, void *bytes) {
    const unsigned char *from = (const unsigned char *)record;
    unsigned char *to = (unsigned char *)bytes, nonce[12];
    tshi_uv_cipher_nonce(cipher, nonce);
    if (cipher->aes)
        return crypto_aead_aes256gcm_decrypt_detached_afternm(to, NULL, from, n, from + n, NULL, 0,
                                                              nonce, &cipher->state) == 0;
    return crypto_aead_chacha20poly1305_ietf_decrypt_detached(to, NULL, from, n, from + n, NULL, 0,
                                                              nonce, cipher->key) == 0;
}
