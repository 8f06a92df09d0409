/* F7: strangers while a job forms and while it runs. Ranks 0 to 2 of a world of four wait for
 * rank 3; everybody who comes before it is turned away, and then it joins. */
#define TSHARD_IMPLEMENTATION
#include "../../backends/tshard_uv.h"

#include "../support/processes.h"
#include "../support/collectives.h"
#include "../support/faults.h"

#include <dirent.h>
#include <poll.h>
#include <sys/resource.h>

enum { RANKS = 4, LATE = 3, HELD = 512, RECORD = 4096, PORTS = 8 };

/* --------------------------------------------------------------- the world's state */

static int descriptors(pid_t pid) {
    char path[64];
    DIR *folder;
    int count = 0;
    (void)snprintf(path, sizeof path, "/proc/%ld/fd", (long)pid);
    folder = opendir(path);
    while (folder && readdir(folder)) count++;
    if (folder) (void)closedir(folder);
    return count;
}

static double resident_kib(pid_t pid) {
    char path[64];
    long pages = 0, resident = 0;
    FILE *file;
    (void)snprintf(path, sizeof path, "/proc/%ld/statm", (long)pid);
    file = fopen(path, "r");
    if (file && fscanf(file, "%ld %ld", &pages, &resident) != 2) resident = 0;
    if (file) (void)fclose(file);
    return (double)resident * (double)sysconf(_SC_PAGESIZE) / 1024;
}

/* 1 if the process holds the socket of this inode. */
static int owns_socket(pid_t pid, unsigned long inode) {
    char path[300], want[64], link[64];
    struct dirent *entry;
    DIR *folder;
    int found = 0;
    (void)snprintf(want, sizeof want, "socket:[%lu]", inode);
    (void)snprintf(path, sizeof path, "/proc/%ld/fd", (long)pid);
    folder = opendir(path);
    while (folder && !found && (entry = readdir(folder)) != NULL) {
        ssize_t n;
        (void)snprintf(path, sizeof path, "/proc/%ld/fd/%s", (long)pid, entry->d_name);
        n = readlink(path, link, sizeof link - 1);
        link[n > 0 ? n : 0] = 0;
        found = strcmp(link, want) == 0;
    }
    if (folder) (void)closedir(folder);
    return found;
}

/* The ports that the world's processes listen on. */
static int listening(const world *w, int *ports) {
    FILE *file = fopen("/proc/net/tcp", "r");
    char line[512];
    int count = 0;
    while (file && fgets(line, sizeof line, file)) {
        unsigned port, state;
        unsigned long inode;
        if (sscanf(line, " %*d: %*x:%x %*x:%*x %x %*s %*s %*s %*s %*s %lu", &port, &state,
                   &inode) != 3 ||
            state != 10)
            continue;
        for (int r = 0; r < RANKS && count < PORTS; r++)
            if (w->pid[r] > 0 && owns_socket(w->pid[r], inode)) {
                ports[count++] = (int)port;
                break;
            }
    }
    if (file) (void)fclose(file);
    return count;
}

/* ---------------------------------------------------------------------- strangers */

static int visit(int port) {
    struct sockaddr_in address;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_port = htons((uint16_t)port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof address) == 0) return fd;
    if (fd >= 0) (void)close(fd);
    return -1;
}

/* Milliseconds until the other side hangs up; what it says meanwhile is sent back if `echo`. -1:
 * it does not within `limit` ms. */
static double hung_up(int fd, int echo, double limit) {
    double begin = now_ms();
    char words[512];
    while (now_ms() - begin < limit) {
        struct pollfd p = {fd, POLLIN, 0};
        ssize_t n;
        if (poll(&p, 1, 100) <= 0) continue;
        n = recv(fd, words, sizeof words, 0);
        if (n <= 0) return now_ms() - begin;
        if (echo) (void)send(fd, words, (size_t)n, MSG_NOSIGNAL);
    }
    return -1;
}

static void connect_and_close(const int *ports, int count) {
    int visits = 10000, refused = 0;
    double begin = now_ms();
    fault_begin("F7", "connect and close, %d ports", count);
    for (int i = 0; i < visits; i++) {
        struct linger reset = {1, 0};
        int fd = visit(ports[i % count]);
        refused += fd < 0;
        if (fd < 0) continue;
        if (i % 2) (void)setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
        (void)close(fd);
    }
    fault_figure("visits", visits, "");
    fault_figure("took", now_ms() - begin, "ms");
    fault_at_most("refused", refused, "", 0);
    fault_end();
}

/* While 512 hold on, rank 0 keeps no more than these, beside the one that it has just accepted. */
static void held_open(const world *w, int before) {
    int fds[HELD];
    int most = 0;
    fault_begin("F7", "%d held open", HELD);
    for (int i = 0; i < HELD; i++) fds[i] = visit(w->port);
    for (int i = 0; i < 50; i++) {
        int more = descriptors(w->pid[0]) - before;
        most = more > most ? more : most;
        sleep_ms(10);
    }
    fault_at_most("descriptors of rank 0 more", most, "", HELD + 1);
    fault_end();
    for (int i = 0; i < HELD; i++)
        if (fds[i] >= 0) (void)close(fds[i]);
}

typedef struct stranger {
    const char *name, *words;
    int size, times, echo;
} stranger;

/* All at once; the job hangs up on each within the 5 s that are granted, and a second. */
static void say_nonsense(const int *ports, int count) {
    static char noise[4096], long_noise[1000000];
    static const stranger strangers[] = {
        {"silence", "", 0, 1, 0},
        {"one byte and silence", "t", 1, 1, 0},
        {"random bytes", noise, sizeof noise, 1, 0},
        {"a megabyte", long_noise, sizeof long_noise, 1, 0},
        {"HTTP", "GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 36, 1, 0},
        {"TLS hello", "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\x5a\x5a\x5a\x5a", 15, 1, 0},
        {"an echo of what it hears", "", 0, 1, 1},
    };
    enum { KINDS = (int)(sizeof strangers / sizeof strangers[0]) };
    for (size_t i = 0; i < sizeof noise; i++) noise[i] = (char)mix(i);
    for (size_t i = 0; i < sizeof long_noise; i++) long_noise[i] = (char)mix(i + 7);
    for (int k = 0; k < KINDS; k++) {
        const stranger *s = &strangers[k];
        double worst = 0;
        int fd[PORTS];
        fault_begin("F7", "%s, %d ports", s->name, count);
        for (int p = 0; p < count; p++) {
            fd[p] = visit(ports[p]);
            if (fd[p] < 0) fault_fail("port %d refuses", ports[p]);
            (void)send(fd[p], s->words, (size_t)s->size, MSG_NOSIGNAL | MSG_DONTWAIT);
        }
        for (int p = 0; p < count; p++) {
            double ms = hung_up(fd[p], s->echo, 8000);
            if (ms < 0) fault_fail("port %d does not hang up", ports[p]);
            worst = ms > worst ? ms : worst;
            if (fd[p] >= 0) (void)close(fd[p]);
        }
        fault_at_most("hung up after", worst, "ms", 6000);
        fault_end();
    }
}

/* ---------------------------------------------------- handshakes of another occasion */

/* What rank 3 of another world with the same key and name said to rank 0 first. */
typedef struct record {
    char words[RECORD];
    int size, port, listener;
} record;

static void record_prepare(job *j, tsh_uv_desc *uv) {
    const record *r = (const record *)j->user;
    if (j->rank == LATE) uv->port = r->port;
}

static void barrier_rank(job *j) {
    CHECK(tsh_barrier(&j->comm) == TSH_OK);
}

enum { PAIRS = 16 };

typedef struct proxy {
    record *r;
    int target, pairs;
    struct pollfd p[2 * PAIRS + 1]; /* rank 3's end, rank 0's end, ...; the listener */
    pthread_t thread;
} proxy;

/* 0: this pair is over. */
static int pass_on(proxy *x, int from) {
    char words[4096];
    ssize_t n = recv(x->p[from].fd, words, sizeof words, 0);
    if (n <= 0) return 0;
    if (from == 0 && x->r->size + (int)n <= RECORD) {
        memcpy(x->r->words + x->r->size, words, (size_t)n);
        x->r->size += (int)n;
    }
    (void)send(x->p[from ^ 1].fd, words, (size_t)n, MSG_NOSIGNAL);
    return 1;
}

static void take_pair(proxy *x) {
    int rank3 = accept(x->r->listener, NULL, NULL), rank0 = visit(x->target);
    if (rank3 < 0 || rank0 < 0 || x->pairs == PAIRS) {
        if (rank3 >= 0) (void)close(rank3);
        if (rank0 >= 0) (void)close(rank0);
        return;
    }
    x->p[2 * x->pairs].fd = rank3;
    x->p[2 * x->pairs + 1].fd = rank0;
    x->pairs++;
}

/* Passes on whatever rank 3 and rank 0 say, until both have hung up; notes rank 3's first
 * connection. */
static void *proxy_main(void *argument) {
    proxy *x = (proxy *)argument;
    double until = now_ms() + 20e3;
    int alive = 0;
    for (int i = 0; i <= 2 * PAIRS; i++) {
        x->p[i].fd = -1;
        x->p[i].events = POLLIN;
    }
    while (now_ms() < until && (alive || !x->pairs)) {
        x->p[2 * PAIRS].fd = x->r->listener;
        if (poll(x->p, 2 * PAIRS + 1, 100) <= 0) continue;
        if (x->p[2 * PAIRS].revents) take_pair(x);
        alive = 0;
        for (int i = 0; i < 2 * x->pairs; i++) {
            if (x->p[i].fd < 0) continue;
            alive++;
            if (!x->p[i].revents || pass_on(x, i)) continue;
            (void)close(x->p[i].fd);
            (void)close(x->p[i ^ 1].fd);
            x->p[i].fd = x->p[i ^ 1].fd = -1;
        }
    }
    (void)close(x->r->listener);
    return NULL;
}

static world_desc strangers_desc(void);

/* 1: recorded. */
static int record_handshake(record *r) {
    world_desc desc = strangers_desc();
    proxy p;
    const char *why;
    world w;
    memset(r, 0, sizeof *r);
    r->listener = listen_anywhere(&r->port);
    desc.fn = barrier_rank;
    desc.user = r;
    desc.prepare = record_prepare;
    memset(&p, 0, sizeof p);
    p.r = r;
    world_start(&w, &desc);
    p.target = w.port;
    if (pthread_create(&p.thread, NULL, proxy_main, &p) != 0) return 0;
    why = world_end(&w);
    (void)pthread_join(p.thread, NULL);
    if (why) fault_fail("the world behind a proxy: %s", why);
    world_free(&w);
    return r->size > 16;
}

/* Says what was recorded, with one byte changed if `at` is not negative. 1: it is hung up on. */
static int replay(const record *r, int port, int at) {
    char words[RECORD];
    int fd = visit(port), refused;
    if (fd < 0) return 0;
    memcpy(words, r->words, (size_t)r->size);
    if (at >= 0) words[at] = (char)(words[at] ^ 0x41);
    (void)send(fd, words, (size_t)r->size, MSG_NOSIGNAL);
    refused = hung_up(fd, 0, 8000) >= 0;
    (void)close(fd);
    return refused;
}

static void replay_rows(const record *r, int recorded, int port) {
    int bytes = r->size < 128 ? r->size : 128, step = fault_full() ? 1 : 4, tried = 0, refused = 0;
    fault_begin("F7", "a replayed handshake");
    if (!recorded) fault_fail("nothing was recorded");
    fault_figure("bytes", r->size, "");
    fault_at_least("refused", recorded && replay(r, port, -1), "", 1);
    fault_end();
    fault_begin("F7", "a handshake with one byte changed");
    for (int at = 0; recorded && at < bytes; at += step, tried++) refused += replay(r, port, at);
    fault_figure("tries", tried, "");
    fault_at_least("refused", tried ? 100.0 * refused / tried : 0, "%", 100);
    fault_end();
}

/* ------------------------------------------------- ranks that do not belong here */

typedef struct wrong {
    const char *name, *key, *job;
    int rank, size;
    const char *says[2]; /* the refusal holds these */
} wrong;

typedef struct refusal {
    tsh_result result;
    tsh_error error;
} refusal;

static void wrong_row(const world *w, const wrong *x) {
    refusal *seen = (refusal *)shared_memory(sizeof *seen);
    pid_t pid;
    int status = 0;
    fault_begin("F7", "%s", x->name);
    pid = fork();
    if (pid == 0) {
        tsh_uv_desc uv = w->desc.uv;
        tsh_comm comm;
        uv.rank = x->rank;
        uv.size = x->size;
        uv.host = "127.0.0.1";
        uv.port = w->port;
        uv.job = x->job;
        uv.key = x->key;
        uv.key_size = strlen(x->key);
        uv.timeout = 2;
        uv.error = &seen->error;
        seen->result = tsh_uv_open(&uv, &comm);
        _exit(0);
    }
    for (int i = 0; i < 5000 && waitpid(pid, &status, WNOHANG) == 0; i++) sleep_ms(1);
    if (kill(pid, 0) == 0) {
        fault_fail("tsh_uv_open did not return");
        (void)kill(pid, SIGKILL);
        (void)waitpid(pid, &status, 0);
    }
    for (int i = 0; i < 2; i++)
        if (x->says[i] && !strstr(seen->error.message, x->says[i]))
            fault_fail("no \"%s\" in: %s", x->says[i], seen->error.message);
    if (seen->result == TSH_OK || strstr(seen->error.message, "of all tes"))
        fault_fail("%s: %s", tsh_result_name(seen->result), seen->error.message);
    fault_at_least("refused", seen->result != TSH_OK, "", 1);
    fault_end();
    (void)munmap(seen, sizeof *seen);
}

static void wrong_rows(const world *w) {
    static const char key[] = "a key of all tests", name[] = "job of strangers";
    static const wrong rows[] = {
        {"a wrong key", "a key of all tesus", name, LATE, RANKS, {"key", NULL}},
        {"another job", key, "another job", LATE, RANKS, {NULL, NULL}},
        {"another world size", key, name, LATE, RANKS + 1, {"4", "5"}},
        {"a rank that is there already", key, name, 2, RANKS, {"rank 2", NULL}},
    };
    for (int i = 0; i < (int)(sizeof rows / sizeof rows[0]); i++) wrong_row(w, &rows[i]);
}

/* ---------------------------------------------------------------------- the job */

static void note_log(const char *message, void *user) {
    job *j = (job *)user;
    j->figure[0]++;
    j->figure[1] += strstr(message, "127.0.0.1") != NULL;
}

static void strangers_prepare(job *j, tsh_uv_desc *uv) {
    uv->logger.log = note_log;
    uv->logger.user = j;
    if (j->rank == LATE) CHECK(job_told(j, 1, 200));
}

/* 1,000 sums; then the world stays until the test has looked at it. */
static void strangers_rank(job *j) {
    grid_case c;
    memset(&c, 0, sizeof c);
    c.dtype = TSH_F32;
    c.count = 100;
    for (int i = 0; i < 1000; i++) grid_allreduce(j, c);
    job_step(j);
    CHECK(job_told(j, 2, 30));
    CHECK(tsh_barrier(&j->comm) == TSH_OK);
}

static world_desc strangers_desc(void) {
    world_desc desc = world_over_tcp(RANKS, strangers_rank, NULL, 60);
    desc.prepare = strangers_prepare;
    desc.uv.job = "job of strangers";
    desc.uv.timeout = 250;
    return desc;
}

static void aftermath_row(const world *w, const int *fds, const double *kib) {
    int more = 0;
    double grown = 0;
    fault_begin("F7", "6 s later");
    sleep_ms(6000);
    for (int r = 0; r < LATE; r++) {
        int f = descriptors(w->pid[r]) - fds[r];
        double k = resident_kib(w->pid[r]) - kib[r];
        more = f > more ? f : more;
        grown = k > grown ? k : grown;
    }
    fault_at_most("more descriptors", more, "", 0);
    fault_at_most("more memory", grown, "KiB", 256); /* pages that the allocator keeps */
    fault_end();
}

static void running_row(world *w, double begun) {
    const job *first = &w->jobs[0];
    int ports[PORTS], held[HELD], open_ports;
    const char *why;
    for (int i = 0; i < HELD; i++) held[i] = visit(w->port); /* they stay while rank 3 joins */
    fault_begin("F7", "the job goes on and lets nobody in");
    world_tell(w, 1);
    if (!world_steps(w, 1, -1, 30)) fault_fail("the ranks do not finish their sums");
    open_ports = listening(w, ports);
    world_tell(w, 2);
    why = world_end(w);
    if (why) fault_fail("%s", why);
    fault_at_most("listeners", open_ports, "", 0);
    for (int i = 0; i < HELD; i++)
        if (held[i] >= 0) (void)close(held[i]);
    fault_figure("log lines", (double)first->figure[0], "");
    fault_at_most("log lines of a second", (double)first->figure[0] / (now_ms() - begun) * 1e3, "",
                  3); /* three kinds, once a second each */
    fault_at_least("with an address", (double)first->figure[1], "", 5);
    fault_end();
}

int main(void) {
    struct rlimit limit;
    world_desc desc = strangers_desc();
    int ports[PORTS], count, fds[RANKS], recorded;
    double kib[RANKS], begun;
    static record r;
    world w;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
        limit.rlim_cur = limit.rlim_max;
        (void)setrlimit(RLIMIT_NOFILE, &limit);
    }
    recorded = record_handshake(&r);
    world_start(&w, &desc);
    begun = now_ms();
    sleep_ms(500);
    count = listening(&w, ports);
    for (int i = 0; i < LATE; i++) {
        fds[i] = descriptors(w.pid[i]);
        kib[i] = resident_kib(w.pid[i]);
    }
    if (count) {
        connect_and_close(ports, count);
        held_open(&w, fds[0]);
        say_nonsense(ports, count);
    }
    wrong_rows(&w);
    replay_rows(&r, recorded, w.port);
    aftermath_row(&w, fds, kib);
    running_row(&w, begun);
    world_free(&w);
    return fault_result();
}
