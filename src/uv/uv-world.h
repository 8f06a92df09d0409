/* ========================================================================== */
/* >>uv-world                                      MARK: - uv-world (private) */
/* Joining a world: settings, memory, sockets and event loops, then the       */
/* control thread, which makes all connections while the caller waits. Also   */
/* tsh_uv_open and the runner, tsh_uv_run.                                    */
/* Needs: >>uv-settings >>uv-control >>uv-ops.                                */
/* ========================================================================== */

/* Allocates the arrays with one entry per rank. Returns 0 if memory is lacking. */
static int tshi_uv_world_alloc(tsh_uv_world *world) {
    size_t n = (size_t)world->size;
    world->peer = (tshi_uv_peer *)calloc(n, sizeof *world->peer);
    /* n + 1 lists with room for n ranks: a list for each peer, and one for this rank */
    world->members = (int *)calloc((n + 1) * n, sizeof *world->members);
    world->search = (tshb_coll_search *)calloc(n, sizeof *world->search);
    /* 1: id of the world's group */
    world->world_group = tshi_uv_group_new(world, 1, world->rank, world->size);
    world->near = (tshi_uv_near *)calloc(n, sizeof *world->near);
    if (!world->peer || !world->members || !world->search || !world->world_group || !world->near)
        return 0;
    for (int r = 0; r < world->size; r++) {
        world->peer[r].world = world;
        world->peer[r].rank = r;
        world->peer[r].fd = -1;
        world->near[r].bell = -1;
        world->peer[r].blocked.member = world->members + (size_t)r * n;
        world->world_group->ranks[r] = r;
    }
    world->shm_sizes[0] = world->size;
    world->blocked.member = world->members + n * n; /* the last list is for this rank */
    return 1;
}

/* Checks that the limit of descriptors (ulimit -n) suffices. Unauthenticated connections get half
 * of those that the world does not need, so that the program keeps some. */
static tsh_result tshi_uv_enough_descriptors(tsh_uv_world *world, tsh_error *error) {
    struct rlimit limit;
    int need = tshi_uv_descriptors(world->size);
    int64_t half;
    world->unproven_limit = TSHI_UV_UNPROVEN; /* the value if descriptors have no limit */
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return TSH_OK;
    if (limit.rlim_cur < (rlim_t)need)
        return tsh_error_set(error, TSH_ERR_IO, world->rank,
                             "rank %d may open %lu descriptors, but a world of %d ranks needs "
                             "about %d (ulimit -n)",
                             world->rank, (unsigned long)limit.rlim_cur, world->size, need);
    half = (int64_t)(limit.rlim_cur - (rlim_t)need) / 2; /* the other half is left to the program */
    world->unproven_limit = (int)tshi_uv_min(half, TSHI_UV_UNPROVEN);
    /* the limit is never below TSHI_UV_FEW */
    if (world->unproven_limit < TSHI_UV_FEW) world->unproven_limit = TSHI_UV_FEW;
    return TSH_OK;
}

/* Rank 0: listens on the first address of its host that works, or on the socket it was given. */
static tsh_result tshi_uv_rank0_listens(tsh_uv_world *world, tsh_error *error) {
    tshi_uv_address list[TSHI_UV_ADDRESSES];
    const char *why = "is no listening socket"; /* the end of the error's sentence */
    const char *bound = world->bind_host[0] ? world->bind_host : world->host;
    /* given: 1 if TSHARD_LISTENER or tsh_uv_desc.listener gave a socket */
    int given = world->listener >= 0;
    int n = !given ? tshi_uv_resolve(bound, world->port, 0, list, &why) /* n: number of addresses */
                   : tshi_uv_prepare_fd(world->listener) &&
                         tshi_uv_end_of(world->listener, 0, &list[0]);
    for (int i = 0; i < n && (given || world->listener < 0); i++) {
        if (tshi_uv_need_key(world, &list[i], error) != TSH_OK) return error->code;
        /* -1: failed, the next address is tried */
        if (!given) world->listener = tshi_uv_listen(&list[i]);
        if (world->listener < 0) why = tshi_uv_why(errno);
    }
    if (n && world->listener >= 0 && tshi_uv_end_of(world->listener, 0, &world->own)) {
        world->port = tshi_uv_port(&world->own); /* a given socket may have another port */
        return TSH_OK;
    }
    if (given) world->listener = -1; /* the given socket stays open */
    return tsh_error_set(error, TSH_ERR_IO, 0, "rank 0 cannot listen on %s port %d: %s; set %s",
                         bound, world->port, why,
                         given ? "TSHARD_LISTENER to a listening socket, or unset it"
                               : "TSHARD_PORT to a free port, TSHARD_HOST (or TSHARD_BIND) to an "
                                 "address of this host");
}

/* Prepares to join before the control thread runs: rank 0 listens, the others look up its host. */
static tsh_result tshi_uv_find_rank0(tsh_uv_world *world, tsh_error *error) {
    tshi_uv_address list[TSHI_UV_ADDRESSES];
    const char *why;
    if (tshi_uv_enough_descriptors(world, error) != TSH_OK) return error->code;
    if (world->rank == 0) return tshi_uv_rank0_listens(world, error);
    world->listener = -1; /* no listener yet: tshi_uv_joined opens it */
    world->addresses = tshi_uv_resolve(world->host, world->port, 0, world->address, &why);
    if (!world->addresses)
        return tsh_error_set(error, TSH_ERR_IO, world->rank,
                             "rank %d cannot find rank 0's host \"%.100s\": %s (%s)", world->rank,
                             world->host, why, world->host_from);
    if (world->bind_host[0]) {
        if (!tshi_uv_resolve(world->bind_host, 0, 0, list, &why))
            return tsh_error_set(error, TSH_ERR_ARGUMENT, world->rank,
                                 "rank %d: TSHARD_BIND is \"%.100s\": %s", world->rank,
                                 world->bind_host, why);
        world->own = list[0]; /* the address on which this rank will listen */
    }
    /* returns an error if rank 0's address needs a key and none is set */
    return tshi_uv_need_key(world, &world->address[0], error);
}

/* Starts the control thread with all signals blocked: the program's own threads get them. */
static tsh_result tshi_uv_start_control(tsh_uv_world *world, tsh_error *error) {
    sigset_t all, before;
    int failed;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_BLOCK, &all, &before);
    /* the new thread inherits the signal mask */
    failed = uv_thread_create(&world->thread, tshi_uv_main, world);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL); /* restores this thread's mask */
    return failed ? tsh_error_set(error, TSH_ERR_IO, world->rank, "the system refused a thread")
                  : TSH_OK;
}

enum { TSHI_UV_LOOPS_NEED = 64 << 10 }; /* bytes of memory, more than libuv needs for two loops */

/* Makes both event loops with their handles, and the lock and condition between the threads. */
static tsh_result tshi_uv_open_loops(tsh_uv_world *world, tsh_error *error) {
    /* room: 1 if there is enough memory for both loops */
    int room = tshi_uv_has_memory(TSHI_UV_LOOPS_NEED);
    int locked = uv_mutex_init(&world->lock) == 0, noticed = uv_cond_init(&world->changed) == 0;
    int why = locked && noticed && room ? uv_loop_init(&world->loop) : UV_ENOMEM, opened = why == 0;
    if (opened) why = uv_loop_init(&world->control);
    if (why != 0) {
        if (opened) (void)uv_loop_close(&world->loop);
        if (noticed) uv_cond_destroy(&world->changed);
        if (locked) uv_mutex_destroy(&world->lock);
        return tsh_error_set(error, TSH_ERR_IO, world->rank,
                             "rank %d has no event loop: %s (%d descriptors are needed: ulimit -n)",
                             world->rank, uv_strerror(why), tshi_uv_descriptors(world->size));
    }
    (void)uv_timer_init(&world->loop, &world->timer);             /* limits the caller's sleep */
    (void)uv_async_init(&world->loop, &world->wake_caller, NULL); /* ends the caller's sleep */
    (void)uv_timer_init(&world->control, &world->tick);   /* limits the control thread's sleep */
    (void)uv_prepare_init(&world->control, &world->turn); /* runs before every sleep */
    (void)uv_async_init(&world->control, &world->wake_control, tshi_uv_on_request);
    world->turn.data = world->wake_control.data = world;
    (void)uv_prepare_start(&world->turn, tshi_uv_on_turn);
    return TSH_OK;
}

/* Counts the ranks of this host and sets world->spins, how many times a wait polls before it
 * sleeps: fewer if there are more ranks than cores, since the awaited rank may need this core. */
static void tshi_uv_count_local(tsh_uv_world *world) {
    const tshi_uv_group *group = world->world_group;
    int local = 1;                        /* number of ranks on this host */
    for (int r = 0; r < group->size; r++) /* link[r]: the connection for collectives */
        if (group->link[r].fd >= 0) local += tshi_uv_is_local(group->link[r].fd);
    world->spins = local > sysconf(_SC_NPROCESSORS_ONLN) ? 16 : 2000; /* polls before a sleep */
}

/* Callback when another rank rings this one's bell, which ends its sleep. Empties the bell. */
static void tshi_uv_bell_event(uv_poll_t *poll, int status, int events) {
    uint64_t count;
    (void)status;
    (void)events;
    if (read(*(const int *)poll->data, &count, sizeof count) < 0) return; /* the bell was empty */
}

/* Called once the world is complete: lets the ranks of this host share memory. */
static void tshi_uv_begin(tsh_uv_world *world) {
    tshi_uv_near *own = &world->near[world->rank];
    tshi_uv_count_local(world);
    tshi_uv_shm_link(world->world_group);
    tshi_uv_find_hosts(world->world_group);
    if (own->base)
        world->bell = tshi_uv_watch(&world->loop, own->bell, UV_READABLE, &own->bell,
                                    tshi_uv_bell_event);
    if (own->base && !world->bell)
        tshi_uv_report_error(world, TSHI_UV_ABORT, 0, 0, TSH_ERR_MEMORY, world->rank,
                             "rank %d: no memory to watch for ranks of its host", world->rank);
}

/* Waits until the world has formed or failed. Returns TSH_OK or the world's error. */
static tsh_result tshi_uv_await_world(tsh_uv_world *world, tsh_error *error) {
    tsh_result failed;
    uv_mutex_lock(&world->lock);
    while (world->forming && tshi_uv_failed(world) == TSH_OK)
        uv_cond_wait(&world->changed, &world->lock); /* woken by tshi_uv_completed or _fail */
    failed = tshi_uv_failed(world);
    if (failed != TSH_OK) *error = world->error;
    uv_mutex_unlock(&world->lock);
    return failed;
}

/* Opens the world, starts the control thread, and waits until the world is complete. Owns `world`.
 * *out: the comm of all ranks. */
static tsh_result tshi_uv_join(tsh_uv_world *world, tsh_comm *out, tsh_error *error) {
    int opened; /* 1: the event loops exist */
    tsh_result result;
    randombytes_buf(&world->process, sizeof world->process);
    world->process |= 1;                     /* not 0, which stands for no process */
    world->forming = 1;                      /* tshi_uv_completed sets it to 0 */
    world->due = tsh_now() + world->timeout; /* time at which joining times out */
    world->notice_at = tsh_now() + world->notice;
    result = tshi_uv_world_alloc(world)
                 ? tshi_uv_find_rank0(world, error)
                 : tsh_error_set(error, TSH_ERR_MEMORY, world->rank,
                                 "rank %d: no memory for its world", world->rank);
    opened = result == TSH_OK && tshi_uv_open_loops(world, error) == TSH_OK;
    if (opened) tshi_uv_shm_open(world);
    if (opened && world->near[world->rank].base) tshi_uv_heap_open(world);
    if (!opened || tshi_uv_start_control(world, error) != TSH_OK) {
        tshi_uv_group_free(world->world_group);
        tshi_uv_close_fd(&world->listener);
        if (opened)
            tshi_uv_world_end(world);
        else
            tshi_uv_world_free(world);
        return error->code;
    }
    tshi_uv_add_group(world->world_group, &tshi_uv_ops, out);
    result = tshi_uv_await_world(world, error);
    if (result != TSH_OK)
        tsh_comm_close(out); /* ends the control thread; frees the world */
    else
        tshi_uv_begin(world);
    return result;
}

/* Opens /dev/null as stdin, stdout and stderr, if they are closed, as in a daemon. Else sockets
 * would get their numbers, libuv would abort when it closes them, and what the program prints would
 * go to a peer. The opened descriptors stay open. Returns 0 if the system refused (errno). */
static int tshi_uv_fill_standard(void) {
    for (int fd = 0; fd < 3; fd++) /* open() takes the lowest free number, which is fd */
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) < 0) return 0;
    return 1;
}

/* Reads the settings and joins the world. With one rank, no socket is opened: *out is all 0 but its
 * size, 1. */
static tsh_result tshi_uv_open(const tsh_uv_desc *desc, tsh_comm *out, tsh_error *error) {
    tsh_uv_world *world;
    memset(out, 0, sizeof *out);
    world = (tsh_uv_world *)calloc(1, sizeof *world);
    if (!world) {
        (void)tsh_error_set(error, TSH_ERR_MEMORY, -1, "no memory for a world");
        return TSH_ERR_MEMORY;
    }
    world->logger = desc->logger;
    world->segment = world->shm_listener = -1; /* neither is open yet */
    world->crc_wide = tshi_uv_crc_is_wide();
    if (!world->crc_wide) tshi_uv_crc_tables(world->crc_table);
    if (!tshi_uv_fill_standard())
        (void)tsh_error_set(error, TSH_ERR_IO, -1,
                            "stdin, stdout or stderr is closed, and /dev/null cannot take its "
                            "place: %s",
                            tshi_uv_why(errno));
    else if (sodium_init() < 0)
        (void)tsh_error_set(error, TSH_ERR_IO, -1, "libsodium finds no random numbers");
    else if (tshi_uv_settings(desc, world, error) == TSH_OK && world->size > 1)
        return tshi_uv_join(world, out, error);
    tshi_uv_world_free(world); /* after an error, or for a world of one rank */
    if (error->code == TSH_OK) out->size = 1;
    return error->code;
}

/* Copies `error`, the result of opening a world, to *place, if that is not NULL, and logs it if it
 * is an error. */
static void tshi_uv_not_open(tsh_error *place, const tsh_logger *logger, const char *function,
                             const tsh_error *error) {
    if (place) *place = *error;
    if (error->code != TSH_OK)
        tsh_log_message(logger, "%s: %s (%s)", function, error->message,
                        tsh_result_name(error->code));
}

TSH_API tsh_result tsh_uv_open(const tsh_uv_desc *desc, tsh_comm *out) {
    tsh_uv_desc none;
    tsh_error error;
    memset(&none, 0, sizeof none);
    memset(&error, 0, sizeof error);
    if (!desc) desc = &none; /* all settings come from the environment */
    if (out)
        (void)tshi_uv_open(desc, out, &error);
    else
        (void)tsh_error_set(&error, TSH_ERR_ARGUMENT, -1, "out is NULL");
    tshi_uv_not_open(desc->error, desc->error ? NULL : &desc->logger, "tsh_uv_open", &error);
    return error.code;
}

TSH_API tsh_allocator tsh_uv_allocator(const tsh_comm *comm) {
    tsh_allocator allocator = {NULL, NULL}; /* malloc */
    if (comm && comm->impl && comm->ops == &tshi_uv_ops)
        allocator.user = tshi_uv_group_of(comm)->world->heap;
    if (allocator.user) allocator.allocate = tshi_uv_heap_allocate;
    return allocator;
}

TSH_API int tsh_uv_run_built(int version, size_t real, size_t size, const tsh_uv_desc *uv,
                             const tsh_desc *desc, int (*fn)(tsh_ctx *ctx, void *user),
                             void *user) {
    tsh_uv_desc join; /* copy of *uv; all 0 if uv is NULL */
    tsh_desc with;    /* copy of *desc; all 0 if desc is NULL */
    tsh_comm comm;
    tsh_error error;
    if (!tshb_same_build("tsh_uv_run", version, real, size, desc)) return 1;
    memset(&join, 0, sizeof join);
    memset(&with, 0, sizeof with);
    memset(&error, 0, sizeof error);
    if (uv) join = *uv;
    if (desc) with = *desc;
    if (!join.logger.log) join.logger = with.logger; /* if one has no logger, it uses the other's */
    if (!with.logger.log) with.logger = join.logger;
    if (fn)
        (void)tshi_uv_open(&join, &comm, &error);
    else
        (void)tsh_error_set(&error, TSH_ERR_ARGUMENT, -1, "fn is NULL");
    tshi_uv_not_open(join.error, &with.logger, "tsh_uv_run", &error);
    if (error.code != TSH_OK) return 1;
    if (!with.allocator.allocate) with.allocator = tsh_uv_allocator(&comm);
    return tsh_run_on(&comm, &with, fn, user, join.error); /* tsh_run_on logs its errors */
}

TSH_API int(tsh_uv_run)(const tsh_uv_desc *uv, const tsh_desc *desc,
                        int (*fn)(tsh_ctx *ctx, void *user), void *user) {
    return tsh_uv_run_built(1, 0, 0, uv, desc, fn, user);
}

#undef TSHI_UV_GET
#undef TSHI_UV_PUT
#undef TSHI_UV_SECOND
#undef TSHI_UV_MS
#undef TSHI_UV_NOSIGNAL
#undef TSHI_UV_VERSION
#undef TSHI_UV_DAMAGED_TEXT
#undef TSHI_UV_CHECK_OF
#undef TSHI_UV_WIDE
#undef TSHI_UV_SHM
