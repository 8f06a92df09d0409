/* ========================================================================== */
/* >>adapter                                        MARK: - adapter (private) */
/* Adapters of low rank beside a linear layer's weight: layouts, forward.     */
/* Needs: >>op-dropout >>op-linear >>op-lora >>module-tree.                   */
/* ========================================================================== */

/* An adapter of a linear layer adds s B A dropout(x) to its output (LoRA, Hu et al. 2021). A (rank,
 * in) and B (out, rank) are parameters of modules below the layer, "lora_A.<name>" and
 * "lora_B.<name>", as in PEFT. Their layouts follow from that of the layer's weight W: if W is
 * sharded along `out`, so is B, and A is replicated; if W is sharded along `in`, so is A, and B is
 * replicated. tsh_parallelize may change the layout of W later, and so may the first forward of a
 * layer of style TSH_AUTO: each forward lays out A and B as W is then (tshi_adapter_place). */

/* Forward of A or B by itself: x (.., in) -> (.., out). */
static tsh_tensor *tshi_adapter_alone(tsh_module *module, tsh_tensor **in, int n) {
    (void)n;
    return tsh_linear(in[0], module->param[0], NULL);
}

static const tshi_kind tshi_adapter_kind = {"lora", tshi_adapter_alone, 1 << TSH_PLAIN, NULL};

/* Sets *a and *b to the layouts of A and B of part i of the adapter, which follow from that of the
 * layer's weight W. Returns 0 and an error if W's segments are not the adapter's parts. */
static int tshi_adapter_layouts(const tsh_module *m, const tshi_adapter *adapter, int i,
                                tsh_layout *a, tsh_layout *b) {
    const tsh_layout *w = &m->param[0]->layout;
    *a = *b = tsh_replicated();
    if (w->kind != TSH_SHARDED) return 1;
    if (w->dim != m->reversed) { /* W is sharded along the input features */
        *a = *w;
        a->dim = 1;
        return 1;
    }
    *b = *w;
    b->dim = 0;
    if (adapter->parts == 1) return 1;
    if (w->segments != adapter->parts || w->segment[i].length != adapter->part[i].length)
        return tshi_error_zero(m->ctx, TSH_ERR_LAYOUT,
                               "tsh_lora: part %d of \"%s\" has %lld features; the weight is "
                               "sharded in %d segments, which must be the parts",
                               i, m->path, (long long)adapter->part[i].length, w->segments);
    b->segments = 1;
    b->segment[0] = w->segment[i];
    return 1;
}

/* Gives A and B of all parts the layouts that follow from W's present one. Returns 0 after an
 * error. */
static int tshi_adapter_place(const tsh_module *m, const tshi_adapter *adapter) {
    for (int i = 0; i < adapter->parts; i++) {
        tsh_tensor *const t[2] = {adapter->part[i].a->param[0], adapter->part[i].b->param[0]};
        tsh_layout layout[2];
        if (!tshi_adapter_layouts(m, adapter, i, &layout[0], &layout[1])) return 0;
        for (int k = 0; k < 2; k++) {
            if (t[k]->layout.kind == layout[k].kind &&
                (layout[k].kind != TSH_SHARDED ||
                 tshi_layout_equal(&t[k]->layout, &layout[k], t[k]->dim, &m->ctx->deal)))
                continue;
            tshi_module_relayout(t[k], &layout[k]);
            tshi_module_changed(m->ctx);
        }
    }
    return m->ctx->error.code == TSH_OK;
}

/* Adds to y (.., out), a linear layer's output for x (.., in), what the layer's adapter computes
 * from x, and returns the sum, in y's memory. If the adapter is merged into the weight, returns y
 * itself. give: the layout of a row-parallel y; NULL: R. */
static tsh_tensor *tshi_adapter_add(const tsh_module *m, tsh_tensor *x, tsh_tensor *y,
                                    const tsh_layout *give) {
    const tshi_adapter *adapter = m->adapter;
    int64_t first = 0; /* this rank's first column of y to which part i adds */
    if (adapter->kept) return y;
    if (!tshi_adapter_place(m, adapter)) return NULL;
    for (int i = 0; i < adapter->parts && y; i++) {
        const tshi_adapter_part *part = &adapter->part[i];
        tsh_tensor *b = part->b->param[0], *h = x;
        if (adapter->dropout > 0 && !m->evaluating) h = tsh_dropout(x, adapter->dropout, part->a);
        h = h ? tshi_linear_run(h, part->a->param[0], NULL, give, 0) : NULL;
        /* column-parallel, with x sharded along the sequence: gathers h in place of x */
        if (h && b->layout.kind == TSH_SHARDED) h = tsh_redistribute(h, tsh_replicated());
        y = h ? tshi_lora_add(y, h, b, adapter->scale, first) : NULL;
        first += b->local[0];
    }
    return y;
}
