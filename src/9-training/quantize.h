/* ========================================================================== */
/* >>quantize                                      MARK: - quantize (private) */
/* tsh_quantize: stores the weights of a model in 8 or 4 bits.                */
/* Needs: >>glob >>module-find.                                               */
/* ========================================================================== */

/* Returns the weight of m as it will be once quantised, but without values: dtype, shape, layout.
 * The shape is (out, in) even if the layer stores (in, out) now, because quantisation blocks lie
 * along the input features. */
static tsh_tensor tshi_quantize_form(const tsh_module *m, tsh_dtype dtype) {
    tsh_tensor t = *m->param[0];
    if (m->reversed) { /* the layer stores (in, out): swap the two dimensions */
        t.dim[0] = m->param[0]->dim[1];
        t.dim[1] = m->param[0]->dim[0];
        t.local[0] = m->param[0]->local[1];
        t.local[1] = m->param[0]->local[0];
        if (t.layout.kind == TSH_SHARDED) t.layout.dim = 1 - t.layout.dim;
    }
    tshi_tensor_strides(t.local, t.ndim, t.stride);
    t.dtype = dtype;
    return t;
}

/* Returns 1 if the weight of m can be quantised: all layers that share it can use a quantised
 * weight, no optimiser updates it, no recorded op uses it, and no quantisation block is cut by
 * sharding. Else returns 0 and sets an error. */
static int tshi_quantize_check(tsh_module *m, tsh_dtype dtype) {
    tsh_tensor *t = m->param[0];
    const tsh_tensor form = tshi_quantize_form(m, dtype);
    tshi_walk at = {NULL, NULL, 0};
    while (tshi_module_step(m->ctx->root, &at))
        if (at.param == t && (at.slot || !tshi_module_quantises(at.module) ||
                              at.module->reversed != m->reversed))
            return tshi_error_zero(m->ctx, TSH_ERR_ARGUMENT,
                                   "tsh_quantize: \"%s\" is tied to a parameter of \"%s\", "
                                   "which %s",
                                   t->path, at.module->path,
                                   tshi_module_quantises(at.module)
                                       ? "stores it the other way round"
                                       : "takes no quantised one");
    if (t->flags & TSHI_OPTIMISED)
        return tshi_error_zero(m->ctx, TSH_ERR_STATE,
                               "tsh_quantize: \"%s\" is updated by an optimiser; quantise it "
                               "before tsh_optim_new, which then leaves it out, or after "
                               "tsh_optim_free",
                               t->path);
    if (t->flags & TSHI_EMA)
        return tshi_error_zero(m->ctx, TSH_ERR_STATE,
                               "tsh_quantize: \"%s\" has an average; call tsh_ema_free first",
                               t->path);
    if (t->flags & TSHI_MERGED)
        return tshi_error_zero(m->ctx, TSH_ERR_STATE,
                               "tsh_quantize: an adapter is merged into \"%s\"; first call "
                               "tsh_lora_free, which keeps the sum, or tsh_lora_unmerge",
                               t->path);
    if (tshi_tensor_recorded(t))
        return tshi_error_zero(m->ctx, TSH_ERR_STATE,
                               "tsh_quantize: ops are recorded that use \"%s\"; end the step "
                               "first: tsh_step_end",
                               t->path);
    return tshi_tensor_check_blocks(&form, "tsh_quantize", dtype);
}

/* Returns a memory block with the values of t, quantised row by row to the shape and dtype of
 * `form`; NULL: no memory. reversed 1: t is stored (in, out). */
static tshi_block *tshi_quantize_values(const tsh_tensor *t, const tsh_tensor *form, int reversed) {
    const tshi_dtype *from = &tshi_dtypes[t->dtype], *to = &tshi_dtypes[form->dtype];
    const int64_t ins = form->local[1], row = t->stride[reversed], step = t->stride[!reversed];
    tshi_block *values = tshi_mem_alloc(t->ctx, TSH_MEM_STEP, tshi_dtype_reals(ins));
    const size_t bytes = tshi_dtype_bytes(form->dtype, tsh_local_numel(form));
    tshi_block *block = values ? tshi_mem_alloc(t->ctx, TSH_MEM_PARAMETERS, bytes) : NULL;
    for (int64_t r = 0; block && r < form->local[0]; r++) {
        tsh_real *x = (tsh_real *)tshi_mem_data(values);
        from->load((const char *)tshi_tensor_at(t) + r * row * from->size, step, ins, x);
        to->store((char *)tshi_mem_data(block) + tshi_dtype_bytes(form->dtype, r * ins), 1, ins, x);
    }
    tshi_mem_release(t->ctx, values);
    return block;
}

/* Quantises the weight of m. If it has no values yet, it is initialised on first use, in its new
 * dtype. But if the initial values depend on its present form (it is stored (in, out), or has a row
 * of zeros), it is initialised now and then quantised. */
static void tshi_quantize_apply(tsh_module *m, tsh_dtype dtype) {
    tsh_tensor *t = m->param[0];
    const int later = t->absent || (!t->block && !m->reversed && !t->zero_row);
    tsh_tensor form = tshi_quantize_form(m, dtype);
    tshi_walk at = {NULL, NULL, 0};
    if (!later && tshi_init_materialize(t) != TSH_OK) return;
    form.block = later ? NULL : tshi_quantize_values(t, &form, m->reversed);
    if (!later && !form.block) return;
    tshi_tensor_drop_values(t); /* releases values and gradients */
    t->block = form.block;
    t->dtype = dtype;
    t->layout = form.layout;
    memcpy(t->dim, form.dim, sizeof t->dim);
    memcpy(t->local, form.local, sizeof t->local);
    memcpy(t->stride, form.stride, sizeof t->stride);
    t->requires_grad = 0;
    t->flags = (t->flags & ~(unsigned)TSHI_LEAF) | TSHI_BUFFER; /* no optimiser updates it */
    while (tshi_module_step(m->ctx->root, &at)) /* finds all layers that share the weight */
        if (at.param == t) at.module->reversed = 0;
}

TSH_API TSHI_COLD tsh_result tsh_quantize(tsh_module *module, const char *pattern,
                                          tsh_dtype dtype) {
    char similar[TSH_MESSAGE_SIZE / 2] = "";
    tsh_module *m;
    tsh_ctx *ctx = module ? module->ctx : NULL;
    int apply, matched = 0;
    if (!ctx || ctx->error.code != TSH_OK) return ctx ? ctx->error.code : TSH_ERR_ARGUMENT;
    if (!tshi_dtype_exists(dtype) || !tshi_dtype_in_blocks(dtype))
        return tsh_fail(ctx, TSH_ERR_DTYPE,
                        "tsh_quantize: takes TSH_Q8_0, TSH_Q4_0 or TSH_Q4_1, not %s",
                        tshi_dtype_exists(dtype) ? tshi_dtype_name(dtype) : "another number");
    if (!pattern) pattern = "**";
    for (apply = 0; apply < 2; apply++) /* pass 0 checks all weights, pass 1 quantises them */
        for (m = module; m && ctx->error.code == TSH_OK; m = tshi_module_next(module, m)) {
            if (!tshi_module_quantises(m) ||
                !tshi_glob_match(pattern, tshi_module_below(module, m->path)))
                continue;
            matched++;
            if (tshi_dtype_in_blocks(m->param[0]->dtype)) continue; /* m is quantised already */
            if (!apply)
                (void)tshi_quantize_check(m, dtype);
            else
                tshi_quantize_apply(m, dtype);
        }
    if (ctx->error.code == TSH_OK && !matched) {
        tshi_module_suggest(module, pattern, similar, sizeof similar);
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT,
                       "tsh_quantize: \"%.96s\" matches no linear or embedding layer; %s", pattern,
                       similar);
    }
    tshi_module_changed(ctx); /* ranks compare their models anew, with the new dtypes */
    return ctx->error.code;
}
