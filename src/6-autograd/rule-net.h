/* ========================================================================== */
/* >>rule-net                                      MARK: - rule-net (private) */
/* Layout rules of norms over channels, recurrent networks and convolutions.  */
/* Needs: >>rule.                                                             */
/* ========================================================================== */

/* -- norms over channels: their layout rules --------------------------------- */

/* Applies the rule of norms over channels, dimension 1 of x (N, C, ..); the other inputs are (C) or
 * NULL. If x is R, all are R. If x is S(1), they have the same shards. If x is sharded along
 * another dimension, they are R, and the gradients dW and db are P. */
static int tshi_rule_batch_norm(const tshi_call *call, tshi_output *output) {
    const tsh_tensor *x = call->in[0];
    const int cut = tshi_rule_is_sharded(x, 1);
    if (x->layout.kind == TSH_PARTIAL) return tshi_rule_refuse_input(call, "is a partial sum");
    for (int i = 1; i < call->n; i++) {
        const tsh_tensor *t = call->in[i];
        if (!t ||
            (cut ? t->layout.kind == TSH_SHARDED &&
                       tshi_layout_same_shards(&x->layout, &t->layout, t->dim[0], &x->ctx->deal)
                 : t->layout.kind == TSH_REPLICATED))
            continue;
        return tshi_rule_refuse(call, x, t,
                                cut ? "of an input whose channels are sharded, all that has a "
                                      "number per channel must be sharded alike; or gather it: "
                                      "tsh_redistribute(x, tsh_replicated())"
                                    : "what has a number per channel must be replicated, or the "
                                      "input's dimension 1 sharded alike: tsh_redistribute(x, "
                                      "tsh_sharded(1))");
    }
    if (x->layout.kind == TSH_SHARDED && !cut) output->partial = TSHI_WEIGHT | TSHI_BIAS;
    return 1;
}

/* Applies the rule of group norm: that of batch norm, but x is R, S(0), or S(1) with whole groups
 * on every rank. *params: the number of channels of a group. */
static int tshi_rule_group_norm(const tshi_call *call, tshi_output *output) {
    const int64_t each = *(const int64_t *)call->params;
    const tsh_tensor *x = call->in[0];
    tsh_range range[TSH_MAX_SEGMENTS];
    char text[TSHI_TEXT_SIZE];
    if (x->layout.kind == TSH_SHARDED && x->layout.dim > 1)
        return tshi_rule_refuse_input(call, "is sharded within groups");
    for (int r = 0; r < x->ctx->tp.size && tshi_rule_is_sharded(x, 1); r++) {
        (void)tshi_layout_own(&x->layout, x->dim[1], &x->ctx->deal, r, range);
        for (int s = 0; s < x->layout.segments; s++)
            if (range[s].start % each || range[s].length % each)
                return tsh_fail(x->ctx, TSH_ERR_LAYOUT,
                                "%s: input %s: rank %d holds channels [%lld, %lld), which are no "
                                "whole groups of %lld; cut it in whole groups: tsh_redistribute(x, "
                                "tsh_shard_units(1, %lld))",
                                call->op->name, tshi_tensor_text(x, text), r,
                                (long long)range[s].start,
                                (long long)(range[s].start + range[s].length), (long long)each,
                                (long long)each) == TSH_OK;
    }
    return tshi_rule_batch_norm(call, output);
}

/* -- LSTM and GRU: their layout rule ------------------------------------------ */

/* Parameters of tshi_rule_recurrent, the layout rule of LSTM and GRU. */
typedef struct tshi_rule_recurrent_params {
    /* gates: per hidden unit, 4 (LSTM) or 3 (GRU); batch: the dimension of x that counts samples */
    int gates, batch;
} tshi_rule_recurrent_params;

/* Returns the layout of the hidden units of a recurrent layer, one of whose weights is w, S(0):
 * that of one segment of w, which has a segment per gate. */
static tsh_layout tshi_rule_units(const tsh_tensor *w) {
    tsh_layout units = w->layout;
    units.segments = 1;
    memset(units.segment + 1, 0, sizeof units.segment - sizeof units.segment[0]);
    return units;
}

/* Returns 1 if the weights and biases in[1] to in[4], apart from those that are NULL, are sharded
 * by hidden units, so that a rank has all gates of its units: S(0), with a segment per gate, all
 * cut alike. */
static int tshi_rule_by_units(const tshi_call *call, int gates) {
    const tsh_layout *first = &call->in[1]->layout;
    for (int i = 1; i < 5; i++) {
        const tsh_tensor *w = call->in[i];
        if (!w) continue;
        if (!tshi_rule_is_sharded(w, 0) || w->layout.segments != gates ||
            !tshi_layout_same_shards(first, &w->layout, w->dim[0], &w->ctx->deal))
            return 0;
        for (int s = 1; s < gates; s++)
            if (w->layout.segment[s].length != w->layout.segment[0].length ||
                w->layout.segment[s].unit != w->layout.segment[0].unit)
                return 0;
    }
    return 1;
}

/* Applies the rule of one layer of an LSTM or GRU in one direction: x (T, B, in) or (B, T, in), two
 * weights and two biases, h0 and c0 (1, B, H). If weights and x are R, all is R. If x is sharded by
 * samples, so are h0, c0 and the output, and the gradients of the weights are P. If the weights are
 * sharded by hidden units, x is R, h0, c0 and the output are S(2), and dx is P. */
static int tshi_rule_recurrent(const tshi_call *call, tshi_output *output) {
    const tshi_rule_recurrent_params *p = (const tshi_rule_recurrent_params *)call->params;
    const tsh_tensor *x = call->in[0], *w = call->in[1];
    const int units = w->layout.kind == TSH_SHARDED;
    const int samples = tshi_rule_is_sharded(x, p->batch);
    tsh_layout state = tsh_replicated(); /* the layout that h0 and c0 must have */
    if (x->layout.kind == TSH_PARTIAL) return tshi_rule_refuse_input(call, "is a partial sum");
    if (x->layout.kind == TSH_SHARDED && (units || !samples))
        return tshi_rule_refuse(call, x, w,
                                "weights that are replicated take an input that is replicated or "
                                "sharded by samples, others a replicated one: tsh_redistribute(x, "
                                "tsh_replicated())");
    for (int i = 1; i < 5; i++)
        if (call->in[i] && (units ? !tshi_rule_by_units(call, p->gates)
                                  : call->in[i]->layout.kind != TSH_REPLICATED))
            return tshi_rule_refuse(call, w, call->in[i],
                                    p->gates == 4
                                        ? "all weights and biases are replicated, or all are "
                                          "sharded by units: tsh_shard_segments(0, 4, unit)"
                                        : "all weights and biases are replicated, or all are "
                                          "sharded by units: tsh_shard_segments(0, 3, unit)");
    if (units) {
        output->layout = state = tshi_rule_units(w);
        output->layout.dim = state.dim = 2;
        output->partial = TSHI_X;
    } else if (samples) {
        state = x->layout;
        state.dim = 1;
        output->partial = 0x1E; /* inputs 1 to 4: weights and biases */
    }
    for (int i = 5; i < call->n; i++)
        if (call->in[i] &&
            !tshi_layout_equal(&call->in[i]->layout, &state, call->in[i]->dim, &x->ctx->deal))
            return tshi_rule_refuse(call, x, call->in[i],
                                    "h0 and c0 are replicated, or sharded as the last h is: "
                                    "tsh_redistribute(h0, tsh_replicated())");
    return 1;
}

/* -- convolutions: their layout rule ---------------------------------------- */

/* What the rule of convolutions depends on. A convolution's weight is (out, in / groups, ..), that
 * of a transposed one (in, out / groups, ..). */
typedef struct tshi_rule_channels {
    int transposed; /* 1: a transposed convolution */
    int64_t groups;
} tshi_rule_channels;

/* Returns 1 if w is sharded along its input channels: the output is a sum over ranks. */
static int tshi_rule_sums_channels(const tsh_tensor *w, const tshi_rule_channels *how) {
    return how->groups == 1 && tshi_rule_is_sharded(w, how->transposed ? 0 : 1);
}

/* For a convolution with groups, whose weight w is S(0): sets *layout to that of a tensor (N,
 * groups * per, ..) of which each rank has the channels of the groups whose rows of w it holds.
 * Returns 0 if the rows of one group lie on two ranks. */
static int tshi_rule_group_cut(const tsh_tensor *w, int64_t groups, int64_t per,
                               tsh_layout *layout) {
    const int64_t rows = w->dim[0] / groups, unit = w->layout.segment[0].unit;
    /* number of groups whose rows of w make up a unit of its layout */
    const int64_t whole = rows > 0 && unit % rows == 0 ? unit / rows : 1;
    const tshi_deal *deal = &w->ctx->deal;
    const tsh_layout cut = tsh_shard_units(0, whole);
    *layout = tsh_shard_units(1, whole * (per > 0 ? per : 1));
    for (int r = 0; r < deal->ranks; r++)
        if (w->layout.segments != 1 || tshi_layout_own(&cut, groups, deal, r, NULL) * rows !=
                                           tshi_layout_own(&w->layout, w->dim[0], deal, r, NULL))
            return 0;
    return 1;
}

/* Returns 1 if each rank needs only some of x's channels for its shard of w; then *layout is set to
 * the layout of an x that is cut in this way, S(1). */
static int tshi_rule_takes_channels(const tsh_tensor *x, const tsh_tensor *w,
                                    const tshi_rule_channels *how, tsh_layout *layout) {
    if (w->layout.kind != TSH_SHARDED) return 0;
    if (how->groups > 1)
        return w->layout.dim == 0 &&
               tshi_rule_group_cut(w, how->groups, x->dim[1] / how->groups, layout) &&
               tshi_layout_resolve(layout, x->ndim, x->dim);
    *layout = w->layout;
    layout->dim = 1;
    return tshi_rule_sums_channels(w, how);
}

/* Returns why the layouts of x and w do not fit, as the end of a sentence; NULL: they fit. column
 * 1: w is sharded by output channels; takes 1: w is sharded in such a way that x must have the
 * layout *layout (tshi_rule_takes_channels). */
static const char *tshi_rule_conv_flaw(const tshi_call *call, int column, int takes,
                                       const tsh_layout *layout) {
    const tsh_tensor *x = call->in[0], *w = call->in[1];
    const int cut = x->layout.kind == TSH_SHARDED;
    if (w->layout.kind == TSH_PARTIAL)
        return "complete the weight first: tsh_redistribute(w, tsh_replicated())";
    if (cut && x->layout.dim > 1)
        return "the kernel slides along a sharded dimension; gather the input first: "
               "tsh_redistribute(x, tsh_replicated())";
    if (w->layout.kind == TSH_SHARDED && !column && !takes)
        return "a weight is sharded along its output or its input channels or, with groups, along "
               "dimension 0 in whole groups: tsh_redistribute(w, tsh_replicated())";
    if (column && x->layout.kind != TSH_REPLICATED)
        return "a column-parallel weight takes a replicated input: "
               "tsh_redistribute(x, tsh_replicated())";
    if (takes && !(cut && x->layout.dim == 1 &&
                   tshi_layout_same_shards(&x->layout, layout, x->dim[1], &x->ctx->deal)))
        return "such a weight takes an input that is replicated, or whose channels are sharded "
               "like the weight's: tsh_redistribute(x, tsh_replicated())";
    if (!takes && cut && x->layout.dim == 1)
        return "sharded channels want a weight that is sharded along them, or gather the input: "
               "tsh_redistribute(x, tsh_replicated())";
    if (x->layout.kind == TSH_PARTIAL && call->in[2])
        return "the bias would be added once per rank; complete the input first: "
               "tsh_redistribute(x, tsh_replicated())";
    return NULL;
}

/* Applies the rule of convolutions. Shapes: x and y (N, channels, ..), bias (out). C_in and C_out
 * are the weight's dimensions of input and output channels.
 * W R: y has the layout of x, which is R, S(0), or P without bias. If x is not R, dW and db are P.
 * W S(C_out), column-parallel: x is R, y S(1), dx P.
 * W S(C_in), row-parallel: x is S(1); y is all-reduced to R.
 * Groups, and W S(0) with whole groups on each rank: x and y are S(1), cut by groups like W. */
static int tshi_rule_conv(const tshi_call *call, tshi_output *output) {
    const tshi_rule_channels *how = (const tshi_rule_channels *)call->params;
    const tsh_tensor *x = call->in[0], *w = call->in[1], *b = call->in[2];
    const int column = how->groups == 1 && tshi_rule_is_sharded(w, how->transposed ? 1 : 0);
    tsh_layout layout, bias = tsh_replicated();
    const int takes = tshi_rule_takes_channels(x, w, how, &layout);
    const char *flaw = tshi_rule_conv_flaw(call, column, takes, &layout);
    const int64_t outs = output->shape.dim[1]; /* channels of y */
    if (flaw) return tshi_rule_refuse(call, x, w, flaw);
    if (column) { /* each rank computes some output channels */
        output->layout = w->layout;
        output->layout.dim = 1;
        output->partial = TSHI_X;
    } else if (tshi_rule_sums_channels(w, how)) { /* each rank sums over some input channels */
        output->layout = tsh_replicated();
    } else if (takes) { /* each rank computes some groups */
        (void)tshi_rule_group_cut(w, how->groups, outs / how->groups, &output->layout);
    } else if (x->layout.kind != TSH_REPLICATED) { /* each rank has some images, or x is P */
        output->partial = TSHI_WEIGHT | TSHI_BIAS;
    }
    if (output->layout.kind == TSH_SHARDED && output->layout.dim == 1) {
        bias = output->layout;
        bias.dim = 0;
        (void)tshi_layout_resolve(&bias, 1, &outs);
    }
    return !b || tshi_layout_equal(&b->layout, &bias, b->dim, &x->ctx->deal) ||
           tshi_rule_refuse(call, w, b,
                            "the bias is sharded like the output's channels, or replicated if "
                            "these are");
}

/* Applies the rule of pools and of interpolation, which work along all dimensions after the first
 * two: the output has the layout of x, which is R, S(0), S(1) or, if the op is linear (*params is
 * 1), P. */
static int tshi_rule_pool(const tshi_call *call, tshi_output *output) {
    const tsh_tensor *x = call->in[0];
    (void)output;
    if (x->layout.kind == TSH_PARTIAL && !*(const int *)call->params)
        return tshi_rule_refuse_input(call, "is a partial sum, and the op is not linear");
    return x->layout.kind != TSH_SHARDED || x->layout.dim < 2 ||
           tshi_rule_refuse_input(call, "is sharded along a dimension that the op works along");
}
