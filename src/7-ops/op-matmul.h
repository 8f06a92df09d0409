/* ========================================================================== */
/* >>op-matmul                                    MARK: - op-matmul (private) */
/* Products of matrices, by the ctx's gemm and the rank's threads.            */
/* Needs: >>gemm-api >>tape-backward >>rule.                                  */
/* ========================================================================== */

/* Matrix products are computed by tshi_matmul_run, which divides them among threads; exceptions are
 * those of attention, convolutions, the time steps of recurrent layers, and tshi_quant_product. A
 * tshi_matrix has strides for rows and columns, so that transposes and slices are not copied. */

/* Returns at least `bytes` of scratch for the built-in gemm: one block of the ctx, which grows as
 * needed. NULL: no memory. */
static char *tshi_matmul_scratch(tsh_ctx *ctx, size_t bytes) {
    if (!ctx->gemm_scratch || ctx->gemm_scratch->size < bytes) {
        tshi_mem_release(ctx, ctx->gemm_scratch);
        ctx->gemm_scratch = tshi_mem_alloc(ctx, TSH_MEM_BOOKS, bytes);
    }
    return ctx->gemm_scratch ? (char *)tshi_mem_data(ctx->gemm_scratch) : NULL;
}

/* A matrix product that threads share: each computes a piece of C. */
typedef struct tshi_products {
    const tsh_ctx *ctx;
    tshi_product whole; /* the whole product, before C is cut into pieces */
    char *scratch;      /* scratch of all pieces, one after the other */
    size_t each;        /* bytes of scratch for a piece */
    int by_rows;        /* 1: pieces are rows of C; 0: columns */
} tshi_products;

/* Computes C = alpha A B + beta D on the calling thread. A user's gemm (tsh_desc.gemm) takes no D:
 * C = beta D is computed first, and the product added to it. */
static void tshi_matmul_alone(const tsh_ctx *ctx, const tshi_product *x, char *scratch) {
    const int apart = x->beta != 0 && x->d.data != x->c.data; /* 1: D is added, and is not C */
    if (!ctx->gemm.multiply) {
        tshi_gemm_run(ctx->gemm_kernel, scratch, *x);
        return;
    }
    if (apart) tshi_gemm_scale(x->m, x->n, x->beta, x->d, x->c);
    ctx->gemm.multiply(x->m, x->n, x->k, x->alpha, (const tsh_real *)x->a.data, x->a.row,
                       x->a.column, (const tsh_real *)x->b.data, x->b.row, x->b.column,
                       apart ? TSHI_R(1) : x->beta, (tsh_real *)x->c.data, x->c.row, x->c.column,
                       tshi_team_spare(ctx), ctx->gemm.user); /* spare: threads the gemm may use */
}

/* Computes the rows or columns [from, to) of C, on any thread (a tshi_team_fn). */
static void tshi_matmul_piece(void *job, int piece, int64_t from, int64_t to) {
    const tshi_products *all = (const tshi_products *)job;
    const int64_t i = all->by_rows ? from : 0, j = all->by_rows ? 0 : from;
    tshi_product part = all->whole;
    *(all->by_rows ? &part.m : &part.n) = to - from; /* part.m by part.n: shape of the piece of C */
    part.a = tshi_gemm_from(part.a, i, 0);           /* rows of A from i on */
    part.b = tshi_gemm_from(part.b, 0, j);           /* columns of B from j on */
    part.d = tshi_gemm_from(part.d, i, j);
    part.c = tshi_gemm_from(part.c, i, j);
    if (piece > 0) part.progress = NULL; /* only the rank's own thread, piece 0, may communicate */
    tshi_matmul_alone(all->ctx, &part, all->scratch + (size_t)piece * all->each);
}

/* Copies the elements of `from`, of shape (rows, columns), to `to`, converted to its dtype. */
static void tshi_matmul_convert(int64_t rows, int64_t columns, tshi_matrix from, tshi_matrix to) {
    for (int64_t i = 0; i < rows; i++) {
        const tshi_operand x = tshi_kernel_operand(tshi_gemm_from(from, i, 0).data, from.column,
                                                   from.dtype);
        const tshi_operand y = tshi_kernel_operand(tshi_gemm_from(to, i, 0).data, to.column,
                                                   to.dtype);
        tshi_kernel_cast(columns, &y, &x);
    }
}

/* Returns m, of shape (rows, columns), in the dtype that the ctx's gemm takes. A user's gemm takes
 * only tsh_real: in place of a matrix of another dtype, returns a new one in *block, which the
 * caller releases (*block is NULL if m itself is returned). input 1: the new matrix gets m's
 * values. */
static tshi_matrix tshi_matmul_converted(tsh_ctx *ctx, tshi_matrix m, int64_t rows, int64_t columns,
                                         int input, tshi_block **block) {
    tshi_matrix reals; /* the new matrix, dense */
    *block = NULL;
    if (m.dtype == TSH_REAL || !ctx->gemm.multiply) return m;
    *block = tshi_mem_alloc(ctx, TSH_MEM_STEP, tshi_dtype_reals(rows * columns));
    if (!*block) return m; /* no memory: the ctx holds the error */
    reals = tshi_gemm_matrix((tsh_real *)tshi_mem_data(*block), columns, 1);
    if (input) tshi_matmul_convert(rows, columns, m, reals);
    return reals;
}

/* Returns the address of the matrix B of the product that followed that with b the last time, to be
 * prefetched; 0: unknown. Also records that b follows the B of the call before. */
static uintptr_t tshi_matmul_then(tshi_matmul_order *order, const void *b) {
    uintptr_t *const then = &order->then[(uintptr_t)b / 64 * 2654435761u % TSHI_MATMUL_ORDER];
    if (order->last) *order->last = (uintptr_t)b;
    order->last = then;
    return *then;
}

/* Computes C = alpha A B + beta D by the rank's threads; shapes: A (m, k), B (k, n), the others
 * (m, n). The longer side of C is divided among threads, so that little of A and B is packed twice,
 * at multiples of ROWS or COLUMNS, which are whole tiles of every micro-kernel. If `transposed` is
 * 1, the built-in gemm computes C^T. */
static void tshi_matmul_run(tsh_ctx *ctx, int64_t m, int64_t n, int64_t k, tsh_real alpha,
                            tshi_matrix a, tshi_matrix b, tsh_real beta, tshi_matrix d,
                            tshi_matrix c) {
    enum {
        ROWS = 12,         /* m (n, if C^T is computed) is cut at multiples of ROWS */
        COLUMNS = 32,      /* n (m, if C^T is computed) is cut at multiples of COLUMNS */
        SIDE = 96,         /* least number of rows or columns per thread */
        MIN_WORK = 1 << 20 /* least number of multiply-adds per thread */
    };
    const int transposed = tshi_gemm_transposes(m, n, c.row, c.column, ctx->gemm_kernel->nr);
    const int64_t side = m >= n ? m : n, unit = (m >= n) != transposed ? ROWS : COLUMNS;
    /* fewer than 4 rows or columns take as long as 4: the time is that of reading a matrix */
    const int64_t work = (m < 4 ? 4 : m) * (n < 4 ? 4 : n) * k;
    const int pieces = (int)tshi_base_min(tshi_team_parts(ctx, work, MIN_WORK),
                                          tshi_base_ceil(side, SIDE));
    const int few = m <= TSHI_GEMM_FEW_ROWS;
    const tshi_gemm_progress progress = {/* lets collectives progress during the product */
                                         tshi_tape_progress, ctx,
                                         few ? tshi_matmul_then(&ctx->order, b.data) : 0};
    const size_t bytes = tshi_gemm_scratch(ctx->gemm_kernel, m, n, k, c.row, c.column) +
                         tshi_gemm_scratch_sums(ctx->gemm_kernel, m, n, k, c);
    const size_t each = (bytes + 63) / 64 * 64; /* bytes per piece: whole cache lines */
    char *scratch = tshi_matmul_scratch(ctx, each * (size_t)pieces);
    tshi_block *converted[3]; /* A, B and C as tsh_real, or NULL */
    if (ctx->trace) ctx->trace->flops += 2.0 * (double)m * (double)n * (double)k;
    if (ctx->dry) return;
    if (pieces == 1 && !ctx->gemm.multiply && scratch && ctx->error.code == TSH_OK) {
        const tshi_product product = {m, n, k, alpha, beta, a, b, d, c, &progress};
        tshi_gemm_run(ctx->gemm_kernel, scratch, product);
        return; /* the code below would take longer than a small product */
    }
    const tshi_matrix ra = tshi_matmul_converted(ctx, a, m, k, 1, &converted[0]); /* shape (m, k) */
    const tshi_matrix rb = tshi_matmul_converted(ctx, b, k, n, 1, &converted[1]); /* shape (k, n) */
    const tshi_matrix rc = tshi_matmul_converted(ctx, c, m, n, 0, &converted[2]); /* shape (m, n) */
    tshi_products all = {
        ctx, {m, n, k, alpha, beta, ra, rb, d, rc, &progress}, scratch, each, m >= n};
    if (side && scratch && ctx->error.code == TSH_OK)
        tshi_team_run(ctx, pieces, side, unit, tshi_matmul_piece, &all);
    if (converted[2]) tshi_matmul_convert(m, n, rc, c);
    for (int i = 0; i < 3; i++) tshi_mem_release(ctx, converted[i]);
}

/* Returns 1 if the gradient of `out` may be rounded to bf16 in products with a and b: all three are
 * bf16, so in PyTorch the gradient is, too. */
static int tshi_matmul_rounds(const tsh_tensor *out, const tsh_tensor *a, const tsh_tensor *b) {
    return out->dtype == TSH_BF16 && a->dtype == TSH_BF16 && b->dtype == TSH_BF16;
}

/* Computes C = alpha A B + beta C; shapes: A (m, k), B (k, n), C (m, n). */
static void tshi_matmul_gemm(tsh_ctx *ctx, int64_t m, int64_t n, int64_t k, tsh_real alpha,
                             tshi_matrix a, tshi_matrix b, tsh_real beta, tshi_matrix c) {
    tshi_matmul_run(ctx, m, n, k, alpha, a, b, beta, c, c);
}

/* -- products by tiles, for ops that pack A and B themselves --------------- */

/* The matrix A of tshi_matmul_tiles, packed in strips of mr rows, the height of a tile. Word (i,
 * p), one element or a pair of bf16, is data[i / mr * mr * next + i % mr * row + p * column]. */
typedef struct tshi_matmul_strips {
    const tsh_real *data;
    int64_t row, column, next;
} tshi_matmul_strips;

/* The matrix B of tshi_matmul_tiles, packed in slivers of nr columns, the width of a tile. Word (p,
 * j), one element or a pair of bf16, is data[p * row + j / nr * next + j % nr]. form: what the
 * words of B and A are: TSHI_GEMM_REALS or TSHI_GEMM_PAIRS. */
typedef struct tshi_matmul_slivers {
    const tsh_real *data;
    int64_t row, next;
    tshi_gemm_form form;
} tshi_matmul_slivers;

/* Packs the rows of x, shape (n, k), as rows of A or columns of B: in groups of `width` rows that
 * begin `next` tsh_real (or pairs of bf16) apart. The last group is filled up with zeros. */
static void tshi_matmul_pack(const tshi_gemm_kernel *kernel, tsh_real *to, int width, int64_t n,
                             int64_t k, int64_t next, tshi_matrix x, tshi_gemm_form form) {
    for (int64_t j = 0; j < n; j += width)
        tshi_gemm_pack_matrix(kernel, to + j / width * next, width,
                              (int)tshi_base_min(width, n - j), k, tshi_gemm_from(x, j, 0), form);
}

/* The part of a product C = A B that is needed, if it has the shape of stairs: the first
 * (columns + i) elements of row i of C. Of row i of A only the first (k + i) elements are not 0. */
typedef struct tshi_matmul_stairs {
    int64_t columns, k; /* each may be TSHI_MATMUL_ALL: every element of every row */
} tshi_matmul_stairs;

enum { TSHI_MATMUL_ALL = 1 << 30 };

/* Computes C = alpha A B, plus C if `add` is 1, by the tiles of a micro-kernel; shapes: A (m, k), B
 * (k, n), C (m, n). The rows of C have space for a multiple of nr / 2 elements. Elements outside
 * the stairs are not computed, or become any number. Each sum is added in the order of
 * tshi_gemm_run, where that does not cut k. Prefetches the cache lines of `walk` meanwhile. */
static void tshi_matmul_tiles(const tshi_gemm_kernel *kernel, int64_t m, int64_t n, int64_t k,
                              tsh_real alpha, tshi_matmul_strips a, tshi_matmul_slivers b, int add,
                              tshi_matrix c, tshi_matmul_stairs stairs, tshi_gemm_walk *walk) {
    enum { LINES = 20 }; /* cache lines that are prefetched after a tile */
    const tshi_gemm_tile_fn tile = b.form == TSHI_GEMM_PAIRS ? kernel->pairs : kernel->tile;
    const int mr = kernel->mr, nr = kernel->nr;
    tshi_gemm_tile t;
    t.walk = walk;
    t.later = t.more = 0;
    t.rsa = a.row;
    t.csa = a.column;
    t.rsb = b.row;
    t.csb = 1;
    t.form = b.form;
    t.alpha = alpha;
    t.add = add;
    t.bf16 = t.bf16_d = 0;
    t.rsc = t.rsd = c.row;
    t.sums = NULL;
    for (int64_t j = 0; j < n; j += nr) {
        t.b = b.data + j / nr * b.next;
        for (int64_t i = 0; i < m; i += mr) {
            const int rows = (int)tshi_base_min(mr, m - i);
            const int64_t last = i + rows - 1, end = tshi_base_min(n, stairs.columns + last);
            const int64_t sum = tshi_base_min(k, stairs.k + last);
            if (end <= j) continue; /* no row needs these columns */
            t.k = tshi_gemm_words(b.form, sum < 0 ? 0 : sum);
            t.a = a.data + i * a.next;
            t.d = t.c = tshi_gemm_at(c, i, j);
            tile(&t, rows, end - j > nr / 2 ? nr : nr / 2);
#if TSHI_VECTORS
            tshi_gemm_walk w = *walk; /* a copy that stays in registers */
            for (int l = 0; l < LINES; l++) tshi_gemm_fetch(&w);
            *walk = w;
#endif
        }
    }
}

/* -- matmul: C = A B; dA = dC B^T, dB = A^T dC, summed over broadcast batches -------- */

/* The matrices in a tensor's last two dimensions: one for each index of out's batch dimensions. */
typedef struct tshi_batches {
    tshi_matrix first;            /* the matrix at batch index 0 */
    int64_t stride[TSH_MAX_DIMS]; /* strides over out's batches; 0 where the tensor broadcasts */
} tshi_batches;

/* Returns the matrices in `data`: t's values or its gradient, of the given strides. */
static tshi_batches tshi_matmul_batches(const tsh_tensor *t, void *data, tsh_dtype dtype,
                                        const int64_t *stride, const tsh_tensor *out) {
    const int64_t *last = stride + t->ndim - 2; /* strides of rows and columns */
    tshi_batches all;
    int d, skip = out->ndim - t->ndim; /* skip: number of batch dimensions that t lacks */
    all.first = tshi_gemm_matrix_of(data, dtype, last[0], last[1]);
    for (d = 0; d < out->ndim - 2; d++)
        all.stride[d] = d < skip || t->dim[d - skip] == 1 ? 0 : stride[d - skip];
    return all;
}

/* Returns the matrix at the row-major, local index `index` of out's batch dimensions. */
static tshi_matrix tshi_matmul_batch(const tshi_batches *all, const tsh_tensor *out,
                                     int64_t index) {
    tshi_matrix m = all->first;
    int64_t at = 0; /* offset of the batch, in elements */
    for (int d = out->ndim - 3; d >= 0; d--) {
        at += index % out->local[d] * all->stride[d];
        index /= out->local[d];
    }
    m.data = (char *)m.data + at * tshi_dtypes[m.dtype].size;
    return m;
}

/* Computes C = A B + beta C for all batches of out; shapes: A (m, k), B (k, n), C (m, n). */
static void tshi_matmul_batched(const tsh_tensor *out, int64_t m, int64_t n, int64_t k,
                                const tshi_batches *a, const tshi_batches *b, tsh_real beta,
                                const tshi_batches *c) {
    int64_t i, count = tshi_tensor_product(out->local, out->ndim - 2);
    for (i = 0; i < count; i++)
        tshi_matmul_gemm(out->ctx, m, n, k, 1, tshi_matmul_batch(a, out, i),
                         tshi_matmul_batch(b, out, i), beta, tshi_matmul_batch(c, out, i));
}

static void tshi_matmul_backward(tshi_node *node) {
    /* shapes: a (.., m, k), b (.., k, n), out and its gradient gs (.., m, n) */
    tsh_tensor *a = node->in[0], *b = node->in[1], *out = node->out;
    int64_t m = out->local[out->ndim - 2], n = out->local[out->ndim - 1], k = a->local[a->ndim - 1];
    tshi_batches as = tshi_matmul_batches(a, tshi_tape_saved(node, 0), a->dtype, a->stride, out);
    tshi_batches bs = tshi_matmul_batches(b, tshi_tape_saved(node, 1), b->dtype, b->stride, out);
    tshi_batches gs = tshi_matmul_batches(out, tshi_tape_grad(node), TSH_REAL, out->stride, out);
    tshi_batches ds; /* dA, then dB */
    tshi_dest dest;
    gs.first.rounds = tshi_matmul_rounds(out, a, b);
    as.first = tshi_gemm_transposed(as.first); /* A^T (.., k, m) */
    bs.first = tshi_gemm_transposed(bs.first); /* B^T (.., n, k) */
    if (tshi_tape_dest_zeroed(node, 0, &dest)) {
        ds = tshi_matmul_batches(a, dest.data, TSH_REAL, dest.stride, out);
        tshi_matmul_batched(out, m, k, n, &gs, &bs, 1, &ds); /* dA += dC B^T */
    }
    tshi_tape_input_done(node, 0); /* dA may be all-reduced while dB is computed */
    if (tshi_tape_dest_zeroed(node, 1, &dest)) {
        ds = tshi_matmul_batches(b, dest.data, TSH_REAL, dest.stride, out);
        tshi_matmul_batched(out, k, n, m, &as, &gs, 1, &ds); /* dB += A^T dC */
    }
}

/* Sets *shape to that of A B, with broadcast batches. Returns 0 and an error if A and B do not
 * fit. */
static int tshi_matmul_shape(tsh_tensor *a, tsh_tensor *b, tsh_shape *shape) {
    char ta[TSHI_TEXT_SIZE], tb[TSHI_TEXT_SIZE];
    int d, fits = a->ndim >= 2 && b->ndim >= 2 && a->dim[a->ndim - 1] == b->dim[b->ndim - 2];
    *shape = tsh_shape_of(a->ndim >= b->ndim ? a : b);
    for (d = 3; d <= shape->ndim && fits; d++) {
        const int64_t p = d > a->ndim ? 1 : tsh_size(a, -d), q = d > b->ndim ? 1 : tsh_size(b, -d);
        fits = p == q || p == 1 || q == 1;
        shape->dim[shape->ndim - d] = p == 1 ? q : p;
    }
    if (!fits)
        return tsh_fail(a->ctx, TSH_ERR_SHAPE,
                        "tsh_matmul: %s times %s does not fit; takes (.., m, k) times (.., k, n) "
                        "with leading sizes that broadcast: tsh_transpose, tsh_reshape",
                        tshi_tensor_text(a, ta), tshi_tensor_text(b, tb)) == TSH_OK;
    shape->dim[shape->ndim - 2] = a->dim[a->ndim - 2];
    shape->dim[shape->ndim - 1] = b->dim[b->ndim - 1];
    return 1;
}

static const tshi_op tshi_matmul_op = {
    "tsh_matmul", "a b", tshi_rule_matmul, tshi_matmul_backward, TSHI_A | TSHI_B, 0};

TSH_API tsh_tensor *tsh_matmul(tsh_tensor *a, tsh_tensor *b) {
    const tshi_op *op = &tshi_matmul_op;
    tsh_tensor *in[2] = {a, b}, *out;
    tsh_ctx *ctx = tshi_tensor_check_floating("tsh_matmul", "a b", in, 2);
    tshi_output output;
    tshi_batches as, bs, cs; /* the matrices A, B and C of all batches */
    if (!ctx || !tshi_matmul_shape(a, b, &output.shape) || !tshi_rule_run(op, in, 2, NULL, &output))
        return NULL;
    out = tshi_tensor_out(ctx, "tsh_matmul", a->dtype, &output.shape, &output.layout);
    if (!out) return NULL;
    as = tshi_matmul_batches(a, tshi_tensor_at(a), a->dtype, a->stride, out);
    bs = tshi_matmul_batches(b, tshi_tensor_at(b), b->dtype, b->stride, out);
    cs = tshi_matmul_batches(out, tshi_tensor_at(out), out->dtype, out->stride, out);
    tshi_matmul_batched(out, out->local[out->ndim - 2], out->local[out->ndim - 1],
                        a->local[a->ndim - 1], &as, &bs, 0, &cs);
    (void)tshi_tape_record(op, out, in, 2, output.partial, 0);
    return out;
}
