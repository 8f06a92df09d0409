/* ========================================================================== */
/* >>uv-decide                                    MARK: - uv-decide (private) */
/* How all ranks agree on one error, on which the coordinator decides.        */
/* The coordinator is the lowest rank that is not lost.                       */
/* A rank that finds an error reports it to the coordinator (REPORT).         */
/* The coordinator collects reports for 20 ms and keeps the gravest one.      */
/* If that is about a collective, it asks all ranks what they called (ASK).   */
/* Then it sends its decision to all ranks (DECISION).                        */
/* Needs: >>uv-error >>uv-post.                                               */
/* ========================================================================== */

/* The coordinator collects reports for 20 ms, and waits for answers to ASK until 60 ms after the
 * first report. Any rank that has reported decides alone if no decision arrives for 500 ms. */
enum { TSHI_UV_COLLECT_MS = 20, TSHI_UV_ASK_MS = 60, TSHI_UV_ALONE_MS = 500 };

/* Returns this rank's coordinator: the lowest rank that it is connected to, or itself. */
static int tshi_uv_coordinator_of(const tsh_uv_world *world) {
    int r = 0;
    while (r != world->rank && world->peer[r].state != TSHI_UV_THERE) r++;
    return r;
}

/* Sends the world's error to the peers that have sent this rank an error report. */
static void tshi_uv_pass_on(tsh_uv_world *world) {
    tsh_error error = world->error;
    tshi_uv_error_fields(tshi_uv_write(world, TSHI_UV_DECISION), &error, world->size);
    for (int r = 0; r < world->size; r++)
        if (world->peer[r].reported) tshi_uv_post(&world->peer[r]);
}

/* Handles a DECISION, the error on which a peer has decided. It becomes the world's error at once
 * if the peer is the coordinator, or if it says that this rank is lost. Any other is held back as
 * world->offer (of several, that of the lowest rank), so that a rank that was cut off does not
 * decide for the others when it is back. */
static void tshi_uv_on_decision(tshi_uv_peer *peer, const tsh_error *error) {
    tsh_uv_world *world = peer->world;
    if (tshi_uv_failed(world) != TSH_OK) return;
    if (peer->rank == tshi_uv_coordinator_of(world) ||
        (error->code == TSH_ERR_LOST && error->rank == world->rank)) {
        tshi_uv_fail(world, error);
        tshi_uv_pass_on(world);
    } else if (!world->offered_at || peer->rank < world->offered_by) {
        if (!world->offered_at) world->offered_at = tsh_now();
        world->offer = *error;
        world->offered_by = peer->rank;
    }
}

/* Makes `error` the world's error and sends it to all peers. */
static void tshi_uv_send_decision(tsh_uv_world *world, tsh_error *error) {
    tshi_uv_error_fields(tshi_uv_write(world, TSHI_UV_DECISION), error, world->size);
    tshi_uv_post_all(world);
    tshi_uv_fail(world, error);
}

/* Adopts the decision held back as world->offer, once no rank below its sender is connected, or
 * after TSHI_UV_ALONE_MS. Forwards it to all peers: its sender may not reach every rank. */
static void tshi_uv_take_offer(tsh_uv_world *world, int64_t now) {
    if (!world->offered_at || tshi_uv_failed(world) != TSH_OK ||
        (world->offered_by > tshi_uv_coordinator_of(world) &&
         now - world->offered_at < TSHI_UV_ALONE_MS * TSHI_UV_MS))
        return;
    tshi_uv_send_decision(world, &world->offer);
}

/* Fills this rank's answer to an ASK message, which asks about collective number seq of the group
 * with this id. */
static void tshi_uv_answer_for(tsh_uv_world *world, uint64_t id, uint64_t seq,
                               tshi_uv_answer *answer) {
    const tshi_uv_group *group;
    memset(answer, 0, sizeof *answer);
    answer->told = 1;
    uv_mutex_lock(&world->lock);
    group = tshi_uv_find_group(world, id);
    if (group) {
        answer->member = 1;
        answer->rank = group->rank;
        answer->started = seq < group->started && group->started - seq <= TSHI_UV_RECORDS;
        if (answer->started) answer->record = group->record[seq % TSHI_UV_RECORDS];
    }
    uv_mutex_unlock(&world->lock);
}

/* Returns 1 if a rank's answer to ASK is final: it has started the collective, or is not in the
 * group. */
static int tshi_uv_has_told(const tshi_uv_answer *answer) {
    return answer->told && (answer->started || !answer->member);
}

/* Asks all ranks (ASK) what they called as the collective that the report world->held is about,
 * except those that have given a final answer. */
static void tshi_uv_ask(tsh_uv_world *world) {
    tshi_uv_cursor *c = tshi_uv_write(world, TSHI_UV_ASK);
    (void)tshi_uv_field(c, world->held.group, 8);
    (void)tshi_uv_field(c, world->held.seq, 8);
    for (int r = 0; r < world->size; r++) {
        tshi_uv_peer *peer = &world->peer[r];
        if (tshi_uv_has_told(&peer->answer)) continue;
        tshi_uv_post(peer);
        if (r == world->rank)
            tshi_uv_answer_for(world, world->held.group, world->held.seq, &peer->answer);
    }
}

/* Returns 1 if this rank holds an error report and waits for a decision. */
static int tshi_uv_has_reported(const tsh_uv_world *world) {
    return world->held.kind != TSHI_UV_NOTHING && tshi_uv_failed(world) == TSH_OK;
}

/* Sends world->held, the report that this rank holds, to the coordinator, unless that has it
 * already. If this rank is the coordinator: begins to collect reports, and asks all ranks about the
 * collective that the report is about. */
static void tshi_uv_send_report(tsh_uv_world *world) {
    int to = tshi_uv_coordinator_of(world);
    if (!tshi_uv_has_reported(world) || to == world->reported_to) return;
    world->reported_to = to;
    if (to != world->rank) {
        TSHI_UV_PUT(&world->halted, 1);
        tshi_uv_report_fields(tshi_uv_write(world, TSHI_UV_REPORT), &world->held, world->size);
        tshi_uv_post(&world->peer[to]);
        return;
    }
    if (!world->considered_at) world->considered_at = tsh_now();
    for (int r = 0; r < world->size; r++) world->peer[r].answer.told = 0;
    if (world->held.group) tshi_uv_ask(world);
}

/* Stores an error report, of this rank or received, in world->held, unless the report there has
 * priority: it is of a larger kind, or of the same kind and does not blame a higher rank. If this
 * rank is the coordinator, it still moves data: calls in flight may yet complete. */
static void tshi_uv_hold(tsh_uv_world *world, const tshi_uv_report *e) {
    if (tshi_uv_failed(world) != TSH_OK || e->kind < world->held.kind ||
        (e->kind == world->held.kind && e->error.rank >= world->held.error.rank))
        return;
    world->held = *e;
    if (!world->held_since) world->held_since = tsh_now();
    world->reported_to = -1;
    tshi_uv_send_report(world);
}

/* Reports an error that the control thread of this rank has found: stops moving data and holds the
 * report. */
TSH_PRINTF(5, 6)
static void tshi_uv_suspect(tsh_uv_world *world, tshi_uv_error_kind kind, tsh_result code, int rank,
                            const char *format, ...) {
    tshi_uv_report e;
    va_list list;
    va_start(list, format);
    tshi_uv_fill_report(&e, kind, code, rank, format, list);
    va_end(list);
    TSHI_UV_PUT(&world->halted, 1);
    tshi_uv_hold(world, &e);
}

static void tshi_uv_lacks_memory(tsh_uv_world *world, int rank) {
    tshi_uv_suspect(world, TSHI_UV_ABORT, TSH_ERR_MEMORY, world->rank,
                    "rank %d has no memory for a connection to rank %d", world->rank, rank);
}

/* ---- finding out that the network is cut ---- */

/* Returns the longest time in ns that may pass between two events of a pulse (tshi_uv_pulse). A
 * longer time is a gap: heartbeats are missing. */
static int64_t tshi_uv_gap(const tsh_uv_world *world) {
    return world->heartbeat / 3;
}

/* Records in `pulse` (peer->heard or peer->acked) that its event occurred at time `at`. Time in
 * which this thread itself did not run does not count as a gap between events. */
static void tshi_uv_beats(tshi_uv_peer *peer, tshi_uv_pulse *pulse, int64_t at) {
    const tsh_uv_world *world = peer->world;
    int64_t now = tsh_now(), gap = tshi_uv_gap(world);
    int overslept = world->ticked && now - world->ticked > gap;
    if ((overslept ? world->ticked : now) - pulse->last > gap) pulse->back = now;
    pulse->last = at;
}

/* If the peer's system has acknowledged the first peer->mark bytes sent to it, updates peer->acked
 * and sets the next mark. */
static void tshi_uv_look(tshi_uv_peer *peer) {
    int left = tshi_uv_unacknowledged(peer->fd);
    int64_t now = tsh_now();
    if (left < 0) { /* unknown: assumes that all sent bytes are acknowledged */
        tshi_uv_beats(peer, &peer->acked, now);
        peer->mark = 0;
        return;
    }
    if (peer->sent - (uint64_t)left < peer->mark) return;
    tshi_uv_beats(peer, &peer->acked, left ? peer->marked : now);
    peer->mark = left ? peer->sent : 0;
    peer->marked = now;
}

/* Returns 1 if a pulse has had no event for longer than tshi_uv_gap, or if such a gap ended less
 * than TSHARD_HEARTBEAT ago. */
static int tshi_uv_missed(const tsh_uv_world *world, const tshi_uv_pulse *pulse) {
    int64_t now = tsh_now();
    return now - pulse->last > tshi_uv_gap(world) ||
           (pulse->back && now - pulse->back < world->heartbeat);
}

/* Returns 1 if the network to a peer is cut, or was a short time ago. A process that is stopped or
 * busy is silent, too, but its system still acknowledges the bytes that arrive. */
static int tshi_uv_is_cut(const tshi_uv_peer *peer) {
    return tshi_uv_missed(peer->world, &peer->heard) && tshi_uv_missed(peer->world, &peer->acked);
}

typedef enum tshi_uv_side { TSHI_UV_OURS, TSHI_UV_THEIRS, TSHI_UV_NEITHER } tshi_uv_side;

/* Returns the side of a network cut on which rank r is: with this rank, or beyond the cut. Ranks
 * that left or are stopped are on neither side. */
static tshi_uv_side tshi_uv_side_of(const tsh_uv_world *world, int r) {
    const tshi_uv_peer *peer = &world->peer[r];
    if (r == world->rank) return TSHI_UV_OURS;
    if (peer->state == TSHI_UV_ABSENT || peer->state == TSHI_UV_LEFT) return TSHI_UV_NEITHER;
    if (tshi_uv_is_cut(peer)) return TSHI_UV_THEIRS;
    return peer->state == TSHI_UV_THERE ? TSHI_UV_OURS : TSHI_UV_NEITHER;
}

/* Writes the ranks on one side of a network cut, and the address of the lowest: "ranks 2 3
 * (10.77.0.3)". *count: number of these ranks. Returns the lowest rank; -1: there is none. */
static int tshi_uv_list_side(const tsh_uv_world *world, tshi_uv_side side, int *count, char *text,
                             size_t room) {
    char host[64];
    int lowest = -1;
    *count = 0;
    (void)snprintf(text, room, "ranks");
    for (int r = 0; r < world->size; r++) {
        if (tshi_uv_side_of(world, r) != side) continue;
        if (lowest < 0) lowest = r;
        if (++*count <= 8)
            tsh_text_add(text, room, " %d", r);
        else if (*count == 9)
            tsh_text_add(text, room, " ...");
    }
    if (lowest < 0) return -1;
    if (*count == 1) (void)snprintf(text, room, "rank %d", lowest);
    tshi_uv_host_text(lowest == world->rank ? &world->own : &world->peer[lowest].address, host,
                      sizeof host);
    tsh_text_add(text, room, " (%s)", host);
    return lowest;
}

/* Reports that the network is cut. Blames the lowest rank of the smaller side. If both sides have
 * the same number of ranks, blames the side that does not have the lowest rank of all. Both sides
 * write the same text without hearing each other. */
static void tshi_uv_suspect_cut(tsh_uv_world *world) {
    char ours[128], theirs[128];
    int here, there;
    int a = tshi_uv_list_side(world, TSHI_UV_OURS, &here, ours, sizeof ours);
    int b = tshi_uv_list_side(world, TSHI_UV_THEIRS, &there, theirs, sizeof theirs);
    int first = here > there || (here == there && a < b);
    if (b < 0) return; /* no rank is cut off any more */
    tshi_uv_suspect(world, TSHI_UV_SILENT, TSH_ERR_LOST, first ? b : a,
                    "%s and %s have not heard each other for %.1f s (TSHARD_HEARTBEAT): the "
                    "network between them is cut, or a host is down",
                    first ? ours : theirs, first ? theirs : ours, (double)world->heartbeat / 1e9);
}

/* Callback of tshb_calls_match: sets *out to the call that a rank of the group has given in its
 * answer to ASK. Returns 0 if it has given none. */
static int tshi_uv_called(const void *user, int rank, tshb_call *out) {
    const tsh_uv_world *world = (const tsh_uv_world *)user;
    for (int r = 0; r < world->size; r++) {
        const tshi_uv_answer *answer = &world->peer[r].answer;
        const tshi_uv_record *record = &answer->record;
        if (!answer->told || !answer->started || answer->rank != rank) continue;
        out->coll = record->coll;
        out->coll.send_counts = record->send_counts;
        out->coll.recv_counts = record->recv_counts;
        out->digest = record->digest;
        out->rank = r;
        out->counts = record->counts;
        return 1;
    }
    return 0;
}

/* After a timeout of a collective: appends to the error's text the ranks that have not started it,
 * and blames the lowest. A rank that has not answered ASK counts as one of them if this rank knows
 * that it is in the group. */
static void tshi_uv_find_absent(tsh_uv_world *world, tsh_error *error) {
    const tshi_uv_group *group;
    int first = -1;
    uv_mutex_lock(&world->lock);
    group = tshi_uv_find_group(world, world->held.group);
    for (int r = 0; r < world->size; r++) {
        const tshi_uv_answer *answer = &world->peer[r].answer;
        int known = group && tshi_uv_member(group, r) >= 0;
        if (answer->told ? !answer->member || answer->started : !known) continue;
        tsh_text_add(error->message, sizeof error->message, "%s %d",
                     first < 0 ? "; absent ranks:" : "", r);
        if (first < 0) first = r;
    }
    uv_mutex_unlock(&world->lock);
    if (first < 0)
        tsh_text_add(error->message, sizeof error->message, "; every rank has started it");
    error->rank = first;
}

/* Returns 1 if this rank and all connected ranks have given a final answer to ASK. */
static int tshi_uv_answered(const tsh_uv_world *world) {
    for (int r = 0; r < world->size; r++)
        if ((r == world->rank || world->peer[r].state == TSHI_UV_THERE) &&
            !tshi_uv_has_told(&world->peer[r].answer))
            return 0;
    return 1;
}

/* On the coordinator: makes the report in world->held the world's error, once reports have been
 * collected and the ranks asked have answered. On another rank, whose report waits for the
 * coordinator: decides alone if no decision has arrived for TSHI_UV_ALONE_MS. */
static void tshi_uv_decide(tsh_uv_world *world, int64_t now) {
    tshi_uv_report *e = &world->held;
    int64_t waited = now - world->considered_at;
    if (!tshi_uv_has_reported(world)) return;
    if (world->considered_at && waited >= TSHI_UV_COLLECT_MS * TSHI_UV_MS) {
        if (e->group && !tshi_uv_answered(world) && waited < TSHI_UV_ASK_MS * TSHI_UV_MS) {
            tshi_uv_ask(world);
            return;
        }
        if (e->group && e->kind == TSHI_UV_MISMATCH)
            (void)tshb_calls_match(tshi_uv_called, world, world->size, e->seq, e->group,
                                   &e->error);
        if (e->group && e->kind == TSHI_UV_LATE) tshi_uv_find_absent(world, &e->error);
    } else if (now - world->held_since < TSHI_UV_ALONE_MS * TSHI_UV_MS) {
        return;
    }
    tshi_uv_send_decision(world, &e->error);
}
