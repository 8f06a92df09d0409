/* ========================================================================== */
/* >>wire                                              MARK: - wire (private) */
/* Activations that are sent to other ranks in another dtype: tsh_desc.wire.  */
/* Needs: >>kernel >>comm.                                                    */
/* ========================================================================== */

/* A message has a part for each rank, or from each: a power of two, as a float, then the values,
 * divided by it, in the wire's dtype, in blocks of TSHI_DTYPE_BLOCK elements; zeros fill the last
 * block. A message is sent as 16-bit numbers, which no collective changes.
 *
 *     reduce-scatter   An all-to-all sends each rank its part. The rank decodes the parts and adds
 *                      them in the order of rule 5 of >>comm-api.
 *     all-gather       Each rank decodes the parts of all ranks, its own too.
 *     all-reduce       A reduce-scatter, then an all-gather of the sums.
 *
 * So every rank decodes the same bytes, and what is replicated stays the same on all ranks. */

enum {
    TSHI_WIRE_LEAST = 16384, /* tensors with fewer elements are sent as they are: latency, not the
                              * number of bytes, is what they cost */
    TSHI_WIRE_HEAD = sizeof(float), /* bytes of a part before its blocks */
    /* Quantised values of a part lie below 2^14: the scale of a block is an f16, from 6e-8 on, so
     * that blocks keep their bits down to 5e-10 of the part's largest value. */
    TSHI_WIRE_TOP = 14
};

/* The dtype of messages for backends, of which an element has two bytes. */
static const tsh_dtype tshi_wire_halves = TSH_BF16;

/* What is sent. */
typedef enum tshi_wire_use {
    TSHI_WIRE_EXACT,     /* a weight, or what is read or written: it is sent as it is */
    TSHI_WIRE_ACTIVATION /* an activation or its gradient */
} tshi_wire_use;

/* Returns the dtype in which n elements of `dtype` are sent to other ranks. */
TSHI_OUTLINE tsh_dtype tshi_wire_dtype(const tsh_ctx *ctx, tshi_wire_use use, tsh_dtype dtype,
                                       int64_t n) {
    const int converts = ctx->wire && use == TSHI_WIRE_ACTIVATION && n >= TSHI_WIRE_LEAST &&
                         tshi_dtypes[dtype].floating &&
                         tshi_dtype_bytes(ctx->wire, TSHI_DTYPE_BLOCK) <
                             tshi_dtype_bytes(dtype, TSHI_DTYPE_BLOCK);
    return converts ? ctx->wire : dtype;
}

/* Returns the bytes of a message's part of n elements. */
TSHI_COLD static size_t tshi_wire_bytes(const tsh_ctx *ctx, int64_t n) {
    return TSHI_WIRE_HEAD +
           tshi_dtype_bytes(ctx->wire, tshi_base_ceil(n, TSHI_DTYPE_BLOCK) * TSHI_DTYPE_BLOCK);
}

/* A part of a message and the values that it stands for: the argument of the functions that threads
 * run. */
typedef struct tshi_wire_part {
    const tsh_ctx *ctx;
    tsh_dtype dtype; /* dtype of the values */
    char *values;
    int64_t n;     /* number of values */
    char *message; /* the part; for tshi_wire_sum_part one part of each rank of tp, in rank order */
} tshi_wire_part;

/* Runs fn on the rank's threads for the blocks of a part. */
TSHI_COLD static void tshi_wire_run(tshi_wire_part *part, tshi_team_fn fn) {
    const int64_t blocks = tshi_base_ceil(part->n, TSHI_DTYPE_BLOCK);
    tshi_team_run(part->ctx, tshi_kernel_parts(part->ctx, blocks, TSHI_DTYPE_BLOCK), blocks, 1, fn,
                  part);
}

/* Reads the values of the block that begins at element e; zeros come after the last value. */
static void tshi_wire_get(const tshi_wire_part *part, int64_t e, tsh_real *x) {
    const int64_t n = tshi_base_min(TSHI_DTYPE_BLOCK, part->n - e);
    tshi_dtypes[part->dtype].load(part->values + tshi_dtype_bytes(part->dtype, e), 1, n, x);
    for (int64_t i = n; i < TSHI_DTYPE_BLOCK; i++) x[i] = 0;
}

/* Writes the values of the block that begins at element e. */
static void tshi_wire_put(const tshi_wire_part *part, int64_t e, const tsh_real *x) {
    tshi_dtypes[part->dtype].store(part->values + tshi_dtype_bytes(part->dtype, e), 1,
                                   tshi_base_min(TSHI_DTYPE_BLOCK, part->n - e), x);
}

/* Returns the power of two by which the values of a part are divided: 1 if all are 0, in a dry run,
 * or if the wire's dtype has the range of a float. Returns NaN if a value is not finite: all values
 * of the part are NaN then, as quantised blocks have no NaN. */
TSHI_COLD static float tshi_wire_power(const tshi_wire_part *part) {
    tsh_real x[TSHI_DTYPE_BLOCK], most = 0;
    int exponent, finite = 1;
    if (part->ctx->dry || !tshi_dtype_in_blocks(part->ctx->wire)) return 1;
    for (int64_t e = 0; e < part->n; e += TSHI_DTYPE_BLOCK) {
        tshi_wire_get(part, e, x);
        for (int i = 0; i < TSHI_DTYPE_BLOCK; i++) {
            const tsh_real size = x[i] < 0 ? -x[i] : x[i];
            finite &= size <= (tsh_real)FLT_MAX;
            most = size > most ? size : most;
        }
    }
    if (!finite) return NAN;
    if (most == 0) return 1;
    (void)frexp((double)most, &exponent); /* most < 2^exponent */
    return (float)ldexp(1, exponent < -100 ? -100 - TSHI_WIRE_TOP : exponent - TSHI_WIRE_TOP);
}

/* Runs on one thread: encodes the blocks [from, to) of a part, whose power of two is there. */
static void tshi_wire_encode_part(void *job, int thread, int64_t from, int64_t to) {
    const tshi_wire_part *part = (const tshi_wire_part *)job;
    const tsh_dtype wire = part->ctx->wire;
    tsh_real x[TSHI_DTYPE_BLOCK];
    float power;
    (void)thread;
    memcpy(&power, part->message, sizeof power);
    for (int64_t e = from * TSHI_DTYPE_BLOCK; e < to * TSHI_DTYPE_BLOCK; e += TSHI_DTYPE_BLOCK) {
        tshi_wire_get(part, e, x);
        for (int i = 0; i < TSHI_DTYPE_BLOCK; i++) x[i] = power > 0 ? x[i] / (tsh_real)power : 0;
        tshi_dtypes[wire].store(part->message + TSHI_WIRE_HEAD + tshi_dtype_bytes(wire, e), 1,
                                TSHI_DTYPE_BLOCK, x);
    }
}

/* Encodes n values as a part of a message. */
TSHI_COLD static void tshi_wire_encode(const tsh_ctx *ctx, tsh_dtype dtype, const void *values,
                                       int64_t n, char *message) {
    tshi_wire_part part = {ctx, dtype, (char *)tshi_kernel_unconst(values), n, message};
    const float power = tshi_wire_power(&part);
    memcpy(message, &power, sizeof power);
    tshi_wire_run(&part, tshi_wire_encode_part);
}

/* Reads the block of a part that begins at element e. */
static void tshi_wire_load(const tsh_ctx *ctx, const char *message, int64_t e, tsh_real *x) {
    float power;
    memcpy(&power, message, sizeof power);
    tshi_dtypes[ctx->wire].load(message + TSHI_WIRE_HEAD + tshi_dtype_bytes(ctx->wire, e), 1,
                                TSHI_DTYPE_BLOCK, x);
    for (int i = 0; i < TSHI_DTYPE_BLOCK; i++) x[i] *= (tsh_real)power;
}

/* Runs on one thread: decodes the blocks [from, to) of a part. */
static void tshi_wire_decode_part(void *job, int thread, int64_t from, int64_t to) {
    const tshi_wire_part *part = (const tshi_wire_part *)job;
    tsh_real x[TSHI_DTYPE_BLOCK];
    (void)thread;
    for (int64_t e = from * TSHI_DTYPE_BLOCK; e < to * TSHI_DTYPE_BLOCK; e += TSHI_DTYPE_BLOCK) {
        tshi_wire_load(part->ctx, part->message, e, x);
        tshi_wire_put(part, e, x);
    }
}

/* Decodes a part of a message to n values. */
TSHI_COLD static void tshi_wire_decode(const tsh_ctx *ctx, tsh_dtype dtype, void *values, int64_t n,
                                       char *message) {
    tshi_wire_part part = {ctx, dtype, (char *)values, n, message};
    tshi_wire_run(&part, tshi_wire_decode_part);
}

/* Runs on one thread: adds up the blocks [from, to) of the parts of all ranks. */
static void tshi_wire_sum_part(void *job, int thread, int64_t from, int64_t to) {
    const tshi_wire_part *part = (const tshi_wire_part *)job;
    const tsh_comm *tp = &part->ctx->tp;
    const size_t pitch = tshi_wire_bytes(part->ctx, part->n); /* from one rank's part to the next */
    tsh_real sum[TSHI_DTYPE_BLOCK], x[TSHI_DTYPE_BLOCK];
    (void)thread;
    for (int64_t e = from * TSHI_DTYPE_BLOCK; e < to * TSHI_DTYPE_BLOCK; e += TSHI_DTYPE_BLOCK) {
        for (int i = 1; i <= tp->size; i++) { /* rank 1 + rank first, this rank last */
            const size_t r = (size_t)((tp->rank + i) % tp->size);
            tshi_wire_load(part->ctx, part->message + r * pitch, e, x);
            for (int k = 0; k < TSHI_DTYPE_BLOCK; k++) sum[k] = i > 1 ? sum[k] + x[k] : x[k];
        }
        tshi_wire_put(part, e, sum);
    }
}

/* Sends send[r] of the elements `in`, those for the ranks of tp one after the other, to each rank
 * r, and receives recv[r] elements from it. Returns the received message, in *scratch, which the
 * caller releases; NULL: an error. */
TSHI_COLD static char *tshi_wire_exchange(tsh_ctx *ctx, tsh_dtype dtype, const int64_t *send,
                                          const int64_t *recv, const void *in, tshi_block **scratch,
                                          const char *what) {
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
        tshi_wire_encode(ctx, dtype, in, send[r], at);
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
TSHI_COLD static tsh_result tshi_wire_alltoall(tsh_ctx *ctx, tsh_dtype dtype, const int64_t *send,
                                               const int64_t *recv, const void *in, void *out,
                                               const char *what) {
    tshi_block *scratch;
    char *message = tshi_wire_exchange(ctx, dtype, send, recv, in, &scratch, what);
    for (int r = 0; message && r < ctx->tp.size; r++) {
        tshi_wire_decode(ctx, dtype, out, recv[r], message);
        out = (char *)out + tshi_dtype_bytes(dtype, recv[r]);
        message += tshi_wire_bytes(ctx, recv[r]);
    }
    tshi_mem_release(ctx, scratch);
    return ctx->error.code;
}

/* A reduce-scatter of the elements `in`, counts[r] of them for rank r of tp. */
TSHI_COLD static tsh_result tshi_wire_scatter(tsh_ctx *ctx, tsh_dtype dtype, const int64_t *counts,
                                              const void *in, void *out, const char *what) {
    const int ranks = ctx->tp.size;
    tshi_block *same = tshi_mem_alloc(ctx, TSH_MEM_STEP, (size_t)ranks * sizeof(int64_t)), *scratch;
    int64_t *own; /* the elements that each rank sends to this one */
    char *message;
    if (!same) return ctx->error.code;
    own = (int64_t *)tshi_mem_data(same);
    for (int r = 0; r < ranks; r++) own[r] = counts[ctx->tp.rank];
    message = tshi_wire_exchange(ctx, dtype, counts, own, in, &scratch, what);
    if (message) {
        tshi_wire_part part = {ctx, dtype, (char *)out, own[0], message};
        tshi_wire_run(&part, tshi_wire_sum_part);
    }
    tshi_mem_release(ctx, scratch);
    tshi_mem_release(ctx, same);
    return ctx->error.code;
}

/* An all-gather of counts[r] elements of each rank r of tp; `in` may be this rank's place in
 * `out`. */
TSHI_COLD static tsh_result tshi_wire_gather(tsh_ctx *ctx, tsh_dtype dtype, const int64_t *counts,
                                             const void *in, void *out, const char *what) {
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
    tshi_wire_encode(ctx, dtype, in, counts[ctx->tp.rank], message + before);
    (void)tshi_error_comm(
        ctx, tsh_allgather(&ctx->tp, message + before, message, halves, 1, tshi_wire_halves), what);
    for (int r = 0; ctx->error.code == TSH_OK && r < ranks; r++) {
        tshi_wire_decode(ctx, dtype, out, counts[r], message);
        out = (char *)out + tshi_dtype_bytes(dtype, counts[r]);
        message += tshi_wire_bytes(ctx, counts[r]);
    }
    tshi_mem_release(ctx, scratch);
    return ctx->error.code;
}

/* An all-reduce over tp, in place, of n elements in the wire's dtype: a sum. */
TSHI_COLD static tsh_result tshi_wire_reduce(tsh_ctx *ctx, void *data, int64_t n, tsh_dtype dtype,
                                             const char *what) {
    const int ranks = ctx->tp.size;
    const int64_t blocks = tshi_base_ceil(n, TSHI_DTYPE_BLOCK);
    tshi_block *scratch = tshi_mem_alloc(ctx, TSH_MEM_STEP, (size_t)ranks * sizeof(int64_t));
    int64_t *counts, first = 0; /* the number of elements of each rank; this rank's first one */
    char *own;                  /* this rank's elements */
    if (!scratch) return ctx->error.code;
    counts = (int64_t *)tshi_mem_data(scratch);
    for (int r = 0; r < ranks; r++) {
        const int64_t begin = tshi_coll_chunk(blocks, ranks, r) * TSHI_DTYPE_BLOCK;
        const int64_t end = tshi_coll_chunk(blocks, ranks, r + 1) * TSHI_DTYPE_BLOCK;
        counts[r] = tshi_base_min(end, n) - tshi_base_min(begin, n);
        if (r == ctx->tp.rank) first = tshi_base_min(begin, n);
    }
    own = (char *)data + tshi_dtype_bytes(dtype, first);
    if (tshi_wire_scatter(ctx, dtype, counts, data, own, what) == TSH_OK)
        (void)tshi_wire_gather(ctx, dtype, counts, own, data, what);
    tshi_mem_release(ctx, scratch);
    return ctx->error.code;
}

/* An all-reduce over tp, in place, of n elements: as they are or, if they are many and summed, in
 * the wire's dtype. */
static tsh_result tshi_wire_allreduce(tsh_ctx *ctx, tshi_wire_use use, tsh_redop op, void *data,
                                      int64_t n, tsh_dtype dtype, const char *what) {
    if (op != TSH_SUM || tshi_wire_dtype(ctx, use, dtype, n) == dtype)
        return tshi_error_comm(ctx, tsh_allreduce(&ctx->tp, data, n, dtype, op), what);
    return tshi_wire_reduce(ctx, data, n, dtype, what);
}
