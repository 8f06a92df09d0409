/* relay.h - hosts for tests: each rank enters a network namespace of its own, whose only link is a
 * TUN device that a relay process of the test holds. The relay passes packets on, and may cut a
 * link, take it down, lose packets, delay them, or slow them down (fairly between connections).
 *
 * Linux only; needs the right to make network namespaces and to open /dev/net/tun. Include it after
 * processes.h in a file that begins with #define _GNU_SOURCE. Nothing outlives the processes. */
#ifndef TSHARD_TESTS_RELAY_H
#define TSHARD_TESTS_RELAY_H

#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>

enum { NET_HOSTS = 8, NET_FLOWS = 32, NET_PACKET = 1500, NET_BURST = 64 };
enum { NET_FLOW_ROOM = 16, NET_LATE_ROOM = 8192, NET_QUANTUM = 128 };

/* From one host to another; all atomic. */
typedef struct net_link {
    int cut, loss_percent, delay_us, ns_per_byte;
} net_link;

/* In memory that the test, the ranks and the relay share. */
typedef struct net {
    net_link link[NET_HOSTS][NET_HOSTS];
    int down[NET_HOSTS]; /* atomic: 1: the interface is to be down */
    int forgotten;       /* atomic: packets from or to this port are dropped; 0: none */
    int attached;        /* atomic: hosts that the relay serves */
    int refused;         /* atomic: why there can be no host, an errno */
    int hosts, mtu, door[2];
    pid_t relay;
} net;

static int net_get(const int *place) {
    return __atomic_load_n(place, __ATOMIC_SEQ_CST);
}

static void net_put(int *place, int v) {
    __atomic_store_n(place, v, __ATOMIC_SEQ_CST);
}

/* --------------------------------------------------------------------- a host */

static int net_request(int ctl, const char *name, unsigned long what, struct ifreq *request) {
    (void)snprintf(request->ifr_name, sizeof request->ifr_name, "%s", name);
    return ioctl(ctl, what, request);
}

static int net_raise(int ctl, const char *name, int up) {
    struct ifreq request;
    memset(&request, 0, sizeof request);
    if (net_request(ctl, name, SIOCGIFFLAGS, &request) != 0) return -1;
    if (up)
        request.ifr_flags = (short)(request.ifr_flags | IFF_UP);
    else
        request.ifr_flags = (short)(request.ifr_flags & ~IFF_UP);
    return net_request(ctl, name, SIOCSIFFLAGS, &request);
}

static int net_address(int ctl, unsigned long what, uint32_t address) {
    struct ifreq request;
    struct sockaddr_in in;
    memset(&request, 0, sizeof request);
    memset(&in, 0, sizeof in);
    in.sin_family = AF_INET;
    in.sin_addr.s_addr = htonl(address);
    memcpy(&request.ifr_addr, &in, sizeof in);
    return net_request(ctl, "net0", what, &request);
}

/* A device net0 with the address 10.77.0.(rank + 1). */
static int net_device(const net *n, int rank, int *ctl) {
    struct ifreq request;
    int tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
    *ctl = socket(AF_INET, SOCK_DGRAM, 0);
    memset(&request, 0, sizeof request);
    request.ifr_flags = IFF_TUN | IFF_NO_PI;
    if (tun < 0 || *ctl < 0 || net_request(tun, "net0", TUNSETIFF, &request) != 0) return -1;
    memset(&request, 0, sizeof request);
    request.ifr_mtu = n->mtu;
    if (net_raise(*ctl, "lo", 1) != 0 || net_request(*ctl, "net0", SIOCSIFMTU, &request) != 0 ||
        net_address(*ctl, SIOCSIFADDR, 0x0a4d0001u + (uint32_t)rank) != 0 ||
        net_address(*ctl, SIOCSIFNETMASK, 0xffffff00u) != 0 || net_raise(*ctl, "net0", 1) != 0)
        return -1;
    return tun;
}

/* What passes through the door: which host, its device and a socket that sets it. */
typedef struct net_parcel {
    struct msghdr head;
    struct iovec data;
    int rank, fd[2];
    char control[CMSG_SPACE(2 * sizeof(int))] __attribute__((aligned(8)));
} net_parcel;

static void net_parcel_init(net_parcel *p) {
    memset(p, 0, sizeof *p);
    p->data.iov_base = &p->rank;
    p->data.iov_len = sizeof p->rank;
    p->head.msg_iov = &p->data;
    p->head.msg_iovlen = 1;
    p->head.msg_control = p->control;
    p->head.msg_controllen = sizeof p->control;
}

/* In a rank, before it joins: 1 when it is on a host of its own and the others are, too. */
UNUSED static int net_enter(net *n, int rank) {
    net_parcel parcel;
    struct cmsghdr *rights;
    int ctl = -1, tun = -1;
    if (unshare(CLONE_NEWNET) == 0 || unshare(CLONE_NEWUSER | CLONE_NEWNET) == 0)
        tun = net_device(n, rank, &ctl);
    if (tun < 0) {
        net_put(&n->refused, errno ? errno : EPERM);
        return 0;
    }
    net_parcel_init(&parcel);
    parcel.rank = rank;
    parcel.fd[0] = tun;
    parcel.fd[1] = ctl;
    rights = CMSG_FIRSTHDR(&parcel.head);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof parcel.fd);
    memcpy(CMSG_DATA(rights), parcel.fd, sizeof parcel.fd);
    if (sendmsg(n->door[1], &parcel.head, 0) < 0) net_put(&n->refused, errno);
    (void)close(tun);
    (void)close(ctl);
    for (int i = 0; i < 5000 && net_get(&n->attached) < n->hosts; i++) {
        if (net_get(&n->refused)) return 0;
        sleep_ms(1);
    }
    return net_get(&n->attached) == n->hosts;
}

/* ------------------------------------------------------------------- the relay */

typedef struct net_packet {
    struct net_packet *next;
    int64_t due;
    size_t size;
    unsigned char bytes[NET_PACKET];
} net_packet;

typedef struct net_queue {
    net_packet *first, **last;
    int count, credit;
} net_queue;

typedef struct net_wire {
    net_queue flow[NET_FLOWS]; /* wait for the slow link */
    net_queue late;            /* are under way */
    int turn;
    int64_t free_at;
} net_wire;

typedef struct net_relay {
    net *n;
    net_wire wire[NET_HOSTS][NET_HOSTS];
    int tun[NET_HOSTS], ctl[NET_HOSTS], down[NET_HOSTS];
    uint64_t random;
    int queued;
} net_relay;

static void net_push(net_relay *x, net_queue *q, net_packet *p, int room) {
    if (q->count >= room) {
        free(p);
        return;
    }
    if (!q->count) q->last = &q->first;
    p->next = NULL;
    *q->last = p;
    q->last = &p->next;
    q->count++;
    x->queued++;
}

static net_packet *net_pop(net_relay *x, net_queue *q) {
    net_packet *p = q->first;
    q->first = p->next;
    q->count--;
    x->queued--;
    return p;
}

static int net_flow(const net_packet *p) {
    size_t at = (size_t)(p->bytes[0] & 15) * 4;
    unsigned ports = 0;
    for (size_t i = 0; i < 4 && at + i < p->size; i++) ports = ports * 31 + p->bytes[at + i];
    return (int)(ports % NET_FLOWS);
}

/* 1 if a packet's connection has this port at one of its ends. */
static int net_has_port(const net_packet *p, int port) {
    size_t at = (size_t)(p->bytes[0] & 15) * 4;
    if (!port || p->size < at + 4) return 0;
    return (p->bytes[at] << 8 | p->bytes[at + 1]) == port ||
           (p->bytes[at + 2] << 8 | p->bytes[at + 3]) == port;
}

/* One packet that host `from` has sent. */
static void net_take(net_relay *x, int from, net_packet *p) {
    int to = p->size >= 20 && p->bytes[0] >> 4 == 4 ? p->bytes[19] - 1 : -1;
    const net_link *link;
    net_wire *wire;
    if (to < 0 || to >= x->n->hosts || to == from || p->bytes[16] != 10 ||
        net_has_port(p, net_get(&x->n->forgotten))) {
        free(p);
        return;
    }
    link = &x->n->link[from][to];
    wire = &x->wire[from][to];
    x->random = x->random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    if (net_get(&link->cut) || (int)((x->random >> 33) % 100) < net_get(&link->loss_percent)) {
        free(p);
        return;
    }
    p->due = now_ns() + (int64_t)net_get(&link->delay_us) * 1000;
    if (net_get(&link->ns_per_byte))
        net_push(x, &wire->flow[net_flow(p)], p, NET_FLOW_ROOM);
    else
        net_push(x, &wire->late, p, NET_LATE_ROOM);
}

/* The next packet of a slow link: the connections share its bytes evenly. NULL: none. */
static net_packet *net_next(net_relay *x, net_wire *wire) {
    for (int i = 0; i < NET_FLOWS * (NET_PACKET / NET_QUANTUM + 2); i++) {
        net_queue *q = &wire->flow[wire->turn];
        if (q->count && (int)q->first->size <= q->credit) {
            q->credit -= (int)q->first->size;
            return net_pop(x, q);
        }
        wire->turn = (wire->turn + 1) % NET_FLOWS;
        q = &wire->flow[wire->turn];
        q->credit = q->count ? q->credit + NET_QUANTUM : 0;
    }
    return NULL;
}

static void net_deliver(net_relay *x, int from, int to) {
    const net_link *link = &x->n->link[from][to];
    net_wire *wire = &x->wire[from][to];
    int64_t now = now_ns();
    while (wire->free_at <= now) {
        net_packet *p = net_next(x, wire);
        if (!p) break;
        wire->free_at = now + (int64_t)p->size * net_get(&link->ns_per_byte);
        p->due = wire->free_at + (int64_t)net_get(&link->delay_us) * 1000;
        net_push(x, &wire->late, p, NET_LATE_ROOM);
    }
    while (wire->late.count && wire->late.first->due <= now) {
        net_packet *p = net_pop(x, &wire->late);
        if (!net_get(&link->cut) && write(x->tun[to], p->bytes, p->size) < 0) errno = 0;
        free(p);
    }
}

static void net_attach(net_relay *x) {
    net_parcel parcel;
    struct cmsghdr *rights;
    net_parcel_init(&parcel);
    if (recvmsg(x->n->door[0], &parcel.head, MSG_DONTWAIT) <= 0) return;
    rights = CMSG_FIRSTHDR(&parcel.head);
    if (!rights || rights->cmsg_len != CMSG_LEN(sizeof parcel.fd)) return;
    memcpy(parcel.fd, CMSG_DATA(rights), sizeof parcel.fd);
    x->tun[parcel.rank] = parcel.fd[0];
    x->ctl[parcel.rank] = parcel.fd[1];
    net_put(&x->n->attached, net_get(&x->n->attached) + 1);
}

/* Interfaces go down and up as the test wants. */
static void net_interfaces(net_relay *x) {
    for (int h = 0; h < x->n->hosts; h++) {
        int down = net_get(&x->n->down[h]);
        if (x->tun[h] < 0 || x->down[h] == down) continue;
        (void)net_raise(x->ctl[h], "net0", !down);
        x->down[h] = down;
    }
}

static void net_read(net_relay *x, int from) {
    for (int i = 0; i < NET_BURST; i++) {
        net_packet *p = (net_packet *)malloc(sizeof *p);
        ssize_t size = p ? read(x->tun[from], p->bytes, sizeof p->bytes) : -1;
        if (size <= 0) {
            free(p);
            return;
        }
        p->size = (size_t)size;
        net_take(x, from, p);
    }
}

/* How long the relay may sleep: until the next packet is due, or a link is free again. */
static struct timespec net_rest(const net_relay *x) {
    const int64_t now = now_ns();
    struct timespec rest = {0, 0};
    int64_t until = now + (x->queued ? 1000000 : 20000000);
    for (int from = 0; from < x->n->hosts; from++) {
        for (int to = 0; to < x->n->hosts; to++) {
            const net_wire *wire = &x->wire[from][to];
            if (wire->free_at > now && wire->free_at < until) until = wire->free_at;
            if (wire->late.count && wire->late.first->due < until) until = wire->late.first->due;
        }
    }
    if (until > now) rest.tv_nsec = (long)(until - now);
    return rest;
}

/* For at most ten minutes, or until the test ends it. */
static void net_relay_run(net *n) {
    static net_relay x;
    double until = now_ms() + 600e3;
    (void)prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL); /* delays of a tenth of a ms count */
    x.n = n;
    x.random = 1;
    for (int h = 0; h < NET_HOSTS; h++) x.tun[h] = -1;
    while (now_ms() < until) {
        struct pollfd p[NET_HOSTS + 1];
        struct timespec rest = net_rest(&x);
        for (int h = 0; h < NET_HOSTS; h++) {
            p[h].fd = x.down[h] ? -1 : x.tun[h];
            p[h].events = POLLIN;
        }
        p[NET_HOSTS].fd = n->door[0];
        p[NET_HOSTS].events = POLLIN;
        (void)ppoll(p, NET_HOSTS + 1, &rest, NULL);
        net_attach(&x);
        net_interfaces(&x);
        for (int h = 0; h < n->hosts; h++)
            if (x.tun[h] >= 0 && !x.down[h]) net_read(&x, h);
        for (int from = 0; from < n->hosts; from++)
            for (int to = 0; to < n->hosts; to++)
                if (from != to) net_deliver(&x, from, to);
    }
}

/* NULL: no memory or process. */
UNUSED static net *net_start(int hosts, int mtu) {
    net *n = (net *)shared_memory(sizeof *n);
    pid_t relay;
    if (!n) return NULL;
    n->hosts = hosts;
    n->mtu = mtu;
    (void)fflush(NULL);
    if (socketpair(AF_UNIX, SOCK_DGRAM, 0, n->door) != 0) return NULL;
    relay = fork();
    if (relay == 0) {
        net_relay_run(n);
        _exit(0);
    }
    n->relay = relay;
    return relay > 0 ? n : NULL;
}

UNUSED static void net_end(net *n) {
    (void)kill(n->relay, SIGKILL);
    (void)waitpid(n->relay, NULL, 0);
    (void)close(n->door[0]);
    (void)close(n->door[1]);
    (void)munmap(n, sizeof *n);
}

/* Sets one rule of all links that go from a host in `from` to one in `to` (bit sets). */
UNUSED static void net_rule(net *n, unsigned from, unsigned to, net_link rule) {
    for (int a = 0; a < n->hosts; a++) {
        for (int b = 0; b < n->hosts; b++) {
            if (!(from >> a & 1) || !(to >> b & 1)) continue;
            net_put(&n->link[a][b].cut, rule.cut);
            net_put(&n->link[a][b].loss_percent, rule.loss_percent);
            net_put(&n->link[a][b].delay_us, rule.delay_us);
            net_put(&n->link[a][b].ns_per_byte, rule.ns_per_byte);
        }
    }
}

#endif
