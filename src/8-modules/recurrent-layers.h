/* ========================================================================== */
/* >>recurrent-layers                      MARK: - recurrent-layers (private) */
/* LSTM and GRU as layers.                                                    */
/* Needs: >>op-lstm >>nn.                                                     */
/* ========================================================================== */

/* A layer's parameters are children of kind "param", in PyTorch's order: of each layer and
 * direction weight_ih, weight_hh, bias_ih, bias_hh. module->user is a tshi_recurrent_layer. */
typedef struct tshi_recurrent_layer {
    tsh_recurrent_desc desc; /* the caller's, but .layers is at least 1 and .owner the module */
    int count;               /* number of parameters */
    tsh_tensor **weights;    /* the parameters, `count` entries, set anew by each forward */
    tsh_tensor **h, **c;     /* where the forward in progress outputs the last h and c, or NULL */
} tshi_recurrent_layer;

/* Runs an LSTM (lstm 1) or a GRU on the n tensors in: x, then h0 and, for an LSTM, c0, if they are
 * given. */
static tsh_tensor *tshi_recurrent_layer_run(tsh_module *module, tsh_tensor **in, int n, int lstm) {
    tshi_recurrent_layer *layer = (tshi_recurrent_layer *)module->user;
    tsh_recurrent_desc desc = layer->desc;
    tsh_module *child = module->first;
    if (n > 2 + lstm || !in[0])
        return tshi_error_null(
            module->ctx, TSH_ERR_ARGUMENT, "tsh_forward: takes %s, not %d inputs%s",
            lstm ? "x, h0 and c0" : "x and h0", n, in[0] ? "" : ", x being NULL");
    for (int i = 0; i < layer->count && child; i++, child = child->next)
        layer->weights[i] = child->param[0]; /* read anew: tsh_tie may have replaced it */
    if (module->evaluating) desc.dropout = 0;
    return lstm ? tsh_lstm(in[0], layer->weights, layer->count, n > 1 ? in[1] : NULL,
                           n > 2 ? in[2] : NULL, &desc, layer->h, layer->c)
                : tsh_gru(in[0], layer->weights, layer->count, n > 1 ? in[1] : NULL, &desc,
                          layer->h);
}

/* Forward of an LSTM layer. */
static tsh_tensor *tshi_recurrent_layer_lstm(tsh_module *module, tsh_tensor **in, int n) {
    return tshi_recurrent_layer_run(module, in, n, 1);
}

/* Forward of a GRU layer. */
static tsh_tensor *tshi_recurrent_layer_gru(tsh_module *module, tsh_tensor **in, int n) {
    return tshi_recurrent_layer_run(module, in, n, 0);
}

static const tshi_kind tshi_recurrent_layer_kinds[2] = {
    {"lstm", tshi_recurrent_layer_lstm, 0, NULL}, {"gru", tshi_recurrent_layer_gru, 0, NULL}};

/* Adds the parameter "<what>_l<number>", with back 1 "<what>_l<number>_reverse", whose dimension 0
 * has the rows of the layer's gates. */
static void tshi_recurrent_layer_param(tsh_module *module, const tsh_recurrent_desc *desc,
                                       int gates, const char *what, int number, int back,
                                       tsh_shape shape) {
    const double bound = 1 / sqrt((double)desc->hidden);
    const tsh_layout cut = tsh_shard_segments(0, gates, 1);
    tsh_param_desc param;
    char name[64];
    memset(&param, 0, sizeof param);
    param.init = tshi_init_make(TSH_INIT_UNIFORM, -bound, bound);
    param.dtype = desc->dtype;
    if (desc->sharded == TSH_YES) param.layout = &cut;
    (void)snprintf(name, sizeof name, "%s_l%d%s", what, number, back ? "_reverse" : "");
    (void)tsh_add_param(module, tshi_module_text(module->ctx, name, ""), shape, &param);
}

/* Adds the weights and biases of all layers and directions. */
static void tshi_recurrent_layer_params(tsh_module *module, const tsh_recurrent_desc *desc,
                                        int gates) {
    const int directions = 1 + desc->bidirectional;
    const int64_t rows = gates * desc->hidden;
    for (int i = 0; i < desc->layers * directions && module->ctx->error.code == TSH_OK; i++) {
        const int number = i / directions, back = i % directions;
        const int64_t in = number ? directions * desc->hidden : desc->in;
        tshi_recurrent_layer_param(module, desc, gates, "weight_ih", number, back,
                                   tsh_shape2(rows, in));
        tshi_recurrent_layer_param(module, desc, gates, "weight_hh", number, back,
                                   tsh_shape2(rows, desc->hidden));
        if (desc->bias == TSH_NO) continue;
        tshi_recurrent_layer_param(module, desc, gates, "bias_ih", number, back, tsh_shape1(rows));
        tshi_recurrent_layer_param(module, desc, gates, "bias_hh", number, back, tsh_shape1(rows));
    }
}

/* Implements tsh_add_lstm (lstm 1) and tsh_add_gru (lstm 0). */
static tsh_module *tshi_recurrent_layer_add(tsh_module *parent, const char *name,
                                            const tsh_recurrent_desc *desc, int lstm) {
    enum { MOST = 1 << 16 }; /* max number of layers */
    tsh_module *module = tshi_nn_add(parent, name, &tshi_recurrent_layer_kinds[!lstm], desc);
    tshi_recurrent_layer *layer;
    tsh_ctx *ctx = module ? module->ctx : NULL;
    if (!module) return NULL;
    if (desc->in < 1 || desc->hidden < 1 || desc->hidden > INT64_MAX / 8 || desc->layers < 0 ||
        desc->layers > MOST)
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT,
                       "tsh_add_%s: \"%s\" has %lld features, %lld units and %d layers; takes at "
                       "least one of each",
                       module->kind->name, module->path, (long long)desc->in,
                       (long long)desc->hidden, desc->layers);
    if (ctx->error.code != TSH_OK) return tshi_module_finish(module);
    layer = (tshi_recurrent_layer *)tshi_mem_arena_alloc(ctx, &ctx->books, sizeof *layer);
    if (!layer) return tshi_module_finish(module);
    layer->desc = *desc;
    if (!layer->desc.layers) layer->desc.layers = 1;
    layer->desc.bidirectional = desc->bidirectional != 0;
    layer->desc.owner = module;
    layer->count = layer->desc.layers * (1 + layer->desc.bidirectional) *
                   (desc->bias == TSH_NO ? 2 : 4);
    layer->weights = (tsh_tensor **)tshi_mem_arena_alloc(
        ctx, &ctx->books, (size_t)layer->count * sizeof *layer->weights);
    module->user = layer;
    if (layer->weights)
        tshi_recurrent_layer_params(module, &layer->desc, tshi_cell_kinds[!lstm].gates);
    while (ctx->error.code != TSH_OK && module->first) (void)tshi_module_finish(module->first);
    return tshi_module_finish(module);
}

TSH_API TSHI_COLD tsh_module *tsh_add_lstm(tsh_module *parent, const char *name,
                                           const tsh_recurrent_desc *desc) {
    return tshi_recurrent_layer_add(parent, name, desc, 1);
}

TSH_API TSHI_COLD tsh_module *tsh_add_gru(tsh_module *parent, const char *name,
                                          const tsh_recurrent_desc *desc) {
    return tshi_recurrent_layer_add(parent, name, desc, 0);
}

/* Runs a layer that was made by tsh_add_lstm or, with lstm 0, by tsh_add_gru; h and c: where to
 * output the last states. in: x, h0 and c0. */
static tsh_tensor *tshi_recurrent_layer_call(tsh_module *module, tsh_tensor **in, int lstm,
                                             tsh_tensor **h, tsh_tensor **c) {
    const char *name = lstm ? "tsh_lstm_forward" : "tsh_gru_forward";
    tsh_tensor *y;
    if (h) *h = NULL;
    if (c) *c = NULL;
    if (!module && in[0])
        return tshi_error_null(in[0]->ctx, TSH_ERR_ARGUMENT, "%s: the module is NULL", name);
    if (!module || module->ctx->error.code != TSH_OK) return NULL;
    if (module->kind != &tshi_recurrent_layer_kinds[!lstm])
        return tshi_error_null(module->ctx, TSH_ERR_ARGUMENT, "%s: \"%s\" is of kind \"%s\"", name,
                               module->path, module->kind->name);
    if (module->checkpoint && (h || c))
        return tshi_error_null(module->ctx, TSH_ERR_STATE,
                               "%s: \"%s\" is checkpointed, and keeps its first output only; call "
                               "tsh_forward, or tsh_checkpoint(module, 0)",
                               name, module->path);
    tshi_recurrent_layer *layer = (tshi_recurrent_layer *)module->user;
    layer->h = h;
    layer->c = c;
    y = tshi_module_call(module, in, 2 + lstm);
    layer->h = layer->c = NULL;
    return y;
}

TSH_API tsh_tensor *tsh_lstm_forward(tsh_module *module, tsh_tensor *x, tsh_tensor *h0,
                                     tsh_tensor *c0, tsh_tensor **h, tsh_tensor **c) {
    tsh_tensor *in[] = {x, h0, c0};
    return tshi_recurrent_layer_call(module, in, 1, h, c);
}

TSH_API tsh_tensor *tsh_gru_forward(tsh_module *module, tsh_tensor *x, tsh_tensor *h0,
                                    tsh_tensor **h) {
    tsh_tensor *in[] = {x, h0};
    return tshi_recurrent_layer_call(module, in, 0, h, NULL);
}
