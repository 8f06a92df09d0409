/* ========================================================================== */
/* >>op-attention                              MARK: - op-attention (private) */
/* softmax(Q K^T) V in tiles (FlashAttention-2, Dao 2023): options, the op.   */
/* Needs: >>op-map >>op-view >>attention-run.                                 */
/* ========================================================================== */

/* For each head, adds the contributions of all queries (all->sink_grads) to the gradient of its
 * sink. */
static void tshi_attention_backward_sinks(const tshi_heads *all, const tshi_dest *dest) {
    const tsh_tensor *q = all->in[0], *sinks = all->head.more->sinks;
    for (int64_t a = 0; a < q->local[1]; a++) {
        const int64_t head = sinks->layout.kind == TSH_SHARDED ? a : tshi_tensor_global(q, 1, a);
        tsh_real sum = 0;
        for (int64_t b = 0; b < q->local[0]; b++)
            for (int64_t i = 0; i < q->dim[2]; i++)
                sum += all->sink_grads[(b * q->local[1] + a) * q->dim[2] + i];
        dest->data[head * dest->stride[0]] += sum;
    }
}

/* Backward: computes dQ, dK, dV, and the gradients of mask and sinks; skips those that are not
 * needed. */
static void tshi_attention_backward(tshi_node *node) {
    const tsh_tensor *q = node->in[0];
    tshi_block *grads = NULL; /* the memory of all.sink_grads */
    tshi_heads all;
    tshi_dest dest, sinks;
    tshi_attention_begin(&all, node->in, node->out, (const tshi_attention *)node->params,
                         node->aux, 1);
    if (all.parts) all.segments = tshi_tape_saved(node, 5);
    if (all.head.more->mask) all.head.mask.values = tshi_tape_saved(node, 3);
    if (all.head.more->mask && tshi_tape_dest_zeroed(node, 3, &dest))
        all.head.mask.grad = dest.data;
    if (all.head.more->sinks) all.sinks = (const tsh_real *)tshi_tape_saved(node, 4);
    if (all.head.more->sinks && tshi_tape_dest_zeroed(node, 4, &sinks))
        grads = tshi_mem_alloc(q->ctx, TSH_MEM_STEP,
                               tshi_dtype_reals(q->local[0] * q->local[1] * q->dim[2]));
    if (grads) all.sink_grads = (tsh_real *)tshi_mem_data(grads);
    for (int i = 0; i < 3; i++) {
        all.value[i] = tshi_tape_saved(node, i);
        if (tshi_attention_covers(&all, i) ? tshi_tape_dest(node, i, &dest)
                                           : tshi_tape_dest_zeroed(node, i, &dest)) {
            all.grad[i] = dest.data;
            all.head.back.over[i] = !dest.add;
        }
    }
    all.value[3] = tshi_tape_saved(node, node->n);
    all.grad[3] = tshi_tape_grad(node); /* dO, (B, H, Tq, D) */
    tshi_attention_run(&all);
    if (grads && q->ctx->error.code == TSH_OK) tshi_attention_backward_sinks(&all, &sinks);
    tshi_mem_release(q->ctx, grads);
}

/* Checks the shapes of q (B, H, Tq, D), k and v (B, Hkv, Tk, D). Returns 0 after an error. */
static int tshi_attention_shapes(tsh_tensor *const *in) {
    tsh_tensor *q = in[0], *k = in[1];
    char tq[TSHI_TEXT_SIZE], tk[TSHI_TEXT_SIZE], tv[TSHI_TEXT_SIZE];
    int d, fits = q->ndim == 4 && k->ndim == 4 && in[2]->ndim == 4;
    for (d = 0; d < 4 && fits; d++)
        fits = k->dim[d] == in[2]->dim[d] && (d == 1 || d == 2 || q->dim[d] == k->dim[d]);
    if (!fits)
        (void)tsh_fail(
            q->ctx, TSH_ERR_SHAPE,
            "tsh_attention: q %s, k %s, v %s; takes (B, H, Tq, D) and twice (B, Hkv, Tk, D)",
            tshi_tensor_text(q, tq), tshi_tensor_text(k, tk), tshi_tensor_text(in[2], tv));
    else if (k->dim[1] ? q->dim[1] % k->dim[1] : q->dim[1])
        (void)tsh_fail(
            q->ctx, TSH_ERR_SHAPE,
            "tsh_attention: q %s has %lld heads, no multiple of the %lld of k %s; as many "
            "query heads must share each head of k and v",
            tshi_tensor_text(q, tq), (long long)q->dim[1], (long long)k->dim[1],
            tshi_tensor_text(k, tk));
    return q->ctx->error.code == TSH_OK;
}

/* Returns 1 if tensor t, an option of the call, belongs to the ctx of in (q, k, v) and has values;
 * else 0 and an error. names: those of q, k, v and t, for the error. */
static int tshi_attention_holds(const char *names, tsh_tensor *const *in, tsh_tensor *t) {
    tsh_tensor *all[4];
    memcpy(all, in, 3 * sizeof *all);
    all[3] = t;
    return tshi_tensor_check("tsh_attention", names, all, 4) != NULL;
}

/* Checks the mask, casts it to tsh_real or i32, and sets more->mask and its strides. keys: number
 * of keys, cached ones included. Returns 0 after an error. */
static int tshi_attention_take_mask(tshi_attention *more, tsh_tensor *const *in, int64_t keys,
                                    tsh_tensor *mask) {
    char text[TSHI_TEXT_SIZE], sizes[TSHI_TEXT_SIZE];
    int64_t dim[4]; /* the shape to which the mask broadcasts: (B, H, Tq, keys) */
    const tsh_tensor *q = in[0];
    int d, fits = mask->ndim <= 4;
    if (!tshi_attention_holds("q k v mask", in, mask)) return 0;
    if (fits && mask->layout.kind != TSH_REPLICATED) {
        d = mask->ndim - 3; /* which dimension of the mask is the heads; negative: it has none */
        fits = d >= 0 && mask->dim[d] == q->dim[1] && tshi_rule_is_sharded(q, 1) &&
               tshi_rule_is_sharded(mask, d) &&
               tshi_layout_same_shards(&q->layout, &mask->layout, q->dim[1], &q->ctx->deal);
    }
    memcpy(dim, q->dim, sizeof dim);
    dim[3] = keys;
    for (d = 0; d < 4 && fits; d++) {
        int64_t length = d < 4 - mask->ndim ? 1 : mask->dim[d - (4 - mask->ndim)];
        fits = length == 1 || length == dim[d];
    }
    if (!fits)
        return tsh_fail(q->ctx, TSH_ERR_SHAPE,
                        "tsh_attention: mask %s %s; takes one of %s or i32 that broadcasts to %s, "
                        "replicated or sharded as the heads of q",
                        tshi_dtype_name(mask->dtype), tshi_tensor_text(mask, text),
                        tshi_dtype_name(TSH_REAL), tshi_tensor_sizes(dim, 4, sizes)) == TSH_OK;
    more->mask = mask = tsh_cast(mask, tshi_dtypes[mask->dtype].floating ? TSH_REAL : TSH_I32);
    for (d = 0; d < 4 && mask; d++) {
        int own = d - (4 - mask->ndim); /* the mask's dimension for d; negative: none */
        more->mask_stride[d] = own < 0 || mask->dim[own] == 1 ? 0 : mask->stride[own];
    }
    return mask != NULL;
}

/* Checks the sinks, casts them to tsh_real, and sets more->sinks. Returns 0 after an error. */
static int tshi_attention_take_sinks(tshi_attention *more, tsh_tensor *const *in,
                                     tsh_tensor *sinks) {
    const tsh_tensor *q = in[0];
    char text[TSHI_TEXT_SIZE], heads[TSHI_TEXT_SIZE];
    int fits = sinks->ndim == 1 && sinks->dim[0] == q->dim[1] && tshi_dtypes[sinks->dtype].floating;
    if (!tshi_attention_holds("q k v sinks", in, sinks)) return 0;
    if (fits && sinks->layout.kind != TSH_REPLICATED)
        fits = tshi_rule_is_sharded(q, 1) && tshi_rule_is_sharded(sinks, 0) &&
               tshi_layout_same_shards(&q->layout, &sinks->layout, q->dim[1], &q->ctx->deal);
    if (!fits)
        return tsh_fail(q->ctx, TSH_ERR_SHAPE,
                        "tsh_attention: sinks %s %s; takes floating ones of shape (%lld), "
                        "replicated or sharded as the heads of q %s",
                        tshi_dtype_name(sinks->dtype), tshi_tensor_text(sinks, text),
                        (long long)q->dim[1], tshi_tensor_text(q, heads)) == TSH_OK;
    more->sinks = tsh_cast(sinks, TSH_REAL);
    return more->sinks != NULL;
}

/* Checks desc->segments, which says which sequence each position is in, and sets more->segments and
 * more->runs. Returns 0 after an error. */
static int tshi_attention_take_segments(tshi_attention *more, tsh_tensor *const *in,
                                        const tsh_attention_desc *desc) {
    const tsh_tensor *q = in[0], *k = in[1];
    tsh_tensor *segments = desc->segments;
    char text[TSHI_TEXT_SIZE], queries[TSHI_TEXT_SIZE];
    if (!tshi_attention_holds("q k v segments", in, segments)) return 0;
    if (desc->cache_k || desc->lengths)
        return tsh_fail(q->ctx, TSH_ERR_STATE,
                        "tsh_attention: segments with %s; they are for whole rows without a cache, "
                        "and mark padding by -1: tsh_set_segments(module, NULL) removes them",
                        desc->cache_k ? "a cache" : "lengths") == TSH_OK;
    if (segments->dtype != TSH_I32 || segments->ndim != 2 || segments->dim[0] != q->dim[0] ||
        segments->dim[1] != q->dim[2] || q->dim[2] != k->dim[2])
        return tsh_fail(q->ctx, TSH_ERR_SHAPE,
                        "tsh_attention: segments %s %s for %lld rows of %lld queries and %lld "
                        "keys; takes i32 of shape (rows, queries), with as many keys as queries",
                        tshi_dtype_name(segments->dtype), tshi_tensor_text(segments, text),
                        (long long)q->dim[0], (long long)q->dim[2],
                        (long long)k->dim[2]) == TSH_OK;
    if (segments->layout.kind != TSH_REPLICATED &&
        !(tshi_rule_is_sharded(q, 0) && tshi_rule_is_sharded(segments, 0) &&
          tshi_layout_same_shards(&q->layout, &segments->layout, q->dim[0], &q->ctx->deal)))
        return tsh_fail(q->ctx, TSH_ERR_LAYOUT,
                        "tsh_attention: segments %s must be replicated, or sharded as the batch of "
                        "q %s", tshi_tensor_text(segments, text),
                        tshi_tensor_text(q, queries)) == TSH_OK;
    more->segments = segments;
    more->runs = tshi_attention_count_runs(q, segments);
    return 1;
}

/* Checks that in[i] (k or v) fits into its cache at position `past`. Returns 0 after an error. */
static int tshi_attention_fits_cache(tsh_tensor *const *in, int i, tsh_tensor *cache,
                                     int64_t past) {
    const tsh_tensor *x = in[i];
    char tx[TSHI_TEXT_SIZE], tc[TSHI_TEXT_SIZE];
    int d, fits = cache->ndim == 4 && (cache->flags & TSHI_OWNED) != 0;
    if (!tshi_attention_holds(i == 1 ? "q k v cache_k" : "q k v cache_v", in, cache)) return 0;
    if (fits) fits = tshi_dtype_computes(cache->dtype);
    for (d = 0; d < 4 && fits; d++) fits = d == 2 || cache->dim[d] == x->dim[d];
    if (fits && past >= 0 && past <= cache->dim[2] - x->dim[2] &&
        tshi_layout_equal(&x->layout, &cache->layout, x->dim, &x->ctx->deal))
        return 1;
    return tsh_fail(x->ctx, TSH_ERR_SHAPE,
                    "tsh_attention: %s at position %lld does not go into the cache %s",
                    tshi_tensor_text(x, tx), (long long)past,
                    tshi_tensor_text(cache, tc)) == TSH_OK;
}

/* Returns how many cached and new keys row b of the whole batch has. added: number of new keys with
 * padding (Tk). */
static tshi_keys tshi_attention_keys(const tsh_attention_desc *desc, int64_t added, int64_t b) {
    tshi_keys keys = {0, added};
    if (desc && desc->cache_k) keys.past = desc->pasts ? desc->pasts[b] : desc->past;
    if (desc && desc->lengths) keys.added = desc->lengths[b];
    return keys;
}

/* Checks the keys of each row of a ragged batch, and sets more->keys to those of the longest row.
 * Returns 0 after an error. */
static int tshi_attention_take_rows(tsh_tensor *const *in, const tsh_attention_desc *desc,
                                    tshi_attention *more) {
    const tsh_tensor *k = in[1];
    const int64_t added = k->dim[2], most = desc->cache_k && desc->cache_k->ndim == 4
                                                ? desc->cache_k->dim[2] : added;
    for (int64_t b = 0; b < k->dim[0]; b++) {
        const tshi_keys keys = tshi_attention_keys(desc, added, b);
        if (keys.added < 0 || keys.added > added || keys.past < 0 || keys.past > most - keys.added)
            return tsh_fail(k->ctx, TSH_ERR_SHAPE,
                            "tsh_attention: row %lld has %lld cached and %lld new positions; of "
                            "new ones there are 0 to %lld, of all at most %lld",
                            (long long)b, (long long)keys.past, (long long)keys.added,
                            (long long)added, (long long)most) == TSH_OK;
        if (keys.past + keys.added > more->keys.past + more->keys.added) more->keys = keys;
    }
    return 1;
}

/* Checks all options before a cache is written to, and fills in *more. Returns 0 after an error. */
static int tshi_attention_options(tsh_tensor *const *in, const tsh_attention_desc *desc,
                                  tshi_attention *more) {
    tsh_ctx *ctx = in[0]->ctx;
    const int64_t added = in[1]->dim[2];
    memset(more, 0, sizeof *more);
    more->behind = added - in[0]->dim[2];
    more->ragged = desc && (desc->pasts || desc->lengths);
    if (!more->ragged) more->keys = tshi_attention_keys(desc, added, 0);
    more->scale = 1 / sqrt((double)(in[0]->dim[3] ? in[0]->dim[3] : 1));
    if (!desc) return 1;
    if (!(desc->dropout >= 0 && desc->dropout <= 1))
        return tsh_fail(ctx, TSH_ERR_ARGUMENT, "tsh_attention: dropout is %g, not within [0, 1]",
                        desc->dropout) == TSH_OK;
    if (desc->window < 0 || !(desc->soft_cap >= 0))
        return tsh_fail(ctx, TSH_ERR_ARGUMENT,
                        "tsh_attention: window is %lld, soft_cap %g; none may be below 0",
                        (long long)desc->window, desc->soft_cap) == TSH_OK;
    if (desc->cache_k || desc->cache_v) {
        tsh_tensor *const others[2] = {desc->mask, desc->sinks};
        if (!desc->cache_k || !desc->cache_v || tshi_tape_records(ctx, in, 3) ||
            tshi_tape_records(ctx, others, 2))
            return tsh_fail(
                       ctx, TSH_ERR_STATE,
                       "tsh_attention: a cache is for both k and v, and for work without gradients "
                       "(tsh_no_grad_begin)") == TSH_OK;
        if (!tshi_attention_fits_cache(in, 1, desc->cache_k, more->keys.past) ||
            !tshi_attention_fits_cache(in, 2, desc->cache_v, more->keys.past))
            return 0;
    } else if (desc->pasts) {
        return tsh_fail(ctx, TSH_ERR_ARGUMENT,
                        "tsh_attention: pasts without a cache_k and a cache_v") == TSH_OK;
    }
    if (more->ragged && !tshi_attention_take_rows(in, desc, more)) return 0;
    if (desc->mask &&
        !tshi_attention_take_mask(more, in, more->keys.past + more->keys.added, desc->mask))
        return 0;
    if (desc->sinks && !tshi_attention_take_sinks(more, in, desc->sinks)) return 0;
    if (desc->segments && !tshi_attention_take_segments(more, in, desc)) return 0;
    more->causal = desc->causal;
    more->window = desc->window;
    more->cap = desc->soft_cap;
    if (desc->scale > 0 || desc->scale < 0) more->scale = desc->scale;
    more->dropout = desc->dropout > 0;
    if (more->dropout) more->drop = tshi_dropout_next_mask(ctx, desc->dropout, desc->owner);
    return 1;
}

/* Copies the new positions of batch rows [b, b + n) of x (k or v), local indices, to view, a view
 * of the cache. keys: the numbers of keys that each of these rows has. */
static void tshi_attention_append_rows(const tsh_tensor *x, const tsh_tensor *view, int64_t b,
                                       int64_t n, tshi_keys keys) {
    tsh_tensor part = *x;
    tshi_loop loop;
    const int64_t at = b * view->stride[0] + keys.past * view->stride[2];
    part.offset += b * x->stride[0];
    part.local[0] = n;
    part.local[2] = keys.added;
    tshi_kernel_space(&loop, &part);
    tshi_kernel_add_operand(&loop, x,
                            (char *)tshi_tensor_at(view) + at * tshi_dtypes[view->dtype].size,
                            view->stride, view->dtype);
    tshi_kernel_tensor(&loop, &part);
    tshi_kernel_run(&loop, tshi_kernel_copy, NULL);
}

/* Appends x (k or v) to its cache. Returns a view of the cache up to the last key of any row; NULL:
 * an error. */
static tsh_tensor *tshi_attention_append(tsh_tensor *x, tsh_tensor *cache,
                                         const tsh_attention_desc *desc,
                                         const tshi_attention *more) {
    tsh_tensor *view = tsh_slice(cache, 2, 0, more->keys.past + more->keys.added);
    if (!view) return NULL;
    if (!more->ragged) tshi_attention_append_rows(x, view, 0, x->local[0], more->keys);
    for (int64_t b = 0; b < x->local[0] && more->ragged; b++) {
        const int64_t row = tshi_tensor_global(x, 0, b);
        tshi_attention_append_rows(x, view, b, 1, tshi_attention_keys(desc, x->dim[2], row));
    }
    return view;
}

/* Allocates what forward leaves for backward: the keys of each row if the batch is ragged, or the
 * parts if rows have segments (their number goes to *more); then m and log l of each query, the
 * maximum and the logarithm of the sum of its softmax. added: number of new keys (Tk). NULL: an
 * error. */
static tshi_block *tshi_attention_aux(const tsh_tensor *q, const tsh_attention_desc *desc,
                                      tshi_attention *more, int64_t added) {
    const size_t rows = tshi_attention_aux_rows(q, more);
    const int64_t queries = q->local[0] * q->local[1] * q->dim[2];
    tshi_block *aux = tshi_mem_alloc(q->ctx, TSH_MEM_STEP, rows + tshi_dtype_reals(2 * queries));
    for (int64_t b = 0; aux && more->ragged && b < q->dim[0]; b++)
        ((tshi_keys *)tshi_mem_data(aux))[b] = tshi_attention_keys(desc, added, b);
    if (aux && more->segments)
        more->parts = tshi_attention_cut_all((tshi_row_part *)tshi_mem_data(aux), q,
                                             more->segments);
    return aux;
}

static const tshi_op tshi_attention_op = {
    "tsh_attention",     "q k v mask sinks segments",
    tshi_rule_attention, tshi_attention_backward,
    TSHI_Q | TSHI_K | TSHI_V | TSHI_MASK | TSHI_SINKS | TSHI_SEGMENTS | TSHI_OUT, 0};

TSH_API tsh_tensor *tsh_attention(tsh_tensor *q, tsh_tensor *k, tsh_tensor *v,
                                  const tsh_attention_desc *desc) {
    const tshi_op *op = &tshi_attention_op;
    /* mask, sinks and segments are set below */
    tsh_tensor *in[6] = {q, k, v, NULL, NULL, NULL}, *out;
    tsh_ctx *ctx = tshi_tensor_check_floating("tsh_attention", op->inputs, in, 3);
    tshi_output output;
    tshi_attention more;
    tshi_block *aux;
    tshi_heads all;
    if (!ctx || !tshi_attention_shapes(in) || !tshi_rule_run(op, in, 3, NULL, &output) ||
        !tshi_attention_options(in, desc, &more))
        return NULL;
    output.shape = tsh_shape_of(q);
    if (desc && desc->cache_k) in[1] = tshi_attention_append(k, desc->cache_k, desc, &more);
    if (desc && desc->cache_v) in[2] = tshi_attention_append(v, desc->cache_v, desc, &more);
    if (!in[1] || !in[2]) return NULL;
    out = tshi_tensor_out(ctx, "tsh_attention", q->dtype, &output.shape, &output.layout);
    aux = out ? tshi_attention_aux(q, desc, &more, k->dim[2]) : NULL;
    if (!aux) return NULL;
    tshi_attention_begin(&all, in, out, &more, aux, 0);
    if (more.mask) all.head.mask.values = tshi_tensor_at(more.mask);
    if (more.sinks) all.sinks = (const tsh_real *)tshi_tensor_at(more.sinks);
    if (more.segments) all.segments = tshi_tensor_at(more.segments);
    /* q is a view of (B, Tq, H, D): give `out` the same strides, so merging heads copies nothing */
    if (q->stride[1] < q->stride[2]) {
        out->stride[1] = q->dim[3];
        out->stride[2] = q->dim[3] * q->local[1];
    }
    for (int i = 0; i < 3; i++) all.value[i] = tshi_tensor_at(in[i]);
    all.value[3] = tshi_tensor_at(out);
    tshi_attention_run(&all);
    in[3] = more.mask; /* these become inputs of the node, which saves them */
    in[4] = more.sinks;
    in[5] = more.segments;
    for (int i = 3; i < 5; i++)
        if (q->layout.kind == TSH_SHARDED && in[i] && in[i]->layout.kind == TSH_REPLICATED)
            output.partial |= i == 3 ? TSHI_MASK : TSHI_SINKS;
    tshi_op_record(op, out, in, 6, output.partial, &more, sizeof more, aux);
    return ctx->error.code == TSH_OK ? out : NULL;
}
