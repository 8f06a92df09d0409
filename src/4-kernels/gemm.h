/* ========================================================================== */
/* >>gemm                                              MARK: - gemm (private) */
/* Tiles of the built-in matrix product: the structs, and the reference       */
/* kernel.                                                                    */
/* Needs: >>dtype.                                                            */
/* ========================================================================== */

/* HOW IT WORKS. The blocking is that of Goto and van de Geijn, "Anatomy of High-Performance Matrix
 * Multiplication" (ACM TOMS 2008), in the five-loop form of BLIS (van Zee and van de Geijn, 2015):
 *
 *     for jc in n by nc                      B panel (kc, nc), in L3 at most
 *       for pc in k by kc                    a slice of the sum
 *         for ic in m by mc                  A block (mc, kc) packed, stays in L2
 *           for jr in nc by nr               B sliver (kc, nr) packed, stays in L1 and L2
 *             for ir in mc by mr             C tile (mr, nr) in registers: the micro-kernel
 *
 * A packed sliver of width w holds element (i, p) at p * w + i, so the micro-kernel reads it front
 * to back: in step p it loads nr values of B and adds their outer product with mr values of A to
 * the tile. The algorithm differs from BLIS in two ways. A B sliver is packed just before its first
 * use, while it is in cache, and is only kept if there is a second block of rows of A. And A or B
 * is read in place if packing would not pay: the micro-kernel takes A with any strides and B with
 * any row stride.
 *
 * THE ORDER OF SUMS. Element (i, j) starts as beta D, where D is C or, for example, a bias. For
 * each slice of kc (which depends on k alone) acc = a[0] b[0] + a[1] b[1] + ... from left to right,
 * then C = C + alpha acc. So element (i, j) depends on row i of A, column j of B and the kernel,
 * not on m, n, strides, packing, pointers or its place in the tile: a column-parallel product is
 * bitwise the columns of the whole one. (The kernels without intrinsics need a compiler that does
 * not contract x * y + z into one instruction: -std=c99 or -ffp-contract=off.)
 *
 * 16 BITS. bf16 and f16 are converted to tsh_real while A and B are packed, or while `stream` or
 * `few` reads B, which then is not packed. There is one exception: A and B are both bf16, or one is
 * and the other may be rounded to it (tshi_matrix.rounds), and the kernel multiplies pairs of bf16.
 * Then they are packed in pairs of elements 2p and 2p + 1 along k (after an odd k, the second is
 * 0), and one instruction adds the two products of a pair to a float, with AVX512_BF16
 *
 *     acc = (acc + a[2p + 1] b[2p + 1]) + a[2p] b[2p]
 *
 * and on Arm
 *
 *     acc = acc + (a[2p] b[2p] + a[2p + 1] b[2p + 1])
 *
 * The products are exact. Each sum is rounded to nearest even or, on Arm, to odd: an inexact sum
 * becomes the one of its two neighbours whose last bit is 1. Numbers below 2^-126 in magnitude
 * count as 0, in operands and in sums. A slice has 2 kc elements of k. (With AMX it has 4 kc,
 * added in an order of their own: see >>gemm-amx.) If C has 16 bits, its sums are floats until the
 * last slice of k is added, and rounded once. */

/* TSHI_GEMM_FLOAT is 1 if TSHARD_REAL is float, 0 if it is double; #if can test it. */
#define TSHI_GEMM_JOIN_(x, y) x##y
#define TSHI_GEMM_JOIN(x, y)  TSHI_GEMM_JOIN_(x, y)
#define TSHI_GEMM_IS_float    1
#define TSHI_GEMM_IS_double   0
#define TSHI_GEMM_FLOAT       TSHI_GEMM_JOIN(TSHI_GEMM_IS_, TSHARD_REAL)

/* TSHI_GEMM_BF16S is 1 if kernels for AVX512_BF16, which multiplies pairs of bf16, are compiled:
 * for x86, if tsh_real is float and the compiler has the intrinsics. */
#if TSHI_X86 && TSHI_GEMM_FLOAT && (defined(__clang__) ? __clang_major__ >= 9 : __GNUC__ >= 10)
#define TSHI_GEMM_BF16S 1
#define TSHI_GEMM_TARGET_BF16                                                                      \
    __attribute__((target("avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))
#else
#define TSHI_GEMM_BF16S 0
#endif

/* A strided matrix. In C = A B + D, the matrices A and B may have any dtype that ops compute with:
 * packing converts them. So may C and D, which have the same dtype if they share memory. */
typedef struct tshi_matrix {
    void *data;          /* address of element (0, 0) */
    int64_t row, column; /* row stride and column stride, in elements */
    tsh_dtype dtype;     /* type of the elements */
    /* 1: the elements are tsh_real, but a product with a bf16 matrix may round them to bf16 */
    int rounds;
} tshi_matrix;

/* Returns a matrix; `row` and `column` are its strides. */
static tshi_matrix tshi_gemm_matrix_of(void *data, tsh_dtype dtype, int64_t row, int64_t column) {
    const tshi_matrix m = {data, row, column, dtype, 0};
    return m;
}

static tshi_matrix tshi_gemm_matrix(tsh_real *data, int64_t row, int64_t column) {
    return tshi_gemm_matrix_of(data, TSH_REAL, row, column);
}

/* Returns m transposed. */
static tshi_matrix tshi_gemm_transposed(tshi_matrix m) {
    const int64_t row = m.row;
    m.row = m.column;
    m.column = row;
    return m;
}

/* Returns the submatrix of m that begins at element (i, j). */
static tshi_matrix tshi_gemm_from(tshi_matrix m, int64_t i, int64_t j) {
    m.data = (char *)m.data + (i * m.row + j * m.column) * tshi_dtypes[m.dtype].size;
    return m;
}

/* Returns the address of element (i, j) of a matrix of tsh_real. */
static tsh_real *tshi_gemm_at(tshi_matrix m, int64_t i, int64_t j) {
    return (tsh_real *)m.data + i * m.row + j * m.column;
}

/* A sequence of cache lines to prefetch, a few at a time. A pass goes from address `first` to
 * `last` in steps of `step` bytes. Then both addresses move by `along` bytes for the next pass,
 * `left` more times. */
typedef struct tshi_gemm_walk {
    const char *at, *first, *last; /* at: the line to prefetch next */
    int64_t step, along, left;     /* step, along: in bytes; left: passes to come */
} tshi_gemm_walk;

/* The forms to which packing converts matrices. A packed matrix consists of words of the size of
 * tsh_real, on which micro-kernels compute: one element or a pair of bf16 each. */
typedef enum tshi_gemm_form {
    TSHI_GEMM_REALS,  /* tsh_real as it is */
    TSHI_GEMM_BF16,   /* bf16 converted to tsh_real */
    TSHI_GEMM_F16,    /* f16 converted to tsh_real */
    TSHI_GEMM_OTHER,  /* another dtype converted to tsh_real */
    TSHI_GEMM_PAIRS,  /* bf16: a word has elements 2p (its low half) and 2p + 1 along k */
    TSHI_GEMM_ROUNDED /* tsh_real rounded to bf16, two in a word as for PAIRS */
} tshi_gemm_form;

/* A word of A as micro-kernels read it: a tsh_real, or a pair of bf16 (stored as two uint16_t,
 * therefore it may alias). */
typedef tsh_real TSHI_MAY_ALIAS tshi_gemm_word;

/* What a micro-kernel computes: C = alpha A B + D. The column strides of C and D are 1. With packed
 * pairs, k counts words. */
typedef struct tshi_gemm_tile {
    int64_t k;               /* length of each sum in words; in elements for tshi_gemm_kernel.few */
    const tshi_gemm_word *a; /* A, shape (rows, k) */
    int64_t rsa, csa;        /* row stride and column stride of A */
    const tsh_real *b;       /* B, shape (k, cols) */
    int64_t rsb, csb;        /* row stride and column stride of B, in elements of B's dtype */
    /* for tshi_gemm_kernel.few and .stream, which read B unpacked: the form to which they convert
     * its elements */
    tshi_gemm_form form;
    int64_t slice;        /* `few`: elements of a slice of k; `stream`: elements of all of k */
    int64_t after;        /* tshi_gemm_kernel.few: columns of B after the tile's, to prefetch */
    uintptr_t then;       /* tshi_gemm_kernel.few: address of the matrix read after B; 0: unknown */
    tsh_real alpha;       /* factor of A B */
    int add;              /* 1: D is added; 0: D is not read */
    const tsh_real *d;    /* D, shape (rows, cols), of tsh_real or bf16; may be C */
    int64_t rsd;          /* row stride of D, in elements of its dtype */
    tsh_real *c;          /* C, shape (rows, cols), of tsh_real or bf16 */
    int64_t rsc;          /* row stride of C, in elements of its dtype */
    int bf16;             /* 1: C is of bf16, which only AMX's `pairs` supports; 0: of tsh_real */
    int bf16_d;           /* 1: D is of bf16, which only AMX's `pairs` supports; 0: of tsh_real */
    tsh_real *sums;       /* scratch of tshi_gemm_kernel.stream, shape (rows, cols) */
    /* AMX's `pairs` may compute a tile in several calls, each for a part of k; `kept` has the sums
     * between the calls: */
    tsh_real *kept;       /* sums of the parts before this one, of shape (rows, cols) */
    int later, more;      /* later 1: sums begin with `kept`; more 1: stores them there, not in C */
    tshi_gemm_walk *walk; /* cache lines to prefetch while computing */
} tshi_gemm_tile;

typedef void (*tshi_gemm_tile_fn)(const tshi_gemm_tile *t, int rows, int cols);

/* A micro-kernel and its block sizes. >>isa has the ones of all instruction sets. */
struct tshi_gemm_kernel {
    const char *name; /* name in tests and benchmarks */
    int mr, nr;       /* rows and columns of a tile */
    int mc, kc, nc;   /* max block sizes of m, k, n: multiples of mr, of 32 and of nr */
    /* Computes a tile of 1 to mr rows and of nr or nr / 2 columns; needs t->csb = 1. */
    tshi_gemm_tile_fn tile;
    /* (optional) Computes up to TSHI_GEMM_FEW rows without packing B, which is of tsh_real or, if
     * there is a `pack`, has 16-bit elements. The number of columns is a multiple of 8 (of nr / 2
     * if that is less, of 16 for pairs of bf16). It uses t->sums, but not t->walk; t->k counts
     * words, t->slice elements. */
    tshi_gemm_tile_fn stream;
    /* (optional) Computes up to TSHI_GEMM_FEW_ROWS rows and all slices of k without packing B,
     * whose row stride is 1 and whose form is REALS, BF16, F16 or PAIRS of tshi_gemm_form. The
     * number of columns is a multiple of nr / 2. t->k counts elements; A is packed to a width of
     * tshi_gemm_few_width(rows). */
    tshi_gemm_tile_fn few;
    /* (optional) Does what `tile` does, for A and B that are packed as pairs of bf16. */
    tshi_gemm_tile_fn pairs;
    /* (optional) Does what tshi_gemm_pack_matrix does if m has a unit stride and the function
     * supports `form` (mostly forms of 16-bit elements). Returns 1 if it has packed m, else 0. */
    int (*pack)(tsh_real *dst, int width, int valid, int64_t k, const tshi_matrix *m,
                tshi_gemm_form form);
    /* (optional) Converts n values to a 16-bit dtype and stores them contiguously. */
    void (*store)(void *to, const tsh_real *from, int n, tsh_dtype dtype);
    /* (optional) Packs the first `valid` rows of m, as pairs of bf16, as rows of A for `pairs`, in
     * place of `pack`: word (i, p) is to[p / 16 * 16 * mr + 16 * i + p % 16], and words up to a
     * multiple of 16 are 0. In tshi_gemm_tile, rsa is 16 and csa is mr then; `pairs` also takes A
     * with rsa or csa 1. */
    void (*strip)(tsh_real *to, int valid, int64_t k, const tshi_matrix *m, tshi_gemm_form form);
    /* (optional) Called with 1 before, and with 0 after, products of pairs on a thread: configures
     * the processor's tile registers for the functions above, and releases them. */
    void (*tiles)(int begin);
};

enum {
    TSHI_GEMM_TILE_MAX = 1024, /* max mr * nr of any kernel */
    TSHI_GEMM_THIN = 2,       /* max rows of a product that is computed nr columns at a time */
    TSHI_GEMM_FEW_ROWS = 8,   /* max rows of a product that tshi_gemm_kernel.few computes */
    TSHI_GEMM_NEAR = 8192,    /* min bytes that tshi_gemm_kernel.few and .stream prefetch ahead */
    TSHI_GEMM_AHEAD = 32768,  /* max bytes a kernel's `few` prefetches beyond the next 16 columns */
    TSHI_GEMM_SUMS = 1024,    /* rows of C computed at a time if sums are kept apart from C */
    TSHI_GEMM_STRETCH = 32,   /* steps of k that a tile computes between two prefetches */
    TSHI_GEMM_FETCH = 4,      /* cache lines of B that a tile prefetches at a time */
    TSHI_GEMM_FETCH_C = 2,    /* rows of C that a tile prefetches at a time */
    TSHI_GEMM_C_STRIP = 8,    /* columns that the reference kernel computes at a time */
    TSHI_GEMM_FEW = 6,        /* max rows of a product that tshi_gemm_kernel.stream computes */
    TSHI_GEMM_STEPS = 8       /* steps of k that tshi_gemm_kernel.stream takes at a time */
};

/* -- the reference micro-kernel ------------------------------------------- */

/* Computes a tile. It is the reference that the other micro-kernels are tested against; without GNU
 * C the only one. It computes strips of one row and constant width, whose sums all compilers keep
 * in vector registers. */
static void tshi_gemm_tile_c(const tshi_gemm_tile *t, int rows, int cols) {
    for (int i = 0; i < rows; i++) {                        /* row i of the tile */
        for (int j = 0; j < cols; j += TSHI_GEMM_C_STRIP) { /* a strip of columns, from j on */
            tsh_real acc[TSHI_GEMM_C_STRIP] = {0}, *c = t->c + i * t->rsc + j;
            const tsh_real *d = t->d + i * t->rsd + j;
            for (int64_t p = 0; p < t->k; p++) { /* step p of each sum */
                const tsh_real x = t->a[i * t->rsa + p * t->csa], *b = t->b + p * t->rsb + j;
                for (int l = 0; l < TSHI_GEMM_C_STRIP; l++) acc[l] += x * b[l];
            }
            for (int l = 0; l < TSHI_GEMM_C_STRIP; l++)
                c[l] = t->alpha * acc[l] + (t->add ? d[l] : 0);
        }
    }
}
