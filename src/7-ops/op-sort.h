/* ========================================================================== */
/* >>op-sort                                        MARK: - op-sort (private) */
/* topk, sort, argsort: the indices of a row's elements in order.             */
/* Needs: >>op-reduce >>op-index.                                             */
/* ========================================================================== */

/* Every op here finds indices, row by row, and then gathers the values by them: so gradients go
 * where tsh_gather sends them. A row is the elements along the axis, dense; threads divide the rows
 * among them. It is sorted by keys: unsigned integers, smaller for elements that come earlier. */

/* An element of a row. */
typedef struct tshi_sort_item {
    uint64_t key;
    int64_t index;
} tshi_sort_item;

/* Parameters of the kernel tshi_sort_rows. Its operands are the indices, k per row; the values, n
 * per row; and scratch for items. */
typedef struct tshi_sort_params {
    int64_t n, k;
    uint64_t flip; /* is XORed to keys: 0 sorts in ascending order, all ones descending */
    int few;       /* 1: few of many tsh_real are needed: selects with tshi_sort_first */
} tshi_sort_params;

/* -- keys -------------------------------------------------------------------------- */

/* Returns the key of a value, with as many bits as a tsh_real: keys ascend as values do, and NaN
 * has the largest. */
TSHI_INLINE uint64_t tshi_sort_key(tsh_real value) {
    const tsh_real x = value + 0; /* -0 becomes 0 */
    uint64_t wide;
    uint32_t bits;
    if (TSHI_DOUBLE) {
        const double d = (double)x;
        memcpy(&wide, &d, sizeof wide);
        return x != x ? UINT64_MAX : wide ^ ((0u - (wide >> 63)) | (uint64_t)1 << 63);
    }
    bits = tshi_math_bits((float)x);
    return x != x ? UINT32_MAX : bits ^ ((0u - (bits >> 31)) | (uint32_t)1 << 31);
}

/* Returns a mask of the bits that the key of a tsh_real has. */
static uint64_t tshi_sort_mask(void) {
    return TSHI_DOUBLE ? UINT64_MAX : UINT32_MAX;
}

/* Fills in the items, key and index, of all elements of a row. */
static void tshi_sort_fill(const tshi_operand *row, const tshi_sort_params *p,
                           tshi_sort_item *item) {
    const int reals = row->dtype == TSH_REAL;
    for (int64_t i = 0; i < p->n; i++) {
        item[i].index = i;
        if (reals) {
            item[i].key = tshi_sort_key(((const tsh_real *)row->data)[i]) ^
                          (p->flip & tshi_sort_mask());
        } else {
            int64_t value;
            const tshi_dtype *type = &tshi_dtypes[row->dtype];
            type->load_integer((const char *)row->data + i * type->size, 1, 1, &value);
            item[i].key = ((uint64_t)value ^ (uint64_t)1 << 63) ^ p->flip;
        }
    }
}

/* -- sorting items -------------------------------------------------------------------- */

/* Returns 1 if a comes before b: it has the lower key, or an equal key and the lower index. */
TSHI_INLINE int tshi_sort_before(const tshi_sort_item *a, const tshi_sort_item *b) {
    return a->key < b->key || (a->key == b->key && a->index < b->index);
}

/* Sorts n items by insertion. */
static void tshi_sort_insert(tshi_sort_item *item, int64_t n) {
    for (int64_t i = 1; i < n; i++) {
        const tshi_sort_item moved = item[i];
        int64_t at = i;
        for (; at > 0 && tshi_sort_before(&moved, &item[at - 1]); at--) item[at] = item[at - 1];
        item[at] = moved;
    }
}

/* Merges the sorted items [0, middle) and [middle, n) into `to`. */
static void tshi_sort_merge(const tshi_sort_item *item, int64_t middle, int64_t n,
                            tshi_sort_item *to) {
    int64_t a = 0, b = middle;
    while (a < middle && b < n)
        *to++ = tshi_sort_before(&item[b], &item[a]) ? item[b++] : item[a++];
    memcpy(to, item + a, (size_t)(middle - a) * sizeof *to);
    memcpy(to + (middle - a), item + b, (size_t)(n - b) * sizeof *to);
}

/* Sorts n items by merging ever longer runs. Returns the sorted items: `item` or `other`, which has
 * space for n, too. */
static tshi_sort_item *tshi_sort_runs(tshi_sort_item *item, int64_t n, tshi_sort_item *other) {
    enum { RUN = 12 }; /* length of runs that are sorted by insertion */
    int64_t at, run;
    for (at = 0; at < n; at += RUN) tshi_sort_insert(item + at, tshi_base_min(RUN, n - at));
    for (run = RUN; run < n; run *= 2) {
        tshi_sort_item *swap = item;
        for (at = 0; at < n; at += 2 * run)
            tshi_sort_merge(item + at, tshi_base_min(run, n - at), tshi_base_min(2 * run, n - at),
                            other + at);
        item = other;
        other = swap;
    }
    return item;
}

/* Sorts n items, which are in the order of their indices, by the bytes of their keys, from the
 * lowest byte on; bytes that all keys share are skipped. Stable. Returns the sorted items: `item`
 * or `other`. */
static tshi_sort_item *tshi_sort_bytes(tshi_sort_item *item, int64_t n, tshi_sort_item *other) {
    enum { BYTES = 8, VALUES = 256 };
    int64_t count[BYTES][VALUES], i;
    int byte, v;
    memset(count, 0, sizeof count);
    for (i = 0; i < n; i++)
        for (byte = 0; byte < BYTES; byte++) count[byte][item[i].key >> 8 * byte & 255]++;
    for (byte = 0; byte < BYTES; byte++) {
        int64_t *at = count[byte], start = 0; /* at[v]: where the next item with byte v goes */
        tshi_sort_item *swap = item;
        if (at[item[0].key >> 8 * byte & 255] == n) continue;
        for (v = 0; v < VALUES; v++) {
            const int64_t these = at[v];
            at[v] = start;
            start += these;
        }
        for (i = 0; i < n; i++) other[at[item[i].key >> 8 * byte & 255]++] = item[i];
        item = other;
        other = swap;
    }
    return item;
}

/* Sorts n items, which are given in the order of their indices. Returns the sorted items: `item` or
 * `other`, which has space for n, too. */
static tshi_sort_item *tshi_sort_items(tshi_sort_item *item, int64_t n, tshi_sort_item *other) {
    return n < 512 ? tshi_sort_runs(item, n, other) : tshi_sort_bytes(item, n, other);
}

/* -- topk: the k first of a row ------------------------------------------------- */

/* Moves the k of n items that come first when sorted to the front, in any order, by quickselect
 * (Hoare 1961). 0 < k < n. */
static void tshi_sort_select(tshi_sort_item *item, int64_t n, int64_t k) {
    int64_t low = 0, high = n - 1; /* the k-th item is in [low, high] */
    while (low < high) {
        tshi_sort_item a = item[low], b = item[low + (high - low) / 2], c = item[high], swap;
        int64_t i = low, j = high;
        if (tshi_sort_before(&b, &a)) {
            swap = a;
            a = b;
            b = swap;
        }
        if (tshi_sort_before(&c, &b)) b = tshi_sort_before(&c, &a) ? a : c; /* b: their median */
        while (i <= j) {
            while (tshi_sort_before(&item[i], &b)) i++;
            while (tshi_sort_before(&b, &item[j])) j--;
            if (i > j) break;
            swap = item[i];
            item[i++] = item[j];
            item[j--] = swap;
        }
        if (k - 1 <= j)
            high = j;
        else if (k - 1 >= i)
            low = i;
        else
            return;
    }
}

/* Candidates for the k items of a row that come first, while the row is read. */
typedef struct tshi_sort_best {
    tshi_sort_item *item; /* the candidates: `count`, at most `size` */
    int64_t count, size, k;
    uint64_t limit; /* once `full`: the key of the k-th item so far; others must be below it */
    int full;
} tshi_sort_best;

/* Drops all candidates but the k that come first. Returns the index in the row of the last of
 * these. */
static int64_t tshi_sort_shrink(tshi_sort_best *best) {
    int64_t i, last = 0;
    if (best->count > best->k) tshi_sort_select(best->item, best->count, best->k);
    best->count = best->k;
    for (i = 1; i < best->k; i++)
        if (tshi_sort_before(&best->item[last], &best->item[i])) last = i;
    best->limit = best->item[last].key;
    best->full = 1;
    return best->item[last].index;
}

enum { TSHI_SORT_BLOCK = 64, TSHI_SORT_SPARE = 64 }; /* SPARE: items beyond 2 k in tshi_sort_best */

/* Returns 1 if one of a block of values may come before the k-th so far. bound: the k-th value
 * times sign; sign: 1 if larger values come first, -1 if smaller ones do. NaN always may. */
TSHI_INLINE int tshi_sort_may(const tsh_real *x, tsh_real sign, tsh_real bound) {
    int i, any = 0;
    for (i = 0; i < TSHI_SORT_BLOCK; i++) any |= !(x[i] * sign <= bound);
    return any;
}

/* Finds the k elements of a row of tsh_real that come first when sorted; they become the first k
 * items, in any order. Blocks of values that all come after the k-th so far are skipped. item:
 * space for 2 k + SPARE items. */
TSHI_INLINE void tshi_sort_first(const tsh_real *x, const tshi_sort_params *p,
                                 tshi_sort_item *item) {
    const uint64_t flip = p->flip & tshi_sort_mask();
    const tsh_real sign = p->flip ? TSHI_R(1) : TSHI_R(-1);
    tsh_real bound = 0; /* the k-th value in sorted order so far, times sign */
    tshi_sort_best best;
    int64_t e, i, end;
    best.item = item;
    best.count = best.full = 0;
    best.size = 2 * p->k + TSHI_SORT_SPARE;
    best.k = p->k;
    best.limit = 0;
    for (e = 0; e < p->n; e = end) {
        end = tshi_base_min(e + TSHI_SORT_BLOCK, p->n);
        if (best.full && end == e + TSHI_SORT_BLOCK && !tshi_sort_may(x + e, sign, bound)) continue;
        for (i = e; i < end; i++) {
            tshi_sort_item next;
            if (best.full && x[i] * sign <= bound) continue;
            next.key = tshi_sort_key(x[i]) ^ flip;
            next.index = i;
            if (best.full && next.key >= best.limit) continue; /* an equal key: the earlier stays */
            best.item[best.count++] = next;
            if (best.count == best.size) bound = x[tshi_sort_shrink(&best)] * sign;
        }
    }
    (void)tshi_sort_shrink(&best);
}

/* Writes, for each row, the indices of the k elements that come first, in sorted order. */
TSHI_INLINE void tshi_sort_rows_body(int64_t rows, const tshi_operand *operand,
                                     const tshi_sort_params *p) {
    int64_t *index = (int64_t *)operand[0].data, i;
    tshi_operand row = operand[1];
    tshi_sort_item *item = (tshi_sort_item *)operand[2].data, *sorted;
    for (; rows > 0; rows--, index += p->k) {
        if (p->few) {
            tshi_sort_first((const tsh_real *)row.data, p, item);
            sorted = tshi_sort_runs(item, p->k, item + p->k);
        } else {
            tshi_sort_fill(&row, p, item);
            sorted = tshi_sort_items(item, p->n, item + p->n);
        }
        for (i = 0; i < p->k; i++) index[i] = sorted[i].index;
        tshi_kernel_move(&row, p->n);
    }
}
TSHI_KERNEL(tshi_sort_rows, tshi_sort_params);

/* -- the ops ------------------------------------------------------------------------------ */

/* Writes to `out`, of TSH_I64, for each row of x along the axis, the indices of the p->k elements
 * that come first. */
static void tshi_sort_indices(const tsh_tensor *x, int axis, const tshi_sort_params *p,
                              const tsh_tensor *out) {
    enum { WORDS = (int)(sizeof(tshi_sort_item) / sizeof(int64_t)) };
    tsh_ctx *ctx = x->ctx;
    const tsh_tensor xs = tshi_reduce_rows(x, axis), ys = tshi_reduce_rows(out, axis);
    const int dense = tshi_tensor_is_dense(&ys), reals = tshi_dtypes[x->dtype].floating;
    const int64_t count = p->n && p->k ? tsh_local_numel(x) / p->n : 0;
    const int64_t items = 2 * (p->few ? p->k + TSHI_SORT_SPARE / 2 : p->n);
    tshi_rows rows = tshi_kernel_rows_job(tshi_sort_rows[ctx->isa], count, p);
    tshi_block *block[3] = {NULL, NULL, NULL}; /* memory: dense x; indices; items */
    const int pieces = tshi_kernel_parts(ctx, count, p->n);
    int i;
    if (!count) return;
    rows.own[2] = items * WORDS;
    if (!dense)
        block[1] = tshi_mem_alloc(ctx, TSH_MEM_STEP, (size_t)(count * p->k) * sizeof(int64_t));
    block[2] = tshi_mem_alloc(ctx, TSH_MEM_STEP,
                              (size_t)pieces * (size_t)items * sizeof(tshi_sort_item));
    rows.x[1] = reals ? tshi_kernel_reals(tshi_kernel_packed_reals(&xs, &block[0]), p->n)
                      : tshi_kernel_operand(tshi_kernel_packed(&xs, &block[0]), p->n, x->dtype);
    if (ctx->error.code == TSH_OK) {
        rows.x[0] = tshi_kernel_operand(dense ? tshi_tensor_at(&ys) : tshi_mem_data(block[1]), p->k,
                                        TSH_I64);
        rows.x[2] = tshi_kernel_operand(tshi_mem_data(block[2]), 0, TSH_I64);
        tshi_kernel_run_rows(ctx, &rows, p->n);
        if (!dense) tshi_kernel_dense(&ys, tshi_mem_data(block[1]), TSH_I64, 1);
    }
    for (i = 0; i < 3; i++) tshi_mem_release(ctx, block[i]);
}

/* The two ops of a public function: `whole` checks x's layout, and records indices; `gather`
 * records the values, through which gradients go to x. */
typedef struct tshi_sort_ops {
    tshi_op whole, gather;
} tshi_sort_ops;

/* Returns the indices of the k elements of each row of x along the axis that come first (k < 0: of
 * all, sorted); NULL after an error. */
static tsh_tensor *tshi_sort_order(const tshi_op *op, tsh_tensor *x, int axis, int64_t k,
                                   int descending) {
    const tshi_rule_axis along = {axis, 1};
    tshi_sort_params params;
    tshi_output output;
    tsh_tensor *out;
    char text[TSHI_TEXT_SIZE];
    if (tshi_dtypes[x->dtype].floating && !tshi_dtype_computes(x->dtype))
        return tshi_error_null(x->ctx, TSH_ERR_DTYPE,
                               "%s: x is %s; takes integers, and dtypes no "
                               "wider than %s",
                               op->name, tshi_dtype_name(x->dtype), tshi_dtype_name(TSH_REAL));
    output.shape = tsh_shape_of(x);
    if (k > output.shape.dim[axis])
        return tshi_error_null(x->ctx, TSH_ERR_SHAPE,
                               "%s: k is %lld, but dimension %d of %s has fewer elements", op->name,
                               (long long)k, axis, tshi_tensor_text(x, text));
    if (!tshi_rule_run(op, &x, 1, &along, &output)) return NULL;
    params.n = output.shape.dim[axis];
    params.k = k < 0 ? params.n : k;
    params.flip = descending ? UINT64_MAX : 0;
    params.few = tshi_dtypes[x->dtype].floating && params.n > 1024 && params.k < params.n / 4 - 256;
    output.shape.dim[axis] = params.k;
    out = tshi_tensor_out(x->ctx, op->name, TSH_I64, &output.shape, &output.layout);
    if (!out) return NULL;
    tshi_sort_indices(x, axis, &params, out);
    return x->ctx->error.code == TSH_OK ? out : NULL;
}

/* Runs tsh_topk or tsh_sort. values 0: tsh_argsort, which returns the indices. */
static tsh_tensor *tshi_sort_run(const tshi_sort_ops *ops, tsh_tensor *x, int dim, int64_t k,
                                 int descending, int values, tsh_tensor **indices) {
    const char *name = ops->whole.name;
    const int scalar = x && !x->ndim;
    tsh_tensor *order, *out;
    int axis;
    if (!tshi_tensor_check(name, "x", &x, 1)) return NULL;
    x = tshi_index_vector(x);
    axis = tshi_index_axis(name, x, dim);
    order = axis < 0 ? NULL : tshi_sort_order(&ops->whole, x, axis, k, descending);
    if (!order) return NULL;
    out = values ? tshi_index_gathered(&ops->gather, x, axis, order) : order;
    if (!values) (void)tshi_tape_record(&ops->whole, out, &x, 1, TSHI_NONE, 0);
    if (scalar && order->dim[0] == 1) {
        order = tsh_squeeze(order, 0);
        out = values ? (out ? tsh_squeeze(out, 0) : NULL) : order;
    }
    if (indices && out) *indices = order;
    return out;
}

#define TSHI_SORT_OPS(id, name)                                                                    \
    static const tshi_sort_ops id = {                                                              \
        {name, "x", tshi_rule_whole, NULL, 0, 0},                                                  \
        {name, "x indices", tshi_rule_gather, tshi_index_gather_backward, TSHI_B, 0}}
TSHI_SORT_OPS(tshi_sort_topk_ops, "tsh_topk");
TSHI_SORT_OPS(tshi_sort_sort_ops, "tsh_sort");
TSHI_SORT_OPS(tshi_sort_argsort_ops, "tsh_argsort");
#undef TSHI_SORT_OPS

TSH_API tsh_tensor *tsh_topk(tsh_tensor *x, int64_t k, int dim, int largest, tsh_tensor **indices) {
    if (indices) *indices = NULL;
    if (k < 0 && x)
        return tshi_error_null(x->ctx, TSH_ERR_ARGUMENT, "tsh_topk: k is %lld, below 0",
                               (long long)k);
    return tshi_sort_run(&tshi_sort_topk_ops, x, dim, k, largest != 0, 1, indices);
}

TSH_API tsh_tensor *tsh_sort(tsh_tensor *x, int dim, int descending, tsh_tensor **indices) {
    if (indices) *indices = NULL;
    return tshi_sort_run(&tshi_sort_sort_ops, x, dim, -1, descending != 0, 1, indices);
}

TSH_API tsh_tensor *tsh_argsort(tsh_tensor *x, int dim, int descending) {
    return tshi_sort_run(&tshi_sort_argsort_ops, x, dim, -1, descending != 0, 0, NULL);
}
