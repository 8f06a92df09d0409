/* ========================================================================== */
/* >>coll                                              MARK: - coll (private) */
/* Kinds of collectives and their names; chunks of a buffer; a hash.          */
/* Needs: >>text >>dtype.                                                     */
/* ========================================================================== */

static const char *const tshi_coll_kinds[TSH_COLL_KINDS] = {
    "all-reduce", "all-gather", "reduce-scatter", "broadcast", "all-to-all",
    "send",       "receive",    "send-receive",   "barrier",   "split"};

/* The public functions that all ranks must call and that programs are tempted to call on one rank
 * alone: "if (rank == 0) tsh_save(...)". Errors name them, see tsh_comm.caller. */
typedef enum tshi_coll_caller {
    TSHI_CALLER_NONE, /* any other function */
    TSHI_CALLER_SAVE,
    TSHI_CALLER_LOAD,
    TSHI_CALLER_READ,
    TSHI_CALLER_HASH,
    TSHI_CALLER_CHECK,
    TSHI_CALLERS
} tshi_coll_caller;
static const char *const tshi_coll_callers[TSHI_CALLERS] = {
    "", "tsh_save", "tsh_load", "tsh_read", "tsh_hash", "tsh_check_replicas"};

/* Position of the lowest bit of the top byte of a group's id. This byte is 't', 'd' or 'p' for a
 * group of tp, dp or pp, else 0. */
enum { TSHI_COLL_AXIS = 56 };

/* Returns 1 for collectives between two ranks (send, receive); they are numbered per pair of ranks,
 * not per group. */
static int tshi_coll_pairwise(tsh_coll_kind kind) {
    return kind == TSH_SEND || kind == TSH_RECV || kind == TSH_SENDRECV;
}

/* Returns 1 for collectives with an array of counts, one per rank, which is repeated for each of
 * tsh_coll.blocks blocks. */
static int tshi_coll_rows(tsh_coll_kind kind) {
    return kind == TSH_ALLGATHER || kind == TSH_REDUCE_SCATTER || kind == TSH_ALLTOALL;
}

static int64_t tshi_coll_chunk(int64_t n, int size, int k) {
    int64_t chunk = n / size + (n % size != 0);         /* ceil(n / size) */
    /* min(n, chunk * k), without overflow */
    return chunk == 0 || k > n / chunk ? n : chunk * k;
}

/* Returns 1 for collectives that combine the ranks' values by tsh_coll.redop. */
static int tshi_coll_reduces(tsh_coll_kind kind) {
    return kind == TSH_ALLREDUCE || kind == TSH_REDUCE_SCATTER;
}

/* Hashes one more value: the multiplicative step of Fibonacci hashing, then a shift that brings the
 * well-mixed high bits down. */
static uint64_t tshi_coll_mix(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * UINT64_C(0x9E3779B97F4A7C15);
    return hash ^ (hash >> 29);
}
