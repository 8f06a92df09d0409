/* ========================================================================== */
/* >>op-conv                                        MARK: - op-conv (private) */
/* Convolutions, plain and transposed, in one and two dimensions.             */
/* Needs: >>rule-net >>redistribute >>conv-weight >>conv-depth.               */
/* ========================================================================== */

/* Computes the output of a convolution with sizes c. All arrays are dense; bias may be NULL. */
static void tshi_conv_output(tsh_ctx *ctx, const tshi_conv *c, const tsh_real *x,
                             const tsh_real *weight, const tsh_real *bias, tsh_real *y) {
    if (tshi_conv_is_depthwise(c))
        tshi_conv_depth_apply(ctx, c, x, weight, bias, y, c->transposed, 0);
    else if (c->transposed)
        tshi_conv_scatter(ctx, c, x, weight, bias, y, 0);
    else
        tshi_conv_gather(ctx, c, x, weight, bias, y, 0);
}

/* Computes the gradient of a convolution's input from g, that of its output. */
static void tshi_conv_input_grad(tsh_ctx *ctx, const tshi_conv *c, const tsh_real *g,
                                 const tsh_real *weight, const tshi_dest *dest) {
    if (tshi_conv_is_depthwise(c))
        tshi_conv_depth_apply(ctx, c, g, weight, NULL, dest->data, !c->transposed, dest->add);
    else if (c->transposed)
        tshi_conv_gather(ctx, c, g, weight, NULL, dest->data, dest->add);
    else
        tshi_conv_scatter(ctx, c, g, weight, NULL, dest->data, dest->add);
}

/* Computes the gradient of the weight from the input x and the gradient of the output, g. */
static void tshi_conv_weight_grad(tsh_ctx *ctx, const tshi_conv *c, const tsh_real *x,
                                  const tsh_real *g, const tshi_dest *dest) {
    const tsh_real *image = c->transposed ? g : x, *map = c->transposed ? x : g;
    if (tshi_conv_is_depthwise(c))
        tshi_conv_depth_weight(ctx, c, image, map, dest);
    else
        tshi_conv_weight(ctx, c, image, map, dest);
}

/* Adds an operand to a loop over the elements of a tensor (N, C, ..): for each element, the one of
 * its channel in `values`, which are `step` apart. As first operand, the result, it sums up what
 * the loop adds to each channel. */
static void tshi_conv_channels(tshi_loop *loop, const tsh_real *values, int64_t step) {
    const int n = loop->n++;
    memset(loop->stride[n], 0, sizeof loop->stride[n]);
    loop->stride[n][1] = step;
    loop->x[n] = tshi_kernel_reals(values, 0);
}

/* Backward: computes the gradients of x, weight and bias; skips those that are not needed. */
static void tshi_conv_backward(tshi_node *node) {
    const tshi_conv *c = (const tshi_conv *)node->params;
    tsh_tensor *b = node->in[2], *out = node->out;
    tsh_ctx *ctx = out->ctx;
    const tsh_real *g = tshi_tape_grad(node);
    int64_t stride[TSH_MAX_DIMS]; /* not used: x and weight are dense */
    tshi_block *scratch[2];
    const tsh_real *x = tshi_tape_saved_reals(node, 0, stride, &scratch[0]);
    const tsh_real *w = tshi_tape_saved_reals(node, 1, stride, &scratch[1]);
    tshi_dest dest;
    if (x && w && tshi_tape_dest(node, 0, &dest)) tshi_conv_input_grad(ctx, c, g, w, &dest);
    tshi_tape_input_done(node, 0); /* dX is all-reduced while dW is computed */
    if (x && w && ctx->error.code == TSH_OK && tshi_tape_dest(node, 1, &dest))
        tshi_conv_weight_grad(ctx, c, x, g, &dest);
    if (b && tshi_tape_dest_zeroed(node, 2, &dest)) { /* db: the sum of dY over all but channels */
        tshi_loop loop;
        tshi_kernel_space(&loop, out);
        tshi_conv_channels(&loop, dest.data, dest.stride[0]);
        tshi_kernel_add_operand(&loop, out, g, out->stride, TSH_REAL);
        tshi_kernel_run(&loop, tshi_kernel_add[ctx->isa], NULL);
    }
    tshi_mem_release(ctx, scratch[1]);
    tshi_mem_release(ctx, scratch[0]);
}

/* Computes the output of a convolution. The product adds the bias, unless each rank's product is a
 * partial sum: then this is rounded to the output's dtype and summed over ranks, and the bias is
 * added once. */
static void tshi_conv_forward(tsh_tensor *const *in, tsh_tensor *out, const tshi_conv *c) {
    tsh_ctx *ctx = out->ctx;
    tshi_block *scratch[4] = {NULL, NULL, NULL, NULL};
    const tsh_real *x = tshi_kernel_packed_reals(in[0], &scratch[0]);
    const tsh_real *w = tshi_kernel_packed_reals(in[1], &scratch[1]);
    const tsh_real *b = in[2] ? tshi_kernel_packed_reals(in[2], &scratch[2]) : NULL;
    tsh_real *y = tshi_kernel_output(out, &scratch[3]);
    if (x && w && y && ctx->error.code == TSH_OK)
        tshi_conv_output(ctx, c, x, w, c->reduce ? NULL : b, y);
    if (y) tshi_kernel_output_done(out, scratch[3]);
    if (ctx->error.code == TSH_OK && c->reduce)
        (void)tshi_wire_allreduce(ctx, TSHI_WIRE_ACTIVATION, TSH_SUM, tshi_tensor_at(out),
                                  tsh_local_numel(out), out->dtype,
                                  "all-reduce of a row-parallel convolution");
    if (ctx->error.code == TSH_OK && c->reduce && b) {
        tshi_loop loop;
        tshi_kernel_space(&loop, out);
        tshi_kernel_tensor(&loop, out);
        tshi_conv_channels(&loop, b, 1);
        tshi_kernel_run(&loop, tshi_kernel_add[ctx->isa], NULL);
    }
    for (int i = 2; i >= 0; i--) tshi_mem_release(ctx, scratch[i]);
}

/* Returns the input that this rank convolves, dense: x, or, if x is replicated and the weight is
 * sharded along the input channels, this rank's channels of x. NULL: an error. */
static tsh_tensor *tshi_conv_input(const char *op, tsh_tensor *x, const tsh_tensor *w,
                                   const tshi_rule_channels *how) {
    tsh_layout layout;
    if (x->layout.kind == TSH_REPLICATED && tshi_rule_takes_channels(x, w, how, &layout))
        x = tsh_redistribute(x, layout);
    return !x || tshi_tensor_is_dense(x) ? x : tshi_op_copy(op, x);
}

/* Computes a convolution, plain or transposed, in 1 or 2 dimensions (dims), and records it. */
static tsh_tensor *tshi_conv_call(const tshi_op *op, tsh_tensor *x, tsh_tensor *w, tsh_tensor *b,
                                  const tsh_conv_options *options, int dims, int transposed) {
    static const tsh_conv_options usual = {{0, 0}, {0, 0}, {0, 0}, {0, 0}, 0};
    tsh_tensor *in[3] = {x, w, b}, *out;
    tsh_ctx *ctx = tshi_tensor_check_floating(op->name, op->inputs, in, b ? 3 : 2);
    tshi_rule_channels how = {transposed, 1};
    tshi_output output;
    tshi_conv c;
    if (!ctx || !tshi_conv_sizes(op->name, in, dims, options ? options : &usual, transposed, &c))
        return NULL;
    how.groups = c.groups;
    if (!(in[0] = x = tshi_conv_input(op->name, x, w, &how))) return NULL;
    if (!tshi_tensor_is_dense(w)) in[1] = w = tshi_op_copy(op->name, w);
    if (!w) return NULL;
    output.shape = tsh_shape_of(x);
    output.shape.dim[1] = transposed ? w->dim[1] * c.groups : w->dim[0];
    for (int d = 2 - dims; d < 2; d++)
        output.shape.dim[d + dims] = transposed ? c.image[d] : c.map[d];
    if (!tshi_rule_run(op, in, 3, &how, &output)) return NULL;
    c.reduce = ctx->tp.size > 1 && tshi_rule_sums_channels(w, &how);
    tshi_conv_local(&c, x, w);
    out = tshi_tensor_out(ctx, op->name, x->dtype, &output.shape, &output.layout);
    if (!out) return NULL;
    tshi_conv_forward(in, out, &c);
    if (ctx->error.code != TSH_OK) return NULL;
    tshi_op_record(op, out, in, 3, output.partial, &c, sizeof c, NULL);
    return out;
}

/* Defines a public function tsh_<name>, a convolution, and its op. */
#define TSHI_CONV(name, dims, transposed)                                                          \
    static const tshi_op tshi_##name##_op = {"tsh_" #name,         "x weight bias",                \
                                             tshi_rule_conv,       tshi_conv_backward,             \
                                             TSHI_X | TSHI_WEIGHT, 0};                             \
    TSH_API tsh_tensor *tsh_##name(tsh_tensor *x, tsh_tensor *weight, tsh_tensor *bias,            \
                                   const tsh_conv_options *options) {                              \
        return tshi_conv_call(&tshi_##name##_op, x, weight, bias, options, dims, transposed);      \
    }
TSHI_CONV(conv1d, 1, 0)
TSHI_CONV(conv2d, 2, 0)
TSHI_CONV(conv_transpose1d, 1, 1)
TSHI_CONV(conv_transpose2d, 2, 1)
#undef TSHI_CONV
