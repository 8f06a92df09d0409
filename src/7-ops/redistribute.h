/* ========================================================================== */
/* >>redistribute                              MARK: - redistribute (private) */
/* Changes of layout: tsh_redistribute, tsh_set_layout, tsh_tp_...            */
/* Needs: >>op-map.                                                           */
/* ========================================================================== */

/* tshi_redistribute_move does every change of layout, in forward and in backward. R: replicated,
 * S(d): sharded along dimension d, P: partial sum.
 *
 *     S(d) to R     all-gather             P to R       all-reduce
 *     P to S(d)     reduce-scatter         S(i) to S(j) all-to-all
 *     R to S(d)     each rank its slice    R to P       zero on all ranks but rank 0
 *
 * Input and output are dense. The collectives take the shards of all ranks in rank order. With
 * fused segments (q, k, v in one weight) a shard is not one run of memory: it is reordered. */

/* An array seen as `outer` rows of shape (length, inner), whose dimension `length` a layout cuts
 * into shards. */
typedef struct tshi_cut {
    int64_t outer, length, inner; /* sizes of the array's three dimensions */
    const tsh_layout *layout;     /* the layout that cuts the array: a sharded one */
    const tshi_deal *deal;        /* how the ranks of tp share a dimension */
    size_t width;                 /* bytes of an element */
} tshi_cut;

/* Returns how `layout` cuts an array. other NULL: the array is a whole tensor; else it is this
 * rank's shard of a tensor by the layout `other`. form has the tensor's global shape. */
static tshi_cut tshi_redistribute_cut(const tsh_tensor *form, const tsh_layout *layout,
                                      const tsh_layout *other, tsh_dtype dtype) {
    const tsh_ctx *ctx = form->ctx;
    const int dim = layout->dim;
    int64_t sizes[TSH_MAX_DIMS]; /* the array's shape */
    tshi_cut cut;
    memcpy(sizes, form->dim, sizeof sizes);
    if (other)
        sizes[other->dim] = tshi_layout_own(other, sizes[other->dim], &ctx->deal, ctx->tp.rank,
                                            NULL);
    cut.outer = tshi_tensor_product(sizes, dim);
    cut.length = sizes[dim];
    cut.inner = tshi_tensor_product(sizes + dim + 1, form->ndim - dim - 1);
    cut.layout = layout;
    cut.deal = &ctx->deal;
    cut.width = tsh_dtype_size(dtype);
    return cut;
}

/* Returns how many elements of one outer row (an index of cut->outer) are in `rank`'s shard; 0 if
 * there is no outer row, because collectives take blocks = 0 (tsh_coll.blocks) for 1. */
static int64_t tshi_redistribute_held(const tshi_cut *cut, int rank) {
    if (!cut->outer) return 0;
    return tshi_layout_own(cut->layout, cut->length, cut->deal, rank, NULL) * cut->inner;
}

/* Copies `rank`'s shard from its places in the array `whole` to the memory `shard` (to_shard 1), or
 * back (0). In `shard`, the outer rows (indices of cut->outer) begin `pitch` elements apart. */
static void tshi_redistribute_shard(const tshi_cut *cut, int rank, void *whole, char *shard,
                                    int64_t pitch, int to_shard) {
    tsh_range range[TSH_MAX_SEGMENTS]; /* the shard's part of each segment */
    int64_t o;                         /* index of the outer row */
    int s;                             /* index of the segment */
    (void)tshi_layout_own(cut->layout, cut->length, cut->deal, rank, range);
    for (o = 0; o < cut->outer; o++) {
        char *at = shard + (size_t)(o * pitch) * cut->width;
        for (s = 0; s < cut->layout->segments; s++) {
            const int64_t first = (o * cut->length + range[s].start) * cut->inner;
            const size_t bytes = (size_t)(range[s].length * cut->inner) * cut->width;
            char *from = (char *)whole + (size_t)first * cut->width;
            if (to_shard)
                memcpy(at, from, bytes);
            else
                memcpy(from, at, bytes);
            at += bytes;
        }
    }
}

/* Copies the array `whole` to `shards`, the shards of all ranks in rank order (to_shards 1), or
 * back (0). by_row 1: `shards` has, for each index before the sharded dimension, the parts of all
 * shards, one after the other; 0: one shard as a whole after the other. */
static void tshi_redistribute_order(const tshi_cut *cut, void *whole, char *shards, int by_row,
                                    int to_shards) {
    int r;
    for (r = 0; r < cut->deal->ranks; r++) {
        const int64_t row = tshi_redistribute_held(cut, r); /* rank r's elements of an outer row */
        const int64_t pitch = by_row ? cut->length * cut->inner : row;
        tshi_redistribute_shard(cut, r, whole, shards, pitch, to_shards);
        shards += (size_t)(by_row ? row : row * cut->outer) * cut->width;
    }
}

/* The collective that changes a layout. */
typedef enum tshi_move_kind {
    TSHI_MOVE_SCATTER, /* a reduce-scatter */
    TSHI_MOVE_GATHER,  /* an all-gather */
    TSHI_MOVE_LEND     /* an all-gather to memory of the backend, where all ranks read the values */
} tshi_move_kind;

/* An all-gather or a reduce-scatter that changes a layout, from its start until it is finished. */
typedef struct tshi_moving {
    tshi_cut cut;        /* how the sharded one of the two layouts cuts the whole array */
    tshi_block *scratch; /* `counts`, then `ordered` if that is not the whole array; NULL: no
                          * collective was started, or one in the wire's dtype failed */
    /* all values; in each outer row, the elements of rank 0 come first, then of rank 1, ... */
    void *ordered;
    void *out; /* where the values go; TSHI_MOVE_LEND: where they are, once they have arrived */
    tshi_move_kind kind;
    int arrived; /* 1 after tshi_redistribute_arrive */
    tsh_req req; /* the request of the collective; 0: it is complete */
} tshi_moving;

/* The names of the collectives for errors; the index is a tshi_move_kind. */
static const char *const tshi_redistribute_kinds[] = {
    "tsh_redistribute: reduce-scatter", "tsh_redistribute: all-gather",
    "tsh_redistribute: all-gather"};

/* Returns how to gather all elements of t, which the op that gathers them only reads: lent, if the
 * backend can do so, they are sent as they are, and they are enough. A few are copied in less time
 * than it takes to find memory to lend them in. */
static tshi_move_kind tshi_redistribute_lends(const tsh_tensor *t, tshi_wire_use use,
                                              tsh_dtype dtype) {
    const tsh_comm *tp = &t->ctx->tp;
    const int64_t n = tsh_numel(t);
    return tp->ops && tp->ops->lend && t->layout.segments == 1 &&
                   n >= 16384 / (int64_t)tsh_dtype_size(dtype) &&
                   tshi_wire_dtype(t->ctx, use, dtype, n) == dtype
               ? TSHI_MOVE_LEND
               : TSHI_MOVE_GATHER;
}

/* Returns how values that are made of x are sent: those of parameters and of other owned tensors as
 * they are. */
static tshi_wire_use tshi_redistribute_use(const tsh_tensor *x) {
    return x->base->flags & TSHI_OWNED ? TSHI_WIRE_EXACT : TSHI_WIRE_ACTIVATION;
}

/* Does what tshi_redistribute_start starts, in the wire's dtype; it is complete on return. */
TSHI_COLD static void tshi_redistribute_wired(tshi_moving *move, const tsh_tensor *form,
                                              tsh_dtype dtype, const void *in) {
    tsh_ctx *ctx = form->ctx;
    const tshi_cut *cut = &move->cut;
    const char *what = tshi_redistribute_kinds[move->kind];
    const size_t counted = (size_t)cut->deal->ranks * sizeof(int64_t);
    int64_t *counts; /* number of elements of each rank */
    char *shards;    /* the elements of all ranks, in rank order */
    move->scratch = tshi_mem_alloc(ctx, TSH_MEM_STEP,
                                   counted + (size_t)tsh_numel(form) * cut->width);
    if (!move->scratch) return;
    counts = (int64_t *)tshi_mem_data(move->scratch);
    shards = (char *)(counts + cut->deal->ranks);
    for (int r = 0; r < cut->deal->ranks; r++)
        counts[r] = tshi_redistribute_held(cut, r) * cut->outer;
    if (move->kind == TSHI_MOVE_SCATTER) {
        tshi_redistribute_order(cut, tshi_kernel_unconst(in), shards, 0, 1);
        (void)tshi_wire_scatter(ctx, dtype, counts, shards, move->out, what);
    } else if (tshi_wire_gather(ctx, dtype, counts, in, shards, what) == TSH_OK) {
        tshi_redistribute_order(cut, move->out, shards, 0, 0);
    }
    move->arrived = 1;
}

/* Starts to change a layout from sharded to replicated by an all-gather, or from a partial sum to
 * sharded by a reduce-scatter. form has the global shape; `layout` is the sharded one of the two
 * layouts. `in` must stay unchanged, and `out` is not to be touched, until
 * tshi_redistribute_finish, which the caller calls also after an error. TSHI_MOVE_LEND: `out` is
 * NULL, and the values may be read at move->out from tshi_redistribute_arrive until
 * tshi_redistribute_finish. */
static void tshi_redistribute_start(tshi_moving *move, const tsh_tensor *form,
                                    const tsh_layout *layout, tshi_move_kind kind,
                                    tshi_wire_use use, tsh_dtype dtype, const void *in,
                                    void *out) {
    tsh_ctx *ctx = form->ctx;
    const int gather = kind != TSHI_MOVE_SCATTER;
    const tshi_cut cut = tshi_redistribute_cut(form, layout, NULL, dtype);
    const size_t counted = (size_t)cut.deal->ranks *
                           sizeof(int64_t); /* bytes of the array `counts` */
    const size_t bytes = layout->segments > 1 ? (size_t)tsh_numel(form) * cut.width : 0;
    tsh_coll coll = tsh_coll_make(gather ? TSH_ALLGATHER : TSH_REDUCE_SCATTER, dtype);
    int64_t *counts; /* number of elements that each rank has in an outer row */
    move->cut = cut;
    move->out = out;
    move->kind = kind;
    move->arrived = 0;
    move->req = 0;
    move->scratch = NULL;
    if (kind != TSHI_MOVE_LEND && tshi_wire_dtype(ctx, use, dtype, tsh_numel(form)) != dtype) {
        tshi_redistribute_wired(move, form, dtype, in);
        return;
    }
    move->scratch = tshi_mem_alloc(ctx, TSH_MEM_STEP, counted + bytes);
    if (!move->scratch) return;
    counts = (int64_t *)tshi_mem_data(move->scratch);
    for (int r = 0; r < cut.deal->ranks; r++) counts[r] = tshi_redistribute_held(&cut, r);
    move->ordered = gather ? out : tshi_kernel_unconst(in);
    if (bytes) move->ordered = counts + cut.deal->ranks; /* several segments: reorder in scratch */
    if (bytes && !gather)
        tshi_redistribute_order(&cut, tshi_kernel_unconst(in), (char *)move->ordered, 1, 1);
    coll.send = gather ? in : move->ordered;
    coll.recv = gather ? move->ordered : out;
    coll.recv_counts = counts;
    coll.blocks = cut.outer;
    (void)tshi_error_comm(ctx, tshi_comm_begin(&ctx->tp, &coll, &move->req),
                          tshi_redistribute_kinds[kind]);
}

/* Waits until the values of `move` are in its `out`. Peers may still read its `in`. */
static tsh_result tshi_redistribute_arrive(tsh_ctx *ctx, tshi_moving *move) {
    const void *values = NULL; /* values that are lent to this rank */
    if (!move->scratch || move->arrived) return ctx->error.code;
    move->arrived = 1;
    (void)tshi_error_comm(ctx,
                          move->kind == TSHI_MOVE_LEND
                              ? tshi_comm_lend(&ctx->tp, move->req, &values)
                              : tshi_comm_receive(&ctx->tp, &move->req),
                          tshi_redistribute_kinds[move->kind]);
    if (move->kind == TSHI_MOVE_LEND)
        move->out = tshi_kernel_unconst(values); /* read only */
    else if (move->kind == TSHI_MOVE_GATHER && move->ordered != move->out)
        tshi_redistribute_order(&move->cut, move->out, (char *)move->ordered, 1, 0);
    return ctx->error.code;
}

/* Waits until the values of `move` are in its `out`, and no peer reads its `in`. */
static tsh_result tshi_redistribute_finish(tsh_ctx *ctx, tshi_moving *move) {
    if (!move->scratch) return ctx->error.code; /* nothing was started */
    (void)tshi_redistribute_arrive(ctx, move);
    (void)tshi_error_comm(ctx, tsh_wait(&ctx->tp, move->req),
                          tshi_redistribute_kinds[move->kind]);
    tshi_mem_release(ctx, move->scratch);
    move->scratch = NULL;
    return ctx->error.code;
}

/* Changes a layout by an all-gather or a reduce-scatter, as tshi_redistribute_start says, and waits
 * until it is complete. */
static tsh_result tshi_redistribute_rows(const tsh_tensor *form, const tsh_layout *layout,
                                         tshi_move_kind kind, tshi_wire_use use, tsh_dtype dtype,
                                         const void *in, void *out) {
    tshi_moving move;
    tshi_redistribute_start(&move, form, layout, kind, use, dtype, in, out);
    return tshi_redistribute_finish(form->ctx, &move);
}

/* Changes a layout from S(i), sharded along dimension i, to S(j) by an all-to-all: every rank cuts
 * its shard along j into a part for each rank, and joins the parts that it receives along i. form
 * has the global shape. */
static tsh_result tshi_redistribute_swap(tsh_ctx *ctx, const tsh_tensor *form,
                                         const tsh_layout *from, const tsh_layout *to,
                                         tshi_wire_use use, tsh_dtype dtype, const void *in,
                                         void *out) {
    const tshi_cut cut = tshi_redistribute_cut(form, to, from, dtype);  /* cuts `in` along j */
    const tshi_cut join = tshi_redistribute_cut(form, from, to, dtype); /* joins `out` along i */
    const size_t counted = (size_t)cut.deal->ranks * sizeof(int64_t);
    const size_t bytes = (size_t)tsh_numel(form) * cut.width; /* enough for a shard of any size */
    tshi_block *scratch = tshi_mem_alloc(ctx, TSH_MEM_STEP, 2 * counted + 2 * bytes);
    const char *what = "tsh_redistribute: all-to-all";
    int64_t *send, *recv;  /* number of elements sent to, and received from, each rank */
    char *sent, *received; /* data to and from all ranks, in rank order */
    int r;
    if (!scratch) return TSH_ERR_MEMORY;
    send = (int64_t *)tshi_mem_data(scratch);
    recv = send + cut.deal->ranks;
    sent = (char *)(recv + cut.deal->ranks);
    received = sent + bytes;
    for (r = 0; r < cut.deal->ranks; r++) send[r] = tshi_redistribute_held(&cut, r) * cut.outer;
    for (r = 0; r < cut.deal->ranks; r++) recv[r] = tshi_redistribute_held(&join, r) * join.outer;
    tshi_redistribute_order(&cut, tshi_kernel_unconst(in), sent, 0, 1);
    if (tshi_wire_dtype(ctx, use, dtype, tsh_numel(form)) == dtype)
        (void)tshi_error_comm(ctx, tsh_alltoall(&ctx->tp, sent, send, received, recv, 1, dtype),
                              what);
    else
        (void)tshi_wire_alltoall(ctx, dtype, send, recv, sent, received, what);
    tshi_redistribute_order(&join, out, received, 0, 0);
    tshi_mem_release(ctx, scratch);
    return ctx->error.code;
}

/* Changes the layout of dense local values: `in` has the layout `from`, `out` gets the layout `to`.
 * form has the global shape. Calls one collective over tp, or those of >>wire, or none if each rank
 * already has all the values that it needs. */
static tsh_result tshi_redistribute_move(const tsh_tensor *form, const tsh_layout *from,
                                         const tsh_layout *to, tshi_wire_use use, tsh_dtype dtype,
                                         const void *in, void *out) {
    tsh_ctx *ctx = form->ctx;
    const tsh_layout whole = tsh_replicated();
    const size_t width = tsh_dtype_size(dtype), bytes = (size_t)tsh_numel(form) * width;
    if (tshi_layout_equal(from, to, form->dim, &ctx->deal)) {
        memcpy(out, in, (size_t)tsh_local_numel(form) * width);
    } else if (from->kind == TSH_SHARDED && to->kind == TSH_SHARDED && from->dim == to->dim) {
        /* Both are sharded along one dimension, but cut differently: gathers, then slices. */
        tshi_block *scratch = tshi_mem_alloc(ctx, TSH_MEM_STEP, bytes);
        void *values = scratch ? tshi_mem_data(scratch) : NULL;
        if (values && tshi_redistribute_move(form, from, &whole, use, dtype, in, values) == TSH_OK)
            (void)tshi_redistribute_move(form, &whole, to, use, dtype, values, out);
        tshi_mem_release(ctx, scratch);
    } else if (from->kind == TSH_SHARDED && to->kind == TSH_SHARDED) {
        return tshi_redistribute_swap(ctx, form, from, to, use, dtype, in, out); /* S(i), S(j) */
    } else if (from->kind == TSH_SHARDED) {
        return tshi_redistribute_rows(form, from, TSHI_MOVE_GATHER, use, dtype, in,
                                      out); /* S to R */
    } else if (from->kind == TSH_PARTIAL && to->kind == TSH_SHARDED) {
        return tshi_redistribute_rows(form, to, TSHI_MOVE_SCATTER, use, dtype, in,
                                      out); /* P to S */
    } else if (to->kind == TSH_SHARDED) {
        const tshi_cut cut = tshi_redistribute_cut(form, to, NULL, dtype); /* R to S */
        tshi_redistribute_shard(&cut, ctx->tp.rank, tshi_kernel_unconst(in), (char *)out,
                                tshi_redistribute_held(&cut, ctx->tp.rank), 1);
    } else if (from->kind == TSH_PARTIAL) {
        memcpy(out, in, bytes); /* P to R */
        (void)tshi_wire_allreduce(ctx, use, TSH_SUM, out, tsh_numel(form), dtype,
                                  "tsh_redistribute: all-reduce");
    } else if (ctx->tp.rank) {
        memset(out, 0, bytes); /* R to P: zero on all ranks but rank 0 */
    } else {
        memcpy(out, in, bytes); /* R to P: rank 0 keeps the values */
    }
    return ctx->error.code;
}

/* Adds the gradient g, of layout `from`, to the gradient of input 0, of layout `to` (R or S). form
 * has the global shape of both. */
static void tshi_redistribute_back(tshi_node *node, const tsh_tensor *form, const tsh_layout *from,
                                   const tsh_layout *to, tsh_real *g) {
    tsh_tensor *x = node->in[0];
    const int64_t n = from->kind == TSH_SHARDED ? tsh_local_numel(form) : tsh_numel(form);
    tsh_dtype dtype = from->kind == TSH_REPLICATED ? TSH_REAL /* R: nothing is sent */
                                                   : tshi_tape_sent_as(x);
    tshi_block *scratch, *sent = NULL; /* sent: g rounded to the dtype that is sent, or NULL */
    tshi_dest dest;
    tsh_real *dx; /* dense gradient of input 0, in the layout `to` */
    if (!tshi_tape_dest(node, 0, &dest)) return;
    dx = tshi_op_dense_dest(x, &dest, &scratch);
    if (dx && dtype != TSH_REAL) sent = tshi_kernel_rounded(x->ctx, g, n, dtype);
    if (dx && tshi_redistribute_move(form, from, to, tshi_redistribute_use(x), dtype,
                                     sent ? tshi_mem_data(sent) : g, dx) == TSH_OK) {
        tshi_kernel_widen(dx, tsh_local_numel(x), dtype);
        tshi_op_accumulate(x, &dest, scratch);
    } else {
        tshi_mem_release(x->ctx, scratch);
    }
    tshi_mem_release(x->ctx, sent);
}

/* The reduce-scatter of a partial gradient of input 0 to the shards of that input. All zero: there
 * is none. */
typedef struct tshi_returning {
    tshi_moving move;    /* the reduce-scatter */
    tshi_block *sent;    /* the gradient of the whole input, in the dtype that is sent */
    tshi_dest dest;      /* where the sum for this rank's shard is added */
    tshi_block *scratch; /* memory of dx, if the sum cannot be received in dest; or NULL */
    tsh_real *dx;        /* where the sum is received */
    tsh_dtype dtype;     /* the dtype that is sent */
} tshi_returning;

/* Starts the reduce-scatter of a partial gradient to the shards of x, the node's input 0. whole:
 * this rank's gradient of all of x, which this function or tshi_redistribute_returned releases. */
static void tshi_redistribute_return(tshi_returning *back, tshi_node *node, tsh_tensor *x,
                                     tshi_block *whole) {
    tsh_ctx *ctx = x->ctx;
    back->sent = whole;
    back->dtype = tshi_tape_sent_as(x);
    if (ctx->error.code == TSH_OK && back->dtype != TSH_REAL) {
        back->sent = tshi_kernel_rounded(ctx, (tsh_real *)tshi_mem_data(whole), tsh_numel(x),
                                         back->dtype);
        tshi_mem_release(ctx, whole);
    }
    if (!back->sent || ctx->error.code != TSH_OK || !tshi_tape_dest(node, 0, &back->dest)) return;
    back->dx = tshi_op_dense_dest(x, &back->dest, &back->scratch);
    if (back->dx)
        tshi_redistribute_start(&back->move, x, &x->layout, TSHI_MOVE_SCATTER,
                                tshi_redistribute_use(x), back->dtype, tshi_mem_data(back->sent),
                                back->dx);
}

/* Waits for the reduce-scatter that tshi_redistribute_return has started, if it has. */
static void tshi_redistribute_returned(tshi_returning *back, tsh_tensor *x) {
    (void)tshi_redistribute_arrive(x->ctx, &back->move);
    if (back->dx && x->ctx->error.code == TSH_OK) {
        tshi_kernel_widen(back->dx, tsh_local_numel(x), back->dtype);
        tshi_op_accumulate(x, &back->dest, back->scratch);
    } else {
        (void)tshi_redistribute_finish(x->ctx, &back->move); /* until it returns, dx may be
                                                              * written */
        tshi_mem_release(x->ctx, back->scratch);
    }
    (void)tshi_redistribute_finish(x->ctx, &back->move);
    tshi_mem_release(x->ctx, back->sent);
}

/* Computes the backward of tsh_redistribute and tsh_tp_gather. After an all-gather, a complete
 * gradient (gr) is sliced, and a partial sum (gp) is reduce-scattered, which costs less than to
 * all-reduce and slice it. */
static void tshi_redistribute_backward(tshi_node *node) {
    const tsh_tensor *out = node->out;
    const tsh_layout sum = tsh_partial(), whole = tsh_replicated();
    const tsh_layout *from = out->layout.kind == TSH_SHARDED ? &out->layout : &whole;
    /* layout of the gradient of input 0: R, or S along a dimension of the output */
    const tsh_layout *to = (const tsh_layout *)node->params;
    if (out->gr.live)
        tshi_redistribute_back(node, out, from, to, (tsh_real *)tshi_mem_data(out->gr.block));
    if (out->gp.live)
        tshi_redistribute_back(node, out, &sum, to, (tsh_real *)tshi_mem_data(out->gp.block));
}

static const tshi_op tshi_redistribute_op = {
    "tsh_redistribute", "x", NULL, tshi_redistribute_backward, TSHI_NONE, 0};
static const tshi_op tshi_redistribute_all_gather_op = {
    "tsh_redistribute", "x", NULL, tshi_redistribute_backward, TSHI_NONE, TSHI_OP_ACCEPTS_PARTIAL};
static const tshi_op tshi_redistribute_gather_op = {
    "tsh_tp_gather", "x", NULL, tshi_redistribute_backward, TSHI_NONE, TSHI_OP_ACCEPTS_PARTIAL};

/* Redistributes x to `layout` and records op. shape: the output's global shape; from: the layout
 * that x is taken to have (tsh_tp_gather takes each rank's replicated x for a shard of the output).
 * Backward gives x a sharded gradient if `from` is sharded, else a replicated one. */
static tsh_tensor *tshi_redistribute_run(const tshi_op *op, tsh_tensor *x, const tsh_layout *from,
                                         const tsh_shape *shape, const tsh_layout *layout) {
    tsh_tensor *out = tshi_tensor_out(x->ctx, op->name, x->dtype, shape, layout);
    const tsh_layout back = from->kind == TSH_SHARDED ? *from : tsh_replicated();
    tshi_block *scratch;
    void *values = out ? tshi_kernel_packed(x, &scratch) : NULL; /* x's values, dense */
    tsh_result result;
    if (!values) return NULL;
    result = tshi_redistribute_move(out, from, layout, tshi_redistribute_use(x), x->dtype, values,
                                    tshi_tensor_at(out));
    tshi_mem_release(x->ctx, scratch);
    if (result != TSH_OK) return NULL;
    tshi_op_record(op, out, &x, 1, TSHI_NONE, &back, sizeof back, NULL);
    return out;
}

TSH_API tsh_tensor *tsh_redistribute(tsh_tensor *x, tsh_layout layout) {
    const tshi_op *op = &tshi_redistribute_op;
    tsh_ctx *ctx;
    char a[TSHI_TEXT_SIZE], b[TSHI_TEXT_SIZE];
    tsh_shape shape = tsh_shape_of(x);
    if (x) tshi_error_report(x->ctx); /* reports an earlier error: peers may wait for this rank */
    ctx = tshi_tensor_check("tsh_redistribute", "x", &x, 1);
    if (!ctx) return NULL;
    if (!tshi_layout_resolve(&layout, x->ndim, x->dim) ||
        (x->layout.kind == TSH_SHARDED && layout.kind == TSH_PARTIAL))
        return tshi_error_null(ctx, TSH_ERR_LAYOUT, "tsh_redistribute: %s cannot become %s",
                               tshi_tensor_text(x, a), tshi_layout_text(&layout, b, sizeof b));
    if (tshi_layout_identical(&x->layout, &layout)) return x;
    if (ctx->tp.size == 1 || tshi_layout_equal(&x->layout, &layout, x->dim, &ctx->deal)) {
        tsh_tensor *out = tshi_tensor_view(x); /* each rank already has its values */
        if (out) out->layout = layout;
        return out;
    }
    if (x->layout.kind == TSH_SHARDED && layout.kind == TSH_REPLICATED)
        op = &tshi_redistribute_all_gather_op;
    return tshi_redistribute_run(op, x, &x->layout, &shape, &layout);
}

TSH_API tsh_tensor *tsh_full_tensor(tsh_tensor *x) {
    return tsh_redistribute(x, tsh_replicated());
}

/* -- tsh_set_layout, tsh_tp_... --------------------------------------------- */

/* Returns a new handle of x's values, for an op that changes only gradients or the layout; NULL: no
 * memory. If *x is not dense, a dense copy replaces it: gradients have their tensor's strides. */
static tsh_tensor *tshi_redistribute_window(const char *op, tsh_tensor **x) {
    if (!tshi_tensor_is_dense(*x)) *x = tshi_op_copy(op, *x);
    return *x ? tshi_tensor_detached(*x, (*x)->block) : NULL;
}

/* Returns 1 if t's layout may change in place; 0 and an error if a recorded op, a view or a
 * gradient depends on it. */
static int tshi_redistribute_may_change(const tsh_tensor *t) {
    const int recorded = tshi_tensor_recorded(t), viewed = t->block->refs > 1;
    if (!recorded && !viewed && !t->gr.live && !t->gp.live) return 1;
    if (recorded || viewed)
        (void)tsh_fail(t->ctx, TSH_ERR_STATE,
                       "tsh_set_layout: %s that take the tensor as it lies now; end the step first "
                       "(tsh_step_end), or change a copy: tsh_clone or tsh_keep",
                       recorded ? "ops are recorded" : "there are views or detached tensors");
    else
        (void)tsh_fail(t->ctx, TSH_ERR_STATE,
                       "tsh_set_layout: the tensor has a gradient, which lies as it does now; "
                       "forget that first: tsh_zero_grad");
    return 0;
}

/* Does one step of tsh_set_layout, in which the old or the new layout is not sharded: changes the
 * sizes and the layout in *form, but no values. Fails if the ranks' shards would have different
 * lengths. */
static tsh_result tshi_redistribute_declare(tsh_tensor *form, tsh_layout layout) {
    tsh_ctx *ctx = form->ctx;
    /* the sharded one of the old and the new layout, if there is one */
    const tsh_layout *cut = form->layout.kind == TSH_SHARDED ? &form->layout : &layout;
    char a[TSHI_TEXT_SIZE], b[TSHI_TEXT_SIZE];
    tsh_tensor next = *form; /* next: the new value of *form */
    /* held: length along d that all shards must have; owned: that of the shard of rank r */
    int64_t held, owned;
    int r, fits = 1, d = cut->dim < 0 ? cut->dim + form->ndim : cut->dim;
    if (cut->kind == TSH_SHARDED && (d < 0 || d >= form->ndim)) fits = d = 0;
    if (layout.kind == TSH_SHARDED && fits) { /* d becomes as long as all shards together */
        fits = form->dim[d] <= INT64_MAX / 64 / ctx->tp.size; /* 0: sizes could overflow */
        next.dim[d] *= fits ? ctx->tp.size : 1;
    }
    if (fits) fits = tshi_layout_resolve(&layout, next.ndim, next.dim);
    if (!fits)
        return tsh_fail(ctx, TSH_ERR_LAYOUT,
                        "tsh_set_layout: the pieces of %d ranks, each %s, cannot lie as %s",
                        ctx->tp.size, tshi_tensor_text(form, a),
                        tshi_layout_text(&layout, b, sizeof b));
    if (cut->kind == TSH_SHARDED) {
        held = layout.kind == TSH_SHARDED ? form->dim[d]
                                          : tshi_layout_own(cut, form->dim[d], &ctx->deal, 0, NULL);
        for (r = 0; r < ctx->tp.size; r++)
            if ((owned = tshi_layout_own(cut, next.dim[d], &ctx->deal, r, NULL)) != held)
                return tsh_fail(
                    ctx, TSH_ERR_LAYOUT,
                    "tsh_set_layout: %s cannot become %s: of dimension %d rank %d has %lld, "
                    "not %lld; all pieces must be of one length",
                    tshi_tensor_text(form, a), tshi_layout_text(&layout, b, sizeof b), d, r,
                    (long long)owned, (long long)held);
        if (layout.kind != TSH_SHARDED) next.dim[d] = held; /* the whole is as long as one shard */
    }
    next.layout = layout;
    *form = next;
    return TSH_OK;
}

static const tshi_op tshi_redistribute_set_layout_op = {"tsh_set_layout",       "t",       NULL,
                                                        tshi_map_same_backward, TSHI_NONE, 0};

TSH_API tsh_tensor *tsh_set_layout(tsh_tensor *t, tsh_layout layout) {
    tsh_ctx *ctx = tshi_tensor_check("tsh_set_layout", "t", &t, 1);
    tsh_layout resolved = layout;
    tsh_tensor form, *out; /* form: t with the new layout */
    int in_place;          /* 1: changes t; 0: returns a new handle */
    if (!ctx) return NULL;
    form = *t;
    if (tshi_layout_resolve(&resolved, t->ndim, t->dim) &&
        tshi_layout_equal(&t->layout, &resolved, t->dim, &ctx->deal)) {
        if (tshi_layout_identical(&t->layout, &resolved)) return t;
        form.layout = resolved; /* another layout that gives every rank the same shard */
    } else {
        if (t->layout.kind != TSH_REPLICATED && layout.kind != TSH_REPLICATED)
            (void)tshi_redistribute_declare(&form, tsh_replicated());
        if (ctx->error.code != TSH_OK || tshi_redistribute_declare(&form, layout) != TSH_OK)
            return NULL;
    }
    /* a parameter keeps the layout that the plan gave it */
    in_place = (t->flags & TSHI_OWNED) && !(t->flags & TSHI_PARAM);
    if (in_place && !tshi_redistribute_may_change(t)) return NULL;
    out = in_place ? t : tshi_redistribute_window("tsh_set_layout", &t);
    if (!out) return NULL;
    memcpy(out->dim, form.dim, sizeof out->dim);
    out->layout = form.layout;
    if (!in_place)
        (void)tshi_tape_record(&tshi_redistribute_set_layout_op, out, &t, 1, TSHI_NONE, 0);
    return out;
}

/* Checks that x, the input of the tsh_tp_... function named op, is replicated; it may also be
 * sharded if `sharded` is 1, or a partial sum if `partial` is 1. Returns x's ctx; NULL and an error
 * if x has another layout. */
static tsh_ctx *tshi_redistribute_takes(const char *op, tsh_tensor *x, int sharded, int partial) {
    char text[TSHI_TEXT_SIZE];
    tsh_ctx *ctx;
    if (x) tshi_error_report(x->ctx); /* reports an earlier error: peers may wait for this rank */
    ctx = tshi_tensor_check(op, "x", &x, 1);
    if (!ctx || x->layout.kind == TSH_REPLICATED || (sharded && x->layout.kind == TSH_SHARDED) ||
        (partial && x->layout.kind == TSH_PARTIAL))
        return ctx;
    (void)tsh_fail(ctx, TSH_ERR_LAYOUT,
                   "%s: takes what each rank holds as a replicated tensor, not %s; say that it is "
                   "one: tsh_set_layout(x, tsh_replicated())",
                   op, tshi_tensor_text(x, text));
    return NULL;
}

/* Returns the index of x's dimension dim (negative: from the end), or -1 and an error. */
static int tshi_redistribute_dim(const char *op, const tsh_tensor *x, int dim) {
    char text[TSHI_TEXT_SIZE];
    int axis = tshi_tensor_axis(x, dim);
    if (axis < 0)
        (void)tsh_fail(x->ctx, TSH_ERR_ARGUMENT, "%s: %s has no dimension %d", op,
                       tshi_tensor_text(x, text), dim);
    return axis;
}

/* Returns 1 if redop can reduce x's dtype (TSH_AVG: floating dtypes only), else 0 and an error. */
static int tshi_redistribute_redop(const char *op, const tsh_tensor *x, tsh_redop redop) {
    if ((unsigned)redop <= (unsigned)TSH_AVG &&
        (redop != TSH_AVG || tshi_dtypes[x->dtype].floating))
        return 1;
    (void)tsh_fail(x->ctx, TSH_ERR_ARGUMENT, "%s: %d is no reduction of %s", op, (int)redop,
                   tshi_dtype_name(x->dtype));
    return 0;
}

/* Computes the backward of tsh_tp_copy: dx is the all-reduce, by the op's redop, of the gradients
 * of out on all ranks. */
static void tshi_redistribute_copy_backward(tshi_node *node) {
    tsh_tensor *out = node->out;
    tsh_redop op = *(const tsh_redop *)node->params;
    const tsh_dtype dtype = tshi_tape_sent_as(node->in[0]);
    const tsh_real *g = tshi_tape_complete(out); /* gr + gp of this rank, not yet all-reduced */
    size_t bytes = (size_t)tsh_local_numel(out) * sizeof *g;
    tshi_block *scratch = g ? tshi_mem_alloc(out->ctx, TSH_MEM_STEP, bytes) : NULL;
    tshi_dest dest;
    if (!scratch) return;
    memcpy(tshi_mem_data(scratch), g, bytes); /* the all-reduce must not change out's gradient */
    tshi_kernel_narrow(tshi_mem_data(scratch), tsh_local_numel(out), dtype);
    (void)tshi_wire_allreduce(out->ctx, tshi_redistribute_use(node->in[0]), op,
                              tshi_mem_data(scratch), tsh_local_numel(out), dtype,
                              "tsh_tp_copy: all-reduce of the gradient");
    tshi_kernel_widen(tshi_mem_data(scratch), tsh_local_numel(out), dtype);
    if (out->ctx->error.code == TSH_OK && tshi_tape_dest(node, 0, &dest))
        tshi_tape_accumulate(node->in[0], &dest, (const tsh_real *)tshi_mem_data(scratch),
                             out->stride);
    tshi_mem_release(out->ctx, scratch);
}

static const tshi_op tshi_redistribute_copy_op = {
    "tsh_tp_copy", "x",       NULL, tshi_redistribute_copy_backward,
    TSHI_NONE,     TSHI_OP_ACCEPTS_PARTIAL | TSHI_OP_ACCEPTS_RETAINED};

TSH_API tsh_tensor *tsh_tp_copy(tsh_tensor *x, tsh_redop op) {
    tsh_ctx *ctx = tshi_redistribute_takes("tsh_tp_copy", x, 0, 0);
    tsh_tensor *out;
    if (!ctx || !tshi_redistribute_redop("tsh_tp_copy", x, op)) return NULL;
    if (ctx->tp.size == 1 || !tshi_tape_records(ctx, &x, 1)) return x; /* no gradient to reduce */
    out = tshi_redistribute_window("tsh_tp_copy", &x);
    if (!out) return NULL;
    tshi_op_record(&tshi_redistribute_copy_op, out, &x, 1, TSHI_NONE, &op, sizeof op, NULL);
    return ctx->error.code == TSH_OK ? out : NULL;
}

static const tshi_op tshi_redistribute_reduce_op = {"tsh_tp_reduce",        "x",       NULL,
                                                    tshi_map_same_backward, TSHI_NONE, 0};

TSH_API tsh_tensor *tsh_tp_reduce(tsh_tensor *x, tsh_redop op) {
    tsh_ctx *ctx = tshi_redistribute_takes("tsh_tp_reduce", x, 0, 1);
    tsh_shape shape = tsh_shape_of(x);
    tsh_tensor *out;
    if (!ctx || !tshi_redistribute_redop("tsh_tp_reduce", x, op)) return NULL;
    if (ctx->tp.size == 1) return x->layout.kind == TSH_REPLICATED ? x : tsh_full_tensor(x);
    out = tshi_tensor_out(ctx, "tsh_tp_reduce", x->dtype, &shape, NULL);
    if (!out) return NULL;
    tshi_kernel_dense(x, tshi_tensor_at(out), out->dtype, 0); /* out = x, dense */
    if (tshi_wire_allreduce(ctx, tshi_redistribute_use(x), op, tshi_tensor_at(out), tsh_numel(out),
                            out->dtype, "tsh_tp_reduce: all-reduce") != TSH_OK)
        return NULL;
    (void)tshi_tape_record(&tshi_redistribute_reduce_op, out, &x, 1, TSHI_NONE, 0);
    return out;
}

TSH_API tsh_tensor *tsh_tp_scatter(tsh_tensor *x, int dim) {
    tsh_ctx *ctx = tshi_redistribute_takes("tsh_tp_scatter", x, 0, 0);
    int axis = ctx ? tshi_redistribute_dim("tsh_tp_scatter", x, dim) : -1;
    return axis < 0 ? NULL : tsh_redistribute(x, tsh_sharded(axis));
}

TSH_API tsh_tensor *tsh_tp_gather(tsh_tensor *x, int dim) {
    tsh_ctx *ctx = tshi_redistribute_takes("tsh_tp_gather", x, 1, 0);
    int axis = ctx ? tshi_redistribute_dim("tsh_tp_gather", x, dim) : -1;
    tsh_layout whole = tsh_replicated(), shards = tsh_sharded(axis);
    char text[TSHI_TEXT_SIZE];
    tsh_shape shape = tsh_shape_of(x);
    if (axis < 0) return NULL;
    if (x->layout.kind == TSH_SHARDED && x->layout.dim != axis)
        return tshi_error_null(ctx, TSH_ERR_LAYOUT,
                               "tsh_tp_gather: %s is not cut along dimension %d; gather it along "
                               "%d: tsh_redistribute(x, tsh_replicated())",
                               tshi_tensor_text(x, text), axis, x->layout.dim);
    if (x->layout.kind == TSH_SHARDED) return tsh_redistribute(x, whole);
    if (ctx->tp.size == 1) return x;
    shape.dim[axis] *= ctx->tp.size; /* all ranks' pieces together */
    (void)tshi_layout_resolve(&shards, shape.ndim, shape.dim);
    return tshi_redistribute_run(&tshi_redistribute_gather_op, x, &shards, &shape, &whole);
}

TSH_API tsh_result tsh_broadcast_batch(tsh_tensor *t) {
    tsh_ctx *ctx;
    char text[TSHI_TEXT_SIZE];
    if (t) tshi_error_report(t->ctx); /* peers may wait in the broadcast */
    ctx = tshi_tensor_check("tsh_broadcast_batch", "t", &t, 1);
    if (!ctx) return t ? t->ctx->error.code : TSH_ERR_ARGUMENT;
    if (!(t->flags & TSHI_OWNED) || t->layout.kind != TSH_REPLICATED)
        return tsh_fail(ctx, TSH_ERR_LAYOUT,
                        "tsh_broadcast_batch: takes an owned replicated tensor, not %s",
                        tshi_tensor_text(t, text));
    if (!tshi_tensor_may_change("tsh_broadcast_batch", t)) return ctx->error.code;
    tshi_tensor_forget_exact(t);
    return tshi_error_comm(ctx,
                           tsh_broadcast(&ctx->tp, tshi_tensor_at(t), tsh_numel(t), t->dtype, 0),
                           "tsh_broadcast_batch");
}
