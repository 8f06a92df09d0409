/* ========================================================================== */
/* >>uv-board                                      MARK: - uv-board (private) */
/* Small collectives of a group that shares memory as a whole. Each rank has  */
/* a few slots in its segment; those of all ranks are the board. A rank shows */
/* what it sends, once for all others, in its next slot, and reads theirs.    */
/* Needs: >>uv-shm-flow.                                                      */
/* ========================================================================== */

/* Collective n on the board (from 1 on) is in slot n % TSHI_UV_SLOTS of each rank. A slot is used
 * again only when all have read it: a rank shows n once it has completed n - TSHI_UV_AHEAD. So all
 * have shown that one, and each had completed n - 2 TSHI_UV_AHEAD before, whose slot it is. */
enum { TSHI_UV_AHEAD = TSHI_UV_SLOTS / 2 };

/* Returns the bytes of op's send buffer. */
static int64_t tshi_uv_board_size(const tshi_uv_op *op) {
    const tsh_coll *coll = &op->coll;
    const int rank = op->group->rank, size = op->group->size;
    /* otherwise every rank gets the same */
    if (coll->kind != TSH_REDUCE_SCATTER) return tshi_uv_direct_size(op, rank, rank);
    return tshb_coll_before(coll->recv_counts, size) * coll->blocks * op->width;
}

/* Copies what op sends into its slot, and tells the others. */
static void tshi_uv_board_show(const tshi_uv_op *op) {
    tshi_uv_group *group = op->group;
    tshi_uv_slot *slot = tshi_uv_slot_of(group, group->rank, op->boarded);
    const int64_t size = tshi_uv_board_size(op);
    if (size) memcpy(slot + 1, op->coll.send, (size_t)size);
    slot->seq = op->head.seq;
    slot->digest = op->head.digest;
    TSHI_UV_PUT(&slot->number, op->boarded);
    group->shown = op->boarded;
    for (int r = 0; r < group->size; r++)
        if (r != group->rank) tshi_uv_shm_wake(group->world, group->ranks[r]);
}

/* Shows as many of the collectives in flight as may be shown, none after an error. */
static void tshi_uv_board_show_all(tshi_uv_group *group) {
    /* number of the first one in flight */
    const uint64_t first = group->boarded - group->board.used + 1;
    if (TSHI_UV_GET(&group->world->halted)) return;
    while (group->shown < group->boarded && group->shown + 1 < first + TSHI_UV_AHEAD)
        tshi_uv_board_show(tshi_uv_nth(group, &group->board, (unsigned)(group->shown + 1 - first)));
}

/* Returns 1 if a peer has written a frame with op's number to its ring: it has called a collective
 * that is not on the board. Then reports that the calls differ. */
static int tshi_uv_frame_instead(const tshi_uv_link *link, const tshi_uv_op *op) {
    const tshi_uv_pipe *pipe = &link->pipe;
    const int64_t at = tshi_uv_shm_line(pipe->read);
    tshi_uv_head head;
    /* frames of earlier collectives come first; so does op's slot if the frame is of a later one */
    if (link->in.used || TSHI_UV_GET(pipe->peer_sent) - at < (int64_t)sizeof head) return 0;
    memcpy(&head, pipe->in + (at & (pipe->size - 1)), sizeof head);
    if (head.seq != op->head.seq) return 0;
    tshi_uv_differ(link, op, head.seq);
    return 1;
}

/* Returns 1 if rank r has shown what it sends in op. Reports an error if it has called another
 * collective instead, or has closed the group. */
static int tshi_uv_board_shows(const tshi_uv_op *op, int r) {
    tshi_uv_group *group = op->group;
    tshi_uv_link *link = &group->link[r];
    const tshi_uv_slot *slot = tshi_uv_slot_of(group, r, op->boarded);
    /* read first: once the peer has set it, it shows nothing more */
    const int closed = TSHI_UV_GET(&link->pipe.theirs->closed) != 0;
    if (TSHI_UV_GET(&slot->number) != op->boarded) {
        if (closed && !tshi_uv_frame_instead(link, op))
            tshi_uv_broke(link, &group->board, "closed its connection");
        return 0;
    }
    if (slot->seq == op->head.seq && slot->digest == op->head.digest) return 1;
    tshi_uv_differ(link, op, slot->seq);
    return 0;
}

/* Writes to the cache lines of this rank's next slot, as many as op took. So this core has them for
 * itself by the time it shows the next collective: other cores, which have read them, give them up.
 * No rank needs what that slot shows: all have shown op, and had read it before that. */
static void tshi_uv_board_prepare(const tshi_uv_op *op) {
    tshi_uv_slot *next = tshi_uv_slot_of(op->group, op->group->rank, op->boarded + 1);
    const int64_t size = (int64_t)sizeof *next + tshi_uv_board_size(op);
    if (op->group->shown > op->boarded) return; /* that slot is in use already */
    __atomic_store_n(&next->number, 0, __ATOMIC_RELAXED);
    for (int64_t i = 64; i < size; i += 64) *((volatile char *)next + i) = 0;
}

/* Completes op, which all ranks have shown: gathers or sums. */
static void tshi_uv_board_take(const tshi_uv_op *op) {
    const tshi_uv_group *group = op->group;
    for (int r = 0; op->coll.kind == TSH_ALLGATHER && r < group->size; r++) {
        const int64_t size = r == group->rank ? 0 : tshi_uv_length(op, r);
        for (int64_t at = 0; at < size;) { /* one row at a time */
            const tshi_uv_span to = tshi_uv_in_whole(op, op->coll.recv, r, at);
            memcpy(to.at, tshi_uv_slot_data(op, r) + at, (size_t)to.size);
            at += to.size;
        }
    }
    if (tshi_uv_sums(op)) tshi_uv_direct_sums(op);
}

/* Moves the collectives on a group's board as far as they can be moved now. Returns 0 if none was
 * moved. */
static int tshi_uv_board_move(tshi_uv_group *group) {
    int moved = 0;
    for (; group->board.used && !TSHI_UV_GET(&group->world->halted); moved = 1) {
        tshi_uv_op *op = tshi_uv_first(group, &group->board);
        const int before = op->seen;
        tshi_uv_board_show_all(group);
        while (op->seen < group->size &&
               (op->seen == group->rank || tshi_uv_board_shows(op, op->seen)))
            op->seen++;
        if (op->seen < group->size) return moved || op->seen != before;
        tshi_uv_board_take(op);
        tshi_uv_board_prepare(op);
        tshi_uv_pop(&group->board);
        op->pending = 0;
    }
    return moved;
}

/* Looks for errors where waiting ranks do not look: of all ranks that have not shown the first
 * collective on the board, not only the lowest; and on the board, where a frame of a collective
 * with the same number is awaited. */
static void tshi_uv_board_look(tsh_uv_world *world) {
    for (tshi_uv_group *group = world->groups; group; group = group->next) {
        const tshi_uv_op *shown = group->board.used ? tshi_uv_first(group, &group->board) : NULL;
        for (int r = 0; group->whole && r < group->size; r++) {
            const tshi_uv_link *link = &group->link[r];
            const tshi_uv_op *op = link->in.used ? tshi_uv_first(group, &link->in) : NULL;
            const tshi_uv_slot *slot = op ? tshi_uv_slot_of(group, r, op->boarded + 1) : NULL;
            if (r == group->rank || TSHI_UV_GET(&world->halted)) continue;
            if (slot && TSHI_UV_GET(&slot->number) == op->boarded + 1 && slot->seq == op->head.seq)
                tshi_uv_differ(link, op, slot->seq);
            else if (shown && r >= shown->seen && !tshi_uv_board_shows(shown, r))
                (void)tshi_uv_frame_instead(link, shown);
        }
    }
}
