/* Which layouts each op takes and gives: one table of rows, each run at every degree of tensor
 * parallelism and with dimensions that leave ranks uneven or empty, its values and gradients
 * compared with the dense ones on a single rank. A second table holds what must be refused, with
 * its sentence. */
/* build: double */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"

/* ---------------------------------------------------------- the ops, by text */

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
    {"exp", tsh_exp},         {"log", tsh_log},          {"sqrt", tsh_sqrt},
    {"sigmoid", tsh_sigmoid}, {"tanh", tsh_tanh},        {"relu", tsh_relu},
    {"gelu", tsh_gelu},       {"silu", tsh_silu},        {"gelu_tanh", tsh_gelu_tanh},
    {"pow_scalar", cube},     {"add_scalar", add_three}, {"erf", tsh_erf},
};

static tsh_tensor *op_unary(probe *p) {
    static const named_unary linear_ops[] = {
        {"neg", tsh_neg}, {"clone", tsh_clone}, {"scale", twice}};
    const char *name = probe_arg(p);
    int i;
    for (i = 0; i < COUNT(unary_ops); i++)
        if (strcmp(unary_ops[i].name, name) == 0) return unary_ops[i].fn(p->in[0]);
    for (i = 0; i < COUNT(linear_ops); i++)
        if (strcmp(linear_ops[i].name, name) == 0) return linear_ops[i].fn(p->in[0]);
    return NULL;
}

/* 0.1 x^2 + 0.5: positive, and not where slopes vanish. */
static tsh_tensor *positive(tsh_tensor *x) {
    return tsh_add_scalar(tsh_scale(tsh_mul(x, x), 0.1), 0.5);
}

static tsh_tensor *op_unary_positive(probe *p) {
    p->in[0] = positive(p->in[0]);
    return op_unary(p);
}

static tsh_tensor *op_binary(probe *p) {
    switch (p->arg[1] ? '?' : *probe_arg(p)) {
    case '+': return tsh_add(p->in[0], p->in[1]);
    case '-': return tsh_sub(p->in[0], p->in[1]);
    case '*': return tsh_mul(p->in[0], p->in[1]);
    case '/': return tsh_div(p->in[0], p->in[1]);
    case '^': return tsh_pow(positive(p->in[0]), p->in[1]);
    case 'p': return tsh_pow(p->in[0], p->in[1]);
    case '=': return tsh_eq(p->in[0], p->in[1]);
    case '<': return tsh_lt(p->in[0], p->in[1]);
    case 'L': return tsh_le(p->in[0], p->in[1]);
    default: return NULL;
    }
}

static tsh_tensor *op_where(probe *p) {
    return tsh_where(p->in[0], p->in[1], p->in[2]);
}

static tsh_tensor *op_cast(probe *p) {
    return tsh_cast(p->in[0], TSH_I64);
}

static tsh_tensor *op_dropout(probe *p) {
    return tsh_dropout(p->in[0], 0.5, NULL);
}

/* "sum 1", "mean all", "sum 1 keep": an op, a dimension, and whether it stays */
static tsh_tensor *op_reduce(probe *p) {
    static const char *const dims[] = {"all", "-1", "0", "1", "2"};
    int i, dim = TSH_ALL, found = 0, keep = probe_has(p, "keep");
    for (i = 0; i < COUNT(dims); i++)
        if (probe_has(p, dims[i])) {
            dim = i ? i - 2 : TSH_ALL;
            found++;
        }
    if (found != 1) return NULL;
    if (probe_has(p, "sum")) return tsh_sum(p->in[0], dim, keep);
    if (probe_has(p, "mean")) return tsh_mean(p->in[0], dim, keep);
    if (probe_has(p, "max")) return tsh_max(p->in[0], dim, keep);
    if (probe_has(p, "argmax")) return tsh_argmax(p->in[0], dim, keep);
    if (probe_has(p, "softmax")) return tsh_softmax(p->in[0], dim);
    return probe_has(p, "log_softmax") ? tsh_log_softmax(p->in[0], dim) : NULL;
}

static tsh_tensor *op_matmul(probe *p) {
    return tsh_matmul(p->in[0],
                      probe_has(p, "turned") ? tsh_transpose(p->in[1], -1, -2) : p->in[1]);
}

static tsh_tensor *op_linear(probe *p) {
    return tsh_linear(p->in[0], p->in[1], p->in[2]);
}

static tsh_tensor *op_embedding(probe *p) {
    return tsh_embedding(p->in[0], p->in[1], NULL);
}

/* "bias": without a weight; inputs that are not there are NULL */
static tsh_tensor *op_layer_norm(probe *p) {
    if (probe_has(p, "bias")) return tsh_layer_norm(p->in[0], NULL, p->in[1], 0);
    return tsh_layer_norm(p->in[0], p->in[1], p->in[2], 0);
}

/* "one": weight + 1 */
static tsh_tensor *op_rms_norm(probe *p) {
    const tsh_rms_norm_desc desc = {.eps = 0.01, .plus_one = 1};
    return probe_has(p, "one") ? tsh_rms_norm_with(p->in[0], p->in[1], &desc)
                               : tsh_rms_norm(p->in[0], p->in[1], 0);
}

/* "dims 4", "pairs" (interleaved), "from 3", "rows" (positions of their own) */
static tsh_tensor *op_rope(probe *p) {
    static const int64_t starts[] = {7, 0, 3, -2, 11, 1, 5, 4, 0, 2, 9, 6, 8, 13, 12, 10};
    tsh_rope_desc desc = {.base = 100};
    if (probe_has(p, "rows")) desc.starts = starts;
    desc.interleaved = probe_has(p, "pairs");
    desc.dims = probe_number(p, "dims");
    desc.start = probe_number(p, "from");
    return tsh_rope(p->in[0], &desc);
}

static tsh_tensor *op_attention(probe *p) {
    tsh_attention_desc desc = {.causal = probe_has(p, "causal")};
    if (probe_has(p, "dropout")) desc.dropout = 0.5;
    return tsh_attention(p->in[0], p->in[1], p->in[2], &desc);
}

/* "mean", "sum", "none"; with " ignore" rows of class 2 are left out */
static tsh_tensor *op_loss(probe *p) {
    tsh_cross_entropy_desc desc = {.ignore_index = 2, .empty_zero = 1};
    if (probe_has(p, "sum"))
        desc.reduction = TSH_REDUCE_SUM;
    else if (probe_has(p, "none"))
        desc.reduction = TSH_REDUCE_NONE;
    else if (!probe_has(p, "mean"))
        return NULL;
    desc.ignore = probe_has(p, "ignore");
    return tsh_cross_entropy(p->in[0], p->in[1], &desc);
}

static tsh_tensor *op_redistribute(probe *p) {
    return tsh_redistribute(p->in[0], spec_layout(probe_arg(p), p->n));
}

static tsh_tensor *op_reshape(probe *p) {
    const char *shape = probe_arg(p);
    return tsh_reshape(p->in[0], spec_shape(&shape, p->n));
}

/* Of a tensor whose dimensions 1 and 2 were exchanged: only a copy can be reshaped. */
static tsh_tensor *op_merge(probe *p) {
    const char *shape = probe_arg(p);
    return tsh_reshape(tsh_transpose(p->in[0], 1, 2), spec_shape(&shape, p->n));
}

/* "transpose 0 2" and "permute 1,2,0" */
static tsh_tensor *op_turn(probe *p) {
    int d[3] = {0, 0, 0};
    if (sscanf(probe_arg(p), "transpose %d %d", &d[0], &d[1]) == 2)
        return tsh_transpose(p->in[0], d[0], d[1]);
    if (sscanf(p->arg, "permute %d,%d,%d", &d[0], &d[1], &d[2]) != 3) return NULL;
    return tsh_permute(p->in[0], d);
}

/* "1,2n,4n": 4n elements of dimension 1 from 2n on */
static tsh_tensor *op_slice(probe *p) {
    const char *text = probe_arg(p);
    tsh_shape cut = spec_shape(&text, p->n);
    return tsh_slice(p->in[0], (int)cut.dim[0], cut.dim[1], cut.dim[2]);
}

/* Three parts a, b, c of a dimension: a * b + c. */
static tsh_tensor *op_split(probe *p) {
    tsh_tensor *part[3];
    (void)tsh_split(p->in[0], atoi(probe_arg(p)), 3, part);
    return tsh_add(tsh_mul(part[0], part[1]), part[2]);
}

static tsh_tensor *op_concat(probe *p) {
    return tsh_concat(p->in, p->in[2] ? 3 : 2, atoi(probe_arg(p)));
}

/* --------------------------------------------------------------- what is legal */

/* Tolerances are for rounding: ops that are not exact on small integers, or that add up parts in
 * another order than one rank does. */
#define ROUNDING                  2e-5
#define EXACT(op, arg, out, ...)  TRIAL(op_##op, arg, out, 0, 0, __VA_ARGS__)
#define ROUND(op, arg, out, ...)  TRIAL(op_##op, arg, out, ROUNDING, 0, __VA_ARGS__)
#define VALUES(op, arg, out, ...) TRIAL(op_##op, arg, out, 0, TRIAL_VALUES, __VA_ARGS__)

static const trial rows[] = {
    /* elementwise: linear ops keep a partial sum, binary ones want equal layouts */
    EXACT(unary, "neg", "P", "2,n P"),
    EXACT(unary, "scale", "P", "2,n P"),
    EXACT(unary, "neg", "S(1)", "2,n S(1)"),
    EXACT(unary, "scale", "S(1, 3 segments, unit 2)", "2,6n S(1, 3 segments, unit 2)"),
    EXACT(unary, "clone", "R", "2,n R"),
    EXACT(unary, "clone", "S(1)", "2,n S(1)"),
    EXACT(unary, "clone", "P", "2,n P"),
    EXACT(binary, "+", "R", "2,n R", "2,n R"),
    EXACT(binary, "+", "S(1)", "2,n S(1)", "2,n S(1)"),
    EXACT(binary, "-", "S(0)", "n,3 S(0)", "n,3 S(0)"),
    EXACT(binary, "*", "S(1, unit 3)", "2,6n S(1, unit 3)", "2,6n S(1, unit 3)"),
    EXACT(binary, "*", "S(1, 3 segments, unit 2)", "2,6n S(1, 3 segments, unit 2)",
          "6n S(0, 3 segments, unit 2)"),
    EXACT(binary, "+", "S(1)", "2,n,3 S(1)", "n,3 S(0)"),
    EXACT(binary, "+", "S(1)", "2,n,3 S(1)", "n,1 S(0)"),
    EXACT(binary, "+", "S(1)", "n,1 S(0)", "2,n,3 S(1)"),
    EXACT(binary, "+", "S(1)", "2,n S(1)", "2,1 R"),
    EXACT(binary, "-", "S(1)", "2,1 R", "2,n S(1)"),
    EXACT(binary, "*", "S(1)", "2,n,3 S(1)", "3 R"),
    EXACT(binary, "*", "S(0)", "- R", "n,3 S(0)"),
    ROUND(binary, "/", "S(0)", "n,3 S(0)", "1,3 R"),
    ROUND(binary, "^", "S(0)", "n,3 S(0)", "3 R"),
    ROUND(binary, "^", "S(0)", "n,3 S(0)", "n,3 S(0)"),
    EXACT(binary, "+", "P", "2,n P", "2,n P"),
    EXACT(binary, "-", "P", "2,n P", "n P"),
    EXACT(binary, "*", "P", "2,n P", "2,n R"),
    EXACT(binary, "*", "P", "n R", "2,n P"),
    EXACT(binary, "*", "P", "n P", "2,n R"),
    EXACT(binary, "*", "P", "2,n P", "- R"),
    ROUND(binary, "/", "P", "2,n P", "2,1 R"),
    VALUES(binary, "=", "S(1)", "2,n S(1)", "2,n S(1)"),
    VALUES(binary, "<", "S(1)", "2,n S(1)", "2,1 R"),
    VALUES(binary, "L", "S(0)", "n,3 S(0)", "n,3 S(0)"),
    EXACT(where, "", "S(1)", "%2 2,n S(1)", "2,n S(1)", "2,n S(1)"),
    EXACT(where, "", "S(1)", "%2 2,1 R", "2,n S(1)", "- R"),
    EXACT(where, "", "R", "%2 n R", "2,n R", "2,1 R"),
    EXACT(where, "", "P", "%2 2,n R", "2,n P", "2,n P"),
    VALUES(cast, "", "S(1)", "2,n S(1)"),
    VALUES(cast, "", "S(0)", "%9 n,3 S(0)"),
    EXACT(dropout, "", "R", "2,n R"),
    EXACT(dropout, "", "S(1)", "2,n S(1)"),
    EXACT(dropout, "", "S(1, 3 segments, unit 2)", "3,6n S(1, 3 segments, unit 2)"),
    EXACT(dropout, "", "P", "2,n P"),

    /* reductions: over the sharded dimension they give a partial sum */
    EXACT(reduce, "sum 1", "P", "2,n,3 S(1)"),
    EXACT(reduce, "sum 1 keep", "P", "2,n,3 S(1)"),
    EXACT(reduce, "sum 0", "S(0)", "2,n,3 S(1)"),
    EXACT(reduce, "sum 0 keep", "S(1)", "2,n,3 S(1)"),
    EXACT(reduce, "sum -1", "S(1)", "2,n,3 S(1)"),
    EXACT(reduce, "sum all", "P", "2,n,3 S(1)"),
    EXACT(reduce, "sum all", "R", "2,n R"),
    EXACT(reduce, "sum 1", "P", "2,n,3 P"),
    EXACT(reduce, "sum 0", "S(0, 3 segments, unit 2)", "2,6n S(1, 3 segments, unit 2)"),
    ROUND(reduce, "mean 1", "P", "2,n,3 S(1)"),
    ROUND(reduce, "mean all keep", "P", "2,n,3 S(1)"),
    ROUND(reduce, "mean 2", "S(1)", "2,n,3 S(1)"),
    ROUND(reduce, "mean 0", "P", "2,n P"),
    EXACT(reduce, "max 2", "S(1)", "2,n,5 S(1)"),
    EXACT(reduce, "max 0 keep", "S(1)", "5,n,2 S(1)"),
    EXACT(reduce, "max 0", "S(0)", "5,n,2 S(1)"),
    EXACT(reduce, "max all", "R", "2,n R"),
    VALUES(reduce, "argmax 2", "S(1)", "2,n,5 S(1)"),
    VALUES(reduce, "argmax 0 keep", "S(1)", "5,n S(1)"),
    VALUES(reduce, "argmax 1", "R", "3,n S(1)"),
    VALUES(reduce, "argmax 0 keep", "R", "2n,2,3 S(0, 2 segments, unit 1)"),
    ROUND(reduce, "softmax 1", "S(0)", "n,5 S(0)"),
    ROUND(reduce, "softmax 0", "S(1)", "5,n S(1)"),
    ROUND(reduce, "log_softmax -1", "S(1)", "2,n,5 S(1)"),

    /* matmul */
    EXACT(matmul, "", "R", "2,3 R", "3,n R"),
    EXACT(matmul, "", "P", "2,n S(1)", "n,3 S(0)"),
    EXACT(matmul, "", "P", "2,6n S(1, unit 3)", "6n,3 S(0, unit 3)"),
    EXACT(matmul, "", "P", "2,6n S(1, 3 segments, unit 2)", "6n,3 S(0, 3 segments, unit 2)"),
    EXACT(matmul, "", "P", "2,3,n S(2)", "2,n,4 S(1)"),
    EXACT(matmul, "", "P", "2,3,n S(2)", "n,4 S(0)"),
    EXACT(matmul, "turned", "P", "2,n S(1)", "3,n S(1)"),
    EXACT(matmul, "", "S(0)", "n,3 S(0)", "3,2 R"),
    EXACT(matmul, "", "S(1)", "2,n,3 S(1)", "3,2 R"),
    EXACT(matmul, "", "S(1)", "2,n,3 S(1)", "2,3,4 R"),
    EXACT(matmul, "", "S(1)", "2,3 R", "3,n S(1)"),
    EXACT(matmul, "", "S(2)", "2,3 R", "2,3,n S(2)"),
    EXACT(matmul, "turned", "S(1, 3 segments, unit 2)", "4,3 R", "6n,3 S(0, 3 segments, unit 2)"),
    EXACT(matmul, "", "S(0)", "n,2,3 S(0)", "n,3,2 S(0)"),
    EXACT(matmul, "", "S(1)", "2,n,2,3 S(1)", "n,3,2 S(0)"),
    EXACT(matmul, "", "S(0)", "n,2,3 S(0)", "3,4 R"),
    EXACT(matmul, "", "S(0)", "n,2,3 S(0)", "1,3,4 R"),
    EXACT(matmul, "", "S(0)", "2,3 R", "n,3,4 S(0)"),
    EXACT(matmul, "", "P", "2,n P", "n,3 R"),
    EXACT(matmul, "", "P", "2,3,n P", "n,3 R"),
    EXACT(matmul, "", "P", "2,n R", "n,3 P"),

    /* linear: plain, column-parallel, row-parallel */
    EXACT(linear, "", "R", "2,3 R", "n,3 R", "n R"),
    EXACT(linear, "", "S(0)", "n,3 S(0)", "4,3 R", "4 R"),
    EXACT(linear, "", "S(1)", "2,n,3 S(1)", "4,3 R", "4 R"),
    EXACT(linear, "", "P", "2,3 P", "n,3 R"),
    EXACT(linear, "", "S(1)", "2,3 R", "n,3 S(0)", "n S(0)"),
    EXACT(linear, "", "S(0)", "3 R", "n,3 S(0)", "n S(0)"),
    EXACT(linear, "", "S(2)", "2,4,3 R", "n,3 S(0)"),
    EXACT(linear, "", "S(2, unit 3)", "2,4,3 R", "6n,3 S(0, unit 3)", "6n S(0, unit 3)"),
    EXACT(linear, "", "S(1, 3 segments, unit 2)", "2,3 R", "6n,3 S(0, 3 segments, unit 2)",
          "6n S(0, 3 segments, unit 2)"),
    EXACT(linear, "", "R", "2,n S(1)", "3,n S(1)", "3 R"),
    EXACT(linear, "", "R", "2,n R", "3,n S(1)", "3 R"),
    EXACT(linear, "", "R", "n S(0)", "3,n S(1)", "3 R"),
    EXACT(linear, "", "R", "n R", "3,n S(1)"),
    EXACT(linear, "", "R", "2,3,6n S(2, unit 3)", "4,6n S(1, unit 3)", "4 R"),
    EXACT(linear, "", "R", "2,3,6n R", "4,6n S(1, 3 segments, unit 2)", "4 R"),
    EXACT(linear, "", "R", "2,6n S(1, 3 segments, unit 2)", "4,6n S(1, 3 segments, unit 2)", "4 R"),

    /* embedding, layer norm, attention */
    EXACT(embedding, "", "R", "%5n 2,3 R", "5n,4 R"),
    EXACT(embedding, "", "P", "%5n 2,3 R", "5n,4 S(0)"),
    EXACT(embedding, "", "P", "%n 7 R", "n,4 S(0)"),
    EXACT(embedding, "", "P", "%6n 7 R", "6n,2 S(0, 3 segments, unit 2)"),
    EXACT(embedding, "", "S(2)", "%5 2,3 R", "5,n S(1)"),
    EXACT(embedding, "", "S(0)", "%5 n,3 S(0)", "5,4 R"),
    EXACT(embedding, "", "S(1)", "%5 2,n S(1)", "5,4 R"),
    ROUND(layer_norm, "", "R", "3,5 R", "5 R", "5 R"),
    ROUND(layer_norm, "", "S(0)", "n,5 S(0)", "5 R", "5 R"),
    ROUND(layer_norm, "", "S(0)", "n,5 S(0)"),
    ROUND(layer_norm, "", "S(1)", "3,5n S(1)"),
    ROUND(layer_norm, "bias", "R", "3,5 R", "5 R"),
    ROUND(layer_norm, "bias", "S(1)", "2,n,5 S(1)", "5 R"),
    ROUND(layer_norm, "bias", "S(1)", "3,5n S(1)", "5n S(0)"),
    ROUND(layer_norm, "", "S(1)", "2,n,5 S(1)", "5 R"),
    ROUND(layer_norm, "", "S(1)", "3,5n S(1)", "5n S(0)", "5n S(0)"),
    ROUND(layer_norm, "", "S(0)", "5n S(0)", "5n S(0)"),
    ROUND(layer_norm, "", "S(2, 3 segments, unit 2)", "2,4,6n S(2, 3 segments, unit 2)",
          "6n S(0, 3 segments, unit 2)", "6n S(0, 3 segments, unit 2)"),
    ROUND(layer_norm, "", "S(1)", "0,3n S(1)", "3n S(0)"),
    ROUND(rms_norm, "", "R", "3,5 R", "5 R"),
    ROUND(rms_norm, "", "R", "5 R", "5 R"),
    ROUND(rms_norm, "", "S(0)", "n,5 S(0)"),
    ROUND(rms_norm, "one", "S(1, unit 3)", "2,6n S(1, unit 3)"),
    ROUND(rms_norm, "", "S(0)", "n,5 S(0)", "5 R"),
    ROUND(rms_norm, "", "S(1)", "2,n,5 S(1)", "5 R"),
    ROUND(rms_norm, "", "S(1, 3 segments, unit 2)", "2,6n,5 S(1, 3 segments, unit 2)", "5 R"),
    ROUND(rms_norm, "", "S(1)", "3,n S(1)", "n S(0)"),
    ROUND(rms_norm, "one", "R", "3,n R", "n R"),
    ROUND(rms_norm, "one", "S(1)", "2,n,5 S(1)", "5 R"),
    ROUND(rms_norm, "one", "S(0)", "5n S(0)", "5n S(0)"),
    ROUND(rms_norm, "one", "S(2, unit 3)", "2,4,6n S(2, unit 3)", "6n S(0, unit 3)"),
    ROUND(rms_norm, "", "S(1, 3 segments, unit 2)", "2,6n S(1, 3 segments, unit 2)",
          "6n S(0, 3 segments, unit 2)"),
    ROUND(rope, "", "R", "2,n,4 R"),
    ROUND(rope, "pairs from 3", "R", "n,4 R"),
    ROUND(rope, "", "S(1)", "2,n,4 S(1)"),
    ROUND(rope, "pairs from 5", "S(0)", "n,4 S(0)"),
    ROUND(rope, "dims 4", "S(1, 3 segments, unit 2)", "2,6n,7 S(1, 3 segments, unit 2)"),
    ROUND(rope, "dims 2 pairs", "S(2, unit 3)", "2,2,6n,5 S(2, unit 3)"),
    ROUND(rope, "dims 4", "S(1)", "2,n,3,6 S(1)"),
    ROUND(rope, "", "P", "2,n,4 P"),
    ROUND(rope, "rows", "R", "4,2,n,4 R"),
    ROUND(rope, "rows pairs from 3", "S(0)", "n,3,4 S(0)"),
    ROUND(rope, "rows", "S(1)", "3,n,2,4 S(1)"),
    ROUND(rope, "rows dims 2", "S(2)", "3,2,n,5 S(2)"),
    ROUND(rope, "rows", "P", "3,n,4 P"),
    ROUND(rope, "dims 2 pairs from -4", "P", "2,n,4 P"),
    ROUND(attention, "", "R", "2,n,5,2 R", "2,n,5,2 R", "2,n,5,2 R"),
    ROUND(attention, "causal", "S(1)", "2,n,5,2 S(1)", "2,n,5,2 S(1)", "2,n,5,2 S(1)"),
    ROUND(attention, "", "S(1)", "2,n,3,2 S(1)", "2,n,5,2 S(1)", "2,n,5,2 S(1)"),
    ROUND(attention, "causal", "S(0)", "n,2,5,2 S(0)", "n,2,5,2 S(0)", "n,2,5,2 S(0)"),
    /* grouped queries: q in whole groups, or anywhere where k and v are replicated */
    ROUND(attention, "", "R", "2,6,5,2 R", "2,2,3,2 R", "2,2,3,2 R"),
    ROUND(attention, "causal", "S(0)", "n,6,5,2 S(0)", "n,2,5,2 S(0)", "n,2,5,2 S(0)"),
    ROUND(attention, "causal", "S(1, unit 3)", "2,3n,5,2 S(1, unit 3)", "2,n,5,2 S(1)",
          "2,n,5,2 S(1)"),
    ROUND(attention, "", "S(1, unit 4)", "1,4n,3,2 S(1, unit 4)", "1,2n,5,2 S(1, unit 2)",
          "1,2n,5,2 S(1, unit 2)"),
    ROUND(attention, "", "S(1)", "2,n,5,2 S(1)", "2,n,3,2 R", "2,n,3,2 R"),
    ROUND(attention, "causal", "S(1)", "2,6n,5,2 S(1)", "2,2,5,2 R", "2,2,5,2 R"),
    ROUND(attention, "causal", "S(1)", "1,2n,3,2 S(1)", "1,n,5,2 R", "1,n,5,2 R"),
    ROUND(attention, "", "S(1, unit 2)", "2,6n,3,2 S(1, unit 2)", "2,1,5,2 R", "2,1,5,2 R"),
    ROUND(attention, "dropout", "S(1)", "2,2n,3,2 S(1)", "2,n,5,2 R", "2,n,5,2 R"),

    /* cross-entropy: dense, over a sharded vocabulary, over a sharded batch */
    ROUND(loss, "mean", "R", "4,5n R", "%5n 4 R"),
    ROUND(loss, "mean", "R", "4,n S(1)", "%n 4 R"),
    ROUND(loss, "mean ignore", "R", "9,5n S(1)", "%5n 9 R"),
    ROUND(loss, "sum", "R", "2,3,5n S(2)", "%5n 2,3 R"),
    ROUND(loss, "none ignore", "R", "2,3,6n S(2, unit 3)", "%6n 2,3 R"),
    ROUND(loss, "none", "R", "6,6n S(1, 3 segments, unit 2)", "%6n 6 R"),
    ROUND(loss, "mean", "P", "n,5 S(0)", "%5 n S(0)"),
    ROUND(loss, "mean ignore", "P", "2n,3 S(0)", "%3 2n S(0)"),
    ROUND(loss, "sum", "P", "2,n,5 S(1)", "%5 2,n S(1)"),
    ROUND(loss, "none ignore", "S(1)", "2,n,5 S(1)", "%5 2,n S(1)"),

    /* views: a sharded dimension splits at its units, merges as the outermost factor */
    EXACT(reshape, "3,4n", "R", "2,6n R"),
    EXACT(reshape, "3,4n", "P", "2,6n P"),
    EXACT(reshape, "24n", "S(0, unit 4)", "6n,4 S(0)"),
    EXACT(reshape, "6n,4", "S(0, unit 3)", "2n,3,4 S(0)"),
    EXACT(reshape, "24n", "S(0, unit 12)", "2n,3,4 S(0)"),
    EXACT(reshape, "3,8n", "S(1, unit 4)", "3,2n,4 S(1)"),
    EXACT(reshape, "2,2n,3", "S(1)", "2,6n S(1, unit 3)"),
    EXACT(reshape, "2,2n,2,3", "S(1)", "2,12n S(1, unit 6)"),
    EXACT(reshape, "2,4n,3", "S(1, unit 2)", "2,12n S(1, unit 6)"),
    EXACT(reshape, "2,3,2n", "S(2, unit 2)", "2,6n S(1, 3 segments, unit 2)"),
    EXACT(reshape, "2,3,n,2", "S(2)", "2,6n S(1, 3 segments, unit 2)"),
    EXACT(reshape, "2,6n,2", "S(1, 3 segments, unit 1)", "2,12n S(1, 3 segments, unit 2)"),
    EXACT(reshape, "1,3,2n", "S(2)", "3,2n S(1)"),
    EXACT(reshape, "3,1,2n,1", "S(2)", "3,2n S(1)"),
    EXACT(reshape, "6,5n", "S(1)", "2,3,5n S(2)"),
    EXACT(reshape, "2,3,5n", "S(2)", "6,5n S(1)"),
    EXACT(merge, "2,3,4n", "S(2, unit 4)", "2,n,3,4 S(1)"),
    EXACT(merge, "2,12n", "S(1, unit 12)", "2,3,n,4 S(2)"),
    EXACT(turn, "transpose 0 2", "S(1)", "2,n,3 S(1)"),
    EXACT(turn, "transpose 0 1", "S(0)", "2,n,3 S(1)"),
    EXACT(turn, "transpose -1 0", "P", "2,n P"),
    EXACT(turn, "permute 1,2,0", "S(1)", "2,3,n S(2)"),
    EXACT(turn, "permute 2,0,1", "S(1, 3 segments, unit 2)", "6n,2,3 S(0, 3 segments, unit 2)"),
    EXACT(slice, "1,2,3", "S(0)", "n,6 S(0)"),
    EXACT(slice, "0,1,1", "S(1)", "2,n S(1)"),
    EXACT(slice, "1,1,2", "P", "n,4 P"),
    EXACT(slice, "1,0,6n", "S(1)", "2,6n S(1)"),
    EXACT(slice, "1,2n,2n", "S(1, unit 2)", "2,6n S(1, 3 segments, unit 2)"),
    EXACT(slice, "1,0,4n", "S(1, 2 segments, unit 2)", "2,6n S(1, 3 segments, unit 2)"),
    EXACT(slice, "1,2n,4n", "S(1, 2 segments, unit 2)", "2,6n S(1, 3 segments, unit 2)"),
    EXACT(slice, "0,4n,2n", "S(0)", "7n,2 S(0)[4n:2,2n:1,n:1]"),
    EXACT(slice, "0,4n,3n", "S(0)[2n:1,n:1]", "7n,2 S(0)[4n:2,2n:1,n:1]"),
    EXACT(split, "1", "S(1, unit 2)", "2,6n S(1, 3 segments, unit 2)"),
    EXACT(split, "0", "S(1)", "6,n S(1)"),
    EXACT(concat, "0", "R", "2,n R", "3,n R"),
    EXACT(concat, "0", "P", "2,n P", "3,n P"),
    EXACT(concat, "0", "S(1)", "2,n S(1)", "3,n S(1)", "1,n S(1)"),
    EXACT(concat, "1", "S(1)[2n:1,n:1]", "2,2n S(1)", "2,n S(1)"),
    EXACT(concat, "-1", "S(1)[4n:2,n:1,n:1,3n:3]", "2,4n S(1, unit 2)",
          "2,2n S(1, 2 segments, unit 1)", "2,3n S(1, unit 3)"),
    EXACT(redistribute, "R", "R", "- P"),
    EXACT(redistribute, "P", "P", "- R"),
};

/* Every transition between these, but for sharded to partial, of a (2, 6n, 3) tensor. */
static const char *const transitions[] = {
    "R",
    "P",
    "S(0)",
    "S(1)",
    "S(2)",
    "S(1, unit 2)",
    "S(1, unit 6)",
    "S(1, 3 segments, unit 2)",
    "S(1, 2 segments, unit 1)",
    "S(1)[4n:2,2n:1]",
};

/* These keep R and S: one row of each with each of these layouts of (2, 6n). */
static const char *const unary_layouts[] = {"R", "S(0)", "S(1)", "S(1, 3 segments, unit 2)"};

/* ------------------------------------------------------------- running a table */

enum { ROWS_MAX = 400 };
static const int64_t lengths[] = {1, 2, 3, 5, 7, 8};

static trial all_rows[ROWS_MAX];
static char texts[ROWS_MAX][64];

static trial unary_row(char *text, trial_fn op, const char *arg, const char *shape,
                       const char *layout, const char *out, double tolerance) {
    trial t = {NULL, NULL, {NULL}, NULL, 0, 0, {0}, {0}};
    (void)snprintf(text, sizeof texts[0], "%s %s", shape, layout);
    t.fn = op;
    t.arg = arg;
    t.in[0] = text;
    t.out = out;
    t.tolerance = tolerance;
    return t;
}

/* Fills all_rows; returns how many there are. */
static int make_rows(void) {
    int i, j, n = COUNT(rows);
    memcpy(all_rows, rows, sizeof rows);
    for (i = 0; i < COUNT(unary_ops); i++)
        for (j = 0; j < COUNT(unary_layouts); j++, n++)
            all_rows[n] = unary_row(texts[n], op_unary_positive, unary_ops[i].name, "2,6n",
                                    unary_layouts[j], unary_layouts[j], ROUNDING);
    for (i = 0; i < COUNT(transitions); i++)
        for (j = 0; j < COUNT(transitions); j++)
            if (transitions[i][0] != 'S' || transitions[j][0] != 'P') {
                all_rows[n] = unary_row(texts[n], op_redistribute, transitions[j], "2,6n,3",
                                        transitions[i], transitions[j], 0);
                n++;
            }
    return n;
}

static void every_row_equals_the_dense_result(void **state) {
    (void)state;
    trials_prove(all_rows, make_rows(), lengths, COUNT(lengths));
}

/* -------------------------------------------------------- nothing to compute
 * The rows once more with a size of 0: n, or one of the numbers in their shapes wherever it stands.
 * What one rank takes, every degree takes, with the same values and gradients; memory is full of
 * NaN before it is written. */

enum { EMPTIES_MAX = 2400, EMPTY_TEXT = 64 };

typedef struct empty_row {
    trial row;
    char text[RANKS_INPUTS][EMPTY_TEXT];
    int64_t n;
    int refused;     /* on one rank: there is nothing to compare */
    capture want[2]; /* of both ways */
} empty_row;

typedef struct empty_run {
    empty_row *rows;
    int count, dense;
} empty_run;

/* An allocator whose memory is full of NaN. */
static void *full_of_nan(void *ptr, size_t old_size, size_t new_size, size_t align, void *user) {
    void *block = NULL;
    (void)user;
    if (new_size && posix_memalign(&block, align, new_size)) return NULL;
    if (block) memset(block, 0xFF, new_size);
    if (block && ptr) memcpy(block, ptr, old_size < new_size ? old_size : new_size);
    if (block || !new_size) free(ptr);
    return block;
}

/* Writes `from`, a text of spec_parse, to `to`, with 0 for each size that is `digit`. Returns how
 * many there were. */
static int without(char digit, const char *from, char *to) {
    const char *shape = *from == '%' ? strchr(from, ' ') + 1 : from;
    char *end;
    int count = 0;
    (void)snprintf(to, EMPTY_TEXT, "%s", from);
    to += shape - from;
    end = strchr(to, ' ') ? strchr(to, ' ') : to + strlen(to);
    for (; to < end; to++)
        if (*to == digit && digit != 'n' && (to[1] == ',' || to + 1 == end)) {
            *to = '0';
            count++;
        }
    return count;
}

/* Appends the row with 0 for each size that is `digit`, unless there is none; digit 'n': with
 * n = 0, unless an input has integers below n. Returns the new count. */
static int add_empty(empty_row *all, int count, const trial *row, char digit, int64_t n) {
    empty_row *to = &all[count];
    int i, found = 0;
    to->row = *row;
    to->row.out = NULL; /* of nothing, several layouts are the same */
    to->n = n;
    for (i = 0; i < RANKS_INPUTS && row->in[i]; i++) {
        const char *text = row->in[i], *space = strchr(text, ' ');
        found += digit == 'n' ? strchr(text, 'n') != NULL : 0;
        if (digit == 'n' && *text == '%' && space && space[-1] == 'n') return count;
        found += without(digit, text, to->text[i]);
        to->row.in[i] = to->text[i];
    }
    return found ? count + 1 : count;
}

static int empty_walk(tsh_ctx *ctx, void *user) {
    const empty_run *run = (const empty_run *)user;
    int e, way;
    for (e = 0; e < run->count; e++)
        for (way = 0; way < 2 && !run->rows[e].refused; way++) {
            empty_row *empty = &run->rows[e];
            capture got;
            probe p;
            char name[256];
            memset(&got, 0, sizeof got);
            memset(&p, 0, sizeof p);
            p.ctx = ctx;
            probe_begin(&p, empty->row.arg);
            p.n = empty->n;
            p.dense = run->dense;
            trial_describe(&empty->row, p.n, way, name, sizeof name);
            if (trial_once(ctx, &empty->row, &p, way, &got)) {
                const tsh_result code = tsh_last_error(ctx)->code;
                empty->refused = code == TSH_ERR_SHAPE || code == TSH_ERR_ARGUMENT;
                if (!empty->refused || !run->dense) return 1;
                memset(ranks_failure, 0, sizeof ranks_failure);
                tsh_clear_error(ctx);
                CHECK(tsh_step_end(ctx) == TSH_OK, "%s", name);
                capture_free(&got);
            } else if (run->dense) {
                empty->want[way] = got;
            } else if (capture_compare(ctx, name, &empty->want[way], &got, empty->row.tolerance)) {
                return 1;
            } else {
                capture_free(&got);
            }
        }
    return 0;
}

static void what_is_empty_has_an_empty_gradient(void **state) {
    static empty_row all[EMPTIES_MAX];
    const char *digit;
    tsh_desc desc;
    empty_run run = {all, 0, 1};
    int i, n, refused = 0;
    (void)state;
    memset(&desc, 0, sizeof desc);
    desc.allocator.allocate = full_of_nan;
    for (i = make_rows() - 1; i >= 0; i--) {
        run.count = add_empty(all, run.count, &all_rows[i], 'n', 0);
        for (digit = "23456789"; *digit; digit++)
            for (n = 1; n < 4; n += 2)
                run.count = add_empty(all, run.count, &all_rows[i], *digit, n);
        assert_true(run.count < EMPTIES_MAX - 32);
    }
    ranks_run_with(1, &desc, empty_walk, &run);
    run.dense = 0;
    ranks_run_with(2, &desc, empty_walk, &run);
    ranks_run_with(3, &desc, empty_walk, &run);
    for (i = 0; i < run.count; i++) {
        refused += all[i].refused;
        capture_free(&all[i].want[0]);
        capture_free(&all[i].want[1]);
    }
    assert_true(refused < run.count / 10); /* such as a maximum of nothing */
}

/* ------------------------------------------------------------- what is refused */

static tsh_tensor *op_backward(probe *p) {
    (void)tsh_backward(p->ctx, tsh_neg(p->in[0]));
    return NULL;
}

static tsh_tensor *op_item(probe *p) {
    (void)tsh_item(p->ctx, p->in[0]);
    return NULL;
}

static tsh_tensor *op_write(probe *p) {
    (void)ranks_set(p->ctx, p->in[0], 1);
    return NULL;
}

static tsh_tensor *op_broadcast(probe *p) {
    (void)tsh_broadcast_batch(p->in[0]);
    return NULL;
}

/* A row-parallel layer whose plan declares its input's layout. */
static tsh_tensor *op_declared(probe *p) {
    tsh_layout declared = spec_layout(probe_arg(p), p->n);
    const tsh_plan_rule rule = {.path = "row", .style = TSH_ROWWISE, .input = &declared};
    const tsh_linear_desc desc = {.in = tsh_size(p->in[0], -1), .out = 4};
    tsh_module *row = tsh_add_linear(tsh_root(p->ctx), "row", &desc);
    tsh_parallelize(tsh_root(p->ctx), &rule, 1);
    return tsh_forward(row, p->in[0]);
}

typedef struct refusal {
    trial_fn op;
    const char *arg, *in[3];
    tsh_result code;
    const char *sentence[4]; /* what it must hold: the op, the layouts, the way out */
} refusal;

#define COMPLETE "tsh_redistribute(x, tsh_replicated())"
#define ALIKE    "tsh_redistribute(b, tsh_layout_of(a))"

/* clang-format off */
#define IN(...) {__VA_ARGS__}
#define REFUSE(op, arg, in, ...) {op_##op, arg, in, TSH_ERR_LAYOUT, {__VA_ARGS__}}
/* clang-format on */

static const refusal refusals[] = {
    /* a replicated bias added to a partial sum: once per rank */
    REFUSE(binary, "+", IN("2,4 P", "4 R"), "tsh_add", "(2, 4) P", "(4) R", COMPLETE),
    REFUSE(binary, "-", IN("4 R", "2,4 P"), "tsh_sub", "(2, 4) P", "(4) R", COMPLETE),
    REFUSE(linear, "", IN("2,3 P", "4,3 R", "4 R"), "tsh_linear", "(2, 3) P", "once per rank",
           COMPLETE),
    /* two operands with different layouts */
    REFUSE(binary, "+", IN("4,4 S(0)", "4,4 S(1)"), "tsh_add", "(4, 4) S(0)", "(4, 4) S(1)", ALIKE),
    REFUSE(binary, "*", IN("2,4 S(1)", "2,4 R"), "tsh_mul", "(2, 4) S(1)", "(2, 4) R", ALIKE),
    REFUSE(binary, "/", IN("4 R", "2,4 S(1)"), "tsh_div", "(2, 4) S(1)", "(4) R", ALIKE),
    REFUSE(binary, "+", IN("4,3 S(0)", "3 S(0)"), "tsh_add", "(4, 3) S(0)", "(3) S(0)", ALIKE),
    REFUSE(binary, "+", IN("2,6 S(1, 3 segments, unit 1)", "2,6 S(1)"), "tsh_add",
           "S(1, 3 segments)", "(2, 6) S(1)", ALIKE),
    REFUSE(binary, "=", IN("4 S(0)", "4 R"), "tsh_eq", "(4) S(0)", "(4) R", ALIKE),
    REFUSE(binary, "+", IN("4 S(0)", "4 P"), "tsh_add", "(4) S(0)", "(4) P", COMPLETE),
    REFUSE(binary, "*", IN("4 P", "4 S(0)"), "tsh_mul", "(4) S(0)", "(4) P", COMPLETE),
    /* products of partial sums, and what is not linear in one */
    REFUSE(binary, "*", IN("4 P", "2,4 P"), "tsh_mul", "(4) P", "(2, 4) P", COMPLETE),
    REFUSE(binary, "/", IN("4 P", "4 P"), "tsh_div", "(4) P", COMPLETE),
    REFUSE(binary, "/", IN("4 R", "4 P"), "tsh_div", "(4) P", "(4) R", COMPLETE),
    REFUSE(binary, "p", IN("4 P", "4 R"), "tsh_pow", "(4) P", COMPLETE),
    REFUSE(binary, "<", IN("4 P", "4 P"), "tsh_lt", "(4) P", COMPLETE),
    REFUSE(where, "", IN("%2 4 R", "4 P", "4 R"), "tsh_where", "(4) P", COMPLETE),
    REFUSE(where, "", IN("%2 4 S(0)", "4 P", "4 P"), "tsh_where", "(4) S(0)", COMPLETE),
    REFUSE(cast, "", IN("4 P"), "tsh_cast", "partial sum", COMPLETE),
    REFUSE(reduce, "max 1", IN("2,4 P"), "tsh_max", "(2, 4) P", COMPLETE),
    REFUSE(reduce, "argmax all", IN("2,4 P"), "tsh_argmax", "(2, 4) P", COMPLETE),
    REFUSE(reduce, "softmax 1", IN("2,4 P"), "tsh_softmax", "(2, 4) P", COMPLETE),
    /* what needs all values along a dimension that is sharded */
    REFUSE(reduce, "max 1", IN("2,4 S(1)"), "tsh_max", "(2, 4) S(1)", COMPLETE),
    REFUSE(reduce, "max all", IN("2,4 S(1)"), "tsh_max", "(2, 4) S(1)", COMPLETE),
    REFUSE(reduce, "argmax all", IN("2,4 S(1)"), "tsh_argmax", "(2, 4) S(1)", COMPLETE),
    REFUSE(reduce, "softmax -1", IN("2,4 S(1)"), "tsh_softmax", "(2, 4) S(1)", COMPLETE),
    REFUSE(reduce, "log_softmax 0", IN("2,4 S(0)"), "tsh_log_softmax", "(2, 4) S(0)", COMPLETE),
    REFUSE(layer_norm, "", IN("2,4 S(1)", "4 R", "4 R"), "tsh_layer_norm",
           "sharded along its last dimension", "of 4 features", COMPLETE),
    REFUSE(layer_norm, "", IN("2,4 P", "4 R"), "tsh_layer_norm", "partial sum", COMPLETE),
    REFUSE(layer_norm, "", IN("2,4 R", "4 S(0)"), "tsh_layer_norm", "(4) S(0)",
           "must be replicated", "tsh_redistribute(w, tsh_replicated())"),
    REFUSE(layer_norm, "bias", IN("2,4 R", "4 S(0)"), "tsh_layer_norm", "(4) S(0)",
           "must be replicated"),
    REFUSE(layer_norm, "bias", IN("2,4 S(1)", "4 R"), "tsh_layer_norm", "of 4 features", COMPLETE),
    /* matrix products */
    REFUSE(matmul, "", IN("2,4 S(1)", "4,3 R"), "tsh_matmul", "(2, 4) S(1)", "(4, 3) R", COMPLETE),
    REFUSE(matmul, "", IN("2,4 R", "4,3 S(0)"), "tsh_matmul", "(2, 4) R", "(4, 3) S(0)", COMPLETE),
    REFUSE(matmul, "", IN("4,4 S(0)", "4,4 S(1)"), "tsh_matmul", "(4, 4) S(0)", "(4, 4) S(1)",
           COMPLETE),
    REFUSE(matmul, "", IN("4,4 P", "4,4 P"), "tsh_matmul", "(4, 4) P", COMPLETE),
    REFUSE(matmul, "", IN("4,4 P", "4,4 S(1)"), "tsh_matmul", "(4, 4) P", "(4, 4) S(1)", COMPLETE),
    REFUSE(matmul, "", IN("2,6 S(1, unit 3)", "6,2 S(0, 3 segments, unit 1)"), "tsh_matmul",
           "S(1, unit 3)", "S(0, 3 segments)", COMPLETE),
    REFUSE(matmul, "", IN("4,2,3 S(0)", "4,3,2 R"), "tsh_matmul", "(4, 2, 3) S(0)", "(4, 3, 2) R",
           COMPLETE),
    REFUSE(linear, "", IN("2,4 S(1)", "3,4 R"), "tsh_linear", "(2, 4) S(1)", "(3, 4) R", COMPLETE),
    REFUSE(linear, "", IN("2,4 S(1)", "3,4 S(0)"), "tsh_linear", "(2, 4) S(1)", "(3, 4) S(0)",
           COMPLETE),
    REFUSE(linear, "", IN("2,4 P", "3,4 S(0)"), "tsh_linear", "(2, 4) P", "(3, 4) S(0)", COMPLETE),
    REFUSE(linear, "", IN("2,4 P", "3,4 S(1)"), "tsh_linear", "(2, 4) P", "(3, 4) S(1)", COMPLETE),
    REFUSE(linear, "", IN("2,4 S(0)", "3,4 S(1)"), "tsh_linear", "(2, 4) S(0)", "(3, 4) S(1)",
           COMPLETE),
    REFUSE(linear, "", IN("2,6 S(1, unit 3)", "3,6 S(1, 3 segments, unit 1)"), "tsh_linear",
           "S(1, unit 3)", "S(1, 3 segments)", COMPLETE),
    REFUSE(linear, "", IN("2,4 R", "3,4 P"), "tsh_linear", "(2, 4) R", "(3, 4) P",
           "tsh_redistribute(w, tsh_replicated())"),
    REFUSE(linear, "", IN("2,4 R", "3,4 S(0)", "3 R"), "tsh_linear", "(3, 4) S(0)", "(3) R",
           "sharded like its dimension 0"),
    REFUSE(linear, "", IN("2,4 R", "3,4 S(1)", "3 S(0)"), "tsh_linear", "(3, 4) S(1)", "(3) S(0)",
           "any other is replicated"),
    REFUSE(declared, "S(-1)", IN("2,6 R"), "row: ", "(2, 6) R", "declared, S(-1)",
           "tsh_redistribute(x, "),
    REFUSE(declared, "S(-1, unit 3)", IN("2,6 S(0)"), "row: ", "(2, 6) S(0)",
           "declared, S(-1, unit 3)", "tsh_redistribute(x, "),
    REFUSE(declared, "R", IN("2,6 S(1)"), "row: ", "(2, 6) S(1)", "declared, R",
           "tsh_redistribute(x, "),
    REFUSE(embedding, "", IN("%4 4 S(0)", "4,2 S(0)"), "tsh_embedding", "(4) S(0)", "(4, 2) S(0)",
           "tsh_redistribute(ids, tsh_replicated())"),
    REFUSE(embedding, "", IN("%4 4 R", "4,2 P"), "tsh_embedding", "(4) R", "(4, 2) P"),
    /* attention and the loss */
    REFUSE(rms_norm, "", IN("2,4 S(1)", "4 R"), "tsh_rms_norm", "sharded along its last dimension",
           "of 4 features", COMPLETE),
    REFUSE(rms_norm, "", IN("2,4 P", "4 R"), "tsh_rms_norm", "partial sum", COMPLETE),
    REFUSE(rms_norm, "", IN("2,4 R", "4 S(0)"), "tsh_rms_norm", "(4) S(0)", "must be replicated"),
    REFUSE(layer_norm, "", IN("2,6 S(1)", "6 S(0)", "6 R"), "tsh_layer_norm",
           "weight or bias not like it", COMPLETE, "by the same units"),
    REFUSE(rope, "", IN("2,4 S(1)"), "tsh_rope", "(2, 4) S(1)", "last dimension", COMPLETE),
    REFUSE(attention, "", IN("4,4,3,2 S(0)", "4,4,3,2 R", "4,4,3,2 R"), "tsh_attention",
           "q (4, 4, 3, 2) S(0)", "k (4, 4, 3, 2) R", "tsh_redistribute(k, "),
    REFUSE(attention, "", IN("1,4,3,2 R", "1,4,3,2 S(1)", "1,4,3,2 S(1)"), "tsh_attention",
           "q (1, 4, 3, 2) R", "k (1, 4, 3, 2) S(1)", "tsh_redistribute(k, "),
    REFUSE(attention, "", IN("1,4,3,2 S(1)", "1,4,3,2 S(1)", "1,4,3,2 R"), "tsh_attention",
           "v (1, 4, 3, 2) R", "tsh_redistribute(k, "),
    REFUSE(
        attention, "",
        IN("1,4,3,2 S(1)", "1,2,3,2 S(1, 2 segments, unit 1)", "1,2,3,2 S(1, 2 segments, unit 1)"),
        "tsh_attention", "k (1, 2, 3, 2) S(1, 2 segments)", "whole groups",
        "tsh_redistribute(q, tsh_shard_units(1, 2))"),
    REFUSE(attention, "", IN("1,4,4,2 S(2)", "1,4,4,2 S(2)", "1,4,4,2 S(2)"), "tsh_attention",
           "(1, 4, 4, 2) S(2)", "by batch or by heads", "tsh_redistribute("),
    REFUSE(attention, "", IN("1,4,3,2 P", "1,4,3,2 P", "1,4,3,2 P"), "tsh_attention",
           "(1, 4, 3, 2) P", "tsh_redistribute("),
    REFUSE(loss, "mean", IN("2,4 P", "%4 2 R"), "tsh_cross_entropy", "(2, 4) P", "partial sum",
           "tsh_redistribute(logits, tsh_replicated())"),
    REFUSE(loss, "mean", IN("2,4 S(0)", "%4 2 R"), "tsh_cross_entropy", "(2, 4) S(0)", "(2) R",
           "sharded as the logits' rows"),
    REFUSE(loss, "mean", IN("2,4 S(1)", "%4 2 S(0)"), "tsh_cross_entropy", "(2, 4) S(1)",
           "(2) S(0)", "the target is to be replicated: tsh_redistribute(target, "),
    REFUSE(backward, "", IN("- P"), "tsh_backward", "partial sum",
           "tsh_redistribute(loss, tsh_replicated())"),
    REFUSE(backward, "", IN("1 S(0)"), "tsh_backward", "sharded",
           "tsh_redistribute(loss, tsh_replicated())"),
    /* moving and viewing */
    REFUSE(redistribute, "P", IN("4 S(0)"), "tsh_redistribute", "(4) S(0)", "become P"),
    REFUSE(redistribute, "S(1)", IN("4 R"), "tsh_redistribute", "(4) R", "become S(1)"),
    REFUSE(redistribute, "S(0, unit 3)", IN("4 R"), "tsh_redistribute", "(4) R",
           "become S(0, unit 3)"),
    REFUSE(redistribute, "S(0, 3 segments, unit 1)", IN("4 P"), "tsh_redistribute", "(4) P",
           "become S(0, 3 segments)"),
    REFUSE(reshape, "2,2,3", IN("2,6 S(1)"), "tsh_reshape", "(2, 6) S(1)", COMPLETE),
    REFUSE(reshape, "12", IN("2,6 S(1)"), "tsh_reshape", "(2, 6) S(1)", COMPLETE),
    REFUSE(reshape, "2,3,4", IN("2,12 S(1, unit 6)"), "tsh_reshape", "(2, 12) S(1, unit 6)",
           "units of 6", COMPLETE),
    REFUSE(slice, "0,1,2", IN("4 S(0)"), "tsh_slice", "(4) S(0)", "[1, 3)", COMPLETE),
    REFUSE(slice, "1,2,3", IN("2,6 S(1, 3 segments, unit 1)"), "tsh_slice",
           "(2, 6) S(1, 3 segments)", "segment boundaries", COMPLETE),
    REFUSE(split, "1", IN("2,6 S(1)"), "tsh_slice", "(2, 6) S(1)", COMPLETE),
    REFUSE(concat, "0", IN("2,4 S(1)", "2,4 R"), "tsh_concat", "(2, 4) S(1)", "(2, 4) R",
           "tsh_redistribute"),
    REFUSE(concat, "0", IN("2,6 S(1)", "2,6 S(1, 3 segments, unit 1)"), "tsh_concat", "(2, 6) S(1)",
           "S(1, 3 segments)", "tsh_redistribute"),
    REFUSE(concat, "0", IN("6 S(0, 3 segments, unit 1)", "6 S(0, 3 segments, unit 1)"),
           "tsh_concat", "(6) S(0, 3 segments)", "at most 4 segments", "tsh_redistribute"),
    /* values in and out */
    REFUSE(item, "", IN("1 P"), "tsh_item", "tsh_redistribute("),
    REFUSE(item, "", IN("1 S(0)"), "tsh_item", "tsh_redistribute("),
    REFUSE(write, "", IN("4 P"), "tsh_write", "partial sum"),
    REFUSE(broadcast, "", IN("4 S(0)"), "tsh_broadcast_batch", "(4) S(0)", "replicated"),
};

static int refuse(tsh_ctx *ctx, void *user) {
    const refusal *r = (const refusal *)user;
    const tsh_error *error = tsh_last_error(ctx);
    probe p = {0};
    int i;
    (void)tsh_barrier(tsh_world(ctx)); /* all ranks are open before one fails */
    p.ctx = ctx;
    probe_begin(&p, r->arg);
    p.n = 1;
    for (i = 0; i < 3 && r->in[i]; i++) {
        spec s = spec_parse(r->in[i], 1);
        p.in[i] = spec_tensor(ctx, &s, 10 + (uint64_t)i);
        CHECK(p.in[i], "input %d", i);
        if (!s.below) tsh_requires_grad(p.in[i], 1);
    }
    CHECK(!r->op(&p), "a result where an error was due: %s %s", r->sentence[0], r->in[0]);
    CHECK(!probe_unread(&p), "nothing reads \"%s\": %s", probe_unread(&p), r->sentence[0]);
    CHECK(error->code == r->code, "want %s: %s %s", tsh_result_name(r->code), r->sentence[0],
          r->in[0]);
    for (i = 0; i < 4 && r->sentence[i]; i++)
        CHECK(strstr(error->message, r->sentence[i]), "the sentence lacks \"%s\"", r->sentence[i]);
    (void)tsh_barrier(tsh_world(ctx)); /* told to the peers when all have seen it themselves */
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
        cmocka_unit_test(every_row_equals_the_dense_result),
        cmocka_unit_test(what_is_empty_has_an_empty_gradient),
        cmocka_unit_test(every_refusal_has_its_sentence),
        cmocka_unit_test(no_nonlinear_op_takes_a_partial_sum),
        cmocka_unit_test(a_refusal_can_be_cleared),
    };
    return cmocka_run_group_tests_name("op/layouts", tests, NULL, NULL);
}
