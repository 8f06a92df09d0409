/* ========================================================================== */
/* >>attention                                    MARK: - attention (private) */
/* The heads and tiles of attention; scores of a tile, masked.                */
/* Needs: >>op-dropout >>op-matmul.                                           */
/* ========================================================================== */

/* Of each batch and head, Q and O are (Tq, D), K and V (Tk, D). Scores s_ij = scale q_i k_j are
 * computed in tiles of TSHI_TILE_ROWS queries and TSHI_TILE_KEYS keys, with an online softmax: a
 * running maximum m and sum l per query (Milakov & Gimelshein 2018). Backward computes s again (Dao
 * et al. 2022):
 *
 *     p = e^(s - m - log l),   delta_i = dO_i O_i,        dV += p^T dO
 *     dS = p (dO V^T - delta), dQ += scale dS K,          dK += scale dS^T Q
 *
 * m and log l are stored apart: in their sum, log l would lose digits if m is large. Dropout masks
 * p and dO V^T by the global index of the score. With a soft cap c, s is c tanh(scale q k / c), and
 * dS is multiplied by 1 - tanh^2; the gradient of a mask is dS before that and before scale. A sink
 * is a key with this score and the value 0, seen first: m and l begin with it.
 *
 * The products are of gemm's micro-kernels (tshi_matmul_tiles). A block of TSHI_TILE_KEYS keys
 * is packed when a tile first needs it, and kept for the other tiles and query heads that use the
 * same head of k. dV and dK are computed transposed, dV^T += dO^T p: then p and dS are the right
 * operand, which tsh_real need not be packed for. Of what the causal mask hides, most is not
 * computed (tshi_matmul_stairs). If q, k and v are bf16 and the processor multiplies pairs of bf16,
 * all operands are packed as such pairs, with p, dS and dO rounded to bf16. Then dV += p^T dO and
 * dK += dS^T q are computed as they are, not transposed, and in place if their rows are contiguous.
 *
 * An element's sums depend on the positions of keys alone: a block of keys begins at a multiple of
 * TSHI_TILE_KEYS, and keys that a query does not see add 0. tshi_attention_begin prepares what all
 * heads share; on each thread tshi_attention_piece goes through tiles. Kernels compute whole blocks
 * of TSHI_BLOCK values of a row. Below, h is a head, i a query, j a key; a tile, or a strip of it,
 * has m queries and n keys. */
enum {
    TSHI_TILE_ROWS = 96,       /* queries of a tile: whole tiles of every micro-kernel */
    TSHI_TILE_KEYS = 256,      /* keys of a tile, in forward and in backward: a multiple of */
    TSHI_TILE_KEYS_BACK = 128, /* TSHI_BLOCK, at most the kc of any micro-kernel */
    TSHI_TILE_STRIP = 24,      /* queries whose scores are computed at once, and stay in L1 */
    TSHI_TILE_ROWS_PAIRS = 264 /* queries of a tile in backward of pairs */
};

/* The keys of a row of the batch. */
typedef struct tshi_keys {
    int64_t past, added; /* those of the cache; new ones that are no padding */
} tshi_keys;

/* The options of a call, and the params of a node. */
typedef struct tshi_attention {
    double scale, cap;      /* of the scores; cap 0: none */
    int causal, dropout;    /* 1: causal mask; 1: dropout is on */
    int64_t window;         /* 0: none */
    tsh_tensor *sinks;      /* of tsh_real, shape (H); NULL: none */
    tshi_dropout drop;      /* key, stream and probability of the dropout mask */
    tsh_tensor *mask;       /* of tsh_real or i32; NULL: none */
    int64_t mask_stride[4]; /* over (B, H, Tq, Tk); 0 where the mask broadcasts */
    tshi_keys keys;         /* of every row of the batch; ragged: the most that a row has */
    int ragged;             /* 1: each row has a tshi_keys of its own */
    int64_t behind;         /* query i is at the position of new key i + behind: Tk - Tq */
} tshi_attention;

/* One head of one batch, with scratch of the thread that computes it. In shapes, `keys` is that
 * below, ROWS is `rows` below, and D32 is d rounded up to a multiple of TSHI_BLOCK. */
typedef struct tshi_head {
    tsh_ctx *ctx;
    const tshi_attention *more; /* options */
    const tshi_gemm_kernel *kernel;
    tshi_matrix q, k, v, o;       /* shapes (tq, d), (tk, d), (tk, d), (tq, d) */
    tshi_matrix dq, dk, dv, dout; /* the same shapes; data NULL: not needed */
    int over[3];                  /* 1: dq, dk, dv hold nothing yet, and are not added to */
    int64_t tq, tk, d;            /* queries, keys of this row of the batch, features */
    int64_t from, to;             /* query i sees of the tk keys [from + i, to + i) if `moves` is */
    int moves;                    /* 1; if it is 0, all queries see [from, to) */
    int64_t rows, keys;           /* queries and keys of a tile, at most */
    int64_t strip;                /* queries whose scores are computed at once, at most */
    int64_t pitch;                /* from row to row of s and t: more than keys, so that a column's
                                     elements are in different sets of a cache */
    int64_t blocks, packed;       /* blocks of keys that are kept; how many of them are packed */
    int pairs;                    /* 1: words of operands are pairs of bf16, not tsh_real */
    int few;                      /* 1: too few queries to pack keys for */
    int raw;                      /* 1: backward's kernels leave dS without scale and slope */
    int rounded;                  /* 1: softmax rounds p, and in backward dS, to bf16, in pairs */
    int fresh;                    /* 1: dK and dV hold nothing of keys that no earlier query of
                                     this head sees */
    /* (optional, both) tshi_kernel_max; tshi_kernel_sum_exps in place, of whole blocks: x has the
     * space, beyond n the exponentials are 0 */
    tsh_real (*most)(const tsh_real *x, int64_t n);
    tsh_real (*exps)(tsh_real *x, int64_t n, tsh_real max);
    /* (optional) stores n values times `by` as bf16 */
    void (*put)(void *to, const tsh_real *x, int64_t n, tsh_real by);
    uint64_t first;               /* global index of score (0, 0) of this head, for dropout */
    int64_t width;                /* of a row of all scores, (B, H, Tq, width), for dropout */
    int64_t mask, mask_row;       /* offset of this head's mask; from query to query */
    const void *mask_values;      /* values of the mask, or NULL */
    tsh_real *mask_grad;          /* its gradient, with the mask's strides; NULL: not needed */
    const tsh_real *sinks;        /* NULL, or the sinks from this head on */
    int64_t sink_step;            /* from the sink of a query to that of the next one */
    tsh_real *sink_grads;         /* shape (tq): what each query gives; NULL: not needed */
    tsh_real ds_scale;            /* what the kernels of backward multiply dS by */
    tsh_real *max;                /* shape (tq): m of each query; -infinity if it sees no key */
    tsh_real *log_sum;            /* shape (tq): log l of each query */
    tsh_real *rows_q, *rows_do;   /* words, shape (ROWS, d): the tile's rows of Q and dO */
    tsh_real *columns_q, *columns_do; /* pairs: Q and dO by features, shape (ROWS, D32) */
    tsh_real *columns_p, *columns_s;  /* pairs of queries: p and dS, shape (ROWS / 2, pitch) */
    tsh_real *s; /* shape (strip, pitch): scores, then p */
    tsh_real *t; /* shape (ROWS, pitch): in backward dO V^T, then dS */
    tsh_real *slope;                  /* shape (strip, pitch): in backward 1 - (s / cap)^2 */
    tsh_real *sum;                    /* shape (ROWS, D32): rows of O, in backward of dQ */
    tsh_real *row;                    /* m, then l, of the tile's queries; in backward delta */
    tsh_real *keys_k, *keys_v; /* words, keys are columns: per block of keys, shape (d, keys) */
    tsh_real *features_k, *features_v; /* features are columns: per block, shape (keys, D32) */
    tsh_real *transposed;              /* shape (keys, d): a block of dK or dV */
    tsh_real *dk_t, *dv_t;             /* dK^T and dV^T of this head: per block, shape (d, keys);
                                          pairs: dK and dV, shape (keys, D32) */
    char *scratch;                     /* for tshi_gemm_run */
    tshi_gemm_walk walk;               /* cache lines to prefetch */
    tshi_matrix ahead[8]; /* to prefetch after that: `left` of them, the last one first */
    int left;
} tshi_head;

/* Returns the matrix of scores, in h->s or h->t, that begins at `data`. */
static tshi_matrix tshi_attention_tile(const tshi_head *h, tsh_real *data) {
    return tshi_gemm_matrix(data, h->pitch, 1);
}

/* Returns how many keys query i sees, from key 0 on. */
static int64_t tshi_attention_visible(const tshi_head *h, int64_t i) {
    const int64_t visible = h->moves ? h->to + i : h->to;
    return visible < 0 ? 0 : tshi_base_min(visible, h->tk);
}

/* Returns how many keys before those that query i sees its window hides. */
static int64_t tshi_attention_hidden(const tshi_head *h, int64_t i) {
    const int64_t hidden = h->moves ? h->from + i : h->from;
    return hidden < 0 ? 0 : tshi_base_min(hidden, h->tk);
}

/* Returns the first key of the first block that a tile of queries from i on needs. */
static int64_t tshi_attention_start(const tshi_head *h, int64_t i) {
    const int64_t hidden = tshi_attention_hidden(h, i);
    return hidden ? hidden / h->keys * h->keys : 0;
}

/* Returns the stairs of what the queries from i on see of the keys from j on: of columns of scores,
 * and of sums over keys. */
static tshi_matmul_stairs tshi_attention_stairs(const tshi_head *h, int64_t i, int64_t j) {
    const int64_t seen = h->moves ? h->to + i - j : (int64_t)TSHI_MATMUL_ALL;
    const tshi_matmul_stairs stairs = {seen, seen};
    return stairs;
}

/* Returns D32. */
static int64_t tshi_attention_wide(int64_t d) {
    return tshi_base_ceil(d, TSHI_BLOCK) * TSHI_BLOCK;
}

/* Returns how many words n elements are, in an operand. */
static int64_t tshi_attention_words(const tshi_head *h, int64_t n) {
    return h->pairs ? (n + 1) / 2 : n;
}

/* Copies m rows of x, from row i on, to `to`, shape (m, d); of pairs, the last one of an odd row
 * has a 0. */
static void tshi_attention_rows(const tshi_head *h, tsh_real *to, tshi_matrix x, int64_t i,
                                int64_t m) {
    const int64_t words = tshi_attention_words(h, h->d);
    for (int64_t r = 0; r < m; r++, to += words) {
        tshi_operand y[2];
        y[0] = tshi_kernel_operand(to, 1, h->pairs ? TSH_BF16 : TSH_REAL);
        y[1] = tshi_kernel_operand(tshi_gemm_from(x, i + r, 0).data, x.column, x.dtype);
        if (h->pairs) memset(to + words - 1, 0, sizeof *to);
        tshi_kernel_copy(h->d, y, NULL);
    }
}

/* Rounds m rows of n values, of scores, to pairs at the same place. */
static void tshi_attention_round(const tshi_head *h, tsh_real *x, int64_t m, int64_t n) {
    for (int64_t r = 0; r < m; r++, x += h->pitch) {
        h->kernel->store(x, x, (int)n, TSH_BF16);
        if (n % 2) memset((char *)x + 2 * n, 0, 2);
    }
}

/* Returns where the block that begins at key j is in an array that has `size` words per key (or, of
 * features, per word of keys, with j in words). */
static int64_t tshi_attention_block(const tshi_head *h, int64_t j, int64_t size) {
    return h->blocks > 1 ? j * size : 0;
}

/* Packs the block of x, which is k or v, that begins at key j: to `keys` with a key per column, to
 * `features` with a feature per column. */
static void tshi_attention_pack_one(const tshi_head *h, int64_t j, tshi_matrix x, tsh_real *keys,
                                    tsh_real *features) {
    const tshi_gemm_kernel *kernel = h->kernel;
    const tshi_gemm_form form = tshi_gemm_form_of(x, h->pairs);
    const int64_t n = tshi_base_min(h->keys, h->tk - j), d = h->d, nr = kernel->nr;
    const int64_t words = tshi_attention_words(h, d), wide = tshi_attention_wide(d);
    x = tshi_gemm_from(x, j, 0);
    if (keys)
        tshi_matmul_pack(kernel, keys + tshi_attention_block(h, j, words), kernel->nr, n, d,
                         nr * words, x, form);
    if (features)
        tshi_matmul_pack(
            kernel, features + tshi_attention_block(h, tshi_attention_words(h, j), wide),
            kernel->nr, d, n, nr * tshi_attention_words(h, h->keys), tshi_gemm_transposed(x), form);
}

/* Packs the block of keys from j on, if no tile has needed it yet. */
static void tshi_attention_pack(tshi_head *h, int64_t j) {
    if (h->packed > j / h->keys) return;
    h->packed = j / h->keys + 1;
    tshi_attention_pack_one(h, j, h->k, h->keys_k, h->features_k);
    tshi_attention_pack_one(h, j, h->v, h->keys_v, h->features_v);
}

/* Sets the walk to the next matrix to prefetch, if it has ended. */
static void tshi_attention_ahead(tshi_head *h) {
    tshi_gemm_walk *w = &h->walk;
    tshi_matrix x;
    int64_t size;
    if (w->at != w->last || w->left > 0 || !h->left) return;
    x = h->ahead[--h->left];
    size = tshi_dtypes[x.dtype].size;
    w->at = w->first = (const char *)x.data;
    w->step = 64; /* bytes of a cache line */
    w->last = w->at + (x.column == 1 ? (h->d * size - 1) / 64 * 64 : 0);
    w->along = x.row * size;
    w->left = tshi_base_min(h->tq, h->tk) - 1; /* rows of k or q */
}

/* Returns B with columns of nr words, in slivers `next` apart. */
static tshi_matmul_slivers tshi_attention_slivers(const tshi_head *h, const tsh_real *data,
                                                  int64_t row, int64_t next) {
    const tshi_matmul_slivers b = {data, row, next, h->pairs ? TSHI_GEMM_PAIRS : TSHI_GEMM_REALS};
    return b;
}

/* C (m, n) = alpha A (m, d) X^T, where X is K or V from key j on, packed its h->keys_..., and A and
 * C rows of a tile, from query i on. */
static void tshi_attention_by_keys(tshi_head *h, int64_t i, int64_t m, int64_t j, int64_t n,
                                   double alpha, const tsh_real *a, const tsh_real *packed,
                                   tsh_real *c) {
    const int64_t nr = h->kernel->nr, words = tshi_attention_words(h, h->d);
    const tshi_matmul_strips rows = {a, words, 1, words};
    tshi_matmul_stairs stairs = tshi_attention_stairs(h, i, j);
    stairs.k = TSHI_MATMUL_ALL;
    packed += tshi_attention_block(h, j, words);
    tshi_attention_ahead(h);
    tshi_matmul_tiles(h->kernel, m, n, h->d, TSHI_R(alpha), rows,
                      tshi_attention_slivers(h, packed, nr, nr * words), 0,
                      tshi_attention_tile(h, c), stairs, &h->walk);
}

/* C (m, d) = A (m, n) X, plus C if `add` is 1, where X is K or V from key j on, and packed its
 * h->features_...; A and C are rows of a tile, from query i on. */
static void tshi_attention_by_features(tshi_head *h, int64_t i, int64_t m, int64_t j, int64_t n,
                                       const tsh_real *a, const tsh_real *packed, int add,
                                       tshi_matrix c) {
    const int64_t nr = h->kernel->nr, wide = tshi_attention_wide(h->d);
    const tshi_matmul_strips rows = {a, h->pitch, 1, h->pitch};
    tshi_matmul_stairs stairs = tshi_attention_stairs(h, i, j);
    stairs.columns = TSHI_MATMUL_ALL;
    packed += tshi_attention_block(h, tshi_attention_words(h, j), wide);
    tshi_attention_ahead(h);
    tshi_matmul_tiles(h->kernel, m, h->d, n, 1, rows,
                      tshi_attention_slivers(h, packed, nr, nr * tshi_attention_words(h, h->keys)),
                      add, c, stairs, &h->walk);
}

/* Masks the scores of queries [i, i + m) and keys [j, j + n): adds a floating mask; a score becomes
 * -infinity where an integer mask is 0. s: the tile, whose first score is that of (i, j). */
static void tshi_attention_masked(const tshi_head *h, tsh_real *s, int64_t i, int64_t m, int64_t j,
                                  int64_t n) {
    const int floating = tshi_dtypes[h->more->mask->dtype].floating;
    const int64_t step = h->more->mask_stride[3];
    for (int64_t r = 0; r < m; r++, s += h->pitch) {
        const int64_t at = h->mask + (i + r) * h->mask_row + j * step; /* index in the mask */
        const tsh_real *add = (const tsh_real *)h->mask_values + at;
        const int32_t *keep = (const int32_t *)h->mask_values + at;
        if (floating)
            TSHI_EACH for (int64_t c = 0; c < n; c++) s[c] += add[c * step];
        else
            TSHI_EACH for (int64_t c = 0; c < n; c++) s[c] = keep[c * step] ? s[c]
                                                                            : -TSHI_R(INFINITY);
    }
}

/* Hides from queries [i, i + m), of the keys [j, j + n), those before their windows. */
static void tshi_attention_hide(const tshi_head *h, tsh_real *s, int64_t i, int64_t m, int64_t j,
                                int64_t n) {
    for (int64_t r = 0; r < m; r++, s += h->pitch) {
        const int64_t hidden = tshi_base_min(tshi_attention_hidden(h, i + r) - j, n);
        for (int64_t c = 0; c < hidden; c++) s[c] = -TSHI_R(INFINITY);
    }
}

/* The soft cap, on n values of m rows. */
typedef struct tshi_cap {
    tsh_real *s, *slope; /* shapes (m, pitch); slope may be NULL */
    int64_t m, pitch;
    tsh_real cap;
} tshi_cap;

TSHI_INLINE void tshi_attention_cap_body(int64_t n, const tshi_operand *none, const tshi_cap *cap,
                                         int fused) {
    const tsh_real most = cap->cap;
    tsh_real y[TSHI_BLOCK];
    int i;
    (void)none;
    for (int64_t r = 0; r < cap->m; r++) {
        tsh_real *s = cap->s + r * cap->pitch;
        tsh_real *slope = cap->slope ? cap->slope + r * cap->pitch : NULL;
        for (int64_t e = 0; e < n; e += TSHI_BLOCK) { /* rows have space for whole blocks */
            TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) y[i] = s[e + i] / most;
            TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) y[i] = tshi_math_tanh(y[i], fused);
            TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) s[e + i] = y[i] * most;
            if (!slope) continue;
            TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) slope[e + i] = TSHI_R(1) - y[i] * y[i];
        }
    }
}
TSHI_KERNEL_FUSED(tshi_attention_cap, tshi_cap);

/* Sets h->s to the masked scores of rows [r, r + m) of a tile's queries, which begin at query i,
 * and keys [j, j + n). */
static void tshi_attention_scores(tshi_head *h, int64_t i, int64_t r, int64_t m, int64_t j,
                                  int64_t n) {
    tsh_real *s = h->s;
    if (h->few)
        tshi_gemm_run(h->kernel, h->scratch, NULL, m, n, h->d, TSHI_R(h->more->scale),
                      tshi_gemm_from(h->q, i + r, 0),
                      tshi_gemm_transposed(tshi_gemm_from(h->k, j, 0)), 0,
                      tshi_attention_tile(h, s), tshi_attention_tile(h, s));
    else
        tshi_attention_by_keys(h, i + r, m, j, n, h->more->scale,
                               h->rows_q + r * tshi_attention_words(h, h->d), h->keys_k, s);
    if (h->more->cap > 0) {
        const tshi_cap cap = {s, h->slope, m, h->pitch, TSHI_R(h->more->cap)};
        tshi_attention_cap[h->ctx->isa](n, NULL, &cap);
    }
    if (h->more->mask) tshi_attention_masked(h, s, i + r, m, j, n);
    if (h->more->window) tshi_attention_hide(h, s, i + r, m, j, n);
}

/* Applies dropout to the visible keys of queries [i, i + m) and keys [j, j + n); tile: the element
 * of query i and key j. */
static void tshi_attention_dropout(const tshi_head *h, tsh_real *tile, int64_t i, int64_t m,
                                   int64_t j, int64_t n) {
    tshi_dropout_run run;
    int64_t r, visible; /* visible: keys of the tile that row r sees */
    run.isa = h->ctx->isa;
    run.mask = &h->more->drop;
    for (r = 0; r < m; r++) {
        run.x = run.y = tile + r * h->pitch;
        visible = tshi_base_min(tshi_attention_visible(h, i + r) - j, n);
        if (visible > 0)
            tshi_dropout_mask_run(&run, (int64_t)h->first + (i + r) * h->width + j, 0, visible);
    }
}
