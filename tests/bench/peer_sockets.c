/* What TCP itself costs: plain sockets that move the bytes a collective must move, and add. No
 * headers, no checks, the sums in place: no library can be much faster. Usage: peer_sockets RANKS,
 * then the commands of ranks_bench.h, for sizes that the ranks share out evenly. */
#include "ranks_bench.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h> /* TCP_NODELAY */
#include <sched.h>
#include <sys/socket.h>

/* Measured: a larger send buffer takes twice as long, as what is in flight leaves the cache. */
enum { SEND_BUFFER = 256 * 1024, SEGMENT = 2 * SEND_BUFFER, DIRECT = 32 * 1024 };

typedef struct world {
    int peer[BENCH_RANKS][BENCH_RANKS]; /* [a][b]: a's socket to b; only those of this rank */
    float segment[SEGMENT / 4];         /* received, not yet added */
} world;

/* ---- connecting ------------------------------------------------------------ */

static int tuned(int s) {
    const int on = 1, size = SEND_BUFFER;
    return s >= 0 && setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) == 0 &&
           setsockopt(s, SOL_SOCKET, SO_SNDBUF, &size, sizeof size) == 0;
}

/* Two connected sockets. */
static int connected(int *a, int *b) {
    struct sockaddr_in at;
    socklen_t size = sizeof at;
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    int ok;
    memset(&at, 0, sizeof at);
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    *a = socket(AF_INET, SOCK_STREAM, 0);
    ok = listener >= 0 && *a >= 0 && bind(listener, (struct sockaddr *)&at, size) == 0 &&
         listen(listener, 1) == 0 && getsockname(listener, (struct sockaddr *)&at, &size) == 0 &&
         connect(*a, (struct sockaddr *)&at, size) == 0;
    *b = ok ? accept(listener, NULL, NULL) : -1;
    (void)close(listener);
    return tuned(*a) && tuned(*b);
}

/* Rank `rank` keeps its own, so that the end of a rank is noticed. */
static void keep(world *w, int rank, int ranks) {
    int a, b;
    for (a = 0; a < ranks; a++)
        for (b = 0; b < ranks; b++)
            if (a != b && a != rank) (void)close(w->peer[a][b]);
}

/* ---- moving ---------------------------------------------------------------- */

/* What send or recv moved: 0 where it would have to wait, -1 at the end. Yielding instead of
 * sleeping is the fastest here, with a core for every rank and without. */
static long moved(ssize_t n) {
    if (n > 0) return (long)n;
    if (n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) return -1;
    (void)sched_yield();
    return 0;
}

static long put(int to, const char *from, long n) {
    return moved(send(to, from, (size_t)n, MSG_DONTWAIT | MSG_NOSIGNAL));
}

static long get(int from, void *to, long n) {
    return moved(recv(from, to, (size_t)n, MSG_DONTWAIT));
}

static long least(long a, long b) {
    return a < b ? a : b;
}

static void add(float *sum, const float *x, long n) {
    for (long i = 0; i < n; i++) sum[i] += x[i];
}

/* Chunks travel round the ring: rank r sends chunk `first`, then what it has received, which is
 * first - 1, first - 2 and so on; the first `adds` that come are added to its own, the next
 * `stores` replace them. Every byte goes on as soon as it is there. */
static int ring(bench *b, int first, int adds, int stores, char *data, long chunk) {
    world *w = (world *)b->user;
    const int *peer = w->peer[b->rank], ranks = b->ranks;
    const int left = peer[(b->rank + ranks - 1) % ranks], right = peer[(b->rank + 1) % ranks];
    const long total = (adds + stores) * chunk;
    long sent = 0, got = 0, held = 0, n; /* held: bytes of a number that is not all there yet */
    first += 2 * ranks;                  /* stays positive */
    while (sent < total || got < total) {
        const long out = first - sent / chunk, in = first - 1 - got / chunk;
        n = least(least(total, got + chunk) - sent, chunk - sent % chunk);
        if (n > 0) {
            n = put(right, data + out % ranks * chunk + sent % chunk, n);
            if (n < 0) return 0;
            sent += n;
        }
        if (got == total) continue;
        if (got / chunk >= adds) {
            n = get(left, data + in % ranks * chunk + got % chunk, chunk - got % chunk);
            if (n < 0) return 0;
            got += n;
        } else {
            n = least(chunk - got % chunk, SEGMENT) - held;
            n = get(left, (char *)w->segment + held, n);
            if (n < 0) return 0;
            n += held;
            held = n % 4;
            add((float *)(void *)(data + in % ranks * chunk + got % chunk), w->segment, n / 4);
            got += n - held;
            memmove(w->segment, (char *)w->segment + (n - held), (size_t)held);
        }
    }
    return 1;
}

/* n bytes to every rank at once: rank r is sent out + r * step, and from it comes in + r * n. */
static int exchange(bench *b, const char *out, long step, char *in, long n) {
    const world *w = (const world *)b->user;
    for (int way = 0; way < 2; way++) {
        for (int i = 1; i < b->ranks; i++) {
            const int r = (b->rank + i) % b->ranks, s = w->peer[b->rank][r];
            for (long at = 0, now; at < n; at += now) {
                now = way ? get(s, in + r * n + at, n - at) : put(s, out + r * step + at, n - at);
                if (now < 0) return 0;
            }
        }
    }
    memmove(in + b->rank * n, out + b->rank * step, (size_t)n);
    return 1;
}

/* ---- collectives ----------------------------------------------------------- */

static const float *direct(bench *b, int kind, float *send, float *recv, long count) {
    const long part = kind == BENCH_ALLREDUCE ? count : count / b->ranks;
    float *parts = kind == BENCH_ALLGATHER ? recv : ((world *)b->user)->segment;
    const long step = kind == BENCH_REDUCE_SCATTER ? part * 4 : 0;
    if (!exchange(b, (const char *)send, step, (char *)parts, part * 4)) return NULL;
    if (kind == BENCH_ALLGATHER) return recv;
    memcpy(recv, parts, (size_t)part * 4);
    for (int r = 1; r < b->ranks; r++) add(recv, parts + r * part, part);
    return recv;
}

static const float *call(bench *b, int kind, float *send, float *recv, long count) {
    const int others = b->ranks - 1;
    const long chunk = count / b->ranks;
    if (count * 4 <= DIRECT) return direct(b, kind, send, recv, count);
    if (count % b->ranks != 0) return NULL;
    if (kind == BENCH_ALLREDUCE)
        return ring(b, b->rank - 1, others, others, (char *)recv, chunk * 4) ? recv : NULL;
    if (kind == BENCH_REDUCE_SCATTER)
        return ring(b, b->rank - 1, others, 0, (char *)send, chunk * 4) ? send + b->rank * chunk
                                                                        : NULL;
    memcpy(recv + b->rank * chunk, send, (size_t)chunk * 4);
    return ring(b, b->rank, 0, others, (char *)recv, chunk * 4) ? recv : NULL;
}

static int rank_main(bench *b, void *user) {
    world *w = (world *)user;
    keep(w, b->rank, b->ranks);
    b->call = call;
    b->user = user;
    return bench_serve(b);
}

int main(int argc, char **argv) {
    static world w;
    const int ranks = argc == 2 ? atoi(argv[1]) : 0;
    for (int a = 0; a < ranks && ranks <= BENCH_RANKS; a++)
        for (int b = 0; b < a; b++)
            if (!connected(&w.peer[a][b], &w.peer[b][a])) return 2;
    return bench_processes(ranks, rank_main, &w);
}
