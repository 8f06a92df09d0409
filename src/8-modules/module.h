/* ========================================================================== */
/* >>module                                          MARK: - module (private) */
/* A tree of named modules; parameters are named by path and get their memory */
/* on first use.                                                              */
/* Needs: >>redistribute.                                                     */
/* ========================================================================== */

/* A module is a node of the tree; its kind says what its forward computes. Modules and their names
 * are allocated in the arena ctx->books and live until the ctx closes. Invariant: every function
 * that adds a module or changes a layout calls tshi_module_changed, so that the next collective of
 * each group first compares the models of its ranks. tshi_module_run is the one place where a
 * forward is called. */

/* A flag in tshi_kind.styles, above the bits of the styles: the weight (param[0]) of modules of
 * this kind may be quantised. */
enum { TSHI_MODULE_QUANTISES = 1 << 30 };

/* A kind of layer; one constant per layer type, shared by all its modules. */
typedef struct tshi_kind {
    const char *name; /* "linear": used in reports, errors and tsh_plan_rule.kind */
    /* runs a module of this kind. in: the n input tensors; returns the output */
    tsh_tensor *(*forward)(tsh_module *module, tsh_tensor **in, int n);
    /* Flags: 1 << style if the kind supports the style; TSHI_MODULE_QUANTISES. Every kind supports
     * the PREPARE styles, which have no flag. */
    unsigned styles;
    /* Sets layouts[i], the layout of param[i] under a rule; on entry all are R. NULL: all
     * parameters stay R. */
    void (*layouts)(const tsh_module *module, const tsh_plan_rule *rule, tsh_layout *layouts);
} tshi_kind;

/* max number of inputs of a checkpointed module and of a PREPARE_INPUT rule */
enum { TSHI_MODULE_INPUTS = 16 };

/* Returns "a.b" or, if a or b is empty, a copy of the other. The text lives until the ctx closes.
 * Returns NULL and sets an error if there is no memory. */
static const char *tshi_module_text(tsh_ctx *ctx, const char *a, const char *b) {
    size_t n = strlen(a) + strlen(b) + 2;
    char *text = (char *)tshi_mem_arena_alloc(ctx, &ctx->books, n);
    if (text) (void)snprintf(text, n, *a && *b ? "%s.%s" : "%s%s", a, b);
    return text;
}

/* -- walking the tree; running a module ------------------------------------- */

/* Returns the module after `module` in pre-order below root; NULL at the end. */
TSHI_OUTLINE tsh_module *tshi_module_next(const tsh_module *root, tsh_module *module) {
    if (module->first) return module->first;                         /* first the children */
    while (module != root && !module->next) module = module->parent; /* else up to a next sibling */
    return module == root ? NULL : module->next;
}

/* The position of a walk over the parameters below a module, in pre-order: param is
 * module->param[slot]. Before the first step and after the last it is {NULL, NULL, 0}. */
typedef struct tshi_walk {
    tsh_tensor *param;  /* the current parameter; NULL before the first and after the last */
    tsh_module *module; /* the module that the parameter was found in */
    int slot;           /* index into module->param */
} tshi_walk;

/* Steps to the next parameter below root and returns it; NULL at the end. A tied parameter is
 * returned once for each module that has it. */
TSHI_OUTLINE tsh_tensor *tshi_module_step(tsh_module *root, tshi_walk *at) {
    if (at->module)
        at->slot++; /* continue after the current parameter */
    else
        at->module = root; /* the first call of a walk begins at root */
    for (; at->module; at->module = tshi_module_next(root, at->module), at->slot = 0)
        for (; at->slot < TSHI_MODULE_PARAMS; at->slot++)
            if ((at->param = at->module->param[at->slot]) != NULL) return at->param;
    return at->param = NULL; /* at->module is NULL too, so the next call starts again */
}

/* Returns 1 if the walk meets its current parameter for the first time, 0 if it is a tied one that
 * the walk has met before. */
static int tshi_module_first(tsh_module *root, const tshi_walk *at) {
    tshi_walk before = {NULL, NULL, 0}; /* a second walk, which begins at root */
    if (!(at->param->flags & TSHI_TIED)) return 1;
    while (tshi_module_step(root, &before) != at->param) continue;
    return before.module == at->module && before.slot == at->slot;
}

/* Does what tshi_module_step does, but returns a tied parameter only once: in the first module that
 * has it. */
static tsh_tensor *tshi_module_step_once(tsh_module *root, tshi_walk *at) {
    while (tshi_module_step(root, at) && !tshi_module_first(root, at)) continue;
    return at->param;
}

/* Runs a module's forward. Inputs and output are redistributed as the rules of its plan say. */
static tsh_tensor *tshi_module_run(tsh_module *module, tsh_tensor **in, int n) {
    tsh_tensor *ready[TSHI_MODULE_INPUTS], *y; /* ready: inputs after redistribution; y: output */
    if (module->prepared && n != module->prepared)
        return tshi_error_null(module->ctx, TSH_ERR_ARGUMENT,
                               "tsh_forward: got %d inputs, the plan prepares %d", n,
                               module->prepared);
    for (int i = 0; i < module->prepared; i++)
        ready[i] = in[i] && module->input_layouts[i]
                       ? tsh_redistribute(in[i], *module->input_layouts[i])
                       : in[i];
    y = module->kind->forward(module, module->prepared ? ready : in, n); /* runs the layer's ops */
    if (!y) /* a user's forward may return NULL and set no error; an earlier error stays */
        return tshi_error_null(module->ctx, TSH_ERR_ARGUMENT,
                               "tsh_forward: the module's forward returned NULL");
    /* Redistributes y to the .output of the style's rule, then to that of the PREPARE_OUTPUT
     * rule. */
    if (module->output_layout) y = tsh_redistribute(y, *module->output_layout);
    return y && module->result ? tsh_redistribute(y, *module->result) : y;
}

/* Returns 1 if m is a layer whose weight, its parameter 0, may be quantised. */
static int tshi_module_quantises(const tsh_module *m) {
    return m->param[0] && (m->kind->styles & TSHI_MODULE_QUANTISES);
}

/* Returns the number of modules of the whole tree, the root included. */
static uint64_t tshi_module_count(const tsh_ctx *ctx) {
    uint64_t n = ctx->root == NULL; /* counts the root if tsh_root has not created it yet */
    for (tsh_module *m = ctx->root; m; m = tshi_module_next(ctx->root, m)) n++;
    return n;
}
