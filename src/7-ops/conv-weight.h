/* ========================================================================== */
/* >>conv-weight                                MARK: - conv-weight (private) */
/* The gradient of a convolution's weight: a product summed over the images.  */
/* Needs: >>conv-kernel.                                                      */
/* ========================================================================== */

/* dW[oc, k] = sum over columns of map[oc, column] B[k, column]. A column is a position of the
 * kernel on an image: B (k, columns) has the image elements that the kernel covers there (see
 * >>conv-pack), and map is the gradient of the map (or, of a transposed convolution, its input).
 * Each thread computes some rows of dW^T = B map^T. The columns, image after image, are cut into
 * chunks of up to TSHI_CONV_CHUNK. For each chunk the map is packed, B is copied in blocks of rows,
 * and the product is added to dW^T. Chunks are added in order, so the sums do not depend on
 * threads. */
typedef struct tshi_conv_weights {
    tsh_ctx *ctx;
    tshi_conv_source source; /* what B is read from */
    const tsh_real *map;     /* shape (batch, groups * outs, grid[0], grid[1]) */
    int64_t outs, k;         /* map channels per group; rows of B */
    int64_t wide;            /* row length of dW^T in scratch: outs, rounded up to whole slivers */
    tshi_dest dest;          /* where dW goes: shape (groups * outs, k), dense */
    int64_t columns, chunk;  /* number of columns of B; of a chunk */
    int64_t strips;          /* strips of mr rows of B per group */
    int64_t most, block;     /* max rows of B, in one group, of a piece; of a block */
    char *scratch;           /* scratch memory of all pieces */
    size_t each, at[3];      /* bytes of scratch of one piece; where in it rows, map and sums of
                              * tshi_conv_weight_scratch begin */
} tshi_conv_weights;

/* The scratch memory of one piece, or thread, of a tshi_conv_weights. */
typedef struct tshi_conv_weight_scratch {
    tshi_conv_places places;
    tsh_real *rows; /* shape (block, pitch): the columns of a chunk, of a block of rows of B */
    tsh_real *map;  /* shape (wide / nr, chunk, nr): a chunk of the map, packed in slivers */
    tsh_real *sums; /* shape (most, wide): this piece's rows of dW^T */
} tshi_conv_weight_scratch;

enum {
    TSHI_CONV_CHUNK = 384, /* max columns of B in a chunk */
    TSHI_CONV_PITCH = 16,  /* unused elements after each row of a chunk, so that not all rows begin
                            * in one set of a cache */
    TSHI_CONV_BLOCK = 264  /* max rows of B in a block: their chunk is a quarter of an L2 cache */
};

/* Returns the row stride, in elements, of a chunk of B in scratch. */
static int64_t tshi_conv_pitch(const tshi_conv_weights *p) {
    return tshi_base_ceil(p->chunk, p->source.nr) * p->source.nr + TSHI_CONV_PITCH;
}

/* Sets p->at, where the parts of a piece's scratch begin, and p->each, its size in bytes. */
static void tshi_conv_weight_layout(tshi_conv_weights *p) {
    size_t *const at = p->at;
    at[0] = (tshi_conv_places_bytes(&p->source) + 63) / 64 * 64;
    at[1] = at[0] + (tshi_dtype_reals(p->block * tshi_conv_pitch(p)) + 63) / 64 * 64;
    at[2] = at[1] + (tshi_dtype_reals(p->wide * p->chunk) + 63) / 64 * 64;
    p->each = at[2] + (tshi_dtype_reals(p->most * p->wide) + 63) / 64 * 64;
}

/* Returns pointers to the parts of a piece's scratch memory. */
static tshi_conv_weight_scratch tshi_conv_weight_split(const tshi_conv_weights *p, int piece) {
    tshi_conv_weight_scratch w;
    char *at = p->scratch + (size_t)piece * p->each;
    w.places.place = (tshi_conv_place *)(void *)at;
    w.places.start = (int *)(void *)(w.places.place + p->source.taps * p->source.nr);
    w.rows = (tsh_real *)(void *)(at + p->at[0]);
    w.map = (tsh_real *)(void *)(at + p->at[1]);
    w.sums = (tsh_real *)(void *)(at + p->at[2]);
    return w;
}

/* Packs columns [from, from + n) of the map's channels of a group, in slivers of nr channels. The
 * columns of a batch are those of image after image. */
static void tshi_conv_pack_map(const tshi_conv_weights *p, int64_t group, int64_t from, int64_t n,
                               tsh_real *to) {
    const int64_t area = tshi_conv_area(p->source.grid), image = p->source.groups * p->outs * area;
    const int nr = p->source.nr;
    for (int64_t done = 0, length; done < n; done += length) {
        const tsh_real *x = p->map + (from + done) / area * image + group * p->outs * area +
                            (from + done) % area;
        length = tshi_base_min(n - done, area - (from + done) % area);
        for (int64_t j = 0; j < p->outs; j += nr)
            tshi_gemm_pack(to + j * n + done * nr, nr, (int)tshi_base_min(nr, p->outs - j), length,
                           x + j * area, area, 1);
    }
}

/* Transposes rows [k0, k0 + n) of a group's dW^T, `sums` (n, wide), and writes them to dW, or adds
 * them if p->dest.add is 1. */
static void tshi_conv_turn(const tshi_conv_weights *p, const tsh_real *sums, int64_t group,
                           int64_t k0, int64_t n) {
    enum { SIDE = 16 }; /* rows and columns that are transposed at a time */
    for (int64_t i = 0; i < n; i += SIDE)
        for (int64_t j = 0; j < p->outs; j += SIDE)
            for (int64_t oc = j; oc < tshi_base_min(j + SIDE, p->outs); oc++) {
                tsh_real *to = p->dest.data + (group * p->outs + oc) * p->k + k0;
                const int64_t end = tshi_base_min(i + SIDE, n);
                for (int64_t k = i; k < end && p->dest.add; k++) to[k] += sums[k * p->wide + oc];
                for (int64_t k = i; k < end && !p->dest.add; k++) to[k] = sums[k * p->wide + oc];
            }
}

/* Adds to rows [k0, k0 + n) of a group's dW^T, `sums`, the products of B and of the map, already
 * packed, over the columns [from, from + length). The first chunk (from is 0) overwrites `sums`. */
static void tshi_conv_weight_block(const tshi_conv_weights *p, tshi_conv_weight_scratch *w,
                                   int64_t group, int64_t k0, int64_t n, int64_t from,
                                   int64_t length, tsh_real *sums) {
    const tshi_conv_source *s = &p->source;
    const int64_t pitch = tshi_conv_pitch(p);
    const tshi_matmul_strips a = {w->rows, pitch, 1, pitch};
    tshi_conv_rows rows = {s->data + group * s->channels * tshi_conv_area(s->size), k0, k0 + n,
                           pitch, NULL};
    for (int64_t at = 0; at < length; at += s->nr) {
        rows.to = w->rows + at;
        tshi_conv_locate(s, from + at, (int)tshi_base_min(s->nr, length - at), &w->places);
        tshi_conv_pack(s, &w->places, &rows);
    }
    for (int64_t j = 0; j < p->outs; j += s->nr) {
        const tshi_matrix c = tshi_gemm_matrix(sums + j, p->wide, 1);
        tshi_conv_tiles(p->ctx->gemm_kernel, n, (int)tshi_base_min(s->nr, p->outs - j), length, a,
                        w->map + j * length, from > 0 ? &c : NULL, c);
    }
}

/* Computes rows [k0, k0 + n) of a group's dW^T and writes them to dW. progress 1: lets collectives
 * progress meanwhile. */
static void tshi_conv_weight_rows(const tshi_conv_weights *p, tshi_conv_weight_scratch *w,
                                  int64_t group, int64_t k0, int64_t n, int progress) {
    const int64_t block = tshi_gemm_even(n, p->block, p->ctx->gemm_kernel->mr);
    for (int64_t from = 0; from < p->columns; from += p->chunk) {
        const int64_t length = tshi_base_min(p->chunk, p->columns - from);
        tshi_conv_pack_map(p, group, from, length, w->map);
        for (int64_t i = 0; i < n; i += block) {
            tshi_conv_weight_block(p, w, group, k0 + i, tshi_base_min(block, n - i), from, length,
                                   w->sums + i * p->wide);
            if (progress) tshi_tape_progress(p->ctx);
        }
    }
    tshi_conv_turn(p, w->sums, group, k0, n);
}

/* Computes strips [from, to) of dW^T, mr rows each, of all groups (a tshi_team_fn). */
static void tshi_conv_weight_piece(void *job, int piece, int64_t from, int64_t to) {
    const tshi_conv_weights *p = (const tshi_conv_weights *)job;
    const int64_t mr = p->ctx->gemm_kernel->mr;
    tshi_conv_weight_scratch w = tshi_conv_weight_split(p, piece);
    for (int64_t n; from < to; from += n) {
        const int64_t first = from % p->strips;
        n = tshi_base_min(to - from, p->strips - first);
        tshi_conv_weight_rows(p, &w, from / p->strips, first * mr,
                              tshi_base_min(n * mr, p->k - first * mr), piece == 0);
    }
}

/* Computes the gradient of the weight (OC, IC / groups, KH, KW) from an image (N, IC, H, W) and a
 * map (N, OC, OH, OW), one of which is the gradient of the output. */
static void tshi_conv_weight(tsh_ctx *ctx, const tshi_conv *c, const tsh_real *image,
                             const tsh_real *map, const tshi_dest *dest) {
    enum { MIN_WORK = 1 << 17 }; /* least number of multiply-adds per thread */
    const tshi_gemm_kernel *kernel = ctx->gemm_kernel;
    const int64_t total = c->groups * c->outs * c->ins * tshi_conv_area(c->kernel);
    tshi_block *taps, *scratch;
    tshi_conv_weights p;
    int pieces;
    tshi_conv_tap *tap = tshi_conv_alloc_taps(ctx, c, &taps);
    if (!tap || !total) {
        tshi_mem_release(ctx, taps);
        return;
    }
    memset(&p, 0, sizeof p);
    p.ctx = ctx;
    p.source = tshi_conv_image(c, image, tap);
    p.source.nr = kernel->nr;
    p.source.block = kernel->nr < 16 ? kernel->nr : 16;
    p.source.isa = ctx->isa;
    p.map = map;
    p.outs = c->outs;
    p.k = c->ins * p.source.taps;
    p.dest = *dest;
    p.columns = c->batch * tshi_conv_area(c->map);
    p.chunk = p.columns ? tshi_gemm_even(p.columns, TSHI_CONV_CHUNK, 32) : 1;
    p.strips = tshi_base_ceil(p.k, kernel->mr);
    p.wide = tshi_base_ceil(p.outs, kernel->nr) * kernel->nr;
    pieces = tshi_team_parts(ctx, total * (p.columns + 1), MIN_WORK);
    pieces = (int)tshi_base_min(pieces, p.strips * c->groups);
    p.most = tshi_base_min(p.strips, tshi_base_ceil(p.strips * c->groups, pieces)) * kernel->mr;
    p.block = tshi_base_min(TSHI_CONV_BLOCK / kernel->mr * kernel->mr, p.most);
    tshi_conv_weight_layout(&p);
    scratch = tshi_mem_alloc(ctx, TSH_MEM_STEP, tshi_base_mul(p.each, (size_t)pieces));
    if (scratch && p.columns) {
        p.scratch = (char *)tshi_mem_data(scratch);
        tshi_team_run(ctx, pieces, p.strips * c->groups, 1, tshi_conv_weight_piece, &p);
    } else if (scratch && !dest->add) { /* no images: the gradient is 0 */
        memset(dest->data, 0, tshi_dtype_reals(total));
    }
    if (ctx->trace) ctx->trace->flops += 2.0 * (double)total * (double)p.columns;
    tshi_mem_release(ctx, scratch);
    tshi_mem_release(ctx, taps);
}
