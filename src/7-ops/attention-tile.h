/* ========================================================================== */
/* >>attention-tile                          MARK: - attention-tile (private) */
/* Online softmax of a tile's scores, and its backward.                       */
/* Needs: >>attention-avx512.                                                 */
/* ========================================================================== */

/* Computes the online softmax of n rows of a strip. In each row, m becomes the maximum so far; l
 * and o, the row of O so far, are multiplied by e^(old m - m); the scores x become e^(x - m), and
 * the sum of these is added to l. */
TSHI_INLINE void tshi_attention_online_body(int64_t n, const tshi_operand *none,
                                            const tshi_strip *strip, int fused) {
    const tshi_head *h = strip->h;
    const int64_t pitch = h->pitch, d = h->d, width = tshi_base_ceil(d, TSHI_BLOCK) * TSHI_BLOCK;
    const int64_t end = tshi_base_ceil(strip->n, TSHI_BLOCK) * TSHI_BLOCK;
    const int64_t rows = tshi_base_ceil(h->rows, TSHI_BLOCK) * TSHI_BLOCK;
    tsh_real *x = h->s;                             /* scores, shape (n, pitch) */
    tsh_real *m = h->row + strip->r, *l = m + rows; /* running maxima and sums, shapes (n) */
    tsh_real *o = h->sum + strip->r * width;        /* rows of O, shape (n, width) */
    int64_t r, c;
    (void)none;
    for (r = 0; r < n; r++, x += pitch, o += width) {
        /* seen: keys that row r sees; wide: the same, rounded up to whole blocks */
        const int64_t seen = tshi_attention_row(strip, r);
        const int64_t wide = tshi_base_ceil(seen, TSHI_BLOCK) * TSHI_BLOCK;
        const tsh_real old = m[r]; /* the row's maximum over earlier keys */
        for (c = seen; c < wide && !h->exps; c++) x[c] = -TSHI_R(INFINITY);
        if (seen) m[r] = h->exps ? h->most(x, seen) : tshi_kernel_max(x, wide);
        if (l[r] > 0 && old > m[r]) m[r] = old; /* earlier keys have the larger maximum */
        if (l[r] > 0 && old < m[r]) {           /* these keys have the larger maximum */
            const tsh_real shrink = tshi_math_exp_below(old - m[r], fused);
            l[r] *= shrink;
            tshi_attention_scale(o, o, d, shrink);
        }
    }
    /* The exponentials have a loop of their own: in the loop above, each row would wait for its
     * maximum. */
    for (r = 0, x = h->s; r < n; r++, x += pitch) {
        const int64_t seen = tshi_attention_row(strip, r);
        const int64_t wide = tshi_base_ceil(seen, TSHI_BLOCK) * TSHI_BLOCK;
        if (!seen || (double)m[r] < -DBL_MAX) { /* no key is seen, or all are masked */
            memset(x, 0, (size_t)end * sizeof *x);
            continue;
        }
        /* the sum l becomes NaN if a score is NaN or +infinity */
        l[r] += h->exps ? h->exps(x, seen, m[r]) : tshi_kernel_sum_exps(x, wide, m[r], x, fused);
        memset(x + (h->rounded ? wide / 2 : wide), 0, (size_t)(end - wide) * sizeof *x);
    }
}
TSHI_KERNEL_FUSED(tshi_attention_online, tshi_strip);

/* Finishes n queries of a tile: divides each row o of O by the sum l, and stores the maximum m and
 * log l for backward; m is -infinity if a query sees no key (l is 0). m and l have space for whole
 * blocks of TSHI_BLOCK. */
TSHI_INLINE void tshi_attention_finish_body(int64_t n, const tshi_operand *none,
                                            const tshi_strip *strip, int fused) {
    const tshi_head *h = strip->h;
    const int64_t rows = tshi_base_ceil(h->rows, TSHI_BLOCK) * TSHI_BLOCK;
    const int64_t width = tshi_base_ceil(h->d, TSHI_BLOCK) * TSHI_BLOCK;
    const tsh_real *m = h->row, *l = m + rows;                       /* maxima, sums, shapes (n) */
    tsh_real back[TSHI_BLOCK], max[TSHI_BLOCK], log_sum[TSHI_BLOCK]; /* back: l, then 1 / l */
    tsh_real *o = h->sum;                                            /* O, shape (n, width) */
    const int direct = h->o.dtype == TSH_REAL && h->o.column == 1;   /* 1: writes O in place */
    (void)none;
    for (int64_t e = 0; e < n; e += TSHI_BLOCK) {
        TSHI_LANES for (int i = 0; i < TSHI_BLOCK; i++) {
            /* l and m are read even if not needed, so that the loop is vectorised */
            const tsh_real sum = l[e + i], most = m[e + i];
            max[i] = sum == 0 ? -TSHI_R(INFINITY) : most;
            back[i] = sum == 0 ? TSHI_R(1) : sum; /* avoids 1 / 0 */
        }
        TSHI_LANES for (int i = 0; i < TSHI_BLOCK; i++) log_sum[i] = tshi_math_log(back[i], fused);
        TSHI_LANES for (int i = 0; i < TSHI_BLOCK; i++) back[i] = TSHI_R(1) / back[i];
        tshi_kernel_store_block(h->max + strip->i, 1, e, n, max, 0);
        tshi_kernel_store_block(h->log_sum + strip->i, 1, e, n, log_sum, 0);
        for (int64_t r = e; r < n && r < e + TSHI_BLOCK; r++, o += width) {
            const tshi_matrix to = tshi_gemm_from(h->o, strip->i + r, 0); /* the row of O */
            if (h->put) {
                h->put(to.data, o, h->d, back[r - e]);
                continue;
            }
            tshi_attention_scale(direct ? (tsh_real *)to.data : o, o, h->d, back[r - e]);
            if (!direct) tshi_gemm_store(h->kernel, to, 0, 0, o, (int)h->d);
        }
    }
}
TSHI_KERNEL_FUSED(tshi_attention_finish, tshi_strip);

/* Computes C (m, d) = p V over the keys [j, j + n), plus C if `add` is 1, without packing V: for so
 * few queries that packing does not pay. */
static void tshi_attention_few(const tshi_head *h, int64_t m, int64_t j, int64_t n, tsh_real *p,
                               int add, tsh_real *c) {
    tshi_matrix a = tshi_attention_tile(h, p);
    const tshi_matrix o = tshi_gemm_matrix(c, tshi_attention_wide(h->d), 1);
    a.rounds = h->pairs;
    const tshi_product product = {m, h->d, n,   1, TSHI_R(add), a, tshi_gemm_from(h->v, j, 0),
                                  o, o,    NULL};
    tshi_gemm_run(h->kernel, h->scratch, product);
}

/* Sets the running maximum m and sum l of queries [i, i + m) to their initial values: 0; with
 * sinks, m is the sink's score and l is 1. */
static void tshi_attention_first(const tshi_head *h, int64_t i, int64_t m) {
    const int64_t rows = tshi_attention_wide(h->rows);
    memset(h->row, 0, (size_t)(2 * rows) * sizeof *h->row);
    for (int64_t r = 0; r < m && h->sinks.scores; r++) {
        h->row[r] = h->sinks.scores[(i + r) * h->sinks.step];
        h->row[rows + r] = 1; /* l is e^(sink - m) = e^0 */
    }
}

/* Computes the rows of O of a tile, which has the m queries from query i on. */
static void tshi_attention_forward_tile(tshi_head *h, int64_t i, int64_t m) {
    /* end of the keys that the tile's last query sees */
    const int64_t last = tshi_attention_visible(h, i + m - 1);
    const int64_t start = tshi_attention_start(h, i), wide = tshi_attention_wide(h->d);
    const tshi_strip whole = tshi_attention_strip_at(h, i, 0, 0, h->tk);
    int64_t j, r, n, rows; /* n, rows: numbers of keys and of queries of a strip */
    tshi_attention_first(h, i, m);
    if (!h->few) h->left_q = tshi_attention_operand(h, h->rows_q, h->q, i, m, 0);
    if (tshi_attention_visible(h, i) <= start)
        memset(h->sum, 0, (size_t)(m * wide) * sizeof *h->sum);
    for (j = start; j < last; j += h->keys) {
        if (!h->few) tshi_attention_pack(h, j);
        for (r = 0; r < m; r += rows) {
            tshi_strip strip;
            tsh_real *s = h->s, *o = h->sum + r * wide;
            rows = tshi_base_min(h->strip, m - r);
            n = tshi_base_min(h->keys, tshi_attention_visible(h, i + r + rows - 1) - j);
            if (n <= 0) continue;
            strip = tshi_attention_strip_at(h, i, r, j, n);
            tshi_attention_scores(h, i, r, rows, j, n);
            tshi_attention_online[h->ctx->isa](rows, NULL, &strip);
            if (h->more->dropout) tshi_attention_dropout(h, s, i + r, rows, j, n);
            if (h->few)
                tshi_attention_few(h, rows, j, n, s, j > start, o);
            else {
                if (h->pairs && !h->rounded) tshi_attention_round(h, s, rows, n);
                tshi_attention_by_features(h, i + r, rows, j, n, s,
                                           tshi_attention_features(h, h->v, j, h->features_v),
                                           j > start, tshi_gemm_matrix(o, wide, 1));
            }
        }
    }
    tshi_attention_finish[h->ctx->isa](m, NULL, &whole);
}

/* Computes delta, the dot product of dO and O over the d features, of n queries. */
TSHI_INLINE void tshi_attention_delta_body(int64_t n, const tshi_operand *none,
                                           const tshi_head *h) {
    (void)none;
    for (int64_t r = 0; r < n; r++)
        h->row[r] = tshi_kernel_dot(h->back.left_o.data + r * h->back.left_o.row,
                                    h->back.left_do.data + r * h->back.left_do.row, h->d);
}
TSHI_KERNEL(tshi_attention_delta, tshi_head);

/* Computes the backward of the softmax for n rows of a strip: the scores in h->s become the
 * probabilities p, and dO V^T in h->back.t becomes ds_scale dS, where dS is the gradient of the
 * scores; both are 0 where a query does not see a key. */
TSHI_INLINE void tshi_attention_grad_body(int64_t n, const tshi_operand *none,
                                          const tshi_strip *strip, int fused) {
    const tshi_head *h = strip->h;
    const int64_t pitch = h->pitch;
    /* m, log l and delta (the dot product of dO and O) of each row, shapes (n) */
    const tsh_real *m = h->max + strip->i, *l = h->log_sum + strip->i, *delta = h->row + strip->r;
    const tsh_real scale = h->back.ds_scale;
    tsh_real *x = h->s, *dx = h->back.t + strip->r * pitch;
    tsh_real y[TSHI_BLOCK], dy[TSHI_BLOCK];
    int i;
    (void)none;
    for (int64_t r = 0; r < n; r++, x += pitch, dx += pitch) {
        const tsh_real max = m[r], log_sum = l[r], dot = delta[r];
        const tsh_real nan = log_sum - log_sum; /* 0, but NaN if log l is not finite */
        const int visible = (double)max < -DBL_MAX ? 0 : (int)tshi_attention_row(strip, r);
        for (int64_t e = 0; e < strip->n; e += TSHI_BLOCK) {
            const int left = visible - (int)e; /* number of visible keys from e on */
            if (left <= 0) {                   /* no key of this block is visible */
                for (i = 0; i < TSHI_BLOCK; i++) x[e + i] = 0;
                for (i = 0; i < TSHI_BLOCK; i++) dx[e + i] = 0;
                continue;
            }
            TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++)
                y[i] = tshi_math_exp_below(x[e + i] - max - log_sum, fused) + nan;
            TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) dy[i] = y[i] * (dx[e + i] - dot) * scale;
            TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) x[e + i] = i < left ? y[i] : 0;
            TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) dx[e + i] = i < left ? dy[i] : 0;
        }
    }
}
TSHI_KERNEL_FUSED(tshi_attention_grad, tshi_strip);

#if TSHI_X86 && TSHI_GEMM_FLOAT
/* Does what tshi_attention_grad_body does, with AVX-512. pairs 1: p will be rounded to bf16, so the
 * less exact tshi_attention_exp_short suffices. */
TSHI_AVX512 TSHI_INLINE void tshi_attention_grad_rows(int64_t n, const tshi_strip *strip,
                                                      const int pairs) {
    const tshi_head *h = strip->h;
    const __m512 scale = _mm512_set1_ps(h->back.ds_scale);
    for (int64_t r = 0; r < n; r++) {
        const float max = h->max[strip->i + r], log_sum = h->log_sum[strip->i + r];
        const __m512 m = _mm512_set1_ps(max), l = _mm512_set1_ps(log_sum);
        const __m512 nan = _mm512_sub_ps(l, l), delta = _mm512_set1_ps(h->row[strip->r + r]);
        const int64_t visible = (double)max < -DBL_MAX ? 0 : tshi_attention_row(strip, r);
        float *x = h->s + r * h->pitch, *dx = h->back.t + (strip->r + r) * h->pitch;
        int64_t e = 0;
        for (; e < visible; e += 16) {
            const __mmask16 mask = (__mmask16)tshi_gemm_mask(visible - e);
            const __m512 v = _mm512_sub_ps(_mm512_sub_ps(_mm512_loadu_ps(x + e), m), l);
            const __m512 p = pairs ? tshi_attention_exp_short(v) : tshi_attention_exp(v);
            const __m512 y = _mm512_maskz_add_ps(mask, p, nan);
            const __m512 dy = _mm512_mul_ps(y, _mm512_sub_ps(_mm512_loadu_ps(dx + e), delta));
            _mm512_storeu_ps(x + e, y);
            _mm512_storeu_ps(dx + e, _mm512_maskz_mul_ps(mask, dy, scale));
        }
        for (; e < tshi_attention_wide(strip->n); e += 16) { /* keys that the query does not see */
            _mm512_storeu_ps(x + e, _mm512_setzero_ps());
            _mm512_storeu_ps(dx + e, _mm512_setzero_ps());
        }
    }
}
TSHI_AVX512 static void tshi_attention_grad_wide(int64_t n, const tshi_strip *strip) {
    if (strip->h->pairs)
        tshi_attention_grad_rows(n, strip, 1);
    else
        tshi_attention_grad_rows(n, strip, 0);
}
#endif
