/* ========================================================================== */
/* >>op-einsum                                    MARK: - op-einsum (private) */
/* Einstein sums, by views, tsh_sum, tsh_mul and tsh_matmul.                  */
/* Needs: >>op-reduce >>op-shape >>op-matmul.                                 */
/* ========================================================================== */

/* tsh_einsum records no node of its own: it permutes and merges dimensions (views, where strides
 * allow it), and calls other ops, from which gradients and layouts follow. A label is a small
 * integer that stands for a letter of the equation, or for one of the dimensions that "..." stands
 * for; the last of these has the largest label. */

enum {
    TSHI_EINSUM_LETTERS = 52,                                /* number of letters A to Z, a to z */
    TSHI_EINSUM_LABELS = TSHI_EINSUM_LETTERS + TSH_MAX_DIMS, /* also those of "..." */
    TSHI_EINSUM_BATCH = TSH_MAX_DIMS - 2 /* most batch dimensions in tsh_matmul */
};

/* Labels, one for each dimension of a tensor. */
typedef struct tshi_einsum_list {
    int n, label[TSH_MAX_DIMS];
} tshi_einsum_list;

/* A call of tsh_einsum. */
typedef struct tshi_einsum {
    tsh_ctx *ctx;
    const char *equation;
    int inputs;                       /* number of inputs, 1 or 2 */
    tsh_tensor *t[2];                 /* the inputs; later, views and sums of them */
    tshi_einsum_list in[2];           /* the labels of each input's dimensions */
    tshi_einsum_list out;             /* the labels of the result's dimensions */
    int64_t size[TSHI_EINSUM_LABELS]; /* the length that each label stands for; -1: not known yet */
} tshi_einsum;

/* Records an error about the equation. Returns 0. */
static TSHI_COLD int tshi_einsum_refuse(const tshi_einsum *e, const char *why) {
    char a[TSHI_TEXT_SIZE], b[TSHI_TEXT_SIZE];
    return tshi_error_zero(e->ctx, TSH_ERR_SHAPE, "tsh_einsum: \"%.64s\" of %s%s%s: %s",
                           e->equation, tshi_tensor_text(e->t[0], a), e->inputs > 1 ? ", " : "",
                           e->inputs > 1 ? tshi_tensor_text(e->t[1], b) : "", why);
}

/* Returns the index of a label in the list, or -1. */
static int tshi_einsum_find(const tshi_einsum_list *list, int label) {
    int i;
    for (i = 0; i < list->n; i++)
        if (list->label[i] == label) return i;
    return -1;
}

/* Appends a label. Returns 0 if the list is full. */
static int tshi_einsum_append(tshi_einsum_list *list, int label) {
    if (list->n == TSH_MAX_DIMS) return 0;
    list->label[list->n++] = label;
    return 1;
}

static void tshi_einsum_remove(tshi_einsum_list *list, int at) {
    int i;
    for (list->n--; at < list->n; at++) {
        i = at + 1;
        list->label[at] = list->label[i];
    }
}

/* -- the equation --------------------------------------------------------------------- */

/* Returns the label of a letter; -1 if the character is not a letter. */
static int tshi_einsum_letter(char letter) {
    static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
    const char *at = letter ? strchr(letters, letter) : NULL;
    return at ? (int)(at - letters) : -1;
}

/* Appends the labels of "...", which stands for `dots` dimensions. Returns 0 if the list has no
 * space for them. */
static int tshi_einsum_append_dots(tshi_einsum_list *list, int dots) {
    int label, fits = dots <= TSH_MAX_DIMS;
    for (label = TSHI_EINSUM_LABELS - dots; label < TSHI_EINSUM_LABELS && fits; label++)
        fits = tshi_einsum_append(list, label);
    return fits;
}

/* Reads the labels of one tensor from the equation, from *at up to ',', '-' or the end, and moves
 * *at there. "..." stands for `dots` dimensions or, if ndim >= 0, for those of the tensor's ndim
 * that have no letter. Returns 0 if the letters are wrong, or too many or too few for ndim. */
static int tshi_einsum_term(const char **at, int ndim, int dots, tshi_einsum_list *list) {
    const char *c;
    int seen = 0, letters = 0, fits = 1; /* seen: number of "..." */
    for (c = *at; *c && *c != ',' && *c != '-'; c++) letters += tshi_einsum_letter(*c) >= 0;
    if (ndim >= 0) dots = ndim > letters ? ndim - letters : 0;
    list->n = 0;
    for (c = *at; *c && *c != ',' && *c != '-' && fits; c++) {
        const int label = tshi_einsum_letter(*c);
        if (*c == ' ') continue;
        if (label >= 0) {
            fits = tshi_einsum_append(list, label);
        } else {
            fits = strncmp(c, "...", 3) == 0 && !seen++ && tshi_einsum_append_dots(list, dots);
            c += fits ? 2 : 0;
        }
    }
    *at = c;
    return fits && (ndim < 0 || list->n == ndim);
}

/* Returns how many dimensions "..." stands for in a list. */
static int tshi_einsum_dots(const tshi_einsum_list *list) {
    int i, dots = 0;
    for (i = 0; i < list->n; i++) dots += list->label[i] >= TSHI_EINSUM_LETTERS;
    return dots;
}

/* Sets the result's labels for an equation without "->": those of "...", then the letters that
 * occur exactly once in the inputs, A to Z before a to z. Returns 0 if there are too many. */
static int tshi_einsum_implicit(tshi_einsum *e, int dots) {
    int label, i, k, fits = tshi_einsum_append_dots(&e->out, dots);
    for (label = 0; label < TSHI_EINSUM_LETTERS; label++) {
        int count = 0;
        for (k = 0; k < e->inputs; k++)
            for (i = 0; i < e->in[k].n; i++) count += e->in[k].label[i] == label;
        if (count == 1) fits &= tshi_einsum_append(&e->out, label);
    }
    return fits;
}

/* Reads the equation. Returns 0 and an error if it does not fit the inputs. */
static int tshi_einsum_read(tshi_einsum *e) {
    const char *at = e->equation;
    int i, k, dots = 0;
    for (k = 0; k < e->inputs; k++) {
        if (!tshi_einsum_term(&at, e->t[k]->ndim, 0, &e->in[k]))
            return tshi_einsum_refuse(e, "an input takes a letter, A to Z or a to z, for each "
                                         "dimension, and \"...\" once for those left over");
        i = tshi_einsum_dots(&e->in[k]);
        dots = i > dots ? i : dots;
        if (k + 1 < e->inputs && *at++ != ',')
            return tshi_einsum_refuse(e, "two inputs take a comma between their letters");
    }
    e->out.n = 0;
    if (!*at)
        return tshi_einsum_implicit(e, dots) ||
               tshi_einsum_refuse(e, "the result has too many dimensions");
    if (strncmp(at, "->", 2) != 0)
        return tshi_einsum_refuse(e, "\"->\" comes after the letters of one input or two");
    at += 2;
    if (!tshi_einsum_term(&at, -1, dots, &e->out) || *at)
        return tshi_einsum_refuse(e, "after \"->\", takes letters, at most one for each of 6 "
                                     "dimensions, and \"...\" once");
    for (i = 0; i < e->out.n; i++)
        if (tshi_einsum_find(&e->out, e->out.label[i]) != i ||
            (tshi_einsum_find(&e->in[0], e->out.label[i]) < 0 &&
             (e->inputs < 2 || tshi_einsum_find(&e->in[1], e->out.label[i]) < 0)))
            return tshi_einsum_refuse(e, "a letter of the result is in no input, or there twice");
    return 1;
}

/* -- one input ---------------------------------------------------------------------------- */

/* Replaces dimensions d and f > d of input k, which have the same label, by their diagonal, a view.
 * Returns 0 after an error. */
static int tshi_einsum_diagonal(tshi_einsum *e, int k, int d, int f) {
    tsh_tensor *x = e->t[k], *out;
    int i;
    if (x->dim[d] != x->dim[f])
        return tshi_einsum_refuse(e, "a letter that is twice in an input takes equal lengths");
    if (x->layout.kind == TSH_SHARDED && (x->layout.dim == d || x->layout.dim == f))
        return tsh_fail(e->ctx, TSH_ERR_LAYOUT,
                        "tsh_einsum: \"%.64s\" takes the diagonal of an input along its sharded "
                        "dimension %d; gather it first: tsh_redistribute(x, tsh_replicated())",
                        e->equation, x->layout.dim) == TSH_OK;
    out = tshi_tensor_view(x);
    if (!out) return 0;
    out->ndim--;
    for (i = f; i < out->ndim; i++) tshi_view_dim(out, i, x, i + 1);
    out->stride[d] += x->stride[f];
    tshi_einsum_remove(&e->in[k], f);
    e->t[k] = out;
    return 1;
}

/* Replaces dimensions of input k with the same label by their diagonal, and stores the length of
 * each of its labels in e->size. Returns 0 after an error. */
static int tshi_einsum_lengths(tshi_einsum *e, int k) {
    tshi_einsum_list *list = &e->in[k];
    int d, f;
    for (d = 0; d < list->n; d++) {
        const int label = list->label[d];
        int64_t *size = &e->size[label];
        for (f = list->n - 1; f > d; f--)
            if (list->label[f] == label && !tshi_einsum_diagonal(e, k, d, f)) return 0;
        if (*size > 1 && e->t[k]->dim[d] != 1 && e->t[k]->dim[d] != *size)
            return tshi_einsum_refuse(e, "a letter stands for two lengths");
        if (*size < 0 || *size == 1) *size = e->t[k]->dim[d];
        if (*size == 0 && e->t[k]->dim[d] > 1)
            return tshi_einsum_refuse(e, "a letter stands for two lengths");
    }
    return 1;
}

/* Removes dimensions of input k: those of length 1 that the other input has longer; and, by
 * tsh_sum, those that neither the other input nor the result has. Returns 0 after an error. */
static int tshi_einsum_reduce(tshi_einsum *e, int k) {
    const tshi_einsum_list none = {0, {0}}, *other = e->inputs > 1 ? &e->in[!k] : &none;
    tshi_einsum_list *list = &e->in[k];
    int d, alone = 0; /* alone: how many dimensions are to be summed */
    for (d = list->n - 1; d >= 0 && e->t[k]; d--) {
        if (tshi_einsum_find(other, list->label[d]) < 0) {
            alone += tshi_einsum_find(&e->out, list->label[d]) < 0;
        } else if (e->t[k]->dim[d] == 1 && e->size[list->label[d]] != 1) {
            e->t[k] = tsh_squeeze(e->t[k], d);
            tshi_einsum_remove(list, d);
        }
    }
    if (alone == list->n && alone && e->t[k]) {
        e->t[k] = tsh_sum(e->t[k], TSH_ALL, 0);
        list->n = 0;
    }
    for (d = list->n - 1; d >= 0 && e->t[k]; d--) {
        if (tshi_einsum_find(other, list->label[d]) >= 0 ||
            tshi_einsum_find(&e->out, list->label[d]) >= 0)
            continue;
        e->t[k] = tsh_sum(e->t[k], d, 0);
        tshi_einsum_remove(list, d);
    }
    return e->t[k] != NULL;
}

/* -- two inputs ------------------------------------------------------------------------------ */

/* Returns the label of input k's sharded dimension; -1: it is not sharded. */
static int tshi_einsum_cut(const tshi_einsum *e, int k) {
    const tsh_layout *layout = &e->t[k]->layout;
    return layout->kind == TSH_SHARDED ? e->in[k].label[layout->dim] : -1;
}

/* Returns 1 if the layouts of both inputs fit each other; else 0 and an error. */
static int tshi_einsum_layouts(const tshi_einsum *e) {
    const tsh_tensor *a = e->t[0], *b = e->t[1];
    const int ca = tshi_einsum_cut(e, 0), cb = tshi_einsum_cut(e, 1);
    char ta[TSHI_TEXT_SIZE], tb[TSHI_TEXT_SIZE];
    int fits = a->layout.kind == TSH_REPLICATED || b->layout.kind == TSH_REPLICATED;
    if (ca >= 0 && cb >= 0)
        fits = ca == cb &&
               tshi_layout_same_shards(&a->layout, &b->layout, e->size[ca], &e->ctx->deal);
    else if (fits && ca >= 0)
        fits = tshi_einsum_find(&e->in[1], ca) < 0;
    else if (fits && cb >= 0)
        fits = tshi_einsum_find(&e->in[0], cb) < 0;
    if (fits) return 1;
    return tshi_error_zero(e->ctx, TSH_ERR_LAYOUT,
                           "tsh_einsum: \"%.64s\": layouts of %s and %s do not go together; shard "
                           "both alike along a letter that both have, or one along a letter of its "
                           "own, or make one replicated: tsh_redistribute(x, tsh_replicated())",
                           e->equation, tshi_tensor_text(a, ta), tshi_tensor_text(b, tb));
}

/* Which labels of an input tshi_einsum_collect returns. */
typedef enum tshi_einsum_group {
    TSHI_EINSUM_SHARED_KEPT,   /* labels of both inputs and the result: batch dimensions */
    TSHI_EINSUM_SHARED_SUMMED, /* labels of both inputs, but not of the result */
    TSHI_EINSUM_OWN            /* labels of this input alone */
} tshi_einsum_group;

/* Returns the labels of input k that belong to a group, in the order of its dimensions, except that
 * the label of a sharded dimension comes first: of dimensions that are merged, only the outermost
 * may be sharded. */
static tshi_einsum_list tshi_einsum_collect(const tshi_einsum *e, int k, tshi_einsum_group group) {
    const int cut = tshi_einsum_cut(e, k);
    tshi_einsum_list list = {0, {0}};
    int pass, i;
    for (pass = 0; pass < 2; pass++)
        for (i = 0; i < e->in[k].n; i++) {
            const int label = e->in[k].label[i];
            const tshi_einsum_group is = tshi_einsum_find(&e->in[!k], label) < 0 ? TSHI_EINSUM_OWN
                                         : tshi_einsum_find(&e->out, label) < 0
                                             ? TSHI_EINSUM_SHARED_SUMMED
                                             : TSHI_EINSUM_SHARED_KEPT;
            if (is == group && (label == cut) == !pass) (void)tshi_einsum_append(&list, label);
        }
    return list;
}

/* Returns t, whose labels are those of `have`, with its dimensions in the order of `want`; labels
 * of `want` that t lacks become dimensions of length 1. NULL after an error. */
static tsh_tensor *tshi_einsum_ordered(tsh_tensor *t, const tshi_einsum_list *have,
                                       const tshi_einsum_list *want) {
    int dims[TSH_MAX_DIMS], i, n = 0;
    for (i = 0; i < want->n; i++) {
        const int d = tshi_einsum_find(have, want->label[i]);
        if (d >= 0) dims[n++] = d;
    }
    t = t && n ? tsh_permute(t, dims) : t;
    for (i = 0; i < want->n && t; i++)
        if (tshi_einsum_find(have, want->label[i]) < 0) t = tsh_unsqueeze(t, i);
    return t;
}

/* Appends the labels of `more` to the list. */
static void tshi_einsum_join(tshi_einsum_list *list, const tshi_einsum_list *more) {
    int i;
    for (i = 0; i < more->n; i++) (void)tshi_einsum_append(list, more->label[i]);
}

/* Merges the dimensions [at, at + count) of t into one; if count is 0, inserts one of length 1. */
static tsh_tensor *tshi_einsum_merge(tsh_tensor *t, int at, int count) {
    tsh_shape shape = tsh_shape_of(t);
    int d;
    if (!t || count == 1) return t;
    if (!count) return tsh_unsqueeze(t, at);
    shape.dim[at] = tshi_tensor_product(t->dim + at, count);
    for (d = at + 1; d + count - 1 < t->ndim; d++) shape.dim[d] = t->dim[d + count - 1];
    shape.ndim -= count - 1;
    return tsh_reshape(t, shape);
}

/* Multiplies the two inputs element by element, with their dimensions in the order of `order`, and
 * sums over the last `sums` of these. */
static tsh_tensor *tshi_einsum_multiply(const tshi_einsum *e, const tshi_einsum_list *order,
                                        int sums) {
    tsh_tensor *out = tsh_mul(tshi_einsum_ordered(e->t[0], &e->in[0], order),
                              tshi_einsum_ordered(e->t[1], &e->in[1], order));
    for (; sums > 0; sums--) out = tsh_sum(out, -1, 0);
    return out;
}

/* Multiplies the first input, as matrices (batch, rows, sum), by the second, as matrices (batch,
 * sum, columns); batch, sum, rows and columns are groups of labels. The result has the labels of
 * batch, rows and columns. */
static tsh_tensor *tshi_einsum_matmul(const tshi_einsum *e, const tshi_einsum_list *batch,
                                      const tshi_einsum_list *sum, const tshi_einsum_list *rows,
                                      const tshi_einsum_list *columns) {
    tshi_einsum_list la = *batch, lb = *batch, lo = *batch;
    tsh_shape shape = tsh_shape0();
    tsh_tensor *a, *b, *out;
    /* merged: 1: the batch dimensions are merged into one */
    int i, n = batch->n, merged = n > TSHI_EINSUM_BATCH;
    tshi_einsum_join(&la, rows);
    tshi_einsum_join(&la, sum);
    tshi_einsum_join(&lb, sum);
    tshi_einsum_join(&lb, columns);
    tshi_einsum_join(&lo, rows);
    tshi_einsum_join(&lo, columns);
    a = tshi_einsum_ordered(e->t[0], &e->in[0], &la);
    b = tshi_einsum_ordered(e->t[1], &e->in[1], &lb);
    if (merged) {
        a = tshi_einsum_merge(a, 0, n);
        b = tshi_einsum_merge(b, 0, n);
        n = 1;
    }
    a = tshi_einsum_merge(tshi_einsum_merge(a, n + rows->n, sum->n), n, rows->n);
    b = tshi_einsum_merge(tshi_einsum_merge(b, n, sum->n), n + 1, columns->n);
    out = tsh_matmul(a, b);
    if (out && !columns->n) out = tsh_squeeze(out, n + 1);
    if (out && !rows->n) out = tsh_squeeze(out, n);
    for (i = 0; i < lo.n; i++) shape.dim[shape.ndim++] = e->size[lo.label[i]];
    if (out && (merged || rows->n > 1 || columns->n > 1)) out = tsh_reshape(out, shape);
    return tshi_einsum_ordered(out, &lo, &e->out);
}

/* Returns the product of both inputs. */
static tsh_tensor *tshi_einsum_product(const tshi_einsum *e) {
    const tshi_einsum_list batch = tshi_einsum_collect(e, 0, TSHI_EINSUM_SHARED_KEPT);
    const tshi_einsum_list sum = tshi_einsum_collect(e, 0, TSHI_EINSUM_SHARED_SUMMED);
    const tshi_einsum_list rows = tshi_einsum_collect(e, 0, TSHI_EINSUM_OWN);
    const tshi_einsum_list columns = tshi_einsum_collect(e, 1, TSHI_EINSUM_OWN);
    tshi_einsum_list order = e->out;
    if (!sum.n) return tshi_einsum_multiply(e, &order, 0);
    /* Many dot products: a matrix product for each pair of vectors would take longer. (Not for
     * 16-bit inputs: tsh_mul would round the products before they are summed.) */
    if (batch.n && !rows.n && !columns.n && e->t[0]->dtype == TSH_REAL &&
        e->t[1]->dtype == TSH_REAL) {
        tshi_einsum_join(&order, &sum);
        return tshi_einsum_multiply(e, &order, sum.n);
    }
    return tshi_einsum_matmul(e, &batch, &sum, &rows, &columns);
}

TSH_API tsh_tensor *tsh_einsum(const char *equation, tsh_tensor *a, tsh_tensor *b) {
    tshi_einsum e;
    int k;
    memset(&e, 0, sizeof e);
    e.t[0] = a;
    e.t[1] = b;
    e.inputs = b ? 2 : 1;
    e.equation = equation;
    e.ctx = tshi_tensor_check_floating("tsh_einsum", "a b", e.t, e.inputs);
    if (!e.ctx) return NULL;
    if (!equation)
        return tshi_error_null(e.ctx, TSH_ERR_ARGUMENT, "tsh_einsum: the equation is NULL");
    for (k = 0; k < TSHI_EINSUM_LABELS; k++) e.size[k] = -1; /* not known yet */
    if (!tshi_einsum_read(&e)) return NULL;
    for (k = 0; k < e.inputs; k++)
        if (!tshi_einsum_lengths(&e, k)) return NULL;
    for (k = 0; k < e.inputs; k++)
        if (!tshi_einsum_reduce(&e, k)) return NULL;
    if (!b) return tshi_einsum_ordered(e.t[0], &e.in[0], &e.out);
    return tshi_einsum_layouts(&e) ? tshi_einsum_product(&e) : NULL;
}
