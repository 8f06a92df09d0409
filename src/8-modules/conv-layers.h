/* ========================================================================== */
/* >>conv-layers                                MARK: - conv-layers (private) */
/* Convolutions as layers, and the layouts of their weights under a style.    */
/* Needs: >>nn.                                                               */
/* ========================================================================== */

/* The struct of a convolution layer, to which module->user points. */
typedef struct tshi_conv_layer {
    tsh_tensor *(*op)(tsh_tensor *x, tsh_tensor *weight, tsh_tensor *bias,
                      const tsh_conv_options *options);
    tsh_conv_options options;
    int transposed;
} tshi_conv_layer;

/* Forward of a convolution: x (N, in, ..) -> (N, out, ..). */
static tsh_tensor *tshi_conv_layer_forward(tsh_module *module, tsh_tensor **in, int n) {
    const tshi_conv_layer *layer = (const tshi_conv_layer *)module->user;
    tsh_tensor *x = tshi_nn_input(module, in, n), *w = module->param[0];
    const tsh_layout *cut = w ? &w->layout : NULL;
    if (!x) return NULL;
    if (cut->kind == TSH_SHARDED && cut->dim == (layer->transposed ? 1 : 0) &&
        layer->options.groups <= 1 && module->input_layout)
        x = tsh_redistribute(x, tsh_replicated()); /* column-parallel: takes all channels */
    return x ? layer->op(x, w, module->param[1], &layer->options) : NULL;
}

/* Sets the layouts of a convolution (tshi_kind.layouts): COLWISE shards the weight's output
 * channels and the bias, or whole groups; ROWWISE shards the input channels. A layer with groups
 * stays R under ROWWISE: its input channels are in several groups. */
static void tshi_conv_layer_layouts(const tsh_module *module, const tsh_plan_rule *rule,
                                    tsh_layout *layouts) {
    const tshi_conv_layer *layer = (const tshi_conv_layer *)module->user;
    const int64_t groups = layer->options.groups > 1 ? layer->options.groups : 1;
    const tsh_tensor *w = module->param[0];
    tsh_plan_rule whole = *rule; /* the rule, with whole groups as units if there are groups */
    if (rule->style != TSH_COLWISE && (rule->style != TSH_ROWWISE || groups > 1)) return;
    if (groups > 1 && !rule->cut && rule->unit <= 1) whole.unit = w ? w->dim[0] / groups : 1;
    layouts[0] = tshi_nn_shard(&whole, 0);
    if (rule->style == TSH_ROWWISE) {
        layouts[0].dim = layer->transposed ? 0 : 1;
        return; /* the bias is R: it is added after the output is reduced */
    }
    if (groups > 1 && layer->transposed && w) /* the bias has out / groups channels per group */
        whole.unit = whole.unit / (w->dim[0] / groups) * w->dim[1];
    layouts[1] = tshi_nn_shard(&whole, 0);
    if (groups == 1 && layer->transposed) layouts[0].dim = 1;
}

enum { TSHI_CONV_LAYER = 1 << TSH_PLAIN | 1 << TSH_COLWISE | 1 << TSH_ROWWISE };

/* Returns the weight's shape: (out, in / groups, kernel) or, if transposed is 1, (in, out / groups,
 * kernel). */
static tsh_shape tshi_conv_layer_shape(const tsh_conv_desc *desc, int dims, int transposed,
                                       int64_t groups) {
    tsh_shape shape = tsh_shape2(transposed ? desc->in : desc->out,
                                 (transposed ? desc->out : desc->in) / groups);
    for (int d = 0; d < dims; d++) shape.dim[shape.ndim++] = desc->kernel[d];
    return shape;
}

/* Returns 0 and an error if the numbers of channels, groups and elements of the kernel are not
 * possible. */
static int tshi_conv_layer_check(const tsh_module *module, const tsh_conv_desc *desc, int dims) {
    const int64_t groups = desc->groups ? desc->groups : 1;
    int ok = groups > 0 && desc->in >= 0 && desc->out >= 0 && desc->in % groups == 0 &&
             desc->out % groups == 0 && desc->unit >= 0;
    for (int d = 0; d < dims; d++) ok = ok && desc->kernel[d] > 0;
    if (ok && desc->style == TSH_ROWWISE && groups > 1)
        return tshi_error_zero(module->ctx, TSH_ERR_ARGUMENT,
                               "tsh_add_%s: \"%s\" has %lld groups and cannot be ROWWISE; COLWISE "
                               "shards whole groups",
                               module->kind->name, module->path, (long long)groups);
    if (ok) return 1;
    return tshi_error_zero(module->ctx, TSH_ERR_ARGUMENT,
                           "tsh_add_%s: \"%s\" has %lld channels in, %lld out, %lld groups, which "
                           "are to divide both, a kernel of %lld, %lld and units of %lld",
                           module->kind->name, module->path, (long long)desc->in,
                           (long long)desc->out, (long long)groups, (long long)desc->kernel[0],
                           dims > 1 ? (long long)desc->kernel[1] : 1ll, (long long)desc->unit);
}

/* Adds the parameters of a convolution and shards them. By default, weight and bias are uniform in
 * [-1 / sqrt(fan_in), 1 / sqrt(fan_in)), as in torch. */
static tsh_module *tshi_conv_layer_params(tsh_module *module, const tsh_conv_desc *desc, int dims) {
    const tshi_conv_layer *layer = (const tshi_conv_layer *)module->user;
    const int64_t groups = desc->groups ? desc->groups : 1;
    const tsh_shape shape = tshi_conv_layer_shape(desc, dims, layer->transposed, groups);
    int64_t fan = shape.dim[1]; /* channels per group times elements of the kernel */
    double bound;               /* the default bias is uniform in [-bound, bound) */
    tsh_plan_rule rule = tshi_parallel_rule(desc->style);
    for (int d = 2; d < shape.ndim; d++)
        fan = fan > INT64_MAX / shape.dim[d] ? INT64_MAX : fan * shape.dim[d];
    bound = fan > 0 ? 1 / sqrt((double)fan) : 0;
    tshi_module_param(module, 0, "weight", desc->dtype, shape,
                      tshi_nn_init(desc->weight_init, TSH_INIT_KAIMING_UNIFORM, sqrt(5.0), 0), fan);
    if (desc->bias != TSH_NO)
        tshi_module_param(module, 1, "bias", desc->dtype, tsh_shape1(desc->out),
                          tshi_nn_init(desc->bias_init, TSH_INIT_UNIFORM, -bound, bound), fan);
    if (module->ctx->error.code != TSH_OK) return tshi_module_finish(module);
    rule.unit = desc->unit;
    rule.gather_output = desc->gather_output;
    rule.input = desc->input;
    rule.output = desc->output;
    (void)tsh_parallelize(module, &rule, 1);
    return tshi_module_finish(module);
}

/* Adds a convolution layer with `dims` spatial dimensions. as: its op, and whether that is
 * transposed. */
static tsh_module *tshi_conv_layer_add(tsh_module *parent, const char *name, const tshi_kind *kind,
                                       const tsh_conv_desc *desc, int dims,
                                       const tshi_conv_layer *as) {
    tsh_module *module = tshi_nn_add(parent, name, kind, desc);
    tshi_conv_layer *layer;
    if (!module) return NULL;
    layer = (tshi_conv_layer *)tshi_mem_arena_alloc(module->ctx, &module->ctx->books,
                                                    sizeof *layer);
    if (!layer || !tshi_conv_layer_check(module, desc, dims)) return tshi_module_finish(module);
    *layer = *as;
    for (int d = 0; d < dims; d++) {
        layer->options.stride[d] = desc->stride[d];
        layer->options.padding[d] = desc->padding[d];
        layer->options.output_padding[d] = desc->output_padding[d];
        layer->options.dilation[d] = desc->dilation[d];
    }
    layer->options.groups = desc->groups;
    module->user = layer;
    return tshi_conv_layer_params(module, desc, dims);
}

/* Defines tsh_add_<kind_>, a layer of the op of that name. */
#define TSHI_CONV_LAYER_OF(kind_, dims, transposed)                                                \
    TSH_API TSHI_COLD tsh_module *tsh_add_##kind_(tsh_module *parent, const char *name,            \
                                                  const tsh_conv_desc *desc) {                     \
        static const tshi_kind kind = {#kind_, tshi_conv_layer_forward, TSHI_CONV_LAYER,           \
                                       tshi_conv_layer_layouts};                                   \
        static const tshi_conv_layer as = {                                                        \
            tsh_##kind_, {{0, 0}, {0, 0}, {0, 0}, {0, 0}, 0}, transposed};                         \
        return tshi_conv_layer_add(parent, name, &kind, desc, dims, &as);                          \
    }
TSHI_CONV_LAYER_OF(conv1d, 1, 0)
TSHI_CONV_LAYER_OF(conv2d, 2, 0)
TSHI_CONV_LAYER_OF(conv_transpose1d, 1, 1)
TSHI_CONV_LAYER_OF(conv_transpose2d, 2, 1)
#undef TSHI_CONV_LAYER_OF
