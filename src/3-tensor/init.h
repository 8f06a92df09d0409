/* ========================================================================== */
/* >>init                                              MARK: - init (private) */
/* Initial values of parameters and tensors: constant, random, orthogonal.    */
/* Needs: >>rng >>tensor-exact.                                               */
/* ========================================================================== */

/* What tshi_init_fill needs to compute each element of a shard from its global index, so that
 * values do not depend on the degree of tp. tshi_init_resolve sets its fields, and reduces all
 * kinds of tsh_init to six. */
typedef struct tshi_tensor_filling {
    uint64_t key, stream; /* key: the ctx's seed; stream: random number stream (see >>rng) */
    /* init.kind is CONSTANT, UNIFORM, NORMAL, TRUNC_NORMAL, ORTHOGONAL or DIRAC */
    tsh_init init;
    double from, to; /* TRUNC_NORMAL: the normal CDF at init.low and at init.high */
    /* ORTHOGONAL, DIRAC: the whole tensor as a matrix: rows is dim 0, cols the product of the
     * others */
    int64_t rows, cols;
    int64_t step, first; /* DIRAC: row i is 1 in column first + i * step, and 0 elsewhere */
    /* ORTHOGONAL: the matrix Q (rows, cols); where rows >= cols, its transpose (cols, rows) */
    const double *whole;
} tshi_tensor_filling;

static tsh_init tshi_init_make(tsh_init_kind kind, double a, double b) {
    tsh_init init;
    memset(&init, 0, sizeof init); /* fields that are not set below stay 0 */
    init.kind = kind;
    init.a = a;
    init.b = b;
    return init;
}

/* Returns the initial value of element e (global, row-major index) of the tensor. */
static double tshi_init_element(const tshi_tensor_filling *f, int64_t e) {
    const tsh_init *init = &f->init;
    const uint64_t at = (uint64_t)e;
    const int64_t row = f->cols ? e / f->cols : 0, col = f->cols ? e % f->cols : 0;
    switch (init->kind) {
    case TSH_INIT_CONSTANT: return init->a;
    case TSH_INIT_UNIFORM:
        return init->a + (init->b - init->a) * tshi_rng_uniform(f->key, f->stream, at);
    case TSH_INIT_NORMAL: return init->a + init->b * tshi_rng_normal(f->key, f->stream, at);
    case TSH_INIT_DIRAC:
        return col == f->first + row * f->step && row * f->step < f->cols ? 1 : 0;
    case TSH_INIT_ORTHOGONAL:
        return init->gain * f->whole[f->rows >= f->cols ? col * f->rows + row : e];
    default: break; /* TRUNC_NORMAL: computed below */
    }
    double u = ((double)tshi_rng_bits(f->key, f->stream, at) + 0.5) / 4294967296.0; /* in (0, 1) */
    double x = init->a + init->b * tshi_rng_quantile(f->from + u * (f->to - f->from));
    return x < init->low ? init->low : x > init->high ? init->high : x;
}

/* Converts an init of a Kaiming or Xavier kind to the UNIFORM or NORMAL one that it stands for: the
 * width of that distribution depends on the tensor's fan_in and fan_out. op: function name for
 * errors. */
static tsh_result tshi_init_fans(const tsh_tensor *t, const char *op, tsh_init *init) {
    int kaiming = init->kind == TSH_INIT_KAIMING_UNIFORM || init->kind == TSH_INIT_KAIMING_NORMAL;
    int normal = init->kind == TSH_INIT_KAIMING_NORMAL || init->kind == TSH_INIT_XAVIER_NORMAL;
    double rest = t->ndim > 2 ? (double)tshi_tensor_product(t->dim + 2, t->ndim - 2) : 1;
    double in = (double)t->fan_in, out = 0, fan, size; /* size: bound or deviation */
    char text[TSHI_TEXT_SIZE];
    if (t->ndim > 1) {
        out = t->fan_in > 0 ? (double)tsh_numel(t) / in : (double)t->dim[0] * rest;
        in = t->fan_in > 0 ? in : (double)t->dim[1] * rest;
    } else if (t->fan_in <= 0 || (kaiming && init->fan_out)) {
        return tsh_fail(t->ctx, TSH_ERR_SHAPE,
                        "%s: kaiming and xavier take their fans from two dimensions or more, (out, "
                        "in, ..), not from %s",
                        op, tshi_tensor_text(t, text));
    }
    fan = kaiming ? (init->fan_out ? out : in) * (1 + init->a * init->a) : in + out;
    size = init->gain * sqrt((normal ? 2.0 : 6.0) / (fan > 0 ? fan : 1));
    *init = tshi_init_make(normal ? TSH_INIT_NORMAL : TSH_INIT_UNIFORM, normal ? 0 : -size, size);
    return TSH_OK;
}

/* Prepares TRUNC_NORMAL: resolves the defaults of low and high, and sets f->from and f->to to the
 * normal CDF at these two bounds. If low and high lie above the mean, mirrors the distribution
 * (init->b is negated), because the CDF is more exact near 0 than near 1. */
static tsh_result tshi_init_truncate(const tsh_tensor *t, const char *op, tshi_tensor_filling *f) {
    tsh_init *init = &f->init;
    if (init->low == 0 && init->high == 0) {
        init->low = -2;
        init->high = 2;
    }
    if (!(init->low < init->high) || !(init->b >= 0))
        return tsh_fail(t->ctx, TSH_ERR_ARGUMENT,
                        "%s: a normal distribution of deviation %g cannot be cut to [%g, %g]", op,
                        init->b, init->low, init->high);
    if (init->low > init->a) init->b = -init->b;
    f->from = f->to = 0.5;
    if (init->b == 0) return TSH_OK; /* deviation 0: every value is the mean, clamped */
    f->from = tshi_rng_cdf((init->low - init->a) / init->b);
    f->to = tshi_rng_cdf((init->high - init->a) / init->b);
    return TSH_OK;
}

/* Computes v -= (q . v) q, n elements each: makes v orthogonal to the unit vector q. */
static void tshi_init_project(double *TSHI_RESTRICT v, const double *TSHI_RESTRICT q, int64_t n) {
    double lane[8] = {0}; /* 8 partial sums of q . v, one per SIMD lane; added in a fixed order */
    int64_t i;
    for (i = 0; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; j++) lane[j] += q[i + j] * v[i + j];
    for (int j = 0; i < n; i++, j++) lane[j] += q[i] * v[i];
    for (int j = 0; j < 4; j++) lane[j] += lane[j + 4];
    const double dot = (lane[0] + lane[2]) + (lane[1] + lane[3]);
    for (i = 0; i < n; i++) v[i] -= dot * q[i];
}

/* Computes f->whole: Q of the QR decomposition of a random normal matrix, by modified Gram-Schmidt,
 * twice for each vector (Giraud et al. 2005). R's diagonal is positive, which makes Q unique.
 * Returns the memory block that holds f->whole, for the caller to release. Without memory, returns
 * NULL and records an error. */
static tshi_block *tshi_init_orthogonal(const tsh_tensor *t, tshi_tensor_filling *f) {
    int tall = f->rows >= f->cols, pass;
    /* What Gram-Schmidt makes orthogonal: `count` vectors of `length` elements, the columns of a
     * tall matrix, else the rows. */
    int64_t count = tall ? f->cols : f->rows, length = tall ? f->rows : f->cols, i, j, k;
    tshi_block *block = tshi_mem_alloc(t->ctx, TSH_MEM_STEP,
                                       tshi_dtype_bytes(TSH_F64, count * length));
    double *q = block ? (double *)tshi_mem_data(block) : NULL; /* the `count` vectors */
    f->whole = q;
    for (j = 0; j < count && q; j++) {
        double *v = q + j * length, norm = 0; /* v: vector j; norm: its length */
        for (i = 0; i < length; i++)
            v[i] = tshi_rng_normal(f->key, f->stream,
                                   (uint64_t)(tall ? i * f->cols + j : j * f->cols + i));
        for (pass = 0; pass < 2; pass++)
            for (k = 0; k < j; k++) tshi_init_project(v, q + k * length, length);
        for (i = 0; i < length; i++) norm += v[i] * v[i];
        for (norm = sqrt(norm), i = 0; i < length; i++) v[i] /= norm;
    }
    return block;
}

/* Resolves f->init to one of the six kinds that tshi_tensor_filling lists, and sets the fields of f
 * that this kind needs, except f->whole. */
static tsh_result tshi_init_resolve(const tsh_tensor *t, const char *op, tshi_tensor_filling *f) {
    tsh_init *init = &f->init;
    char text[TSHI_TEXT_SIZE];
    int d;
    if (init->gain == 0) init->gain = 1;
    if (init->kind == TSH_INIT_ZEROS || init->kind == TSH_INIT_ONES)
        *init = tshi_init_make(TSH_INIT_CONSTANT, init->kind == TSH_INIT_ONES, 0);
    switch (init->kind) {
    case TSH_INIT_KAIMING_UNIFORM:
    case TSH_INIT_KAIMING_NORMAL:
    case TSH_INIT_XAVIER_UNIFORM:
    case TSH_INIT_XAVIER_NORMAL: return tshi_init_fans(t, op, init);
    case TSH_INIT_TRUNC_NORMAL: return tshi_init_truncate(t, op, f);
    case TSH_INIT_ORTHOGONAL:
    case TSH_INIT_DIRAC:
        if (t->ndim < 2)
            return tsh_fail(t->ctx, TSH_ERR_SHAPE, "%s: takes two dimensions or more, not %s", op,
                            tshi_tensor_text(t, text));
        f->rows = t->dim[0];
        f->cols = tshi_tensor_product(t->dim + 1, t->ndim - 1);
        f->step = tshi_tensor_product(t->dim + 2, t->ndim - 2); /* columns per index of dim 1 */
        for (d = 2, f->first = 0; d < t->ndim; d++) f->first = f->first * t->dim[d] + t->dim[d] / 2;
        break; /* f->first is the column of index (0, middle, middle, ...) of dims 1, 2, ... */
    default: break;
    }
    return TSH_OK;
}

/* Sets a dense tensor's local elements to initial values. An element's value depends on its global
 * index, not on the degree of tp. op: function name for errors; stream: random number stream. */
static tsh_result tshi_init_fill(tsh_tensor *t, const char *op, tsh_init init, uint64_t stream) {
    enum { BLOCK = 256 };
    const tshi_dtype *dtype = &tshi_dtypes[t->dtype];
    tshi_tensor_filling f = TSHI_ZERO;
    tshi_runs run = tshi_tensor_own_runs(t);
    tshi_block *block = NULL;
    tsh_real value[BLOCK];
    f.key = t->ctx->seed;
    f.stream = stream;
    f.init = init;
    if (tshi_init_resolve(t, op, &f) != TSH_OK) return t->ctx->error.code; /* nothing written yet */
    if (f.init.kind == TSH_INIT_ORTHOGONAL && !(block = tshi_init_orthogonal(t, &f)))
        return TSH_ERR_MEMORY;
    while (tshi_tensor_next_run(&run))
        for (int64_t e = 0, n; e < run.length; e += n) {
            /* filled: 1 if value[] holds the constant from the block before */
            const int filled = e > 0 && f.init.kind == TSH_INIT_CONSTANT;
            n = tshi_base_min(BLOCK, run.length - e);
            for (int64_t i = 0; i < n && !filled; i++)
                value[i] = TSHI_R(tshi_init_element(&f, run.global + e + i));
            dtype->store((char *)tshi_tensor_at(t) + tshi_dtype_bytes(t->dtype, run.local + e), 1,
                         n, value);
        }
    tshi_mem_release(t->ctx, block);
    return TSH_OK;
}

/* Sets a parameter to initial values; allocates it first if necessary. After an error, the
 * parameter has the values that it had before, or is still not allocated. */
static TSHI_COLD tsh_result tshi_init_fill_param(tsh_tensor *t, const char *op, tsh_init init) {
    int had = t->block != NULL; /* 1: t had memory before this call */
    if (!had)
        t->block = tshi_mem_alloc(t->ctx, TSH_MEM_PARAMETERS,
                                  tshi_dtype_bytes(t->dtype, tsh_local_numel(t)));
    if (!t->block) return TSH_ERR_MEMORY;
    if (t->ctx->dry) return TSH_OK;
    if (tshi_init_fill(t, op, init, tshi_rng_hash(0, t->path, strlen(t->path))) == TSH_OK) {
        tshi_tensor_forget_exact(t);
    } else if (!had) {
        tshi_mem_release(t->ctx, t->block);
        t->block = NULL;
    }
    return t->ctx->error.code;
}

/* Sets a parameter to the initial values that t->init describes. If t->zero_row is not 0, the row
 * with global index t->zero_row - 1 is set to zeros. */
static tsh_result tshi_init_apply(tsh_tensor *t) {
    const tsh_result result = tshi_init_fill_param(t, t->path, t->init);
    const int64_t row = t->zero_row ? tshi_tensor_local(t, 0, t->zero_row - 1) : -1;
    if (result != TSH_OK || row < 0 || t->ctx->dry) return result;
    const int64_t width = tshi_tensor_product(t->local + 1, t->ndim - 1);
    /* The exact weights of the row become 0, too: tshi_init_fill_param has cleared t->low. */
    memset((char *)tshi_tensor_at(t) + tshi_dtype_bytes(t->dtype, row * width), 0,
           tshi_dtype_bytes(t->dtype, width));
    return TSH_OK;
}

/* On a parameter's first use, allocates it and sets its initial values. It is an error if only
 * other stages of the pipeline hold the parameter. */
static tsh_result tshi_init_materialize(tsh_tensor *t) {
    if (t->absent)
        return tsh_fail(t->ctx, TSH_ERR_STATE,
                        "\"%s\" is held by stage %d of the pipeline; this rank is of stage %d",
                        t->path, t->stage - 1, t->ctx->pp.rank);
    return t->block || !(t->flags & TSHI_PARAM) ? TSH_OK : tshi_init_apply(t);
}
