/* ========================================================================== */
/* >>op-linear                                    MARK: - op-linear (private) */
/* Y = X W^T + b: plain, or column- or row-parallel by the weight's layout.   */
/* Backward: dX = dY W, dW = dY^T X, db = the sum of dY's rows.               */
/* Needs: >>quant-product >>redistribute >>quant-real.                        */
/* ========================================================================== */

/* Shapes: X (.., in), W (out, in), b (out), Y (.., out). W sharded along `out` (column-parallel)
 * makes Y sharded along its last dimension. W sharded along `in` (row-parallel) makes Y a partial
 * sum, which is all-reduced. With sequence parallelism, a column-parallel layer all-gathers X from
 * shards of the sequence, and a row-parallel one reduce-scatters Y to shards of the sequence. */
typedef struct tshi_linear {
    int reduce;   /* 1: row-parallel: Y is all-reduced */
    int scatter;  /* 1: row-parallel, sequence parallelism: Y is reduce-scattered */
    int regather; /* 1: column-parallel, sequence parallelism: X is gathered, in backward too */
} tshi_linear;

/* The all-gather of a matrix's rows from all ranks. Blocks are NULL if nothing is gathered. */
typedef struct tshi_gathering {
    tshi_moving move;  /* the all-gather */
    tshi_block *whole; /* the rows of all ranks; NULL if the backend lends them */
    tshi_block *sent;  /* this rank's rows, rounded to the dtype in which they are sent */
} tshi_gathering;

/* Returns `values`, t's local values or its gradient (then dtype is TSH_REAL), as a matrix of shape
 * (*rows, features): in place or, if gather is 1, the matrix of all ranks' rows, whose all-gather
 * is started here: it has its values after tshi_linear_arrive. The caller calls
 * tshi_linear_release. The gradient of a step tensor of bf16 is gathered in bf16. */
static tshi_matrix tshi_linear_rows(const tsh_tensor *t, void *values, tsh_dtype dtype,
                                    tshi_wire_use use, int gather, int64_t *rows,
                                    tshi_gathering *all) {
    int64_t step = 0, last = t->ndim - 1; /* step: elements from row to row */
    const int rounds = gather && dtype == TSH_REAL && tshi_tape_sent_as(t) != TSH_REAL;
    tshi_move_kind kind = TSHI_MOVE_GATHER;
    all->whole = all->sent = NULL;
    all->move.scratch = NULL;
    if (rounds) {
        dtype = tshi_tape_sent_as(t);
        all->sent = tshi_kernel_rounded(t->ctx, (const tsh_real *)values, tsh_local_numel(t),
                                        dtype);
        if (all->sent) values = tshi_mem_data(all->sent);
    }
    if (gather) kind = tshi_redistribute_lends(t, use, dtype);
    if (gather && kind == TSHI_MOVE_GATHER) {
        all->whole = tshi_mem_alloc(t->ctx, TSH_MEM_STEP, tshi_dtype_bytes(dtype, tsh_numel(t)));
        gather = all->whole != NULL;
    }
    if (!gather) {
        (void)tshi_kernel_rows(t, rows, &step);
        return tshi_gemm_matrix_of(values, dtype, step, t->stride[last]);
    }
    *rows = tshi_tensor_product(t->dim, t->ndim - 1);
    tshi_redistribute_start(&all->move, t, &t->layout, kind, use, dtype, values,
                            all->whole ? tshi_mem_data(all->whole) : NULL);
    return tshi_gemm_matrix_of(NULL, dtype, t->dim[last], 1);
}

/* Waits until m, which tshi_linear_rows returned, has its values. */
static void tshi_linear_arrive(tsh_ctx *ctx, tshi_gathering *all, tshi_matrix *m) {
    (void)tshi_redistribute_arrive(ctx, &all->move);
    if (all->move.scratch) m->data = all->move.out;
}

/* Waits for the all-gather of tshi_linear_rows, if there is one, and releases its memory. */
static void tshi_linear_release(tsh_ctx *ctx, tshi_gathering *all) {
    (void)tshi_redistribute_finish(ctx, &all->move);
    tshi_mem_release(ctx, all->sent);
    tshi_mem_release(ctx, all->whole);
}

/* Computes dX = dY W + beta dX. Shapes: dy (rows, out), w (out, in), with its values at `values`,
 * dx (rows, in). */
static void tshi_linear_dx(const tsh_tensor *w, void *values, int64_t rows, tshi_matrix dy,
                           tsh_real beta, tshi_matrix dx) {
    if (tshi_dtype_in_blocks(w->dtype))
        tshi_quant_reals(w, values, 1, rows, dy, beta, dx, dx);
    else
        tshi_matmul_gemm(w->ctx, rows, w->local[1], w->local[0], 1, dy,
                         tshi_gemm_matrix_of(values, w->dtype, w->stride[0], w->stride[1]), beta,
                         dx);
}

/* Computes dX = dY W if forward has gathered X: each rank's dX (rows, in) is a partial sum, whose
 * reduce-scatter to X's shards is started here. Shape of dy: (rows, out). */
static void tshi_linear_scatter(tshi_node *node, int64_t rows, tshi_matrix dy,
                                tshi_returning *back) {
    tsh_tensor *x = node->in[0], *w = node->in[1]; /* shapes (.., in), (out, in) */
    const int64_t ins = w->local[1];               /* this rank's number of input features */
    tshi_block *whole;                             /* dX of the whole sequence */
    if (!x->base->requires_grad) return;
    whole = tshi_mem_alloc(x->ctx, TSH_MEM_STEP, tshi_dtype_reals(rows * ins));
    if (!whole) return;
    tshi_linear_dx(w, tshi_tape_saved(node, 1), rows, dy, 0,
                   tshi_gemm_matrix((tsh_real *)tshi_mem_data(whole), ins, 1));
    tshi_redistribute_return(back, node, x, whole);
}

/* Computes db, shape (out): the sum of the rows of g, this rank's rows of dY. */
static void tshi_linear_bias(tshi_node *node, const tsh_real *g) {
    const tsh_tensor *b = node->in[2], *out = node->out; /* shapes (out), (.., out) */
    tshi_dest dest;
    tshi_loop loop;
    if (!b || !tshi_tape_dest_zeroed(node, 2, &dest)) return;
    tshi_kernel_space(&loop, out);
    tshi_kernel_add_operand(&loop, b, dest.data, dest.stride, TSH_REAL);
    tshi_kernel_add_operand(&loop, out, g, out->stride, TSH_REAL);
    tshi_kernel_run(&loop, tshi_kernel_add[out->ctx->isa], NULL);
}

/* Backward: dX = dY W, dW = dY^T X, db = the sum of dY's rows; skips those that are not needed.
 * With sequence parallelism, X is gathered while dX is computed, and dX is scattered, or without
 * it all-reduced, while dW is computed. */
static void tshi_linear_backward(tshi_node *node) {
    const tshi_linear *how = (const tshi_linear *)node->params;
    /* shapes (.., in), (out, in), (.., out) */
    tsh_tensor *x = node->in[0], *w = node->in[1], *out = node->out;
    tsh_ctx *ctx = out->ctx;
    int64_t rows = 0, outs = w->local[0], ins = w->local[1]; /* rows and features on this rank */
    tsh_real *g = tshi_tape_grad(node);                      /* dY, (.., out) */
    tshi_gathering all_y, all_x;                             /* the all-gathers of dY and of X */
    tshi_returning back = TSHI_ZERO;                         /* reduce-scatter of dX to shards */
    int64_t rows_x; /* rows of X on this rank, or of all of X if it is gathered */
    const int saved = node->saved[0] != NULL; /* 0: forward has not saved X, since W is frozen */
    /* shapes: dy (rows, out), mx and dX (rows, in), dW (out, in) */
    tshi_matrix dy = tshi_linear_rows(out, g, TSH_REAL, TSHI_WIRE_ACTIVATION, how->scatter, &rows,
                                      &all_y);
    tshi_matrix mx = tshi_linear_rows(x, saved ? tshi_tape_saved(node, 0) : NULL, x->dtype,
                                      TSHI_WIRE_ACTIVATION, saved && how->regather, &rows_x,
                                      &all_x);
    tshi_dest dest;
    dy.rounds = tshi_matmul_rounds(out, x, w);
    tshi_linear_arrive(ctx, &all_y, &dy);
    if (ctx->error.code == TSH_OK && how->regather)
        tshi_linear_scatter(node, rows, dy, &back);
    else if (ctx->error.code == TSH_OK && tshi_tape_dest(node, 0, &dest))
        tshi_linear_dx(w, tshi_tape_saved(node, 1), rows, dy, TSHI_R(dest.add),
                       tshi_gemm_matrix(dest.data, mx.row, mx.column));
    if (!how->regather) tshi_tape_input_done(node, 0); /* starts the all-reduce of dX */
    tshi_linear_arrive(ctx, &all_x, &mx);
    if (ctx->error.code == TSH_OK && saved && tshi_tape_dest(node, 1, &dest))
        tshi_matmul_gemm(ctx, outs, ins, rows, 1, tshi_gemm_transposed(dy), mx, TSHI_R(dest.add),
                         tshi_gemm_matrix(dest.data, dest.stride[0], dest.stride[1]));
    if (ctx->error.code == TSH_OK) tshi_linear_bias(node, g);
    tshi_redistribute_returned(&back, x);
    tshi_linear_release(ctx, &all_x);
    tshi_linear_release(ctx, &all_y);
}

/* Checks the shapes of x (.., in), w (out, in) and b (out) or NULL. Returns 0 after an error. */
static int tshi_linear_check(tsh_tensor *x, tsh_tensor *w, tsh_tensor *b) {
    char tx[TSHI_TEXT_SIZE], tw[TSHI_TEXT_SIZE];
    const char *name = w->base->path; /* the path of a parameter; NULL: w is no parameter */
    if (w->ndim != 2 || x->ndim < 1 || (b && b->ndim != 1))
        (void)tsh_fail(x->ctx, TSH_ERR_SHAPE,
                       "tsh_linear: input %s, weight %s, bias of %d dimensions; takes (.., in), "
                       "(out, in), (out)",
                       tshi_tensor_text(x, tx), tshi_tensor_text(w, tw), b ? b->ndim : 0);
    else if (x->dim[x->ndim - 1] != w->dim[1])
        (void)tsh_fail(x->ctx, TSH_ERR_SHAPE,
                       "tsh_linear: input has %lld features, weight%s%s%s takes %lld",
                       (long long)x->dim[x->ndim - 1], name ? " \"" : "", name ? name : "",
                       name ? "\"" : "", (long long)w->dim[1]);
    else if (b && b->dim[0] != w->dim[0])
        (void)tsh_fail(x->ctx, TSH_ERR_SHAPE,
                       "tsh_linear: weight gives %lld features, bias has %lld",
                       (long long)w->dim[0], (long long)b->dim[0]);
    return x->ctx->error.code == TSH_OK;
}

/* Computes Y in out. Between tsh_no_grad_begin and tsh_no_grad_end, the product with a quantised
 * weight rounds X to 8 bits. The product adds the bias, unless each rank's product is a partial
 * sum: then this is rounded to Y's dtype and summed over ranks, and the bias is added once, after
 * that. */
static void tshi_linear_forward(tsh_tensor *const *in, tsh_tensor *out, const tshi_linear *how) {
    tsh_ctx *ctx = out->ctx;
    tsh_tensor *x = in[0], *w = in[1], *b = in[2]; /* shapes (.., in), (out, in), (out) or NULL */
    const int late = how->reduce || how->scatter;  /* 1: a collective comes before the bias */
    int64_t rows, outs = w->local[0], stride[TSH_MAX_DIMS]; /* outs: this rank's features of Y */
    tshi_gathering all;                /* the all-gather of X's rows */
    tshi_moving scattered = TSHI_ZERO; /* the reduce-scatter of Y */
    /* partial: Y before it is scattered; bias: b as tsh_real; or NULL */
    tshi_block *partial = NULL, *bias = NULL;
    tshi_matrix mx, mw, my, mb; /* X (rows, in), W^T (in, out), Y (rows, out), b as (rows, out) */
    mx = tshi_linear_rows(x, tshi_tensor_at(x), x->dtype, TSHI_WIRE_ACTIVATION, how->regather,
                          &rows, &all);
    mw = tshi_gemm_matrix_of(tshi_tensor_at(w), w->dtype, w->stride[1], w->stride[0]); /* W^T */
    if (how->scatter)
        partial = tshi_mem_alloc(ctx, TSH_MEM_STEP, tshi_dtype_bytes(out->dtype, rows * outs));
    my = tshi_gemm_matrix_of(partial ? tshi_mem_data(partial) : tshi_tensor_at(out), out->dtype,
                             outs, 1);
    mb = my; /* any matrix: it is not read if there is no bias */
    if (b && !late) {
        tsh_real *values = tshi_kernel_reals_of(b, stride, &bias); /* b, shape (out) */
        mb = tshi_gemm_matrix(values, 0, stride[0]); /* row stride 0: b for each row */
    }
    tshi_linear_arrive(ctx, &all, &mx);
    if (ctx->error.code == TSH_OK && tshi_dtype_in_blocks(w->dtype) && ctx->tape.evaluating)
        tshi_quant_product(w, rows, mx, b && !late ? &mb : NULL, my);
    else if (ctx->error.code == TSH_OK && tshi_dtype_in_blocks(w->dtype))
        tshi_quant_reals(w, tshi_tensor_at(w), 0, rows, mx, b && !late ? TSHI_R(1) : 0, mb, my);
    else if (ctx->error.code == TSH_OK)
        tshi_matmul_run(ctx, rows, outs, w->local[1], 1, mx, mw, b && !late ? TSHI_R(1) : 0, mb,
                        my);
    if (ctx->error.code == TSH_OK && how->reduce)
        (void)tshi_wire_allreduce(ctx, TSHI_WIRE_ACTIVATION, TSH_SUM, my.data, rows * outs,
                                  out->dtype, "tsh_linear: all-reduce of a row-parallel output");
    if (ctx->error.code == TSH_OK && how->scatter)
        tshi_redistribute_start(&scattered, out, &out->layout, TSHI_MOVE_SCATTER,
                                TSHI_WIRE_ACTIVATION, out->dtype, my.data, tshi_tensor_at(out));
    (void)tshi_redistribute_arrive(ctx, &scattered);
    if (ctx->error.code == TSH_OK && b && late) {
        tshi_loop loop;
        tshi_kernel_space(&loop, out);
        tshi_kernel_tensor(&loop, out);
        tshi_kernel_tensor(&loop, b); /* adds b to every row */
        tshi_kernel_run(&loop, tshi_kernel_add[ctx->isa], NULL);
    }
    (void)tshi_redistribute_finish(ctx, &scattered); /* waits until peers have read `partial` */
    tshi_mem_release(ctx, partial);
    tshi_linear_release(ctx, &all);
    tshi_mem_release(ctx, bias);
}

/* Returns x; if w is row-parallel and x replicated, this rank's slice of x. Returns a copy if its
 * rows do not have equal strides, or if x is to be gathered and is not dense. NULL: an error. */
static tsh_tensor *tshi_linear_input(tsh_tensor *x, const tsh_tensor *w, int gathered) {
    int64_t rows, step;
    if (w->layout.kind == TSH_SHARDED && w->layout.dim == 1 && x->layout.kind == TSH_REPLICATED) {
        tsh_layout layout = w->layout;
        layout.dim = x->ndim - 1;
        x = tsh_redistribute(x, layout);
    }
    if (!x || (gathered ? tshi_tensor_is_dense(x) : tshi_kernel_rows(x, &rows, &step))) return x;
    return tshi_op_copy("tsh_linear", x);
}

/* Entry 1 is for a frozen W: it does not save X, which only dW needs. */
static const tshi_op tshi_linear_ops[2] = {
    {"tsh_linear", "x weight bias", tshi_rule_linear, tshi_linear_backward, TSHI_X | TSHI_WEIGHT,
     0},
    {"tsh_linear", "x weight bias", tshi_rule_linear, tshi_linear_backward, TSHI_WEIGHT, 0}};

/* Runs tsh_linear, also with sequence parallelism. give: the layout of a row-parallel output; NULL:
 * replicated. regather 1: all-gathers the input of a column-parallel weight along the sequence. */
static tsh_tensor *tshi_linear_run(tsh_tensor *x, tsh_tensor *w, tsh_tensor *b,
                                   const tsh_layout *give, int regather) {
    const tshi_op *op = &tshi_linear_ops[w && !w->base->requires_grad];
    tsh_tensor *in[3] = {x, w, b}, *out; /* shapes (.., in), (out, in), (out) or NULL; (.., out) */
    tsh_ctx *ctx = tshi_tensor_check_weight("tsh_linear", in, b ? 3 : 2);
    const tshi_rule_sequence sequence = {give, regather};
    const int row = w && w->layout.kind == TSH_SHARDED && w->layout.dim == 1; /* 1: row-parallel */
    const int several = ctx && ctx->tp.size > 1; /* 1: tp has more than one rank */
    const tshi_linear how = {several && row && !give, several && give, several && regather};
    tshi_output output;
    if (!ctx || !tshi_linear_check(x, w, b) || !(in[0] = x = tshi_linear_input(x, w, regather)) ||
        !tshi_rule_run(op, in, 3, &sequence, &output))
        return NULL;
    output.shape = tsh_shape_of(x);
    output.shape.dim[x->ndim - 1] = w->dim[0]; /* shape (.., out) */
    out = tshi_tensor_out(ctx, "tsh_linear", x->dtype, &output.shape, &output.layout);
    if (!out) return NULL;
    tshi_linear_forward(in, out, &how);
    if (ctx->error.code != TSH_OK) return NULL;
    tshi_op_record(op, out, in, 3, output.partial, &how, sizeof how, NULL);
    return out;
}

TSH_API tsh_tensor *tsh_linear(tsh_tensor *x, tsh_tensor *w, tsh_tensor *b) {
    return tshi_linear_run(x, w, b, NULL, 0);
}
