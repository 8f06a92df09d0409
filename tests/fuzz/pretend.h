/* Sockets, the loops of libuv and the clock, pretended: nothing leaves the process, nothing is
 * waited for, and a run is the same every time. What goes wrong quietly in a system aborts here: a
 * descriptor that is closed twice, used after it was closed, or left open.
 *
 * Include it between tshard.h, of which it would change names, and tshard_uv.h. */
#ifndef TSHARD_TESTS_PRETEND_H
#define TSHARD_TESTS_PRETEND_H

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>
#include <uv.h>

enum { SOCKETS = 160, FIRST_FD = 1000, POLLS = 2 * SOCKETS };
enum { IN_ROOM = 1 << 18, OUT_KEPT = 256, OUT_ROOM = 1 << 18 };

/* Seen from the other side: `in` goes to the backend, `out` comes from it. */
typedef struct pretend_socket {
    int open;    /* the backend holds it */
    int ended;   /* the other side does not */
    int called;  /* the backend connects with it */
    int waiting; /* a listener: those who want to be accepted; -1: no listener */
    size_t in, in_read, out, out_kept;
    unsigned char kept[OUT_KEPT];
} pretend_socket;

typedef struct pretend_poll {
    uv_poll_t *poll; /* NULL: closed */
    uv_loop_t *loop;
    uv_poll_cb call;
    int fd, events;
} pretend_poll;

typedef struct pretend_system {
    int64_t now;
    int sockets, polls, closing;
    pretend_socket socket[SOCKETS];
    pretend_poll poll[POLLS];
    uv_handle_t *closed[POLLS];
    uv_close_cb on_closed[POLLS];
    uv_prepare_t *prepare;
    uv_prepare_cb on_prepare;
    uv_async_t *async[2]; /* that were sent */
} pretend_system;

static pretend_system pretend;
static unsigned char pretend_bytes[SOCKETS][IN_ROOM];

static void must(int condition) {
    if (!condition) abort();
}

static void pretend_begin(void) {
    memset(&pretend, 0, sizeof pretend);
    pretend.now = INT64_C(1000000000);
}

/* ---- sockets ---- */

static pretend_socket *pretend_at(int fd) {
    must(fd >= FIRST_FD && fd < FIRST_FD + pretend.sockets);
    must(pretend.socket[fd - FIRST_FD].open);
    return &pretend.socket[fd - FIRST_FD];
}

static int pretend_open(void) {
    pretend_socket *s = &pretend.socket[pretend.sockets];
    if (pretend.sockets == SOCKETS) {
        errno = EMFILE;
        return -1;
    }
    memset(s, 0, sizeof *s);
    s->open = 1;
    s->waiting = -1;
    return FIRST_FD + pretend.sockets++;
}

static int pretend_close(int fd) {
    pretend_at(fd)->open = 0;
    return 0;
}

static int pretend_connect(int fd) {
    pretend_at(fd)->called = 1;
    errno = EINPROGRESS;
    return -1;
}

static int pretend_listen(int fd) {
    pretend_at(fd)->waiting = 0;
    return 0;
}

static int pretend_accept(int fd) {
    pretend_socket *s = pretend_at(fd);
    must(s->waiting >= 0);
    errno = EAGAIN;
    return s->waiting && s->waiting-- ? pretend_open() : -1;
}

static int pretend_name(int fd, struct sockaddr *name, socklen_t *size) {
    struct sockaddr_in in;
    memset(&in, 0, sizeof in);
    in.sin_family = AF_INET;
    in.sin_port = htons((uint16_t)(4000 + fd - FIRST_FD));
    in.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    must(*size >= sizeof in && pretend_at(fd)->open);
    memcpy(name, &in, sizeof in);
    *size = (socklen_t)sizeof in;
    return 0;
}

static int pretend_option(int fd, void *value) {
    memset(value, 0, sizeof(int)); /* SO_ERROR */
    return !pretend_at(fd)->open;
}

static ssize_t pretend_recv(int fd, void *bytes, size_t size) {
    pretend_socket *s = pretend_at(fd);
    size_t n = s->in - s->in_read;
    n = n < size ? n : size;
    errno = EAGAIN;
    if (!n) return s->ended ? 0 : -1;
    memcpy(bytes, pretend_bytes[fd - FIRST_FD] + s->in_read, n);
    s->in_read += n;
    return (ssize_t)n;
}

static ssize_t pretend_send(int fd, const void *bytes, size_t size) {
    pretend_socket *s = pretend_at(fd);
    size_t n = OUT_ROOM - s->out, kept;
    n = n < size ? n : size;
    errno = s->ended ? EPIPE : EAGAIN;
    if (s->ended || !n) return -1;
    kept = OUT_KEPT - s->out_kept;
    kept = kept < n ? kept : n;
    memcpy(s->kept + s->out_kept, bytes, kept);
    s->out_kept += kept;
    s->out += n;
    return (ssize_t)n;
}

/* All pieces of a message, as far as it goes. */
static ssize_t pretend_message(int fd, const struct msghdr *m, int sends) {
    ssize_t total = 0;
    for (size_t i = 0; i < (size_t)m->msg_iovlen; i++) {
        const struct iovec *v = &m->msg_iov[i];
        ssize_t n = sends ? pretend_send(fd, v->iov_base, v->iov_len)
                          : pretend_recv(fd, v->iov_base, v->iov_len);
        if (n <= 0) return total ? total : n;
        total += n;
        if ((size_t)n < v->iov_len) break;
    }
    return total;
}

/* From the other side. */
static void pretend_say(int which, const void *bytes, size_t size) {
    pretend_socket *s = &pretend.socket[which];
    size_t room = IN_ROOM - s->in;
    size = size < room ? size : room;
    if (!s->open || s->ended) return;
    memcpy(pretend_bytes[which] + s->in, bytes, size);
    s->in += size;
}

/* What came from the backend, of that the first `size` bytes; 0: there is less. */
static int pretend_hear(int which, void *bytes, size_t size) {
    pretend_socket *s = &pretend.socket[which];
    if (s->out_kept < size) return 0;
    memcpy(bytes, s->kept, size);
    s->out_kept = 0;
    return 1;
}

/* ---- loops ---- */

static int pretend_poll_init(uv_loop_t *loop, uv_poll_t *poll, int fd) {
    pretend_poll *p = &pretend.poll[pretend.polls];
    must(pretend.polls < POLLS && pretend_at(fd)->open);
    pretend.polls++;
    p->poll = poll;
    p->loop = loop;
    p->fd = fd;
    return 0;
}

static pretend_poll *pretend_poll_of(const uv_poll_t *poll) {
    int i = 0;
    while (i < pretend.polls && pretend.poll[i].poll != poll) i++;
    must(i < pretend.polls);
    return &pretend.poll[i];
}

static int pretend_poll_start(uv_poll_t *poll, int events, uv_poll_cb call) {
    pretend_poll *p = pretend_poll_of(poll);
    p->events = events;
    p->call = call;
    return !pretend_at(p->fd)->open;
}

static void pretend_handle_close(uv_handle_t *handle, uv_close_cb call) {
    pretend_poll_of((uv_poll_t *)handle)->poll = NULL;
    must(pretend.closing < POLLS);
    pretend.closed[pretend.closing] = handle;
    pretend.on_closed[pretend.closing++] = call;
}

/* Close callbacks come late, as libuv's do. */
static int pretend_run(void) {
    int kept = 0;
    for (int i = 0; i < pretend.closing; i++) pretend.on_closed[i](pretend.closed[i]);
    pretend.closing = 0;
    for (int i = 0; i < pretend.polls; i++)
        if (pretend.poll[i].poll) pretend.poll[kept++] = pretend.poll[i];
    pretend.polls = kept;
    return 0;
}

static int pretend_prepare_start(uv_prepare_t *prepare, uv_prepare_cb call) {
    pretend.prepare = prepare;
    pretend.on_prepare = call;
    return 0;
}

static int pretend_async_init(uv_async_t *async, uv_async_cb call) {
    async->async_cb = call;
    return 0;
}

static int pretend_async_send(uv_async_t *async) {
    int i = pretend.async[0] && pretend.async[0] != async;
    must(!pretend.async[i] || pretend.async[i] == async);
    pretend.async[i] = async;
    return 0;
}

static int pretend_ready(const pretend_poll *p) {
    const pretend_socket *s = pretend_at(p->fd);
    int ready = s->in > s->in_read || s->ended || s->waiting > 0 ? UV_READABLE : 0;
    if (s->out < OUT_ROOM) ready |= UV_WRITABLE;
    return ready & p->events;
}

/* A loop's turn. */
static void pretend_turn(uv_loop_t *loop) {
    uv_async_t *async[2];
    memcpy(async, pretend.async, sizeof async);
    memset(pretend.async, 0, sizeof async);
    if (pretend.prepare->loop == loop) pretend.on_prepare(pretend.prepare);
    for (int i = 0; i < pretend.polls; i++) {
        pretend_poll *p = &pretend.poll[i];
        int ready = p->poll && p->loop == loop ? pretend_ready(p) : 0;
        if (ready) p->call(p->poll, 0, ready);
    }
    for (int i = 0; i < 2; i++)
        if (async[i] && async[i]->async_cb) async[i]->async_cb(async[i]);
    (void)pretend_run();
}

/* Nothing is left open. */
static void pretend_end(void) {
    for (int i = 0; i < pretend.sockets; i++) must(!pretend.socket[i].open);
    must(!pretend.polls && !pretend.closing);
}

/* ---- names ---- */

#define socket(family, type, protocol)   ((void)(family), pretend_open())
#define close(fd)                        pretend_close(fd)
#define connect(fd, to, size)            ((void)(to), pretend_connect(fd))
#define bind(fd, at, size)               ((void)(at), 0)
#define listen(fd, backlog)              pretend_listen(fd)
#define accept(fd, name, size)           (pretend_name(fd, name, size), pretend_accept(fd))
#define getsockname(fd, name, size)      pretend_name(fd, name, size)
#define getpeername(fd, name, size)      pretend_name(fd, name, size)
#define getsockopt(fd, at, name, v, n)   ((void)(n), pretend_option(fd, v))
#define setsockopt(fd, at, name, v, n)   ((void)(v), 0)
#define fcntl(fd, ...)                   (-!pretend_at(fd)->open)
#define shutdown(fd, how)                (!pretend_at(fd)->open)
#define ioctl(fd, what, bytes)           ((void)(fd), (void)(what), *(bytes) = 0)
#define recv(fd, bytes, size, flags)     pretend_recv(fd, bytes, size)
#define send(fd, bytes, size, flags)     pretend_send(fd, bytes, size)
#define recvmsg(fd, m, flags)            pretend_message(fd, m, 0)
#define sendmsg(fd, m, flags)            pretend_message(fd, m, 1)
#define tsh_now()                        (pretend.now)
#define tshb_deadline(timeout, otherwise) (pretend.now + ((timeout) ? (timeout) : (otherwise)))
#define uv_loop_init(loop)               ((void)(loop), 0)
#define uv_loop_close(loop)              ((void)(loop), 0)
#define uv_run(loop, mode)               pretend_run()
#define uv_walk(loop, call, argument)    ((void)(call))
#define uv_stop(loop)                    ((void)(loop))
#define uv_poll_init(loop, poll, fd)     pretend_poll_init(loop, poll, fd)
#define uv_poll_start(poll, events, fn)  pretend_poll_start(poll, events, fn)
#define uv_poll_stop(poll)               pretend_poll_start(poll, 0, NULL)
#define uv_close(handle, call)           pretend_handle_close(handle, call)
#define uv_timer_init(loop, timer)       ((void)(timer), 0)
#define uv_timer_start(timer, fn, ms, n) ((void)(fn), 0)
#define uv_prepare_init(to, prepare)     ((prepare)->loop = (to), 0)
#define uv_prepare_start(prepare, fn)    pretend_prepare_start(prepare, fn)
#define uv_async_init(loop, async, fn)   pretend_async_init(async, fn)
#define uv_async_send(async)             pretend_async_send(async)

#endif
