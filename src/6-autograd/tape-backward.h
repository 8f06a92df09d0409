/* ========================================================================== */
/* >>tape-backward                            MARK: - tape-backward (private) */
/* Backward: marks the nodes that a loss depends on, and runs them.           */
/* Then it sums the gradients of leaves over the ranks of tp and of dp.       */
/* Needs: >>profile >>tape-grad.                                              */
/* ========================================================================== */

/* Returns 1 if a call may empty the tape or run its backward. Callbacks of the program, such as a
 * custom op's backward, must not do so while a backward or the forward of a checkpoint is running:
 * then returns 0, with an error that names op. */
static int tshi_tape_unlocked(tsh_ctx *ctx, const char *op) {
    return !ctx->tape.locked ||
           tshi_error_zero(ctx, TSH_ERR_STATE,
                           "%s: is called while a backward or the forward of a checkpoint goes on, "
                           "whose tape it would end; call it after that",
                           op);
}

/* Marks the nodes that the loss depends on, newest first. Counts how many gradients will be added
 * to each leaf (contributions), and how many partial ones to each tensor, leaf or not
 * (partial_contributions). */
static void tshi_tape_mark(const tsh_ctx *ctx, const tsh_tensor *loss) {
    if (loss->base->node) loss->base->node->progress.reached = 1;
    for (tshi_node *node = ctx->tape.newest; node; node = node->older) {
        if (!node->progress.reached) continue;
        node->progress.partial = node->partial;
        if ((node->op->flags & TSHI_OP_PASSES_PARTIAL) && tshi_tape_accepts_partial(node) &&
            node->out->partial_contributions)
            /* the output's partial gradient (gp) will be added to that of input 0 */
            node->progress.partial |= TSHI_X;
        for (int i = 0; i < node->n; i++) {
            tsh_tensor *base = node->in[i] ? node->in[i]->base : NULL;
            if (!base || !base->requires_grad) continue;
            if (base->node)
                base->node->progress.reached = 1;
            else
                base->contributions++; /* base is a leaf */
            if (tshi_tape_is_partial(node, i)) base->partial_contributions++;
        }
        for (int i = 0; i < node->leaf_count; i++) node->leaves[i]->contributions++;
    }
}

/* Releases the values of step tensors that were created at scope depth `depth` or deeper, except
 * of the loss and of retained tensors. Nodes hold references to the values that backward reads. */
static void tshi_tape_release_values(tsh_ctx *ctx, const tsh_tensor *loss, int depth) {
    tsh_tensor *t, *head = &ctx->handles.step;
    for (t = head->next; t != head; t = t->next) {
        if (t == loss || t->depth < depth || (t->flags & (TSHI_RETAIN | TSHI_STALE))) continue;
        tshi_mem_release(ctx, t->block);
        t->block = NULL;
        t->flags |= TSHI_STALE; /* reads by the user fail: TSH_ERR_STALE */
    }
}

/* Turns an output of a node that is being released into a constant, and releases its gradient
 * unless that is retained. */
static void tshi_tape_release_out(tsh_tensor *out) {
    tsh_ctx *ctx = out->ctx;
    /* after an error, the all-reduce of the gradient may still run */
    if (out->reducing) (void)tsh_wait(&ctx->tp, out->req);
    out->reducing = out->partial_contributions = 0;
    out->node = NULL; /* later backwards treat out as a constant */
    out->requires_grad = 0;
    if (out->flags & TSHI_RETAIN) return;
    tshi_mem_release(ctx, out->gr.block);
    tshi_mem_release(ctx, out->gp.block);
    memset(&out->gr, 0, sizeof out->gr);
    memset(&out->gp, 0, sizeof out->gp);
}

/* Releases the values that a node saved for backward, and turns its outputs into constants
 * (tshi_tape_release_out). */
static void tshi_tape_release_node(tshi_node *node) {
    tsh_ctx *ctx = node->out->ctx;
    for (int i = 0; i <= node->n; i++) tshi_mem_release(ctx, node->saved[i]);
    for (int i = 0; i < node->more_count; i++) {
        tshi_mem_release(ctx, node->more_saved[i]);
        tshi_tape_release_out(node->more[i]);
    }
    tshi_mem_release(ctx, node->aux);
    tshi_tape_release_out(node->out);
}

/* Releases a node's references to tensor handles: its outputs, inputs and leaves. The last step of
 * releasing a node. */
static void tshi_tape_unref_node(const tshi_node *node) {
    tshi_tensor_unref(node->out);
    for (int i = 0; i < node->n; i++) tshi_tensor_unref(node->in[i]);
    for (int i = 0; i < node->more_count; i++) tshi_tensor_unref(node->more[i]);
    for (int i = 0; i < node->leaf_count; i++) tshi_tensor_unref(node->leaves[i]);
}

/* Empties a tape: releases all its nodes, without running their backward, and their memory. */
static void tshi_tape_clear(tshi_node **newest, tshi_arena *arena) {
    for (; *newest; *newest = (*newest)->older) {
        tshi_tape_release_node(*newest);
        tshi_tape_unref_node(*newest);
    }
    tshi_mem_reset(arena);
}

/* Lets collectives in flight send and receive: backends do so only when called. user: the ctx. */
static void tshi_tape_progress(void *user) {
    tsh_ctx *ctx = (tsh_ctx *)user;
    if (ctx->tp.in_flight) tsh_comm_progress(&ctx->tp);
    if (ctx->dp.in_flight) tsh_comm_progress(&ctx->dp);
    if (ctx->pp.in_flight) tsh_comm_progress(&ctx->pp);
}

/* Runs the backward of every marked node, newest first, and releases all nodes. After an error it
 * only releases them. The caller resets the arena, which holds the memory of the nodes. */
static void tshi_tape_walk(tsh_ctx *ctx) {
    const tsh_module *outer = ctx->module;
    const int phase = tshi_trace_phase(ctx->trace, TSHI_PHASE_BACKWARD);
    tshi_node *node, *older;
    tshi_profile_step(ctx->trace, 0);
    ctx->tape.locked++; /* tshi_tape_unlocked refuses calls from custom ops */
    for (node = ctx->tape.newest; node; node = older) {
        older = node->older;        /* the node is released below */
        ctx->module = node->module; /* errors begin with the module's path */
        if (node->progress.reached && ctx->error.code == TSH_OK && tshi_tape_complete_out(node)) {
            const int64_t begin = tshi_trace_now(ctx->trace);
            const int64_t bytes = ctx->trace ? tshi_tape_backward_bytes(node) : 0;
            node->op->backward(node);
            /* marks the gradient of each input as complete, unless the op itself has done so */
            for (int i = 0; i < node->n; i++) tshi_tape_input_done(node, i);
            for (int i = 0; i < node->leaf_count; i++) tshi_tape_deliver(node->leaves[i]);
            if (ctx->trace)
                (void)tshi_trace_add(ctx->trace, TSHI_TRACE_BACKWARD, node->op->name, begin, bytes);
            tshi_tape_progress(ctx);
        }
        node->out->flags |= TSHI_CONSUMED;
        for (int i = 0; i < node->more_count; i++) node->more[i]->flags |= TSHI_CONSUMED;
        tshi_tape_release_node(node);
        /* the inputs' gradients are packed as bf16 only now: releasing the node has freed memory */
        for (int i = 0; i < node->n; i++)
            if (node->in[i]) tshi_tape_pack(node->in[i]->base);
        tshi_tape_unref_node(node);
    }
    ctx->module = outer;
    ctx->tape.newest = NULL;
    ctx->tape.locked--;
    (void)tshi_trace_phase(ctx->trace, phase);
}

/* Completes the partial gradients of all leaves with one all-reduce over tp, in one buffer. */
static tsh_result tshi_tape_complete_leaves(tsh_ctx *ctx) {
    tsh_tensor *t, *head = &ctx->handles.owned;
    /* total: elements of all partial gradients (gp); at: where the next one is in `flat` */
    int64_t total = 0, at = 0;
    int live = 0;     /* 1: a leaf has a partial gradient, perhaps of 0 elements */
    tshi_block *flat; /* the partial gradients of all leaves, one after the other */
    tsh_real *data;
    for (t = head->next; t != head; t = t->next) {
        if (t->gp.live) total += tsh_local_numel(t);
        live |= t->gp.live;
    }
    if (!live || !(flat = tshi_mem_alloc(ctx, TSH_MEM_STEP, tshi_dtype_reals(total))))
        return ctx->error.code;
    data = (tsh_real *)tshi_mem_data(flat);
    for (t = head->next; t != head; t = t->next) {
        if (!t->gp.live) continue;
        memcpy(data + at, tshi_mem_data(t->gp.block), tshi_dtype_reals(tsh_local_numel(t)));
        at += tsh_local_numel(t);
    }
    (void)tshi_error_comm(ctx, tsh_allreduce(&ctx->tp, data, total, TSH_REAL, TSH_SUM),
                          "tsh_backward: all-reduce of the leaves' gradients");
    for (at = 0, t = head->next; t != head; t = t->next) {
        if (!t->gp.live) continue;
        memcpy(tshi_mem_data(t->gp.block), data + at, tshi_dtype_reals(tsh_local_numel(t)));
        at += tsh_local_numel(t);
        tshi_tape_merge_rows(t, &ctx->tp);
        tshi_tape_merge(t);
    }
    tshi_mem_release(ctx, flat);
    return ctx->error.code;
}

/* Returns 1 if backward averages gradients over dp: there are several replicas, and no tsh_outer,
 * with which each replica steps by its own gradients. */
static int tshi_tape_averages(const tsh_ctx *ctx) {
    return ctx->dp.size > 1 && !ctx->outers;
}

/* Completes the gradients of leaves: first over tp, then over dp, where backward has sent some
 * buckets already. Divides the gradients of summed losses by the sum of their weights. */
static tsh_result tshi_tape_sync(tsh_ctx *ctx) {
    tsh_tensor *t, *head = &ctx->handles.owned;
    const int replicas = tshi_tape_averages(ctx); /* 1: gradients are also summed over dp */
    const int phase = tshi_trace_phase(ctx->trace, TSHI_PHASE_BACKWARD);
    if (ctx->error.code == TSH_OK) (void)tshi_tape_complete_leaves(ctx);
    if (replicas) tshi_bucket_sum_weights(ctx, ctx->tape.weight);
    for (t = head->next; t != head && ctx->error.code == TSH_OK && replicas; t = t->next) {
        if (!t->gr.live || !(t->flags & TSHI_AVERAGED)) continue;
        if (t->sparse && (t->flags & TSHI_CHUNKED))
            (void)tsh_fail(ctx, TSH_ERR_UNSUPPORTED,
                           "tsh_backward: the gradient of \"%s\" is row-sparse, which .zero of its "
                           "optimiser cannot cut; leave one of both out",
                           t->path);
        else if (tshi_tape_allocate(t, &t->gr))
            tshi_bucket_add_grad(t);
    }
    if (replicas) tshi_bucket_end(ctx); /* waits for all buckets */
    ctx->tape.syncing = 0;
    for (t = head->next; t != head && ctx->error.code == TSH_OK; t = t->next) {
        if (!t->gr.live) continue;
        if (replicas && (t->flags & TSHI_AVERAGED))
            tshi_tape_merge_rows(t, &ctx->dp);
        else if (ctx->tape.summed && tshi_tape_allocate(t, &t->gr)) /* no bucket has divided gr */
            tshi_bucket_divide((tsh_real *)tshi_mem_data(t->gr.block), tsh_local_numel(t),
                               ctx->dry   ? 0
                               : replicas ? ctx->buckets.weight
                                          : ctx->tape.weight);
        tshi_tape_pack(t);
    }
    ctx->tape.pending = 0;
    (void)tshi_trace_phase(ctx->trace, phase);
    return ctx->error.code;
}

/* If gradients are averaged over dp, empties the list of buckets: from now on tshi_tape_deliver
 * fills buckets with gradients and sends them. */
static void tshi_tape_sync_begin(tsh_ctx *ctx) {
    ctx->tape.syncing = tshi_tape_averages(ctx);
    if (ctx->tape.syncing) tshi_bucket_begin(ctx, ctx->tape.summed);
}

TSH_API tsh_result tsh_sync_grads(tsh_ctx *ctx) {
    if (!ctx) return TSH_ERR_ARGUMENT;
    if (!tsh_ok(ctx) || !ctx->tape.pending) return ctx->error.code;
    tshi_tape_sync_begin(ctx);
    return tshi_tape_sync(ctx);
}

/* Fails unless the loss is one replicated value of this ctx that requires a gradient. */
static tsh_result tshi_tape_check_loss(tsh_ctx *ctx, tsh_tensor *loss) {
    char text[TSHI_TEXT_SIZE];
    if (!loss) return tsh_fail(ctx, TSH_ERR_ARGUMENT, "tsh_backward: the loss is NULL");
    if (loss->ctx != ctx) {
        (void)tshi_tensor_refuse_ctx(ctx, "tsh_backward", "the loss", loss->ctx);
        return ctx->error.code;
    }
    if (loss->layout.kind != TSH_REPLICATED)
        return tsh_fail(ctx, TSH_ERR_LAYOUT,
                        "tsh_backward: the loss is %s over %d ranks; complete it first: "
                        "tsh_redistribute(loss, tsh_replicated())",
                        loss->layout.kind == TSH_PARTIAL ? "a partial sum" : "sharded",
                        ctx->tp.size);
    if (tsh_numel(loss) != 1 || !tshi_dtype_computes(loss->dtype))
        return tsh_fail(ctx, TSH_ERR_SHAPE,
                        "tsh_backward: the loss must be one replicated value, not %s %s, as "
                        "tsh_mean(loss, TSH_ALL, 0) gives",
                        tshi_dtype_name(loss->dtype), tshi_tensor_text(loss, text));
    if ((loss->base->flags & (TSHI_CONSUMED | TSHI_DEAD)) == TSHI_CONSUMED)
        return tsh_fail(ctx, TSH_ERR_STATE,
                        "tsh_backward: a tsh_backward before has consumed the graph of the loss; "
                        "record it again, or add up all losses and call tsh_backward once");
    if (!tshi_tensor_check("tsh_backward", "loss", &loss, 1)) return ctx->error.code;
    if (!loss->base->requires_grad || !loss->base->node)
        return tsh_fail(
            ctx, TSH_ERR_STATE,
            "tsh_backward: the loss does not depend on any tensor that requires a gradient; %s",
            ctx->tape.no_grad
                ? "nothing is recorded since tsh_no_grad_begin: call tsh_no_grad_end first"
                : "parameters do, and tensors after tsh_requires_grad(t, 1), but not through "
                  "tsh_detach or what is computed after tsh_no_grad_begin");
    return TSH_OK;
}

/* Prepares a backward: sets the counts of contributions to 0 and adds `weight` to the number of
 * terms. summed 1: the loss is a sum of `weight` terms; 0: a mean. Returns 0 and an error if the
 * new gradients cannot be added to those that leaves have already. */
static int tshi_tape_begin(tsh_ctx *ctx, int summed, double weight) {
    tshi_tape *tape = &ctx->tape;
    tsh_tensor *t, *head = &ctx->handles.owned;
    /* live: 1 if a leaf has a gradient; chunked: 1 if this rank has only a chunk of one (.zero) */
    int live = 0, chunked = 0;
    for (t = head->next; t != head; t = t->next) {
        t->partial_contributions = t->contributions = 0;
        live |= t->gr.live | t->gp.live;
        chunked |= t->gr.live && (t->flags & TSHI_CHUNKED);
    }
    if (!(weight >= 0) || weight > DBL_MAX || (weight > 0 && !summed))
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT,
                       "tsh_backward: weight %g of a loss; it is that of a sum (.summed = 1), and "
                       "not below 0",
                       weight);
    else if (live && tape->pending && tape->summed != summed)
        (void)tsh_fail(ctx, TSH_ERR_STATE,
                       "tsh_backward: micro-batches of one step are all means or all sums "
                       "(.summed); those that wait for tsh_sync_grads are %s",
                       tape->summed ? "sums" : "means");
    else if (live && !tape->pending && (summed || chunked))
        (void)tsh_fail(
            ctx, TSH_ERR_STATE,
            "tsh_backward: gradients of an earlier step %s, so that nothing can be added "
            "to them; tsh_zero_grads first",
            chunked ? "lie in chunks (.zero)" : "are divided already (.summed)");
    if (ctx->error.code != TSH_OK) return 0;
    /* number of terms in all micro-batches so far */
    tape->weight = (live && tape->pending ? tape->weight : 0) + weight;
    tape->summed = summed;
    return 1;
}

/* Warns, once, if this backward adds to a gradient that an optimiser has used already. Must come
 * after tshi_tape_mark, which sets the counts of contributions. */
static void tshi_tape_warn(tsh_ctx *ctx) {
    const tsh_tensor *head = &ctx->handles.owned;
    if (ctx->warned & TSHI_WARN_GRADS) return;
    for (tsh_tensor *t = head->next; t != head; t = t->next) {
        if (!t->contributions || !(t->flags & TSHI_USED)) continue;
        t->flags &= ~(unsigned)TSHI_USED;
        if (t->gr.live)
            tshi_error_warn(ctx, TSHI_WARN_GRADS,
                            "tsh_backward adds to gradients that tsh_optim_step has used; call "
                            "tsh_zero_grads after each tsh_optim_step");
    }
}

TSH_API tsh_result tsh_backward_with(tsh_ctx *ctx, tsh_tensor *loss,
                                     const tsh_backward_desc *desc) {
    int defer = desc && desc->defer; /* 1: tsh_sync_grads completes the gradients */
    tshi_dest dest;
    if (!ctx) return TSH_ERR_ARGUMENT;
    if (ctx->error.code == TSH_OK && tshi_tape_unlocked(ctx, "tsh_backward"))
        (void)tshi_tape_check_loss(ctx, loss);
    if (ctx->error.code == TSH_OK)
        (void)tshi_tape_begin(ctx, desc && desc->summed, desc ? desc->weight : 0);
    if (!tsh_ok(ctx)) return ctx->error.code;
    tshi_profile_step(ctx->trace, 0);
    if (!tshi_tape_dest_in(loss, &loss->base->gr, &dest)) return ctx->error.code;
    dest.data[0] = dest.add ? TSHI_R(dest.data[0] + TSHI_R(1)) : TSHI_R(1); /* d loss / d loss */
    if (!defer) tshi_tape_sync_begin(ctx); /* buckets are sent during the walk */
    tshi_tape_mark(ctx, loss);
    tshi_tape_warn(ctx);
    /* depth 0: releases the values of step tensors of all scopes */
    tshi_tape_release_values(ctx, loss, 0);
    tshi_tape_walk(ctx);
    tshi_mem_reset(&ctx->tape.arena); /* frees the nodes */
    if (defer)
        ctx->tape.pending = 1; /* gradients wait for tsh_sync_grads */
    else
        (void)tshi_tape_sync(ctx);
    tshi_error_report(ctx); /* tells the other ranks of an error */
    return ctx->error.code;
}

TSH_API tsh_result tsh_backward(tsh_ctx *ctx, tsh_tensor *loss) {
    return tsh_backward_with(ctx, loss, NULL);
}

/* Returns 1 if a leaf's gradient still lacks contributions of other ranks, or the division by the
 * number of terms. */
static int tshi_tape_pending(const tsh_tensor *leaf) {
    const tsh_ctx *ctx = leaf->ctx;
    const int averaged = tshi_tape_averages(ctx) && (leaf->flags & TSHI_AVERAGED);
    return leaf->gp.live || (leaf->gr.live && (leaf->flags & TSHI_LEAF) && ctx->tape.pending &&
                             (averaged || ctx->tape.summed));
}
