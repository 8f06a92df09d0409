/* ========================================================================== */
/* >>tensor                                          MARK: - tensor (private) */
/* Tensor handles and their two lifetimes, shapes, views, the runs of a       */
/* shard.                                                                     */
/* Needs: >>mem >>dtype >>layout.                                             */
/* ========================================================================== */

/* A tsh_tensor is a handle: shape, layout and strides of values that lie in a reference-counted
 * block. Owned handles live until they are freed, all others until their step or scope ends. A view
 * shares its base's block and gradients. An op first calls tshi_tensor_check and returns a tensor
 * made by tshi_tensor_out. After an error, both functions return NULL, and so does the op. */

#define TSHI_TENSOR_SHAPE(ndim, params, ...) /* defines tsh_shape<ndim> */                         \
    TSH_API tsh_shape tsh_shape##ndim params {                                                     \
        const tsh_shape shape = {ndim, {__VA_ARGS__}};                                             \
        return shape;                                                                              \
    }
TSHI_TENSOR_SHAPE(0, (void), 0)
TSHI_TENSOR_SHAPE(1, (int64_t a), a)
TSHI_TENSOR_SHAPE(2, (int64_t a, int64_t b), a, b)
TSHI_TENSOR_SHAPE(3, (int64_t a, int64_t b, int64_t c), a, b, c)
TSHI_TENSOR_SHAPE(4, (int64_t a, int64_t b, int64_t c, int64_t d), a, b, c, d)
#undef TSHI_TENSOR_SHAPE

/* Writes a shape to text, as "(2, 3)". Returns text. */
static char *tshi_tensor_sizes(const int64_t *dim, int ndim, char *text) {
    text[0] = '\0';
    tsh_text_add(text, TSHI_TEXT_SIZE, "(");
    for (int i = 0; i < ndim; i++)
        tsh_text_add(text, TSHI_TEXT_SIZE, i ? ", %lld" : "%lld", (long long)dim[i]);
    tsh_text_add(text, TSHI_TEXT_SIZE, ")");
    return text;
}

/* Writes t's shape and layout to text, as "(2, 3) S(1)", for error messages. Returns text. */
static char *tshi_tensor_text(const tsh_tensor *t, char *text) {
    char layout[TSHI_TEXT_SIZE];
    tsh_text_add(tshi_tensor_sizes(t->dim, t->ndim, text), TSHI_TEXT_SIZE, " %s",
                 tshi_layout_text(&t->layout, layout, sizeof layout));
    return text;
}

/* -- handles ----------------------------------------------------------------
 * A released handle is reused, but never while something refers to it. t->refs counts references: a
 * tape node refers to its inputs, output and leaves, a view to its base, a bucket to its leaves, a
 * pipeline to the output of a micro-batch, a module to the mask in its descriptor. A handle that is
 * released while it has references is dead: it has no values and gets no gradient. It joins the
 * free handles when its last reference is removed. */

/* Size in bytes of the first fields of a handle, those that step tensors use. The fields from
 * `path` on are set in owned tensors only. */
enum { TSHI_TENSOR_STEP = offsetof(tsh_tensor, path) };

static void tshi_tensor_ring(tsh_tensor *head) {
    head->next = head->prev = head; /* makes head the head of an empty circular list */
}

static void tshi_tensor_insert(tsh_tensor *head, tsh_tensor *t) {
    t->prev = head->prev; /* appends t to the circular list of head */
    t->next = head;
    t->prev->next = t;
    head->prev = t;
}

/* Returns a new handle, zeroed and added to the list of owned or of step tensors. Reuses the oldest
 * free handle, but only if over 256 more handles are free than the last step released, so that use
 * of a released tensor is detected (TSHI_DEAD) for one whole step. Without memory, returns NULL and
 * records an error. */
static tsh_tensor *tshi_tensor_handle(tsh_ctx *ctx, unsigned flags) {
    tshi_handles *h = &ctx->handles;
    tsh_tensor *t;
    if (h->free > h->ended + 256) {
        t = h->oldest;
        h->oldest = t->next;
        h->free--;
        for (size_t at = 0; at < TSHI_TENSOR_STEP; at += 64) TSHI_PREFETCH((char *)t->next + at);
        tshi_mem_zero(t, TSHI_TENSOR_STEP);
    } else {
        t = (tsh_tensor *)tshi_mem_arena_alloc(ctx, &ctx->books, sizeof *t);
        if (!t) return NULL;
    }
    t->ctx = ctx;
    t->flags = flags;
    t->base = t;
    t->depth = ctx->depth;
    if (flags & TSHI_OWNED) h->count++;
    tshi_tensor_insert(flags & TSHI_OWNED ? &h->owned : &h->step, t);
    return t;
}

/* Releases the memory of a tensor's values and gradients; its handle stays. */
static void tshi_tensor_drop_values(tsh_tensor *t) {
    tshi_mem_release(t->ctx, t->block);
    tshi_mem_release(t->ctx, t->gr.block);
    tshi_mem_release(t->ctx, t->gp.block);
    tshi_mem_release(t->ctx, t->marks);
    t->block = t->marks = NULL;
    if (t->flags & TSHI_OWNED) { /* only owned tensors have `low` and `packed` */
        tshi_mem_release(t->ctx, t->low);
        tshi_mem_release(t->ctx, t->packed);
        t->low = t->packed = NULL;
    }
    memset(&t->gr, 0, sizeof t->gr);
    memset(&t->gp, 0, sizeof t->gp);
    t->sparse = 0;
}

static void tshi_tensor_ref(tsh_tensor *t) {
    if (t) t->refs++;
}

/* Removes a reference to t, which may be NULL. If it was the last one and t is dead, t joins the
 * free handles, and, if t is a view, the same is done with its reference to its base. */
static void tshi_tensor_unref(tsh_tensor *t) {
    while (t && --t->refs == 0 && (t->flags & TSHI_DEAD)) {
        tshi_handles *h = &t->ctx->handles;
        t->next = NULL;
        *(h->free ? &h->newest->next : &h->oldest) = t;
        h->newest = t;
        h->free++;
        t = t->base != t ? t->base : NULL;
    }
}

/* Releases a tensor's values and gradients now, and its handle as soon as nothing refers to it. */
static void tshi_tensor_release(tsh_tensor *t) {
    tshi_tensor_drop_values(t);
    if (t->flags & TSHI_OWNED) {
        t->ctx->handles.count--;
        memset((char *)t + TSHI_TENSOR_STEP, 0, sizeof *t - TSHI_TENSOR_STEP);
    }
    t->requires_grad = 0;    /* backward computes no gradient of t */
    t->prev->next = t->next; /* removes t from the list of owned or of step tensors */
    t->next->prev = t->prev;
    t->next = t->prev = t;
    t->refs++; /* so that t is not freed before it is marked dead */
    t->flags |= TSHI_STALE | TSHI_DEAD;
    tshi_tensor_unref(t);
}

/* -- shapes, strides and dimensions of tensors ------------------------------ */

static int64_t tshi_tensor_product(const int64_t *dim, int n) {
    int64_t product = 1; /* the result if n is 0 */
    for (int i = 0; i < n; i++) product *= dim[i];
    return product;
}

/* Sets the strides of contiguous row-major values of shape `local`; a size of 0 counts as 1. */
static void tshi_tensor_strides(const int64_t *local, int ndim, int64_t *stride) {
    int64_t step = 1;
    for (int i = ndim - 1; i >= 0; i--) {
        stride[i] = step;
        step *= local[i] > 1 ? local[i] : 1;
    }
}

/* Returns 1 if t's values are dense: contiguous, in row-major order. */
static int tshi_tensor_is_dense(const tsh_tensor *t) {
    int64_t step = 1;
    for (int i = t->ndim - 1; i >= 0; i--) {
        if (t->local[i] > 1 && t->stride[i] != step) return 0;
        step *= t->local[i] > 1 ? t->local[i] : 1;
    }
    return 1;
}

/* Returns dim, or dim + ndim if it is negative; -1 if t has no such dimension. */
static int tshi_tensor_axis(const tsh_tensor *t, int dim) {
    int axis = dim < 0 ? dim + t->ndim : dim;
    return axis >= 0 && axis < t->ndim ? axis : -1;
}

/* Returns 1 if t is 0-dimensional and dim is 0 or -1. Ops along a dimension accept this, as in
 * PyTorch: they treat t as one element along that dimension and return a 0-dimensional result. */
static int tshi_tensor_scalar_axis(const tsh_tensor *t, int dim) {
    return !t->ndim && (dim == 0 || dim == -1);
}

TSH_API tsh_ctx *tsh_ctx_of(const tsh_tensor *t) {
    return t ? t->ctx : NULL;
}

TSH_API tsh_dtype tsh_dtype_of(const tsh_tensor *t) {
    return t ? t->dtype : TSH_REAL;
}

TSH_API int tsh_ndim(const tsh_tensor *t) {
    return t ? t->ndim : 0;
}

TSH_API tsh_shape tsh_shape_of(const tsh_tensor *t) {
    tsh_shape shape = tsh_shape0();
    if (!t) return shape;
    shape.ndim = t->ndim;
    memcpy(shape.dim, t->dim, sizeof shape.dim);
    return shape;
}

#define TSHI_TENSOR_OF_DIM(name, values) /* defines tsh_<name>: returns t->values[dim] */          \
    TSH_API int64_t tsh_##name(const tsh_tensor *t, int dim) {                                     \
        int axis = t ? tshi_tensor_axis(t, dim) : -1;                                              \
        return axis < 0 ? 0 : t->values[axis];                                                     \
    }
TSHI_TENSOR_OF_DIM(size, dim)
TSHI_TENSOR_OF_DIM(local_size, local)
TSHI_TENSOR_OF_DIM(stride, stride)
#undef TSHI_TENSOR_OF_DIM

TSH_API int64_t tsh_numel(const tsh_tensor *t) {
    return t ? tshi_tensor_product(t->dim, t->ndim) : 0;
}

TSH_API int64_t tsh_local_numel(const tsh_tensor *t) {
    return t ? tshi_tensor_product(t->local, t->ndim) : 0;
}

TSH_API tsh_layout tsh_layout_of(const tsh_tensor *t) {
    return t ? t->layout : tsh_replicated();
}

/* Sets t's shape, resolved layout, local shape and strides. It is an error if the shape or the
 * layout is not possible. The number of elements (a dimension of 0 counts as 1) is at most
 * SIZE_MAX / 16 and INT64_MAX / 16, so that sizes in bytes do not overflow. op: function name for
 * errors. */
static tsh_result tshi_tensor_set_shape(tsh_tensor *t, const char *op, const tsh_shape *shape,
                                        const tsh_layout *layout) {
    tsh_ctx *ctx = t->ctx;
    const int64_t max = SIZE_MAX < INT64_MAX ? (int64_t)(SIZE_MAX / 16) : INT64_MAX / 16;
    int64_t total = 1; /* number of elements; a dimension of 0 counts as 1 */
    int i;
    t->ndim = shape->ndim;
    if (shape->ndim < 0 || shape->ndim > TSH_MAX_DIMS)
        return tsh_fail(ctx, TSH_ERR_SHAPE, "%s: %d dimensions; at most %d are possible", op,
                        shape->ndim, TSH_MAX_DIMS);
    for (i = 0; i < shape->ndim; i++) {
        t->dim[i] = t->local[i] = shape->dim[i];
        if (t->dim[i] < 0 || (double)total * (double)t->dim[i] > (double)max)
            return tsh_fail(ctx, TSH_ERR_SHAPE, "%s: dimension %d is %lld", op, i,
                            (long long)t->dim[i]);
        total *= t->dim[i] ? t->dim[i] : 1;
    }
    t->layout = *layout;
    if (!tshi_layout_resolve(&t->layout, t->ndim, t->dim)) {
        char text[TSHI_TEXT_SIZE];
        return tsh_fail(ctx, TSH_ERR_LAYOUT, "%s: layout %s does not fit a tensor of %d dimensions",
                        op, tshi_layout_text(layout, text, sizeof text), t->ndim);
    }
    i = t->layout.dim;
    if (t->layout.kind == TSH_SHARDED && ctx->tp.size > 1)
        t->local[i] = tshi_layout_own(&t->layout, t->dim[i], &ctx->deal, ctx->tp.rank, NULL);
    tshi_tensor_strides(t->local, t->ndim, t->stride);
    return TSH_OK;
}

/* Returns 1 if each rank's shard of every row of t consists of whole blocks of the quantised dtype;
 * else returns 0 and records an error. */
static int tshi_tensor_check_blocks(const tsh_tensor *t, const char *op, tsh_dtype dtype) {
    const int64_t block = tshi_dtypes[dtype].elements, length = t->ndim ? t->dim[t->ndim - 1] : 1;
    const int cut = t->layout.kind == TSH_SHARDED && t->layout.dim == t->ndim - 1;
    const char *name = t->path ? t->path : "the tensor";
    char text[TSHI_TEXT_SIZE];
    tsh_range range[TSH_MAX_SEGMENTS];
    if (length % block)
        return tshi_error_zero(t->ctx, TSH_ERR_SHAPE,
                               "%s: \"%s\" %s has rows of %lld elements, no whole number of the "
                               "blocks of %lld of %s; leave it as it is",
                               op, name, tshi_tensor_text(t, text), (long long)length,
                               (long long)block, tshi_dtypes[dtype].name);
    for (int r = 0; cut && r < t->ctx->tp.size; r++) {
        (void)tshi_layout_own(&t->layout, length, &t->ctx->deal, r, range);
        for (int s = 0; s < t->layout.segments; s++) {
            if (range[s].start % block == 0 && range[s].length % block == 0) continue;
            return tshi_error_zero(
                t->ctx, TSH_ERR_LAYOUT,
                "%s: \"%s\" %s is cut within a block of %lld of %s: rank %d holds [%lld, %lld) of "
                "a row; cut it in units of %lld, by .unit of its rule and of the layer before it",
                op, name, tshi_tensor_text(t, text), (long long)block, tshi_dtypes[dtype].name, r,
                (long long)range[s].start, (long long)(range[s].start + range[s].length),
                (long long)block);
        }
    }
    return 1;
}

/* Returns a new tensor with uninitialised values. op: function name for errors; flags: TSHI_OWNED
 * or 0 (a step tensor); kind: the kind of memory, TSH_MEM_...; layout NULL: replicated. Returns
 * NULL if the ctx has an error; NULL and an error if arguments are wrong or there is no memory. */
static tsh_tensor *tshi_tensor_make(tsh_ctx *ctx, const char *op, unsigned flags, int kind,
                                    tsh_dtype dtype, const tsh_shape *shape,
                                    const tsh_layout *layout) {
    tsh_layout replicated = tsh_replicated();
    if (!ctx || ctx->error.code != TSH_OK) return NULL;
    if (!tshi_dtype_exists(dtype))
        return tshi_error_null(ctx, TSH_ERR_DTYPE, "%s: %d is no dtype", op, (int)dtype);
    tsh_tensor *t = tshi_tensor_handle(ctx, flags);
    if (!t) return NULL;
    t->dtype = dtype;
    if (tshi_tensor_set_shape(t, op, shape, layout ? layout : &replicated) == TSH_OK &&
        (!tshi_dtype_in_blocks(dtype) || tshi_tensor_check_blocks(t, op, dtype)))
        t->block = tshi_mem_alloc(ctx, kind, tshi_dtype_bytes(dtype, tsh_local_numel(t)));
    if (t->block) return t;
    tshi_tensor_release(t);
    return NULL;
}

/* Returns a new dense step tensor, uninitialised: the output of an op. NULL after an error. */
static tsh_tensor *tshi_tensor_out(tsh_ctx *ctx, const char *op, tsh_dtype dtype,
                                   const tsh_shape *shape, const tsh_layout *layout) {
    return tshi_tensor_make(ctx, op, 0, TSH_MEM_STEP, dtype, shape, layout);
}

/* Returns a step tensor with x's shape, layout and strides, and the values in `block`, to which it
 * adds a reference. It is its own base, so gradients do not flow to x. NULL: no memory. */
static tsh_tensor *tshi_tensor_detached(const tsh_tensor *x, tshi_block *block) {
    tsh_tensor *t = tshi_tensor_handle(x->ctx, 0);
    if (!t) return NULL;
    t->dtype = x->dtype;
    t->ndim = x->ndim;
    memcpy(t->dim, x->dim, sizeof t->dim);
    memcpy(t->local, x->local, sizeof t->local);
    memcpy(t->stride, x->stride, sizeof t->stride);
    t->layout = x->layout;
    t->offset = x->offset;
    t->block = block;
    block->refs++;
    return t;
}

/* Returns a view of x whose values are in `block`. The view shares x's gradients, and has x's shape
 * and strides until the caller changes them. */
static tsh_tensor *tshi_tensor_view_of(const tsh_tensor *x, tshi_block *block) {
    tsh_tensor *t = tshi_tensor_detached(x, block);
    if (!t) return NULL;
    t->base = x->base;
    tshi_tensor_ref(t->base); /* the reference ends when the view's handle is freed */
    return t;
}

/* Returns a view of x that shares x's values and gradients. The view has x's shape and strides
 * until the caller changes them. */
static tsh_tensor *tshi_tensor_view(const tsh_tensor *x) {
    return tshi_tensor_view_of(x, x->block);
}

static void *tshi_tensor_at(const tsh_tensor *t) { /* returns the first local element's address */
    return (char *)tshi_mem_data(t->block) + (size_t)t->offset * tsh_dtype_size(t->dtype);
}

/* Returns the address of the first local element of t, whose dtype must be TSH_REAL. */
static tsh_real *tshi_tensor_values(const tsh_tensor *t) {
    return (tsh_real *)tshi_tensor_at(t);
}

/* -- runs: the contiguous stretches of a shard ------------------------------ */

/* An iterator over the runs of a shard: the stretches of elements that are consecutive in the whole
 * tensor (row-major). Columns 2 and 3 of a (2, 4) tensor are the runs [2, 4) and [6, 8). A row is
 * the elements that share the indices before the sharded dimension. */
typedef struct tshi_runs {
    /* global, local: where the current run starts in the whole tensor and in the shard; length: its
     * number of elements */
    int64_t global, local, length;
    int64_t from, to; /* only elements from <= index < to of the tensor are visited */
    /* row: index in the whole tensor where the current row starts; width: elements of a row; inner:
     * elements of a row for one index of the sharded dimension */
    int64_t row, width, inner;
    int64_t held; /* number of the shard's elements before those of segment `segment` of the row */
    /* the rank's indices along the sharded dimension, per segment */
    tsh_range range[TSH_MAX_SEGMENTS];
    int segment, segments; /* index of the next segment of the row; number of segments */
} tshi_runs;

/* Returns an iterator over the runs of the shard of rank `rank` of tp. It visits only elements
 * [from, to) of the whole tensor. Loop: while (tshi_tensor_next_run(&run)) ... */
static tshi_runs tshi_tensor_runs(const tsh_tensor *t, int rank, int64_t from, int64_t to) {
    const int cut = t->layout.dim, sharded = t->layout.kind == TSH_SHARDED;
    const int64_t length = sharded ? t->dim[cut] : tsh_numel(t); /* a tensor that is not sharded is
                                                                  * a single row */
    tshi_runs run = TSHI_ZERO;
    const int64_t owned = tshi_layout_own(&t->layout, length, &t->ctx->deal, rank, run.range);
    run.inner = sharded ? tshi_tensor_product(t->dim + cut + 1, t->ndim - cut - 1) : 1;
    run.width = length * run.inner;
    run.segments = sharded ? t->layout.segments : 1;
    if (!owned || !run.width) return run; /* run.to is 0: there are no runs */
    run.from = from;
    run.to = to;
    run.row = from - from % run.width;
    run.held = from / run.width * owned * run.inner;
    return run;
}

/* Moves the iterator on to the next run; the first call moves it to the first run. Returns 0 at the
 * end. */
static int tshi_tensor_next_run(tshi_runs *run) {
    while (run->row < run->to) {
        const tsh_range *range = &run->range[run->segment];
        const int64_t begin = run->row + range->start * run->inner;
        const int64_t end = begin + range->length * run->inner;
        run->global = begin > run->from ? begin : run->from;
        run->local = run->held + run->global - begin;
        run->length = tshi_base_min(end, run->to) - run->global;
        run->held += end - begin;
        run->segment = (run->segment + 1) % run->segments;
        if (!run->segment) run->row += run->width;
        if (run->length > 0) return 1;
    }
    return 0;
}

/* Does what tshi_tensor_next_run does, but visits only the local elements [from, to). */
static int tshi_tensor_next_run_in(tshi_runs *run, int64_t from, int64_t to) {
    while (tshi_tensor_next_run(run)) {
        const int64_t skip = from > run->local ? from - run->local : 0;
        const int64_t end = tshi_base_min(run->local + run->length, to);
        run->local += skip;
        run->global += skip;
        run->length = end - run->local;
        if (run->length > 0) return 1;
    }
    return 0;
}

/* Returns an iterator over the runs of this rank's whole shard. */
static tshi_runs tshi_tensor_own_runs(const tsh_tensor *t) {
    return tshi_tensor_runs(t, t->ctx->tp.rank, 0, tsh_numel(t));
}

/* Converts this rank's local index along dimension `dim` to the global index. */
static int64_t tshi_tensor_global(const tsh_tensor *t, int dim, int64_t local) {
    tsh_range range[TSH_MAX_SEGMENTS];
    int s;
    if (t->layout.kind != TSH_SHARDED || t->layout.dim != dim || t->ctx->tp.size == 1) return local;
    (void)tshi_layout_own(&t->layout, t->dim[dim], &t->ctx->deal, t->ctx->tp.rank, range);
    for (s = 0; s < t->layout.segments - 1 && local >= range[s].length; s++)
        local -= range[s].length;
    return range[s].start + local;
}

/* Converts a global index along dimension `dim` to this rank's local index; -1: another rank holds
 * it. */
static int64_t tshi_tensor_local(const tsh_tensor *t, int dim, int64_t global) {
    tsh_range range[TSH_MAX_SEGMENTS];
    int64_t at = 0;
    if (t->layout.kind != TSH_SHARDED || t->layout.dim != dim) return global;
    (void)tshi_layout_own(&t->layout, t->dim[dim], &t->ctx->deal, t->ctx->tp.rank, range);
    for (int s = 0; s < t->layout.segments; s++) {
        if (global >= range[s].start && global < range[s].start + range[s].length)
            return at + global - range[s].start;
        at += range[s].length;
    }
    return -1;
}

/* Returns values[i], where values are contiguous integers of t's dtype. */
static int64_t tshi_tensor_integer(const tsh_tensor *t, const void *values, int64_t i) {
    const tshi_dtype *row = &tshi_dtypes[t->dtype];
    int64_t value;
    row->load_integer((const char *)values + i * row->size, 1, 1, &value);
    return value;
}
