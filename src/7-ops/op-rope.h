/* ========================================================================== */
/* >>op-rope                                        MARK: - op-rope (private) */
/* Rotary position embedding (Su et al. 2021).                                */
/* Needs: >>op.                                                               */
/* ========================================================================== */

/* The parameters of tsh_rope's kernel, and the params of its node. x is (.., T, D). Pair i of the
 * row at position t is rotated by the angle u = t base^(-2 i / dims), or t freqs[i]: (a, b) becomes
 * factor (a cos u - b sin u, b cos u + a sin u). Features from `dims` on are not changed. Backward
 * rotates the gradient by -u. */
typedef struct tshi_rope {
    int64_t pairs;        /* number of pairs: dims / 2 */
    int by_batch;         /* 1: each index of x's first dimension has positions of its own */
    int64_t next;         /* features from the a of one pair to the a of the next */
    int64_t gap;          /* features from the a of a pair to its b */
    double sign;          /* sign of the angle: 1, in backward -1 */
    int add;              /* 1: y += ..., 0: y = ... */
    int64_t gap_x, gap_y; /* gap as elements of x's memory, and of y's memory */
} tshi_rope;

/* Kernel: rotates n pairs (a, b). Operands: y and x, each from the first pair's a on, and the table
 * of one position: `pairs` cosines, then `pairs` sines. */
TSHI_INLINE void tshi_rope_pairs_body(int64_t n, const tshi_operand *operand,
                                      const tshi_rope *rope) {
    /* y and x point to the first element (a) of the first pair (a, b) */
    tsh_real *TSHI_RESTRICT y = (tsh_real *)operand[0].data;
    const tsh_real *TSHI_RESTRICT x = (const tsh_real *)operand[1].data;
    const tsh_real *TSHI_RESTRICT table = (const tsh_real *)operand[2].data;
    const int64_t sy = operand[0].step, sx = operand[1].step, step = operand[2].step;
    const int64_t gap_x = rope->gap_x, gap_y = rope->gap_y, pairs = rope->pairs;
    const tsh_real sign = TSHI_R(rope->sign); /* sign of the angle */
    const int add = rope->add;
    int64_t i;
    TSHI_EACH for (i = 0; i < n; i++) {
        const tsh_real a = x[i * sx], b = x[i * sx + gap_x]; /* a pair of x */
        const tsh_real cosine = table[i * step], sine = sign * table[i * step + pairs];
        const tsh_real first = a * cosine - b * sine, second = b * cosine + a * sine;
        y[i * sy] = add ? y[i * sy] + first : first;
        y[i * sy + gap_y] = add ? y[i * sy + gap_y] + second : second;
    }
}
TSHI_KERNEL(tshi_rope_pairs, tshi_rope);

/* Writes x to y, its pairs rotated and the features after the pairs as they are; if rope->add is 1,
 * adds to y instead. x and y have t's local shape and the strides sx and sy. table: see
 * tshi_rope_table. */
static void tshi_rope_rotate(const tsh_tensor *t, const tshi_rope *rope, tshi_block *table,
                             const tsh_real *x, const int64_t *sx, tsh_real *y, const int64_t *sy) {
    const int last = t->ndim - 1, isa = t->ctx->isa;
    int64_t stride[3][TSH_MAX_DIMS] = {{0}}; /* strides of y, x and table */
    tshi_rope p = *rope;
    tshi_loop loop;
    p.gap_x = rope->gap * sx[last];
    p.gap_y = rope->gap * sy[last];
    memcpy(stride[0], sy, sizeof *stride);
    memcpy(stride[1], sx, sizeof *stride);
    stride[0][last] *= rope->next;
    stride[1][last] *= rope->next;
    if (rope->by_batch) stride[2][0] = 2 * rope->pairs * t->local[last - 1];
    stride[2][last - 1] = 2 * rope->pairs; /* one row of the table per position */
    stride[2][last] = 1;
    tshi_kernel_space(&loop, t);
    loop.dim[last] = rope->pairs;
    tshi_kernel_add_operand(&loop, t, y, stride[0], TSH_REAL);
    tshi_kernel_add_operand(&loop, t, x, stride[1], TSH_REAL);
    tshi_kernel_add_operand(&loop, t, tshi_mem_data(table), stride[2], TSH_REAL);
    tshi_kernel_run(&loop, tshi_rope_pairs[isa], &p);
    if (t->dim[last] == 2 * rope->pairs) return;
    tshi_kernel_space(&loop, t);
    loop.dim[last] = t->dim[last] - 2 * rope->pairs; /* the features after the pairs */
    tshi_kernel_add_operand(&loop, t, y + 2 * rope->pairs * sy[last], sy, TSH_REAL);
    tshi_kernel_add_operand(&loop, t, x + 2 * rope->pairs * sx[last], sx, TSH_REAL);
    tshi_kernel_run(&loop, rope->add ? tshi_kernel_add[isa] : tshi_kernel_copy, NULL);
}

/* Backward: adds the gradient of the output, rotated by minus the angle, to dx. */
static void tshi_rope_backward(tshi_node *node) {
    tshi_rope back = *(const tshi_rope *)node->params;
    tsh_tensor *out = node->out;
    tshi_dest dest;
    if (!tshi_tape_dest(node, 0, &dest)) return;
    back.sign = -1;
    back.add = dest.add;
    tshi_rope_rotate(out, &back, node->aux, tshi_tape_grad(node), out->stride, dest.data,
                     dest.stride);
}

/* Writes the table of x's local positions, shape (rows, 2, pairs): for each position its cosines,
 * then its sines, times factor. b: a local index into x's first dimension, which selects the start
 * if desc has starts. */
static void tshi_rope_angles(const tsh_tensor *x, const tsh_rope_desc *desc, int64_t b,
                             int64_t pairs, tsh_real *table) {
    const int64_t rows = x->local[x->ndim - 2];
    const double base = tshi_base_option(desc->base, 10000);
    const double factor = tshi_base_option(desc->factor, 1);
    /* double, because a sum of int64_t positions could overflow */
    double start = (double)desc->start;
    int64_t i, t;
    if (desc->starts) start += (double)desc->starts[tshi_tensor_global(x, 0, b)];
    for (i = 0; i < pairs; i++) {
        double speed = desc->freqs ? desc->freqs[i] : pow(base, -(double)i / (double)pairs);
        for (t = 0; t < rows; t++) {
            double angle = (start + (double)tshi_tensor_global(x, x->ndim - 2, t)) * speed;
            table[2 * pairs * t + i] = TSHI_R(factor * cos(angle));
            table[2 * pairs * t + pairs + i] = TSHI_R(factor * sin(angle));
        }
    }
}

/* Returns a new reference to the table of cosines and sines of all local positions, shape (texts,
 * rows, 2, pairs). texts: 1 or, if desc has starts, the local length of x's first dimension. A
 * table of all positions stays in the ctx for the next calls: k and the other layers use the same
 * angles. NULL: no memory. */
static tshi_block *tshi_rope_table(const tsh_tensor *x, int64_t pairs, const tsh_rope_desc *desc) {
    const int64_t rows = x->local[x->ndim - 2], texts = desc->starts ? x->local[0] : 1;
    tsh_ctx *ctx = x->ctx;
    const int whole = rows == x->dim[x->ndim - 2] && (!desc->starts || texts == x->dim[0]);
    const double *freqs = desc->freqs;
    const uint64_t hash = freqs ? tshi_rng_hash(1, freqs, (size_t)pairs * sizeof *freqs) : 0;
    const uint64_t starts =
        desc->starts ? tshi_rng_hash(1, desc->starts, (size_t)x->dim[0] * sizeof *desc->starts) : 0;
    const tshi_angles angles = {tshi_base_option(desc->base, 10000),
                                tshi_base_option(desc->factor, 1), hash, starts, pairs, desc->start,
                                texts * rows};
    tshi_block *block = ctx->rope_table;
    if (whole && block && memcmp(&ctx->rope_angles, &angles, sizeof angles) == 0) {
        block->refs++;
        return block;
    }
    block = tshi_mem_alloc(ctx, TSH_MEM_STEP, tshi_dtype_reals(2 * pairs * texts * rows));
    if (whole && block) {
        tshi_mem_release(ctx, ctx->rope_table);
        ctx->rope_table = block;
        ctx->rope_angles = angles;
        block->refs++;
    }
    for (int64_t b = 0; b < texts && block; b++)
        tshi_rope_angles(x, desc, b, pairs,
                         (tsh_real *)tshi_mem_data(block) + 2 * pairs * rows * b);
    return block;
}

/* Checks x's shape and the options. Returns 0 after an error. */
static int tshi_rope_check(const tsh_tensor *x, const tsh_rope_desc *desc) {
    const int64_t d = x->ndim ? x->dim[x->ndim - 1] : 0, dims = desc->dims ? desc->dims : d;
    char text[TSHI_TEXT_SIZE];
    tsh_ctx *ctx = x->ctx;
    if (x->ndim < 2)
        (void)tsh_fail(ctx, TSH_ERR_SHAPE, "tsh_rope: takes (.., T, D), not %s",
                       tshi_tensor_text(x, text));
    else if (desc->starts && x->ndim < 3)
        (void)tsh_fail(ctx, TSH_ERR_SHAPE, "tsh_rope: with starts takes (B, .., T, D), not %s",
                       tshi_tensor_text(x, text));
    else if (!(desc->base >= 0) || desc->base > DBL_MAX)
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT, "tsh_rope: base is %g, not a positive number",
                       desc->base);
    else if (!(desc->factor >= 0) || desc->factor > DBL_MAX)
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT, "tsh_rope: factor is %g, not a positive number",
                       desc->factor);
    else if (dims < 0 || dims > d || dims % 2)
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT,
                       "tsh_rope: %lld of %lld features cannot turn in pairs; dims is even, and at "
                       "most the last dimension",
                       (long long)dims, (long long)d);
    return ctx->error.code == TSH_OK;
}

static const tshi_op tshi_rope_op = {
    "tsh_rope", "x", tshi_rule_rope, tshi_rope_backward, TSHI_NONE, 0};

TSH_API tsh_tensor *tsh_rope(tsh_tensor *x, const tsh_rope_desc *desc) {
    static const tsh_rope_desc usual = {0, 0, 0, 0, NULL, 0, NULL}; /* zeros: all defaults */
    tsh_ctx *ctx = tshi_tensor_check_floating("tsh_rope", "x", &x, 1);
    const tshi_op *op = &tshi_rope_op;
    tshi_output output;
    tshi_rope rope = {0, 0, 0, 0, 1, 0, 0, 0}; /* all fields 0 but sign, which is 1 */
    tshi_block *table, *scratch, *unrounded;
    tsh_real *values, *y; /* the values of x and of the output, shape (.., T, D) */
    int64_t stride[TSH_MAX_DIMS];
    tsh_tensor *out;
    if (!desc) desc = &usual;
    if (!ctx || !tshi_rope_check(x, desc) || !tshi_rule_run(op, &x, 1, NULL, &output)) return NULL;
    output.shape = tsh_shape_of(x);
    rope.pairs = (desc->dims ? desc->dims : x->dim[x->ndim - 1]) / 2;
    rope.by_batch = desc->starts != NULL;
    rope.next = desc->interleaved ? 2 : 1;
    rope.gap = desc->interleaved ? 1 : rope.pairs;
    out = tshi_tensor_out(ctx, "tsh_rope", x->dtype, &output.shape, &output.layout);
    table = out ? tshi_rope_table(x, rope.pairs, desc) : NULL;
    if (!table) return NULL;
    values = tshi_kernel_reals_of(x, stride, &scratch);
    y = tshi_kernel_output(out, &unrounded);
    if (values && y) tshi_rope_rotate(x, &rope, table, values, stride, y, out->stride);
    tshi_mem_release(ctx, scratch);
    tshi_kernel_output_done(out, unrounded);
    tshi_op_record(op, out, &x, 1, output.partial, &rope, sizeof rope, table);
    return ctx->error.code == TSH_OK ? out : NULL;
}
