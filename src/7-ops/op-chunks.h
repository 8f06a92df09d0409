/* ========================================================================== */
/* >>op-chunks                                    MARK: - op-chunks (private) */
/* tsh_loss_in_chunks: losses of a few rows at a time, and their gradients.   */
/* Needs: >>tape-leaf >>op-view.                                              */
/* ========================================================================== */

/* L = sum of fn(x_c, t_c) over the chunks c of rows of x (rows, C) and of the target t. What fn
 * computes for a chunk, such as logits, is released before the next chunk begins. If gradients are
 * recorded, each chunk has a tape of its own, and backward through it runs at once, as if the
 * gradient of L were 1. Gradients of L are linear in that of L, so that backward of L has only to
 * multiply them by it: nothing is computed twice.
 *   The sources are the tensors that the chunks read, that were made outside of them and that
 * require a gradient: x, weights. While chunks run, the gradient accumulators of a source hold
 * gradients of L alone; the gradients that the source had before are kept in tshi_chunk_source.
 * Afterwards the node of L keeps the gradients of L in node->saved, each at the index of the input
 * that it belongs to. */

enum {
    TSHI_CHUNK_ROWS = 256,  /* rows of a chunk if the caller does not say */
    TSHI_CHUNK_SOURCES = 16 /* max sources: a source is up to two inputs of a node, and masks of
                             * inputs have 32 bits */
};

/* A source: a tensor made outside of the chunks that they read and that requires a gradient. */
typedef struct tshi_chunk_source {
    tsh_tensor *base; /* the tensor, or the one that it is a view of */
    /* the node and gradients that base had before the chunks; after the chunks, the gradients of L.
     * Only the fields that tshi_chunks_exchange exchanges are used. */
    tsh_tensor other;
} tshi_chunk_source;

/* A call of tsh_loss_in_chunks. */
typedef struct tshi_chunks {
    tsh_ctx *ctx;
    tsh_tensor *x, *target;      /* shapes (rows, C) and (rows) or (rows, ..) */
    const tsh_chunks_desc *desc; /* options of the call */
    double total;                /* sum of the losses of the chunks that were computed so far */
    int count;                   /* number of sources */
    tshi_chunk_source source[TSHI_CHUNK_SOURCES];
} tshi_chunks;

/* -- sources ---------------------------------------------------------------- */

/* Swaps the node, the gradients and the fields that belong to these between a source's base and its
 * `other`. */
static void tshi_chunks_exchange(tsh_tensor *base, tsh_tensor *other) {
    const tsh_tensor was = *base;
    base->node = other->node;
    base->gr = other->gr;
    base->gp = other->gp;
    base->partial_contributions = other->partial_contributions;
    base->contributions = other->contributions;
    base->reducing = other->reducing;
    base->req = other->req;
    base->sparse = other->sparse;
    base->marks = other->marks;
    base->grad_dtype = other->grad_dtype;
    base->packed = other->packed;
    *other = was;
}

/* Moves the memory of accumulator `from`, if it holds no gradient, to accumulator `to`, if that has
 * no memory. */
static void tshi_chunks_give(tshi_accumulator *from, tshi_accumulator *to) {
    if (from->live || to->block) return;
    *to = *from;
    memset(from, 0, sizeof *from);
}

/* Makes base a source, if it requires a gradient, was made outside of the chunks, and is no source
 * yet. While chunks run a source is a leaf without a gradient: its gradient is neither all-reduced
 * nor rounded to bf16. Returns 0 after an error. */
static int tshi_chunks_add(tshi_chunks *c, tsh_tensor *base) {
    tshi_chunk_source *source = &c->source[c->count];
    if (!base || !base->requires_grad) return 1;
    /* a step tensor made by fn inside the chunk is no source */
    if (!(base->flags & TSHI_OWNED) && base->depth >= c->ctx->depth) return 1;
    for (int i = 0; i < c->count; i++)
        if (c->source[i].base == base) return 1;
    if (c->count == TSHI_CHUNK_SOURCES)
        return tshi_error_zero(c->ctx, TSH_ERR_UNSUPPORTED,
                               "tsh_loss_in_chunks: fn reads more than %d tensors that require a "
                               "gradient; compute what they are needed for before the chunks",
                               TSHI_CHUNK_SOURCES);
    c->count++;
    source->base = base;
    memset(&source->other, 0, sizeof source->other);
    tshi_chunks_exchange(base, &source->other);
    tshi_chunks_give(&source->other.gr, &base->gr);
    tshi_chunks_give(&source->other.gp, &base->gp);
    tshi_tensor_ref(base);
    return 1;
}

/* Adds the sources of a chunk: tensors made outside of it that the calls on its tape read, and y,
 * the chunk's losses, if fn has returned such a tensor. Returns 0 after an error. */
static int tshi_chunks_find(tshi_chunks *c, tsh_tensor *y) {
    int ok = tshi_chunks_add(c, y->base);
    for (const tshi_node *node = c->ctx->tape.newest; node; node = node->older) {
        for (int i = 0; i < node->n && ok; i++)
            ok = !node->in[i] || tshi_chunks_add(c, node->in[i]->base);
        for (int i = 0; i < node->leaf_count && ok; i++) ok = tshi_chunks_add(c, node->leaves[i]);
    }
    return ok;
}

/* Gives each source back the node and gradients that it had before the chunks. From then on,
 * source.other has the gradients of L. */
static void tshi_chunks_restore(tshi_chunks *c) {
    for (int i = 0; i < c->count; i++) {
        tsh_tensor *base = c->source[i].base, *kept = &c->source[i].other;
        tshi_chunks_exchange(base, kept);
        tshi_chunks_give(&kept->gr, &base->gr);
        tshi_chunks_give(&kept->gp, &base->gp);
        tshi_mem_release(c->ctx, kept->marks);
    }
}

/* -- forward: chunk by chunk ------------------------------------------------ */

/* Checks the losses y that fn returned for a chunk. Returns 0 after an error. */
static int tshi_chunks_check(const tshi_chunks *c, tsh_tensor *y) {
    tsh_ctx *ctx = c->ctx;
    char text[TSHI_TEXT_SIZE];
    if (!y) /* fn may return NULL and set no error; an earlier error stays */
        return tshi_error_zero(ctx, TSH_ERR_ARGUMENT, "tsh_loss_in_chunks: fn returned NULL");
    if (y->ctx != ctx) {
        (void)tshi_tensor_refuse_ctx(ctx, "tsh_loss_in_chunks", "the result of fn", y->ctx);
        return 0;
    }
    if (!tshi_tensor_check_floating("tsh_loss_in_chunks", "fn(..)", &y, 1)) return 0;
    return y->layout.kind == TSH_REPLICATED ||
           tshi_error_zero(ctx, TSH_ERR_LAYOUT,
                           "tsh_loss_in_chunks: fn returned losses %s; they must be replicated: "
                           "tsh_redistribute(x, tsh_replicated()) before the chunks",
                           tshi_tensor_text(y, text));
}

/* Runs backward through the chunk's tape, from the losses y, with a gradient of 1 for each. */
static void tshi_chunks_back(tshi_chunks *c, tsh_tensor *y) {
    /* strides of 0: all elements have the gradient `one` */
    static const int64_t none[TSH_MAX_DIMS] = {0};
    const tsh_real one = 1;
    tshi_dest dest;
    if (!y->base->requires_grad || !tshi_chunks_find(c, y) ||
        !tshi_tape_dest_in(y, &y->base->gr, &dest))
        return;
    tshi_tape_accumulate(y, &dest, &one, none);
    tshi_tape_mark(c->ctx, y);
    tshi_tape_release_values(c->ctx, y, c->ctx->depth);
    tshi_tape_walk(c->ctx);
}

/* Computes a chunk, n rows from row `at` on: calls fn, adds its losses to the total one by one, in
 * the order of the rows, and runs their backward. */
static void tshi_chunks_run(tshi_chunks *c, int64_t at, int64_t n) {
    tsh_ctx *ctx = c->ctx;
    tshi_node *outer = ctx->tape.newest; /* the newest call on the tape outside of the chunks */
    tshi_block *scratch = NULL;
    tsh_tensor *x, *target, *y;
    const int depth = ctx->depth, no_grad = ctx->tape.no_grad;
    ctx->tape.newest = NULL; /* starts an empty tape */
    tsh_scope_begin(ctx);    /* its end releases all tensors of the chunk */
    x = tsh_slice(c->x, 0, at, n);
    target = x ? tsh_slice(c->target, 0, at, n) : NULL;
    y = target ? c->desc->fn(x, target, c->desc->user) : NULL;
    if (ctx->depth != depth + 1 || ctx->tape.no_grad != no_grad) {
        (void)tsh_fail(ctx, TSH_ERR_STATE,
                       "tsh_loss_in_chunks: fn begins more than it ends, or ends more than it "
                       "begins, of tsh_scope_begin and tsh_no_grad_begin");
        ctx->tape.no_grad = no_grad;
    } else if (tshi_chunks_check(c, y)) {
        const int64_t count = tsh_local_numel(y);
        const void *losses = tshi_kernel_packed(y, &scratch);
        for (int64_t i = 0; i < count && losses; i++)
            c->total += tshi_dtype_get(y->dtype, losses, i);
        tshi_mem_release(ctx, scratch);
        if (losses) tshi_chunks_back(c, y);
    }
    tshi_tape_walk(ctx); /* releases the calls on the tape, if no backward has */
    while (ctx->depth > depth) tsh_scope_end(ctx);
    ctx->tape.newest = outer;
}

/* -- the node of the sum ---------------------------------------------------- */

/* Backward: multiplies the kept gradients by that of L and adds them to those of the inputs. */
static void tshi_chunks_backward(tshi_node *node) {
    const tsh_real g = *tshi_tape_grad(node);
    for (int i = 0; i < node->n; i++) {
        tsh_tensor *base = node->in[i];
        const int64_t n = tsh_local_numel(base);
        tshi_accumulator *acc = tshi_tape_accumulator(node, i);
        tsh_real *kept = (tsh_real *)tshi_mem_data(node->saved[i]);
        tshi_dest dest;
        for (int64_t e = 0; e < n && g != 1; e++) kept[e] *= g;
        if (acc->live) {
            if (tshi_tape_dest(node, i, &dest))
                tshi_tape_accumulate(base, &dest, kept, base->stride);
        } else if (base->requires_grad) { /* the kept gradient becomes the input's */
            tshi_mem_release(base->ctx, acc->block);
            acc->block = node->saved[i];
            node->saved[i] = NULL;
            acc->live = 1;
            acc->clean = base->sparse = 0;
        }
    }
}

static const tshi_op tshi_chunks_op = {"tsh_loss_in_chunks", NULL,      NULL,
                                       tshi_chunks_backward, TSHI_NONE, 0};

/* Records the node of L (out). Its inputs are the sources, once for each of a source's accumulators
 * (gr, gp) that has a gradient. */
static void tshi_chunks_record(tshi_chunks *c, tsh_tensor *out) {
    tsh_tensor *in[2 * TSHI_CHUNK_SOURCES];
    tshi_accumulator *kept[2 * TSHI_CHUNK_SOURCES];
    tshi_node *node;
    unsigned partial = 0;
    int n = 0;
    for (int i = 0; i < 2 * c->count; i++) {
        tsh_tensor *other = &c->source[i / 2].other;
        kept[n] = i % 2 ? &other->gp : &other->gr;
        if (!kept[n]->live) continue;
        if (i % 2) partial |= 1u << n;
        in[n++] = c->source[i / 2].base;
    }
    node = n ? tshi_tape_add(&tshi_chunks_op, out, in, n, partial, 0) : NULL;
    for (int i = 0; i < n && node; i++) {
        node->saved[i] = kept[i]->block; /* the node releases it */
        kept[i]->block = NULL;
    }
}

/* Runs all chunks and returns L; NULL: an error. */
static tsh_tensor *tshi_chunks_sum(tshi_chunks *c) {
    tsh_ctx *ctx = c->ctx;
    const tsh_shape scalar = tsh_shape0();
    const tsh_layout whole = tsh_replicated();
    const int64_t all = c->x->dim[0];
    const int64_t rows = c->desc->rows ? c->desc->rows : (int64_t)TSHI_CHUNK_ROWS;
    const int syncing = ctx->tape.syncing; /* 1: in a backward that sends gradients over dp */
    int64_t at = 0;
    tsh_tensor *out;
    ctx->tape.syncing = 0; /* gradients of the sources are not complete: not sent */
    ctx->tape.locked++;    /* fn may not run the tape's backward, or end the step */
    do {
        tshi_chunks_run(c, at, tshi_base_min(rows, all - at));
        at += rows;
    } while (at < all && ctx->error.code == TSH_OK);
    ctx->tape.locked--;
    ctx->tape.syncing = syncing;
    tshi_chunks_restore(c);
    out = ctx->error.code == TSH_OK
              ? tshi_tensor_out(ctx, tshi_chunks_op.name, TSH_REAL, &scalar, &whole)
              : NULL;
    if (out) {
        *tshi_tensor_values(out) = TSHI_R(c->total);
        tshi_chunks_record(c, out);
    }
    for (int i = 0; i < c->count; i++) {
        tshi_mem_release(ctx, c->source[i].other.gr.block);
        tshi_mem_release(ctx, c->source[i].other.gp.block);
        tshi_tensor_unref(c->source[i].base);
    }
    return ctx->error.code == TSH_OK ? out : NULL;
}

/* Returns t with its first `lead` dimensions merged into one, of `rows` rows; NULL: an error. */
static tsh_tensor *tshi_chunks_flat(tsh_tensor *t, int lead, int64_t rows) {
    tsh_shape shape = tsh_shape1(rows);
    for (int d = lead; d < t->ndim; d++) shape.dim[shape.ndim++] = t->dim[d];
    return tsh_reshape(t, shape);
}

TSH_API tsh_tensor *tsh_loss_in_chunks(tsh_tensor *x, tsh_tensor *target,
                                       const tsh_chunks_desc *desc) {
    const char *op = tshi_chunks_op.name;
    tsh_tensor *in[2];
    tshi_chunks chunks;
    char tx[TSHI_TEXT_SIZE], tt[TSHI_TEXT_SIZE];
    int64_t rows = 1;
    int fits;
    in[0] = x;
    in[1] = target;
    chunks.ctx = tshi_tensor_check(op, "x target", in, 2);
    if (!chunks.ctx) return NULL;
    if (!desc || !desc->fn || desc->rows < 0)
        return tshi_error_null(chunks.ctx, TSH_ERR_ARGUMENT,
                               desc && desc->fn ? "%s: .rows is %lld; it must not be negative"
                                                : "%s: .fn, which computes losses, is NULL",
                               op, desc ? (long long)desc->rows : 0);
    fits = x->ndim > 0 && target->ndim >= x->ndim - 1;
    for (int d = 0; d < x->ndim - 1 && fits; d++) {
        fits = x->dim[d] == target->dim[d];
        rows *= x->dim[d];
    }
    if (!fits)
        return tshi_error_null(chunks.ctx, TSH_ERR_SHAPE,
                               "%s: x %s and target %s; x is (.., C), and the target begins with "
                               "the same dimensions (..)",
                               op, tshi_tensor_text(x, tx), tshi_tensor_text(target, tt));
    chunks.x = tshi_chunks_flat(x, x->ndim - 1, rows);
    chunks.target = chunks.x ? tshi_chunks_flat(target, x->ndim - 1, rows) : NULL;
    chunks.desc = desc;
    chunks.total = 0;
    chunks.count = 0;
    return chunks.target ? tshi_chunks_sum(&chunks) : NULL;
}
