/* ========================================================================== */
/* >>loss-element                              MARK: - loss-element (private) */
/* Running the losses of loss-map: checks, parts, sums, backward.             */
/* Needs: >>op-reduce >>op-loss >>loss-map.                                   */
/* ========================================================================== */

/* The parameters of a call of a loss, which are also the params of its node. */
typedef struct tshi_loss_call {
    double c;       /* delta of the Huber loss, beta of the smooth L1 loss */
    double divisor; /* out = sum of the elements' losses / divisor */
    int reduced;    /* 1: out is one number; 0: out has a loss per element */
} tshi_loss_call;

/* -- operands: parts of tensors ---------------------------------------------- */

static const tsh_real tshi_loss_one = 1; /* the value of weights that are not given */

/* An operand of a loss kernel, as an array with a value per element of x (local shape,
 * row-major). */
typedef struct tshi_loss_operand {
    tshi_operand all;             /* its values; step 1: dense, 0: one value for all elements */
    int64_t stride[TSH_MAX_DIMS]; /* if `strided`: strides along x's dimensions; 0: broadcast */
    int strided;                  /* 1: the kernel gets copies of parts in a dense buffer */
} tshi_loss_operand;

/* Returns the operand that has tensor t broadcast to x's shape; data: t's values. t NULL: all
 * elements are 1. */
static tshi_loss_operand tshi_loss_operand_of(const tsh_tensor *x, const tsh_tensor *t,
                                              const void *data) {
    tshi_loss_operand o;
    int64_t dense[TSH_MAX_DIMS];
    int contiguous = 1, constant = 1;
    memset(&o, 0, sizeof o);
    o.all = tshi_kernel_reals(&tshi_loss_one, 0);
    if (!t) return o;
    tshi_tensor_strides(x->local, x->ndim, dense);
    for (int d = 0; d < x->ndim; d++) {
        const int own = d - (x->ndim - t->ndim); /* the dimension of t that is aligned with d */
        o.stride[d] = own < 0 || t->dim[own] == 1 ? 0 : t->stride[own];
        if (x->local[d] == 1) continue;
        contiguous &= o.stride[d] == dense[d];
        constant &= !o.stride[d];
    }
    o.all = tshi_kernel_operand(data, contiguous ? 1 : 0, t->dtype);
    o.strided = !contiguous && !constant;
    return o;
}

/* Copies the elements [from, from + n) of a strided operand, in row-major order of x's local shape,
 * to `to`, converted to tsh_real. */
static void tshi_loss_gather(const tsh_tensor *x, const tshi_loss_operand *o, int64_t from,
                             int64_t n, tsh_real *to) {
    const int last = x->ndim - 1;
    int64_t index[TSH_MAX_DIMS]; /* indices of the next element to copy */
    int d;
    for (d = last; d >= 0; d--) {
        index[d] = from % x->local[d];
        from /= x->local[d];
    }
    while (n > 0) {
        const int64_t run = tshi_base_min(n, x->local[last] - index[last]);
        tshi_operand y[2];
        int64_t at = 0;
        for (d = 0; d <= last; d++) at += index[d] * o->stride[d];
        y[0] = tshi_kernel_reals(to, 1);
        y[1] = tshi_kernel_operand(o->all.data, o->stride[last], o->all.dtype);
        tshi_kernel_move(&y[1], at);
        tshi_kernel_copy(run, y, NULL);
        to += run;
        n -= run;
        index[last] += run;
        for (d = last; d > 0 && index[d] == x->local[d]; d--) {
            index[d] = 0;
            index[d - 1]++;
        }
    }
}

/* A kernel's run over all local elements of x, which threads share. */
typedef struct tshi_loss_work_all {
    const tsh_tensor *x;
    tshi_kernel_fn kernel;
    tshi_loss_map_params params;
    tshi_loss_operand operand[TSHI_LOSS_MAP_OPERANDS]; /* OUT with data NULL: only sums are kept */
    tsh_real *scratch; /* buffers of `part` elements: one per piece and operand */
    int64_t part;      /* TSHI_LOSS_PART, or less if x has fewer elements */
    double *sums;      /* sum of the results of each part; NULL: not wanted */
} tshi_loss_work_all;

/* Runs the kernel on parts [from, to) of x, TSHI_LOSS_PART elements each; a tshi_team_fn. */
static void tshi_loss_parts(void *job, int piece, int64_t from, int64_t to) {
    const tshi_loss_work_all *work = (const tshi_loss_work_all *)job;
    const tsh_ctx *ctx = work->x->ctx;
    const int64_t count = tsh_local_numel(work->x), part = work->part;
    tsh_real *scratch = work->scratch + piece * TSHI_LOSS_MAP_OPERANDS * part;
    for (int64_t p = from; p < to; p++) {
        const int64_t first = p * TSHI_LOSS_PART, n = tshi_base_min(TSHI_LOSS_PART, count - first);
        const tshi_reduce_params whole = {1, n, -1, 0};
        tshi_operand operand[TSHI_LOSS_MAP_OPERANDS], sum[2];
        tsh_real total = 0; /* sum of the results of this part */
        for (int i = 0; i < TSHI_LOSS_MAP_OPERANDS; i++) {
            const tshi_loss_operand *o = &work->operand[i];
            operand[i] = o->all;
            tshi_kernel_move(&operand[i], first * o->all.step);
            if (o->all.data && !o->strided) continue;
            operand[i] = tshi_kernel_reals(scratch + i * part, 1); /* this operand's buffer */
            if (o->strided) tshi_loss_gather(work->x, o, first, n, scratch + i * part);
        }
        work->kernel(n, operand, &work->params);
        if (!work->sums) continue;
        sum[0] = tshi_kernel_reals(&total, 1);
        sum[1] = operand[TSHI_LOSS_MAP_OUT];
        tshi_reduce_sum[ctx->isa](1, sum, &whole);
        work->sums[p] = (double)total;
    }
}

/* Runs `work` on the rank's threads. Unless sum is NULL, sets *sum to the sum of the results over
 * all local elements, in the order of tsh_sum. Returns 0 if there is no memory. */
static int tshi_loss_run_all(tshi_loss_work_all *work, double *sum) {
    enum { MIN_PARTS = 8 }; /* min parts per thread: fewer would not pay */
    tsh_ctx *ctx = work->x->ctx;
    const int64_t count = tsh_local_numel(work->x), parts = tshi_base_ceil(count, TSHI_LOSS_PART);
    const int pieces = tshi_team_parts(ctx, parts, MIN_PARTS);
    tshi_block *scratch;
    work->part = tshi_base_min(TSHI_LOSS_PART, count);
    scratch = tshi_mem_alloc(ctx, TSH_MEM_STEP,
                             (size_t)parts * sizeof *work->sums +
                                 tshi_dtype_reals(pieces * TSHI_LOSS_MAP_OPERANDS * work->part));
    if (!scratch) return 0;
    work->sums = sum ? (double *)tshi_mem_data(scratch) : NULL;
    work->scratch = (tsh_real *)(void *)((double *)tshi_mem_data(scratch) + parts);
    tshi_team_run(ctx, pieces, parts, 1, tshi_loss_parts, work);
    if (sum) *sum = 0;
    for (int64_t p = 0; sum && p < parts; p++) *sum += work->sums[p];
    tshi_mem_release(ctx, scratch);
    return 1;
}

/* -- backward ------------------------------------------------------------------ */

/* Computes the gradient of input i of a loss, x (0) or the target (1). kernel, sign: see
 * tshi_loss_map_row and tshi_loss_map_params. */
static void tshi_loss_map_input_backward(tshi_node *node, int i, const tshi_kernel_fn *kernel,
                                         double sign) {
    const tshi_loss_call *call = (const tshi_loss_call *)node->params;
    const tsh_tensor *x = node->in[0];
    tsh_tensor *t = node->in[i];
    const tsh_real *g = tshi_tape_grad(node);
    /* if the losses are reduced: the gradient of each element's loss, the same for all */
    const tsh_real each = call->reduced ? TSHI_R((double)g[0] / call->divisor) : TSHI_R(0);
    tshi_loss_work_all work;
    tshi_block *scratch;
    tshi_dest dest;
    tsh_real *dx;
    if (!tshi_tape_dest(node, i, &dest)) return;
    dx = tshi_op_dense_dest(t, &dest, &scratch);
    memset(&work, 0, sizeof work);
    work.x = x;
    work.kernel = kernel[x->ctx->isa];
    work.params.c = call->c;
    work.params.sign = sign;
    work.operand[TSHI_LOSS_MAP_OUT].all = tshi_kernel_reals(dx, 1);
    for (int k = 0; k < node->n; k++)
        work.operand[TSHI_LOSS_MAP_X + k] = tshi_loss_operand_of(
            x, node->in[k], node->in[k] ? tshi_tape_saved(node, k) : NULL);
    work.operand[TSHI_LOSS_MAP_GRAD].all = call->reduced ? tshi_kernel_reals(&each, 0)
                                                         : tshi_kernel_reals(g, 1);
    if (dx && tshi_loss_run_all(&work, NULL)) tshi_op_accumulate(t, &dest, scratch);
}

/* Backward of all losses of this section: the gradients of x and of the target. */
static void tshi_loss_map_backward(tshi_node *node) {
    const tshi_loss_map_row *row = (const tshi_loss_map_row *)(const void *)node->op;
    tshi_loss_map_input_backward(node, 0, row->dx, 1);
    tshi_loss_map_input_backward(node, 1, row->dt ? row->dt : row->dx, row->dt ? 1 : -1);
}

/* -- checks of the inputs ------------------------------------------------------ */

/* Returns 0 and an error: the shapes of x and the target differ. Its sentence says how to make them
 * alike. */
static TSHI_COLD int tshi_loss_refuse_shapes(const char *op, const tsh_tensor *x,
                                             const tsh_tensor *target) {
    char tx[TSHI_TEXT_SIZE], tt[TSHI_TEXT_SIZE];
    const int more = x->ndim - target->ndim; /* how many dimensions x has more than target */
    const tsh_tensor *longer = more > 0 ? x : target, *shorter = more > 0 ? target : x;
    int squeezes = more * more == 1 && longer->dim[longer->ndim - 1] == 1;
    for (int d = 0; d < shorter->ndim && squeezes; d++)
        squeezes = longer->dim[d] == shorter->dim[d];
    return tsh_fail(x->ctx, TSH_ERR_SHAPE,
                    "%s: x %s and target %s must have the same shape, they are not broadcast%s", op,
                    tshi_tensor_text(x, tx), tshi_tensor_text(target, tt),
                    !squeezes  ? "; tsh_reshape gives one of them that of the other"
                    : more > 0 ? ": tsh_squeeze(x, -1), or tsh_unsqueeze(target, -1)"
                               : ": tsh_squeeze(target, -1), or tsh_unsqueeze(x, -1)") == TSH_OK;
}

/* Returns 1 if the target is floating; 0 and an error if it has integers, such as class indices. */
static int tshi_loss_check_target(const char *op, const tsh_tensor *target) {
    return tshi_dtypes[target->dtype].floating ||
           tshi_error_zero(target->ctx, TSH_ERR_DTYPE,
                           "%s: target is %s, not %s; of numbers: tsh_cast(target, TSH_REAL); "
                           "class indices are for tsh_cross_entropy",
                           op, tshi_dtype_name(target->dtype), tshi_dtype_name(TSH_REAL));
}

/* Checks that a weight, named `name`, broadcasts to x's shape, and replaces it by this rank's shard
 * if it is replicated where x is sharded. w: the weight, or NULL. Returns 0 after an error. */
static int tshi_loss_weight(const char *op, const char *name, const tsh_tensor *x, tsh_tensor **w) {
    tsh_tensor *t = *w;
    char tx[TSHI_TEXT_SIZE], tw[TSHI_TEXT_SIZE];
    int skip, fits, own;
    if (!t) return 1;
    skip = x->ndim - t->ndim; /* dimensions of x that the weight lacks */
    fits = skip >= 0;
    for (int d = 0; d < t->ndim && fits; d++)
        fits = t->dim[d] == 1 || t->dim[d] == x->dim[d + skip];
    if (!fits)
        return tshi_error_zero(x->ctx, TSH_ERR_SHAPE,
                               "%s: %s %s is not broadcast to x's shape %s%s", op, name,
                               tshi_tensor_text(t, tw), tshi_tensor_text(x, tx),
                               t->ndim == 1 && x->ndim == 2 && t->dim[0] == x->dim[0]
                                   ? "; of one number per row: tsh_unsqueeze(weight, -1)"
                                   : "");
    own = x->layout.dim - skip; /* the dimension of t along which x is sharded */
    if (x->layout.kind != TSH_SHARDED || t->layout.kind != TSH_REPLICATED || own < 0 ||
        t->dim[own] == 1)
        return 1;
    tsh_no_grad_begin(x->ctx);
    if (t->dim[own] == x->dim[x->layout.dim]) {
        tsh_layout layout = x->layout;
        layout.dim = own;
        *w = tsh_redistribute(t, layout);
    }
    tsh_no_grad_end(x->ctx);
    return *w != NULL;
}

/* Returns 1 if all elements of x and the target are probabilities; else 0 and an error that names
 * the first that is not. */
static TSHI_COLD int tshi_loss_check_probabilities(const char *op, tsh_tensor *const *in) {
    for (int k = 0; k < 2; k++) {
        const tsh_tensor *t = in[k];
        int64_t index[TSH_MAX_DIMS] = {0};
        char place[TSHI_TEXT_SIZE];
        for (int64_t e = 0; e < tsh_local_numel(t); e++) {
            int64_t at = 0;
            double v;
            for (int d = 0; d < t->ndim; d++) at += index[d] * t->stride[d];
            v = tshi_dtype_get(t->dtype, tshi_tensor_at(t), at);
            if (!(v >= 0 && v <= 1)) {
                for (int d = 0; d < t->ndim; d++) index[d] = tshi_tensor_global(t, d, index[d]);
                return tshi_error_zero(
                    t->ctx, TSH_ERR_ARGUMENT, "%s: %s is %g at %s, not a probability from 0 to 1%s",
                    op, k ? "target" : "x", v, tshi_tensor_sizes(index, t->ndim, place),
                    k ? ""
                      : "; if x is logits, without tsh_sigmoid: "
                        "tsh_binary_cross_entropy_with_logits");
            }
            for (int d = t->ndim - 1; d >= 0 && ++index[d] == t->local[d]; d--) index[d] = 0;
        }
    }
    return 1;
}

/* Returns the options of a call; zeros if desc is NULL. */
static tsh_loss_desc tshi_loss_options_of(const tsh_loss_desc *desc) {
    tsh_loss_desc usual;
    memset(&usual, 0, sizeof usual);
    return desc ? *desc : usual;
}

/* Checks the reduction and pos_weight of a loss. Returns 0 after an error. */
static int tshi_loss_check_options(tsh_ctx *ctx, const tshi_loss_map_row *row,
                                   const tsh_loss_desc *desc) {
    const int batch = desc->reduction == TSH_REDUCE_BATCHMEAN;
    if ((unsigned)desc->reduction > (unsigned)TSH_REDUCE_BATCHMEAN)
        return tshi_error_zero(ctx, TSH_ERR_ARGUMENT, "%s: %d is no reduction", row->op.name,
                               (int)desc->reduction);
    if (batch && !(row->flags & TSHI_LOSS_BATCH))
        return tshi_error_zero(ctx, TSH_ERR_ARGUMENT,
                               "%s: TSH_REDUCE_BATCHMEAN is for tsh_kl_div; here: "
                               "TSH_REDUCE_SUM, and tsh_scale by 1 / the batch size",
                               row->op.name);
    if (desc->pos_weight && !(row->flags & TSHI_LOSS_POSITIVE))
        return tshi_error_zero(ctx, TSH_ERR_ARGUMENT,
                               "%s: pos_weight is for tsh_binary_cross_entropy_with_logits; here: "
                               "weight, a factor per element",
                               row->op.name);
    return 1;
}

/* Checks the options and the inputs of a loss: x, target, weight and pos_weight, of which the last
 * two may be NULL. Returns 0 after an error. */
static int tshi_loss_check(const tshi_loss_map_row *row, tsh_tensor **in,
                           const tsh_loss_desc *desc) {
    const char *op = row->op.name;
    tsh_tensor *x = in[0];
    tsh_ctx *ctx = tshi_tensor_check(op, row->op.inputs, in, 2);
    int same;
    if (!ctx || !tshi_loss_check_options(ctx, row, desc) || !tshi_loss_check_target(op, in[1]) ||
        !tshi_tensor_check_floating(op, row->op.inputs, in, 2))
        return 0;
    if ((in[2] && !tshi_tensor_check_floating(op, "weight", &in[2], 1)) ||
        (in[3] && !tshi_tensor_check_floating(op, "pos_weight", &in[3], 1)))
        return 0;
    if ((in[2] && in[2]->ctx != ctx) || (in[3] && in[3]->ctx != ctx))
        return tshi_error_zero(ctx, TSH_ERR_ARGUMENT, "%s: a weight belongs to another ctx", op);
    same = x->ndim == in[1]->ndim;
    for (int d = 0; d < x->ndim && same; d++) same = x->dim[d] == in[1]->dim[d];
    if (!same) return tshi_loss_refuse_shapes(op, x, in[1]);
    return tshi_loss_weight(op, "weight", x, &in[2]) &&
           tshi_loss_weight(op, "pos_weight", x, &in[3]);
}

/* -- forward ------------------------------------------------------------------- */

/* Returns what the sum of the losses is divided by. If the mean divides by the sum of the weights,
 * computes it, over all ranks if x is sharded. losses: the run of the loss. */
static double tshi_loss_divisor(const tshi_loss_map_row *row, tsh_reduction reduction,
                                const tshi_loss_work_all *losses, int weighted) {
    tshi_loss_work_all work = *losses;
    const tsh_tensor *x = work.x;
    tsh_ctx *ctx = x->ctx;
    double sum = 0;
    if (reduction == TSH_REDUCE_BATCHMEAN) return x->ndim ? (double)x->dim[0] : 1;
    if (reduction != TSH_REDUCE_MEAN) return 1;
    if (!weighted || !(row->flags & TSHI_LOSS_BY_WEIGHT)) return (double)tsh_numel(x);
    work.kernel = tshi_loss_map_weights[ctx->isa];
    (void)tshi_loss_run_all(&work, &sum);
    if (x->layout.kind == TSH_SHARDED && ctx->tp.size > 1)
        (void)tshi_error_comm(ctx, tsh_allreduce(&ctx->tp, &sum, 1, TSH_F64, TSH_SUM),
                              "a weighted loss: all-reduce of the sum of the weights");
    return sum;
}

/* Computes a loss and records the call. c: delta of the Huber loss, beta of the smooth L1 loss. */
static tsh_tensor *tshi_loss_apply(const tshi_loss_map_row *row, tsh_tensor *x, tsh_tensor *target,
                                   const tsh_loss_desc *desc, double c) {
    tsh_tensor *in[4] = {x, target, desc->weight, desc->pos_weight}, *out;
    tshi_loss_call call = {c, 1, desc->reduction != TSH_REDUCE_NONE};
    tshi_loss_work_all work;
    tsh_ctx *ctx;
    const int sums = call.reduced || (row->flags & TSHI_LOSS_CHECKED);
    double sum = 0;
    tshi_output output;
    if (!tshi_loss_check(row, in, desc) || !tshi_rule_run(&row->op, in, 4, desc, &output))
        return NULL;
    ctx = x->ctx;
    output.shape = call.reduced ? tsh_shape0() : tsh_shape_of(x);
    out = tshi_tensor_out(ctx, row->op.name, TSH_REAL, &output.shape, &output.layout);
    if (!out) return NULL;
    memset(&work, 0, sizeof work);
    work.x = x;
    work.kernel = row->forward[ctx->isa];
    work.params.c = c;
    for (int i = 0; i < 4; i++)
        work.operand[TSHI_LOSS_MAP_X + i] = tshi_loss_operand_of(
            x, in[i], in[i] ? tshi_tensor_at(in[i]) : NULL);
    call.divisor = tshi_loss_divisor(row, desc->reduction, &work, in[2] != NULL);
    if (!call.reduced)
        work.operand[TSHI_LOSS_MAP_OUT].all = tshi_kernel_reals(tshi_tensor_values(out), 1);
    if (!tshi_loss_run_all(&work, sums ? &sum : NULL)) return NULL;
    if (call.reduced) tshi_tensor_values(out)[0] = TSHI_R(sum / call.divisor);
    if (sum != sum && (row->flags & TSHI_LOSS_CHECKED))
        (void)tshi_loss_check_probabilities(row->op.name, in);
    tshi_op_record(&row->op, out, in, 4, output.partial, &call, sizeof call, NULL);
    return ctx->error.code == TSH_OK ? out : NULL;
}

/* Defines tshi_loss_<name>_row. inputs: names of the inputs for errors; see tshi_loss_map_row. */
#define TSHI_LOSS_ROW(name, public, inputs, flags, forward, dx, dt)                                \
    static const tshi_loss_map_row tshi_loss_##name##_row = {                                      \
        {public, inputs, tshi_rule_loss, tshi_loss_map_backward,                                   \
         TSHI_X | TSHI_TARGET | TSHI_CLASS_WEIGHTS | TSHI_POS_WEIGHT, 0},                          \
        flags,                                                                                     \
        tshi_loss_map_##forward,                                                                   \
        tshi_loss_map_##dx,                                                                        \
        dt};
/* Defines the public function of a loss without delta or beta. */
#define TSHI_LOSS_FUNCTION(name, public)                                                           \
    TSH_API tsh_tensor *public(tsh_tensor * x, tsh_tensor * target, const tsh_loss_desc *desc) {   \
        const tsh_loss_desc given = tshi_loss_options_of(desc);                                    \
        return tshi_loss_apply(&tshi_loss_##name##_row, x, target, &given, 0);                     \
    }

TSHI_LOSS_ROW(mse, "tsh_mse_loss", "x target weight", TSHI_LOSS_BY_WEIGHT, mse, mse_dx, NULL)
TSHI_LOSS_ROW(l1, "tsh_l1_loss", "x target weight", TSHI_LOSS_BY_WEIGHT, l1, l1_dx, NULL)
TSHI_LOSS_ROW(huber, "tsh_huber_loss", "x target weight", 0, huber, huber_dx, NULL)
TSHI_LOSS_ROW(smooth_l1, "tsh_smooth_l1_loss", "x target weight", 0, smooth_l1, smooth_l1_dx, NULL)
TSHI_LOSS_ROW(bce, "tsh_binary_cross_entropy", "x target weight", TSHI_LOSS_CHECKED, bce, bce_dx,
              tshi_loss_map_bce_dt)
TSHI_LOSS_ROW(logits, "tsh_binary_cross_entropy_with_logits", "x target weight pos_weight",
              TSHI_LOSS_POSITIVE, logits, logits_dx, tshi_loss_map_logits_dt)
TSHI_LOSS_ROW(kl, "tsh_kl_div", "x target weight", TSHI_LOSS_BATCH, kl, kl_dx, tshi_loss_map_kl_dt)
TSHI_LOSS_ROW(kl_log, "tsh_kl_div", "x target weight", TSHI_LOSS_BATCH, kl_log, kl_log_dx,
              tshi_loss_map_kl_log_dt)
#undef TSHI_LOSS_ROW

TSHI_LOSS_FUNCTION(mse, tsh_mse_loss)
TSHI_LOSS_FUNCTION(l1, tsh_l1_loss)
TSHI_LOSS_FUNCTION(bce, tsh_binary_cross_entropy)
#undef TSHI_LOSS_FUNCTION

TSH_API tsh_tensor *tsh_huber_loss(tsh_tensor *x, tsh_tensor *target, const tsh_loss_desc *desc) {
    const tsh_loss_desc given = tshi_loss_options_of(desc);
    if (x && !(given.delta >= 0 && given.delta <= DBL_MAX))
        return tshi_error_null(x->ctx, TSH_ERR_ARGUMENT,
                               "tsh_huber_loss: delta is %g, not a finite number above 0 (0: 1)",
                               given.delta);
    return tshi_loss_apply(&tshi_loss_huber_row, x, target, &given,
                           given.delta > 0 ? given.delta : 1);
}

TSH_API tsh_tensor *tsh_smooth_l1_loss(tsh_tensor *x, tsh_tensor *target,
                                       const tsh_loss_desc *desc) {
    const tsh_loss_desc given = tshi_loss_options_of(desc);
    if (x && !(given.beta >= TSH_ZERO && given.beta <= DBL_MAX))
        return tshi_error_null(x->ctx, TSH_ERR_ARGUMENT,
                               "tsh_smooth_l1_loss: beta is %g, not a finite number from 0 up (0: "
                               "1; TSH_ZERO: 0)",
                               given.beta);
    return tshi_loss_apply(&tshi_loss_smooth_l1_row, x, target, &given,
                           tshi_base_option(given.beta, 1));
}

TSH_API tsh_tensor *tsh_binary_cross_entropy_with_logits(tsh_tensor *x, tsh_tensor *target,
                                                         const tsh_loss_desc *desc) {
    const tsh_loss_desc given = tshi_loss_options_of(desc);
    tshi_loss_warn_twice(x, "tsh_sigmoid",
                         "tsh_binary_cross_entropy_with_logits: x is the result of tsh_sigmoid, "
                         "which this loss applies itself; give it the logits");
    return tshi_loss_apply(&tshi_loss_logits_row, x, target, &given, 0);
}

TSH_API tsh_tensor *tsh_kl_div(tsh_tensor *x, tsh_tensor *target, const tsh_loss_desc *desc) {
    const tsh_loss_desc given = tshi_loss_options_of(desc);
    tshi_loss_warn_twice(x, "tsh_softmax",
                         "tsh_kl_div: x is the result of tsh_softmax, but this loss takes "
                         "logarithms: tsh_log_softmax");
    return tshi_loss_apply(given.log_target ? &tshi_loss_kl_log_row : &tshi_loss_kl_row, x, target,
                           &given, 0);
}
