/* ========================================================================== */
/* >>op-interpolate                          MARK: - op-interpolate (private) */
/* Images of another size: the nearest element, or linear between elements.   */
/* Needs: >>op-view >>op-pool.                                                */
/* ========================================================================== */

/* Along one dimension: the two input elements between which an output element lies, and their
 * weights, whose sum is 1. With TSH_NEAREST, the second weight is 0. */
typedef struct tshi_between {
    int32_t at[2];
    tsh_real part[2];
} tshi_between;

/* The params of the node. c: sizes of input (image) and output (map); its batch is the number of
 * planes. The node's aux has the tshi_between of each row, then of each column of the output. */
typedef struct tshi_interpolate {
    tshi_conv c;
    int linear, align;
    double scale[2]; /* the caller's scale factor; 0: output size / input size */
} tshi_interpolate;

/* What the threads share while they compute an output or a gradient. */
typedef struct tshi_interpolating {
    const tshi_interpolate *how;
    const tshi_between *rows, *columns;
    tsh_real *x, *y; /* planes of input and output, or their gradients */
    int add;         /* backward: 1: adds to x's gradient, 0: overwrites it */
} tshi_interpolating;

/* Fills in a tshi_between for each output element along dimension d: 0, rows, or 1, columns.
 * Computes positions as torch's area_pixel_compute_source_index does, in tsh_real. */
static void tshi_interpolate_table(const tshi_interpolate *how, int d, tshi_between *to) {
    const int64_t n = how->c.image[d], outs = how->c.map[d];
    const tsh_real given = how->scale[d] > 0 ? TSHI_R(1 / how->scale[d]) : TSHI_R(n) / TSHI_R(outs);
    const int aligned = how->linear && how->align;
    const tsh_real corner = outs > 1 ? TSHI_R(n - 1) / TSHI_R(outs - 1) : 0;
    const tsh_real scale = aligned ? corner : given; /* input elements per output element */
    for (int64_t i = 0; i < outs; i++, to++) {
        tsh_real at = aligned || !how->linear ? TSHI_R(i) * scale
                                              : scale * (TSHI_R(i) + TSHI_R(0.5)) - TSHI_R(0.5);
        const int64_t last = n - 1;
        int64_t first;
        if (at < 0) at = 0;
        first = at < TSHI_R(last) ? (int64_t)at : last;
        to->at[0] = (int32_t)first;
        to->at[1] = (int32_t)(how->linear && first < last ? first + 1 : first);
        to->part[1] = how->linear ? at - TSHI_R(first) : 0;
        if (to->part[1] > 1) to->part[1] = 1;
        to->part[0] = 1 - to->part[1];
    }
}

/* Computes rows [from, to) of the output, counted over all planes (a tshi_team_fn). */
static void tshi_interpolate_rows(void *job, int piece, int64_t from, int64_t to) {
    const tshi_interpolating *p = (const tshi_interpolating *)job;
    const tshi_conv *c = &p->how->c;
    (void)piece;
    for (int64_t i = from; i < to; i++) {
        const tshi_between row = p->rows[i % c->map[0]];
        const tsh_real *plane = p->x + i / c->map[0] * tshi_conv_area(c->image);
        const tsh_real *a = plane + row.at[0] * c->image[1], *b = plane + row.at[1] * c->image[1];
        tsh_real *y = p->y + i * c->map[1];
        if (!p->how->linear)
            for (int64_t j = 0; j < c->map[1]; j++) y[j] = a[p->columns[j].at[0]];
        else
            for (int64_t j = 0; j < c->map[1]; j++) {
                const tshi_between *l = &p->columns[j];
                y[j] = row.part[0] * (l->part[0] * a[l->at[0]] + l->part[1] * a[l->at[1]]) +
                       row.part[1] * (l->part[0] * b[l->at[0]] + l->part[1] * b[l->at[1]]);
            }
    }
}

/* Computes the gradient of planes [from, to) of the input (a tshi_team_fn). */
static void tshi_interpolate_planes(void *job, int piece, int64_t from, int64_t to) {
    const tshi_interpolating *p = (const tshi_interpolating *)job;
    const tshi_conv *c = &p->how->c;
    const int64_t area = tshi_conv_area(c->image);
    (void)piece;
    for (int64_t n = from; n < to; n++) {
        tsh_real *x = p->x + n * area;
        const tsh_real *g = p->y + n * tshi_conv_area(c->map);
        if (!p->add) memset(x, 0, (size_t)area * sizeof *x);
        for (int64_t i = 0; i < c->map[0]; i++, g += c->map[1])
            for (int k = 0; k <= p->how->linear; k++) { /* the input rows before and after */
                tsh_real *row = x + p->rows[i].at[k] * c->image[1];
                const tsh_real part = p->rows[i].part[k];
                for (int64_t j = 0; j < c->map[1]; j++) {
                    const tshi_between *l = &p->columns[j];
                    row[l->at[0]] += part * l->part[0] * g[j];
                    if (p->how->linear) row[l->at[1]] += part * l->part[1] * g[j];
                }
            }
    }
}

/* Returns what the threads share in a call with these params and this aux; x, y and add are not set
 * yet. */
static tshi_interpolating tshi_interpolate_job(const tshi_interpolate *how, tshi_block *aux) {
    tshi_interpolating p = {how, (const tshi_between *)tshi_mem_data(aux), NULL, NULL, NULL, 0};
    p.columns = p.rows + how->c.map[0];
    return p;
}

static void tshi_interpolate_backward(tshi_node *node) {
    const tshi_interpolate *how = (const tshi_interpolate *)node->params;
    tshi_interpolating p = tshi_interpolate_job(how, node->aux);
    tshi_dest dest;
    if (!tshi_tape_dest(node, 0, &dest)) return;
    p.x = dest.data;
    p.y = tshi_tape_grad(node);
    p.add = dest.add;
    tshi_team_run(node->out->ctx,
                  tshi_kernel_parts(node->out->ctx, how->c.batch, tshi_conv_area(how->c.map)),
                  how->c.batch, 1, tshi_interpolate_planes, &p);
}

/* Fills in *how from x and the options. Returns 0 and an error if they are not valid. */
static int tshi_interpolate_sizes(const tsh_tensor *x, const tsh_interpolate_options *o,
                                  tshi_interpolate *how) {
    const char *const op = "tsh_interpolate";
    const int dims = x->ndim == 3 ? 1 : 2;
    if (!tshi_pool_image(op, x, dims, &how->c)) return 0;
    if (!o || (unsigned)o->mode > (unsigned)TSH_BILINEAR ||
        (o->align_corners && o->mode != TSH_BILINEAR))
        return tsh_fail(x->ctx, TSH_ERR_ARGUMENT, "%s: %s", op,
                        !o ? "there are no options, and no size"
                        : o->align_corners
                            ? "align_corners is for TSH_BILINEAR"
                            : "the mode is neither TSH_NEAREST nor TSH_BILINEAR") == TSH_OK;
    how->linear = o->mode == TSH_BILINEAR;
    how->align = o->align_corners != 0;
    how->c.map[0] = 1;
    for (int d = 0; d < dims; d++) {
        const int to = 2 - dims + d;
        const double size = o->size[d] ? (double)o->size[d]
                                       : floor((double)how->c.image[to] * o->scale[d]);
        if (!o->size[d] == !(o->scale[d] > 0) || !(size >= 1) || size > (double)TSHI_CONV_MOST)
            return tsh_fail(x->ctx, TSH_ERR_ARGUMENT,
                            "%s: size[%d] is %lld and scale[%d] %g, for a dimension of %lld; takes "
                            "one of them, above 0, that gives 1 to %d elements",
                            op, d, (long long)o->size[d], d, o->scale[d],
                            (long long)how->c.image[to], TSHI_CONV_MOST) == TSH_OK;
        how->c.map[to] = (int64_t)size;
        how->scale[to] = o->size[d] ? 0 : o->scale[d];
    }
    return 1;
}

static const tshi_op tshi_interpolate_op = {"tsh_interpolate",         "x",       tshi_rule_pool,
                                            tshi_interpolate_backward, TSHI_NONE, 0};

TSH_API tsh_tensor *tsh_interpolate(tsh_tensor *x, const tsh_interpolate_options *options) {
    const tshi_op *op = &tshi_interpolate_op;
    tsh_ctx *ctx = tshi_tensor_check_floating("tsh_interpolate", op->inputs, &x, 1);
    const int linear = 1; /* the op is linear, so x may be a partial sum */
    tshi_interpolate how;
    tshi_interpolating p;
    tshi_output output;
    tsh_tensor *out;
    tshi_block *aux, *scratch[2] = {NULL, NULL};
    memset(&how, 0, sizeof how);
    if (!ctx || !tshi_interpolate_sizes(x, options, &how) ||
        !tshi_rule_run(op, &x, 1, &linear, &output))
        return NULL;
    output.shape = tsh_shape_of(x);
    for (int d = 2; d < x->ndim; d++) output.shape.dim[d] = how.c.map[d - x->ndim + 2];
    if (!tshi_tensor_is_dense(x) && !(x = tshi_op_copy("tsh_interpolate", x))) return NULL;
    out = tshi_tensor_out(ctx, "tsh_interpolate", x->dtype, &output.shape, &output.layout);
    aux = out ? tshi_mem_alloc(ctx, TSH_MEM_STEP,
                               (size_t)(how.c.map[0] + how.c.map[1]) * sizeof(tshi_between))
              : NULL;
    if (!aux) return NULL;
    tshi_interpolate_table(&how, 0, (tshi_between *)tshi_mem_data(aux));
    tshi_interpolate_table(&how, 1, (tshi_between *)tshi_mem_data(aux) + how.c.map[0]);
    p = tshi_interpolate_job(&how, aux);
    p.x = tshi_kernel_packed_reals(x, &scratch[0]);
    p.y = tshi_kernel_output(out, &scratch[1]);
    if (p.x && p.y && ctx->error.code == TSH_OK)
        tshi_team_run(ctx, tshi_kernel_parts(ctx, how.c.batch * how.c.map[0], how.c.map[1]),
                      how.c.batch * how.c.map[0], 1, tshi_interpolate_rows, &p);
    if (p.y) tshi_kernel_output_done(out, scratch[1]);
    tshi_mem_release(ctx, scratch[0]);
    tshi_op_record(op, out, &x, 1, output.partial, &how, sizeof how, aux);
    return ctx->error.code == TSH_OK ? out : NULL;
}

TSH_API tsh_tensor *tsh_pixel_shuffle(tsh_tensor *x, int64_t r) {
    static const int order[6] = {0, 1, 4, 2, 5, 3};
    tsh_ctx *ctx = tshi_tensor_check("tsh_pixel_shuffle", "x", &x, 1);
    tsh_shape split = {6, {0}};
    char text[TSHI_TEXT_SIZE];
    if (!ctx) return NULL;
    if (x->ndim != 4 || r < 1 || r > TSHI_CONV_MOST || x->dim[1] % (r * r) ||
        x->dim[2] > TSHI_CONV_MOST || x->dim[3] > TSHI_CONV_MOST)
        return tshi_error_null(ctx, TSH_ERR_SHAPE,
                               "tsh_pixel_shuffle: x is %s and the factor %lld; takes (N, C, H, W) "
                               "with channels that divide by its square",
                               tshi_tensor_text(x, text), (long long)r);
    split.dim[0] = x->dim[0];
    split.dim[1] = x->dim[1] / (r * r);
    split.dim[2] = split.dim[3] = r;
    split.dim[4] = x->dim[2];
    split.dim[5] = x->dim[3];
    const tsh_shape whole = tsh_shape4(split.dim[0], split.dim[1], x->dim[2] * r, x->dim[3] * r);
    x = tsh_permute(tsh_reshape(x, split), order);
    return x ? tsh_reshape(x, whole) : NULL;
}
