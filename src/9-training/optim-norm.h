/* ========================================================================== */
/* >>optim-norm                                  MARK: - optim-norm (private) */
/* The norm of all gradients of all ranks, and clipping by it.                */
/* Needs: >>tape-backward >>module.                                           */
/* ========================================================================== */

/* One tsh_optim_step computes the norm of all gradients, clips them by it, and updates every
 * parameter that has a gradient. With tsh_optim_desc.zero and dp > 1 (ZeRO, Rajbhandari et al.
 * 2020), each rank of dp holds one chunk of every gradient and moment (TSHI_CHUNKED), updates that
 * chunk of the parameter, and gathers the other ranks' chunks: the same bits as without .zero. */

/* What an optimiser keeps of one parameter. Moments are allocated at the first update. */
typedef struct tshi_moments {
    tsh_tensor *param;
    /* the moments of its optimiser, such as Adam's m and v; NULL: not allocated */
    tsh_tensor *moment[TSH_MAX_MOMENTS];
    /* the description of its optimiser, defaults filled in: that of the tsh_optim, or of a group
     * with an optimiser of its own */
    const tsh_optim_desc *desc;
    double lr_scale, weight_decay; /* lr_scale: factor of the tsh_optim's lr; see tsh_optim_group */
    int64_t steps;                 /* number of updates of this parameter so far */
    /* NAdam: the product of the momenta of the first `products` steps */
    double product;
    int64_t products;
} tshi_moments;

struct tsh_optim {
    tsh_module *module;  /* the module whose parameters are optimised */
    tsh_optim_desc desc; /* the caller's tsh_optim_desc, with its defaults filled in */
    tsh_schedule schedule; /* a copy of desc.schedule, if that is not NULL */
    tsh_optim_info info; /* what tsh_optim_state returns, except lr, which is desc.lr */
    /* `count` entries: the state of each parameter, in the order of the module tree */
    tshi_moments *each;
    int count;           /* number of parameters; a tied one counts once */
    /* the number of changes of the module tree (ctx->changes) when tshi_optim_warn_late was last
     * called; -1: never */
    int changes;
    tsh_optim *older;    /* the optimiser of the ctx created before this one; NULL: none */
    tsh_outer *outer;    /* the tsh_outer made for it; NULL: none */
};

/* -- the global norm of gradients, and clipping ----------------------------- */

/* Returns the TSHI_BLOCK elements of x from element e on as tsh_real, as tshi_kernel_load does, but
 * x must be contiguous; faster for bf16. n: elements of x; pad: memory for converted elements. */
TSHI_INLINE const tsh_real *tshi_optim_load(const tshi_operand *x, int64_t e, int64_t n,
                                            tsh_real *pad) {
    const uint16_t *from = (const uint16_t *)x->data + e;
    if (x->dtype != TSH_BF16 || n - e < TSHI_BLOCK) return tshi_kernel_load(x, e, n, pad);
    for (int i = 0; i < TSHI_BLOCK; i++) pad[i] = tshi_dtype_from_bf16(from[i]);
    return pad;
}

/* Kernel: adds to **total the sum of the squares of an operand's n elements, in double. It keeps
 * TSHI_BLOCK partial sums at a time, so that the loop vectorises. */
typedef double *tshi_optim_total;
TSHI_INLINE void tshi_optim_squares_body(int64_t n, const tshi_operand *operand,
                                         const tshi_optim_total *total) {
    /* sum: the sum of the squares after the last full block; in the end, of all squares */
    double partial[TSHI_BLOCK], sum = 0;
    tsh_real pad[TSHI_BLOCK];
    int64_t e;
    for (int i = 0; i < TSHI_BLOCK; i++) partial[i] = 0;
    for (e = 0; e + TSHI_BLOCK <= n; e += TSHI_BLOCK) {
        const tsh_real *x = tshi_optim_load(operand, e, n, pad);
        for (int i = 0; i < TSHI_BLOCK; i++) partial[i] += (double)x[i] * (double)x[i];
    }
    if (e < n) {
        const tsh_real *x = tshi_optim_load(operand, e, n, pad);
        for (int i = 0; i < n - e; i++) sum += (double)x[i] * (double)x[i];
    }
    for (int i = 0; i < TSHI_BLOCK; i++) sum += partial[i];
    **total += sum;
}
TSHI_KERNEL(tshi_optim_squares, tshi_optim_total);

/* Number of elements whose squares one unit of work sums. The sums of the units are added in order,
 * so the bits are the same for any number of threads. */
enum { TSHI_OPTIM_BLOCK = 1 << 16 };

/* A sum of squares that all threads compute together: the argument of tshi_optim_sum_part. */
typedef struct tshi_squares {
    tshi_operand x; /* the n elements whose squares are summed */
    int64_t n;
    double *sums;          /* one sum per unit of TSHI_OPTIM_BLOCK elements */
    tshi_kernel_fn kernel; /* tshi_optim_squares for this CPU */
} tshi_squares;

/* Runs on one thread: sums the squares of the units [from, to), TSHI_OPTIM_BLOCK elements each. */
static void tshi_optim_sum_part(void *job, int thread, int64_t from, int64_t to) {
    const tshi_squares *all = (const tshi_squares *)job;
    (void)thread;
    for (; from < to; from++) {
        int64_t first = from * TSHI_OPTIM_BLOCK;
        tshi_operand x = all->x;
        double *sum = all->sums + from; /* the sum of unit `from` */
        *sum = 0;
        tshi_kernel_move(&x, first);
        all->kernel(tshi_base_min(TSHI_OPTIM_BLOCK, all->n - first), &x, &sum);
    }
}

/* Returns the sum of squares of the n elements of x; 0 and an error if there is no memory. */
static double tshi_optim_sum_squares(tsh_ctx *ctx, tshi_operand x, int64_t n) {
    const int64_t blocks = tshi_base_ceil(n, TSHI_OPTIM_BLOCK);
    tshi_squares all = {x, n, NULL, tshi_optim_squares[ctx->isa]};
    tshi_block *scratch; /* memory for all.sums */
    double sum = 0;
    if (!n) return 0; /* there are no elements: the shard or the chunk is empty */
    scratch = tshi_mem_alloc(ctx, TSH_MEM_STEP, (size_t)blocks * sizeof(double));
    if (!scratch) return 0;
    all.sums = (double *)tshi_mem_data(scratch);
    tshi_team_run(ctx, tshi_team_parts(ctx, blocks, 1), blocks, 1, tshi_optim_sum_part, &all);
    for (int64_t i = 0; i < blocks && !ctx->dry; i++) sum += all.sums[i];
    tshi_mem_release(ctx, scratch);
    return sum;
}

/* Adds the sum of squares of chunk k of param's gradient to sums[k], for all k; chunked 1: for this
 * rank's chunk only. A gradient that several ranks hold is added once: a replicated one on rank 0
 * of tp, that of a parameter tied across stages on the first of these stages. */
static void tshi_optim_add_squares(tsh_tensor *param, int chunked, double *sums) {
    tsh_ctx *ctx = param->ctx;
    if (tshi_tape_pending(param))
        (void)tsh_fail(ctx, TSH_ERR_STATE,
                       "norm of gradients: that of \"%s\" is pending (.defer); call tsh_sync_grads "
                       "before tsh_optim_step or tsh_clip_grad_norm",
                       param->path);
    if (!param->gr.live || (param->layout.kind != TSH_SHARDED && ctx->tp.rank != 0)) return;
    if (param->stage && param->stage - 1 != ctx->pp.rank) return; /* another stage adds it */
    for (int k = 0; k < ctx->dp.size; k++) {
        tshi_operand grad = tshi_tape_operand(param);
        if (chunked && k != ctx->dp.rank) continue;
        tshi_kernel_move(&grad, tshi_bucket_chunk(param, k));
        sums[k] += tshi_optim_sum_squares(ctx, grad, tshi_bucket_chunk_size(param, k));
    }
}

/* Sets *norm to the 2-norm of all gradients below module, the same on every rank; NaN or infinity
 * if a gradient has one. Squares are summed chunk by chunk: the same bits with and without
 * .zero. */
static tsh_result tshi_optim_norm(tsh_module *module, double *norm) {
    tsh_ctx *ctx = module->ctx;
    const int64_t begin = tshi_trace_now(ctx->trace);
    const size_t bytes = (size_t)ctx->dp.size * sizeof(double); /* size of the array `sums` */
    tshi_block *scratch = tshi_mem_alloc(ctx, TSH_MEM_STEP, bytes);
    tshi_walk at = {NULL, NULL, 0};
    /* sums[k]: sum of squares of chunk k of all gradients, k < dp.size; sum: of all chunks */
    double *sums, sum = 0;
    int k, chunked = 0; /* chunked: 1 if a parameter is TSHI_CHUNKED */
    *norm = 0;
    if (!scratch) return ctx->error.code;
    sums = (double *)tshi_mem_data(scratch);
    memset(sums, 0, bytes);
    while (tshi_module_step(module, &at))
        chunked |= !at.param->absent && (at.param->flags & TSHI_CHUNKED);
    while (tshi_module_step_once(module, &at))
        if (!at.param->absent) tshi_optim_add_squares(at.param, chunked, sums);
    if (tsh_ok(ctx) && chunked) /* chunk k was summed on rank k of dp only */
        (void)tshi_error_comm(ctx, tsh_allreduce(&ctx->dp, sums, ctx->dp.size, TSH_F64, TSH_SUM),
                              "norm of gradients");
    for (k = 0; k < ctx->dp.size; k++) sum += sums[k];
    tshi_mem_release(ctx, scratch);
    if (!tsh_ok(ctx)) return ctx->error.code;
    if (tshi_error_comm(ctx, tsh_allreduce(&ctx->tp, &sum, 1, TSH_F64, TSH_SUM),
                        "norm of gradients") == TSH_OK)
        (void)tshi_error_comm(ctx, tsh_allreduce(&ctx->pp, &sum, 1, TSH_F64, TSH_SUM),
                              "norm of gradients");
    *norm = sqrt(sum);
    if (ctx->trace)
        (void)tshi_trace_add(ctx->trace, TSHI_TRACE_OPTIM, "norm of gradients", begin, 0);
    return ctx->error.code;
}

/* Returns min(1, max / (norm + 1e-6)), the factor of torch.nn.utils.clip_grad_norm_. */
static double tshi_optim_clip_factor(double norm, double max) {
    return fmin(1, max / (norm + 1e-6));
}

TSH_API tsh_result tsh_clip_grad_norm(tsh_module *module, double max_norm, double *norm) {
    tshi_walk at = {NULL, NULL, 0};
    tshi_operand x[2];
    /* before: the norm before clipping; factor: what gradients are multiplied by */
    double before, factor;
    if (norm) *norm = 0;
    if (!module) return TSH_ERR_ARGUMENT;
    if (tshi_optim_norm(module, &before) != TSH_OK) return module->ctx->error.code;
    if (norm) *norm = before;
    factor = tshi_optim_clip_factor(before, max_norm);
    while (factor < 1 && tshi_module_step_once(module, &at)) {
        if (!at.param->gr.live) continue; /* the parameter has no gradient */
        x[0] = x[1] = tshi_tape_operand(at.param);
        tshi_map_scale_forward[at.param->ctx->isa](tsh_local_numel(at.param), x, &factor);
    }
    return TSH_OK;
}
