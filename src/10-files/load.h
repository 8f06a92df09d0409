/* ========================================================================== */
/* >>load                                              MARK: - load (private) */
/* Loads the shards of each rank, in any layout: from files, or from rank 0.  */
/* Needs: >>load-match >>load-cache.                                          */
/* ========================================================================== */

/* Logs that a tensor has values that are not finite. Of a replicated tensor t, only rank 0 of tp
 * logs; of a sharded one, every rank of tp logs for its shard; both in the first replica only.
 * found: number of NaN, number of infinite values. */
static void tshi_load_warn(tshi_io *io, const tshi_io_item *item, const tsh_tensor *t,
                           const int64_t *found) {
    const tsh_ctx *ctx = io->ctx;
    char rounded[64] = "";
    if (ctx->dp.rank > 0 || (ctx->tp.rank > 0 && t->layout.kind != TSH_SHARDED)) return;
    if (io->nonfinite++ >= TSHI_IO_NONFINITE) return;
    if (item->file != t->dtype)
        (void)snprintf(rounded, sizeof rounded, ", rounded from %s to %s",
                       tshi_dtypes[item->file].file, tshi_dtypes[t->dtype].file);
    tsh_log_message(&ctx->logger,
                    "%s: \"%.128s\": \"%s%.96s\" holds %lld NaN and %lld infinite values among "
                    "the %lld that rank %d read%s",
                    io->op, io->given, item->prefix, item->path, (long long)found[0],
                    (long long)found[1], (long long)tsh_local_numel(t), ctx->world.rank, rounded);
}

/* Converts n values from the file's dtype and stores them in t, this rank's shard of a parameter or
 * moment, from index `local` on. Returns 0 and sets an error if there is no memory. */
static int tshi_load_convert(const tshi_io_item *item, tsh_tensor *t, int64_t local, int64_t n,
                             const char *from) {
    char *to = (char *)tshi_tensor_at(t) + tshi_dtype_bytes(t->dtype, local);
    tsh_real run[TSHI_DTYPE_RUN]; /* exact weights of up to TSHI_DTYPE_RUN elements */
    int64_t e, m;
    if (!tshi_io_is_exact(item)) {
        tshi_dtype_convert(from, item->file, to, t->dtype, n);
        return 1;
    }
    for (e = 0; e < n; e += m) {
        m = tshi_base_min(TSHI_DTYPE_RUN, n - e);
        tshi_dtype_convert(from + tshi_dtype_bytes(item->file, e), item->file, run, TSH_REAL, m);
        if (!tshi_tensor_set_exact(t, local + e, m, run)) return 0;
    }
    return 1;
}

/* With .broadcast, on rank 0: sends the shard of a tensor that rank r of tp holds to rank `peer` of
 * the world. Reads one buffer while the other is being sent. */
static tsh_result tshi_load_send(tshi_io *io, const tshi_io_item *item, int r, int peer) {
    tsh_comm *world = &io->ctx->world;
    const int64_t step = tshi_load_step(io, item);
    tshi_runs run = tshi_tensor_runs(item->form, r, 0, tsh_numel(item->form));
    tsh_req req[2] = {0, 0};
    tsh_result result = TSH_OK, waited;
    int64_t n;
    int k;
    for (k = 0; result == TSH_OK; k = 1 - k) {
        char *buffer = io->buffer + k * TSHI_IO_BUFFER;
        tsh_coll coll;
        result = tsh_wait(world, req[k]);
        req[k] = 0;
        if (!(n = tshi_load_fill(io, item, &run, step, buffer)) || result != TSH_OK) break;
        coll = tsh_coll_make(TSH_SEND, tshi_io_sent_as(item->file, &n));
        coll.send = buffer;
        coll.count = n;
        coll.send_to = peer;
        result = tsh_start(world, &coll, &req[k]);
    }
    for (k = 0; k < 2; k++) {
        waited = tsh_wait(world, req[k]);
        if (result == TSH_OK) result = waited;
    }
    return tshi_error_comm(io->ctx, result, io->op);
}

/* With .broadcast, on rank 0: sends a tensor to the ranks of the first replica that hold it and
 * do not have it in their .cache; a replicated one only to rank 0 of tp on each stage. */
static tsh_result tshi_load_serve(tshi_io *io, const tshi_io_item *item) {
    const tsh_ctx *ctx = io->ctx;
    const int ranks = item->form->layout.kind == TSH_SHARDED ? ctx->tp.size : 1;
    const int64_t index = item - io->item;
    tsh_result result = TSH_OK;
    int s, r;
    for (s = 0; s < ctx->pp.size; s++)
        for (r = 0; r < ranks && io->holds[(int64_t)s * io->items + index]; r++)
            if ((s || r) && result == TSH_OK &&
                !tshi_load_kept_by(io, io->peer[s * ctx->tp.size + r], index))
                result = tshi_load_send(io, item, r, io->peer[s * ctx->tp.size + r]);
    return result;
}

/* With .broadcast: gets n elements of a tensor, which rank 0 of the world has read, to `bytes` on
 * this rank. In the first replica, ranks receive their shard from rank 0; of a replicated tensor,
 * rank 0 of tp does, and broadcasts it over tp. In either case, the first replica then broadcasts
 * over dp. Ranks that have kept the shard have read it to `bytes` already; a group (tp or dp) all
 * of whose ranks have kept it gets nothing. */
static tsh_result tshi_load_receive(tshi_io *io, const tshi_io_item *item, int64_t n, char *bytes) {
    tsh_ctx *ctx = io->ctx;
    const int whole = item->form->layout.kind != TSH_SHARDED;
    const int32_t *kept = io->kept ? io->kept + (item - io->item) : NULL;
    /* own: 1: this rank has kept the shard in its .cache; in_tp, in_dp: 1: so have all ranks of tp,
     * of dp */
    const int own = kept && kept[0], in_tp = kept && kept[io->items];
    const int in_dp = kept && kept[2 * io->items];
    int64_t sent = n;
    const tsh_dtype dtype = tshi_io_sent_as(item->file, &sent);
    tsh_result result = TSH_OK;
    if (ctx->world.rank > 0 && !own && ctx->dp.rank == 0 && (!whole || ctx->tp.rank == 0))
        result = tsh_recv(&ctx->world, bytes, sent, dtype, 0);
    if (result == TSH_OK && whole && !in_tp && ctx->dp.rank == 0 && ctx->tp.size > 1)
        result = tsh_broadcast(&ctx->tp, bytes, sent, dtype, 0);
    if (result == TSH_OK && !in_dp && ctx->dp.size > 1)
        result = tsh_broadcast(&ctx->dp, bytes, sent, dtype, 0);
    return tshi_error_comm(ctx, result, io->op);
}

/* Reads or receives this rank's shard of a parameter or moment into t. With .broadcast, t is NULL
 * after an error: the messages are still received, so that no rank waits. Returns an error only if
 * a message failed. */
static tsh_result tshi_load_values(tshi_io *io, const tshi_io_item *item, tsh_tensor *t) {
    tsh_ctx *ctx = io->ctx;
    const int reads = !io->broadcast || ctx->world.rank == 0;
    const int64_t all = tsh_local_numel(item->form), step = tshi_load_step(io, item);
    /* 1: the values need no conversion, so they are read straight into t */
    const int direct = t && item->file == t->dtype;
    tshi_runs run = tshi_tensor_runs(item->form, ctx->tp.rank, 0, tsh_numel(item->form));
    tshi_keeping keep = tshi_load_keep_begin(io, item, t != NULL);
    int64_t found[2] = {0, 0}, e, n; /* found: number of NaN, number of infinite values */
    for (e = 0; e < all; e += n) {
        char *to = t ? (char *)tshi_tensor_at(t) + tshi_dtype_bytes(t->dtype, e) : NULL;
        char *bytes = direct ? to : io->buffer;
        n = tshi_base_min(all - e, step);
        if (reads) (void)tshi_load_fill(io, item, &run, n, bytes);
        tshi_load_keep_read(&keep, n, bytes);
        if (io->broadcast && tshi_load_receive(io, item, n, bytes) != TSH_OK) {
            tshi_load_keep_end(&keep, 0);
            return TSH_ERR_IO;
        }
        tshi_load_keep_write(&keep, n, bytes);
        if (!io->broadcast && ctx->error.code != TSH_OK) return TSH_OK;
        if (!t || ctx->error.code != TSH_OK) continue;
        if (direct || tshi_load_convert(item, t, e, n, bytes))
            tshi_io_count_nonfinite(&tshi_dtypes[t->dtype], to, n, found);
    }
    tshi_load_keep_end(&keep, ctx->error.code == TSH_OK);
    if (direct) tshi_tensor_forget_exact(t);
    if (found[0] || found[1]) tshi_load_warn(io, item, t, found);
    return TSH_OK;
}

/* Returns the parameter or moment that values are read to, with memory; NULL: the files have no
 * values for it, or there is no memory. Sets a moment that the files lack to 0. */
static tsh_tensor *tshi_load_target(tshi_io *io, const tshi_io_item *item) {
    tsh_tensor *t = item->param;
    const tsh_tensor *form = item->form;
    const size_t bytes = tshi_dtype_bytes(item->dtype, tsh_local_numel(form));
    if (item->moment && (*item->moment || item->entry)) {
        if (*item->moment && !tshi_layout_equal(&(*item->moment)->layout, &form->layout, form->dim,
                                                &io->ctx->deal)) {
            tshi_tensor_release(*item->moment); /* its layout is old: created anew below */
            *item->moment = NULL;
        }
        t = tshi_optim_moment(form, item->moment, item->dtype); /* creates the moment if needed */
        if (t && tshi_io_in_chunks(item) && !tshi_optim_allocate(t, tsh_local_numel(t)))
            return NULL;
        if (t && !item->entry) memset(tshi_tensor_at(t), 0, bytes);
        if (t && !item->entry && tshi_io_in_chunks(item)) tshi_optim_keep_chunk(t);
    }
    if (!t || !item->entry) return NULL;
    if (!t->block) t->block = tshi_mem_alloc(io->ctx, TSH_MEM_PARAMETERS, bytes);
    return t->block ? t : NULL;
}

/* Loads this rank's shard of a parameter or moment. A moment of which this rank keeps only a chunk
 * (.zero) is read whole and cut down to that chunk. Returns an error only if a message failed. */
static tsh_result tshi_load_item(tshi_io *io, const tshi_io_item *item) {
    const int serves = io->broadcast && io->ctx->world.rank == 0;
    tsh_result result;
    tsh_tensor *t;
    if (item->entry && serves && tshi_load_serve(io, item) != TSH_OK) return TSH_ERR_IO;
    if (item->param->absent) return TSH_OK; /* another stage holds the parameter */
    t = io->ctx->error.code == TSH_OK ? tshi_load_target(io, item) : NULL;
    if (!item->entry || (!t && !io->broadcast)) return TSH_OK;
    result = tshi_load_values(io, item, t);
    if (t && tshi_io_in_chunks(item)) tshi_optim_keep_chunk(t);
    return result;
}

/* Checks the files against the model, then loads them. If ctx already has an error, only calls the
 * first tshi_io_agree, in which the other ranks wait. */
static tsh_result tshi_load_all(tshi_io *io) {
    tsh_ctx *ctx = io->ctx;
    int i;
    if (ctx->error.code == TSH_OK) (void)tshi_load_check(io);
    io->path = io->given;
    if (tshi_io_agree(io) != TSH_OK) return ctx->error.code; /* the model is unchanged */
    if (io->optim && io->optim->outer) tshi_outer_reset(io->optim->outer);
    if (io->broadcast && (tshi_load_share(io) != TSH_OK || tshi_load_ask(io) != TSH_OK))
        return ctx->error.code;
    for (i = 0; i < io->items && (io->broadcast || ctx->error.code == TSH_OK); i++)
        if (tshi_load_item(io, io->order[i]) != TSH_OK) break;
    if (io->nonfinite > TSHI_IO_NONFINITE)
        tsh_log_message(&ctx->logger,
                        "%s: \"%.200s\": %lld more tensors that rank %d read hold NaN or infinity",
                        io->op, io->given, (long long)io->nonfinite - TSHI_IO_NONFINITE,
                        ctx->world.rank);
    (void)tshi_load_leave(io);
    if (tshi_io_agree(io) != TSH_OK) return ctx->error.code;
    for (i = 0; i < io->counts; i++) *io->count[i].value = io->count[i].read;
    if (io->optim && io->optim->outer) tshi_outer_resume(io->optim->outer);
    return TSH_OK;
}

TSH_API TSHI_COLD tsh_result tsh_load(tsh_module *module, const char *path, tsh_optim *optim) {
    return tsh_load_with(module, path, optim, NULL);
}

TSH_API TSHI_COLD tsh_result tsh_load_with(tsh_module *module, const char *path, tsh_optim *optim,
                                           const tsh_file_desc *desc) {
    tshi_io io; /* state of this load */
    tsh_ctx *ctx;
    int shares; /* 1: .broadcast, and there are other ranks */
    if (!module) return TSH_ERR_ARGUMENT;
    ctx = module->ctx;
    if (!tsh_ok(ctx)) return ctx->error.code;
    shares = desc && desc->broadcast && ctx->world.size > 1;
    /* Ranks that read no file name this in errors, in place of a path. */
    if (shares && ctx->world.rank > 0) path = "the files of rank 0";
    tshi_io_begin(&io, "tsh_load", module, path, optim, desc);
    for (const tsh_ema *ema = ctx->emas; ema; ema = ema->older)
        (void)tshi_ema_check_swapped(ema, "tsh_load"); /* the next tsh_ema_swap would undo a load */
    io.broadcast = shares;
    if (shares && desc->cache) tshi_load_open_cache(&io, desc);
    if (ctx->error.code == TSH_OK && !(shares && ctx->world.rank > 0)) tshi_load_find_files(&io);
    tshi_comm_set_caller(ctx, TSHI_CALLER_LOAD);
    (void)tshi_load_all(&io);
    tshi_comm_set_caller(ctx, TSHI_CALLER_NONE);
    tshi_io_end(&io);
    return ctx->error.code;
}
