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

/* All error codes, as X(name, sentence). The list makes the constants TSH_<name> of tsh_result and
 * the results of tsh_result_name and tsh_result_text. */
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
    int rank;                       /* world rank at fault; -1: no particular rank */
    char message[TSH_MESSAGE_SIZE]; /* one full sentence with the values concerned */
} tsh_error;

/* The types of elements. TSH_BF16: the upper half of a float (8 bits of exponent, 7 of fraction);
 * TSH_F16: IEEE's binary16. Ops on either compute in tsh_real and round once, to the nearest, ties
 * to even, when they store a result.
 * TSH_Q8_0, TSH_Q4_0 and TSH_Q4_1 are dtypes of quantised weights: only tsh_linear and
 * tsh_embedding accept them, and such weights have no gradient. The last dimension of a weight is
 * divided into blocks of 32 elements, stored in the same bytes as in ggml. The bytes of a block,
 * and the value of an element:
 *
 *     TSH_Q8_0   34 bytes: an f16 scale d, then 32 integers q of 8 bits;             d q
 *     TSH_Q4_0   18 bytes: an f16 scale d, then 32 integers q of 4 bits, 0 to 15;    d (q - 8)
 *     TSH_Q4_1   20 bytes: f16 scale d and minimum m, then 32 q of 4 bits, 0 to 15;  d q + m */
typedef enum tsh_dtype {
    TSH_DTYPE_DEFAULT, /* no dtype; in a descriptor: the default that the field's comment names */
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

/* A yes-or-no field of a descriptor. In a descriptor 0 (here TSH_USUAL) is the default, which the
 * field's comment names. Fields whose value 0 differs from the default are set as follows:
 *
 *     a real number     TSH_ZERO means 0: eps, lr, beta1, beta2, temperature
 *     yes or no         TSH_YES, TSH_NO: bias, qkv_bias, out_bias
 *     an integer        another field says whether it is used: padding for padding_idx, ignore for
 *                       ignore_index */
typedef enum tsh_choice { TSH_USUAL, TSH_YES, TSH_NO } tsh_choice;

/* The value 0 for an option where a plain 0 means "use the default": {.beta1 = TSH_ZERO}. Only
 * options whose comment names TSH_ZERO accept it. */
#define TSH_ZERO (-1e-300)

/* The dtype of tsh_real: TSH_F32, or TSH_F64 if TSHARD_REAL is double. */
#define TSH_REAL (sizeof(tsh_real) == 4 ? TSH_F32 : TSH_F64)

/* Returns the size of one element in bytes; of a quantised dtype, the size of a block of 32
 * elements. Returns 0 if dtype is TSH_DTYPE_DEFAULT or no tsh_dtype. */
TSH_API size_t tsh_dtype_size(tsh_dtype dtype);

/* A global shape, by value: tsh_zeros(ctx, tsh_shape2(3, 4)). */
typedef struct tsh_shape {
    int ndim;
    int64_t dim[TSH_MAX_DIMS];
} tsh_shape;

/* Allocates, resizes and frees memory. ptr NULL: allocates new_size bytes; new_size 0: frees ptr,
 * which has old_size bytes; else resizes it and keeps its contents. Returns the block, aligned to
 * `align` bytes, a power of two. NULL for a new_size above 0 means failure. */
typedef void *(*tsh_allocator_fn)(void *ptr, size_t old_size, size_t new_size,
                                  size_t align, void *user);
typedef struct tsh_allocator {
    tsh_allocator_fn allocate; /* NULL: malloc, and on Linux huge pages for blocks from 4 MiB on */
    void *user;
} tsh_allocator;

/* Receives warnings and errors, one full sentence per call, without a newline at its end. The
 * library itself never prints: a program that wants to see messages passes tsh_log_stderr, or a
 * function of its own. The ranks of tsh_threads_run call it concurrently, each from its own
 * thread. */
typedef struct tsh_logger {
    void (*log)(const char *message, void *user); /* NULL: messages are discarded */
    void *user;
} tsh_logger;

/* A matrix product: C = alpha A B + beta C with A (m, k), B (k, n), C (m, n). Strides are in
 * elements: rs from row to row, cs from column to column, as in BLIS's typed API. If beta is 0, C
 * is not read. If the library is compiled with OpenMP, the threads of the rank call the function
 * concurrently, each for a range of C's rows or columns, with `threads` = 1. Without OpenMP,
 * `threads` is tsh_desc.threads: one call may use that many threads of its own. tsh_attention
 * always uses the built-in product. */
typedef void (*tsh_gemm_fn)(int64_t m, int64_t n, int64_t k, tsh_real alpha,
                            const tsh_real *a, int64_t rsa, int64_t csa, const tsh_real *b,
                            int64_t rsb, int64_t csb, tsh_real beta, tsh_real *c, int64_t rsc,
                            int64_t csc, int threads, void *user);
typedef struct tsh_gemm {
    tsh_gemm_fn multiply; /* NULL: the built-in product */
    void *user;
} tsh_gemm;

typedef struct tsh_ctx tsh_ctx;       /* one rank's library state; used by one thread */
typedef struct tsh_tensor tsh_tensor; /* dtype, global shape, layout, this rank's shard, gradient */
typedef struct tsh_module tsh_module; /* a layer or a container of layers: a named node of a tree */
typedef struct tsh_optim tsh_optim;   /* an optimiser with its state: moments, step count */
typedef struct tsh_outer tsh_outer;   /* outer steps (DiLoCo): each replica trains on its own;
                                       * changes are exchanged at intervals */
typedef struct tsh_cache tsh_cache;   /* cached keys and values of a model's attention layers */
typedef struct tsh_pipeline tsh_pipeline; /* a model whose layers are split into stages over pp */
