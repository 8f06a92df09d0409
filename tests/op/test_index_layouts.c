/* Ops on shapes and indices: in every layout they take, at every degree, equal to the dense result;
 * gradients against central differences; 16-bit dtypes; threads; what is empty; refusals. */
/* build: double */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"

/* ---------------------------------------------------------- the ops, by text */

/* "stack at 0", "squeeze at 1": an op and a dimension */
static tsh_tensor *op_dim(probe *p) {
    if (probe_has(p, "stack")) return tsh_stack(p->in, 2, (int)probe_number(p, "at"));
    if (probe_has(p, "squeeze")) return tsh_squeeze(p->in[0], (int)probe_number(p, "at"));
    if (probe_has(p, "all")) return tsh_squeeze(p->in[0], TSH_ALL);
    if (probe_has(p, "unsqueeze")) return tsh_unsqueeze(p->in[0], (int)probe_number(p, "at"));
    if (probe_has(p, "flip")) return tsh_flip(p->in[0], (int)probe_number(p, "at"));
    if (probe_has(p, "roll")) return tsh_roll(p->in[0], 2, (int)probe_number(p, "at"));
    if (probe_has(p, "repeat"))
        return tsh_repeat_interleave(p->in[0], 3, (int)probe_number(p, "at"));
    if (probe_has(p, "step"))
        return tsh_slice_step(p->in[0], (int)probe_number(p, "at"), 1, INT64_MAX, 2);
    return probe_has(p, "second") ? tsh_slice_step(p->in[0], (int)probe_number(p, "at"),
                                                   tsh_size(p->in[0], 0) / 2, INT64_MAX, 1)
                                  : NULL;
}

/* To (2, 4, the last size). */
static tsh_tensor *op_expand(probe *p) {
    return tsh_expand(p->in[0], tsh_shape3(2, 4, -1));
}

static tsh_tensor *op_tile(probe *p) {
    const int64_t repeats[2] = {probe_number(p, "rows"), probe_number(p, "columns")};
    return tsh_tile(p->in[0], repeats, 2);
}

/* "reflect", "value 2": pads dimension -2, or, with "last", the last one. */
static tsh_tensor *op_pad(probe *p) {
    const int64_t rows[4] = {0, 0, 1, 2}, columns[2] = {1, 2};
    const int last = probe_has(p, "last");
    const tsh_pad_mode mode = probe_has(p, "reflect")     ? TSH_PAD_REFLECT
                              : probe_has(p, "circular")  ? TSH_PAD_CIRCULAR
                              : probe_has(p, "replicate") ? TSH_PAD_REPLICATE
                                                          : TSH_PAD_CONSTANT;
    const double value = (double)probe_number(p, "value");
    return tsh_pad(p->in[0], last ? columns : rows, last ? 1 : 2, mode, value);
}

static tsh_tensor *op_triangle(probe *p) {
    const int64_t diagonal = probe_number(p, "from");
    return probe_has(p, "lower")   ? tsh_tril(p->in[0], diagonal)
           : probe_has(p, "upper") ? tsh_triu(p->in[0], diagonal)
                                   : NULL;
}

static tsh_tensor *op_one_hot(probe *p) {
    return tsh_one_hot(p->in[0], probe_number(p, "classes"));
}

static tsh_tensor *op_gather(probe *p) {
    return tsh_gather(p->in[0], (int)probe_number(p, "at"), p->in[1]);
}

static tsh_tensor *op_scatter(probe *p) {
    return tsh_scatter_add(p->in[0], (int)probe_number(p, "at"), p->in[1], p->in[2]);
}

static tsh_tensor *op_select(probe *p) {
    return tsh_index_select(p->in[0], (int)probe_number(p, "at"), p->in[1]);
}

static tsh_tensor *op_topk(probe *p) {
    tsh_tensor *indices;
    return tsh_topk(p->in[0], probe_number(p, "k"), (int)probe_number(p, "at"),
                    probe_has(p, "largest"), &indices);
}

static tsh_tensor *op_sort(probe *p) {
    const int dim = (int)probe_number(p, "at"), down = probe_has(p, "down");
    return probe_has(p, "indices") ? tsh_argsort(p->in[0], dim, down)
                                   : tsh_sort(p->in[0], dim, down, NULL);
}

static tsh_tensor *op_einsum(probe *p) {
    return tsh_einsum(probe_arg(p), p->in[0], p->in[1]);
}

/* ---------------------------------------------------------- layouts */

/* Values and cotangents are small integers, so sums are exact. */
#define EXACT(op, arg, out, ...)  TRIAL(op_##op, arg, out, 0, 0, __VA_ARGS__)
#define VALUES(op, arg, out, ...) TRIAL(op_##op, arg, out, 0, TRIAL_VALUES, __VA_ARGS__)

static const trial rows[] = {
    EXACT(dim, "stack at 0", "R", "3,n R", "3,n R"),
    EXACT(dim, "stack at 0", "S(2)", "3,n S(1)", "3,n S(1)"),
    EXACT(dim, "stack at 2", "S(1)", "3,n S(1)", "3,n S(1)"),
    EXACT(dim, "stack at -2", "P", "3,n P", "3,n P"),
    EXACT(dim, "squeeze at 1", "S(1)", "3,1,2n S(2)"),
    EXACT(dim, "squeeze at -2", "P", "3,1,2n P"),
    EXACT(dim, "squeeze at 0", "S(0)", "3n,1,2 S(0)"),
    EXACT(dim, "all", "S(1)", "3,1,2n,1 S(2)"),
    EXACT(dim, "unsqueeze at 0", "S(2)", "3,2n S(1)"),
    EXACT(dim, "unsqueeze at -1", "S(1)", "3,2n S(1)"),
    EXACT(dim, "unsqueeze at 1", "P", "3,2n P"),
    EXACT(dim, "flip at 0", "R", "3,n R"),
    EXACT(dim, "flip at 0", "S(1)", "3,n S(1)"),
    EXACT(dim, "flip at -1", "S(0)", "3n,4 S(0)"),
    EXACT(dim, "flip at 1", "P", "3,n P"),
    EXACT(dim, "roll at 0", "S(1)", "5,n S(1)"),
    EXACT(dim, "roll at -1", "S(0)", "n,3 S(0)"),
    EXACT(dim, "roll at 0", "P", "5,n P"),
    EXACT(dim, "repeat at 0", "S(1)", "2,n S(1)"),
    EXACT(dim, "repeat at 1", "S(1, unit 3)", "2,n S(1)"),
    EXACT(dim, "repeat at 1", "P", "2,n P"),
    EXACT(dim, "step at 0", "S(1)", "5,n S(1)"),
    EXACT(dim, "step at -1", "S(0)", "n,6 S(0)"),
    EXACT(dim, "step at 0", "P", "5,n P"),
    EXACT(dim, "second at 0", NULL, "6n,2 S(0, 2 segments, unit 1)"),
    EXACT(expand, "", "R", "1,n R"),
    EXACT(expand, "", "S(2)", "1,n S(1)"),
    EXACT(expand, "", "P", "4,n P"),
    EXACT(tile, "rows 3 columns 1", "S(1)", "2,n S(1)"),
    EXACT(tile, "rows 2 columns 3", "P", "2,n P"),
    EXACT(tile, "rows 1 columns 2", "S(0)", "2n,3 S(0)"),
    EXACT(pad, "reflect", "S(1)", "4,n S(1)"),
    EXACT(pad, "circular", "S(1)", "4,n S(1)"),
    EXACT(pad, "replicate", "S(1)", "4,n S(1)"),
    EXACT(pad, "value 2", "S(1)", "4,n S(1)"),
    EXACT(pad, "value 2", "R", "4,n R"),
    EXACT(pad, "last value 3", "S(0)", "n,3 S(0)"),
    EXACT(pad, "last reflect", "S(0)", "n,2,4 S(0)"),
    EXACT(pad, "reflect", "P", "4,n P"),
    EXACT(pad, "value 0", "P", "4,n P"),
    EXACT(triangle, "lower", "R", "4,n R"),
    EXACT(triangle, "lower from 1", "S(1)", "4,3n S(1)"),
    EXACT(triangle, "upper from -1", "S(1)", "4,3n S(1)"),
    EXACT(triangle, "lower", "S(0)", "3n,4 S(0)"),
    EXACT(triangle, "upper from 2", "S(0)", "3n,4 S(0)"),
    EXACT(triangle, "upper", NULL, "2,5,4n S(2, 2 segments, unit 2)"),
    EXACT(triangle, "lower from -1", NULL, "2,4n,3 S(1, 2 segments, unit 1)"),
    EXACT(triangle, "lower", "S(0)", "n,3,3 S(0)"),
    EXACT(triangle, "upper from 1", "P", "3,4,n P"),
    VALUES(one_hot, "classes 5", "R", "%5 2,n R"),
    VALUES(one_hot, "classes 5", "S(1)", "%5 2,n S(1)"),
    EXACT(gather, "at 0", "R", "5,n R", "%5 7,n R"),
    EXACT(gather, "at 0", "S(1)", "5,n S(1)", "%5 7,n S(1)"),
    EXACT(gather, "at -1", "S(0)", "n,4 S(0)", "%4 n,6 S(0)"),
    EXACT(gather, "at 1", "S(2)", "2,4,3n S(2)", "%4 2,5,3n S(2)"),
    EXACT(gather, "at 1", "S(2)", "3,4,3n S(2)", "%4 2,5,3n S(2)"),
    EXACT(gather, "at 0", "S(0)", "5,4 R", "%5 n,4 S(0)"),
    EXACT(gather, "at 1", "S(1)", "5,4 R", "%4 3,2n S(1)"),
    EXACT(gather, "at 0", "P", "5,3 P", "%5 n,3 R"),
    EXACT(scatter, "at 0", "R", "5,n R", "%5 7,n R", "7,n R"),
    EXACT(scatter, "at 0", "S(1)", "5,n S(1)", "%5 7,n S(1)", "7,n S(1)"),
    EXACT(scatter, "at -1", "S(0)", "n,4 S(0)", "%4 n,6 S(0)", "n,7 S(0)"),
    EXACT(scatter, "at 1", "P", "5,3 P", "%3 4,n R", "5,n P"),
    EXACT(select, "at 0", "R", "5,n R", "%5 4 R"),
    EXACT(select, "at 0", "S(1)", "5,n S(1)", "%5 4 R"),
    EXACT(select, "at -1", "S(0)", "n,5 S(0)", "%5 7 R"),
    EXACT(select, "at 0", "P", "3n,4 S(0)", "%3n 6 R"),
    EXACT(select, "at 1", "P", "4,3n S(1)", "%3n 6 R"),
    EXACT(select, "at 0", "S(0)", "5,4 R", "%5 n S(0)"),
    EXACT(select, "at 1", "S(1)", "4,5,2 R", "%5 2n S(0)"),
    EXACT(select, "at 1", "P", "4,5 P", "%5 n R"),
    EXACT(topk, "k 3 at 0 largest", "R", "5,n R"),
    EXACT(topk, "k 3 at 0 largest", "S(1)", "5,n S(1)"),
    EXACT(topk, "k 4 at -1", "S(0)", "n,7 S(0)"),
    EXACT(sort, "at 0 down", "S(1)", "6,n S(1)"),
    EXACT(sort, "at -1", "S(0)", "n,6 S(0)"),
    VALUES(sort, "indices at 0", "S(1)", "6,n S(1)"),
    EXACT(einsum, "ij,jk->ik", "S(0)", "3n,4 S(0)", "4,5 R"),
    EXACT(einsum, "ij,jk->ik", "S(1)", "3,4 R", "4,2n S(1)"),
    EXACT(einsum, "ij,jk->ki", "S(1)", "3n,4 S(0)", "4,5 R"),
    EXACT(einsum, "ij,jk->ik", "P", "3,2n S(1)", "2n,5 S(0)"),
    EXACT(einsum, "ij,jk->ik", "P", "3,n P", "n,5 R"),
    EXACT(einsum, "ij,jk->ik", "P", "3,n R", "n,5 P"),
    EXACT(einsum, "bij,bjk->kbi", "S(1)", "n,2,3 S(0)", "n,3,2 S(0)"),
    EXACT(einsum, "bij,bjk->bik", "S(2)", "2,2,3 R", "2,3,2n S(2)"),
    EXACT(einsum, "...ij,jk->...ik", "S(0)", "n,2,3 S(0)", "3,2 R"),
    EXACT(einsum, "aijb,jcib->abc", "P", "3,2,n,2 S(2)", "n,2,2,2 S(0)"),
    EXACT(einsum, "aijb,jcib->abc", "S(2)", "3,2,2,2 R", "2,3n,2,2 S(1)"),
    EXACT(einsum, "aib,bc->iac", "S(0)", "2,n,3 S(1)", "3,4 R"),
    EXACT(einsum, "bqhd,bkhd->bhqk", "S(1)", "2,3,n,2 S(2)", "2,2,n,2 S(2)"),
    EXACT(einsum, "abcdei,abcdei->abcd", "S(1)", "2,n,1,2,2,2 S(1)", "2,n,1,2,2,2 S(1)"),
    EXACT(einsum, "abcdex,abcdef->abcdf", "S(1)", "2,n,1,2,2,1 S(1)", "2,n,1,2,2,2 S(1)"),
    EXACT(einsum, "ij,ij->ji", "S(1)", "n,3 S(0)", "n,3 S(0)"),
    EXACT(einsum, "ij,j->ji", "S(1)", "n,3 S(0)", "3 R"),
    EXACT(einsum, "i,j->ij", "S(1)", "3 R", "2n S(0)"),
    EXACT(einsum, "bi,bi->b", "S(0)", "n,3 S(0)", "n,3 S(0)"),
    EXACT(einsum, "bi,bi->b", "P", "3,n S(1)", "3,n S(1)"),
    EXACT(einsum, "i,i->", "P", "3n S(0)", "3n S(0)"),
    EXACT(einsum, "ijx,jk->ik", "P", "2,3,n S(2)", "3,2 R"),
    EXACT(einsum, "ij->ji", "S(1)", "n,3 S(0)"),
    EXACT(einsum, "ij->j", "P", "n,3 S(0)"),
    EXACT(einsum, "ij->", "P", "n,3 S(0)"),
    EXACT(einsum, "iij->j", "S(0)", "3,3,n S(2)"),
    EXACT(einsum, "iij->ij", "P", "3,3,n P"),
};

static void every_row_equals_the_dense_result(void **state) {
    static const int64_t lengths[] = {1, 3, 4};
    (void)state;
    trials_prove(rows, COUNT(rows), lengths, COUNT(lengths));
}

/* ---------------------------------------------------------- refusals */

typedef struct refusal {
    trial_fn op;
    const char *arg, *in[3];
    tsh_result code;
    const char *sentence[3];
} refusal;

#define IN(...)                                                                                    \
    { __VA_ARGS__ }
#define REFUSE(op, arg, in, code, ...)                                                             \
    {                                                                                              \
        op_##op, arg, in, code, {                                                                  \
            __VA_ARGS__                                                                            \
        }                                                                                          \
    }
#define COMPLETE "tsh_redistribute(x, tsh_replicated())"

static const refusal refusals[] = {
    REFUSE(dim, "stack at 3", IN("3,2 R", "3,2 R"), TSH_ERR_SHAPE, "tsh_stack: no place 3"),
    REFUSE(dim, "stack at 0", IN("3,2 R", "3,4 R"), TSH_ERR_SHAPE, "tsh_stack: part 1", "(3, 4)"),
    REFUSE(dim, "stack at 0", IN("3,2 R", "3,2 S(0)"), TSH_ERR_LAYOUT, "tsh_stack: part 1", "S(0)"),
    REFUSE(dim, "squeeze at 2", IN("3,1 R"), TSH_ERR_SHAPE, "tsh_squeeze", "dimension 2"),
    REFUSE(dim, "squeeze at 1", IN("3,1 S(1)"), TSH_ERR_LAYOUT, "tsh_squeeze", COMPLETE),
    REFUSE(dim, "unsqueeze at 3", IN("3,1 R"), TSH_ERR_SHAPE, "tsh_unsqueeze", "no place 3"),
    REFUSE(dim, "flip at 0", IN("4,2 S(0)"), TSH_ERR_LAYOUT, "tsh_flip", COMPLETE),
    REFUSE(dim, "flip at 2", IN("4,2 R"), TSH_ERR_SHAPE, "tsh_flip", "dimension 2"),
    REFUSE(dim, "roll at 0", IN("4,2 S(0)"), TSH_ERR_LAYOUT, "tsh_roll", COMPLETE),
    REFUSE(dim, "step at 0", IN("4,2 S(0)"), TSH_ERR_LAYOUT, "tsh_slice_step", "[1:4:2]", COMPLETE),
    REFUSE(dim, "step at 2", IN("4,2 R"), TSH_ERR_SHAPE, "tsh_slice_step", "dimension 2"),
    REFUSE(dim, "repeat at 2", IN("4,2 R"), TSH_ERR_SHAPE, "tsh_repeat_interleave"),
    REFUSE(expand, "", IN("3,2 R"), TSH_ERR_SHAPE, "tsh_expand", "(2, 4, -1)"),
    REFUSE(expand, "", IN("1,2 S(0)"), TSH_ERR_LAYOUT, "tsh_expand", COMPLETE),
    REFUSE(tile, "rows 2 columns 1", IN("4,2 S(0)"), TSH_ERR_LAYOUT, "tsh_tile", COMPLETE),
    REFUSE(tile, "rows -1 columns 1", IN("4,2 R"), TSH_ERR_SHAPE, "tsh_tile", "-1 times"),
    REFUSE(pad, "reflect", IN("2,3 R"), TSH_ERR_SHAPE, "tsh_pad: (1, 2)", "reflection"),
    REFUSE(pad, "circular", IN("1,3 R"), TSH_ERR_SHAPE, "tsh_pad: (1, 2)", "circular"),
    REFUSE(pad, "reflect", IN("4,3 S(0)"), TSH_ERR_LAYOUT, "tsh_pad", COMPLETE),
    REFUSE(pad, "value 1", IN("4,3 P"), TSH_ERR_LAYOUT, "tsh_pad", "not linear"),
    REFUSE(pad, "value 1", IN("3 R"), TSH_ERR_ARGUMENT, "tsh_pad: 2 pairs"),
    REFUSE(triangle, "lower", IN("3 R"), TSH_ERR_SHAPE, "tsh_tril", "rows and columns"),
    REFUSE(one_hot, "classes 2", IN("%5 9 R"), TSH_ERR_ARGUMENT, "tsh_one_hot: id",
           "outside [0, 2)"),
    REFUSE(one_hot, "classes 0", IN("%5 9 R"), TSH_ERR_SHAPE, "tsh_one_hot", "0 classes"),
    REFUSE(one_hot, "classes 2", IN("9 R"), TSH_ERR_DTYPE, "tsh_one_hot"),
    REFUSE(gather, "at 0", IN("2,3 R", "%9 8,3 R"), TSH_ERR_ARGUMENT, "tsh_gather: index",
           "at position", "outside [0, 2)"),
    REFUSE(gather, "at 0", IN("2,3 R", "%2 8,4 R"), TSH_ERR_SHAPE, "tsh_gather: x (2, 3) R"),
    REFUSE(gather, "at 2", IN("2,3 R", "%2 8,3 R"), TSH_ERR_SHAPE, "tsh_gather", "dimension 2"),
    REFUSE(gather, "at 0", IN("2,3 R", "2,3 R"), TSH_ERR_DTYPE, "tsh_gather: index is f"),
    REFUSE(gather, "at 0", IN("4,3 S(0)", "%4 8,3 R"), TSH_ERR_LAYOUT, "tsh_gather", "no rank has",
           COMPLETE),
    REFUSE(gather, "at 0", IN("4,3 S(1)", "%4 8,3 R"), TSH_ERR_LAYOUT, "tsh_gather",
           "tsh_redistribute(x, tsh_layout_of(index))"),
    REFUSE(gather, "at 0", IN("4,3 R", "%4 8,3 S(1)"), TSH_ERR_LAYOUT, "tsh_gather"),
    REFUSE(scatter, "at 0", IN("2,3 R", "%9 8,3 R", "8,3 R"), TSH_ERR_ARGUMENT,
           "tsh_scatter_add: index", "outside [0, 2)"),
    REFUSE(scatter, "at 0", IN("2,3 R", "%2 8,3 R", "7,3 R"), TSH_ERR_SHAPE, "tsh_scatter_add",
           "src (7, 3)"),
    REFUSE(scatter, "at 0", IN("2,3 S(0)", "%2 8,3 S(0)", "8,3 S(0)"), TSH_ERR_LAYOUT,
           "tsh_scatter_add", "no rank has"),
    REFUSE(scatter, "at 0", IN("2,3 R", "%2 8,3 R", "8,3 P"), TSH_ERR_LAYOUT, "tsh_scatter_add",
           "complete the partial sum"),
    REFUSE(scatter, "at 0", IN("2,3 P", "%2 8,3 R", "8,3 R"), TSH_ERR_LAYOUT, "tsh_scatter_add",
           "complete the partial sum"),
    REFUSE(scatter, "at 0", IN("2,3 R", "%2 8,3 R", "%3 8,3 R"), TSH_ERR_DTYPE,
           "tsh_scatter_add: x is f", "src is i32"),
    REFUSE(select, "at 0", IN("2,3 R", "%9 8 R"), TSH_ERR_ARGUMENT, "tsh_index_select: index",
           "outside [0, 2)"),
    REFUSE(select, "at 0", IN("2,3 R", "%2 8,1 R"), TSH_ERR_SHAPE, "tsh_index_select"),
    REFUSE(select, "at 0", IN("2,3 S(1)", "%2 8 S(0)"), TSH_ERR_LAYOUT, "tsh_index_select",
           "tsh_redistribute(index, tsh_replicated())"),
    REFUSE(topk, "k 4 at 0", IN("3,2 R"), TSH_ERR_SHAPE, "tsh_topk: k is 4"),
    REFUSE(topk, "k -1 at 0", IN("3,2 R"), TSH_ERR_ARGUMENT, "tsh_topk: k is -1"),
    REFUSE(topk, "k 1 at 0", IN("3,2 S(0)"), TSH_ERR_LAYOUT, "tsh_topk", "not whole", COMPLETE),
    REFUSE(sort, "at 0", IN("3,2 P"), TSH_ERR_LAYOUT, "tsh_sort", COMPLETE),
    REFUSE(sort, "indices at 0", IN("3,2 S(0)"), TSH_ERR_LAYOUT, "tsh_argsort", COMPLETE),
    REFUSE(einsum, "ij,jk->ik", IN("3,2 R", "3,2 R"), TSH_ERR_SHAPE, "tsh_einsum: \"ij,jk->ik\"",
           "two lengths"),
    REFUSE(einsum, "i,jk->ik", IN("3,2 R", "3,2 R"), TSH_ERR_SHAPE, "tsh_einsum", "a letter"),
    REFUSE(einsum, "ij.,jk->ik", IN("3,2 R", "2,2 R"), TSH_ERR_SHAPE, "tsh_einsum"),
    REFUSE(einsum, "ij,jk->iz", IN("3,2 R", "2,2 R"), TSH_ERR_SHAPE, "in no input"),
    REFUSE(einsum, "ij,jk->ii", IN("3,2 R", "2,2 R"), TSH_ERR_SHAPE, "there twice"),
    REFUSE(einsum, "ij,jk-ik", IN("3,2 R", "2,2 R"), TSH_ERR_SHAPE, "\"->\""),
    REFUSE(einsum, "ij", IN("3,2 R", "2,2 R"), TSH_ERR_SHAPE, "comma"),
    REFUSE(einsum, "ij->i->", IN("3,2 R"), TSH_ERR_SHAPE, "tsh_einsum"),
    REFUSE(einsum, "ii->i", IN("3,2 R"), TSH_ERR_SHAPE, "equal lengths"),
    REFUSE(einsum, "ii->i", IN("3,3 S(0)"), TSH_ERR_LAYOUT, "diagonal", COMPLETE),
    REFUSE(einsum, "ij,jk->ik", IN("3,2 S(1)", "2,2 R"), TSH_ERR_LAYOUT, "tsh_einsum",
           "do not go together", COMPLETE),
    REFUSE(einsum, "ij,ij->ij", IN("3,2 P", "3,2 P"), TSH_ERR_LAYOUT, "tsh_einsum"),
    REFUSE(einsum, "ij,jk->ik", IN("3,2 S(0)", "2,2 S(1)"), TSH_ERR_LAYOUT, "tsh_einsum"),
};

static int refuse(tsh_ctx *ctx, void *user) {
    const tsh_error *error = tsh_last_error(ctx);
    int i, k;
    (void)user;
    for (k = 0; k < COUNT(refusals); k++) {
        const refusal *r = &refusals[k];
        tsh_tensor *leaf[3] = {NULL, NULL, NULL};
        probe p;
        memset(&p, 0, sizeof p);
        p.ctx = ctx;
        probe_begin(&p, r->arg);
        p.n = 1;
        for (i = 0; i < 3 && r->in[i]; i++) {
            spec s = spec_parse(r->in[i], 1);
            p.in[i] = leaf[i] = spec_tensor(ctx, &s, 10 + (uint64_t)i);
            CHECK(p.in[i], "%d: input %d", k, i);
        }
        CHECK(!r->op(&p), "a result where an error was due: %s %s", r->sentence[0], r->in[0]);
        CHECK(!probe_unread(&p), "nothing reads \"%s\": %s", probe_unread(&p), r->sentence[0]);
        CHECK(error->code == r->code, "want %s: %s %s", tsh_result_name(r->code), r->sentence[0],
              r->in[0]);
        for (i = 0; i < 3 && r->sentence[i]; i++)
            CHECK(strstr(error->message, r->sentence[i]), "the sentence lacks \"%s\"",
                  r->sentence[i]);
        tsh_clear_error(ctx);
        for (i = 0; i < 3; i++) tsh_tensor_free(leaf[i]);
    }
    return 0;
}

static void every_refusal_has_its_sentence(void **state) {
    (void)state;
    ranks_run(1, refuse, NULL);
    ranks_run(2, refuse, NULL);
}

/* ---------------------------------------------------------- gradients */

/* A leaf of values that differ by at least 1/16, more than twice the step. */
static tsh_tensor *leaf(tsh_ctx *ctx, tsh_shape shape, int salt) {
    tsh_tensor *t = tsh_tensor_new(ctx, TSH_REAL, shape, tsh_replicated());
    tsh_real *data = (tsh_real *)tsh_data(ctx, t);
    int64_t i;
    for (i = 0; i < tsh_numel(t); i++)
        data[i] = (tsh_real)((double)((i * 37 + salt) % 61 - 30) / 16);
    return tsh_requires_grad(t, 1);
}

static tsh_tensor *weigh(tsh_tensor *y) {
    tsh_tensor *w = tsh_zeros(tsh_ctx_of(y), tsh_shape_of(y));
    tsh_real *data = (tsh_real *)tsh_data(tsh_ctx_of(y), w);
    int64_t i;
    for (i = 0; data && i < tsh_numel(w); i++) data[i] = (tsh_real)((i * 29 + 5) % 31 - 14) / 16;
    return tsh_sum(tsh_mul(y, w), TSH_ALL, 0);
}

/* An index (length, 3) below 4 with repeats, of a turned view. */
static tsh_tensor *turned_index(tsh_ctx *ctx, int64_t length) {
    int32_t values[3 * 8];
    int i;
    for (i = 0; i < 24; i++) values[i] = i * 7 % 5 % 4;
    return tsh_transpose(
        tsh_tensor_from(ctx, TSH_I32, tsh_shape2(3, length), tsh_replicated(), values), 0, 1);
}

/* Functions of x (4, 3) and y (4, 3), chosen by *user; both are used as views, too. */
static tsh_tensor *function(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {
    static const int64_t pad[4] = {2, 1, -1, 3}, cut[4] = {2, -1, 1, 0};
    tsh_tensor *x = in[0], *y = in[1], *t = tsh_transpose(x, 0, 1);
    tsh_tensor *index = turned_index(ctx, 6);
    (void)n;
    switch (*(const int *)user) {
    case 0:
        return weigh(tsh_mul(tsh_pad(t, pad, 2, TSH_PAD_CONSTANT, 2),
                             tsh_pad(t, pad, 2, TSH_PAD_REPLICATE, 0)));
    case 1:
        return weigh(tsh_mul(tsh_pad(x, cut, 2, TSH_PAD_REFLECT, 0),
                             tsh_pad(x, cut, 2, TSH_PAD_CIRCULAR, 0)));
    case 2: return weigh(tsh_mul(tsh_flip(t, 0), tsh_roll(tsh_transpose(y, 0, 1), 2, 1)));
    case 3: return weigh(tsh_mul(tsh_tril(t, 1), tsh_triu(tsh_transpose(y, 0, 1), -1)));
    case 4: return weigh(tsh_mul(tsh_slice_step(x, 0, 1, 4, 2), tsh_slice_step(y, 0, 0, 3, 2)));
    case 5: return weigh(tsh_mul(tsh_gather(x, 0, index), tsh_gather(y, 0, index)));
    case 6: return weigh(tsh_gather(t, 1, tsh_transpose(index, 0, 1)));
    case 7: return weigh(tsh_mul(tsh_scatter_add(x, 0, tsh_slice(index, 0, 0, 4), y), x));
    case 8: return weigh(tsh_scatter_add(x, 0, tsh_slice(index, 0, 0, 3), tsh_mul(y, y)));
    case 9: return weigh(tsh_index_select(t, 1, tsh_reshape(index, tsh_shape1(18))));
    case 10:
        return weigh(
            tsh_mul(tsh_topk(t, 2, 1, 1, NULL), tsh_topk(tsh_transpose(y, 0, 1), 2, 1, 0, NULL)));
    case 11: return weigh(tsh_mul(tsh_sort(x, 0, 0, NULL), tsh_sort(y, 1, 1, NULL)));
    case 12: return weigh(tsh_einsum("ij,kj->ki", x, y));
    case 13: return weigh(tsh_einsum("ij,ij->i", x, y));
    case 14: return weigh(tsh_einsum("ii,kj->ijk", tsh_slice(t, 1, 0, 3), y));
    case 15:
        return weigh(tsh_mul(tsh_expand(tsh_unsqueeze(x, 1), tsh_shape3(4, 5, 3)),
                             tsh_repeat_interleave(tsh_unsqueeze(y, 1), 5, 1)));
    case 16: return weigh(tsh_stack(in, 2, 1));
    default: return NULL;
    }
}

static void gradients_equal_central_differences(void **state) {
    int which;
    (void)state;
    for (which = 0; which < 17; which++) {
        tsh_ctx *ctx;
        tsh_tensor *in[2];
        double worst;
        assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
        in[0] = leaf(ctx, tsh_shape2(4, 3), 3);
        in[1] = leaf(ctx, tsh_shape2(4, 3), 11);
        worst = tsh_gradcheck(ctx, function, in, 2, &which, 0, 0);
        if (!tsh_ok(ctx)) fail_msg("%d: %s", which, tsh_last_error(ctx)->message);
        /* the functions are of degree two: only rounding is left */
        if (!(worst >= 0 && worst <= (sizeof(tsh_real) == 8 ? 1e-9 : 4e-3)))
            fail_msg("function %d: gradients are off by %.3g", which, worst);
        tsh_close(ctx);
    }
}

/* ---------------------------------------------------------- dtypes, threads, what is empty */

static void equal_bits(tsh_ctx *ctx, tsh_tensor *a, tsh_tensor *b) {
    const size_t bytes = (size_t)tsh_numel(a) * tsh_dtype_size(tsh_dtype_of(a));
    char *x = (char *)malloc(bytes + 1), *y = (char *)malloc(bytes + 1);
    if (!a || !b) fail_msg("%s", tsh_last_error(ctx)->message);
    assert_int_equal(tsh_dtype_of(a), tsh_dtype_of(b));
    assert_int_equal(tsh_read(ctx, a, TSH_LOCAL, x, bytes), TSH_OK);
    assert_int_equal(tsh_read(ctx, b, TSH_LOCAL, y, bytes), TSH_OK);
    assert_memory_equal(x, y, bytes);
    free(x);
    free(y);
}

/* Op number `which` of x and y (4, 3). */
static tsh_tensor *half_op(tsh_ctx *ctx, int which, tsh_tensor *x, tsh_tensor *y) {
    static const int64_t pad[2] = {2, 1};
    tsh_tensor *index = turned_index(ctx, 4), *both[2];
    both[0] = x;
    both[1] = y;
    switch (which) {
    case 0: return tsh_pad(x, pad, 1, TSH_PAD_CONSTANT, 0.75);
    case 1: return tsh_flip(x, 0);
    case 2: return tsh_tril(x, 0);
    case 3: return tsh_expand(tsh_unsqueeze(x, 0), tsh_shape3(2, 4, 3));
    case 4: return tsh_stack(both, 2, 0);
    case 5: return tsh_gather(x, 0, index);
    case 6: return tsh_scatter_add(x, 0, index, y); /* rounded once */
    case 7: return tsh_index_select(x, 0, tsh_reshape(index, tsh_shape1(12)));
    case 8: return tsh_topk(x, 2, 0, 1, NULL);
    case 9: return tsh_sort(x, 1, 0, NULL);
    case 10: return tsh_slice_step(x, 0, 0, 4, 3);
    case 11: return tsh_roll(x, 1, 0);
    default: return NULL;
    }
}

/* A 16-bit result is that of the same values in tsh_real, rounded; so are gradients, which are
 * tsh_real. */
static void half_precision_is_rounded_once(void **state) {
    static const tsh_dtype dtypes[] = {TSH_BF16, TSH_F16};
    int d, which;
    (void)state;
    for (d = 0; d < 2; d++)
        for (which = 0; which < 12; which++) {
            tsh_ctx *ctx;
            tsh_tensor *x, *y, *low, *high, *lx, *hx;
            assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
            x = leaf(ctx, tsh_shape2(4, 3), 3);
            y = leaf(ctx, tsh_shape2(4, 3), 11);
            lx = tsh_retain_grad(tsh_cast(tsh_scale(x, 1.1), dtypes[d]));
            hx = tsh_retain_grad(tsh_cast(lx, TSH_REAL));
            low = half_op(ctx, which, lx, tsh_cast(y, dtypes[d]));
            high = half_op(ctx, which, hx, tsh_cast(tsh_cast(y, dtypes[d]), TSH_REAL));
            equal_bits(ctx, low, tsh_cast(high, dtypes[d]));
            assert_int_equal(tsh_backward(ctx, weigh(low)), TSH_OK);
            if (!tsh_grad(lx)) fail_msg("%d: no gradient", which);
            tsh_close(ctx);
        }
}

typedef struct threads_result {
    tsh_real scattered[16 * 1024], gradient[16 * 1024];
} threads_result;

static void with_threads(int threads, threads_result *result) {
    tsh_desc desc;
    tsh_ctx *ctx;
    tsh_tensor *x, *index, *src, *y;
    int64_t *at, i;
    memset(&desc, 0, sizeof desc);
    desc.threads = threads;
    assert_int_equal(tsh_open(&desc, &ctx), TSH_OK);
    x = tsh_requires_grad(tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(16, 1024), tsh_replicated()), 1);
    src = tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(64, 1024), tsh_replicated());
    index = tsh_tensor_new(ctx, TSH_I64, tsh_shape2(64, 1024), tsh_replicated());
    at = (int64_t *)tsh_data(ctx, index);
    for (i = 0; i < 64 * 1024; i++) at[i] = i * 7919 % 16;
    assert_int_equal(tsh_init_normal(x, NULL), TSH_OK);
    assert_int_equal(tsh_init_normal(src, NULL), TSH_OK);
    y = tsh_scatter_add(x, 0, index, src);
    assert_int_equal(tsh_read(ctx, y, TSH_LOCAL, result->scattered, sizeof result->scattered),
                     TSH_OK);
    assert_int_equal(tsh_backward(ctx, tsh_sum(tsh_mul(tsh_gather(x, 0, index), src), TSH_ALL, 0)),
                     TSH_OK);
    assert_int_equal(
        tsh_read(ctx, tsh_grad(x), TSH_LOCAL, result->gradient, sizeof result->gradient), TSH_OK);
    tsh_close(ctx);
}

static void threads_give_the_same_bits(void **state) {
    threads_result *one = (threads_result *)malloc(sizeof *one);
    threads_result *four = (threads_result *)malloc(sizeof *four);
    (void)state;
    with_threads(1, one);
    with_threads(4, four);
    assert_memory_equal(one, four, sizeof *one);
    free(one);
    free(four);
}

/* What is empty stays so, and a scalar has one element along dimension 0. */
static void empty_tensors_and_scalars(void **state) {
    static const int64_t two[2] = {1, 1};
    tsh_ctx *ctx;
    tsh_tensor *x, *none, *scalar, *zero, *indices, *ids;
    (void)state;
    assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
    x = leaf(ctx, tsh_shape2(4, 3), 3);
    none = tsh_requires_grad(tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(0, 3), tsh_replicated()), 1);
    ids = tsh_tensor_new(ctx, TSH_I64, tsh_shape1(0), tsh_replicated());
    scalar = tsh_full(ctx, tsh_shape0(), 7);
    zero = tsh_cast(tsh_zeros(ctx, tsh_shape0()), TSH_I64);
    assert_int_equal(
        tsh_numel(tsh_gather(x, 0, tsh_expand(tsh_unsqueeze(ids, 1), tsh_shape2(0, 3)))), 0);
    assert_int_equal(tsh_size(tsh_index_select(x, 1, ids), 1), 0);
    assert_int_equal(tsh_size(tsh_topk(x, 0, 1, 1, &indices), 1), 0);
    assert_int_equal(tsh_size(indices, 0), 4);
    assert_int_equal(tsh_numel(tsh_sort(none, 0, 0, &indices)), 0);
    assert_int_equal(tsh_numel(tsh_sort(none, 1, 0, &indices)), 0);
    assert_int_equal(tsh_numel(tsh_pad(none, two, 1, TSH_PAD_REFLECT, 0)), 0);
    equal_bits(ctx, tsh_pad(tsh_transpose(none, 0, 1), two, 1, TSH_PAD_CONSTANT, 7),
               tsh_full(ctx, tsh_shape2(3, 2), 7));
    assert_int_equal(tsh_numel(tsh_one_hot(ids, 3)), 0);
    assert_int_equal(tsh_numel(tsh_repeat_interleave(x, 0, 1)), 0);
    assert_int_equal(tsh_numel(tsh_flip(tsh_roll(none, 1, 0), 0)), 0);
    equal_bits(ctx, tsh_einsum("ij,ik->jk", none, none), tsh_zeros(ctx, tsh_shape2(3, 3)));
    equal_bits(ctx, tsh_gather(scalar, 0, zero), scalar);
    equal_bits(ctx, tsh_scatter_add(scalar, 0, zero, scalar), tsh_scale(scalar, 2));
    equal_bits(ctx, tsh_index_select(scalar, -1, zero), scalar);
    equal_bits(ctx, tsh_topk(scalar, 1, 0, 1, &indices), scalar);
    equal_bits(ctx, indices, zero);
    equal_bits(ctx, tsh_sort(scalar, 0, 1, NULL), scalar);
    equal_bits(ctx, tsh_flip(scalar, 0), scalar);
    assert_int_equal(tsh_ndim(tsh_squeeze(scalar, -1)), 0);
    assert_int_equal(tsh_backward(ctx, tsh_sum(tsh_concat(&none, 1, 0), TSH_ALL, 0)), TSH_OK);
    tsh_close(ctx);
}

/* Integers are moved, added and sorted exactly. */
static void integers_are_exact(void **state) {
    static const int64_t values[4] = {INT64_MAX, -5, INT64_MIN, 7}, up[4] = {2, 1, 3, 0};
    static const int64_t sums[2] = {INT64_MAX - 5, INT64_MIN + 7}, at[4] = {0, 0, 1, 1};
    tsh_ctx *ctx;
    tsh_tensor *x, *indices;
    (void)state;
    assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
    x = tsh_tensor_from(ctx, TSH_I64, tsh_shape1(4), tsh_replicated(), values);
    (void)tsh_sort(x, 0, 0, &indices);
    equal_bits(ctx, indices, tsh_tensor_from(ctx, TSH_I64, tsh_shape1(4), tsh_replicated(), up));
    equal_bits(ctx,
               tsh_scatter_add(tsh_cast(tsh_zeros(ctx, tsh_shape1(2)), TSH_I64), 0,
                               tsh_tensor_from(ctx, TSH_I64, tsh_shape1(4), tsh_replicated(), at),
                               x),
               tsh_tensor_from(ctx, TSH_I64, tsh_shape1(2), tsh_replicated(), sums));
    tsh_close(ctx);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_row_equals_the_dense_result),
        cmocka_unit_test(every_refusal_has_its_sentence),
        cmocka_unit_test(gradients_equal_central_differences),
        cmocka_unit_test(half_precision_is_rounded_once),
        cmocka_unit_test(threads_give_the_same_bits),
        cmocka_unit_test(empty_tensors_and_scalars),
        cmocka_unit_test(integers_are_exact),
    };
    return cmocka_run_group_tests_name("op/index_layouts", tests, NULL, NULL);
}
