/* ========================================================================== */
/* >>op-loss                                        MARK: - op-loss (private) */
/* Cross-entropy. If the classes are sharded, two collectives in forward.     */
/* Needs: >>tape-leaf >>op-view >>redistribute >>loss-avx512.                 */
/* ========================================================================== */

/* Row i of the logits x (rows, V) has classes c: w_c is the weight of class c (1 if none are
 * given), t_ic the target (a probability, or for a class index y 1 if c = y, else 0), e the label
 * smoothing, z the factor of the z-loss, l_i the loss of the row and g_i the gradient of l_i:
 *   m_i = max_c x_ic                                 all-reduce MAX if classes are sharded
 *   S_i = sum_c e^(x_ic - m_i)                       all-gather of all sums in one call
 *   A_i = sum_c w_c t_ic                             = w_y, no sum, for an index and replicated w
 *   B_i = sum_c w_c t_ic (x_ic - m_i)
 *   Q_i = sum_c w_c (x_ic - m_i), W_i = sum_c w_c, V_i = sum_c 1, over x_ic > -inf, only if e > 0
 *   a_i = (1 - e) A_i + e / V_i W_i
 *   l_i = a_i log S_i - (1 - e) B_i - e / V_i Q_i + z (m_i + log S_i)^2
 *   dx_ic = g_i (e^(x_ic - m_i - log S_i) (a_i + 2 z (m_i + log S_i))
 *                - (1 - e) w_c t_ic - e / V_i w_c), no collective
 * A class with logit -inf is padding: it does not count in V, is not smoothed, and has gradient 0.
 * m_i and log S_i are added only for the z-loss: log S_i would lose digits if m_i is large.
 * Forward: tshi_loss_plan decides which sums are needed, tshi_loss_targets finds the local class of
 * each row, tshi_loss_rows computes sums and row losses, tshi_loss_reduce their mean or sum. */
enum { TSHI_TARGET_ELSEWHERE = -1, TSHI_TARGET_IGNORED = -2 }; /* values of tshi_loss.local */
enum { TSHI_LOSS_A, TSHI_LOSS_B, TSHI_LOSS_Q, TSHI_LOSS_V, TSHI_LOSS_W, TSHI_LOSS_TERMS };
/* numbers per row: of sums that forward may need; of tsh_real values kept for backward */
enum { TSHI_LOSS_SUMS = 1 + TSHI_LOSS_TERMS, TSHI_LOSS_KEPT = 5 };

/* A call of tsh_cross_entropy, and the params of the node. Arrays have an entry per local row. */
typedef struct tshi_loss {
    tsh_cross_entropy_desc desc; /* options of the call */
    /* rows and classes on this rank; elements from row to row of the logits */
    int64_t rows, classes, step;
    int probs;                   /* 1: the target is probabilities; 0: it is class indices */
    int cut;                     /* 1: classes are sharded over several ranks */
    /* The sums of all rows are one array (sums, rows): first S, then B, then those of the terms A,
     * Q, V, W that are needed. */
    int sums, at[TSHI_LOSS_TERMS]; /* sums per row; index of each term among them, 0: not needed */
    double divisor;                /* out = sum of the row losses / divisor */
    /* What backward reads, in the node's aux: */
    int64_t *local;          /* local index of class y; -1: on another rank; -2: ignored row */
    tsh_real *max, *log_sum; /* of each row: m, its maximum; log S, where S = sum e^(x - m) */
    tsh_real *own, *uniform; /* of each row: A; e / V (label smoothing / classes) */
    tsh_real *scale;         /* factor of the softmax in dx: a + 2 z (m + log S) */
} tshi_loss;

/* -- kernels: the sums of a row, and its gradient --------------------------- */

/* Returns 1 if a class with logit x is padding: x is -infinity. */
TSHI_INLINE int tshi_loss_padding(tsh_real x) {
    return x <= -TSHI_R(INFINITY);
}

/* Operands of the kernels of the loss, each run over n rows. Shapes: X and TARGET (n, classes), MAX
 * and SUM (n), WEIGHT and SCRATCH (classes). An operand's step leads from row to row; that of
 * WEIGHT, which all rows share, is 0. */
enum { TSHI_LOSS_X, TSHI_LOSS_MAX, TSHI_LOSS_SUM, TSHI_LOSS_SCRATCH };
enum { TSHI_LOSS_WEIGHT = TSHI_LOSS_SCRATCH + 1, TSHI_LOSS_TARGET, TSHI_LOSS_OPERANDS };
enum { TSHI_LOSS_M, TSHI_LOSS_S, TSHI_LOSS_BOTH }; /* which results tshi_loss_softmax writes */
typedef struct tshi_loss_work {
    int64_t classes; /* classes on this rank */
    /* what to compute: in tshi_loss_softmax TSHI_LOSS_M, _S or _BOTH; in tshi_loss_term TSHI_LOSS_A
     * to TSHI_LOSS_W */
    int which;
} tshi_loss_work;

/* Returns S, the sum of e^(x - m), of a row of n logits in one pass, and sets *m to m, the larger
 * of *m and the row's maximum: takes TSHI_LOSS_RUN logits at a time, and scales the sum so far
 * when m grows. The result is NaN if m is not finite. */
TSHI_INLINE tsh_real tshi_loss_online(const tsh_real *x, int64_t n, tsh_real *m, int fused) {
    tsh_real lane[TSHI_BLOCK], max = *m; /* lane: partial sums of S; max: m so far */
    for (int i = 0; i < TSHI_BLOCK; i++) lane[i] = 0;
    for (; n > 0; n -= TSHI_LOSS_RUN, x += TSHI_LOSS_RUN) {
        const int64_t part = tshi_base_min(TSHI_LOSS_RUN, n);
        const tsh_real here = tshi_kernel_max(x, part); /* maximum of this part */
        if (!(here <= max) && max == max) {             /* m grows, or becomes NaN */
            const tsh_real scale = tshi_loss_padding(max) ? 0 : tshi_math_exp(max - here, fused);
            for (int i = 0; i < TSHI_BLOCK; i++) lane[i] *= scale;
            max = here;
        }
        if (!tshi_loss_padding(max)) tshi_kernel_add_exps(lane, x, part, max, NULL, fused);
    }
    *m = max;
    return tshi_kernel_fold(lane) + (max - max);
}

/* Writes m, the maximum, or S, the sum of e^(x - m), or both of each of n rows of logits, as
 * work->which says. S alone is computed from the given m. online: does what tshi_loss_online does,
 * faster; NULL: there is no such function. */
TSHI_INLINE void tshi_loss_softmax_body(int64_t n, const tshi_operand *operand,
                                        const tshi_loss_work *work, int fused,
                                        tsh_real (*online)(const tsh_real *x, int64_t n,
                                                           tsh_real *m)) {
    const tsh_real *x = (const tsh_real *)operand[TSHI_LOSS_X].data; /* shape (n, classes) */
    tsh_real *m = (tsh_real *)operand[TSHI_LOSS_MAX].data;           /* maxima, shape (n) */
    tsh_real *sum = (tsh_real *)operand[TSHI_LOSS_SUM].data;         /* S, shape (n) */
    for (int64_t i = 0; i < n; i++, x += operand[TSHI_LOSS_X].step) {
        if (work->which == TSHI_LOSS_BOTH) m[i] = -TSHI_R(INFINITY);
        if (work->which == TSHI_LOSS_M)
            m[i] = work->classes ? tshi_kernel_max(x, work->classes) : -TSHI_R(INFINITY);
        else if (online)
            sum[i] = online(x, work->classes, m + i);
        else if (work->which == TSHI_LOSS_BOTH)
            sum[i] = tshi_loss_online(x, work->classes, m + i, fused);
        else
            sum[i] = tshi_kernel_sum_exps(x, work->classes, m[i], NULL, fused);
    }
}
#define TSHI_LOSS_SOFTMAX(isa, TARGET, fused, online)                                              \
    TSHI_KERNEL_ISA(tshi_loss_softmax, isa, TARGET, n, x, (const tshi_loss_work *)params, fused,   \
                    online)
TSHI_LOSS_SOFTMAX(portable, , TSHI_FUSED, NULL)
TSHI_LOSS_SOFTMAX(avx2, TSHI_AVX2, TSHI_X86, NULL)
TSHI_LOSS_SOFTMAX(avx512, TSHI_AVX512, TSHI_X86, TSHI_LOSS_ONLINE_AVX512)
TSHI_KERNEL_TABLE(tshi_loss_softmax);
#undef TSHI_LOSS_SOFTMAX
#undef TSHI_LOSS_ONLINE_AVX512

/* Writes one of the sums A, B, Q, V, W of the loss (work->which) for each of n rows, from the
 * logits x and their maximum m. The operands WEIGHT and TARGET may be NULL. */
TSHI_INLINE void tshi_loss_term_body(int64_t n, const tshi_operand *operand,
                                     const tshi_loss_work *work) {
    const tsh_real *x = (const tsh_real *)operand[TSHI_LOSS_X].data;   /* shape (n, classes) */
    const tsh_real *m = (const tsh_real *)operand[TSHI_LOSS_MAX].data; /* maxima, (n) */
    /* class weights, shape (classes); NULL: all are 1 */
    const tsh_real *w = (const tsh_real *)operand[TSHI_LOSS_WEIGHT].data;
    /* targets, shape (n, classes), or NULL */
    const tsh_real *t = (const tsh_real *)operand[TSHI_LOSS_TARGET].data;
    tsh_real *sum = (tsh_real *)operand[TSHI_LOSS_SUM].data; /* results, shape (n) */
    tsh_real *TSHI_RESTRICT e = (tsh_real *)operand[TSHI_LOSS_SCRATCH].data; /* shape (classes) */
    const int64_t classes = work->classes;
    const int which = work->which;
    for (int64_t i = 0; i < n; i++, x += operand[TSHI_LOSS_X].step) {
        const tsh_real *share = t ? t + i * classes : NULL; /* targets of row i */
        TSHI_EACH for (int64_t c = 0; c < classes; c++) {
            const tsh_real weight = w ? w[c] : TSHI_R(1);
            if (which == TSHI_LOSS_A)
                e[c] = weight * share[c];
            else if (which == TSHI_LOSS_B)
                e[c] = share[c] == 0 ? TSHI_R(0) : TSHI_R(weight * share[c] * (x[c] - m[i]));
            else if (tshi_loss_padding(x[c]))
                e[c] = 0; /* a class that is padding adds 0 */
            else
                e[c] = which == TSHI_LOSS_Q   ? TSHI_R(weight * (x[c] - m[i]))
                       : which == TSHI_LOSS_W ? weight
                                              : TSHI_R(1);
        }
        sum[i] = tshi_kernel_sum(e, classes);
    }
}
TSHI_KERNEL(tshi_loss_term, tshi_loss_work);

/* The parameters of the kernel that computes dx = g e^(x - m - log S) for a row of n classes. Its
 * operands are dx and x, which may be the same memory. */
typedef struct tshi_loss_row {
    double g, max, log_sum; /* g_i times the factor `scale` of the softmax; m_i; log S_i */
    int add;                /* 1: dx += ..., 0: dx = ... */
} tshi_loss_row;
TSHI_INLINE void tshi_loss_grad_body(int64_t n, const tshi_operand *operand,
                                     const tshi_loss_row *row, int fused) {
    tsh_real pad[TSHI_BLOCK], dx[TSHI_BLOCK];
    const tsh_real *x; /* x: a block of the row's logits */
    const tsh_real max = TSHI_R(row->max), log_sum = TSHI_R(row->log_sum);
    const tsh_real g = TSHI_R(row->g) + (log_sum - log_sum); /* NaN if log S is not finite */
    for (int64_t e = 0; e < n; e += TSHI_BLOCK) {
        x = tshi_kernel_load(&operand[1], e, n, pad);
        TSHI_LANES for (int i = 0; i < TSHI_BLOCK; i++)
            dx[i] = g * tshi_math_exp_below(x[i] - max - log_sum, fused);
        tshi_kernel_store(&operand[0], e, n, dx, row->add);
    }
}
TSHI_KERNEL_FUSED(tshi_loss_grad, tshi_loss_row);

/* The parameters of the kernel that subtracts the target's part, g w_c ((1 - e) t_c + e / V), from
 * dx_c for each class c of a row of n; for padding, e / V is left out. Operands: dx, x, w, t, all
 * (n); w and t may be NULL. */
typedef struct tshi_loss_shares {
    double own, uniform; /* g (1 - e), the factor of w_c t_c; g e / V, the factor of w_c */
} tshi_loss_shares;
TSHI_INLINE void tshi_loss_share_body(int64_t n, const tshi_operand *operand,
                                      const tshi_loss_shares *shares) {
    const int64_t step = operand[0].step;
    tsh_real *TSHI_RESTRICT dx = (tsh_real *)operand[0].data;            /* shape (n) */
    const tsh_real *TSHI_RESTRICT x = (const tsh_real *)operand[1].data; /* shape (n) */
    const tsh_real *w = (const tsh_real *)operand[2].data, *t = (const tsh_real *)operand[3].data;
    const tsh_real own = TSHI_R(shares->own), uniform = TSHI_R(shares->uniform);
    TSHI_EACH for (int64_t c = 0; c < n; c++) {
        const tsh_real share = (t ? TSHI_R(own * t[c]) : TSHI_R(0)) +
                               (tshi_loss_padding(x[c]) ? TSHI_R(0) : uniform);
        dx[c * step] -= w ? TSHI_R(w[c] * share) : share;
    }
}
TSHI_KERNEL(tshi_loss_share, tshi_loss_shares);

/* -- backward: the gradient of the logits ----------------------------------- */

/* What the threads of a rank share in backward. x: logits; t: probabilities; w: class weights. */
typedef struct tshi_loss_job {
    const tshi_node *node;
    tshi_dest dest;            /* where dx goes */
    /* x, and t or NULL: shape (rows, classes); w, or NULL: shape (classes) */
    const tsh_real *x, *t, *w;
    int64_t step;              /* elements from row to row of x */
} tshi_loss_job;

/* A tshi_team_fn: computes the rows [from, to) of dx. */
static void tshi_loss_backward_rows(void *job, int piece, int64_t from, int64_t to) {
    const tshi_loss_job *work = (const tshi_loss_job *)job;
    const tshi_node *node = work->node;
    const tshi_loss *loss = (const tshi_loss *)node->params;
    const tsh_real *g = tshi_tape_grad(node); /* gradient of out: (rows), or a scalar */
    const tsh_tensor *x = node->in[0];        /* shape (.., V) */
    int64_t i, c, step = 0, rows = 0, last = x->stride[x->ndim - 1];
    const double keep = 1 - loss->desc.label_smoothing; /* the weight of the target, 1 - e */
    (void)piece;
    (void)tshi_kernel_rows(x, &rows, &step);
    for (i = from; i < to; i++) {
        const double each = (double)(loss->desc.reduction == TSH_REDUCE_NONE ? g[i] : g[0]) /
                            loss->divisor; /* g_i: gradient of the row's loss */
        const tshi_loss_row row = {each * (double)loss->scale[i], (double)loss->max[i],
                                   (double)loss->log_sum[i], work->dest.add};
        const tshi_loss_shares shares = {each * keep, each * (double)loss->uniform[i]};
        tsh_real *dx = work->dest.data + i * step; /* shape (classes) */
        const tshi_operand operand[4] = {
            tshi_kernel_reals(dx, last), tshi_kernel_reals(work->x + i * work->step, 1), /* dx, x */
            tshi_kernel_reals(work->w, 1),                                               /* w */
            tshi_kernel_reals(work->t ? work->t + i * loss->classes : NULL, 1)};         /* t */
        if (loss->local[i] == TSHI_TARGET_IGNORED) {
            for (c = 0; c < loss->classes && !work->dest.add; c++) dx[c * last] = 0;
            continue;
        }
        tshi_loss_grad[x->ctx->isa](loss->classes, operand, &row);
        if (loss->probs || loss->desc.label_smoothing > 0)
            tshi_loss_share[x->ctx->isa](loss->classes, operand, &shares);
        if (loss->local[i] >= 0) /* class y, the target: subtracts g_i (1 - e) A_i */
            dx[loss->local[i] * last] -= TSHI_R(each * keep * (double)loss->own[i]);
    }
}

/* Backward: computes dx. The target and the class weights get no gradient. */
static void tshi_loss_backward(tshi_node *node) {
    const tshi_loss *loss = (const tshi_loss *)node->params;
    tsh_ctx *ctx = node->out->ctx;
    /* 1: each row is read and written only once, so dx may take the memory of x, or of its copy */
    const int once = !loss->probs && !(loss->desc.label_smoothing > 0) &&
                     (node->in[0]->dtype == TSH_REAL || tshi_tape_is_whole(node->in[0]));
    tshi_block *scratch[3] = {NULL, NULL, NULL}; /* copies of logits, target, weight as tsh_real */
    int64_t stride[TSH_MAX_DIMS];
    tshi_loss_job work;
    memset(&work, 0, sizeof work);
    work.node = node;
    work.x = tshi_tape_saved_reals(node, 0, stride, &scratch[0]);
    work.step = scratch[0] ? loss->classes : loss->step; /* elements from row to row */
    if (once && scratch[0]) { /* from now on only the copy of the logits is read */
        tshi_mem_release(ctx, node->saved[0]);
        node->saved[0] = scratch[0];
        scratch[0] = NULL;
    }
    if (loss->probs) work.t = tshi_tape_saved_reals(node, 1, stride, &scratch[1]);
    if (node->saved[2]) work.w = tshi_tape_saved_reals(node, 2, stride, &scratch[2]);
    if (ctx->error.code == TSH_OK &&
        (once ? tshi_tape_dest_over(node, 0, &work.dest) : tshi_tape_dest(node, 0, &work.dest)))
        tshi_team_run(ctx, tshi_kernel_parts(ctx, loss->rows, loss->classes), loss->rows, 1,
                      tshi_loss_backward_rows, &work);
    for (int i = 0; i < 3; i++) tshi_mem_release(ctx, scratch[i]);
}

/* -- checks of the inputs; which sums are needed ---------------------------- */

/* Warns if x is the result of the op `name`, which the loss applies itself, or does not expect. */
static void tshi_loss_warn_twice(const tsh_tensor *x, const char *name, const char *sentence) {
    const tshi_node *node = x ? x->base->node : NULL;
    if (node && x->ctx->error.code == TSH_OK && strcmp(node->op->name, name) == 0)
        tshi_error_warn(x->ctx, TSHI_WARN_TWICE, sentence);
}

/* Checks the options. probs 1: the target is probabilities. Returns 0 after an error. */
static int tshi_loss_options(tsh_ctx *ctx, const tsh_cross_entropy_desc *desc, int probs) {
    if ((unsigned)desc->reduction > (unsigned)TSH_REDUCE_NONE)
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT, "tsh_cross_entropy: %d is no reduction",
                       (int)desc->reduction);
    else if (desc->dim != 0 && desc->dim != 1)
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT,
                       "tsh_cross_entropy: dim is %d; classes are in the last dimension (0), or in "
                       "dimension 1 (1)",
                       desc->dim);
    else if (!(desc->label_smoothing >= 0 && desc->label_smoothing <= 1))
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT,
                       "tsh_cross_entropy: label_smoothing is %g, not within [0, 1]",
                       desc->label_smoothing);
    else if (!(desc->z_loss >= 0 && desc->z_loss < (double)INFINITY))
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT,
                       "tsh_cross_entropy: z_loss is %g, not a finite factor from 0 up",
                       desc->z_loss);
    else if (probs && desc->ignore)
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT,
                       "tsh_cross_entropy: ignore_index %lld is for integer targets; rows of "
                       "probabilities are left out by giving them only zeros",
                       (long long)desc->ignore_index);
    else
        return 1;
    return 0;
}

/* Returns 1 if the target fits logits x whose classes are dimension `axis`: probabilities have the
 * shape of x, class indices that of x without dimension `axis`. */
static int tshi_loss_fits(const tsh_tensor *x, const tsh_tensor *target, int axis) {
    const int probs = tshi_dtypes[target->dtype].floating; /* 1: probabilities */
    int fits = x->ndim == target->ndim + !probs && x->ndim > 0;
    for (int d = 0; d < target->ndim && fits; d++)
        fits = x->dim[d + (!probs && d >= axis)] == target->dim[d];
    return fits;
}

/* Returns the end of an error's sentence, perhaps empty: what may be wrong with a target whose
 * shape does not fit that of the logits x. dim: the option that says which dimension has the
 * classes. */
static TSHI_COLD const char *tshi_loss_hint(const tsh_tensor *x, const tsh_tensor *target,
                                            int dim) {
    const int probs = tshi_dtypes[target->dtype].floating, n = target->ndim;
    const int axis = tshi_rule_classes(x, dim); /* the dimension of the classes */
    /* same: the target has x's shape; rows: that of x without the classes; column: rows, and a last
     * dimension of length 1; deep: x's shape without the last two dimensions, of V and 1 */
    int same = n == x->ndim, rows = n == x->ndim - 1, column = same && n > 0;
    int deep = n == x->ndim - 2 && !probs && x->dim[x->ndim - 1] == 1;
    if (tshi_loss_fits(x, target, tshi_rule_classes(x, !dim)))
        return dim ? "; if classes are last, as here, give .dim = 0"
                   : "; if classes are in dimension 1, as here, give .dim = 1";
    for (int d = 0; d < n; d++) {
        if (same) same = target->dim[d] == x->dim[d];
        if (rows) rows = target->dim[d] == x->dim[d + (d >= axis)];
        if (column) column = target->dim[d] == (d < n - 1 ? x->dim[d + (d >= axis)] : 1);
        if (deep) deep = target->dim[d] == x->dim[d];
    }
    if (column) return "; leave out the target's last dimension: tsh_squeeze(target, -1)";
    if (deep) return "; leave out the first tensor's last dimension: tsh_squeeze(.., -1)";
    if (probs && rows) return "; class indices are integers: tsh_cast(target, TSH_I64)";
    return same && !probs ? "; a one-hot target is probabilities, for tsh_cross_entropy: "
                            "tsh_cast(target, TSH_REAL)"
                          : "";
}

/* Checks the shapes of the logits, the target and the class weights (V) or NULL. Returns 0 after an
 * error. */
static int tshi_loss_shapes(tsh_tensor *const *in, const tsh_cross_entropy_desc *desc) {
    tsh_tensor *x = in[0], *target = in[1], *weight = in[2];
    char tx[TSHI_TEXT_SIZE], tt[TSHI_TEXT_SIZE];
    const int axis = tshi_rule_classes(x, desc->dim); /* the dimension of the classes */
    if (!tshi_loss_fits(x, target, axis))
        (void)tsh_fail(x->ctx, TSH_ERR_SHAPE, "tsh_cross_entropy: logits %s and target %s %s; %s%s",
                       tshi_tensor_text(x, tx), tshi_dtype_name(target->dtype),
                       tshi_tensor_text(target, tt),
                       desc->dim ? "with .dim = 1, takes (N, V, d1, ..) and integers (N, d1, ..), "
                                   "or probabilities of the logits' shape"
                                 : "takes (.., V) and integers (..), or probabilities (.., V)",
                       tshi_loss_hint(x, target, desc->dim));
    else if (weight && tshi_tensor_check_floating("tsh_cross_entropy", "weight", &weight, 1) &&
             (weight->ndim != 1 || weight->dim[0] != x->dim[axis]))
        (void)tsh_fail(x->ctx, TSH_ERR_SHAPE,
                       "tsh_cross_entropy: logits %s have %lld classes, weight is %s",
                       tshi_tensor_text(x, tx), (long long)x->dim[axis],
                       tshi_tensor_text(weight, tt));
    return x->ctx->error.code == TSH_OK;
}

/* Returns a view of t with dimension `axis`, the classes, last; NULL: an error. */
static tsh_tensor *tshi_loss_turn(tsh_tensor *t, int axis) {
    int order[TSH_MAX_DIMS];
    for (int d = 0; d < t->ndim; d++) order[d] = d < axis ? d : d < t->ndim - 1 ? d + 1 : axis;
    return axis < t->ndim - 1 ? tsh_permute(t, order) : t;
}

/* Returns this rank's shard of t in a layout, dense and without a gradient; NULL: an error. t is
 * replicated, or has the layout already. */
static tsh_tensor *tshi_loss_shard(tsh_tensor *t, const tsh_layout *layout) {
    tsh_ctx *ctx = t->ctx;
    tsh_no_grad_begin(ctx);
    t = tsh_redistribute(t, *layout);
    if (t) t = tshi_redistribute_window("tsh_cross_entropy", &t);
    tsh_no_grad_end(ctx);
    return t;
}

/* Fills in *loss. Permutes logits and probabilities so that classes are last, and replaces them,
 * and the class weights, by copies if their layout or strides are not what the kernels take.
 * Returns 0 after an error. */
static int tshi_loss_plan(tsh_tensor **in, const tsh_cross_entropy_desc *desc, tshi_loss *loss) {
    const int axis = tshi_rule_classes(in[0], desc->dim), last = in[0]->ndim - 1;
    const int cut = in[0]->layout.kind == TSH_SHARDED && in[0]->layout.dim == axis;
    tsh_layout classes = in[0]->layout;                  /* becomes the class weights' layout */
    tsh_tensor *x = in[0] = tshi_loss_turn(in[0], axis); /* shape (.., V) */
    memset(loss, 0, sizeof *loss);
    loss->probs = tshi_dtypes[in[1]->dtype].floating;
    if (loss->probs) in[1] = tshi_loss_turn(in[1], axis);
    if (!x || !in[1]) return 0;
    if (x->stride[last] != 1 || !tshi_kernel_rows(x, &loss->rows, &loss->step))
        in[0] = x = tshi_op_copy("tsh_cross_entropy", x);
    if (x && loss->probs) in[1] = tshi_loss_shard(in[1], &x->layout);
    if (!x || !in[1]) return 0;
    (void)tshi_kernel_rows(x, &loss->rows, &loss->step);
    loss->classes = x->local[last]; /* classes on this rank */
    loss->desc = *desc;
    loss->cut = cut && x->ctx->tp.size > 1;
    loss->divisor = 1;
    loss->sums = 2; /* sums that every loss needs: S and B */
    loss->at[TSHI_LOSS_B] = 1;
    /* A is a sum for probabilities, or if the class weights are sharded; else it is w_y, the weight
     * of the target class y, which this rank has */
    if (loss->probs || (in[2] && in[2]->layout.kind == TSH_SHARDED))
        loss->at[TSHI_LOSS_A] = loss->sums++;
    for (int t = TSHI_LOSS_Q; t <= TSHI_LOSS_W && desc->label_smoothing > 0; t++)
        if (t != TSHI_LOSS_W || in[2]) loss->at[t] = loss->sums++; /* without weights W = V */
    if (!in[2]) return 1;
    classes.dim = 0;
    if (!cut) classes = tsh_replicated();
    in[2] = tshi_loss_shard(in[2], &classes);
    return in[2] != NULL;
}

/* -- forward: targets, sums, row losses ------------------------------------- */

/* Reports that target y, of local row i, is out of range. op: the name of the public function. */
static void tshi_loss_outside(const char *op, const tsh_tensor *target, int64_t y, int64_t i,
                              int64_t classes) {
    int64_t row = 0, size = 1; /* row: the row's global index; size: rows per index of dim d */
    for (int d = target->ndim - 1; d >= 0; d--) {
        row += tshi_tensor_global(target, d, i % target->local[d]) * size;
        i /= target->local[d];
        size *= target->dim[d];
    }
    (void)tsh_fail(target->ctx, TSH_ERR_ARGUMENT,
                   "%s: target %lld at row %lld is outside [0, %lld)%s; to leave such rows out: "
                   ".ignore = 1, .ignore_index = %lld",
                   op, (long long)y, (long long)row, (long long)classes,
                   y == classes ? ": classes are counted from 0" : "", (long long)y);
}

/* Returns element y of the class weights on this rank. */
static tsh_real tshi_loss_class_weight(const tsh_tensor *weight, int64_t y) {
    return TSHI_R(tshi_dtype_get(weight->dtype, tshi_tensor_at(weight), y * weight->stride[0]));
}

/* For class indices: fills in loss->local, and loss->own with the weight of each row's class, or 0
 * if only another rank has this weight. An index out of range is an error, of the function op. */
static void tshi_loss_targets(const char *op, tsh_tensor *const *in, const tshi_loss *loss) {
    const tsh_tensor *x = in[0], *target = in[1], *w = in[2], *given = loss->desc.weight;
    /* the weights of all classes, shape (V); NULL: there are none, or this rank has only a shard */
    const tsh_tensor *all = w && given->layout.kind == TSH_REPLICATED ? given : NULL;
    const int64_t n = tsh_local_numel(target), classes = x->dim[x->ndim - 1];
    tshi_block *scratch;
    const void *values = tshi_kernel_packed(target, &scratch); /* class indices, shape (n) */
    for (int64_t i = 0; i < n && x->ctx->error.code == TSH_OK; i++) {
        const int64_t y = tshi_tensor_integer(target, values, i); /* the row's class */
        loss->local[i] = TSHI_TARGET_IGNORED;
        loss->own[i] = 0;
        if (y == (loss->desc.ignore ? loss->desc.ignore_index : -100)) continue;
        if (y < 0 || y >= classes) {
            tshi_loss_outside(op, target, y, i, classes);
            continue;
        }
        loss->local[i] = tshi_tensor_local(x, x->ndim - 1, y); /* -1: it is on another rank */
        if (!w || all)
            loss->own[i] = all ? tshi_loss_class_weight(all, y) : TSHI_R(1);
        else if (loss->local[i] >= 0)
            loss->own[i] = tshi_loss_class_weight(w, loss->local[i]);
    }
    tshi_mem_release(x->ctx, scratch);
}

/* Runs a kernel over all rows by the rank's threads. x: the kernel's operands; which: what it
 * computes (tshi_loss_work.which). */
static void tshi_loss_run(const tsh_ctx *ctx, const tshi_loss *loss, const tshi_kernel_fn *kernel,
                          const tshi_operand *x, int which) {
    const tshi_loss_work params = {loss->classes, which};
    tshi_rows work = tshi_kernel_rows_job(kernel[ctx->isa], loss->rows, &params);
    memcpy(work.x, x, TSHI_LOSS_OPERANDS * sizeof *x);
    work.own[TSHI_LOSS_SCRATCH] = loss->classes; /* elements of scratch for each piece */
    tshi_kernel_run_rows(ctx, &work, loss->classes);
}

/* Computes this rank's part of all sums (loss->sums, rows) except S. x: operands of the kernels. */
static void tshi_loss_terms(const tsh_ctx *ctx, const tshi_loss *loss, tsh_real *sums,
                            tshi_operand *x) {
    const tsh_real *values = (const tsh_real *)x[TSHI_LOSS_X].data; /* logits (rows, classes) */
    int64_t i, n = loss->rows;
    tsh_real *picked = sums + n; /* B, shape (rows) */
    tsh_real *own = loss->at[TSHI_LOSS_A] ? sums + n * loss->at[TSHI_LOSS_A] : NULL; /* A */
    for (int which = loss->probs ? TSHI_LOSS_A : TSHI_LOSS_Q; which <= TSHI_LOSS_W; which++) {
        x[TSHI_LOSS_SUM] = tshi_kernel_reals(sums + n * loss->at[which], 1);
        if (loss->at[which]) tshi_loss_run(ctx, loss, tshi_loss_term, x, which);
    }
    for (i = 0; i < n && !loss->probs; i++) {
        int64_t y = loss->local[i]; /* local index of the class, or negative */
        picked[i] = y >= 0 ? values[i * x[TSHI_LOSS_X].step + y] - loss->max[i] : 0;
        if (own) own[i] = y >= 0 ? loss->own[i] : 0;
    }
}

/* Computes the row losses, and what backward reads, from the complete sums (loss->sums, rows). For
 * a class index, B in `sums` is still without the class's weight, which is in loss->own. */
static void tshi_loss_combine(const tshi_loss *loss, const tsh_real *sums, tsh_real *losses) {
    const int *at = loss->at, smooth = at[TSHI_LOSS_Q] > 0; /* smooth: 1 if label smoothing is on */
    const tsh_real *own = sums + loss->rows * at[TSHI_LOSS_A]; /* A, shape (rows) */
    const tsh_real *q = sums + loss->rows * at[TSHI_LOSS_Q], *v = q + loss->rows;    /* Q, V */
    const tsh_real *all = at[TSHI_LOSS_W] ? sums + loss->rows * at[TSHI_LOSS_W] : v; /* W */
    const tsh_real keep = TSHI_R(1 - loss->desc.label_smoothing), z = TSHI_R(loss->desc.z_loss);
    for (int64_t i = 0; i < loss->rows; i++) {
        tsh_real log_sum = tshi_math_log(sums[i], TSHI_FUSED), a, b = sums[loss->rows + i];
        tsh_real lse = loss->max[i] + log_sum; /* log sum_c e^x */
        if (at[TSHI_LOSS_A]) loss->own[i] = own[i];
        loss->log_sum[i] = log_sum;
        loss->uniform[i] = smooth ? TSHI_R(loss->desc.label_smoothing) / v[i] : 0;
        a = keep * loss->own[i];
        if (smooth) a += loss->uniform[i] * all[i];
        losses[i] = a * log_sum - keep * (loss->probs ? b : TSHI_R(loss->own[i] * b));
        if (smooth) losses[i] -= loss->uniform[i] * q[i];
        if (loss->desc.z_loss > 0) losses[i] += z * lse * lse;
        loss->scale[i] = loss->desc.z_loss > 0 ? TSHI_R(a + 2 * z * lse) : a;
        if (loss->local[i] == TSHI_TARGET_IGNORED) losses[i] = 0;
    }
}

/* Replaces each of the n numbers in `sums` by its sum over the ranks, which are added in the order
 * of ranks. An all-reduce adds in an order that depends on a number's place in the buffer: the loss
 * of a row would depend on how many other rows there are. */
static void tshi_loss_sum_ranks(tsh_ctx *ctx, tsh_real *sums, int64_t n) {
    const int size = ctx->tp.size;
    tshi_block *block = tshi_mem_alloc(ctx, TSH_MEM_STEP,
                                       tshi_dtype_reals(size * n) +
                                           (size_t)size * sizeof(int64_t));
    int64_t *counts;
    tsh_real *all; /* shape (ranks, n) */
    if (!block) return;
    counts = (int64_t *)tshi_mem_data(block);
    all = (tsh_real *)(void *)(counts + size);
    for (int r = 0; r < size; r++) counts[r] = n;
    if (tshi_error_comm(ctx, tsh_allgather(&ctx->tp, sums, all, counts, 1, TSH_REAL),
                        "tsh_cross_entropy: all-gather of the row sums") == TSH_OK) {
        memcpy(sums, all, tshi_dtype_reals(n));
        for (int r = 1; r < size; r++) tshi_tape_add_all(ctx, sums, all + r * n, n);
    }
    tshi_mem_release(ctx, block);
}

/* Computes the row losses (rows) in one pass over the logits; if classes are sharded, in two, with
 * an all-reduce of the maxima between, and an all-gather of the sums at the end. sums:
 * (TSHI_LOSS_SUMS, rows), then space for losses (rows), then scratch (pieces, classes). */
static void tshi_loss_rows(tsh_ctx *ctx, const tshi_loss *loss, tshi_operand *x, tsh_real *sums,
                           tsh_real *losses) {
    const int64_t n = loss->rows;
    x[TSHI_LOSS_MAX] = tshi_kernel_reals(loss->max, 1);
    x[TSHI_LOSS_SUM] = tshi_kernel_reals(sums, 1);
    x[TSHI_LOSS_SCRATCH] = tshi_kernel_reals(sums + (TSHI_LOSS_SUMS + 1) * n, 0);
    tshi_loss_run(ctx, loss, tshi_loss_softmax, x, loss->cut ? TSHI_LOSS_M : TSHI_LOSS_BOTH);
    if (loss->cut) {
        (void)tshi_error_comm(ctx, tsh_allreduce(&ctx->tp, loss->max, n, TSH_REAL, TSH_MAX),
                              "tsh_cross_entropy: all-reduce of the row maxima");
        tshi_loss_run(ctx, loss, tshi_loss_softmax, x, TSHI_LOSS_S);
    }
    tshi_loss_terms(ctx, loss, sums, x);
    if (loss->cut) tshi_loss_sum_ranks(ctx, sums, loss->sums * n);
    tshi_loss_combine(loss, sums, losses);
}

/* Fills in the operands X, TARGET and WEIGHT. Values that are not of tsh_real are converted to
 * scratch[], which the caller releases. Returns 0 if there is no memory. */
static int tshi_loss_inputs(tsh_tensor *const *in, const tshi_loss *loss, tshi_operand *x,
                            tshi_block **scratch) {
    static const int place[3] = {TSHI_LOSS_X, TSHI_LOSS_TARGET, TSHI_LOSS_WEIGHT};
    const int64_t step[3] = {loss->step, loss->classes, 0};
    int64_t stride[TSH_MAX_DIMS];
    memset(x, 0, TSHI_LOSS_OPERANDS * sizeof *x);
    for (int i = 0; i < 3; i++) {
        const int used = in[i] && (i != 1 || loss->probs); /* kernels do not take class indices */
        tsh_real *values = used ? tshi_kernel_reals_of(in[i], stride, &scratch[i]) : NULL;
        x[place[i]] = tshi_kernel_reals(values, i == 0 && scratch[0] ? loss->classes : step[i]);
    }
    return in[0]->ctx->error.code == TSH_OK;
}

/* Writes the sum or mean of the row losses to out, a scalar: a partial sum if rows are sharded. A
 * mean divides by the global number of rows; for class indices, by the sum of their weights. */
static void tshi_loss_reduce(const tsh_tensor *x, tshi_loss *loss, const tsh_real *losses,
                             tsh_tensor *out) {
    tsh_ctx *ctx = x->ctx;
    double total = 0, count = 0; /* sum of the row losses; what a mean divides them by */
    for (int64_t i = 0; i < loss->rows; i++) total += (double)losses[i];
    if (loss->desc.reduction == TSH_REDUCE_MEAN) {
        for (int64_t i = 0; i < loss->rows; i++) count += (double)loss->own[i];
        if (loss->probs)
            count = (double)tshi_tensor_product(x->dim, x->ndim - 1);
        else if (out->layout.kind == TSH_PARTIAL && ctx->tp.size > 1)
            (void)tshi_error_comm(ctx, tsh_allreduce(&ctx->tp, &count, 1, TSH_F64, TSH_SUM),
                                  "tsh_cross_entropy: all-reduce of the number of rows");
        /* empty_zero: dividing by infinity makes the loss and its gradients 0 */
        loss->divisor = count < 0 || count > 0 || !loss->desc.empty_zero ? count : (double)INFINITY;
    }
    tshi_tensor_values(out)[0] = TSHI_R(total / loss->divisor);
}

/* Computes out, and what backward reads. sums: scratch, as in tshi_loss_rows. */
static void tshi_loss_forward(tsh_tensor *const *in, tshi_loss *loss, tsh_real *sums,
                              tsh_tensor *out) {
    const int reduced = loss->desc.reduction != TSH_REDUCE_NONE; /* 0: out has the row losses */
    tsh_real *losses = reduced ? sums + TSHI_LOSS_SUMS * loss->rows : tshi_tensor_values(out);
    tsh_ctx *ctx = in[0]->ctx;
    tshi_block *converted[3] = {NULL, NULL, NULL}; /* logits, target, weight as tsh_real, or NULL */
    tshi_operand x[TSHI_LOSS_OPERANDS];
    for (int64_t i = 0; i < loss->rows; i++) loss->local[i] = TSHI_TARGET_ELSEWHERE;
    if (!loss->probs) tshi_loss_targets("tsh_cross_entropy", in, loss);
    if (ctx->error.code == TSH_OK && tshi_loss_inputs(in, loss, x, converted))
        tshi_loss_rows(ctx, loss, x, sums, losses);
    for (int i = 0; i < 3; i++) tshi_mem_release(ctx, converted[i]);
    if (ctx->error.code == TSH_OK && reduced) tshi_loss_reduce(in[0], loss, losses, out);
}

static const tshi_op tshi_loss_op = {
    "tsh_cross_entropy",     "logits target weight",
    tshi_rule_cross_entropy, tshi_loss_backward,
    TSHI_LOGITS | TSHI_TARGET | TSHI_CLASS_WEIGHTS, 0};

TSH_API tsh_tensor *tsh_cross_entropy(tsh_tensor *logits, tsh_tensor *target,
                                      const tsh_cross_entropy_desc *desc) {
    const tshi_op *op = &tshi_loss_op;
    tsh_cross_entropy_desc usual; /* zeros: no options */
    tsh_tensor *in[3] = {logits, target, desc ? desc->weight : NULL}, *out;
    tsh_ctx *ctx = tshi_tensor_check(op->name, op->inputs, in, in[2] ? 3 : 2);
    tshi_output output;
    tshi_block *aux, *sums; /* aux: what backward reads; sums: scratch */
    tshi_loss loss;
    int64_t scratch; /* elements of scratch for tshi_loss_term */
    memset(&usual, 0, sizeof usual);
    if (!desc) desc = &usual;
    if (!ctx || !tshi_tensor_check_floating(op->name, op->inputs, in, 1) ||
        !tshi_loss_options(ctx, desc, tshi_dtypes[target->dtype].floating) ||
        !tshi_loss_shapes(in, desc) || !tshi_rule_run(op, in, 3, desc, &output) ||
        !tshi_loss_plan(in, desc, &loss))
        return NULL;
    tshi_loss_warn_twice(logits, "tsh_softmax",
                         "tsh_cross_entropy: the logits are the result of tsh_softmax, which this "
                         "loss applies itself; give it what tsh_softmax was given");
    output.shape = tsh_shape_of(in[0]); /* shape (.., V) */
    output.shape.ndim = desc->reduction == TSH_REDUCE_NONE ? logits->ndim - 1 : 0;
    out = tshi_tensor_out(ctx, "tsh_cross_entropy", TSH_REAL, &output.shape, &output.layout);
    aux = out ? tshi_mem_alloc(ctx, TSH_MEM_STEP,
                               tshi_dtype_reals(TSHI_LOSS_KEPT * loss.rows) +
                                   (size_t)loss.rows * sizeof *loss.local)
              : NULL;
    scratch = tshi_kernel_parts(ctx, loss.rows, loss.classes) * loss.classes;
    sums = aux ? tshi_mem_alloc(ctx, TSH_MEM_STEP,
                                tshi_dtype_reals((TSHI_LOSS_SUMS + 1) * loss.rows + scratch))
               : NULL;
    if (sums) {
        loss.local = (int64_t *)tshi_mem_data(aux); /* the arrays here have the shape (rows) */
        loss.max = (tsh_real *)(void *)(loss.local + loss.rows);
        loss.log_sum = loss.max + loss.rows;
        loss.own = loss.log_sum + loss.rows;
        loss.uniform = loss.own + loss.rows;
        loss.scale = loss.uniform + loss.rows;
        tshi_loss_forward(in, &loss, (tsh_real *)tshi_mem_data(sums), out);
    }
    if (ctx->error.code == TSH_OK)
        tshi_op_record(op, out, in, 3, output.partial, &loss, sizeof loss, aux);
    else
        tshi_mem_release(ctx, aux);
    tshi_mem_release(ctx, sums);
    return ctx->error.code == TSH_OK ? out : NULL;
}
