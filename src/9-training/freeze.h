/* ========================================================================== */
/* >>freeze                                          MARK: - freeze (private) */
/* tsh_freeze: parameters that are not trained, and have no gradients and     */
/* moments.                                                                   */
/* Needs: >>optim.                                                            */
/* ========================================================================== */

/* Returns 1 if t may be frozen (on 0) or trained (on 1) from now on; else 0 and an error, which
 * names the public function op. */
static TSHI_COLD int tshi_freeze_may(const char *op, const tsh_tensor *t, int on) {
    if (t->requires_grad != on && tshi_tensor_recorded(t))
        return tshi_error_zero(t->ctx, TSH_ERR_STATE,
                               "%s: ops are recorded that use \"%s\"; end the step first: "
                               "tsh_step_end",
                               op, t->path);
    if (on && (t->flags & TSHI_MERGED))
        return tshi_error_zero(t->ctx, TSH_ERR_STATE,
                               "%s: an adapter is merged into \"%s\"; first call "
                               "tsh_lora_unmerge, or tsh_lora_free to keep the sum",
                               op, t->path);
    if (on && (t->flags & TSHI_OPTIMISED) && !tshi_optim_trains(t->dtype))
        return tshi_error_zero(
            t->ctx, TSH_ERR_DTYPE,
            "%s: \"%s\" is %s, whose range is too small to train; train in bf16: "
            "tsh_to(module, TSH_BF16) before tsh_optim_new",
            op, t->path, tshi_dtype_name(t->dtype));
    return 1;
}

/* Releases the moments that optimisers keep of t, as if they had never updated it. */
static void tshi_freeze_drop_moments(const tsh_tensor *t) {
    for (tsh_optim *optim = t->ctx->optims; optim; optim = optim->older)
        for (int i = 0; i < optim->count; i++) {
            tshi_moments *each = &optim->each[i];
            if (each->param != t) continue;
            for (int k = 0; k < TSH_MAX_MOMENTS; k++) {
                tsh_tensor_free(each->moment[k]);
                each->moment[k] = NULL;
            }
            each->steps = each->products = 0;
            each->product = 0;
        }
}

/* Makes t a constant (on 0), or a leaf that is trained (on 1). */
static void tshi_freeze_set(tsh_tensor *t, int on) {
    if (t->requires_grad == on) return;
    (void)tsh_requires_grad(t, on);
    if (on) return;
    tsh_zero_grad(t);
    tshi_tape_return(t); /* the memory of its gradient */
    tshi_mem_release(t->ctx, t->marks);
    t->marks = NULL;
    tshi_freeze_drop_moments(t);
}

/* Freezes the parameters below module that match the pattern (on 0), or undoes that (on 1). op: the
 * public function, for errors. */
static TSHI_COLD tsh_result tshi_freeze_all(const char *op, tsh_module *module, const char *pattern,
                                            int on) {
    tsh_ctx *ctx = module ? module->ctx : NULL;
    tshi_walk at = {NULL, NULL, 0};
    const tsh_tensor *first = NULL; /* the first parameter, for the error */
    int apply, count = 0, matched = 0;
    if (!ctx || ctx->error.code != TSH_OK) return ctx ? ctx->error.code : TSH_ERR_ARGUMENT;
    if (!pattern)
        return tsh_fail(ctx, TSH_ERR_ARGUMENT, "%s: the pattern is NULL; all is \"**\"", op);
    /* pass 0 checks all parameters, pass 1 freezes them or undoes that */
    for (apply = 0; apply < 2 && ctx->error.code == TSH_OK; apply++)
        while (tshi_module_step_once(module, &at)) {
            if (at.param->flags & TSHI_BUFFER) continue;
            if (!count++) first = at.param;
            if (!tshi_glob_match(pattern, tshi_module_below(module, at.param->path))) continue;
            matched++;
            if (apply)
                tshi_freeze_set(at.param, on);
            else if (ctx->error.code == TSH_OK)
                (void)tshi_freeze_may(op, at.param, on);
        }
    if (ctx->error.code == TSH_OK && !matched)
        (void)tsh_fail(
            ctx, TSH_ERR_ARGUMENT,
            "%s: \"%.96s\" matches no parameter, the first of which is \"%.96s\"; * stays "
            "within a name, ** is any number of names, as in \"**.bias\"",
            op, pattern, first ? tshi_module_below(module, first->path) : "");
    tshi_module_changed(ctx); /* ranks compare their models anew, with what is frozen */
    return ctx->error.code;
}

TSH_API TSHI_COLD tsh_result tsh_freeze(tsh_module *module, const char *pattern) {
    return tshi_freeze_all("tsh_freeze", module, pattern, 0);
}

TSH_API TSHI_COLD tsh_result tsh_unfreeze(tsh_module *module, const char *pattern) {
    return tshi_freeze_all("tsh_unfreeze", module, pattern, 1);
}
