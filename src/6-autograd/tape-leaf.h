/* ========================================================================== */
/* >>tape-leaf                                    MARK: - tape-leaf (private) */
/* Public functions: gradients of leaves; the ends of steps and scopes.       */
/* Needs: >>tape-backward.                                                    */
/* ========================================================================== */

TSH_API void tsh_no_grad_begin(tsh_ctx *ctx) {
    if (!ctx) return;
    ctx->tape.no_grad++;
    ctx->tape.evaluating++;
}

TSH_API void tsh_no_grad_end(tsh_ctx *ctx) {
    if (!ctx || !ctx->tape.no_grad) return;
    ctx->tape.no_grad--;
    if (ctx->tape.evaluating) ctx->tape.evaluating--;
}

TSH_API void tsh_detect_anomaly(tsh_ctx *ctx, int on) {
    if (ctx) ctx->anomalies = on != 0;
}

/* Returns 1 if t can be a leaf: it is owned and has floating values. Else returns 0, with an error
 * that names the public function op. */
static int tshi_tape_check_owned(const tsh_tensor *t, const char *op) {
    if ((t->flags & TSHI_OWNED) && tshi_dtype_computes(t->dtype)) return 1;
    return tsh_fail(t->ctx, TSH_ERR_ARGUMENT, "%s: takes an owned tensor of %s; tsh_keep makes one",
                    op, tshi_dtype_name(TSH_REAL)) == TSH_OK;
}

TSH_API tsh_tensor *tsh_requires_grad(tsh_tensor *t, int on) {
    if (!t || !tshi_tape_check_owned(t, "tsh_requires_grad")) return NULL;
    t->requires_grad = on != 0; /* ops on t are recorded */
    t->flags = on ? t->flags | TSHI_LEAF : t->flags & ~(unsigned)TSHI_LEAF;
    return t;
}

TSH_API tsh_tensor *tsh_average_grad(tsh_tensor *t, int on) {
    if (!t || !tshi_tape_check_owned(t, "tsh_average_grad")) return NULL;
    if (!on && (t->flags & TSHI_PARAM))
        return tshi_error_null(t->ctx, TSH_ERR_ARGUMENT,
                               "tsh_average_grad: the gradient of a parameter, such as \"%s\", is "
                               "always averaged; take a leaf of your own instead", t->path);
    t->flags = on ? t->flags | TSHI_AVERAGED : t->flags & ~(unsigned)TSHI_AVERAGED;
    return t;
}

TSH_API tsh_tensor *tsh_retain_grad(tsh_tensor *t) {
    if (t) t->flags |= TSHI_RETAIN;
    if (t) t->base->flags |= TSHI_RETAIN; /* a view shares its base's values: keeps these */
    return t;
}

TSH_API tsh_tensor *tsh_grad(tsh_tensor *t) {
    tsh_tensor *base, *grad;
    if (!t || t->ctx->error.code != TSH_OK) return NULL;
    base = t->base;
    if (tshi_tape_pending(base))
        return tshi_error_null(t->ctx, TSH_ERR_STATE,
                               "tsh_grad: the gradient is pending; call tsh_sync_grads first");
    if (!base->gr.live) return NULL;
    if (base->flags & TSHI_CHUNKED)
        return tshi_error_null(
            t->ctx, TSH_ERR_STATE,
            "tsh_grad: each rank of dp has a chunk of the gradient of \"%s\", as "
            "its optimiser's .zero wants it", base->path);
    grad = tshi_tensor_detached(t, base->gr.block ? base->gr.block : base->packed);
    if (!grad) return NULL;
    grad->dtype = base->gr.block ? TSH_REAL : TSH_BF16; /* dtype of the gradient, not of t */
    grad->offset = t->offset - base->offset; /* if t is a view: its part of the base's gradient */
    /* every rank has the whole gradient of a partial sum */
    if (t->layout.kind == TSH_PARTIAL) grad->layout = tsh_replicated();
    return grad;
}

/* Zeroes the marked rows of a row-sparse gradient; all other rows are 0 already. */
static void tshi_tape_clear_rows(tsh_tensor *base) {
    const int32_t *marks = (const int32_t *)tshi_mem_data(base->marks);
    int64_t r, width = tshi_tensor_product(base->local + 1, base->ndim - 1);
    tsh_real *data = (tsh_real *)tshi_mem_data(base->gr.block);
    for (r = 0; r < base->local[0]; r++)
        if (marks[r]) memset(data + r * width, 0, (size_t)width * sizeof *data);
    base->gr.clean = 1; /* tshi_tape_dest_rows need not zero the gradient */
}

/* Returns the memory of a leaf's gradient to the pool of step memory. */
static void tshi_tape_return(tsh_tensor *base) {
    tshi_mem_release(base->ctx, base->gr.block);
    tshi_mem_release(base->ctx, base->gp.block);
    tshi_mem_release(base->ctx, base->packed);
    base->gr.block = base->gp.block = base->packed = NULL;
    base->gr.clean = base->gp.clean = 0;
}

TSH_API void tsh_zero_grad(tsh_tensor *t) {
    tsh_tensor *base = t ? t->base : NULL;
    if (!base) return;
    if (base->sparse && base->gr.live && !base->gp.live) tshi_tape_clear_rows(base);
    /* marks the gradient as empty; its memory is kept, or returned to the pool below */
    base->gr.live = base->gp.live = base->sparse = 0;
    base->packs = 0;
    base->flags &= ~(unsigned)TSHI_USED;
    if (base->flags & TSHI_OWNED && tshi_tensor_grad_kind(base) == TSH_MEM_STEP)
        tshi_tape_return(base);
}

/* -- the ends of steps and of scopes --------------------------------------- */

/* Warns, once, if each of the last TSHI_WARN_GROWN steps has left more owned tensors than the one
 * before it: a loop makes tensors that nobody frees. */
static void tshi_tape_warn_owned(tsh_ctx *ctx) {
    tshi_handles *h = &ctx->handles;
    char text[TSH_MESSAGE_SIZE];
    h->growing = h->count > h->before ? h->growing + 1 : 0;
    h->before = h->count;
    if (h->growing < TSHI_WARN_GROWN || (ctx->warned & TSHI_WARN_OWNED)) return;
    (void)snprintf(text, sizeof text,
                   "each of the last %d steps has left more owned tensors, %lld now, of %lld "
                   "bytes; tsh_from makes one that ends with its step, tsh_tensor_free frees those "
                   "of tsh_tensor_new, tsh_tensor_from and tsh_keep",
                   h->growing, (long long)h->count,
                   (long long)ctx->mem.now[TSH_MEM_TENSORS]);
    tshi_error_warn(ctx, TSHI_WARN_OWNED, text);
}

TSH_API tsh_result tsh_step_end(tsh_ctx *ctx) {
    tsh_tensor *head;
    if (!ctx) return TSH_ERR_ARGUMENT;
    tshi_profile_step(ctx->trace, 1);
    if (!tshi_tape_unlocked(ctx, "tsh_step_end")) return ctx->error.code;
    /* releases the nodes that no backward has released */
    tshi_tape_clear(&ctx->tape.newest, &ctx->tape.arena);
    tshi_mem_release(ctx, ctx->rope_table);
    ctx->rope_table = NULL;
    head = &ctx->handles.step; /* the list of all step tensors */
    for (ctx->handles.ended = 0; head->next != head; ctx->handles.ended++)
        tshi_tensor_release(head->next);
    ctx->steps = 0;
    tshi_tape_warn_owned(ctx);
    return tsh_ok(ctx) ? TSH_OK : ctx->error.code;
}

TSH_API void tsh_scope_begin(tsh_ctx *ctx) {
    if (ctx) ctx->depth++;
}

TSH_API void tsh_scope_end(tsh_ctx *ctx) {
    tsh_tensor *head;
    if (!ctx || !ctx->depth) return;
    head = &ctx->handles.step;
    if (ctx->tape.newest && ctx->tape.newest->depth >= ctx->depth)
        (void)tsh_fail(
            ctx, TSH_ERR_STATE,
            "tsh_scope_end: %s was recorded inside the scope; scopes are for work without "
            "gradients (tsh_no_grad_begin)", ctx->tape.newest->op->name);
    else
        while (head->prev != head && head->prev->depth >= ctx->depth)
            tshi_tensor_release(head->prev);
    ctx->steps = 0;
    ctx->depth--;
}
