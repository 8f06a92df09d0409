/* ========================================================================== */
/* >>module-find                                MARK: - module-find (private) */
/* Finds modules and parameters by path; functions that act on all modules or */
/* parameters below a module.                                                 */
/* Needs: >>tape-leaf >>module-same.                                          */
/* ========================================================================== */

/* Returns the edit distance of a and b (Levenshtein 1966), INT_MAX if b is too long. row[j] is the
 * distance of the first i characters of a and the first j of b. */
static int tshi_module_distance(const char *a, const char *b) {
    int row[TSH_PATH_SIZE + 1], i, j, n = (int)strlen(b);
    if (n > TSH_PATH_SIZE) return INT_MAX;
    for (j = 0; j <= n; j++) row[j] = j; /* distance from "" to j characters of b: insert them */
    for (i = 0; a[i]; i++) {
        int diagonal = row[0]; /* distance of i characters of a and j - 1 of b */
        row[0] = i + 1;        /* distance from i + 1 characters of a to "": delete them */
        for (j = 1; j <= n; j++) {
            int best = diagonal + (a[i] != b[j - 1]);         /* replace a[i], or keep it */
            diagonal = row[j];                                /* diagonal of the next column */
            if (row[j] + 1 < best) best = row[j] + 1;         /* delete a[i] */
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1; /* insert b[j - 1] */
            row[j] = best;
        }
    }
    return row[n];
}

/* Returns `path` relative to root, "" for root itself. A path that is not below root, such as that
 * of a parameter tied to one elsewhere, is returned whole. */
static const char *tshi_module_below(const tsh_module *root, const char *path) {
    size_t n = strlen(root->path);
    if (!n || strncmp(path, root->path, n) != 0 || (path[n] && path[n] != '.')) return path;
    return path + n + (path[n] == '.');
}

/* Appends to an error text the (at most three) module paths below root that are nearest to `path`
 * by edit distance. */
static void tshi_module_suggest(tsh_module *root, const char *path, char *text, size_t size) {
    /* the nearest modules found so far, nearest first */
    tsh_module *module, *best[3] = {NULL, NULL, NULL};
    int shown, distance, min;
    tsh_text_add(text, size, "near it are");
    for (shown = 0; shown < 3; shown++) { /* finds the nearest module not shown yet */
        min = INT_MAX;
        for (module = root; module; module = tshi_module_next(root, module)) {
            distance = tshi_module_distance(path, tshi_module_below(root, module->path));
            if (module == root || distance >= min || module == best[0] || module == best[1])
                continue;
            best[shown] = module;
            min = distance;
        }
        if (!best[shown]) break;
        tsh_text_add(text, size, "%s \"%s\"", shown ? "," : "",
                         tshi_module_below(root, best[shown]->path));
    }
    if (!shown) tsh_text_add(text, size, " no modules");
}

/* Returns the module at a path of n characters below `module`, or NULL. n 0: module itself. */
static tsh_module *tshi_module_at(tsh_module *module, const char *path, size_t n) {
    const char *end = path + n, *dot; /* dot: end of the current name */
    for (; module && path < end; path = dot + 1) {
        for (dot = path; dot < end && *dot != '.';) dot++; /* end of the name */
        n = (size_t)(dot - path); /* from here on: length of the current name */
        module = module->first;
        while (module && (strncmp(module->name, path, n) != 0 || module->name[n]))
            module = module->next;
    }
    return module;
}

TSH_API TSHI_COLD tsh_module *tsh_find(tsh_module *module, const char *path) {
    tsh_module *found;
    char similar[TSH_MESSAGE_SIZE / 2] = ""; /* similar paths, for the error */
    if (!module) return NULL;
    if (!path) path = "?"; /* no module has this name: reported below */
    found = tshi_module_at(module, path, strlen(path));
    if (found) return found;
    tshi_module_suggest(module, path, similar, sizeof similar);
    (void)tsh_fail(module->ctx, TSH_ERR_ARGUMENT, "tsh_find: \"%s\" has no module \"%.64s\"; %s",
                   module->path, path, similar);
    return NULL;
}

/* Returns the parameter at a path below `module` and sets *owner to its module. Returns NULL if
 * there is none. */
static tsh_tensor *tshi_module_lookup(tsh_module *module, const char *path, tsh_module **owner) {
    /* the dot before the parameter's name; NULL: path is only that name */
    const char *dot = strrchr(path, '.');
    tsh_module *m = dot ? tshi_module_at(module, path, (size_t)(dot - path)) : module;
    for (int i = 0; i < TSHI_MODULE_PARAMS && m; i++)
        if (m->param[i] && strcmp(m->param_name[i], dot ? dot + 1 : path) == 0) {
            *owner = m;
            return m->param[i];
        }
    /* else `path` may be that of a module made by tsh_add_param, whose only parameter has the name
     * "" */
    m = tshi_module_at(module, path, strlen(path));
    if (!m || !m->param[0] || *m->param_name[0]) return NULL;
    *owner = m;
    return m->param[0];
}

TSH_API TSHI_COLD tsh_tensor *tsh_param(tsh_module *module, const char *path) {
    const char *dot; /* the dot before the parameter's name; NULL: path is only that name */
    char similar[TSH_MESSAGE_SIZE / 2] = ""; /* similar paths, for the error */
    tsh_module *owner;
    tsh_tensor *found;
    if (!module) return NULL;
    if (!path) path = "?"; /* no parameter has this name: reported below */
    found = tshi_module_lookup(module, path, &owner);
    if (found) return found;
    dot = strrchr(path, '.');
    owner = dot ? tshi_module_at(module, path, (size_t)(dot - path)) : module;
    for (int i = 0; i < TSHI_MODULE_PARAMS && owner; i++)
        if (owner->param[i])
            tsh_text_add(similar, sizeof similar, "%s \"%s\"", *similar ? "," : "there are",
                         owner->param_name[i]);
    if (!*similar) tshi_module_suggest(module, path, similar, sizeof similar);
    return tshi_error_null(module->ctx, TSH_ERR_ARGUMENT,
                           "tsh_param: \"%s\" has no parameter \"%.64s\"; %s", module->path, path,
                           similar);
}

/* Calls fn once for every parameter below module, also for tied ones. all 0: skips parameters that
 * are held by other pipeline stages only. */
static void tshi_module_params(tsh_module *module, int all,
                               void (*fn)(const char *path, tsh_tensor *param, void *user),
                               void *user) {
    tshi_walk at = {NULL, NULL, 0};
    while (tshi_module_step_once(module, &at))
        if (all || !at.param->absent) fn(at.param->path, at.param, user);
}

TSH_API TSHI_COLD void tsh_each_param(tsh_module *module,
                            void (*fn)(const char *path, tsh_tensor *param, void *user),
                            void *user) {
    if (module && fn) tshi_module_params(module, 0, fn, user);
}

TSH_API tsh_ctx *tsh_module_ctx(const tsh_module *module) {
    return module ? module->ctx : NULL;
}

TSH_API const char *tsh_module_path(const tsh_module *module) {
    return module ? module->path : "";
}

TSH_API tsh_module *tsh_child(const tsh_module *module, int index) {
    tsh_module *child = module && index >= 0 ? module->first : NULL;
    for (; child && index > 0; index--) child = child->next;
    return child;
}

/* Returns 1 if tsh_tie may replace the parameter `old` by source. Returns 0 and sets an error if an
 * optimiser, a pipeline, a cache or a recorded op uses old, or if source is quantised and a module
 * that has old cannot compute with a quantised weight. */
static TSHI_COLD int tshi_module_may_replace(const tsh_tensor *old, const tsh_tensor *source) {
    tsh_ctx *ctx = old->ctx;
    tshi_walk at = {NULL, NULL, 0};
    if (old->flags & TSHI_OPTIMISED)
        (void)tsh_fail(ctx, TSH_ERR_STATE,
                       "tsh_tie: an optimiser has \"%s\"; call tsh_tie before tsh_optim_new",
                       old->path);
    else if (old->flags & TSHI_EMA)
        (void)tsh_fail(ctx, TSH_ERR_STATE,
                       "tsh_tie: a tsh_ema has \"%s\"; call tsh_tie before tsh_ema_new", old->path);
    else if (ctx->pipeline)
        (void)tsh_fail(ctx, TSH_ERR_STATE,
                       "tsh_tie: a pipeline has dealt \"%s\" to its stages; call tsh_tie before "
                       "tsh_pipeline_new",
                       old->path);
    else if (old->flags & TSHI_CACHED)
        (void)tsh_fail(ctx, TSH_ERR_STATE,
                       "tsh_tie: a cache is laid out as \"%s\" is; call tsh_tie before "
                       "tsh_cache_new",
                       old->path);
    else if (tshi_tensor_recorded(old))
        (void)tsh_fail(ctx, TSH_ERR_STATE,
                       "tsh_tie: ops are recorded that use \"%s\"; end the step first: "
                       "tsh_step_end",
                       old->path);
    while (tshi_dtype_in_blocks(source->dtype) && tshi_module_step(ctx->root, &at))
        if (at.param == old &&
            (at.slot || !tshi_module_quantises(at.module) || at.module->reversed))
            (void)tsh_fail(ctx, TSH_ERR_STATE,
                           "tsh_tie: \"%s\" is quantised, which \"%s\" %s; first call tsh_tie, "
                           "then tsh_quantize",
                           source->path, at.module->path,
                           at.module->reversed ? "stores the other way round" : "does not take");
    return ctx->error.code == TSH_OK;
}

TSH_API TSHI_COLD tsh_result tsh_tie(tsh_module *module, const char *name, tsh_tensor *source) {
    /* the parameter that source replaces */
    tsh_tensor *old = module ? tsh_param(module, name) : NULL;
    char a[TSHI_TEXT_SIZE], b[TSHI_TEXT_SIZE];
    tshi_walk at = {NULL, NULL, 0};
    if (!old) return module ? module->ctx->error.code : TSH_ERR_ARGUMENT;
    if (!source || !(source->flags & TSHI_PARAM) || source->ctx != module->ctx)
        return tsh_fail(module->ctx, TSH_ERR_ARGUMENT,
                        "tsh_tie: \"%s\" takes a parameter of the same tree", old->path);
    if (old->ndim != source->ndim || memcmp(old->dim, source->dim, sizeof old->dim) != 0)
        return tsh_fail(module->ctx, TSH_ERR_SHAPE, "tsh_tie: \"%s\" is %s, \"%s\" is %s",
                        old->path, tshi_tensor_text(old, a), source->path,
                        tshi_tensor_text(source, b));
    if (old == source) return TSH_OK;
    if (!tshi_module_may_replace(old, source)) return module->ctx->error.code;
    tshi_module_changed(module->ctx); /* makes the ranks compare their models again */
    source->flags |= TSHI_TIED;
    while (tshi_module_step(module->ctx->root, &at)) /* replaces old in every module that has it */
        if (at.param == old) at.module->param[at.slot] = source;
    tshi_tensor_release(old);
    return TSH_OK;
}

TSH_API TSHI_COLD tsh_result tsh_materialize(tsh_module *module) {
    tshi_walk at = {NULL, NULL, 0};
    if (!module) return TSH_ERR_ARGUMENT;
    while (tshi_module_step(module, &at))
        if (!at.param->absent) (void)tshi_init_materialize(at.param);
    return module->ctx->error.code;
}

TSH_API TSHI_COLD tsh_result tsh_reset_parameters(tsh_module *module) {
    tshi_walk at = {NULL, NULL, 0};
    if (!module) return TSH_ERR_ARGUMENT;
    if (tshi_tensor_any_recorded(module->ctx)) /* recorded ops have saved the old values */
        return tsh_fail(module->ctx, TSH_ERR_STATE,
                        "tsh_reset_parameters: ops are recorded that use the old values; end the "
                        "step first: tsh_step_end");
    while (tshi_module_step_once(module, &at)) {
        if (at.param->absent || module->ctx->error.code != TSH_OK) continue;
        if (tshi_dtype_in_blocks(at.param->dtype))
            return tsh_fail(module->ctx, TSH_ERR_DTYPE,
                            "tsh_reset_parameters: \"%s\" is quantised", at.param->path);
        tsh_zero_grad(at.param); /* its gradient belongs to the old values */
        (void)tshi_init_apply(at.param);
    }
    return module->ctx->error.code;
}

/* Converts t, and its values if it has memory, to a dtype. Returns 0 and leaves t unchanged if
 * there is no memory. */
static int tshi_module_convert(tsh_tensor *t, tsh_dtype dtype) {
    const tsh_tensor before = *t;
    if (t->block) {
        tshi_block *block = tshi_mem_alloc(t->ctx, t->block->kind,
                                           tshi_dtype_bytes(dtype, tsh_local_numel(t)));
        if (!block) return 0;
        t->block = block;
        t->dtype = dtype;
        tshi_kernel_dense(t, tshi_tensor_at(&before), before.dtype, 1);
        tshi_mem_release(t->ctx, before.block);
    }
    t->dtype = dtype;
    return 1;
}

TSH_API TSHI_COLD tsh_result tsh_to(tsh_module *module, tsh_dtype dtype) {
    tsh_ctx *ctx = module ? module->ctx : NULL;
    tshi_walk at = {NULL, NULL, 0};
    if (!ctx || ctx->error.code != TSH_OK) return ctx ? ctx->error.code : TSH_ERR_ARGUMENT;
    if (!tshi_dtype_exists(dtype) || !tshi_dtype_computes(dtype))
        return tsh_fail(ctx, TSH_ERR_DTYPE, "tsh_to: takes %s, bf16 or f16 in this build, not "
                        "dtype %d", tshi_dtype_name(TSH_REAL), (int)dtype);
    while (tshi_module_step_once(module, &at)) {
        const tsh_tensor *t = at.param;
        /* quantised and integer tensors keep their dtype */
        if (t->dtype == dtype || !tshi_dtype_computes(t->dtype)) continue;
        if (t->flags & TSHI_OPTIMISED)
            return tsh_fail(ctx, TSH_ERR_STATE,
                            "tsh_to: an optimiser has \"%s\"; call tsh_to before tsh_optim_new",
                            t->path);
        if (t->flags & TSHI_EMA)
            return tsh_fail(ctx, TSH_ERR_STATE,
                            "tsh_to: a tsh_ema has \"%s\"; call tsh_to before tsh_ema_new",
                            t->path);
        if (t->flags & TSHI_MERGED)
            return tsh_fail(ctx, TSH_ERR_STATE,
                            "tsh_to: an adapter is merged into \"%s\"; first call "
                            "tsh_lora_unmerge, or tsh_lora_free to keep the sum",
                            t->path);
        if (tshi_tensor_recorded(t))
            return tsh_fail(ctx, TSH_ERR_STATE,
                            "tsh_to: ops are recorded that use \"%s\"; end the step first: "
                            "tsh_step_end", t->path);
    }
    while (tshi_module_step_once(module, &at) && ctx->error.code == TSH_OK)
        if (at.param->dtype != dtype && tshi_dtype_computes(at.param->dtype))
            (void)tshi_module_convert(at.param, dtype);
    tshi_module_changed(ctx); /* ranks compare their models anew, with the new dtypes */
    return ctx->error.code;
}

TSH_API void tsh_train(tsh_module *module, int on) {
    for (tsh_module *m = module; m; m = tshi_module_next(module, m)) m->evaluating = !on;
}

TSH_API void tsh_checkpoint(tsh_module *module, int on) {
    if (module) module->checkpoint = on != 0;
}

TSH_API int tsh_training(const tsh_module *module) {
    return module && !module->evaluating;
}

TSH_API void tsh_zero_grads(tsh_module *module) {
    tshi_walk at = {NULL, NULL, 0};
    while (tshi_module_step(module, &at)) tsh_zero_grad(at.param);
}
