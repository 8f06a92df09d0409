/* ========================================================================== */
/* >>uv-cycle                                      MARK: - uv-cycle (private) */
/* Finds ranks that wait in a cycle for each other's collectives or messages. */
/* A rank that has waited for 20 ms tells the coordinator (BLOCKED).          */
/* The coordinator searches for a cycle and asks its ranks to confirm it.     */
/* When all its ranks have confirmed the cycle, it reports an error.          */
/* Needs: >>uv-decide.                                                        */
/* ========================================================================== */

/* Returns the number of collectives that a blocked rank had started in the group with this id. */
static uint64_t tshi_uv_blocked_started(const tshi_uv_blocked *s, uint64_t group) {
    for (int i = 0; i < s->groups; i++)
        if (s->groups_of[i].id == group) return s->groups_of[i].started;
    return UINT64_MAX; /* the group is not listed: assumes that all its collectives were started */
}

/* Returns how many RECVs from world rank `peer` (`receives` 1), or SENDs to it (`receives` 0), a
 * blocked rank had started in a group. */
static uint64_t tshi_uv_blocked_messages(const tshi_uv_blocked *s, uint64_t group, int peer,
                                         int receives) {
    if (tshi_uv_blocked_started(s, group) == UINT64_MAX) return UINT64_MAX;
    for (int i = 0; i < s->pairs; i++)
        if (s->pairs_of[i].group == group && s->pairs_of[i].peer == peer)
            return receives ? s->pairs_of[i].receives : s->pairs_of[i].sends;
    return s->pairs < TSHI_UV_BLOCKED_PAIRS ? 0 : UINT64_MAX; /* a full list may lack `peer` */
}

/* Callback of tshb_coll_cycle: returns the i-th rank that blocked rank r waits for, if that rank is
 * blocked, too, and has not started what r waits for; else -1. `user` is world->peer. */
static int tshi_uv_awaits(const void *user, int r, int i) {
    const tshi_uv_peer *all = (const tshi_uv_peer *)user;
    const tshi_uv_blocked *s = &all[r].blocked, *other;
    uint64_t started;
    int m;
    if (!s->wait || i >= (s->peer >= 0 ? 1 : s->members)) return -1;
    m = s->peer >= 0 ? s->peer : s->member[i];
    other = &all[m].blocked;
    /* only a send or a receive can make a rank wait for itself; a collective cannot */
    if ((m == r && s->peer < 0) || !other->wait) return -1;
    started = s->peer >= 0 ? tshi_uv_blocked_messages(other, s->group, r, s->sends)
                           : tshi_uv_blocked_started(other, s->group);
    return started <= s->seq ? m : -1;
}

/* Callback of tshb_coll_blame: returns how many ranks are blocked in the same collective as rank r.
 * `user` is world->peer. */
static int tshi_uv_together(const void *user, int r) {
    const tshi_uv_peer *all = (const tshi_uv_peer *)user;
    const tshi_uv_blocked *s = &all[r].blocked;
    int count = 0;
    for (int i = 0; s->peer < 0 && i < s->members; i++) {
        const tshi_uv_blocked *m = &all[s->member[i]].blocked;
        count += m->wait && m->group == s->group && m->seq == s->seq && m->peer < 0;
    }
    return count;
}

/* Reports the cycle that rank r is on, after all its ranks have confirmed that they still wait. */
static void tshi_uv_report_cycle(tsh_uv_world *world, int r) {
    const tshi_uv_peer *all = world->peer;
    int waits, blamed = tshb_coll_blame(world->search, r, tshi_uv_together, all, &waits);
    tsh_error error;
    tshb_cycle_error(blamed, all[blamed].blocked.text, waits, all[waits].blocked.text, &error);
    tshi_uv_suspect(world, TSHI_UV_CROSSED, error.code, blamed, "%s", error.message);
}

/* Returns 1 if this rank is still in the wait with number `wait`. */
static int tshi_uv_still(tsh_uv_world *world, uint64_t wait) {
    int still;
    uv_mutex_lock(&world->lock);
    still = wait && world->blocked.wait == wait;
    uv_mutex_unlock(&world->lock);
    return still;
}

/* Handles rank r's answer to CONFIRM: whether it is still in the wait with number `wait`. Reports
 * the cycle once all ranks on it have confirmed. Returns 1 if rank r does not wait any more. */
static int tshi_uv_confirmed(tsh_uv_world *world, int r, uint64_t wait, int still) {
    tshi_uv_peer *peer = &world->peer[r];
    if (!world->confirming || peer->asked != wait) return 0;
    peer->asked = 0;
    if (still && peer->blocked.wait == wait) {
        if (--world->confirming == 0) tshi_uv_report_cycle(world, r);
        return 0;
    }
    if (peer->blocked.wait == wait) peer->blocked.wait = 0;
    world->confirming = 0;
    return 1;
}

/* Asks the ranks on the cycle of rank `on` whether they still wait. Returns 1 if this rank is one
 * of them and does not wait any more, so that there is no cycle. */
static int tshi_uv_ask_cycle(tsh_uv_world *world, int on) {
    uint64_t mine;
    int at = on;
    do {
        tshi_uv_peer *peer = &world->peer[at];
        world->confirming++;
        peer->asked = peer->blocked.wait;
        (void)tshi_uv_field(tshi_uv_write(world, TSHI_UV_CONFIRM), peer->asked, 8);
        tshi_uv_post(peer);
        at = world->search[at].next;
    } while (at != on);
    mine = world->peer[world->rank].asked;
    return mine && tshi_uv_confirmed(world, world->rank, mine, tshi_uv_still(world, mine));
}

/* Searches for a cycle from rank r on (r = -1: from every rank), and asks its ranks to confirm. A
 * blocked rank can be released only by the ranks that it waits for: if all ranks on a cycle are
 * still in the waits that they reported, the cycle is real. */
static void tshi_uv_follow(tsh_uv_world *world, int r) {
    int on, at; /* on: a rank on the cycle found, -1: none; at: loop index */
    if (world->confirming || tshi_uv_failed(world) != TSH_OK) return;
    do {
        int end = r < 0 ? world->size : r + 1;
        memset(world->search, 0, (size_t)world->size * sizeof *world->search);
        for (at = 0; at < world->size; at++) world->peer[at].asked = 0;
        for (on = -1, at = r < 0 ? 0 : r; on < 0 && at < end; at++)
            on = tshb_coll_cycle(world->search, world->size, at, tshi_uv_awaits, world->peer);
        r = -1;
    } while (on >= 0 && tshi_uv_ask_cycle(world, on));
}

/* Sends world->blocked, what this rank waits for, to the coordinator. If this rank is the
 * coordinator, decodes the message right here. */
static void tshi_uv_send_blocked(tsh_uv_world *world) {
    int to = tshi_uv_coordinator_of(world);
    /* own: a second cursor, by which the coordinator reads its own message back */
    tshi_uv_cursor *c = tshi_uv_write(world, TSHI_UV_BLOCKED), own = *c;
    uv_mutex_lock(&world->lock);
    TSHI_UV_PUT(&world->blocked_new, 0);
    tshi_uv_blocked_fields(c, &world->blocked, world->size);
    uv_mutex_unlock(&world->lock);
    own.writes = 0;
    if (to == world->rank) {
        tshi_uv_blocked_fields(&own, &world->peer[to].blocked, world->size);
        tshi_uv_follow(world, to);
    } else {
        tshi_uv_post(&world->peer[to]);
    }
}
