/* ========================================================================== */
/* >>recompute                                    MARK: - recompute (private) */
/* Activation checkpoints: modules that backward computes again.              */
/* Needs: >>tape-leaf >>module.                                               */
/* ========================================================================== */

/* Activation checkpointing (Chen et al. 2016). Forward runs without recording; the tape gets one
 * node, which holds the inputs and the counters that random numbers are keyed by. Backward of this
 * node (tshi_recompute_replay) restores the counters, so that dropout draws the same masks, runs
 * the module again on a tape of its own, and runs backward through that tape. Invariant: of outer
 * tensors that require a gradient, the recomputed ops read only leaves and the node's inputs. */

/* State of one module at its forward, which the recomputation restores. */
typedef struct tshi_module_calls {
    const tsh_module *module; /* the module that the state belongs to */
    uint64_t dropout_calls;   /* the module's dropout_calls at the forward */
    int evaluating;           /* the module's evaluating at the forward */
    tshi_adapter *adapter;    /* the adapter that was active at the forward; NULL: none */
    tsh_tensor *segments;     /* the module's segments at the forward (tsh_set_segments) */
} tshi_module_calls;

/* max number of inputs of a checkpoint's node: those of the module, then each distinct segments
 * tensor (tsh_set_segments) of the modules below it */
enum { TSHI_RECOMPUTE_INPUTS = TSHI_MODULE_INPUTS + 8 };

/* What the recomputation of a checkpoint restores: counters of random draws of the ctx and of all
 * modules, the modules' modes (training or not) and active adapters, saved at the forward. */
typedef struct tshi_rng_counts {
    tsh_module *module;                  /* the checkpointed module */
    int inputs;                          /* number of inputs of the module */
    uint64_t randn_calls, dropout_calls; /* the ctx's counters, at the forward */
    /* shape (modules + 1): one entry per module, in pre-order, and a zeroed one at the end */
    tshi_module_calls *each;
} tshi_rng_counts;

/* Copies the current counters, modes and active adapters into the tape's arena. Returns NULL and
 * sets an error if there is no memory. */
static tshi_rng_counts *tshi_recompute_save_counts(tsh_module *module) {
    tsh_ctx *ctx = module->ctx;
    const size_t n = (size_t)tshi_module_count(ctx) + 1; /* + 1: the zeroed entry at the end */
    tshi_rng_counts *counts = (tshi_rng_counts *)tshi_mem_arena_alloc(
        ctx, &ctx->tape.arena, sizeof *counts + n * sizeof *counts->each);
    size_t i = 0;
    if (!counts) return NULL;
    counts->module = module;
    counts->randn_calls = ctx->randn_calls;
    counts->dropout_calls = ctx->dropout_calls;
    counts->each = (tshi_module_calls *)(void *)(counts + 1); /* `each` lies after the struct */
    for (tsh_module *m = ctx->root; m; m = tshi_module_next(ctx->root, m)) {
        counts->each[i].module = m;
        counts->each[i].evaluating = m->evaluating;
        counts->each[i].segments = m->segments;
        counts->each[i].adapter = m->adapter;
        counts->each[i++].dropout_calls = m->dropout_calls;
    }
    return counts;
}

/* Restores saved counters, modes and active adapters. A module added since the save gets a counter
 * of 0 and keeps its mode. */
static void tshi_recompute_restore_counts(tsh_ctx *ctx, const tshi_rng_counts *counts) {
    size_t i = 0;
    ctx->randn_calls = counts->randn_calls;
    ctx->dropout_calls = counts->dropout_calls;
    for (tsh_module *m = ctx->root; m; m = tshi_module_next(ctx->root, m)) {
        const int known = counts->each[i].module == m;
        m->dropout_calls = known ? counts->each[i].dropout_calls : 0;
        if (known) m->evaluating = counts->each[i].evaluating;
        if (known) m->adapter = counts->each[i].adapter;
        i += (size_t)known;
    }
}

/* Appends to in, the n inputs of a checkpointed module, the segments tensors (tsh_set_segments) of
 * the modules below it, each once. Returns the new number of inputs; 0 and an error if there are
 * too many. */
static int tshi_recompute_add_segments(tsh_module *module, tsh_tensor **in, int n) {
    for (tsh_module *m = module; m; m = tshi_module_next(module, m)) {
        int k = 0;
        while (k < n && in[k] != m->segments) k++;
        if (!m->segments || k < n) continue;
        if (n == TSHI_RECOMPUTE_INPUTS)
            return tshi_error_zero(module->ctx, TSH_ERR_ARGUMENT,
                                   "tsh_checkpoint: more than %d tensors are inputs, or segments "
                                   "of modules below \"%s\"; set the same for all of these "
                                   "(tsh_set_segments)",
                                   TSHI_RECOMPUTE_INPUTS, module->path);
        in[n++] = m->segments;
    }
    return n;
}

/* Before a recomputation (x not NULL), gives the modules below the checkpoint the segments that
 * they had at its forward; x has the saved values of the node's inputs, these segments among them.
 * After it (x NULL), gives them back their present segments, from `now`. */
static void tshi_recompute_swap_segments(const tshi_node *node, const tshi_rng_counts *now,
                                         tsh_tensor *const *x) {
    const tshi_rng_counts *before = (const tshi_rng_counts *)node->params;
    const tshi_module_calls *old = before->each, *own = now->each;
    while (old->module != before->module) old++;
    while (own->module != before->module) own++;
    for (tsh_module *m = before->module; m; m = tshi_module_next(before->module, m)) {
        /* a module added since the forward has no entry in old, one added by the recomputation none
         * in own */
        tsh_tensor *wanted = old->module == m ? (old++)->segments : NULL;
        tsh_tensor *current = own->module == m ? (own++)->segments : NULL;
        int k = 0;
        if (x) {
            while (k < node->n && node->in[k] != wanted) k++;
            m->segments = wanted && k < node->n ? x[k] : NULL;
            tshi_tensor_ref(m->segments);
        } else {
            tshi_tensor_unref(m->segments);
            m->segments = current;
        }
    }
}

/* Checks that of outer tensors that require a gradient, the recomputed ops read only leaves and the
 * checkpoint's inputs: the gradient of another might be all-reduced already. If not, sets and
 * returns an error. */
static tsh_result tshi_recompute_check_inputs(const tshi_node *node) {
    tsh_ctx *ctx = node->out->ctx;
    const tshi_node *inner; /* the node of a recomputed op */
    int k;                  /* index of the checkpoint's input whose base the op reads */
    /* visits all recomputed ops: the tape holds no others */
    for (inner = ctx->tape.newest; inner; inner = inner->older)
        for (int i = 0; i < inner->n; i++) {
            const tsh_tensor *base = inner->in[i] ? inner->in[i]->base : NULL;
            /* the op may read any leaf, and any tensor that was made inside the checkpoint */
            if (!base || !base->requires_grad || !base->node || base->depth >= ctx->depth) continue;
            for (k = 0; k < node->n && !(node->in[k] && node->in[k]->base == base);) k++;
            if (k == node->n) /* the base belongs to no input of the checkpoint */
                return tsh_fail(ctx, TSH_ERR_STATE,
                                "tsh_checkpoint: the forward reads what %s gave, which wants a "
                                "gradient, but is none of its inputs; make it one",
                                base->node->op->name);
        }
    return TSH_OK;
}

/* Backward of a checkpoint: gives the recomputed output y the gradient of the checkpoint's output
 * and runs backward through the recomputed ops. A partial gradient is all-reduced first, unless y
 * is a leaf, was made outside the checkpoint, or its op accepts partial gradients. */
static void tshi_recompute_backward(tshi_node *node, tsh_tensor *y) {
    tsh_ctx *ctx = y->ctx;
    tsh_tensor *out = node->out, *base = y->base;
    /* 1: a partial gradient may be accumulated without an all-reduce */
    const int as_it_is = !base->node || tshi_tape_accepts_partial(base->node) ||
                         base->depth < ctx->depth;
    const tshi_accumulator *from[2] = {&out->gr, &out->gp}; /* R gradient, partial gradient */
    /* accumulators of y that the R gradient and the partial gradient are added to */
    tshi_accumulator *to[2] = {&base->gr, as_it_is ? &base->gp : &base->gr};
    tshi_dest dest; /* the part of *to[i] that belongs to y, which may be a view */
    if (!base->requires_grad || !(out->gr.live || out->gp.live)) return; /* no gradient arrived */
    if (out->gp.live && !as_it_is)
        (void)tshi_wire_allreduce(ctx, TSHI_WIRE_ACTIVATION, TSH_SUM, tshi_mem_data(out->gp.block),
                                  tsh_local_numel(out), TSH_REAL,
                                  "tsh_backward: all-reduce of the gradient of a checkpoint's "
                                  "output");
    for (int i = 0; i < 2 && ctx->error.code == TSH_OK; i++)
        if (from[i]->live && tshi_tape_dest_in(y, to[i], &dest))
            tshi_tape_accumulate(y, &dest, (const tsh_real *)tshi_mem_data(from[i]->block),
                                 out->stride);
    if (out->gp.live && as_it_is && base->depth >= ctx->depth) base->partial_contributions = 1;
    tshi_tape_mark(ctx, y);                       /* marks the nodes that y depends on */
    tshi_tape_release_values(ctx, y, ctx->depth); /* frees values that neither y nor a node holds */
    tshi_tape_walk(ctx);                          /* runs backward of the ops */
}

/* Runs the module's forward. Returns NULL and sets an error if the output cannot be used as a
 * tensor by further ops. */
static tsh_tensor *tshi_recompute_run_checked(tsh_module *module, tsh_tensor **in, int n) {
    tsh_tensor *y = tshi_module_run(module, in, n);
    return y && tshi_tensor_check("tsh_checkpoint", "output", &y, 1) ? y : NULL;
}

/* Backward of the checkpoint's node: runs the module again on a tape that holds only its ops. Each
 * input is a new tensor with the saved values whose base is that of the original input, so
 * gradients that the recomputed ops compute are accumulated into the original. */
static void tshi_recompute_replay(tshi_node *node) {
    const tshi_rng_counts *before = (const tshi_rng_counts *)node->params, *now;
    tsh_ctx *ctx = node->out->ctx;
    tshi_node *outer = ctx->tape.newest;             /* the newest node of the outer tape */
    tsh_tensor *x[TSHI_RECOMPUTE_INPUTS], *y = NULL; /* x: inputs, y: output of the recomputation */
    int i, no_grad = ctx->tape.no_grad;              /* no_grad: restored at the end */
    now = tshi_recompute_save_counts(before->module);
    if (!now) return;                           /* no memory */
    tshi_recompute_restore_counts(ctx, before); /* draws the same dropout masks */
    ctx->tape.newest = NULL;                    /* starts an empty tape */
    ctx->tape.no_grad = 0; /* record even if the caller is in a no_grad scope */
    tsh_scope_begin(ctx);  /* its end frees all recomputed tensors */
    for (i = 0; i < node->n; i++) {
        tsh_tensor *in = node->in[i];
        /* a view: the gradient of x[i] is added to that of the input itself */
        x[i] = in ? tshi_tensor_view_of(in, node->saved[i]) : NULL;
    }
    ctx->tape.replaying++; /* batch norm does not update its running statistics again */
    tshi_recompute_swap_segments(node, now, x);
    if (ctx->error.code == TSH_OK)
        y = tshi_recompute_run_checked(before->module, x, before->inputs);
    tshi_recompute_swap_segments(node, now, NULL);
    ctx->tape.replaying--;
    tshi_recompute_restore_counts(ctx, now); /* later ops draw as if nothing was recomputed */
    if (y && tshi_recompute_check_inputs(node) == TSH_OK) tshi_recompute_backward(node, y);
    tshi_tape_walk(ctx); /* if an error stopped backward, releases the nodes that are left */
    tsh_scope_end(ctx);
    ctx->tape.no_grad = no_grad;
    ctx->tape.newest = outer; /* back to the outer tape */
}

/* Runs the forward without recording, in a scope that frees every tensor but the output. */
static tsh_tensor *tshi_recompute_run_no_grad(tsh_module *module, tsh_tensor **in, int n) {
    tsh_ctx *ctx = module->ctx;
    /* y: the output; form: a copy of it, for its shape and layout */
    tsh_tensor *y, form;
    tshi_block *block = NULL; /* the output's values, referenced past the end of the scope */
    tsh_scope_begin(ctx);
    ctx->tape.no_grad++; /* ops are not recorded */
    y = tshi_recompute_run_checked(module, in, n);
    if (y && !tshi_tensor_is_dense(y)) y = tshi_op_copy("tsh_checkpoint", y);
    ctx->tape.no_grad--;
    if (y) {
        form = *y;
        block = y->block;
        block->refs++; /* survives tsh_scope_end */
    }
    tsh_scope_end(ctx);
    if (y) y = tshi_tensor_detached(&form, block);
    tshi_mem_release(ctx, block);
    return y;
}

/* Returns the number of parameters below module; a tied one counts once per module that has it.
 * Writes them to `list`, unless that is NULL, and adds to *trained the number of those that require
 * a gradient. */
static int tshi_recompute_params(tsh_module *module, tsh_tensor **list, int *trained) {
    tshi_walk at = {NULL, NULL, 0};
    int n = 0;
    for (; tshi_module_step(module, &at); n++) {
        if (list) list[n] = at.param;
        *trained += at.param->requires_grad;
    }
    return n;
}

static const tshi_op tshi_module_checkpoint_op = {
    "tsh_checkpoint", /* name in errors and traces */
    NULL,
    NULL,
    tshi_recompute_replay,             /* function that runs backward */
    (1u << TSHI_RECOMPUTE_INPUTS) - 1, /* bits of inputs whose values are saved: all */
    TSHI_OP_ACCEPTS_PARTIAL | TSHI_OP_ACCEPTS_RETAINED};

/* Runs a checkpointed module's forward and records one node for all of it. */
static tsh_tensor *tshi_recompute_checkpoint(tsh_module *module, tsh_tensor **in, int n) {
    tsh_ctx *ctx = module->ctx;
    tshi_rng_counts *counts;
    tsh_tensor *y, *all[TSHI_RECOMPUTE_INPUTS]; /* all: the inputs, then segments */
    tshi_node *node;
    int leaves, trained = 0; /* number of parameters; number of those that require a gradient */
    int count;               /* length of `all` */
    if (n > TSHI_MODULE_INPUTS)
        return tshi_error_null(ctx, TSH_ERR_ARGUMENT,
                               "tsh_checkpoint: takes %d inputs at most, not %d",
                               TSHI_MODULE_INPUTS, n);
    if (n > 0) memcpy(all, in, (size_t)n * sizeof *in);
    count = tshi_recompute_add_segments(module, all, n);
    if (ctx->error.code != TSH_OK) return NULL;
    for (int i = 0; i < count; i++) {
        const char *name = i < n ? "input" : "segments";
        if (all[i] && !tshi_tensor_check("tsh_checkpoint", name, &all[i], 1)) return NULL;
    }
    counts = tshi_recompute_save_counts(module); /* before the forward draws random numbers */
    if (counts) counts->inputs = n;
    ctx->tape.locked++; /* no callback may end the step: the tape's arena holds counts */
    y = counts ? tshi_recompute_run_no_grad(module, in, n) : NULL;
    ctx->tape.locked--;
    leaves = y ? tshi_recompute_params(module, NULL, &trained) : 0;
    if (!y || (!tshi_tape_records(ctx, in, n) && !trained)) return y;
    /* Marks the gradients of all inputs as possibly partial: the recomputation decides which
     * are. */
    node = tshi_tape_add(&tshi_module_checkpoint_op, y, all, count, (1u << n) - 1,
                         (size_t)leaves * sizeof *node->leaves);
    if (!node) return NULL;
    node->leaves = (tsh_tensor **)node->params; /* memory that tshi_tape_add reserved for them */
    node->leaf_count = tshi_recompute_params(module, node->leaves, &trained);
    for (int i = 0; i < leaves; i++) tshi_tensor_ref(node->leaves[i]);
    node->params = counts; /* what tshi_recompute_replay reads */
    return y;
}
