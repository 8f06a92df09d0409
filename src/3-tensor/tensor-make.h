/* ========================================================================== */
/* >>tensor-make                                MARK: - tensor-make (private) */
/* Making tensors, reading them, giving them initial values.                  */
/* Needs: >>tensor-check.                                                     */
/* ========================================================================== */

TSH_API tsh_tensor *tsh_tensor_new(tsh_ctx *ctx, tsh_dtype dtype, tsh_shape shape,
                                   tsh_layout layout) {
    tsh_tensor *t = tshi_tensor_make(ctx, "tsh_tensor_new", TSHI_OWNED, TSH_MEM_TENSORS, dtype,
                                     &shape, &layout);
    if (t && !(ctx->dry && tshi_dtypes[dtype].floating))
        memset(tshi_tensor_at(t), 0, tshi_dtype_bytes(dtype, tsh_local_numel(t)));
    return t;
}

TSH_API tsh_tensor *tsh_tensor_from(tsh_ctx *ctx, tsh_dtype dtype, tsh_shape shape,
                                    tsh_layout layout, const void *data) {
    tsh_tensor *t = tshi_tensor_make(ctx, "tsh_tensor_from", TSHI_OWNED, TSH_MEM_TENSORS, dtype,
                                     &shape, &layout);
    if (t && !data && tsh_local_numel(t)) {
        tshi_tensor_release(t);
        return tshi_error_null(ctx, TSH_ERR_ARGUMENT, "tsh_tensor_from: data is NULL");
    }
    if (t && data) memcpy(tshi_tensor_at(t), data, tshi_dtype_bytes(dtype, tsh_local_numel(t)));
    return t;
}

TSH_API tsh_tensor *tsh_from(tsh_ctx *ctx, const void *data, tsh_shape shape, tsh_dtype dtype) {
    const tsh_dtype chosen = dtype ? dtype : TSH_REAL;
    tsh_tensor *t = tshi_tensor_out(ctx, "tsh_from", chosen, &shape, NULL);
    if (!t || !tsh_local_numel(t)) return t;
    if (!data) return tshi_error_null(ctx, TSH_ERR_ARGUMENT, "tsh_from: data is NULL");
    memcpy(tshi_tensor_at(t), data, tshi_dtype_bytes(chosen, tsh_local_numel(t)));
    t->flags |= TSHI_GIVEN;
    return t;
}

TSH_API void tsh_tensor_free(tsh_tensor *t) {
    if (t && (t->flags & TSHI_OWNED) && !(t->flags & (TSHI_DEAD | TSHI_PARAM)))
        tshi_tensor_release(t);
}

TSH_API tsh_tensor *tsh_full(tsh_ctx *ctx, tsh_shape shape, double value) {
    tsh_tensor *t = tshi_tensor_out(ctx, "tsh_full", TSH_REAL, &shape, NULL);
    if (t) (void)tshi_init_fill(t, "tsh_full", tshi_init_make(TSH_INIT_CONSTANT, value, 0), 0);
    return t;
}

TSH_API tsh_tensor *tsh_zeros(tsh_ctx *ctx, tsh_shape shape) {
    return tsh_full(ctx, shape, 0.0);
}

TSH_API tsh_tensor *tsh_ones(tsh_ctx *ctx, tsh_shape shape) {
    return tsh_full(ctx, shape, 1.0);
}

TSH_API tsh_tensor *tsh_randn(tsh_ctx *ctx, tsh_shape shape) {
    tsh_tensor *t = tshi_tensor_out(ctx, "tsh_randn", TSH_REAL, &shape, NULL);
    if (t)
        (void)tshi_init_fill(t, "tsh_randn", tshi_init_make(TSH_INIT_NORMAL, 0, 1),
                             tshi_rng_hash(ctx->randn_calls++, "randn", 5));
    return t;
}

TSH_API tsh_tensor *tsh_uniform(tsh_ctx *ctx, tsh_shape shape, double low, double high) {
    tsh_tensor *t;
    if (!(low <= high && high - low <= DBL_MAX))
        return tshi_error_null(ctx, TSH_ERR_ARGUMENT,
                               "tsh_uniform: there are no numbers from %g to %g; the limits are "
                               "finite, and low is not above high",
                               low, high);
    t = tshi_tensor_out(ctx, "tsh_uniform", TSH_REAL, &shape, NULL);
    if (t)
        (void)tshi_init_fill(t, "tsh_uniform", tshi_init_make(TSH_INIT_UNIFORM, low, high),
                             tshi_rng_hash(ctx->randn_calls++, "uniform", 7));
    return t;
}

TSH_API tsh_tensor *tsh_arange(tsh_ctx *ctx, tsh_dtype dtype, double start, double stop,
                               double step) {
    const double length = step != 0 ? ceil((stop - start) / step) : -1; /* number of elements */
    if (!tshi_dtype_exists(dtype) ||
        (tshi_dtypes[dtype].floating && !tshi_dtype_computes(dtype)) ||
        !tshi_dtype_holds(dtype, start) || !tshi_dtype_holds(dtype, stop))
        return tshi_error_null(ctx, TSH_ERR_DTYPE, "tsh_arange: dtype %d cannot hold %g to %g",
                               (int)dtype, start, stop);
    if (!(length >= 0 && length < 9e15))
        return tshi_error_null(ctx, TSH_ERR_ARGUMENT, "tsh_arange: from %g to %g by %g never ends",
                               start, stop, step);
    const tsh_shape shape = tsh_shape1((int64_t)length);
    tsh_tensor *t = tshi_tensor_out(ctx, "tsh_arange", dtype, &shape, NULL);
    for (int64_t i = 0; t && i < shape.dim[0]; i++)
        tshi_dtype_put(dtype, tshi_tensor_at(t), i, start + (double)i * step);
    return t;
}

TSH_API void *tsh_data(tsh_ctx *ctx, tsh_tensor *t) {
    if (!tshi_tensor_check_in(ctx, "tsh_data", t)) return NULL;
    t->base->flags |= TSHI_GIVEN; /* the program may write */
    return tsh_local_numel(t) ? tshi_tensor_at(t) : NULL;
}

TSH_API double tsh_item(tsh_ctx *ctx, tsh_tensor *t) {
    char text[TSHI_TEXT_SIZE];
    if (!tshi_tensor_check_in(ctx, "tsh_item", t)) return (double)NAN;
    const int one = tsh_numel(t) == 1; /* t has a single element */
    if (one && t->layout.kind == TSH_REPLICATED)
        return tshi_dtype_get(t->dtype, tshi_tensor_at(t), 0);
    (void)tsh_fail(ctx, one ? TSH_ERR_LAYOUT : TSH_ERR_SHAPE,
                   "tsh_item: takes one replicated element, not %s%s", tshi_tensor_text(t, text),
                   one ? "; complete it first: tsh_redistribute(x, tsh_replicated())" : "");
    return (double)NAN;
}

/* -- tsh_init_<name>: initial values of a tensor ---------------------------- */

/* Does what every tsh_init_<name> does: fills t with the initial values that desc describes (NULL:
 * those of `usual`); the kind is always that of `usual`. op: the function's name, for errors. */
TSHI_OUTLINE tsh_result tshi_tensor_init(const char *op, tsh_tensor *t, const tsh_init *desc,
                                   tsh_init usual) {
    char text[TSHI_TEXT_SIZE];
    tsh_init init = desc ? *desc : usual;
    tsh_ctx *ctx = t ? t->ctx : NULL;
    init.kind = usual.kind;
    if (!ctx || ctx->error.code != TSH_OK) return ctx ? ctx->error.code : TSH_ERR_ARGUMENT;
    if (!(t->flags & TSHI_OWNED) || (t->flags & TSHI_STALE) || !tshi_dtype_computes(t->dtype) ||
        t->layout.kind == TSH_PARTIAL)
        return tsh_fail(ctx, TSH_ERR_ARGUMENT,
                        "%s: takes an owned tensor of %s, replicated or sharded, not %s %s", op,
                        tshi_dtype_name(TSH_REAL), tshi_dtype_name(t->dtype),
                        tshi_tensor_text(t, text));
    if (t->absent) return TSH_OK; /* other stages of the pipeline hold it: nothing to fill */
    if (!tshi_tensor_may_change(op, t)) return ctx->error.code;
    if (t->flags & TSHI_PARAM) return tshi_init_fill_param(t, op, init);
    return tshi_init_fill(t, op, init, tshi_rng_hash(ctx->randn_calls++, "init", 4));
}

/* Defines tsh_init_<name>. a and b: default parameters of this kind, as in torch.nn.init. */
#define TSHI_INIT_FUNCTION(name, kind, a, b)                                                       \
    TSH_API tsh_result tsh_init_##name(tsh_tensor *t, const tsh_init *desc) {                      \
        return tshi_tensor_init("tsh_init_" #name, t, desc,                                        \
                                tshi_init_make(TSH_INIT_##kind, a, b));                            \
    }
TSHI_INIT_FUNCTION(uniform, UNIFORM, 0, 1)
TSHI_INIT_FUNCTION(normal, NORMAL, 0, 1)
TSHI_INIT_FUNCTION(trunc_normal, TRUNC_NORMAL, 0, 1)
TSHI_INIT_FUNCTION(constant, CONSTANT, 0, 0)
TSHI_INIT_FUNCTION(zeros, ZEROS, 0, 0)
TSHI_INIT_FUNCTION(ones, ONES, 0, 0)
TSHI_INIT_FUNCTION(kaiming_uniform, KAIMING_UNIFORM, 0, 0)
TSHI_INIT_FUNCTION(kaiming_normal, KAIMING_NORMAL, 0, 0)
TSHI_INIT_FUNCTION(xavier_uniform, XAVIER_UNIFORM, 0, 0)
TSHI_INIT_FUNCTION(xavier_normal, XAVIER_NORMAL, 0, 0)
TSHI_INIT_FUNCTION(orthogonal, ORTHOGONAL, 0, 0)
TSHI_INIT_FUNCTION(dirac, DIRAC, 0, 0)
#undef TSHI_INIT_FUNCTION
