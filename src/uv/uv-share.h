/* ========================================================================== */
/* >>uv-share                                      MARK: - uv-share (private) */
/* Ranks of one host find each other and exchange their segments, over a Unix */
/* socket with an abstract name: only processes of the same network namespace */
/* reach it, so no address decides what one host is. Both must be of the same */
/* user, and prove the key as on every connection (>>uv-connect). Then each   */
/* end sends the descriptors of its segment and bell, the client first.       */
/* Needs: >>uv-shm >>uv-connect.                                              */
/* ========================================================================== */

#if TSHI_UV_SHM
/* Returns the address of a rank's Unix socket. Its name is derived from the key of this world. */
static tshi_uv_address tshi_uv_share_address(const tsh_uv_world *world, int rank) {
    tshi_uv_address address;
    struct sockaddr_un *un = (struct sockaddr_un *)(void *)&address.storage;
    unsigned char bytes[32];
    char text[33];
    tshi_uv_cursor c = tshi_uv_cursor_over(bytes, sizeof bytes, 1);
    (void)tshi_uv_field(&c, (uint64_t)rank, 8);
    (void)crypto_auth_hmacsha256(bytes, bytes, 8, world->mesh);
    memset(&address, 0, sizeof address);
    un->sun_family = AF_UNIX; /* sun_path[0] is 0: an abstract name, in no file system */
    memcpy(un->sun_path + 1, "tshard-", 7);
    memcpy(un->sun_path + 8, sodium_bin2hex(text, sizeof text, bytes, 16), 32);
    address.size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 40);
    return address;
}

/* Returns 1 if the process at the other end of a Unix socket is of this user. */
static int tshi_uv_same_user(int fd) {
    struct { /* struct ucred, which strict POSIX hides */
        int pid;
        unsigned uid, gid;
    } peer = {-1, 0, 0};
    socklen_t size = (socklen_t)sizeof peer;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == geteuid();
}

/* Space for a control message with two descriptors, aligned for its header. */
typedef union tshi_uv_passage {
    struct cmsghdr align;
    char bytes[CMSG_SPACE(2 * sizeof(int))];
} tshi_uv_passage;

/* Fills `message`: one byte of data, and a control message in `passage` that can carry two
 * descriptors. */
static void tshi_uv_passing(struct msghdr *message, struct iovec *iov, char *byte,
                            tshi_uv_passage *passage) {
    memset(message, 0, sizeof *message);
    memset(passage, 0, sizeof *passage);
    iov->iov_base = byte;
    iov->iov_len = 1;
    message->msg_iov = iov;
    message->msg_iovlen = 1;
    message->msg_control = passage->bytes;
    message->msg_controllen = sizeof passage->bytes;
}

/* Sends the descriptors of this rank's segment and bell on a Unix socket. Returns 0 if that
 * failed. */
static int tshi_uv_give_segment(const tsh_uv_world *world, int fd) {
    const int fds[2] = {world->segment, world->near[world->rank].bell};
    tshi_uv_passage passage;
    struct msghdr message;
    struct cmsghdr *head;
    struct iovec iov;
    char byte = 0;
    tshi_uv_passing(&message, &iov, &byte, &passage);
    head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof fds);
    memcpy(CMSG_DATA(head), fds, sizeof fds);
    return sendmsg(fd, &message, TSHI_UV_NOSIGNAL) == 1;
}

/* Receives the descriptors of a segment and a bell. Returns 1: they are in fds; 0: call again
 * later; -1: failed. */
static int tshi_uv_take_segment(int fd, int fds[2]) {
    tshi_uv_passage passage;
    struct msghdr message;
    const struct cmsghdr *head;
    struct iovec iov;
    char byte;
    ssize_t n;
    tshi_uv_passing(&message, &iov, &byte, &passage);
    n = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
    if (n < 0) return tshi_uv_later() ? 0 : -1;
    head = n ? CMSG_FIRSTHDR(&message) : NULL;
    if (!head || head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS ||
        head->cmsg_len < CMSG_LEN(sizeof(int)))
        return -1;
    memcpy(fds, CMSG_DATA(head), sizeof fds[0] * 2);
    if (head->cmsg_len == CMSG_LEN(2 * sizeof(int))) return 1;
    (void)close(fds[0]); /* this process had a free descriptor for one of the two only */
    return -1;
}

/* Begins to listen on a Unix socket for ranks of this host. If that fails, they use TCP with this
 * one. */
static void tshi_uv_share_listen(tsh_uv_world *world) {
    tshi_uv_address at = tshi_uv_share_address(world, world->rank);
    if (!world->near[world->rank].base) return;
    world->shm_listener = tshi_uv_listen(&at);
    if (world->shm_listener < 0) tshi_uv_shm_without(world, "open a Unix socket");
}

/* Called at both ends once they are authenticated. The client sends its segment; then each end
 * awaits the other's. Returns 0, or -1 if the connection is to end. */
static int tshi_uv_share_begin(tshi_uv_conn *conn) {
    conn->phase = TSHI_UV_SHARES;
    return !conn->dialled || tshi_uv_give_segment(conn->world, conn->fd) ? 0 : -1;
}

/* Receives and maps the other rank's segment; the server then sends its own. Returns 1: done, also
 * if one end cannot share, so that this pair uses TCP; 0: call again later; -1: the connection is
 * to end. */
static int tshi_uv_share_step(tshi_uv_conn *conn) {
    tsh_uv_world *world = conn->world;
    const int rank = conn->dialled ? conn->hello.server : conn->hello.client;
    tshi_uv_shm_segment *own = tshi_uv_segment_of(world, world->rank);
    int fds[2], got = tshi_uv_take_segment(conn->fd, fds);
    if (got <= 0) return got;
    if (tshi_uv_shm_map(world, rank, fds) &&
        tshi_uv_shm_rows(world, tshi_uv_shm_begin(), world->size, rank))
        TSHI_UV_PUT(&own->near[rank], 1);
    else
        tshi_uv_shm_without(world, "map the memory of another rank");
    return conn->dialled || tshi_uv_give_segment(world, conn->fd) ? 1 : -1;
}
#else
static int tshi_uv_same_user(int fd) {
    (void)fd;
    return 0;
}

static void tshi_uv_share_listen(tsh_uv_world *world) {
    (void)world;
}

static int tshi_uv_share_begin(tshi_uv_conn *conn) {
    (void)conn;
    return -1;
}

static int tshi_uv_share_step(tshi_uv_conn *conn) {
    (void)conn;
    return -1;
}
#endif

/* Returns 1 while this rank waits for the segment of a lower rank. */
static int tshi_uv_sharing(const tsh_uv_world *world) {
    const tshi_uv_conn *conn = world->conns;
    while (conn && (!conn->dialled || conn->hello.purpose != TSHI_UV_SHARE)) conn = conn->next;
    return conn != NULL;
}

static void tshi_uv_share_end(tsh_uv_world *world) { /* Stops listening for ranks of this host. */
    tshi_uv_unwatch(&world->shm_listening);
    tshi_uv_close_fd(&world->shm_listener);
}
