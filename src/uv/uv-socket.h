/* ========================================================================== */
/* >>uv-socket                                    MARK: - uv-socket (private) */
/* Internet addresses; sockets that connect, listen or were accepted.         */
/* Sockets do not block, are closed on exec, and do not raise SIGPIPE.        */
/* Needs: >>uv-types.                                                         */
/* ========================================================================== */

#if defined(MSG_NOSIGNAL)
#define TSHI_UV_NOSIGNAL MSG_NOSIGNAL
#elif defined(SO_NOSIGPIPE)
#define TSHI_UV_NOSIGNAL 0 /* SO_NOSIGPIPE, set on the socket, replaces the flag */
#else
#error "tshard_uv.h needs MSG_NOSIGNAL or SO_NOSIGPIPE: on macOS define _DARWIN_C_SOURCE, too"
#endif

/* Fills list with the addresses of a host, in the system's order of preference, and returns their
 * number. 0: there are none, and *why is the reason. `numeric` 1: host must be an address, no name
 * is looked up. */
static int tshi_uv_resolve(const char *host, int port, int numeric, tshi_uv_address *list,
                           const char **why) {
    struct addrinfo hints, *found = NULL;
    char service[16];
    int n = 0, failed;
    memset(&hints, 0, sizeof hints);
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICSERV | (numeric ? AI_NUMERICHOST : 0);
    (void)snprintf(service, sizeof service, "%d", port);
    failed = getaddrinfo(host, service, &hints, &found);
    *why = failed ? gai_strerror(failed) : "it has no address";
    if (failed) return 0;
    for (const struct addrinfo *at = found; at && n < TSHI_UV_ADDRESSES; at = at->ai_next) {
        if (at->ai_addrlen > sizeof list[n].storage) continue;
        memcpy(&list[n].storage, at->ai_addr, at->ai_addrlen);
        list[n++].size = (socklen_t)at->ai_addrlen;
    }
    freeaddrinfo(found);
    return n;
}

static const struct sockaddr *tshi_uv_sockaddr(const tshi_uv_address *address) {
    return (const struct sockaddr *)&address->storage;
}

static int tshi_uv_port(const tshi_uv_address *address) {
    const struct sockaddr_storage *storage = &address->storage;
    if (storage->ss_family == AF_INET)
        return ntohs(((const struct sockaddr_in *)(const void *)storage)->sin_port);
    if (storage->ss_family == AF_INET6)
        return ntohs(((const struct sockaddr_in6 *)(const void *)storage)->sin6_port);
    return 0;
}

static void tshi_uv_set_port(tshi_uv_address *address, int port) {
    struct sockaddr_storage *storage = &address->storage;
    if (storage->ss_family == AF_INET)
        ((struct sockaddr_in *)(void *)storage)->sin_port = htons((uint16_t)port);
    if (storage->ss_family == AF_INET6)
        ((struct sockaddr_in6 *)(void *)storage)->sin6_port = htons((uint16_t)port);
}

/* Returns 1 if only this host can reach the address. */
static int tshi_uv_loopback(const tshi_uv_address *address) {
    const struct sockaddr_storage *storage = &address->storage;
    if (storage->ss_family == AF_INET) {
        const struct sockaddr_in *in = (const struct sockaddr_in *)(const void *)storage;
        return ntohl(in->sin_addr.s_addr) >> 24 == 127;
    }
    if (storage->ss_family == AF_INET6) {
        const struct sockaddr_in6 *in = (const struct sockaddr_in6 *)(const void *)storage;
        return IN6_IS_ADDR_LOOPBACK(&in->sin6_addr) ||
               (IN6_IS_ADDR_V4MAPPED(&in->sin6_addr) && in->sin6_addr.s6_addr[12] == 127);
    }
    return 0;
}

/* Writes the address in numbers, without its port, such as "10.0.0.1"; "?" if that fails. */
static void tshi_uv_host_text(const tshi_uv_address *address, char *text, size_t room) {
    if (getnameinfo(tshi_uv_sockaddr(address), address->size, text, (socklen_t)room, NULL, 0,
                    NI_NUMERICHOST) != 0)
        (void)snprintf(text, room, "?");
}

/* Writes a host and its port to text: "127.0.0.1:4000" or, for IPv6, "[::1]:4000". */
static void tshi_uv_name(const char *host, int port, char *text, size_t room) {
    (void)snprintf(text, room, strchr(host, ':') ? "[%s]:%d" : "%s:%d", host, port);
}

/* Gets the address of a socket's own end (`other` 0) or of its peer's end (`other` 1). Returns 0 if
 * the system call failed. */
static int tshi_uv_end_of(int fd, int other, tshi_uv_address *address) {
    struct sockaddr *to = (struct sockaddr *)&address->storage;
    memset(address, 0, sizeof *address);
    address->size = (socklen_t)sizeof address->storage;
    return (other ? getpeername(fd, to, &address->size) : getsockname(fd, to, &address->size)) == 0;
}

static void tshi_uv_address_text(const tshi_uv_address *address, char *text, size_t room) {
    char host[64];
    if (address->storage.ss_family == AF_UNIX) {
        (void)snprintf(text, room, "a Unix socket");
        return;
    }
    tshi_uv_host_text(address, host, sizeof host);
    tshi_uv_name(host, tshi_uv_port(address), text, room);
}

static void tshi_uv_close_fd(int *fd) {
    if (*fd >= 0) (void)close(*fd);
    *fd = -1;
}

/* Makes a socket non-blocking, closed on exec, without Nagle's delay and SIGPIPE. Returns 0 if that
 * failed (errno). */
static int tshi_uv_prepare_fd(int fd) {
    int flags = fcntl(fd, F_GETFL), one = 1;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
#ifdef SO_NOSIGPIPE
    (void)setsockopt(fd, SOL_SOCKET, SO_NOSIGPIPE, &one, sizeof one);
#endif
    return flags >= 0 && fcntl(fd, F_SETFL, flags | O_NONBLOCK) == 0 &&
           fcntl(fd, F_SETFD, FD_CLOEXEC) == 0;
}

/* Closes fd, keeps errno as it was, and returns -1. */
static int tshi_uv_give_up(int fd) {
    int why = errno;
    (void)close(fd);
    errno = why;
    return -1;
}

static int tshi_uv_socket(const tshi_uv_address *address) {
    int fd = socket(address->storage.ss_family, SOCK_STREAM, 0);
    return fd < 0 || tshi_uv_prepare_fd(fd) ? fd : tshi_uv_give_up(fd);
}

/* Returns a new socket that listens on the address; -1: a system call failed (errno). */
static int tshi_uv_listen(const tshi_uv_address *address) {
    int one = 1, fd = tshi_uv_socket(address);
    if (fd < 0) return -1;
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    return bind(fd, tshi_uv_sockaddr(address), address->size) == 0 && listen(fd, SOMAXCONN) == 0
               ? fd
               : tshi_uv_give_up(fd);
}

/* Returns a new socket that is connected, or still connecting, to the address; -1: a system call
 * failed (errno). */
static int tshi_uv_connect(const tshi_uv_address *address) {
    int fd = tshi_uv_socket(address);
    if (fd < 0) return -1;
    return connect(fd, tshi_uv_sockaddr(address), address->size) == 0 || errno == EINPROGRESS ||
                   errno == EINTR
               ? fd
               : tshi_uv_give_up(fd);
}

/* Returns 1 if errno says that the call would block or was interrupted: try again later. */
static int tshi_uv_later(void) {
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

/* Returns how many bytes sent on the socket the other end's system has not acknowledged; -1:
 * unknown. */
static int tshi_uv_unacknowledged(int fd) {
    int bytes = -1;
#if defined(SO_NWRITE) /* macOS */
    socklen_t size = (socklen_t)sizeof bytes;
    if (getsockopt(fd, SOL_SOCKET, SO_NWRITE, &bytes, &size) != 0) bytes = -1;
#elif defined(TIOCOUTQ)
    if (ioctl(fd, TIOCOUTQ, &bytes) != 0) bytes = -1;
#else
    (void)fd;
#endif
    return bytes;
}

static int tshi_uv_out_of_descriptors(int why) {
    return why == EMFILE || why == ENFILE;
}

/* Returns the number of file descriptors that a rank needs for a world of `size` ranks; groups need
 * more. */
static int tshi_uv_descriptors(int size) {
    /* 3 connections per peer; 28 for the listeners, event loops and so on */
    return 3 * (size - 1) + 28;
}
