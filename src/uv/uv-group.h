/* ========================================================================== */
/* >>uv-group                                      MARK: - uv-group (private) */
/* A group of ranks: its members, two data connections to each (one for       */
/* collectives, one for messages) and its operations. The control thread      */
/* connects a group; after that only the caller's thread uses it.             */
/* Needs: >>uv-shm >>uv-connect.                                              */
/* ========================================================================== */

static void tshi_uv_group_free(tshi_uv_group *group) { /* Closes and frees a group, or NULL. */
    if (!group) return;
    tshi_uv_shm_leave(group);
    /* group->link is NULL if there was no memory for it */
    for (int i = 0; group->link && i < 2 * group->size; i++) {
        tshi_uv_unwatch(&group->link[i].poll);
        tshi_uv_close_fd(&group->link[i].fd);
        tshi_uv_channel_free(&group->link[i].channel);
    }
    for (int i = 0; i < TSHI_UV_OPS; i++) free(group->op[i].scratch);
    tshi_uv_close_fd(&group->listener);
    free(group->link);
    free(group->streams);
    free(group->ranks);
    free(group);
}

/* Returns a group without connections, whose ranks and ports the caller has to fill in; NULL: no
 * memory. */
static tshi_uv_group *tshi_uv_group_new(tsh_uv_world *world, uint64_t id, int rank, int size) {
    size_t n = (size_t)size;
    tshi_uv_group *group = (tshi_uv_group *)calloc(1, sizeof *group);
    if (!group) return NULL;
    group->world = world;
    group->id = id;
    group->rank = rank;
    group->size = size;
    group->listener = -1;            /* no listening socket yet */
    group->missing = 2 * (size - 1); /* two connections to every other member */
    /* `size` connections for collectives, then `size` for messages */
    group->link = (tshi_uv_link *)calloc(2 * n, sizeof *group->link);
    group->streams = (tshi_uv_stream *)calloc(2 * n * TSHI_UV_OPS, sizeof *group->streams);
    /* one array of 4 n entries: ranks, ports, first and last */
    group->ranks = (int *)calloc(4 * n, sizeof *group->ranks);
    for (int i = 0; group->link && i < 2 * size; i++) {
        group->link[i].group = group;
        group->link[i].fd = -1;         /* not connected */
        group->link[i].peer = i % size; /* the peer's rank in the group */
    }
    if (!group->link || !group->streams || !group->ranks) {
        tshi_uv_group_free(group);
        return NULL;
    }
    group->ports = group->ranks + n;
    group->first = group->ports + n;
    group->last = group->first + n;
    /* until tshi_uv_find_hosts knows the hosts, each rank counts as one */
    for (int r = 0; r < size; r++) group->first[r] = group->last[r] = r;
    for (size_t i = 0; i < TSHI_UV_OPS; i++) {
        group->op[i].group = group;
        group->op[i].in = group->streams + 2 * i * n; /* per op: n from peers, n to peers */
        group->op[i].out = group->op[i].in + n;
    }
    return group;
}

static int tshi_uv_next(const tshi_uv_group *group) { /* Returns the next rank on the ring. */
    return group->rank + 1 == group->size ? 0 : group->rank + 1;
}

static int tshi_uv_prev(const tshi_uv_group *group) { /* Returns the previous rank on the ring. */
    return group->rank == 0 ? group->size - 1 : group->rank - 1;
}

/* Returns the number that stands for the host of rank r of the group (peer->host). */
static int tshi_uv_host_of(const tshi_uv_group *group, int r) {
    return group->world->peer[group->ranks[r]].host;
}

/* Returns the last rank of the range of ranks from `from` on that are all on the host of rank
 * `from`. */
static int tshi_uv_range_end(const tshi_uv_group *group, int from) {
    int r = from;
    while (r + 1 < group->size && tshi_uv_host_of(group, r + 1) == tshi_uv_host_of(group, from))
        r++;
    return r;
}

/* Sets group->first and group->last (the range of ranks on each rank's host) once the world has
 * formed. */
static void tshi_uv_find_hosts(tshi_uv_group *group) {
    const int size = group->size;
    int end;
    if (tshi_uv_range_end(group, 0) == size - 1) return; /* one host: keeps first and last */
    for (int begin = 0; begin < size; begin = tshi_uv_range_end(group, begin) + 1)
        for (int r = 0; r < begin; r++) /* has this host an earlier range, too? */
            if (tshi_uv_host_of(group, r) == tshi_uv_host_of(group, begin)) return;
    for (int begin = 0; begin < size; begin = end + 1) {
        end = tshi_uv_range_end(group, begin);
        for (int r = begin; r <= end; r++) {
            group->first[r] = begin;
            group->last[r] = end;
        }
    }
}

/* ---- queues of operations that wait for a connection ---- */

static void tshi_uv_push(tshi_uv_fifo *fifo, const tshi_uv_op *op) { /* Appends op to a queue. */
    fifo->op[(fifo->first + fifo->used) % TSHI_UV_OPS] = (unsigned char)(op - op->group->op);
    fifo->used++;
}

static void tshi_uv_pop(tshi_uv_fifo *fifo) { /* Removes the first operation of a queue. */
    fifo->first = (fifo->first + 1) % TSHI_UV_OPS;
    fifo->used--;
}

/* Returns operation n of a queue, which must have more than n. */
static tshi_uv_op *tshi_uv_nth(tshi_uv_group *group, const tshi_uv_fifo *fifo, unsigned n) {
    /* it holds indices of group->op */
    return &group->op[fifo->op[(fifo->first + n) % TSHI_UV_OPS]];
}

/* Returns the first operation of a queue, which must not be empty. */
static tshi_uv_op *tshi_uv_first(tshi_uv_group *group, const tshi_uv_fifo *fifo) {
    return tshi_uv_nth(group, fifo, 0);
}
