/* ========================================================================== */
/* >>uv-advance                                  MARK: - uv-advance (private) */
/* Moves all bytes that can be moved now, on all connections of all groups.   */
/* Needs: >>uv-board.                                                         */
/* ========================================================================== */

/* Copies messages that this rank sends to itself from send to recv. Returns 1 if there were any. */
static int tshi_uv_meet(tshi_uv_link *link) {
    int moved = 0;
    for (; link->in.used && link->out.used; moved = 1) {
        tshi_uv_op *to = tshi_uv_first(link->group, &link->in);    /* the operation that receives */
        tshi_uv_op *from = tshi_uv_first(link->group, &link->out); /* the operation that sends */
        tshi_uv_head sent = tshi_uv_message_head(from, 0);
        tshi_uv_head wanted = tshi_uv_message_head(to, 1);
        if (!tshi_uv_fits(&sent, &wanted)) {
            tshi_uv_unfit(link, &sent, &wanted, link->peer, link->peer);
            return 0;
        }
        if (sent.bytes) memmove(to->coll.recv, from->coll.send, (size_t)sent.bytes);
        /* marks both frames as complete, the one sent and the one received */
        to->in[link->peer].head = from->out[link->peer].head = sizeof sent;
        tshi_uv_frame_done(to, &link->in);
        tshi_uv_frame_done(from, &link->out);
    }
    return moved;
}

/* Reads once from a connection, by its socket or in shared memory. Returns 2: more bytes may be
 * there; 1: no more for now; 0: no byte was read. */
static int tshi_uv_read_link(tshi_uv_link *link) {
    return link->pipe.out ? tshi_uv_shm_read(link) : tshi_uv_read_once(link);
}

/* Writes to a connection as much as it takes now. Returns 0 if that is nothing. */
static int tshi_uv_write_link(tshi_uv_link *link) {
    int moved = 0;
    while ((link->out.used || link->clears.used) && !(link->want & UV_WRITABLE) &&
           (link->pipe.out ? tshi_uv_shm_write(link) : tshi_uv_write_once(link)))
        moved = 1;
    return moved;
}

/* Moves all bytes that can be moved now on one connection: sends, as the peer may wait for that;
 * receives; and sends what the received bytes allow. Returns 0 if no byte was moved, or after an
 * error. */
static int tshi_uv_move_link(tshi_uv_link *link) {
    const int messages = tshi_uv_for_messages(link);
    int moved, got = 2, heard = 0;
    link->want = 0; /* libuv events to wait for, set below: none yet */
    if (!link->in.used && !link->out.used && !link->clears.used) return 0;
    /* messages from this rank to itself are copied, not sent */
    if (link->peer == link->group->rank) return tshi_uv_meet(link);
    moved = tshi_uv_write_link(link);
    if (TSHI_UV_GET(&link->group->world->halted)) return 0; /* an error was reported */
    /* A message to be sent needs its clear, which may arrive now. When none is left to be sent or
     * received, nothing is read: the peer may have closed, which is no error then. */
    for (; got == 2 && (link->in.used || (messages && link->out.used)); heard |= got)
        got = tshi_uv_read_link(link);
    if (!heard || TSHI_UV_GET(&link->group->world->halted)) return moved;
    if (link->pipe.out) link->want &= ~UV_WRITABLE; /* there may be more that is ready to be sent */
    return 1 | tshi_uv_write_link(link);
}

/* Sends and receives all bytes that can be moved now, in all groups. Returns 0 if none were. */
static int tshi_uv_advance(tsh_uv_world *world) {
    int moved = 0;
    for (tshi_uv_group *group = world->groups; group; group = group->next) {
        /* connections are skipped if no operation in flight needs one */
        const int links = group->active > (int)group->board.used ? 2 * group->size : 0;
        if (group->board.used) moved |= tshi_uv_board_move(group);
        for (int i = 0; i < links; i++) {
            if (TSHI_UV_GET(&world->halted)) return 0;               /* an error was reported */
            moved |= tshi_uv_move_link(&group->link[i]);
        }
    }
    return moved;
}
