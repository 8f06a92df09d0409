/* ========================================================================== */
/* >>optim-rows                                  MARK: - optim-rows (private) */
/* Optimisers that update each element by itself.                             */
/* Needs: >>optim-update.                                                     */
/* ========================================================================== */

static void tshi_optim_update_sgd(tshi_turn *turn) {
    turn->params.decay = turn->decay;
    turn->params.lr = turn->lr;
    turn->params.momentum = turn->desc->momentum;
    turn->params.nesterov = turn->desc->nesterov;
    tshi_optim_run(turn->t, tshi_optim_sgd[turn->t->ctx->isa], turn->x, &turn->params);
}

static void tshi_optim_update_adam(tshi_turn *turn) {
    const tsh_optim_desc *d = turn->desc;
    tshi_update *p = &turn->params;
    const int decoupled = d->kind == TSH_ADAMW; /* 1: decay x itself, not through the gradient */
    p->decay = decoupled ? 0 : turn->decay;
    p->keep = decoupled ? 1 - turn->lr * turn->decay : 1;
    p->b1 = d->beta1;
    p->b2 = d->beta2;
    p->eps = d->eps;
    p->step = turn->lr / (1 - pow(d->beta1, (double)turn->step)); /* corrects the bias of m */
    p->root = 1 / sqrt(1 - pow(d->beta2, (double)turn->step));
    /* row-sparse gradient: as in torch.optim.SparseAdam, eps is added to sqrt(v) before its bias is
     * corrected */
    if (turn->t->sparse) {
        p->step /= p->root;
        p->root = 1;
    }
    tshi_optim_run(turn->t, tshi_optim_adam[turn->t->ctx->isa], turn->x, p);
}

/* -- updates of runs of elements --------------------------------------------
 * All other optimisers of this section are functions like tsh_custom_optim.update: plain loops over
 * arrays of tsh_real, which tshi_optim_chunk loads and stores. They are compiled once, not for each
 * instruction set: such a loop mostly waits for memory. */

enum { TSHI_OPTIM_CHUNK = 512 }; /* elements per call of an update; a multiple of TSHI_BLOCK */

/* Returns elements [e, e + TSHI_OPTIM_CHUNK) of operand i, of n elements, as tsh_real: in place if
 * they are of that dtype and not the gradient, which must not change; else copied or converted to
 * `pad`. */
static tsh_real *tshi_optim_chunk_load(const tshi_operand *operand, int i, int64_t e, int64_t n,
                                       tsh_real *pad) {
    const tshi_operand *x = &operand[i];
    const int64_t end = tshi_base_min(e + TSHI_OPTIM_CHUNK, n);
    tsh_real block[TSHI_BLOCK]; /* for values that must be converted */
    if (x->dtype == TSH_REAL && i != TSHI_OPTIM_GRAD) return (tsh_real *)x->data + e;
    for (int64_t at = e; at < end; at += TSHI_BLOCK)
        memcpy(pad + (at - e),
               i == TSHI_OPTIM_X ? tshi_optim_load_x(operand, at, n, block)
                                 : tshi_optim_load(x, at, n, block),
               sizeof block);
    return pad;
}

/* Stores what tshi_optim_chunk_load has converted: `values`, elements [e, e + TSHI_OPTIM_CHUNK) of
 * operand i, of n elements. Each moment that is rounded at random has its own random numbers. */
static void tshi_optim_chunk_store(const tshi_operand *operand, int i, int64_t e, int64_t n,
                                   const tsh_real *values, const tshi_update *p) {
    const int64_t end = tshi_base_min(e + TSHI_OPTIM_CHUNK, n);
    tshi_noise noise = p->noise;
    tshi_words drawn;
    drawn.first = -1;
    if (values == (const tsh_real *)operand[i].data + e) return; /* they were changed in place */
    noise.stream = tshi_rng_hash(noise.stream, &i, sizeof i);
    for (int64_t at = e; at < end; at += TSHI_BLOCK) {
        const tsh_real *block = values + (at - e);
        if (i == TSHI_OPTIM_X)
            tshi_optim_store_x(operand, at, n, block, p, &drawn);
        else if (p->random)
            tshi_kernel_store_random(&operand[i], at, n, block,
                                     tshi_kernel_words(&noise, at, &drawn), 0);
        else
            tshi_kernel_store(&operand[i], at, n, block, 0);
    }
}

/* A kernel (a tshi_kernel_fn): calls p->update for up to TSHI_OPTIM_CHUNK elements at a time. It
 * gets the gradient times p->clip, plus p->decay times the parameter, and the parameter times
 * p->keep. */
static void tshi_optim_chunk(int64_t n, const tshi_operand *operand, const void *params) {
    const tshi_update *p = (const tshi_update *)params;
    const tsh_real clip = TSHI_R(p->clip), decay = TSHI_R(p->decay), keep = TSHI_R(p->keep);
    tsh_real grad[TSHI_OPTIM_CHUNK], x[TSHI_OPTIM_CHUNK];
    tsh_real moment[TSH_MAX_MOMENTS][TSHI_OPTIM_CHUNK];
    tsh_update u = *p->given;
    u.grad = grad;
    for (int64_t e = 0; e < n; e += TSHI_OPTIM_CHUNK) {
        u.n = tshi_base_min(TSHI_OPTIM_CHUNK, n - e);
        (void)tshi_optim_chunk_load(operand, TSHI_OPTIM_GRAD, e, n, grad);
        u.x = tshi_optim_chunk_load(operand, TSHI_OPTIM_X, e, n, x);
        for (int i = 0, k = TSHI_OPTIM_FIRST; k < TSHI_OPTIM_LOW; i++, k++)
            u.moment[i] = operand[k].data ? tshi_optim_chunk_load(operand, k, e, n, moment[i])
                                          : NULL;
        for (int64_t i = 0; i < u.n; i++) grad[i] = grad[i] * clip + decay * u.x[i];
        if (p->keep != 1)
            for (int64_t i = 0; i < u.n; i++) u.x[i] *= keep;
        p->update(&u, p->user);
        tshi_optim_chunk_store(operand, TSHI_OPTIM_X, e, n, u.x, p);
        for (int i = 0; i < TSH_MAX_MOMENTS; i++)
            if (u.moment[i])
                tshi_optim_chunk_store(operand, TSHI_OPTIM_FIRST + i, e, n, u.moment[i], p);
    }
}

/* Returns the tsh_update that a custom optimiser's function gets, without the arrays in it. */
static tsh_update tshi_optim_given(const tshi_turn *turn) {
    tsh_update given;
    memset(&given, 0, sizeof given);
    given.path = turn->t->path;
    given.shape = tsh_shape_of(turn->t);
    given.lr = turn->lr;
    given.weight_decay = turn->decay;
    given.step = turn->step;
    return given;
}

/* Constants of an optimiser that are the same for all elements: the argument `user` of the update
 * functions below, each of which uses some of the fields. */
typedef struct tshi_rates {
    /* b1, b2, momentum: decay rates of the moments; eps: added to a root */
    double b1, b2, eps, momentum;
    double a, b; /* factors that depend on the step */
    int flag;
} tshi_rates;

/* Runs `update`, the function of an optimiser, on all elements of the parameter that this rank
 * updates. decoupled 1: weight decay is that of AdamW; 0: it is added to the gradient. */
static void tshi_optim_run_chunks(tshi_turn *turn,
                                  void (*update)(const tsh_update *update, void *user),
                                  tshi_rates *rates, int decoupled) {
    const tsh_update given = tshi_optim_given(turn);
    tshi_update *p = &turn->params;
    p->decay = decoupled ? 0 : turn->decay;
    p->keep = decoupled ? 1 - turn->lr * turn->decay : 1;
    p->update = update;
    p->user = rates;
    p->given = &given;
    tshi_optim_run(turn->t, tshi_optim_chunk, turn->x, p);
}

/* -- Lion, RMSprop, Adagrad, Adamax, NAdam, RAdam ---------------------------- */

/* Lion (Chen et al. 2023): x -= lr sign(b1 m + (1 - b1) g), m = b2 m + (1 - b2) g. */
static void tshi_optim_lion(const tsh_update *u, void *user) {
    const tshi_rates *r = (const tshi_rates *)user;
    const tsh_real b1 = TSHI_R(r->b1), b2 = TSHI_R(r->b2), c1 = TSHI_R(1 - r->b1),
                   c2 = TSHI_R(1 - r->b2), lr = TSHI_R(u->lr);
    for (int64_t i = 0; i < u->n; i++) {
        const tsh_real g = u->grad[i], m = u->moment[0][i], by = b1 * m + c1 * g;
        u->x[i] -= by > 0 ? lr : by < 0 ? -lr : 0;
        u->moment[0][i] = b2 * m + c2 * g;
    }
}

static void tshi_optim_update_lion(tshi_turn *turn) {
    tshi_rates rates = {turn->desc->beta1, turn->desc->beta2, 0, 0, 0, 0, 0};
    tshi_optim_run_chunks(turn, tshi_optim_lion, &rates, 1);
}

/* torch.optim.RMSprop (Tieleman & Hinton 2012; centered: Graves 2013): v = b2 v + (1 - b2) g^2;
 * centered: a = b2 a + (1 - b2) g, else a = 0; by = g / (sqrt(v - a^2) + eps); with momentum, of
 * which b is the moment: by = b = momentum b + by; x -= lr by. The moments are v, b and a, without
 * those that are not used. flag 1: centered. */
static void tshi_optim_rmsprop(const tsh_update *u, void *user) {
    const tshi_rates *r = (const tshi_rates *)user;
    const tsh_real b2 = TSHI_R(r->b2), c2 = TSHI_R(1 - r->b2), eps = TSHI_R(r->eps),
                   momentum = TSHI_R(r->momentum), lr = TSHI_R(u->lr);
    const int remembers = r->momentum > 0;
    tsh_real *v = u->moment[0], *b = u->moment[1], *a = u->moment[1 + remembers];
    for (int64_t i = 0; i < u->n; i++) {
        const tsh_real g = u->grad[i];
        tsh_real square = v[i] = b2 * v[i] + c2 * g * g, by;
        if (r->flag) {
            a[i] += c2 * (g - a[i]);
            square -= a[i] * a[i];
        }
        by = g / (tshi_math_sqrt(square) + eps);
        if (remembers) by = b[i] = momentum * b[i] + by;
        u->x[i] -= lr * by;
    }
}

static void tshi_optim_update_rmsprop(tshi_turn *turn) {
    const tsh_optim_desc *d = turn->desc;
    tshi_rates rates = {0, d->alpha, d->eps, d->momentum, 0, 0, d->centered};
    tshi_optim_run_chunks(turn, tshi_optim_rmsprop, &rates, 0);
}

/* torch.optim.Adagrad (Duchi et al. 2011): v += g^2, x -= a g / (sqrt(v) + eps). */
static void tshi_optim_adagrad(const tsh_update *u, void *user) {
    const tshi_rates *r = (const tshi_rates *)user;
    const tsh_real eps = TSHI_R(r->eps), a = TSHI_R(r->a);
    tsh_real *v = u->moment[0];
    for (int64_t i = 0; i < u->n; i++) {
        v[i] += u->grad[i] * u->grad[i];
        u->x[i] -= a * u->grad[i] / (tshi_math_sqrt(v[i]) + eps);
    }
}

static void tshi_optim_update_adagrad(tshi_turn *turn) {
    const tsh_optim_desc *d = turn->desc;
    tshi_rates rates = {0, 0, d->eps, 0, 0, 0, 0};
    rates.a = turn->lr / (1 + (double)(turn->step - 1) * d->lr_decay);
    tshi_optim_run_chunks(turn, tshi_optim_adagrad, &rates, 0);
}

/* torch.optim.Adamax (Kingma & Ba 2015): m = b1 m + (1 - b1) g, v = max(b2 v, |g| + eps),
 * x -= a m / v. */
static void tshi_optim_adamax(const tsh_update *u, void *user) {
    const tshi_rates *r = (const tshi_rates *)user;
    const tsh_real c1 = TSHI_R(1 - r->b1), b2 = TSHI_R(r->b2), eps = TSHI_R(r->eps),
                   a = TSHI_R(r->a);
    tsh_real *m = u->moment[0], *v = u->moment[1];
    for (int64_t i = 0; i < u->n; i++) {
        const tsh_real g = u->grad[i], size = (g < 0 ? -g : g) + eps, old = b2 * v[i];
        m[i] += c1 * (g - m[i]);
        v[i] = size > old ? size : old;
        u->x[i] -= a * m[i] / v[i];
    }
}

static void tshi_optim_update_adamax(tshi_turn *turn) {
    const tsh_optim_desc *d = turn->desc;
    tshi_rates rates = {d->beta1, d->beta2, d->eps, 0, 0, 0, 0};
    rates.a = turn->lr / (1 - pow(d->beta1, (double)turn->step));
    tshi_optim_run_chunks(turn, tshi_optim_adamax, &rates, 0);
}

/* NAdam and RAdam: m and v as Adam's; x -= (a g + b m) / (sqrt(v) root + eps) or, if flag is 1, x
 * -= a g + b m. root is in rates.momentum. */
static void tshi_optim_adams(const tsh_update *u, void *user) {
    const tshi_rates *r = (const tshi_rates *)user;
    const tsh_real c1 = TSHI_R(1 - r->b1), b2 = TSHI_R(r->b2), c2 = TSHI_R(1 - r->b2),
                   eps = TSHI_R(r->eps), root = TSHI_R(r->momentum), a = TSHI_R(r->a),
                   b = TSHI_R(r->b);
    tsh_real *m = u->moment[0], *v = u->moment[1];
    for (int64_t i = 0; i < u->n; i++) {
        const tsh_real g = u->grad[i];
        tsh_real by;
        m[i] += c1 * (g - m[i]);
        v[i] = b2 * v[i] + c2 * g * g;
        by = a * g + b * m[i];
        u->x[i] -= r->flag ? by : by / (tshi_math_sqrt(v[i]) * root + eps);
    }
}

/* torch.optim.NAdam (Dozat 2016): step t has the momentum u(t) = b1 (1 - 0.96^(t decay) / 2), and
 * with U, the product of all so far, a = lr (1 - u(t)) / (1 - U), b = lr u(t + 1) / (1 - U
 * u(t + 1)). */
static void tshi_optim_update_nadam(tshi_turn *turn) {
    const tsh_optim_desc *d = turn->desc;
    tshi_moments *each = turn->each;
    tshi_rates rates = {d->beta1, d->beta2, d->eps, 0, 0, 0, 0};
    double now = 0, next;
    if (each->products >= turn->step || !each->products) { /* the first step, or after tsh_load */
        each->product = 1;
        each->products = 0;
    }
    while (each->products < turn->step) {
        const double t = (double)++each->products;
        now = d->beta1 * (1 - 0.5 * pow(0.96, t * d->momentum_decay));
        each->product *= now;
    }
    next = d->beta1 * (1 - 0.5 * pow(0.96, ((double)turn->step + 1) * d->momentum_decay));
    rates.momentum = 1 / sqrt(1 - pow(d->beta2, (double)turn->step));
    rates.a = turn->lr * (1 - now) / (1 - each->product);
    rates.b = turn->lr * next / (1 - each->product * next);
    tshi_optim_run_chunks(turn, tshi_optim_adams, &rates, d->decoupled);
}

/* torch.optim.RAdam (Liu et al. 2020): as Adam, but without the divisor until the variance of v is
 * known well enough, and then by a factor that tends to 1. */
static void tshi_optim_update_radam(tshi_turn *turn) {
    const tsh_optim_desc *d = turn->desc;
    const double t = (double)turn->step, decayed = pow(d->beta2, t);
    const double most = 2 / (1 - d->beta2) - 1, length = most - 2 * t * decayed / (1 - decayed);
    tshi_rates rates = {d->beta1, d->beta2, d->eps, 1, 0, 0, 0};
    rates.b = turn->lr / (1 - pow(d->beta1, t));
    rates.flag = !(length > 5);
    if (!rates.flag)
        rates.b *= sqrt((length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length)) *
                   sqrt(1 - decayed);
    tshi_optim_run_chunks(turn, tshi_optim_adams, &rates, d->decoupled);
}

/* -- the caller's own -------------------------------------------------------- */

static void tshi_optim_update_custom(tshi_turn *turn) {
    const tsh_custom_optim *custom = &turn->desc->custom;
    tsh_update given = tshi_optim_given(turn);
    tshi_update *p = &turn->params;
    if (custom->whole) {
        tsh_real *grad = (tsh_real *)turn->x[TSHI_OPTIM_GRAD].data;
        given.n = tsh_numel(turn->t);
        for (int64_t i = 0; i < given.n; i++) grad[i] *= TSHI_R(p->clip);
        given.x = (tsh_real *)turn->x[TSHI_OPTIM_X].data;
        given.grad = grad;
        for (int i = 0; i < TSH_MAX_MOMENTS; i++)
            given.moment[i] = (tsh_real *)turn->x[TSHI_OPTIM_FIRST + i].data;
        custom->update(&given, custom->user);
        return;
    }
    p->decay = 0; /* weight decay is left to the caller's function */
    p->keep = 1;
    p->update = custom->update;
    p->user = custom->user;
    p->given = &given;
    tshi_optim_run(turn->t, tshi_optim_chunk, turn->x, p);
}
