/* ========================================================================== */
/* >>tensor-check                              MARK: - tensor-check (private) */
/* What every op checks of its inputs.                                        */
/* Needs: >>trace >>init.                                                     */
/* ========================================================================== */

/* Every op begins with tshi_tensor_check or a variant of it, which records errors that concern a
 * single input. Whether layouts fit together is checked afterwards, by the op's layout rule
 * (>>rule). */

/* Returns 1 if node is a checkpoint whose forward, which backward will run again, used the
 * parameter t. */
static int tshi_tensor_in_checkpoint(const tshi_node *node, const tsh_tensor *t) {
    for (int i = 0; i < node->leaf_count; i++)
        if (node->leaves[i] == t) return 1;
    return 0;
}

/* Returns 1 if the recorded op `node` used t, as an input, through a view of t or inside a
 * checkpoint, or if it saved t's values for backward. */
static int tshi_tensor_in_node(const tshi_node *node, const tsh_tensor *t) {
    for (int i = 0; i < node->n; i++)
        if (node->in[i] && (node->in[i]->base == t || (t->block && node->saved[i] == t->block)))
            return 1;
    return tshi_tensor_in_checkpoint(node, t);
}

/* Returns 1 if uses(node, t) is true for any node on the ctx's tape or on the tape of a micro-batch
 * in progress. */
static int tshi_tensor_on_tape(const tsh_tensor *t,
                               int (*uses)(const tshi_node *node, const tsh_tensor *t)) {
    const tshi_micro *micro = t->ctx->micros;
    const tshi_node *node = t->ctx->tape.newest;
    for (;; micro = micro->next) {
        for (; node; node = node->older)
            if (uses(node, t)) return 1;
        if (!micro) return 0;
        node = micro->newest;
    }
}

/* Returns 1 if any op is recorded on the ctx's tape or on the tape of a micro-batch in progress. */
static int tshi_tensor_any_recorded(const tsh_ctx *ctx) {
    const tshi_micro *micro = ctx->micros;
    while (micro && !micro->newest) micro = micro->next;
    return ctx->tape.newest || micro;
}

/* Returns 1 if an op that used t is on the ctx's tape, or on the tape of a micro-batch in progress.
 * If so, t's values and layout must not change before backward. */
static int tshi_tensor_recorded(const tsh_tensor *t) {
    return tshi_tensor_on_tape(t, tshi_tensor_in_node);
}

/* Returns 1 if t's values may be overwritten; 0 and an error if backward needs them. */
static int tshi_tensor_may_change(const char *op, const tsh_tensor *t) {
    if (!tshi_tensor_recorded(t)) return 1;
    return tshi_error_zero(
        t->ctx, TSH_ERR_STATE,
        "%s: ops are recorded that used the tensor's values, and backward needs these; call "
        "tsh_backward or tsh_step_end first, or write to another tensor",
        op);
}

/* -- checks that every op begins with --------------------------------------- */

/* Returns the start of name i in `names`, a list separated by blanks such as "a b", and sets
 * *length to that name's length (no 0 follows it). If names is NULL, returns "input". */
static TSHI_COLD const char *tshi_tensor_name(const char *names, int i, int *length) {
    const char *name = names ? names : "input";
    for (; i > 0 && names; i--) {
        name += strcspn(name, " "); /* to the end of this name */
        name += strspn(name, " ");  /* to the start of the next name */
    }
    *length = (int)strcspn(name, " ");
    return name;
}

/* Writes to text how an error message names tensor i of a public function: name i of `names`, such
 * as "a b", or, if `names` is an array such as "parts[]", its element "parts[i]". Returns text. */
static TSHI_COLD char *tshi_tensor_argument(const char *names, int i, char *text) {
    int length;
    const char *array = strchr(names, '['), *name = tshi_tensor_name(names, array ? 0 : i, &length);
    if (array)
        (void)snprintf(text, TSHI_TEXT_SIZE, "%.*s[%d]", (int)(array - names), names, i);
    else
        (void)snprintf(text, TSHI_TEXT_SIZE, "%.*s", length, name);
    return text;
}

/* Records an error in ctx: op was given a tensor of another ctx, `other`. name: what op calls the
 * tensor. Returns NULL. */
static TSHI_COLD tsh_ctx *tshi_tensor_refuse_ctx(tsh_ctx *ctx, const char *op, const char *name,
                                                 const tsh_ctx *other) {
    if (other->world.rank == ctx->world.rank)
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT,
                       "%s: %s belongs to another ctx; tsh_read and tsh_tensor_from copy values",
                       op, name);
    else
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT,
                       "%s: %s belongs to the ctx of rank %d, not of rank %d: ranks share no "
                       "tensors (is it kept in a variable that all ranks see?); a collective, such "
                       "as tsh_broadcast, copies values from rank to rank",
                       op, name, other->world.rank, ctx->world.rank);
    return NULL;
}

/* Checks that an op's n inputs belong to one ctx and have values; initialises parameters on their
 * first use. names: the inputs' names for errors, in the form of tshi_tensor_argument. Returns the
 * ctx; NULL if the ctx has an error, from before or from these checks. */
static tsh_ctx *tshi_tensor_check_any(const char *op, const char *names, tsh_tensor *const *in,
                                      int n) {
    char text[TSHI_TEXT_SIZE];
    tsh_ctx *ctx = NULL;
    for (int i = 0; i < n && !ctx; i++)
        if (in[i]) ctx = in[i]->ctx;
    if (!ctx || ctx->error.code != TSH_OK) return NULL;
    if (ctx->trace) tshi_trace_open(ctx->trace, op);
    for (int i = 0; i < n && ctx->error.code == TSH_OK; i++) {
        if (!in[i])
            (void)tsh_fail(ctx, TSH_ERR_ARGUMENT, "%s: %s is NULL", op,
                           tshi_tensor_argument(names, i, text));
        else if (in[i]->ctx != ctx)
            (void)tshi_tensor_refuse_ctx(ctx, op, tshi_tensor_argument(names, i, text),
                                         in[i]->ctx);
        else if (!in[i]->block)
            (void)tshi_init_materialize(in[i]);
        if (ctx->error.code == TSH_OK && (in[i]->flags & TSHI_STALE))
            (void)tsh_fail(
                ctx, TSH_ERR_STALE,
                "%s: the values of %s were given back by tsh_backward, tsh_step_end or "
                "tsh_scope_end; tsh_retain_grad or tsh_keep would have kept them",
                op, tshi_tensor_argument(names, i, text));
    }
    return ctx->error.code == TSH_OK ? ctx : NULL;
}

/* Records the error that input i of an op is a quantised weight, which the op does not support.
 * Returns NULL. */
static TSHI_COLD tsh_ctx *tshi_tensor_refuse_blocks(const char *op, const char *names,
                                                    tsh_tensor *const *in, int i) {
    char text[TSHI_TEXT_SIZE];
    return (tsh_ctx *)tshi_error_null(
        in[i]->ctx, TSH_ERR_DTYPE,
        "%s: %s is %s; only tsh_linear and tsh_embedding compute with such a weight, and tsh_data "
        "gives its bytes",
        op, tshi_tensor_argument(names, i, text), tshi_dtype_name(in[i]->dtype));
}

/* Does what tshi_tensor_check_any does, and also records an error if an input is quantised. For all
 * ops except tsh_linear and tsh_embedding, which take quantised weights. */
static tsh_ctx *tshi_tensor_check(const char *op, const char *names, tsh_tensor *const *in, int n) {
    tsh_ctx *ctx = tshi_tensor_check_any(op, names, in, n);
    for (int i = 0; ctx && i < n; i++)
        if (tshi_dtype_in_blocks(in[i]->dtype)) return tshi_tensor_refuse_blocks(op, names, in, i);
    return ctx;
}

/* Does what tshi_tensor_check_any does, for functions that take a ctx and a tensor t. If t is NULL
 * or belongs to another ctx, the error is recorded in the ctx that was passed. */
static tsh_ctx *tshi_tensor_check_in(tsh_ctx *ctx, const char *op, tsh_tensor *t) {
    if (t && t->ctx == ctx) return tshi_tensor_check_any(op, "t", &t, 1);
    if (t && ctx) return tshi_tensor_refuse_ctx(ctx, op, "the tensor", t->ctx);
    (void)tsh_fail(ctx, TSH_ERR_ARGUMENT, "%s: the tensor is NULL", op);
    return NULL;
}

/* Does what tshi_tensor_check does, for arithmetic: it is also an error if an input's dtype is not
 * one that ops can compute with (tshi_dtype_computes). */
TSHI_OUTLINE tsh_ctx *tshi_tensor_check_floating(const char *op, const char *names,
                                                 tsh_tensor *const *in, int n) {
    char text[TSHI_TEXT_SIZE];
    tsh_ctx *ctx = tshi_tensor_check(op, names, in, n);
    for (int i = 0; ctx && i < n; i++) {
        if (tshi_dtype_computes(in[i]->dtype)) continue;
        (void)tsh_fail(ctx, TSH_ERR_DTYPE, "%s: %s is %s, not %s", op,
                       tshi_tensor_argument(names, i, text), tshi_dtype_name(in[i]->dtype),
                       tshi_dtype_name(TSH_REAL));
        return NULL;
    }
    return ctx;
}

/* Does what tshi_tensor_check_floating does, for ops whose weight may also be quantised. in: x,
 * weight and, if n is 3, bias. */
static tsh_ctx *tshi_tensor_check_weight(const char *op, tsh_tensor *const *in, int n) {
    tsh_tensor *others[2]; /* the inputs other than the weight: x, bias */
    if (!in[1] || !tshi_dtype_in_blocks(in[1]->dtype))
        return tshi_tensor_check_floating(op, "x weight bias", in, n);
    others[0] = in[0];
    others[1] = n > 2 ? in[2] : NULL;
    return tshi_tensor_check_any(op, "x weight bias", in, n)
               ? tshi_tensor_check_floating(op, "x bias", others, n - 1)
               : NULL;
}

/* Returns the dtype of an op's output, promoted as in PyTorch: the widest dtype of the inputs; for
 * two different dtypes of the same width, TSH_REAL. */
static tsh_dtype tshi_tensor_promote(tsh_tensor *const *in, int n) {
    tsh_dtype dtype = in[0]->dtype;
    for (int i = 1; i < n; i++) {
        /* by: bytes per element by which input i is wider than dtype */
        const int by = tshi_dtypes[in[i]->dtype].size - tshi_dtypes[dtype].size;
        if (in[i]->dtype != dtype) dtype = by > 0 ? in[i]->dtype : by < 0 ? dtype : TSH_REAL;
    }
    return dtype;
}
