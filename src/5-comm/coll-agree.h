/* ========================================================================== */
/* >>coll-agree                                  MARK: - coll-agree (private) */
/* Comparing the calls of all ranks; ranks that wait in a cycle; whom to      */
/* blame.                                                                     */
/* Needs: >>error >>coll.                                                     */
/* ========================================================================== */

/* What the ranks of a group have called, for the functions below. */
typedef struct tshi_coll_calls {
    int (*call)(const void *user, int r, tsh_call *out); /* returns 0 if rank r has made no call */
    const void *user;                                    /* first argument of call */
    int size;                                            /* number of ranks */
} tshi_coll_calls;

/* Returns how many ranks have made the same call as rank r, r included; 0 if r has made none. */
static int tshi_coll_agree(const tshi_coll_calls *all, int r) {
    tsh_call mine, its;
    int count = 0;
    if (!all->call(all->user, r, &mine)) return 0;
    for (int m = 0; m < all->size; m++)
        count += all->call(all->user, m, &its) && its.digest == mine.digest;
    return count;
}

/* Returns 1 if ranks `from` and `to` disagree on how many elements `from` sends to `to` in an
 * all-to-all. A count that is not known does not disagree. */
static int tshi_coll_unequal(const tshi_coll_calls *all, int from, int to) {
    tsh_call a, b;
    return all->call(all->user, from, &a) && all->call(all->user, to, &b) && to < a.counts &&
           from < b.counts && a.coll.send_counts[to] != b.coll.recv_counts[from];
}

/* Compares the counts of an all-to-all, pair by pair. If some differ, fills error, which blames the
 * rank with the most differences (of several the lowest, rank 0 last), and returns 1. */
static int tshi_coll_alltoall(const tshi_coll_calls *all, uint64_t seq, uint64_t group,
                              tsh_error *error) {
    char name[TSHI_COLL_NAME];
    int blamed = -1, max = 0, m = 0, sends; /* m: a rank that disagrees with the one blamed */
    const int64_t *mine, *theirs;
    tsh_call a, b;
    for (int r = all->size - 1; r >= 0; r--) {
        int wrong = 0;                      /* counts on which r and the others disagree */
        for (int i = 0; i < all->size; i++) /* adds what r sends to i, and i to r */
            wrong += tshi_coll_unequal(all, r, i) + tshi_coll_unequal(all, i, r);
        if (!wrong || wrong < max || (wrong == max && r == 0)) continue;
        blamed = r;
        max = wrong;
    }
    if (blamed < 0) return 0; /* all counts agree */
    while (!tshi_coll_unequal(all, blamed, m) && !tshi_coll_unequal(all, m, blamed)) m++;
    sends = tshi_coll_unequal(all, blamed, m); /* 1: what `blamed` sends, 0: receives */
    (void)all->call(all->user, blamed, &a);
    (void)all->call(all->user, m, &b);
    mine = sends ? a.coll.send_counts : a.coll.recv_counts;
    theirs = sends ? b.coll.recv_counts : b.coll.send_counts;
    (void)tsh_error_set(
        error, TSH_ERR_MISMATCH, a.rank,
        "rank %d called all-to-all with %s_counts[%d] = %lld where rank %d has %s_counts[%d] = "
        "%lld (collective %llu of %s)",
        a.rank, sends ? "send" : "recv", m, (long long)mine[m], b.rank, sends ? "recv" : "send",
        blamed, (long long)theirs[blamed], (unsigned long long)seq,
        tsh_group_text(group, name, sizeof name));
    return 1;
}

/* If some ranks have closed the group (TSH_COLL_KINDS) while others make a call in it, fills error,
 * which names the lowest rank of both, and returns 1. */
static int tshi_coll_left(const tshi_coll_calls *all, uint64_t seq, uint64_t group,
                          tsh_error *error) {
    char text[TSHI_COLL_TEXT] = "";
    tsh_call call, lowest[2]; /* [0]: of the ranks that wait, [1]: that closed */
    int found[2] = {0, 0};    /* 1: there is such a rank */
    memset(lowest, 0, sizeof lowest);
    for (int r = all->size - 1; r >= 0; r--) {
        int closed;
        if (!all->call(all->user, r, &call)) continue;
        closed = call.coll.kind == TSH_COLL_KINDS;
        found[closed] = 1;
        lowest[closed] = call;
    }
    if (!found[0] || !found[1]) return 0;
    tsh_coll_where(&lowest[0].coll, all->size, seq, group, text, sizeof text);
    (void)tsh_error_set(error, TSH_ERR_LOST, lowest[1].rank,
                        "rank %d left while rank %d waits for it in %s", lowest[1].rank,
                        lowest[0].rank, text);
    return 1;
}

/* Fills error, which blames rank_a: "rank 1 called A where rank 0 called B (collective 3 of tp)".
 * known: how many counts of both calls are known. unit, number: "collective", 3. */
static void tshi_coll_mismatch(const tsh_coll *a, const tsh_coll *b, int known, int rank_a,
                               int rank_b, const char *unit, uint64_t number, uint64_t group,
                               tsh_error *error) {
    char texts[2][TSHI_COLL_TEXT], name[TSHI_COLL_NAME];
    (void)tsh_coll_text(a, b, known, texts[0], sizeof texts[0]);
    (void)tsh_coll_text(b, a, known, texts[1], sizeof texts[1]);
    (void)tsh_error_set(error, TSH_ERR_MISMATCH, rank_a,
                        "rank %d called %s where rank %d called %s (%s %llu of %s)", rank_a,
                        texts[0], rank_b, texts[1], unit, (unsigned long long)number,
                        tsh_group_text(group, name, sizeof name));
}

TSH_API int tsh_call_mismatch(int (*call)(const void *user, int r, tsh_call *out), const void *user,
                              int size, uint64_t seq, uint64_t group, tsh_error *error) {
    tshi_coll_calls all = {call, user, size};
    tsh_call a, b;
    int right = 0, r; /* right: a rank whose call the most ranks have made */
    if (tshi_coll_left(&all, seq, group, error)) return 1;
    for (r = 1; r < size; r++)
        if (tshi_coll_agree(&all, r) > tshi_coll_agree(&all, right)) right = r;
    if (!call(user, right, &b)) return 0; /* no rank has made a call */
    for (r = 0; r < size; r++)
        if (call(user, r, &a) && a.digest != b.digest) break; /* the lowest rank that differs */
    if (r == size)                                            /* all calls are the same */
        return b.coll.kind == TSH_ALLTOALL ? tshi_coll_alltoall(&all, seq, group, error) : 0;
    tshi_coll_mismatch(&a.coll, &b.coll, a.counts < b.counts ? a.counts : b.counts, a.rank, b.rank,
                       "collective", seq, group, error);
    return 1;
}

TSH_API int tsh_blamed(int a, int b) {
    int low = a < b ? a : b;
    return low == 0 ? a + b : low; /* a + b: the one that is not 0 */
}

TSH_API void tsh_message_mismatch(const tsh_coll *sent, const tsh_coll *wanted, int from, int to,
                                  uint64_t number, uint64_t group, tsh_error *error) {
    tshi_coll_mismatch(sent, wanted, 0, from, to, "message", number, group, error);
    error->rank = tsh_blamed(from, to);
}

/* Returns rank r's ticket; tickets lie `stride` bytes apart, perhaps inside larger structs. */
static tsh_ticket tshi_coll_ticket(const void *tickets, size_t stride, int r) {
    tsh_ticket ticket;
    memcpy(&ticket, (const char *)tickets + (size_t)r * stride, sizeof ticket);
    return ticket;
}

TSH_API int tsh_split_order(const void *tickets, size_t stride, int size, int color, int *order) {
    int n = 0;
    for (int r = 0; r < size; r++) {
        tsh_ticket mine = tshi_coll_ticket(tickets, stride, r);
        int at = n; /* insertion sort by key; stable, so equal keys stay in the order of ranks */
        if (mine.color != color) continue; /* rank r is not in the group */
        for (; at > 0 && tshi_coll_ticket(tickets, stride, order[at - 1]).key > mine.key; at--)
            order[at] = order[at - 1];
        order[at] = r;
        n++;
    }
    return n;
}

/* ---- ranks that wait for each other ---- */

TSH_API int tsh_coll_cycle(tsh_coll_search *search, int size, int r,
                           int (*awaits)(const void *user, int r, int i), const void *user) {
    if (search[r].seen) return -1; /* r has been searched before */
    search[r].from = -1;           /* where the search begins */
    while (r >= 0) {
        int m = -1;
        search[r].seen = 1; /* 1: on the path from the first rank to r */
        while (search[r].edge < size && (m < 0 || search[m].seen == 2))
            m = awaits(user, r, search[r].edge++); /* skips ranks that lead to no cycle */
        if (m >= 0 && search[m].seen == 2) m = -1;
        search[r].next = m;
        if (m < 0) { /* r leads to no cycle: back to the rank before it */
            search[r].seen = 2;
            r = search[r].from;
        } else if (search[m].seen) { /* m is on the path already: a cycle */
            return m;
        } else { /* m is new: follow it */
            search[m].from = r;
            r = m;
        }
    }
    return -1;
}

TSH_API int tsh_coll_blame(const tsh_coll_search *search, int r,
                           int (*together)(const void *user, int r), const void *user, int *waits) {
    int blamed = r, at = r; /* at: each rank of the cycle in turn */
    do {
        int more = together(user, blamed) - together(user, at); /* > 0: fewer are in at's call */
        if (more > 0 || (more == 0 && (blamed == 0 || (at < blamed && at > 0)))) blamed = at;
        at = search[at].next;
    } while (at != r);
    while (search[at].next != blamed) at = search[at].next; /* the rank that waits for `blamed` */
    *waits = at;
    return blamed;
}

TSH_API void tsh_cycle_error(int blamed, const char *in, int waits, const char *other,
                             tsh_error *error) {
    if (blamed == waits)
        (void)tsh_error_set(error, TSH_ERR_MISMATCH, blamed,
                            "rank %d waits for itself in %s: a rank that sends to itself receives "
                            "in the same call, tsh_sendrecv",
                            blamed, in);
    else
        (void)tsh_error_set(error, TSH_ERR_MISMATCH, blamed,
                            "rank %d waits in %s while rank %d waits for it in %s", blamed, in,
                            waits, other);
}
