/* ========================================================================== */
/* >>types                                                      MARK: - types */
/* Plain values that everything else is made of.                              */
/* Needs: >>config.                                                           */
/* ========================================================================== */

#include <stdarg.h> /* va_list */
#include <stddef.h> /* size_t, offsetof */
#include <stdint.h> /* int64_t */
#include <stdio.h>  /* FILE */

typedef TSHARD_REAL tsh_real;

/* Code, name, sentence: the only list of errors. */
#define TSH_RESULTS(X)                                                                             \
    X(OK, "no error")                                                                              \
    X(ERR_ARGUMENT, "an argument is not valid")                                                    \
    X(ERR_SHAPE, "shapes do not fit")                                                              \
    X(ERR_LAYOUT, "layouts do not fit")                                                            \
    X(ERR_DTYPE, "a dtype is not the one expected")                                                \
    X(ERR_MEMORY, "the allocator returned NULL")                                                   \
    X(ERR_STALE, "the tensor's values were given back")                                            \
    X(ERR_STATE, "the call is not possible now")                                                   \
    X(ERR_MISMATCH, "ranks called different collectives")                                          \
    X(ERR_LOST, "a rank is gone")                                                                  \
    X(ERR_TIMEOUT, "a collective ran out of time")                                                 \
    X(ERR_ABORTED, "a rank aborted the world")                                                     \
    X(ERR_IO, "the system refused")                                                                \
    X(ERR_UNSUPPORTED, "the backend does not do this")                                             \
    X(ERR_ANOMALY, "a value is NaN or infinite")

typedef enum tsh_result {
#define TSH_RESULT_ITEM(name, sentence) TSH_##name,
    TSH_RESULTS(TSH_RESULT_ITEM)
#undef TSH_RESULT_ITEM
        TSH_RESULT_COUNT
} tsh_result;

typedef struct tsh_error {
    tsh_result code;
    int rank;                       /* world rank at fault; -1: none in particular */
    char message[TSH_MESSAGE_SIZE]; /* one full sentence with the values concerned */
} tsh_error;

/* The types of elements. TSH_BF16: the upper half of a float (8 bits of exponent, 7 of fraction);
 * TSH_F16: IEEE's binary16. Ops compute with them in tsh_real and round once, to the nearest, ties
 * to even, when they store.
 * TSH_Q8_0, TSH_Q4_0 and TSH_Q4_1 are dtypes of quantised weights: tsh_linear and tsh_embedding
 * take them, other ops do not, and they have no gradient. The last dimension is cut into blocks of
 * 32 elements, each stored in the same bytes as in ggml:
 *
 *     TSH_Q8_0   34 bytes: an f16 scale d, then 32 integers q of 8 bits;             d q
 *     TSH_Q4_0   18 bytes: an f16 scale d, then 32 integers q of 4 bits, 0 to 15;    d (q - 8)
 *     TSH_Q4_1   20 bytes: f16 scale d and minimum m, then 32 q of 4 bits, 0 to 15;  d q + m */
typedef enum tsh_dtype {
    TSH_DTYPE_DEFAULT, /* no dtype: in a description, the default that its doc names */
    TSH_F32,
    TSH_F64,
    TSH_BF16,
    TSH_F16,
    TSH_I32,
    TSH_I64,
    TSH_Q8_0,
    TSH_Q4_0,
    TSH_Q4_1
} tsh_dtype;

/* Says 0 for an option whose 0 means "the default": {.beta1 = TSH_ZERO}. Only options that name it
 * take it. */
#define TSH_ZERO (-1e-300)

/* The dtype of values: TSH_F32, or TSH_F64 where TSHARD_REAL is double. */
#define TSH_REAL (sizeof(tsh_real) == 4 ? TSH_F32 : TSH_F64)

/* Bytes of one element, of quantised weights of a block of 32; 0 of what is no dtype. */
TSH_API size_t tsh_dtype_size(tsh_dtype dtype);

/* A global shape, by value: tsh_zeros(ctx, tsh_shape2(3, 4)). */
typedef struct tsh_shape {
    int ndim;
    int64_t dim[TSH_MAX_DIMS];
} tsh_shape;

/* One function for all memory: ptr NULL allocates, new_size 0 frees, else the block is resized with
 * its contents kept. NULL for a new_size above 0 means failure. The result is aligned to `align`, a
 * power of two. */
typedef void *(*tsh_allocator_fn)(void *user, void *ptr, size_t old_size, size_t new_size,
                                  size_t align);
typedef struct tsh_allocator {
    tsh_allocator_fn fn; /* NULL: malloc, and on Linux huge pages for blocks from 4 MiB on */
    void *user;
} tsh_allocator;

/* Where warnings and errors go, one full sentence per call and no newline at its end. The library
 * itself never prints: a program that wants to see them gives tsh_log_stderr, or a function of its
 * own. The ranks of tsh_threads_run call it at the same time, each from its own thread. */
typedef struct tsh_logger {
    void (*fn)(void *user, const char *message); /* NULL: nowhere */
    void *user;
} tsh_logger;

/* C = alpha A B + beta C with A (m, k), B (k, n), C (m, n), any strides in elements (rs: between
 * rows, cs: between columns), as BLIS's typed API. beta 0 never reads C. Compiled with OpenMP, the
 * rank's threads call it side by side, each for a piece along m or n, with threads 1; without, it
 * may use tsh_desc.threads of its own. (tsh_attention's tiles are always the built-in one's.) */
typedef void (*tsh_gemm_fn)(void *user, int64_t m, int64_t n, int64_t k, tsh_real alpha,
                            const tsh_real *a, int64_t rsa, int64_t csa, const tsh_real *b,
                            int64_t rsb, int64_t csb, tsh_real beta, tsh_real *c, int64_t rsc,
                            int64_t csc, int threads);
typedef struct tsh_gemm {
    tsh_gemm_fn fn; /* NULL: the built-in one */
    void *user;
} tsh_gemm;

typedef struct tsh_ctx tsh_ctx;       /* one rank's world; belongs to one thread */
typedef struct tsh_tensor tsh_tensor; /* dtype, global shape, layout, this rank's piece, gradient */
typedef struct tsh_module tsh_module; /* a named node in a tree of layers */
typedef struct tsh_optim tsh_optim;   /* an optimiser with its moments */
typedef struct tsh_cache tsh_cache;   /* keys and values of a model's attention layers */
typedef struct tsh_pipeline tsh_pipeline; /* a model whose layers are dealt to the ranks of pp */
