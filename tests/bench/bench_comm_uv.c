/* Collectives between processes of one host, one per rank, in shared memory or, with TSHARD_SHM=0,
 * over TCP on 127.0.0.1: bench_comm_uv RANKS, then the commands of ranks_bench.h. Buffers are as
 * tensors: with TSHARD_SHM=2 in shared memory, too. */
#define TSHARD_IMPLEMENTATION
#include "../../backends/tshard_uv.h"
#include "ranks_bench.h"

#include <arpa/inet.h> /* htonl, ntohs */
#include <sys/socket.h>

typedef struct meeting {
    int listener, port; /* made before the fork, so that nobody comes too early */
} meeting;

static int meet(meeting *m) {
    struct sockaddr_in at;
    socklen_t size = sizeof at;
    memset(&at, 0, sizeof at);
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    m->listener = socket(AF_INET, SOCK_STREAM, 0);
    if (m->listener < 0 || bind(m->listener, (struct sockaddr *)&at, size) != 0 ||
        listen(m->listener, BENCH_RANKS) != 0 ||
        getsockname(m->listener, (struct sockaddr *)&at, &size) != 0)
        return 0;
    m->port = ntohs(at.sin_port);
    return 1;
}

static int rank_main(bench *b, void *user) {
    const meeting *m = (const meeting *)user;
    tsh_uv_desc desc;
    tsh_error error;
    tsh_comm comm;
    int failed;
    memset(&desc, 0, sizeof desc);
    desc.rank = b->rank;
    desc.size = b->ranks;
    desc.host = "127.0.0.1";
    desc.port = m->port;
    desc.error = &error;
    if (b->rank == 0)
        desc.listener = m->listener;
    else
        (void)close(m->listener);
    if (tsh_uv_open(&desc, &comm) != TSH_OK) {
        (void)fprintf(stderr, "bench_comm_uv: %s\n", error.message);
        return 1;
    }
    b->call = bench_tshard_call;
    b->user = &comm;
    b->allocate = tsh_uv_allocator(&comm).allocate;
    b->memory = tsh_uv_allocator(&comm).user;
    failed = bench_serve(b);
    tsh_comm_close(&comm);
    return failed;
}

int main(int argc, char **argv) {
    meeting m;
    if (argc != 2 || !meet(&m)) return 2;
    return bench_processes(atoi(argv[1]), rank_main, &m);
}
