/* ========================================================================== */
/* >>loss-map                                      MARK: - loss-map (private) */
/* Losses element by element: squared, absolute, Huber, binary cross-entropy. */
/* Needs: >>math-more >>kernel.                                               */
/* ========================================================================== */

/* A loss is a tshi_loss_map_row with kernels for an element's loss and its derivatives, which
 * TSHI_LOSS_KERNEL makes from formulas. Forward reads x, target and weights once, in parts of
 * TSHI_LOSS_PART elements: a kernel writes the losses of a part to the output or, if they are
 * reduced, to a buffer, which is summed before the next part. Parts are those of tsh_sum, so the
 * result equals tsh_sum of the unreduced losses bit for bit, for any number of threads. Backward
 * runs one kernel for each gradient. */

enum { TSHI_LOSS_PART = 4096 }; /* elements of a part, added up in tsh_real as by tshi_reduce_sum */

/* Indices of the operands of the loss kernels. Each has a value per element of a part, or, if its
 * step is 0, one value for all elements. */
enum {
    TSHI_LOSS_MAP_OUT, /* result: the losses; in backward, a gradient */
    TSHI_LOSS_MAP_X,
    TSHI_LOSS_MAP_TARGET,
    TSHI_LOSS_MAP_WEIGHT,
    TSHI_LOSS_MAP_POS,  /* pos_weight */
    TSHI_LOSS_MAP_GRAD, /* backward: gradient of the loss of each element */
    TSHI_LOSS_MAP_OPERANDS
};

/* The parameters of the loss kernels. */
typedef struct tshi_loss_map_params {
    double c;    /* delta of the Huber loss, beta of the smooth L1 loss */
    double sign; /* factor of the gradient: 1, or -1 for the target's if it is minus x's */
    int add;     /* 1: adds to the gradient, 0: overwrites it */
} tshi_loss_map_params;

/* Defines a kernel that computes, for each element, the loss, weight times F; with G = 1, a
 * gradient, sign g weight F, where g is the element of GRAD. F is a formula of x, t (the target), p
 * (pos_weight) and c. SETS: AVX2 or PORTABLE (TSHI_KERNEL_AVX2, TSHI_KERNEL_PORTABLE). */
#define TSHI_LOSS_KERNEL(SETS, name, G, F)                                                         \
    TSHI_INLINE void tshi_loss_map_##name##_body(int64_t n, const tshi_operand *operand,           \
                                                 const tshi_loss_map_params *params, int fused) {  \
        tsh_real pad[5][TSHI_BLOCK], y[TSHI_BLOCK]; /* y: results */                               \
        const tsh_real *xs, *ts, *ws, *ps, *gs, c = TSHI_R(params->c),                             \
                                                sign = TSHI_R(params->sign);                       \
        (void)c, (void)fused, (void)sign; /* not every F uses them */                              \
        for (int64_t e = 0; e < n; e += TSHI_BLOCK) {                                              \
            xs = tshi_kernel_load_apart(&operand[TSHI_LOSS_MAP_X], e, n, pad[0]);                  \
            ts = tshi_kernel_load_apart(&operand[TSHI_LOSS_MAP_TARGET], e, n, pad[1]);             \
            ws = tshi_kernel_load_apart(&operand[TSHI_LOSS_MAP_WEIGHT], e, n, pad[2]);             \
            ps = tshi_kernel_load_apart(&operand[TSHI_LOSS_MAP_POS], e, n, pad[3]);                \
            gs = (G) ? tshi_kernel_load_apart(&operand[TSHI_LOSS_MAP_GRAD], e, n, pad[4]) : ws;    \
            TSHI_LANES for (int i = 0; i < TSHI_BLOCK; i++) {                                      \
                const tsh_real x = xs[i], t = ts[i], p = ps[i];                                    \
                (void)x, (void)t, (void)p;                                                         \
                y[i] = (G) ? TSHI_R(sign * gs[i] * ws[i] * (F)) : TSHI_R(ws[i] * (F));             \
            }                                                                                      \
            tshi_kernel_store_apart(&operand[TSHI_LOSS_MAP_OUT], e, n, y, params->add);            \
        }                                                                                          \
    }                                                                                              \
    TSHI_KERNEL_##SETS(tshi_loss_map_##name, tshi_loss_map_params)

/* -- formulas ---------------------------------------------------------------- */

/* Returns d limited to [-c, c]; NaN if d is NaN. */
TSHI_INLINE tsh_real tshi_loss_limit(tsh_real d, tsh_real c) {
    d = d > c ? c : d;
    return d < -c ? -c : d;
}

/* Returns the Huber loss of a difference d: d^2 / 2 up to |d| = c, then linear. */
TSHI_INLINE tsh_real tshi_loss_huber(tsh_real d, tsh_real c) {
    const tsh_real a = tshi_math_abs(d), square = TSHI_R(0.5) * d * d;
    const tsh_real linear = c * (a - TSHI_R(0.5) * c);
    return a > c ? linear : square; /* if d is NaN: square, NaN as well */
}

/* Returns the smooth L1 loss of a difference d: d^2 / (2 c) below |d| = c, then linear. */
TSHI_INLINE tsh_real tshi_loss_smooth(tsh_real d, tsh_real c) {
    const tsh_real a = tshi_math_abs(d), square = TSHI_R(0.5) * d * d / c;
    const tsh_real linear = a - TSHI_R(0.5) * c;
    return a < c ? square : linear; /* if d is NaN: linear, NaN as well */
}

/* Returns the derivative of tshi_loss_smooth: d / c, limited to [-1, 1]; if c is 0, the sign of
 * d. */
TSHI_INLINE tsh_real tshi_loss_smooth_derivative(tsh_real d, tsh_real c) {
    return c > 0 ? TSHI_R(tshi_loss_limit(d, c) / c) : tshi_math_sign(d);
}

/* Returns 1 if v is a probability: from 0 to 1, and not NaN. */
TSHI_INLINE int tshi_loss_probable(tsh_real v) {
    return (v >= 0) & (v <= 1);
}

/* Returns the binary cross-entropy of probabilities x and t, with logarithms of -100 or more; NaN
 * if x or t is no probability. */
TSHI_INLINE tsh_real tshi_loss_binary(tsh_real x, tsh_real t, int fused) {
    const tsh_real one = tshi_loss_probable(x) & tshi_loss_probable(t) ? TSHI_R(1) : TSHI_R(NAN);
    tsh_real yes = tshi_math_log(x, fused), no = tshi_math_log1p(-x, fused);
    yes = yes < -100 ? TSHI_R(-100) : yes;
    no = no < -100 ? TSHI_R(-100) : no;
    return one * ((t - TSHI_R(1)) * no - t * yes);
}

/* Returns the derivative of tshi_loss_binary by x: (x - t) / ((1 - x) x), with a denominator of at
 * least 1e-12, as in PyTorch. */
TSHI_INLINE tsh_real tshi_loss_binary_dx(tsh_real x, tsh_real t) {
    const tsh_real spread = (TSHI_R(1) - x) * x;
    return (x - t) / (spread < TSHI_R(1e-12) ? TSHI_R(1e-12) : spread);
}

/* Returns the derivative of the loss of logits x by the target t: log(1 - s) - p log s, with s =
 * sigmoid(x); exactly -x if p is 1. */
TSHI_INLINE tsh_real tshi_loss_logits_dt(tsh_real x, tsh_real p, int fused) {
    const tsh_real more = (p - TSHI_R(1)) * tshi_math_log_sigmoid(x, fused);
    return p < 1 || p > 1 ? -x - more : -x;
}

/* Returns t log t; 0 if t is 0, NaN if t is negative. */
TSHI_INLINE tsh_real tshi_loss_entropy(tsh_real t, int fused) {
    const tsh_real product = t * tshi_math_log(t, fused);
    return t < 0 || t > 0 || t != t ? product : TSHI_R(0);
}

/* -- the losses, a row each --------------------------------------------------- */

/* A loss: its tshi_op and its kernels. */
typedef struct tshi_loss_map_row {
    tshi_op op; /* the first field, because backward casts node->op to tshi_loss_map_row */
    int flags;  /* bit mask: TSHI_LOSS_... below */
    const tshi_kernel_fn *forward, *dx, *dt; /* dt NULL: the target's gradient is minus x's */
} tshi_loss_map_row;
enum {
    TSHI_LOSS_BY_WEIGHT = 1, /* a weighted mean: divides by the sum of the weights */
    TSHI_LOSS_CHECKED = 2,   /* after a NaN loss, checks that x and target are probabilities */
    TSHI_LOSS_POSITIVE = 4,  /* the loss takes pos_weight */
    TSHI_LOSS_BATCH = 8      /* the loss takes the reduction TSH_REDUCE_BATCHMEAN */
};

TSHI_LOSS_KERNEL(PORTABLE, mse, 0, (x - t) * (x - t));
TSHI_LOSS_KERNEL(PORTABLE, mse_dx, 1, TSHI_R(2) * (x - t));
TSHI_LOSS_KERNEL(PORTABLE, l1, 0, tshi_math_abs(x - t));
TSHI_LOSS_KERNEL(PORTABLE, l1_dx, 1, tshi_math_sign(x - t));
TSHI_LOSS_KERNEL(PORTABLE, huber, 0, tshi_loss_huber(x - t, c));
TSHI_LOSS_KERNEL(PORTABLE, huber_dx, 1, tshi_loss_limit(x - t, c));
TSHI_LOSS_KERNEL(PORTABLE, smooth_l1, 0, tshi_loss_smooth(x - t, c));
TSHI_LOSS_KERNEL(PORTABLE, smooth_l1_dx, 1, tshi_loss_smooth_derivative(x - t, c));
TSHI_LOSS_KERNEL(AVX2, bce, 0, tshi_loss_binary(x, t, fused));
TSHI_LOSS_KERNEL(PORTABLE, bce_dx, 1, tshi_loss_binary_dx(x, t));
TSHI_LOSS_KERNEL(PORTABLE, bce_dt, 1, tshi_math_log1p(-x, fused) - tshi_math_log(x, fused));
/* binary cross-entropy of logits x: the factor of log sigmoid(x) is 1 + (p - 1) t, p being
 * pos_weight */
TSHI_LOSS_KERNEL(AVX2, logits, 0,
                 (TSHI_R(1) - t) * x -
                     ((p - TSHI_R(1)) * t + TSHI_R(1)) * tshi_math_log_sigmoid(x, fused));
TSHI_LOSS_KERNEL(AVX2, logits_dx, 1,
                 ((p - TSHI_R(1)) * t + TSHI_R(1)) * tshi_math_sigmoid(x, fused) - p * t);
TSHI_LOSS_KERNEL(PORTABLE, logits_dt, 1, tshi_loss_logits_dt(x, p, fused));
TSHI_LOSS_KERNEL(PORTABLE, kl, 0, tshi_loss_entropy(t, fused) - t * x);
TSHI_LOSS_KERNEL(PORTABLE, kl_dx, 1, -t);
/* t / t is 1, but NaN at t = 0, as in PyTorch, where the derivative of t log t is not defined */
TSHI_LOSS_KERNEL(PORTABLE, kl_dt, 1, tshi_math_log(t, fused) + t / t - x);
TSHI_LOSS_KERNEL(PORTABLE, kl_log, 0, tshi_math_exp(t, fused) * (t - x));
TSHI_LOSS_KERNEL(PORTABLE, kl_log_dx, 1, -tshi_math_exp(t, fused));
TSHI_LOSS_KERNEL(PORTABLE, kl_log_dt, 1, tshi_math_exp(t, fused) * (t - x + TSHI_R(1)));
TSHI_LOSS_KERNEL(PORTABLE, weights, 0, TSHI_R(1)); /* the weights themselves, to sum them */
#undef TSHI_LOSS_KERNEL
