/* ========================================================================== */
/* >>layout-api                                            MARK: - layout-api */
/* How a tensor is distributed over the tensor-parallel group.                */
/* Needs: >>types.                                                            */
/* ========================================================================== */

typedef enum tsh_layout_kind {
    TSH_REPLICATED, /* R     every rank holds all values */
    TSH_SHARDED,    /* S(d)  split along dimension d: each rank holds a shard */
    TSH_PARTIAL     /* P     partial sum: the tensor is the sum of the ranks' values */
} tsh_layout_kind;

/* A sharded dimension consists of segments, one after the other: usually one; several if weights
 * are fused, as in [Q|K|V]. Each segment consists of units (such as attention heads), which are
 * never split. torch.chunk's rule assigns the n units of a segment to P ranks: c = ceil(n / P),
 * rank r owns units [min(r c, n), min((r + 1) c, n)); tsh_desc.shares deals them otherwise. A rank
 * stores its parts of all segments one after the other. */
typedef struct tsh_segment {
    int64_t length; /* length of the segment in elements; 0, in a layout that you pass: an equal
                     * part of the dimension */
    int64_t unit;   /* length of a unit in elements; 0 means 1 */
} tsh_segment;

typedef struct tsh_layout {
    tsh_layout_kind kind;
    int dim;      /* TSH_SHARDED: the sharded dimension; negative: counts from the end */
    int segments; /* TSH_SHARDED: number of segments; 0 means 1 */
    tsh_segment segment[TSH_MAX_SEGMENTS];
} tsh_layout;

/* Returns the layout R: replicated.
 * torch: dist.tensor.Replicate */
TSH_API tsh_layout tsh_replicated(void);
/* Returns the layout P: partial sums.
 * torch: dist.tensor.Partial */
TSH_API tsh_layout tsh_partial(void);
/* Returns S(dim): one segment, units of one element.
 * torch: dist.tensor.Shard */
TSH_API tsh_layout tsh_sharded(int dim);
/* Returns S(dim): one segment, divided into units of `unit` elements. */
TSH_API tsh_layout tsh_shard_units(int dim, int64_t unit);
/* Returns S(dim): `segments` equal segments, each divided into units of `unit` elements. */
TSH_API tsh_layout tsh_shard_segments(int dim, int segments, int64_t unit);

typedef struct tsh_range {
    int64_t start, length; /* start: index in the whole dimension; length: in elements */
} tsh_range;

/* Computes which elements of a dimension `rank` owns in a group of `size` ranks: writes one range
 * per segment, empty ones included, to `ranges` (may be NULL) and returns their total length.
 * `length` is the length of the whole dimension. In replicated and partial layouts each rank owns
 * all of it. Returns -1 if the layout's segments or units do not fit the length, or the rank does
 * not exist. */
TSH_API int64_t tsh_shard_range(tsh_layout layout, int64_t length, int size, int rank,
                                tsh_range ranges[TSH_MAX_SEGMENTS]);
/* Does what tsh_shard_range does for rank `rank` of ctx's tp, which may have unequal shares
 * (tsh_desc.shares): rank r owns units [b(r), b(r + 1)) of a segment of n units, where b(r) is n
 * times the shares of the ranks before r, divided by all shares, rounded to nearest: with shares 2
 * and 1, two ranks own 4 and 2 of 6 heads. The whole library decides ownership by this function.
 * Returns -1 also if ctx is NULL. */
TSH_API int64_t tsh_tp_shard_range(tsh_ctx *ctx, tsh_layout layout, int64_t length, int rank,
                                   tsh_range ranges[TSH_MAX_SEGMENTS]);

/* Writes "R", "P", "S(1)" or "S(1, 3 segments, unit 64)" into text, which has `size` bytes (64 are
 * always enough). Returns text. Writes nothing if text is NULL or size is 0. */
TSH_API char *tsh_layout_text(tsh_layout layout, char *text, size_t size);
