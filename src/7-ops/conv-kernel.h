/* ========================================================================== */
/* >>conv-kernel                                MARK: - conv-kernel (private) */
/* Convolutions as products: gather (image to map), scatter (map to image).   */
/* Needs: >>op-matmul >>conv-pack.                                            */
/* ========================================================================== */

/* Two products compute all convolutions; image and map are the input and output of a convolution,
 * as in >>conv. `gather` computes the map from the image. `scatter` computes the image, or its
 * gradient, from the map. With strides SY and SX, it treats each of the SY * SX phases, the image
 * elements (y, x) of equal y % SY and x % SX, by itself: as a gather from the map, with those taps
 * (elements of the kernel) that reach the phase. So no sum is written twice, and each element has
 * one order of additions: over channels, within a channel over taps. It depends on the sizes of
 * channels and kernel alone. */

/* A product C = A B of a convolution: A is the weight, a column of B (see >>conv-pack) what the
 * kernel covers at one position, and C (rows, columns) is written to images. */
typedef struct tshi_conv_product {
    tsh_ctx *ctx;
    const tshi_gemm_kernel *kernel;
    tshi_conv_source source; /* what B is read from */
    int64_t rows, k;         /* rows of A per group; columns of A: channels * taps */
    const tsh_real *weight;
    /* strides of the weight: from group to group, row to row, channel to channel */
    int64_t next_group, next_row, next_channel;
    tsh_real *strips;                   /* A packed: shape (groups, strips of mr rows, k, mr) */
    const tsh_real *bias;               /* shape (groups * rows), added to each column; or NULL */
    tsh_real *to;                       /* C as images (batch, groups * rows, size[0], size[1]) */
    int64_t size[2], start[2], step[2]; /* column (y, x) of C goes to start + (y, x) * step */
    int add;                            /* 1: adds C to the values of `to`, 0: overwrites them */
    int64_t columns, slivers, slice;    /* columns of B; its slivers; its rows in a slice */
    int64_t blocks, block;              /* number of blocks of rows of A; rows of a block */
    int64_t panel;                      /* slivers that are computed together, slice by slice */
    char *scratch;                      /* scratch memory of all pieces */
    size_t each;                        /* bytes of scratch of one piece */
} tshi_conv_product;

/* The scratch memory of one piece, or thread, of a tshi_conv_product. */
typedef struct tshi_conv_scratch {
    tshi_conv_places places;
    tsh_real *sliver; /* shape (slice, nr): a sliver of a slice of B, packed */
    tsh_real *sums;   /* shape (slivers of a panel, rows of a block, nr): C of slivers that are not
                       * written in place */
} tshi_conv_scratch;

enum {
    TSHI_CONV_SLICE = 256,    /* max rows of B in a slice: its packed sliver fits an L1 cache */
    TSHI_CONV_SUMS = 1 << 19, /* max elements of the sums of a panel: they fill an L2 cache */
    TSHI_CONV_ROWS = 768      /* max rows of A in a block: a slice of it takes at most half an L2
                               * cache */
};

/* -- packing the weight ------------------------------------------------------ */

/* Packs strips [from, to) of A, mr rows of the weight each, counted over all groups (a
 * tshi_team_fn). */
static void tshi_conv_pack_strips(void *job, int piece, int64_t from, int64_t to) {
    const tshi_conv_product *p = (const tshi_conv_product *)job;
    const tshi_conv_source *s = &p->source;
    const int mr = p->kernel->mr;
    const int64_t strips = tshi_base_ceil(p->rows, mr);
    tsh_real *y = p->strips + from * p->k * mr;
    (void)piece;
    for (int64_t u = from; u < to; u++) {
        const int64_t first = u % strips * mr, valid = tshi_base_min(mr, p->rows - first);
        const tsh_real *w = p->weight + u / strips * p->next_group + first * p->next_row;
        if (p->next_channel == s->taps) { /* a row of A is contiguous in the weight */
            tshi_gemm_pack(y, mr, (int)valid, p->k, w, p->next_row, 1);
            y += p->k * mr;
            continue;
        }
        for (int64_t c = 0; c < s->channels; c++, w += p->next_channel)
            for (int64_t t = 0; t < s->taps; t++, y += mr) {
                const tsh_real *at = w + s->tap[t].index;
                for (int64_t i = 0; i < valid; i++) y[i] = at[i * p->next_row];
                for (int64_t i = valid; i < mr; i++) y[i] = 0;
            }
    }
}

/* -- a panel of C ------------------------------------------------------------- */

/* Returns the address in p->to of row `row` of C (channel of an image, of all groups) at a run's
 * first column. */
static tsh_real *tshi_conv_at(const tshi_conv_product *p, const tshi_conv_run *run, int64_t row) {
    return p->to +
           ((run->image * p->source.groups * p->rows + row) * p->size[0] + p->start[0] +
            run->y * p->step[0]) *
               p->size[1] +
           p->start[1] + run->x * p->step[1];
}

/* Returns the address in p->to at which micro-kernels can write row `row` of a sliver of C
 * directly; NULL: they cannot, since the sliver's columns are not contiguous there, or fewer than a
 * tile has. */
static tsh_real *tshi_conv_direct(const tshi_conv_product *p, int64_t column, int cols,
                                  int64_t row) {
    const int64_t area = tshi_conv_area(p->source.grid);
    const int dense = p->step[0] == 1 && p->step[1] == 1 && p->size[0] == p->source.grid[0] &&
                      p->size[1] == p->source.grid[1];
    if (!dense || (cols != p->kernel->nr && cols != p->kernel->nr / 2) ||
        column % area + cols > area)
        return NULL;
    return p->to + (column / area * p->source.groups * p->rows + row) * area + column % area;
}

/* Adds the bias to rows [row, row + rows) of a sliver of C that is written in place, at `to`. */
static void tshi_conv_add_bias(const tshi_conv_product *p, tsh_real *to, int cols, int64_t row,
                               int64_t rows) {
    const int64_t area = tshi_conv_area(p->size);
    for (int64_t i = 0; i < rows && p->bias; i++, to += area) {
        const tsh_real b = p->bias[row + i];
        for (int j = 0; j < cols; j++) to[j] += b;
    }
}

#if TSHI_X86 && TSHI_GEMM_FLOAT
/* Does what tshi_conv_store_row does, for a step of 2: 8 elements at a time, at even lanes. */
TSHI_AVX512 static void tshi_conv_store_even(float *to, const float *from, int n, float b,
                                             int add) {
    for (int j = 0; j < n; j += 8) {
        const __mmask16 in = (__mmask16)((1u << tshi_base_min(8, n - j)) - 1u);
        const __mmask16 out = (__mmask16)(0x5555u & ((1u << 2 * tshi_base_min(8, n - j)) - 1u));
        __m512 y = _mm512_maskz_expand_ps(out, _mm512_maskz_loadu_ps(in, from + j));
        y = _mm512_add_ps(y, _mm512_set1_ps(b));
        if (add) y = _mm512_add_ps(_mm512_maskz_loadu_ps(out, to + 2 * j), y);
        _mm512_mask_storeu_ps(to + 2 * j, out, y);
    }
}
#endif

/* Writes n values of `from`, plus the bias b, to elements of `to` that are p->step[1] apart, or
 * adds them if p->add is 1. */
static void tshi_conv_store_row(const tshi_conv_product *p, tsh_real *to, const tsh_real *from,
                                int n, tsh_real b) {
    const int64_t step = p->step[1];
#if TSHI_X86 && TSHI_GEMM_FLOAT
    if (step == 2 && p->source.isa == TSHI_ISA_AVX512) {
        tshi_conv_store_even(to, from, n, b, p->add);
        return;
    }
#endif
    if (p->add)
        for (int j = 0; j < n; j++) to[j * step] += from[j] + b;
    else
        for (int j = 0; j < n; j++) to[j * step] = from[j] + b;
}

/* Writes rows [row, row + rows) of a sliver of C from `sums` to the images, plus the bias. */
static void tshi_conv_store(const tshi_conv_product *p, const tsh_real *sums, int64_t column,
                            int cols, int64_t row, int64_t rows) {
    tshi_conv_run run[TSHI_CONV_LANES];
    const int runs = tshi_conv_cut(&p->source, column, cols, TSHI_CONV_LANES, run);
    const int64_t next = tshi_conv_area(p->size);
    for (int r = 0; r < runs; r++) {
        tsh_real *to = tshi_conv_at(p, &run[r], row);
        const tsh_real *from = sums + run[r].lane;
        for (int64_t i = 0; i < rows; i++, to += next, from += p->kernel->nr)
            tshi_conv_store_row(p, to, from, run[r].length, p->bias ? p->bias[row + i] : 0);
    }
}

/* Computes C = A B + D, where B is a packed sliver of `steps` rows; shapes: A (rows, steps), C and
 * D (rows, cols rounded up to half a tile). d NULL: C = A B. */
static void tshi_conv_tiles(const tshi_gemm_kernel *kernel, int64_t rows, int cols, int64_t steps,
                            tshi_matmul_strips a, const tsh_real *b, const tshi_matrix *d,
                            tshi_matrix c) {
    const char *const cached = (const char *)b; /* B is in cache: nothing to prefetch */
    tshi_gemm_walk walk = {cached, cached, cached, 0, 0, 0};
    tshi_gemm_tile t;
    t.walk = &walk;
    t.k = steps;
    t.rsa = a.row;
    t.csa = a.column;
    t.b = b;
    t.rsb = kernel->nr;
    t.csb = 1;
    t.form = TSHI_GEMM_REALS;
    t.alpha = 1;
    t.add = d != NULL;
    t.rsc = c.row;
    t.rsd = d ? d->row : c.row;
    t.sums = NULL;
    for (int64_t i = 0; i < rows; i += kernel->mr) {
        t.a = a.data + i * a.next;
        t.c = tshi_gemm_at(c, i, 0);
        t.d = d ? tshi_gemm_at(*d, i, 0) : t.c;
        kernel->tile(&t, (int)tshi_base_min(kernel->mr, rows - i),
                     cols > kernel->nr / 2 ? kernel->nr : kernel->nr / 2);
    }
}

/* Adds the product of one slice, the rows [k0, k1) of B in *copied, to rows [row, row + rows) of C
 * (counted over all groups) in the sliver that begins at `column`. strips: the slice's columns of
 * A; own: the sums of earlier slices. A sliver that can be written in place is written once, by the
 * last slice. */
static void tshi_conv_slice(const tshi_conv_product *p, tshi_conv_scratch *w,
                            const tshi_conv_rows *copied, const tsh_real *strips, int64_t column,
                            int64_t row, int64_t rows, tsh_real *own) {
    const int mr = p->kernel->mr, nr = p->kernel->nr, first = copied->k0 == 0;
    const int cols = (int)tshi_base_min(nr, p->columns - column), last = copied->k1 == p->k;
    const tshi_matmul_strips a = {strips, 1, mr, p->k};
    tsh_real *direct = tshi_conv_direct(p, column, cols, row);
    const tshi_matrix there = tshi_gemm_matrix(direct, tshi_conv_area(p->size), 1);
    const tshi_matrix sums = tshi_gemm_matrix(own, nr, 1);
    const tshi_matrix *d = !first ? &sums : direct && p->add ? &there : NULL;
    tshi_conv_locate(&p->source, column, cols, &w->places);
    tshi_conv_pack(&p->source, &w->places, copied);
    tshi_conv_tiles(p->kernel, rows, cols, copied->k1 - copied->k0, a, w->sliver, d,
                    last && direct ? there : sums);
    if (last && direct)
        tshi_conv_add_bias(p, direct, cols, row, rows);
    else if (last)
        tshi_conv_store(p, own, column, cols, row, rows);
}

/* Computes n slivers of C from `sliver` on, of one group and one block of rows. */
static void tshi_conv_panel(const tshi_conv_product *p, tshi_conv_scratch *w, int64_t group,
                            int64_t block, int64_t sliver, int64_t n) {
    const int64_t mr = p->kernel->mr, nr = p->kernel->nr;
    const int64_t strips = tshi_base_ceil(p->rows, mr), first = block * p->block;
    const int64_t rows = tshi_base_min(p->block, p->rows - first);
    const int64_t sums = p->slice < p->k ? tshi_base_ceil(p->block, mr) * mr * nr : 0;
    const tsh_real *a = p->strips + (group * strips + first / mr) * p->k * mr;
    int64_t k = 0;
    do { /* if p->k is 0, runs once, with C = 0 */
        const int64_t end = tshi_base_min(k + p->slice, p->k);
        const tshi_conv_rows copied = {p->source.data + group * p->source.channels *
                                                            tshi_conv_area(p->source.size),
                                       k, end, nr, w->sliver};
        for (int64_t i = 0; i < n; i++)
            tshi_conv_slice(p, w, &copied, a + k * mr, (sliver + i) * nr, group * p->rows + first,
                            rows, w->sums + i * sums);
        k = end;
    } while (k < p->k);
}

/* Returns pointers to the parts of a piece's scratch memory. */
static tshi_conv_scratch tshi_conv_split(const tshi_conv_product *p, int piece) {
    tshi_conv_scratch w;
    char *at = p->scratch + (size_t)piece * p->each;
    const int64_t nr = p->kernel->nr;
    w.sliver = (tsh_real *)(void *)at; /* aligned to a cache line, as p->scratch is */
    w.sums = w.sliver + (p->slice * nr + 15) / 16 * 16;
    at = (char *)(w.sums + tshi_base_ceil(p->block, p->kernel->mr) * p->kernel->mr * nr * p->panel);
    w.places.place = (tshi_conv_place *)(void *)at;
    w.places.start = (int *)(void *)(w.places.place + p->source.taps * nr);
    return w;
}

/* Computes items [from, to) (a tshi_team_fn). Item (block * groups + group) * slivers + sliver is a
 * sliver of C, of one group and one block of rows. */
static void tshi_conv_piece(void *job, int piece, int64_t from, int64_t to) {
    const tshi_conv_product *p = (const tshi_conv_product *)job;
    const int64_t groups = p->source.groups;
    tshi_conv_scratch w = tshi_conv_split(p, piece);
    for (int64_t n; from < to; from += n) {
        const int64_t sliver = from % p->slivers, group = from / p->slivers % groups;
        n = tshi_base_min(tshi_base_min(to - from, p->slivers - sliver), p->panel);
        tshi_conv_panel(p, &w, group, from / p->slivers / groups, sliver, n);
    }
}

/* Cuts the rows of A into blocks, so that there is work for all threads, and sets p->panel. */
static void tshi_conv_divide(tshi_conv_product *p, int threads) {
    const int64_t mr = p->kernel->mr, items = p->slivers * p->source.groups;
    int64_t blocks = tshi_base_ceil(p->rows, TSHI_CONV_ROWS);
    if (blocks < threads && items < 8 * threads) blocks = threads;
    p->block = tshi_base_ceil(tshi_base_ceil(p->rows, blocks), mr) * mr;
    p->blocks = tshi_base_ceil(p->rows, p->block);
    /* the sums of a panel take as much memory as a block of A, which is read once per panel */
    int64_t sums = tshi_base_min(p->block * p->k, TSHI_CONV_SUMS);
    if (sums < TSHI_CONV_SUMS / 8) sums = TSHI_CONV_SUMS / 8;
    p->panel = p->slice < p->k ? sums / (p->block * p->kernel->nr) + 1 : 1;
}

/* Computes the product p on the rank's threads. The caller has set its fields up to `add`, except
 * kernel, k and strips. */
static void tshi_conv_multiply(tshi_conv_product *p) {
    enum { MIN_WORK = 1 << 17 }; /* least number of multiply-adds per thread */
    tsh_ctx *ctx = p->ctx;
    tshi_conv_source *s = &p->source;
    const int nr = ctx->gemm_kernel->nr, mr = ctx->gemm_kernel->mr;
    const int64_t strips = tshi_base_ceil(p->rows, mr);
    tshi_block *packed, *scratch;
    int pieces;
    p->kernel = ctx->gemm_kernel;
    p->columns = s->batch * tshi_conv_area(s->grid);
    p->slivers = tshi_base_ceil(p->columns, nr);
    p->k = s->channels * s->taps;
    if (!p->columns || !p->rows || !s->groups) return; /* this rank has nothing to compute */
    p->slice = p->k <= TSHI_CONV_SLICE ? p->k : tshi_gemm_even(p->k, TSHI_CONV_SLICE, 32);
    s->nr = nr;
    s->block = nr < 16 ? nr : 16;
    s->isa = ctx->isa;
    pieces = tshi_team_parts(ctx, p->columns * p->rows * s->groups * (p->k + 1), MIN_WORK);
    tshi_conv_divide(p, pieces);
    pieces = (int)tshi_base_min(pieces, p->slivers * s->groups * p->blocks);
    p->each = tshi_dtype_reals((p->slice * nr + 15) / 16 * 16 +
                               tshi_base_ceil(p->block, mr) * mr * nr * p->panel);
    p->each = (p->each + tshi_conv_places_bytes(s) + 63) / 64 * 64;
    packed = tshi_mem_alloc(ctx, TSH_MEM_STEP, tshi_dtype_reals(s->groups * strips * mr * p->k));
    scratch = tshi_mem_alloc(ctx, TSH_MEM_STEP, tshi_base_mul(p->each, (size_t)pieces));
    if (packed && scratch) {
        p->strips = (tsh_real *)tshi_mem_data(packed);
        p->scratch = (char *)tshi_mem_data(scratch);
        tshi_team_run(ctx, (int)tshi_base_min(pieces, s->groups * strips), s->groups * strips, 1,
                      tshi_conv_pack_strips, p);
        tshi_team_run(ctx, pieces, p->slivers * s->groups * p->blocks, 1, tshi_conv_piece, p);
    }
    if (ctx->trace)
        ctx->trace->flops += 2.0 * (double)p->columns * (double)p->rows * (double)s->groups *
                             (double)p->k;
    tshi_mem_release(ctx, scratch);
    tshi_mem_release(ctx, packed);
}

/* -- gather and scatter ------------------------------------------------------ */

/* Sets [*from, *to): the grid positions i of [0, grid) with 0 <= i * step + offset < size. */
static void tshi_conv_range(int64_t grid, int64_t step, int64_t offset, int64_t size, int64_t *from,
                            int64_t *to) {
    *from = offset < 0 ? tshi_base_ceil(-offset, step) : 0;
    *to = size > offset ? tshi_base_min(grid, tshi_base_ceil(size - offset, step)) : 0;
}

/* Sets the taps (elements of the kernel) of a gather: which element of the image s each is
 * multiplied with at each position of the kernel. */
static void tshi_conv_taps(const tshi_conv *c, const tshi_conv_source *s, tshi_conv_tap *tap) {
    for (int64_t i = 0; i < s->taps; i++, tap++) {
        const int64_t at[2] = {i / c->kernel[1], i % c->kernel[1]};
        tap->index = i;
        for (int d = 0; d < 2; d++) {
            tap->offset[d] = at[d] * c->dilation[d] - c->padding[d];
            tshi_conv_range(s->grid[d], s->step[d], tap->offset[d], s->size[d], &tap->from[d],
                            &tap->to[d]);
        }
    }
}

/* Returns the source of a gather's matrix B: the images at `data`, with the sizes of c; its columns
 * are the elements of the map. tap: memory for the kernel's taps, which are set. */
static tshi_conv_source tshi_conv_image(const tshi_conv *c, const tsh_real *data,
                                        tshi_conv_tap *tap) {
    tshi_conv_source s;
    memset(&s, 0, sizeof s);
    s.data = data;
    s.batch = c->batch;
    s.groups = c->groups;
    s.channels = c->ins;
    for (int d = 0; d < 2; d++) {
        s.size[d] = c->image[d];
        s.step[d] = c->stride[d];
        s.grid[d] = c->map[d];
    }
    s.tap = tap;
    s.taps = tshi_conv_area(c->kernel);
    tshi_conv_taps(c, &s, tap);
    return s;
}

/* Allocates the taps of c's kernel in *block. Returns NULL if there is no memory. */
static tshi_conv_tap *tshi_conv_alloc_taps(tsh_ctx *ctx, const tshi_conv *c, tshi_block **block) {
    *block = tshi_mem_alloc(
        ctx, TSH_MEM_STEP, tshi_base_mul((size_t)tshi_conv_area(c->kernel), sizeof(tshi_conv_tap)));
    return *block ? (tshi_conv_tap *)tshi_mem_data(*block) : NULL;
}

/* Computes the map (N, OC, OH, OW) of an image (N, IC, H, W), with bias (OC) or NULL; add 1: adds
 * to it. All arrays are dense. */
static void tshi_conv_gather(tsh_ctx *ctx, const tshi_conv *c, const tsh_real *image,
                             const tsh_real *weight, const tsh_real *bias, tsh_real *map, int add) {
    const int64_t area = tshi_conv_area(c->kernel);
    tshi_block *taps;
    tshi_conv_tap *tap = tshi_conv_alloc_taps(ctx, c, &taps);
    tshi_conv_product p;
    if (!tap) return;
    memset(&p, 0, sizeof p);
    p.ctx = ctx;
    p.source = tshi_conv_image(c, image, tap);
    p.rows = c->outs;
    p.weight = weight;
    p.next_channel = area;
    p.next_row = c->ins * area;
    p.next_group = c->outs * p.next_row;
    p.bias = bias;
    p.to = map;
    p.add = add;
    for (int d = 0; d < 2; d++) {
        p.size[d] = c->map[d];
        p.step[d] = 1;
    }
    tshi_conv_multiply(&p);
    tshi_mem_release(ctx, taps);
}

/* Sets the taps that reach the phase of image elements (y, x) = start + grid * stride: those for
 * which (y + padding - ky * dilation) / stride, a row of the map, is a whole number, as is the
 * column of the map computed alike from x and kx. Returns their number. */
static int64_t tshi_conv_phase(const tshi_conv *c, const int64_t *start, const int64_t *grid,
                               tshi_conv_tap *tap) {
    int64_t n = 0;
    for (int64_t i = 0; i < tshi_conv_area(c->kernel); i++) {
        const int64_t at[2] = {i / c->kernel[1], i % c->kernel[1]};
        int reaches = 1;
        for (int d = 0; d < 2; d++) {
            const int64_t from = start[d] + c->padding[d] - at[d] * c->dilation[d];
            tap[n].offset[d] = from / c->stride[d];
            reaches &= from % c->stride[d] == 0;
            tshi_conv_range(grid[d], 1, tap[n].offset[d], c->map[d], &tap[n].from[d],
                            &tap[n].to[d]);
        }
        tap[n].index = i;
        n += reaches;
    }
    return n;
}

/* Computes one phase, the elements of equal y % SY and x % SX, of the images at p.to. p: weight,
 * bias and data of the product. filled 1: the elements that no tap reaches already have their
 * values. */
static void tshi_conv_scatter_phase(const tshi_conv *c, int64_t phase, tshi_conv_tap *tap,
                                    tshi_conv_product p, int filled) {
    const int64_t across = tshi_base_min(c->stride[1], c->image[1]);
    const int64_t area = tshi_conv_area(c->kernel);
    p.start[0] = phase / across;
    p.start[1] = phase % across;
    p.source.channels = c->outs;
    for (int d = 0; d < 2; d++) {
        p.step[d] = c->stride[d];
        p.source.size[d] = c->map[d];
        p.source.step[d] = 1;
        p.source.grid[d] = tshi_base_ceil(c->image[d] - p.start[d], c->stride[d]);
    }
    p.source.tap = tap;
    p.source.taps = tshi_conv_phase(c, p.start, p.source.grid, tap);
    p.next_row = area;
    p.next_channel = c->ins * area;
    p.next_group = c->outs * p.next_channel;
    if (p.source.taps || !filled) tshi_conv_multiply(&p);
}

/* Fills planes [from, to) of p's images with the bias of their channel, or 0 (a tshi_team_fn). */
static void tshi_conv_fill(void *job, int piece, int64_t from, int64_t to) {
    const tshi_conv_product *p = (const tshi_conv_product *)job;
    const int64_t area = tshi_conv_area(p->size);
    (void)piece;
    for (; from < to; from++) {
        tsh_real *plane = p->to + from * area;
        const tsh_real value = p->bias ? p->bias[from % (p->source.groups * p->rows)] : 0;
        for (int64_t i = 0; i < area; i++) plane[i] = value;
    }
}

/* Computes the image (N, IC, H, W) of a map (N, OC, OH, OW), with bias (IC) or NULL; add 1: adds to
 * it. All arrays are dense. If there are several phases, each writes only a part of every cache
 * line, so all phases of a few images are computed before the next images. */
static void tshi_conv_scatter(tsh_ctx *ctx, const tshi_conv *c, const tsh_real *map,
                              const tsh_real *weight, const tsh_real *bias, tsh_real *image,
                              int add) {
    enum {
        NEAR = 1 << 18, /* elements of the images at a time: they stay in an L2 cache */
        COLUMNS = 512   /* least columns of a phase: for fewer, packing the weight would not pay */
    };
    /* elements of one map and of one image of the batch */
    const int64_t from = c->groups * c->outs * tshi_conv_area(c->map);
    const int64_t to = c->groups * c->ins * tshi_conv_area(c->image);
    const int64_t phases = tshi_base_min(c->stride[0], c->image[0]) *
                           tshi_base_min(c->stride[1], c->image[1]);
    const int64_t least = COLUMNS * phases / tshi_conv_area(c->image);
    const int64_t fit = NEAR / (to + 1) > least ? NEAR / (to + 1) : least;
    const int64_t some = phases > 1 ? fit + 1 : c->batch; /* images computed at a time */
    /* 1: some phase gets no element of the kernel */
    const int hollow = tshi_conv_area(c->kernel) < phases;
    tshi_block *taps;
    tshi_conv_tap *tap = tshi_conv_alloc_taps(ctx, c, &taps);
    tshi_conv_product p;
    if (!tap) return;
    memset(&p, 0, sizeof p);
    p.ctx = ctx;
    p.weight = weight;
    p.bias = bias;
    p.add = add;
    p.rows = c->ins;
    for (int d = 0; d < 2; d++) p.size[d] = c->image[d];
    for (int64_t n = 0; n < c->batch; n += some) {
        p.source.batch = tshi_base_min(some, c->batch - n);
        p.source.groups = c->groups;
        p.source.data = map + n * from;
        p.to = image + n * to;
        if (hollow && !add) {
            const int64_t planes = p.source.batch * c->groups * c->ins;
            tshi_team_run(ctx, tshi_kernel_parts(ctx, planes, tshi_conv_area(c->image)), planes, 1,
                          tshi_conv_fill, &p);
        }
        for (int64_t phase = 0; phase < phases && ctx->error.code == TSH_OK; phase++)
            tshi_conv_scatter_phase(c, phase, tap, p, hollow || add);
    }
    tshi_mem_release(ctx, taps);
}
