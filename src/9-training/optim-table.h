/* ========================================================================== */
/* >>optim-table                                MARK: - optim-table (private) */
/* The table of optimisers; the update of one parameter or of a chunk of it.  */
/* Needs: >>optim-rows >>optim-matrix.                                        */
/* ========================================================================== */

/* TO ADD AN OPTIMISER, add a constant to tsh_optim_kind and a row to tshi_optims. Its update gets
 * the elements that this rank updates, in any order, or, with `whole`, the parameter as if it were
 * neither sharded nor chunked; tshi_optim_whole gathers it. */
typedef struct tshi_optim_row {
    const char *name; /* the optimiser's name in tsh_summary and in files */
    int moments;      /* number of moments; see tshi_optim_moments */
    int whole;        /* 1: the update needs whole, unsharded parameters */
    /* defaults: the values that 0 stands for in tsh_optim_desc */
    double lr, momentum, beta1, beta2, eps, weight_decay;
    void (*update)(tshi_turn *turn);
} tshi_optim_row;

/* One row per optimiser, in the order of tsh_optim_kind. */
static const tshi_optim_row tshi_optims[] = {
    {"sgd", 1, 0, 1e-3, 0, 0.9, 0.999, 1e-8, 0, tshi_optim_update_sgd},
    {"adam", 2, 0, 1e-3, 0, 0.9, 0.999, 1e-8, 0, tshi_optim_update_adam},
    {"adamw", 2, 0, 1e-3, 0, 0.9, 0.999, 1e-8, 0, tshi_optim_update_adam},
    {"lion", 1, 0, 1e-4, 0, 0.9, 0.99, 1e-8, 0, tshi_optim_update_lion},
    {"rmsprop", 1, 0, 1e-2, 0, 0.9, 0.999, 1e-8, 0, tshi_optim_update_rmsprop},
    {"adagrad", 1, 0, 1e-2, 0, 0.9, 0.999, 1e-10, 0, tshi_optim_update_adagrad},
    {"adamax", 2, 0, 2e-3, 0, 0.9, 0.999, 1e-8, 0, tshi_optim_update_adamax},
    {"nadam", 2, 0, 2e-3, 0, 0.9, 0.999, 1e-8, 0, tshi_optim_update_nadam},
    {"radam", 2, 0, 1e-3, 0, 0.9, 0.999, 1e-8, 0, tshi_optim_update_radam},
    {"adafactor", 2, 1, 1e-2, 0, 0.9, 0.999, 0, 0, tshi_optim_update_adafactor},
    {"muon", 1, 1, 1e-3, 0.95, 0.9, 0.999, 1e-7, 0.1, tshi_optim_update_muon},
    {"custom", 0, 0, 1e-3, 0, 0.9, 0.999, 1e-8, 0, tshi_optim_update_custom},
};
enum { TSHI_OPTIMS = sizeof tshi_optims / sizeof tshi_optims[0] };

/* Returns the name of an optimiser in tsh_summary and in files. */
static const char *tshi_optim_name(const tsh_optim_desc *d) {
    return d->kind == TSH_CUSTOM && d->custom.name ? d->custom.name : tshi_optims[d->kind].name;
}

/* Returns 1 if the update of an optimiser needs whole parameters, neither sharded nor chunked. */
static int tshi_optim_is_whole(const tsh_optim_desc *d) {
    return tshi_optims[d->kind].whole || (d->kind == TSH_CUSTOM && d->custom.whole);
}

/* Returns the number of moments that an optimiser keeps of a parameter. */
static int tshi_optim_moments(const tsh_optim_desc *d, const tsh_tensor *param) {
    switch (d->kind) {
    case TSH_SGD: return d->momentum > 0;
    case TSH_RMSPROP: return 1 + (d->momentum > 0) + (d->centered != 0);
    case TSH_ADAFACTOR: return param->ndim > 1 ? 2 : 1;
    case TSH_CUSTOM: return d->custom.moments;
    default: return tshi_optims[d->kind].moments;
    }
}

/* Returns the dtype of an optimiser's moments. */
static tsh_dtype tshi_optim_moments_dtype(const tsh_optim_desc *d) {
    return d->kind == TSH_ADAFACTOR ? TSH_REAL : d->moments_dtype;
}

/* Returns 1 if the moments of a parameter have not its shape but are Adafactor's means of squares:
 * moment 0 of the rows, moment 1 of the columns. Every rank holds all of them. */
static int tshi_optim_is_factored(const tsh_optim_desc *d, const tsh_tensor *param) {
    return d->kind == TSH_ADAFACTOR && param->ndim > 1;
}

/* Returns a tensor without values that has the shape, layout and path of moment i of a parameter:
 * the parameter itself or *form, which is filled in. */
static tsh_tensor *tshi_optim_form(const tsh_optim_desc *d, tsh_tensor *param, int i,
                                   tsh_tensor *form) {
    if (!tshi_optim_is_factored(d, param)) return param;
    *form = *param;
    form->flags &= ~(unsigned)TSHI_CHUNKED;
    form->layout = tsh_replicated();
    form->dim[param->ndim - 1 - i] = 1;
    memcpy(form->local, form->dim, sizeof form->local);
    tshi_tensor_strides(form->local, form->ndim, form->stride);
    return form;
}

/* -- updates that need whole parameters ------------------------------------- */

/* Kernel: stores the values of the operand TSHI_OPTIM_GRAD in the operand TSHI_OPTIM_X. */
TSHI_INLINE void tshi_optim_assign_body(int64_t n, const tshi_operand *operand,
                                        const tshi_update *p) {
    tsh_real pad[TSHI_BLOCK];
    tshi_words drawn;
    drawn.first = -1;
    for (int64_t e = 0; e < n; e += TSHI_BLOCK)
        tshi_optim_store_x(operand, e, n, tshi_optim_load(&operand[TSHI_OPTIM_GRAD], e, n, pad), p,
                           &drawn);
}
TSHI_KERNEL(tshi_optim_assign, tshi_update);

/* Collective over dp and tp: gathers the values of operand i, such as a moment, in `whole`, an
 * array of the parameter's global shape. shard: scratch with space for this rank's shard. */
static tsh_result tshi_optim_gather_whole(const tshi_turn *turn, const tshi_operand *x, int i,
                                          tsh_real *shard, tsh_real *whole) {
    const tsh_layout replicated = tsh_replicated();
    const tsh_tensor *t = turn->t;
    const int64_t first = tshi_optim_first(t), count = tshi_optim_count(t);
    /* copy of x in which operand i takes the parameter's place */
    tshi_operand part[TSHI_OPTIM_OPERANDS];
    tsh_real pad[TSHI_BLOCK];
    memcpy(part, x, sizeof part);
    part[TSHI_OPTIM_X] = x[i];
    if (i != TSHI_OPTIM_X) part[TSHI_OPTIM_LOW].data = NULL;
    for (int64_t e = 0; e < count; e += TSHI_BLOCK)
        memcpy(shard + first + e, tshi_optim_load_x(part, e, count, pad),
               (size_t)tshi_base_min(TSHI_BLOCK, count - e) * sizeof *pad);
    if (t->flags & TSHI_CHUNKED &&
        tshi_optim_gather_chunks(t, shard, TSH_REAL, "tsh_optim_step: a whole parameter") != TSH_OK)
        return t->ctx->error.code;
    return tshi_redistribute_move(t, &t->layout, &replicated, TSHI_WIRE_EXACT, TSH_REAL, shard,
                                  whole);
}

/* Stores this rank's elements of `whole`, an array of the parameter's global shape, in operand i,
 * which may be rounded at random. shard: scratch with space for this rank's shard. */
static void tshi_optim_keep_whole(const tshi_turn *turn, const tshi_operand *x, int i,
                                  tsh_real *whole, tsh_real *shard) {
    const tsh_layout replicated = tsh_replicated();
    const tsh_tensor *t = turn->t;
    tshi_operand part[TSHI_OPTIM_OPERANDS];
    tshi_update params = turn->params;
    memcpy(part, x, sizeof part);
    part[TSHI_OPTIM_X] = x[i];
    if (i != TSHI_OPTIM_X) {
        part[TSHI_OPTIM_LOW].data = NULL;
        params.rounds = params.random;
        params.stream = tshi_rng_hash(params.noise.stream, &i, sizeof i);
    }
    if (tshi_redistribute_move(t, &replicated, &t->layout, TSHI_WIRE_EXACT, TSH_REAL, whole,
                               shard) != TSH_OK)
        return;
    part[TSHI_OPTIM_GRAD] = tshi_kernel_operand(shard + tshi_optim_first(t), 1, TSH_REAL);
    tshi_optim_run(t, tshi_optim_assign[t->ctx->isa], part, &params);
}

/* Runs the update of an optimiser that needs whole parameters: gathers the operands, the same on
 * every rank, and keeps this rank's part of the results. */
static void tshi_optim_whole(tshi_turn *turn, const tshi_optim_row *row) {
    tsh_ctx *ctx = turn->t->ctx;
    const int64_t n = tsh_numel(turn->t);
    tshi_operand *const own = turn->x, whole[TSHI_OPTIM_OPERANDS];
    /* at[i]: operand i as an array of the global shape; NULL: the optimiser does not have it, or
     * every rank holds all of it */
    tsh_real *at[TSHI_OPTIM_LOW], *shard;
    int arrays = 0; /* number of operands to be gathered */
    tshi_block *block;
    for (int i = 0; i < TSHI_OPTIM_LOW; i++)
        arrays += own[i].data &&
                  (i < TSHI_OPTIM_FIRST || !tshi_optim_is_factored(turn->desc, turn->t));
    block = tshi_mem_alloc(ctx, TSH_MEM_STEP, tshi_dtype_reals((arrays + 1) * n));
    if (!block) return;
    shard = (tsh_real *)tshi_mem_data(block) + arrays * n;
    memcpy(whole, own, sizeof whole);
    for (int i = TSHI_OPTIM_LOW; i-- > 0;) {
        at[i] = NULL;
        if (!own[i].data) continue;
        if (i >= TSHI_OPTIM_FIRST && tshi_optim_is_factored(turn->desc, turn->t)) continue;
        at[i] = (tsh_real *)tshi_mem_data(block) + --arrays * n;
        whole[i] = tshi_kernel_operand(at[i], 1, TSH_REAL);
        if (ctx->error.code == TSH_OK) (void)tshi_optim_gather_whole(turn, own, i, shard, at[i]);
    }
    turn->x = whole;
    if (ctx->error.code == TSH_OK) row->update(turn);
    for (int i = 0; i < TSHI_OPTIM_LOW && ctx->error.code == TSH_OK; i++)
        if (at[i] && i != TSHI_OPTIM_GRAD) tshi_optim_keep_whole(turn, own, i, at[i], shard);
    tshi_mem_release(ctx, block);
}

/* Returns 1 if the optimiser can update the parameter as it is now; else 0 and an error. */
static int tshi_optim_takes(const tsh_optim_desc *d, const tsh_tensor *t) {
    char sizes[TSHI_TEXT_SIZE];
    if (t->flags & TSHI_SWAPPED)
        return tshi_error_zero(t->ctx, TSH_ERR_STATE,
                               "tsh_optim_step: \"%s\" has the values of its average; restore the "
                               "weights first: tsh_ema_swap",
                               t->path);
    if (d->kind == TSH_MUON && t->ndim != 2)
        return tshi_error_zero(t->ctx, TSH_ERR_SHAPE,
                               "tsh_optim_step: Muon is for parameters of two dimensions, but "
                               "\"%s\" is %s; put it in a group of another kind, such as "
                               "TSH_ADAMW, by tsh_optim_group_with",
                               t->path, tshi_tensor_sizes(t->dim, t->ndim, sizes));
    if (t->sparse && tshi_optim_is_whole(d))
        return tshi_error_zero(t->ctx, TSH_ERR_UNSUPPORTED,
                               "tsh_optim_step: \"%s\" has a row-sparse gradient, but %s needs "
                               "whole parameters; leave out .sparse, or put it in a group of "
                               "another kind by tsh_optim_group_with",
                               t->path, tshi_optim_name(d));
    return 1;
}

/* Updates one parameter and its moments, which the first update creates. lr: learning rate of the
 * tsh_optim; clip: factor of the gradient. */
static void tshi_optim_update(tshi_moments *each, double lr, double clip) {
    const tsh_optim_desc *d = each->desc;
    const tshi_optim_row *row = &tshi_optims[d->kind];
    tsh_tensor *t = each->param, form;
    const int moments = tshi_optim_moments(d, t);
    const tsh_dtype dtype = tshi_optim_moments_dtype(d);
    tshi_operand x[TSHI_OPTIM_OPERANDS];
    tshi_turn turn;
    memset(&turn, 0, sizeof turn);
    turn.desc = d;
    turn.each = each;
    turn.t = t;
    turn.lr = lr * each->lr_scale;
    turn.decay = each->weight_decay;
    turn.x = x;
    turn.params.clip = clip;
    if (!tshi_optim_takes(d, t) || !tshi_optim_operands(t, dtype, x)) return;
    turn.step = ++each->steps;
    turn.params.random = dtype == TSH_BF16;
    turn.params.noise.key = t->ctx->seed;
    turn.params.rounds = t->dtype == TSH_BF16 && !t->low;
    turn.params.noise.stream = tshi_rng_hash(tshi_rng_hash((uint64_t)turn.step, "moments", 7),
                                             t->path, strlen(t->path));
    turn.params.stream = tshi_rng_hash(turn.params.noise.stream, "weights", 7);
    for (int i = 0; i < moments; i++) {
        if (!tshi_optim_moment(tshi_optim_form(d, t, i, &form), &each->moment[i], dtype)) return;
        x[TSHI_OPTIM_FIRST + i].data = tshi_tensor_at(each->moment[i]);
    }
    if (tshi_optim_is_whole(d))
        tshi_optim_whole(&turn, row);
    else
        row->update(&turn);
}
