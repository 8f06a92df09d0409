/* ========================================================================== */
/* >>module-tree                                MARK: - module-tree (private) */
/* Adds modules and parameters to the tree; changes layouts of parameters.    */
/* Needs: >>recompute >>module-same.                                          */
/* ========================================================================== */

/* -- running a module ------------------------------------------------------- */

/* Runs a module, checkpointed or not. ctx->module is the module while it runs: errors and traces
 * name it. */
static tsh_tensor *tshi_module_call(tsh_module *module, tsh_tensor **in, int n) {
    tsh_ctx *ctx = module->ctx;
    const int64_t begin = tshi_trace_now(ctx->trace); /* start of the module's event in the trace */
    const tsh_module *outer = ctx->module;            /* the caller's module, restored below */
    tsh_tensor *y;
    ctx->module = module; /* errors name its path */
    y = !module->checkpoint ? tshi_module_run(module, in, n)
        : ctx->tape.no_grad ? tshi_recompute_run_no_grad(module, in, n)
                            : tshi_recompute_checkpoint(module, in, n);
    ctx->module = outer; /* restores the caller's module, after an error, too */
    if (ctx->trace)
        (void)tshi_trace_add(ctx->trace, TSHI_TRACE_MODULE, module->path[0] ? module->path : "root",
                             begin, 0);
    return y;
}

/* Forward of a container: the user's function, or the children in order. */
static tsh_tensor *tshi_module_forward(tsh_module *module, tsh_tensor **in, int n) {
    tsh_tensor *x = in[0]; /* the current child's input */
    if (module->forward) return module->forward(module, in, n, module->user);
    if (n != 1)
        return tshi_error_null(module->ctx, TSH_ERR_ARGUMENT,
                               "tsh_forward: a container without a forward takes one input, not %d",
                               n);
    for (tsh_module *child = module->first; child; child = child->next)
        x = tshi_module_call(child, &x, 1); /* each child takes the output of the one before */
    return x;
}

/* -- adding modules and parameters; changing layouts ------------------------ */

/* The kind of the root and of the modules that tsh_add_module adds: no styles, no parameters. */
static const tshi_kind tshi_module_container = {"module", tshi_module_forward, 0, NULL};

TSH_API tsh_module *tsh_root(tsh_ctx *ctx) {
    if (!ctx || ctx->root) return ctx ? ctx->root : NULL; /* the first call has created the root */
    ctx->root = (tsh_module *)tshi_mem_arena_alloc(ctx, &ctx->books, sizeof *ctx->root);
    if (!ctx->root) return NULL;
    ctx->root->ctx = ctx;
    ctx->root->name = ctx->root->path = ""; /* the root's children have paths without a dot */
    ctx->root->kind = &tshi_module_container;
    return ctx->root;
}

/* Appends a child without parameters to parent. Returns NULL and sets an error if the name is
 * empty, has a dot, is too long, or is that of another child or of parent's parameter. */
static tsh_module *tshi_module_add(tsh_module *parent, const char *name, const tshi_kind *kind) {
    tsh_ctx *ctx = parent ? parent->ctx : NULL;
    tsh_module *module;
    if (!ctx || ctx->error.code != TSH_OK) return NULL;
    if (!name) name = "";     /* reported below as an empty name */
    /* before the checks: a rank on which they fail must compare its model, too */
    tshi_module_changed(ctx);
    if (!*name || strchr(name, '.') || strlen(parent->path) + strlen(name) + 16 > TSH_PATH_SIZE)
        (void)tsh_fail(
            ctx, TSH_ERR_ARGUMENT,
            "tsh_add_%s: \"%.64s\" under \"%.64s\" is no name: it may not be empty, hold a "
            "dot, or make a path of %d characters",
            kind->name, name, parent->path, TSH_PATH_SIZE);
    if (ctx->pipeline)
        (void)tsh_fail(ctx, TSH_ERR_STATE,
                       "tsh_add_%s: \"%s\" is added when a pipeline has dealt the modules to its "
                       "stages; make the whole model before tsh_pipeline_new",
                       kind->name, name);
    for (tsh_module *other = parent->first; other; other = other->next)
        if (strcmp(other->name, name) == 0)
            (void)tsh_fail(ctx, TSH_ERR_ARGUMENT, "tsh_add_%s: \"%s\" has a child \"%s\" already",
                           kind->name, parent->path, name);
    for (int i = 0; i < TSHI_MODULE_PARAMS; i++)
        if (parent->param[i] && strcmp(parent->param_name[i], name) == 0)
            (void)tsh_fail(ctx, TSH_ERR_ARGUMENT,
                           "tsh_add_%s: \"%s\" has a parameter \"%s\" already", kind->name,
                           parent->path, name);
    if (ctx->error.code != TSH_OK) return NULL;
    module = (tsh_module *)tshi_mem_arena_alloc(ctx, &ctx->books, sizeof *module);
    if (!module) return NULL;
    module->ctx = ctx;
    module->kind = kind;
    module->parent = parent;
    module->evaluating = parent->evaluating; /* inherits the mode that tsh_train has set */
    module->name = tshi_module_text(ctx, name, "");
    module->path = tshi_module_text(ctx, parent->path, name);
    if (!module->name || !module->path) return NULL;
    if (parent->last) /* append to the list of children */
        parent->last->next = module;
    else
        parent->first = module;
    parent->last = module;
    return module;
}

/* Ends a constructor: returns the new module or, after an error, unlinks it from its parent, frees
 * its parameters and returns NULL. */
static tsh_module *tshi_module_finish(tsh_module *module) {
    tsh_module *parent = module->parent, **link = &parent->first;
    /* length of the path; paths of the module's own parameters equal it or continue it by a dot */
    size_t n = strlen(module->path);
    if (module->ctx->error.code == TSH_OK) return module; /* no error: nothing to undo */
    /* frees the module's own parameters, not a weight that it shares */
    for (int i = 0; i < TSHI_MODULE_PARAMS; i++)
        if (module->param[i] && strncmp(module->param[i]->path, module->path, n) == 0 &&
            (!module->param[i]->path[n] || module->param[i]->path[n] == '.'))
            tshi_tensor_release(module->param[i]); /* frees values and handle */
    for (parent->last = NULL; *link != module; link = &(*link)->next) parent->last = *link;
    *link = NULL;
    return NULL;
}

/* Adds a parameter as module->param[slot]: replicated, requires_grad, without memory and values
 * until its first use (tshi_init_materialize). name "": the parameter has the path of the module.
 * dtype TSH_DTYPE_DEFAULT: tsh_desc.dtype. fan_in: number of input features, for the initialiser.
 * On failure, sets an error and leaves the slot NULL. */
static void tshi_module_param(tsh_module *module, int slot, const char *name, tsh_dtype dtype,
                              tsh_shape shape, tsh_init init, int64_t fan_in) {
    tsh_ctx *ctx = module->ctx;
    tsh_layout layout = tsh_replicated();
    if (dtype == TSH_DTYPE_DEFAULT) dtype = ctx->dtype;
    if (!tshi_dtype_exists(dtype) || !tshi_dtype_computes(dtype)) {
        (void)tsh_fail(ctx, TSH_ERR_DTYPE,
                       "tsh_add_%s: the parameters of \"%s\" are %s, bf16 or f16, not dtype %d",
                       module->kind->name, module->path, tshi_dtype_name(TSH_REAL), (int)dtype);
        return;
    }
    tsh_tensor *t = tshi_tensor_handle(ctx, TSHI_OWNED | TSHI_PARAM | TSHI_LEAF |
                                            TSHI_AVERAGED);
    if (!t) return;
    t->dtype = dtype;
    t->requires_grad = 1;
    t->init = init;     /* applied when the parameter is first used */
    t->fan_in = fan_in; /* number of input features, for the initialiser */
    t->path = tshi_module_text(ctx, module->path, name);
    if (!t->path || tshi_tensor_set_shape(t, module->path, &shape, &layout) != TSH_OK) return;
    module->param[slot] = t;
    module->param_name[slot] = name; /* not copied: a string constant */
}

/* Redistributes the values in `block`, which have dtype `dtype` and the layout of `before`, to the
 * layout of t. Returns them in a new block; NULL and an error if that fails. */
static tshi_block *tshi_module_moved(const tsh_tensor *before, const tsh_tensor *t, tsh_dtype dtype,
                                     tshi_block *block) {
    tshi_block *to = tshi_mem_alloc(t->ctx, block->kind,
                                    tshi_dtype_bytes(dtype, tsh_local_numel(t)));
    if (!to || tshi_redistribute_move(before, &before->layout, &t->layout, TSHI_WIRE_EXACT, dtype,
                                      tshi_mem_data(block), tshi_mem_data(to)) == TSH_OK)
        return to;
    tshi_mem_release(t->ctx, to);
    return NULL;
}

/* Returns 1 if the layout of t may change. Returns 0 and sets an error if recorded ops use its
 * values, if it is quantised, or if a cache of keys and values is laid out like it. */
static TSHI_COLD int tshi_module_may_move(const tsh_tensor *t) {
    if (tshi_tensor_recorded(t)) /* recorded ops have saved its values */
        return tshi_error_zero(t->ctx, TSH_ERR_STATE,
                               "tsh_parallelize: ops are recorded that use \"%s\" as it lies; "
                               "end the step first: tsh_step_end",
                               t->path);
    if (t->flags & TSHI_SWAPPED)
        return tshi_error_zero(t->ctx, TSH_ERR_STATE,
                               "tsh_parallelize: \"%s\" has the values of its average; restore the "
                               "weights first: tsh_ema_swap",
                               t->path);
    if (t->flags & TSHI_MERGED)
        return tshi_error_zero(t->ctx, TSH_ERR_STATE,
                               "tsh_parallelize: an adapter is merged into \"%s\"; first call "
                               "tsh_lora_unmerge",
                               t->path);
    if (tshi_dtype_in_blocks(t->dtype))
        return tshi_error_zero(t->ctx, TSH_ERR_STATE,
                               "tsh_parallelize: \"%s\" is quantised, and would be laid out anew; "
                               "first apply the plan, then call tsh_quantize",
                               t->path);
    if (t->flags & TSHI_CACHED)
        return tshi_error_zero(t->ctx, TSH_ERR_STATE,
                               "tsh_parallelize: a cache is laid out as \"%s\" is, which would be "
                               "laid out anew; first apply the plan, then call tsh_cache_new",
                               t->path);
    return 1;
}

/* Gives a parameter, or a moment of an optimiser, another layout: redistributes its values (a
 * collective over tp if they are allocated) and frees its gradients. On failure t is as before. */
static TSHI_COLD void tshi_module_relayout(tsh_tensor *t, const tsh_layout *layout) {
    tsh_tensor before = *t;            /* shape, layout and block as they were */
    tsh_shape shape = tsh_shape_of(t); /* the global shape, which does not change */
    tshi_block *block, *low = NULL;
    if (t->ctx->error.code != TSH_OK) return; /* leave t unchanged */
    if (tshi_layout_equal(&t->layout, layout, t->dim, &t->ctx->deal)) {
        t->layout = *layout; /* the shards are the same, only the sizes of units may differ */
        return;
    }
    if (!tshi_module_may_move(t) ||
        tshi_tensor_set_shape(t, "a new layout", &shape, layout) != TSH_OK || !t->block)
        return;
    block = tshi_module_moved(&before, t, t->dtype, t->block);
    /* the low halves of exact bf16 weights are 16-bit words: moved as if they were bf16 */
    if (block && t->low) low = tshi_module_moved(&before, t, TSH_BF16, t->low);
    if (!block || (t->low && !low)) {
        *t = before;
        tshi_mem_release(t->ctx, block);
        return;
    }
    tshi_tensor_drop_values(t);
    t->block = block; /* t's values in the new layout */
    t->low = low;
}

TSH_API TSHI_COLD tsh_module *tsh_add_module(tsh_module *parent, const char *name,
                                   const tsh_module_desc *desc) {
    tsh_module *module = tshi_module_add(parent, name, &tshi_module_container);
    if (module && desc) module->forward = desc->forward;
    if (module && desc) module->user = desc->user; /* passed to desc->forward */
    return module;
}
