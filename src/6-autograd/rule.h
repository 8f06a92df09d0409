/* ========================================================================== */
/* >>rule                                              MARK: - rule (private) */
/* Layout rules: from the layouts of an op's inputs to that of its output.    */
/* They also say which inputs have a gradient that is a partial sum.          */
/* Needs: >>tensor.                                                           */
/* ========================================================================== */

/* A tshi_op names its rule, a tshi_rule_fn; several ops share one. When a rule is called, the
 * shapes of the inputs have been checked, output->layout is the layout of the first input and
 * output->partial is TSHI_NONE. The rule changes these two as needed and returns 1; or it returns 0
 * with an error that names a call that helps.
 *
 * Notation in comments: R is replicated, S(d) sharded along dimension d (-1: the last one), P a
 * partial sum. Before the colon are the layouts of the inputs; after it are the layout of the
 * output and the inputs whose gradient is a partial sum. "P R: P, dB P": if A is P and B is R, the
 * output is P, and so is the gradient of B, which each rank computes from its own part of A. */

/* Runs op's rule on n inputs: fills in output->layout and output->partial. params: the options of
 * the call that the rule depends on, or NULL. Returns 0 after an error. */
TSHI_OUTLINE int tshi_rule_run(const tshi_op *op, tsh_tensor *const *in, int n, const void *params,
                               tshi_output *output) {
    const tshi_call call = {op, in, n, params};
    output->layout = in[0]->layout;
    output->partial = TSHI_NONE;
    return op->rule(&call, output);
}

/* Fails because the layouts of a and b do not fit. `hint` says what to call instead. Returns 0. */
static TSHI_COLD int tshi_rule_refuse(const tshi_call *call, const tsh_tensor *a,
                                      const tsh_tensor *b, const char *hint) {
    char ta[TSHI_TEXT_SIZE], tb[TSHI_TEXT_SIZE];
    return tsh_fail(a->ctx, TSH_ERR_LAYOUT, "%s: layouts of %s and %s do not go together; %s",
                    call->op->name, tshi_tensor_text(a, ta), tshi_tensor_text(b, tb),
                    hint) == TSH_OK;
}

/* Fails because of the layout of the first input. `why`: such as "is a partial sum". Returns 0. */
static TSHI_COLD int tshi_rule_refuse_input(const tshi_call *call, const char *why) {
    const tsh_tensor *x = call->in[0];
    char text[TSHI_TEXT_SIZE];
    return tsh_fail(x->ctx, TSH_ERR_LAYOUT,
                    "%s: input %s; x is %s on %d ranks; complete it first: "
                    "tsh_redistribute(x, tsh_replicated())",
                    call->op->name, why, tshi_tensor_text(x, text), x->ctx->tp.size) == TSH_OK;
}

/* Applies the rule of ops whose output has the layout of the first input, whatever that is. */
static int tshi_rule_keep(const tshi_call *call, tshi_output *output) {
    (void)call, (void)output; /* this rule changes nothing */
    return 1;
}

/* -- elementwise ops ----------------------------------------------------------
 * If all inputs are R, the output is R. If all are S with the same shards, it is S. If some are S
 * and the others R, it is S; the latter must have length 1 along the sharded dimension, and their
 * gradients are P. Inputs that are P are only for ops that are linear in them; each of these ops
 * has a rule below. */

/* Returns a bit mask of the inputs that are partial sums. */
static unsigned tshi_rule_sums(const tshi_call *call) {
    unsigned sums = 0;
    for (int i = 0; i < call->n; i++)
        if (call->in[i]->layout.kind == TSH_PARTIAL) sums |= 1u << i;
    return sums;
}

/* Returns the first input whose layout is of this kind, or NULL. */
static const tsh_tensor *tshi_rule_first(const tshi_call *call, tsh_layout_kind kind) {
    for (int i = 0; i < call->n; i++)
        if (call->in[i]->layout.kind == kind) return call->in[i];
    return NULL;
}

/* Applies the rule of an elementwise op. sums: bits of the inputs that are P; allowed: 1 if the op
 * is linear in these inputs, so that they may be P. */
static int tshi_rule_elementwise(const tshi_call *call, unsigned sums, int allowed,
                                 tshi_output *output) {
    const tsh_tensor *cut = tshi_rule_first(call, TSH_SHARDED); /* first sharded input or NULL */
    const int ndim = output->shape.ndim;
    int i, d;
    if (sums && (cut || !allowed)) {
        const tsh_tensor *other = cut ? cut : tshi_rule_first(call, TSH_REPLICATED);
        return tshi_rule_refuse(
            call, tshi_rule_first(call, TSH_PARTIAL), other ? other : call->in[call->n - 1],
            "complete the partial sum first: tsh_redistribute(x, tsh_replicated())");
    }
    if (sums) output->layout = tsh_partial(); /* the op is linear: its output is P, too */
    if (sums && call->n == 2) output->partial = ~sums & (unsigned)(TSHI_A | TSHI_B);
    if (!cut) return 1;
    output->layout = cut->layout;
    output->layout.dim += ndim - cut->ndim; /* broadcasting aligns shapes at the right */
    d = output->layout.dim;
    for (i = 0; i < call->n; i++) {
        const tsh_tensor *x = call->in[i];
        const int own = d - (ndim - x->ndim), whole = x->layout.kind == TSH_REPLICATED;
        /* x's length along the sharded dimension */
        const int64_t length = own >= 0 ? x->dim[own] : 1;
        if (whole ? length != 1
                  : x->layout.dim != own || length != output->shape.dim[d] ||
                        !tshi_layout_same_shards(&cut->layout, &x->layout, length, &x->ctx->deal))
            return tshi_rule_refuse(
                call, cut, x,
                whole ? "make them alike: tsh_redistribute(b, tsh_layout_of(a)), or gather: "
                        "tsh_redistribute(a, tsh_replicated())"
                      : "make them alike: tsh_redistribute(b, tsh_layout_of(a))");
        /* x is broadcast to all ranks' shards, so each rank has a part of its gradient */
        if (whole) output->partial |= 1u << i;
    }
    return 1;
}

/* Defines tshi_rule_<name>, the rule of an elementwise op that accepts P inputs if the condition
 * `allowed` holds. sums: bits of the inputs that are P. */
#define TSHI_RULE_LINEAR(name, allowed)                                                            \
    static int tshi_rule_##name(const tshi_call *call, tshi_output *output) {                      \
        const unsigned sums = tshi_rule_sums(call);                                                \
        return tshi_rule_elementwise(call, sums, (allowed), output);                               \
    }
TSHI_RULE_LINEAR(add, sums == (TSHI_A | TSHI_B))             /* a + b, a - b: both P, or neither */
TSHI_RULE_LINEAR(multiply, sums == TSHI_A || sums == TSHI_B) /* a b: one of them may be P */
TSHI_RULE_LINEAR(divide, sums == TSHI_A)                     /* a / b: a may be P */
TSHI_RULE_LINEAR(where, sums == (TSHI_YES | TSHI_NO))        /* yes and no: both P, or neither */
#undef TSHI_RULE_LINEAR

/* Applies the rule of ops that are not linear. Refuses P: f(a + b) is not f(a) + f(b). */
static int tshi_rule_nonlinear(const tshi_call *call, tshi_output *output) {
    const unsigned sums = tshi_rule_sums(call);
    if (sums && call->n == 1)
        return tshi_rule_refuse_input(call, "is a partial sum, and the op is not linear");
    return tshi_rule_elementwise(call, sums, 0, output);
}

/* -- ops along a dimension: sum, max, softmax, argmax, concat -------------- */

/* Parameters of the rules of reductions. */
typedef struct tshi_rule_axis {
    /* axis: the reduced dimension, -1: all; keepdim: 1 if the output keeps it, with length 1 */
    int axis, keepdim;
} tshi_rule_axis;

/* Returns 1 if x is sharded along the axis; axis -1: along any dimension. */
static int tshi_rule_is_sharded(const tsh_tensor *x, int axis) {
    return x->layout.kind == TSH_SHARDED && (axis < 0 || axis == x->layout.dim);
}

/* Applies the rule of sum and mean. An R input gives an R output, P gives P, S along the reduced
 * dimension gives P, and S along another one gives S. */
static int tshi_rule_sum(const tshi_call *call, tshi_output *output) {
    const tshi_rule_axis *along = (const tshi_rule_axis *)call->params;
    tsh_layout *layout = &output->layout;
    if (tshi_rule_is_sharded(call->in[0], along->axis))
        *layout = tsh_partial();
    else if (layout->kind == TSH_SHARDED && layout->dim > along->axis && !along->keepdim)
        layout->dim--; /* the reduced dimension, which was before it, is gone */
    return 1;
}

/* Applies the rule of max, softmax and other ops that need all values along the dimension. Refuses
 * P, and S along this dimension. */
static int tshi_rule_whole(const tshi_call *call, tshi_output *output) {
    const tsh_tensor *x = call->in[0];
    if (x->layout.kind == TSH_PARTIAL ||
        tshi_rule_is_sharded(x, ((const tshi_rule_axis *)call->params)->axis))
        return tshi_rule_refuse_input(
            call, "is not whole along the dimension, and the op needs all values there");
    return tshi_rule_sum(call, output);
}

/* Applies the rule of argmax. S along the reduced dimension gives R, since the ranks exchange the
 * maxima of their shards. Otherwise does what tshi_rule_whole does. */
static int tshi_rule_argmax(const tshi_call *call, tshi_output *output) {
    const int axis = ((const tshi_rule_axis *)call->params)->axis;
    if (axis < 0 || !tshi_rule_is_sharded(call->in[0], axis)) return tshi_rule_whole(call, output);
    output->layout = tsh_replicated();
    return 1;
}

/* Applies the rule of logsumexp, var, std and norm. S along the reduced dimension, or along any if
 * all are reduced, gives R, since the ranks exchange the results of their shards. Otherwise does
 * what tshi_rule_whole does. */
static int tshi_rule_statistic(const tshi_call *call, tshi_output *output) {
    const int axis = ((const tshi_rule_axis *)call->params)->axis;
    if (!tshi_rule_is_sharded(call->in[0], axis)) return tshi_rule_whole(call, output);
    output->layout = tsh_replicated();
    return 1;
}

/* Applies the rule of cumsum, which is linear: keeps R, P, and S along another dimension. */
static int tshi_rule_cumulate(const tshi_call *call, tshi_output *output) {
    (void)output; /* the layout stays that of the input */
    if (!tshi_rule_is_sharded(call->in[0], ((const tshi_rule_axis *)call->params)->axis)) return 1;
    return tshi_rule_refuse_input(
        call, "is not whole along the dimension, and each value is a sum of those before it");
}

/* Applies the rule of concatenation along dimension d, to which params points. If all parts are
 * S(d), the output is S(d), with the segments of all parts. Else all parts must have one layout,
 * which is the output's. */
static int tshi_rule_concat(const tshi_call *call, tshi_output *output) {
    tsh_tensor *const *in = call->in;
    tsh_layout *layout = &output->layout;
    const int d = *(const int *)call->params;
    char a[TSHI_TEXT_SIZE], b[TSHI_TEXT_SIZE];
    int i, e, fits = 1, along = layout->kind == TSH_SHARDED && layout->dim == d;
    for (i = 1; i < call->n && fits; i++) {
        const tsh_layout *own = &in[i]->layout; /* layout of part i */
        fits = own->kind == layout->kind && own->dim == layout->dim;
        if (fits && layout->kind == TSH_SHARDED && !along)
            fits = tshi_layout_equal(own, layout, in[i]->dim, &in[i]->ctx->deal);
        for (e = 0; e < own->segments && along && fits; e++) {
            fits = layout->segments < TSH_MAX_SEGMENTS; /* there is space for one more segment */
            if (fits) layout->segment[layout->segments++] = own->segment[e];
        }
    }
    if (!fits)
        (void)tsh_fail(in[0]->ctx, TSH_ERR_LAYOUT,
                       "%s: part %d, %s, does not go with %s along dimension %d (at most "
                       "%d segments in all); tsh_redistribute brings parts to one layout",
                       call->op->name, i - 1, tshi_tensor_text(in[i - 1], a),
                       tshi_tensor_text(in[0], b), d, TSH_MAX_SEGMENTS);
    return fits;
}

/* -- matmul, linear, embedding: their layout rules ------------------------- */

/* Fills in the layout of a matrix product and which inputs have a partial gradient; returns 0 if
 * the layouts do not fit. Shapes: A (.., m, k), B (.., k, n), output (.., m, n). da, db: the
 * sharded dimension of A and of B, counted as a dimension of the output.
 * The cases; "P R: P, dB P" says: if A is P and B is R, the output and the gradient of B are P.
 *   R R: R.  P R: P, dB P.  R P: P, dA P.  S(k) S(k): P.  S(m) R: S(m), dB P.
 *   R S(n): S(n), dA P.  S(batch) S(batch): S(batch).  S(batch) R: S(batch), dB P, if B has length
 *   1 along the batch dimension, or no such dimension. */
static int tshi_rule_products(tsh_tensor *a, tsh_tensor *b, tshi_output *output) {
    const tsh_layout *la = &a->layout, *lb = &b->layout;
    tsh_layout *out = &output->layout;
    const int nd = output->shape.ndim, da = la->dim + nd - a->ndim, db = lb->dim + nd - b->ndim;
    /* sa: 1 if A is sharded; sb: 1 if B is sharded */
    const int sa = la->kind == TSH_SHARDED, sb = lb->kind == TSH_SHARDED;
    const int same = sa && sb && tshi_layout_same_shards(la, lb, a->dim[la->dim], &a->ctx->deal);
    if (la->kind == TSH_REPLICATED && lb->kind == TSH_REPLICATED) return 1;
    /* if one input is R, its gradient is a partial sum */
    output->partial = la->kind == TSH_REPLICATED ? TSHI_A : TSHI_B;
    /* one is P: the other one must be R */
    if (la->kind == TSH_PARTIAL || lb->kind == TSH_PARTIAL) {
        *out = tsh_partial();
        return la->kind == TSH_REPLICATED || lb->kind == TSH_REPLICATED;
    }
    if (sa && sb) output->partial = TSHI_NONE;      /* no input is R: no gradient is partial */
    if (sa && sb && da == nd - 1 && db == nd - 2) { /* both are sharded along k */
        *out = tsh_partial();
        return same;
    }
    *out = sa ? *la : *lb;
    out->dim = sa ? da : db; /* the sharded dimension, as one of the output */
    if (sa && sb)            /* both are sharded along a batch dimension */
        return same && da == db && da < nd - 2 && a->dim[la->dim] == b->dim[lb->dim];
    if (sa && da == nd - 2) return 1; /* A is sharded along m, B is R */
    if (sb && db == nd - 1) return 1; /* A is R, B is sharded along n */
    if (out->dim >= nd - 2) return 0; /* refused: only one input is sharded along k */
    /* b: from here on the input that is R, which must be broadcast along the batch dimension */
    if (sb) b = a;
    return out->dim < nd - b->ndim || b->dim[out->dim - (nd - b->ndim)] == 1;
}

/* Applies the rule of matmul, or fails and says which layouts fit. */
static int tshi_rule_matmul(const tshi_call *call, tshi_output *output) {
    return tshi_rule_products(call->in[0], call->in[1], output) ||
           tshi_rule_refuse(call, call->in[0], call->in[1],
                            "shard both along the inner dimension, or make one replicated: "
                            "tsh_redistribute(x, tsh_replicated())");
}

/* Options of a linear layer for sequence parallelism. */
typedef struct tshi_rule_sequence {
    const tsh_layout *give; /* layout that a row-parallel op gives its output; NULL: R */
    int regather;           /* 1: a column-parallel op gathers x from shards of the sequence */
} tshi_rule_sequence;

/* Applies the rule of linear, y = x W^T + b. Shapes: x (..., in), W (out, in), b (out),
 * y (..., out). dx, dW and db are the gradients.
 * W R: y has the layout of x. If x is S, but not S(-1), or P without b: dW and db are P.
 * W S(0), column-parallel: if x is R, y is S(-1) and dx P; if x is sharded along the sequence, the
 * op gathers x, and y is S(-1).
 * W S(1), row-parallel: x must be S(-1); y is R, or sharded along the sequence, and then db is
 * P. */
static int tshi_rule_linear(const tshi_call *call, tshi_output *output) {
    const tshi_rule_sequence *sequence = (const tshi_rule_sequence *)call->params;
    const tsh_tensor *x = call->in[0], *w = call->in[1], *b = call->in[2];
    const int cut = x->layout.kind == TSH_SHARDED, along = cut && x->layout.dim == x->ndim - 1;
    const int column = w->layout.kind == TSH_SHARDED && w->layout.dim == 0;
    const int row = w->layout.kind == TSH_SHARDED && w->layout.dim == 1;
    const tshi_deal *deal = &x->ctx->deal;
    const tsh_layout bias = column ? w->layout : tsh_replicated(); /* the layout that b must have */
    const char *hint = NULL; /* NULL: the layouts of x and W fit */
    if (w->layout.kind == TSH_PARTIAL)
        hint = "complete the weight first: tsh_redistribute(w, tsh_replicated())";
    else if (column && x->layout.kind != TSH_REPLICATED && !(sequence->regather && cut && !along))
        hint = "a column-parallel weight takes a replicated input: "
               "tsh_redistribute(x, tsh_replicated())";
    else if (row && !(along && tshi_layout_same_shards(&x->layout, &w->layout, w->dim[1], deal)))
        hint = "a row-parallel weight takes an input that is replicated, or sharded along features "
               "by the same units: tsh_redistribute(x, tsh_replicated())";
    else if (along && !row)
        hint = "a sharded input wants a weight sharded along dimension 1, or gather it: "
               "tsh_redistribute(x, tsh_replicated())";
    else if (x->layout.kind == TSH_PARTIAL && b)
        hint = "the bias would be added once per rank; complete the input first: "
               "tsh_redistribute(x, tsh_replicated())";
    if (hint) return tshi_rule_refuse(call, x, w, hint);
    if (b && !tshi_layout_equal(&b->layout, &bias, b->dim, deal))
        return tshi_rule_refuse(call, w, b,
                                "the bias of a column-parallel weight is sharded like its "
                                "dimension 0, any other is replicated");
    if (column) { /* each rank computes some output features */
        output->layout = w->layout;
        output->layout.dim = x->ndim - 1;
        output->partial = sequence->regather ? TSHI_NONE : TSHI_X;
    } else if (row) { /* each rank sums over some input features */
        output->layout = sequence->give ? *sequence->give : tsh_replicated();
        output->partial = sequence->give ? TSHI_BIAS : TSHI_NONE;
    } else if (x->layout.kind != TSH_REPLICATED) { /* each rank has rows, or a partial sum, of x */
        output->partial = TSHI_WEIGHT | TSHI_BIAS;
    }
    return 1;
}

/* Applies the rule of an adapter of low rank, y + s h B^T. Shapes: y and output (..., out), h (...,
 * rank), B (out, rank). The output has the layout of y. If B is S(0), y is S(-1) and h is R: then
 * dh is P. If B is R, h has the layout of y, and unless that is R, dB is P. */
static int tshi_rule_lora(const tshi_call *call, tshi_output *output) {
    const tsh_tensor *h = call->in[1], *b = call->in[2];
    if (b->layout.kind == TSH_SHARDED)
        output->partial = TSHI_WEIGHT; /* the bit of input 1, h */
    else if (h->layout.kind != TSH_REPLICATED)
        output->partial = TSHI_BIAS; /* the bit of input 2, B */
    return 1;
}

/* Applies the rule of embedding, which looks up rows of W, of shape (rows, features), by ids. If
 * ids and W are R, the output is R. If ids are S and W is R, it is S, and dW is P. If ids are R and
 * W is S(1), it is S(-1). If ids are R and W is S(0), it is P, because a rank outputs 0 for rows
 * that it does not hold. */
static int tshi_rule_embedding(const tshi_call *call, tshi_output *output) {
    const tsh_tensor *ids = call->in[0], *w = call->in[1];
    if (ids->layout.kind == TSH_SHARDED) output->partial = TSHI_WEIGHT;
    if (ids->layout.kind != TSH_PARTIAL && w->layout.kind == TSH_REPLICATED) return 1;
    if (ids->layout.kind != TSH_REPLICATED || w->layout.kind == TSH_PARTIAL)
        return tshi_rule_refuse(call, ids, w,
                                "a sharded weight takes replicated ids: "
                                "tsh_redistribute(ids, tsh_replicated())");
    /* W S(1) gives S(-1), S(0) gives P */
    output->layout = w->layout.dim ? w->layout : tsh_partial();
    if (w->layout.dim) output->layout.dim = ids->ndim;
    return 1;
}

/* -- norms, rope, attention: their layout rules ---------------------------- */

/* Returns 1 if t is NULL, or if t, of shape (d), is cut into the same shards as the last dimension
 * of x (.., d). */
static int tshi_rule_norm_alike(const tsh_tensor *x, const tsh_tensor *t) {
    return !t || (t->layout.kind == TSH_SHARDED &&
                  tshi_layout_same_shards(&x->layout, &t->layout, t->dim[0], &x->ctx->deal));
}

/* Applies the rule of norms over the last dimension. With a weight and bias that are R or NULL: if
 * x is R, the output is R; if x is S, but not S(-1), it is S, and the gradients dW and db are P.
 * With a weight and bias that are S(0) or NULL: if x is S(-1) with the same shards, the output is
 * S(-1). */
static int tshi_rule_norm(const tshi_call *call, tshi_output *output) {
    const tsh_tensor *x = call->in[0], *w = call->in[1], *b = call->in[2];
    const int last = x->ndim - 1;
    if (x->layout.kind == TSH_PARTIAL) return tshi_rule_refuse_input(call, "is a partial sum");
    if (tshi_rule_is_sharded(x, last)) {
        if (tshi_rule_norm_alike(x, w) && tshi_rule_norm_alike(x, b)) return 1;
        return tsh_fail(x->ctx, TSH_ERR_LAYOUT,
                        "%s: input is sharded along its last dimension (rank %d holds %lld of %lld "
                        "features), and weight or bias not like it; gather it first: "
                        "tsh_redistribute(x, tsh_replicated()), or shard them by the same units",
                        call->op->name, x->ctx->tp.rank, (long long)x->local[last],
                        (long long)x->dim[last]) == TSH_OK;
    }
    if (w && w->layout.kind == TSH_REPLICATED) w = NULL; /* NULL: its layout fits */
    if (b && b->layout.kind == TSH_REPLICATED) b = NULL;
    if (w || b)
        return tshi_rule_refuse(call, x, w ? w : b,
                                "weight and bias must be replicated, or sharded like the input's "
                                "last dimension: tsh_redistribute(w, tsh_replicated())");
    if (x->layout.kind == TSH_SHARDED) output->partial = TSHI_WEIGHT | TSHI_BIAS;
    return 1;
}

/* Applies the rule of rope, which rotates pairs of features: the output has the layout of x, which
 * may be any but S(-1). */
static int tshi_rule_rope(const tshi_call *call, tshi_output *output) {
    (void)output;
    return !tshi_rule_is_sharded(call->in[0], call->in[0]->ndim - 1) ||
           tshi_rule_refuse_input(
               call, "is sharded along its last dimension, whose features turn in pairs");
}

/* Returns 1 if on every rank the query heads use exactly the heads of k that the rank itself
 * holds. */
static int tshi_rule_groups(const tsh_tensor *q, const tsh_tensor *k) {
    const int64_t group = k->dim[1] ? q->dim[1] / k->dim[1] : 1; /* query heads per head of k */
    tsh_layout cut = k->layout; /* changed below into the layout that q must have */
    for (int s = 0; s < cut.segments; s++) {
        cut.segment[s].length *= group;
        cut.segment[s].unit *= group;
    }
    return tshi_layout_same_shards(&q->layout, &cut, q->dim[1], &q->ctx->deal);
}

/* Applies the rule of attention. Shapes: q and output (B, heads, queries, D), k and v (B, k heads,
 * keys, D). If q, k and v are R, the output is R; if all are S(0), it is S(0). If q is S(1) and k
 * and v are R, it is S(1), and dk and dv are P. If all are S(1), it is S(1); every rank's query
 * heads must use only heads of k that the rank itself holds. */
static int tshi_rule_attention(const tshi_call *call, tshi_output *output) {
    const tsh_tensor *q = call->in[0], *k = call->in[1], *v = call->in[2];
    const tshi_deal *deal = &q->ctx->deal;
    const int heads = tshi_rule_is_sharded(q, 1);                         /* 1: q is S(1) */
    const int grouped = heads && tshi_rule_is_sharded(k, 1);              /* 1: q and k are S(1) */
    const int fits = !tshi_rule_first(call, TSH_PARTIAL) && q->layout.dim < 2 &&
                     k->layout.dim < 2 && tshi_layout_equal(&k->layout, &v->layout, k->dim, deal);
    char tq[TSHI_TEXT_SIZE], tk[TSHI_TEXT_SIZE], tv[TSHI_TEXT_SIZE];
    if (fits && heads && k->layout.kind == TSH_REPLICATED) {
        output->partial = TSHI_K | TSHI_V;
        return 1;
    }
    if (fits && (grouped ? tshi_rule_groups(q, k)
                         : tshi_layout_equal(&q->layout, &k->layout, k->dim, deal)))
        return 1;
    (void)tshi_tensor_text(q, tq);
    (void)tshi_tensor_text(k, tk);
    (void)tshi_tensor_text(v, tv);
    if (fits && grouped)
        return tsh_fail(q->ctx, TSH_ERR_LAYOUT,
                        "%s: q %s, k %s, v %s: a rank's query heads must use its own heads of k "
                        "and v; cut q in whole groups: tsh_redistribute(q, tsh_shard_units(1, "
                        "%lld)), or replicate k and v",
                        call->op->name, tq, tk, tv,
                        (long long)(q->dim[1] / k->dim[1] * k->layout.segment[0].unit)) == TSH_OK;
    return tsh_fail(q->ctx, TSH_ERR_LAYOUT,
                    "%s: q %s, k %s, v %s must all be replicated, or sharded alike by batch or by "
                    "heads (k and v may be replicated then): tsh_redistribute(k, "
                    "tsh_layout_of(q))",
                    call->op->name, tq, tk, tv) == TSH_OK;
}

/* -- cross-entropy: its layout rule ---------------------------------------- */

/* Returns the index of the logits' dimension of classes. dim: as in tsh_cross_entropy_desc. */
static int tshi_rule_classes(const tsh_tensor *logits, int dim) {
    return dim && logits->ndim > 1 ? 1 : logits->ndim - 1;
}

/* Applies the rule of cross-entropy. One dimension of the logits is that of the classes; the others
 * count rows. If the logits are R or sharded along the classes, and the target is R, the output is
 * R. If logits and target are sharded along rows, the output is P, or S if losses are not reduced.
 * A target of probabilities may have the layout of the logits, too. The weight per class is R, or
 * sharded as the classes. *params: the tsh_cross_entropy_desc. */
static int tshi_rule_cross_entropy(const tshi_call *call, tshi_output *output) {
    const tsh_cross_entropy_desc *desc = (const tsh_cross_entropy_desc *)call->params;
    const tsh_tensor *x = call->in[0], *target = call->in[1], *weight = call->in[2];
    const int axis = tshi_rule_classes(x, desc->dim);
    const int probs = tshi_dtypes[target->dtype].floating; /* 0: the target has class indices */
    const int cut = tshi_rule_is_sharded(x, axis), rows = !cut && x->layout.kind == TSH_SHARDED;
    /* layout of the losses, one per row: that of x without the dimension of classes */
    tsh_layout losses = x->layout;
    int fits;
    char text[TSHI_TEXT_SIZE];
    if (rows && losses.dim > axis) losses.dim--;
    fits = (rows || probs) && tshi_layout_equal(probs ? &x->layout : &losses, &target->layout,
                                                target->dim, &x->ctx->deal);
    if (x->layout.kind == TSH_PARTIAL)
        return tsh_fail(x->ctx, TSH_ERR_LAYOUT,
                        "%s: the logits %s are a partial sum over %d ranks; complete "
                        "them first: tsh_redistribute(logits, tsh_replicated())",
                        call->op->name, tshi_tensor_text(x, text), x->ctx->tp.size) == TSH_OK;
    if (probs ? !fits : !rows) fits = target->layout.kind == TSH_REPLICATED;
    if (!fits) {
        (void)snprintf(text, sizeof text,
                       "the target is to be sharded as the logits' rows: "
                       "tsh_redistribute(target, tsh_sharded(%d))",
                       losses.dim);
        return tshi_rule_refuse(call, x, target,
                                probs ? "the target is replicated, or laid out as the logits"
                                : losses.dim != x->layout.dim ? text
                                : rows ? "the target is to be sharded as the logits' rows: "
                                         "tsh_redistribute(target, tsh_layout_of(logits))"
                                       : "the target is to be replicated: "
                                         "tsh_redistribute(target, tsh_replicated())");
    }
    if (weight && weight->layout.kind != TSH_REPLICATED &&
        !(cut && weight->layout.kind == TSH_SHARDED &&
          tshi_layout_same_shards(&x->layout, &weight->layout, x->dim[axis], &x->ctx->deal)))
        return tshi_rule_refuse(call, x, weight,
                                "the weight is replicated, or cut as the classes: "
                                "tsh_redistribute(weight, tsh_replicated())");
    output->layout = !rows                                ? tsh_replicated()
                     : desc->reduction == TSH_REDUCE_NONE ? losses
                                                          : tsh_partial();
    return 1;
}

/* Returns 1 if a loss takes a weight w, which is broadcast to x's shape, in its present layout: R,
 * with length 1 where x is sharded, or sharded as x is. */
static int tshi_rule_loss_weight(const tsh_tensor *x, const tsh_tensor *w) {
    /* own: the dimension of w along which x is sharded; negative: none */
    const int own = x->layout.dim - (x->ndim - w->ndim);
    if (x->layout.kind == TSH_REPLICATED || w->layout.kind != TSH_SHARDED)
        return w->layout.kind == TSH_REPLICATED &&
               (x->layout.kind == TSH_REPLICATED || own < 0 || w->dim[own] == 1);
    return w->layout.dim == own && w->dim[own] == x->dim[x->layout.dim] &&
           tshi_layout_same_shards(&x->layout, &w->layout, w->dim[own], &x->ctx->deal);
}

/* Applies the rule of elementwise losses. Inputs: x, a target of x's shape, and weights that are
 * broadcast to it, or NULL. If x and target are R, the output is R. If they are sharded alike, it
 * is P, or sharded as they are if losses are not reduced. Weights are R or sharded as x; they get
 * no gradient. *params: the tsh_loss_desc. */
static int tshi_rule_loss(const tshi_call *call, tshi_output *output) {
    const tsh_loss_desc *desc = (const tsh_loss_desc *)call->params;
    const tsh_tensor *x = call->in[0], *target = call->in[1];
    if (x->layout.kind == TSH_PARTIAL)
        return tshi_rule_refuse_input(call, "is a partial sum, and the loss is not linear");
    if (!tshi_layout_equal(&x->layout, &target->layout, x->dim, &x->ctx->deal))
        return tshi_rule_refuse(call, x, target,
                                "the target is to be laid out as x: tsh_redistribute(target, "
                                "tsh_layout_of(x))");
    for (int i = 2; i < call->n; i++)
        if (call->in[i] && !tshi_rule_loss_weight(x, call->in[i]))
            return tshi_rule_refuse(call, x, call->in[i],
                                    "a weight is to be replicated, or sharded as x: "
                                    "tsh_redistribute(weight, tsh_replicated())");
    if (x->layout.kind == TSH_SHARDED && desc->reduction != TSH_REDUCE_NONE)
        output->layout = tsh_partial();
    return 1;
}

/* Applies the rule of cosine similarity along dimension *params of the broadcast shape. It is that
 * of a nonlinear elementwise op, but along this dimension the ranks all-reduce their sums: S along
 * it gives R, and S along another dimension gives S. */
static int tshi_rule_cosine(const tshi_call *call, tshi_output *output) {
    const int axis = *(const int *)call->params;
    if (!tshi_rule_nonlinear(call, output)) return 0;
    if (output->layout.kind == TSH_SHARDED && output->layout.dim == axis)
        output->layout = tsh_replicated();
    else if (output->layout.kind == TSH_SHARDED && output->layout.dim > axis)
        output->layout.dim--;
    return 1;
}
