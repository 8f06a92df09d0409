/* ========================================================================== */
/* >>uv-wait                                        MARK: - uv-wait (private) */
/* Waiting. A rank that waits moves data, polls for a short time, then sleeps */
/* in libuv. After 20 ms the control thread reports to the coordinator what   */
/* the rank waits for, to find cycles (>>uv-cycle). A timeout is an error.    */
/* Needs: >>uv-advance.                                                       */
/* ========================================================================== */

/* ms after which a wait is reported to the coordinator; ms of the longest sleep */
enum { TSHI_UV_BLOCKED_MS = 20, TSHI_UV_NAP_MS = 500 };

/* What this rank waits for: an operation or, with op NULL, the connections of a group. */
typedef struct tshi_uv_waiting {
    tshi_uv_group *group; /* group whose operation or connections are awaited */
    tshi_uv_op *op;       /* the awaited operation; NULL: the connections of group are awaited */
    /* deadline: when the wait times out; begun: when it first slept, 0: not yet */
    int64_t deadline, begun;
    int noted; /* 1: the control thread was told of the wait */
} tshi_uv_waiting;

/* Callback when a data connection is ready; the event alone ends the sleep. */
static void tshi_uv_poll_event(uv_poll_t *poll, int status, int events) {
    (void)poll;
    (void)status;
    (void)events;
}

/* Callback of world->timer. The timer may fire before uv_run sleeps; stopping the loop prevents
 * that sleep. */
static void tshi_uv_timer_event(uv_timer_t *timer) {
    uv_stop(timer->loop);
}

static int tshi_uv_over(const tshi_uv_waiting *wait) { /* Returns 1 if the wait is over. */
    if (tshi_uv_failed(wait->group->world) != TSH_OK) return 1;
    return wait->op ? wait->op->pending == 0 : TSHI_UV_GET(&wait->group->linked);
}

/* Returns the peer, a rank of the group, that a SEND, RECV or SENDRECV waits for. *number: number
 * of the message; *sends: 1 if this rank waits to send it, 0 if it waits to receive it. */
static int tshi_uv_awaited(const tshi_uv_op *op, uint64_t *number, int *sends) {
    const tsh_coll *coll = &op->coll;
    const int own = op->group->rank;
    const tshi_uv_stream *in = coll->kind == TSH_SENDRECV ? &op->in[coll->recv_from] : NULL;
    /* a SENDRECV waits to send until its first byte is out, or if it has received everything */
    *sends = coll->kind == TSH_SEND ||
             (in && (op->out[coll->send_to].head == 0 || (in->total && in->good == in->total)));
    if (coll->kind == TSH_SENDRECV && coll->recv_from == own && op->in[own].head == 0)
        /* a SENDRECV that receives from this rank itself: the wait is for that message */
        *sends = 0;
    *number = op->number[!*sends];
    return *sends ? coll->send_to : coll->recv_from;
}

/* Reports a timeout of op or, if op is NULL, of making the group's connections. For a collective,
 * the coordinator finds out which ranks are absent. */
static void tshi_uv_late(const tshi_uv_group *group, const tshi_uv_op *op) {
    tsh_uv_world *world = group->world;
    char text[240];
    /* id, seq: the collective that the coordinator asks all ranks about; id 0: none */
    uint64_t id = op ? group->id : 0, seq = op ? op->head.seq : 0;
    int sends, peer = -1;
    if (TSHI_UV_GET(&world->halted)) return; /* an error was reported already */
    tshi_uv_op_text(group, op, text, sizeof text);
    if (op && op->algorithm == TSHI_UV_MESSAGE) {
        /* world rank of the message's other end */
        peer = group->ranks[tshi_uv_awaited(op, &seq, &sends)];
        id = seq = 0; /* the coordinator need not ask other ranks */
        tsh_text_add(text, sizeof text, "; absent ranks: %d", peer);
    }
    tshi_uv_report_error(world, TSHI_UV_LATE, id, seq, TSH_ERR_TIMEOUT, peer,
                         "rank %d ran out of time in %s", world->rank, text);
}

/* Records in s which collectives and messages this rank has started, for tshi_uv_awaits. The caller
 * must hold world->lock. */
static void tshi_uv_list_started(const tsh_uv_world *world, tshi_uv_blocked *s) {
    const tshi_uv_group *g = world->groups;
    s->groups = s->pairs = 0;
    for (; g && s->groups < TSHI_UV_BLOCKED_GROUPS; g = g->next) {
        s->groups_of[s->groups].id = g->id;
        s->groups_of[s->groups++].started = g->started; /* number of collectives started */
        for (int i = g->size; i < 2 * g->size && s->pairs < TSHI_UV_BLOCKED_PAIRS; i++) {
            const tshi_uv_link *link = &g->link[i];
            if (!link->sends && !link->receives) continue; /* no messages with that peer yet */
            s->pairs_of[s->pairs].group = g->id;
            s->pairs_of[s->pairs].peer = g->ranks[link->peer];
            s->pairs_of[s->pairs].sends = link->sends;         /* number of SENDs to the peer */
            s->pairs_of[s->pairs++].receives = link->receives; /* number of RECVs from the peer */
        }
    }
}

/* Records in world->blocked that this rank is blocked in op; the control thread reports it. */
static void tshi_uv_note_blocked(const tshi_uv_op *op) {
    const tshi_uv_group *group = op->group;
    tsh_uv_world *world = group->world;
    tshi_uv_blocked *s = &world->blocked;
    int peer = -1;
    uv_mutex_lock(&world->lock);
    s->wait = ++world->waits; /* a new number for every wait */
    s->group = group->id;
    s->seq = op->head.seq;
    s->sends = 0;
    if (op->algorithm == TSHI_UV_MESSAGE) peer = tshi_uv_awaited(op, &s->seq, &s->sends);
    /* peer: world rank that is awaited; -1: the wait is in a collective */
    s->peer = peer < 0 ? -1 : group->ranks[peer];
    s->members = group->size;
    memcpy(s->member, group->ranks, (size_t)group->size * sizeof *group->ranks);
    tshi_uv_op_text(group, op, s->text, sizeof s->text);
    tshi_uv_list_started(world, s);
    TSHI_UV_PUT(&world->blocked_new, 1); /* lets the control thread report the wait */
    uv_mutex_unlock(&world->lock);
    (void)uv_async_send(&world->wake_control);
}

/* Clears what tshi_uv_note_blocked has recorded, as the wait is over. */
static void tshi_uv_unblock(tsh_uv_world *world) {
    uv_mutex_lock(&world->lock);
    world->blocked.wait = 0;
    TSHI_UV_PUT(&world->blocked_new, 0); /* cancels the report of the wait, if not sent yet */
    uv_mutex_unlock(&world->lock);
}

/* Tells libuv which events on data connections end this thread's sleep. */
static void tshi_uv_watch_links(tsh_uv_world *world) {
    int still = TSHI_UV_GET(&world->halted); /* 1: an error was reported, watch no connection */
    for (tshi_uv_group *group = world->groups; group; group = group->next) {
        for (int i = 0; i < 2 * group->size; i++) {
            tshi_uv_link *link = &group->link[i];
            /* libuv events to watch; in shared memory a bell is rung instead */
            int want = still || !group->active || link->pipe.out ? 0 : link->want;
            /* if not 0, the control thread tells the peer that this rank waits (AWAIT) */
            TSHI_UV_PUT(&link->awaits, want & UV_READABLE);
            if (want == link->polled || link->fd < 0) continue; /* no change, or not connected */
            if (!link->poll) /* the poll handle is made at the first sleep */
                link->poll = tshi_uv_watch(&world->loop, link->fd, want, NULL, tshi_uv_poll_event);
            else if (want)
                (void)uv_poll_start(link->poll, want, tshi_uv_poll_event);
            else
                (void)uv_poll_stop(link->poll); /* no event is awaited */
            if (!link->poll)
                tshi_uv_report_error(world, TSHI_UV_ABORT, 0, 0, TSH_ERR_MEMORY, world->rank,
                                     "rank %d: no memory to watch a connection", world->rank);
            link->polled = link->poll ? want : 0; /* the events that libuv watches now */
        }
    }
}

/* Sleeps until a connection is ready, the control thread wakes this thread, or something is due:
 * the deadline, or the report that this rank is blocked. */
static void tshi_uv_nap(tshi_uv_waiting *wait) {
    tsh_uv_world *world = wait->group->world;
    int64_t now = tsh_now(), until;
    if (!wait->begun) wait->begun = now;       /* the first sleep of this wait */
    until = now + TSHI_UV_NAP_MS * TSHI_UV_MS; /* the latest time at which the sleep ends */
    if (now >= wait->deadline)
        tshi_uv_late(wait->group, wait->op);
    else
        until = tshi_uv_min(until, wait->deadline);
    if (wait->op && !wait->noted) {
        int64_t note = wait->begun + TSHI_UV_BLOCKED_MS * TSHI_UV_MS;
        wait->noted = now >= note; /* blocked for 20 ms: report it */
        if (wait->noted)
            tshi_uv_note_blocked(wait->op);
        else
            until = tshi_uv_min(until, note);
    }
    tshi_uv_watch_links(world);
    uv_update_time(&world->loop); /* the timer counts from libuv's cached time: update that */
    (void)uv_timer_start(&world->timer, tshi_uv_timer_event,
                         (uint64_t)((until - now) / TSHI_UV_MS + 1), 0); /* in ms, rounded up */
    if (!tshi_uv_over(wait)) (void)uv_run(&world->loop, UV_RUN_ONCE); /* sleeps, handles events */
}

/* Pauses between two polls. Offers the core to another thread, which the awaited rank may run on,
 * on every 32nd poll, or on each if some ranks are reached by sockets or there are more ranks than
 * cores. */
static void tshi_uv_pause(const tsh_uv_world *world, int spins) {
    if (!world->world_group->whole || world->spins < 32 || spins % 32 == 0) {
        (void)sched_yield();
        return;
    }
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause(); /* frees the core's resources for its other hardware thread */
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* Waits until op is complete or, if op is NULL, until the group is connected; or until the world
 * fails. Returns TSH_OK or the world's error. */
static tsh_result tshi_uv_wait_for(tshi_uv_group *group, tshi_uv_op *op) {
    tsh_uv_world *world = group->world;
    tshi_uv_waiting wait = {group, op, 0, 0, 0};
    int asleep = 0;           /* 1: this rank's segment says that it sleeps */
    int spins = 0, turns = 0; /* spins: rounds without progress in a row; turns: all rounds */
    wait.deadline = op ? op->deadline : tshb_deadline(0, world->timeout);
    while (!tshi_uv_over(&wait)) {
        int moved = tshi_uv_advance(world);
        if (tshi_uv_over(&wait)) break;
        if (++turns % 64 == 0 && tsh_now() >= wait.deadline) tshi_uv_late(group, op);
        if (moved) {
            spins = 0;
        } else if (spins++ < world->spins) { /* polls a little before it sleeps */
            tshi_uv_pause(world, spins);
            continue;
        } else if (asleep) { /* no progress since tshi_uv_shm_sleeps(world, 1): sleeps */
            tshi_uv_nap(&wait);
        }
        asleep = !moved && !asleep;
        tshi_uv_shm_sleeps(world, asleep);
        if (asleep) tshi_uv_board_look(world);
    }
    tshi_uv_shm_sleeps(world, 0);
    if (wait.noted) tshi_uv_unblock(world);
    return tshi_uv_failed(world);
}
