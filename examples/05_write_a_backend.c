/* 05: a backend of one's own. Ranks are processes; each reads from a socketpair that all write to.
 *
 * A backend of messages brings bytes from rank to rank, and the first error to all ranks: rule 9 in
 * tshard.h's section comm-api. tshb_comm_compose makes all collectives, groups and time limits of
 * that, and one error where ranks call different things or wait for each other. The tests of every
 * backend run on this one, too: tests/comm/test_own_backend.c. */
#define TSHARD_IMPLEMENTATION
#include "../backends/tshard_backend.h"
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { RANKS = 8 }; /* at most */

/* A message that waits to be sent, or for its RECV. What follows `to` goes over the socket. */
typedef struct message {
    struct message *next;
    size_t bytes; /* of data */
    int to, from;
    uint64_t channel;
    char data[TSH_MESSAGE_BYTES];
} message;
enum { HEAD = offsetof(message, data) - offsetof(message, from) };

static int sockets[RANKS][2];  /* by rank: its end to read, and everybody's to write */
static message *queue, *inbox; /* to be sent, and received; the oldest first */
static struct failure {        /* the world's error, in memory that all processes share */
    int taken, there;
    tsh_error error;
} *failure;

static int append(message **list, const message *m) { /* copies m to the end */
    size_t size = offsetof(message, data) + m->bytes;
    while (*list) list = &(*list)->next;
    *list = (message *)malloc(size);
    if (*list) memcpy(*list, m, size);
    if (*list) (*list)->next = NULL;
    return *list != NULL;
}

static void drop(message **at) {
    message *m = *at;
    *at = m->next;
    free(m);
}

static tsh_result net_status(tsh_comm *comm, tsh_error *error) {
    (void)comm;
    if (!__atomic_load_n(&failure->there, __ATOMIC_SEQ_CST)) return TSH_OK;
    if (error) *error = failure->error;
    return failure->error.code;
}

/* Ends the world, if no other rank was faster. */
static void net_abort(tsh_comm *comm, const tsh_error *why) {
    (void)comm;
    if (__atomic_exchange_n(&failure->taken, 1, __ATOMIC_SEQ_CST)) return;
    failure->error = *why;
    __atomic_store_n(&failure->there, 1, __ATOMIC_SEQ_CST);
}

/* Sends and receives what the sockets take and have. */
static void net_progress(tsh_comm *comm) {
    const tsh_error no_memory = {TSH_ERR_MEMORY, comm->rank, "no memory for a message"};
    message m;
    ssize_t n;
    while (queue &&
           send(sockets[queue->to][1], &queue->from, HEAD + queue->bytes, MSG_DONTWAIT) >= 0)
        drop(&queue);
    while ((n = recv(sockets[comm->rank][0], &m.from, HEAD + sizeof m.data, MSG_DONTWAIT)) > 0) {
        m.bytes = (size_t)n - HEAD;
        if (!append(&inbox, &m)) net_abort(comm, &no_memory);
    }
}

/* Sleeps until a message comes, for ns at most. */
static void net_idle(tsh_comm *comm, int64_t ns) {
    struct pollfd ready = {sockets[comm->rank][0], POLLIN, 0};
    (void)poll(&ready, 1, (int)(ns / 1000000));
}

/* SEND: takes a copy. RECV: if the message has not come, *req says that it is to be asked again. */
static tsh_result net_start(tsh_comm *comm, const tsh_coll *coll, tsh_req *req) {
    message m, **at = &inbox;
    m.to = coll->send_to;
    m.from = coll->kind == TSH_SEND ? comm->rank : coll->recv_from;
    m.channel = coll->seq;
    m.bytes = (size_t)coll->count * tsh_dtype_size(coll->dtype);
    *req = 0;
    if (coll->kind == TSH_SEND) {
        memcpy(m.data, coll->send, m.bytes);
        return append(&queue, &m) ? TSH_OK : TSH_ERR_MEMORY;
    }
    while (*at && ((*at)->from != m.from || (*at)->channel != m.channel)) at = &(*at)->next;
    *req = *at == NULL;
    if (*at) memcpy(coll->recv, (*at)->data, m.bytes);
    if (*at) drop(at);
    return TSH_OK;
}

static void net_close(tsh_comm *comm) { /* sends what is left */
    for (; queue && net_status(comm, NULL) == TSH_OK; net_idle(comm, 1000000)) net_progress(comm);
    while (queue) drop(&queue);
    while (inbox) drop(&inbox);
}

/* Makes what the processes share, before there are any. 0: the system refused. */
static int net_prepare(int size) {
    int zero = open("/dev/zero", O_RDWR), made = 0;
    void *memory = mmap(NULL, sizeof *failure, PROT_READ | PROT_WRITE, MAP_SHARED, zero, 0);
    (void)close(zero);
    memcpy(&failure, &memory, sizeof failure);
    while (made < size && socketpair(AF_UNIX, SOCK_DGRAM, 0, sockets[made]) == 0) made++;
    return made == size && memory != MAP_FAILED;
}

static tsh_result net_open(int rank, int size, tsh_comm *comm, tsh_error *error) {
    static const tsh_comm_ops ops = TSH_MESSAGE_OPS(net, "net", 0);
    tsh_comm messages = tshb_comm_make(&ops, NULL, rank, size, 1);
    return tshb_comm_compose(&messages, comm, error);
}

/* The program of every rank. */
static int rank_main(tsh_ctx *ctx, void *user) {
    int64_t sum = tsh_world(ctx)->rank;
    (void)user;
    if (tsh_allreduce(tsh_world(ctx), &sum, 1, TSH_I64, TSH_SUM) != TSH_OK) return 1;
    if (tsh_world(ctx)->rank == 0) printf("the ranks sum to %d\n", (int)sum);
    return 0;
}

int main(void) {
    const tsh_desc desc = {.logger.log = tsh_log_stderr};
    int failures = !net_prepare(4), status;
    for (int rank = 0; rank < 4 && !failures; rank++) {
        tsh_comm comm;
        tsh_error error;
        if (fork() != 0) continue;
        if (net_open(rank, 4, &comm, &error) != TSH_OK) exit(1);
        exit(tsh_run_on(&comm, &desc, rank_main, NULL, NULL));
    }
    while (wait(&status) > 0) failures += status != 0;
    return failures;
}
