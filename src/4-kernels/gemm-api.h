/* ========================================================================== */
/* >>gemm-api                                      MARK: - gemm-api (private) */
/* The built-in matrix product: packing, and cache-blocked loops that call    */
/* micro-kernels. Takes any strides. See HOW IT WORKS in >>gemm.              */
/* Needs: >>gemm-neon >>gemm-amx.                                             */
/* ========================================================================== */

/* -- the micro-kernels ----------------------------------------------------- */

/* The micro-kernels; the fields are those of struct tshi_gemm_kernel. >>isa says which one runs.
 * Block sizes: a block of A (mc * kc floats) fills at most half of an L2 cache, nr columns of B
 * (kc * nr floats) at most an L1 cache (AMX: see tshi_gemm_slice_words); nc limits the scratch
 * memory. */
#if TSHI_GEMM_AMX
static const tshi_gemm_kernel tshi_gemm_kernel_amx = {
    "amx", 32, 32, 256, 384, 1024, tshi_gemm_tile_tall, tshi_gemm_stream_amx, tshi_gemm_few_amx,
    tshi_gemm_tile_amx, TSHI_GEMM_PACK_AVX512, TSHI_GEMM_STORE_AVX512, tshi_gemm_strip_amx,
    tshi_gemm_tiles_amx};
#endif
#if TSHI_GEMM_BF16S
static const tshi_gemm_kernel tshi_gemm_kernel_bf16 = {
    "bf16", 12, 32, 264, 384, 1024, tshi_gemm_tile_avx512, tshi_gemm_stream_bf16,
    tshi_gemm_few_bf16, tshi_gemm_tile_bf16, TSHI_GEMM_PACK_AVX512, TSHI_GEMM_STORE_AVX512, NULL,
    NULL};
#endif
#if TSHI_X86
static const tshi_gemm_kernel tshi_gemm_kernel_avx512 = {
    "avx512", 12, 128 / sizeof(tsh_real), 264, 384, 1024, tshi_gemm_tile_avx512,
    tshi_gemm_stream_x86, TSHI_GEMM_FEW_AVX512, NULL, TSHI_GEMM_PACK_AVX512,
    TSHI_GEMM_STORE_AVX512, NULL, NULL};
static const tshi_gemm_kernel tshi_gemm_kernel_avx2 = {
    "avx2", 6, 64 / sizeof(tsh_real), 132, 384, 1024, tshi_gemm_tile_avx2, tshi_gemm_stream_avx2,
    TSHI_GEMM_FEW_AVX2, NULL, TSHI_GEMM_PACK_AVX2, TSHI_GEMM_STORE_AVX2, NULL, NULL};
#endif
#if TSHI_NEON_PAIRS
static const tshi_gemm_kernel tshi_gemm_kernel_bfmmla = {
    "bfmmla", 12, 8, 132, 384, 1024, tshi_gemm_tile_lanes, tshi_gemm_stream_bfdot, NULL,
    tshi_gemm_tile_bfmmla, tshi_gemm_pack_bfdot, NULL, NULL, NULL};
#endif
#if TSHI_NEON
static const tshi_gemm_kernel tshi_gemm_kernel_neon = {
    "neon", 12, 32 / sizeof(tsh_real), 132, 384, 1024, tshi_gemm_tile_lanes, tshi_gemm_stream_neon,
    NULL, NULL, NULL, NULL, NULL, NULL};
#endif
#if TSHI_VECTORS
static const tshi_gemm_kernel tshi_gemm_kernel_v128 = {
    "v128", 6, 32 / sizeof(tsh_real), 132, 256, 512, tshi_gemm_tile_v128, tshi_gemm_stream_v128,
    NULL, NULL, NULL, NULL, NULL, NULL};
#endif
static const tshi_gemm_kernel tshi_gemm_kernel_c = {
    "c", 4, 2 * TSHI_GEMM_C_STRIP, 128, 256, 512, tshi_gemm_tile_c, NULL, NULL, NULL, NULL, NULL,
    NULL, NULL};

/* -- products: structs, and the loops around micro-kernels ---------------- */

/* A callback that a long product calls every TSHI_GEMM_INTERVAL multiply-adds (0.3 ms at 100
 * GFLOP/s), on the thread that computes the product, so that collectives make progress
 * meanwhile. */
typedef struct tshi_gemm_progress {
    void (*fn)(void *user);
    void *user;     /* argument of fn */
    uintptr_t then; /* address of the matrix that is read after B, to prefetch it; 0: unknown */
} tshi_gemm_progress;

enum { TSHI_GEMM_INTERVAL = 1 << 24 }; /* multiply-adds between two calls of the callback */

/* A product to compute: C = alpha A B + beta D. The shapes are A (m, k), B (k, n), C and
 * D (m, n). */
typedef struct tshi_product {
    int64_t m, n, k;        /* sizes: A is (m, k), B (k, n), C and D (m, n) */
    tsh_real alpha, beta;   /* factors of A B and of D; beta 0: D is not read */
    tshi_matrix a, b, d, c; /* D is C, or does not overlap C. D's strides may be 0: a bias is then
                             * broadcast without a pass of its own. */
    /* callback during a long product, so that collectives make progress; NULL: none */
    const tshi_gemm_progress *progress;
} tshi_product;

/* A product, or the part of one that is being computed: C = alpha A B + D. */
typedef struct tshi_gemm_job {
    const tshi_gemm_kernel *kernel; /* the micro-kernel, which computes the tiles of C */
    tsh_real *pack_a, *pack_b;      /* scratch memory: a packed block of A, a packed panel of B */
    tsh_real *kept;                 /* scratch memory: sums that tshi_gemm_parts keeps */
    int64_t m, n, k;                /* C is (m, n), A is (m, k), B is (k, n) */
    tsh_real alpha;                 /* factor of the product A B */
    int add;                        /* 1: D is added; 0: D is not read */
    tshi_matrix a, b, d, c;         /* the matrices; D may be C */
    tshi_gemm_form form_a, form_b;  /* element forms of A and B after packing */
    /* scratch: sums of a panel of C before the last slice of k; data NULL: they are kept in C */
    tshi_matrix sums;
    int stream; /* 1: the kernel's `stream` computes C without packing B, except its last columns */
    const tshi_gemm_progress *progress; /* callback of a long product; NULL: none */
    int64_t since;                      /* multiply-adds since the callback was last called */
} tshi_gemm_job;

/* Returns a block size, a multiple of `unit`, that cuts `length` into blocks of similar size: no
 * more blocks than a block size of `max` would give. */
static int64_t tshi_gemm_even(int64_t length, int64_t max, int64_t unit) {
    const int64_t blocks = tshi_base_ceil(length, max);
    return tshi_base_ceil(tshi_base_ceil(length, blocks), unit) * unit;
}

/* Returns the form to which packing converts m. pairs: 1 if the product multiplies pairs of
 * bf16. */
static tshi_gemm_form tshi_gemm_form_of(tshi_matrix m, int pairs) {
    if (pairs) return m.dtype == TSH_BF16 ? TSHI_GEMM_PAIRS : TSHI_GEMM_ROUNDED;
    if (m.dtype == TSH_REAL) return TSHI_GEMM_REALS;
    return m.dtype == TSH_BF16 ? TSHI_GEMM_BF16
           : m.dtype == TSH_F16 ? TSHI_GEMM_F16
                                : TSHI_GEMM_OTHER;
}

/* Returns 1 if the kernel multiplies pairs of bf16 and A and B are suited: one is bf16, and the
 * other is bf16 or may be rounded to it. */
static int tshi_gemm_pairs(const tshi_gemm_kernel *kernel, tshi_matrix a, tshi_matrix b) {
    const int short_a = a.dtype == TSH_BF16, short_b = b.dtype == TSH_BF16;
    return kernel->pairs && (short_a || short_b) && (short_a || a.rounds) && (short_b || b.rounds);
}

/* Returns the max length of a slice of k in words. Tiles of AMX multiply so fast that to add the
 * sums of a slice to C takes longer than to read operands from an L2 cache: their slices are twice
 * as long. */
static int64_t tshi_gemm_slice_words(const tshi_gemm_kernel *kernel, int pairs) {
    return kernel->kc * (pairs && kernel->strip ? 2 : 1);
}

/* Returns the length of a slice of k, in elements: whole cache lines, so that slices of an aligned
 * row are aligned. form: that of A after packing. */
static int64_t tshi_gemm_slice(const tshi_gemm_kernel *kernel, tshi_gemm_form form, int64_t k) {
    const int pairs = form >= TSHI_GEMM_PAIRS;
    const int64_t max = tshi_gemm_slice_words(kernel, pairs) * (pairs ? 2 : 1);
    return k <= max ? max : tshi_gemm_even(k, max, 32);
}

/* Stores n values in row i of c, from column j on, converted to c's dtype. */
static void tshi_gemm_store(const tshi_gemm_kernel *kernel, tshi_matrix c, int64_t i, int64_t j,
                            const tsh_real *from, int n) {
    void *const to = tshi_gemm_from(c, i, j).data;
    if (kernel->store && c.column == 1 && (c.dtype == TSH_BF16 || c.dtype == TSH_F16))
        kernel->store(to, from, n, c.dtype);
    else
        tshi_dtypes[c.dtype].store(to, c.column, n, from);
}

/* Computes C = beta D, both of shape (m, n). D may be C. */
static void tshi_gemm_scale(int64_t m, int64_t n, tsh_real beta, tshi_matrix d, tshi_matrix c) {
    for (int64_t i = 0; i < m; i++) {
        if (beta == 1 && d.column == 1 && c.column == 1 && c.dtype == TSH_REAL &&
            d.dtype == TSH_REAL)
            memmove(tshi_gemm_at(c, i, 0), tshi_gemm_at(d, i, 0), (size_t)n * sizeof(tsh_real));
        else
            for (int64_t j = 0; j < n; j++) {
                tsh_real value = 0;
                if (beta != 0)
                    tshi_dtypes[d.dtype].load(tshi_gemm_from(d, i, j).data, 1, 1, &value);
                value *= beta;
                tshi_dtypes[c.dtype].store(tshi_gemm_from(c, i, j).data, 1, 1, &value);
            }
    }
}

/* Computes a tile that the micro-kernel cannot write in place, because the columns of C or D are
 * not contiguous, one of them is not of tsh_real, or fewer columns are left than the tile has. The
 * micro-kernel writes the tile to a buffer, with the same arithmetic, and the columns that exist
 * are copied to C. d, c: D and C from the tile's first element on. */
static void tshi_gemm_edge(const tshi_gemm_kernel *kernel, tshi_gemm_tile_fn tile,
                           const tshi_gemm_tile *t, int rows, int cols, int width, tshi_matrix d,
                           tshi_matrix c) {
    tsh_real buffer[TSHI_GEMM_TILE_MAX];
    tshi_gemm_tile inner = *t;
    inner.bf16 = inner.bf16_d = 0;
    inner.c = buffer;
    inner.rsc = width;
    for (int i = 0; i < rows; i++) TSHI_PREFETCH(tshi_gemm_from(c, i, 0).data);
    if (t->add && (cols < width || d.column != 1 || d.dtype != TSH_REAL)) {
        inner.d = buffer;
        inner.rsd = width;
        for (int i = 0; i < rows; i++) { /* copies D, padded with zeros */
            tshi_dtypes[d.dtype].load(tshi_gemm_from(d, i, 0).data, d.column, cols,
                                      buffer + i * width);
            for (int j = cols; j < width; j++) buffer[i * width + j] = 0;
        }
    }
    tile(&inner, rows, width);
    for (int i = 0; i < rows; i++) /* copies the columns that exist to C */
        tshi_gemm_store(kernel, c, i, 0, buffer + i * width, cols);
}

/* Returns the cache lines to prefetch: those of the nr columns of B that begin at column j and are
 * packed next; none if j >= n. A tile prefetches only a few of them at a time: processors ignore
 * more, or stall. */
TSHI_COLD static tshi_gemm_walk tshi_gemm_next(const tshi_gemm_job *job, int64_t j) {
    /* line: elements of B in a cache line of 64 bytes */
    const int64_t size = tshi_dtypes[job->b.dtype].size, line = 64 / size;
    const int64_t cols = tshi_base_min(job->kernel->nr, job->n - j);
    const int across = job->b.column == 1; /* 1: cache lines lie along rows of B */
    const int64_t count = across ? job->k : cols, length = across ? cols : job->k;
    const char *const b = (const char *)job->b.data;
    tshi_gemm_walk w = {b, b, b, 0, 0, 0};
    if (cols <= 0) return w; /* no line to prefetch */
    w.step = (across ? job->b.row : job->b.column) * size;
    w.along = line * (across ? job->b.column : job->b.row) * size;
    w.left = tshi_base_ceil(length, line) - 1;
    w.at = w.first = b + j * job->b.column * size;
    w.last = w.first + (count - 1) * w.step;
    return w;
}

/* Returns how many columns the kernel's `stream`, which does not pack B, computes at a time, a
 * multiple of nr: as many as the memory for packed B has space for, where their sums are kept.
 * Returns 0 if `stream` cannot compute the product. */
static int64_t tshi_gemm_streams(const tshi_gemm_job *job) {
    const tshi_gemm_kernel *kernel = job->kernel;
    const int takes_b = job->form_b == TSHI_GEMM_REALS ||
                        (kernel->pack && job->form_b != TSHI_GEMM_OTHER &&
                         job->form_b != TSHI_GEMM_ROUNDED);
    if (!kernel->stream || job->m > TSHI_GEMM_FEW || !takes_b || job->b.column != 1 ||
        job->d.column != 1 || job->c.column != 1 || job->c.dtype != TSH_REAL ||
        job->d.dtype != TSH_REAL)
        return 0;
    if (job->form_b == TSHI_GEMM_REALS && (job->n == kernel->nr || job->n == kernel->nr / 2))
        return 0; /* one tile has all columns: it keeps their sums in registers */
    return kernel->nr * (tshi_base_min(job->k, kernel->kc) / job->m);
}

/* Computes the first `columns` columns of C by the kernel's `stream`. The caller has set the fields
 * of t for A, alpha, and the row strides of C and D. */
static void tshi_gemm_streamed(tshi_gemm_job *job, tshi_gemm_tile *t, int64_t columns) {
    t->b = (const tsh_real *)job->b.data;
    t->rsb = job->b.row;
    t->form = job->form_b;
    t->slice = job->k;
    t->d = tshi_gemm_at(job->d, 0, 0);
    t->c = tshi_gemm_at(job->c, 0, 0);
    t->sums = job->pack_b; /* the memory of packed B is not in use yet */
    job->kernel->stream(t, (int)job->m, (int)columns);
    job->since += job->m * columns * job->k;
}

/* Computes columns j to j + cols - 1 of C, in tiles of up to mr rows and `width` >= cols columns.
 * The caller has set the fields of t for A and B. next: distance between rows of A in elements of
 * t->a: the tile that begins at row i reads A from t->a + i * next on, packed or not. */
static void tshi_gemm_sliver(const tshi_gemm_job *job, tshi_gemm_tile_fn tile, int mr,
                             tshi_gemm_tile *t, int64_t next, int64_t j, int cols, int width) {
    const tshi_gemm_word *a = t->a;
    /* direct: 1 if tiles are written to C in place */
    const int direct = cols == width && job->c.column == 1 && job->d.column == 1 &&
                       (job->c.dtype == TSH_REAL || t->bf16) &&
                       (!t->add || job->d.dtype == TSH_REAL || t->bf16_d);
    for (int64_t i = 0; i < job->m; i += mr) {
        const int rows = (int)tshi_base_min(mr, job->m - i);
        t->a = a + i * next;
        t->d = (const tsh_real *)tshi_gemm_from(job->d, i, j).data;
        t->c = direct ? (tsh_real *)tshi_gemm_from(job->c, i, j).data : NULL;
        t->kept = job->kept + i * job->kernel->nr;
        if (direct)
            tile(t, rows, width);
        else
            tshi_gemm_edge(job->kernel, tile, t, rows, cols, width, tshi_gemm_from(job->d, i, j),
                           tshi_gemm_from(job->c, i, j));
    }
    t->a = a;
}

/* Does what tshi_gemm_sliver does for tiles of AMX whose nr columns of B would fill an L1 cache: in
 * parts of k, each for all rows. Between the parts, sums are kept in job->kept; the order of
 * additions is the same as in one part. */
TSHI_COLD static void tshi_gemm_parts(const tshi_gemm_job *job, tshi_gemm_tile_fn tile, int mr,
                            tshi_gemm_tile *t, int64_t next, int64_t j, int cols, int width) {
    enum { MOST = 256 }; /* max length of a part of k, in words */
    const tshi_gemm_tile all = *t;
    const int64_t part = tshi_gemm_even(all.k, MOST, 16);
    for (t->k = part; all.k - (t->a - all.a) / all.csa > part; t->a += part * all.csa) {
        const tshi_gemm_word *a = t->a;
        t->more = 1;
        for (int64_t i = 0; i < job->m; i += mr) {
            t->a = a + i * next;
            t->kept = job->kept + i * job->kernel->nr;
            tile(t, (int)tshi_base_min(mr, job->m - i), width);
        }
        t->a = a;
        t->b += part * t->rsb;
        t->later = 1;
    }
    t->more = 0;
    t->k = all.k - (t->a - all.a) / all.csa;
    tshi_gemm_sliver(job, tile, mr, t, next, j, cols, width);
    t->a = all.a;
    t->k = all.k;
    t->later = 0;
}

/* Counts `products` more multiply-adds; calls the callback after every TSHI_GEMM_INTERVAL of
 * them. */
static void tshi_gemm_count(tshi_gemm_job *job, int64_t products) {
    job->since += products;
    if (!job->progress || job->since < TSHI_GEMM_INTERVAL) return;
    job->progress->fn(job->progress->user);
    job->since = 0;
}

/* Returns the cache lines to prefetch: those of nr packed columns of B from column j on; none if
 * j >= n. words: words of a packed column. */
TSHI_COLD static tshi_gemm_walk tshi_gemm_next_packed(const tshi_gemm_job *job, int64_t j,
                                                     int64_t words) {
    const char *const b = (const char *)(job->pack_b + (j < job->n ? j * words : 0));
    const int64_t bytes = words * job->kernel->nr * (int64_t)sizeof(tsh_real);
    const tshi_gemm_walk w = {b, b, b + (j < job->n ? (bytes - 1) / 64 * 64 : 0), 64, 0, 0};
    return w;
}

/* Returns 1 if the tiles of AMX can read this job's A in place: rows of pairs of bf16 that fill
 * whole cache lines. (Not if rows are a multiple of 4 KiB apart: all of them would compete for one
 * set of the L1 cache.) */
static int tshi_gemm_in_place(const tshi_gemm_job *job) {
    return job->kernel->strip && !job->stream && job->form_a == TSHI_GEMM_PAIRS &&
           job->a.column == 1 && job->k % 32 == 0 && job->a.row % 32 == 0 &&
           job->a.row % 2048 != 0 && (uintptr_t)job->a.data % 64 == 0;
}

/* Multiplies one block of A and one panel of B: C(m, n) = D + alpha A(m, k) B(k, n), where m <= mc
 * and k is one slice. first: 1 for the first block of rows, which packs the panel; last: 1 for the
 * last block. If both are 1, all slivers of the panel (nr columns each) are packed into the same
 * memory, one after the other. */
static void tshi_gemm_block(tshi_gemm_job *job, int first, int last) {
    const tshi_gemm_kernel *kernel = job->kernel;
    const int mr = kernel->mr, nr = kernel->nr, only = first && last;
    const int convert_a = job->form_a != TSHI_GEMM_REALS, convert_b = job->form_b > TSHI_GEMM_REALS;
    /* pairs: 1 if AMX reads A in place; pack_a: 1 if the block of A is packed, 0 if it is not */
    const int pairs = tshi_gemm_in_place(job);
    const int pack_a = !pairs && (convert_a || (job->n > 4 * nr && job->m > 1));
    /* words: number of tsh_real that a row of A or a column of B takes when packed */
    const int64_t words = tshi_gemm_words(job->form_a, job->k);
    const int strips = kernel->strip && job->form_a >= TSHI_GEMM_PAIRS; /* 1: packs A by `strip` */
    /* next: words from row to row of A */
    const int64_t next = pairs     ? job->a.row / 2
                         : !pack_a ? job->a.row
                         : strips  ? tshi_base_ceil(words, 16) * 16
                                   : words;
    const int pack_b = convert_b || job->b.column != 1 || job->m > 2 * mr || !only;
    const int64_t unit = nr < 16 ? nr / 2 : job->form_b == TSHI_GEMM_PAIRS ? 16 : 8;
    const int64_t streamed = job->stream ? job->n / unit * unit : 0;
    const tshi_gemm_tile_fn tile = job->form_a >= TSHI_GEMM_PAIRS ? kernel->pairs : kernel->tile;
    tshi_gemm_walk walk = tshi_gemm_next(job, job->n); /* no cache lines to prefetch yet */
    tshi_gemm_tile t;
    for (int64_t i = 0; pack_a && i < job->m; i += mr) {
        const tshi_matrix from = tshi_gemm_from(job->a, i, 0);
        const int rows = (int)tshi_base_min(mr, job->m - i);
        if (strips)
            kernel->strip(job->pack_a + i * next, rows, job->k, &from, job->form_a);
        else
            tshi_gemm_pack_matrix(kernel, job->pack_a + i * next, mr, rows, job->k, from,
                                  job->form_a);
    }
    t.bf16 = kernel->tiles && tile == kernel->pairs && job->c.dtype == TSH_BF16;
    t.bf16_d = kernel->tiles && tile == kernel->pairs && job->d.dtype == TSH_BF16;
    t.walk = &walk;
    t.later = t.more = 0;
    t.k = words;
    t.alpha = job->alpha;
    t.add = job->add;
    t.rsd = job->d.row;
    t.rsc = job->c.row;
    t.rsa = !pack_a ? next : strips ? 16 : 1;
    t.csa = pack_a ? mr : job->a.column;
    t.a = pack_a ? job->pack_a : (const tsh_real *)job->a.data;
    if (streamed > 0) tshi_gemm_streamed(job, &t, streamed); /* A has few rows: B is streamed */
    for (int64_t j = streamed; j < job->n; j += nr) {
        const int cols = (int)tshi_base_min(nr, job->n - j), width = cols > nr / 2 ? nr : nr / 2;
        t.b = (const tsh_real *)tshi_gemm_from(job->b, 0, j).data;
        t.rsb = job->b.row;
        t.csb = job->b.column;
        walk = first ? tshi_gemm_next(job, pack_b ? j + nr : job->n)
                     : tshi_gemm_next_packed(job, j + nr, words);
        if (pack_b || cols < width) { /* B is packed, not read in place */
            tsh_real *sliver = job->pack_b + (only ? 0 : j * words);
            const tshi_matrix columns = tshi_gemm_transposed(tshi_gemm_from(job->b, 0, j));
            if (first)
                tshi_gemm_pack_matrix(kernel, sliver, width, cols, job->k, columns, job->form_b);
            t.b = sliver;
            t.rsb = width;
            t.csb = 1;
        }
        if (strips)
            tshi_gemm_parts(job, tile, mr, &t, next, j, cols, width);
        else
            tshi_gemm_sliver(job, tile, mr, &t, next, j, cols, width);
        tshi_gemm_count(job, job->m * cols * job->k);
    }
}

/* Computes a product of few rows by the kernel's `few`, and removes the computed columns from the
 * job. `few` takes multiples of nr / 2 columns. To compute the last n % (nr / 2) columns, it is
 * called for the last nr / 2 with a buffer as output. If n < nr / 2, or D is read and its columns
 * are not contiguous or not of tsh_real, these last columns stay in the job. */
static void tshi_gemm_few(tshi_gemm_job *job) {
    const tshi_gemm_kernel *kernel = job->kernel;
    const int half = kernel->nr / 2, width = tshi_gemm_few_width(job->m), m = (int)job->m;
    /* columns per call of `few`: if it cannot write C in place, as many as tshi_gemm_edge's buffer
     * has space for */
    const int in_c = job->c.column == 1 && job->d.column == 1 && job->c.dtype == TSH_REAL &&
                     job->d.dtype == TSH_REAL;
    const int64_t most = in_c ? 8 * kernel->nr
                             : TSHI_GEMM_TILE_MAX / (kernel->nr * m) * kernel->nr;
    const int rest = (int)(job->n % half);
    int64_t columns = job->n - rest;
    tsh_real buffer[TSHI_GEMM_TILE_MAX];
    tshi_gemm_tile t;
    if (!columns) return;
    /* pairs: 1 if a contiguous row of A is laid out in memory as packed pairs of bf16 are */
    const int pairs = job->form_a == TSHI_GEMM_PAIRS && job->k % 2 == 0 &&
                      (uintptr_t)job->a.data % sizeof(tsh_real) == 0;
    const int in_place = m == 1 && job->a.column == 1 && (pairs || job->form_a == TSHI_GEMM_REALS);
    if (!in_place)
        tshi_gemm_pack_matrix(kernel, job->pack_a, width, m, job->k, job->a, job->form_a);
    t.rsa = t.csa = t.rsb = 0; /* not used by `few`, like sums and walk */
    t.sums = NULL;
    t.walk = NULL;
    t.bf16 = t.bf16_d = 0; /* `few` reads and writes floats */
    t.then = job->progress ? job->progress->then : 0;
    t.k = job->k;
    t.slice = tshi_gemm_slice(kernel, job->form_a, job->k);
    t.a = in_place ? (const tsh_real *)job->a.data : job->pack_a;
    t.csb = job->b.column;
    t.form = job->form_b;
    t.alpha = job->alpha;
    t.add = job->add;
    t.rsd = job->d.row;
    t.rsc = job->c.row;
    for (int64_t j = 0, cols; j < columns; j += cols) {
        cols = tshi_base_min(most, columns - j);
        t.b = (const tsh_real *)tshi_gemm_from(job->b, 0, j).data;
        t.after = columns - j - cols;
        tshi_gemm_sliver(job, kernel->few, TSHI_GEMM_FEW_ROWS, &t, 0, j, (int)cols, (int)cols);
        tshi_gemm_count(job, job->m * cols * job->k);
    }
    if (rest > 0 && (!job->add || (job->d.column == 1 && job->d.dtype == TSH_REAL))) {
        t.b = (const tsh_real *)tshi_gemm_from(job->b, 0, job->n - half).data;
        t.d = (const tsh_real *)tshi_gemm_from(job->d, 0, job->n - half).data;
        t.c = buffer;
        t.rsc = half;
        kernel->few(&t, m, half);
        for (int i = 0; i < m; i++)
            tshi_gemm_store(kernel, job->c, i, columns, buffer + (i + 1) * half - rest, rest);
        columns = job->n;
    }
    job->n -= columns;
    if (job->n == 0) return;
    job->b = tshi_gemm_from(job->b, 0, columns);
    job->c = tshi_gemm_from(job->c, 0, columns);
    job->d = tshi_gemm_from(job->d, 0, columns);
}

/* Returns the width, in columns of B and C, of the panels that tshi_gemm_blocks computes one after
 * the other. */
static int64_t tshi_gemm_panel(const tshi_gemm_job *all, int64_t mc) {
    const tshi_gemm_kernel *kernel = all->kernel;
    const int64_t stream = tshi_gemm_streams(all);
    if (stream > 0) return stream;
    if (all->sums.data || all->m > mc) return kernel->nc;
    return all->m <= TSHI_GEMM_THIN && all->k > kernel->kc ? kernel->nr : all->n;
}

/* Runs the three outer loops of HOW IT WORKS in >>gemm: over panels of columns (jc), slices of k
 * (pc) and blocks of rows (ic). */
TSHI_COLD static void tshi_gemm_blocks(const tshi_gemm_job *all) {
    const tshi_gemm_kernel *kernel = all->kernel;
    const int64_t mc = tshi_gemm_even(all->m, kernel->mc, kernel->mr);
    const int64_t kc = tshi_gemm_slice(kernel, all->form_a, all->k);
    const int64_t nc = tshi_gemm_panel(all, mc);
    tshi_gemm_job part = *all;
    part.stream = tshi_gemm_streams(all) > 0;
    for (int64_t j = 0; j < all->n; j += nc) {
        const tshi_matrix c = tshi_gemm_from(all->c, 0, j);
        part.n = tshi_base_min(nc, all->n - j);
        for (int64_t p = 0; p < all->k; p += kc) {
            const tshi_matrix sums = all->sums.data ? all->sums : c; /* sums of earlier slices */
            const tshi_matrix to = p + kc < all->k ? sums : c;
            const tshi_matrix from = p > 0 ? sums : tshi_gemm_from(all->d, 0, j);
            part.k = tshi_base_min(kc, all->k - p);
            part.b = tshi_gemm_from(all->b, p, j);
            part.add = all->add || p > 0; /* slices after the first add to its sums */
            for (int64_t i = 0; i < all->m; i += mc) {
                part.m = tshi_base_min(mc, all->m - i);
                part.a = tshi_gemm_from(all->a, i, p);
                part.c = tshi_gemm_from(to, i, 0);
                part.d = tshi_gemm_from(from, i, 0);
                tshi_gemm_block(&part, i == 0, i + mc >= all->m);
            }
        }
    }
}

/* Returns 1 if it is better to compute C^T = B^T A^T: a tile is fast if C's rows are contiguous and
 * at least as long as the tile is wide. rsc, csc: row and column stride of C; nr: width of a
 * tile. */
static int tshi_gemm_transposes(int64_t m, int64_t n, int64_t rsc, int64_t csc, int nr) {
    if (n < m && n <= nr / 4) return 1;
    if (m < n && m <= nr / 4) return 0;
    return csc != 1 && rsc == 1; /* C's columns are contiguous, its rows are not */
}

/* Returns the size of tshi_gemm_job.kept, the sums of tshi_gemm_parts, in tsh_real. */
static int64_t tshi_gemm_kept_size(const tshi_gemm_kernel *kernel, int64_t m) {
    return kernel->strip ? tshi_base_min(kernel->mc, m + kernel->mr) * kernel->nr : 0;
}

/* Returns the size, in tsh_real, of the scratch for packed A (a block, or all of A for the kernel's
 * `few`) and for tshi_gemm_job.kept after it, rounded up to a multiple of 16, which is 64 bytes or
 * more. */
static int64_t tshi_gemm_block_size(const tshi_gemm_kernel *kernel, int64_t m, int64_t k) {
    /* at least 16 words for a packed row of A, to which the kernel's `strip` pads it */
    const int64_t block = tshi_base_min(kernel->mc, m + kernel->mr) *
                          tshi_base_min(tshi_gemm_slice_words(kernel, 1), k < 16 ? 16 : k);
    const int64_t few = kernel->few && m <= TSHI_GEMM_FEW_ROWS ? tshi_gemm_few_width(m) * k : 0;
    return tshi_base_ceil((block > few ? block : few) + tshi_gemm_kept_size(kernel, m), 16) * 16;
}

/* Returns how many bytes of scratch memory, aligned to 64, one tshi_gemm_run needs: for a packed
 * block of A and a packed panel of B, or one sliver of the panel (nr columns) if all rows of A are
 * one block. */
static size_t tshi_gemm_scratch(const tshi_gemm_kernel *kernel, int64_t m, int64_t n, int64_t k,
                                int64_t rsc, int64_t csc) {
    int64_t columns = kernel->nr;
    if (tshi_gemm_transposes(m, n, rsc, csc, kernel->nr)) { /* m, n become the shape of C^T */
        const int64_t rows = m;
        m = n;
        n = rows;
    }
    if (m > kernel->mc) columns = tshi_base_min(kernel->nc, n + kernel->nr);
    return (size_t)(tshi_gemm_block_size(kernel, m, k) +
                    columns * tshi_base_min(tshi_gemm_slice_words(kernel, 1), k)) *
           sizeof(tsh_real);
}

/* Returns the row stride, in elements, of sums that are kept apart from C: nc and a cache line
 * more. With nc alone, 4 KiB of floats, the rows of a tile would fall into the same set of a
 * cache. */
static int64_t tshi_gemm_pitch(const tshi_gemm_kernel *kernel) {
    return kernel->nc + 64 / (int64_t)sizeof(tsh_real);
}

/* Returns the bytes of scratch that a product needs beyond tshi_gemm_scratch because C is not of
 * tsh_real: for the sums of a panel of C, if the sum over k takes several slices. */
static size_t tshi_gemm_scratch_sums(const tshi_gemm_kernel *kernel, int64_t m, int64_t n,
                                     int64_t k, tshi_matrix c) {
    const int64_t rows = tshi_gemm_transposes(m, n, c.row, c.column, kernel->nr) ? n : m;
    if (c.dtype == TSH_REAL || k <= kernel->kc) return 0;
    return (size_t)(tshi_base_min(rows, TSHI_GEMM_SUMS) * tshi_gemm_pitch(kernel)) *
           sizeof(tsh_real);
}

/* Computes the product `job`. If C is not of tsh_real and k has several slices, computes
 * TSHI_GEMM_SUMS rows of C at a time and keeps their sums in `sums` until the last slice. */
TSHI_COLD static void tshi_gemm_start(tshi_gemm_job *job, tsh_real *sums) {
    const int few = job->kernel->few && job->m <= TSHI_GEMM_FEW_ROWS && job->b.row == 1 &&
                    job->b.column != 1 && job->form_b != TSHI_GEMM_OTHER &&
                    job->form_b != TSHI_GEMM_ROUNDED;
    if (few) tshi_gemm_few(job);
    if (job->n == 0) return; /* tshi_gemm_few has computed all columns */
    if (job->c.dtype == TSH_REAL || job->k <= tshi_gemm_slice(job->kernel, job->form_a, job->k)) {
        tshi_gemm_blocks(job);
        return;
    }
    const tshi_gemm_job all = *job;
    job->sums = tshi_gemm_matrix(sums, tshi_gemm_pitch(all.kernel), 1);
    for (int64_t i = 0; i < all.m; i += TSHI_GEMM_SUMS) {
        job->m = tshi_base_min(TSHI_GEMM_SUMS, all.m - i);
        job->a = tshi_gemm_from(all.a, i, 0);
        job->c = tshi_gemm_from(all.c, i, 0);
        job->d = tshi_gemm_from(all.d, i, 0);
        tshi_gemm_blocks(job);
    }
}

/* Computes the product x on one thread. scratch: memory of as many bytes as tshi_gemm_scratch and
 * tshi_gemm_scratch_sums ask for, together. */
TSHI_COLD static void tshi_gemm_run(const tshi_gemm_kernel *kernel, void *scratch, tshi_product x) {
    const int done = x.k <= 0 || x.alpha == 0; /* 1: alpha A B adds nothing */
    const int pairs = tshi_gemm_pairs(kernel, x.a, x.b);
    tshi_gemm_job job;
    if (x.m <= 0 || x.n <= 0) return;
    /* Scaling D takes a pass of its own: these cases (beta is not 0 or 1, or A B is not added) are
     * rare. */
    if (done || (x.beta != 0 && x.beta != 1)) {
        tshi_gemm_scale(x.m, x.n, x.beta, x.d, x.c);
        x.beta = 1;
        x.d = x.c;
    }
    if (done) return;
    if (tshi_gemm_transposes(x.m, x.n, x.c.row, x.c.column, kernel->nr)) { /* as C^T = B^T A^T */
        const tshi_product t = {x.n,
                                x.m,
                                x.k,
                                x.alpha,
                                x.beta,
                                tshi_gemm_transposed(x.b),
                                tshi_gemm_transposed(x.a),
                                tshi_gemm_transposed(x.d),
                                tshi_gemm_transposed(x.c),
                                x.progress};
        x = t;
    }
    job.kernel = kernel;
    job.pack_a = (tsh_real *)scratch;
    job.pack_b = job.pack_a + tshi_gemm_block_size(kernel, x.m, x.k);
    job.kept = job.pack_b - tshi_gemm_kept_size(kernel, x.m) / 16 * 16;
    job.m = x.m;
    job.n = x.n;
    job.k = x.k;
    job.alpha = x.alpha;
    job.add = x.beta != 0;
    job.a = x.a;
    job.b = x.b;
    job.d = x.d;
    job.c = x.c;
    job.form_a = tshi_gemm_form_of(x.a, pairs);
    job.form_b = tshi_gemm_form_of(x.b, pairs);
    job.sums = tshi_gemm_matrix(NULL, 0, 0);
    job.stream = 0;
    job.progress = x.progress;
    job.since = 0;
    if (pairs && kernel->tiles) kernel->tiles(1);
    tshi_gemm_start(&job,
                    (tsh_real *)(void *)((char *)scratch + tshi_gemm_scratch(kernel, x.m, x.n, x.k,
                                                                             x.c.row, x.c.column)));
    if (pairs && kernel->tiles) kernel->tiles(0);
}
