/* ========================================================================== */
/* >>conv-weight                                MARK: - conv-weight (private) */
/* The gradient of a convolution's weight: a product summed over the images.  */
/* Needs: >>conv-kernel.                                                      */
/* ========================================================================== */

/* dW[oc, k] = sum over columns of map[oc, column] B[k, column], where B (k, columns) has what the
 * kernel covers, as in >>conv-pack, and map is the gradient of the map (or, of a transposed
 * convolution, its input). The columns, image after image, are cut into chunks of up to
 * TSHI_CONV_CHUNK. A chunk of rows of B is copied, and the product B map^T of the chunk is added to
 * dW^T, of which each thread has some rows. Chunks are added in order, so the sums do not depend on
 * threads. */
typedef struct tshi_conv_weights {
    tsh_ctx *ctx;
    tshi_conv_source source; /* B */
    const tsh_real *map;     /* (batch, groups * outs, grid[0], grid[1]) */
    int64_t outs, k;         /* map channels per group; rows of B */
    tshi_dest dest;          /* dW (groups * outs, k), dense */
    int64_t columns, chunk;  /* of B; of a chunk */
    int64_t strips, block;   /* strips of mr rows of B per group; max rows at a time */
    char *scratch;           /* of all pieces */
    size_t each, at[4];      /* bytes of scratch of one piece; where its parts begin after the
                              * places */
} tshi_conv_weights;

/* The scratch memory of one piece. */
typedef struct tshi_conv_weight_scratch {
    tshi_conv_places places;
    tsh_real *rows; /* (block, pitch): a chunk of rows of B */
    tsh_real *map;  /* (outs, chunk): the map's values, if they are of several images */
    tsh_real *sums; /* (block, outs): rows of dW^T */
    char *gemm;     /* scratch of the product */
} tshi_conv_weight_scratch;

enum {
    TSHI_CONV_CHUNK = 384, /* max columns of a chunk: one slice of a product */
    TSHI_CONV_PITCH = 16,  /* elements between two rows of a chunk, so that not all begin in one set
                            * of a cache */
    TSHI_CONV_BLOCK = 264  /* max rows of B at a time: with a chunk, a quarter of an L2 cache */
};

/* Returns the elements from row to row of a chunk of B. */
static int64_t tshi_conv_pitch(const tshi_conv_weights *p) {
    return tshi_base_ceil(p->chunk, p->source.nr) * p->source.nr + TSHI_CONV_PITCH;
}

/* Sets where the parts of a piece's scratch begin, and the bytes of all. */
static void tshi_conv_weight_layout(tshi_conv_weights *p) {
    const tshi_gemm_kernel *kernel = p->ctx->gemm_kernel;
    size_t *const at = p->at;
    at[0] = (tshi_conv_places_bytes(&p->source) + 63) / 64 * 64;
    at[1] = at[0] + (tshi_dtype_reals(p->block * tshi_conv_pitch(p)) + 63) / 64 * 64;
    at[2] = at[1] + (tshi_dtype_reals(p->outs * p->chunk) + 63) / 64 * 64;
    at[3] = at[2] + (tshi_dtype_reals(p->block * p->outs) + 63) / 64 * 64;
    p->each = at[3] + tshi_gemm_scratch(kernel, p->block, p->outs, p->chunk, p->outs, 1);
    p->each = (p->each + 63) / 64 * 64;
}

/* Returns the parts of a piece's scratch. */
static tshi_conv_weight_scratch tshi_conv_weight_split(const tshi_conv_weights *p, int piece) {
    tshi_conv_weight_scratch w;
    char *at = p->scratch + (size_t)piece * p->each;
    w.places.place = (tshi_conv_place *)(void *)at;
    w.places.start = (int *)(void *)(w.places.place + p->source.taps * p->source.nr);
    w.rows = (tsh_real *)(void *)(at + p->at[0]);
    w.map = (tsh_real *)(void *)(at + p->at[1]);
    w.sums = (tsh_real *)(void *)(at + p->at[2]);
    w.gemm = at + p->at[3];
    return w;
}

/* Returns the map's values of a group in columns [from, from + n) as a matrix (outs, n): in place
 * if they are of one image, else copied. */
static tshi_matrix tshi_conv_map(const tshi_conv_weights *p, int64_t group, int64_t from, int64_t n,
                                 tsh_real *copy) {
    const int64_t area = tshi_conv_area(p->source.grid), image = p->source.groups * p->outs * area;
    const tsh_real *map = p->map + group * p->outs * area;
    if (from % area + n <= area)
        return tshi_gemm_matrix(
            (tsh_real *)tshi_kernel_unconst(map + from / area * image + from % area), area, 1);
    for (int64_t done = 0, length; done < n; done += length) {
        const tsh_real *x = map + (from + done) / area * image + (from + done) % area;
        length = tshi_base_min(n - done, area - (from + done) % area);
        for (int64_t i = 0; i < p->outs; i++)
            tshi_kernel_move_dense(copy + i * n + done, x + i * area,
                                   (size_t)length * sizeof *copy);
    }
    return tshi_gemm_matrix(copy, n, 1);
}

/* Writes rows [k0, k0 + n) of a group's dW^T, `sums` (n, outs), to dW. */
static void tshi_conv_turn(const tshi_conv_weights *p, const tsh_real *sums, int64_t group,
                           int64_t k0, int64_t n) {
    enum { SIDE = 16 }; /* rows and columns that are transposed at a time */
    for (int64_t i = 0; i < n; i += SIDE)
        for (int64_t j = 0; j < p->outs; j += SIDE)
            for (int64_t oc = j; oc < tshi_base_min(j + SIDE, p->outs); oc++) {
                tsh_real *to = p->dest.data + (group * p->outs + oc) * p->k + k0;
                const int64_t end = tshi_base_min(i + SIDE, n);
                for (int64_t k = i; k < end && p->dest.add; k++) to[k] += sums[k * p->outs + oc];
                for (int64_t k = i; k < end && !p->dest.add; k++) to[k] = sums[k * p->outs + oc];
            }
}

/* Computes rows [k0, k0 + n) of a group's dW^T. progress: see tshi_product. */
static void tshi_conv_weight_block(const tshi_conv_weights *p, tshi_conv_weight_scratch *w,
                                   int64_t group, int64_t k0, int64_t n,
                                   const tshi_gemm_progress *progress) {
    const tshi_conv_source *s = &p->source;
    const int64_t pitch = tshi_conv_pitch(p);
    tshi_conv_rows rows = {s->data + group * s->channels * tshi_conv_area(s->size), k0, k0 + n,
                           pitch, NULL};
    const tshi_matrix sums = tshi_gemm_matrix(w->sums, p->outs, 1);
    for (int64_t from = 0; from < p->columns; from += p->chunk) {
        const int64_t length = tshi_base_min(p->chunk, p->columns - from);
        const tshi_matrix b = tshi_gemm_transposed(tshi_conv_map(p, group, from, length, w->map));
        const tshi_matrix a = tshi_gemm_matrix(w->rows, pitch, 1);
        const tshi_product x = {n, p->outs, length, 1,    TSHI_R(from > 0),
                                a, b,       sums,   sums, progress};
        for (int64_t at = 0; at < length; at += s->nr) {
            rows.to = w->rows + at;
            tshi_conv_locate(s, from + at, (int)tshi_base_min(s->nr, length - at), &w->places);
            tshi_conv_pack(s, &w->places, &rows);
        }
        tshi_gemm_run(p->ctx->gemm_kernel, w->gemm, x);
    }
    tshi_conv_turn(p, w->sums, group, k0, n);
}

/* Computes strips [from, to) of dW^T, mr rows each, of all groups (a tshi_team_fn). */
static void tshi_conv_weight_piece(void *job, int piece, int64_t from, int64_t to) {
    const tshi_conv_weights *p = (const tshi_conv_weights *)job;
    const int64_t mr = p->ctx->gemm_kernel->mr;
    const tshi_gemm_progress progress = {tshi_tape_progress, p->ctx, 0};
    tshi_conv_weight_scratch w = tshi_conv_weight_split(p, piece);
    for (int64_t n; from < to; from += n) {
        const int64_t first = from % p->strips, left = tshi_base_min(to - from, p->strips - first);
        n = tshi_gemm_even(left, p->block / mr, 1);
        if (n > left) n = left;
        tshi_conv_weight_block(p, &w, from / p->strips, first * mr,
                               tshi_base_min(n * mr, p->k - first * mr), piece ? NULL : &progress);
    }
}

/* Computes the gradient of the weight (OC, IC / groups, KH, KW) from an image (N, IC, H, W) and a
 * map (N, OC, OH, OW), one of which is a gradient. */
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
    p.block = tshi_base_min(TSHI_CONV_BLOCK / kernel->mr, p.strips) * kernel->mr;
    pieces = tshi_team_parts(ctx, total * (p.columns + 1), MIN_WORK);
    pieces = (int)tshi_base_min(pieces, p.strips * c->groups);
    tshi_conv_weight_layout(&p);
    scratch = tshi_mem_alloc(ctx, TSH_MEM_STEP, tshi_base_mul(p.each, (size_t)pieces));
    if (scratch && p.columns) {
        p.scratch = (char *)tshi_mem_data(scratch);
        tshi_team_run(pieces, p.strips * c->groups, 1, tshi_conv_weight_piece, &p);
    } else if (scratch && !dest->add) { /* no images: the gradient is 0 */
        memset(dest->data, 0, tshi_dtype_reals(total));
    }
    if (ctx->trace) ctx->trace->flops += 2.0 * (double)total * (double)p.columns;
    tshi_mem_release(ctx, scratch);
    tshi_mem_release(ctx, taps);
}
