/* ========================================================================== */
/* >>pipeline                                      MARK: - pipeline (private) */
/* Pipeline parallelism: layers are assigned to stages, one per rank of pp.   */
/* Micro-batches go through the stages, by GPipe or 1F1B.                     */
/* Needs: >>pipeline-send.                                                    */
/* ========================================================================== */

/* Runs this stage's children on micro-batch k. Returns their output, after starting to send it to
 * the next stage, or on the last stage the loss; NULL after an error. */
static tsh_tensor *tshi_pipeline_stage_forward(tsh_pipeline *p, tshi_micro *micro, int k) {
    tsh_ctx *ctx = p->ctx;
    tsh_module *child = p->child; /* the next of the stage's children to run */
    tsh_tensor *x = p->stage > 0 ? tshi_pipeline_receive_input(p, micro) /* the stage's input */
                                 : p->desc.input(ctx, k, p->desc.user);
    int i;
    for (i = 0; i < p->counts[p->stage] && x && ctx->error.code == TSH_OK; i++) {
        x = tshi_module_call(child, &x, 1);
        child = child->next;
        tshi_tape_progress(ctx); /* lets sends in flight go on */
    }
    if (!x || ctx->error.code != TSH_OK)
        return tshi_error_null(
            ctx, TSH_ERR_ARGUMENT,
            "tsh_pipeline: stage %d has no %s of micro-batch %d: NULL was returned", p->stage,
            i ? "output" : "input", k);
    if (!tshi_tensor_check("tsh_pipeline", "x", &x, 1)) return NULL;
    if (p->stage == p->last) return p->desc.loss(ctx, x, k, p->desc.user);
    tshi_pipeline_send_output(p, x);
    return x;
}

/* -- forward and backward of one micro-batch ---------------------------------- */

/* Exchanges the tape (nodes and arena) of the micro-batch and that of the ctx. */
static void tshi_pipeline_swap(tsh_ctx *ctx, tshi_micro *micro) {
    tshi_tape *tape = &ctx->tape;
    tshi_node *newest = tape->newest; /* newest node of the ctx's tape before the exchange */
    tshi_arena arena = tape->arena;
    tape->newest = micro->newest;
    tape->arena = micro->arena;
    micro->newest = newest;
    micro->arena = arena;
}

/* Moves the step tensors created after `last` from the ctx to the micro-batch and releases their
 * values; nodes hold the values that backward needs. Tensors that the user retains stay with the
 * step. Also releases the caller's reference to `last`. */
static void tshi_pipeline_take_handles(tsh_ctx *ctx, tshi_micro *micro, tsh_tensor *last) {
    tsh_tensor *t, *next;
    /* If a callback has ended the step, `last` was released (TSHI_DEAD): begins at the head of the
     * list of step tensors. */
    t = last->flags & TSHI_DEAD ? &ctx->handles.step : last;
    for (t = t->next; t != &ctx->handles.step; t = next) {
        next = t->next;
        if (t->flags & TSHI_RETAIN) continue; /* the user retains t */
        t->prev->next = t->next;              /* unlink t from the step */
        t->next->prev = t->prev;
        tshi_tensor_insert(&micro->handles, t);
        tshi_mem_release(ctx, t->block);
        t->block = NULL;
        t->flags |= TSHI_STALE; /* reading its values is an error */
    }
    tshi_tensor_unref(last);
}

/* On the last stage: adds a micro-batch's loss and weight to the totals. */
static void tshi_pipeline_add_loss(tsh_pipeline *p, tsh_tensor *loss, int k) {
    double weight = 0; /* number of terms in the loss */
    p->total[0] += tsh_item(p->ctx, loss);
    if (p->desc.weight) weight = p->desc.weight(p->ctx, k, p->desc.user);
    p->total[1] += weight;
    if (!(weight >= 0) || weight > DBL_MAX) /* negative, infinite or NaN */
        (void)tsh_fail(p->ctx, TSH_ERR_ARGUMENT,
                       "tsh_pipeline: the weight of micro-batch %d is %g; it counts elements", k,
                       weight);
}

/* Runs the forward of micro-batch k on its own tape. */
static void tshi_pipeline_forward(tsh_pipeline *p, int k) {
    tsh_ctx *ctx = p->ctx;
    tshi_micro *micro = &p->micro[k % p->slots];
    tsh_tensor *last = ctx->handles.step.prev; /* the newest step tensor so far */
    if (!tsh_ok(ctx)) return;
    tshi_tensor_ref(last);
    tshi_pipeline_swap(ctx, micro);                        /* record on the micro-batch's tape */
    micro->out = tshi_pipeline_stage_forward(p, micro, k); /* kept for backward */
    tshi_tensor_ref(micro->out);
    if (p->stage == p->last && ctx->error.code == TSH_OK &&
        tshi_tape_check_loss(ctx, micro->out) == TSH_OK)
        tshi_pipeline_add_loss(p, micro->out, k);
    tshi_pipeline_swap(ctx, micro);
    tshi_pipeline_take_handles(ctx, micro, last); /* frees what backward does not need: the next
                                                   * micro-batch uses that memory */
}

/* Seeds backward with y's gradient. On the last stage it is 1 / micro_batches if losses are means,
 * 1 if they are sums; other stages receive it from the next stage. */
static void tshi_pipeline_seed(tsh_pipeline *p, tsh_tensor *y) {
    tsh_ctx *ctx = p->ctx;
    const int64_t n = tsh_local_numel(y);
    int64_t stride[TSH_MAX_DIMS]; /* strides of `grad` */
    tshi_block *block = tshi_mem_alloc(ctx, TSH_MEM_STEP, tshi_dtype_reals(n));
    tsh_real *grad; /* gradient of this rank's shard of y, dense */
    tshi_dest dest;
    if (!block) return;
    grad = (tsh_real *)tshi_mem_data(block);
    if (p->stage == p->last)
        grad[0] = TSHI_R(p->desc.weight ? 1.0 : 1.0 / p->desc.micro_batches);
    else
        (void)tshi_pipeline_receive_values(p, p->stage + 1, grad, n, TSH_REAL);
    tshi_tensor_strides(y->local, y->ndim, stride);
    if (ctx->error.code == TSH_OK && tshi_tape_dest_in(y, &y->base->gr, &dest))
        tshi_tape_accumulate(y, &dest, grad, stride);
    tshi_mem_release(ctx, block);
}

/* Ends a micro-batch: releases its tensors, and nodes that an error left on its tape. */
static void tshi_pipeline_end(tshi_micro *micro) {
    tshi_tape_clear(&micro->newest, &micro->arena);
    tshi_tensor_unref(micro->out);
    while (micro->handles.next != &micro->handles) tshi_tensor_release(micro->handles.next);
    micro->out = micro->input = NULL;
}

/* Runs the backward of micro-batch k and releases its memory. */
static void tshi_pipeline_backward(tsh_pipeline *p, int k) {
    tsh_ctx *ctx = p->ctx;
    tshi_micro *micro = &p->micro[k % p->slots];
    tsh_tensor *last = ctx->handles.step.prev, *y = micro->out;
    if (!tsh_ok(ctx)) return;
    tshi_tensor_ref(last);
    if ((y->base->flags & TSHI_DEAD) && y->base->node)
        (void)tsh_fail(ctx, TSH_ERR_STATE,
                       "tsh_pipeline: the output of micro-batch %d was retained, and a callback "
                       "has ended the step since; leave out tsh_retain_grad, or tsh_step_end",
                       k);
    tshi_pipeline_swap(ctx, micro);
    /* runs backward only if y depends on something that requires a gradient */
    if (y->base->requires_grad && ctx->error.code == TSH_OK) {
        tshi_pipeline_seed(p, y);
        tshi_tape_mark(ctx, y);
        tshi_tape_warn(ctx);
    }
    tshi_tape_walk(ctx);
    if (micro->input && ctx->error.code == TSH_OK) tshi_pipeline_send_grad(micro, NULL);
    tshi_pipeline_swap(ctx, micro);
    tshi_pipeline_take_handles(ctx, micro, last);
    tshi_pipeline_end(micro);
}

/* -- the schedule: GPipe or 1F1B ---------------------------------------------- */

/* Runs the schedule: `warmup` forwards, then a forward and a backward in turn (1F1B, Narayanan et
 * al. 2021), then the backwards that are left. With GPipe, warmup is the number of micro-batches.
 * The last backward may start to average gradients over dp. */
static void tshi_pipeline_run(tsh_pipeline *p) {
    const int m = p->desc.micro_batches; /* number of micro-batches */
    int f;                               /* index of the next micro-batch to go forward */
    p->total[0] = 0;
    p->total[1] = p->desc.weight ? 0 : m;
    for (f = 0; f < p->warmup; f++) tshi_pipeline_forward(p, f);
    for (int b = 0; b < m && p->ctx->error.code == TSH_OK; b++) {
        /* one forward, as long as micro-batches are left */
        if (f < m) tshi_pipeline_forward(p, f++);
        if (b == m - 1) tshi_tape_sync_begin(p->ctx); /* the last backward completes gradients */
        tshi_pipeline_backward(p, b);
    }
}

/* Starts to send this stage's gradient of a tied parameter to the other stages that hold it. */
static void tshi_pipeline_send_tied(tsh_pipeline *p, const tshi_tie *tie) {
    tsh_tensor *t = tie->param;
    for (int s = 0; s <= p->last; s++) {
        if (s == p->stage || !tie->holds[s]) continue;
        t->gr.block->refs++; /* each send holds a reference */
        tshi_pipeline_send(p, s, t->gr.block, tshi_mem_data(t->gr.block), tsh_local_numel(t),
                           TSH_REAL);
    }
}

/* Sums the gradient of a tied parameter over the stages that hold it, in stage order: the same bits
 * on each. All stages send first and then receive. If more stages hold it than a send queue has
 * entries, each stage sends only when its turn to be added comes, since full queues would block all
 * of them. */
static void tshi_pipeline_sum_tied(tsh_pipeline *p, const tshi_tie *tie) {
    tsh_ctx *ctx = p->ctx;
    tsh_tensor *t = tie->param;
    const int64_t n = tsh_local_numel(t);
    const size_t bytes = tshi_dtype_reals(n);
    tshi_block *sum = tshi_mem_alloc(ctx, TSH_MEM_STEP, bytes);
    tshi_block *part = tshi_mem_alloc(ctx, TSH_MEM_STEP, bytes);
    int s, terms = 0, at_once = tie->holders <= TSHI_PIPELINE_SENDS;
    if (part && sum && tshi_tape_complete(t)) {
        if (at_once) tshi_pipeline_send_tied(p, tie);
        for (s = 0; s <= p->last; s++) {
            tshi_block *to = terms ? part : sum; /* the first part starts the sum */
            if (!tie->holds[s]) continue;
            if (s == p->stage && !at_once) tshi_pipeline_send_tied(p, tie);
            if (s == p->stage)
                memcpy(tshi_mem_data(to), tshi_mem_data(t->gr.block), bytes);
            else
                (void)tshi_pipeline_receive(p, s, tshi_mem_data(to), n, TSH_REAL);
            if (terms++)
                tshi_tape_add_all(ctx, (tsh_real *)tshi_mem_data(sum),
                                  (const tsh_real *)tshi_mem_data(part), n);
        }
        tshi_pipeline_end_sends(p, 1);
        memcpy(tshi_mem_data(t->gr.block), tshi_mem_data(sum), bytes);
        t->sparse = t->gr.clean = 0; /* the sum is dense */
    }
    tshi_mem_release(ctx, sum);
    tshi_mem_release(ctx, part);
}

/* Broadcasts the sum of losses, and of weights if there are any, from the last stage over pp. */
static void tshi_pipeline_broadcast_totals(tsh_pipeline *p) {
    if (p->ctx->error.code == TSH_OK)
        (void)tshi_error_comm(
            p->ctx, tsh_broadcast(&p->ctx->pp, p->total, p->desc.weight ? 2 : 1, TSH_F64, p->last),
            "tsh_pipeline: broadcast of the loss");
}

/* Sets *loss to the mean loss: over this replica's micro-batches if losses are means, over their
 * terms if losses are sums (.weight), and with over_dp 1 over the terms of all replicas. */
static tsh_result tshi_pipeline_mean_loss(tsh_pipeline *p, double *loss, int over_dp) {
    tsh_ctx *ctx = p->ctx;
    if (p->desc.weight && over_dp && ctx->error.code == TSH_OK)
        (void)tshi_error_comm(ctx, tsh_allreduce(&ctx->dp, p->total, 2, TSH_F64, TSH_SUM),
                              "tsh_pipeline: sum of the losses over dp");
    tshi_error_report(ctx);
    if (loss && ctx->error.code == TSH_OK)
        *loss = p->total[1] > 0 ? p->total[0] / p->total[1] : p->total[0];
    return ctx->error.code;
}

/* Prepares tied parameters for backward. Their count of expected contributions starts at 1, one
 * more than backward delivers, so that the gradient is not averaged over dp before it is summed
 * over stages. A gradient that was left by an earlier call is a sum over stages already, the same
 * on each, so only the first stage keeps it (unless it is pending, and not summed yet). */
static void tshi_pipeline_begin_tied(tsh_pipeline *p) {
    for (const tshi_tie *tie = p->ctx->pipeline->ties; tie; tie = tie->next) {
        if (!p->ctx->tape.pending && tie->param->stage != 1 + p->stage) tsh_zero_grad(tie->param);
        tie->param->contributions = 1;
    }
}

TSH_API tsh_result tsh_pipeline_train(tsh_pipeline *pipeline, double *loss) {
    tsh_ctx *ctx = pipeline ? pipeline->ctx : NULL;
    int summed;                    /* 1: losses are sums of terms (.weight); 0: means */
    if (loss) *loss = (double)NAN; /* the result after an error */
    if (!ctx) return TSH_ERR_ARGUMENT;
    summed = pipeline->desc.weight != NULL;
    if (ctx->tape.newest || ctx->tape.no_grad)
        (void)tsh_fail(ctx, TSH_ERR_STATE, "tsh_pipeline_train: %s",
                       ctx->tape.no_grad
                           ? "gradients are off: it does not go between tsh_no_grad_begin and end"
                           : "ops are recorded already; end the step first: tsh_step_end");
    if (ctx->error.code == TSH_OK && tshi_tape_unlocked(ctx, "tsh_pipeline_train"))
        (void)tshi_tape_begin(ctx, summed, 0);
    if (!tsh_ok(ctx)) return ctx->error.code;
    tshi_pipeline_begin_tied(pipeline);
    tshi_pipeline_run(pipeline);
    tshi_error_report(ctx); /* after an error: peers may wait for what will not be sent */
    tshi_pipeline_end_sends(pipeline, 1);
    for (int i = 0; i < pipeline->slots; i++) tshi_pipeline_end(&pipeline->micro[i]);
    if (ctx->error.code == TSH_OK) (void)tshi_tape_complete_leaves(ctx);
    for (const tshi_tie *tie = ctx->pipeline->ties; tie; tie = tie->next)
        if (tie->holds[pipeline->stage] && tie->param->requires_grad && ctx->error.code == TSH_OK)
            tshi_pipeline_sum_tied(pipeline, tie);
    tshi_pipeline_broadcast_totals(pipeline);
    /* tshi_tape_sync divides the gradients by the number of terms of all losses */
    if (summed) ctx->tape.weight += pipeline->total[1];
    (void)tshi_tape_sync(ctx);
    return tshi_pipeline_mean_loss(pipeline, loss, !ctx->outers);
}

TSH_API tsh_result tsh_pipeline_evaluate(tsh_pipeline *pipeline, int micro_batches, double *loss) {
    tsh_ctx *ctx = pipeline ? pipeline->ctx : NULL;
    if (loss) *loss = (double)NAN;
    if (!ctx) return TSH_ERR_ARGUMENT;
    if (!micro_batches) micro_batches = pipeline->desc.micro_batches;
    if (micro_batches < 0)
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT, "tsh_pipeline_evaluate: %d micro-batches",
                       micro_batches);
    pipeline->total[0] = 0;
    pipeline->total[1] = pipeline->desc.weight ? 0 : micro_batches;
    tsh_no_grad_begin(ctx);
    for (int k = 0; k < micro_batches && tsh_ok(ctx); k++) {
        tsh_tensor *y;
        tsh_scope_begin(ctx); /* the scope's end frees the micro-batch's tensors */
        y = tshi_pipeline_stage_forward(pipeline, NULL, k);
        if (pipeline->stage == pipeline->last && ctx->error.code == TSH_OK)
            tshi_pipeline_add_loss(pipeline, y, k);
        tsh_scope_end(ctx);
    }
    tsh_no_grad_end(ctx);
    tshi_error_report(ctx);
    tshi_pipeline_end_sends(pipeline, 1);
    tshi_pipeline_broadcast_totals(pipeline);
    return tshi_pipeline_mean_loss(pipeline, loss, 1);
}

/* -- assigning layers to stages ------------------------------------------------- */

/* Sets p->counts, the number of children per stage, to desc.counts or, if that is NULL, to equal
 * parts. Fails if the children do not divide evenly, or desc.counts does not add up to their
 * number. */
static tsh_result tshi_pipeline_partition(tsh_pipeline *p) {
    const char *path = p->container->path;
    const int *counts = p->desc.counts;
    const int stages = p->last + 1;
    /* children: number of the container's children; sum: sum of the stages' counts so far */
    int s, children = 0, sum = 0;
    for (const tsh_module *child = p->container->first; child; child = child->next) children++;
    for (s = 0; s < stages; s++) {
        p->counts[s] = counts ? counts[s] : children / stages;
        if (p->counts[s] < 1)
            return tsh_fail(p->ctx, TSH_ERR_ARGUMENT,
                            "tsh_pipeline_new: stage %d of %d would have %d of the %d children of "
                            "\"%s\"; each takes one or more",
                            s, stages, p->counts[s], children, path);
        sum += p->counts[s];
    }
    if (sum == children) return TSH_OK;
    if (counts)
        return tsh_fail(p->ctx, TSH_ERR_ARGUMENT,
                        "tsh_pipeline_new: the counts of %d stages add up to %d, but \"%s\" has %d "
                        "children",
                        stages, sum, path, children);
    return tsh_fail(p->ctx, TSH_ERR_ARGUMENT,
                    "tsh_pipeline_new: the %d children of \"%s\" do not divide into %d stages; "
                    "say in .counts how many each stage takes",
                    children, path, stages);
}

/* Sets .stage of every module, and p->child, this stage's first child. Modules before the container
 * belong to the first stage, those after it to the last; the container and its parents to none. */
static void tshi_pipeline_assign_modules(tsh_pipeline *p) {
    tsh_module *root = p->ctx->root, *m, *child = p->container->first;
    int s = 0, left = p->counts[0], after = 0; /* left: children still to be assigned to stage s */
    for (m = root; m; m = tshi_module_next(root, m)) {
        after |= m == p->container; /* after: 1 from the container on */
        m->stage = 1 + (after ? p->last : 0);
    }
    for (m = p->container; m; m = m->parent) m->stage = 0;
    for (; child; child = child->next, left--) {
        if (!left) left = p->counts[++s]; /* the next stage's first child */
        if (s == p->stage && !p->child) p->child = child;
        for (m = child; m; m = tshi_module_next(child, m)) m->stage = 1 + s;
    }
}

/* Finds the stages whose modules have a parameter, and sets param->stage and .absent. Stages that
 * do not hold the parameter release its memory. If several hold it, it is added to p->ties. */
static void tshi_pipeline_assign_param(tsh_pipeline *p, tsh_tensor *param) {
    tsh_ctx *ctx = p->ctx;
    tshi_tie *tie = (tshi_tie *)tshi_mem_arena_alloc(ctx, &ctx->books, sizeof *tie);
    tshi_walk at = {NULL, NULL, 0};
    if (tie)
        tie->holds = (unsigned char *)tshi_mem_arena_alloc(ctx, &ctx->books, (size_t)p->last + 1);
    if (!tie || !tie->holds) return;
    while (tshi_module_step(ctx->root, &at))
        if (at.param == param && at.module->stage) tie->holds[at.module->stage - 1] = 1;
    for (int s = p->last; s >= 0; s--) {
        if (!tie->holds[s]) continue;
        param->stage = 1 + s; /* in the end, 1 + the first stage that holds it */
        tie->holders++;
    }
    param->absent = tie->holders && !tie->holds[p->stage];
    if (param->absent) tshi_tensor_drop_values(param);
    if (tie->holders < 2) return; /* the parameter is not tied across stages */
    tie->param = param;
    tie->next = p->ties;
    p->ties = tie;
}

/* Sets an error if the ranks of the world made pipelines that differ, for example in their
 * micro-batches: they would deadlock. Collective over the world. */
static void tshi_pipeline_compare(const tsh_pipeline *p) {
    const int same[4] = {p->desc.micro_batches, (int)p->desc.schedule, p->last,
                         p->desc.weight != NULL};
    uint64_t hash = tshi_rng_hash(tshi_module_count(p->ctx), same, sizeof same);
    int agree;
    hash = tshi_rng_hash(hash, p->counts, sizeof *p->counts * ((size_t)p->last + 1));
    hash = tshi_rng_hash(hash, p->container->path, strlen(p->container->path));
    (void)tshi_error_comm(p->ctx, tshi_module_same(&p->ctx->world, hash, &agree),
                          "tsh_pipeline_new");
    if (p->ctx->error.code == TSH_OK && !agree)
        (void)tsh_fail(p->ctx, TSH_ERR_ARGUMENT,
                       "tsh_pipeline_new: ranks differ in their micro-batches, schedule, counts, "
                       "weights or modules");
}

/* Checks the description and the container; returns 0 and sets an error if something is wrong. */
static int tshi_pipeline_check(const tsh_module *container, const tsh_pipeline_desc *desc) {
    tsh_ctx *ctx = container->ctx;
    if (!desc || !desc->input || !desc->loss)
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT, "tsh_pipeline_new: \"%s\" lacks %s", container->path,
                       !desc          ? "a description"
                       : !desc->input ? ".input, which gives what its first child takes"
                                      : ".loss, which takes what its last child gives");
    else if (desc->micro_batches < 1 || (unsigned)desc->schedule > TSH_PIPELINE_GPIPE)
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT,
                       "tsh_pipeline_new: micro_batches is %d, schedule %d; it takes at least one "
                       "micro-batch, and TSH_PIPELINE_1F1B or TSH_PIPELINE_GPIPE",
                       desc->micro_batches, (int)desc->schedule);
    else if (container->kind->forward != tshi_module_forward || container->forward ||
             container->prepared || container->result)
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT,
                       "tsh_pipeline_new: \"%s\" is more than its children one after the other: it "
                       "has a forward of its own, or a plan's PREPARE rule",
                       container->path);
    else if (tshi_tensor_any_recorded(ctx))
        (void)tsh_fail(ctx, TSH_ERR_STATE,
                       "tsh_pipeline_new: ops are recorded already; end the step first: "
                       "tsh_step_end");
    return tsh_ok(ctx);
}

/* Allocates a slot for each micro-batch that may be between its forward and its backward at a time.
 * Returns 0 if there is no memory. */
static int tshi_pipeline_slots(tsh_pipeline *p) {
    tsh_ctx *ctx = p->ctx;
    const int m = p->desc.micro_batches;
    p->warmup = p->desc.schedule == TSH_PIPELINE_GPIPE ? m : p->last - p->stage;
    if (p->warmup > m) p->warmup = m; /* fewer micro-batches than stages */
    p->slots = p->warmup < m ? p->warmup + 1 : m;
    p->micro = (tshi_micro *)tshi_mem_arena_alloc(ctx, &ctx->books,
                                                  (size_t)p->slots * sizeof *p->micro);
    for (int i = 0; i < p->slots && p->micro; i++) {
        tshi_tensor_ring(&p->micro[i].handles);
        p->micro[i].pipeline = p;
        p->micro[i].next = ctx->micros;
        ctx->micros = &p->micro[i]; /* list of all slots, for tsh_close */
    }
    return p->micro != NULL;
}

/* Fills in p. The ctx's first pipeline also assigns the parameters to stages; later ones must have
 * the same stages. */
static void tshi_pipeline_make(tsh_pipeline *p, tsh_module *container,
                               const tsh_pipeline_desc *desc) {
    tsh_ctx *ctx = container->ctx;
    const tsh_pipeline *before = ctx->pipeline; /* the ctx's first pipeline; NULL: p is the first */
    const size_t bytes = (size_t)ctx->pp.size * sizeof *p->counts;
    tshi_walk at = {NULL, NULL, 0};
    p->ctx = ctx;
    p->container = container;
    p->desc = *desc;
    p->stage = ctx->pp.rank;
    p->last = ctx->pp.size - 1;
    p->counts = (int *)tshi_mem_arena_alloc(ctx, &ctx->books, bytes);
    if (!p->counts || tshi_pipeline_partition(p) != TSH_OK || !tshi_pipeline_slots(p)) return;
    if (before && (before->container != p->container || memcmp(before->counts, p->counts, bytes)))
        (void)tsh_fail(ctx, TSH_ERR_STATE,
                       "tsh_pipeline_new: the children of \"%s\" are dealt to the stages already, "
                       "in another way",
                       before->container->path);
    if (!before) tshi_module_changed(ctx); /* the next collective compares the ranks' models */
    if (!before && ctx->world.size > 1) ctx->world.unchecked = ctx;
    if (tsh_ok(ctx)) tshi_pipeline_compare(p); /* collective: all ranks must call it */
    if (!tsh_ok(ctx)) return;
    tshi_pipeline_assign_modules(p);
    if (before) return; /* parameters are assigned already */
    while (tshi_module_step_once(ctx->root, &at)) tshi_pipeline_assign_param(p, at.param);
    ctx->pipeline = p;
}

TSH_API TSHI_COLD tsh_pipeline *tsh_pipeline_new(tsh_module *container,
                                                 const tsh_pipeline_desc *desc) {
    tsh_ctx *ctx = container ? container->ctx : NULL;
    tsh_pipeline *p;
    if (!ctx || ctx->error.code != TSH_OK || !tshi_pipeline_check(container, desc)) return NULL;
    p = (tsh_pipeline *)tshi_mem_arena_alloc(ctx, &ctx->books, sizeof *p);
    if (p) tshi_pipeline_make(p, container, desc);
    return tsh_ok(ctx) ? p : NULL;
}
