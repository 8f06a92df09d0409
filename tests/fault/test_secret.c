/* Encrypted connections: the handshake's key exchange, records, and whole worlds whose bytes pass
 * through a process in the middle that records or changes them. With FULL=1 it changes the bytes of
 * 1,000 worlds. */
#define TSHARD_IMPLEMENTATION
#include "../../backends/tshard_backend.h"

#include <sodium.h>
#include <stdlib.h>
#include <string.h>

/* Of this process: 0: as if the processor had no instructions for AES. */
static int has_aes = 1;
#define crypto_aead_aes256gcm_is_available() (has_aes && crypto_aead_aes256gcm_is_available())
#include "../../backends/tshard_uv.h"

#include "../support/processes.h"
#include "../support/collectives.h"

#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SANITIZED = 1 }; /* everything is slower */
#else
enum { SANITIZED = 0 };
#endif

static int full(void) {
    const char *all = getenv("FULL");
    return all && all[0] == '1';
}

static uint64_t draw(uint64_t *state) {
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return *state >> 33;
}

/* ------------------------------------------------------------------ the key exchange */

/* Both ends of a handshake. */
typedef struct exchange {
    unsigned char secret[2][32]; /* what client and server have: hashes of their keys */
    unsigned char base[2][32];   /* ..., or of that and the token */
    tshi_uv_hello hello[2];      /* as client and server see it */
    unsigned char session[2][32];
    int valid[2];
} exchange;

static void exchange_begin(exchange *x) {
    memset(x, 0, sizeof *x);
    for (int i = 0; i < 2; i++) {
        memset(x->secret[i], 's', 32);
        memset(x->base[i], 'b', 32);
        x->hello[i].client = 1;
        x->hello[i].size = 2;
        x->hello[i].group = 7;
        x->hello[i].job = 77;
        x->hello[i].process = 777;
        x->hello[i].options = 6;
    }
}

/* flip: bit of the shares on their way, client's first, that is changed; -1: none. */
static void exchange_run(exchange *x, int flip) {
    unsigned char scalar[2][32], share[2][32];
    for (int i = 0; i < 2; i++) tshi_uv_new_share(x->secret[i], scalar[i], share[i]);
    for (int i = 0; i < 2; i++) {
        memcpy(x->hello[i].client_share, share[0], 32);
        memcpy(x->hello[i].server_share, share[1], 32);
    }
    if (flip >= 0) {
        unsigned char bit = (unsigned char)(1 << flip % 8);
        if (flip < 256)
            x->hello[1].client_share[flip / 8] ^= bit;
        else
            x->hello[0].server_share[flip / 8 - 32] ^= bit;
    }
    x->valid[0] = tshi_uv_agree(x->base[0], scalar[0], x->hello[0].server_share, &x->hello[0],
                                x->session[0]);
    x->valid[1] = tshi_uv_agree(x->base[1], scalar[1], x->hello[1].client_share, &x->hello[1],
                                x->session[1]);
    for (int i = 0; i < 2; i++) assert_true(sodium_is_zero(scalar[i], 32)); /* erased */
}

static int exchange_agrees(const exchange *x) {
    return x->valid[0] && x->valid[1] && memcmp(x->session[0], x->session[1], 32) == 0;
}

/* Bytes written in hexadecimal. */
static tshi_uv_hashed bytes_of(const char *text, unsigned char bytes[64]) {
    tshi_uv_hashed part = {NULL, 0};
    part.at = bytes;
    assert_int_equal(sodium_hex2bin(bytes, 64, text, strlen(text), NULL, &part.size, NULL), 0);
    return part;
}

/* The test vectors of draft-irtf-cfrg-cpace, "CPACE-RISTR255-SHA512". */
static void test_vectors(void **state) {
    static const char *const scalars[2] = {
        "da3d23700a9e5699258aef94dc060dfda5ebb61f02a5ea77fad53f4ff0976d08",
        "d2316b454718c35362d83d69df6320f38578ed5984651435e2949762d900b80d"};
    static const char *const shares[2] = {
        "d40fb265a7abeaee7939d91a585fe59f7053f982c296ec413c624c669308f87a",
        "08bcf6e9777a9c313a3db6daa510f2d398403319c2341bd506a92e672eb7e307"};
    tshi_uv_hashed key = {"Password", 8}, channel = {"oc\013B_responder\013A_initiator", 26};
    tshi_uv_hashed transcript[4] = {{NULL, 0}, {"ADa", 3}, {NULL, 0}, {"ADb", 3}};
    unsigned char sid[64], made[64], right[64], scalar[2][64], share[2][64];
    tshi_uv_hashed id = bytes_of("7e4b4791d6a8ef019b936c79fb7f2c57", sid);
    (void)state;
    tshi_uv_cpace_generator(key, channel, id, made);
    (void)bytes_of("a6fc82c3b8968fbb2e06fee81ca858586dea50d248f0c7ca6a18b0902a30b36b", right);
    assert_memory_equal(made, right, 32);
    for (int i = 0; i < 2; i++) {
        (void)bytes_of(scalars[i], scalar[i]);
        transcript[2 * i] = bytes_of(shares[i], share[i]);
        assert_int_equal(crypto_scalarmult_ristretto255(right, scalar[i], made), 0);
        assert_memory_equal(right, share[i], 32);
    }
    (void)bytes_of("4c5469a16b2364c4b944ebc1a79e51d1674ad47db26e8718154f59faebfaa52d"
                   "8346f30aa58377117eb20d527f2cbc5c76381f7fd372e89df8239f87f2e02ed1",
                   right);
    for (int i = 0; i < 2; i++) {
        assert_true(tshi_uv_cpace_key(scalar[i], share[1 - i], id, transcript, made));
        assert_memory_equal(made, right, 64);
    }
}

static void test_exchange(void **state) {
    enum { TIMES = 50 };
    static exchange x[TIMES];
    (void)state;
    for (int i = 0; i < TIMES; i++) { /* both ends agree, on something else each time */
        exchange_begin(&x[i]);
        exchange_run(&x[i], -1);
        assert_true(exchange_agrees(&x[i]));
        for (int k = 0; k < i; k++) {
            assert_memory_not_equal(x[k].session[0], x[i].session[0], 32);
            assert_memory_not_equal(x[k].hello[0].client_share, x[i].hello[0].client_share, 32);
            assert_memory_not_equal(x[k].hello[0].server_share, x[i].hello[0].server_share, 32);
        }
    }
    for (int bit = 0; bit < 512; bit++) { /* a changed share */
        exchange_begin(&x[0]);
        exchange_run(&x[0], bit);
        assert_false(exchange_agrees(&x[0]));
    }
}

/* Whatever one end has otherwise, they do not agree. */
static void test_exchange_differs(void **state) {
    exchange x;
    (void)state;
    for (int bit = 0; bit < 256; bit += 17) {
        exchange_begin(&x);
        x.secret[0][bit / 8] ^= (unsigned char)(1 << bit % 8);
        exchange_run(&x, -1);
        assert_false(exchange_agrees(&x));
        exchange_begin(&x);
        x.base[0][bit / 8] ^= (unsigned char)(1 << bit % 8);
        exchange_run(&x, -1);
        assert_false(exchange_agrees(&x));
    }
    for (int field = 0; field < 8; field++) {
        tshi_uv_hello *hello = &x.hello[1];
        exchange_begin(&x);
        if (field == 0) hello->client++;
        if (field == 1) hello->server++;
        if (field == 2) hello->size++;
        if (field == 3) hello->purpose++;
        if (field == 4) hello->group++;
        if (field == 5) hello->job++;
        if (field == 6) hello->process++;
        if (field == 7) hello->options ^= TSHI_UV_SEALED;
        exchange_run(&x, -1);
        assert_false(exchange_agrees(&x));
    }
}

/* Shares that are not points of the group, or its neutral element. */
static void test_exchange_refuses(void **state) {
    unsigned char bad[4][32], scalar[32], share[32], session[32]; /* bad[3]: not on the curve */
    tshi_uv_hello hello;
    (void)state;
    memset(&hello, 0, sizeof hello);
    memset(bad, 0, sizeof bad); /* 0: the neutral element */
    bad[3][0] = 2;
    memset(bad[1], 0xff, 32); /* not reduced */
    bad[2][0] = 1;            /* negative */
    while (crypto_core_ristretto255_is_valid_point(bad[3]))
        bad[3][0] = (unsigned char)(bad[3][0] + 2);
    for (int i = 0; i < 4; i++) {
        tshi_uv_new_share(bad[0], scalar, share);
        assert_false(tshi_uv_agree(bad[0], scalar, bad[i], &hello, session));
    }
}

/* What the two ends want, and what a connection has. */
static void test_options(void **state) {
    static tsh_uv_world on;
    const int aes = TSHI_UV_AES, sealed = TSHI_UV_SEALED, checked = TSHI_UV_CHECKED;
    (void)state;
    assert_int_equal(tshi_uv_agreed(0, aes), 0);
    assert_int_equal(tshi_uv_agreed(checked, aes), checked);
    assert_int_equal(tshi_uv_agreed(checked, sealed | aes), sealed);
    assert_int_equal(tshi_uv_agreed(aes, sealed | aes), sealed | aes);
    /* no socket: an address that is not loopback */
    has_aes = 0;
    assert_int_equal(tshi_uv_wants(&on, -1), checked);
    on.keyed = 1;
    assert_int_equal(tshi_uv_wants(&on, -1), checked | sealed);
    on.encrypt = on.checksum = -1;
    assert_int_equal(tshi_uv_wants(&on, -1), 0);
    on.keyed = 0;
    on.encrypt = 1;
    assert_int_equal(tshi_uv_wants(&on, -1), sealed);
    has_aes = 1;
}

/* ---------------------------------------------------------------------- records */

enum { RECORD = 1000 };

/* The ciphers of both ends. aes 1: by AES, if the processor has it. Returns 0 if it has not. */
static int two_ends(tshi_uv_channel *ends[2], int aes) {
    static const unsigned char session[32] = {1, 2, 3};
    int options = TSHI_UV_SEALED | (aes ? TSHI_UV_AES : 0);
    if (aes && !crypto_aead_aes256gcm_is_available()) return 0;
    for (int i = 0; i < 2; i++) ends[i] = tshi_uv_channel_new(session, i == 0, options);
    assert_true(ends[0] && ends[1]);
    return 1;
}

static void end_both(tshi_uv_channel *ends[2]) {
    for (int i = 0; i < 2; i++) tshi_uv_channel_free(&ends[i]);
}

/* Records of all lengths come through, in both directions and across changes of the key; each has
 * other bytes than the one before it with the same contents. */
static void test_records(void **state) {
    static unsigned char text[70000], record[70000 + TSHI_UV_TAG], last[70000 + TSHI_UV_TAG];
    static const size_t sizes[] = {0, 1, 5, 15, 16, 17, 56, 127, 128, 129, 1000, 65536, 70000};
    tshi_uv_channel *ends[2];
    uint64_t random = 1;
    (void)state;
    for (size_t i = 0; i < sizeof text; i++) text[i] = (unsigned char)draw(&random);
    for (int aes = 0; aes < 2; aes++) {
        if (!two_ends(ends, aes)) continue;
        for (int i = 0; i < 200; i++) {
            size_t n = sizes[(size_t)i / 2 % (sizeof sizes / sizeof *sizes)];
            tshi_uv_cipher *out = &ends[i % 2]->out, *in = &ends[1 - i % 2]->in;
            if (i == 60) /* both directions are near the next key */
                for (int k = 0; k < 2; k++)
                    ends[k]->in.count = ends[k]->out.count = TSHI_UV_RECORDS_PER_KEY - 20;
            tshi_uv_seal(out, text, n, record);
            assert_true(n < 16 || memcmp(record, text, n) != 0);
            assert_true(n < 16 || memcmp(record, last, n) != 0);
            memcpy(last, record, n + TSHI_UV_TAG);
            if (i % 3) { /* where it is, or elsewhere */
                assert_true(tshi_uv_unseal(in, record, n, record));
                assert_memory_equal(record, text, n);
            } else {
                memset(record + n + TSHI_UV_TAG, 0, sizeof record - n - TSHI_UV_TAG);
                assert_true(tshi_uv_unseal(in, last, n, record));
                assert_memory_equal(record, text, n);
            }
        }
        assert_true(ends[0]->out.count < 200 && ends[0]->in.count < 200); /* a new key */
        end_both(ends);
    }
}

/* 10^5 records with a flipped bit, and one each that is repeated, comes too early, comes back to
 * its sender, or ends too early, have wrong tags; what follows an unchanged one is right. */
static void test_changed_records(void **state) {
    static unsigned char text[RECORD], record[3][RECORD + TSHI_UV_TAG], copy[RECORD + TSHI_UV_TAG];
    tshi_uv_channel *ends[2];
    uint64_t random = 2;
    int flips = SANITIZED ? 10000 : 100000, missed = 0;
    (void)state;
    for (size_t i = 0; i < sizeof text; i++) text[i] = (unsigned char)draw(&random);
    for (int aes = 0; aes < 2; aes++) {
        tshi_uv_cipher in;
        if (!two_ends(ends, aes)) continue;
        for (int i = 0; i < 3; i++) tshi_uv_seal(&ends[0]->out, text, RECORD, record[i]);
        for (int i = 0; i < flips; i++) {
            uint64_t bit = draw(&random) % (8 * sizeof copy);
            memcpy(copy, record[0], sizeof copy);
            copy[bit / 8] ^= (unsigned char)(1 << bit % 8);
            in = ends[1]->in;
            missed += tshi_uv_unseal(&in, copy, RECORD, copy);
        }
        for (size_t n = 0; n < RECORD; n++) { /* truncated */
            in = ends[1]->in;
            missed += tshi_uv_unseal(&in, record[0], n, copy);
        }
        in = ends[1]->in; /* the next one comes first */
        missed += tshi_uv_unseal(&in, record[1], RECORD, copy);
        in = ends[0]->in; /* it comes back */
        missed += tshi_uv_unseal(&in, record[0], RECORD, copy);
        for (int i = 0; i < 3; i++) { /* each is right once */
            assert_true(tshi_uv_unseal(&ends[1]->in, record[i], RECORD, copy));
            assert_memory_equal(copy, text, RECORD);
            in = ends[1]->in;
            missed += tshi_uv_unseal(&in, record[i], RECORD, copy);
        }
        end_both(ends);
    }
    assert_int_equal(missed, 0);
}

/* -------------------------------------------------------------------- whole worlds */

static world_desc encrypted(int ranks, rank_fn fn, const void *user) {
    world_desc desc = world_over_tcp(ranks, fn, user, 100);
    desc.uv.encrypt = 1;
    return desc;
}

/* Every algorithm, at sizes of less than a piece, of several, and of no whole number of them. */
static void grid_encrypted_rank(job *j) {
    static const int64_t counts[] = {0, 7, 30001, SANITIZED ? 70003 : 300003};
    grid_case c;
    memset(&c, 0, sizeof c);
    c.blocks = 1;
    for (int i = 0; i < 8; i++) {
        c.count = counts[i % 4] / (j->ranks > 4 ? 8 : 1);
        c.in_place = i / 4;
        c.dtype = i % 3 == 1 ? TSH_BF16 : TSH_F32;
        grid_allreduce(j, c);
        grid_broadcast(j, c);
        grid_pairwise(j, c);
        c.count /= j->ranks;
        c.blocks = 1 + i % 2;
        grid_reduce_scatter(j, c);
        grid_allgather(j, c);
        grid_alltoall(j, c);
    }
}

/* One rank alone asks for encryption; one has no instructions for AES. */
static void one_encrypts(job *j, tsh_uv_desc *uv) {
    uv->encrypt = j->rank == 1 ? 1 : -1;
    has_aes = j->rank != 1;
}

static void no_aes(job *j, tsh_uv_desc *uv) {
    (void)j;
    (void)uv;
    has_aes = 0;
}

static void test_whole(void **state) {
    static const int ranks[] = {2, 3, SANITIZED ? 4 : 8};
    (void)state;
    for (int i = 0; i < 5; i++) {
        world_desc desc = encrypted(ranks[i % 3], grid_encrypted_rank, NULL);
        const char *why;
        world w;
        if (i == 3) desc.prepare = one_encrypts;
        if (i == 4) desc.prepare = no_aes;
        world_start(&w, &desc);
        why = world_end(&w);
        if (why) fail_msg("%s", why);
        world_free(&w);
    }
}

/* --------------------------------------------------------- somebody in the middle */

/* One bit is flipped; 64 bytes come twice; 8 bytes change places with the next 8; some are left
 * out; both connections end. */
typedef enum change { NONE, FLIP, REPEAT, SWAP, OMIT, CUT, CHANGES } change;

enum { PAIRS = 16, CHUNK = 65536, RECORDED = 4 << 20 };

/* Shared by the test, the ranks and the process in the middle, which passes on what rank 1 and rank
 * 0 send to each other. Bytes of handshakes are not counted and not changed. */
typedef struct middle {
    int port, rank0_port; /* where it listens; atomic: where rank 0 does */
    int armed, hit;       /* atomic: a change is to be made; was made */
    change how;
    int from;   /* the rank whose bytes are changed */
    int64_t at; /* which of them: the first one */
    uint64_t random;
    int64_t sent[2];                     /* atomic: bytes that each rank has sent */
    unsigned char recorded[2][RECORDED]; /* the first ones of them */
} middle;

static middle *m;

static int get(const int *place) {
    return __atomic_load_n(place, __ATOMIC_SEQ_CST);
}

static void put(int *place, int value) {
    __atomic_store_n(place, value, __ATOMIC_SEQ_CST);
}

static void send_all(int fd, const unsigned char *at, size_t n) {
    while (n) {
        ssize_t now = send(fd, at, n, MSG_NOSIGNAL);
        if (now <= 0) return; /* the rank has closed it: it will not read any more */
        at += now;
        n -= (size_t)now;
    }
}

/* A connection of rank 1 (end 1), and one with rank 0 (end 0). */
typedef struct pair {
    int fd[2];
    int64_t opening[2]; /* bytes of the handshake that each end still sends */
} pair;

/* Sends the n bytes to the other end, changed at byte `at`. Returns 0 if the connection is cut. */
static int send_changed(const pair *p, int from, unsigned char *bytes, size_t at, size_t n) {
    int to = p->fd[1 - from];
    uint64_t random = m->random;
    size_t left = n - at, few = left < 8 ? left : 1 + draw(&random) % 8;
    m->armed = 0;
    put(&m->hit, 1);
    switch (m->how) {
    case FLIP: bytes[at] ^= (unsigned char)(1u << draw(&random) % 8); break;
    case REPEAT: send_all(to, bytes, at + few); break;
    case SWAP:
        if (left < 16 || memcmp(bytes + at, bytes + at + 8, 8) == 0) {
            bytes[at] ^= 1;
            break;
        }
        for (size_t i = at; i < at + 8; i++) {
            unsigned char kept = bytes[i];
            bytes[i] = bytes[i + 8];
            bytes[i + 8] = kept;
        }
        break;
    case OMIT:
        memmove(bytes + at, bytes + at + few, left - few);
        n -= few;
        break;
    case CUT: send_all(to, bytes, at); return 0;
    default: break;
    }
    send_all(to, bytes, n);
    return 1;
}

/* Passes on what one end has sent. Returns 0 if the connection has ended. */
static int pass_on(pair *p, int from) {
    static unsigned char bytes[2 * CHUNK];
    ssize_t got = recv(p->fd[from], bytes, CHUNK, 0);
    size_t n = got > 0 ? (size_t)got : 0, skip;
    int64_t at;
    if (got <= 0) return 0;
    skip = (int64_t)n < p->opening[from] ? n : (size_t)p->opening[from];
    p->opening[from] -= (int64_t)skip;
    for (size_t i = skip; i < n && m->sent[from] + (int64_t)(i - skip) < RECORDED; i++)
        m->recorded[from][m->sent[from] + (int64_t)(i - skip)] = bytes[i];
    at = m->at - m->sent[from] + (int64_t)skip;
    m->sent[from] += (int64_t)(n - skip);
    if (get(&m->armed) && from == m->from && at >= (int64_t)skip && at < (int64_t)n)
        return send_changed(p, from, bytes, (size_t)at, n);
    send_all(p->fd[1 - from], bytes, n);
    return 1;
}

static int dial(int port) {
    struct sockaddr_in address;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_port = htons((uint16_t)port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (connect(fd, (struct sockaddr *)&address, sizeof address) == 0) return fd;
    (void)close(fd);
    return -1;
}

/* The process in the middle, until it is killed. */
static void middle_main(int listener) {
    static pair pairs[PAIRS];
    int used = 0;
    for (;;) {
        struct pollfd polls[1 + 2 * PAIRS];
        polls[0].fd = listener;
        for (int i = 0; i < 2 * used; i++) polls[1 + i].fd = pairs[i / 2].fd[i % 2];
        for (int i = 0; i <= 2 * used; i++) {
            polls[i].events = POLLIN;
            polls[i].revents = 0;
        }
        if (poll(polls, (nfds_t)(1 + 2 * used), -1) < 0) continue;
        for (int i = 0; i < 2 * used; i++) {
            pair *p = &pairs[i / 2];
            if (!polls[1 + i].revents || p->fd[i % 2] < 0 || pass_on(p, i % 2)) continue;
            for (int k = 0; k < 2; k++) (void)close(p->fd[k]);
            p->fd[0] = p->fd[1] = -1; /* poll ignores such entries */
        }
        if (polls[0].revents && used < PAIRS) {
            pair *p = &pairs[used++];
            p->fd[1] = accept(listener, NULL, NULL);
            while (!get(&m->rank0_port)) sleep_ms(1); /* rank 0 has not started yet */
            p->fd[0] = dial(get(&m->rank0_port));
            p->opening[0] = 40 + 44;
            p->opening[1] = 116;
        }
    }
}

/* ------------------------------------------------------------- what the ranks do */

enum { LONG = 60000, MEDIUM = 20000, CALLS = 5, WORDS = 64 };

/* What each call gave, by rank. */
typedef struct answers {
    uint64_t hash[2][CALLS + 1];
} answers;

static answers *right;

/* An element that looks like no other bytes. */
static float known(int i) {
    return 3.14159f * (float)(i + 1);
}

static int took(job *j, tsh_result result, const void *x, int64_t n, tsh_dtype dtype) {
    if (result != TSH_OK) return 0;
    job_hash(j, x, n, dtype);
    j->steps++;
    if (m->how == NONE)
        right->hash[j->rank][j->steps] = j->hash;
    else if (right->hash[j->rank][j->steps] != j->hash)
        job_fail(j, __LINE__, "a call succeeded with other bits");
    return 1;
}

static void calls_in_the_middle(job *j) {
    static float x[LONG], y[LONG];
    static uint16_t half[LONG];
    const int other = j->rank ^ 1;
    for (int i = 0; i < LONG; i++) {
        x[i] = i < WORDS ? known(i) : element(TSH_F32, j->rank, i).f32;
        half[i] = element(TSH_BF16, j->rank, i).u16;
    }
    (void)(took(j, tsh_broadcast(&j->comm, x, MEDIUM, TSH_F32, 1), x, MEDIUM, TSH_F32) &&
           took(j, tsh_allreduce(&j->comm, x, LONG, TSH_F32, TSH_SUM), x, LONG, TSH_F32) &&
           took(j, tsh_allreduce(&j->comm, half, LONG, TSH_BF16, TSH_SUM), half, LONG, TSH_BF16) &&
           took(j, tsh_allreduce(&j->comm, x, 900, TSH_F32, TSH_SUM), x, 900, TSH_F32) &&
           took(j, tsh_sendrecv(&j->comm, x, LONG, other, y, LONG, other, TSH_F32), y, LONG,
                TSH_F32));
}

/* Makes the calls. If bytes were changed, the ranks stay until they know. */
static void rank_in_the_middle(job *j) {
    const job *other = &j->of->jobs[j->rank ^ 1];
    double until = now_ms() + 8000;
    calls_in_the_middle(j);
    job_tell(j, 1);
    (void)job_told(other, 1, 8);
    put(&m->armed, 0);
    while (get(&m->hit) && now_ms() < until && job_verdict(j) == TSH_OK) sleep_us(200);
    (void)job_verdict(j);
    job_tell(j, 2);
    (void)job_told(other, 2, 8); /* so that no rank leaves while the other still asks */
}

static void prepare_in_the_middle(job *j, tsh_uv_desc *uv) {
    if (j->rank == 0) put(&m->rank0_port, uv->port);
    if (j->rank == 1) uv->port = m->port;
    uv->timeout = 20;
    uv->heartbeat = m->how == OMIT || m->how == CUT ? 1 : 4;
}

/* One world of two ranks with somebody in the middle. says: the errors, by rank, "": none. */
static void run_in_the_middle(int encrypt, char says[2][TSH_MESSAGE_SIZE]) {
    world_desc desc = encrypted(2, rank_in_the_middle, NULL);
    int listener = listen_anywhere(&m->port);
    const char *why;
    pid_t child;
    world w;
    assert_true(listener >= 0);
    desc.uv.encrypt = encrypt;
    desc.uv.checksum = -encrypt; /* without encryption, checksums */
    desc.may_fail = 1;
    desc.prepare = prepare_in_the_middle;
    m->hit = m->rank0_port = 0;
    m->sent[0] = m->sent[1] = 0;
    child = fork();
    if (child == 0) middle_main(listener);
    assert_true(child > 0);
    (void)close(listener);
    world_start(&w, &desc);
    why = world_end(&w);
    (void)kill(child, SIGKILL);
    (void)waitpid(child, NULL, 0);
    if (why)
        fail_msg("change %d of byte %lld of rank %d: %s", m->how, (long long)m->at, m->from, why);
    for (int r = 0; r < 2; r++) {
        const job *j = &w.jobs[r];
        (void)snprintf(says[r], TSH_MESSAGE_SIZE, "%s",
                       j->opened != TSH_OK ? j->why.message : j->verdict.message);
    }
    world_free(&w);
}

/* Each change of what passes is one error, the same on both ranks, that names both ends of the
 * connection; or, where it was cut, the other rank. No call gives other bits. (What is repeated
 * behind the last byte that a rank reads has no effect.) */
static void test_changes(void **state) {
    static char says[2][TSH_MESSAGE_SIZE];
    int runs = full() ? 1000 : 20, hits = 0, of[5] = {0, 0, 0, 0, 0};
    int64_t sent[2];
    uint64_t random = 3;
    (void)state;
    m->how = NONE;
    run_in_the_middle(1, says);
    assert_string_equal(says[0], "");
    assert_string_equal(says[1], "");
    sent[0] = m->sent[0];
    sent[1] = m->sent[1];
    for (int i = 0; i < runs; i++) {
        const char *named;
        m->how = (change)(i % 2 ? FLIP : 1 + i / 2 % (CHANGES - 1));
        m->from = (int)(draw(&random) & 1);
        m->at = (int64_t)(draw(&random) % (uint64_t)sent[m->from]);
        m->random = draw(&random);
        put(&m->armed, 1);
        run_in_the_middle(1, says);
        if (!m->hit) continue; /* fewer heartbeats were sent than before */
        hits++;
        if (m->how == REPEAT && !says[0][0] && !says[1][0]) {
            of[4]++;
            continue;
        }
        if (!says[0][0] || !says[1][0] || (m->how != CUT && strcmp(says[0], says[1]) != 0))
            fail_msg("change %d of byte %lld of rank %d: \"%s\", \"%s\"", m->how, (long long)m->at,
                     m->from, says[0], says[1]);
        named = strstr(says[0], " connection of rank ");
        of[0] += named && strstr(says[0], "changes bytes: the tag of ");
        of[1] += named && strstr(says[0], "is dead");
        of[2] += strstr(says[0], " its connection while rank ") != NULL;
        of[3] += strstr(says[0], "is gone") != NULL;
        if ((m->how == FLIP || m->how == REPEAT || m->how == SWAP) &&
            !strstr(says[0], "changes bytes: the tag of "))
            fail_msg("change %d of byte %lld of rank %d: %s", m->how, (long long)m->at, m->from,
                     says[0]);
    }
    print_message("%d runs: %d changed; wrong tags %d, dead %d, closed %d, gone %d, unread %d\n",
                  runs, hits, of[0], of[1], of[2], of[3], of[4]);
    assert_true(hits >= runs * 9 / 10);
    assert_int_equal(of[0] + of[1] + of[2] + of[3] + of[4], hits);
    assert_true(of[4] <= runs / 100);
}

/* Returns 1 if what rank 1 sent contains these bytes. */
static int was_seen(const void *bytes, size_t n) {
    int64_t end = m->sent[1] < RECORDED ? m->sent[1] : RECORDED;
    for (int64_t i = 0; i + (int64_t)n <= end; i++)
        if (memcmp(&m->recorded[1][i], bytes, n) == 0) return 1;
    return 0;
}

/* Who records what passes finds a tensor in it, and the header of its frame, unless the connections
 * are encrypted. */
static void test_secrecy(void **state) {
    static char says[2][TSH_MESSAGE_SIZE];
    float tensor[2];
    uint64_t group = 1;
    (void)state;
    for (int encrypt = -1; encrypt <= 1; encrypt += 2) {
        m->how = NONE;
        run_in_the_middle(encrypt, says);
        assert_string_equal(says[0], "");
        assert_true(m->sent[1] > MEDIUM * (int64_t)sizeof(float));
        for (int i = 0; i + 1 < WORDS; i++) {
            tensor[0] = known(i);
            tensor[1] = known(i + 1);
            assert_int_equal(was_seen(tensor, sizeof tensor), encrypt < 0);
        }
        assert_int_equal(was_seen(&group, sizeof group), encrypt < 0);
    }
}

#define TEST(name) cmocka_unit_test(test_##name)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(vectors), TEST(exchange), TEST(exchange_differs), TEST(exchange_refuses),
        TEST(options), TEST(records),  TEST(changed_records),  TEST(whole),
        TEST(changes), TEST(secrecy),
    };
    m = (middle *)shared_memory(sizeof *m);
    right = (answers *)shared_memory(sizeof *right);
    if (!m || !right || sodium_init() < 0) return 1;
    (void)setenv("TSHARD_SHM", "0", 1); /* what is shared is not sent */
    return cmocka_run_group_tests_name("fault/secret", tests, NULL, NULL);
}
