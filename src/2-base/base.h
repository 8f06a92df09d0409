/* ========================================================================== */
/* >>base                                              MARK: - base (private) */
/* Includes, macros, and the structures that all later sections share.        */
/* Needs: >>types >>layout-api >>comm-api.                                    */
/* ========================================================================== */

/* A ctx owns all tensors, modules, optimisers and nodes of the tape made with it. Their memory is
 * from the ctx's allocator: values and gradients are in reference-counted blocks (tshi_block), the
 * small structures in arenas (tshi_arena). One thread uses a ctx and all that the ctx owns; only in
 * tshi_team_run do other threads of the rank read and write values, too. */

/* The library needs exact floating point: NaN and infinity are values, and sums have a documented
 * order. Compilers that define macros for the parts of -ffast-math fail here; for other compilers
 * tsh_open checks at run time. */
#if defined(__FAST_MATH__) || defined(_M_FP_FAST)
#error "tshard.h needs exact floating point: no -ffast-math, -Ofast, -fp-model=fast or /fp:fast. \
Add -fno-fast-math (MSVC: /fp:precise) after it, for the file with TSHARD_IMPLEMENTATION"
#elif defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__
#error "tshard.h needs NaN and infinity: add -fno-finite-math-only at the end of the flags"
#elif defined(__ASSOCIATIVE_MATH__)
#error "tshard.h needs the order of its sums: add -fno-unsafe-math-optimizations and \
-fno-associative-math at the end of the flags"
#elif defined(__RECIPROCAL_MATH__)
#error "tshard.h needs exact divisions: add -fno-reciprocal-math at the end of the flags"
#elif defined(__NO_SIGNED_ZEROS__)
#error "tshard.h needs signed zeros: add -fsigned-zeros at the end of the flags"
#endif

#include <errno.h>  /* errno: why a file cannot be opened */
#include <float.h>  /* FLT_MAX, DBL_MAX */
#include <limits.h> /* INT_MAX, LONG_MAX */
#include <math.h>   /* expf, sqrt, ... */
#include <stdlib.h> /* malloc, free, bsearch, qsort, getenv */
#include <string.h> /* memcpy, memset */
#include <time.h>   /* time, clock: names of temporary files */

/* Declares system calls beyond C99, those of Windows or of POSIX: to resolve a link, flush a file,
 * rename over another, read a clock. */
#if defined(_WIN32)
#define TSHI_POSIX 0
/* These functions are declared as in windows.h, which is not included: it defines words such as
 * `near` as macros. */
#ifdef __cplusplus
extern "C" {
#endif
union _LARGE_INTEGER;
struct _SECURITY_ATTRIBUTES;
__declspec(dllimport) void *__stdcall CreateFileA(const char *path, unsigned long access,
                                                  unsigned long share,
                                                  struct _SECURITY_ATTRIBUTES *security,
                                                  unsigned long creation, unsigned long flags,
                                                  void *like);
__declspec(dllimport) int __stdcall FlushFileBuffers(void *file);
__declspec(dllimport) int __stdcall CloseHandle(void *file);
__declspec(dllimport) unsigned long __stdcall GetFileAttributesA(const char *path);
__declspec(dllimport) int __stdcall QueryPerformanceCounter(union _LARGE_INTEGER *ticks);
__declspec(dllimport) int __stdcall QueryPerformanceFrequency(union _LARGE_INTEGER *ticks);
__declspec(dllimport) int __stdcall MoveFileExA(const char *from, const char *to,
                                                unsigned long flags);
#ifdef __cplusplus
}
#endif
#elif defined(__unix__) || defined(__APPLE__)
#define TSHI_POSIX 1      /* 1: the system calls of POSIX are available */
#include <dirent.h>       /* readdir */
#include <fcntl.h>        /* open */
#include <sched.h>        /* struct timespec, which <time.h> hides under -std=c99 */
#include <sys/file.h>     /* flock */
#include <sys/resource.h> /* getrlimit */
#include <sys/stat.h>     /* stat, chmod */
#include <sys/utsname.h>  /* uname */
#include <unistd.h>       /* fsync, close, chown */
#if defined(__linux__)
#include <sys/mman.h>     /* madvise */
#endif
#ifndef __cplusplus /* glibc hides these functions under -std=c99, but never in C++ */
#if defined(__linux__)
int (madvise)(void *from, size_t bytes, int advice);
#endif
FILE *(fdopen)(int file, const char *mode);
int (fileno)(FILE *file);
ssize_t (readlink)(const char *path, char *to, size_t size);
#endif
#else
#define TSHI_POSIX 0
#endif

/* Initialiser that sets all of a structure to zero, if the first field is no enum. C++ compilers
 * warn about {0}. */
#ifdef __cplusplus
#define TSHI_ZERO {}
#else
#define TSHI_ZERO {0}
#endif
#define TSHI_R(x) ((tsh_real)(x)) /* converts x to tsh_real */
/* 1 if tsh_real is double; a constant expression. */
#define TSHI_DOUBLE (sizeof(tsh_real) == 8)
/* Attributes. TSHI_INLINE: a function that is always inlined, so that the caller's loop over its
 * calls can be vectorised.
 * TSHI_UNROLLED: a long function that is inlined once for each of many values of an argument, so
 * that its loops are unrolled. Without optimisation it is an ordinary function: copies would gain
 * nothing, and take long to compile.
 * TSHI_OUTLINE: a function that has many callers and gains nothing from inlining; not inlining it
 * saves compile time.
 * TSHI_COLD: a function that runs once or rarely (models, files, checks, errors); gcc optimises it
 * for size.
 * TSHI_MAY_ALIAS: a type through which memory that holds another type may be read and written,
 * which C's aliasing rules forbid and optimisers rely on.
 * TSHI_APART: a function that AVX kernels call. gcc must not look into it (noipa): if it sees that
 * the function leaves some registers alone, it omits vzeroupper before the call, and every switch
 * between AVX and SSE code is slow. */
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 8
#define TSHI_ALONE noipa
#else
#define TSHI_ALONE noinline
#endif
#if defined(__GNUC__)
#define TSHI_RESTRICT       __restrict
#define TSHI_INLINE         static inline __attribute__((always_inline))
#if defined(__OPTIMIZE__)
#define TSHI_UNROLLED TSHI_INLINE
#else
#define TSHI_UNROLLED static inline
#endif
#define TSHI_APART          static __attribute__((TSHI_ALONE))
#define TSHI_OUTLINE        static __attribute__((noinline))
#define TSHI_COLD           __attribute__((cold))
#define TSHI_MAY_ALIAS      __attribute__((may_alias))
/* prefetches memory for reading into all cache levels */
#define TSHI_PREFETCH(p)    __builtin_prefetch(p)
/* prefetches memory for reading into the L2 cache, not into L1 */
#define TSHI_PREFETCH_L2(p) __builtin_prefetch(p, 0, 2)
#else
#define TSHI_RESTRICT
#define TSHI_INLINE         static
#define TSHI_UNROLLED       static
#define TSHI_APART          static
#define TSHI_OUTLINE        static
#define TSHI_COLD
#define TSHI_MAY_ALIAS
#define TSHI_PREFETCH(p)    ((void)(p))
#define TSHI_PREFETCH_L2(p) ((void)(p))
#endif
/* Stands before a loop over a block: promises that any two arrays in the loop are the same array or
 * do not overlap, so that it is vectorised without checks. (clang would unroll it first and then
 * not vectorise.) */
#if defined(__clang__)
#define TSHI_LANES _Pragma("clang loop unroll(disable)")
#elif defined(__GNUC__)
#define TSHI_LANES _Pragma("GCC ivdep")
#else
#define TSHI_LANES
#endif
/* Stands before a loop of any length: makes the promise of TSHI_LANES to gcc, which then omits its
 * second version of the loop, the one for arrays that overlap. (clang relies on TSHI_RESTRICT.) */
#if defined(__GNUC__) && !defined(__clang__)
#define TSHI_EACH TSHI_LANES
#else
#define TSHI_EACH
#endif

/* TSHI_VECTORS: 1 if GNU C's vector types are available. TSHI_X86: 1 if AVX intrinsics are, too.
 * TSHI_NEON: 1 if those of 64-bit Arm are. */
#if defined(__GNUC__) && !defined(TSHARD_NO_SIMD)
#define TSHI_VECTORS 1
#else
#define TSHI_VECTORS 0
#endif
#if TSHI_VECTORS && defined(__x86_64__) &&                                                         \
    (!defined(_WIN32) || defined(__clang__) || defined(TSHARD_WINDOWS_AVX))
#define TSHI_X86 1
#else
#define TSHI_X86 0
#endif
#if TSHI_VECTORS && defined(__aarch64__) && defined(__ARM_NEON) && !defined(__AARCH64EB__)
#define TSHI_NEON 1
#else
#define TSHI_NEON 0
#endif

/* TSHI_ALIGN: alignment of blocks in bytes. TSHI_SIZE_CLASSES: number of size classes; blocks of
 * class c have 2^c to 2^(c+1) - 1 times 64 bytes. */
enum { TSHI_ALIGN = 64, TSHI_SIZE_CLASSES = 58 }; /* class 58 is not needed: its blocks would have
                                                   * 2^64 bytes */

/* Header of a reference-counted block of memory. Its data follows, aligned to 64 bytes because the
 * header is padded to 64. Blocks of the step pool lie side by side in a page. */
typedef struct tshi_block tshi_block;
struct tshi_block {
    size_t size;             /* bytes of data, a multiple of 64 */
    size_t before;           /* step pool: size of the left neighbour; 0: first block of the page */
    tshi_block *next, *prev; /* of a free block: neighbours in the free list of its size class */
    int refs;                /* number of references; 0: the block is free */
    int kind, last;          /* kind: TSH_MEM_...; last: 1 for the last block of a pool page */
    const tsh_module *module; /* the module in whose forward or backward it was allocated, or
                               * NULL */
    char padding[TSHI_ALIGN - 2 * sizeof(size_t) - 3 * sizeof(void *) - 4 * sizeof(int)];
};

/* Memory from the allocator that a pool or an arena hands out in parts. */
typedef struct tshi_page {
    struct tshi_page *next; /* next page of the pool or arena */
    size_t bytes, used;     /* bytes: size of the page; used: bytes handed out, in arenas only.
                             * Both include this header */
} tshi_page;

/* The offset of the first block in a pool page, a multiple of 64. A load that follows a store waits
 * if the low 12 bits of the addresses agree ("4K aliasing"). So an op is slow if its output lies at
 * a slightly higher address than an input, modulo 4096. With pages aligned to 4096, this offset
 * puts the pool's data (outputs) 256 bytes before the data of a block allocated alone (inputs). */
enum { TSHI_POOL_OFFSET = 3840 };

/* The pool of step memory, whose blocks are reused. */
typedef struct tshi_pool {
    tshi_page *pages;                    /* all pages, the newest first */
    tshi_block *free[TSHI_SIZE_CLASSES]; /* by size class: list of free blocks; NULL: none */
    uint64_t filled;                     /* bit c: free[c] is not NULL */
} tshi_pool;

/* Small allocations, released all at once: those of the tape, or of the ctx. */
typedef struct tshi_arena {
    tshi_page *first, *now; /* first: list of all pages; now: the page that is being filled */
} tshi_arena;

typedef struct tshi_node tshi_node;
typedef struct tshi_op tshi_op;

enum { /* bits of tsh_tensor.flags */
    TSHI_OWNED = 1,     /* owned: lives until it is freed, not until a step or scope ends */
    TSHI_PARAM = 2,     /* a module's parameter */
    TSHI_LEAF = 4,      /* a leaf: backward leaves its gradient for the user or an optimiser */
    TSHI_RETAIN = 8,    /* backward does not release its values and its gradient */
    TSHI_STALE = 16,    /* its values were released; to use them is TSH_ERR_STALE */
    TSHI_DEAD = 32,     /* the handle itself was released; it is reused once refs is 0 */
    TSHI_CHUNKED = 64,  /* a parameter or moment of an optimiser with .zero: each rank of dp holds a
                         * chunk of its gradient (parameter) or of its values (moment) */
    TSHI_AVERAGED = 128, /* its gradient is averaged over dp (parameters, tsh_average_grad) */
    TSHI_CONSUMED = 256, /* a backward has released the tape's node of the op that made it */
    TSHI_USED = 512,     /* an optimiser has used its gradient, which was not zeroed since */
    TSHI_BUFFER = 1024,  /* a parameter that no optimiser updates */
    TSHI_OPTIMISED = 2048, /* a parameter that an optimiser was made for */
    TSHI_INEXACT = 4096,   /* a bf16 parameter without exact weights (.round_weights) */
    TSHI_CACHED = 8192,    /* a weight that computes the keys or values in a tsh_cache: its layout
                            * must stay as it is */
    TSHI_TIED = 16384,     /* a parameter that several modules may share (tsh_tie) */
    TSHI_EMA = 32768,      /* a parameter that a tsh_ema averages */
    TSHI_SWAPPED = 65536,  /* a parameter that has the values of its average (tsh_ema_swap) */
    TSHI_GIVEN = 131072,   /* a step tensor whose values the program wrote */
    TSHI_MERGED = 262144   /* a weight that an adapter is merged into (tsh_lora_merge) */
};

/* A gradient accumulator. live 0: the gradient is 0, whatever the block contains. */
typedef struct tshi_accumulator {
    tshi_block *block; /* one tsh_real per local element of the tensor; NULL: not allocated yet */
    int live, clean;   /* live 1: there is a gradient; clean 1: live is 0, block is all 0 */
} tshi_accumulator;

struct tsh_tensor {
    tsh_ctx *ctx;
    tsh_tensor *next, *prev; /* neighbours in its list (tshi_handles): of owned, step or free
                              * tensors */
    tsh_dtype dtype;
    unsigned flags;  /* bit mask: TSHI_OWNED, ... */
    int ndim, depth; /* depth: how many scopes were open when it was created */
    /* dim: shape of the whole tensor; local: shape of this rank's shard; stride: strides of the
     * shard, in elements */
    int64_t dim[TSH_MAX_DIMS], local[TSH_MAX_DIMS], stride[TSH_MAX_DIMS];
    tsh_layout layout; /* its layout, in which no field has a default (0) any more */
    tshi_block *block; /* the values; NULL: a parameter that is not allocated yet, or stale */
    int64_t offset;    /* elements from the block's data to the tensor's first element */
    tsh_tensor *base;  /* the tensor that this one is a view of; itself if it is no view */
    int refs; /* references to the handle from nodes, views, buckets, pipelines and modules */
    /* The fields from here to marks are used only in a tensor that is no view (a base); its views
     * share them. */
    int requires_grad;       /* 1: backward computes its gradient */
    tshi_node *node;         /* the op that made it; NULL: a leaf */
    tshi_accumulator gr, gp; /* gr: gradient in the tensor's layout; gp: sum of partial gradients */
    int partial_contributions; /* number of partial gradients still to be added in this backward */
    int contributions;         /* leaf: number of gradients of either kind still to be added */
    int in_bucket;             /* leaf: 1 while its gradient waits in a bucket to be sent */
    int reducing;      /* 1: the all-reduce of the partial gradients gp is under way */
    tsh_req req;       /* request of the all-reduce of gp, valid while reducing is 1 */
    int sparse;        /* 1: the gradient is row-sparse: 0 in every row r with marks[r] == 0 */
    tshi_block *marks; /* one int32_t per local row: 0 if a row-sparse gradient is 0 there; NULL:
                        * never needed so far */
    /* The fields from here on are used in a parameter only. */
    const char *path; /* its module's path and its own name: "h.3.mlp.c_fc.weight"; a moment of an
                       * optimiser has that of its parameter */
    tsh_init init;    /* how its initial values are computed */
    int64_t fan_in, zero_row; /* fan_in: for init; 0: take it from the shape;
                               * zero_row: 1 + the row whose initial values are 0; 0: none */
    int stage;  /* 1 + the first pipeline stage that holds it; 0: there is no pipeline */
    int absent; /* 1: other pipeline stages hold the parameter, this rank's stage does not */
    tshi_block *low; /* uint16_t per local element: the lower halves of the exact float weights of
                      * a bf16 parameter (see tshi_tensor_exact); NULL: all 0 */
    /* The fields below are for an optimiser, which sets grad_dtype and updates. */
    tsh_dtype grad_dtype;   /* TSH_BF16: the gradient is rounded to bf16; 0, TSH_REAL: it is not */
    const int64_t *updates; /* the optimiser's updates so far: they key the gradient's rounding */
    tshi_block *packed;     /* the gradient in bf16, while gr.live is 1 and gr.block is NULL */
    uint64_t packs;         /* how often the gradient was rounded to bf16 since tsh_zero_grad */
};

/* Bit masks over an op's inputs (bit i: input i) and its output (TSHI_OUT). They say which values
 * the op saves for backward, and which inputs have a gradient that is a partial sum. */
enum {
    TSHI_NONE = 0,
    TSHI_X = 1, /* bits of the inputs x, weight, bias: of unary ops, linear and norms */
    TSHI_WEIGHT = 2,
    TSHI_BIAS = 4,
    TSHI_A = 1, /* bits of the inputs a, b: of binary ops and matmul */
    TSHI_B = 2,
    TSHI_COND = 1, /* bits of the inputs cond, yes, no: of tsh_where */
    TSHI_YES = 2,
    TSHI_NO = 4,
    TSHI_Q = 1, /* bits of the inputs q, k, v, mask, sinks, segments: of attention */
    TSHI_K = 2,
    TSHI_V = 4,
    TSHI_MASK = 8,
    TSHI_SINKS = 16,
    TSHI_SEGMENTS = 32,
    TSHI_LOGITS = 1, /* bits of the inputs logits, target, class weights: of cross-entropy */
    TSHI_TARGET = 2,
    TSHI_CLASS_WEIGHTS = 4,
    TSHI_POS_WEIGHT = 8, /* of losses element by element: inputs x, target, weight, pos_weight */
    TSHI_OUT = 1 << 30
};

/* Describes an op's output before it is made: the op sets the shape, its layout rule the rest. */
typedef struct tshi_output {
    tsh_shape shape;   /* global shape of the output */
    tsh_layout layout; /* layout of the output; at first that of input 0 */
    unsigned partial;  /* bit mask of the inputs whose gradient is a partial sum */
} tshi_output;

/* Argument of a layout rule: one call of an op, with its inputs and options. */
typedef struct tshi_call {
    const tshi_op *op;
    tsh_tensor *const *in; /* the inputs; an optional one may be NULL */
    int n;                 /* number of inputs */
    const void *params;    /* op-specific struct of the options that the rule reads, or NULL */
} tshi_call;

/* An op's layout rule: sets output->layout and output->partial from the layouts of the inputs.
 * Returns 1; or 0, with an error recorded, if the layouts do not fit each other. */
typedef int (*tshi_rule_fn)(const tshi_call *call, tshi_output *output);

enum { /* bits of tshi_op.flags */
    /* The op's backward reads both gradient accumulators of its output: gr (in the output's layout)
     * and gp (partial sums). Before the backward of other ops gp is all-reduced into gr. The same
     * is done before this op's backward if the user retains the output (tsh_retain_grad) and may
     * thus read its gradient. */
    TSHI_OP_ACCEPTS_PARTIAL = 1,
    TSHI_OP_ACCEPTS_RETAINED = 2, /* backward reads gr and gp even if the user retains the output */
    TSHI_OP_PASSES_PARTIAL = 4    /* backward adds the partial gradient of the output to that of
                                   * input 0 */
};

/* An op, described once for all its calls. */
struct tshi_op {
    const char *name;                  /* name of the public function: "tsh_linear" */
    const char *inputs;                /* names of the inputs, separated by blanks; or NULL */
    tshi_rule_fn rule;                 /* the layout rule; NULL: the layout is an argument */
    void (*backward)(tshi_node *node); /* adds to the inputs' gradients; NULL: no gradients */
    unsigned saves;                    /* bit mask of the values that backward reads: TSHI_X, ... */
    unsigned flags;                    /* bit mask: TSHI_OP_... */
};

/* One recorded call; only `progress` changes after recording. A tensor has two accumulators: gr for
 * gradients that are replicated, or sharded as the tensor is, and gp for partial sums. Before the
 * backward of the op that made the tensor, gr += all-reduce(gp); the all-reduce starts as soon as
 * the last expected partial gradient is added. */
struct tshi_node {
    const tshi_op *op;
    tshi_node *older;         /* the node recorded just before this one; NULL: none */
    const tsh_module *module; /* the innermost module whose forward made the call, or NULL */
    tsh_tensor *out, **in;    /* the output; the n inputs */
    int n, depth;             /* n: number of inputs; depth: number of scopes open at the call */
    unsigned partial;    /* bit mask of the inputs whose gradient is a partial sum */
    tshi_block **saved;  /* n + 1 entries: saved values of the inputs and of out; NULL: backward
                          * reads none */
    tshi_block *aux;     /* other data that backward reads; released with the node */
    void *params;        /* the op's own options, in the tape's arena */
    tsh_tensor **leaves; /* parameters that are no inputs but that backward reads or adds
                          * gradients to */
    int leaf_count;      /* length of leaves */
    tsh_tensor **more;   /* the outputs after `out`, of an op that has several */
    tshi_block **more_saved; /* the saved values of each of them */
    int more_count;          /* length of more and of more_saved */
    struct {
        int reached;      /* 1: the loss depends on the op's output */
        unsigned partial; /* bit mask of the inputs that get a partial gradient in this pass */
        unsigned done;    /* bit mask of the inputs whose gradient is complete */
    } progress;           /* state of this node in the running backward pass */
};

/* All tensor handles of a ctx (see tshi_tensor_handle). */
typedef struct tshi_handles {
    tsh_tensor owned, step;      /* heads of circular lists: of owned and of step tensors */
    tsh_tensor *oldest, *newest; /* the two ends of the list of free handles */
    int64_t free, ended;         /* free: number of free handles; ended: number of handles that the
                                  * last step end released */
    int64_t count;               /* number of owned tensors */
    int64_t before;              /* value of `count` at the end of the last step */
    int growing;                 /* number of steps in a row at whose end `count` had grown */
} tshi_handles;

typedef struct tshi_tape {
    tshi_node *newest; /* the last recorded call; NULL: the tape is empty */
    tshi_arena arena;  /* memory of the nodes and of their parameters */
    int no_grad;       /* how many tsh_no_grad_begin are open; 0: calls are recorded */
    int locked;        /* number of calls in progress that need the tape unchanged: see
                        * tshi_tape_unlocked */
    int evaluating;    /* how many tsh_no_grad_begin of the user are open, without those of
                        * checkpoints */
    int pending;       /* 1: leaves have gradients that tsh_sync_grads must still sum over dp */
    int summed;        /* 1: losses are sums of terms; 0: losses are means */
    double weight;     /* if summed: the number of terms in this rank's losses */
    int syncing;       /* 1: each gradient of a leaf is sent over dp once it is complete */
    int replaying;     /* number of checkpoints whose forward backward is running again */
} tshi_tape;

typedef struct tshi_bucket tshi_bucket;

/* The buckets of the backward pass in progress: leaf gradients to be summed over dp. */
typedef struct tshi_buckets {
    tshi_arena arena;           /* memory of all buckets */
    tshi_bucket *first, **last; /* first: list of full buckets; last: where to link the next one */
    tshi_bucket *awaited;       /* the oldest bucket whose collective may still run; NULL: none */
    tshi_bucket *open[2];       /* buckets not full yet: [0] to all-reduce, [1] to reduce-scatter */
    int64_t limit;              /* a bucket with at least so many elements is full */
    int hold;                   /* 1: no bucket is sent before backward ends */
    int summed;                 /* 1: losses are sums of terms; 0: losses are means */
    double weight;      /* number of terms of this rank's summed losses; once weight_req is
                         * complete: the sum over dp */
    tsh_req weight_req; /* request of the all-reduce of weight */
} tshi_buckets;

/* A collective over dp that a tsh_outer has started; tsh_close waits for it. */
typedef struct tshi_outer_request {
    struct tshi_outer_request *next; /* the next one in the ctx's list */
    tsh_req req;              /* request of the collective; 0: none is running */
} tshi_outer_request;

/* What a pipeline keeps of a micro-batch between its forward and its backward. */
typedef struct tshi_micro {
    struct tshi_micro *next; /* next micro-batch in the ctx's list */
    tshi_node *newest;       /* the last node of the micro-batch's tape */
    tshi_arena arena;        /* memory of the micro-batch's nodes */
    tsh_pipeline *pipeline;
    tsh_tensor handles; /* head of a circular list: the step tensors that the forward made */
    tsh_tensor *out;    /* the output, sent to the next stage; on the last stage: the loss */
    tsh_tensor *input;  /* the input from the previous stage; NULL: no gradient has to be
                         * sent back */
} tshi_micro;

typedef struct tshi_gemm_kernel tshi_gemm_kernel;
typedef struct tshi_quant_kernel tshi_quant_kernel;
typedef struct tshi_trace tshi_trace;

/* Bits of ctx->warned, one per warning; each warning is logged once per ctx, when: */
enum {
    TSHI_WARN_GRADS = 1,  /* backward adds to gradients that were used, but not zeroed */
    TSHI_WARN_STEP = 2,   /* tsh_step_end is not called */
    TSHI_WARN_NONE = 4,   /* an optimiser's step finds no gradients at all */
    TSHI_WARN_LATE = 8,   /* a parameter was added after the optimiser was made */
    TSHI_WARN_BLOCKS = 16, /* quantised weights are not trained */
    TSHI_WARN_OWNED = 32,  /* each step leaves more owned tensors */
    TSHI_WARN_TWICE = 64   /* a loss that takes logits is given probabilities */
};

/* After how many steps two of the warnings are logged. */
enum {
    TSHI_WARN_STEPS = 32, /* TSHI_WARN_STEP: optimiser steps without tsh_step_end */
    TSHI_WARN_GROWN = 100 /* TSHI_WARN_OWNED: steps in a row that leave more owned tensors */
};

/* Everything that the angles of rotary positions depend on (tsh_rope_desc). */
typedef struct tshi_angles {
    double base, factor;
    uint64_t freqs, starts;     /* freqs: hash of desc.freqs, 0: angles are computed from base;
                                 * starts: hash of desc.starts, 0: none */
    int64_t pairs, start, rows; /* pairs: number of pairs of features; start: desc.start; rows:
                                 * number of positions in the table */
} tshi_angles;

/* The order in which matrices are read while a model decodes; it is the same for every token. From
 * it, a product of few rows knows which matrix is read next, and prefetches its beginning. A wrong
 * entry costs time, but changes no result. */
enum { TSHI_MATMUL_ORDER = 1021 }; /* number of entries; a prime: addresses are hashed modulo it */
typedef struct tshi_matmul_order {
    uintptr_t then[TSHI_MATMUL_ORDER]; /* entry h: the matrix (address) that was read after the
                                        * one whose address has hash h; 0: unknown */
    uintptr_t *last; /* entry of the matrix that was read last; NULL: none yet */
} tshi_matmul_order;

enum { TSHI_CPU_TEXT = 256 }; /* max length of tsh_cpu_text, with its final 0 */

/* How the units (tsh_segment) of a sharded dimension are divided among the ranks of tp. */
typedef struct tshi_deal {
    int ranks;
    /* before[r]: sum of the shares of the ranks below r; before[ranks]: sum of all shares. NULL:
     * all shares are equal, so torch.chunk's rule holds */
    const int64_t *before;
} tshi_deal;

struct tsh_ctx {
    tsh_comm world, tp, pp, dp; /* world: all ranks; tp, pp, dp: this rank's groups */
    tshi_deal deal;             /* how sharded dimensions are divided over tp (tsh_desc.shares) */
    tsh_dtype wire;             /* dtype in which activations are sent (tsh_desc.wire); 0: theirs */
    tsh_error error; /* the first error since the last tsh_clear_error; code TSH_OK: none */
    int reported;    /* 1: the error was reported to the world, or came from the world */
    int logged;      /* 1: the logger got the error */
    tsh_place place; /* where the program calls the library, for errors; file NULL: not known */
    unsigned warned; /* bit mask of the warnings that the logger got: TSHI_WARN_... */
    int steps;       /* optimiser steps since the last tsh_step_end or tsh_scope_end */
    int64_t held;    /* number of step tensors when `steps` was TSHI_WARN_STEPS / 2 */
    tsh_allocator allocator;             /* the user's or the default one; .allocate is not NULL */
    tsh_logger logger;                   /* the user's; .log may be NULL */
    tsh_gemm gemm;                       /* the user's matrix product; .multiply NULL: the
                                          * built-in product is used */
    /* What the chosen instruction set (>>isa) has: the kernels of the built-in product and of
     * quantised products; the index of elementwise kernels, TSHI_ISA_... */
    const tshi_gemm_kernel *gemm_kernel;
    const tshi_quant_kernel *quant_kernel;
    int isa;
    char cpu[TSHI_CPU_TEXT]; /* what tsh_cpu_text returns */
    tsh_dtype dtype; /* dtype of new parameters */
    tshi_block *gemm_scratch;            /* packed operands of the built-in product; NULL: none
                                          * yet */
    tshi_matmul_order order; /* order in which products of few rows read their matrices */
    int threads; /* number of threads of this rank, at least 1 */
    int dry;     /* 1: tsh_dry_run is on: kernels of floating values do not run */
    tshi_block *rope_table;  /* cosines and sines of the last tsh_rope in this step, or NULL */
    tshi_angles rope_angles; /* what the angles in rope_table depend on */
    uint64_t seed, randn_calls, dropout_calls; /* calls so far: key of new random numbers */
    tsh_mem mem;      /* statistics: what tsh_mem_stats returns */
    tshi_pool pool;   /* the pool of step memory */
    tshi_arena books; /* arena of small structures that live as long as the ctx */
    tshi_handles handles;
    tshi_tape tape;
    tshi_buckets buckets;
    int depth;         /* how many scopes (tsh_scope_begin) are open */
    int changes;       /* number of changes of the module tree so far; optimisers compare it */
    int check_inputs;  /* 1: tsh_check_inputs is on */
    int anomalies;     /* 1: tsh_detect_anomaly is on: a NaN or an infinity is an error */
    tshi_trace *trace; /* the trace that is being recorded; NULL: none */
    tsh_module *root;  /* root of the module tree */
    const tsh_module *module; /* the innermost module whose forward or backward runs, or NULL */
    /* Compares the models of all ranks; NULL: this rank has no model. It is a pointer because
     * collectives call it, and it calls collectives. */
    tsh_result (*compare)(tsh_comm *comm, tsh_ctx *ctx);
    tsh_optim *optims;      /* list of all optimisers, the newest first */
    tsh_ema *emas;          /* list of all averages of weights, the newest first */
    tsh_outer *outers;      /* list of all tsh_outer, the newest first; while it is not empty,
                             * gradients are not averaged over dp */
    tshi_outer_request *outer_requests; /* list of all requests of any tsh_outer */
    tsh_pipeline *pipeline; /* the first pipeline; NULL: none */
    tsh_cache *caches;      /* list of all cache handles, freed ones included: they are reused */
    tshi_micro *micros;     /* list of the micro-batches of all pipelines */
};

/* max parameters of a module: weight and bias; of batch norm also running_mean, running_var and
 * num_batches_tracked */
enum { TSHI_MODULE_PARAMS = 5 };

/* A named integer argument of a module, such as its number of heads. */
typedef struct tshi_argument {
    struct tshi_argument *next;
    const char *name;     /* such as "heads" */
    int64_t value, local; /* value: of the whole module; local: of this rank's shard */
} tshi_argument;

/* One A and one B of an adapter (see >>adapter). A layer that holds several layers of a file, such
 * as q, k and v, has one part for each. */
typedef struct tshi_adapter_part {
    tsh_module *a, *b; /* the modules whose parameter 0 is A, and B */
    int64_t length;    /* number of output features */
} tshi_adapter_part;

/* An adapter of low rank of a linear layer, whose weight is W. */
typedef struct tshi_adapter tshi_adapter;
struct tshi_adapter {
    tshi_adapter *next;      /* the next adapter of the layer; NULL: none */
    const char *name;        /* such as "default" */
    double scale, dropout;   /* s in y = W x + b + s B A dropout(x); its probability */
    tshi_adapter_part *part; /* `parts` entries, in the order of W's output features */
    int parts;
    /* while the adapter is merged into W: an owned tensor with the values that W had before, which
     * tsh_close releases, too; NULL: it is not merged */
    tsh_tensor *kept;
};

struct tsh_module {
    tsh_ctx *ctx;
    const char *name, *path; /* name: "c_fc"; path: "h.3.mlp.c_fc"; both "" for the root */
    tsh_module *parent, *first, *last, *next; /* parent; first and last child; next sibling */
    tsh_forward_fn forward; /* a container's function, given by the user; NULL: runs the children in
                             * turn */
    void *user;             /* passed to forward; in attention and MLP layers: the layer's own
                             * struct */
    tsh_tensor *param[TSHI_MODULE_PARAMS];      /* parameters of the module; NULL: none */
    const char *param_name[TSHI_MODULE_PARAMS]; /* names in param: "weight", "bias", ... */
    tshi_argument *arguments;                   /* list of arguments; NULL: none */
    int evaluating;         /* 1: tsh_train(module, 0) was called: not in training mode */
    int checkpoint;         /* 1: forward saves the inputs only and is run again in backward */
    tsh_tensor *segments;   /* tsh_set_segments: which positions attention may see; NULL: all */
    uint64_t dropout_calls; /* dropout calls in training mode so far; each draws another mask */
    double number;          /* norm layers: eps; dropout layers: p, the probability of a zero */
    int plus_one;           /* rms norm: 1: multiplies by weight + 1, as in Gemma */
    tsh_lookup_desc lookup; /* embedding: its options */
    const struct tshi_kind *kind; /* the module's kind: linear, embedding, container, ... */
    tsh_style style;              /* how the plan shards the module */
    int skip_bias_add, reversed, regather; /* linear: options of its tsh_linear_desc */
    /* linear layers: list of the layer's adapters of low rank, newest first; the active one, which
     * forward adds; NULL: none */
    tshi_adapter *adapters, *adapter;
    /* tshi_adapter_add, set by tsh_lora: programs without it do not contain adapters */
    tsh_tensor *(*adapt)(const tsh_module *module, tsh_tensor *x, tsh_tensor *y,
                         const tsh_layout *give);
    int stage;                             /* 1 + its pipeline stage; 0: in no stage */
    /* Layouts that the rules of a plan (tsh_parallelize) ask for; NULL: no rule does. */
    const tsh_layout *input_layout, *output_layout; /* the plan rule's .input and .output */
    const tsh_layout **input_layouts; /* the first `prepared` inputs are redistributed to these */
    const tsh_layout *result;         /* the output is redistributed to this layout */
    int prepared;                     /* length of input_layouts */
};

/* Returns a * b, or SIZE_MAX on overflow, which every allocator refuses. */
static size_t tshi_base_mul(size_t a, size_t b) {
    return b && a > SIZE_MAX / b ? SIZE_MAX : a * b;
}

/* Makes a text safe to show in one line, whatever strings of files or of other programs are in it:
 * replaces control characters by '?', and also those Unicode characters that begin a new line or
 * change the direction of writing (U+200E, U+200F, U+2028 to U+202E, U+2066 to U+2069). The text is
 * in UTF-8. */
static TSHI_COLD void tshi_base_quote(char *text) {
    unsigned char *at = (unsigned char *)text;
    while (*at) {
        int n = at[0] < 0x20 || at[0] == 0x7F; /* number of bytes to replace at `at` */
        if (at[0] == 0xC2 && at[1] >= 0x80 && at[1] < 0xA0) n = 2; /* U+0080 to U+009F */
        if (at[0] == 0xE2 && at[1] == 0x80 &&
            (at[2] == 0x8E || at[2] == 0x8F || (at[2] >= 0xA8 && at[2] <= 0xAE)))
            n = 3;
        if (at[0] == 0xE2 && at[1] == 0x81 && at[2] >= 0xA6 && at[2] <= 0xA9) n = 3;
        if (n > 0) memset(at, '?', (size_t)n);
        at += n > 0 ? n : 1;
    }
}

static int64_t tshi_base_min(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static int64_t tshi_base_ceil(int64_t a, int64_t b) {
    return (a + b - 1) / b; /* a / b rounded up; a >= 0, b > 0 */
}

/* Returns the value that an option stands for: `usual` if given is 0, 0 if it is TSH_ZERO. */
static double tshi_base_option(double given, double usual) {
    return given > 0 ? given : given < 0 && given >= TSH_ZERO ? 0 : usual;
}

/* The monotonic clock. glibc and musl have it, but hide its declaration under -std=c99 (never in
 * C++); a feature macro set here would come too late if the program has included a header before.
 * So declare it here: on Linux clockid_t is int, and CLOCK_MONOTONIC is 1. */
#if TSHI_POSIX && defined(CLOCK_MONOTONIC)
#define TSHI_CLOCK CLOCK_MONOTONIC
#elif defined(__linux__)
#define TSHI_CLOCK 1
#if defined(__USE_TIME64_REDIRECTS) || defined(_REDIR_TIME64) ||                                   \
    (defined(__USE_TIME_BITS64) && defined(__TIMESIZE) && __TIMESIZE == 32)
/* Where a 32-bit system has a 64-bit time_t, the symbol clock_gettime is the function for a 32-bit
 * time_t; __clock_gettime64 is that for 64 bits. */
extern int clock_gettime(int clock, struct timespec *time) __asm__("__clock_gettime64");
#else
extern int clock_gettime(int clock, struct timespec *time);
#endif
#endif

TSH_API int64_t tsh_now(void) {
#if defined(_WIN32)
    int64_t ticks[2]; /* [0]: the time in ticks; [1]: ticks per second */
    (void)QueryPerformanceCounter((union _LARGE_INTEGER *)&ticks[0]);
    (void)QueryPerformanceFrequency((union _LARGE_INTEGER *)&ticks[1]);
    return ticks[0] / ticks[1] * 1000000000 + ticks[0] % ticks[1] * 1000000000 / ticks[1];
#elif defined(TSHI_CLOCK)
    struct timespec t;
    (void)clock_gettime(TSHI_CLOCK, &t);
    return (int64_t)t.tv_sec * 1000000000 + (int64_t)t.tv_nsec;
#else
    return -1; /* no clock: clock() of C99 stands still while a thread sleeps */
#endif
}
