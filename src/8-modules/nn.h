/* ========================================================================== */
/* >>nn                                                  MARK: - nn (private) */
/* Layers: their forward, and the layouts of their parameters under a style.  */
/* Needs: >>op-dropout >>op-view >>op-linear >>op-embedding >>op-norm         */
/* >>parallel.                                                                */
/* ========================================================================== */

/* To add a layer, write a forward, a function that sets its parameters' layouts under a style, a
 * tshi_kind with both, and a constructor. A style sets nothing but the layouts of the parameters:
 * ops derive from these what they compute, so forward is written once for all styles. */

/* Returns the initialiser that the caller gave or, if that is TSH_INIT_DEFAULT, the layer's own. */
static tsh_init tshi_nn_init(tsh_init given, tsh_init_kind kind, double a, double b) {
    return given.kind == TSH_INIT_DEFAULT ? tshi_init_make(kind, a, b) : given;
}

/* Appends a module of the given kind to parent. Returns NULL and sets an error if desc is NULL or
 * the name cannot be used. */
static tsh_module *tshi_nn_add(tsh_module *parent, const char *name, const tshi_kind *kind,
                               const void *desc) {
    if (!desc && parent)
        (void)tsh_fail(parent->ctx, TSH_ERR_ARGUMENT, "tsh_add_%s: there is no description",
                       kind->name);
    return desc ? tshi_module_add(parent, name, kind) : NULL;
}

/* Returns the layer's one input; under TSH_SEQUENCE redistributed to the plan's input layout
 * (default S(1)). Returns NULL and sets an error if there is not exactly one, or if it does not
 * have the layout that the plan declared. */
static tsh_tensor *tshi_nn_input(const tsh_module *module, tsh_tensor **in, int n) {
    char tx[TSHI_TEXT_SIZE], want[TSHI_TEXT_SIZE]; /* for the error: texts of x and of the layout */
    tsh_layout takes = module->input_layout ? *module->input_layout : tsh_sharded(1);
    tsh_tensor *x = in[0];
    if (n != 1 || !x)
        return tshi_error_null(module->ctx, TSH_ERR_ARGUMENT,
                               "tsh_forward: takes one input, not %d%s", n,
                               n == 1 ? " that is NULL" : "");
    if (module->style == TSH_SEQUENCE) return tsh_redistribute(x, takes);
    if (!module->input_layout || (tshi_layout_resolve(&takes, x->ndim, x->dim) &&
                                  tshi_layout_equal(&takes, &x->layout, x->dim, &x->ctx->deal)))
        return x;
    return tshi_error_null(module->ctx, TSH_ERR_LAYOUT,
                           "tsh_forward: the input %s is not laid out as the plan declared, %s: "
                           "tsh_redistribute(x, declared)",
                           tshi_tensor_text(x, tx),
                           tshi_layout_text(module->input_layout, want, sizeof want));
}

/* Returns the layout S(dim) with the rule's segments and units; rule->cut, if given, sets the
 * length and unit of each segment. */
static tsh_layout tshi_nn_shard(const tsh_plan_rule *rule, int dim) {
    tsh_layout layout = tsh_shard_segments(dim, rule->segments ? rule->segments : 1,
                                           rule->unit ? rule->unit : 1);
    for (int s = 0; rule->cut && s < layout.segments && s < TSH_MAX_SEGMENTS; s++)
        layout.segment[s] = rule->cut[s];
    return layout;
}

/* Sets the layout of an embedding's weight (count, dim): ROWWISE shards the vocabulary, COLWISE the
 * features. */
static void tshi_nn_embedding_layouts(const tsh_module *module, const tsh_plan_rule *rule,
                                      tsh_layout *layouts) {
    (void)module;
    if (rule->style == TSH_ROWWISE) layouts[0] = tshi_nn_shard(rule, 0);
    if (rule->style == TSH_COLWISE) layouts[0] = tshi_nn_shard(rule, 1);
}

enum {
    TSHI_NN_EMBEDDING = 1 << TSH_PLAIN | 1 << TSH_COLWISE | 1 << TSH_ROWWISE |
                              TSHI_MODULE_QUANTISES,
    TSHI_NN_LINEAR = TSHI_NN_EMBEDDING | 1 << TSH_AUTO
};

/* Applies rule `wanted` to a new linear, classifier or embedding and ends its constructor. If its
 * weight is an existing parameter that is sharded already, the layer takes the style of that
 * layout; it is an error if `wanted` names another style. Returns the module, or NULL after an
 * error. */
static tsh_module *tshi_nn_apply_style(tsh_module *module, const tsh_plan_rule *wanted) {
    const tsh_layout *own = &module->param[0]->layout; /* the weight's current layout */
    /* 1: an embedding, with a weight (count, dim) */
    int table = module->kind->layouts == tshi_nn_embedding_layouts;
    tsh_plan_rule rule = *wanted; /* `wanted`, adapted to a weight that is sharded already */
    char text[TSHI_TEXT_SIZE];
    if (own->kind == TSH_SHARDED) { /* an existing parameter, sharded already */
        rule.style = (own->dim == 0) != table ? TSH_COLWISE : TSH_ROWWISE;
        rule.segments = own->segments;
        rule.cut = own->segment; /* lengths and units of the weight's segments */
        if (wanted->style != TSH_PLAIN && wanted->style != TSH_AUTO && wanted->style != rule.style)
            (void)tsh_fail(module->ctx, TSH_ERR_LAYOUT,
                           "tsh_add_%s: \"%s\" is %s, but its weight \"%s\" is %s already",
                           module->kind->name, module->path, tshi_parallel_style(wanted->style),
                           module->param[0]->path, tshi_layout_text(own, text, sizeof text));
    }
    (void)tsh_parallelize(module, &rule, 1);
    return tshi_module_finish(module);
}

/* -- linear layers and classifiers ------------------------------------------ */

/* Sets layouts[0], of the weight, and layouts[1], of the bias. dim 0: both are sharded along the
 * output features, in the segments and units of `cut`. dim 1: the weight is sharded along the input
 * features, the bias is R. */
static void tshi_nn_linear_shard(const tsh_module *module, tsh_layout cut, int dim,
                                 tsh_layout *layouts) {
    layouts[0] = layouts[1] = cut;
    layouts[0].dim = module->reversed ? 1 - dim : dim; /* reversed: weight (in, out) */
    layouts[1].dim = 0;
    /* the bias is R: it is added after the output is reduced */
    if (dim == 1) layouts[1] = tsh_replicated();
}

/* Sets the layouts of a linear or classifier (tshi_kind.layouts): COLWISE shards the output
 * features, ROWWISE the input features. */
static void tshi_nn_linear_layouts(const tsh_module *module, const tsh_plan_rule *rule,
                                   tsh_layout *layouts) {
    if (rule->style == TSH_COLWISE || rule->style == TSH_ROWWISE)
        tshi_nn_linear_shard(module, tshi_nn_shard(rule, 0), rule->style == TSH_ROWWISE, layouts);
}

/* Decides the style of a TSH_AUTO linear when it gets its first input x, of shape (.., in): ROWWISE
 * with the shards of x if x is sharded along its features, else COLWISE. Changes the layouts of
 * weight and bias accordingly. */
static void tshi_nn_decide_auto(tsh_module *module, const tsh_tensor *x) {
    tsh_layout layouts[TSHI_MODULE_PARAMS]; /* new layouts: [0] of the weight, [1] of the bias */
    /* row: 1 if x is sharded along its features */
    int i, row = x->layout.kind == TSH_SHARDED && x->layout.dim == x->ndim - 1;
    module->style = row ? TSH_ROWWISE : TSH_COLWISE;
    tshi_nn_linear_shard(module, row ? x->layout : tsh_sharded(0), row, layouts);
    for (i = 0; i < 2; i++) {
        tsh_tensor *t = module->param[i];
        if (t && tshi_layout_resolve(&layouts[i], t->ndim, t->dim))
            tshi_module_relayout(t, &layouts[i]);
    }
}

/* Computes y (.., out) = x (.., in) w^T + bias, with w (out, in). If w is sharded along out, the
 * layer is column-parallel: x must be R, or is S(seq) and all-gathered. If w is sharded along in,
 * it is row-parallel: x is sharded along its features. */
static tsh_tensor *tshi_nn_linear_forward(tsh_module *module, tsh_tensor **in, int n) {
    tsh_tensor *x = tshi_nn_input(module, in, n), *w = module->param[0], *b = module->param[1];
    /* the layout that the op itself is to give its output; NULL: the op's own choice */
    const tsh_layout *gives = module->output_layout;
    /* column 1: column-parallel; regather 1: save x as it is sharded, all-gather it again in
     * backward */
    int column, regather;
    tsh_tensor *y;
    if (!x) return NULL;
    if (module->style == TSH_AUTO) tshi_nn_decide_auto(module, x);
    if (module->reversed) w = tsh_transpose(w, 0, 1); /* a view: now (out, in) */
    if (!w) return NULL;
    column = w->layout.kind == TSH_SHARDED && w->layout.dim == 0; /* 1: w is sharded along out */
    regather = module->regather && column && x->layout.kind == TSH_SHARDED;
    if (column && module->input_layout && !regather) x = tsh_redistribute(x, tsh_replicated());
    if (column || w->layout.kind != TSH_SHARDED || (gives && gives->kind != TSH_SHARDED) ||
        (gives && tshi_tensor_axis(x, gives->dim) == x->ndim - 1))
        /* the op itself can only reduce-scatter a row-parallel output, and not along its features;
         * tshi_module_run redistributes the others */
        gives = NULL;
    y = tshi_linear_run(x, w, module->skip_bias_add ? NULL : b, gives, regather);
    return y && module->adapter ? module->adapt(module, x, y, gives) : y;
}

/* Adds a linear's parameters and shards them; `weight`, if not NULL, is used in place of a new
 * weight. By default, weight and bias are uniform in [-1 / sqrt(in), 1 / sqrt(in)), as in
 * torch.nn.Linear. */
static tsh_module *tshi_nn_add_linear(tsh_module *module, const tsh_linear_desc *desc,
                                      tsh_tensor *weight) {
    tsh_plan_rule rule = tshi_parallel_rule(desc->style);
    /* the default bias is uniform in [-bound, bound) */
    double bound = desc->in > 0 ? 1 / sqrt((double)desc->in) : 0;
    tsh_shape shape = desc->reversed ? tsh_shape2(desc->in, desc->out) /* shape of the weight */
                                     : tsh_shape2(desc->out, desc->in);
    module->skip_bias_add = desc->skip_bias_add;
    module->reversed = desc->reversed; /* 1: the weight is stored (in, out) */
    tshi_module_param(module, 0, "weight", desc->dtype, shape,
                      tshi_nn_init(desc->weight_init, TSH_INIT_KAIMING_UNIFORM, sqrt(5.0), 0),
                      desc->in);
    /* puts `weight` in place of the new weight, which is freed */
    if (weight && module->param[0]) (void)tsh_tie(module, "weight", weight);
    if (desc->bias != TSH_NO)
        tshi_module_param(module, 1, "bias", desc->dtype, tsh_shape1(desc->out),
                          tshi_nn_init(desc->bias_init, TSH_INIT_UNIFORM, -bound, bound), desc->in);
    if (module->ctx->error.code != TSH_OK) return tshi_module_finish(module);
    rule.segments = desc->segments;           /* number of segments; 0 means 1 */
    rule.unit = desc->unit;                   /* features that stay on one rank; 0 means 1 */
    rule.gather_output = desc->gather_output; /* COLWISE: all-gather the output */
    rule.input = desc->input;
    rule.output = desc->output;
    rule.regather = desc->regather;            /* COLWISE: all-gather x again in backward */
    return tshi_nn_apply_style(module, &rule); /* also ends the constructor */
}

TSH_API TSHI_COLD tsh_module *tsh_add_linear(tsh_module *parent, const char *name,
                                             const tsh_linear_desc *desc) {
    static const tshi_kind kind = {"linear", tshi_nn_linear_forward, TSHI_NN_LINEAR,
                                   tshi_nn_linear_layouts};
    tsh_module *module = tshi_nn_add(parent, name, &kind, desc);
    if (!module) return NULL;
    if (desc->skip_bias_add && desc->bias == TSH_NO)
        (void)tsh_fail(module->ctx, TSH_ERR_ARGUMENT,
                       "tsh_add_linear: \"%s\" is to leave its bias to the caller, and has none",
                       module->path);
    return tshi_nn_add_linear(module, desc, NULL);
}

TSH_API TSHI_COLD tsh_module *tsh_add_classifier(tsh_module *parent, const char *name,
                                                 const tsh_classifier_desc *desc) {
    static const tshi_kind kind = {"classifier", tshi_nn_linear_forward, TSHI_NN_LINEAR,
                                   tshi_nn_linear_layouts};
    tsh_module *module = tshi_nn_add(parent, name, &kind, desc);
    tsh_linear_desc linear; /* the options in desc, as those of a linear */
    if (!module) return NULL;
    memset(&linear, 0, sizeof linear);
    linear.in = desc->in;
    linear.out = desc->classes;
    linear.bias = desc->bias;
    linear.weight_init = desc->weight_init;
    linear.bias_init = desc->bias_init;
    linear.dtype = desc->dtype;
    linear.style = desc->style;
    if (desc->weight && desc->style == TSH_AUTO)
        linear.style = TSH_COLWISE; /* AUTO would let the first input choose the layout of a weight
                                     * that others use too */
    linear.gather_output = desc->gather_output;
    linear.input = desc->input;
    return tshi_nn_add_linear(module, &linear, desc->weight);
}

/* -- embedding layers ------------------------------------------------------- */

/* Looks up ids (..) -> (.., dim) in a weight (count, dim). The output of a sharded table is
 * redistributed to R, unless the plan declares an output layout. */
static tsh_tensor *tshi_nn_embedding_forward(tsh_module *module, tsh_tensor **in, int n) {
    tsh_tensor *ids = tshi_nn_input(module, in, n), *w = module->param[0];
    tsh_tensor *y = ids ? tsh_embedding(ids, w, &module->lookup) : NULL;
    if (module->output_layout || !y || w->layout.kind != TSH_SHARDED) return y;
    return tsh_redistribute(y, tsh_replicated());
}

/* Checks that desc->weight, if given, can be the table of a new embedding: a parameter of this ctx
 * with shape (count, dim). Returns 0 and sets an error if not. */
static int tshi_nn_check_weight(tsh_ctx *ctx, const tsh_embedding_desc *desc) {
    const tsh_tensor *w = desc->weight; /* shape (count, dim), or NULL */
    char text[TSHI_TEXT_SIZE];
    if (w && (!(w->flags & TSHI_PARAM) || w->ctx != ctx))
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT,
                       "tsh_add_embedding: weight takes a parameter of the same tree");
    else if (w && (w->ndim != 2 || (desc->count && desc->count != w->dim[0]) ||
                   (desc->dim && desc->dim != w->dim[1])))
        (void)tsh_fail(ctx, TSH_ERR_SHAPE, "tsh_add_embedding: \"%s\" is %s, not (%lld, %lld)",
                       w->path, tshi_tensor_text(w, text), (long long)desc->count,
                       (long long)desc->dim);
    return ctx->error.code == TSH_OK;
}

TSH_API TSHI_COLD tsh_module *tsh_add_embedding(tsh_module *parent, const char *name,
                                                const tsh_embedding_desc *desc) {
    static const tshi_kind kind = {"embedding", tshi_nn_embedding_forward, TSHI_NN_EMBEDDING,
                                   tshi_nn_embedding_layouts};
    tsh_module *module;
    tsh_plan_rule rule;
    /* number of rows of the table */
    int64_t rows = desc && desc->weight ? desc->weight->dim[0] : desc ? desc->count : 0;
    if (parent && desc &&
        (!tshi_nn_check_weight(parent->ctx, desc) ||
         !tshi_embedding_options(parent->ctx, "tsh_add_embedding", &desc->lookup, rows)))
        return NULL;
    module = tshi_nn_add(parent, name, &kind, desc);
    if (!module) return NULL;
    module->lookup = desc->lookup;   /* options of tsh_embedding: padding, sparse gradients */
    module->param[0] = desc->weight; /* an existing parameter; NULL: created below */
    module->param_name[0] = "weight";
    if (desc->weight)
        desc->weight->flags |= TSHI_TIED;
    else
        tshi_module_param(module, 0, "weight", desc->dtype, tsh_shape2(desc->count, desc->dim),
                          tshi_nn_init(desc->init, TSH_INIT_NORMAL, 0, 1), 0);
    if (!module->param[0]) return tshi_module_finish(module);
    if (!desc->weight && desc->lookup.padding)
        module->param[0]->zero_row = 1 + desc->lookup.padding_idx +
                                     (desc->lookup.padding_idx < 0 ? rows : 0);
    rule = tshi_parallel_rule(desc->style);
    rule.output = desc->output;
    return tshi_nn_apply_style(module, &rule);
}

/* -- norms and dropout as layers -------------------------------------------- */

/* The styles that dropout supports; norms also support COLWISE. */
enum { TSHI_NN_SEQUENCE = 1 << TSH_PLAIN | 1 << TSH_SEQUENCE };

/* Forward of a layer norm: x (.., dim) -> (.., dim). */
static tsh_tensor *tshi_nn_norm_forward(tsh_module *module, tsh_tensor **in, int n) {
    tsh_tensor *x = tshi_nn_input(module, in, n);
    return x ? tsh_layer_norm(x, module->param[0], module->param[1], module->number) : NULL;
}

/* Forward of an RMS norm: x (.., dim) -> (.., dim). */
static tsh_tensor *tshi_nn_rms_forward(tsh_module *module, tsh_tensor **in, int n) {
    tsh_tensor *x = tshi_nn_input(module, in, n);
    return x ? tshi_norm_rms(x, module->param[0], module->number, module->plus_one) : NULL;
}

/* Forward of dropout: x of any shape -> the same shape; x itself in evaluation mode. */
static tsh_tensor *tshi_nn_dropout_forward(tsh_module *module, tsh_tensor **in, int n) {
    tsh_tensor *x = tshi_nn_input(module, in, n);
    return x && !module->evaluating ? tsh_dropout(x, module->number, module) : x;
}

/* Sets the layouts of a norm (tshi_kind.layouts): COLWISE shards weight and bias, for inputs that
 * are sharded along their features. */
static void tshi_nn_norm_layouts(const tsh_module *module, const tsh_plan_rule *rule,
                                 tsh_layout *layouts) {
    (void)module;
    if (rule->style == TSH_COLWISE) layouts[0] = layouts[1] = tshi_nn_shard(rule, 0);
}

/* Adds a norm's parameters and ends its constructor: weight (dim) of ones, or of zeros if the layer
 * adds 1 to it (plus_one), and, if has_bias, bias (dim) of zeros. eps: added to the variance. */
static tsh_module *tshi_nn_norm(tsh_module *module, int64_t dim, double eps, int has_bias,
                                tsh_dtype dtype) {
    const tsh_init_kind first = module->plus_one ? TSH_INIT_ZEROS : TSH_INIT_ONES;
    module->number = eps; /* the forward reads eps from there */
    tshi_module_param(module, 0, "weight", dtype, tsh_shape1(dim), tshi_init_make(first, 0, 0), 0);
    if (has_bias)
        tshi_module_param(module, 1, "bias", dtype, tsh_shape1(dim),
                          tshi_init_make(TSH_INIT_ZEROS, 0, 0), 0);
    return tshi_module_finish(module);
}

TSH_API TSHI_COLD tsh_module *tsh_add_layer_norm(tsh_module *parent, const char *name,
                                       const tsh_layer_norm_desc *desc) {
    static const tshi_kind kind = {"layer_norm", tshi_nn_norm_forward,
                                   TSHI_NN_SEQUENCE | 1 << TSH_COLWISE, tshi_nn_norm_layouts};
    tsh_module *module = tshi_nn_add(parent, name, &kind, desc);
    return module ? tshi_nn_norm(module, desc->dim, desc->eps, desc->bias != TSH_NO, desc->dtype)
                  : NULL;
}

TSH_API TSHI_COLD tsh_module *tsh_add_rms_norm(tsh_module *parent, const char *name,
                                     const tsh_rms_norm_desc *desc) {
    static const tshi_kind kind = {"rms_norm", tshi_nn_rms_forward,
                                   TSHI_NN_SEQUENCE | 1 << TSH_COLWISE, tshi_nn_norm_layouts};
    tsh_module *module = tshi_nn_add(parent, name, &kind, desc);
    if (module) module->plus_one = desc->plus_one;
    return module ? tshi_nn_norm(module, desc->dim, desc->eps, 0, desc->dtype) : NULL;
}

TSH_API TSHI_COLD tsh_module *tsh_add_dropout(tsh_module *parent, const char *name, double p) {
    static const tshi_kind kind = {"dropout", tshi_nn_dropout_forward, TSHI_NN_SEQUENCE, NULL};
    tsh_module *module = tshi_module_add(parent, name, &kind);
    if (module) module->number = p; /* probability that an element becomes 0 */
    return module;
}

/* -- parameters and buffers outside layers ---------------------------------- */

/* Forward of a bare parameter or buffer: returns its input, so that a container that runs its
 * children in order may have one among them. */
static tsh_tensor *tshi_nn_param_forward(tsh_module *module, tsh_tensor **in, int n) {
    return tshi_nn_input(module, in, n);
}

/* Sets the layout of a bare parameter (tshi_kind.layouts): ROWWISE shards the first dimension,
 * COLWISE the last. */
static void tshi_nn_param_layouts(const tsh_module *module, const tsh_plan_rule *rule,
                                  tsh_layout *layouts) {
    if (rule->style == TSH_ROWWISE) layouts[0] = tshi_nn_shard(rule, 0);
    if (rule->style == TSH_COLWISE) layouts[0] = tshi_nn_shard(rule, module->param[0]->ndim - 1);
}

TSH_API TSHI_COLD tsh_tensor *tsh_add_param(tsh_module *module, const char *name, tsh_shape shape,
                                            const tsh_param_desc *desc) {
    enum { STYLES = 1 << TSH_PLAIN | 1 << TSH_COLWISE | 1 << TSH_ROWWISE };
    static const tshi_kind kinds[2] = {
        {"param", tshi_nn_param_forward, STYLES, tshi_nn_param_layouts},
        {"buffer", tshi_nn_param_forward, STYLES, tshi_nn_param_layouts}};
    tsh_init init = tshi_init_make(TSH_INIT_ZEROS, 0, 0);
    /* the module that holds the parameter */
    tsh_module *own = tshi_module_add(module, name, &kinds[0]);
    tsh_tensor *t;
    if (!own) return NULL;
    const int integers = desc && desc->buffer && tshi_dtype_exists(desc->dtype) &&
                         !tshi_dtypes[desc->dtype].floating;
    tshi_module_param(own, 0, "", desc && !integers ? desc->dtype : TSH_DTYPE_DEFAULT, shape,
                      desc ? tshi_nn_init(desc->init, init.kind, 0, 0) : init, 0);
    t = own->param[0];
    if (t && integers) t->dtype = desc->dtype;
    if (t && desc && desc->layout) {
        if (desc->layout->kind == TSH_PARTIAL)
            (void)tsh_fail(own->ctx, TSH_ERR_LAYOUT,
                           "tsh_add_param: \"%s\" is to be partial; a parameter is R or S",
                           own->path);
        else
            (void)tshi_tensor_set_shape(t, own->path, &shape, desc->layout);
    }
    if (t && desc && desc->buffer) {
        own->kind = &kinds[1];
        t->requires_grad = 0;
        t->flags = (t->flags & ~(unsigned)TSHI_LEAF) | TSHI_BUFFER;
    }
    return tshi_module_finish(own) ? t : NULL;
}

/* -- running any module ----------------------------------------------------- */

TSH_API tsh_tensor *tsh_forward_n(tsh_module *module, tsh_tensor **in, int n) {
    if (!module && in && n > 0 && in[0])
        return tshi_error_null(in[0]->ctx, TSH_ERR_ARGUMENT, "tsh_forward: the module is NULL");
    if (!module || module->ctx->error.code != TSH_OK) return NULL;
    if (n < 1 || !in)
        return tshi_error_null(module->ctx, TSH_ERR_ARGUMENT, "tsh_forward_n: %s got no input",
                               module->path);
    return tshi_module_call(module, in, n);
}

TSH_API tsh_tensor *tsh_forward(tsh_module *module, tsh_tensor *x) {
    return tsh_forward_n(module, &x, 1);
}

TSH_API tsh_tensor *tsh_forward_residual(tsh_module *module, tsh_tensor **x, tsh_tensor *y) {
    tsh_tensor *sum = tsh_add(x ? *x : NULL, y), *out = tsh_forward(module, sum);
    if (x) *x = out ? sum : NULL; /* *x is NULL after an error */
    return out;
}
