/* ========================================================================== */
/* >>optim                                            MARK: - optim (private) */
/* Optimisers and their groups; a step over all parameters.                   */
/* Needs: >>glob >>tensor-make >>module-find >>schedule >>optim-table.        */
/* ========================================================================== */

/* Returns 1 if gradients or moments can be kept in this dtype. */
static int tshi_optim_keeps(tsh_dtype dtype) {
    return dtype == TSH_DTYPE_DEFAULT || dtype == TSH_REAL || dtype == TSH_BF16;
}

/* Checks the options of an optimiser; returns an error if one is out of range. op: the public
 * function, for errors. */
static TSHI_COLD tsh_result tshi_optim_check(tsh_ctx *ctx, const char *op,
                                             const tsh_optim_desc *d) {
    const double rates[] = {d->lr,    d->momentum,       d->eps,   d->weight_decay,
                            d->eps2,  d->momentum_decay, d->alpha, d->clip_norm,
                            d->d,     d->lr_decay,       d->beta1, d->beta2};
    int right = (unsigned)d->kind < (unsigned)TSHI_OPTIMS && d->beta1 < 1 && d->beta2 < 1 &&
                d->alpha < 1 && d->beta2_decay <= 0 && d->ns_steps >= 0 && d->ns_steps < 100;
    for (size_t i = 0; i < sizeof rates / sizeof rates[0]; i++) right &= rates[i] >= TSH_ZERO;
    if (!tshi_optim_keeps(d->grad_dtype) || !tshi_optim_keeps(d->moments_dtype))
        return tsh_fail(ctx, TSH_ERR_DTYPE,
                        "%s: grad_dtype is %d, moments_dtype %d; they are %s or bf16", op,
                        (int)d->grad_dtype, (int)d->moments_dtype, tshi_dtype_name(TSH_REAL));
    if (!right)
        return tsh_fail(ctx, TSH_ERR_ARGUMENT,
                        "%s: kind %d, lr %g, momentum %g, betas %g and %g, eps %g, weight_decay "
                        "%g, clip_norm %g, alpha %g, beta2_decay %g, ns_steps %d: none may be "
                        "below 0 (for 0 itself where 0 is the default: TSH_ZERO) but beta2_decay, "
                        "which may not be above; betas and alpha are below 1, ns_steps below 100",
                        op, (int)d->kind, d->lr, d->momentum, d->beta1, d->beta2, d->eps,
                        d->weight_decay, d->clip_norm, d->alpha, d->beta2_decay, d->ns_steps);
    if (d->kind == TSH_CUSTOM &&
        (!d->custom.update || d->custom.moments < 0 || d->custom.moments > TSH_MAX_MOMENTS))
        return tsh_fail(ctx, TSH_ERR_ARGUMENT,
                        "%s: TSH_CUSTOM with %d moments and %s .custom.update; it needs that "
                        "function, and at most %d moments",
                        op, d->custom.moments, d->custom.update ? "a" : "no", TSH_MAX_MOMENTS);
    return d->schedule ? tshi_schedule_check(ctx, op, d->schedule) : TSH_OK;
}

/* Fills in the defaults of an optimiser's options. */
static TSHI_COLD void tshi_optim_defaults(tsh_optim_desc *d) {
    static const double abc[3] = {3.4445, -4.775, 2.0315};
    const tshi_optim_row *row = &tshi_optims[d->kind];
    double epsilon = 1; /* the distance from 1 to the next tsh_real */
    while ((double)TSHI_R(1 + epsilon / 2) > 1) epsilon /= 2;
    d->lr = tshi_base_option(d->lr, row->lr);
    d->momentum = tshi_base_option(d->momentum, row->momentum);
    d->beta1 = tshi_base_option(d->beta1, row->beta1);
    d->beta2 = tshi_base_option(d->beta2, row->beta2);
    d->eps = tshi_base_option(d->eps, d->kind == TSH_ADAFACTOR ? epsilon : row->eps);
    d->weight_decay = tshi_base_option(d->weight_decay, row->weight_decay);
    d->nesterov = d->nesterov == TSH_YES || (!d->nesterov && d->kind == TSH_MUON);
    d->clip_norm = tshi_base_option(d->clip_norm, 0);
    d->alpha = tshi_base_option(d->alpha, 0.99);
    d->lr_decay = tshi_base_option(d->lr_decay, 0);
    d->momentum_decay = tshi_base_option(d->momentum_decay, 4e-3);
    if (!(d->beta2_decay < 0)) d->beta2_decay = -0.8;
    d->eps2 = tshi_base_option(d->eps2, 1e-3);
    d->d = d->d > 0 ? d->d : 1;
    if (!d->ns_steps) d->ns_steps = 5;
    if (d->ns_coefficients[0] == 0 && d->ns_coefficients[1] == 0 && d->ns_coefficients[2] == 0)
        memcpy(d->ns_coefficients, abc, sizeof abc);
    if (!d->moments_dtype) d->moments_dtype = TSH_REAL;
}

/* Writes the names of an optimiser's kinds, as files have them, to `text`: that of the optimiser,
 * and those of its groups, as in "muon+adamw". Returns text. */
static const char *tshi_optim_kind(const tsh_optim *optim, char text[TSHI_TEXT_SIZE]) {
    text[0] = 0;
    tsh_text_add(text, TSHI_TEXT_SIZE, "%s", tshi_optim_name(&optim->desc));
    for (int i = 0; i < optim->count; i++) {
        const tsh_optim_desc *d = optim->each[i].desc;
        int known = d == &optim->desc;
        for (int k = 0; k < i && !known; k++) known = optim->each[k].desc == d;
        if (!known) tsh_text_add(text, TSHI_TEXT_SIZE, "+%s", tshi_optim_name(d));
    }
    return text;
}

/* Returns 1 if a dtype has the range of a float, as training needs it; f16 has not. */
static int tshi_optim_trains(tsh_dtype dtype) {
    int64_t widest; /* memory for one element of any dtype that is not quantised */
    tshi_dtype_put(dtype, &widest, 0, 1e30);
    return tshi_dtype_get(dtype, &widest, 0) <= DBL_MAX;
}

/* Returns 1 if all parameters below module that are trained have a dtype for it; else 0 and an
 * error. */
static TSHI_COLD int tshi_optim_trainable(tsh_module *module) {
    tshi_walk at = {NULL, NULL, 0};
    while (tshi_module_step_once(module, &at)) {
        /* not trained, such as a quantised or a frozen weight */
        if ((at.param->flags & TSHI_BUFFER) || !at.param->requires_grad) continue;
        if (tshi_optim_trains(at.param->dtype)) continue;
        return tshi_error_zero(module->ctx, TSH_ERR_DTYPE,
                               "tsh_optim_new: \"%s\" is %s, which is for inference: its range is "
                               "too small; train in bf16: tsh_to(module, TSH_BF16)",
                               at.param->path, tshi_dtype_name(at.param->dtype));
    }
    return 1;
}

/* Sets the fields of parameter i of an optimiser that say how the optimiser wants its gradient to
 * be kept. If several optimisers have the parameter, the newest one's settings win, except that
 * flags which an older one has set stay set. */
static TSHI_COLD void tshi_optim_claim(const tsh_optim *optim, int i) {
    tsh_tensor *param = optim->each[i].param;
    if (optim->desc.zero && param->ctx->dp.size > 1) param->flags |= TSHI_CHUNKED;
    if (optim->desc.round_weights) param->flags |= TSHI_INEXACT;
    param->flags |= TSHI_OPTIMISED;
    param->grad_dtype = optim->desc.grad_dtype;
    param->updates = &optim->each[i].steps;
}

/* Calls tshi_optim_claim for all parameters of optim (NULL: none) and of the optimisers older than
 * optim, the oldest first. */
static TSHI_COLD void tshi_optim_claim_all(const tsh_optim *optim) {
    if (!optim) return;
    tshi_optim_claim_all(optim->older);
    for (int i = 0; i < optim->count; i++) tshi_optim_claim(optim, i);
}

/* Warns if some weights below module are quantised and others are trained; but not if a parameter
 * is frozen: then the program has chosen what it trains. trained: number of parameters that the
 * optimiser updates. */
static TSHI_COLD void tshi_optim_warn_blocks(tsh_module *module, int trained) {
    tshi_walk at = {NULL, NULL, 0};
    const tsh_tensor *first = NULL;
    char text[TSH_MESSAGE_SIZE];
    /* count: number of quantised weights; frozen: number of frozen parameters */
    int count = 0, frozen = 0;
    while (tshi_module_step_once(module, &at)) {
        frozen += !at.param->requires_grad && !(at.param->flags & TSHI_BUFFER);
        if (!tshi_dtype_in_blocks(at.param->dtype)) continue;
        if (!count++) first = at.param;
    }
    if (!first || !trained || frozen) return;
    (void)snprintf(text, sizeof text,
                   "tsh_optim_new: %d weights, such as \"%.128s\", are %s and stay as they are; "
                   "only the other %d parameters are trained. To train all, load the model "
                   "unquantised",
                   count, first->path, tshi_dtype_name(first->dtype), trained);
    tshi_error_warn(module->ctx, TSHI_WARN_BLOCKS, text);
}

TSH_API TSHI_COLD tsh_optim *tsh_optim_new(tsh_module *module, const tsh_optim_desc *desc) {
    tsh_ctx *ctx = module ? module->ctx : NULL;
    tshi_walk at = {NULL, NULL, 0};
    tsh_optim *optim;
    size_t slots = 0; /* number of parameters and buffers */
    if (!ctx || ctx->error.code != TSH_OK ||
        (desc && tshi_optim_check(ctx, "tsh_optim_new", desc) != TSH_OK) ||
        !tshi_optim_trainable(module))
        return NULL;
    optim = (tsh_optim *)tshi_mem_arena_alloc(ctx, &ctx->books, sizeof *optim);
    if (!optim) return NULL;
    if (desc) optim->desc = *desc;
    optim->module = module;
    tshi_optim_defaults(&optim->desc);
    if (desc && desc->schedule) {
        optim->schedule = *desc->schedule;
        optim->desc.schedule = &optim->schedule;
        if (optim->schedule.lr == 0) optim->schedule.lr = optim->desc.lr;
        optim->desc.lr = tsh_schedule_lr(&optim->schedule, 0);
    }
    /* Counts the parameters and buffers. At its end the walk is ready to begin anew. */
    while (tshi_module_step_once(module, &at)) slots++;
    optim->each = (tshi_moments *)tshi_mem_arena_alloc(ctx, &ctx->books,
                                                       (slots + 1) * sizeof *optim->each);
    if (!optim->each) return NULL;
    while (tshi_module_step_once(module, &at)) {
        tshi_moments *each = &optim->each[optim->count];
        if (at.param->flags & TSHI_BUFFER) continue;
        optim->count++;
        each->param = at.param;
        each->desc = &optim->desc;
        each->lr_scale = 1; /* the default, which tsh_optim_group changes */
        each->weight_decay = optim->desc.weight_decay;
    }
    /* -1: the first step looks for parameters that were added too late (tshi_optim_warn_late) */
    optim->changes = -1;
    tshi_optim_warn_blocks(module, optim->count);
    optim->older = ctx->optims; /* optim becomes the first in the ctx's list */
    ctx->optims = optim;
    for (int i = 0; i < optim->count; i++) tshi_optim_claim(optim, i);
    return optim;
}

TSH_API TSHI_COLD void tsh_optim_free(tsh_optim *optim) {
    tsh_optim **at = optim ? &optim->module->ctx->optims : NULL;
    while (at && *at && *at != optim) at = &(*at)->older;
    if (!at || !*at) return; /* optim is NULL, or was freed before */
    *at = optim->older;
    for (int i = 0; i < optim->count; i++) {
        tsh_tensor *param = optim->each[i].param;
        for (int k = 0; k < TSH_MAX_MOMENTS; k++) tsh_tensor_free(optim->each[i].moment[k]);
        param->flags &= ~(unsigned)(TSHI_CHUNKED | TSHI_OPTIMISED | TSHI_INEXACT);
        param->grad_dtype = TSH_DTYPE_DEFAULT;
        param->updates = NULL;
    }
    /* Sets the fields of parameters that other optimisers update, too, as these want them. */
    tshi_optim_claim_all(optim->module->ctx->optims);
    for (int i = 0; i < optim->count; i++) {
        tsh_tensor *param = optim->each[i].param;
        /* 1: the parameter's gradient has been cut to this rank's chunk */
        const int chunked = optim->desc.zero && param->ctx->dp.size > 1;
        if (!(param->flags & TSHI_OPTIMISED) || (chunked && !(param->flags & TSHI_CHUNKED)))
            tsh_zero_grad(param);
        if (param->flags & TSHI_OPTIMISED) continue;
        tshi_mem_release(param->ctx, param->low);
        param->low = NULL;
    }
}

/* Sets the weight decay and lr_scale of the parameters that match the pattern and, unless desc is
 * NULL, makes desc the optimiser that updates them. op: the public function, for errors. */
static TSHI_COLD tsh_result tshi_optim_set_group(tsh_optim *optim, const char *op,
                                                 const char *pattern, double lr_scale,
                                                 double weight_decay, const tsh_optim_desc *desc) {
    int i, matched = 0; /* matched: number of parameters that match */
    for (i = 0; i < optim->count; i++) {
        tshi_moments *each = &optim->each[i];
        if (!tshi_glob_match(pattern, tshi_module_below(optim->module, each->param->path)))
            continue;
        if (desc && (each->steps || each->moment[0]))
            return tsh_fail(optim->module->ctx, TSH_ERR_STATE,
                            "%s: \"%s\" has been updated by %s; make groups before the first step",
                            op, each->param->path, tshi_optim_name(each->desc));
        each->lr_scale = lr_scale;
        each->weight_decay = weight_decay;
        if (desc) each->desc = desc;
        matched++;
    }
    if (matched) return TSH_OK;
    return tsh_fail(optim->module->ctx, TSH_ERR_ARGUMENT,
                    "%s: \"%.96s\" matches none of the %d parameters, the first of "
                    "which is \"%.96s\"; * stays within a name, ** is any number of names, as in "
                    "\"**.bias\"",
                    op, pattern, optim->count,
                    optim->count ? tshi_module_below(optim->module, optim->each->param->path) : "");
}

TSH_API TSHI_COLD tsh_result tsh_optim_group(tsh_optim *optim, const char *pattern, double lr_scale,
                                             double weight_decay) {
    if (!optim || !pattern) return TSH_ERR_ARGUMENT;
    if (!(lr_scale >= 0 && weight_decay >= 0)) /* also true if one is NaN */
        return tsh_fail(optim->module->ctx, TSH_ERR_ARGUMENT,
                        "tsh_optim_group: \"%.96s\" gets lr_scale %g and weight_decay %g; neither "
                        "may be below 0",
                        pattern, lr_scale, weight_decay);
    return tshi_optim_set_group(optim, "tsh_optim_group", pattern, lr_scale, weight_decay, NULL);
}

TSH_API TSHI_COLD tsh_result tsh_optim_group_with(tsh_optim *optim, const char *pattern,
                                                  const tsh_optim_desc *desc) {
    static const char op[] = "tsh_optim_group_with";
    tsh_ctx *ctx = optim ? optim->module->ctx : NULL;
    const double lr = optim && optim->desc.schedule ? optim->schedule.lr
                      : optim                       ? optim->desc.lr
                                                    : 0;
    tsh_optim_desc *own;
    if (!ctx || !pattern) return TSH_ERR_ARGUMENT;
    if (!desc || !(lr > 0))
        return tsh_fail(ctx, TSH_ERR_ARGUMENT,
                        desc ? "%s: the optimiser's learning rate is 0, so a group's cannot keep "
                               "its ratio to it; make groups before tsh_optim_set_lr"
                             : "%s: desc is NULL",
                        op);
    if (tshi_optim_check(ctx, op, desc) != TSH_OK) return ctx->error.code;
    if (desc->clip_norm != 0 || desc->zero || desc->grad_dtype || desc->moments_dtype ||
        desc->round_weights || desc->schedule)
        return tsh_fail(ctx, TSH_ERR_ARGUMENT,
                        "%s: .clip_norm, .zero, .grad_dtype, .moments_dtype, .round_weights and "
                        ".schedule are those of the optimiser: set them in tsh_optim_new",
                        op);
    own = (tsh_optim_desc *)tshi_mem_arena_alloc(ctx, &ctx->books, sizeof *own);
    if (!own) return ctx->error.code;
    *own = *desc;
    own->moments_dtype = optim->desc.moments_dtype;
    tshi_optim_defaults(own);
    return tshi_optim_set_group(optim, op, pattern, own->lr / lr, own->weight_decay, own);
}

TSH_API void tsh_optim_set_lr(tsh_optim *optim, double lr) {
    if (!optim) return;
    if (lr >= TSH_ZERO && lr <= DBL_MAX)
        optim->desc.lr = lr < 0 ? 0 : lr; /* TSH_ZERO means 0 */
    else
        (void)tsh_fail(optim->module->ctx, TSH_ERR_ARGUMENT,
                       "tsh_optim_set_lr: the learning rate is %g%s", lr,
                       lr < 0 ? "; it may not be below 0"
                              : "; a tsh_schedule gives NaN if a field is missing: LINEAR, COSINE, "
                                "ONE_CYCLE and WSD need .total, STEP .period, EXPONENTIAL .gamma, "
                                "LAMBDA .factor");
}

/* Updates every parameter that has a gradient. With .zero, parameters are queued in buckets, whose
 * all-gathers run during the next updates. */
static void tshi_optim_update_all(tsh_ctx *ctx, tsh_optim *optim, double clip) {
    const int chunked = optim->desc.zero && ctx->dp.size > 1; /* 1: update this rank's chunks */
    if (chunked) tshi_bucket_begin(ctx, 0);
    for (int i = 0; i < optim->count && ctx->error.code == TSH_OK; i++) {
        tsh_tensor *param = optim->each[i].param;
        const int64_t begin = tshi_trace_now(ctx->trace);
        if (!param->gr.live) continue; /* no gradient: keep the parameter as it is */
        if (!chunked && (param->flags & TSHI_CHUNKED))
            (void)tsh_fail(ctx, TSH_ERR_STATE,
                           "tsh_optim_step: \"%s\" belongs to another optimiser, which has .zero",
                           param->path);
        else
            tshi_optim_update(&optim->each[i], optim->desc.lr, clip);
        if (chunked) tshi_bucket_add(param, TSH_ALLGATHER);
        if (ctx->trace) (void)tshi_trace_add(ctx->trace, TSHI_TRACE_OPTIM, param->path, begin, 0);
    }
    if (chunked) tshi_bucket_end(ctx); /* waits for the all-gathers */
}

/* Clips the gradients and updates the parameters. If the norm of the gradients is not finite, does
 * neither, but counts and logs a skipped step. */
static void tshi_optim_step(tsh_ctx *ctx, tsh_optim *optim) {
    double norm, max = optim->desc.clip_norm; /* max: the norm to clip to; 0: no clipping */
    if (tshi_optim_norm(optim->module, &norm) != TSH_OK) return;
    optim->info.norm = norm; /* the norm before clipping */
    if (optim->desc.schedule)
        tsh_optim_set_lr(optim, tsh_schedule_lr(&optim->schedule,
                                                optim->info.steps + optim->info.skipped));
    if (ctx->error.code != TSH_OK) return; /* the schedule gave no valid rate */
    if (norm <= DBL_MAX) {   /* false for NaN and infinity */
        tshi_optim_update_all(ctx, optim, max > 0 ? tshi_optim_clip_factor(norm, max) : 1);
        optim->info.steps++;
        return;
    }
    optim->info.skipped++; /* the parameters are unchanged */
    tsh_log_message(
        &ctx->logger,
        "warning: tsh_optim_step: a step is skipped, the %lldth: the norm of the gradients is %g",
        (long long)optim->info.skipped, norm);
}

/* Warns if a parameter without an optimiser was added below optim's module after optim was made. */
static TSHI_COLD void tshi_optim_warn_late(tsh_ctx *ctx, tsh_optim *optim) {
    tshi_walk at = {NULL, NULL, 0};
    char text[TSH_MESSAGE_SIZE];
    optim->changes = ctx->changes;
    while (tshi_module_step_once(optim->module, &at)) {
        if ((at.param->flags & (TSHI_BUFFER | TSHI_OPTIMISED)) || !at.param->requires_grad)
            continue;
        (void)snprintf(text, sizeof text,
                       "\"%s\" was added after tsh_optim_new and is never updated; call "
                       "tsh_optim_new when the model is complete", at.param->path);
        tshi_error_warn(ctx, TSHI_WARN_LATE, text);
        return;
    }
}

/* Marks the gradients as used. Warns if no parameter has a gradient. Warns if TSHI_WARN_STEPS steps
 * were taken without tsh_step_end and, in the second half of them, the number of step tensors grew
 * by at least one per step. */
static void tshi_optim_warn(tsh_ctx *ctx, tsh_optim *optim) {
    /* wanted: number of parameters that require a gradient; live: number of those that have one */
    int wanted = 0, live = 0;
    if (ctx->error.code != TSH_OK) return;
    for (int i = 0; i < optim->count; i++) {
        tsh_tensor *param = optim->each[i].param;
        wanted += param->requires_grad;
        live += param->gr.live;
        if (param->gr.live) param->flags |= TSHI_USED;
    }
    /* With pp > 1 it may be no mistake: all trained parameters may lie on other stages. */
    if (wanted && !live && ctx->pp.size == 1)
        tshi_error_warn(ctx, TSHI_WARN_NONE,
                        "tsh_optim_step changes nothing, as no parameter has a gradient; call "
                        "tsh_backward before it, and tsh_zero_grads only after it");
    if (optim->changes != ctx->changes) tshi_optim_warn_late(ctx, optim);
    ctx->steps++;
    if (ctx->steps != TSHI_WARN_STEPS / 2 && ctx->steps != TSHI_WARN_STEPS) return;
    const int64_t before = ctx->held;
    ctx->held = 0;
    for (const tsh_tensor *t = ctx->handles.step.next; t != &ctx->handles.step; t = t->next)
        ctx->held++;
    if (ctx->steps == TSHI_WARN_STEPS && ctx->held - before >= TSHI_WARN_STEPS / 2)
        tshi_error_warn(ctx, TSHI_WARN_STEP,
                        "memory grows: many calls of tsh_optim_step, and no tsh_step_end between "
                        "them; call tsh_step_end at the end of each step");
}

TSH_API tsh_result tsh_optim_step(tsh_optim *optim) {
    tsh_ctx *ctx = optim ? optim->module->ctx : NULL;
    int64_t begin; /* when the step began, for the trace */
    if (!ctx) return TSH_ERR_ARGUMENT;
    begin = tshi_trace_now(ctx->trace);
    (void)tshi_trace_phase(ctx->trace, TSHI_PHASE_UPDATE);
    tshi_optim_step(ctx, optim);
    tshi_optim_warn(ctx, optim);
    if (ctx->trace) (void)tshi_trace_add(ctx->trace, TSHI_TRACE_OPTIM, "tsh_optim_step", begin, 0);
    (void)tshi_trace_phase(ctx->trace, TSHI_PHASE_FORWARD);
    return ctx->error.code;
}

TSH_API tsh_optim_info tsh_optim_state(const tsh_optim *optim) {
    tsh_optim_info info;
    memset(&info, 0, sizeof info);
    if (!optim) return info;
    info = optim->info;
    info.lr = optim->desc.lr; /* the current rate */
    return info;
}
