/* ========================================================================== */
/* >>wire                                              MARK: - wire (private) */
/* Activations that are sent to other ranks in another dtype: tsh_desc.wire.  */
/* Needs: >>kernel >>comm.                                                    */
/* ========================================================================== */

/* A message has a part for, or from, each rank: its values in the wire's dtype, in blocks of
 * TSHI_DTYPE_BLOCK elements; zeros fill the last one. Blocks of quantised values are sent as 16-bit
 * numbers, which no collective changes.
 *
 *     reduce-scatter   An all-to-all sends each rank its part. The rank decodes the parts and adds
 *                      them in the order of rule 5 of >>comm-api.
 *     all-gather       Each rank decodes the parts of all ranks, its own too.
 *     all-reduce       A reduce-scatter, then an all-gather of the sums.
 *
 * So every rank decodes the same bytes, and what is replicated stays the same on all ranks. */

enum {
    TSHI_WIRE_LEAST = 16384, /* fewer elements are sent as they are: latency is what they cost */
    /* Gradients are multiplied by this before they are encoded, and divided by it afterwards: a
     * scale of a quantised block is an f16, which has no numbers below 6e-8. */
    TSHI_WIRE_SCALE = 4096
};

/* The dtype of messages for backends, of which an element has two bytes. */
static const tsh_dtype tshi_wire_halves = TSH_BF16;

/* What is sent. */
typedef enum tshi_wire_use {
    TSHI_WIRE_EXACT,  /* weights and what is read or written: as they are */
    TSHI_WIRE_VALUES, /* activations */
    TSHI_WIRE_GRADS   /* gradients of activations */
} tshi_wire_use;

/* Returns the dtype in which n elements of `dtype` are sent to other ranks. */
static tsh_dtype tshi_wire_dtype(const tsh_ctx *ctx, tshi_wire_use use, tsh_dtype dtype,
                                 int64_t n) {
    const int converts = ctx->wire && use != TSHI_WIRE_EXACT && n >= TSHI_WIRE_LEAST &&
                         tshi_dtypes[dtype].floating &&
                         tshi_dtype_bytes(ctx->wire, TSHI_DTYPE_BLOCK) <
                             tshi_dtype_bytes(dtype, TSHI_DTYPE_BLOCK);
    return converts ? ctx->wire : dtype;
}

/* Returns the bytes of a message's part of n elements. */
static size_t tshi_wire_bytes(const tsh_ctx *ctx, int64_t n) {
    return tshi_dtype_bytes(ctx->wire, tshi_base_ceil(n, TSHI_DTYPE_BLOCK) * TSHI_DTYPE_BLOCK);
}

/* A part of a message and the values that it stands for: the argument of the functions that threads
 * run. */
typedef struct tshi_wire_part {
    const tsh_ctx *ctx;
    tsh_dtype dtype; /* of the values */
    void *values;
    int64_t n;     /* number of values */
    char *message; /* the part; of tshi_wire_sum: one of each rank of tp, in rank order */
    size_t pitch;  /* bytes from the part of one rank to that of the next */
    tsh_real scale; /* what is sent is multiplied by this */
} tshi_wire_part;

/* Runs fn on the rank's threads for the blocks of a part. */
static void tshi_wire_run(const tsh_ctx *ctx, tshi_wire_use use, tsh_dtype dtype, void *values,
                          int64_t n, char *message, tshi_team_fn fn) {
    const int64_t blocks = tshi_base_ceil(n, TSHI_DTYPE_BLOCK);
    tshi_wire_part part = {ctx, dtype, values, n, message, tshi_wire_bytes(ctx, n), 0};
    part.scale = use == TSHI_WIRE_GRADS ? TSHI_R(TSHI_WIRE_SCALE) : 1;
    tshi_team_run(ctx, tshi_kernel_parts(ctx, blocks, TSHI_DTYPE_BLOCK), blocks, 1, fn, &part);
}

/* Runs on one thread: encodes the blocks [from, to) of a part. */
static void tshi_wire_encode(void *job, int thread, int64_t from, int64_t to) {
    const tshi_wire_part *part = (const tshi_wire_part *)job;
    const tshi_dtype *dtype = &tshi_dtypes[part->dtype], *wire = &tshi_dtypes[part->ctx->wire];
    tsh_real x[TSHI_DTYPE_BLOCK];
    (void)thread;
    for (int64_t e = from * TSHI_DTYPE_BLOCK; e < to * TSHI_DTYPE_BLOCK; e += TSHI_DTYPE_BLOCK) {
        const int64_t n = tshi_base_min(TSHI_DTYPE_BLOCK, part->n - e);
        memset(x, 0, sizeof x);
        dtype->load((char *)part->values + tshi_dtype_bytes(part->dtype, e), 1, n, x);
        for (int i = 0; i < TSHI_DTYPE_BLOCK; i++) x[i] *= part->scale;
        wire->store(part->message + tshi_dtype_bytes(part->ctx->wire, e), 1, TSHI_DTYPE_BLOCK, x);
    }
}

/* Writes n elements of a block, which were multiplied by part->scale, to the part's values. */
static void tshi_wire_put(const tshi_wire_part *part, int64_t e, tsh_real *x) {
    for (int i = 0; i < TSHI_DTYPE_BLOCK; i++) x[i] /= part->scale;
    tshi_dtypes[part->dtype].store((char *)part->values + tshi_dtype_bytes(part->dtype, e), 1,
                                   tshi_base_min(TSHI_DTYPE_BLOCK, part->n - e), x);
}

/* Runs on one thread: decodes the blocks [from, to) of a part. */
static void tshi_wire_decode(void *job, int thread, int64_t from, int64_t to) {
    const tshi_wire_part *part = (const tshi_wire_part *)job;
    const tsh_dtype wire = part->ctx->wire;
    tsh_real x[TSHI_DTYPE_BLOCK];
    (void)thread;
    for (int64_t e = from * TSHI_DTYPE_BLOCK; e < to * TSHI_DTYPE_BLOCK; e += TSHI_DTYPE_BLOCK) {
        tshi_dtypes[wire].load(part->message + tshi_dtype_bytes(wire, e), 1, TSHI_DTYPE_BLOCK, x);
        tshi_wire_put(part, e, x);
    }
}

/* Runs on one thread: adds up the blocks [from, to) of the parts of all ranks. */
static void tshi_wire_sum(void *job, int thread, int64_t from, int64_t to) {
    const tshi_wire_part *part = (const tshi_wire_part *)job;
    const tsh_comm *tp = &part->ctx->tp;
    const tsh_dtype wire = part->ctx->wire;
    tsh_real sum[TSHI_DTYPE_BLOCK], x[TSHI_DTYPE_BLOCK];
    (void)thread;
    for (int64_t e = from * TSHI_DTYPE_BLOCK; e < to * TSHI_DTYPE_BLOCK; e += TSHI_DTYPE_BLOCK) {
        for (int i = 1; i <= tp->size; i++) { /* rank 1 + rank first, this rank last */
            const char *message = part->message + (size_t)((tp->rank + i) % tp->size) * part->pitch;
            tshi_dtypes[wire].load(message + tshi_dtype_bytes(wire, e), 1, TSHI_DTYPE_BLOCK, x);
            for (int k = 0; k < TSHI_DTYPE_BLOCK; k++) sum[k] = i > 1 ? sum[k] + x[k] : x[k];
        }
        tshi_wire_put(part, e, sum);
    }
}

/* Sends send[r] of the elements `in`, those for the ranks of tp one after the other, to each rank
 * r, and receives recv[r] elements from it. Returns the received message, in *scratch, which the
 * caller releases; NULL: an error. */
static char *tshi_wire_exchange(tsh_ctx *ctx, tshi_wire_use use, tsh_dtype dtype,
                                const int64_t *send, const int64_t *recv, const void *in,
                                tshi_block **scratch, const char *what) {
    const int ranks = ctx->tp.size;
    const size_t counted = 2 * (size_t)ranks * sizeof(int64_t);
    size_t sent = 0, received = 0; /* bytes of the two messages */
    int64_t *halves;               /* 16-bit numbers to and from each rank */
    char *out, *at;
    for (int r = 0; r < ranks; r++) sent += tshi_wire_bytes(ctx, send[r]);
    for (int r = 0; r < ranks; r++) received += tshi_wire_bytes(ctx, recv[r]);
    *scratch = tshi_mem_alloc(ctx, TSH_MEM_STEP, counted + sent + received);
    if (!*scratch) return NULL;
    halves = (int64_t *)tshi_mem_data(*scratch);
    at = out = (char *)(halves + 2 * ranks);
    for (int r = 0; r < ranks; r++) {
        halves[r] = (int64_t)(tshi_wire_bytes(ctx, send[r]) / 2);
        halves[ranks + r] = (int64_t)(tshi_wire_bytes(ctx, recv[r]) / 2);
        tshi_wire_run(ctx, use, dtype, tshi_kernel_unconst(in), send[r], at, tshi_wire_encode);
        in = (const char *)in + tshi_dtype_bytes(dtype, send[r]);
        at += tshi_wire_bytes(ctx, send[r]);
    }
    return tshi_error_comm(ctx,
                           tsh_alltoall(&ctx->tp, out, halves, at, halves + ranks, 1,
                                        tshi_wire_halves),
                           what) == TSH_OK
               ? at
               : NULL;
}

/* An all-to-all of elements: see tshi_wire_exchange; `out` has those of rank 0 first. */
static tsh_result tshi_wire_alltoall(tsh_ctx *ctx, tshi_wire_use use, tsh_dtype dtype,
                                     const int64_t *send, const int64_t *recv, const void *in,
                                     void *out, const char *what) {
    tshi_block *scratch;
    char *message = tshi_wire_exchange(ctx, use, dtype, send, recv, in, &scratch, what);
    for (int r = 0; message && r < ctx->tp.size; r++) {
        tshi_wire_run(ctx, use, dtype, out, recv[r], message, tshi_wire_decode);
        out = (char *)out + tshi_dtype_bytes(dtype, recv[r]);
        message += tshi_wire_bytes(ctx, recv[r]);
    }
    tshi_mem_release(ctx, scratch);
    return ctx->error.code;
}

/* A reduce-scatter of the elements `in`, counts[r] of them for rank r of tp. */
static tsh_result tshi_wire_scatter(tsh_ctx *ctx, tshi_wire_use use, tsh_dtype dtype,
                                    const int64_t *counts, const void *in, void *out,
                                    const char *what) {
    const int ranks = ctx->tp.size;
    tshi_block *same = tshi_mem_alloc(ctx, TSH_MEM_STEP, (size_t)ranks * sizeof(int64_t)), *scratch;
    int64_t *own; /* the elements that each rank sends to this one */
    char *message;
    if (!same) return ctx->error.code;
    own = (int64_t *)tshi_mem_data(same);
    for (int r = 0; r < ranks; r++) own[r] = counts[ctx->tp.rank];
    message = tshi_wire_exchange(ctx, use, dtype, counts, own, in, &scratch, what);
    if (message) tshi_wire_run(ctx, use, dtype, out, own[0], message, tshi_wire_sum);
    tshi_mem_release(ctx, scratch);
    tshi_mem_release(ctx, same);
    return ctx->error.code;
}

/* An all-gather of counts[r] elements of each rank r of tp; `in` may be this rank's place in
 * `out`. */
static tsh_result tshi_wire_gather(tsh_ctx *ctx, tshi_wire_use use, tsh_dtype dtype,
                                   const int64_t *counts, const void *in, void *out,
                                   const char *what) {
    const int ranks = ctx->tp.size;
    const size_t counted = (size_t)ranks * sizeof(int64_t);
    size_t bytes = 0, before = 0; /* of the message; of the parts of lower ranks */
    tshi_block *scratch;
    int64_t *halves; /* 16-bit numbers of each rank */
    char *message;
    for (int r = 0; r < ranks; r++) {
        if (r == ctx->tp.rank) before = bytes;
        bytes += tshi_wire_bytes(ctx, counts[r]);
    }
    scratch = tshi_mem_alloc(ctx, TSH_MEM_STEP, counted + bytes);
    if (!scratch) return ctx->error.code;
    halves = (int64_t *)tshi_mem_data(scratch);
    message = (char *)(halves + ranks);
    for (int r = 0; r < ranks; r++) halves[r] = (int64_t)(tshi_wire_bytes(ctx, counts[r]) / 2);
    tshi_wire_run(ctx, use, dtype, tshi_kernel_unconst(in), counts[ctx->tp.rank], message + before,
                  tshi_wire_encode);
    (void)tshi_error_comm(
        ctx, tsh_allgather(&ctx->tp, message + before, message, halves, 1, tshi_wire_halves), what);
    for (int r = 0; ctx->error.code == TSH_OK && r < ranks; r++) {
        tshi_wire_run(ctx, use, dtype, out, counts[r], message, tshi_wire_decode);
        out = (char *)out + tshi_dtype_bytes(dtype, counts[r]);
        message += tshi_wire_bytes(ctx, counts[r]);
    }
    tshi_mem_release(ctx, scratch);
    return ctx->error.code;
}

/* An all-reduce over tp, in place, of n elements: as they are or, if they are many and summed, in
 * the wire's dtype. */
static tsh_result tshi_wire_allreduce(tsh_ctx *ctx, tshi_wire_use use, tsh_redop op, void *data,
                                      int64_t n, tsh_dtype dtype, const char *what) {
    const int ranks = ctx->tp.size;
    const int64_t blocks = tshi_base_ceil(n, TSHI_DTYPE_BLOCK);
    tshi_block *scratch;
    int64_t *counts, first = 0; /* the elements of each rank; this rank's first one */
    char *own;                  /* this rank's elements */
    if (op != TSH_SUM || tshi_wire_dtype(ctx, use, dtype, n) == dtype)
        return tshi_error_comm(ctx, tsh_allreduce(&ctx->tp, data, n, dtype, op), what);
    scratch = tshi_mem_alloc(ctx, TSH_MEM_STEP, (size_t)ranks * sizeof *counts);
    if (!scratch) return ctx->error.code;
    counts = (int64_t *)tshi_mem_data(scratch);
    for (int r = 0; r < ranks; r++) {
        const int64_t begin = tshi_coll_chunk(blocks, ranks, r) * TSHI_DTYPE_BLOCK;
        const int64_t end = tshi_coll_chunk(blocks, ranks, r + 1) * TSHI_DTYPE_BLOCK;
        counts[r] = tshi_base_min(end, n) - tshi_base_min(begin, n);
        if (r == ctx->tp.rank) first = tshi_base_min(begin, n);
    }
    own = (char *)data + tshi_dtype_bytes(dtype, first);
    if (tshi_wire_scatter(ctx, use, dtype, counts, data, own, what) == TSH_OK)
        (void)tshi_wire_gather(ctx, use, dtype, counts, own, data, what);
    tshi_mem_release(ctx, scratch);
    return ctx->error.code;
}
