/* ========================================================================== */
/* >>uv-start                                      MARK: - uv-start (private) */
/* Starting a collective: chooses its algorithm, queues its frames on the     */
/* data connections, and sends what the sockets take at once.                 */
/* Needs: >>uv-advance.                                                       */
/* ========================================================================== */

/* Limits in bytes. Up to DIRECT_MOST (see `sent` in tshi_uv_choose_algorithm), ranks send directly
 * to each other; up to STAR_MOST, a root sends its data directly to all ranks. That takes fewer
 * steps than a ring or a chain. */
enum {
    TSHI_UV_DIRECT_MOST = 96 << 10,
    TSHI_UV_SHM_DIRECT_MOST = 8 << 10, /* DIRECT_MOST where all ranks share memory */
    TSHI_UV_STAR_MOST = 32 << 10
};

/* Appends a frame of op with `total` bytes of payload to a queue; s will record its progress. */
static void tshi_uv_queue(tshi_uv_op *op, tshi_uv_fifo *fifo, tshi_uv_stream *s, int64_t total) {
    memset(s, 0, sizeof *s);
    s->total = total;
    op->pending++; /* op is complete when this is 0 again */
    tshi_uv_push(fifo, op);
}

/* Queues the receipt of `total` bytes from a peer (a rank of the group). */
static void tshi_uv_expect(tshi_uv_op *op, int peer, int64_t total) {
    tshi_uv_link *link = tshi_uv_link_to(op->group, peer, op->algorithm == TSHI_UV_MESSAGE);
    tshi_uv_queue(op, &link->in, &op->in[peer], total);
}

/* Queues the sending of `total` bytes to a peer (a rank of the group). */
static void tshi_uv_promise(tshi_uv_op *op, int peer, int64_t total) {
    tshi_uv_link *link = tshi_uv_link_to(op->group, peer, op->algorithm == TSHI_UV_MESSAGE);
    tshi_uv_queue(op, &link->out, &op->out[peer], total);
}

/* Returns the algorithm for op. It depends only on what is the same on all ranks (kind, sizes,
 * dtype, reduction, whether all share memory), so that all choose the same. */
static tshi_uv_algorithm tshi_uv_choose_algorithm(const tshi_uv_op *op) {
    const tsh_coll *coll = &op->coll;
    const int size = op->group->size, whole = op->group->whole && size > 1;
    const int64_t slot = op->group->slot - (int64_t)sizeof(tshi_uv_slot); /* its room for data */
    /* all: bytes of the whole buffer; most: of the largest part that one rank has; sent: about how
     * many bytes one rank would send directly */
    int64_t all = 0, most = 0, sent;
    switch (coll->kind) {
    case TSH_ALLREDUCE:
    case TSH_ALLGATHER:
    case TSH_REDUCE_SCATTER:
        if (coll->kind == TSH_ALLREDUCE)
            all = coll->count * op->width;
        else
            for (int k = 0; k < size; k++) {
                const int64_t part = tshi_uv_length(op, k);
                all += part;
                most = part > most ? part : most;
            }
        if (whole && (coll->kind == TSH_ALLGATHER ? most : all) <= slot) return TSHI_UV_BOARD;
        sent = coll->kind == TSH_ALLREDUCE ? all * (size - 1) : all;
        if (size == 1 || sent <= (whole ? TSHI_UV_SHM_DIRECT_MOST : TSHI_UV_DIRECT_MOST))
            return TSHI_UV_DIRECT;
        /* in shared memory it costs nothing more to reach all ranks than the next one */
        if (whole) return coll->kind == TSH_ALLGATHER ? TSHI_UV_DIRECT : TSHI_UV_PIECES;
        if (coll->kind != TSH_ALLGATHER && tshb_coll_rounds(coll->dtype, coll->redop))
            return TSHI_UV_PIECES; /* a ring would round the sum at every rank */
        return TSHI_UV_RING;
    case TSH_BROADCAST:
        return coll->count * op->width <= TSHI_UV_STAR_MOST ? TSHI_UV_STAR : TSHI_UV_CHAIN;
    case TSH_SEND:
    case TSH_RECV:
    case TSH_SENDRECV: return TSHI_UV_MESSAGE;
    case TSH_BARRIER: return whole ? TSHI_UV_BOARD : TSHI_UV_DIRECT;
    default: return TSHI_UV_DIRECT; /* all-to-all, split */
    }
}

/* Copies this rank's own part of an all-gather or all-to-all from send to recv. (In a ring
 * tshi_uv_payload_went does.) */
static void tshi_uv_copy_own(const tshi_uv_op *op) {
    const tsh_coll *coll = &op->coll;
    const int rank = op->group->rank;
    if (op->algorithm != TSHI_UV_DIRECT && op->algorithm != TSHI_UV_BOARD) return;
    if (coll->kind == TSH_ALLGATHER ||
        (coll->kind == TSH_ALLTOALL && coll->send_counts[rank] == coll->recv_counts[rank]))
        tshi_uv_own_piece(op, 0, tshi_uv_direct_size(op, rank, rank));
}

static void tshi_uv_plan_direct(tshi_uv_op *op) { /* Queues frames to and from every peer. */
    const tsh_coll *coll = &op->coll;
    const int rank = op->group->rank, size = op->group->size;
    if (coll->kind == TSH_ALLTOALL && coll->send_counts[rank] != coll->recv_counts[rank])
        tshi_uv_report_error(
            op->group->world, TSHI_UV_MISMATCH, op->group->id, op->head.seq, TSH_ERR_MISMATCH,
            op->group->world->rank,
            "rank %d called all-to-all with send_counts[%d] = %lld and recv_counts[%d] = %lld",
            op->group->world->rank, rank, (long long)coll->send_counts[rank], rank,
            (long long)coll->recv_counts[rank]);
    for (int j = 1; j < size; j++) {
        /* starts with the next rank, so that not all start with rank 0 */
        int to = (rank + j) % size;
        tshi_uv_promise(op, to, tshi_uv_direct_size(op, rank, to));
        tshi_uv_expect(op, to, tshi_uv_direct_size(op, to, rank));
    }
}

/* Queues the one frame that a ring sends to a peer (out = 1), or receives from it (out = 0). */
static void tshi_uv_plan_lane(tshi_uv_op *op, int peer, int out) {
    const tshi_uv_lane lane = tshi_uv_lane_of(op, peer, out);
    (out ? tshi_uv_promise : tshi_uv_expect)(op, peer, tshi_uv_lane_total(op, &lane));
}

/* Queues the frames of a ring: one to the next rank, one from the previous rank, and one from the
 * last rank of a host to its first. */
static void tshi_uv_plan_ring(tshi_uv_op *op) {
    const tshi_uv_group *group = op->group;
    const int rank = group->rank, first = group->first[rank], last = group->last[rank];
    tshi_uv_plan_lane(op, tshi_uv_next(group), 1);
    tshi_uv_plan_lane(op, tshi_uv_prev(group), 0);
    if (!tshi_uv_closes(op)) return;
    if (rank == last) tshi_uv_plan_lane(op, first, 1);
    if (rank == first) tshi_uv_plan_lane(op, last, 0);
}

/* Queues the frames of a broadcast. Where no payload goes to the next rank, an empty frame does, so
 * that every rank's header is checked. */
static void tshi_uv_plan_broadcast(tshi_uv_op *op) {
    const tshi_uv_group *group = op->group;
    int next = tshi_uv_next(group), prev = tshi_uv_prev(group), root = op->coll.root;
    int64_t bytes = op->coll.count * op->width;
    int star = op->algorithm == TSHI_UV_STAR, is_root = group->rank == root;
    if (group->size == 1) return;
    if (star && is_root) /* root sends to every rank */
        for (int j = 1; j < group->size; j++) tshi_uv_promise(op, (root + j) % group->size, bytes);
    else
        /* the frame is empty in a star, and at the end of a chain, where the next rank is root */
        tshi_uv_promise(op, next, star || next == root ? 0 : bytes);
    /* expects an empty frame from the previous rank */
    if (is_root || (star && prev != root)) tshi_uv_expect(op, prev, 0);
    if (!is_root) tshi_uv_expect(op, star ? root : prev, bytes); /* the frame with the payload */
}

static void tshi_uv_plan_board(tshi_uv_op *op) { /* Shows op to the others, if it is its turn. */
    op->seen = 0;
    op->pending = 1;
    tshi_uv_push(&op->group->board, op);
    tshi_uv_board_show_all(op->group);
}

static void tshi_uv_plan_message(tshi_uv_op *op) { /* Queues a SEND, RECV or SENDRECV. */
    const tsh_coll *coll = &op->coll;
    if (coll->kind != TSH_SEND) {
        tshi_uv_link *link = tshi_uv_link_to(op->group, coll->recv_from, 1);
        op->number[1] = link->receives++; /* the message's number among those from this peer */
        tshi_uv_expect(op, coll->recv_from, tshb_coll_half(coll, 1).count * op->width);
        if (link->peer != op->group->rank) tshi_uv_queue(op, &link->clears, &op->clear, 0);
    }
    if (coll->kind != TSH_RECV) {
        op->number[0] = tshi_uv_link_to(op->group, coll->send_to, 1)->sends++;
        tshi_uv_promise(op, coll->send_to, tshb_coll_half(coll, 0).count * op->width);
    }
}

/* Records the call, under the lock, so that this rank can answer when the coordinator asks for it
 * (ASK). */
static void tshi_uv_remember(const tshi_uv_op *op) {
    tshi_uv_group *group = op->group;
    tshi_uv_record *record = &group->record[op->head.seq % TSHI_UV_RECORDS];
    const tsh_coll *coll = &op->coll;
    int counts = coll->recv_counts ? (int)tshi_uv_min(group->size, TSHI_UV_COUNTS) : 0;
    uv_mutex_lock(&group->world->lock);
    record->coll = *coll;
    record->digest = op->head.digest;
    record->counts = counts; /* number of send_counts, and of recv_counts, recorded below */
    for (int r = 0; r < counts; r++) {
        record->send_counts[r] = coll->send_counts ? coll->send_counts[r] : 0;
        record->recv_counts[r] = coll->recv_counts[r];
    }
    group->started = op->head.seq + 1; /* number of collectives that were started */
    group->world->last = group->id;    /* group of the latest collective */
    uv_mutex_unlock(&group->world->lock);
}

/* Returns the size in bytes of the scratch buffer that op needs; only reductions need one. */
static size_t tshi_uv_scratch(const tshi_uv_op *op) {
    const tshi_uv_group *group = op->group;
    if (!tshi_uv_sums(op) || group->size == 1 || op->algorithm == TSHI_UV_BOARD ||
        tshi_uv_summed_in_place(op))
        return 0;
    /* a ring needs the window, a circular buffer for received bytes */
    if (op->algorithm == TSHI_UV_RING) return TSHI_UV_WINDOW;
    return (size_t)(tshi_uv_row_size(op) * group->size);
}

/* Reports that there is no memory for a collective; returns the world's error. */
static tsh_result tshi_uv_no_scratch(const tshi_uv_group *group, const tsh_coll *coll) {
    char text[200] = "start ", name[TSHI_UV_NAME]; /* text: the end of "rank 1 cannot start ..." */
    size_t used = strlen(text);
    (void)tshb_coll_text(coll, NULL, group->size, text + used, sizeof text - used);
    tsh_text_add(text, sizeof text, " of %s", tshb_group_text(group->id, name, sizeof name));
    return tshi_uv_cannot(group->world, TSH_ERR_MEMORY, text, "no memory");
}

/* Starts coll in a free slot of group->op: queues its frames and writes as much as the sockets take
 * now. *out: the operation. Returns TSH_ERR_STATE if no slot is free. */
static tsh_result tshi_uv_launch(tshi_uv_group *group, const tsh_coll *coll, tshi_uv_op **out) {
    tshi_uv_op *op = group->op;
    size_t need;
    while (op < group->op + TSHI_UV_OPS && op->used) op++; /* the first free slot */
    if (op == group->op + TSHI_UV_OPS) return TSH_ERR_STATE;
    *out = op;
    op->coll = *coll;
    op->width = (int64_t)tsh_dtype_size(coll->dtype);
    op->pending = 0;
    op->ready = 0;
    op->algorithm = tshi_uv_choose_algorithm(op);
    need = tshi_uv_scratch(op);
    if (need > op->scratch_size) {
        free(op->scratch);
        op->scratch = (char *)malloc(need);
        op->scratch_size = op->scratch ? need : 0; /* the slot's later operations reuse scratch */
        if (!op->scratch) return tshi_uv_no_scratch(group, coll);
    }
    op->used = 1;
    group->active++;
    op->boarded = group->boarded += op->algorithm == TSHI_UV_BOARD;
    if (op->algorithm == TSHI_UV_MESSAGE) {
        tshi_uv_plan_message(op);
    } else {
        memset(&op->head, 0, sizeof op->head);
        op->head.group = group->id;
        op->head.seq = group->started; /* the collective's number in the group */
        /* digest: a hash of the call, which peers compare with that of their own call */
        op->head.digest = tshb_coll_digest(coll, group->size);
        op->head.count = coll->count;
        op->head.kind = (uint8_t)coll->kind;
        /* before the call is recorded: the others wait for it. If one of them then reports that the
         * calls differ, the coordinator asks again until it is */
        if (op->algorithm == TSHI_UV_BOARD) tshi_uv_plan_board(op);
        tshi_uv_remember(op);
        op->pending++; /* so that op is not complete before all frames are queued */
        if (op->algorithm == TSHI_UV_DIRECT || op->algorithm == TSHI_UV_PIECES)
            tshi_uv_plan_direct(op);
        if (op->algorithm == TSHI_UV_RING) tshi_uv_plan_ring(op);
        if (op->algorithm == TSHI_UV_STAR || op->algorithm == TSHI_UV_CHAIN)
            tshi_uv_plan_broadcast(op);
        /* a group of one rank has no frames: compute the sum now */
        if (--op->pending == 0 && tshi_uv_sums(op)) tshi_uv_direct_sums(op);
    }
    /* deadline: a point in time, in ns */
    op->deadline = tshb_deadline(coll->timeout_ns, group->world->timeout);
    (void)tshi_uv_advance(group->world); /* starts sending */
    tshi_uv_copy_own(op);
    return TSH_OK;
}
