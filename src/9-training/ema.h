/* ========================================================================== */
/* >>ema                                                MARK: - ema (private) */
/* Exponential moving averages of weights.                                    */
/* Needs: >>tensor-make >>module-find >>optim-rows >>optim-matrix.            */
/* ========================================================================== */

/* The average of one parameter. */
typedef struct tshi_average {
    tsh_tensor *param;
    /* the average, of dtype TSH_REAL; NULL: no update yet. While it is swapped in, the parameter
     * has the same values */
    tsh_tensor *average;
    /* while the average is swapped in: the parameter's own values, shape (local elements), with
     * the lower halves of its exact weights in `low`; else NULL */
    tsh_tensor *kept;
} tshi_average;

struct tsh_ema {
    tsh_module *module;
    double decay;
    int64_t updates;
    int swapped;        /* 1: parameters have the values of their averages */
    tshi_average *each; /* `count` entries, one per parameter */
    int count;          /* number of parameters; a tied one counts once */
    tsh_ema *older;     /* the tsh_ema of the ctx made before this one; NULL: none */
};

TSH_API TSHI_COLD tsh_ema *tsh_ema_new(tsh_module *module, double decay) {
    tsh_ctx *ctx = module ? module->ctx : NULL;
    tshi_walk at = {NULL, NULL, 0};
    size_t slots = 0; /* number of parameters and buffers */
    tsh_ema *ema;
    if (!ctx || ctx->error.code != TSH_OK) return NULL;
    if (!(decay >= TSH_ZERO && decay <= 1)) {
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT,
                       "tsh_ema_new: decay is %g; it is from 0 (TSH_ZERO) to 1", decay);
        return NULL;
    }
    ema = (tsh_ema *)tshi_mem_arena_alloc(ctx, &ctx->books, sizeof *ema);
    if (!ema) return NULL;
    ema->module = module;
    ema->decay = tshi_base_option(decay, 0.999);
    while (tshi_module_step_once(module, &at)) slots++;
    ema->each = (tshi_average *)tshi_mem_arena_alloc(ctx, &ctx->books,
                                                     (slots + 1) * sizeof *ema->each);
    if (!ema->each) return NULL;
    while (tshi_module_step_once(module, &at)) {
        if (at.param->flags & TSHI_BUFFER) continue;
        at.param->flags |= TSHI_EMA;
        ema->each[ema->count++].param = at.param;
    }
    ema->older = ctx->emas;
    ctx->emas = ema;
    return ema;
}

/* The argument of tshi_ema_part, which threads run on parts of a parameter and its average. */
typedef struct tshi_ema_work {
    const tsh_tensor *param;
    tsh_real *average;
    double decay;
} tshi_ema_work;

/* Runs on one thread: updates the averages of the local elements [from, to), as torch.lerp(average,
 * weight, 1 - decay). */
static void tshi_ema_part(void *job, int thread, int64_t from, int64_t to) {
    const tshi_ema_work *work = (const tshi_ema_work *)job;
    const tsh_real by = TSHI_R(1 - work->decay);
    tsh_real x[TSHI_OPTIM_CHUNK];
    (void)thread;
    for (; from < to; from += TSHI_OPTIM_CHUNK) {
        const int64_t n = tshi_base_min(TSHI_OPTIM_CHUNK, to - from);
        tsh_real *average = work->average + from;
        tshi_tensor_exact(work->param, from, n, x);
        for (int64_t i = 0; i < n; i++) average[i] = tshi_optim_lerp(average[i], x[i], by);
    }
}

/* Returns a tensor without values that has the shape, layout and path of the average of param. */
static tsh_tensor tshi_ema_form(const tsh_tensor *param) {
    tsh_tensor form = *param;
    form.flags &= ~(unsigned)TSHI_CHUNKED;
    return form;
}

/* Returns the average with the layout that its parameter has now; creates it if needed. NULL: an
 * error. */
static tsh_tensor *tshi_ema_average(tshi_average *each) {
    const tsh_tensor form = tshi_ema_form(each->param);
    return tshi_optim_moment(&form, &each->average, TSH_REAL);
}

/* Returns an error if averages are swapped in. op: the public function. */
static tsh_result tshi_ema_check_swapped(const tsh_ema *ema, const char *op) {
    tsh_ctx *ctx = ema->module->ctx;
    if (ctx->error.code != TSH_OK || !ema->swapped) return ctx->error.code;
    return tsh_fail(ctx, TSH_ERR_STATE,
                    "%s: the parameters of \"%s\" have the values of their averages; restore the "
                    "weights first: tsh_ema_swap",
                    op, ema->module->path);
}

TSH_API tsh_result tsh_ema_update(tsh_ema *ema) {
    tsh_ctx *ctx = ema ? ema->module->ctx : NULL;
    if (!ctx) return TSH_ERR_ARGUMENT;
    if (tshi_ema_check_swapped(ema, "tsh_ema_update") != TSH_OK ||
        tsh_materialize(ema->module) != TSH_OK)
        return ctx->error.code;
    for (int i = 0; i < ema->count && ctx->error.code == TSH_OK; i++) {
        tshi_average *each = &ema->each[i];
        tshi_ema_work work = {each->param, NULL, ema->updates ? ema->decay : 0};
        const int64_t n = tsh_local_numel(each->param);
        if (each->param->absent || !tshi_ema_average(each)) continue;
        work.average = (tsh_real *)tshi_tensor_at(each->average);
        tshi_team_run(ctx, tshi_kernel_parts(ctx, n, 1), n, TSHI_OPTIM_CHUNK, tshi_ema_part, &work);
    }
    if (ctx->error.code == TSH_OK) ema->updates++;
    return ctx->error.code;
}

/* Keeps a copy of a parameter's values: an owned tensor, so that tsh_close releases it, too. */
static void tshi_ema_keep(tshi_average *each) {
    const tsh_tensor *t = each->param;
    const int64_t n = tsh_local_numel(t);
    const tsh_shape shape = {1, {n}};
    tsh_tensor *kept = tshi_tensor_make(t->ctx, "tsh_ema_swap", TSHI_OWNED, TSH_MEM_PARAMETERS,
                                        t->dtype, &shape, NULL);
    each->kept = kept;
    if (!kept) return;
    memcpy(tshi_tensor_at(kept), tshi_tensor_at(t), tshi_dtype_bytes(t->dtype, n));
    if (!t->low) return;
    kept->low = tshi_mem_alloc(t->ctx, TSH_MEM_PARAMETERS, tshi_dtype_bytes(TSH_BF16, n));
    if (kept->low)
        memcpy(tshi_mem_data(kept->low), tshi_mem_data(t->low), tshi_dtype_bytes(TSH_BF16, n));
}

/* Releases the copy of a parameter's values. */
static void tshi_ema_drop(tshi_average *each) {
    tsh_tensor_free(each->kept);
    each->kept = NULL;
}

/* Restores the values that tshi_ema_keep has kept, and releases them. */
static void tshi_ema_restore(tshi_average *each) {
    tsh_tensor *t = each->param, *kept = each->kept;
    const int64_t n = tsh_local_numel(t);
    if (kept) memcpy(tshi_tensor_at(t), tshi_tensor_at(kept), tshi_dtype_bytes(t->dtype, n));
    if (kept && kept->low && t->low)
        memcpy(tshi_mem_data(t->low), tshi_mem_data(kept->low), tshi_dtype_bytes(TSH_BF16, n));
    else
        tshi_tensor_forget_exact(t);
    tshi_ema_drop(each);
    t->flags &= ~(unsigned)TSHI_SWAPPED;
}

/* Checks that averages can be swapped in now, and keeps copies of the parameters' values. */
static tsh_result tshi_ema_prepare(tsh_ema *ema) {
    tsh_ctx *ctx = ema->module->ctx;
    if (!ema->updates)
        return tsh_fail(ctx, TSH_ERR_STATE,
                        "tsh_ema_swap: there are no averages yet; call tsh_ema_update first, or "
                        "load them: tsh_load_with, .ema");
    for (int i = 0; i < ema->count && ctx->error.code == TSH_OK; i++) {
        const tsh_tensor *t = ema->each[i].param;
        if (t->flags & TSHI_SWAPPED)
            return tsh_fail(ctx, TSH_ERR_STATE,
                            "tsh_ema_swap: \"%s\" has the values of another tsh_ema", t->path);
    }
    for (int i = 0; i < ema->count && ctx->error.code == TSH_OK; i++)
        if (!ema->each[i].param->absent && tshi_ema_average(&ema->each[i]))
            tshi_ema_keep(&ema->each[i]);
    return ctx->error.code;
}

TSH_API tsh_result tsh_ema_swap(tsh_ema *ema) {
    tsh_ctx *ctx = ema ? ema->module->ctx : NULL;
    if (!ctx || ctx->error.code != TSH_OK) return ctx ? ctx->error.code : TSH_ERR_ARGUMENT;
    for (int i = 0; i < ema->count; i++)
        if (tshi_tensor_recorded(ema->each[i].param))
            return tsh_fail(ctx, TSH_ERR_STATE,
                            "tsh_ema_swap: ops are recorded that use \"%s\"; end the step first: "
                            "tsh_step_end",
                            ema->each[i].param->path);
    if (!ema->swapped && tshi_ema_prepare(ema) != TSH_OK) {
        /* no parameter was changed yet: drops the copies */
        for (int i = 0; i < ema->count; i++) tshi_ema_drop(&ema->each[i]);
        return ctx->error.code;
    }
    ema->swapped = !ema->swapped;
    for (int i = 0; i < ema->count; i++) {
        tshi_average *each = &ema->each[i];
        if (each->param->absent) continue;
        if (!ema->swapped) {
            tshi_ema_restore(each);
        } else {
            each->param->flags |= TSHI_SWAPPED;
            (void)tshi_tensor_set_exact(each->param, 0, tsh_local_numel(each->param),
                                        (const tsh_real *)tshi_tensor_at(each->average));
        }
    }
    return ctx->error.code;
}

TSH_API TSHI_COLD void tsh_ema_free(tsh_ema *ema) {
    tsh_ema **at = ema ? &ema->module->ctx->emas : NULL;
    while (at && *at && *at != ema) at = &(*at)->older;
    if (!at || !*at) return; /* ema is NULL, or was freed before */
    *at = ema->older;
    for (int i = 0; i < ema->count; i++) {
        if (ema->swapped && !ema->each[i].param->absent) tshi_ema_restore(&ema->each[i]);
        tsh_tensor_free(ema->each[i].average);
        ema->each[i].average = NULL;
        ema->each[i].param->flags &= ~(unsigned)TSHI_EMA;
    }
    ema->swapped = 0;
    /* other tsh_emas may average the same parameters: sets their flag again */
    for (ema = ema->module->ctx->emas; ema; ema = ema->older)
        for (int i = 0; i < ema->count; i++) ema->each[i].param->flags |= TSHI_EMA;
}

TSH_API int64_t tsh_ema_updates(const tsh_ema *ema) {
    return ema ? ema->updates : 0;
}
