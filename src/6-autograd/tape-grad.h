/* ========================================================================== */
/* >>tape-grad                                    MARK: - tape-grad (private) */
/* The two accumulators of a tensor, to which backward adds its gradients.    */
/* Needs: >>kernel-round >>bucket >>wire >>tape.                              */
/* ========================================================================== */

/* Where a contribution to the gradient of an input goes. */
typedef struct tshi_dest {
    tsh_real *data;        /* where the gradient of the input's first local element goes */
    const int64_t *stride; /* strides of data in elements, which are those of the input */
    int add;               /* 0: the contribution overwrites data; 1: it is added to data */
} tshi_dest;

/* Gradients of leaves with tsh_optim_desc.grad_dtype are packed: after each contribution,
 * tshi_tape_pack rounds them to bf16 and frees the accumulator. gr.live is 1 then, but gr.block is
 * NULL. tshi_tape_allocate unpacks them, for the next contribution. */

/* Returns the gradient of t, in its accumulator gr, as an operand of a kernel: of tsh_real, or of
 * bf16 while it is packed. */
static tshi_operand tshi_tape_operand(const tsh_tensor *t) {
    return t->gr.block ? tshi_kernel_reals((tsh_real *)tshi_mem_data(t->gr.block), 1)
                       : tshi_kernel_operand(tshi_mem_data(t->packed), 1, TSH_BF16);
}

/* Allocates acc, an accumulator of base, if it has no memory yet; a packed gradient is unpacked.
 * Returns 0 if there is no memory. */
static int tshi_tape_allocate(tsh_tensor *base, tshi_accumulator *acc) {
    const int64_t n = tsh_local_numel(base);
    if (acc->block) return 1;
    acc->block = tshi_mem_alloc(base->ctx, tshi_tensor_grad_kind(base), tshi_dtype_reals(n));
    if (acc->block && acc->live)
        tshi_dtypes[TSH_BF16].load(tshi_mem_data(base->packed), 1, n,
                                   (tsh_real *)tshi_mem_data(acc->block));
    return acc->block != NULL;
}

/* Rounds the local elements [from, to) of a leaf's gradient to bf16. Runs on any thread. */
static void tshi_tape_pack_part(void *job, int thread, int64_t from, int64_t to) {
    const tsh_tensor *t = (const tsh_tensor *)job;
    tshi_runs run = tshi_tensor_own_runs(t);
    tshi_noise noise = {t->ctx->seed, tshi_rng_hash(t->packs, "gradient", 8), 0};
    (void)thread;
    noise.stream = tshi_rng_hash(noise.stream + (uint64_t)*t->updates, t->path, strlen(t->path));
    while (tshi_tensor_next_run_in(&run, from, to)) {
        tshi_operand x[2];
        x[0] = tshi_kernel_operand(tshi_mem_data(t->packed), 1, TSH_BF16);
        x[1] = tshi_kernel_reals((tsh_real *)tshi_mem_data(t->gr.block), 1);
        tshi_kernel_move(&x[0], run.local);
        tshi_kernel_move(&x[1], run.local);
        noise.element = run.global;
        tshi_kernel_random[t->ctx->isa](run.length, x, &noise);
    }
}

/* Rounds a leaf's gradient to bf16, if its optimiser has .grad_dtype TSH_BF16. Leaves it unchanged
 * if it is row-sparse, or is still to be summed over dp, which is done in float. */
static void tshi_tape_pack(tsh_tensor *t) {
    const int64_t n = tsh_local_numel(t);
    if (t->ctx->tape.syncing && (t->flags & TSHI_AVERAGED)) return;
    if (!tshi_tensor_packs(t) || !t->gr.live || !t->gr.block || t->sparse) return;
    if (!t->packed)
        t->packed = tshi_mem_alloc(t->ctx, TSH_MEM_STEP, tshi_dtype_bytes(TSH_BF16, n));
    if (!t->packed) return;
    tshi_team_run(t->ctx, tshi_kernel_parts(t->ctx, n, 1), n, 16, tshi_tape_pack_part, t);
    tshi_mem_release(t->ctx, t->gr.block);
    t->gr.block = NULL;
    t->packs++;
}

/* Fills acc, an accumulator of base, with zeros and marks it live: it has a gradient now. */
static void tshi_tape_zero(const tsh_tensor *base, tshi_accumulator *acc) {
    tshi_mem_clear(base->ctx, acc->block, tshi_dtype_reals(tsh_local_numel(base)));
    acc->live = 1;
}

/* Fills *dest: where in acc, an accumulator of t's base, a contribution to the gradient of t goes.
 * Marks acc live: it has a gradient now. Returns 0 if there is not enough memory. */
static int tshi_tape_dest_in(tsh_tensor *t, tshi_accumulator *acc, tshi_dest *dest) {
    tsh_tensor *base = t->base;
    if (!tshi_tape_allocate(base, acc)) return 0;
    dest->data = (tsh_real *)tshi_mem_data(acc->block) + (t->offset - base->offset);
    dest->stride = t->stride;
    if (!acc->live && tsh_local_numel(t) != tsh_local_numel(base)) /* t is only a part of base */
        tshi_tape_zero(base, acc);
    dest->add = acc->live; /* the first contribution overwrites */
    acc->live = 1;
    acc->clean = base->sparse = 0; /* from now on, any row may differ from 0 */
    return 1;
}

/* Returns the dtype in which t's partial gradient is all-reduced over tp: bf16 if t is a step
 * tensor of bf16 (an activation), else tsh_real. (Not f16 for f16: small gradients would become
 * 0.) */
static tsh_dtype tshi_tape_sent_as(const tsh_tensor *t) {
    return t->dtype == TSH_BF16 && !(t->base->flags & TSHI_OWNED) ? TSH_BF16 : TSH_REAL;
}

/* Returns 1 if the node's gradient of input i is a partial sum over tp. */
static int tshi_tape_is_partial(const tshi_node *node, int i) {
    return (node->progress.partial >> i & 1u) && node->out->ctx->tp.size > 1;
}

/* Returns the accumulator that the node's gradient of input i is added to. */
static tshi_accumulator *tshi_tape_accumulator(const tshi_node *node, int i) {
    tsh_tensor *base = node->in[i]->base;
    return tshi_tape_is_partial(node, i) ? &base->gp : &base->gr;
}

/* The argument of a backward whose work several threads share. */
typedef struct tshi_shared {
    const tshi_node *node; /* the recorded call */
    tshi_dest dest;        /* where the gradient goes */
} tshi_shared;

/* Returns 1 if t has all elements of its base, in the same order. */
static int tshi_tape_is_whole(const tsh_tensor *t) {
    const tsh_tensor *base = t->base;
    return !base->offset && !t->offset && tshi_tensor_is_dense(t) &&
           tsh_local_numel(t) == tsh_local_numel(base);
}

/* Fills *dest: where the op's backward writes its gradient of input i. Returns 0 if input i needs
 * no gradient, or after an error. */
TSHI_OUTLINE int tshi_tape_dest(tshi_node *node, int i, tshi_dest *dest) {
    tsh_tensor *t = node->in[i];
    if (!t || !t->base->requires_grad) return 0;
    return tshi_tape_dest_in(t, tshi_tape_accumulator(node, i), dest);
}

/* Does what tshi_tape_dest does, for an op that reads each saved value of input i before it writes
 * the gradient of that element: the gradient overwrites the saved values, if nothing else refers to
 * them. */
static int tshi_tape_dest_over(tshi_node *node, int i, tshi_dest *dest) {
    tsh_tensor *t = node->in[i], *base = t->base;
    tshi_accumulator *acc = tshi_tape_accumulator(node, i);
    tshi_block *values = node->saved[i];
    if (base->requires_grad && !acc->block && values && values->refs == 1 &&
        tshi_tape_is_whole(t)) {
        acc->block = values; /* the gradient gets the memory of the saved values */
        values->refs++;
    }
    return tshi_tape_dest(node, i, dest);
}

/* Does what tshi_tape_dest does, for an op that can only add: first zeroes a new accumulator. */
TSHI_OUTLINE int tshi_tape_dest_zeroed(tshi_node *node, int i, tshi_dest *dest) {
    if (!tshi_tape_dest(node, i, dest)) return 0;
    if (!dest->add) tshi_tape_zero(node->in[i]->base, tshi_tape_accumulator(node, i));
    dest->add = 1;
    return 1;
}

/* Does what tshi_tape_dest does, for an op that adds to only a few rows of a leaf of shape (rows,
 * ...). The op must set (*marks)[row] = 1 for each local row that it adds to. *marks NULL: the
 * gradient is dense, and no row is to be marked. The accumulator is filled with zeros first, unless
 * it is known to contain zeros. */
static int tshi_tape_dest_rows(tshi_node *node, int i, tshi_dest *dest, int32_t **marks) {
    tsh_tensor *t = node->in[i], *base = t->base;
    tshi_accumulator *acc = tshi_tape_accumulator(node, i);
    size_t size = (size_t)t->local[0] * sizeof **marks; /* bytes of one mark per local row */
    *marks = NULL;
    if (t != base || base->node || !base->requires_grad)
        return tshi_tape_dest_zeroed(node, i, dest);
    if (base->marks && base->marks->size < size) { /* too small: made for fewer rows */
        tshi_mem_release(base->ctx, base->marks);
        base->marks = NULL;
    }
    if (!base->marks) base->marks = tshi_mem_alloc(base->ctx, TSH_MEM_GRADIENTS, size);
    if (!base->marks || !tshi_tape_allocate(base, acc)) return 0;
    if (!base->gr.live && !base->gp.live) { /* no gradient yet */
        memset(tshi_mem_data(base->marks), 0, size);
        base->sparse = 1; /* rows without a mark are 0 */
    }
    dest->data = (tsh_real *)tshi_mem_data(acc->block);
    if (!acc->live && !acc->clean) tshi_tape_zero(base, acc);
    dest->stride = t->stride;
    dest->add = acc->live = 1; /* the op adds; the first time, to zeros */
    acc->clean = 0;
    if (base->sparse) *marks = (int32_t *)tshi_mem_data(base->marks);
    return 1;
}

/* Counts one contribution to a leaf. After the last expected one, adds the gradient to a bucket, to
 * be summed over dp. Partial and row-sparse gradients are not added here: tshi_tape_sync first
 * all-reduces partial ones over tp, and handles the rows of sparse ones. */
static void tshi_tape_deliver(tsh_tensor *leaf) {
    if (--leaf->contributions > 0 || !leaf->ctx->tape.syncing || !(leaf->flags & TSHI_AVERAGED) ||
        !leaf->gr.live || leaf->gp.live || leaf->sparse || !tshi_tape_allocate(leaf, &leaf->gr))
        return;
    tshi_bucket_add_grad(leaf);
}

/* All-reduces the row marks of t's row-sparse gradient (does nothing if it is dense): a row is
 * marked afterwards if any rank of comm has added to it. All ranks of comm must call it. */
static void tshi_tape_merge_rows(tsh_tensor *t, tsh_comm *comm) {
    if (t->sparse && comm->size > 1)
        (void)tshi_error_comm(
            t->ctx, tsh_allreduce(comm, tshi_mem_data(t->marks), t->local[0], TSH_I32, TSH_MAX),
            "tsh_backward: all-reduce of the rows that a gradient touches");
}

/* For tsh_detect_anomaly: returns 1 if t's gradient in acc is finite, or acc is empty. Else returns
 * 0 and an error such as "the <what> of <name> (2, 3) R has NaN". length: bytes of name. */
static TSHI_COLD int tshi_tape_check_grad(const tshi_node *node, const tsh_tensor *t,
                                          const tshi_accumulator *acc, const char *what,
                                          const char *name, int length) {
    char form[TSHI_TEXT_SIZE], found[TSHI_TEXT_SIZE];
    /* NULL: nothing to check; a packed gradient was checked before it was packed */
    const tsh_real *grad = acc->live && acc->block ? (const tsh_real *)tshi_mem_data(acc->block)
                                                   : NULL;
    if (!grad ||
        !tshi_tape_not_finite(t, grad + (t->offset - t->base->offset), TSH_REAL, t->stride, found))
        return 1;
    return tsh_fail(t->ctx, TSH_ERR_ANOMALY, "%s: the %s of %.*s %s has %s", node->op->name, what,
                    length, name, tshi_tensor_text(t, form), found) == TSH_OK;
}

/* For tsh_detect_anomaly: called when the node has added to the gradient of input i. Returns 0 and
 * an error if one of its accumulators, gr and gp, is not finite; skips gp while its all-reduce
 * runs. */
static TSHI_COLD int tshi_tape_check_input(const tshi_node *node, int i) {
    const tsh_tensor *t = node->in[i], *base = t->base;
    int length;
    const char *name = tshi_tensor_name(node->op->inputs, i, &length);
    return tshi_tape_check_grad(node, t, &base->gr, "gradient", name, length) &&
           (base->reducing || tshi_tape_check_grad(node, t, &base->gp, "gradient", name, length));
}

/* Marks the node's gradient of input i as complete. If the input is a leaf, counts one contribution
 * to it (tshi_tape_deliver). If it is another tensor and this was its last partial contribution,
 * starts the all-reduce of its gp, which runs while backward goes on (one in the wire's dtype is
 * complete at once). An op whose backward has more
 * work to do after this gradient calls this function early; tshi_tape_walk calls it for all other
 * inputs. */
static void tshi_tape_input_done(tshi_node *node, int i) {
    tsh_tensor *base = node->in[i] ? node->in[i]->base : NULL;
    tsh_ctx *ctx = node->out->ctx;
    const char *what = "tsh_backward: all-reduce of a gradient";
    void *values; /* the partial gradient: n values, sent as `dtype` */
    tsh_dtype dtype;
    int64_t n;
    if (!base || !base->requires_grad || (node->progress.done >> i & 1u)) return;
    node->progress.done |= 1u << i;
    if (ctx->anomalies && !tshi_tape_check_input(node, i)) return;
    if (!base->node) { /* base is a leaf */
        tshi_tape_deliver(base);
        return;
    }
    if (!tshi_tape_is_partial(node, i) || --base->partial_contributions > 0) return;
    if (tshi_tape_accepts_partial(base->node) || !base->gp.live || ctx->error.code != TSH_OK)
        return;
    values = tshi_mem_data(base->gp.block);
    n = tsh_local_numel(base);
    dtype = tshi_tape_sent_as(base);
    base->req = 0;
    tshi_kernel_narrow(values, n, dtype);
    if (tshi_wire_dtype(ctx, TSHI_WIRE_ACTIVATION, dtype, n) == dtype)
        (void)tshi_error_comm(
            ctx, tsh_allreduce_start(&ctx->tp, values, n, dtype, TSH_SUM, &base->req), what);
    else
        (void)tshi_wire_reduce(ctx, values, n, dtype, what);
    base->reducing = ctx->error.code == TSH_OK; /* tshi_tape_complete waits for base->req */
}

/* Adds x to y, n elements each. */
static void tshi_tape_add_all(const tsh_ctx *ctx, tsh_real *y, const tsh_real *x, int64_t n) {
    const tshi_operand operands[2] = {tshi_kernel_reals(y, 1), tshi_kernel_reals(x, 1)};
    tshi_kernel_add[ctx->isa](n, operands, NULL);
}

/* Adds the accumulator gp of t, already summed over tp, to gr, and empties gp. If gr is empty,
 * swaps the two. */
static void tshi_tape_merge(tsh_tensor *t) {
    if (!t->gp.live) return;
    if (t->gr.live) {
        if (!tshi_tape_allocate(t, &t->gr)) return;
        tshi_tape_add_all(t->ctx, (tsh_real *)tshi_mem_data(t->gr.block),
                          (const tsh_real *)tshi_mem_data(t->gp.block), tsh_local_numel(t));
        t->gp.live = 0; /* gp is empty now */
    } else {
        tshi_accumulator swap = t->gr; /* gr is empty: swaps the accumulators */
        t->gr = t->gp;
        t->gp = swap;
    }
}

/* Completes the gradient of t, an op's output: waits for the all-reduce of gp, adds gp to gr, and
 * fills gr with zeros if there was no contribution. Returns gr's values, or NULL after an error. */
static tsh_real *tshi_tape_complete(tsh_tensor *t) {
    tsh_ctx *ctx = t->ctx;
    if (t->reducing) {
        t->reducing = 0;
        (void)tshi_error_comm(ctx, tsh_wait(&ctx->tp, t->req),
                              "tsh_backward: all-reduce of a gradient");
        tshi_kernel_widen(tshi_mem_data(t->gp.block), tsh_local_numel(t), tshi_tape_sent_as(t));
    }
    if (ctx->error.code != TSH_OK) return NULL;
    tshi_tape_merge(t);
    if (!tshi_tape_allocate(t, &t->gr)) return NULL;
    if (!t->gr.live) tshi_tape_zero(t, &t->gr);
    return (tsh_real *)tshi_mem_data(t->gr.block);
}

/* Completes the gradient of one output of the node (tshi_tape_complete) and, for
 * tsh_detect_anomaly, checks that it is finite. Returns 0 after an error. */
static int tshi_tape_complete_one(const tshi_node *node, tsh_tensor *out) {
    return tshi_tape_complete(out) &&
           (!out->ctx->anomalies ||
            tshi_tape_check_grad(node, out, &out->gr, "sum of the gradients", "the output", 10));
}

/* Completes the gradients of the node's outputs, unless the node's backward accepts partial ones.
 * Of several outputs, those that the loss does not depend on get none. Returns 0 after an error. */
static int tshi_tape_complete_out(const tshi_node *node) {
    int ok = 1;
    if (tshi_tape_accepts_partial(node)) return 1;
    if (!node->more_count) return tshi_tape_complete_one(node, node->out);
    for (int i = -1; i < node->more_count && ok; i++) {
        tsh_tensor *out = i < 0 ? node->out : node->more[i];
        if (out->gr.live || out->gp.live) ok = tshi_tape_complete_one(node, out);
    }
    return ok;
}

/* Returns the complete gradient of the node's output, which the node's backward reads. */
static tsh_real *tshi_tape_grad(const tshi_node *node) {
    return (tsh_real *)tshi_mem_data(node->out->gr.block);
}

/* Writes `values`, of t's local shape and these strides, to dest, or adds them if dest->add. */
static void tshi_tape_accumulate(const tsh_tensor *t, const tshi_dest *dest, const tsh_real *values,
                                 const int64_t *stride) {
    tshi_loop loop;
    tshi_kernel_space(&loop, t);
    tshi_kernel_add_operand(&loop, t, dest->data, dest->stride, TSH_REAL);
    tshi_kernel_add_operand(&loop, t, values, stride, TSH_REAL);
    tshi_kernel_run(&loop, dest->add ? tshi_kernel_add[t->ctx->isa] : tshi_kernel_copy, NULL);
}

/* Does the backward of an op whose gradient of input i equals that of its output. The input's
 * accumulator shares the memory of the output's, without a copy, if it has no memory yet and no
 * later input has the same base. */
static void tshi_tape_identity(tshi_node *node, int i) {
    tsh_tensor *t = node->in[i], *base = t->base, *out = node->out;
    tshi_accumulator *acc = tshi_tape_accumulator(node, i);
    tshi_dest dest;
    int k, alone = !((base->flags & TSHI_OWNED) | (out->flags & TSHI_RETAIN)) && !acc->block &&
                   out->gr.block->refs == 1 && tshi_tape_is_whole(t);
    for (k = i + 1; k < node->n; k++) alone &= node->in[k]->base != base;
    if (base->requires_grad && alone) {
        acc->block = out->gr.block;
        acc->block->refs++; /* the input's gradient shares the block */
        acc->live = 1;
    } else if (tshi_tape_dest(node, i, &dest)) {
        tshi_tape_accumulate(node->in[i], &dest, tshi_tape_grad(node), out->stride);
    }
}
