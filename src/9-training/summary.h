/* ========================================================================== */
/* >>summary                                        MARK: - summary (private) */
/* The tree of modules as a table, with each optimiser's groups.              */
/* Needs: >>module-find >>optim-table.                                        */
/* ========================================================================== */

/* Returns 1 if two parameters of an optimiser belong to the same group. */
static int tshi_summary_together(const tshi_moments *a, const tshi_moments *b) {
    return a->desc == b->desc && a->lr_scale == b->lr_scale && a->weight_decay == b->weight_decay;
}

/* Writes a line for each parameter group of the optimisers of root and of modules below it, oldest
 * optimiser first. A group is all parameters that have the same kind, learning rate and weight
 * decay. */
static TSHI_COLD void tshi_summary_groups(const tsh_optim *optim, const tsh_module *root,
                                          FILE *file) {
    const tsh_module *m = optim->module;
    if (optim->older) tshi_summary_groups(optim->older, root, file);
    while (m && m != root) m = m->parent;
    for (int i = 0; m && i < optim->count; i++) {
        const tshi_moments *each = &optim->each[i], *other = optim->each;
        int count = 0; /* number of parameters in the group */
        char rates[64] = "";
        while (!tshi_summary_together(other, each)) other++;
        if (other < each) continue; /* the group's line was written before */
        for (; other < optim->each + optim->count; other++)
            count += tshi_summary_together(other, each);
        tsh_text_add(rates, sizeof rates, "lr %g, weight decay %g", optim->desc.lr * each->lr_scale,
                     each->weight_decay);
        (void)fprintf(file, "%s: %d parameters, the first \"%s\": %s\n",
                      tshi_optim_name(each->desc), count,
                      tshi_module_below(root, each->param->path), rates);
    }
}

/* Writes one parameter's line of tsh_summary. Returns 1 if it counts in the totals: this rank's
 * stage holds it, and it is not tied to an earlier one. */
static int tshi_summary_line(tsh_module *root, const tshi_walk *at, FILE *file) {
    const tsh_tensor *t = at->param;
    char path[TSH_PATH_SIZE], global[TSHI_TEXT_SIZE], local[TSHI_TEXT_SIZE], lay[TSHI_TEXT_SIZE];
    const char *below = tshi_module_below(root, at->module->path);
    /* 0: a tied parameter that an earlier line shows; the line names it */
    const int first = tshi_module_first(root, at);
    (void)snprintf(path, sizeof path, "%s%s%s", below,
                   *below && *at->module->param_name[at->slot] ? "." : "",
                   at->module->param_name[at->slot]);
    (void)fprintf(file, "%-40s %-12s %-5s %-16s %-24s %-16s", path, at->module->kind->name,
                  tshi_dtype_name(t->dtype), tshi_tensor_sizes(t->dim, t->ndim, global),
                  tshi_layout_text(&t->layout, lay, sizeof lay),
                  tshi_tensor_sizes(t->local, t->ndim, local));
    if (!first)
        (void)fprintf(file, " as %s\n", t->path);
    else if (t->absent)
        (void)fprintf(file, " on stage %d\n", t->stage - 1);
    else
        (void)fprintf(file, " %llu%s\n",
                      (unsigned long long)tshi_dtype_bytes(t->dtype, tsh_local_numel(t)),
                      t->requires_grad || (t->flags & TSHI_BUFFER) ? "" : " frozen");
    return first && !t->absent;
}

TSH_API TSHI_COLD tsh_result tsh_summary(tsh_module *module, FILE *file) {
    /* total: elements of all parameters; local: those on this rank; trained: those of parameters
     * that require a gradient */
    int64_t total = 0, local = 0, trained = 0;
    unsigned long long bytes = 0; /* bytes of this rank's shards */
    tshi_walk at = {NULL, NULL, 0};
    if (!module || !file) return TSH_ERR_ARGUMENT;
    (void)fprintf(file, "%-40s %-12s %-5s %-16s %-24s %-16s %s\n", "parameter", "kind", "dtype",
                  "global shape", "layout", "local shape", "bytes");
    while (tshi_module_step(module, &at)) {
        /* tied to an earlier parameter, or on another stage: not in the totals */
        if (!tshi_summary_line(module, &at, file)) continue;
        total += tsh_numel(at.param);
        local += tsh_local_numel(at.param);
        if (at.param->requires_grad) trained += tsh_numel(at.param);
        bytes += tshi_dtype_bytes(at.param->dtype, tsh_local_numel(at.param));
    }
    (void)fprintf(file, "%lld parameters; rank %d of %d holds %lld, %llu bytes; %lld are trained\n",
                  (long long)total, module->ctx->tp.rank, module->ctx->tp.size, (long long)local,
                  bytes, (long long)trained);
    if (module->ctx->optims) tshi_summary_groups(module->ctx->optims, module, file);
    return tshi_error_written(module->ctx, "tsh_summary", file);
}
