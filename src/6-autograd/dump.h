/* ========================================================================== */
/* >>dump                                              MARK: - dump (private) */
/* The tape as text: a line per node, or a graph for Graphviz.                */
/* Needs: >>tape.                                                             */
/* ========================================================================== */

/* tsh_tape_dump prints a line per node, tsh_tape_dot a graph; both give tshi_dump_all a function
 * that prints one node. Nodes are linked from the newest to the oldest and have no numbers. A dump
 * may be slow, so it counts them again for every node that it prints. */

/* Returns a node's number: how many nodes were recorded before it. */
static TSHI_COLD int tshi_dump_number(const tshi_node *node) {
    int number = 0;
    while ((node = node->older) != NULL) number++;
    return number;
}

/* Prints the names of the inputs whose bits are set in `bits`, and "output" for TSHI_OUT, separated
 * by blanks: "x weight". */
static TSHI_COLD void tshi_dump_bits(FILE *file, const tshi_node *node, unsigned bits) {
    int i, length, count = 0;
    for (i = 0; i < node->n; i++) {
        const char *name = tshi_tensor_name(node->op->inputs, i, &length);
        /* skips inputs whose bit is not set, and optional ones that the caller left out */
        if (!(bits >> i & 1u) || !node->in[i]) continue;
        (void)fprintf(file, "%s%.*s", count++ ? " " : "", length, name);
        if (!node->op->inputs) (void)fprintf(file, "%d", i); /* unnamed inputs: their index */
    }
    if (bits & (unsigned)TSHI_OUT) (void)fprintf(file, "%soutput", count ? " " : "");
}

/* Prints the text `before`, then which values the node saves for backward and their bytes: "saves x
 * weight, 3584 bytes". Prints nothing if the node saves nothing. */
static TSHI_COLD void tshi_dump_saved(FILE *file, const tshi_node *node, const char *before) {
    /* node->aux: data, besides inputs and output, that the op keeps for its backward */
    size_t bytes = node->aux ? node->aux->size : 0;
    unsigned saved = 0; /* bits of the inputs and of the output that are saved */
    for (int i = 0; i <= node->n; i++) {
        const tsh_tensor *t = i < node->n ? node->in[i] : node->out;
        if (!node->saved[i]) continue;
        saved |= i < node->n ? 1u << i : (unsigned)TSHI_OUT;
        bytes += tshi_dtype_bytes(t->dtype, tsh_local_numel(t));
    }
    for (int i = 0; i < node->more_count; i++) bytes += tshi_tape_local_bytes(node->more[i]);
    if (!saved && !node->aux) return;
    (void)fprintf(file, "%ssaves ", before);
    tshi_dump_bits(file, node, saved);
    (void)fprintf(file, "%s%llu bytes", saved ? ", " : "", (unsigned long long)bytes);
}

/* Returns the bits of the inputs whose gradient is needed and is a partial sum over tp. */
static TSHI_COLD unsigned tshi_dump_partial(const tshi_node *node) {
    unsigned partial = 0;
    for (int i = 0; i < node->n && node->out->ctx->tp.size > 1; i++)
        if (node->in[i] && node->in[i]->base->requires_grad) partial |= node->partial & 1u << i;
    return partial;
}

/* Prints "#2 h.0 tsh_add(#1: a (4, 8) R, b (8) R) = (4, 8) R; saves ...; partial gradient: b". */
static TSHI_COLD void tshi_dump_line(FILE *file, const tshi_node *node, int number) {
    const char *path = node->module ? node->module->path : "";
    char text[TSHI_TEXT_SIZE];
    int i, length, count = 0; /* count: number of inputs printed so far */
    (void)fprintf(file, "#%d %s%s%s(", number, path, *path ? " " : "", node->op->name);
    for (i = 0; i < node->n; i++) {
        const tsh_tensor *t = node->in[i];
        const char *name = tshi_tensor_name(node->op->inputs, i, &length);
        if (!t) continue;
        (void)fputs(count++ ? ", " : "", file);
        if (t->base->node) (void)fprintf(file, "#%d: ", tshi_dump_number(t->base->node));
        (void)fprintf(file, "%.*s %s", length, name, tshi_tensor_text(t, text));
    }
    (void)fprintf(file, ") = %s", tshi_tensor_text(node->out, text));
    for (i = 0; i < node->more_count; i++)
        (void)fprintf(file, ", %s", tshi_tensor_text(node->more[i], text));
    tshi_dump_saved(file, node, "; ");
    if (tshi_dump_partial(node)) {
        (void)fputs("; partial gradient: ", file);
        tshi_dump_bits(file, node, tshi_dump_partial(node));
    }
    (void)fputs("\n", file);
}

/* Prints the text `begin`, then every node, the oldest first, by calling `line`, then the text
 * `end`. op: name of the public function, for errors. */
static TSHI_COLD tsh_result tshi_dump_all(const char *op, tsh_ctx *ctx, FILE *file,
                                          const char *begin, const char *end,
                                          void (*line)(FILE *file, const tshi_node *node,
                                                       int number)) {
    const tshi_node *node;
    int i, number, count;
    if (!ctx) return TSH_ERR_ARGUMENT;
    if (!file) return tsh_fail(ctx, TSH_ERR_ARGUMENT, "%s: the file is NULL", op);
    (void)fputs(begin, file);
    count = ctx->tape.newest ? tshi_dump_number(ctx->tape.newest) + 1 : 0;
    for (number = 0; number < count; number++) {
        for (node = ctx->tape.newest, i = count - 1; i > number; i--) node = node->older;
        line(file, node, number);
    }
    (void)fputs(end, file);
    if (fflush(file) == 0 && !ferror(file)) return TSH_OK;
    return tsh_fail(ctx, TSH_ERR_IO, "%s: writing failed: %s", op, strerror(errno));
}

TSH_API TSHI_COLD tsh_result tsh_tape_dump(tsh_ctx *ctx, FILE *file) {
    return tshi_dump_all("tsh_tape_dump", ctx, file, "", "", tshi_dump_line);
}

/* Prints a node of the graph, and an arrow from each of its inputs. The arrow starts at the node
 * that made the input; a leaf gets a node of its own. Arrows of partial gradients are red. */
static TSHI_COLD void tshi_dump_dot(FILE *file, const tshi_node *node, int number) {
    const char *path = node->module ? node->module->path : "";
    const unsigned partial = tshi_dump_partial(node); /* bits of inputs with a partial gradient */
    char text[TSHI_TEXT_SIZE];
    int i, length;
    (void)fprintf(file, "  n%d [label=\"%s%s%s\\n%s", number, path, *path ? "\\n" : "",
                  node->op->name, tshi_tensor_text(node->out, text));
    tshi_dump_saved(file, node, "\\n");
    (void)fputs("\"];\n", file);
    for (i = 0; i < node->n; i++) {
        const tsh_tensor *t = node->in[i];
        const char *name = tshi_tensor_name(node->op->inputs, i, &length);
        if (!t) continue;
        if (t->base->node) /* the input is the output of an op */
            (void)fprintf(file, "  n%d -> n%d", tshi_dump_number(t->base->node), number);
        else
            (void)fprintf(file, "  n%d_%d [shape=plain, label=\"%.*s %s\"];\n  n%d_%d -> n%d",
                          number, i, length, name, tshi_tensor_text(t, text), number, i, number);
        if (partial >> i & 1u)
            (void)fprintf(file, " [color=red, label=\"d%.*s P\"]", length, name);
        (void)fputs(";\n", file);
    }
}

TSH_API TSHI_COLD tsh_result tsh_tape_dot(tsh_ctx *ctx, FILE *file) {
    return tshi_dump_all("tsh_tape_dot", ctx, file,
                         "digraph tape {\n  node [shape=box, fontname=sans, fontsize=10];\n"
                         "  edge [fontname=sans, fontsize=10];\n",
                         "}\n", tshi_dump_dot);
}
