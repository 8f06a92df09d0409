/* ========================================================================== */
/* >>attention-back                          MARK: - attention-back (private) */
/* Backward of one tile: the gradients of q, k and v.                         */
/* Needs: >>attention-tile.                                                   */
/* ========================================================================== */

/* Packs the probabilities p and the gradients dS of the scores, of a tile's rows [r, r + m) with n
 * keys each, to columns_p and columns_s, in pairs of queries. Then rounds these rows of dS to pairs
 * of keys, in place. */
static void tshi_attention_backward_pack(const tshi_head *h, int64_t r, int64_t m, int64_t n) {
    tsh_real *const ds = h->back.t + r * h->pitch;
    const int64_t at = r / 2 * h->pitch;
    tshi_gemm_pack_matrix(h->kernel, h->back.columns_p + at, (int)h->pitch, (int)n, m,
                          tshi_gemm_matrix(h->s, 1, h->pitch), TSHI_GEMM_ROUNDED);
    tshi_gemm_pack_matrix(h->kernel, h->back.columns_s + at, (int)h->pitch, (int)n, m,
                          tshi_gemm_matrix(ds, 1, h->pitch), TSHI_GEMM_ROUNDED);
    tshi_attention_round(h, ds, m, n);
}

/* Adds dS, the gradient of the scores, of rows [r, r + m) of the tile at query i and of keys
 * [j, j + n), to the gradient of the mask. Then multiplies dS by what the kernels left out: the
 * derivative of a soft cap, and scale. */
static void tshi_attention_backward_raw(const tshi_head *h, int64_t i, int64_t r, int64_t m,
                                        int64_t j, int64_t n) {
    const int64_t step = h->more->mask_stride[3];
    const tsh_real scale = TSHI_R(h->more->scale);
    tsh_real *ds = h->back.t + r * h->pitch;
    for (int64_t a = 0; a < m; a++, ds += h->pitch) {
        const int64_t seen = tshi_base_min(tshi_attention_visible(h, i + r + a) - j, n);
        const tsh_real *derivative = h->back.derivative ? h->back.derivative + a * h->pitch : NULL;
        if (h->mask.grad) {
            tsh_real *to = h->mask.grad + h->mask.first + (i + r + a) * h->mask.row + j * step;
            for (int64_t c = 0; c < seen; c++) to[c * step] += ds[c];
        }
        for (int64_t c = 0; derivative && c < seen; c++) ds[c] *= derivative[c];
        tshi_attention_scale(ds, ds, seen, scale);
    }
}

/* Computes the probabilities p and the gradients dS of the scores of rows [r, r + m) of the tile
 * that begins at query i, and of keys [j, j + n). Also writes zeros after these keys, as far as the
 * micro-kernels of p^T dO read. */
static void tshi_attention_backward_scores(tshi_head *h, int64_t i, int64_t r, int64_t m, int64_t j,
                                           int64_t n) {
    const int64_t end = tshi_base_min(n + h->kernel->mr, h->keys);
    const tshi_strip strip = tshi_attention_strip_at(h, i, r, j, end);
    tsh_real *t = h->back.t + r * h->pitch;
    tshi_attention_scores(h, i, r, m, j, n);
    tshi_attention_by_keys(h, i + r, r, m, j, n, 1, h->back.left_do, h->keys_v, t); /* dO V^T */
#if TSHI_GEMM_BF16S
    if (h->rounded) {
        tshi_attention_grad_pairs(m, &strip);
        return;
    }
#endif
    if (h->more->dropout) tshi_attention_dropout(h, t, i + r, m, j, n);
#if TSHI_X86 && TSHI_GEMM_FLOAT
    if (h->exps)
        tshi_attention_grad_wide(m, &strip);
    else
#endif
        tshi_attention_grad[h->ctx->isa](m, NULL, &strip);
    if (h->back.raw) tshi_attention_backward_raw(h, i, r, m, j, n);
    if (h->more->dropout) tshi_attention_dropout(h, h->s, i + r, m, j, n);
    if (h->pairs) tshi_attention_backward_pack(h, r, m, tshi_attention_wide(end));
}

/* Returns 1 if products are computed in the memory of the gradient `to` itself: its rows are
 * contiguous, and their length d is a multiple of half of nr, the columns that a micro-kernel
 * computes. If operands are tsh_real and `to` already has values (over is 0), products are summed
 * in scratch memory instead, which is then added to `to`. */
static int tshi_attention_in_place(const tshi_head *h, tshi_matrix to, int over) {
    return (h->pairs || over) && h->tq > 0 && to.column == 1 && h->d % (h->kernel->nr / 2) == 0;
}

/* Returns the m rows of Q or dO of a tile as right operand B of products: `rows`, or, if operands
 * are pairs of bf16, `columns`, which is columns_q or columns_do. */
static tshi_matmul_slivers tshi_attention_columns(const tshi_head *h, int64_t m,
                                                  tshi_matmul_strips rows,
                                                  const tsh_real *columns) {
    const int64_t nr = h->kernel->nr;
    return h->pairs
               ? tshi_attention_slivers(h, columns, nr, nr * tshi_attention_words(h, m))
               : tshi_attention_slivers(h, rows.data, rows.row, nr);
}

/* Adds P^T B to C (n, d), the rows of dV or dK of keys [j, j + n); P and B have the m rows of the
 * tile that begins at query i. For dV, P is the probabilities p, and B is dO; for dK, P is dS, and
 * B is Q. b: B (tshi_attention_columns); p: P, shape (rows, pitch), or columns_p or columns_s; to:
 * dV or dK; over 1: overwrites `to`; scratch: sum_v or sum_k, which has C if it is not computed in
 * place. Computes mr keys at a time, and skips the queries that see none of these. */
static void tshi_attention_backward_keys(tshi_head *h, int64_t i, int64_t m, int64_t j, int64_t n,
                                         tshi_matmul_slivers b, const tsh_real *p, tshi_matrix to,
                                         int over, tsh_real *scratch) {
    const int in_place = tshi_attention_in_place(h, to, over);
    const int cut = tshi_attention_visible(h, i) < j + n;
    const int64_t mr = h->kernel->mr, wide = tshi_attention_wide(h->d), unit = h->pairs ? 2 : 1;
    const int64_t earlier = h->back.fresh ? (i ? tshi_attention_visible(h, i - 1) : 0) : h->tk;
    const int64_t step = cut || (earlier > j && earlier < j + n) ? mr : n;
    const tshi_matmul_stairs all = {TSHI_MATMUL_ALL, TSHI_MATMUL_ALL};
    const tsh_real *const first = b.data;
    scratch = scratch ? scratch + tshi_attention_block(h, j, wide) : NULL;
    const tshi_matrix c = in_place ? tshi_gemm_from(to, j, 0) : tshi_gemm_matrix(scratch, wide, 1);
    for (int64_t e = 0; e < n; e += step) {
        /* 1: adds to the rows of dV or dK from key j + e on; 0: overwrites them, as no earlier
         * query saw these keys */
        const int add = (in_place && !over) || earlier > j + e;
        const int64_t count = tshi_base_min(step, tshi_base_min(h->keys, h->tk - j) - e);
        /* the tile's first row that sees key j + e: the rows before it add nothing */
        int64_t r = cut && h->moves ? j + e + 1 - h->to - i : 0;
        r = r < 0 ? 0 : r / unit; /* if pairs of bf16: r counts pairs of rows from here on */
        const tshi_matmul_strips left = {p + r * h->pitch + e, 1, h->pitch, 1};
        b.data = first + r * b.row;
        tshi_attention_ahead(h);
        tshi_matmul_tiles(h->kernel, count, h->d, m - unit * r, 1, left, b, add,
                          tshi_gemm_from(c, e, 0), all, &h->walk);
    }
}

/* Prepares rows [i, i + m) of Q and dO, those of a tile, as operands of products, and computes
 * delta, the dot product of dO and O, of each. */
static void tshi_attention_backward_rows(tshi_head *h, int64_t i, int64_t m) {
    const int64_t d = h->d, words = tshi_attention_words(h, d);
    const int64_t nr = h->kernel->nr, next = nr * tshi_attention_words(h, m);
    h->left_q = tshi_attention_operand(h, h->rows_q, h->q, i, m, 1);
    if (h->pairs) {
        const tshi_matmul_strips left = {h->back.rows_do, words, 1, words};
        const tshi_matrix q = tshi_gemm_matrix_of(h->rows_q, TSH_BF16, 1, 2 * words);
        const tshi_matrix dout = tshi_gemm_matrix_of(h->back.rows_do, TSH_BF16, 1, 2 * words);
        h->back.left_do = left;
#if TSHI_GEMM_BF16S
        tshi_attention_delta_pairs(h, i, m);
#endif
        tshi_matmul_pack(h->kernel, h->back.columns_q, (int)nr, d, m, next, q, TSHI_GEMM_PAIRS);
        tshi_matmul_pack(h->kernel, h->back.columns_do, (int)nr, d, m, next, dout, TSHI_GEMM_PAIRS);
        return;
    }
    h->back.left_do = tshi_attention_operand(h, h->back.rows_do, h->back.dout, i, m, 1);
    h->back.left_o = tshi_attention_operand(h, h->sum, h->o, i, m, 0);
    tshi_attention_delta[h->ctx->isa](m, NULL, h);
}

/* Adds m rows of `from`, which begin `row` elements apart, to the rows of `to` from row i on. over
 * 1: overwrites them instead. */
static void tshi_attention_add_rows(const tshi_head *h, tshi_matrix to, int over, int64_t i,
                                    int64_t m, const tsh_real *from, int64_t row) {
    const tshi_kernel_fn fn = over ? tshi_kernel_copy : tshi_kernel_add[h->ctx->isa];
    for (int64_t r = 0; r < m; r++) {
        const tshi_operand x[2] = {tshi_kernel_reals(tshi_gemm_at(to, i + r, 0), to.column),
                                   tshi_kernel_reals(from + r * row, 1)};
        fn(h->d, x, NULL);
    }
}

/* Adds to dV, dK and dQ the products of a tile: queries [i, i + m) and keys [j, j + n). c: the
 * tile's rows of dQ, which are overwritten if `over` is 1. */
static void tshi_attention_backward_products(tshi_head *h, int64_t i, int64_t m, int64_t j,
                                             int64_t n, int over, tshi_matrix c) {
    int64_t r = h->moves ? j + 1 - h->to - i : 0; /* the tile's first row that sees key j */
    if (h->back.dv.data)
        tshi_attention_backward_keys(
            h, i, m, j, n, tshi_attention_columns(h, m, h->back.left_do, h->back.columns_do),
            h->pairs ? h->back.columns_p : h->s, h->back.dv, h->back.over[2], h->back.sum_v);
    if (h->back.dk.data)
        tshi_attention_backward_keys(
            h, i, m, j, n, tshi_attention_columns(h, m, h->left_q, h->back.columns_q),
            h->pairs ? h->back.columns_s : h->back.t, h->back.dk, h->back.over[1], h->back.sum_k);
    r = r < 0 ? 0 : r - r % h->kernel->mr;
    if (h->back.dq.data)
        tshi_attention_by_features(h, i + r, m - r, j, n, h->back.t + r * h->pitch,
                                   tshi_attention_features(h, h->k, j, h->features_k), !over,
                                   tshi_gemm_from(c, r, 0));
}

/* Computes the backward of a tile, the m queries from query i on: what it adds to dQ, dK, dV and to
 * the gradients of mask and sinks. */
static void tshi_attention_backward_tile(tshi_head *h, int64_t i, int64_t m) {
    const int64_t last = tshi_attention_visible(h, i + m - 1), wide = tshi_attention_wide(h->d);
    const int64_t start = tshi_attention_start(h, i);
    /* 1: every query of the tile sees a key; 0: dQ is not computed in place, because the products
     * leave some of its rows unwritten */
    const int seeing = tshi_attention_visible(h, i) > start;
    const int in_place = seeing && tshi_attention_in_place(h, h->back.dq, h->back.over[0]);
    const tshi_matrix c = in_place ? tshi_gemm_from(h->back.dq, i, 0)
                                   : tshi_gemm_matrix(h->sum, wide, 1);
    tshi_attention_backward_rows(h, i, m);
    for (int64_t r = i; r < i + m && h->sinks.grads; r++) {
        const tsh_real s = h->sinks.scores[r * h->sinks.step] - h->max[r] - h->log_sum[r];
        h->sinks.grads[r] = -h->row[r - i] * TSHI_R(exp((double)s));
    }
    if (!seeing) memset(h->sum, 0, (size_t)(m * wide) * sizeof *h->sum);
    for (int64_t j = start; j < last; j += h->keys) {
        const int64_t n = tshi_base_min(h->keys, last - j);
        tshi_attention_pack(h, j);
        for (int64_t r = 0, rows; r < m; r += rows) {
            rows = tshi_base_min(h->strip, m - r);
            const int64_t seen = tshi_attention_visible(h, i + r + rows - 1) - j;
            if (seen > 0) tshi_attention_backward_scores(h, i, r, rows, j, tshi_base_min(n, seen));
        }
        tshi_attention_backward_products(h, i, m, j, n,
                                         j == start && (!in_place || h->back.over[0]), c);
    }
    if (h->back.dq.data && !in_place)
        tshi_attention_add_rows(h, h->back.dq, h->back.over[0], i, m, h->sum, wide);
}

/* Adds the gradient `from` (h->back.sum_k or sum_v) of a head of k to `to` (dK or dV), shape
 * (tk, d); over 1: overwrites `to`. Does nothing if the products were computed in place. */
static void tshi_attention_backward_done(const tshi_head *h, tsh_real *from, tshi_matrix to,
                                         int over) {
    if (to.data && !tshi_attention_in_place(h, to, over))
        tshi_attention_add_rows(h, to, over, 0, h->tk, from, tshi_attention_wide(h->d));
}

/* Returns the local head of k and v that the local query head a uses (grouped-query attention). */
static int64_t tshi_attention_kv(const tsh_tensor *q, const tsh_tensor *k, int64_t a) {
    int64_t group = q->dim[1] / k->dim[1]; /* query heads per head of k */
    if (k->layout.kind == TSH_SHARDED && k->layout.dim == 1) return a / group;
    return tshi_tensor_global(q, 1, a) / group;
}
