/* ========================================================================== */
/* >>uv-shm                                          MARK: - uv-shm (private) */
/* Shared memory between ranks of one host: segments, rows, rings, bells.     */
/* A segment is a memfd: it has no name, and ends with its last process.      */
/* Its size is sealed, and rows have memory before use: no access can fail.   */
/* A rank writes to its own segment and, in the rings of others, again what   */
/* it has read there (tshi_uv_shm_own); never to another's heap.              */
/* Needs: >>uv-socket.                                                        */
/* ========================================================================== */

static tshi_uv_shm_segment *tshi_uv_segment_of(const tsh_uv_world *world, int rank) {
    return (tshi_uv_shm_segment *)(void *)world->near[rank].base; /* NULL: it is not mapped */
}

/* Returns the size in bytes of a ring (a circular buffer) in a group of `size` ranks: smaller in a
 * larger group. */
static int64_t tshi_uv_shm_ring(int size) {
    int64_t bytes = 256 << 10;
    while (bytes > 16 << 10 && bytes * size > 2 << 20) bytes /= 2;
    return bytes;
}

/* Returns the offset of row i from the first row of a group of `size` ranks. Row i belongs to the
 * connection group->link[i]. */
static int64_t tshi_uv_shm_row(int size, int i) {
    return (TSHI_UV_SHM_PAGE + tshi_uv_shm_ring(size)) * i;
}

/* Returns the size in bytes of a slot, with its data, in a group of `size` ranks. The slots of rank
 * r are where row r of its segment would be: it has no connection with itself. */
static int64_t tshi_uv_slot_size(int size) {
    const int64_t most = ((int64_t)sizeof(tshi_uv_slot) + TSHI_UV_SLOT_MOST + 63) / 64 * 64;
    return tshi_uv_min(most, tshi_uv_shm_ring(size) / TSHI_UV_SLOTS);
}

/* Returns the offset in a segment of its first row (counters and ring of one connection). */
static int64_t tshi_uv_shm_begin(void) {
    return ((int64_t)sizeof(tshi_uv_shm_segment) / TSHI_UV_SHM_PAGE + 1) * TSHI_UV_SHM_PAGE;
}

#if TSHI_UV_SHM
#if !defined(__cplusplus)
extern long syscall(long number, ...); /* hidden under -std=c99, as are the functions called here */
int(madvise)(void *from, size_t bytes, int advice);
#endif

/* The values of names that -std=c99 hides: MFD_CLOEXEC | MFD_ALLOW_SEALING; F_ADD_SEALS,
 * F_GET_SEALS; F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW. */
enum { TSHI_UV_MFD = 3, TSHI_UV_ADD_SEALS = 1033, TSHI_UV_GET_SEALS = 1034, TSHI_UV_SEALS = 7 };

/* Allocates memory for n bytes of a segment of this rank. Returns 0 if the system refuses (errno).
 * Does so in pieces, since a signal makes the system undo what it has begun. */
static int tshi_uv_shm_reserve(int segment, int64_t offset, int64_t n) {
    const int64_t piece = 256 << 10;
    for (int64_t now; n > 0; offset += now, n -= now) {
        long failed;
        now = tshi_uv_min(n, piece);
        do {
            failed = syscall(SYS_fallocate, (long)segment, 0L, (long)offset, (long)now);
        } while (failed && errno == EINTR);
        if (failed) return 0;
    }
    return 1;
}

/* Takes the memory of n bytes of a segment away again: they read as zeros. */
static void tshi_uv_shm_release(int segment, int64_t offset, int64_t n) {
    const long punch = 3; /* FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE */
    (void)syscall(SYS_fallocate, (long)segment, punch, (long)offset, (long)n);
}

/* Returns 1 if a limit that getrlimit has filled in, unless it has failed, allows n bytes. */
static int tshi_uv_shm_allowed(int failed, const struct rlimit *limit, int64_t n) {
    return failed || limit->rlim_cur >= (rlim_t)n;
}

/* Returns the size in bytes of this rank's segment: with a heap as large as the host's memory, if
 * that is wanted and the addresses for the heaps of all ranks can be had (of 128 TiB that a process
 * has, they take a quarter at most). */
static int64_t tshi_uv_shm_size(tsh_uv_world *world) {
    const int64_t page = sysconf(_SC_PAGESIZE), pages = sysconf(_SC_PHYS_PAGES);
    int64_t size = TSHI_UV_SHM_SIZE;
    struct rlimit file, all; /* of a file; of this process */
    if (world->shm == 2 && page > 0 && pages > 0)
        size += tshi_uv_min(pages, (INT64_C(1) << 45) / world->size / page) * page;
    if (size == TSHI_UV_SHM_SIZE ||
        (tshi_uv_shm_allowed(getrlimit(RLIMIT_FSIZE, &file), &file, size) &&
         tshi_uv_shm_allowed(getrlimit(RLIMIT_AS, &all), &all, size * world->size * 2)))
        return size;
    tsh_log_message(&world->logger,
                    "rank %d has its tensors in memory of its own, as ulimit -f or -v leaves no "
                    "space for them in shared memory",
                    world->rank);
    return TSHI_UV_SHM_SIZE;
}

/* Leaves a segment out of core dumps: writing one would give memory to all of it. */
static void tshi_uv_shm_undumped(void *base, int64_t size) {
    const int advice = 16; /* MADV_DONTDUMP */
    (void)madvise(base, (size_t)size, advice);
}

/* Makes this rank's segment and bell. Returns 0 if the system refuses (errno). */
static int tshi_uv_shm_create(tsh_uv_world *world) {
    tshi_uv_near *own = &world->near[world->rank];
    struct rlimit file;
    void *base;
    own->size = tshi_uv_shm_size(world);
    /* a file above the limit would raise SIGXFSZ */
    if (!tshi_uv_shm_allowed(getrlimit(RLIMIT_FSIZE, &file), &file, own->size)) {
        errno = EFBIG;
        return 0;
    }
    world->segment = (int)syscall(SYS_memfd_create, "tshard", (long)TSHI_UV_MFD);
    if (world->segment < 0 || ftruncate(world->segment, own->size) != 0 ||
        fcntl(world->segment, TSHI_UV_ADD_SEALS, (int)TSHI_UV_SEALS) != 0 ||
        !tshi_uv_shm_reserve(world->segment, 0, tshi_uv_shm_begin()))
        return 0;
    own->bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    base = own->bell < 0 ? MAP_FAILED
                         : mmap(NULL, (size_t)own->size, PROT_READ | PROT_WRITE, MAP_SHARED,
                                world->segment, 0);
    if (base == MAP_FAILED) return 0;
    tshi_uv_shm_undumped(base, own->size);
    own->base = (char *)base;
    return 1;
}

/* Maps the segment of a rank of this host. Takes over both descriptors: its segment and bell.
 * Returns 0 if that failed (errno). */
static int tshi_uv_shm_map(tsh_uv_world *world, int rank, int fds[2]) {
    tshi_uv_near *near = &world->near[rank];
    struct stat info;
    void *base = MAP_FAILED;
    int seals = fcntl(fds[0], TSHI_UV_GET_SEALS);
    if (near->base) { /* the peer asks again, as its first attempt failed */
        tshi_uv_close_fd(&fds[0]);
        tshi_uv_close_fd(&fds[1]);
        return 1;
    }
    errno = EINVAL;
    if (seals >= 0 && (seals & TSHI_UV_SEALS) == TSHI_UV_SEALS && fstat(fds[0], &info) == 0 &&
        info.st_size >= TSHI_UV_SHM_SIZE)
        base = mmap(NULL, (size_t)info.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fds[0], 0);
    if (base != MAP_FAILED && info.st_size > TSHI_UV_SHM_SIZE &&
        mprotect((char *)base + TSHI_UV_SHM_SIZE, (size_t)(info.st_size - TSHI_UV_SHM_SIZE),
                 PROT_READ) != 0) { /* the heap can only be read */
        (void)munmap(base, (size_t)info.st_size);
        base = MAP_FAILED;
    }
    (void)tshi_uv_give_up(fds[0]); /* the mapping needs it no longer; keeps errno */
    if (base == MAP_FAILED) {
        (void)tshi_uv_give_up(fds[1]);
        return 0;
    }
    tshi_uv_shm_undumped(base, (int64_t)info.st_size);
    near->base = (char *)base;
    near->size = (int64_t)info.st_size;
    near->bell = fds[1];
    return 1;
}

static void tshi_uv_shm_drop(char *base, int64_t size) { /* Unmaps a segment, or NULL. */
    if (base) (void)munmap(base, (size_t)size);
}

static void tshi_uv_shm_unmap(tshi_uv_near *near) {
    tshi_uv_shm_drop(near->base, near->size);
    near->base = NULL;
    tshi_uv_close_fd(&near->bell);
}
#else
static int tshi_uv_shm_reserve(int segment, int64_t offset, int64_t n) {
    (void)segment, (void)offset, (void)n;
    return 0; /* never called: this system has no segments */
}

static void tshi_uv_shm_release(int segment, int64_t offset, int64_t n) {
    (void)segment, (void)offset, (void)n;
}

static void tshi_uv_shm_drop(char *base, int64_t size) {
    (void)base, (void)size;
}

static int tshi_uv_shm_create(tsh_uv_world *world) {
    (void)world;
    errno = ENOSYS;
    return 0;
}

static void tshi_uv_shm_unmap(tshi_uv_near *near) {
    (void)near;
}
#endif

/* Logs that this rank uses no shared memory, and why (errno), and sets world->shm to 0. Does
 * nothing if that is 0 already. */
static void tshi_uv_shm_without(tsh_uv_world *world, const char *what) {
    if (world->shm)
        tsh_log_message(&world->logger,
                        "rank %d uses TCP within its host, as it cannot %s: %s (TSHARD_SHM=0 does "
                        "without shared memory)",
                        world->rank, what, tshi_uv_why(errno));
    world->shm = 0;
}

/* Allocates memory for this rank's slots in a group, in which it has rank m and whose rows begin at
 * `offset` of its segment. Returns 0 if the system refuses (errno). */
static int tshi_uv_shm_slots(const tsh_uv_world *world, int64_t offset, int size, int m) {
    const int64_t at = offset + tshi_uv_shm_row(size, m), slot = tshi_uv_slot_size(size);
    if (!tshi_uv_shm_reserve(world->segment, at, slot * TSHI_UV_SLOTS)) return 0;
    for (int i = 0; i < TSHI_UV_SLOTS; i++)
        memset(world->near[world->rank].base + at + i * slot, 0, sizeof(tshi_uv_slot));
    return 1;
}

/* Makes this rank's segment, if settings and system allow it. */
static void tshi_uv_shm_open(tsh_uv_world *world) {
    tshi_uv_near *own = &world->near[world->rank];
    tshi_uv_shm_segment *segment;
    if (!TSHI_UV_SHM || !world->shm) return;
    if (!tshi_uv_shm_create(world) ||
        !tshi_uv_shm_slots(world, tshi_uv_shm_begin(), world->size, world->rank)) {
        tshi_uv_shm_without(world, "make shared memory");
        tshi_uv_shm_unmap(own);
        tshi_uv_close_fd(&world->segment);
        return;
    }
    segment = tshi_uv_segment_of(world, world->rank);
    segment->group[0].id = 1; /* id of the world's group */
    segment->group[0].offset = (uint64_t)tshi_uv_shm_begin();
}

/* Rings the bell of a rank of this host if its thread sleeps, once per sleep. */
static void tshi_uv_shm_wake(tsh_uv_world *world, int rank) {
    tshi_uv_near *near = &world->near[rank];
    const uint64_t one = 1, sleeps = TSHI_UV_GET(&tshi_uv_segment_of(world, rank)->sleeps);
    if (!(sleeps & 1) || sleeps == near->rung) return;
    near->rung = sleeps;
    if (write(near->bell, &one, sizeof one) < 0) near->rung = 0; /* failed: rings again next time */
}

/* Marks in this rank's segment that its thread is about to sleep (`asleep` 1), or is awake (0). A
 * peer that has written bytes for it reads the mark, to ring the bell; so after setting the mark,
 * this rank must look for bytes once more before it sleeps. */
static void tshi_uv_shm_sleeps(const tsh_uv_world *world, int asleep) {
    tshi_uv_shm_segment *own = tshi_uv_segment_of(world, world->rank);
    if (own && (int)(own->sleeps & 1) != asleep) TSHI_UV_PUT(&own->sleeps, own->sleeps + 1);
}

/* Returns 1 if world ranks a and b have mapped each other's segments, as seen by this rank, which
 * has mapped both. */
static int tshi_uv_shm_pair(const tsh_uv_world *world, int a, int b) {
    tshi_uv_shm_segment *of_a = tshi_uv_segment_of(world, a), *of_b = tshi_uv_segment_of(world, b);
    return of_a && of_b && TSHI_UV_GET(&of_a->near[b]) && TSHI_UV_GET(&of_b->near[a]);
}

/* Returns the entry of a group in the segment of a world rank; NULL: there is none. */
static tshi_uv_shm_entry *tshi_uv_shm_find(const tsh_uv_world *world, int rank, uint64_t id) {
    tshi_uv_shm_segment *segment = tshi_uv_segment_of(world, rank);
    for (int i = 0; segment && i < TSHI_UV_SHM_GROUPS; i++)
        if (TSHI_UV_GET(&segment->group[i].id) == id) return &segment->group[i];
    return NULL;
}

/* Allocates memory for the two rows for member m of a group, whose rows begin at `offset` of this
 * rank's segment. Returns 0 if the system refuses (errno). */
static int tshi_uv_shm_rows(const tsh_uv_world *world, int64_t offset, int size, int m) {
    for (int i = m; i < 2 * size; i += size) { /* row m: collectives; size + m: messages */
        int64_t at = offset + tshi_uv_shm_row(size, i);
        if (!tshi_uv_shm_reserve(world->segment, at, tshi_uv_shm_row(size, 1))) return 0;
        memset(world->near[world->rank].base + at, 0, TSHI_UV_SHM_PAGE); /* clears the counters */
    }
    return 1;
}

/* Frees the entries of groups in this rank's segment that it and all that share memory with it have
 * closed. Returns a free entry; NULL: there is none. */
static tshi_uv_shm_entry *tshi_uv_shm_free_entry(const tsh_uv_world *world) {
    tshi_uv_shm_segment *own = tshi_uv_segment_of(world, world->rank);
    tshi_uv_shm_entry *found = NULL;
    for (int i = TSHI_UV_SHM_GROUPS - 1; i > 0; i--) {
        tshi_uv_shm_entry *entry = &own->group[i];
        int open = !entry->closed;
        for (int r = 0; entry->id && !open && r < world->size; r++) {
            const tshi_uv_shm_entry *its = tshi_uv_shm_find(world, r, entry->id);
            open = its && !TSHI_UV_GET(&its->closed);
        }
        if (!open) TSHI_UV_PUT(&entry->id, 0);
        if (!entry->id) found = entry;
    }
    return found;
}

/* Returns the lowest offset in this rank's segment at which n bytes are free; 0: none. sizes[i]:
 * ranks of the group of entry i. */
static int64_t tshi_uv_shm_gap(const tsh_uv_world *world, const int *sizes, int64_t n) {
    const tshi_uv_shm_segment *own = tshi_uv_segment_of(world, world->rank);
    int64_t at = tshi_uv_shm_begin();
    for (int i = 0; i < TSHI_UV_SHM_GROUPS; i++) {
        int64_t from = (int64_t)own->group[i].offset;
        int64_t to = from + tshi_uv_shm_row(sizes[i], 2 * sizes[i]);
        if (!own->group[i].id || at >= to || at + n <= from) continue;
        at = to; /* overlap: tries behind this group, and checks all entries again */
        i = -1;
    }
    return at + n <= TSHI_UV_SHM_SIZE ? at : 0;
}

/* Gives a new group rows in this rank's segment (a ring for each connection), before its
 * connections are made: so each member finds the rows of those that it is connected to. Without
 * rows the group uses TCP. */
static void tshi_uv_shm_publish(tshi_uv_group *group) {
    tsh_uv_world *world = group->world;
    tshi_uv_shm_entry *entry;
    int64_t offset;
    int wanted = 0;
    for (int m = 0; m < group->size; m++)
        wanted += m != group->rank && tshi_uv_shm_pair(world, world->rank, group->ranks[m]);
    if (!wanted) return;
    entry = tshi_uv_shm_free_entry(world);
    if (!entry) return;
    offset = tshi_uv_shm_gap(world, world->shm_sizes,
                             tshi_uv_shm_row(group->size, 2 * group->size));
    for (int m = 0; offset && m < group->size; m++) {
        int done = 1;
        if (m == group->rank)
            done = tshi_uv_shm_slots(world, offset, group->size, m);
        else if (tshi_uv_shm_pair(world, world->rank, group->ranks[m]))
            done = tshi_uv_shm_rows(world, offset, group->size, m);
        if (done) continue;
        tshi_uv_shm_without(world, "share memory with a new group");
        offset = 0;
    }
    if (!offset) return;
    world->shm_sizes[entry - tshi_uv_segment_of(world, world->rank)->group] = group->size;
    entry->offset = (uint64_t)offset;
    entry->closed = 0;
    TSHI_UV_PUT(&entry->id, group->id);
}

/* Sets up the rings of the connection group->link[i]. mine, theirs: the group's entry in the
 * segment of this rank, and of the peer. */
static void tshi_uv_shm_pipe(tshi_uv_group *group, int i, const tshi_uv_shm_entry *mine,
                             const tshi_uv_shm_entry *theirs) {
    tsh_uv_world *world = group->world;
    tshi_uv_link *link = &group->link[i];
    tshi_uv_pipe *pipe = &link->pipe;
    const int size = group->size,
              back = i - link->peer + group->rank; /* the peer's row for this rank */
    char *own = world->near[world->rank].base + mine->offset + tshi_uv_shm_row(size, i);
    char *its = world->near[group->ranks[link->peer]].base + theirs->offset +
                tshi_uv_shm_row(size, back);
    pipe->size = tshi_uv_shm_ring(size);
    pipe->out = own + TSHI_UV_SHM_PAGE;
    pipe->in = its + TSHI_UV_SHM_PAGE;
    pipe->sent = (int64_t *)(void *)own;
    pipe->taken = (int64_t *)(void *)(own + 64); /* on a cache line of its own */
    pipe->peer_sent = (const int64_t *)(const void *)its;
    pipe->peer_taken = (const int64_t *)(const void *)(its + 64);
    pipe->theirs = theirs;
}

/* Returns 1 if the entry of a group of `size` ranks is valid: all of its rows are in the
 * segment. */
static int tshi_uv_shm_valid(const tshi_uv_shm_entry *entry, int size) {
    return entry && entry->offset % TSHI_UV_SHM_PAGE == 0 &&
           entry->offset <= (uint64_t)(TSHI_UV_SHM_SIZE - tshi_uv_shm_row(size, 2 * size));
}

/* Called once a group's connections are made: those between ranks that share memory use it, not
 * their sockets, from here on. Both ends of a connection choose alike, as each reads the group's
 * entry in the segments of both. */
static void tshi_uv_shm_link(tshi_uv_group *group) {
    tsh_uv_world *world = group->world;
    const int own = world->rank, size = group->size;
    const tshi_uv_shm_entry *mine = tshi_uv_shm_find(world, own, group->id);
    group->whole = tshi_uv_shm_valid(mine, size);
    group->slot = tshi_uv_slot_size(size);
    for (int m = 0; m < size; m++) {
        int peer = group->ranks[m];
        const tshi_uv_shm_entry *theirs = tshi_uv_shm_find(world, peer, group->id);
        if (tshi_uv_shm_valid(theirs, size))
            group->link[m].slots = world->near[peer].base + theirs->offset +
                                   tshi_uv_shm_row(size, m);
        if (peer == own) continue;
        if (!mine || !tshi_uv_shm_valid(theirs, size) || !tshi_uv_shm_pair(world, own, peer)) {
            group->whole = 0;
            continue;
        }
        tshi_uv_shm_pipe(group, m, mine, theirs);
        tshi_uv_shm_pipe(group, size + m, mine, theirs);
    }
    for (int a = 0; a < size && group->whole; a++)
        for (int b = 0; b < a; b++)
            if (!tshi_uv_shm_pair(world, group->ranks[a], group->ranks[b])) group->whole = 0;
}

/* Marks in this rank's segment that it has closed the group, and wakes the members that share
 * memory with it, which may wait for it. */
static void tshi_uv_shm_leave(tshi_uv_group *group) {
    tsh_uv_world *world = group->world;
    tshi_uv_shm_entry *mine = world->near ? tshi_uv_shm_find(world, world->rank, group->id) : NULL;
    if (!mine) return;
    TSHI_UV_PUT(&mine->closed, 1);
    for (int m = 0; group->link && m < group->size; m++)
        if (group->link[m].pipe.out) tshi_uv_shm_wake(world, group->ranks[m]);
}
