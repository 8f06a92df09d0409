/* The TCP backend, with ranks as processes: what every backend passes, the same bits as threads,
 * and how a world forms and ends. `make faults` measures the same things at length. */
/* run: alone */
#include "../../backends/tshard_threads.h"
#include "../../backends/tshard_uv.h"

#include "../support/processes.h"
#include "../support/collectives.h"
#include "../support/comm_tests.h"
#include "../support/logs.h"

#include <poll.h>
#include <sys/stat.h> /* mkfifo */
#include <sys/time.h> /* struct timeval */

static world_desc tcp_desc(int ranks, rank_fn fn, const void *user) {
    return world_of(comm_way, ranks, fn, user, 30);
}

static void barrier_rank(job *j) {
    CHECK(tsh_barrier(&j->comm) == TSH_OK);
}

/* --------------------------------------------------------------- the same bits */

static void sizes_rank(job *j) {
    static const int64_t counts[] = {100000, 1000000};
    grid_case c;
    memset(&c, 0, sizeof c);
    for (int n = 0; n < 2; n++) {
        c.count = counts[n];
        c.in_place = !c.in_place;
        c.dtype = n ? TSH_F32 : TSH_I64;
        c.op = n ? TSH_AVG : TSH_MIN;
        grid_allreduce(j, c);
        c.blocks = 1 + n;
        c.count /= j->ranks;
        grid_reduce_scatter(j, c);
        grid_allgather(j, c);
        c.count /= j->ranks;
        grid_alltoall(j, c);
        grid_broadcast(j, c);
        grid_pairwise(j, c);
    }
}

/* Sums of 16-bit floats, long enough to go in pieces: more than a row of scratch, in place, of
 * uneven pieces, and several at once. */
static void short_sizes_rank(job *j) {
    uint16_t *x[4];
    tsh_req req[4];
    grid_case c;
    memset(&c, 0, sizeof c);
    for (int n = 0; n < 4; n++) {
        c.count = n < 2 ? 100001 : 150000 * j->ranks;
        c.in_place = n % 2;
        c.dtype = n == 1 ? TSH_F16 : TSH_BF16;
        c.op = n == 2 ? TSH_AVG : TSH_SUM;
        if (n < 2 || j->ranks < 8) grid_allreduce(j, c);
        c.blocks = 1 + n % 2;
        c.count /= j->ranks;
        grid_reduce_scatter(j, c);
    }
    for (int i = 0; i < 4; i++) {
        x[i] = (uint16_t *)filled(j, TSH_BF16, j->rank, 60000 + i);
        CHECK(tsh_allreduce_start(&j->comm, x[i], 60000 + i, TSH_BF16, TSH_SUM, &req[i]) == TSH_OK);
    }
    for (int n = 0; n < 4; n++) CHECK(tsh_wait(&j->comm, req[(n + j->rank) % 4]) == TSH_OK);
    for (int i = 0; i < 4; i++) {
        int64_t chunk = (60000 + i + j->ranks - 1) / j->ranks, wrong = 0;
        for (int64_t e = 0; e < 60000 + i; e++)
            wrong += !same(TSH_BF16, x[i], e,
                           ordered(TSH_BF16, TSH_SUM, j->ranks, (int)(e / chunk), e));
        CHECK(wrong == 0);
        job_give(j, x[i]);
    }
}

static void test_short_sizes(void **state) {
    static const int ranks[] = {2, 3, 4, 8};
    (void)state;
    for (int i = 0; i < 4; i++) world_run(ranks[i], short_sizes_rank, NULL);
}

static void test_sizes(void **state) {
    static const int ranks[] = {1, 2, 3, 4, 8};
    (void)state;
    for (int i = 0; i < 5; i++) world_run(ranks[i], sizes_rank, NULL);
}

static void test_soak(void **state) {
    static const int ranks[] = {2, 3, 4, 8};
    (void)state;
    for (int i = 0; i < 4; i++) {
        soak_plan plan = {(uint64_t)i, 200, 0};
        world_run(ranks[i], soak_rank, &plan);
    }
}

static void test_same_as_threads(void **state) {
    (void)state;
    for (int ranks = 2; ranks <= 5; ranks++) {
        world_way way = comm_way;
        uint64_t hash;
        world_run(ranks, repeat_rank, NULL);
        hash = jobs[0].hash;
        assert_true(hash != 0);
        comm_way = WORLD_THREADS;
        world_run(ranks, repeat_rank, NULL);
        comm_way = way;
        for (int r = 0; r < ranks; r++) assert_int_equal(jobs[r].hash, hash);
    }
}

/* A step of a small bf16 network, column- and row-parallel: what it gives, hashed. */
static void half_model_rank(job *j) {
    const tsh_layout cut[] = {tsh_sharded(0), tsh_sharded(1)};
    uint16_t values[40 * 24];
    tsh_tensor *x, *w[2], *y;
    tsh_desc desc;
    tsh_ctx *ctx;
    memset(&desc, 0, sizeof desc);
    desc.tp = j->ranks;
    desc.comm = j->comm;
    memset(&j->comm, 0, sizeof j->comm); /* the ctx closes it */
    CHECK(tsh_open(&desc, &ctx) == TSH_OK);
    for (int64_t i = 0; i < 40 * 24; i++) values[i] = element(TSH_BF16, 5, i).u16;
    x = tsh_tensor_new(ctx, TSH_BF16, tsh_shape2(40, 24), tsh_replicated());
    CHECK(tsh_write(ctx, x, TSH_GLOBAL, values, sizeof values) == TSH_OK);
    for (int i = 0; i < 2; i++) {
        w[i] = tsh_tensor_new(ctx, TSH_BF16, tsh_shape2(24, 24), cut[i]);
        CHECK(tsh_write(ctx, w[i], TSH_GLOBAL, values + 99 * (i + 1), sizeof(uint16_t) * 576) ==
              TSH_OK);
        tsh_requires_grad(w[i], 1);
    }
    tsh_requires_grad(x, 1);
    y = tsh_linear(tsh_linear(tsh_scale(x, 0.3), w[0], NULL), w[1], NULL);
    y = tsh_sum(tsh_mul(y, y), TSH_ALL, 0);
    CHECK(tsh_backward(ctx, y) == TSH_OK);
    j->hash = mix(tsh_hash(ctx, tsh_grad(x)));
    for (int i = 0; i < 2; i++) j->hash = mix(j->hash + tsh_hash(ctx, tsh_grad(w[i])));
    CHECK(tsh_ok(ctx));
    tsh_close(ctx);
}

static void test_half_as_threads(void **state) {
    (void)state;
    for (int ranks = 2; ranks <= 4; ranks++) {
        world_way way = comm_way;
        uint64_t hash;
        world_run(ranks, half_model_rank, NULL);
        hash = jobs[0].hash;
        assert_true(hash != 0);
        comm_way = WORLD_THREADS;
        world_run(ranks, half_model_rank, NULL);
        comm_way = way;
        for (int r = 0; r < ranks; r++) assert_int_equal(jobs[r].hash, hash);
    }
}

/* ---------------------------------------------------------------- ranks that go */

/* Every rank but `but` learnt this, in one sentence. */
static void assert_survivors(const world *w, int but, tsh_result code, int rank) {
    int first = but == 0;
    for (int r = 0; r < w->desc.ranks; r++) {
        const tsh_error *v = &w->jobs[r].verdict;
        if (r == but) continue;
        if (v->code != code || v->rank != rank)
            fail_msg("rank %d got %s of rank %d: %s", r, tsh_result_name(v->code), v->rank,
                     v->message);
        assert_string_equal(v->message, w->jobs[first].verdict.message);
    }
}

static void kill_one(int ranks, int victim, doing what) {
    doing_plan plan = {what, 30000};
    world_desc desc = tcp_desc(ranks, until_error_rank, &plan);
    int64_t killed;
    world *w;
    w = world_begin(&desc);
    assert_true(world_steps(w, 3, -1, 20));
    killed = world_signal(w, victim, SIGKILL);
    world_finish();
    assert_survivors(w, victim, TSH_ERR_LOST, victim);
    for (int r = 0; r < ranks; r++)
        if (r != victim) assert_true((double)(w->jobs[r].at - killed) / 1e6 < LIMIT_MS);
}

static void test_kill(void **state) {
    (void)state;
    for (int what = 0; what < DOINGS; what++) {
        kill_one(2, what % 2, (doing)what);
        kill_one(4, what, (doing)what);
    }
}

/* A stopped rank is dead after the heartbeat; when it wakes up it may not go on. */
static void stopped_rank(job *j) {
    until_error_rank(j);
    CHECK(job_told(j, 1, 20)); /* survivors stay */
}

static void test_stop(void **state) {
    doing_plan plan = {ALLREDUCE, 1000};
    world_desc desc = tcp_desc(3, stopped_rank, &plan);
    world *w;
    int64_t stopped;
    (void)state;
    desc.uv.heartbeat = 1;
    w = world_begin(&desc);
    assert_true(world_steps(w, 3, -1, 20));
    stopped = world_signal(w, 1, SIGSTOP);
    for (int i = 0; i < 5000 && !(w->jobs[0].at && w->jobs[2].at); i++) sleep_ms(1);
    (void)world_signal(w, 1, SIGCONT);
    for (int i = 0; i < 5000 && !w->jobs[1].at; i++) sleep_ms(1);
    world_tell(w, 1);
    world_finish();
    assert_survivors(w, 1, TSH_ERR_LOST, 1);
    assert_true((double)(w->jobs[0].at - stopped) / 1e6 < 1000 + LIMIT_MS);
    assert_int_equal(w->jobs[1].verdict.code, TSH_ERR_LOST);
}

/* Exits without closing anything, or closes while the others are inside a call. */
static void leaver_rank(job *j) {
    const int *closes = (const int *)j->user;
    float x[100] = {0};
    CHECK(tsh_barrier(&j->comm) == TSH_OK);
    if (j->rank == 1) {
        sleep_ms(50);
        j->at = now_ns();
        if (!*closes) _exit(0);
        return;
    }
    CHECK(tsh_allreduce(&j->comm, x, 100, TSH_F32, TSH_SUM) == TSH_ERR_LOST);
    (void)job_verdict(j);
}

static void test_exit(void **state) {
    (void)state;
    for (int closes = 0; closes < 2; closes++) {
        world_run(4, leaver_rank, &closes);
        assert_survivors(&world_last, 1, TSH_ERR_LOST, 1);
        for (int r = 0; r < 4; r++) assert_true((double)(jobs[r].at - jobs[1].at) / 1e6 < LIMIT_MS);
    }
}

/* A rank that comes back after a while to wait for what nobody sends wakes up when time is up. */
static void lonely_rank(job *j) {
    float x = 0;
    tsh_coll coll = tsh_coll_make(TSH_RECV, TSH_F32);
    tsh_req req;
    sleep_ms(200);
    coll.recv = &x;
    coll.count = 1;
    coll.recv_from = 1;
    coll.timeout_ns = 300000000;
    j->ms = now_ms();
    if (j->rank == 0) {
        CHECK(tsh_start(&j->comm, &coll, &req) == TSH_OK);
        CHECK(tsh_wait(&j->comm, req) == TSH_ERR_TIMEOUT);
    }
    for (int i = 0; i < 2000 && job_verdict(j) == TSH_OK; i++) sleep_ms(1);
    j->ms = now_ms() - j->ms;
}

static void test_lonely(void **state) {
    (void)state;
    world_run(2, lonely_rank, NULL);
    assert_verdict(2, TSH_ERR_TIMEOUT, 1);
    for (int r = 0; r < 2; r++) assert_true(jobs[r].ms >= 290 && jobs[r].ms < 300 + LIMIT_MS);
}

/* A local error of one rank is told to those inside a collective. */
static void shape_rank(job *j) {
    tsh_desc desc;
    tsh_ctx *ctx = NULL;
    memset(&desc, 0, sizeof desc);
    desc.comm = j->comm;
    memset(&j->comm, 0, sizeof j->comm); /* the ctx closes it */
    CHECK(tsh_open(&desc, &ctx) == TSH_OK);
    if (j->rank == 1)
        (void)tsh_matmul(tsh_ones(ctx, tsh_shape2(2, 3)), tsh_ones(ctx, tsh_shape2(2, 3)));
    for (int i = 0; i < 3 && tsh_ok(ctx); i++) (void)tsh_barrier(tsh_world(ctx));
    CHECK(!tsh_ok(ctx));
    j->verdict = *tsh_last_error(ctx);
    tsh_close(ctx);
}

static void test_local_error(void **state) {
    (void)state;
    world_run(3, shape_rank, NULL);
    for (int r = 0; r < 3; r++) {
        assert_int_equal(jobs[r].verdict.code, TSH_ERR_SHAPE);
        assert_int_equal(jobs[r].verdict.rank, 1);
    }
    assert_string_equal(jobs[0].verdict.message, jobs[2].verdict.message);
    assert_non_null(strstr(jobs[0].verdict.message, "tsh_matmul"));
}

/* --------------------------------------------------------------------- joining */

static void absent_prepare(job *j, tsh_uv_desc *uv) {
    uv->timeout = 0.5;
    if (j->rank >= 2) exit(0);
}

static void test_absent(void **state) {
    world_desc desc = tcp_desc(4, barrier_rank, NULL);
    (void)state;
    desc.may_fail = 1;
    desc.prepare = absent_prepare;
    world_run_desc(&desc);
    for (int r = 0; r < 2; r++) {
        assert_int_equal(jobs[r].opened, TSH_ERR_TIMEOUT);
        assert_int_equal(jobs[r].why.code, TSH_ERR_TIMEOUT);
        assert_int_equal(jobs[r].why.rank, 2);
        assert_non_null(strstr(jobs[r].why.message, "absent ranks: 2 3"));
        assert_true((double)(jobs[r].opened_at - world_last.began) / 1e6 < 500 + LIMIT_MS);
    }
}

/* Rank 0 is absent: the others say so, and where they looked. */
static void rank0_prepare(job *j, tsh_uv_desc *uv) {
    uv->timeout = 1; /* also on a busy machine long enough for one refused connection */
    if (j->rank == 0) exit(0);
}

static void test_absent_first(void **state) {
    world_desc desc = tcp_desc(3, barrier_rank, NULL);
    char port[16];
    (void)state;
    desc.may_fail = 1;
    desc.prepare = rank0_prepare;
    world_run_desc(&desc);
    (void)snprintf(port, sizeof port, ":%d", world_last.port);
    for (int r = 1; r < 3; r++) {
        assert_int_equal(jobs[r].opened, TSH_ERR_TIMEOUT);
        assert_int_equal(jobs[r].why.rank, -1); /* it may as well be this rank that is late */
        if (!strstr(jobs[r].why.message, port) ||
            !strstr(jobs[r].why.message, "did not reach rank 0 in 1.0 s: nobody listens at ") ||
            !strstr(jobs[r].why.message, "or its world is complete already"))
            fail_msg("%s", jobs[r].why.message);
    }
}

/* Which rank comes late, and what the ranks that know of it then have in their logs. */
typedef struct late_case {
    int late;      /* -1: none */
    double notice; /* see tsh_uv_desc */
    const char *says;
} late_case;

static log_lines late_log; /* of this process */

static void late_prepare(job *j, tsh_uv_desc *uv) {
    const late_case *c = (const late_case *)j->user;
    uv->logger.log = log_keep;
    uv->logger.user = &late_log;
    uv->notice = c->notice;
    if (j->rank == c->late) sleep_ms(1500);
}

static void late_rank_0_to_2(job *j) {
    const late_case *c = (const late_case *)j->user;
    int told = c->late == 0 ? j->rank > 0 : c->late > 0 && c->notice > 0 && j->rank == 0;
    if (c->late < 0) sleep_ms(700); /* nor later */
    CHECK(tsh_barrier(&j->comm) == TSH_OK);
    CHECK(late_log.count == told);
    for (int i = 0; i < told; i++) CHECK(strstr(late_log.line[0], c->says));
}

/* A world that is not complete after a while says once who is absent, and goes on waiting. */
static void test_notice(void **state) {
    static const late_case cases[] = {
        {-1, 0.5, ""},
        {2, -1, ""}, /* never */
        {2, 0, ""},  /* after 10 s */
        {2, 0.5,
         "the world of 3 ranks is not complete after 0.5 s; absent ranks: 2; waiting until 30 s "
         "are over (TSHARD_TIMEOUT)"},
        {1, 0.5,
         "the world of 3 ranks is not complete after 0.5 s; absent ranks: 1; waiting until "},
        {0, 0.5, " of 3 did not reach rank 0 in 0.5 s"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        world_desc desc = tcp_desc(3, late_rank_0_to_2, &cases[i]);
        desc.prepare = late_prepare;
        world_run_desc(&desc);
    }
}

typedef enum intruder { WRONG_KEY, WRONG_JOB, WRONG_SIZE, TWICE, INTRUDERS } intruder;

/* A world of three, whose rank 2 comes late; the test's rank 3 is the intruder, before that. */
static void intruder_prepare(job *j, tsh_uv_desc *uv) {
    intruder what = *(const intruder *)j->user;
    uv->size = 3;
    uv->timeout = j->rank == 3 ? 2 : 10;
    if (j->rank == 2) CHECK(job_told(j, 1, 5));
    if (j->rank < 3) return;
    sleep_ms(200); /* rank 1 is there */
    uv->rank = what == TWICE ? 1 : 2;
    if (what == WRONG_KEY) uv->key = "a key of all tesus";
    if (what == WRONG_JOB) uv->job = "another job";
    if (what == WRONG_SIZE) uv->size = 4;
}

static void test_intruders(void **state) {
    static const tsh_result codes[] = {TSH_ERR_TIMEOUT, TSH_ERR_TIMEOUT, TSH_ERR_ARGUMENT,
                                       TSH_ERR_ARGUMENT};
    (void)state;
    for (int i = 0; i < INTRUDERS; i++) {
        intruder what = (intruder)i;
        world_desc desc = tcp_desc(4, barrier_rank, &what);
        world *w;
        desc.may_fail = 1;
        desc.prepare = intruder_prepare;
        w = world_begin(&desc);
        for (int n = 0; n < 4000 && !w->jobs[3].opened_at; n++) sleep_ms(1);
        world_tell(w, 1);
        world_finish();
        for (int r = 0; r < 3; r++)
            if (w->jobs[r].opened != TSH_OK)
                fail_msg("intruder %d kept rank %d out: %s", i, r, w->jobs[r].why.message);
        if (w->jobs[3].opened != codes[i])
            fail_msg("intruder %d got %s: %s", i, tsh_result_name(w->jobs[3].opened),
                     w->jobs[3].why.message);
        if (what == WRONG_KEY && !strstr(w->jobs[3].why.message, "do not have the same key"))
            fail_msg("%s", w->jobs[3].why.message);
        if (strstr(w->jobs[3].why.message, "a key of")) fail_msg("%s", w->jobs[3].why.message);
    }
}

/* Strangers come while rank 1 is awaited; the log says from where. */
static void stranger_log(const char *message, void *user) {
    job *j = (job *)user;
    j->figure[0] += strstr(message, "127.0.0.1") != NULL;
}

static void stranger_prepare(job *j, tsh_uv_desc *uv) {
    uv->logger.log = stranger_log;
    uv->logger.user = j;
    if (j->rank == 1) CHECK(job_told(j, 1, 10));
}

static void stranger_visit(int port, const char *words, size_t size) {
    struct sockaddr_in address;
    struct timeval limit = {0, 200000};
    char answer[256];
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_port = htons((uint16_t)port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    assert_int_equal(connect(fd, (struct sockaddr *)&address, sizeof address), 0);
    (void)setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    (void)send(fd, words, size, MSG_NOSIGNAL);
    (void)recv(fd, answer, sizeof answer, 0);
    (void)close(fd);
}

static void test_strangers(void **state) {
    static const char hello[] = "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03";
    static const char get[] = "GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n";
    world_desc desc = tcp_desc(3, barrier_rank, NULL);
    world *w;
    char noise[300];
    (void)state;
    for (int i = 0; i < 300; i++) noise[i] = (char)mix((uint64_t)i);
    desc.prepare = stranger_prepare;
    w = world_begin(&desc);
    stranger_visit(w->port, "", 0);
    stranger_visit(w->port, "x", 1);
    stranger_visit(w->port, get, sizeof get - 1);
    stranger_visit(w->port, hello, sizeof hello - 1);
    stranger_visit(w->port, noise, sizeof noise);
    world_tell(w, 1);
    world_finish();
    assert_true(w->jobs[0].figure[0] >= 1);
}

/* Rank 0's port belongs to somebody without the key first, who refuses rank 1 in every way that
 * needs no proof: rank 1 logs it and joins once rank 0 is there. */
static void impostor_prepare(job *j, tsh_uv_desc *uv) {
    uv->logger.log = stranger_log;
    uv->logger.user = j;
    if (j->rank == 0) CHECK(job_told(j, 1, 10));
}

static void impostor_answers(int listener, const char *greeting, int status) {
    char words[128] = {0};
    struct timeval limit = {5, 0};
    int fd = accept(listener, NULL, NULL);
    assert_true(fd >= 0);
    (void)setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    (void)send(fd, greeting, 40, MSG_NOSIGNAL);
    (void)recv(fd, words, 116, MSG_WAITALL);
    memset(words, 0, sizeof words);
    words[0] = (char)status;
    (void)send(fd, words, 44, MSG_NOSIGNAL);
    (void)close(fd);
}

static void test_impostor(void **state) {
    /* the version, then a share: the standard generator of ristretto255 (RFC 9496, A.1) */
    static const char right[41] =
        "tshd\x04\x00\x73\x74"
        "\xe2\xf2\xae\x0a\x6a\xbc\x4e\x71\xa8\x84\xa9\x61\xc5\x00\x51\x5f"
        "\x58\xe3\x0b\x6a\xa5\x82\xdd\x8d\xb6\xa6\x59\x45\xe0\x8d\x2d\x76";
    static const char other[40] = "tshd\x01\x00\x73\x74";
    world_desc desc = tcp_desc(2, barrier_rank, NULL);
    struct timeval limit = {10, 0};
    struct sockaddr_in address;
    int one = 1, listener;
    world *w;
    (void)state;
    desc.prepare = impostor_prepare;
    desc.unbound = 1;
    w = world_begin(&desc);
    listener = socket(AF_INET, SOCK_STREAM, 0); /* no rank inherits it */
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_port = htons((uint16_t)w->port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    (void)setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    (void)setsockopt(listener, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    assert_int_equal(bind(listener, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(listen(listener, 8), 0);
    for (int status = 0; status < 8; status++) impostor_answers(listener, right, status);
    impostor_answers(listener, other, 0);
    (void)close(listener);
    world_tell(w, 1);
    world_finish();
    assert_true(w->jobs[1].figure[0] >= 1);
}

/* ------------------------------------------------- a distant rank in a crowd */

enum { FAR_PAIRS = 32, FAR_CHUNKS = 256, FAR_BYTES = 2048, FAR_MS = 50, CROWD_HELD = 700 };

/* Between rank 1 and rank 0: whatever one says reaches the other 50 ms later. */
typedef struct far_proxy {
    int listener, target, pairs, count, over; /* over: atomic */
    struct pollfd p[2 * FAR_PAIRS + 1];
    struct {
        double due;
        int to;
        ssize_t size; /* 0: the end */
        char bytes[FAR_BYTES];
    } chunk[FAR_CHUNKS]; /* oldest first */
} far_proxy;

static int far_connect(int port) {
    struct sockaddr_in address;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_port = htons((uint16_t)port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    (void)fcntl(fd, F_SETFL, O_NONBLOCK);
    if (connect(fd, (struct sockaddr *)&address, sizeof address) == 0 || errno == EINPROGRESS)
        return fd;
    if (fd >= 0) (void)close(fd);
    return -1;
}

static void far_deliver(far_proxy *x) {
    int n = 0;
    for (; n < x->count && x->chunk[n].due <= now_ms(); n++) {
        int fd = x->p[x->chunk[n].to].fd;
        if (fd >= 0 && x->chunk[n].size)
            (void)send(fd, x->chunk[n].bytes, (size_t)x->chunk[n].size, MSG_NOSIGNAL);
        else if (fd >= 0)
            (void)shutdown(fd, SHUT_RDWR);
    }
    x->count -= n;
    memmove(x->chunk, x->chunk + n, (size_t)x->count * sizeof x->chunk[0]);
}

static void *far_main(void *argument) {
    far_proxy *x = (far_proxy *)argument;
    for (int i = 0; i <= 2 * FAR_PAIRS; i++) {
        x->p[i].fd = -1;
        x->p[i].events = POLLIN;
    }
    x->p[2 * FAR_PAIRS].fd = x->listener;
    while (!__atomic_load_n(&x->over, __ATOMIC_SEQ_CST)) {
        (void)poll(x->p, 2 * FAR_PAIRS + 1, 2);
        far_deliver(x);
        if (x->p[2 * FAR_PAIRS].revents && x->pairs < FAR_PAIRS) {
            x->p[2 * x->pairs].fd = accept(x->listener, NULL, NULL);
            x->p[2 * x->pairs++ + 1].fd = far_connect(x->target);
        }
        for (int i = 0; i < 2 * x->pairs && x->count < FAR_CHUNKS; i++) {
            if (x->p[i].fd < 0 || !x->p[i].revents) continue;
            x->chunk[x->count].to = i ^ 1;
            x->chunk[x->count].due = now_ms() + FAR_MS;
            x->chunk[x->count].size = recv(x->p[i].fd, x->chunk[x->count].bytes, FAR_BYTES, 0);
            if (x->chunk[x->count].size <= 0) {
                x->chunk[x->count].size = 0;
                (void)close(x->p[i].fd);
                x->p[i].fd = -1;
            }
            x->count++;
        }
    }
    for (int i = 0; i < 2 * x->pairs; i++)
        if (x->p[i].fd >= 0) (void)close(x->p[i].fd);
    return NULL;
}

/* 5,000 silent connections a second, until the process is killed, for at most 12 s. */
static void crowd_main(int port) {
    static int held[CROWD_HELD];
    struct linger reset = {1, 0};
    double begin = now_ms();
    for (int made = 0; now_ms() - begin < 12e3; made++) {
        int *at = &held[made % CROWD_HELD];
        if (made >= CROWD_HELD && *at >= 0) {
            (void)setsockopt(*at, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
            (void)close(*at);
        }
        *at = far_connect(port);
        while (made >= (now_ms() - begin) * 5) sleep_us(200);
    }
    _exit(0);
}

static void crowd_prepare(job *j, tsh_uv_desc *uv) {
    uv->logger.log = stranger_log;
    uv->logger.user = j;
    if (j->rank == 0) return;
    uv->port = *(const int *)j->user;
    CHECK(job_told(j, 1, 10));
    j->figure[1] = (uint64_t)now_ns();
}

/* A rank 100 ms away has the key; strangers come 5,000 times a second. */
static void test_crowd(void **state) {
    static far_proxy x;
    int port = 0;
    world_desc desc = tcp_desc(2, barrier_rank, &port);
    pthread_t thread;
    double ms;
    pid_t crowd;
    world *w;
    (void)state;
    memset(&x, 0, sizeof x);
    x.listener = listen_anywhere(&port);
    desc.prepare = crowd_prepare;
    desc.may_fail = 1;
    desc.uv.timeout = 10;
    w = world_begin(&desc);
    x.target = w->port;
    crowd = fork();
    if (crowd == 0) crowd_main(w->port);
    assert_int_equal(pthread_create(&thread, NULL, far_main, &x), 0);
    sleep_ms(500);
    world_tell(w, 1);
    for (int i = 0; i < 11000 && !w->jobs[1].opened_at; i++) sleep_ms(1);
    (void)kill(crowd, SIGKILL);
    (void)waitpid(crowd, NULL, 0);
    world_finish();
    __atomic_store_n(&x.over, 1, __ATOMIC_SEQ_CST);
    (void)pthread_join(thread, NULL);
    (void)close(x.listener);
    ms = (double)(w->jobs[1].opened_at - (int64_t)w->jobs[1].figure[1]) / 1e6;
    print_message("in after %.0f ms, %d lines logged\n", ms, (int)w->jobs[0].figure[0]);
    if (w->jobs[1].opened != TSH_OK || ms > 5000)
        fail_msg("after %.0f ms: %s", ms, w->jobs[1].why.message);
    assert_in_range(w->jobs[0].figure[0], 1, 15);
}

/* ------------------------------------------------------------------ environment */

typedef struct environment {
    const char *rank, *size, *host, *port; /* names of variables */
    const char *more;                      /* NAME=value */
    int port_offset;
} environment;

static void set_number(const char *name, int n) {
    char text[16];
    (void)snprintf(text, sizeof text, "%d", n);
    (void)setenv(name, text, 1);
}

static void environment_rank(job *j) {
    const environment *e = (const environment *)j->user;
    int64_t sum = j->rank;
    tsh_uv_desc uv;
    memset(&uv, 0, sizeof uv);
    uv.error = &j->why;
    set_number(e->rank, j->rank);
    set_number(e->size, j->ranks);
    set_number(e->port, j->of->port - e->port_offset);
    if (e->host) (void)setenv(e->host, "127.0.0.1", 1);
    if (e->more) {
        char name[64];
        (void)snprintf(name, sizeof name, "%s", e->more);
        *strchr(name, '=') = 0;
        (void)setenv(name, strchr(e->more, '=') + 1, 1);
    }
    (void)setenv("TSHARD_TIMEOUT", "10", 1);
    if (tsh_uv_open(&uv, &j->comm) != TSH_OK) job_fail(j, __LINE__, j->why.message);
    CHECK(j->comm.rank == j->rank && j->comm.size == j->ranks);
    CHECK(tsh_allreduce(&j->comm, &sum, 1, TSH_I64, TSH_SUM) == TSH_OK);
    CHECK(sum == (int64_t)j->ranks * (j->ranks - 1) / 2);
}

static void test_environment(void **state) {
    static const environment rows[] = {
        {"TSHARD_RANK", "TSHARD_SIZE", "TSHARD_HOST", "TSHARD_PORT",
         "TSHARD_KEY=0123456789abcdef", 0},
        {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", NULL, 0},
        {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE=True",
         1},
        {"SLURM_PROCID", "SLURM_NTASKS", NULL, "TSHARD_PORT", "SLURM_JOB_NODELIST=localhost", 0},
    };
    (void)state;
    for (int i = 0; i < 4; i++) {
        world_desc desc = tcp_desc(3, environment_rank, &rows[i]);
        desc.by_itself = desc.unbound = 1;
        world_run_desc(&desc);
    }
}

/* The launcher's way: rank 0 is given a listening socket. */
static void listener_rank(job *j) {
    tsh_uv_desc uv;
    memset(&uv, 0, sizeof uv);
    uv.error = &j->why;
    set_number("TSHARD_RANK", j->rank);
    set_number("TSHARD_SIZE", j->ranks);
    set_number("TSHARD_PORT", j->of->port);
    if (j->rank == 0) set_number("TSHARD_LISTENER", j->of->listener);
    (void)setenv("RANK", "7", 1); /* TSHARD_* goes before */
    if (tsh_uv_open(&uv, &j->comm) != TSH_OK) job_fail(j, __LINE__, j->why.message);
    CHECK(j->comm.rank == j->rank && tsh_barrier(&j->comm) == TSH_OK);
}

static void test_listener(void **state) {
    world_desc desc = tcp_desc(3, listener_rank, NULL);
    (void)state;
    desc.by_itself = 1;
    world_run_desc(&desc);
}

/* Without any variable: a world of one. */
static void alone_rank(job *j) {
    float x = 3;
    CHECK(tsh_uv_open(NULL, &j->comm) == TSH_OK);
    CHECK(j->comm.rank == 0 && j->comm.size == 1);
    CHECK(tsh_allreduce(&j->comm, &x, 1, TSH_F32, TSH_SUM) == TSH_OK && x == 3);
}

static void test_alone(void **state) {
    world_desc desc = tcp_desc(1, alone_rank, NULL);
    (void)state;
    desc.by_itself = 1;
    world_run_desc(&desc);
}

/* A rank that was started with some of 0 to 2 closed. They are devices when it has joined, and no
 * socket that it opens later gets their numbers. */
static void closed_prepare(job *j, tsh_uv_desc *uv) {
    int closed = *(const int *)j->user;
    (void)uv;
    for (int fd = 0; fd < 3; fd++)
        if (closed >> fd & 1) (void)close(fd);
}

static void closed_rank(job *j) {
    struct stat info;
    tsh_comm group;
    CHECK(tsh_comm_split(&j->comm, 0, 0, &group) == TSH_OK && tsh_barrier(&group) == TSH_OK);
    for (int fd = 0; fd < 3; fd++)
        if (*(const int *)j->user >> fd & 1) CHECK(fstat(fd, &info) == 0 && S_ISCHR(info.st_mode));
    tsh_comm_close(&group);
}

static void test_closed_standard(void **state) {
    (void)state;
    for (int closed = 1; closed < 8; closed += closed == 1 ? 3 : 1) {
        world_desc desc = tcp_desc(2, closed_rank, &closed);
        desc.prepare = closed_prepare;
        world_run_desc(&desc);
    }
}

/* ---------------------------------------------------------------------- settings */

static void expect_refusal(const tsh_uv_desc *uv, tsh_result code, const char *word) {
    tsh_uv_desc desc = *uv;
    tsh_error error;
    tsh_comm comm;
    tsh_result result;
    desc.error = &error;
    desc.timeout = 1;
    memset(&error, 0, sizeof error);
    result = tsh_uv_open(&desc, &comm);
    if (result != code || error.code != code || !strstr(error.message, word))
        fail_msg("%s, \"%s\", not %s with \"%s\"", tsh_result_name(result), error.message,
                 tsh_result_name(code), word);
}

static void test_settings(void **state) {
    tsh_uv_desc uv, plain;
    (void)state;
    memset(&plain, 0, sizeof plain);
    plain.size = 2;
    plain.port = 1;
    uv = plain;
    uv.rank = 2;
    expect_refusal(&uv, TSH_ERR_ARGUMENT, "2");
    uv = plain;
    uv.rank = -1;
    expect_refusal(&uv, TSH_ERR_ARGUMENT, "-1");
    uv = plain;
    uv.port = 70000;
    expect_refusal(&uv, TSH_ERR_ARGUMENT, "70000");
    uv = plain;
    uv.host = "no.such.host.invalid";
    uv.rank = 1;
    expect_refusal(&uv, TSH_ERR_IO, "no.such.host.invalid");
    uv = plain;
    uv.host = "0.0.0.0"; /* beyond loopback, without a key */
    expect_refusal(&uv, TSH_ERR_ARGUMENT, "TSHARD_KEY");
    assert_int_equal(tsh_uv_open(&plain, NULL), TSH_ERR_ARGUMENT);
}

/* ------------------------------------------------------------------ every variable */

/* Sets or unsets "NAME=value NAME=value". */
static void set_all(const char *pairs, int set) {
    char text[256], *rest = NULL;
    (void)snprintf(text, sizeof text, "%s", pairs);
    for (char *at = strtok_r(text, " ", &rest); at; at = strtok_r(NULL, " ", &rest)) {
        char *value = strchr(at, '=');
        *value++ = 0;
        (void)(set ? setenv(at, value, 1) : unsetenv(at));
    }
}

typedef struct variable {
    const char *name, *takes;
    const char *others; /* that must be set for it to be read */
    const char *bad[4]; /* beside those that are bad for all */
} variable;

/* What tsh_uv_open says where name has this value. */
static tsh_error open_with(const char *name, const char *value) {
    tsh_error error;
    tsh_uv_desc uv;
    tsh_comm comm;
    memset(&uv, 0, sizeof uv);
    memset(&error, 0, sizeof error);
    uv.error = &error;
    (void)setenv(name, value, 1);
    if (!value[0]) uv.timeout = 0.05; /* an empty TSHARD_TIMEOUT counts as unset */
    if (tsh_uv_open(&uv, &comm) == TSH_OK) tsh_comm_close(&comm);
    (void)unsetenv(name);
    return error;
}

static void expect_variable(const variable *v, const char *value) {
    char part[200];
    tsh_error error = open_with(v->name, value);
    (void)snprintf(part, sizeof part, "%s is \"%s\"; it takes %s", v->name, value, v->takes);
    if (strcmp(error.message, part) != 0 || error.code != TSH_ERR_ARGUMENT)
        fail_msg("%s \"%s\", not \"%s\"", tsh_result_name(error.code), error.message, part);
}

static void test_variables(void **state) {
    static const char seconds[] = "a number of seconds, such as 30 or 0.5, up to 1000000000";
    static const char shape[] = "TSHARD_RANK=1 TSHARD_SIZE=2";
    static const char all[] = "TSHARD_RANK=1 TSHARD_SIZE=2 TSHARD_PORT=1 TSHARD_TIMEOUT=0.05";
    static const char first[] = "TSHARD_RANK=0 TSHARD_SIZE=2 TSHARD_PORT=1 TSHARD_TIMEOUT=0.05";
    static const char slurm[] = "SLURM_PROCID=1 SLURM_NTASKS=2";
    static const char torch[] = "RANK=1 WORLD_SIZE=2 MASTER_PORT=1";
    static const variable rows[] = {
        {"TSHARD_SIZE", "a whole number from 1 to 1024", "TSHARD_RANK=1", {"0", "1025"}},
        {"TSHARD_RANK", "a whole number from 0 to 1023", "TSHARD_SIZE=2", {"1024"}},
        {"WORLD_SIZE", "a whole number from 1 to 1024", "RANK=1", {"0", "1025"}},
        {"RANK", "a whole number from 0 to 1023", "WORLD_SIZE=2", {"1024"}},
        {"SLURM_NTASKS", "a whole number from 1 to 1024", "SLURM_PROCID=1", {"0", "1025"}},
        {"SLURM_PROCID", "a whole number from 0 to 1023", "SLURM_NTASKS=2", {"1024"}},
        {"TSHARD_PORT", "a whole number from 1 to 65535", shape, {"0", "65536", "http"}},
        {"MASTER_PORT", "a whole number from 1 to 65534", shape, {"0", "65535"}},
        {"SLURM_JOB_ID", "a whole number from 0 to 2147483647", slurm, {"2147483648"}},
        {"TORCHELASTIC_USE_AGENT_STORE", "True or False", torch, {"true", "1", "TRUE", "yes"}},
        {"TSHARD_LISTENER", "a whole number from 1 to 2147483647", first, {"0", "2147483648"}},
        {"TSHARD_TIMEOUT", seconds, all, {"5 min", "1.", "1e3", "1000000001"}},
        {"TSHARD_HEARTBEAT", seconds, all, {"10s", ".5", "0,5", "1000000001"}},
        {"TSHARD_CHECKSUM", "0 or 1", all, {"no", "false", "off", "2"}},
        {"TSHARD_ENCRYPT", "0 or 1", all, {"no", "false", "off", "2"}},
        {"TSHARD_SHM", "a whole number from 0 to 2", all, {"no", "false", "off", "3"}},
        {"TSHARD_INSECURE", "0 or 1", all, {"no", "false", "off", "2"}},
        {"TSHARD_INSECURE", "0 or 1", first, {"yes", "true", "11", "1 0"}},
    };
    static const char *const bad[] = {"x",   "1x",    " 1",  "1 ", "-1", "+1", "nan",
                                      "inf", "1e400", "0x1", "01", "-0", "99999999999999999999"};
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const variable *v = &rows[i];
        tsh_error error;
        set_all(v->others, 1);
        for (size_t k = 0; k < sizeof bad / sizeof *bad; k++) expect_variable(v, bad[k]);
        for (int k = 0; k < 4 && v->bad[k]; k++) expect_variable(v, v->bad[k]);
        error = open_with(v->name, "");
        if (strstr(error.message, "it takes")) fail_msg("%s: %s", v->name, error.message);
        set_all(v->others, 0);
    }
}

/* Texts that are too long, and times that make no sense. */
static void test_variables_of_text(void **state) {
    static const char *const names[] = {"TSHARD_HOST", "MASTER_ADDR", "TSHARD_BIND", "TSHARD_JOB",
                                        "TSHARD_KEY", "TSHARD_KEY_FILE"};
    static char text[6000];
    tsh_error error;
    tsh_uv_desc uv;
    (void)state;
    memset(text, 'q', sizeof text - 1);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        set_all("TSHARD_RANK=1 TSHARD_SIZE=2 TSHARD_PORT=1 TSHARD_TIMEOUT=0.05", 1);
        error = open_with(names[i], text);
        if (error.code != TSH_ERR_ARGUMENT || strstr(error.message, "qqq") ||
            !strstr(error.message, names[i]) || !strstr(error.message, " has 5999 bytes; it takes"))
            fail_msg("%s: %s", names[i], error.message);
    }
    set_all("TSHARD_RANK= TSHARD_SIZE= TSHARD_PORT= TSHARD_TIMEOUT=", 0);
    memset(&uv, 0, sizeof uv);
    uv.size = 2;
    uv.rank = 1;
    uv.port = 1;
    uv.heartbeat = 0.0 / strtod("0", NULL);
    expect_refusal(&uv, TSH_ERR_ARGUMENT, "tsh_uv_desc.heartbeat is not a number");
    uv.heartbeat = 0;
    uv.notice = 0.0 / strtod("0", NULL);
    expect_refusal(&uv, TSH_ERR_ARGUMENT, "tsh_uv_desc.notice is not a number");
    uv.notice = 0;
    uv.host = text;
    expect_refusal(&uv, TSH_ERR_ARGUMENT, "5999 bytes");
}

/* An error about a host names the variable that gave it; an interface gives its address. */
static void test_hosts(void **state) {
    static const struct {
        const char *name, *value, *says;
    } rows[] = {
        {"MASTER_ADDR", "tcp://127.0.0.1", "MASTER_ADDR is \"tcp://127.0.0.1\"; it takes the name"},
        {"MASTER_ADDR", "127.0.0.1\n", "MASTER_ADDR is "},
        {"MASTER_ADDR", "no.such.host.invalid", "(MASTER_ADDR)"},
        {"MASTER_ADDR", "[127.0.0.1]", "MASTER_ADDR is "}, /* brackets are IPv6's */
        {"TSHARD_BIND", "127.0.0.1:4000", "TSHARD_BIND is \"127.0.0.1:4000\"; it takes the name"},
        {"TSHARD_INTERFACE", "no-such0", "TSHARD_INTERFACE is \"no-such0\", and no interface of "},
        {"TSHARD_INTERFACE", "no-such0", "there are: "},
        {"TSHARD_INTERFACE", "lo", "did not reach rank 0"},
    };
    tsh_error error;
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        set_all("TSHARD_RANK=1 TSHARD_SIZE=2 TSHARD_PORT=1 TSHARD_TIMEOUT=0.05", 1);
        error = open_with(rows[i].name, rows[i].value);
        if (!strstr(error.message, rows[i].says))
            fail_msg("%s: \"%s\", not \"%s\"", rows[i].name, error.message, rows[i].says);
    }
    set_all("TSHARD_RANK= TSHARD_SIZE= TSHARD_PORT= TSHARD_TIMEOUT=", 0);
}

/* Only 1 opens a rank to others without a key. */
static void test_insecure(void **state) {
    static const char *const closed[] = {"", "0"};
    char port[16];
    tsh_error error;
    int listener, free_port;
    (void)state;
    listener = listen_anywhere(&free_port);
    (void)close(listener);
    (void)snprintf(port, sizeof port, "%d", free_port);
    set_all("TSHARD_RANK=0 TSHARD_SIZE=2 TSHARD_TIMEOUT=0.05 TSHARD_HOST=0.0.0.0", 1);
    (void)setenv("TSHARD_PORT", port, 1);
    for (int i = 0; i < 2; i++) {
        error = open_with("TSHARD_INSECURE", closed[i]);
        if (!strstr(error.message, "0.0.0.0 is not a loopback address: set TSHARD_KEY"))
            fail_msg("\"%s\": %s", closed[i], error.message);
    }
    error = open_with("TSHARD_INSECURE", "1");
    if (error.code != TSH_ERR_TIMEOUT) fail_msg("1: %s", error.message);
    set_all("TSHARD_RANK= TSHARD_SIZE= TSHARD_TIMEOUT= TSHARD_HOST= TSHARD_PORT=", 0);
}

/* ------------------------------------------------------------------------- keys */

/* What tsh_uv_open says of a key file with these bytes; size -1: of none. */
static tsh_error open_with_file(const char *path, const char *bytes, mode_t mode, uid_t owner) {
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL, 0600);
    tsh_error error;
    assert_true(fd >= 0 && write(fd, bytes, strlen(bytes)) == (ssize_t)strlen(bytes));
    assert_int_equal(fchmod(fd, mode) + fchown(fd, owner, (gid_t)-1), 0);
    (void)close(fd);
    error = open_with("TSHARD_KEY_FILE", path);
    (void)unlink(path);
    return error;
}

static void expect_key(const char *what, tsh_error error, tsh_result code, const char *part) {
    if (error.code != code || !strstr(error.message, part))
        fail_msg("%s: %s \"%s\", not \"%s\"", what, tsh_result_name(error.code), error.message,
                 part);
}

/* Keys that can be guessed, and files that others can read, are refused with what mends it. */
static void test_keys(void **state) {
    static const char good[] = "0123456789abcdef\r\n", new_key[] = "tshard-run --new-key FILE";
    char path[64], part[160];
    (void)state;
    (void)snprintf(path, sizeof path, "/tmp/tshard-key-%ld", (long)getpid());
    set_all("TSHARD_RANK=1 TSHARD_SIZE=2 TSHARD_PORT=1 TSHARD_TIMEOUT=0.05", 1);
    expect_key("short", open_with("TSHARD_KEY", "0123456789abcde"), TSH_ERR_ARGUMENT,
               "TSHARD_KEY has a key of 15 bytes");
    expect_key("short", open_with("TSHARD_KEY", "k"), TSH_ERR_ARGUMENT, new_key);
    expect_key("16 bytes", open_with("TSHARD_KEY", "0123456789abcdef"), TSH_ERR_TIMEOUT, "");
    expect_key("good", open_with_file(path, good, 0600, (uid_t)-1), TSH_ERR_TIMEOUT, "");
    expect_key("good", open_with_file(path, good, 0400, (uid_t)-1), TSH_ERR_TIMEOUT, "");
    expect_key("empty", open_with_file(path, "\n", 0600, (uid_t)-1), TSH_ERR_ARGUMENT, new_key);
    expect_key("short file", open_with_file(path, "0123456789abcde\n", 0600, (uid_t)-1),
               TSH_ERR_ARGUMENT, "has a key of 15 bytes");
    for (mode_t bit = 1; bit < 0100; bit = (mode_t)(bit << 1)) {
        (void)snprintf(part, sizeof part, "(mode %04o): chmod 600 %s", 0600u | (unsigned)bit, path);
        expect_key("mode", open_with_file(path, good, 0600 | bit, (uid_t)-1), TSH_ERR_ARGUMENT,
                   part);
    }
    if (geteuid() == 0)
        expect_key("owner", open_with_file(path, good, 0600, 12345), TSH_ERR_ARGUMENT,
                   "belongs to user 12345");
    assert_int_equal(mkfifo(path, 0600), 0);
    expect_key("fifo", open_with("TSHARD_KEY_FILE", path), TSH_ERR_ARGUMENT,
               "is not a regular file");
    (void)unlink(path);
    expect_key("none", open_with("TSHARD_KEY_FILE", path), TSH_ERR_ARGUMENT, path);
    set_all("TSHARD_RANK= TSHARD_SIZE= TSHARD_PORT= TSHARD_TIMEOUT=", 0);
}

static int run_fn(tsh_ctx *ctx, void *user) {
    int64_t sum = 1;
    (void)user;
    if (tsh_allreduce(tsh_world(ctx), &sum, 1, TSH_I64, TSH_SUM) != TSH_OK) return 90;
    return (int)sum * 10 + tsh_world(ctx)->rank;
}

/* Logger and error get one sentence, as does a process without any tsh_uv_desc. */
static void expect_why(tsh_uv_desc *uv, const tsh_desc *desc, tsh_result code, const char *part) {
    log_lines *log = (log_lines *)desc->logger.user;
    tsh_error error;
    log->count = 0;
    memset(&error, 0, sizeof error);
    if (uv) uv->error = &error;
    assert_int_equal(tsh_uv_run(uv, desc, run_fn, NULL), 1);
    if (uv) uv->error = NULL;
    if (log->count != 1 || !strstr(log->line[0], part) ||
        !strstr(log->line[0], tsh_result_name(code)))
        fail_msg("%d messages, the first \"%s\", not \"%s\"", log->count, log->line[0], part);
    if (uv && (error.code != code || !strstr(error.message, part)))
        fail_msg("%s \"%s\", not \"%s\"", tsh_result_name(error.code), error.message, part);
}

static void test_run_says_why(void **state) {
    static log_lines log;
    static const char *const names[] = {"TSHARD_RANK", "TSHARD_SIZE", "TSHARD_PORT", "TSHARD_HOST"};
    static const struct {
        const char *set[4]; /* of names; NULL: not set */
        tsh_result code;
        const char *part;
    } rows[] = {
        {{"first", "2", "1", NULL}, TSH_ERR_ARGUMENT,
         "tsh_uv_run: TSHARD_RANK is \"first\"; it takes a whole number from 0 to 1023"},
        {{"0", NULL, NULL, NULL}, TSH_ERR_ARGUMENT, "TSHARD_RANK is set, but not TSHARD_SIZE"},
        {{"2", "2", "1", NULL}, TSH_ERR_ARGUMENT, "rank 2 is not in a world of 2 ranks"},
        {{"1", "2", NULL, NULL}, TSH_ERR_ARGUMENT,
         "rank 1 does not know on which port rank 0 listens: set TSHARD_PORT"},
        {{"1", "2", "99999", NULL}, TSH_ERR_ARGUMENT,
         "TSHARD_PORT is \"99999\"; it takes a whole number from 1 to 65535"},
        {{"1", "2", "1", "no.such.host.invalid"}, TSH_ERR_IO,
         "rank 1 cannot find rank 0's host \"no.such.host.invalid\": "},
        {{"1", "2", "1", "[::1]"}, TSH_ERR_TIMEOUT, "[::1]:1"},
        {{"1", "2", "1", "tcp://127.0.0.1"}, TSH_ERR_ARGUMENT,
         "TSHARD_HOST is \"tcp://127.0.0.1\"; it takes the name or address of a host alone"},
        {{"1", "2", "1", "127.0.0.1:29875"}, TSH_ERR_ARGUMENT, "the port is TSHARD_PORT's"},
        {{"1", "2", "1", "[::1]:29875"}, TSH_ERR_ARGUMENT, "such as node1, 10.0.0.1 or fd00::1"},
        {{"1", "2", "1", "localhost "}, TSH_ERR_ARGUMENT, "TSHARD_HOST is \"localhost \"; it"},
        {{"1", "2", "1", NULL}, TSH_ERR_TIMEOUT,
         "tsh_uv_run: rank 1 of 2 did not reach rank 0 in 0.3 s: nobody listens at 127.0.0.1:1: "},
    };
    tsh_desc desc = {.logger = {log_keep, &log}};
    tsh_uv_desc uv;
    tsh_comm comm;
    (void)state;
    (void)setenv("TSHARD_TIMEOUT", "0.3", 1);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        for (int n = 0; n < 4; n++)
            (void)setenv(names[n], rows[i].set[n] ? rows[i].set[n] : "", 1); /* "": not set */
        expect_why(NULL, &desc, rows[i].code, rows[i].part);
    }
    for (int n = 0; n < 4; n++) (void)unsetenv(names[n]);
    (void)unsetenv("TSHARD_TIMEOUT");
    memset(&uv, 0, sizeof uv);
    uv.size = 2;
    uv.rank = 5;
    expect_why(&uv, &desc, TSH_ERR_ARGUMENT, "rank 5 is not in a world of 2 ranks");
    /* tsh_uv_open has a logger where it has no place for an error */
    uv.logger = desc.logger;
    log.count = 0;
    assert_int_equal(tsh_uv_open(&uv, &comm), TSH_ERR_ARGUMENT);
    assert_int_equal(tsh_uv_open(&uv, NULL), TSH_ERR_ARGUMENT);
    assert_int_equal(log.count, 2);
    assert_non_null(strstr(log.line[0], "tsh_uv_open: rank 5 is not in a world of 2 ranks"));
    assert_non_null(strstr(log.line[1], "tsh_uv_open: out is NULL"));
    memset(&uv, 0, sizeof uv); /* a world of one */
    desc.tp = 3;
    expect_why(&uv, &desc, TSH_ERR_ARGUMENT,
               "tsh_open: 1 ranks do not divide into tp 3 times pp 1");
    desc.tp = 0;
    log.count = 0;
    assert_int_equal(tsh_uv_run(&uv, &desc, NULL, NULL), 1);
    assert_int_equal(log_holds(&log, "tsh_uv_run: fn is NULL (TSH_ERR_ARGUMENT)"), 1);
    log.count = 0;
    assert_int_equal((tsh_uv_run)(&uv, NULL, run_fn, NULL), 1);
    assert_int_equal(tsh_uv_run_built(7003, 4, 8, &uv, &desc, run_fn, NULL), 1);
    assert_int_equal(log.count, 1);
    assert_non_null(strstr(log.line[0], "tsh_uv_run: the program was compiled with tshard.h 7.3"));
}

static void run_rank(job *j) {
    static log_lines log;
    char line[160];
    tsh_uv_desc uv = job_desc(j);
    tsh_desc desc = {.tp = 2, .logger = {log_keep, &log}}; /* of 3 ranks */
    if (j->user) {
        CHECK(tsh_uv_run(&uv, &desc, run_fn, NULL) == 1);
        (void)snprintf(line, sizeof line,
                       "rank %d: tsh_open: 3 ranks do not divide into tp 2 times pp 1; tp may be 1 "
                       "or 3 (TSH_ERR_ARGUMENT)",
                       j->rank);
        CHECK(log.count == 1 && log_holds(&log, line) == 1);
        CHECK(j->why.code == TSH_ERR_ARGUMENT && strstr(line, j->why.message));
        return;
    }
    CHECK(tsh_uv_run(&uv, NULL, run_fn, NULL) == 30 + j->rank);
    uv.rank = 7;
    uv.listener = 0;
    CHECK(tsh_uv_run(&uv, NULL, run_fn, NULL) == 1);
    CHECK(j->why.code == TSH_ERR_ARGUMENT);
}

static void test_run(void **state) {
    world_desc desc = tcp_desc(3, run_rank, NULL);
    (void)state;
    desc.by_itself = 1;
    world_run_desc(&desc);
    desc.user = "tp";
    world_run_desc(&desc);
}

#define TEST(name) cmocka_unit_test(test_##name)

int main(void) {
    const struct CMUnitTest processes[] = {
        COMM_TESTS,      TEST(sizes),        TEST(short_sizes),
        TEST(same_as_threads), TEST(half_as_threads),
        TEST(soak),      TEST(kill),         TEST(stop),
        TEST(exit),      TEST(lonely),       TEST(local_error),
        TEST(absent),    TEST(absent_first), TEST(notice), TEST(intruders),
        TEST(strangers), TEST(environment),  TEST(listener),
        TEST(impostor),  TEST(crowd),        TEST(closed_standard),
        TEST(alone),     TEST(settings),     TEST(run),
        TEST(run_says_why), TEST(variables), TEST(variables_of_text),
        TEST(insecure),  TEST(keys),        TEST(hosts),
    };
    const struct CMUnitTest threads[] = {
        TEST(overlap), TEST(split), TEST(tie), TEST(abort), TEST(timeout), TEST(soak),
    };
    int failed;
    comm_way = WORLD_TCP;
    failed = cmocka_run_group_tests_name("fault/uv, processes", processes, NULL, NULL);
    comm_way = WORLD_TCP_THREADS;
    return failed + cmocka_run_group_tests_name("fault/uv, threads", threads, NULL, NULL);
}
