/* ========================================================================== */
/* >>op-lstm                                        MARK: - op-lstm (private) */
/* tsh_lstm and tsh_gru: layers and directions, checks.                       */
/* Needs: >>rule-net >>op-dropout >>op-view >>redistribute >>op-recurrent.    */
/* ========================================================================== */

enum {
    TSHI_LSTM_SAVES = 1 << TSHI_RECURRENT_X | 1 << TSHI_RECURRENT_W_IH | 1 << TSHI_RECURRENT_W_HH |
                      1 << TSHI_RECURRENT_H0 | 1 << TSHI_RECURRENT_C0 | (int)TSHI_OUT
};
static const tshi_op tshi_lstm_op = {
    "tsh_lstm",          "x weight_ih weight_hh bias_ih bias_hh h0 c0",
    tshi_rule_recurrent, tshi_recurrent_backward,
    TSHI_LSTM_SAVES,     0};
static const tshi_op tshi_lstm_gru_op = {
    "tsh_gru",           "x weight_ih weight_hh bias_ih bias_hh h0 c0",
    tshi_rule_recurrent, tshi_recurrent_backward,
    TSHI_LSTM_SAVES,     0};

/* A call of tsh_lstm or tsh_gru. */
typedef struct tshi_lstm {
    const tshi_op *op;
    const tshi_cell_kind *kind;
    tsh_recurrent_desc desc; /* options of the call; .layers 0 is replaced by 1 */
    tsh_tensor *h0, *c0;     /* initial h and c, (layers D, B, H), D directions; or NULL */
    tsh_tensor **last;       /* last h of each layer and direction, then last c; each (1, B, H) */
} tshi_lstm;

/* -- one layer in one direction ----------------------------------------------- */

/* Checks the shapes of the inputs, all of which are floating. Returns 0 after an error. */
static int tshi_lstm_shapes(const tshi_lstm *call, tsh_tensor *const *in) {
    const int gates = call->kind->gates;
    const tsh_tensor *x = in[TSHI_RECURRENT_X], *w = in[TSHI_RECURRENT_W_HH];
    const int64_t hidden = w->ndim == 2 ? w->dim[1] : 0, rows = gates * hidden;
    const int64_t batch = x->dim[!call->desc.batch_first];
    const tsh_shape state = tsh_shape3(1, batch, hidden), bias = tsh_shape1(rows);
    const tsh_shape want[] = {
        tsh_shape0(), tsh_shape2(rows, x->dim[2]), tsh_shape2(rows, hidden), bias, bias, state,
        state};
    char text[TSHI_TEXT_SIZE], tx[TSHI_TEXT_SIZE];
    int length;
    for (int i = 1; i < TSHI_RECURRENT_INPUTS; i++) {
        const tsh_tensor *t = in[i];
        int fits = !t || (hidden > 0 && t->ndim == want[i].ndim);
        for (int d = 0; t && d < t->ndim && fits; d++) fits = t->dim[d] == want[i].dim[d];
        if (fits) continue;
        const char *name = tshi_tensor_name(call->op->inputs, i, &length);
        if (i < TSHI_RECURRENT_H0)
            return tshi_error_zero(x->ctx, TSH_ERR_SHAPE,
                                   "%s: x %s, %.*s %s; takes W_ih (%d H, features of x), W_hh (%d "
                                   "H, H) and biases (%d H)",
                                   call->op->name, tshi_tensor_text(x, tx), length, name,
                                   tshi_tensor_text(t, text), gates, gates, gates);
        return tshi_error_zero(x->ctx, TSH_ERR_SHAPE,
                               "%s: x %s has %lld samples, of %lld units each, but %.*s of a layer "
                               "is %s",
                               call->op->name, tshi_tensor_text(x, tx), (long long)batch,
                               (long long)hidden, length, name, tshi_tensor_text(t, text));
    }
    return 1;
}

/* Checks the inputs of a layer, and makes them dense. Returns 0 after an error. */
static int tshi_lstm_inputs(const tshi_lstm *call, tsh_tensor **in) {
    tsh_tensor *given[TSHI_RECURRENT_INPUTS]; /* the inputs, but for optional ones that are NULL */
    char list[TSHI_TEXT_SIZE] = "";
    int64_t rows, step;
    int n = 0, length;
    for (int i = 0; i < TSHI_RECURRENT_INPUTS; i++) {
        const char *name = tshi_tensor_name(call->op->inputs, i, &length);
        if (!in[i] && i > TSHI_RECURRENT_W_HH) continue;
        given[n++] = in[i];
        tsh_text_add(list, sizeof list, "%s%.*s", i ? " " : "", length, name);
    }
    if (!tshi_tensor_check_floating(call->op->name, list, given, n) || !tshi_lstm_shapes(call, in))
        return 0;
    for (int i = 0; i < TSHI_RECURRENT_INPUTS; i++) {
        if (!in[i] || (i ? tshi_tensor_is_dense(in[i]) : tshi_kernel_rows(in[i], &rows, &step)))
            continue;
        in[i] = tshi_op_copy(call->op->name, in[i]);
        if (!in[i]) return 0;
    }
    return 1;
}

/* Returns the initial h or c, (1, B, H), of layer and direction number i, from `all`, h0 or c0
 * (layers D, B, H). If `all` is replicated, shards the result as the units of w or the samples of x
 * are. NULL: an error, or `all` is NULL. */
static tsh_tensor *tshi_lstm_state(const tshi_lstm *call, tsh_tensor *all, int i,
                                   const tsh_tensor *x, const tsh_tensor *w) {
    tsh_tensor *t = all ? tsh_slice(all, 0, i, 1) : NULL;
    const int batch = !call->desc.batch_first; /* the batch dimension of x */
    tsh_layout layout;
    if (!t || t->layout.kind != TSH_REPLICATED) return t;
    if (w->layout.kind == TSH_SHARDED) {
        layout = tshi_rule_units(w);
        layout.dim = 2;
    } else if (tshi_rule_is_sharded(x, batch) && t->dim[1] == x->dim[batch]) {
        layout = x->layout;
        layout.dim = 1;
    } else {
        return t;
    }
    return tsh_redistribute(t, layout);
}

/* Records the call. Beside out[0], h of all time steps, its outputs are the last h and, of an LSTM,
 * the last c. */
static void tshi_lstm_record(const tshi_lstm *call, tsh_tensor *const *in, tsh_tensor *const *out,
                             unsigned partial, const tshi_recurrent *how, tshi_block *kept) {
    tshi_op_record(call->op, out[0], in, TSHI_RECURRENT_INPUTS, partial, how, sizeof *how, kept);
    for (int k = 1; k < 2 + call->kind->lstm && out[0]->ctx->anomalies; k++)
        tshi_tape_check_output(call->op, out[k], in, TSHI_RECURRENT_INPUTS);
    if (out[0]->node) tshi_tape_add_outputs(out[0]->node, out + 1, 1 + call->kind->lstm);
}

/* Runs one layer in one direction, number i of all; back 1: from the last time step to the first.
 * w: W_ih, W_hh and, if there are biases, b_ih and b_hh. Returns h of all time steps; NULL: an
 * error. */
static tsh_tensor *tshi_lstm_layer(const tshi_lstm *call, tsh_tensor *x, tsh_tensor *const *w,
                                   int i, int back) {
    const int biases = call->desc.bias != TSH_NO, lstm = call->kind->lstm;
    const tshi_rule_recurrent_params form = {call->kind->gates, !call->desc.batch_first};
    tshi_recurrent how = {call->kind, back, call->desc.batch_first != 0, 0};
    tsh_tensor *in[TSHI_RECURRENT_INPUTS] = {x, w[0], w[1], NULL, NULL, NULL, NULL}, *out[3];
    tsh_ctx *ctx = x->ctx;
    tshi_output output;
    tshi_block *kept;
    if (biases) in[TSHI_RECURRENT_B_IH] = w[2];
    if (biases) in[TSHI_RECURRENT_B_HH] = w[3];
    in[TSHI_RECURRENT_H0] = tshi_lstm_state(call, call->h0, i, x, w[0]);
    in[TSHI_RECURRENT_C0] = tshi_lstm_state(call, call->c0, i, x, w[0]);
    if (ctx->error.code != TSH_OK || !tshi_lstm_inputs(call, in) ||
        !tshi_rule_run(call->op, in, TSHI_RECURRENT_INPUTS, &form, &output))
        return NULL;
    how.cut = ctx->tp.size > 1 && w[0]->layout.kind == TSH_SHARDED;
    output.shape = tsh_shape_of(x);
    output.shape.dim[2] = in[TSHI_RECURRENT_W_HH]->dim[1];
    out[0] = tshi_tensor_out(ctx, call->op->name, x->dtype, &output.shape, &output.layout);
    output.shape = tsh_shape3(1, x->dim[form.batch], output.shape.dim[2]);
    if (output.layout.kind == TSH_SHARDED && output.layout.dim < 2) output.layout.dim = 1;
    for (int k = 1; k < 2 + lstm; k++)
        out[k] = tshi_tensor_out(ctx, call->op->name, x->dtype, &output.shape, &output.layout);
    kept = ctx->error.code == TSH_OK ? tshi_recurrent_forward(&how, in, out) : NULL;
    if (!kept) return NULL;
    tshi_lstm_record(call, in, out, output.partial, &how, kept);
    for (int k = 0; k < 1 + lstm; k++)
        call->last[k * call->desc.layers * (1 + call->desc.bidirectional) + i] = out[k + 1];
    return out[0];
}

/* -- all layers ---------------------------------------------------------------- */

/* Runs all layers on x (.., .., in); w: the weights of all. Returns h of the last layer at all time
 * steps; NULL: an error. */
static tsh_tensor *tshi_lstm_layers(const tshi_lstm *call, tsh_tensor *x, tsh_tensor *const *w) {
    const int each = call->desc.bias != TSH_NO ? 4 : 2, directions = 1 + call->desc.bidirectional;
    for (int i = 0; i < call->desc.layers && x; i++) {
        tsh_tensor *y[2] = {NULL, NULL};
        if (i && x->layout.kind == TSH_SHARDED && x->layout.dim == 2)
            x = tsh_redistribute(x, tsh_replicated()); /* output of a layer with sharded units */
        if (i && call->desc.dropout > 0) x = tsh_dropout(x, call->desc.dropout, call->desc.owner);
        for (int d = 0; d < directions && x; d++, w += each) {
            y[d] = tshi_lstm_layer(call, x, w, i * directions + d, d);
            if (!y[d]) return NULL;
        }
        x = directions > 1 && x ? tsh_concat(y, 2, 2) : y[0];
    }
    return x;
}

/* Checks the arguments of a call, but for the shapes that tshi_lstm_shapes checks for each layer.
 * Returns 0 after an error. */
static int tshi_lstm_check(const tshi_lstm *call, tsh_tensor *x, tsh_tensor *const *weights,
                           int count) {
    const tsh_recurrent_desc *desc = &call->desc;
    const int64_t layers = desc->layers * (int64_t)(1 + desc->bidirectional);
    const int64_t wanted = layers * (desc->bias != TSH_NO ? 4 : 2);
    tsh_tensor *const states[2] = {call->h0, call->c0};
    char text[TSHI_TEXT_SIZE], tx[TSHI_TEXT_SIZE];
    if (!tshi_tensor_check_floating(call->op->name, "x", &x, 1)) return 0;
    if (x->ndim < 2 || x->ndim > 3 || !x->dim[x->ndim == 3 && desc->batch_first])
        return tshi_error_zero(x->ctx, TSH_ERR_SHAPE,
                               "%s: x %s; takes (T, B, in), (B, T, in) with .batch_first = 1, or "
                               "(T, in), with T of at least 1",
                               call->op->name, tshi_tensor_text(x, tx));
    if (desc->layers < 1 || !weights || count != wanted)
        return tshi_error_zero(x->ctx, TSH_ERR_ARGUMENT,
                               "%s: %d weights for %d layers in %d directions; takes %lld",
                               call->op->name, weights ? count : 0, desc->layers,
                               1 + desc->bidirectional, (long long)wanted);
    if (!(desc->dropout >= 0 && desc->dropout <= 1))
        return tshi_error_zero(x->ctx, TSH_ERR_ARGUMENT, "%s: dropout is %g, not within [0, 1]",
                               call->op->name, desc->dropout);
    if (!tshi_tensor_check_floating(call->op->name, "weights[]", weights, count)) return 0;
    if (weights[0]->ctx != x->ctx)
        return tshi_error_zero(x->ctx, TSH_ERR_ARGUMENT, "%s: weights[0] belongs to another ctx",
                               call->op->name);
    for (int i = 0; i < 2; i++) {
        tsh_tensor *t = states[i];
        const char *name = i ? "c0" : "h0";
        if (!t) continue;
        if (!tshi_tensor_check_floating(call->op->name, name, &t, 1)) return 0;
        if (t->ctx != x->ctx)
            return tshi_error_zero(x->ctx, TSH_ERR_ARGUMENT, "%s: %s belongs to another ctx",
                                   call->op->name, name);
        if (t->ndim != x->ndim || t->dim[0] != layers)
            return tshi_error_zero(x->ctx, TSH_ERR_SHAPE,
                                   "%s: x %s, %s %s; takes (%lld, %s), for every layer and "
                                   "direction",
                                   call->op->name, tshi_tensor_text(x, tx), name,
                                   tshi_tensor_text(t, text), (long long)layers,
                                   x->ndim == 3 ? "B, H" : "H");
    }
    return 1;
}

/* Returns t (T, in) or (layers D, H) with a batch dimension, `at`, of one sample; t itself if it
 * has one already, and NULL if t is NULL. */
static tsh_tensor *tshi_lstm_batched(tsh_tensor *t, int at) {
    if (!t || t->ndim != 2) return t;
    return tsh_reshape(t, at ? tsh_shape3(t->dim[0], 1, t->dim[1])
                             : tsh_shape3(1, t->dim[0], t->dim[1]));
}

/* Returns t (.., 1, ..) without the batch dimension `at`. NULL if t is NULL. */
static tsh_tensor *tshi_lstm_unbatched(tsh_tensor *t, int at) {
    return t ? tsh_reshape(t, tsh_shape2(t->dim[!at], t->dim[2])) : NULL;
}

/* Runs tsh_lstm or tsh_gru. *state[0] and *state[1] get the last h and c, or NULL after an error; a
 * state[k] that is NULL gets nothing. */
static tsh_tensor *tshi_lstm_run(tshi_lstm *call, tsh_tensor *x, tsh_tensor *const *weights,
                                 int count, const tsh_recurrent_desc *desc,
                                 tsh_tensor **const *state) {
    tsh_ctx *ctx = x ? x->ctx : NULL;
    tsh_tensor *y = NULL, *last[2] = {NULL, NULL};
    tshi_block *block;
    memset(&call->desc, 0, sizeof call->desc);
    if (desc) call->desc = *desc;
    if (!call->desc.layers) call->desc.layers = 1;
    call->desc.bidirectional = call->desc.bidirectional != 0;
    for (int k = 0; k < 2; k++)
        if (state[k]) *state[k] = NULL;
    if (!tshi_lstm_check(call, x, weights, count)) return NULL;
    const int flat = x->ndim == 2, n = call->desc.layers * (1 + call->desc.bidirectional);
    x = tshi_lstm_batched(x, !call->desc.batch_first);
    if (flat) call->h0 = tshi_lstm_batched(call->h0, 1);
    if (flat) call->c0 = tshi_lstm_batched(call->c0, 1);
    block = tshi_mem_alloc(ctx, TSH_MEM_STEP, (size_t)n * 2 * sizeof *call->last);
    if (!block) return NULL;
    call->last = (tsh_tensor **)tshi_mem_data(block);
    if (ctx->error.code == TSH_OK && x) y = tshi_lstm_layers(call, x, weights);
    for (int k = 0; k < 1 + call->kind->lstm && y; k++)
        if (state[k]) last[k] = n > 1 ? tsh_concat(call->last + k * n, n, 0) : call->last[k * n];
    tshi_mem_release(ctx, block);
    if (flat) y = tshi_lstm_unbatched(y, !call->desc.batch_first);
    for (int k = 0; k < 2; k++) {
        if (flat) last[k] = tshi_lstm_unbatched(last[k], 1);
        if (state[k] && ctx->error.code == TSH_OK) *state[k] = last[k];
    }
    return ctx->error.code == TSH_OK ? y : NULL;
}

TSH_API tsh_tensor *tsh_lstm(tsh_tensor *x, tsh_tensor *const *weights, int count, tsh_tensor *h0,
                             tsh_tensor *c0, const tsh_recurrent_desc *desc, tsh_tensor **h,
                             tsh_tensor **c) {
    tsh_tensor **const state[2] = {h, c};
    tshi_lstm call;
    memset(&call, 0, sizeof call);
    call.op = &tshi_lstm_op;
    call.kind = &tshi_cell_kinds[0];
    call.h0 = h0;
    call.c0 = c0;
    return tshi_lstm_run(&call, x, weights, count, desc, state);
}

TSH_API tsh_tensor *tsh_gru(tsh_tensor *x, tsh_tensor *const *weights, int count, tsh_tensor *h0,
                            const tsh_recurrent_desc *desc, tsh_tensor **h) {
    tsh_tensor **const state[2] = {h, NULL};
    tshi_lstm call;
    memset(&call, 0, sizeof call);
    call.op = &tshi_lstm_gru_op;
    call.kind = &tshi_cell_kinds[1];
    call.h0 = h0;
    return tshi_lstm_run(&call, x, weights, count, desc, state);
}
