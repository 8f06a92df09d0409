/* ========================================================================== */
/* >>parallel                                      MARK: - parallel (private) */
/* Plans: rules that give the layers at matching paths a style.               */
/* Needs: >>glob >>module-tree >>module-find.                                 */
/* ========================================================================== */

/* Applying a plan takes three steps: choose the rules of every module (tshi_parallel_choose), check
 * all of them against the shapes (tshi_parallel_layouts), apply (tshi_parallel_apply). Nothing
 * changes before the whole plan has been checked, so an error leaves the model as it was. The
 * constructor of a layer with a style applies a plan of one rule in the same way. */

/* -- choosing the rules of every module --------------------------------------- */

/* The purposes of rules: redistribute inputs, shard parameters, redistribute the output. At most
 * one rule of each purpose may apply to a module. */
enum { TSHI_PARALLEL_BEFORE, TSHI_PARALLEL_STYLE, TSHI_PARALLEL_AFTER, TSHI_PARALLEL_PURPOSES };

/* The rules of a plan that apply to one module, and what follows from them. */
typedef struct tshi_choice {
    tsh_module *module;                                /* the module that the rules apply to */
    /* rule[p]: the rule of purpose p (TSHI_PARALLEL_...); NULL: none */
    const tsh_plan_rule *rule[TSHI_PARALLEL_PURPOSES];
    tsh_layout layout[TSHI_MODULE_PARAMS];             /* new layouts of the module's parameters */
} tshi_choice;

/* Returns the purpose of a rule, a TSHI_PARALLEL_ constant. */
static int tshi_parallel_purpose(const tsh_plan_rule *rule) {
    return rule->style == TSH_PREPARE_INPUT    ? TSHI_PARALLEL_BEFORE
           : rule->style == TSH_PREPARE_OUTPUT ? TSHI_PARALLEL_AFTER
                                               : TSHI_PARALLEL_STYLE;
}

/* Returns 1 if a rule applies to m: path and kind match, and m's kind supports the style. */
static int tshi_parallel_applies(const tsh_module *root, const tsh_module *m,
                                 const tsh_plan_rule *rule) {
    if (tshi_parallel_purpose(rule) == TSHI_PARALLEL_STYLE &&
        !(m->kind->styles >> rule->style & 1u)) /* m's kind does not support the style */
        return 0;
    if (rule->kind && strcmp(rule->kind, m->kind->name) != 0) return 0;
    return tshi_glob_match(rule->path, tshi_module_below(root, m->path));
}

/* Sets *choice to the rules that apply to m. Returns an error if two rules of one purpose apply. */
static tsh_result tshi_parallel_choose(const tsh_module *root, tsh_module *m,
                                       const tsh_plan_rule *rules, int count, tshi_choice *choice) {
    int purpose;
    memset(choice, 0, sizeof *choice);
    choice->module = m; /* set even if no rule applies */
    for (int i = 0; i < count; i++) {
        if (!tshi_parallel_applies(root, m, &rules[i])) continue;
        purpose = tshi_parallel_purpose(&rules[i]);
        if (choice->rule[purpose])
            return tsh_fail(m->ctx, TSH_ERR_ARGUMENT,
                            "tsh_parallelize: rules \"%s\" and \"%s\" both match \"%s\"",
                            choice->rule[purpose]->path, rules[i].path, m->path);
        choice->rule[purpose] = &rules[i]; /* no other rule of this purpose applies so far */
    }
    return TSH_OK;
}

/* Checks the fields of a rule, before any module is looked at. Returns what is wrong, as the end of
 * an error sentence; NULL: nothing. */
static const char *tshi_parallel_flaw(const tsh_plan_rule *rule) {
    if (!rule->path) return "has no path"; /* the path of the root itself is "" */
    if ((unsigned)rule->style >= (unsigned)TSH_STYLES) return "has a style that does not exist";
    if (rule->style == TSH_PREPARE_OUTPUT && !rule->output) return "names no output";
    if (rule->style == TSH_AUTO && (rule->segments > 1 || rule->unit > 1 || rule->cut))
        return "leaves the cut to the first input, and names one";
    if (rule->style == TSH_PREPARE_INPUT) {
        if (!rule->input && !rule->inputs) return "names no input";
        if (rule->inputs && (rule->input_count < 1 || rule->input_count > TSHI_MODULE_INPUTS))
            return "does not say how many inputs there are, or too many";
    }
    return NULL;
}

/* Returns how many of the n modules in `choices` the rule applies to. */
static int tshi_parallel_matched(const tsh_plan_rule *rule, const tshi_choice *choices, int n) {
    int c, matched = 0;
    for (c = 0; c < n; c++) matched += choices[c].rule[tshi_parallel_purpose(rule)] == rule;
    return matched;
}

/* Returns an error, which suggests similar paths, if the rule applies to no module. */
static tsh_result tshi_parallel_check_rule(tsh_module *root, const tsh_plan_rule *rule,
                                           const tshi_choice *choices, int n) {
    char similar[TSH_MESSAGE_SIZE / 2] = ""; /* similar paths of the tree, for the error */
    /* no error: the rule applies to at least one module */
    if (tshi_parallel_matched(rule, choices, n)) return TSH_OK;
    /* looks for modules that have the path, but whose kind does not support the style */
    for (int c = 0; c < n && !*similar; c++) {
        const tsh_module *m = choices[c].module;
        if (tshi_glob_match(rule->path, tshi_module_below(root, m->path)))
            tsh_text_add(similar, sizeof similar, "\"%s\" is of kind \"%s\"", m->path,
                         m->kind->name);
    }
    if (!*similar) tshi_module_suggest(root, rule->path, similar, sizeof similar);
    return tsh_fail(root->ctx, TSH_ERR_ARGUMENT,
                    "tsh_parallelize: rule \"%.96s\" matches no module that takes its style; %s",
                    rule->path, similar);
}

/* -- checking the layouts that the rules give to parameters ----------------- */

/* Sets choice->layout, the new layouts of the module's parameters. Returns an error if a layout
 * does not fit the parameter's shape, if the present layout may not change, or if the module has a
 * PREPARE rule but a pipeline runs its children one by one. */
static tsh_result tshi_parallel_layouts(tshi_choice *choice) {
    const tsh_plan_rule *rule = choice->rule[TSHI_PARALLEL_STYLE];
    tsh_module *m = choice->module;
    char text[TSHI_TEXT_SIZE];
    if (m->ctx->pipeline && !m->stage &&
        (choice->rule[TSHI_PARALLEL_BEFORE] || choice->rule[TSHI_PARALLEL_AFTER]))
        return tsh_fail(m->ctx, TSH_ERR_STATE,
                        "tsh_parallelize: \"%s\" has a PREPARE rule, but a pipeline runs its "
                        "children one by one; give the rule to one of these",
                        m->path);
    if (!rule) return TSH_OK; /* no rule of a style: parameters keep their layouts */
    for (int i = 0; i < TSHI_MODULE_PARAMS; i++) choice->layout[i] = tsh_replicated();
    if (m->kind->layouts) m->kind->layouts(m, rule, choice->layout);
    for (int i = 0; i < TSHI_MODULE_PARAMS; i++) {
        const tsh_tensor *t = m->param[i];
        if (!t) continue;
        if (!tshi_layout_resolve(&choice->layout[i], t->ndim, t->dim))
            return tsh_fail(
                m->ctx, TSH_ERR_LAYOUT,
                "tsh_parallelize: \"%s\" %s does not divide into %d segments of units of %lld",
                t->path, tshi_tensor_text(t, text), rule->segments ? rule->segments : 1,
                rule->unit ? (long long)rule->unit : 1ll);
        if (!tshi_layout_equal(&t->layout, &choice->layout[i], t->dim, &t->ctx->deal) &&
            !tshi_module_may_move(t))
            return m->ctx->error.code;
    }
    return TSH_OK;
}

/* Returns an error if two modules share a parameter and their choices give it different layouts. */
static tsh_result tshi_parallel_check_tied(const tshi_choice *a, const tshi_choice *b) {
    char text[TSHI_TEXT_SIZE], other[TSHI_TEXT_SIZE];
    if (!a->rule[TSHI_PARALLEL_STYLE] || !b->rule[TSHI_PARALLEL_STYLE]) return TSH_OK;
    for (int i = 0; i < TSHI_MODULE_PARAMS; i++)
        for (int j = 0; j < TSHI_MODULE_PARAMS; j++) { /* for all pairs of their parameters */
            const tsh_tensor *t = a->module->param[i];
            if (t && t == b->module->param[j] &&
                !tshi_layout_equal(&a->layout[i], &b->layout[j], t->dim, &t->ctx->deal))
                return tsh_fail(
                    t->ctx, TSH_ERR_LAYOUT,
                    "tsh_parallelize: the tied parameter \"%s\" would be %s for "
                    "\"%s\" and %s for \"%s\"",
                    t->path, tshi_layout_text(&a->layout[i], text, sizeof text), a->module->path,
                    tshi_layout_text(&b->layout[j], other, sizeof other), b->module->path);
        }
    return TSH_OK;
}

/* Chooses the rules of all modules below root and checks them. Returns a block of *n choices, which
 * the caller releases; after an error its contents are not to be used (it may be NULL). */
static tshi_block *tshi_parallel_plan(tsh_module *root, const tsh_plan_rule *rules, int count,
                                      int *n) {
    const tsh_error *error = &root->ctx->error; /* set by the calls below that fail */
    tsh_module *m;
    tshi_block *block;
    tshi_choice *choices;
    int i;
    for (i = 0; i < count; i++)
        if (tshi_parallel_flaw(&rules[i]))
            (void)tsh_fail(root->ctx, TSH_ERR_ARGUMENT, "tsh_parallelize: rule %d, \"%.96s\", %s",
                           i, rules[i].path ? rules[i].path : "", tshi_parallel_flaw(&rules[i]));
    for (*n = 0, m = root; m; m = tshi_module_next(root, m)) (*n)++; /* count the modules */
    block = tshi_mem_alloc(root->ctx, TSH_MEM_STEP, (size_t)*n * sizeof *choices);
    if (!block || error->code != TSH_OK) return block;
    choices = (tshi_choice *)tshi_mem_data(block);
    for (i = 0, m = root; m; m = tshi_module_next(root, m), i++)
        if (tshi_parallel_choose(root, m, rules, count, &choices[i]) != TSH_OK ||
            tshi_parallel_layouts(&choices[i]) != TSH_OK)
            return block;
    for (i = 0; i < count && error->code == TSH_OK; i++)
        /* each rule must apply to a module */
        (void)tshi_parallel_check_rule(root, &rules[i], choices, *n);
    for (i = 0; i < *n && error->code == TSH_OK; i++)
        for (int j = 0; j < i; j++) (void)tshi_parallel_check_tied(&choices[j], &choices[i]);
    return block;
}

/* -- applying the rules that were chosen ------------------------------------ */

/* Returns a copy of a layout that lives until the ctx closes; NULL if layout is NULL or there is no
 * memory. */
static const tsh_layout *tshi_parallel_copy(tsh_ctx *ctx, const tsh_layout *layout) {
    tsh_layout *copy = layout ? (tsh_layout *)tshi_mem_arena_alloc(ctx, &ctx->books, sizeof *copy)
                              : NULL;
    if (copy) *copy = *layout;
    return copy;
}

/* Sets the layouts to which a PREPARE_INPUT rule redistributes the module's inputs. */
static void tshi_parallel_prepare(tsh_module *m, const tsh_plan_rule *rule) {
    int i, n = rule->inputs ? rule->input_count : 1; /* .input alone is for a single input */
    m->input_layouts = (const tsh_layout **)tshi_mem_arena_alloc(
        m->ctx, &m->ctx->books, (size_t)n * sizeof *m->input_layouts);
    if (!m->input_layouts) return;
    for (i = 0; i < n; i++)
        m->input_layouts[i] = tshi_parallel_copy(m->ctx,
                                                 rule->inputs ? rule->inputs[i] : rule->input);
    m->prepared = n; /* set last, so that it is 0 if there is no memory */
}

/* Applies the rules of one module: changes the layouts of its parameters and stores what its
 * forward needs. */
static void tshi_parallel_apply(const tshi_choice *choice) {
    const tsh_plan_rule *rule = choice->rule[TSHI_PARALLEL_STYLE],
                        *before = choice->rule[TSHI_PARALLEL_BEFORE],
                        *after = choice->rule[TSHI_PARALLEL_AFTER];
    tsh_module *m = choice->module;
    tsh_layout whole = tsh_replicated(); /* the output layout of .gather_output */
    if (before) tshi_parallel_prepare(m, before); /* layouts that inputs are redistributed to */
    /* layout that the output is redistributed to */
    if (after) m->result = tshi_parallel_copy(m->ctx, after->output);
    if (!rule) return;
    for (int i = 0; i < TSHI_MODULE_PARAMS; i++)
        if (m->param[i]) tshi_module_relayout(m->param[i], &choice->layout[i]);
    m->style = rule->style;       /* read by the layer's forward */
    /* COLWISE with an input S(seq): all-gather it again in backward */
    m->regather = rule->regather;
    m->input_layout = tshi_parallel_copy(m->ctx, rule->input);
    m->output_layout = tshi_parallel_copy(m->ctx, rule->gather_output ? &whole : rule->output);
}

TSH_API TSHI_COLD tsh_result tsh_parallelize(tsh_module *module, const tsh_plan_rule *rules,
                                             int count) {
    tshi_block *block; /* one tshi_choice per module */
    int i, n = 0;      /* n: number of modules */
    if (!module || (count && !rules)) return TSH_ERR_ARGUMENT;
    if (module->ctx->error.code != TSH_OK) return module->ctx->error.code;
    block = tshi_parallel_plan(module, rules, count, &n);
    for (i = 0; i < n && module->ctx->error.code == TSH_OK; i++)
        tshi_parallel_apply((const tshi_choice *)tshi_mem_data(block) + i);
    tshi_mem_release(module->ctx, block);
    tshi_module_changed(module->ctx); /* ranks compare their models anew, with the new layouts */
    return module->ctx->error.code;
}

/* Returns a rule with a style and an empty path: it matches the root itself. */
static tsh_plan_rule tshi_parallel_rule(tsh_style style) {
    tsh_plan_rule rule;
    memset(&rule, 0, sizeof rule);
    rule.path = ""; /* matches the root */
    rule.style = style;
    return rule;
}

/* -- report of the modules that each rule matches --------------------------- */

/* Returns a style's name for reports. */
static const char *tshi_parallel_style(tsh_style style) {
    static const char *const name[TSH_STYLES] = {
        "plain", "colwise", "rowwise", "auto", "sequence", "prepare input", "prepare output"};
    return name[style];
}

TSH_API TSHI_COLD tsh_result tsh_plan_report(tsh_module *module, const tsh_plan_rule *rules,
                                             int count, FILE *file) {
    tshi_block *block;
    const tshi_choice *choices; /* one per module, in pre-order */
    int n;
    if (!module || !file || (count && !rules)) return TSH_ERR_ARGUMENT;
    if (module->ctx->error.code != TSH_OK) return module->ctx->error.code;
    block = tshi_parallel_plan(module, rules, count, &n);
    choices = block ? (const tshi_choice *)tshi_mem_data(block) : NULL;
    for (int i = 0; i < count && module->ctx->error.code == TSH_OK; i++) {
        /* One line per rule: path, style, number of modules, their paths. */
        (void)fprintf(file, "%-32s %-14s %3d matched:", rules[i].path,
                      tshi_parallel_style(rules[i].style),
                      tshi_parallel_matched(&rules[i], choices, n));
        for (int c = 0; c < n; c++)
            if (tshi_parallel_matched(&rules[i], &choices[c], 1))
                (void)fprintf(file, " %s", tshi_module_below(module, choices[c].module->path));
        (void)fprintf(file, "\n");
    }
    tshi_mem_release(module->ctx, block);
    return tshi_error_written(module->ctx, "tsh_plan_report", file);
}
