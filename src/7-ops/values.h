/* ========================================================================== */
/* >>values                                          MARK: - values (private) */
/* Reading and writing the values of tensors; tensors as text.                */
/* Needs: >>redistribute.                                                     */
/* ========================================================================== */

/* TSH_LOCAL copies this rank's values. TSH_GLOBAL copies the whole tensor: to read one that is not
 * replicated is a collective; to write one is not, since every rank takes its slice of the given
 * values. */

/* Checks the arguments of tsh_read and tsh_write: t belongs to ctx, and its values of this extent
 * have `bytes` bytes. Returns the ctx; NULL and an error if not. */
static tsh_ctx *tshi_values_io(const char *op, tsh_ctx *ctx, tsh_tensor *t, tsh_extent extent,
                               const void *data, size_t bytes) {
    int64_t n = extent == TSH_LOCAL ? tsh_local_numel(t) : tsh_numel(t); /* number of elements */
    size_t need = (size_t)n * tsh_dtype_size(tsh_dtype_of(t));           /* number of bytes */
    if (!tshi_tensor_check_in(ctx, op, t) || !tshi_tensor_check(op, "t", &t, 1)) return NULL;
    if (bytes == need && (data || !need)) return t->ctx;
    (void)tsh_fail(t->ctx, TSH_ERR_ARGUMENT,
                   "%s: %llu bytes were given, the tensor's %s holds %llu", op,
                   data ? (unsigned long long)bytes : 0ull,
                   extent == TSH_LOCAL ? "local piece" : "global shape", (unsigned long long)need);
    return NULL;
}

TSH_API tsh_result tsh_read(tsh_ctx *ctx, tsh_tensor *t, tsh_extent extent, void *out,
                            size_t bytes) {
    tsh_layout whole = tsh_replicated();
    tshi_block *scratch;
    void *values; /* this rank's values, dense */
    if (!ctx) return TSH_ERR_ARGUMENT;
    if (extent == TSH_GLOBAL) tshi_error_report(ctx); /* peers may wait in the collective */
    if (!tshi_values_io("tsh_read", ctx, t, extent, out, bytes)) return ctx->error.code;
    if (!tsh_numel(t)) return TSH_OK;
    if (extent == TSH_LOCAL || t->layout.kind == TSH_REPLICATED || ctx->tp.size == 1) {
        tshi_kernel_dense(t, out, t->dtype, 0); /* copy t to out */
        return TSH_OK;
    }
    if (!(values = tshi_kernel_packed(t, &scratch))) return ctx->error.code;
    tshi_comm_set_caller(ctx, TSHI_CALLER_READ);
    (void)tshi_redistribute_move(t, &t->layout, &whole, TSHI_WIRE_EXACT, t->dtype, values, out);
    tshi_comm_set_caller(ctx, TSHI_CALLER_NONE);
    tshi_mem_release(ctx, scratch);
    return ctx->error.code;
}

TSH_API tsh_result tsh_write(tsh_ctx *ctx, tsh_tensor *t, tsh_extent extent, const void *in,
                             size_t bytes) {
    tsh_layout whole = tsh_replicated();
    tshi_block *scratch; /* this rank's slice of the values to write, dense */
    if (!ctx) return TSH_ERR_ARGUMENT;
    if (!tshi_values_io("tsh_write", ctx, t, extent, in, bytes)) return ctx->error.code;
    if (!(t->base->flags & TSHI_OWNED))
        return tsh_fail(ctx, TSH_ERR_ARGUMENT,
                        "tsh_write: takes an owned tensor; tsh_keep makes one");
    if (extent == TSH_GLOBAL && t->layout.kind == TSH_PARTIAL)
        return tsh_fail(ctx, TSH_ERR_LAYOUT,
                        "tsh_write: global values of a partial sum are not defined");
    if (!tshi_tensor_may_change("tsh_write", t->base)) return ctx->error.code;
    if (!tsh_numel(t)) return TSH_OK;
    if (extent == TSH_LOCAL || t->layout.kind == TSH_REPLICATED || ctx->tp.size == 1) {
        tshi_kernel_dense(t, tshi_kernel_unconst(in), t->dtype, 1); /* copy in to t */
        tshi_tensor_forget_exact(t->base);
        return TSH_OK;
    }
    scratch = tshi_mem_alloc(ctx, TSH_MEM_STEP,
                             (size_t)tsh_local_numel(t) * tsh_dtype_size(t->dtype));
    if (!scratch) return ctx->error.code;
    (void)tshi_redistribute_move(t, &whole, &t->layout, TSHI_WIRE_EXACT, t->dtype, in,
                                 tshi_mem_data(scratch));
    tshi_kernel_dense(t, tshi_mem_data(scratch), t->dtype, 1); /* copy the slice to t */
    tshi_tensor_forget_exact(t->base);
    tshi_mem_release(ctx, scratch);
    return ctx->error.code;
}

/* Does what tsh_to_string does, in a ctx without an error. */
static void tshi_values_text(tsh_tensor *t, char *text, size_t size) {
    char form[TSHI_TEXT_SIZE]; /* t's shape and layout as text */
    tshi_block *scratch;
    const void *values;
    int64_t e, n = tsh_local_numel(t); /* e: index of an element */
    int d;
    if (!tshi_tensor_check("tsh_to_string", "t", &t, 1) ||
        !(values = tshi_kernel_packed(t, &scratch)))
        return;
    tsh_text_add(text, size, "%s %s:", tshi_dtype_name(t->dtype), tshi_tensor_text(t, form));
    for (e = 0; e < n && strlen(text) + 1 < size; e++) {
        int64_t run = 1; /* number of elements in a row, then in a matrix, ... */
        for (d = t->ndim - 1; d > 0 && e; d--)
            /* writes a slash before the first element of each further row, matrix, ... */
            if (e % (run *= t->local[d]) == 0) tsh_text_add(text, size, " /");
        tsh_text_add(text, size, " %.6g", tshi_dtype_get(t->dtype, values, e));
    }
    tshi_mem_release(t->ctx, scratch);
}

TSH_API TSHI_COLD char *tsh_to_string(tsh_tensor *t, char *text, size_t size) {
    tsh_ctx *ctx = t ? t->ctx : NULL;
    tsh_error before; /* the error of the ctx: a debugger shows tensors after it, too */
    if (!size || !text) return text;
    text[0] = '\0';
    if (ctx) before = ctx->error;
    if (ctx) ctx->error.code = TSH_OK;
    tshi_values_text(t, text, size);
    if (ctx && before.code != TSH_OK) ctx->error = before;
    return text;
}
