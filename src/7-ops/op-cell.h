/* ========================================================================== */
/* >>op-cell                                        MARK: - op-cell (private) */
/* The gates of an LSTM or GRU at one time step, forward and backward.        */
/* Needs: >>kernel.                                                           */
/* ========================================================================== */

/* A cell computes h and, for an LSTM, c of a time step from those of the step before. Of each unit,
 * with g_k = W_ih x + b_ih + b_hh, the part of gate k that is known before the recurrence, and s_k
 * = W_hh h', where h' and c' are those of the step before:
 *
 *     LSTM   i = sigmoid(g_0 + s_0), f = sigmoid(g_1 + s_1), u = tanh(g_2 + s_2),
 *            o = sigmoid(g_3 + s_3), c = f c' + i u, h = o tanh(c)
 *     GRU    r = sigmoid(g_0 + s_0), z = sigmoid(g_1 + s_1), v = s_2 + b_hh,
 *            u = tanh(g_2 + r v) (g_2 without b_hh), h = (1 - z) u + z h'
 *
 * (Hochreiter & Schmidhuber 1997; Cho et al. 2014, in the form of torch.nn.GRU.) Forward replaces
 * the g by i, f, u, o or r, z, u, v. Backward replaces these by the gradients of the arguments of
 * sigmoid and tanh; the GRU's fourth one is that of v. */

enum { TSHI_CELL_PLANES = 4 }; /* numbers kept for each unit and time step */

/* Operands of the kernels, at one time step and from the first unit of a piece on. Every array has
 * a row per sample of the batch; _row: elements from row to row. */
typedef struct tshi_cell {
    int64_t units;  /* number of units of this piece */
    tsh_real *gate; /* planes, TSHI_CELL_PLANES of them: g, or what has replaced them */
    int64_t gate_plane, gate_row;
    const tsh_real *sum; /* forward: s = W_hh h', a plane per gate; backward: one plane, the
                          * gradient of h that comes from the next time step */
    int64_t sum_plane, sum_row;
    const tsh_real *bias;   /* GRU: b_hh of gate u; NULL: 0 */
    const tsh_real *before; /* state of the step before, LSTM: c', GRU: h'; NULL: 0 */
    int64_t before_row;
    tsh_real *cell;     /* LSTM: c of this time step */
    tsh_real *out;      /* forward: h of this time step */
    int64_t out_row;    /* row stride of cell and out */
    const tsh_real *dy; /* backward: the gradient of this time step's output; NULL: 0 */
    int64_t dy_row;
    tsh_real *carry; /* backward, shape (batch, ..): LSTM: the gradient of c, replaced by
                               * that of c'; GRU: replaced by the gradient of h' that does not
                               * come through W_hh */
    int64_t carry_row;
} tshi_cell;

/* Returns a block of TSHI_BLOCK elements, from element e of the n adjacent elements of x on, in
 * place or copied to pad; zeros if x is NULL. */
TSHI_INLINE const tsh_real *tshi_cell_load(const tsh_real *x, int64_t e, int64_t n, tsh_real *pad) {
    if (x) return tshi_kernel_load_block(x, 1, e, n, pad);
    memset(pad, 0, TSHI_BLOCK * sizeof *pad);
    return pad;
}

/* Loads a block, from unit e on, of each of `count` planes, which have n units: from[k] points to
 * the block of plane k, in place or copied to pad[k]. */
TSHI_INLINE void tshi_cell_planes(const tsh_real *x, int64_t plane, int count, int64_t e, int64_t n,
                                  tsh_real (*pad)[TSHI_BLOCK], const tsh_real **from) {
    for (int k = 0; k < count; k++)
        from[k] = tshi_kernel_load_block(x + k * plane, 1, e, n, pad[k]);
}

/* Stores block[k], the values from unit e on of sample r, in plane k of p->gate. */
TSHI_INLINE void tshi_cell_store(const tshi_cell *p, int64_t r, int64_t e,
                                 tsh_real (*block)[TSHI_BLOCK]) {
    for (int k = 0; k < TSHI_CELL_PLANES; k++)
        tshi_kernel_store_block(p->gate + r * p->gate_row + k * p->gate_plane, 1, e, p->units,
                                block[k], 0);
}

/* Kernel: one time step of an LSTM for n samples. */
TSHI_INLINE void tshi_cell_lstm_body(int64_t n, const tshi_operand *x, const tshi_cell *p,
                                     int fused) {
    tsh_real pad[2 * TSHI_CELL_PLANES][TSHI_BLOCK], more[TSHI_BLOCK];
    tsh_real to[TSHI_CELL_PLANES][TSHI_BLOCK], c[TSHI_BLOCK], h[TSHI_BLOCK];
    const tsh_real *g[TSHI_CELL_PLANES], *s[TSHI_CELL_PLANES], *old;
    int j;
    (void)x;
    for (int64_t r = 0; r < n; r++)
        for (int64_t e = 0; e < p->units; e += TSHI_BLOCK) {
            tshi_cell_planes(p->gate + r * p->gate_row, p->gate_plane, 4, e, p->units, pad, g);
            tshi_cell_planes(p->sum + r * p->sum_row, p->sum_plane, 4, e, p->units, pad + 4, s);
            old = tshi_cell_load(p->before ? p->before + r * p->before_row : NULL, e, p->units,
                                 more);
            TSHI_LANES for (j = 0; j < TSHI_BLOCK; j++)
                to[0][j] = tshi_math_sigmoid(g[0][j] + s[0][j], fused);
            TSHI_LANES for (j = 0; j < TSHI_BLOCK; j++)
                to[1][j] = tshi_math_sigmoid(g[1][j] + s[1][j], fused);
            TSHI_LANES for (j = 0; j < TSHI_BLOCK; j++)
                to[2][j] = tshi_math_tanh(g[2][j] + s[2][j], fused);
            TSHI_LANES for (j = 0; j < TSHI_BLOCK; j++)
                to[3][j] = tshi_math_sigmoid(g[3][j] + s[3][j], fused);
            TSHI_LANES for (j = 0; j < TSHI_BLOCK; j++)
                c[j] = to[1][j] * old[j] + to[0][j] * to[2][j];
            TSHI_LANES for (j = 0; j < TSHI_BLOCK; j++)
                h[j] = to[3][j] * tshi_math_tanh(c[j], fused);
            tshi_cell_store(p, r, e, to);
            tshi_kernel_store_block(p->cell + r * p->out_row, 1, e, p->units, c, 0);
            tshi_kernel_store_block(p->out + r * p->out_row, 1, e, p->units, h, 0);
        }
}
TSHI_KERNEL_FUSED(tshi_cell_lstm, tshi_cell);

/* Kernel: one time step of a GRU for n samples. */
TSHI_INLINE void tshi_cell_gru_body(int64_t n, const tshi_operand *x, const tshi_cell *p,
                                    int fused) {
    tsh_real pad[6][TSHI_BLOCK], more[2][TSHI_BLOCK], to[TSHI_CELL_PLANES][TSHI_BLOCK];
    tsh_real h[TSHI_BLOCK];
    const tsh_real *g[3], *s[3], *old, *b;
    int j;
    (void)x;
    for (int64_t r = 0; r < n; r++)
        for (int64_t e = 0; e < p->units; e += TSHI_BLOCK) {
            tshi_cell_planes(p->gate + r * p->gate_row, p->gate_plane, 3, e, p->units, pad, g);
            tshi_cell_planes(p->sum + r * p->sum_row, p->sum_plane, 3, e, p->units, pad + 3, s);
            old = tshi_cell_load(p->before ? p->before + r * p->before_row : NULL, e, p->units,
                                 more[0]);
            b = tshi_cell_load(p->bias, e, p->units, more[1]);
            TSHI_LANES for (j = 0; j < TSHI_BLOCK; j++)
                to[0][j] = tshi_math_sigmoid(g[0][j] + s[0][j], fused);
            TSHI_LANES for (j = 0; j < TSHI_BLOCK; j++)
                to[1][j] = tshi_math_sigmoid(g[1][j] + s[1][j], fused);
            TSHI_LANES for (j = 0; j < TSHI_BLOCK; j++) to[3][j] = s[2][j] + b[j];
            TSHI_LANES for (j = 0; j < TSHI_BLOCK; j++)
                to[2][j] = tshi_math_tanh(g[2][j] + to[0][j] * to[3][j], fused);
            TSHI_LANES for (j = 0; j < TSHI_BLOCK; j++)
                h[j] = (old[j] - to[2][j]) * to[1][j] + to[2][j];
            tshi_cell_store(p, r, e, to);
            tshi_kernel_store_block(p->out + r * p->out_row, 1, e, p->units, h, 0);
        }
}
TSHI_KERNEL_FUSED(tshi_cell_gru, tshi_cell);

/* Kernel: backward of tshi_cell_lstm. With dh = dy + sum and t = tanh(c):
 *
 *     do = dh t,   dc += dh o (1 - t^2),   di = dc u,   df = dc c',   du = dc i,   dc' = dc f
 *
 * di, df and do are multiplied by the derivative of the sigmoid, v (1 - v); du by 1 - u^2. */
TSHI_INLINE void tshi_cell_lstm_back_body(int64_t n, const tshi_operand *x, const tshi_cell *p,
                                          int fused) {
    tsh_real pad[TSHI_CELL_PLANES][TSHI_BLOCK], more[5][TSHI_BLOCK], t[TSHI_BLOCK];
    tsh_real to[TSHI_CELL_PLANES][TSHI_BLOCK], dc[TSHI_BLOCK];
    const tsh_real *g[TSHI_CELL_PLANES], *s, *old, *c, *dy, *from;
    int j;
    (void)x;
    for (int64_t r = 0; r < n; r++)
        for (int64_t e = 0; e < p->units; e += TSHI_BLOCK) {
            tshi_cell_planes(p->gate + r * p->gate_row, p->gate_plane, 4, e, p->units, pad, g);
            s = tshi_cell_load(p->sum + r * p->sum_row, e, p->units, more[0]);
            old = tshi_cell_load(p->before ? p->before + r * p->before_row : NULL, e, p->units,
                                 more[1]);
            c = tshi_cell_load(p->cell + r * p->out_row, e, p->units, more[2]);
            dy = tshi_cell_load(p->dy ? p->dy + r * p->dy_row : NULL, e, p->units, more[3]);
            from = tshi_cell_load(p->carry + r * p->carry_row, e, p->units, more[4]);
            TSHI_LANES for (j = 0; j < TSHI_BLOCK; j++) t[j] = tshi_math_tanh(c[j], fused);
            TSHI_LANES for (j = 0; j < TSHI_BLOCK; j++) {
                const tsh_real i = g[0][j], f = g[1][j], u = g[2][j], o = g[3][j];
                const tsh_real dh = dy[j] + s[j], d = from[j] + dh * o * (1 - t[j] * t[j]);
                to[0][j] = d * u * i * (1 - i);
                to[1][j] = d * old[j] * f * (1 - f);
                to[2][j] = d * i * (1 - u * u);
                to[3][j] = dh * t[j] * o * (1 - o);
                dc[j] = d * f;
            }
            tshi_cell_store(p, r, e, to);
            tshi_kernel_store_block(p->carry + r * p->carry_row, 1, e, p->units, dc, 0);
        }
}
TSHI_KERNEL_FUSED(tshi_cell_lstm_back, tshi_cell);

/* Kernel: backward of tshi_cell_gru. With dh = dy + sum + carry:
 *
 *     dz = dh (h' - u) z (1 - z),   du = dh (1 - z) (1 - u^2),   dr = du v r (1 - r),   dv = du r
 *
 * carry is the part of the gradient of h from the next time step that does not come through W_hh;
 * it is replaced by such a part of dh', dh z. */
TSHI_INLINE void tshi_cell_gru_back_body(int64_t n, const tshi_operand *x, const tshi_cell *p) {
    tsh_real pad[TSHI_CELL_PLANES][TSHI_BLOCK], more[4][TSHI_BLOCK];
    tsh_real to[TSHI_CELL_PLANES][TSHI_BLOCK], direct[TSHI_BLOCK];
    const tsh_real *g[TSHI_CELL_PLANES], *s, *old, *dy, *from;
    int j;
    (void)x;
    for (int64_t r = 0; r < n; r++)
        for (int64_t e = 0; e < p->units; e += TSHI_BLOCK) {
            tshi_cell_planes(p->gate + r * p->gate_row, p->gate_plane, 4, e, p->units, pad, g);
            s = tshi_cell_load(p->sum + r * p->sum_row, e, p->units, more[0]);
            old = tshi_cell_load(p->before ? p->before + r * p->before_row : NULL, e, p->units,
                                 more[1]);
            dy = tshi_cell_load(p->dy ? p->dy + r * p->dy_row : NULL, e, p->units, more[2]);
            from = tshi_cell_load(p->carry + r * p->carry_row, e, p->units, more[3]);
            TSHI_LANES for (j = 0; j < TSHI_BLOCK; j++) {
                const tsh_real a = g[0][j], z = g[1][j], u = g[2][j], v = g[3][j];
                const tsh_real dh = dy[j] + s[j] + from[j], du = dh * (1 - z) * (1 - u * u);
                to[0][j] = du * v * a * (1 - a);
                to[1][j] = dh * (old[j] - u) * z * (1 - z);
                to[2][j] = du;
                to[3][j] = du * a;
                direct[j] = dh * z;
            }
            tshi_cell_store(p, r, e, to);
            tshi_kernel_store_block(p->carry + r * p->carry_row, 1, e, p->units, direct, 0);
        }
}
TSHI_KERNEL(tshi_cell_gru_back, tshi_cell);

/* What distinguishes an LSTM from a GRU. */
typedef struct tshi_cell_kind {
    int gates;                   /* number of gates: rows of W_ih and of W_hh per unit */
    int lstm;                    /* 1: an LSTM, which has a state c beside h; 0: a GRU */
    int plane[TSHI_CELL_PLANES]; /* plane[k]: in which plane backward leaves the gradient of s_k */
    const tshi_kernel_fn *step, *back;
} tshi_cell_kind;

static const tshi_cell_kind tshi_cell_kinds[] = {
    {4, 1, {0, 1, 2, 3}, tshi_cell_lstm, tshi_cell_lstm_back},
    {3, 0, {0, 1, 3, 0}, tshi_cell_gru, tshi_cell_gru_back}};
