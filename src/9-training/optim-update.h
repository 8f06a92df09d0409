/* ========================================================================== */
/* >>optim-update                              MARK: - optim-update (private) */
/* Kernels of Adam and SGD; moments; an update of the elements of one rank.   */
/* Needs: >>module-tree >>optim-norm.                                         */
/* ========================================================================== */

/* Operands of an update's kernel: the parameter, its gradient, its moments (TSHI_OPTIM_FIRST + 2 is
 * the third), and the lower halves of its exact weights (see >>tensor-exact). */
enum { TSHI_OPTIM_X, TSHI_OPTIM_GRAD, TSHI_OPTIM_FIRST, TSHI_OPTIM_SECOND,
       TSHI_OPTIM_LOW = TSHI_OPTIM_FIRST + TSH_MAX_MOMENTS, TSHI_OPTIM_OPERANDS };

/* The options of a kernel that updates a parameter x. */
typedef struct tshi_update {
    /* SGD and Adam take clip * gradient + decay * x as the gradient */
    double clip, decay;
    double lr, momentum; /* SGD: learning rate; factor of the old momentum */
    int nesterov;        /* SGD: 1: Nesterov momentum */
    /* Adam: x = keep x - step m / (root sqrt(v) + eps); b1, b2: decay rates of the moments m, v */
    double keep, b1, b2, step, root, eps;
    /* random 1: the moments are stored in bf16 with stochastic rounding; rounds 1: the parameter is
     * stored in bf16 with stochastic rounding, and no exact weights are kept */
    int random, rounds;
    tshi_noise noise; /* key of the random numbers that round the moments */
    uint64_t stream;  /* replaces noise.stream in the key when the parameter is rounded */
    /* for tshi_optim_chunk alone: the function that updates elements, and its second argument */
    void (*update)(const tsh_update *update, void *user);
    void *user;
    const tsh_update *given; /* what update gets besides the arrays */
} tshi_update;

/* Returns the TSHI_BLOCK elements of the parameter from element e on as tsh_real: exact float
 * weights if the optimiser keeps them. n: number of elements; pad: memory for converted
 * elements. */
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

/* Stores a block of new values of the parameter, from element e on: rounded at random (p->rounds),
 * or in its dtype or, if exact weights are kept, split into bf16 values and their lower halves. */
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

/* Stores a block of new values of both moments, or of the first one if `second` is NULL, from
 * element e on. If they are rounded at random, the two halves of one random word serve both. */
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

/* Adam (Kingma & Ba 2015), AdamW (Loshchilov & Hutter 2019): g = clip grad + decay x,
 * m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2, x = x keep - step m / (sqrt(v) root + eps).
 * x: the parameter; m, v: its moments; other names: fields of p. */
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
    for (int64_t e = 0; e < n; e += TSHI_BLOCK) { /* loading pads the last block */
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

/* torch.optim.SGD: d = clip grad + decay x, m = momentum m + d,
 * x -= lr (nesterov ? d + momentum m : m); without momentum, x -= lr d, and the operand m is NULL.
 * x: the parameter; m: its moment; other names: fields of p. */
TSHI_INLINE void tshi_optim_sgd_body(int64_t n, const tshi_operand *operand, const tshi_update *p) {
    const tsh_real clip = TSHI_R(p->clip), decay = TSHI_R(p->decay), lr = TSHI_R(p->lr),
                   momentum = TSHI_R(p->momentum);
    const int remembers = operand[TSHI_OPTIM_FIRST].data != NULL; /* 1: SGD with momentum */
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

/* Collective over dp: gathers the chunks of t, a parameter or a moment, in `values`, which has as
 * many elements as this rank's shard of t, and in which this rank's chunk is in its place already.
 * what: names the collective in errors. */
static tsh_result tshi_optim_gather_chunks(const tsh_tensor *t, void *values, tsh_dtype dtype,
                                           const char *what) {
    tsh_ctx *ctx = t->ctx;
    tshi_block *block = tshi_mem_alloc(ctx, TSH_MEM_STEP, (size_t)ctx->dp.size * sizeof(int64_t));
    char *own = (char *)values + tshi_dtype_bytes(dtype, tshi_optim_first(t));
    tsh_result result;
    int64_t *counts; /* shape (dp.size): number of elements per chunk */
    if (!block) return ctx->error.code;
    counts = (int64_t *)tshi_mem_data(block);
    for (int k = 0; k < ctx->dp.size; k++) counts[k] = tshi_bucket_chunk_size(t, k);
    result = tshi_error_comm(ctx, tsh_allgather(&ctx->dp, own, values, counts, 1, dtype), what);
    tshi_mem_release(ctx, block);
    return result;
}

/* Collective over dp: gathers all chunks of a moment in `values`, which has as many elements as
 * this rank's shard of the parameter. what: names the collective in errors. */
static tsh_result tshi_optim_gather(const tsh_tensor *moment, void *values, const char *what) {
    memcpy((char *)values + tshi_dtype_bytes(moment->dtype, tshi_optim_first(moment)),
           tshi_mem_data(moment->block),
           tshi_dtype_bytes(moment->dtype, tshi_optim_count(moment)));
    return tshi_optim_gather_chunks(moment, values, moment->dtype, what);
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

/* Replaces the values of a moment, which are those of this rank's whole shard, by this rank's chunk
 * of them. */
static void tshi_optim_keep_chunk(tsh_tensor *moment) {
    tshi_block *whole = moment->block; /* the old values, kept until the chunk is copied */
    const int64_t n = tshi_optim_count(moment);
    whole->refs++;
    if (tshi_optim_allocate(moment, n))
        memcpy(tshi_mem_data(moment->block),
               (char *)tshi_mem_data(whole) +
                   tshi_dtype_bytes(moment->dtype, tshi_optim_first(moment)),
               tshi_dtype_bytes(moment->dtype, n));
    tshi_mem_release(moment->ctx, whole);
}

/* Gives a moment its parameter's new layout. A chunked moment (.zero) is gathered over dp first and
 * cut down to this rank's chunk afterwards. */
static void tshi_optim_relayout(tsh_tensor *moment, const tsh_layout *layout) {
    tsh_ctx *ctx = moment->ctx;
    tsh_tensor part = *moment; /* a copy of the handle, which keeps the old values */
    if (!(moment->flags & TSHI_CHUNKED) ||
        tshi_layout_equal(&moment->layout, layout, moment->dim, &ctx->deal)) {
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

/* Returns *moment, with the layout that `form` has now. If *moment is NULL, creates it, with zeros
 * of this dtype and form's shape. form: the parameter, or what tshi_optim_form returns. Returns
 * NULL after an error. */
static tsh_tensor *tshi_optim_moment(const tsh_tensor *form, tsh_tensor **moment,
                                     tsh_dtype dtype) {
    tsh_ctx *ctx = form->ctx;
    const tsh_shape shape = tsh_shape_of(form);
    tsh_tensor *m = *moment; /* the moment; NULL: not created yet */
    if (m) {
        tshi_optim_relayout(m, &form->layout);
        return ctx->error.code == TSH_OK ? m : NULL;
    }
    m = tshi_tensor_handle(ctx, TSHI_OWNED | (form->flags & TSHI_CHUNKED));
    if (!m) return NULL;
    m->dtype = dtype;
    m->path = form->path;
    if (tshi_tensor_set_shape(m, "tsh_optim_step", &shape, &form->layout) != TSH_OK ||
        !tshi_optim_allocate(m, tshi_optim_count(m))) {
        tshi_tensor_release(m);
        return NULL;
    }
    tshi_mem_clear(ctx, m->block, tshi_dtype_bytes(m->dtype, tshi_optim_count(m)));
    *moment = m;
    return m;
}

/* An update of one parameter, divided between threads: by elements or, if the gradient is
 * row-sparse, by rows. */
typedef struct tshi_optim_work {
    const tsh_tensor *t;   /* the parameter */
    tshi_kernel_fn kernel; /* updates a run of elements, such as tshi_optim_adam */
    const tshi_operand *x; /* the operands, TSHI_OPTIM_OPERANDS entries */
    tshi_update params;
    /* marks[r]: not 0 if the gradient has values in local row r; NULL: the gradient is dense */
    const int32_t *marks;
    int64_t width; /* elements per row; 1 if the gradient is dense */
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
    tshi_team_run(t->ctx, tshi_kernel_parts(t->ctx, rows, work.width), rows, marks ? 1 : 16,
                  tshi_optim_update_part, &work);
}

/* Fills in x, the operands for the update of parameter t. Those of its moments get the dtype
 * `moments` and no data. Returns 0 if there is no memory. */
static int tshi_optim_operands(tsh_tensor *t, tsh_dtype moments, tshi_operand *x) {
    if (!tshi_tensor_keep_exact(t)) return 0;
    x[TSHI_OPTIM_X] = tshi_kernel_operand(tshi_tensor_at(t), 1, t->dtype);
    x[TSHI_OPTIM_GRAD] = tshi_tape_operand(t);
    for (int i = TSHI_OPTIM_FIRST; i < TSHI_OPTIM_LOW; i++)
        x[i] = tshi_kernel_operand(NULL, 1, moments);
    x[TSHI_OPTIM_LOW] = tshi_kernel_operand(t->low ? tshi_mem_data(t->low) : NULL, 1, TSH_BF16);
    tshi_kernel_move(&x[TSHI_OPTIM_X], tshi_optim_first(t));
    tshi_kernel_move(&x[TSHI_OPTIM_GRAD], tshi_optim_first(t));
    tshi_kernel_move(&x[TSHI_OPTIM_LOW], tshi_optim_first(t));
    return 1;
}

/* One update of one parameter: the argument of an optimiser's update function (tshi_optims). */
typedef struct tshi_turn {
    const tsh_optim_desc *desc; /* the optimiser's description */
    tshi_moments *each;         /* what the optimiser keeps of the parameter */
    const tsh_tensor *t;        /* the parameter; t->dim: its global shape */
    double lr, decay;           /* learning rate and weight decay of this parameter */
    int64_t step;               /* number of this update of the parameter, from 1 on */
    /* The operands, TSHI_OPTIM_OPERANDS entries; data NULL: there is none. If the optimiser needs
     * whole parameters, each operand is a whole row-major array of tsh_real, which the update may
     * write to; what it writes to X and to the moments is kept. Otherwise they are what
     * tshi_optim_run reads and writes. */
    tshi_operand *x;
    /* options of the kernel: clip and the fields for random rounding are set already, the others
     * are set by the update function */
    tshi_update params;
} tshi_turn;
