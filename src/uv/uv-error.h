/* ========================================================================== */
/* >>uv-error                                      MARK: - uv-error (private) */
/* The world's error is the first one that is set, and does not change.       */
/* The caller's thread reports errors to the control thread.                  */
/* The control thread decides (>>uv-decide) and sets the error, locked.       */
/* Messages in the log that other hosts can cause are limited, at the end.    */
/* Needs: >>uv-types.                                                         */
/* ========================================================================== */

/* Returns the code of the world's error, TSH_OK if it has none. Any thread may call this. */
static tsh_result tshi_uv_failed(const tsh_uv_world *world) {
    return (tsh_result)TSHI_UV_GET(&world->failed);
}

/* Sets the world's error, unless it has one already, and wakes the caller's thread. */
static void tshi_uv_fail(tsh_uv_world *world, const tsh_error *error) {
    uv_mutex_lock(&world->lock);
    if (tshi_uv_failed(world) == TSH_OK) {
        world->error = *error;
        TSHI_UV_PUT(&world->halted, 1); /* the caller's thread moves no more data */
        TSHI_UV_PUT(&world->failed, (int)error->code);
    }
    uv_cond_broadcast(&world->changed);
    uv_mutex_unlock(&world->lock);
    (void)uv_async_send(&world->wake_caller);
}

TSH_PRINTF(5, 0)
static void tshi_uv_fill_report(tshi_uv_report *e, tshi_uv_error_kind kind, tsh_result code,
                                int rank, const char *format, va_list list) {
    memset(e, 0, sizeof *e);
    e->kind = kind;
    e->error.code = code;
    e->error.rank = rank;
    tsh_text_format(e->error.message, sizeof e->error.message, format, list);
}

/* Hands an error report of the caller's thread to the control thread, unless an earlier one is
 * pending there, and stops moving data. group, seq: id of the group and number of the collective in
 * question; group 0: none. */
TSH_PRINTF(7, 8)
static void tshi_uv_report_error(tsh_uv_world *world, tshi_uv_error_kind kind, uint64_t group,
                                 uint64_t seq, tsh_result code, int rank, const char *format, ...) {
    tshi_uv_report e;
    va_list list;
    va_start(list, format);
    tshi_uv_fill_report(&e, kind, code, rank, format, list);
    va_end(list);
    e.group = group;
    e.seq = seq;
    uv_mutex_lock(&world->lock);
    if (world->reported.kind == TSHI_UV_NOTHING) world->reported = e;
    TSHI_UV_PUT(&world->halted, 1);
    uv_mutex_unlock(&world->lock);
    (void)uv_async_send(&world->wake_control);
}

/* Reports "rank 1 cannot `what`: `why`" while other ranks wait for this one. Waits until the
 * world's error is decided and returns its code, so that tsh_comm_error has a sentence when the
 * failed call returns. */
static tsh_result tshi_uv_cannot(tsh_uv_world *world, tsh_result code, const char *what,
                                 const char *why) {
    tshi_uv_report_error(world, TSHI_UV_ABORT, 0, 0, code, world->rank, "rank %d cannot %s: %s",
                         world->rank, what, why);
    uv_mutex_lock(&world->lock);
    while (tshi_uv_failed(world) == TSH_OK) uv_cond_wait(&world->changed, &world->lock);
    uv_mutex_unlock(&world->lock);
    return tshi_uv_failed(world);
}

/* Format of the error for a wrong checksum or tag. Arguments: "data" or "control"; this rank and
 * its host:port; the peer and its host:port; TSHI_UV_CHECK_OF; what was damaged; "" or " of
 * all-reduce ...". */
#define TSHI_UV_DAMAGED_TEXT                                                                       \
    "the %s connection of rank %d (%s) and rank %d (%s) changes bytes: the %s of %s%s is wrong; "  \
    "is a network card, cable or switch between them faulty?"
/* What reveals damaged bytes on a connection: the tag if it is encrypted, else (channel NULL) the
 * checksum. */
#define TSHI_UV_CHECK_OF(channel) ((channel) ? "tag" : "checksum")

/* Returns the open group with this id; NULL: there is none. The caller must hold the lock. */
static tshi_uv_group *tshi_uv_find_group(const tsh_uv_world *world, uint64_t id) {
    tshi_uv_group *group = world->groups;
    while (group && group->id != id) group = group->next;
    return group;
}

/* Converts a world rank to a rank of the group; -1: it is not a member. */
static int tshi_uv_member(const tshi_uv_group *group, int world_rank) {
    for (int r = 0; r < group->size; r++)
        if (group->ranks[r] == world_rank) return r;
    return -1;
}

/* Logs one line for each kind of message that was counted but not logged, unless one of that kind
 * was logged less than a second ago. now INT64_MAX: logs them in any case. */
static void tshi_uv_log_counted(tsh_uv_world *world, int64_t now) {
    for (int i = 0; i < TSHI_UV_TALLIES; i++) {
        tshi_uv_log_count *t = &world->tally[i];
        if (!t->count || (t->told && now - t->told < TSHI_UV_SECOND)) continue;
        if (t->count == 1)
            tsh_log_message(&world->logger, "%s", t->last);
        else
            tsh_log_message(&world->logger, "%s (the last of %d since the message before)", t->last,
                            t->count);
        t->count = 0;
        t->told = tsh_now();
    }
}

/* Logs a message that other hosts can cause as often as they like. Of each kind, at most one a
 * second is logged; the others are only counted. */
TSH_PRINTF(3, 4)
static void tshi_uv_note(tsh_uv_world *world, int kind, const char *format, ...) {
    tshi_uv_log_count *t = &world->tally[kind];
    va_list list;
    va_start(list, format);
    tsh_text_format(t->last, sizeof t->last, format, list);
    va_end(list);
    t->count++;
    tshi_uv_log_counted(world, tsh_now());
}
