/* ========================================================================== */
/* >>uv-ops                                          MARK: - uv-ops (private) */
/* The eight functions of the backend (tsh_comm_ops): start, wait, test,      */
/* progress, status, abort, split and close. The caller's thread calls them;  */
/* only abort may come from any thread.                                       */
/* Needs: >>uv-start >>uv-wait.                                               */
/* ========================================================================== */

static tshi_uv_group *tshi_uv_group_of(const tsh_comm *comm) { /* Returns the comm's group. */
    return (tshi_uv_group *)comm->impl;
}

/* Returns the operation's slot for a request; the request is the slot's index plus 1. */
static tshi_uv_op *tshi_uv_op_of(tshi_uv_group *group, tsh_req req) {
    return &group->op[(req - 1) % TSHI_UV_OPS];
}

/* Waits for an operation, then frees its slot. Returns TSH_OK or the world's error. */
static tsh_result tshi_uv_finish(tshi_uv_op *op) {
    tsh_result result = tshi_uv_wait_for(op->group, op);
    if (result != TSH_OK) tshi_uv_withdraw(op->group->world);
    op->used = 0; /* the slot is free again */
    op->group->active--;
    return result;
}

/* Starts a collective. *req: the request, 0 after an error. */
static tsh_result tshi_uv_start(tsh_comm *comm, const tsh_coll *coll, tsh_req *req) {
    tshi_uv_group *group = tshi_uv_group_of(comm);
    tsh_result result = tshi_uv_failed(group->world); /* a failed world starts nothing */
    tshi_uv_op *op = NULL;
    *req = 0; /* 0: no request */
    if (result == TSH_OK) result = tshi_uv_launch(group, coll, &op);
    if (result == TSH_OK) *req = (tsh_req)(op - group->op) + 1; /* index plus 1: 0 means none */
    return result;
}

static tsh_result tshi_uv_wait(tsh_comm *comm, tsh_req req) { /* Waits until req is complete. */
    return tshi_uv_finish(tshi_uv_op_of(tshi_uv_group_of(comm), req));
}

/* Sets *done to 1 if req is complete, else to 0. Makes progress first, but does not wait. */
static tsh_result tshi_uv_test(tsh_comm *comm, tsh_req req, int *done) {
    tshi_uv_group *group = tshi_uv_group_of(comm);
    tshi_uv_op *op = tshi_uv_op_of(group, req);
    tsh_result result;
    if (!tshi_uv_advance(group->world)) tshi_uv_board_look(group->world);
    result = tshi_uv_failed(group->world);
    *done = result != TSH_OK || op->pending == 0; /* an error completes a request, too */
    if (!*done && tsh_now() >= op->deadline) tshi_uv_late(group, op);
    if (result != TSH_OK) tshi_uv_withdraw(group->world);
    return result;
}

static void tshi_uv_progress(tsh_comm *comm) { /* Moves data while the caller computes. */
    (void)tshi_uv_advance(tshi_uv_group_of(comm)->world);
}

/* Returns the code of the world's error (TSH_OK: none), and fills *error, if error is not NULL. */
static tsh_result tshi_uv_status(tsh_comm *comm, tsh_error *error) {
    tsh_uv_world *world = tshi_uv_group_of(comm)->world;
    tsh_result failed = tshi_uv_failed(world);
    /* world->error is complete before tshi_uv_failed returns its code */
    if (failed != TSH_OK && error) *error = world->error;
    return failed;
}

/* Reports `why` as an error of this rank or of why->rank. Does not wait for the coordinator, which
 * decides on one error for all ranks. */
static void tshi_uv_abort(tsh_comm *comm, const tsh_error *why) {
    tsh_uv_world *world = tshi_uv_group_of(comm)->world;
    tshi_uv_report_error(world, TSHI_UV_ABORT, 0, 0, why->code,
                         why->rank < 0 ? world->rank : why->rank, "%s", why->message);
}

/* ---- splitting a group by colors ---- */

typedef struct tshi_uv_ticket { /* What each rank sends to all others in a split. */
    /* color, key: of tsh_comm_split; port: TCP port on which this rank listens, 0: none */
    int32_t color, key, port;
    uint64_t id; /* id of the new group, used if this rank is the lowest of its color */
} tshi_uv_ticket;

/* Returns a new, unconnected group of the ranks of this rank's color. NULL: no memory. */
static tshi_uv_group *tshi_uv_color_group(tshi_uv_group *parent, const tshi_uv_ticket *tickets) {
    int color = tickets[parent->rank].color, n, leader = 0; /* leader: lowest rank of the color */
    /* order[i]: rank in the parent of member i of the new group */
    int *order = (int *)calloc((size_t)parent->size, sizeof *order);
    tshi_uv_group *group;
    if (!order) return NULL;
    n = tshb_split_order(tickets, sizeof *tickets, parent->size, color, order);
    while (tickets[leader].color != color) leader++;
    /* this rank's place in the group, here 0, is set in the loop */
    group = tshi_uv_group_new(parent->world, tickets[leader].id, 0, n);
    for (int i = 0; group && i < n; i++) {
        group->ranks[i] = parent->ranks[order[i]]; /* world rank of member i */
        group->ports[i] = tickets[order[i]].port;  /* port on which member i listens */
        if (order[i] == parent->rank) group->rank = i;
    }
    free(order);
    return group;
}

/* Enters a group into the world's list and makes *out its comm. */
static void tshi_uv_add_group(tshi_uv_group *group, const tsh_comm_ops *ops, tsh_comm *out) {
    tsh_uv_world *world = group->world;
    uv_mutex_lock(&world->lock);
    group->next = world->groups;
    world->groups = group;
    uv_mutex_unlock(&world->lock);
    world->open++; /* number of open groups; the world closes with the last */
    *out = tshb_comm_make(ops, group, group->rank, group->size, group->id);
}

/* All-gathers the tickets (color, key, port, id) of a split over the group that is split. On
 * entry, tickets[group->rank] is this rank's own; the others are overwritten. */
static tsh_result tshi_uv_trade(tshi_uv_group *group, tshi_uv_ticket *tickets) {
    tsh_coll coll = tsh_coll_make(TSH_SPLIT, TSH_F32);
    tsh_result result;
    tshi_uv_op *op = NULL;
    coll.count = (int64_t)sizeof *tickets; /* bytes of a ticket */
    coll.send = &tickets[group->rank];     /* this rank's ticket */
    coll.recv = tickets;                   /* all tickets, by rank */
    result = tshi_uv_launch(group, &coll, &op);
    return result == TSH_OK ? tshi_uv_finish(op) : result;
}

/* Lets the control thread make a new group's connections, and waits for that. Takes over
 * `listener`, this rank's listening socket. */
static tsh_result tshi_uv_link_up(tshi_uv_group *group, int listener) {
    tsh_uv_world *world = group->world;
    tsh_result result;
    group->listener = listener;
    if (group->size == 1) { /* there is no other member */
        tshi_uv_close_fd(&group->listener);
        return TSH_OK;
    }
    tshi_uv_shm_publish(group); /* the other members look for this rank's rows later */
    uv_mutex_lock(&world->lock);
    world->requested = group; /* the control thread then connects it */
    uv_mutex_unlock(&world->lock);
    (void)uv_async_send(&world->wake_control);
    result = tshi_uv_wait_for(group, NULL);
    if (result != TSH_OK) return result;
    tshi_uv_shm_link(group);
    tshi_uv_find_hosts(group);
    return TSH_OK;
}

/* Called by all ranks of comm: makes *out the comm of the ranks of this rank's color. A rank with
 * color < 0 gets no comm. */
static tsh_result tshi_uv_split(tsh_comm *comm, int color, int key, tsh_comm *out) {
    tshi_uv_group *parent = tshi_uv_group_of(comm), *group = NULL;
    tsh_uv_world *world = parent->world;
    tsh_result result = tshi_uv_failed(world);
    tshi_uv_ticket *tickets;
    tshi_uv_address at = world->own; /* the address of the world's listener */
    /* alone: 1 if no connections are needed */
    int alone = color < 0 || parent->size == 1, listener = -1;
    if (result != TSH_OK) return result;
    tshi_uv_set_port(&at, 0); /* the system picks a port */
    if (!alone) listener = tshi_uv_listen(&at);
    if (!alone && (listener < 0 || !tshi_uv_end_of(listener, 0, &at)))
        return tshi_uv_cannot(world, TSH_ERR_IO, "join a group", tshi_uv_why(errno));
    tickets = (tshi_uv_ticket *)calloc((size_t)parent->size, sizeof *tickets);
    if (tickets) {
        uint64_t id = 2 + world->ids++ * (uint64_t)world->size + (uint64_t)world->rank;
        tshi_uv_ticket mine = {color, key, alone ? 0 : tshi_uv_port(&at), out->id | id};
        tickets[parent->rank] = mine; /* of a color, only the lowest rank's id is used */
        result = tshi_uv_trade(parent, tickets);
        if (result == TSH_OK && color >= 0) group = tshi_uv_color_group(parent, tickets);
    }
    if (!tickets || (result == TSH_OK && color >= 0 && !group))
        result = tshi_uv_cannot(world, TSH_ERR_MEMORY, "join a group", "no memory");
    free(tickets);
    if (!group) { /* an error, or color < 0 */
        tshi_uv_close_fd(&listener);
        return result;
    }
    tshi_uv_add_group(group, comm->ops, out);
    result = tshi_uv_link_up(group, listener); /* waits until all members are connected */
    if (result != TSH_OK) tsh_comm_close(out);
    return result;
}

/* ---- closing a group, and the world with the last one ---- */

static void tshi_uv_world_free(tsh_uv_world *world) { /* Frees a world whose loops are closed. */
    if (!world) return;
    tshi_uv_shm_end(world);
    free(world->peer);
    free(world->members);
    free(world->search);
    sodium_memzero(world->secret, sizeof world->secret); /* erases the key from memory */
    sodium_memzero(world->mesh, sizeof world->mesh);
    sodium_memzero(world->spare, sizeof world->spare);
    free(world);
}

/* Closes one handle of an event loop: callback of uv_walk. */
static void tshi_uv_close_handle(uv_handle_t *handle, void *unused) {
    (void)unused;
    if (!uv_is_closing(handle)) uv_close(handle, NULL);
}

/* Closes both event loops and frees the world. The control thread must have ended. */
static void tshi_uv_world_end(tsh_uv_world *world) {
    tshi_uv_unwatch(&world->bell);
    for (int i = 0; i < 2; i++) {
        uv_loop_t *loop = i ? &world->loop : &world->control;
        uv_walk(loop, tshi_uv_close_handle, NULL);
        (void)uv_run(loop, UV_RUN_DEFAULT); /* ends when all handles are closed */
        (void)uv_loop_close(loop);
    }
    uv_cond_destroy(&world->changed);
    uv_mutex_destroy(&world->lock);
    tshi_uv_world_free(world);
}

/* Closes a group. With the last one the world shuts down: the control thread sends BYE to all peers
 * and ends, and the world is freed. */
static void tshi_uv_close(tsh_comm *comm) {
    tshi_uv_group *group = tshi_uv_group_of(comm), **at;
    tsh_uv_world *world = group->world;
    char name[TSHI_UV_NAME];
    if (group->active) tshi_uv_withdraw(world);
    if (group->active && tshi_uv_failed(world) == TSH_OK)
        tshi_uv_report_error(world, TSHI_UV_ABORT, 0, 0, TSH_ERR_LOST, world->rank,
                             "rank %d closed %s before it waited for its requests", world->rank,
                             tshb_group_text(group->id, name, sizeof name));
    uv_mutex_lock(&world->lock);
    /* removes the group from the list */
    for (at = &world->groups; *at != group;) at = &(*at)->next;
    *at = group->next;
    uv_mutex_unlock(&world->lock);
    if (tshi_uv_failed(world) == TSH_OK) {
        tshi_uv_group_free(group);
    } else { /* the control thread may still be connecting this group */
        group->next = world->ended;
        world->ended = group; /* freed with the world */
    }
    comm->impl = NULL;
    if (--world->open) return;       /* other groups are still open */
    TSHI_UV_PUT(&world->leaving, 1); /* tshi_uv_on_turn begins the shutdown */
    (void)uv_async_send(&world->wake_control);
    (void)uv_thread_join(&world->thread); /* waits for the control thread to end */
    while ((group = world->ended) != NULL) {
        world->ended = group->next;
        tshi_uv_group_free(group);
    }
    tshi_uv_world_end(world);
}

static const tsh_comm_ops tshi_uv_ops = TSH_COMM_OPS(tshi_uv, "uv",
                                                     TSH_CAP_ORDERED | TSH_CAP_DEATH);
