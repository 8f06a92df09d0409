/* ========================================================================== */
/* >>context-api                                          MARK: - context-api */
/* One rank's world: errors, memory, opening and closing a ctx.               */
/* Needs: >>comm-api.                                                         */
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
/* Records an error of the caller's own, printf-style, control characters as '?'; format NULL: the
 * code's text. Returns code. */
TSH_API tsh_result tsh_fail(tsh_ctx *ctx, tsh_result code, const char *format, ...)
    TSH_PRINTF(3, 4);
/* A function for tsh_logger.fn: prints "tshard: ", the message and a newline to stderr. `user` is
 * not read. Threads may call it at the same time; their lines do not mix. */
TSH_API void tsh_log_stderr(void *user, const char *message);
/* Gives logger->fn a message, as tsh_fail keeps one, of at most TSH_MESSAGE_SIZE bytes. Does
 * nothing where logger, its fn or format is NULL. For backends and runners. */
TSH_API void tsh_log_message(const tsh_logger *logger, const char *format, ...) TSH_PRINTF(2, 3);

/* Fills *error (NULL: does not), whose sentence is made as by tsh_text_format. Returns code. */
TSH_API tsh_result tsh_error_set(tsh_error *error, tsh_result code, int rank, const char *format,
                                 ...) TSH_PRINTF(4, 5);
/* As vsnprintf, but numbers have a decimal point in every locale. What a program writes for others
 * to read (files, messages) it writes with this or with tsh_text_add. Does nothing where text or
 * format is NULL. */
TSH_API void tsh_text_format(char *text, size_t capacity, const char *format, va_list list)
    TSH_PRINTF(3, 0);
/* Appends to text, which has `capacity` bytes, as tsh_text_format; cuts what does not fit. */
TSH_API void tsh_text_add(char *text, size_t capacity, const char *format, ...) TSH_PRINTF(3, 4);

/* Nanoseconds of a clock that is never set back; -1: the system has none. */
TSH_API int64_t tsh_now(void);

/* -- memory ----------------------------------------------------------------- */

typedef enum tsh_mem_kind {
    TSH_MEM_PARAMETERS,
    TSH_MEM_GRADIENTS, /* of leaves of TSH_REAL; others: step memory, from backward to zero_grad */
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
    int no_overlap;      /* 1: buckets are sent only after backward. No bit depends on it */
    tsh_dtype dtype;     /* of new parameters; 0: TSH_REAL. A layer's .dtype overrides it */
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
