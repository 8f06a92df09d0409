/* ========================================================================== */
/* >>attention-run                            MARK: - attention-run (private) */
/* Which thread computes which heads and tiles, in which memory.              */
/* Needs: >>attention-back >>attention-segments.                              */
/* ========================================================================== */

/* What the threads of a rank share while they compute attention. The work, tiles in forward and
 * heads of k in backward, is divided into pieces, one per thread, each with scratch memory of its
 * own. */
typedef struct tshi_heads {
    tshi_head head;             /* what all heads have in common; each piece has a copy of it */
    tsh_tensor *const *in;      /* the op's inputs: q, k, v */
    tsh_tensor *out;            /* shape (B, H, Tq, D) */
    void *value[4];             /* values of q, k, v, out */
    tsh_real *grad[4];          /* gradients of q, k, v, out; NULL: in forward, or not needed */
    const tsh_real *sinks;      /* values of the sinks, or NULL */
    /* contribution of each query to the gradient of its sink, shape (local B, local H, Tq); NULL:
     * not needed */
    tsh_real *sink_grads;
    /* of each query its largest score m, then log l, where l is its sum of e^(s - m): shape (2,
     * local B, local H, Tq) */
    tsh_real *stats;
    tsh_real *scratch;          /* scratch memory of the pieces, `each` elements apart */
    /* scratch memory of each piece: elements of `scratch`; bytes that tshi_gemm_run gets */
    int64_t each, each_product;
    int pieces;                 /* number of pieces, at most one per thread */
    /* keys of each row of a ragged batch, shape (B); NULL: all rows have as many keys */
    const tshi_keys *rows;
    /* the parts that rows of several sequences are cut into, and the values of `segments`, which
     * says which position is in which sequence; NULL: rows are not cut. In what follows, a row of
     * the batch is then one of these parts. */
    const tshi_row_part *parts;
    const void *segments;
    int padded;    /* 1: some positions are padding: their segment is negative */
    int64_t batch; /* number of rows of the batch on this rank; with segments, of parts */
    /* 1: Tq is 1, and the query heads that share a head of k are the queries of one tile */
    int merged;
    /* 1: later tiles see more keys, so a unit of work in forward is an early and a late tile */
    int balanced;
    /* order in which pairs of a batch row and a head of k are computed: 1: all rows for one head,
     * then for the next head; 0: all heads for one row, then for the next row */
    int by_head;
    /* number of consecutive items (see tshi_attention_piece) that one thread computes, in order,
     * because they add to the same gradient of a mask */
    int64_t together;
    /* local heads of k that this rank's query heads use: the first one, and how many */
    int64_t first, groups;
    /* per head: tiles; units of work in forward, each one tile or, if `balanced` is 1, two tiles */
    int64_t tiles, units;
    tshi_block *block;          /* the memory of `scratch` */
} tshi_heads;

/* Returns 1 if threads that compute different heads may add to the gradients of a and b at the same
 * time: these lie in different memory, or a and b are the same view, or are views of one base whose
 * heads do not overlap. */
static int tshi_attention_apart(const tsh_tensor *a, const tsh_tensor *b) {
    const tsh_tensor *low = a->offset <= b->offset ? a : b, *high = low == a ? b : a;
    const int64_t *step = a->stride, distance = high->offset - low->offset;
    /* low_end, high_end: distance from the first to the last element of one position with all its
     * heads, in low and in high */
    const int64_t low_end = (low->local[1] - 1) * step[1] + (low->local[3] - 1) * step[3];
    const int64_t high_end = (high->local[1] - 1) * step[1] + (high->local[3] - 1) * step[3];
    if (a->base != b->base || !a->base->requires_grad) return 1;
    if (memcmp(step, b->stride, 4 * sizeof *step) != 0) return 0;
    if (!distance) return a->local[1] == b->local[1];
    if (low_end >= distance) return 0;
    /* the heads of a and b at one position must not reach those of the next batch row (d = 0) or of
     * the next position (d = 2) */
    for (int d = 0; d <= 2; d += 2)
        if (a->local[d] > 1 && distance + high_end >= step[d]) return 0;
    return 1;
}

/* Returns how many elements of scratch a piece needs in forward (back 0) or backward (1). Unless
 * `base`, where the scratch begins, is NULL, sets h's pointers to their places in it. */
static int64_t tshi_attention_place(tshi_head *h, tsh_real *base, int back) {
    const int64_t wide = tshi_attention_wide(h->d), kept = h->few ? 0 : h->blocks * h->keys;
    const int64_t words = tshi_attention_words(h, h->d), some = tshi_attention_words(h, kept);
    const int64_t row = tshi_attention_row_words(h);
    const int64_t packed = back * h->pairs * tshi_attention_words(h, h->rows);
    const struct {
        tsh_real **to;
        int64_t size; /* in elements of tsh_real; 0: not needed */
    } parts[] = {{&h->rows_q, h->few ? 0 : h->rows * row},
                 {&h->back.rows_do, back * h->rows * row},
                 {&h->back.columns_q, packed * wide},
                 {&h->back.columns_do, packed * wide},
                 {&h->back.columns_p, packed * h->pitch},
                 {&h->back.columns_s, packed * h->pitch},
                 {&h->s, h->strip * h->pitch},
                 {&h->back.t, back * h->rows * h->pitch},
                 {&h->back.derivative, back * (h->more->cap > 0) * h->strip * h->pitch},
                 {&h->sum, h->rows * wide},
                 {&h->row, 2 * tshi_attention_wide(h->rows)},
                 {&h->keys_k, kept * words},
                 {&h->keys_v, back * kept * words},
                 {&h->features_k, back * some * wide},
                 {&h->features_v, !back * some * wide},
                 {&h->back.sum_k, back * kept * wide},
                 {&h->back.sum_v, back * kept * wide}};
    int64_t at = 0;
    for (size_t p = 0; p < sizeof parts / sizeof *parts; p++) {
        if (base) *parts[p].to = parts[p].size ? base + at : NULL;
        at += tshi_base_ceil(parts[p].size, 16) * 16; /* rounded up to whole cache lines */
    }
    return at;
}

/* Sets the sizes of tiles, how many blocks of keys are packed and kept, and the numbers of tiles
 * and units per head, for forward (back 0) or backward (1). */
static void tshi_attention_plan(tshi_heads *all, int back) {
    const tsh_tensor *q = all->in[0], *k = all->in[1];
    tshi_head *h = &all->head;
    const int64_t heads = q->local[1], group = k->dim[1] ? q->dim[1] / k->dim[1] : 1;
    /* queries that are divided into tiles: those of a head or, if merged, of the heads that share a
     * head of k */
    const int64_t rows = all->merged ? group : h->tq;
    int64_t visits; /* number of tiles that use a head of k */
    h->rows = tshi_base_min(rows, back && h->pairs ? TSHI_TILE_ROWS_PAIRS : TSHI_TILE_ROWS);
    if (all->merged) h->rows = group;
    h->strip = back && !h->pairs ? h->rows : tshi_base_min(h->rows, h->pairs && h->kernel->tiles
                                                                        ? h->kernel->mr
                                                                        : TSHI_TILE_STRIP);
    h->keys = tshi_base_min(tshi_attention_wide(h->tk),
                            back ? TSHI_TILE_KEYS_BACK : TSHI_TILE_KEYS);
    h->pitch = h->keys + 16;
    /* tiles of a head; of the longest part, if rows are cut into parts */
    all->tiles = h->rows ? tshi_base_ceil(rows, h->rows) : 0;
    all->units = all->balanced ? (all->tiles + 1) / 2 : all->tiles;
    visits = all->tiles * (all->merged ? 1 : tshi_base_min(group, heads));
    h->few = !back && !all->parts && visits <= 1 && h->rows <= h->kernel->mr &&
             h->d <= h->kernel->kc;
    h->blocks = h->keys ? tshi_base_ceil(h->tk, h->keys) : 0;
    if (!back && visits <= 1) h->blocks = tshi_base_min(h->blocks, 1);
}

/* Chooses the kernels of the online softmax and, if back is 1, whether backward's kernels scale dS,
 * the gradient of the scores, and round it. */
static void tshi_attention_choose(tshi_head *h, int back) {
    const tsh_tensor *mask = h->more->mask;
    h->back.raw = back && (h->more->cap > 0 || (mask && mask->base->requires_grad));
    h->back.ds_scale = h->back.raw ? TSHI_R(1) : TSHI_R(h->more->scale);
    h->rounded = h->pairs && !h->few && !h->more->dropout && !h->back.raw;
#if TSHI_X86 && TSHI_GEMM_FLOAT
    if (h->ctx->isa == TSHI_ISA_AVX512) h->most = tshi_attention_most_avx512;
    if (h->ctx->isa == TSHI_ISA_AVX512) h->exps = tshi_attention_exps_avx512;
#endif
#if TSHI_GEMM_BF16S
    if (h->pairs) h->most = tshi_attention_most_avx512;
    if (h->pairs) h->exps = h->rounded ? tshi_attention_exps_pairs : tshi_attention_exps_bf16;
    if (h->pairs) h->put = tshi_attention_put_bf16;
#endif
}

/* Sets all->together, the number of items of backward that one thread computes in order. Where the
 * mask broadcasts, they add to the same elements of its gradient, in an order that must not depend
 * on the number of threads. */
static void tshi_attention_share(tshi_heads *all, int back) {
    const tshi_attention *more = all->head.more;
    /* 1: batch rows add to the same elements of the mask's gradient; parts of a row may, too, as
     * the mask may broadcast over queries */
    const int shared = !more->mask_stride[0] || all->parts;
    all->together = 1;
    if (!back || !more->mask || !more->mask->base->requires_grad) return;
    all->by_head = shared && more->mask_stride[1];
    if (all->by_head)
        all->together = all->batch;
    else if (!more->mask_stride[1])
        all->together = shared ? all->batch * all->groups : all->groups;
    if (all->together < 1) all->together = 1;
}

/* Returns the size in bytes of the table at the beginning of aux (tshi_attention_aux) that says
 * which keys rows have: a tshi_row_part per part, a tshi_keys per row, or nothing. */
static size_t tshi_attention_aux_rows(const tsh_tensor *q, const tshi_attention *more) {
    return more->segments ? (size_t)more->runs * sizeof(tshi_row_part)
           : more->ragged ? (size_t)q->dim[0] * sizeof(tshi_keys)
                          : 0;
}

/* Sets all->rows or all->parts, and all->stats, to their places in aux, which tshi_attention_aux
 * has allocated. Also sets the number of rows, and h->tq and h->tk to the queries and keys of the
 * longest row. */
static void tshi_attention_take(tshi_heads *all, const tshi_attention *more, tshi_block *aux) {
    const tsh_tensor *q = all->in[0];
    tshi_head *h = &all->head;
    char *at = (char *)tshi_mem_data(aux);
    all->stats = (tsh_real *)(void *)(at + tshi_attention_aux_rows(q, more));
    all->batch = q->local[0];
    h->tq = q->dim[2];
    h->tk = h->width = all->in[1]->dim[2];
    if (more->ragged) all->rows = (const tshi_keys *)(void *)at;
    if (!more->segments) return;
    all->parts = (const tshi_row_part *)(void *)at;
    all->batch = more->parts;
    h->tq = 0;
    for (int64_t p = 0; p < more->parts; p++) {
        if (all->parts[p].count > h->tq) h->tq = all->parts[p].count;
        all->padded |= all->parts[p].kind == TSHI_ROW_PART_PADDING;
    }
    h->tk = h->tq;
}

/* Fills in the fields of *all, except those of values and gradients, and allocates scratch, for
 * forward (back 0) or backward (1). After an error tshi_attention_run computes nothing. */
static void tshi_attention_begin(tshi_heads *all, tsh_tensor *const *in, tsh_tensor *out,
                                 const tshi_attention *more, tshi_block *aux, int back) {
    enum { MIN_WORK = 1 << 18 };       /* least number of multiply-adds of Q K^T per thread */
    tsh_tensor *q = in[0], *k = in[1]; /* shapes (B, H, Tq, D), (B, Hkv, Tk, D) */
    tshi_head *h = &all->head;
    int64_t heads = q->local[1], items, seen, product[2];
    memset(all, 0, sizeof *all);
    all->in = in;
    all->out = out;
    h->ctx = q->ctx;
    h->kernel = q->ctx->gemm_kernel;
    /* the softmax writes pairs of bf16 on x86 only */
    h->pairs = TSHI_GEMM_BF16S && h->kernel->pairs && q->dtype == TSH_BF16 &&
               k->dtype == TSH_BF16 && in[2]->dtype == TSH_BF16;
#if TSHI_GEMM_AMX
    /* without pairs of bf16, the AVX-512 kernel is chosen instead of AMX: its tiles have fewer rows
     * (mr) */
    if (!h->pairs && h->kernel->tiles) h->kernel = &tshi_gemm_kernel_avx512;
#endif
    h->more = more;
    tshi_attention_take(all, more, aux);
    h->d = q->dim[3];
    all->balanced = more->causal && !more->window;
    if (heads) all->first = tshi_attention_kv(q, k, 0);
    if (heads) all->groups = tshi_attention_kv(q, k, heads - 1) - all->first + 1;
    all->merged = h->tq == 1 && heads && !all->parts &&
                  tshi_tensor_global(q, 1, heads - 1) - tshi_tensor_global(q, 1, 0) == heads - 1;
    tshi_attention_plan(all, back);
    tshi_attention_choose(h, back);
    tshi_attention_share(all, back);
    items = all->batch * all->groups * (back ? 1 : all->units) / all->together;
    seen = more->window && more->window < h->tk ? tshi_base_min(h->tk, more->window + h->rows)
                                                : h->tk;
    all->pieces = tshi_team_parts(q->ctx, q->local[0] * heads * q->dim[2] * seen * h->d,
                                  MIN_WORK);
    all->pieces = (int)tshi_base_min(all->pieces, items);
    if (all->pieces < 1 ||
        (back && (!tshi_attention_apart(q, k) || !tshi_attention_apart(q, in[2]))))
        all->pieces = 1; /* one thread: there is too little work, or gradients overlap */
    if (h->few) {
        product[0] = (int64_t)tshi_gemm_scratch(h->kernel, h->rows, h->keys, h->d, h->keys, 1);
        product[1] = (int64_t)tshi_gemm_scratch(h->kernel, h->rows, h->d, h->keys, h->d, 1);
        all->each_product = tshi_base_ceil(product[0] > product[1] ? product[0] : product[1], 64);
        all->each_product *= 64; /* bytes, rounded up to whole cache lines */
        h->scratch = tshi_matmul_scratch(q->ctx, (size_t)(all->each_product * all->pieces));
    }
    all->each = tshi_attention_place(h, NULL, back);
    all->block = tshi_mem_alloc(q->ctx, TSH_MEM_STEP, tshi_dtype_reals(all->each * all->pieces));
    if (all->block) all->scratch = (tsh_real *)tshi_mem_data(all->block);
}

/* Returns the matrix (T, D) of batch row b and head a in an array (B, H, T, D), from position i on.
 * If `merged` is 1, T is 1, and the rows of the matrix are head a and the heads after it. data may
 * be NULL. */
static tshi_matrix tshi_attention_matrix(void *data, const tsh_tensor *t, tsh_dtype dtype,
                                         int64_t b, int64_t a, int64_t i, int merged) {
    const int64_t at = b * t->stride[0] + a * t->stride[1] + i * t->stride[2];
    return tshi_gemm_matrix_of(data ? (char *)data + at * tshi_dtypes[dtype].size : NULL, dtype,
                               t->stride[merged ? 1 : 2], t->stride[3]);
}

/* Sets which keys the queries of row b see. b is the index of a local row of the batch or, if rows
 * are cut into parts, of a part, whose number of queries is set as well. */
static void tshi_attention_span(const tshi_heads *all, tshi_head *h, int64_t b) {
    const tshi_row_part *part = all->parts ? &all->parts[b] : NULL;
    const tshi_keys none = {0, 0}, own = {0, part ? part->count : 0};
    const tshi_keys keys = part        ? part->kind == TSHI_ROW_PART_PADDING ? none : own
                           : all->rows ? all->rows[tshi_tensor_global(all->in[0], 0, b)]
                                       : h->more->keys;
    const int64_t place = keys.past + h->more->behind; /* position of query 0 */
    /* a window that hides no key: more than the distance of any query from any key */
    const int64_t beyond = all->in[0]->dim[2] + place + keys.added + 1;
    const int64_t window = h->more->window ? tshi_base_min(h->more->window, beyond) : beyond;
    if (part) h->tq = part->count;
    h->tk = keys.past + keys.added;
    h->moves = h->more->causal || h->more->window;
    h->from = h->moves ? place - window + 1 : 0;
    h->to = h->more->causal ? place + 1 : h->moves ? place + window : h->tk;
}

/* Returns the index at which this rank's shard of t, a mask or sinks, has a head. local: the head's
 * index among the heads of this rank; global: among those of all ranks. */
static int64_t tshi_attention_own_head(const tsh_tensor *t, int64_t local, int64_t global) {
    return t->layout.kind == TSH_SHARDED ? local : global;
}

/* Sets h to query head a of row `item` (see tshi_attention_span), local indices; if merged, to the
 * `count` heads from a on. */
static void tshi_attention_pick(const tshi_heads *all, tshi_head *h, int64_t item, int64_t a,
                                int64_t count) {
    const tsh_tensor *q = all->in[0], *k = all->in[1], *v = all->in[2], *out = all->out;
    const tshi_row_part *part = all->parts ? &all->parts[item] : NULL;
    /* row of the batch; the item's first position in it */
    const int64_t b = part ? part->row : item, i = part ? part->first : 0;
    const int64_t c = tshi_attention_kv(q, k, a); /* the head of k and v that head a uses */
    const int64_t batch = tshi_tensor_global(q, 0, b), head = tshi_tensor_global(q, 1, a);
    const int64_t *stride = h->more->mask_stride, tq = q->dim[2];
    const int merged = all->merged;
    h->first = (uint64_t)(((batch * q->dim[1] + head) * tq + i) * h->width + i);
    h->mask.first = batch * stride[0] + i * (stride[2] + stride[3]);
    if (h->more->mask) h->mask.first += tshi_attention_own_head(h->more->mask, a, head) * stride[1];
    h->mask.row = stride[merged ? 1 : 2];
    if (h->more->sinks) {
        const int64_t step = h->more->sinks->stride[0];
        h->sinks.scores = all->sinks + tshi_attention_own_head(h->more->sinks, a, head) * step;
        h->sinks.step = merged ? step : 0;
    }
    if (all->sink_grads) h->sinks.grads = all->sink_grads + (b * q->local[1] + a) * tq + i;
    /* shapes (tq): m, each query's largest score; log l, where l is its sum of e^(s - m) */
    h->max = all->stats + (b * q->local[1] + a) * tq + i;
    h->log_sum = h->max + q->local[0] * q->local[1] * tq;
    h->q = tshi_attention_matrix(all->value[0], q, q->dtype, b, a, i, merged); /* shape (tq, d) */
    h->k = tshi_attention_matrix(all->value[1], k, k->dtype, b, c, i, 0);      /* shape (tk, d) */
    h->v = tshi_attention_matrix(all->value[2], v, v->dtype, b, c, i, 0);      /* shape (tk, d) */
    h->o = tshi_attention_matrix(all->value[3], out, out->dtype, b, a, i, merged);
    tshi_attention_span(all, h, item);
    h->segments = NULL;
    if (part && part->kind == TSHI_ROW_PART_MIXED) {
        h->segment_step = h->more->segments->stride[1];
        h->segments = tshi_attention_segments(q, h->more->segments, all->segments, b) +
                      i * h->segment_step;
    }
    if (merged) h->tq = count;
    if (merged) h->moves = 0;  /* each head's only query sees [from, to) */
    if (!all->grad[3]) return; /* forward: no gradients */
    h->back.dq = tshi_attention_matrix(all->grad[0], q, TSH_REAL, b, a, i, merged);
    h->back.dk = tshi_attention_matrix(all->grad[1], k, TSH_REAL, b, c, i, 0);
    h->back.dv = tshi_attention_matrix(all->grad[2], v, TSH_REAL, b, c, i, 0);
    h->back.dout = tshi_attention_matrix(all->grad[3], out, TSH_REAL, b, a, i, merged);
}

/* Computes the head that h is set to: in backward all tiles; in forward the tile of index `unit`
 * and, if balanced, also the tile of index `unit` counted from the end, so that all units are the
 * same amount of work. A part that is shorter than the longest has fewer units, and the others do
 * nothing. */
static void tshi_attention_head(const tshi_heads *all, tshi_head *h, int64_t unit) {
    const int back = all->grad[3] != NULL, pair = !back && all->balanced;
    const int64_t tiles = h->rows ? tshi_base_ceil(h->tq, h->rows) : 0;
    int64_t t = back ? 0 : unit;
    const int64_t step = back ? 1 : tiles - 1 - 2 * unit;
    if (pair && step < 0) return; /* an earlier unit has computed this tile */
    for (int64_t done = 0; t < tiles; t += step, done++) {
        const int64_t i = t * h->rows, m = tshi_base_min(h->rows, h->tq - i);
        if (back)
            tshi_attention_backward_tile(h, i, m);
        else
            tshi_attention_forward_tile(h, i, m);
        if (!back && (done || !pair || step <= 0)) return;
    }
}

/* Sets *b to the batch row and *c to the head of k of pair number `pair`, among all pairs of a row
 * and a head. */
static void tshi_attention_pair(const tshi_heads *all, int64_t pair, int64_t *b, int64_t *c) {
    *b = all->by_head ? pair % all->batch : pair / all->groups;
    *c = all->first + (all->by_head ? pair / all->batch : pair % all->groups);
}

/* Makes h prefetch the matrices of `pair`, the number of a batch row and a head of k
 * (tshi_attention_pair), and of their gradients, in the order in which they are read. */
static void tshi_attention_next(const tshi_heads *all, tshi_head *h, int64_t pair) {
    const tsh_tensor *q = all->in[0], *k = all->in[1];
    tshi_head next = *h;
    int64_t a = 0, b, c;
    tshi_attention_pair(all, pair, &b, &c);
    while (tshi_attention_kv(q, k, a) != c) a++;
    tshi_attention_pick(all, &next, b, a, 1);
    h->left = 0;
    h->ahead[h->left++] = next.o;
    if (all->grad[3]) h->ahead[h->left++] = next.back.dout;
    if (all->grad[1]) h->ahead[h->left++] = next.back.dk;
    if (all->grad[2]) h->ahead[h->left++] = next.back.dv;
    if (all->grad[0]) h->ahead[h->left++] = next.back.dq;
    h->ahead[h->left++] = next.q;
    h->ahead[h->left++] = next.v;
    h->ahead[h->left++] = next.k;
    h->walk.last = h->walk.at;
    h->walk.left = 0;
}

/* Prepares the sums of dK and dV of the head of k that h is set to: zeroes them, unless the tiles
 * can overwrite them. */
static void tshi_attention_clear(const tshi_heads *all, tshi_head *h) {
    const int64_t blocks = h->keys ? tshi_base_ceil(h->tk, h->keys) : 0;
    const int64_t length = blocks * h->keys * tshi_attention_wide(h->d);
    const size_t size = (size_t)length * sizeof *h->back.sum_k;
    h->back.fresh = all->tiles > 0 && !all->rows && !h->more->window;
    if (!size || h->back.fresh) return;
    memset(h->back.sum_k, 0, size);
    memset(h->back.sum_v, 0, size);
}

/* Returns the first item (see tshi_attention_piece) of a thread's piece if rows are cut into parts;
 * for piece `all->pieces`, the end of all items. Pieces get about the same work, which for a part
 * is the square of its length. */
static int64_t tshi_attention_share_of(const tshi_heads *all, int64_t units, int piece) {
    const double groups = (double)all->groups;
    double total = 0, before; /* before: work of earlier pieces, less that of the parts so far */
    for (int64_t p = 0; p < all->batch; p++)
        total += (double)all->parts[p].count * (double)all->parts[p].count * groups;
    before = total * piece / all->pieces;
    for (int64_t p = 0; p < all->batch && piece < all->pieces; p++) {
        const double n = (double)all->parts[p].count, pairs = before / (n * n);
        if (pairs < groups) {
            const int64_t tiles = tshi_base_ceil(all->parts[p].count, all->head.rows);
            const int64_t own = units == 1 ? 1 : all->balanced ? (tiles + 1) / 2 : tiles;
            const int64_t c = (int64_t)pairs; /* whole heads of k; the rest is units of the next */
            return (p * all->groups + c) * units + (int64_t)((pairs - (double)c) * (double)own);
        }
        before -= n * n * groups;
    }
    return all->batch * all->groups * units;
}

/* A tshi_team_fn: computes items [from, to). In backward an item is a pair of a batch row and a
 * head of k, since all query heads that share a head of k add to the same gradient; in forward an
 * item is one unit of such a pair. */
static void tshi_attention_piece(void *job, int piece, int64_t from, int64_t to) {
    const tshi_heads *all = (const tshi_heads *)job;
    const tsh_tensor *q = all->in[0], *k = all->in[1];
    const int back = all->grad[3] != NULL;
    const int64_t units = back ? 1 : all->units;
    tshi_head h = all->head;
    int64_t a, end = 0, last = -1, pair = -1; /* query heads [a, end) share a head of k */
    if (all->parts && all->together == 1) {
        from = tshi_attention_share_of(all, units, piece);
        to = tshi_attention_share_of(all, units, piece + 1);
    }
    (void)tshi_attention_place(&h, all->scratch + piece * all->each, back);
    if (h.few) h.scratch += piece * all->each_product;
    h.walk.at = h.walk.first = h.walk.last = (const char *)h.rows_q; /* nothing to prefetch yet */
    h.walk.step = h.walk.along = h.walk.left = 0;
    if (h.pairs && !h.few && h.kernel->tiles) h.kernel->tiles(1);
    for (; from < to; from++) {
        int64_t b, c, begin;
        tshi_attention_pair(all, from / units, &b, &c);
        if (pair != from / units) h.packed = 0; /* a new pair: none of its keys is packed yet */
        pair = from / units;
        for (a = c > last ? end : 0; tshi_attention_kv(q, k, a) != c;) a++;
        last = all->by_head ? INT64_MAX : c;
        for (end = a; end < q->local[1] && tshi_attention_kv(q, k, end) == c;) end++;
        for (begin = a; a < end; a += all->merged ? end - a : 1) {
            tshi_attention_pick(all, &h, b, a, end - a);
            if (back && a == begin) tshi_attention_clear(all, &h);
            if (!h.few && from % units == 0 && from + units < to)
                tshi_attention_next(all, &h, from / units + 1);
            tshi_attention_head(all, &h, from % units);
            h.back.fresh = 0;
        }
        if (back) tshi_attention_backward_done(&h, h.back.sum_k, h.back.dk, h.back.over[1]);
        if (back) tshi_attention_backward_done(&h, h.back.sum_v, h.back.dv, h.back.over[2]);
    }
    if (h.pairs && !h.few && h.kernel->tiles) h.kernel->tiles(0);
}

/* Returns the floating-point operations of the products of all heads: per visible pair of query and
 * key, two dot products of a head's length in forward (Q K^T and P V) and five in backward. */
static TSHI_COLD double tshi_attention_flops(const tshi_heads *all) {
    const tsh_tensor *q = all->in[0];
    tshi_head h = all->head;
    double pairs = 0; /* visible pairs of a query and a key of one head, summed over the batch */
    for (int64_t b = 0; b < all->batch; b++) {
        tshi_attention_span(all, &h, b);
        for (int64_t i = 0; i < h.tq; i++) {
            const int64_t seen = tshi_attention_visible(&h, i) - tshi_attention_hidden(&h, i);
            pairs += seen > 0 ? (double)seen : 0;
        }
    }
    return pairs * (double)q->local[1] * 2 * (double)h.d * (all->grad[3] ? 5 : 2);
}

/* Computes all heads on the rank's threads, then releases scratch. */
static void tshi_attention_run(tshi_heads *all) {
    tsh_ctx *ctx = all->head.ctx;
    if (ctx->trace) ctx->trace->flops += tshi_attention_flops(all);
    if (all->head.ctx->error.code == TSH_OK)
        tshi_team_run(ctx, all->pieces,
                      all->batch * all->groups * (all->grad[3] ? 1 : all->units),
                      all->together, tshi_attention_piece, all);
    tshi_mem_release(all->head.ctx, all->block);
}

/* Returns 1 if backward writes each element of the gradient of input i (q, k or v), so that it need
 * not be zeroed first: all local heads and positions of k are used, and no other input has the same
 * base. */
static int tshi_attention_covers(const tshi_heads *all, int i) {
    tsh_tensor *const *in = all->in;
    const tsh_tensor *base = in[i]->base;
    return base != in[(i + 1) % 3]->base && base != in[(i + 2) % 3]->base &&
           (i == 0 || (all->groups == in[1]->local[1] && !all->rows && !all->head.more->window &&
                       !all->padded));
}
