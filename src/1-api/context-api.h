/* ========================================================================== */
/* >>context-api                                          MARK: - context-api */
/* The ctx, a rank's library state: errors, memory, opening and closing it.   */
/* Needs: >>comm-api.                                                         */
/* ========================================================================== */

/* -- errors, messages, version, clock --------------------------------------- */

/* Returns "0.2.0", the TSHARD_VERSION with which the implementation was compiled. In a shared
 * library it may differ from this header's.
 * torch: torch.__version__ */
TSH_API const char *tsh_version(void);
/* Returns one line that says with which instruction set ctx computes, on which processor, and why a
 * newer set that the processor has is not used: "avx512_vnni: GenuineIntel family 6 model 143; bf16
 * is multiplied by FMA, since VDPBF16PS has half its rate here". Never NULL; valid until ctx is
 * closed. The environment variable TSHARD_ISA, read by tsh_open, forces one of the instruction sets
 * that the processor has.
 * torch: torch.backends.cpu.get_cpu_capability */
TSH_API const char *tsh_cpu_text(const tsh_ctx *ctx);
/* Returns the name of a code: "TSH_ERR_SHAPE". */
TSH_API const char *tsh_result_name(tsh_result code);
/* Returns the sentence of a code: "shapes do not fit". */
TSH_API const char *tsh_result_text(tsh_result code);
/* Returns 1 if ctx has no error, else 0. Reports a local error to all ranks, and receives one that
 * another rank has reported. */
TSH_API int tsh_ok(tsh_ctx *ctx);
/* Returns the first error since the last tsh_clear_error: code, world rank at fault, sentence.
 * Never NULL. */
TSH_API const tsh_error *tsh_last_error(const tsh_ctx *ctx);
/* Clears a local error that has not been reported to the other ranks yet. The world's error
 * stays. */
TSH_API void tsh_clear_error(tsh_ctx *ctx);
/* Records an error of the program in ctx, unless ctx has one already. The sentence is formatted as
 * by printf, with control characters as '?'; format NULL: the sentence of the code. Returns
 * code. */
TSH_API tsh_result tsh_fail(tsh_ctx *ctx, tsh_result code, const char *format, ...)
    TSH_PRINTF(3, 4);
/* A place in a program, as __FILE__ and __LINE__ give it. */
typedef struct tsh_place {
    const char *file; /* NULL: no place */
    int line;
} tsh_place;
/* From now on, sentences of new errors of ctx end with " (file:line)". Returns the place that was
 * set before. file: a string that stays valid, such as __FILE__; NULL: no place. With TSHARD_WHERE
 * defined, backends/tshard_where.h makes every call of the library set its own place. */
TSH_API tsh_place tsh_set_place(tsh_ctx *ctx, const char *file, int line);
/* Prints "tshard: ", the message and a newline to stderr: a function for tsh_logger.log. `user` is
 * not read. Threads may call it at the same time; their lines do not mix. */
TSH_API void tsh_log_stderr(const char *message, void *user);
/* Formats a message, of at most TSH_MESSAGE_SIZE bytes with its final 0, and passes it to
 * logger->log, with control characters as '?'. Does nothing if logger, logger->log or format is
 * NULL. For backends and runners. */
TSH_API void tsh_log_message(const tsh_logger *logger, const char *format, ...) TSH_PRINTF(2, 3);

/* Fills *error (may be NULL) with code, rank and a sentence formatted as by tsh_text_format.
 * Returns code. */
TSH_API tsh_result tsh_error_set(tsh_error *error, tsh_result code, int rank, const char *format,
                                 ...) TSH_PRINTF(4, 5);
/* Formats as vsnprintf does, but numbers have a decimal point in every locale. For text that other
 * programs read (files, messages). Does nothing if text or format is NULL. */
TSH_API void tsh_text_format(char *text, size_t capacity, const char *format, va_list list)
    TSH_PRINTF(3, 0);
/* Appends a text formatted as by tsh_text_format to text, which has `capacity` bytes; cuts off what
 * does not fit. */
TSH_API void tsh_text_add(char *text, size_t capacity, const char *format, ...) TSH_PRINTF(3, 4);

/* Returns the time in nanoseconds on a monotonic clock, or -1 if the system has none. */
TSH_API int64_t tsh_now(void);

/* -- memory statistics ------------------------------------------------------ */

typedef enum tsh_mem_kind {
    TSH_MEM_PARAMETERS,
    TSH_MEM_GRADIENTS, /* gradients of leaves of dtype TSH_REAL; those of other leaves are step
                        * memory, from backward to tsh_zero_grad */
    TSH_MEM_OPTIMISER,
    TSH_MEM_TENSORS, /* other owned tensors, such as those of tsh_tensor_new and tsh_keep */
    TSH_MEM_STEP,    /* the step pool: what ops return, their gradients, scratch */
    TSH_MEM_BOOKS,   /* the library's own data: tensor handles, the tape, modules */
    TSH_MEM_KINDS
} tsh_mem_kind;

/* Memory of a ctx on this rank, in bytes. */
typedef struct tsh_mem {
    /* now: held now, by tsh_mem_kind; peak: the largest value of `now` so far. */
    size_t now[TSH_MEM_KINDS], peak[TSH_MEM_KINDS];
    /* total: sum of `now`; step_live: the part of the step pool that is in use. */
    size_t total, total_peak, step_live, step_live_peak;
    /* How often the allocator was called so far. */
    uint64_t calls;
} tsh_mem;
/* Returns the memory statistics of a ctx.
 * torch: torch.cuda.memory_stats */
TSH_API tsh_mem tsh_mem_stats(const tsh_ctx *ctx);
/* Turns dry runs of a ctx on or off (off at first). In a dry run, ops, backward, optimisers and
 * initial values do all but compute: floating values that they would write are undefined. Shapes,
 * layouts, errors, collectives and memory statistics are those of a real run, in a small part of
 * the time; and as tensors are not written, an operating system that provides memory when it is
 * first written, as Linux does, provides next to none. So a program finds out how much memory a
 * model takes, also one that is too large for the machine: turn it on before the first layer is
 * added, run two steps, read tsh_mem_stats. Integer results are computed, except those that depend
 * on floating values, such as those of tsh_argmax. */
TSH_API void tsh_dry_run(tsh_ctx *ctx, int on);

/* -- opening and closing a ctx, its groups of ranks ------------------------- */

/* How to open a ctx; all 0: one rank and all defaults. The fields up to .logger keep their places
 * in later versions. */
typedef struct tsh_desc {
    tsh_comm comm;     /* the group of all ranks, which the ctx owns and closes; all zero: one
                        * rank */
    int tp, pp;        /* degrees of tensor and pipeline parallelism. tp 0: the number of ranks /
                        * pp; pp 0 means 1. The degree of data parallelism, dp, is the number of
                        * ranks / (tp pp) */
    const char *order; /* the axes in the order in which ranks are numbered along them, the fastest
                        * first; NULL: "tp-pp-dp". Megatron's is "tp-dp-pp" */
    uint64_t seed;
    int threads; /* threads of this rank if compiled with OpenMP (-fopenmp); 0 means 1. Results are
                  * bitwise the same for any number of threads */
    tsh_gemm gemm;
    tsh_allocator allocator;
    tsh_logger logger;   /* warnings, and the first error of the ctx: see ERRORS in the manual */
    size_t bucket_bytes; /* max size of a bucket: gradients that are all-reduced over dp in one
                          * message; 0: 1 MiB. A gradient of at least that size is sent alone,
                          * without a copy. Results are bitwise the same for any size */
    int no_overlap;      /* 1: buckets are sent only after backward; the results are bitwise the
                          * same */
    tsh_dtype dtype;     /* dtype of new parameters; 0: TSH_REAL. A layer's .dtype overrides it */
    const int *shares;   /* unequal machines: for each rank of tp, from 1 to 1000000, the same array
                          * on every rank: units of sharded dimensions (see tsh_segment) are dealt
                          * in proportion. The array is copied. Files do not depend on it. NULL, or
                          * all the same: torch.chunk's rule */
    tsh_dtype wire;      /* slow links between the ranks of tp or pp: the dtype, TSH_BF16 or that of
                          * quantised weights, such as TSH_Q8_0, in which activations and their
                          * gradients are sent if it has fewer bytes; the same on every rank.
                          * Applies to tensors of 16384 elements or more in linear layers,
                          * convolutions, changes of layout and pipelines, which then do not compute
                          * meanwhile. Sums are of tsh_real, in the order of rule 5 of >>comm-api;
                          * each rank decodes the same bytes, so that what is replicated stays the
                          * same. Owned tensors, as parameters are, are sent as they are. 0: all
                          * tensors are */
} tsh_desc;

/* Expands to three arguments that say how a program was compiled: the version of tshard.h (1000
 * times the major version, plus the minor one), bytes of a tsh_real, bytes of a tsh_desc. tsh_open
 * and the runners are macros that pass them first to tsh_open_built and so on, which fail with
 * TSH_ERR_UNSUPPORTED and a sentence if the library was compiled otherwise. The functions tsh_open,
 * tsh_run and so on always fail: only programs compiled with version 0.1, which passed nothing,
 * reach them. Other languages call tsh_open_built; if desc is NULL, size may be 0. */
#define TSH_BUILT                                                                                  \
    TSHARD_VERSION_MAJOR * 1000 + TSHARD_VERSION_MINOR, sizeof(tsh_real), sizeof(tsh_desc)

/* Opens a ctx. Collective if desc->comm has several ranks (one split per axis). After a failure
 * *out is still a ctx if memory sufficed, so that tsh_last_error has the reason; close it, too.
 * torch: dist.init_process_group, dist.init_device_mesh */
TSH_API tsh_result tsh_open(const tsh_desc *desc, tsh_ctx **out);
TSH_API tsh_result tsh_open_built(int version, size_t real, size_t size, const tsh_desc *desc,
                                  tsh_ctx **out);
#define tsh_open(...) tsh_open_built(TSH_BUILT, __VA_ARGS__)
/* Closes a ctx and frees everything that belongs to it; does nothing if ctx is NULL. */
TSH_API void tsh_close(tsh_ctx *ctx);
/* Returns the group of all ranks. This function and the next three never return NULL. The group of
 * an axis that is not used has size 1. If ctx is NULL they return a group of size 1 whose
 * collectives fail with TSH_ERR_ARGUMENT.
 * torch: dist.group.WORLD, dist.get_rank, dist.get_world_size */
TSH_API tsh_comm *tsh_world(tsh_ctx *ctx);
/* Returns this rank's tensor-parallel group.
 * torch: dist.DeviceMesh.get_group */
TSH_API tsh_comm *tsh_tp(tsh_ctx *ctx);
/* Returns this rank's pipeline group: one rank of each stage. */
TSH_API tsh_comm *tsh_pp(tsh_ctx *ctx);
/* Returns this rank's data-parallel group: the ranks that hold the same shards in all replicas. */
TSH_API tsh_comm *tsh_dp(tsh_ctx *ctx);
/* Opens a ctx, calls fn(ctx, user), closes the ctx. Returns fn's result; 1 if fn is NULL or the ctx
 * could not be opened, and desc->logger gets the reason. */
TSH_API int tsh_run(const tsh_desc *desc, int (*fn)(tsh_ctx *ctx, void *user), void *user);
TSH_API int tsh_run_built(int version, size_t real, size_t size, const tsh_desc *desc,
                          int (*fn)(tsh_ctx *ctx, void *user), void *user);
#define tsh_run(...) tsh_run_built(TSH_BUILT, __VA_ARGS__)
/* Opens a ctx on *comm by desc (NULL: all defaults), calls fn(ctx, user), and closes the ctx and
 * the comm; for runners of backends. Returns fn's result; 1 if the ctx could not be opened, and
 * then desc->logger and *error (may be NULL) get the reason. */
TSH_API int tsh_run_on(tsh_comm *comm, const tsh_desc *desc, int (*fn)(tsh_ctx *ctx, void *user),
                       void *user, tsh_error *error);
TSH_API int tsh_run_on_built(int version, size_t real, size_t size, tsh_comm *comm,
                             const tsh_desc *desc, int (*fn)(tsh_ctx *ctx, void *user), void *user,
                             tsh_error *error);
#define tsh_run_on(...) tsh_run_on_built(TSH_BUILT, __VA_ARGS__)
