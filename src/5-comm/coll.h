/* ========================================================================== */
/* >>coll                                              MARK: - coll (private) */
/* The arithmetic of sums, and collectives as text.                           */
/* Needs: >>text >>dtype.                                                     */
/* ========================================================================== */

/* Nothing here sends, waits or allocates: a backend passes in what its ranks have called, through a
 * callback such as call(user, r, &out), and gets back a number or a tsh_error to raise. So threads,
 * sockets and MPI report the same mistake in the same sentence. A new kind of collective needs its
 * name in tshi_coll_kinds, and its arguments in tsh_coll_digest and tsh_coll_text. */

static const char *const tshi_coll_kinds[TSH_COLL_KINDS] = {
    "all-reduce", "all-gather", "reduce-scatter", "broadcast", "all-to-all",
    "send",       "receive",    "send-receive",   "barrier",   "split"};

enum { TSHI_COLL_TEXT = 256 }; /* bytes of a call's description */
enum { TSHI_COLL_NAME = 32 };  /* bytes of a group's name: "group ", 20 digits, a final 0 */
enum { TSHI_COLL_AXIS = 56 };  /* a group's id, from this bit on: 't', 'd', 'p' or 0 */

/* Returns 1 for kinds between two ranks; these are numbered per pair of ranks, not per group. */
static int tshi_coll_pairwise(tsh_coll_kind kind) {
    return kind == TSH_SEND || kind == TSH_RECV || kind == TSH_SENDRECV;
}

/* Returns 1 for kinds that have one count per rank, repeated for each of `blocks` blocks. */
static int tshi_coll_rows(tsh_coll_kind kind) {
    return kind == TSH_ALLGATHER || kind == TSH_REDUCE_SCATTER || kind == TSH_ALLTOALL;
}

TSH_API tsh_comm tsh_comm_make(const tsh_comm_ops *ops, void *impl, int rank, int size,
                               uint64_t id) {
    tsh_comm comm;
    memset(&comm, 0, sizeof comm);
    comm.ops = ops;
    comm.impl = impl;
    comm.rank = rank;
    comm.size = size;
    comm.id = id;
    return comm;
}

/* tsh_coll_sum of a dtype that the sums of tsh_coll_fold would be rounded to: in tsh_real, run by
 * run, rounded once. */
static void tshi_coll_sum_wide(void *out, int64_t n, const tsh_coll *coll, int size, int k,
                               const void *(*part)(const void *user, int r), const void *user) {
    const tshi_dtype *row = &tshi_dtypes[coll->dtype];
    tsh_real sum[TSHI_DTYPE_RUN], next[TSHI_DTYPE_RUN];
    int64_t m; /* elements of this run */
    for (int64_t e = 0; e < n; e += m) {
        m = tshi_base_min(TSHI_DTYPE_RUN, n - e);
        row->load((const char *)part(user, (k + 1) % size) + e * row->size, 1, m, sum);
        for (int j = 2; j <= size; j++) {
            row->load((const char *)part(user, (k + j) % size) + e * row->size, 1, m, next);
            tshi_dtypes[TSH_REAL].fold[coll->redop](sum, sum, next, m);
        }
        tsh_coll_finish(sum, m, TSH_REAL, coll->redop, size);
        row->store((char *)out + e * row->size, 1, m, sum);
    }
}

TSH_API void tsh_coll_sum(void *out, int64_t n, const tsh_coll *coll, int size, int k,
                          const void *(*part)(const void *user, int r), const void *user) {
    const void *left = part(user, (k + 1) % size); /* x[k+1] (rule 5), then the sum so far */
    if (tsh_coll_rounds(coll->dtype, coll->redop)) {
        tshi_coll_sum_wide(out, n, coll, size, k, part, user);
        return;
    }
    for (int j = 2; j <= size; j++) {              /* left to right, in the order of a ring */
        tsh_coll_fold(out, left, part(user, (k + j) % size), n, coll->dtype, coll->redop);
        left = out;
    }
    if (left != out && n > 0) memcpy(out, left, (size_t)n * tsh_dtype_size(coll->dtype));
    tsh_coll_finish(out, n, coll->dtype, coll->redop, size);
}

TSH_API int64_t tsh_coll_before(const int64_t *counts, int r) {
    int64_t sum = 0;
    for (int i = 0; i < r; i++) sum += counts[i];
    return sum;
}

TSH_API int64_t tsh_coll_chunk(int64_t n, int size, int k) {
    int64_t chunk = n / size + (n % size != 0);         /* ceil(n / size) */
    return chunk == 0 || k > n / chunk ? n : chunk * k; /* min(n, chunk k) */
}

/* Returns 1 for kinds that combine the ranks' values by coll->redop. */
static int tshi_coll_reduces(tsh_coll_kind kind) {
    return kind == TSH_ALLREDUCE || kind == TSH_REDUCE_SCATTER;
}

/* Hashes one more value: the multiplicative step of Fibonacci hashing, then a shift that brings the
 * well-mixed high bits down. */
static uint64_t tshi_coll_mix(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * UINT64_C(0x9E3779B97F4A7C15);
    return hash ^ (hash >> 29);
}

TSH_API uint64_t tsh_coll_digest(const tsh_coll *coll, int size) {
    int pairwise = coll->kind == TSH_SEND || coll->kind == TSH_RECV; /* a SEND matches its RECV */
    uint64_t hash, kind = (uint64_t)(pairwise ? TSH_SEND : coll->kind);
    if (coll->kind >= TSH_BARRIER) return kind; /* no arguments */
    kind |= (uint64_t)coll->dtype << 8;         /* the arguments, above the kind */
    if (tshi_coll_reduces(coll->kind)) kind |= (uint64_t)coll->redop << 16;
    if (coll->kind == TSH_BROADCAST) kind |= (uint64_t)coll->root << 24;
    if (pairwise) kind |= (uint64_t)(uint32_t)coll->tag << 24;
    hash = tshi_coll_mix(1, kind);
    if (!tshi_coll_rows(coll->kind)) return tshi_coll_mix(hash, (uint64_t)coll->count);
    hash = tshi_coll_mix(hash, (uint64_t)coll->blocks);
    for (int r = 0; r < size && coll->kind != TSH_ALLTOALL; r++) /* an all-to-all differs by rank */
        hash = tshi_coll_mix(hash, (uint64_t)coll->recv_counts[r]);
    return hash;
}

/* Appends names[value]; if value is not below n, `what` and the number, such as "kind 77". */
static void tshi_coll_name(char *text, size_t capacity, const char *const *names, unsigned n,
                           const char *what, unsigned value) {
    if (value < n)
        tsh_text_add(text, capacity, "%s", names[value]);
    else
        tsh_text_add(text, capacity, "%s %d", what, (int)value);
}

TSH_API char *tsh_coll_text(const tsh_coll *coll, const tsh_coll *other, int size, char *text,
                            size_t capacity) {
    static const char *const redops[] = {"sum", "product", "min", "max", "average"};
    if (!capacity || !text) return text; /* no byte for the terminating 0 */
    text[0] = '\0';
    if (!coll) return text;
    unsigned kind = (unsigned)coll->kind;
    const int64_t *mine = coll->recv_counts, *theirs = NULL; /* theirs: other's, if comparable */
    if (tshi_coll_rows(coll->kind) && kind != TSH_ALLTOALL && other && other->kind == coll->kind)
        theirs = other->recv_counts;
    tshi_coll_name(text, capacity, tshi_coll_kinds, TSH_COLL_KINDS, "kind", kind);
    if (kind >= TSH_BARRIER) return text; /* no arguments to describe */
    tsh_text_add(text, capacity, " of ");
    if (!tshi_coll_rows(coll->kind) && kind != TSH_SENDRECV)
        tsh_text_add(text, capacity, "%lld ", (long long)coll->count);
    if (tshi_dtype_exists(coll->dtype)) /* a broken peer may send another value */
        tsh_text_add(text, capacity, "%s", tshi_dtypes[coll->dtype].name);
    else
        tsh_text_add(text, capacity, "dtype %d", (int)coll->dtype);
    if (tshi_coll_reduces(coll->kind)) {
        tsh_text_add(text, capacity, " (");
        tshi_coll_name(text, capacity, redops, TSH_AVG + 1, "reduction", (unsigned)coll->redop);
        tsh_text_add(text, capacity, ")");
    }
    if (coll->blocks > 1) tsh_text_add(text, capacity, " in %lld blocks", (long long)coll->blocks);
    if (kind == TSH_BROADCAST) tsh_text_add(text, capacity, " from rank %d", coll->root);
    if (coll->send_to >= 0) tsh_text_add(text, capacity, " to rank %d", coll->send_to);
    if (coll->recv_from >= 0) tsh_text_add(text, capacity, " from rank %d", coll->recv_from);
    if (coll->tag >= 0) tsh_text_add(text, capacity, " with tag %d", coll->tag);
    for (int r = 0; mine && theirs && r < size; r++) {
        if (mine[r] == theirs[r]) continue;
        tsh_text_add(text, capacity, " with counts[%d] = %lld", r, (long long)mine[r]);
        break; /* only the first that differs */
    }
    return text;
}

TSH_API char *tsh_group_text(uint64_t group, char *text, size_t capacity) {
    const int axis = (int)(group >> TSHI_COLL_AXIS);
    if (!capacity || !text) return text; /* no byte for the terminating 0 */
    text[0] = '\0';
    if (axis == 't' || axis == 'd' || axis == 'p')
        tsh_text_add(text, capacity, "%cp", axis);
    else if (group == 1)
        tsh_text_add(text, capacity, "world");
    else
        tsh_text_add(text, capacity, "group %llu", (unsigned long long)group);
    return text;
}

TSH_API void tsh_coll_where(const tsh_coll *coll, int size, uint64_t seq, uint64_t group,
                            char *text, size_t capacity) {
    char name[TSHI_COLL_NAME];
    size_t used = strlen(text);
    (void)tsh_coll_text(coll, NULL, size, text + used, capacity - used);
    if (!tshi_coll_pairwise(coll->kind))
        tsh_text_add(text, capacity, ", collective %llu", (unsigned long long)seq);
    tsh_text_add(text, capacity, " of %s", tsh_group_text(group, name, sizeof name));
}

TSH_API tsh_coll tsh_coll_half(const tsh_coll *coll, int receives) {
    tsh_coll half = *coll;
    half.kind = receives ? TSH_RECV : TSH_SEND;
    half.send_counts = half.recv_counts = NULL;
    if (coll->kind == TSH_SENDRECV)
        half.count = *(receives ? coll->recv_counts : coll->send_counts); /* this half's count */
    if (receives) half.send_to = -1;    /* a RECV has no send_to */
    if (!receives) half.recv_from = -1; /* a SEND has no recv_from */
    return half;
}
