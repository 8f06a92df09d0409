/* ========================================================================== */
/* >>coll-wait                                    MARK: - coll-wait (private) */
/* Reports of ranks that wait: who is missing, who waits for whom.            */
/* Needs: >>coll-agree.                                                       */
/* ========================================================================== */

/* Returns the marks (what the rank has started), which follow a report in memory. */
static const tsh_wait_mark *tshi_coll_marks(const tsh_wait_report *report) {
    return (const tsh_wait_mark *)(const void *)(report + 1);
}

/* Returns the ranks that the reporting rank waits for; they follow the marks in memory. */
static const int *tshi_coll_awaited(const tsh_wait_report *report) {
    return (const int *)(const void *)(tshi_coll_marks(report) + report->marks);
}

/* Returns the mark of the rank's collectives in a group (peer -1), or of its messages with `peer`.
 * NULL: it is not in the group (any more), or has exchanged no message with the peer. */
static const tsh_wait_mark *tshi_coll_mark(const tsh_wait_report *report, uint64_t group,
                                           int peer) {
    const tsh_wait_mark *mark = tshi_coll_marks(report);
    for (int i = 0; i < report->marks; i++, mark++)
        if (mark->group == group && mark->peer == peer) return mark;
    return NULL;
}

TSH_API int tsh_wait_missing(tsh_wait_report *const *report, int r, int m) {
    const tsh_wait_report *a = report[r], *b = report[m];
    const tsh_wait_mark *here, *pair; /* what m has started: in r's group; messages with r */
    if (!a || !b) return 0;           /* r or m is not known to wait */
    here = tshi_coll_mark(b, a->group, -1);
    if (!here) return 0;                            /* m is not in the group */
    if (!a->pairwise) return here->sends <= a->seq; /* 1: m has not started the collective */
    pair = tshi_coll_mark(b, a->group, r); /* below, 1: m has not started the RECV or the SEND */
    return (a->send_to == m && (pair ? pair->recvs : 0) <= a->send_number) ||
           (a->recv_from == m && (pair ? pair->sends : 0) <= a->recv_number);
}

/* The reports of all ranks, for the two callbacks below. */
typedef struct tshi_coll_reports {
    tsh_wait_report *const *report; /* one per rank; NULL: the rank is not known to wait */
    int size;                       /* number of ranks */
} tshi_coll_reports;

/* For tsh_coll_cycle: returns the i-th rank that r waits for; -1 if there is none, or if that rank
 * has done its part already. */
static int tshi_coll_awaits(const void *user, int r, int i) {
    tsh_wait_report *const *report = ((const tshi_coll_reports *)user)->report;
    int m = report[r] && i < report[r]->awaited ? tshi_coll_awaited(report[r])[i] : -1;
    return m >= 0 && tsh_wait_missing(report, r, m) ? m : -1;
}

/* For tsh_coll_blame: returns how many ranks wait in the same call as r. */
static int tshi_coll_together(const void *user, int r) {
    const tshi_coll_reports *all = (const tshi_coll_reports *)user;
    const tsh_wait_report *a = all->report[r];
    int count = 0;
    for (int m = 0; m < all->size; m++) {
        const tsh_wait_report *b = all->report[m];
        count += b && b->group == a->group && b->pairwise == a->pairwise && b->seq == a->seq;
    }
    return count;
}

TSH_API int tsh_wait_cycle(tsh_wait_report *const *report, int size, int r, tsh_coll_search *search,
                           tsh_error *error) {
    tshi_coll_reports all = {report, size};
    int blamed, waits;
    memset(search, 0, (size_t)size * sizeof *search);
    r = tsh_coll_cycle(search, size, r, tshi_coll_awaits, &all);
    if (r < 0) return 0; /* r waits in no cycle */
    blamed = tsh_coll_blame(search, r, tshi_coll_together, &all, &waits);
    tsh_cycle_error(blamed, report[blamed]->text, waits, report[waits]->text, error);
    return 1;
}

TSH_API void tsh_wait_absent(tsh_wait_report *const *report, int r, tsh_error *error) {
    int absent = 0;
    tsh_text_add(error->message, sizeof error->message, "; absent ranks:");
    for (int i = 0; report[r] && i < report[r]->awaited; i++) {
        int m = tshi_coll_awaited(report[r])[i];
        if (m == r || (report[m] && !tsh_wait_missing(report, r, m))) continue;
        if (!absent++) error->rank = m; /* the first absent rank is blamed */
        tsh_text_add(error->message, sizeof error->message, " %d", m);
    }
    if (!absent) tsh_text_add(error->message, sizeof error->message, " none");
}
