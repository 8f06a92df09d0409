/* ========================================================================== */
/* >>op-embedding                              MARK: - op-embedding (private) */
/* Embedding lookup: out_i = W[id_i]; in backward, dW[id_i] += dout_i.        */
/* Needs: >>op-map.                                                           */
/* ========================================================================== */

/* The params of the node. Shapes: W (V, D), ids (..), out (.., D). If W is sharded along V, an id
 * whose row is on another rank gives zeros, and out is a partial sum. The node's aux is an array:
 * the local row of every id (-1: on another rank, or padding); then, if by_count is 1, how often
 * each id occurs. */
typedef struct tshi_lookup {
    int64_t count, width; /* number of ids, and of columns of W, on this rank */
    int by_count, sparse; /* 1: option scale_grad_by_freq is on; 1: option sparse is on */
} tshi_lookup;

/* A tshi_team_fn: computes columns [from, to) of dW. Adds the rows of dout in the order of the ids,
 * whatever the number of threads. */
static void tshi_embedding_columns(void *job, int piece, int64_t from, int64_t to) {
    const tshi_shared *work = (const tshi_shared *)job;
    const tshi_lookup *lookup = (const tshi_lookup *)work->node->params;
    const tsh_real *g = tshi_tape_grad(work->node); /* dout, shape (count, width) */
    /* local row of W of each id; -1: the id adds to no row of this rank */
    const int64_t *row = (const int64_t *)tshi_mem_data(work->node->aux);
    const int64_t *times = row + lookup->count, *stride = work->dest.stride;
    /* dW += c dout: c is 1 unless by_count is 1; the second 1 means add, do not overwrite */
    tshi_backward_params p = {1, 1};
    tshi_operand x[3]; /* a row of dW, and twice the row of dout that is added to it */
    int64_t i;
    (void)piece;
    for (i = 0; i < lookup->count; i++, g += lookup->width) {
        if (row[i] < 0) continue; /* the row is on another rank, or the id is padding */
        if (lookup->by_count) p.c = 1 / (double)times[i];
        x[0] = tshi_kernel_reals(work->dest.data + row[i] * stride[0] + from * stride[1],
                                 stride[1]);
        x[1] = x[2] = tshi_kernel_reals(g + from, 1);
        tshi_map_scale_backward[work->node->out->ctx->isa](to - from, x, &p);
    }
}

/* Backward: adds dout_i, the gradient of the output of id i, to its row of dW, for every i. */
static void tshi_embedding_backward(tshi_node *node) {
    const tshi_lookup *lookup = (const tshi_lookup *)node->params;
    const int64_t *row = (const int64_t *)tshi_mem_data(node->aux);
    int32_t *marks = NULL; /* marks[r] = 1: row r has a gradient; NULL: dW is not row-sparse */
    tshi_shared work;
    int64_t i;
    if (!(lookup->sparse ? tshi_tape_dest_rows(node, 1, &work.dest, &marks)
                         : tshi_tape_dest_zeroed(node, 1, &work.dest)))
        return;
    for (i = 0; i < lookup->count && marks; i++)
        if (row[i] >= 0) marks[row[i]] = 1; /* dW is row-sparse: this row is not 0 */
    work.node = node;
    tshi_team_run(node->out->ctx, tshi_kernel_parts(node->out->ctx, lookup->width, lookup->count),
                  lookup->width, 16, tshi_embedding_columns, &work);
}

/* Checks the options for a weight of `rows` rows. op: the caller's name. Returns 0 after an
 * error. */
static int tshi_embedding_options(tsh_ctx *ctx, const char *op, const tsh_lookup_desc *desc,
                                  int64_t rows) {
    if (desc->padding && rows >= 0 && (desc->padding_idx < -rows || desc->padding_idx >= rows))
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT, "%s: padding_idx %lld is outside [%lld, %lld)", op,
                       (long long)desc->padding_idx, (long long)-rows, (long long)rows);
    else if (!(desc->max_norm >= 0))
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT, "%s: max_norm is %g, not 0 (none) or above", op,
                       desc->max_norm);
    else if (!(desc->norm_type >= 0))
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT, "%s: norm_type is %g, not 0 (for 2) or above", op,
                       desc->norm_type);
    return ctx->error.code == TSH_OK;
}

/* Writes the local row of every id to row[], -1 if it is on another rank. Returns 0 and an error if
 * an id is out of range; all ranks do so if ids are replicated. */
static int tshi_embedding_rows(const tsh_tensor *ids, const tsh_tensor *w, const void *values,
                               int64_t *row) {
    int64_t i, count = tsh_local_numel(ids);
    for (i = 0; i < count; i++) {
        int64_t id = tshi_tensor_integer(ids, values, i);
        if (id < 0 || id >= w->dim[0])
            return tsh_fail(w->ctx, TSH_ERR_ARGUMENT,
                            "tsh_embedding: id %lld at position %lld is outside [0, %lld), the "
                            "rows of the weight",
                            (long long)id, (long long)i, (long long)w->dim[0]) == TSH_OK;
        row[i] = tshi_tensor_local(w, 0, id); /* -1: on another rank */
    }
    return 1;
}

/* Returns the sum of |x|^p over this rank's columns of a row; for infinite p, their largest |x|. */
static double tshi_embedding_measure(const tsh_tensor *w, int64_t row, double p) {
    const void *values = tshi_tensor_at(w);
    double sum = 0, v; /* v: |x| */
    int64_t j;
    for (j = 0; j < w->local[1]; j++) {
        v = fabs(tshi_dtype_get(w->dtype, values, row * w->stride[0] + j * w->stride[1]));
        if (p > DBL_MAX)
            sum = v > sum || v != v ? v : sum; /* stays NaN once it is NaN */
        else
            sum += p > 2 || p < 2 ? pow(v, p) : v * v;
    }
    return sum;
}

/* Does what torch.embedding_renorm_ does: multiplies the rows that are looked up and whose p-norm
 * is above max_norm by max_norm / (norm + 1e-7). counts[r] > 0: local row r is looked up. The
 * counts are first reduced over dp, as all replicas must change the same rows. */
static void tshi_embedding_renorm(tsh_tensor *w, int64_t *counts, const tsh_lookup_desc *desc) {
    tsh_ctx *ctx = w->ctx;
    /* norm: of each row that is looked up, the sum of |x|^p; for infinite p, the largest |x| */
    double p = desc->norm_type > 0 ? desc->norm_type : 2, *norm;
    int64_t r, j, n = 0; /* n: number of rows looked up */
    tshi_block *block;
    if (ctx->dp.size > 1)
        (void)tshi_error_comm(ctx, tsh_allreduce(&ctx->dp, counts, w->local[0], TSH_I64, TSH_MAX),
                              "tsh_embedding: all-reduce of the rows looked up");
    for (r = 0; r < w->local[0]; r++) n += counts[r] > 0;
    block = tshi_mem_alloc(ctx, TSH_MEM_STEP, (size_t)n * sizeof *norm);
    if (!block) return;
    norm = (double *)tshi_mem_data(block);
    for (n = r = 0; r < w->local[0]; r++)
        if (counts[r]) norm[n++] = tshi_embedding_measure(w, r, p);
    if (w->layout.kind == TSH_SHARDED && w->layout.dim == 1 && ctx->tp.size > 1)
        (void)tshi_error_comm(
            ctx, tsh_allreduce(&ctx->tp, norm, n, TSH_F64, p > DBL_MAX ? TSH_MAX : TSH_SUM),
            "tsh_embedding: all-reduce of norms");
    for (n = r = 0; r < w->local[0] && ctx->error.code == TSH_OK; r++) {
        double length; /* p-norm of the row */
        if (!counts[r]) continue;
        length = p > DBL_MAX ? norm[n] : pow(norm[n], 1 / p);
        n++;
        for (j = 0; j < w->local[1] && length > desc->max_norm; j++) {
            const int64_t at = r * w->stride[0] + j * w->stride[1];
            tsh_real x;
            tshi_tensor_exact(w, at, 1, &x);
            x *= TSHI_R(desc->max_norm / (length + 1e-7));
            if (!tshi_tensor_set_exact(w, at, 1, &x)) break;
        }
    }
    tshi_mem_release(ctx, block);
}

/* Prepares the lookup: counts how often each row of w is looked up. For scale_grad_by_freq, writes
 * the count of each id after the local rows in row[]; for max_norm, scales rows of w. */
static void tshi_embedding_prepare(const tsh_tensor *ids, tsh_tensor *w,
                                   const tsh_lookup_desc *desc, int64_t *row) {
    tsh_ctx *ctx = w->ctx;
    int64_t i, *counts, count = tsh_local_numel(ids); /* counts[r]: number of ids of local row r */
    tshi_block *block;
    if (!desc->scale_grad_by_freq && !(desc->max_norm > 0)) return;
    block = tshi_mem_alloc(ctx, TSH_MEM_STEP, (size_t)w->local[0] * sizeof *counts);
    if (!block) return;
    counts = (int64_t *)tshi_mem_data(block);
    memset(counts, 0, (size_t)w->local[0] * sizeof *counts); /* one count per local row of w */
    for (i = 0; i < count; i++)
        if (row[i] >= 0) counts[row[i]]++;
    if (ids->layout.kind == TSH_SHARDED && ctx->tp.size > 1)
        (void)tshi_error_comm(ctx, tsh_allreduce(&ctx->tp, counts, w->local[0], TSH_I64, TSH_SUM),
                              "tsh_embedding: all-reduce of the counts of ids");
    for (i = 0; i < count && desc->scale_grad_by_freq; i++)
        /* 1 if the row is on another rank: backward then does not read the count */
        row[count + i] = row[i] < 0 ? 1 : counts[row[i]];
    if (desc->max_norm > 0) tshi_embedding_renorm(w, counts, desc);
    tshi_mem_release(ctx, block);
}

/* Copies row row[i] of W to out_i; out_i is 0 if row[i] is -1. A row of a quantised W is
 * dequantised. */
static void tshi_embedding_forward(const tsh_tensor *w, const tshi_lookup *lookup,
                                   const int64_t *row, tsh_tensor *out) {
    tshi_operand x[2]; /* a row of the output, and one of the weight */
    int64_t i;
    x[0] = tshi_kernel_operand(tshi_tensor_at(out), 1, out->dtype);
    for (i = 0; i < lookup->count && !out->ctx->dry; i++) {
        x[1] = tshi_kernel_operand(tshi_tensor_at(w), w->stride[1], w->dtype);
        if (row[i] >= 0 && tshi_dtype_in_blocks(w->dtype)) {
            tshi_dtypes[w->dtype].load((char *)x[1].data +
                                           tshi_dtype_bytes(w->dtype, row[i] * w->stride[0]),
                                       1, lookup->width, (tsh_real *)x[0].data);
        } else if (row[i] >= 0) {
            tshi_kernel_move(&x[1], row[i] * w->stride[0]);
            tshi_kernel_copy(lookup->width, x, NULL);
        } else {
            memset(x[0].data, 0, tshi_dtype_bytes(out->dtype, lookup->width));
        }
        tshi_kernel_move(&x[0], lookup->width); /* the output's next row */
    }
}

/* Checks dtypes and shapes of ids and weight, and the options. Returns 0 after an error. */
static int tshi_embedding_check(tsh_tensor *ids, tsh_tensor *w, const tsh_lookup_desc *desc) {
    int integers = !tshi_dtypes[ids->dtype].floating;
    char ti[TSHI_TEXT_SIZE], tw[TSHI_TEXT_SIZE];
    if (!integers || w->ndim != 2 || ids->ndim >= TSH_MAX_DIMS)
        (void)tsh_fail(w->ctx, integers ? TSH_ERR_SHAPE : TSH_ERR_DTYPE,
                       "tsh_embedding: ids %s %s, weight %s; takes ids of i32 or i64, as "
                       "tsh_cast(ids, TSH_I64) gives, and a weight (V, D)",
                       tshi_dtype_name(ids->dtype), tshi_tensor_text(ids, ti),
                       tshi_tensor_text(w, tw));
    else if (desc->max_norm > 0 && w->base->node)
        (void)tsh_fail(w->ctx, TSH_ERR_ARGUMENT,
                       "tsh_embedding: max_norm changes the weight in place, but it is what %s "
                       "gave; pass the leaf itself",
                       w->base->node->op->name);
    else if (desc->max_norm > 0 && tshi_dtype_in_blocks(w->dtype))
        (void)tsh_fail(w->ctx, TSH_ERR_ARGUMENT,
                       "tsh_embedding: max_norm changes the weight in place, and this one is "
                       "quantised (%s)",
                       tshi_dtype_name(w->dtype));
    return w->ctx->error.code == TSH_OK &&
           tshi_embedding_options(w->ctx, "tsh_embedding", desc, w->dim[0]);
}

/* Looks up all ids into out. Then sets row[i] to -1 for each padding id, so that it gets no
 * gradient. */
static void tshi_embedding_run(tsh_tensor *ids, tsh_tensor *w, const tsh_lookup_desc *desc,
                               const tshi_lookup *lookup, int64_t *row, tsh_tensor *out) {
    tshi_block *scratch;
    const void *values = tshi_kernel_packed(ids, &scratch); /* the ids, dense, shape (count) */
    int64_t i, padding = desc->padding_idx + (desc->padding_idx < 0 ? w->dim[0] : 0);
    if (!values) return;
    if (tshi_embedding_rows(ids, w, values, row)) {
        tshi_embedding_prepare(ids, w, desc, row);
        tshi_embedding_forward(w, lookup, row, out);
    }
    for (i = 0; i < lookup->count && desc->padding; i++)
        if (tshi_tensor_integer(ids, values, i) == padding) row[i] = -1;
    tshi_mem_release(w->ctx, scratch);
}

static const tshi_op tshi_embedding_op = {
    "tsh_embedding", "ids weight", tshi_rule_embedding, tshi_embedding_backward, TSHI_NONE, 0};

TSH_API tsh_tensor *tsh_embedding(tsh_tensor *ids, tsh_tensor *w, const tsh_lookup_desc *desc) {
    static const tsh_lookup_desc usual = {0, 0, 0, 0, 0, 0}; /* zeros: no options */
    const tshi_op *op = &tshi_embedding_op;
    tsh_tensor *in[] = {ids, w}, *out; /* shapes: ids (..), w (V, D); out (.., D) */
    tsh_ctx *ctx = tshi_tensor_check_any("tsh_embedding", op->inputs, in, 2);
    const int blocks = ctx && tshi_dtype_in_blocks(w->dtype); /* 1: w is quantised */
    tshi_output output;
    tshi_block *aux; /* each id's local row, and count: see tshi_lookup */
    tshi_lookup lookup;
    if (!desc) desc = &usual;
    if (!ctx || (!blocks && !tshi_tensor_check_floating("tsh_embedding", "weight", &w, 1)))
        return NULL;
    if (!tshi_embedding_check(ids, w, desc) || !tshi_rule_run(op, in, 2, NULL, &output))
        return NULL;
    output.shape = tsh_shape_of(ids);
    output.shape.dim[output.shape.ndim++] = w->dim[1]; /* shape (.., D) */
    lookup.count = tsh_local_numel(ids);
    lookup.width = w->local[1];
    lookup.by_count = desc->scale_grad_by_freq != 0;
    lookup.sparse = desc->sparse != 0;
    out = tshi_tensor_out(ctx, "tsh_embedding", blocks ? TSH_REAL : w->dtype, &output.shape,
                          &output.layout);
    aux = out ? tshi_mem_alloc(ctx, TSH_MEM_STEP,
                               (size_t)(lookup.count * (lookup.by_count ? 2 : 1)) * sizeof(int64_t))
              : NULL;
    if (!aux) return NULL;
    tshi_embedding_run(ids, w, desc, &lookup, (int64_t *)tshi_mem_data(aux), out);
    tshi_op_record(op, out, in, 2, output.partial, &lookup, sizeof lookup, aux);
    return ctx->error.code == TSH_OK ? out : NULL;
}
