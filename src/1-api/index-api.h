/* ========================================================================== */
/* >>index-api                                              MARK: - index-api */
/* Ops on shapes and indices: padding, gather, sort, Einstein sums.           */
/* Needs: >>tensor-api.                                                       */
/* ========================================================================== */

/* Ops of this section take any dtype but quantised ones, unless they say otherwise, and their
 * result has x's dtype. They move elements without rounding. A dim may be negative: -1 is the last
 * dimension; a scalar has the dims 0 and -1. No collective runs in forward; where a gradient is a
 * partial sum, backward all-reduces it, as for every op. */

/* -- other shapes ----------------------------------------------------------- */

/* Joins n tensors of one shape along a new dimension `dim` of length n, in [-(ndim + 1), ndim], as
 * tsh_unsqueeze and tsh_concat do; n is at most 30. All parts have the same layout, which the
 * result keeps: S(d) becomes S(d + 1) if dim is at d or before it.
 * torch: torch.stack */
TSH_API tsh_tensor *tsh_stack(tsh_tensor *const *parts, int n, int dim);
/* Returns x without dimension `dim` if that has length 1, else x with the same shape; TSH_ALL:
 * without every dimension of length 1. A view. Takes any layout; a dimension that is removed must
 * not be the sharded one.
 * torch: torch.squeeze, Tensor.squeeze */
TSH_API tsh_tensor *tsh_squeeze(tsh_tensor *x, int dim);
/* Returns x with a new dimension of length 1 at `dim`, in [-(ndim + 1), ndim]: -1 is after the
 * last. A view. Takes and gives any layout.
 * torch: torch.unsqueeze, Tensor.unsqueeze */
TSH_API tsh_tensor *tsh_unsqueeze(tsh_tensor *x, int dim);
/* Broadcasts x to `shape`: dimensions are aligned at the right, those of length 1 are repeated, and
 * -1 keeps the length of x. Returns a copy (torch: a view with stride 0), whose gradient is summed
 * over what was repeated. Takes R, P, and S along a dimension that keeps its length; gives the
 * same.
 * torch: Tensor.expand, Tensor.expand_as, torch.broadcast_to */
TSH_API tsh_tensor *tsh_expand(tsh_tensor *x, tsh_shape shape);
/* Repeats the whole of x repeats[d] >= 0 times along dimension d: (a, b) becomes (a, b, a, b). The
 * n entries are aligned with the last dimensions of x; missing ones on either side count as 1. The
 * result has at most TSH_MAX_DIMS - 1 dimensions, or TSH_MAX_DIMS if nothing is repeated. Takes R,
 * P, and S along a dimension that is not repeated; gives the same.
 * torch: torch.tile, Tensor.repeat */
TSH_API tsh_tensor *tsh_tile(tsh_tensor *x, const int64_t *repeats, int n);
/* Repeats each element `repeats` >= 0 times along dim: (a, b) becomes (a, a, b, b). x has at most
 * TSH_MAX_DIMS - 1 dimensions. Takes and gives R, P and S; sharded along dim, the repeats stay on
 * the rank of their element, so units become `repeats` times as long (then repeats is at least 1).
 * torch: torch.repeat_interleave */
TSH_API tsh_tensor *tsh_repeat_interleave(tsh_tensor *x, int64_t repeats, int dim);

/* What tsh_pad puts outside of x. Along a dimension of length 4, two elements before it and three
 * after it are, with x in brackets: */
typedef enum tsh_pad_mode {
    TSH_PAD_CONSTANT,  /* v v [a b c d] v v v, where v is `value` */
    TSH_PAD_REFLECT,   /* c b [a b c d] c b a: mirrored at the outermost element */
    TSH_PAD_REPLICATE, /* a a [a b c d] d d d */
    TSH_PAD_CIRCULAR   /* c d [a b c d] a b c */
} tsh_pad_mode;
/* Pads x at both ends of its last n dimensions. pad has n pairs, in torch's order: (before, after)
 * of the last dimension, then of the one before it, and so on; NULL if n is 0. A negative entry
 * cuts off elements. `value` is read in mode TSH_PAD_CONSTANT only, and rounded to x's dtype. An
 * entry is below the dimension's length with TSH_PAD_REFLECT, and at most that with
 * TSH_PAD_CIRCULAR. (torch pads at most three dimensions in these modes and needs batch dimensions
 * before them; here any may be padded.) Takes R, S along a dimension without padding, and, unless
 * `value` differs from 0, P; gives the same.
 * torch: F.pad, nn.ConstantPad2d, nn.ZeroPad2d, nn.ReflectionPad2d, nn.ReplicationPad2d */
TSH_API tsh_tensor *tsh_pad(tsh_tensor *x, const int64_t *pad, int n, tsh_pad_mode mode,
                            double value);
/* Reverses the order of x along dim. A copy. Takes R, P, and S along another dimension; gives the
 * same.
 * torch: torch.flip, torch.fliplr, torch.flipud */
TSH_API tsh_tensor *tsh_flip(tsh_tensor *x, int dim);
/* Moves each element `shift` places on along dim (backwards if shift is negative); those pushed off
 * one end come in at the other. A copy. Takes R, P, and S along another dimension; gives the same.
 * torch: torch.roll */
TSH_API tsh_tensor *tsh_roll(tsh_tensor *x, int64_t shift, int dim);
/* Returns every step-th element along dim, step >= 1: Python's x[start:stop:step]. Negative start
 * and stop count from the end; both are then clamped to the length, so INT64_MAX as stop is the
 * end. A view. Takes any layout; along the sharded dimension, step is 1 and the elements are whole
 * segments (see tsh_slice).
 * torch: Tensor.__getitem__ */
TSH_API tsh_tensor *tsh_slice_step(tsh_tensor *x, int dim, int64_t start, int64_t stop,
                                   int64_t step);
/* Returns the lower triangles of the matrices x (.., rows, columns): sets the elements with column
 * > row + diagonal to 0. A copy. Takes and gives any layout.
 * torch: torch.tril */
TSH_API tsh_tensor *tsh_tril(tsh_tensor *x, int64_t diagonal);
/* Returns the upper triangles of the matrices x (.., rows, columns): sets the elements with column
 * < row + diagonal to 0. A copy. Takes and gives any layout.
 * torch: torch.triu */
TSH_API tsh_tensor *tsh_triu(tsh_tensor *x, int64_t diagonal);
/* Returns (.., classes), TSH_I64: 1 at each id of ids (..), else 0. ids are TSH_I32 or TSH_I64; one
 * outside [0, classes) is an error. classes is at least 1 (torch's -1, the largest id plus 1, is
 * not offered). Takes ids R or S; gives the same.
 * torch: F.one_hot */
TSH_API tsh_tensor *tsh_one_hot(tsh_tensor *ids, int64_t classes);

/* -- elements by index ------------------------------------------------------
 * An index is TSH_I32 or TSH_I64; a value outside [0, length of x along dim) is an error, which
 * names it. Gradients that go to one element are added in the order of the index, whatever the
 * number of threads. */

/* Returns the elements of x that index names along dim, in the shape of index: for dim 1 of three,
 * out[i][j][k] = x[i][index[i][j][k]][k]. index has as many dimensions as x and, along every
 * dimension but dim, at most the length of x. Layouts of x, index -> result: R, R -> R; P, R -> P;
 * R, S(dim) -> S(dim), where dx is partial; both sharded alike along another dimension, which is
 * equally long in both -> the same. An x that is sharded along dim is refused.
 * torch: torch.gather, Tensor.gather, torch.take_along_dim */
TSH_API tsh_tensor *tsh_gather(tsh_tensor *x, int dim, tsh_tensor *index);
/* Returns a copy of x to which src is added where index says: for dim 1 of three,
 * out[i][index[i][j][k]][k] += src[i][j][k]. x and src have the same dtype; sums are in tsh_real
 * and rounded once (those of integers wrap around). index has as many dimensions as x and src, is
 * no longer than src, and no longer than x along any dimension but dim. (torch: a gradient only if
 * src and index have one shape; here what index leaves out of src gets 0.) Layouts of x, index, src
 * -> result: all R -> R; P, R, P -> P; all sharded alike along another dimension than dim, which is
 * equally long in all -> the same.
 * torch: torch.scatter_add, Tensor.scatter_add, Tensor.scatter_add_ */
TSH_API tsh_tensor *tsh_scatter_add(tsh_tensor *x, int dim, tsh_tensor *index, tsh_tensor *src);
/* Returns the slices of x that index (n) names along dim: the result is x's shape with length n
 * there. Layouts of x, index -> result: R, R -> R; P, R -> P; R, S(0) -> S(dim), where dx is
 * partial; S along another dimension, R -> the same; S(dim), R -> P, where slices of other ranks
 * are zero, as in tsh_embedding.
 * torch: torch.index_select, Tensor.index_select */
TSH_API tsh_tensor *tsh_index_select(tsh_tensor *x, int dim, tsh_tensor *index);

/* -- sorting ----------------------------------------------------------------
 * NaN counts as largest, -0 as equal to 0, and of equal elements the one with the lower index comes
 * first. x is of integers, or of a floating dtype no wider than tsh_real. Gradients go to the
 * elements that were chosen. Takes R, and S along another dimension than dim; gives the same. */

/* Returns the k largest elements of x along dim, the largest first; if `largest` is 0, the k
 * smallest, the smallest first. The result is x's shape with length k there, 0 <= k <= that of x.
 * *indices, unless indices is NULL, becomes a TSH_I64 tensor of the same shape and layout: their
 * positions in x along dim. After an error it is NULL.
 * torch: torch.topk, Tensor.topk */
TSH_API tsh_tensor *tsh_topk(tsh_tensor *x, int64_t k, int dim, int largest, tsh_tensor **indices);
/* Returns x sorted along dim, upwards, or downwards if descending is 1; stable: equal elements keep
 * their order. *indices, unless indices is NULL, becomes a TSH_I64 tensor of x's shape and layout:
 * the positions of the elements in x along dim. After an error it is NULL.
 * torch: torch.sort, Tensor.sort, torch.msort */
TSH_API tsh_tensor *tsh_sort(tsh_tensor *x, int dim, int descending, tsh_tensor **indices);
/* Returns the *indices of tsh_sort.
 * torch: torch.argsort, Tensor.argsort */
TSH_API tsh_tensor *tsh_argsort(tsh_tensor *x, int dim, int descending);

/* -- Einstein sums ---------------------------------------------------------- */

/* Computes a sum of products by the letters of `equation`, such as "bij,bjk->bik", of a and b, or
 * of a alone ("ij->ji", "ii->") if b is NULL. A letter (A to Z, a to z) names each dimension of an
 * input; dimensions with the same letter have the same length (or 1, between a and b), and letters
 * that the result lacks are summed over. A letter twice in one input takes the diagonal. "..."
 * stands for further dimensions, which are broadcast and stay. Without "->" the result has the
 * dimensions that "..." stands for, then the letters that occur once, in the order A to Z, a to z.
 * Dtypes: floating, as in tsh_matmul, by which products are computed; without letters to sum over,
 * or with no letter that only one input has, by tsh_mul. Layouts: at most one letter of each input
 * is sharded. If both inputs have it, both are sharded alike along it: a letter that stays gives S,
 * one that is summed over P. If only one input has it, the other input is R, and the result is S or
 * P likewise. Without sharded letters: P, R and R, P -> P; R, R -> R. Inputs are copied only if
 * their strides do not allow a product.
 * torch: torch.einsum, torch.tensordot, torch.outer, torch.trace, torch.diagonal */
TSH_API tsh_tensor *tsh_einsum(const char *equation, tsh_tensor *a, tsh_tensor *b);
