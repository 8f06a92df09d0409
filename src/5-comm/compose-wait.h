/* ========================================================================== */
/* >>compose-wait                              MARK: - compose-wait (private) */
/* Groups and waiting of composed collectives, and the functions of their     */
/* comm.                                                                      */
/* Needs: >>coll-wait >>compose.                                              */
/* ========================================================================== */

/* Returns a group with its arrays, in one block of memory; NULL: no memory. */
static tshi_compose_group *tshi_compose_group_new(tshi_compose_world *world, int size) {
    size_t n = (size_t)size;
    tshi_compose_group *group = (tshi_compose_group *)calloc(
        1, sizeof *group + 2 * n * sizeof(uint64_t) + n * sizeof(int));
    if (!group) return NULL;
    group->world = world;
    group->size = size;
    group->sends = (uint64_t *)(void *)(group + 1);
    group->recvs = group->sends + n;
    group->ranks = (int *)(void *)(group->recvs + n);
    return group;
}

/* Removes a group from its world and frees it with its ops. */
static void tshi_compose_group_free(tshi_compose_group *group) {
    tshi_compose_group **at = &group->world->groups;
    while (group->first) tshi_compose_release(group->first);
    while (*at != group) at = &(*at)->next;
    *at = group->next;
    free(group);
}

/* Adds a group, whose ranks are filled in, to its world, and sets *out to this rank's comm. */
static void tshi_compose_open(tshi_compose_group *group, uint64_t id, tsh_comm *out) {
    tshi_compose_world *world = group->world;
    group->id = id;
    while (group->ranks[group->rank] != world->messages.rank) group->rank++;
    group->next = world->groups;
    world->groups = group;
    world->open_comms++;
    *out = tsh_comm_make(&world->ops, group, group->rank, group->size, id);
}

/* ---- waiting ---- */

/* Raises an error if rank r, whose report is new, waits in a cycle. */
static void tshi_compose_check_cycle(tshi_compose_world *world, int r) {
    tsh_error error;
    if (tsh_wait_cycle(world->report, world->messages.size, r, world->search, &error))
        tshi_compose_raise(world, &error);
}

/* Returns the memory for rank r's report, and sets report[r] to it: r is known to wait. */
static tsh_wait_report *tshi_compose_report_of(tshi_compose_world *world, int r) {
    world->report[r] = (tsh_wait_report *)(void *)((char *)world->incoming +
                                                   (size_t)(r + 1) * world->report_bytes);
    return world->report[r];
}

/* Receives the reports that have arrived from other ranks, at most one per rank. */
static void tshi_compose_read_reports(tshi_compose_world *world) {
    tsh_comm *messages = &world->messages;
    for (int r = 0; r < messages->size && tshi_compose_code(world) == TSH_OK; r++) {
        tsh_coll coll = tshi_compose_message(TSH_RECV, r, TSHI_COMPOSE_REPORTS, TSH_I64);
        tsh_req again = 0;
        coll.recv = world->incoming;
        coll.count = (int64_t)(world->report_bytes / sizeof(int64_t));
        if (r == messages->rank || messages->ops->start(messages, &coll, &again) != TSH_OK || again)
            continue; /* not arrived, or r is gone, perhaps after an orderly shutdown */
        memcpy(tshi_compose_report_of(world, r), world->incoming, world->report_bytes);
        tshi_compose_check_cycle(world, r);
    }
}

/* Takes every step that is possible now, on all comms of this rank. */
static void tshi_compose_advance(tshi_compose_world *world) {
    world->messages.ops->progress(&world->messages);
    tshi_compose_read_reports(world);
    for (tshi_compose_group *group = world->groups, *next; group; group = next) {
        next = group->next;
        for (tshi_compose_op *op = group->first; op; op = op->next) {
            if (tshi_compose_code(world) != TSH_OK) return;
            tshi_compose_step(op);
        }
        if (group->closing && group->first && group->first->state == TSHI_COMPOSE_DONE)
            tshi_compose_group_free(group);
    }
}

/* Writes marks: how many collectives this rank has started in each group, and how many messages
 * with each peer. Returns the number of marks. */
static int tshi_compose_marks(const tshi_compose_world *world, tsh_wait_mark *mark) {
    int n = 0;
    for (const tshi_compose_group *g = world->groups; g; g = g->next) {
        for (int peer = -1; peer < g->size && n < TSHI_COMPOSE_MARKS; peer++) {
            if (peer >= 0 && !g->sends[peer] && !g->recvs[peer]) continue; /* no messages */
            mark[n].group = g->id;
            mark[n].peer = peer < 0 ? -1 : g->ranks[peer];
            mark[n].sends = peer < 0 ? g->started : g->sends[peer];
            mark[n++].recvs = peer < 0 ? 0 : g->recvs[peer];
        }
    }
    return n;
}

/* Fills r with the report that this rank waits in op. */
static void tshi_compose_fill_report(const tshi_compose_op *op, tsh_wait_report *r) {
    const tshi_compose_group *group = op->group;
    int *awaited;
    memset(r, 0, group->world->report_bytes);
    r->group = group->id;
    r->seq = op->peer >= 0 ? 0 : op->number; /* number of the collective */
    r->pairwise = op->peer >= 0;
    r->send_to = r->recv_from = -1; /* -1: no message is awaited */
    r->marks = tshi_compose_marks(group->world, (tsh_wait_mark *)(void *)(r + 1));
    awaited = (int *)(void *)((tsh_wait_mark *)(void *)(r + 1) + r->marks);
    if (op->peer >= 0) {
        awaited[0] = group->ranks[op->peer]; /* a message awaits its peer only */
        *(op->sends ? &r->send_to : &r->recv_from) = awaited[0];
        *(op->sends ? &r->send_number : &r->recv_number) = op->number;
    } else {
        memcpy(awaited, group->ranks, (size_t)group->size * sizeof *awaited);
    }
    r->awaited = op->peer >= 0 ? 1 : group->size;
    tsh_coll_where(&op->coll, group->size, op->number, group->id, r->text, sizeof r->text);
}

/* Sends all ranks a report that this rank waits in op, and looks for a cycle. */
static void tshi_compose_send_report(const tshi_compose_op *op) {
    tshi_compose_world *world = op->group->world;
    int me = world->messages.rank;
    tshi_compose_fill_report(op, tshi_compose_report_of(world, me));
    for (int to = 0; to < world->messages.size; to++)
        if (to != me)
            tshi_compose_send(world, to, TSHI_COMPOSE_REPORTS, world->report[me],
                              (int64_t)(world->report_bytes / sizeof(int64_t)), TSH_I64);
    tshi_compose_check_cycle(world, me);
}

/* Raises the error that op has timed out, and names the ranks that op waits for. */
static void tshi_compose_time_out(const tshi_compose_op *op) {
    const tshi_compose_group *group = op->group;
    tsh_error error;
    (void)tsh_error_set(&error, TSH_ERR_TIMEOUT, -1, "rank %d ran out of time in ",
                        group->ranks[group->rank]);
    tsh_coll_where(&op->coll, group->size, op->number, group->id, error.message,
                   sizeof error.message);
    tsh_text_add(error.message, sizeof error.message, "; %s:",
                 op->state == TSHI_COMPOSE_MATCHING ? "absent ranks"
                                                    : "ranks that have not finished");
    for (int r = 0; r < group->size; r++) {
        int i = 0;
        while (i < op->recvs && op->recv[i].recv_from != group->ranks[r]) i++; /* a RECV from r */
        if (i == op->recvs) continue;                     /* op does not wait for r */
        if (error.rank < 0) error.rank = group->ranks[r]; /* the first one is blamed */
        tsh_text_add(error.message, sizeof error.message, " %d", group->ranks[r]);
    }
    if (error.rank < 0) tsh_text_add(error.message, sizeof error.message, " none");
    tshi_compose_raise(group->world, &error);
}

/* Waits until op is done or the world has failed. Returns the world's error code. A rank that has
 * waited for 20 ms sends a report, so that cycles are found. */
static tsh_result tshi_compose_await(tshi_compose_op *op) {
    tshi_compose_world *world = op->group->world;
    int64_t begin = tsh_now();
    int reported = 0; /* 1: the report has been sent */
    for (;;) {
        int64_t now;
        tsh_result code;
        tshi_compose_advance(world);
        code = tshi_compose_code(world);
        if (code != TSH_OK || tshi_compose_is_done(op)) return code;
        now = tsh_now();
        if (now >= op->deadline) tshi_compose_time_out(op);
        if (now - begin > 20 * TSHI_COMPOSE_MS && !reported++)
            tshi_compose_send_report(op->state == TSHI_COMPOSE_DONE ? op->other : op);
        world->messages.ops->idle(&world->messages, TSHI_COMPOSE_MS);
    }
}

/* ---- the composed comm's tsh_comm_ops ---- */

static tshi_compose_group *tshi_compose_group_of(const tsh_comm *comm) {
    return (tshi_compose_group *)comm->impl;
}

/* Returns the op of a request; NULL: the group has none. */
static tshi_compose_op *tshi_compose_find(const tshi_compose_group *group, tsh_req req) {
    tshi_compose_op *op = group->first;
    while (op && op->id != req) op = op->next;
    return op;
}

/* Starts a collective, or both halves of a SENDRECV: op and op->other. */
static tsh_result tshi_compose_start(tsh_comm *comm, const tsh_coll *coll, tsh_req *req) {
    tshi_compose_group *group = tshi_compose_group_of(comm);
    tsh_result code = tshi_compose_code(group->world);
    tsh_coll half = coll->kind == TSH_SENDRECV ? tsh_coll_half(coll, 1) : *coll;
    tshi_compose_op *op;
    if (code != TSH_OK) return code; /* the world has failed */
    op = tshi_compose_add(group, &half, NULL);
    if (!op) return TSH_ERR_MEMORY;
    if (coll->kind == TSH_SENDRECV) {
        half = tsh_coll_half(coll, 0);
        op->other = tshi_compose_add(group, &half, NULL);
        if (!op->other) return TSH_ERR_MEMORY; /* the world has failed, too */
    }
    *req = op->id;
    return TSH_OK;
}

static tsh_result tshi_compose_wait(tsh_comm *comm, tsh_req req) {
    tshi_compose_op *op = tshi_compose_find(tshi_compose_group_of(comm), req);
    tsh_result code;
    if (!op) return TSH_ERR_ARGUMENT;
    code = tshi_compose_await(op);
    tshi_compose_release(op); /* frees op also after an error */
    return code;
}

static tsh_result tshi_compose_test(tsh_comm *comm, tsh_req req, int *done) {
    tshi_compose_world *world = tshi_compose_group_of(comm)->world;
    tshi_compose_op *op = tshi_compose_find(tshi_compose_group_of(comm), req);
    tsh_result code;
    if (!op) return TSH_ERR_ARGUMENT;
    tshi_compose_advance(world);
    if (!tshi_compose_is_done(op) && tsh_now() >= op->deadline) tshi_compose_time_out(op);
    code = tshi_compose_code(world);
    *done = code != TSH_OK || tshi_compose_is_done(op);
    return code;
}

static void tshi_compose_progress(tsh_comm *comm) {
    tshi_compose_advance(tshi_compose_group_of(comm)->world);
}

static tsh_result tshi_compose_status(tsh_comm *comm, tsh_error *error) {
    tsh_comm *messages = &tshi_compose_group_of(comm)->world->messages;
    return messages->ops->status(messages, error);
}

static void tshi_compose_abort(tsh_comm *comm, const tsh_error *why) {
    tsh_comm *messages = &tshi_compose_group_of(comm)->world->messages;
    tsh_error error = *why;
    if (error.rank < 0) error.rank = messages->rank; /* -1: the error of this rank */
    messages->ops->abort(messages, &error);
}

/* Returns the new group of this rank's color, from the colors and keys that all ranks have sent in
 * the headers of a split. Sets *id to what the lowest of its ranks in the old group has made up.
 * NULL: no memory. */
static tshi_compose_group *tshi_compose_color_group(const tshi_compose_op *op, int color,
                                                    uint64_t *id) {
    const tshi_compose_group *group = op->group;
    const tshi_compose_header *header = tshi_compose_header_of(op, 0);
    tshi_compose_group *made = NULL;
    int *order = (int *)calloc((size_t)group->size, sizeof *order), n, first = 0;
    if (!order) return NULL;
    n = tsh_split_order(&header->ticket, tshi_compose_header_bytes(group), group->size, color,
                        order);
    made = tshi_compose_group_new(group->world, n);
    for (int i = 0; made && i < n; i++) made->ranks[i] = group->ranks[order[i]];
    while (tshi_compose_header_of(op, first)->ticket.color != color) first++;
    *id = tshi_compose_header_of(op, first)->made;
    free(order);
    return made;
}

static tsh_result tshi_compose_split(tsh_comm *comm, int color, int key, tsh_comm *out) {
    tshi_compose_group *group = tshi_compose_group_of(comm), *made = NULL; /* made: the new group */
    tshi_compose_world *world = group->world;
    tsh_result code = tshi_compose_code(world);
    tsh_coll coll = tsh_coll_make(TSH_SPLIT, TSH_F32);
    tsh_ticket ticket = {color, key};
    tshi_compose_op *op;
    uint64_t id = 0;
    if (code != TSH_OK) return code;
    world->made = 1 + (uint64_t)world->messages.rank +
                  (uint64_t)world->messages.size * ++world->splits; /* no other group's id */
    world->made |= out->id;                                         /* the new group's name */
    op = tshi_compose_add(group, &coll, &ticket);
    if (!op) return TSH_ERR_MEMORY;
    code = tshi_compose_await(op);
    if (code == TSH_OK && color >= 0) made = tshi_compose_color_group(op, color, &id);
    tshi_compose_release(op);
    if (code != TSH_OK || color < 0) return code;
    if (!made) return tshi_compose_no_memory(world);
    tshi_compose_open(made, id, out);
    return TSH_OK;
}

/* Closes a group. Closing is sent as a collective of its own kind, which no rank waits for: its
 * headers inform ranks that call something else in the group. A rank that closes its last comm
 * waits until all ranks have closed theirs, or the world has failed. */
static void tshi_compose_close(tsh_comm *comm) {
    tshi_compose_group *group = tshi_compose_group_of(comm);
    tshi_compose_world *world = group->world;
    tsh_coll coll = tsh_coll_make(TSH_BARRIER, TSH_F32);
    char name[TSHI_COLL_NAME];
    tsh_error error;
    coll.kind = TSH_COLL_KINDS; /* a kind of its own: this rank closes the group */
    if (group->first && tshi_compose_code(world) == TSH_OK) {
        (void)tsh_error_set(&error, TSH_ERR_LOST, world->messages.rank,
                            "rank %d closed %s before it waited for its requests",
                            world->messages.rank, tsh_group_text(group->id, name, sizeof name));
        tshi_compose_raise(world, &error);
    }
    if (tshi_compose_code(world) == TSH_OK && tshi_compose_add(group, &coll, NULL))
        group->closing = 1; /* freed when the close is done */
    tshi_compose_advance(world);
    comm->impl = NULL;
    if (--world->open_comms > 0) return;                          /* this rank has other comms */
    while (world->groups && tshi_compose_code(world) == TSH_OK) { /* until all groups are closed */
        if (tsh_now() >= world->groups->first->deadline)
            tshi_compose_time_out(world->groups->first);
        world->messages.ops->idle(&world->messages, TSHI_COMPOSE_MS);
        tshi_compose_advance(world);
    }
    while (world->groups) tshi_compose_group_free(world->groups);
    world->messages.ops->close(&world->messages);
    free(world);
}

TSH_API tsh_result tsh_comm_compose(const tsh_comm *messages, tsh_comm *out, tsh_error *error) {
    static const tsh_comm_ops all = TSH_COMM_OPS(tshi_compose, "", TSH_CAP_ORDERED);
    size_t n = (size_t)messages->size;                         /* ranks of the world */
    size_t marks = TSHI_COMPOSE_MARKS * sizeof(tsh_wait_mark); /* bytes of the marks */
    size_t report = (sizeof(tsh_wait_report) + marks + n * sizeof(int) + 7) / 8 * 8;
    tshi_compose_world *world = (tshi_compose_world *)calloc(
        1, sizeof *world + (n + 1) * report + n * (sizeof *world->report + sizeof *world->search));
    tshi_compose_group *group = tshi_compose_group_new(world, messages->size);
    if (!world || !group) (void)tsh_error_set(error, TSH_ERR_MEMORY, -1, "no memory for a world");
    if (!world || !group || !tsh_timeout(0, "", &world->timeout, error)) {
        free(world);
        free(group);
        return error->code;
    }
    world->messages = *messages;
    world->report_bytes = report;
    world->incoming = (tsh_wait_report *)(void *)(world + 1);
    world->report = (tsh_wait_report **)(void *)((char *)world->incoming + (n + 1) * report);
    world->search = (tsh_coll_search *)(void *)(world->report + n);
    for (int r = 0; r < messages->size; r++) group->ranks[r] = r;
    world->ops = all;
    world->ops.name = messages->ops->name;
    world->ops.caps |= messages->ops->caps;
    tshi_compose_open(group, 1, out); /* 1: id of the world's group */
    return TSH_OK;
}

#undef TSHI_COMPOSE_MS
