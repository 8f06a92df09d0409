/* ========================================================================== */
/* >>lora                                              MARK: - lora (private) */
/* Adapters of low rank: adding, choosing, merging and removing them.         */
/* Needs: >>adapter >>nn >>freeze.                                            */
/* ========================================================================== */

/* -- tsh_lora: what it is given, which layers ------------------------------- */

/* Returns the name of the adapters that desc describes. */
static const char *tshi_lora_name(const tsh_lora_desc *desc) {
    return desc->name ? desc->name : "default";
}

/* Checks desc. Returns 0 and an error if it is out of range. */
static TSHI_COLD int tshi_lora_check_desc(tsh_ctx *ctx, const tsh_lora_desc *desc) {
    const char *name = desc ? tshi_lora_name(desc) : "";
    if (!desc) return tshi_error_zero(ctx, TSH_ERR_ARGUMENT, "tsh_lora: there is no description");
    if (desc->rank < 1 || !(desc->alpha >= TSH_ZERO && desc->alpha <= DBL_MAX) ||
        !(desc->dropout >= 0 && desc->dropout < 1))
        return tshi_error_zero(ctx, TSH_ERR_ARGUMENT,
                               "tsh_lora: rank %d, alpha %g, dropout %g; the rank is at least 1, "
                               "such as 8, alpha not below 0, and dropout at least 0 and below 1",
                               desc->rank, desc->alpha, desc->dropout);
    if (!*name || strchr(name, '.'))
        return tshi_error_zero(ctx, TSH_ERR_ARGUMENT,
                               "tsh_lora: \"%.64s\" is no name: it may not be empty or hold a dot",
                               name);
    if (desc->part_count < 0 || (desc->part_count && !desc->parts))
        return tshi_error_zero(ctx, TSH_ERR_ARGUMENT, "tsh_lora: part_count is %d, parts %s",
                               desc->part_count, desc->parts ? "are given" : "is NULL");
    if (desc->dtype && (!tshi_dtype_exists(desc->dtype) || !tshi_dtype_computes(desc->dtype)))
        return tshi_error_zero(ctx, TSH_ERR_DTYPE,
                               "tsh_lora: A and B are %s, bf16 or f16, not dtype %d",
                               tshi_dtype_name(TSH_REAL), (int)desc->dtype);
    for (int i = 0; i < desc->part_count; i++) {
        const tsh_lora_part *part = &desc->parts[i];
        if (!part->name || !*part->name || strchr(part->name, '.') || part->length < 0)
            return tshi_error_zero(ctx, TSH_ERR_ARGUMENT,
                                   "tsh_lora: part %d has no name, a dot in it, or %lld features",
                                   i, (long long)part->length);
        for (int k = 0; k < i; k++)
            if (strcmp(part->name, desc->parts[k].name) == 0)
                return tshi_error_zero(ctx, TSH_ERR_ARGUMENT,
                                       "tsh_lora: parts %d and %d are both \"%.64s\"", k, i,
                                       part->name);
    }
    return 1;
}

/* Returns 1 if m is a linear layer or a classifier. */
static int tshi_lora_is_linear(const tsh_module *m) {
    return m->kind->forward == tshi_nn_linear_forward && m->param[0];
}

/* Returns 1 if tsh_lora(root, pattern) adds adapters to m. */
static int tshi_lora_matches(const tsh_module *root, const tsh_module *m, const char *pattern) {
    if (!tshi_lora_is_linear(m)) return 0;
    return pattern ? tshi_glob_match(pattern, tshi_module_below(root, m->path))
                   : strcmp(m->kind->name, "linear") == 0;
}

/* Returns m's adapter of this name; NULL: it has none. */
static tshi_adapter *tshi_lora_find(const tsh_module *m, const char *name) {
    tshi_adapter *adapter = m->adapters;
    while (adapter && strcmp(adapter->name, name) != 0) adapter = adapter->next;
    return adapter;
}

/* Checks that the parts of an adapter have names that are free below the layer m, and together as
 * many output features as m, and that no path is too long. Returns 0 and an error if not. */
static TSHI_COLD int tshi_lora_check_parts(const tsh_module *m, const tsh_lora_desc *desc) {
    const int64_t outs = m->param[0]->dim[m->reversed];
    int64_t sum = 0; /* output features of the parts so far */
    size_t longest = 0;
    for (int i = 0; i < desc->part_count; i++) {
        const tsh_lora_part *part = &desc->parts[i];
        const size_t length = strlen(part->name) + 1;
        if (length > longest) longest = length;
        for (int k = 0; k < TSHI_MODULE_PARAMS; k++)
            if (m->param[k] && strcmp(m->param_name[k], part->name) == 0)
                return tshi_error_zero(m->ctx, TSH_ERR_ARGUMENT,
                                       "tsh_lora: part %d is \"%.64s\", which is a parameter of "
                                       "\"%s\"",
                                       i, part->name, m->path);
        sum = part->length > INT64_MAX - sum ? INT64_MAX : sum + part->length;
    }
    if (desc->part_count && sum != outs)
        return tshi_error_zero(m->ctx, TSH_ERR_ARGUMENT,
                               "tsh_lora: the parts have %lld output features, \"%s\" has %lld",
                               (long long)sum, m->path, (long long)outs);
    /* 32: ".lora_A." and what tshi_module_add keeps for the names of parameters */
    if (strlen(m->path) + longest + strlen(tshi_lora_name(desc)) + 32 > TSH_PATH_SIZE)
        return tshi_error_zero(m->ctx, TSH_ERR_ARGUMENT,
                               "tsh_lora: the name \"%.64s\" below \"%.64s\" makes a path of %d "
                               "characters or more",
                               tshi_lora_name(desc), m->path, TSH_PATH_SIZE);
    return 1;
}

/* Checks that the layer m can get an adapter. Returns 0 and an error if not. */
static TSHI_COLD int tshi_lora_check_layer(const tsh_module *m, const tsh_lora_desc *desc) {
    if (m->ctx->pipeline)
        return tshi_error_zero(m->ctx, TSH_ERR_STATE,
                               "tsh_lora: a pipeline has dealt \"%s\" to its stages; call tsh_lora "
                               "before tsh_pipeline_new",
                               m->path);
    if (tshi_lora_find(m, tshi_lora_name(desc)))
        return tshi_error_zero(m->ctx, TSH_ERR_STATE,
                               "tsh_lora: \"%s\" has an adapter \"%.64s\" already; give another "
                               ".name, or call tsh_lora_free first",
                               m->path, tshi_lora_name(desc));
    if (m->adapter && m->adapter->kept)
        return tshi_error_zero(m->ctx, TSH_ERR_STATE,
                               "tsh_lora: the adapter \"%.64s\" is merged into \"%s\"; first call "
                               "tsh_lora_unmerge, or tsh_lora_free to keep the sum",
                               m->adapter->name, m->path);
    return tshi_lora_check_parts(m, desc);
}

/* Fails because the pattern matches no linear layer. */
static TSHI_COLD void tshi_lora_refuse(tsh_module *root, const char *pattern) {
    char similar[TSH_MESSAGE_SIZE / 2] = "";
    for (tsh_module *m = root; m && pattern && !*similar; m = tshi_module_next(root, m))
        if (tshi_glob_match(pattern, tshi_module_below(root, m->path)))
            tsh_text_add(similar, sizeof similar, "\"%s\" is of kind \"%s\"", m->path,
                         m->kind->name);
    if (pattern && !*similar) tshi_module_suggest(root, pattern, similar, sizeof similar);
    (void)tsh_fail(root->ctx, TSH_ERR_ARGUMENT, "tsh_lora: \"%.96s\" matches no linear layer%s%s",
                   pattern ? pattern : "**", *similar ? "; " : "", similar);
}

/* Freezes all parameters below root but those of adapters; apply 0: only checks whether that is
 * possible. Returns 0 after an error. */
static int tshi_lora_freeze(tsh_module *root, int apply) {
    tshi_walk at = {NULL, NULL, 0};
    while (tshi_module_step_once(root, &at)) {
        if ((at.param->flags & TSHI_BUFFER) || at.module->kind == &tshi_adapter_kind) continue;
        if (apply)
            tshi_freeze_set(at.param, 0);
        else if (root->ctx->error.code == TSH_OK)
            (void)tshi_freeze_may("tsh_lora", at.param, 0);
    }
    return root->ctx->error.code == TSH_OK;
}

/* -- tsh_lora: making an adapter ---------------------------------------------- */

/* Returns m's child with this name; if there is none, adds a container. NULL: an error. */
static tsh_module *tshi_lora_child(tsh_module *m, const char *name) {
    tsh_module *child = tshi_module_at(m, name, strlen(name));
    return child ? child : tsh_add_module(m, name, NULL);
}

/* Adds the parameter "<of>.<name>.weight" below m and returns its module; NULL: an error. */
static tsh_module *tshi_lora_matrix_new(tsh_module *m, const char *of, const tsh_lora_desc *desc,
                                        tsh_shape shape, tsh_init init) {
    tsh_module *parent = tshi_lora_child(m, of);
    tsh_module *own = parent ? tshi_module_add(parent, tshi_lora_name(desc), &tshi_adapter_kind)
                             : NULL;
    if (!own) return NULL;
    tshi_module_param(own, 0, "weight", desc->dtype, shape, init, shape.dim[1]);
    return tshi_module_finish(own);
}

/* Adds an adapter to the layer m. After an error m has none. */
static void tshi_lora_attach(tsh_module *m, const tsh_lora_desc *desc) {
    tsh_ctx *ctx = m->ctx;
    const int parts = desc->part_count ? desc->part_count : 1;
    const int64_t outs = m->param[0]->dim[m->reversed], ins = m->param[0]->dim[!m->reversed];
    const double alpha = tshi_base_option(desc->alpha, 8);
    const tsh_init uniform = tshi_init_make(TSH_INIT_KAIMING_UNIFORM, sqrt(5.0), 0);
    const tsh_init zeros = tshi_init_make(TSH_INIT_ZEROS, 0, 0);
    tshi_adapter *adapter = (tshi_adapter *)tshi_mem_arena_alloc(ctx, &ctx->books, sizeof *adapter);
    if (!adapter) return;
    adapter->name = tshi_module_text(ctx, tshi_lora_name(desc), "");
    adapter->part = (tshi_adapter_part *)tshi_mem_arena_alloc(
        ctx, &ctx->books, (size_t)parts * sizeof *adapter->part);
    if (!adapter->name || !adapter->part) return;
    adapter->scale = alpha / (desc->rslora ? sqrt((double)desc->rank) : (double)desc->rank);
    adapter->dropout = desc->dropout;
    adapter->parts = parts;
    for (int i = 0; i < parts; i++) {
        tshi_adapter_part *part = &adapter->part[i];
        tsh_module *at = desc->part_count ? tshi_lora_child(m, desc->parts[i].name) : m;
        part->length = desc->part_count ? desc->parts[i].length : outs;
        if (at)
            part->a = tshi_lora_matrix_new(at, "lora_A", desc, tsh_shape2(desc->rank, ins),
                                           uniform);
        if (part->a)
            part->b = tshi_lora_matrix_new(at, "lora_B", desc, tsh_shape2(part->length, desc->rank),
                                           zeros);
        if (!part->b) return;
    }
    if (!tshi_adapter_place(m, adapter)) return;
    adapter->next = m->adapters;
    m->adapters = m->adapter = adapter;
    m->adapt = tshi_adapter_add;
}

TSH_API TSHI_COLD tsh_result tsh_lora(tsh_module *module, const char *pattern,
                                      const tsh_lora_desc *desc) {
    tsh_ctx *ctx = module ? module->ctx : NULL;
    tsh_module *m;
    int matched = 0;
    if (!ctx || ctx->error.code != TSH_OK) return ctx ? ctx->error.code : TSH_ERR_ARGUMENT;
    if (!tshi_lora_check_desc(ctx, desc)) return ctx->error.code;
    for (m = module; m && ctx->error.code == TSH_OK; m = tshi_module_next(module, m))
        if (tshi_lora_matches(module, m, pattern)) matched += tshi_lora_check_layer(m, desc);
    if (ctx->error.code == TSH_OK && !matched) tshi_lora_refuse(module, pattern);
    if (ctx->error.code != TSH_OK || !tshi_lora_freeze(module, 0)) return ctx->error.code;
    for (m = module; m && ctx->error.code == TSH_OK; m = tshi_module_next(module, m))
        if (tshi_lora_matches(module, m, pattern)) tshi_lora_attach(m, desc);
    if (ctx->error.code == TSH_OK) (void)tshi_lora_freeze(module, 1);
    tshi_module_changed(ctx);
    return ctx->error.code;
}

TSH_API TSHI_COLD tsh_result tsh_lora_use(tsh_module *module, const char *name) {
    tsh_ctx *ctx = module ? module->ctx : NULL;
    int found = 0;
    if (!ctx || ctx->error.code != TSH_OK) return ctx ? ctx->error.code : TSH_ERR_ARGUMENT;
    for (tsh_module *m = module; m; m = tshi_module_next(module, m)) {
        found += !name || tshi_lora_find(m, name);
        if (m->adapter && m->adapter->kept)
            return tsh_fail(ctx, TSH_ERR_STATE,
                            "tsh_lora_use: the adapter \"%.64s\" is merged into \"%s\"; first call "
                            "tsh_lora_unmerge",
                            m->adapter->name, m->path);
    }
    if (!found)
        return tsh_fail(ctx, TSH_ERR_ARGUMENT,
                        "tsh_lora_use: no layer below \"%s\" has an adapter \"%.64s\"; tsh_lora "
                        "adds one",
                        module->path, name);
    for (tsh_module *m = module; m; m = tshi_module_next(module, m))
        m->adapter = name ? tshi_lora_find(m, name) : NULL;
    tshi_module_changed(ctx); /* ranks compare their models anew, with the active adapters */
    return TSH_OK;
}

/* -- merging ---------------------------------------------------------------- */

/* Checks that the active adapter of m can be merged into m's weight, or unmerged. Returns 0 and an
 * error if not. */
static TSHI_COLD int tshi_lora_check_merge(const char *op, const tsh_module *m) {
    const tsh_tensor *w = m->param[0];
    const char *why = NULL; /* why not, as the end of the error; NULL: it can */
    if (tshi_dtype_in_blocks(w->dtype))
        return tshi_error_zero(
            m->ctx, TSH_ERR_DTYPE,
            "%s: \"%s\" is %s, which a sum cannot be stored in; keep the adapter "
            "apart, or load the model unquantised",
            op, w->path, tshi_dtype_name(w->dtype));
    if (w->flags & TSHI_TIED)
        why = "is shared with another layer, which has no adapter; keep the adapter apart";
    if (w->requires_grad) why = "is trained; tsh_freeze it first";
    if (tshi_tensor_recorded(w)) why = "is used by recorded ops; end the step first: tsh_step_end";
    return !why || tshi_error_zero(m->ctx, TSH_ERR_STATE, "%s: \"%s\" %s", op, w->path, why);
}

/* Merges the active adapter of m: puts W + s B A in place of W's values, which are kept. */
static void tshi_lora_merge_layer(tsh_module *m) {
    tshi_adapter *adapter = m->adapter;
    tsh_tensor *w = m->param[0];
    tsh_ctx *ctx = m->ctx;
    const int64_t n = tsh_local_numel(w), ins = w->local[!m->reversed];
    int64_t first = 0; /* the first of this rank's output features that belongs to part i */
    tsh_tensor *kept; /* keeps W's old values, for tsh_lora_unmerge */
    tshi_block *sum, *block;
    tshi_matrix c; /* `sum` as a matrix (out, in): first W, then W + s B A */
    if (w->absent || !tshi_adapter_place(m, adapter) || tshi_init_materialize(w) != TSH_OK) return;
    kept = tshi_tensor_handle(ctx, TSHI_OWNED);
    if (!kept) return;
    sum = tshi_mem_alloc(ctx, TSH_MEM_STEP, tshi_dtype_reals(n));
    block = tshi_mem_alloc(ctx, TSH_MEM_PARAMETERS, tshi_dtype_bytes(w->dtype, n));
    if (sum && block) {
        tshi_tensor_exact(w, 0, n, (tsh_real *)tshi_mem_data(sum));
        c = tshi_gemm_matrix((tsh_real *)tshi_mem_data(sum), w->stride[m->reversed],
                             w->stride[!m->reversed]);
        for (int i = 0; i < adapter->parts && ctx->error.code == TSH_OK; i++) {
            tsh_tensor *a = adapter->part[i].a->param[0], *b = adapter->part[i].b->param[0];
            if (tshi_init_materialize(a) != TSH_OK || tshi_init_materialize(b) != TSH_OK) break;
            tshi_matmul_gemm(
                ctx, b->local[0], ins, b->local[1], TSHI_R(adapter->scale),
                tshi_gemm_matrix_of(tshi_tensor_at(b), b->dtype, b->stride[0], b->stride[1]),
                tshi_gemm_matrix_of(tshi_tensor_at(a), a->dtype, a->stride[0], a->stride[1]), 1,
                tshi_gemm_from(c, first, 0));
            first += b->local[0];
        }
    }
    if (sum && block && ctx->error.code == TSH_OK) {
        tshi_dtypes[w->dtype].store(tshi_mem_data(block), 1, n,
                                    (const tsh_real *)tshi_mem_data(sum));
        kept->dtype = w->dtype;
        kept->block = w->block;
        kept->low = w->low;
        adapter->kept = kept;
        w->block = block;
        w->low = NULL;
        w->flags |= TSHI_MERGED;
    } else {
        tshi_mem_release(ctx, block);
        tshi_tensor_release(kept);
    }
    tshi_mem_release(ctx, sum);
}

/* Ends the merge of m's adapter. keep 1: the weight keeps the sum; 0: it gets its old values. */
static void tshi_lora_unmerge_layer(tsh_module *m, int keep) {
    tshi_adapter *adapter = m->adapter;
    tsh_tensor *w = m->param[0];
    tsh_tensor *kept = adapter->kept;
    if (!keep) {
        tshi_mem_release(m->ctx, w->block);
        w->block = kept->block;
        w->low = kept->low;
        kept->block = kept->low = NULL;
    }
    tshi_tensor_release(kept);
    adapter->kept = NULL;
    w->flags &= ~(unsigned)TSHI_MERGED;
}

TSH_API TSHI_COLD tsh_result tsh_lora_merge(tsh_module *module) {
    tsh_ctx *ctx = module ? module->ctx : NULL;
    int apply, count = 0;
    if (!ctx || ctx->error.code != TSH_OK) return ctx ? ctx->error.code : TSH_ERR_ARGUMENT;
    for (apply = 0; apply < 2; apply++) /* pass 0 checks all layers, pass 1 merges */
        for (tsh_module *m = module; m && ctx->error.code == TSH_OK;
             m = tshi_module_next(module, m)) {
            if (!m->adapter) continue;
            count++;
            if (m->adapter->kept) continue;
            if (apply)
                tshi_lora_merge_layer(m);
            else
                (void)tshi_lora_check_merge("tsh_lora_merge", m);
        }
    if (ctx->error.code == TSH_OK && !count)
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT,
                       "tsh_lora_merge: no layer below \"%s\" has an active adapter; tsh_lora adds "
                       "one, tsh_lora_use makes it active",
                       module->path);
    return ctx->error.code;
}

TSH_API TSHI_COLD tsh_result tsh_lora_unmerge(tsh_module *module) {
    tsh_ctx *ctx = module ? module->ctx : NULL;
    if (!ctx || ctx->error.code != TSH_OK) return ctx ? ctx->error.code : TSH_ERR_ARGUMENT;
    for (int apply = 0; apply < 2; apply++)
        for (tsh_module *m = module; m && ctx->error.code == TSH_OK;
             m = tshi_module_next(module, m)) {
            if (!m->adapter || !m->adapter->kept) continue;
            if (apply)
                tshi_lora_unmerge_layer(m, 0);
            else
                (void)tshi_lora_check_merge("tsh_lora_unmerge", m);
        }
    return ctx->error.code;
}

/* -- removing ----------------------------------------------------------------- */

/* Checks that nothing but its layer uses the parameter t of an adapter. Returns 0 and an error if
 * something does. */
static TSHI_COLD int tshi_lora_check_free(const tsh_tensor *t) {
    const char *why = NULL; /* why not, as the end of the error; NULL: nothing uses t */
    if (t->flags & TSHI_OPTIMISED) why = "is updated by an optimiser; tsh_optim_free it first";
    if (t->flags & TSHI_EMA) why = "has an average; call tsh_ema_free first";
    if (t->ctx->pipeline) why = "belongs to a stage of a pipeline";
    if (tshi_tensor_recorded(t)) why = "is used by recorded ops; end the step first: tsh_step_end";
    return !why || tshi_error_zero(t->ctx, TSH_ERR_STATE, "tsh_lora_free: \"%s\" %s", t->path, why);
}

/* Unlinks m, a module without children, from the tree; then each module above it, up to the layer,
 * that has no children left. */
static void tshi_lora_unlink(const tsh_module *layer, const tsh_module *m) {
    while (m != layer && !m->first) {
        tsh_module *parent = m->parent, **link = &parent->first;
        for (parent->last = NULL; *link != m; link = &(*link)->next) parent->last = *link;
        *link = m->next;
        for (tsh_module *after = m->next; after; after = after->next) parent->last = after;
        m = parent;
    }
}

/* Removes an adapter from m, with its parameters. */
static void tshi_lora_remove(tsh_module *m, tshi_adapter *adapter) {
    tshi_adapter **link = &m->adapters;
    if (adapter->kept) tshi_lora_unmerge_layer(m, 1);
    if (m->adapter == adapter) m->adapter = NULL;
    while (*link != adapter) link = &(*link)->next;
    *link = adapter->next;
    for (int i = 0; i < adapter->parts; i++) {
        tsh_module *const own[2] = {adapter->part[i].a, adapter->part[i].b};
        for (int k = 0; k < 2; k++) {
            tshi_tensor_release(own[k]->param[0]);
            own[k]->param[0] = NULL;
            tshi_lora_unlink(m, own[k]);
        }
    }
}

TSH_API TSHI_COLD tsh_result tsh_lora_free(tsh_module *module, const char *name) {
    tsh_ctx *ctx = module ? module->ctx : NULL;
    int count = 0;
    if (!ctx || ctx->error.code != TSH_OK) return ctx ? ctx->error.code : TSH_ERR_ARGUMENT;
    for (int apply = 0; apply < 2; apply++) /* pass 0 checks all adapters, pass 1 removes them */
        for (tsh_module *m = module; m && ctx->error.code == TSH_OK;
             m = tshi_module_next(module, m))
            for (tshi_adapter *adapter = m->adapters, *next; adapter; adapter = next) {
                next = adapter->next;
                if (name && strcmp(adapter->name, name) != 0) continue;
                count++;
                for (int i = 0; i < adapter->parts && !apply; i++)
                    (void)(tshi_lora_check_free(adapter->part[i].a->param[0]) &&
                           tshi_lora_check_free(adapter->part[i].b->param[0]));
                if (apply) tshi_lora_remove(m, adapter);
            }
    if (ctx->error.code == TSH_OK && !count)
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT,
                       "tsh_lora_free: no layer below \"%s\" has an adapter%s%.64s%s", module->path,
                       name ? " \"" : "", name ? name : "", name ? "\"" : "");
    tshi_module_changed(ctx);
    return ctx->error.code;
}
