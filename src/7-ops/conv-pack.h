/* ========================================================================== */
/* >>conv-pack                                    MARK: - conv-pack (private) */
/* Reads what the kernel of a convolution covers, as columns of a matrix.     */
/* Needs: >>kernel-isa >>gemm >>conv.                                         */
/* ========================================================================== */

/* A convolution is a matrix product per group (im2col: Chellapilla, Puri and Simard, 2006): the
 * weight (rows, k) times a matrix B (k, columns). A column of B has the elements that the kernel
 * covers at one position; its row channel * taps + tap belongs to one element (tap) of the kernel.
 * B is not written as a whole: `nr` columns at a time (a sliver) are copied from the images to
 * where the micro-kernel reads them.
 *
 * The grid has the positions of the kernel on an image. The columns of all images of a batch are
 * numbered together: column ((n * grid[0] + y) * grid[1] + x) is position (y, x) of image n. */

/* A tap is an element of the kernel. At kernel position (y, x) of the grid it is multiplied with
 * element (y step[0] + offset[0], x step[1] + offset[1]) of the image that B is read from. */
typedef struct tshi_conv_tap {
    int64_t offset[2];
    /* grid positions [from, to), along height and width, at which that element is not padding */
    int64_t from[2], to[2];
    int64_t index;          /* index of the tap in the kernel: ky * KW + kx */
} tshi_conv_tap;

/* The images that the matrix B of a convolution is read from, and the grid of the kernel's
 * positions. Arrays: [0] height, [1] width. */
typedef struct tshi_conv_source {
    const tsh_real *data;            /* shape (batch, groups * channels, size[0], size[1]) */
    int64_t batch, groups, channels; /* numbers of images, of groups, of channels per group */
    int64_t size[2], step[2], grid[2];
    const tshi_conv_tap *tap;
    int64_t taps; /* number of taps */
    int nr;       /* columns of B in a sliver, a multiple of `block` */
    int block;    /* columns of a sliver that are copied at a time: 16, or nr if less */
    int isa;      /* which kernels run: TSHI_ISA_... */
} tshi_conv_source;

/* Up to `block` lanes (columns) of one row of B whose values are equally spaced in the images: lane
 * l of [first, first + count) is element at + l * step[1], counted from the start of the row's
 * channel in image 0. */
typedef struct tshi_conv_place {
    int64_t at;
    int first, count;
} tshi_conv_place;

/* Where a sliver of B is read from: the places of tap t and block b are place[start[i]] to
 * place[start[i + 1] - 1], with i = t * blocks + b. All other lanes are padding: 0. */
typedef struct tshi_conv_places {
    tshi_conv_place *place; /* at most taps * nr places */
    int *start;             /* taps * blocks + 1 indices of `place` */
} tshi_conv_places;

/* Adjacent columns of a sliver of B: positions of the kernel within one row of the grid. */
typedef struct tshi_conv_run {
    int64_t image, y, x; /* image and grid position of the first column */
    int lane, length;    /* the first column's lane in the sliver; number of columns */
} tshi_conv_run;

enum { TSHI_CONV_LANES = 32 }; /* max columns of a sliver of any micro-kernel */

/* Returns how many blocks, of s->block columns each, a sliver of B has. */
static int tshi_conv_blocks(const tshi_conv_source *s) {
    return s->nr / s->block;
}

/* Returns how many bytes the tshi_conv_places of one sliver need. */
static size_t tshi_conv_places_bytes(const tshi_conv_source *s) {
    const size_t taps = (size_t)s->taps;
    return tshi_base_mul(taps, (size_t)s->nr * sizeof(tshi_conv_place)) +
           tshi_base_mul(taps, (size_t)tshi_conv_blocks(s) * sizeof(int)) + 128;
}

/* Cuts `cols` columns of B from `column` on into runs, each within one row of the grid and within
 * one block of `most` lanes. Returns the number of runs. */
static int tshi_conv_cut(const tshi_conv_source *s, int64_t column, int cols, int most,
                         tshi_conv_run *run) {
    const int64_t area = tshi_conv_area(s->grid);
    int64_t image = column / area, y = column % area / s->grid[1], x = column % area % s->grid[1];
    int lane = 0, n = 0;
    while (lane < cols) {
        const int rest = (int)tshi_base_min(cols - lane, most - lane % most);
        const int length = (int)tshi_base_min(rest, s->grid[1] - x);
        run[n].image = image;
        run[n].y = y;
        run[n].x = x;
        run[n].lane = lane;
        run[n++].length = length;
        lane += length;
        x += length;
        if (x < s->grid[1]) continue;
        x = 0; /* the next row of the grid */
        if (++y < s->grid[0]) continue;
        y = 0; /* the next image */
        image++;
    }
    return n;
}

/* Finds where in the images the sliver of `cols` columns of B that begins at `column` is read
 * from. */
static void tshi_conv_locate(const tshi_conv_source *s, int64_t column, int cols,
                             tshi_conv_places *places) {
    const int64_t image = s->groups * s->channels * tshi_conv_area(s->size); /* size of an image */
    const int blocks = tshi_conv_blocks(s);
    tshi_conv_run run[TSHI_CONV_LANES];
    const int runs = tshi_conv_cut(s, column, cols, s->block, run);
    int n = 0, *start = places->start;
    for (int64_t t = 0; t < s->taps; t++) {
        const tshi_conv_tap *tap = &s->tap[t];
        int r = 0;
        for (int b = 0; b < blocks; b++) {
            *start++ = n;
            for (; r < runs && run[r].lane < (b + 1) * s->block; r++) {
                const tshi_conv_run *u = &run[r];
                /* the grid columns [from, to) of the run at which the tap is not in the padding */
                const int64_t from = u->x > tap->from[1] ? u->x : tap->from[1];
                const int64_t to = tshi_base_min(u->x + u->length, tap->to[1]);
                tshi_conv_place *p = &places->place[n];
                if (from >= to || u->y < tap->from[0] || u->y >= tap->to[0]) continue;
                p->first = u->lane - b * s->block + (int)(from - u->x);
                p->count = (int)(to - from);
                p->at = u->image * image + (u->y * s->step[0] + tap->offset[0]) * s->size[1] +
                        (from - p->first) * s->step[1] + tap->offset[1];
                n++;
            }
        }
    }
    *start = n;
}

/* The rows of B to copy, and where to: row k of B, k0 <= k < k1, to `to` + (k - k0) * pitch. */
typedef struct tshi_conv_rows {
    const tsh_real *group; /* the first element of the group's first channel, in image 0 */
    int64_t k0, k1, pitch;
    tsh_real *to;
} tshi_conv_rows;

/* Copies one block (s->block columns) of the rows of B that belong to one tap and to `count`
 * channels from c on, from `places` places; lanes outside these become 0. The reference, for any
 * type and processor. */
static void tshi_conv_copy(const tshi_conv_source *s, const tshi_conv_rows *rows,
                           const tshi_conv_place *place, int places, int64_t c, int64_t count,
                           tsh_real *to) {
    const int64_t plane = tshi_conv_area(s->size), step = s->step[1];
    for (int64_t end = c + count; c < end; c++, to += s->taps * rows->pitch) {
        for (int l = 0; l < s->block; l++) to[l] = 0;
        for (int i = 0; i < places; i++) {
            const tshi_conv_place p = place[i];
            const tsh_real *from = rows->group + (c * plane + p.at + p.first * step);
            for (int l = 0; l < p.count; l++) to[p.first + l] = from[l * step];
        }
    }
}

#if TSHI_X86 && TSHI_GEMM_FLOAT
/* Returns the 16 bits of mask moved apart: bit l becomes bit 2 l. */
static uint32_t tshi_conv_spread(uint32_t mask) {
    mask = (mask | mask << 8) & 0x00FF00FFu;
    mask = (mask | mask << 4) & 0x0F0F0F0Fu;
    mask = (mask | mask << 2) & 0x33333333u;
    return (mask | mask << 1) & 0x55555555u;
}

/* Replaces lane l of y, for each bit l of mask, by the float l * step after address `from`. step: 1
 * or 2, a constant after inlining. Elements of other lanes are not read. even: the numbers 0, 2, 4,
 * ... */
TSHI_AVX512 TSHI_INLINE __m512 tshi_conv_lanes(__m512 y, uintptr_t from, uint32_t mask,
                                               const int step, __m512i even) {
    const float *x = (const float *)from;
    if (step == 1) return _mm512_mask_loadu_ps(y, (__mmask16)mask, x);
    const uint32_t wide = tshi_conv_spread(mask);
    const __m512 low = _mm512_maskz_loadu_ps((__mmask16)wide, x);
    const __m512 high = _mm512_maskz_loadu_ps((__mmask16)(wide >> 16), x + 16);
    return _mm512_mask_mov_ps(y, (__mmask16)mask, _mm512_permutex2var_ps(low, even, high));
}

/* Does what tshi_conv_copy does, with AVX-512, for a block whose 16 lanes are read from a single
 * place. from: the address of lane 0 in the first channel, as a number, since it may lie before the
 * images; plane, next: distances of two channels in the images and in the copy. Eight channels are
 * loaded before the first is stored: a load waits for earlier stores to addresses that end in the
 * same 12 bits. */
TSHI_AVX512 TSHI_INLINE void tshi_conv_copy_place(uintptr_t from, int64_t plane, uint32_t mask,
                                                  int64_t count, float *to, int64_t next,
                                                  const int step, __m512i even) {
    const __m512 zero = _mm512_setzero_ps();
    const uintptr_t channel = (uintptr_t)plane * sizeof(float);
    for (; count >= 8; count -= 8, from += 8 * channel, to += 8 * next) {
        __m512 y[8];
#define TSHI_CONV_LOAD(i)  y[i] = tshi_conv_lanes(zero, from + i * channel, mask, step, even);
#define TSHI_CONV_STORE(i) _mm512_storeu_ps(to + i * next, y[i]);
#define TSHI_CONV_EACH8(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
        TSHI_CONV_EACH8(TSHI_CONV_LOAD)
        TSHI_CONV_EACH8(TSHI_CONV_STORE)
#undef TSHI_CONV_EACH8
#undef TSHI_CONV_STORE
#undef TSHI_CONV_LOAD
    }
    for (; count > 0; count--, from += channel, to += next)
        _mm512_storeu_ps(to, tshi_conv_lanes(zero, from, mask, step, even));
}

/* Does what tshi_conv_copy does with AVX-512, for a block of 16 lanes. step: see
 * tshi_conv_lanes. */
TSHI_AVX512 TSHI_INLINE void tshi_conv_copy_step(const tshi_conv_source *s,
                                                 const tshi_conv_rows *rows,
                                                 const tshi_conv_place *place, int places,
                                                 int64_t c, int64_t count, float *to,
                                                 const int step) {
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2,
                                          0);
    const int64_t plane = tshi_conv_area(s->size), next = s->taps * rows->pitch;
    uintptr_t from = (uintptr_t)rows->group + (uintptr_t)(c * plane) * sizeof(float);
    if (places == 1) { /* the usual case: the block lies in one row of the image */
        tshi_conv_copy_place(from + (uintptr_t)place->at * sizeof(float), plane,
                             ((1u << place->count) - 1u) << place->first, count, to, next, step,
                             even);
        return;
    }
    for (int64_t i = 0; i < count; i++, to += next) {
        __m512 y = _mm512_setzero_ps();
        for (int j = 0; j < places; j++) {
            const uint32_t mask = ((1u << place[j].count) - 1u) << place[j].first;
            y = tshi_conv_lanes(y, from + (uintptr_t)place[j].at * sizeof(float), mask, step, even);
        }
        _mm512_storeu_ps(to, y);
        from += (uintptr_t)plane * sizeof(float);
    }
}

/* Does what tshi_conv_copy does with AVX-512, for steps of 1 and 2. */
TSHI_AVX512 static void tshi_conv_copy_avx512(const tshi_conv_source *s, const tshi_conv_rows *rows,
                                              const tshi_conv_place *place, int places, int64_t c,
                                              int64_t count, float *to) {
    if (s->step[1] == 1)
        tshi_conv_copy_step(s, rows, place, places, c, count, to, 1);
    else
        tshi_conv_copy_step(s, rows, place, places, c, count, to, 2);
}
#endif

/* Does what tshi_conv_pack does, for all channels of rows [k0, k1) of B at once. */
static void tshi_conv_pack_some(const tshi_conv_source *s, const tshi_conv_places *places,
                                const tshi_conv_rows *rows) {
    const int blocks = tshi_conv_blocks(s);
    /* channel and tap of row k0, then of row k1 */
    const int64_t from = rows->k0 / s->taps, cut = rows->k0 % s->taps;
    const int64_t to_channel = rows->k1 / s->taps, to_tap = rows->k1 % s->taps;
    for (int64_t t = 0; t < s->taps; t++) {
        /* rows [k0, k1) have those of tap t for the channels [c, end) */
        const int64_t c = from + (t < cut), end = to_channel + (t < to_tap);
        const int64_t k = c * s->taps + t;
        for (int b = 0; b < blocks && c < end; b++) {
            const int *start = &places->start[t * blocks + b], n = start[1] - start[0];
            tsh_real *to = rows->to + (k - rows->k0) * rows->pitch + b * s->block;
#if TSHI_X86 && TSHI_GEMM_FLOAT
            if (s->isa == TSHI_ISA_AVX512 && s->block == 16 && s->step[1] <= 2) {
                tshi_conv_copy_avx512(s, rows, places->place + *start, n, c, end - c, to);
                continue;
            }
#endif
            tshi_conv_copy(s, rows, places->place + *start, n, c, end - c, to);
        }
    }
}

/* Copies rows of a sliver of B, from the places that tshi_conv_locate has found: a few channels at
 * a time, so that what one tap has read is still in cache for the next. (Few, because the planes of
 * channels often begin in the same set of a cache.) */
static void tshi_conv_pack(const tshi_conv_source *s, const tshi_conv_places *places,
                           const tshi_conv_rows *rows) {
    enum { CHANNELS = 16 };
    tshi_conv_rows some = *rows;
    for (; some.k0 < rows->k1; some.k0 = some.k1) {
        some.k1 = tshi_base_min(rows->k1, (some.k0 / s->taps + CHANNELS) * s->taps);
        tshi_conv_pack_some(s, places, &some);
        some.to += (some.k1 - some.k0) * rows->pitch;
    }
}
