/* What loading a model costs: prints lines "name unit who value", a line per round.
 *
 * usage: bench_load FOLDER [--model llama1b] [--ranks R] [--rounds N] [--broadcast]
 *                          [--plain-first] [--backend threads|tcp]
 *
 *     load_M GB/s          bytes of all shards per second, bf16, from a file that the page cache
 *                          holds, into new memory, as a program does that starts; ours: tsh_load;
 *                          plain: each rank at the same time reads as many bytes as its shard has
 *                          by read(2), 256 KiB at a time, into memory that malloc has just given
 *     load_M_again GB/s    the same once more, into the same memory, so that no page of it is new:
 *                          a page fault takes longer than reading the page's bytes, so load_M says
 *                          little about the loader
 *     broadcast_M GB/s     with --broadcast, where rank 0 reads all of it; plain: rank 0 sends the
 *                          others theirs as it reads it, by plain sockets, and reads its own part
 *     load_M_bytes ratio   what a rank read of the file's bytes, by those of its shard; the largest
 *     load_M_memory MiB    what the process had at most, beyond the shards
 *
 * Before each round twice the shards' memory is touched and given back, as a host may be slow to
 * grant it. Ours and plain take turns to be the first of a round; --plain-first: plain begins.
 *
 * FOLDER/M.safetensors is written if it is not there. With --backend tcp (built with BENCH_TCP)
 * each rank is a process, which measures one round:
 *     tshard-run -n R bench_load FOLDER --backend tcp --rounds 1 */
#define _DEFAULT_SOURCE
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#ifdef BENCH_TCP
#include "../../backends/tshard_uv.h"
#endif
#include "decoder.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sys/socket.h>

enum { PIECE = 1 << 18 }; /* bytes of a plain read */

typedef struct load_job {
    const llama_shape *s;
    char path[512];
    int ranks, rounds, broadcast, tcp, plain_first;
} load_job;

/* ------------------------------------------------------------------- counting */

/* A number behind a key in a file of /proc; 0: none. */
static double proc_number(const char *path, const char *key) {
    char line[256];
    double number = 0;
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof line, file))
        if (strncmp(line, key, strlen(key)) == 0) number = atof(line + strlen(key));
    if (file) fclose(file);
    return number;
}

/* MiB of this process: now, and at most since reset_peak. */
static double memory_now(void) {
    return proc_number("/proc/self/status", "VmRSS:") / 1024;
}

static double memory_peak(void) {
    return proc_number("/proc/self/status", "VmHWM:") / 1024;
}

static void reset_peak(void) {
    FILE *file = fopen("/proc/self/clear_refs", "w");
    if (file) fputs("5", file);
    if (file) fclose(file);
}

static double bytes_read(void) {
    return proc_number("/proc/thread-self/io", "rchar:");
}

static double seconds(void) {
    return 1e-9 * (double)tsh_now();
}

static void add_bytes(const char *path, tsh_tensor *param, void *user) {
    (void)path;
    *(double *)user += (double)tsh_local_numel(param) * (double)tsh_dtype_size(tsh_dtype_of(param));
}

/* ---------------------------------------------------------------------- plain */

static int read_all(int file, char *to, size_t bytes) {
    while (bytes > 0) {
        const ssize_t got = read(file, to, bytes < PIECE ? bytes : PIECE);
        if (got <= 0) return 0;
        to += got;
        bytes -= (size_t)got;
    }
    return 1;
}

static int send_all(int to, const char *from, size_t bytes) {
    while (bytes > 0) {
        const ssize_t sent = send(to, from, bytes, MSG_NOSIGNAL);
        if (sent <= 0) return 0;
        from += sent;
        bytes -= (size_t)sent;
    }
    return 1;
}

static int receive_all(int from, char *to, size_t bytes) {
    while (bytes > 0) {
        const ssize_t got = recv(from, to, bytes < PIECE ? bytes : PIECE, 0);
        if (got <= 0) return 0;
        to += got;
        bytes -= (size_t)got;
    }
    return 1;
}

/* A connection between ranks 0 and `rank`, on one host; -1: none. Rank 0 says where it listens. */
static int connect_ranks(tsh_ctx *ctx, int rank) {
    const int mine = tsh_world(ctx)->rank;
    struct sockaddr_in at;
    socklen_t size = sizeof at;
    int listener = -1, s = -1;
    int32_t port = 0;
    memset(&at, 0, sizeof at);
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (mine == 0 && (listener = socket(AF_INET, SOCK_STREAM, 0)) >= 0 &&
        bind(listener, (struct sockaddr *)&at, size) == 0 && listen(listener, 1) == 0 &&
        getsockname(listener, (struct sockaddr *)&at, &size) == 0)
        port = ntohs(at.sin_port);
    tsh_broadcast(tsh_world(ctx), &port, 1, TSH_I32, 0);
    at.sin_port = htons((uint16_t)port);
    if (mine == 0) s = accept(listener, NULL, NULL);
    if (mine == rank && (s = socket(AF_INET, SOCK_STREAM, 0)) >= 0 &&
        connect(s, (struct sockaddr *)&at, size) != 0)
        s = -1;
    if (listener >= 0) close(listener);
    return s;
}

/* Rank 0 reads for another rank, and sends each piece. */
static int serve(int file, int to, size_t bytes) {
    static char piece[PIECE];
    int ok = 1;
    for (size_t at = 0; ok && at < bytes; at += PIECE) {
        const size_t n = bytes - at < PIECE ? bytes - at : PIECE;
        ok = read_all(file, piece, n) && send_all(to, piece, n);
    }
    return ok;
}

/* Seconds in which all ranks get as many bytes as their shards have into memory; < 0: failed. */
static double plain_time(tsh_ctx *ctx, const load_job *job, const int *peer, char *to, size_t own) {
    const int rank = tsh_world(ctx)->rank, ranks = tsh_world(ctx)->size;
    const int reads = !job->broadcast || rank == 0;
    const int file = open(job->path, O_RDONLY);
    int ok = file >= 0;
    tsh_barrier(tsh_world(ctx));
    const double start = seconds();
    if (reads && !job->broadcast)
        ok = lseek(file, (off_t)(own * (size_t)rank / (size_t)ranks), SEEK_SET) >= 0;
    for (int r = 1; job->broadcast && rank == 0 && r < ranks; r++)
        ok = ok && serve(file, peer[r], own) && lseek(file, 0, SEEK_SET) == 0;
    ok = ok && (reads ? read_all(file, to, own) : receive_all(peer[rank], to, own));
    tsh_barrier(tsh_world(ctx));
    const double used = seconds() - start;
    close(file);
    return ok ? used : -1;
}

/* Both times of plain reading, into new memory and again; 0: failed. */
static int plain_times(tsh_ctx *ctx, const load_job *job, double bytes, double *used) {
    const int rank = tsh_world(ctx)->rank, ranks = tsh_world(ctx)->size;
    int peer[64] = {0};
    char *to = (char *)malloc((size_t)bytes);
    for (int r = 1; job->broadcast && r < ranks; r++) peer[r] = connect_ranks(ctx, r);
    for (int i = 0; i < 2; i++) used[i] = to ? plain_time(ctx, job, peer, to, (size_t)bytes) : -1;
    for (int r = 1; job->broadcast && r < ranks; r++)
        if (rank == 0 || r == rank) close(peer[r]);
    free(to);
    return used[0] > 0 && used[1] > 0;
}

/* Touches so many bytes of memory and gives them back. */
static void touch(tsh_ctx *ctx, double bytes) {
    char *memory = (char *)malloc((size_t)bytes);
    if (memory) memset(memory, 1, (size_t)bytes);
    tsh_barrier(tsh_world(ctx));
    free(memory);
    tsh_barrier(tsh_world(ctx));
}

/* ----------------------------------------------------------------------- ours */

static int failed(tsh_ctx *ctx) {
    if (!tsh_ok(ctx)) fprintf(stderr, "%s\n", tsh_last_error(ctx)->message);
    return !tsh_ok(ctx);
}

static double largest(tsh_ctx *ctx, double value) {
    tsh_allreduce(tsh_world(ctx), &value, 1, TSH_F64, TSH_MAX);
    return value;
}

static double sum(tsh_ctx *ctx, double value) {
    tsh_allreduce(tsh_world(ctx), &value, 1, TSH_F64, TSH_SUM);
    return value;
}

static void print(const load_job *job, const char *what, const char *unit, const char *who,
                  double value) {
    printf("%s_%s%s %s %s %.4g\n", job->broadcast ? "broadcast" : "load", job->s->name, what, unit,
           who, value);
}

/* Loads into new memory and again: the times, and bytes and memory of the first. */
static int our_times(tsh_ctx *ctx, const load_job *job, double own, double *used, double *part,
                     double *beside) {
    const tsh_file_desc desc = {.broadcast = job->broadcast};
    const double all = sum(ctx, own);
    reset_peak();
    const double now = memory_now();
    for (int i = 0; i < 2; i++) {
        tsh_barrier(tsh_world(ctx));
        const double before = bytes_read(), start = seconds();
        tsh_load_with(tsh_root(ctx), job->path, NULL, &desc);
        tsh_barrier(tsh_world(ctx));
        used[i] = seconds() - start;
        if (i) continue;
        *part = largest(ctx, (bytes_read() - before) / own);
        *beside = largest(ctx, memory_peak() - now - (job->tcp ? own : all) / (1 << 20));
    }
    return !failed(ctx);
}

static int load_rank(tsh_ctx *ctx, void *user) {
    const load_job *job = (const load_job *)user;
    const int first = job->plain_first;
    decoder *m = (decoder *)malloc(sizeof *m);
    double own = 0, used[2], plain[2], part = 0, beside = 0;
    if (!m) return 1;
    decoder_add(ctx, m, job->s, TSH_BF16);
    free(m);
    tsh_each_param(tsh_root(ctx), add_bytes, &own);
    const double all = sum(ctx, own);
    touch(ctx, 2 * own);
    if (first && !plain_times(ctx, job, own, plain)) return 1;
    if (!our_times(ctx, job, own, used, &part, &beside)) return 1;
    if (!first && !plain_times(ctx, job, own, plain)) return 1;
    if (tsh_world(ctx)->rank > 0) return 0;
    for (int i = 0; i < 2; i++) print(job, i ? "_again" : "", "GB/s", "ours", 1e-9 * all / used[i]);
    for (int i = 0; i < 2; i++)
        print(job, i ? "_again" : "", "GB/s", "plain", 1e-9 * all / plain[i]);
    if (!job->broadcast) print(job, "_bytes", "ratio", "ours", part);
    print(job, "_memory", "MiB", "ours", beside);
    return 0;
}

static int save_rank(tsh_ctx *ctx, void *user) {
    const load_job *job = (const load_job *)user;
    decoder *m = (decoder *)malloc(sizeof *m);
    if (!m) return 1;
    decoder_make(ctx, m, job->s, TSH_BF16);
    tsh_save(tsh_root(ctx), job->path, NULL);
    free(m);
    return failed(ctx);
}

/* ----------------------------------------------------------------------- main */

static int run_round(load_job *job) {
    tsh_desc desc = {.tp = job->ranks, .dtype = TSH_BF16};
    if (!job->tcp) return tsh_threads_run(job->ranks, &desc, load_rank, job);
#ifdef BENCH_TCP
    tsh_error why;
    const tsh_uv_desc uv = {.logger.log = tsh_log_stderr, .error = &why};
    if (tsh_uv_open(&uv, &desc.comm) == TSH_OK) {
        desc.tp = desc.comm.size;
        return tsh_run(&desc, load_rank, job);
    }
    fprintf(stderr, "%s\n", why.message);
#endif
    return 1;
}

int main(int argc, char **argv) {
    load_job job = {.s = llama_find("llama1b"), .ranks = 2, .rounds = 5};
    const tsh_desc one = {.dtype = TSH_BF16};
    for (int i = 2; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (strcmp(argv[i], "--broadcast") == 0) job.broadcast = 1;
        else if (strcmp(argv[i], "--plain-first") == 0) job.plain_first = 1;
        else if (strcmp(argv[i], "--model") == 0) job.s = llama_find(value);
        else if (strcmp(argv[i], "--ranks") == 0) job.ranks = atoi(value);
        else if (strcmp(argv[i], "--rounds") == 0) job.rounds = atoi(value);
        else if (strcmp(argv[i], "--backend") == 0) job.tcp = strcmp(value, "tcp") == 0;
    }
    if (argc < 2 || !job.s || job.ranks < 1 || job.ranks > 64) {
        fprintf(stderr, "usage: bench_load FOLDER [--model M] [--ranks R] [--rounds N] "
                        "[--broadcast] [--plain-first] [--backend threads|tcp]\n");
        return 2;
    }
    snprintf(job.path, sizeof job.path, "%s/%s.safetensors", argv[1], job.s->name);
    if (access(job.path, R_OK) != 0) return tsh_run(&one, save_rank, &job);
    for (int round = 0; round < job.rounds; round++, job.plain_first = !job.plain_first)
        if (run_round(&job) != 0) return 1;
    return 0;
}
