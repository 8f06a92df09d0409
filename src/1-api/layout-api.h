/* ========================================================================== */
/* >>layout-api                                            MARK: - layout-api */
/* Where a tensor lies over the tensor-parallel group, and who owns what.     */
/* Needs: >>types.                                                            */
/* ========================================================================== */

typedef enum tsh_layout_kind {
    TSH_REPLICATED, /* R     every rank holds the same values */
    TSH_SHARDED,    /* S(d)  cut along dimension d */
    TSH_PARTIAL     /* P     the value is the sum over the ranks */
} tsh_layout_kind;

/* A sharded dimension is a row of segments (one, unless weights are fused: [Q|K|V]); each is cut by
 * torch.chunk's rule in units: c = ceil(units / P), rank r owns units [min(r c, n), min((r + 1) c,
 * n)), and holds its pieces of all segments one after the other. A unit (a head) is never cut. */
typedef struct tsh_segment {
    int64_t length; /* in elements; 0, before it is on a tensor: an equal part of the dimension */
    int64_t unit;   /* elements that stay together; 0: 1 */
} tsh_segment;

typedef struct tsh_layout {
    tsh_layout_kind kind;
    int dim;      /* sharded only; negative counts from the end */
    int segments; /* sharded only; 0: 1 */
    tsh_segment segment[TSH_MAX_SEGMENTS];
} tsh_layout;

/* A layout of each kind. shard_segments: `segments` equal parts, each cut in `unit`s. */
TSH_API tsh_layout tsh_replicated(void);
TSH_API tsh_layout tsh_partial(void);
TSH_API tsh_layout tsh_sharded(int dim);
TSH_API tsh_layout tsh_shard_units(int dim, int64_t unit);
TSH_API tsh_layout tsh_shard_segments(int dim, int segments, int64_t unit);

typedef struct tsh_range {
    int64_t start, length; /* in elements of the global dimension */
} tsh_range;

/* The ownership function, the only one: writes the ranges of a dimension of `length` elements that
 * `rank` of `size` owns (one per segment, empty ones included) and returns their total length.
 * `ranges` may be NULL. Replicated and partial layouts own everything. -1: the layout is NULL, its
 * segments or units do not fit the length, or there is no such rank. */
TSH_API int64_t tsh_chunk(const tsh_layout *layout, int64_t length, int size, int rank,
                          tsh_range ranges[TSH_MAX_SEGMENTS]);

/* Writes "R", "P", "S(1)" or "S(1, 3 segments, unit 64)" into text (64 bytes hold any);
 * layout NULL: "R". Returns text; where that is NULL, or size 0, nothing is written. */
TSH_API char *tsh_layout_text(const tsh_layout *layout, char *text, size_t size);
