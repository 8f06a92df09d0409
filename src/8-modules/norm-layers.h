/* ========================================================================== */
/* >>norm-layers                                MARK: - norm-layers (private) */
/* Batch norm, group norm and instance norm as layers.                        */
/* Needs: >>op-batch-norm >>op-group-norm >>nn.                               */
/* ========================================================================== */

/* Indices into module->param of a batch norm's parameters and buffers; group and instance norms
 * have only the first two. BATCHES is the scalar num_batches_tracked. */
enum {
    TSHI_NORM_LAYER_WEIGHT,
    TSHI_NORM_LAYER_BIAS,
    TSHI_NORM_LAYER_MEAN,
    TSHI_NORM_LAYER_VARIANCE,
    TSHI_NORM_LAYER_BATCHES
};

/* The styles that these layers support. */
enum { TSHI_NORM_LAYER_STYLES = TSHI_NN_SEQUENCE | 1 << TSH_COLWISE };

/* Adds weight (dim) of ones and bias (dim) of zeros. */
static void tshi_norm_layer_affine(tsh_module *module, int64_t dim, tsh_dtype dtype) {
    tshi_module_param(module, TSHI_NORM_LAYER_WEIGHT, "weight", dtype, tsh_shape1(dim),
                      tshi_init_make(TSH_INIT_ONES, 0, 0), 0);
    tshi_module_param(module, TSHI_NORM_LAYER_BIAS, "bias", dtype, tsh_shape1(dim),
                      tshi_init_make(TSH_INIT_ZEROS, 0, 0), 0);
}

/* -- batch norm --------------------------------------------------------------- */

/* Adds a buffer, whose values are all 0 or all 1 at first (`init`). */
static void tshi_norm_layer_buffer(tsh_module *module, int slot, const char *name, tsh_dtype dtype,
                                   tsh_shape shape, tsh_init_kind init) {
    const int integers = dtype == TSH_I64;
    tsh_tensor *t;
    tshi_module_param(module, slot, name, integers ? TSH_DTYPE_DEFAULT : dtype, shape,
                      tshi_init_make(init, 0, 0), 0);
    t = module->param[slot];
    if (!t) return;
    if (integers) t->dtype = dtype;
    t->requires_grad = 0;
    t->flags = (t->flags & ~(unsigned)TSHI_LEAF) | TSHI_BUFFER;
}

/* Sets the layouts of a batch norm (tshi_kind.layouts): COLWISE shards the parameters and buffers
 * that have a number per channel. */
static void tshi_norm_layer_batch_layouts(const tsh_module *module, const tsh_plan_rule *rule,
                                          tsh_layout *layouts) {
    (void)module;
    for (int i = 0; i < TSHI_NORM_LAYER_BATCHES && rule->style == TSH_COLWISE; i++)
        layouts[i] = tshi_nn_shard(rule, 0);
}

/* Adds 1 to `batches`, the number of forwards in training mode, and returns it. A recomputation by
 * a checkpoint is not counted again. */
static int64_t tshi_norm_layer_count(tsh_tensor *batches) {
    int64_t *count;
    if (!batches->block && tshi_init_materialize(batches) != TSH_OK) return 1;
    count = (int64_t *)tshi_tensor_at(batches);
    return batches->ctx->tape.replaying ? *count : ++*count;
}

/* Forward of a batch norm: x (N, dim, ..) -> the same shape. */
static tsh_tensor *tshi_norm_layer_batch(tsh_module *module, tsh_tensor **in, int n) {
    const tsh_batch_norm_desc *desc = (const tsh_batch_norm_desc *)module->user;
    tsh_tensor *x = tshi_nn_input(module, in, n), *const *own = module->param;
    tsh_tensor *mean = own[TSHI_NORM_LAYER_MEAN], *variance = own[TSHI_NORM_LAYER_VARIANCE];
    tsh_batch_norm_options options;
    if (!x) return NULL;
    memset(&options, 0, sizeof options);
    options.training = !module->evaluating || !mean;
    options.momentum = desc->momentum;
    options.eps = desc->eps;
    options.over_dp = desc->over_dp;
    if (mean && options.training) {
        const int64_t count = tshi_norm_layer_count(own[TSHI_NORM_LAYER_BATCHES]);
        if (desc->cumulative) options.momentum = 1 / (double)(count > 0 ? count : 1);
    }
    return tsh_batch_norm(x, own[TSHI_NORM_LAYER_WEIGHT], own[TSHI_NORM_LAYER_BIAS], mean, variance,
                          &options);
}

TSH_API TSHI_COLD tsh_module *tsh_add_batch_norm(tsh_module *parent, const char *name,
                                                 const tsh_batch_norm_desc *desc) {
    static const tshi_kind kind = {"batch_norm", tshi_norm_layer_batch, TSHI_NORM_LAYER_STYLES,
                                   tshi_norm_layer_batch_layouts};
    tsh_module *module = tshi_nn_add(parent, name, &kind, desc);
    tsh_batch_norm_desc *kept;
    if (!module) return NULL;
    kept = (tsh_batch_norm_desc *)tshi_mem_arena_alloc(module->ctx, &module->ctx->books,
                                                       sizeof *kept);
    if (kept) *kept = *desc;
    module->user = kept;
    if (desc->affine != TSH_NO) tshi_norm_layer_affine(module, desc->dim, desc->dtype);
    if (desc->running != TSH_NO) {
        const tsh_shape shape = tsh_shape1(desc->dim);
        tshi_norm_layer_buffer(module, TSHI_NORM_LAYER_MEAN, "running_mean", desc->dtype, shape,
                               TSH_INIT_ZEROS);
        tshi_norm_layer_buffer(module, TSHI_NORM_LAYER_VARIANCE, "running_var", desc->dtype, shape,
                               TSH_INIT_ONES);
        tshi_norm_layer_buffer(module, TSHI_NORM_LAYER_BATCHES, "num_batches_tracked", TSH_I64,
                               tsh_shape0(), TSH_INIT_ZEROS);
    }
    return tshi_module_finish(module);
}

/* -- group norm, instance norm ---------------------------------------------- */

/* The struct of a group norm or instance norm layer. */
typedef struct tshi_group_layer {
    /* tshi_group_norm_op or tshi_group_norm_instance_op */
    const tshi_op *op;
    /* groups: number of groups, for an instance norm dim; dim: number of channels */
    int64_t groups, dim;
    double eps;
} tshi_group_layer;

/* Sets the layouts of a group norm (tshi_kind.layouts): COLWISE shards weight and bias by whole
 * groups, unless the rule has units of its own. */
static void tshi_norm_layer_group_layouts(const tsh_module *module, const tsh_plan_rule *rule,
                                          tsh_layout *layouts) {
    const tshi_group_layer *layer = (const tshi_group_layer *)module->user;
    tsh_plan_rule whole = *rule;
    if (rule->style != TSH_COLWISE) return;
    if (!whole.unit) whole.unit = layer->dim / layer->groups;
    layouts[0] = layouts[1] = tshi_nn_shard(&whole, 0);
}

/* Forward of a group norm or instance norm: x (N, dim, ..) -> the same shape. */
static tsh_tensor *tshi_norm_layer_group(tsh_module *module, tsh_tensor **in, int n) {
    const tshi_group_layer *layer = (const tshi_group_layer *)module->user;
    tsh_tensor *x = tshi_nn_input(module, in, n), *w = module->param[0], *b = module->param[1];
    char text[TSHI_TEXT_SIZE];
    if (!x) return NULL;
    if (x->ndim > 1 && x->dim[1] != layer->dim)
        return tshi_error_null(module->ctx, TSH_ERR_SHAPE,
                               "%s: input %s; the layer takes %lld channels (dimension 1)",
                               layer->op->name, tshi_tensor_text(x, text), (long long)layer->dim);
    return layer->op == &tshi_group_norm_op ? tsh_group_norm(x, layer->groups, w, b, layer->eps)
                                            : tsh_instance_norm(x, w, b, layer->eps);
}

/* Ends the constructor of a group norm or instance norm. affine 1: it has weight and bias. */
static tsh_module *tshi_norm_layer_finish(tsh_module *module, const tshi_op *op, int64_t groups,
                                          int64_t dim, double eps, int affine, tsh_dtype dtype) {
    tshi_group_layer *layer = (tshi_group_layer *)tshi_mem_arena_alloc(
        module->ctx, &module->ctx->books, sizeof *layer);
    if (dim < 1 || groups < 1 || dim % groups)
        (void)tsh_fail(module->ctx, TSH_ERR_ARGUMENT,
                       "tsh_add_%s: \"%s\" has %lld channels in %lld groups; takes groups that "
                       "divide the channels, at least one of each",
                       module->kind->name, module->path, (long long)dim, (long long)groups);
    if (!layer || module->ctx->error.code != TSH_OK) return tshi_module_finish(module);
    layer->op = op;
    layer->groups = groups;
    layer->dim = dim;
    layer->eps = eps;
    module->user = layer;
    if (affine) tshi_norm_layer_affine(module, dim, dtype);
    return tshi_module_finish(module);
}

TSH_API TSHI_COLD tsh_module *tsh_add_group_norm(tsh_module *parent, const char *name,
                                                 const tsh_group_norm_desc *desc) {
    static const tshi_kind kind = {"group_norm", tshi_norm_layer_group, TSHI_NORM_LAYER_STYLES,
                                   tshi_norm_layer_group_layouts};
    tsh_module *module = tshi_nn_add(parent, name, &kind, desc);
    return module ? tshi_norm_layer_finish(module, &tshi_group_norm_op, desc->groups, desc->dim,
                                           desc->eps, desc->affine != TSH_NO, desc->dtype)
                  : NULL;
}

TSH_API TSHI_COLD tsh_module *tsh_add_instance_norm(tsh_module *parent, const char *name,
                                                    const tsh_instance_norm_desc *desc) {
    static const tshi_kind kind = {"instance_norm", tshi_norm_layer_group, TSHI_NORM_LAYER_STYLES,
                                   tshi_norm_layer_group_layouts};
    tsh_module *module = tshi_nn_add(parent, name, &kind, desc);
    return module
               ? tshi_norm_layer_finish(module, &tshi_group_norm_instance_op, desc->dim, desc->dim,
                                        desc->eps, desc->affine == TSH_YES, desc->dtype)
               : NULL;
}
