/* ========================================================================== */
/* >>sample                                          MARK: - sample (private) */
/* tsh_sample: draws an id from each row of logits, after filters.            */
/* Needs: >>tape-leaf >>op-reduce >>redistribute.                             */
/* ========================================================================== */

/* Every rank samples from the whole logits, in double, so all draw the same ids. Each filter
 * (top_k, top_p, min_p) keeps what is not below a threshold. Quickselect finds the thresholds of
 * top_k and top_p, so no row is sorted. */

/* Splits n values into those above a pivot, equal to it, and below it. *above: number of values
 * above the pivot; *below: index of the first value below it. */
static void tshi_sample_partition(double *v, int64_t n, double pivot, int64_t *above,
                                  int64_t *below) {
    int64_t at = 0; /* values from here to *below are not compared yet */
    *above = 0;
    *below = n;
    while (at < *below) {
        const double x = v[at];
        if (x < pivot) {
            v[at] = v[--*below];
            v[*below] = x;
        } else {
            if (x > pivot) {
                v[at] = v[*above];
                v[(*above)++] = x;
            }
            at++;
        }
    }
}

/* Returns the largest value t such that the weights of all values >= t sum to at least goal > 0;
 * the smallest value if the sum of all weights is less. The weight of a value is the value itself,
 * or 1 if `count` is 1. Uses quickselect (Hoare 1961), which reorders the n > 0 values. */
static double tshi_sample_threshold(double *v, int64_t n, double goal, int count) {
    for (;;) {
        const double a = v[0], b = v[n / 2], c = v[n - 1]; /* the pivot is their median */
        const double pivot = a > b ? (b > c ? b : a > c ? c : a) : (a > c ? a : b > c ? c : b);
        double larger = 0, equal; /* sum of the weights of values above the pivot; equal to it */
        int64_t above, below;
        tshi_sample_partition(v, n, pivot, &above, &below);
        for (int64_t i = 0; i < above; i++) larger += count ? 1 : v[i];
        equal = (double)(below - above) * (count ? 1 : pivot);
        if (larger >= goal) {
            n = above;
        } else {
            if (larger + equal >= goal || below == n) return pivot;
            goal -= larger + equal; /* values below the pivot make up the rest */
            v += below;
            n -= below;
        }
    }
}

/* Copies those of the n values z that are at least `least` to `to`. Returns their number. */
static int64_t tshi_sample_copy(const double *z, int64_t n, double least, double *to) {
    int64_t i, count = 0;
    for (i = 0; i < n; i++)
        if (z[i] >= least) to[count++] = z[i];
    return count;
}

/* Returns the k-th largest of the n values z, 0 < k < n. Cuts z into k pieces: the k-th largest
 * value is not below the smallest of the pieces' k maxima, so values that are below it are skipped.
 * scratch: space for n values. */
static double tshi_sample_kth(const double *z, int64_t n, int64_t k, double *scratch) {
    double bound = (double)INFINITY;
    for (int64_t piece = 0, i = 0; piece < k; piece++) {
        double max = z[i];
        for (const int64_t end = n / k * piece + n / k; i < end; i++)
            if (z[i] > max) max = z[i];
        if (max < bound) bound = max;
    }
    return tshi_sample_threshold(scratch, tshi_sample_copy(z, n, bound, scratch), (double)k, 1);
}

/* Returns an id drawn from the n logits z; -1 if one is NaN or the largest is not finite. chance:
 * the random number, in [0, 1). z becomes the weights of the ids. scratch: space for n values. */
static int64_t tshi_sample_row(double *z, double *scratch, int64_t n, const tsh_sample_desc *desc,
                               double chance) {
    const double temperature = tshi_base_option(desc->temperature, 1);
    /* least: logits below it are left out; later, weights below it */
    double max = -(double)INFINITY, least = max, total = 0;
    int64_t i, best = -1;
    for (i = 0; i < n; i++) {
        if (z[i] != z[i]) return -1;
        if (z[i] > max) max = z[best = i];
    }
    if (best < 0 || max > DBL_MAX || !(temperature > 0)) return max > DBL_MAX ? -1 : best;
    if (desc->top_k > 0 && desc->top_k < n) least = tshi_sample_kth(z, n, desc->top_k, scratch);
    for (i = 0; i < n; i++) {
        z[i] = z[i] < least ? 0 : exp((z[i] - max) / temperature); /* the largest becomes 1 */
        total += z[i];
    }
    least = desc->min_p;
    if (desc->top_p > 0 && desc->top_p < 1) {
        /* Quickselect gets only the weights from `bound` on: those below it sum to less than what
         * top_p may leave out. */
        const double bound = (1 - desc->top_p) * total / (double)n;
        const int64_t count = tshi_sample_copy(z, n, bound, scratch);
        const double top = tshi_sample_threshold(scratch, count, desc->top_p * total, 0);
        if (top > least) least = top;
    }
    for (total = 0, i = 0; i < n; i++) total += z[i] < least ? 0 : z[i];
    chance *= total;
    for (i = 0; i < n && chance >= 0; i++) {
        if (!(z[i] > 0) || z[i] < least) continue;
        chance -= z[i];
        best = i; /* if rounding leaves chance at 0 or above, the last id kept is drawn */
    }
    return best;
}

/* Checks the options. Returns 0 after an error. */
static int tshi_sample_check(tsh_tensor *logits, const tsh_sample_desc *desc) {
    tsh_tensor *in[2];
    char tx[TSHI_TEXT_SIZE], tp[TSHI_TEXT_SIZE];
    const int last = logits->ndim - 1;
    in[0] = logits;
    in[1] = desc->previous ? desc->previous : logits;
    if (!tshi_tensor_check("tsh_sample", "logits previous", in, 2)) return 0;
    if (last < 0 || !logits->dim[last])
        return tshi_error_zero(logits->ctx, TSH_ERR_SHAPE,
                               "tsh_sample: takes logits (.., V), V at least 1, not %s",
                               tshi_tensor_text(logits, tx));
    if (desc->previous && (tshi_dtypes[in[1]->dtype].floating || in[1]->ndim != last + 1 ||
                           memcmp(in[1]->dim, logits->dim, (size_t)last * sizeof *in[1]->dim) != 0))
        return tshi_error_zero(logits->ctx, TSH_ERR_SHAPE,
                               "tsh_sample: logits %s, previous %s %s; takes integers (.., n), a "
                               "row of ids for each row of logits",
                               tshi_tensor_text(logits, tx), tshi_dtype_name(in[1]->dtype),
                               tshi_tensor_text(in[1], tp));
    if (!(desc->temperature >= TSH_ZERO && desc->temperature <= DBL_MAX) || desc->top_k < 0 ||
        !(desc->top_p >= 0 && desc->top_p <= 1) || !(desc->min_p >= 0 && desc->min_p <= 1) ||
        !(desc->penalty >= 0 && desc->penalty <= DBL_MAX))
        return tshi_error_zero(logits->ctx, TSH_ERR_ARGUMENT,
                               "tsh_sample: temperature %g, top_k %lld, top_p %g, min_p %g, "
                               "penalty %g: none may be below 0, and top_p and min_p not above 1",
                               desc->temperature, (long long)desc->top_k, desc->top_p, desc->min_p,
                               desc->penalty);
    return 1;
}

/* Draws an id from each row of the logits x, shape (.., V). previous: the ids that get the penalty,
 * shape (.., n), or NULL. Both are replicated. */
static void tshi_sample_rows(const tsh_tensor *x, const tsh_tensor *previous,
                             const tsh_sample_desc *desc, int64_t *ids) {
    tsh_ctx *ctx = x->ctx;
    const int64_t n = x->dim[x->ndim - 1], rows = tsh_numel(x) / n;
    /* number of previous ids per row */
    const int64_t seen = previous ? previous->dim[previous->ndim - 1] : 0;
    const double penalty = desc->penalty > 0 ? desc->penalty : 1;
    const uint64_t stream = tshi_rng_hash(0, "sample", 6);
    tshi_block *scratch, *held = NULL, *block;
    const tsh_real *values = tshi_kernel_packed_reals(x, &scratch);           /* logits (rows, n) */
    const void *past = previous ? tshi_kernel_packed(previous, &held) : NULL; /* ids (rows, seen) */
    block = tshi_mem_alloc(ctx, TSH_MEM_STEP, 2 * (size_t)n * sizeof(double));
    double *z = block ? (double *)tshi_mem_data(block) : NULL; /* the logits of a row */
    for (int64_t r = 0; r < rows && ctx->error.code == TSH_OK; r++, values += n) {
        uint32_t word[4];
        int64_t i;
        for (i = 0; i < n; i++) z[i] = (double)values[i];
        for (i = 0; i < seen; i++) {
            const int64_t id = tshi_tensor_integer(previous, past, r * seen + i);
            if (id < 0 || id >= n) continue;
            z[id] = (double)values[id] * (values[id] > 0 ? 1 / penalty : penalty);
        }
        tshi_rng_philox(desc->seed + (uint64_t)r, stream, (uint64_t)desc->position, word);
        ids[r] = tshi_sample_row(z, z + n, n, desc,
                                 ((double)(word[0] >> 5) * 67108864.0 + (double)(word[1] >> 6)) /
                                     9007199254740992.0); /* 53 random bits, in [0, 1) */
        if (ids[r] < 0) tshi_reduce_refuse_row(ctx, r);
    }
    tshi_mem_release(ctx, scratch);
    tshi_mem_release(ctx, held);
    tshi_mem_release(ctx, block);
}

/* Returns 1 if only the index of the largest logit is wanted, with no penalty, and the logits are
 * replicated or sharded along the last dimension: then no rank needs the whole logits. */
static int tshi_sample_is_greedy(const tsh_tensor *logits, const tsh_sample_desc *desc) {
    return !(tshi_base_option(desc->temperature, 1) > 0) && !desc->previous &&
           (logits->layout.kind == TSH_REPLICATED ||
            tshi_rule_is_sharded(logits, logits->ndim - 1));
}

TSH_API tsh_tensor *tsh_sample(tsh_tensor *logits, const tsh_sample_desc *desc) {
    static const tsh_sample_desc usual = {0, NULL, 0, 0, 0, 0, 0, 0}; /* zeros: no filter */
    tsh_ctx *ctx = tshi_tensor_check_floating("tsh_sample", "logits", &logits, 1);
    tsh_shape shape = tsh_shape_of(logits);
    tsh_tensor *x, *previous, *out;
    if (!desc) desc = &usual;
    if (!ctx || !tshi_sample_check(logits, desc)) return NULL;
    shape.ndim--;
    tsh_no_grad_begin(ctx);
    if (tshi_sample_is_greedy(logits, desc)) {
        out = tshi_reduce_greedy(logits);
        tsh_no_grad_end(ctx);
        return out;
    }
    x = tsh_full_tensor(logits);
    previous = desc->previous ? tsh_full_tensor(desc->previous) : NULL;
    out = ctx->error.code == TSH_OK ? tshi_tensor_out(ctx, "tsh_sample", TSH_I64, &shape, NULL)
                                    : NULL;
    if (out) tshi_sample_rows(x, previous, desc, (int64_t *)tshi_tensor_at(out));
    tsh_no_grad_end(ctx);
    return ctx->error.code == TSH_OK ? out : NULL;
}
