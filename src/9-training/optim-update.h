/* ========================================================================== */
/* >>optim-update                              MARK: - optim-update (private) */
/* The update of one parameter, whole or a chunk of it.                       */
/* Needs: >>module-tree >>optim-norm.                                         */
/* ========================================================================== */

/* Operands of an update's kernel: the parameter, its gradient, its two moments, and the lower
 * halves of its exact weights (see >>tensor-exact). */
enum { TSHI_OPTIM_X, TSHI_OPTIM_GRAD, TSHI_OPTIM_FIRST, TSHI_OPTIM_SECOND, TSHI_OPTIM_LOW,
       TSHI_OPTIM_OPERANDS };

/* The parameters of an update's kernel. */
typedef struct tshi_update {
    double clip, decay; /* SGD and Adam: the gradient is g = clip grad + decay x */
    double lr, momentum;                   /* SGD */
    int nesterov;                          /* SGD: 1: Nesterov momentum */
    double keep, b1, b2, step, root, eps;  /* Adam: see tshi_optim_adam_body */
    /* random 1: the moments are bf16 and rounded at random; rounds 1: so is the parameter */
    int random, rounds;
    tshi_noise noise; /* keys the random rounding of the moments */
    uint64_t stream;  /* replaces noise.stream for the rounding of the parameter */
} tshi_update;

/* Loads a block of the parameter: its exact float weights if the optimiser keeps them. */
TSHI_INLINE const tsh_real *tshi_optim_load_x(const tshi_operand *operand, int64_t e, int64_t n,
                                              tsh_real *pad) {
    const uint16_t *x = (const uint16_t *)operand[TSHI_OPTIM_X].data + e;
    const uint16_t *low = (const uint16_t *)operand[TSHI_OPTIM_LOW].data + e;
    if (!operand[TSHI_OPTIM_LOW].data) return tshi_kernel_load(&operand[TSHI_OPTIM_X], e, n, pad);
    if (n - e >= TSHI_BLOCK)
        TSHI_LANES for (int i = 0; i < TSHI_BLOCK; i++) pad[i] = tshi_tensor_join(x[i], low[i]);
    else
        for (int i = 0; i < TSHI_BLOCK; i++)
            pad[i] = e + i < n ? tshi_tensor_join(x[i], low[i]) : pad[0];
    return pad;
}

/* Stores a block of the parameter: rounded at random (p->rounds), in its dtype, or, if exact
 * weights are kept, split into bf16 values and their lower halves. */
TSHI_INLINE void tshi_optim_store_x(const tshi_operand *operand, int64_t e, int64_t n,
                                    const tsh_real *block, const tshi_update *p,
                                    tshi_words *drawn) {
    const tshi_noise noise = {p->noise.key, p->stream, p->noise.element};
    uint16_t *x = (uint16_t *)operand[TSHI_OPTIM_X].data + e;
    uint16_t *low = (uint16_t *)operand[TSHI_OPTIM_LOW].data + e;
    if (p->rounds)
        tshi_kernel_store_random(&operand[TSHI_OPTIM_X], e, n, block,
                                 tshi_kernel_words(&noise, e, drawn), 0);
    else if (!operand[TSHI_OPTIM_LOW].data)
        tshi_kernel_store(&operand[TSHI_OPTIM_X], e, n, block, 0);
    else if (n - e >= TSHI_BLOCK)
        TSHI_LANES for (int i = 0; i < TSHI_BLOCK; i++) tshi_tensor_split(block[i], &x[i], &low[i]);
    else
        for (int i = 0; i < n - e; i++) tshi_tensor_split(block[i], &x[i], &low[i]);
}

/* Stores a block of both moments, or of the first one if `second` is NULL. One random word per
 * element is enough for both. */
TSHI_INLINE void tshi_optim_store_moments(const tshi_operand *operand, int64_t e, int64_t n,
                                          const tsh_real *first, const tsh_real *second,
                                          const tshi_update *p, tshi_words *drawn) {
    const uint32_t *word;
    if (!p->random) {
        tshi_kernel_store(&operand[TSHI_OPTIM_FIRST], e, n, first, 0);
        if (second) tshi_kernel_store(&operand[TSHI_OPTIM_SECOND], e, n, second, 0);
        return;
    }
    word = tshi_kernel_words(&p->noise, e, drawn);
    tshi_kernel_store_random(&operand[TSHI_OPTIM_FIRST], e, n, first, word, 0);
    if (second) tshi_kernel_store_random(&operand[TSHI_OPTIM_SECOND], e, n, second, word, 16);
}

/* Adam (Kingma & Ba 2015), AdamW (Loshchilov & Hutter 2019): g = clip grad + decay x, m = b1 m +
 * (1 - b1) g, v = b2 v + (1 - b2) g^2, x = x keep - step m / (sqrt(v) root + eps). */
TSHI_INLINE void tshi_optim_adam_body(int64_t n, const tshi_operand *operand,
                                      const tshi_update *p) {
    const tsh_real clip = TSHI_R(p->clip), decay = TSHI_R(p->decay), keep = TSHI_R(p->keep);
    const tsh_real b1 = TSHI_R(p->b1), b2 = TSHI_R(p->b2), c1 = TSHI_R(1 - p->b1),
                   c2 = TSHI_R(1 - p->b2);
    const tsh_real step = TSHI_R(p->step), root = TSHI_R(p->root), eps = TSHI_R(p->eps);
    tsh_real pad[4][TSHI_BLOCK], x[TSHI_BLOCK], m[TSHI_BLOCK], v[TSHI_BLOCK];
    const tsh_real *xs, *gs, *ms, *vs; /* blocks of x, gradient, m, v */
    tshi_words drawn[2];
    drawn[0].first = drawn[1].first = -1;
    for (int64_t e = 0; e < n; e += TSHI_BLOCK) { /* loads pad the last block */
        xs = tshi_optim_load_x(operand, e, n, pad[0]);
        gs = tshi_optim_load(&operand[TSHI_OPTIM_GRAD], e, n, pad[1]);
        ms = tshi_optim_load(&operand[TSHI_OPTIM_FIRST], e, n, pad[2]);
        vs = tshi_optim_load(&operand[TSHI_OPTIM_SECOND], e, n, pad[3]);
        TSHI_LANES for (int i = 0; i < TSHI_BLOCK; i++) {
            const tsh_real g = gs[i] * clip + decay * xs[i]; /* decay: 0 for AdamW */
            m[i] = b1 * ms[i] + c1 * g;
            v[i] = b2 * vs[i] + c2 * g * g;
            x[i] = xs[i] * keep - step * m[i] / (tshi_math_sqrt(v[i]) * root + eps);
        }
        tshi_optim_store_x(operand, e, n, x, p, &drawn[1]);
        tshi_optim_store_moments(operand, e, n, m, v, p, &drawn[0]);
    }
}
TSHI_KERNEL(tshi_optim_adam, tshi_update);

/* torch.optim.SGD: d = clip grad + decay x, m = momentum m + d, x -= lr (nesterov ? d + momentum m
 * : m); without momentum, whose operand is NULL, x -= lr d. */
TSHI_INLINE void tshi_optim_sgd_body(int64_t n, const tshi_operand *operand,
                                     const tshi_update *p) {
    const tsh_real clip = TSHI_R(p->clip), decay = TSHI_R(p->decay), lr = TSHI_R(p->lr),
                   momentum = TSHI_R(p->momentum);
    const int remembers = operand[TSHI_OPTIM_FIRST].data != NULL; /* 1: with momentum */
    tsh_real pad[3][TSHI_BLOCK], x[TSHI_BLOCK], m[TSHI_BLOCK];
    const tsh_real *xs, *gs, *ms; /* blocks of x, gradient, m */
    tshi_words drawn[2];
    drawn[0].first = drawn[1].first = -1;
    for (int64_t e = 0; e < n; e += TSHI_BLOCK) {
        xs = tshi_optim_load_x(operand, e, n, pad[0]);
        gs = tshi_optim_load(&operand[TSHI_OPTIM_GRAD], e, n, pad[1]);
        if (!remembers) {
            TSHI_LANES for (int i = 0; i < TSHI_BLOCK; i++)
                x[i] = xs[i] - lr * (gs[i] * clip + decay * xs[i]);
        } else {
            ms = tshi_optim_load(&operand[TSHI_OPTIM_FIRST], e, n, pad[2]);
            TSHI_LANES for (int i = 0; i < TSHI_BLOCK; i++) {
                const tsh_real d = gs[i] * clip + decay * xs[i], v = momentum * ms[i] + d;
                m[i] = v;
                x[i] = xs[i] - lr * (p->nesterov ? TSHI_R(d + momentum * v) : v);
            }
            tshi_optim_store_moments(operand, e, n, m, NULL, p, &drawn[0]);
        }
        tshi_optim_store_x(operand, e, n, x, p, &drawn[1]);
    }
}
TSHI_KERNEL(tshi_optim_sgd, tshi_update);

/* Returns the local index of the first element of x that this rank updates: 0 or, with .zero, the
 * start of its chunk. */
static int64_t tshi_optim_first(const tsh_tensor *x) {
    return x->flags & TSHI_CHUNKED ? tshi_bucket_chunk(x, x->ctx->dp.rank) : 0;
}

/* Returns how many elements of x this rank updates: all of its shard or, with .zero, its chunk. */
static int64_t tshi_optim_count(const tsh_tensor *x) {
    return x->flags & TSHI_CHUNKED ? tshi_bucket_chunk_size(x, x->ctx->dp.rank)
                                   : tsh_local_numel(x);
}

/* Gathers all chunks of a moment over dp into `values`, which has as many elements as this rank's
 * shard of the parameter. what: names the collective in errors. */
static tsh_result tshi_optim_gather(const tsh_tensor *moment, void *values, const char *what) {
    tsh_ctx *ctx = moment->ctx;
    const size_t width = tsh_dtype_size(moment->dtype);
    tshi_block *block = tshi_mem_alloc(ctx, TSH_MEM_STEP, (size_t)ctx->dp.size * sizeof(int64_t));
    char *own = (char *)values + (size_t)tshi_optim_first(moment) * width; /* this rank's chunk */
    tsh_result result;
    int64_t *counts; /* shape (dp.size): number of elements per chunk */
    if (!block) return ctx->error.code;
    counts = (int64_t *)tshi_mem_data(block);
    for (int k = 0; k < ctx->dp.size; k++) counts[k] = tshi_bucket_chunk_size(moment, k);
    memcpy(own, tshi_mem_data(moment->block), (size_t)counts[ctx->dp.rank] * width);
    result = tshi_error_comm(ctx, tsh_allgather(&ctx->dp, own, values, counts, 1, moment->dtype),
                             what);
    tshi_mem_release(ctx, block);
    return result;
}

/* Replaces a moment's block by an uninitialised one of n elements. Returns 0 and an error if there
 * is no memory. */
static int tshi_optim_allocate(tsh_tensor *moment, int64_t n) {
    tshi_block *block = tshi_mem_alloc(moment->ctx, TSH_MEM_OPTIMISER,
                                       tshi_dtype_bytes(moment->dtype, n));
    if (!block) return 0;
    tshi_mem_release(moment->ctx, moment->block);
    moment->block = block;
    return 1;
}

/* Cuts a moment that holds all values down to this rank's chunk. */
static void tshi_optim_keep_chunk(tsh_tensor *moment) {
    tshi_block *whole = moment->block; /* referenced until the chunk is copied */
    const int64_t n = tshi_optim_count(moment);
    whole->refs++;
    if (tshi_optim_allocate(moment, n))
        memcpy(tshi_mem_data(moment->block),
               (char *)tshi_mem_data(whole) +
                   tshi_dtype_bytes(moment->dtype, tshi_optim_first(moment)),
               tshi_dtype_bytes(moment->dtype, n));
    tshi_mem_release(moment->ctx, whole);
}

/* Gives a moment its parameter's new layout. A chunked moment is gathered over dp first and cut
 * down to this rank's chunk afterwards. */
static void tshi_optim_relayout(tsh_tensor *moment, const tsh_layout *layout) {
    tsh_ctx *ctx = moment->ctx;
    tsh_tensor part = *moment; /* the moment with its old block */
    if (!(moment->flags & TSHI_CHUNKED) ||
        tshi_layout_equal(&moment->layout, layout, moment->dim, ctx->tp.size)) {
        tshi_module_relayout(moment, layout);
        return;
    }
    part.block->refs++;
    if (tshi_optim_allocate(moment, tsh_local_numel(moment))) {
        if (tshi_optim_gather(&part, tshi_mem_data(moment->block),
                              "tsh_optim_step: moments of a new layout") == TSH_OK)
            tshi_module_relayout(moment, layout);
        tshi_optim_keep_chunk(moment);
    }
    tshi_mem_release(ctx, part.block);
}

/* Returns *moment, with the layout that param has now. If *moment is NULL, creates it, with zeros
 * of this dtype. Returns NULL after an error. */
static tsh_tensor *tshi_optim_moment(tsh_tensor *param, tsh_tensor **moment, tsh_dtype dtype) {
    tsh_ctx *ctx = param->ctx;
    const tsh_shape shape = tsh_shape_of(param);
    tsh_tensor *m = *moment; /* NULL: not created yet */
    if (m) {
        tshi_optim_relayout(m, &param->layout);
        return ctx->error.code == TSH_OK ? m : NULL;
    }
    m = tshi_tensor_handle(ctx, TSHI_OWNED | (param->flags & TSHI_CHUNKED));
    if (!m) return NULL;
    m->dtype = dtype;
    m->path = param->path;
    if (tshi_tensor_set_shape(m, "tsh_optim_step", &shape, &param->layout) != TSH_OK ||
        !tshi_optim_allocate(m, tshi_optim_count(m))) {
        tshi_tensor_release(m);
        return NULL;
    }
    memset(tshi_mem_data(m->block), 0, tshi_dtype_bytes(m->dtype, tshi_optim_count(m)));
    *moment = m;
    return m;
}

/* An update of one parameter, divided between threads: by elements or, if the gradient is
 * row-sparse, by rows. */
typedef struct tshi_optim_work {
    const tsh_tensor *t;   /* the parameter */
    tshi_kernel_fn kernel; /* tshi_optim_adam or tshi_optim_sgd */
    const tshi_operand *x; /* the operands, TSHI_OPTIM_OPERANDS entries */
    tshi_update params;
    /* one per local row: not 0 if the gradient has values in the row; NULL: dense */
    const int32_t *marks;
    int64_t width;        /* elements per row; 1 if dense */
} tshi_optim_work;

/* Updates n of the elements that this rank updates, from the at-th of them on. If values are
 * rounded at random, calls the kernel once per run of adjacent global indices, which key the random
 * numbers. */
static void tshi_optim_update_run(const tshi_optim_work *work, int64_t at, int64_t n) {
    const int64_t first = tshi_optim_first(work->t); /* local index of this rank's first element */
    tshi_runs run = tshi_tensor_own_runs(work->t);
    tshi_operand part[TSHI_OPTIM_OPERANDS]; /* the operands, from the run's first element on */
    tshi_update params = work->params;
    const int draws = params.random || params.rounds;
    run.local = first + at;
    run.length = n;
    while (!draws || tshi_tensor_next_run_in(&run, first + at, first + at + n)) {
        memcpy(part, work->x, sizeof part);
        for (int i = 0; i < TSHI_OPTIM_OPERANDS; i++) tshi_kernel_move(&part[i], run.local - first);
        params.noise.element = run.global;
        work->kernel(run.length, part, &params);
        if (!draws) break; /* all n elements were one run */
    }
}

/* Runs on one thread: updates the rows [from, to); if the gradient is row-sparse, only the marked
 * rows, adjacent ones together. */
static void tshi_optim_update_part(void *job, int thread, int64_t from, int64_t to) {
    const tshi_optim_work *work = (const tshi_optim_work *)job;
    const int32_t *marks = work->marks;
    int64_t n; /* number of rows updated together */
    (void)thread;
    for (int64_t r = from; r < to; r += n) {
        n = marks ? 1 : to - from;
        if (marks && !marks[r]) continue; /* the gradient of this row is 0 */
        while (marks && r + n < to && marks[r + n]) n++;
        tshi_optim_update_run(work, r * work->width, n * work->width);
    }
}

/* Runs an update's kernel on all threads, over the elements of t that this rank updates. */
static void tshi_optim_run(const tsh_tensor *t, tshi_kernel_fn kernel, const tshi_operand *x,
                           const tshi_update *params) {
    const int32_t *marks = t->sparse ? (const int32_t *)tshi_mem_data(t->marks) : NULL;
    const int64_t count = tshi_optim_count(t), rows = marks ? t->local[0] : count;
    tshi_optim_work work = {t, kernel, x, *params, marks, 1};
    if (!count) return; /* this rank has no element to update */
    work.width = count / rows;
    tshi_team_run(tshi_kernel_parts(t->ctx, rows, work.width), rows, marks ? 1 : 16,
                  tshi_optim_update_part, &work);
}

/* Fills in x, the operands of a parameter. Those of its moments get the dtype `moments` and no
 * data. Returns 0 if there is no memory. */
static int tshi_optim_operands(tsh_tensor *t, tsh_dtype moments, tshi_operand *x) {
    if (!tshi_tensor_keep_exact(t)) return 0;
    x[TSHI_OPTIM_X] = tshi_kernel_operand(tshi_tensor_at(t), 1, t->dtype);
    x[TSHI_OPTIM_GRAD] = tshi_tape_operand(t);
    x[TSHI_OPTIM_FIRST] = x[TSHI_OPTIM_SECOND] = tshi_kernel_operand(NULL, 1, moments);
    x[TSHI_OPTIM_LOW] = tshi_kernel_operand(t->low ? tshi_mem_data(t->low) : NULL, 1, TSH_BF16);
    tshi_kernel_move(&x[TSHI_OPTIM_X], tshi_optim_first(t));
    tshi_kernel_move(&x[TSHI_OPTIM_GRAD], tshi_optim_first(t));
    tshi_kernel_move(&x[TSHI_OPTIM_LOW], tshi_optim_first(t));
    return 1;
}

/* Updates one parameter and its moments, which the first update creates. clip: what the gradient is
 * multiplied by. */
static void tshi_optim_update(const tsh_optim *optim, tshi_moments *each, double clip) {
    const tsh_optim_desc *d = &optim->desc;
    tsh_tensor *t = each->param;
    /* lr and decay of this parameter */
    const double lr = d->lr * each->lr_scale, decay = each->weight_decay;
    tshi_operand x[TSHI_OPTIM_OPERANDS];
    tshi_update p;
    if (!tshi_optim_operands(t, d->moments_dtype, x)) return;
    memset(&p, 0, sizeof p);
    p.clip = clip;
    p.decay = decay;
    each->steps++; /* the bias corrections below read it */
    p.random = d->moments_dtype == TSH_BF16;
    p.noise.key = t->ctx->seed;
    p.rounds = t->dtype == TSH_BF16 && !t->low;
    p.noise.stream = tshi_rng_hash(tshi_rng_hash((uint64_t)each->steps, "moments", 7), t->path,
                                   strlen(t->path));
    p.stream = tshi_rng_hash(p.noise.stream, "weights", 7);
    if (d->kind != TSH_SGD || d->momentum > 0) { /* the update has a first moment */
        if (!tshi_optim_moment(t, &each->first, d->moments_dtype)) return;
        x[TSHI_OPTIM_FIRST].data = tshi_tensor_at(each->first);
    }
    if (d->kind == TSH_SGD) {
        p.lr = lr;
        p.momentum = d->momentum;
        p.nesterov = d->nesterov;
        tshi_optim_run(t, tshi_optim_sgd[t->ctx->isa], x, &p);
        return;
    }
    if (!tshi_optim_moment(t, &each->second, d->moments_dtype)) return;
    x[TSHI_OPTIM_SECOND].data = tshi_tensor_at(each->second);
    if (d->kind == TSH_ADAMW) p.decay = 0; /* AdamW decays x itself, not through the gradient */
    p.keep = d->kind == TSH_ADAMW ? 1 - lr * decay : 1;
    p.b1 = d->beta1;
    p.b2 = d->beta2;
    p.eps = d->eps;
    p.step = lr / (1 - pow(d->beta1, (double)each->steps)); /* bias corrections */
    p.root = 1 / sqrt(1 - pow(d->beta2, (double)each->steps));
    /* as torch.optim.SparseAdam, which adds eps to sqrt(v) without bias correction */
    if (t->sparse) {
        p.step /= p.root;
        p.root = 1;
    }
    tshi_optim_run(t, tshi_optim_adam[t->ctx->isa], x, &p);
}
