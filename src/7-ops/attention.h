/* ========================================================================== */
/* >>attention                                    MARK: - attention (private) */
/* Attention: structs, packing of K and V, the masked scores of a tile.       */
/* Needs: >>op-dropout >>op-matmul.                                           */
/* ========================================================================== */

/* For each row of the batch and each head, Q and O have the shape (Tq, D), K and V (Tk, D). The
 * scores s_ij = scale q_i k_j are computed in tiles of TSHI_TILE_ROWS queries and TSHI_TILE_KEYS
 * keys, with an online softmax: each query has a running maximum m and a running sum l (Milakov &
 * Gimelshein 2018). Backward computes s again (Dao et al. 2022):
 *
 *     p = e^(s - m - log l),   delta_i = dO_i . O_i,      dV += p^T dO
 *     dS = p (dO V^T - delta), dQ += scale dS K,          dK += scale dS^T Q
 *
 * m and log l are stored apart: in their sum, log l would lose digits if m is large. Dropout is
 * applied to p and to dO V^T; its mask depends on the global index of the score. With a soft cap c,
 * s is c tanh(scale q k / c), and dS is also multiplied by 1 - tanh^2; the gradient of a mask is dS
 * before that factor and before scale. A sink is one more key, seen first, whose score is given and
 * whose value is 0: m and l start with it.
 *
 * The products run on the micro-kernels of the matrix product (tshi_matmul_tiles). A block of
 * TSHI_TILE_KEYS keys is packed when a tile first needs it, and kept for the other tiles and query
 * heads that use the same head of k. Rows that are the right operand of a product are read in
 * place if they are dense and of tsh_real (tshi_attention_dense). Most scores that the causal mask
 * hides are not computed (tshi_matmul_stairs). If q, k and v are bf16 and the processor multiplies
 * pairs of bf16, all operands are packed as such pairs, with p, dS and dO rounded to bf16. dV and
 * dK are computed in place where tshi_attention_in_place returns 1.
 *
 * The order of the additions in a sum depends on the positions of keys alone: a block of keys
 * begins at a multiple of the block size, and keys that a query does not see add 0.
 * tshi_attention_begin prepares what all heads share; tshi_attention_piece, which runs on each
 * thread, goes through tiles. If rows of the batch are cut into parts that do not see each other
 * (tshi_row_part), each part is computed like a row. Kernels compute rows in whole blocks of
 * TSHI_BLOCK values. In the comments below, h is a head, i the index of a query, j that of a key; a
 * tile, or a strip of it (some of its rows), has m queries and n keys. */
enum {
    TSHI_TILE_ROWS = 96,       /* queries per tile: a multiple of mr, the rows of a micro-kernel */
    /* keys per tile in forward, and in backward (_BACK): multiples of TSHI_BLOCK, at most kc, the
     * longest sum that a micro-kernel takes in one call */
    TSHI_TILE_KEYS = 256,
    TSHI_TILE_KEYS_BACK = 128,
    TSHI_TILE_STRIP = 24,      /* queries of a strip: so few that their scores stay in L1 */
    TSHI_TILE_ROWS_PAIRS = 264 /* queries per tile in backward if operands are pairs of bf16 */
};

/* How many keys a row of the batch has. */
typedef struct tshi_keys {
    int64_t past, added; /* cached keys; new keys, without padding */
} tshi_keys;

/* The options of a call of tsh_attention, and the params of its node. */
typedef struct tshi_attention {
    double scale, cap;      /* factor of the scores; soft cap of the scores, 0: none */
    int causal, dropout;    /* 1: the causal mask is on; 1: dropout is applied */
    int64_t window;         /* size of the sliding window, in keys; 0: none */
    tsh_tensor *sinks;      /* scores of the sinks, tsh_real, shape (H); NULL: no sinks */
    tshi_dropout drop;      /* key, stream and probability of the dropout mask */
    tsh_tensor *mask;       /* attention mask, tsh_real or i32; NULL: no mask */
    int64_t mask_stride[4]; /* the mask's strides over (B, H, Tq, Tk); 0: it broadcasts */
    tshi_keys keys;         /* keys of every row of the batch; if `ragged`, of the longest row */
    int ragged; /* 1: rows differ in their numbers of keys: a tshi_keys per row (tshi_heads.rows) */
    int64_t behind; /* new keys minus queries: query i has the position of new key i + behind */
    /* i32, shape (B, T): number of the sequence that each position of a row belongs to; NULL: rows
     * are one sequence each */
    tsh_tensor *segments;
    /* with segments: number of runs, adjacent positions of one segment, in this rank's rows; else
     * 0 */
    int64_t runs;
    /* parts that this rank's rows are cut into, at most `runs` (>>attention-segments) */
    int64_t parts;
} tshi_attention;

/* In the shapes of tshi_head and its parts, keys, rows, d, strip and pitch are fields of tshi_head,
 * and "d padded" is d rounded up to a multiple of TSHI_BLOCK. A word of an operand is a tsh_real;
 * if tshi_head.pairs is 1, it is a pair of bf16, and the dimension of products that is summed over
 * has half as many words. */

/* The fields of tshi_head that only backward needs. */
typedef struct tshi_head_back {
    tshi_matrix dq, dk, dv, dout; /* gradients of q, k, v, o; data NULL: not needed */
    int over[3];                  /* of dq, dk, dv: 1: overwrites the gradient, 0: adds to it */
    /* 1: the kernels leave dS, the gradient of the scores, unscaled, and
     * tshi_attention_backward_raw multiplies it by scale and by the soft cap's derivative */
    int raw;
    /* 1: dK and dV are not zeroed beforehand: the first tile that sees a key overwrites the key's
     * rows, and later tiles add to them */
    int fresh;
    tsh_real ds_scale; /* the kernels of backward multiply dS, the scores' gradient, by this */
    /* copy of the tile's rows of dO, shaped as rows_q in tshi_head, unless dO is read in place */
    tsh_real *rows_do;
    /* the tile's rows of dO as left operand A of products: rows_do, or dO in place */
    tshi_matmul_strips left_do;
    /* the tile's rows of O, in place or copied to h->sum; not used if operands are pairs of bf16 */
    tshi_matmul_strips left_o;
    /* if pairs: the tile's rows of Q and dO, packed with a feature per column; shape (rows / 2, d
     * padded) of pairs of bf16, each with the values of two queries */
    tsh_real *columns_q, *columns_do;
    /* if pairs: the probabilities p and the gradients dS of the scores; shape (rows / 2, pitch) of
     * pairs of bf16, each with the values of two queries */
    tsh_real *columns_p, *columns_s;
    tsh_real *t;          /* shape (rows, pitch): dO V^T, then dS, the gradient of the scores */
    tsh_real *derivative; /* shape (strip, pitch): derivative of the soft cap, 1 - (s / cap)^2 */
    /* sums of dK and dV of this head of k, unless these are computed in place; each block of keys
     * has shape (keys, d padded to a multiple of TSHI_BLOCK) */
    tsh_real *sum_k, *sum_v;
} tshi_head_back;

/* The mask of a head. Its offset and strides count elements of the mask. */
typedef struct tshi_head_mask {
    int64_t first, row; /* index of the head's first score in the mask; stride between queries */
    const void *values; /* values of the mask; NULL: there is no mask */
    tsh_real *grad;     /* gradient of the mask, with the mask's strides; NULL: not needed */
} tshi_head_mask;

/* The attention sinks of a head: scores that compete with those of the keys. */
typedef struct tshi_head_sinks {
    const tsh_real *scores; /* scores of the sinks, from this head's on; NULL: no sinks */
    int64_t step;           /* from a query's sink to the next one's; 0: all have one sink */
    tsh_real *grads; /* contribution of each query to the gradient of its sink, shape (tq); NULL:
                      * not needed */
} tshi_head_sinks;

/* One head of one row of the batch, with scratch memory of the thread that computes it. */
typedef struct tshi_head {
    tsh_ctx *ctx;
    const tshi_attention *more; /* options of the call */
    const tshi_gemm_kernel *kernel;
    tshi_matrix q, k, v, o;       /* shapes (tq, d), (tk, d), (tk, d), (tq, d) */
    int64_t tq, tk, d;            /* numbers of queries, keys of this row, features per head */
    /* query i sees the keys [from + i, to + i) if `moves` is 1, else [from, to), within [0, tk) */
    int64_t from, to;
    int moves;
    /* if positions of several segments are mixed: the segment of position i is at
     * segments[i * segment_step]; else NULL */
    const int32_t *segments;
    int64_t segment_step;
    int64_t rows, keys;           /* largest numbers of queries and of keys in a tile */
    int64_t strip;                /* largest number of queries whose scores are computed at once */
    /* row stride, in elements, of s and back.t: more than `keys`, so that the elements of a column
     * are in different sets of a cache */
    int64_t pitch;
    /* how many blocks of packed keys scratch has space for; how many are packed already */
    int64_t blocks, packed;
    int pairs;                    /* 1: operands of products are pairs of bf16; 0: tsh_real */
    int few;                      /* 1: so few queries that packing the keys does not pay */
    /* 1: the softmax kernels themselves round p, the probabilities, and in backward dS to pairs of
     * bf16 */
    int rounded;
    /* faster versions of tshi_kernel_max (most) and of tshi_kernel_sum_exps in place (exps); NULL
     * if there are none. exps computes whole blocks of TSHI_BLOCK values: x has space for them, and
     * its elements after the n exponentials become 0 */
    tsh_real (*most)(const tsh_real *x, int64_t n);
    tsh_real (*exps)(tsh_real *x, int64_t n, tsh_real max);
    /* multiplies n values by `by` and stores them as bf16; NULL: there is no such kernel */
    void (*put)(void *to, const tsh_real *x, int64_t n, tsh_real by);
    uint64_t first;               /* global index of this head's score (0, 0), for dropout masks */
    /* dropout masks number the scores of all heads as an array of shape (B, H, Tq, width) */
    int64_t width;
    /* m of each query, its largest score, shape (tq); -infinity: the query sees no key */
    tsh_real *max;
    tsh_real *log_sum;            /* shape (tq): log l of each query, l = sum of e^(s - m) */
    /* the tile's rows of Q, if copied, shape (rows, d padded to a multiple of TSHI_BLOCK); if
     * pairs: (rows, d / 2) pairs of bf16 */
    tsh_real *rows_q;
    /* the tile's rows of Q as left operand A of products: rows_q, or Q in place */
    tshi_matmul_strips left_q;
    tsh_real *s; /* shape (strip, pitch): scores, replaced by e^(s - m), in backward by p */
    /* the tile's rows of O (in backward of O, then of dQ), shape (rows, d padded to a multiple of
     * TSHI_BLOCK) */
    tsh_real *sum;
    /* forward: the running maximum m of each query of the tile, then the running sum l of each;
     * backward: delta, the dot product of dO and O, of each */
    tsh_real *row;
    /* K and V packed with a key per column; shape of each block of keys: (d, keys), or, in pairs of
     * bf16, (d / 2, keys) */
    tsh_real *keys_k, *keys_v;
    /* K and V packed with a feature per column, unless they are dense; shape of each block of keys:
     * (keys, d padded to a multiple of TSHI_BLOCK), or, in pairs of bf16, (keys / 2, d padded) */
    tsh_real *features_k, *features_v;
    char *scratch;                     /* scratch memory of tshi_gemm_run */
    tshi_gemm_walk walk;               /* cache lines to prefetch during the products */
    /* matrices to prefetch after `walk`: `left` of them, the last one first */
    tshi_matrix ahead[8];
    int left;
    tshi_head_mask mask;
    tshi_head_sinks sinks;
    tshi_head_back back;
} tshi_head;

/* Returns the part of h->s or h->back.t that begins at `data`, as a matrix. */
static tshi_matrix tshi_attention_tile(const tshi_head *h, tsh_real *data) {
    return tshi_gemm_matrix(data, h->pitch, 1);
}

/* Returns the end of the keys that query i sees: the query sees no key from this index on. */
static int64_t tshi_attention_visible(const tshi_head *h, int64_t i) {
    const int64_t visible = h->moves ? h->to + i : h->to;
    return visible < 0 ? 0 : tshi_base_min(visible, h->tk);
}

/* Returns how many of the first keys query i does not see because of its window. */
static int64_t tshi_attention_hidden(const tshi_head *h, int64_t i) {
    const int64_t hidden = h->moves ? h->from + i : h->from;
    return hidden < 0 ? 0 : tshi_base_min(hidden, h->tk);
}

/* Returns the index of the first key of the first block of keys that the tile at query i needs. */
static int64_t tshi_attention_start(const tshi_head *h, int64_t i) {
    const int64_t hidden = tshi_attention_hidden(h, i);
    return hidden ? hidden / h->keys * h->keys : 0;
}

/* Returns which part of a product of queries from i on and keys from j on is needed. Query i + r
 * sees the first (seen + r) of these keys: in row r of a product whose columns are keys, only they
 * are needed; in one that sums over keys, only their terms are not 0. */
static tshi_matmul_stairs tshi_attention_stairs(const tshi_head *h, int64_t i, int64_t j) {
    const int64_t seen = h->moves ? h->to + i - j : (int64_t)TSHI_MATMUL_ALL;
    const tshi_matmul_stairs stairs = {seen, seen};
    return stairs;
}

/* Returns d rounded up to a multiple of TSHI_BLOCK. */
static int64_t tshi_attention_wide(int64_t d) {
    return tshi_base_ceil(d, TSHI_BLOCK) * TSHI_BLOCK;
}

/* Returns how many words of memory n elements of an operand take: n tsh_real or, if h->pairs is 1,
 * (n + 1) / 2 pairs of bf16. */
static int64_t tshi_attention_words(const tshi_head *h, int64_t n) {
    return h->pairs ? (n + 1) / 2 : n;
}

/* Returns the row stride, in words, of copied rows of Q and dO. Rows of tsh_real are padded to
 * whole blocks of TSHI_BLOCK, because products read them as right operand B, too. */
static int64_t tshi_attention_row_words(const tshi_head *h) {
    return h->pairs ? tshi_attention_words(h, h->d) : tshi_attention_wide(h->d);
}

/* Returns 1 if products can read rows of x in place as their right operand B: the rows are tsh_real
 * and dense (rows far apart would fall into the same sets of a cache), and d is a multiple of half
 * of nr, the columns that a micro-kernel reads. */
static int tshi_attention_dense(const tshi_head *h, tshi_matrix x) {
    return !h->pairs && x.dtype == TSH_REAL && x.column == 1 && x.row == h->d &&
           h->d % (h->kernel->nr / 2) == 0;
}

/* Copies rows [i, i + m) of x to `to`, tshi_attention_row_words apart, as tsh_real or, if h->pairs
 * is 1, as pairs of bf16: then, if d is odd, the second element of a row's last pair is 0. */
static void tshi_attention_rows(const tshi_head *h, tsh_real *to, tshi_matrix x, int64_t i,
                                int64_t m) {
    const int64_t words = tshi_attention_row_words(h);
    for (int64_t r = 0; r < m; r++, to += words) {
        tshi_operand y[2];
        y[0] = tshi_kernel_operand(to, 1, h->pairs ? TSH_BF16 : TSH_REAL);
        y[1] = tshi_kernel_operand(tshi_gemm_from(x, i + r, 0).data, x.column, x.dtype);
        if (h->pairs) memset(to + words - 1, 0, sizeof *to);
        tshi_kernel_copy(h->d, y, NULL);
    }
}

/* Returns rows [i, i + m) of x as left operand A of products: in place if they are contiguous
 * tsh_real and, if `both` is 1, may be right operand B, too; else copied to `to` by
 * tshi_attention_rows. */
static tshi_matmul_strips tshi_attention_operand(const tshi_head *h, tsh_real *to, tshi_matrix x,
                                                 int64_t i, int64_t m, int both) {
    const int in_place = both ? tshi_attention_dense(h, x)
                              : !h->pairs && x.dtype == TSH_REAL && x.column == 1;
    const int64_t row = in_place ? x.row : tshi_attention_row_words(h);
    const tshi_matmul_strips strips = {in_place ? tshi_gemm_at(x, i, 0) : to, row, 1, row};
    if (!in_place) tshi_attention_rows(h, to, x, i, m);
    return strips;
}

/* Rounds m rows of n scores to pairs of bf16, in place. If n is odd, the second element of a row's
 * last pair is 0. */
static void tshi_attention_round(const tshi_head *h, tsh_real *x, int64_t m, int64_t n) {
    for (int64_t r = 0; r < m; r++, x += h->pitch) {
        h->kernel->store(x, x, (int)n, TSH_BF16);
        if (n % 2) memset((char *)x + 2 * n, 0, 2);
    }
}

/* Returns the offset, in words, of the block of keys that begins at key j in an array of packed K
 * or V with `size` words per key; 0 if the array keeps only one block. In features_k and features_v
 * of bf16, a word belongs to a pair of keys: then j is the index of a pair, and `size` the words
 * per pair. */
static int64_t tshi_attention_block(const tshi_head *h, int64_t j, int64_t size) {
    return h->blocks > 1 ? j * size : 0;
}

/* Packs the block of x (k or v) that begins at key j: to `keys` with a key per column, and to
 * `features` with a feature per column. Skips the one that is NULL. */
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
    if (features && !tshi_attention_dense(h, x))
        tshi_matmul_pack(
            kernel, features + tshi_attention_block(h, tshi_attention_words(h, j), wide),
            kernel->nr, d, n, nr * tshi_attention_words(h, h->keys), tshi_gemm_transposed(x), form);
}

/* Packs the block of k and v that begins at key j, unless an earlier tile has packed it. */
static void tshi_attention_pack(tshi_head *h, int64_t j) {
    if (h->packed > j / h->keys) return;
    h->packed = j / h->keys + 1;
    tshi_attention_pack_one(h, j, h->k, h->keys_k, h->features_k);
    tshi_attention_pack_one(h, j, h->v, h->keys_v, h->features_v);
}

/* Once all cache lines of h->walk have been prefetched, sets it to those of the next matrix of
 * h->ahead. */
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
    /* rows that follow the first: x has tq or tk rows, so only as many as the smaller number */
    w->left = tshi_base_min(h->tq, h->tk) - 1;
}

/* Returns `data` as operand B of tshi_matmul_tiles: packed in groups of nr columns of B (slivers).
 * row: distance from one row of a group to the next row; next: from one group to the next group;
 * both in tsh_real or, if h->pairs is 1, in pairs of bf16. */
static tshi_matmul_slivers tshi_attention_slivers(const tshi_head *h, const tsh_real *data,
                                                  int64_t row, int64_t next) {
    const tshi_matmul_slivers b = {data, row, next, h->pairs ? TSHI_GEMM_PAIRS : TSHI_GEMM_REALS};
    return b;
}

/* Computes C (m, n) = alpha A (m, d) X^T, where X is K or V from key j on, which `packed`
 * (h->keys_k or h->keys_v) has with a key per column. A and C have the rows of a tile from query i
 * on; `rows` has A, and query i is its row r. */
static void tshi_attention_by_keys(tshi_head *h, int64_t i, int64_t r, int64_t m, int64_t j,
                                   int64_t n, double alpha, tshi_matmul_strips rows,
                                   const tsh_real *packed, tsh_real *c) {
    const int64_t nr = h->kernel->nr, words = tshi_attention_words(h, h->d);
    tshi_matmul_stairs stairs = tshi_attention_stairs(h, i, j);
    stairs.k = TSHI_MATMUL_ALL;
    rows.data += r * rows.row;
    packed += tshi_attention_block(h, j, words);
    tshi_attention_ahead(h);
    tshi_matmul_tiles(h->kernel, m, n, h->d, TSHI_R(alpha), rows,
                      tshi_attention_slivers(h, packed, nr, nr * words), 0,
                      tshi_attention_tile(h, c), stairs, &h->walk);
}

/* Returns the rows of x, K or V, from key j on as right operand B of products: in place if they are
 * dense, else as packed in h->features_k or h->features_v (`packed`). */
static tshi_matmul_slivers tshi_attention_features(const tshi_head *h, tshi_matrix x, int64_t j,
                                                   const tsh_real *packed) {
    const int64_t nr = h->kernel->nr, words = tshi_attention_words(h, j);
    if (tshi_attention_dense(h, x))
        return tshi_attention_slivers(h, tshi_gemm_at(x, j, 0), x.row, nr);
    return tshi_attention_slivers(
        h, packed + tshi_attention_block(h, words, tshi_attention_wide(h->d)), nr,
        nr * tshi_attention_words(h, h->keys));
}

/* Computes C (m, d) = A (m, n) X, plus C if `add` is 1, where X is K or V from key j on, as
 * tshi_attention_features returns it. A and C are rows of a tile, from query i on. */
static void tshi_attention_by_features(tshi_head *h, int64_t i, int64_t m, int64_t j, int64_t n,
                                       const tsh_real *a, tshi_matmul_slivers x, int add,
                                       tshi_matrix c) {
    const tshi_matmul_strips rows = {a, h->pitch, 1, h->pitch};
    tshi_matmul_stairs stairs = tshi_attention_stairs(h, i, j);
    stairs.columns = TSHI_MATMUL_ALL;
    tshi_attention_ahead(h);
    tshi_matmul_tiles(h->kernel, m, h->d, n, 1, rows, x, add, c, stairs, &h->walk);
}

/* Masks the scores of queries [i, i + m) and keys [j, j + n): adds a floating mask; a score becomes
 * -infinity where an integer mask is 0. s points to the score of (i, j). */
static void tshi_attention_masked(const tshi_head *h, tsh_real *s, int64_t i, int64_t m, int64_t j,
                                  int64_t n) {
    const int floating = tshi_dtypes[h->more->mask->dtype].floating;
    const int64_t step = h->more->mask_stride[3];
    for (int64_t r = 0; r < m; r++, s += h->pitch) {
        const int64_t at = h->mask.first + (i + r) * h->mask.row + j * step; /* index in the mask */
        const tsh_real *add = (const tsh_real *)h->mask.values + at;
        const int32_t *keep = (const int32_t *)h->mask.values + at;
        if (floating)
            TSHI_EACH for (int64_t c = 0; c < n; c++) s[c] += add[c * step];
        else
            TSHI_EACH for (int64_t c = 0; c < n; c++) s[c] = keep[c * step] ? s[c]
                                                                            : -TSHI_R(INFINITY);
    }
}

/* Sets the scores of queries [i, i + m) and keys [j, j + n) to -infinity where the key is before
 * the query's window. s points to the score of (i, j). */
static void tshi_attention_hide(const tshi_head *h, tsh_real *s, int64_t i, int64_t m, int64_t j,
                                int64_t n) {
    for (int64_t r = 0; r < m; r++, s += h->pitch) {
        const int64_t hidden = tshi_base_min(tshi_attention_hidden(h, i + r) - j, n);
        for (int64_t c = 0; c < hidden; c++) s[c] = -TSHI_R(INFINITY);
    }
}

/* Masks scores between the sequences of a row: sets those of queries [i, i + m) and keys [j, j + n)
 * to -infinity where query and key are in different segments, or the query is padding. s points to
 * the score of (i, j). */
static void tshi_attention_separate(const tshi_head *h, tsh_real *s, int64_t i, int64_t m,
                                    int64_t j, int64_t n) {
    const int64_t step = h->segment_step;
    const int32_t *keys = h->segments + j * step;
    for (int64_t r = 0; r < m; r++, s += h->pitch) {
        const int32_t own = h->segments[(i + r) * step];
        TSHI_EACH for (int64_t c = 0; c < n; c++) s[c] = own >= 0 && keys[c * step] == own
                                                             ? s[c]
                                                             : -TSHI_R(INFINITY);
    }
}

/* Parameters of the soft cap's kernel, which replaces s by cap tanh(s / cap), n values in each of m
 * rows, and sets `derivative` to 1 - tanh^2. */
typedef struct tshi_cap {
    /* the scores; memory for the derivative, NULL: not needed. Rows begin `pitch` elements
     * apart. */
    tsh_real *s, *derivative;
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
        tsh_real *derivative = cap->derivative ? cap->derivative + r * cap->pitch : NULL;
        for (int64_t e = 0; e < n; e += TSHI_BLOCK) { /* rows have space for whole blocks */
            TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) y[i] = s[e + i] / most;
            TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) y[i] = tshi_math_tanh(y[i], fused);
            TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) s[e + i] = y[i] * most;
            if (!derivative) continue;
            TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) derivative[e + i] = TSHI_R(1) - y[i] * y[i];
        }
    }
}
TSHI_KERNEL_FUSED(tshi_attention_cap, tshi_cap);

/* Sets h->s to the masked scores of rows [r, r + m) of the tile that begins at query i, and of keys
 * [j, j + n). */
static void tshi_attention_scores(tshi_head *h, int64_t i, int64_t r, int64_t m, int64_t j,
                                  int64_t n) {
    tsh_real *s = h->s;
    if (h->few) {
        const tshi_matrix c = tshi_attention_tile(h, s);
        const tshi_product product = {m,
                                      n,
                                      h->d,
                                      TSHI_R(h->more->scale),
                                      0,
                                      tshi_gemm_from(h->q, i + r, 0),
                                      tshi_gemm_transposed(tshi_gemm_from(h->k, j, 0)),
                                      c,
                                      c,
                                      NULL};
        tshi_gemm_run(h->kernel, h->scratch, product);
    } else
        tshi_attention_by_keys(h, i + r, r, m, j, n, h->more->scale, h->left_q, h->keys_k, s);
    if (h->more->cap > 0) {
        const tshi_cap cap = {s, h->back.derivative, m, h->pitch, TSHI_R(h->more->cap)};
        tshi_attention_cap[h->ctx->isa](n, NULL, &cap);
    }
    if (h->more->mask) tshi_attention_masked(h, s, i + r, m, j, n);
    if (h->more->window) tshi_attention_hide(h, s, i + r, m, j, n);
    if (h->segments) tshi_attention_separate(h, s, i + r, m, j, n);
}

/* Applies dropout to the values in h->s or h->back.t of queries [i, i + m) and of those of the keys
 * [j, j + n) that each query sees. tile points to the value of query i and key j. */
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
