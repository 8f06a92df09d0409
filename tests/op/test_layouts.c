/* Which layouts each op takes and gives: one table of rows, each run at every degree of tensor
 * parallelism and with dimensions that leave ranks uneven or empty, its values and gradients
 * compared with the dense ones on a single rank. A second table holds what must be refused, with
 * its sentence. */
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"

/* ---------------------------------------------------------- the ops, by text */

typedef tsh_tensor *(*op_fn)(tsh_ctx *ctx, tsh_tensor **in, const char *arg, int64_t n);

typedef struct named_unary {
    const char *name;
    tsh_tensor *(*fn)(tsh_tensor *x);
} named_unary;

static tsh_tensor *add_three(tsh_tensor *x) {
    return tsh_add_scalar(x, 3);
}

static tsh_tensor *cube(tsh_tensor *x) {
    return tsh_pow_scalar(x, 3);
}

static tsh_tensor *twice(tsh_tensor *x) {
    return tsh_scale(x, 2);
}

static const named_unary unary_ops[] = {
    {"exp", tsh_exp},         {"log", tsh_log},     {"sqrt", tsh_sqrt},
    {"sigmoid", tsh_sigmoid}, {"tanh", tsh_tanh},   {"relu", tsh_relu},
    {"gelu", tsh_gelu},       {"silu", tsh_silu},   {"gelu_tanh", tsh_gelu_tanh},
    {"pow_scalar", cube},     {"add_scalar", add_three},
};

static tsh_tensor *op_unary(tsh_ctx *ctx, tsh_tensor **in, const char *arg, int64_t n) {
    int i;
    (void)ctx, (void)n;
    for (i = 0; i < COUNT(unary_ops); i++)
        if (strcmp(unary_ops[i].name, arg) == 0) return unary_ops[i].fn(in[0]);
    return strcmp(arg, "neg") == 0     ? tsh_neg(in[0])
           : strcmp(arg, "clone") == 0 ? tsh_clone(in[0])
                                       : twice(in[0]);
}

/* The same of x + 4, which is positive. */
static tsh_tensor *op_unary_positive(tsh_ctx *ctx, tsh_tensor **in, const char *arg, int64_t n) {
    tsh_tensor *x = tsh_add_scalar(in[0], 4);
    return op_unary(ctx, &x, arg, n);
}

static tsh_tensor *op_binary(tsh_ctx *ctx, tsh_tensor **in, const char *arg, int64_t n) {
    (void)ctx, (void)n;
    switch (*arg) {
    case '+': return tsh_add(in[0], in[1]);
    case '-': return tsh_sub(in[0], in[1]);
    case '*': return tsh_mul(in[0], in[1]);
    case '/': return tsh_div(in[0], in[1]);
    case '^': return tsh_pow(tsh_add_scalar(in[0], 4), in[1]);
    case 'p': return tsh_pow(in[0], in[1]);
    case '=': return tsh_eq(in[0], in[1]);
    case '<': return tsh_lt(in[0], in[1]);
    default: return tsh_le(in[0], in[1]);
    }
}

static tsh_tensor *op_where(tsh_ctx *ctx, tsh_tensor **in, const char *arg, int64_t n) {
    (void)ctx, (void)arg, (void)n;
    return tsh_where(in[0], in[1], in[2]);
}

static tsh_tensor *op_cast(tsh_ctx *ctx, tsh_tensor **in, const char *arg, int64_t n) {
    (void)ctx, (void)arg, (void)n;
    return tsh_cast(in[0], TSH_I64);
}

static tsh_tensor *op_dropout(tsh_ctx *ctx, tsh_tensor **in, const char *arg, int64_t n) {
    (void)ctx, (void)arg, (void)n;
    return tsh_dropout(in[0], 0.5, NULL);
}

/* "sum 1", "mean all", "sum 1 keep" */
static tsh_tensor *op_reduce(tsh_ctx *ctx, tsh_tensor **in, const char *arg, int64_t n) {
    const char *space = strchr(arg, ' ');
    int dim = space[1] == 'a' ? TSH_ALL : atoi(space), keep = strstr(arg, "keep") != NULL;
    (void)ctx, (void)n;
    switch (*arg) {
    case 's': return tsh_sum(in[0], dim, keep);
    case 'm': return tsh_mean(in[0], dim, keep);
    case 'M': return tsh_max(in[0], dim, keep);
    case 'A': return tsh_argmax(in[0], dim, keep);
    case 'S': return tsh_softmax(in[0], dim);
    default: return tsh_log_softmax(in[0], dim);
    }
}

static tsh_tensor *op_matmul(tsh_ctx *ctx, tsh_tensor **in, const char *arg, int64_t n) {
    (void)ctx, (void)n;
    return tsh_matmul(in[0], strcmp(arg, "turned") == 0 ? tsh_transpose(in[1], -1, -2) : in[1]);
}

static tsh_tensor *op_linear(tsh_ctx *ctx, tsh_tensor **in, const char *arg, int64_t n) {
    (void)ctx, (void)arg, (void)n;
    return tsh_linear(in[0], in[1], in[2]);
}

static tsh_tensor *op_embedding(tsh_ctx *ctx, tsh_tensor **in, const char *arg, int64_t n) {
    (void)ctx, (void)arg, (void)n;
    return tsh_embedding(in[0], in[1]);
}

static tsh_tensor *op_layer_norm(tsh_ctx *ctx, tsh_tensor **in, const char *arg, int64_t n) {
    (void)ctx, (void)arg, (void)n;
    return tsh_layer_norm(in[0], in[1], in[2], 0);
}

static tsh_tensor *op_attention(tsh_ctx *ctx, tsh_tensor **in, const char *arg, int64_t n) {
    tsh_attention_desc desc = {0};
    (void)ctx, (void)n;
    desc.causal = *arg == 'c';
    return tsh_attention(in[0], in[1], in[2], &desc);
}

/* "mean", "sum", "none"; with " ignore" rows of class 2 are left out */
static tsh_tensor *op_loss(tsh_ctx *ctx, tsh_tensor **in, const char *arg, int64_t n) {
    tsh_cross_entropy_desc desc = {TSH_REDUCE_MEAN, 0, 2, 1};
    (void)ctx, (void)n;
    if (*arg == 's') desc.reduction = TSH_REDUCE_SUM;
    if (*arg == 'n') desc.reduction = TSH_REDUCE_NONE;
    desc.ignore = strstr(arg, "ignore") != NULL;
    return tsh_cross_entropy(in[0], in[1], &desc);
}

static tsh_tensor *op_redistribute(tsh_ctx *ctx, tsh_tensor **in, const char *arg, int64_t n) {
    (void)ctx;
    return tsh_redistribute(in[0], spec_layout(arg, n));
}

static tsh_tensor *op_reshape(tsh_ctx *ctx, tsh_tensor **in, const char *arg, int64_t n) {
    (void)ctx;
    return tsh_reshape(in[0], spec_shape(&arg, n));
}

/* Of a tensor whose dimensions 1 and 2 were exchanged: only a copy can be reshaped. */
static tsh_tensor *op_merge(tsh_ctx *ctx, tsh_tensor **in, const char *arg, int64_t n) {
    (void)ctx;
    return tsh_reshape(tsh_transpose(in[0], 1, 2), spec_shape(&arg, n));
}

/* "transpose 0 2" and "permute 1,2,0" */
static tsh_tensor *op_turn(tsh_ctx *ctx, tsh_tensor **in, const char *arg, int64_t n) {
    int d[3] = {0, 0, 0};
    (void)ctx, (void)n;
    if (sscanf(arg, "transpose %d %d", &d[0], &d[1]) == 2) return tsh_transpose(in[0], d[0], d[1]);
    (void)sscanf(arg, "permute %d,%d,%d", &d[0], &d[1], &d[2]);
    return tsh_permute(in[0], d);
}

/* "1,2n,4n": 4n elements of dimension 1 from 2n on */
static tsh_tensor *op_slice(tsh_ctx *ctx, tsh_tensor **in, const char *arg, int64_t n) {
    tsh_shape cut = spec_shape(&arg, n);
    (void)ctx;
    return tsh_slice(in[0], (int)cut.dim[0], cut.dim[1], cut.dim[2]);
}

/* Three parts a, b, c of a dimension: a * b + c. */
static tsh_tensor *op_split(tsh_ctx *ctx, tsh_tensor **in, const char *arg, int64_t n) {
    tsh_tensor *part[3];
    (void)ctx, (void)n;
    (void)tsh_split_dim(in[0], atoi(arg), 3, part);
    return tsh_add(tsh_mul(part[0], part[1]), part[2]);
}

static tsh_tensor *op_concat(tsh_ctx *ctx, tsh_tensor **in, const char *arg, int64_t n) {
    (void)ctx, (void)n;
    return tsh_concat(in, in[2] ? 3 : 2, atoi(arg));
}

/* --------------------------------------------------------------- what is legal */

/* Tolerances are for rounding: ops that are not exact on small integers, or that add up parts in
 * another order than one rank does. */
#define EXACT 0
#define ROUND 2e-5
enum { VALUES = 1 }; /* the op has no gradient */

typedef struct row {
    op_fn op;
    const char *arg, *in[3], *out;
    double tolerance;
    int flags;
} row;

static const row rows[] = {
    /* elementwise: linear ops keep a partial sum, binary ones want equal layouts */
    {op_unary, "neg", {"2,n P"}, "P", EXACT, 0},
    {op_unary, "scale", {"2,n P"}, "P", EXACT, 0},
    {op_unary, "neg", {"2,n S(1)"}, "S(1)", EXACT, 0},
    {op_unary, "scale", {"2,6n S(1, 3 segments, unit 2)"}, "S(1, 3 segments, unit 2)", EXACT, 0},
    {op_unary, "clone", {"2,n R"}, "R", EXACT, 0},
    {op_unary, "clone", {"2,n S(1)"}, "S(1)", EXACT, 0},
    {op_unary, "clone", {"2,n P"}, "P", EXACT, 0},
    {op_binary, "+", {"2,n R", "2,n R"}, "R", EXACT, 0},
    {op_binary, "+", {"2,n S(1)", "2,n S(1)"}, "S(1)", EXACT, 0},
    {op_binary, "-", {"n,3 S(0)", "n,3 S(0)"}, "S(0)", EXACT, 0},
    {op_binary, "*", {"2,6n S(1, unit 3)", "2,6n S(1, unit 3)"}, "S(1, unit 3)", EXACT, 0},
    {op_binary,
     "*",
     {"2,6n S(1, 3 segments, unit 2)", "6n S(0, 3 segments, unit 2)"},
     "S(1, 3 segments, unit 2)",
     EXACT,
     0},
    {op_binary, "+", {"2,n,3 S(1)", "n,3 S(0)"}, "S(1)", EXACT, 0},
    {op_binary, "+", {"2,n,3 S(1)", "n,1 S(0)"}, "S(1)", EXACT, 0},
    {op_binary, "+", {"n,1 S(0)", "2,n,3 S(1)"}, "S(1)", EXACT, 0},
    {op_binary, "+", {"2,n S(1)", "2,1 R"}, "S(1)", EXACT, 0},
    {op_binary, "-", {"2,1 R", "2,n S(1)"}, "S(1)", EXACT, 0},
    {op_binary, "*", {"2,n,3 S(1)", "3 R"}, "S(1)", EXACT, 0},
    {op_binary, "*", {"- R", "n,3 S(0)"}, "S(0)", EXACT, 0},
    {op_binary, "/", {"n,3 S(0)", "1,3 R"}, "S(0)", ROUND, 0},
    {op_binary, "^", {"n,3 S(0)", "3 R"}, "S(0)", ROUND, 0},
    {op_binary, "^", {"n,3 S(0)", "n,3 S(0)"}, "S(0)", ROUND, 0},
    {op_binary, "+", {"2,n P", "2,n P"}, "P", EXACT, 0},
    {op_binary, "-", {"2,n P", "n P"}, "P", EXACT, 0},
    {op_binary, "*", {"2,n P", "2,n R"}, "P", EXACT, 0},
    {op_binary, "*", {"n R", "2,n P"}, "P", EXACT, 0},
    {op_binary, "*", {"n P", "2,n R"}, "P", EXACT, 0},
    {op_binary, "*", {"2,n P", "- R"}, "P", EXACT, 0},
    {op_binary, "/", {"2,n P", "2,1 R"}, "P", ROUND, 0},
    {op_binary, "=", {"2,n S(1)", "2,n S(1)"}, "S(1)", EXACT, VALUES},
    {op_binary, "<", {"2,n S(1)", "2,1 R"}, "S(1)", EXACT, VALUES},
    {op_binary, "L", {"n,3 S(0)", "n,3 S(0)"}, "S(0)", EXACT, VALUES},
    {op_where, "", {"%2 2,n S(1)", "2,n S(1)", "2,n S(1)"}, "S(1)", EXACT, 0},
    {op_where, "", {"%2 2,1 R", "2,n S(1)", "- R"}, "S(1)", EXACT, 0},
    {op_where, "", {"%2 n R", "2,n R", "2,1 R"}, "R", EXACT, 0},
    {op_where, "", {"%2 2,n R", "2,n P", "2,n P"}, "P", EXACT, 0},
    {op_cast, "", {"2,n S(1)"}, "S(1)", EXACT, VALUES},
    {op_cast, "", {"%9 n,3 S(0)"}, "S(0)", EXACT, VALUES},
    {op_dropout, "", {"2,n R"}, "R", EXACT, 0},
    {op_dropout, "", {"2,n S(1)"}, "S(1)", EXACT, 0},
    {op_dropout, "", {"3,6n S(1, 3 segments, unit 2)"}, "S(1, 3 segments, unit 2)", EXACT, 0},
    {op_dropout, "", {"2,n P"}, "P", EXACT, 0},

    /* reductions: over the sharded dimension they give a partial sum */
    {op_reduce, "sum 1", {"2,n,3 S(1)"}, "P", EXACT, 0},
    {op_reduce, "sum 1 keep", {"2,n,3 S(1)"}, "P", EXACT, 0},
    {op_reduce, "sum 0", {"2,n,3 S(1)"}, "S(0)", EXACT, 0},
    {op_reduce, "sum 0 keep", {"2,n,3 S(1)"}, "S(1)", EXACT, 0},
    {op_reduce, "sum -1", {"2,n,3 S(1)"}, "S(1)", EXACT, 0},
    {op_reduce, "sum all", {"2,n,3 S(1)"}, "P", EXACT, 0},
    {op_reduce, "sum all", {"2,n R"}, "R", EXACT, 0},
    {op_reduce, "sum 1", {"2,n,3 P"}, "P", EXACT, 0},
    {op_reduce, "sum 0", {"2,6n S(1, 3 segments, unit 2)"}, "S(0, 3 segments, unit 2)", EXACT, 0},
    {op_reduce, "mean 1", {"2,n,3 S(1)"}, "P", ROUND, 0},
    {op_reduce, "mean all keep", {"2,n,3 S(1)"}, "P", ROUND, 0},
    {op_reduce, "mean 2", {"2,n,3 S(1)"}, "S(1)", ROUND, 0},
    {op_reduce, "mean 0", {"2,n P"}, "P", ROUND, 0},
    {op_reduce, "Max 2", {"2,n,5 S(1)"}, "S(1)", EXACT, 0},
    {op_reduce, "Max 0 keep", {"5,n,2 S(1)"}, "S(1)", EXACT, 0},
    {op_reduce, "Max 0", {"5,n,2 S(1)"}, "S(0)", EXACT, 0},
    {op_reduce, "Max all", {"2,n R"}, "R", EXACT, 0},
    {op_reduce, "Argmax 2", {"2,n,5 S(1)"}, "S(1)", EXACT, VALUES},
    {op_reduce, "Argmax 0 keep", {"5,n S(1)"}, "S(1)", EXACT, VALUES},
    {op_reduce, "Softmax 1", {"n,5 S(0)"}, "S(0)", ROUND, 0},
    {op_reduce, "Softmax 0", {"5,n S(1)"}, "S(1)", ROUND, 0},
    {op_reduce, "log_softmax -1", {"2,n,5 S(1)"}, "S(1)", ROUND, 0},

    /* matmul */
    {op_matmul, "", {"2,3 R", "3,n R"}, "R", EXACT, 0},
    {op_matmul, "", {"2,n S(1)", "n,3 S(0)"}, "P", EXACT, 0},
    {op_matmul, "", {"2,6n S(1, unit 3)", "6n,3 S(0, unit 3)"}, "P", EXACT, 0},
    {op_matmul, "", {"2,6n S(1, 3 segments, unit 2)", "6n,3 S(0, 3 segments, unit 2)"}, "P", EXACT, 0},
    {op_matmul, "", {"2,3,n S(2)", "2,n,4 S(1)"}, "P", EXACT, 0},
    {op_matmul, "", {"2,3,n S(2)", "n,4 S(0)"}, "P", EXACT, 0},
    {op_matmul, "turned", {"2,n S(1)", "3,n S(1)"}, "P", EXACT, 0},
    {op_matmul, "", {"n,3 S(0)", "3,2 R"}, "S(0)", EXACT, 0},
    {op_matmul, "", {"2,n,3 S(1)", "3,2 R"}, "S(1)", EXACT, 0},
    {op_matmul, "", {"2,n,3 S(1)", "2,3,4 R"}, "S(1)", EXACT, 0},
    {op_matmul, "", {"2,3 R", "3,n S(1)"}, "S(1)", EXACT, 0},
    {op_matmul, "", {"2,3 R", "2,3,n S(2)"}, "S(2)", EXACT, 0},
    {op_matmul, "turned", {"4,3 R", "6n,3 S(0, 3 segments, unit 2)"}, "S(1, 3 segments, unit 2)", EXACT, 0},
    {op_matmul, "", {"n,2,3 S(0)", "n,3,2 S(0)"}, "S(0)", EXACT, 0},
    {op_matmul, "", {"2,n,2,3 S(1)", "n,3,2 S(0)"}, "S(1)", EXACT, 0},
    {op_matmul, "", {"n,2,3 S(0)", "3,4 R"}, "S(0)", EXACT, 0},
    {op_matmul, "", {"n,2,3 S(0)", "1,3,4 R"}, "S(0)", EXACT, 0},
    {op_matmul, "", {"2,3 R", "n,3,4 S(0)"}, "S(0)", EXACT, 0},
    {op_matmul, "", {"2,n P", "n,3 R"}, "P", EXACT, 0},
    {op_matmul, "", {"2,3,n P", "n,3 R"}, "P", EXACT, 0},
    {op_matmul, "", {"2,n R", "n,3 P"}, "P", EXACT, 0},

    /* linear: plain, column-parallel, row-parallel */
    {op_linear, "", {"2,3 R", "n,3 R", "n R"}, "R", EXACT, 0},
    {op_linear, "", {"n,3 S(0)", "4,3 R", "4 R"}, "S(0)", EXACT, 0},
    {op_linear, "", {"2,n,3 S(1)", "4,3 R", "4 R"}, "S(1)", EXACT, 0},
    {op_linear, "", {"2,3 P", "n,3 R"}, "P", EXACT, 0},
    {op_linear, "", {"2,3 R", "n,3 S(0)", "n S(0)"}, "S(1)", EXACT, 0},
    {op_linear, "", {"3 R", "n,3 S(0)", "n S(0)"}, "S(0)", EXACT, 0},
    {op_linear, "", {"2,4,3 R", "n,3 S(0)"}, "S(2)", EXACT, 0},
    {op_linear, "", {"2,4,3 R", "6n,3 S(0, unit 3)", "6n S(0, unit 3)"}, "S(2, unit 3)", EXACT, 0},
    {op_linear,
     "",
     {"2,3 R", "6n,3 S(0, 3 segments, unit 2)", "6n S(0, 3 segments, unit 2)"},
     "S(1, 3 segments, unit 2)",
     EXACT,
     0},
    {op_linear, "", {"2,n S(1)", "3,n S(1)", "3 R"}, "R", EXACT, 0},
    {op_linear, "", {"2,n R", "3,n S(1)", "3 R"}, "R", EXACT, 0},
    {op_linear, "", {"n S(0)", "3,n S(1)", "3 R"}, "R", EXACT, 0},
    {op_linear, "", {"n R", "3,n S(1)"}, "R", EXACT, 0},
    {op_linear, "", {"2,3,6n S(2, unit 3)", "4,6n S(1, unit 3)", "4 R"}, "R", EXACT, 0},
    {op_linear, "", {"2,3,6n R", "4,6n S(1, 3 segments, unit 2)", "4 R"}, "R", EXACT, 0},
    {op_linear,
     "",
     {"2,6n S(1, 3 segments, unit 2)", "4,6n S(1, 3 segments, unit 2)", "4 R"},
     "R",
     EXACT,
     0},

    /* embedding, layer norm, attention */
    {op_embedding, "", {"%5n 2,3 R", "5n,4 R"}, "R", EXACT, 0},
    {op_embedding, "", {"%5n 2,3 R", "5n,4 S(0)"}, "P", EXACT, 0},
    {op_embedding, "", {"%n 7 R", "n,4 S(0)"}, "P", EXACT, 0},
    {op_embedding, "", {"%6n 7 R", "6n,2 S(0, 3 segments, unit 2)"}, "P", EXACT, 0},
    {op_embedding, "", {"%5 2,3 R", "5,n S(1)"}, "S(2)", EXACT, 0},
    {op_embedding, "", {"%5 n,3 S(0)", "5,4 R"}, "S(0)", EXACT, 0},
    {op_embedding, "", {"%5 2,n S(1)", "5,4 R"}, "S(1)", EXACT, 0},
    {op_layer_norm, "", {"3,5 R", "5 R", "5 R"}, "R", ROUND, 0},
    {op_layer_norm, "", {"n,5 S(0)", "5 R", "5 R"}, "S(0)", ROUND, 0},
    {op_layer_norm, "", {"2,n,5 S(1)", "5 R"}, "S(1)", ROUND, 0},
    {op_attention, "", {"2,n,5,2 R", "2,n,5,2 R", "2,n,5,2 R"}, "R", ROUND, 0},
    {op_attention, "causal", {"2,n,5,2 S(1)", "2,n,5,2 S(1)", "2,n,5,2 S(1)"}, "S(1)", ROUND, 0},
    {op_attention, "", {"2,n,3,2 S(1)", "2,n,5,2 S(1)", "2,n,5,2 S(1)"}, "S(1)", ROUND, 0},
    {op_attention, "causal", {"n,2,5,2 S(0)", "n,2,5,2 S(0)", "n,2,5,2 S(0)"}, "S(0)", ROUND, 0},

    /* cross-entropy: dense, over a sharded vocabulary, over a sharded batch */
    {op_loss, "mean", {"4,5n R", "%5n 4 R"}, "R", ROUND, 0},
    {op_loss, "mean", {"4,n S(1)", "%n 4 R"}, "R", ROUND, 0},
    {op_loss, "mean ignore", {"9,5n S(1)", "%5n 9 R"}, "R", ROUND, 0},
    {op_loss, "sum", {"2,3,5n S(2)", "%5n 2,3 R"}, "R", ROUND, 0},
    {op_loss, "none ignore", {"2,3,6n S(2, unit 3)", "%6n 2,3 R"}, "R", ROUND, 0},
    {op_loss, "none", {"6,6n S(1, 3 segments, unit 2)", "%6n 6 R"}, "R", ROUND, 0},
    {op_loss, "mean", {"n,5 S(0)", "%5 n S(0)"}, "P", ROUND, 0},
    {op_loss, "mean ignore", {"2n,3 S(0)", "%3 2n S(0)"}, "P", ROUND, 0},
    {op_loss, "sum", {"2,n,5 S(1)", "%5 2,n S(1)"}, "P", ROUND, 0},
    {op_loss, "none ignore", {"2,n,5 S(1)", "%5 2,n S(1)"}, "S(1)", ROUND, 0},

    /* views: a sharded dimension splits at its units, merges as the outermost factor */
    {op_reshape, "3,4n", {"2,6n R"}, "R", EXACT, 0},
    {op_reshape, "3,4n", {"2,6n P"}, "P", EXACT, 0},
    {op_reshape, "24n", {"6n,4 S(0)"}, "S(0, unit 4)", EXACT, 0},
    {op_reshape, "6n,4", {"2n,3,4 S(0)"}, "S(0, unit 3)", EXACT, 0},
    {op_reshape, "24n", {"2n,3,4 S(0)"}, "S(0, unit 12)", EXACT, 0},
    {op_reshape, "3,8n", {"3,2n,4 S(1)"}, "S(1, unit 4)", EXACT, 0},
    {op_reshape, "2,2n,3", {"2,6n S(1, unit 3)"}, "S(1)", EXACT, 0},
    {op_reshape, "2,2n,2,3", {"2,12n S(1, unit 6)"}, "S(1)", EXACT, 0},
    {op_reshape, "2,4n,3", {"2,12n S(1, unit 6)"}, "S(1, unit 2)", EXACT, 0},
    {op_reshape, "2,3,2n", {"2,6n S(1, 3 segments, unit 2)"}, "S(2, unit 2)", EXACT, 0},
    {op_reshape, "2,3,n,2", {"2,6n S(1, 3 segments, unit 2)"}, "S(2)", EXACT, 0},
    {op_reshape, "2,3n,2", {"2,6n S(1, 3 segments, unit 2)"}, "S(1, 3 segments, unit 1)", EXACT, 0},
    {op_reshape, "1,3,2n", {"3,2n S(1)"}, "S(2)", EXACT, 0},
    {op_reshape, "3,1,2n,1", {"3,2n S(1)"}, "S(2)", EXACT, 0},
    {op_reshape, "6,5n", {"2,3,5n S(2)"}, "S(1)", EXACT, 0},
    {op_reshape, "2,3,5n", {"6,5n S(1)"}, "S(2)", EXACT, 0},
    {op_merge, "2,3,4n", {"2,n,3,4 S(1)"}, "S(2, unit 4)", EXACT, 0},
    {op_merge, "2,12n", {"2,3,n,4 S(2)"}, "S(1, unit 12)", EXACT, 0},
    {op_turn, "transpose 0 2", {"2,n,3 S(1)"}, "S(1)", EXACT, 0},
    {op_turn, "transpose 0 1", {"2,n,3 S(1)"}, "S(0)", EXACT, 0},
    {op_turn, "transpose -1 0", {"2,n P"}, "P", EXACT, 0},
    {op_turn, "permute 1,2,0", {"2,3,n S(2)"}, "S(1)", EXACT, 0},
    {op_turn, "permute 2,0,1", {"6n,2,3 S(0, 3 segments, unit 2)"}, "S(1, 3 segments, unit 2)", EXACT, 0},
    {op_slice, "1,2,3", {"n,6 S(0)"}, "S(0)", EXACT, 0},
    {op_slice, "0,1,1", {"2,n S(1)"}, "S(1)", EXACT, 0},
    {op_slice, "1,1,2", {"n,4 P"}, "P", EXACT, 0},
    {op_slice, "1,0,6n", {"2,6n S(1)"}, "S(1)", EXACT, 0},
    {op_slice, "1,2n,2n", {"2,6n S(1, 3 segments, unit 2)"}, "S(1, unit 2)", EXACT, 0},
    {op_slice, "1,0,4n", {"2,6n S(1, 3 segments, unit 2)"}, "S(1, 2 segments, unit 2)", EXACT, 0},
    {op_slice, "1,2n,4n", {"2,6n S(1, 3 segments, unit 2)"}, "S(1, 2 segments, unit 2)", EXACT, 0},
    {op_slice, "0,4n,2n", {"7n,2 S(0)[4n:2,2n:1,n:1]"}, "S(0)", EXACT, 0},
    {op_slice, "0,4n,3n", {"7n,2 S(0)[4n:2,2n:1,n:1]"}, "S(0)[2n:1,n:1]", EXACT, 0},
    {op_split, "1", {"2,6n S(1, 3 segments, unit 2)"}, "S(1, unit 2)", EXACT, 0},
    {op_split, "0", {"6,n S(1)"}, "S(1)", EXACT, 0},
    {op_concat, "0", {"2,n R", "3,n R"}, "R", EXACT, 0},
    {op_concat, "0", {"2,n P", "3,n P"}, "P", EXACT, 0},
    {op_concat, "0", {"2,n S(1)", "3,n S(1)", "1,n S(1)"}, "S(1)", EXACT, 0},
    {op_concat, "1", {"2,2n S(1)", "2,n S(1)"}, "S(1)[2n:1,n:1]", EXACT, 0},
    {op_concat,
     "-1",
     {"2,4n S(1, unit 2)", "2,2n S(1, 2 segments, unit 1)", "2,3n S(1, unit 3)"},
     "S(1)[4n:2,n:1,n:1,3n:3]",
     EXACT,
     0},
    {op_redistribute, "R", {"- P"}, "R", EXACT, 0},
    {op_redistribute, "P", {"- R"}, "P", EXACT, 0},
};

/* Every transition between these, but for sharded to partial, of a (2, 6n, 3) tensor. */
static const char *const transitions[] = {
    "R",    "P",
    "S(0)", "S(1)",
    "S(2)", "S(1, unit 2)",
    "S(1, unit 6)", "S(1, 3 segments, unit 2)",
    "S(1, 2 segments, unit 1)", "S(1)[4n:2,2n:1]",
};

/* These keep R and S: one row of each with each of these layouts of (2, 6n). */
static const char *const unary_layouts[] = {"R", "S(0)", "S(1)", "S(1, 3 segments, unit 2)"};

/* ------------------------------------------------------------- running a table */

enum { ROWS_MAX = 400, LENGTHS = 6, WAYS = 2 };
static const int64_t lengths[LENGTHS] = {1, 2, 3, 5, 7, 8};

static row all_rows[ROWS_MAX];
static int all_count;
static char texts[ROWS_MAX][64];
static capture dense[ROWS_MAX][LENGTHS][WAYS];

static void describe(const row *r, int64_t n, int way, char *text, size_t size) {
    (void)snprintf(text, size, "%s(%s%s%s%s%s%s) to %s with n = %ld%s", r->arg, r->in[0],
                   r->in[1] ? "; " : "", r->in[1] ? r->in[1] : "", r->in[2] ? "; " : "",
                   r->in[2] ? r->in[2] : "", "", r->out, (long)n, way ? " through an op" : "");
}

/* The leaves' gradients lie as DESIGN says: replicated for R and P, alike for S. */
static int check_gradient(tsh_ctx *ctx, const char *name, tsh_tensor *leaf, tsh_tensor *grad,
                          int i) {
    tsh_layout want = tsh_layout_of(leaf), got = tsh_layout_of(grad);
    CHECK(grad, "%s: input %d has no gradient", name, i);
    if (want.kind == TSH_PARTIAL) want = tsh_replicated();
    CHECK(spec_same_layout(&want, &got, tsh_shape_of(leaf), tsh_tp(ctx)->size),
          "%s: gradient of input %d", name, i);
    return 0;
}

/* One row: forward, layout, loss, backward. way 1: each input comes out of an op, so that its
 * gradient is completed in flight; way 0: it is a leaf. one: all replicated. */
static int run_row(tsh_ctx *ctx, const row *r, int64_t n, int way, int one, capture *got) {
    tsh_tensor *leaf[3] = {NULL, NULL, NULL}, *in[3] = {NULL, NULL, NULL}, *out;
    tsh_layout want = spec_layout(r->out, n), layout;
    char name[256], text[96];
    int i;
    describe(r, n, way, name, sizeof name);
    for (i = 0; i < 3 && r->in[i]; i++) {
        spec s = spec_parse(r->in[i], n);
        if (one) s.layout = tsh_replicated();
        in[i] = leaf[i] = spec_tensor(ctx, &s, 10 + (uint64_t)i);
        CHECK(leaf[i], "%s: input %d cannot be made", name, i);
        if (!s.below) tsh_requires_grad(leaf[i], 1);
        if (!s.below && way) in[i] = tsh_scale(leaf[i], 2);
    }
    out = r->op(ctx, in, r->arg, n);
    CHECK(out, "%s", name);
    layout = tsh_layout_of(out);
    CHECK(one || spec_same_layout(&want, &layout, tsh_shape_of(out), tsh_tp(ctx)->size),
          "%s: gives %s", name, tsh_layout_text(&layout, text, sizeof text));
    CHECK(!capture_add(ctx, got, out), "%s", name);
    if (!(r->flags & VALUES)) {
        CHECK(tsh_backward(ctx, ranks_loss(ctx, out)) == TSH_OK, "%s", name);
        for (i = 0; i < 3 && leaf[i]; i++) {
            if (tsh_dtype_of(leaf[i]) != TSH_REAL) continue;
            if (check_gradient(ctx, name, leaf[i], tsh_grad(leaf[i]), i)) return 1;
            CHECK(!capture_add(ctx, got, tsh_grad(leaf[i])), "%s", name);
        }
    }
    CHECK(tsh_step_end(ctx) == TSH_OK, "%s", name);
    for (i = 0; i < 3; i++) tsh_tensor_free(leaf[i]);
    return 0;
}

static int walk_rows(tsh_ctx *ctx, void *user) {
    int one = *(const int *)user, i, k, way;
    for (i = 0; i < all_count; i++)
        for (k = 0; k < LENGTHS; k++)
            for (way = 0; way < WAYS; way++) {
                char name[256];
                capture got = {0};
                describe(&all_rows[i], lengths[k], way, name, sizeof name);
                if (run_row(ctx, &all_rows[i], lengths[k], way, one, &got)) return 1;
                if (one)
                    dense[i][k][way] = got;
                else if (capture_compare(ctx, name, &dense[i][k][way], &got,
                                         all_rows[i].tolerance))
                    return 1;
                else
                    capture_free(&got);
            }
    return 0;
}

static void add_row(op_fn op, const char *arg, const char *shape, const char *layout,
                    const char *out, double tolerance) {
    row *r = &all_rows[all_count];
    char *text = texts[all_count++];
    memset(r, 0, sizeof *r);
    (void)snprintf(text, sizeof texts[0], "%s %s", shape, layout);
    r->op = op;
    r->arg = arg;
    r->in[0] = text;
    r->out = out;
    r->tolerance = tolerance;
}

static int make_rows(void **state) {
    int i, j, one = 1;
    (void)state;
    memcpy(all_rows, rows, sizeof rows);
    all_count = COUNT(rows);
    for (i = 0; i < COUNT(unary_ops); i++)
        for (j = 0; j < COUNT(unary_layouts); j++)
            add_row(op_unary_positive, unary_ops[i].name, "2,6n", unary_layouts[j],
                    unary_layouts[j], ROUND);
    for (i = 0; i < COUNT(transitions); i++)
        for (j = 0; j < COUNT(transitions); j++)
            if (transitions[i][0] != 'S' || transitions[j][0] != 'P')
                add_row(op_redistribute, transitions[j], "2,6n,3", transitions[i], transitions[j],
                        EXACT);
    ranks_run(1, walk_rows, &one);
    return 0;
}

static int free_rows(void **state) {
    int i, k;
    (void)state;
    for (i = 0; i < all_count; i++)
        for (k = 0; k < LENGTHS * WAYS; k++) capture_free(&dense[i][k / WAYS][k % WAYS]);
    return 0;
}

static void every_row_equals_the_dense_result(void **state) {
    int i, one = 0;
    (void)state;
    for (i = 0; i < COUNT(ranks_degrees); i++) ranks_run(ranks_degrees[i], walk_rows, &one);
}

/* ------------------------------------------------------------- what is refused */

static tsh_tensor *op_backward(tsh_ctx *ctx, tsh_tensor **in, const char *arg, int64_t n) {
    (void)arg, (void)n;
    (void)tsh_backward(ctx, tsh_neg(in[0]));
    return NULL;
}

static tsh_tensor *op_item(tsh_ctx *ctx, tsh_tensor **in, const char *arg, int64_t n) {
    (void)arg, (void)n;
    (void)tsh_item(ctx, in[0]);
    return NULL;
}

static tsh_tensor *op_write(tsh_ctx *ctx, tsh_tensor **in, const char *arg, int64_t n) {
    static const tsh_real values[64];
    (void)arg, (void)n;
    (void)tsh_write(ctx, in[0], TSH_GLOBAL, values,
                    (size_t)tsh_numel(in[0]) * sizeof(tsh_real));
    return NULL;
}

static tsh_tensor *op_broadcast(tsh_ctx *ctx, tsh_tensor **in, const char *arg, int64_t n) {
    (void)ctx, (void)arg, (void)n;
    (void)tsh_broadcast_batch(in[0]);
    return NULL;
}

/* A row-parallel layer whose plan declares its input's layout. */
static tsh_tensor *op_declared(tsh_ctx *ctx, tsh_tensor **in, const char *arg, int64_t n) {
    tsh_layout declared = spec_layout(arg, n);
    tsh_plan_rule rule = {"row", TSH_ROWWISE, 0, 0, 0, &declared};
    tsh_linear_desc desc = {0};
    desc.in = tsh_dim(in[0], -1);
    desc.out = 4;
    tsh_add_linear(tsh_root(ctx), "row", &desc);
    tsh_parallelize(tsh_root(ctx), &rule, 1);
    return tsh_forward(tsh_find(tsh_root(ctx), "row"), in[0]);
}

typedef struct refusal {
    op_fn op;
    const char *arg, *in[3];
    tsh_result code;
    const char *sentence[4]; /* what it must hold: the op, the layouts, the way out */
} refusal;

#define COMPLETE "tsh_redistribute(x, tsh_replicated())"
#define ALIKE    "tsh_redistribute(b, tsh_layout_of(a))"

static const refusal refusals[] = {
    /* a replicated bias added to a partial sum: once per rank */
    {op_binary, "+", {"2,4 P", "4 R"}, TSH_ERR_LAYOUT, {"tsh_add", "(2, 4) P", "(4) R", COMPLETE}},
    {op_binary, "-", {"4 R", "2,4 P"}, TSH_ERR_LAYOUT, {"tsh_sub", "(2, 4) P", "(4) R", COMPLETE}},
    {op_linear,
     "",
     {"2,3 P", "4,3 R", "4 R"},
     TSH_ERR_LAYOUT,
     {"tsh_linear", "(2, 3) P", "once per rank", COMPLETE}},
    /* two operands with different layouts */
    {op_binary,
     "+",
     {"4,4 S(0)", "4,4 S(1)"},
     TSH_ERR_LAYOUT,
     {"tsh_add", "(4, 4) S(0)", "(4, 4) S(1)", ALIKE}},
    {op_binary,
     "*",
     {"2,4 S(1)", "2,4 R"},
     TSH_ERR_LAYOUT,
     {"tsh_mul", "(2, 4) S(1)", "(2, 4) R", ALIKE}},
    {op_binary,
     "/",
     {"4 R", "2,4 S(1)"},
     TSH_ERR_LAYOUT,
     {"tsh_div", "(2, 4) S(1)", "(4) R", ALIKE}},
    {op_binary,
     "+",
     {"4,3 S(0)", "3 S(0)"},
     TSH_ERR_LAYOUT,
     {"tsh_add", "(4, 3) S(0)", "(3) S(0)", ALIKE}},
    {op_binary,
     "+",
     {"2,6 S(1, 3 segments, unit 1)", "2,6 S(1)"},
     TSH_ERR_LAYOUT,
     {"tsh_add", "S(1, 3 segments)", "(2, 6) S(1)", ALIKE}},
    {op_binary, "=", {"4 S(0)", "4 R"}, TSH_ERR_LAYOUT, {"tsh_eq", "(4) S(0)", "(4) R", ALIKE}},
    {op_binary, "+", {"4 S(0)", "4 P"}, TSH_ERR_LAYOUT, {"tsh_add", "(4) S(0)", "(4) P", COMPLETE}},
    {op_binary, "*", {"4 P", "4 S(0)"}, TSH_ERR_LAYOUT, {"tsh_mul", "(4) S(0)", "(4) P", COMPLETE}},
    /* products of partial sums, and what is not linear in one */
    {op_binary, "*", {"4 P", "2,4 P"}, TSH_ERR_LAYOUT, {"tsh_mul", "(4) P", "(2, 4) P", COMPLETE}},
    {op_binary, "/", {"4 P", "4 P"}, TSH_ERR_LAYOUT, {"tsh_div", "(4) P", COMPLETE}},
    {op_binary, "/", {"4 R", "4 P"}, TSH_ERR_LAYOUT, {"tsh_div", "(4) P", "(4) R", COMPLETE}},
    {op_binary, "p", {"4 P", "4 R"}, TSH_ERR_LAYOUT, {"tsh_pow", "(4) P", COMPLETE}},
    {op_binary, "<", {"4 P", "4 P"}, TSH_ERR_LAYOUT, {"tsh_lt", "(4) P", COMPLETE}},
    {op_where, "", {"%2 4 R", "4 P", "4 R"}, TSH_ERR_LAYOUT, {"tsh_where", "(4) P", COMPLETE}},
    {op_where, "", {"%2 4 S(0)", "4 P", "4 P"}, TSH_ERR_LAYOUT, {"tsh_where", "(4) S(0)", COMPLETE}},
    {op_cast, "", {"4 P"}, TSH_ERR_LAYOUT, {"tsh_cast", "partial sum", COMPLETE}},
    {op_reduce, "Max 1", {"2,4 P"}, TSH_ERR_LAYOUT, {"tsh_max", "(2, 4) P", COMPLETE}},
    {op_reduce, "Argmax all", {"2,4 P"}, TSH_ERR_LAYOUT, {"tsh_argmax", "(2, 4) P", COMPLETE}},
    {op_reduce, "Softmax 1", {"2,4 P"}, TSH_ERR_LAYOUT, {"tsh_softmax", "(2, 4) P", COMPLETE}},
    /* what needs all values along a dimension that is sharded */
    {op_reduce, "Max 1", {"2,4 S(1)"}, TSH_ERR_LAYOUT, {"tsh_max", "(2, 4) S(1)", COMPLETE}},
    {op_reduce, "Max all", {"2,4 S(1)"}, TSH_ERR_LAYOUT, {"tsh_max", "(2, 4) S(1)", COMPLETE}},
    {op_reduce, "Argmax 1", {"2,4 S(1)"}, TSH_ERR_LAYOUT, {"tsh_argmax", "(2, 4) S(1)", COMPLETE}},
    {op_reduce, "Softmax -1", {"2,4 S(1)"}, TSH_ERR_LAYOUT, {"tsh_softmax", "(2, 4) S(1)", COMPLETE}},
    {op_reduce,
     "log_softmax 0",
     {"2,4 S(0)"},
     TSH_ERR_LAYOUT,
     {"tsh_log_softmax", "(2, 4) S(0)", COMPLETE}},
    {op_layer_norm,
     "",
     {"2,4 S(1)", "4 R", "4 R"},
     TSH_ERR_LAYOUT,
     {"tsh_layer_norm", "sharded along its last dimension", "of 4 features", COMPLETE}},
    {op_layer_norm, "", {"2,4 P", "4 R"}, TSH_ERR_LAYOUT, {"tsh_layer_norm", "partial sum", COMPLETE}},
    {op_layer_norm,
     "",
     {"2,4 R", "4 S(0)"},
     TSH_ERR_LAYOUT,
     {"tsh_layer_norm", "(4) S(0)", "must be replicated", "tsh_redistribute(w, tsh_replicated())"}},
    /* matrix products */
    {op_matmul,
     "",
     {"2,4 S(1)", "4,3 R"},
     TSH_ERR_LAYOUT,
     {"tsh_matmul", "(2, 4) S(1)", "(4, 3) R", COMPLETE}},
    {op_matmul,
     "",
     {"2,4 R", "4,3 S(0)"},
     TSH_ERR_LAYOUT,
     {"tsh_matmul", "(2, 4) R", "(4, 3) S(0)", COMPLETE}},
    {op_matmul,
     "",
     {"4,4 S(0)", "4,4 S(1)"},
     TSH_ERR_LAYOUT,
     {"tsh_matmul", "(4, 4) S(0)", "(4, 4) S(1)", COMPLETE}},
    {op_matmul, "", {"4,4 P", "4,4 P"}, TSH_ERR_LAYOUT, {"tsh_matmul", "(4, 4) P", COMPLETE}},
    {op_matmul,
     "",
     {"4,4 P", "4,4 S(1)"},
     TSH_ERR_LAYOUT,
     {"tsh_matmul", "(4, 4) P", "(4, 4) S(1)", COMPLETE}},
    {op_matmul,
     "",
     {"2,6 S(1, unit 3)", "6,2 S(0, 3 segments, unit 1)"},
     TSH_ERR_LAYOUT,
     {"tsh_matmul", "S(1, unit 3)", "S(0, 3 segments)", COMPLETE}},
    {op_matmul,
     "",
     {"4,2,3 S(0)", "4,3,2 R"},
     TSH_ERR_LAYOUT,
     {"tsh_matmul", "(4, 2, 3) S(0)", "(4, 3, 2) R", COMPLETE}},
    {op_linear,
     "",
     {"2,4 S(1)", "3,4 R"},
     TSH_ERR_LAYOUT,
     {"tsh_linear", "(2, 4) S(1)", "(3, 4) R", COMPLETE}},
    {op_linear,
     "",
     {"2,4 S(1)", "3,4 S(0)"},
     TSH_ERR_LAYOUT,
     {"tsh_linear", "(2, 4) S(1)", "(3, 4) S(0)", COMPLETE}},
    {op_linear,
     "",
     {"2,4 P", "3,4 S(0)"},
     TSH_ERR_LAYOUT,
     {"tsh_linear", "(2, 4) P", "(3, 4) S(0)", COMPLETE}},
    {op_linear,
     "",
     {"2,4 P", "3,4 S(1)"},
     TSH_ERR_LAYOUT,
     {"tsh_linear", "(2, 4) P", "(3, 4) S(1)", COMPLETE}},
    {op_linear,
     "",
     {"2,4 S(0)", "3,4 S(1)"},
     TSH_ERR_LAYOUT,
     {"tsh_linear", "(2, 4) S(0)", "(3, 4) S(1)", COMPLETE}},
    {op_linear,
     "",
     {"2,6 S(1, unit 3)", "3,6 S(1, 3 segments, unit 1)"},
     TSH_ERR_LAYOUT,
     {"tsh_linear", "S(1, unit 3)", "S(1, 3 segments)", COMPLETE}},
    {op_linear,
     "",
     {"2,4 R", "3,4 P"},
     TSH_ERR_LAYOUT,
     {"tsh_linear", "(2, 4) R", "(3, 4) P", "tsh_redistribute(w, tsh_replicated())"}},
    {op_linear,
     "",
     {"2,4 R", "3,4 S(0)", "3 R"},
     TSH_ERR_LAYOUT,
     {"tsh_linear", "(3, 4) S(0)", "(3) R", "sharded like its dimension 0"}},
    {op_linear,
     "",
     {"2,4 R", "3,4 S(1)", "3 S(0)"},
     TSH_ERR_LAYOUT,
     {"tsh_linear", "(3, 4) S(1)", "(3) S(0)", "any other is replicated"}},
    {op_declared,
     "S(-1)",
     {"2,6 R"},
     TSH_ERR_LAYOUT,
     {"row: ", "(2, 6) R", "declared, S(-1)", "tsh_redistribute(x, "}},
    {op_declared,
     "S(-1, unit 3)",
     {"2,6 S(0)"},
     TSH_ERR_LAYOUT,
     {"row: ", "(2, 6) S(0)", "declared, S(-1, unit 3)", "tsh_redistribute(x, "}},
    {op_declared,
     "R",
     {"2,6 S(1)"},
     TSH_ERR_LAYOUT,
     {"row: ", "(2, 6) S(1)", "declared, R", "tsh_redistribute(x, "}},
    {op_embedding,
     "",
     {"%4 4 S(0)", "4,2 S(0)"},
     TSH_ERR_LAYOUT,
     {"tsh_embedding", "(4) S(0)", "(4, 2) S(0)", "tsh_redistribute(ids, tsh_replicated())"}},
    {op_embedding, "", {"%4 4 R", "4,2 P"}, TSH_ERR_LAYOUT, {"tsh_embedding", "(4) R", "(4, 2) P"}},
    /* attention and the loss */
    {op_attention,
     "",
     {"1,4,3,2 S(1)", "1,4,3,2 R", "1,4,3,2 R"},
     TSH_ERR_LAYOUT,
     {"tsh_attention", "q (1, 4, 3, 2) S(1)", "k (1, 4, 3, 2) R", "tsh_redistribute(k, "}},
    {op_attention,
     "",
     {"1,4,4,2 S(2)", "1,4,4,2 S(2)", "1,4,4,2 S(2)"},
     TSH_ERR_LAYOUT,
     {"tsh_attention", "(1, 4, 4, 2) S(2)", "by batch or by heads", "tsh_redistribute("}},
    {op_attention,
     "",
     {"1,4,3,2 P", "1,4,3,2 P", "1,4,3,2 P"},
     TSH_ERR_LAYOUT,
     {"tsh_attention", "(1, 4, 3, 2) P", "tsh_redistribute("}},
    {op_loss,
     "mean",
     {"2,4 P", "%4 2 R"},
     TSH_ERR_LAYOUT,
     {"tsh_cross_entropy", "(2, 4) P", "partial sum", "tsh_redistribute(logits, tsh_replicated())"}},
    {op_loss,
     "mean",
     {"2,4 S(0)", "%4 2 R"},
     TSH_ERR_LAYOUT,
     {"tsh_cross_entropy", "(2, 4) S(0)", "(2) R", "sharded as the logits' rows"}},
    {op_loss,
     "mean",
     {"2,4 S(1)", "%4 2 S(0)"},
     TSH_ERR_LAYOUT,
     {"tsh_cross_entropy", "(2, 4) S(1)", "(2) S(0)", "the target is replicated"}},
    {op_backward,
     "",
     {"- P"},
     TSH_ERR_LAYOUT,
     {"tsh_backward", "partial sum", "tsh_redistribute(loss, tsh_replicated())"}},
    {op_backward, "", {"1 S(0)"}, TSH_ERR_SHAPE, {"tsh_backward", "replicated", "(1) S(0)"}},
    /* moving and viewing */
    {op_redistribute, "P", {"4 S(0)"}, TSH_ERR_LAYOUT, {"tsh_redistribute", "(4) S(0)", "become P"}},
    {op_redistribute, "S(1)", {"4 R"}, TSH_ERR_LAYOUT, {"tsh_redistribute", "(4) R", "become S(1)"}},
    {op_redistribute,
     "S(0, unit 3)",
     {"4 R"},
     TSH_ERR_LAYOUT,
     {"tsh_redistribute", "(4) R", "become S(0, unit 3)"}},
    {op_redistribute,
     "S(0, 3 segments, unit 1)",
     {"4 P"},
     TSH_ERR_LAYOUT,
     {"tsh_redistribute", "(4) P", "become S(0, 3 segments)"}},
    {op_reshape, "2,2,3", {"2,6 S(1)"}, TSH_ERR_LAYOUT, {"tsh_reshape", "(2, 6) S(1)", COMPLETE}},
    {op_reshape, "12", {"2,6 S(1)"}, TSH_ERR_LAYOUT, {"tsh_reshape", "(2, 6) S(1)", COMPLETE}},
    {op_reshape,
     "2,3,4",
     {"2,12 S(1, unit 6)"},
     TSH_ERR_LAYOUT,
     {"tsh_reshape", "(2, 12) S(1, unit 6)", "units of 6", COMPLETE}},
    {op_slice, "0,1,2", {"4 S(0)"}, TSH_ERR_LAYOUT, {"tsh_slice", "(4) S(0)", "[1, 3)", COMPLETE}},
    {op_slice,
     "1,2,3",
     {"2,6 S(1, 3 segments, unit 1)"},
     TSH_ERR_LAYOUT,
     {"tsh_slice", "(2, 6) S(1, 3 segments)", "segment boundaries", COMPLETE}},
    {op_split, "1", {"2,6 S(1)"}, TSH_ERR_LAYOUT, {"tsh_slice", "(2, 6) S(1)", COMPLETE}},
    {op_concat,
     "0",
     {"2,4 S(1)", "2,4 R"},
     TSH_ERR_LAYOUT,
     {"tsh_concat", "(2, 4) S(1)", "(2, 4) R", "tsh_redistribute"}},
    {op_concat,
     "0",
     {"2,6 S(1)", "2,6 S(1, 3 segments, unit 1)"},
     TSH_ERR_LAYOUT,
     {"tsh_concat", "(2, 6) S(1)", "S(1, 3 segments)", "tsh_redistribute"}},
    {op_concat,
     "0",
     {"6 S(0, 3 segments, unit 1)", "6 S(0, 3 segments, unit 1)"},
     TSH_ERR_LAYOUT,
     {"tsh_concat", "(6) S(0, 3 segments)", "at most 4 segments", "tsh_redistribute"}},
    /* values in and out */
    {op_item, "", {"1 P"}, TSH_ERR_LAYOUT, {"tsh_item", "tsh_redistribute("}},
    {op_item, "", {"1 S(0)"}, TSH_ERR_LAYOUT, {"tsh_item", "tsh_redistribute("}},
    {op_write, "", {"4 P"}, TSH_ERR_LAYOUT, {"tsh_write", "partial sum"}},
    {op_broadcast, "", {"4 S(0)"}, TSH_ERR_LAYOUT, {"tsh_broadcast_batch", "(4) S(0)", "replicated"}},
};

static int refuse(tsh_ctx *ctx, void *user) {
    const refusal *r = (const refusal *)user;
    const tsh_error *error = tsh_last_error(ctx);
    tsh_tensor *in[3] = {NULL, NULL, NULL};
    int i;
    for (i = 0; i < 3 && r->in[i]; i++) {
        spec s = spec_parse(r->in[i], 1);
        in[i] = spec_tensor(ctx, &s, 10 + (uint64_t)i);
        CHECK(in[i], "input %d", i);
        if (!s.below) tsh_requires_grad(in[i], 1);
    }
    CHECK(!r->op(ctx, in, r->arg, 1), "a result where an error was due: %s %s", r->sentence[0],
          r->in[0]);
    CHECK(error->code == r->code, "want %s: %s %s", tsh_result_name(r->code), r->sentence[0],
          r->in[0]);
    for (i = 0; i < 4 && r->sentence[i]; i++)
        CHECK(strstr(error->message, r->sentence[i]), "the sentence lacks \"%s\"", r->sentence[i]);
    return 0;
}

static void every_refusal_has_its_sentence(void **state) {
    int i, ranks;
    (void)state;
    for (i = 0; i < COUNT(refusals); i++)
        for (ranks = 1; ranks <= 3; ranks++) {
            refusal r = refusals[i];
            ranks_run(ranks, refuse, &r);
        }
}

/* What is linear takes a partial sum, what is not names itself. */
static void no_nonlinear_op_takes_a_partial_sum(void **state) {
    int i;
    (void)state;
    for (i = 0; i < COUNT(unary_ops); i++) {
        char name[32];
        refusal r = {op_unary, NULL, {"2,4 P"}, TSH_ERR_LAYOUT, {NULL, "not linear", COMPLETE}};
        (void)snprintf(name, sizeof name, "tsh_%s:", unary_ops[i].name);
        r.arg = unary_ops[i].name;
        r.sentence[0] = name;
        ranks_run(2, refuse, &r);
    }
}

/* A refusal that was not told to the peers yet can be forgotten, and work goes on. */
static int recover(tsh_ctx *ctx, void *user) {
    spec s = spec_parse("2,4 S(1)", 1), sum = spec_parse("2,4 P", 1);
    tsh_tensor *a = spec_tensor(ctx, &s, 1), *b = spec_tensor(ctx, &sum, 2);
    (void)user;
    CHECK(!tsh_add(a, b), "S and P");
    CHECK(!tsh_add(a, a), "nothing is done while there is an error");
    tsh_clear_error(ctx);
    CHECK(tsh_add(a, a), "after tsh_clear_error");
    CHECK_OK();
    return 0;
}

static void a_refusal_can_be_cleared(void **state) {
    (void)state;
    ranks_run(2, recover, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(every_row_equals_the_dense_result, make_rows, free_rows),
        cmocka_unit_test(every_refusal_has_its_sentence),
        cmocka_unit_test(no_nonlinear_op_takes_a_partial_sum),
        cmocka_unit_test(a_refusal_can_be_cleared),
    };
    return cmocka_run_group_tests_name("op/layouts", tests, NULL, NULL);
}
