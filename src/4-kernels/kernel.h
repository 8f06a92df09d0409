/* ========================================================================== */
/* >>kernel                                          MARK: - kernel (private) */
/* Loops over strided operands in blocks; sums, maxima and dot products of    */
/* rows.                                                                      */
/* Needs: >>team >>tensor >>math >>kernel-isa.                                */
/* ========================================================================== */

/* -- blocks -----------------------------------------------------------------
 * Elementwise kernels compute blocks of TSHI_BLOCK values. The last values of a run, and strided
 * ones, are copied to a pad, a buffer of that length: the same code computes every element, so its
 * value does not depend on its place, and loops of constant length vectorise at -O2, too. (At 16 or
 * less gcc -O3 unrolls them before it vectorises.) A sum has TSHI_BLOCK partial sums, the lanes:
 * lane[i] sums the elements i, i + TSHI_BLOCK, ..., so the order of additions is fixed. */

enum { TSHI_BLOCK = 32 };

/* Returns the sum of the 32 lanes, added by halves. */
TSHI_INLINE tsh_real tshi_kernel_fold(const tsh_real *lane) {
    tsh_real a[16];
    int i;
    for (i = 0; i < 16; i++) a[i] = lane[i] + lane[i + 16]; /* adds 32 sums in pairs: 16 are left */
    for (i = 0; i < 8; i++) a[i] += a[i + 8];               /* 8 sums are left */
    for (i = 0; i < 4; i++) a[i] += a[i + 4];               /* 4 sums are left */
    return (a[0] + a[2]) + (a[1] + a[3]);
}

/* Copies the first TSHI_BLOCK of n values (all, if n is smaller) to pad, and fills the rest of pad
 * with the first value. step: distance of the values in x, in elements. Not inlined, like all
 * TSHI_APART functions, to keep kernels small. */
TSHI_APART void tshi_kernel_gather(const tsh_real *x, int64_t step, int64_t n, tsh_real *pad) {
    const tsh_real first = x[0];
    int i, m = n < TSHI_BLOCK ? (int)n : TSHI_BLOCK; /* m: number of values to copy */
    for (i = 0; i < TSHI_BLOCK; i++) pad[i] = first;
    for (i = 1; i < m; i++) pad[i] = x[i * step];
}

/* Stores the first n values of a block (all if n is larger) in y, whose elements are `step` apart,
 * or adds them to y if `add` is 1. If add is 1 and step is 0, y is one element: the sum of the
 * block is added to it. */
TSHI_APART void tshi_kernel_scatter(tsh_real *y, int64_t step, int64_t n, const tsh_real *block,
                                    int add) {
    int i, m = n < TSHI_BLOCK ? (int)n : TSHI_BLOCK;
    if (add && !step && m == TSHI_BLOCK)
        *y += tshi_kernel_fold(block);
    else
        for (i = 0; i < m; i++) y[i * step] = add ? TSHI_R(y[i * step] + block[i]) : block[i];
}

/* Returns the block that begins at element e of x, which has n elements `step` apart: in place if a
 * whole block of contiguous elements is left, else copied to pad. If step is 0, all elements are
 * one value, and pad is filled for e = 0 only. */
TSHI_INLINE const tsh_real *tshi_kernel_load_block(const tsh_real *x, int64_t step, int64_t e,
                                                   int64_t n, tsh_real *pad) {
    const tsh_real *first = x + e * step;
    int i;
    if (step == 1 && n - e >= TSHI_BLOCK) return first; /* contiguous: not copied */
    if (step && n - e > 1)
        tshi_kernel_gather(first, step, n - e, pad);
    else if (step || !e) {             /* fills all of pad with one value */
        const tsh_real value = *first; /* read once, not after each store to pad */
        for (i = 0; i < TSHI_BLOCK; i++) pad[i] = value;
    }
    return pad;
}

/* Stores a block in y, which has n elements `step` apart, from element e on, or adds it to these
 * elements if `add` is 1. */
TSHI_INLINE void tshi_kernel_store_block(tsh_real *y, int64_t step, int64_t e, int64_t n,
                                         const tsh_real *block, int add) {
    int i;
    if (step != 1 || n - e < TSHI_BLOCK) { /* strided, or the last block */
        tshi_kernel_scatter(y + e * step, step, n - e, block, add);
        return;
    }
    if (add)
        TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) y[e + i] += block[i];
    else
        TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) y[e + i] = block[i];
}

/* Copies the block that begins at element e of x, which has n elements, to pad, converted to
 * tsh_real. */
TSHI_APART void tshi_kernel_convert(const tshi_operand *x, int64_t e, int64_t n, tsh_real *pad) {
    const tshi_dtype *row = &tshi_dtypes[x->dtype];
    const int m = n - e < TSHI_BLOCK ? (int)(n - e) : TSHI_BLOCK; /* values in this block */
    int i;
    row->load((const char *)x->data + e * x->step * row->size, x->step, m, pad);
    for (i = m; i < TSHI_BLOCK; i++) pad[i] = pad[0]; /* repeats the first value */
}

/* Returns the block that begins at element e of x, which has n elements, as tsh_real: in place if
 * it consists of contiguous tsh_real, else in pad. If fewer than TSHI_BLOCK elements are left, pad
 * repeats the block's first value after them. */
TSHI_INLINE const tsh_real *tshi_kernel_load(const tshi_operand *x, int64_t e, int64_t n,
                                             tsh_real *pad) {
    if (x->dtype == TSH_REAL)
        return tshi_kernel_load_block((const tsh_real *)x->data, x->step, e, n, pad);
    tshi_kernel_convert(x, e, n, pad);
    return pad;
}

/* Does what tshi_kernel_store does, for a y whose dtype is not tsh_real. If add is 1 and y has step
 * 0, y is one element, to which the sum of the block is added. */
TSHI_APART void tshi_kernel_round_to(const tshi_operand *y, int64_t e, int64_t n,
                                     const tsh_real *block, int add) {
    const tshi_dtype *row = &tshi_dtypes[y->dtype];
    const int m = n - e < TSHI_BLOCK ? (int)(n - e) : TSHI_BLOCK; /* values in this block */
    char *at = (char *)y->data + e * y->step * row->size;         /* address of the first value */
    tsh_real sum[TSHI_BLOCK];
    int i;
    if (add) row->load(at, y->step, m, sum); /* reads the values to which block is added */
    for (i = 0; i < m && add && y->step; i++) sum[i] += block[i];
    for (i = 0; i < m && add && !y->step; i++) /* y is one element: its last value is the total */
        sum[i] = sum[i ? i - 1 : 0] + block[i];
    row->store(at, y->step, m, add ? sum : block);
}

/* Stores a block, rounded to y's dtype, in y, which has n elements, from element e on, or adds it
 * to these elements if `add` is 1. */
TSHI_INLINE void tshi_kernel_store(const tshi_operand *y, int64_t e, int64_t n,
                                   const tsh_real *block, int add) {
    if (y->dtype == TSH_REAL)
        tshi_kernel_store_block((tsh_real *)y->data, y->step, e, n, block, add);
    else
        tshi_kernel_round_to(y, e, n, block, add);
}

/* tshi_kernel_load and tshi_kernel_store as functions that are called instead of inlined: kernels
 * that use these take less time to compile. */
TSHI_APART const tsh_real *tshi_kernel_load_apart(const tshi_operand *x, int64_t e, int64_t n,
                                                  tsh_real *pad) {
    return tshi_kernel_load(x, e, n, pad);
}
TSHI_APART void tshi_kernel_store_apart(const tshi_operand *y, int64_t e, int64_t n,
                                        const tsh_real *block, int add) {
    tshi_kernel_store(y, e, n, block, add);
}

/* Returns the block that begins at element e of x, which has n elements of an integer dtype, in
 * pad, converted to int64_t. If fewer than TSHI_BLOCK are left, pad repeats the block's first
 * value. */
TSHI_INLINE const int64_t *tshi_kernel_load_integers(const tshi_operand *x, int64_t e, int64_t n,
                                                     int64_t *pad) {
    const tshi_dtype *row = &tshi_dtypes[x->dtype];
    const int m = n - e < TSHI_BLOCK ? (int)(n - e) : TSHI_BLOCK; /* values in this block */
    int i;
    row->load_integer((const char *)x->data + e * x->step * row->size, x->step, m, pad);
    for (i = m; i < TSHI_BLOCK; i++) pad[i] = pad[0]; /* repeats the first value */
    return pad;
}

/* Copies the last n values of a row to pad and fills the rest of pad with the value `rest`. */
TSHI_APART void tshi_kernel_pad(const tsh_real *x, int64_t n, tsh_real rest, tsh_real *pad) {
    int64_t i;
    for (i = 0; i < TSHI_BLOCK; i++) pad[i] = rest;
    for (i = 0; i < n; i++) pad[i] = x[i];
}

/* Adds a block to the lanes (32 partial sums). Sums, dot products and maxima of a row are loops
 * over a function like this one, called once per block. The last block, which is padded, is added
 * after the loop, so that the lanes stay in registers. */
TSHI_INLINE void tshi_kernel_sum_step(tsh_real *lane, const tsh_real *x) {
    int i;
    for (i = 0; i < TSHI_BLOCK; i++) lane[i] += x[i];
}

/* Returns the sum of n contiguous values. */
TSHI_INLINE tsh_real tshi_kernel_sum(const tsh_real *x, int64_t n) {
    tsh_real lane[TSHI_BLOCK], pad[TSHI_BLOCK];
    int64_t e;
    int i;
    for (i = 0; i < TSHI_BLOCK; i++) lane[i] = 0;
    for (e = 0; e + TSHI_BLOCK <= n; e += TSHI_BLOCK) tshi_kernel_sum_step(lane, x + e);
    if (e < n) { /* the last, padded block */
        tshi_kernel_pad(x + e, n - e, 0, pad);
        tshi_kernel_sum_step(lane, pad);
    }
    return tshi_kernel_fold(lane);
}

/* Adds the products of two blocks, element by element, to the lanes (32 partial sums). */
TSHI_INLINE void tshi_kernel_dot_step(tsh_real *lane, const tsh_real *x, const tsh_real *y) {
    int i;
    for (i = 0; i < TSHI_BLOCK; i++) lane[i] += x[i] * y[i];
}

/* Returns the dot product of x and y, n contiguous values each. */
TSHI_INLINE tsh_real tshi_kernel_dot(const tsh_real *x, const tsh_real *y, int64_t n) {
    tsh_real lane[TSHI_BLOCK], pad[2][TSHI_BLOCK];
    int64_t e;
    int i;
    for (i = 0; i < TSHI_BLOCK; i++) lane[i] = 0;
    for (e = 0; e + TSHI_BLOCK <= n; e += TSHI_BLOCK) tshi_kernel_dot_step(lane, x + e, y + e);
    if (e < n) { /* the last, padded block */
        tshi_kernel_pad(x + e, n - e, 0, pad[0]);
        tshi_kernel_pad(y + e, n - e, 0, pad[1]);
        tshi_kernel_dot_step(lane, pad[0], pad[1]);
    }
    return tshi_kernel_fold(lane);
}

/* Returns the larger of x and y; NaN if x or y is NaN; y if both are zeros. */
TSHI_INLINE tsh_real tshi_kernel_larger(tsh_real x, tsh_real y) {
    return ((x > y) | (x != x)) ? x : y;
}

/* Updates the lanes, 32 running maxima: sets lane[i] to x[i] if x[i] is larger or NaN. */
TSHI_INLINE void tshi_kernel_max_step(tsh_real *lane, const tsh_real *x) {
    int i;
    TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) lane[i] = tshi_kernel_larger(x[i], lane[i]);
}

/* Returns the largest lane; NaN if a lane is NaN. Compares integers that have the same order as the
 * floats, with NaN as the largest: compilers vectorise a maximum of integers, but not of floats. */
TSHI_INLINE tsh_real tshi_kernel_max_fold(const tsh_real *lane) {
    int32_t best = INT32_MIN;
    tsh_real most = lane[0]; /* the result if tsh_real is double */
    int i;
    for (i = 1; i < TSHI_BLOCK && TSHI_DOUBLE; i++) most = tshi_kernel_larger(lane[i], most);
    if (TSHI_DOUBLE) return most;
    for (i = 0; i < TSHI_BLOCK; i++) {
        const uint32_t bits = tshi_math_bits((float)lane[i]);
        /* order: an integer that, as an int32_t, is ordered as the float is */
        const uint32_t order = bits ^ ((0u - (bits >> 31)) & 0x7FFFFFFFu);
        /* nan: all ones for NaN, whose magnitude is above infinity's, else 0; computed without a
         * comparison, so that the loop vectorises */
        const uint32_t nan = 0u - ((0x7F800000u - (bits & 0x7FFFFFFFu)) >> 31);
        const int32_t rank = (int32_t)((order & ~nan) | nan >> 1); /* NaN becomes the largest */
        best = best > rank ? best : rank;
    }
    /* converts the integer back to the bits of the float */
    return TSHI_R(tshi_math_float((uint32_t)best ^ ((0u - ((uint32_t)best >> 31)) & 0x7FFFFFFFu)));
}

/* Returns the largest of n > 0 values, NaN if any is NaN; a 0 may have either sign. */
TSHI_INLINE tsh_real tshi_kernel_max(const tsh_real *x, int64_t n) {
    tsh_real lane[TSHI_BLOCK], pad[TSHI_BLOCK];
    int64_t e;
    int i;
    for (i = 0; i < TSHI_BLOCK; i++) lane[i] = x[0];
    for (e = 0; e + TSHI_BLOCK <= n; e += TSHI_BLOCK) tshi_kernel_max_step(lane, x + e);
    if (e < n) { /* the last, padded block */
        tshi_kernel_pad(x + e, n - e, x[0], pad);
        tshi_kernel_max_step(lane, pad);
    }
    return tshi_kernel_max_fold(lane);
}

/* Sets y = e^(x - max) for a block of values x <= max, and adds y to the lanes (32 partial
 * sums). */
TSHI_INLINE void tshi_kernel_exps_block(tsh_real *lane, const tsh_real *x, tsh_real max,
                                        tsh_real *y, int fused) {
    int i;
    TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) y[i] = tshi_math_exp_below(x[i] - max, fused);
    TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) lane[i] += y[i];
}

/* Adds e^(x - max) of n values x <= max to the lanes (32 partial sums), and stores these terms in y
 * unless y is NULL. */
TSHI_INLINE void tshi_kernel_add_exps(tsh_real *lane, const tsh_real *x, int64_t n, tsh_real max,
                                      tsh_real *y, int fused) {
    tsh_real pad[TSHI_BLOCK], out[TSHI_BLOCK];
    int64_t e;
    for (e = 0; e + TSHI_BLOCK <= n; e += TSHI_BLOCK) {
        tshi_kernel_exps_block(lane, x + e, max, out, fused);
        if (y) tshi_kernel_store_block(y, 1, e, n, out, 0);
    }
    if (e < n) {
        tshi_kernel_pad(x + e, n - e, -TSHI_R(INFINITY), pad); /* e^-infinity adds 0 */
        tshi_kernel_exps_block(lane, pad, max, out, fused);
        if (y) tshi_kernel_store_block(y, 1, e, n, out, 0);
    }
}

/* Returns the sum of e^(x - max) over n values x <= max, and stores the terms in y unless y is
 * NULL. Returns NaN if max is not finite. */
TSHI_INLINE tsh_real tshi_kernel_sum_exps(const tsh_real *x, int64_t n, tsh_real max, tsh_real *y,
                                          int fused) {
    tsh_real lane[TSHI_BLOCK];
    memset(lane, 0, sizeof lane);
    tshi_kernel_add_exps(lane, x, n, max, y, fused);
    return tshi_kernel_fold(lane) + (max - max); /* max - max is 0, or NaN if max is not finite */
}

/* Casts const away without a compiler warning: tshi_operand.data is not const. */
static void *tshi_kernel_unconst(const void *data) {
    union {
        const void *from;
        void *to;
    } cast;
    cast.from = data;
    return cast.to;
}

static tshi_operand tshi_kernel_operand(const void *data, int64_t step, tsh_dtype dtype) {
    const tshi_operand x = {tshi_kernel_unconst(data), step, dtype};
    return x;
}

static tshi_operand tshi_kernel_reals(const tsh_real *data, int64_t step) {
    return tshi_kernel_operand(data, step, TSH_REAL);
}

/* Advances x->data by this many elements; does nothing if x->data is NULL. */
static void tshi_kernel_move(tshi_operand *x, int64_t elements) {
    if (x->data) x->data = (char *)x->data + elements * tshi_dtypes[x->dtype].size;
}

/* -- loops over elements, and over rows, of operands ------------------------ */

enum { TSHI_MAX_OPERANDS = 5, TSHI_MAX_ROWS = 8 }; /* max operands of a tshi_loop; of a tshi_rows */

/* A loop over an iteration space of ndim dimensions, along each of which every operand has a
 * stride. */
typedef struct tshi_loop {
    const tsh_ctx *ctx;        /* the rank's context: its threads run the loop */
    int ndim, n;               /* number of dimensions; number of operands */
    int64_t dim[TSH_MAX_DIMS]; /* length of each dimension on this rank */
    int64_t stride[TSHI_MAX_OPERANDS][TSH_MAX_DIMS]; /* per operand, in elements; 0: broadcast */
    tshi_operand x[TSHI_MAX_OPERANDS]; /* operands; their steps are set during the loop */
    /* the kernel to call; tshi_kernel_run sets this field and those below */
    tshi_kernel_fn kernel;
    const void *params; /* the kernel's parameters */
    int cut;            /* the dimension that is divided among threads */
} tshi_loop;

/* Begins a loop, without operands yet, over the local elements of a tensor. */
static void tshi_kernel_space(tshi_loop *loop, const tsh_tensor *shape) {
    loop->ctx = shape->ctx;
    loop->ndim = shape->ndim;
    loop->n = 0;
    memcpy(loop->dim, shape->local, sizeof loop->dim);
}

/* Adds an operand of t's shape, whose elements are at `data` with these strides, broadcast to the
 * loop's space as in PyTorch: dimensions are aligned at the right; the stride is 0 along a
 * dimension that t lacks or that has global length 1. */
TSHI_OUTLINE void tshi_kernel_add_operand(tshi_loop *loop, const tsh_tensor *t, const void *data,
                                          const int64_t *stride, tsh_dtype dtype) {
    int d, skip = loop->ndim - t->ndim; /* skip: number of dimensions that t lacks */
    for (d = 0; d < skip; d++) loop->stride[loop->n][d] = 0;
    for (d = 0; d < t->ndim; d++) loop->stride[loop->n][d + skip] = t->dim[d] == 1 ? 0 : stride[d];
    loop->x[loop->n++] = tshi_kernel_operand(data, 0, dtype);
}

/* Adds t's own values as an operand. */
static void tshi_kernel_tensor(tshi_loop *loop, const tsh_tensor *t) {
    tshi_kernel_add_operand(loop, t, tshi_tensor_at(t), t->stride, t->dtype);
}

/* Removes dimensions of length 1, and joins neighbours that are contiguous for every operand, so
 * that the innermost dimension is long. */
static void tshi_kernel_join(tshi_loop *loop) {
    int d, i, out = 0;
    for (d = 0; d < loop->ndim; d++) {
        int joined = out > 0; /* 1: dimension d joins the one before it */
        if (loop->dim[d] == 1) continue;
        for (i = 0; i < loop->n && joined; i++)
            joined = loop->stride[i][out - 1] == loop->stride[i][d] * loop->dim[d];
        if (!joined) out++;
        loop->dim[out - 1] = joined ? loop->dim[out - 1] * loop->dim[d] : loop->dim[d];
        for (i = 0; i < loop->n; i++) loop->stride[i][out - 1] = loop->stride[i][d];
    }
    loop->ndim = out;
}

/* Calls the kernel for each run along the innermost dimension. tshi_kernel_join was called
 * before. */
static void tshi_kernel_walk(const tshi_loop *loop) {
    tshi_operand x[TSHI_MAX_OPERANDS];
    int64_t index[TSH_MAX_DIMS] = {0};
    int d, i, inner = loop->ndim - 1;
    memcpy(x, loop->x, sizeof x);
    for (i = 0; i < loop->n && inner >= 0; i++) x[i].step = loop->stride[i][inner];
    for (;;) {
        loop->kernel(inner >= 0 ? loop->dim[inner] : 1, x, loop->params);
        for (d = inner - 1; d >= 0; d--) { /* increments the index as an odometer does */
            /* back: 0, or, if index[d] has passed its end, the length to go back to 0 */
            int64_t back = ++index[d] < loop->dim[d] ? 0 : loop->dim[d];
            for (i = 0; i < loop->n; i++)
                tshi_kernel_move(&x[i], loop->stride[i][d] * (back ? 1 - back : 1));
            if (!back) break;
            index[d] = 0;
        }
        if (d < 0) return; /* every index has passed its end */
    }
}

/* Runs one thread's part of a tshi_loop, which is `job`: indices `from` to `to` - 1 of the
 * dimension `cut`. A tshi_team_fn: tshi_team_run calls it on every thread. */
static void tshi_kernel_piece(void *job, int piece, int64_t from, int64_t to) {
    tshi_loop part = *(const tshi_loop *)job;
    int i;
    (void)piece;
    part.dim[part.cut] = to - from;
    for (i = 0; i < part.n; i++) tshi_kernel_move(&part.x[i], part.stride[i][part.cut] * from);
    tshi_kernel_walk(&part);
}

/* Runs a kernel, which writes to operand 0, over the whole space. Threads divide the outermost
 * dimension that is long enough and along which operand 0 has a stride other than 0, so no two
 * threads write to the same element. */
TSHI_OUTLINE void tshi_kernel_run(tshi_loop *loop, tshi_kernel_fn kernel, const void *params) {
    enum { MIN_ELEMENTS = 1 << 15 }; /* min elements per thread: fewer would not pay */
    int64_t count = 1;
    int d, pieces;
    for (d = 0; d < loop->ndim; d++) count *= loop->dim[d];
    if (!count) return; /* this rank holds no elements */
    if (loop->ctx->dry && tshi_dtypes[loop->x[0].dtype].floating) return;
    tshi_kernel_join(loop);
    loop->kernel = kernel;
    loop->params = params;
    pieces = tshi_team_parts(loop->ctx, count, MIN_ELEMENTS);
    for (d = 0; d < loop->ndim && (!loop->stride[0][d] || loop->dim[d] < pieces); d++) continue;
    loop->cut = d;
    if (pieces == 1 || d == loop->ndim) /* one piece, or no dimension to divide */
        tshi_kernel_walk(loop);
    else
        tshi_team_run(loop->ctx, pieces, loop->dim[d], d == loop->ndim - 1 ? 16 : 1,
                      tshi_kernel_piece, loop);
}

/* A job of `count` rows: row r of operand i begins at element r * x[i].step. If own[i] > 0, operand
 * i is scratch memory: each piece of the job (each thread) has own[i] elements of it. */
typedef struct tshi_rows {
    tshi_kernel_fn kernel;         /* the kernel, called once per piece of the rows */
    int64_t count;                 /* number of rows */
    const void *params;            /* the kernel's parameters */
    tshi_operand x[TSHI_MAX_ROWS]; /* the operands; data NULL: that operand is not used */
    int64_t own[TSHI_MAX_ROWS];    /* scratch elements per piece; 0: the operand is no scratch */
} tshi_rows;

/* Returns a tshi_rows, a job over rows, whose operands are not set yet. */
static tshi_rows tshi_kernel_rows_job(tshi_kernel_fn kernel, int64_t count, const void *params) {
    tshi_rows rows;
    memset(&rows, 0, sizeof rows);
    rows.kernel = kernel;
    rows.count = count;
    rows.params = params;
    return rows;
}

/* Calls the kernel once, for rows `from` to `to` - 1 of a tshi_rows, which is `job`. A
 * tshi_team_fn: tshi_team_run calls it on every thread. */
static void tshi_kernel_do_rows(void *job, int piece, int64_t from, int64_t to) {
    const tshi_rows *rows = (const tshi_rows *)job;
    tshi_operand x[TSHI_MAX_ROWS];
    int i;
    memcpy(x, rows->x, sizeof x);
    for (i = 0; i < TSHI_MAX_ROWS; i++)
        tshi_kernel_move(&x[i], from * x[i].step + piece * rows->own[i]);
    rows->kernel(to - from, x, rows->params);
}

/* Returns how many pieces, at most one per thread, to cut `rows` rows of `length` elements into. */
static int tshi_kernel_parts(const tsh_ctx *ctx, int64_t rows, int64_t length) {
    enum { MIN_ELEMENTS = 1 << 14 }; /* min elements per thread: fewer would not pay */
    return tshi_team_parts(ctx, rows, tshi_base_ceil(MIN_ELEMENTS, length > 0 ? length : 1));
}

/* Runs a tshi_rows, whose rows have `length` elements each, on the rank's threads. */
static void tshi_kernel_run_rows(const tsh_ctx *ctx, tshi_rows *rows, int64_t length) {
    tshi_team_run(ctx, tshi_kernel_parts(ctx, rows->count, length), rows->count, 1,
                  tshi_kernel_do_rows, rows);
}

/* Copies n elements of one dtype from `from` to `to`. TSHI_KERNEL_MOVE copies them as unsigned
 * integers of the dtype's size; if there is no such type, memcpy is called for each element. */
#define TSHI_KERNEL_MOVE(type)                                                                     \
    do {                                                                                           \
        typedef type TSHI_MAY_ALIAS bits; /* an unsigned integer that may alias floats */          \
        bits *TSHI_RESTRICT y = (bits *)to->data;                                                  \
        const bits *TSHI_RESTRICT x = (const bits *)from->data;                                    \
        TSHI_EACH for (i = 0; i < n; i++) y[i * sy] = x[i * sx];                                   \
    } while (0)
TSHI_APART void tshi_kernel_move_each(int64_t n, const tshi_operand *to, const tshi_operand *from) {
    const int64_t sy = to->step, sx = from->step; /* strides, in elements */
    int64_t i;
    const int64_t size = tshi_dtypes[to->dtype].size; /* bytes of an element */
    switch (size) {
    case 1: TSHI_KERNEL_MOVE(uint8_t); break;
    case 2: TSHI_KERNEL_MOVE(uint16_t); break;
    case 4: TSHI_KERNEL_MOVE(uint32_t); break;
    case 8: TSHI_KERNEL_MOVE(uint64_t); break;
    default:
        for (i = 0; i < n; i++)
            memcpy((char *)to->data + i * sy * size, (const char *)from->data + i * sx * size,
                   (size_t)size);
    }
}
#undef TSHI_KERNEL_MOVE

/* Copies n elements from `from` to `to` and converts their dtype: exactly between integers, else
 * through tsh_real. */
TSHI_APART void tshi_kernel_cast(int64_t n, const tshi_operand *to, const tshi_operand *from) {
    enum { BLOCK = 256 }; /* number of elements converted at a time */
    const tshi_dtype *y = &tshi_dtypes[to->dtype], *x = &tshi_dtypes[from->dtype];
    tshi_operand out = *to, in = *from;
    union {
        int64_t integer[BLOCK];
        tsh_real real[BLOCK];
    } block;
    if (to->dtype == TSH_REAL && to->step == 1) {
        x->load(in.data, in.step, n, (tsh_real *)out.data);
        return;
    }
    if (from->dtype == TSH_REAL && from->step == 1 && in.data != out.data) {
        y->store(out.data, out.step, n, (const tsh_real *)in.data);
        return;
    }
    for (; n > 0; n -= BLOCK) {
        const int64_t m = tshi_base_min(BLOCK, n);
        if (x->floating || y->floating) {
            x->load(in.data, in.step, m, block.real);
            y->store(out.data, out.step, m, block.real);
        } else {
            x->load_integer(in.data, in.step, m, block.integer);
            y->store_integer(out.data, out.step, m, block.integer);
        }
        tshi_kernel_move(&in, m * in.step);
        tshi_kernel_move(&out, m * out.step);
    }
}

/* Rounds n tsh_real at `values` to dtype, in place: afterwards the rounded values are contiguous
 * from `values` on. tshi_kernel_widen converts them back. */
static void tshi_kernel_narrow(void *values, int64_t n, tsh_dtype dtype) {
    const tshi_operand to = tshi_kernel_operand(values, 1, dtype);
    const tshi_operand from = tshi_kernel_operand(values, 1, TSH_REAL);
    /* Works in place, because tshi_kernel_cast reads each block of values before it writes it. */
    if (dtype != TSH_REAL) tshi_kernel_cast(n, &to, &from);
}

static void tshi_kernel_widen(void *values, int64_t n, tsh_dtype dtype) {
    enum { BLOCK = 256 };
    /* at: first element of the current block; m: its number of elements. The last block is
     * converted first, so that no value is overwritten before it is read. */
    int64_t m, at;
    for (at = (n - 1) / BLOCK * BLOCK; n > 0 && at >= 0 && dtype != TSH_REAL; at -= BLOCK) {
        tsh_real block[BLOCK];
        m = tshi_base_min(BLOCK, n - at);
        tshi_dtypes[dtype].load((char *)values + at * tshi_dtypes[dtype].size, 1, m, block);
        memcpy((tsh_real *)values + at, block, (size_t)m * sizeof *block);
    }
}

/* Returns a new memory block with the n tsh_real at `values` rounded to dtype. NULL: no memory. */
static tshi_block *tshi_kernel_rounded(tsh_ctx *ctx, const tsh_real *values, int64_t n,
                                       tsh_dtype dtype) {
    tshi_block *block = tshi_mem_alloc(ctx, TSH_MEM_STEP, tshi_dtype_bytes(dtype, n));
    const tshi_operand from = tshi_kernel_reals(values, 1);
    if (block && !ctx->dry) {
        const tshi_operand to = tshi_kernel_operand(tshi_mem_data(block), 1, dtype);
        tshi_kernel_cast(n, &to, &from);
    }
    return block;
}

/* Does what memcpy does, by blocks of constant size, which need no call: libc's memcpy is slower
 * for short runs. */
TSHI_APART void tshi_kernel_move_dense(void *to, const void *from, size_t bytes) {
    enum { BLOCK = 128 };
    size_t at;
    for (at = 0; at + BLOCK <= bytes; at += BLOCK)
        memcpy((char *)to + at, (const char *)from + at, BLOCK);
    if (at < bytes) memcpy((char *)to + at, (const char *)from + at, bytes - at);
}

/* Kernel: x[0] = x[1], converted if the dtypes differ. */
static void tshi_kernel_copy(int64_t n, const tshi_operand *x, const void *params) {
    (void)params;
    if (x[0].dtype != x[1].dtype)
        tshi_kernel_cast(n, &x[0], &x[1]);
    else if (x[0].step != 1 || x[1].step != 1)
        tshi_kernel_move_each(n, &x[0], &x[1]);
    else
        tshi_kernel_move_dense(x[0].data, x[1].data, tshi_dtype_bytes(x[0].dtype, n));
}

/* Kernel: x[0] += x[1]. */
TSHI_INLINE void tshi_kernel_add_body(int64_t n, const tshi_operand *x, const void *params) {
    tsh_real pad[TSHI_BLOCK];
    int64_t e;
    (void)params;
    for (e = 0; e < n; e += TSHI_BLOCK)
        tshi_kernel_store(&x[0], e, n, tshi_kernel_load(&x[1], e, n, pad), 1);
}
TSHI_KERNEL(tshi_kernel_add, void);

/* Copies t's local values to the array `dense`, row-major and converted to `dtype`; if to_tensor is
 * 1, copies from `dense` to t instead. */
static void tshi_kernel_dense(const tsh_tensor *t, void *dense, tsh_dtype dtype, int to_tensor) {
    int64_t stride[TSH_MAX_DIMS];
    tshi_loop loop;
    tshi_tensor_strides(t->local, t->ndim, stride);
    tshi_kernel_space(&loop, t);
    if (to_tensor) tshi_kernel_tensor(&loop, t); /* operand 0 is the destination */
    tshi_kernel_add_operand(&loop, t, dense, stride, dtype);
    if (!to_tensor) tshi_kernel_tensor(&loop, t);
    tshi_kernel_run(&loop, tshi_kernel_copy, NULL);
}

/* Returns t's local values, row-major and of dtype `dtype`: in place if they are so already, else
 * copied to *scratch, which the caller releases. NULL: no memory. The two functions below do the
 * same with t's own dtype and with tsh_real. */
static void *tshi_kernel_packed_as(const tsh_tensor *t, tsh_dtype dtype, tshi_block **scratch) {
    *scratch = NULL;
    if (t->dtype == dtype && tshi_tensor_is_dense(t)) return tshi_tensor_at(t); /* no copy */
    *scratch = tshi_mem_alloc(t->ctx, TSH_MEM_STEP, tshi_dtype_bytes(dtype, tsh_local_numel(t)));
    if (!*scratch) return NULL;
    tshi_kernel_dense(t, tshi_mem_data(*scratch), dtype, 0);
    return tshi_mem_data(*scratch);
}

static void *tshi_kernel_packed(const tsh_tensor *t, tshi_block **scratch) {
    return tshi_kernel_packed_as(t, t->dtype, scratch);
}

static tsh_real *tshi_kernel_packed_reals(const tsh_tensor *t, tshi_block **scratch) {
    return (tsh_real *)tshi_kernel_packed_as(t, TSH_REAL, scratch);
}

/* Returns t's local values as tsh_real and sets their strides: in place if that is t's dtype, else
 * row-major in *scratch, which the caller releases. NULL: no memory. */
static tsh_real *tshi_kernel_reals_of(const tsh_tensor *t, int64_t *stride, tshi_block **scratch) {
    *scratch = NULL;
    memcpy(stride, t->stride, sizeof t->stride);
    if (t->dtype == TSH_REAL) return tshi_tensor_values(t);
    tshi_tensor_strides(t->local, t->ndim, stride);
    return tshi_kernel_packed_reals(t, scratch);
}

/* Returns the buffer that an op which computes tsh_real writes its output to: out's own values, or,
 * if out has another dtype, *scratch, from which tshi_kernel_output_done rounds to out's dtype.
 * NULL: no memory. */
static tsh_real *tshi_kernel_output(tsh_tensor *out, tshi_block **scratch) {
    *scratch = NULL;
    if (out->dtype == TSH_REAL) return tshi_tensor_values(out);
    *scratch = tshi_mem_alloc(out->ctx, TSH_MEM_STEP, tshi_dtype_reals(tsh_local_numel(out)));
    return *scratch ? (tsh_real *)tshi_mem_data(*scratch) : NULL;
}

/* Ends tshi_kernel_output: if scratch is not NULL, rounds its values to out's dtype, stores them in
 * out and releases scratch. */
static void tshi_kernel_output_done(tsh_tensor *out, tshi_block *scratch) {
    if (!scratch) return;
    tshi_kernel_dense(out, tshi_mem_data(scratch), TSH_REAL, 1);
    tshi_mem_release(out->ctx, scratch);
}

/* Views t, of local shape (.., N), as a matrix of shape (*rows, N) whose rows are *stride elements
 * apart. Returns 0 if t's strides do not allow it. */
TSHI_OUTLINE int tshi_kernel_rows(const tsh_tensor *t, int64_t *rows, int64_t *stride) {
    int64_t step = 0;
    int d;
    *rows = tshi_tensor_product(t->local, t->ndim - 1);
    *stride = t->local[t->ndim - 1];
    for (d = t->ndim - 2; d >= 0; d--) {
        if (t->local[d] == 1) continue;
        if (!step) *stride = step = t->stride[d];
        if (t->stride[d] != step) return 0;
        step *= t->local[d];
    }
    return 1;
}
