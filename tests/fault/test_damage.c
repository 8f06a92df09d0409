/* Bytes that change between two ranks over TCP, in a handshake or after it: the world forms all the
 * same, or every error names both ends of the connection, and no call that succeeds has other bits.
 * What a rank sends is changed in its own process, on its way to the system. With FULL=1 there are
 * 10,000 changes of frames and control messages and 2,000 of handshakes. */
#define TSHARD_IMPLEMENTATION
#include "../../backends/tshard_backend.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

/* ------------------------------------------------------------------ what is changed */

/* One to eight bits, or bytes, are others; 8 bytes change places with the next 8; up to 8 are
 * gone. */
typedef enum change { BITS, BYTES, SWAP, DROP } change;

/* What a byte belongs to: a handshake, a control message, or a frame of data. */
enum { HANDSHAKE, CONTROL, DATA, STAGES, WIRES = 4096, WIRE_ROOM = 2 << 20 };

typedef struct damage {
    int rank;        /* that sends it; -1: none */
    int stage;       /* what it belongs to */
    int64_t at;      /* which of the bytes that the rank sends of this kind */
    change how;
    uint64_t random;
} damage;

/* Shared by the ranks of a world and the test. */
enum { CALLS = 8 };

typedef struct outcome {
    damage plan;
    int hit;                       /* 1: the change was made */
    int64_t sent[2][STAGES];       /* by rank: bytes */
    uint64_t hash[2][CALLS + 1];   /* by rank: of the bits that the calls so far gave */
} outcome;

static outcome *seen;

/* Of this process, under the lock. */
static struct {
    pthread_mutex_t lock;
    int armed;               /* 1: this rank is the one that sends the change */
    int64_t sent[STAGES];    /* bytes, of all sockets */
    int64_t of_fd[WIRES];    /* bytes sent on a socket */
    int opening[WIRES];     /* of them, those of the handshake */
    unsigned char bytes[WIRE_ROOM];
} wire = {PTHREAD_MUTEX_INITIALIZER, 0, {0}, {0}, {0}, {0}};

static uint64_t wire_draw(uint64_t *state) {
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return *state >> 33;
}

/* Changes up to 8 of the n bytes; returns how many bytes there are now. */
static size_t wire_change(unsigned char *at, size_t n, change how, uint64_t random) {
    size_t most = n < 8 ? n : 8, count = 1 + wire_draw(&random) % most;
    if (how == SWAP && n >= 16 && memcmp(at, at + 8, 8) != 0) {
        unsigned char kept[8];
        memcpy(kept, at, 8);
        memmove(at, at + 8, 8);
        memcpy(at + 8, kept, 8);
        return n;
    }
    if (how == DROP && count < n) {
        memmove(at, at + count, n - count);
        return n - count;
    }
    for (size_t i = 0; i < count; i++) /* BITS, and SWAP of what is the same */
        at[i] ^= (unsigned char)(how == BYTES ? 1 + wire_draw(&random) % 255
                                              : 1u << wire_draw(&random) % 8);
    return n;
}

/* Sends the n bytes of wire.bytes, changed from byte `at` on, whatever the socket takes at once. */
static void wire_send_changed(int fd, size_t at, size_t n, int flags) {
    size_t end = at + wire_change(wire.bytes + at, n - at, seen->plan.how, seen->plan.random);
    wire.armed = 0;
    seen->hit = 1;
    for (size_t done = 0; done < end;) {
        ssize_t now = send(fd, wire.bytes + done, end - done, flags);
        if (now < 0 && errno != EAGAIN) return;
        if (now > 0) done += (size_t)now;
    }
}

/* later: what the bytes belong to if they are not of the handshake. */
static ssize_t wire_message(int fd, const struct msghdr *message, int flags, int later) {
    const unsigned char *first = (const unsigned char *)message->msg_iov[0].iov_base;
    ssize_t n = 0;
    int64_t at;
    int stage;
    (void)pthread_mutex_lock(&wire.lock);
    for (size_t i = 0; i < (size_t)message->msg_iovlen; i++)
        n += (ssize_t)message->msg_iov[i].iov_len;
    if (!wire.of_fd[fd]) wire.opening[fd] = first[0] == 't' ? 40 + 44 : 116; /* server, client */
    stage = wire.of_fd[fd] < wire.opening[fd] ? HANDSHAKE : later;
    at = seen->plan.at - wire.sent[stage];
    if (wire.armed && stage == seen->plan.stage && at >= 0 && at < n && n <= WIRE_ROOM) {
        unsigned char *to = wire.bytes;
        for (size_t i = 0; i < (size_t)message->msg_iovlen; i++) {
            memcpy(to, message->msg_iov[i].iov_base, message->msg_iov[i].iov_len);
            to += message->msg_iov[i].iov_len;
        }
        wire_send_changed(fd, (size_t)at, (size_t)n, flags);
    } else {
        n = sendmsg(fd, message, flags);
    }
    wire.sent[stage] += n > 0 ? n : 0;
    wire.of_fd[fd] += n > 0 ? n : 0;
    (void)pthread_mutex_unlock(&wire.lock);
    return n;
}

static ssize_t wire_send(int fd, const void *bytes, size_t size, int flags) {
    struct msghdr message;
    struct iovec iov;
    memset(&message, 0, sizeof message);
    iov.iov_base = (void *)(uintptr_t)bytes;
    iov.iov_len = size;
    message.msg_iov = &iov;
    message.msg_iovlen = 1;
    return wire_message(fd, &message, flags, CONTROL);
}

static ssize_t wire_sendmsg(int fd, const struct msghdr *message, int flags) {
    return wire_message(fd, message, flags, DATA);
}

static int wire_close(int fd) {
    (void)pthread_mutex_lock(&wire.lock);
    if (fd >= 0 && fd < WIRES) wire.of_fd[fd] = 0;
    (void)pthread_mutex_unlock(&wire.lock);
    return close(fd);
}

#define send(fd, bytes, size, flags) wire_send(fd, bytes, size, flags)
#define sendmsg(fd, message, flags)  wire_sendmsg(fd, message, flags)
#define close(fd)                    wire_close(fd)
#include "../../backends/tshard_uv.h"
#undef send
#undef sendmsg
#undef close

#include "../support/processes.h"
#include "../support/collectives.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SANITIZED = 1 }; /* everything is slower */
#else
enum { SANITIZED = 0 };
#endif

/* How many runs: in make test, of which sanitizers do a quarter; or with FULL=1. */
static int runs_of(int few, int full) {
    const char *all = getenv("FULL");
    return all && all[0] == '1' ? full : SANITIZED ? few / 4 : few;
}

/* ------------------------------------------------------------------------- CRC32C */

/* One bit at a time. */
static uint32_t slow_crc(const unsigned char *at, size_t n) {
    uint32_t crc = ~UINT32_C(0);
    for (size_t i = 0; i < n; i++) {
        crc ^= at[i];
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
    }
    return ~crc;
}

/* The tables and (where the processor has it) the instruction, at all lengths that take another way
 * through the code, from any byte on, at once and in two parts. */
static void test_crc(void **state) {
    static unsigned char bytes[60000];
    static tsh_uv_world fast, slow;
    static const size_t sizes[] = {0, 1, 7, 8, 9, 63, 1535, 1536, 1537, 3100, 24575, 24576, 59000};
    uint64_t random = 42;
    (void)state;
    for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (unsigned char)wire_draw(&random);
    fast.crc_wide = tshi_uv_crc_is_wide();
    tshi_uv_crc_tables(fast.crc_table);
    tshi_uv_crc_tables(slow.crc_table);
    assert_int_equal(tshi_uv_crc(&fast, 0, "123456789", 9), 0xe3069283u); /* RFC 3720, B.4 */
    assert_int_equal(tshi_uv_crc(&slow, 0, "123456789", 9), 0xe3069283u);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (size_t from = 0; from < 8; from++) {
            const unsigned char *at = bytes + from;
            size_t n = sizes[i], part = n / 3;
            uint32_t right = slow_crc(at, n);
            assert_int_equal(tshi_uv_crc(&fast, 0, at, n), right);
            assert_int_equal(tshi_uv_crc(&slow, 0, at, n), right);
            assert_int_equal(
                tshi_uv_crc(&fast, tshi_uv_crc(&slow, 0, at, part), at + part, n - part), right);
        }
}

/* --------------------------------------------------------------------- what is run */

static world_desc checked(int ranks, rank_fn fn, const void *user) {
    world_desc desc = world_over_tcp(ranks, fn, user, 100);
    desc.uv.checksum = 1;
    return desc;
}

/* Every algorithm, at sizes of less than a block, of several, and of no whole number of them. */
static void grid_checked_rank(job *j) {
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

/* With checksums on one rank alone they are on everywhere it is an end. */
static void one_checks(job *j, tsh_uv_desc *uv) {
    uv->checksum = j->rank == 1 ? 1 : -1;
}

static void test_whole(void **state) {
    static const int ranks[] = {2, 3, SANITIZED ? 4 : 8};
    (void)state;
    for (int i = 0; i < 4; i++) {
        world_desc desc = checked(ranks[i % 3], grid_checked_rank, NULL);
        const char *why;
        world w;
        if (i == 3) desc.prepare = one_checks;
        world_start(&w, &desc);
        why = world_end(&w);
        if (why) fail_msg("%s", why);
        world_free(&w);
    }
}

enum { LONG = 60000, MEDIUM = 20000 };

/* Adds what a call gave to the rank's hash. 0: it failed. */
static int took(job *j, tsh_result result, const void *x, int64_t n, tsh_dtype dtype) {
    if (result != TSH_OK) return 0;
    job_hash(j, x, n, dtype);
    j->steps++;
    if (seen->plan.rank < 0)
        seen->hash[j->rank][j->steps] = j->hash;
    else if (seen->hash[j->rank][j->steps] != j->hash)
        job_fail(j, __LINE__, "a call succeeded with other bits");
    return 1;
}

/* Calls of every algorithm until one fails. */
static int damaged_calls(job *j, tsh_comm *group) {
    static float x[LONG], y[LONG];
    static uint16_t half[LONG];
    const int other = j->rank ^ 1;
    for (int i = 0; i < LONG; i++) {
        x[i] = element(TSH_F32, j->rank, i).f32;
        half[i] = element(TSH_BF16, j->rank, i).u16;
    }
    return took(j, tsh_allreduce(&j->comm, x, LONG, TSH_F32, TSH_SUM), x, LONG, TSH_F32) &&
           took(j, tsh_allreduce(&j->comm, half, LONG, TSH_BF16, TSH_SUM), half, LONG, TSH_BF16) &&
           took(j, tsh_allreduce(&j->comm, x, 900, TSH_F32, TSH_SUM), x, 900, TSH_F32) &&
           took(j, tsh_broadcast(&j->comm, x, MEDIUM, TSH_F32, 1), x, MEDIUM, TSH_F32) &&
           took(j, tsh_sendrecv(&j->comm, x, LONG, other, y, LONG, other, TSH_F32), y, LONG,
                TSH_F32) &&
           took(j, tsh_comm_split(&j->comm, 0, -j->rank, group), x, 1, TSH_F32) &&
           took(j, tsh_allreduce(group, x, MEDIUM, TSH_F32, TSH_SUM), x, MEDIUM, TSH_F32) &&
           took(j, tsh_barrier(group), x, 1, TSH_F32);
}

/* Makes the calls. If bytes were changed after the handshakes, the ranks stay until they know. */
static void damaged_rank(job *j) {
    tsh_comm group;
    const job *other = &j->of->jobs[j->rank ^ 1];
    double until = now_ms() + 8000;
    memset(&group, 0, sizeof group);
    (void)damaged_calls(j, &group);
    (void)pthread_mutex_lock(&wire.lock);
    wire.armed = 0; /* what is sent from here on is left alone */
    for (int s = 0; s < STAGES && seen->plan.rank < 0; s++) seen->sent[j->rank][s] = wire.sent[s];
    (void)pthread_mutex_unlock(&wire.lock);
    job_tell(j, 1);
    (void)job_told(other, 1, 8);
    while (seen->hit && seen->plan.stage != HANDSHAKE && now_ms() < until &&
           job_verdict(j) == TSH_OK)
        sleep_us(200);
    (void)job_verdict(j);
    tsh_comm_close(&group);
}

static void damaged_prepare(job *j, tsh_uv_desc *uv) {
    wire.armed = seen->plan.rank == j->rank;
    uv->timeout = 20;
    uv->heartbeat = seen->plan.how == DROP ? 1 : 4;
}

/* ----------------------------------------------------------------------- the counts */

typedef struct counts {
    int hit, formed, named, dead; /* runs: with a change; without an error; with one that names the
                                     connection: as changing bytes, or (dropped bytes) as dead */
} counts;

/* One world of two ranks with this change. */
static void damaged_run(counts *c, damage plan) {
    world_desc desc = checked(2, damaged_rank, NULL);
    const char *why, *says[2];
    int errors = 0;
    world w;
    seen->plan = plan;
    seen->hit = 0;
    desc.may_fail = 1;
    desc.prepare = damaged_prepare;
    world_start(&w, &desc);
    why = world_end(&w);
    if (why) fail_msg("%s", why);
    for (int r = 0; r < 2; r++) {
        const job *j = &w.jobs[r];
        says[r] = j->opened != TSH_OK ? j->why.message : j->verdict.message;
        errors += says[r][0] != 0;
        if (says[r][0] && !strstr(says[r], " connection of rank "))
            fail_msg("rank %d of a change (stage %d, byte %lld of rank %d): %s", r, plan.stage,
                     (long long)plan.at, plan.rank, says[r]);
    }
    if (errors == 1 || (errors && strcmp(says[0], says[1]) != 0))
        fail_msg("byte %lld of rank %d: \"%s\", \"%s\"", (long long)plan.at, plan.rank, says[0],
                 says[1]);
    c->hit += seen->hit;
    c->formed += seen->hit && !errors;
    c->named += errors && strstr(says[0], "changes bytes");
    c->dead += errors && strstr(says[0], "is dead");
    world_free(&w);
}

/* `runs` changes of this stage, of kinds `first` to `last`, after a run that counts the bytes. */
static counts damaged_runs(int stage, int runs, change first, change last, uint64_t random) {
    counts c;
    damage plan = {-1, stage, 0, BITS, 0};
    memset(&c, 0, sizeof c);
    damaged_run(&c, plan);
    for (int i = 0; i < runs; i++) {
        int64_t sent;
        plan.rank = (int)(wire_draw(&random) & 1);
        sent = seen->sent[plan.rank][stage];
        assert_true(sent > 0);
        plan.how = (change)((int)first + i % (1 + (int)last - (int)first));
        plan.at = (int64_t)(wire_draw(&random) % (uint64_t)sent);
        plan.random = wire_draw(&random);
        damaged_run(&c, plan);
    }
    print_message("%d runs: %d changed, %d without an error, %d named, %d dead\n", runs, c.hit,
                  c.formed, c.named, c.dead);
    return c;
}

static void test_handshakes(void **state) {
    counts c = damaged_runs(HANDSHAKE, runs_of(40, 2000), BITS, BYTES, 1);
    (void)state;
    assert_int_equal(c.formed + c.named, c.hit);
}

/* Every change is found. */
static void test_frames(void **state) {
    int runs = runs_of(160, 9000);
    counts c = damaged_runs(DATA, runs, BITS, SWAP, 2);
    (void)state;
    assert_int_equal(c.named, c.hit);
    assert_int_equal(c.hit, runs);
}

static void test_control(void **state) {
    int runs = runs_of(40, 1000);
    counts c = damaged_runs(CONTROL, runs, BITS, SWAP, 3);
    (void)state;
    assert_int_equal(c.named, c.hit);
    assert_true(c.hit >= runs * 3 / 4); /* how many beats are sent depends on the time */
}

/* One to eight bytes never arrive: what follows them has a wrong checksum, or nothing follows. */
static void test_dropped(void **state) {
    counts c = damaged_runs(DATA, runs_of(4, 200), DROP, DROP, 3);
    (void)state;
    assert_int_equal(c.named + c.dead, c.hit);
}

#define TEST(name) cmocka_unit_test(test_##name)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(crc), TEST(whole), TEST(handshakes), TEST(frames), TEST(control),
        TEST(dropped),
    };
    seen = (outcome *)shared_memory(sizeof *seen);
    if (!seen) return 1;
    (void)setenv("TSHARD_SHM", "0", 1); /* shared memory sends no bytes that could change */
    return cmocka_run_group_tests_name("fault/damage", tests, NULL, NULL);
}
