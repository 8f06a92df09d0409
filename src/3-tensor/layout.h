/* ========================================================================== */
/* >>layout                                          MARK: - layout (private) */
/* Layouts, and which rank owns which part of a sharded dimension.            */
/* Needs: >>text.                                                             */
/* ========================================================================== */

/* A layout that a user passes may have defaults (dim -1, segments 0, lengths and units 0).
 * tshi_layout_resolve replaces them by values. Layouts of tensors are resolved, and functions that
 * compare two layouts require that both are. Only tshi_layout_own decides which rank owns an
 * element. */

TSH_API tsh_layout tsh_replicated(void) {
    tsh_layout layout;
    memset(&layout, 0, sizeof layout);
    return layout;
}

TSH_API tsh_layout tsh_partial(void) {
    tsh_layout layout = tsh_replicated();
    layout.kind = TSH_PARTIAL;
    return layout;
}

TSH_API tsh_layout tsh_sharded(int dim) {
    return tsh_shard_segments(dim, 1, 1);
}

TSH_API tsh_layout tsh_shard_units(int dim, int64_t unit) {
    return tsh_shard_segments(dim, 1, unit);
}

TSH_API tsh_layout tsh_shard_segments(int dim, int segments, int64_t unit) {
    tsh_layout layout = tsh_replicated();
    layout.kind = TSH_SHARDED;
    layout.dim = dim;
    layout.segments = segments;
    for (int s = 0; s < segments && s < TSH_MAX_SEGMENTS; s++) layout.segment[s].unit = unit;
    return layout;
}

/* Sets *out to segment s of a layout, defaults resolved, for a dimension of `length` elements.
 * Returns 0 if the layout does not fit that dimension, else 1. */
static int tshi_layout_segment(const tsh_layout *layout, int64_t length, int s, tsh_segment *out) {
    int n = layout->segments ? layout->segments : 1; /* number of segments */
    *out = layout->segment[s];
    if (n < 1 || n > TSH_MAX_SEGMENTS || out->length < 0 || out->length > length || out->unit < 0)
        return 0;
    if (!out->unit) out->unit = 1;
    if (!out->length) {
        int i;
        for (i = 0; i < n; i++)
            if (layout->segment[i].length) return 1; /* lengths are given, and segment s has length
                                                      * 0 */
        if (length % n) return 0;
        out->length = length / n;
    }
    return out->length % out->unit == 0;
}

/* Returns how many of a segment's `units` units the ranks below r own, so that rank r owns those
 * from there on. */
static int64_t tshi_layout_before(const tshi_deal *deal, int64_t units, int r) {
    const int64_t all = deal->before ? deal->before[deal->ranks] : 0;
    /* torch.chunk's rule: the last ranks may own fewer units than the others, or none */
    if (!deal->before) return tshi_base_min(r * tshi_base_ceil(units, deal->ranks), units);
    /* units * before[r] / all, rounded to nearest, without overflow */
    return units / all * deal->before[r] + (units % all * deal->before[r] + all / 2) / all;
}

static int64_t tshi_layout_own(const tsh_layout *layout, int64_t length, const tshi_deal *deal,
                               int rank, tsh_range ranges[TSH_MAX_SEGMENTS]) {
    int s, n = layout->segments ? layout->segments : 1;
    /* start: index of the first element of segment s; owned: number of elements that the rank owns
     * in the segments before it */
    int64_t start = 0, owned = 0;
    if (length < 0 || length > INT64_MAX / 4 || rank < 0 || rank >= deal->ranks || n < 1) return -1;
    if (layout->kind != TSH_SHARDED) { /* every rank owns all elements */
        if (ranges) ranges[0].start = 0;
        if (ranges) ranges[0].length = length;
        return length;
    }
    for (s = 0; s < n; s++) {
        tsh_segment segment;
        int64_t units, from, to; /* the rank owns elements [from, to) of the segment */
        if (!tshi_layout_segment(layout, length, s, &segment)) return -1;
        units = segment.length / segment.unit;
        from = tshi_layout_before(deal, units, rank) * segment.unit;
        to = tshi_layout_before(deal, units, rank + 1) * segment.unit;
        if (ranges) ranges[s].start = start + from;
        if (ranges) ranges[s].length = to - from;
        owned += to - from;
        start += segment.length;
    }
    return start == length ? owned : -1; /* -1: the segments do not add up to the dimension */
}

TSH_API int64_t tsh_shard_range(tsh_layout layout, int64_t length, int size, int rank,
                                tsh_range ranges[TSH_MAX_SEGMENTS]) {
    const tshi_deal equal = {size, NULL};
    return tshi_layout_own(&layout, length, &equal, rank, ranges);
}

TSH_API int64_t tsh_tp_shard_range(tsh_ctx *ctx, tsh_layout layout, int64_t length, int rank,
                                   tsh_range ranges[TSH_MAX_SEGMENTS]) {
    return ctx ? tshi_layout_own(&layout, length, &ctx->deal, rank, ranges) : -1;
}

/* Returns 1 if a sharded layout has one segment, no defaults left, and fits a tensor of shape
 * dim. */
static int tshi_layout_is_resolved(const tsh_layout *layout, int ndim, const int64_t *dim) {
    const tsh_segment *only = &layout->segment[0];
    return layout->segments == 1 && layout->dim >= 0 && layout->dim < ndim && only->unit > 0 &&
           only->length > 0 && only->length == dim[layout->dim] &&
           (only->unit == 1 || only->length % only->unit == 0) &&
           !(only[1].length | only[1].unit | only[2].length | only[2].unit | only[3].length |
             only[3].unit);
}

/* Resolves every default of a layout for a tensor of shape dim, an array of ndim lengths. Returns 0
 * if the layout does not fit that shape, else 1. */
static int tshi_layout_resolve(tsh_layout *layout, int ndim, const int64_t *dim) {
    if ((unsigned)layout->kind > (unsigned)TSH_PARTIAL) return 0;
    if (layout->kind == TSH_SHARDED && tshi_layout_is_resolved(layout, ndim, dim)) return 1;
    if (layout->kind != TSH_SHARDED) {
        layout->dim = layout->segments = 0; /* not used: 0, so that layouts can be compared */
        memset(layout->segment, 0, sizeof layout->segment);
        return 1;
    }
    const tshi_deal one = {1, NULL};
    tsh_layout given = *layout;
    given.dim = layout->dim < 0 ? layout->dim + ndim : layout->dim;
    given.segments = layout->segments ? layout->segments : 1;
    if (given.dim < 0 || given.dim >= ndim ||
        tshi_layout_own(layout, dim[given.dim], &one, 0, NULL) < 0)
        return 0;
    *layout = given;
    memset(layout->segment, 0, sizeof layout->segment);
    for (int s = 0; s < given.segments; s++)
        (void)tshi_layout_segment(&given, dim[given.dim], s, &layout->segment[s]);
    return 1;
}

/* Returns 1 if two resolved sharded layouts give each rank the same elements of a dimension of
 * `length` elements. */
static int tshi_layout_same_shards(const tsh_layout *a, const tsh_layout *b, int64_t length,
                                   const tshi_deal *deal) {
    /* ra, rb: the rank's elements of each segment, by layout a and by layout b */
    tsh_range ra[TSH_MAX_SEGMENTS], rb[TSH_MAX_SEGMENTS];
    if (!length) return 1; /* no rank owns anything */
    if (a->segments != b->segments) return 0;
    if (memcmp(a->segment, b->segment, sizeof a->segment) == 0) return 1;
    for (int rank = 0; rank < deal->ranks; rank++) {
        if (tshi_layout_own(a, length, deal, rank, ra) < 0 ||
            tshi_layout_own(b, length, deal, rank, rb) < 0)
            return 0;
        for (int s = 0; s < a->segments; s++)
            if (ra[s].length != rb[s].length || (ra[s].length && ra[s].start != rb[s].start))
                return 0;
    }
    return 1;
}

/* Returns 1 if two resolved layouts give each rank the same elements of a tensor. */
TSHI_OUTLINE int tshi_layout_equal(const tsh_layout *a, const tsh_layout *b, const int64_t *dim,
                                   const tshi_deal *deal) {
    if (a->kind != b->kind) return 0;
    if (a->kind != TSH_SHARDED) return 1;
    return a->dim == b->dim && tshi_layout_same_shards(a, b, dim[a->dim], deal);
}

/* Returns 1 if two resolved layouts have the same fields; stricter than tshi_layout_equal. */
static int tshi_layout_identical(const tsh_layout *a, const tsh_layout *b) {
    return a->kind == b->kind && a->dim == b->dim && a->segments == b->segments &&
           memcmp(a->segment, b->segment, sizeof a->segment) == 0;
}

/* Writes a layout to text, as tsh_layout_text does, but takes a pointer; writes "R" if it is
 * NULL. */
static char *tshi_layout_text(const tsh_layout *layout, char *text, size_t size) {
    if (!size || !text) return text;
    text[0] = '\0';
    if (!layout || layout->kind != TSH_SHARDED) {
        tsh_text_add(text, size, layout && layout->kind == TSH_PARTIAL ? "P" : "R");
    } else {
        tsh_text_add(text, size, "S(%d", layout->dim);
        if (layout->segments > 1) tsh_text_add(text, size, ", %d segments", layout->segments);
        if (layout->segment[0].unit > 1)
            tsh_text_add(text, size, ", unit %lld", (long long)layout->segment[0].unit);
        tsh_text_add(text, size, ")");
    }
    return text;
}

TSH_API char *tsh_layout_text(tsh_layout layout, char *text, size_t size) {
    return tshi_layout_text(&layout, text, size);
}
