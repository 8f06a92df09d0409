/* ========================================================================== */
/* >>attention-segments                  MARK: - attention-segments (private) */
/* Rows that hold several sequences: cutting them into parts.                 */
/* Needs: >>tensor.                                                           */
/* ========================================================================== */

/* With tsh_attention_desc.segments, each row of the batch is cut into parts which do not see each
 * other. Attention computes each part as if it was a row, which begins at the part's first
 * position: scores between parts cost nothing, and sums have the order that they have if the
 * sequence is a row by itself. A segment whose positions follow each other is a part. If they do
 * not, all positions from the segment's first to its last, other segments' included, are one part,
 * in which tshi_attention_separate masks scores. */
typedef enum tshi_row_part_kind {
    TSHI_ROW_PART_ONE,    /* one segment, and nothing else */
    TSHI_ROW_PART_MIXED,  /* several segments, and perhaps padding: scores are masked */
    TSHI_ROW_PART_PADDING /* padding alone, which sees nothing */
} tshi_row_part_kind;

typedef struct tshi_row_part {
    int64_t row, first, count; /* row of the batch; positions of the part: [first, first + count) */
    tshi_row_part_kind kind;
} tshi_row_part;

/* Returns which segment each position of local row b of q's batch is in: an array in which
 * positions are segments->stride[1] apart. values: the first local element of `segments`. */
static const int32_t *tshi_attention_segments(const tsh_tensor *q, const tsh_tensor *segments,
                                              const void *values, int64_t b) {
    if (segments->layout.kind != TSH_SHARDED) b = tshi_tensor_global(q, 0, b);
    return (const int32_t *)values + b * segments->stride[0];
}

/* Returns the end of the run that begins at position i: of adjacent positions that are in its
 * segment or, if it is padding (a negative segment), are padding as well. n: number of positions in
 * the row. */
static int64_t tshi_attention_run_end(const int32_t *at, int64_t step, int64_t i, int64_t n) {
    const int32_t own = at[i * step];
    do {
        i++;
    } while (i < n && (own < 0 ? at[i * step] < 0 : at[i * step] == own));
    return i;
}

/* Returns how many runs, adjacent positions of one segment or of padding, the rows on this rank
 * have. */
static int64_t tshi_attention_count_runs(const tsh_tensor *q, const tsh_tensor *segments) {
    int64_t count = 0;
    for (int64_t b = 0; b < q->local[0]; b++) {
        const int32_t *at = tshi_attention_segments(q, segments, tshi_tensor_at(segments), b);
        for (int64_t i = 0; i < q->dim[2]; count++)
            i = tshi_attention_run_end(at, segments->stride[1], i, q->dim[2]);
    }
    return count;
}

/* Returns the index of the first of `count` parts that has a position of segment `own`; if none
 * has, `count`. */
static int64_t tshi_attention_part_of(const tshi_row_part *parts, int64_t count, const int32_t *at,
                                      int64_t step, int32_t own) {
    for (int64_t e = 0; e < count; e++) {
        const int64_t n = parts[e].kind == TSHI_ROW_PART_MIXED ? parts[e].count : 1;
        for (int64_t i = 0; i < n; i++)
            if (at[(parts[e].first + i) * step] == own) return e;
    }
    return count;
}

/* Cuts local row b, of n positions, into parts. Returns the number of parts, at most that of the
 * row's runs. */
static int64_t tshi_attention_cut(tshi_row_part *parts, int64_t b, const int32_t *at, int64_t step,
                                  int64_t n) {
    int64_t count = 0, end;
    int32_t most = -1; /* the largest segment so far: a larger one is new */
    for (int64_t i = 0; i < n; i = end) {
        const int32_t own = at[i * step];
        const int64_t e = own < 0 || own > most
                              ? count
                              : tshi_attention_part_of(parts, count, at, step, own);
        end = tshi_attention_run_end(at, step, i, n);
        if (own > most) most = own;
        if (e == count) { /* a new part */
            parts[e].row = b;
            parts[e].first = i;
        }
        parts[e].kind = own < 0     ? TSHI_ROW_PART_PADDING
                        : e < count ? TSHI_ROW_PART_MIXED
                                    : TSHI_ROW_PART_ONE;
        parts[e].count = end - parts[e].first;
        count = e + 1; /* an older part that grows takes in all parts after it */
    }
    return count;
}

/* Cuts all rows of the batch on this rank into parts. Returns the number of parts. */
static int64_t tshi_attention_cut_all(tshi_row_part *parts, const tsh_tensor *q,
                                      const tsh_tensor *segments) {
    int64_t count = 0;
    for (int64_t b = 0; b < q->local[0]; b++)
        count += tshi_attention_cut(
            parts + count, b, tshi_attention_segments(q, segments, tshi_tensor_at(segments), b),
            segments->stride[1], q->dim[2]);
    return count;
}
