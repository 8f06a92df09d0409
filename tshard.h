/* tshard.h - tensors, autograd and tensor-parallel layers for C and C++, in one header.
 *
 * ========================================================================== */
/* >>front                                                       MARK: - front */
/* What this is, and the two lines that use it.                                */
/* Needs: nothing.                                                              */
/* ==========================================================================
 *
 * Do this in exactly one source file:
 *
 *     #define TSHARD_IMPLEMENTATION
 *     #include "tshard.h"
 *
 * and include it plainly wherever else it is used. It needs libc and libm: cc -O3 prog.c -lm. A
 * backend (backends/tshard_threads.h) is included after it, in the same file.
 *
 * MIT licence, see LICENSE. Version 0.1.0. */
#ifndef TSHARD_H
#define TSHARD_H

/* ========================================================================== */
/* >>contents                                                 MARK: - contents */
/* The sections of this file, in reading order; search for ">>name".              */
/* Needs: nothing.                                                              */
/* ==========================================================================
 *
 *     >>front         what this is
 *     >>contents      this list
 *     >>manual        how to use it, chapter by chapter
 *     >>config        what may be defined before including it
 *     >>types         results, dtypes, shapes, allocator, gemm
 *     >>layout-api    replicated, sharded, partial; who owns what
 *     >>comm-api      the contract of a backend; collectives
 *     >>api           every other public function
 *   -- end of header: stop here if you only want the API --
 *     >>base          macros, and the structures all sections share
 *     >>error         the first error is kept, reported, received
 *     >>mem           allocator, counted blocks, step pool, arenas
 *     >>dtype         what a dtype is, a row each: conversion, sums of collectives
 *     >>trace         what ran when, noted while it is asked for
 *     >>team          the threads of one rank
 *     >>rng           Philox, keyed by position
 *     >>layout        the ownership function
 *     >>tensor        handles, lifetimes, shapes, runs of a shard
 *     >>init          initial values
 *     >>tensor-api    checks of inputs; making tensors, asking about them
 *     >>math          exp, log, tanh, erf, pow of floats, vectorised
 *     >>kernel        strided loops, kernels per instruction set
 *     >>gemm          the built-in matrix product
 *     >>coll          what backends share: sums, comparing calls, settings
 *     >>compose       collectives made of SEND and RECV, for backends that have no more
 *     >>comm          the public entry points of collectives
 *     >>bucket        gradients on their way between replicas
 *     >>tape          recording, and backward with two accumulators
 *     >>dump          the tape as text and as a graph
 *     >>context       opening and closing one rank's world
 *     >>rule          layout rules of all ops
 *     >>op-map        elementwise ops, dropout, copies
 *     >>op-reduce     sum, mean, max, softmax
 *     >>op-view       reshape, permute, slice, concat
 *     >>redistribute  from one layout to another
 *     >>values        reading and writing; tensors as text
 *     >>op-matmul     matmul
 *     >>op-linear     linear: plain, column- and row-parallel
 *     >>op-embedding  rows by index
 *     >>op-norm       layer norm, rms norm
 *     >>op-rope       rotary positions
 *     >>op-attention  softmax(Q K^T) V in tiles
 *     >>op-loss       cross-entropy, also over a sharded vocabulary
 *     >>op-custom     an op of one's own
 *     >>module        walking the tree of modules, running one
 *     >>recompute     activation checkpoints
 *     >>module-api    the tree and its parameters; the same model on every rank
 *     >>nn            linear, embedding, layer norm, dropout as layers
 *     >>parallel      plans that shard a tree
 *     >>policy        plans for families of models
 *     >>optim         SGD, Adam, AdamW, clipping, schedules
 *     >>pipeline      layers dealt to stages, GPipe and 1F1B
 *     >>file          kinds of files, links, locks, the disk
 *     >>io            one file of all tensors: saving it, reading its header
 *     >>load          loading it at any degree
 *     >>check         hashes, replicas, finite differences
 *     >>trace-file    a trace of all ranks, as Chrome's JSON
 *     >>end           clean-up of macros
 */

/* ========================================================================== */
/* >>manual                                                     MARK: - manual */
/* How to use the library.                                                      */
/* Needs: nothing.                                                              */
/* ==========================================================================
 *
 * DOES NOT
 *   - run on GPUs, or in half precision: values are float, or double in a build with TSHARD_REAL;
 *   - print, exit, abort, or raise signals: errors are kept in the ctx;
 *   - keep global state: two programs' worth of it can live in one process;
 *   - make threads by itself: backends/tshard_threads.h does, one per rank.
 *
 * STEP BY STEP
 *   1. A runner gives your function a ctx, one rank's world:
 *
 *          static const tsh_desc desc = {.logger.fn = tsh_log_stderr};          prints errors
 *          int main(void) { return tsh_run(&desc, train, NULL); }               one rank
 *          int main(void) { return tsh_threads_run(2, &desc, train, NULL); }    two, as threads
 *
 *   2. Build a model as a tree of named layers, for one device:
 *
 *          tsh_linear_desc d = {.in = 2, .out = 32};
 *          tsh_module *up = tsh_add_linear(tsh_root(ctx), "up", &d);
 *
 *   3. Shard it by a plan. Without one, every rank computes the same:
 *
 *          static const tsh_plan_rule plan[] = {{.path = "up", .style = TSH_COLWISE},
 *                                               {.path = "down", .style = TSH_ROWWISE}};
 *          tsh_parallelize(tsh_root(ctx), plan, 2);
 *
 *      Blocks named as those of a known family need no plan: tsh_policy_find, and
 *      tsh_parallelize_policy.
 *
 *   4. Train. Ops return NULL after an error and take NULL without harm, so one check per step
 *      suffices:
 *
 *          while (tsh_ok(ctx) && step++ < 500) {
 *              tsh_tensor *y = tsh_forward(down, tsh_gelu(tsh_forward(up, x)));
 *              tsh_tensor *loss = tsh_mean(tsh_pow_scalar(tsh_sub(y, t), 2), TSH_ALL, 0);
 *              tsh_backward(ctx, loss);
 *              tsh_optim_step(adam);
 *              tsh_zero_grads(tsh_root(ctx));
 *              tsh_step_end(ctx);
 *          }
 *
 *   5. return !tsh_ok(ctx); The logger of step 1 has printed the error; tsh_last_error(ctx) has it.
 *
 * SHAPES ARE GLOBAL
 *   Every shape and index is that of the whole tensor: a model reads the same at any degree of
 *   tensor parallelism. tsh_dim(t, i) is global, tsh_local_dim(t, i) what this rank holds, which
 *   may be nothing: 4 heads on 3 ranks are 2, 2 and 0.
 *
 * LAYOUTS
 *   A tensor is R (replicated), S(d) (sharded along d) or P (a partial sum) over the
 *   tensor-parallel group. Ops derive layouts and refuse what would give wrong numbers, such as a
 *   bias added to a partial sum on every rank; the error names both layouts and the call that mends
 *   it, mostly tsh_redistribute. Layouts are checked at one rank too. Gradients have layouts as
 *   well: that of a P or R value is R, of an S value S alike. A replicated tensor with sharded
 *   consumers collects their contributions as one partial sum and all-reduces it once, as early as
 *   it can.
 *
 * LIFETIMES
 *   Owned tensors (tsh_tensor_new, tsh_tensor_from, tsh_keep, parameters) live until freed or until
 *   the ctx closes. Step tensors, all that ops return, live until tsh_step_end. tsh_backward gives
 *   most of their values back earlier: leaves, the loss, and tensors after tsh_retain keep them.
 *   Reading another is TSH_ERR_STALE. In loops without gradients, tsh_scope_begin and tsh_scope_end
 *   take the place of tsh_step_end. After the first steps a training loop calls the allocator no
 *   more.
 *
 * ERRORS
 *   The first error of a ctx is kept with code, rank and sentence; later ones are ignored. It
 *   reaches the other ranks at this rank's next tsh_ok, tsh_backward, tsh_optim_step, tsh_step_end,
 *   collective or tsh_close: they get the same code with "rank 1: " before the sentence, and leave
 *   the collective they may be in. tsh_clear_error before that recovers from a local error. The
 *   sentence begins with the path of the module, and the function, that fails, in forward and in
 *   backward: "h.3.mlp.c_fc: tsh_linear: input has 5 features, ...".
 *
 *   tsh_detect_anomaly(ctx, 1) makes the first NaN or infinity an error; tsh_tape_dump(ctx, stderr)
 *   before tsh_backward shows what was recorded.
 *
 *   The logger of tsh_desc, such as tsh_log_stderr, gets a ctx's error in one sentence, once, when
 *   it reaches the other ranks (with one rank: in the same calls). So an error that is cleared
 *   before is never logged. With several ranks, the sentence begins with the rank that logs it:
 *   "rank 1: ..." is an error of its own, "rank 0 stops: rank 1: ..." one that it learnt from rank
 *   1. Runners (tsh_run, tsh_threads_run, ...) also log why a rank could not start or join.
 *
 * THE SAME NUMBERS EVERYWHERE
 *   Initial weights and dropout masks are keyed by seed, path and global element index: the same
 *   bits at every degree. Sums over ranks have one documented order (see >>comm-api): the same bits
 *   on every rank, run and backend.
 *   Every rank must build the same model, with the same seed. After it is made, or changed, the
 *   next collective of tp, of dp and (pp is 1) of the world compares it first: modules and their
 *   kinds, shapes, layouts and dtypes of parameters, the seed. TSH_ERR_MISMATCH on every rank names
 *   the rank that differs and the first module where it does. With pp, tsh_pipeline_new compares
 *   over the world. The first collective after a change must be a blocking one on all ranks of its
 *   group, or a non-blocking one (tsh_start) on all; the latter compares nothing. What a call is
 *   given (heads, causal) is not compared.
 *
 *   The same bits are promised for FLT_EVAL_METHOD 0 only: where floats are computed in a wider
 *   format (x87, s390x in strict C), results are as accurate, but their last bit may differ.
 *
 * MEMORY
 *   Step memory is a pool that grows once. tsh_checkpoint(block, 1) keeps of a block's forward its
 *   inputs only and computes it again in backward, to the same bits.
 *
 * MICRO-BATCHES AND DATA PARALLELISM
 *   Ranks beyond tp times pp form replicas (dp), each with a batch of its own: the same program,
 *   whose parameters' gradients are averaged, in buckets that travel while backward goes on. Other
 *   leaves, such as inputs, keep the gradient of their own rank's loss; tsh_average_grad makes one
 *   of them be averaged, too. Micro-batches:
 *   tsh_backward_with(ctx, loss, &(tsh_backward_desc){.defer = 1}) for each, then tsh_sync_grads;
 *   nothing travels in between. Where batches are uneven or targets are ignored, give sums and what
 *   they count: {.summed = 1, .weight = targets}; then the gradient is that of the mean over all.
 *   tsh_optim_desc.zero cuts an optimiser's moments over the replicas: the same bits, less memory.
 *
 * PIPELINES
 *   tsh_desc.pp ranks share a model by layers: every rank makes the whole tree, which costs nothing
 *   yet, and tsh_pipeline_new deals the children of one container to them. Two functions say what
 *   comes before these children and after; tsh_pipeline_train runs them for every micro-batch:
 *
 *          tsh_tensor *first(tsh_ctx *ctx, int k, void *user);    embeds micro-batch k
 *          tsh_tensor *last(tsh_ctx *ctx, tsh_tensor *y, int k, void *user);    its loss
 *          tsh_pipeline_desc d = {.micro_batches = 8, .input = first, .loss = last, .user = me};
 *          tsh_pipeline *pipe = tsh_pipeline_new(tsh_find(root, "h"), &d);
 *          ...
 *              tsh_pipeline_train(pipe, &loss);
 *              tsh_optim_step(adam);
 *              tsh_zero_grads(root);
 *              tsh_step_end(ctx);
 *
 *   Gradients, dropout masks and, where no parameter is tied across stages, every bit are those of
 *   one rank that goes through the same micro-batches; the loss and the norm are known on every
 *   rank. Uneven micro-batches and ignored targets: losses are sums, and .weight what they count.
 *   Of p stages, each is idle for (p - 1) / (micro_batches + p - 1) of the time.
 *
 * CHECKPOINTS
 *   tsh_save(tsh_root(ctx), "model.safetensors", adam) on every rank writes one file of whole
 *   tensors; tsh_load reads it at any degree and layout, and training goes on with the same bits.
 *   Files of other programs load too, if names and shapes are the model's.
 *
 * WHERE THE TIME GOES
 *   tsh_trace_begin(ctx, &(tsh_trace_desc){.path = "trace.json"}) on every rank, a few steps,
 *   tsh_trace_end(ctx): a file for ui.perfetto.dev with a lane per rank.
 *
 * SPEED
 *   Compile with -O3 (and -fno-math-errno where the compiler has it, so that square roots
 *   vectorise). Kernels for AVX2 and AVX-512 are compiled beside portable ones and chosen at run
 *   time. tsh_desc.gemm takes any other matrix product. With -fopenmp, tsh_desc.threads gives a
 *   rank more cores: the same bits; ranks times threads should not be more than the cores.
 *
 * BUILDING
 *   Give the implementation a source file of its own, such as tshard.c:
 *
 *          #define TSHARD_IMPLEMENTATION
 *          #include "tshard.h"
 *          #include "backends/tshard_threads.h"       and other backends that the program uses
 *
 *   It is then compiled once: in 13 s by gcc 12 at -O3, in 10 s by clang 14. A build compiles again
 *   only files that call the library; compiling and linking the first example takes 0.1 s.
 *
 *   Threads: backends/tshard_threads.h needs -pthread, to compile and to link. The manual on top of
 *   each backend names the macros and libraries that it needs.
 *
 *   Small programs: with the options
 *
 *          -O2 -ffunction-sections -fdata-sections -Wl,--gc-sections -s
 *
 *   the linker leaves out what is not called: a program with one linear layer has 158 KB (gcc 12,
 *   x86-64).
 *
 *   C++: descriptors as {.in = 2, .out = 32}, the form in this manual, are C99 and C++20. With
 *   -pedantic, compilers warn of them before C++20; with -Wextra, g++ warns of the members left
 *   out, in C++20 too. This form has no warnings from C++11 on (= {} sets all members to zero,
 *   their default):
 *
 *          tsh_linear_desc up = {};
 *          up.in = 2;
 *          up.out = 32;
 *          tsh_module *first = tsh_add_linear(net, "up", &up);
 *
 *   CMake: add_subdirectory, FetchContent or find_package(tshard) give the targets tshard::tshard,
 *   ::threads, ::uv, ::mpi and ::blis, and tshard::static, the implementation as a library.
 *   pkg-config: `make install` installs tshard.pc. `make shared` builds libtshard.so. */

/* ========================================================================== */
/* >>config                                                     MARK: - config */
/* The switches a user may define before including this file.                  */
/* Needs: nothing.                                                              */
/* ========================================================================== */

/* TSHARD_IMPLEMENTATION   in exactly one source file: compile the library, and every backend
 *                         included there
 * TSHARD_STATIC           all functions static: several copies may live in one program
 * TSHARD_SHARED           with the implementation: a shared library exports the public functions,
 *                         also under -fvisibility=hidden
 * TSHARD_REAL             float (default) or double: the type of all values
 * TSHARD_NO_SIMD          portable C kernels only
 * TSHARD_WINDOWS_AVX      AVX kernels with gcc for Windows, too, which has them off: it may keep
 *                         32-byte vectors at addresses that are multiples of 16 only, and crash
 *                         (GCC bug 54412; the gcc of Debian and of MSYS2 is patched) */
#ifndef TSHARD_REAL
#define TSHARD_REAL float
#endif

#ifdef TSHARD_STATIC
#if defined(__GNUC__)
#define TSH_API __attribute__((unused)) static
#else
#define TSH_API static
#endif
#elif defined(TSHARD_SHARED) && defined(_WIN32)
#define TSH_API __declspec(dllexport) extern
#elif defined(TSHARD_SHARED) && defined(__GNUC__)
#define TSH_API __attribute__((visibility("default"))) extern
#else
#define TSH_API extern
#endif

#if defined(__MINGW32__) /* printf of the C runtime, or of mingw: stdio.h says which */
#define TSH_PRINTF(fmt, first) __attribute__((format(__MINGW_PRINTF_FORMAT, fmt, first)))
#elif defined(__GNUC__)
#define TSH_PRINTF(fmt, first) __attribute__((format(printf, fmt, first)))
#else
#define TSH_PRINTF(fmt, first)
#endif

/* Of this header; tsh_version() is that of the library a program is linked with. */
#define TSHARD_VERSION_MAJOR 0
#define TSHARD_VERSION_MINOR 1
#define TSHARD_VERSION_PATCH 0
#define TSHARD_VERSION /* "MAJOR.MINOR.PATCH" */                                                   \
    TSH_VERSION_TEXT(TSHARD_VERSION_MAJOR, TSHARD_VERSION_MINOR, TSHARD_VERSION_PATCH)
#define TSH_VERSION_TEXT(major, minor, patch)   TSH_VERSION_QUOTED(major, minor, patch)
#define TSH_VERSION_QUOTED(major, minor, patch) #major "." #minor "." #patch

#define TSH_MAX_DIMS     6
#define TSH_MAX_SEGMENTS 4
#define TSH_MESSAGE_SIZE 512
#define TSH_PATH_SIZE    192

/* ========================================================================== */
/* >>types                                                       MARK: - types */
/* Plain values that everything else is made of.                               */
/* Needs: >>config.                                                             */
/* ========================================================================== */

#include <stddef.h> /* size_t, offsetof */
#include <stdint.h> /* int64_t */
#include <stdio.h>  /* FILE */

#ifdef __cplusplus
extern "C" {
#endif

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

typedef enum tsh_dtype { TSH_F32, TSH_F64, TSH_I32, TSH_I64 } tsh_dtype;

/* Says 0 for an option whose 0 means "the default": {.beta1 = TSH_ZERO}. Only options that name it
 * take it. */
#define TSH_ZERO (-1e-300)

/* The dtype of values: TSH_F32, or TSH_F64 where TSHARD_REAL is double. */
#define TSH_REAL (sizeof(tsh_real) == 4 ? TSH_F32 : TSH_F64)

/* Bytes of one element; 0 of what is no dtype. */
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
    tsh_allocator_fn fn; /* NULL: libc */
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
 * may use tsh_desc.threads of its own. */
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
typedef struct tsh_pipeline tsh_pipeline; /* a model whose layers are dealt to the ranks of pp */

/* ========================================================================== */
/* >>layout-api                                             MARK: - layout-api */
/* Where a tensor lies over the tensor-parallel group, and who owns what.      */
/* Needs: >>types.                                                              */
/* ========================================================================== */

typedef enum tsh_layout_kind {
    TSH_REPLICATED, /* R     every rank holds the same values */
    TSH_SHARDED,    /* S(d)  cut along dimension d */
    TSH_PARTIAL     /* P     the value is the sum over the ranks */
} tsh_layout_kind;

/* A sharded dimension is a row of segments (one, unless weights are fused: [Q|K|V]); each is cut by
 * torch.chunk's rule in units: c = ceil(units / P), rank r owns units [min(r c, n), min((r + 1) c,
 * n)), and holds its pieces of all segments one after the other. A unit (a head) is never cut. */
typedef struct tsh_segment {
    int64_t length; /* in elements; 0, before it is on a tensor: an equal part of the dimension */
    int64_t unit;   /* elements that stay together; 0: 1 */
} tsh_segment;

typedef struct tsh_layout {
    tsh_layout_kind kind;
    int dim;      /* sharded only; negative counts from the end */
    int segments; /* sharded only; 0: 1 */
    tsh_segment segment[TSH_MAX_SEGMENTS];
} tsh_layout;

/* A layout of each kind. shard_segments: `segments` equal parts, each cut in `unit`s. */
TSH_API tsh_layout tsh_replicated(void);
TSH_API tsh_layout tsh_partial(void);
TSH_API tsh_layout tsh_sharded(int dim);
TSH_API tsh_layout tsh_shard_units(int dim, int64_t unit);
TSH_API tsh_layout tsh_shard_segments(int dim, int segments, int64_t unit);

typedef struct tsh_range {
    int64_t start, length; /* in elements of the global dimension */
} tsh_range;

/* The ownership function, the only one: writes the ranges of a dimension of `length` elements that
 * `rank` of `size` owns (one per segment, empty ones included) and returns their total length.
 * `ranges` may be NULL. Replicated and partial layouts own everything. -1: the layout's segments or
 * units do not fit the length. */
TSH_API int64_t tsh_chunk(const tsh_layout *layout, int64_t length, int size, int rank,
                          tsh_range ranges[TSH_MAX_SEGMENTS]);

/* Writes "R", "P", "S(1)" or "S(1, 3 segments, unit 64)" into text; returns text. */
TSH_API char *tsh_layout_text(const tsh_layout *layout, char *text, size_t size);

/* ========================================================================== */
/* >>comm-api                                                 MARK: - comm-api */
/* Groups of ranks, what a backend must do, and the collectives.               */
/* Needs: >>types.                                                              */
/* ========================================================================== */

/* HOW A BACKEND WORKS
 *
 * A backend is a const table of functions (tsh_comm_ops) and a tsh_comm per group. The
 * public entry points (tsh_allreduce and so on) check the arguments, number the call, count it, and
 * hand the descriptor (tsh_coll) on.
 *
 *  1. start(comm, coll, req) posts a collective and never waits for a peer. It copies the
 * descriptor; counts and buffers stay the caller's, valid and untouched until wait. At least 64 may
 * be in flight on one comm (tsh_comm counts them; past 64 start is refused), each is waited for
 * exactly once, in any order.
 *  2. All ranks of a group start the same collectives in the same order; between groups any order
 * goes. SEND, RECV and SENDRECV are numbered per pair of ranks and direction instead. split is
 * posted and checked like a collective.
 *  3. test and progress never block. A wait on any request progresses every outstanding request of
 * this rank, on all comms, so that no order of waits can deadlock.
 *  4. No call returns, not even with an error, while a peer or a pending write may still touch its
 * buffers.
 *  5. Order of sums: element e in chunk k (torch.chunk's rule over the flat buffer; in
 * REDUCE_SCATTER rank k's piece by counts) is x[k+1] + x[k+2] + ... + x[k+P], indices mod P, left
 * to right: a ring's order. Segmentation, message size and threads never change bits. AVG divides
 * the finished sum by P once, floats only. Integers wrap. NaN in any rank gives NaN, for MIN and
 * MAX too; MIN and MAX of equal values keep the left one.
 *  6. Zero is a legal count everywhere. recv may equal send in ALLREDUCE; in ALLGATHER, send may
 * point to its own place in recv. Other overlaps are errors of the caller.
 *  7. The world's error is the first one (a mismatch, a lost rank, an abort). With it the world and
 * every group split from it have failed, and every rank that is in a call, or makes one later, gets
 * the same code, rank and sentence. status returns it without blocking. abort may be called from
 * any thread.
 *  8. close releases the comm; its requests must have been waited for, or the world must have
 * failed.
 *  9. A backend may do no more than bring messages from rank to rank of a world, also from a rank
 * to itself: tsh_comm_compose makes collectives, groups and errors of that
 * (examples/05_write_a_backend.c). It has start, progress, status, abort, close, and idle, which
 * sleeps until there may be something to do, for ns at most. start gets a SEND or a RECV of at most
 * TSH_MESSAGE_BYTES. A SEND is copied before start returns. A RECV takes the oldest message of its
 * sender with its seq, which has its length. If none has arrived yet, start sets *req to 1 and is
 * called again later; if the sender is gone for good, it returns TSH_ERR_LOST. progress sends and
 * receives without blocking, close sends what is left. status and abort are those of rule 7. */

typedef enum tsh_coll_kind {
    TSH_ALLREDUCE,      /* send count, recv count */
    TSH_ALLGATHER,      /* send recv_counts[rank], recv the sum of recv_counts */
    TSH_REDUCE_SCATTER, /* send the sum of recv_counts, recv recv_counts[rank] */
    TSH_BROADCAST,      /* recv count, from root's recv */
    TSH_ALLTOALL,       /* send send_counts[r] to, recv recv_counts[r] from each r, in order */
    TSH_SEND,           /* send count to send_to */
    TSH_RECV,           /* recv count from recv_from */
    TSH_SENDRECV,       /* both at once: send send_counts[0], recv recv_counts[0] */
    TSH_BARRIER,        /* nothing moves */
    TSH_SPLIT,          /* posted by tsh_split */
    TSH_COLL_KINDS
} tsh_coll_kind;

typedef enum tsh_redop { TSH_SUM, TSH_PROD, TSH_MIN, TSH_MAX, TSH_AVG } tsh_redop;

/* One collective, described. Counts are in elements of dtype. */
typedef struct tsh_coll {
    uint32_t size; /* sizeof(tsh_coll) */
    tsh_coll_kind kind;
    tsh_dtype dtype;
    tsh_redop redop;
    const void *send;
    void *recv;
    int64_t count;
    const int64_t *send_counts, *recv_counts; /* per rank */
    int64_t blocks; /* ALLGATHER, REDUCE_SCATTER, ALLTOALL: rows of counts (an inner dim); 0: 1;
                       of other kinds tsh_start makes it 1 */
    int root, send_to, recv_from, tag; /* -1: none */
    uint64_t seq;                      /* tsh_start numbers the collectives of a group */
    int64_t timeout_ns;                /* from start; 0: the backend's default */
} tsh_coll;

typedef uint64_t tsh_req; /* 0: nothing to wait for */
typedef struct tsh_comm tsh_comm;

#define TSH_COMM_ABI    1u
#define TSH_MESSAGE_BYTES 32768 /* the longest message that rule 9 asks for */
#define TSH_CAP_ORDERED 1u /* sums in the documented order */
#define TSH_CAP_DEATH   2u /* notices a rank that dies      */

typedef struct tsh_comm_ops {
    uint32_t size, abi; /* sizeof(tsh_comm_ops), TSH_COMM_ABI */
    const char *name;
    uint64_t caps;
    tsh_result (*start)(tsh_comm *comm, const tsh_coll *coll, tsh_req *req);
    tsh_result (*test)(tsh_comm *comm, tsh_req req, int *done);
    tsh_result (*wait)(tsh_comm *comm, tsh_req req);
    void (*progress)(tsh_comm *comm);
    tsh_result (*split)(tsh_comm *comm, int color, int key, tsh_comm *out);
    tsh_result (*status)(tsh_comm *comm, tsh_error *error); /* the world's error; TSH_OK: none */
    void (*abort)(tsh_comm *comm, const tsh_error *why);
    void (*close)(tsh_comm *comm);
    void (*idle)(tsh_comm *comm,
                 int64_t ns); /* of a backend of messages only (rule 9); else NULL */
} tsh_comm_ops;

/* The table of a backend that does every kind: its functions are prefix_start, prefix_test and so
 * on. */
#define TSH_COMM_OPS(prefix, name, caps)                                                           \
    {                                                                                              \
        (uint32_t)sizeof(tsh_comm_ops), TSH_COMM_ABI, name, caps, prefix##_start, prefix##_test,   \
            prefix##_wait, prefix##_progress, prefix##_split, prefix##_status, prefix##_abort,     \
            prefix##_close, NULL                                                                   \
    }
/* That of a backend of messages only (rule 9). */
#define TSH_MESSAGE_OPS(prefix, name, caps)                                                        \
    {                                                                                              \
        (uint32_t)sizeof(tsh_comm_ops), TSH_COMM_ABI, name, caps, prefix##_start, NULL, NULL,      \
            prefix##_progress, NULL, prefix##_status, prefix##_abort, prefix##_close,              \
            prefix##_idle                                                                          \
    }

/* What was started, by kind. bytes: what a ring sends per rank (all-reduce 2
 * (P-1)/P n). */
typedef struct tsh_comm_stats {
    uint64_t calls[TSH_COLL_KINDS];
    uint64_t bytes[TSH_COLL_KINDS];
} tsh_comm_stats;

struct tsh_comm {
    const tsh_comm_ops *ops; /* NULL: a group of one, built in */
    void *impl;
    int rank, size;
    uint64_t id;
    uint64_t next_seq;
    int in_flight;
    tsh_comm_stats stats;
    struct tshi_trace *trace; /* the core's; NULL: none runs */
    tsh_ctx *unchecked; /* set by the core: the ctx whose model the ranks compare before the next
                         * collective; NULL: none */
};

/* -- collectives ------------------------------------------------------------
 * Blocking collectives. Buffers hold `count` elements of dtype; all return when this rank's buffers
 * are free again. Errors: the world's error (TSH_ERR_MISMATCH, LOST, TIMEOUT, ABORTED, MEMORY),
 * whose sentence tsh_comm_error tells, or TSH_ERR_ARGUMENT before anything starts. Each equals the
 * torch.distributed function of its name. */
/* Combines the buffers of all ranks element by element by op; every buffer gets the result. */
TSH_API tsh_result tsh_allreduce(tsh_comm *comm, void *buffer, int64_t count, tsh_dtype dtype,
                                 tsh_redop op);
/* recv holds counts[0] + counts[1] + ... elements, rank order, `blocks` times over. */
TSH_API tsh_result tsh_allgather(tsh_comm *comm, const void *send, void *recv,
                                 const int64_t *counts, int64_t blocks, tsh_dtype dtype);
/* send holds counts[0] + counts[1] + ... elements, `blocks` times over; recv takes the sum over the
 * ranks of this rank's counts[rank] of each block. */
TSH_API tsh_result tsh_reduce_scatter(tsh_comm *comm, const void *send, void *recv,
                                      const int64_t *counts, int64_t blocks, tsh_dtype dtype,
                                      tsh_redop op);
/* root's buffer to all ranks. */
TSH_API tsh_result tsh_broadcast(tsh_comm *comm, void *buffer, int64_t count, tsh_dtype dtype,
                                 int root);
/* send_counts[r] elements to each rank r and recv_counts[r] from it, in rank order, `blocks` times
 * over. */
TSH_API tsh_result tsh_alltoall(tsh_comm *comm, const void *send, const int64_t *send_counts,
                                void *recv, const int64_t *recv_counts, int64_t blocks,
                                tsh_dtype dtype);
/* To or from one rank; tsh_sendrecv does both at once. */
TSH_API tsh_result tsh_send(tsh_comm *comm, const void *buffer, int64_t count, tsh_dtype dtype,
                            int to);
TSH_API tsh_result tsh_recv(tsh_comm *comm, void *buffer, int64_t count, tsh_dtype dtype, int from);
TSH_API tsh_result tsh_sendrecv(tsh_comm *comm, const void *send, int64_t send_count, int to,
                                void *recv, int64_t recv_count, int from, tsh_dtype dtype);
/* Returns when every rank has called it. */
TSH_API tsh_result tsh_barrier(tsh_comm *comm);

/* The general, non-blocking form: fill a descriptor (start from tsh_coll_make), start it, wait for
 * it once. */
TSH_API tsh_coll tsh_coll_make(tsh_coll_kind kind, tsh_dtype dtype);
TSH_API tsh_result tsh_start(tsh_comm *comm, tsh_coll *coll, tsh_req *req);
TSH_API tsh_result tsh_test(tsh_comm *comm, tsh_req req, int *done);
TSH_API tsh_result tsh_wait(tsh_comm *comm, tsh_req req);
TSH_API tsh_result tsh_allreduce_start(tsh_comm *comm, void *buffer, int64_t count, tsh_dtype dtype,
                                       tsh_redop op, tsh_req *req);
TSH_API void tsh_comm_progress(tsh_comm *comm);

/* Ranks of one color form a group, ordered by key, then by rank. color -1: none (out gets size 0).
 * Collective. */
TSH_API tsh_result tsh_split(tsh_comm *comm, int color, int key, tsh_comm *out);
/* The world's error: its code, and the sentence where error is not NULL. Never blocks. */
TSH_API tsh_result tsh_comm_error(tsh_comm *comm, tsh_error *error);
/* Ends the world with this error on every rank. */
TSH_API void tsh_comm_abort(tsh_comm *comm, tsh_result code, const char *message);
/* Releases the comm, whose requests must have been waited for, unless its world has failed. */
TSH_API void tsh_comm_close(tsh_comm *comm);

/* -- writing a backend ------------------------------------------------------ */

/* What backends share, for those who write one: a comm and a runner, time, sentences, rule 5's
 * arithmetic, comparing calls, and ranks that wait for each other. dtype and op are ones that
 * tsh_start took. */

/* Rank `rank` of a group of `size`; nothing has been started on it. */
TSH_API tsh_comm tsh_comm_make(const tsh_comm_ops *ops, void *impl, int rank, int size,
                               uint64_t id);
/* Makes of a comm of messages (rule 9) for the whole world one that has everything,
 * in rule 5's order; it owns that one. The time limit is TSHARD_TIMEOUT's, else 300 s. Errors:
 * TSH_ERR_ARGUMENT (TSHARD_TIMEOUT is not a time), TSH_ERR_MEMORY, with a sentence in error. */
TSH_API tsh_result tsh_comm_compose(const tsh_comm *messages, tsh_comm *out, tsh_error *error);

/* Nanoseconds of a clock that is never set back; -1: the system has none. */
TSH_API int64_t tsh_now(void);
/* The time limit of a world in ns, at most 2^61: `given` seconds (negative: no limit) where a desc
 * has them in a field called `name`; if that is 0, TSHARD_TIMEOUT (0: no limit), else 300 s.
 * Returns 0 with a sentence in error if the number is NaN or the variable is not a time. */
TSH_API int tsh_timeout(double given, const char *name, int64_t *ns, tsh_error *error);
/* The same of another variable and default. */
TSH_API int tsh_time_limit(double given, const char *name, const char *variable, double otherwise,
                           int64_t *ns, tsh_error *error);
/* The time (tsh_now) at which a call that starts now times out: timeout_ns from now, or `otherwise`
 * from now if timeout_ns is 0. */
TSH_API int64_t tsh_deadline(int64_t timeout_ns, int64_t otherwise);

/* Fills *error. Returns code. */
TSH_API tsh_result tsh_error_set(tsh_error *error, tsh_result code, int rank, const char *format,
                                 ...) TSH_PRINTF(4, 5);
/* Appends to text, which has `capacity` bytes; cuts what does not fit. */
TSH_API void tsh_text_add(char *text, size_t capacity, const char *format, ...) TSH_PRINTF(3, 4);

/* Rule 5's operation on n elements: out = left op right (AVG adds). out may be left or right, but
 * not overlap them otherwise. */
TSH_API void tsh_coll_fold(void *out, const void *left, const void *right, int64_t n,
                           tsh_dtype dtype, tsh_redop op);
/* AVG's division of n finished sums by the number of ranks; nothing for other ops. */
TSH_API void tsh_coll_finish(void *sums, int64_t n, tsh_dtype dtype, tsh_redop op, int size);
/* Rule 5's sum of n elements of chunk k: out = x[k+1] + x[k+2] + ... + x[k+P]. part(user, r) is
 * where those of rank r are; out may be the first of them, and overlaps no other. */
TSH_API void tsh_coll_sum(void *out, int64_t n, const tsh_coll *coll, int size, int k,
                          const void *(*part)(const void *user, int r), const void *user);
/* counts[0] + ... + counts[r-1]: where rank r's part of a row starts. */
TSH_API int64_t tsh_coll_before(const int64_t *counts, int r);
/* Rule 5's chunks: where chunk k of n elements over `size` ranks starts; of k = size: n. */
TSH_API int64_t tsh_coll_chunk(int64_t n, int size, int k);
/* Equal exactly where the descriptors of two ranks of `size`, both taken by tsh_start, fit (up to a
 * chance of 2^-64). A SEND fits the RECV of its dtype, count and tag; of a SENDRECV, describe the
 * halves. An ALLTOALL's counts are not in it: they are to be compared pair by pair. */
TSH_API uint64_t tsh_coll_digest(const tsh_coll *coll, int size);
/* Writes "all-reduce of 7 f32 (sum)" into text, cut to `capacity` bytes; of counts that differ from
 * other's (may be NULL), the first of `size`. Any values will do, and counts may be NULL: coll may
 * come from a broken peer. Returns text. */
TSH_API char *tsh_coll_text(const tsh_coll *coll, const tsh_coll *other, int size, char *text,
                            size_t capacity);

/* Appends "all-reduce of 7 f32 (sum), collective 3 of group 1"; messages have no number. */
TSH_API void tsh_coll_where(const tsh_coll *coll, int size, uint64_t seq, uint64_t group,
                            char *text, size_t capacity);
/* The SEND or the RECV that a message is, or that a SENDRECV has: its count is in .count. */
TSH_API tsh_coll tsh_coll_half(const tsh_coll *coll, int receives);

/* What a rank of a group has called. */
typedef struct tsh_call {
    tsh_coll coll; /* its counts may be NULL; kind TSH_COLL_KINDS: it closes the group */
    uint64_t digest;
    int rank;   /* of the world */
    int counts; /* how many of coll's counts are known */
} tsh_call;
/* Compares the calls of `size` ranks; call(user, r, out) returns 0 if rank r has made none. Returns
 * 1, and the world's error, if they do not fit: the largest part is right (of several, the one with
 * the lowest rank), and the lowest rank that is not in it is blamed. Of all-to-alls with different
 * counts, the rank with the most of them; of several, the lowest but rank 0. */
TSH_API int tsh_call_mismatch(int (*call)(const void *user, int r, tsh_call *out), const void *user,
                              int size, uint64_t seq, uint64_t group, tsh_error *error);
/* The error of a SEND and a RECV (halves) that do not fit, by world rank `from` and `to`. */
TSH_API void tsh_message_mismatch(const tsh_coll *sent, const tsh_coll *wanted, int from, int to,
                                  uint64_t number, uint64_t group, tsh_error *error);
/* Of two ranks that disagree, which is blamed: the one that is not rank 0, else the lower. */
TSH_API int tsh_blamed(int a, int b);

/* Where ranks of one color are in their new group: fills order with the ranks r of `size` whose
 * color is `color`, sorted by key, then by rank. Returns how many there are. */
typedef struct tsh_ticket {
    int32_t color, key;
} tsh_ticket;
TSH_API int tsh_split_order(const void *tickets, size_t stride, int size, int color, int *order);

/* A rank in a search for ranks that wait for each other. */
typedef struct tsh_coll_search {
    int seen;       /* 1: it is on the path, 2: it leads to no cycle */
    int from, next; /* the ranks before and after it; -1: none */
    int edge;       /* which of those that it waits for is tried next */
} tsh_coll_search;

/* A rank of a cycle to which rank r of `size` leads, -1 if there is none: on a cycle all wait for
 * ever. Around it leads .next of search, which has an entry per rank, zeros before the first of
 * several searches. awaits(user, r, i) is the i-th rank, i < size, that r waits for, or -1. Depth
 * first. */
TSH_API int tsh_coll_cycle(tsh_coll_search *search, int size, int r,
                           int (*awaits)(const void *user, int r, int i), const void *user);
/* Which rank of a cycle, r is another, is out of step and blamed: the one in whose call the fewest
 * ranks wait (together(user, r)); of several the lowest, rank 0 last. *waits: a rank that waits for
 * it. */
TSH_API int tsh_coll_blame(const tsh_coll_search *search, int r,
                           int (*together)(const void *user, int r), const void *user, int *waits);

/* For backends whose ranks tell each other where they wait. How far a rank has come: collectives
 * that it has started in a group (peer -1), or messages to and from a peer, a rank of the world. */
typedef struct tsh_wait_mark {
    uint64_t group, sends, recvs; /* of collectives: sends */
    int64_t peer;
} tsh_wait_mark;
/* Where a rank waits, in one piece of memory: marks follow, then the `awaited` ranks of the world
 * that it waits for (ints). */
typedef struct tsh_wait_report {
    uint64_t group, seq, send_number, recv_number;
    int32_t pairwise, send_to, recv_from; /* pairwise: ranks of the world; -1: not awaited */
    int32_t awaited, marks;
    char text[256]; /* the call, in words */
} tsh_wait_report;
/* 1 if rank m has not done its part of what rank r waits for, as far as its last report tells, and
 * waits itself. report: of each rank the last one; NULL: it does not wait, as far as is known. */
TSH_API int tsh_wait_missing(tsh_wait_report *const *report, int r, int m);
/* Whether rank r of `size` waits in a cycle, which then never ends: 1, and the world's error. (A
 * rank goes on only when those that it waits for have. So of a cycle none can have been the first
 * to go on since it reported, and old reports do.) search has an entry per rank. */
TSH_API int tsh_wait_cycle(tsh_wait_report *const *report, int size, int r, tsh_coll_search *search,
                           tsh_error *error);
/* Appends "; absent ranks: 1 3" to the error of rank r's time limit, and names the first of them:
 * those that it waits for, and that do not wait where it does. */
TSH_API void tsh_wait_absent(tsh_wait_report *const *report, int r, tsh_error *error);

/* Settings of a backend that come from the environment. Each function reads the variable `name`
 * and returns 1 if it is set; 0 if it is unset or empty; -1, with a sentence in error
 * (TSH_ERR_ARGUMENT), if its value is not accepted. Unless it returns 1, the result stays as it
 * was. No blanks, signs or exponents are accepted, and the locale does not matter. */
/* Reads a whole number from low to high; low is at least 0. */
TSH_API int tsh_env_int(const char *name, int low, int high, int *value, tsh_error *error);
/* Reads a time in seconds with an optional fraction ("30", "0.5"), at most 1e9, as nanoseconds. */
TSH_API int tsh_env_seconds(const char *name, int64_t *ns, tsh_error *error);
/* Copies the variable into text, `capacity` bytes with its final 0. The error does not repeat
 * it, as it may be a secret. */
TSH_API int tsh_env_text(const char *name, char *text, size_t capacity, tsh_error *error);

/* ========================================================================== */
/* >>api                                                           MARK: - api */
/* Every public function, in the order of the sections that define them.          */
/* Needs: >>types >>layout-api >>comm-api.                                      */
/* ========================================================================== */

/* -- error ------------------------------------------------------------------ */

/* "0.1.0": TSHARD_VERSION as it was when the implementation was compiled, which in a shared library
 * may be another than this header's. */
TSH_API const char *tsh_version(void);
/* "TSH_ERR_SHAPE", and "shapes do not fit". */
TSH_API const char *tsh_result_name(tsh_result code);
TSH_API const char *tsh_result_text(tsh_result code);
/* 1 while ctx holds no error. A local error is told to all ranks here; a peer's is learnt here. */
TSH_API int tsh_ok(tsh_ctx *ctx);
/* The first error since the last clear: code, world rank at fault, sentence. Never NULL. */
TSH_API const tsh_error *tsh_last_error(const tsh_ctx *ctx);
/* Forgets a local error that was not told to the peers yet; the world's verdict stays. */
TSH_API void tsh_clear_error(tsh_ctx *ctx);
/* Records an error of the caller's own, printf-style. Returns code. */
TSH_API tsh_result tsh_fail(tsh_ctx *ctx, tsh_result code, const char *format, ...)
    TSH_PRINTF(3, 4);
/* A function for tsh_logger.fn: prints "tshard: ", the message and a newline to stderr. `user` is
 * not read. Threads may call it at the same time; their lines do not mix. */
TSH_API void tsh_log_stderr(void *user, const char *message);
/* Gives logger->fn a message, printf-style, of at most TSH_MESSAGE_SIZE bytes. Does nothing where
 * logger or its fn is NULL. For backends and runners. */
TSH_API void tsh_log_message(const tsh_logger *logger, const char *format, ...) TSH_PRINTF(2, 3);

/* -- memory ----------------------------------------------------------------- */

typedef enum tsh_mem_kind {
    TSH_MEM_PARAMETERS,
    TSH_MEM_GRADIENTS, /* of leaves */
    TSH_MEM_OPTIMISER,
    TSH_MEM_TENSORS, /* other owned tensors */
    TSH_MEM_STEP,    /* the step pool: what ops return, their gradients, scratch */
    TSH_MEM_BOOKS,   /* handles, tape, modules */
    TSH_MEM_KINDS
} tsh_mem_kind;

/* now and peak by kind, in bytes held; total: what was asked of the allocator; step_live and
 * step_live_peak: bytes of the step pool in use; calls: allocator calls so far. */
typedef struct tsh_mem {
    size_t now[TSH_MEM_KINDS], peak[TSH_MEM_KINDS];
    size_t total, total_peak, step_live, step_live_peak;
    uint64_t calls;
} tsh_mem;
TSH_API tsh_mem tsh_mem_stats(const tsh_ctx *ctx);

/* -- tensors ---------------------------------------------------------------- */

/* Global shapes of 0 (a scalar) to 4 dimensions. */
TSH_API tsh_shape tsh_shape0(void);
TSH_API tsh_shape tsh_shape1(int64_t a);
TSH_API tsh_shape tsh_shape2(int64_t a, int64_t b);
TSH_API tsh_shape tsh_shape3(int64_t a, int64_t b, int64_t c);
TSH_API tsh_shape tsh_shape4(int64_t a, int64_t b, int64_t c, int64_t d);

/* Owned tensors: they live until freed or until the ctx closes. layout NULL: replicated.
 * new: zeros. from: copies this rank's piece from data (the whole tensor where replicated: the
 * caller promises that all ranks of tp give the same). */
TSH_API tsh_tensor *tsh_tensor_new(tsh_ctx *ctx, tsh_dtype dtype, tsh_shape shape,
                                   const tsh_layout *layout);
TSH_API tsh_tensor *tsh_tensor_from(tsh_ctx *ctx, tsh_dtype dtype, tsh_shape shape,
                                    const tsh_layout *layout, const void *data);
TSH_API void tsh_tensor_free(tsh_tensor *t);

/* Step tensors, replicated; values are tsh_real, but for arange of an integer dtype.
 * arange: start, start + step, ... below stop. randn: standard normal, keyed by the ctx's seed and
 * a count of calls. */
TSH_API tsh_tensor *tsh_zeros(tsh_ctx *ctx, tsh_shape shape);
TSH_API tsh_tensor *tsh_ones(tsh_ctx *ctx, tsh_shape shape);
TSH_API tsh_tensor *tsh_filled(tsh_ctx *ctx, tsh_shape shape, double value);
TSH_API tsh_tensor *tsh_arange(tsh_ctx *ctx, tsh_dtype dtype, double start, double stop,
                               double step);
TSH_API tsh_tensor *tsh_randn(tsh_ctx *ctx, tsh_shape shape);

/* What a tensor is. Dimensions may be negative: -1 is the last one; a wrong one gives 0. */
TSH_API tsh_ctx *tsh_ctx_of(const tsh_tensor *t);
TSH_API tsh_dtype tsh_dtype_of(const tsh_tensor *t);
TSH_API int tsh_ndim(const tsh_tensor *t);
TSH_API tsh_shape tsh_shape_of(const tsh_tensor *t);
TSH_API int64_t tsh_dim(const tsh_tensor *t, int dim);
TSH_API int64_t tsh_local_dim(const tsh_tensor *t, int dim);
TSH_API int64_t tsh_stride(const tsh_tensor *t, int dim); /* in elements, of the local piece */
TSH_API int64_t tsh_numel(const tsh_tensor *t);
TSH_API int64_t tsh_local_numel(const tsh_tensor *t);
TSH_API tsh_layout tsh_layout_of(const tsh_tensor *t);

/* The local piece in place: element (i, j, ...) at tsh_stride. NULL where it is empty, and on an
 * error. */
TSH_API void *tsh_data(tsh_ctx *ctx, tsh_tensor *t);
/* A one-element tensor's value as double. Replicated only. */
TSH_API double tsh_item(tsh_ctx *ctx, tsh_tensor *t);

/* Initial values. fan_in and fan_out are those of the whole weight (out, in, ..) at every degree:
 * in or out times the product of the dimensions behind; a bias of a layer has its weight's fan_in
 * and no fan_out. */
typedef enum tsh_init_kind {
    TSH_INIT_DEFAULT, /* what the layer's doc says */
    TSH_INIT_ZEROS,
    TSH_INIT_ONES,
    TSH_INIT_CONSTANT,        /* a */
    TSH_INIT_UNIFORM,         /* in [a, b) */
    TSH_INIT_NORMAL,          /* mean a, standard deviation b */
    TSH_INIT_KAIMING_UNIFORM, /* bound gain sqrt(6 / ((1 + a^2) fan)); He et al. 2015 */
    TSH_INIT_TRUNC_NORMAL,    /* as NORMAL, drawn within [low, high] */
    TSH_INIT_KAIMING_NORMAL,  /* standard deviation gain sqrt(2 / ((1 + a^2) fan)) */
    TSH_INIT_XAVIER_UNIFORM,  /* bound gain sqrt(6 / (fan_in + fan_out)); Glorot & Bengio 2010 */
    TSH_INIT_XAVIER_NORMAL,   /* standard deviation gain sqrt(2 / (fan_in + fan_out)) */
    TSH_INIT_ORTHOGONAL, /* gain Q of the QR of a normal matrix (out, rest); Saxe et al. 2013 */
    TSH_INIT_DIRAC       /* 1 at (i, i, middle of the rest), else 0; an identity in 2-D */
} tsh_init_kind;
typedef struct tsh_init {
    tsh_init_kind kind;
    double a, b;
    double gain;      /* a factor of kaiming, xavier, orthogonal; 0: 1 */
    int fan_out;      /* of kaiming: 0: fan is fan_in, 1: fan_out */
    double low, high; /* of TRUNC_NORMAL; both 0: -2 and 2 */
} tsh_init;

/* Give an owned tensor of values, R or S, or a parameter's shard, initial values:
 * torch.nn.init.<name>_. Element e gets the same bits at every degree of tp: draws are keyed by the
 * ctx's seed, e, and a parameter's path or the count of the ctx's draws. desc NULL: torch's
 * defaults (0 to 1; mean 0, deviation 1; a 0; constant: 0); its kind is not read. orthogonal: every
 * rank holds the whole matrix for a moment, in double. No collective. TSH_ERR_STATE: as tsh_write.
 */
TSH_API tsh_result tsh_init_uniform(tsh_tensor *t, const tsh_init *desc);
TSH_API tsh_result tsh_init_normal(tsh_tensor *t, const tsh_init *desc);
TSH_API tsh_result tsh_init_trunc_normal(tsh_tensor *t, const tsh_init *desc);
TSH_API tsh_result tsh_init_constant(tsh_tensor *t, const tsh_init *desc);
TSH_API tsh_result tsh_init_zeros(tsh_tensor *t, const tsh_init *desc);
TSH_API tsh_result tsh_init_ones(tsh_tensor *t, const tsh_init *desc);
TSH_API tsh_result tsh_init_kaiming_uniform(tsh_tensor *t, const tsh_init *desc);
TSH_API tsh_result tsh_init_kaiming_normal(tsh_tensor *t, const tsh_init *desc);
TSH_API tsh_result tsh_init_xavier_uniform(tsh_tensor *t, const tsh_init *desc);
TSH_API tsh_result tsh_init_xavier_normal(tsh_tensor *t, const tsh_init *desc);
TSH_API tsh_result tsh_init_orthogonal(tsh_tensor *t, const tsh_init *desc);
TSH_API tsh_result tsh_init_dirac(tsh_tensor *t, const tsh_init *desc);

/* -- autograd --------------------------------------------------------------- */

/* Nothing is recorded between begin and end. May be nested. */
TSH_API void tsh_no_grad_begin(tsh_ctx *ctx);
TSH_API void tsh_no_grad_end(tsh_ctx *ctx);
/* Marks an owned tensor as a leaf whose gradient is wanted (on 0: no longer). Returns t. */
TSH_API tsh_tensor *tsh_requires_grad(tsh_tensor *t, int on);
/* on 1: averages the leaf's gradient over dp, as is always done for parameters. For weights of your
 * own, which every replica holds and trains. on 0: the gradient is that of this rank's own loss.
 * Call it on every rank of dp, before the backward. Returns t; 0 on a parameter is an error. */
TSH_API tsh_tensor *tsh_average_grad(tsh_tensor *t, int on);
/* Keeps a step tensor's values and gradient through tsh_backward. Returns t. A view (reshape,
 * slice; tsh_redistribute on one rank) shares the gradient of what it views: tsh_clone it first. */
TSH_API tsh_tensor *tsh_retain(tsh_tensor *t);

/* Several micro-batches are one step: .defer for all but the last, or for all, then
 * tsh_sync_grads.
 * summed 0: a loss is a mean. Micro-batches add up, and the average over dp counts every rank
 * alike, as torch's DistributedDataParallel does.
 * summed 1: a loss is the sum over `weight` elements, such as the targets that are not ignored.
 * Gradients of all micro-batches and of all ranks of dp are summed and divided once, by the sum of
 * their weights: the gradient of the mean over all elements, however unevenly they lie (Megatron's
 * calculate_per_token_loss). A rank that has no elements runs the same ops, on an empty batch or
 * with all targets ignored, with weight 0; where all weights are 0, nothing is divided. */
typedef struct tsh_backward_desc {
    int defer; /* leave gradients of leaves pending, for micro-batches; then tsh_sync_grads */
    int summed;
    double weight; /* of this loss; the same on all ranks of tp */
} tsh_backward_desc;
/* Gradients of a replicated scalar, summed into every leaf. Consumes the tape. Runs one all-reduce
 * over tp per tensor that feeds sharded consumers (each started as early as it can be), and one
 * flat one for leaves whose gradients are partial. Then the average over dp, of parameters and of
 * leaves after tsh_average_grad; other leaves keep the gradient of this rank's loss (summed:
 * divided by all weights, too). Gradients are collected in buckets (tsh_desc.bucket_bytes), each of
 * which is all-reduced as soon as it is full, while backward goes on (large built-in products move
 * it on now and then); summed, one all-reduce of the weights. The sum of an element has the order
 * that an all-reduce of its leaf alone gives it, whatever bucket it is in. */
TSH_API tsh_result tsh_backward(tsh_ctx *ctx, tsh_tensor *loss);
TSH_API tsh_result tsh_backward_with(tsh_ctx *ctx, tsh_tensor *loss, const tsh_backward_desc *desc);
/* Completes gradients that .defer left pending: partial ones over tp, then the average over dp.
 * Nothing, and no collective, where none are. */
TSH_API tsh_result tsh_sync_grads(tsh_ctx *ctx);
/* A leaf's or retained tensor's gradient, a detached step tensor; NULL while it has none. Pending:
 * an error. It is a window on the accumulator that the next backward writes again: tsh_keep copies.
 */
TSH_API tsh_tensor *tsh_grad(tsh_tensor *t);
/* Forgets a leaf's gradient; its memory is kept for the next. */
TSH_API void tsh_zero_grad(tsh_tensor *t);

/* Writes what is recorded for backward to an open file, one line per op:
 *   #2 up tsh_linear(#1: x (256, 2) R, weight (32, 2) S(0), bias (32) S(0)) = (256, 32) S(1); saves
 *   x weight, 2176 bytes; partial gradient: x
 * its number, the path of the module whose forward called it, its inputs and the ops that made
 * them, its output, the values that are kept for backward with their bytes on this rank, and the
 * inputs whose gradient is a partial sum over tp. Views are not recorded: they share their base's
 * gradient. For calls between forward and backward, which consumes the tape. */
TSH_API tsh_result tsh_tape_dump(tsh_ctx *ctx, FILE *file);
/* The same as a graph: `dot -Tsvg` of Graphviz draws it. Red arrows: partial gradients. */
TSH_API tsh_result tsh_tape_dot(tsh_ctx *ctx, FILE *file);
/* From now on (on 1) until switched off (on 0), the first op whose output, or whose gradient of
 * an input, has a NaN or an infinity is an error, TSH_ERR_ANOMALY, that names the module, the op,
 * the input and the place; tsh_last_error has the rank. torch.autograd.set_detect_anomaly. Every
 * value is looked at once more, also between tsh_no_grad_begin and end. */
TSH_API void tsh_detect_anomaly(tsh_ctx *ctx, int on);

/* -- steps ------------------------------------------------------------------ */

/* Ends a step: every step tensor is given back, a tape not consumed is dropped. */
TSH_API tsh_result tsh_step_end(tsh_ctx *ctx);
/* Step tensors made between begin and end are given back at end; for loops without gradients. May
 * be nested. */
TSH_API void tsh_scope_begin(tsh_ctx *ctx);
TSH_API void tsh_scope_end(tsh_ctx *ctx);

/* -- context ---------------------------------------------------------------- */

typedef struct tsh_desc {
    tsh_comm comm;     /* zero: a group of one; the ctx takes it over and closes it */
    int tp, pp;        /* degrees; 0: tp = world / pp, pp = 1; dp is what is left */
    const char *order; /* fastest axis first; NULL: "tp-pp-dp" (ml's); Megatron's: "tp-dp-pp" */
    uint64_t seed;
    int threads; /* of this rank, if compiled with OpenMP (-fopenmp), else 1; 0: 1. No bit depends
                  * on how many */
    tsh_gemm gemm;
    tsh_allocator allocator;
    tsh_logger logger;   /* warnings, and the first error of the ctx: see ERRORS in the manual */
    size_t bucket_bytes; /* of gradients that travel over dp in one message; 0: 1 MiB. Leaves of at
                          * least that size travel alone, without a copy. No bit depends on it */
    int no_overlap;      /* 1: they start to travel at the end of backward. No bit depends on it */
} tsh_desc;

/* Opens one rank's world; collective where comm has several ranks (one split per axis). On failure
 * *out is still a ctx where memory sufficed, so that tsh_last_error tells why; close it. */
TSH_API tsh_result tsh_open(const tsh_desc *desc, tsh_ctx **out);
/* Frees everything that belongs to the ctx. NULL is fine. */
TSH_API void tsh_close(tsh_ctx *ctx);
/* The groups. Size 1 where an axis is not used. Never NULL: that of a ctx that is NULL has size 1,
 * too, and its collectives are TSH_ERR_ARGUMENT. */
TSH_API tsh_comm *tsh_world(tsh_ctx *ctx);
TSH_API tsh_comm *tsh_tp(tsh_ctx *ctx);
TSH_API tsh_comm *tsh_pp(tsh_ctx *ctx);
TSH_API tsh_comm *tsh_dp(tsh_ctx *ctx);
/* Opens a ctx, calls fn(ctx, user), closes it. Returns fn's result, or 1 where fn is NULL or the
 * ctx could not be opened; desc->logger is told why. */
TSH_API int tsh_run(const tsh_desc *desc, int (*fn)(tsh_ctx *ctx, void *user), void *user);
/* For runners of backends: opens a ctx on *comm by desc (NULL: all defaults), runs fn, closes
 * both. Returns fn's result; 1 if the ctx could not be opened, which desc->logger is told and
 * *error has (NULL: nobody asks). */
TSH_API int tsh_run_on(tsh_comm *comm, const tsh_desc *desc, int (*fn)(tsh_ctx *ctx, void *user),
                       void *user, tsh_error *error);

/* -- elementwise ops --------------------------------------------------------
 * Shapes broadcast as NumPy's. Layouts: unary ops keep R and S, linear ones P too. Binary: equal
 * layouts; S with R of length 1 there; P with P under + and -; P times or over R. Anything else is
 * TSH_ERR_LAYOUT. No collective runs. Each equals the torch function of its name. */
TSH_API tsh_tensor *tsh_add(tsh_tensor *a, tsh_tensor *b);
TSH_API tsh_tensor *tsh_sub(tsh_tensor *a, tsh_tensor *b);
TSH_API tsh_tensor *tsh_mul(tsh_tensor *a, tsh_tensor *b);
TSH_API tsh_tensor *tsh_div(tsh_tensor *a, tsh_tensor *b);
TSH_API tsh_tensor *tsh_pow(tsh_tensor *a, tsh_tensor *b);
TSH_API tsh_tensor *tsh_neg(tsh_tensor *x);
TSH_API tsh_tensor *tsh_scale(tsh_tensor *x, double factor);
TSH_API tsh_tensor *tsh_add_scalar(tsh_tensor *x, double term);
TSH_API tsh_tensor *tsh_pow_scalar(tsh_tensor *x, double exponent);
TSH_API tsh_tensor *tsh_exp(tsh_tensor *x);
TSH_API tsh_tensor *tsh_log(tsh_tensor *x);
TSH_API tsh_tensor *tsh_sqrt(tsh_tensor *x);
TSH_API tsh_tensor *tsh_sigmoid(tsh_tensor *x);
TSH_API tsh_tensor *tsh_tanh(tsh_tensor *x);
TSH_API tsh_tensor *tsh_relu(tsh_tensor *x);
/* 2 / sqrt(pi) times the integral of e^-t^2 from 0 to x. */
TSH_API tsh_tensor *tsh_erf(tsh_tensor *x);
TSH_API tsh_tensor *tsh_gelu(tsh_tensor *x);      /* 0.5 x (1 + erf(x / sqrt 2)) */
TSH_API tsh_tensor *tsh_gelu_tanh(tsh_tensor *x); /* GPT-2's; torch's approximate="tanh" */
TSH_API tsh_tensor *tsh_silu(tsh_tensor *x);      /* x sigmoid(x) */
/* Comparisons give TSH_I32, 1 or 0; no gradient. Both of one dtype. */
TSH_API tsh_tensor *tsh_eq(tsh_tensor *a, tsh_tensor *b);
TSH_API tsh_tensor *tsh_ne(tsh_tensor *a, tsh_tensor *b);
TSH_API tsh_tensor *tsh_lt(tsh_tensor *a, tsh_tensor *b);
TSH_API tsh_tensor *tsh_le(tsh_tensor *a, tsh_tensor *b);
TSH_API tsh_tensor *tsh_gt(tsh_tensor *a, tsh_tensor *b);
TSH_API tsh_tensor *tsh_ge(tsh_tensor *a, tsh_tensor *b);
/* cond (TSH_I32) ? a : b. P with an R cond and P branches. */
TSH_API tsh_tensor *tsh_where(tsh_tensor *cond, tsh_tensor *a, tsh_tensor *b);
/* To an integer: towards zero, clamped to its ends, NaN to 0. To a floating dtype, TSH_REAL or one
 * that it holds exactly: rounded once; gradients pass between floating ones. */
TSH_API tsh_tensor *tsh_cast(tsh_tensor *x, tsh_dtype dtype);
/* x / (1 - p) with probability 1 - p, else 0 (torch.nn.functional.dropout, training). The mask is
 * keyed by seed, the owner's path and count of calls (owner NULL: the ctx's), dp rank and global
 * element index. p 0: x itself. */
TSH_API tsh_tensor *tsh_dropout(tsh_tensor *x, double p, tsh_module *owner);
/* Copies: clone keeps the gradient path, detach shares the values and cuts it. */
TSH_API tsh_tensor *tsh_clone(tsh_tensor *x);
TSH_API tsh_tensor *tsh_detach(tsh_tensor *x);
/* An owned, detached copy of a step tensor. */
TSH_API tsh_tensor *tsh_keep(const tsh_tensor *t);

/* -- reductions -------------------------------------------------------------
 * dim may be negative, or TSH_ALL. Over a sharded dimension sum and mean give P, the others are
 * TSH_ERR_LAYOUT. */
#define TSH_ALL (-1000)
TSH_API tsh_tensor *tsh_sum(tsh_tensor *x, int dim, int keepdim);
TSH_API tsh_tensor *tsh_mean(tsh_tensor *x, int dim, int keepdim);
/* The largest value; the gradient goes to the first place that holds it, as torch.max(x, dim). NaN
 * wins. */
TSH_API tsh_tensor *tsh_max(tsh_tensor *x, int dim, int keepdim);
/* The first place of the largest value, TSH_I64. */
TSH_API tsh_tensor *tsh_argmax(tsh_tensor *x, int dim, int keepdim);
/* e^x / sum e^x along dim, and its logarithm. */
TSH_API tsh_tensor *tsh_softmax(tsh_tensor *x, int dim);
TSH_API tsh_tensor *tsh_log_softmax(tsh_tensor *x, int dim);

/* -- views ------------------------------------------------------------------
 * No copy where strides allow. reshape: one -1 is worked out; it may split a sharded dimension (the
 * sharding moves to the outer factor, whose unit must hold the inner ones; k equal segments may
 * become a leading dimension k), or merge it as the outermost factor. slice and split along a
 * sharded dimension are legal exactly at segment boundaries. */
TSH_API tsh_tensor *tsh_reshape(tsh_tensor *x, tsh_shape shape);
TSH_API tsh_tensor *tsh_transpose(tsh_tensor *x, int dim0, int dim1);
TSH_API tsh_tensor *tsh_permute(tsh_tensor *x, const int *dims);
TSH_API tsh_tensor *tsh_slice(tsh_tensor *x, int dim, int64_t start, int64_t length);
/* n equal parts of x along dim into parts[0 .. n). */
TSH_API tsh_result tsh_split_dim(tsh_tensor *x, int dim, int n, tsh_tensor **parts);
/* n tensors one after the other along dim; along a sharded one they become segments. */
TSH_API tsh_tensor *tsh_concat(tsh_tensor *const *parts, int n, int dim);

/* -- layouts ---------------------------------------------------------------- */

/* The same values in another layout: S to R all-gather, P to R all-reduce, P to S reduce-scatter, S
 * to S all-to-all, R to S a slice, R to P rank 0 keeps. Gradients go the opposite way (S to R:
 * reduce-scatter of partial gradients, slice of complete ones). S to P is an error. The same
 * layout: x itself. */
TSH_API tsh_tensor *tsh_redistribute(tsh_tensor *x, tsh_layout layout);
/* Redistribute to replicated. */
TSH_API tsh_tensor *tsh_full(tsh_tensor *x);
/* Says how the values that each rank already holds lie; nothing moves (torchshard's
 * RegisterParallelDim). R to S(d): the pieces, one per rank and all of one length, of a tensor that
 * is P times as long; S(d) to R: this rank's piece is the whole, all being of one length; R to P
 * and P to R: the same shape; others by way of R. Nothing moves backward either: each rank's
 * gradient is that of the values it holds, also where R became S or P (of values that really are
 * replicated, tsh_tp_copy(t, TSH_SUM) first gives the sum over ranks). An owned tensor is changed
 * in place and returned, whether it requires a gradient or not; a step tensor or a parameter stays
 * as it is, and a step tensor is returned. In place, TSH_ERR_STATE: ops are recorded or views there
 * that take it as it lies, or it has a gradient. */
TSH_API tsh_tensor *tsh_set_layout(tsh_tensor *t, tsh_layout layout);

/* The operators that other systems build their layers on, of what each rank holds: a replicated
 * tensor may differ between ranks here. Nothing at one rank. They equal Megatron's f and g and
 * their kin, torchshard.distributed's copy, reduce, scatter, gather, and ml's mp_copy, ... copy:
 * x R -> R, itself; backward all-reduces the gradients by op, once. reduce: R or P -> R, an
 * all-reduce by op; backward passes the gradient on. scatter: R -> S(dim), this rank's slice;
 * backward all-gathers. gather: S(dim), or R, whose equal pieces are put one after the other along
 * dim -> R, an all-gather; backward takes this rank's slice of complete gradients and
 * reduce-scatters partial ones. */
TSH_API tsh_tensor *tsh_tp_copy(tsh_tensor *x, tsh_redop op);
TSH_API tsh_tensor *tsh_tp_reduce(tsh_tensor *x, tsh_redop op);
TSH_API tsh_tensor *tsh_tp_scatter(tsh_tensor *x, int dim);
TSH_API tsh_tensor *tsh_tp_gather(tsh_tensor *x, int dim);
/* From the tensor-parallel rank 0: the same batch on all ranks of tp, in place; owned tensors, R.
 * One broadcast. TSH_ERR_STATE: as tsh_write. */
TSH_API tsh_result tsh_broadcast_batch(tsh_tensor *t);

typedef enum tsh_extent { TSH_LOCAL, TSH_GLOBAL } tsh_extent;
/* Copy values out and in, dense and row-major, `bytes` in all (checked). TSH_LOCAL: this rank's
 * piece. TSH_GLOBAL: the whole tensor on every rank; reading a sharded one is an all-gather, a
 * partial one an all-reduce, writing takes this rank's slice (partial: an error). Writing is for
 * owned tensors that no recorded op has used: TSH_ERR_STATE between an op and the tsh_backward or
 * tsh_step_end that ends its tape. */
TSH_API tsh_result tsh_read(tsh_ctx *ctx, tsh_tensor *t, tsh_extent extent, void *out,
                            size_t bytes);
TSH_API tsh_result tsh_write(tsh_ctx *ctx, tsh_tensor *t, tsh_extent extent, const void *in,
                             size_t bytes);
/* "f32 (2, 3) S(1): 1 2 3 / 4 5 6" of the local piece into text, cut at size. Returns text. */
TSH_API char *tsh_to_string(tsh_tensor *t, char *text, size_t size);

/* -- matmul, linear, embedding ---------------------------------------------- */

/* (.., m, k) x (.., k, n) -> (.., m, n); leading dimensions broadcast (torch.matmul of two tensors
 * with at least two dimensions). Layouts: S(k) S(k): P. S(m) R: S(m). R S(n): S(n). batch
 * dimensions like elementwise. P R, R P: P. */
TSH_API tsh_tensor *tsh_matmul(tsh_tensor *a, tsh_tensor *b);
/* x (.., in), w (out, in), b (out) or NULL -> x w^T + b (.., out), torch.nn.functional.linear.
 * w S(0), x R, b S(0): column-parallel, gives S(-1); backward all-reduces dx. w S(1), x S(-1) or R,
 * b R: row-parallel, gives R by one all-reduce, b added after it. w R: x R, or S along another
 * dimension, kept. */
TSH_API tsh_tensor *tsh_linear(tsh_tensor *x, tsh_tensor *w, tsh_tensor *b);

typedef struct tsh_lookup_desc {
    int padding;            /* 1: row padding_idx gets no gradient */
    int64_t padding_idx;    /* negative counts from the end */
    double max_norm;        /* rows looked up that are longer are scaled to it, in w; 0: none */
    double norm_type;       /* p of that norm, INFINITY too; 0: 2 */
    int scale_grad_by_freq; /* gradients are divided by how often their id stands in ids */
    int sparse;             /* w a leaf: optimisers change only the rows that were looked up */
} tsh_lookup_desc;
/* ids (..), TSH_I32 or TSH_I64, each in [0, V); w (V, D) -> (.., D), torch.nn.functional.embedding;
 * desc NULL: no options. w R: as ids. w S(0), ids R: P (rows of other ranks are zero; redistribute
 * to complete). w S(1): S(-1). Forward, max_norm runs one all-reduce of norms where w is S(1), and
 * one over dp; it and scale_grad_by_freq one of counts where ids are sharded. A row-sparse gradient
 * lies dense in memory with a mark per row; a contribution of another op makes it dense. */
TSH_API tsh_tensor *tsh_embedding(tsh_tensor *ids, tsh_tensor *w, const tsh_lookup_desc *desc);

/* -- norms, attention, loss ------------------------------------------------- */

/* Over the last dimension (D), weight (D) and bias (D) or NULL, torch.nn.functional.layer_norm; eps
 * 0: 1e-5; TSH_ZERO: 0. x R, or S along another dimension (then parameter gradients are partial).
 */
TSH_API tsh_tensor *tsh_layer_norm(tsh_tensor *x, tsh_tensor *weight, tsh_tensor *bias, double eps);
/* x weight / sqrt(mean x^2 + eps) over the last dimension (D), weight (D); Zhang & Sennrich 2019.
 * eps 0: 1e-6; TSH_ZERO: 0. Layouts as tsh_layer_norm. */
TSH_API tsh_tensor *tsh_rms_norm(tsh_tensor *x, tsh_tensor *weight, double eps);

typedef struct tsh_rope_desc {
    double base;     /* 0: 10000 */
    int64_t dims;    /* rotated features, the first ones, an even number; 0: all of D */
    int interleaved; /* 0: pairs (i, i + dims / 2), as GPT-NeoX and LLaMA; 1: (2 i, 2 i + 1), as
                        GPT-J */
    int64_t start;   /* global position of x's first row */
} tsh_rope_desc;
/* Rotary position embedding (Su et al. 2021) of x (.., T, D): pair i of the row at position t is
 * turned by the angle t base^(-2 i / dims). Linear: keeps R, P, and S of every dimension but D;
 * positions are global where T is sharded. No collective; backward turns by minus the angle. */
TSH_API tsh_tensor *tsh_rope(tsh_tensor *x, const tsh_rope_desc *desc);

typedef struct tsh_attention_desc {
    int causal;        /* query i sees keys up to i + Tk - Tq */
    double scale;      /* 0: 1 / sqrt(D) */
    double dropout;    /* of the probabilities */
    tsh_module *owner; /* of the dropout key; NULL: the ctx */
    /* Broadcasts to (B, H, Tq, Tk), R: values are added to scores, TSH_I32 keeps where not 0. */
    tsh_tensor *mask;
    /* Owned, (B, Hkv, Tmax, D), laid out as k: k and v are appended at `past`, and keys
     * [0, past + Tk) are seen. Without gradients only. */
    tsh_tensor *cache_k, *cache_v;
    int64_t past;
} tsh_attention_desc;
/* q (B, H, Tq, D), k and v (B, Hkv, Tk, D) -> (B, H, Tq, D),
 * torch.nn.functional.scaled_dot_product_attention, in tiles with an online softmax (Milakov &
 * Gimelshein 2018, Dao et al. 2022); a query that sees no key gives 0. H is a multiple of Hkv:
 * query head i uses head i / (H / Hkv) of k and v (grouped queries, Ainslie et al. 2023). Layouts:
 * R; all three alike by batch S(0); by heads S(1), q in whole groups (tsh_shard_units(1, H / Hkv));
 * or q S(1) with k and v R, cut anywhere: then dk and dv are partial. No collective forward. */
TSH_API tsh_tensor *tsh_attention(tsh_tensor *q, tsh_tensor *k, tsh_tensor *v,
                                  const tsh_attention_desc *desc);

typedef enum tsh_reduction { TSH_REDUCE_MEAN, TSH_REDUCE_SUM, TSH_REDUCE_NONE } tsh_reduction;
typedef struct tsh_cross_entropy_desc {
    tsh_reduction reduction;
    int ignore;           /* rows left out: 0: those with target -100, as torch; 1: ignore_index */
    int64_t ignore_index; /* any integer */
    int empty_zero;       /* mean where the divisor is 0: 0 gives NaN as torch, 1 gives 0 */
    double label_smoothing; /* e, in [0, 1]: the target becomes (1 - e) target + e / V */
    double z_loss;          /* adds z_loss (log sum exp)^2 to each row's loss */
    tsh_tensor *weight;     /* of the classes, (V), R or cut as the classes; NULL: 1. No gradient */
} tsh_cross_entropy_desc;
/* logits (.., V), target (..) of integers or (.., V) of probabilities -> a scalar, or (..)
 * unreduced; torch.nn.functional.cross_entropy with classes last. Logits R; or S(-1), the
 * vocabulary: an all-reduce of the row maxima and one of all row sums, whatever the options; or
 * sharded along another dimension: mean and sum give P, and the mean of integer targets all-reduces
 * its divisor. No collective backward. Integer targets are R, or sharded where rows are; one
 * outside [0, V) that is not ignored is an error on every rank. Probabilities are R or laid out as
 * the logits and get no gradient. The mean divides by the sum of the weights of the targets'
 * classes, or by the number of rows of probabilities. A class with logit -inf is padding: smoothing
 * leaves it out. */
TSH_API tsh_tensor *tsh_cross_entropy(tsh_tensor *logits, tsh_tensor *target,
                                      const tsh_cross_entropy_desc *desc);

/* -- an op of one's own ------------------------------------------------------ */

typedef struct tsh_custom_desc {
    const char *name;
    tsh_shape shape;   /* of the output */
    tsh_layout layout; /* of the output */
    unsigned partial;  /* bit i: backward gives input i's gradient as a partial sum */
    /* Inputs arrive dense. forward fills out; backward adds to grad_in[i], local and dense, NULL
     * where not wanted. */
    void (*forward)(void *user, tsh_tensor *const *in, int n, tsh_real *out);
    void (*backward)(void *user, tsh_tensor *const *in, int n, const tsh_real *out,
                     const tsh_real *grad_out, tsh_real *const *grad_in);
    void *user; /* must live until backward */
} tsh_custom_desc;
/* An op of n inputs with the caller's own forward and backward. */
TSH_API tsh_tensor *tsh_custom_op(tsh_ctx *ctx, tsh_tensor *const *in, int n,
                                  const tsh_custom_desc *desc);

/* -- modules ---------------------------------------------------------------- */

typedef tsh_tensor *(*tsh_forward_fn)(tsh_module *module, tsh_tensor **in, int n, void *user);

typedef enum tsh_style {
    TSH_PLAIN,          /* every rank holds the whole layer */
    TSH_COLWISE,        /* linear: output features are sharded; embedding: embedding_dim */
    TSH_ROWWISE,        /* linear: input features are sharded; embedding: the vocabulary */
    TSH_AUTO,           /* linear with a weight of its own, as its first input arrives: sharded by
                           features, row-wise, else column-wise */
    TSH_SEQUENCE,       /* norms, dropout: on activations sharded along the sequence, S(1) */
    TSH_PREPARE_INPUT,  /* any module: inputs are brought to .input, or .inputs, first */
    TSH_PREPARE_OUTPUT, /* any module: the output is brought to .output last */
    TSH_STYLES
} tsh_style;

typedef struct tsh_module_desc {
    tsh_forward_fn forward; /* NULL: its children, one after the other */
    void *user;
} tsh_module_desc;
typedef struct tsh_linear_desc {
    int64_t in, out;
    int no_bias;
    tsh_style style;
    int segments;             /* of the sharded dimension; 0: 1 */
    int64_t unit;             /* 0: 1 */
    int gather_output;        /* COLWISE: all-gather, giving R */
    int skip_bias_add;        /* the caller adds tsh_param(module, "bias") */
    int reversed;             /* the weight is stored (in, out), as GPT-2's Conv1D */
    const tsh_layout *input;  /* as in tsh_plan_rule */
    const tsh_layout *output; /* as in tsh_plan_rule */
    int regather;             /* as in tsh_plan_rule */
    tsh_init weight_init;     /* default: KAIMING_UNIFORM with a = sqrt 5, as torch.nn.Linear */
    tsh_init bias_init;       /* default: UNIFORM within 1 / sqrt(in) */
} tsh_linear_desc;
typedef struct tsh_classifier_desc {
    int64_t in, classes;
    tsh_tensor *weight; /* an existing parameter (classes, in), such as an embedding's; NULL: own */
    int no_bias;
    tsh_style style; /* COLWISE: logits S(-1), for a vocabulary-parallel loss; ROWWISE: R */
    int gather_output;
    const tsh_layout *input; /* as in tsh_plan_rule */
    tsh_init weight_init;    /* as in tsh_linear_desc */
    tsh_init bias_init;
} tsh_classifier_desc;
typedef struct tsh_embedding_desc {
    int64_t count, dim; /* rows (vocabulary), columns */
    tsh_style style;
    const tsh_layout *output; /* as in tsh_plan_rule */
    tsh_init init;            /* default: NORMAL(0, 1); the padding row 0 */
    tsh_lookup_desc lookup;   /* as tsh_embedding */
    tsh_tensor *weight;       /* an existing parameter: its cut stays, R takes style; NULL: own */
} tsh_embedding_desc;
typedef struct tsh_layer_norm_desc {
    int64_t dim;
    double eps; /* 0: 1e-5; TSH_ZERO: 0 */
    int no_bias;
} tsh_layer_norm_desc;
typedef struct tsh_rms_norm_desc {
    int64_t dim;
    double eps; /* 0: 1e-6; TSH_ZERO: 0 */
} tsh_rms_norm_desc;

/* The tree's top, made with the ctx. */
TSH_API tsh_module *tsh_root(tsh_ctx *ctx);
/* A node under parent, which may be the root. The name may hold no dot. */
TSH_API tsh_module *tsh_add_module(tsh_module *parent, const char *name,
                                   const tsh_module_desc *desc);
/* A module below by relative path ("h.0.attn"); NULL and an error that lists near names if there is
 * none. */
TSH_API tsh_module *tsh_find(tsh_module *module, const char *path);
/* A parameter by name ("weight"), or by relative path ("h.0.attn.weight"). */
TSH_API tsh_tensor *tsh_param(tsh_module *module, const char *path);
/* Calls fn once for every parameter below, with the path of its first owner. */
TSH_API void tsh_each_param(tsh_module *module,
                            void (*fn)(const char *path, tsh_tensor *param, void *user),
                            void *user);
TSH_API const char *tsh_module_path(const tsh_module *module); /* "" for the root */
/* The child at a 0-based index; NULL past the last. */
TSH_API tsh_module *tsh_child(const tsh_module *module, int index);
/* Makes the parameter `name` of module the same object as `source` (equal shapes): one tensor, used
 * twice. Before an optimiser is made. */
TSH_API tsh_result tsh_tie(tsh_module *module, const char *name, tsh_tensor *source);
/* Gives memory and initial values to every parameter below that has none: the same bits at every
 * degree of tp. */
TSH_API tsh_result tsh_materialize(tsh_module *module);
/* Gives every parameter below its initial values again, tied ones once, and forgets the gradients:
 * the same bits as the first time. Between steps. torch's reset_parameters. */
TSH_API tsh_result tsh_reset_parameters(tsh_module *module);
/* Training mode on or off for all below; on at first. Dropout works in training mode only. */
TSH_API void tsh_train(tsh_module *module, int on);
TSH_API int tsh_training(const tsh_module *module);
/* On: of this module's forward only inputs and output are kept, and backward computes it again,
 * with the same dropout masks: the same bits, in the memory of one such module at a time, for a
 * third more time. For transformer blocks, mostly. Its forward must be a function of its inputs and
 * parameters, which stay as they are until then, take at most 16 tensors, and retain none; its
 * collectives run twice. An input that the output does not depend on gets zeros for a gradient.
 * Without gradients it frees what it does not return. torch.utils.checkpoint (Chen et al. 2016).
 * Off at first. */
TSH_API void tsh_checkpoint(tsh_module *module, int on);
/* tsh_zero_grad for every parameter below; torch.nn.Module.zero_grad. */
TSH_API void tsh_zero_grads(tsh_module *module);

/* The generator's state: whatever follows a tsh_set_rng_state draws what followed the tsh_rng_state
 * that wrote it, bit for bit: the same dropout masks, tsh_randn and tsh_init values. Returns the
 * bytes of the state, and writes them where `size` suffices: little-endian u64s, that is the magic
 * "tshrng01", the number of modules, the seed, the ctx's counts of draws and of dropout calls, and
 * every module's count of dropout calls, in the order of the tree. The same on every rank of tp. */
TSH_API size_t tsh_rng_state(tsh_ctx *ctx, void *state, size_t size);
/* For a tree with the same number of modules; else, and for other bytes, an error, and nothing is
 * changed. */
TSH_API tsh_result tsh_set_rng_state(tsh_ctx *ctx, const void *state, size_t size);

/* Layers. Parameters have no memory until the first forward, or tsh_materialize; a layer that
 * cannot be made leaves nothing in the tree. Norms: "weight" (dim), at first 1, and "bias" (dim),
 * at first 0; as tsh_layer_norm and tsh_rms_norm. */
TSH_API tsh_module *tsh_add_layer_norm(tsh_module *parent, const char *name,
                                       const tsh_layer_norm_desc *desc);
TSH_API tsh_module *tsh_add_rms_norm(tsh_module *parent, const char *name,
                                     const tsh_rms_norm_desc *desc);
/* tsh_dropout with probability p, keyed by the layer's path; nothing outside training mode. */
TSH_API tsh_module *tsh_add_dropout(tsh_module *parent, const char *name, double p);
/* A module's forward. A row-parallel linear and a vocabulary embedding complete to R (one
 * all-reduce), or to the output that a plan asks for. */
TSH_API tsh_tensor *tsh_forward_n(tsh_module *module, tsh_tensor **in, int n);
TSH_API tsh_tensor *tsh_forward(tsh_module *module, tsh_tensor *x);
/* A residual connection and what follows it: *x becomes tsh_add(*x, y), and the forward of that by
 * any module is returned; after an error both are NULL. */
TSH_API tsh_tensor *tsh_forward_residual(tsh_module *module, tsh_tensor **x, tsh_tensor *y);

/* -- parallelize ------------------------------------------------------------ */

/* One line of a plan: the modules whose path below the root matches get the style. */
typedef struct tsh_plan_rule {
    const char *path; /* dots separate names; * and ? match within one, ** any number of them */
    tsh_style style;
    int segments;             /* of the sharded dimension; 0: 1 */
    int64_t unit;             /* 0: 1 */
    int gather_output;        /* COLWISE linear: the same as an output of R */
    const tsh_layout *input;  /* how the input must arrive, else it is an error; NULL: as the style
                                 takes it. SEQUENCE, PREPARE_INPUT: what it is brought to */
    const tsh_layout *output; /* how the output is given; NULL: as the style gives it. ROWWISE with
                                 S(seq): a reduce-scatter in place of the all-reduce */
    int regather;     /* COLWISE with an input S(seq): keep this rank's piece only, and gather
                                 it again in backward */
    const char *kind; /* only modules of this kind: "linear", "embedding"; NULL: any */
    const tsh_layout *const *inputs; /* PREPARE_INPUT of several inputs; NULL: as it comes */
    int input_count;
    const tsh_segment *cut; /* the segments' own lengths and units; NULL: equal ones, by unit */
} tsh_plan_rule;
/* Gives every module below that a rule matches its style. Values already there are kept and laid
 * anew (collective where they were sharded), with an optimiser's moments; their gradients are
 * forgotten. Between steps. A rule that matches nothing that takes its style, two rules for one
 * purpose of one module, or two layouts for a tied parameter, all of whose users want a rule: an
 * error; nothing is changed then. torch.distributed.tensor.parallel.parallelize_module. */
TSH_API tsh_result tsh_parallelize(tsh_module *module, const tsh_plan_rule *rules, int count);
/* Writes which modules each rule matches; changes nothing. Errors as tsh_parallelize. */
TSH_API tsh_result tsh_plan_report(tsh_module *module, const tsh_plan_rule *rules, int count,
                                   FILE *file);
/* Writes the tree as a table: path, kind, global shape, layout, local shape and bytes on this rank
 * of every parameter, and totals. Tied parameters count once. */
TSH_API tsh_result tsh_summary(tsh_module *module, FILE *file);
/* Layers that their description or a plan can shard. A linear, torch.nn.Linear: x (.., in) -> (..,
 * out) by "weight" (out, in), or (in, out) if reversed, and "bias" (out). Plain: no collective, or
 * partial gradients of a sharded x. COLWISE: x R -> S(-1), one all-reduce of dx backward; x
 * declared S(seq): one all-gather forward, one reduce-scatter backward. ROWWISE: x S(-1), or R,
 * which is sliced -> R by one all-reduce forward; an output S(seq): one reduce-scatter, and one
 * all-gather backward. Errors: sizes below 0, units that do not fit, contradictions in the
 * description. */
TSH_API tsh_module *tsh_add_linear(tsh_module *parent, const char *name,
                                   const tsh_linear_desc *desc);
/* The last layer: a linear to classes whose weight may be an embedding's, and then lies as that
 * one. COLWISE is ColossalAI's VocabParallelClassifier1D, ROWWISE its Classifier1D. */
TSH_API tsh_module *tsh_add_classifier(tsh_module *parent, const char *name,
                                       const tsh_classifier_desc *desc);
/* torch.nn.Embedding: ids (..) -> (.., dim) by "weight" (count, dim), as tsh_embedding, completed
 * to R: ROWWISE by one all-reduce forward (or a reduce-scatter to an output S(seq)), COLWISE by one
 * all-gather (an output S(-1): none). */
TSH_API tsh_module *tsh_add_embedding(tsh_module *parent, const char *name,
                                      const tsh_embedding_desc *desc);

/* -- policies --------------------------------------------------------------- */

/* A named count of a module's, such as its heads; set again, it takes the new value. */
TSH_API tsh_result tsh_set_argument(tsh_module *module, const char *name, int64_t value);
/* Its global value; 0 and an error where the module has none of that name. */
TSH_API int64_t tsh_argument(const tsh_module *module, const char *name);
/* What a policy left of it on this rank; the global value where no policy divided it. */
TSH_API int64_t tsh_local_argument(const tsh_module *module, const char *name);

/* Where the counts of one attention are: paths of arguments below a block; "attn.num_heads" is the
 * argument num_heads of module attn. */
typedef struct tsh_policy_heads {
    const char *heads;    /* query heads */
    const char *kv_heads; /* key and value heads, a divisor of heads; NULL: as many */
    const char *hidden;   /* features of all query heads, divided with them; NULL: none */
} tsh_policy_heads;
/* parallelformers' Layer. */
typedef struct tsh_policy_layer {
    const char *weight, *bias; /* paths of a layer's parameters below a block: "attn.c_fc.weight";
                                  Python's layer[0] is layer.0. bias NULL: may have none */
    int n_fused;               /* parts stored one after the other, [Q|K|V]; 0: 1 */
    tsh_style replace;         /* 0: as the list says */
    int reversed;              /* stored (in, out): as the module, else it is an error */
    int ignore_checker;        /* 1: a block without it is passed over; 0: that is an error */
    const tsh_policy_heads *heads; /* cut by whole heads; NULL: anywhere */
    int kv;                        /* with heads: keys, values, or both, and no queries */
} tsh_policy_layer;
/* Which layers of a block are sharded, and how: parallelformers' Policy. A list is ended by an
 * entry of zeros; NULL: there is none. */
typedef struct tsh_policy {
    const char *name;
    const char *blocks;               /* paths of blocks, a pattern as in tsh_plan_rule */
    const tsh_policy_layer *attn_qkv; /* column-parallel */
    const tsh_policy_layer *attn_out; /* row-parallel, the bias replicated */
    const tsh_policy_layer *mlp_in;   /* column-parallel */
    const tsh_policy_layer *mlp_out;  /* row-parallel */
    const char *const *arguments;  /* others to divide as features are, ended by NULL; NULL: none */
    const struct tsh_policy *next; /* of other blocks of the family, such as decoders; NULL: none */
} tsh_policy;
/* gpt2, gpt_neo, gptj, gpt_neox, opt, bloom, llama, mistral, qwen2, phi, bert, roberta,
 * distil_bert, electra, albert, bart, t5, vit, clip, deit, for modules named as those of Hugging
 * Face transformers; NULL for another name. */
TSH_API const tsh_policy *tsh_policy_find(const char *name);
/* Shards every block below root by the policy; what it does not name stays as it is. Features are
 * cut by whole heads, evenly or not; where several query heads share a key head, by such groups.
 * Where key heads are shared and fewer than the ranks, K and V stay whole on every rank and their
 * gradients are partial (one all-reduce each); that takes layers of their own. No block, a block
 * without a named layer or argument, a list that finds nothing in a block, heads or hidden sizes
 * that do not fit: an error, and nothing is changed. One all-reduce forward per row-parallel layer,
 * backward per input of column-parallel ones. */
TSH_API tsh_result tsh_parallelize_policy(tsh_module *root, const tsh_policy *policy);

/* -- optimisers ------------------------------------------------------------- */

typedef enum tsh_optim_kind { TSH_SGD, TSH_ADAM, TSH_ADAMW } tsh_optim_kind;
typedef struct tsh_optim_desc {
    tsh_optim_kind kind;
    double lr;                /* 0: 1e-3; TSH_ZERO: 0 */
    double momentum;          /* SGD */
    int nesterov;             /* SGD */
    double beta1, beta2, eps; /* Adam; 0: 0.9, 0.999, 1e-8; TSH_ZERO: 0 */
    double weight_decay;      /* ADAMW: decoupled; the others: added to the gradient */
    double clip_norm;         /* 0: none; else tsh_clip_grad_norm comes first */
    int zero; /* 1: moments are cut over dp (ZeRO stage 1, Rajbhandari et al. 2020): each rank keeps
                 those of its chunk of every parameter (tsh_coll_chunk of the local elements),
                 whatever the sizes */
} tsh_optim_desc;
/* For every parameter below module; torch.optim.SGD, Adam, AdamW. Where a gradient is row-sparse
 * (tsh_lookup_desc), values, moments and weight decay of the rows it touches only;
 * torch.optim.SparseAdam. Closed with the ctx. With .zero, backward reduce-scatters the gradients
 * of these parameters in place of the all-reduce, so that tsh_grad cannot read them, and a step
 * all-gathers the parameters, in the same buckets: the bytes of an all-reduce and the same bits. A
 * row-sparse gradient cannot be cut: TSH_ERR_UNSUPPORTED by tsh_backward. A parameter is one
 * optimiser's then. */
TSH_API tsh_optim *tsh_optim_new(tsh_module *module, const tsh_optim_desc *desc);
/* Parameters whose path below the module matches: learning rate times lr_scale, this weight decay.
 * Later groups win. */
TSH_API tsh_result tsh_optim_group(tsh_optim *optim, const char *pattern, double lr_scale,
                                   double weight_decay);
/* The learning rate of the steps to come, 0 too; groups scale it. */
TSH_API void tsh_optim_set_lr(tsh_optim *optim, double lr);
/* One step with the gradients there are. One all-reduce over tp and pp (norm), with .zero over dp
 * too, and the parameters' all-gathers; where any gradient is not finite the step is skipped on
 * every rank. */
TSH_API tsh_result tsh_optim_step(tsh_optim *optim);

typedef struct tsh_optim_info {
    int64_t steps, skipped; /* done, and left out for a gradient that was not finite */
    double norm;            /* global 2-norm at the last step, before clipping */
    double lr;
} tsh_optim_info;
/* Steps so far, the last norm and the learning rate. */
TSH_API tsh_optim_info tsh_optim_state(const tsh_optim *optim);
/* Scales the gradients below module so that their global 2-norm is at most max_norm: replicated and
 * tied parameters count once; torch.nn.utils.clip_grad_norm_. *norm (may be NULL): before
 * clipping. max_norm 0 gives zeros. */
TSH_API tsh_result tsh_clip_grad_norm(tsh_module *module, double max_norm, double *norm);

typedef enum tsh_schedule_kind { TSH_CONSTANT, TSH_LINEAR, TSH_COSINE } tsh_schedule_kind;
typedef struct tsh_schedule {
    tsh_schedule_kind kind;
    double lr, lr_min;
    int64_t warmup, total; /* steps: linear from lr / warmup to lr, then down to lr_min at total */
} tsh_schedule;
/* The learning rate of step 0, 1, ... */
TSH_API double tsh_schedule_lr(const tsh_schedule *schedule, int64_t step);

/* -- pipeline --------------------------------------------------------------- */

/* The order in which a stage does its forwards and backwards. Both give the same bits, and the same
 * share of time, (p - 1) / (m + p - 1) of p equal stages and m micro-batches, in which a stage has
 * nothing to do. */
typedef enum tsh_pipeline_schedule {
    TSH_PIPELINE_1F1B, /* p - 1 - stage forwards, then one forward and one backward in turn: a stage
                          holds what p - stage forwards keep; Narayanan et al. 2021 */
    TSH_PIPELINE_GPIPE /* all forwards, then all backwards: it holds what m forwards keep; Huang et
                          al. 2019 */
} tsh_pipeline_schedule;
typedef struct tsh_pipeline_desc {
    int micro_batches;
    const int *counts; /* children of each stage, a number per rank of pp; NULL: equally many */
    tsh_pipeline_schedule schedule;
    /* Of micro-batch 0, 1, ...: what the first child takes, on the first stage; and on the last
     * one, from what the last child gave, the loss, a replicated scalar. Step tensors that they
     * make end with the micro-batch. */
    tsh_tensor *(*input)(tsh_ctx *ctx, int micro_batch, void *user);
    tsh_tensor *(*loss)(tsh_ctx *ctx, tsh_tensor *output, int micro_batch, void *user);
    /* NULL: losses are means, of which all count alike. Else a loss is the sum over so many
     * elements, such as the targets that are not ignored; it is asked after .loss. Then the mean is
     * over all elements of all micro-batches and replicas, however unevenly they lie. */
    double (*weight)(tsh_ctx *ctx, int micro_batch, void *user);
    void *user;
} tsh_pipeline_desc;
/* Deals the children of a container, which its forward calls one after the other, to the ranks of
 * pp, the stages. Modules before the container in the tree, such as embeddings, belong to the first
 * stage and are for .input to call, those after it to the last one and .loss. A rank holds
 * parameters of its own stage only: others get no memory, or give back what they had, and are no
 * longer met by tsh_each_param; initial values and dropout masks are those of one rank. A parameter
 * tied across stages is held by each of these. The tree is whole by then, and the same on every
 * rank. Further pipelines of a ctx deal the same children alike. One all-reduce over the world.
 * Closed with the ctx. NULL and an error: callbacks missing, micro_batches below 1, a container
 * with a forward of its own, children that do not divide into stages, a stage without any, counts
 * that do not add up, ranks that differ. */
TSH_API tsh_pipeline *tsh_pipeline_new(tsh_module *container, const tsh_pipeline_desc *desc);
/* Forwards and backwards of all micro-batches: gradients of the mean of their losses, summed into
 * every leaf, as tsh_backward of each loss / micro_batches in turn would (with .weight: of each
 * loss, .summed), all but the last one with .defer: the average over dp travels while the last
 * backward goes on, but for parameters tied across stages, whose gradients are summed over these
 * first. *loss (may be NULL): that mean, on every rank of pp, and with .weight of dp; NaN after an
 * error. The norm that follows (tsh_optim_step, tsh_clip_grad_norm) is that of all stages, too.
 * Collectives over pp: what crosses from one stage to the next, of any shape, dtype and layout, is
 * sent by every rank of tp for itself, behind 160 bytes that describe it, and its gradient comes
 * back; tied gradients are exchanged; one broadcast of the loss. With .weight, two all-reduces over
 * dp, of weights and of the loss. TSH_ERR_STATE: ops are recorded already, or within
 * tsh_no_grad_begin. */
TSH_API tsh_result tsh_pipeline_train(tsh_pipeline *pipeline, double *loss);
/* The mean loss of micro_batches (0: as many as the description says) by forwards alone, on every
 * rank of pp, and with .weight of dp. tsh_train says whether modules train. */
TSH_API tsh_result tsh_pipeline_evaluate(tsh_pipeline *pipeline, int micro_batches, double *loss);

/* -- save and load ---------------------------------------------------------- */

/* Writes every parameter below module, and with optim its moments, into one safetensors file of
 * global tensors, the same bytes at every degree of tp and pp; tsh_load reads it at any other.
 * Entries: parameters by their path (tied ones once), "optim.first.<path>" and
 * "optim.second.<path>", TSH_REAL (F32 or F64), row-major; in __metadata__ a hash of all values,
 * the state of the generators (seed, counts of randn and of every module's dropout) and of optim
 * (kind, steps, skipped). optim NULL: none. Parameters without memory get their initial values
 * first.
 * Collective over the world: two all-reduces; between them tp ranks of the first replica (dp) send
 * pieces of at most 1 MiB to its first rank, which never holds a whole tensor; stages of a pipeline
 * by way of their own first ranks, after an all-reduce more over the world and over pp. It writes a
 * temporary file "<path>.tmp-...", syncs it on POSIX and Windows, and renames it: path is the
 * old file or the whole new one. On POSIX, the new one has the old one's mode, and its owner where
 * this process may give it; a symbolic link stays, and leads to the new file. A save that was
 * killed leaves its temporary file behind: on POSIX the next save of this path removes it, unless
 * the file system has no locks (flock). An error is one on every rank, of the lowest rank's code
 * and sentence: TSH_ERR_IO (the system, or path is no regular file), TSH_ERR_MEMORY,
 * TSH_ERR_UNSUPPORTED (pp above 1 without a pipeline); no temporary file is left, and
 * tsh_clear_error on every rank recovers. */
TSH_API tsh_result tsh_save(tsh_module *module, const char *path, const tsh_optim *optim);
/* Reads what tsh_save wrote, or another program's safetensors file, into a model of the same names
 * and shapes, with or without memory, at any degree and layout; every rank reads its own slices.
 * optim: the same kind, its moments and steps are restored; NULL: they are skipped. The state of
 * the generators is restored where the file holds it, so that training goes on with the same bits.
 * Between steps. Two all-reduces over the world, no other traffic. The whole header is checked on
 * all ranks before anything changes. While a save of the same path goes on, too, all ranks read
 * one and the same save, or get TSH_ERR_IO and may load again after tsh_clear_error. For that, they
 * compare the hash of all values that tsh_save stored; for other programs' files, 64 bytes of every
 * tensor. Values that are NaN or infinite are loaded, and the first replica logs them with the
 * tensor's name: one rank for a replicated tensor, each rank for its shard of a sharded one; after
 * eight tensors only how many more there are. An error is one on every rank, as in tsh_save:
 * TSH_ERR_IO (the system, no well-formed file, or not the same one on every rank),
 * TSH_ERR_ARGUMENT (tensors that the file or the model lacks, or another kind of optimiser),
 * TSH_ERR_SHAPE, TSH_ERR_DTYPE. Files over 2 GiB need a 64-bit long. */
TSH_API tsh_result tsh_load(tsh_module *module, const char *path, tsh_optim *optim);

/* -- checks ----------------------------------------------------------------- */

/* Compares gradients of fn's scalar with central differences at every element (or `samples` of
 * them, 0: all) of every input; inputs are leaves. Returns the largest |difference| / max(1,
 * |gradient|), negative on an error. Collective over tp: inputs that are replicated are moved on
 * all ranks at once, sharded ones on their owner. eps 0: 1e-2 in float, 1e-5 in double. */
typedef tsh_tensor *(*tsh_gradcheck_fn)(tsh_ctx *ctx, tsh_tensor **in, int n, void *user);
TSH_API double tsh_gradcheck(tsh_ctx *ctx, tsh_gradcheck_fn fn, tsh_tensor **in, int n, void *user,
                             double eps, int64_t samples);
/* 0 and TSH_ERR_STATE on every rank of the world where what should be equal is not: replicated
 * parameters below over tp, all of them over dp, those tied across stages over pp, and likewise the
 * moments that optimisers keep for them (those that .zero cuts not over dp). Hashes are compared:
 * one all-gather over each axis of 8 bytes per tensor, one all-reduce over the world. The error
 * names the first tensor and the ranks that most others differ from. */
TSH_API int tsh_check_replicas(tsh_module *module);
/* A 64-bit hash of a tensor's global values: equal at every degree if the values are. Collective
 * where sharded. */
TSH_API uint64_t tsh_hash(tsh_ctx *ctx, tsh_tensor *t);

/* -- trace ------------------------------------------------------------------ */

/* Where a trace goes, and its clock. What it points to must stay until tsh_trace_end. */
typedef struct tsh_trace_desc {
    const char *path; /* a file that rank 0 writes; NULL: `write` takes the text */
    /* Takes `size` bytes of the text, in order, on rank 0; returns 0 if it cannot. */
    int (*write)(void *user, const char *text, size_t size);
    /* Nanoseconds, never less than before; NULL: the system's clock. */
    int64_t (*now)(void *user);
    void *user;
    int64_t limit; /* events of a rank, 64 bytes each; later ones are only counted; 0: a million */
} tsh_trace_desc;
/* Notes from now on what this rank does: forward passes of modules by path; ops forward and
 * backward by name; an optimiser's steps, and in them the norm of the gradients and updates by
 * parameter; collectives with their bytes (as tsh_comm_stats counts), and the waits for those that
 * were started early. On every rank, or tsh_trace_end fails. Names of custom ops must stay until
 * then. Errors: TSH_ERR_STATE (one runs), TSH_ERR_ARGUMENT (neither or both of path and
 * write; no clock). Where no trace runs, an op costs two branches, which go the same way always. */
TSH_API tsh_result tsh_trace_begin(tsh_ctx *ctx, const tsh_trace_desc *desc);
/* Ends it and writes one text of all ranks, a lane per rank, in Chrome's Trace Event Format, which
 * Perfetto opens (ui.perfetto.dev). Collective over the world: every other rank sends to rank 0.
 * Times of different hosts are those of their own clocks. After an error nothing is written.
 * Errors: TSH_ERR_STATE (none runs); TSH_ERR_IO on rank 0. */
TSH_API tsh_result tsh_trace_end(tsh_ctx *ctx);

#ifdef __cplusplus
}
#endif

/* ========================================================================== */
/* end of header: stop here if you only want the API                           */
/* ========================================================================== */
#endif /* TSHARD_H */

#ifdef TSHARD_IMPLEMENTATION
#ifndef TSHARD_IMPLEMENTED
#define TSHARD_IMPLEMENTED

/* ========================================================================== */
/* >>base                                                MARK: - base (private) */
/* Includes, macros, and the structures that all later sections share.         */
/* Needs: >>types >>layout-api >>comm-api.                                      */
/* ========================================================================== */

#include <errno.h>  /* why a file cannot be opened */
#include <float.h>  /* FLT_MAX, DBL_MAX */
#include <limits.h> /* INT_MAX, LONG_MAX */
#include <math.h>   /* expf, sqrt, ... */
#include <stdarg.h> /* tsh_fail */
#include <stdlib.h> /* malloc, free, bsearch, qsort, getenv */
#include <string.h> /* memcpy, memset */
#include <time.h>   /* time, clock: names of temporary files */

/* Needed beyond C99: resolve a link, flush a file to disk and rename it over another, a clock. */
#if defined(_WIN32)
#define TSHI_POSIX 0
/* Declared as in windows.h, which is not included: it makes macros of words such as `near`. */
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
#define TSHI_POSIX 1
#include <dirent.h>       /* readdir */
#include <fcntl.h>        /* open */
#include <sched.h>        /* struct timespec, which <time.h> hides under -std=c99 */
#include <sys/file.h>     /* flock */
#include <sys/resource.h> /* getrlimit */
#include <sys/stat.h>     /* stat, chmod */
#include <sys/utsname.h>  /* uname */
#include <unistd.h>       /* fsync, close, chown */
#ifndef __cplusplus /* glibc hides these under -std=c99, and never in C++ */
FILE *(fdopen)(int file, const char *mode);
int (fileno)(FILE *file);
ssize_t (readlink)(const char *path, char *to, size_t size);
#endif
#else
#define TSHI_POSIX 0
#endif

/* Initialises with zeros a structure that does not begin with an enum. {0} draws warnings from
 * compilers of C++. */
#ifdef __cplusplus
#define TSHI_ZERO {}
#else
#define TSHI_ZERO {0}
#endif
#define TSHI_R(x) ((tsh_real)(x))
/* 1 if tsh_real is double; a constant expression. */
#define TSHI_DOUBLE (sizeof(tsh_real) == 8)
/* TSHI_OUTLINE: has many callers and gains nothing from inlining; saves compile time.
 * TSHI_COLD: runs once or rarely (models, files, checks, errors); gcc optimises it for size.
 * TSHI_APART: is called by AVX kernels. gcc must not look into it (noipa): if it sees that the
 * function leaves some registers alone, it omits vzeroupper before the call, and every change
 * between AVX and SSE code is slow. */
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 8
#define TSHI_ALONE noipa
#else
#define TSHI_ALONE noinline
#endif
#if defined(__GNUC__)
#define TSHI_RESTRICT       __restrict
#define TSHI_INLINE         static inline __attribute__((always_inline))
#define TSHI_APART          static __attribute__((TSHI_ALONE))
#define TSHI_OUTLINE        static __attribute__((noinline))
#define TSHI_COLD           __attribute__((cold))
#define TSHI_PREFETCH(p)    __builtin_prefetch(p)
#define TSHI_PREFETCH_L2(p) __builtin_prefetch(p, 0, 2)
#else
#define TSHI_RESTRICT
#define TSHI_INLINE         static
#define TSHI_APART          static
#define TSHI_OUTLINE        static
#define TSHI_COLD
#define TSHI_PREFETCH(p)    ((void)(p))
#define TSHI_PREFETCH_L2(p) ((void)(p))
#endif
/* Before a loop over a block whose operands are distinct or the same: vectorise it without checks
 * for overlap. (clang would unroll it first and then find no vectors.) */
#if defined(__clang__)
#define TSHI_LANES _Pragma("clang loop unroll(disable)")
#elif defined(__GNUC__)
#define TSHI_LANES _Pragma("GCC ivdep")
#else
#define TSHI_LANES
#endif
/* The same before a loop of any length: gcc then omits the second version, for operands that
 * overlap. (clang relies on TSHI_RESTRICT.) */
#if defined(__GNUC__) && !defined(__clang__)
#define TSHI_EACH TSHI_LANES
#else
#define TSHI_EACH
#endif

/* TSHI_VECTORS: GNU C's vector types are available. TSHI_X86: so are AVX intrinsics. */
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

enum { TSHI_ALIGN = 64, TSHI_SIZE_CLASSES = 58 }; /* 64 * 2^58 bytes exceed a size_t */

/* Header of a reference-counted block of memory; its data follows, aligned to 64 bytes. Blocks of
 * the step pool lie side by side in a page: `before` is the size of the left neighbour (0: none),
 * `last` marks the page's last block. */
typedef struct tshi_block tshi_block;
struct tshi_block {
    size_t size; /* bytes of data, a multiple of 64 */
    size_t before;
    tshi_block *next, *prev; /* in the list of free blocks of its size class */
    int refs;                /* 0: free */
    int kind, last;          /* kind: TSH_MEM_... */
    char padding[TSHI_ALIGN - 2 * sizeof(size_t) - 2 * sizeof(void *) - 3 * sizeof(int)];
};

/* Memory from the allocator that a pool or an arena hands out in parts. */
typedef struct tshi_page {
    struct tshi_page *next;
    size_t bytes, used; /* used: of an arena only */
} tshi_page;

/* The offset of the first block in a pool page, a multiple of 64. A load that follows a store waits
 * if the low 12 bits of the addresses agree ("4K aliasing"), so a result slightly ahead of an
 * operand, modulo 4096, is slow. With pages aligned to 4096, the pool's data begins 256 bytes
 * before the data of a block allocated alone. */
enum { TSHI_POOL_OFFSET = 3840 };

/* Step memory: blocks that are reused. */
typedef struct tshi_pool {
    tshi_page *pages;
    tshi_block *free[TSHI_SIZE_CLASSES]; /* free blocks of [2^c, 2^(c+1)) times 64 bytes */
    uint64_t filled;                     /* bit c: free[c] is not empty */
} tshi_pool;

/* Small allocations, released all at once: those of the tape, or of the ctx. Pages fill up from the
 * front. */
typedef struct tshi_arena {
    tshi_page *first, *now;
} tshi_arena;

typedef struct tshi_node tshi_node;
typedef struct tshi_op tshi_op;

enum {
    TSHI_OWNED = 1,     /* lives until freed; others until the step or scope ends */
    TSHI_PARAM = 2,     /* a module's parameter */
    TSHI_LEAF = 4,      /* backward leaves its gradient for the user */
    TSHI_RETAIN = 8,    /* keeps values and gradient through backward */
    TSHI_STALE = 16,    /* its values were released */
    TSHI_DEAD = 32,     /* the handle itself was released */
    TSHI_CHUNKED = 64,  /* each rank of dp holds a chunk of its gradient (a moment: its values) */
    TSHI_AVERAGED = 128 /* its gradient is averaged over dp: a parameter, or tsh_average_grad */
};

/* A gradient accumulator. live 0: the gradient is 0, whatever the block contains. */
typedef struct tshi_accumulator {
    tshi_block *block;
    int live, clean; /* clean: not live, and the block contains zeros */
} tshi_accumulator;

struct tsh_tensor {
    tsh_ctx *ctx;
    tsh_tensor *next, *prev; /* owned, step, or free handles */
    tsh_dtype dtype;
    unsigned flags;
    int ndim, depth; /* depth: how many scopes were open when it was created */
    int64_t dim[TSH_MAX_DIMS], local[TSH_MAX_DIMS], stride[TSH_MAX_DIMS];
    tsh_layout layout; /* resolved: dim >= 0, segments >= 1, every length and unit given */
    tshi_block *block; /* NULL: a parameter that is not allocated yet, or stale */
    int64_t offset;    /* of the first element, in elements */
    tsh_tensor *base;  /* the tensor that this one is a view of; itself if it is no view */
    /* of a base only: */
    int requires_grad;
    tshi_node *node;         /* the op that made it; NULL: a leaf */
    tshi_accumulator gr, gp; /* gradients in the tensor's own layout, and partial sums */
    int partial_contributions; /* partial gradients still to be added in this backward */
    int contributions;         /* leaf: gradients of either kind still to be added */
    int in_bucket;             /* leaf: 1 while its gradient waits in a bucket to be sent */
    int reducing;            /* the all-reduce of gp (request req) was started */
    tsh_req req;
    int sparse;        /* rows of gr and gp that are not marked are 0 */
    tshi_block *marks; /* int32_t per local row; NULL: never had a row-sparse gradient */
    /* of a parameter only: */
    const char *path;
    tsh_init init;
    int64_t fan_in, zero_row; /* zero_row: 1 + the row whose initial values are 0; 0: none */
    int stage;  /* 1 + the first pipeline stage that holds it; 0: there is no pipeline */
    int absent; /* other stages hold it, this rank's does not */
};

/* Sets of an op's inputs, and its output, as bits: the values that it saves; the inputs whose
 * gradients are partial sums. Bit i is input i. */
enum {
    TSHI_NONE = 0,
    TSHI_X = 1, /* unary ops, linear, norms: (x, weight, bias) */
    TSHI_WEIGHT = 2,
    TSHI_BIAS = 4,
    TSHI_A = 1, /* binary ops, matmul: (a, b) */
    TSHI_B = 2,
    TSHI_COND = 1, /* where: (cond, yes, no) */
    TSHI_YES = 2,
    TSHI_NO = 4,
    TSHI_Q = 1, /* attention: (q, k, v, mask) */
    TSHI_K = 2,
    TSHI_V = 4,
    TSHI_MASK = 8,
    TSHI_LOGITS = 1, /* cross-entropy: (logits, target, class weights) */
    TSHI_TARGET = 2,
    TSHI_CLASS_WEIGHTS = 4,
    TSHI_OUT = 1 << 30
};

/* Describes an op's output before it is made: the op sets the shape, its layout rule the rest. */
typedef struct tshi_output {
    tsh_shape shape;
    tsh_layout layout;
    unsigned partial; /* inputs whose gradient is a partial sum */
} tshi_output;

/* An op and its inputs. params: what else its layout rule depends on, or NULL. */
typedef struct tshi_call {
    const tshi_op *op;
    tsh_tensor *const *in;
    int n;
    const void *params;
} tshi_call;

/* An op's layout rule: derives the output's layout from the inputs'. Returns 0 and records an error
 * if these do not fit. */
typedef int (*tshi_rule_fn)(const tshi_call *call, tshi_output *output);

enum {
    /* Backward reads both accumulators, gr and gp, of its output. (For other ops gp is all-reduced
     * into gr first; also if the output is retained, because the user may read its gradient.) */
    TSHI_OP_ACCEPTS_PARTIAL = 1,
    TSHI_OP_ACCEPTS_RETAINED = 2, /* reads both even if the output is retained */
    TSHI_OP_PASSES_PARTIAL = 4    /* adds gp of its output to gp of input 0 */
};

/* An op, described once for all its calls. */
struct tshi_op {
    const char *name;                  /* of the public function */
    const char *inputs;                /* names of the inputs, separated by blanks, or NULL */
    tshi_rule_fn rule;                 /* NULL: the layout is an argument of the call */
    void (*backward)(tshi_node *node); /* adds to the inputs' gradients; NULL: there are none */
    unsigned saves;                    /* values that backward reads: bits of inputs, TSHI_OUT */
    unsigned flags;                    /* TSHI_OP_... */
};

/* One recorded call; only `progress` changes after recording. A tensor has two accumulators: gr for
 * gradients that are replicated, or sharded as the tensor is, and gp for partial sums. Before the
 * backward of the op that made the tensor, gr += all-reduce(gp); the all-reduce starts as soon as
 * the last expected partial gradient is added. */
struct tshi_node {
    const tshi_op *op;
    tshi_node *older;
    const tsh_module *module; /* the innermost one whose forward made the call; NULL: none */
    tsh_tensor *out, **in;
    int n, depth;
    unsigned partial;    /* inputs whose gradient is a partial sum */
    tshi_block **saved;  /* n + 1: values of each input and of out that backward reads, or NULL */
    tshi_block *aux;     /* what else backward reads; released with the node */
    void *params;        /* the op's own options, in the tape's arena */
    tsh_tensor **leaves; /* tensors besides the inputs that backward adds gradients to */
    int leaf_count;
    struct {
        int reached;      /* the loss depends on the output */
        unsigned partial; /* as above, plus input 0 if a partial gradient is passed on to it */
        unsigned done;    /* inputs whose gradient is complete */
    } progress;           /* of the backward that runs */
};

typedef struct tshi_handles {
    tsh_tensor owned, step;      /* heads of circular lists */
    tsh_tensor *oldest, *newest; /* free handles, reused oldest first */
    int64_t free, ended;         /* how many are free; how many of them the last step released */
} tshi_handles;

typedef struct tshi_tape {
    tshi_node *newest;
    tshi_arena arena;
    int no_grad;
    int pending;   /* leaves hold gradients that .defer left unsynchronised */
    int summed;    /* losses are sums of terms, not means: */
    double weight; /* the number of terms on this rank */
    int syncing;   /* gradients of leaves are sent as they become ready */
} tshi_tape;

typedef struct tshi_bucket tshi_bucket;

typedef struct tshi_buckets {
    tshi_arena arena;           /* for all buckets of one backward */
    tshi_bucket *first, **last; /* list of full ones, oldest first, and its end */
    tshi_bucket *awaited;       /* the oldest one whose collective may still run */
    tshi_bucket *open[2];       /* not full yet: whole gradients, gradients kept in chunks */
    int64_t limit;              /* elements that make one full */
    int hold;                   /* none is sent before backward ends */
    int summed;
    double weight; /* number of terms of summed losses: this rank's, then over dp */
    tsh_req weight_req;
} tshi_buckets;

/* What a pipeline keeps of a micro-batch between its forward and its backward. */
typedef struct tshi_micro {
    struct tshi_micro *next; /* in the ctx's list */
    tshi_node *newest;       /* of its tape */
    tshi_arena arena;
    tsh_pipeline *pipeline;
    tsh_tensor handles; /* head of a circular list: tensors that its forward made */
    tsh_tensor *out;    /* sent to the next stage, or the loss */
    tsh_tensor *input;   /* received from the stage before, which waits for its gradient; or NULL */
} tshi_micro;

typedef struct tshi_gemm_kernel tshi_gemm_kernel;
typedef struct tshi_trace tshi_trace;

struct tsh_ctx {
    tsh_comm world, tp, pp, dp;
    tsh_error error;
    int reported; /* the error was reported to the world, or came from it */
    int logged; /* the logger got the error */
    tsh_allocator allocator;
    tsh_logger logger;
    tsh_gemm gemm;
    const tshi_gemm_kernel *gemm_kernel;
    tshi_block *gemm_scratch;
    int isa; /* whose kernels run: TSHI_ISA_... */
    int threads;
    uint64_t seed, randn_calls, dropout_calls;
    tsh_mem mem;
    tshi_pool pool;
    tshi_arena books; /* for all that lives as long as the ctx */
    tshi_handles handles;
    tshi_tape tape;
    tshi_buckets buckets;
    int depth;         /* how many scopes are open */
    int anomalies;     /* tsh_detect_anomaly: values that are not finite are an error */
    tshi_trace *trace; /* NULL: none runs */
    tsh_module *root;
    const tsh_module *module; /* the innermost one whose forward or backward runs; or NULL */
    tsh_result (*compare)(tsh_comm *comm, tsh_ctx *ctx); /* compares models; NULL: there is none */
    tsh_optim *optims;      /* the newest first */
    tsh_pipeline *pipeline; /* the first one; NULL: none */
    tshi_micro *micros;
};

enum { TSHI_MODULE_PARAMS = 2 };

/* A named integer argument of a module, such as its number of heads: in all, and on this rank. */
typedef struct tshi_argument {
    struct tshi_argument *next;
    const char *name;
    int64_t value, local;
} tshi_argument;

struct tsh_module {
    tsh_ctx *ctx;
    const char *name, *path;
    tsh_module *parent, *first, *last, *next; /* first and last child, next sibling */
    tsh_forward_fn forward;
    void *user;
    tsh_tensor *param[TSHI_MODULE_PARAMS];
    const char *param_name[TSHI_MODULE_PARAMS];
    tshi_argument *arguments;
    int evaluating;         /* tsh_train(module, 0): not in training mode */
    int checkpoint;         /* its forward is run again in backward */
    uint64_t dropout_calls; /* calls in training mode: each draws another mask */
    double number;          /* eps of a norm, p of dropout */
    tsh_lookup_desc lookup; /* of an embedding */
    const struct tshi_kind *kind;
    tsh_style style;
    int skip_bias_add, reversed, regather;
    int stage; /* 1 + its pipeline stage; 0: none */
    /* Layouts that the rules of a plan (tsh_parallelize) ask for; NULL: no rule does. */
    const tsh_layout *input_layout, *output_layout; /* that the plan declares; NULL: any */
    const tsh_layout **input_layouts; /* that the `prepared` first inputs are redistributed to */
    const tsh_layout *result;        /* that the output is redistributed to */
    int prepared;
};

/* Returns a * b, or SIZE_MAX on overflow: no allocator grants that. */
static size_t tshi_base_mul(size_t a, size_t b) {
    return b && a > SIZE_MAX / b ? SIZE_MAX : a * b;
}

static int64_t tshi_base_min(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static int64_t tshi_base_ceil(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

/* Returns what an option means: 0 is `usual`, TSH_ZERO is 0. */
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
/* 64-bit time_t with a 32-bit long: clock_gettime itself is the function for a 32-bit time_t. */
extern int clock_gettime(int clock, struct timespec *time) __asm__("__clock_gettime64");
#else
extern int clock_gettime(int clock, struct timespec *time);
#endif
#endif

TSH_API int64_t tsh_now(void) {
#if defined(_WIN32)
    int64_t ticks[2]; /* now; per second */
    (void)QueryPerformanceCounter((union _LARGE_INTEGER *)&ticks[0]);
    (void)QueryPerformanceFrequency((union _LARGE_INTEGER *)&ticks[1]);
    return ticks[0] / ticks[1] * 1000000000 + ticks[0] % ticks[1] * 1000000000 / ticks[1];
#elif defined(TSHI_CLOCK)
    struct timespec t;
    (void)clock_gettime(TSHI_CLOCK, &t);
    return (int64_t)t.tv_sec * 1000000000 + (int64_t)t.tv_nsec;
#else
    return -1; /* clock() of C99 stands still while a thread sleeps */
#endif
}

/* ========================================================================== */
/* >>error                                              MARK: - error (private) */
/* A ctx keeps its first error, reports it to its peers once, and adopts       */
/* theirs. Nothing else in the library handles failure.                        */
/* Needs: >>base.                                                               */
/* ========================================================================== */

/* tsh_fail records an error on this rank only. Where the program next waits for others, or asks
 * tsh_ok, tshi_error_report aborts the world with it; peers see it as the world's status. */

TSH_API const char *tsh_version(void) {
    return TSHARD_VERSION;
}

/* Name and sentence of each tsh_result. */
static const char *const tshi_error_results[][2] = {
#define TSHI_RESULT(name, sentence) {"TSH_" #name, sentence},
    TSH_RESULTS(TSHI_RESULT)
#undef TSHI_RESULT
};

TSH_API const char *tsh_result_name(tsh_result code) {
    return (unsigned)code < (unsigned)TSH_RESULT_COUNT ? tshi_error_results[code][0] : "TSH_?";
}

TSH_API const char *tsh_result_text(tsh_result code) {
    return (unsigned)code < (unsigned)TSH_RESULT_COUNT ? tshi_error_results[code][1]
                                                       : "not an error code";
}

TSH_API void tsh_log_stderr(void *user, const char *message) {
    (void)user;
    (void)fprintf(stderr, "tshard: %s\n", message); /* one call: lines of ranks do not mix */
}

TSH_API void tsh_log_message(const tsh_logger *logger, const char *format, ...) {
    char text[TSH_MESSAGE_SIZE];
    va_list list;
    if (!logger || !logger->fn) return;
    va_start(list, format);
    (void)vsnprintf(text, sizeof text, format, list);
    va_end(list);
    logger->fn(logger->user, text);
}

/* Logs the ctx's error, once. `received`: it came from another rank. */
static TSHI_COLD void tshi_error_log(tsh_ctx *ctx, int received) {
    char text[TSH_MESSAGE_SIZE + 64] = "";
    if (ctx->logged || !ctx->logger.fn) return;
    ctx->logged = 1;
    if (ctx->world.size > 1)
        tsh_text_add(text, sizeof text, "rank %d%s: ", ctx->world.rank, received ? " stops" : "");
    tsh_text_add(text, sizeof text, "%s%s (%s)", ctx->error.message,
                 received && ctx->error.code == TSH_ERR_MISMATCH
                     ? "; every rank must run the same program, with the same arguments"
                     : "",
                 tsh_result_name(ctx->error.code));
    ctx->logger.fn(ctx->logger.user, text);
}

/* Aborts the world with a local error, if there is one: peers in a collective get it, with this
 * rank named. Only now is it logged: until here tsh_clear_error could undo it. */
static TSHI_COLD void tshi_error_report(tsh_ctx *ctx) {
    tsh_error report;
    if (ctx->error.code == TSH_OK) return;
    tshi_error_log(ctx, 0);
    if (ctx->reported || !ctx->world.ops) return;
    ctx->reported = 1;
    (void)tsh_error_set(&report, ctx->error.code, ctx->error.rank, "rank %d: %s", ctx->world.rank,
                        ctx->error.message);
    ctx->world.ops->abort(&ctx->world, &report);
}

/* Adopts the world's error, if it has one and ctx has none; returns ctx's error code. */
TSHI_OUTLINE tsh_result tshi_error_receive(tsh_ctx *ctx) {
    tsh_error error;
    if (ctx->error.code == TSH_OK && ctx->world.ops &&
        ctx->world.ops->status(&ctx->world, &error) != TSH_OK) {
        ctx->error = error;
        ctx->reported = 1;
        tshi_error_log(ctx, 1);
    }
    return ctx->error.code;
}

/* Prefixes the message with the path of the module that runs: "h.3.mlp.c_fc: tsh_linear: ...". A
 * path that does not fit loses its beginning. 16 bytes stay free for "rank 1000: ". */
static TSHI_COLD void tshi_error_place(tsh_ctx *ctx) {
    char *text = ctx->error.message;
    const char *path = ctx->module ? ctx->module->path : "";
    const size_t length = strlen(text), space = sizeof ctx->error.message - length;
    const size_t whole = strlen(path);
    if (!whole || space < 32) return;
    const size_t keep = whole < space - 32 ? whole : space - 32, dots = keep < whole ? 3 : 0;
    memmove(text + dots + keep + 2, text, length + 1);
    memcpy(text, "...", dots);
    memcpy(text + dots, path + whole - keep, keep);
    memcpy(text + dots + keep, ": ", 2);
}

TSH_API TSHI_COLD tsh_result tsh_fail(tsh_ctx *ctx, tsh_result code, const char *format, ...) {
    va_list list;
    if (!ctx || ctx->error.code != TSH_OK) return code; /* the first error is kept */
    ctx->error.code = code;
    ctx->error.rank = ctx->world.rank;
    va_start(list, format);
    (void)vsnprintf(ctx->error.message, sizeof ctx->error.message, format, list);
    va_end(list);
    tshi_error_place(ctx);
    return code;
}

/* tsh_fail for functions that return a tensor, and for those that return 1 if all is well. */
#define tshi_error_null(...) ((void)tsh_fail(__VA_ARGS__), (tsh_tensor *)NULL)
#define tshi_error_zero(...) ((void)tsh_fail(__VA_ARGS__), 0)

/* Records what a collective returned, if it is an error: the world's error, or, if the world has
 * none, that the arguments were refused. Returns result. */
TSHI_OUTLINE tsh_result tshi_error_comm(tsh_ctx *ctx, tsh_result result, const char *what) {
    if (result != TSH_OK && tshi_error_receive(ctx) == TSH_OK)
        (void)tsh_fail(ctx, result, "%s: %s", what, tsh_result_text(result));
    return result;
}

TSH_API int tsh_ok(tsh_ctx *ctx) {
    if (!ctx) return 0;
    tshi_error_report(ctx);
    return tshi_error_receive(ctx) == TSH_OK;
}

TSH_API const tsh_error *tsh_last_error(const tsh_ctx *ctx) {
    static const tsh_error none = {TSH_ERR_MEMORY, -1, "there is no ctx"};
    return ctx ? &ctx->error : &none;
}

TSH_API void tsh_clear_error(tsh_ctx *ctx) {
    if (!ctx || ctx->reported) return;
    memset(&ctx->error, 0, sizeof ctx->error);
    ctx->logged = 0;
}

/* ========================================================================== */
/* >>mem                                                  MARK: - mem (private) */
/* One allocator for everything: reference-counted blocks, a pool for step     */
/* memory, arenas for what is released at once.                                */
/* Needs: >>base >>error.                                                       */
/* ========================================================================== */

/* tshi_mem_alloc returns a block with one reference, tshi_mem_release releases one reference;
 * tshi_mem_arena_alloc allocates from an arena. Blocks of step memory come from the pool: best fit
 * among free blocks, split on use, joined with free neighbours on release. The pool grows by pages
 * and keeps them until the ctx is destroyed, so that a training loop allocates nothing once it has
 * warmed up. */

/* The default allocator: malloc. The pointer that malloc returned stands just before the block. */
static void *tshi_mem_libc(void *user, void *ptr, size_t old_size, size_t new_size, size_t align) {
    char *raw, *block = NULL;
    (void)user;
    if (new_size) {
        if (new_size > SIZE_MAX - align - sizeof raw) return NULL;
        raw = (char *)malloc(new_size + align + sizeof raw);
        if (!raw) return NULL;
        block = raw + sizeof raw;
        block += (align - (uintptr_t)block % align) % align;
        memcpy(block - sizeof raw, &raw, sizeof raw);
        if (ptr) memcpy(block, ptr, old_size < new_size ? old_size : new_size);
    }
    if (ptr) {
        memcpy(&raw, (char *)ptr - sizeof raw, sizeof raw);
        free(raw);
    }
    return block;
}

static void tshi_mem_count(tsh_mem *mem, int kind, size_t add, size_t sub) {
    mem->now[kind] += add - sub;
    mem->total += add - sub;
    if (mem->now[kind] > mem->peak[kind]) mem->peak[kind] = mem->now[kind];
    if (mem->total > mem->total_peak) mem->total_peak = mem->total;
}

/* Calls the allocator, counts, and records an error if it refuses. No other place calls it. */
static void *tshi_mem_call(tsh_ctx *ctx, int kind, void *ptr, size_t old_size, size_t new_size) {
    void *block = NULL;
    ctx->mem.calls++;
    if (new_size != SIZE_MAX)
        block = ctx->allocator.fn(ctx->allocator.user, ptr, old_size, new_size, TSHI_ALIGN);
    if (new_size && !block)
        (void)tsh_fail(ctx, TSH_ERR_MEMORY, "the allocator refused %llu bytes; the ctx holds %llu",
                       (unsigned long long)new_size, (unsigned long long)ctx->mem.total);
    else
        tshi_mem_count(&ctx->mem, kind, new_size, old_size);
    return block;
}

/* Allocates a page and inserts it at *list. */
static tshi_page *tshi_mem_page(tsh_ctx *ctx, int kind, tshi_page **list, size_t bytes) {
    tshi_page *page = (tshi_page *)tshi_mem_call(ctx, kind, NULL, 0, bytes);
    if (!page) return NULL;
    page->bytes = bytes;
    page->used = TSHI_ALIGN;
    page->next = *list;
    *list = page;
    return page;
}

static void *tshi_mem_data(tshi_block *block) {
    return block + 1;
}

static tshi_block *tshi_mem_right(tshi_block *block) {
    return (tshi_block *)(void *)((char *)(block + 1) + block->size);
}

/* Returns floor(log2 x), x > 0. */
static int tshi_mem_log2(uint64_t x) {
#if defined(__GNUC__)
    return 63 - __builtin_clzll(x);
#else
    int i = 0;
    while (x >>= 1) i++;
    return i;
#endif
}

static int tshi_mem_class(size_t size) {
    return tshi_mem_log2(size / TSHI_ALIGN | 1u);
}

static void tshi_mem_link(tshi_pool *pool, tshi_block *block) {
    const int c = tshi_mem_class(block->size);
    block->refs = 0;
    block->prev = NULL;
    block->next = pool->free[c];
    if (block->next) block->next->prev = block;
    pool->free[c] = block;
    pool->filled |= (uint64_t)1 << c;
}

static void tshi_mem_unlink(tshi_pool *pool, tshi_block *block) {
    const int c = tshi_mem_class(block->size);
    if (block->next) block->next->prev = block->prev;
    if (block->prev)
        block->prev->next = block->next;
    else if (!(pool->free[c] = block->next))
        pool->filled &= ~((uint64_t)1 << c);
}

/* Changes the size of a free block; within its class, it keeps its place in the list. */
static void tshi_mem_resize(tshi_pool *pool, tshi_block *block, size_t size) {
    const int stays = tshi_mem_class(size) == tshi_mem_class(block->size);
    if (!stays) tshi_mem_unlink(pool, block);
    block->size = size;
    if (!stays) tshi_mem_link(pool, block);
}

/* Returns the smallest free block of at least `size` bytes, or NULL. */
static tshi_block *tshi_mem_fit(tshi_pool *pool, size_t size) {
    tshi_block *block, *best = NULL;
    uint64_t left = pool->filled >> tshi_mem_class(size) << tshi_mem_class(size);
    for (; left && !best; left &= left - 1)
        for (block = pool->free[tshi_mem_log2(left & (~left + 1))]; block; block = block->next)
            if (block->size >= size && (!best || block->size < best->size)) best = block;
    return best;
}

/* Adds a page to the pool and returns it as one free block; NULL and an error: no memory. */
static tshi_block *tshi_mem_grow(tsh_ctx *ctx, size_t size) {
    const size_t min = (size_t)1 << 18;
    const size_t bytes = (size > min ? size : min) + sizeof(tshi_block) + TSHI_POOL_OFFSET;
    tshi_page *page = tshi_mem_page(ctx, TSH_MEM_STEP, &ctx->pool.pages, bytes);
    if (!page) return NULL;
    tshi_block *block = (tshi_block *)(void *)((char *)page + TSHI_POOL_OFFSET);
    memset(block, 0, sizeof *block);
    block->size = bytes - TSHI_POOL_OFFSET - sizeof *block;
    block->kind = TSH_MEM_STEP;
    block->last = 1;
    tshi_mem_link(&ctx->pool, block);
    return block;
}

/* Splits off and returns the right end of a free block, or takes all of it if the rest could hold
 * nothing. The right end, because a large size is mostly a multiple of 4096: the next block then
 * lies 64 bytes before this one, modulo 4096 (see TSHI_POOL_OFFSET). */
static tshi_block *tshi_mem_split(tshi_pool *pool, tshi_block *whole, size_t size) {
    tshi_block *block;
    if (whole->size < size + sizeof *block + TSHI_ALIGN) {
        tshi_mem_unlink(pool, whole);
        return whole;
    }
    tshi_mem_resize(pool, whole, whole->size - size - sizeof *block);
    block = tshi_mem_right(whole);
    block->size = size;
    block->before = whole->size;
    block->last = whole->last;
    whole->last = 0;
    if (!block->last) tshi_mem_right(block)->before = size;
    return block;
}

/* Takes a block from the pool, which grows if need be. */
static tshi_block *tshi_mem_from_pool(tsh_ctx *ctx, size_t size) {
    tshi_block *block = tshi_mem_fit(&ctx->pool, size);
    if (!block) block = tshi_mem_grow(ctx, size);
    if (!block) return NULL;
    block = tshi_mem_split(&ctx->pool, block, size);
    ctx->mem.step_live += block->size + sizeof *block;
    if (ctx->mem.step_live > ctx->mem.step_live_peak) ctx->mem.step_live_peak = ctx->mem.step_live;
    return block;
}

/* Allocates a block of at least `bytes` bytes, with one reference. NULL and an error: no memory. */
TSHI_OUTLINE tshi_block *tshi_mem_alloc(tsh_ctx *ctx, int kind, size_t bytes) {
    size_t size = bytes < SIZE_MAX / 4 ? bytes ? bytes : 1 : SIZE_MAX / 4;
    tshi_block *block;
    size = (size + TSHI_ALIGN - 1) / TSHI_ALIGN * TSHI_ALIGN;
    if (kind == TSH_MEM_STEP)
        block = tshi_mem_from_pool(ctx, size);
    else
        block = (tshi_block *)tshi_mem_call(ctx, kind, NULL, 0, size + sizeof *block);
    if (!block) return NULL;
    if (kind != TSH_MEM_STEP) block->size = size; /* of the pool: perhaps larger */
    block->kind = kind;
    block->refs = 1;
    return block;
}

/* Gives a block back to the pool, joined with its free neighbours. */
static void tshi_mem_to_pool(tsh_ctx *ctx, tshi_block *block) {
    tshi_block *other;
    ctx->mem.step_live -= block->size + sizeof *block;
    if (!block->last && !(other = tshi_mem_right(block))->refs) {
        tshi_mem_unlink(&ctx->pool, other);
        block->size += other->size + sizeof *other;
        block->last = other->last;
    }
    other = block->before ? (tshi_block *)(void *)((char *)block - block->before) - 1 : NULL;
    if (other && !other->refs) {
        other->last = block->last;
        tshi_mem_resize(&ctx->pool, other, other->size + block->size + sizeof *block);
        block = other;
    } else {
        tshi_mem_link(&ctx->pool, block);
    }
    if (!block->last) tshi_mem_right(block)->before = block->size;
}

/* Releases one reference; NULL is fine. */
static void tshi_mem_release(tsh_ctx *ctx, tshi_block *block) {
    if (!block || --block->refs > 0) return;
    if (block->kind == TSH_MEM_STEP)
        tshi_mem_to_pool(ctx, block);
    else
        (void)tshi_mem_call(ctx, block->kind, block, block->size + sizeof *block, 0);
}

/* Allocates zeroed memory from an arena; NULL and an error: no memory. */
static void *tshi_mem_arena_alloc(tsh_ctx *ctx, tshi_arena *arena, size_t bytes) {
    tshi_page *page = arena->now;
    bytes = (bytes + 15) / 16 * 16;
    while (page && page->used + bytes > page->bytes) page = page->next;
    if (!page) {
        size_t size = bytes + TSHI_ALIGN > 16384 ? bytes + TSHI_ALIGN : 16384;
        page = tshi_mem_page(ctx, TSH_MEM_BOOKS, arena->now ? &arena->now->next : &arena->first,
                             size);
        if (!page) return NULL;
    }
    arena->now = page;
    char *place = (char *)page + page->used;
    page->used += bytes;
    memset(place, 0, bytes);
    return place;
}

/* Releases all that was allocated from an arena, and keeps its pages. */
static void tshi_mem_reset(tshi_arena *arena) {
    for (tshi_page *page = arena->first; page; page = page->next) page->used = TSHI_ALIGN;
    arena->now = arena->first;
}

/* Frees a list of pages: those of an arena (TSH_MEM_BOOKS), or of the pool (TSH_MEM_STEP). */
static void tshi_mem_close(tsh_ctx *ctx, int kind, tshi_page *page) {
    while (page) {
        tshi_page *next = page->next;
        (void)tshi_mem_call(ctx, kind, page, page->bytes, 0);
        page = next;
    }
}

TSH_API tsh_mem tsh_mem_stats(const tsh_ctx *ctx) {
    const tsh_mem none = TSHI_ZERO;
    return ctx ? ctx->mem : none;
}

/* ========================================================================== */
/* >>dtype                                              MARK: - dtype (private) */
/* Everything that depends on a dtype: one row of one table.                   */
/* Needs: >>base.                                                               */
/* ========================================================================== */

/* TO ADD A DTYPE, add a constant to tsh_dtype and a row to tshi_dtypes; nothing else asks which
 * dtype a tensor has. Ops compute in tsh_real: kernels load blocks of elements as tsh_real and
 * store the results, which alone rounds values to the dtype. A row needs `load` and `store`; where
 * another function is NULL, the library uses these two. */

/* out[i] = left[i] op right[i] for n elements. `out` may be `left`, `right` or both. */
typedef void (*tshi_fold_fn)(void *out, const void *left, const void *right, int64_t n);

typedef struct tshi_dtype {
    const char *name, *file; /* "f32"; what safetensors calls it: "F32" */
    int size;                /* bytes of an element */
    int floating;
    /* convert n elements, `step` elements apart, to or from n contiguous values */
    void (*load)(const void *from, int64_t step, int64_t n, tsh_real *to);
    void (*store)(void *to, int64_t step, int64_t n, const tsh_real *from);
    /* (optional) read or write element i, not rounded to tsh_real */
    double (*get)(const void *data, int64_t i);
    void (*put)(void *data, int64_t i, double value);
    /* (used for integers only) as load and store, exact for every integer */
    void (*load_integer)(const void *from, int64_t step, int64_t n, int64_t *to);
    void (*store_integer)(void *to, int64_t step, int64_t n, const int64_t *from);
    /* (optional) the reductions of collectives, by tsh_redop, and the division of an average; NULL:
     * in tsh_real, rounded to the dtype after each step */
    const tshi_fold_fn *fold;
    void (*divide)(void *sums, int64_t n, int by);
} tshi_dtype;

/* Makes a value fit an integer type: clamps it to +-max; NaN becomes 0. */
static double tshi_dtype_clamp(double value, double max) {
    if (value != value) return 0;
    return value > max ? max : value < -max ? -max : value;
}

/* Folds work on runs: compilers vectorise loops of constant length at every level of optimisation.
 * As `out` may be an operand, they must be told that iterations are independent (clang would check
 * addresses at run time, and fall back to single elements). */
enum { TSHI_DTYPE_RUN = 32 };
#if defined(__clang__)
#define TSHI_DTYPE_LANES _Pragma("clang loop unroll(disable) vectorize(assume_safety)")
#else
#define TSHI_DTYPE_LANES TSHI_LANES
#endif

/* Defines tshi_dtype_<name>: out = expression of l and r. */
#define TSHI_DTYPE_FOLD(name, type, expression)                                                    \
    static void tshi_dtype_##name(void *out_, const void *left_, const void *right_, int64_t n) {  \
        type *out = (type *)out_;                                                                  \
        const type *left = (const type *)left_, *right = (const type *)right_;                     \
        int64_t at = 0;                                                                            \
        int i;                                                                                     \
        for (; at + TSHI_DTYPE_RUN <= n; at += TSHI_DTYPE_RUN) {                                   \
            TSHI_DTYPE_LANES for (i = 0; i < TSHI_DTYPE_RUN; i++) {                                \
                const type l = left[at + i], r = right[at + i];                                    \
                out[at + i] = expression;                                                          \
            }                                                                                      \
        }                                                                                          \
        for (; at < n; at++) {                                                                     \
            const type l = left[at], r = right[at];                                                \
            out[at] = expression;                                                                  \
        }                                                                                          \
    }
/* Define tshi_dtype_<name>: converts n elements to `wide`, or back, where `value` is of from[i]. */
#define TSHI_DTYPE_LOAD(name, type, wide)                                                          \
    static void tshi_dtype_##name(const void *data, int64_t step, int64_t n, wide *to) {           \
        const type *TSHI_RESTRICT from = (const type *)data;                                       \
        for (int64_t i = 0; i < n; i++) to[i] = (wide)from[i * step];                              \
    }
#define TSHI_DTYPE_STORE(name, type, wide, value)                                                  \
    static void tshi_dtype_##name(void *data, int64_t step, int64_t n, const wide *from) {         \
        type *TSHI_RESTRICT to = (type *)data;                                                     \
        for (int64_t i = 0; i < n; i++) to[i * step] = (type)(value);                              \
    }
#define TSHI_DTYPE_DIVIDE(suffix, type)                                                            \
    static void tshi_dtype_divide_##suffix(void *sums_, int64_t n, int by) {                       \
        type *sums = (type *)sums_, size = (type)by;                                               \
        int64_t at = 0;                                                                            \
        for (; at + TSHI_DTYPE_RUN <= n; at += TSHI_DTYPE_RUN)                                     \
            for (int i = 0; i < TSHI_DTYPE_RUN; i++) sums[at + i] /= size;                         \
        for (; at < n; at++) sums[at] /= size;                                                     \
    }
/* Defines the functions of a dtype. `wide` computes sums and products: for integers the unsigned
 * type, so that they wrap on overflow. min and max return the left of equal values (0 and -0), and
 * NaN if either is NaN. FIT(x, max) makes x fit the type; then a fraction is truncated. */
#define TSHI_DTYPE(suffix, type, wide, FIT, max)                                                   \
    TSHI_DTYPE_FOLD(sum_##suffix, type, (type)((wide)l + (wide)r))                                 \
    TSHI_DTYPE_FOLD(prod_##suffix, type, (type)((wide)l * (wide)r))                                \
    TSHI_DTYPE_FOLD(min_##suffix, type, ((l <= r) | (l != l)) ? l : r)                             \
    TSHI_DTYPE_FOLD(max_##suffix, type, ((l >= r) | (l != l)) ? l : r)                             \
    static const tshi_fold_fn tshi_dtype_folds_##suffix[] = {/* in the order of tsh_redop */       \
                                                             tshi_dtype_sum_##suffix,              \
                                                             tshi_dtype_prod_##suffix,             \
                                                             tshi_dtype_min_##suffix,              \
                                                             tshi_dtype_max_##suffix,              \
                                                             tshi_dtype_sum_##suffix};             \
    static double tshi_dtype_get_##suffix(const void *data, int64_t i) {                           \
        return (double)((const type *)data)[i];                                                    \
    }                                                                                              \
    static void tshi_dtype_put_##suffix(void *data, int64_t i, double value) {                     \
        ((type *)data)[i] = (type)FIT(value, max);                                                 \
    }                                                                                              \
    TSHI_DTYPE_LOAD(load_##suffix, type, tsh_real)                                                 \
    TSHI_DTYPE_LOAD(load_integer_##suffix, type, int64_t)                                          \
    TSHI_DTYPE_STORE(store_##suffix, type, tsh_real, FIT(from[i], max))                            \
    TSHI_DTYPE_STORE(store_integer_##suffix, type, int64_t, from[i])
#define TSHI_DTYPE_ANY(x, max)   (x)
#define TSHI_DTYPE_CLAMP(x, max) tshi_dtype_clamp((double)(x), max)
TSHI_DTYPE(f32, float, float, TSHI_DTYPE_ANY, 0)
TSHI_DTYPE(f64, double, double, TSHI_DTYPE_ANY, 0)
TSHI_DTYPE(i32, int32_t, uint32_t, TSHI_DTYPE_CLAMP, 2147483647.0)
TSHI_DTYPE(i64, int64_t, uint64_t, TSHI_DTYPE_CLAMP, 9223372036854774784.0) /* exact in double */
TSHI_DTYPE_DIVIDE(f32, float)
TSHI_DTYPE_DIVIDE(f64, double)

#define TSHI_DTYPE_ROW(suffix, file, size, floating, divide)                                       \
    {#suffix, file, size, floating, tshi_dtype_load_##suffix, tshi_dtype_store_##suffix,           \
     tshi_dtype_get_##suffix, tshi_dtype_put_##suffix, tshi_dtype_load_integer_##suffix,           \
     tshi_dtype_store_integer_##suffix, tshi_dtype_folds_##suffix, divide}
/* In the order of tsh_dtype. */
static const tshi_dtype tshi_dtypes[] = {TSHI_DTYPE_ROW(f32, "F32", 4, 1, tshi_dtype_divide_f32),
                                         TSHI_DTYPE_ROW(f64, "F64", 8, 1, tshi_dtype_divide_f64),
                                         TSHI_DTYPE_ROW(i32, "I32", 4, 0, NULL),
                                         TSHI_DTYPE_ROW(i64, "I64", 8, 0, NULL),
#if defined(TSHI_DTYPE_MORE) /* a test adds a row of its own */
                                         TSHI_DTYPE_MORE
#endif
};
enum { TSHI_DTYPES = sizeof tshi_dtypes / sizeof tshi_dtypes[0] };
#undef TSHI_DTYPE_ROW
#undef TSHI_DTYPE_CLAMP
#undef TSHI_DTYPE_ANY
#undef TSHI_DTYPE
#undef TSHI_DTYPE_DIVIDE
#undef TSHI_DTYPE_STORE
#undef TSHI_DTYPE_LOAD
#undef TSHI_DTYPE_FOLD
#undef TSHI_DTYPE_LANES

/* Returns the bytes of n tsh_real: gradients, moments, scratch. */
static size_t tshi_dtype_reals(int64_t n) {
    return tshi_base_mul((size_t)n, sizeof(tsh_real));
}

static size_t tshi_dtype_bytes(tsh_dtype dtype, int64_t n) {
    return tshi_base_mul((size_t)n, (size_t)tshi_dtypes[dtype].size);
}

TSH_API size_t tsh_dtype_size(tsh_dtype dtype) {
    return (unsigned)dtype < (unsigned)TSHI_DTYPES ? (size_t)tshi_dtypes[dtype].size : 0;
}

static const char *tshi_dtype_name(tsh_dtype dtype) {
    return tshi_dtypes[dtype].name;
}

static double tshi_dtype_get(tsh_dtype dtype, const void *data, int64_t i) {
    const tshi_dtype *row = &tshi_dtypes[dtype];
    tsh_real value;
    if (row->get) return row->get(data, i);
    row->load((const char *)data + i * row->size, 1, 1, &value);
    return (double)value;
}

static void tshi_dtype_put(tsh_dtype dtype, void *data, int64_t i, double value) {
    const tshi_dtype *row = &tshi_dtypes[dtype];
    const tsh_real rounded = TSHI_R(value);
    if (row->put)
        row->put(data, i, value);
    else
        row->store((char *)data + i * row->size, 1, 1, &rounded);
}

/* Returns 0 if value is out of an integer dtype's range. */
static int tshi_dtype_holds(tsh_dtype dtype, double value) {
    int64_t widest;
    tshi_dtype_put(dtype, &widest, 0, value);
    return tshi_dtypes[dtype].floating || fabs(value - tshi_dtype_get(dtype, &widest, 0)) < 1;
}

/* Returns 1 if ops compute with the dtype: floating, and exact in tsh_real. */
static int tshi_dtype_computes(tsh_dtype dtype) {
    return tshi_dtypes[dtype].floating && tshi_dtypes[dtype].size <= (int)sizeof(tsh_real);
}

TSH_API void tsh_coll_fold(void *out, const void *left, const void *right, int64_t n,
                           tsh_dtype dtype, tsh_redop op) {
    const tshi_dtype *row = &tshi_dtypes[dtype];
    tsh_real l[TSHI_DTYPE_RUN], r[TSHI_DTYPE_RUN];
    int64_t e, m;
    if (row->fold) row->fold[op](out, left, right, n);
    for (e = 0; e < n && !row->fold; e += m) {
        m = tshi_base_min(TSHI_DTYPE_RUN, n - e);
        row->load((const char *)left + e * row->size, 1, m, l);
        row->load((const char *)right + e * row->size, 1, m, r);
        tshi_dtypes[TSH_REAL].fold[op](l, l, r, m);
        row->store((char *)out + e * row->size, 1, m, l);
    }
}

TSH_API void tsh_coll_finish(void *sums, int64_t n, tsh_dtype dtype, tsh_redop op, int size) {
    const tshi_dtype *row = &tshi_dtypes[dtype];
    tsh_real run[TSHI_DTYPE_RUN];
    int64_t e, m;
    if (op != TSH_AVG) return;
    if (row->divide) row->divide(sums, n, size);
    for (e = 0; e < n && !row->divide; e += m) {
        m = tshi_base_min(TSHI_DTYPE_RUN, n - e);
        row->load((char *)sums + e * row->size, 1, m, run);
        tshi_dtypes[TSH_REAL].divide(run, m, size);
        row->store((char *)sums + e * row->size, 1, m, run);
    }
}

/* ========================================================================== */
/* >>trace                                              MARK: - trace (private) */
/* Records what ran when, between tsh_trace_begin and tsh_trace_end.            */
/* Needs: >>mem.                                                                */
/* ========================================================================== */

/* Every op reports when it begins (tshi_trace_open) and when its output is done (tshi_trace_close);
 * backward, modules and optimisers add their events whole. Collectives report through comm->trace.
 * Events lie in an arena, oldest first; beyond desc.limit they are counted as lost. */
enum {
    TSHI_TRACE_FORWARD,
    TSHI_TRACE_BACKWARD,
    TSHI_TRACE_MODULE,
    TSHI_TRACE_COLL,
    TSHI_TRACE_OPTIM
};
enum { TSHI_TRACE_OPEN = 16, TSHI_TRACE_FLIGHTS = 64, TSHI_TRACE_LIMIT = 1000000 };

typedef struct tshi_event {
    struct tshi_event *next;
    const char *name;
    int64_t begin, end; /* nanoseconds */
    int64_t bytes;      /* of a collective */
    int kind;
} tshi_event;

/* A collective that was started and not waited for yet. */
typedef struct tshi_flight {
    const tsh_comm *comm; /* NULL: the entry is free */
    tsh_req req;
    tshi_event *event;
} tshi_flight;

struct tshi_trace {
    tsh_ctx *ctx;
    tsh_trace_desc desc;
    tshi_arena arena;
    tshi_event *first, *last;
    int64_t count, lost;
    /* A stack of the ops that began: ops may call other ops. */
    struct {
        const char *name;
        int64_t begin;
    } open[TSHI_TRACE_OPEN];
    int depth;
    tshi_flight flight[TSHI_TRACE_FLIGHTS];
};

/* Returns the time, for tshi_trace_add; 0 if no trace runs (NULL). */
static int64_t tshi_trace_now(const tshi_trace *trace) {
    if (!trace) return 0;
    return trace->desc.now ? trace->desc.now(trace->desc.user) : tsh_now();
}

/* Adds an event from `begin` to now. Returns NULL if it was lost. */
TSHI_OUTLINE tshi_event *tshi_trace_add(tshi_trace *trace, int kind, const char *name,
                                        int64_t begin, int64_t bytes) {
    tshi_event *event = NULL;
    if (trace->count < trace->desc.limit)
        event = (tshi_event *)tshi_mem_arena_alloc(trace->ctx, &trace->arena, sizeof *event);
    if (!event) {
        trace->lost++;
        return NULL;
    }
    event->name = name;
    event->begin = begin;
    event->end = tshi_trace_now(trace);
    event->bytes = bytes;
    event->kind = kind;
    *(trace->last ? &trace->last->next : &trace->first) = event;
    trace->last = event;
    trace->count++;
    return event;
}

/* Pushes an op that begins. Functions that make no output are never popped by their own name. */
static void tshi_trace_open(tshi_trace *trace, const char *op) {
    if (trace->depth == TSHI_TRACE_OPEN) { /* full: forget the oldest */
        memmove(trace->open, trace->open + 1, sizeof trace->open - sizeof trace->open[0]);
        trace->depth--;
    }
    trace->open[trace->depth].name = op;
    trace->open[trace->depth++].begin = tshi_trace_now(trace);
}

/* Pops an op whose output is done, and all above it; adds its event. */
static void tshi_trace_close(tshi_trace *trace, const char *op) {
    int at = trace->depth;
    while (at > 0 && strcmp(trace->open[at - 1].name, op) != 0) at--;
    if (at == 0) return;
    trace->depth = at - 1;
    (void)tshi_trace_add(trace, TSHI_TRACE_FORWARD, op, trace->open[at - 1].begin, 0);
}

/* Adds a collective that was started, and remembers it until tshi_trace_waited. */
static void tshi_trace_sent(const tsh_comm *comm, const char *name, int64_t begin, uint64_t bytes,
                            tsh_req req) {
    tshi_trace *trace = comm->trace;
    tshi_event *event = tshi_trace_add(trace, TSHI_TRACE_COLL, name, begin, (int64_t)bytes);
    for (int i = 0; i < TSHI_TRACE_FLIGHTS && event && req; i++) {
        if (trace->flight[i].comm) continue;
        trace->flight[i].comm = comm;
        trace->flight[i].req = req;
        trace->flight[i].event = event;
        return;
    }
}

/* A collective was waited for: extends its event, or adds one for the wait if another event was
 * added in between. */
static void tshi_trace_waited(const tsh_comm *comm, tsh_req req, int64_t begin) {
    tshi_trace *trace = comm->trace;
    for (int i = 0; i < TSHI_TRACE_FLIGHTS; i++) {
        tshi_flight *flight = &trace->flight[i];
        if (flight->comm != comm || flight->req != req) continue;
        flight->comm = NULL;
        if (flight->event == trace->last)
            flight->event->end = tshi_trace_now(trace);
        else
            (void)tshi_trace_add(trace, TSHI_TRACE_COLL, "wait", begin, flight->event->bytes);
        return;
    }
}

/* Discards the trace, if one runs. */
static void tshi_trace_drop(tsh_ctx *ctx) {
    if (!ctx->trace) return;
    const tshi_arena arena = ctx->trace->arena;
    ctx->trace = ctx->world.trace = ctx->tp.trace = ctx->pp.trace = ctx->dp.trace = NULL;
    tshi_mem_close(ctx, TSH_MEM_BOOKS, arena.first); /* the trace itself lies in it */
}

/* ========================================================================== */
/* >>team                                                MARK: - team (private) */
/* Runs a loop on the threads of one rank: OpenMP's, else one.                 */
/* Needs: >>base.                                                               */
/* ========================================================================== */

/* Does piece number `piece` of a job of n units: units `from` to `to`. Pieces write to different
 * places, and one piece computes every element of a result, in the order of one thread: results are
 * bitwise the same for any number of threads. fn neither allocates nor records errors. */
typedef void (*tshi_team_fn)(void *job, int piece, int64_t from, int64_t to);

/* Returns how many pieces to cut n units into: one per thread, each of at least `min` units. */
static int tshi_team_parts(const tsh_ctx *ctx, int64_t n, int64_t min) {
#if defined(_OPENMP)
    const int64_t max = n / (min > 0 ? min : 1);
    return max < 2 ? 1 : (int)tshi_base_min(max, ctx->threads);
#else
    (void)ctx, (void)n, (void)min;
    return 1;
#endif
}

/* Calls fn for each piece; pieces begin at multiples of `unit`. (One piece is called directly:
 * OpenMP takes microseconds even for a team of one.) */
static void tshi_team_run(int pieces, int64_t n, int64_t unit, tshi_team_fn fn, void *job) {
    const int64_t units = tshi_base_ceil(n, unit);
    if (pieces == 1) {
        fn(job, 0, 0, n);
        return;
    }
#if defined(_OPENMP)
#pragma omp parallel for num_threads(pieces) schedule(static, 1)
#endif
    for (int i = 0; i < pieces; i++)
        fn(job, i, units * i / pieces * unit, tshi_base_min(units * (i + 1) / pieces * unit, n));
}

/* Returns how many threads a BLAS may use inside of one piece. */
static int tshi_team_spare(const tsh_ctx *ctx) {
#if defined(_OPENMP)
    (void)ctx;
    return 1;
#else
    return ctx->threads;
#endif
}

/* ========================================================================== */
/* >>rng                                                  MARK: - rng (private) */
/* Random numbers: Philox 4x32-10 (Salmon et al. 2011) and distributions.      */
/* Needs: >>base.                                                               */
/* ========================================================================== */

/* There is no generator state: a number is a function of the key (the seed), a stream (one use of
 * random numbers, such as a parameter's initial values; the hash of a name) and the global index of
 * the element. So each rank draws for its shard what one device would draw for the whole. */
TSHI_INLINE void tshi_rng_round(uint32_t *c, uint32_t k0, uint32_t k1) {
    uint64_t a = (uint64_t)0xD2511F53u * c[0], b = (uint64_t)0xCD9E8D57u * c[2];
    c[0] = (uint32_t)(b >> 32) ^ c[1] ^ k0;
    c[2] = (uint32_t)(a >> 32) ^ c[3] ^ k1;
    c[1] = (uint32_t)b;
    c[3] = (uint32_t)a;
}

/* Computes the four random words of a position in c. The rounds are written out: a loop of rounds
 * would keep the caller's loop over positions from being vectorised. */
TSHI_INLINE void tshi_rng_philox(uint64_t key, uint64_t stream, uint64_t position, uint32_t *c) {
    const uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    c[0] = (uint32_t)position;
    c[1] = (uint32_t)(position >> 32);
    c[2] = (uint32_t)stream;
    c[3] = (uint32_t)(stream >> 32);
#define TSHI_RNG_ROUND(i) tshi_rng_round(c, k0 + i##u * 0x9E3779B9u, k1 + i##u * 0xBB67AE85u)
    TSHI_RNG_ROUND(0);
    TSHI_RNG_ROUND(1);
    TSHI_RNG_ROUND(2);
    TSHI_RNG_ROUND(3);
    TSHI_RNG_ROUND(4);
    TSHI_RNG_ROUND(5);
    TSHI_RNG_ROUND(6);
    TSHI_RNG_ROUND(7);
    TSHI_RNG_ROUND(8);
    TSHI_RNG_ROUND(9);
#undef TSHI_RNG_ROUND
}

enum { TSHI_RNG_WORDS = 64 };

/* The random bits of TSHI_RNG_WORDS elements, the first of which is element 4 position. */
TSHI_INLINE void tshi_rng_words(uint64_t key, uint64_t stream, uint64_t position, uint32_t *word) {
    for (int i = 0; i < TSHI_RNG_WORDS / 4; i++)
        tshi_rng_philox(key, stream, position + (uint64_t)i, word + 4 * i);
}

/* Returns the 32 random bits of an element: word e mod 4 of position e / 4. */
static uint32_t tshi_rng_bits(uint64_t key, uint64_t stream, uint64_t element) {
    uint32_t out[4];
    tshi_rng_philox(key, stream, element / 4, out);
    return out[element % 4];
}

/* Returns a uniform number in [0, 1), a multiple of 2^-24: exact in float. */
static double tshi_rng_uniform(uint64_t key, uint64_t stream, uint64_t element) {
    return (double)(tshi_rng_bits(key, stream, element) >> 8) / 16777216.0;
}

/* Returns a standard normal number (Box & Muller 1958) of two random words per element. */
static double tshi_rng_normal(uint64_t key, uint64_t stream, uint64_t element) {
    uint32_t out[4];
    const uint32_t *word = out + element % 2 * 2;
    tshi_rng_philox(key, stream, element / 2, out);
    return sqrt(-2.0 * log(((double)word[0] + 1.0) / 4294967296.0)) *
           cos(6.283185307179586 * ((double)word[1] / 4294967296.0));
}

/* Returns the standard normal distribution function at x. */
static double tshi_rng_cdf(double x) {
    return 0.5 * erfc(-x * 0.70710678118654752);
}

/* Returns its inverse for p in (0, 1): Hastings' rational approximation of the lower tail
 * (Abramowitz & Stegun 26.2.23, error 4.5e-4), then two Halley steps, which cube the error. */
static double tshi_rng_quantile(double p) {
    double tail = p < 0.5 ? p : 1 - p, t, x, off;
    if (!(tail > 0)) return p < 0.5 ? -(double)INFINITY : (double)INFINITY;
    t = sqrt(-2.0 * log(tail));
    x = (2.515517 + t * (0.802853 + t * 0.010328)) /
            (1 + t * (1.432788 + t * (0.189269 + t * 0.001308))) -
        t;
    for (int step = 0; step < 2; step++) {
        off = (tshi_rng_cdf(x) - tail) * 2.5066282746310002 * exp(0.5 * x * x);
        x -= off / (1 + 0.5 * x * off);
    }
    return p < 0.5 ? x : -x;
}

/* Hashes bytes, FNV-1a and a final mix, starting from `hash`: makes a stream of a path or a count
 * of calls. */
static uint64_t tshi_rng_hash(uint64_t hash, const void *data, size_t bytes) {
    const unsigned char *byte = (const unsigned char *)data;
    hash ^= 14695981039346656037u;
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ byte[i]) * 1099511628211u;
    hash ^= hash >> 32;
    hash *= 0xD6E8FEB86659FD93u;
    return hash ^ hash >> 32;
}

/* ========================================================================== */
/* >>layout                                            MARK: - layout (private) */
/* Layouts, and tsh_chunk: which rank owns which part of a sharded dimension.  */
/* Needs: >>base.                                                               */
/* ========================================================================== */

/* A layout that a user passes may have defaults (dim -1, segments 0, lengths and units 0). Tensors
 * hold resolved layouts only (tshi_layout_resolve), and functions that compare two take these. */
TSH_API tsh_layout tsh_replicated(void) {
    tsh_layout layout;
    memset(&layout, 0, sizeof layout);
    return layout;
}

TSH_API tsh_layout tsh_partial(void) {
    tsh_layout layout = tsh_replicated();
    layout.kind = TSH_PARTIAL;
    return layout;
}

TSH_API tsh_layout tsh_sharded(int dim) {
    return tsh_shard_segments(dim, 1, 1);
}

TSH_API tsh_layout tsh_shard_units(int dim, int64_t unit) {
    return tsh_shard_segments(dim, 1, unit);
}

TSH_API tsh_layout tsh_shard_segments(int dim, int segments, int64_t unit) {
    tsh_layout layout = tsh_replicated();
    layout.kind = TSH_SHARDED;
    layout.dim = dim;
    layout.segments = segments;
    for (int s = 0; s < segments && s < TSH_MAX_SEGMENTS; s++) layout.segment[s].unit = unit;
    return layout;
}

/* Gets segment s of a dimension of `length`, defaults resolved; returns 0 if it does not fit. */
static int tshi_layout_segment(const tsh_layout *layout, int64_t length, int s, tsh_segment *out) {
    int n = layout->segments ? layout->segments : 1;
    *out = layout->segment[s];
    if (n < 1 || n > TSH_MAX_SEGMENTS || out->length < 0 || out->unit < 0) return 0;
    if (!out->unit) out->unit = 1;
    if (!out->length) {
        int i;
        for (i = 0; i < n; i++)
            if (layout->segment[i].length) return 1; /* lengths are given, this one is 0 */
        if (length % n) return 0;
        out->length = length / n;
    }
    return out->length % out->unit == 0;
}

TSH_API int64_t tsh_chunk(const tsh_layout *layout, int64_t length, int size, int rank,
                          tsh_range ranges[TSH_MAX_SEGMENTS]) {
    int s, n = layout->segments ? layout->segments : 1;
    int64_t start = 0, owned = 0;
    if (length < 0 || length > INT64_MAX / 4 || size < 1 || rank < 0 || rank >= size || n < 1)
        return -1;
    if (layout->kind != TSH_SHARDED) {
        if (ranges) ranges[0].start = 0;
        if (ranges) ranges[0].length = length;
        return length;
    }
    for (s = 0; s < n; s++) {
        tsh_segment segment;
        int64_t units, c, from, to;
        if (!tshi_layout_segment(layout, length, s, &segment)) return -1;
        units = segment.length / segment.unit;
        c = tshi_base_ceil(units, size);
        from = tshi_base_min(rank * c, units) * segment.unit;
        to = tshi_base_min((rank + 1) * c, units) * segment.unit;
        if (ranges) ranges[s].start = start + from;
        if (ranges) ranges[s].length = to - from;
        owned += to - from;
        start += segment.length;
    }
    return start == length ? owned : -1;
}

/* Resolves every default of a layout for a tensor of this shape; returns 0 if it does not fit. */
static int tshi_layout_resolve(tsh_layout *layout, int ndim, const int64_t *dim) {
    if ((unsigned)layout->kind > (unsigned)TSH_PARTIAL) return 0;
    if (layout->kind != TSH_SHARDED) {
        layout->dim = layout->segments = 0;
        memset(layout->segment, 0, sizeof layout->segment);
        return 1;
    }
    tsh_layout given = *layout;
    given.dim = layout->dim < 0 ? layout->dim + ndim : layout->dim;
    given.segments = layout->segments ? layout->segments : 1;
    if (given.dim < 0 || given.dim >= ndim || tsh_chunk(layout, dim[given.dim], 1, 0, NULL) < 0)
        return 0;
    *layout = given;
    memset(layout->segment, 0, sizeof layout->segment);
    for (int s = 0; s < given.segments; s++)
        (void)tshi_layout_segment(&given, dim[given.dim], s, &layout->segment[s]);
    return 1;
}

/* Returns 1 if two resolved sharded layouts give every rank the same part of a dimension. */
static int tshi_layout_same_shards(const tsh_layout *a, const tsh_layout *b, int64_t length,
                                   int size) {
    tsh_range ra[TSH_MAX_SEGMENTS], rb[TSH_MAX_SEGMENTS];
    if (a->segments != b->segments) return 0;
    for (int rank = 0; rank < size; rank++) {
        if (tsh_chunk(a, length, size, rank, ra) < 0 || tsh_chunk(b, length, size, rank, rb) < 0)
            return 0;
        for (int s = 0; s < a->segments; s++)
            if (ra[s].length != rb[s].length || (ra[s].length && ra[s].start != rb[s].start))
                return 0;
    }
    return 1;
}

/* Returns 1 if two resolved layouts give every rank the same elements of a tensor. */
TSHI_OUTLINE int tshi_layout_equal(const tsh_layout *a, const tsh_layout *b, const int64_t *dim,
                             int size) {
    if (a->kind != b->kind) return 0;
    if (a->kind != TSH_SHARDED) return 1;
    return a->dim == b->dim && tshi_layout_same_shards(a, b, dim[a->dim], size);
}

/* Returns 1 if two resolved layouts have the same fields; stricter than tshi_layout_equal. */
static int tshi_layout_identical(const tsh_layout *a, const tsh_layout *b) {
    return a->kind == b->kind && a->dim == b->dim && a->segments == b->segments &&
           memcmp(a->segment, b->segment, sizeof a->segment) == 0;
}

TSH_API char *tsh_layout_text(const tsh_layout *layout, char *text, size_t size) {
    if (!size) return text;
    text[0] = '\0';
    if (layout->kind != TSH_SHARDED) {
        tsh_text_add(text, size, layout->kind == TSH_PARTIAL ? "P" : "R");
    } else {
        tsh_text_add(text, size, "S(%d", layout->dim);
        if (layout->segments > 1) tsh_text_add(text, size, ", %d segments", layout->segments);
        if (layout->segment[0].unit > 1)
            tsh_text_add(text, size, ", unit %lld", (long long)layout->segment[0].unit);
        tsh_text_add(text, size, ")");
    }
    return text;
}

/* ========================================================================== */
/* >>tensor                                            MARK: - tensor (private) */
/* Handles and their two lifetimes, shapes, views, initial values, checks.     */
/* Needs: >>error >>mem >>rng >>layout.                                         */
/* ========================================================================== */

/* A tsh_tensor is a handle: shape, layout and strides of values that lie in a reference-counted
 * block. Owned handles live until they are freed, all others until their step or scope ends. An op
 * begins with tshi_tensor_check and returns what tshi_tensor_out makes. A view shares its base's
 * block and gradients. After an error, both functions return NULL, and so does the op. */
enum { TSHI_TEXT_SIZE = 96 };

#define TSHI_TENSOR_SHAPE(ndim, params, ...)                                                       \
    TSH_API tsh_shape tsh_shape##ndim params {                                                     \
        const tsh_shape shape = {ndim, {__VA_ARGS__}};                                             \
        return shape;                                                                              \
    }
TSHI_TENSOR_SHAPE(0, (void), 0)
TSHI_TENSOR_SHAPE(1, (int64_t a), a)
TSHI_TENSOR_SHAPE(2, (int64_t a, int64_t b), a, b)
TSHI_TENSOR_SHAPE(3, (int64_t a, int64_t b, int64_t c), a, b, c)
TSHI_TENSOR_SHAPE(4, (int64_t a, int64_t b, int64_t c, int64_t d), a, b, c, d)
#undef TSHI_TENSOR_SHAPE

/* Writes "(2, 3)". */
static char *tshi_tensor_sizes(const int64_t *dim, int ndim, char *text) {
    text[0] = '\0';
    tsh_text_add(text, TSHI_TEXT_SIZE, "(");
    for (int i = 0; i < ndim; i++)
        tsh_text_add(text, TSHI_TEXT_SIZE, i ? ", %lld" : "%lld", (long long)dim[i]);
    tsh_text_add(text, TSHI_TEXT_SIZE, ")");
    return text;
}

/* Writes "(2, 3) S(1)", for error sentences. */
static char *tshi_tensor_text(const tsh_tensor *t, char *text) {
    char layout[TSHI_TEXT_SIZE];
    tsh_text_add(tshi_tensor_sizes(t->dim, t->ndim, text), TSHI_TEXT_SIZE, " %s",
                 tsh_layout_text(&t->layout, layout, sizeof layout));
    return text;
}

/* -- handles ---------------------------------------------------------------- */

static void tshi_tensor_ring(tsh_tensor *head) {
    head->next = head->prev = head;
}

static void tshi_tensor_insert(tsh_tensor *head, tsh_tensor *t) {
    t->prev = head->prev;
    t->next = head;
    t->prev->next = t;
    head->prev = t;
}

/* Returns a zeroed handle. The oldest free one is reused, but only if more are free than the last
 * step released: so a stale pointer is recognised for one whole step, and a training loop allocates
 * no handles once it has warmed up. */
static tsh_tensor *tshi_tensor_handle(tsh_ctx *ctx, unsigned flags) {
    tshi_handles *h = &ctx->handles;
    tsh_tensor *t;
    if (h->free > h->ended + 256) {
        t = h->oldest;
        h->oldest = t->next;
        h->free--;
        memset(t, 0, sizeof *t);
    } else {
        t = (tsh_tensor *)tshi_mem_arena_alloc(ctx, &ctx->books, sizeof *t);
        if (!t) return NULL;
    }
    t->ctx = ctx;
    t->flags = flags;
    t->base = t;
    t->depth = ctx->depth;
    tshi_tensor_insert(flags & TSHI_OWNED ? &h->owned : &h->step, t);
    return t;
}

/* Releases a tensor's values and gradients. */
static void tshi_tensor_drop_values(tsh_tensor *t) {
    tshi_mem_release(t->ctx, t->block);
    tshi_mem_release(t->ctx, t->gr.block);
    tshi_mem_release(t->ctx, t->gp.block);
    tshi_mem_release(t->ctx, t->marks);
    t->block = t->marks = NULL;
    memset(&t->gr, 0, sizeof t->gr);
    memset(&t->gp, 0, sizeof t->gp);
    t->sparse = 0;
}

/* Releases a tensor: its values, and its handle for reuse. */
static void tshi_tensor_release(tsh_tensor *t) {
    tshi_handles *h = &t->ctx->handles;
    tshi_tensor_drop_values(t);
    t->flags |= TSHI_STALE | TSHI_DEAD;
    t->prev->next = t->next;
    t->next->prev = t->prev;
    t->next = NULL;
    *(h->free ? &h->newest->next : &h->oldest) = t;
    h->newest = t;
    h->free++;
}

/* -- shapes ----------------------------------------------------------------- */

static int64_t tshi_tensor_product(const int64_t *dim, int n) {
    int64_t product = 1;
    for (int i = 0; i < n; i++) product *= dim[i];
    return product;
}

/* Sets the strides of row-major values of these local sizes; a size of 0 counts as 1. */
static void tshi_tensor_strides(const int64_t *local, int ndim, int64_t *stride) {
    int64_t step = 1;
    for (int i = ndim - 1; i >= 0; i--) {
        stride[i] = step;
        step *= local[i] > 1 ? local[i] : 1;
    }
}

/* Returns 1 if the values are contiguous, in row-major order. */
static int tshi_tensor_is_dense(const tsh_tensor *t) {
    int64_t step = 1;
    for (int i = t->ndim - 1; i >= 0; i--) {
        if (t->local[i] > 1 && t->stride[i] != step) return 0;
        step *= t->local[i] > 1 ? t->local[i] : 1;
    }
    return 1;
}

/* Resolves a dimension that may be negative; returns -1 if t has no such dimension. */
static int tshi_tensor_axis(const tsh_tensor *t, int dim) {
    int axis = dim < 0 ? dim + t->ndim : dim;
    return axis >= 0 && axis < t->ndim ? axis : -1;
}

/* Sets shape, resolved layout, local sizes and strides. The number of elements, empty dimensions
 * counted as 1, is at most a 16th of SIZE_MAX and INT64_MAX, so that sizes in bytes fit, too. */
static tsh_result tshi_tensor_set_shape(tsh_tensor *t, const char *op, const tsh_shape *shape,
                                        const tsh_layout *layout) {
    tsh_ctx *ctx = t->ctx;
    const int64_t max = SIZE_MAX < INT64_MAX ? (int64_t)(SIZE_MAX / 16) : INT64_MAX / 16;
    int64_t total = 1;
    int i;
    t->ndim = shape->ndim;
    if (shape->ndim < 0 || shape->ndim > TSH_MAX_DIMS)
        return tsh_fail(ctx, TSH_ERR_SHAPE, "%s: %d dimensions; at most %d are possible", op,
                        shape->ndim, TSH_MAX_DIMS);
    for (i = 0; i < shape->ndim; i++) {
        t->dim[i] = t->local[i] = shape->dim[i];
        if (t->dim[i] < 0 || (t->dim[i] > 1 && total > max / t->dim[i]))
            return tsh_fail(ctx, TSH_ERR_SHAPE, "%s: dimension %d is %lld", op, i,
                            (long long)t->dim[i]);
        total *= t->dim[i] ? t->dim[i] : 1;
    }
    t->layout = *layout;
    if (!tshi_layout_resolve(&t->layout, t->ndim, t->dim)) {
        char text[TSHI_TEXT_SIZE];
        return tsh_fail(ctx, TSH_ERR_LAYOUT, "%s: layout %s does not fit a tensor of %d dimensions",
                        op, tsh_layout_text(layout, text, sizeof text), t->ndim);
    }
    i = t->layout.dim;
    if (t->layout.kind == TSH_SHARDED)
        t->local[i] = tsh_chunk(&t->layout, t->dim[i], ctx->tp.size, ctx->tp.rank, NULL);
    tshi_tensor_strides(t->local, t->ndim, t->stride);
    return TSH_OK;
}

/* Returns a new tensor; its values are uninitialised. kind: TSH_MEM_...; layout NULL: replicated.
 * NULL and an error if the ctx has an error, arguments are wrong or there is no memory. */
static tsh_tensor *tshi_tensor_make(tsh_ctx *ctx, const char *op, unsigned flags, int kind,
                                    tsh_dtype dtype, const tsh_shape *shape,
                                    const tsh_layout *layout) {
    tsh_layout replicated = tsh_replicated();
    if (!ctx || ctx->error.code != TSH_OK) return NULL;
    if ((unsigned)dtype >= (unsigned)TSHI_DTYPES)
        return tshi_error_null(ctx, TSH_ERR_DTYPE, "%s: %d is no dtype", op, (int)dtype);
    tsh_tensor *t = tshi_tensor_handle(ctx, flags);
    if (!t) return NULL;
    t->dtype = dtype;
    if (tshi_tensor_set_shape(t, op, shape, layout ? layout : &replicated) == TSH_OK)
        t->block = tshi_mem_alloc(ctx, kind, tshi_dtype_bytes(dtype, tsh_local_numel(t)));
    if (t->block) return t;
    tshi_tensor_release(t);
    return NULL;
}

/* Returns a new step tensor, dense: the output of an op. */
static tsh_tensor *tshi_tensor_out(tsh_ctx *ctx, const char *op, tsh_dtype dtype,
                                   const tsh_shape *shape, const tsh_layout *layout) {
    return tshi_tensor_make(ctx, op, 0, TSH_MEM_STEP, dtype, shape, layout);
}

/* Returns a step tensor of x's shape and strides with its values in `block`; it is its own base, so
 * gradients do not flow to x. */
static tsh_tensor *tshi_tensor_detached(const tsh_tensor *x, tshi_block *block) {
    tsh_tensor *t = tshi_tensor_handle(x->ctx, 0);
    if (!t) return NULL;
    t->dtype = x->dtype;
    t->ndim = x->ndim;
    memcpy(t->dim, x->dim, sizeof t->dim);
    memcpy(t->local, x->local, sizeof t->local);
    memcpy(t->stride, x->stride, sizeof t->stride);
    t->layout = x->layout;
    t->offset = x->offset;
    t->block = block;
    block->refs++;
    return t;
}

/* Returns a view of x, which shares values and gradients; the caller sets shape and strides. */
static tsh_tensor *tshi_tensor_view(tsh_tensor *x) {
    tsh_tensor *t = tshi_tensor_detached(x, x->block);
    if (t) t->base = x->base;
    return t;
}

static void *tshi_tensor_at(const tsh_tensor *t) {
    return (char *)tshi_mem_data(t->block) + (size_t)t->offset * tsh_dtype_size(t->dtype);
}

static tsh_real *tshi_tensor_values(const tsh_tensor *t) {
    return (tsh_real *)tshi_tensor_at(t);
}

/* The runs of consecutive elements that a shard has among the global elements [from, to). */
typedef struct tshi_runs {
    int64_t global, local, length; /* a run: its first element in the tensor, and in the shard */
    int64_t from, to;
    int64_t row, width, inner; /* the row's first element, its elements, those of an index */
    int64_t held;              /* elements that the shard has before the next segment */
    tsh_range range[TSH_MAX_SEGMENTS];
    int segment, segments; /* the next segment of the row */
} tshi_runs;

/* The runs of the shard of a rank of tp: while (tshi_tensor_next_run(&run)) ... */
static tshi_runs tshi_tensor_runs(const tsh_tensor *t, int rank, int64_t from, int64_t to) {
    const int cut = t->layout.dim, sharded = t->layout.kind == TSH_SHARDED;
    const int64_t length = sharded ? t->dim[cut] : tsh_numel(t);
    tshi_runs run = TSHI_ZERO;
    const int64_t owned = tsh_chunk(&t->layout, length, t->ctx->tp.size, rank, run.range);
    run.inner = sharded ? tshi_tensor_product(t->dim + cut + 1, t->ndim - cut - 1) : 1;
    run.width = length * run.inner;
    run.segments = sharded ? t->layout.segments : 1;
    if (!owned || !run.width) return run;
    run.from = from;
    run.to = to;
    run.row = from - from % run.width;
    run.held = from / run.width * owned * run.inner;
    return run;
}

/* Goes on to the next run, at first the first one; returns 0 if there are no more. */
static int tshi_tensor_next_run(tshi_runs *run) {
    while (run->row < run->to) {
        const tsh_range *range = &run->range[run->segment];
        const int64_t begin = run->row + range->start * run->inner;
        const int64_t end = begin + range->length * run->inner;
        run->global = begin > run->from ? begin : run->from;
        run->local = run->held + run->global - begin;
        run->length = tshi_base_min(end, run->to) - run->global;
        run->held += end - begin;
        run->segment = (run->segment + 1) % run->segments;
        if (!run->segment) run->row += run->width;
        if (run->length > 0) return 1;
    }
    return 0;
}

/* Returns the runs of this rank's whole shard. */
static tshi_runs tshi_tensor_own_runs(const tsh_tensor *t) {
    return tshi_tensor_runs(t, t->ctx->tp.rank, 0, tsh_numel(t));
}

/* Returns the global index along `dim` of a local one. */
static int64_t tshi_tensor_global(const tsh_tensor *t, int dim, int64_t local) {
    tsh_range range[TSH_MAX_SEGMENTS];
    int s;
    if (t->layout.kind != TSH_SHARDED || t->layout.dim != dim) return local;
    (void)tsh_chunk(&t->layout, t->dim[dim], t->ctx->tp.size, t->ctx->tp.rank, range);
    for (s = 0; s < t->layout.segments - 1 && local >= range[s].length; s++)
        local -= range[s].length;
    return range[s].start + local;
}

/* Returns the local index along `dim` of a global one, -1 if another rank holds it. */
static int64_t tshi_tensor_local(const tsh_tensor *t, int dim, int64_t global) {
    tsh_range range[TSH_MAX_SEGMENTS];
    int64_t at = 0;
    if (t->layout.kind != TSH_SHARDED || t->layout.dim != dim) return global;
    (void)tsh_chunk(&t->layout, t->dim[dim], t->ctx->tp.size, t->ctx->tp.rank, range);
    for (int s = 0; s < t->layout.segments; s++) {
        if (global >= range[s].start && global < range[s].start + range[s].length)
            return at + global - range[s].start;
        at += range[s].length;
    }
    return -1;
}

/* Returns element i of integers of t's dtype. */
static int64_t tshi_tensor_integer(const tsh_tensor *t, const void *values, int64_t i) {
    const tshi_dtype *row = &tshi_dtypes[t->dtype];
    int64_t value;
    row->load_integer((const char *)values + i * row->size, 1, 1, &value);
    return value;
}

/* ========================================================================== */
/* >>init                                              MARK: - init (private) */
/* Initial values of parameters and tensors: constant, random, orthogonal.    */
/* Needs: >>tensor >>rng.                                                     */
/* ========================================================================== */

typedef struct tshi_tensor_filling {
    uint64_t key, stream;
    tsh_init init;       /* of kind CONSTANT, UNIFORM, NORMAL, TRUNC_NORMAL, ORTHOGONAL or DIRAC */
    double from, to;     /* TRUNC_NORMAL: the distribution function at low and high */
    int64_t rows, cols;  /* ORTHOGONAL, DIRAC: the whole tensor as a matrix (dim 0, all others) */
    int64_t step, first; /* DIRAC: row i is 1 in column first + i step */
    const double *whole; /* ORTHOGONAL: all values, (cols, rows) if rows >= cols, or (rows, cols) */
} tshi_tensor_filling;

static tsh_init tshi_init_make(tsh_init_kind kind, double a, double b) {
    tsh_init init;
    memset(&init, 0, sizeof init);
    init.kind = kind;
    init.a = a;
    init.b = b;
    return init;
}

/* Returns element e of the whole tensor. */
static double tshi_init_element(const tshi_tensor_filling *f, int64_t e) {
    const tsh_init *init = &f->init;
    const uint64_t at = (uint64_t)e;
    const int64_t row = f->cols ? e / f->cols : 0, col = f->cols ? e % f->cols : 0;
    switch (init->kind) {
    case TSH_INIT_CONSTANT: return init->a;
    case TSH_INIT_UNIFORM:
        return init->a + (init->b - init->a) * tshi_rng_uniform(f->key, f->stream, at);
    case TSH_INIT_NORMAL: return init->a + init->b * tshi_rng_normal(f->key, f->stream, at);
    case TSH_INIT_DIRAC:
        return col == f->first + row * f->step && row * f->step < f->cols ? 1 : 0;
    case TSH_INIT_ORTHOGONAL:
        return init->gain * f->whole[f->rows >= f->cols ? col * f->rows + row : e];
    default: break; /* TRUNC_NORMAL */
    }
    double u = ((double)tshi_rng_bits(f->key, f->stream, at) + 0.5) / 4294967296.0;
    double x = init->a + init->b * tshi_rng_quantile(f->from + u * (f->to - f->from));
    return x < init->low ? init->low : x > init->high ? init->high : x;
}

/* Kaiming and Xavier initialisation are a uniform or normal distribution whose width depends on the
 * fan: replaces init by that one. */
static tsh_result tshi_init_fans(const tsh_tensor *t, const char *op, tsh_init *init) {
    int kaiming = init->kind == TSH_INIT_KAIMING_UNIFORM || init->kind == TSH_INIT_KAIMING_NORMAL;
    int normal = init->kind == TSH_INIT_KAIMING_NORMAL || init->kind == TSH_INIT_XAVIER_NORMAL;
    double rest = t->ndim > 2 ? (double)tshi_tensor_product(t->dim + 2, t->ndim - 2) : 1;
    double in = (double)t->fan_in, out = 0, fan, size;
    char text[TSHI_TEXT_SIZE];
    if (t->ndim > 1) {
        out = t->fan_in > 0 ? (double)tsh_numel(t) / in : (double)t->dim[0] * rest;
        in = t->fan_in > 0 ? in : (double)t->dim[1] * rest;
    } else if (t->fan_in <= 0 || (kaiming && init->fan_out)) {
        return tsh_fail(t->ctx, TSH_ERR_SHAPE,
                        "%s: kaiming and xavier take their fans from two dimensions or more, (out, "
                        "in, ..), not from %s",
                        op, tshi_tensor_text(t, text));
    }
    fan = kaiming ? (init->fan_out ? out : in) * (1 + init->a * init->a) : in + out;
    size = init->gain * sqrt((normal ? 2.0 : 6.0) / (fan > 0 ? fan : 1));
    *init = tshi_init_make(normal ? TSH_INIT_NORMAL : TSH_INIT_UNIFORM, normal ? 0 : -size,
                                size);
    return TSH_OK;
}

/* Prepares TRUNC_NORMAL: the distribution function at low and high. If both lie above the mean,
 * mirrors the distribution: near 0 the function is more exact than near 1. */
static tsh_result tshi_init_truncate(const tsh_tensor *t, const char *op,
                                       tshi_tensor_filling *f) {
    tsh_init *init = &f->init;
    if (init->low == 0 && init->high == 0) {
        init->low = -2;
        init->high = 2;
    }
    if (!(init->low < init->high) || !(init->b >= 0))
        return tsh_fail(t->ctx, TSH_ERR_ARGUMENT,
                        "%s: a normal distribution of deviation %g cannot be cut to [%g, %g]", op,
                        init->b, init->low, init->high);
    if (init->low > init->a) init->b = -init->b;
    f->from = f->to = 0.5;
    if (init->b == 0) return TSH_OK;
    f->from = tshi_rng_cdf((init->low - init->a) / init->b);
    f->to = tshi_rng_cdf((init->high - init->a) / init->b);
    return TSH_OK;
}

/* v -= (q . v) q, of length n; 8 partial sums. */
static void tshi_init_project(double *TSHI_RESTRICT v, const double *TSHI_RESTRICT q, int64_t n) {
    double lane[8] = {0};
    int64_t i;
    for (i = 0; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; j++) lane[j] += q[i + j] * v[i + j];
    for (int j = 0; i < n; i++, j++) lane[j] += q[i] * v[i];
    for (int j = 0; j < 4; j++) lane[j] += lane[j + 4];
    const double dot = (lane[0] + lane[2]) + (lane[1] + lane[3]);
    for (i = 0; i < n; i++) v[i] -= dot * q[i];
}

/* Computes f->whole: Q of the QR decomposition of a normal matrix, by modified Gram-Schmidt, twice
 * for each vector (Giraud et al. 2005). R's diagonal is positive, which makes Q unique. */
static tshi_block *tshi_init_orthogonal(const tsh_tensor *t, tshi_tensor_filling *f) {
    int tall = f->rows >= f->cols, pass;
    int64_t count = tall ? f->cols : f->rows, length = tall ? f->rows : f->cols, i, j, k;
    tshi_block *block = tshi_mem_alloc(t->ctx, TSH_MEM_STEP,
                                       tshi_dtype_bytes(TSH_F64, count * length));
    double *q = block ? (double *)tshi_mem_data(block) : NULL;
    f->whole = q;
    for (j = 0; j < count && q; j++) {
        double *v = q + j * length, norm = 0;
        for (i = 0; i < length; i++)
            v[i] = tshi_rng_normal(f->key, f->stream,
                                   (uint64_t)(tall ? i * f->cols + j : j * f->cols + i));
        for (pass = 0; pass < 2; pass++)
            for (k = 0; k < j; k++) tshi_init_project(v, q + k * length, length);
        for (i = 0; i < length; i++) norm += v[i] * v[i];
        for (norm = sqrt(norm), i = 0; i < length; i++) v[i] /= norm;
    }
    return block;
}

/* Resolves f->init to one of the six kinds, and computes what that needs of the whole tensor. */
static tsh_result tshi_init_resolve(const tsh_tensor *t, const char *op, tshi_tensor_filling *f) {
    tsh_init *init = &f->init;
    char text[TSHI_TEXT_SIZE];
    int d;
    if (init->gain == 0) init->gain = 1;
    if (init->kind == TSH_INIT_ZEROS || init->kind == TSH_INIT_ONES)
        *init = tshi_init_make(TSH_INIT_CONSTANT, init->kind == TSH_INIT_ONES, 0);
    switch (init->kind) {
    case TSH_INIT_KAIMING_UNIFORM:
    case TSH_INIT_KAIMING_NORMAL:
    case TSH_INIT_XAVIER_UNIFORM:
    case TSH_INIT_XAVIER_NORMAL: return tshi_init_fans(t, op, init);
    case TSH_INIT_TRUNC_NORMAL: return tshi_init_truncate(t, op, f);
    case TSH_INIT_ORTHOGONAL:
    case TSH_INIT_DIRAC:
        if (t->ndim < 2)
            return tsh_fail(t->ctx, TSH_ERR_SHAPE, "%s: takes two dimensions or more, not %s", op,
                            tshi_tensor_text(t, text));
        f->rows = t->dim[0];
        f->cols = tshi_tensor_product(t->dim + 1, t->ndim - 1);
        f->step = tshi_tensor_product(t->dim + 2, t->ndim - 2);
        for (d = 2, f->first = 0; d < t->ndim; d++) f->first = f->first * t->dim[d] + t->dim[d] / 2;
        break;
    default: break;
    }
    return TSH_OK;
}

/* Fills a dense tensor. An element's value depends on its global index, not on the degree of tp. op
 * is named in errors. */
static tsh_result tshi_init_fill(tsh_tensor *t, const char *op, tsh_init init, uint64_t stream) {
    enum { BLOCK = 256 };
    const tshi_dtype *dtype = &tshi_dtypes[t->dtype];
    tshi_tensor_filling f = TSHI_ZERO;
    tshi_runs run = tshi_tensor_own_runs(t);
    tshi_block *block = NULL;
    tsh_real value[BLOCK];
    f.key = t->ctx->seed;
    f.stream = stream;
    f.init = init;
    if (tshi_init_resolve(t, op, &f) != TSH_OK) return t->ctx->error.code;
    if (f.init.kind == TSH_INIT_ORTHOGONAL && !(block = tshi_init_orthogonal(t, &f)))
        return TSH_ERR_MEMORY;
    while (tshi_tensor_next_run(&run))
        for (int64_t e = 0, n; e < run.length; e += n) {
            const int filled = e > 0 && f.init.kind == TSH_INIT_CONSTANT;
            n = tshi_base_min(BLOCK, run.length - e);
            for (int64_t i = 0; i < n && !filled; i++)
                value[i] = TSHI_R(tshi_init_element(&f, run.global + e + i));
            dtype->store((char *)tshi_tensor_at(t) + (run.local + e) * dtype->size, 1, n, value);
        }
    tshi_mem_release(t->ctx, block);
    return TSH_OK;
}

/* Fills a parameter, and allocates it if need be; an error leaves it as it was. */
static tsh_result tshi_init_fill_param(tsh_tensor *t, const char *op, tsh_init init) {
    int had = t->block != NULL;
    if (!had)
        t->block = tshi_mem_alloc(t->ctx, TSH_MEM_PARAMETERS,
                                  tshi_dtype_bytes(t->dtype, tsh_local_numel(t)));
    if (!t->block) return TSH_ERR_MEMORY;
    if (tshi_init_fill(t, op, init, tshi_rng_hash(0, t->path, strlen(t->path))) != TSH_OK &&
        !had) {
        tshi_mem_release(t->ctx, t->block);
        t->block = NULL;
    }
    return t->ctx->error.code;
}

/* Sets a parameter to its own initial values: t->init, and zeros in row zero_row - 1. */
static tsh_result tshi_init_apply(tsh_tensor *t) {
    const tsh_result result = tshi_init_fill_param(t, t->path, t->init);
    const int64_t row = t->zero_row ? tshi_tensor_local(t, 0, t->zero_row - 1) : -1;
    if (result != TSH_OK || row < 0) return result;
    const int64_t width = tshi_tensor_product(t->local + 1, t->ndim - 1);
    memset((char *)tshi_tensor_at(t) + tshi_dtype_bytes(t->dtype, row * width), 0,
           tshi_dtype_bytes(t->dtype, width));
    return TSH_OK;
}

/* Allocates and initialises a parameter that is used for the first time. */
static tsh_result tshi_init_materialize(tsh_tensor *t) {
    if (t->absent)
        return tsh_fail(t->ctx, TSH_ERR_STATE,
                        "\"%s\" is held by stage %d of the pipeline; this rank is of stage %d",
                        t->path, t->stage - 1, t->ctx->pp.rank);
    return t->block || !(t->flags & TSHI_PARAM) ? TSH_OK : tshi_init_apply(t);
}

/* ========================================================================== */
/* >>tensor-api                                  MARK: - tensor-api (private) */
/* What every op checks of its inputs; making tensors, and asking about       */
/* them.                                                                      */
/* Needs: >>tensor >>init.                                                    */
/* ========================================================================== */

/* Returns 1 if node or an older one used t: as input, as a view, or inside a checkpoint. */
static int tshi_tensor_on_tape(const tshi_node *node, const tsh_tensor *t) {
    for (; node; node = node->older) {
        for (int i = 0; i < node->n; i++)
            if (node->in[i] && (node->in[i]->base == t || (t->block && node->saved[i] == t->block)))
                return 1;
        for (int i = 0; i < node->leaf_count; i++)
            if (node->leaves[i] == t) return 1;
    }
    return 0;
}

/* Returns 1 if an op that used t is on the ctx's tape or on that of a micro-batch in progress: then
 * backward needs t's values and layout unchanged. */
static int tshi_tensor_recorded(const tsh_tensor *t) {
    const tshi_micro *micro = t->ctx->micros;
    int found = tshi_tensor_on_tape(t->ctx->tape.newest, t);
    for (; micro && !found; micro = micro->next) found = tshi_tensor_on_tape(micro->newest, t);
    return found;
}

/* Returns 1 if t's values may be overwritten, 0 and an error if backward needs them. */
static int tshi_tensor_may_change(const char *op, const tsh_tensor *t) {
    if (!tshi_tensor_recorded(t)) return 1;
    return tshi_error_zero(
        t->ctx, TSH_ERR_STATE,
        "%s: ops are recorded that used the tensor's values, and backward needs these; call "
        "tsh_backward or tsh_step_end first, or write to another tensor",
        op);
}

/* -- checks that every op begins with --------------------------------------- */

/* Checks that an op's inputs have the same ctx and hold values; parameters are allocated. Returns
 * the ctx, or NULL if it has an error, old or new: the op then returns NULL. */
static tsh_ctx *tshi_tensor_check(const char *op, tsh_tensor *const *in, int n) {
    tsh_ctx *ctx = NULL;
    for (int i = 0; i < n && !ctx; i++)
        if (in[i]) ctx = in[i]->ctx;
    if (!ctx || ctx->error.code != TSH_OK) return NULL;
    if (ctx->trace) tshi_trace_open(ctx->trace, op);
    for (int i = 0; i < n && ctx->error.code == TSH_OK; i++) {
        if (!in[i] || in[i]->ctx != ctx)
            (void)tsh_fail(ctx, TSH_ERR_ARGUMENT, "%s: argument %d %s", op, i + 1,
                           in[i] ? "belongs to another ctx" : "is NULL");
        else if (!in[i]->block)
            (void)tshi_init_materialize(in[i]);
        if (ctx->error.code == TSH_OK && (in[i]->flags & TSHI_STALE))
            (void)tsh_fail(
                ctx, TSH_ERR_STALE,
                "%s: the values of argument %d were given back by tsh_backward, tsh_step_end or "
                "tsh_scope_end; tsh_retain or tsh_keep would have kept them",
                op, i + 1);
    }
    return ctx->error.code == TSH_OK ? ctx : NULL;
}

/* tshi_tensor_check for functions whose first argument is a ctx, which gets every error. */
static tsh_ctx *tshi_tensor_check_in(tsh_ctx *ctx, const char *op, tsh_tensor *t) {
    if (t && t->ctx == ctx) return tshi_tensor_check(op, &t, 1);
    (void)tsh_fail(ctx, TSH_ERR_ARGUMENT, "%s: the tensor %s", op,
                   t ? "belongs to another ctx" : "is NULL");
    return NULL;
}

/* tshi_tensor_check for ops that compute: all inputs must be of a floating dtype. */
TSHI_OUTLINE tsh_ctx *tshi_tensor_check_floating(const char *op, tsh_tensor *const *in, int n) {
    tsh_ctx *ctx = tshi_tensor_check(op, in, n);
    for (int i = 0; ctx && i < n; i++) {
        if (tshi_dtype_computes(in[i]->dtype)) continue;
        (void)tsh_fail(ctx, TSH_ERR_DTYPE, "%s: argument %d is %s, not %s", op, i + 1,
                       tshi_dtype_name(in[i]->dtype), tshi_dtype_name(TSH_REAL));
        return NULL;
    }
    return ctx;
}

/* Returns the dtype of an op's output, as PyTorch promotes: the widest of the inputs; tsh_real for
 * two different ones of the same width. */
static tsh_dtype tshi_tensor_promote(tsh_tensor *const *in, int n) {
    tsh_dtype dtype = in[0]->dtype;
    for (int i = 1; i < n; i++) {
        const int by = tshi_dtypes[in[i]->dtype].size - tshi_dtypes[dtype].size;
        if (in[i]->dtype != dtype) dtype = by > 0 ? in[i]->dtype : by < 0 ? dtype : TSH_REAL;
    }
    return dtype;
}

/* -- making ----------------------------------------------------------------- */

TSH_API tsh_tensor *tsh_tensor_new(tsh_ctx *ctx, tsh_dtype dtype, tsh_shape shape,
                                   const tsh_layout *layout) {
    tsh_tensor *t = tshi_tensor_make(ctx, "tsh_tensor_new", TSHI_OWNED, TSH_MEM_TENSORS, dtype,
                                     &shape, layout);
    if (t) memset(tshi_tensor_at(t), 0, tshi_dtype_bytes(dtype, tsh_local_numel(t)));
    return t;
}

TSH_API tsh_tensor *tsh_tensor_from(tsh_ctx *ctx, tsh_dtype dtype, tsh_shape shape,
                                    const tsh_layout *layout, const void *data) {
    tsh_tensor *t = tshi_tensor_make(ctx, "tsh_tensor_from", TSHI_OWNED, TSH_MEM_TENSORS, dtype,
                                     &shape, layout);
    if (t && !data && tsh_local_numel(t)) {
        tshi_tensor_release(t);
        return tshi_error_null(ctx, TSH_ERR_ARGUMENT, "tsh_tensor_from: data is NULL");
    }
    if (t && data) memcpy(tshi_tensor_at(t), data, tshi_dtype_bytes(dtype, tsh_local_numel(t)));
    return t;
}

TSH_API void tsh_tensor_free(tsh_tensor *t) {
    if (t && (t->flags & TSHI_OWNED) && !(t->flags & (TSHI_DEAD | TSHI_PARAM)))
        tshi_tensor_release(t);
}

TSH_API tsh_tensor *tsh_filled(tsh_ctx *ctx, tsh_shape shape, double value) {
    tsh_tensor *t = tshi_tensor_out(ctx, "tsh_filled", TSH_REAL, &shape, NULL);
    if (t)
        (void)tshi_init_fill(t, "tsh_filled", tshi_init_make(TSH_INIT_CONSTANT, value, 0),
                               0);
    return t;
}

TSH_API tsh_tensor *tsh_zeros(tsh_ctx *ctx, tsh_shape shape) {
    return tsh_filled(ctx, shape, 0.0);
}

TSH_API tsh_tensor *tsh_ones(tsh_ctx *ctx, tsh_shape shape) {
    return tsh_filled(ctx, shape, 1.0);
}

TSH_API tsh_tensor *tsh_randn(tsh_ctx *ctx, tsh_shape shape) {
    tsh_tensor *t = tshi_tensor_out(ctx, "tsh_randn", TSH_REAL, &shape, NULL);
    if (t)
        (void)tshi_init_fill(t, "tsh_randn", tshi_init_make(TSH_INIT_NORMAL, 0, 1),
                               tshi_rng_hash(ctx->randn_calls++, "randn", 5));
    return t;
}

TSH_API tsh_tensor *tsh_arange(tsh_ctx *ctx, tsh_dtype dtype, double start, double stop,
                               double step) {
    const double length = step != 0 ? ceil((stop - start) / step) : -1;
    if ((unsigned)dtype >= (unsigned)TSHI_DTYPES ||
        (tshi_dtypes[dtype].floating && !tshi_dtype_computes(dtype)) ||
        !tshi_dtype_holds(dtype, start) || !tshi_dtype_holds(dtype, stop))
        return tshi_error_null(ctx, TSH_ERR_DTYPE, "tsh_arange: dtype %d cannot hold %g to %g",
                               (int)dtype, start, stop);
    if (!(length >= 0 && length < 9e15))
        return tshi_error_null(ctx, TSH_ERR_ARGUMENT, "tsh_arange: from %g to %g by %g never ends",
                               start, stop, step);
    const tsh_shape shape = tsh_shape1((int64_t)length);
    tsh_tensor *t = tshi_tensor_out(ctx, "tsh_arange", dtype, &shape, NULL);
    for (int64_t i = 0; t && i < shape.dim[0]; i++)
        tshi_dtype_put(dtype, tshi_tensor_at(t), i, start + (double)i * step);
    return t;
}

/* -- what a tensor is ------------------------------------------------------- */

TSH_API tsh_ctx *tsh_ctx_of(const tsh_tensor *t) {
    return t ? t->ctx : NULL;
}

TSH_API tsh_dtype tsh_dtype_of(const tsh_tensor *t) {
    return t ? t->dtype : TSH_REAL;
}

TSH_API int tsh_ndim(const tsh_tensor *t) {
    return t ? t->ndim : 0;
}

TSH_API tsh_shape tsh_shape_of(const tsh_tensor *t) {
    tsh_shape shape = tsh_shape0();
    if (!t) return shape;
    shape.ndim = t->ndim;
    memcpy(shape.dim, t->dim, sizeof shape.dim);
    return shape;
}

#define TSHI_TENSOR_OF_DIM(name, values)                                                           \
    TSH_API int64_t tsh_##name(const tsh_tensor *t, int dim) {                                     \
        int axis = t ? tshi_tensor_axis(t, dim) : -1;                                              \
        return axis < 0 ? 0 : t->values[axis];                                                     \
    }
TSHI_TENSOR_OF_DIM(dim, dim)
TSHI_TENSOR_OF_DIM(local_dim, local)
TSHI_TENSOR_OF_DIM(stride, stride)
#undef TSHI_TENSOR_OF_DIM

TSH_API int64_t tsh_numel(const tsh_tensor *t) {
    return t ? tshi_tensor_product(t->dim, t->ndim) : 0;
}

TSH_API int64_t tsh_local_numel(const tsh_tensor *t) {
    return t ? tshi_tensor_product(t->local, t->ndim) : 0;
}

TSH_API tsh_layout tsh_layout_of(const tsh_tensor *t) {
    return t ? t->layout : tsh_replicated();
}

TSH_API void *tsh_data(tsh_ctx *ctx, tsh_tensor *t) {
    if (!tshi_tensor_check_in(ctx, "tsh_data", t)) return NULL;
    return tsh_local_numel(t) ? tshi_tensor_at(t) : NULL;
}

TSH_API double tsh_item(tsh_ctx *ctx, tsh_tensor *t) {
    char text[TSHI_TEXT_SIZE];
    if (!tshi_tensor_check_in(ctx, "tsh_item", t)) return (double)NAN;
    const int one = tsh_numel(t) == 1;
    if (one && t->layout.kind == TSH_REPLICATED)
        return tshi_dtype_get(t->dtype, tshi_tensor_at(t), 0);
    (void)tsh_fail(ctx, one ? TSH_ERR_LAYOUT : TSH_ERR_SHAPE,
                   "tsh_item: takes one replicated element, not %s%s", tshi_tensor_text(t, text),
                   one ? "; complete it first: tsh_redistribute(x, tsh_replicated())" : "");
    return (double)NAN;
}

/* -- initial values, by name ------------------------------------------------ */

/* Every tsh_init_...: fills t as desc says; `usual` has the kind, and a and b if desc is NULL. */
TSHI_OUTLINE tsh_result tshi_tensor_init(const char *op, tsh_tensor *t, const tsh_init *desc,
                                   tsh_init usual) {
    char text[TSHI_TEXT_SIZE];
    tsh_init init = desc ? *desc : usual;
    tsh_ctx *ctx = t ? t->ctx : NULL;
    init.kind = usual.kind;
    if (!ctx || ctx->error.code != TSH_OK) return ctx ? ctx->error.code : TSH_ERR_ARGUMENT;
    if (!(t->flags & TSHI_OWNED) || (t->flags & TSHI_STALE) || !tshi_dtype_computes(t->dtype) ||
        t->layout.kind == TSH_PARTIAL)
        return tsh_fail(ctx, TSH_ERR_ARGUMENT,
                        "%s: takes an owned tensor of %s, replicated or sharded, not %s %s", op,
                        tshi_dtype_name(TSH_REAL), tshi_dtype_name(t->dtype),
                        tshi_tensor_text(t, text));
    if (t->absent) return TSH_OK;
    if (!tshi_tensor_may_change(op, t)) return ctx->error.code;
    if (t->flags & TSHI_PARAM) return tshi_init_fill_param(t, op, init);
    return tshi_init_fill(t, op, init, tshi_rng_hash(ctx->randn_calls++, "init", 4));
}

/* Name, kind, a and b as torch.nn.init has them by default. */
#define TSHI_INIT_FUNCTION(name, kind, a, b)                                                       \
    TSH_API tsh_result tsh_init_##name(tsh_tensor *t, const tsh_init *desc) {                      \
        return tshi_tensor_init("tsh_init_" #name, t, desc,                                        \
                                tshi_init_make(TSH_INIT_##kind, a, b));                       \
    }
TSHI_INIT_FUNCTION(uniform, UNIFORM, 0, 1)
TSHI_INIT_FUNCTION(normal, NORMAL, 0, 1)
TSHI_INIT_FUNCTION(trunc_normal, TRUNC_NORMAL, 0, 1)
TSHI_INIT_FUNCTION(constant, CONSTANT, 0, 0)
TSHI_INIT_FUNCTION(zeros, ZEROS, 0, 0)
TSHI_INIT_FUNCTION(ones, ONES, 0, 0)
TSHI_INIT_FUNCTION(kaiming_uniform, KAIMING_UNIFORM, 0, 0)
TSHI_INIT_FUNCTION(kaiming_normal, KAIMING_NORMAL, 0, 0)
TSHI_INIT_FUNCTION(xavier_uniform, XAVIER_UNIFORM, 0, 0)
TSHI_INIT_FUNCTION(xavier_normal, XAVIER_NORMAL, 0, 0)
TSHI_INIT_FUNCTION(orthogonal, ORTHOGONAL, 0, 0)
TSHI_INIT_FUNCTION(dirac, DIRAC, 0, 0)
#undef TSHI_INIT_FUNCTION

/* ========================================================================== */
/* >>math                                              MARK: - math (private) */
/* Functions of one float that vectorise: exp, log, tanh, erf, pow and what   */
/* is made of them.                                                           */
/* Needs: >>base >>dtype.                                                     */
/* ========================================================================== */

/* Functions of one float without calls or branches, so that loops that call them vectorise. (For
 * double they call libm.) Coefficients of polynomials are minimax (Remez algorithm), for the
 * relative error of the whole function, unless a source is named. `fused` is a constant after
 * inlining; fused multiply-adds are faster and a little more exact. The largest errors in ulps over
 * all floats: exp 0.99 (fused: 0.91), tanh 1.50, log 0.87 (0.86), erf 2.00 (1.81), gelu 2.35
 * (2.01); over samples: pow 0.6. */

/* Returns a b + c. */
TSHI_INLINE float tshi_math_fma(float a, float b, float c, int fused) {
#if defined(__GNUC__)
    return fused ? __builtin_fmaf(a, b, c) : (float)(a * b + c);
#else
    return (void)fused, a * b + c;
#endif
}

/* Returns (((p x + a) x + b) x + c) x + d: four steps of Horner's rule. */
TSHI_INLINE float tshi_math_steps(float p, float x, float a, float b, float c, float d,
                                    int fused) {
    p = tshi_math_fma(p, x, a, fused);
    p = tshi_math_fma(p, x, b, fused);
    p = tshi_math_fma(p, x, c, fused);
    return tshi_math_fma(p, x, d, fused);
}

/* Rounds x to float. Where floats are computed in a wider format (x87), a compiler may keep more
 * digits of x, unless it follows C99 strictly (gcc: -std=c99). */
TSHI_INLINE float tshi_math_round(float x) {
#if defined(FLT_EVAL_METHOD) && (FLT_EVAL_METHOD == 1 || FLT_EVAL_METHOD == 2)
    const volatile float stored = x;
    return stored;
#else
    return x;
#endif
}

/* The bits of a float. Choices are made by comparing bits, as integers: a comparison of floats may
 * trap, so compilers keep it as a branch. */
TSHI_INLINE uint32_t tshi_math_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

TSHI_INLINE float tshi_math_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Returns yes ? a : b, by masking instead of a branch. yes is 0 or 1. */
TSHI_INLINE uint32_t tshi_math_pick(int yes, uint32_t a, uint32_t b) {
    return b ^ ((a ^ b) & (0u - (uint32_t)yes));
}

/* Reduces x for e^x = 2^n e^r, n = round(x / ln 2). Returns r = x - n ln 2, with ln 2 in two parts,
 * so that the first product is exact (Cody & Waite 1980). *n becomes n + 0x4B400000; shifting it
 * left by 23 leaves n alone, in a float's exponent. */
TSHI_INLINE float tshi_math_exp_rest(float x, uint32_t *n, int fused) {
    /* adding 1.5 * 2^23 leaves the rounded integer in the low bits */
    const float shifted = tshi_math_round(tshi_math_fma(x, 1.44269504f, 12582912.0f, fused));
    const float whole = shifted - 12582912.0f;
    *n = tshi_math_bits(shifted);
    x = tshi_math_fma(whole, -0.693359375f, x, fused);
    return tshi_math_fma(whole, 2.12194440e-4f, x, fused);
}

/* Returns (e^r - 1 - r) / r^2 for |r| < 0.35. */
TSHI_INLINE float tshi_math_exp_tail(float r, int fused) {
    return tshi_math_steps(1.3814465e-3f, r, 8.3687805e-3f, 4.1668394e-2f, 1.6666520e-1f,
                             4.9999993e-1f, fused);
}

TSHI_INLINE float tshi_math_exp_less_one(float r, int fused) {
    return tshi_math_fma(tshi_math_exp_tail(r, fused), r * r, r, fused);
}

/* Returns e^r. 1 + r (1 + r p) is the more exact form if fused, 1 + (r + r^2 p) if not. */
TSHI_INLINE float tshi_math_exp_whole(float r, int fused) {
    if (!fused) return tshi_math_exp_less_one(r, fused) + 1.0f;
    return tshi_math_fma(tshi_math_fma(tshi_math_exp_tail(r, fused), r, 1.0f, fused), r, 1.0f,
                           fused);
}

/* Returns e^x for x <= 0 (or just above); 0 for x < -87; any value for NaN. Adding n to the
 * exponent multiplies by 2^n. */
TSHI_INLINE tsh_real tshi_math_exp_below(tsh_real v, int fused) {
    const uint32_t bits = tshi_math_bits((float)v);
    uint32_t x = bits < 0xC2AE0000u ? bits : 0xC2AE0000u, n;
    float y;
    if (TSHI_DOUBLE) return TSHI_R(exp((double)v));
    y = tshi_math_exp_whole(tshi_math_exp_rest(tshi_math_float(x), &n, fused), fused);
    x = tshi_math_bits(y) + (n << 23);
    return TSHI_R(tshi_math_float(tshi_math_pick(bits <= 0xC2AE0000u, x, 0u)));
}

/* Returns e^x. 2^n is multiplied in as two halves, so that neither overflows or underflows before
 * the product does. */
TSHI_INLINE tsh_real tshi_math_exp(tsh_real v, int fused) {
    const uint32_t bits = tshi_math_bits((float)v);
    int32_t order = (int32_t)bits;
    uint32_t x, n, half;
    float y;
    if (TSHI_DOUBLE) return TSHI_R(exp((double)v));
    /* clamp x to [-104, 89]: as signed integers, then, for negative floats, as unsigned ones */
    order = order < 0x42B20000 ? order : 0x42B20000;
    x = (uint32_t)order;
    x = x < 0xC2D00000u ? x : 0xC2D00000u;
    y = tshi_math_exp_whole(tshi_math_exp_rest(tshi_math_float(x), &n, fused), fused);
    n -= 0x4B400000u - 254u; /* n plus twice the bias of the exponent */
    half = n >> 1;
    y = y * tshi_math_float(half << 23) * tshi_math_float((n - half) << 23);
    return TSHI_R(
        tshi_math_float(tshi_math_pick(bits << 1 > 0xFF000000u, bits, tshi_math_bits(y))));
}

TSHI_INLINE tsh_real tshi_math_sigmoid(tsh_real x, int fused) {
    return TSHI_R(1) / (TSHI_R(1) + tshi_math_exp(-x, fused));
}

/* Returns tanh x: for |x| < 0.625 an odd polynomial (as in Cephes), else q / (q + 2) with x's sign
 * and q = e^2|x| - 1 = 2^n (e^r - 1) + 2^n - 1; 1 from 9.02 on. */
TSHI_INLINE tsh_real tshi_math_tanh(tsh_real v, int fused) {
    const float x = (float)v, z = x * x;
    const uint32_t sign = tshi_math_bits(x) & 0x80000000u;
    const uint32_t a = tshi_math_bits(x) & 0x7FFFFFFFu;
    uint32_t n;
    float q, power, mid;
    if (TSHI_DOUBLE) return TSHI_R(tanh((double)v));
    mid = tshi_math_steps(-5.7049874e-3f, z, 2.0639088e-2f, -5.3739715e-2f, 1.3331442e-1f,
                            -3.3333282e-1f, fused);
    mid = tshi_math_fma(mid * z, x, x, fused);
    q = 2.0f * tshi_math_float(a < 0x41200000u ? a : 0x41200000u); /* at most 10 */
    q = tshi_math_exp_less_one(tshi_math_exp_rest(q, &n, fused), fused);
    power = tshi_math_float((n << 23) + 0x3F800000u);
    q = tshi_math_fma(power, q, power - 1.0f, fused);
    q = q / (q + 2.0f);
    return TSHI_R(tshi_math_float(tshi_math_pick(a - 0x3F200000u <= 0x40600000u,
                                                     tshi_math_bits(q), tshi_math_bits(mid)) |
                                    sign));
}

/* Returns log x = e log 2 + log(1 + f) with 1 + f in [sqrt 1/2, sqrt 2), and
 * log(1 + f) = f - f^2 / 2 + f^3 P(f) (as in Cephes). The larger part of e log 2 is exact; the
 * rounding error of its sum with f is added last. e is in units of 2^-23: bits, not shifted. */
TSHI_INLINE tsh_real tshi_math_log(tsh_real v, int fused) {
    float x = (float)v, e, f, p, whole, sum, rest;
    uint32_t bits = tshi_math_bits(x), tiny = 0u - (uint32_t)(bits < 0x00800000u), k, m, special;
    if (TSHI_DOUBLE) return TSHI_R(log((double)v));
    m = bits ^ ((bits ^ tshi_math_bits(x * 8388608.0f)) & tiny);
    k = (m - 0x3F3504F3u) & 0xFF800000u; /* 0 from sqrt 1/2 to sqrt 2 */
    f = tshi_math_float(m - k) - 1.0f;
    e = (float)(int32_t)(k - (0x0B800000u & tiny));
    p = tshi_math_steps(6.7466066e-2f, f, -1.1679658e-1f, 1.1890323e-1f, -1.2405135e-1f,
                          1.4219224e-1f, fused);
    p = tshi_math_steps(p, f, -1.6668007e-1f, 2.0002134e-1f, -2.5000010e-1f, 3.3333312e-1f,
                          fused);
    p = tshi_math_fma(p, f, -0.5f, fused);
    whole = e * (0.693359375f / 8388608.0f);
    sum = whole + f;
    rest = tshi_math_fma(e, -2.12194440e-4f / 8388608.0f, whole - sum + f, fused);
    sum = sum + tshi_math_fma(p, f * f, rest, fused);
    /* log 0 is -infinity, log infinity is infinity, all else that is special is NaN */
    special = tshi_math_pick(bits << 1 == 0u, 0xFF800000u, 0x7FC00000u);
    special = tshi_math_pick(bits == 0x7F800000u, bits, special);
    return TSHI_R(tshi_math_float(
        tshi_math_pick(bits - 1u < 0x7F7FFFFFu, tshi_math_bits(sum), special)));
}

TSHI_INLINE tsh_real tshi_math_sqrt(tsh_real x) {
    return TSHI_DOUBLE ? TSHI_R(sqrt((double)x)) : TSHI_R(sqrtf((float)x));
}

TSHI_INLINE uint64_t tshi_math_bits8(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

TSHI_INLINE double tshi_math_double(uint64_t bits) {
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Rounds x to double; see tshi_math_round. */
TSHI_INLINE double tshi_math_round8(double x) {
#if defined(FLT_EVAL_METHOD) && FLT_EVAL_METHOD == 2
    const volatile double stored = x;
    return stored;
#else
    return x;
#endif
}

/* Returns x^y = 2^(y log2 x) for x > 0, computed in double. The mantissa m is in
 * [sqrt 1/2, sqrt 2); log2 m = s P(s^2) with s = (m - 1) / (m + 1). */
TSHI_INLINE float tshi_math_power(float x, float y) {
    uint64_t bits = tshi_math_bits8((double)x);
    uint64_t k = (bits - 0x3FE6A09E667F3BCDu + 0x3FF0000000000000u) >> 52;
    double m = tshi_math_double(bits - (k << 52) + 0x3FF0000000000000u), s, z, t, p;
    s = (m - 1.0) / (m + 1.0);
    z = s * s;
    p = (3.4073010658534e-1 * z + 4.1167271899778e-1) * z + 5.7708358496515e-1;
    p = (p * z + 9.6179667334180e-1) * z + 2.8853900817901;
    /* converts k to double and subtracts the bias of the exponent */
    t = tshi_math_double(k + 0x4330000000000000u) - 4503599627371519.0 + p * s;
    t = t * (double)y;
    t = t < 200 ? t : 200; /* 2^t and 2^-t are out of a float's range */
    t = t > -200 ? t : -200;
    /* adding 1.5 * 2^52 rounds t to an integer, which is left in the low bits of s */
    s = tshi_math_round8(t + 6755399441055744.0);
    t = t - (s - 6755399441055744.0);
    p = (1.5353351392569e-4 * t + 1.3398887281849e-3) * t + 9.6184374823696e-3;
    p = (p * t + 5.5503324404768e-2) * t + 2.4022647911954e-1;
    p = (p * t + 6.9314720286791e-1) * t + 1.0;
    return (float)tshi_math_double(tshi_math_bits8(p) + (tshi_math_bits8(s) << 52));
}

/* Returns x^y as C's pow: |x|^y, then x's sign for odd y, then zeros, infinities and NaN. */
TSHI_INLINE tsh_real tshi_math_pow(tsh_real v, tsh_real w) {
    const uint32_t x = tshi_math_bits((float)v), y = tshi_math_bits((float)w);
    const uint32_t a = x & 0x7FFFFFFFu, b = y & 0x7FFFFFFFu, infinity = 0x7F800000u;
    uint32_t out, even, whole, odd;
    int32_t integer;
    if (TSHI_DOUBLE) return TSHI_R(pow((double)v, (double)w));
    out = tshi_math_bits(tshi_math_power(tshi_math_float(a), (float)w));
    even = b >= 0x4B800000u; /* |y| >= 2^24, infinity too, is an even integer */
    integer = (int32_t)tshi_math_float(tshi_math_pick((int)even, 0u, y));
    whole = even | (uint32_t)(tshi_math_bits((float)integer) == y);
    odd = whole & (uint32_t)integer & 1u;
    out = tshi_math_pick((a == 0u) | (a == infinity),
                           tshi_math_pick((uint32_t)(a == 0u) == y >> 31, infinity, 0u), out);
    out |= x & odd << 31;
    out = tshi_math_pick((a > infinity) | (b > infinity) |
                               (int)((x >> 31) & (whole ^ 1u) & (uint32_t)(a - 1u < infinity - 1u)),
                           0x7FC00000u, out);
    out = tshi_math_pick((b == 0u) | (x == 0x3F800000u) | ((a == 0x3F800000u) & (b == infinity)),
                           0x3F800000u, out);
    return TSHI_R(tshi_math_float(out));
}

/* ========================================================================== */
/* >>kernel                                            MARK: - kernel (private) */
/* Loops over strided operands, kernels per instruction set, vector maths.     */
/* Needs: >>tensor.                                                             */
/* ========================================================================== */

/* An elementwise op adds its operands to a tshi_loop (tshi_kernel_space, tshi_kernel_tensor) and
 * calls tshi_kernel_run; an op that works on rows sets the operands of a tshi_rows and calls
 * tshi_kernel_run_rows. Either calls a kernel, which loads, computes and stores blocks of
 * TSHI_BLOCK values: see tshi_kernel_add_body for the shortest one. */
#if TSHI_X86
#include <immintrin.h> /* _mm512_fmadd_ps, _mm512_permutex2var_ps, _mm256_loadu_ps */
#endif

/* -- kernels per instruction set --------------------------------------------
 * A kernel does n steps over its operands x[0], x[1], ..., of which x[0] is usually the output; its
 * parameters are a struct of its own. TSHI_KERNEL(name, type) compiles the inline function
 * name_body(n, x, const type *params) once per instruction set, into the table name[TSHI_ISAS]; the
 * caller picks name[ctx->isa]. A body has plain loops, which the compiler vectorises. */
typedef struct tshi_operand {
    void *data;   /* the first element */
    int64_t step; /* stride, in elements; for kernels that work on rows, from row to row */
    tsh_dtype dtype;
} tshi_operand;

typedef void (*tshi_kernel_fn)(int64_t n, const tshi_operand *x, const void *params);

enum { TSHI_ISA_PORTABLE, TSHI_ISA_AVX2, TSHI_ISA_AVX512, TSHI_ISAS };

#if TSHI_X86
#define TSHI_AVX2   __attribute__((target("avx2,fma")))
#define TSHI_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
/* Returns the best instruction set of this processor. */
static int tshi_kernel_isa(void) {
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return TSHI_ISA_PORTABLE;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
               ? TSHI_ISA_AVX512
               : TSHI_ISA_AVX2;
}
#else
#define TSHI_AVX2
#define TSHI_AVX512
static int tshi_kernel_isa(void) {
    return TSHI_ISA_PORTABLE;
}
#endif

#define TSHI_KERNEL_ISA(name, isa, TARGET, ...)                                                    \
    TARGET static void name##_##isa(int64_t n, const tshi_operand *x, const void *params) {        \
        (void)params;                                                                              \
        name##_body(__VA_ARGS__);                                                                  \
    }
#define TSHI_KERNEL_TABLE(name)                                                                    \
    static const tshi_kernel_fn name[TSHI_ISAS] = {name##_portable, name##_avx2, name##_avx512}
#define TSHI_KERNEL(name, type)                                                                    \
    TSHI_KERNEL_ISA(name, portable, , n, x, (const type *)params)                                  \
    TSHI_KERNEL_ISA(name, avx2, TSHI_AVX2, n, x, (const type *)params)                             \
    TSHI_KERNEL_ISA(name, avx512, TSHI_AVX512, n, x, (const type *)params)                         \
    TSHI_KERNEL_TABLE(name)

/* The same for bodies with a fourth argument, `fused`: 1 if a * b + c is one instruction. */
#if defined(__FP_FAST_FMAF)
#define TSHI_FUSED 1
#else
#define TSHI_FUSED 0
#endif
#define TSHI_KERNEL_FUSED(name, type)                                                              \
    TSHI_KERNEL_ISA(name, portable, , n, x, (const type *)params, TSHI_FUSED)                      \
    TSHI_KERNEL_ISA(name, avx2, TSHI_AVX2, n, x, (const type *)params, TSHI_X86)                   \
    TSHI_KERNEL_ISA(name, avx512, TSHI_AVX512, n, x, (const type *)params, TSHI_X86)               \
    TSHI_KERNEL_TABLE(name)

/* -- blocks -----------------------------------------------------------------
 * Elementwise kernels take blocks of TSHI_BLOCK values. The last values of a run, and strided ones,
 * are copied to a pad of that length: the same code computes every element, so its value does not
 * depend on its place, and loops of constant length vectorise at -O2, too. (At 16 or less gcc -O3
 * unrolls them before it vectorises.) A sum has TSHI_BLOCK partial sums, of which lane[i] sums the
 * elements i, i + TSHI_BLOCK, ...: its order is fixed. */

enum { TSHI_BLOCK = 32 };

/* Returns the sum of all lanes, added by halves. */
TSHI_INLINE tsh_real tshi_kernel_fold(const tsh_real *lane) {
    tsh_real a[16];
    int i;
    for (i = 0; i < 16; i++) a[i] = lane[i] + lane[i + 16];
    for (i = 0; i < 8; i++) a[i] += a[i + 8];
    for (i = 0; i < 4; i++) a[i] += a[i + 4];
    return (a[0] + a[2]) + (a[1] + a[3]);
}

/* Copies up to TSHI_BLOCK of n values to a pad, which repeats the first value after them. Not
 * inlined, as the functions below, to keep kernels small. */
TSHI_APART void tshi_kernel_gather(const tsh_real *x, int64_t step, int64_t n, tsh_real *pad) {
    const tsh_real first = x[0];
    int i, m = n < TSHI_BLOCK ? (int)n : TSHI_BLOCK;
    for (i = 0; i < TSHI_BLOCK; i++) pad[i] = first;
    for (i = 1; i < m; i++) pad[i] = x[i * step];
}

/* y = or += a block, in any step; a y of step 0 gets the sum of a whole block. */
TSHI_APART void tshi_kernel_scatter(tsh_real *y, int64_t step, int64_t n, const tsh_real *block,
                                    int add) {
    int i, m = n < TSHI_BLOCK ? (int)n : TSHI_BLOCK;
    if (add && !step && m == TSHI_BLOCK)
        *y += tshi_kernel_fold(block);
    else
        for (i = 0; i < m; i++) y[i * step] = add ? TSHI_R(y[i * step] + block[i]) : block[i];
}

/* Returns the block of values e, e + 1, ... of n: in place, or copied to pad. With step 0 pad is
 * filled for e = 0 only. */
TSHI_INLINE const tsh_real *tshi_kernel_load_block(const tsh_real *x, int64_t step, int64_t e,
                                                   int64_t n, tsh_real *pad) {
    const tsh_real *first = x + e * step;
    int i;
    if (step == 1 && n - e >= TSHI_BLOCK) return first;
    if (step && n - e > 1)
        tshi_kernel_gather(first, step, n - e, pad);
    else if (step || !e) {
        const tsh_real value = *first; /* read once: for the compiler, pad may overlap it */
        for (i = 0; i < TSHI_BLOCK; i++) pad[i] = value;
    }
    return pad;
}

/* Stores a block as values e, e + 1, ... of the n of y; add: accumulates. */
TSHI_INLINE void tshi_kernel_store_block(tsh_real *y, int64_t step, int64_t e, int64_t n,
                                         const tsh_real *block, int add) {
    int i;
    if (step != 1 || n - e < TSHI_BLOCK) {
        tshi_kernel_scatter(y + e * step, step, n - e, block, add);
        return;
    }
    if (add)
        TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) y[e + i] += block[i];
    else
        TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) y[e + i] = block[i];
}

/* Copies a block of an operand to pad, converted to tsh_real. */
TSHI_APART void tshi_kernel_convert(const tshi_operand *x, int64_t e, int64_t n, tsh_real *pad) {
    const tshi_dtype *row = &tshi_dtypes[x->dtype];
    const int m = n - e < TSHI_BLOCK ? (int)(n - e) : TSHI_BLOCK;
    int i;
    row->load((const char *)x->data + e * x->step * row->size, x->step, m, pad);
    for (i = m; i < TSHI_BLOCK; i++) pad[i] = pad[0];
}

/* Returns the block of values e, e + 1, ... of an operand's n as tsh_real: in place if they are
 * contiguous tsh_real, else in pad, which repeats the first one after the last. */
TSHI_INLINE const tsh_real *tshi_kernel_load(const tshi_operand *x, int64_t e, int64_t n,
                                             tsh_real *pad) {
    if (x->dtype == TSH_REAL)
        return tshi_kernel_load_block((const tsh_real *)x->data, x->step, e, n, pad);
    tshi_kernel_convert(x, e, n, pad);
    return pad;
}

/* y = or += a block, rounded to y's dtype; a y of step 0 gets the sum of the block. */
TSHI_APART void tshi_kernel_round_to(const tshi_operand *y, int64_t e, int64_t n,
                                     const tsh_real *block, int add) {
    const tshi_dtype *row = &tshi_dtypes[y->dtype];
    const int m = n - e < TSHI_BLOCK ? (int)(n - e) : TSHI_BLOCK;
    char *at = (char *)y->data + e * y->step * row->size;
    tsh_real sum[TSHI_BLOCK];
    int i;
    if (add) row->load(at, y->step, m, sum);
    for (i = 0; i < m; i++)
        sum[i] = add ? TSHI_R(sum[y->step || !i ? i : i - 1] + block[i]) : block[i];
    row->store(at, y->step, m, sum);
}

/* Stores a block as values e, e + 1, ... of the n of y, rounded to y's dtype; add: accumulates. */
TSHI_INLINE void tshi_kernel_store(const tshi_operand *y, int64_t e, int64_t n,
                                   const tsh_real *block, int add) {
    if (y->dtype == TSH_REAL)
        tshi_kernel_store_block((tsh_real *)y->data, y->step, e, n, block, add);
    else
        tshi_kernel_round_to(y, e, n, block, add);
}

/* tshi_kernel_load for an operand of integers. */
TSHI_INLINE const int64_t *tshi_kernel_load_integers(const tshi_operand *x, int64_t e, int64_t n,
                                                     int64_t *pad) {
    const tshi_dtype *row = &tshi_dtypes[x->dtype];
    const int m = n - e < TSHI_BLOCK ? (int)(n - e) : TSHI_BLOCK;
    int i;
    row->load_integer((const char *)x->data + e * x->step * row->size, x->step, m, pad);
    for (i = m; i < TSHI_BLOCK; i++) pad[i] = pad[0];
    return pad;
}

/* Copies the last n values of a row to a pad, followed by `rest`. */
TSHI_APART void tshi_kernel_pad(const tsh_real *x, int64_t n, tsh_real rest, tsh_real *pad) {
    int64_t i;
    for (i = 0; i < TSHI_BLOCK; i++) pad[i] = rest;
    for (i = 0; i < n; i++) pad[i] = x[i];
}

/* Sums, dot products and maxima of a row do one step per block. The step of the padded end comes
 * after the loop, not in it, so that the lanes stay in registers. */
TSHI_INLINE void tshi_kernel_sum_step(tsh_real *lane, const tsh_real *x) {
    int i;
    for (i = 0; i < TSHI_BLOCK; i++) lane[i] += x[i];
}

TSHI_INLINE tsh_real tshi_kernel_sum(const tsh_real *x, int64_t n) {
    tsh_real lane[TSHI_BLOCK], pad[TSHI_BLOCK];
    int64_t e;
    int i;
    for (i = 0; i < TSHI_BLOCK; i++) lane[i] = 0;
    for (e = 0; e + TSHI_BLOCK <= n; e += TSHI_BLOCK) tshi_kernel_sum_step(lane, x + e);
    if (e < n) {
        tshi_kernel_pad(x + e, n - e, 0, pad);
        tshi_kernel_sum_step(lane, pad);
    }
    return tshi_kernel_fold(lane);
}

TSHI_INLINE void tshi_kernel_dot_step(tsh_real *lane, const tsh_real *x, const tsh_real *y) {
    int i;
    for (i = 0; i < TSHI_BLOCK; i++) lane[i] += x[i] * y[i];
}

TSHI_INLINE tsh_real tshi_kernel_dot(const tsh_real *x, const tsh_real *y, int64_t n) {
    tsh_real lane[TSHI_BLOCK], pad[2][TSHI_BLOCK];
    int64_t e;
    int i;
    for (i = 0; i < TSHI_BLOCK; i++) lane[i] = 0;
    for (e = 0; e + TSHI_BLOCK <= n; e += TSHI_BLOCK) tshi_kernel_dot_step(lane, x + e, y + e);
    if (e < n) {
        tshi_kernel_pad(x + e, n - e, 0, pad[0]);
        tshi_kernel_pad(y + e, n - e, 0, pad[1]);
        tshi_kernel_dot_step(lane, pad[0], pad[1]);
    }
    return tshi_kernel_fold(lane);
}

/* Returns the larger of x and y; NaN if x is NaN or y is; y if both are zeros. */
TSHI_INLINE tsh_real tshi_kernel_larger(tsh_real x, tsh_real y) {
    return ((x > y) | (x != x)) ? x : y;
}

TSHI_INLINE void tshi_kernel_max_step(tsh_real *lane, const tsh_real *x) {
    int i;
    TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) lane[i] = tshi_kernel_larger(x[i], lane[i]);
}

/* The largest of all lanes. As integers of the same order, among which a NaN is the largest: for
 * those compilers have a maximum of many. */
TSHI_INLINE tsh_real tshi_kernel_max_fold(const tsh_real *lane) {
    int32_t best = INT32_MIN;
    tsh_real most = lane[0];
    int i;
    for (i = 1; i < TSHI_BLOCK && TSHI_DOUBLE; i++) most = tshi_kernel_larger(lane[i], most);
    if (TSHI_DOUBLE) return most;
    for (i = 0; i < TSHI_BLOCK; i++) {
        const uint32_t bits = tshi_math_bits((float)lane[i]);
        const uint32_t order = bits ^ ((0u - (bits >> 31)) & 0x7FFFFFFFu);
        /* all ones if NaN: its magnitude is above that of infinity; arithmetic, to be vectorised */
        const uint32_t nan = 0u - ((0x7F800000u - (bits & 0x7FFFFFFFu)) >> 31);
        const int32_t rank = (int32_t)((order & ~nan) | nan >> 1);
        best = best > rank ? best : rank;
    }
    return TSHI_R(
        tshi_math_float((uint32_t)best ^ ((0u - ((uint32_t)best >> 31)) & 0x7FFFFFFFu)));
}

/* Returns the largest of n > 0 values, NaN if any is NaN; 0 may be of either sign. */
TSHI_INLINE tsh_real tshi_kernel_max(const tsh_real *x, int64_t n) {
    tsh_real lane[TSHI_BLOCK], pad[TSHI_BLOCK];
    int64_t e;
    int i;
    for (i = 0; i < TSHI_BLOCK; i++) lane[i] = x[0];
    for (e = 0; e + TSHI_BLOCK <= n; e += TSHI_BLOCK) tshi_kernel_max_step(lane, x + e);
    if (e < n) {
        tshi_kernel_pad(x + e, n - e, x[0], pad);
        tshi_kernel_max_step(lane, pad);
    }
    return tshi_kernel_max_fold(lane);
}

/* y = e^(x - max) for a block of values x <= max; adds y to lane. */
TSHI_INLINE void tshi_kernel_exps_block(tsh_real *lane, const tsh_real *x, tsh_real max,
                                        tsh_real *y, int fused) {
    int i;
    TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) y[i] = tshi_math_exp_below(x[i] - max, fused);
    TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) lane[i] += y[i];
}

/* Adds e^(x - max) of n values x <= max to lane, and stores them in y unless that is NULL. */
TSHI_INLINE void tshi_kernel_add_exps(tsh_real *lane, const tsh_real *x, int64_t n, tsh_real max,
                                      tsh_real *y, int fused) {
    tsh_real pad[TSHI_BLOCK], out[TSHI_BLOCK];
    int64_t e;
    for (e = 0; e + TSHI_BLOCK <= n; e += TSHI_BLOCK) {
        tshi_kernel_exps_block(lane, x + e, max, out, fused);
        if (y) tshi_kernel_store_block(y, 1, e, n, out, 0);
    }
    if (e < n) {
        tshi_kernel_pad(x + e, n - e, -TSHI_R(INFINITY), pad); /* e^-infinity adds 0 */
        tshi_kernel_exps_block(lane, pad, max, out, fused);
        if (y) tshi_kernel_store_block(y, 1, e, n, out, 0);
    }
}

/* Returns the sum of e^(x - max) of a row; NaN if max is not finite. */
TSHI_INLINE tsh_real tshi_kernel_sum_exps(const tsh_real *x, int64_t n, tsh_real max, tsh_real *y,
                                          int fused) {
    tsh_real lane[TSHI_BLOCK];
    memset(lane, 0, sizeof lane);
    tshi_kernel_add_exps(lane, x, n, max, y, fused);
    return tshi_kernel_fold(lane) + (max - max);
}

/* Casts const away, without a warning: tshi_operand has no const, also for what is only read. */
static void *tshi_kernel_unconst(const void *data) {
    union {
        const void *from;
        void *to;
    } cast;
    cast.from = data;
    return cast.to;
}

static tshi_operand tshi_kernel_operand(const void *data, int64_t step, tsh_dtype dtype) {
    const tshi_operand x = {tshi_kernel_unconst(data), step, dtype};
    return x;
}

static tshi_operand tshi_kernel_reals(const tsh_real *data, int64_t step) {
    return tshi_kernel_operand(data, step, TSH_REAL);
}

/* Advances an operand by this many elements; an operand of no data stays. */
static void tshi_kernel_move(tshi_operand *x, int64_t elements) {
    if (x->data) x->data = (char *)x->data + elements * tshi_dtypes[x->dtype].size;
}

/* -- loops ------------------------------------------------------------------ */

enum { TSHI_MAX_OPERANDS = 5, TSHI_MAX_ROWS = 7 };

/* An iteration space, and the strides of each operand along its dimensions. */
typedef struct tshi_loop {
    const tsh_ctx *ctx;
    int ndim, n;
    int64_t dim[TSH_MAX_DIMS];
    int64_t stride[TSHI_MAX_OPERANDS][TSH_MAX_DIMS];
    tshi_operand x[TSHI_MAX_OPERANDS];
    tshi_kernel_fn kernel; /* of tshi_kernel_run, as all below */
    const void *params;
    int cut; /* the dimension that threads share */
} tshi_loop;

/* Begins a loop over the local elements of a tensor. */
static void tshi_kernel_space(tshi_loop *loop, const tsh_tensor *shape) {
    loop->ctx = shape->ctx;
    loop->ndim = shape->ndim;
    loop->n = 0;
    memcpy(loop->dim, shape->local, sizeof loop->dim);
}

/* Adds an operand of t's shape, broadcast to the space: dimensions are aligned right; the stride is
 * 0 where t has no dimension, or one of global length 1. */
TSHI_OUTLINE void tshi_kernel_add_operand(tshi_loop *loop, const tsh_tensor *t, const void *data,
                                          const int64_t *stride, tsh_dtype dtype) {
    int d, skip = loop->ndim - t->ndim;
    for (d = 0; d < skip; d++) loop->stride[loop->n][d] = 0;
    for (d = 0; d < t->ndim; d++) loop->stride[loop->n][d + skip] = t->dim[d] == 1 ? 0 : stride[d];
    loop->x[loop->n++] = tshi_kernel_operand(data, 0, dtype);
}

static void tshi_kernel_tensor(tshi_loop *loop, const tsh_tensor *t) {
    tshi_kernel_add_operand(loop, t, tshi_tensor_at(t), t->stride, t->dtype);
}

/* Removes dimensions of length 1, and joins neighbours that are contiguous for every operand. */
static void tshi_kernel_join(tshi_loop *loop) {
    int d, i, out = 0;
    for (d = 0; d < loop->ndim; d++) {
        int joined = out > 0;
        if (loop->dim[d] == 1) continue;
        for (i = 0; i < loop->n && joined; i++)
            joined = loop->stride[i][out - 1] == loop->stride[i][d] * loop->dim[d];
        if (!joined) out++;
        loop->dim[out - 1] = joined ? loop->dim[out - 1] * loop->dim[d] : loop->dim[d];
        for (i = 0; i < loop->n; i++) loop->stride[i][out - 1] = loop->stride[i][d];
    }
    loop->ndim = out;
}

/* Calls the kernel for each row (innermost dimension) of a joined space. */
static void tshi_kernel_walk(const tshi_loop *loop) {
    tshi_operand x[TSHI_MAX_OPERANDS];
    int64_t index[TSH_MAX_DIMS] = {0};
    int d, i, inner = loop->ndim - 1;
    memcpy(x, loop->x, sizeof x);
    for (i = 0; i < loop->n && inner >= 0; i++) x[i].step = loop->stride[i][inner];
    for (;;) {
        loop->kernel(inner >= 0 ? loop->dim[inner] : 1, x, loop->params);
        for (d = inner - 1; d >= 0; d--) {
            int64_t back = ++index[d] < loop->dim[d] ? 0 : loop->dim[d];
            for (i = 0; i < loop->n; i++)
                tshi_kernel_move(&x[i], loop->stride[i][d] * (back ? 1 - back : 1));
            if (!back) break;
            index[d] = 0;
        }
        if (d < 0) return;
    }
}

/* A tshi_team_fn: walks a piece of the loop. */
static void tshi_kernel_piece(void *job, int piece, int64_t from, int64_t to) {
    tshi_loop part = *(const tshi_loop *)job;
    int i;
    (void)piece;
    part.dim[part.cut] = to - from;
    for (i = 0; i < part.n; i++) tshi_kernel_move(&part.x[i], part.stride[i][part.cut] * from);
    tshi_kernel_walk(&part);
}

/* Runs a kernel, which writes to operand 0, over the whole space. Threads share the outermost
 * dimension that is long enough and along which operand 0 moves: no two write to one place. */
TSHI_OUTLINE void tshi_kernel_run(tshi_loop *loop, tshi_kernel_fn kernel, const void *params) {
    enum { MIN_ELEMENTS = 1 << 15 }; /* per thread */
    int64_t count = 1;
    int d, pieces;
    for (d = 0; d < loop->ndim; d++) count *= loop->dim[d];
    if (!count) return;
    tshi_kernel_join(loop);
    loop->kernel = kernel;
    loop->params = params;
    pieces = tshi_team_parts(loop->ctx, count, MIN_ELEMENTS);
    for (d = 0; d < loop->ndim && (!loop->stride[0][d] || loop->dim[d] < pieces); d++) continue;
    loop->cut = d;
    if (pieces == 1 || d == loop->ndim)
        tshi_kernel_walk(loop);
    else
        tshi_team_run(pieces, loop->dim[d], d == loop->ndim - 1 ? 16 : 1, tshi_kernel_piece, loop);
}

/* A job of `count` rows: row r of operand i begins at r x[i].step. An operand with own[i] > 0 is
 * scratch: own[i] elements for each piece. */
typedef struct tshi_rows {
    tshi_kernel_fn kernel;
    int64_t count; /* of rows */
    const void *params;
    tshi_operand x[TSHI_MAX_ROWS];
    int64_t own[TSHI_MAX_ROWS];
} tshi_rows;

/* Returns a job whose operands are still to be set. */
static tshi_rows tshi_kernel_rows_job(tshi_kernel_fn kernel, int64_t count, const void *params) {
    tshi_rows rows;
    memset(&rows, 0, sizeof rows);
    rows.kernel = kernel;
    rows.count = count;
    rows.params = params;
    return rows;
}

/* A tshi_team_fn: calls the kernel once for a piece of the rows. */
static void tshi_kernel_do_rows(void *job, int piece, int64_t from, int64_t to) {
    const tshi_rows *rows = (const tshi_rows *)job;
    tshi_operand x[TSHI_MAX_ROWS];
    int i;
    memcpy(x, rows->x, sizeof x);
    for (i = 0; i < TSHI_MAX_ROWS; i++)
        tshi_kernel_move(&x[i], from * x[i].step + piece * rows->own[i]);
    rows->kernel(to - from, x, rows->params);
}

/* Returns how many pieces to cut `rows` rows of `length` elements into. */
static int tshi_kernel_parts(const tsh_ctx *ctx, int64_t rows, int64_t length) {
    enum { MIN_ELEMENTS = 1 << 14 }; /* per thread */
    return tshi_team_parts(ctx, rows, tshi_base_ceil(MIN_ELEMENTS, length > 0 ? length : 1));
}

/* Runs a job, of rows of `length` elements, on the threads. */
static void tshi_kernel_run_rows(const tsh_ctx *ctx, tshi_rows *rows, int64_t length) {
    tshi_team_run(tshi_kernel_parts(ctx, rows->count, length), rows->count, 1, tshi_kernel_do_rows,
                  rows);
}

/* to = from, n elements of one dtype, copied as unsigned integers of its size. */
#define TSHI_KERNEL_MOVE(type)                                                                     \
    do {                                                                                           \
        type *TSHI_RESTRICT y = (type *)to->data;                                                  \
        const type *TSHI_RESTRICT x = (const type *)from->data;                                    \
        TSHI_EACH for (i = 0; i < n; i++) y[i * sy] = x[i * sx];                                   \
    } while (0)
TSHI_APART void tshi_kernel_move_each(int64_t n, const tshi_operand *to, const tshi_operand *from) {
    const int64_t sy = to->step, sx = from->step;
    int64_t i;
    switch (tshi_dtypes[to->dtype].size) {
    case 2: TSHI_KERNEL_MOVE(uint16_t); break;
    case 4: TSHI_KERNEL_MOVE(uint32_t); break;
    default: TSHI_KERNEL_MOVE(uint64_t); break;
    }
}
#undef TSHI_KERNEL_MOVE

/* to = from, n elements of different dtypes: exact between integers, else through tsh_real. */
TSHI_APART void tshi_kernel_cast(int64_t n, const tshi_operand *to, const tshi_operand *from) {
    enum { BLOCK = 256 };
    const tshi_dtype *y = &tshi_dtypes[to->dtype], *x = &tshi_dtypes[from->dtype];
    tshi_operand out = *to, in = *from;
    union {
        int64_t integer[BLOCK];
        tsh_real real[BLOCK];
    } block;
    for (; n > 0; n -= BLOCK) {
        const int64_t m = tshi_base_min(BLOCK, n);
        if (x->floating || y->floating) {
            x->load(in.data, in.step, m, block.real);
            y->store(out.data, out.step, m, block.real);
        } else {
            x->load_integer(in.data, in.step, m, block.integer);
            y->store_integer(out.data, out.step, m, block.integer);
        }
        tshi_kernel_move(&in, m * in.step);
        tshi_kernel_move(&out, m * out.step);
    }
}

/* Copies by blocks of a fixed size, which need no call: libc's memcpy costs more for short runs. */
TSHI_APART void tshi_kernel_move_dense(void *to, const void *from, size_t bytes) {
    enum { BLOCK = 128 };
    size_t at;
    for (at = 0; at + BLOCK <= bytes; at += BLOCK)
        memcpy((char *)to + at, (const char *)from + at, BLOCK);
    if (at < bytes) memcpy((char *)to + at, (const char *)from + at, bytes - at);
}

/* x[0] = x[1], converted if the dtypes differ. */
static void tshi_kernel_copy(int64_t n, const tshi_operand *x, const void *params) {
    (void)params;
    if (x[0].dtype != x[1].dtype)
        tshi_kernel_cast(n, &x[0], &x[1]);
    else if (x[0].step != 1 || x[1].step != 1)
        tshi_kernel_move_each(n, &x[0], &x[1]);
    else
        tshi_kernel_move_dense(x[0].data, x[1].data, tshi_dtype_bytes(x[0].dtype, n));
}

/* x[0] += x[1] */
TSHI_INLINE void tshi_kernel_add_body(int64_t n, const tshi_operand *x, const void *params) {
    tsh_real pad[TSHI_BLOCK];
    int64_t e;
    (void)params;
    for (e = 0; e < n; e += TSHI_BLOCK)
        tshi_kernel_store(&x[0], e, n, tshi_kernel_load(&x[1], e, n, pad), 1);
}
TSHI_KERNEL(tshi_kernel_add, void);

/* Copies a tensor's local values to row-major values of a dtype, or back. */
static void tshi_kernel_dense(const tsh_tensor *t, void *dense, tsh_dtype dtype, int to_tensor) {
    int64_t stride[TSH_MAX_DIMS];
    tshi_loop loop;
    tshi_tensor_strides(t->local, t->ndim, stride);
    tshi_kernel_space(&loop, t);
    if (to_tensor) tshi_kernel_tensor(&loop, t);
    tshi_kernel_add_operand(&loop, t, dense, stride, dtype);
    if (!to_tensor) tshi_kernel_tensor(&loop, t);
    tshi_kernel_run(&loop, tshi_kernel_copy, NULL);
}

/* Returns t's local values, row-major and of a dtype: in place, or copied to *scratch, which the
 * caller releases. NULL: no memory. The functions below do the same for t's dtype, for tsh_real. */
static void *tshi_kernel_packed_as(const tsh_tensor *t, tsh_dtype dtype, tshi_block **scratch) {
    *scratch = NULL;
    if (t->dtype == dtype && tshi_tensor_is_dense(t)) return tshi_tensor_at(t);
    *scratch = tshi_mem_alloc(t->ctx, TSH_MEM_STEP, tshi_dtype_bytes(dtype, tsh_local_numel(t)));
    if (!*scratch) return NULL;
    tshi_kernel_dense(t, tshi_mem_data(*scratch), dtype, 0);
    return tshi_mem_data(*scratch);
}

static void *tshi_kernel_packed(const tsh_tensor *t, tshi_block **scratch) {
    return tshi_kernel_packed_as(t, t->dtype, scratch);
}

static tsh_real *tshi_kernel_packed_reals(const tsh_tensor *t, tshi_block **scratch) {
    return (tsh_real *)tshi_kernel_packed_as(t, TSH_REAL, scratch);
}

/* Returns t's values as tsh_real, and their strides: in place, or row-major in *scratch, which the
 * caller releases. NULL: no memory. */
static tsh_real *tshi_kernel_reals_of(const tsh_tensor *t, int64_t *stride, tshi_block **scratch) {
    *scratch = NULL;
    memcpy(stride, t->stride, sizeof t->stride);
    if (t->dtype == TSH_REAL) return tshi_tensor_values(t);
    tshi_tensor_strides(t->local, t->ndim, stride);
    return tshi_kernel_packed_reals(t, scratch);
}

/* Returns where an op that computes tsh_real puts its output: in place, or, for another dtype, in
 * *scratch, which tshi_kernel_output_done rounds to out's dtype. NULL: no memory. */
static tsh_real *tshi_kernel_output(tsh_tensor *out, tshi_block **scratch) {
    *scratch = NULL;
    if (out->dtype == TSH_REAL) return tshi_tensor_values(out);
    *scratch = tshi_mem_alloc(out->ctx, TSH_MEM_STEP, tshi_dtype_reals(tsh_local_numel(out)));
    return *scratch ? (tsh_real *)tshi_mem_data(*scratch) : NULL;
}

static void tshi_kernel_output_done(tsh_tensor *out, tshi_block *scratch) {
    if (!scratch) return;
    tshi_kernel_dense(out, tshi_mem_data(scratch), TSH_REAL, 1);
    tshi_mem_release(out->ctx, scratch);
}

/* Views a tensor (.., N) as a matrix (*rows, N) whose rows are *stride elements apart. Returns 0 if
 * t's strides do not allow it. */
TSHI_OUTLINE int tshi_kernel_rows(const tsh_tensor *t, int64_t *rows, int64_t *stride) {
    int64_t step = 0;
    int d;
    *rows = tshi_tensor_product(t->local, t->ndim - 1);
    *stride = t->local[t->ndim - 1];
    for (d = t->ndim - 2; d >= 0; d--) {
        if (t->local[d] == 1) continue;
        if (!step) *stride = step = t->stride[d];
        if (t->stride[d] != step) return 0;
        step *= t->local[d];
    }
    return 1;
}

/* ========================================================================== */
/* >>gemm                                                MARK: - gemm (private) */
/* The built-in matrix product: packed, cache-blocked, any strides, one        */
/* micro-kernel per instruction set behind one table.                          */
/* Needs: >>kernel.                                                             */
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
 * to back: in step p it loads nr values of B and adds the outer product with mr values of A to the
 * tile. It differs from BLIS in two ways. A B sliver is packed just before its first use, while it
 * is in cache, and only kept if m has a second block. And A or B is read in place if packing would
 * not pay: the micro-kernel takes A with any strides and B with any row stride.
 *
 * THE ORDER OF SUMS. Element (i, j) starts as beta D, where D is C or, for example, a bias. For
 * each slice of kc (which depends on k alone) acc = a[0] b[0] + a[1] b[1] + ... from left to right,
 * then C = C + alpha acc. So it depends on its row of A, its column of B and the kernel, not on
 * m, n, strides, packing, pointers or its place in the tile: a column-parallel product is bitwise
 * the columns of the whole one. (The kernels without intrinsics need a compiler that does not
 * contract x * y + z: -std=c99 or -ffp-contract=off.) */

/* TSHI_GEMM_FLOAT: 1 if TSHARD_REAL is float, for #if. */
#define TSHI_GEMM_JOIN_(x, y) x##y
#define TSHI_GEMM_JOIN(x, y)  TSHI_GEMM_JOIN_(x, y)
#define TSHI_GEMM_IS_float    1
#define TSHI_GEMM_IS_double   0
#define TSHI_GEMM_FLOAT       TSHI_GEMM_JOIN(TSHI_GEMM_IS_, TSHARD_REAL)

/* A strided matrix. A and B may be of any dtype that ops compute with: packing converts them. C and
 * D are of tsh_real. */
typedef struct tshi_matrix {
    void *data;
    int64_t row, column; /* strides, in elements */
    tsh_dtype dtype;
} tshi_matrix;

static tshi_matrix tshi_gemm_matrix_of(void *data, tsh_dtype dtype, int64_t row, int64_t column) {
    const tshi_matrix m = {data, row, column, dtype};
    return m;
}

static tshi_matrix tshi_gemm_matrix(tsh_real *data, int64_t row, int64_t column) {
    return tshi_gemm_matrix_of(data, TSH_REAL, row, column);
}

/* Returns m transposed. */
static tshi_matrix tshi_gemm_transposed(tshi_matrix m) {
    return tshi_gemm_matrix_of(m.data, m.dtype, m.column, m.row);
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

/* Cache lines to prefetch, a few at a time: `at` goes from `first` to `last` by `step`; then first
 * and last move by `along`, and it starts again, `left` times. */
typedef struct tshi_gemm_walk {
    const tsh_real *at, *first, *last;
    int64_t step, along, left;
} tshi_gemm_walk;

/* A micro-kernel computes C(rows, cols) = alpha A(rows, k) B(k, cols) + D. rs.: row strides, cs.:
 * column strides; those of C and D are 1. */
typedef struct tshi_gemm_tile {
    int64_t k;
    const tsh_real *a;
    int64_t rsa, csa;
    const tsh_real *b;
    int64_t rsb, csb;
    tsh_real alpha;
    int add; /* 0: D is 0 and not read */
    const tsh_real *d;
    int64_t rsd;
    tsh_real *c;
    int64_t rsc;
    tsh_real *sums; /* scratch of a stream: (rows, cols) */
    tshi_gemm_walk *walk;
} tshi_gemm_tile;

typedef void (*tshi_gemm_tile_fn)(const tshi_gemm_tile *t, int rows, int cols);

/* A micro-kernel: a row of tshi_gemm_kernels. */
struct tshi_gemm_kernel {
    const char *name;
    int mr, nr;     /* rows and columns of a tile */
    int mc, kc, nc; /* the largest blocks: multiples of mr, of 4 and of nr */
    int isa;                /* the instruction set that it needs: TSHI_ISA_... */
    tshi_gemm_tile_fn tile; /* csb = 1; 1 <= rows <= mr; cols is nr or nr / 2 */
    tshi_gemm_tile_fn dot;  /* (optional) the same for rsb = 1: few rows, B not packed */
    /* (optional) few rows, B not packed, any multiple of nr / 2 columns; uses sums, no walk */
    tshi_gemm_tile_fn stream;
};

enum {
    TSHI_GEMM_TILE_MAX = 384, /* the largest mr * nr */
    TSHI_GEMM_THIN = 2,       /* a product of so few rows is bound by reading B */
    TSHI_GEMM_STRETCH = 32,   /* steps of k after which a tile prefetches, again and again: */
    TSHI_GEMM_FETCH = 4,      /* lines of the next sliver of B, and */
    TSHI_GEMM_FETCH_C = 2,    /* rows of C */
    TSHI_GEMM_C_STRIP = 8,    /* columns that the reference kernel computes at a time */
    TSHI_GEMM_FEW = 6,        /* a product of so few rows (mr at most) streams a B of contiguous */
    TSHI_GEMM_STEPS = 8       /* rows: reads it once, so many rows at a time */
};

/* -- the reference micro-kernel ------------------------------------------- */

/* The reference that the others are tested against; the only kernel without GNU C. It computes
 * strips of one row and constant width, which all compilers keep in vector registers. */
static void tshi_gemm_tile_c(const tshi_gemm_tile *t, int rows, int cols) {
    for (int i = 0; i < rows; i++) {
        for (int j = 0; j < cols; j += TSHI_GEMM_C_STRIP) {
            tsh_real acc[TSHI_GEMM_C_STRIP] = {0}, *c = t->c + i * t->rsc + j;
            const tsh_real *d = t->d + i * t->rsd + j;
            for (int64_t p = 0; p < t->k; p++) {
                const tsh_real x = t->a[i * t->rsa + p * t->csa], *b = t->b + p * t->rsb + j;
                for (int l = 0; l < TSHI_GEMM_C_STRIP; l++) acc[l] += x * b[l];
            }
            for (int l = 0; l < TSHI_GEMM_C_STRIP; l++)
                c[l] = t->alpha * acc[l] + (t->add ? d[l] : 0);
        }
    }
}

/* -- vector micro-kernels ------------------------------------------------- */

#if TSHI_VECTORS

/* One source for all instruction sets. An `isa` defines VEC_isa (a register), LOAD, STORE, SET (one
 * value in all lanes) and FMA (x * y + z). Rows are unrolled by hand, so that accumulators are
 * registers at every level of optimisation: X(isa, i, g) is row i of group g = i / 3. It is read at
 * the pointer of its group plus 0, 1 or 2 row strides, which x86 does in one operand. */
#define TSHI_GEMM_ROWS6(X, isa)                                                                    \
    X(isa, 0, 0) X(isa, 1, 0) X(isa, 2, 0) X(isa, 3, 1) X(isa, 4, 1) X(isa, 5, 1)
#define TSHI_GEMM_ROWS12(X, isa)                                                                   \
    TSHI_GEMM_ROWS6(X, isa)                                                                        \
    X(isa, 6, 2) X(isa, 7, 2) X(isa, 8, 2) X(isa, 9, 3) X(isa, 10, 3) X(isa, 11, 3)

/* Prefetches the next line. */
TSHI_INLINE void tshi_gemm_fetch(tshi_gemm_walk *w) {
    TSHI_PREFETCH(w->at);
    if (w->at != w->last)
        w->at += w->step;
    else if (w->left > 0) {
        w->left--;
        w->at = w->first += w->along;
        w->last += w->along;
    }
}

#define TSHI_GEMM_ZERO(isa, i, g) c0[i] = c1[i] = zero;
#define TSHI_GEMM_STEP(isa, i, g)                                                                  \
    if (rows > i) {                                                                                \
        x = TSHI_GEMM_SET_##isa(a##g[(i - 3 * g) * rsa]);                                          \
        c0[i] = TSHI_GEMM_FMA_##isa(x, b0, c0[i]);                                                 \
        if (vecs > 1) c1[i] = TSHI_GEMM_FMA_##isa(x, b1, c1[i]);                                   \
    }
#define TSHI_GEMM_PUT(isa, c, d, v)                                                                \
    TSHI_GEMM_STORE_##isa(c, TSHI_GEMM_FMA_##isa(alpha, v, add ? TSHI_GEMM_LOAD_##isa(d) : zero));
#define TSHI_GEMM_OUT(isa, i, g)                                                                   \
    if (rows > i) {                                                                                \
        TSHI_GEMM_PUT(isa, to + i * rsc, d + i * rsd, c0[i])                                       \
        if (vecs > 1) {                                                                            \
            TSHI_GEMM_PUT(isa, to + i * rsc + lanes, d + i * rsd + lanes, c1[i])                   \
        }                                                                                          \
    }

/* tshi_gemm_rows_isa computes a tile of rows x vecs registers, both constant after inlining;
 * tshi_gemm_tile_isa one of any number of rows up to mr, as mr or 8 + 4 + 2 + 1.
 * tshi_gemm_stream_isa reads B in the order of memory, from end to end, and keeps the sums of all
 * columns meanwhile: few rows of A leave little to compute, so the time is that of reading B. */
#define TSHI_GEMM_KERNEL(isa, TARGET, ROWS, mr)                                                    \
    TARGET TSHI_INLINE void tshi_gemm_rows_##isa(const tshi_gemm_tile *t, const int rows,          \
                                                 const int vecs) {                                 \
        const int lanes = (int)(sizeof(TSHI_GEMM_VEC_##isa) / sizeof(tsh_real));                   \
        const int64_t rsa = t->rsa, csa = t->csa;                                                  \
        const tsh_real *b = t->b, *a0 = t->a, *a1 = rows > 3 ? a0 + 3 * rsa : a0;                  \
        const tsh_real *a2 = rows > 6 ? a0 + 6 * rsa : a0, *a3 = rows > 9 ? a0 + 9 * rsa : a0;     \
        const tsh_real *c = t->c;                                                                  \
        const TSHI_GEMM_VEC_##isa zero = {0};                                                      \
        TSHI_GEMM_VEC_##isa x, b0, b1, c0[mr], c1[mr];                                             \
        ROWS(TSHI_GEMM_ZERO, isa)                                                                  \
        (void)a2, (void)a3; /* not in tiles of 6 rows */                                           \
        for (int64_t p = t->k, rest; p > 0;) {                                                     \
            rest = p > TSHI_GEMM_STRETCH ? p - TSHI_GEMM_STRETCH : 0;                              \
            for (int i = 0; i < TSHI_GEMM_FETCH; i++) tshi_gemm_fetch(t->walk);                    \
            for (int i = 0; i < TSHI_GEMM_FETCH_C; i++) {                                          \
                TSHI_PREFETCH(c);                                                                  \
                if (vecs > 1) TSHI_PREFETCH(c + lanes);                                            \
                c += c == t->c + (rows - 1) * t->rsc ? 0 : t->rsc;                                 \
            }                                                                                      \
            for (; p > rest; p--) {                                                                \
                b0 = TSHI_GEMM_LOAD_##isa(b);                                                      \
                b1 = vecs > 1 ? TSHI_GEMM_LOAD_##isa(b + lanes) : b0;                              \
                ROWS(TSHI_GEMM_STEP, isa)                                                          \
                b += t->rsb;                                                                       \
                a0 += csa;                                                                         \
                a1 += csa;                                                                         \
                a2 += csa;                                                                         \
                a3 += csa;                                                                         \
            }                                                                                      \
        }                                                                                          \
        const TSHI_GEMM_VEC_##isa alpha = TSHI_GEMM_SET_##isa(t->alpha);                           \
        const int add = t->add;                                                                    \
        const int64_t rsc = t->rsc, rsd = t->rsd;                                                  \
        const tsh_real *d = t->d;                                                                  \
        tsh_real *to = t->c;                                                                       \
        ROWS(TSHI_GEMM_OUT, isa)                                                                   \
    }                                                                                              \
    TARGET static void tshi_gemm_tile_##isa(const tshi_gemm_tile *t, int rows, int cols) {         \
        const int wide = (size_t)cols > sizeof(TSHI_GEMM_VEC_##isa) / sizeof(tsh_real);            \
        tshi_gemm_tile part = *t;                                                                  \
        int left = rows;                                                                           \
        if (rows == mr) {                                                                          \
            if (wide)                                                                              \
                tshi_gemm_rows_##isa(t, mr, 2);                                                    \
            else                                                                                   \
                tshi_gemm_rows_##isa(t, mr, 1);                                                    \
            return;                                                                                \
        }                                                                                          \
        TSHI_GEMM_PART(isa, mr, 8)                                                                 \
        TSHI_GEMM_PART(isa, mr, 4)                                                                 \
        TSHI_GEMM_PART(isa, mr, 2)                                                                 \
        TSHI_GEMM_PART(isa, mr, 1)                                                                 \
    }                                                                                              \
    TARGET TSHI_INLINE void tshi_gemm_steps_##isa(const tshi_gemm_tile *t, int64_t p,              \
                                                  const int steps, int rows, int cols) {           \
        const int lanes = (int)(sizeof(TSHI_GEMM_VEC_##isa) / sizeof(tsh_real));                   \
        const tsh_real *b = t->b + p * t->rsb;                                                     \
        tsh_real x[TSHI_GEMM_FEW][TSHI_GEMM_STEPS], *sums = t->sums;                               \
        /* bytes to the rows that are read next, perhaps behind the last one */                    \
        const uintptr_t next = (uintptr_t)(steps * t->rsb) * sizeof *b;                            \
        TSHI_GEMM_VEC_##isa y[TSHI_GEMM_STEPS], sum;                                               \
        for (int i = 0; i < rows; i++)                                                             \
            for (int q = 0; q < steps; q++) x[i][q] = t->a[i * t->rsa + (p + q) * t->csa];         \
        for (int j = 0; j < cols; j += lanes, b += lanes, sums += lanes) {                         \
            for (int q = 0; q < steps; q++) {                                                      \
                y[q] = TSHI_GEMM_LOAD_##isa(b + q * t->rsb);                                       \
                TSHI_PREFETCH_L2((const void *)((uintptr_t)(b + q * t->rsb) + next));              \
            }                                                                                      \
            for (int i = 0; i < rows; i++) {                                                       \
                sum = TSHI_GEMM_LOAD_##isa(sums + i * cols);                                       \
                for (int q = 0; q < steps; q++)                                                    \
                    sum = TSHI_GEMM_FMA_##isa(TSHI_GEMM_SET_##isa(x[i][q]), y[q], sum);            \
                TSHI_GEMM_STORE_##isa(sums + i * cols, sum);                                       \
            }                                                                                      \
        }                                                                                          \
    }                                                                                              \
    TARGET static void tshi_gemm_stream_##isa(const tshi_gemm_tile *t, int rows, int cols) {       \
        const int lanes = (int)(sizeof(TSHI_GEMM_VEC_##isa) / sizeof(tsh_real)), add = t->add;     \
        const TSHI_GEMM_VEC_##isa zero = {0}, alpha = TSHI_GEMM_SET_##isa(t->alpha);               \
        int64_t p = 0;                                                                             \
        memset(t->sums, 0, (size_t)rows * (size_t)cols * sizeof *t->sums);                         \
        for (; p + TSHI_GEMM_STEPS <= t->k; p += TSHI_GEMM_STEPS)                                  \
            tshi_gemm_steps_##isa(t, p, TSHI_GEMM_STEPS, rows, cols);                              \
        for (; p < t->k; p++) tshi_gemm_steps_##isa(t, p, 1, rows, cols);                          \
        for (int i = 0; i < rows; i++)                                                             \
            for (int j = 0; j < cols; j += lanes)                                                  \
                TSHI_GEMM_PUT(isa, t->c + i * t->rsc + j, t->d + i * t->rsd + j,                   \
                              TSHI_GEMM_LOAD_##isa(t->sums + i * cols + j))                        \
    }
#define TSHI_GEMM_PART(isa, mr, size)                                                              \
    for (; mr > size && left >= size; left -= size) {                                              \
        if (wide)                                                                                  \
            tshi_gemm_rows_##isa(&part, size, 2);                                                  \
        else                                                                                       \
            tshi_gemm_rows_##isa(&part, size, 1);                                                  \
        part.a += size * part.rsa;                                                                 \
        part.c += size * part.rsc;                                                                 \
        part.d += size * part.rsd;                                                                 \
    }

/* v128: 128-bit vectors of GNU C, for every processor: SSE2, NEON, ... */
typedef tsh_real tshi_gemm_v128
    __attribute__((vector_size(16), aligned(sizeof(tsh_real)), may_alias));
#define TSHI_GEMM_VEC_v128          tshi_gemm_v128
#define TSHI_GEMM_LOAD_v128(p)      (*(const tshi_gemm_v128 *)(p))
#define TSHI_GEMM_STORE_v128(p, v)  (*(tshi_gemm_v128 *)(p) = (v))
/* s in all lanes. Written out, because gcc does not mix a scalar and a vector where scalars are
 * computed in a wider format (x87, s390x); a macro, because i386 without SSE passes no vectors. */
#if TSHI_GEMM_FLOAT
#define TSHI_GEMM_LANES(s)                                                                         \
    { (s), (s), (s), (s) }
#else
#define TSHI_GEMM_LANES(s)                                                                         \
    { (s), (s) }
#endif
#define TSHI_GEMM_SET_v128(s)                                                                      \
    __extension__({                                                                                \
        const tsh_real set_value = (s);                                                            \
        const tshi_gemm_v128 set_lanes = TSHI_GEMM_LANES(set_value);                               \
        set_lanes;                                                                                 \
    })
#define TSHI_GEMM_FMA_v128(x, y, z) ((x) * (y) + (z))
TSHI_GEMM_KERNEL(v128, , TSHI_GEMM_ROWS6, 6)

#if TSHI_X86
#if TSHI_GEMM_FLOAT
#define TSHI_GEMM_REG(bits)    __m##bits
#define TSHI_GEMM_OP(bits, op) _mm##bits##_##op##_ps
#else
#define TSHI_GEMM_REG(bits)    __m##bits##d
#define TSHI_GEMM_OP(bits, op) _mm##bits##_##op##_pd
#endif

#define TSHI_GEMM_VEC_avx2   TSHI_GEMM_REG(256)
#define TSHI_GEMM_LOAD_avx2  TSHI_GEMM_OP(256, loadu)
#define TSHI_GEMM_STORE_avx2 TSHI_GEMM_OP(256, storeu)
#define TSHI_GEMM_SET_avx2   TSHI_GEMM_OP(256, set1)
#define TSHI_GEMM_FMA_avx2   TSHI_GEMM_OP(256, fmadd)
TSHI_GEMM_KERNEL(avx2, TSHI_AVX2, TSHI_GEMM_ROWS6, 6)

#define TSHI_GEMM_VEC_avx512   TSHI_GEMM_REG(512)
#define TSHI_GEMM_LOAD_avx512  TSHI_GEMM_OP(512, loadu)
#define TSHI_GEMM_STORE_avx512 TSHI_GEMM_OP(512, storeu)
#define TSHI_GEMM_SET_avx512   TSHI_GEMM_OP(512, set1)
#define TSHI_GEMM_FMA_avx512   TSHI_GEMM_OP(512, fmadd)
TSHI_GEMM_KERNEL(avx512, TSHI_AVX512, TSHI_GEMM_ROWS12, 12)
#endif /* TSHI_X86 */
#endif /* TSHI_VECTORS */

/* -- few rows ------------------------------------------------------------- */

#if TSHI_X86 && TSHI_GEMM_FLOAT
/* A product with one or two rows is bound by reading B; packing B would double the traffic. Columns
 * of B are contiguous here, so 4 steps of 8 columns are transposed in registers. The order of each
 * element's sum is that of a tile. */
#define TSHI_GEMM_PAIR(s)                                                                          \
    _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(s)), _mm_loadu_ps((s) + 4 * csb), 1)
#define TSHI_GEMM_GROUP(g)                                                                         \
    if (groups > g) {                                                                              \
        const float *s = b + 8 * g * csb;                                                          \
        const __m256 r0 = TSHI_GEMM_PAIR(s), r1 = TSHI_GEMM_PAIR(s + csb);                         \
        const __m256 r2 = TSHI_GEMM_PAIR(s + 2 * csb), r3 = TSHI_GEMM_PAIR(s + 3 * csb);           \
        for (int l = 0; p % 16 == 0 && l < 8; l++) {                                               \
            TSHI_PREFETCH(s + l * csb + 32);                                                       \
            TSHI_PREFETCH_L2(s + (l + 32) * csb); /* columns of later groups */                    \
        }                                                                                          \
        const __m256 u0 = _mm256_unpacklo_ps(r0, r1), u1 = _mm256_unpackhi_ps(r0, r1);             \
        const __m256 u2 = _mm256_unpacklo_ps(r2, r3), u3 = _mm256_unpackhi_ps(r2, r3);             \
        acc[g] = _mm256_fmadd_ps(x0, _mm256_shuffle_ps(u0, u2, 0x44), acc[g]);                     \
        acc[g] = _mm256_fmadd_ps(x1, _mm256_shuffle_ps(u0, u2, 0xee), acc[g]);                     \
        acc[g] = _mm256_fmadd_ps(x2, _mm256_shuffle_ps(u1, u3, 0x44), acc[g]);                     \
        acc[g] = _mm256_fmadd_ps(x3, _mm256_shuffle_ps(u1, u3, 0xee), acc[g]);                     \
    }

TSHI_AVX2 TSHI_INLINE void tshi_gemm_dot_row(const tshi_gemm_tile *t, int row, int col,
                                             const int groups) {
    const int64_t csa = t->csa, csb = t->csb;
    const float *a = t->a + row * t->rsa, *b = t->b + col * csb;
    const __m256 zero = {0};
    __m256 acc[2] = {zero, zero};
    int64_t p = 0;
    for (; p + 4 <= t->k; p += 4, a += 4 * csa, b += 4) {
        const __m256 x0 = _mm256_set1_ps(a[0]), x1 = _mm256_set1_ps(a[csa]);
        const __m256 x2 = _mm256_set1_ps(a[2 * csa]), x3 = _mm256_set1_ps(a[3 * csa]);
        TSHI_GEMM_GROUP(0)
        TSHI_GEMM_GROUP(1)
    }
    const __m256 alpha = _mm256_set1_ps(t->alpha);
    const int add = t->add;
    for (int g = 0; g < groups; g++) {
        const float *s = b + 8 * g * csb;
        const float *d = t->d + row * t->rsd + col + 8 * g;
        float *c = t->c + row * t->rsc + col + 8 * g;
        for (int64_t q = 0; q < t->k - p; q++, s++) {
            const __m256 y = _mm256_setr_ps(s[0], s[csb], s[2 * csb], s[3 * csb], s[4 * csb],
                                            s[5 * csb], s[6 * csb], s[7 * csb]);
            acc[g] = _mm256_fmadd_ps(_mm256_set1_ps(a[q * csa]), y, acc[g]);
        }
        TSHI_GEMM_PUT(avx2, c, d, acc[g])
    }
}

TSHI_AVX2 static void tshi_gemm_dot_avx2(const tshi_gemm_tile *t, int rows, int cols) {
    for (int i = 0; i < rows; i++) {
        int j = 0;
        for (; cols - j >= 16; j += 16) tshi_gemm_dot_row(t, i, j, 2);
        if (j < cols) tshi_gemm_dot_row(t, i, j, 1);
    }
}
#define TSHI_GEMM_DOT tshi_gemm_dot_avx2
#else
#define TSHI_GEMM_DOT NULL
#endif

/* -- the table ------------------------------------------------------------ */

/* Best first; the last row runs everywhere. Block sizes: mc * kc floats fill at most half of an L2
 * cache, kc * nr an L1 cache; nc bounds the scratch. */
static const tshi_gemm_kernel tshi_gemm_kernels[] = {
#if TSHI_X86
    {"avx512", 12, 128 / sizeof(tsh_real), 264, 384, 1024, TSHI_ISA_AVX512, tshi_gemm_tile_avx512,
     TSHI_GEMM_DOT, tshi_gemm_stream_avx512},
    {"avx2", 6, 64 / sizeof(tsh_real), 132, 384, 1024, TSHI_ISA_AVX2, tshi_gemm_tile_avx2,
     TSHI_GEMM_DOT, tshi_gemm_stream_avx2},
#endif
#if TSHI_VECTORS
    {"v128", 6, 32 / sizeof(tsh_real), 132, 256, 512, TSHI_ISA_PORTABLE, tshi_gemm_tile_v128, NULL,
     tshi_gemm_stream_v128},
#endif
    {"c", 4, 2 * TSHI_GEMM_C_STRIP, 128, 256, 512, TSHI_ISA_PORTABLE, tshi_gemm_tile_c, NULL,
     NULL}};

/* Returns the best kernel for this processor. */
static const tshi_gemm_kernel *tshi_gemm_pick(void) {
    const int isa = tshi_kernel_isa();
    const tshi_gemm_kernel *kernel = tshi_gemm_kernels;
    while (kernel->isa > isa) kernel++;
    return kernel;
}

/* -- packing -------------------------------------------------------------- */

/* dst[p * width + i] = src[i * inc + p * ld] for from <= i < valid, 0 for valid <= i < width. With
 * from = 0, the reference that tshi_gemm_pack is tested against. */
static void tshi_gemm_pack_lanes(tsh_real *TSHI_RESTRICT dst, int width, int from, int valid,
                                 int64_t k, const tsh_real *TSHI_RESTRICT src, int64_t inc,
                                 int64_t ld) {
    for (int64_t p = 0; p < k; p++) {
        for (int i = from; i < valid; i++) dst[p * width + i] = src[i * inc + p * ld];
        for (int i = valid; i < width; i++) dst[p * width + i] = 0;
    }
}

#if TSHI_X86 && TSHI_GEMM_FLOAT
/* With SSE, which every x86-64 has: packing is bound by memory, wider registers would not help. */

/* Packs 4 steps whose lanes are contiguous. more: 8 steps or more follow; prefetches steps 8-11. */
TSHI_INLINE void tshi_gemm_pack_rows(float *TSHI_RESTRICT dst, int width, int lanes,
                                     const float *TSHI_RESTRICT src, int64_t ld, int more) {
    for (int i = 0; i < lanes; i += 4) {
        for (int p = 0; p < 4 && more && i % 16 == 0; p++) TSHI_PREFETCH(src + (p + 8) * ld + i);
        for (int p = 0; p < 4; p++)
            _mm_storeu_ps(dst + p * width + i, _mm_loadu_ps(src + p * ld + i));
    }
}

/* Packs up to 16 steps, a cache line of each lane, as 4 x 4 transposes. more: prefetches the line
 * after the next. */
TSHI_INLINE void tshi_gemm_pack_columns(float *TSHI_RESTRICT dst, int width, int lanes,
                                        int64_t steps, const float *TSHI_RESTRICT src, int64_t inc,
                                        int more) {
    for (int i = 0; i < lanes; i += 4) {
        for (int l = 0; l < 4 && more; l++) TSHI_PREFETCH(src + (i + l) * inc + 32);
        for (int64_t p = 0; p < steps; p += 4) {
            const float *s = src + i * inc + p;
            float *d = dst + p * width + i;
            __m128 r0 = _mm_loadu_ps(s), r1 = _mm_loadu_ps(s + inc);
            __m128 r2 = _mm_loadu_ps(s + 2 * inc), r3 = _mm_loadu_ps(s + 3 * inc);
            _MM_TRANSPOSE4_PS(r0, r1, r2, r3);
            _mm_storeu_ps(d, r0);
            _mm_storeu_ps(d + width, r1);
            _mm_storeu_ps(d + 2 * width, r2);
            _mm_storeu_ps(d + 3 * width, r3);
        }
    }
}

/* dst[p * width + i] = src[i * inc + p * ld] for i < valid, else 0; p < k, i < width. */
TSHI_OUTLINE void tshi_gemm_pack(float *TSHI_RESTRICT dst, int width, int valid, int64_t k,
                           const float *TSHI_RESTRICT src, int64_t inc, int64_t ld) {
    const int lanes = inc == 1 || ld == 1 ? valid & ~3 : 0;
    const int64_t steps = lanes > 0 ? k & ~(int64_t)3 : 0, block = inc == 1 ? 4 : 16;
    for (int64_t q = 0; q < steps; q += block) {
        const int64_t end = tshi_base_min(q + block, steps);
        if (inc == 1)
            tshi_gemm_pack_rows(dst + q * width, width, lanes, src + q * ld, ld, q + 12 <= k);
        else
            tshi_gemm_pack_columns(dst + q * width, width, lanes, end - q, src + q, inc,
                                   q + 32 < k);
        if (lanes < width)
            tshi_gemm_pack_lanes(dst + q * width, width, lanes, valid, end - q, src + q * ld, inc,
                                 ld);
    }
    if (steps < k)
        tshi_gemm_pack_lanes(dst + steps * width, width, 0, valid, k - steps, src + steps * ld, inc,
                             ld);
}
#else
TSHI_OUTLINE void tshi_gemm_pack(tsh_real *TSHI_RESTRICT dst, int width, int valid, int64_t k,
                           const tsh_real *TSHI_RESTRICT src, int64_t inc, int64_t ld) {
    tshi_gemm_pack_lanes(dst, width, 0, valid, k, src, inc, ld);
}
#endif

/* Packs `valid` rows of m, k columns long, as a sliver of width `width`, converted to tsh_real. */
static void tshi_gemm_pack_matrix(tsh_real *dst, int width, int valid, int64_t k, tshi_matrix m) {
    const tshi_dtype *dtype = &tshi_dtypes[m.dtype];
    if (m.dtype == TSH_REAL) {
        tshi_gemm_pack(dst, width, valid, k, (const tsh_real *)m.data, m.row, m.column);
        return;
    }
    for (int64_t p = 0; p < k; p++, dst += width) {
        dtype->load((const char *)m.data + p * m.column * dtype->size, m.row, valid, dst);
        for (int i = valid; i < width; i++) dst[i] = 0;
    }
}

/* -- the loops around the micro-kernel ------------------------------------ */

/* A callback that a long product calls every TSHI_GEMM_INTERVAL multiply-adds (0.3 ms at 100
 * GFLOP/s), on the thread that computes it: collectives make progress meanwhile. */
typedef struct tshi_gemm_progress {
    void (*fn)(void *user);
    void *user;
} tshi_gemm_progress;

enum { TSHI_GEMM_INTERVAL = 1 << 24 };

typedef struct tshi_gemm_job {
    const tshi_gemm_kernel *kernel;
    tsh_real *pack_a, *pack_b;
    int64_t m, n, k;
    tsh_real alpha;
    int add;
    tshi_matrix a, b, d, c;
    int stream;                         /* 1: the kernel's `stream` computes what it can */
    const tshi_gemm_progress *progress; /* or NULL */
    int64_t since;                      /* multiply-adds since progress was called */
} tshi_gemm_job;

/* Returns the size of blocks that cut `length` evenly: no more blocks than of size max, a multiple
 * of unit. */
static int64_t tshi_gemm_even(int64_t length, int64_t max, int64_t unit) {
    const int64_t blocks = tshi_base_ceil(length, max);
    return tshi_base_ceil(tshi_base_ceil(length, blocks), unit) * unit;
}

/* C = beta D. */
static void tshi_gemm_scale(int64_t m, int64_t n, tsh_real beta, tshi_matrix d, tshi_matrix c) {
    for (int64_t i = 0; i < m; i++) {
        const tsh_real *from = tshi_gemm_at(d, i, 0);
        tsh_real *to = tshi_gemm_at(c, i, 0);
        if (beta == 1 && d.column == 1 && c.column == 1)
            memmove(to, from, (size_t)n * sizeof *to);
        else
            for (int64_t j = 0; j < n; j++)
                to[j * c.column] = beta == 0 ? 0 : beta * from[j * d.column];
    }
}

/* Computes a tile that the micro-kernel cannot write in place (csc or csd is not 1, or fewer
 * columns than its width are left) in a buffer, with the same arithmetic. */
static void tshi_gemm_edge(tshi_gemm_tile_fn tile, const tshi_gemm_tile *t, int rows, int cols,
                           int width, int64_t csd, int64_t csc) {
    tsh_real buffer[TSHI_GEMM_TILE_MAX];
    tshi_gemm_tile inner = *t;
    inner.d = inner.c = buffer;
    inner.rsd = inner.rsc = width;
    for (int i = 0; t->add && i < rows; i++)
        for (int j = 0; j < width; j++)
            buffer[i * width + j] = j < cols ? t->d[i * t->rsd + j * csd] : 0;
    tile(&inner, rows, width);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j++) t->c[i * t->rsc + j * csc] = buffer[i * width + j];
}

/* Returns the cache lines of B's sliver from column j on, which is packed next; none if j >= n. A
 * tile prefetches a few of them at a time: processors ignore more, or stall. */
static tshi_gemm_walk tshi_gemm_next(const tshi_gemm_job *job, int64_t j) {
    const int64_t line = 64 / (int64_t)sizeof(tsh_real);
    const int64_t cols = tshi_base_min(job->kernel->nr, job->n - j);
    const int across = job->b.column == 1; /* a line is part of a row, not of a column */
    const int64_t count = across ? job->k : cols, length = across ? cols : job->k;
    tsh_real *const b = (tsh_real *)job->b.data;
    tshi_gemm_walk w = {b, b, b, 0, 0, 0};
    if (cols <= 0 || job->b.dtype != TSH_REAL) return w;
    w.step = across ? job->b.row : job->b.column;
    w.along = line * (across ? job->b.column : job->b.row);
    w.left = tshi_base_ceil(length, line) - 1;
    w.at = w.first = b + j * job->b.column;
    w.last = w.first + (count - 1) * w.step;
    return w;
}

/* Returns how many columns of the product the kernel streams at a time, a multiple of nr, or 0: as
 * many as have room for their sums in the place of packed B. */
static int64_t tshi_gemm_streams(const tshi_gemm_job *job) {
    const tshi_gemm_kernel *kernel = job->kernel;
    if (!kernel->stream || job->m > TSHI_GEMM_FEW || job->b.dtype != TSH_REAL ||
        job->b.column != 1 || job->d.column != 1 || job->c.column != 1)
        return 0;
    return kernel->nr * (tshi_base_min(job->k, kernel->kc) / job->m);
}

/* Multiplies one A block and one B panel: C(m, n) = D + alpha A(m, k) B(k, n), m <= mc, k <= kc.
 * The `first` block of rows packs the panel; if it is also the `last`, all slivers of the panel use
 * the same memory. */
static void tshi_gemm_block(tshi_gemm_job *job, int first, int last) {
    const tshi_gemm_kernel *kernel = job->kernel;
    const int mr = kernel->mr, nr = kernel->nr, only = first && last;
    const int convert_a = job->a.dtype != TSH_REAL, convert_b = job->b.dtype != TSH_REAL;
    /* else A is read in place */
    const int pack_a = convert_a || (job->n > 4 * nr && job->m > 1);
    const int thin = job->m <= TSHI_GEMM_THIN && job->b.column != 1 && job->b.row == 1 &&
                     kernel->dot != NULL && !convert_b;
    const int pack_b = convert_b || (!thin && (job->b.column != 1 || job->m > 2 * mr || !only));
    const int64_t half = nr / 2, streamed = job->stream ? job->n / half * half : 0;
    tshi_gemm_walk walk;
    tshi_gemm_tile t;
    for (int64_t i = 0; pack_a && i < job->m; i += mr)
        tshi_gemm_pack_matrix(job->pack_a + i * job->k, mr, (int)tshi_base_min(mr, job->m - i),
                              job->k, tshi_gemm_from(job->a, i, 0));
    t.walk = &walk;
    t.k = job->k;
    t.alpha = job->alpha;
    t.add = job->add;
    t.rsd = job->d.row;
    t.rsc = job->c.row;
    t.rsa = pack_a ? 1 : job->a.row;
    t.csa = pack_a ? mr : job->a.column;
    if (streamed > 0) {
        t.a = pack_a ? job->pack_a : tshi_gemm_at(job->a, 0, 0);
        t.b = tshi_gemm_at(job->b, 0, 0);
        t.rsb = job->b.row;
        t.d = tshi_gemm_at(job->d, 0, 0);
        t.c = tshi_gemm_at(job->c, 0, 0);
        t.sums = job->pack_b;
        kernel->stream(&t, (int)job->m, (int)streamed);
        job->since += job->m * streamed * job->k;
    }
    for (int64_t j = streamed; j < job->n; j += nr) {
        const int cols = (int)tshi_base_min(nr, job->n - j), width = cols > nr / 2 ? nr : nr / 2;
        const tshi_gemm_tile_fn tile = thin && cols == width ? kernel->dot : kernel->tile;
        t.b = tshi_gemm_at(job->b, 0, j);
        t.rsb = job->b.row;
        t.csb = job->b.column;
        walk = tshi_gemm_next(job, first && pack_b ? j + nr : job->n);
        if (pack_b || cols < width) {
            tsh_real *sliver = job->pack_b + (only ? 0 : j * job->k);
            const tshi_matrix columns = tshi_gemm_transposed(tshi_gemm_from(job->b, 0, j));
            if (first) tshi_gemm_pack_matrix(sliver, width, cols, job->k, columns);
            t.b = sliver;
            t.rsb = width;
            t.csb = 1;
        }
        for (int64_t i = 0; i < job->m; i += mr) {
            const int rows = (int)tshi_base_min(mr, job->m - i);
            t.a = pack_a ? job->pack_a + i * job->k : tshi_gemm_at(job->a, i, 0);
            t.d = tshi_gemm_at(job->d, i, j);
            t.c = tshi_gemm_at(job->c, i, j);
            if (cols == width && job->c.column == 1 && job->d.column == 1)
                tile(&t, rows, width);
            else
                tshi_gemm_edge(tile, &t, rows, cols, width, job->d.column, job->c.column);
        }
        job->since += job->m * cols * job->k;
        if (job->progress && job->since >= TSHI_GEMM_INTERVAL) {
            job->progress->fn(job->progress->user);
            job->since = 0;
        }
    }
}

/* Runs the three outer loops (jc, pc, ic). */
static void tshi_gemm_blocks(const tshi_gemm_job *all) {
    const tshi_gemm_kernel *kernel = all->kernel;
    const int64_t mc = tshi_gemm_even(all->m, kernel->mc, kernel->mr);
    const int64_t kc = tshi_gemm_even(all->k, kernel->kc, 4);
    const int64_t stream = tshi_gemm_streams(all);
    const int64_t nc = stream > 0                 ? stream
                       : all->m <= TSHI_GEMM_THIN ? kernel->nr
                       : all->m <= mc             ? all->n
                                                  : kernel->nc;
    tshi_gemm_job part = *all;
    part.stream = stream > 0;
    for (int64_t j = 0; j < all->n; j += nc) {
        part.n = tshi_base_min(nc, all->n - j);
        for (int64_t p = 0; p < all->k; p += kc) {
            part.k = tshi_base_min(kc, all->k - p);
            part.b = tshi_gemm_from(all->b, p, j);
            part.add = all->add || p > 0;
            for (int64_t i = 0; i < all->m; i += mc) {
                part.m = tshi_base_min(mc, all->m - i);
                part.a = tshi_gemm_from(all->a, i, p);
                part.c = tshi_gemm_from(all->c, i, j);
                part.d = p > 0 ? part.c : tshi_gemm_from(all->d, i, j);
                tshi_gemm_block(&part, i == 0, i + mc >= all->m);
            }
        }
    }
}

/* Returns 1 if it is better to compute C^T = B^T A^T: a tile is fast where rows of C are contiguous
 * and as long as it is wide. */
static int tshi_gemm_transposes(int64_t m, int64_t n, int64_t rsc, int64_t csc, int nr) {
    if (n < m && n <= nr / 4) return 1;
    if (m < n && m <= nr / 4) return 0;
    return csc != 1 && rsc == 1;
}

/* Returns the number of elements of a packed A block, a multiple of 64 bytes. */
static int64_t tshi_gemm_block_size(const tshi_gemm_kernel *kernel, int64_t m, int64_t k) {
    int64_t rows = tshi_base_min(kernel->mc, m + kernel->mr);
    return tshi_base_ceil(rows * tshi_base_min(kernel->kc, k), 16) * 16;
}

/* Returns the bytes of scratch, aligned to 64, that one call needs: a packed A block and a packed B
 * panel, or one sliver of it if all of A is one block. */
static size_t tshi_gemm_scratch(const tshi_gemm_kernel *kernel, int64_t m, int64_t n, int64_t k,
                                int64_t rsc, int64_t csc) {
    int64_t columns = kernel->nr;
    if (tshi_gemm_transposes(m, n, rsc, csc, kernel->nr)) {
        const int64_t rows = m;
        m = n;
        n = rows;
    }
    if (m > kernel->mc) columns = tshi_base_min(kernel->nc, n + kernel->nr);
    return (size_t)(tshi_gemm_block_size(kernel, m, k) + columns * tshi_base_min(kernel->kc, k)) *
           sizeof(tsh_real);
}

/* C(m, n) = alpha A(m, k) B(k, n) + beta D(m, n) on one thread. D is C, or does not overlap it; its
 * strides may be 0, so that a bias needs no pass of its own. */
static void tshi_gemm_run(const tshi_gemm_kernel *kernel, void *scratch,
                          const tshi_gemm_progress *progress, int64_t m, int64_t n, int64_t k,
                          tsh_real alpha, tshi_matrix a, tshi_matrix b, tsh_real beta,
                          tshi_matrix d, tshi_matrix c) {
    const int done = k <= 0 || alpha == 0;
    tshi_gemm_job job;
    if (m <= 0 || n <= 0) return;
    if (done || (beta != 0 && beta != 1)) { /* rare: may take a pass of its own */
        tshi_gemm_scale(m, n, beta, d, c);
        beta = 1;
        d = c;
    }
    if (done) return;
    if (tshi_gemm_transposes(m, n, c.row, c.column, kernel->nr)) {
        tshi_gemm_run(kernel, scratch, progress, n, m, k, alpha, tshi_gemm_transposed(b),
                      tshi_gemm_transposed(a), beta, tshi_gemm_transposed(d),
                      tshi_gemm_transposed(c));
        return;
    }
    job.kernel = kernel;
    job.pack_a = (tsh_real *)scratch;
    job.pack_b = job.pack_a + tshi_gemm_block_size(kernel, m, k);
    job.m = m;
    job.n = n;
    job.k = k;
    job.alpha = alpha;
    job.add = beta != 0;
    job.a = a;
    job.b = b;
    job.d = d;
    job.c = c;
    job.stream = 0;
    job.progress = progress;
    job.since = 0;
    tshi_gemm_blocks(&job);
}

/* ========================================================================== */
/* >>coll                                                MARK: - coll (private) */
/* What every backend needs: the arithmetic of sums, comparing calls, naming   */
/* the rank at fault, time limits, settings from the environment, sentences.   */
/* Needs: >>base.                                                              */
/* ========================================================================== */

/* Nothing here sends, waits or allocates: a backend passes in what its ranks have called, through a
 * callback such as call(user, r, &out), and gets back a number or a tsh_error to raise. So threads,
 * sockets and MPI report the same mistake in the same sentence. A new kind of collective needs its
 * name in tshi_coll_kinds, and its arguments in tsh_coll_digest and tsh_coll_text. */

static const char *const tshi_coll_kinds[TSH_COLL_KINDS] = {
    "all-reduce", "all-gather", "reduce-scatter", "broadcast", "all-to-all",
    "send",       "receive",    "send-receive",   "barrier",   "split"};

enum { TSHI_COLL_TEXT = 256 }; /* bytes of a call's description */

/* 1 for kinds between two ranks, which are numbered per pair. */
static int tshi_coll_pairwise(tsh_coll_kind kind) {
    return kind == TSH_SEND || kind == TSH_RECV || kind == TSH_SENDRECV;
}

/* 1 for kinds whose counts are one per rank, repeated for each of `blocks`. */
static int tshi_coll_rows(tsh_coll_kind kind) {
    return kind == TSH_ALLGATHER || kind == TSH_REDUCE_SCATTER || kind == TSH_ALLTOALL;
}

TSH_API tsh_result tsh_error_set(tsh_error *error, tsh_result code, int rank, const char *format,
                                 ...) {
    va_list list;
    error->code = code;
    error->rank = rank;
    va_start(list, format);
    (void)vsnprintf(error->message, sizeof error->message, format, list);
    va_end(list);
    return code;
}

TSH_API void tsh_text_add(char *text, size_t capacity, const char *format, ...) {
    size_t used = strlen(text);
    va_list list;
    va_start(list, format);
    if (used + 1 < capacity) (void)vsnprintf(text + used, capacity - used, format, list);
    va_end(list);
}

TSH_API tsh_comm tsh_comm_make(const tsh_comm_ops *ops, void *impl, int rank, int size,
                               uint64_t id) {
    tsh_comm comm;
    memset(&comm, 0, sizeof comm);
    comm.ops = ops;
    comm.impl = impl;
    comm.rank = rank;
    comm.size = size;
    comm.id = id;
    return comm;
}

TSH_API void tsh_coll_sum(void *out, int64_t n, const tsh_coll *coll, int size, int k,
                          const void *(*part)(const void *user, int r), const void *user) {
    const void *left = part(user, (k + 1) % size); /* x[k+1], then the sum so far */
    for (int j = 2; j <= size; j++) {
        tsh_coll_fold(out, left, part(user, (k + j) % size), n, coll->dtype, coll->redop);
        left = out;
    }
    if (left != out && n > 0) memcpy(out, left, (size_t)n * tsh_dtype_size(coll->dtype));
    tsh_coll_finish(out, n, coll->dtype, coll->redop, size);
}

TSH_API int64_t tsh_coll_before(const int64_t *counts, int r) {
    int64_t sum = 0;
    for (int i = 0; i < r; i++) sum += counts[i];
    return sum;
}

TSH_API int64_t tsh_coll_chunk(int64_t n, int size, int k) {
    int64_t chunk = n / size + (n % size != 0); /* ceil(n / size) */
    return chunk == 0 || k > n / chunk ? n : chunk * k; /* min(n, chunk k) */
}

static int tshi_coll_reduces(tsh_coll_kind kind) {
    return kind == TSH_ALLREDUCE || kind == TSH_REDUCE_SCATTER;
}

/* Hashes one more value: the multiplicative step of Fibonacci hashing, then a shift that brings the
 * well-mixed high bits down. */
static uint64_t tshi_coll_mix(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * UINT64_C(0x9E3779B97F4A7C15);
    return hash ^ (hash >> 29);
}

TSH_API uint64_t tsh_coll_digest(const tsh_coll *coll, int size) {
    int pairwise = coll->kind == TSH_SEND || coll->kind == TSH_RECV; /* a SEND matches its RECV */
    uint64_t hash, kind = (uint64_t)(pairwise ? TSH_SEND : coll->kind);
    if (coll->kind >= TSH_BARRIER) return kind; /* no arguments */
    kind |= (uint64_t)coll->dtype << 8;
    if (tshi_coll_reduces(coll->kind)) kind |= (uint64_t)coll->redop << 16;
    if (coll->kind == TSH_BROADCAST) kind |= (uint64_t)coll->root << 24;
    if (pairwise) kind |= (uint64_t)(uint32_t)coll->tag << 24;
    hash = tshi_coll_mix(1, kind);
    if (!tshi_coll_rows(coll->kind)) return tshi_coll_mix(hash, (uint64_t)coll->count);
    hash = tshi_coll_mix(hash, (uint64_t)coll->blocks);
    for (int r = 0; r < size && coll->kind != TSH_ALLTOALL; r++)
        hash = tshi_coll_mix(hash, (uint64_t)coll->recv_counts[r]);
    return hash;
}

/* Appends names[value]; of a value that is not below n: `what` and the number, "kind 77". */
static void tshi_coll_name(char *text, size_t capacity, const char *const *names, unsigned n,
                           const char *what, unsigned value) {
    if (value < n)
        tsh_text_add(text, capacity, "%s", names[value]);
    else
        tsh_text_add(text, capacity, "%s %d", what, (int)value);
}

TSH_API char *tsh_coll_text(const tsh_coll *coll, const tsh_coll *other, int size, char *text,
                            size_t capacity) {
    static const char *const redops[] = {"sum", "product", "min", "max", "average"};
    unsigned kind = (unsigned)coll->kind;
    const int64_t *mine = coll->recv_counts, *theirs = NULL; /* theirs: to compare with mine */
    if (tshi_coll_rows(coll->kind) && kind != TSH_ALLTOALL && other && other->kind == coll->kind)
        theirs = other->recv_counts;
    if (!capacity) return text; /* not even for the final 0 */
    text[0] = '\0';
    tshi_coll_name(text, capacity, tshi_coll_kinds, TSH_COLL_KINDS, "kind", kind);
    if (kind >= TSH_BARRIER) return text;
    tsh_text_add(text, capacity, " of ");
    if (!tshi_coll_rows(coll->kind) && kind != TSH_SENDRECV)
        tsh_text_add(text, capacity, "%lld ", (long long)coll->count);
    if ((unsigned)coll->dtype < (unsigned)TSHI_DTYPES)
        tsh_text_add(text, capacity, "%s", tshi_dtypes[coll->dtype].name);
    else
        tsh_text_add(text, capacity, "dtype %d", (int)coll->dtype);
    if (tshi_coll_reduces(coll->kind)) {
        tsh_text_add(text, capacity, " (");
        tshi_coll_name(text, capacity, redops, TSH_AVG + 1, "reduction", (unsigned)coll->redop);
        tsh_text_add(text, capacity, ")");
    }
    if (coll->blocks > 1) tsh_text_add(text, capacity, " in %lld blocks", (long long)coll->blocks);
    if (kind == TSH_BROADCAST) tsh_text_add(text, capacity, " from rank %d", coll->root);
    if (coll->send_to >= 0) tsh_text_add(text, capacity, " to rank %d", coll->send_to);
    if (coll->recv_from >= 0) tsh_text_add(text, capacity, " from rank %d", coll->recv_from);
    if (coll->tag >= 0) tsh_text_add(text, capacity, " with tag %d", coll->tag);
    for (int r = 0; mine && theirs && r < size; r++) {
        if (mine[r] == theirs[r]) continue;
        tsh_text_add(text, capacity, " with counts[%d] = %lld", r, (long long)mine[r]);
        break;
    }
    return text;
}

TSH_API void tsh_coll_where(const tsh_coll *coll, int size, uint64_t seq, uint64_t group,
                            char *text, size_t capacity) {
    size_t used = strlen(text);
    (void)tsh_coll_text(coll, NULL, size, text + used, capacity - used);
    if (!tshi_coll_pairwise(coll->kind))
        tsh_text_add(text, capacity, ", collective %llu", (unsigned long long)seq);
    tsh_text_add(text, capacity, " of group %llu", (unsigned long long)group);
}

TSH_API tsh_coll tsh_coll_half(const tsh_coll *coll, int receives) {
    tsh_coll half = *coll;
    half.kind = receives ? TSH_RECV : TSH_SEND;
    half.send_counts = half.recv_counts = NULL;
    if (coll->kind == TSH_SENDRECV)
        half.count = *(receives ? coll->recv_counts : coll->send_counts);
    if (receives) half.send_to = -1;
    if (!receives) half.recv_from = -1;
    return half;
}

/* ---- calls that do not fit ---- */

typedef struct tshi_coll_calls {
    int (*call)(const void *user, int r, tsh_call *out);
    const void *user;
    int size;
} tshi_coll_calls;

/* Counts the ranks that have made the same call as rank r, itself included; 0 if it has made
 * none. */
static int tshi_coll_agree(const tshi_coll_calls *all, int r) {
    tsh_call mine, its;
    int count = 0;
    if (!all->call(all->user, r, &mine)) return 0;
    for (int m = 0; m < all->size; m++)
        count += all->call(all->user, m, &its) && its.digest == mine.digest;
    return count;
}

/* 1 if two ranks of an all-to-all disagree on how much `from` sends to `to`. Counts that are not
 * known do not disagree. */
static int tshi_coll_unequal(const tshi_coll_calls *all, int from, int to) {
    tsh_call a, b;
    return all->call(all->user, from, &a) && all->call(all->user, to, &b) && to < a.counts &&
           from < b.counts && a.coll.send_counts[to] != b.coll.recv_counts[from];
}

/* Compares the counts of an all-to-all, pair by pair. If some differ, fills error, which blames the
 * rank with the most differences (of several the lowest, rank 0 last), and returns 1. */
static int tshi_coll_alltoall(const tshi_coll_calls *all, uint64_t seq, uint64_t group,
                              tsh_error *error) {
    int blamed = -1, max = 0, m = 0, sends;
    const int64_t *mine, *theirs;
    tsh_call a, b;
    for (int r = all->size - 1; r >= 0; r--) {
        int wrong = 0; /* counts on which r and the others disagree */
        for (int i = 0; i < all->size; i++)
            wrong += tshi_coll_unequal(all, r, i) + tshi_coll_unequal(all, i, r);
        if (!wrong || wrong < max || (wrong == max && r == 0)) continue;
        blamed = r;
        max = wrong;
    }
    if (blamed < 0) return 0;
    while (!tshi_coll_unequal(all, blamed, m) && !tshi_coll_unequal(all, m, blamed)) m++;
    sends = tshi_coll_unequal(all, blamed, m);
    (void)all->call(all->user, blamed, &a);
    (void)all->call(all->user, m, &b);
    mine = sends ? a.coll.send_counts : a.coll.recv_counts;
    theirs = sends ? b.coll.recv_counts : b.coll.send_counts;
    (void)tsh_error_set(
        error, TSH_ERR_MISMATCH, a.rank,
        "rank %d called all-to-all with %s_counts[%d] = %lld where rank %d has %s_counts[%d] = "
        "%lld (collective %llu of group %llu)",
        a.rank, sends ? "send" : "recv", m, (long long)mine[m], b.rank, sends ? "recv" : "send",
        blamed, (long long)theirs[blamed], (unsigned long long)seq, (unsigned long long)group);
    return 1;
}

/* If some ranks have closed the group (TSH_COLL_KINDS) while others make a call in it, fills error,
 * which names the lowest of each, and returns 1. */
static int tshi_coll_left(const tshi_coll_calls *all, uint64_t seq, uint64_t group,
                          tsh_error *error) {
    char text[TSHI_COLL_TEXT] = "";
    tsh_call call, lowest[2]; /* that waits, that has closed */
    int found[2] = {0, 0};
    memset(lowest, 0, sizeof lowest);
    for (int r = all->size - 1; r >= 0; r--) {
        int closed;
        if (!all->call(all->user, r, &call)) continue;
        closed = call.coll.kind == TSH_COLL_KINDS;
        found[closed] = 1;
        lowest[closed] = call;
    }
    if (!found[0] || !found[1]) return 0;
    tsh_coll_where(&lowest[0].coll, all->size, seq, group, text, sizeof text);
    (void)tsh_error_set(error, TSH_ERR_LOST, lowest[1].rank,
                        "rank %d left while rank %d waits for it in %s", lowest[1].rank,
                        lowest[0].rank, text);
    return 1;
}

/* Fills error: "rank 1 called A where rank 0 called B (collective 3 of group 1)". `known` counts of
 * both calls are known. */
static void tshi_coll_mismatch(const tsh_coll *a, const tsh_coll *b, int known, int rank_a,
                               int rank_b, const char *unit, uint64_t number, uint64_t group,
                               tsh_error *error) {
    char texts[2][TSHI_COLL_TEXT];
    (void)tsh_coll_text(a, b, known, texts[0], sizeof texts[0]);
    (void)tsh_coll_text(b, a, known, texts[1], sizeof texts[1]);
    (void)tsh_error_set(error, TSH_ERR_MISMATCH, rank_a,
                        "rank %d called %s where rank %d called %s (%s %llu of group %llu)", rank_a,
                        texts[0], rank_b, texts[1], unit, (unsigned long long)number,
                        (unsigned long long)group);
}

TSH_API int tsh_call_mismatch(int (*call)(const void *user, int r, tsh_call *out), const void *user,
                              int size, uint64_t seq, uint64_t group, tsh_error *error) {
    tshi_coll_calls all = {call, user, size};
    tsh_call a, b;
    int right = 0, r; /* right: a rank whose call the most ranks have made */
    if (tshi_coll_left(&all, seq, group, error)) return 1;
    for (r = 1; r < size; r++)
        if (tshi_coll_agree(&all, r) > tshi_coll_agree(&all, right)) right = r;
    if (!call(user, right, &b)) return 0;
    for (r = 0; r < size; r++)
        if (call(user, r, &a) && a.digest != b.digest) break; /* the lowest of the others */
    if (r == size)
        return b.coll.kind == TSH_ALLTOALL ? tshi_coll_alltoall(&all, seq, group, error) : 0;
    tshi_coll_mismatch(&a.coll, &b.coll, a.counts < b.counts ? a.counts : b.counts, a.rank, b.rank,
                       "collective", seq, group, error);
    return 1;
}

TSH_API int tsh_blamed(int a, int b) {
    int low = a < b ? a : b;
    return low == 0 ? a + b : low; /* a + b: the one that is not 0 */
}

TSH_API void tsh_message_mismatch(const tsh_coll *sent, const tsh_coll *wanted, int from, int to,
                                  uint64_t number, uint64_t group, tsh_error *error) {
    tshi_coll_mismatch(sent, wanted, 0, from, to, "message", number, group, error);
    error->rank = tsh_blamed(from, to);
}

/* Rank r's ticket: tickets lie `stride` bytes apart, perhaps inside larger structs. */
static tsh_ticket tshi_coll_ticket(const void *tickets, size_t stride, int r) {
    tsh_ticket ticket;
    memcpy(&ticket, (const char *)tickets + (size_t)r * stride, sizeof ticket);
    return ticket;
}

TSH_API int tsh_split_order(const void *tickets, size_t stride, int size, int color, int *order) {
    int n = 0;
    for (int r = 0; r < size; r++) {
        tsh_ticket mine = tshi_coll_ticket(tickets, stride, r);
        int at = n; /* insertion sort by key; stable, so equal keys stay in the order of ranks */
        if (mine.color != color) continue;
        for (; at > 0 && tshi_coll_ticket(tickets, stride, order[at - 1]).key > mine.key; at--)
            order[at] = order[at - 1];
        order[at] = r;
        n++;
    }
    return n;
}

/* ---- ranks that wait for each other ---- */

TSH_API int tsh_coll_cycle(tsh_coll_search *search, int size, int r,
                           int (*awaits)(const void *user, int r, int i), const void *user) {
    if (search[r].seen) return -1;
    search[r].from = -1;
    while (r >= 0) {
        int m = -1;
        search[r].seen = 1;
        while (search[r].edge < size && (m < 0 || search[m].seen == 2))
            m = awaits(user, r, search[r].edge++);
        if (m >= 0 && search[m].seen == 2) m = -1;
        search[r].next = m;
        if (m < 0) { /* a dead end: back to where r was reached from */
            search[r].seen = 2;
            r = search[r].from;
        } else if (search[m].seen) { /* on the path already: a cycle */
            return m;
        } else {
            search[m].from = r;
            r = m;
        }
    }
    return -1;
}

TSH_API int tsh_coll_blame(const tsh_coll_search *search, int r,
                           int (*together)(const void *user, int r), const void *user, int *waits) {
    int blamed = r, at = r; /* at: goes around the cycle */
    do {
        int more = together(user, blamed) - together(user, at);
        if (more > 0 || (more == 0 && (blamed == 0 || (at < blamed && at > 0)))) blamed = at;
        at = search[at].next;
    } while (at != r);
    while (search[at].next != blamed) at = search[at].next; /* to the one that waits for it */
    *waits = at;
    return blamed;
}

/* ---- reports of ranks that wait ---- */

/* A report's marks follow it in memory: */
static const tsh_wait_mark *tshi_coll_marks(const tsh_wait_report *report) {
    return (const tsh_wait_mark *)(const void *)(report + 1);
}

/* and the awaited ranks follow its marks. */
static const int *tshi_coll_awaited(const tsh_wait_report *report) {
    return (const int *)(const void *)(tshi_coll_marks(report) + report->marks);
}

/* Finds how far the reporting rank has come in a group, with `peer` or (-1) in collectives. NULL:
 * it is not in the group (any more), or has exchanged no message with the peer. */
static const tsh_wait_mark *tshi_coll_mark(const tsh_wait_report *report, uint64_t group,
                                           int peer) {
    const tsh_wait_mark *mark = tshi_coll_marks(report);
    for (int i = 0; i < report->marks; i++, mark++)
        if (mark->group == group && mark->peer == peer) return mark;
    return NULL;
}

TSH_API int tsh_wait_missing(tsh_wait_report *const *report, int r, int m) {
    const tsh_wait_report *a = report[r], *b = report[m];
    const tsh_wait_mark *here, *pair; /* of m: in r's group; with r */
    if (!a || !b) return 0; /* one is not known to wait */
    here = tshi_coll_mark(b, a->group, -1);
    if (!here) return 0; /* m is not in the group */
    if (!a->pairwise) return here->sends <= a->seq; /* m has not started it */
    pair = tshi_coll_mark(b, a->group, r);
    return (a->send_to == m && (pair ? pair->recvs : 0) <= a->send_number) ||
           (a->recv_from == m && (pair ? pair->sends : 0) <= a->recv_number);
}

typedef struct tshi_coll_reports {
    tsh_wait_report *const *report;
    int size;
} tshi_coll_reports;

/* For tsh_coll_cycle: the i-th rank that r waits for; -1 if there is none, or it has done its part
 * already. */
static int tshi_coll_awaits(const void *user, int r, int i) {
    tsh_wait_report *const *report = ((const tshi_coll_reports *)user)->report;
    int m = report[r] && i < report[r]->awaited ? tshi_coll_awaited(report[r])[i] : -1;
    return m >= 0 && tsh_wait_missing(report, r, m) ? m : -1;
}

/* For tsh_coll_blame: how many ranks wait in the same call as r. */
static int tshi_coll_together(const void *user, int r) {
    const tshi_coll_reports *all = (const tshi_coll_reports *)user;
    const tsh_wait_report *a = all->report[r];
    int count = 0;
    for (int m = 0; m < all->size; m++) {
        const tsh_wait_report *b = all->report[m];
        count += b && b->group == a->group && b->pairwise == a->pairwise && b->seq == a->seq;
    }
    return count;
}

TSH_API int tsh_wait_cycle(tsh_wait_report *const *report, int size, int r, tsh_coll_search *search,
                           tsh_error *error) {
    tshi_coll_reports all = {report, size};
    int blamed, waits;
    memset(search, 0, (size_t)size * sizeof *search);
    r = tsh_coll_cycle(search, size, r, tshi_coll_awaits, &all);
    if (r < 0) return 0;
    blamed = tsh_coll_blame(search, r, tshi_coll_together, &all, &waits);
    (void)tsh_error_set(error, TSH_ERR_MISMATCH, blamed,
                        "rank %d waits in %s while rank %d waits for it in %s", blamed,
                        report[blamed]->text, waits, report[waits]->text);
    return 1;
}

TSH_API void tsh_wait_absent(tsh_wait_report *const *report, int r, tsh_error *error) {
    int absent = 0;
    tsh_text_add(error->message, sizeof error->message, "; absent ranks:");
    for (int i = 0; report[r] && i < report[r]->awaited; i++) {
        int m = tshi_coll_awaited(report[r])[i];
        if (m == r || (report[m] && !tsh_wait_missing(report, r, m))) continue;
        if (!absent++) error->rank = m;
        tsh_text_add(error->message, sizeof error->message, " %d", m);
    }
    if (!absent) tsh_text_add(error->message, sizeof error->message, " none");
}

/* ---- time and settings ---- */

/* The value of an environment variable; NULL if it is unset or empty. */
static const char *tshi_coll_env(const char *name) {
    const char *text = getenv(name);
    return text && text[0] ? text : NULL;
}

/* Reads a whole number at *at and moves *at past its digits. Returns 0 if there are no digits, it
 * has leading zeros, or it is above high. */
static int tshi_coll_env_digits(const char **at, int64_t high, int64_t *value) {
    const char *first = *at, *end = first;
    *value = 0;
    for (; *end >= '0' && *end <= '9'; end++) {
        if (*value > high / 10) return 0; /* with this digit above high */
        *value = *value * 10 + (*end - '0');
    }
    *at = end;
    return end > first && (first[0] != '0' || end == first + 1) && *value <= high;
}

/* Fills error with 'NAME is "value"; it takes ...'. Returns -1. */
TSH_PRINTF(4, 5)
static int tshi_coll_env_refuse(const char *name, const char *text, tsh_error *error,
                                const char *takes, ...) {
    va_list list;
    size_t i;
    (void)tsh_error_set(error, TSH_ERR_ARGUMENT, -1, "%s is \"%.100s\"; it takes ", name, text);
    for (i = 0; error->message[i]; i++) /* no line breaks or escape codes in an error */
        if ((unsigned char)error->message[i] < 32) error->message[i] = '?';
    va_start(list, takes);
    (void)vsnprintf(error->message + i, sizeof error->message - i, takes, list);
    va_end(list);
    return -1;
}

TSH_API int tsh_env_int(const char *name, int low, int high, int *value, tsh_error *error) {
    const char *text = tshi_coll_env(name), *at = text;
    int64_t number;
    if (!text) return 0;
    if (!tshi_coll_env_digits(&at, high, &number) || *at || number < low)
        return tshi_coll_env_refuse(name, text, error,
                                    high - low == 1 ? "%d or %d" : "a whole number from %d to %d",
                                    low, high);
    *value = (int)number;
    return 1;
}

TSH_API int tsh_env_seconds(const char *name, int64_t *ns, tsh_error *error) {
    const int64_t second = INT64_C(1000000000);
    const char *text = tshi_coll_env(name), *at = text;
    int64_t number = 0, unit = second; /* ns; unit: of the digit at *at */
    int right;
    if (!text) return 0;
    right = tshi_coll_env_digits(&at, second, &number);
    number *= second;
    if (right && *at == '.') {
        const char *point = at++;
        for (; *at >= '0' && *at <= '9'; at++) {
            unit /= 10;
            if (unit) number += unit * (*at - '0');
            if (*at > '0' && number == 0) number = 1; /* below 1 ns; 0 would mean no limit */
        }
        right = at > point + 1;
    }
    if (!right || *at)
        return tshi_coll_env_refuse(name, text, error,
                                    "a number of seconds, such as 30 or 0.5, up to %lld",
                                    (long long)second);
    *ns = number;
    return 1;
}

TSH_API int tsh_time_limit(double given, const char *name, const char *variable, double otherwise,
                           int64_t *ns, tsh_error *error) {
    const int64_t never = INT64_C(1) << 61; /* ns: 73 years */
    *ns = (int64_t)(otherwise * 1e9);
    if (given != given) {
        (void)tsh_error_set(error, TSH_ERR_ARGUMENT, -1, "%s is not a number (NaN)", name);
        return 0;
    }
    if (given != 0)
        *ns = given < 0 || given > 1e9 ? never : (int64_t)(given * 1e9);
    else if (tsh_env_seconds(variable, ns, error) < 0)
        return 0;
    if (given == 0 && *ns == 0) *ns = never;
    return 1;
}

TSH_API int tsh_timeout(double given, const char *name, int64_t *ns, tsh_error *error) {
    return tsh_time_limit(given, name, "TSHARD_TIMEOUT", 300, ns, error);
}

TSH_API int64_t tsh_deadline(int64_t timeout_ns, int64_t otherwise) {
    int64_t now = tsh_now(), wait = timeout_ns ? timeout_ns : otherwise;
    return wait > INT64_MAX - now ? INT64_MAX : now + wait; /* no overflow */
}

TSH_API int tsh_env_text(const char *name, char *text, size_t capacity, tsh_error *error) {
    const char *value = tshi_coll_env(name);
    if (!value) return 0;
    if (strlen(value) < capacity) {
        memcpy(text, value, strlen(value) + 1);
        return 1;
    }
    (void)tsh_error_set(error, TSH_ERR_ARGUMENT, -1, "%s has %lu bytes; it takes at most %lu", name,
                        (unsigned long)strlen(value), (unsigned long)capacity - 1);
    return -1;
}

/* ========================================================================== */
/* >>compose                                          MARK: - compose (private) */
/* Every kind of collective, groups and errors, made of a backend's SEND and   */
/* RECV: tsh_comm_compose.                                                     */
/* Needs: >>coll.                                                              */
/* ========================================================================== */

/* How a collective runs:
 *  1. Each rank sends every other one a header, which describes its call. When all have arrived,
 *     every rank compares them: no data moves between calls that do not match.
 *  2. Once the group's earlier collectives are done, each rank sends every other one its part of
 *     the data, and sums, gathers or keeps what it receives.
 *  3. An all-reduce has a second round: each rank sends its summed chunk to all others.
 * SEND and RECV exchange headers in the same way, then the message. Between two ranks, each channel
 * of a group delivers in order, so no message needs a number:
 *
 *     rank a                           rank b
 *     header ----- HEADERS ---------> compares it with its own, as a does
 *     part   ----- DATA ------------> sums
 *     chunk  <---- DATA ------------- sum
 *
 * An op only takes a step when the backend has data for it (tshi_compose_step); any wait, test or
 * progress advances every op of this rank. */
typedef enum tshi_compose_channel {
    TSHI_COMPOSE_HEADERS,
    TSHI_COMPOSE_DATA,
    TSHI_COMPOSE_SENDS,   /* headers of SENDs */
    TSHI_COMPOSE_RECVS,   /* headers of RECVs */
    TSHI_COMPOSE_BODIES,  /* messages */
    TSHI_COMPOSE_REPORTS, /* where a rank waits */
    TSHI_COMPOSE_CHANNELS = 8
} tshi_compose_channel;

enum { TSHI_COMPOSE_MARKS = 64 }; /* at most, in a report */
#define TSHI_COMPOSE_MS    INT64_C(1000000)

/* Describes a rank's call to the others. In memory 2 P counts follow: what it sends to and receives
 * from each rank. The pointers in call.coll are valid on that rank only. */
typedef struct tshi_compose_header {
    tsh_call call;
    uint64_t splits; /* how many splits this rank has started: makes group ids unique */
    tsh_ticket ticket;
} tshi_compose_header;

typedef enum tshi_compose_state {
    TSHI_COMPOSE_MATCHING, /* headers are exchanged */
    TSHI_COMPOSE_QUEUED,   /* they match; waits for the group's earlier collectives */
    TSHI_COMPOSE_MOVING,   /* data, or a message, is being sent and received */
    TSHI_COMPOSE_DONE
} tshi_compose_state;

typedef struct tshi_compose_world tshi_compose_world;
typedef struct tshi_compose_group tshi_compose_group;

/* A collective, or one half of a message. */
typedef struct tshi_compose_op {
    struct tshi_compose_op *next;  /* the one started after it */
    struct tshi_compose_op *other; /* the other half of a SENDRECV */
    tshi_compose_group *group;
    tsh_coll coll;
    tsh_coll part;       /* the round that is moving, an ALLGATHER, REDUCE_SCATTER or ALLTOALL */
    uint64_t id, number; /* number: of the collective in its group, of the message in its pair */
    int64_t deadline;
    tshi_compose_state state;
    int peer, sends;         /* of a SEND or RECV: the other rank of the group; else peer is -1 */
    int round;               /* 1: an all-reduce sends its summed chunks */
    tsh_coll *recv;          /* (recvs), at most P: RECVs of what has not arrived yet */
    int recvs;
    char *headers;           /* one per rank; of a message: the SEND's, then the RECV's */
    int64_t *counts;         /* (P): what each rank holds of an all-reduce or a broadcast */
    int64_t *to, *from;      /* (P): elements for and from each rank */
    char *out, *in;          /* those elements, rank by rank; one block of memory */
} tshi_compose_op;

struct tshi_compose_group {
    tshi_compose_group *next;
    tshi_compose_world *world;
    uint64_t id, started, ids; /* started: collectives; ids: the last op's id */
    int rank, size, closing;
    uint64_t *sends, *recvs; /* (P): messages started with each peer */
    int *ranks;              /* (P): ranks of the world */
    tshi_compose_op *first;  /* the oldest op */
};

struct tshi_compose_world {
    tsh_comm_ops ops;  /* of the composed comms */
    tsh_comm messages; /* the backend's */
    int64_t timeout;
    int open_comms;
    uint64_t splits;
    tshi_compose_group *groups;
    size_t report_bytes;
    tsh_wait_report **report;  /* (P): where each rank last waited; NULL: not known */
    tsh_wait_report *incoming; /* P + 1 reports: the one being received, then one per rank */
    tsh_coll_search *search;
};

/* The world's error code, as the backend knows it. */
static tsh_result tshi_compose_code(tshi_compose_world *world) {
    return world->messages.ops->status(&world->messages, NULL);
}

/* Makes error the world's, unless the world has failed already. */
static void tshi_compose_raise(tshi_compose_world *world, const tsh_error *error) {
    if (tshi_compose_code(world) == TSH_OK) world->messages.ops->abort(&world->messages, error);
}

/* Reports that this rank has no memory. Returns TSH_ERR_MEMORY. */
static tsh_result tshi_compose_no_memory(tshi_compose_world *world) {
    tsh_error error;
    (void)tsh_error_set(&error, TSH_ERR_MEMORY, world->messages.rank,
                        "rank %d has no memory for a collective", world->messages.rank);
    tshi_compose_raise(world, &error);
    return TSH_ERR_MEMORY;
}

static size_t tshi_compose_header_bytes(const tshi_compose_group *group) {
    return sizeof(tshi_compose_header) + 2 * (size_t)group->size * sizeof(int64_t);
}

static tshi_compose_header *tshi_compose_header_of(const tshi_compose_op *op, int r) {
    size_t bytes = tshi_compose_header_bytes(op->group) * (size_t)r;
    return (tshi_compose_header *)(void *)(op->headers + bytes);
}

/* ---- sending and receiving ---- */

/* A SEND to, or RECV from, a rank of the world, for the backend. */
static tsh_coll tshi_compose_message(tsh_coll_kind kind, int peer, uint64_t seq, tsh_dtype dtype) {
    tsh_coll coll = tsh_coll_make(kind, dtype);
    *(kind == TSH_SEND ? &coll.send_to : &coll.recv_from) = peer;
    coll.seq = seq;
    return coll;
}

/* The length of the next segment of a message, of which `left` elements are left. */
static int64_t tshi_compose_segment(int64_t left, tsh_dtype dtype) {
    return tshi_base_min(left, (int64_t)(TSH_MESSAGE_BYTES / tsh_dtype_size(dtype)));
}

/* Sends n elements to a rank of the world, in segments that the backend copies. */
static void tshi_compose_send(tshi_compose_world *world, int to, uint64_t seq, const void *at,
                              int64_t n, tsh_dtype dtype) {
    tsh_coll coll = tshi_compose_message(TSH_SEND, to, seq, dtype);
    tsh_result result = TSH_OK;
    tsh_error error;
    coll.send = at;
    for (; n > 0 && result == TSH_OK; n -= coll.count) {
        tsh_req req;
        coll.count = tshi_compose_segment(n, dtype);
        result = world->messages.ops->start(&world->messages, &coll, &req);
        coll.send = (const char *)coll.send + (size_t)coll.count * tsh_dtype_size(dtype);
    }
    if (result == TSH_OK) return;
    (void)tsh_error_set(&error, result, world->messages.rank, "rank %d cannot send to rank %d: %s",
                        world->messages.rank, to, tsh_result_text(result));
    tshi_compose_raise(world, &error);
}

/* The seq of a group's messages on a channel, by which the backend matches them. */
static uint64_t tshi_compose_seq(const tshi_compose_group *group, tshi_compose_channel channel) {
    return group->id * TSHI_COMPOSE_CHANNELS + (uint64_t)channel;
}

/* Adds a receive of n elements from a rank of the group to those that op waits for. */
static void tshi_compose_post_recv(tshi_compose_op *op, int peer, tshi_compose_channel channel,
                                   void *at, int64_t n, tsh_dtype dtype) {
    tsh_coll recv = tshi_compose_message(TSH_RECV, op->group->ranks[peer],
                                         tshi_compose_seq(op->group, channel), dtype);
    recv.recv = at;
    recv.count = n;
    if (n > 0) op->recv[op->recvs++] = recv;
}

/* Reports that rank `lost` of the world is gone while this one waits for it in op. */
static void tshi_compose_lost(const tshi_compose_op *op, int lost) {
    const tshi_compose_group *group = op->group;
    char text[TSHI_COLL_TEXT] = "";
    tsh_error error;
    tsh_coll_where(&op->coll, group->size, op->number, group->id, text, sizeof text);
    (void)tsh_error_set(&error, TSH_ERR_LOST, lost,
                        "rank %d is gone while rank %d waits for it in %s", lost,
                        group->ranks[group->rank], text);
    tshi_compose_raise(group->world, &error);
}

/* Receives the segments that have arrived. Returns 1 if the message is complete. */
static int tshi_compose_receive(const tshi_compose_op *op, tsh_coll *recv) {
    tsh_comm *messages = &op->group->world->messages;
    while (recv->count > 0) {
        tsh_coll next = *recv;
        tsh_req again = 0;
        tsh_result result;
        next.count = tshi_compose_segment(recv->count, recv->dtype);
        result = messages->ops->start(messages, &next, &again);
        if (result == TSH_ERR_LOST) tshi_compose_lost(op, recv->recv_from);
        if (result != TSH_OK || again) return 0;
        recv->count -= next.count;
        recv->recv = (char *)recv->recv + (size_t)next.count * tsh_dtype_size(recv->dtype);
    }
    return 1;
}

/* Receives what has arrived for op. Returns 1 if none of its receives is left. */
static int tshi_compose_arrived(tshi_compose_op *op) {
    for (int i = 0; i < op->recvs;) {
        if (tshi_compose_receive(op, &op->recv[i]))
            op->recv[i] = op->recv[--op->recvs];
        else
            i++;
    }
    return op->recvs == 0;
}

/* ---- headers ---- */

/* Sends this rank's header to the peer of a message, or to all ranks, and posts receives of
 * theirs. */
static void tshi_compose_send_header(tshi_compose_op *op, const tsh_ticket *ticket) {
    tshi_compose_group *group = op->group;
    const tsh_coll *coll = &op->coll;
    int64_t words = (int64_t)(tshi_compose_header_bytes(group) / sizeof(int64_t));
    int message = op->peer >= 0, n = group->size;
    tshi_compose_header *header = tshi_compose_header_of(op, message ? !op->sends : group->rank);
    int64_t *counts = (int64_t *)(void *)(header + 1); /* (2 P) */
    tshi_compose_channel mine = TSHI_COMPOSE_HEADERS, its = mine;
    if (message) {
        mine = op->sends ? TSHI_COMPOSE_SENDS : TSHI_COMPOSE_RECVS;
        its = op->sends ? TSHI_COMPOSE_RECVS : TSHI_COMPOSE_SENDS;
    }
    header->call.coll = *coll;
    header->call.digest = tsh_coll_digest(coll, n);
    header->call.rank = group->ranks[group->rank];
    header->call.counts = tshi_coll_rows(coll->kind) ? n : 0;
    if (ticket) header->ticket = *ticket;
    header->splits = group->world->splits;
    if (coll->kind == TSH_ALLTOALL) memcpy(counts, coll->send_counts, (size_t)n * sizeof *counts);
    if (tshi_coll_rows(coll->kind))
        memcpy(counts + n, coll->recv_counts, (size_t)n * sizeof *counts);
    for (int i = 0; i < n; i++) {
        int r = (group->rank + i) % n;
        if (message ? r != op->peer : r == group->rank) continue;
        tshi_compose_send(group->world, group->ranks[r], tshi_compose_seq(group, mine), header,
                          words, TSH_I64);
        tshi_compose_post_recv(op, r, its, tshi_compose_header_of(op, message ? op->sends : r),
                               words, TSH_I64);
    }
}

/* For tsh_call_mismatch: what rank r has called, from its header. */
static int tshi_compose_called(const void *user, int r, tsh_call *out) {
    const tshi_compose_op *op = (const tshi_compose_op *)user;
    const tshi_compose_header *header = tshi_compose_header_of(op, r);
    *out = header->call;
    out->coll.send_counts = (const int64_t *)(const void *)(header + 1);
    out->coll.recv_counts = out->coll.send_counts + op->group->size;
    return 1;
}

/* Compares the calls once all headers have arrived: 1 if they match, else 0, with an error. */
static int tshi_compose_match(const tshi_compose_op *op) {
    const tshi_compose_group *group = op->group;
    tsh_error error;
    if (op->peer >= 0) {
        const tsh_call *sent = &tshi_compose_header_of(op, 0)->call;
        const tsh_call *wanted = &tshi_compose_header_of(op, 1)->call;
        if (sent->digest == wanted->digest) return 1;
        tsh_message_mismatch(&sent->coll, &wanted->coll, sent->rank, wanted->rank, op->number,
                             group->id, &error);
    } else if (!tsh_call_mismatch(tshi_compose_called, op, group->size, op->number, group->id,
                                  &error)) {
        return 1;
    }
    tshi_compose_raise(group->world, &error);
    return 0;
}

/* ---- data ---- */

/* An all-reduce is a reduce-scatter of its chunks, then an all-gather; a broadcast is an all-gather
 * of what the root alone has. Fills op->part, and op->to and op->from: the elements for and from
 * each rank. */
static void tshi_compose_plan(tshi_compose_op *op) {
    const tsh_coll *coll = &op->coll;
    tsh_coll *part = &op->part;
    int me = op->group->rank, n = op->group->size;
    *part = *coll;
    if (!tshi_coll_rows(coll->kind)) part->recv_counts = op->counts;
    if (coll->kind != TSH_ALLTOALL) part->send_counts = part->recv_counts;
    if (coll->kind == TSH_BROADCAST) {
        part->kind = TSH_ALLGATHER;
        part->send = coll->recv;
        op->counts[coll->root] = coll->count; /* the others are 0 */
    } else if (coll->kind == TSH_ALLREDUCE) {
        int64_t start = tsh_coll_chunk(coll->count, n, me); /* of this rank's chunk */
        char *chunk = (char *)coll->recv + (size_t)start * tsh_dtype_size(coll->dtype);
        part->kind = op->round ? TSH_ALLGATHER : TSH_REDUCE_SCATTER;
        part->send = op->round ? chunk : coll->send;
        part->recv = op->round ? coll->recv : chunk;
        for (int k = 0; k < n; k++)
            op->counts[k] = tsh_coll_chunk(coll->count, n, k + 1) -
                            tsh_coll_chunk(coll->count, n, k);
    }
    for (int k = 0; k < n; k++) {
        op->to[k] = part->blocks * part->send_counts[part->kind == TSH_ALLGATHER ? me : k];
        op->from[k] = part->blocks * part->recv_counts[part->kind == TSH_REDUCE_SCATTER ? me : k];
    }
}

/* Copies rank k's piece, `blocks` rows of counts[k] elements, from or to a buffer whose rows hold
 * counts[0] + counts[1] + ... elements. */
static void tshi_compose_rows(const tshi_compose_op *op, const int64_t *counts, int k, void *whole,
                              char *packed, int unpacks) {
    size_t width = tsh_dtype_size(op->coll.dtype), n = (size_t)counts[k] * width;
    size_t row = (size_t)tsh_coll_before(counts, op->group->size) * width;
    char *at = (char *)whole + (size_t)tsh_coll_before(counts, k) * width;
    for (int64_t b = 0; b < op->coll.blocks && n; b++, at += row, packed += n)
        memcpy(unpacks ? at : packed, unpacks ? packed : at, n);
}

/* Copies what rank k is sent into `packed`, without gaps. */
static void tshi_compose_pack(const tshi_compose_op *op, int k, char *packed) {
    const tsh_coll *part = &op->part;
    void *send = (void *)(uintptr_t)part->send; /* only read */
    if (part->kind != TSH_ALLGATHER)
        tshi_compose_rows(op, part->send_counts, k, send, packed, 0);
    else if (op->to[k])
        memcpy(packed, send, (size_t)op->to[k] * tsh_dtype_size(part->dtype));
}

/* Starts a round: packs and sends this rank's parts, and posts receives of those for it. */
static void tshi_compose_round(tshi_compose_op *op) {
    const tshi_compose_group *group = op->group;
    size_t width = tsh_dtype_size(op->coll.dtype), out, in;
    tshi_compose_plan(op);
    out = (size_t)tsh_coll_before(op->to, group->size) * width;
    in = (size_t)tsh_coll_before(op->from, group->size) * width;
    free(op->out);
    op->out = (char *)malloc(out + in + 1);
    op->state = TSHI_COMPOSE_MOVING;
    if (!op->out) {
        (void)tshi_compose_no_memory(group->world);
        return;
    }
    op->in = op->out + out;
    for (int i = 0; i < group->size; i++) {
        int k = (group->rank + i) % group->size; /* this rank first */
        char *from = op->out + (size_t)tsh_coll_before(op->to, k) * width;
        char *into = op->in + (size_t)tsh_coll_before(op->from, k) * width;
        tshi_compose_pack(op, k, from);
        if (i == 0) {
            if (op->from[k]) memcpy(into, from, (size_t)op->from[k] * width);
            continue;
        }
        tshi_compose_send(group->world, group->ranks[k],
                          tshi_compose_seq(group, TSHI_COMPOSE_DATA), from, op->to[k],
                          op->coll.dtype);
        tshi_compose_post_recv(op, k, TSHI_COMPOSE_DATA, into, op->from[k], op->coll.dtype);
    }
}

/* For tsh_coll_sum: what rank r sent in this round. */
static const void *tshi_compose_part(const void *user, int r) {
    const tshi_compose_op *op = (const tshi_compose_op *)user;
    return op->in + (size_t)tsh_coll_before(op->from, r) * tsh_dtype_size(op->coll.dtype);
}

/* Ends a round, whose data has arrived: sums it, or copies it to where it belongs. */
static void tshi_compose_finish(tshi_compose_op *op) {
    const tsh_coll *part = &op->part;
    int me = op->group->rank, n = op->group->size;
    op->state = TSHI_COMPOSE_DONE;
    if (part->kind == TSH_REDUCE_SCATTER) {
        if (op->from[me])
            tsh_coll_sum(part->recv, op->from[me], part, n, me, tshi_compose_part, op);
    } else {
        for (int k = 0; k < n; k++)
            tshi_compose_rows(op, part->recv_counts, k, part->recv,
                              (char *)(uintptr_t)tshi_compose_part(op, k), 1);
    }
    if (op->coll.kind == TSH_ALLREDUCE && !op->round++) tshi_compose_round(op);
}

/* ---- ops ---- */

/* Appends an op to the group and sends its header: a collective, a close, or half of a SENDRECV.
 * NULL: no memory, and the world has failed. */
static tshi_compose_op *tshi_compose_add(tshi_compose_group *group, const tsh_coll *coll,
                                         const tsh_ticket *ticket) {
    size_t n = (size_t)group->size, recv = n * sizeof(tsh_coll);
    size_t counts = 3 * n * sizeof(int64_t);
    size_t headers = (n < 2 ? 2 : n) * tshi_compose_header_bytes(group);
    tshi_compose_op **at = &group->first;
    tshi_compose_op *op =
        (tshi_compose_op *)calloc(1, sizeof(tshi_compose_op) + recv + counts + headers);
    if (!op) {
        (void)tshi_compose_no_memory(group->world);
        return NULL;
    }
    op->group = group;
    op->recv = (tsh_coll *)(void *)(op + 1);
    op->counts = (int64_t *)(void *)(op->recv + n);
    op->to = op->counts + n;
    op->from = op->to + n;
    op->headers = (char *)(op->from + n);
    op->coll = *coll;
    op->id = ++group->ids;
    op->deadline = tsh_deadline(coll->timeout_ns, group->world->timeout);
    op->sends = coll->kind == TSH_SEND;
    op->peer = op->sends ? coll->send_to : coll->kind == TSH_RECV ? coll->recv_from : -1;
    op->number = op->sends       ? group->sends[op->peer]++
                 : op->peer >= 0 ? group->recvs[op->peer]++
                                 : group->started++;
    while (*at) at = &(*at)->next;
    *at = op;
    tshi_compose_send_header(op, ticket);
    return op;
}

/* 1 if op, and the other half of a SENDRECV, is done. */
static int tshi_compose_is_done(const tshi_compose_op *op) {
    return op->state == TSHI_COMPOSE_DONE && (!op->other || op->other->state == TSHI_COMPOSE_DONE);
}

/* Takes op, with its other half, out of its group and frees it. */
static void tshi_compose_release(tshi_compose_op *op) {
    tshi_compose_op **at = &op->group->first;
    while (*at != op) at = &(*at)->next;
    *at = op->next;
    if (op->other) tshi_compose_release(op->other);
    free(op->out);
    free(op);
}

/* 1 if what arrives next on op's channels belongs to op: older ops on the same channels
 * (collectives, or messages to or from the same peer) have received theirs. Headers and data have
 * channels of their own. */
static int tshi_compose_is_next(const tshi_compose_op *op) {
    for (const tshi_compose_op *b = op->group->first; b != op; b = b->next) {
        if (b->peer != op->peer || b->sends != op->sends || b->state == TSHI_COMPOSE_DONE) continue;
        if (op->state != TSHI_COMPOSE_MATCHING || b->state == TSHI_COMPOSE_MATCHING) return 0;
    }
    return 1;
}

/* Takes the steps of op that are possible now. */
static void tshi_compose_step(tshi_compose_op *op) {
    const tsh_coll *coll = &op->coll;
    if (op->state == TSHI_COMPOSE_MATCHING && tshi_compose_is_next(op) &&
        tshi_compose_arrived(op) && tshi_compose_match(op))
        op->state = TSHI_COMPOSE_QUEUED;
    if (op->state == TSHI_COMPOSE_QUEUED && tshi_compose_is_next(op)) {
        op->state = TSHI_COMPOSE_MOVING;
        if (coll->kind == TSH_SEND)
            tshi_compose_send(op->group->world, op->group->ranks[op->peer],
                              tshi_compose_seq(op->group, TSHI_COMPOSE_BODIES), coll->send,
                              coll->count, coll->dtype);
        else if (coll->kind == TSH_RECV)
            tshi_compose_post_recv(op, op->peer, TSHI_COMPOSE_BODIES, coll->recv, coll->count,
                                   coll->dtype);
        else if (coll->kind < TSH_BARRIER)
            tshi_compose_round(op);
    }
    while (op->state == TSHI_COMPOSE_MOVING && tshi_compose_arrived(op)) {
        if (op->peer >= 0 || coll->kind >= TSH_BARRIER)
            op->state = TSHI_COMPOSE_DONE;
        else
            tshi_compose_finish(op);
    }
}

/* ---- groups ---- */

/* A group with its arrays, in one block of memory; NULL: there is none. */
static tshi_compose_group *tshi_compose_group_new(tshi_compose_world *world, int size) {
    size_t n = (size_t)size;
    tshi_compose_group *group = (tshi_compose_group *)calloc(
        1, sizeof *group + 2 * n * sizeof(uint64_t) + n * sizeof(int));
    if (!group) return NULL;
    group->world = world;
    group->size = size;
    group->sends = (uint64_t *)(void *)(group + 1);
    group->recvs = group->sends + n;
    group->ranks = (int *)(void *)(group->recvs + n);
    return group;
}

static void tshi_compose_group_free(tshi_compose_group *group) {
    tshi_compose_group **at = &group->world->groups;
    while (group->first) tshi_compose_release(group->first);
    while (*at != group) at = &(*at)->next;
    *at = group->next;
    free(group);
}

/* Adds a group, whose ranks are filled in, to its world, and makes this rank's comm of it. */
static void tshi_compose_open(tshi_compose_group *group, uint64_t id, tsh_comm *out) {
    tshi_compose_world *world = group->world;
    group->id = id;
    while (group->ranks[group->rank] != world->messages.rank) group->rank++;
    group->next = world->groups;
    world->groups = group;
    world->open_comms++;
    *out = tsh_comm_make(&world->ops, group, group->rank, group->size, id);
}

/* ---- waiting ---- */

/* After a new report of rank r: an error if r waits in a cycle. */
static void tshi_compose_check_cycle(tshi_compose_world *world, int r) {
    tsh_error error;
    if (tsh_wait_cycle(world->report, world->messages.size, r, world->search, &error))
        tshi_compose_raise(world, &error);
}

/* Returns the memory of rank r's report, which counts as known from now on. */
static tsh_wait_report *tshi_compose_report_of(tshi_compose_world *world, int r) {
    world->report[r] = (tsh_wait_report *)(void *)((char *)world->incoming +
                                                   (size_t)(r + 1) * world->report_bytes);
    return world->report[r];
}

/* Receives the reports of other ranks. */
static void tshi_compose_read_reports(tshi_compose_world *world) {
    tsh_comm *messages = &world->messages;
    for (int r = 0; r < messages->size && tshi_compose_code(world) == TSH_OK; r++) {
        tsh_coll coll = tshi_compose_message(TSH_RECV, r, TSHI_COMPOSE_REPORTS, TSH_I64);
        tsh_req again = 0;
        coll.recv = world->incoming;
        coll.count = (int64_t)(world->report_bytes / sizeof(int64_t));
        if (r == messages->rank || messages->ops->start(messages, &coll, &again) != TSH_OK || again)
            continue; /* a rank that is gone may have left in good order */
        memcpy(tshi_compose_report_of(world, r), world->incoming, world->report_bytes);
        tshi_compose_check_cycle(world, r);
    }
}

/* Takes every step that is possible now, on all comms of this rank. */
static void tshi_compose_advance(tshi_compose_world *world) {
    world->messages.ops->progress(&world->messages);
    tshi_compose_read_reports(world);
    for (tshi_compose_group *group = world->groups, *next; group; group = next) {
        next = group->next;
        for (tshi_compose_op *op = group->first; op; op = op->next) {
            if (tshi_compose_code(world) != TSH_OK) return;
            tshi_compose_step(op);
        }
        if (group->closing && group->first && group->first->state == TSHI_COMPOSE_DONE)
            tshi_compose_group_free(group);
    }
}

/* Writes how far this rank has come in each group and with each peer. Returns how many marks these
 * are. */
static int tshi_compose_marks(const tshi_compose_world *world, tsh_wait_mark *mark) {
    int n = 0;
    for (const tshi_compose_group *g = world->groups; g; g = g->next) {
        for (int peer = -1; peer < g->size && n < TSHI_COMPOSE_MARKS; peer++) {
            if (peer >= 0 && !g->sends[peer] && !g->recvs[peer]) continue;
            mark[n].group = g->id;
            mark[n].peer = peer < 0 ? -1 : g->ranks[peer];
            mark[n].sends = peer < 0 ? g->started : g->sends[peer];
            mark[n++].recvs = peer < 0 ? 0 : g->recvs[peer];
        }
    }
    return n;
}

/* Fills r: this rank waits in op. */
static void tshi_compose_fill_report(const tshi_compose_op *op, tsh_wait_report *r) {
    const tshi_compose_group *group = op->group;
    int *awaited;
    memset(r, 0, group->world->report_bytes);
    r->group = group->id;
    r->seq = op->peer >= 0 ? 0 : op->number;
    r->pairwise = op->peer >= 0;
    r->send_to = r->recv_from = -1;
    r->marks = tshi_compose_marks(group->world, (tsh_wait_mark *)(void *)(r + 1));
    awaited = (int *)(void *)((tsh_wait_mark *)(void *)(r + 1) + r->marks);
    if (op->peer >= 0) {
        awaited[0] = group->ranks[op->peer];
        *(op->sends ? &r->send_to : &r->recv_from) = awaited[0];
        *(op->sends ? &r->send_number : &r->recv_number) = op->number;
    } else {
        memcpy(awaited, group->ranks, (size_t)group->size * sizeof *awaited);
    }
    r->awaited = op->peer >= 0 ? 1 : group->size;
    tsh_coll_where(&op->coll, group->size, op->number, group->id, r->text, sizeof r->text);
}

/* Sends all ranks a report that this one waits in op, and looks for a cycle. */
static void tshi_compose_send_report(const tshi_compose_op *op) {
    tshi_compose_world *world = op->group->world;
    int me = world->messages.rank;
    tshi_compose_fill_report(op, tshi_compose_report_of(world, me));
    for (int to = 0; to < world->messages.size; to++)
        if (to != me)
            tshi_compose_send(world, to, TSHI_COMPOSE_REPORTS, world->report[me],
                              (int64_t)(world->report_bytes / sizeof(int64_t)), TSH_I64);
    tshi_compose_check_cycle(world, me);
}

/* Reports that op's time limit has passed, and which ranks it waits for. */
static void tshi_compose_time_out(const tshi_compose_op *op) {
    const tshi_compose_group *group = op->group;
    tsh_error error;
    (void)tsh_error_set(&error, TSH_ERR_TIMEOUT, -1, "rank %d ran out of time in ",
                        group->ranks[group->rank]);
    tsh_coll_where(&op->coll, group->size, op->number, group->id, error.message,
                   sizeof error.message);
    tsh_text_add(error.message, sizeof error.message, "; %s:",
                 op->state == TSHI_COMPOSE_MATCHING ? "absent ranks"
                                                    : "ranks that have not finished");
    for (int r = 0; r < group->size; r++) {
        int i = 0;
        while (i < op->recvs && op->recv[i].recv_from != group->ranks[r]) i++;
        if (i == op->recvs) continue;
        if (error.rank < 0) error.rank = group->ranks[r];
        tsh_text_add(error.message, sizeof error.message, " %d", group->ranks[r]);
    }
    if (error.rank < 0) tsh_text_add(error.message, sizeof error.message, " none");
    tshi_compose_raise(group->world, &error);
}

/* Waits until op is done or the world has failed. Returns the world's error code. A rank that has
 * waited for 20 ms reports where, so that cycles are found. */
static tsh_result tshi_compose_await(tshi_compose_op *op) {
    tshi_compose_world *world = op->group->world;
    int64_t begin = tsh_now();
    int reported = 0; /* this wait has been reported */
    for (;;) {
        int64_t now;
        tsh_result code;
        tshi_compose_advance(world);
        code = tshi_compose_code(world);
        if (code != TSH_OK || tshi_compose_is_done(op)) return code;
        now = tsh_now();
        if (now >= op->deadline) tshi_compose_time_out(op);
        if (now - begin > 20 * TSHI_COMPOSE_MS && !reported++)
            tshi_compose_send_report(op->state == TSHI_COMPOSE_DONE ? op->other : op);
        world->messages.ops->idle(&world->messages, TSHI_COMPOSE_MS);
    }
}

/* ---- the composed comm's tsh_comm_ops ---- */

static tshi_compose_group *tshi_compose_group_of(const tsh_comm *comm) {
    return (tshi_compose_group *)comm->impl;
}

static tshi_compose_op *tshi_compose_find(const tshi_compose_group *group, tsh_req req) {
    tshi_compose_op *op = group->first;
    while (op && op->id != req) op = op->next;
    return op;
}

/* Starts a collective, or both halves of a SENDRECV: op and op->other. */
static tsh_result tshi_compose_start(tsh_comm *comm, const tsh_coll *coll, tsh_req *req) {
    tshi_compose_group *group = tshi_compose_group_of(comm);
    tsh_result code = tshi_compose_code(group->world);
    tsh_coll half = coll->kind == TSH_SENDRECV ? tsh_coll_half(coll, 1) : *coll;
    tshi_compose_op *op;
    if (code != TSH_OK) return code;
    op = tshi_compose_add(group, &half, NULL);
    if (!op) return TSH_ERR_MEMORY;
    if (coll->kind == TSH_SENDRECV) {
        half = tsh_coll_half(coll, 0);
        op->other = tshi_compose_add(group, &half, NULL);
        if (!op->other) return TSH_ERR_MEMORY; /* and the world has failed */
    }
    *req = op->id;
    return TSH_OK;
}

static tsh_result tshi_compose_wait(tsh_comm *comm, tsh_req req) {
    tshi_compose_op *op = tshi_compose_find(tshi_compose_group_of(comm), req);
    tsh_result code;
    if (!op) return TSH_ERR_ARGUMENT;
    code = tshi_compose_await(op);
    tshi_compose_release(op);
    return code;
}

static tsh_result tshi_compose_test(tsh_comm *comm, tsh_req req, int *done) {
    tshi_compose_world *world = tshi_compose_group_of(comm)->world;
    tshi_compose_op *op = tshi_compose_find(tshi_compose_group_of(comm), req);
    tsh_result code;
    if (!op) return TSH_ERR_ARGUMENT;
    tshi_compose_advance(world);
    if (!tshi_compose_is_done(op) && tsh_now() >= op->deadline) tshi_compose_time_out(op);
    code = tshi_compose_code(world);
    *done = code != TSH_OK || tshi_compose_is_done(op);
    return code;
}

static void tshi_compose_progress(tsh_comm *comm) {
    tshi_compose_advance(tshi_compose_group_of(comm)->world);
}

static tsh_result tshi_compose_status(tsh_comm *comm, tsh_error *error) {
    tsh_comm *messages = &tshi_compose_group_of(comm)->world->messages;
    return messages->ops->status(messages, error);
}

static void tshi_compose_abort(tsh_comm *comm, const tsh_error *why) {
    tsh_comm *messages = &tshi_compose_group_of(comm)->world->messages;
    tsh_error error = *why;
    if (error.rank < 0) error.rank = messages->rank;
    messages->ops->abort(messages, &error);
}

/* Makes the group of this rank's color from the headers of a split. Its id, the same on its ranks
 * and used by no other group: the lowest of them and how many splits that one had started. NULL: no
 * memory. */
static tshi_compose_group *tshi_compose_color_group(const tshi_compose_op *op, int color,
                                                    uint64_t *id) {
    const tshi_compose_group *group = op->group;
    const tshi_compose_header *header = tshi_compose_header_of(op, 0);
    tshi_compose_group *made = NULL;
    int *order = (int *)calloc((size_t)group->size, sizeof *order), n, first = 0;
    if (!order) return NULL;
    n = tsh_split_order(&header->ticket, tshi_compose_header_bytes(group), group->size, color,
                        order);
    made = tshi_compose_group_new(group->world, n);
    for (int i = 0; made && i < n; i++) made->ranks[i] = group->ranks[order[i]];
    while (tshi_compose_header_of(op, first)->ticket.color != color) first++;
    *id = 1 + (uint64_t)group->ranks[first] +
          (uint64_t)group->world->messages.size * tshi_compose_header_of(op, first)->splits;
    free(order);
    return made;
}

static tsh_result tshi_compose_split(tsh_comm *comm, int color, int key, tsh_comm *out) {
    tshi_compose_group *group = tshi_compose_group_of(comm), *made = NULL; /* made: the new one */
    tsh_result code = tshi_compose_code(group->world);
    tsh_coll coll = tsh_coll_make(TSH_SPLIT, TSH_F32);
    tsh_ticket ticket = {color, key};
    tshi_compose_op *op;
    uint64_t id = 0;
    if (code != TSH_OK) return code;
    group->world->splits++; /* this one counted */
    op = tshi_compose_add(group, &coll, &ticket);
    if (!op) return TSH_ERR_MEMORY;
    code = tshi_compose_await(op);
    if (code == TSH_OK && color >= 0) made = tshi_compose_color_group(op, color, &id);
    tshi_compose_release(op);
    if (code != TSH_OK || color < 0) return code;
    if (!made) return tshi_compose_no_memory(group->world);
    tshi_compose_open(made, id, out);
    return TSH_OK;
}

/* Closing is a collective of its own kind, which nobody waits for: its headers tell ranks that call
 * something else in the group. The last comm of a world waits for all of them, or until the world
 * has failed. */
static void tshi_compose_close(tsh_comm *comm) {
    tshi_compose_group *group = tshi_compose_group_of(comm);
    tshi_compose_world *world = group->world;
    tsh_coll coll = tsh_coll_make(TSH_BARRIER, TSH_F32);
    tsh_error error;
    coll.kind = TSH_COLL_KINDS; /* a kind of its own: this rank closes the group */
    if (group->first && tshi_compose_code(world) == TSH_OK) {
        (void)tsh_error_set(&error, TSH_ERR_LOST, world->messages.rank,
                            "rank %d closed group %llu before it waited for its requests",
                            world->messages.rank, (unsigned long long)group->id);
        tshi_compose_raise(world, &error);
    }
    if (tshi_compose_code(world) == TSH_OK && tshi_compose_add(group, &coll, NULL))
        group->closing = 1;
    tshi_compose_advance(world);
    comm->impl = NULL;
    if (--world->open_comms > 0) return; /* others of this rank are open */
    while (world->groups && tshi_compose_code(world) == TSH_OK) {
        if (tsh_now() >= world->groups->first->deadline)
            tshi_compose_time_out(world->groups->first);
        world->messages.ops->idle(&world->messages, TSHI_COMPOSE_MS);
        tshi_compose_advance(world);
    }
    while (world->groups) tshi_compose_group_free(world->groups);
    world->messages.ops->close(&world->messages);
    free(world);
}

TSH_API tsh_result tsh_comm_compose(const tsh_comm *messages, tsh_comm *out, tsh_error *error) {
    static const tsh_comm_ops all = TSH_COMM_OPS(tshi_compose, "", TSH_CAP_ORDERED);
    size_t n = (size_t)messages->size;
    size_t marks = TSHI_COMPOSE_MARKS * sizeof(tsh_wait_mark);
    size_t report = (sizeof(tsh_wait_report) + marks + n * sizeof(int) + 7) / 8 * 8;
    tshi_compose_world *world = (tshi_compose_world *)calloc(
        1, sizeof *world + (n + 1) * report + n * (sizeof *world->report + sizeof *world->search));
    tshi_compose_group *group = tshi_compose_group_new(world, messages->size);
    if (!world || !group) (void)tsh_error_set(error, TSH_ERR_MEMORY, -1, "no memory for a world");
    if (!world || !group || !tsh_timeout(0, "", &world->timeout, error)) {
        free(world);
        free(group);
        return error->code;
    }
    world->messages = *messages;
    world->report_bytes = report;
    world->incoming = (tsh_wait_report *)(void *)(world + 1);
    world->report = (tsh_wait_report **)(void *)((char *)world->incoming + (n + 1) * report);
    world->search = (tsh_coll_search *)(void *)(world->report + n);
    for (int r = 0; r < messages->size; r++) group->ranks[r] = r;
    world->ops = all;
    world->ops.name = messages->ops->name;
    world->ops.caps |= messages->ops->caps;
    tshi_compose_open(group, 1, out);
    return TSH_OK;
}

#undef TSHI_COMPOSE_MS

/* ========================================================================== */
/* >>comm                                                MARK: - comm (private) */
/* The public entry points: check a collective, number it, count it, and hand  */
/* it to the backend; a group of one is served here.                           */
/* Needs: >>error >>trace >>coll.                                              */
/* ========================================================================== */

/* Every collective of the library passes through tsh_start and tsh_wait. The blocking functions
 * fill a tsh_coll and call both (tshi_comm_run). What tsh_start has accepted, a backend need not
 * check again. */

enum { TSHI_COMM_IN_FLIGHT = 64 }; /* rule 1 of >>comm-api */

/* The elements that a collective reads from this rank's send and writes to its recv. -1: a count,
 * or the rank to send to or receive from, is not valid. */
typedef struct tshi_comm_size {
    int64_t send, recv;
} tshi_comm_size;

/* The sum of n counts times `blocks`; -1 if a count is negative or the bytes overflow. */
static int64_t tshi_comm_total(const int64_t *counts, int n, int64_t blocks) {
    int64_t limit = (int64_t)(PTRDIFF_MAX / 8), total = 0; /* elements of at most 8 bytes */
    if (!counts || blocks < 0) return -1;
    for (int r = 0; r < n; r++) {
        if (counts[r] < 0 || counts[r] > limit - total) return -1;
        total += counts[r];
    }
    return total && blocks > limit / total ? -1 : total * blocks;
}

static tshi_comm_size tshi_comm_measure(const tsh_comm *comm, const tsh_coll *coll) {
    tshi_comm_size size = {0, 0};
    int n = comm->size;
    int64_t count = tshi_comm_total(&coll->count, 1, 1), whole, own;
    int root = coll->root >= 0 && coll->root < n; /* it is a rank */
    int to = coll->send_to >= 0 && coll->send_to < n;
    int from = coll->recv_from >= 0 && coll->recv_from < n;
    switch (coll->kind) {
    case TSH_ALLREDUCE: size.send = size.recv = count; break;
    case TSH_ALLGATHER:
    case TSH_REDUCE_SCATTER:
        whole = tshi_comm_total(coll->recv_counts, n, coll->blocks);
        own = whole < 0 ? -1 : coll->recv_counts[comm->rank] * coll->blocks;
        size.send = coll->kind == TSH_ALLGATHER ? own : whole;
        size.recv = coll->kind == TSH_ALLGATHER ? whole : own;
        break;
    case TSH_BROADCAST: size.recv = root ? count : -1; break;
    case TSH_ALLTOALL:
        size.send = tshi_comm_total(coll->send_counts, n, coll->blocks);
        size.recv = tshi_comm_total(coll->recv_counts, n, coll->blocks);
        break;
    case TSH_SEND: size.send = to ? count : -1; break;
    case TSH_RECV: size.recv = from ? count : -1; break;
    case TSH_SENDRECV:
        size.send = to ? tshi_comm_total(coll->send_counts, 1, 1) : -1;
        size.recv = from ? tshi_comm_total(coll->recv_counts, 1, 1) : -1;
        break;
    case TSH_BARRIER: break;
    case TSH_SPLIT:
    case TSH_COLL_KINDS: size.send = -1; break;
    }
    return size;
}

/* What tsh_world(NULL), tsh_tp(NULL) ... return: a group of one that refuses calls. Not written. */
static const tsh_comm tshi_comm_none = {NULL, NULL, 0, 1, 0, 0, 0, {{0}, {0}}, NULL, NULL};

/* 1 if comm is open. A comm of zeros (a rank without a color, or closed) has size 0. */
static int tshi_comm_usable(const tsh_comm *comm) {
    return comm && comm != &tshi_comm_none && comm->size >= 1 && comm->rank >= 0 &&
           comm->rank < comm->size && (comm->ops || comm->size == 1);
}

/* 1 if dtype, counts, operation, buffers and time limit can be used. */
static int tshi_comm_valid(const tsh_coll *coll, tshi_comm_size size) {
    if ((unsigned)coll->dtype >= (unsigned)TSHI_DTYPES || size.send < 0 || size.recv < 0) return 0;
    if (tshi_coll_reduces(coll->kind) &&
        ((unsigned)coll->redop > TSH_AVG ||
         (coll->redop == TSH_AVG && !tshi_dtypes[coll->dtype].floating)))
        return 0;
    return (!size.send || coll->send) && (!size.recv || coll->recv) && coll->timeout_ns >= 0;
}

/* n (P - 1) / P, P = size, without overflow: n = q P + r gives q (P - 1) + r (P - 1) / P. */
static uint64_t tshi_comm_share(uint64_t n, int size) {
    uint64_t p = (uint64_t)size;
    return n / p * (p - 1) + n % p * (p - 1) / p;
}

/* The bytes that this rank sends if the collective runs around a ring. */
static uint64_t tshi_comm_bytes(const tsh_comm *comm, const tsh_coll *coll, tshi_comm_size size) {
    uint64_t width = tsh_dtype_size(coll->dtype);
    uint64_t send = (uint64_t)size.send * width, recv = (uint64_t)size.recv * width;
    switch (coll->kind) {
    case TSH_ALLREDUCE: return tshi_comm_share(2 * send, comm->size); /* the next two */
    case TSH_ALLGATHER: return tshi_comm_share(recv, comm->size);
    case TSH_REDUCE_SCATTER: return tshi_comm_share(send, comm->size);
    case TSH_BROADCAST: return comm->size > 1 ? recv : 0; /* each passes it on */
    case TSH_ALLTOALL:
        return send - (uint64_t)(coll->send_counts[comm->rank] * coll->blocks) * width;
    default: return comm->size > 1 ? send : 0;
    }
}

/* Runs a collective of a group of one: copies send to recv. */
static tsh_result tshi_comm_alone(const tsh_coll *coll, tshi_comm_size size) {
    int moves = coll->kind != TSH_BROADCAST && coll->kind != TSH_BARRIER;
    if (coll->kind == TSH_SEND || coll->kind == TSH_RECV) return TSH_ERR_ARGUMENT; /* to whom? */
    if (moves && size.send != size.recv) return TSH_ERR_ARGUMENT;
    if (moves && size.send && coll->send != coll->recv)
        memmove(coll->recv, coll->send, (size_t)size.send * tsh_dtype_size(coll->dtype));
    return TSH_OK;
}

/* Compares the models of the group's ranks if this rank's has changed since they were last
 * compared. */
static tsh_result tshi_comm_compare(tsh_comm *comm) {
    tsh_ctx *ctx = comm ? comm->unchecked : NULL;
    if (!ctx) return TSH_OK;
    comm->unchecked = NULL;
    return ctx->compare(comm, ctx);
}

/* Runs a blocking collective. */
TSHI_OUTLINE tsh_result tshi_comm_run(tsh_comm *comm, tsh_coll *coll) {
    tsh_req req;
    tsh_result result = tshi_coll_pairwise(coll->kind) ? TSH_OK : tshi_comm_compare(comm);
    if (result == TSH_OK) result = tsh_start(comm, coll, &req);
    return result != TSH_OK ? result : tsh_wait(comm, req);
}

/* tsh_coll_make with the buffers, and the count of kinds that have one count. */
static tsh_coll tshi_comm_coll(tsh_coll_kind kind, const void *send, void *recv, int64_t count,
                               tsh_dtype dtype) {
    tsh_coll coll = tsh_coll_make(kind, dtype);
    coll.send = send;
    coll.recv = recv;
    coll.count = count;
    return coll;
}

TSH_API tsh_result tsh_allreduce(tsh_comm *comm, void *buffer, int64_t count, tsh_dtype dtype,
                                 tsh_redop op) {
    tsh_req req;
    tsh_result result = tshi_comm_compare(comm);
    if (result == TSH_OK) result = tsh_allreduce_start(comm, buffer, count, dtype, op, &req);
    return result != TSH_OK ? result : tsh_wait(comm, req);
}

TSH_API tsh_result tsh_allgather(tsh_comm *comm, const void *send, void *recv,
                                 const int64_t *counts, int64_t blocks, tsh_dtype dtype) {
    tsh_coll coll = tshi_comm_coll(TSH_ALLGATHER, send, recv, 0, dtype);
    coll.recv_counts = counts;
    coll.blocks = blocks;
    return tshi_comm_run(comm, &coll);
}

TSH_API tsh_result tsh_reduce_scatter(tsh_comm *comm, const void *send, void *recv,
                                      const int64_t *counts, int64_t blocks, tsh_dtype dtype,
                                      tsh_redop op) {
    tsh_coll coll = tshi_comm_coll(TSH_REDUCE_SCATTER, send, recv, 0, dtype);
    coll.recv_counts = counts;
    coll.blocks = blocks;
    coll.redop = op;
    return tshi_comm_run(comm, &coll);
}

TSH_API tsh_result tsh_broadcast(tsh_comm *comm, void *buffer, int64_t count, tsh_dtype dtype,
                                 int root) {
    tsh_coll coll = tshi_comm_coll(TSH_BROADCAST, NULL, buffer, count, dtype);
    coll.root = root;
    return tshi_comm_run(comm, &coll);
}

TSH_API tsh_result tsh_alltoall(tsh_comm *comm, const void *send, const int64_t *send_counts,
                                void *recv, const int64_t *recv_counts, int64_t blocks,
                                tsh_dtype dtype) {
    tsh_coll coll = tshi_comm_coll(TSH_ALLTOALL, send, recv, 0, dtype);
    coll.send_counts = send_counts;
    coll.recv_counts = recv_counts;
    coll.blocks = blocks;
    return tshi_comm_run(comm, &coll);
}

TSH_API tsh_result tsh_send(tsh_comm *comm, const void *buffer, int64_t count, tsh_dtype dtype,
                            int to) {
    tsh_coll coll = tshi_comm_coll(TSH_SEND, buffer, NULL, count, dtype);
    coll.send_to = to;
    return tshi_comm_run(comm, &coll);
}

TSH_API tsh_result tsh_recv(tsh_comm *comm, void *buffer, int64_t count, tsh_dtype dtype,
                            int from) {
    tsh_coll coll = tshi_comm_coll(TSH_RECV, NULL, buffer, count, dtype);
    coll.recv_from = from;
    return tshi_comm_run(comm, &coll);
}

TSH_API tsh_result tsh_sendrecv(tsh_comm *comm, const void *send, int64_t send_count, int to,
                                void *recv, int64_t recv_count, int from, tsh_dtype dtype) {
    tsh_coll coll = tshi_comm_coll(TSH_SENDRECV, send, recv, 0, dtype);
    coll.send_counts = &send_count;
    coll.recv_counts = &recv_count;
    coll.send_to = to;
    coll.recv_from = from;
    return tshi_comm_run(comm, &coll);
}

TSH_API tsh_result tsh_barrier(tsh_comm *comm) {
    tsh_coll coll = tsh_coll_make(TSH_BARRIER, TSH_F32);
    return tshi_comm_run(comm, &coll);
}

TSH_API tsh_coll tsh_coll_make(tsh_coll_kind kind, tsh_dtype dtype) {
    tsh_coll coll;
    memset(&coll, 0, sizeof coll);
    coll.size = (uint32_t)sizeof coll;
    coll.kind = kind;
    coll.dtype = dtype;
    coll.blocks = 1;
    coll.root = coll.send_to = coll.recv_from = coll.tag = -1;
    return coll;
}

TSH_API tsh_result tsh_start(tsh_comm *comm, tsh_coll *coll, tsh_req *req) {
    tsh_result result;
    tshi_comm_size size;
    uint64_t bytes;
    int64_t begin;
    int pairwise;
    if (!coll || !req) return TSH_ERR_ARGUMENT;
    *req = 0;
    if (!tshi_comm_usable(comm) || coll->size != sizeof *coll) return TSH_ERR_ARGUMENT;
    if (!tshi_coll_rows(coll->kind) || coll->blocks == 0) coll->blocks = 1;
    size = tshi_comm_measure(comm, coll);
    if (!tshi_comm_valid(coll, size)) return TSH_ERR_ARGUMENT;
    if (comm->in_flight >= TSHI_COMM_IN_FLIGHT) return TSH_ERR_STATE;
    pairwise = tshi_coll_pairwise(coll->kind); /* numbered by the backend */
    coll->seq = pairwise ? 0 : comm->next_seq;
    begin = tshi_trace_now(comm->trace);
    result = comm->ops ? comm->ops->start(comm, coll, req) : tshi_comm_alone(coll, size);
    if (result != TSH_OK) return result;
    if (!pairwise) comm->next_seq++;
    if (*req) comm->in_flight++; /* 0: it is complete already */
    bytes = tshi_comm_bytes(comm, coll, size);
    comm->stats.calls[coll->kind]++;
    comm->stats.bytes[coll->kind] += bytes;
    if (comm->trace) tshi_trace_sent(comm, tshi_coll_kinds[coll->kind], begin, bytes, *req);
    return TSH_OK;
}

TSH_API tsh_result tsh_test(tsh_comm *comm, tsh_req req, int *done) {
    if (!tshi_comm_usable(comm) || !done) return TSH_ERR_ARGUMENT;
    *done = 1;
    if (!req) return TSH_OK;
    return comm->ops ? comm->ops->test(comm, req, done) : TSH_ERR_ARGUMENT;
}

TSH_API tsh_result tsh_wait(tsh_comm *comm, tsh_req req) {
    int64_t begin;
    tsh_result result;
    if (!req) return TSH_OK;
    if (!tshi_comm_usable(comm) || !comm->ops || comm->in_flight < 1) return TSH_ERR_ARGUMENT;
    comm->in_flight--;
    begin = tshi_trace_now(comm->trace);
    result = comm->ops->wait(comm, req);
    if (comm->trace) tshi_trace_waited(comm, req, begin);
    return result;
}

TSH_API tsh_result tsh_allreduce_start(tsh_comm *comm, void *buffer, int64_t count, tsh_dtype dtype,
                                       tsh_redop op, tsh_req *req) {
    tsh_coll coll = tshi_comm_coll(TSH_ALLREDUCE, buffer, buffer, count, dtype);
    coll.redop = op;
    return tsh_start(comm, &coll, req);
}

TSH_API void tsh_comm_progress(tsh_comm *comm) {
    if (comm && comm->ops) comm->ops->progress(comm);
}

TSH_API tsh_result tsh_split(tsh_comm *comm, int color, int key, tsh_comm *out) {
    tsh_result result = TSH_OK;
    if (!out) return TSH_ERR_ARGUMENT;
    memset(out, 0, sizeof *out);
    if (!tshi_comm_usable(comm) || color < -1) return TSH_ERR_ARGUMENT;
    if (comm->in_flight >= TSHI_COMM_IN_FLIGHT) return TSH_ERR_STATE;
    if (comm->ops) {
        result = comm->ops->split(comm, color, key, out);
        if (result != TSH_OK) return result;
    } else if (color >= 0) {
        out->size = 1;
    }
    comm->next_seq++;
    comm->stats.calls[TSH_SPLIT]++;
    return TSH_OK;
}

TSH_API tsh_result tsh_comm_error(tsh_comm *comm, tsh_error *error) {
    if (error) {
        memset(error, 0, sizeof *error);
        error->rank = -1;
    }
    return comm && comm->ops ? comm->ops->status(comm, error) : TSH_OK;
}

TSH_API void tsh_comm_abort(tsh_comm *comm, tsh_result code, const char *message) {
    tsh_error why;
    if (!comm || !comm->ops) return;
    if (code <= TSH_OK || code >= TSH_RESULT_COUNT) code = TSH_ERR_ABORTED;
    memset(&why, 0, sizeof why); /* a backend may send all of it */
    (void)tsh_error_set(&why, code, -1, "%s", message ? message : ""); /* rank -1: of the backend */
    comm->ops->abort(comm, &why);
}

TSH_API void tsh_comm_close(tsh_comm *comm) {
    if (!comm || comm == &tshi_comm_none) return; /* that is const */
    if (comm->ops) comm->ops->close(comm);
    memset(comm, 0, sizeof *comm);
}

/* ========================================================================== */
/* >>bucket                                            MARK: - bucket (private) */
/* Gradients summed over dp (the data-parallel replicas) in buckets: flat        */
/* messages, each sent as soon as it is full.                                   */
/* Needs: >>mem >>tensor >>comm.                                                */
/* ========================================================================== */

/* As torch's DistributedDataParallel: tshi_bucket_begin, tshi_bucket_add for each leaf whose
 * gradient is done, tshi_bucket_end, which waits for all. Full buckets are sent in between, while
 * backward goes on. The optimiser's .zero uses the same to all-gather parameters. All ranks add the
 * same leaves in the same order, so that their collectives match. */

enum { TSHI_BUCKET_BYTES = 1 << 20 };

static const char tshi_bucket_what[] = "a bucket of gradients or parameters over dp";

typedef struct tshi_bucket_entry {
    struct tshi_bucket_entry *next;
    tsh_tensor *leaf;
} tshi_bucket_entry;

/* A bucket of several leaves is a matrix (P, width) with a row per rank of dp: row k holds chunk k
 * (tsh_coll_chunk) of every leaf, each padded with zeros to the length of the leaf's chunk 0. So
 * row k is chunk k of the all-reduce too, and each element is summed in the same order, to the same
 * bits, as in an all-reduce of its leaf alone. A reduce-scatter returns row k of the sum to rank k;
 * an all-gather of parameters takes row k from rank k. A bucket of one leaf is sent from where the
 * leaf's values are. */
struct tshi_bucket {
    tshi_bucket *next;
    tsh_coll_kind kind; /* TSH_ALLREDUCE or TSH_REDUCE_SCATTER of gradients, TSH_ALLGATHER */
    tshi_bucket_entry *first, **last;
    int64_t count, width; /* elements of all leaves, of a row */
    int64_t *counts;      /* (P): recv_counts of a reduce-scatter or all-gather */
    tshi_block *block;    /* the message, (P, width) or the only leaf's values; NULL: not sent */
    tshi_block *own;      /* the result of a reduce-scatter: this rank's row */
    tsh_req req;
};

/* Where chunk k of a leaf starts. */
TSHI_OUTLINE int64_t tshi_bucket_chunk(const tsh_tensor *leaf, int k) {
    return tsh_coll_chunk(tsh_local_numel(leaf), leaf->ctx->dp.size, k);
}

static int64_t tshi_bucket_chunk_size(const tsh_tensor *leaf, int k) {
    return tshi_bucket_chunk(leaf, k + 1) - tshi_bucket_chunk(leaf, k);
}

/* Elements in the message. */
static int64_t tshi_bucket_elements(const tsh_ctx *ctx, const tshi_bucket *b) {
    return b->first->next ? b->width * ctx->dp.size : b->count;
}

/* Row k of the message; of a leaf that is alone, its chunk k. */
static tsh_real *tshi_bucket_row(const tshi_bucket *b, int k) {
    return (tsh_real *)tshi_mem_data(b->block) +
           (b->first->next ? b->width * k : tshi_bucket_chunk(b->first->leaf, k));
}

/* Copies chunk k of every leaf into the row, with padding, or out of it. A gradient that is live by
 * then has come back in an earlier bucket: the leaf got another contribution after that one was
 * sent, and the two are added. */
static void tshi_bucket_copy(const tshi_bucket *b, int k, tsh_real *row, int out) {
    for (const tshi_bucket_entry *p = b->first; p; p = p->next) {
        tsh_tensor *leaf = p->leaf;
        const int gathers = b->kind == TSH_ALLGATHER;
        tsh_real *at = (tsh_real *)(gathers ? tshi_tensor_at(leaf) : tshi_mem_data(leaf->gr.block));
        const int64_t n = tshi_bucket_chunk_size(leaf, k), padded = tshi_bucket_chunk_size(leaf, 0);
        at += tshi_bucket_chunk(leaf, k);
        if (!out) {
            memcpy(row, at, (size_t)n * sizeof *row);
            memset(row + n, 0, (size_t)(padded - n) * sizeof *row);
        } else if (!gathers && leaf->gr.live) {
            tsh_coll_fold(at, at, row, n, TSH_REAL, TSH_SUM);
            leaf->sparse = 0; /* the row is dense */
        } else {
            memcpy(at, row, (size_t)n * sizeof *row);
        }
        row += padded;
    }
}

/* Waits for the oldest bucket in flight. Its values are copied out only in tshi_bucket_end, so that
 * late contributions until then find empty accumulators. */
static void tshi_bucket_await(tsh_ctx *ctx) {
    tshi_bucket *b = ctx->buckets.awaited;
    ctx->buckets.awaited = b->next;
    (void)tshi_error_comm(ctx, tsh_wait(&ctx->dp, b->req), tshi_bucket_what);
}

/* Makes the message, b->block, and what else the collective needs. 0: no memory. */
static int tshi_bucket_load(tsh_ctx *ctx, tshi_bucket *b) {
    const int gathers = b->kind == TSH_ALLGATHER, size = ctx->dp.size, rank = ctx->dp.rank;
    tsh_tensor *only = b->first->next ? NULL : b->first->leaf;
    int k;
    if (b->kind != TSH_ALLREDUCE) {
        b->counts = (int64_t *)tshi_mem_arena_alloc(ctx, &ctx->buckets.arena,
                                                    (size_t)size * sizeof *b->counts);
        if (!b->counts) return 0;
        for (k = 0; k < size; k++) b->counts[k] = only ? tshi_bucket_chunk_size(only, k) : b->width;
    }
    if (b->kind == TSH_REDUCE_SCATTER) {
        b->own = tshi_mem_alloc(ctx, TSH_MEM_STEP, tshi_dtype_reals(b->counts[rank]));
        if (!b->own) return 0;
    }
    if (!only) {
        b->block = tshi_mem_alloc(ctx, TSH_MEM_STEP,
                                  tshi_dtype_reals(tshi_bucket_elements(ctx, b)));
        for (k = gathers ? rank : 0; b->block && k < (gathers ? rank + 1 : size); k++)
            tshi_bucket_copy(b, k, tshi_bucket_row(b, k), 0);
    } else if (gathers) {
        b->block = only->block;
        b->block->refs++;
    } else {
        b->block = only->gr.block;
        only->gr.block = NULL; /* late contributions get a new one */
    }
    return b->block != NULL;
}

/* Starts the bucket's collective, unless it has been started. Gradients in it are not live until it
 * comes back. */
static void tshi_bucket_send(tsh_ctx *ctx, tshi_bucket *b) {
    tsh_coll coll = tsh_coll_make(b->kind, TSH_REAL);
    if (b->block || ctx->error.code != TSH_OK || !tshi_bucket_load(ctx, b)) return;
    for (tshi_bucket_entry *p = b->first; p; p = p->next) {
        p->leaf->in_bucket = 0;
        if (b->kind != TSH_ALLGATHER) p->leaf->gr.live = 0;
    }
    coll.send = coll.recv = tshi_mem_data(b->block);
    coll.count = tshi_bucket_elements(ctx, b);
    coll.recv_counts = b->counts;
    coll.redop = ctx->buckets.summed ? TSH_SUM : TSH_AVG;
    if (b->kind == TSH_ALLGATHER) coll.send = tshi_bucket_row(b, ctx->dp.rank);
    if (b->own) coll.recv = tshi_mem_data(b->own); /* the row of this rank */
    while (ctx->dp.in_flight >= TSHI_COMM_IN_FLIGHT - 1 && ctx->buckets.awaited != b)
        tshi_bucket_await(ctx);
    if (tshi_error_comm(ctx, tshi_comm_compare(&ctx->dp), tshi_bucket_what) == TSH_OK)
        (void)tshi_error_comm(ctx, tsh_start(&ctx->dp, &coll, &b->req), tshi_bucket_what);
}

/* Appends a full bucket to the list and sends it, unless all are held until the end. */
static void tshi_bucket_close(tsh_ctx *ctx, tshi_bucket *b) {
    tshi_buckets *all = &ctx->buckets;
    *all->last = b;
    all->last = &b->next;
    if (!all->awaited) all->awaited = b;
    if (!all->hold) tshi_bucket_send(ctx, b);
}

/* Puts a leaf whose gradient is done into the open bucket of its kind, or in one of its own if it
 * fills it; for an all-gather, a parameter whose chunk on this rank is done. */
static void tshi_bucket_add(tsh_tensor *leaf, tsh_coll_kind kind) {
    tsh_ctx *ctx = leaf->ctx;
    tshi_buckets *all = &ctx->buckets;
    const int64_t n = tsh_local_numel(leaf);
    tshi_bucket **open = &all->open[kind != TSH_ALLREDUCE], *b = n < all->limit ? *open : NULL;
    tshi_bucket_entry *p;
    if (leaf->in_bucket || ctx->error.code != TSH_OK) return; /* boxed: in a bucket already */
    p = (tshi_bucket_entry *)tshi_mem_arena_alloc(ctx, &all->arena, sizeof *p);
    if (p && !b) b = (tshi_bucket *)tshi_mem_arena_alloc(ctx, &all->arena, sizeof *b);
    if (!p || !b) return;
    if (!b->first) b->last = &b->first;
    p->leaf = leaf;
    *b->last = p;
    b->last = &p->next;
    b->kind = kind;
    b->count += n;
    b->width += tshi_bucket_chunk_size(leaf, 0);
    leaf->in_bucket = 1;
    if (n < all->limit) *open = b->count < all->limit ? b : NULL; /* full: none is open */
    if (b->count >= all->limit) tshi_bucket_close(ctx, b);
}

/* Puts a gradient into a bucket: reduce-scattered if its optimiser has .zero, else all-reduced. */
static void tshi_bucket_add_grad(tsh_tensor *leaf) {
    tshi_bucket_add(leaf, leaf->flags & TSHI_CHUNKED ? TSH_REDUCE_SCATTER : TSH_ALLREDUCE);
}

/* Starts with no buckets. summed: gradients are summed and divided by the sum of the ranks' weights
 * (tshi_bucket_sum_weights), else averaged. */
static void tshi_bucket_begin(tsh_ctx *ctx, int summed) {
    tshi_buckets *all = &ctx->buckets;
    tshi_mem_reset(&all->arena);
    all->first = all->open[0] = all->open[1] = all->awaited = NULL;
    all->last = &all->first;
    all->summed = summed;
    all->weight = 0;
    all->weight_req = 0;
}

/* Starts summing `weight`, the number of terms in this rank's loss, over dp; the summed gradients
 * are divided by the total. Does nothing unless losses are sums. */
static void tshi_bucket_sum_weights(tsh_ctx *ctx, double weight) {
    tshi_buckets *all = &ctx->buckets;
    if (!all->summed || ctx->error.code != TSH_OK) return;
    all->weight = weight;
    if (tshi_error_comm(ctx, tshi_comm_compare(&ctx->dp), tshi_bucket_what) != TSH_OK) return;
    (void)tshi_error_comm(
        ctx, tsh_allreduce_start(&ctx->dp, &all->weight, 1, TSH_F64, TSH_SUM, &all->weight_req),
        "tsh_backward: sum of weights over data parallel ranks");
}

/* x /= by, unless by is 0: a loss without terms has zero gradients. */
static void tshi_bucket_divide(tsh_real *x, int64_t n, double by) {
    const tsh_real divisor = TSHI_R(by);
    if (!(by > 0)) return;
    for (int64_t i = 0; i < n; i++) x[i] /= divisor;
}

/* Copies the result of a bucket to its leaves: gradients, or values of parameters. */
static void tshi_bucket_copy_back(tsh_ctx *ctx, tshi_bucket *b) {
    const int rank = ctx->dp.rank, scatters = b->kind == TSH_REDUCE_SCATTER;
    const int gathers = b->kind == TSH_ALLGATHER;
    tsh_tensor *only = b->first->next ? NULL : b->first->leaf;
    tsh_real *own = b->own ? (tsh_real *)tshi_mem_data(b->own) : NULL;
    int k, in_place = only && (gathers || !only->gr.block); /* the message's memory is the leaf's */
    if (ctx->buckets.summed)
        tshi_bucket_divide(scatters ? own : tshi_bucket_row(b, 0),
                           scatters ? b->counts[rank] : tshi_bucket_elements(ctx, b),
                           ctx->buckets.weight);
    if (in_place && !gathers) {
        only->gr.block = b->block;
        b->block->refs++;
    }
    for (const tshi_bucket_entry *p = b->first; p && !gathers; p = p->next) {
        tshi_block **grad = &p->leaf->gr.block;
        const size_t bytes = tshi_dtype_reals(tsh_local_numel(p->leaf));
        if (!*grad && !(*grad = tshi_mem_alloc(ctx, TSH_MEM_GRADIENTS, bytes))) return;
    }
    for (k = 0; k < ctx->dp.size; k++)
        if (scatters ? k == rank : !in_place && !(gathers && k == rank))
            tshi_bucket_copy(b, k, scatters ? own : tshi_bucket_row(b, k), 1);
    for (const tshi_bucket_entry *p = b->first; p && !gathers; p = p->next) p->leaf->gr.live = 1;
}

/* Sends the buckets that are left, waits for all, and copies them out. */
static void tshi_bucket_end(tsh_ctx *ctx) {
    tshi_buckets *all = &ctx->buckets;
    if (all->open[0]) tshi_bucket_close(ctx, all->open[0]);
    if (all->open[1]) tshi_bucket_close(ctx, all->open[1]);
    for (tshi_bucket *b = all->first; b; b = b->next) tshi_bucket_send(ctx, b);
    tshi_error_report(ctx); /* peers that wait for this rank's bucket must learn of its error */
    while (all->awaited) tshi_bucket_await(ctx);
    (void)tshi_error_comm(ctx, tsh_wait(&ctx->dp, all->weight_req), tshi_bucket_what);
    for (tshi_bucket *b = all->first; b; b = b->next) {
        for (tshi_bucket_entry *p = b->first; p; p = p->next) p->leaf->in_bucket = 0;
        if (ctx->error.code == TSH_OK) tshi_bucket_copy_back(ctx, b);
        tshi_mem_release(ctx, b->block);
        tshi_mem_release(ctx, b->own);
    }
}

/* ========================================================================== */
/* >>tape                                                MARK: - tape (private) */
/* Ops record their calls on the tape; backward walks it once, newest first.    */
/* Needs: >>kernel >>bucket.                                                    */
/* ========================================================================== */

/* A forward function calls tshi_tape_record last. The op's backward(node) then reads the gradient
 * of the output (tshi_tape_grad) and saved values (tshi_tape_saved), and for each input asks
 * tshi_tape_dest where to write its gradient, and whether to add to what is there. A tensor has two
 * accumulators, gr and gp (see tshi_node); views share those of their base.
 *
 * tsh_backward: tshi_tape_mark finds the nodes that the loss depends on and counts what each tensor
 * will receive; tshi_tape_walk runs their backward and releases them; tshi_tape_sync completes the
 * gradients of leaves over tp and dp. Collectives run while backward goes on: a partial gradient's
 * all-reduce starts with its last contribution (tshi_tape_input_done), a leaf's bucket when it is
 * full (tshi_tape_deliver). */

/* 1 if a call with these inputs is recorded. */
static int tshi_tape_records(const tsh_ctx *ctx, tsh_tensor *const *in, int n) {
    if (ctx->tape.no_grad) return 0;
    for (int i = 0; i < n; i++)
        if (in[i] && in[i]->base->requires_grad) return 1;
    return 0;
}

/* Records a call of op, which made out from n inputs. partial: bits of the inputs whose gradient is
 * a partial sum. params: bytes for the op's options, which it fills in. NULL: no memory. */
static tshi_node *tshi_tape_add(const tshi_op *op, tsh_tensor *out, tsh_tensor *const *in, int n,
                                unsigned partial, size_t params) {
    tsh_ctx *ctx = out->ctx;
    const size_t inputs = (size_t)n * sizeof(tsh_tensor *);
    const size_t saved = ((size_t)n + 1) * sizeof(tshi_block *);
    const size_t head = (sizeof(tshi_node) + inputs + saved + 15) / 16 * 16; /* aligns params */
    tshi_node *node = (tshi_node *)tshi_mem_arena_alloc(ctx, &ctx->tape.arena, head + params);
    if (!node) return NULL;
    node->in = (tsh_tensor **)(void *)(node + 1); /* in, saved, params follow the node */
    node->saved = (tshi_block **)(void *)((char *)node->in + inputs);
    if (params) node->params = (char *)node + head;
    node->op = op;
    node->out = out;
    node->n = n;
    node->depth = ctx->depth;
    node->partial = partial;
    node->module = ctx->module;
    for (int i = 0; i <= n; i++) {
        const tsh_tensor *t = i < n ? in[i] : out;
        if (i < n) node->in[i] = in[i];
        if (!t || !(op->saves & (i < n ? 1u << i : (unsigned)TSHI_OUT))) continue;
        node->saved[i] = t->block;
        t->block->refs++; /* keeps the values until backward */
    }
    node->older = ctx->tape.newest;
    ctx->tape.newest = node;
    out->requires_grad = 1;
    out->node = node;
    return node;
}

/* The name of input i, not terminated, and its length. */
static TSHI_COLD const char *tshi_tape_name(const tshi_op *op, int i, int *length) {
    const char *name = op->inputs ? op->inputs : "input";
    for (; i > 0 && op->inputs; i--) {
        name += strcspn(name, " ");
        name += strspn(name, " ");
    }
    *length = (int)strcspn(name, " ");
    return name;
}

/* Looks for a NaN or an infinity among values of t's local shape. Returns 1 for the first one, with
 * "NaN at (0, 5)", its global index, in text; 0 if all are finite. */
static TSHI_COLD int tshi_tape_not_finite(const tsh_tensor *t, const void *values,
                                          tsh_dtype dtype, const int64_t *stride, char *text) {
    const int64_t n = tsh_local_numel(t);
    int64_t index[TSH_MAX_DIMS] = {0}, e; /* local index of element e */
    char place[TSHI_TEXT_SIZE];
    double value = 0;
    for (e = 0; e < n; e++) {
        int64_t at = 0;
        for (int d = 0; d < t->ndim; d++) at += index[d] * stride[d];
        value = tshi_dtype_get(dtype, values, at);
        if (value - value != 0) break; /* NaN - NaN and inf - inf are NaN */
        for (int d = t->ndim - 1; d >= 0 && ++index[d] == t->local[d]; d--) index[d] = 0;
    }
    if (e == n) return 0;
    for (int d = 0; d < t->ndim; d++) index[d] = tshi_tensor_global(t, d, index[d]);
    (void)snprintf(text, TSHI_TEXT_SIZE, "%s at %.64s",
                   value != value ? "NaN" : value < 0 ? "-infinity" : "infinity",
                   tshi_tensor_sizes(index, t->ndim, place));
    return 1;
}

/* tsh_detect_anomaly: an error if the output of an op is not finite. It names the first input that
 * is not finite either. */
static TSHI_COLD void tshi_tape_check_output(const tshi_op *op, const tsh_tensor *out,
                                             tsh_tensor *const *in, int n) {
    char form[TSHI_TEXT_SIZE], found[TSHI_TEXT_SIZE], old[TSHI_TEXT_SIZE], why[2 * TSHI_TEXT_SIZE];
    int i, length;
    if (!tshi_tape_not_finite(out, tshi_tensor_at(out), out->dtype, out->stride, found))
        return;
    (void)snprintf(why, sizeof why, "the inputs are finite");
    for (i = n - 1; i >= 0; i--) {
        const char *name = tshi_tape_name(op, i, &length);
        if (in[i] && in[i]->block &&
            tshi_tape_not_finite(in[i], tshi_tensor_at(in[i]), in[i]->dtype, in[i]->stride, old))
            (void)snprintf(why, sizeof why, "%.*s has %s already", length, name, old);
    }
    (void)tsh_fail(out->ctx, TSH_ERR_ANOMALY, "%s: the output %s has %s; %s", op->name,
                   tshi_tensor_text(out, form), found, why);
}

/* Every op calls this last, when out has its values. Records the call if the op has a backward and
 * an input requires a gradient; else returns NULL. */
static tshi_node *tshi_tape_record(const tshi_op *op, tsh_tensor *out, tsh_tensor *const *in, int n,
                                   unsigned partial, size_t params) {
    if (out->ctx->trace) tshi_trace_close(out->ctx->trace, op->name);
    if (out->ctx->anomalies) tshi_tape_check_output(op, out, in, n);
    if (!op->backward || out->ctx->error.code != TSH_OK || !tshi_tape_records(out->ctx, in, n))
        return NULL;
    return tshi_tape_add(op, out, in, n, partial, params);
}

/* 1 if the node's backward reads gr and gp of its output itself, so that gp is not all-reduced
 * first. */
static int tshi_tape_accepts_partial(const tshi_node *node) {
    const unsigned wanted = node->out->flags & TSHI_RETAIN ? TSHI_OP_ACCEPTS_RETAINED
                                                           : TSHI_OP_ACCEPTS_PARTIAL;
    return (node->op->flags & wanted) != 0;
}

/* The saved values of input i (i = n: of the output), with that tensor's strides. */
static void *tshi_tape_saved(const tshi_node *node, int i) {
    const tsh_tensor *t = i < node->n ? node->in[i] : node->out;
    return (char *)tshi_mem_data(node->saved[i]) + (size_t)t->offset * tsh_dtype_size(t->dtype);
}

/* The same as values of type tsh_real, as from tshi_kernel_reals_of. */
static tsh_real *tshi_tape_saved_reals(const tshi_node *node, int i, int64_t *stride,
                                       tshi_block **scratch) {
    tsh_tensor saved = *(i < node->n ? node->in[i] : node->out);
    saved.block = node->saved[i]; /* the tensor as it was when recorded */
    return tshi_kernel_reals_of(&saved, stride, scratch);
}

/* -- accumulators ----------------------------------------------------------- */

/* Where a contribution to a gradient goes: data has the input's strides. add 0: overwrite what is
 * there, 1: add to it. */
typedef struct tshi_dest {
    tsh_real *data;
    const int64_t *stride;
    int add;
} tshi_dest;

/* Allocates an accumulator of base if it has no memory yet. 0: there is none. */
static int tshi_tape_allocate(tsh_tensor *base, tshi_accumulator *acc) {
    int kind = base->flags & TSHI_OWNED ? TSH_MEM_GRADIENTS : TSH_MEM_STEP;
    if (!acc->block)
        acc->block = tshi_mem_alloc(base->ctx, kind, tshi_dtype_reals(tsh_local_numel(base)));
    return acc->block != NULL;
}

/* Zeroes an accumulator of base, which is live from then on. */
static void tshi_tape_zero(const tsh_tensor *base, tshi_accumulator *acc) {
    memset(tshi_mem_data(acc->block), 0, tshi_dtype_reals(tsh_local_numel(base)));
    acc->live = 1;
}

/* Fills dest: where in acc, an accumulator of t's base, a contribution to t goes. 0: no memory, or
 * the user has freed the base. */
static int tshi_tape_dest_in(tsh_tensor *t, tshi_accumulator *acc, tshi_dest *dest) {
    tsh_tensor *base = t->base;
    if ((base->flags & TSHI_DEAD) || !tshi_tape_allocate(base, acc)) return 0;
    dest->data = (tsh_real *)tshi_mem_data(acc->block) + (t->offset - base->offset);
    dest->stride = t->stride;
    if (!acc->live && tsh_local_numel(t) != tsh_local_numel(base)) /* t covers a part only */
        tshi_tape_zero(base, acc);
    dest->add = acc->live;
    acc->live = 1;
    acc->clean = base->sparse = 0; /* any row may be written */
    return 1;
}

/* 1 if the node's gradient of input i is a partial sum over tp. */
static int tshi_tape_is_partial(const tshi_node *node, int i) {
    return (node->progress.partial >> i & 1u) && node->out->ctx->tp.size > 1;
}

/* The accumulator that the node's gradient of input i goes to. */
static tshi_accumulator *tshi_tape_accumulator(const tshi_node *node, int i) {
    tsh_tensor *base = node->in[i]->base;
    return tshi_tape_is_partial(node, i) ? &base->gp : &base->gr;
}

/* The argument of a backward whose work threads divide: the node, and where its gradient goes. */
typedef struct tshi_shared {
    const tshi_node *node;
    tshi_dest dest;
} tshi_shared;

/* 1 if t has all elements of its base, in the same order. */
static int tshi_tape_is_whole(const tsh_tensor *t) {
    const tsh_tensor *base = t->base;
    return !base->offset && !t->offset && tshi_tensor_is_dense(t) &&
           tsh_local_numel(t) == tsh_local_numel(base);
}

/* Fills dest: where the op's backward writes its gradient of input i. 0: input i needs none (or an
 * error). */
TSHI_OUTLINE int tshi_tape_dest(tshi_node *node, int i, tshi_dest *dest) {
    tsh_tensor *t = node->in[i];
    if (!t || !t->base->requires_grad) return 0;
    return tshi_tape_dest_in(t, tshi_tape_accumulator(node, i), dest);
}

/* tshi_tape_dest for an op that reads each saved value of input i before it writes the gradient of
 * it: the gradient then overwrites the saved values, if nothing else holds them. */
static int tshi_tape_dest_over(tshi_node *node, int i, tshi_dest *dest) {
    tsh_tensor *t = node->in[i], *base = t->base;
    tshi_accumulator *acc = tshi_tape_accumulator(node, i);
    tshi_block *values = node->saved[i];
    if (base->requires_grad && !acc->block && values && values->refs == 1 &&
        tshi_tape_is_whole(t)) {
        acc->block = values;
        values->refs++;
    }
    return tshi_tape_dest(node, i, dest);
}

/* tshi_tape_dest for an op that can only add: a new accumulator is zeroed first. */
TSHI_OUTLINE int tshi_tape_dest_zeroed(tshi_node *node, int i, tshi_dest *dest) {
    if (!tshi_tape_dest(node, i, dest)) return 0;
    if (!dest->add) tshi_tape_zero(node->in[i]->base, tshi_tape_accumulator(node, i));
    dest->add = 1;
    return 1;
}

/* tshi_tape_dest for an op that adds to a few rows of a leaf (rows, ...): it sets (*marks)[row] = 1
 * for each. *marks NULL: the gradient is dense already. The accumulator is zeroed only if it is not
 * known to be 0. */
static int tshi_tape_dest_rows(tshi_node *node, int i, tshi_dest *dest, int32_t **marks) {
    tsh_tensor *t = node->in[i], *base = t->base;
    tshi_accumulator *acc = tshi_tape_accumulator(node, i);
    size_t size = (size_t)t->local[0] * sizeof **marks;
    *marks = NULL;
    if (t != base || base->node || !base->requires_grad || (base->flags & TSHI_DEAD))
        return tshi_tape_dest_zeroed(node, i, dest);
    if (base->marks && base->marks->size < size) {
        tshi_mem_release(base->ctx, base->marks);
        base->marks = NULL;
    }
    if (!base->marks) base->marks = tshi_mem_alloc(base->ctx, TSH_MEM_GRADIENTS, size);
    if (!base->marks || !tshi_tape_allocate(base, acc)) return 0;
    if (!base->gr.live && !base->gp.live) {
        memset(tshi_mem_data(base->marks), 0, size);
        base->sparse = 1;
    }
    dest->data = (tsh_real *)tshi_mem_data(acc->block);
    if (!acc->live && !acc->clean) tshi_tape_zero(base, acc);
    dest->stride = t->stride;
    dest->add = acc->live = 1;
    acc->clean = 0;
    if (base->sparse) *marks = (int32_t *)tshi_mem_data(base->marks);
    return 1;
}

/* Counts a contribution to a leaf. After the last one the gradient goes into a bucket, to be summed
 * over dp. Partial and row-sparse gradients wait for tshi_tape_sync: they are first completed over
 * tp, and with the rows of other ranks. */
static void tshi_tape_deliver(tsh_tensor *leaf) {
    if (--leaf->contributions > 0 || !leaf->ctx->tape.syncing || !(leaf->flags & TSHI_AVERAGED) ||
        !leaf->gr.live || leaf->gp.live || leaf->sparse)
        return;
    tshi_bucket_add_grad(leaf);
}

/* Marks the rows of a row-sparse gradient that any rank of comm has touched. */
static void tshi_tape_merge_rows(tsh_tensor *t, tsh_comm *comm) {
    if (t->sparse && comm->size > 1)
        (void)tshi_error_comm(
            t->ctx, tsh_allreduce(comm, tshi_mem_data(t->marks), t->local[0], TSH_I32, TSH_MAX),
            "tsh_backward: all-reduce of the rows that a gradient touches");
}

/* tsh_detect_anomaly: 1 if t's gradient in acc is finite; else 0, with an error: "the <what> of
 * <name> (2, 3) R has NaN". */
static TSHI_COLD int tshi_tape_check_grad(const tshi_node *node, const tsh_tensor *t,
                                          const tshi_accumulator *acc, const char *what,
                                          const char *name, int length) {
    char form[TSHI_TEXT_SIZE], found[TSHI_TEXT_SIZE];
    const tsh_real *grad = acc->live ? (const tsh_real *)tshi_mem_data(acc->block) : NULL;
    if (!grad ||
        !tshi_tape_not_finite(t, grad + (t->offset - t->base->offset), TSH_REAL, t->stride, found))
        return 1;
    return tsh_fail(t->ctx, TSH_ERR_ANOMALY, "%s: the %s of %.*s %s has %s", node->op->name, what,
                    length, name, tshi_tensor_text(t, form), found) == TSH_OK;
}

/* The same for the gradient of input i after the node's contribution. gp is skipped while its
 * all-reduce runs. */
static TSHI_COLD int tshi_tape_check_input(const tshi_node *node, int i) {
    const tsh_tensor *t = node->in[i], *base = t->base;
    int length;
    const char *name = tshi_tape_name(node->op, i, &length);
    return tshi_tape_check_grad(node, t, &base->gr, "gradient", name, length) &&
           (base->reducing || tshi_tape_check_grad(node, t, &base->gp, "gradient", name, length));
}

/* Marks the node's gradient of input i as done. The last partial contribution to a tensor starts
 * its all-reduce, which runs while backward goes on. An op that has more to do calls this early;
 * the walk does so for all inputs that are left. */
static void tshi_tape_input_done(tshi_node *node, int i) {
    tsh_tensor *base = node->in[i] ? node->in[i]->base : NULL;
    tsh_ctx *ctx = node->out->ctx;
    if (!base || !base->requires_grad || (node->progress.done >> i & 1u)) return;
    node->progress.done |= 1u << i;
    if (ctx->anomalies && !tshi_tape_check_input(node, i)) return;
    if (!base->node) {
        tshi_tape_deliver(base);
        return;
    }
    if (!tshi_tape_is_partial(node, i) || --base->partial_contributions > 0) return;
    if (tshi_tape_accepts_partial(base->node) || !base->gp.live || ctx->error.code != TSH_OK)
        return;
    (void)tshi_error_comm(ctx,
                          tsh_allreduce_start(&ctx->tp, tshi_mem_data(base->gp.block),
                                              tsh_local_numel(base), TSH_REAL, TSH_SUM, &base->req),
                          "tsh_backward: all-reduce of a gradient");
    base->reducing = ctx->error.code == TSH_OK;
}

/* y += x, n elements. */
static void tshi_tape_add_all(const tsh_ctx *ctx, tsh_real *y, const tsh_real *x, int64_t n) {
    const tshi_operand operands[2] = {tshi_kernel_reals(y, 1), tshi_kernel_reals(x, 1)};
    tshi_kernel_add[ctx->isa](n, operands, NULL);
}

/* gr += gp, once gp is complete; they are swapped if gr is empty. */
static void tshi_tape_merge(tsh_tensor *t) {
    if (!t->gp.live) return;
    if (t->gr.live) {
        tshi_tape_add_all(t->ctx, (tsh_real *)tshi_mem_data(t->gr.block),
                          (const tsh_real *)tshi_mem_data(t->gp.block), tsh_local_numel(t));
        t->gp.live = 0;
    } else {
        tshi_accumulator swap = t->gr; /* gr's memory becomes gp's */
        t->gr = t->gp;
        t->gp = swap;
    }
}

/* Completes the gradient of t, an op's output: waits for the all-reduce of gp, adds it to gr, and
 * zeroes gr if there was no contribution. Returns gr's values; NULL after an error. */
static tsh_real *tshi_tape_complete(tsh_tensor *t) {
    tsh_ctx *ctx = t->ctx;
    if (t->reducing) {
        t->reducing = 0;
        (void)tshi_error_comm(ctx, tsh_wait(&ctx->tp, t->req),
                              "tsh_backward: all-reduce of a gradient");
    }
    if (ctx->error.code != TSH_OK) return NULL;
    tshi_tape_merge(t);
    if (!t->gr.live) {
        if (!tshi_tape_allocate(t, &t->gr)) return NULL;
        tshi_tape_zero(t, &t->gr);
    }
    return (tsh_real *)tshi_mem_data(t->gr.block);
}

/* Completes the gradient of the node's output, unless its backward accepts a partial one. 0: an
 * error. */
static int tshi_tape_complete_out(const tshi_node *node) {
    const tsh_tensor *out = node->out;
    if (tshi_tape_accepts_partial(node)) return 1;
    return tshi_tape_complete(node->out) &&
           (!out->ctx->anomalies ||
            tshi_tape_check_grad(node, out, &out->gr, "sum of the gradients", "the output", 10));
}

/* The complete gradient of the node's output, which its backward reads. */
static tsh_real *tshi_tape_grad(const tshi_node *node) {
    return (tsh_real *)tshi_mem_data(node->out->gr.block);
}

/* dest = values, or dest += values, of t's local shape. */
static void tshi_tape_accumulate(const tsh_tensor *t, const tshi_dest *dest, const tsh_real *values,
                                 const int64_t *stride) {
    tshi_loop loop;
    tshi_kernel_space(&loop, t);
    tshi_kernel_add_operand(&loop, t, dest->data, dest->stride, TSH_REAL);
    tshi_kernel_add_operand(&loop, t, values, stride, TSH_REAL);
    tshi_kernel_run(&loop, dest->add ? tshi_kernel_add[t->ctx->isa] : tshi_kernel_copy, NULL);
}

/* Backward of an op whose gradient of input i equals that of the output. The input shares the
 * output's memory if it has no accumulator yet, and no later input has the same base. */
static void tshi_tape_identity(tshi_node *node, int i) {
    tsh_tensor *t = node->in[i], *base = t->base, *out = node->out;
    tshi_accumulator *acc = tshi_tape_accumulator(node, i);
    tshi_dest dest;
    int k, alone = !((base->flags & TSHI_OWNED) | (out->flags & TSHI_RETAIN)) && !acc->block &&
                   out->gr.block->refs == 1 && tshi_tape_is_whole(t);
    for (k = i + 1; k < node->n; k++) alone &= node->in[k]->base != base;
    if (base->requires_grad && alone) {
        acc->block = out->gr.block;
        acc->block->refs++;
        acc->live = 1;
    } else if (tshi_tape_dest(node, i, &dest)) {
        tshi_tape_accumulate(node->in[i], &dest, tshi_tape_grad(node), out->stride);
    }
}

/* -- backward --------------------------------------------------------------- */

/* Marks the nodes that the loss depends on. Counts the partial contributions that each tensor will
 * get (expected), and all contributions to a leaf (users). */
static void tshi_tape_mark(const tsh_ctx *ctx, const tsh_tensor *loss) {
    if (loss->base->node) loss->base->node->progress.reached = 1;
    for (tshi_node *node = ctx->tape.newest; node; node = node->older) {
        if (!node->progress.reached) continue;
        node->progress.partial = node->partial;
        if ((node->op->flags & TSHI_OP_PASSES_PARTIAL) && tshi_tape_accepts_partial(node) &&
            node->out->partial_contributions)
            node->progress.partial |= TSHI_X;
        for (int i = 0; i < node->n; i++) {
            tsh_tensor *base = node->in[i] ? node->in[i]->base : NULL;
            if (!base || !base->requires_grad) continue;
            if (base->node)
                base->node->progress.reached = 1;
            else
                base->contributions++;
            if (tshi_tape_is_partial(node, i)) base->partial_contributions++;
        }
        for (int i = 0; i < node->leaf_count; i++) node->leaves[i]->contributions++;
    }
}

/* Step tensors of this scope depth or deeper release their values, except the loss and retained
 * ones. What backward needs, the nodes have saved. */
static void tshi_tape_release_values(tsh_ctx *ctx, const tsh_tensor *loss, int depth) {
    tsh_tensor *t, *head = &ctx->handles.step;
    for (t = head->next; t != head; t = t->next) {
        if (t == loss || t->depth < depth || (t->flags & (TSHI_RETAIN | TSHI_STALE))) continue;
        tshi_mem_release(ctx, t->block);
        t->block = NULL;
        t->flags |= TSHI_STALE;
    }
}

/* Releases what a node holds, and the gradient of its output unless that is retained. */
static void tshi_tape_release_node(tshi_node *node) {
    tsh_ctx *ctx = node->out->ctx;
    tsh_tensor *out = node->out;
    if (out->reducing) (void)tsh_wait(&ctx->tp, out->req);
    out->reducing = out->partial_contributions = 0;
    for (int i = 0; i <= node->n; i++) tshi_mem_release(ctx, node->saved[i]);
    tshi_mem_release(ctx, node->aux);
    out->node = NULL;
    out->requires_grad = 0;
    if (out->flags & TSHI_RETAIN) return;
    tshi_mem_release(ctx, out->gr.block);
    tshi_mem_release(ctx, out->gp.block);
    memset(&out->gr, 0, sizeof out->gr);
    memset(&out->gp, 0, sizeof out->gp);
}

/* Progresses collectives in flight: backends send and receive only when they are called. */
static void tshi_tape_progress(void *user) {
    tsh_ctx *ctx = (tsh_ctx *)user;
    if (ctx->tp.in_flight) tsh_comm_progress(&ctx->tp);
    if (ctx->dp.in_flight) tsh_comm_progress(&ctx->dp);
    if (ctx->pp.in_flight) tsh_comm_progress(&ctx->pp);
}

/* Runs backward of every marked node, newest first, and releases all nodes. After an error they are
 * only released. The caller resets the arena, which holds the nodes themselves. */
static void tshi_tape_walk(tsh_ctx *ctx) {
    const tsh_module *outer = ctx->module;
    tshi_node *node, *older;
    for (node = ctx->tape.newest; node; node = older) {
        older = node->older;
        ctx->module = node->module;
        if (node->progress.reached && ctx->error.code == TSH_OK && tshi_tape_complete_out(node)) {
            const int64_t begin = tshi_trace_now(ctx->trace);
            node->op->backward(node);
            for (int i = 0; i < node->n; i++) tshi_tape_input_done(node, i);
            for (int i = 0; i < node->leaf_count; i++) tshi_tape_deliver(node->leaves[i]);
            if (ctx->trace)
                (void)tshi_trace_add(ctx->trace, TSHI_TRACE_BACKWARD, node->op->name, begin, 0);
            tshi_tape_progress(ctx);
        }
        tshi_tape_release_node(node);
    }
    ctx->module = outer;
    ctx->tape.newest = NULL;
}

/* Completes the partial gradients of all leaves with one all-reduce over tp. */
static tsh_result tshi_tape_complete_leaves(tsh_ctx *ctx) {
    tsh_tensor *t, *head = &ctx->handles.owned;
    int64_t total = 0, at = 0;
    tshi_block *flat;
    tsh_real *data;
    for (t = head->next; t != head; t = t->next)
        if (t->gp.live) total += tsh_local_numel(t);
    if (!total || !(flat = tshi_mem_alloc(ctx, TSH_MEM_STEP, tshi_dtype_reals(total))))
        return ctx->error.code;
    data = (tsh_real *)tshi_mem_data(flat);
    for (t = head->next; t != head; t = t->next) {
        if (!t->gp.live) continue;
        memcpy(data + at, tshi_mem_data(t->gp.block), tshi_dtype_reals(tsh_local_numel(t)));
        at += tsh_local_numel(t);
    }
    (void)tshi_error_comm(ctx, tsh_allreduce(&ctx->tp, data, total, TSH_REAL, TSH_SUM),
                          "tsh_backward: all-reduce of the leaves' gradients");
    for (at = 0, t = head->next; t != head; t = t->next) {
        if (!t->gp.live) continue;
        memcpy(tshi_mem_data(t->gp.block), data + at, tshi_dtype_reals(tsh_local_numel(t)));
        at += tsh_local_numel(t);
        tshi_tape_merge_rows(t, &ctx->tp);
        tshi_tape_merge(t);
    }
    tshi_mem_release(ctx, flat);
    return ctx->error.code;
}

/* Completes the gradients of leaves: over tp, then over dp with the buckets that are in flight, and
 * divides sums by the number of terms. */
static tsh_result tshi_tape_sync(tsh_ctx *ctx) {
    tsh_tensor *t, *head = &ctx->handles.owned;
    const int replicas = ctx->dp.size > 1; /* gradients are also summed over dp */
    if (ctx->error.code == TSH_OK) (void)tshi_tape_complete_leaves(ctx);
    if (replicas) tshi_bucket_sum_weights(ctx, ctx->tape.weight);
    for (t = head->next; t != head && ctx->error.code == TSH_OK && replicas; t = t->next) {
        if (!t->gr.live || !(t->flags & TSHI_AVERAGED)) continue;
        if (t->sparse && (t->flags & TSHI_CHUNKED))
            (void)tsh_fail(ctx, TSH_ERR_UNSUPPORTED,
                           "tsh_backward: the gradient of \"%s\" is row-sparse, which .zero of its "
                           "optimiser cannot cut; leave one of both out", t->path);
        else
            tshi_bucket_add_grad(t);
    }
    if (replicas) tshi_bucket_end(ctx);
    for (t = head->next; t != head && ctx->error.code == TSH_OK; t = t->next) {
        if (!t->gr.live) continue;
        if (replicas && (t->flags & TSHI_AVERAGED))
            tshi_tape_merge_rows(t, &ctx->dp);
        else if (ctx->tape.summed) /* averaged ones are divided in their buckets */
            tshi_bucket_divide((tsh_real *)tshi_mem_data(t->gr.block), tsh_local_numel(t),
                               replicas ? ctx->buckets.weight : ctx->tape.weight);
    }
    ctx->tape.pending = ctx->tape.syncing = 0;
    return ctx->error.code;
}

/* From now on, tshi_tape_deliver sends the gradients of leaves as they become ready. */
static void tshi_tape_sync_begin(tsh_ctx *ctx) {
    if (ctx->dp.size > 1) tshi_bucket_begin(ctx, ctx->tape.summed);
    ctx->tape.syncing = ctx->dp.size > 1;
}

TSH_API tsh_result tsh_sync_grads(tsh_ctx *ctx) {
    if (!ctx) return TSH_ERR_ARGUMENT;
    if (!tsh_ok(ctx) || !ctx->tape.pending) return ctx->error.code;
    tshi_tape_sync_begin(ctx);
    return tshi_tape_sync(ctx);
}

/* An error unless the loss is one replicated value of this ctx that has a gradient. */
static tsh_result tshi_tape_check_loss(tsh_ctx *ctx, tsh_tensor *loss) {
    char text[TSHI_TEXT_SIZE];
    if (!loss || loss->ctx != ctx)
        return tsh_fail(ctx, TSH_ERR_ARGUMENT, "tsh_backward: the loss is %s",
                        loss ? "of another ctx" : "NULL");
    if (loss->layout.kind != TSH_REPLICATED)
        return tsh_fail(ctx, TSH_ERR_LAYOUT,
                        "tsh_backward: the loss is %s over %d ranks; complete it first: "
                        "tsh_redistribute(loss, tsh_replicated())",
                        loss->layout.kind == TSH_PARTIAL ? "a partial sum" : "sharded",
                        ctx->tp.size);
    if (tsh_numel(loss) != 1 || !tshi_dtype_computes(loss->dtype))
        return tsh_fail(ctx, TSH_ERR_SHAPE,
                        "tsh_backward: the loss must be one replicated value, not %s %s",
                        tshi_dtype_name(loss->dtype), tshi_tensor_text(loss, text));
    if (!tshi_tensor_check("tsh_backward", &loss, 1)) return ctx->error.code;
    if (!loss->base->requires_grad || !loss->base->node)
        return tsh_fail(
            ctx, TSH_ERR_STATE,
            "tsh_backward: the loss does not depend on any tensor that requires a gradient");
    return TSH_OK;
}

/* Prepares a backward of a loss that is a mean, or a sum of `weight` terms. 0 and an error if it
 * cannot be added to gradients that are there already. */
static int tshi_tape_begin(tsh_ctx *ctx, int summed, double weight) {
    tshi_tape *tape = &ctx->tape;
    tsh_tensor *t, *head = &ctx->handles.owned;
    int live = 0, chunked = 0; /* some leaf has a gradient; a chunk of one */
    for (t = head->next; t != head; t = t->next) {
        t->partial_contributions = t->contributions = 0;
        live |= t->gr.live | t->gp.live;
        chunked |= t->gr.live && (t->flags & TSHI_CHUNKED);
    }
    if (!(weight >= 0) || weight > DBL_MAX || (weight > 0 && !summed))
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT,
                       "tsh_backward: weight %g of a loss; it is that of a sum (.summed = 1), and "
                       "not below 0", weight);
    else if (live && tape->pending && tape->summed != summed)
        (void)tsh_fail(ctx, TSH_ERR_STATE,
                       "tsh_backward: micro-batches of one step are all means or all sums "
                       "(.summed); those that wait for tsh_sync_grads are %s",
                       tape->summed ? "sums" : "means");
    else if (live && !tape->pending && (summed || chunked))
        (void)tsh_fail(
            ctx, TSH_ERR_STATE,
            "tsh_backward: gradients of an earlier step %s, so that nothing can be added "
            "to them; tsh_zero_grads first",
            chunked ? "lie in chunks (.zero)" : "are divided already (.summed)");
    if (ctx->error.code != TSH_OK) return 0;
    tape->weight = (live && tape->pending ? tape->weight : 0) + weight;
    tape->summed = summed;
    return 1;
}

TSH_API tsh_result tsh_backward_with(tsh_ctx *ctx, tsh_tensor *loss,
                                     const tsh_backward_desc *desc) {
    int defer = desc && desc->defer;
    tshi_dest dest;
    if (!ctx) return TSH_ERR_ARGUMENT;
    if (ctx->error.code == TSH_OK) (void)tshi_tape_check_loss(ctx, loss);
    if (ctx->error.code == TSH_OK)
        (void)tshi_tape_begin(ctx, desc && desc->summed, desc ? desc->weight : 0);
    if (!tsh_ok(ctx)) return ctx->error.code;
    if (!tshi_tape_dest_in(loss, &loss->base->gr, &dest)) return ctx->error.code;
    dest.data[0] = dest.add ? TSHI_R(dest.data[0] + TSHI_R(1)) : TSHI_R(1);
    if (!defer) tshi_tape_sync_begin(ctx); /* buckets are sent during the walk */
    tshi_tape_mark(ctx, loss);
    tshi_tape_release_values(ctx, loss, 0);
    tshi_tape_walk(ctx);
    tshi_mem_reset(&ctx->tape.arena);
    if (defer)
        ctx->tape.pending = 1; /* until tsh_sync_grads */
    else
        (void)tshi_tape_sync(ctx);
    tshi_error_report(ctx);
    return ctx->error.code;
}

TSH_API tsh_result tsh_backward(tsh_ctx *ctx, tsh_tensor *loss) {
    return tsh_backward_with(ctx, loss, NULL);
}

/* 1 if a leaf's gradient lacks other ranks' contributions, or the division of sums. */
static int tshi_tape_pending(const tsh_tensor *leaf) {
    const tsh_ctx *ctx = leaf->ctx;
    const int averaged = ctx->dp.size > 1 && (leaf->flags & TSHI_AVERAGED);
    return leaf->gp.live || (leaf->gr.live && (leaf->flags & TSHI_LEAF) && ctx->tape.pending &&
                             (averaged || ctx->tape.summed));
}

/* -- gradients: public functions -------------------------------------------- */

TSH_API void tsh_no_grad_begin(tsh_ctx *ctx) {
    if (ctx) ctx->tape.no_grad++;
}

TSH_API void tsh_no_grad_end(tsh_ctx *ctx) {
    if (ctx && ctx->tape.no_grad) ctx->tape.no_grad--;
}

TSH_API void tsh_detect_anomaly(tsh_ctx *ctx, int on) {
    if (ctx) ctx->anomalies = on != 0;
}

/* 1 if t can be a leaf; else 0, with an error of the public function op. */
static int tshi_tape_check_owned(const tsh_tensor *t, const char *op) {
    if ((t->flags & TSHI_OWNED) && tshi_dtype_computes(t->dtype)) return 1;
    return tsh_fail(t->ctx, TSH_ERR_ARGUMENT, "%s: takes an owned tensor of %s; tsh_keep makes one",
                    op, tshi_dtype_name(TSH_REAL)) == TSH_OK;
}

TSH_API tsh_tensor *tsh_requires_grad(tsh_tensor *t, int on) {
    if (!t || !tshi_tape_check_owned(t, "tsh_requires_grad")) return NULL;
    t->requires_grad = on != 0;
    t->flags = on ? t->flags | TSHI_LEAF : t->flags & ~(unsigned)TSHI_LEAF;
    return t;
}

TSH_API tsh_tensor *tsh_average_grad(tsh_tensor *t, int on) {
    if (!t || !tshi_tape_check_owned(t, "tsh_average_grad")) return NULL;
    if (!on && (t->flags & TSHI_PARAM))
        return tshi_error_null(t->ctx, TSH_ERR_ARGUMENT,
                               "tsh_average_grad: the gradient of a parameter, such as \"%s\", is "
                               "always averaged; take a leaf of your own instead", t->path);
    t->flags = on ? t->flags | TSHI_AVERAGED : t->flags & ~(unsigned)TSHI_AVERAGED;
    return t;
}

TSH_API tsh_tensor *tsh_retain(tsh_tensor *t) {
    if (t) t->flags |= TSHI_RETAIN;
    if (t) t->base->flags |= TSHI_RETAIN;
    return t;
}

TSH_API tsh_tensor *tsh_grad(tsh_tensor *t) {
    tsh_tensor *base, *grad;
    if (!t || t->ctx->error.code != TSH_OK) return NULL;
    base = t->base;
    if (tshi_tape_pending(base))
        return tshi_error_null(t->ctx, TSH_ERR_STATE,
                               "tsh_grad: the gradient is pending; call tsh_sync_grads first");
    if (!base->gr.live) return NULL;
    if (base->flags & TSHI_CHUNKED)
        return tshi_error_null(
            t->ctx, TSH_ERR_STATE,
            "tsh_grad: each rank of dp has a chunk of the gradient of \"%s\", as "
            "its optimiser's .zero wants it", base->path);
    grad = tshi_tensor_detached(t, base->gr.block);
    if (!grad) return NULL;
    grad->dtype = TSH_REAL;
    grad->offset = t->offset - base->offset;
    if (t->layout.kind == TSH_PARTIAL) grad->layout = tsh_replicated();
    return grad;
}

/* Zeroes a row-sparse gradient, which is 0 outside its marked rows. */
static void tshi_tape_clear_rows(tsh_tensor *base) {
    const int32_t *marks = (const int32_t *)tshi_mem_data(base->marks);
    int64_t r, width = tshi_tensor_product(base->local + 1, base->ndim - 1);
    tsh_real *data = (tsh_real *)tshi_mem_data(base->gr.block);
    for (r = 0; r < base->local[0]; r++)
        if (marks[r]) memset(data + r * width, 0, (size_t)width * sizeof *data);
    base->gr.clean = 1;
}

TSH_API void tsh_zero_grad(tsh_tensor *t) {
    if (!t) return;
    if (t->base->sparse && t->base->gr.live && !t->base->gp.live) tshi_tape_clear_rows(t->base);
    t->base->gr.live = t->base->gp.live = t->base->sparse = 0;
}

/* -- steps and scopes ------------------------------------------------------- */

TSH_API tsh_result tsh_step_end(tsh_ctx *ctx) {
    tsh_tensor *head;
    if (!ctx) return TSH_ERR_ARGUMENT;
    for (; ctx->tape.newest; ctx->tape.newest = ctx->tape.newest->older)
        tshi_tape_release_node(ctx->tape.newest);
    tshi_mem_reset(&ctx->tape.arena);
    head = &ctx->handles.step;
    for (ctx->handles.ended = 0; head->next != head; ctx->handles.ended++)
        tshi_tensor_release(head->next);
    return tsh_ok(ctx) ? TSH_OK : ctx->error.code;
}

TSH_API void tsh_scope_begin(tsh_ctx *ctx) {
    if (ctx) ctx->depth++;
}

TSH_API void tsh_scope_end(tsh_ctx *ctx) {
    tsh_tensor *head;
    if (!ctx || !ctx->depth) return;
    head = &ctx->handles.step;
    if (ctx->tape.newest && ctx->tape.newest->depth >= ctx->depth)
        (void)tsh_fail(
            ctx, TSH_ERR_STATE,
            "tsh_scope_end: %s was recorded inside the scope; scopes are for work without "
            "gradients (tsh_no_grad_begin)", ctx->tape.newest->op->name);
    else
        while (head->prev != head && head->prev->depth >= ctx->depth)
            tshi_tensor_release(head->prev);
    ctx->depth--;
}

/* ========================================================================== */
/* >>dump                                                MARK: - dump (private) */
/* The tape as text: a line per node, or a graph for Graphviz.                  */
/* Needs: >>tape.                                                               */
/* ========================================================================== */

/* Nodes are linked from the newest to the oldest and have no numbers. A dump may be slow, so it
 * counts them again for every node that it prints. */

/* A node's number: how many were recorded before it. */
static TSHI_COLD int tshi_dump_number(const tshi_node *node) {
    int number = 0;
    while ((node = node->older) != NULL) number++;
    return number;
}

/* Prints the names of the inputs, and of the output, whose bits are set: "x weight". */
static TSHI_COLD void tshi_dump_bits(FILE *file, const tshi_node *node, unsigned bits) {
    int i, length, count = 0;
    for (i = 0; i < node->n; i++) {
        const char *name = tshi_tape_name(node->op, i, &length);
        if (!(bits >> i & 1u) || !node->in[i]) continue;
        (void)fprintf(file, "%s%.*s", count++ ? " " : "", length, name);
        if (!node->op->inputs) (void)fprintf(file, "%d", i);
    }
    if (bits & (unsigned)TSHI_OUT) (void)fprintf(file, "%soutput", count ? " " : "");
}

/* Prints what the node keeps for backward, if anything: "; saves x weight, 3584 bytes". `before`
 * comes first, here "; ". */
static TSHI_COLD void tshi_dump_saved(FILE *file, const tshi_node *node, const char *before) {
    size_t bytes = node->aux ? node->aux->size : 0; /* aux: what else the op keeps */
    unsigned saved = 0;
    for (int i = 0; i <= node->n; i++) {
        const tsh_tensor *t = i < node->n ? node->in[i] : node->out;
        if (!node->saved[i]) continue;
        saved |= i < node->n ? 1u << i : (unsigned)TSHI_OUT;
        bytes += (size_t)tsh_local_numel(t) * tsh_dtype_size(t->dtype);
    }
    if (!saved && !node->aux) return;
    (void)fprintf(file, "%ssaves ", before);
    tshi_dump_bits(file, node, saved);
    (void)fprintf(file, "%s%llu bytes", saved ? ", " : "", (unsigned long long)bytes);
}

/* Bits of the inputs that require a gradient which is a partial sum. */
static TSHI_COLD unsigned tshi_dump_partial(const tshi_node *node) {
    unsigned partial = 0;
    for (int i = 0; i < node->n && node->out->ctx->tp.size > 1; i++)
        if (node->in[i] && node->in[i]->base->requires_grad) partial |= node->partial & 1u << i;
    return partial;
}

/* Prints "#2 h.0 tsh_add(#1: a (4, 8) R, b (8) R) = (4, 8) R; saves ...; partial gradient: b". */
static TSHI_COLD void tshi_dump_line(FILE *file, const tshi_node *node, int number) {
    const char *path = node->module ? node->module->path : "";
    char text[TSHI_TEXT_SIZE];
    int i, length, count = 0;
    (void)fprintf(file, "#%d %s%s%s(", number, path, *path ? " " : "", node->op->name);
    for (i = 0; i < node->n; i++) {
        const tsh_tensor *t = node->in[i];
        const char *name = tshi_tape_name(node->op, i, &length);
        if (!t) continue;
        (void)fputs(count++ ? ", " : "", file);
        if (t->base->node) (void)fprintf(file, "#%d: ", tshi_dump_number(t->base->node));
        (void)fprintf(file, "%.*s %s", length, name, tshi_tensor_text(t, text));
    }
    (void)fprintf(file, ") = %s", tshi_tensor_text(node->out, text));
    tshi_dump_saved(file, node, "; ");
    if (tshi_dump_partial(node)) {
        (void)fputs("; partial gradient: ", file);
        tshi_dump_bits(file, node, tshi_dump_partial(node));
    }
    (void)fputs("\n", file);
}

/* Prints begin, every node by `line`, the oldest first, and end. op: the public function. */
static TSHI_COLD tsh_result tshi_dump_all(const char *op, tsh_ctx *ctx, FILE *file,
                                          const char *begin, const char *end,
                                          void (*line)(FILE *file, const tshi_node *node,
                                                       int number)) {
    const tshi_node *node;
    int i, number, count;
    if (!ctx) return TSH_ERR_ARGUMENT;
    if (!file) return tsh_fail(ctx, TSH_ERR_ARGUMENT, "%s: the file is NULL", op);
    (void)fputs(begin, file);
    count = ctx->tape.newest ? tshi_dump_number(ctx->tape.newest) + 1 : 0;
    for (number = 0; number < count; number++) {
        for (node = ctx->tape.newest, i = count - 1; i > number; i--) node = node->older;
        line(file, node, number);
    }
    (void)fputs(end, file);
    if (fflush(file) == 0 && !ferror(file)) return TSH_OK;
    return tsh_fail(ctx, TSH_ERR_IO, "%s: writing failed: %s", op, strerror(errno));
}

TSH_API TSHI_COLD tsh_result tsh_tape_dump(tsh_ctx *ctx, FILE *file) {
    return tshi_dump_all("tsh_tape_dump", ctx, file, "", "", tshi_dump_line);
}

/* Prints a node of the graph, and an arrow from each of its inputs: from the node that made it, or
 * from a node of its own. Partial gradients are red. */
static TSHI_COLD void tshi_dump_dot(FILE *file, const tshi_node *node, int number) {
    const char *path = node->module ? node->module->path : "";
    const unsigned partial = tshi_dump_partial(node); /* bits of inputs */
    char text[TSHI_TEXT_SIZE];
    int i, length;
    (void)fprintf(file, "  n%d [label=\"%s%s%s\\n%s", number, path, *path ? "\\n" : "",
                  node->op->name, tshi_tensor_text(node->out, text));
    tshi_dump_saved(file, node, "\\n");
    (void)fputs("\"];\n", file);
    for (i = 0; i < node->n; i++) {
        const tsh_tensor *t = node->in[i];
        const char *name = tshi_tape_name(node->op, i, &length);
        if (!t) continue;
        if (t->base->node)
            (void)fprintf(file, "  n%d -> n%d", tshi_dump_number(t->base->node), number);
        else
            (void)fprintf(file, "  n%d_%d [shape=plain, label=\"%.*s %s\"];\n  n%d_%d -> n%d",
                          number, i, length, name, tshi_tensor_text(t, text), number, i, number);
        if (partial >> i & 1u)
            (void)fprintf(file, " [color=red, label=\"d%.*s P\"]", length, name);
        (void)fputs(";\n", file);
    }
}

TSH_API TSHI_COLD tsh_result tsh_tape_dot(tsh_ctx *ctx, FILE *file) {
    return tshi_dump_all("tsh_tape_dot", ctx, file,
                         "digraph tape {\n  node [shape=box, fontname=sans, fontsize=10];\n"
                         "  edge [fontname=sans, fontsize=10];\n",
                         "}\n", tshi_dump_dot);
}

/* ========================================================================== */
/* >>context                                          MARK: - context (private) */
/* One rank's world: opened from a description, closed with all it holds.      */
/* Needs: >>gemm >>comm >>tape.                                                 */
/* ========================================================================== */

/* A rank of the world has three coordinates, which count in desc->order, the first axis fastest:
 * with "tp-pp-dp", rank = tp + TP (pp + PP dp). Ranks that agree in the other two coordinates are
 * the group of an axis. What a new field of tsh_ctx owns, tsh_close must release. */

/* Reports degrees that do not divide the world, and lists those of tp (or pp) that would, given the
 * other one. Returns 0. */
static int tshi_context_refuse(tsh_ctx *ctx, int tp, int pp) {
    const int world = ctx->world.size, tp_fits = tp > 0 && world % tp == 0;
    const int pp_fits = pp > 0 && world % pp == 0;
    const int whole = pp_fits ? world / pp : tp_fits ? world / tp : world;
    char list[TSH_MESSAGE_SIZE / 2] = "1";
    for (int d = 2; d <= whole; d++)
        if (whole % d == 0) tsh_text_add(list, sizeof list, "%s%d", d < whole ? ", " : " or ", d);
    return tshi_error_zero(ctx, TSH_ERR_ARGUMENT,
                           "tsh_open: %d ranks do not divide into tp %d times pp %d; %s may be %s",
                           world, tp, pp, pp_fits ? "tp" : "pp", list);
}

/* Fills, for the axes in desc->order, the degree size[i] and the letter axis[i]: 't', 'p' or 'd'.
 * 0 and an error if the degrees do not divide the world, or the order is not valid. */
static int tshi_context_axes(tsh_ctx *ctx, const tsh_desc *desc, int size[3], char axis[3]) {
    const char *at = desc->order ? desc->order : "tp-pp-dp";
    int world = ctx->world.size, pp = desc->pp ? desc->pp : 1, tp = desc->tp, i, j;
    if (pp < 1 || tp < 0 || (!tp && world % pp) || (tp && world % ((int64_t)tp * pp)))
        return tshi_context_refuse(ctx, tp, pp);
    if (!tp) tp = world / pp;
    for (i = 0; i < 3; i++, at += 3) {
        int fits = *at && strchr("tpd", *at) && at[1] == 'p' && at[2] == (i < 2 ? '-' : '\0');
        for (j = 0; fits && j < i; j++) fits = axis[j] != *at;
        if (!fits)
            return tshi_error_zero(ctx, TSH_ERR_ARGUMENT,
                                   "tsh_open: order \"%.32s\" does not name tp, pp and dp once "
                                   "each, as \"tp-pp-dp\"",
                                   desc->order);
        axis[i] = *at;
        size[i] = *at == 't' ? tp : *at == 'p' ? pp : world / (tp * pp);
    }
    return 1;
}

/* Splits the world into the groups of each axis. The color is the group's first rank, whose
 * coordinate along the axis is 0. */
static void tshi_context_groups(tsh_ctx *ctx, const tsh_desc *desc) {
    int size[3], i, step = 1, rank = ctx->world.rank; /* step: ranks to the next along axis i */
    char axis[3];
    if (!tshi_context_axes(ctx, desc, size, axis)) return;
    for (i = 0; i < 3; step *= size[i++]) {
        tsh_comm *comm = axis[i] == 't' ? &ctx->tp : axis[i] == 'p' ? &ctx->pp : &ctx->dp;
        int own = rank / step % size[i]; /* this rank's coordinate */
        if (size[i] == 1) continue; /* the ctx has a group of one already */
        if (tshi_error_comm(ctx, tsh_split(&ctx->world, rank - own * step, own, comm),
                            "tsh_open: split") != TSH_OK)
            return;
    }
}

/* Allocates a ctx and fills in the options of desc, with their defaults; NULL: no memory. */
static tsh_ctx *tshi_context_make(const tsh_desc *desc) {
    tsh_allocator allocator = desc->allocator;
    if (!allocator.fn) allocator.fn = tshi_mem_libc;
    tsh_ctx *ctx = (tsh_ctx *)allocator.fn(allocator.user, NULL, 0, sizeof *ctx, TSHI_ALIGN);
    if (!ctx) return NULL;
    memset(ctx, 0, sizeof *ctx);
    ctx->allocator = allocator;
    tshi_mem_count(&ctx->mem, TSH_MEM_BOOKS, sizeof *ctx, 0);
    ctx->mem.calls = 1;
    ctx->logger = desc->logger;
    ctx->gemm = desc->gemm;
    ctx->gemm_kernel = tshi_gemm_pick();
    ctx->isa = tshi_kernel_isa();
    ctx->threads = desc->threads > 0 ? desc->threads : 1;
    ctx->seed = desc->seed;
    const size_t bytes = desc->bucket_bytes ? desc->bucket_bytes : (size_t)TSHI_BUCKET_BYTES;
    ctx->buckets.limit = (int64_t)((bytes - 1) / tshi_dtype_reals(1) + 1);
    ctx->buckets.hold = desc->no_overlap;
    ctx->world = desc->comm;
    if (!ctx->world.ops) ctx->world.size = 1; /* desc.comm is empty */
    ctx->tp.size = ctx->pp.size = ctx->dp.size = 1;
    tshi_tensor_ring(&ctx->handles.owned);
    tshi_tensor_ring(&ctx->handles.step);
    return ctx;
}

/* There is no memory for the ctx, which would keep this error: reports it to the logger and to the
 * other ranks. */
static TSHI_COLD tsh_result tshi_context_no_memory(const tsh_desc *desc) {
    tsh_comm world = desc->comm;
    tsh_error error = {TSH_ERR_MEMORY, world.ops ? world.rank : -1, ""};
    if (world.size > 1)
        tsh_text_add(error.message, sizeof error.message, "rank %d: ", world.rank);
    tsh_text_add(error.message, sizeof error.message, "tsh_open: no memory for a ctx (%d bytes)",
                 (int)sizeof(tsh_ctx));
    tsh_log_message(&desc->logger, "%s (%s)", error.message, tsh_result_name(error.code));
    if (world.ops) world.ops->abort(&world, &error);
    return TSH_ERR_MEMORY;
}

TSH_API TSHI_COLD tsh_result tsh_open(const tsh_desc *desc, tsh_ctx **out) {
    const tsh_desc usual = TSHI_ZERO;
    if (!desc) desc = &usual;
    if (!out) {
        tsh_log_message(&desc->logger, "tsh_open: out is NULL (TSH_ERR_ARGUMENT)");
        return TSH_ERR_ARGUMENT;
    }
    tsh_ctx *ctx = *out = tshi_context_make(desc);
    if (!ctx) return tshi_context_no_memory(desc);
    tshi_context_groups(ctx, desc);
    tshi_error_report(ctx);
    return ctx->error.code;
}

TSH_API TSHI_COLD void tsh_close(tsh_ctx *ctx) {
    if (!ctx) return;
    tshi_error_report(ctx);
    (void)tsh_step_end(ctx); /* releases the tape and step tensors */
    while (ctx->handles.owned.next != &ctx->handles.owned)
        tshi_tensor_release(ctx->handles.owned.next);
    tshi_trace_drop(ctx);
    tshi_mem_release(ctx, ctx->gemm_scratch);
    tshi_mem_close(ctx, TSH_MEM_STEP, ctx->pool.pages);
    for (tshi_micro *micro = ctx->micros; micro; micro = micro->next)
        tshi_mem_close(ctx, TSH_MEM_BOOKS, micro->arena.first);
    tshi_mem_close(ctx, TSH_MEM_BOOKS, ctx->tape.arena.first);
    tshi_mem_close(ctx, TSH_MEM_BOOKS, ctx->buckets.arena.first);
    tshi_mem_close(ctx, TSH_MEM_BOOKS, ctx->books.first);
    tsh_comm_close(&ctx->dp);
    tsh_comm_close(&ctx->pp);
    tsh_comm_close(&ctx->tp);
    tsh_comm_close(&ctx->world);
    const tsh_allocator allocator = ctx->allocator;
    (void)allocator.fn(allocator.user, ctx, sizeof *ctx, 0, TSHI_ALIGN);
}

/* Defines tsh_<group>. The group of a NULL ctx is one that callers must not write to. */
#define TSHI_CONTEXT_GROUP(group)                                                                  \
    TSH_API tsh_comm *tsh_##group(tsh_ctx *ctx) {                                                  \
        return ctx ? &ctx->group : (tsh_comm *)tshi_kernel_unconst(&tshi_comm_none);               \
    }
TSHI_CONTEXT_GROUP(world)
TSHI_CONTEXT_GROUP(tp)
TSHI_CONTEXT_GROUP(pp)
TSHI_CONTEXT_GROUP(dp)
#undef TSHI_CONTEXT_GROUP

TSH_API int tsh_run(const tsh_desc *desc, int (*fn)(tsh_ctx *ctx, void *user), void *user) {
    tsh_ctx *ctx = NULL;
    int result = 1;
    if (!fn)
        tsh_log_message(desc ? &desc->logger : NULL, "tsh_run: fn is NULL");
    else if (tsh_open(desc, &ctx) == TSH_OK)
        result = fn(ctx, user);
    tsh_close(ctx);
    return result;
}

TSH_API int tsh_run_on(tsh_comm *comm, const tsh_desc *desc, int (*fn)(tsh_ctx *ctx, void *user),
                       void *user, tsh_error *error) {
    tsh_desc mine = TSHI_ZERO;
    tsh_ctx *ctx = NULL;
    int result = 1;
    if (desc) mine = *desc;
    mine.comm = *comm;
    if (tsh_open(&mine, &ctx) == TSH_OK)
        result = fn(ctx, user);
    else if (error && ctx)
        *error = *tsh_last_error(ctx);
    else if (error)
        (void)tsh_error_set(error, TSH_ERR_MEMORY, comm->rank, "no memory for a ctx");
    if (!ctx) tsh_comm_close(comm); /* no ctx owns it */
    tsh_close(ctx);
    return result;
}

/* ========================================================================== */
/* >>rule                                                MARK: - rule (private) */
/* Layout rules: from the layouts of an op's inputs to that of its output, and */
/* to the inputs whose gradient is a partial sum.                               */
/* Needs: >>tensor.                                                             */
/* ========================================================================== */

/* A tshi_op names its rule, a tshi_rule_fn; several ops share one. The shapes of the inputs have
 * been checked. A rule changes output->layout, which is that of the first input, and
 * output->partial, which is TSHI_NONE, and returns 1, or returns 0 with an error that names a call
 * that helps.
 *
 * Comments: R is replicated, S(d) sharded along dimension d, P a partial sum. "P R: P, dB P": if A
 * is P and B is R, the output is P. So is the gradient of B, which each rank computes from its own
 * part of A. */

/* Fills in layout and partial of the output by op's rule. 0: an error. */
static int tshi_rule_run(const tshi_op *op, tsh_tensor *const *in, int n, const void *params,
                         tshi_output *output) {
    const tshi_call call = {op, in, n, params};
    output->layout = in[0]->layout;
    output->partial = TSHI_NONE;
    return op->rule(&call, output);
}

/* Refuses the layouts of a and b. `hint` says what to call instead. */
static TSHI_COLD int tshi_rule_refuse(const tshi_call *call, const tsh_tensor *a,
                                      const tsh_tensor *b, const char *hint) {
    char ta[TSHI_TEXT_SIZE], tb[TSHI_TEXT_SIZE];
    return tsh_fail(a->ctx, TSH_ERR_LAYOUT, "%s: layouts of %s and %s do not go together; %s",
                    call->op->name, tshi_tensor_text(a, ta), tshi_tensor_text(b, tb),
                    hint) == TSH_OK;
}

/* Refuses the layout of the first input. `why` says what it is: "is a partial sum". */
static TSHI_COLD int tshi_rule_refuse_input(const tshi_call *call, const char *why) {
    const tsh_tensor *x = call->in[0];
    char text[TSHI_TEXT_SIZE];
    return tsh_fail(x->ctx, TSH_ERR_LAYOUT,
                    "%s: input %s; x is %s on %d ranks; complete it first: "
                    "tsh_redistribute(x, tsh_replicated())",
                    call->op->name, why, tshi_tensor_text(x, text), x->ctx->tp.size) == TSH_OK;
}

/* The output has the layout of the first input. */
static int tshi_rule_keep(const tshi_call *call, tshi_output *output) {
    (void)call, (void)output;
    return 1;
}

/* -- elementwise ops ----------------------------------------------------------
 * R R: R. S S: S if both have the same shards. S R: S, dR P, if R has length 1 along the sharded
 * dimension. P: only in ops that are linear in it, each of which has a rule below. */

/* Bits of the inputs that are partial sums. */
static unsigned tshi_rule_sums(const tshi_call *call) {
    unsigned sums = 0;
    for (int i = 0; i < call->n; i++)
        if (call->in[i]->layout.kind == TSH_PARTIAL) sums |= 1u << i;
    return sums;
}

/* The first input whose layout is of a kind, or NULL. */
static const tsh_tensor *tshi_rule_first(const tshi_call *call, tsh_layout_kind kind) {
    for (int i = 0; i < call->n; i++)
        if (call->in[i]->layout.kind == kind) return call->in[i];
    return NULL;
}

/* The rule of all elementwise ops. sums: bits of the inputs that are P; allowed: they may be. */
static int tshi_rule_elementwise(const tshi_call *call, unsigned sums, int allowed,
                                 tshi_output *output) {
    const tsh_tensor *cut = tshi_rule_first(call, TSH_SHARDED);
    const int ndim = output->shape.ndim;
    int i, d;
    if (sums && (cut || !allowed)) {
        const tsh_tensor *other = cut ? cut : tshi_rule_first(call, TSH_REPLICATED);
        return tshi_rule_refuse(
            call, tshi_rule_first(call, TSH_PARTIAL), other ? other : call->in[call->n - 1],
            "complete the partial sum first: tsh_redistribute(x, tsh_replicated())");
    }
    if (sums) output->layout = tsh_partial();
    if (sums && call->n == 2) output->partial = ~sums & (unsigned)(TSHI_A | TSHI_B);
    if (!cut) return 1;
    output->layout = cut->layout;
    output->layout.dim += ndim - cut->ndim;
    d = output->layout.dim;
    for (i = 0; i < call->n; i++) {
        const tsh_tensor *x = call->in[i];
        const int own = d - (ndim - x->ndim), whole = x->layout.kind == TSH_REPLICATED;
        const int64_t length = own >= 0 ? x->dim[own] : 1;
        if (whole ? length != 1
                  : x->layout.dim != own || length != output->shape.dim[d] ||
                        !tshi_layout_same_shards(&cut->layout, &x->layout, length, x->ctx->tp.size))
            return tshi_rule_refuse(
                call, cut, x,
                whole ? "make them alike: tsh_redistribute(b, tsh_layout_of(a)), or gather: "
                        "tsh_redistribute(a, tsh_replicated())"
                      : "make them alike: tsh_redistribute(b, tsh_layout_of(a))");
        if (whole) output->partial |= 1u << i;
    }
    return 1;
}

/* Defines the rule of an op that is linear in the inputs that are P, whose bits are `sums`, if
 * `allowed`. */
#define TSHI_RULE_LINEAR(name, allowed)                                                            \
    static int tshi_rule_##name(const tshi_call *call, tshi_output *output) {                      \
        const unsigned sums = tshi_rule_sums(call);                                                \
        return tshi_rule_elementwise(call, sums, (allowed), output);                               \
    }
TSHI_RULE_LINEAR(add, sums == (TSHI_A | TSHI_B))              /* a + b, a - b. P P: P. */
TSHI_RULE_LINEAR(multiply, sums == TSHI_A || sums == TSHI_B)  /* a * b. P R, R P: P, dR P. */
TSHI_RULE_LINEAR(divide, sums == TSHI_A)                      /* a / b. P R: P, dR P. */
TSHI_RULE_LINEAR(where, sums == (TSHI_YES | TSHI_NO))         /* cond ? yes : no. R P P: P. */
#undef TSHI_RULE_LINEAR

/* Ops that are not linear. No P: f(a + b) is not f(a) + f(b). */
static int tshi_rule_nonlinear(const tshi_call *call, tshi_output *output) {
    const unsigned sums = tshi_rule_sums(call);
    if (sums && call->n == 1)
        return tshi_rule_refuse_input(call, "is a partial sum, and the op is not linear");
    return tshi_rule_elementwise(call, sums, 0, output);
}

/* -- ops along a dimension ---------------------------------------------------- */

/* The dimension of input 0 that is reduced (-1: all), and whether the output keeps it. */
typedef struct tshi_rule_axis {
    int axis, keepdim;
} tshi_rule_axis;

/* 1 if x is sharded along the axis; -1: along any. */
static int tshi_rule_is_sharded(const tsh_tensor *x, int axis) {
    return x->layout.kind == TSH_SHARDED && (axis < 0 || axis == x->layout.dim);
}

/* Sums. R: R. P: P. S along the reduced dimension: P; along another: S. */
static int tshi_rule_sum(const tshi_call *call, tshi_output *output) {
    const tshi_rule_axis *along = (const tshi_rule_axis *)call->params;
    tsh_layout *layout = &output->layout;
    if (tshi_rule_is_sharded(call->in[0], along->axis))
        *layout = tsh_partial();
    else if (layout->kind == TSH_SHARDED && layout->dim > along->axis && !along->keepdim)
        layout->dim--;
    return 1;
}

/* Max, softmax and others that need all values along the dimension: no P, and no S along it. */
static int tshi_rule_whole(const tshi_call *call, tshi_output *output) {
    const tsh_tensor *x = call->in[0];
    if (x->layout.kind == TSH_PARTIAL ||
        tshi_rule_is_sharded(x, ((const tshi_rule_axis *)call->params)->axis))
        return tshi_rule_refuse_input(
            call, "is not whole along the dimension, and the op needs all values there");
    return tshi_rule_sum(call, output);
}

/* Concatenation along dimension d (*params). S(d) ...: S(d), whose segments are those of all parts.
 * Else all parts have one layout, and so has the output. */
static int tshi_rule_concat(const tshi_call *call, tshi_output *output) {
    tsh_tensor *const *in = call->in;
    tsh_layout *layout = &output->layout;
    const int d = *(const int *)call->params;
    char a[TSHI_TEXT_SIZE], b[TSHI_TEXT_SIZE];
    int i, e, fits = 1, along = layout->kind == TSH_SHARDED && layout->dim == d;
    for (i = 1; i < call->n && fits; i++) {
        const tsh_layout *own = &in[i]->layout;
        fits = own->kind == layout->kind && own->dim == layout->dim;
        if (fits && layout->kind == TSH_SHARDED && !along)
            fits = tshi_layout_equal(own, layout, in[i]->dim, in[i]->ctx->tp.size);
        for (e = 0; e < own->segments && along && fits; e++) {
            fits = layout->segments < TSH_MAX_SEGMENTS;
            if (fits) layout->segment[layout->segments++] = own->segment[e];
        }
    }
    if (!fits)
        (void)tsh_fail(in[0]->ctx, TSH_ERR_LAYOUT,
                       "%s: part %d, %s, does not go with %s along dimension %d (at most "
                       "%d segments in all); tsh_redistribute brings parts to one layout",
                       call->op->name, i - 1, tshi_tensor_text(in[i - 1], a),
                       tshi_tensor_text(in[0], b), d, TSH_MAX_SEGMENTS);
    return fits;
}

/* -- matmul, linear, embedding -------------------------------------------------- */

/* A (.., m, k) B (.., k, n) = (.., m, n). Dimensions of A and B count as the output's: da, db.
 *   R R: R.  P R: P, dB P.  R P: P, dA P.  S(k) S(k): P.  S(m) R: S(m), dB P.
 *   R S(n): S(n), dA P.  S(batch) S(batch): S(batch).  S(batch) R: S(batch), dB P, if B has length
 *   1 there, or no such dimension. */
static int tshi_rule_products(tsh_tensor *a, tsh_tensor *b, tshi_output *output) {
    const tsh_layout *la = &a->layout, *lb = &b->layout;
    tsh_layout *out = &output->layout;
    const int nd = output->shape.ndim, da = la->dim + nd - a->ndim, db = lb->dim + nd - b->ndim;
    const int sa = la->kind == TSH_SHARDED, sb = lb->kind == TSH_SHARDED;
    const int same = sa && sb && tshi_layout_same_shards(la, lb, a->dim[la->dim], a->ctx->tp.size);
    if (la->kind == TSH_REPLICATED && lb->kind == TSH_REPLICATED) return 1;
    output->partial = la->kind == TSH_REPLICATED ? TSHI_A : TSHI_B; /* the one that is R, if any */
    if (la->kind == TSH_PARTIAL || lb->kind == TSH_PARTIAL) {       /* P R, R P */
        *out = tsh_partial();
        return la->kind == TSH_REPLICATED || lb->kind == TSH_REPLICATED;
    }
    if (sa && sb) output->partial = TSHI_NONE;
    if (sa && sb && da == nd - 1 && db == nd - 2) { /* S(k) S(k) */
        *out = tsh_partial();
        return same;
    }
    *out = sa ? *la : *lb;
    out->dim = sa ? da : db;
    if (sa && sb) /* the same batch dimension */
        return same && da == db && da < nd - 2 && a->dim[la->dim] == b->dim[lb->dim];
    if (sa && da == nd - 2) return 1; /* S(m) R */
    if (sb && db == nd - 1) return 1; /* R S(n) */
    if (out->dim >= nd - 2) return 0; /* k on one side only */
    if (sb) b = a; /* the one that is R: broadcast along the batch dimension? */
    return out->dim < nd - b->ndim || b->dim[out->dim - (nd - b->ndim)] == 1;
}

static int tshi_rule_matmul(const tshi_call *call, tshi_output *output) {
    return tshi_rule_products(call->in[0], call->in[1], output) ||
           tshi_rule_refuse(call, call->in[0], call->in[1],
                            "shard both along the inner dimension, or make one replicated: "
                            "tsh_redistribute(x, tsh_replicated())");
}

/* Options of a linear for sequence parallelism. */
typedef struct tshi_rule_sequence {
    const tsh_layout *give; /* the layout of a row-parallel output; NULL: R */
    int regather;           /* a column-parallel input may be S(seq): the op gathers it */
} tshi_rule_sequence;

/* y (..., out) = x (..., in) W^T + b.
 * W R: y as x; dW and db P if that is S, but not S(-1), or P, but then without b.
 * W S(0), column-parallel: x R: y S(-1), dx P; x S(seq), gathered: y S(-1).
 * W S(1), row-parallel: x S(-1): y R, or S(seq) with db P. */
static int tshi_rule_linear(const tshi_call *call, tshi_output *output) {
    const tshi_rule_sequence *sequence = (const tshi_rule_sequence *)call->params;
    const tsh_tensor *x = call->in[0], *w = call->in[1], *b = call->in[2];
    const int cut = x->layout.kind == TSH_SHARDED, along = cut && x->layout.dim == x->ndim - 1;
    const int column = w->layout.kind == TSH_SHARDED && w->layout.dim == 0;
    const int row = w->layout.kind == TSH_SHARDED && w->layout.dim == 1, size = x->ctx->tp.size;
    const tsh_layout bias = column ? w->layout : tsh_replicated();
    const char *hint = NULL;
    if (w->layout.kind == TSH_PARTIAL)
        hint = "complete the weight first: tsh_redistribute(w, tsh_replicated())";
    else if (column && x->layout.kind != TSH_REPLICATED && !(sequence->regather && cut && !along))
        hint = "a column-parallel weight takes a replicated input: "
               "tsh_redistribute(x, tsh_replicated())";
    else if (row && !(along && tshi_layout_same_shards(&x->layout, &w->layout, w->dim[1], size)))
        hint = "a row-parallel weight takes an input that is replicated, or sharded along features "
               "by the same units: tsh_redistribute(x, tsh_replicated())";
    else if (along && !row)
        hint = "a sharded input wants a weight sharded along dimension 1, or gather it: "
               "tsh_redistribute(x, tsh_replicated())";
    else if (x->layout.kind == TSH_PARTIAL && b)
        hint = "the bias would be added once per rank; complete the input first: "
               "tsh_redistribute(x, tsh_replicated())";
    if (hint) return tshi_rule_refuse(call, x, w, hint);
    if (b && !tshi_layout_equal(&b->layout, &bias, b->dim, size))
        return tshi_rule_refuse(call, w, b,
                                "the bias of a column-parallel weight is sharded like its "
                                "dimension 0, any other is replicated");
    if (column) {
        output->layout = w->layout;
        output->layout.dim = x->ndim - 1;
        output->partial = sequence->regather ? TSHI_NONE : TSHI_X;
    } else if (row) {
        output->layout = sequence->give ? *sequence->give : tsh_replicated();
        output->partial = sequence->give ? TSHI_BIAS : TSHI_NONE;
    } else if (x->layout.kind != TSH_REPLICATED) {
        output->partial = TSHI_WEIGHT | TSHI_BIAS;
    }
    return 1;
}

/* Rows of W (rows, features) by ids. ids R, W R: R. ids S, W R: S, dW P. ids R, W S(0): P, as a
 * rank adds 0 for the rows that it does not hold. ids R, W S(1): S(-1). */
static int tshi_rule_embedding(const tshi_call *call, tshi_output *output) {
    const tsh_tensor *ids = call->in[0], *w = call->in[1];
    if (ids->layout.kind == TSH_SHARDED) output->partial = TSHI_WEIGHT;
    if (ids->layout.kind != TSH_PARTIAL && w->layout.kind == TSH_REPLICATED) return 1;
    if (ids->layout.kind != TSH_REPLICATED || w->layout.kind == TSH_PARTIAL)
        return tshi_rule_refuse(call, ids, w,
                                "a sharded weight takes replicated ids: "
                                "tsh_redistribute(ids, tsh_replicated())");
    output->layout = w->layout.dim ? w->layout : tsh_partial();
    if (w->layout.dim) output->layout.dim = ids->ndim;
    return 1;
}

/* -- norms, rope, attention ------------------------------------------------------ */

/* Norms over the last dimension, weight and bias R. x R: R. x S, but not S(-1): S, dW and db P. */
static int tshi_rule_norm(const tshi_call *call, tshi_output *output) {
    const tsh_tensor *x = call->in[0], *w = call->in[1], *b = call->in[2];
    const int last = x->ndim - 1;
    if (x->layout.kind == TSH_PARTIAL) return tshi_rule_refuse_input(call, "is a partial sum");
    if (tshi_rule_is_sharded(x, last))
        return tsh_fail(x->ctx, TSH_ERR_LAYOUT,
                        "%s: input is sharded along its last dimension (rank %d holds %lld of %lld "
                        "features); gather it first: tsh_redistribute(x, tsh_replicated())",
                        call->op->name, x->ctx->tp.rank, (long long)x->local[last],
                        (long long)x->dim[last]) == TSH_OK;
    if (w->layout.kind != TSH_REPLICATED || (b && b->layout.kind != TSH_REPLICATED))
        return tshi_rule_refuse(call, x, w,
                                "weight and bias must be replicated: "
                                "tsh_redistribute(w, tsh_replicated())");
    if (x->layout.kind == TSH_SHARDED) output->partial = TSHI_WEIGHT | TSHI_BIAS;
    return 1;
}

/* Rotates pairs of features: any layout but S(-1), which the output keeps. */
static int tshi_rule_rope(const tshi_call *call, tshi_output *output) {
    (void)output;
    return !tshi_rule_is_sharded(call->in[0], call->in[0]->ndim - 1) ||
           tshi_rule_refuse_input(
               call, "is sharded along its last dimension, whose features turn in pairs");
}

/* 1 if on every rank the query heads use exactly the heads of k that it holds. */
static int tshi_rule_groups(const tsh_tensor *q, const tsh_tensor *k) {
    const int64_t group = k->dim[1] ? q->dim[1] / k->dim[1] : 1; /* query heads per head of k */
    tsh_layout cut = k->layout; /* of the query heads that use a rank's heads of k */
    for (int s = 0; s < cut.segments; s++) {
        cut.segment[s].length *= group;
        cut.segment[s].unit *= group;
    }
    return tshi_layout_same_shards(&q->layout, &cut, q->dim[1], q->ctx->tp.size);
}

/* q (B, heads, T, D), k and v (B, k heads, S, D). All R, all S(0), or all S(1) in whole groups of
 * query heads: as q. q S(1), k and v R: S(1), dk and dv P. */
static int tshi_rule_attention(const tshi_call *call, tshi_output *output) {
    const tsh_tensor *q = call->in[0], *k = call->in[1], *v = call->in[2];
    const int size = q->ctx->tp.size, heads = tshi_rule_is_sharded(q, 1); /* q S(1) */
    const int grouped = heads && tshi_rule_is_sharded(k, 1);
    const int fits = !tshi_rule_first(call, TSH_PARTIAL) && q->layout.dim < 2 &&
                     k->layout.dim < 2 && tshi_layout_equal(&k->layout, &v->layout, k->dim, size);
    char tq[TSHI_TEXT_SIZE], tk[TSHI_TEXT_SIZE], tv[TSHI_TEXT_SIZE];
    if (fits && heads && k->layout.kind == TSH_REPLICATED) {
        output->partial = TSHI_K | TSHI_V;
        return 1;
    }
    if (fits && (grouped ? tshi_rule_groups(q, k)
                         : tshi_layout_equal(&q->layout, &k->layout, k->dim, size)))
        return 1;
    (void)tshi_tensor_text(q, tq);
    (void)tshi_tensor_text(k, tk);
    (void)tshi_tensor_text(v, tv);
    if (fits && grouped)
        return tsh_fail(q->ctx, TSH_ERR_LAYOUT,
                        "%s: q %s, k %s, v %s: a rank's query heads must use its own heads of k "
                        "and v; cut q in whole groups: tsh_redistribute(q, tsh_shard_units(1, "
                        "%lld)), or replicate k and v",
                        call->op->name, tq, tk, tv,
                        (long long)(q->dim[1] / k->dim[1] * k->layout.segment[0].unit)) == TSH_OK;
    return tsh_fail(q->ctx, TSH_ERR_LAYOUT,
                    "%s: q %s, k %s, v %s must all be replicated, or sharded alike by batch or by "
                    "heads (k and v may be replicated then): tsh_redistribute(k, "
                    "tsh_layout_of(q))",
                    call->op->name, tq, tk, tv) == TSH_OK;
}

/* -- cross-entropy ---------------------------------------------------------------- */

/* Logits (rows ..., classes). Logits R or S(classes), target R: R. Logits and target S(rows): P, or
 * S without a reduction. A target of probabilities may have the layout of the logits, too. The
 * weight per class is R, or sharded as the classes. *params: the tsh_reduction. */
static int tshi_rule_cross_entropy(const tshi_call *call, tshi_output *output) {
    const int reduced = *(const tsh_reduction *)call->params != TSH_REDUCE_NONE;
    const tsh_tensor *x = call->in[0], *target = call->in[1], *weight = call->in[2];
    const int size = x->ctx->tp.size, last = x->ndim - 1;
    const int probs = tshi_dtypes[target->dtype].floating; /* else class indices */
    const int cut = tshi_rule_is_sharded(x, last), rows = !cut && x->layout.kind == TSH_SHARDED;
    int fits = (rows || probs) && tshi_layout_equal(&x->layout, &target->layout, target->dim, size);
    char text[TSHI_TEXT_SIZE];
    if (x->layout.kind == TSH_PARTIAL)
        return tsh_fail(x->ctx, TSH_ERR_LAYOUT,
                        "%s: the logits %s are a partial sum over %d ranks; complete "
                        "them first: tsh_redistribute(logits, tsh_replicated())",
                        call->op->name, tshi_tensor_text(x, text), size) == TSH_OK;
    if (probs ? !fits : !rows) fits = target->layout.kind == TSH_REPLICATED;
    if (!fits)
        return tshi_rule_refuse(call, x, target,
                                probs  ? "the target is replicated, or laid out as the logits"
                                : rows ? "the target is to be sharded as the logits' rows: "
                                         "tsh_redistribute(target, tsh_layout_of(logits))"
                                       : "the target is to be replicated: "
                                         "tsh_redistribute(target, tsh_replicated())");
    if (weight && weight->layout.kind != TSH_REPLICATED &&
        !(cut && weight->layout.kind == TSH_SHARDED &&
          tshi_layout_same_shards(&x->layout, &weight->layout, x->dim[last], size)))
        return tshi_rule_refuse(call, x, weight,
                                "the weight is replicated, or cut as the classes: "
                                "tsh_redistribute(weight, tsh_replicated())");
    if (!rows || reduced) output->layout = rows ? tsh_partial() : tsh_replicated();
    return 1;
}

/* ========================================================================== */
/* >>op-map                                            MARK: - op-map (private) */
/* Elementwise ops, dropout and copies.                                        */
/* Needs: >>kernel >>tape >>rule.                                               */
/* ========================================================================== */

/* A unary or binary op is one row, TSHI_UNARY(...) or TSHI_BINARY(...): the macro makes its
 * kernels, its tshi_op and its public function from formulas in x, or in a and b. Kernels work in
 * tsh_real, whatever the dtypes are, on blocks of TSHI_BLOCK values; backward adds to the gradients
 * of the inputs. In formulas g is the gradient of the output, and fused is what TSHI_KERNEL_FUSED
 * says. */

/* -- what elementwise ops share ---------------------------------------------- */

/* Broadcasts the inputs' global shapes to *out as NumPy does. 0 and an error if they do not fit. */
static int tshi_map_shape(const char *op, tsh_tensor *const *in, int n, tsh_shape *out) {
    char a[TSHI_TEXT_SIZE], b[TSHI_TEXT_SIZE];
    int i, d;
    out->ndim = 0;
    for (i = 0; i < n; i++)
        if (in[i]->ndim > out->ndim) out->ndim = in[i]->ndim;
    for (d = 0; d < out->ndim; d++) out->dim[d] = 1;
    for (i = 0; i < n; i++) {
        int64_t *length = out->dim + (out->ndim - in[i]->ndim);
        for (d = 0; d < in[i]->ndim; d++) {
            int64_t own = in[i]->dim[d];
            if (length[d] == 1) length[d] = own;
            if (length[d] == own || own == 1) continue;
            return tsh_fail(in[0]->ctx, TSH_ERR_SHAPE,
                            "%s: shapes %s and %s do not broadcast (%lld against %lld)", op,
                            tshi_tensor_text(in[0], a), tshi_tensor_text(in[i], b),
                            (long long)length[d], (long long)own) == TSH_OK;
        }
    }
    return 1;
}

/* Records a call of op, as tshi_tape_record, with a copy of its options. The node takes over aux
 * (may be NULL), a block that backward reads; without a node, as after an error, it is released. */
static void tshi_map_record(const tshi_op *op, tsh_tensor *out, tsh_tensor *const *in, int n,
                            unsigned partial, const void *params, size_t bytes, tshi_block *aux) {
    tshi_node *node = tshi_tape_record(op, out, in, n, partial, bytes);
    if (!node) {
        tshi_mem_release(out->ctx, aux);
        return;
    }
    if (bytes) memcpy(node->params, params, bytes);
    node->aux = aux;
}

/* Runs an elementwise op on checked inputs and records it, unless its output is of integers. The
 * kernel's operands are the output, of `dtype`, and the inputs; c is its scalar, which backward
 * gets too. */
static tsh_tensor *tshi_map_run(const tshi_op *op, tsh_tensor *const *in, int n, tsh_dtype dtype,
                                tshi_kernel_fn kernel, double c) {
    tsh_ctx *ctx = in[0]->ctx;
    tshi_output output;
    tshi_loop loop;
    tsh_tensor *out;
    int i;
    if (!tshi_map_shape(op->name, in, n, &output.shape) || !tshi_rule_run(op, in, n, NULL, &output))
        return NULL;
    out = tshi_tensor_out(ctx, op->name, dtype, &output.shape, &output.layout);
    if (!out) return NULL;
    tshi_kernel_space(&loop, out);
    tshi_kernel_tensor(&loop, out);
    for (i = 0; i < n; i++) tshi_kernel_tensor(&loop, in[i]);
    tshi_kernel_run(&loop, kernel, &c);
    if (tshi_dtypes[dtype].floating)
        tshi_map_record(op, out, in, n, output.partial, &c, sizeof c, NULL);
    return out;
}

/* What backward kernels of elementwise ops need. */
typedef struct tshi_backward_params {
    double c; /* the op's scalar */
    int add;  /* 1: add to the gradient, 0: write it */
} tshi_backward_params;

/* The row of a unary or binary op, or of where. */
typedef struct tshi_map_row {
    tshi_op op;    /* first: node->op points to it */
    unsigned pass; /* inputs whose gradient is that of the output, if it has their shape */
    const tshi_kernel_fn *forward, *backward[3]; /* backward: for each input */
} tshi_map_row;

/* Adds to the gradient of input i. Operands: that gradient, g, then for each input its saved
 * values, or the saved output, or if nothing is saved g again. A broadcast input's gradient is
 * zeroed first, if it is new, as several terms are added to each element. */
static void tshi_map_input_backward(tshi_node *node, int i, const tshi_kernel_fn *kernel) {
    const tsh_tensor *t = node->in[i], *out = node->out;
    const int broadcast = tsh_local_numel(t) != tsh_local_numel(out);
    const tsh_real *g = tshi_tape_grad(node);
    tshi_backward_params params;
    tshi_loop loop;
    tshi_dest dest;
    int k;
    if (!(broadcast ? tshi_tape_dest_zeroed(node, i, &dest) : tshi_tape_dest(node, i, &dest)))
        return;
    tshi_kernel_space(&loop, out);
    tshi_kernel_add_operand(&loop, t, dest.data, dest.stride, TSH_REAL);
    tshi_kernel_add_operand(&loop, out, g, out->stride, TSH_REAL);
    for (k = 0; k < node->n; k++) {
        const int from = node->saved[k] ? k : node->n;
        const tsh_tensor *v = from < node->n ? node->in[from] : out;
        if (node->saved[from])
            tshi_kernel_add_operand(&loop, v, tshi_tape_saved(node, from), v->stride, v->dtype);
        else
            tshi_kernel_add_operand(&loop, out, g, out->stride, TSH_REAL);
    }
    params.c = *(const double *)node->params;
    params.add = dest.add;
    tshi_kernel_run(&loop, kernel[out->ctx->isa], &params);
}

static void tshi_map_backward(tshi_node *node) {
    const tshi_map_row *row = (const tshi_map_row *)(const void *)node->op;
    const tsh_tensor *out = node->out;
    int i;
    for (i = 0; i < node->n; i++) {
        const tsh_tensor *t = node->in[i];
        const int same = t->ndim == out->ndim && tsh_local_numel(t) == tsh_local_numel(out);
        if (same && (row->pass >> i & 1u))
            tshi_tape_identity(node, i);
        else
            tshi_map_input_backward(node, i, row->backward[i]);
    }
}

/* A kernel that computes F of up to three operands u, v, w (N of them; operands 1 to 3) and the
 * scalar c, and writes it to operand 0, or adds it there if ADD. P is its parameters' type. If an
 * input was broadcast, operand 0 of its backward has step 0 and the store sums the run. */
#define TSHI_MAP_KERNEL(name, P, C, ADD, N, u, v, w, F)                                            \
    TSHI_INLINE void name##_body(int64_t n, const tshi_operand *operand, const P *p, int fused) {  \
        tsh_real pad[3][TSHI_BLOCK], y[TSHI_BLOCK];                                                \
        const tsh_real *us, *vs, *ws, c = TSHI_R(C);                                               \
        int64_t e;                                                                                 \
        int i;                                                                                     \
        (void)c, (void)p, (void)fused;                                                             \
        for (e = 0; e < n; e += TSHI_BLOCK) {                                                      \
            us = tshi_kernel_load(&operand[1], e, n, pad[0]);                                      \
            vs = N > 1 ? tshi_kernel_load(&operand[2], e, n, pad[1]) : us;                         \
            ws = N > 2 ? tshi_kernel_load(&operand[3], e, n, pad[2]) : us;                         \
            TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) {                                          \
                const tsh_real u = us[i], v = vs[i], w = ws[i];                                    \
                (void)u, (void)v, (void)w;                                                         \
                y[i] = F;                                                                          \
            }                                                                                      \
            tshi_kernel_store(&operand[0], e, n, y, ADD);                                          \
        }                                                                                          \
    }                                                                                              \
    TSHI_KERNEL_FUSED(name, P);

/* -- unary ops -------------------------------------------------------------- */

/* d a^b / da = b a^(b - 1); 0 if b is 0, also at a = 0. */
TSHI_INLINE tsh_real tshi_map_power_derivative(tsh_real a, tsh_real b) {
    return b < 0 || b > 0 ? b * tshi_math_pow(a, b - TSHI_R(1)) : b * TSHI_R(0);
}

/* The normal distribution Phi, with a = |x|, z = a^2: Phi(-a) = e^(-z / 2) R(a), where R is the
 * Mills ratio over sqrt(2 pi), and M(a) = a R(a). Near 0, Phi(x) = 1/2 + x S(z). The next three
 * functions approximate R, S and a Phi(-a) by polynomials. */

/* S(z), up to a = 0.6875. */
TSHI_INLINE float tshi_map_normal(float z, int fused) {
    return tshi_math_steps(1.32573507e-4f, z, -1.20952074e-3f, 9.98079125e-3f, -6.64911047e-2f,
                             3.98942292e-1f, fused);
}

/* R(a), with the absolute error that 1 - Phi(-a) can bear. */
TSHI_INLINE float tshi_map_mills(float a, int fused) {
    const float g = a / (a + 2.5f);
    float r = tshi_math_steps(1.66279189e-2f, g, 2.21382603e-2f, -5.62647432e-2f, -9.86833498e-2f,
                                4.93170805e-2f, fused);
    r = tshi_math_fma(r, g, 5.65180779e-1f, fused);
    r = tshi_math_fma(r, g, -9.97356653e-1f, fused);
    return tshi_math_fma(r, g, 0.5f, fused);
}

/* y - a Phi(-a) for a from 0.6875 to 14.4, where a Phi(-a) rounds to 0. Its relative error is
 * small, as y may be 0. z is a^2 rounded, low the rest of it, r = -z - low - 2 n ln 2. M's
 * coefficients hold a factor 2^-24 and the power of 2 one of 2^24: so that is no denormal, and the
 * product is rounded only once. */
TSHI_INLINE float tshi_map_minus_tail(float y, float a, int fused) {
    const float u = (a - 1.5625f) / (a + 3.03125f); /* small where M is steep */
    const float cut = tshi_math_float(tshi_math_bits(a) & 0xFFFFF000u);
    const float z = fused ? (float)(a * a) : (float)(cut * cut);
    const float low = fused ? tshi_math_fma(a, a, -z, 1) : (float)((a - cut) * (a + cut));
    const float shifted = tshi_math_round(tshi_math_fma(z, -0.72134752f, 12582912.0f, fused));
    const float n = shifted - 12582912.0f;
    float r, p, m;
    m = tshi_math_steps(-2.96510150e-10f, u, 5.05886832e-10f, 8.87562024e-10f, -1.91779503e-9f,
                          -4.12072465e-9f, fused);
    m = tshi_math_steps(m, u, 1.74520522e-8f, -2.54221497e-8f, 1.80368893e-8f, 1.86518925e-8f,
                          fused);
    r = tshi_math_fma(n, -1.38671875f, -z, fused);
    r = tshi_math_fma(n, 4.2438888e-4f, r, fused) - low;
    p = tshi_math_steps(2.1585102e-5f, r, 2.6152439e-4f, 2.6042746e-3f, 2.0833150e-2f,
                          1.2499998e-1f, fused);
    p = tshi_math_fma(p, r, 0.5f, fused);
    m = tshi_math_fma(m * r, p, m, fused);
    p = tshi_math_float((tshi_math_bits(shifted) << 23) + 0x4B800000u);
    return tshi_math_fma(-m, p, y, fused);
}

/* gelu(x) = x Phi(x): x / 2 + x^2 S(x^2) near 0, else max(x, 0) - a Phi(-a). Infinities and NaN
 * take the first form, so that -infinity is NaN, as -infinity times 0. The sign bit is x's: a zero
 * would lack it. */
TSHI_INLINE tsh_real tshi_map_gelu(tsh_real v, int fused) {
    const float x = (float)v;
    const uint32_t bits = tshi_math_bits(x) & 0x7FFFFFFFu;
    const int32_t order = (int32_t)tshi_math_bits(x);
    const float a = tshi_math_float(bits < 0x41666666u ? bits : 0x41666666u);
    float mid, ends;
    if (TSHI_DOUBLE)
        return TSHI_R(0.5 * (double)v * erfc((double)v * -0.70710678118654752));
    mid = tshi_math_fma(tshi_map_normal(a * a, fused) * x, x, 0.5f * x, fused);
    ends = tshi_map_minus_tail(tshi_math_float((uint32_t)(order > 0 ? order : 0)), a, fused);
    return TSHI_R(
        tshi_math_float(tshi_math_pick(bits - 0x3F300000u < 0x40500000u, tshi_math_bits(ends),
                                           tshi_math_bits(mid)) |
                          ((uint32_t)order ^ bits)));
}

/* gelu'(x) = Phi(x) + x phi(x), with phi = Phi'. gelu'(-a) = e^(-a^2 / 2) (R(a) - a / sqrt(2 pi)),
 * and gelu'(a) = 1 - gelu'(-a). */
TSHI_INLINE tsh_real tshi_map_gelu_derivative(tsh_real v, int fused) {
    const uint32_t x = tshi_math_bits((float)v), bits = x & 0x7FFFFFFFu;
    const float a = tshi_math_float(bits < 0x41600000u ? bits : 0x41600000u);
    float y;
    if (TSHI_DOUBLE) {
        const double bell = 0.39894228040143268 * exp(-0.5 * (double)v * (double)v);
        return TSHI_R(0.5 * erfc((double)v * -0.70710678118654752) + (double)v * bell);
    }
    y = tshi_math_fma(-0.39894228f, a, tshi_map_mills(a, fused), fused);
    y = y * (float)tshi_math_exp_below(TSHI_R(-0.5f * a * a), fused);
    y = tshi_math_float(
        tshi_math_pick((int)(x >> 31), tshi_math_bits(y), tshi_math_bits(1.0f - y)));
    return TSHI_R(y + ((float)v - (float)v)); /* NaN unless v is finite */
}

/* erf(a) = 1 - e^-P with P = a + a Q(a), a = |x| up to 3.95 (from 3.88 on it rounds to 1), computed
 * as 1 - 2^n - 2^n (e^r - 1) with -P = n ln 2 + r. The sign is x's. */
TSHI_INLINE tsh_real tshi_map_erf(tsh_real v, int fused) {
    const uint32_t x = tshi_math_bits((float)v), bits = x & 0x7FFFFFFFu;
    const float a = tshi_math_float(bits < 0x407CCCCDu ? bits : 0x407CCCCDu);
    uint32_t n;
    float q, power;
    if (TSHI_DOUBLE) return TSHI_R(erf((double)v));
    q = tshi_math_steps(-9.25656514e-6f, a, 1.17644027e-4f, -6.32846961e-4f, 1.66704645e-3f,
                          -1.60415613e-4f, fused);
    q = tshi_math_steps(q, a, -1.91530529e-2f, 1.02777824e-1f, 6.36619389e-1f, 1.28379166e-1f,
                          fused);
    q = tshi_math_exp_rest(-tshi_math_fma(q, a, a, fused), &n, fused);
    q = tshi_math_exp_less_one(q, fused);
    power = tshi_math_float((n << 23) + 0x3F800000u);
    q = tshi_math_fma(-power, q, 1.0f - power, fused);
    return TSHI_R(tshi_math_float(
        tshi_math_pick(bits > 0x7F800000u, x, tshi_math_bits(q) | (x ^ bits))));
}

/* e^-2u with u = sqrt(2 / pi) (x + 0.044715 x^3): 0.5 x (1 + tanh u) is x / (1 + e^-2u). */
TSHI_INLINE tsh_real tshi_map_gelu_power(tsh_real x, int fused) {
    return tshi_math_exp(-x * (TSHI_R(1.5957691216057308) + TSHI_R(0.071354816272600) * x * x),
                           fused);
}

TSHI_INLINE tsh_real tshi_map_gelu_tanh_derivative(tsh_real x, int fused) {
    tsh_real s = TSHI_R(1) / (TSHI_R(1) + tshi_map_gelu_power(x, fused));
    tsh_real du2 = TSHI_R(1.5957691216057308) + TSHI_R(0.2140644488178) * x * x; /* of 2u */
    return s + x * s * (TSHI_R(1) - s) * du2;
}

TSHI_INLINE tsh_real tshi_map_silu(tsh_real x, int fused) {
    return x / (TSHI_R(1) + tshi_math_exp(-x, fused));
}

TSHI_INLINE tsh_real tshi_map_silu_derivative(tsh_real x, int fused) {
    tsh_real s = tshi_math_sigmoid(x, fused);
    return s * (TSHI_R(1) + x * (TSHI_R(1) - s));
}

/* Runs a row's op on its n inputs. */
static tsh_tensor *tshi_map_apply(const tshi_map_row *row, tsh_tensor *const *in, int n, double c) {
    tsh_ctx *ctx = tshi_tensor_check_floating(row->op.name, in, n);
    if (!ctx) return NULL;
    return tshi_map_run(&row->op, in, n, tshi_tensor_promote(in, n), row->forward[ctx->isa], c);
}

/* Name, layout rule, which values backward reads as v (NONE, the input X or the output OUT), y of
 * (x, c), dx of (g, v, c), where c is the argument of a TSHI_SCALAR op. */
#define TSHI_UNARY_ROW(public, name, rule, save, F, D)                                             \
    TSHI_MAP_KERNEL(tshi_map_##name##_forward, double, *p, 0, 1, x, u1, u2, F)                     \
    TSHI_MAP_KERNEL(tshi_map_##name##_backward, tshi_backward_params, p->c, p->add, 2, g, v, u2,   \
                    D)                                                                             \
    static const tshi_map_row tshi_map_##name##_row = {                                            \
        {public, "x", tshi_rule_##rule, tshi_map_backward, TSHI_##save, 0},                        \
        0,                                                                                         \
        tshi_map_##name##_forward,                                                                 \
        {tshi_map_##name##_backward, NULL}};
#define TSHI_UNARY(name, ...)                                                                      \
    TSHI_UNARY_ROW("tsh_" #name, name, __VA_ARGS__)                                                \
    TSH_API tsh_tensor *tsh_##name(tsh_tensor *x) {                                                \
        return tshi_map_apply(&tshi_map_##name##_row, &x, 1, 0);                                   \
    }
#define TSHI_SCALAR(name, ...)                                                                     \
    TSHI_UNARY_ROW("tsh_" #name, name, __VA_ARGS__)                                                \
    TSH_API tsh_tensor *tsh_##name(tsh_tensor *x, double c) {                                      \
        return tshi_map_apply(&tshi_map_##name##_row, &x, 1, c);                                   \
    }

TSHI_UNARY(neg, keep, NONE, -x, -g)
TSHI_SCALAR(scale, keep, NONE, x *c, g *c)
TSHI_SCALAR(add_scalar, nonlinear, NONE, x + c, g)
TSHI_UNARY_ROW("tsh_pow_scalar", square, nonlinear, X, x *x, g *(v + v))
TSHI_UNARY_ROW("tsh_pow_scalar", pow_scalar, nonlinear, X, tshi_math_pow(x, c),
               g *tshi_map_power_derivative(v, c))
TSH_API tsh_tensor *tsh_pow_scalar(tsh_tensor *x, double c) {
    const int square = c >= 2 && c <= 2;
    return tshi_map_apply(square ? &tshi_map_square_row : &tshi_map_pow_scalar_row, &x, 1, c);
}
TSHI_UNARY(exp, nonlinear, OUT, tshi_math_exp(x, fused), g *v)
TSHI_UNARY(log, nonlinear, X, tshi_math_log(x, fused), g / v)
TSHI_UNARY(sqrt, nonlinear, OUT, tshi_math_sqrt(x), g *TSHI_R(0.5) / v)
TSHI_UNARY(sigmoid, nonlinear, OUT, tshi_math_sigmoid(x, fused), g *v *(TSHI_R(1) - v))
TSHI_UNARY(tanh, nonlinear, OUT, tshi_math_tanh(x, fused), g *(TSHI_R(1) - v * v))
TSHI_UNARY(relu, nonlinear, OUT, x <= 0 ? TSHI_R(0) : x, v <= 0 ? TSHI_R(0) : g)
TSHI_UNARY(erf, nonlinear, X, tshi_map_erf(x, fused), /* erf'(x) = 2 / sqrt(pi) e^(-x^2) */
           g *(TSHI_R(1.1283791670955126) * tshi_math_exp(-v * v, fused)))
TSHI_UNARY(gelu, nonlinear, X, tshi_map_gelu(x, fused), g *tshi_map_gelu_derivative(v, fused))
TSHI_UNARY(gelu_tanh, nonlinear, X, x / (TSHI_R(1) + tshi_map_gelu_power(x, fused)),
           g *tshi_map_gelu_tanh_derivative(v, fused))
TSHI_UNARY(silu, nonlinear, X, tshi_map_silu(x, fused), g *tshi_map_silu_derivative(v, fused))
#undef TSHI_UNARY_ROW
#undef TSHI_UNARY
#undef TSHI_SCALAR

/* -- binary ops ------------------------------------------------------------- */

/* d a^b / db = a^b ln a; 0 at a = 0 with b >= 0, as in PyTorch. */
TSHI_INLINE tsh_real tshi_map_pow_derivative(tsh_real a, tsh_real b, int fused) {
    const tsh_real db = tshi_math_pow(a, b) * tshi_math_log(a, fused);
    return !(a < 0) && !(a > 0) && b >= 0 && a == a ? TSHI_R(0) : db;
}

/* Name, layout rule, inputs that backward reads, inputs whose gradient is g, y of (a, b), da and db
 * of (g, a, b). */
#define TSHI_BINARY(name, rule, save, pass, F, DA, DB)                                             \
    TSHI_MAP_KERNEL(tshi_map_##name##_forward, double, 0, 0, 2, a, b, u2, F)                       \
    TSHI_MAP_KERNEL(tshi_map_##name##_da, tshi_backward_params, 0, p->add, 3, g, a, b, DA)         \
    TSHI_MAP_KERNEL(tshi_map_##name##_db, tshi_backward_params, 0, p->add, 3, g, a, b, DB)         \
    static const tshi_map_row tshi_map_##name##_row = {                                            \
        {"tsh_" #name, "a b", tshi_rule_##rule, tshi_map_backward, save, 0},                       \
        pass,                                                                                      \
        tshi_map_##name##_forward,                                                                 \
        {tshi_map_##name##_da, tshi_map_##name##_db}};                                             \
    TSH_API tsh_tensor *tsh_##name(tsh_tensor *a, tsh_tensor *b) {                                 \
        tsh_tensor *in[] = {a, b};                                                                 \
        return tshi_map_apply(&tshi_map_##name##_row, in, 2, 0);                                   \
    }

TSHI_BINARY(add, add, TSHI_NONE, TSHI_A | TSHI_B, a + b, g, g)
TSHI_BINARY(sub, add, TSHI_NONE, TSHI_A, a - b, g, -g)
TSHI_BINARY(mul, multiply, TSHI_A | TSHI_B, TSHI_NONE, a *b, g *b, g *a)
TSHI_BINARY(div, divide, TSHI_A | TSHI_B, TSHI_NONE, a / b, g / b, -g *a / (b * b))
TSHI_BINARY(pow, nonlinear, TSHI_A | TSHI_B, TSHI_NONE, tshi_math_pow(a, b),
            g *tshi_map_power_derivative(a, b), g *tshi_map_pow_derivative(a, b, fused))
#undef TSHI_BINARY

/* -- comparisons, where, cast ------------------------------------------------ */

/* y = 1 or 0, as a OP b. Integers are compared as int64_t, exactly. */
#define TSHI_COMPARE_LOOP(type, OP)                                                                \
    TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) {                                                  \
        y[i] = ((const type *)as)[i] OP((const type *)bs)[i];                                      \
    }
#define TSHI_COMPARE(name, OP)                                                                     \
    TSHI_INLINE void tshi_map_##name##_body(int64_t n, const tshi_operand *x,                      \
                                            const double *none) {                                  \
        union {                                                                                    \
            tsh_real real[TSHI_BLOCK];                                                             \
            int64_t integer[TSHI_BLOCK];                                                           \
        } pad[2];                                                                                  \
        const int floating = tshi_dtypes[x[1].dtype].floating;                                     \
        const void *as, *bs;                                                                       \
        int32_t y[TSHI_BLOCK];                                                                     \
        int64_t e;                                                                                 \
        int i;                                                                                     \
        (void)none;                                                                                \
        for (e = 0; e < n; e += TSHI_BLOCK) {                                                      \
            if (floating) {                                                                        \
                as = tshi_kernel_load(&x[1], e, n, pad[0].real);                                   \
                bs = tshi_kernel_load(&x[2], e, n, pad[1].real);                                   \
                TSHI_COMPARE_LOOP(tsh_real, OP)                                                    \
            } else {                                                                               \
                as = tshi_kernel_load_integers(&x[1], e, n, pad[0].integer);                       \
                bs = tshi_kernel_load_integers(&x[2], e, n, pad[1].integer);                       \
                TSHI_COMPARE_LOOP(int64_t, OP)                                                     \
            }                                                                                      \
            /* the output is new and dense */                                                      \
            memcpy((int32_t *)x[0].data + e, y,                                                    \
                   (size_t)tshi_base_min(TSHI_BLOCK, n - e) * sizeof *y);                          \
        }                                                                                          \
    }                                                                                              \
    TSHI_KERNEL(tshi_map_##name, double);                                                          \
    TSH_API tsh_tensor *tsh_##name(tsh_tensor *a, tsh_tensor *b) {                                 \
        static const tshi_op op = {"tsh_" #name, "a b", tshi_rule_nonlinear, NULL, 0, 0};          \
        return tshi_map_compare(&op, a, b, tshi_map_##name);                                       \
    }

static tsh_tensor *tshi_map_compare(const tshi_op *op, tsh_tensor *a, tsh_tensor *b,
                                    const tshi_kernel_fn *kernel) {
    tsh_tensor *in[] = {a, b};
    tsh_ctx *ctx = tshi_tensor_check(op->name, in, 2);
    if (!ctx) return NULL;
    if (a->dtype != b->dtype)
        return tshi_error_null(ctx, TSH_ERR_DTYPE, "%s: %s against %s; tsh_cast one of them",
                               op->name, tshi_dtype_name(a->dtype), tshi_dtype_name(b->dtype));
    return tshi_map_run(op, in, 2, TSH_I32, kernel[ctx->isa], 0);
}

TSHI_COMPARE(eq, ==)
TSHI_COMPARE(ne, !=)
TSHI_COMPARE(lt, <)
TSHI_COMPARE(le, <=)
TSHI_COMPARE(gt, >)
TSHI_COMPARE(ge, >=)
#undef TSHI_COMPARE
#undef TSHI_COMPARE_LOOP

/* y = m ? a : b. (An integer m that is not 0 is not 0 as a tsh_real either.) */
TSHI_MAP_KERNEL(tshi_map_where, double, 0, 0, 3, m, a, b, m != 0 ? a : b)
TSHI_MAP_KERNEL(tshi_map_where_da, tshi_backward_params, 0, p->add, 2, g, m, u2, m != 0 ? g : 0)
TSHI_MAP_KERNEL(tshi_map_where_db, tshi_backward_params, 0, p->add, 2, g, m, u2, m != 0 ? 0 : g)
#undef TSHI_MAP_KERNEL

static const tshi_map_row tshi_map_where_row = {
    {"tsh_where", "cond yes no", tshi_rule_where, tshi_map_backward, TSHI_COND, 0},
    0,
    tshi_map_where,
    {NULL, tshi_map_where_da, tshi_map_where_db}};

TSH_API tsh_tensor *tsh_where(tsh_tensor *cond, tsh_tensor *a, tsh_tensor *b) {
    tsh_tensor *in[] = {cond, a, b};
    tsh_ctx *ctx = tshi_tensor_check("tsh_where", in, 3);
    if (!ctx || !tshi_tensor_check_floating("tsh_where", in + 1, 2)) return NULL;
    if (tshi_dtypes[cond->dtype].floating)
        return tshi_error_null(ctx, TSH_ERR_DTYPE, "tsh_where: the condition is %s, not i32",
                               tshi_dtype_name(cond->dtype));
    return tshi_map_run(&tshi_map_where_row.op, in, 3, tshi_tensor_promote(in + 1, 2),
                        tshi_map_where[ctx->isa], 0);
}

/* Backward of ops whose output has the values of input 0: dx = dy. (Gradients are tsh_real,
 * whatever the dtypes are.) */
static void tshi_map_same_backward(tshi_node *node) {
    tshi_tape_identity(node, 0);
}

static const tshi_op tshi_map_cast_op = {
    "tsh_cast", "x", tshi_rule_nonlinear, tshi_map_same_backward, TSHI_NONE, 0};

TSH_API tsh_tensor *tsh_cast(tsh_tensor *x, tsh_dtype dtype) {
    tsh_ctx *ctx = tshi_tensor_check("tsh_cast", &x, 1);
    if (!ctx || x->dtype == dtype) return ctx ? x : NULL;
    if ((unsigned)dtype >= (unsigned)TSHI_DTYPES ||
        (tshi_dtypes[dtype].floating && !tshi_dtype_computes(dtype)))
        return tshi_error_null(ctx, TSH_ERR_DTYPE,
                               "tsh_cast: takes %s, i32 or i64 in this build, not dtype %d",
                               tshi_dtype_name(TSH_REAL), (int)dtype);
    return tshi_map_run(&tshi_map_cast_op, &x, 1, dtype, tshi_kernel_copy, 0);
}

/* -- dense gradients --------------------------------------------------------- */

/* Where a kernel that outputs a dense gradient of input x writes it: to dest if that is dense and
 * has nothing to add to (*scratch is NULL then), else to *scratch, for tshi_map_accumulate. NULL:
 * no memory. */
static tsh_real *tshi_map_dense_dest(const tsh_tensor *x, const tshi_dest *dest,
                                     tshi_block **scratch) {
    int64_t stride[TSH_MAX_DIMS];
    int d, direct = !dest->add;
    tshi_tensor_strides(x->local, x->ndim, stride);
    for (d = 0; d < x->ndim; d++) direct &= x->local[d] == 1 || stride[d] == dest->stride[d];
    *scratch = NULL;
    if (direct) return dest->data;
    *scratch = tshi_mem_alloc(x->ctx, TSH_MEM_STEP, tshi_dtype_reals(tsh_local_numel(x)));
    return *scratch ? (tsh_real *)tshi_mem_data(*scratch) : NULL;
}

/* Adds what a kernel wrote to scratch (may be NULL) to the gradient, and releases scratch. */
static void tshi_map_accumulate(tsh_tensor *x, const tshi_dest *dest, tshi_block *scratch) {
    int64_t stride[TSH_MAX_DIMS];
    if (!scratch) return;
    tshi_tensor_strides(x->local, x->ndim, stride);
    tshi_tape_accumulate(x, dest, (const tsh_real *)tshi_mem_data(scratch), stride);
    tshi_mem_release(x->ctx, scratch);
}

/* -- dropout ----------------------------------------------------------------
 * y_e = x_e / (1 - p) if bits(key, stream, e) >= p 2^32, else 0, where e is the global index of the
 * element: the mask is the same however x is sharded. Backward draws it again. */

typedef struct tshi_dropout {
    uint64_t key, stream; /* of Philox */
    double p;
} tshi_dropout;

/* A run of adjacent elements, from global index `first` on: y = dropout of x, dense. */
typedef struct tshi_dropout_run {
    const tshi_dropout *mask;
    const tsh_real *x;
    tsh_real *y;
    int isa;
    int64_t first;
} tshi_dropout_run;

/* The next mask of owner, the module that drops out. Its stream is a hash of owner's path, how
 * often owner has drawn a mask, and the dp rank. Without an owner the calls of this ctx are
 * counted, and the pipeline stage is hashed, as stages count for themselves. */
static tshi_dropout tshi_map_next_mask(tsh_ctx *ctx, double p, tsh_module *owner) {
    const uint64_t count = owner ? owner->dropout_calls++ : ctx->dropout_calls++;
    tshi_dropout mask = {ctx->seed, tshi_rng_hash(count, "dropout", 7), p};
    if (owner) mask.stream = tshi_rng_hash(mask.stream, owner->path, strlen(owner->path));
    if (!owner && ctx->pp.rank)
        mask.stream = tshi_rng_hash(mask.stream, &ctx->pp.rank, sizeof ctx->pp.rank);
    mask.stream = tshi_rng_hash(mask.stream, &ctx->dp.rank, sizeof ctx->dp.rank);
    return mask;
}

#if TSHI_X86
/* tshi_rng_words with its counters in 64-bit lanes, whose upper halves are ignored, so that each of
 * Philox's products is one instruction; compilers do not find that by themselves. The lanes' order
 * is such that unpacking puts the words in theirs. */
#define TSHI_MAP_WORDS(isa, TARGET, bytes, reg, op, ...)                                           \
    typedef uint64_t tshi_map_##isa __attribute__((vector_size(bytes), may_alias));                \
    TARGET TSHI_INLINE void tshi_map_words_##isa(uint64_t key, uint64_t stream, uint64_t position, \
                                                 uint32_t *word) {                                 \
        const tshi_map_##isa zero = {0}, lanes = {__VA_ARGS__};                                    \
        const tshi_map_##isa m0 = zero + 0xD2511F53u, m1 = zero + 0xCD9E8D57u;                     \
        int i, r;                                                                                  \
        for (i = 0; i < TSHI_RNG_WORDS; i += (bytes) / 2) {                                        \
            tshi_map_##isa c0 = lanes + (position + (uint64_t)i / 4), c1 = c0 >> 32, a, b;         \
            tshi_map_##isa c2 = zero + stream, c3 = c2 >> 32, k0 = zero + key, k1 = k0 >> 32;      \
            for (r = 0; r < 10; r++) {                                                             \
                a = (tshi_map_##isa)op(mul_epu32, (reg)c0, (reg)m0);                               \
                b = (tshi_map_##isa)op(mul_epu32, (reg)c2, (reg)m1);                               \
                c0 = (b >> 32) ^ c1 ^ k0;                                                          \
                c2 = (a >> 32) ^ c3 ^ k1;                                                          \
                c1 = b;                                                                            \
                c3 = a;                                                                            \
                k0 += 0x9E3779B9u;                                                                 \
                k1 += 0xBB67AE85u;                                                                 \
            }                                                                                      \
            a = (c0 & 0xFFFFFFFFu) | c1 << 32;                                                     \
            b = (c2 & 0xFFFFFFFFu) | c3 << 32;                                                     \
            c0 = (tshi_map_##isa)op(unpacklo_epi64, (reg)a, (reg)b);                               \
            c1 = (tshi_map_##isa)op(unpackhi_epi64, (reg)a, (reg)b);                               \
            memcpy(word + i, &c0, bytes);                                                          \
            memcpy(word + i + (bytes) / 4, &c1, bytes);                                            \
        }                                                                                          \
    }
/* (With a mask of all lanes: gcc 12 warns of its own header in the forms without.) */
#define TSHI_MAP_256(name, a, b) _mm256_##name(a, b)
#define TSHI_MAP_512(name, a, b) _mm512_maskz_##name(0xFF, a, b)
TSHI_MAP_WORDS(avx2, TSHI_AVX2, 32, __m256i, TSHI_MAP_256, 0, 2, 1, 3)
TSHI_MAP_WORDS(avx512, TSHI_AVX512, 64, __m512i, TSHI_MAP_512, 0, 4, 1, 5, 2, 6, 3, 7)
#undef TSHI_MAP_256
#undef TSHI_MAP_512
#undef TSHI_MAP_WORDS
#else
#define tshi_map_words_avx2   tshi_rng_words
#define tshi_map_words_avx512 tshi_rng_words
#endif
#define tshi_map_words_portable tshi_rng_words

/* y = x times 0 or 1 / (1 - p). Operands: y, x (may be y), dense. */
#define TSHI_MAP_MASK(isa, TARGET)                                                                 \
    TARGET static void tshi_map_mask_##isa(int64_t n, const tshi_operand *operand,                 \
                                           const void *params) {                                   \
        const tshi_dropout_run *part = (const tshi_dropout_run *)params;                           \
        tsh_real *y = (tsh_real *)operand[0].data;                                                 \
        const tsh_real *x = (const tsh_real *)operand[1].data;                                     \
        const double limit = part->mask->p * 4294967296.0;                                         \
        const uint32_t below = limit >= 4294967295.0 ? 0xFFFFFFFFu : (uint32_t)limit;              \
        const tsh_real scale = part->mask->p < 1 ? TSHI_R(1 / (1 - part->mask->p)) : 0;            \
        const uint64_t key = part->mask->key, stream = part->mask->stream;                         \
        uint32_t word[TSHI_RNG_WORDS];                                                             \
        int64_t i, j, m;                                                                           \
        int skip = (int)(part->first % 4);                                                         \
        for (i = 0; i < n; i += m, skip = 0) {                                                     \
            m = tshi_base_min(TSHI_RNG_WORDS - skip, n - i);                                       \
            tshi_map_words_##isa(key, stream, (uint64_t)(part->first + i) / 4, word);              \
            TSHI_LANES for (j = 0; j < m; j++)                                                     \
                y[i + j] = word[skip + j] >= below ? x[i + j] * scale : 0;                         \
        }                                                                                          \
    }
TSHI_MAP_MASK(portable, )
TSHI_MAP_MASK(avx2, TSHI_AVX2)
TSHI_MAP_MASK(avx512, TSHI_AVX512)
#undef TSHI_MAP_MASK
#undef tshi_map_words_portable
#if !TSHI_X86
#undef tshi_map_words_avx2
#undef tshi_map_words_avx512
#endif
TSHI_KERNEL_TABLE(tshi_map_mask);

/* Drops out `length` elements from the global and local index that are given. */
static void tshi_map_mask_run(tshi_dropout_run *run, int64_t global, int64_t local,
                              int64_t length) {
    const tshi_operand x[2] = {tshi_kernel_reals(run->y + local, 1),
                               tshi_kernel_reals(run->x + local, 1)};
    run->first = global;
    tshi_map_mask[run->isa](length, x, run);
}

/* Drops out elements of this rank's shard of t. */
static void tshi_map_mask_all(tshi_dropout_run *run, const tsh_tensor *t) {
    tshi_runs part = tshi_tensor_own_runs(t);
    while (tshi_tensor_next_run(&part))
        tshi_map_mask_run(run, part.global, part.local, part.length);
}

static void tshi_map_dropout_backward(tshi_node *node) {
    tsh_tensor *out = node->out;
    tshi_dropout_run run = {(const tshi_dropout *)node->params, tshi_tape_grad(node), NULL,
                            out->ctx->isa, 0};
    tshi_dest dest;
    tshi_block *scratch;
    if (!tshi_tape_dest(node, 0, &dest)) return;
    run.y = tshi_map_dense_dest(node->in[0], &dest, &scratch);
    if (!run.y) return;
    tshi_map_mask_all(&run, out);
    tshi_map_accumulate(node->in[0], &dest, scratch);
}

static const tshi_op tshi_map_dropout_op = {
    "tsh_dropout", "x", tshi_rule_keep, tshi_map_dropout_backward, TSHI_NONE, 0};

TSH_API tsh_tensor *tsh_dropout(tsh_tensor *x, double p, tsh_module *owner) {
    tsh_ctx *ctx = tshi_tensor_check_floating("tsh_dropout", &x, 1);
    tsh_shape shape = tsh_shape_of(x);
    tshi_dropout mask;
    tshi_dropout_run run = {&mask, NULL, NULL, 0, 0};
    tshi_block *scratch, *unrounded;
    tsh_tensor *out;
    if (!ctx) return NULL;
    if (!(p >= 0 && p <= 1))
        return tshi_error_null(ctx, TSH_ERR_ARGUMENT, "tsh_dropout: p is %g, not within [0, 1]", p);
    if (p <= 0) return x;
    out = tshi_tensor_out(ctx, "tsh_dropout", x->dtype, &shape, &x->layout);
    if (!out) return NULL;
    mask = tshi_map_next_mask(ctx, p, owner);
    run.isa = ctx->isa;
    run.y = tshi_kernel_output(out, &unrounded);
    run.x = tshi_kernel_packed_reals(x, &scratch);
    if (run.x && run.y) tshi_map_mask_all(&run, out);
    tshi_mem_release(ctx, scratch);
    tshi_kernel_output_done(out, unrounded);
    tshi_map_record(&tshi_map_dropout_op, out, &x, 1, TSHI_NONE, &mask, sizeof mask, NULL);
    return ctx->error.code == TSH_OK ? out : NULL;
}

/* -- copies ----------------------------------------------------------------- */

/* Adds both accumulators of the copy to those of the input, the partial sum to the partial sum: the
 * op that made the input completes it, if it has to. */
static void tshi_map_copy_backward(tshi_node *node) {
    tsh_tensor *out = node->out, *base = node->in[0]->base;
    tshi_accumulator *const from[] = {&out->gr, &out->gp}, *const to[] = {&base->gr, &base->gp};
    tshi_dest dest;
    int i;
    for (i = 0; i < 2 && base->requires_grad; i++)
        if (from[i]->live && tshi_tape_dest_in(node->in[0], to[i], &dest))
            tshi_tape_accumulate(node->in[0], &dest,
                                 (const tsh_real *)tshi_mem_data(from[i]->block), out->stride);
}

static const tshi_op tshi_map_clone_op = {
    "tsh_clone", "x",       tshi_rule_keep, tshi_map_copy_backward,
    TSHI_NONE,   TSHI_OP_ACCEPTS_PARTIAL | TSHI_OP_PASSES_PARTIAL};

/* A dense copy of x, through which gradients flow back to x. Errors name op. */
static tsh_tensor *tshi_map_copy(const char *op, tsh_tensor *x) {
    tsh_shape shape = tsh_shape_of(x);
    tsh_tensor *out = tshi_tensor_out(x->ctx, op, x->dtype, &shape, &x->layout);
    if (!out) return NULL;
    if (x->ctx->trace) tshi_trace_open(x->ctx->trace, tshi_map_clone_op.name);
    tshi_kernel_dense(x, tshi_tensor_at(out), out->dtype, 0);
    (void)tshi_tape_record(&tshi_map_clone_op, out, &x, 1, TSHI_NONE, 0);
    return out;
}

TSH_API tsh_tensor *tsh_clone(tsh_tensor *x) {
    return tshi_tensor_check("tsh_clone", &x, 1) ? tshi_map_copy("tsh_clone", x) : NULL;
}

TSH_API tsh_tensor *tsh_detach(tsh_tensor *x) {
    return tshi_tensor_check("tsh_detach", &x, 1) ? tshi_tensor_detached(x, x->block) : NULL;
}

TSH_API tsh_tensor *tsh_keep(const tsh_tensor *t) {
    tsh_tensor *x, *out;
    tsh_shape shape = tsh_shape_of(t);
    if (!t) return NULL;
    x = (tsh_tensor *)tshi_kernel_unconst(t);
    if (!tshi_tensor_check("tsh_keep", &x, 1)) return NULL;
    out = tshi_tensor_make(t->ctx, "tsh_keep", TSHI_OWNED, TSH_MEM_TENSORS, t->dtype, &shape,
                           &t->layout);
    if (out) tshi_kernel_dense(t, tshi_tensor_at(out), t->dtype, 0);
    return out;
}

/* ========================================================================== */
/* >>op-reduce                                      MARK: - op-reduce (private) */
/* Ops along one dimension, or all: sum, mean, max, argmax, softmax.           */
/* Needs: >>op-map.                                                             */
/* ========================================================================== */

/* An op's options, and what its kernels need. */
typedef struct tshi_reduce_params {
    double c;   /* sum, mean: the factor of the sum */
    int64_t n;  /* local length of what is reduced */
    int axis;   /* -1: all dimensions */
    int is_log; /* softmax: 1 for log_softmax */
} tshi_reduce_params;

/* The local input is seen as an (outer, n, inner) array, reduced along n; a reduction of all
 * dimensions is (1, n, 1). Sums run in an order that depends on these sizes only, so that their
 * bits do not depend on the number of threads. */
typedef struct tshi_reduction {
    int64_t outer, inner;
    int64_t length;  /* n on all ranks */
    tsh_shape shape; /* of the result */
    tsh_layout layout;
    tshi_reduce_params params;
} tshi_reduction;

/* Checks dim and x's layout and fills in *r. 0 and an error if the op cannot run along dim. */
static int tshi_reduce_plan(const tshi_op *op, tsh_tensor *x, int dim, int keepdim,
                            tshi_reduction *r) {
    const int axis = dim == TSH_ALL ? -1 : tshi_tensor_axis(x, dim);
    const tshi_rule_axis along = {axis, keepdim};
    const tshi_reduce_params params = {1, axis < 0 ? tsh_local_numel(x) : x->local[axis], axis, 0};
    char text[TSHI_TEXT_SIZE];
    tshi_output output;
    int d;
    if (dim != TSH_ALL && axis < 0)
        return tsh_fail(x->ctx, TSH_ERR_SHAPE, "%s: there is no dimension %d in %s", op->name, dim,
                        tshi_tensor_text(x, text)) == TSH_OK;
    if (!tshi_rule_run(op, &x, 1, &along, &output)) return 0;
    r->params = params;
    r->layout = output.layout;
    r->shape = tsh_shape0();
    for (d = 0; d < x->ndim; d++) {
        int reduced = axis < 0 || d == axis;
        if (!reduced || keepdim) r->shape.dim[r->shape.ndim++] = reduced ? 1 : x->dim[d];
    }
    r->length = axis < 0 ? tsh_numel(x) : x->dim[axis];
    r->outer = axis < 0 ? 1 : tshi_tensor_product(x->local, axis);
    r->inner = axis < 0 ? 1 : tshi_tensor_product(x->local + axis + 1, x->ndim - axis - 1);
    return 1;
}

/* -- sum, mean: y = c sum x; dx = c dy --------------------------------------- */

/* y = c sum x for rows of p->n adjacent values: sums of 4096 values each, added in double.
 * Operands: y, x. */
TSHI_INLINE void tshi_reduce_sum_body(int64_t rows, const tshi_operand *operand,
                                      const tshi_reduce_params *p) {
    tsh_real *y = (tsh_real *)operand[0].data;
    const tsh_real *x = (const tsh_real *)operand[1].data;
    const int64_t n = p->n;
    for (; rows > 0; rows--, x += n) {
        double total = 0;
        int64_t i;
        for (i = 0; i < n; i += 4096)
            total += (double)tshi_kernel_sum(x + i, n - i < 4096 ? n - i : 4096);
        *y++ = TSHI_R(total * p->c);
    }
}
TSHI_KERNEL(tshi_reduce_sum, tshi_reduce_params);

/* The strides that broadcast out to x's shape: 0 along what was reduced. */
static void tshi_reduce_spread(const tsh_tensor *x, const tsh_tensor *out, int axis,
                               int64_t *stride) {
    int d, o = 0;
    for (d = 0; d < x->ndim; d++) {
        int reduced = axis < 0 || d == axis;
        stride[d] = reduced ? 0 : out->stride[o];
        if (!reduced || out->ndim == x->ndim) o++;
    }
}

/* sums = c sum x. Where the reduced values are adjacent, rows are summed; else rows are added in
 * order. */
static void tshi_reduce_sums(tsh_tensor *x, const tsh_tensor *out, const tshi_reduction *r,
                             tsh_real *sums) {
    const int64_t n = r->params.n, count = tsh_local_numel(out);
    int64_t stride[TSH_MAX_DIMS], i;
    tshi_loop loop;
    if (r->inner == 1) {
        tshi_rows rows = tshi_kernel_rows_job(tshi_reduce_sum[x->ctx->isa], r->outer, &r->params);
        tshi_block *scratch;
        rows.x[0] = tshi_kernel_reals(sums, 1);
        rows.x[1] = tshi_kernel_reals(tshi_kernel_packed_reals(x, &scratch), n);
        if (rows.x[1].data) tshi_kernel_run_rows(x->ctx, &rows, n);
        tshi_mem_release(x->ctx, scratch);
        return;
    }
    memset(sums, 0, tshi_dtype_reals(count));
    tshi_reduce_spread(x, out, r->params.axis, stride);
    tshi_kernel_space(&loop, x);
    tshi_kernel_add_operand(&loop, x, sums, stride, TSH_REAL);
    tshi_kernel_tensor(&loop, x);
    tshi_kernel_run(&loop, tshi_kernel_add[x->ctx->isa], NULL);
    for (i = 0; i < count; i++) sums[i] *= TSHI_R(r->params.c);
}

static void tshi_reduce_sum_backward(tshi_node *node) {
    const tshi_reduce_params *params = (const tshi_reduce_params *)node->params;
    tsh_tensor *x = node->in[0];
    int64_t stride[TSH_MAX_DIMS];
    tshi_loop loop;
    tshi_dest dest;
    tsh_real *g = tshi_tape_grad(node);
    tshi_backward_params back;
    if (!tshi_tape_dest(node, 0, &dest)) return;
    tshi_reduce_spread(x, node->out, params->axis, stride);
    tshi_kernel_space(&loop, x);
    tshi_kernel_add_operand(&loop, x, dest.data, dest.stride, TSH_REAL);
    tshi_kernel_add_operand(&loop, x, g, stride, TSH_REAL);
    tshi_kernel_add_operand(&loop, x, g, stride, TSH_REAL); /* in place of v: scale reads none */
    back.c = params->c;
    back.add = dest.add;
    tshi_kernel_run(&loop, tshi_map_scale_backward[x->ctx->isa], &back);
}

static const tshi_op tshi_reduce_sum_op = {
    "tsh_sum", "x", tshi_rule_sum, tshi_reduce_sum_backward, TSHI_NONE, 0};
static const tshi_op tshi_reduce_mean_op = {
    "tsh_mean", "x", tshi_rule_sum, tshi_reduce_sum_backward, TSHI_NONE, 0};

/* tsh_sum and tsh_mean. */
static tsh_tensor *tshi_reduce_scaled(const tshi_op *op, tsh_tensor *x, int dim, int keepdim,
                                      int mean) {
    tsh_ctx *ctx = tshi_tensor_check_floating(op->name, &x, 1);
    tshi_reduction r;
    tshi_block *unrounded;
    tsh_tensor *out;
    tsh_real *sums;
    if (!ctx || !tshi_reduce_plan(op, x, dim, keepdim, &r)) return NULL;
    if (mean) r.params.c = 1.0 / (double)r.length;
    out = tshi_tensor_out(ctx, op->name, x->dtype, &r.shape, &r.layout);
    sums = out ? tshi_kernel_output(out, &unrounded) : NULL;
    if (!sums) return NULL;
    tshi_reduce_sums(x, out, &r, sums);
    tshi_kernel_output_done(out, unrounded);
    tshi_map_record(op, out, &x, 1, TSHI_NONE, &r.params, sizeof r.params, NULL);
    return ctx->error.code == TSH_OK ? out : NULL;
}

TSH_API tsh_tensor *tsh_sum(tsh_tensor *x, int dim, int keepdim) {
    return tshi_reduce_scaled(&tshi_reduce_sum_op, x, dim, keepdim, 0);
}

TSH_API tsh_tensor *tsh_mean(tsh_tensor *x, int dim, int keepdim) {
    return tshi_reduce_scaled(&tshi_reduce_mean_op, x, dim, keepdim, 1);
}

/* -- rows -------------------------------------------------------------------
 * max and softmax work on rows: dense values along the axis. Where that is not the last dimension,
 * values are copied to such an order, and back. */

/* Returns a handle of t's values in which the axis (-1: none) is the last dimension. */
static tsh_tensor tshi_reduce_rows(const tsh_tensor *t, int axis) {
    tsh_tensor rows = *t;
    int d;
    for (d = axis; d >= 0 && d < t->ndim - 1; d++) {
        rows.dim[d] = t->dim[d + 1];
        rows.dim[d + 1] = t->dim[axis];
        rows.local[d] = t->local[d + 1];
        rows.local[d + 1] = t->local[axis];
        rows.stride[d] = t->stride[d + 1];
        rows.stride[d + 1] = t->stride[axis];
    }
    return rows;
}

/* As tshi_kernel_output, row-major in whatever order out is. */
static tsh_real *tshi_reduce_output(tsh_tensor *out, tshi_block **scratch) {
    if (tshi_tensor_is_dense(out)) return tshi_kernel_output(out, scratch);
    *scratch = tshi_mem_alloc(out->ctx, TSH_MEM_STEP, tshi_dtype_reals(tsh_local_numel(out)));
    return *scratch ? (tsh_real *)tshi_mem_data(*scratch) : NULL;
}

/* Returns a job of all rows of t; 0 rows if they are empty. */
static tshi_rows tshi_reduce_job(const tshi_kernel_fn *kernel, const tsh_tensor *t,
                                 const tshi_reduce_params *params) {
    const int64_t count = params->n ? tsh_local_numel(t) / params->n : 0;
    return tshi_kernel_rows_job(kernel[t->ctx->isa], count, params);
}

/* -- max, argmax: the first index of the largest value, or of the first NaN ---- */

/* Operands of rows: index of the maximum, x, the maximum or NULL. Only the first part of the row
 * that has the maximum is searched for its index. */
TSHI_INLINE void tshi_reduce_place_body(int64_t rows, const tshi_operand *operand,
                                        const tshi_reduce_params *p) {
    int64_t *place = (int64_t *)operand[0].data, i, at;
    const tsh_real *x = (const tsh_real *)operand[1].data;
    tsh_real *max = (tsh_real *)operand[2].data, best, here;
    const int64_t part = 256, n = p->n;
    for (; rows > 0; rows--, x += n) {
        best = x[at = 0];
        for (i = 0; i < n && best == best; i += part) {
            here = tshi_kernel_max(x + i, tshi_base_min(part, n - i));
            if (here <= best) continue;
            best = here;
            at = i;
        }
        while (x[at] == x[at] && x[at] != best) at++;
        *place++ = at;
        if (max) *max++ = x[at];
    }
}
TSHI_KERNEL(tshi_reduce_place, tshi_reduce_params);

/* Adds dy to dx at the index of each maximum, which forward kept in aux. */
static void tshi_reduce_max_backward(tshi_node *node) {
    const tshi_reduce_params *params = (const tshi_reduce_params *)node->params;
    const tsh_tensor x = tshi_reduce_rows(node->in[0], params->axis);
    const int64_t *place = (const int64_t *)tshi_mem_data(node->aux);
    const tsh_real *g = tshi_tape_grad(node);
    int64_t e, count = tsh_local_numel(node->out);
    tshi_dest dest;
    int d;
    if (!tshi_tape_dest_zeroed(node, 0, &dest)) return;
    for (e = 0; e < count; e++) {
        tsh_real *at = dest.data;
        int64_t rest = e * params->n + place[e];
        for (d = x.ndim - 1; d >= 0; d--) {
            at += rest % x.local[d] * x.stride[d];
            rest /= x.local[d];
        }
        *at += g[e];
    }
}

static const tshi_op tshi_reduce_max_op = {
    "tsh_max", "x", tshi_rule_whole, tshi_reduce_max_backward, TSHI_NONE, 0};
static const tshi_op tshi_reduce_argmax_op = {"tsh_argmax", "x", tshi_rule_whole, NULL, 0, 0};

/* tsh_max and tsh_argmax. */
static tsh_tensor *tshi_reduce_max(const tshi_op *op, tsh_tensor *x, int dim, int keepdim,
                                   int argmax) {
    tsh_ctx *ctx = tshi_tensor_check_floating(op->name, &x, 1);
    tshi_reduction r;
    tshi_block *scratch, *unrounded = NULL, *aux = NULL;
    tshi_rows rows;
    tsh_tensor *out, xs;
    tsh_real *max = NULL;
    void *place;
    if (!ctx || !tshi_reduce_plan(op, x, dim, keepdim, &r)) return NULL;
    if (!r.length)
        return tshi_error_null(ctx, TSH_ERR_SHAPE,
                               "%s: nothing to choose from: the dimension is empty", op->name);
    xs = tshi_reduce_rows(x, r.params.axis);
    rows = tshi_reduce_job(tshi_reduce_place, x, &r.params);
    out = tshi_tensor_out(ctx, op->name, argmax ? TSH_I64 : x->dtype, &r.shape, &r.layout);
    if (!out) return NULL;
    place = tshi_tensor_at(out);
    if (!argmax) {
        aux = tshi_mem_alloc(ctx, TSH_MEM_STEP, (size_t)rows.count * sizeof(int64_t));
        place = aux ? tshi_mem_data(aux) : NULL;
        max = tshi_kernel_output(out, &unrounded);
    }
    rows.x[0] = tshi_kernel_operand(place, 1, TSH_I64);
    rows.x[1] = tshi_kernel_reals(tshi_kernel_packed_reals(&xs, &scratch), r.params.n);
    rows.x[2] = tshi_kernel_reals(max, 1);
    if (ctx->error.code == TSH_OK) tshi_kernel_run_rows(ctx, &rows, r.params.n);
    tshi_mem_release(ctx, scratch);
    tshi_kernel_output_done(out, unrounded);
    tshi_map_record(op, out, &x, 1, TSHI_NONE, &r.params, sizeof r.params, aux);
    return ctx->error.code == TSH_OK ? out : NULL;
}

TSH_API tsh_tensor *tsh_max(tsh_tensor *x, int dim, int keepdim) {
    return tshi_reduce_max(&tshi_reduce_max_op, x, dim, keepdim, 0);
}

TSH_API tsh_tensor *tsh_argmax(tsh_tensor *x, int dim, int keepdim) {
    return tshi_reduce_max(&tshi_reduce_argmax_op, x, dim, keepdim, 1);
}

/* -- softmax, log_softmax ---------------------------------------------------
 * m = max x, y = e^(x-m) / sum e^(x-m);   dx = y (dy - sum dy y)
 * log: y = x - m - log sum e^(x-m);       dx = dy - e^y sum dy                */

/* Operands of rows: y, x. */
TSHI_INLINE void tshi_reduce_softmax_body(int64_t rows, const tshi_operand *operand,
                                          const tshi_reduce_params *p, int fused) {
    tsh_real *y = (tsh_real *)operand[0].data, pad[TSHI_BLOCK], out[TSHI_BLOCK];
    const tsh_real *x = (const tsh_real *)operand[1].data, *in;
    const int64_t n = p->n;
    const int log = p->is_log;
    int64_t e;
    int i;
    for (; rows > 0; rows--, x += n, y += n) {
        const tsh_real max = tshi_kernel_max(x, n);
        const tsh_real sum = tshi_kernel_sum_exps(x, n, max, log ? NULL : y,
                                                  fused); /* y = e^(x-m) */
        const tsh_real c = log ? tshi_math_log(sum, fused) : TSHI_R(TSHI_R(1) / sum);
        for (e = 0; e < n; e += TSHI_BLOCK) {
            in = tshi_kernel_load_block(log ? x : y, 1, e, n, pad);
            if (log) /* x - (max + c) would lose digits of c if max is large */
                TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) out[i] = in[i] - max - c;
            else
                TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) out[i] = in[i] * c;
            tshi_kernel_store_block(y, 1, e, n, out, 0);
        }
    }
}
TSHI_KERNEL_FUSED(tshi_reduce_softmax, tshi_reduce_params);

/* Operands of rows: dx, y, dy. */
TSHI_INLINE void tshi_reduce_softmax_grad_body(int64_t rows, const tshi_operand *operand,
                                               const tshi_reduce_params *p, int fused) {
    tsh_real *dx = (tsh_real *)operand[0].data, pad[2][TSHI_BLOCK], out[TSHI_BLOCK];
    const tsh_real *y = (const tsh_real *)operand[1].data, *ys;
    const tsh_real *dy = (const tsh_real *)operand[2].data, *gs;
    const int64_t n = p->n;
    int64_t e;
    int i;
    for (; rows > 0; rows--, dx += n, y += n, dy += n) {
        const tsh_real sum = p->is_log ? tshi_kernel_sum(dy, n) : tshi_kernel_dot(dy, y, n);
        for (e = 0; e < n; e += TSHI_BLOCK) {
            ys = tshi_kernel_load_block(y, 1, e, n, pad[0]);
            gs = tshi_kernel_load_block(dy, 1, e, n, pad[1]);
            if (p->is_log)
                TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++)
                    out[i] = gs[i] - tshi_math_exp(ys[i], fused) * sum;
            else
                TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) out[i] = ys[i] * (gs[i] - sum);
            tshi_kernel_store_block(dx, 1, e, n, out, 0);
        }
    }
}
TSHI_KERNEL_FUSED(tshi_reduce_softmax_grad, tshi_reduce_params);

static void tshi_reduce_softmax_backward(tshi_node *node) {
    const tshi_reduce_params *params = (const tshi_reduce_params *)node->params;
    tsh_ctx *ctx = node->out->ctx;
    tsh_tensor dx = tshi_reduce_rows(node->in[0], params->axis);
    tsh_tensor y = tshi_reduce_rows(node->out, params->axis), dy = y;
    tshi_rows rows = tshi_reduce_job(tshi_reduce_softmax_grad, node->out, params);
    tshi_block *scratch[3];
    tshi_dest dest;
    if (!tshi_tape_dest(node, 0, &dest)) return;
    dest.stride = dx.stride;
    y.block = node->saved[1];
    dy.block = node->out->gr.block;
    dy.dtype = TSH_REAL;
    rows.x[0] = tshi_kernel_reals(tshi_map_dense_dest(&dx, &dest, &scratch[0]), params->n);
    rows.x[1] = tshi_kernel_reals(tshi_kernel_packed_reals(&y, &scratch[1]), params->n);
    rows.x[2] = tshi_kernel_reals(tshi_kernel_packed_reals(&dy, &scratch[2]), params->n);
    if (ctx->error.code == TSH_OK) tshi_kernel_run_rows(ctx, &rows, params->n);
    tshi_map_accumulate(&dx, &dest, scratch[0]);
    tshi_mem_release(ctx, scratch[1]);
    tshi_mem_release(ctx, scratch[2]);
}

static const tshi_op tshi_reduce_softmax_op = {
    "tsh_softmax", "x", tshi_rule_whole, tshi_reduce_softmax_backward, TSHI_OUT, 0};
static const tshi_op tshi_reduce_log_softmax_op = {
    "tsh_log_softmax", "x", tshi_rule_whole, tshi_reduce_softmax_backward, TSHI_OUT, 0};

/* tsh_softmax and tsh_log_softmax. */
static tsh_tensor *tshi_reduce_softmaxes(const tshi_op *op, tsh_tensor *x, int dim, int is_log) {
    tsh_ctx *ctx = tshi_tensor_check_floating(op->name, &x, 1);
    tsh_shape shape = tsh_shape_of(x);
    tshi_reduction r;
    tshi_block *scratch, *unrounded;
    tsh_tensor *out, xs, ys;
    tshi_rows rows;
    if (!ctx || !tshi_reduce_plan(op, x, dim == TSH_ALL ? x->ndim : dim, 1, &r)) return NULL;
    r.params.is_log = is_log;
    out = tshi_tensor_out(ctx, op->name, x->dtype, &shape, &x->layout);
    if (!out) return NULL;
    xs = tshi_reduce_rows(x, r.params.axis);
    ys = tshi_reduce_rows(out, r.params.axis);
    rows = tshi_reduce_job(tshi_reduce_softmax, x, &r.params);
    rows.x[0] = tshi_kernel_reals(tshi_reduce_output(&ys, &unrounded), r.params.n);
    rows.x[1] = tshi_kernel_reals(tshi_kernel_packed_reals(&xs, &scratch), r.params.n);
    if (ctx->error.code == TSH_OK) tshi_kernel_run_rows(ctx, &rows, r.params.n);
    tshi_mem_release(ctx, scratch);
    tshi_kernel_output_done(&ys, unrounded);
    tshi_map_record(op, out, &x, 1, TSHI_NONE, &r.params, sizeof r.params, NULL);
    return ctx->error.code == TSH_OK ? out : NULL;
}

TSH_API tsh_tensor *tsh_softmax(tsh_tensor *x, int dim) {
    return tshi_reduce_softmaxes(&tshi_reduce_softmax_op, x, dim, 0);
}

TSH_API tsh_tensor *tsh_log_softmax(tsh_tensor *x, int dim) {
    return tshi_reduce_softmaxes(&tshi_reduce_log_softmax_op, x, dim, 1);
}

/* ========================================================================== */
/* >>op-view                                          MARK: - op-view (private) */
/* Other shapes for the same values: permute, slice, concat, reshape.          */
/* Needs: >>op-map.                                                             */
/* ========================================================================== */

/* A view shares the block of its base and has sizes, strides, an offset and a layout of its own. It
 * is not recorded: its gradient is a strided window on its base's accumulators, so that what is
 * added to it is added to the base's gradient. Only concat copies, and reshape if it must. */

TSH_API tsh_tensor *tsh_permute(tsh_tensor *x, const int *dims) {
    tsh_ctx *ctx = tshi_tensor_check("tsh_permute", &x, 1);
    tsh_tensor *out;
    unsigned seen = 0;
    int d;
    if (!ctx) return NULL;
    out = tshi_tensor_view(x);
    for (d = 0; out && d < x->ndim; d++) {
        int from = dims ? tshi_tensor_axis(x, dims[d]) : -1;
        if (from < 0 || (seen >> from & 1u))
            return tshi_error_null(ctx, TSH_ERR_SHAPE,
                                   "tsh_permute: entry %d does not name a new dimension of %d", d,
                                   x->ndim);
        seen |= 1u << from;
        out->dim[d] = x->dim[from];
        out->local[d] = x->local[from];
        out->stride[d] = x->stride[from];
        if (x->layout.kind == TSH_SHARDED && x->layout.dim == from) out->layout.dim = d;
    }
    return out;
}

TSH_API tsh_tensor *tsh_transpose(tsh_tensor *x, int dim0, int dim1) {
    int order[TSH_MAX_DIMS], d, a, b;
    if (!tshi_tensor_check("tsh_transpose", &x, 1)) return NULL;
    a = tshi_tensor_axis(x, dim0);
    b = tshi_tensor_axis(x, dim1);
    if (a < 0 || b < 0)
        return tshi_error_null(x->ctx, TSH_ERR_SHAPE,
                               "tsh_transpose: no dimensions %d and %d among %d", dim0, dim1,
                               x->ndim);
    for (d = 0; d < x->ndim; d++) order[d] = d == a ? b : d == b ? a : d;
    return tsh_permute(x, order);
}

/* -- slices ----------------------------------------------------------------- */

/* Makes out, a view, the part [start, start + length) of its sharded dimension d. That must be
 * whole segments: no layout describes the ranks' shards of other parts. 0 if it is not. */
static int tshi_view_segments(tsh_tensor *out, int d, int64_t start, int64_t length) {
    tsh_layout *layout = &out->layout;
    const tsh_segment *segment = layout->segment;
    const int64_t end = start + length;
    tsh_range range[TSH_MAX_SEGMENTS];
    int64_t at = 0, local = 0;
    int s, kept = 0;
    (void)tsh_chunk(layout, out->dim[d], out->ctx->tp.size, out->ctx->tp.rank, range);
    for (s = 0; s < layout->segments && at < start; at += segment[s++].length)
        out->offset += range[s].length * out->stride[d];
    if (at != start) return 0;
    for (; s < layout->segments && at + segment[s].length <= end; at += segment[s++].length) {
        layout->segment[kept++] = segment[s];
        local += range[s].length;
    }
    layout->segments = kept;
    out->local[d] = local;
    return kept && at == end;
}

TSH_API tsh_tensor *tsh_slice(tsh_tensor *x, int dim, int64_t start, int64_t length) {
    tsh_ctx *ctx = tshi_tensor_check("tsh_slice", &x, 1);
    char text[TSHI_TEXT_SIZE];
    tsh_tensor *out;
    int d;
    if (!ctx) return NULL;
    d = tshi_tensor_axis(x, dim);
    if (d < 0 || start < 0 || length < 0 || start > x->dim[d] - length)
        return tshi_error_null(ctx, TSH_ERR_SHAPE,
                               "tsh_slice: %lld elements from %lld of dimension %d are outside %s",
                               (long long)length, (long long)start, dim, tshi_tensor_text(x, text));
    out = tshi_tensor_view(x);
    if (!out) return NULL;
    if (x->layout.kind == TSH_SHARDED && x->layout.dim == d && (start || length != x->dim[d])) {
        if (!tshi_view_segments(out, d, start, length))
            return tshi_error_null(
                ctx, TSH_ERR_LAYOUT,
                "tsh_slice: [%lld, %lld) does not begin and end at segment boundaries of the "
                "sharded dimension of %s; gather it first: tsh_redistribute(x, tsh_replicated())",
                (long long)start, (long long)(start + length), tshi_tensor_text(x, text));
    } else if (length != x->dim[d]) {
        out->offset += start * x->stride[d];
        out->local[d] = length;
    }
    out->dim[d] = length;
    return out;
}

TSH_API tsh_result tsh_split_dim(tsh_tensor *x, int dim, int n, tsh_tensor **parts) {
    int64_t length = tsh_dim(x, dim);
    int i;
    for (i = 0; i < n && parts; i++) parts[i] = NULL;
    if (!tshi_tensor_check("tsh_split_dim", &x, 1))
        return x ? x->ctx->error.code : TSH_ERR_ARGUMENT;
    if (tshi_tensor_axis(x, dim) < 0)
        return tsh_fail(x->ctx, TSH_ERR_SHAPE, "tsh_split_dim: there is no dimension %d of %d", dim,
                        x->ndim);
    if (n < 1 || !parts || length % n)
        return tsh_fail(x->ctx, TSH_ERR_SHAPE,
                        "tsh_split_dim: a dimension of %lld has no %d equal parts",
                        (long long)length, n);
    for (i = 0; i < n; i++) parts[i] = tsh_slice(x, dim, i * (length / n), length / n);
    return x->ctx->error.code;
}

/* -- concat ----------------------------------------------------------------- */

static void tshi_view_concat_backward(tshi_node *node) {
    int dim = *(const int *)node->params, i;
    tsh_real *g = tshi_tape_grad(node);
    int64_t at = 0;
    for (i = 0; i < node->n; i++) {
        const tsh_tensor *part = node->in[i];
        tshi_dest dest;
        if (tshi_tape_dest(node, i, &dest))
            tshi_tape_accumulate(node->in[i], &dest, g + at * node->out->stride[dim],
                                 node->out->stride);
        at += part->local[dim];
    }
}

/* Checks that part i agrees with the first in dtype, and in all dimensions but d. 0 and an error if
 * not. */
static int tshi_view_concat_fits(tsh_tensor *const *parts, int i, int d) {
    const tsh_tensor *p = parts[i], *first = parts[0];
    char a[TSHI_TEXT_SIZE], b[TSHI_TEXT_SIZE];
    int e, fits = p->ndim == first->ndim;
    for (e = 0; e < first->ndim && fits; e++) fits = e == d || p->dim[e] == first->dim[e];
    if (fits && p->dtype == first->dtype) return 1;
    (void)tsh_fail(p->ctx, fits ? TSH_ERR_DTYPE : TSH_ERR_SHAPE,
                   "tsh_concat: part %d, %s %s, does not go with %s %s along dimension %d", i,
                   tshi_dtype_name(p->dtype), tshi_tensor_text(p, a),
                   tshi_dtype_name(first->dtype), tshi_tensor_text(first, b), d);
    return 0;
}

static const tshi_op tshi_view_concat_op = {
    "tsh_concat", NULL, tshi_rule_concat, tshi_view_concat_backward, TSHI_NONE, 0};

TSH_API tsh_tensor *tsh_concat(tsh_tensor *const *parts, int n, int dim) {
    tsh_ctx *ctx = n > 0 && parts ? tshi_tensor_check("tsh_concat", parts, n) : NULL;
    const tshi_op *op = &tshi_view_concat_op;
    tshi_output output;
    tsh_tensor *out;
    int i, d;
    char *at;
    if (!ctx) return NULL;
    if (n > 30)
        return tshi_error_null(ctx, TSH_ERR_ARGUMENT, "tsh_concat: %d parts; at most 30", n);
    d = tshi_tensor_axis(parts[0], dim);
    if (d < 0)
        return tshi_error_null(ctx, TSH_ERR_SHAPE, "tsh_concat: no dimension %d among %d", dim,
                               parts[0]->ndim);
    output.shape = tsh_shape_of(parts[0]);
    for (i = 1; i < n; i++) {
        if (!tshi_view_concat_fits(parts, i, d)) return NULL;
        output.shape.dim[d] += parts[i]->dim[d];
    }
    if (!tshi_rule_run(op, parts, n, &d, &output)) return NULL;
    out = tshi_tensor_out(ctx, "tsh_concat", parts[0]->dtype, &output.shape, &output.layout);
    if (!out) return NULL;
    at = (char *)tshi_tensor_at(out);
    for (i = 0; i < n; i++) {
        tshi_loop loop;
        tshi_kernel_space(&loop, parts[i]);
        tshi_kernel_add_operand(&loop, parts[i], at, out->stride, out->dtype);
        tshi_kernel_tensor(&loop, parts[i]);
        tshi_kernel_run(&loop, tshi_kernel_copy, NULL);
        at += parts[i]->local[d] * out->stride[d] * tshi_dtypes[out->dtype].size;
    }
    tshi_map_record(op, out, parts, n, TSHI_NONE, &d, sizeof d, NULL);
    return out;
}

/* -- reshape ---------------------------------------------------------------- */

/* Replaces the one size of shape that may be -1. 0 if x does not have as many elements. */
static int tshi_view_sizes(const tsh_tensor *x, tsh_shape *shape) {
    int64_t total = tsh_numel(x), known = 1;
    int d, open = -1;
    if (shape->ndim < 0 || shape->ndim > TSH_MAX_DIMS) return 0;
    for (d = 0; d < shape->ndim; d++) {
        if (shape->dim[d] < -1 || (shape->dim[d] < 0 && open >= 0)) return 0;
        if (shape->dim[d] > 0 && known > INT64_MAX / shape->dim[d]) return 0;
        if (shape->dim[d] < 0)
            open = d;
        else
            known *= shape->dim[d];
    }
    if (open >= 0 && known) shape->dim[open] = total / known;
    if (open >= 0) known *= shape->dim[open];
    return known == total;
}

/* Finds which dimensions become which: the smallest groups [a0, a1) of x's, with d, and [b0, b1) of
 * shape's dimensions that have the same product. (2, 3, 4) to (6, 2, 2): {0, 1} becomes {0}, {2}
 * becomes {1, 2}. */
static void tshi_view_group(const tsh_tensor *x, const tsh_shape *shape, int d, int *a0, int *a1,
                            int *b0, int *b1) {
    int i = 0, j = 0;
    while (i < x->ndim) {
        int64_t p = x->dim[i], q = j < shape->ndim ? shape->dim[j] : 1;
        *a0 = i++;
        *b0 = j;
        if (j < shape->ndim) j++;
        while (p != q) {
            if (p < q && i < x->ndim)
                p *= x->dim[i++];
            else if (j < shape->ndim)
                q *= shape->dim[j++];
            else
                break;
        }
        *a1 = i;
        *b1 = j;
        if (d < i) return;
    }
}

/* The layout of x after a reshape. 0 if it cannot be sharded: its sharded dimension is not the
 * outermost of those that are merged, or a unit would be cut. */
static int tshi_view_layout(const tsh_tensor *x, const tsh_shape *shape, tsh_layout *layout) {
    int a0 = 0, a1 = 0, b0 = 0, b1 = 0, d = x->layout.dim, e, s, same;
    int64_t inner, divisor;
    *layout = x->layout;
    if (layout->kind != TSH_SHARDED) return 1;
    if (!tsh_numel(x)) return 0;
    tshi_view_group(x, shape, d, &a0, &a1, &b0, &b1);
    for (e = a0; e < d; e++)
        if (x->dim[e] != 1) return 0; /* d is not the outermost of the merged dimensions */
    inner = tshi_tensor_product(x->dim + d + 1, a1 - d - 1);
    while (b0 < b1 - 1 && shape->dim[b0] == 1 && /* a size of 1 can hold no more than one unit */
           layout->segment[0].unit * inner % tshi_tensor_product(shape->dim + b0 + 1, b1 - b0 - 1))
        b0++;
    if (b0 >= b1) return 0;
    /* (3 D) to (3, D), as with fused q, k, v: three equal segments of one dimension become one */
    same = layout->segments > 1 && shape->dim[b0] == layout->segments && b0 + 1 < b1;
    for (s = 1; s < layout->segments && same; s++)
        same = layout->segment[s].length == layout->segment[0].length &&
               layout->segment[s].unit == layout->segment[0].unit;
    if (same) {
        layout->segments = 1;
        b0++;
    }
    layout->dim = b0; /* whose sizes are those of d times inner / divisor */
    divisor = tshi_tensor_product(shape->dim + b0 + 1, b1 - b0 - 1);
    for (s = 0; s < layout->segments; s++) {
        tsh_segment *segment = &layout->segment[s];
        if (segment->length * inner % divisor || segment->unit * inner % divisor) return 0;
        segment->length = segment->length * inner / divisor;
        segment->unit = segment->unit * inner / divisor;
    }
    return 1;
}

/* Fills in the strides that give x's local values the local sizes `to`. 0 if none do: x must be
 * copied. */
static int tshi_view_strides(const tsh_tensor *x, int ndim, const int64_t *to, int64_t *stride) {
    int64_t run = 1, step = 1;
    int i = x->ndim - 1, j = ndim - 1;
    tshi_tensor_strides(to, ndim, stride);
    if (!tsh_local_numel(x)) return 1;
    while (i >= 0) {
        while (i >= 0 && x->local[i] == 1) i--;
        if (i < 0) break;
        step = x->stride[i];
        run = x->local[i];
        while (i > 0 && (x->local[i - 1] == 1 || x->stride[i - 1] == step * run))
            run *= x->local[--i];
        i--;
        for (; j >= 0 && (run > 1 || to[j] == 1); j--) {
            if (run % to[j]) return 0;
            stride[j] = step;
            step *= to[j];
            run /= to[j];
        }
        if (run != 1) return 0;
    }
    return 1;
}

TSH_API tsh_tensor *tsh_reshape(tsh_tensor *x, tsh_shape shape) {
    tsh_ctx *ctx = tshi_tensor_check("tsh_reshape", &x, 1);
    char from[TSHI_TEXT_SIZE], to[TSHI_TEXT_SIZE];
    int64_t stride[TSH_MAX_DIMS];
    tsh_tensor *out, form;
    tsh_layout layout;
    if (!ctx) return NULL;
    memset(&form, 0, sizeof form);
    form.ctx = ctx;
    if (!tshi_view_sizes(x, &shape))
        return tshi_error_null(ctx, TSH_ERR_SHAPE,
                               "tsh_reshape: %s has %lld elements, which the new shape of %d "
                               "dimensions does not",
                               tshi_tensor_text(x, from), (long long)tsh_numel(x), shape.ndim);
    if (!tshi_view_layout(x, &shape, &layout))
        return tshi_error_null(ctx, TSH_ERR_LAYOUT,
                               "tsh_reshape: from %s to %s would cut across the sharded dimension "
                               "or its units of %lld; "
                               "gather it first: tsh_redistribute(x, tsh_replicated())",
                               tshi_tensor_text(x, from),
                               tshi_tensor_sizes(shape.dim, shape.ndim, to),
                               (long long)x->layout.segment[0].unit);
    if (tshi_tensor_set_shape(&form, "tsh_reshape", &shape, &layout) != TSH_OK) return NULL;
    if (!tshi_view_strides(x, form.ndim, form.local, stride)) {
        x = tshi_map_copy("tsh_reshape", x);
        if (!x || !tshi_view_strides(x, form.ndim, form.local, stride)) return NULL;
    }
    out = tshi_tensor_view(x);
    if (!out) return NULL;
    out->ndim = form.ndim;
    out->layout = form.layout;
    memcpy(out->dim, form.dim, sizeof form.dim);
    memcpy(out->local, form.local, sizeof form.local);
    memcpy(out->stride, stride, sizeof stride);
    return out;
}

/* ========================================================================== */
/* >>redistribute                                MARK: - redistribute (private) */
/* The same values in another layout; tsh_read and tsh_write.                  */
/* Needs: >>op-map.                                                             */
/* ========================================================================== */

/* tshi_redistribute_move does all changes of layout, in forward and backward:
 *
 *     S(d) to R     all-gather             P to R       all-reduce
 *     P to S(d)     reduce-scatter         S(i) to S(j) all-to-all
 *     R to S(d)     each rank its slice    R to P       zero on all ranks but rank 0
 *
 * Values in and out are dense. Collectives need the shards in rank order; with fused segments (q,
 * k, v in one weight) they are not in that order in memory and are reordered. */

/* An array, seen as (outer, length, inner) around the dimension that a layout cuts. */
typedef struct tshi_cut {
    int64_t outer, length, inner;
    const tsh_layout *layout;
    int size;     /* ranks */
    size_t width; /* bytes of an element */
} tshi_cut;

/* form gives the global shape. The array is whole, or this rank's shard by another layout. */
static tshi_cut tshi_redistribute_cut(const tsh_tensor *form, const tsh_layout *layout,
                                      const tsh_layout *other, tsh_dtype dtype) {
    const tsh_comm *tp = &form->ctx->tp;
    const int dim = layout->dim;
    int64_t sizes[TSH_MAX_DIMS];
    tshi_cut cut;
    memcpy(sizes, form->dim, sizeof sizes);
    if (other) sizes[other->dim] = tsh_chunk(other, sizes[other->dim], tp->size, tp->rank, NULL);
    cut.outer = tshi_tensor_product(sizes, dim);
    cut.length = sizes[dim];
    cut.inner = tshi_tensor_product(sizes + dim + 1, form->ndim - dim - 1);
    cut.layout = layout;
    cut.size = tp->size;
    cut.width = tsh_dtype_size(dtype);
    return cut;
}

/* The elements of a rank's shard in one outer row. */
static int64_t tshi_redistribute_held(const tshi_cut *cut, int rank) {
    return tsh_chunk(cut->layout, cut->length, cut->size, rank, NULL) * cut->inner;
}

/* Copies rank's shard of the whole array to `shard`, whose outer rows begin `pitch` elements apart;
 * from shard to the whole if to_shard is 0. */
static void tshi_redistribute_shard(const tshi_cut *cut, int rank, void *whole, char *shard,
                                    int64_t pitch, int to_shard) {
    tsh_range range[TSH_MAX_SEGMENTS];
    int64_t o;
    int s;
    (void)tsh_chunk(cut->layout, cut->length, cut->size, rank, range);
    for (o = 0; o < cut->outer; o++) {
        char *at = shard + (size_t)(o * pitch) * cut->width;
        for (s = 0; s < cut->layout->segments; s++) {
            const int64_t first = (o * cut->length + range[s].start) * cut->inner;
            const size_t bytes = (size_t)(range[s].length * cut->inner) * cut->width;
            char *from = (char *)whole + (size_t)first * cut->width;
            if (to_shard)
                memcpy(at, from, bytes);
            else
                memcpy(from, at, bytes);
            at += bytes;
        }
    }
}

/* Copies between a whole array and `shards`, which has those of all ranks in rank order: in each
 * outer row (by_row 1), or one whole shard after the other. */
static void tshi_redistribute_order(const tshi_cut *cut, void *whole, char *shards, int by_row,
                                    int to_shards) {
    int r;
    for (r = 0; r < cut->size; r++) {
        const int64_t row = tshi_redistribute_held(cut, r);
        const int64_t pitch = by_row ? cut->length * cut->inner : row;
        tshi_redistribute_shard(cut, r, whole, shards, pitch, to_shards);
        shards += (size_t)(by_row ? row : row * cut->outer) * cut->width;
    }
}

/* S to R by all-gather (gather 1), or P to S by reduce-scatter. form gives the global shape, layout
 * is the sharded one. */
static tsh_result tshi_redistribute_rows(tsh_ctx *ctx, const tsh_tensor *form,
                                         const tsh_layout *layout, int gather, tsh_dtype dtype,
                                         const void *in, void *out) {
    const tshi_cut cut = tshi_redistribute_cut(form, layout, NULL, dtype);
    const size_t counted = (size_t)cut.size * sizeof(int64_t);
    const size_t bytes = layout->segments > 1 ? (size_t)tsh_numel(form) * cut.width : 0;
    tshi_block *scratch = tshi_mem_alloc(ctx, TSH_MEM_STEP, counted + bytes);
    int64_t *counts;
    void *ordered = gather ? out : tshi_kernel_unconst(in);
    int r;
    if (!scratch) return TSH_ERR_MEMORY;
    counts = (int64_t *)tshi_mem_data(scratch);
    for (r = 0; r < cut.size; r++) counts[r] = tshi_redistribute_held(&cut, r);
    if (bytes) ordered = counts + cut.size;
    if (bytes && !gather)
        tshi_redistribute_order(&cut, tshi_kernel_unconst(in), (char *)ordered, 1, 1);
    if (gather)
        (void)tshi_error_comm(ctx, tsh_allgather(&ctx->tp, in, ordered, counts, cut.outer, dtype),
                              "tsh_redistribute: all-gather");
    else
        (void)tshi_error_comm(
            ctx, tsh_reduce_scatter(&ctx->tp, ordered, out, counts, cut.outer, dtype, TSH_SUM),
            "tsh_redistribute: reduce-scatter");
    if (bytes && gather) tshi_redistribute_order(&cut, out, (char *)ordered, 1, 0);
    tshi_mem_release(ctx, scratch);
    return ctx->error.code;
}

/* S(i) to S(j) by all-to-all: every rank cuts its shard along j, a part for each rank, and joins
 * the parts that it receives along i. */
static tsh_result tshi_redistribute_swap(tsh_ctx *ctx, const tsh_tensor *form,
                                         const tsh_layout *from, const tsh_layout *to,
                                         tsh_dtype dtype, const void *in, void *out) {
    const tshi_cut cut = tshi_redistribute_cut(form, to, from, dtype);
    const tshi_cut join = tshi_redistribute_cut(form, from, to, dtype);
    const size_t counted = (size_t)cut.size * sizeof(int64_t);
    const size_t bytes = (size_t)tsh_numel(form) * cut.width; /* as many as there can be */
    tshi_block *scratch = tshi_mem_alloc(ctx, TSH_MEM_STEP, 2 * counted + 2 * bytes);
    int64_t *send, *recv;
    char *sent, *received;
    int r;
    if (!scratch) return TSH_ERR_MEMORY;
    send = (int64_t *)tshi_mem_data(scratch);
    recv = send + cut.size;
    sent = (char *)(recv + cut.size);
    received = sent + bytes;
    for (r = 0; r < cut.size; r++) send[r] = tshi_redistribute_held(&cut, r) * cut.outer;
    for (r = 0; r < cut.size; r++) recv[r] = tshi_redistribute_held(&join, r) * join.outer;
    tshi_redistribute_order(&cut, tshi_kernel_unconst(in), sent, 0, 1);
    (void)tshi_error_comm(ctx, tsh_alltoall(&ctx->tp, sent, send, received, recv, 1, dtype),
                          "tsh_redistribute: all-to-all");
    tshi_redistribute_order(&join, out, received, 0, 0);
    tshi_mem_release(ctx, scratch);
    return ctx->error.code;
}

/* Moves dense local values from one layout to another, by the table above. form gives the global
 * shape. */
static tsh_result tshi_redistribute_move(const tsh_tensor *form, const tsh_layout *from,
                                         const tsh_layout *to, tsh_dtype dtype, const void *in,
                                         void *out) {
    tsh_ctx *ctx = form->ctx;
    const tsh_layout whole = tsh_replicated();
    const size_t width = tsh_dtype_size(dtype), bytes = (size_t)tsh_numel(form) * width;
    if (tshi_layout_equal(from, to, form->dim, ctx->tp.size)) {
        memcpy(out, in, (size_t)tsh_local_numel(form) * width);
    } else if (from->kind == TSH_SHARDED && to->kind == TSH_SHARDED && from->dim == to->dim) {
        /* other segments or units: gather and slice */
        tshi_block *scratch = tshi_mem_alloc(ctx, TSH_MEM_STEP, bytes);
        void *values = scratch ? tshi_mem_data(scratch) : NULL;
        if (values && tshi_redistribute_move(form, from, &whole, dtype, in, values) == TSH_OK)
            (void)tshi_redistribute_move(form, &whole, to, dtype, values, out);
        tshi_mem_release(ctx, scratch);
    } else if (from->kind == TSH_SHARDED && to->kind == TSH_SHARDED) {
        return tshi_redistribute_swap(ctx, form, from, to, dtype, in, out);
    } else if (from->kind == TSH_SHARDED) {
        return tshi_redistribute_rows(ctx, form, from, 1, dtype, in, out);
    } else if (from->kind == TSH_PARTIAL && to->kind == TSH_SHARDED) {
        return tshi_redistribute_rows(ctx, form, to, 0, dtype, in, out);
    } else if (to->kind == TSH_SHARDED) {
        const tshi_cut cut = tshi_redistribute_cut(form, to, NULL, dtype);
        tshi_redistribute_shard(&cut, ctx->tp.rank, tshi_kernel_unconst(in), (char *)out,
                                tshi_redistribute_held(&cut, ctx->tp.rank), 1);
    } else if (from->kind == TSH_PARTIAL) {
        memcpy(out, in, bytes);
        (void)tshi_error_comm(ctx, tsh_allreduce(&ctx->tp, out, tsh_numel(form), dtype, TSH_SUM),
                              "tsh_redistribute: all-reduce");
    } else if (ctx->tp.rank) {
        memset(out, 0, bytes);
    } else {
        memcpy(out, in, bytes);
    }
    return ctx->error.code;
}

/* Adds the gradient g of layout `from` to that of input 0, as layout `to`, which is R or S. form
 * gives the global shape of both. */
static void tshi_redistribute_back(tshi_node *node, const tsh_tensor *form, const tsh_layout *from,
                                   const tsh_layout *to, tsh_real *g) {
    tshi_block *scratch;
    tshi_dest dest;
    tsh_real *dx;
    if (!tshi_tape_dest(node, 0, &dest)) return;
    dx = tshi_map_dense_dest(node->in[0], &dest, &scratch);
    if (dx && tshi_redistribute_move(form, from, to, TSH_REAL, g, dx) == TSH_OK)
        tshi_map_accumulate(node->in[0], &dest, scratch);
    else
        tshi_mem_release(node->out->ctx, scratch);
}

/* An all-gather's op accepts partial gradients: a complete gradient is sliced, a partial one
 * reduce-scattered, which is cheaper than an all-reduce before. */
static void tshi_redistribute_backward(tshi_node *node) {
    const tsh_tensor *out = node->out;
    const tsh_layout sum = tsh_partial(), whole = tsh_replicated();
    const tsh_layout *from = out->layout.kind == TSH_SHARDED ? &out->layout : &whole;
    const tsh_layout *to = (const tsh_layout *)node->params; /* input 0 in the output's shape */
    if (out->gr.live)
        tshi_redistribute_back(node, out, from, to, (tsh_real *)tshi_mem_data(out->gr.block));
    if (out->gp.live)
        tshi_redistribute_back(node, out, &sum, to, (tsh_real *)tshi_mem_data(out->gp.block));
}

static const tshi_op tshi_redistribute_op = {
    "tsh_redistribute", "x", NULL, tshi_redistribute_backward, TSHI_NONE, 0};
static const tshi_op tshi_redistribute_all_gather_op = {
    "tsh_redistribute", "x", NULL, tshi_redistribute_backward, TSHI_NONE, TSHI_OP_ACCEPTS_PARTIAL};
static const tshi_op tshi_redistribute_gather_op = {
    "tsh_tp_gather", "x", NULL, tshi_redistribute_backward, TSHI_NONE, TSHI_OP_ACCEPTS_PARTIAL};

/* Makes the output of a redistribution of x, whose layout in the output's global shape is `from`.
 * Backward gives x a gradient that is sharded if `from` is, else replicated. */
static tsh_tensor *tshi_redistribute_run(const tshi_op *op, tsh_tensor *x, const tsh_layout *from,
                                         const tsh_shape *shape, const tsh_layout *layout) {
    tsh_tensor *out = tshi_tensor_out(x->ctx, op->name, x->dtype, shape, layout);
    const tsh_layout back = from->kind == TSH_SHARDED ? *from : tsh_replicated();
    tshi_block *scratch;
    void *values = out ? tshi_kernel_packed(x, &scratch) : NULL;
    tsh_result result;
    if (!values) return NULL;
    result = tshi_redistribute_move(out, from, layout, x->dtype, values, tshi_tensor_at(out));
    tshi_mem_release(x->ctx, scratch);
    if (result != TSH_OK) return NULL;
    tshi_map_record(op, out, &x, 1, TSHI_NONE, &back, sizeof back, NULL);
    return out;
}

TSH_API tsh_tensor *tsh_redistribute(tsh_tensor *x, tsh_layout layout) {
    const tshi_op *op = &tshi_redistribute_op;
    tsh_ctx *ctx;
    char a[TSHI_TEXT_SIZE], b[TSHI_TEXT_SIZE];
    tsh_shape shape = tsh_shape_of(x);
    if (x) tshi_error_report(x->ctx); /* an earlier error: peers may wait in the collective */
    ctx = tshi_tensor_check("tsh_redistribute", &x, 1);
    if (!ctx) return NULL;
    if (!tshi_layout_resolve(&layout, x->ndim, x->dim) ||
        (x->layout.kind == TSH_SHARDED && layout.kind == TSH_PARTIAL))
        return tshi_error_null(ctx, TSH_ERR_LAYOUT, "tsh_redistribute: %s cannot become %s",
                               tshi_tensor_text(x, a), tsh_layout_text(&layout, b, sizeof b));
    if (tshi_layout_identical(&x->layout, &layout)) return x;
    if (ctx->tp.size == 1 || tshi_layout_equal(&x->layout, &layout, x->dim, ctx->tp.size)) {
        tsh_tensor *out = tshi_tensor_view(x);
        if (out) out->layout = layout;
        return out;
    }
    if (x->layout.kind == TSH_SHARDED && layout.kind == TSH_REPLICATED)
        op = &tshi_redistribute_all_gather_op;
    return tshi_redistribute_run(op, x, &x->layout, &shape, &layout);
}

TSH_API tsh_tensor *tsh_full(tsh_tensor *x) {
    return tsh_redistribute(x, tsh_replicated());
}

/* -- tsh_set_layout, tsh_tp_... --------------------------------------------- */

/* A new handle of x's values, for an op that changes only gradients or the layout. *x becomes a
 * dense copy if it is not dense, as gradients have the strides of their tensor. */
static tsh_tensor *tshi_redistribute_window(const char *op, tsh_tensor **x) {
    if (!tshi_tensor_is_dense(*x)) *x = tshi_map_copy(op, *x);
    return *x ? tshi_tensor_detached(*x, (*x)->block) : NULL;
}

/* Reports, and returns 0, if a recorded op, a view or a gradient depends on t's current layout. */
static int tshi_redistribute_may_change(const tsh_tensor *t) {
    const int recorded = tshi_tensor_recorded(t), viewed = t->block->refs > 1;
    if (!recorded && !viewed && !t->gr.live && !t->gp.live) return 1;
    if (recorded || viewed)
        (void)tsh_fail(t->ctx, TSH_ERR_STATE,
                       "tsh_set_layout: %s that take the tensor as it lies now; end the step first "
                       "(tsh_step_end), or change a copy: tsh_clone or tsh_keep",
                       recorded ? "ops are recorded" : "there are views or detached tensors");
    else
        (void)tsh_fail(t->ctx, TSH_ERR_STATE,
                       "tsh_set_layout: the tensor has a gradient, which lies as it does now; "
                       "forget that first: tsh_zero_grad");
    return 0;
}

/* One step of tsh_set_layout, where the old or the new layout is R or P: changes form's sizes and
 * layout, no values. */
static tsh_result tshi_redistribute_declare(tsh_tensor *form, tsh_layout layout) {
    tsh_ctx *ctx = form->ctx;
    const tsh_layout *cut = form->layout.kind == TSH_SHARDED ? &form->layout : &layout;
    char a[TSHI_TEXT_SIZE], b[TSHI_TEXT_SIZE];
    tsh_tensor next = *form;
    int64_t held, owned;
    int r, fits = 1, d = cut->dim < 0 ? cut->dim + form->ndim : cut->dim;
    if (cut->kind == TSH_SHARDED && (d < 0 || d >= form->ndim)) fits = d = 0;
    if (layout.kind == TSH_SHARDED && fits) {
        fits = form->dim[d] <= INT64_MAX / 64 / ctx->tp.size;
        next.dim[d] *= fits ? ctx->tp.size : 1;
    }
    if (fits) fits = tshi_layout_resolve(&layout, next.ndim, next.dim);
    if (!fits)
        return tsh_fail(ctx, TSH_ERR_LAYOUT,
                        "tsh_set_layout: the pieces of %d ranks, each %s, cannot lie as %s",
                        ctx->tp.size, tshi_tensor_text(form, a),
                        tsh_layout_text(&layout, b, sizeof b));
    if (cut->kind == TSH_SHARDED) {
        held = layout.kind == TSH_SHARDED ? form->dim[d]
                                          : tsh_chunk(cut, form->dim[d], ctx->tp.size, 0, NULL);
        for (r = 0; r < ctx->tp.size; r++)
            if ((owned = tsh_chunk(cut, next.dim[d], ctx->tp.size, r, NULL)) != held)
                return tsh_fail(
                    ctx, TSH_ERR_LAYOUT,
                    "tsh_set_layout: %s cannot become %s: of dimension %d rank %d has %lld, "
                    "not %lld; all pieces must be of one length",
                    tshi_tensor_text(form, a), tsh_layout_text(&layout, b, sizeof b), d, r,
                    (long long)owned, (long long)held);
        if (layout.kind != TSH_SHARDED) next.dim[d] = held;
    }
    next.layout = layout;
    *form = next;
    return TSH_OK;
}

static const tshi_op tshi_redistribute_set_layout_op = {"tsh_set_layout",       "t",       NULL,
                                                        tshi_map_same_backward, TSHI_NONE, 0};

TSH_API tsh_tensor *tsh_set_layout(tsh_tensor *t, tsh_layout layout) {
    tsh_ctx *ctx = tshi_tensor_check("tsh_set_layout", &t, 1);
    tsh_layout resolved = layout;
    tsh_tensor form, *out;
    int in_place;
    if (!ctx) return NULL;
    form = *t;
    if (tshi_layout_resolve(&resolved, t->ndim, t->dim) &&
        tshi_layout_equal(&t->layout, &resolved, t->dim, ctx->tp.size)) {
        if (tshi_layout_identical(&t->layout, &resolved)) return t;
        form.layout = resolved; /* the same shards in other units */
    } else {
        if (t->layout.kind != TSH_REPLICATED && layout.kind != TSH_REPLICATED)
            (void)tshi_redistribute_declare(&form, tsh_replicated());
        if (ctx->error.code != TSH_OK || tshi_redistribute_declare(&form, layout) != TSH_OK)
            return NULL;
    }
    /* a parameter's layout is the plan's */
    in_place = (t->flags & TSHI_OWNED) && !(t->flags & TSHI_PARAM);
    if (in_place && !tshi_redistribute_may_change(t)) return NULL;
    out = in_place ? t : tshi_redistribute_window("tsh_set_layout", &t);
    if (!out) return NULL;
    memcpy(out->dim, form.dim, sizeof out->dim);
    out->layout = form.layout;
    if (!in_place)
        (void)tshi_tape_record(&tshi_redistribute_set_layout_op, out, &t, 1, TSHI_NONE, 0);
    return out;
}

/* Checks input x of tsh_tp_...: it is replicated, or sharded or partial if these are 1. NULL and an
 * error if not. */
static tsh_ctx *tshi_redistribute_takes(const char *op, tsh_tensor *x, int sharded, int partial) {
    char text[TSHI_TEXT_SIZE];
    tsh_ctx *ctx;
    if (x) tshi_error_report(x->ctx); /* an earlier error: peers may wait in the collective */
    ctx = tshi_tensor_check(op, &x, 1);
    if (!ctx || x->layout.kind == TSH_REPLICATED || (sharded && x->layout.kind == TSH_SHARDED) ||
        (partial && x->layout.kind == TSH_PARTIAL))
        return ctx;
    (void)tsh_fail(ctx, TSH_ERR_LAYOUT,
                   "%s: takes what each rank holds as a replicated tensor, not %s; say that it is "
                   "one: tsh_set_layout(x, tsh_replicated())",
                   op, tshi_tensor_text(x, text));
    return NULL;
}

/* The index of x's dimension dim, -1 and an error if there is none. */
static int tshi_redistribute_dim(const char *op, const tsh_tensor *x, int dim) {
    char text[TSHI_TEXT_SIZE];
    int axis = tshi_tensor_axis(x, dim);
    if (axis < 0)
        (void)tsh_fail(x->ctx, TSH_ERR_ARGUMENT, "%s: %s has no dimension %d", op,
                       tshi_tensor_text(x, text), dim);
    return axis;
}

/* Checks that redop is a reduction of x's dtype. */
static int tshi_redistribute_redop(const char *op, const tsh_tensor *x, tsh_redop redop) {
    if ((unsigned)redop <= (unsigned)TSH_AVG &&
        (redop != TSH_AVG || tshi_dtypes[x->dtype].floating))
        return 1;
    (void)tsh_fail(x->ctx, TSH_ERR_ARGUMENT, "%s: %d is no reduction of %s", op, (int)redop,
                   tshi_dtype_name(x->dtype));
    return 0;
}

/* dx = all-reduce, by the redop, of the gradient that this rank's consumers computed. */
static void tshi_redistribute_copy_backward(tshi_node *node) {
    tsh_tensor *out = node->out;
    tsh_redop op = *(const tsh_redop *)node->params;
    const tsh_real *g = tshi_tape_complete(out);
    size_t bytes = (size_t)tsh_local_numel(out) * sizeof *g;
    tshi_block *scratch = g ? tshi_mem_alloc(out->ctx, TSH_MEM_STEP, bytes) : NULL;
    tshi_dest dest;
    if (!scratch) return;
    memcpy(tshi_mem_data(scratch), g, bytes);
    if (tshi_error_comm(out->ctx,
                        tsh_allreduce(&out->ctx->tp, tshi_mem_data(scratch), tsh_local_numel(out),
                                      TSH_REAL, op),
                        "tsh_tp_copy: all-reduce of the gradient") == TSH_OK &&
        tshi_tape_dest(node, 0, &dest))
        tshi_tape_accumulate(node->in[0], &dest, (const tsh_real *)tshi_mem_data(scratch),
                             out->stride);
    tshi_mem_release(out->ctx, scratch);
}

static const tshi_op tshi_redistribute_copy_op = {
    "tsh_tp_copy", "x",       NULL, tshi_redistribute_copy_backward,
    TSHI_NONE,     TSHI_OP_ACCEPTS_PARTIAL | TSHI_OP_ACCEPTS_RETAINED};

TSH_API tsh_tensor *tsh_tp_copy(tsh_tensor *x, tsh_redop op) {
    tsh_ctx *ctx = tshi_redistribute_takes("tsh_tp_copy", x, 0, 0);
    tsh_tensor *out;
    if (!ctx || !tshi_redistribute_redop("tsh_tp_copy", x, op)) return NULL;
    if (ctx->tp.size == 1 || !tshi_tape_records(ctx, &x, 1)) return x;
    out = tshi_redistribute_window("tsh_tp_copy", &x);
    if (!out) return NULL;
    tshi_map_record(&tshi_redistribute_copy_op, out, &x, 1, TSHI_NONE, &op, sizeof op, NULL);
    return ctx->error.code == TSH_OK ? out : NULL;
}

static const tshi_op tshi_redistribute_reduce_op = {"tsh_tp_reduce",        "x",       NULL,
                                                    tshi_map_same_backward, TSHI_NONE, 0};

TSH_API tsh_tensor *tsh_tp_reduce(tsh_tensor *x, tsh_redop op) {
    tsh_ctx *ctx = tshi_redistribute_takes("tsh_tp_reduce", x, 0, 1);
    tsh_shape shape = tsh_shape_of(x);
    tsh_tensor *out;
    if (!ctx || !tshi_redistribute_redop("tsh_tp_reduce", x, op)) return NULL;
    if (ctx->tp.size == 1) return x->layout.kind == TSH_REPLICATED ? x : tsh_full(x);
    out = tshi_tensor_out(ctx, "tsh_tp_reduce", x->dtype, &shape, NULL);
    if (!out) return NULL;
    tshi_kernel_dense(x, tshi_tensor_at(out), out->dtype, 0);
    if (tshi_error_comm(
            ctx, tsh_allreduce(&ctx->tp, tshi_tensor_at(out), tsh_numel(out), out->dtype, op),
            "tsh_tp_reduce: all-reduce") != TSH_OK)
        return NULL;
    (void)tshi_tape_record(&tshi_redistribute_reduce_op, out, &x, 1, TSHI_NONE, 0);
    return out;
}

TSH_API tsh_tensor *tsh_tp_scatter(tsh_tensor *x, int dim) {
    tsh_ctx *ctx = tshi_redistribute_takes("tsh_tp_scatter", x, 0, 0);
    int axis = ctx ? tshi_redistribute_dim("tsh_tp_scatter", x, dim) : -1;
    return axis < 0 ? NULL : tsh_redistribute(x, tsh_sharded(axis));
}

TSH_API tsh_tensor *tsh_tp_gather(tsh_tensor *x, int dim) {
    tsh_ctx *ctx = tshi_redistribute_takes("tsh_tp_gather", x, 1, 0);
    int axis = ctx ? tshi_redistribute_dim("tsh_tp_gather", x, dim) : -1;
    tsh_layout whole = tsh_replicated(), shards = tsh_sharded(axis);
    char text[TSHI_TEXT_SIZE];
    tsh_shape shape = tsh_shape_of(x);
    if (axis < 0) return NULL;
    if (x->layout.kind == TSH_SHARDED && x->layout.dim != axis)
        return tshi_error_null(ctx, TSH_ERR_LAYOUT,
                               "tsh_tp_gather: %s is not cut along dimension %d; gather it along "
                               "%d: tsh_redistribute(x, tsh_replicated())",
                               tshi_tensor_text(x, text), axis, x->layout.dim);
    if (x->layout.kind == TSH_SHARDED) return tsh_redistribute(x, whole);
    if (ctx->tp.size == 1) return x;
    shape.dim[axis] *= ctx->tp.size;
    (void)tshi_layout_resolve(&shards, shape.ndim, shape.dim);
    return tshi_redistribute_run(&tshi_redistribute_gather_op, x, &shards, &shape, &whole);
}

TSH_API tsh_result tsh_broadcast_batch(tsh_tensor *t) {
    tsh_ctx *ctx;
    char text[TSHI_TEXT_SIZE];
    if (t) tshi_error_report(t->ctx);
    ctx = tshi_tensor_check("tsh_broadcast_batch", &t, 1);
    if (!ctx) return t ? t->ctx->error.code : TSH_ERR_ARGUMENT;
    if (!(t->flags & TSHI_OWNED) || t->layout.kind != TSH_REPLICATED)
        return tsh_fail(ctx, TSH_ERR_LAYOUT,
                        "tsh_broadcast_batch: takes an owned replicated tensor, not %s",
                        tshi_tensor_text(t, text));
    if (!tshi_tensor_may_change("tsh_broadcast_batch", t)) return ctx->error.code;
    return tshi_error_comm(ctx,
                           tsh_broadcast(&ctx->tp, tshi_tensor_at(t), tsh_numel(t), t->dtype, 0),
                           "tsh_broadcast_batch");
}

/* ========================================================================== */
/* >>values                                          MARK: - values (private) */
/* Reading and writing the values of tensors; tensors as text.                */
/* Needs: >>redistribute.                                                     */
/* ========================================================================== */

/* Checks the arguments of tsh_read and tsh_write: t is of ctx, and data has its size. */
static tsh_ctx *tshi_values_io(const char *op, tsh_ctx *ctx, tsh_tensor *t, tsh_extent extent,
                                     const void *data, size_t bytes) {
    int64_t n = extent == TSH_LOCAL ? tsh_local_numel(t) : tsh_numel(t);
    size_t need = (size_t)n * tsh_dtype_size(tsh_dtype_of(t));
    if (!tshi_tensor_check_in(ctx, op, t)) return NULL;
    if (bytes == need && (data || !need)) return t->ctx;
    (void)tsh_fail(t->ctx, TSH_ERR_ARGUMENT,
                   "%s: %llu bytes were given, the tensor's %s holds %llu", op,
                   data ? (unsigned long long)bytes : 0ull,
                   extent == TSH_LOCAL ? "local piece" : "global shape", (unsigned long long)need);
    return NULL;
}

TSH_API tsh_result tsh_read(tsh_ctx *ctx, tsh_tensor *t, tsh_extent extent, void *out,
                            size_t bytes) {
    tsh_layout whole = tsh_replicated();
    tshi_block *scratch;
    void *values;
    if (!ctx) return TSH_ERR_ARGUMENT;
    if (extent == TSH_GLOBAL) tshi_error_report(ctx);
    if (!tshi_values_io("tsh_read", ctx, t, extent, out, bytes)) return ctx->error.code;
    if (!tsh_numel(t)) return TSH_OK;
    if (extent == TSH_LOCAL || t->layout.kind == TSH_REPLICATED || ctx->tp.size == 1) {
        tshi_kernel_dense(t, out, t->dtype, 0);
        return TSH_OK;
    }
    if (!(values = tshi_kernel_packed(t, &scratch))) return ctx->error.code;
    (void)tshi_redistribute_move(t, &t->layout, &whole, t->dtype, values, out);
    tshi_mem_release(ctx, scratch);
    return ctx->error.code;
}

TSH_API tsh_result tsh_write(tsh_ctx *ctx, tsh_tensor *t, tsh_extent extent, const void *in,
                             size_t bytes) {
    tsh_layout whole = tsh_replicated();
    tshi_block *scratch;
    if (!ctx) return TSH_ERR_ARGUMENT;
    if (!tshi_values_io("tsh_write", ctx, t, extent, in, bytes)) return ctx->error.code;
    if (!(t->base->flags & TSHI_OWNED))
        return tsh_fail(ctx, TSH_ERR_ARGUMENT,
                        "tsh_write: takes an owned tensor; tsh_keep makes one");
    if (extent == TSH_GLOBAL && t->layout.kind == TSH_PARTIAL)
        return tsh_fail(ctx, TSH_ERR_LAYOUT,
                        "tsh_write: global values of a partial sum are not defined");
    if (!tshi_tensor_may_change("tsh_write", t->base)) return ctx->error.code;
    if (!tsh_numel(t)) return TSH_OK;
    if (extent == TSH_LOCAL || t->layout.kind == TSH_REPLICATED || ctx->tp.size == 1) {
        tshi_kernel_dense(t, tshi_kernel_unconst(in), t->dtype, 1);
        return TSH_OK;
    }
    scratch = tshi_mem_alloc(ctx, TSH_MEM_STEP,
                             (size_t)tsh_local_numel(t) * tsh_dtype_size(t->dtype));
    if (!scratch) return ctx->error.code;
    (void)tshi_redistribute_move(t, &whole, &t->layout, t->dtype, in, tshi_mem_data(scratch));
    tshi_kernel_dense(t, tshi_mem_data(scratch), t->dtype, 1);
    tshi_mem_release(ctx, scratch);
    return ctx->error.code;
}

TSH_API TSHI_COLD char *tsh_to_string(tsh_tensor *t, char *text, size_t size) {
    char form[TSHI_TEXT_SIZE];
    tshi_block *scratch;
    const void *values;
    int64_t e, n = tsh_local_numel(t);
    int d;
    if (!size) return text;
    text[0] = '\0';
    if (!tshi_tensor_check("tsh_to_string", &t, 1) || !(values = tshi_kernel_packed(t, &scratch)))
        return text;
    tsh_text_add(text, size, "%s %s:", tshi_dtype_name(t->dtype), tshi_tensor_text(t, form));
    for (e = 0; e < n && strlen(text) + 1 < size; e++) {
        int64_t run = 1;
        for (d = t->ndim - 1; d > 0 && e; d--)
            if (e % (run *= t->local[d]) == 0) tsh_text_add(text, size, " /");
        tsh_text_add(text, size, " %.6g", tshi_dtype_get(t->dtype, values, e));
    }
    tshi_mem_release(t->ctx, scratch);
    return text;
}

/* ========================================================================== */
/* >>op-matmul                                      MARK: - op-matmul (private) */
/* Products of matrices, by the ctx's gemm and the rank's threads.             */
/* Needs: >>gemm >>redistribute.                                                */
/* ========================================================================== */

/* All products come through tshi_matmul_run (or, in attention, tshi_matmul_alone). A tshi_matrix
 * has strides for rows and columns, so that transposes and slices are not copied. */

/* At least so many bytes of scratch for the built-in gemm: one block of the ctx, which grows as
 * needed. NULL: no memory. */
static char *tshi_matmul_scratch(tsh_ctx *ctx, size_t bytes) {
    if (!ctx->gemm_scratch || ctx->gemm_scratch->size < bytes) {
        tshi_mem_release(ctx, ctx->gemm_scratch);
        ctx->gemm_scratch = tshi_mem_alloc(ctx, TSH_MEM_BOOKS, bytes);
    }
    return ctx->gemm_scratch ? (char *)tshi_mem_data(ctx->gemm_scratch) : NULL;
}

/* C = alpha A B + beta D, where A is (m, k), B (k, n), C and D (m, n). */
typedef struct tshi_product {
    const tsh_ctx *ctx;
    int64_t m, n, k;
    tsh_real alpha, beta;
    tshi_matrix a, b, d, c; /* D is C, or does not overlap it */
    const tshi_gemm_progress *progress; /* of communication, or NULL */
} tshi_product;

/* A product that threads share. */
typedef struct tshi_products {
    tshi_product whole;
    char *scratch;
    size_t each; /* bytes of scratch for each piece */
    int by_rows; /* pieces are rows of C, else columns */
} tshi_products;

/* Computes a product on the calling thread. A user's gemm has no D: C = beta D is computed first.
 */
static void tshi_matmul_alone(const tshi_product *x, char *scratch) {
    const tsh_ctx *ctx = x->ctx;
    const int apart = x->beta != 0 && x->d.data != x->c.data;
    if (!ctx->gemm.fn) {
        tshi_gemm_run(ctx->gemm_kernel, scratch, x->progress, x->m, x->n, x->k, x->alpha, x->a,
                      x->b, x->beta, x->d, x->c);
        return;
    }
    if (apart) tshi_gemm_scale(x->m, x->n, x->beta, x->d, x->c);
    ctx->gemm.fn(ctx->gemm.user, x->m, x->n, x->k, x->alpha, (const tsh_real *)x->a.data, x->a.row,
                 x->a.column, (const tsh_real *)x->b.data, x->b.row, x->b.column,
                 apart ? TSHI_R(1) : x->beta, (tsh_real *)x->c.data, x->c.row, x->c.column,
                 tshi_team_spare(ctx));
}

/* A thread's part of a product: the rows or columns [from, to) of C. */
static void tshi_matmul_piece(void *job, int piece, int64_t from, int64_t to) {
    const tshi_products *all = (const tshi_products *)job;
    const int64_t i = all->by_rows ? from : 0, j = all->by_rows ? 0 : from;
    tshi_product part = all->whole;
    *(all->by_rows ? &part.m : &part.n) = to - from;
    part.a = tshi_gemm_from(part.a, i, 0);
    part.b = tshi_gemm_from(part.b, 0, j);
    part.d = tshi_gemm_from(part.d, i, j);
    part.c = tshi_gemm_from(part.c, i, j);
    if (piece > 0) part.progress = NULL; /* only the rank's own thread, piece 0, may communicate */
    tshi_matmul_alone(&part, all->scratch + (size_t)piece * all->each);
}

/* m (rows, columns) as the ctx's gemm takes it. A user's gemm takes tsh_real: another dtype is
 * converted into *block, which the caller releases. */
static tshi_matrix tshi_matmul_converted(tsh_ctx *ctx, tshi_matrix m, int64_t rows, int64_t columns,
                                         tshi_block **block) {
    tsh_real *data;
    *block = NULL;
    if (m.dtype == TSH_REAL || !ctx->gemm.fn) return m;
    *block = tshi_mem_alloc(ctx, TSH_MEM_STEP, tshi_dtype_reals(rows * columns));
    if (!*block) return m;
    data = (tsh_real *)tshi_mem_data(*block);
    for (int64_t i = 0; i < rows; i++) {
        const tshi_operand to = tshi_kernel_reals(data + i * columns, 1);
        const tshi_operand from = tshi_kernel_operand(tshi_gemm_from(m, i, 0).data, m.column,
                                                      m.dtype);
        tshi_kernel_cast(columns, &to, &from);
    }
    return tshi_gemm_matrix(data, columns, 1);
}

/* C = alpha A B + beta D by the rank's threads. The longer side of C is cut, as that packs the
 * least of A and B, at multiples of ROWS or COLUMNS, which are whole tiles of every kernel. */
static void tshi_matmul_run(tsh_ctx *ctx, int64_t m, int64_t n, int64_t k, tsh_real alpha,
                            tshi_matrix a, tshi_matrix b, tsh_real beta, tshi_matrix d,
                            tshi_matrix c) {
    enum {
        ROWS = 12,
        COLUMNS = 32,
        SIDE = 96,         /* rows or columns, and ... */
        MIN_WORK = 1 << 20 /* ... multiply-adds, that are worth a thread */
    };
    const int transposed = tshi_gemm_transposes(m, n, c.row, c.column, ctx->gemm_kernel->nr);
    const int64_t side = m >= n ? m : n, unit = (m >= n) != transposed ? ROWS : COLUMNS;
    const int pieces = (int)tshi_base_min(tshi_team_parts(ctx, m * n * k, MIN_WORK),
                                          tshi_base_ceil(side, SIDE));
    const tshi_gemm_progress progress = {tshi_tape_progress, ctx};
    const size_t each = (tshi_gemm_scratch(ctx->gemm_kernel, m, n, k, c.row, c.column) + 63) / 64 *
                        64;
    tshi_block *converted[2];
    const tshi_matrix ra = tshi_matmul_converted(ctx, a, m, k, &converted[0]);
    const tshi_matrix rb = tshi_matmul_converted(ctx, b, k, n, &converted[1]);
    char *scratch = tshi_matmul_scratch(ctx, each * (size_t)pieces);
    tshi_products all = {
        {ctx, m, n, k, alpha, beta, ra, rb, d, c, &progress}, scratch, each, m >= n};
    if (side && scratch && ctx->error.code == TSH_OK)
        tshi_team_run(pieces, side, unit, tshi_matmul_piece, &all);
    tshi_mem_release(ctx, converted[0]);
    tshi_mem_release(ctx, converted[1]);
}

/* C = alpha A B + beta C. */
static void tshi_matmul_gemm(tsh_ctx *ctx, int64_t m, int64_t n, int64_t k, tsh_real alpha,
                             tshi_matrix a, tshi_matrix b, tsh_real beta, tshi_matrix c) {
    tshi_matmul_run(ctx, m, n, k, alpha, a, b, beta, c, c);
}

/* -- matmul: C = A B; dA = dC B^T, dB = A^T dC, summed over broadcast batches -------- */

/* The matrices in the last two dimensions of a tensor, whose batches broadcast to out's. */
typedef struct tshi_batches {
    tshi_matrix first;
    int64_t stride[TSH_MAX_DIMS]; /* along out's batch dimensions; 0 where the tensor broadcasts */
} tshi_batches;

/* Those of t's values, or of its gradient, in `data`. */
static tshi_batches tshi_matmul_batches(const tsh_tensor *t, void *data, tsh_dtype dtype,
                                        const int64_t *stride, const tsh_tensor *out) {
    const int64_t *last = stride + t->ndim - 2;
    tshi_batches all;
    int d, skip = out->ndim - t->ndim;
    all.first = tshi_gemm_matrix_of(data, dtype, last[0], last[1]);
    for (d = 0; d < out->ndim - 2; d++)
        all.stride[d] = d < skip || t->dim[d - skip] == 1 ? 0 : stride[d - skip];
    return all;
}

static tshi_matrix tshi_matmul_batch(const tshi_batches *all, const tsh_tensor *out,
                                     int64_t index) {
    tshi_matrix m = all->first;
    int64_t at = 0;
    for (int d = out->ndim - 3; d >= 0; d--) {
        at += index % out->local[d] * all->stride[d];
        index /= out->local[d];
    }
    m.data = (char *)m.data + at * tshi_dtypes[m.dtype].size;
    return m;
}

/* C = A B + beta C of all batches of out; A is (m, k), B (k, n). */
static void tshi_matmul_batched(const tsh_tensor *out, int64_t m, int64_t n, int64_t k,
                                const tshi_batches *a, const tshi_batches *b, tsh_real beta,
                                const tshi_batches *c) {
    int64_t i, count = tshi_tensor_product(out->local, out->ndim - 2);
    for (i = 0; i < count; i++)
        tshi_matmul_gemm(out->ctx, m, n, k, 1, tshi_matmul_batch(a, out, i),
                         tshi_matmul_batch(b, out, i), beta, tshi_matmul_batch(c, out, i));
}

static void tshi_matmul_backward(tshi_node *node) {
    tsh_tensor *a = node->in[0], *b = node->in[1], *out = node->out;
    int64_t m = out->local[out->ndim - 2], n = out->local[out->ndim - 1], k = a->local[a->ndim - 1];
    tshi_batches as = tshi_matmul_batches(a, tshi_tape_saved(node, 0), a->dtype, a->stride, out);
    tshi_batches bs = tshi_matmul_batches(b, tshi_tape_saved(node, 1), b->dtype, b->stride, out);
    tshi_batches gs = tshi_matmul_batches(out, tshi_tape_grad(node), TSH_REAL, out->stride, out);
    tshi_batches ds;
    tshi_dest dest;
    as.first = tshi_gemm_transposed(as.first);
    bs.first = tshi_gemm_transposed(bs.first);
    if (tshi_tape_dest_zeroed(node, 0, &dest)) {
        ds = tshi_matmul_batches(a, dest.data, TSH_REAL, dest.stride, out);
        tshi_matmul_batched(out, m, k, n, &gs, &bs, 1, &ds);
    }
    tshi_tape_input_done(node, 0); /* dA may be all-reduced while dB is computed */
    if (tshi_tape_dest_zeroed(node, 1, &dest)) {
        ds = tshi_matmul_batches(b, dest.data, TSH_REAL, dest.stride, out);
        tshi_matmul_batched(out, k, n, m, &as, &gs, 1, &ds);
    }
}

/* The shape of A B, with broadcast batches. 0 and an error if the shapes do not fit. */
static int tshi_matmul_shape(tsh_tensor *a, tsh_tensor *b, tsh_shape *shape) {
    char ta[TSHI_TEXT_SIZE], tb[TSHI_TEXT_SIZE];
    int d, fits = a->ndim >= 2 && b->ndim >= 2 && a->dim[a->ndim - 1] == b->dim[b->ndim - 2];
    *shape = tsh_shape_of(a->ndim >= b->ndim ? a : b);
    for (d = 3; d <= shape->ndim && fits; d++) {
        const int64_t p = d > a->ndim ? 1 : tsh_dim(a, -d), q = d > b->ndim ? 1 : tsh_dim(b, -d);
        fits = p == q || p == 1 || q == 1;
        shape->dim[shape->ndim - d] = p == 1 ? q : p;
    }
    if (!fits)
        return tsh_fail(a->ctx, TSH_ERR_SHAPE, "tsh_matmul: %s times %s has no meaning",
                        tshi_tensor_text(a, ta), tshi_tensor_text(b, tb)) == TSH_OK;
    shape->dim[shape->ndim - 2] = a->dim[a->ndim - 2];
    shape->dim[shape->ndim - 1] = b->dim[b->ndim - 1];
    return 1;
}

static const tshi_op tshi_matmul_op = {
    "tsh_matmul", "a b", tshi_rule_matmul, tshi_matmul_backward, TSHI_A | TSHI_B, 0};

TSH_API tsh_tensor *tsh_matmul(tsh_tensor *a, tsh_tensor *b) {
    const tshi_op *op = &tshi_matmul_op;
    tsh_tensor *in[2] = {a, b}, *out;
    tsh_ctx *ctx = tshi_tensor_check_floating("tsh_matmul", in, 2);
    tshi_output output;
    tshi_batches as, bs, cs;
    tshi_block *unrounded;
    tsh_real *c;
    if (!ctx || !tshi_matmul_shape(a, b, &output.shape) || !tshi_rule_run(op, in, 2, NULL, &output))
        return NULL;
    out = tshi_tensor_out(ctx, "tsh_matmul", tshi_tensor_promote(in, 2), &output.shape,
                          &output.layout);
    c = out ? tshi_kernel_output(out, &unrounded) : NULL;
    if (!c) return NULL;
    as = tshi_matmul_batches(a, tshi_tensor_at(a), a->dtype, a->stride, out);
    bs = tshi_matmul_batches(b, tshi_tensor_at(b), b->dtype, b->stride, out);
    cs = tshi_matmul_batches(out, c, TSH_REAL, out->stride, out);
    tshi_matmul_batched(out, out->local[out->ndim - 2], out->local[out->ndim - 1],
                        a->local[a->ndim - 1], &as, &bs, 0, &cs);
    tshi_kernel_output_done(out, unrounded);
    (void)tshi_tape_record(op, out, in, 2, output.partial, 0);
    return out;
}

/* ========================================================================== */
/* >>op-linear                                      MARK: - op-linear (private) */
/* Y = X W^T + b: plain, or column- or row-parallel by the weight's layout.    */
/* dX = dY W, dW = dY^T X, db = the sum of dY's rows.                           */
/* Needs: >>op-matmul.                                                          */
/* ========================================================================== */

/* X is (.., in), W (out, in), Y (.., out). W sharded along out (column-parallel) makes Y sharded;
 * along in (row-parallel) it makes Y a partial sum, which is all-reduced. With sequence parallelism
 * X and Y are sharded along the sequence outside of the pair of layers. */
typedef struct tshi_linear {
    int reduce;   /* row-parallel: Y is all-reduced */
    int scatter;  /* row-parallel, sequence parallelism: or reduce-scattered */
    int regather; /* column-parallel, sequence parallelism: X is gathered in forward and backward */
} tshi_linear;

/* t's values as a matrix (rows, features): in place, or if gather is 1 all-gathered to *block. */
static tshi_matrix tshi_linear_rows(const tsh_tensor *t, void *values, tsh_dtype dtype, int gather,
                                    int64_t *rows, tshi_block **block) {
    const tsh_layout whole = tsh_replicated();
    int64_t step = 0, last = t->ndim - 1;
    *block = gather ? tshi_mem_alloc(t->ctx, TSH_MEM_STEP, tshi_dtype_bytes(dtype, tsh_numel(t)))
                    : NULL;
    if (*block) {
        *rows = tshi_tensor_product(t->dim, t->ndim - 1);
        (void)tshi_redistribute_move(t, &t->layout, &whole, dtype, values, tshi_mem_data(*block));
        return tshi_gemm_matrix_of(tshi_mem_data(*block), dtype, t->dim[last], 1);
    }
    (void)tshi_kernel_rows(t, rows, &step);
    return tshi_gemm_matrix_of(values, dtype, step, t->stride[last]);
}

/* dX = dY W if X was gathered: a partial sum, (rows, in), is reduce-scattered to X's shards. */
static void tshi_linear_scatter(tshi_node *node, int64_t rows, tshi_matrix dy, tshi_matrix mw) {
    tsh_tensor *x = node->in[0], *w = node->in[1];
    const tsh_layout sum = tsh_partial();
    const int64_t outs = w->local[0], ins = w->local[1];
    tshi_block *whole;
    if (!x->base->requires_grad) return;
    whole = tshi_mem_alloc(x->ctx, TSH_MEM_STEP, tshi_dtype_reals(rows * ins));
    if (whole) {
        tsh_real *dx = (tsh_real *)tshi_mem_data(whole);
        tshi_matmul_gemm(x->ctx, rows, ins, outs, 1, dy, mw, 0, tshi_gemm_matrix(dx, ins, 1));
        tshi_redistribute_back(node, x, &sum, &x->layout, dx);
    }
    tshi_mem_release(x->ctx, whole);
}

static void tshi_linear_backward(tshi_node *node) {
    const tshi_linear *how = (const tshi_linear *)node->params;
    tsh_tensor *x = node->in[0], *w = node->in[1], *b = node->in[2], *out = node->out;
    int64_t rows = 0, outs = w->local[0], ins = w->local[1];
    tsh_real *g = tshi_tape_grad(node);
    tshi_block *whole_y, *whole_x;
    /* dy (rows, out), mx and dX (rows, in), mw (out, in) */
    const tshi_matrix dy = tshi_linear_rows(out, g, TSH_REAL, how->scatter, &rows, &whole_y);
    const tshi_matrix mx = tshi_linear_rows(x, tshi_tape_saved(node, 0), x->dtype, how->regather,
                                            &rows, &whole_x);
    const tshi_matrix mw = tshi_gemm_matrix_of(tshi_tape_saved(node, 1), w->dtype, w->stride[0],
                                               w->stride[1]);
    tshi_dest dest;
    if (out->ctx->error.code == TSH_OK && how->regather)
        tshi_linear_scatter(node, rows, dy, mw);
    else if (out->ctx->error.code == TSH_OK && tshi_tape_dest(node, 0, &dest))
        tshi_matmul_gemm(out->ctx, rows, ins, outs, 1, dy, mw, TSHI_R(dest.add),
                         tshi_gemm_matrix(dest.data, mx.row, mx.column));
    tshi_tape_input_done(node, 0); /* dX is all-reduced while dW is computed */
    if (out->ctx->error.code == TSH_OK && tshi_tape_dest(node, 1, &dest))
        tshi_matmul_gemm(out->ctx, outs, ins, rows, 1, tshi_gemm_transposed(dy), mx,
                         TSHI_R(dest.add),
                         tshi_gemm_matrix(dest.data, dest.stride[0], dest.stride[1]));
    if (b && tshi_tape_dest_zeroed(node, 2, &dest)) {
        tshi_loop loop;
        tshi_kernel_space(&loop, out);
        tshi_kernel_add_operand(&loop, b, dest.data, dest.stride, TSH_REAL);
        tshi_kernel_add_operand(&loop, out, g, out->stride, TSH_REAL);
        tshi_kernel_run(&loop, tshi_kernel_add[out->ctx->isa], NULL);
    }
    tshi_mem_release(out->ctx, whole_x);
    tshi_mem_release(out->ctx, whole_y);
}

/* Checks the shapes of x, w and b (may be NULL). */
static int tshi_linear_check(tsh_tensor *x, tsh_tensor *w, tsh_tensor *b) {
    char tx[TSHI_TEXT_SIZE], tw[TSHI_TEXT_SIZE];
    const char *name = w->base->path; /* of a parameter, else NULL */
    if (w->ndim != 2 || x->ndim < 1 || (b && b->ndim != 1))
        (void)tsh_fail(x->ctx, TSH_ERR_SHAPE,
                       "tsh_linear: input %s, weight %s, bias of %d dimensions; takes (.., in), "
                       "(out, in), (out)",
                       tshi_tensor_text(x, tx), tshi_tensor_text(w, tw), b ? b->ndim : 0);
    else if (x->dim[x->ndim - 1] != w->dim[1])
        (void)tsh_fail(x->ctx, TSH_ERR_SHAPE,
                       "tsh_linear: input has %lld features, weight%s%s%s takes %lld",
                       (long long)x->dim[x->ndim - 1], name ? " \"" : "", name ? name : "",
                       name ? "\"" : "", (long long)w->dim[1]);
    else if (b && b->dim[0] != w->dim[0])
        (void)tsh_fail(x->ctx, TSH_ERR_SHAPE,
                       "tsh_linear: weight gives %lld features, bias has %lld",
                       (long long)w->dim[0], (long long)b->dim[0]);
    return x->ctx->error.code == TSH_OK;
}

/* Computes Y. The product adds the bias, unless it is a partial sum: then the bias is added after
 * the all-reduce or reduce-scatter, once. */
static void tshi_linear_forward(tsh_tensor *const *in, tsh_tensor *out, const tshi_linear *how) {
    tsh_ctx *ctx = out->ctx;
    tsh_tensor *x = in[0], *w = in[1], *b = in[2];
    tsh_layout sum = tsh_partial();
    const int late = how->reduce || how->scatter;
    int64_t rows, outs = w->local[0], stride[TSH_MAX_DIMS];
    tshi_block *whole, *unrounded, *product = NULL, *bias = NULL;
    tshi_matrix mx, mw, my, mb; /* (rows, in), (in, out), (rows, out), the bias as (rows, out) */
    tsh_real *result = tshi_kernel_output(out, &unrounded), *y = result;
    mx = tshi_linear_rows(x, tshi_tensor_at(x), x->dtype, how->regather, &rows, &whole);
    mw = tshi_gemm_matrix_of(tshi_tensor_at(w), w->dtype, w->stride[1], w->stride[0]);
    if (how->scatter) product = tshi_mem_alloc(ctx, TSH_MEM_STEP, tshi_dtype_reals(rows * outs));
    if (product) y = (tsh_real *)tshi_mem_data(product);
    my = mb = tshi_gemm_matrix(y, outs, 1);
    if (b && !late) {
        tsh_real *values = tshi_kernel_reals_of(b, stride, &bias);
        mb = tshi_gemm_matrix(values, 0, stride[0]);
    }
    if (ctx->error.code == TSH_OK)
        tshi_matmul_run(ctx, rows, outs, w->local[1], 1, mx, mw, b && !late ? TSHI_R(1) : 0, mb,
                        my);
    if (ctx->error.code == TSH_OK && how->reduce)
        (void)tshi_error_comm(ctx,
                              tsh_allreduce(&ctx->tp, y, tsh_local_numel(out), TSH_REAL, TSH_SUM),
                              "tsh_linear: all-reduce of a row-parallel output");
    if (ctx->error.code == TSH_OK && how->scatter)
        (void)tshi_redistribute_move(out, &sum, &out->layout, TSH_REAL, y, result);
    if (ctx->error.code == TSH_OK && b && late) {
        tshi_loop loop;
        tshi_kernel_space(&loop, out);
        tshi_kernel_add_operand(&loop, out, result, out->stride, TSH_REAL);
        tshi_kernel_tensor(&loop, b);
        tshi_kernel_run(&loop, tshi_kernel_add[ctx->isa], NULL);
    }
    tshi_mem_release(ctx, product);
    tshi_mem_release(ctx, whole);
    tshi_mem_release(ctx, bias);
    tshi_kernel_output_done(out, unrounded);
}

/* Returns x, or what the product takes in its place: a slice of a replicated x for a row-parallel
 * weight, and a copy if x's rows do not have equal strides or, to be gathered, are not dense. */
static tsh_tensor *tshi_linear_input(tsh_tensor *x, const tsh_tensor *w, int gathered) {
    int64_t rows, step;
    if (w->layout.kind == TSH_SHARDED && w->layout.dim == 1 && x->layout.kind == TSH_REPLICATED) {
        tsh_layout layout = w->layout;
        layout.dim = x->ndim - 1;
        x = tsh_redistribute(x, layout);
    }
    if (!x || (gathered ? tshi_tensor_is_dense(x) : tshi_kernel_rows(x, &rows, &step))) return x;
    return tshi_map_copy("tsh_linear", x);
}

static const tshi_op tshi_linear_op = {
    "tsh_linear", "x weight bias", tshi_rule_linear, tshi_linear_backward, TSHI_X | TSHI_WEIGHT, 0};

/* tsh_linear with sequence parallelism. give: layout of the output of a row-parallel weight (NULL:
 * R). regather: the input of a column-parallel weight is sharded along the sequence; gather it. */
static tsh_tensor *tshi_linear_run(tsh_tensor *x, tsh_tensor *w, tsh_tensor *b,
                                   const tsh_layout *give, int regather) {
    const tshi_op *op = &tshi_linear_op;
    tsh_tensor *in[3] = {x, w, b}, *out;
    tsh_ctx *ctx = tshi_tensor_check_floating("tsh_linear", in, b ? 3 : 2);
    const tshi_rule_sequence sequence = {give, regather};
    const int row = w && w->layout.kind == TSH_SHARDED && w->layout.dim == 1;
    const int several = ctx && ctx->tp.size > 1;
    const tshi_linear how = {several && row && !give, several && give, several && regather};
    tshi_output output;
    if (!ctx || !tshi_linear_check(x, w, b) || !(in[0] = x = tshi_linear_input(x, w, regather)) ||
        !tshi_rule_run(op, in, 3, &sequence, &output))
        return NULL;
    output.shape = tsh_shape_of(x);
    output.shape.dim[x->ndim - 1] = w->dim[0];
    out = tshi_tensor_out(ctx, "tsh_linear", tshi_tensor_promote(in, b ? 3 : 2), &output.shape,
                          &output.layout);
    if (!out) return NULL;
    tshi_linear_forward(in, out, &how);
    if (ctx->error.code != TSH_OK) return NULL;
    tshi_map_record(op, out, in, 3, output.partial, &how, sizeof how, NULL);
    return out;
}

TSH_API tsh_tensor *tsh_linear(tsh_tensor *x, tsh_tensor *w, tsh_tensor *b) {
    return tshi_linear_run(x, w, b, NULL, 0);
}

/* ========================================================================== */
/* >>op-embedding                                MARK: - op-embedding (private) */
/* out_i = W[id_i] and dW[id_i] += dout_i.                                      */
/* Needs: >>redistribute.                                                       */
/* ========================================================================== */

/* W is (V, D), ids (..), out (.., D). If W is sharded along V, ids of other ranks' rows give zeros
 * and out is a partial sum. The node's aux has the local row of every id, -1 if it is another
 * rank's or padding, then, by_count, how often the id occurs. */
typedef struct tshi_lookup {
    int64_t count, width; /* local ids, local columns of W */
    int by_count, sparse; /* scale_grad_by_freq; sparse */
} tshi_lookup;

/* A thread's part of backward: the columns [from, to) of dW. Ids are added in order. */
static void tshi_embedding_columns(void *job, int piece, int64_t from, int64_t to) {
    const tshi_shared *work = (const tshi_shared *)job;
    const tshi_lookup *lookup = (const tshi_lookup *)work->node->params;
    const tsh_real *g = tshi_tape_grad(work->node);
    const int64_t *row = (const int64_t *)tshi_mem_data(work->node->aux);
    const int64_t *times = row + lookup->count, *stride = work->dest.stride;
    tshi_backward_params p = {1, 1}; /* dW += c g */
    tshi_operand x[3];
    int64_t i;
    (void)piece;
    for (i = 0; i < lookup->count; i++, g += lookup->width) {
        if (row[i] < 0) continue;
        if (lookup->by_count) p.c = 1 / (double)times[i];
        x[0] = tshi_kernel_reals(work->dest.data + row[i] * stride[0] + from * stride[1],
                                 stride[1]);
        x[1] = x[2] = tshi_kernel_reals(g + from, 1);
        tshi_map_scale_backward[work->node->out->ctx->isa](to - from, x, &p);
    }
}

static void tshi_embedding_backward(tshi_node *node) {
    const tshi_lookup *lookup = (const tshi_lookup *)node->params;
    const int64_t *row = (const int64_t *)tshi_mem_data(node->aux);
    int32_t *marks = NULL;
    tshi_shared work;
    int64_t i;
    if (!(lookup->sparse ? tshi_tape_dest_rows(node, 1, &work.dest, &marks)
                         : tshi_tape_dest_zeroed(node, 1, &work.dest)))
        return;
    for (i = 0; i < lookup->count && marks; i++)
        if (row[i] >= 0) marks[row[i]] = 1;
    work.node = node;
    tshi_team_run(tshi_kernel_parts(node->out->ctx, lookup->width, lookup->count), lookup->width,
                  16, tshi_embedding_columns, &work);
}

/* Checks the options for a weight of `rows` rows. */
static int tshi_embedding_options(tsh_ctx *ctx, const char *op, const tsh_lookup_desc *desc,
                                  int64_t rows) {
    if (desc->padding && (desc->padding_idx < -rows || desc->padding_idx >= rows))
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT, "%s: padding_idx %lld is outside [%lld, %lld)", op,
                       (long long)desc->padding_idx, (long long)-rows, (long long)rows);
    else if (!(desc->max_norm >= 0))
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT, "%s: max_norm is %g, not 0 (none) or above", op,
                       desc->max_norm);
    else if (!(desc->norm_type >= 0))
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT, "%s: norm_type is %g, not 0 (for 2) or above", op,
                       desc->norm_type);
    return ctx->error.code == TSH_OK;
}

/* Fills in the local row of every id, or -1. 0 and an error if one is out of range: on every rank,
 * if ids are replicated. */
static int tshi_embedding_rows(const tsh_tensor *ids, const tsh_tensor *w, const void *values,
                               int64_t *row) {
    int64_t i, count = tsh_local_numel(ids);
    for (i = 0; i < count; i++) {
        int64_t id = tshi_tensor_integer(ids, values, i);
        if (id < 0 || id >= w->dim[0])
            return tsh_fail(w->ctx, TSH_ERR_ARGUMENT,
                            "tsh_embedding: id %lld at position %lld is outside [0, %lld)",
                            (long long)id, (long long)i, (long long)w->dim[0]) == TSH_OK;
        row[i] = tshi_tensor_local(w, 0, id);
    }
    return 1;
}

/* sum |x|^p over this rank's columns of a row; for infinite p their largest magnitude. */
static double tshi_embedding_measure(const tsh_tensor *w, int64_t row, double p) {
    const void *values = tshi_tensor_at(w);
    double sum = 0, v;
    int64_t j;
    for (j = 0; j < w->local[1]; j++) {
        v = fabs(tshi_dtype_get(w->dtype, values, row * w->stride[0] + j * w->stride[1]));
        if (p > DBL_MAX)
            sum = v > sum || v != v ? v : sum;
        else
            sum += p > 2 || p < 2 ? pow(v, p) : v * v;
    }
    return sum;
}

/* As torch.embedding_renorm_: multiplies the rows that are looked up and whose p-norm is above
 * max_norm by max_norm / (norm + 1e-7). Counts are first reduced over dp, as all replicas must
 * change the same rows. */
static void tshi_embedding_renorm(tsh_tensor *w, int64_t *counts, const tsh_lookup_desc *desc) {
    tsh_ctx *ctx = w->ctx;
    double p = desc->norm_type > 0 ? desc->norm_type : 2, *norm;
    void *values = tshi_tensor_at(w);
    int64_t r, j, n = 0;
    tshi_block *block;
    if (ctx->dp.size > 1)
        (void)tshi_error_comm(ctx, tsh_allreduce(&ctx->dp, counts, w->local[0], TSH_I64, TSH_MAX),
                              "tsh_embedding: all-reduce of the rows looked up");
    for (r = 0; r < w->local[0]; r++) n += counts[r] > 0;
    block = tshi_mem_alloc(ctx, TSH_MEM_STEP, (size_t)n * sizeof *norm);
    if (!block) return;
    norm = (double *)tshi_mem_data(block);
    for (n = r = 0; r < w->local[0]; r++)
        if (counts[r]) norm[n++] = tshi_embedding_measure(w, r, p);
    if (w->layout.kind == TSH_SHARDED && w->layout.dim == 1 && ctx->tp.size > 1)
        (void)tshi_error_comm(
            ctx, tsh_allreduce(&ctx->tp, norm, n, TSH_F64, p > DBL_MAX ? TSH_MAX : TSH_SUM),
            "tsh_embedding: all-reduce of norms");
    for (n = r = 0; r < w->local[0] && ctx->error.code == TSH_OK; r++) {
        double length;
        if (!counts[r]) continue;
        length = p > DBL_MAX ? norm[n] : pow(norm[n], 1 / p);
        n++;
        for (j = 0; j < w->local[1] && length > desc->max_norm; j++) {
            const int64_t at = r * w->stride[0] + j * w->stride[1];
            tsh_real x = TSHI_R(tshi_dtype_get(w->dtype, values, at));
            x *= TSHI_R(desc->max_norm / (length + 1e-7));
            tshi_dtype_put(w->dtype, values, at, (double)x);
        }
    }
    tshi_mem_release(ctx, block);
}

/* Before the lookup: counts the ids, for scale_grad_by_freq after the rows in `row`, and shortens
 * rows of w by max_norm. */
static void tshi_embedding_prepare(const tsh_tensor *ids, tsh_tensor *w,
                                   const tsh_lookup_desc *desc, int64_t *row) {
    tsh_ctx *ctx = w->ctx;
    int64_t i, *counts, count = tsh_local_numel(ids);
    tshi_block *block;
    if (!desc->scale_grad_by_freq && !(desc->max_norm > 0)) return;
    block = tshi_mem_alloc(ctx, TSH_MEM_STEP, (size_t)w->local[0] * sizeof *counts);
    if (!block) return;
    counts = (int64_t *)tshi_mem_data(block);
    memset(counts, 0, (size_t)w->local[0] * sizeof *counts);
    for (i = 0; i < count; i++)
        if (row[i] >= 0) counts[row[i]]++;
    if (ids->layout.kind == TSH_SHARDED && ctx->tp.size > 1)
        (void)tshi_error_comm(ctx, tsh_allreduce(&ctx->tp, counts, w->local[0], TSH_I64, TSH_SUM),
                              "tsh_embedding: all-reduce of the counts of ids");
    for (i = 0; i < count && desc->scale_grad_by_freq; i++)
        row[count + i] = row[i] < 0 ? 1 : counts[row[i]];
    if (desc->max_norm > 0) tshi_embedding_renorm(w, counts, desc);
    tshi_mem_release(ctx, block);
}

static void tshi_embedding_forward(const tsh_tensor *w, const tshi_lookup *lookup,
                                   const int64_t *row, tsh_tensor *out) {
    tshi_operand x[2]; /* a row of the output, and one of the weight */
    int64_t i;
    x[0] = tshi_kernel_operand(tshi_tensor_at(out), 1, out->dtype);
    for (i = 0; i < lookup->count; i++) {
        x[1] = tshi_kernel_operand(tshi_tensor_at(w), w->stride[1], w->dtype);
        if (row[i] >= 0) {
            tshi_kernel_move(&x[1], row[i] * w->stride[0]);
            tshi_kernel_copy(lookup->width, x, NULL);
        } else {
            memset(x[0].data, 0, tshi_dtype_bytes(out->dtype, lookup->width));
        }
        tshi_kernel_move(&x[0], lookup->width);
    }
}

/* Checks the dtypes and shapes of ids and weight, and the options. */
static int tshi_embedding_check(tsh_tensor *ids, tsh_tensor *w, const tsh_lookup_desc *desc) {
    int integers = !tshi_dtypes[ids->dtype].floating;
    if (!integers || w->ndim != 2 || ids->ndim >= TSH_MAX_DIMS)
        (void)tsh_fail(w->ctx, integers ? TSH_ERR_SHAPE : TSH_ERR_DTYPE,
                       "tsh_embedding: takes i32 or i64 ids and a weight (V, D), not %s "
                       "and %d dimensions",
                       tshi_dtype_name(ids->dtype), w->ndim);
    else if (desc->max_norm > 0 && w->base->node)
        (void)tsh_fail(w->ctx, TSH_ERR_ARGUMENT,
                       "tsh_embedding: max_norm changes the weight in place, but it is what %s "
                       "gave; pass the leaf itself",
                       w->base->node->op->name);
    return w->ctx->error.code == TSH_OK &&
           tshi_embedding_options(w->ctx, "tsh_embedding", desc, w->dim[0]);
}

/* Looks up the rows of all ids. Then the rows of padding, which get no gradient, become -1. */
static void tshi_embedding_run(tsh_tensor *ids, tsh_tensor *w, const tsh_lookup_desc *desc,
                               const tshi_lookup *lookup, int64_t *row, tsh_tensor *out) {
    tshi_block *scratch;
    const void *values = tshi_kernel_packed(ids, &scratch);
    int64_t i, padding = desc->padding_idx + (desc->padding_idx < 0 ? w->dim[0] : 0);
    if (!values) return;
    if (tshi_embedding_rows(ids, w, values, row)) {
        tshi_embedding_prepare(ids, w, desc, row);
        tshi_embedding_forward(w, lookup, row, out);
    }
    for (i = 0; i < lookup->count && desc->padding; i++)
        if (tshi_tensor_integer(ids, values, i) == padding) row[i] = -1;
    tshi_mem_release(w->ctx, scratch);
}

static const tshi_op tshi_embedding_op = {
    "tsh_embedding", "ids weight", tshi_rule_embedding, tshi_embedding_backward, TSHI_NONE, 0};

TSH_API tsh_tensor *tsh_embedding(tsh_tensor *ids, tsh_tensor *w, const tsh_lookup_desc *desc) {
    static const tsh_lookup_desc usual = {0, 0, 0, 0, 0, 0};
    const tshi_op *op = &tshi_embedding_op;
    tsh_tensor *in[] = {ids, w}, *out;
    tsh_ctx *ctx = tshi_tensor_check("tsh_embedding", in, 2);
    tshi_output output;
    tshi_block *aux;
    tshi_lookup lookup;
    if (!desc) desc = &usual;
    if (!ctx || !tshi_tensor_check_floating("tsh_embedding", &w, 1)) return NULL;
    if (!tshi_embedding_check(ids, w, desc) || !tshi_rule_run(op, in, 2, NULL, &output))
        return NULL;
    output.shape = tsh_shape_of(ids);
    output.shape.dim[output.shape.ndim++] = w->dim[1];
    lookup.count = tsh_local_numel(ids);
    lookup.width = w->local[1];
    lookup.by_count = desc->scale_grad_by_freq != 0;
    lookup.sparse = desc->sparse != 0;
    out = tshi_tensor_out(ctx, "tsh_embedding", w->dtype, &output.shape, &output.layout);
    aux = out ? tshi_mem_alloc(ctx, TSH_MEM_STEP,
                               (size_t)(lookup.count * (lookup.by_count ? 2 : 1)) * sizeof(int64_t))
              : NULL;
    if (!aux) return NULL;
    tshi_embedding_run(ids, w, desc, &lookup, (int64_t *)tshi_mem_data(aux), out);
    tshi_map_record(op, out, in, 2, output.partial, &lookup, sizeof lookup, aux);
    return ctx->error.code == TSH_OK ? out : NULL;
}

/* ========================================================================== */
/* >>op-norm                                          MARK: - op-norm (private) */
/* Layer norm (Ba et al. 2016), RMS norm (Zhang & Sennrich 2019).              */
/* Needs: >>redistribute.                                                       */
/* ========================================================================== */

/* Over the last dimension, of d features, row by row, with xh = (x - mean) rstd, h = dy w:
 *
 *     rstd = 1 / sqrt(mean((x - mean)^2) + eps),   y = w xh + b
 *     dx = (h - mean(h) - xh mean(h xh)) rstd,     dw += dy xh,   db += dy
 *
 * RMS norm is the same with 0 for mean and mean(h), without b (about_zero). Forward keeps mean and
 * rstd of each row, "stats", for backward. */

/* Adds a block of v = x - c to the lanes of sum v, and v^2 to those of sum v^2, TSHI_BLOCK later.
 */
TSHI_INLINE void tshi_norm_moments_step(tsh_real *lane, const tsh_real *x, tsh_real c) {
    int i;
    for (i = 0; i < TSHI_BLOCK; i++) {
        const tsh_real v = x[i] - c;
        lane[i] += v;
        lane[i + TSHI_BLOCK] += v * v;
    }
}

/* stats = the mean of a row (0 if not centred) and its mean square about that, in one pass about
 * the mean c of the first block (Chan, Golub & LeVeque 1983). The rounding error grows by the
 * factor 1 + (mean - c)^2 / variance; if that is above 17, a second pass goes about the mean
 * itself. */
TSHI_INLINE void tshi_norm_moments(const tsh_real *x, int64_t n, int centred, tsh_real *stats) {
    const int64_t first = tshi_base_min(n, TSHI_BLOCK);
    tsh_real lane[2 * TSHI_BLOCK], pad[TSHI_BLOCK], c = 0, shift, square;
    int64_t e;
    int pass;
    tshi_kernel_pad(x, first, 0, pad);
    if (centred) c = tshi_kernel_fold(pad) / TSHI_R(first);
    for (pass = 0; pass < 2; pass++) {
        memset(lane, 0, sizeof lane);
        for (e = 0; e + TSHI_BLOCK <= n; e += TSHI_BLOCK) tshi_norm_moments_step(lane, x + e, c);
        if (e < n) {
            tshi_kernel_pad(x + e, n - e, c, pad);
            tshi_norm_moments_step(lane, pad, c);
        }
        shift = centred ? tshi_kernel_fold(lane) / TSHI_R(n) : 0;
        square = tshi_kernel_fold(lane + TSHI_BLOCK) / TSHI_R(n) - shift * shift;
        stats[0] = c += shift;
        stats[1] = square < 0 ? 0 : square;
        if (!(shift * shift > 16 * square)) return;
    }
}

/* One row: y = (x - mean) rstd w + b; b may be NULL. */
TSHI_INLINE void tshi_norm_row(tsh_real *y, const tsh_real *x, const tsh_real *w, const tsh_real *b,
                               const tsh_real *stats, int64_t n) {
    const tsh_real mean = stats[0], rstd = stats[1], *xs, *ws, *bs;
    tsh_real pad[3][TSHI_BLOCK], out[TSHI_BLOCK];
    int64_t e;
    int i;
    for (e = 0; e < n; e += TSHI_BLOCK) {
        xs = tshi_kernel_load_block(x, 1, e, n, pad[0]);
        ws = tshi_kernel_load_block(w, 1, e, n, pad[1]);
        bs = b ? tshi_kernel_load_block(b, 1, e, n, pad[2]) : NULL;
        if (b)
            TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++)
                out[i] = (xs[i] - mean) * rstd * ws[i] + bs[i];
        else
            TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) out[i] = (xs[i] - mean) * rstd * ws[i];
        tshi_kernel_store_block(y, 1, e, n, out, 0);
    }
}

typedef struct tshi_norm {
    int64_t d; /* features */
    double eps;
    int about_zero; /* rms_norm */
    int add;        /* backward: 1: dx += ..., 0: dx = ... */
} tshi_norm;

/* Forward of n rows; b may be NULL. Writes y and stats. */
enum { TSHI_NORM_Y, TSHI_NORM_X, TSHI_NORM_W, TSHI_NORM_B, TSHI_NORM_STATS, TSHI_NORM_OPERANDS };
TSHI_INLINE void tshi_norm_rows_body(int64_t n, const tshi_operand *operand, const tshi_norm *p) {
    const tshi_operand *from = &operand[TSHI_NORM_X], *to = &operand[TSHI_NORM_Y];
    const tsh_real *w = (const tsh_real *)operand[TSHI_NORM_W].data;
    const tsh_real *b = (const tsh_real *)operand[TSHI_NORM_B].data;
    tsh_real *y = (tsh_real *)to->data, *stats = (tsh_real *)operand[TSHI_NORM_STATS].data;
    const tsh_real *x = (const tsh_real *)from->data;
    int64_t r;
    for (r = 0; r < n; r++, x += from->step, y += to->step, stats += 2) {
        tshi_norm_moments(x, p->d, !p->about_zero, stats);
        stats[1] = TSHI_R(1) / tshi_math_sqrt(stats[1] + TSHI_R(p->eps));
        tshi_norm_row(y, x, w, b, stats, p->d);
    }
}
TSHI_KERNEL(tshi_norm_rows, tshi_norm);

/* Adds a block of h to the lanes of sum h, and h xh to those of sum h xh, TSHI_BLOCK later. */
TSHI_INLINE void tshi_norm_step(tsh_real *lane, const tsh_real *x, const tsh_real *w,
                                const tsh_real *dy, const tsh_real *stats) {
    const tsh_real mean = stats[0], rstd = stats[1];
    int i;
    TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) {
        const tsh_real xh = (x[i] - mean) * rstd, h = dy[i] * w[i];
        lane[i] += h;
        lane[i + TSHI_BLOCK] += h * xh;
    }
}

/* One row: dw += dy xh and db += dy. */
TSHI_INLINE void tshi_norm_step_weights(const tsh_real *x, const tsh_real *dy,
                                        const tsh_real *stats, int64_t n,
                                        tsh_real *TSHI_RESTRICT dw, tsh_real *TSHI_RESTRICT db) {
    const tsh_real mean = stats[0], rstd = stats[1];
    int64_t i;
    TSHI_EACH for (i = 0; i < n; i++) {
        dw[i] += dy[i] * ((x[i] - mean) * rstd);
        db[i] += dy[i];
    }
}

/* One row of dx, written or added; means: of h, of h xh. */
TSHI_INLINE void tshi_norm_grad_row(tsh_real *dx, const tsh_real *x, const tsh_real *w,
                                    const tsh_real *dy, const tsh_real *stats,
                                    const tsh_real *means, int64_t n, int add) {
    const tsh_real mean = stats[0], rstd = stats[1], a = means[0], b = means[1], *xs, *ws, *gs;
    tsh_real pad[3][TSHI_BLOCK], out[TSHI_BLOCK];
    int64_t e;
    int i;
    for (e = 0; e < n; e += TSHI_BLOCK) {
        xs = tshi_kernel_load_block(x, 1, e, n, pad[0]);
        ws = tshi_kernel_load_block(w, 1, e, n, pad[1]);
        gs = tshi_kernel_load_block(dy, 1, e, n, pad[2]);
        TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++)
            out[i] = (gs[i] * ws[i] - a - (xs[i] - mean) * rstd * b) * rstd;
        tshi_kernel_store_block(dx, 1, e, n, out, add);
    }
}

/* Backward of n rows. dx may be NULL, and dw together with db. Operands: dx for y, X, W, and STATS
 * as in forward, then these. */
enum { TSHI_NORM_DX = TSHI_NORM_Y, TSHI_NORM_DY = TSHI_NORM_B, TSHI_NORM_DW = TSHI_NORM_OPERANDS };
enum { TSHI_NORM_DB = TSHI_NORM_DW + 1, TSHI_NORM_GRAD_OPERANDS };
TSHI_INLINE void tshi_norm_grad_body(int64_t n, const tshi_operand *operand, const tshi_norm *p) {
    tsh_real *dx = (tsh_real *)operand[TSHI_NORM_DX].data;
    tsh_real *dw = (tsh_real *)operand[TSHI_NORM_DW].data;
    tsh_real *db = (tsh_real *)operand[TSHI_NORM_DB].data;
    const tsh_real *x = (const tsh_real *)operand[TSHI_NORM_X].data;
    const tsh_real *w = (const tsh_real *)operand[TSHI_NORM_W].data;
    const tsh_real *dy = (const tsh_real *)operand[TSHI_NORM_DY].data;
    const tsh_real *stats = (const tsh_real *)operand[TSHI_NORM_STATS].data;
    tsh_real lane[2 * TSHI_BLOCK], means[2] = {0, 0}, pad[3][TSHI_BLOCK];
    const int64_t d = p->d;
    int64_t r, e;
    for (r = 0; r < n; r++) {
        if (dw) tshi_norm_step_weights(x, dy, stats, d, dw, db);
        if (dx) {
            memset(lane, 0, sizeof lane);
            for (e = 0; e + TSHI_BLOCK <= d; e += TSHI_BLOCK)
                tshi_norm_step(lane, x + e, w + e, dy + e, stats);
            if (e < d) {
                tshi_kernel_pad(x + e, d - e, stats[0], pad[0]);
                tshi_kernel_pad(w + e, d - e, 0, pad[1]);
                tshi_kernel_pad(dy + e, d - e, 0, pad[2]);
                tshi_norm_step(lane, pad[0], pad[1], pad[2], stats);
            }
            if (!p->about_zero) means[0] = tshi_kernel_fold(lane) / TSHI_R(d);
            means[1] = tshi_kernel_fold(lane + TSHI_BLOCK) / TSHI_R(d);
            tshi_norm_grad_row(dx, x, w, dy, stats, means, d, p->add);
            dx += operand[TSHI_NORM_DX].step;
        }
        x += operand[TSHI_NORM_X].step;
        dy += operand[TSHI_NORM_DY].step;
        stats += 2;
    }
}
TSHI_KERNEL(tshi_norm_grad, tshi_norm);

/* A thread's part of dw and db: the columns [from, to). Rows are added in order. */
static void tshi_norm_columns(void *job, int piece, int64_t from, int64_t to) {
    const tshi_rows *all = (const tshi_rows *)job;
    tshi_operand x[TSHI_NORM_GRAD_OPERANDS];
    tshi_norm part = *(const tshi_norm *)all->params;
    int i;
    (void)piece;
    memcpy(x, all->x, sizeof x);
    x[TSHI_NORM_DX].data = NULL;
    for (i = 0; i < TSHI_NORM_GRAD_OPERANDS; i++)
        if (i != TSHI_NORM_STATS) tshi_kernel_move(&x[i], from);
    part.d = to - from;
    all->kernel(all->count, x, &part);
}

/* Computes dx, dw and db: in one pass, or with several threads dx by rows, then dw and db by
 * columns. */
static void tshi_norm_grads(tshi_rows *work, int64_t d, int pieces) {
    void *dw = work->x[TSHI_NORM_DW].data;
    if (pieces == 1) {
        tshi_kernel_do_rows(work, 0, 0, work->count);
        return;
    }
    work->x[TSHI_NORM_DW].data = NULL;
    if (work->x[TSHI_NORM_DX].data)
        tshi_team_run(pieces, work->count, 1, tshi_kernel_do_rows, work);
    work->x[TSHI_NORM_DW].data = dw;
    if (dw) tshi_team_run(pieces, d, 16, tshi_norm_columns, work);
}

static void tshi_norm_backward(tshi_node *node) {
    tsh_tensor *x = node->in[0], *out = node->out;
    tsh_ctx *ctx = out->ctx;
    tshi_norm p = *(const tshi_norm *)node->params;
    const int64_t d = p.d, one = 1;
    int64_t rows, step, stride[TSH_MAX_DIMS];
    int i, needed[3], pieces = tshi_kernel_parts(ctx, d ? tsh_local_numel(x) / d : 0, d);
    tshi_block *two = tshi_mem_alloc(ctx, TSH_MEM_STEP, tshi_dtype_reals(2 * d)), *saved[2];
    tsh_real *dw, *values[2];
    tshi_dest dest[3];
    tshi_rows work;
    if (!two) return;
    dw = (tsh_real *)tshi_mem_data(two);
    memset(dw, 0, tshi_dtype_reals(2 * d));
    for (i = 0; i < 3; i++) needed[i] = tshi_tape_dest(node, i, &dest[i]);
    for (i = 0; i < 2; i++) values[i] = tshi_tape_saved_reals(node, i, stride, &saved[i]);
    p.add = needed[0] && dest[0].add;
    (void)tshi_kernel_rows(x, &rows, &step);
    work = tshi_kernel_rows_job(tshi_norm_grad[ctx->isa], rows, &p);
    work.x[TSHI_NORM_DX] = tshi_kernel_reals(needed[0] ? dest[0].data : NULL, step);
    work.x[TSHI_NORM_X] = tshi_kernel_reals(values[0], saved[0] ? d : step);
    work.x[TSHI_NORM_W] = tshi_kernel_reals(values[1], 0);
    work.x[TSHI_NORM_DY] = tshi_kernel_reals(tshi_tape_grad(node), d);
    work.x[TSHI_NORM_STATS] = tshi_kernel_reals((const tsh_real *)tshi_mem_data(node->aux), 2);
    work.x[TSHI_NORM_DW] = tshi_kernel_reals(needed[1] || needed[2] ? dw : NULL, 0);
    work.x[TSHI_NORM_DB] = tshi_kernel_reals(dw + d, 0);
    if (values[0] && values[1]) tshi_norm_grads(&work, d, pieces);
    for (i = 1; i < 3; i++)
        if (needed[i]) tshi_tape_accumulate(node->in[i], &dest[i], i == 1 ? dw : dw + d, &one);
    tshi_mem_release(ctx, saved[0]);
    tshi_mem_release(ctx, saved[1]);
    tshi_mem_release(ctx, two);
}

/* Checks the shapes of x, w and b (may be NULL). */
static int tshi_norm_check(const char *op, tsh_tensor *x, tsh_tensor *w, tsh_tensor *b) {
    char tx[TSHI_TEXT_SIZE], tw[TSHI_TEXT_SIZE];
    tsh_ctx *ctx = x->ctx;
    if (x->ndim < 1 || w->ndim != 1 || w->dim[0] != x->dim[x->ndim - 1] ||
        (b && (b->ndim != 1 || b->dim[0] != w->dim[0])))
        (void)tsh_fail(ctx, TSH_ERR_SHAPE,
                       "%s: input %s, weight %s; weight and bias must hold the last dimension", op,
                       tshi_tensor_text(x, tx), tshi_tensor_text(w, tw));
    return ctx->error.code == TSH_OK;
}

/* Replaces inputs by copies if their features are not adjacent or their rows have no equal strides.
 * 0: no memory. */
static int tshi_norm_inputs(const char *op, tsh_tensor **in) {
    int64_t rows, step;
    int i;
    for (i = 0; i < 3; i++)
        if (in[i] && (in[i]->stride[in[i]->ndim - 1] != 1 ||
                      !tshi_kernel_rows(in[i], &rows, &step)))
            if (!(in[i] = tshi_map_copy(op, in[i]))) return 0;
    return 1;
}

/* tsh_layer_norm and tsh_rms_norm. */
static tsh_tensor *tshi_norm_apply(const tshi_op *op, tsh_tensor *x, tsh_tensor *weight,
                                   tsh_tensor *bias, double eps, int about_zero) {
    tsh_tensor *in[] = {x, weight, bias}, *out;
    tsh_ctx *ctx = tshi_tensor_check_floating(op->name, in, bias ? 3 : 2);
    tshi_norm p = {0, eps, about_zero, 0};
    tshi_output output;
    tshi_block *stats, *scratch[3] = {NULL, NULL, NULL}, *unrounded;
    tsh_real *values[3] = {NULL, NULL, NULL}, *y;
    int64_t rows, step, stride[TSH_MAX_DIMS];
    tshi_rows work;
    int i;
    if (!ctx || !tshi_norm_check(op->name, x, weight, bias) ||
        !tshi_rule_run(op, in, 3, NULL, &output) || !tshi_norm_inputs(op->name, in))
        return NULL;
    output.shape = tsh_shape_of(x);
    p.d = x->dim[x->ndim - 1];
    (void)tshi_kernel_rows(in[0], &rows, &step);
    out = tshi_tensor_out(ctx, op->name, x->dtype, &output.shape, &output.layout);
    stats = out ? tshi_mem_alloc(ctx, TSH_MEM_STEP, tshi_dtype_reals(2 * rows)) : NULL;
    if (!stats) return NULL;
    y = tshi_kernel_output(out, &unrounded);
    for (i = 0; i < 3; i++)
        if (in[i]) values[i] = tshi_kernel_reals_of(in[i], stride, &scratch[i]);
    work = tshi_kernel_rows_job(tshi_norm_rows[ctx->isa], rows, &p);
    work.x[TSHI_NORM_Y] = tshi_kernel_reals(y, p.d);
    work.x[TSHI_NORM_X] = tshi_kernel_reals(values[0], scratch[0] ? p.d : step);
    work.x[TSHI_NORM_W] = tshi_kernel_reals(values[1], 0);
    work.x[TSHI_NORM_B] = tshi_kernel_reals(values[2], 0);
    work.x[TSHI_NORM_STATS] = tshi_kernel_reals((tsh_real *)tshi_mem_data(stats), 2);
    if (ctx->error.code == TSH_OK) tshi_kernel_run_rows(ctx, &work, p.d);
    for (i = 0; i < 3; i++) tshi_mem_release(ctx, scratch[i]);
    tshi_kernel_output_done(out, unrounded);
    tshi_map_record(op, out, in, 3, output.partial, &p, sizeof p, stats);
    return ctx->error.code == TSH_OK ? out : NULL;
}

static const tshi_op tshi_norm_layer_op = {
    "tsh_layer_norm",   "x weight bias",      tshi_rule_norm,
    tshi_norm_backward, TSHI_X | TSHI_WEIGHT, 0};
static const tshi_op tshi_norm_rms_op = {
    "tsh_rms_norm", "x weight", tshi_rule_norm, tshi_norm_backward, TSHI_X | TSHI_WEIGHT, 0};

TSH_API tsh_tensor *tsh_layer_norm(tsh_tensor *x, tsh_tensor *weight, tsh_tensor *bias,
                                   double eps) {
    return tshi_norm_apply(&tshi_norm_layer_op, x, weight, bias, tshi_base_option(eps, 1e-5), 0);
}

TSH_API tsh_tensor *tsh_rms_norm(tsh_tensor *x, tsh_tensor *weight, double eps) {
    return tshi_norm_apply(&tshi_norm_rms_op, x, weight, NULL, tshi_base_option(eps, 1e-6), 1);
}

/* ========================================================================== */
/* >>op-rope                                          MARK: - op-rope (private) */
/* Rotary position embedding (Su et al. 2021).                                  */
/* Needs: >>op-map.                                                             */
/* ========================================================================== */

/* x is (.., T, D). Pair i of the row at position t is rotated by the angle u = t base^(-2 i /
 * dims): (a, b) becomes (a cos u - b sin u, b cos u + a sin u). Backward rotates the gradient by
 * -u. */
typedef struct tshi_rope {
    int64_t pairs; /* dims / 2 */
    int64_t next;  /* features from the a of one pair to that of the next */
    int64_t gap;   /* features from a to b */
    double sign;   /* of the angle: -1 in backward */
    int add;       /* 1: y += ..., 0: y = ... */
    int64_t gap_x, gap_y; /* gap in elements of x, of y */
} tshi_rope;

/* Rotates n pairs. Operands: the a of y, of x; their cosines, `pairs` before their sines. */
TSHI_INLINE void tshi_rope_pairs_body(int64_t n, const tshi_operand *operand,
                                      const tshi_rope *rope) {
    tsh_real *TSHI_RESTRICT y = (tsh_real *)operand[0].data;
    const tsh_real *TSHI_RESTRICT x = (const tsh_real *)operand[1].data;
    const tsh_real *TSHI_RESTRICT table = (const tsh_real *)operand[2].data;
    const int64_t sy = operand[0].step, sx = operand[1].step, step = operand[2].step;
    const int64_t gap_x = rope->gap_x, gap_y = rope->gap_y, pairs = rope->pairs;
    const tsh_real sign = TSHI_R(rope->sign);
    const int add = rope->add;
    int64_t i;
    TSHI_EACH for (i = 0; i < n; i++) {
        const tsh_real a = x[i * sx], b = x[i * sx + gap_x];
        const tsh_real cosine = table[i * step], sine = sign * table[i * step + pairs];
        const tsh_real first = a * cosine - b * sine, second = b * cosine + a * sine;
        y[i * sy] = add ? y[i * sy] + first : first;
        y[i * sy + gap_y] = add ? y[i * sy + gap_y] + second : second;
    }
}
TSHI_KERNEL(tshi_rope_pairs, tshi_rope);

/* Rotates x, of t's local shape, to y, and copies the features after the pairs. table: cosines and
 * sines of each position's pairs. */
static void tshi_rope_rotate(const tsh_tensor *t, const tshi_rope *rope, tshi_block *table,
                             const tsh_real *x, const int64_t *sx, tsh_real *y, const int64_t *sy) {
    const int last = t->ndim - 1, isa = t->ctx->isa;
    int64_t stride[3][TSH_MAX_DIMS] = {{0}};
    tsh_tensor part = *t; /* the pairs, then the other features */
    tshi_rope p = *rope;
    tshi_loop loop;
    p.gap_x = rope->gap * sx[last];
    p.gap_y = rope->gap * sy[last];
    memcpy(stride[0], sy, sizeof *stride);
    memcpy(stride[1], sx, sizeof *stride);
    stride[0][last] *= rope->next;
    stride[1][last] *= rope->next;
    stride[2][last - 1] = 2 * rope->pairs;
    stride[2][last] = 1;
    part.dim[last] = part.local[last] = rope->pairs;
    tshi_kernel_space(&loop, &part);
    tshi_kernel_add_operand(&loop, &part, y, stride[0], TSH_REAL);
    tshi_kernel_add_operand(&loop, &part, x, stride[1], TSH_REAL);
    tshi_kernel_add_operand(&loop, &part, tshi_mem_data(table), stride[2], TSH_REAL);
    tshi_kernel_run(&loop, tshi_rope_pairs[isa], &p);
    part.dim[last] = part.local[last] = t->dim[last] - 2 * rope->pairs;
    tshi_kernel_space(&loop, &part);
    tshi_kernel_add_operand(&loop, &part, y + 2 * rope->pairs * sy[last], sy, TSH_REAL);
    tshi_kernel_add_operand(&loop, &part, x + 2 * rope->pairs * sx[last], sx, TSH_REAL);
    tshi_kernel_run(&loop, rope->add ? tshi_kernel_add[isa] : tshi_kernel_copy, NULL);
}

static void tshi_rope_backward(tshi_node *node) {
    tshi_rope back = *(const tshi_rope *)node->params;
    tsh_tensor *out = node->out;
    tshi_dest dest;
    if (!tshi_tape_dest(node, 0, &dest)) return;
    back.sign = -1;
    back.add = dest.add;
    tshi_rope_rotate(out, &back, node->aux, tshi_tape_grad(node), out->stride, dest.data,
                     dest.stride);
}

/* Computes the cosines and sines of every local position. NULL: no memory. */
static tshi_block *tshi_rope_table(const tsh_tensor *x, int64_t pairs, double base, int64_t start) {
    int64_t i, t, rows = x->local[x->ndim - 2];
    tshi_block *block = tshi_mem_alloc(x->ctx, TSH_MEM_STEP, tshi_dtype_reals(2 * pairs * rows));
    tsh_real *table = block ? (tsh_real *)tshi_mem_data(block) : NULL;
    for (i = 0; i < pairs && block; i++) {
        double speed = pow(base, -(double)i / (double)pairs);
        for (t = 0; t < rows; t++) {
            double angle = (double)(start + tshi_tensor_global(x, x->ndim - 2, t)) * speed;
            table[2 * pairs * t + i] = TSHI_R(cos(angle));
            table[2 * pairs * t + pairs + i] = TSHI_R(sin(angle));
        }
    }
    return block;
}

/* Checks x's shape and the options. */
static int tshi_rope_check(const tsh_tensor *x, const tsh_rope_desc *desc) {
    const int64_t d = x->ndim ? x->dim[x->ndim - 1] : 0, dims = desc->dims ? desc->dims : d;
    char text[TSHI_TEXT_SIZE];
    tsh_ctx *ctx = x->ctx;
    if (x->ndim < 2)
        (void)tsh_fail(ctx, TSH_ERR_SHAPE, "tsh_rope: takes (.., T, D), not %s",
                       tshi_tensor_text(x, text));
    else if (!(desc->base >= 0) || desc->base > DBL_MAX)
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT, "tsh_rope: base is %g, not a positive number",
                       desc->base);
    else if (dims < 0 || dims > d || dims % 2)
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT,
                       "tsh_rope: %lld of %lld features cannot turn in pairs; dims is even, and at "
                       "most the last dimension",
                       (long long)dims, (long long)d);
    return ctx->error.code == TSH_OK;
}

static const tshi_op tshi_rope_op = {
    "tsh_rope", "x", tshi_rule_rope, tshi_rope_backward, TSHI_NONE, 0};

TSH_API tsh_tensor *tsh_rope(tsh_tensor *x, const tsh_rope_desc *desc) {
    static const tsh_rope_desc usual = {0, 0, 0, 0};
    tsh_ctx *ctx = tshi_tensor_check_floating("tsh_rope", &x, 1);
    const tshi_op *op = &tshi_rope_op;
    tshi_output output;
    tshi_rope rope = {0, 0, 0, 1, 0, 0, 0};
    tshi_block *table, *scratch, *unrounded;
    tsh_real *values, *y;
    int64_t stride[TSH_MAX_DIMS];
    tsh_tensor *out;
    if (!desc) desc = &usual;
    if (!ctx || !tshi_rope_check(x, desc) || !tshi_rule_run(op, &x, 1, NULL, &output)) return NULL;
    output.shape = tsh_shape_of(x);
    rope.pairs = (desc->dims ? desc->dims : x->dim[x->ndim - 1]) / 2;
    rope.next = desc->interleaved ? 2 : 1;
    rope.gap = desc->interleaved ? 1 : rope.pairs;
    out = tshi_tensor_out(ctx, "tsh_rope", x->dtype, &output.shape, &output.layout);
    table = out ? tshi_rope_table(x, rope.pairs, desc->base > 0 ? desc->base : 10000, desc->start)
                : NULL;
    if (!table) return NULL;
    values = tshi_kernel_reals_of(x, stride, &scratch);
    y = tshi_kernel_output(out, &unrounded);
    if (values && y) tshi_rope_rotate(x, &rope, table, values, stride, y, out->stride);
    tshi_mem_release(ctx, scratch);
    tshi_kernel_output_done(out, unrounded);
    tshi_map_record(op, out, &x, 1, output.partial, &rope, sizeof rope, table);
    return ctx->error.code == TSH_OK ? out : NULL;
}

/* ========================================================================== */
/* >>op-attention                                MARK: - op-attention (private) */
/* O = softmax(scale Q K^T) V in tiles: no T x T matrix is ever stored.         */
/* Needs: >>op-view >>op-matmul.                                                */
/* ========================================================================== */

/* Scores s_ij = scale q_i k_j are computed for tiles of TSHI_TILE queries and keys, and an online
 * softmax of them with a running maximum m and sum l per row (Milakov & Gimelshein 2018). Backward
 * computes s again (Dao et al. 2022):
 *
 *     p = e^(s - m - log l),   delta_i = dO_i O_i,        dV += p^T dO
 *     dS = p (dO V^T - delta), dQ += scale dS K,          dK += scale dS^T Q
 *
 * m + log l is not stored as one number: log l would lose digits if m is large. Dropout masks p and
 * dO V^T by global position. Where a causal mask cuts a tile, strips of TSHI_STRIP queries are
 * computed. Rows of a tile are worked on in whole blocks of TSHI_BLOCK. */
enum { TSHI_TILE = 64, TSHI_STRIP = 16 };

/* The options of a call. */
typedef struct tshi_attention {
    double scale;
    int causal, dropout;
    tshi_dropout drop;
    tsh_tensor *mask;       /* or NULL */
    int64_t mask_stride[4]; /* over (B, H, Tq, Tk); 0 where the mask broadcasts */
} tshi_attention;

/* One head of one sequence, and scratch for a tile of it. */
typedef struct tshi_head {
    tsh_ctx *ctx;
    const tshi_attention *more;
    tshi_matrix q, k, v, o;       /* (T, D) each */
    tshi_matrix dq, dk, dv, dout; /* data NULL: not needed */
    int64_t tq, tk, d;
    uint64_t first; /* global index of score (0, 0) of this head, for dropout */
    int64_t mask;   /* offset of this head's mask */
    const void *mask_values;
    tsh_real *max;         /* m of each query; -infinity if it sees no key */
    tsh_real *log_sum;     /* log l of each query */
    tsh_real *delta;       /* of each query */
    tsh_real *s, *t, *row; /* two tiles, with rows TSHI_TILE apart; m and l of a tile's queries */
    char *scratch;         /* of products */
} tshi_head;

static tshi_matrix tshi_attention_tile(tsh_real *data) {
    return tshi_gemm_matrix(data, TSHI_TILE, 1);
}

/* C = alpha A B + beta C, on this thread. */
static void tshi_attention_gemm(const tshi_head *h, int64_t m, int64_t n, int64_t k, double alpha,
                                tshi_matrix a, tshi_matrix b, int beta, tshi_matrix c) {
    const tshi_product x = {h->ctx, m, n, k, TSHI_R(alpha), TSHI_R(beta), a, b, c, c, NULL};
    tshi_matmul_alone(&x, h->scratch);
}

/* How many keys query i sees, from key 0 on: all, or if causal i + tk - tq + 1. */
static int64_t tshi_attention_visible(const tshi_head *h, int64_t i) {
    int64_t visible = h->more->causal ? i + 1 + h->tk - h->tq : h->tk;
    return visible < 0 ? 0 : tshi_base_min(visible, h->tk);
}

/* Adds the mask to a tile of scores; a mask of integers is -infinity where it is 0. */
static void tshi_attention_masked(const tshi_head *h, int64_t i, int64_t m, int64_t j, int64_t n) {
    const tsh_tensor *mask = h->more->mask;
    const void *values = h->mask_values;
    const int64_t *stride = h->more->mask_stride;
    for (int64_t r = 0; r < m; r++)
        for (int64_t c = 0; c < n; c++) {
            int64_t at = h->mask + (i + r) * stride[2] + (j + c) * stride[3];
            tsh_real *s = h->s + r * TSHI_TILE + c;
            if (tshi_dtypes[mask->dtype].floating)
                *s += ((const tsh_real *)values)[at];
            else if (!((const int32_t *)values)[at])
                *s = -TSHI_R(INFINITY);
        }
}

/* s = scale q_i k_j for queries [i, i + m) and keys [j, j + n). */
static void tshi_attention_scores(const tshi_head *h, int64_t i, int64_t m, int64_t j, int64_t n) {
    tshi_attention_gemm(h, m, n, h->d, h->more->scale, tshi_gemm_from(h->q, i, 0),
                        tshi_gemm_transposed(tshi_gemm_from(h->k, j, 0)), 0,
                        tshi_attention_tile(h->s));
    if (h->more->mask) tshi_attention_masked(h, i, m, j, n);
}

/* Drops out a tile of queries [i, i + m) and keys [j, j + n), up to the keys that each sees. */
static void tshi_attention_dropout(const tshi_head *h, tsh_real *tile, int64_t i, int64_t m,
                                   int64_t j, int64_t n) {
    tshi_dropout_run run;
    int64_t r, visible;
    run.isa = h->ctx->isa;
    run.mask = &h->more->drop;
    for (r = 0; r < m; r++) {
        run.x = run.y = tile + r * TSHI_TILE;
        visible = tshi_base_min(tshi_attention_visible(h, i + r) - j, n);
        if (visible > 0)
            tshi_map_mask_run(&run, (int64_t)h->first + (i + r) * h->tk + j, 0, visible);
    }
}

/* A tile, for kernels. Its row r sees the first visible + r each of its n columns (keys). */
typedef struct tshi_tile {
    const tshi_head *h;
    int64_t i; /* the query of row 0 */
    int64_t n;
    int64_t visible; /* negative: the first rows see no key of the tile */
    int64_t each;    /* 1 if causal: every row sees one key more than the row before */
    int64_t d;       /* features of a head */
} tshi_tile;

/* How many columns row r sees. */
TSHI_INLINE int64_t tshi_attention_row(const tshi_tile *tile, int64_t r) {
    const int64_t visible = tile->visible + r * tile->each;
    return visible < 0 ? 0 : visible < tile->n ? visible : tile->n;
}

/* The tile of queries from i and keys [j, j + n). */
static tshi_tile tshi_attention_tile_at(const tshi_head *h, int64_t i, int64_t j, int64_t n) {
    const int causal = h->more->causal != 0;
    const int64_t visible = (causal ? i + 1 + h->tk - h->tq : h->tk) - j;
    const tshi_tile tile = {h, i, n, visible, causal, h->d};
    return tile;
}

/* y = x by; y may be x. */
TSHI_INLINE void tshi_attention_scale(tsh_real *y, const tsh_real *x, int64_t n, tsh_real by) {
    TSHI_LANES for (int64_t e = 0; e < n; e++) y[e] = x[e] * by;
}

/* Online softmax of n rows of a tile: x becomes e^(x - m), m the new maximum of each row; l and o,
 * a dense row of O so far, are scaled by e^(old m - m), and the sum of x is added to l. */
enum { TSHI_ONLINE_X, TSHI_ONLINE_M, TSHI_ONLINE_L, TSHI_ONLINE_O, TSHI_ONLINE_OPERANDS };
TSHI_INLINE void tshi_attention_online_body(int64_t n, const tshi_operand *operand,
                                            const tshi_tile *tile, int fused) {
    tsh_real *x = (tsh_real *)operand[TSHI_ONLINE_X].data;
    tsh_real *m = (tsh_real *)operand[TSHI_ONLINE_M].data;
    tsh_real *l = (tsh_real *)operand[TSHI_ONLINE_L].data;
    tsh_real *o = (tsh_real *)operand[TSHI_ONLINE_O].data;
    const int64_t d = tile->d, wide = tshi_base_ceil(tile->n, TSHI_BLOCK) * TSHI_BLOCK;
    int64_t r, c;
    for (r = 0; r < n; r++, x += TSHI_TILE, o += d) {
        const tsh_real old = m[r];
        for (c = tshi_attention_row(tile, r); c < wide; c++) x[c] = -TSHI_R(INFINITY);
        m[r] = tshi_kernel_max(x, wide);
        if (l[r] > 0 && old > m[r]) m[r] = old;
        if ((double)m[r] < -DBL_MAX) { /* the mask excludes every key so far */
            for (c = 0; c < wide; c++) x[c] = 0;
            continue;
        }
        if (l[r] > 0 && old < m[r]) {
            const tsh_real shrink = tshi_math_exp_below(old - m[r], fused);
            l[r] *= shrink;
            tshi_attention_scale(o, o, d, shrink);
        }
        l[r] += tshi_kernel_sum_exps(x, wide, m[r], x,
                                     fused); /* NaN where a score is NaN or +inf */
    }
}
TSHI_KERNEL_FUSED(tshi_attention_online, tshi_tile);

/* Ends n rows: O = o / l, and m and log l are kept for backward. o, m and l are whole blocks. */
TSHI_INLINE void tshi_attention_finish_body(int64_t n, const tshi_operand *none,
                                            const tshi_tile *tile, int fused) {
    const tshi_head *h = tile->h;
    const tsh_real *o = h->t, *m = h->row, *l = h->row + TSHI_TILE; /* o before it is divided */
    tsh_real *to = tshi_gemm_at(h->o, tile->i, 0);
    tsh_real back[TSHI_BLOCK], max[TSHI_BLOCK], log_sum[TSHI_BLOCK];
    const int64_t d = tile->d, step = h->o.row;
    (void)none;
    for (int64_t e = 0; e < n; e += TSHI_BLOCK) {
        TSHI_LANES for (int i = 0; i < TSHI_BLOCK; i++) {
            const tsh_real sum = l[e + i] == 0 ? TSHI_R(1) : l[e + i];
            max[i] = l[e + i] == 0 ? -TSHI_R(INFINITY) : m[e + i];
            back[i] = TSHI_R(1) / sum;
            log_sum[i] = tshi_math_log(sum, fused);
        }
        tshi_kernel_store_block(h->max + tile->i, 1, e, n, max, 0);
        tshi_kernel_store_block(h->log_sum + tile->i, 1, e, n, log_sum, 0);
        for (int64_t r = e; r < n && r < e + TSHI_BLOCK; r++)
            tshi_attention_scale(to + r * step, o + r * d, d, back[r - e]);
    }
}
TSHI_KERNEL_FUSED(tshi_attention_finish, tshi_tile);

/* Returns how many queries of a tile, from its row `from` on, are computed at once: all of the m,
 * or if causality cuts the tile TSHI_STRIP. *n becomes the number of keys that the last of them
 * sees. */
static int64_t tshi_attention_strip(const tshi_head *h, int64_t i, int64_t from, int64_t m,
                                    int64_t j, int64_t *n) {
    int64_t rows = m - from;
    if (tshi_attention_visible(h, i + from) < j + *n) rows = tshi_base_min(rows, TSHI_STRIP);
    *n = tshi_base_min(*n, tshi_attention_visible(h, i + from + rows - 1) - j);
    return rows;
}

typedef void (*tshi_tile_fn)(const tshi_head *h, int64_t i, int64_t r, int64_t m, int64_t j,
                             int64_t n);

/* Calls fn for all keys that queries [i, i + m) see: in tiles, or strips r of them. */
static void tshi_attention_tiles(const tshi_head *h, int64_t i, int64_t m, tshi_tile_fn fn) {
    const int64_t last = tshi_attention_visible(h, i + m - 1);
    int64_t j, r, n, rows, keys;
    for (j = 0; j < last; j += n) {
        n = tshi_base_min(TSHI_TILE, last - j);
        for (r = 0; r < m; r += rows) {
            keys = n;
            rows = tshi_attention_strip(h, i, r, m, j, &keys);
            if (keys > 0) fn(h, i, r, rows, j, keys);
        }
    }
}

/* Scores, softmax and O of m queries, from row r of the tile at query i, and keys [j, j + n). */
static void tshi_attention_forward_tile(const tshi_head *h, int64_t i, int64_t r, int64_t m,
                                        int64_t j, int64_t n) {
    tsh_real *o = h->t + r * h->d;
    const tshi_tile tile = tshi_attention_tile_at(h, i + r, j, n);
    tshi_operand x[TSHI_ONLINE_OPERANDS];
    x[TSHI_ONLINE_X] = tshi_kernel_reals(h->s, TSHI_TILE);
    x[TSHI_ONLINE_M] = tshi_kernel_reals(h->row + r, 1);
    x[TSHI_ONLINE_L] = tshi_kernel_reals(h->row + TSHI_TILE + r, 1);
    x[TSHI_ONLINE_O] = tshi_kernel_reals(o, h->d);
    tshi_attention_scores(h, i + r, m, j, n);
    tshi_attention_online[h->ctx->isa](m, x, &tile);
    if (h->more->dropout) tshi_attention_dropout(h, h->s, i + r, m, j, n);
    tshi_attention_gemm(h, m, h->d, n, 1, tshi_attention_tile(h->s), tshi_gemm_from(h->v, j, 0),
                        j > 0, tshi_gemm_matrix(o, h->d, 1));
}

/* Forward of a head, a tile of queries at a time. */
static void tshi_attention_head_forward(const tshi_head *h) {
    int64_t i, m;
    for (i = 0; i < h->tq; i += m) {
        const tshi_tile tile = tshi_attention_tile_at(h, i, 0, h->tk);
        m = tshi_base_min(TSHI_TILE, h->tq - i);
        memset(h->row, 0, 2 * TSHI_TILE * sizeof *h->row);
        if (!tshi_attention_visible(h, i)) memset(h->t, 0, (size_t)(m * h->d) * sizeof *h->t);
        tshi_attention_tiles(h, i, m, tshi_attention_forward_tile);
        tshi_attention_finish[h->ctx->isa](m, NULL, &tile);
    }
}

/* delta = O dO of n queries. */
TSHI_INLINE void tshi_attention_delta_body(int64_t n, const tshi_operand *none,
                                           const tshi_head *h) {
    (void)none;
    for (int64_t r = 0; r < n; r++)
        h->delta[r] = tshi_kernel_dot(tshi_gemm_at(h->o, r, 0), tshi_gemm_at(h->dout, r, 0), h->d);
}
TSHI_KERNEL(tshi_attention_delta, tshi_head);

/* n rows of a tile: scores x become p, and dx = dO V^T becomes scale dS; both are 0 where a query
 * does not see a key. */
TSHI_INLINE void tshi_attention_grad_body(int64_t n, const tshi_operand *none,
                                          const tshi_tile *tile, int fused) {
    const tshi_head *h = tile->h;
    const tsh_real *m = h->max + tile->i, *l = h->log_sum + tile->i, *delta = h->delta + tile->i;
    const tsh_real scale = TSHI_R(h->more->scale);
    tsh_real *x = h->s, *dx = h->t, y[TSHI_BLOCK], dy[TSHI_BLOCK];
    int i;
    (void)none;
    for (int64_t r = 0; r < n; r++, x += TSHI_TILE, dx += TSHI_TILE) {
        const tsh_real max = m[r], log_sum = l[r], dot = delta[r];
        const tsh_real nan = log_sum - log_sum; /* 0, but NaN if log l is not finite */
        const int visible = (double)max < -DBL_MAX ? 0 : (int)tshi_attention_row(tile, r);
        for (int64_t e = 0; e < tile->n; e += TSHI_BLOCK) {
            const int left = visible - (int)e;
            TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++)
                y[i] = tshi_math_exp_below(x[e + i] - max - log_sum, fused) + nan;
            TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) dy[i] = y[i] * (dx[e + i] - dot) * scale;
            TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) x[e + i] = i < left ? y[i] : 0;
            TSHI_LANES for (i = 0; i < TSHI_BLOCK; i++) dx[e + i] = i < left ? dy[i] : 0;
        }
    }
}
TSHI_KERNEL_FUSED(tshi_attention_grad, tshi_tile);

/* Adds to dQ, dK and dV what m queries, from i + r on, and keys [j, j + n) contribute. */
static void tshi_attention_backward_tile(const tshi_head *h, int64_t i, int64_t r, int64_t m,
                                         int64_t j, int64_t n) {
    const tshi_matrix p = tshi_attention_tile(h->s), ds = tshi_attention_tile(h->t);
    const tshi_matrix dout = tshi_gemm_from(h->dout, i + r, 0);
    const tshi_tile tile = tshi_attention_tile_at(h, i + r, j, n);
    i += r;
    tshi_attention_scores(h, i, m, j, n);
    tshi_attention_gemm(h, m, n, h->d, 1, dout, tshi_gemm_transposed(tshi_gemm_from(h->v, j, 0)), 0,
                        ds);
    if (h->more->dropout) tshi_attention_dropout(h, h->t, i, m, j, n);
    tshi_attention_grad[h->ctx->isa](m, NULL, &tile);
    if (h->more->dropout) tshi_attention_dropout(h, h->s, i, m, j, n);
    if (h->dv.data)
        tshi_attention_gemm(h, n, h->d, m, 1, tshi_gemm_transposed(p), dout, 1,
                            tshi_gemm_from(h->dv, j, 0));
    if (h->dq.data)
        tshi_attention_gemm(h, m, h->d, n, 1, ds, tshi_gemm_from(h->k, j, 0), 1,
                            tshi_gemm_from(h->dq, i, 0));
    if (h->dk.data)
        tshi_attention_gemm(h, n, h->d, m, 1, tshi_gemm_transposed(ds), tshi_gemm_from(h->q, i, 0),
                            1, tshi_gemm_from(h->dk, j, 0));
}

static void tshi_attention_head_backward(const tshi_head *h) {
    int64_t i, m;
    tshi_attention_delta[h->ctx->isa](h->tq, NULL, h);
    for (i = 0; i < h->tq; i += m) {
        m = tshi_base_min(TSHI_TILE, h->tq - i);
        tshi_attention_tiles(h, i, m, tshi_attention_backward_tile);
    }
}

/* The (T, D) matrix of batch b and head a; data may be NULL. */
static tshi_matrix tshi_attention_matrix(tsh_real *data, const int64_t *stride, int64_t b,
                                         int64_t a) {
    return tshi_gemm_matrix(data ? data + b * stride[0] + a * stride[1] : NULL, stride[2],
                            stride[3]);
}

/* The local head of k and v that the local query head a uses (grouped-query attention). */
static int64_t tshi_attention_kv(const tsh_tensor *q, const tsh_tensor *k, int64_t a) {
    int64_t group = q->dim[1] / k->dim[1];
    if (k->layout.kind == TSH_SHARDED && k->layout.dim == 1) return a / group;
    return tshi_tensor_global(q, 1, a) / group;
}

/* What the threads of a rank share. Heads are cut into pieces, each with scratch of its own. */
typedef struct tshi_heads {
    tshi_head head;        /* what all heads have in common */
    tsh_tensor *const *in; /* q, k, v */
    tsh_tensor *out;
    tsh_real *value[4], *grad[4];    /* of q, k, v, out; grad is NULL in forward or if not needed */
    int64_t stride[4][TSH_MAX_DIMS]; /* of the values */
    tshi_block *converted[4];        /* of values that are no tsh_real: their copies */
    tsh_real *stats;                 /* m, then log l, of the queries of each head */
    tsh_real *scratch;
    size_t each, each_product; /* scratch of a piece: elements; bytes for products */
    int pieces;
    int64_t first, groups; /* local heads of k that are used: the first, and how many */
    tshi_block *block;     /* holds scratch */
} tshi_heads;

/* Whether threads may add to the gradients of a and b at the same time: heads of a and b, which may
 * be views of one base, do not overlap, or a and b are the same. */
static int tshi_attention_apart(const tsh_tensor *a, const tsh_tensor *b) {
    const tsh_tensor *low = a->offset <= b->offset ? a : b, *high = low == a ? b : a;
    const int64_t *step = a->stride, distance = high->offset - low->offset;
    const int64_t low_end = (low->local[1] - 1) * step[1] + (low->local[3] - 1) * step[3];
    const int64_t high_end = (high->local[1] - 1) * step[1] + (high->local[3] - 1) * step[3];
    if (a->base != b->base || !a->base->requires_grad) return 1;
    if (memcmp(step, b->stride, 4 * sizeof *step) != 0) return 0;
    if (!distance) return a->local[1] == b->local[1];
    if (low_end >= distance) return 0;
    for (int d = 0; d <= 2; d += 2) /* both fit between two rows, and between two batches */
        if (a->local[d] > 1 && distance + high_end >= step[d]) return 0;
    return 1;
}

/* Fills in all but values, gradients and stats, and allocates scratch for each piece: two tiles
 * (the second also holds a tile of O), m and l, delta. Without memory tshi_attention_run does
 * nothing. */
static void tshi_attention_begin(tshi_heads *all, tsh_tensor *const *in, tsh_tensor *out,
                                 const tshi_attention *more) {
    enum { MIN_WORK = 1 << 18 }; /* multiply-adds of Q K^T that are worth a thread */
    tsh_tensor *q = in[0], *k = in[1];
    tshi_head *h = &all->head;
    int64_t wide = q->dim[3] > TSHI_TILE ? q->dim[3] : (int64_t)TSHI_TILE, heads = q->local[1];
    memset(all, 0, sizeof *all);
    all->in = in;
    all->out = out;
    h->ctx = q->ctx;
    h->more = more;
    h->tq = q->dim[2];
    h->tk = k->dim[2];
    h->d = q->dim[3];
    if (heads) all->first = tshi_attention_kv(q, k, 0);
    if (heads) all->groups = tshi_attention_kv(q, k, heads - 1) - all->first + 1;
    all->pieces = tshi_team_parts(q->ctx, q->local[0] * heads * h->tq * h->tk * h->d, MIN_WORK);
    all->pieces = (int)tshi_base_min(all->pieces, q->local[0] * all->groups);
    if (all->pieces < 1 || !tshi_attention_apart(q, k) || !tshi_attention_apart(q, in[2]))
        all->pieces = 1;
    all->each = (size_t)(TSHI_TILE * TSHI_TILE + TSHI_TILE * wide + 2 * TSHI_TILE + h->tq);
    all->each = (all->each + 15) / 16 * 16;
    all->each_product = tshi_gemm_scratch(q->ctx->gemm_kernel, wide, wide, wide, wide, 1);
    all->each_product = (all->each_product + 63) / 64 * 64;
    h->scratch = tshi_matmul_scratch(q->ctx, all->each_product * (size_t)all->pieces);
    all->block = tshi_mem_alloc(q->ctx, TSH_MEM_STEP, all->each * tshi_dtype_reals(all->pieces));
    if (!all->block) return;
    all->scratch = (tsh_real *)tshi_mem_data(all->block);
    /* kernels also compute what is after a short row, in its last block */
    memset(all->scratch, 0, all->each * tshi_dtype_reals(all->pieces));
}

/* Fills in h for query head a of batch b. */
static void tshi_attention_pick(const tshi_heads *all, tshi_head *h, int64_t b, int64_t a) {
    const tsh_tensor *q = all->in[0], *k = all->in[1], *v = all->in[2], *out = all->out;
    const int64_t c = tshi_attention_kv(q, k, a);
    const int64_t batch = tshi_tensor_global(q, 0, b), head = tshi_tensor_global(q, 1, a);
    h->first = (uint64_t)((batch * q->dim[1] + head) * h->tq * h->tk);
    h->mask = batch * h->more->mask_stride[0] + head * h->more->mask_stride[1];
    h->max = all->stats + 2 * (b * q->local[1] + a) * h->tq;
    h->log_sum = h->max + h->tq;
    h->q = tshi_attention_matrix(all->value[0], all->stride[0], b, a);
    h->k = tshi_attention_matrix(all->value[1], all->stride[1], b, c);
    h->v = tshi_attention_matrix(all->value[2], all->stride[2], b, c);
    h->o = tshi_attention_matrix(all->value[3], all->stride[3], b, a);
    if (!all->grad[3]) return;
    h->dq = tshi_attention_matrix(all->grad[0], q->stride, b, a);
    h->dk = tshi_attention_matrix(all->grad[1], k->stride, b, c);
    h->dv = tshi_attention_matrix(all->grad[2], v->stride, b, c);
    h->dout = tshi_attention_matrix(all->grad[3], out->stride, b, a);
}

/* A thread's part: [from, to) of the pairs of a batch and a head of k. All query heads that share a
 * head of k are computed by one thread, as they add to the same gradient. */
static void tshi_attention_piece(void *job, int piece, int64_t from, int64_t to) {
    const tshi_heads *all = (const tshi_heads *)job;
    const tsh_tensor *q = all->in[0];
    tshi_head h = all->head;
    int64_t a, wide = h.d > TSHI_TILE ? h.d : (int64_t)TSHI_TILE;
    h.s = all->scratch + (size_t)piece * all->each;
    h.t = h.s + TSHI_TILE * TSHI_TILE;
    h.row = h.t + TSHI_TILE * wide;
    h.delta = h.row + 2 * TSHI_TILE;
    h.scratch += (size_t)piece * all->each_product;
    for (; from < to; from++)
        for (a = 0; a < q->local[1]; a++) {
            if (tshi_attention_kv(q, all->in[1], a) != all->first + from % all->groups) continue;
            tshi_attention_pick(all, &h, from / all->groups, a);
            if (all->grad[3])
                tshi_attention_head_backward(&h);
            else
                tshi_attention_head_forward(&h);
        }
}

/* Computes all heads, and releases what tshi_attention_begin and conversions took. */
static void tshi_attention_run(tshi_heads *all) {
    if (all->head.ctx->error.code == TSH_OK)
        tshi_team_run(all->pieces, all->in[0]->local[0] * all->groups, 1, tshi_attention_piece,
                      all);
    for (int i = 0; i < 4; i++) tshi_mem_release(all->head.ctx, all->converted[i]);
    tshi_mem_release(all->head.ctx, all->block);
}

static void tshi_attention_backward(tshi_node *node) {
    tshi_heads all;
    tshi_dest dest;
    tshi_attention_begin(&all, node->in, node->out, (const tshi_attention *)node->params);
    if (all.head.more->mask) all.head.mask_values = tshi_tape_saved(node, 3);
    for (int i = 0; i < 3; i++) {
        all.value[i] = tshi_tape_saved_reals(node, i, all.stride[i], &all.converted[i]);
        if (tshi_tape_dest_zeroed(node, i, &dest)) all.grad[i] = dest.data;
    }
    all.value[3] = tshi_tape_saved_reals(node, 4, all.stride[3], &all.converted[3]);
    all.grad[3] = tshi_tape_grad(node);
    all.stats = (tsh_real *)tshi_mem_data(node->aux);
    tshi_attention_run(&all);
}

/* Checks the shapes of q, k and v. */
static int tshi_attention_shapes(tsh_tensor *const *in) {
    tsh_tensor *q = in[0], *k = in[1];
    char tq[TSHI_TEXT_SIZE], tk[TSHI_TEXT_SIZE], tv[TSHI_TEXT_SIZE];
    int d, fits = q->ndim == 4 && k->ndim == 4 && in[2]->ndim == 4;
    for (d = 0; d < 4 && fits; d++)
        fits = k->dim[d] == in[2]->dim[d] && (d == 1 || d == 2 || q->dim[d] == k->dim[d]);
    if (!fits)
        (void)tsh_fail(
            q->ctx, TSH_ERR_SHAPE,
            "tsh_attention: q %s, k %s, v %s; takes (B, H, Tq, D) and twice (B, Hkv, Tk, D)",
            tshi_tensor_text(q, tq), tshi_tensor_text(k, tk), tshi_tensor_text(in[2], tv));
    else if (k->dim[1] ? q->dim[1] % k->dim[1] : q->dim[1])
        (void)tsh_fail(
            q->ctx, TSH_ERR_SHAPE,
            "tsh_attention: q %s has %lld heads, no multiple of the %lld of k %s; as many "
            "query heads must share each head of k and v",
            tshi_tensor_text(q, tq), (long long)q->dim[1], (long long)k->dim[1],
            tshi_tensor_text(k, tk));
    return q->ctx->error.code == TSH_OK;
}

/* Checks that t, a mask or cache, is of the ctx of q, k, v and has values. */
static int tshi_attention_holds(tsh_tensor *const *in, tsh_tensor *t) {
    tsh_tensor *all[4];
    memcpy(all, in, 3 * sizeof *all);
    all[3] = t;
    return tshi_tensor_check("tsh_attention", all, 4) != NULL;
}

/* Checks the mask, casts it, and fills in its strides. */
static int tshi_attention_take_mask(tshi_attention *more, tsh_tensor *const *in, int64_t keys,
                                    tsh_tensor *mask) {
    char text[TSHI_TEXT_SIZE], sizes[TSHI_TEXT_SIZE];
    int64_t dim[4];
    int d, fits = mask->ndim <= 4 && mask->layout.kind == TSH_REPLICATED;
    if (!tshi_attention_holds(in, mask)) return 0;
    memcpy(dim, in[0]->dim, sizeof dim);
    dim[3] = keys;
    for (d = 0; d < 4 && fits; d++) {
        int64_t length = d < 4 - mask->ndim ? 1 : mask->dim[d - (4 - mask->ndim)];
        fits = length == 1 || length == dim[d];
    }
    if (!fits || mask->base->requires_grad)
        return tsh_fail(in[0]->ctx, TSH_ERR_SHAPE,
                        "tsh_attention: mask %s %s; takes a replicated one of %s or i32 without "
                        "gradient that broadcasts to %s",
                        tshi_dtype_name(mask->dtype), tshi_tensor_text(mask, text),
                        tshi_dtype_name(TSH_REAL), tshi_tensor_sizes(dim, 4, sizes)) == TSH_OK;
    more->mask = mask = tsh_cast(mask, tshi_dtypes[mask->dtype].floating ? TSH_REAL : TSH_I32);
    for (d = 0; d < 4 && mask; d++) {
        int own = d - (4 - mask->ndim);
        more->mask_stride[d] = own < 0 || mask->dim[own] == 1 ? 0 : mask->stride[own];
    }
    return mask != NULL;
}

/* Checks that x fits the cache at position past. */
static int tshi_attention_fits_cache(tsh_tensor *const *in, const tsh_tensor *x, tsh_tensor *cache,
                                     int64_t past) {
    char tx[TSHI_TEXT_SIZE], tc[TSHI_TEXT_SIZE];
    int d, fits = cache->ndim == 4 && (cache->flags & TSHI_OWNED) && cache->dtype == x->dtype;
    if (!tshi_attention_holds(in, cache)) return 0;
    for (d = 0; d < 4 && fits; d++) fits = d == 2 || cache->dim[d] == x->dim[d];
    if (fits && past >= 0 && past <= cache->dim[2] - x->dim[2] &&
        tshi_layout_equal(&x->layout, &cache->layout, x->dim, x->ctx->tp.size))
        return 1;
    return tsh_fail(x->ctx, TSH_ERR_SHAPE,
                    "tsh_attention: %s at position %lld does not go into the cache %s",
                    tshi_tensor_text(x, tx), (long long)past,
                    tshi_tensor_text(cache, tc)) == TSH_OK;
}

/* Checks all options, before a cache is written to, and resolves them. */
static int tshi_attention_options(tsh_tensor *const *in, const tsh_attention_desc *desc,
                                  tshi_attention *more) {
    tsh_ctx *ctx = in[0]->ctx;
    int64_t keys = in[1]->dim[2];
    memset(more, 0, sizeof *more);
    more->scale = 1 / sqrt((double)(in[0]->dim[3] ? in[0]->dim[3] : 1));
    if (!desc) return 1;
    if (!(desc->dropout >= 0 && desc->dropout <= 1))
        return tsh_fail(ctx, TSH_ERR_ARGUMENT, "tsh_attention: dropout is %g, not within [0, 1]",
                        desc->dropout) == TSH_OK;
    if (desc->cache_k || desc->cache_v) {
        if (!desc->cache_k || !desc->cache_v || tshi_tape_records(ctx, in, 3))
            return tsh_fail(
                       ctx, TSH_ERR_STATE,
                       "tsh_attention: a cache is for both k and v, and for work without gradients "
                       "(tsh_no_grad_begin)") == TSH_OK;
        if (!tshi_attention_fits_cache(in, in[1], desc->cache_k, desc->past) ||
            !tshi_attention_fits_cache(in, in[2], desc->cache_v, desc->past))
            return 0;
        keys += desc->past;
    }
    if (desc->mask && !tshi_attention_take_mask(more, in, keys, desc->mask)) return 0;
    more->causal = desc->causal;
    if (desc->scale > 0 || desc->scale < 0) more->scale = desc->scale;
    more->dropout = desc->dropout > 0;
    if (more->dropout) more->drop = tshi_map_next_mask(ctx, desc->dropout, desc->owner);
    return 1;
}

/* Copies x to its cache at position past. Returns the part of the cache up to there. */
static tsh_tensor *tshi_attention_append(tsh_tensor *x, tsh_tensor *cache, int64_t past) {
    tsh_tensor *place = tsh_slice(cache, 2, past, x->dim[2]);
    tshi_loop loop;
    if (!place) return NULL;
    tshi_kernel_space(&loop, x);
    tshi_kernel_tensor(&loop, place);
    tshi_kernel_tensor(&loop, x);
    tshi_kernel_run(&loop, tshi_kernel_copy, NULL);
    return tsh_slice(cache, 2, 0, past + x->dim[2]);
}

static const tshi_op tshi_attention_op = {
    "tsh_attention",         "q k v mask",
    tshi_rule_attention,     tshi_attention_backward,
    TSHI_Q | TSHI_K | TSHI_V | TSHI_MASK | TSHI_OUT, 0};

TSH_API tsh_tensor *tsh_attention(tsh_tensor *q, tsh_tensor *k, tsh_tensor *v,
                                  const tsh_attention_desc *desc) {
    const tshi_op *op = &tshi_attention_op;
    tsh_tensor *in[4] = {q, k, v, NULL}, *out;
    tsh_ctx *ctx = tshi_tensor_check_floating("tsh_attention", in, 3);
    tshi_output output;
    tshi_attention more;
    tshi_block *aux, *unrounded;
    tshi_heads all;
    if (!ctx || !tshi_attention_shapes(in) || !tshi_rule_run(op, in, 3, NULL, &output) ||
        !tshi_attention_options(in, desc, &more))
        return NULL;
    output.shape = tsh_shape_of(q);
    if (desc && desc->cache_k) in[1] = tshi_attention_append(k, desc->cache_k, desc->past);
    if (desc && desc->cache_v) in[2] = tshi_attention_append(v, desc->cache_v, desc->past);
    if (!in[1] || !in[2]) return NULL;
    out = tshi_tensor_out(ctx, "tsh_attention", q->dtype, &output.shape, &output.layout);
    aux = out ? tshi_mem_alloc(ctx, TSH_MEM_STEP,
                               tshi_dtype_reals(2 * q->local[0] * q->local[1] * q->dim[2]))
              : NULL;
    if (!aux) return NULL;
    tshi_attention_begin(&all, in, out, &more);
    if (more.mask) all.head.mask_values = tshi_tensor_at(more.mask);
    /* q is a view of (B, T, H, D): give out the same strides, so that merging heads copies nothing
     */
    if (q->stride[1] < q->stride[2] && out->dtype == TSH_REAL) {
        out->stride[1] = q->dim[3];
        out->stride[2] = q->dim[3] * q->local[1];
    }
    for (int i = 0; i < 3; i++)
        all.value[i] = tshi_kernel_reals_of(in[i], all.stride[i], &all.converted[i]);
    all.value[3] = tshi_kernel_output(out, &unrounded);
    memcpy(all.stride[3], out->stride, sizeof out->stride);
    all.stats = (tsh_real *)tshi_mem_data(aux);
    tshi_attention_run(&all);
    tshi_kernel_output_done(out, unrounded);
    in[3] = more.mask;
    tshi_map_record(op, out, in, 4, output.partial, &more, sizeof more, aux);
    return ctx->error.code == TSH_OK ? out : NULL;
}

/* ========================================================================== */
/* >>op-loss                                          MARK: - op-loss (private) */
/* Cross-entropy; the classes may be sharded.                                  */
/* Needs: >>redistribute.                                                       */
/* ========================================================================== */

/* Rows i of logits x (rows, V), classes c; class weights w_c (1 if none are given), probabilities
 * t_ic (1[c = y] for a class index y), label smoothing e, factor z of the z-loss:
 *   m_i = max_c x_ic                                 all-reduce MAX if classes are sharded
 *   S_i = sum_c e^(x_ic - m_i)                       all-reduce SUM of all sums in one call
 *   A_i = sum_c w_c t_ic                             (w_y, not summed, for an index if w is
 *   B_i = sum_c w_c t_ic (x_ic - m_i)                replicated)
 *   Q_i = sum_c w_c (x_ic - m_i), W_i = sum_c w_c, V_i = sum_c 1, over x_ic > -inf, for e > 0
 *   a_i = (1 - e) A_i + e / V_i W_i
 *   l_i = a_i log S_i - (1 - e) B_i - e / V_i Q_i + z (m_i + log S_i)^2
 *   dx_ic = g_i (e^(x_ic - m_i - log S_i) (a_i + 2 z (m_i + log S_i))
 *                - (1 - e) w_c t_ic - e / V_i w_c), no collective
 * A class with logit -inf is padding: it does not count in V, is not smoothed, and has gradient 0.
 * m_i and log S_i are added only for the z-loss: log S_i would lose digits if m_i is large. */
enum { TSHI_TARGET_ELSEWHERE = -1, TSHI_TARGET_IGNORED = -2 };
enum { TSHI_LOSS_A, TSHI_LOSS_B, TSHI_LOSS_Q, TSHI_LOSS_V, TSHI_LOSS_W, TSHI_LOSS_TERMS };
enum { TSHI_LOSS_SUMS = 1 + TSHI_LOSS_TERMS, TSHI_LOSS_KEPT = 5 };

typedef struct tshi_loss {
    tsh_cross_entropy_desc desc;
    int64_t rows, classes, step; /* local; elements between rows of the logits */
    int probs; /* 1: the target is probabilities */
    int cut;   /* 1: classes are sharded over several ranks */
    /* The sums of all rows are one array, (sums, rows): S, B, then those that are needed. */
    int sums, at[TSHI_LOSS_TERMS]; /* at: the index of each; 0: not needed */
    double divisor;
    /* What backward reads of each row, in the node's aux: */
    int64_t *local;          /* the local index of its class, or TSHI_TARGET_... */
    tsh_real *max, *log_sum; /* m, log S */
    tsh_real *own, *uniform; /* A, e / V */
    tsh_real *scale;         /* of the softmax: a + 2 z (m + log S) */
} tshi_loss;

/* -- kernels ---------------------------------------------------------------- */

TSHI_INLINE int tshi_loss_padding(tsh_real x) {
    return x <= -TSHI_R(INFINITY);
}

/* Operands of the kernels over n rows; the step of logits X is that from row to row, of WEIGHT 0.
 */
enum { TSHI_LOSS_X, TSHI_LOSS_MAX, TSHI_LOSS_SUM, TSHI_LOSS_SCRATCH };
enum { TSHI_LOSS_WEIGHT = TSHI_LOSS_SCRATCH + 1, TSHI_LOSS_TARGET, TSHI_LOSS_OPERANDS };
enum { TSHI_LOSS_M, TSHI_LOSS_S, TSHI_LOSS_BOTH };
typedef struct tshi_loss_work {
    int64_t classes;
    int which; /* what tshi_loss_softmax, or tshi_loss_term, computes */
} tshi_loss_work;

/* m and S of a row in one pass over parts of it; S so far is scaled when m grows. */
TSHI_INLINE tsh_real tshi_loss_online(const tsh_real *x, int64_t n, tsh_real *m, int fused) {
    enum { PART = 512 };
    tsh_real lane[TSHI_BLOCK], max = -TSHI_R(INFINITY);
    for (int i = 0; i < TSHI_BLOCK; i++) lane[i] = 0;
    for (; n > 0; n -= PART, x += PART) {
        const int64_t part = tshi_base_min(PART, n);
        const tsh_real here = tshi_kernel_max(x, part);
        if (!(here <= max) && max == max) {
            const tsh_real scale = tshi_loss_padding(max) ? 0 : tshi_math_exp(max - here, fused);
            for (int i = 0; i < TSHI_BLOCK; i++) lane[i] *= scale;
            max = here;
        }
        if (!tshi_loss_padding(max)) tshi_kernel_add_exps(lane, x, part, max, NULL, fused);
    }
    *m = max;
    return tshi_kernel_fold(lane) + (max - max);
}

/* m of n rows, or S from m, or both. */
TSHI_INLINE void tshi_loss_softmax_body(int64_t n, const tshi_operand *operand,
                                        const tshi_loss_work *work, int fused) {
    const tsh_real *x = (const tsh_real *)operand[TSHI_LOSS_X].data;
    tsh_real *m = (tsh_real *)operand[TSHI_LOSS_MAX].data;
    tsh_real *sum = (tsh_real *)operand[TSHI_LOSS_SUM].data;
    for (int64_t i = 0; i < n; i++, x += operand[TSHI_LOSS_X].step) {
        if (work->which == TSHI_LOSS_BOTH)
            sum[i] = tshi_loss_online(x, work->classes, m + i, fused);
        else if (work->which == TSHI_LOSS_S)
            sum[i] = tshi_kernel_sum_exps(x, work->classes, m[i], NULL, fused);
        else
            m[i] = work->classes ? tshi_kernel_max(x, work->classes) : -TSHI_R(INFINITY);
    }
}
TSHI_KERNEL_FUSED(tshi_loss_softmax, tshi_loss_work);

/* One of A, B, Q, V, W of n rows, from x and m; weights and dense targets may be NULL. */
TSHI_INLINE void tshi_loss_term_body(int64_t n, const tshi_operand *operand,
                                     const tshi_loss_work *work) {
    const tsh_real *x = (const tsh_real *)operand[TSHI_LOSS_X].data;
    const tsh_real *m = (const tsh_real *)operand[TSHI_LOSS_MAX].data;
    const tsh_real *w = (const tsh_real *)operand[TSHI_LOSS_WEIGHT].data;
    const tsh_real *t = (const tsh_real *)operand[TSHI_LOSS_TARGET].data;
    tsh_real *sum = (tsh_real *)operand[TSHI_LOSS_SUM].data;
    tsh_real *TSHI_RESTRICT e = (tsh_real *)operand[TSHI_LOSS_SCRATCH].data;
    const int64_t classes = work->classes;
    const int which = work->which;
    for (int64_t i = 0; i < n; i++, x += operand[TSHI_LOSS_X].step) {
        const tsh_real *share = t ? t + i * classes : NULL;
        TSHI_EACH for (int64_t c = 0; c < classes; c++) {
            const tsh_real weight = w ? w[c] : TSHI_R(1);
            if (which == TSHI_LOSS_A)
                e[c] = weight * share[c];
            else if (which == TSHI_LOSS_B)
                e[c] = share[c] == 0 ? TSHI_R(0) : TSHI_R(weight * share[c] * (x[c] - m[i]));
            else if (tshi_loss_padding(x[c]))
                e[c] = 0;
            else
                e[c] = which == TSHI_LOSS_Q   ? TSHI_R(weight * (x[c] - m[i]))
                       : which == TSHI_LOSS_W ? weight
                                              : TSHI_R(1);
        }
        sum[i] = tshi_kernel_sum(e, classes);
    }
}
TSHI_KERNEL(tshi_loss_term, tshi_loss_work);

/* One row: dx = or += g e^(x - m - log S). Operands: dx, x, which may be dx. */
typedef struct tshi_loss_row {
    double g, max, log_sum;
    int add; /* 1: dx += ..., 0: dx = ... */
} tshi_loss_row;
TSHI_INLINE void tshi_loss_grad_body(int64_t n, const tshi_operand *operand,
                                     const tshi_loss_row *row, int fused) {
    tsh_real pad[TSHI_BLOCK], dx[TSHI_BLOCK];
    const tsh_real *x;
    const tsh_real max = TSHI_R(row->max), log_sum = TSHI_R(row->log_sum);
    const tsh_real g = TSHI_R(row->g) + (log_sum - log_sum); /* NaN if log S is not finite */
    for (int64_t e = 0; e < n; e += TSHI_BLOCK) {
        x = tshi_kernel_load(&operand[1], e, n, pad);
        TSHI_LANES for (int i = 0; i < TSHI_BLOCK; i++)
            dx[i] = g * tshi_math_exp_below(x[i] - max - log_sum, fused);
        tshi_kernel_store(&operand[0], e, n, dx, row->add);
    }
}
TSHI_KERNEL_FUSED(tshi_loss_grad, tshi_loss_row);

/* One row: dx -= g w_c ((1 - e) t_c + e / V). Operands: dx, x, w, t; w and t may be NULL. */
typedef struct tshi_loss_shares {
    double own, uniform; /* g (1 - e), g e / V */
} tshi_loss_shares;
TSHI_INLINE void tshi_loss_share_body(int64_t n, const tshi_operand *operand,
                                      const tshi_loss_shares *shares) {
    const int64_t step = operand[0].step;
    tsh_real *TSHI_RESTRICT dx = (tsh_real *)operand[0].data;
    const tsh_real *TSHI_RESTRICT x = (const tsh_real *)operand[1].data;
    const tsh_real *w = (const tsh_real *)operand[2].data, *t = (const tsh_real *)operand[3].data;
    const tsh_real own = TSHI_R(shares->own), uniform = TSHI_R(shares->uniform);
    TSHI_EACH for (int64_t c = 0; c < n; c++) {
        const tsh_real share = (t ? TSHI_R(own * t[c]) : TSHI_R(0)) +
                               (tshi_loss_padding(x[c]) ? TSHI_R(0) : uniform);
        dx[c * step] -= w ? TSHI_R(w[c] * share) : share;
    }
}
TSHI_KERNEL(tshi_loss_share, tshi_loss_shares);

/* -- backward --------------------------------------------------------------- */

/* What the threads share in backward. */
typedef struct tshi_loss_job {
    const tshi_node *node;
    tshi_dest dest;
    const tsh_real *x, *t, *w; /* logits; probabilities and class weights, or NULL */
    int64_t step;              /* between rows of x */
} tshi_loss_job;

/* A thread's part of backward: the rows [from, to). */
static void tshi_loss_backward_rows(void *job, int piece, int64_t from, int64_t to) {
    const tshi_loss_job *work = (const tshi_loss_job *)job;
    const tshi_node *node = work->node;
    const tshi_loss *loss = (const tshi_loss *)node->params;
    const tsh_real *g = tshi_tape_grad(node);
    const tsh_tensor *x = node->in[0];
    int64_t i, c, step = 0, rows = 0, last = x->stride[x->ndim - 1];
    const double keep = 1 - loss->desc.label_smoothing;
    (void)piece;
    (void)tshi_kernel_rows(x, &rows, &step);
    for (i = from; i < to; i++) {
        const double each = (double)(loss->desc.reduction == TSH_REDUCE_NONE ? g[i] : g[0]) /
                            loss->divisor;
        const tshi_loss_row row = {each * (double)loss->scale[i], (double)loss->max[i],
                                   (double)loss->log_sum[i], work->dest.add};
        const tshi_loss_shares shares = {each * keep, each * (double)loss->uniform[i]};
        tsh_real *dx = work->dest.data + i * step;
        const tshi_operand operand[4] = {
            tshi_kernel_reals(dx, last), tshi_kernel_reals(work->x + i * work->step, 1),
            tshi_kernel_reals(work->w, 1),
            tshi_kernel_reals(work->t ? work->t + i * loss->classes : NULL, 1)};
        if (loss->local[i] == TSHI_TARGET_IGNORED) {
            for (c = 0; c < loss->classes && !work->dest.add; c++) dx[c * last] = 0;
            continue;
        }
        tshi_loss_grad[x->ctx->isa](loss->classes, operand, &row);
        if (loss->probs || loss->desc.label_smoothing > 0)
            tshi_loss_share[x->ctx->isa](loss->classes, operand, &shares);
        if (loss->local[i] >= 0)
            dx[loss->local[i] * last] -= TSHI_R(each * keep * (double)loss->own[i]);
    }
}

static void tshi_loss_backward(tshi_node *node) {
    const tshi_loss *loss = (const tshi_loss *)node->params;
    tsh_ctx *ctx = node->out->ctx;
    /* one pass reads and writes a row: dx may take the memory of x */
    const int once = !loss->probs && !(loss->desc.label_smoothing > 0) &&
                     node->in[0]->dtype == TSH_REAL;
    tshi_block *scratch[3] = {NULL, NULL, NULL};
    int64_t stride[TSH_MAX_DIMS];
    tshi_loss_job work;
    memset(&work, 0, sizeof work);
    work.node = node;
    work.x = tshi_tape_saved_reals(node, 0, stride, &scratch[0]);
    work.step = scratch[0] ? loss->classes : loss->step;
    if (loss->probs) work.t = tshi_tape_saved_reals(node, 1, stride, &scratch[1]);
    if (node->saved[2]) work.w = tshi_tape_saved_reals(node, 2, stride, &scratch[2]);
    if (ctx->error.code == TSH_OK && (once ? tshi_tape_dest_over(node, 0, &work.dest)
                                           : tshi_tape_dest(node, 0, &work.dest)))
        tshi_team_run(tshi_kernel_parts(ctx, loss->rows, loss->classes), loss->rows, 1,
                      tshi_loss_backward_rows, &work);
    for (int i = 0; i < 3; i++) tshi_mem_release(ctx, scratch[i]);
}

/* -- checks ----------------------------------------------------------------- */

/* Checks the options. */
static int tshi_loss_options(tsh_ctx *ctx, const tsh_cross_entropy_desc *desc, int probs) {
    if ((unsigned)desc->reduction > (unsigned)TSH_REDUCE_NONE)
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT, "tsh_cross_entropy: %d is no reduction",
                       (int)desc->reduction);
    else if (!(desc->label_smoothing >= 0 && desc->label_smoothing <= 1))
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT,
                       "tsh_cross_entropy: label_smoothing is %g, not within [0, 1]",
                       desc->label_smoothing);
    else if (!(desc->z_loss >= 0 && desc->z_loss < (double)INFINITY))
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT,
                       "tsh_cross_entropy: z_loss is %g, not a finite factor from 0 up",
                       desc->z_loss);
    else if (probs && desc->ignore)
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT,
                       "tsh_cross_entropy: ignore_index %lld is for integer targets; rows of "
                       "probabilities are left out by giving them only zeros",
                       (long long)desc->ignore_index);
    else
        return 1;
    return 0;
}

/* Checks the shapes of logits, target and class weights (may be NULL). A target is integers of the
 * shape of the rows, or probabilities of the logits' shape. */
static int tshi_loss_shapes(tsh_tensor *const *in) {
    tsh_tensor *x = in[0], *target = in[1], *weight = in[2];
    char tx[TSHI_TEXT_SIZE], tt[TSHI_TEXT_SIZE];
    const int probs = tshi_dtypes[target->dtype].floating;
    int fits = x->ndim == target->ndim + !probs && x->ndim > 0;
    for (int d = 0; d < target->ndim && fits; d++) fits = x->dim[d] == target->dim[d];
    if (!fits)
        (void)tsh_fail(x->ctx, TSH_ERR_SHAPE,
                       "tsh_cross_entropy: logits %s and target %s %s; takes (.., V) and integers "
                       "(..), or probabilities (.., V)",
                       tshi_tensor_text(x, tx), tshi_dtype_name(target->dtype),
                       tshi_tensor_text(target, tt));
    else if (weight && tshi_tensor_check_floating("tsh_cross_entropy: weight", &weight, 1) &&
             (weight->ndim != 1 || weight->dim[0] != x->dim[x->ndim - 1]))
        (void)tsh_fail(x->ctx, TSH_ERR_SHAPE,
                       "tsh_cross_entropy: logits %s have %lld classes, weight is %s",
                       tshi_tensor_text(x, tx), (long long)x->dim[x->ndim - 1],
                       tshi_tensor_text(weight, tt));
    return x->ctx->error.code == TSH_OK;
}

/* This rank's shard of t in a layout, dense and without a gradient. t is replicated, or has the
 * layout already. */
static tsh_tensor *tshi_loss_shard(tsh_tensor *t, const tsh_layout *layout) {
    tsh_ctx *ctx = t->ctx;
    tsh_no_grad_begin(ctx);
    t = tsh_redistribute(t, *layout);
    if (t) t = tshi_redistribute_window("tsh_cross_entropy", &t);
    tsh_no_grad_end(ctx);
    return t;
}

/* Fills in *loss, and replaces logits, probabilities and weights by copies if their layout or
 * strides are not what the kernels take. 0: an error. */
static int tshi_loss_plan(tsh_tensor **in, const tsh_cross_entropy_desc *desc, tshi_loss *loss) {
    tsh_tensor *x = in[0];
    int last = x->ndim - 1, cut = x->layout.kind == TSH_SHARDED && x->layout.dim == last;
    tsh_layout classes = x->layout;
    memset(loss, 0, sizeof *loss);
    loss->probs = tshi_dtypes[in[1]->dtype].floating;
    if (x->stride[last] != 1 || !tshi_kernel_rows(x, &loss->rows, &loss->step))
        in[0] = x = tshi_map_copy("tsh_cross_entropy", x);
    if (x && loss->probs) in[1] = tshi_loss_shard(in[1], &x->layout);
    if (!x || !in[1]) return 0;
    (void)tshi_kernel_rows(x, &loss->rows, &loss->step);
    loss->classes = x->local[last];
    loss->desc = *desc;
    loss->cut = cut && x->ctx->tp.size > 1;
    loss->divisor = 1;
    loss->sums = 2;
    loss->at[TSHI_LOSS_B] = 1;
    if (loss->probs || (in[2] && in[2]->layout.kind == TSH_SHARDED))
        loss->at[TSHI_LOSS_A] = loss->sums++;
    for (int t = TSHI_LOSS_Q; t <= TSHI_LOSS_W && desc->label_smoothing > 0; t++)
        if (t != TSHI_LOSS_W || in[2]) loss->at[t] = loss->sums++;
    if (!in[2]) return 1;
    classes.dim = 0;
    if (!cut) classes = tsh_replicated();
    in[2] = tshi_loss_shard(in[2], &classes);
    return in[2] != NULL;
}

/* -- forward ---------------------------------------------------------------- */

/* Reports that target y, of local row i, is out of range. */
static void tshi_loss_outside(const tsh_tensor *target, int64_t y, int64_t i, int64_t classes) {
    int64_t row = 0, size = 1; /* the global index of the row; rows that dimension d moves on */
    for (int d = target->ndim - 1; d >= 0; d--) {
        row += tshi_tensor_global(target, d, i % target->local[d]) * size;
        i /= target->local[d];
        size *= target->dim[d];
    }
    (void)tsh_fail(target->ctx, TSH_ERR_ARGUMENT,
                   "tsh_cross_entropy: target %lld at row %lld is outside [0, %lld)", (long long)y,
                   (long long)row, (long long)classes);
}

/* Fills in loss->local from class indices, and loss->own with the weight of each class, if this
 * rank has it. An index out of range is an error. */
static void tshi_loss_targets(tsh_tensor *const *in, const tshi_loss *loss) {
    const tsh_tensor *x = in[0], *target = in[1], *w = in[2], *given = loss->desc.weight;
    const tsh_real *all = w && given->layout.kind == TSH_REPLICATED ? tshi_tensor_values(given)
                                                                    : NULL;
    const int64_t n = tsh_local_numel(target), classes = x->dim[x->ndim - 1];
    tshi_block *scratch;
    const void *values = tshi_kernel_packed(target, &scratch);
    for (int64_t i = 0; i < n && x->ctx->error.code == TSH_OK; i++) {
        const int64_t y = tshi_tensor_integer(target, values, i);
        loss->local[i] = TSHI_TARGET_IGNORED;
        loss->own[i] = 0;
        if (y == (loss->desc.ignore ? loss->desc.ignore_index : -100)) continue;
        if (y < 0 || y >= classes) {
            tshi_loss_outside(target, y, i, classes);
            continue;
        }
        loss->local[i] = tshi_tensor_local(x, x->ndim - 1, y); /* or TSHI_TARGET_ELSEWHERE */
        if (!w || all)
            loss->own[i] = all ? all[y * given->stride[0]] : TSHI_R(1);
        else if (loss->local[i] >= 0)
            loss->own[i] = tshi_tensor_values(w)[loss->local[i]];
    }
    tshi_mem_release(x->ctx, scratch);
}

/* Runs a kernel over all rows by the rank's threads; it computes `which`. */
static void tshi_loss_run(const tsh_ctx *ctx, const tshi_loss *loss, const tshi_kernel_fn *kernel,
                          const tshi_operand *x, int which) {
    const tshi_loss_work params = {loss->classes, which};
    tshi_rows work = tshi_kernel_rows_job(kernel[ctx->isa], loss->rows, &params);
    memcpy(work.x, x, TSHI_LOSS_OPERANDS * sizeof *x);
    work.own[TSHI_LOSS_SCRATCH] = loss->classes;
    tshi_kernel_run_rows(ctx, &work, loss->classes);
}

/* Computes this rank's part of the sums other than S. x: operands of the kernels. */
static void tshi_loss_terms(const tsh_ctx *ctx, const tshi_loss *loss, tsh_real *sums,
                            tshi_operand *x) {
    const tsh_real *values = (const tsh_real *)x[TSHI_LOSS_X].data;
    int64_t i, n = loss->rows;
    tsh_real *picked = sums + n; /* B */
    tsh_real *own = loss->at[TSHI_LOSS_A] ? sums + n * loss->at[TSHI_LOSS_A] : NULL;
    for (int which = loss->probs ? TSHI_LOSS_A : TSHI_LOSS_Q; which <= TSHI_LOSS_W; which++) {
        x[TSHI_LOSS_SUM] = tshi_kernel_reals(sums + n * loss->at[which], 1);
        if (loss->at[which]) tshi_loss_run(ctx, loss, tshi_loss_term, x, which);
    }
    for (i = 0; i < n && !loss->probs; i++) {
        int64_t y = loss->local[i];
        picked[i] = y >= 0 ? values[i * x[TSHI_LOSS_X].step + y] - loss->max[i] : 0;
        if (own) own[i] = y >= 0 ? loss->own[i] : 0;
    }
}

/* Computes the row losses from the complete sums, and what backward reads. B of an index is without
 * its weight, loss->own. */
static void tshi_loss_combine(const tshi_loss *loss, const tsh_real *sums, tsh_real *losses) {
    const int *at = loss->at, smooth = at[TSHI_LOSS_Q] > 0;
    const tsh_real *own = sums + loss->rows * at[TSHI_LOSS_A];
    const tsh_real *q = sums + loss->rows * at[TSHI_LOSS_Q], *v = q + loss->rows;
    const tsh_real *all = at[TSHI_LOSS_W] ? sums + loss->rows * at[TSHI_LOSS_W] : v;
    const tsh_real keep = TSHI_R(1 - loss->desc.label_smoothing), z = TSHI_R(loss->desc.z_loss);
    for (int64_t i = 0; i < loss->rows; i++) {
        tsh_real log_sum = tshi_math_log(sums[i], TSHI_FUSED), a, b = sums[loss->rows + i];
        tsh_real lse = loss->max[i] + log_sum;
        if (at[TSHI_LOSS_A]) loss->own[i] = own[i];
        loss->log_sum[i] = log_sum;
        loss->uniform[i] = smooth ? TSHI_R(loss->desc.label_smoothing) / v[i] : 0;
        a = keep * loss->own[i];
        if (smooth) a += loss->uniform[i] * all[i];
        losses[i] = a * log_sum - keep * (loss->probs ? b : TSHI_R(loss->own[i] * b));
        if (smooth) losses[i] -= loss->uniform[i] * q[i];
        if (loss->desc.z_loss > 0) losses[i] += z * lse * lse;
        loss->scale[i] = loss->desc.z_loss > 0 ? TSHI_R(a + 2 * z * lse) : a;
        if (loss->local[i] == TSHI_TARGET_IGNORED) losses[i] = 0;
    }
}

/* Computes the row losses in one pass over the logits; if classes are sharded in two, with an
 * all-reduce after each. sums: (TSHI_LOSS_SUMS, rows), the losses, a row of classes per piece. */
static void tshi_loss_rows(tsh_ctx *ctx, const tshi_loss *loss, tshi_operand *x, tsh_real *sums,
                           tsh_real *losses) {
    const int64_t n = loss->rows;
    x[TSHI_LOSS_MAX] = tshi_kernel_reals(loss->max, 1);
    x[TSHI_LOSS_SUM] = tshi_kernel_reals(sums, 1);
    x[TSHI_LOSS_SCRATCH] = tshi_kernel_reals(sums + (TSHI_LOSS_SUMS + 1) * n, 0);
    tshi_loss_run(ctx, loss, tshi_loss_softmax, x, loss->cut ? TSHI_LOSS_M : TSHI_LOSS_BOTH);
    if (loss->cut) {
        (void)tshi_error_comm(ctx, tsh_allreduce(&ctx->tp, loss->max, n, TSH_REAL, TSH_MAX),
                              "tsh_cross_entropy: all-reduce of the row maxima");
        tshi_loss_run(ctx, loss, tshi_loss_softmax, x, TSHI_LOSS_S);
    }
    tshi_loss_terms(ctx, loss, sums, x);
    if (loss->cut)
        (void)tshi_error_comm(ctx, tsh_allreduce(&ctx->tp, sums, loss->sums * n, TSH_REAL, TSH_SUM),
                              "tsh_cross_entropy: all-reduce of the row sums");
    tshi_loss_combine(loss, sums, losses);
}

/* Fills in the operands logits, probabilities and weights; those that are no tsh_real are converted
 * to scratch. 0: no memory. */
static int tshi_loss_inputs(tsh_tensor *const *in, const tshi_loss *loss, tshi_operand *x,
                            tshi_block **scratch) {
    static const int place[3] = {TSHI_LOSS_X, TSHI_LOSS_TARGET, TSHI_LOSS_WEIGHT};
    const int64_t step[3] = {loss->step, loss->classes, 0};
    int64_t stride[TSH_MAX_DIMS];
    memset(x, 0, TSHI_LOSS_OPERANDS * sizeof *x);
    for (int i = 0; i < 3; i++) {
        const int used = in[i] && (i != 1 || loss->probs);
        tsh_real *values = used ? tshi_kernel_reals_of(in[i], stride, &scratch[i]) : NULL;
        x[place[i]] = tshi_kernel_reals(values, i == 0 && scratch[0] ? loss->classes : step[i]);
    }
    return in[0]->ctx->error.code == TSH_OK;
}

/* out = the sum or mean of the row losses. The divisor of a mean is global: the number of rows, for
 * class indices the sum of their weights. If rows are sharded, out is a partial sum. */
static void tshi_loss_reduce(const tsh_tensor *x, tshi_loss *loss, const tsh_real *losses,
                             tsh_tensor *out) {
    tsh_ctx *ctx = x->ctx;
    double total = 0, count = 0;
    for (int64_t i = 0; i < loss->rows; i++) total += (double)losses[i];
    if (loss->desc.reduction == TSH_REDUCE_MEAN) {
        for (int64_t i = 0; i < loss->rows; i++) count += (double)loss->own[i];
        if (loss->probs)
            count = (double)tshi_tensor_product(x->dim, x->ndim - 1);
        else if (out->layout.kind == TSH_PARTIAL && ctx->tp.size > 1)
            (void)tshi_error_comm(ctx, tsh_allreduce(&ctx->tp, &count, 1, TSH_F64, TSH_SUM),
                                  "tsh_cross_entropy: all-reduce of the number of rows");
        /* divided by infinity, the loss and its gradients are 0 */
        loss->divisor = count < 0 || count > 0 || !loss->desc.empty_zero ? count : (double)INFINITY;
    }
    tshi_tensor_values(out)[0] = TSHI_R(total / loss->divisor);
}

/* Computes out, and what backward reads; sums is scratch. */
static void tshi_loss_forward(tsh_tensor *const *in, tshi_loss *loss, tsh_real *sums,
                              tsh_tensor *out) {
    const int reduced = loss->desc.reduction != TSH_REDUCE_NONE;
    tsh_real *losses = reduced ? sums + TSHI_LOSS_SUMS * loss->rows : tshi_tensor_values(out);
    tsh_ctx *ctx = in[0]->ctx;
    tshi_block *converted[3] = {NULL, NULL, NULL};
    tshi_operand x[TSHI_LOSS_OPERANDS];
    for (int64_t i = 0; i < loss->rows; i++) loss->local[i] = TSHI_TARGET_ELSEWHERE;
    if (!loss->probs) tshi_loss_targets(in, loss);
    if (ctx->error.code == TSH_OK && tshi_loss_inputs(in, loss, x, converted))
        tshi_loss_rows(ctx, loss, x, sums, losses);
    for (int i = 0; i < 3; i++) tshi_mem_release(ctx, converted[i]);
    if (ctx->error.code == TSH_OK && reduced) tshi_loss_reduce(in[0], loss, losses, out);
}

static const tshi_op tshi_loss_op = {
    "tsh_cross_entropy",     "logits target weight",
    tshi_rule_cross_entropy, tshi_loss_backward,
    TSHI_LOGITS | TSHI_TARGET | TSHI_CLASS_WEIGHTS, 0};

TSH_API tsh_tensor *tsh_cross_entropy(tsh_tensor *logits, tsh_tensor *target,
                                      const tsh_cross_entropy_desc *desc) {
    const tshi_op *op = &tshi_loss_op;
    tsh_cross_entropy_desc usual;
    tsh_tensor *in[3] = {logits, target, desc ? desc->weight : NULL}, *out;
    tsh_ctx *ctx = tshi_tensor_check(op->name, in, in[2] ? 3 : 2);
    tshi_output output;
    tshi_block *aux, *sums;
    tshi_loss loss;
    int64_t scratch;
    memset(&usual, 0, sizeof usual);
    if (!desc) desc = &usual;
    if (!ctx || !tshi_tensor_check_floating(op->name, in, 1) ||
        !tshi_loss_options(ctx, desc, tshi_dtypes[target->dtype].floating) ||
        !tshi_loss_shapes(in) || !tshi_rule_run(op, in, 3, &desc->reduction, &output) ||
        !tshi_loss_plan(in, desc, &loss))
        return NULL;
    output.shape = tsh_shape_of(logits);
    output.shape.ndim = desc->reduction == TSH_REDUCE_NONE ? logits->ndim - 1 : 0;
    out = tshi_tensor_out(ctx, "tsh_cross_entropy", TSH_REAL, &output.shape, &output.layout);
    aux = out ? tshi_mem_alloc(ctx, TSH_MEM_STEP,
                               tshi_dtype_reals(TSHI_LOSS_KEPT * loss.rows) +
                                   (size_t)loss.rows * sizeof *loss.local)
              : NULL;
    scratch = tshi_kernel_parts(ctx, loss.rows, loss.classes) * loss.classes;
    sums = aux ? tshi_mem_alloc(ctx, TSH_MEM_STEP,
                                tshi_dtype_reals((TSHI_LOSS_SUMS + 1) * loss.rows + scratch))
               : NULL;
    if (sums) {
        loss.local = (int64_t *)tshi_mem_data(aux);
        loss.max = (tsh_real *)(void *)(loss.local + loss.rows);
        loss.log_sum = loss.max + loss.rows;
        loss.own = loss.log_sum + loss.rows;
        loss.uniform = loss.own + loss.rows;
        loss.scale = loss.uniform + loss.rows;
        tshi_loss_forward(in, &loss, (tsh_real *)tshi_mem_data(sums), out);
    }
    if (ctx->error.code == TSH_OK)
        tshi_map_record(op, out, in, 3, output.partial, &loss, sizeof loss, aux);
    else
        tshi_mem_release(ctx, aux);
    tshi_mem_release(ctx, sums);
    return ctx->error.code == TSH_OK ? out : NULL;
}

/* ========================================================================== */
/* >>op-custom                                      MARK: - op-custom (private) */
/* tsh_custom_op: ops of the user's own.                                       */
/* Needs: >>op-map.                                                             */
/* ========================================================================== */

/* The user's functions get dense inputs and write a dense output, or dense gradients, in scratch
 * that is then added to the gradients of the inputs. */

enum { TSHI_CUSTOM_INPUTS = 8 };

/* The params of a node: the user's descriptor, and a tshi_op made of it. */
typedef struct tshi_custom {
    tshi_op op;
    tsh_custom_desc desc;
} tshi_custom;

static void tshi_custom_backward(tshi_node *node) {
    const tsh_custom_desc *desc = &((const tshi_custom *)node->params)->desc;
    tsh_tensor *out = node->out, *kept[TSHI_CUSTOM_INPUTS];
    tsh_ctx *ctx = out->ctx;
    tsh_real *grad[TSHI_CUSTOM_INPUTS];
    tshi_block *scratch[TSHI_CUSTOM_INPUTS];
    tshi_dest dest[TSHI_CUSTOM_INPUTS];
    int64_t stride[TSH_MAX_DIMS];
    for (int i = 0; i < node->n; i++) {
        size_t bytes = tshi_dtype_reals(tsh_local_numel(node->in[i]));
        kept[i] = tshi_tensor_detached(node->in[i], node->saved[i]);
        scratch[i] = kept[i] && tshi_tape_dest(node, i, &dest[i])
                         ? tshi_mem_alloc(ctx, TSH_MEM_STEP, bytes)
                         : NULL;
        grad[i] = scratch[i] ? (tsh_real *)tshi_mem_data(scratch[i]) : NULL;
        if (grad[i]) memset(grad[i], 0, bytes);
    }
    if (ctx->error.code == TSH_OK)
        desc->backward(desc->user, kept, node->n, (const tsh_real *)tshi_tape_saved(node, node->n),
                       tshi_tape_grad(node), grad);
    for (int i = 0; i < node->n; i++) {
        if (!scratch[i]) continue;
        tshi_tensor_strides(node->in[i]->local, node->in[i]->ndim, stride);
        tshi_tape_accumulate(node->in[i], &dest[i], grad[i], stride);
        tshi_mem_release(ctx, scratch[i]);
    }
}

TSH_API tsh_tensor *tsh_custom_op(tsh_ctx *ctx, tsh_tensor *const *in, int n,
                                  const tsh_custom_desc *desc) {
    tsh_tensor *dense[TSHI_CUSTOM_INPUTS], *out;
    tshi_custom custom;
    if (!ctx || ctx->error.code != TSH_OK) return NULL;
    if (!desc || !desc->forward || !desc->name || n < 1 || n > TSHI_CUSTOM_INPUTS || !in)
        return tshi_error_null(ctx, TSH_ERR_ARGUMENT,
                               "tsh_custom_op: takes a name, a forward and 1 to %d inputs, not %d",
                               TSHI_CUSTOM_INPUTS, n);
    if (!tshi_tensor_check(desc->name, in, n)) return NULL;
    for (int i = 0; i < n; i++) {
        dense[i] = tshi_tensor_is_dense(in[i]) ? in[i] : tshi_map_copy(desc->name, in[i]);
        if (!dense[i]) return NULL;
    }
    out = tshi_tensor_out(ctx, desc->name, TSH_REAL, &desc->shape, &desc->layout);
    if (!out) return NULL;
    desc->forward(desc->user, dense, n, tshi_tensor_values(out));
    if (ctx->error.code != TSH_OK) return NULL;
    memset(&custom, 0, sizeof custom);
    custom.op.name = desc->name;
    if (desc->backward) custom.op.backward = tshi_custom_backward;
    custom.op.saves = ((1u << n) - 1) | (unsigned)TSHI_OUT;
    custom.desc = *desc;
    tshi_map_record(&custom.op, out, dense, n, desc->partial, &custom, sizeof custom, NULL);
    if (out->node) out->node->op = &((const tshi_custom *)out->node->params)->op;
    return out;
}

/* ========================================================================== */
/* >>module                                            MARK: - module (private) */
/* A tree of named modules; parameters are named by path and get their memory  */
/* on first use.                                                                */
/* Needs: >>context >>redistribute.                                             */
/* ========================================================================== */

/* A module is a node of the tree; its kind says what its forward computes. Modules and their texts
 * live in the arena ctx->books until the ctx closes. Invariant: every function that adds a module
 * or changes a layout calls tshi_module_changed, so that the next collective of each group first
 * compares the models of its ranks. tshi_module_run is the one place where a forward is called. */

/* A kind of layer; one constant per layer type, shared by all its modules. */
typedef struct tshi_kind {
    const char *name; /* "linear": in reports, errors and tsh_plan_rule.kind */
    tsh_tensor *(*forward)(tsh_module *module, tsh_tensor **in, int n); /* `in` has n tensors */
    unsigned styles; /* bit 1 << style for each supported style; PREPARE styles: always supported */
    /* Sets the layouts of the parameters under a rule; R before. NULL: all stay R. */
    void (*layouts)(const tsh_module *module, const tsh_plan_rule *rule, tsh_layout *layouts);
} tshi_kind;

enum { TSHI_MODULE_INPUTS = 16 }; /* max inputs of a checkpoint and of a PREPARE_INPUT rule */

/* Joins two names to "a.b", or copies the one that is not empty; the text lives with the ctx. */
/* Returns NULL and sets an error without memory. */
static const char *tshi_module_text(tsh_ctx *ctx, const char *a, const char *b) {
    size_t n = strlen(a) + strlen(b) + 2;
    char *text = (char *)tshi_mem_arena_alloc(ctx, &ctx->books, n);
    if (text) (void)snprintf(text, n, *a && *b ? "%s.%s" : "%s%s", a, b);
    return text;
}

/* -- forward ---------------------------------------------------------------- */

/* Returns the module after `module` in pre-order below root; NULL at the end. */
TSHI_OUTLINE tsh_module *tshi_module_next(const tsh_module *root, tsh_module *module) {
    if (module->first) return module->first;                         /* children first */
    while (module != root && !module->next) module = module->parent; /* else climb */
    return module == root ? NULL : module->next;
}

/* The position of a walk over the parameters below a module, in pre-order: param is
 * module->param[slot]. Before the first step and after the last it is {NULL, NULL, 0}. */
typedef struct tshi_walk {
    tsh_tensor *param;  /* the current parameter; NULL before the first and after the last */
    tsh_module *module; /* the module that the parameter was found in */
    int slot;           /* index into module->param */
} tshi_walk;

/* Steps to the next parameter below root and returns it; NULL at the end. A tied parameter comes
 * once per module that has it. */
TSHI_OUTLINE tsh_tensor *tshi_module_step(tsh_module *root, tshi_walk *at) {
    if (at->module)
        at->slot++; /* continue after the current parameter */
    else
        at->module = root; /* the first call of a walk */
    for (; at->module; at->module = tshi_module_next(root, at->module), at->slot = 0)
        for (; at->slot < TSHI_MODULE_PARAMS; at->slot++)
            if ((at->param = at->module->param[at->slot]) != NULL) return at->param;
    return at->param = NULL; /* at->module is NULL too, so the next call starts again */
}

/* Returns 1 if the walk reaches a parameter for the first time, 0 for a tied one seen before. */
static int tshi_module_first(tsh_module *root, const tshi_walk *at) {
    tshi_walk before = {NULL, NULL, 0}; /* a second walk, from root */
    while (tshi_module_step(root, &before) != at->param) continue;
    return before.module == at->module && before.slot == at->slot;
}

/* As tshi_module_step, but returns a tied parameter only once: in the first module that has it. */
static tsh_tensor *tshi_module_step_once(tsh_module *root, tshi_walk *at) {
    while (tshi_module_step(root, at) && !tshi_module_first(root, at)) continue;
    return at->param;
}

/* Runs a module's forward. Inputs and output are redistributed as the rules of its plan say. */
static tsh_tensor *tshi_module_run(tsh_module *module, tsh_tensor **in, int n) {
    tsh_tensor *ready[TSHI_MODULE_INPUTS], *y; /* inputs after redistribution; output */
    if (module->prepared && n != module->prepared)
        return tshi_error_null(module->ctx, TSH_ERR_ARGUMENT,
                               "tsh_forward: got %d inputs, the plan prepares %d", n,
                               module->prepared);
    for (int i = 0; i < module->prepared; i++)
        ready[i] = in[i] && module->input_layouts[i]
                       ? tsh_redistribute(in[i], *module->input_layouts[i])
                       : in[i];
    y = module->kind->forward(module, module->prepared ? ready : in, n); /* runs the layer's ops */
    /* First the layout of the style rule, then that of the PREPARE_OUTPUT rule. */
    if (y && module->output_layout) y = tsh_redistribute(y, *module->output_layout);
    return y && module->result ? tsh_redistribute(y, *module->result) : y;
}

/* Returns the number of modules of the whole tree, the root included. */
static uint64_t tshi_module_count(tsh_ctx *ctx) {
    uint64_t n = 0;
    for (tsh_module *m = tsh_root(ctx); m; m = tshi_module_next(ctx->root, m)) n++;
    return n;
}

/* ========================================================================== */
/* >>recompute                                    MARK: - recompute (private) */
/* Activation checkpoints: modules that backward computes again.              */
/* Needs: >>module >>tape >>redistribute.                                     */
/* ========================================================================== */

/* Activation checkpointing (Chen et al. 2016). Forward runs without recording; the tape gets one
 * node, which holds the inputs and the counts that random numbers are keyed by. Backward of this
 * node (tshi_recompute_replay) restores the counts, so that dropout draws the same masks, runs the
 * module again on a tape of its own, and runs backward through that tape. Invariant: the recomputed
 * ops may read gradients of outer tensors through the node's inputs only. */
/* One module's count of dropout calls, as it was at the forward. */
typedef struct tshi_module_calls {
    const tsh_module *module; /* the module that the count belongs to */
    uint64_t dropout_calls;   /* module->dropout_calls */
} tshi_module_calls;

/* The counts of the ctx and of all modules, saved at the forward. */
typedef struct tshi_rng_counts {
    tsh_module *module;                  /* the checkpointed module */
    uint64_t randn_calls, dropout_calls; /* ctx->randn_calls and ctx->dropout_calls */
    tshi_module_calls *each;             /* one per module, in pre-order; then a zeroed one */
} tshi_rng_counts;

/* Copies the current counts into the tape's arena; NULL and an error without memory. */
static tshi_rng_counts *tshi_recompute_save_counts(tsh_module *module) {
    tsh_ctx *ctx = module->ctx;
    const size_t n = (size_t)tshi_module_count(ctx) + 1; /* and the entry of zeros at the end */
    tshi_rng_counts *counts = (tshi_rng_counts *)tshi_mem_arena_alloc(
        ctx, &ctx->tape.arena, sizeof *counts + n * sizeof *counts->each);
    size_t i = 0;
    if (!counts) return NULL;
    counts->module = module;
    counts->randn_calls = ctx->randn_calls;
    counts->dropout_calls = ctx->dropout_calls;
    counts->each = (tshi_module_calls *)(void *)(counts + 1); /* `each` lies after the struct */
    for (tsh_module *m = ctx->root; m; m = tshi_module_next(ctx->root, m)) {
        counts->each[i].module = m;
        counts->each[i++].dropout_calls = m->dropout_calls;
    }
    return counts;
}

/* Restores saved counts. A module added since the save gets a count of 0. */
static void tshi_recompute_restore_counts(tsh_ctx *ctx, const tshi_rng_counts *counts) {
    size_t i = 0;
    ctx->randn_calls = counts->randn_calls;
    ctx->dropout_calls = counts->dropout_calls;
    for (tsh_module *m = ctx->root; m; m = tshi_module_next(ctx->root, m))
        m->dropout_calls = counts->each[i].module == m ? counts->each[i++].dropout_calls : 0;
}

/* Checks that the recomputed ops read no outer tensor that requires a gradient, except the
 * checkpoint's inputs: its gradient might be all-reduced already. Else sets and returns an
 * error. */
static tsh_result tshi_recompute_check_inputs(const tshi_node *node) {
    tsh_ctx *ctx = node->out->ctx;
    const tshi_node *inner; /* a recomputed op */
    int k; /* index of the checkpoint's input that has the same base */
    for (inner = ctx->tape.newest; inner; inner = inner->older) /* all recomputed ops */
        for (int i = 0; i < inner->n; i++) {
            const tsh_tensor *base = inner->in[i] ? inner->in[i]->base : NULL;
            /* leaves are allowed, and tensors made inside the checkpoint */
            if (!base || !base->requires_grad || !base->node || base->depth >= ctx->depth) continue;
            for (k = 0; k < node->n && !(node->in[k] && node->in[k]->base == base);) k++;
            if (k == node->n) /* no input of the checkpoint */
                return tsh_fail(ctx, TSH_ERR_STATE,
                                "tsh_checkpoint: the forward reads what %s gave, which wants a "
                                "gradient, but is none of its inputs; make it one",
                                base->node->op->name);
        }
    return TSH_OK;
}

/* Backward of a checkpoint: gives the recomputed output y the gradient of the checkpoint's output
 * and runs backward through the recomputed ops. A partial gradient is all-reduced first, unless y
 * is a leaf, was made outside the checkpoint, or its op accepts partial gradients. */
static void tshi_recompute_backward(tshi_node *node, tsh_tensor *y) {
    tsh_ctx *ctx = y->ctx;
    tsh_tensor *out = node->out, *base = y->base;
    /* 1: a partial gradient may be accumulated without an all-reduce */
    const int as_it_is = !base->node || tshi_tape_accepts_partial(base->node) ||
                         base->depth < ctx->depth;
    const tshi_accumulator *from[2] = {&out->gr, &out->gp}; /* R gradient, partial gradient */
    tshi_accumulator *to[2] = {&base->gr, as_it_is ? &base->gp : &base->gr}; /* y's gradients */
    tshi_dest dest; /* the part of *to[i] that is y's */
    if (!base->requires_grad || !(out->gr.live || out->gp.live)) return; /* no gradient arrived */
    if (out->gp.live && !as_it_is)
        (void)tshi_error_comm(ctx,
                              tsh_allreduce(&ctx->tp, tshi_mem_data(out->gp.block),
                                            tsh_local_numel(out), TSH_REAL, TSH_SUM),
                              "tsh_backward: all-reduce of the gradient of a checkpoint's output");
    for (int i = 0; i < 2 && ctx->error.code == TSH_OK; i++)
        if (from[i]->live && tshi_tape_dest_in(y, to[i], &dest))
            tshi_tape_accumulate(y, &dest, (const tsh_real *)tshi_mem_data(from[i]->block),
                                 out->stride);
    if (out->gp.live && as_it_is && base->depth >= ctx->depth) base->partial_contributions = 1;
    tshi_tape_mark(ctx, y);                       /* the nodes that y depends on */
    tshi_tape_release_values(ctx, y, ctx->depth); /* except y; nodes saved what they need */
    tshi_tape_walk(ctx);                          /* runs backward of the ops */
}

/* Runs the module's forward. NULL and an error if the output is not a tensor of values. */
static tsh_tensor *tshi_recompute_run_checked(tsh_module *module, tsh_tensor **in, int n) {
    tsh_tensor *y = tshi_module_run(module, in, n);
    return y && tshi_tensor_check("tsh_checkpoint", &y, 1) ? y : NULL;
}

/* Backward of the checkpoint's node: runs the module again on a tape that holds only its ops. Each
 * input is a new tensor with the saved values whose base is that of the original input, so
 * gradients that the recomputed ops compute are accumulated into the original. */
static void tshi_recompute_replay(tshi_node *node) {
    const tshi_rng_counts *before = (const tshi_rng_counts *)node->params, *now;
    tsh_ctx *ctx = node->out->ctx;
    tshi_node *outer = ctx->tape.newest;          /* the newest node of the outer tape */
    tsh_tensor *x[TSHI_MODULE_INPUTS], *y = NULL; /* recomputed inputs and output */
    int i, no_grad = ctx->tape.no_grad;           /* restored at the end */
    now = tshi_recompute_save_counts(before->module);
    if (!now) return; /* no memory */
    tshi_recompute_restore_counts(ctx, before); /* draws the same dropout masks */
    ctx->tape.newest = NULL; /* starts an empty tape */
    ctx->tape.no_grad = 0; /* record even if the caller is in a no_grad scope */
    tsh_scope_begin(ctx); /* frees all recomputed tensors */
    for (i = 0; i < node->n; i++) {
        tsh_tensor *in = node->in[i];
        x[i] = in ? tshi_tensor_detached(in, node->saved[i]) : NULL;
        if (x[i]) x[i]->base = in->base; /* gradients go to the original */
    }
    if (ctx->error.code == TSH_OK) y = tshi_recompute_run_checked(before->module, x, node->n);
    tshi_recompute_restore_counts(ctx, now); /* later ops draw as if nothing was recomputed */
    if (y && tshi_recompute_check_inputs(node) == TSH_OK) tshi_recompute_backward(node, y);
    tshi_tape_walk(ctx); /* after an error: releases the nodes that are left */
    tsh_scope_end(ctx);
    ctx->tape.no_grad = no_grad;
    ctx->tape.newest = outer; /* back to the outer tape */
}

/* Runs the forward without recording, in a scope that frees every tensor but the output. */
static tsh_tensor *tshi_recompute_run_no_grad(tsh_module *module, tsh_tensor **in, int n) {
    tsh_ctx *ctx = module->ctx;
    tsh_tensor *y, form;      /* the output; a copy of its shape and layout */
    tshi_block *block = NULL; /* the output's values, referenced past the end of the scope */
    tsh_scope_begin(ctx);
    tsh_no_grad_begin(ctx); /* the ops record no nodes */
    y = tshi_recompute_run_checked(module, in, n);
    if (y && !tshi_tensor_is_dense(y)) y = tshi_map_copy("tsh_checkpoint", y);
    tsh_no_grad_end(ctx);
    if (y) {
        form = *y;
        block = y->block;
        block->refs++; /* survives tsh_scope_end */
    }
    tsh_scope_end(ctx);
    if (y) y = tshi_tensor_detached(&form, block);
    tshi_mem_release(ctx, block);
    return y;
}

/* Returns the number of parameters below module that require a gradient; a tied one counts once per
 * module that has it. Also writes them to `list`, unless that is NULL. */
static int tshi_recompute_trainable(tsh_module *module, tsh_tensor **list) {
    tshi_walk at = {NULL, NULL, 0};
    int n = 0;
    while (tshi_module_step(module, &at)) {
        if (list && at.param->requires_grad) list[n] = at.param;
        n += at.param->requires_grad;
    }
    return n;
}

static const tshi_op tshi_module_checkpoint_op = {
    "tsh_checkpoint", /* name in errors and traces */
    NULL,
    NULL,
    tshi_recompute_replay,          /* function that runs backward */
    (1u << TSHI_MODULE_INPUTS) - 1, /* saves the values of all inputs */
    TSHI_OP_ACCEPTS_PARTIAL | TSHI_OP_ACCEPTS_RETAINED};

/* Runs a checkpointed module's forward and records one node for all of it. */
static tsh_tensor *tshi_recompute_checkpoint(tsh_module *module, tsh_tensor **in, int n) {
    tsh_ctx *ctx = module->ctx;
    tshi_rng_counts *counts;
    tsh_tensor *y;
    tshi_node *node;
    int leaves; /* number of trainable parameters */
    if (n > TSHI_MODULE_INPUTS)
        return tshi_error_null(ctx, TSH_ERR_ARGUMENT,
                               "tsh_checkpoint: takes %d inputs at most, not %d",
                               TSHI_MODULE_INPUTS, n);
    for (int i = 0; i < n; i++)
        if (in[i] && !tshi_tensor_check("tsh_checkpoint", &in[i], 1)) return NULL;
    counts = tshi_recompute_save_counts(module); /* before the forward draws */
    y = counts ? tshi_recompute_run_no_grad(module, in, n) : NULL;
    leaves = y ? tshi_recompute_trainable(module, NULL) : 0;
    if (!y || (!tshi_tape_records(ctx, in, n) && !leaves)) return y;
    /* Sets the bits of all inputs: only the recomputation knows whose gradients are partial. */
    node = tshi_tape_add(&tshi_module_checkpoint_op, y, in, n, (1u << n) - 1,
                         (size_t)leaves * sizeof *node->leaves);
    if (!node) return NULL;
    node->leaves = (tsh_tensor **)node->params; /* the space reserved above */
    node->leaf_count = tshi_recompute_trainable(module, node->leaves);
    node->params = counts; /* what tshi_recompute_replay reads */
    return y;
}

/* ========================================================================== */
/* >>module-api                                  MARK: - module-api (private) */
/* The tree of modules and its parameters; the same model on every rank.      */
/* Needs: >>module >>recompute >>init.                                        */
/* ========================================================================== */

/* This section: calling a module, comparing the models of all ranks, building the tree, finding
 * modules and parameters by path, and the state of the random generator. To compare models, each
 * rank describes its model as lines; if the hashes of all lines differ, the ranks gather line after
 * line until one differs (tshi_module_find_diff). */

/* -- calling ---------------------------------------------------------------- */

/* Runs a module, checkpointed or not. Sets ctx->module meanwhile: errors and traces name it. */
static tsh_tensor *tshi_module_call(tsh_module *module, tsh_tensor **in, int n) {
    tsh_ctx *ctx = module->ctx;
    const int64_t begin = tshi_trace_now(ctx->trace); /* start of the module's event in the trace */
    const tsh_module *outer = ctx->module;            /* the caller's module, restored below */
    tsh_tensor *y;
    ctx->module = module; /* errors name its path */
    y = !module->checkpoint ? tshi_module_run(module, in, n)
        : ctx->tape.no_grad ? tshi_recompute_run_no_grad(module, in, n)
                            : tshi_recompute_checkpoint(module, in, n);
    ctx->module = outer; /* restored after an error, too */
    if (ctx->trace)
        (void)tshi_trace_add(ctx->trace, TSHI_TRACE_MODULE, module->path[0] ? module->path : "root",
                             begin, 0);
    return y;
}

/* Forward of a container: the user's function, or the children in order. */
static tsh_tensor *tshi_module_forward(tsh_module *module, tsh_tensor **in, int n) {
    tsh_tensor *x = in[0]; /* the current child's input */
    if (module->forward) return module->forward(module, in, n, module->user);
    if (n != 1)
        return tshi_error_null(module->ctx, TSH_ERR_ARGUMENT,
                               "tsh_forward: a container without a forward takes one input, not %d",
                               n);
    for (tsh_module *child = module->first; child; child = child->next)
        x = tshi_module_call(child, &x, 1); /* each child takes the output of the one before */
    return x;
}

/* -- the same model on every rank -------------------------------------------- */

/* One line of a model's description. Line 0 is the seed, then one module each, in pre-order. */
typedef struct tshi_line {
    char text[TSH_PATH_SIZE + 3 * TSHI_TEXT_SIZE]; /* "h.0" linear: weight f32 (64, 32) S(0) */
    double number; /* tsh_module.number; compared in binary: its text depends on the locale */
    int64_t hash; /* hash of text and number: equal lines have equal hashes */
    int64_t rank; /* the rank of the world that wrote the line; not part of the hash */
} tshi_line;

/* Writes m's path, kind and number, and the name, dtype, shape and layout of its parameters. */
static void tshi_module_describe(const tsh_module *m, tshi_line *line) {
    const size_t size = sizeof line->text;
    char text[TSHI_TEXT_SIZE];
    tsh_text_add(line->text, size, m->path[0] ? "\"%s\" %s" : "the root%s %s", m->path,
                     m->kind->name);
    line->number = m->number;
    if (m->number > 0) tsh_text_add(line->text, size, " (%.9g)", m->number);
    for (int i = 0; i < TSHI_MODULE_PARAMS; i++) {
        const tsh_tensor *param = m->param[i];
        if (!param) continue;
        tsh_text_add(line->text, size, "%s %s %s %s", i ? "," : ":", m->param_name[i],
                         tshi_dtype_name(param->dtype), tshi_tensor_text(param, text));
        /* lengths of segments, if there is more than one */
        for (int k = 0; k < param->layout.segments && param->layout.segments > 1; k++)
            tsh_text_add(line->text, size, "%s%lld", k ? " + " : " of ",
                             (long long)param->layout.segment[k].length);
    }
}

/* Fills in line i of this rank's model. Returns 0 after the last module: the line is "nothing". */
static int tshi_module_line(const tsh_ctx *ctx, int i, tshi_line *line) {
    tsh_module *m = ctx->root;
    memset(line, 0, sizeof *line);
    for (int k = 1; k < i && m; k++) m = tshi_module_next(ctx->root, m);
    if (i && m)
        tshi_module_describe(m, line);
    else
        tsh_text_add(line->text, sizeof line->text, i ? "nothing" : "the seed %llu",
                         (unsigned long long)ctx->seed);
    /* text and number lie before `hash` */
    line->hash = (int64_t)tshi_rng_hash(1, line, offsetof(tshi_line, hash));
    line->rank = ctx->world.rank; /* named in the error sentence */
    return !i || m;
}

/* Sets *same to 1 if all ranks have the same hash, by one all-reduce (TSH_MIN) of the hash and of
 * its complement: the minimum of the complement is the complement of the maximum. */
static tsh_result tshi_module_same(tsh_comm *comm, uint64_t hash, int *same) {
    int64_t ends[2]; /* the hash and its complement */
    tsh_result result;
    memcpy(&ends[0], &hash, sizeof hash);
    ends[1] = ~ends[0]; /* min(~hash) is ~max(hash) */
    result = tsh_allreduce(comm, ends, 2, TSH_I64, TSH_MIN);
    *same = result == TSH_OK && ends[0] == ~ends[1];
    return result;
}

/* Returns the lowest rank whose hash is the most frequent. The hash of rank r is hash[r * stride].
 * holds[r] 0: rank r does not count; holds NULL: all count. */
static int tshi_module_majority(const int64_t *hash, int64_t stride, int size,
                                const unsigned char *holds) {
    int r, k, same, best = 0, max = 0; /* same: number of ranks with r's hash */
    for (r = 0; r < size; r++) {
        for (same = k = 0; k < size && (!holds || holds[r]); k++)
            same += (!holds || holds[k]) && hash[k * stride] == hash[r * stride];
        if (same > max) best = r; /* the first rank with so many */
        if (same > max) max = same;
    }
    return best;
}

/* Sets an error that blames odd->rank: it has the line `odd` where another rank has `usual`. */
static void tshi_module_report_diff(const tsh_comm *comm, tsh_ctx *ctx, const tshi_line *odd,
                                    const tshi_line *usual) {
    const char *axis = comm == &ctx->tp ? "tp" : comm == &ctx->dp ? "dp" : "the world";
    const int first = ctx->error.code == TSH_OK; /* no earlier error: set its rank below */
    (void)tsh_fail(ctx, TSH_ERR_MISMATCH,
                   "the ranks of %s built different models: rank %d has %s where rank %d has "
                   "%s; build the same model on each, with the same seed",
                   axis, (int)odd->rank, odd->text, (int)usual->rank, usual->text);
    if (first) ctx->error.rank = (int)odd->rank;
}

/* On all ranks of comm: gathers the models line by line, and reports the first line that is not the
 * same on all. Returns TSH_ERR_MISMATCH, or an error of the gathering. */
static tsh_result tshi_module_find_diff(tsh_comm *comm, tsh_ctx *ctx) {
    const int size = comm->size; /* number of ranks */
    const size_t bytes = (size_t)size * (sizeof(int64_t) + sizeof(tshi_line));
    tshi_block *block = tshi_mem_alloc(ctx, TSH_MEM_STEP, bytes);
    int64_t *counts;        /* shape (size): int32 words of a line, the same for every rank */
    tshi_line line, *lines; /* this rank's line; one line per rank, shape (size) */
    tsh_result result = TSH_OK;
    int r, i = 0, usual = 0, blamed = 0, more; /* usual, blamed: ranks whose lines are compared */
    if (!block) {
        tshi_error_report(ctx); /* the other ranks wait for this one */
        return TSH_ERR_MEMORY;
    }
    counts = (int64_t *)tshi_mem_data(block); /* block: counts, then lines */
    lines = (tshi_line *)(void *)(counts + size);
    for (r = 0; r < size; r++) counts[r] = (int64_t)(sizeof line / sizeof(int32_t));
    do {
        more = tshi_module_line(ctx, i++, &line); /* 0: other ranks have more lines */
        result = tsh_allgather(comm, &line, lines, counts, 1, TSH_I32);
        if (result != TSH_OK) break; /* the world has failed */
        usual = tshi_module_majority(&lines->hash, sizeof line / sizeof line.hash, size, NULL);
        for (blamed = 0; blamed < size - 1 && lines[blamed].hash == lines[usual].hash;) blamed++;
    } while (more && lines[blamed].hash == lines[usual].hash);
    if (result == TSH_OK) { /* no rank may fail the world before all have received the lines */
        (void)tsh_barrier(comm);
        tshi_module_report_diff(comm, ctx, &lines[blamed], &lines[usual]);
        result = TSH_ERR_MISMATCH;
    }
    tshi_mem_release(ctx, block);
    tshi_error_report(ctx);
    return result;
}

/* Compares the models of a group's ranks, by collectives that are neither counted nor traced. */
static TSHI_COLD tsh_result tshi_module_compare(tsh_comm *comm, tsh_ctx *ctx) {
    const tsh_comm_stats stats = comm->stats; /* restored below: not counted */
    struct tshi_trace *trace = comm->trace;   /* restored below: not traced */
    tshi_line line;
    uint64_t hash = 0; /* combined from the hashes of all lines */
    tsh_result result;
    int same;
    for (int i = 0; tshi_module_line(ctx, i, &line); i++)
        hash = tshi_rng_hash(hash, &line.hash, sizeof line.hash);
    comm->trace = NULL; /* no event for what follows */
    result = tshi_module_same(comm, hash, &same);
    if (result == TSH_OK && !same) result = tshi_module_find_diff(comm, ctx);
    comm->trace = trace;
    comm->stats = stats; /* restored: these collectives do not count */
    return result;
}

/* Makes the next collective of each group compare the models. Called after every change of the
 * tree. With pp > 1 the world compares in tsh_pipeline_new only: before, stages may differ. */
static void tshi_module_changed(tsh_ctx *ctx) {
    ctx->compare = tshi_module_compare; /* called through a pointer: >>comm comes before */
    if (ctx->tp.size > 1) ctx->tp.unchecked = ctx; /* checked by tshi_comm_compare */
    if (ctx->dp.size > 1) ctx->dp.unchecked = ctx;
    if (ctx->world.size > 1 && ctx->pp.size == 1) ctx->world.unchecked = ctx;
}

/* -- the tree --------------------------------------------------------------- */

/* The kind of the root and of tsh_add_module: no styles, no parameters. */
static const tshi_kind tshi_module_container = {"module", tshi_module_forward, 0, NULL};

TSH_API tsh_module *tsh_root(tsh_ctx *ctx) {
    if (!ctx || ctx->root) return ctx ? ctx->root : NULL; /* made by the first call */
    ctx->root = (tsh_module *)tshi_mem_arena_alloc(ctx, &ctx->books, sizeof *ctx->root);
    if (!ctx->root) return NULL;
    ctx->root->ctx = ctx;
    ctx->root->name = ctx->root->path = ""; /* the root's children have paths without a dot */
    ctx->root->kind = &tshi_module_container;
    return ctx->root;
}

/* Appends a child without parameters to parent. Returns NULL and sets an error if the name is
 * empty, has a dot, is too long, or is that of another child. */
static tsh_module *tshi_module_add(tsh_module *parent, const char *name, const tshi_kind *kind) {
    tsh_ctx *ctx = parent ? parent->ctx : NULL;
    tsh_module *module;
    if (!ctx || ctx->error.code != TSH_OK) return NULL;
    if (!name) name = "";     /* gets the error below */
    tshi_module_changed(ctx); /* before any check, so that all ranks compare */
    if (!*name || strchr(name, '.') || strlen(parent->path) + strlen(name) + 16 > TSH_PATH_SIZE)
        (void)tsh_fail(
            ctx, TSH_ERR_ARGUMENT,
            "tsh_add_%s: \"%.64s\" under \"%.64s\" is no name: it may not be empty, hold a "
            "dot, or make a path of %d characters",
            kind->name, name, parent->path, TSH_PATH_SIZE);
    for (tsh_module *other = parent->first; other; other = other->next)
        if (strcmp(other->name, name) == 0)
            (void)tsh_fail(ctx, TSH_ERR_ARGUMENT, "tsh_add_%s: \"%s\" has a child \"%s\" already",
                           kind->name, parent->path, name);
    if (ctx->error.code != TSH_OK) return NULL;
    module = (tsh_module *)tshi_mem_arena_alloc(ctx, &ctx->books, sizeof *module);
    if (!module) return NULL;
    module->ctx = ctx;
    module->kind = kind;
    module->parent = parent;
    module->evaluating = parent->evaluating; /* tsh_train may have been called before */
    module->name = tshi_module_text(ctx, name, "");
    module->path = tshi_module_text(ctx, parent->path, name);
    if (!module->name || !module->path) return NULL;
    if (parent->last) /* append to the list of children */
        parent->last->next = module;
    else
        parent->first = module;
    parent->last = module;
    return module;
}

/* Ends a constructor: returns the new module or, after an error, unlinks it from its parent, frees
 * its parameters and returns NULL. */
static tsh_module *tshi_module_finish(tsh_module *module) {
    tsh_module *parent = module->parent, **link = &parent->first;
    size_t n = strlen(module->path); /* a prefix of its own parameters' paths */
    if (module->ctx->error.code == TSH_OK) return module; /* no error: nothing to undo */
    for (int i = 0; i < TSHI_MODULE_PARAMS; i++) /* frees its own parameters, not a shared weight */
        if (module->param[i] && strncmp(module->param[i]->path, module->path, n) == 0 &&
            module->param[i]->path[n] == '.')
            tshi_tensor_release(module->param[i]); /* frees the handle */
    for (parent->last = NULL; *link != module; link = &(*link)->next) parent->last = *link;
    *link = NULL;
    return NULL;
}

/* Adds a replicated parameter that requires a gradient. It gets memory and values on first use
 * (tshi_init_materialize). fan_in: number of inputs, for the initialiser. */
static void tshi_module_param(tsh_module *module, int slot, const char *name, tsh_shape shape,
                              tsh_init init, int64_t fan_in) {
    tsh_ctx *ctx = module->ctx;
    tsh_layout layout = tsh_replicated();
    tsh_tensor *t = tshi_tensor_handle(ctx, TSHI_OWNED | TSHI_PARAM | TSHI_LEAF |
                                            TSHI_AVERAGED);
    if (!t) return;
    t->dtype = TSH_REAL;
    t->requires_grad = 1;
    t->init = init;     /* applied on first use */
    t->fan_in = fan_in; /* inputs, for the initialiser */
    t->path = tshi_module_text(ctx, module->path, name);
    if (!t->path || tshi_tensor_set_shape(t, module->path, &shape, &layout) != TSH_OK) return;
    module->param[slot] = t;
    module->param_name[slot] = name; /* a string constant */
}

/* Gives a parameter or moment another layout: redistributes its values (a collective over tp if
 * they are allocated) and frees its gradients. On failure t is as before. */
static void tshi_module_relayout(tsh_tensor *t, const tsh_layout *layout) {
    tsh_tensor before = *t;            /* shape, layout and block as they were */
    tsh_shape shape = tsh_shape_of(t); /* global: stays the same */
    tshi_block *block = NULL;
    if (t->ctx->error.code != TSH_OK) return; /* leave t unchanged */
    if (tshi_layout_equal(&t->layout, layout, t->dim, t->ctx->tp.size)) {
        t->layout = *layout; /* the same shards, though units may differ */
        return;
    }
    if (tshi_tensor_recorded(t)) { /* nodes of the tape saved its values */
        (void)tsh_fail(t->ctx, TSH_ERR_STATE,
                       "%s: ops are recorded that use it as it lies; end the step first: "
                       "tsh_step_end",
                       t->path);
        return;
    }
    if (tshi_tensor_set_shape(t, "a new layout", &shape, layout) != TSH_OK || !t->block) return;
    block = tshi_mem_alloc(t->ctx, t->block->kind, tshi_dtype_reals(tsh_local_numel(t)));
    if (!block ||
        tshi_redistribute_move(&before, &before.layout, &t->layout, t->dtype,
                               tshi_mem_data(before.block), tshi_mem_data(block)) != TSH_OK) {
        *t = before;
        tshi_mem_release(t->ctx, block);
        return;
    }
    tshi_tensor_drop_values(t);
    t->block = block; /* its values in the new layout */
}

TSH_API TSHI_COLD tsh_module *tsh_add_module(tsh_module *parent, const char *name,
                                   const tsh_module_desc *desc) {
    tsh_module *module = tshi_module_add(parent, name, &tshi_module_container);
    if (module && desc) module->forward = desc->forward;
    if (module && desc) module->user = desc->user; /* passed to desc->forward */
    return module;
}

/* -- walking ---------------------------------------------------------------- */

/* Returns the edit distance of a and b (Levenshtein 1966), INT_MAX if b is too long. row[j] is the
 * distance of the first i characters of a and the first j of b. */
static int tshi_module_distance(const char *a, const char *b) {
    int row[TSH_PATH_SIZE + 1], i, j, n = (int)strlen(b);
    if (n > TSH_PATH_SIZE) return INT_MAX;
    for (j = 0; j <= n; j++) row[j] = j; /* from "": insert j characters */
    for (i = 0; a[i]; i++) {
        int diagonal = row[0]; /* the entry of the row above, to the left */
        row[0] = i + 1;        /* to "": delete i + 1 characters */
        for (j = 1; j <= n; j++) {
            int best = diagonal + (a[i] != b[j - 1]);         /* replace a[i], or keep it */
            diagonal = row[j];                                /* for the next column */
            if (row[j] + 1 < best) best = row[j] + 1;         /* delete a[i] */
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1; /* insert b[j - 1] */
            row[j] = best;
        }
    }
    return row[n];
}

/* Returns the part of a path below root: "" for root itself. A tied parameter may lie elsewhere:
 * its whole path is returned. */
static const char *tshi_module_below(const tsh_module *root, const char *path) {
    size_t n = strlen(root->path);
    if (!n || strncmp(path, root->path, n) != 0 || (path[n] && path[n] != '.')) return path;
    return path + n + (path[n] == '.');
}

/* Appends the three paths below root that are nearest to `path`: "did you mean". */
static void tshi_module_suggest(tsh_module *root, const char *path, char *text, size_t size) {
    tsh_module *module, *best[3] = {NULL, NULL, NULL}; /* the nearest so far, nearest first */
    int shown, distance, min;
    tsh_text_add(text, size, "near it are");
    for (shown = 0; shown < 3; shown++) { /* the nearest of those not shown yet */
        min = INT_MAX;
        for (module = root; module; module = tshi_module_next(root, module)) {
            distance = tshi_module_distance(path, tshi_module_below(root, module->path));
            if (module == root || distance >= min || module == best[0] || module == best[1])
                continue;
            best[shown] = module;
            min = distance;
        }
        if (!best[shown]) break;
        tsh_text_add(text, size, "%s \"%s\"", shown ? "," : "",
                         tshi_module_below(root, best[shown]->path));
    }
    if (!shown) tsh_text_add(text, size, " no modules");
}

/* Returns the module at a path of n characters below `module`, or NULL. n 0: module itself. */
static tsh_module *tshi_module_at(tsh_module *module, const char *path, size_t n) {
    const char *end = path + n, *dot; /* dot: end of the current name */
    for (; module && path < end; path = dot + 1) {
        for (dot = path; dot < end && *dot != '.';) dot++; /* end of the name */
        n = (size_t)(dot - path);                          /* now the length of the current name */
        module = module->first;
        while (module && (strncmp(module->name, path, n) != 0 || module->name[n]))
            module = module->next;
    }
    return module;
}

TSH_API TSHI_COLD tsh_module *tsh_find(tsh_module *module, const char *path) {
    tsh_module *found;
    char similar[TSH_MESSAGE_SIZE / 2] = ""; /* text for the error */
    if (!module) return NULL;
    if (!path) path = "?"; /* no module's name: gets the error below */
    found = tshi_module_at(module, path, strlen(path));
    if (found) return found;
    tshi_module_suggest(module, path, similar, sizeof similar);
    (void)tsh_fail(module->ctx, TSH_ERR_ARGUMENT, "tsh_find: \"%s\" has no module \"%.64s\"; %s",
                   module->path, path, similar);
    return NULL;
}

/* Returns the parameter at a path below `module` and sets *owner to its module; or NULL. */
static tsh_tensor *tshi_module_lookup(tsh_module *module, const char *path, tsh_module **owner) {
    const char *dot = strrchr(path, '.'); /* the parameter's name follows; NULL: no module */
    tsh_module *m = dot ? tshi_module_at(module, path, (size_t)(dot - path)) : module;
    for (int i = 0; i < TSHI_MODULE_PARAMS && m; i++)
        if (m->param[i] && strcmp(m->param_name[i], dot ? dot + 1 : path) == 0) {
            *owner = m;
            return m->param[i];
        }
    return NULL;
}

TSH_API TSHI_COLD tsh_tensor *tsh_param(tsh_module *module, const char *path) {
    tsh_module *owner;
    tsh_tensor *found;
    if (!module) return NULL;
    if (!path) path = "?"; /* no parameter's name: gets the error below */
    found = tshi_module_lookup(module, path, &owner);
    if (found) return found;
    return tshi_error_null(module->ctx, TSH_ERR_ARGUMENT,
                           "tsh_param: \"%s\" has no parameter \"%.64s\"", module->path, path);
}

/* Calls fn once for every parameter below. all 0: not for those only on other stages. */
static void tshi_module_params(tsh_module *module, int all,
                               void (*fn)(const char *path, tsh_tensor *param, void *user),
                               void *user) {
    tshi_walk at = {NULL, NULL, 0}; /* returns a tied parameter once */
    while (tshi_module_step_once(module, &at))
        if (all || !at.param->absent) fn(at.param->path, at.param, user);
}

TSH_API TSHI_COLD void tsh_each_param(tsh_module *module,
                            void (*fn)(const char *path, tsh_tensor *param, void *user),
                            void *user) {
    if (module && fn) tshi_module_params(module, 0, fn, user);
}

TSH_API const char *tsh_module_path(const tsh_module *module) {
    return module ? module->path : "";
}

TSH_API tsh_module *tsh_child(const tsh_module *module, int index) {
    tsh_module *child = module && index >= 0 ? module->first : NULL;
    for (; child && index > 0; index--) child = child->next;
    return child;
}

TSH_API TSHI_COLD tsh_result tsh_tie(tsh_module *module, const char *name, tsh_tensor *source) {
    tsh_tensor *old = module ? tsh_param(module, name) : NULL; /* replaced by source */
    char a[TSHI_TEXT_SIZE], b[TSHI_TEXT_SIZE];
    tshi_walk at = {NULL, NULL, 0};
    if (!old) return module ? module->ctx->error.code : TSH_ERR_ARGUMENT;
    if (!source || !(source->flags & TSHI_PARAM) || source->ctx != module->ctx)
        return tsh_fail(module->ctx, TSH_ERR_ARGUMENT,
                        "tsh_tie: \"%s\" takes a parameter of the same tree", old->path);
    if (old->ndim != source->ndim || memcmp(old->dim, source->dim, sizeof old->dim) != 0)
        return tsh_fail(module->ctx, TSH_ERR_SHAPE, "tsh_tie: \"%s\" is %s, \"%s\" is %s",
                        old->path, tshi_tensor_text(old, a), source->path,
                        tshi_tensor_text(source, b));
    if (old == source) return TSH_OK;
    tshi_module_changed(module->ctx); /* shapes and layouts below may differ */
    while (tshi_module_step(module->ctx->root, &at))
        if (at.param == old) at.module->param[at.slot] = source; /* in every module that has it */
    tshi_tensor_release(old);
    return TSH_OK;
}

TSH_API TSHI_COLD tsh_result tsh_materialize(tsh_module *module) {
    tshi_walk at = {NULL, NULL, 0};
    if (!module) return TSH_ERR_ARGUMENT;
    while (tshi_module_step(module, &at))
        if (!at.param->absent) (void)tshi_init_materialize(at.param);
    return module->ctx->error.code;
}

TSH_API TSHI_COLD tsh_result tsh_reset_parameters(tsh_module *module) {
    tshi_walk at = {NULL, NULL, 0};
    if (!module) return TSH_ERR_ARGUMENT;
    if (module->ctx->tape.newest) /* nodes have saved the old values */
        return tsh_fail(module->ctx, TSH_ERR_STATE,
                        "tsh_reset_parameters: ops are recorded that use the old values; end the "
                        "step first: tsh_step_end");
    while (tshi_module_step_once(module, &at)) {
        if (at.param->absent || module->ctx->error.code != TSH_OK) continue;
        tsh_zero_grad(at.param); /* gradients of the old values */
        (void)tshi_init_apply(at.param);
    }
    return module->ctx->error.code;
}

TSH_API void tsh_train(tsh_module *module, int on) {
    for (tsh_module *m = module; m; m = tshi_module_next(module, m)) m->evaluating = !on;
}

TSH_API void tsh_checkpoint(tsh_module *module, int on) {
    if (module) module->checkpoint = on != 0;
}

TSH_API int tsh_training(const tsh_module *module) {
    return module && !module->evaluating;
}

TSH_API void tsh_zero_grads(tsh_module *module) {
    tshi_walk at = {NULL, NULL, 0};
    while (tshi_module_step(module, &at)) tsh_zero_grad(at.param);
}

/* -- the generator's state -------------------------------------------------- */

/* The state (tsh_rng_state): TSHI_STATE_WORDS words, then each module's dropout_calls. */
enum { TSHI_STATE_MAGIC, TSHI_STATE_MODULES, TSHI_STATE_SEED, TSHI_STATE_RANDN, TSHI_STATE_DROPOUT,
       TSHI_STATE_WORDS }; /* indices of the words */

/* The bytes "tshrng01" as a little-endian word. */
static const uint64_t tshi_module_magic = 0x3130676E72687374u;

/* Writes value, little-endian, as word number `word` (8 bytes each). */
static void tshi_module_store_word(unsigned char *state, size_t word, uint64_t value) {
    for (int i = 0; i < 8; i++) state[word * 8 + (size_t)i] = (unsigned char)(value >> 8 * i);
}

/* Returns word number `word`, read as little-endian. */
static uint64_t tshi_module_load_word(const unsigned char *state, size_t word) {
    uint64_t value = 0; /* from the highest byte down */
    for (int i = 7; i >= 0; i--) value = value << 8 | state[word * 8 + (size_t)i];
    return value;
}

TSH_API TSHI_COLD size_t tsh_rng_state(tsh_ctx *ctx, void *state, size_t size) {
    unsigned char *out = (unsigned char *)state;
    uint64_t modules = ctx ? tshi_module_count(ctx) : 0;
    size_t word = TSHI_STATE_WORDS, need = ((size_t)modules + word) * 8;
    if (!modules) return 0;
    if (!out || size < need) return need; /* the caller asks for the size */
    tshi_module_store_word(out, TSHI_STATE_MAGIC, tshi_module_magic);
    tshi_module_store_word(out, TSHI_STATE_MODULES, modules);
    tshi_module_store_word(out, TSHI_STATE_SEED, ctx->seed);
    tshi_module_store_word(out, TSHI_STATE_RANDN, ctx->randn_calls);
    tshi_module_store_word(out, TSHI_STATE_DROPOUT, ctx->dropout_calls);
    for (tsh_module *m = ctx->root; m; m = tshi_module_next(ctx->root, m))
        tshi_module_store_word(out, word++, m->dropout_calls);
    return need;
}

TSH_API TSHI_COLD tsh_result tsh_set_rng_state(tsh_ctx *ctx, const void *state, size_t size) {
    const unsigned char *in = (const unsigned char *)state;
    uint64_t modules = ctx ? tshi_module_count(ctx) : 0;
    size_t word = TSHI_STATE_WORDS; /* the first module's word */
    if (!modules || ctx->error.code != TSH_OK) return ctx ? ctx->error.code : TSH_ERR_ARGUMENT;
    if (!in || size < word * 8 || tshi_module_load_word(in, 0) != tshi_module_magic)
        return tsh_fail(ctx, TSH_ERR_ARGUMENT,
                        "tsh_set_rng_state: %llu bytes are no state that tsh_rng_state wrote",
                        in ? (unsigned long long)size : 0ull);
    if (tshi_module_load_word(in, 1) != modules || size / 8 - word != modules || size % 8)
        return tsh_fail(ctx, TSH_ERR_ARGUMENT,
                        "tsh_set_rng_state: the state is of %llu modules and has %llu bytes; this "
                        "tree has %llu modules, whose state has %llu",
                        (unsigned long long)tshi_module_load_word(in, 1), (unsigned long long)size,
                        (unsigned long long)modules, (unsigned long long)((modules + word) * 8));
    /* All checks are done: from here on nothing fails. */
    ctx->seed = tshi_module_load_word(in, TSHI_STATE_SEED);
    ctx->randn_calls = tshi_module_load_word(in, TSHI_STATE_RANDN);
    ctx->dropout_calls = tshi_module_load_word(in, TSHI_STATE_DROPOUT);
    for (tsh_module *m = ctx->root; m; m = tshi_module_next(ctx->root, m))
        m->dropout_calls = tshi_module_load_word(in, word++);
    return TSH_OK;
}

/* ========================================================================== */
/* >>nn                                                     MARK: - nn (private) */
/* Layers: their forward, and the layouts of their parameters under a style.    */
/* Needs: >>module >>op-linear >>op-embedding >>op-norm.                        */
/* ========================================================================== */

/* To add a layer, write a forward, a function that sets its parameters' layouts under a style, a
 * tshi_kind with both, and a constructor (in >>parallel if it takes a style). A style only sets the
 * layouts of weights: ops derive what they compute from these layouts, so forward is written once
 * for all styles. */

/* Returns the initialiser that the caller gave or, if that is TSH_INIT_DEFAULT, the layer's own. */
static tsh_init tshi_nn_init(tsh_init given, tsh_init_kind kind, double a, double b) {
    return given.kind == TSH_INIT_DEFAULT ? tshi_init_make(kind, a, b) : given;
}

/* Appends a layer of a kind to parent. Returns NULL and sets an error if desc is NULL. */
static tsh_module *tshi_nn_add(tsh_module *parent, const char *name, const tshi_kind *kind,
                               const void *desc) {
    if (!desc && parent)
        (void)tsh_fail(parent->ctx, TSH_ERR_ARGUMENT, "tsh_add_%s: there is no description",
                       kind->name);
    return desc ? tshi_module_add(parent, name, kind) : NULL;
}

/* Returns the only input of a layer. Under TSH_SEQUENCE it is redistributed to the plan's
 * input layout (default S(1)). NULL and an error if it does not have the layout that the plan
 * declared. */
static tsh_tensor *tshi_nn_input(const tsh_module *module, tsh_tensor **in, int n) {
    char tx[TSHI_TEXT_SIZE], want[TSHI_TEXT_SIZE]; /* texts for the error */
    tsh_layout takes = module->input_layout ? *module->input_layout : tsh_sharded(1);
    tsh_tensor *x = in[0];
    if (n != 1 || !x)
        return tshi_error_null(module->ctx, TSH_ERR_ARGUMENT,
                               "tsh_forward: takes one input, not %d%s", n,
                               n == 1 ? " that is NULL" : "");
    if (module->style == TSH_SEQUENCE) return tsh_redistribute(x, takes);
    if (!module->input_layout || (tshi_layout_resolve(&takes, x->ndim, x->dim) &&
                                  tshi_layout_equal(&takes, &x->layout, x->dim, x->ctx->tp.size)))
        return x;
    return tshi_error_null(module->ctx, TSH_ERR_LAYOUT,
                           "tsh_forward: the input %s is not laid out as the plan declared, %s: "
                           "tsh_redistribute(x, declared)",
                           tshi_tensor_text(x, tx),
                           tsh_layout_text(module->input_layout, want, sizeof want));
}

/* Returns the layout S(dim) with the rule's segments and units; rule->cut, if given, sets the
 * length and unit of each segment. */
static tsh_layout tshi_nn_shard(const tsh_plan_rule *rule, int dim) {
    tsh_layout layout = tsh_shard_segments(dim, rule->segments ? rule->segments : 1,
                                           rule->unit ? rule->unit : 1);
    for (int s = 0; rule->cut && s < layout.segments && s < TSH_MAX_SEGMENTS; s++)
        layout.segment[s] = rule->cut[s];
    return layout;
}

/* -- linear ----------------------------------------------------------------- */

/* Sets layouts[0], of the weight, and layouts[1], of the bias. dim 0: both are sharded as
 * `cut` along the output features. dim 1: the weight is sharded along the input features, the
 * bias is R. */
static void tshi_nn_linear_shard(const tsh_module *module, tsh_layout cut, int dim,
                                 tsh_layout *layouts) {
    layouts[0] = layouts[1] = cut;
    layouts[0].dim = module->reversed ? 1 - dim : dim; /* reversed: weight (in, out) */
    layouts[1].dim = 0;
    if (dim == 1) layouts[1] = tsh_replicated(); /* every rank adds it after the reduction */
}

/* tshi_kind.layouts of linear and classifier: COLWISE is dim 0, ROWWISE dim 1. */
static void tshi_nn_linear_layouts(const tsh_module *module, const tsh_plan_rule *rule,
                                   tsh_layout *layouts) {
    if (rule->style == TSH_COLWISE || rule->style == TSH_ROWWISE)
        tshi_nn_linear_shard(module, tshi_nn_shard(rule, 0), rule->style == TSH_ROWWISE, layouts);
}

/* Decides the style of a TSH_AUTO linear at its first input x, of shape (.., in): ROWWISE with x's
 * shards if x is sharded along its features; else COLWISE. Relayouts weight and bias. */
static void tshi_nn_decide_auto(tsh_module *module, const tsh_tensor *x) {
    tsh_layout layouts[TSHI_MODULE_PARAMS]; /* new layouts of weight and bias */
    int i, row = x->layout.kind == TSH_SHARDED && x->layout.dim == x->ndim - 1; /* 1: ROWWISE */
    module->style = row ? TSH_ROWWISE : TSH_COLWISE;
    tshi_nn_linear_shard(module, row ? x->layout : tsh_sharded(0), row, layouts);
    for (i = 0; i < 2; i++) {
        tsh_tensor *t = module->param[i];
        if (t && tshi_layout_resolve(&layouts[i], t->ndim, t->dim))
            tshi_module_relayout(t, &layouts[i]);
    }
}

/* y (.., out) = x (.., in) w^T + bias, with w (out, in). A weight sharded along out makes the layer
 * column-parallel: x must be R, or is S(seq) and gathered. A weight sharded along in makes it
 * row-parallel: x is sharded along its features. */
static tsh_tensor *tshi_nn_linear_forward(tsh_module *module, tsh_tensor **in, int n) {
    tsh_tensor *x = tshi_nn_input(module, in, n), *w = module->param[0], *b = module->param[1];
    const tsh_layout *gives = module->output_layout; /* what the op itself is to produce */
    int column, regather; /* column-parallel; keep x sharded and gather it again in backward */
    if (!x) return NULL;
    if (module->style == TSH_AUTO) tshi_nn_decide_auto(module, x);
    if (module->reversed) w = tsh_transpose(w, 0, 1); /* a view: now (out, in) */
    if (!w) return NULL;
    column = w->layout.kind == TSH_SHARDED && w->layout.dim == 0; /* 1: w is sharded along out */
    regather = module->regather && column && x->layout.kind == TSH_SHARDED;
    if (column && module->input_layout && !regather) x = tsh_redistribute(x, tsh_replicated());
    if (column || w->layout.kind != TSH_SHARDED || (gives && gives->kind != TSH_SHARDED) ||
        (gives && tshi_tensor_axis(x, gives->dim) == x->ndim - 1))
        gives = NULL; /* the op itself only reduce-scatters rows of a row-parallel product */
    return tshi_linear_run(x, w, module->skip_bias_add ? NULL : b, gives, regather);
}

/* -- embedding -------------------------------------------------------------- */

/* ids (..) -> (.., dim), with weight (count, dim). The output of a sharded table is redistributed
 * to R, unless the plan declares an output layout. */
static tsh_tensor *tshi_nn_embedding_forward(tsh_module *module, tsh_tensor **in, int n) {
    tsh_tensor *ids = tshi_nn_input(module, in, n), *w = module->param[0];
    tsh_tensor *y = ids ? tsh_embedding(ids, w, &module->lookup) : NULL;
    if (module->output_layout || !y || w->layout.kind != TSH_SHARDED) return y;
    return tsh_redistribute(y, tsh_replicated());
}

/* Layout of the weight (count, dim): ROWWISE shards the vocabulary, COLWISE the features. */
static void tshi_nn_embedding_layouts(const tsh_module *module, const tsh_plan_rule *rule,
                                      tsh_layout *layouts) {
    (void)module;
    if (rule->style == TSH_ROWWISE) layouts[0] = tshi_nn_shard(rule, 0);
    if (rule->style == TSH_COLWISE) layouts[0] = tshi_nn_shard(rule, 1);
}

/* -- norms, dropout --------------------------------------------------------- */

/* The styles of the layers below. */
enum { TSHI_NN_SEQUENCE = 1 << TSH_PLAIN | 1 << TSH_SEQUENCE };

/* Layer norm: x (.., dim) -> (.., dim). */
static tsh_tensor *tshi_nn_norm_forward(tsh_module *module, tsh_tensor **in, int n) {
    tsh_tensor *x = tshi_nn_input(module, in, n);
    return x ? tsh_layer_norm(x, module->param[0], module->param[1], module->number) : NULL;
}

/* RMS norm: x (.., dim) -> (.., dim). */
static tsh_tensor *tshi_nn_rms_forward(tsh_module *module, tsh_tensor **in, int n) {
    tsh_tensor *x = tshi_nn_input(module, in, n);
    return x ? tsh_rms_norm(x, module->param[0], module->number) : NULL;
}

/* Dropout: x of any shape -> the same shape; x itself in evaluation mode. */
static tsh_tensor *tshi_nn_dropout_forward(tsh_module *module, tsh_tensor **in, int n) {
    tsh_tensor *x = tshi_nn_input(module, in, n);
    return x && !module->evaluating ? tsh_dropout(x, module->number, module) : x;
}

/* Adds a norm's parameters: weight (dim) of ones and, unless no_bias, bias (dim) of zeros. eps:
 * added to the variance. */
static tsh_module *tshi_nn_norm(tsh_module *module, int64_t dim, double eps, int no_bias) {
    module->number = eps; /* read by its forward */
    tshi_module_param(module, 0, "weight", tsh_shape1(dim),
                      tshi_init_make(TSH_INIT_ONES, 0, 0), 0);
    if (!no_bias)
        tshi_module_param(module, 1, "bias", tsh_shape1(dim),
                          tshi_init_make(TSH_INIT_ZEROS, 0, 0), 0);
    return tshi_module_finish(module);
}

TSH_API TSHI_COLD tsh_module *tsh_add_layer_norm(tsh_module *parent, const char *name,
                                       const tsh_layer_norm_desc *desc) {
    static const tshi_kind kind = {"layer_norm", tshi_nn_norm_forward, TSHI_NN_SEQUENCE, NULL};
    tsh_module *module = tshi_nn_add(parent, name, &kind, desc);
    return module ? tshi_nn_norm(module, desc->dim, desc->eps, desc->no_bias) : NULL;
}

TSH_API TSHI_COLD tsh_module *tsh_add_rms_norm(tsh_module *parent, const char *name,
                                     const tsh_rms_norm_desc *desc) {
    static const tshi_kind kind = {"rms_norm", tshi_nn_rms_forward, TSHI_NN_SEQUENCE, NULL};
    tsh_module *module = tshi_nn_add(parent, name, &kind, desc);
    return module ? tshi_nn_norm(module, desc->dim, desc->eps, 1) : NULL;
}

TSH_API TSHI_COLD tsh_module *tsh_add_dropout(tsh_module *parent, const char *name, double p) {
    static const tshi_kind kind = {"dropout", tshi_nn_dropout_forward, TSHI_NN_SEQUENCE, NULL};
    tsh_module *module = tshi_module_add(parent, name, &kind);
    if (module) module->number = p; /* probability that an element becomes 0 */
    return module;
}

/* -- forward ---------------------------------------------------------------- */

TSH_API tsh_tensor *tsh_forward_n(tsh_module *module, tsh_tensor **in, int n) {
    if (!module && in && n > 0 && in[0])
        return tshi_error_null(in[0]->ctx, TSH_ERR_ARGUMENT, "tsh_forward: the module is NULL");
    if (!module || module->ctx->error.code != TSH_OK) return NULL;
    if (n < 1 || !in)
        return tshi_error_null(module->ctx, TSH_ERR_ARGUMENT, "tsh_forward_n: %s got no input",
                               module->path);
    return tshi_module_call(module, in, n);
}

TSH_API tsh_tensor *tsh_forward(tsh_module *module, tsh_tensor *x) {
    return tsh_forward_n(module, &x, 1);
}

TSH_API tsh_tensor *tsh_forward_residual(tsh_module *module, tsh_tensor **x, tsh_tensor *y) {
    tsh_tensor *sum = tsh_add(x ? *x : NULL, y), *out = tsh_forward(module, sum);
    if (x) *x = out ? sum : NULL; /* NULL after an error */
    return out;
}

/* ========================================================================== */
/* >>parallel                                        MARK: - parallel (private) */
/* Plans: rules that give the layers at matching paths a style.                 */
/* Needs: >>nn.                                                                 */
/* ========================================================================== */

/* Applying a plan takes three steps: choose the rules of every module (tshi_parallel_choose), check
 * all of them against the shapes (tshi_parallel_layouts), apply (tshi_parallel_apply). Nothing
 * changes before the whole plan has been checked, so an error leaves the model as it was. The
 * constructor of a layer with a style applies a plan of one rule in the same way. */

/* Returns 1 if the name [s, s_end) matches the pattern [p, p_end): * any characters, ? one. */
static int tshi_parallel_match_name(const char *p, const char *p_end, const char *s,
                                    const char *s_end) {
    for (; p < p_end; p++, s++) {
        if (*p == '*') {
            for (; s <= s_end; s++) /* try every length of * */
                if (tshi_parallel_match_name(p + 1, p_end, s, s_end)) return 1;
            return 0;
        }
        if (s >= s_end || (*p != '?' && *p != *s)) return 0;
    }
    return s == s_end;
}

/* Returns 1 if the dotted path s matches the pattern p; ** matches any number of names. */
static int tshi_parallel_match(const char *p, const char *s) {
    const char *pe = p, *se = s;                     /* ends of the first names */
    while (*pe && *pe != '.') pe++;                  /* end of the pattern's first name */
    while (*se && *se != '.') se++;                  /* end of the path's first name */
    if (!*p) return !*s;                             /* the pattern ends: so must the path */
    if (pe - p == 2 && p[0] == '*' && p[1] == '*') { /* the first name of the pattern is ** */
        const char *rest = *pe ? pe + 1 : pe;                      /* the pattern after ** */
        if (tshi_parallel_match(rest, s)) return 1;                /* ** matches no more names */
        return *s ? tshi_parallel_match(p, *se ? se + 1 : se) : 0; /* or one more name */
    }
    if (!*s || !tshi_parallel_match_name(p, pe, s, se)) return 0;
    return tshi_parallel_match(*pe ? pe + 1 : pe, *se ? se + 1 : se);
}

/* -- choosing the rules of every module --------------------------------------- */

/* The purposes of rules: redistribute inputs, shard parameters, redistribute the output. At most
 * one rule of each purpose may apply to a module. */
enum { TSHI_PARALLEL_BEFORE, TSHI_PARALLEL_STYLE, TSHI_PARALLEL_AFTER, TSHI_PARALLEL_PURPOSES };

/* The rules of a plan that apply to one module, and what follows from them. */
typedef struct tshi_choice {
    tsh_module *module;                                /* the module that the rules apply to */
    const tsh_plan_rule *rule[TSHI_PARALLEL_PURPOSES]; /* [purpose]: NULL if no rule has it */
    tsh_layout layout[TSHI_MODULE_PARAMS];             /* new layouts of its parameters */
} tshi_choice;

/* Returns the purpose of a rule: TSHI_PARALLEL_... */
static int tshi_parallel_purpose(const tsh_plan_rule *rule) {
    return rule->style == TSH_PREPARE_INPUT    ? TSHI_PARALLEL_BEFORE
           : rule->style == TSH_PREPARE_OUTPUT ? TSHI_PARALLEL_AFTER
                                               : TSHI_PARALLEL_STYLE;
}

/* Returns 1 if a rule applies to m: path and kind match, and m's kind supports the style. */
static int tshi_parallel_applies(const tsh_module *root, const tsh_module *m,
                                 const tsh_plan_rule *rule) {
    if (tshi_parallel_purpose(rule) == TSHI_PARALLEL_STYLE &&
        !(m->kind->styles >> rule->style & 1u)) /* its kind lacks the style */
        return 0;
    if (rule->kind && strcmp(rule->kind, m->kind->name) != 0) return 0;
    return tshi_parallel_match(rule->path, tshi_module_below(root, m->path));
}

/* Sets choice to the rules that apply to m. Returns an error if two of one purpose do. */
static tsh_result tshi_parallel_choose(const tsh_module *root, tsh_module *m,
                                       const tsh_plan_rule *rules, int count, tshi_choice *choice) {
    int purpose;
    memset(choice, 0, sizeof *choice);
    choice->module = m; /* set even if no rule applies */
    for (int i = 0; i < count; i++) {
        if (!tshi_parallel_applies(root, m, &rules[i])) continue;
        purpose = tshi_parallel_purpose(&rules[i]);
        if (choice->rule[purpose])
            return tsh_fail(m->ctx, TSH_ERR_ARGUMENT,
                            "tsh_parallelize: rules \"%s\" and \"%s\" both match \"%s\"",
                            choice->rule[purpose]->path, rules[i].path, m->path);
        choice->rule[purpose] = &rules[i]; /* the first rule of its purpose */
    }
    return TSH_OK;
}

/* Checks a rule without a model. Returns the end of an error sentence; NULL if it is right. */
static const char *tshi_parallel_flaw(const tsh_plan_rule *rule) {
    if (!rule->path) return "has no path"; /* "" would be the root */
    if ((unsigned)rule->style >= (unsigned)TSH_STYLES) return "has a style that does not exist";
    if (rule->style == TSH_PREPARE_OUTPUT && !rule->output) return "names no output";
    if (rule->style == TSH_AUTO && (rule->segments > 1 || rule->unit > 1 || rule->cut))
        return "leaves the cut to the first input, and names one";
    if (rule->style == TSH_PREPARE_INPUT) {
        if (!rule->input && !rule->inputs) return "names no input";
        if (rule->inputs && (rule->input_count < 1 || rule->input_count > TSHI_MODULE_INPUTS))
            return "does not say how many inputs there are, or too many";
    }
    return NULL;
}

/* Returns the number of the n choices that contain the rule. */
static int tshi_parallel_matched(const tsh_plan_rule *rule, const tshi_choice *choices, int n) {
    int c, matched = 0;
    for (c = 0; c < n; c++) matched += choices[c].rule[tshi_parallel_purpose(rule)] == rule;
    return matched;
}

/* Returns an error that suggests similar paths if no module has chosen the rule. */
static tsh_result tshi_parallel_check_rule(tsh_module *root, const tsh_plan_rule *rule,
                                           const tshi_choice *choices, int n) {
    char similar[TSH_MESSAGE_SIZE / 2] = "";                    /* "near it are ..." */
    if (tshi_parallel_matched(rule, choices, n)) return TSH_OK; /* at least one module has it */
    tshi_module_suggest(root, rule->path, similar, sizeof similar);
    return tsh_fail(root->ctx, TSH_ERR_ARGUMENT,
                    "tsh_parallelize: rule \"%.96s\" matches no module that takes its style; %s",
                    rule->path, similar);
}

/* -- checking --------------------------------------------------------------- */

/* Fills in choice->layout. Returns an error if a layout does not fit its parameter's shape, or if
 * it would change while recorded ops use the parameter. */
static tsh_result tshi_parallel_layouts(tshi_choice *choice) {
    const tsh_plan_rule *rule = choice->rule[TSHI_PARALLEL_STYLE];
    tsh_module *m = choice->module;
    char text[TSHI_TEXT_SIZE];
    if (!rule) return TSH_OK; /* its parameters keep their layouts */
    for (int i = 0; i < TSHI_MODULE_PARAMS; i++) choice->layout[i] = tsh_replicated();
    if (m->kind->layouts) m->kind->layouts(m, rule, choice->layout);
    for (int i = 0; i < TSHI_MODULE_PARAMS; i++) {
        const tsh_tensor *t = m->param[i];
        if (!t) continue;
        if (!tshi_layout_resolve(&choice->layout[i], t->ndim, t->dim))
            return tsh_fail(
                m->ctx, TSH_ERR_LAYOUT,
                "tsh_parallelize: \"%s\" %s does not divide into %d segments of units of %lld",
                t->path, tshi_tensor_text(t, text), rule->segments ? rule->segments : 1,
                rule->unit ? (long long)rule->unit : 1ll);
        if (!tshi_layout_equal(&t->layout, &choice->layout[i], t->dim, t->ctx->tp.size) &&
            tshi_tensor_recorded(t))
            return tsh_fail(m->ctx, TSH_ERR_STATE,
                            "tsh_parallelize: ops are recorded that use \"%s\" as it lies; end "
                            "the step first: tsh_step_end",
                            t->path);
    }
    return TSH_OK;
}

/* Returns an error if two modules share a parameter and their choices give it different layouts. */
static tsh_result tshi_parallel_check_tied(const tshi_choice *a, const tshi_choice *b) {
    char text[TSHI_TEXT_SIZE], other[TSHI_TEXT_SIZE];
    if (!a->rule[TSHI_PARALLEL_STYLE] || !b->rule[TSHI_PARALLEL_STYLE]) return TSH_OK;
    for (int i = 0; i < TSHI_MODULE_PARAMS; i++)
        for (int j = 0; j < TSHI_MODULE_PARAMS; j++) { /* all pairs of parameters */
            const tsh_tensor *t = a->module->param[i];
            if (t && t == b->module->param[j] &&
                !tshi_layout_equal(&a->layout[i], &b->layout[j], t->dim, t->ctx->tp.size))
                return tsh_fail(
                    t->ctx, TSH_ERR_LAYOUT,
                    "tsh_parallelize: the tied parameter \"%s\" would be %s for "
                    "\"%s\" and %s for \"%s\"",
                    t->path, tsh_layout_text(&a->layout[i], text, sizeof text), a->module->path,
                    tsh_layout_text(&b->layout[j], other, sizeof other), b->module->path);
        }
    return TSH_OK;
}

/* Chooses the rules of all modules below root and checks them. Returns a block of *n choices, which
 * the caller releases; after an error its contents are not to be used (it may be NULL). */
static tshi_block *tshi_parallel_plan(tsh_module *root, const tsh_plan_rule *rules, int count,
                                      int *n) {
    const tsh_error *error = &root->ctx->error; /* checked after every step */
    tsh_module *m;
    tshi_block *block;
    tshi_choice *choices;
    int i;
    for (i = 0; i < count; i++)
        if (tshi_parallel_flaw(&rules[i]))
            (void)tsh_fail(root->ctx, TSH_ERR_ARGUMENT, "tsh_parallelize: rule %d, \"%.96s\", %s",
                           i, rules[i].path ? rules[i].path : "", tshi_parallel_flaw(&rules[i]));
    for (*n = 0, m = root; m; m = tshi_module_next(root, m)) (*n)++; /* count the modules */
    block = tshi_mem_alloc(root->ctx, TSH_MEM_STEP, (size_t)*n * sizeof *choices);
    if (!block || error->code != TSH_OK) return block;
    choices = (tshi_choice *)tshi_mem_data(block);
    for (i = 0, m = root; m; m = tshi_module_next(root, m), i++)
        if (tshi_parallel_choose(root, m, rules, count, &choices[i]) != TSH_OK ||
            tshi_parallel_layouts(&choices[i]) != TSH_OK)
            return block;
    for (i = 0; i < count && error->code == TSH_OK; i++)
        (void)tshi_parallel_check_rule(root, &rules[i], choices, *n); /* each rule is used */
    for (i = 0; i < *n && error->code == TSH_OK; i++)
        for (int j = 0; j < i; j++) (void)tshi_parallel_check_tied(&choices[j], &choices[i]);
    return block;
}

/* -- applying --------------------------------------------------------------- */

/* Returns a copy of a layout that lives with the ctx; NULL for NULL, or without memory. */
static const tsh_layout *tshi_parallel_copy(tsh_ctx *ctx, const tsh_layout *layout) {
    tsh_layout *copy = layout ? (tsh_layout *)tshi_mem_arena_alloc(ctx, &ctx->books, sizeof *copy)
                              : NULL;
    if (copy) *copy = *layout;
    return copy;
}

/* Sets the layouts to which a PREPARE_INPUT rule redistributes the module's inputs. */
static void tshi_parallel_prepare(tsh_module *m, const tsh_plan_rule *rule) {
    int i, n = rule->inputs ? rule->input_count : 1; /* .input alone is for a single input */
    m->input_layouts = (const tsh_layout **)tshi_mem_arena_alloc(
        m->ctx, &m->ctx->books, (size_t)n * sizeof *m->input_layouts);
    if (!m->input_layouts) return;
    for (i = 0; i < n; i++)
        m->input_layouts[i] = tshi_parallel_copy(m->ctx,
                                                 rule->inputs ? rule->inputs[i] : rule->input);
    m->prepared = n; /* last: not set without memory */
}

/* Applies the rules of one module: relayouts its parameters and stores what forward reads. */
static void tshi_parallel_apply(const tshi_choice *choice) {
    const tsh_plan_rule *rule = choice->rule[TSHI_PARALLEL_STYLE],
                        *before = choice->rule[TSHI_PARALLEL_BEFORE],
                        *after = choice->rule[TSHI_PARALLEL_AFTER];
    tsh_module *m = choice->module;
    tsh_layout whole = tsh_replicated(); /* the output layout of .gather_output */
    if (before) tshi_parallel_prepare(m, before); /* layouts of inputs */
    if (after) m->result = tshi_parallel_copy(m->ctx, after->output); /* layout of the output */
    if (!rule) return;
    for (int i = 0; i < TSHI_MODULE_PARAMS; i++)
        if (m->param[i]) tshi_module_relayout(m->param[i], &choice->layout[i]);
    m->style = rule->style;       /* read by the layer's forward */
    m->regather = rule->regather; /* COLWISE, input S(seq) */
    m->input_layout = tshi_parallel_copy(m->ctx, rule->input);
    m->output_layout = tshi_parallel_copy(m->ctx, rule->gather_output ? &whole : rule->output);
}

TSH_API TSHI_COLD tsh_result tsh_parallelize(tsh_module *module, const tsh_plan_rule *rules,
                                             int count) {
    tshi_block *block; /* one tshi_choice per module */
    int i, n = 0;      /* n: number of modules */
    if (!module || (count && !rules)) return TSH_ERR_ARGUMENT;
    if (module->ctx->error.code != TSH_OK) return module->ctx->error.code;
    block = tshi_parallel_plan(module, rules, count, &n);
    for (i = 0; i < n && module->ctx->error.code == TSH_OK; i++)
        tshi_parallel_apply((const tshi_choice *)tshi_mem_data(block) + i);
    tshi_mem_release(module->ctx, block);
    tshi_module_changed(module->ctx); /* layouts are part of the comparison */
    return module->ctx->error.code;
}

/* -- reports ---------------------------------------------------------------- */

/* Returns a style's name for reports. */
static const char *tshi_parallel_style(tsh_style style) {
    static const char *const name[TSH_STYLES] = {
        "plain", "colwise", "rowwise", "auto", "sequence", "prepare input", "prepare output"};
    return name[style];
}

/* Sets an error if writing to `file` failed. Returns the ctx's error code. */
static tsh_result tshi_parallel_written(tsh_ctx *ctx, const char *op, FILE *file) {
    if (ctx->error.code == TSH_OK && ferror(file))
        (void)tsh_fail(ctx, TSH_ERR_IO, "%s: the file does not take the text", op);
    return ctx->error.code;
}

TSH_API TSHI_COLD tsh_result tsh_plan_report(tsh_module *module, const tsh_plan_rule *rules,
                                             int count, FILE *file) {
    tshi_block *block;
    const tshi_choice *choices; /* one per module, in pre-order */
    int n;
    if (!module || !file || (count && !rules)) return TSH_ERR_ARGUMENT;
    if (module->ctx->error.code != TSH_OK) return module->ctx->error.code;
    block = tshi_parallel_plan(module, rules, count, &n);
    choices = block ? (const tshi_choice *)tshi_mem_data(block) : NULL;
    for (int i = 0; i < count && module->ctx->error.code == TSH_OK; i++) {
        /* One line per rule: path, style, number of modules, their paths. */
        (void)fprintf(file, "%-32s %-14s %3d matched:", rules[i].path,
                      tshi_parallel_style(rules[i].style),
                      tshi_parallel_matched(&rules[i], choices, n));
        for (int c = 0; c < n; c++)
            if (tshi_parallel_matched(&rules[i], &choices[c], 1))
                (void)fprintf(file, " %s", tshi_module_below(module, choices[c].module->path));
        (void)fprintf(file, "\n");
    }
    tshi_mem_release(module->ctx, block);
    return tshi_parallel_written(module->ctx, "tsh_plan_report", file);
}

/* Writes one parameter's line of tsh_summary. Returns 1 if it counts in the totals: this rank's
 * stage holds it, and it is not tied to an earlier one. */
static int tshi_parallel_line(tsh_module *root, const tshi_walk *at, FILE *file) {
    const tsh_tensor *t = at->param;
    char path[TSH_PATH_SIZE], global[TSHI_TEXT_SIZE], local[TSHI_TEXT_SIZE], lay[TSHI_TEXT_SIZE];
    const char *below = tshi_module_below(root, at->module->path);
    const int first = tshi_module_first(root, at); /* 0: the line names the tied parameter */
    (void)snprintf(path, sizeof path, "%s%s%s", below, *below ? "." : "",
                   at->module->param_name[at->slot]);
    (void)fprintf(file, "%-40s %-12s %-16s %-24s %-16s", path, at->module->kind->name,
                  tshi_tensor_sizes(t->dim, t->ndim, global),
                  tsh_layout_text(&t->layout, lay, sizeof lay),
                  tshi_tensor_sizes(t->local, t->ndim, local));
    if (!first)
        (void)fprintf(file, " as %s\n", t->path);
    else if (t->absent)
        (void)fprintf(file, " on stage %d\n", t->stage - 1);
    else
        (void)fprintf(file, " %llu\n",
                      (unsigned long long)tsh_local_numel(t) * tsh_dtype_size(t->dtype));
    return first && !t->absent;
}

TSH_API TSHI_COLD tsh_result tsh_summary(tsh_module *module, FILE *file) {
    int64_t total = 0, local = 0; /* elements in all, elements on this rank */
    unsigned long long bytes = 0; /* size of this rank's shards */
    tshi_walk at = {NULL, NULL, 0};
    if (!module || !file) return TSH_ERR_ARGUMENT;
    (void)fprintf(file, "%-40s %-12s %-16s %-24s %-16s %s\n", "parameter", "kind", "global shape",
                  "layout", "local shape", "bytes");
    while (tshi_module_step(module, &at)) {
        if (!tshi_parallel_line(module, &at, file)) continue; /* tied, or on another stage */
        total += tsh_numel(at.param);
        local += tsh_local_numel(at.param);
        bytes += (unsigned long long)tsh_local_numel(at.param) * tsh_dtype_size(at.param->dtype);
    }
    (void)fprintf(file, "%lld parameters; rank %d of %d holds %lld, %llu bytes\n", (long long)total,
                  module->ctx->tp.rank, module->ctx->tp.size, (long long)local, bytes);
    return tshi_parallel_written(module->ctx, "tsh_summary", file);
}

/* -- constructors of layers with a style -------------------------------------- */

enum {
    TSHI_PARALLEL_LINEAR = 1 << TSH_PLAIN | 1 << TSH_COLWISE | 1 << TSH_ROWWISE | 1 << TSH_AUTO,
    TSHI_PARALLEL_EMBEDDING = 1 << TSH_PLAIN | 1 << TSH_COLWISE | 1 << TSH_ROWWISE
};

/* Returns a rule with a style and an empty path: it matches the root itself. */
static tsh_plan_rule tshi_parallel_rule(tsh_style style) {
    tsh_plan_rule rule;
    memset(&rule, 0, sizeof rule);
    rule.path = ""; /* matches the root */
    rule.style = style;
    return rule;
}

/* Shards a new linear, classifier or embedding. Its weight may be an existing parameter: if that is
 * sharded already, the layer takes the style of that layout; an error if `wanted` is another style.
 * Returns the module, or NULL after an error. */
static tsh_module *tshi_parallel_shard(tsh_module *module, const tsh_plan_rule *wanted) {
    const tsh_layout *own = &module->param[0]->layout; /* the weight's current layout */
    int table = module->kind->layouts == tshi_nn_embedding_layouts; /* 1: a table (count, dim) */
    tsh_plan_rule rule = *wanted; /* with the style of an existing weight */
    char text[TSHI_TEXT_SIZE];
    if (own->kind == TSH_SHARDED) { /* shared with another layer */
        rule.style = (own->dim == 0) != table ? TSH_COLWISE : TSH_ROWWISE;
        rule.segments = own->segments;
        rule.cut = own->segment; /* lengths and units of the existing shards */
        if (wanted->style != TSH_PLAIN && wanted->style != TSH_AUTO && wanted->style != rule.style)
            (void)tsh_fail(module->ctx, TSH_ERR_LAYOUT,
                           "tsh_add_%s: \"%s\" is %s, but its weight \"%s\" is %s already",
                           module->kind->name, module->path, tshi_parallel_style(wanted->style),
                           module->param[0]->path, tsh_layout_text(own, text, sizeof text));
    }
    (void)tsh_parallelize(module, &rule, 1);
    return tshi_module_finish(module);
}

/* Adds a linear's parameters and shards them; `weight`, if not NULL, is used in place of a new
 * weight. By default, weight and bias are uniform in [-1 / sqrt(in), 1 / sqrt(in)), as in
 * torch.nn.Linear. */
static tsh_module *tshi_parallel_linear(tsh_module *module, const tsh_linear_desc *desc,
                                        tsh_tensor *weight) {
    tsh_plan_rule rule = tshi_parallel_rule(desc->style);
    double bound = desc->in > 0 ? 1 / sqrt((double)desc->in) : 0;      /* of the uniform bias */
    tsh_shape shape = desc->reversed ? tsh_shape2(desc->in, desc->out) /* shape of the weight */
                                     : tsh_shape2(desc->out, desc->in);
    module->skip_bias_add = desc->skip_bias_add;
    module->reversed = desc->reversed; /* weight (in, out) */
    tshi_module_param(module, 0, "weight", shape,
                      tshi_nn_init(desc->weight_init, TSH_INIT_KAIMING_UNIFORM, sqrt(5.0), 0),
                      desc->in);
    if (weight) (void)tsh_tie(module, "weight", weight); /* frees the new one */
    if (!desc->no_bias)
        tshi_module_param(module, 1, "bias", tsh_shape1(desc->out),
                          tshi_nn_init(desc->bias_init, TSH_INIT_UNIFORM, -bound, bound), desc->in);
    if (module->ctx->error.code != TSH_OK) return tshi_module_finish(module);
    rule.segments = desc->segments;           /* number of segments */
    rule.unit = desc->unit;                   /* features that stay together */
    rule.gather_output = desc->gather_output; /* COLWISE: output R */
    rule.input = desc->input;
    rule.output = desc->output;
    rule.regather = desc->regather;            /* save x sharded for backward */
    return tshi_parallel_shard(module, &rule); /* finishes the module */
}

TSH_API TSHI_COLD tsh_module *tsh_add_linear(tsh_module *parent, const char *name,
                                   const tsh_linear_desc *desc) {
    static const tshi_kind kind = {"linear", tshi_nn_linear_forward, TSHI_PARALLEL_LINEAR,
                                   tshi_nn_linear_layouts};
    tsh_module *module = tshi_nn_add(parent, name, &kind, desc);
    if (!module) return NULL;
    if (desc->skip_bias_add && desc->no_bias)
        (void)tsh_fail(module->ctx, TSH_ERR_ARGUMENT,
                       "tsh_add_linear: \"%s\" is to leave its bias to the caller, and has none",
                       module->path);
    return tshi_parallel_linear(module, desc, NULL);
}

TSH_API TSHI_COLD tsh_module *tsh_add_classifier(tsh_module *parent, const char *name,
                                       const tsh_classifier_desc *desc) {
    static const tshi_kind kind = {"classifier", tshi_nn_linear_forward, TSHI_PARALLEL_LINEAR,
                                   tshi_nn_linear_layouts};
    tsh_module *module = tshi_nn_add(parent, name, &kind, desc);
    tsh_linear_desc linear; /* desc, as that of a linear */
    if (!module) return NULL;
    memset(&linear, 0, sizeof linear);
    linear.in = desc->in;
    linear.out = desc->classes;
    linear.no_bias = desc->no_bias;
    linear.weight_init = desc->weight_init;
    linear.bias_init = desc->bias_init;
    linear.style = desc->style;
    if (desc->weight && desc->style == TSH_AUTO)
        linear.style = TSH_COLWISE; /* the first input must not relayout a weight that others use */
    linear.gather_output = desc->gather_output;
    linear.input = desc->input;
    return tshi_parallel_linear(module, &linear, desc->weight);
}

/* Checks that desc->weight, if given, can be the table of a new embedding: a parameter of this ctx
 * with shape (count, dim). Returns 0 and sets an error if not. */
static int tshi_parallel_check_weight(tsh_ctx *ctx, const tsh_embedding_desc *desc) {
    const tsh_tensor *w = desc->weight; /* shape (count, dim), or NULL */
    char text[TSHI_TEXT_SIZE];
    if (w && (!(w->flags & TSHI_PARAM) || w->ctx != ctx))
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT,
                       "tsh_add_embedding: weight takes a parameter of the same tree");
    else if (w && (w->ndim != 2 || (desc->count && desc->count != w->dim[0]) ||
                   (desc->dim && desc->dim != w->dim[1])))
        (void)tsh_fail(ctx, TSH_ERR_SHAPE, "tsh_add_embedding: \"%s\" is %s, not (%lld, %lld)",
                       w->path, tshi_tensor_text(w, text), (long long)desc->count,
                       (long long)desc->dim);
    return ctx->error.code == TSH_OK;
}

TSH_API TSHI_COLD tsh_module *tsh_add_embedding(tsh_module *parent, const char *name,
                                      const tsh_embedding_desc *desc) {
    static const tshi_kind kind = {"embedding", tshi_nn_embedding_forward, TSHI_PARALLEL_EMBEDDING,
                                   tshi_nn_embedding_layouts};
    tsh_module *module;
    tsh_plan_rule rule;
    int64_t rows = desc && desc->weight ? desc->weight->dim[0] : desc ? desc->count : 0; /* count */
    if (parent && desc &&
        (!tshi_parallel_check_weight(parent->ctx, desc) ||
         !tshi_embedding_options(parent->ctx, "tsh_add_embedding", &desc->lookup, rows)))
        return NULL;
    module = tshi_nn_add(parent, name, &kind, desc);
    if (!module) return NULL;
    module->lookup = desc->lookup;   /* padding, sparse gradients */
    module->param[0] = desc->weight; /* shared, or NULL: made below */
    module->param_name[0] = "weight";
    if (!desc->weight) /* not shared: make one */
        tshi_module_param(module, 0, "weight", tsh_shape2(desc->count, desc->dim),
                          tshi_nn_init(desc->init, TSH_INIT_NORMAL, 0, 1), 0);
    if (!module->param[0]) return tshi_module_finish(module);
    if (!desc->weight && desc->lookup.padding)
        module->param[0]->zero_row = 1 + desc->lookup.padding_idx +
                                     (desc->lookup.padding_idx < 0 ? rows : 0);
    rule = tshi_parallel_rule(desc->style);
    rule.output = desc->output;
    return tshi_parallel_shard(module, &rule);
}

/* ========================================================================== */
/* >>policy                                            MARK: - policy (private) */
/* Plans for families of models, by the names of their parameters, and the head */
/* counts of their attention.                                                   */
/* Needs: >>parallel.                                                           */
/* ========================================================================== */

/* A policy lists the layers of a block by parameter names. tsh_parallelize_policy makes three
 * passes over the blocks: it counts the rules, writes them as one plan, and, once that plan is
 * applied, divides the modules' arguments (such as numbers of heads) by ranks. To add a family,
 * write its lists with the TSHI_POLICY_ macros and a row in tshi_policy_shipped. */

/* -- arguments -------------------------------------------------------------- */

/* Returns the module's argument with this name; NULL if it has none. */
static tshi_argument *tshi_policy_named(const tsh_module *module, const char *name) {
    tshi_argument *argument = module->arguments; /* a linked list */
    while (argument && strcmp(argument->name, name) != 0) argument = argument->next;
    return argument;
}

TSH_API TSHI_COLD tsh_result tsh_set_argument(tsh_module *module, const char *name, int64_t value) {
    tshi_argument *argument;
    if (!module) return TSH_ERR_ARGUMENT;
    if (module->ctx->error.code != TSH_OK) return module->ctx->error.code;
    if (!name || !*name || strchr(name, '.') || value < 0)
        return tsh_fail(
            module->ctx, TSH_ERR_ARGUMENT,
            "tsh_set_argument: \"%s\" cannot have \"%.64s\" = %lld: a name is not empty "
            "and holds no dot, a count is not negative",
            module->path, name ? name : "", (long long)value);
    argument = tshi_policy_named(module, name);
    if (!argument) { /* a new one: prepend it to the list */
        argument = (tshi_argument *)tshi_mem_arena_alloc(module->ctx, &module->ctx->books,
                                                         sizeof *argument);
        if (argument) argument->name = tshi_module_text(module->ctx, name, "");
        if (!argument || !argument->name) return module->ctx->error.code;
        argument->next = module->arguments; /* prepend it */
        module->arguments = argument;
    }
    argument->value = argument->local = value; /* the same until a policy divides */
    return TSH_OK;
}

/* Returns the module's argument with this name. NULL and an error, in the name of `op`, if there is
 * none; NULL without an error if module is NULL. */
static const tshi_argument *tshi_policy_get(const tsh_module *module, const char *name,
                                            const char *op) {
    const tshi_argument *argument = module && name ? tshi_policy_named(module, name) : NULL;
    if (module && !argument)
        (void)tsh_fail(module->ctx, TSH_ERR_ARGUMENT, "%s: \"%s\" has no argument \"%.64s\"", op,
                       module->path, name ? name : "");
    return argument;
}

TSH_API int64_t tsh_argument(const tsh_module *module, const char *name) {
    const tshi_argument *argument = tshi_policy_get(module, name, "tsh_argument");
    return argument ? argument->value : 0;
}

TSH_API int64_t tsh_local_argument(const tsh_module *module, const char *name) {
    const tshi_argument *argument = tshi_policy_get(module, name, "tsh_local_argument");
    return argument ? argument->local : 0;
}

/* -- the shipped families --------------------------------------------------- */

/* The lists of an attention. Unused entries at the end are zeros, which end a list. */
typedef struct tshi_attention_lists {
    tsh_policy_heads heads[2];       /* [0] self-attention, [1] cross-attention */
    tsh_policy_layer qkv[7], out[3]; /* inputs (q, k, v), outputs */
} tshi_attention_lists;
/* The lists of an MLP. */
typedef struct tshi_mlp_lists {
    tsh_policy_layer in[4], out[2]; /* layers into and out of the hidden features */
} tshi_mlp_lists;

/* Macros that write the tables. names: WB for a layer with weight and bias, W for a layer whose
 * bias is optional. maybe: 1 for a layer that a block may lack. heads: where the heads are counted
 * by which the layer is sharded. kv: 1 for keys and values. SPLIT: an attention with separate
 * layers for queries, keys and values, whose paths begin with `at`; CROSS: the same layers again
 * for cross-attention. */
#define TSHI_POLICY_WB(path) path ".weight", path ".bias"
#define TSHI_POLICY_W(path)  path ".weight", NULL
#define TSHI_POLICY_LAYER(names, path, maybe, heads, kv)                                           \
    { TSHI_POLICY_##names(path), 0, TSH_PLAIN, 0, maybe, heads, kv }
#define TSHI_POLICY_QKV(names, at, q, k, v, maybe, heads)                                          \
    TSHI_POLICY_LAYER(names, at q, maybe, heads, 0),                                               \
        TSHI_POLICY_LAYER(names, at k, maybe, heads, 1),                                           \
        TSHI_POLICY_LAYER(names, at v, maybe, heads, 1)
#define TSHI_POLICY_SPLIT(f, at, count, kv_count, names, q, k, v, out_names, o)                    \
    static const tshi_attention_lists tshi_policy_##f = {                                          \
        {{at count, kv_count, NULL}},                                                              \
        {TSHI_POLICY_QKV(names, at, q, k, v, 0, &tshi_policy_##f.heads[0])},                       \
        {TSHI_POLICY_LAYER(out_names, at o, 0, &tshi_policy_##f.heads[0], 0)}}
#define TSHI_POLICY_CROSS(f, at, cross, maybe, count, names, q, k, v, o)                           \
    static const tshi_attention_lists tshi_policy_##f = {                                          \
        {{at count, NULL, NULL}, {cross count, NULL, NULL}},                                       \
        {TSHI_POLICY_QKV(names, at, q, k, v, 0, &tshi_policy_##f.heads[0]),                        \
         TSHI_POLICY_QKV(names, cross, q, k, v, maybe, &tshi_policy_##f.heads[1])},                \
        {TSHI_POLICY_LAYER(names, at o, 0, &tshi_policy_##f.heads[0], 0),                          \
         TSHI_POLICY_LAYER(names, cross o, maybe, &tshi_policy_##f.heads[1], 0)}}
#define TSHI_POLICY_MLP(f, names, in, out)                                                         \
    static const tshi_mlp_lists tshi_policy_##f##_mlp = {                                          \
        {TSHI_POLICY_LAYER(names, in, 0, NULL, 0)}, {TSHI_POLICY_LAYER(names, out, 0, NULL, 0)}}

/* GPT-2's layers are transformers' Conv1D with weights (in, out): reversed. Only decoders with
 * cross-attention have the optional layers. */
static const tshi_attention_lists tshi_policy_gpt2 = {
    {{"attn.num_heads", NULL, NULL}, {"crossattention.num_heads", NULL, NULL}},
    {{TSHI_POLICY_WB("attn.c_attn"), 3, TSH_PLAIN, 1, 0, &tshi_policy_gpt2.heads[0], 0},
     {TSHI_POLICY_WB("crossattention.c_attn"), 2, TSH_PLAIN, 1, 1, &tshi_policy_gpt2.heads[1], 1},
     {TSHI_POLICY_WB("crossattention.q_attn"), 0, TSH_PLAIN, 1, 1, &tshi_policy_gpt2.heads[1], 0}},
    {{TSHI_POLICY_WB("attn.c_proj"), 0, TSH_PLAIN, 1, 0, &tshi_policy_gpt2.heads[0], 0},
     {TSHI_POLICY_WB("crossattention.c_proj"), 0, TSH_PLAIN, 1, 1, &tshi_policy_gpt2.heads[1], 0}}};
static const tshi_mlp_lists tshi_policy_gpt2_mlp = {
    {{TSHI_POLICY_WB("mlp.c_fc"), 0, TSH_PLAIN, 1, 0, NULL, 0}},
    {{TSHI_POLICY_WB("mlp.c_proj"), 0, TSH_PLAIN, 1, 0, NULL, 0}}};

/* query_key_value holds q, k and v head by head: one segment, in heads of 3 D features. */
static const tshi_attention_lists tshi_policy_gpt_neox = {
    {{"attention.num_attention_heads", NULL, NULL}},
    {TSHI_POLICY_LAYER(WB, "attention.query_key_value", 0, &tshi_policy_gpt_neox.heads[0], 0)},
    {TSHI_POLICY_LAYER(WB, "attention.dense", 0, &tshi_policy_gpt_neox.heads[0], 0)}};
static const tshi_attention_lists tshi_policy_bloom = {
    {{"self_attention.num_heads", NULL, NULL}},
    {TSHI_POLICY_LAYER(WB, "self_attention.query_key_value", 0, &tshi_policy_bloom.heads[0], 0)},
    {TSHI_POLICY_LAYER(WB, "self_attention.dense", 0, &tshi_policy_bloom.heads[0], 0)}};

TSHI_POLICY_SPLIT(gpt_neo, "attn.attention.", "num_heads", NULL,
                  W, "q_proj", "k_proj", "v_proj", WB, "out_proj");
TSHI_POLICY_SPLIT(gptj, "attn.", "num_attention_heads", NULL,
                  W, "q_proj", "k_proj", "v_proj", W, "out_proj");
TSHI_POLICY_SPLIT(llama, "self_attn.", "num_heads", "self_attn.num_key_value_heads",
                  W, "q_proj", "k_proj", "v_proj", W, "o_proj");
TSHI_POLICY_SPLIT(qwen2, "self_attn.", "num_heads", "self_attn.num_key_value_heads",
                  WB, "q_proj", "k_proj", "v_proj", W, "o_proj");
TSHI_POLICY_SPLIT(phi, "self_attn.", "num_heads", "self_attn.num_key_value_heads",
                  WB, "q_proj", "k_proj", "v_proj", WB, "dense");
TSHI_POLICY_SPLIT(opt, "self_attn.", "num_heads", NULL,
                  WB, "q_proj", "k_proj", "v_proj", WB, "out_proj");
TSHI_POLICY_SPLIT(vit, "attention.", "attention.num_attention_heads", NULL,
                  WB, "attention.query", "attention.key", "attention.value", WB, "output.dense");
TSHI_POLICY_SPLIT(distil_bert, "attention.", "n_heads", NULL,
                  WB, "q_lin", "k_lin", "v_lin", WB, "out_lin");
TSHI_POLICY_SPLIT(albert, "attention.", "num_attention_heads", NULL,
                  WB, "query", "key", "value", WB, "dense");
TSHI_POLICY_SPLIT(t5, "layer.0.SelfAttention.", "n_heads", NULL, W, "q", "k", "v", W, "o");
TSHI_POLICY_CROSS(t5_decoder, "layer.0.SelfAttention.", "layer.1.EncDecAttention.", 0, "n_heads",
                  W, "q", "k", "v", "o");
TSHI_POLICY_CROSS(bart_decoder, "self_attn.", "encoder_attn.", 0, "num_heads",
                  WB, "q_proj", "k_proj", "v_proj", "out_proj");
TSHI_POLICY_CROSS(bert, "attention.", "crossattention.", 1, "self.num_attention_heads",
                  WB, "self.query", "self.key", "self.value", "output.dense");

TSHI_POLICY_MLP(gpt_neo, WB, "mlp.c_fc", "mlp.c_proj");
TSHI_POLICY_MLP(gptj, WB, "mlp.fc_in", "mlp.fc_out");
TSHI_POLICY_MLP(bloom, WB, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h");
TSHI_POLICY_MLP(opt, WB, "fc1", "fc2");
TSHI_POLICY_MLP(clip, WB, "mlp.fc1", "mlp.fc2");
TSHI_POLICY_MLP(bert, WB, "intermediate.dense", "output.dense");
TSHI_POLICY_MLP(distil_bert, WB, "ffn.lin1", "ffn.lin2");
TSHI_POLICY_MLP(albert, WB, "ffn", "ffn_output");
static const tshi_mlp_lists tshi_policy_llama_mlp = {
    {TSHI_POLICY_LAYER(W, "mlp.gate_proj", 0, NULL, 0),
     TSHI_POLICY_LAYER(W, "mlp.up_proj", 0, NULL, 0)},
    {TSHI_POLICY_LAYER(W, "mlp.down_proj", 0, NULL, 0)}};

/* T5: an MLP has one input layer, wi, or, if it is gated, two: wi_0 and wi_1. */
#define TSHI_POLICY_T5_MLP(f, at)                                                                  \
    static const tshi_mlp_lists tshi_policy_##f##_mlp = {                                          \
        {TSHI_POLICY_LAYER(W, at "wi", 1, NULL, 0), TSHI_POLICY_LAYER(W, at "wi_0", 1, NULL, 0),   \
         TSHI_POLICY_LAYER(W, at "wi_1", 1, NULL, 0)},                                             \
        {TSHI_POLICY_LAYER(W, at "wo", 0, NULL, 0)}}
TSHI_POLICY_T5_MLP(t5, "layer.1.DenseReluDense.");
TSHI_POLICY_T5_MLP(t5_decoder, "layer.2.DenseReluDense.");

#define TSHI_POLICY_FAMILY(name, blocks, attention, mlp, next)                                     \
    { name, blocks, tshi_policy_##attention.qkv, tshi_policy_##attention.out,                      \
      tshi_policy_##mlp##_mlp.in, tshi_policy_##mlp##_mlp.out, NULL, next }
/* Decoders that follow an encoder: .next of the encoder's policy. */
static const tsh_policy tshi_policy_decoders[] = {
    TSHI_POLICY_FAMILY("bart", "**.decoder.layers.*", bart_decoder, opt, NULL),
    TSHI_POLICY_FAMILY("t5", "**.decoder.block.*", t5_decoder, t5_decoder, NULL),
};
/* What tsh_policy_find searches. */
static const tsh_policy tshi_policy_shipped[] = {
    TSHI_POLICY_FAMILY("gpt2", "**.h.*", gpt2, gpt2, NULL),
    TSHI_POLICY_FAMILY("gpt_neo", "**.h.*", gpt_neo, gpt_neo, NULL),
    TSHI_POLICY_FAMILY("gptj", "**.h.*", gptj, gptj, NULL),
    TSHI_POLICY_FAMILY("gpt_neox", "**.layers.*", gpt_neox, bloom, NULL),
    TSHI_POLICY_FAMILY("opt", "**.layers.*", opt, opt, NULL),
    TSHI_POLICY_FAMILY("bloom", "**.h.*", bloom, bloom, NULL),
    TSHI_POLICY_FAMILY("llama", "**.layers.*", llama, llama, NULL),
    TSHI_POLICY_FAMILY("mistral", "**.layers.*", llama, llama, NULL),
    TSHI_POLICY_FAMILY("qwen2", "**.layers.*", qwen2, llama, NULL),
    TSHI_POLICY_FAMILY("phi", "**.layers.*", phi, clip, NULL),
    TSHI_POLICY_FAMILY("bert", "**.layer.*", bert, bert, NULL),
    TSHI_POLICY_FAMILY("roberta", "**.layer.*", bert, bert, NULL),
    TSHI_POLICY_FAMILY("distil_bert", "**.layer.*", distil_bert, distil_bert, NULL),
    TSHI_POLICY_FAMILY("electra", "**.layer.*", bert, bert, NULL),
    TSHI_POLICY_FAMILY("albert", "**.albert_layers.*", albert, albert, NULL),
    TSHI_POLICY_FAMILY("bart", "**.encoder.layers.*", opt, opt, &tshi_policy_decoders[0]),
    TSHI_POLICY_FAMILY("t5", "**.encoder.block.*", t5, t5, &tshi_policy_decoders[1]),
    TSHI_POLICY_FAMILY("vit", "**.layer.*", vit, bert, NULL),
    TSHI_POLICY_FAMILY("clip", "**.layers.*", opt, clip, NULL),
    TSHI_POLICY_FAMILY("deit", "**.layer.*", vit, bert, NULL),
};

#undef TSHI_POLICY_WB
#undef TSHI_POLICY_W
#undef TSHI_POLICY_LAYER
#undef TSHI_POLICY_QKV
#undef TSHI_POLICY_SPLIT
#undef TSHI_POLICY_CROSS
#undef TSHI_POLICY_MLP
#undef TSHI_POLICY_T5_MLP
#undef TSHI_POLICY_FAMILY

TSH_API TSHI_COLD const tsh_policy *tsh_policy_find(const char *name) {
    for (size_t i = 0; name && i < sizeof tshi_policy_shipped / sizeof *tshi_policy_shipped; i++)
        if (strcmp(tshi_policy_shipped[i].name, name) == 0) return &tshi_policy_shipped[i];
    return NULL;
}

/* -- one layer of one block ------------------------------------------------- */

/* One pass over the blocks of a model: the first (rules NULL) counts rules, the second writes them,
 * the third (divide 1), after the plan was applied, divides the arguments. */
typedef struct tshi_policy_pass {
    tsh_module *root, *block;                  /* where the policy is applied; the current block */
    const tsh_policy *policy;                  /* the policy that the block belongs to */
    tsh_plan_rule *rules;                      /* the plan; NULL in the first pass */
    tsh_segment (*segments)[TSH_MAX_SEGMENTS]; /* segments[i]: of rule i, for its .cut */
    int count;                                 /* number of rules so far */
    int divide;                                /* 1: the third pass */
} tshi_policy_pass;

/* Sets an error about the policy and the current block, then as printf. Returns 0. */
TSH_PRINTF(3, 4)
static int tshi_policy_fail(const tshi_policy_pass *pass, tsh_result code, const char *format,
                            ...) {
    char text[TSH_MESSAGE_SIZE] = "";
    va_list list;
    va_start(list, format);
    (void)vsnprintf(text, sizeof text, format, list);
    va_end(list);
    (void)tsh_fail(pass->root->ctx, code, "tsh_parallelize_policy: %s: block \"%s\" %s",
                   pass->policy->name ? pass->policy->name : "", pass->block->path, text);
    return 0;
}

/* Returns 1 if the entry is all zeros, which ends a list. */
static int tshi_policy_is_end(const tsh_policy_layer *layer) {
    return !layer->weight && !layer->bias && !layer->n_fused && layer->replace == TSH_PLAIN &&
           !layer->reversed && !layer->ignore_checker && !layer->heads && !layer->kv;
}

/* Returns the argument "module.name" below the block. NULL and an error if it is not above 0. */
static tshi_argument *tshi_policy_count(const tshi_policy_pass *pass, const char *path) {
    const char *dot = strrchr(path, '.'), *name = dot ? dot + 1 : path;
    tsh_module *module = tshi_module_at(pass->block, path, dot ? (size_t)(dot - path) : 0);
    tshi_argument *argument = module ? tshi_policy_named(module, name) : NULL;
    if (argument && argument->value > 0) return argument;
    (void)tshi_policy_fail(
        pass, TSH_ERR_ARGUMENT,
        "has no argument \"%s\" above 0: tsh_set_argument(module, \"%s\", count)", path, name);
    return NULL;
}

/* The counts of one attention. Query heads that share a key head stay on one rank. */
typedef struct tshi_policy_counts {
    int64_t heads, kv; /* number of query heads; of key (and of value) heads */
    int64_t group;     /* query heads per key head: the unit of sharding */
    int64_t hidden;    /* number of features of all query heads; 0: unknown */
    int whole;         /* 1: fewer key heads than ranks: keys and values are R */
} tshi_policy_counts;

/* Fills in c from the arguments that `at` names. 0 and an error if they do not fit together. */
static int tshi_policy_read_counts(const tshi_policy_pass *pass, const tsh_policy_heads *at,
                                   tshi_policy_counts *c) {
    const tshi_argument *heads = at->heads ? tshi_policy_count(pass, at->heads) : NULL, *kv,
                        *hidden;
    if (!heads && !at->heads)
        return tshi_policy_fail(pass, TSH_ERR_ARGUMENT, "is to be cut by heads that have no name");
    kv = heads && at->kv_heads ? tshi_policy_count(pass, at->kv_heads) : heads;
    hidden = kv && at->hidden ? tshi_policy_count(pass, at->hidden) : kv;
    if (!hidden) return 0;
    c->heads = heads->value;
    c->kv = kv->value;
    c->hidden = at->hidden ? hidden->value : 0;
    if (c->heads % c->kv || c->hidden % c->heads)
        return tshi_policy_fail(pass, TSH_ERR_SHAPE,
                                "has %lld heads (\"%s\"), which must be a multiple of %lld key and "
                                "value heads and divide %lld hidden features",
                                (long long)c->heads, at->heads, (long long)c->kv,
                                (long long)c->hidden);
    c->whole = c->kv < c->heads && c->kv < pass->root->ctx->tp.size; /* grouped queries only */
    c->group = c->whole ? 1 : c->heads / c->kv;
    return 1;
}

/* Sets .local of an attention's arguments to this rank's share, as its features are sharded. */
static int tshi_policy_divide(const tshi_policy_pass *pass, const tsh_policy_heads *at) {
    const tsh_comm *tp = &pass->root->ctx->tp;
    tshi_policy_counts c; /* counts of the attention over all ranks */
    tsh_layout cut;       /* how the query heads are sharded */
    int64_t owned;        /* number of this rank's query heads */
    if (!tshi_policy_read_counts(pass, at, &c)) return 0;
    cut = tsh_shard_units(0, c.group);
    owned = tsh_chunk(&cut, c.heads, tp->size, tp->rank, NULL);
    tshi_policy_count(pass, at->heads)->local = owned;
    if (at->kv_heads)
        tshi_policy_count(pass, at->kv_heads)->local = c.whole ? c.kv : owned / c.group;
    if (at->hidden) tshi_policy_count(pass, at->hidden)->local = owned * (c.hidden / c.heads);
    return 1;
}

/* Fills in the *n segments of a layer whose `features` are sharded by heads; sets *n to 0 if the
 * layer stays replicated. row: 1 for a row-parallel layer. Returns 0 and sets an error if the heads
 * do not fit. */
static int tshi_policy_segments(const tshi_policy_pass *pass, const tsh_policy_layer *layer,
                                const char *path, int64_t features, int row, tsh_segment *segment,
                                int *n) {
    tshi_policy_counts c;
    int64_t total = 0, head;                /* heads of all segments; features of a head */
    int s, grouped = *n == 3 && !layer->kv; /* 1: a fused [Q|K|V] */
    if (!tshi_policy_read_counts(pass, layer->heads, &c)) return 0;
    for (s = 0; s < *n; s++) {
        int queries = !layer->kv && (s == 0 || !grouped); /* 1: segment s holds query heads */
        segment[s].length = queries ? c.heads : c.kv;     /* counted in heads for now */
        segment[s].unit = queries ? c.group : 1;
        total += segment[s].length;
    }
    head = features / total;
    if (features % total)
        return tshi_policy_fail(
            pass, TSH_ERR_SHAPE,
            "cuts \"%s\" by heads, but its %lld features do not divide into %lld heads (\"%s\")",
            path, (long long)features, (long long)total, layer->heads->heads);
    if (row ? c.hidden && c.hidden != features : c.hidden && head * c.heads % c.hidden)
        return tshi_policy_fail(
            pass, TSH_ERR_SHAPE,
            "has %lld hidden features (\"%s\"), but \"%s\" has %lld for %lld heads",
            (long long)c.hidden, layer->heads->hidden, path, (long long)features, (long long)total);
    if (c.whole && grouped)
        return tshi_policy_fail(
            pass, TSH_ERR_LAYOUT,
            "fuses %lld query heads with %lld key and value heads in \"%s\", but there are %d "
            "ranks: make it three layers, of queries, keys and values; those of keys and values "
            "stay whole",
            (long long)c.heads, (long long)c.kv, path, pass->root->ctx->tp.size);
    for (s = 0; s < *n; s++) {
        segment[s].length *= head; /* convert heads to features */
        segment[s].unit *= head;
    }
    if (c.whole && layer->kv) *n = 0; /* keys and values stay replicated */
    return 1;
}

/* Returns the module in the block that has the layer's weight and bias. NULL if there is none, with
 * an error unless the layer is optional. */
static tsh_module *tshi_policy_find_layer(const tshi_policy_pass *pass,
                                          const tsh_policy_layer *layer) {
    tsh_module *owner[2] = {NULL, NULL}; /* modules that have the weight, the bias */
    const char *const name[2] = {layer->weight, layer->bias};
    char similar[TSH_MESSAGE_SIZE / 2] = "";
    if (!name[0] && !name[1])
        (void)tshi_policy_fail(pass, TSH_ERR_ARGUMENT,
                               "has a layer whose weight and bias are both empty");
    for (int i = 0; i < 2; i++) {
        if (!name[i] || tshi_module_lookup(pass->block, name[i], &owner[i]) ||
            layer->ignore_checker)
            continue;
        tshi_module_suggest(pass->block, name[i], similar, sizeof similar);
        (void)tshi_policy_fail(pass, TSH_ERR_ARGUMENT, "has no parameter \"%.64s\"; %s", name[i],
                               similar);
        return NULL;
    }
    if (owner[0] && owner[1] && owner[0] != owner[1])
        (void)tshi_policy_fail(pass, TSH_ERR_ARGUMENT,
                               "has \"%s\" and \"%s\" in different layers: give each its own entry",
                               name[0], name[1]);
    return owner[0] ? owner[0] : owner[1]; /* a layer may have only one of them */
}

/* Appends layer m's rule to the plan. 0 and an error if the model does not fit the policy. */
static int tshi_policy_rule(tshi_policy_pass *pass, const tsh_policy_layer *layer, tsh_module *m,
                            tsh_style style) {
    tsh_plan_rule *rule = &pass->rules[pass->count]; /* the rule to write */
    const char *path = layer->weight ? layer->weight : layer->bias;
    tsh_layout layouts[TSHI_MODULE_PARAMS];      /* to learn which dimension is sharded */
    int n = layer->n_fused ? layer->n_fused : 1; /* number of segments */
    if (!m->reversed != !layer->reversed)        /* the policy would shard the wrong dimension */
        return tshi_policy_fail(pass, TSH_ERR_ARGUMENT,
                                "stores \"%s\" %s, but the policy says %s: see "
                                "tsh_linear_desc.reversed",
                                path, m->reversed ? "reversed" : "(out, in)",
                                m->reversed ? "(out, in)" : "reversed");
    if (n < 1 || n > TSH_MAX_SEGMENTS)
        return tshi_policy_fail(pass, TSH_ERR_ARGUMENT,
                                "fuses %d parts in \"%s\"; a layer has at most %d", n, path,
                                TSH_MAX_SEGMENTS);
    *rule = tshi_parallel_rule(layer->replace == TSH_PLAIN ? style : layer->replace);
    rule->path = tshi_module_below(pass->root, m->path);
    rule->segments = n;
    if (layer->heads && (rule->style == TSH_COLWISE || rule->style == TSH_ROWWISE) &&
        m->kind->layouts && m->param[0]) {
        m->kind->layouts(m, rule, layouts); /* layouts[0] is that of the weight */
        if (!tshi_policy_segments(pass, layer, path, m->param[0]->dim[layouts[0].dim],
                                  rule->style == TSH_ROWWISE, pass->segments[pass->count], &n))
            return 0;
        rule->cut = (const tsh_segment *)pass->segments[pass->count];
        if (n == 0) rule->style = TSH_PLAIN; /* replicated, even if it was sharded before */
    } else if (layer->heads) {
        return tshi_policy_fail(pass, TSH_ERR_ARGUMENT,
                                "is to cut \"%s\" by heads, but under its style nothing is cut",
                                path);
    }
    pass->count++;
    return 1;
}

/* -- all layers of all blocks ----------------------------------------------- */

/* Runs the pass over one list of the policy, for the current block; `style` is for layers that name
 * none. Returns 0 and sets an error if the block does not fit the list. */
static int tshi_policy_layers(tshi_policy_pass *pass, const tsh_policy_layer *layer,
                              const char *list, tsh_style style) {
    int found = !layer || !pass->rules; /* 1: the block has a layer of the list */
    for (; layer && !tshi_policy_is_end(layer); layer++) {
        tsh_module *m = pass->rules ? tshi_policy_find_layer(pass, layer) : NULL;
        if (pass->root->ctx->error.code != TSH_OK) return 0;
        if (!pass->rules) pass->count++; /* first pass: all layers, even missing ones */
        if (!m) continue;
        found = 1;
        if (!pass->divide && !tshi_policy_rule(pass, layer, m, style)) return 0;
        if (pass->divide && layer->heads && !tshi_policy_divide(pass, layer->heads)) return 0;
    }
    return found || tshi_policy_fail(pass, TSH_ERR_ARGUMENT, "has no layer of the list %s", list);
}

/* Checks the policy's arguments that count no heads; in the third pass also divides them. */
static int tshi_policy_arguments(const tshi_policy_pass *pass) {
    const tsh_comm *tp = &pass->root->ctx->tp;
    const char *const *path = pass->policy->arguments; /* ended by NULL */
    tsh_layout cut = tsh_sharded(0);                   /* even shares on all ranks */
    tshi_argument *argument;
    for (; path && *path; path++) {
        if (!(argument = tshi_policy_count(pass, *path))) return 0;
        if (pass->divide)
            argument->local = tsh_chunk(&cut, argument->value, tp->size, tp->rank, NULL);
    }
    return 1;
}

/* Runs one pass over all blocks. Returns their number; -1 and an error if one does not fit. */
static int tshi_policy_blocks(tshi_policy_pass *pass, const tsh_policy *family) {
    const tsh_policy *p;
    int blocks = 0;                  /* number of blocks that match */
    for (p = family; p; p = p->next) /* encoders, decoders */
        for (tsh_module *m = pass->root; m; m = tshi_module_next(pass->root, m)) {
            const char *path = tshi_module_below(pass->root, m->path);
            if (!p->blocks || !tshi_parallel_match(p->blocks, path)) continue;
            blocks++;
            pass->policy = p;
            pass->block = m; /* for the functions below and their errors */
            if (!tshi_policy_layers(pass, p->attn_qkv, "attn_qkv", TSH_COLWISE) ||
                !tshi_policy_layers(pass, p->attn_out, "attn_out", TSH_ROWWISE) ||
                !tshi_policy_layers(pass, p->mlp_in, "mlp_in", TSH_COLWISE) ||
                !tshi_policy_layers(pass, p->mlp_out, "mlp_out", TSH_ROWWISE) ||
                (pass->rules && !tshi_policy_arguments(pass)))
                return -1;
        }
    return blocks;
}

TSH_API TSHI_COLD tsh_result tsh_parallelize_policy(tsh_module *root, const tsh_policy *policy) {
    tshi_policy_pass pass; /* state of all three passes */
    tshi_block *block;
    size_t rule = sizeof *pass.rules, cut = sizeof *pass.segments, capacity;
    char similar[TSH_MESSAGE_SIZE / 2] = "";
    tsh_ctx *ctx = root ? root->ctx : NULL;
    if (!ctx) return TSH_ERR_ARGUMENT;
    if (ctx->error.code != TSH_OK) return ctx->error.code;
    if (!policy)
        return tsh_fail(ctx, TSH_ERR_ARGUMENT,
                        "tsh_parallelize_policy: there is no policy: tsh_policy_find knows none of "
                        "that name");
    memset(&pass, 0, sizeof pass); /* first pass: rules is NULL */
    pass.root = root;
    if (tshi_policy_blocks(&pass, policy) == 0) { /* first pass: count */
        const char *blocks = policy->blocks ? policy->blocks : "";
        tshi_module_suggest(root, blocks, similar, sizeof similar);
        return tsh_fail(ctx, TSH_ERR_ARGUMENT,
                        "tsh_parallelize_policy: %s: \"%.64s\" matches no block below \"%s\"; %s",
                        policy->name ? policy->name : "", blocks, root->path, similar);
    }
    capacity = (size_t)pass.count; /* max number of rules */
    block = tshi_mem_alloc(ctx, TSH_MEM_STEP, capacity * (rule + cut) + 1);
    if (!block) return ctx->error.code;
    pass.rules = (tsh_plan_rule *)tshi_mem_data(block); /* block: rules, then segments */
    pass.segments = (tsh_segment(*)[TSH_MAX_SEGMENTS])(void *)(pass.rules + capacity);
    pass.count = 0;                              /* counts the rules as they are written */
    if (tshi_policy_blocks(&pass, policy) > 0 && /* second pass: write the rules */
        tsh_parallelize(root, pass.rules, pass.count) == TSH_OK) {
        pass.divide = 1; /* third pass: divide arguments */
        (void)tshi_policy_blocks(&pass, policy);
    }
    tshi_mem_release(ctx, block);
    return ctx->error.code;
}

/* ========================================================================== */
/* >>optim                                              MARK: - optim (private) */
/* Optimisers, the global norm, learning-rate schedules.                        */
/* Needs: >>parallel >>comm.                                                    */
/* ========================================================================== */

/* One tsh_optim_step computes the norm of all gradients, clips them by it, and updates every
 * parameter that has a gradient. With tsh_optim_desc.zero and dp > 1 (ZeRO, Rajbhandari et al.
 * 2020), each rank of dp holds one chunk of every gradient and moment (TSHI_CHUNKED), updates that
 * chunk of the parameter, and gathers the other ranks' chunks: the same bits as without .zero. */

/* The state of one parameter. Moments are allocated at the first update. */
typedef struct tshi_moments {
    tsh_tensor *param, *first, *second; /* Adam's m and v; SGD's momentum is `first` */
    double lr_scale, weight_decay;      /* as set by tsh_optim_group */
    int64_t steps;                      /* number of updates of this parameter so far */
} tshi_moments;

struct tsh_optim {
    tsh_module *module;  /* its parameters are optimised */
    tsh_optim_desc desc; /* with defaults filled in */
    tsh_optim_info info; /* counts of steps, the last norm */
    tshi_moments *each;  /* shape (count): one per parameter, in pre-order */
    int count;           /* number of parameters, a tied one once */
    tsh_optim *older;    /* the ctx's optimiser created before this one */
};

/* -- the global norm -------------------------------------------------------- */

/* **total += sum x^2 of n elements, in double, with TSHI_BLOCK sums at a time (vectorises). */
typedef double *tshi_optim_total;
TSHI_INLINE void tshi_optim_squares_body(int64_t n, const tshi_operand *operand,
                                         const tshi_optim_total *total) {
    const tsh_real *x = (const tsh_real *)operand->data;
    double partial[TSHI_BLOCK], sum = 0; /* sum: first of the elements after the last block */
    int64_t e;
    for (int i = 0; i < TSHI_BLOCK; i++) partial[i] = 0;
    for (e = 0; e + TSHI_BLOCK <= n; e += TSHI_BLOCK) {
        for (int i = 0; i < TSHI_BLOCK; i++) partial[i] += (double)x[e + i] * (double)x[e + i];
    }
    for (; e < n; e++) sum += (double)x[e] * (double)x[e];
    for (int i = 0; i < TSHI_BLOCK; i++) sum += partial[i];
    **total += sum;
}
TSHI_KERNEL(tshi_optim_squares, tshi_optim_total);

/* Number of elements that one unit of work sums. The units' sums are added in order, so the bits
 * are the same for any number of threads. */
enum { TSHI_OPTIM_BLOCK = 1 << 16 };

/* The job of tshi_optim_sum_part, shared by all threads. */
typedef struct tshi_squares {
    tsh_real *x; /* the elements, n of them */
    int64_t n;
    double *sums;          /* one sum per unit of TSHI_OPTIM_BLOCK elements */
    tshi_kernel_fn kernel; /* tshi_optim_squares for this CPU */
} tshi_squares;

/* Runs on one thread: sums the squares of the units [from, to). */
static void tshi_optim_sum_part(void *job, int thread, int64_t from, int64_t to) {
    const tshi_squares *all = (const tshi_squares *)job;
    (void)thread;
    for (; from < to; from++) {
        int64_t first = from * TSHI_OPTIM_BLOCK;
        const tshi_operand x = tshi_kernel_reals(all->x + first, 1);
        double *sum = all->sums + from; /* the sum of unit `from` */
        *sum = 0;
        all->kernel(tshi_base_min(TSHI_OPTIM_BLOCK, all->n - first), &x, &sum);
    }
}

/* Returns the sum of squares of n elements; 0 and an error if there is no memory. */
static double tshi_optim_sum_squares(tsh_ctx *ctx, tsh_real *x, int64_t n) {
    const int64_t blocks = tshi_base_ceil(n, TSHI_OPTIM_BLOCK);
    tshi_squares all = {x, n, NULL, tshi_optim_squares[ctx->isa]};
    tshi_block *scratch; /* memory of all.sums */
    double sum = 0;
    if (!n) return 0; /* this rank's shard is empty */
    scratch = tshi_mem_alloc(ctx, TSH_MEM_STEP, (size_t)blocks * sizeof(double));
    if (!scratch) return 0;
    all.sums = (double *)tshi_mem_data(scratch);
    tshi_team_run(tshi_team_parts(ctx, blocks, 1), blocks, 1, tshi_optim_sum_part, &all);
    for (int64_t i = 0; i < blocks; i++) sum += all.sums[i];
    tshi_mem_release(ctx, scratch);
    return sum;
}

/* Adds the squares of chunk k of param's gradient to sums[k], for all k; chunked 1: for this rank's
 * chunk only. A replicated gradient is added on rank 0 of tp only, that of a parameter that several
 * stages hold on the first of these stages only. */
static void tshi_optim_add_squares(tsh_tensor *param, int chunked, double *sums) {
    tsh_ctx *ctx = param->ctx;
    if (tshi_tape_pending(param))
        (void)tsh_fail(ctx, TSH_ERR_STATE,
                       "the gradient of \"%s\" is pending; call tsh_sync_grads first", param->path);
    if (!param->gr.live || (param->layout.kind != TSH_SHARDED && ctx->tp.rank != 0)) return;
    if (param->stage && param->stage - 1 != ctx->pp.rank) return; /* another stage adds it */
    for (int k = 0; k < ctx->dp.size; k++)
        if (!chunked || k == ctx->dp.rank)
            sums[k] += tshi_optim_sum_squares(
                ctx, (tsh_real *)tshi_mem_data(param->gr.block) + tshi_bucket_chunk(param, k),
                tshi_bucket_chunk_size(param, k));
}

/* Sets *norm to the 2-norm of all gradients below module, the same on every rank; NaN or infinity
 * if a gradient has one. Summed by chunks: the same bits with and without .zero. */
static tsh_result tshi_optim_norm(tsh_module *module, double *norm) {
    tsh_ctx *ctx = module->ctx;
    const int64_t begin = tshi_trace_now(ctx->trace);
    const size_t bytes = (size_t)ctx->dp.size * sizeof(double); /* size of sums */
    tshi_block *scratch = tshi_mem_alloc(ctx, TSH_MEM_STEP, bytes);
    tshi_walk at = {NULL, NULL, 0};
    double *sums, sum = 0; /* sums: one per chunk, shape (dp.size); sum: of all chunks */
    int k, chunked = 0;    /* chunked: 1 if a parameter is TSHI_CHUNKED */
    *norm = 0;
    if (!scratch) return ctx->error.code;
    sums = (double *)tshi_mem_data(scratch);
    memset(sums, 0, bytes);
    while (tshi_module_step(module, &at))
        chunked |= !at.param->absent && (at.param->flags & TSHI_CHUNKED);
    while (tshi_module_step_once(module, &at))
        if (!at.param->absent) tshi_optim_add_squares(at.param, chunked, sums);
    if (tsh_ok(ctx) && chunked) /* sums[k] is 0 on all ranks but k */
        (void)tshi_error_comm(ctx, tsh_allreduce(&ctx->dp, sums, ctx->dp.size, TSH_F64, TSH_SUM),
                              "norm of gradients");
    for (k = 0; k < ctx->dp.size; k++) sum += sums[k];
    tshi_mem_release(ctx, scratch);
    if (!tsh_ok(ctx)) return ctx->error.code;
    if (tshi_error_comm(ctx, tsh_allreduce(&ctx->tp, &sum, 1, TSH_F64, TSH_SUM),
                        "norm of gradients") == TSH_OK)
        (void)tshi_error_comm(ctx, tsh_allreduce(&ctx->pp, &sum, 1, TSH_F64, TSH_SUM),
                              "norm of gradients");
    *norm = sqrt(sum);
    if (ctx->trace)
        (void)tshi_trace_add(ctx->trace, TSHI_TRACE_OPTIM, "norm of gradients", begin, 0);
    return ctx->error.code;
}

/* Returns min(1, max / (norm + 1e-6)), the factor of torch.nn.utils.clip_grad_norm_. */
static double tshi_optim_clip_factor(double norm, double max) {
    return fmin(1, max / (norm + 1e-6));
}

TSH_API tsh_result tsh_clip_grad_norm(tsh_module *module, double max_norm, double *norm) {
    tshi_walk at = {NULL, NULL, 0};
    tshi_operand x[2];
    double before, factor; /* norm before clipping; what gradients are multiplied by */
    if (norm) *norm = 0;
    if (!module) return TSH_ERR_ARGUMENT;
    if (tshi_optim_norm(module, &before) != TSH_OK) return module->ctx->error.code;
    if (norm) *norm = before;
    factor = tshi_optim_clip_factor(before, max_norm);
    while (factor < 1 && tshi_module_step_once(module, &at)) {
        if (!at.param->gr.live) continue; /* no gradient */
        x[0] = x[1] = tshi_kernel_reals((tsh_real *)tshi_mem_data(at.param->gr.block), 1);
        tshi_map_scale_forward[at.param->ctx->isa](tsh_local_numel(at.param), x, &factor);
    }
    return TSH_OK;
}

/* -- updates ---------------------------------------------------------------- */

enum { TSHI_OPTIM_X, TSHI_OPTIM_GRAD, TSHI_OPTIM_FIRST, TSHI_OPTIM_SECOND, TSHI_OPTIM_OPERANDS };

/* Adam (Kingma & Ba 2015), AdamW (Loshchilov & Hutter 2019): g = clip grad + decay x, m = b1 m +
 * (1 - b1) g, v = b2 v + (1 - b2) g^2, x = x keep - step m / (sqrt(v) root + eps). */
typedef struct tshi_adam {
    double clip, decay, keep, b1, b2, step, root, eps; /* factors of the formula above */
} tshi_adam;
TSHI_INLINE void tshi_optim_adam_body(int64_t n, const tshi_operand *operand, const tshi_adam *p) {
    const tsh_real clip = TSHI_R(p->clip), decay = TSHI_R(p->decay), keep = TSHI_R(p->keep);
    const tsh_real b1 = TSHI_R(p->b1), b2 = TSHI_R(p->b2), c1 = TSHI_R(1 - p->b1),
                   c2 = TSHI_R(1 - p->b2);
    const tsh_real step = TSHI_R(p->step), root = TSHI_R(p->root), eps = TSHI_R(p->eps);
    tsh_real pad[4][TSHI_BLOCK], x[TSHI_BLOCK], m[TSHI_BLOCK], v[TSHI_BLOCK];
    const tsh_real *xs, *gs, *ms, *vs;            /* blocks of x, gradient, m, v */
    for (int64_t e = 0; e < n; e += TSHI_BLOCK) { /* loads pad the last block */
        xs = tshi_kernel_load(&operand[TSHI_OPTIM_X], e, n, pad[0]);
        gs = tshi_kernel_load(&operand[TSHI_OPTIM_GRAD], e, n, pad[1]);
        ms = tshi_kernel_load(&operand[TSHI_OPTIM_FIRST], e, n, pad[2]);
        vs = tshi_kernel_load(&operand[TSHI_OPTIM_SECOND], e, n, pad[3]);
        TSHI_LANES for (int i = 0; i < TSHI_BLOCK; i++) {
            const tsh_real g = gs[i] * clip + decay * xs[i]; /* decay: 0 for AdamW */
            m[i] = b1 * ms[i] + c1 * g;
            v[i] = b2 * vs[i] + c2 * g * g;
            x[i] = xs[i] * keep - step * m[i] / (tshi_math_sqrt(v[i]) * root + eps);
        }
        tshi_kernel_store(&operand[TSHI_OPTIM_X], e, n, x, 0);
        tshi_kernel_store(&operand[TSHI_OPTIM_FIRST], e, n, m, 0);
        tshi_kernel_store(&operand[TSHI_OPTIM_SECOND], e, n, v, 0);
    }
}
TSHI_KERNEL(tshi_optim_adam, tshi_adam);

/* torch.optim.SGD: d = clip grad + decay x, m = momentum m + d, x -= lr (nesterov ? d + momentum m
 * : m); without momentum, whose operand is NULL, x -= lr d. */
typedef struct tshi_sgd {
    double clip, decay, lr, momentum; /* clip: factor of the gradient */
    int nesterov;                     /* 1: Nesterov momentum */
} tshi_sgd;
TSHI_INLINE void tshi_optim_sgd_body(int64_t n, const tshi_operand *operand, const tshi_sgd *p) {
    const tsh_real clip = TSHI_R(p->clip), decay = TSHI_R(p->decay), lr = TSHI_R(p->lr),
                   momentum = TSHI_R(p->momentum);
    const int remembers = operand[TSHI_OPTIM_FIRST].data != NULL; /* 1: with momentum */
    tsh_real pad[3][TSHI_BLOCK], x[TSHI_BLOCK], m[TSHI_BLOCK];
    const tsh_real *xs, *gs, *ms; /* blocks of x, gradient, m */
    for (int64_t e = 0; e < n; e += TSHI_BLOCK) {
        xs = tshi_kernel_load(&operand[TSHI_OPTIM_X], e, n, pad[0]);
        gs = tshi_kernel_load(&operand[TSHI_OPTIM_GRAD], e, n, pad[1]);
        if (!remembers) {
            TSHI_LANES for (int i = 0; i < TSHI_BLOCK; i++)
                x[i] = xs[i] - lr * (gs[i] * clip + decay * xs[i]);
        } else {
            ms = tshi_kernel_load(&operand[TSHI_OPTIM_FIRST], e, n, pad[2]);
            TSHI_LANES for (int i = 0; i < TSHI_BLOCK; i++) {
                const tsh_real d = gs[i] * clip + decay * xs[i], v = momentum * ms[i] + d;
                m[i] = v;
                x[i] = xs[i] - lr * (p->nesterov ? TSHI_R(d + momentum * v) : v);
            }
            tshi_kernel_store(&operand[TSHI_OPTIM_FIRST], e, n, m, 0);
        }
        tshi_kernel_store(&operand[TSHI_OPTIM_X], e, n, x, 0);
    }
}
TSHI_KERNEL(tshi_optim_sgd, tshi_sgd);

/* Returns the index of x's first element that this rank updates: 0 or, with .zero, its chunk's. */
static int64_t tshi_optim_first(const tsh_tensor *x) {
    return x->flags & TSHI_CHUNKED ? tshi_bucket_chunk(x, x->ctx->dp.rank) : 0;
}

/* Returns the number of x's elements that this rank updates: all or, with .zero, its chunk's. */
static int64_t tshi_optim_count(const tsh_tensor *x) {
    return x->flags & TSHI_CHUNKED ? tshi_bucket_chunk_size(x, x->ctx->dp.rank)
                                   : tsh_local_numel(x);
}

/* Gathers all chunks of a moment over dp into values, which has the size of its parameter. what:
 * for the error text. */
static tsh_result tshi_optim_gather(const tsh_tensor *moment, tsh_real *values, const char *what) {
    tsh_ctx *ctx = moment->ctx;
    tshi_block *block = tshi_mem_alloc(ctx, TSH_MEM_STEP, (size_t)ctx->dp.size * sizeof(int64_t));
    tsh_real *own = values + tshi_optim_first(moment); /* where this rank's chunk goes */
    tsh_result result;
    int64_t *counts; /* shape (dp.size): number of elements per chunk */
    if (!block) return ctx->error.code;
    counts = (int64_t *)tshi_mem_data(block);
    for (int k = 0; k < ctx->dp.size; k++) counts[k] = tshi_bucket_chunk_size(moment, k);
    memcpy(own, tshi_mem_data(moment->block), (size_t)counts[ctx->dp.rank] * sizeof *own);
    result = tshi_error_comm(ctx, tsh_allgather(&ctx->dp, own, values, counts, 1, TSH_REAL), what);
    tshi_mem_release(ctx, block);
    return result;
}

/* Replaces a moment's block by an uninitialised one of n elements; 0 and an error: no memory. */
static int tshi_optim_allocate(tsh_tensor *moment, int64_t n) {
    tshi_block *block = tshi_mem_alloc(moment->ctx, TSH_MEM_OPTIMISER, tshi_dtype_reals(n));
    if (!block) return 0;
    tshi_mem_release(moment->ctx, moment->block);
    moment->block = block;
    return 1;
}

/* Cuts a moment that holds all values down to this rank's chunk. */
static void tshi_optim_keep_chunk(tsh_tensor *moment) {
    tshi_block *whole = moment->block; /* referenced until the chunk is copied */
    const int64_t n = tshi_optim_count(moment);
    whole->refs++;
    if (tshi_optim_allocate(moment, n))
        memcpy(tshi_mem_data(moment->block),
               (tsh_real *)tshi_mem_data(whole) + tshi_optim_first(moment), tshi_dtype_reals(n));
    tshi_mem_release(moment->ctx, whole);
}

/* Gives a moment its parameter's new layout. A chunked moment is gathered over dp first and cut
 * down to this rank's chunk afterwards. */
static void tshi_optim_relayout(tsh_tensor *moment, const tsh_layout *layout) {
    tsh_ctx *ctx = moment->ctx;
    tsh_tensor part = *moment; /* the moment with its old block */
    if (!(moment->flags & TSHI_CHUNKED) ||
        tshi_layout_equal(&moment->layout, layout, moment->dim, ctx->tp.size)) {
        tshi_module_relayout(moment, layout);
        return;
    }
    part.block->refs++;
    if (tshi_optim_allocate(moment, tsh_local_numel(moment))) {
        if (tshi_optim_gather(&part, (tsh_real *)tshi_mem_data(moment->block),
                              "tsh_optim_step: moments of a new layout") == TSH_OK)
            tshi_module_relayout(moment, layout);
        tshi_optim_keep_chunk(moment);
    }
    tshi_mem_release(ctx, part.block);
}

/* Returns *moment with param's layout, created with zeros if it is NULL; NULL after an error. */
static tsh_tensor *tshi_optim_moment(tsh_tensor *param, tsh_tensor **moment) {
    tsh_ctx *ctx = param->ctx;
    const tsh_shape shape = tsh_shape_of(param);
    tsh_tensor *m = *moment; /* NULL: not created yet */
    if (m) {
        tshi_optim_relayout(m, &param->layout);
        return ctx->error.code == TSH_OK ? m : NULL;
    }
    m = tshi_tensor_handle(ctx, TSHI_OWNED | (param->flags & TSHI_CHUNKED));
    if (!m) return NULL;
    m->dtype = TSH_REAL;
    if (tshi_tensor_set_shape(m, "tsh_optim_step", &shape, &param->layout) != TSH_OK ||
        !tshi_optim_allocate(m, tshi_optim_count(m))) {
        tshi_tensor_release(m);
        return NULL;
    }
    memset(tshi_mem_data(m->block), 0, tshi_dtype_reals(tshi_optim_count(m)));
    *moment = m;
    return m;
}

/* An update shared by threads: by elements or, if the gradient is row-sparse, by rows. */
typedef struct tshi_optim_work {
    tshi_kernel_fn kernel; /* tshi_optim_adam or tshi_optim_sgd */
    const tshi_operand *x; /* shape (TSHI_OPTIM_OPERANDS) */
    const void *params;    /* tshi_adam or tshi_sgd */
    const int32_t *marks;  /* shape (rows): not 0 where the gradient has the row; NULL: dense */
    int64_t width;         /* elements per row; 1 if dense */
} tshi_optim_work;

/* Runs on one thread: updates the rows [from, to); of a sparse gradient only marked ones, a run of
 * adjacent ones at a time. */
static void tshi_optim_update_part(void *job, int thread, int64_t from, int64_t to) {
    const tshi_optim_work *work = (const tshi_optim_work *)job;
    const int32_t *marks = work->marks;
    tshi_operand part[TSHI_OPTIM_OPERANDS]; /* the operands at row r */
    int64_t n;                              /* rows of this run */
    (void)thread;
    for (int64_t r = from; r < to; r += n) {
        n = marks ? 1 : to - from;
        if (marks && !marks[r]) continue; /* the gradient lacks the row */
        while (marks && r + n < to && marks[r + n]) n++;
        memcpy(part, work->x, sizeof part);
        for (int i = 0; i < TSHI_OPTIM_OPERANDS; i++) tshi_kernel_move(&part[i], r * work->width);
        work->kernel(n * work->width, part, work->params);
    }
}

/* Runs an update's kernel on all threads, over the elements of t that this rank updates. */
static void tshi_optim_run(const tsh_tensor *t, tshi_kernel_fn kernel, const tshi_operand *x,
                           const void *params) {
    const int32_t *marks = t->sparse ? (const int32_t *)tshi_mem_data(t->marks) : NULL;
    const int64_t count = tshi_optim_count(t), rows = marks ? t->local[0] : count;
    tshi_optim_work work = {kernel, x, params, marks, 1};
    if (!count) return; /* this rank updates nothing */
    work.width = count / rows;
    tshi_team_run(tshi_kernel_parts(t->ctx, rows, work.width), rows, marks ? 1 : 16,
                  tshi_optim_update_part, &work);
}

/* Updates one parameter and its moments, created if needed. clip: factor of the gradient. */
static void tshi_optim_update(const tsh_optim *optim, tshi_moments *each, double clip) {
    const tsh_optim_desc *d = &optim->desc;
    tsh_tensor *t = each->param;
    const double lr = d->lr * each->lr_scale, decay = each->weight_decay; /* this parameter's */
    tshi_sgd sgd = {clip, decay, lr, d->momentum, d->nesterov};
    tshi_adam p = {clip, decay, 1, d->beta1, d->beta2, 0, 0, d->eps};
    tshi_operand x[TSHI_OPTIM_OPERANDS];
    x[TSHI_OPTIM_X] = tshi_kernel_operand(tshi_tensor_at(t), 1, t->dtype);
    x[TSHI_OPTIM_GRAD] = tshi_kernel_reals((tsh_real *)tshi_mem_data(t->gr.block), 1);
    x[TSHI_OPTIM_FIRST] = x[TSHI_OPTIM_SECOND] = tshi_kernel_reals(NULL, 1);
    tshi_kernel_move(&x[TSHI_OPTIM_X], tshi_optim_first(t));
    tshi_kernel_move(&x[TSHI_OPTIM_GRAD], tshi_optim_first(t));
    each->steps++;                               /* read by the bias corrections */
    if (d->kind != TSH_SGD || d->momentum > 0) { /* this kind has a first moment */
        if (!tshi_optim_moment(t, &each->first)) return;
        x[TSHI_OPTIM_FIRST].data = tshi_tensor_at(each->first);
    }
    if (d->kind == TSH_SGD) {
        tshi_optim_run(t, tshi_optim_sgd[t->ctx->isa], x, &sgd);
        return;
    }
    if (!tshi_optim_moment(t, &each->second)) return;
    x[TSHI_OPTIM_SECOND].data = tshi_tensor_at(each->second);
    if (d->kind == TSH_ADAMW) {
        p.decay = 0; /* AdamW decays x itself, not through the gradient */
        p.keep = 1 - lr * decay;
    }
    p.step = lr / (1 - pow(d->beta1, (double)each->steps)); /* bias corrections */
    p.root = 1 / sqrt(1 - pow(d->beta2, (double)each->steps));
    if (t->sparse) { /* torch.optim.SparseAdam adds eps to sqrt(v) as it is */
        p.step /= p.root;
        p.root = 1;
    }
    tshi_optim_run(t, tshi_optim_adam[t->ctx->isa], x, &p);
}

/* Checks a description; returns an error if a value is out of range. */
static tsh_result tshi_optim_check(tsh_ctx *ctx, const tsh_optim_desc *d) {
    if ((unsigned)d->kind <= (unsigned)TSH_ADAMW && d->lr >= TSH_ZERO && d->momentum >= 0 &&
        d->beta1 >= TSH_ZERO && d->beta1 < 1 && d->beta2 >= TSH_ZERO && d->beta2 < 1 &&
        d->eps >= TSH_ZERO && d->weight_decay >= 0 && d->clip_norm >= 0)
        return TSH_OK;
    return tsh_fail(ctx, TSH_ERR_ARGUMENT,
                    "tsh_optim_new: kind %d, lr %g, momentum %g, betas %g and %g, eps %g, "
                    "weight_decay %g, clip_norm %g: none may be below 0 (for 0 itself where 0 is "
                    "the default: TSH_ZERO), betas are below 1",
                    (int)d->kind, d->lr, d->momentum, d->beta1, d->beta2, d->eps, d->weight_decay,
                    d->clip_norm);
}

TSH_API TSHI_COLD tsh_optim *tsh_optim_new(tsh_module *module, const tsh_optim_desc *desc) {
    tsh_ctx *ctx = module ? module->ctx : NULL;
    tshi_walk at = {NULL, NULL, 0};
    tsh_optim *optim;
    size_t slots = 0; /* number of parameters */
    if (!ctx || ctx->error.code != TSH_OK || (desc && tshi_optim_check(ctx, desc) != TSH_OK))
        return NULL;
    optim = (tsh_optim *)tshi_mem_arena_alloc(ctx, &ctx->books, sizeof *optim);
    if (!optim) return NULL;
    if (desc) optim->desc = *desc;
    optim->module = module;
    optim->desc.lr = tshi_base_option(optim->desc.lr, 1e-3);
    optim->desc.beta1 = tshi_base_option(optim->desc.beta1, 0.9);
    optim->desc.beta2 = tshi_base_option(optim->desc.beta2, 0.999);
    optim->desc.eps = tshi_base_option(optim->desc.eps, 1e-8);
    while (tshi_module_step_once(module, &at)) slots++; /* `at` is zeros again at the end */
    optim->each = (tshi_moments *)tshi_mem_arena_alloc(ctx, &ctx->books,
                                                       (slots + 1) * sizeof *optim->each);
    if (!optim->each) return NULL;
    while (tshi_module_step_once(module, &at)) {
        tshi_moments *each = &optim->each[optim->count++];
        each->param = at.param;
        each->lr_scale = 1; /* unless tsh_optim_group changes it */
        each->weight_decay = optim->desc.weight_decay;
        if (optim->desc.zero && ctx->dp.size > 1) at.param->flags |= TSHI_CHUNKED;
    }
    optim->older = ctx->optims; /* prepend to the ctx's list */
    ctx->optims = optim;
    return optim;
}

TSH_API TSHI_COLD tsh_result tsh_optim_group(tsh_optim *optim, const char *pattern, double lr_scale,
                                   double weight_decay) {
    int i, matched = 0; /* matched: number of parameters that match */
    if (!optim || !pattern) return TSH_ERR_ARGUMENT;
    for (i = 0; i < optim->count; i++) {
        tshi_moments *each = &optim->each[i];
        if (!tshi_parallel_match(pattern, tshi_module_below(optim->module, each->param->path)))
            continue;
        each->lr_scale = lr_scale;
        each->weight_decay = weight_decay;
        matched++;
    }
    if (matched) return TSH_OK;
    return tsh_fail(optim->module->ctx, TSH_ERR_ARGUMENT,
                    "tsh_optim_group: \"%.96s\" matches none of the %d parameters", pattern,
                    optim->count);
}

TSH_API void tsh_optim_set_lr(tsh_optim *optim, double lr) {
    if (optim) optim->desc.lr = lr < 0 && lr >= TSH_ZERO ? 0 : lr; /* TSH_ZERO means 0 */
}

/* Updates every parameter that has a gradient. With .zero, parameters are queued in buckets, whose
 * all-gathers run during the next updates. */
static void tshi_optim_update_all(tsh_ctx *ctx, tsh_optim *optim, double clip) {
    const int chunked = optim->desc.zero && ctx->dp.size > 1; /* ZeRO is in effect */
    if (chunked) tshi_bucket_begin(ctx, 0);
    for (int i = 0; i < optim->count && ctx->error.code == TSH_OK; i++) {
        tsh_tensor *param = optim->each[i].param;
        const int64_t begin = tshi_trace_now(ctx->trace);
        if (!param->gr.live) continue; /* no gradient: keep the parameter as it is */
        if (!chunked && (param->flags & TSHI_CHUNKED))
            (void)tsh_fail(ctx, TSH_ERR_STATE,
                           "tsh_optim_step: \"%s\" belongs to another optimiser, which has .zero",
                           param->path);
        else
            tshi_optim_update(optim, &optim->each[i], clip);
        if (chunked) tshi_bucket_add(param, TSH_ALLGATHER);
        if (ctx->trace) (void)tshi_trace_add(ctx->trace, TSHI_TRACE_OPTIM, param->path, begin, 0);
    }
    if (chunked) tshi_bucket_end(ctx); /* waits for the all-gathers */
}

/* Clips and updates. If the norm is not finite, the step is skipped, counted and logged instead. */
static void tshi_optim_step(tsh_ctx *ctx, tsh_optim *optim) {
    double norm, max = optim->desc.clip_norm; /* max 0: no clipping */
    if (tshi_optim_norm(optim->module, &norm) != TSH_OK) return;
    optim->info.norm = norm; /* the norm before clipping */
    if (norm <= DBL_MAX) {   /* false for NaN and infinity */
        tshi_optim_update_all(ctx, optim, max > 0 ? tshi_optim_clip_factor(norm, max) : 1);
        optim->info.steps++;
        return;
    }
    optim->info.skipped++; /* the parameters are unchanged */
    tsh_log_message(
        &ctx->logger,
        "tsh_optim_step: a step is skipped, the %lldth: the norm of the gradients is %g",
        (long long)optim->info.skipped, norm);
}

TSH_API tsh_result tsh_optim_step(tsh_optim *optim) {
    tsh_ctx *ctx = optim ? optim->module->ctx : NULL;
    int64_t begin; /* start of the event in the trace */
    if (!ctx) return TSH_ERR_ARGUMENT;
    begin = tshi_trace_now(ctx->trace);
    tshi_optim_step(ctx, optim);
    if (ctx->trace) (void)tshi_trace_add(ctx->trace, TSHI_TRACE_OPTIM, "tsh_optim_step", begin, 0);
    return ctx->error.code;
}

TSH_API tsh_optim_info tsh_optim_state(const tsh_optim *optim) {
    tsh_optim_info info;
    memset(&info, 0, sizeof info);
    if (!optim) return info;
    info = optim->info;
    info.lr = optim->desc.lr; /* the current rate */
    return info;
}

TSH_API double tsh_schedule_lr(const tsh_schedule *schedule, int64_t step) {
    double done, span = (double)(schedule->total - schedule->warmup);
    if (step < schedule->warmup)
        return schedule->lr * (double)(step + 1) / (double)schedule->warmup;
    if (schedule->kind == TSH_CONSTANT) return schedule->lr;
    if (step >= schedule->total || span <= 0) return schedule->lr_min;
    done = (double)(step - schedule->warmup) / span;
    if (schedule->kind == TSH_COSINE) done = 0.5 - 0.5 * cos(3.14159265358979324 * done);
    return schedule->lr + (schedule->lr_min - schedule->lr) * done;
}

/* ========================================================================== */
/* >>pipeline                                        MARK: - pipeline (private) */
/* Pipeline parallelism: layers assigned to stages, micro-batches sent between  */
/* them.                                                                        */
/* Needs: >>tape >>module.                                                      */
/* ========================================================================== */

/* Each stage has one tape per micro-batch under way (tshi_micro) and swaps it into the ctx for the
 * micro-batch's forward, then for its backward. A tensor received from the previous stage is the
 * output of a node without inputs, whose backward sends the gradient back. Sends do not block until
 * a send queue is full; receives block. There is no deadlock: a rank receives from each neighbour
 * in the order in which that neighbour sends, and no send to one neighbour waits for a send to the
 * other. */
enum { TSHI_PIPELINE_SENDS = 16 }; /* max sends in flight to a neighbour; a comm's limit is 64 */

/* The description of a tensor, sent before its values as 64-bit words. */
typedef struct tshi_message {
    int64_t dtype, requires_grad, ndim, kind, cut, segments; /* layout: kind, dim, segments */
    int64_t dim[TSH_MAX_DIMS];                               /* global shape */
    tsh_segment segment[TSH_MAX_SEGMENTS];                   /* segments of the layout */
} tshi_message;
enum { TSHI_PIPELINE_WORDS = sizeof(tshi_message) / sizeof(int64_t) };

/* The sends in flight to one neighbour: a ring buffer, oldest first. Each keeps its values
 * alive. */
typedef struct tshi_send_queue {
    tsh_req req[TSHI_PIPELINE_SENDS];       /* requests, to wait for */
    tshi_block *block[TSHI_PIPELINE_SENDS]; /* the values being sent */
    int first, count;                       /* index of the oldest send; number of sends */
} tshi_send_queue;

/* A parameter that several stages hold (tied). Each of them computes a part of its gradient. */
typedef struct tshi_tie {
    struct tshi_tie *next; /* next in tsh_pipeline.ties */
    tsh_tensor *param;
    unsigned char *holds; /* one entry per stage: 1 if the stage holds the parameter */
    int holders;          /* number of stages that hold it */
} tshi_tie;

struct tsh_pipeline {
    tsh_ctx *ctx;
    tsh_module *container;    /* the module whose children are assigned to stages */
    tsh_pipeline_desc desc;   /* as given to tsh_pipeline_new */
    int *counts;              /* number of children of the container, one entry per stage */
    int stage, last;          /* index of this rank's stage, of the last stage */
    tsh_module *child;        /* the first child of this stage */
    int warmup, slots;        /* forwards before the first backward; max micro-batches under way */
    tshi_micro *micro;        /* shape (slots): micro-batch k is in slot k % slots */
    tshi_send_queue queue[2]; /* [0] to the previous stage, [1] to the next one */
    tshi_tie *ties;           /* list of the tied parameters */
    double total[2];          /* last stage: sums of losses, of weights (or micro-batches) */
};

/* -- messages ---------------------------------------------------------------- */

/* Waits for the oldest send of a queue and releases its values. */
static void tshi_pipeline_wait_send(tsh_pipeline *p, tshi_send_queue *queue) {
    const int i = queue->first; /* the oldest send */
    (void)tshi_error_comm(p->ctx, tsh_wait(&p->ctx->pp, queue->req[i]), "tsh_pipeline: send");
    tshi_mem_release(p->ctx, queue->block[i]);
    queue->first = (i + 1) % TSHI_PIPELINE_SENDS;
    queue->count--;
}

/* Releases the values of completed sends. block 1: waits for all sends first; if the world has
 * failed, the waits return at once. */
static void tshi_pipeline_end_sends(tsh_pipeline *p, int block) {
    for (int i = 0; i < 2; i++)
        for (int done = 1; p->queue[i].count && done;) { /* ends at the first unfinished send */
            tshi_send_queue *queue = &p->queue[i];
            if (!block && tsh_test(&p->ctx->pp, queue->req[queue->first], &done) != TSH_OK) return;
            if (done) tshi_pipeline_wait_send(p, queue);
        }
}

/* Starts to send n elements at `data` to stage `to`. Takes over the caller's reference to block,
 * which holds them; releases it on failure. */
static void tshi_pipeline_send(tsh_pipeline *p, int to, tshi_block *block, const void *data,
                               int64_t n, tsh_dtype dtype) {
    tshi_send_queue *queue = &p->queue[to > p->stage]; /* queue to that neighbour */
    tsh_coll coll = tsh_coll_make(TSH_SEND, dtype);
    tsh_req req = 0;
    tshi_pipeline_end_sends(p, 0);
    if (queue->count == TSHI_PIPELINE_SENDS) tshi_pipeline_wait_send(p, queue); /* full */
    coll.send = data;
    coll.count = n;
    coll.send_to = to;
    if (!block || p->ctx->error.code != TSH_OK ||
        tshi_error_comm(p->ctx, tsh_start(&p->ctx->pp, &coll, &req), "tsh_pipeline: send") !=
            TSH_OK) {
        tshi_mem_release(p->ctx, block);
        return;
    }
    queue->req[(queue->first + queue->count) % TSHI_PIPELINE_SENDS] = req;
    queue->block[(queue->first + queue->count++) % TSHI_PIPELINE_SENDS] = block;
}

/* Receives n elements from stage `from`; blocks until they arrive. */
static tsh_result tshi_pipeline_receive(tsh_pipeline *p, int from, void *data, int64_t n,
                                        tsh_dtype dtype) {
    if (p->ctx->error.code != TSH_OK) return p->ctx->error.code;
    return tshi_error_comm(p->ctx, tsh_recv(&p->ctx->pp, data, n, dtype, from),
                           "tsh_pipeline: receive");
}

/* -- from stage to stage ------------------------------------------------------ */

/* Sends y to the next stage: its description, then this rank's shard. */
static void tshi_pipeline_send_tensor(tsh_pipeline *p, tsh_tensor *y) {
    tsh_ctx *ctx = p->ctx;
    tshi_message head = {y->dtype, !ctx->tape.no_grad && y->base->requires_grad, y->ndim,
                         y->layout.kind, y->layout.dim, y->layout.segments, {0}, {{0, 0}}};
    tshi_block *block = tshi_mem_alloc(ctx, TSH_MEM_STEP, sizeof head), *packed;
    void *data; /* y's values, packed */
    if (!block) return;
    memcpy(head.dim, y->dim, (size_t)y->ndim * sizeof *y->dim);
    memcpy(head.segment, y->layout.segment, sizeof head.segment);
    memcpy(tshi_mem_data(block), &head, sizeof head);
    tshi_pipeline_send(p, p->stage + 1, block, tshi_mem_data(block), TSHI_PIPELINE_WORDS, TSH_I64);
    data = tshi_kernel_packed(y, &packed);
    if (data && !packed) { /* y is dense: send its own block */
        packed = y->block;
        packed->refs++;
    }
    tshi_pipeline_send(p, p->stage + 1, packed, data, tsh_local_numel(y), y->dtype);
}

/* Sends the gradient of the received tensor to the previous stage. Takes over the caller's
 * reference to block. block NULL: sends zeros, since the output does not depend on the tensor. */
static void tshi_pipeline_send_grad(tshi_micro *micro, tshi_block *block) {
    tsh_pipeline *p = micro->pipeline;
    const int64_t n = tsh_local_numel(micro->input);
    if (!block) {
        block = tshi_mem_alloc(p->ctx, TSH_MEM_STEP, tshi_dtype_reals(n));
        if (block) memset(tshi_mem_data(block), 0, tshi_dtype_reals(n));
    }
    if (block) tshi_pipeline_send(p, p->stage - 1, block, tshi_mem_data(block), n, TSH_REAL);
    micro->input = NULL; /* no gradient is still to be sent */
}

/* Backward of a received tensor: sends its gradient to the previous stage. */
static void tshi_pipeline_receive_backward(tshi_node *node) {
    node->out->gr.block->refs++; /* the send keeps it */
    tshi_pipeline_send_grad((tshi_micro *)node->params, node->out->gr.block);
}

static const tshi_op tshi_pipeline_op = {
    "tsh_pipeline", NULL, NULL, tshi_pipeline_receive_backward, TSHI_NONE, 0};

/* Receives a tensor from the previous stage. Records it on the tape if it requires a gradient,
 * unless micro is NULL (evaluation). */
static tsh_tensor *tshi_pipeline_receive_tensor(tsh_pipeline *p, tshi_micro *micro) {
    tshi_message head; /* x's description, received first */
    tsh_layout layout = tsh_replicated();
    tsh_shape shape = tsh_shape0();
    tshi_node *node;
    tsh_tensor *x;
    if (tshi_pipeline_receive(p, p->stage - 1, &head, TSHI_PIPELINE_WORDS, TSH_I64) != TSH_OK)
        return NULL;
    shape.ndim = (int)head.ndim;
    memcpy(shape.dim, head.dim, sizeof head.dim);
    layout.kind = (tsh_layout_kind)head.kind;
    layout.dim = (int)head.cut;
    layout.segments = (int)head.segments;
    memcpy(layout.segment, head.segment, sizeof head.segment);
    x = tshi_tensor_out(p->ctx, "tsh_pipeline", (tsh_dtype)head.dtype, &shape, &layout);
    if (!x || tshi_pipeline_receive(p, p->stage - 1, tshi_tensor_at(x), tsh_local_numel(x),
                                    x->dtype) != TSH_OK)
        return NULL;
    if (!micro || !head.requires_grad) return x; /* no gradient to send back */
    node = tshi_tape_add(&tshi_pipeline_op, x, NULL, 0, TSHI_NONE, 0);
    if (!node) return NULL;
    node->params = micro; /* read by tshi_pipeline_receive_backward */
    micro->input = x;
    return x;
}

/* Runs this stage's children on micro-batch k. Returns their output, after starting to send it to
 * the next stage, or on the last stage the loss; NULL after an error. */
static tsh_tensor *tshi_pipeline_stage_forward(tsh_pipeline *p, tshi_micro *micro, int k) {
    tsh_ctx *ctx = p->ctx;
    tsh_module *child = p->child; /* the stage's children are adjacent */
    tsh_tensor *x = p->stage > 0 ? tshi_pipeline_receive_tensor(p, micro) /* the stage's input */
                                 : p->desc.input(ctx, k, p->desc.user);
    int i;
    for (i = 0; i < p->counts[p->stage] && x && ctx->error.code == TSH_OK; i++) {
        x = tshi_module_call(child, &x, 1);
        child = child->next;
        tshi_tape_progress(ctx); /* lets sends go on */
    }
    if (!x || ctx->error.code != TSH_OK)
        return tshi_error_null(
            ctx, TSH_ERR_ARGUMENT,
            "tsh_pipeline: stage %d has no %s of micro-batch %d: NULL was returned", p->stage,
            i ? "output" : "input", k);
    if (!tshi_tensor_check("tsh_pipeline", &x, 1)) return NULL;
    if (p->stage == p->last) return p->desc.loss(ctx, x, k, p->desc.user);
    tshi_pipeline_send_tensor(p, x);
    return x;
}

/* -- micro-batches ------------------------------------------------------------ */

/* Exchanges the tape (nodes and arena) of the micro-batch and that of the ctx. */
static void tshi_pipeline_swap(tsh_ctx *ctx, tshi_micro *micro) {
    tshi_tape *tape = &ctx->tape;
    tshi_node *newest = tape->newest; /* the ctx's, while swapping */
    tshi_arena arena = tape->arena;
    tape->newest = micro->newest;
    tape->arena = micro->arena;
    micro->newest = newest;
    micro->arena = arena;
}

/* Moves the step tensors created after `last` to the micro-batch and releases their values: nodes
 * hold those that backward needs. Tensors that the user retains stay with the step. */
static void tshi_pipeline_take_handles(tsh_ctx *ctx, tshi_micro *micro, tsh_tensor *last) {
    tsh_tensor *t, *next;
    if (last->flags & TSHI_DEAD) last = &ctx->handles.step; /* a callback ended the step */
    for (t = last->next; t != &ctx->handles.step; t = next) {
        next = t->next;
        if (t->flags & TSHI_RETAIN) continue; /* stays with the step */
        t->prev->next = t->next;              /* unlink from the step */
        t->next->prev = t->prev;
        tshi_tensor_insert(&micro->handles, t);
        tshi_mem_release(ctx, t->block);
        t->block = NULL;
        t->flags |= TSHI_STALE; /* reading it is an error */
    }
}

/* On the last stage: adds a micro-batch's loss and weight to the totals. */
static void tshi_pipeline_add_loss(tsh_pipeline *p, tsh_tensor *loss, int k) {
    double weight = 0; /* number of terms in the loss */
    p->total[0] += tsh_item(p->ctx, loss);
    if (p->desc.weight) weight = p->desc.weight(p->ctx, k, p->desc.user);
    p->total[1] += weight;
    if (!(weight >= 0) || weight > DBL_MAX) /* negative, infinite or NaN */
        (void)tsh_fail(p->ctx, TSH_ERR_ARGUMENT,
                       "tsh_pipeline: the weight of micro-batch %d is %g; it counts elements", k,
                       weight);
}

/* Runs the forward of micro-batch k on its own tape. */
static void tshi_pipeline_forward(tsh_pipeline *p, int k) {
    tsh_ctx *ctx = p->ctx;
    tshi_micro *micro = &p->micro[k % p->slots];
    tsh_tensor *last = ctx->handles.step.prev; /* the newest step tensor so far */
    if (!tsh_ok(ctx)) return;
    tshi_pipeline_swap(ctx, micro);                        /* record on the micro-batch's tape */
    micro->out = tshi_pipeline_stage_forward(p, micro, k); /* kept for backward */
    if (p->stage == p->last && ctx->error.code == TSH_OK &&
        tshi_tape_check_loss(ctx, micro->out) == TSH_OK)
        tshi_pipeline_add_loss(p, micro->out, k);
    tshi_pipeline_swap(ctx, micro);
    tshi_pipeline_take_handles(ctx, micro, last); /* step memory is for other micro-batches */
}

/* Seeds backward with y's gradient. On the last stage it is 1 / micro_batches if losses are means,
 * 1 if they are sums; other stages receive it from the next stage. */
static void tshi_pipeline_seed(tsh_pipeline *p, tsh_tensor *y) {
    tsh_ctx *ctx = p->ctx;
    const int64_t n = tsh_local_numel(y);
    int64_t stride[TSH_MAX_DIMS]; /* strides of a dense shard */
    tshi_block *block = tshi_mem_alloc(ctx, TSH_MEM_STEP, tshi_dtype_reals(n));
    tsh_real *grad; /* this rank's shard, dense */
    tshi_dest dest;
    if (!block) return;
    grad = (tsh_real *)tshi_mem_data(block);
    if (p->stage == p->last)
        grad[0] = TSHI_R(p->desc.weight ? 1.0 : 1.0 / p->desc.micro_batches);
    else
        (void)tshi_pipeline_receive(p, p->stage + 1, grad, n, TSH_REAL);
    tshi_tensor_strides(y->local, y->ndim, stride);
    if (ctx->error.code == TSH_OK && tshi_tape_dest_in(y, &y->base->gr, &dest))
        tshi_tape_accumulate(y, &dest, grad, stride);
    tshi_mem_release(ctx, block);
}

/* Ends a micro-batch: releases its tensors, and nodes that an error left on its tape. */
static void tshi_pipeline_end(tshi_micro *micro) {
    for (; micro->newest; micro->newest = micro->newest->older)
        tshi_tape_release_node(micro->newest);
    tshi_mem_reset(&micro->arena); /* frees the nodes */
    while (micro->handles.next != &micro->handles) tshi_tensor_release(micro->handles.next);
    micro->out = micro->input = NULL;
}

/* Runs the backward of micro-batch k and releases its memory. */
static void tshi_pipeline_backward(tsh_pipeline *p, int k) {
    tsh_ctx *ctx = p->ctx;
    tshi_micro *micro = &p->micro[k % p->slots];
    tsh_tensor *last = ctx->handles.step.prev, *y = micro->out;
    if (!tsh_ok(ctx)) return;
    tshi_pipeline_swap(ctx, micro);
    if (y->base->requires_grad) { /* 0: the stages before need no gradient */
        tshi_pipeline_seed(p, y);
        tshi_tape_mark(ctx, y);
    }
    tshi_tape_walk(ctx);
    if (micro->input && ctx->error.code == TSH_OK) tshi_pipeline_send_grad(micro, NULL);
    tshi_pipeline_swap(ctx, micro);
    tshi_pipeline_take_handles(ctx, micro, last);
    tshi_pipeline_end(micro);
}

/* -- the schedule ------------------------------------------------------------- */

/* Runs the schedule: `warmup` forwards, then a forward and a backward in turn (1F1B, Narayanan et
 * al. 2019), then the backwards that are left. With GPipe, warmup is the number of micro-batches.
 * The last backward may start to average gradients over dp. */
static void tshi_pipeline_run(tsh_pipeline *p) {
    const int m = p->desc.micro_batches; /* number of micro-batches */
    int f;                               /* next micro-batch to go forward */
    p->total[0] = 0;
    p->total[1] = p->desc.weight ? 0 : m;
    for (f = 0; f < p->warmup; f++) tshi_pipeline_forward(p, f);
    for (int b = 0; b < m && p->ctx->error.code == TSH_OK; b++) {
        if (f < m) tshi_pipeline_forward(p, f++);     /* one more forward */
        if (b == m - 1) tshi_tape_sync_begin(p->ctx); /* gradients are complete after it */
        tshi_pipeline_backward(p, b);
    }
}

/* Starts to send this stage's gradient of a tied parameter to the other stages that hold it. */
static void tshi_pipeline_send_tied(tsh_pipeline *p, const tshi_tie *tie) {
    tsh_tensor *t = tie->param;
    for (int s = 0; s <= p->last; s++) {
        if (s == p->stage || !tie->holds[s]) continue;
        t->gr.block->refs++; /* each send holds a reference */
        tshi_pipeline_send(p, s, t->gr.block, tshi_mem_data(t->gr.block), tsh_local_numel(t),
                           TSH_REAL);
    }
}

/* Sums the gradient of a tied parameter over the stages that hold it, in stage order: the same bits
 * on each. All stages send first and then receive; if a send queue is too short for that, each
 * sends when it is its turn, since full queues would block all of them. */
static void tshi_pipeline_sum_tied(tsh_pipeline *p, const tshi_tie *tie) {
    tsh_ctx *ctx = p->ctx;
    tsh_tensor *t = tie->param;
    const int64_t n = tsh_local_numel(t);
    const size_t bytes = tshi_dtype_reals(n);
    tshi_block *sum = tshi_mem_alloc(ctx, TSH_MEM_STEP, bytes);
    tshi_block *part = tshi_mem_alloc(ctx, TSH_MEM_STEP, bytes);
    int s, terms = 0, at_once = tie->holders <= TSHI_PIPELINE_SENDS;
    if (part && sum && tshi_tape_complete(t)) {
        if (at_once) tshi_pipeline_send_tied(p, tie);
        for (s = 0; s <= p->last; s++) {
            tshi_block *to = terms ? part : sum; /* the first part starts the sum */
            if (!tie->holds[s]) continue;
            if (s == p->stage && !at_once) tshi_pipeline_send_tied(p, tie);
            if (s == p->stage)
                memcpy(tshi_mem_data(to), tshi_mem_data(t->gr.block), bytes);
            else
                (void)tshi_pipeline_receive(p, s, tshi_mem_data(to), n, TSH_REAL);
            if (terms++)
                tshi_tape_add_all(ctx, (tsh_real *)tshi_mem_data(sum),
                                  (const tsh_real *)tshi_mem_data(part), n);
        }
        tshi_pipeline_end_sends(p, 1);
        memcpy(tshi_mem_data(t->gr.block), tshi_mem_data(sum), bytes);
        t->sparse = t->gr.clean = 0; /* the sum is dense */
    }
    tshi_mem_release(ctx, sum);
    tshi_mem_release(ctx, part);
}

/* Broadcasts the totals from the last stage. */
static void tshi_pipeline_broadcast_totals(tsh_pipeline *p) {
    if (p->ctx->error.code == TSH_OK)
        (void)tshi_error_comm(
            p->ctx, tsh_broadcast(&p->ctx->pp, p->total, p->desc.weight ? 2 : 1, TSH_F64, p->last),
            "tsh_pipeline: broadcast of the loss");
}

/* Sets *loss to the mean over this replica's micro-batches or, if sums, over all replicas. */
static tsh_result tshi_pipeline_mean_loss(tsh_pipeline *p, double *loss) {
    tsh_ctx *ctx = p->ctx;
    if (p->desc.weight && ctx->error.code == TSH_OK)
        (void)tshi_error_comm(ctx, tsh_allreduce(&ctx->dp, p->total, 2, TSH_F64, TSH_SUM),
                              "tsh_pipeline: sum of the losses over dp");
    tshi_error_report(ctx);
    if (loss && ctx->error.code == TSH_OK)
        *loss = p->total[1] > 0 ? p->total[0] / p->total[1] : p->total[0];
    return ctx->error.code;
}

/* Prepares tied parameters for backward. One contribution more than backward delivers is expected,
 * so that the gradient is not averaged over dp before it is summed over stages. A gradient from an
 * earlier deferred backward is summed already, so only the first stage keeps it. */
static void tshi_pipeline_begin_tied(tsh_pipeline *p) {
    for (const tshi_tie *tie = p->ctx->pipeline->ties; tie; tie = tie->next) {
        if (!p->ctx->tape.pending && tie->param->stage != 1 + p->stage) tsh_zero_grad(tie->param);
        tie->param->contributions = 1;
    }
}

TSH_API tsh_result tsh_pipeline_train(tsh_pipeline *pipeline, double *loss) {
    tsh_ctx *ctx = pipeline ? pipeline->ctx : NULL;
    int summed;                    /* 1: losses are sums, weighted */
    if (loss) *loss = (double)NAN; /* until it is known */
    if (!ctx) return TSH_ERR_ARGUMENT;
    summed = pipeline->desc.weight != NULL;
    if (ctx->tape.newest || ctx->tape.no_grad)
        (void)tsh_fail(ctx, TSH_ERR_STATE, "tsh_pipeline_train: %s",
                       ctx->tape.no_grad
                           ? "gradients are off: it does not go between tsh_no_grad_begin and end"
                           : "ops are recorded already; end the step first: tsh_step_end");
    if (ctx->error.code == TSH_OK) (void)tshi_tape_begin(ctx, summed, 0);
    if (!tsh_ok(ctx)) return ctx->error.code;
    tshi_pipeline_begin_tied(pipeline);
    tshi_pipeline_run(pipeline);
    tshi_error_report(ctx); /* a peer may wait for what this rank will not send */
    tshi_pipeline_end_sends(pipeline, 1);
    for (int i = 0; i < pipeline->slots; i++) tshi_pipeline_end(&pipeline->micro[i]);
    if (ctx->error.code == TSH_OK) (void)tshi_tape_complete_leaves(ctx);
    for (const tshi_tie *tie = ctx->pipeline->ties; tie; tie = tie->next)
        if (tie->holds[pipeline->stage] && tie->param->requires_grad && ctx->error.code == TSH_OK)
            tshi_pipeline_sum_tied(pipeline, tie);
    tshi_pipeline_broadcast_totals(pipeline);
    if (summed) ctx->tape.weight += pipeline->total[1]; /* tshi_tape_sync divides by it */
    (void)tshi_tape_sync(ctx);
    return tshi_pipeline_mean_loss(pipeline, loss);
}

TSH_API tsh_result tsh_pipeline_evaluate(tsh_pipeline *pipeline, int micro_batches, double *loss) {
    tsh_ctx *ctx = pipeline ? pipeline->ctx : NULL;
    if (loss) *loss = (double)NAN;
    if (!ctx) return TSH_ERR_ARGUMENT;
    if (!micro_batches) micro_batches = pipeline->desc.micro_batches;
    if (micro_batches < 0)
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT, "tsh_pipeline_evaluate: %d micro-batches",
                       micro_batches);
    pipeline->total[0] = 0;
    pipeline->total[1] = pipeline->desc.weight ? 0 : micro_batches;
    tsh_no_grad_begin(ctx);
    for (int k = 0; k < micro_batches && tsh_ok(ctx); k++) {
        tsh_tensor *y;
        tsh_scope_begin(ctx); /* frees each micro-batch's tensors */
        y = tshi_pipeline_stage_forward(pipeline, NULL, k);
        if (pipeline->stage == pipeline->last && ctx->error.code == TSH_OK)
            tshi_pipeline_add_loss(pipeline, y, k);
        tsh_scope_end(ctx);
    }
    tsh_no_grad_end(ctx);
    tshi_error_report(ctx);
    tshi_pipeline_end_sends(pipeline, 1);
    tshi_pipeline_broadcast_totals(pipeline);
    return tshi_pipeline_mean_loss(pipeline, loss);
}

/* -- assigning layers to stages ------------------------------------------------- */

/* Sets p->counts, the number of children per stage; an error if they do not divide evenly and
 * desc.counts is not given, or does not add up. */
static tsh_result tshi_pipeline_partition(tsh_pipeline *p) {
    const char *path = p->container->path;
    const int *counts = p->desc.counts;
    const int stages = p->last + 1;
    int s, children = 0, sum = 0; /* sum: of the stages' counts */
    for (const tsh_module *child = p->container->first; child; child = child->next) children++;
    for (s = 0; s < stages; s++) {
        p->counts[s] = counts ? counts[s] : children / stages;
        if (p->counts[s] < 1)
            return tsh_fail(p->ctx, TSH_ERR_ARGUMENT,
                            "tsh_pipeline_new: stage %d of %d would have %d of the %d children of "
                            "\"%s\"; each takes one or more",
                            s, stages, p->counts[s], children, path);
        sum += p->counts[s];
    }
    if (sum == children) return TSH_OK;
    if (counts)
        return tsh_fail(p->ctx, TSH_ERR_ARGUMENT,
                        "tsh_pipeline_new: the counts of %d stages add up to %d, but \"%s\" has %d "
                        "children",
                        stages, sum, path, children);
    return tsh_fail(p->ctx, TSH_ERR_ARGUMENT,
                    "tsh_pipeline_new: the %d children of \"%s\" do not divide into %d stages; "
                    "say in .counts how many each stage takes",
                    children, path, stages);
}

/* Sets .stage of every module, and p->child, this stage's first child. Modules before the container
 * belong to the first stage, those after it to the last; the container and its parents to none. */
static void tshi_pipeline_assign_modules(tsh_pipeline *p) {
    tsh_module *root = p->ctx->root, *m, *child = p->container->first;
    int s = 0, left = p->counts[0], after = 0; /* left: children still to be assigned to stage s */
    for (m = root; m; m = tshi_module_next(root, m)) {
        after |= m == p->container; /* 1 from the container on */
        m->stage = 1 + (after ? p->last : 0);
    }
    for (m = p->container; m; m = m->parent) m->stage = 0;
    for (; child; child = child->next, left--) {
        if (!left) left = p->counts[++s]; /* the next stage's first child */
        if (s == p->stage && !p->child) p->child = child;
        for (m = child; m; m = tshi_module_next(child, m)) m->stage = 1 + s;
    }
}

/* Finds the stages whose modules have a parameter, and sets param->stage and .absent. Stages that
 * do not hold the parameter release its memory. If several hold it, it is added to p->ties. */
static void tshi_pipeline_assign_param(tsh_pipeline *p, tsh_tensor *param) {
    tsh_ctx *ctx = p->ctx;
    tshi_tie *tie = (tshi_tie *)tshi_mem_arena_alloc(ctx, &ctx->books, sizeof *tie);
    tshi_walk at = {NULL, NULL, 0};
    if (tie)
        tie->holds = (unsigned char *)tshi_mem_arena_alloc(ctx, &ctx->books, (size_t)p->last + 1);
    if (!tie || !tie->holds) return;
    while (tshi_module_step(ctx->root, &at))
        if (at.param == param && at.module->stage) tie->holds[at.module->stage - 1] = 1;
    for (int s = p->last; s >= 0; s--) {
        if (!tie->holds[s]) continue;
        param->stage = 1 + s; /* after the loop: 1 + the first holder */
        tie->holders++;
    }
    param->absent = tie->holders && !tie->holds[p->stage];
    if (param->absent) tshi_tensor_drop_values(param);
    if (tie->holders < 2) return; /* not tied across stages */
    tie->param = param;
    tie->next = p->ties;
    p->ties = tie;
}

/* Compares the descriptions of all ranks of the world: if they differed, ranks would deadlock. */
static void tshi_pipeline_compare(const tsh_pipeline *p) {
    const int same[4] = {p->desc.micro_batches, (int)p->desc.schedule, p->last,
                         p->desc.weight != NULL};
    uint64_t hash = tshi_rng_hash(tshi_module_count(p->ctx), same, sizeof same);
    int agree;
    hash = tshi_rng_hash(hash, p->counts, sizeof *p->counts * ((size_t)p->last + 1));
    hash = tshi_rng_hash(hash, p->container->path, strlen(p->container->path));
    (void)tshi_error_comm(p->ctx, tshi_module_same(&p->ctx->world, hash, &agree),
                          "tsh_pipeline_new");
    if (p->ctx->error.code == TSH_OK && !agree)
        (void)tsh_fail(p->ctx, TSH_ERR_ARGUMENT,
                       "tsh_pipeline_new: ranks differ in their micro-batches, schedule, counts, "
                       "weights or modules");
}

/* Checks the description and the container; returns 0 and sets an error if something is wrong. */
static int tshi_pipeline_check(const tsh_module *container, const tsh_pipeline_desc *desc) {
    tsh_ctx *ctx = container->ctx;
    if (!desc || !desc->input || !desc->loss)
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT, "tsh_pipeline_new: \"%s\" lacks %s", container->path,
                       !desc          ? "a description"
                       : !desc->input ? ".input, which gives what its first child takes"
                                      : ".loss, which takes what its last child gives");
    else if (desc->micro_batches < 1 || (unsigned)desc->schedule > TSH_PIPELINE_GPIPE)
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT,
                       "tsh_pipeline_new: micro_batches is %d, schedule %d; it takes at least one "
                       "micro-batch, and TSH_PIPELINE_1F1B or TSH_PIPELINE_GPIPE",
                       desc->micro_batches, (int)desc->schedule);
    else if (container->kind->forward != tshi_module_forward || container->forward ||
             container->prepared || container->result)
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT,
                       "tsh_pipeline_new: \"%s\" is more than its children one after the other: it "
                       "has a forward of its own, or a plan's PREPARE rule",
                       container->path);
    else if (ctx->tape.newest)
        (void)tsh_fail(ctx, TSH_ERR_STATE,
                       "tsh_pipeline_new: ops are recorded already; end the step first: "
                       "tsh_step_end");
    return tsh_ok(ctx);
}

/* Allocates a slot for each micro-batch that may be under way at a time; 0: no memory. */
static int tshi_pipeline_slots(tsh_pipeline *p) {
    tsh_ctx *ctx = p->ctx;
    const int m = p->desc.micro_batches;
    p->warmup = p->desc.schedule == TSH_PIPELINE_GPIPE ? m : p->last - p->stage;
    if (p->warmup > m) p->warmup = m; /* fewer micro-batches than stages */
    p->slots = p->warmup < m ? p->warmup + 1 : m;
    p->micro = (tshi_micro *)tshi_mem_arena_alloc(ctx, &ctx->books,
                                                  (size_t)p->slots * sizeof *p->micro);
    for (int i = 0; i < p->slots && p->micro; i++) {
        tshi_tensor_ring(&p->micro[i].handles);
        p->micro[i].pipeline = p;
        p->micro[i].next = ctx->micros;
        ctx->micros = &p->micro[i]; /* list of all slots, for tsh_close */
    }
    return p->micro != NULL;
}

/* Fills in p. The ctx's first pipeline also assigns the parameters to stages; later ones must have
 * the same stages. */
static void tshi_pipeline_make(tsh_pipeline *p, tsh_module *container,
                               const tsh_pipeline_desc *desc) {
    tsh_ctx *ctx = container->ctx;
    const tsh_pipeline *before = ctx->pipeline; /* the first one; NULL: p is it */
    const size_t bytes = (size_t)ctx->pp.size * sizeof *p->counts;
    tshi_walk at = {NULL, NULL, 0};
    p->ctx = ctx;
    p->container = container;
    p->desc = *desc;
    p->stage = ctx->pp.rank;
    p->last = ctx->pp.size - 1;
    p->counts = (int *)tshi_mem_arena_alloc(ctx, &ctx->books, bytes);
    if (!p->counts || tshi_pipeline_partition(p) != TSH_OK || !tshi_pipeline_slots(p)) return;
    if (before && (before->container != p->container || memcmp(before->counts, p->counts, bytes)))
        (void)tsh_fail(ctx, TSH_ERR_STATE,
                       "tsh_pipeline_new: the children of \"%s\" are dealt to the stages already, "
                       "in another way",
                       before->container->path);
    if (!before) tshi_module_changed(ctx); /* stages are assigned: models can be compared */
    if (!before && ctx->world.size > 1) ctx->world.unchecked = ctx;
    if (tsh_ok(ctx)) tshi_pipeline_compare(p); /* collective: all ranks must call it */
    if (!tsh_ok(ctx)) return;
    tshi_pipeline_assign_modules(p);
    if (before) return; /* parameters are assigned already */
    while (tshi_module_step_once(ctx->root, &at))
        tshi_pipeline_assign_param(p, at.param);
    ctx->pipeline = p;
}

TSH_API TSHI_COLD tsh_pipeline *tsh_pipeline_new(tsh_module *container,
                                                 const tsh_pipeline_desc *desc) {
    tsh_ctx *ctx = container ? container->ctx : NULL;
    tsh_pipeline *p;
    if (!ctx || ctx->error.code != TSH_OK || !tshi_pipeline_check(container, desc)) return NULL;
    p = (tsh_pipeline *)tshi_mem_arena_alloc(ctx, &ctx->books, sizeof *p);
    if (p) tshi_pipeline_make(p, container, desc);
    return tsh_ok(ctx) ? p : NULL;
}

/* ========================================================================== */
/* >>file                                                MARK: - file (private) */
/* What C lacks for files: kinds, links, locks, owners, syncing to disk.        */
/* Needs: >>base.                                                               */
/* ========================================================================== */

/* A save writes a temporary file, syncs it to disk and renames it over the old one, so a save that
 * is killed leaves the old file whole. On a system that lacks a call, its function does nothing and
 * returns success. */

enum { TSHI_FILE_STALE = 3600 }; /* seconds; see tshi_file_sweep */

/* Returns the kind of what is at a path, with symbolic links followed; NULL for a regular file or
 * for nothing. Does not open it, which could block (a FIFO) or rewind (a tape drive). */
static const char *tshi_file_kind(const char *path) {
#if defined(_WIN32)
    const unsigned long none = 0xFFFFFFFF, folder = 16, found = GetFileAttributesA(path);
    return found != none && (found & folder) ? "a folder" : NULL;
#elif TSHI_POSIX
    struct stat info; /* describes the link's target */
    if (stat(path, &info) != 0 || S_ISREG(info.st_mode)) return NULL;
    return S_ISDIR(info.st_mode)                            ? "a folder"
           : S_ISFIFO(info.st_mode)                         ? "a FIFO"
           : S_ISCHR(info.st_mode) || S_ISBLK(info.st_mode) ? "a device"
                                                            : "no regular file";
#else
    (void)path;
    return NULL;
#endif
}

/* Sets the position of a file, in bytes; returns 0 if that fails. Each fseek moves by what fits a
 * long; a system with 32-bit longs may still refuse files over 2 GiB. */
static int tshi_file_seek(FILE *file, int64_t to) {
#if defined(_WIN32)
    return _fseeki64(file, to, SEEK_SET) == 0;
#else
    const int64_t max = LONG_MAX < INT64_MAX ? LONG_MAX : INT64_MAX;
    int from = SEEK_SET; /* the first step is absolute, the others relative */
    for (; to > max; to -= max, from = SEEK_CUR)
        if (fseek(file, LONG_MAX, from) != 0) return 0;
    return fseek(file, (long)to, from) == 0;
#endif
}

/* Resolves the symbolic links of a path and writes the result to `to`; link: scratch for one link's
 * target. Both have `size` bytes, which the path itself fits in. Returns 0 and sets errno if the
 * result does not fit or links form a loop. */
static int tshi_file_follow(const char *path, char *to, char *link, size_t size) {
#if TSHI_POSIX
    const int max = 40; /* max links to follow, as on Linux */
    char *slash, *name; /* the last slash; where the link's name begins in `to` */
    ssize_t n;
    int links; /* number of links followed */
    strcpy(to, path);
    for (links = 0; (n = readlink(to, link, size)) >= 0; links++) {
        slash = strrchr(to, '/');
        name = link[0] == '/' || !slash ? to : slash + 1; /* an absolute link replaces all */
        errno = links == max ? ELOOP : ENAMETOOLONG;
        if (links == max || (size_t)(name - to) + (size_t)n + 32 > size) return 0;
        memcpy(name, link, (size_t)n);
        name[n] = '\0';
    }
#else
    (void)link, (void)size;
    strcpy(to, path);
#endif
    return 1;
}

#if TSHI_POSIX
/* Locks a new temporary file, so that other saves see that its writer is alive. Returns 0 if
 * another save has locked the file first, to remove it. On file systems without locks nothing is
 * ever removed. */
static int tshi_file_lock(int descriptor) {
#ifdef LOCK_EX
    struct stat info;
    if (flock(descriptor, LOCK_EX | LOCK_NB) != 0 && (errno == EWOULDBLOCK || errno == EINTR))
        return 0;
    return fstat(descriptor, &info) == 0 && info.st_nlink > 0;
#else
    (void)descriptor;
    return 1;
#endif
}
#endif

/* Removes temporary files that killed saves to `target` left: those that no process has locked.
 * Hosts may not see each other's locks on a network file system, so another host's file must also
 * be TSHI_FILE_STALE seconds old, by the file system's clock. mine: the caller's own temporary
 * file, open as descriptor `lock`. path: scratch for a name as long as `mine`. All names are
 * "<target>.tmp-<8 digits of the host><8 digits>". */
static void tshi_file_sweep(const char *target, const char *mine, int lock, char *path) {
#ifdef LOCK_EX
    const char *slash = strrchr(target, '/'); /* the last slash; NULL: the current folder */
    const size_t folder = slash ? (size_t)(slash - target) + 1 : 0, digits = 16;
    const size_t length = strlen(mine + folder), prefix = length - digits;
    struct stat now, then; /* states of the caller's own file and of the one found */
    struct dirent *entry;
    DIR *list; /* the folder's names */
    if (fstat(lock, &now) != 0) return;
    memcpy(path, target, folder);
    path[folder] = '\0';
    list = opendir(folder ? path : ".");
    while (list && (entry = readdir(list)) != NULL) {
        const char *name = entry->d_name;
        int file;
        if (strlen(name) != length || memcmp(name, mine + folder, prefix) != 0 ||
            strspn(name + prefix, "0123456789abcdef") != digits ||
            strcmp(name, mine + folder) == 0)
            continue;
        strcpy(path + folder, name);
        file = open(path, O_WRONLY | O_NONBLOCK); /* opened for its lock only */
        if (file < 0) continue;
        if (flock(file, LOCK_EX | LOCK_NB) == 0 && fstat(file, &then) == 0 &&
            S_ISREG(then.st_mode) &&
            (memcmp(name, mine + folder, length - digits / 2) == 0 ||
             now.st_mtime - then.st_mtime > TSHI_FILE_STALE))
            (void)remove(path);
        (void)close(file);
    }
    if (list) (void)closedir(list);
#else
    (void)target, (void)mine, (void)lock, (void)path;
#endif
}

/* Gives file `name` the mode of file `path` and, where this process may, its owner and group. */
static void tshi_file_keep_owner(const char *name, const char *path) {
#if TSHI_POSIX
    struct stat old, made; /* states of the replaced file and of the new one */
    mode_t mode;           /* permission bits */
    if (stat(path, &old) != 0 || stat(name, &made) != 0) return;
    mode = old.st_mode & 0777;
    if ((old.st_uid != made.st_uid || old.st_gid != made.st_gid) &&
        chown(name, old.st_uid, old.st_gid) != 0 && chown(name, made.st_uid, old.st_gid) != 0 &&
        old.st_gid != made.st_gid)
        mode &= 0707; /* the new group does not get the old group's rights */
    (void)chmod(name, mode);
#else
    (void)name, (void)path;
#endif
}

/* Syncs a file to disk, or with `folder` a folder's list of files; returns 0 if that fails. */
static int tshi_file_sync(const char *path, int folder) {
#if defined(_WIN32)
    const unsigned long generic_write = 0x40000000, share_all = 7, open_existing = 3;
    void *file;
    int synced;
    if (folder) return 1; /* Windows cannot sync a folder */
    file = CreateFileA(path, generic_write, share_all, NULL, open_existing, 0, NULL);
    synced = (intptr_t)file != -1 && FlushFileBuffers(file);
    if ((intptr_t)file != -1) (void)CloseHandle(file);
    return synced;
#elif TSHI_POSIX
    const int fd = open(path, folder ? O_RDONLY : O_WRONLY); /* fsync needs a descriptor */
    int synced;
    if (fd < 0) return 0;
    synced = fsync(fd) == 0 || errno == EINVAL; /* EINVAL: this file system never does */
    (void)close(fd);
    return synced;
#else
    (void)path;
    (void)folder;
    return 1;
#endif
}

/* Renames file `name` to `path` atomically: there is always either the old file or the new one. */
static int tshi_file_rename(const char *name, const char *path) {
#if defined(_WIN32) /* the rename of Windows does not replace files */
    const unsigned long replace = 1, write_through = 8;
    if (MoveFileExA(name, path, replace | write_through)) return 1;
    errno = EACCES; /* `path` is a folder, read-only, or open in some program */
    return 0;
#else
    return rename(name, path) == 0;
#endif
}

/* ========================================================================== */
/* >>io                                                    MARK: - io (private) */
/* Saving a model as one safetensors file, and parsing the header of such files. */
/* Needs: >>optim >>file.                                                       */
/* ========================================================================== */

/* The writer, rank 0 of tp, pp and dp, writes whole tensors: other ranks send it their shards in
 * buffers of TSHI_IO_BUFFER bytes. tsh_save and tsh_load end each of their two halves with
 * tshi_io_agree: after an error on any rank all ranks return it; file or model are unchanged. */

/* The format (https://github.com/huggingface/safetensors): 8 bytes, the little-endian length n of
 * the header; n bytes of JSON, {"__metadata__": {"key": "text"}, "name": {"dtype": "F32", "shape":
 * [2, 3], "data_offsets": [begin, end]}, ...}, padded with blanks; then the values, row-major and
 * without gaps. Offsets count from the first value. */
enum {
    TSHI_IO_BUFFER = 1 << 20,          /* bytes of the buffer for values */
    TSHI_IO_HEADER = 100000000,        /* max bytes of a header */
    TSHI_IO_NAME = TSH_PATH_SIZE + 32, /* bytes of a tensor's name: prefix, path and NUL */
    TSHI_IO_QUOTE = 96,                /* bytes of a name from a file in an error sentence */
    TSHI_IO_LINK = 4096,               /* bytes that symbolic links may add to a path */
    TSHI_IO_HASHES = 4,                /* interleaved parts of the hash of all values */
    TSHI_IO_SAMPLE = 64,               /* bytes of each tensor; see tshi_load_sample */
    TSHI_IO_NONFINITE = 8              /* max warnings that name a tensor */
};

/* A tensor of a file, as its header describes it. */
typedef struct tshi_io_entry {
    const char *name; /* first, as in tshi_io_pair: tshi_io_by_name compares both */
    int64_t begin, end, dim[TSH_MAX_DIMS]; /* offsets of its values, in bytes; its shape */
    int ndim, type, taken; /* type: an index of tshi_io_types; taken: the model has it */
} tshi_io_entry;

/* A key and its text in a file's metadata. */
typedef struct tshi_io_pair {
    const char *name, *text;
} tshi_io_pair;

/* A count of the model that a file's metadata holds: state of the generators or the optimiser. */
typedef struct tshi_io_count {
    const char *prefix, *name; /* the metadata's key is both, joined */
    uint64_t *value, read;     /* where the model has it; the file's value */
    int optional;              /* 1: if a file lacks it, it is 0 */
    int staged;                /* 1: is 0 on stages that do not hold its module or parameter */
} tshi_io_count;

/* A tensor of the model: a parameter, or a moment of one. */
typedef struct tshi_io_item {
    const char *prefix;          /* the name in the file is prefix + path */
    tsh_tensor *param, **moment; /* moment NULL: the parameter itself */
    const tshi_io_count *steps;  /* for a moment: number of updates of its parameter */
    const tshi_dtype *dtype;     /* type of its values; a moment's is that of tsh_real */
    int there;                   /* saving: 1 if it has values, here or on another stage */
    const tshi_io_entry *entry;  /* loading: what the file has for it; NULL: nothing */
} tshi_io_item;

/* One save or load. */
typedef struct tshi_io {
    tsh_ctx *ctx;
    tsh_module *root;              /* the module to save or load */
    const tsh_optim *optim;        /* its moments are included; NULL: no optimiser */
    const char *op, *path;         /* "tsh_save" or "tsh_load", for errors; the user's path */
    FILE *file;                    /* open for writing or reading; NULL: not open */
    uint64_t hash;                 /* hash of the model or file, the same on all ranks */
    tshi_arena arena;              /* memory of this save or load */
    tshi_io_item *item;            /* shape (items): all tensors */
    tshi_io_count *count;          /* shape (counts): the generators', then the optimiser's */
    int items, counts, generators; /* numbers of tensors, of counts, of the generators' counts */
    /* writing: */
    char *buffer;                    /* one buffer of TSHI_IO_BUFFER bytes; on rank 0 of tp, two */
    int64_t *known;                  /* shape (items + counts), see tshi_io_merge_stages */
    tshi_block *whole_block;         /* memory for a moment gathered from its chunks */
    char *target;                    /* the path, its symbolic links resolved */
    char *temporary;                 /* the temporary file; NULL: there is none */
    int lock;                        /* descriptor of the temporary file, locked; -1: none */
    int64_t bytes;                   /* size of all values */
    int64_t hash_at;                 /* position of the hash of all values in the file */
    uint64_t hashes[TSHI_IO_HASHES]; /* the parts of that hash so far */
    /* reading: */
    int64_t stamp;         /* time of the file's last change, read when it was opened */
    int64_t nonfinite;     /* number of tensors with NaN or infinity */
    char *text, *at;       /* the header's text; the next character to parse in it */
    tshi_io_entry *entry;  /* shape (entries): tensors of the file */
    tshi_io_pair *pair;    /* shape (pairs): metadata of the file */
    size_t entries, pairs; /* numbers of tensors and of pairs in the file */
    int64_t data, place;   /* positions of the first value and of the next read */
} tshi_io;

static const char tshi_io_first[] = "optim.first.", tshi_io_second[] = "optim.second.";

/* Fills in io for a save or load; an error if an argument is wrong. */
static void tshi_io_begin(tshi_io *io, const char *op, tsh_module *root, const char *path,
                          const tsh_optim *optim) {
    memset(io, 0, sizeof *io);
    io->ctx = root->ctx;
    io->root = root;
    io->optim = optim;
    io->op = op;
    io->path = path ? path : "";
    io->lock = -1;
    if (!*io->path) (void)tsh_fail(io->ctx, TSH_ERR_ARGUMENT, "%s: there is no path", op);
    if (optim && optim->module->ctx != io->ctx)
        (void)tsh_fail(io->ctx, TSH_ERR_ARGUMENT, "%s: the optimiser belongs to another ctx", op);
}

/* Closes the file, and removes it if it is still a temporary one. */
static void tshi_io_close(tshi_io *io) {
    if (io->file) (void)fclose(io->file);
    if (io->temporary) (void)remove(io->temporary); /* a finished save has set it to NULL */
#if TSHI_POSIX
    if (io->lock >= 0) (void)close(io->lock); /* closing unlocks it */
#endif
    io->file = NULL;
    io->temporary = NULL;
    io->lock = -1;
}

/* Closes the file and releases all memory of the save or load. */
static void tshi_io_end(tshi_io *io) {
    tshi_io_close(io);
    tshi_mem_release(io->ctx, io->whole_block);
    tshi_mem_close(io->ctx, TSH_MEM_BOOKS, io->arena.first);
}

/* Sets an error that begins with operation and path, then as printf. Returns 0. */
TSH_PRINTF(3, 4)
static TSHI_COLD int tshi_io_fail(const tshi_io *io, tsh_result code, const char *format, ...) {
    char text[TSH_MESSAGE_SIZE];
    va_list list;
    va_start(list, format);
    (void)vsnprintf(text, sizeof text, format, list);
    va_end(list);
    (void)tsh_fail(io->ctx, code, "%s: \"%.200s\" %s", io->op, io->path, text);
    return 0;
}

/* Reports a failed system call with strerror(errno). Returns 0. */
static int tshi_io_system_error(const tshi_io *io, const char *what) {
    return tshi_io_fail(io, TSH_ERR_IO, "%s: %s", what,
                        errno ? strerror(errno) : "the system gives no reason");
}

/* Reports that the path is `what`, such as "a folder". Returns 0. */
static int tshi_io_wrong_kind(const tshi_io *io, const char *what) {
    return tshi_io_fail(io, TSH_ERR_IO, "is %s; %s takes one safetensors file", what, io->op);
}

/* Gives all ranks of the world the error of one rank: found is world.size - that rank. */
static tsh_result tshi_io_take_error(tsh_ctx *ctx, int64_t found, const char *op) {
    const int rank = ctx->world.size - (int)found;
    tsh_error error = ctx->error; /* sent by `rank`, received by others */
    const tsh_result result = tshi_error_comm(
        ctx, tsh_broadcast(&ctx->world, &error, sizeof error / 4, TSH_I32, rank), op);
    if (result == TSH_OK) ctx->error = error;
    return result;
}

/* Collective over the world. If a rank has an error, all get that of the lowest such rank; if
 * hashes differ, all get an error. The world does not fail, so the error can be cleared. */
static tsh_result tshi_io_agree(const tshi_io *io) {
    tsh_ctx *ctx = io->ctx;
    tsh_comm *world = &ctx->world;
    int64_t max[3] = {0, 0, 0}; /* error (0: none), hash, -hash */
    tsh_coll coll = tshi_comm_coll(TSH_ALLREDUCE, max, max, 3, TSH_I64);
    /* 8 MiB per second for slow disks; limited, since a file's header may claim any size */
    const int64_t seconds = tshi_base_min(io->bytes >> 23, 1000000);
    if (ctx->reported) return ctx->error.code;
    max[0] = ctx->error.code != TSH_OK ? world->size - world->rank : 0;
    max[1] = (int64_t)(io->hash >> 1);
    max[2] = -max[1]; /* the maximum of -x is the minimum of x */
    coll.redop = TSH_MAX;
    coll.timeout_ns = seconds > 300 ? seconds * 1000000000 : 0;
    if (tshi_error_comm(ctx, tshi_comm_run(world, &coll), io->op) != TSH_OK) return ctx->error.code;
    if (max[0]) {
        (void)tshi_io_take_error(ctx, max[0], io->op);
    } else if (max[1] != -max[2]) {
        const int reading = io->data > 0; /* 1: this is a load, not a save */
        (void)tshi_io_fail(io, reading ? TSH_ERR_IO : TSH_ERR_ARGUMENT, "%s",
                           reading
                               ? "is not the same file on every rank, or was saved anew while "
                                 "ranks opened it; if so, load it again"
                               : "cannot be written: ranks hold different models or optimisers");
        ctx->error.rank = -1; /* no rank is to blame */
    }
    return ctx->error.code;
}

/* -- the tensors of a file --------------------------------------------------- */

/* Appends a tensor to io->item and returns it. */
static tshi_io_item *tshi_io_add(tshi_io *io, const char *prefix, tsh_tensor *param,
                                 tsh_tensor **moment) {
    tshi_io_item *item = &io->item[io->items++];
    item->prefix = prefix;
    item->param = param;
    item->moment = moment;
    item->dtype = &tshi_dtypes[moment ? TSH_REAL : param->dtype];
    return item;
}

/* Callback of tshi_module_params: appends a parameter. */
static void tshi_io_add_param(const char *path, tsh_tensor *param, void *user) {
    (void)path;
    (void)tshi_io_add((tshi_io *)user, "", param, NULL);
}

/* Appends a count. value points to an int64_t or uint64_t; .read starts with its present value, for
 * files without the count. */
static tshi_io_count *tshi_io_add_count(tshi_io *io, const char *prefix, const char *name,
                                        const void *value) {
    tshi_io_count *count = &io->count[io->counts++];
    count->prefix = prefix;
    count->name = name;
    count->value = (uint64_t *)tshi_kernel_unconst(value);
    count->read = *count->value;
    return count;
}

/* Lists all tensors and counts in the order of the file; 0 and an error without memory. */
static int tshi_io_list(tshi_io *io) {
    tsh_ctx *ctx = io->ctx;
    const tsh_optim *optim = io->optim;
    const int updated = optim ? optim->count : 0; /* number of parameters that it updates */
    const size_t modules = (size_t)tshi_module_count(ctx);
    const size_t items = modules * TSHI_MODULE_PARAMS + 2 * (size_t)updated; /* at most */
    const size_t counts = modules + (size_t)updated + 5;
    tsh_module *m;
    int i;
    io->item = (tshi_io_item *)tshi_mem_arena_alloc(ctx, &io->arena, items * sizeof *io->item);
    io->count = (tshi_io_count *)tshi_mem_arena_alloc(ctx, &io->arena, counts * sizeof *io->count);
    if (!io->item || !io->count) return 0;
    (void)tshi_io_add_count(io, "tshard.", "seed", &ctx->seed);
    (void)tshi_io_add_count(io, "tshard.", "randn_calls", &ctx->randn_calls);
    (void)tshi_io_add_count(io, "tshard.", "dropout_calls", &ctx->dropout_calls);
    for (m = io->root; m; m = tshi_module_next(io->root, m)) {
        tshi_io_count *calls = tshi_io_add_count(io, "tshard.dropout_calls.", m->path,
                                                 &m->dropout_calls);
        calls->optional = calls->staged = 1; /* most modules have no dropout */
    }
    io->generators = io->counts; /* the counts so far are the generators' */
    if (optim) (void)tshi_io_add_count(io, "tshard.optim.", "steps", &optim->info.steps);
    if (optim) (void)tshi_io_add_count(io, "tshard.optim.", "skipped", &optim->info.skipped);
    tshi_module_params(io->root, 1, tshi_io_add_param, io);
    for (i = 0; i < updated; i++) {
        tshi_moments *each = &optim->each[i];
        tshi_io_count *steps = tshi_io_add_count(io, "tshard.optim.steps.", each->param->path,
                                                 &each->steps);
        steps->staged = 1; /* counted where the parameter is */
        tshi_io_add(io, tshi_io_first, each->param, &each->first)->steps = steps;
    }
    for (i = 0; i < updated; i++)
        tshi_io_add(io, tshi_io_second, optim->each[i].param, &optim->each[i].second)->steps =
            &io->count[io->generators + 2 + i];
    return 1;
}

/* Returns an item's tensor: the parameter or its moment; NULL if the moment was not created. */
static tsh_tensor *tshi_io_values(const tshi_io_item *item) {
    return item->moment ? *item->moment : item->param;
}

/* Returns 1 if the item is a moment of which this rank has a chunk only. */
static int tshi_io_in_chunks(const tshi_io_item *item) {
    return item->moment && *item->moment && ((*item->moment)->flags & TSHI_CHUNKED);
}

/* Converts values between a file's little-endian and this machine's byte order, in place. */
static void tshi_io_swap_bytes(void *values, int64_t count, size_t width) {
    const uint16_t one = 1; /* its first byte is 1 on a little-endian machine */
    unsigned char *value = (unsigned char *)values, byte;
    size_t i;
    if (*(const unsigned char *)&one) return;
    for (; count > 0; count--, value += width)
        for (i = 0; i < width / 2; i++) { /* reverse the bytes of a value */
            byte = value[i];
            value[i] = value[width - 1 - i];
            value[width - 1 - i] = byte;
        }
}

/* Returns the length of the UTF-8 sequence at s (RFC 3629: shortest form, no surrogates); 0: there
 * is none. Does not read beyond a NUL. */
static int tshi_io_utf8(const unsigned char *s) {
    int n = s[0] < 0x80 ? 1 : s[0] < 0xC2 ? 0 : s[0] < 0xE0 ? 2 : s[0] < 0xF0 ? 3 : 4, i;
    if (s[0] > 0xF4) return 0; /* beyond U+10FFFF, the last character */
    for (i = 1; i < n; i++)    /* continuation bytes */
        if ((s[i] & 0xC0) != 0x80) return 0;
    if ((s[0] == 0xE0 && s[1] < 0xA0) || (s[0] == 0xED && s[1] > 0x9F) ||
        (s[0] == 0xF0 && s[1] < 0x90) || (s[0] == 0xF4 && s[1] > 0x8F))
        return 0;
    return n;
}

/* -- writing: the header ----------------------------------------------------- */

/* A text that is written to memory or, while `at` is NULL, only measured. */
typedef struct tshi_io_text {
    char *at;          /* the buffer; NULL: measure only */
    size_t size, used; /* bytes of the buffer; bytes so far */
} tshi_io_text;

/* Appends to the text, as printf; if text->at is NULL, only counts the bytes. */
TSH_PRINTF(2, 3) static void tshi_io_put(tshi_io_text *text, const char *format, ...) {
    va_list list;
    int n;
    va_start(list, format);
    n = vsnprintf(text->at ? text->at + text->used : NULL, text->at ? text->size - text->used : 0,
                  format, list);
    va_end(list);
    if (n > 0) text->used += (size_t)n;
}

/* Writes a character, escaped if JSON needs it, to out as a string. Returns out. */
static const char *tshi_io_escape(char c, char out[8]) {
    (void)snprintf(out, 8,
                   (unsigned char)c < 0x20 ? "\\u%04x"
                   : c == '"' || c == '\\' ? "\\%c"
                                           : "%c",
                   (unsigned char)c);
    return out;
}

/* Appends ,"key": to the text, where the key is prefix + name. */
static void tshi_io_put_name(tshi_io_text *text, const char *prefix, const char *name) {
    char one[8]; /* one character, escaped */
    tshi_io_put(text, ",\"%s", prefix);
    for (; *name; name++) tshi_io_put(text, "%s", tshi_io_escape(*name, one));
    tshi_io_put(text, "\":");
}

/* Returns the optimiser's kind, as the metadata names it. */
static const char *tshi_io_kind(const tshi_io *io) {
    static const char *const name[] = {"sgd", "adam", "adamw"};
    return name[io->optim->desc.kind];
}

/* The metadata's key for the hash of all values. Its 16 hexadecimal digits are written last, once
 * the hash is known. The hash does not depend on the degree of parallelism. */
static const char tshi_io_hash_key[] = "\"tshard.hash\":\"";

/* Appends the whole header to the text. PyTorch's files have "format": "pt". */
static void tshi_io_put_header(const tshi_io *io, tshi_io_text *text) {
    int64_t begin = 0, end; /* offsets of the tensor's values */
    int i, d;
    tshi_io_put(text, "{\"__metadata__\":{\"format\":\"pt\",\"tshard.format\":\"1\",%s%016d\"",
                tshi_io_hash_key, 0);
    for (i = 0; i < io->counts; i++) {
        const tshi_io_count *count = &io->count[i];
        if (i == io->generators) tshi_io_put(text, ",\"tshard.optim\":\"%s\"", tshi_io_kind(io));
        if (count->optional && !*count->value) continue;
        tshi_io_put_name(text, count->prefix, count->name);
        tshi_io_put(text, "\"%llu\"", (unsigned long long)*count->value);
    }
    tshi_io_put(text, "}");
    for (i = 0; i < io->items; i++) {
        const tsh_tensor *t = io->item[i].param; /* a moment has its form */
        if (!io->item[i].there) continue;        /* a moment not created yet */
        end = begin + tsh_numel(t) * io->item[i].dtype->size;
        tshi_io_put_name(text, io->item[i].prefix, t->path);
        tshi_io_put(text, "{\"dtype\":\"%s\",\"shape\":[", io->item[i].dtype->file);
        for (d = 0; d < t->ndim; d++) tshi_io_put(text, d ? ",%lld" : "%lld", (long long)t->dim[d]);
        tshi_io_put(text, "],\"data_offsets\":[%lld,%lld]}", (long long)begin, (long long)end);
        begin = end;
    }
    tshi_io_put(text, "}");
    while (text->used % 8) tshi_io_put(text, " "); /* aligns the values */
}

/* -- writing ----------------------------------------------------------------- */

/* Returns 1 on the rank that writes the file. */
static int tshi_io_is_writer(const tsh_ctx *ctx) {
    return ctx->tp.rank == 0 && ctx->pp.rank == 0 && ctx->dp.rank == 0;
}

/* Returns 1 if tsh_load can read the name: UTF-8, and not a moment's. Else 0 and an error. */
static int tshi_io_check_name(const tshi_io *io, const char *path) {
    const unsigned char *s = (const unsigned char *)path;
    while (*s && tshi_io_utf8(s)) s += tshi_io_utf8(s);
    if (!*s && strncmp(path, tshi_io_first, sizeof tshi_io_first - 1) != 0 &&
        strncmp(path, tshi_io_second, sizeof tshi_io_second - 1) != 0)
        return 1;
    (void)tsh_fail(io->ctx, TSH_ERR_ARGUMENT,
                   "%s: the name \"%.96s\" %s; give its module another name", io->op, path,
                   *s ? "is not UTF-8" : "is one of an optimiser's moments in a file");
    return 0;
}

/* Writes bytes to the file, unless there is an error already. */
static void tshi_io_write(const tshi_io *io, const void *data, size_t bytes) {
    if (io->ctx->error.code != TSH_OK) return;
    errno = 0;
    if (fwrite(data, 1, bytes, io->file) != bytes)
        (void)tshi_io_system_error(io, "cannot be written");
}

/* Returns up to 8 bytes as a little-endian number. */
static uint64_t tshi_io_word(const char *at, size_t bytes) {
    const uint16_t one = 1;
    uint64_t word = 0;
    memcpy(&word, at, bytes);
    if (!*(const unsigned char *)&one) tshi_io_swap_bytes(&word, 1, sizeof word);
    return word;
}

/* Adds bytes of the file to the hash of all values. Words go to four hashes in turn, whose
 * multiplications the processor overlaps. */
static void tshi_io_hash_values(tshi_io *io, const char *values, size_t left) {
    uint64_t *hash = io->hashes;
    size_t h; /* index of the hash whose turn it is */
    for (h = 0; left >= 8; h = (h + 1) % TSHI_IO_HASHES, values += 8, left -= 8)
        hash[h] = tshi_coll_mix(hash[h], tshi_io_word(values, 8));
    if (left) hash[h] = tshi_coll_mix(hash[h], tshi_io_word(values, left));
}

/* Creates, opens and locks the file io->temporary. Returns 0 if another name must be tried. On
 * other failures returns 1, with io->file NULL. A file that replaces one has mode 0600 until it
 * gets that file's mode. */
static int tshi_io_create(tshi_io *io) {
#if TSHI_POSIX
    struct stat old;
    const int mode = stat(io->target, &old) == 0 ? 0600 : 0666;
    int copy; /* a second descriptor, for io->file: the lock outlives fclose */
    errno = 0;
    io->lock = open(io->temporary, O_WRONLY | O_CREAT | O_EXCL, mode);
    if (io->lock < 0) return errno != EEXIST;
    /* a program that this one starts must not inherit the lock */
    (void)fcntl(io->lock, F_SETFD, FD_CLOEXEC);
    if (!tshi_file_lock(io->lock)) {
        tshi_io_close(io);
        return 0;
    }
    if ((copy = dup(io->lock)) < 0) return 1;
    (void)fcntl(copy, F_SETFD, FD_CLOEXEC);
    if (!(io->file = fdopen(copy, "wb"))) (void)close(copy);
#else
    errno = 0;
    io->file = fopen(io->temporary, "wb");
#endif
    return 1;
}

/* Opens a temporary file "<path>.tmp-<8 digits of the host><8 digits>", in the same folder, since a
 * rename cannot cross file systems. 0 and an error if that fails. */
static int tshi_io_open_new(tshi_io *io) {
    const size_t size = strlen(io->path) + TSHI_IO_LINK;
    uint64_t salt[4], host = 0; /* salt: makes the name unlikely to be taken */
    char *name;
    int made = 0; /* 1: created, or failed for good */
    io->target = (char *)tshi_mem_arena_alloc(io->ctx, &io->arena, 3 * size);
    if (!io->target) return 0;
    name = io->target + 2 * size;
    if (!tshi_file_follow(io->path, io->target, io->target + size, size))
        return tshi_io_system_error(io, "cannot be written");
#if TSHI_POSIX
    {
        struct utsname system;
        if (uname(&system) >= 0) host = tshi_rng_hash(0, system.nodename, strlen(system.nodename));
    }
#endif
    salt[0] = (uint64_t)time(NULL);
    salt[1] = (uint64_t)clock();
    salt[2] = (uint64_t)(uintptr_t)io->ctx;
    for (salt[3] = 0; salt[3] < 100 && !made; salt[3]++) {
        (void)snprintf(name, size, "%s.tmp-%08lx%08lx", io->target, (unsigned long)(host >> 32),
                       (unsigned long)(tshi_rng_hash(0, salt, sizeof salt) >> 32));
        io->temporary = name;
        made = tshi_io_create(io);
    }
    if (io->file) {
        tshi_file_sweep(io->target, name, io->lock, io->target + size);
        return 1;
    }
    if (io->lock < 0) io->temporary = NULL; /* somebody else's file: do not remove it */
    return tshi_io_system_error(io, "cannot be written");
}

/* Returns 1 if a file of so many bytes is within the process's limit, beyond which a write ends the
 * process (SIGXFSZ); else 0 and an error. */
static int tshi_io_fits(const tshi_io *io, int64_t bytes) {
#if TSHI_POSIX
    struct rlimit limit;
    if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY ||
        (uint64_t)limit.rlim_cur >= (uint64_t)bytes)
        return 1;
    return tshi_io_fail(io, TSH_ERR_IO,
                        "cannot be written: it has %lld bytes, and files of this process may have "
                        "%llu (RLIMIT_FSIZE, ulimit -f)",
                        (long long)bytes, (unsigned long long)limit.rlim_cur);
#else
    (void)io, (void)bytes;
    return 1;
#endif
}

/* On the writer: makes the header, opens the temporary file, writes the header to it. */
static void tshi_io_write_header(tshi_io *io) {
    tshi_io_text text; /* the header, measured first */
    tshi_block *block;
    const char *kind; /* what the path is, if not a regular file */
    unsigned char length[8];
    memset(&text, 0, sizeof text);
    tshi_io_put_header(io, &text);
    if (text.used > TSHI_IO_HEADER)
        (void)tshi_io_fail(
            io, TSH_ERR_UNSUPPORTED,
            "cannot be written: its header of %d tensors has %llu bytes, of at most %d", io->items,
            (unsigned long long)text.used, (int)TSHI_IO_HEADER);
    else if ((kind = tshi_file_kind(io->path)) != NULL)
        (void)tshi_io_wrong_kind(io, kind);
    if (io->ctx->error.code != TSH_OK) return;
    block = tshi_mem_alloc(io->ctx, TSH_MEM_BOOKS, text.used + 1);
    if (!block) return;
    text.at = (char *)tshi_mem_data(block); /* from here on written */
    text.size = text.used + 1;
    text.used = 0;
    tshi_io_put_header(io, &text);
    tshi_module_store_word(length, 0, text.used); /* the file's first 8 bytes */
    io->hash_at = 8 + (int64_t)(strstr(text.at, tshi_io_hash_key) - text.at) +
                  (int64_t)sizeof tshi_io_hash_key - 1;
    if (tshi_io_fits(io, 8 + (int64_t)text.used + io->bytes) && tshi_io_open_new(io)) {
        tshi_io_write(io, length, sizeof length);
        tshi_io_write(io, text.at, text.used);
    }
    tshi_mem_release(io->ctx, block);
}

/* Adds bytes to the hash that all ranks compare. */
static void tshi_io_hash(tshi_io *io, const void *data, size_t bytes) {
    io->hash = tshi_rng_hash(io->hash, data, bytes);
}

/* Lists and hashes what is to be saved, checks names, and allocates what the collectives need. */
static void tshi_io_prepare(tshi_io *io) {
    tsh_ctx *ctx = io->ctx;
    int64_t whole = 0; /* elements of the largest chunked moment, plus 1 */
    int i;
    if (ctx->pp.size > 1 && !ctx->pipeline)
        (void)tsh_fail(
            ctx, TSH_ERR_UNSUPPORTED,
            "tsh_save: the ranks of pp, %d, hold what the program gave them; only stages "
            "of a tsh_pipeline can be saved as one model",
            ctx->pp.size);
    if (tsh_materialize(io->root) != TSH_OK || !tshi_io_list(io)) return;
    for (i = 0; i < io->generators; i++)
        if (*io->count[i].value && !tshi_io_check_name(io, io->count[i].name)) return;
    for (i = 0; i < io->items; i++) {
        const tsh_tensor *t = io->item[i].param;
        io->item[i].there = !t->absent && tshi_io_values(&io->item[i]) != NULL;
        if (!tshi_io_check_name(io, t->path)) return; /* else tsh_load would refuse the file */
        if (tshi_io_in_chunks(&io->item[i]) && tsh_local_numel(t) >= whole)
            whole = tsh_local_numel(t) + 1;
        tshi_io_hash(io, io->item[i].prefix, strlen(io->item[i].prefix));
        tshi_io_hash(io, t->path, strlen(t->path));
        tshi_io_hash(io, t->dim, sizeof t->dim[0] * (size_t)t->ndim);
    }
    if (whole) io->whole_block = tshi_mem_alloc(ctx, TSH_MEM_BOOKS, tshi_dtype_reals(whole));
    if (ctx->pp.size > 1)
        io->known = (int64_t *)tshi_mem_arena_alloc(
            ctx, &io->arena, (size_t)(io->items + io->counts) * sizeof *io->known);
}

/* Combines what the stages know by one all-reduce (MAX) over pp: which moments exist, and the
 * counts of steps and dropout calls, which only stages that hold a parameter or module count. */
static void tshi_io_merge_stages(tshi_io *io) {
    int64_t *const there = io->known, *const counts = there + io->items;
    int i;
    for (i = 0; i < io->items; i++) there[i] = io->item[i].there;
    for (i = 0; i < io->counts; i++) counts[i] = (int64_t)*io->count[i].value;
    if (tshi_error_comm(
            io->ctx, tsh_allreduce(&io->ctx->pp, there, io->items + io->counts, TSH_I64, TSH_MAX),
            io->op) != TSH_OK)
        return;
    for (i = 0; i < io->items; i++) io->item[i].there = (int)there[i];
    for (i = 0; i < io->counts; i++)
        if (io->count[i].staged) *io->count[i].value = (uint64_t)counts[i];
}

/* Does all that can fail before values are sent: allocates buffers, opens the temporary file and
 * writes its header. */
static void tshi_io_begin_file(tshi_io *io) {
    tsh_ctx *ctx = io->ctx;
    const size_t buffers = ctx->tp.rank == 0 && ctx->tp.size > 1 ? 2 : 1;
    int i;
    for (i = 0; i < io->items; i++) {
        if (io->item[i].there)
            io->bytes += tsh_numel(io->item[i].param) * io->item[i].dtype->size;
        tshi_io_hash(io, &io->item[i].there, sizeof io->item[i].there);
    }
    if (ctx->dp.rank > 0) return; /* the first replica writes */
    io->buffer = (char *)tshi_mem_arena_alloc(ctx, &io->arena, buffers * TSHI_IO_BUFFER);
    if (io->buffer && tshi_io_is_writer(ctx)) tshi_io_write_header(io);
}

/* Copies the elements of rank's shard that are among the global elements [from, to). Source: the
 * shard or, if that is NULL, a message that holds them one after the other. Destination: whole,
 * which begins with element `from`, or, if that is NULL, the message. Returns the number of
 * elements copied. */
static int64_t tshi_io_copy_runs(const tsh_tensor *t, int rank, int64_t from, int64_t to,
                                 const void *shard, char *message, char *whole) {
    const size_t width = tsh_dtype_size(t->dtype);
    tshi_runs run = tshi_tensor_runs(t, rank, from, to);
    size_t done = 0; /* bytes copied so far */
    while (tshi_tensor_next_run(&run)) {
        const size_t bytes = (size_t)run.length * width;
        const char *in = shard ? (const char *)shard + (size_t)run.local * width : message + done;
        char *out = whole ? whole + (size_t)(run.global - from) * width : message + done;
        if (in != out) memcpy(out, in, bytes); /* in == out: only counted */
        done += bytes;
    }
    return (int64_t)(done / width);
}

/* Sends the global elements [from, to) of a tensor from their owners to rank 0 of tp. */
static tsh_result tshi_io_gather(const tshi_io *io, const tsh_tensor *t, int64_t from, int64_t to) {
    tsh_comm *tp = &io->ctx->tp;
    const int owners = t->layout.kind == TSH_SHARDED ? tp->size : 1;
    char *buffer = io->buffer, *message = buffer + TSHI_IO_BUFFER;
    const void *mine = tshi_tensor_at(t); /* this rank's shard */
    tsh_result result = TSH_OK;
    int64_t n = tshi_io_copy_runs(t, tp->rank, from, to, mine, buffer, tp->rank ? NULL : buffer);
    int r;
    if (tp->rank > 0 && n) result = tsh_send(tp, buffer, n, t->dtype, 0);
    for (r = 1; tp->rank == 0 && r < owners && result == TSH_OK; r++) {
        n = tshi_io_copy_runs(t, r, from, to, NULL, message, NULL); /* how many rank r sends */
        if (n) result = tsh_recv(tp, message, n, t->dtype, r);
        if (result == TSH_OK) (void)tshi_io_copy_runs(t, r, from, to, NULL, message, buffer);
    }
    return tshi_error_comm(io->ctx, result, io->op);
}

/* Writes the item's tensor t, buffer by buffer: rank 0 of tp on its stage gathers a buffer and
 * sends it to the writer. After a failed write, the writer still receives the other buffers. */
static tsh_result tshi_io_write_tensor(tshi_io *io, const tsh_tensor *t, const tshi_io_item *item) {
    const tsh_dtype dtype = (tsh_dtype)(item->dtype - tshi_dtypes);
    const int stage = item->param->stage ? item->param->stage - 1 : 0; /* the stage that sends it */
    tsh_ctx *ctx = io->ctx;
    const size_t width = (size_t)item->dtype->size;
    const int64_t n = tsh_numel(t), step = TSHI_IO_BUFFER / (int64_t)width;
    const int writer = tshi_io_is_writer(ctx), holds = ctx->pp.rank == stage;
    const int owns = holds && (ctx->tp.rank == 0 || t->layout.kind == TSH_SHARDED);
    char *buffer = io->buffer;
    int64_t from, to;
    for (from = 0; from < n && (writer || owns); from = to) {
        tsh_result result = TSH_OK;
        to = tshi_base_min(from + step, n);
        if (owns && tshi_io_gather(io, t, from, to) != TSH_OK) return TSH_ERR_IO;
        if (owns && ctx->tp.rank == 0 && !writer)
            result = tsh_send(&ctx->pp, buffer, to - from, dtype, 0);
        if (writer && !holds) result = tsh_recv(&ctx->pp, buffer, to - from, dtype, stage);
        if (tshi_error_comm(ctx, result, io->op) != TSH_OK) return TSH_ERR_IO;
        if (!writer) continue; /* only the writer has the file */
        tshi_io_swap_bytes(buffer, to - from, width);
        tshi_io_hash_values(io, buffer, (size_t)(to - from) * width);
        tshi_io_write(io, buffer, (size_t)(to - from) * width);
    }
    return TSH_OK;
}

/* Writes an item from the first replica. A chunked moment is gathered over dp first. */
static tsh_result tshi_io_write_item(tshi_io *io, const tshi_io_item *item) {
    const tsh_tensor *t = item->param->absent ? NULL : tshi_io_values(item);
    tsh_tensor whole; /* the gathered moment */
    if (t && tshi_io_in_chunks(item)) {
        whole = *t;
        whole.block = io->whole_block;
        if (tshi_optim_gather(t, (tsh_real *)tshi_mem_data(whole.block), io->op) != TSH_OK)
            return TSH_ERR_IO;
        t = &whole;
    }
    if (!item->there || io->ctx->dp.rank > 0) return TSH_OK;
    return tshi_io_write_tensor(io, t ? t : item->param, item);
}

/* Writes the hash of all values into the header and closes the file; 0 if that fails. */
static int tshi_io_write_hash(tshi_io *io) {
    char digits[24];
    uint64_t hash = 0;
    int h, sealed, closed; /* 1: the hash was written; the file was closed */
    for (h = 0; h < TSHI_IO_HASHES; h++) hash = tshi_coll_mix(hash, io->hashes[h]);
    (void)snprintf(digits, sizeof digits, "%016llx", (unsigned long long)hash);
    sealed = tshi_file_seek(io->file, io->hash_at) && fwrite(digits, 1, 16, io->file) == 16;
    closed = fclose(io->file) == 0;
    io->file = NULL;
    return sealed && closed;
}

/* On the writer: completes and syncs the temporary file, then renames it over the old file. */
static int tshi_io_finish(tshi_io *io) {
    char *name = io->temporary, *slash;
    errno = 0;
    if (!tshi_io_write_hash(io) || !tshi_file_sync(name, 0))
        return tshi_io_system_error(io, "cannot be written");
    tshi_file_keep_owner(name, io->target);
    if (!tshi_file_rename(name, io->target)) return tshi_io_system_error(io, "cannot be replaced");
    io->temporary = NULL; /* no longer to be removed */
    slash = strrchr(name, '/');
    if (slash) slash[slash == name] = '\0';
    (void)tshi_file_sync(slash ? name : ".", 1); /* no error if it fails: the file is there */
    return 1;
}

TSH_API TSHI_COLD tsh_result tsh_save(tsh_module *module, const char *path,
                                      const tsh_optim *optim) {
    tshi_io io;
    tsh_ctx *ctx;
    int i; /* index of the item */
    if (!module) return TSH_ERR_ARGUMENT;
    ctx = module->ctx;
    if (!tsh_ok(ctx)) return ctx->error.code;
    tshi_io_begin(&io, "tsh_save", module, path, optim);
    if (ctx->error.code == TSH_OK) tshi_io_prepare(&io); /* first half: lists and checks */
    if (ctx->pp.size > 1 && tshi_io_agree(&io) == TSH_OK) tshi_io_merge_stages(&io);
    if (ctx->error.code == TSH_OK) tshi_io_begin_file(&io);
    if (ctx->error.code != TSH_OK) tshi_io_close(&io); /* removes the temporary file */
    if (tshi_io_agree(&io) == TSH_OK) {                /* second half: values */
        for (i = 0; i < io.items; i++)
            if (tshi_io_write_item(&io, &io.item[i]) != TSH_OK) break;
        if (io.file && ctx->error.code == TSH_OK) (void)tshi_io_finish(&io);
        tshi_io_close(&io);
        (void)tshi_io_agree(&io);
    }
    tshi_io_end(&io);
    return ctx->error.code;
}

/* -- reading: JSON ------------------------------------------------------------
 * Parses only what a header may contain, in one pass without recursion. Strings are decoded in
 * place, since none gets longer. The text ends with a NUL, where every parser stops. After an
 * error, parsers return 0 or "", and loops over elements end. */

/* Sets an error that says what is wrong with the header at io->at. Returns 0. */
static int tshi_io_bad(const tshi_io *io, const char *what) {
    return tshi_io_fail(io, TSH_ERR_IO, "is no safetensors file: %s at byte %llu of its header",
                        what, (unsigned long long)(io->at - io->text));
}

/* Copies a name from the file for an error sentence: shortened, control characters as "?". */
static const char *tshi_io_quote(const char *name, char *quote) {
    size_t i;
    for (i = 0; name[i] && i + 1 < TSHI_IO_QUOTE; i++)
        quote[i] = (unsigned char)name[i] < 0x20 || name[i] == 0x7F ? '?' : name[i];
    quote[i] = '\0';
    return quote;
}

/* Skips white space. */
static void tshi_io_skip(tshi_io *io) {
    while (*io->at == ' ' || *io->at == '\t' || *io->at == '\n' || *io->at == '\r') io->at++;
}

/* Skips white space and c; 0 if another character follows. */
static int tshi_io_skip_char(tshi_io *io, char c) {
    tshi_io_skip(io);
    if (*io->at != c) return 0;
    io->at++;
    return 1;
}

/* Parses "u" and four hexadecimal digits; returns their value, -1 if they are not there. */
static long tshi_io_hex(tshi_io *io) {
    long value = 0;
    int i;
    if (*io->at != 'u') return -1;
    for (io->at++, i = 0; i < 4; i++, io->at++) {
        const char c = *io->at;
        const long digit = c >= '0' && c <= '9'   ? c - '0'
                           : c >= 'a' && c <= 'f' ? c - 'a' + 10
                           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                                  : -1;
        if (digit < 0) return -1; /* not a hexadecimal digit */
        value = value * 16 + digit;
    }
    return value;
}

/* Parses what follows the "\" of "\u0041" and writes that character as UTF-8 at out. Returns the
 * end of the output; NULL for another escape, half a surrogate pair, or NUL. */
static char *tshi_io_unicode(tshi_io *io, char *out) {
    long code = tshi_io_hex(io), low; /* code point; second half of a pair */
    int n, i;
    if (code <= 0 || (code >= 0xDC00 && code < 0xE000)) return NULL;
    if (code >= 0xD800 && code < 0xDC00) { /* first half of a surrogate pair */
        if (*io->at != '\\') return NULL;
        io->at++;
        low = tshi_io_hex(io);
        if (low < 0xDC00 || low >= 0xE000) return NULL;
        code = 0x10000 + (code - 0xD800) * 1024 + (low - 0xDC00);
    }
    n = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4; /* bytes of UTF-8 */
    for (i = n - 1; i > 0; i--, code >>= 6) out[i] = (char)(unsigned char)(0x80 | (code & 0x3F));
    out[0] = (char)(unsigned char)(n == 1 ? code : (0xF00 >> n & 0xFF) | code);
    return out + n;
}

/* Parses a string and returns it, decoded in place and ended by a NUL; "" after an error. */
static const char *tshi_io_string(tshi_io *io) {
    static const char escape[] = "\"\\/bfnrt", meaning[] = "\"\\/\b\f\n\r\t";
    const char *found, *wrong = NULL; /* found: the escape; wrong: an error text */
    char *start, *out;                /* the decoded string, its end so far */
    int n;                            /* bytes of the next character */
    if (!tshi_io_skip_char(io, '"')) wrong = "there is no string";
    for (start = out = io->at; !wrong && *io->at != '"';) {
        n = tshi_io_utf8((const unsigned char *)io->at);
        if (!n || (unsigned char)*io->at < 0x20) {
            wrong = "a string does not end, or is not UTF-8";
        } else if (*io->at != '\\') {
            for (; n > 0; n--) *out++ = *io->at++;
        } else if (*++io->at && (found = strchr(escape, *io->at)) != NULL) {
            *out++ = meaning[found - escape];
            io->at++;
        } else if (!(out = tshi_io_unicode(io, out))) {
            wrong = "an escape in a string is wrong";
        }
    }
    if (wrong) (void)tshi_io_bad(io, wrong);
    if (wrong) return "";
    io->at++;
    *out = '\0';
    return start;
}

/* Parses a key and the colon after it; returns the key. */
static const char *tshi_io_key(tshi_io *io) {
    const char *key = tshi_io_string(io);
    if (!tshi_io_skip_char(io, ':')) (void)tshi_io_bad(io, "a colon is missing");
    return key;
}

/* Parses an opening bracket, brackets[0]. Returns 1 if an element follows, 0 if brackets[1] does,
 * or if there is no opening bracket, with the error `what`. */
static int tshi_io_open(tshi_io *io, const char *brackets, const char *what) {
    if (!tshi_io_skip_char(io, brackets[0])) return tshi_io_bad(io, what);
    return !tshi_io_skip_char(io, brackets[1]);
}

/* Parses what follows an element: returns 1 after a comma, 0 after `close` or an error. */
static int tshi_io_next(tshi_io *io, char close) {
    if (io->ctx->error.code != TSH_OK || tshi_io_skip_char(io, close)) return 0;
    return tshi_io_skip_char(io, ',') || tshi_io_bad(io, "a comma or a bracket is missing");
}

/* Parses digits: sets *out to their value and returns their end; NULL if it is greater than max. */
static const char *tshi_io_digits(const char *at, uint64_t max, uint64_t *out) {
    for (*out = 0; *at >= '0' && *at <= '9'; at++) {
        const uint64_t digit = (uint64_t)(*at - '0');
        if (*out > (max - digit) / 10) return NULL;
        *out = *out * 10 + digit;
    }
    return at;
}

/* Parses a whole number from 0 to INT64_MAX / 2 and returns it. */
static int64_t tshi_io_whole(tshi_io *io) {
    const char *end;
    uint64_t value;
    tshi_io_skip(io);
    if (!(end = tshi_io_digits(io->at, INT64_MAX / 2, &value)))
        return tshi_io_bad(io, "a number is too large");
    if (end == io->at || (*io->at == '0' && end > io->at + 1)) /* no digit, or a leading zero */
        return tshi_io_bad(io, "there is no whole number");
    io->at += end - io->at; /* moves to the end of the number */
    return (int64_t)value;
}

/* Parses a list, "[1, 2]", of at most `max` whole numbers into out; returns how many there are. */
static int tshi_io_numbers(tshi_io *io, int64_t *out, int max) {
    int count = 0, more = tshi_io_open(io, "[]", "there is no list");
    for (; more; more = tshi_io_next(io, ']')) {
        if (count == max) return tshi_io_bad(io, "a list is too long");
        out[count++] = tshi_io_whole(io);
    }
    return count;
}

/* -- reading: the header ------------------------------------------------------ */

/* The format's dtypes of whole bytes; tsh_load reads only those of the model's tensors. */
typedef struct tshi_io_type {
    const char *name;
    int64_t size; /* bytes of a value */
} tshi_io_type;
static const tshi_io_type tshi_io_types[] = {{"F32", 4}, {"F64", 8},     {"BOOL", 1},    {"U8", 1},
                                             {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1}, {"I16", 2},
                                             {"U16", 2}, {"F16", 2},     {"BF16", 2},    {"I32", 4},
                                             {"U32", 4}, {"I64", 8},     {"U64", 8}};

/* Parses a dtype's name; returns its index in tshi_io_types. */
static int tshi_io_dtype(tshi_io *io) {
    const char *name = tshi_io_string(io);
    int type = (int)(sizeof tshi_io_types / sizeof tshi_io_types[0]) - 1;
    while (type >= 0 && strcmp(name, tshi_io_types[type].name) != 0) type--;
    return type >= 0 ? type : tshi_io_bad(io, "a dtype is unknown");
}

/* Parses a tensor's object into entry: {"dtype": .., "shape": .., "data_offsets": ..}, each key
 * once, in any order. */
static void tshi_io_read_entry(tshi_io *io, tshi_io_entry *entry) {
    enum { DTYPE = 1, SHAPE = 2, OFFSETS = 4, ALL = 7 };
    int64_t offset[2] = {0, 0};
    int seen = 0, n = 0; /* seen: bits of the keys so far; n: number of offsets */
    if (!tshi_io_skip_char(io, '{')) (void)tshi_io_bad(io, "a tensor is no object");
    do {
        const char *key = tshi_io_key(io);
        const int which = strcmp(key, "dtype") == 0          ? DTYPE
                          : strcmp(key, "shape") == 0        ? SHAPE
                          : strcmp(key, "data_offsets") == 0 ? OFFSETS
                                                             : 0;
        if (!which || (seen & which)) (void)tshi_io_bad(io, "a key is unknown or twice there");
        seen |= which;
        if (which == DTYPE) entry->type = tshi_io_dtype(io); /* an index of tshi_io_types */
        if (which == SHAPE) entry->ndim = tshi_io_numbers(io, entry->dim, TSH_MAX_DIMS);
        if (which == OFFSETS) n = tshi_io_numbers(io, offset, 2);
    } while (tshi_io_next(io, '}'));
    if (seen != ALL || n != 2)
        (void)tshi_io_bad(io, "a tensor lacks its dtype, shape or two data_offsets");
    entry->begin = offset[0];
    entry->end = offset[1];
}

/* Parses the metadata, {"key": "text", ..}. */
static void tshi_io_read_pairs(tshi_io *io) {
    int more = tshi_io_open(io, "{}", "__metadata__ is no object");
    for (; more; more = tshi_io_next(io, '}')) {
        tshi_io_pair *pair = &io->pair[io->pairs++]; /* there is space: see tshi_io_read_header */
        pair->name = tshi_io_key(io);
        pair->text = tshi_io_string(io);
    }
}

/* Parses the whole header, of n characters and a NUL, into io->entry and io->pair. */
static void tshi_io_read_entries(tshi_io *io, size_t n) {
    const char *end = io->at + n, *name;
    int more, metadata = 0;                                     /* metadata: 1 after __metadata__ */
    if (*io->at != '{') (void)tshi_io_bad(io, "there is no {"); /* nor may blanks precede it */
    for (more = tshi_io_open(io, "{}", ""); more; more = tshi_io_next(io, '}')) {
        name = tshi_io_key(io);
        if (strcmp(name, "__metadata__") != 0) {
            io->entry[io->entries].name = name; /* points into io->text */
            tshi_io_read_entry(io, &io->entry[io->entries++]);
        } else if (metadata++) {
            (void)tshi_io_bad(io, "__metadata__ is there twice");
        } else {
            tshi_io_read_pairs(io);
        }
    }
    tshi_io_skip(io);
    if (io->at != end) (void)tshi_io_bad(io, "something follows the last }");
}

/* -- reading: order, gaps, names ---------------------------------------------- */

/* Compares two structs by their first field, a name; for qsort and bsearch. */
static int tshi_io_by_name(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Compares two entries by their offsets; for qsort. */
static int tshi_io_by_place(const void *a, const void *b) {
    const tshi_io_entry *x = (const tshi_io_entry *)a, *y = (const tshi_io_entry *)b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return x->end < y->end ? -1 : x->end > y->end;
}

/* Reports what is wrong with one tensor of the file. Returns 0. */
static int tshi_io_bad_entry(const tshi_io *io, const char *name, const char *what) {
    char quote[TSHI_IO_QUOTE];
    return tshi_io_fail(io, TSH_ERR_IO, "is no safetensors file: \"%s\" %s",
                        tshi_io_quote(name, quote), what);
}

/* Sorts n structs by their first field, a name; 0 and the error `twice` if a name occurs twice. */
static int tshi_io_sort_names(const tshi_io *io, void *base, size_t n, size_t width,
                              const char *twice) {
    const char *at = (const char *)base;
    size_t i;
    qsort(base, n, width, tshi_io_by_name);
    for (i = 1; i < n; i++, at += width)
        if (tshi_io_by_name(at, at + width) == 0)
            return tshi_io_bad_entry(io, *(const char *const *)(const void *)at, twice);
    return 1;
}

/* Checks that sizes fit shapes, that values have neither gaps nor overlaps, and that no name occurs
 * twice; 0 and an error if not. Leaves entries and metadata sorted by name. */
static int tshi_io_check_entries(tshi_io *io) {
    int64_t at = 0, bytes; /* end of the tensor before; size by dtype and shape */
    size_t i;
    int d;
    qsort(io->entry, io->entries, sizeof *io->entry, tshi_io_by_place);
    for (i = 0; i < io->entries; i++) {
        const tshi_io_entry *e = &io->entry[i];
        for (bytes = tshi_io_types[e->type].size, d = 0; d < e->ndim; d++) {
            if (e->dim[d] && bytes > INT64_MAX / 4 / e->dim[d])
                return tshi_io_bad_entry(io, e->name, "has a shape that no file can hold");
            bytes *= e->dim[d];
        }
        if (e->end < e->begin || e->end - e->begin != bytes)
            return tshi_io_bad_entry(io, e->name, "has data_offsets that do not fit its shape");
        if (e->begin != at)
            return tshi_io_bad_entry(io, e->name, "overlaps another tensor, or leaves a gap");
        at = e->end;
    }
    io->bytes = at; /* the last tensor's end */
    return tshi_io_sort_names(io, io->entry, io->entries, sizeof *io->entry, "is there twice") &&
           tshi_io_sort_names(io, io->pair, io->pairs, sizeof *io->pair,
                              "is twice in __metadata__");
}

/* -- reading: bytes ----------------------------------------------------------- */

/* Reads bytes at position `at` of the file; returns 0 if the file ends before, or on an error. */
static int tshi_io_read(tshi_io *io, int64_t at, void *to, size_t bytes) {
    size_t got;
    errno = 0;
    if (at != io->place && !tshi_file_seek(io->file, at)) return 0; /* seeks only if it must */
    got = fread(to, 1, bytes, io->file);
    io->place = at + (int64_t)got;
    return got == bytes;
}

/* Reports a failed read: a system error or, if the file ended, `what`. Returns 0. */
static int tshi_io_read_error(const tshi_io *io, const char *what) {
    if (ferror(io->file)) return tshi_io_system_error(io, "cannot be read");
    return tshi_io_fail(io, TSH_ERR_IO, "is no safetensors file: %s", what);
}

/* Other formats: their first bytes and a description for the error. */
static const tshi_io_pair tshi_io_forms[] = {
    {"{", "JSON text, such as the index of a sharded checkpoint"},
    {"PK\3\4", "a zip archive, as torch.save writes (safetensors.torch.save_file converts it)"},
    {"\x80\2", "a pickle, as torch.save writes (safetensors.torch.save_file converts it)"},
    {"\x80\4", "a Python pickle"},
    {"GGUF", "a GGUF file"},
    {"\x93NUMPY", "a NumPy array"},
    {"\x89HDF", "an HDF5 file"},
    {"<", "HTML or XML, such as the page of a failed download"},
    {"version https://git-lfs", "a git-lfs pointer (`git lfs pull` fetches the file)"},
};

/* Returns 1 and sets an error if the file is of another format that is recognised; else 0. */
static int tshi_io_foreign(tshi_io *io) {
    const size_t forms = sizeof tshi_io_forms / sizeof tshi_io_forms[0];
    unsigned char start[32];
    size_t i, n, letters = 0; /* n: bytes read; letters: bytes of text */
    memset(start, 0, sizeof start);
    (void)tshi_io_read(io, 0, start, sizeof start);
    n = (size_t)io->place;
    if (ferror(io->file)) return 0;
    for (i = 0; i < forms; i++)
        if (memcmp(start, tshi_io_forms[i].name, strlen(tshi_io_forms[i].name)) == 0)
            return !tshi_io_wrong_kind(io, tshi_io_forms[i].text);
    for (i = 0; i < n; i++)
        letters += (start[i] >= ' ' && start[i] < 127) || (start[i] >= '\t' && start[i] <= '\r');
    return letters == n && !tshi_io_wrong_kind(io, n ? "a text" : "an empty file");
}

/* Reads and checks the header, and that the file ends with its values; 0 and an error if not. */
static int tshi_io_read_header(tshi_io *io) {
    unsigned char length[8], byte; /* byte: read to learn where the file ends */
    char what[TSHI_TEXT_SIZE];
    uint64_t value;
    size_t n, max_entries, max_pairs; /* n: bytes of the header */
    if (!tshi_io_read(io, 0, length, sizeof length))
        return tshi_io_foreign(io) ? 0 : tshi_io_read_error(io, "it ends within the first 8 bytes");
    value = tshi_module_load_word(length, 0);
    (void)snprintf(what, sizeof what, "its header would have %llu bytes",
                   (unsigned long long)value);
    if (value < 2 || value > TSHI_IO_HEADER || !tshi_io_read(io, 7 + (int64_t)value, &byte, 1))
        return tshi_io_foreign(io) ? 0 : tshi_io_read_error(io, what);
    n = (size_t)value;             /* fits: at most TSHI_IO_HEADER */
    io->data = 8 + (int64_t)value; /* values follow the header */
    /* Limits: as many as fit into n bytes, plus one in which parsing ends with an error. The
     * shortest are "":{"dtype":"U8","shape":[],"data_offsets":[0,0]} and, in the metadata,
     * "":"", */
    max_entries = n / 49 + 1;
    max_pairs = n / 6 + 1;
    io->text = io->at = (char *)tshi_mem_arena_alloc(io->ctx, &io->arena, n + 1);
    io->entry = (tshi_io_entry *)tshi_mem_arena_alloc(io->ctx, &io->arena,
                                                      max_entries * sizeof *io->entry);
    io->pair = (tshi_io_pair *)tshi_mem_arena_alloc(io->ctx, &io->arena,
                                                    max_pairs * sizeof *io->pair);
    if (!io->text || !io->entry || !io->pair) return 0;
    if (!tshi_io_read(io, 8, io->text, n)) return tshi_io_read_error(io, "its header is cut off");
    io->hash = tshi_rng_hash(0, io->text, n); /* a NUL follows: the arena is zeroed */
    tshi_io_read_entries(io, n);
    if (io->ctx->error.code != TSH_OK || !tshi_io_check_entries(io)) return 0;
    if (io->bytes && !tshi_io_read(io, io->data + io->bytes - 1, &byte, 1))
        return tshi_io_read_error(io, "its values are cut off");
    if (tshi_io_read(io, io->data + io->bytes, &byte, 1))
        return tshi_io_read_error(io, "something follows its values");
    return 1;
}

/* ========================================================================== */
/* >>load                                                MARK: - load (private) */
/* Loading a file into a model, at any degree of parallelism.                   */
/* Needs: >>io.                                                                 */
/* ========================================================================== */

/* Every rank reads the file itself: the header, then the parts that its shards need. tshi_load_all
 * has two halves: tshi_load_check compares the header with the model, then the ranks agree; only
 * after that are values changed, parameter by parameter. */

/* -- checking a file against the model ---------------------------------------- */

/* Returns the struct with the name prefix + name, of n that are sorted by name; or NULL. */
static void *tshi_load_find(const void *base, size_t n, size_t width, const char *prefix,
                            const char *name) {
    char key[TSHI_IO_NAME];
    const char *wanted = key; /* tshi_io_by_name compares pointers to names */
    (void)snprintf(key, sizeof key, "%s%s", prefix, name);
    return bsearch(&wanted, base, n, width, tshi_io_by_name);
}

/* Returns the metadata's text for the key prefix + name; NULL if there is none. */
static const char *tshi_load_metadata(const tshi_io *io, const char *prefix, const char *name) {
    const tshi_io_pair *pair = (const tshi_io_pair *)tshi_load_find(io->pair, io->pairs,
                                                                    sizeof *pair, prefix, name);
    return pair ? pair->text : NULL;
}

/* Sets count->read from the metadata; 0 and an error if it is missing or no number. */
static int tshi_load_count(const tshi_io *io, tshi_io_count *count) {
    const char *text = tshi_load_metadata(io, count->prefix, count->name);
    const char *end = text ? tshi_io_digits(text, UINT64_MAX, &count->read) : NULL;
    if (end && end > text && !*end) return 1; /* it has only digits */
    count->read = 0;                          /* an optional one that is missing */
    if (!text && count->optional) return 1;
    return tshi_io_fail(io, TSH_ERR_IO, "has no whole number as \"%s%.128s\"", count->prefix,
                        count->name);
}

/* Reads the state of the generators, which files of other programs lack, and that of the optimiser,
 * if one is to be loaded; 0 and an error if something is wrong. */
static int tshi_load_counts(const tshi_io *io) {
    const char *kind = tshi_load_metadata(io, "tshard.", "optim");
    int i = tshi_load_metadata(io, "tshard.", "seed") ? 0 : io->generators;
    if (io->optim && !kind)
        return tshi_io_fail(io, TSH_ERR_ARGUMENT,
                            "holds no optimiser's state, the optimiser is %s; NULL for it loads "
                            "the parameters alone",
                            tshi_io_kind(io));
    if (io->optim && strcmp(kind, tshi_io_kind(io)) != 0)
        return tshi_io_fail(io, TSH_ERR_ARGUMENT,
                            "holds the state of \"%.32s\", the optimiser is %s", kind,
                            tshi_io_kind(io));
    for (; i < io->counts; i++)
        if (!tshi_load_count(io, &io->count[i])) return 0;
    return 1;
}

/* Returns 1 if the file must hold an item: a parameter, or a moment of Adam once it was updated.
 * SGD may have no momentum. */
static int tshi_load_required(const tshi_io *io, const tshi_io_item *item) {
    return !item->moment || (io->optim->desc.kind != TSH_SGD && item->steps->read > 0);
}

/* Sets item->entry to the file's tensor of the same name, NULL if it has none; 0 and an error if
 * dtype or shape differs. */
static int tshi_load_match(const tshi_io *io, tshi_io_item *item) {
    const char *dtype = item->dtype->file;
    char theirs[TSHI_TEXT_SIZE], ours[TSHI_TEXT_SIZE];
    const tsh_tensor *t = item->param;
    tshi_io_entry *e = (tshi_io_entry *)tshi_load_find(io->entry, io->entries, sizeof *e,
                                                       item->prefix, t->path);
    int same; /* 1: the shapes are equal */
    item->entry = e;
    if (!e) return 1; /* tshi_load_match_all decides */
    e->taken = 1;     /* the model has it */
    same = e->ndim == t->ndim && memcmp(e->dim, t->dim, sizeof t->dim[0] * (size_t)t->ndim) == 0;
    if (same && strcmp(tshi_io_types[e->type].name, dtype) == 0) return 1;
    (void)tsh_fail(io->ctx, same ? TSH_ERR_DTYPE : TSH_ERR_SHAPE,
                   "%s: \"%s\" is %s %s in \"%.128s\", %s %s in the model", io->op, e->name,
                   tshi_io_types[e->type].name, tshi_tensor_sizes(e->dim, e->ndim, theirs),
                   io->path, dtype, tshi_tensor_sizes(t->dim, t->ndim, ours));
    return 0;
}

/* Checks that file and model have the same tensors; without an optimiser, the file may also have
 * moments. 0 and an error if not. */
static int tshi_load_match_all(tshi_io *io) {
    const tshi_io_item *lacks = NULL; /* the first that the file lacks */
    const char *strange = NULL;       /* the first name that the model lacks */
    char quote[TSHI_IO_QUOTE];
    int i, missing = 0; /* number of tensors that the file lacks */
    size_t e, more = 0; /* number that the model lacks */
    for (i = 0; i < io->items; i++) {
        if (!tshi_load_match(io, &io->item[i])) return 0;
        if (io->item[i].entry || !tshi_load_required(io, &io->item[i])) continue;
        if (!missing++) lacks = &io->item[i]; /* the first one, for the error */
    }
    for (e = 0; e < io->entries; e++) {
        const char *name = io->entry[e].name;
        if (io->entry[e].taken ||
            (!io->optim && (strncmp(name, tshi_io_first, sizeof tshi_io_first - 1) == 0 ||
                            strncmp(name, tshi_io_second, sizeof tshi_io_second - 1) == 0)))
            continue;
        if (!more++) strange = name;
    }
    if (!lacks && !strange) return 1; /* all tensors match */
    return tshi_io_fail(
        io, TSH_ERR_ARGUMENT,
        "lacks %d of the model's tensors%s%s%.96s%s and has %llu that the model lacks%s%s%s",
        missing, lacks ? " (\"" : "", lacks ? lacks->prefix : "", lacks ? lacks->param->path : "",
        lacks ? "\")" : "", (unsigned long long)more, strange ? " (\"" : "",
        strange ? tshi_io_quote(strange, quote) : "", strange ? "\")" : "");
}

/* Extends io->hash, that of the header, so that it differs for different files: ranks compare it. A
 * header of tsh_save holds the hash of all values; for other files, adds a few bytes in the middle
 * of every tensor, which training probably changed. (Inode and date differ for copies.) */
static int tshi_load_sample(tshi_io *io) {
    unsigned char bytes[TSHI_IO_SAMPLE];
    int i;
    if (tshi_load_metadata(io, "tshard.", "hash")) return 1;
    for (i = 0; i < io->items; i++) {
        const tshi_io_entry *e = io->item[i].entry;
        const int64_t n = e ? tshi_base_min(e->end - e->begin, TSHI_IO_SAMPLE) : 0;
        if (!n) continue;
        if (!tshi_io_read(io, io->data + (e->begin + e->end - n) / 2, bytes, (size_t)n))
            return tshi_io_read_error(io, "it became shorter while it was read");
        tshi_io_hash(io, bytes, (size_t)n);
    }
    return 1;
}

/* Reads the header and checks it against the model; 0 and an error if they do not fit. */
static int tshi_load_check(tshi_io *io) {
    const char *format; /* version of tshard's metadata; NULL: another program's file */
    if (io->ctx->tape.newest)
        (void)tsh_fail(io->ctx, TSH_ERR_STATE,
                       "%s: ops are recorded that use the old values; end the step first: "
                       "tsh_step_end",
                       io->op);
    if (io->ctx->error.code != TSH_OK || !tshi_io_list(io) || !tshi_io_read_header(io)) return 0;
    format = tshi_load_metadata(io, "tshard.", "format");
    if (format && strcmp(format, "1") != 0)
        return tshi_io_fail(io, TSH_ERR_UNSUPPORTED,
                            "is of tshard's format %.16s, this version reads 1", format);
    return tshi_load_counts(io) && tshi_load_match_all(io) && tshi_load_sample(io);
}

/* -- values ------------------------------------------------------------------- */

/* Adds the number of NaN to found[0], of infinite values to found[1]. For both, x - x is not 0. */
static void tshi_load_count_nonfinite(const tshi_dtype *dtype, const char *values, int64_t count,
                                      int64_t *found) {
    enum { BLOCK = 256 };
    tsh_real x[BLOCK]; /* values, converted */
    int64_t e, i, n;
    for (e = 0; e < count && dtype->floating; e += n) {
        n = tshi_base_min(BLOCK, count - e); /* elements of this block */
        dtype->load(values + e * dtype->size, 1, n, x);
        for (i = 0; i < n; i++) {
            found[0] += x[i] != x[i];
            found[1] += x[i] == x[i] && !(x[i] - x[i] == 0);
        }
    }
}

/* Reads this rank's shard t of an item. Logs a warning if values are not finite: rank 0 of tp for a
 * replicated tensor, every rank of tp for its shard of a sharded one. */
static void tshi_load_values(tshi_io *io, const tshi_io_item *item, const tsh_tensor *t) {
    const tsh_ctx *ctx = io->ctx;
    const int64_t width = item->dtype->size, data = io->data + item->entry->begin;
    tshi_runs run = tshi_tensor_runs(t, ctx->tp.rank, 0, tsh_numel(t));
    int64_t found[2] = {0, 0}, e, n; /* number of NaN, of infinite values */
    while (tshi_tensor_next_run(&run)) {
        for (e = 0; e < run.length; e += n) {
            char *to = (char *)tshi_tensor_at(t) + (run.local + e) * width;
            /* no more at a time than stays in the cache until it is checked */
            n = tshi_base_min(run.length - e, TSHI_IO_BUFFER / 4 / width);
            if (!tshi_io_read(io, data + (run.global + e) * width, to, (size_t)(n * width))) {
                (void)tshi_io_read_error(io, "it became shorter while it was read");
                return;
            }
            tshi_io_swap_bytes(to, n, (size_t)width);
            tshi_load_count_nonfinite(item->dtype, to, n, found);
        }
    }
    if (!found[0] && !found[1]) return; /* all values are finite */
    if (ctx->dp.rank > 0 || (ctx->tp.rank > 0 && t->layout.kind != TSH_SHARDED)) return;
    if (io->nonfinite++ < TSHI_IO_NONFINITE)
        tsh_log_message(&ctx->logger,
                        "%s: \"%.128s\": \"%s%.96s\" holds %lld NaN and %lld infinite values "
                        "among the %lld that rank %d read",
                        io->op, io->path, item->prefix, item->param->path, (long long)found[0],
                        (long long)found[1], (long long)tsh_local_numel(t), ctx->world.rank);
}

/* Reads this rank's shard of an item, after allocating memory if needed. A chunked moment is read
 * whole and cut down to this rank's chunk. A moment that the file lacks becomes 0. */
static void tshi_load_read_item(tshi_io *io, const tshi_io_item *item) {
    tsh_tensor *t = item->param;
    const size_t bytes = (size_t)(tsh_local_numel(t) * item->dtype->size);
    if (t->absent) return; /* another stage reads it */
    if (item->moment && (*item->moment || item->entry)) {
        if (*item->moment &&
            !tshi_layout_equal(&(*item->moment)->layout, &t->layout, t->dim, io->ctx->tp.size)) {
            tshi_tensor_release(*item->moment); /* has an old layout: make a new one */
            *item->moment = NULL;
        }
        t = tshi_optim_moment(t, item->moment); /* creates it if needed */
        if (t && tshi_io_in_chunks(item) && !tshi_optim_allocate(t, tsh_local_numel(t))) return;
        if (t && !item->entry) memset(tshi_tensor_at(t), 0, bytes);
        if (t && !item->entry && tshi_io_in_chunks(item)) tshi_optim_keep_chunk(t);
    }
    if (!t || !item->entry) return;
    if (!t->block) t->block = tshi_mem_alloc(io->ctx, TSH_MEM_PARAMETERS, bytes);
    if (!t->block) return;
    tshi_load_values(io, item, t);
    if (tshi_io_in_chunks(item)) tshi_optim_keep_chunk(t);
}

/* Returns the time of the open file's last change; 0: not known. A change while the file
 * is read means that another program wrote to it: tsh_save never writes to a file in place. */
static int64_t tshi_load_stamp(const tshi_io *io) {
#if TSHI_POSIX
    struct stat info;
    if (fstat(fileno(io->file), &info) != 0) return 0;
#if defined(__linux__) && defined(st_mtime) /* -std=c99 hides it: seconds must do */
    return (int64_t)info.st_mtime * 1000000000 + info.st_mtim.tv_nsec;
#else
    return (int64_t)info.st_mtime;
#endif
#else
    (void)io;
    return 0;
#endif
}

/* Opens the file once, so that header and values are of the same save. */
static void tshi_load_open(tshi_io *io) {
    const char *kind = tshi_file_kind(io->path);
    errno = 0;
    if (!kind) io->file = fopen(io->path, "rb"); /* a FIFO could block */
    if (kind)
        (void)tshi_io_wrong_kind(io, kind);
    else if (!io->file)
        (void)tshi_io_system_error(io, "cannot be opened");
    else
        io->stamp = tshi_load_stamp(io);
}

/* Checks the open file against the model, then loads it. If ctx holds an error, only takes part in
 * the first agreement. */
static tsh_result tshi_load_all(tshi_io *io) {
    tsh_ctx *ctx = io->ctx;
    int i;
    if (ctx->error.code == TSH_OK) (void)tshi_load_check(io);
    if (tshi_io_agree(io) != TSH_OK) return ctx->error.code; /* nothing has been changed */
    for (i = 0; i < io->items && ctx->error.code == TSH_OK; i++)
        tshi_load_read_item(io, &io->item[i]);
    if (io->nonfinite > TSHI_IO_NONFINITE)
        tsh_log_message(&ctx->logger,
                        "%s: \"%.200s\": %lld more tensors that rank %d read hold NaN or infinity",
                        io->op, io->path, (long long)io->nonfinite - TSHI_IO_NONFINITE,
                        ctx->world.rank);
    if (ctx->error.code == TSH_OK && tshi_load_stamp(io) != io->stamp)
        (void)tshi_io_fail(io, TSH_ERR_IO, "was written to while it was read; load it again");
    if (tshi_io_agree(io) != TSH_OK) return ctx->error.code;
    for (i = 0; i < io->counts; i++) *io->count[i].value = io->count[i].read;
    return TSH_OK;
}

TSH_API TSHI_COLD tsh_result tsh_load(tsh_module *module, const char *path, tsh_optim *optim) {
    tshi_io io; /* state of this load */
    tsh_ctx *ctx;
    if (!module) return TSH_ERR_ARGUMENT;
    ctx = module->ctx;
    if (!tsh_ok(ctx)) return ctx->error.code;
    tshi_io_begin(&io, "tsh_load", module, path, optim);
    if (ctx->error.code == TSH_OK) tshi_load_open(&io);
    (void)tshi_load_all(&io);
    tshi_io_end(&io);
    return ctx->error.code;
}

/* ========================================================================== */
/* >>check                                              MARK: - check (private) */
/* What tests and users verify with: hashes, replicas, finite differences.      */
/* Needs: >>redistribute >>module >>io.                                         */
/* ========================================================================== */

/* tsh_check_replicas lists the tensors that should be equal on several ranks, with a hash of each,
 * gathers the lists over a group, and compares each hash with the majority's. All ranks of a group
 * list the same tensors in the same order. tsh_gradcheck uses finite differences. */

/* Returns the sum of the hashes of n elements. Each hash is of a value and its index in the whole
 * tensor; the first element's index is `global`. */
static uint64_t tshi_check_sum(const void *values, size_t width, int64_t global, int64_t n) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += tshi_rng_hash((uint64_t)(global + i) + 1, (const char *)values + (size_t)i * width,
                             width);
    return sum;
}

/* Returns this rank's part of tsh_hash, the sum of hashes over the whole tensor. For a sharded
 * tensor the parts of all ranks add up to it. */
static uint64_t tshi_check_part(const tsh_tensor *t) {
    const size_t width = tsh_dtype_size(t->dtype);
    tshi_block *scratch; /* t's values, if it is not dense */
    const char *values = (const char *)tshi_kernel_packed(t, &scratch); /* t's values, packed */
    tshi_runs run = tshi_tensor_own_runs(t);
    uint64_t sum = 0;
    while (values && tshi_tensor_next_run(&run))
        sum += tshi_check_sum(values + (size_t)run.local * width, width, run.global, run.length);
    tshi_mem_release(t->ctx, scratch);
    return sum;
}

TSH_API uint64_t tsh_hash(tsh_ctx *ctx, tsh_tensor *t) {
    if (!tshi_tensor_check_in(ctx, "tsh_hash", t)) return 0;
    if (t->layout.kind == TSH_PARTIAL && !(t = tsh_redistribute(t, tsh_replicated()))) return 0;
    uint64_t hash = tshi_check_part(t);
    if (t->layout.kind == TSH_SHARDED)
        (void)tshi_error_comm(ctx, tsh_allreduce(&ctx->tp, &hash, 1, TSH_I64, TSH_SUM), "tsh_hash");
    return hash;
}

/* A tensor whose values should be equal on several ranks: a parameter, or one of its moments. */
typedef struct tshi_replica {
    const char *path, *what;    /* of the parameter; "" or which moments of it, for the error */
    int64_t hash;               /* hash of this rank's values; 0: it has none */
    int over_tp, over_dp;       /* 1: must be equal on all ranks of tp; of dp */
    const unsigned char *holds; /* per rank of pp, 1: it holds them; NULL: do not compare over pp */
} tshi_replica;

/* The tensors to compare. Listed in two passes: count, then fill in. */
typedef struct tshi_replicas {
    tshi_replica *each; /* shape (count); NULL: only count them */
    int count;          /* number of tensors so far */
    int tied;           /* 1: parameters that several stages hold; 0: all of this stage */
} tshi_replicas;

/* Counts the tensor t, param or one of its moments; if all->each is not NULL, also lists it. With
 * `holds`, a missing tensor is listed, too: all ranks of pp need the same list. */
static void tshi_check_list(tshi_replicas *all, const tsh_tensor *param, const tsh_tensor *t,
                            const char *what, const unsigned char *holds) {
    const int found = t && t->block;
    if (!found && !holds) return;
    tshi_replica *r = all->each ? all->each + all->count : NULL;
    all->count++;
    if (!r) return;
    memset(r, 0, sizeof *r);
    r->path = param->path;
    r->what = what;
    r->holds = holds;
    if (!found) return; /* hash 0, not compared over tp or dp */
    r->over_tp = t->layout.kind == TSH_REPLICATED;
    r->over_dp = t == param || !(t->flags & TSHI_CHUNKED); /* chunks differ between ranks */
    const uint64_t hash = r->over_dp
                              ? tshi_check_part(t)
                              : tshi_check_sum(tshi_mem_data(t->block), tsh_dtype_size(t->dtype), 0,
                                               tshi_optim_count(t));
    r->hash = (int64_t)(hash >> 1); /* fits int64_t without a sign */
}

/* Lists a parameter and its moments in all optimisers. */
static void tshi_check_all(tshi_replicas *all, const tsh_tensor *param,
                           const unsigned char *holds) {
    tshi_check_list(all, param, param, "", holds);
    for (const tsh_optim *optim = param->ctx->optims; optim; optim = optim->older)
        for (int i = 0; i < optim->count; i++) {
            if (optim->each[i].param != param) continue;
            tshi_check_list(all, param, optim->each[i].first, "the first moments of ", holds);
            tshi_check_list(all, param, optim->each[i].second, "the second moments of ", holds);
        }
}

/* Callback of tshi_module_params: lists a parameter if it is of the kind to compare. */
static void tshi_check_param(const char *path, tsh_tensor *param, void *user) {
    tshi_replicas *all = (tshi_replicas *)user;
    const tshi_tie *tie = all->tied ? param->ctx->pipeline->ties : NULL;
    (void)path;
    if (!all->tied) tshi_check_all(all, param, NULL);
    for (; tie; tie = tie->next)
        if (tie->param == param) tshi_check_all(all, param, tie->holds);
}

/* Compares the listed values over comm, which is called `axis` in the error. The error names the
 * first tensor that differs and the ranks that differ from the majority. */
static void tshi_check_over(tsh_ctx *ctx, tsh_comm *comm, const char *axis,
                            const tshi_replicas *all) {
    const int n = all->count, size = comm->size;
    const size_t words = (size_t)n * (size_t)(size + 1) + (size_t)size;
    tshi_block *block = tshi_mem_alloc(ctx, TSH_MEM_STEP, words * sizeof(int64_t));
    char list[TSH_MESSAGE_SIZE / 4] = ""; /* "1, 3": the ranks that differ */
    int64_t *mine, *theirs, *counts; /* hashes (n), of all ranks (size, n); counts (size) */
    int i, r, usual, differ = 0; /* usual: a rank of the majority; differ: how many do not agree */
    if (!block) {
        tshi_error_report(ctx); /* the others wait for this rank */
        return;
    }
    mine = (int64_t *)tshi_mem_data(block);
    theirs = mine + n;
    counts = theirs + (size_t)n * (size_t)size;
    for (i = 0; i < n; i++) {
        const tshi_replica *one = &all->each[i];
        const int equal = comm == &ctx->tp ? one->over_tp : comm == &ctx->dp ? one->over_dp : 1;
        mine[i] = equal ? one->hash : 0; /* 0 on all ranks: not compared */
    }
    for (r = 0; r < size; r++) counts[r] = n;
    (void)tshi_error_comm(ctx, tsh_allgather(comm, mine, theirs, counts, 1, TSH_I64),
                          "tsh_check_replicas");
    for (i = 0; i < n && !differ && ctx->error.code == TSH_OK; i++) {
        const tshi_replica *one = &all->each[i];
        usual = tshi_module_majority(theirs + i, n, size, one->holds);
        for (r = 0; r < size; r++)
            if ((!one->holds || one->holds[r]) && theirs[r * n + i] != theirs[usual * n + i])
                tsh_text_add(list, sizeof list, "%s%d", differ++ ? ", " : "", r);
        if (differ)
            (void)tsh_fail(ctx, TSH_ERR_STATE,
                           "tsh_check_replicas: %s\"%s\" %s between the %d ranks of %s: %s %s "
                           "%s from the others",
                           one->what, one->path, one->what[0] ? "differ" : "differs", size, axis,
                           differ > 1 ? "ranks" : "rank", list, differ > 1 ? "differ" : "differs");
        if (differ) ctx->error.rank = -1;
    }
    tshi_mem_release(ctx, block);
}

/* Gives all ranks the error of the lowest rank that has one, before any can fail the world. */
static void tshi_check_agree(tsh_ctx *ctx) {
    static const char op[] = "tsh_check_replicas";
    tsh_comm *world = &ctx->world;
    int64_t found = ctx->error.code != TSH_OK ? world->size - world->rank : 0;
    if (!ctx->reported &&
        tshi_error_comm(ctx, tsh_allreduce(world, &found, 1, TSH_I64, TSH_MAX), op) == TSH_OK &&
        found && tshi_io_take_error(ctx, found, op) == TSH_OK)
        (void)tsh_barrier(world); /* all have the error before any goes on */
}

/* Compares parameters and moments over tp and dp; tied 1: those of several stages, over pp. */
static void tshi_check_axes(tsh_module *module, int tied) {
    tsh_ctx *ctx = module->ctx;
    tshi_replicas all = {NULL, 0, tied}; /* first pass: count */
    tshi_block *block;                   /* memory of all.each */
    tshi_module_params(module, tied, tshi_check_param, &all);
    block = tshi_mem_alloc(ctx, TSH_MEM_STEP, ((size_t)all.count + 1) * sizeof *all.each);
    if (!block) {
        tshi_error_report(ctx);
        return;
    }
    all.each = (tshi_replica *)tshi_mem_data(block);
    all.count = 0; /* second pass: fill in */
    tshi_module_params(module, tied, tshi_check_param, &all);
    if (tied) {
        tshi_check_over(ctx, &ctx->pp, "pp", &all);
    } else {
        tshi_check_over(ctx, &ctx->tp, "tp", &all);
        tshi_check_over(ctx, &ctx->dp, "dp", &all);
    }
    tshi_mem_release(ctx, block);
}

TSH_API TSHI_COLD int tsh_check_replicas(tsh_module *module) {
    tsh_ctx *ctx = module ? module->ctx : NULL;
    if (!ctx || !tsh_ok(ctx)) return 0;
    tshi_check_axes(module, 0);
    if (ctx->pipeline && ctx->pipeline->ties) tshi_check_axes(module, 1);
    tshi_check_agree(ctx);
    return ctx->error.code == TSH_OK;
}

/* -- gradcheck -------------------------------------------------------------- */

/* The arguments of tsh_gradcheck. */
typedef struct tshi_gradcheck {
    tsh_ctx *ctx;
    tsh_gradcheck_fn fn; /* returns the loss */
    tsh_tensor **in;     /* shape (n): its inputs, leaves */
    int n;               /* number of inputs */
    void *user;          /* passed to fn */
    double eps;          /* step of the finite differences */
} tshi_gradcheck;

/* Returns the loss with *at increased by `by`, and restores *at. at NULL: another rank holds the
 * element and changes it. */
static double tshi_check_loss(const tshi_gradcheck *c, tsh_real *at, double by) {
    tsh_real before = at ? *at : 0;
    if (at) *at = TSHI_R((double)before + by);
    tsh_no_grad_begin(c->ctx);
    tsh_scope_begin(c->ctx);
    double value = tsh_item(c->ctx, c->fn(c->ctx, c->in, c->n, c->user));
    tsh_scope_end(c->ctx);
    tsh_no_grad_end(c->ctx);
    if (at) *at = before; /* restores the element */
    return value;
}

/* Returns a pointer to element e of the whole tensor; NULL if another rank holds it. */
static tsh_real *tshi_check_element(const tsh_tensor *t, int64_t e) {
    tshi_runs run = tshi_tensor_runs(t, t->ctx->tp.rank, e, e + 1);
    return tshi_tensor_next_run(&run) ? tshi_tensor_values(t) + run.local : NULL;
}

/* Returns max(a, b); NaN if either is NaN. */
static double tshi_check_max(double a, double b) {
    return a != a || b <= a ? a : b;
}

/* Returns the largest difference, over this rank's elements, between an input's gradient and (f(x +
 * eps) - f(x - eps)) / (2 eps); it is relative where the gradient is above 1. */
static double tshi_check_input(const tshi_gradcheck *c, tsh_tensor *t, int64_t samples) {
    const int64_t numel = tsh_numel(t), every = samples > 0 ? numel / samples : 1;
    const tsh_real *grad = t->gr.live ? (const tsh_real *)tshi_mem_data(t->gr.block) : NULL;
    double worst = 0; /* the largest so far */
    for (int64_t e = 0; e < numel && c->ctx->error.code == TSH_OK; e += every > 0 ? every : 1) {
        tsh_real *at = tshi_check_element(t, e); /* NULL: another rank's */
        double up = tshi_check_loss(c, at, c->eps), down = tshi_check_loss(c, at, -c->eps);
        double found = at && grad ? (double)grad[at - tshi_tensor_values(t)] : 0;
        double gap = fabs((up - down) / (2 * c->eps) - found); /* difference from the gradient */
        if (at) worst = tshi_check_max(worst, gap / (fabs(found) > 1 ? fabs(found) : 1));
    }
    return worst;
}

TSH_API TSHI_COLD double tsh_gradcheck(tsh_ctx *ctx, tsh_gradcheck_fn fn, tsh_tensor **in, int n,
                                       void *user, double eps, int64_t samples) {
    const tshi_gradcheck c = {ctx, fn, in, n, user, eps > 0 ? eps : TSHI_DOUBLE ? 1e-5 : 1e-2};
    double worst = 0;
    if (!ctx || !fn || !in || !tsh_ok(ctx)) return -1; /* -1: no result */
    for (int i = 0; i < n; i++) {
        if (!in[i] || !(in[i]->flags & TSHI_LEAF) || !tshi_tensor_is_dense(in[i])) {
            (void)tsh_fail(
                ctx, TSH_ERR_ARGUMENT,
                "tsh_gradcheck: input %d is not a dense leaf; tsh_requires_grad makes one", i);
            return -1;
        }
        tsh_zero_grad(in[i]); /* backward adds to gradients */
    }
    if (tsh_backward(ctx, fn(ctx, in, n, user)) != TSH_OK) return -1;
    for (int i = 0; i < n; i++) worst = tshi_check_max(worst, tshi_check_input(&c, in[i], samples));
    (void)tshi_error_comm(ctx, tsh_allreduce(&ctx->tp, &worst, 1, TSH_F64, TSH_MAX),
                          "tsh_gradcheck");
    return tsh_ok(ctx) ? worst : -1;
}

/* ========================================================================== */
/* >>trace-file                                    MARK: - trace-file (private) */
/* The trace of all ranks as one JSON text in Chrome's trace event format: rank */
/* 0 writes its own events, then those that the others send.                    */
/* Needs: >>trace >>comm >>io.                                                  */
/* ========================================================================== */

/* Every rank writes its row into out->message. Whenever it is full, rank 0 writes it to the file;
 * other ranks send it to rank 0, which receives rank after rank, each until an empty message. */

enum { TSHI_TRACE_FILE_WORDS = 512 }; /* 64-bit words of a message, sent as TSH_I64 */

/* A part of a rank's text, as it is sent to rank 0. */
typedef struct tshi_trace_message {
    int64_t used; /* number of bytes in text; 0: this rank's last message */
    char text[8 * TSHI_TRACE_FILE_WORDS - 8];
} tshi_trace_message;

/* The state of tsh_trace_end on one rank. */
typedef struct tshi_trace_file {
    tsh_ctx *ctx;
    tsh_trace_desc desc;        /* where the text goes */
    FILE *file;                 /* on rank 0, if desc has a path */
    int refused;                /* on rank 0: 1 after writing failed */
    int why;                    /* errno of that failure */
    tshi_trace_message message; /* text not written or sent yet */
} tshi_trace_file;

/* Rank 0: writes the text of out->message. Other ranks: send it to rank 0, even if it is empty. */
static void tshi_trace_file_flush(tshi_trace_file *out) {
    tshi_trace_message *message = &out->message;
    tsh_comm *world = &out->ctx->world;
    const size_t size = (size_t)message->used; /* bytes of text so far */
    if (world->rank > 0)
        (void)tshi_error_comm(out->ctx, tsh_send(world, message, TSHI_TRACE_FILE_WORDS, TSH_I64, 0),
                              "tsh_trace_end: send to rank 0");
    else if (size > 0 && !out->refused)
        out->refused = out->file ? fwrite(message->text, 1, size, out->file) != size
                                 : !out->desc.write(out->desc.user, message->text, size);
    if (out->refused && !out->why) out->why = errno;
    message->used = 0; /* the message is empty again */
}

/* Appends to the text; writes or sends it whenever it is full. */
static void tshi_trace_file_put(tshi_trace_file *out, const char *text) {
    for (; *text; text++) {
        if (out->message.used == (int64_t)sizeof out->message.text) tshi_trace_file_flush(out);
        out->message.text[out->message.used++] = *text;
    }
}

/* Appends one event, a "complete" one (ph X), with begin and duration in microseconds. */
static void tshi_trace_file_event(tshi_trace_file *out, const tshi_event *event) {
    static const char *const kinds[] = {"forward", "backward", "module", "collective", "optimiser"};
    const int64_t length = event->end - event->begin; /* duration in nanoseconds */
    const char *name;
    char text[160]; /* a part of the event */
    tshi_trace_file_put(out, ",\n{\"ph\":\"X\",\"name\":\"");
    for (name = event->name; *name; name++)
        tshi_trace_file_put(out, tshi_io_escape(*name, text));
    (void)snprintf(text, sizeof text,
                   "\",\"cat\":\"%s\",\"pid\":0,\"tid\":%d,\"ts\":%lld.%03d,\"dur\":%lld.%03d",
                   kinds[event->kind], out->ctx->world.rank, (long long)(event->begin / 1000),
                   (int)(event->begin % 1000), (long long)(length / 1000), (int)(length % 1000));
    tshi_trace_file_put(out, text);
    text[0] = '\0'; /* other events have no args */
    if (event->kind == TSHI_TRACE_COLL)
        (void)snprintf(text, sizeof text, ",\"args\":{\"bytes\":%lld}", (long long)event->bytes);
    tshi_trace_file_put(out, text);
    tshi_trace_file_put(out, "}");
}

/* Appends this rank's row of the trace: its name, then its events. */
static void tshi_trace_file_row(tshi_trace_file *out) {
    const tsh_ctx *ctx = out->ctx;
    char text[224];
    if (ctx->world.rank == 0) /* begin of the file */
        tshi_trace_file_put(out, "{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n"
                                 "{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":0,\"tid\":0,"
                                 "\"args\":{\"name\":\"tshard\"}}");
    (void)snprintf(text, sizeof text,
                   ",\n{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":0,\"tid\":%d,"
                   "\"args\":{\"name\":\"rank %d (tp %d, pp %d, dp %d)\",\"left_out\":%lld}}",
                   ctx->world.rank, ctx->world.rank, ctx->tp.rank, ctx->pp.rank, ctx->dp.rank,
                   (long long)ctx->trace->lost);
    tshi_trace_file_put(out, text);
    for (const tshi_event *event = ctx->trace->first; event; event = event->next) /* oldest first */
        tshi_trace_file_event(out, event);
}

/* On rank 0: receives and writes the other ranks' texts, in the order of ranks, and the end of the
 * file. Receives all even if writing fails. */
static void tshi_trace_file_gather(tshi_trace_file *out) {
    tsh_comm *world = &out->ctx->world;
    for (int r = 1; r < world->size; r++) {
        do {
            tshi_trace_file_flush(out); /* writes the message before */
            if (tshi_error_comm(out->ctx,
                                tsh_recv(world, &out->message, TSHI_TRACE_FILE_WORDS, TSH_I64, r),
                                "tsh_trace_end: receive") != TSH_OK)
                return;
        } while (out->message.used > 0 && out->message.used <= (int64_t)sizeof out->message.text);
        out->message.used = 0;
    }
    tshi_trace_file_put(out, "\n]}\n");
    tshi_trace_file_flush(out);
}

TSH_API TSHI_COLD tsh_result tsh_trace_begin(tsh_ctx *ctx, const tsh_trace_desc *desc) {
    tshi_arena arena = TSHI_ZERO;
    if (!ctx || ctx->error.code != TSH_OK) return ctx ? ctx->error.code : TSH_ERR_ARGUMENT;
    if (ctx->trace) return tsh_fail(ctx, TSH_ERR_STATE, "tsh_trace_begin: a trace runs already");
    if (!desc || !desc->path == !desc->write)
        return tsh_fail(ctx, TSH_ERR_ARGUMENT, "tsh_trace_begin: takes either a path or write");
    if (!desc->now && tsh_now() < 0)
        return tsh_fail(ctx, TSH_ERR_ARGUMENT,
                        "tsh_trace_begin: the library was compiled without a clock; give desc.now, "
                        "or compile it with -D_POSIX_C_SOURCE=200809L or as C11");
    tshi_trace *trace = (tshi_trace *)tshi_mem_arena_alloc(ctx, &arena, sizeof *trace);
    if (!trace) return ctx->error.code;
    trace->ctx = ctx;
    trace->desc = *desc;
    if (desc->limit < 1) trace->desc.limit = TSHI_TRACE_LIMIT;
    trace->arena = arena; /* the arena holds the trace itself */
    ctx->trace = ctx->world.trace = ctx->tp.trace = ctx->pp.trace = ctx->dp.trace = trace;
    return TSH_OK;
}

TSH_API TSHI_COLD tsh_result tsh_trace_end(tsh_ctx *ctx) {
    tshi_trace_file out = TSHI_ZERO; /* nothing written yet */
    if (!ctx) return TSH_ERR_ARGUMENT;
    if (ctx->error.code == TSH_OK && !ctx->trace)
        return tsh_fail(ctx, TSH_ERR_STATE, "tsh_trace_end: no trace runs");
    if (!tsh_ok(ctx)) {
        tshi_trace_drop(ctx);
        return ctx->error.code;
    }
    out.ctx = ctx;
    out.desc = ctx->trace->desc;
    ctx->world.trace = NULL; /* the collectives below are not traced */
    if (ctx->world.rank == 0 && out.desc.path) {
        out.file = fopen(out.desc.path, "wb");
        out.refused = !out.file; /* reported at the end */
        out.why = errno;
    }
    tshi_trace_file_row(&out);
    tshi_trace_file_flush(&out); /* the rest of the row */
    if (ctx->world.rank > 0)
        tshi_trace_file_flush(&out); /* the empty message that ends this rank's text */
    else
        tshi_trace_file_gather(&out);
    if (out.file && fclose(out.file) != 0 && !out.refused) {
        out.refused = 1;
        out.why = errno;
    }
    tshi_trace_drop(ctx);
    if (out.refused)
        return tsh_fail(ctx, TSH_ERR_IO, "tsh_trace_end: %s cannot be written%s%s",
                        out.desc.path ? out.desc.path : "the text", out.desc.path ? ": " : "",
                        out.desc.path ? strerror(out.why) : "");
    return ctx->error.code;
}

/* ========================================================================== */
/* >>end                                                  MARK: - end (private) */
/* Undefines the macros of the implementation.                                  */
/* Needs: nothing.                                                              */
/* ========================================================================== */

#undef tshi_error_null /* >>error */
#undef tshi_error_zero
#undef TSHI_ZERO /* >>base */
#undef TSHI_R
#undef TSHI_DOUBLE
#undef TSHI_RESTRICT
#undef TSHI_INLINE
#undef TSHI_EACH
#undef TSHI_APART
#undef TSHI_OUTLINE
#undef TSHI_COLD
#undef TSHI_ALONE
#undef TSHI_PREFETCH
#undef TSHI_PREFETCH_L2
#undef TSHI_VECTORS
#undef TSHI_POSIX
#undef TSHI_CLOCK
#undef TSHI_X86
#undef TSHI_AVX2
#undef TSHI_AVX512
#undef TSHI_KERNEL /* >>kernel */
#undef TSHI_KERNEL_FUSED
#undef TSHI_KERNEL_ISA
#undef TSHI_KERNEL_TABLE
#undef TSHI_FUSED
#undef TSHI_LANES
#undef TSHI_GEMM_JOIN_ /* >>gemm */
#undef TSHI_GEMM_JOIN
#undef TSHI_GEMM_IS_float
#undef TSHI_GEMM_IS_double
#undef TSHI_GEMM_FLOAT
#undef TSHI_GEMM_ROWS6
#undef TSHI_GEMM_ROWS12
#undef TSHI_GEMM_ZERO
#undef TSHI_GEMM_STEP
#undef TSHI_GEMM_PUT
#undef TSHI_GEMM_KEEP
#undef TSHI_GEMM_OUT
#undef TSHI_GEMM_KERNEL
#undef TSHI_GEMM_PART
#undef TSHI_GEMM_VEC_v128
#undef TSHI_GEMM_LOAD_v128
#undef TSHI_GEMM_STORE_v128
#undef TSHI_GEMM_LANES
#undef TSHI_GEMM_SET_v128
#undef TSHI_GEMM_FMA_v128
#undef TSHI_GEMM_REG
#undef TSHI_GEMM_OP
#undef TSHI_GEMM_VEC_avx2
#undef TSHI_GEMM_LOAD_avx2
#undef TSHI_GEMM_STORE_avx2
#undef TSHI_GEMM_SET_avx2
#undef TSHI_GEMM_FMA_avx2
#undef TSHI_GEMM_VEC_avx512
#undef TSHI_GEMM_LOAD_avx512
#undef TSHI_GEMM_STORE_avx512
#undef TSHI_GEMM_SET_avx512
#undef TSHI_GEMM_FMA_avx512
#undef TSHI_GEMM_PAIR
#undef TSHI_GEMM_GROUP
#undef TSHI_GEMM_DOT
#undef TSHI_BINARY_GRAD
#endif                  /* TSHARD_IMPLEMENTED */
#endif                  /* TSHARD_IMPLEMENTATION */
