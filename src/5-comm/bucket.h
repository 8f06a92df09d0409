/* ========================================================================== */
/* >>bucket                                          MARK: - bucket (private) */
/* Sums gradients over dp, the data-parallel replicas.                        */
/* Gradients are sent in buckets: flat messages, each sent once it is full.   */
/* Needs: >>tensor-exact >>comm.                                              */
/* ========================================================================== */

/* Works as torch's DistributedDataParallel does. tshi_bucket_begin empties the list of buckets.
 * tshi_bucket_add takes each leaf whose gradient is complete, and starts the collective of a bucket
 * as soon as the bucket is full, while backward goes on. tshi_bucket_end starts those that are
 * left, waits for all, and copies the results back to the leaves. An optimiser with .zero sends its
 * parameters in the same way, by all-gathers. Invariant: all ranks add the same leaves in the same
 * order, so that their collectives match. */

enum { TSHI_BUCKET_BYTES = 1 << 20 }; /* default of tsh_desc.bucket_bytes: 1 MiB */

/* Names the collectives of this section in error messages. */
static const char tshi_bucket_what[] = "a bucket of gradients or parameters over dp";

typedef struct tshi_bucket_entry {
    struct tshi_bucket_entry *next; /* entry of the leaf added after this one */
    tsh_tensor *leaf; /* the tensor whose gradient or (all-gather) values are sent */
} tshi_bucket_entry;

/* The message of a bucket with several leaves is a matrix of shape (ranks of dp, width): row k
 * holds chunk k (tshi_coll_chunk) of every leaf, each padded with zeros to the length of the leaf's
 * chunk 0. An all-reduce cuts the matrix into the same rows, so each element is summed in the same
 * order, to the same bits, as in an all-reduce of its leaf alone. A reduce-scatter returns row k of
 * the sum to rank k; an all-gather of parameters takes row k from rank k. The message of a bucket
 * with one leaf is the leaf's own memory. */
struct tshi_bucket {
    tshi_bucket *next;  /* the bucket that was filled after this one */
    /* gradients: TSH_ALLREDUCE or TSH_REDUCE_SCATTER; parameters: TSH_ALLGATHER */
    tsh_coll_kind kind;
    /* first: list of the leaves; last: the pointer (first or a `next`) that the next entry sets */
    tshi_bucket_entry *first, **last;
    int64_t count, width;             /* count: elements of all leaves; width: elements of a row */
    /* counts[k]: elements of row k, for tsh_coll.recv_counts; all-reduce: NULL */
    int64_t *counts;
    tshi_block *block; /* the message; NULL: the collective was not started yet */
    tshi_block *own;   /* this rank's row, the result of a reduce-scatter; other kinds: NULL */
    tsh_req req;       /* the request of the collective, for tsh_wait */
};

/* Returns the index of the first element of chunk k of a leaf. */
TSHI_OUTLINE int64_t tshi_bucket_chunk(const tsh_tensor *leaf, int k) {
    return tshi_coll_chunk(tsh_local_numel(leaf), leaf->ctx->dp.size, k);
}

/* Returns the number of elements of chunk k of a leaf. */
static int64_t tshi_bucket_chunk_size(const tsh_tensor *leaf, int k) {
    return tshi_bucket_chunk(leaf, k + 1) - tshi_bucket_chunk(leaf, k);
}

/* Returns the bucket's only leaf if the leaf's own memory is the message, without a copy. Returns
 * NULL if the leaves are copied: there are several, or the only one is a parameter whose dtype is
 * not tsh_real. */
static tsh_tensor *tshi_bucket_only(const tshi_bucket *b) {
    tsh_tensor *leaf = b->first->leaf;
    return b->first->next || (b->kind == TSH_ALLGATHER && leaf->dtype != TSH_REAL) ? NULL : leaf;
}

/* Returns the number of elements in the message, padding included. */
static int64_t tshi_bucket_elements(const tsh_ctx *ctx, const tshi_bucket *b) {
    return tshi_bucket_only(b) ? b->count : b->width * ctx->dp.size;
}

/* Returns where row k of the message starts. If the message is a leaf's own memory: where chunk k
 * of the leaf starts. */
static tsh_real *tshi_bucket_row(const tshi_bucket *b, int k) {
    return (tsh_real *)tshi_mem_data(b->block) +
           (tshi_bucket_only(b) ? tshi_bucket_chunk(b->first->leaf, k) : b->width * k);
}

/* Copies chunk k of every leaf to `row`, with padding, or, if out is 1, `row` back to the leaves.
 * With out 1, a leaf may have a gradient already (gr.live), from an earlier bucket: backward added
 * another contribution after that bucket was sent, so the leaf is in two; their results are
 * added. */
static void tshi_bucket_copy(const tshi_bucket *b, int k, tsh_real *row, int out) {
    for (const tshi_bucket_entry *p = b->first; p; p = p->next) {
        tsh_tensor *leaf = p->leaf;
        const int gathers = b->kind == TSH_ALLGATHER; /* 1: copies parameters; 0: gradients */
        const int64_t first = tshi_bucket_chunk(leaf, k);
        const int64_t n = tshi_bucket_chunk_size(leaf, k), padded = tshi_bucket_chunk_size(leaf, 0);
        tsh_real *at = gathers ? NULL : (tsh_real *)tshi_mem_data(leaf->gr.block) + first;
        if (gathers && out) {
            (void)tshi_tensor_set_exact(leaf, first, n, row);
        } else if (gathers) {
            /* copies the exact floats: of bf16 weights, also the bits that bf16 cuts off */
            tshi_tensor_exact(leaf, first, n, row);
        } else if (!out) {
            memcpy(row, at, (size_t)n * sizeof *row);
        } else if (leaf->gr.live) {
            tshi_dtype_fold(at, at, row, n, TSH_REAL, TSH_SUM); /* at += row */
            leaf->sparse = 0; /* no longer row-sparse: any row may differ from 0 */
        } else {
            memcpy(at, row, (size_t)n * sizeof *row);
        }
        if (!out) memset(row + n, 0, (size_t)(padded - n) * sizeof *row); /* pads with zeros */
        row += padded; /* where the next leaf's chunk is */
    }
}

/* Waits for the oldest bucket whose collective may still run. Does not copy its result to the
 * leaves: tshi_bucket_end does, so that contributions that backward adds until then begin a new
 * gradient, and are not added to the result. */
static void tshi_bucket_await(tsh_ctx *ctx) {
    tshi_bucket *b = ctx->buckets.awaited;
    ctx->buckets.awaited = b->next;
    (void)tshi_error_comm(ctx, tsh_wait(&ctx->dp, b->req), tshi_bucket_what);
}

/* Prepares the bucket's collective: makes the message (b->block), the counts and, for a
 * reduce-scatter, memory for the result. Returns 0 if there is no memory. */
static int tshi_bucket_load(tsh_ctx *ctx, tshi_bucket *b) {
    const int gathers = b->kind == TSH_ALLGATHER, size = ctx->dp.size, rank = ctx->dp.rank;
    tsh_tensor *only = tshi_bucket_only(b); /* NULL: the leaves are copied to the message */
    int k;
    if (b->kind != TSH_ALLREDUCE) {
        b->counts = (int64_t *)tshi_mem_arena_alloc(ctx, &ctx->buckets.arena,
                                                    (size_t)size * sizeof *b->counts);
        if (!b->counts) return 0;
        for (k = 0; k < size; k++) b->counts[k] = only ? tshi_bucket_chunk_size(only, k) : b->width;
    }
    if (b->kind == TSH_REDUCE_SCATTER) { /* the result is smaller than the message */
        b->own = tshi_mem_alloc(ctx, TSH_MEM_STEP, tshi_dtype_reals(b->counts[rank]));
        if (!b->own) return 0;
    }
    if (!only) { /* copies the leaves; for an all-gather, this rank's chunks only */
        b->block = tshi_mem_alloc(ctx, TSH_MEM_STEP,
                                  tshi_dtype_reals(tshi_bucket_elements(ctx, b)));
        for (k = gathers ? rank : 0; b->block && k < (gathers ? rank + 1 : size); k++)
            tshi_bucket_copy(b, k, tshi_bucket_row(b, k), 0);
    } else if (gathers) { /* the message is the parameter's own memory */
        b->block = only->block;
        b->block->refs++;
    } else { /* the message is the gradient's own memory */
        b->block = only->gr.block;
        only->gr.block = NULL; /* contributions added later get a new block */
    }
    return b->block != NULL;
}

/* Records an error if a leaf of the bucket was freed since it was added. Only the program's own
 * code that runs within tsh_backward, the backward of a custom op, can have freed it. */
static void tshi_bucket_check(tsh_ctx *ctx, const tshi_bucket *b) {
    for (const tshi_bucket_entry *p = b->first; p; p = p->next)
        if (p->leaf->flags & TSHI_DEAD)
            (void)tsh_fail(ctx, TSH_ERR_STATE,
                           "tsh_tensor_free: within tsh_backward a leaf was freed whose gradient "
                           "is summed over dp; free it when tsh_backward is done");
}

/* Starts the bucket's collective, unless it was started before. From then until
 * tshi_bucket_copy_back, the leaves count as having no gradient (gr.live is 0). */
static void tshi_bucket_send(tsh_ctx *ctx, tshi_bucket *b) {
    tsh_coll coll = tsh_coll_make(b->kind, TSH_REAL);
    tshi_bucket_check(ctx, b);
    if (b->block || ctx->error.code != TSH_OK || !tshi_bucket_load(ctx, b)) return;
    for (tshi_bucket_entry *p = b->first; p; p = p->next) {
        p->leaf->in_bucket = 0; /* the leaf may be added to a later bucket */
        if (b->kind != TSH_ALLGATHER) p->leaf->gr.live = 0;
    }
    coll.send = coll.recv = tshi_mem_data(b->block); /* an all-reduce works in place */
    coll.count = tshi_bucket_elements(ctx, b);
    coll.recv_counts = b->counts;
    /* gradients are averaged, or summed and divided later (tshi_bucket_divide) */
    coll.redop = ctx->buckets.summed ? TSH_SUM : TSH_AVG;
    if (b->kind == TSH_ALLGATHER) coll.send = tshi_bucket_row(b, ctx->dp.rank);
    if (b->own) coll.recv = tshi_mem_data(b->own); /* a reduce-scatter's result: this rank's row */
    while (ctx->dp.in_flight >= TSHI_COMM_IN_FLIGHT - 1 && ctx->buckets.awaited != b)
        tshi_bucket_await(ctx); /* keeps one request free for tshi_bucket_sum_weights */
    if (tshi_error_comm(ctx, tshi_comm_compare(&ctx->dp), tshi_bucket_what) == TSH_OK)
        (void)tshi_error_comm(ctx, tsh_start(&ctx->dp, &coll, &b->req), tshi_bucket_what);
}

/* Appends a bucket to the list and starts its collective. With tsh_desc.no_overlap, tshi_bucket_end
 * starts all collectives. */
static void tshi_bucket_close(tsh_ctx *ctx, tshi_bucket *b) {
    tshi_buckets *all = &ctx->buckets;
    *all->last = b;
    all->last = &b->next;
    if (!all->awaited) all->awaited = b; /* b is the first bucket to wait for */
    if (!all->hold) tshi_bucket_send(ctx, b);
}

/* Adds a leaf whose gradient is complete to the open bucket of its kind; a leaf of at least
 * all->limit elements gets a bucket of its own. kind TSH_ALLGATHER: adds a parameter of which this
 * rank has updated its chunk. Closes the bucket if it is full. */
static void tshi_bucket_add(tsh_tensor *leaf, tsh_coll_kind kind) {
    tsh_ctx *ctx = leaf->ctx;
    tshi_buckets *all = &ctx->buckets;
    const int64_t n = tsh_local_numel(leaf);
    tshi_bucket **open = &all->open[kind != TSH_ALLREDUCE], *b = n < all->limit ? *open : NULL;
    tshi_bucket_entry *p;
    if (leaf->in_bucket || ctx->error.code != TSH_OK) return; /* added already, or an error */
    p = (tshi_bucket_entry *)tshi_mem_arena_alloc(ctx, &all->arena, sizeof *p);
    if (p && !b) b = (tshi_bucket *)tshi_mem_arena_alloc(ctx, &all->arena, sizeof *b);
    if (!p || !b) return;
    if (!b->first) b->last = &b->first; /* a new bucket, all 0: makes its list of leaves empty */
    p->leaf = leaf;
    tshi_tensor_ref(leaf);
    *b->last = p;
    b->last = &p->next;
    b->kind = kind;
    b->count += n;
    b->width += tshi_bucket_chunk_size(leaf, 0); /* the leaf's part of each row, with padding */
    leaf->in_bucket = 1;
    if (n < all->limit) *open = b->count < all->limit ? b : NULL; /* a full bucket is not open */
    if (b->count >= all->limit) tshi_bucket_close(ctx, b);
}

/* Adds a leaf's gradient to a bucket: to be reduce-scattered if the leaf's optimiser has .zero,
 * else to be all-reduced. */
static void tshi_bucket_add_grad(tsh_tensor *leaf) {
    tshi_bucket_add(leaf, leaf->flags & TSHI_CHUNKED ? TSH_REDUCE_SCATTER : TSH_ALLREDUCE);
}

/* Empties the list of buckets, and releases their memory. */
static void tshi_bucket_clear(tshi_buckets *all) {
    tshi_mem_reset(&all->arena);
    all->first = all->open[0] = all->open[1] = all->awaited = NULL;
    all->last = &all->first;
}

/* Empties the list of buckets, before a backward or an optimiser's all-gathers. summed 1: gradients
 * are summed over dp, and divided by the sum of the ranks' weights (tshi_bucket_sum_weights); 0:
 * they are averaged. */
static void tshi_bucket_begin(tsh_ctx *ctx, int summed) {
    tshi_buckets *all = &ctx->buckets;
    tshi_bucket_clear(all);
    all->summed = summed;
    all->weight = 0;
    all->weight_req = 0; /* tsh_wait of 0 returns at once */
}

/* Starts summing `weight`, the number of terms in this rank's loss, over dp; the summed gradients
 * are divided by the total. Does nothing unless losses are sums. */
static void tshi_bucket_sum_weights(tsh_ctx *ctx, double weight) {
    tshi_buckets *all = &ctx->buckets;
    if (!all->summed || ctx->error.code != TSH_OK) return;
    all->weight = weight; /* the collective overwrites it with the sum */
    if (tshi_error_comm(ctx, tshi_comm_compare(&ctx->dp), tshi_bucket_what) != TSH_OK) return;
    (void)tshi_error_comm(
        ctx, tsh_allreduce_start(&ctx->dp, &all->weight, 1, TSH_F64, TSH_SUM, &all->weight_req),
        "tsh_backward: sum of weights over data parallel ranks");
}

/* Divides n values by `by`, unless that is 0: the gradients of a loss without terms are zero. */
static void tshi_bucket_divide(tsh_real *x, int64_t n, double by) {
    const tsh_real divisor = TSHI_R(by);
    if (!(by > 0)) return;
    for (int64_t i = 0; i < n; i++) x[i] /= divisor;
}

/* Copies the result of a bucket to its leaves: gradients, or (all-gather) values of parameters. */
static void tshi_bucket_copy_back(tsh_ctx *ctx, tshi_bucket *b) {
    const int rank = ctx->dp.rank, scatters = b->kind == TSH_REDUCE_SCATTER;
    const int gathers = b->kind == TSH_ALLGATHER;
    tsh_tensor *only = tshi_bucket_only(b);
    tsh_real *own = b->own ? (tsh_real *)tshi_mem_data(b->own) : NULL;
    /* in_place 1: the message was the leaf's own memory, so its result needs no copy */
    int k, in_place = only && (gathers || !only->gr.block);
    if (ctx->buckets.summed)
        tshi_bucket_divide(scatters ? own : tshi_bucket_row(b, 0),
                           scatters ? b->counts[rank] : tshi_bucket_elements(ctx, b),
                           ctx->dry ? 0 : ctx->buckets.weight);
    if (in_place && !gathers) { /* the message was the gradient's memory: returns it to the leaf */
        only->gr.block = b->block;
        b->block->refs++;
    }
    for (const tshi_bucket_entry *p = b->first; p && !gathers; p = p->next) {
        tshi_block **grad = &p->leaf->gr.block;
        const size_t bytes = tshi_dtype_reals(tsh_local_numel(p->leaf));
        const int kind = tshi_tensor_grad_kind(p->leaf);
        if (!*grad && !(*grad = tshi_mem_alloc(ctx, kind, bytes))) return;
    }
    for (k = 0; k < ctx->dp.size; k++) /* copies rows, except those that are in place already */
        if (scatters ? k == rank : !in_place && !(gathers && k == rank))
            tshi_bucket_copy(b, k, scatters ? own : tshi_bucket_row(b, k), 1);
    for (const tshi_bucket_entry *p = b->first; p && !gathers; p = p->next) p->leaf->gr.live = 1;
}

/* Starts the collectives that were not started yet, waits for all, and copies their results to the
 * leaves. */
static void tshi_bucket_end(tsh_ctx *ctx) {
    tshi_buckets *all = &ctx->buckets;
    /* closes the buckets that could still take leaves */
    if (all->open[0]) tshi_bucket_close(ctx, all->open[0]);
    if (all->open[1]) tshi_bucket_close(ctx, all->open[1]);
    for (tshi_bucket *b = all->first; b; b = b->next) tshi_bucket_send(ctx, b);
    tshi_error_report(ctx); /* other ranks, waiting for this rank's bucket, learn of its error */
    while (all->awaited) tshi_bucket_await(ctx);
    (void)tshi_error_comm(ctx, tsh_wait(&ctx->dp, all->weight_req), tshi_bucket_what);
    for (tshi_bucket *b = all->first; b; b = b->next) {
        for (tshi_bucket_entry *p = b->first; p; p = p->next) p->leaf->in_bucket = 0;
        if (ctx->error.code == TSH_OK) tshi_bucket_copy_back(ctx, b);
        tshi_mem_release(ctx, b->block);
        tshi_mem_release(ctx, b->own);
        for (tshi_bucket_entry *p = b->first; p; p = p->next) tshi_tensor_unref(p->leaf);
    }
    tshi_bucket_clear(all);
}
