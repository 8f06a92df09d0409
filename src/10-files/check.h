/* ========================================================================== */
/* >>check                                            MARK: - check (private) */
/* Checks for tests and users: hashes, equal replicas, finite differences.    */
/* Needs: >>pipeline-send >>io.                                               */
/* ========================================================================== */

/* tsh_check_replicas lists the tensors that should be equal on several ranks, with a hash of each,
 * gathers the lists over a group, and compares each hash with the majority's. All ranks of a group
 * list the same tensors in the same order. tsh_gradcheck uses finite differences. */

TSH_API uint64_t tsh_hash(tsh_ctx *ctx, tsh_tensor *t) {
    if (!tshi_tensor_check_in(ctx, "tsh_hash", t)) return 0;
    tshi_comm_set_caller(ctx, TSHI_CALLER_HASH);
    if (t->layout.kind == TSH_PARTIAL) t = tsh_redistribute(t, tsh_replicated());
    uint64_t hash = t ? tshi_hash_part(t) : 0;
    if (t && t->layout.kind == TSH_SHARDED)
        (void)tshi_error_comm(ctx, tsh_allreduce(&ctx->tp, &hash, 1, TSH_I64, TSH_SUM), "tsh_hash");
    tshi_comm_set_caller(ctx, TSHI_CALLER_NONE);
    return hash;
}

/* A tensor whose values should be equal on several ranks: a parameter, or one of its moments. */
typedef struct tshi_replica {
    /* path: the parameter's path; what: words before the path in errors: "" for the parameter
     * itself, "the first moments of ", ... */
    const char *path, *what;
    int64_t hash;         /* hash of this rank's values; 0: this rank has no values */
    int over_tp, over_dp; /* 1: must be equal on all ranks of tp; on all ranks of dp */
    /* shape (pp), 1 for each pipeline stage that holds the parameter; NULL: the tensor is not
     * compared over pp */
    const unsigned char *holds;
} tshi_replica;

/* The list of the tensors to compare. It is made in two passes: the first counts the tensors, the
 * second fills in `each`. */
typedef struct tshi_replicas {
    tshi_replica *each; /* the tensors, shape (count); NULL: they are only counted */
    int count;          /* number of tensors counted or listed so far */
    int tied;           /* 1: lists parameters tied across pipeline stages; 0: all of this stage */
} tshi_replicas;

/* Counts the tensor t, which is param or one of its moments; if all->each is not NULL, also lists
 * it. Leaves out a t that is NULL or has no values, unless holds is given: all ranks of pp need the
 * same list. what, holds: see tshi_replica. */
static void tshi_check_list(tshi_replicas *all, const tsh_tensor *param, const tsh_tensor *t,
                            const char *what, const unsigned char *holds) {
    const int found = t && t->block;
    if (!found && !holds) return;
    tshi_replica *r = all->each ? all->each + all->count : NULL;
    all->count++;
    if (!r) return;
    memset(r, 0, sizeof *r);
    r->path = param->path;
    r->what = what;
    r->holds = holds;
    if (!found) return; /* no values here: hash 0, and no comparison over tp or dp */
    r->over_tp = t->layout.kind == TSH_REPLICATED;
    /* Moments that are cut into chunks over dp cannot be equal over dp: each rank has another
     * chunk. */
    r->over_dp = t == param || !(t->flags & TSHI_CHUNKED);
    const uint64_t hash = r->over_dp
                              ? tshi_hash_part(t)
                              : tshi_hash_sum(tshi_mem_data(t->block), tsh_dtype_size(t->dtype), 0,
                                               tshi_optim_count(t));
    /* low: hash of the lower 16 bits of a bf16 parameter's exact float weights; 0: t has none */
    const uint64_t low = t->low ? tshi_hash_sum(tshi_mem_data(t->low), 2, 0, tsh_local_numel(t))
                                : 0;
    r->hash = (int64_t)((hash ^ low * 3) >> 1); /* 63 bits, so not negative */
}

/* Lists a parameter, its moments in every optimiser that updates it, its averages, and what a
 * tsh_outer keeps of it. holds: see tshi_replica. */
static void tshi_check_all(tshi_replicas *all, const tsh_tensor *param,
                           const unsigned char *holds) {
    static const char *const what[TSH_MAX_MOMENTS] = {
        "the first moments of ", "the second moments of ", "the third moments of "};
    const int first = all->count;
    tshi_check_list(all, param, param, "", holds);
    for (const tsh_optim *optim = param->ctx->optims; optim; optim = optim->older)
        for (int i = 0; i < optim->count; i++) {
            if (optim->each[i].param != param) continue;
            for (int k = 0; k < TSH_MAX_MOMENTS; k++)
                tshi_check_list(all, param, optim->each[i].moment[k], what[k], holds);
        }
    for (const tsh_ema *ema = param->ctx->emas; ema; ema = ema->older)
        for (int i = 0; i < ema->count; i++)
            if (ema->each[i].param == param)
                tshi_check_list(all, param, ema->each[i].average, "the average of ", holds);
    for (int i = first; i < all->count && all->each && param->ctx->outers; i++)
        all->each[i].over_dp = 0; /* with tsh_outer, replicas differ between its exchanges */
    for (const tsh_outer *outer = param->ctx->outers; outer; outer = outer->older)
        for (int i = 0; i < outer->count; i++) {
            if (outer->each[i].param != param) continue;
            tshi_check_list(all, param, outer->each[i].weight, "the outer weight of ", holds);
            tshi_check_list(all, param, outer->each[i].moment, "the outer momentum of ", holds);
        }
}

/* Callback of tshi_module_params, with a tshi_replicas as `user`: lists a parameter and its
 * moments; if `tied` is 1 there, only if the parameter is tied across pipeline stages. */
static void tshi_check_param(const char *path, tsh_tensor *param, void *user) {
    tshi_replicas *all = (tshi_replicas *)user;
    const tshi_tie *tie = all->tied ? param->ctx->pipeline->ties : NULL;
    (void)path;
    if (!all->tied) tshi_check_all(all, param, NULL);
    for (; tie; tie = tie->next)
        if (tie->param == param) tshi_check_all(all, param, tie->holds);
}

/* Collective over comm: compares the hashes of the listed tensors. axis: the name of comm in the
 * error, which names the first tensor that differs and the ranks that differ from the majority. */
static void tshi_check_over(tsh_ctx *ctx, tsh_comm *comm, const char *axis,
                            const tshi_replicas *all) {
    const int n = all->count, size = comm->size;
    const size_t words = (size_t)n * (size_t)(size + 1) + (size_t)size;
    tshi_block *block = tshi_mem_alloc(ctx, TSH_MEM_STEP, words * sizeof(int64_t));
    char list[TSH_MESSAGE_SIZE / 4] = ""; /* "1, 3": the ranks that differ */
    /* mine: this rank's hashes, shape (n); theirs: those of all ranks, shape (size, n); counts: the
     * number of hashes that each rank sends, shape (size) */
    int64_t *mine, *theirs, *counts;
    /* usual: a rank of the majority; differ: number of ranks whose hash differs from that of
     * `usual` */
    int i, r, usual, differ = 0;
    if (!block) {
        tshi_error_report(ctx); /* no memory: makes the other ranks leave the all-gather */
        return;
    }
    mine = (int64_t *)tshi_mem_data(block);
    theirs = mine + n;
    counts = theirs + (size_t)n * (size_t)size;
    for (i = 0; i < n; i++) {
        const tshi_replica *one = &all->each[i];
        const int equal = comm == &ctx->tp ? one->over_tp : comm == &ctx->dp ? one->over_dp : 1;
        mine[i] = equal ? one->hash : 0; /* 0 on all ranks: not compared over comm */
    }
    for (r = 0; r < size; r++) counts[r] = n;
    (void)tshi_error_comm(ctx, tsh_allgather(comm, mine, theirs, counts, 1, TSH_I64),
                          "tsh_check_replicas");
    for (i = 0; i < n && !differ && ctx->error.code == TSH_OK; i++) {
        const tshi_replica *one = &all->each[i];
        usual = tshi_module_majority(theirs + i, n, size, one->holds);
        for (r = 0; r < size; r++)
            if ((!one->holds || one->holds[r]) && theirs[r * n + i] != theirs[usual * n + i])
                tsh_text_add(list, sizeof list, "%s%d", differ++ ? ", " : "", r);
        if (differ)
            (void)tsh_fail(ctx, TSH_ERR_STATE,
                           "tsh_check_replicas: %s\"%s\" %s between the %d ranks of %s: %s %s "
                           "%s from the others",
                           one->what, one->path, one->what[0] ? "differ" : "differs", size, axis,
                           differ > 1 ? "ranks" : "rank", list, differ > 1 ? "differ" : "differs");
        if (differ) ctx->error.rank = -1;
    }
    tshi_mem_release(ctx, block);
}

/* Collective over the world: if some ranks have an error, gives the error of the lowest of them to
 * all ranks, before any rank goes on. */
static void tshi_check_agree(tsh_ctx *ctx) {
    static const char op[] = "tsh_check_replicas";
    tsh_comm *world = &ctx->world;
    int64_t found = ctx->error.code != TSH_OK ? world->size - world->rank : 0;
    if (!ctx->reported &&
        tshi_error_comm(ctx, tsh_allreduce(world, &found, 1, TSH_I64, TSH_MAX), op) == TSH_OK &&
        found && tshi_io_take_error(ctx, found, op) == TSH_OK)
        (void)tsh_barrier(world); /* all ranks have the error before any of them goes on */
}

/* tied 0: compares the parameters of this rank's stage, and their moments, over tp and dp. tied 1:
 * compares those that are tied across pipeline stages, over pp. */
static void tshi_check_axes(tsh_module *module, int tied) {
    tsh_ctx *ctx = module->ctx;
    tshi_replicas all = {NULL, 0, tied}; /* first pass: counts the tensors */
    tshi_block *block;                   /* memory of all.each */
    tshi_module_params(module, tied, tshi_check_param, &all);
    block = tshi_mem_alloc(ctx, TSH_MEM_STEP, ((size_t)all.count + 1) * sizeof *all.each);
    if (!block) {
        tshi_error_report(ctx);
        return;
    }
    all.each = (tshi_replica *)tshi_mem_data(block);
    all.count = 0; /* second pass: fills in all.each */
    tshi_module_params(module, tied, tshi_check_param, &all);
    if (tied) {
        tshi_check_over(ctx, &ctx->pp, "pp", &all);
    } else {
        tshi_check_over(ctx, &ctx->tp, "tp", &all);
        tshi_check_over(ctx, &ctx->dp, "dp", &all);
    }
    tshi_mem_release(ctx, block);
}

/* Checks that all ranks have the same module tree: over the world or, while the stages of a
 * pipeline may still differ, over tp and dp. First cancels the comparison that is due before the
 * next collective of a group: only ranks that have changed their tree would make it. */
static void tshi_check_models(tsh_ctx *ctx) {
    const int whole = ctx->pp.size == 1 || ctx->pipeline; /* 1: all ranks must have the same tree */
    tsh_comm *comm[2];
    comm[0] = whole ? &ctx->world : &ctx->tp;
    comm[1] = &ctx->dp;
    ctx->tp.unchecked = ctx->dp.unchecked = ctx->world.unchecked = NULL;
    for (int i = 0; i < 2 - whole && ctx->error.code == TSH_OK; i++)
        if (comm[i]->size > 1)
            (void)tshi_error_comm(ctx, tshi_module_compare(comm[i], ctx), "tsh_check_replicas");
}

TSH_API TSHI_COLD int tsh_check_replicas(tsh_module *module) {
    tsh_ctx *ctx = module ? module->ctx : NULL;
    if (!ctx || !tsh_ok(ctx)) return 0;
    tshi_comm_set_caller(ctx, TSHI_CALLER_CHECK);
    tshi_check_models(ctx);
    if (tsh_ok(ctx)) {
        tshi_check_axes(module, 0);
        if (ctx->pipeline && ctx->pipeline->ties) tshi_check_axes(module, 1);
        tshi_check_agree(ctx);
    }
    tshi_comm_set_caller(ctx, TSHI_CALLER_NONE);
    return ctx->error.code == TSH_OK;
}

/* -- gradients against finite differences: tsh_gradcheck -------------------- */

/* The arguments of tsh_gradcheck. */
typedef struct tshi_gradcheck {
    tsh_ctx *ctx;
    tsh_gradcheck_fn fn; /* the user's function, which returns the loss */
    tsh_tensor **in;     /* shape (n): inputs of fn, which are leaves */
    int n;               /* number of inputs */
    void *user;          /* passed to fn */
    double eps;          /* step of the finite differences */
} tshi_gradcheck;

/* Adds `by` to the element *at, computes and returns the loss, and restores the element. at NULL:
 * another rank holds the element and changes it. */
static double tshi_check_loss(const tshi_gradcheck *c, tsh_real *at, double by) {
    tsh_real before = at ? *at : 0;
    if (at) *at = TSHI_R((double)before + by);
    /* not tsh_no_grad_begin, after which inputs of quantised weights are rounded to 8 bits */
    c->ctx->tape.no_grad++;
    tsh_scope_begin(c->ctx);
    double value = tsh_item(c->ctx, c->fn(c->ctx, c->in, c->n, c->user));
    tsh_scope_end(c->ctx);
    c->ctx->tape.no_grad--;
    if (at) *at = before; /* restores the element */
    return value;
}

/* Returns a pointer to element e of the whole tensor; NULL if another rank holds it. */
static tsh_real *tshi_check_element(const tsh_tensor *t, int64_t e) {
    tshi_runs run = tshi_tensor_runs(t, t->ctx->tp.rank, e, e + 1);
    return tshi_tensor_next_run(&run) ? tshi_tensor_values(t) + run.local : NULL;
}

/* Returns max(a, b); NaN if either is NaN. */
static double tshi_check_max(double a, double b) {
    return a != a || b <= a ? a : b;
}

/* Returns the largest difference, over this rank's elements, between an input's gradient and (f(x +
 * eps) - f(x - eps)) / (2 eps); it is relative where the gradient is above 1. */
static double tshi_check_input(const tshi_gradcheck *c, tsh_tensor *t, int64_t samples) {
    const int64_t numel = tsh_numel(t), every = samples > 0 ? numel / samples : 1;
    const tsh_real *grad = t->gr.live ? (const tsh_real *)tshi_mem_data(t->gr.block) : NULL;
    double worst = 0; /* the largest difference so far */
    for (int64_t e = 0; e < numel && c->ctx->error.code == TSH_OK; e += every > 0 ? every : 1) {
        tsh_real *at = tshi_check_element(t, e); /* NULL: another rank holds the element */
        double up = tshi_check_loss(c, at, c->eps), down = tshi_check_loss(c, at, -c->eps);
        double found = at && grad ? (double)grad[at - tshi_tensor_values(t)] : 0;
        /* difference from the gradient that backward computed */
        double gap = fabs((up - down) / (2 * c->eps) - found);
        if (at) worst = tshi_check_max(worst, gap / (fabs(found) > 1 ? fabs(found) : 1));
    }
    return worst;
}

TSH_API TSHI_COLD double tsh_gradcheck(tsh_ctx *ctx, tsh_gradcheck_fn fn, tsh_tensor **in, int n,
                                       void *user, double eps, int64_t samples) {
    const tshi_gradcheck c = {ctx, fn, in, n, user, eps > 0 ? eps : TSHI_DOUBLE ? 1e-5 : 1e-2};
    double worst = 0;
    if (!ctx || !fn || !in || !tsh_ok(ctx)) return -1; /* -1: no result */
    for (int i = 0; i < n; i++) {
        if (!in[i] || !(in[i]->flags & TSHI_LEAF) || !tshi_tensor_is_dense(in[i])) {
            (void)tsh_fail(
                ctx, TSH_ERR_ARGUMENT,
                "tsh_gradcheck: in[%d] is not a dense leaf; tsh_requires_grad makes one", i);
            return -1;
        }
        if (in[i]->dtype != TSH_REAL || tshi_tensor_packs(in[i])) {
            (void)tsh_fail(ctx, TSH_ERR_DTYPE,
                           "tsh_gradcheck: in[%d], or its gradient, is %s, too coarse for "
                           "differences; check the %s twin: tsh_to(module, TSH_REAL)", i,
                           tshi_dtype_name(in[i]->dtype != TSH_REAL ? in[i]->dtype : TSH_BF16),
                           tshi_dtype_name(TSH_REAL));
            return -1;
        }
        tsh_zero_grad(in[i]); /* backward adds to gradients */
    }
    if (tsh_backward(ctx, fn(ctx, in, n, user)) != TSH_OK) return -1;
    for (int i = 0; i < n; i++) worst = tshi_check_max(worst, tshi_check_input(&c, in[i], samples));
    (void)tshi_error_comm(ctx, tsh_allreduce(&ctx->tp, &worst, 1, TSH_F64, TSH_MAX),
                          "tsh_gradcheck");
    return tsh_ok(ctx) ? worst : -1;
}
