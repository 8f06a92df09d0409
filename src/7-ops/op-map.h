/* ========================================================================== */
/* >>op-map                                          MARK: - op-map (private) */
/* Elementwise ops: unary, binary, comparisons, where, clamp, cast.           */
/* Needs: >>math-more >>op.                                                   */
/* ========================================================================== */

/* A unary or binary op is one row, TSHI_UNARY(...) or TSHI_BINARY(...). The macro makes its
 * kernels, its tshi_op and its public function from formulas in x, or in a and b: to add an op, add
 * a row. Kernels compute in tsh_real, whatever the dtypes are, on blocks of TSHI_BLOCK values;
 * backward adds to the gradients of the inputs. In formulas, g is the gradient of the output, and
 * fused is 1 if the target computes a * b + c in one instruction. */

/* -- what elementwise ops share ---------------------------------------------- */

/* Broadcasts the inputs' global shapes to *out as NumPy does. Returns 0 and an error if they do not
 * fit. */
static int tshi_map_shape(const char *op, tsh_tensor *const *in, int n, tsh_shape *out) {
    char a[TSHI_TEXT_SIZE], b[TSHI_TEXT_SIZE];
    int i, d;
    out->ndim = 0;
    for (i = 0; i < n; i++)
        if (in[i]->ndim > out->ndim) out->ndim = in[i]->ndim;
    for (d = 0; d < out->ndim; d++) out->dim[d] = 1;
    for (i = 0; i < n; i++) {
        int64_t *length = out->dim + (out->ndim - in[i]->ndim);
        for (d = 0; d < in[i]->ndim; d++) {
            int64_t own = in[i]->dim[d];
            if (length[d] == 1) length[d] = own; /* 1 broadcasts to any size */
            if (length[d] == own || own == 1) continue;
            return tsh_fail(in[0]->ctx, TSH_ERR_SHAPE,
                            "%s: shapes %s and %s do not broadcast (%lld against %lld); counted "
                            "from the last one, sizes must be equal or 1: tsh_reshape", op,
                            tshi_tensor_text(in[0], a), tshi_tensor_text(in[i], b),
                            (long long)length[d], (long long)own) == TSH_OK;
        }
    }
    return 1;
}

/* Runs an elementwise op on inputs that have been checked, and records it unless its output has
 * integers. The kernel's operands are the output, of `dtype`, and the inputs. params: the kernel's
 * parameters, `bytes` bytes, which are also passed to backward. Returns the output, or NULL after
 * an error. */
static tsh_tensor *tshi_map_run_with(const tshi_op *op, tsh_tensor *const *in, int n,
                                     tsh_dtype dtype, tshi_kernel_fn kernel, const void *params,
                                     size_t bytes) {
    tsh_ctx *ctx = in[0]->ctx;
    tshi_output output;
    tshi_loop loop; /* loops over the local elements of the output */
    tsh_tensor *out;
    int i;
    if (!tshi_map_shape(op->name, in, n, &output.shape) || !tshi_rule_run(op, in, n, NULL, &output))
        return NULL;
    out = tshi_tensor_out(ctx, op->name, dtype, &output.shape, &output.layout);
    if (!out) return NULL;
    tshi_kernel_space(&loop, out);
    tshi_kernel_tensor(&loop, out);                           /* operand 0: the output */
    for (i = 0; i < n; i++) tshi_kernel_tensor(&loop, in[i]); /* operands 1 to n: the inputs */
    tshi_kernel_run(&loop, kernel, params);
    if (tshi_dtypes[dtype].floating)
        tshi_op_record(op, out, in, n, output.partial, params, bytes, NULL);
    return out;
}

/* Does what tshi_map_run_with does, for a kernel whose parameter is the scalar c. */
static tsh_tensor *tshi_map_run(const tshi_op *op, tsh_tensor *const *in, int n, tsh_dtype dtype,
                                tshi_kernel_fn kernel, double c) {
    return tshi_map_run_with(op, in, n, dtype, kernel, &c, sizeof c);
}

/* The parameters of the backward kernels of elementwise ops. */
typedef struct tshi_backward_params {
    double c; /* the op's scalar */
    int add;  /* 1: adds to the gradient, 0: overwrites it */
} tshi_backward_params;

/* A unary or binary op, or tsh_where: its tshi_op and its kernels. */
typedef struct tshi_map_row {
    tshi_op op;    /* the first field, because backward casts node->op to tshi_map_row */
    /* bit i is 1: the gradient of input i is that of the output, if input i is not broadcast */
    unsigned pass;
    /* tables of kernels, one per instruction set; `backward` has a table for each input */
    const tshi_kernel_fn *forward, *backward[3];
} tshi_map_row;

/* Runs `kernel`, which adds to the gradient of input i. Its operands are that gradient; g, the
 * gradient of the output; and for each input its saved values, or if these were not saved, the
 * saved output, or if that was not either, g again. A new gradient of a broadcast input is filled
 * with zeros first, because several terms are added to each of its elements. */
static void tshi_map_input_backward(tshi_node *node, int i, const tshi_kernel_fn *kernel) {
    const tsh_tensor *t = node->in[i], *out = node->out;
    const int broadcast = tsh_local_numel(t) != tsh_local_numel(out);
    const tsh_real *g = tshi_tape_grad(node);
    tshi_backward_params params;
    tshi_loop loop;
    tshi_dest dest;
    int k;
    if (!(broadcast ? tshi_tape_dest_zeroed(node, i, &dest) : tshi_tape_dest(node, i, &dest)))
        return;
    tshi_kernel_space(&loop, out);
    tshi_kernel_add_operand(&loop, t, dest.data, dest.stride, TSH_REAL); /* operand 0: result */
    tshi_kernel_add_operand(&loop, out, g, out->stride, TSH_REAL);       /* operand 1: g */
    for (k = 0; k < node->n; k++) {
        const int from = node->saved[k] ? k : node->n; /* values of input k, else of the output */
        const tsh_tensor *v = from < node->n ? node->in[from] : out;
        if (node->saved[from])
            tshi_kernel_add_operand(&loop, v, tshi_tape_saved(node, from), v->stride, v->dtype);
        else
            tshi_kernel_add_operand(&loop, out, g, out->stride, TSH_REAL);
    }
    params.c = *(const double *)node->params; /* stored by tshi_map_run */
    params.add = dest.add;
    tshi_kernel_run(&loop, kernel[out->ctx->isa], &params);
}

/* Computes the backward of all elementwise ops: adds to the gradient of each input. */
static void tshi_map_backward(tshi_node *node) {
    const tshi_map_row *row = (const tshi_map_row *)(const void *)node->op;
    const tsh_tensor *out = node->out;
    int i;
    for (i = 0; i < node->n; i++) {
        const tsh_tensor *t = node->in[i];
        const int same = t->ndim == out->ndim && tsh_local_numel(t) == tsh_local_numel(out);
        if (same && (row->pass >> i & 1u))
            tshi_tape_identity(node, i); /* no kernel: the gradient is g */
        else
            tshi_map_input_backward(node, i, row->backward[i]);
    }
}

/* Defines a kernel with parameters of type P. It computes the formula F, in which u, v, w are its N
 * inputs (operands 1 to 3; those that it does not have are called u1 and u2) and c is the scalar C,
 * and writes the result to operand 0, or adds it if ADD is 1. In the backward of a broadcast input,
 * operand 0 has step 0 where the input repeats, and the store sums. TSHI_MAP_SETS (..._FUSED,
 * ..._AVX2 or ..._PORTABLE), TSHI_MAP_LOAD and TSHI_MAP_STORE say how much of it is compiled for
 * each instruction set: all of the ops that networks are made of, little of the others. */
#define TSHI_MAP_KERNEL(name, P, C, ADD, N, u, v, w, F)                                            \
    TSHI_INLINE void name##_body(int64_t n, const tshi_operand *operand, const P *p, int fused) {  \
        tsh_real pad[3][TSHI_BLOCK], y[TSHI_BLOCK]; /* y: results */                               \
        const tsh_real *us, *vs, *ws, c = TSHI_R(C);                                               \
        int64_t e;                                                                                 \
        int i;                                                                                     \
        (void)c, (void)p, (void)fused; /* not every F uses them */                                 \
        for (e = 0; e < n; e += TSHI_BLOCK) { /* block by block */                                 \
            us = TSHI_MAP_LOAD(&operand[1], e, n, pad[0]);                                         \
            vs = N > 1 ? TSHI_MAP_LOAD(&operand[2], e, n, pad[1]) : us;                            \
            ws = N > 2 ? TSHI_MAP_LOAD(&operand[3], e, n, pad[2]) : us;                            \
            TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) {                                          \
                const tsh_real u = us[i], v = vs[i], w = ws[i];                                    \
                (void)u, (void)v, (void)w;                                                         \
                y[i] = F; /* the formula */                                                        \
            }                                                                                      \
            TSHI_MAP_STORE(&operand[0], e, n, y, ADD);                                             \
        }                                                                                          \
    }                                                                                              \
    TSHI_MAP_SETS(name, P);
#define TSHI_MAP_SETS  TSHI_KERNEL_FUSED
#define TSHI_MAP_LOAD  tshi_kernel_load
#define TSHI_MAP_STORE tshi_kernel_store

/* -- unary ops, a row each: neg, exp, relu, gelu, ... ---------------------- */

/* Checks that the n inputs are floating and runs the row's op on them. c: the op's scalar. */
static tsh_tensor *tshi_map_apply(const tshi_map_row *row, tsh_tensor *const *in, int n, double c) {
    tsh_ctx *ctx = tshi_tensor_check_floating(row->op.name, row->op.inputs, in, n);
    if (!ctx) return NULL;
    return tshi_map_run(&row->op, in, n, tshi_tensor_promote(in, n), row->forward[ctx->isa], c);
}

/* The columns of a row: name; layout rule; which values backward reads as v (NONE, the input X or
 * the output OUT); F, the output as a formula of x and c; D, the gradient of x as a formula of g, v
 * and c. c is the second argument of the public function of a TSHI_SCALAR op. */
#define TSHI_UNARY_ROW(public, name, rule, save, F, D)                                             \
    TSHI_MAP_KERNEL(tshi_map_##name##_forward, double, *p, 0, 1, x, u1, u2, F)                     \
    TSHI_MAP_KERNEL(tshi_map_##name##_backward, tshi_backward_params, p->c, p->add, 2, g, v, u2,   \
                    D)                                                                             \
    static const tshi_map_row tshi_map_##name##_row = {                                            \
        {public, "x", tshi_rule_##rule, tshi_map_backward, TSHI_##save, 0},                        \
        0, /* pass: no input's gradient is g as it is */                                           \
        tshi_map_##name##_forward,                                                                 \
        {tshi_map_##name##_backward, NULL}};
#define TSHI_UNARY(name, ...)                                                                      \
    TSHI_UNARY_ROW("tsh_" #name, name, __VA_ARGS__)                                                \
    TSH_API tsh_tensor *tsh_##name(tsh_tensor *x) {                                                \
        return tshi_map_apply(&tshi_map_##name##_row, &x, 1, 0);                                   \
    }
#define TSHI_SCALAR(name, ...)                                                                     \
    TSHI_UNARY_ROW("tsh_" #name, name, __VA_ARGS__)                                                \
    TSH_API tsh_tensor *tsh_##name(tsh_tensor *x, double c) {                                      \
        return tshi_map_apply(&tshi_map_##name##_row, &x, 1, c);                                   \
    }
/* The scalar of a TSHI_OPTION op is an option: 0 means `usual`, TSH_ZERO means 0. */
#define TSHI_OPTION(name, usual, F, D)                                                             \
    TSHI_UNARY_ROW("tsh_" #name, name, nonlinear, X, F, D)                                         \
    TSH_API tsh_tensor *tsh_##name(tsh_tensor *x, double c) {                                      \
        return tshi_map_apply(&tshi_map_##name##_row, &x, 1, tshi_map_option(c, usual));           \
    }

/* Returns the number that an option stands for: `usual` if given is 0, 0 if it is TSH_ZERO. Unlike
 * tshi_base_option, allows negative numbers. */
static double tshi_map_option(double given, double usual) {
    if (given < 0 && given >= TSH_ZERO) return 0;
    return given < 0 || given > 0 || given != given ? given : usual;
}

/* Returns min(max(x + 3, 0), 6). */
TSHI_INLINE tsh_real tshi_map_ramp(tsh_real x) {
    const tsh_real y = x + TSHI_R(3);
    return y < 0 ? TSHI_R(0) : y > 6 ? TSHI_R(6) : y;
}

TSHI_UNARY(neg, keep, NONE, -x, -g)
TSHI_SCALAR(scale, keep, NONE, x *c, g *c)
TSHI_SCALAR(add_scalar, nonlinear, NONE, x + c, g)
TSHI_UNARY_ROW("tsh_pow_scalar", square, nonlinear, X, x *x, g *(v + v))
TSHI_UNARY_ROW("tsh_pow_scalar", pow_scalar, nonlinear, X, tshi_math_pow(x, c),
               g *tshi_math_power_derivative(v, c))
TSH_API tsh_tensor *tsh_pow_scalar(tsh_tensor *x, double c) {
    const int square = c >= 2 && c <= 2; /* c == 2: a product instead of a power */
    return tshi_map_apply(square ? &tshi_map_square_row : &tshi_map_pow_scalar_row, &x, 1, c);
}
TSHI_UNARY(exp, nonlinear, OUT, tshi_math_exp(x, fused), g *v)
TSHI_UNARY(log, nonlinear, X, tshi_math_log(x, fused), g / v)
TSHI_UNARY(sqrt, nonlinear, OUT, tshi_math_sqrt(x), g *TSHI_R(0.5) / v)
TSHI_UNARY(sigmoid, nonlinear, OUT, tshi_math_sigmoid(x, fused), g *v *(TSHI_R(1) - v))
TSHI_UNARY(tanh, nonlinear, OUT, tshi_math_tanh(x, fused), g *(TSHI_R(1) - v * v))
TSHI_UNARY(relu, nonlinear, OUT, x <= 0 ? TSHI_R(0) : x, v <= 0 ? TSHI_R(0) : g)
TSHI_UNARY(erf, nonlinear, X, tshi_math_erf(x, fused), /* erf'(x) = 2 / sqrt(pi) e^(-x^2) */
           g *(TSHI_R(1.1283791670955126) * tshi_math_exp(-v * v, fused)))
TSHI_UNARY(gelu, nonlinear, X, tshi_math_gelu(x, fused), g *tshi_math_gelu_derivative(v, fused))
TSHI_UNARY(gelu_tanh, nonlinear, X, x / (TSHI_R(1) + tshi_math_gelu_power(x, fused)),
           g *tshi_math_gelu_tanh_derivative(v, fused))
TSHI_UNARY(silu, nonlinear, X, tshi_math_silu(x, fused), g *tshi_math_silu_derivative(v, fused))

/* -- binary ops, a row each: add, sub, mul, div, pow ----------------------- */

/* Returns d a^b / db = a^b ln a; 0 at a = 0 with b >= 0, as in PyTorch. */
TSHI_INLINE tsh_real tshi_map_pow_derivative(tsh_real a, tsh_real b, int fused) {
    const tsh_real db = tshi_math_pow(a, b) * tshi_math_log(a, fused);
    return !(a < 0) && !(a > 0) && b >= 0 && a == a ? TSHI_R(0) : db;
}

/* The columns of a row: name; layout rule; bits of the inputs that backward reads; bits of the
 * inputs whose gradient is g; F, the output as a formula of a and b; DA and DB, the gradients of a
 * and b as formulas of g, a and b. */
#define TSHI_BINARY(name, rule, save, pass, F, DA, DB)                                             \
    TSHI_MAP_KERNEL(tshi_map_##name##_forward, double, 0, 0, 2, a, b, u2, F)                       \
    TSHI_MAP_KERNEL(tshi_map_##name##_da, tshi_backward_params, 0, p->add, 3, g, a, b, DA)         \
    TSHI_MAP_KERNEL(tshi_map_##name##_db, tshi_backward_params, 0, p->add, 3, g, a, b, DB)         \
    static const tshi_map_row tshi_map_##name##_row = {                                            \
        {"tsh_" #name, "a b", tshi_rule_##rule, tshi_map_backward, save, 0},                       \
        pass,                                                                                      \
        tshi_map_##name##_forward,                                                                 \
        {tshi_map_##name##_da, tshi_map_##name##_db}};                                             \
    TSH_API tsh_tensor *tsh_##name(tsh_tensor *a, tsh_tensor *b) {                                 \
        tsh_tensor *in[] = {a, b};                                                                 \
        return tshi_map_apply(&tshi_map_##name##_row, in, 2, 0);                                   \
    }

TSHI_BINARY(add, add, TSHI_NONE, TSHI_A | TSHI_B, a + b, g, g)
TSHI_BINARY(sub, add, TSHI_NONE, TSHI_A, a - b, g, -g)
TSHI_BINARY(mul, multiply, TSHI_A | TSHI_B, TSHI_NONE, a *b, g *b, g *a)
TSHI_BINARY(div, divide, TSHI_A | TSHI_B, TSHI_NONE, a / b, g / b, -g *a / (b * b))
TSHI_BINARY(pow, nonlinear, TSHI_A | TSHI_B, TSHI_NONE, tshi_math_pow(a, b),
            g *tshi_math_power_derivative(a, b), g *tshi_map_pow_derivative(a, b, fused))

/* -- comparisons, where, masked_fill -------------------------------------------- */

/* Sets each element of the block y to 1 if (a OP b) is true, else to 0. type: the C type of a and
 * b. */
#define TSHI_COMPARE_LOOP(type, OP)                                                                \
    TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) {                                                  \
        y[i] = ((const type *)as)[i] OP((const type *)bs)[i];                                      \
    }
/* Defines the op y = (a OP b), 1 or 0, and its public function. Compares integers as int64_t. */
#define TSHI_COMPARE(name, OP)                                                                     \
    TSHI_INLINE void tshi_map_##name##_body(int64_t n, const tshi_operand *x,                      \
                                            const double *none) {                                  \
        union {                                                                                    \
            tsh_real real[TSHI_BLOCK];                                                             \
            int64_t integer[TSHI_BLOCK];                                                           \
        } pad[2];                                                                                  \
        const int floating = tshi_dtypes[x[1].dtype].floating; /* 0: integers */                   \
        const void *as, *bs;                                                                       \
        int32_t y[TSHI_BLOCK];                                                                     \
        int64_t e;                                                                                 \
        int i;                                                                                     \
        (void)none;                                                                                \
        for (e = 0; e < n; e += TSHI_BLOCK) {                                                      \
            if (floating) {                                                                        \
                as = tshi_kernel_load(&x[1], e, n, pad[0].real);                                   \
                bs = tshi_kernel_load(&x[2], e, n, pad[1].real);                                   \
                TSHI_COMPARE_LOOP(tsh_real, OP)                                                    \
            } else {                                                                               \
                as = tshi_kernel_load_integers(&x[1], e, n, pad[0].integer);                       \
                bs = tshi_kernel_load_integers(&x[2], e, n, pad[1].integer);                       \
                TSHI_COMPARE_LOOP(int64_t, OP)                                                     \
            }                                                                                      \
            /* the output is new, therefore dense: no strides are needed */                        \
            memcpy((int32_t *)x[0].data + e, y,                                                    \
                   (size_t)tshi_base_min(TSHI_BLOCK, n - e) * sizeof *y);                          \
        }                                                                                          \
    }                                                                                              \
    TSHI_KERNEL(tshi_map_##name, double);                                                          \
    TSH_API tsh_tensor *tsh_##name(tsh_tensor *a, tsh_tensor *b) {                                 \
        static const tshi_op op = {"tsh_" #name, "a b", tshi_rule_nonlinear, NULL, 0, 0};          \
        return tshi_map_compare(&op, a, b, tshi_map_##name);                                       \
    }

/* Checks the two inputs of a comparison and runs it; the output is i32. Returns NULL after an
 * error. */
static tsh_tensor *tshi_map_compare(const tshi_op *op, tsh_tensor *a, tsh_tensor *b,
                                    const tshi_kernel_fn *kernel) {
    tsh_tensor *in[] = {a, b};
    tsh_ctx *ctx = tshi_tensor_check(op->name, op->inputs, in, 2);
    if (!ctx) return NULL;
    if (a->dtype != b->dtype)
        return tshi_error_null(ctx, TSH_ERR_DTYPE, "%s: %s against %s; tsh_cast one of them",
                               op->name, tshi_dtype_name(a->dtype), tshi_dtype_name(b->dtype));
    return tshi_map_run(op, in, 2, TSH_I32, kernel[ctx->isa], 0);
}

TSHI_COMPARE(eq, ==)
TSHI_COMPARE(ne, !=)
TSHI_COMPARE(lt, <)
TSHI_COMPARE(le, <=)
TSHI_COMPARE(gt, >)
TSHI_COMPARE(ge, >=)
#undef TSHI_COMPARE
#undef TSHI_COMPARE_LOOP

/* The kernels of tsh_where: y = m ? a : b, and the gradients of a and b. (An integer m other than 0
 * converts to a tsh_real other than 0.) */
TSHI_MAP_KERNEL(tshi_map_where, double, 0, 0, 3, m, a, b, m != 0 ? a : b)
TSHI_MAP_KERNEL(tshi_map_where_da, tshi_backward_params, 0, p->add, 2, g, m, u2, m != 0 ? g : 0)
TSHI_MAP_KERNEL(tshi_map_where_db, tshi_backward_params, 0, p->add, 2, g, m, u2, m != 0 ? 0 : g)

static const tshi_map_row tshi_map_where_row = {
    {"tsh_where", "cond yes no", tshi_rule_where, tshi_map_backward, TSHI_COND, 0},
    0,
    tshi_map_where,
    {NULL, tshi_map_where_da, tshi_map_where_db}}; /* cond gets no gradient */

TSH_API tsh_tensor *tsh_where(tsh_tensor *cond, tsh_tensor *a, tsh_tensor *b) {
    tsh_tensor *in[] = {cond, a, b};
    tsh_ctx *ctx = tshi_tensor_check("tsh_where", "cond yes no", in, 3);
    if (!ctx || !tshi_tensor_check_floating("tsh_where", "yes no", in + 1, 2)) return NULL;
    if (tshi_dtypes[cond->dtype].floating)
        return tshi_error_null(ctx, TSH_ERR_DTYPE, "tsh_where: the condition is %s, not i32",
                               tshi_dtype_name(cond->dtype));
    return tshi_map_run(&tshi_map_where_row.op, in, 3, tshi_tensor_promote(in + 1, 2),
                        tshi_map_where[ctx->isa], 0);
}

/* -- ops that few networks use, or that wait for memory ------------------------ */

#undef TSHI_MAP_SETS
#undef TSHI_MAP_LOAD
#undef TSHI_MAP_STORE
#define TSHI_MAP_SETS  TSHI_KERNEL_PORTABLE
#define TSHI_MAP_LOAD  tshi_kernel_load_apart
#define TSHI_MAP_STORE tshi_kernel_store_apart

/* Returns the part of the gradient g of a maximum that goes to `own`, one of the two values: none
 * if the other one is larger, half if both are equal, else all, also if one is NaN. For a minimum,
 * the two are exchanged. */
TSHI_INLINE tsh_real tshi_map_share(tsh_real g, tsh_real other, tsh_real own) {
    const tsh_real half = ((other >= own) & (other <= own)) ? g * TSHI_R(0.5) : g;
    return other > own ? TSHI_R(0) : half;
}

TSHI_UNARY(abs, nonlinear, X, tshi_math_abs(x), g *tshi_math_sign(v))
TSHI_UNARY(sign, nonlinear, NONE, tshi_math_sign(x), TSHI_R(0))
TSHI_UNARY(floor, nonlinear, NONE, tshi_math_floor(x), TSHI_R(0))
TSHI_UNARY(ceil, nonlinear, NONE, tshi_math_ceil(x), TSHI_R(0))
TSHI_UNARY(round, nonlinear, NONE, tshi_math_round_even(x), TSHI_R(0))
TSHI_UNARY(rsqrt, nonlinear, OUT, TSHI_R(1) / tshi_math_sqrt(x), g *TSHI_R(-0.5) * (v * v * v))
TSHI_UNARY(reciprocal, nonlinear, OUT, TSHI_R(1) / x, -g * (v * v))
TSHI_UNARY(relu6, nonlinear, X, x < 0 ? TSHI_R(0) : x > 6 ? TSHI_R(6) : x,
           ((v > 0) & (v < 6)) ? g : TSHI_R(0))
TSHI_UNARY(hardsigmoid, nonlinear, X, tshi_map_ramp(x) / TSHI_R(6),
           ((v > -3) & (v < 3)) ? g / TSHI_R(6) : TSHI_R(0))
TSHI_UNARY(hardswish, nonlinear, X, x *tshi_map_ramp(x) / TSHI_R(6),
           v <= -3  ? TSHI_R(0)
           : v >= 3 ? g
                    : g * (v / TSHI_R(3) + TSHI_R(0.5)))
TSHI_OPTION(leaky_relu, 0.01, x > 0 ? x : x * c, v > 0 ? g : g * c)
TSHI_BINARY(maximum, nonlinear, TSHI_A | TSHI_B, TSHI_NONE, tshi_kernel_larger(a, b),
            tshi_map_share(g, b, a), tshi_map_share(g, a, b))
TSHI_BINARY(minimum, nonlinear, TSHI_A | TSHI_B, TSHI_NONE, -tshi_kernel_larger(-a, -b),
            tshi_map_share(g, a, b), tshi_map_share(g, b, a))

/* The kernels of tsh_masked_fill: y = m ? c : x, and dx = m ? 0 : dy. */
TSHI_MAP_KERNEL(tshi_map_masked_fill, double, *p, 0, 2, x, m, u2, m != 0 ? c : x)
TSHI_MAP_KERNEL(tshi_map_masked_fill_dx, tshi_backward_params, 0, p->add, 3, g, x, m,
                m != 0 ? TSHI_R(0) : g)

static const tshi_map_row tshi_map_masked_fill_row = {
    {"tsh_masked_fill", "x mask", tshi_rule_nonlinear, tshi_map_backward, TSHI_B, 0},
    0,
    tshi_map_masked_fill,
    {tshi_map_masked_fill_dx, NULL}}; /* the mask gets no gradient */

TSH_API tsh_tensor *tsh_masked_fill(tsh_tensor *x, tsh_tensor *mask, double value) {
    tsh_tensor *in[] = {x, mask};
    tsh_ctx *ctx = tshi_tensor_check("tsh_masked_fill", "x mask", in, 2);
    if (!ctx || !tshi_tensor_check_floating("tsh_masked_fill", "x", in, 1)) return NULL;
    if (tshi_dtypes[mask->dtype].floating)
        return tshi_error_null(ctx, TSH_ERR_DTYPE,
                               "tsh_masked_fill: the mask is %s, not i32; tsh_ne and other "
                               "comparisons make masks",
                               tshi_dtype_name(mask->dtype));
    return tshi_map_run(&tshi_map_masked_fill_row.op, in, 2, x->dtype,
                        tshi_map_masked_fill[ctx->isa], value);
}

/* -- clamp: y = min(max(x, low), high); dx = dy where low <= x <= high, else 0 ---- */

/* The limits of tsh_clamp. */
typedef struct tshi_map_limits {
    double low, high;
    int add; /* the backward kernel: 1: adds to the gradient, 0: overwrites it */
} tshi_map_limits;

/* Returns min(max(x, low), high); NaN stays NaN. */
TSHI_INLINE tsh_real tshi_map_limit(tsh_real x, tsh_real low, tsh_real high) {
    const tsh_real y = x < low ? low : x;
    return y > high ? high : y;
}

TSHI_MAP_KERNEL(tshi_map_clamp, tshi_map_limits, p->low, 0, 1, x, u1, u2,
                tshi_map_limit(x, c, TSHI_R(p->high)))
TSHI_MAP_KERNEL(tshi_map_clamp_dx, tshi_map_limits, p->low, p->add, 2, g, v, u2,
                ((v >= c) & (v <= TSHI_R(p->high))) ? g : TSHI_R(0))

static void tshi_map_clamp_backward(tshi_node *node) {
    const tsh_tensor *x = node->in[0], *out = node->out;
    tshi_map_limits limits = *(const tshi_map_limits *)node->params;
    tshi_loop loop;
    tshi_dest dest;
    if (!tshi_tape_dest(node, 0, &dest)) return;
    limits.add = dest.add;
    tshi_kernel_space(&loop, out);
    tshi_kernel_add_operand(&loop, x, dest.data, dest.stride, TSH_REAL);
    tshi_kernel_add_operand(&loop, out, tshi_tape_grad(node), out->stride, TSH_REAL);
    tshi_kernel_add_operand(&loop, x, tshi_tape_saved(node, 0), x->stride, x->dtype);
    tshi_kernel_run(&loop, tshi_map_clamp_dx[out->ctx->isa], &limits);
}

static const tshi_op tshi_map_clamp_op = {
    "tsh_clamp", "x", tshi_rule_nonlinear, tshi_map_clamp_backward, TSHI_X, 0};

/* Returns a limit rounded to dtype, as PyTorch compares x with it; NaN, which means that there is
 * no limit, becomes `none`. */
static double tshi_map_rounded(double limit, tsh_dtype dtype, double none) {
    int64_t widest; /* memory for one element of any floating dtype */
    if (limit != limit) return none;
    tshi_dtype_put(dtype, &widest, 0, limit);
    return tshi_dtype_get(dtype, &widest, 0);
}

TSH_API tsh_tensor *tsh_clamp(tsh_tensor *x, double min, double max) {
    tsh_ctx *ctx = tshi_tensor_check_floating("tsh_clamp", "x", &x, 1);
    tshi_map_limits limits = TSHI_ZERO;
    if (!ctx) return NULL;
    if (min != min && max != max)
        return tshi_error_null(ctx, TSH_ERR_ARGUMENT,
                               "tsh_clamp: min and max are NAN, which means no limit; give one");
    limits.low = tshi_map_rounded(min, x->dtype, -(double)INFINITY);
    limits.high = tshi_map_rounded(max, x->dtype, (double)INFINITY);
    return tshi_map_run_with(&tshi_map_clamp_op, &x, 1, x->dtype, tshi_map_clamp[ctx->isa], &limits,
                             sizeof limits);
}

/* -- expm1, log1p and activations made of them -------------------------------- */

#undef TSHI_MAP_SETS
#define TSHI_MAP_SETS TSHI_KERNEL_AVX2
TSHI_UNARY(expm1, nonlinear, OUT, tshi_math_expm1(x, fused), g *(v + TSHI_R(1)))
TSHI_UNARY(log1p, nonlinear, X, tshi_math_log1p(x, fused), g / (v + TSHI_R(1)))
TSHI_UNARY(log_sigmoid, nonlinear, X, tshi_math_log_sigmoid(x, fused),
           g *tshi_math_log_sigmoid_derivative(v, fused))
TSHI_UNARY(selu, nonlinear, X, /* alpha and scale of Klambauer et al. 2017 */
           TSHI_R(1.0507009873554805) * tshi_math_elu(x, TSHI_R(1.6732632423543772), fused),
           g *TSHI_R(1.0507009873554805) *
               tshi_math_elu_derivative(v, TSHI_R(1.6732632423543772), fused))
TSHI_UNARY(mish, nonlinear, X, tshi_math_mish(x, fused), g *tshi_math_mish_derivative(v, fused))
TSHI_OPTION(softplus, 1, tshi_math_softplus(x, c, fused),
            g *tshi_math_softplus_derivative(v, c, fused))
TSHI_OPTION(elu, 1, tshi_math_elu(x, c, fused), g *tshi_math_elu_derivative(v, c, fused))

#undef TSHI_UNARY
#undef TSHI_SCALAR
#undef TSHI_OPTION
#undef TSHI_UNARY_ROW

/* -- sin, cos ----------------------------------------------------------------
 * sin(x + turn pi / 2) is sin x for turn 0, cos x for 1 and -sin x for 2: the derivative of each is
 * the next. */

/* Computes y = sin(x + turn pi / 2) for a block. Large x, which are rare, go to libm. */
TSHI_INLINE void tshi_map_wave_block(tsh_real *y, const tsh_real *x, uint32_t turn, int fused) {
    uint32_t large = 0; /* not 0 if any |x| is too large for tshi_math_wave */
    int i;
    if (!TSHI_DOUBLE)
        TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) {
            large |= ((uint32_t)TSHI_MATH_FAR - (tshi_math_bits((float)x[i]) & 0x7FFFFFFFu)) >> 31;
            y[i] = TSHI_R(tshi_math_wave((float)x[i], turn, fused));
        }
    for (i = 0; i < TSHI_BLOCK && (TSHI_DOUBLE || large); i++)
        if (TSHI_DOUBLE || (tshi_math_bits((float)x[i]) & 0x7FFFFFFFu) > TSHI_MATH_FAR)
            y[i] = tshi_math_wave_far(x[i], turn);
}

/* Defines the kernels of the op `name`, y = sin(x + turn pi / 2), its row and its function.
 * Operands: y and x; in backward dx, dy and x. */
#define TSHI_WAVE(name, turn)                                                                      \
    TSHI_INLINE void tshi_map_##name##_forward_body(int64_t n, const tshi_operand *operand,        \
                                                    const double *none, int fused) {               \
        tsh_real pad[TSHI_BLOCK], y[TSHI_BLOCK];                                                   \
        int64_t e;                                                                                 \
        (void)none;                                                                                \
        for (e = 0; e < n; e += TSHI_BLOCK) {                                                      \
            tshi_map_wave_block(y, TSHI_MAP_LOAD(&operand[1], e, n, pad), turn, fused);            \
            TSHI_MAP_STORE(&operand[0], e, n, y, 0);                                               \
        }                                                                                          \
    }                                                                                              \
    TSHI_KERNEL_AVX2(tshi_map_##name##_forward, double);                                           \
    TSHI_INLINE void tshi_map_##name##_backward_body(int64_t n, const tshi_operand *operand,       \
                                                     const tshi_backward_params *p, int fused) {   \
        tsh_real pad[2][TSHI_BLOCK], y[TSHI_BLOCK];                                                \
        const tsh_real *g;                                                                         \
        int64_t e;                                                                                 \
        int i;                                                                                     \
        for (e = 0; e < n; e += TSHI_BLOCK) {                                                      \
            g = TSHI_MAP_LOAD(&operand[1], e, n, pad[0]);                                          \
            tshi_map_wave_block(y, TSHI_MAP_LOAD(&operand[2], e, n, pad[1]), (turn) + 1,           \
                                fused);                                                            \
            TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) y[i] *= g[i];                              \
            TSHI_MAP_STORE(&operand[0], e, n, y, p->add);                                          \
        }                                                                                          \
    }                                                                                              \
    TSHI_KERNEL_AVX2(tshi_map_##name##_backward, tshi_backward_params);                            \
    static const tshi_map_row tshi_map_##name##_row = {                                            \
        {"tsh_" #name, "x", tshi_rule_nonlinear, tshi_map_backward, TSHI_X, 0},                    \
        0,                                                                                         \
        tshi_map_##name##_forward,                                                                 \
        {tshi_map_##name##_backward, NULL}};                                                       \
    TSH_API tsh_tensor *tsh_##name(tsh_tensor *x) {                                                \
        return tshi_map_apply(&tshi_map_##name##_row, &x, 1, 0);                                   \
    }
TSHI_WAVE(sin, 0)
TSHI_WAVE(cos, 1)
#undef TSHI_WAVE
#undef TSHI_BINARY

/* -- cast ------------------------------------------------------------------------ */

/* Computes dx = dy, the backward of ops whose output equals input 0, apart from the dtype.
 * (Gradients are tsh_real, whatever the dtypes are.) */
static void tshi_map_same_backward(tshi_node *node) {
    tshi_tape_identity(node, 0);
}

static const tshi_op tshi_map_cast_op = {
    "tsh_cast", "x", tshi_rule_nonlinear, tshi_map_same_backward, TSHI_NONE, 0};

TSH_API tsh_tensor *tsh_cast(tsh_tensor *x, tsh_dtype dtype) {
    tsh_ctx *ctx = tshi_tensor_check("tsh_cast", "x", &x, 1);
    if (ctx && dtype == TSH_DTYPE_DEFAULT) dtype = ctx->dtype;
    if (!ctx || x->dtype == dtype) return ctx ? x : NULL; /* nothing to convert */
    if (!tshi_dtype_exists(dtype) ||
        (tshi_dtypes[dtype].floating && !tshi_dtype_computes(dtype)))
        return tshi_error_null(ctx, TSH_ERR_DTYPE,
                               "tsh_cast: takes %s, bf16, f16, i32 or i64 in this build, not dtype "
                               "%d",
                               tshi_dtype_name(TSH_REAL), (int)dtype);
    return tshi_map_run(&tshi_map_cast_op, &x, 1, dtype, tshi_kernel_copy, 0);
}
