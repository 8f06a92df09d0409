/* ========================================================================== */
/* >>outer                                            MARK: - outer (private) */
/* tsh_outer: replicas that take steps of their own and seldom exchange what  */
/* these have changed (DiLoCo).                                               */
/* Needs: >>optim >>ema.                                                      */
/* ========================================================================== */

/* A fragment is a set of parameters that are exchanged together. The replicas' changes of its
 * parameters are averaged by two collectives over dp. The message is a matrix of shape (ranks of
 * dp, width). Row k has chunk k of every parameter: the local elements are cut into blocks of
 * TSHI_DTYPE_BLOCK, and the blocks into chunks by torch.chunk's rule; a chunk is padded with zeros
 * to the length of the parameter's chunk 0. So what an element becomes does not depend on how many
 * fragments there are.
 *   1. An all-to-all sends row k of each rank to rank k, in the dtype desc.wire.
 *   2. Rank k adds up the rows that it has received, in the order of rule 5 of >>comm-api, divides
 *      the sum by the number of ranks, and converts it to desc.wire, once.
 *   3. An all-gather sends row k of rank k to all ranks. Each decodes the same bytes, rank k those
 *      of row k too, so that all ranks have the same means. */

enum {
    TSHI_OUTER_FRAGMENTS = 32, /* max number of fragments: each may have a request in flight */
    /* Changes are multiplied by this before they are sent, and divided by it afterwards: a scale of
     * a quantised block is an f16, which has no numbers below 6e-8. */
    TSHI_OUTER_SCALE = 4096
};

/* How far the exchange of a fragment has got. */
typedef enum tshi_outer_stage {
    TSHI_OUTER_IDLE,
    TSHI_OUTER_SCATTERS, /* the all-to-all runs */
    TSHI_OUTER_GATHERS,  /* the all-gather runs */
    TSHI_OUTER_ARRIVED   /* its parameters' .change has the means */
} tshi_outer_stage;

/* What a tsh_outer keeps of a parameter. Its tensors are of TSH_REAL and in the parameter's layout;
 * all are NULL while the parameter is frozen. */
typedef struct tshi_outer_param {
    tsh_tensor *param;
    tsh_tensor *weight; /* the parameter after the last outer step, the same on all replicas */
    tsh_tensor *moment; /* the momentum of the outer step */
    tsh_tensor *change; /* the mean change of the replicas that has arrived; NULL: none */
    int fragment;       /* index of its fragment */
    int sent;           /* 1: its change is in a message under way */
    int64_t row;        /* index of its first element in a row of the message */
    tsh_layout layout;  /* the parameter's layout when the message was made */
} tshi_outer_param;

/* A fragment: parameters that are exchanged together. */
typedef struct tshi_outer_fragment {
    tshi_outer_request running; /* the collective that runs */
    tshi_outer_stage stage;
    int64_t sent;    /* step at which it was sent last; 0: never */
    int64_t width;   /* elements of a row of the message */
    int64_t *counts; /* shape (dp.size): elements of a row, in the dtype that is sent */
    /* out: the message: the rows to send, later the means; in: the rows received. NULL: no
     * message */
    tsh_tensor *out, *in;
} tshi_outer_fragment;

struct tsh_outer {
    tsh_module *module;
    tsh_optim *optim;
    tsh_outer_desc desc; /* the caller's, with its defaults filled in */
    tsh_outer_info info;
    /* settings as a file has them: .every, .fragments, .delay and the number of replicas */
    int64_t saved[4];
    tshi_outer_param *each; /* shape (count): one for each parameter of the optimiser */
    int count;
    tshi_outer_fragment *fragment; /* desc.fragments entries */
    tsh_outer *older;              /* the tsh_outer made before this one; NULL: none */
};

/* Returns an error if an option is out of range. */
static TSHI_COLD tsh_result tshi_outer_check(tsh_ctx *ctx, const tsh_outer_desc *d) {
    const tsh_dtype wire = d->wire ? d->wire : TSH_REAL;
    if (d->every < 1 || d->fragments < 0 || d->fragments > TSHI_OUTER_FRAGMENTS ||
        d->fragments > d->every || d->delay < 0 || d->delay >= d->every)
        return tsh_fail(ctx, TSH_ERR_ARGUMENT,
                        "tsh_outer_new: .every is %lld, .fragments %d, .delay %lld; .every is at "
                        "least 1 and at least .fragments, which are at most %d, and more than "
                        ".delay, which is not below 0",
                        (long long)d->every, d->fragments, (long long)d->delay,
                        (int)TSHI_OUTER_FRAGMENTS);
    if (!(d->lr >= TSH_ZERO && d->momentum >= TSH_ZERO && d->momentum < 1 && d->mix >= TSH_ZERO &&
          d->mix <= 1))
        return tsh_fail(ctx, TSH_ERR_ARGUMENT,
                        "tsh_outer_new: .lr is %g, .momentum %g, .mix %g; .lr is not below 0, "
                        ".momentum from 0 to below 1, .mix from 0 to 1 (0 itself: TSH_ZERO)",
                        d->lr, d->momentum, d->mix);
    if (tshi_dtype_exists(wire) &&
        (tshi_dtype_in_blocks(wire) || (tshi_dtypes[wire].floating && tshi_optim_trains(wire))))
        return TSH_OK;
    return tsh_fail(ctx, TSH_ERR_DTYPE,
                    "tsh_outer_new: .wire is %s; it is a quantised dtype, or a floating one with "
                    "the range of a float, such as TSH_BF16",
                    tshi_dtype_exists(wire) ? tshi_dtype_name(wire) : "no dtype");
}

/* Returns an error if the optimiser cannot take steps that differ between replicas. */
static TSHI_COLD tsh_result tshi_outer_check_optim(const tsh_module *module,
                                                   const tsh_optim *optim) {
    tsh_ctx *ctx = module->ctx;
    if (!optim || optim->module != module)
        return tsh_fail(ctx, TSH_ERR_ARGUMENT,
                        "tsh_outer_new: the optimiser is %s; it takes the module's own",
                        optim ? "that of another module" : "NULL");
    if (optim->outer)
        return tsh_fail(ctx, TSH_ERR_STATE,
                        "tsh_outer_new: the optimiser has a tsh_outer; first call tsh_outer_free");
    if (optim->desc.zero)
        return tsh_fail(ctx, TSH_ERR_ARGUMENT,
                        "tsh_outer_new: the optimiser has .zero, which cuts its moments over dp; "
                        "replicas that step apart have moments of their own: leave it out");
    return TSH_OK;
}

/* Deals the parameters to the fragments: each to the one with the fewest elements so far. */
static TSHI_COLD void tshi_outer_deal(tsh_outer *outer) {
    int64_t load[TSHI_OUTER_FRAGMENTS] = {0}; /* load[f]: number of elements of fragment f */
    for (int i = 0; i < outer->count; i++) {
        int least = 0;
        for (int f = 1; f < outer->desc.fragments; f++)
            if (load[f] < load[least]) least = f;
        outer->each[i].param = outer->optim->each[i].param;
        outer->each[i].fragment = least;
        if (outer->each[i].param->requires_grad) load[least] += tsh_numel(outer->each[i].param);
    }
}

/* Sets outer->saved, the settings that a file stores. */
static void tshi_outer_describe(tsh_outer *outer) {
    outer->saved[0] = outer->desc.every;
    outer->saved[1] = outer->desc.fragments;
    outer->saved[2] = outer->desc.delay;
    outer->saved[3] = outer->module->ctx->dp.size;
}

TSH_API TSHI_COLD tsh_outer *tsh_outer_new(tsh_module *module, tsh_optim *optim,
                                           const tsh_outer_desc *desc) {
    static const tsh_outer_desc none = {0, 0, 0, TSH_DTYPE_DEFAULT, 0, 0, 0};
    tsh_ctx *ctx = module ? module->ctx : NULL;
    const tsh_outer_desc *d = desc ? desc : &none;
    tsh_outer *outer;
    if (!ctx || ctx->error.code != TSH_OK || tshi_outer_check(ctx, d) != TSH_OK ||
        tshi_outer_check_optim(module, optim) != TSH_OK)
        return NULL;
    outer = (tsh_outer *)tshi_mem_arena_alloc(ctx, &ctx->books, sizeof *outer);
    if (!outer) return NULL;
    outer->module = module;
    outer->optim = optim;
    outer->desc = *d;
    outer->desc.lr = tshi_base_option(d->lr, 0.7);
    outer->desc.momentum = tshi_base_option(d->momentum, 0.9);
    outer->desc.mix = tshi_base_option(d->mix, d->delay ? 0.5 : 0);
    if (!d->wire) outer->desc.wire = TSH_REAL;
    if (!d->fragments) outer->desc.fragments = 1;
    outer->count = optim->count;
    outer->each = (tshi_outer_param *)tshi_mem_arena_alloc(
        ctx, &ctx->books, ((size_t)outer->count + 1) * sizeof *outer->each);
    outer->fragment = (tshi_outer_fragment *)tshi_mem_arena_alloc(
        ctx, &ctx->books, (size_t)outer->desc.fragments * sizeof *outer->fragment);
    for (int f = 0; outer->fragment && f < outer->desc.fragments; f++)
        outer->fragment[f].counts = (int64_t *)tshi_mem_arena_alloc(
            ctx, &ctx->books, (size_t)ctx->dp.size * sizeof(int64_t));
    if (ctx->error.code != TSH_OK) return NULL;
    tshi_outer_deal(outer);
    tshi_outer_describe(outer);
    for (int f = 0; f < outer->desc.fragments; f++) {
        outer->fragment[f].running.next = ctx->outer_requests;
        ctx->outer_requests = &outer->fragment[f].running;
    }
    optim->outer = outer;
    outer->older = ctx->outers;
    ctx->outers = outer;
    return outer;
}

/* -- the state of parameters -------------------------------------------------- */

/* The argument of the functions that threads run on the blocks of a parameter, or of a row of a
 * message. */
typedef struct tshi_outer_work {
    const tsh_outer *outer;
    const tshi_outer_param *each;
    const tshi_outer_fragment *fragment;
    int64_t n;      /* number of local elements of the parameter */
    int64_t blocks; /* number of blocks of the parameter's chunk 0 */
} tshi_outer_work;

/* Returns how many blocks of TSHI_DTYPE_BLOCK elements n elements take. */
static int64_t tshi_outer_blocks(int64_t n) {
    return tshi_base_ceil(n, TSHI_DTYPE_BLOCK);
}

/* Returns a tshi_outer_work for a parameter. */
static tshi_outer_work tshi_outer_job(const tsh_outer *outer, const tshi_outer_param *each) {
    tshi_outer_work work = {outer, each, &outer->fragment[each->fragment], 0, 0};
    work.n = tsh_local_numel(each->param);
    work.blocks = tshi_base_ceil(tshi_outer_blocks(work.n), outer->module->ctx->dp.size);
    return work;
}

/* Runs fn on the rank's threads, for `blocks` blocks. */
static void tshi_outer_run(const tshi_outer_work *work, int64_t blocks, tshi_team_fn fn) {
    const tsh_ctx *ctx = work->outer->module->ctx;
    tshi_outer_work copy = *work;
    tshi_team_run(ctx, tshi_kernel_parts(ctx, blocks, TSHI_DTYPE_BLOCK), blocks, 1, fn, &copy);
}

/* Runs on one thread: sets the outer weights of the blocks [from, to) to the parameter's values. */
static void tshi_outer_take_part(void *job, int thread, int64_t from, int64_t to) {
    const tshi_outer_work *work = (const tshi_outer_work *)job;
    const int64_t first = from * TSHI_DTYPE_BLOCK;
    const int64_t end = tshi_base_min(to * TSHI_DTYPE_BLOCK, work->n);
    (void)thread;
    tshi_tensor_exact(work->each->param, first, end - first,
                      (tsh_real *)tshi_tensor_at(work->each->weight) + first);
}

/* Releases the outer weight, momentum and mean change of a parameter. */
static void tshi_outer_drop(tshi_outer_param *each) {
    tsh_tensor_free(each->weight);
    tsh_tensor_free(each->moment);
    tsh_tensor_free(each->change);
    each->weight = each->moment = each->change = NULL;
}

/* Sets a parameter to its outer weight, its value after the last outer step, if it has one. */
static void tshi_outer_restore(const tshi_outer_param *each) {
    if (each->weight && tshi_layout_equal(&each->weight->layout, &each->param->layout,
                                          each->param->dim, &each->param->ctx->deal))
        (void)tshi_tensor_set_exact(each->param, 0, tsh_local_numel(each->param),
                                    (const tsh_real *)tshi_tensor_at(each->weight));
}

/* Before a step: gives each parameter that is trained an outer weight and its momentum, in the
 * layout that the parameter has now. A parameter that was frozen meanwhile gets its outer weight
 * back, so that it is the same on all replicas. */
static tsh_result tshi_outer_begin(tsh_outer *outer) {
    tsh_ctx *ctx = outer->module->ctx;
    if (tsh_materialize(outer->module) != TSH_OK) return ctx->error.code;
    for (int i = 0; i < outer->count && ctx->error.code == TSH_OK; i++) {
        tshi_outer_param *each = &outer->each[i];
        const tsh_tensor form = tshi_ema_form(each->param);
        const int begins = !each->weight;
        if (each->param->absent) continue;
        if (!each->param->requires_grad) {
            tshi_outer_restore(each);
            tshi_outer_drop(each);
        } else if (tshi_optim_moment(&form, &each->weight, TSH_REAL) &&
                   tshi_optim_moment(&form, &each->moment, TSH_REAL) && begins) {
            const tshi_outer_work work = tshi_outer_job(outer, each);
            tshi_outer_run(&work, tshi_outer_blocks(work.n), tshi_outer_take_part);
        }
        if (each->change) (void)tshi_optim_moment(&form, &each->change, TSH_REAL);
    }
    return ctx->error.code;
}

/* -- the exchange --------------------------------------------------------------- */

/* Returns the address of an element of a message; it must be the first element of a block. */
static void *tshi_outer_at(const tsh_outer *outer, const tsh_tensor *message, int64_t element) {
    return (char *)tshi_tensor_at(message) + tshi_dtype_bytes(outer->desc.wire, element);
}

/* Returns where block b of the parameter is in the fragment's message. */
static void *tshi_outer_place(const tshi_outer_work *work, int64_t b) {
    const int64_t k = b / work->blocks; /* the row of the message that has block b */
    return tshi_outer_at(work->outer, work->fragment->out,
                         k * work->fragment->width + work->each->row +
                             (b - k * work->blocks) * TSHI_DTYPE_BLOCK);
}

/* Runs on one thread: writes to the message by how much this replica's steps have changed the
 * parameter: old - new, for the blocks [from, to). old is the outer weight as the parameter got it:
 * rounded to the parameter's dtype if that keeps no exact floats. */
static void tshi_outer_encode_part(void *job, int thread, int64_t from, int64_t to) {
    const tshi_outer_work *work = (const tshi_outer_work *)job;
    const tsh_tensor *t = work->each->param;
    const tshi_dtype *wire = &tshi_dtypes[work->outer->desc.wire];
    tsh_real before[TSHI_DTYPE_BLOCK], x[TSHI_DTYPE_BLOCK];
    (void)thread;
    for (int64_t b = from; b < to; b++) {
        const int64_t e = b * TSHI_DTYPE_BLOCK;
        const int64_t n = tshi_base_min(TSHI_DTYPE_BLOCK, work->n - e);
        memcpy(before, (tsh_real *)tshi_tensor_at(work->each->weight) + e,
               (size_t)n * sizeof *before);
        if (!t->low) tshi_kernel_narrow(before, n, t->dtype);
        if (!t->low) tshi_kernel_widen(before, n, t->dtype);
        tshi_tensor_exact(t, e, n, x);
        for (int64_t i = 0; i < TSHI_DTYPE_BLOCK; i++)
            x[i] = i < n ? (before[i] - x[i]) * TSHI_R(TSHI_OUTER_SCALE) : 0;
        wire->store(tshi_outer_place(work, b), 1, TSHI_DTYPE_BLOCK, x);
    }
}

/* Runs on one thread: replaces the blocks [from, to) of this rank's own row, in the message to
 * send, by the mean of all ranks' rows. */
static void tshi_outer_sum_part(void *job, int thread, int64_t from, int64_t to) {
    const tshi_outer_work *work = (const tshi_outer_work *)job;
    const tshi_outer_fragment *fragment = work->fragment;
    const tsh_comm *dp = &work->outer->module->ctx->dp;
    const tshi_dtype *wire = &tshi_dtypes[work->outer->desc.wire];
    tsh_real sum[TSHI_DTYPE_BLOCK], x[TSHI_DTYPE_BLOCK];
    (void)thread;
    for (int64_t b = from; b < to; b++) {
        const int64_t e = b * TSHI_DTYPE_BLOCK;
        for (int i = 1; i <= dp->size; i++) { /* begins with the next rank, ends with this one */
            const int64_t row = (dp->rank + i) % dp->size * fragment->width;
            wire->load(tshi_outer_at(work->outer, fragment->in, row + e), 1, TSHI_DTYPE_BLOCK, x);
            for (int k = 0; k < TSHI_DTYPE_BLOCK; k++) sum[k] = i > 1 ? sum[k] + x[k] : x[k];
        }
        for (int k = 0; k < TSHI_DTYPE_BLOCK; k++) sum[k] /= TSHI_R(dp->size);
        wire->store(tshi_outer_at(work->outer, fragment->out, dp->rank * fragment->width + e), 1,
                    TSHI_DTYPE_BLOCK, sum);
    }
}

/* Runs on one thread: decodes the means of the parameter's blocks [from, to). */
static void tshi_outer_decode_part(void *job, int thread, int64_t from, int64_t to) {
    const tshi_outer_work *work = (const tshi_outer_work *)job;
    const tshi_dtype *wire = &tshi_dtypes[work->outer->desc.wire];
    tsh_real *change = (tsh_real *)tshi_tensor_at(work->each->change), x[TSHI_DTYPE_BLOCK];
    (void)thread;
    for (int64_t b = from; b < to; b++) {
        const int64_t e = b * TSHI_DTYPE_BLOCK;
        const int64_t n = tshi_base_min(TSHI_DTYPE_BLOCK, work->n - e);
        wire->load(tshi_outer_place(work, b), 1, TSHI_DTYPE_BLOCK, x);
        for (int64_t i = 0; i < n; i++) change[e + i] = x[i] / TSHI_R(TSHI_OUTER_SCALE);
    }
}

/* Names the collectives of this section in error messages. */
static const char tshi_outer_what[] = "tsh_outer_step: changes of parameters over dp";

/* Starts a collective of the fragment over dp: an all-to-all or all-gather of the rows. */
static void tshi_outer_start(tsh_outer *outer, tshi_outer_fragment *fragment, tsh_coll_kind kind) {
    tsh_ctx *ctx = outer->module->ctx;
    tsh_coll coll = tsh_coll_make(kind, tsh_dtype_of(fragment->out));
    const int gathers = kind == TSH_ALLGATHER;
    coll.send = tshi_outer_at(outer, fragment->out, gathers ? ctx->dp.rank * fragment->width : 0);
    coll.recv = tshi_tensor_at(gathers ? fragment->out : fragment->in);
    coll.send_counts = coll.recv_counts = fragment->counts;
    fragment->stage = gathers ? TSHI_OUTER_GATHERS : TSHI_OUTER_SCATTERS;
    (void)tshi_error_comm(ctx, tshi_comm_begin(&ctx->dp, &coll, &fragment->running.req),
                          tshi_outer_what);
}

/* Waits for the collective of a fragment. Returns 1 if there is no error. */
static int tshi_outer_await(tsh_outer *outer, tshi_outer_fragment *fragment) {
    tsh_ctx *ctx = outer->module->ctx;
    const tsh_req req = fragment->running.req;
    fragment->running.req = 0;
    return tshi_error_comm(ctx, tsh_wait(&ctx->dp, req), tshi_outer_what) == TSH_OK;
}

/* Releases the message of a fragment. */
static void tshi_outer_release(tshi_outer_fragment *fragment) {
    tsh_tensor_free(fragment->out);
    tsh_tensor_free(fragment->in);
    fragment->out = fragment->in = NULL;
}

/* Makes one of the two tensors of a fragment's message, of zeros. Blocks of quantised values are
 * sent as 16-bit numbers, which no collective changes. */
static tsh_tensor *tshi_outer_message(const tsh_outer *outer, tshi_outer_fragment *fragment) {
    tsh_ctx *ctx = outer->module->ctx;
    const tsh_dtype wire = outer->desc.wire;
    const tsh_dtype dtype = tshi_dtype_in_blocks(wire) ? TSH_BF16 : wire;
    const size_t bytes = tshi_dtype_bytes(wire, fragment->width);
    const int64_t n = (int64_t)(bytes / tsh_dtype_size(dtype));
    const tsh_shape shape = tsh_shape2(ctx->dp.size, n);
    tsh_tensor *t = tshi_tensor_make(ctx, "tsh_outer_step", TSHI_OWNED, TSH_MEM_OPTIMISER, dtype,
                                     &shape, NULL);
    for (int k = 0; k < ctx->dp.size; k++) fragment->counts[k] = n;
    if (t) tshi_mem_clear(ctx, t->block, bytes * (size_t)ctx->dp.size);
    return t;
}

/* Sends the changes of fragment f: lays out its message and starts the all-to-all. */
static void tshi_outer_send(tsh_outer *outer, int f) {
    tshi_outer_fragment *fragment = &outer->fragment[f];
    fragment->width = 0;
    fragment->sent = outer->info.steps;
    for (int i = 0; i < outer->count; i++) {
        tshi_outer_param *each = &outer->each[i];
        if (each->fragment != f) continue;
        each->sent = each->weight != NULL;
        if (!each->sent) continue;
        each->layout = each->param->layout;
        each->row = fragment->width;
        fragment->width += tshi_outer_job(outer, each).blocks * TSHI_DTYPE_BLOCK;
    }
    fragment->stage = TSHI_OUTER_ARRIVED;
    if (!fragment->width) return; /* no parameter is trained, or this rank has no elements */
    fragment->out = tshi_outer_message(outer, fragment);
    fragment->in = fragment->out ? tshi_outer_message(outer, fragment) : NULL;
    for (int i = 0; i < outer->count && fragment->in; i++) {
        const tshi_outer_work work = tshi_outer_job(outer, &outer->each[i]);
        if (outer->each[i].fragment == f && outer->each[i].sent)
            tshi_outer_run(&work, tshi_outer_blocks(work.n), tshi_outer_encode_part);
    }
    if (fragment->in) tshi_outer_start(outer, fragment, TSH_ALLTOALL);
}

/* Waits for the rows that this rank adds up, and sends their mean to all ranks. */
static void tshi_outer_sum(tsh_outer *outer, tshi_outer_fragment *fragment) {
    const tshi_outer_work work = {outer, NULL, fragment, 0, 0};
    if (!tshi_outer_await(outer, fragment)) return;
    tshi_outer_run(&work, fragment->width / TSHI_DTYPE_BLOCK, tshi_outer_sum_part);
    tsh_tensor_free(fragment->in);
    fragment->in = NULL;
    tshi_outer_start(outer, fragment, TSH_ALLGATHER);
}

/* Returns 1 if the parameter still has the layout that it had when its changes were sent; else 0
 * and an error. */
static int tshi_outer_same_layout(const tshi_outer_param *each) {
    const tsh_tensor *t = each->param;
    if (tshi_layout_equal(&each->layout, &t->layout, t->dim, &t->ctx->deal)) return 1;
    return tshi_error_zero(t->ctx, TSH_ERR_STATE,
                           "tsh_outer_step: \"%s\" got another layout while its changes were on "
                           "their way; call tsh_parallelize before the first step",
                           t->path);
}

/* Waits for the mean changes of fragment f and stores them in its parameters' .change. */
static void tshi_outer_collect(tsh_outer *outer, int f) {
    tsh_ctx *ctx = outer->module->ctx;
    tshi_outer_fragment *fragment = &outer->fragment[f];
    if (!tshi_outer_await(outer, fragment)) return;
    for (int i = 0; i < outer->count && ctx->error.code == TSH_OK; i++) {
        tshi_outer_param *each = &outer->each[i];
        const tshi_outer_work work = tshi_outer_job(outer, each);
        const tsh_tensor form = tshi_ema_form(each->param);
        if (each->fragment != f || !each->sent) continue;
        each->sent = 0;
        if (each->weight && tshi_outer_same_layout(each) &&
            tshi_optim_moment(&form, &each->change, TSH_REAL))
            tshi_outer_run(&work, tshi_outer_blocks(work.n), tshi_outer_decode_part);
    }
    tshi_outer_release(fragment);
    fragment->stage = TSHI_OUTER_ARRIVED;
}

/* Runs on one thread: the outer step of the blocks [from, to), that of torch.optim.SGD with
 * Nesterov momentum whose gradient is the mean change: m = momentum m + change, weight -= lr
 * (change + momentum m). Then the parameter becomes mix parameter + (1 - mix) weight. */
static void tshi_outer_apply_part(void *job, int thread, int64_t from, int64_t to) {
    const tshi_outer_work *work = (const tshi_outer_work *)job;
    const tsh_outer_desc *d = &work->outer->desc;
    const tsh_real lr = TSHI_R(d->lr), momentum = TSHI_R(d->momentum);
    const tsh_real mix = TSHI_R(d->mix), rest = TSHI_R(1 - d->mix);
    tsh_real x[TSHI_DTYPE_BLOCK];
    (void)thread;
    for (int64_t b = from; b < to; b++) {
        const int64_t e = b * TSHI_DTYPE_BLOCK;
        const int64_t n = tshi_base_min(TSHI_DTYPE_BLOCK, work->n - e);
        tsh_real *weight = (tsh_real *)tshi_tensor_at(work->each->weight) + e;
        tsh_real *m = (tsh_real *)tshi_tensor_at(work->each->moment) + e;
        const tsh_real *change = (const tsh_real *)tshi_tensor_at(work->each->change) + e;
        for (int64_t i = 0; i < n; i++) m[i] = momentum * m[i] + change[i];
        for (int64_t i = 0; i < n; i++) weight[i] -= lr * (change[i] + momentum * m[i]);
        if (d->mix > 0) tshi_tensor_exact(work->each->param, e, n, x);
        for (int64_t i = 0; i < n; i++)
            x[i] = d->mix > 0 ? TSHI_R(mix * x[i] + rest * weight[i]) : weight[i];
        (void)tshi_tensor_set_exact(work->each->param, e, n, x);
    }
}

/* Takes the outer step of fragment f with the means that have arrived. */
static void tshi_outer_apply(tsh_outer *outer, int f) {
    for (int i = 0; i < outer->count; i++) {
        tshi_outer_param *each = &outer->each[i];
        const tshi_outer_work work = tshi_outer_job(outer, each);
        if (each->fragment != f || !each->change) continue;
        if (!tshi_tensor_keep_exact(each->param)) return; /* there is no memory */
        tshi_outer_run(&work, tshi_outer_blocks(work.n), tshi_outer_apply_part);
        tsh_tensor_free(each->change);
        each->change = NULL;
    }
    outer->fragment[f].stage = TSHI_OUTER_IDLE;
    outer->info.exchanges++;
}

/* Returns how many times a fragment has been sent after `steps` steps: once every every / fragments
 * steps, rounded down. */
static int64_t tshi_outer_sent(const tsh_outer *outer, int64_t steps) {
    const int64_t rounds = steps / outer->desc.every, rest = steps % outer->desc.every;
    return rounds * outer->desc.fragments + rest * outer->desc.fragments / outer->desc.every;
}

/* Returns the fragment that is sent after step `step`; -1: none. */
static int tshi_outer_due(const tsh_outer *outer, int64_t step) {
    const int64_t sent = tshi_outer_sent(outer, step);
    return sent > tshi_outer_sent(outer, step - 1) ? (int)((sent - 1) % outer->desc.fragments) : -1;
}

/* Takes the steps of fragment f's exchange that are due now. When they are depends on step numbers
 * alone (the all-gather: half of .delay after the all-to-all), not on whether this rank's requests
 * are complete, so all ranks start the collectives of all fragments in the same order. */
static void tshi_outer_advance(tsh_outer *outer, int f) {
    tshi_outer_fragment *fragment = &outer->fragment[f];
    const int64_t age = outer->info.steps - fragment->sent, delay = outer->desc.delay;
    const tsh_ctx *ctx = outer->module->ctx;
    if (fragment->stage == TSHI_OUTER_SCATTERS && age >= (delay + 1) / 2)
        tshi_outer_sum(outer, fragment);
    if (age < delay || ctx->error.code != TSH_OK) return;
    if (fragment->stage == TSHI_OUTER_GATHERS) tshi_outer_collect(outer, f);
    if (fragment->stage == TSHI_OUTER_ARRIVED && ctx->error.code == TSH_OK)
        tshi_outer_apply(outer, f);
}

/* Returns 1 if outer's optimiser still exists, 0 if it was freed. */
static int tshi_outer_has_optim(const tsh_outer *outer) {
    const tsh_optim *optim = outer->module->ctx->optims;
    while (optim && optim != outer->optim) optim = optim->older;
    return optim != NULL;
}

TSH_API tsh_result tsh_outer_step(tsh_outer *outer) {
    tsh_ctx *ctx = outer ? outer->module->ctx : NULL;
    int due;
    if (!ctx) return TSH_ERR_ARGUMENT;
    if (ctx->error.code == TSH_OK && !tshi_outer_has_optim(outer))
        (void)tsh_fail(ctx, TSH_ERR_STATE,
                       "tsh_outer_step: the optimiser was freed; call tsh_outer_free, too, and "
                       "make both anew");
    if (ctx->error.code != TSH_OK || tshi_outer_begin(outer) != TSH_OK ||
        tsh_optim_step(outer->optim) != TSH_OK)
        return ctx->error.code;
    due = tshi_outer_due(outer, ++outer->info.steps);
    if (due >= 0) tshi_outer_send(outer, due);
    for (int f = 0; f < outer->desc.fragments && ctx->error.code == TSH_OK; f++)
        tshi_outer_advance(outer, f);
    tshi_error_report(ctx); /* other ranks, waiting for this rank's message, learn of its error */
    return ctx->error.code;
}

TSH_API tsh_outer_info tsh_outer_state(const tsh_outer *outer) {
    static const tsh_outer_info none = {0, 0};
    return outer ? outer->info : none;
}

/* -- files; the end --------------------------------------------------------------- */

/* Collective over dp, before a save: waits for all exchanges under way, and gives every trained
 * parameter the moments of its optimiser, which a replica that has skipped its steps may lack. */
static tsh_result tshi_outer_settle(tsh_outer *outer) {
    tsh_ctx *ctx = outer->module->ctx;
    tsh_optim *optim = outer->optim;
    for (int f = 0; f < outer->desc.fragments && ctx->error.code == TSH_OK; f++) {
        tshi_outer_fragment *fragment = &outer->fragment[f];
        if (fragment->stage == TSHI_OUTER_SCATTERS) tshi_outer_sum(outer, fragment);
        if (fragment->stage == TSHI_OUTER_GATHERS && ctx->error.code == TSH_OK)
            tshi_outer_collect(outer, f);
    }
    tshi_error_report(ctx); /* other ranks, waiting for this rank's message, learn of its error */
    for (int i = 0; i < optim->count && outer->info.steps && ctx->error.code == TSH_OK; i++) {
        tshi_moments *each = &optim->each[i];
        tsh_tensor form;
        if (!outer->each[i].weight) continue;
        for (int k = 0; k < tshi_optim_moments(each->desc, each->param); k++)
            (void)tshi_optim_moment(tshi_optim_form(each->desc, each->param, k, &form),
                                    &each->moment[k], tshi_optim_moments_dtype(each->desc));
    }
    return ctx->error.code;
}

/* Resets outer to its state after tsh_outer_new: waits for the collectives under way, ignores their
 * results, and releases messages, outer weights and momenta. */
static void tshi_outer_reset(tsh_outer *outer) {
    tsh_ctx *ctx = outer->module->ctx;
    for (int f = 0; f < outer->desc.fragments; f++) {
        tshi_outer_fragment *fragment = &outer->fragment[f];
        (void)tsh_wait(&ctx->dp, fragment->running.req);
        fragment->running.req = 0;
        fragment->stage = TSHI_OUTER_IDLE;
        tshi_outer_release(fragment);
    }
    for (int i = 0; i < outer->count; i++) {
        tshi_outer_drop(&outer->each[i]);
        outer->each[i].sent = 0;
    }
    outer->info.steps = outer->info.exchanges = 0;
}

/* After a load: finds out the changes of which fragments were under way when the file was saved. */
static void tshi_outer_resume(tsh_outer *outer) {
    tshi_outer_describe(outer);
    for (int64_t step = outer->info.steps; step > 0; step--) {
        const int f = tshi_outer_due(outer, step);
        if (outer->info.steps - step >= outer->desc.delay) break;
        if (f < 0) continue;
        outer->fragment[f].sent = step;
        outer->fragment[f].stage = TSHI_OUTER_ARRIVED;
    }
}

TSH_API TSHI_COLD void tsh_outer_free(tsh_outer *outer) {
    tsh_ctx *ctx = outer ? outer->module->ctx : NULL;
    tsh_outer **at = ctx ? &ctx->outers : NULL;
    while (at && *at && *at != outer) at = &(*at)->older;
    if (!at || !*at) return; /* outer is NULL, or was freed before */
    *at = outer->older;
    for (int i = 0; i < outer->count; i++)
        if (!outer->each[i].param->absent) tshi_outer_restore(&outer->each[i]);
    tshi_outer_reset(outer);
    outer->optim->outer = NULL;
}
