/* ========================================================================== */
/* >>context                                        MARK: - context (private) */
/* A ctx: opened from a tsh_desc, with its groups; closed with all it owns.   */
/* Needs: >>isa >>tape-leaf.                                                  */
/* ========================================================================== */

/* A rank of the world has three coordinates, one along each of the axes tp, pp and dp. Ranks are
 * numbered along the axes in desc->order, the first axis fastest: with "tp-pp-dp", rank = tp + TP
 * (pp + PP dp), where TP and PP are the sizes of the axes. Ranks that agree in the other two
 * coordinates form a group (comm) of an axis; tsh_open splits the world into these groups. What a
 * new field of tsh_ctx owns, tsh_close must release. */

/* Fails because tp times pp does not divide the number of ranks. The error lists the values of tp
 * (or of pp) that would, given the other one. Returns 0. */
static int tshi_context_refuse(tsh_ctx *ctx, int tp, int pp) {
    const int world = ctx->world.size, tp_fits = tp > 0 && world % tp == 0;
    const int pp_fits = pp > 0 && world % pp == 0;
    /* the error lists the divisors of this number */
    const int whole = pp_fits ? world / pp : tp_fits ? world / tp : world;
    char list[TSH_MESSAGE_SIZE / 2] = "1";
    for (int d = 2; d <= whole; d++)
        if (whole % d == 0) tsh_text_add(list, sizeof list, "%s%d", d < whole ? ", " : " or ", d);
    return tshi_error_zero(ctx, TSH_ERR_ARGUMENT,
                           "tsh_open: %d ranks do not divide into tp %d times pp %d; %s may be %s",
                           world, tp, pp, pp_fits ? "tp" : "pp", list);
}

/* Fills, for the i-th axis of desc->order, its size (number of ranks) size[i] and its name
 * axis[i]: 't', 'p' or 'd'. Returns 0 and an error if tp times pp does not divide the world, or the
 * order is not valid. */
static int tshi_context_axes(tsh_ctx *ctx, const tsh_desc *desc, int size[3], char axis[3]) {
    const char *at = desc->order ? desc->order : "tp-pp-dp";
    int world = ctx->world.size, pp = desc->pp ? desc->pp : 1, tp = desc->tp, i, j;
    if (pp < 1 || tp < 0 || (!tp && world % pp) || (tp && world % ((int64_t)tp * pp)))
        return tshi_context_refuse(ctx, tp, pp);
    if (!tp) tp = world / pp;          /* desc->tp 0: as large as possible */
    /* at points to the name of axis i, followed by '-' or the end */
    for (i = 0; i < 3; i++, at += 3) {
        int fits = *at && strchr("tpd", *at) && at[1] == 'p' && at[2] == (i < 2 ? '-' : '\0');
        for (j = 0; fits && j < i; j++) fits = axis[j] != *at; /* an axis must not be named twice */
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

/* Splits the world into the groups of each axis, by color and key as MPI_Comm_split does. The color
 * of a group is its first rank in the world, whose coordinate along the axis is 0; the key is the
 * rank's coordinate. */
static void tshi_context_groups(tsh_ctx *ctx, const tsh_desc *desc) {
    /* step: by how much the ranks of neighbours along axis i differ */
    int size[3], i, step = 1, rank = ctx->world.rank;
    char axis[3];
    if (!tshi_context_axes(ctx, desc, size, axis)) return;
    for (i = 0; i < 3; step *= size[i++]) {
        tsh_comm *comm = axis[i] == 't' ? &ctx->tp : axis[i] == 'p' ? &ctx->pp : &ctx->dp;
        int own = rank / step % size[i]; /* this rank's coordinate along axis i */
        if (size[i] == 1) continue;      /* the group keeps its default: one rank */
        const uint64_t name = (uint64_t)axis[i] << TSHI_COLL_AXIS;
        if (tshi_error_comm(ctx, tshi_comm_split(&ctx->world, name, rank - own * step, own, comm),
                            "tsh_open: split") != TSH_OK)
            return;
    }
}

/* Sets ctx->deal from desc->shares, which say how unequally the ranks of tp share dimensions:
 * before[r] is the sum of the shares of the ranks below r. Without shares, or if all are equal,
 * before stays NULL, and torch.chunk's rule holds. */
static void tshi_context_deal(tsh_ctx *ctx, const tsh_desc *desc) {
    enum { MOST = 1000000 };
    const int ranks = ctx->deal.ranks = ctx->tp.size;
    int64_t *before;
    int equal = 1;
    for (int r = 0; desc->shares && r < ranks; r++) {
        if (desc->shares[r] < 1 || desc->shares[r] > MOST) {
            (void)tsh_fail(ctx, TSH_ERR_ARGUMENT,
                           "tsh_open: the share of rank %d of tp is %d, not from 1 to %d", r,
                           desc->shares[r], (int)MOST);
            return;
        }
        equal = equal && desc->shares[r] == desc->shares[0];
    }
    if (!desc->shares || equal) return;
    before = (int64_t *)tshi_mem_arena_alloc(ctx, &ctx->books,
                                             ((size_t)ranks + 1) * sizeof *before);
    if (!before) return;
    before[0] = 0;
    for (int r = 0; r < ranks; r++) before[r + 1] = before[r] + desc->shares[r];
    ctx->deal.before = before;
}

/* Allocates a ctx and copies the options of desc, or their defaults. Its groups have one rank until
 * tshi_context_groups. Returns NULL if there is no memory. */
static tsh_ctx *tshi_context_make(const tsh_desc *desc) {
    tsh_allocator allocator = desc->allocator;
    if (!allocator.allocate) allocator.allocate = tshi_mem_libc;
    tsh_ctx *ctx = (tsh_ctx *)allocator.allocate(NULL, 0, sizeof *ctx, TSHI_ALIGN, allocator.user);
    if (!ctx) return NULL;
    memset(ctx, 0, sizeof *ctx);
    ctx->allocator = allocator;
    tshi_mem_count(&ctx->mem, TSH_MEM_BOOKS, sizeof *ctx, 0); /* tsh_mem counts the ctx, too */
    /* calls of the allocator so far: one, for the ctx */
    ctx->mem.calls = 1;
    ctx->logger = desc->logger;
    ctx->gemm = desc->gemm;
    ctx->dtype = desc->dtype != TSH_DTYPE_DEFAULT ? desc->dtype : TSH_REAL;
    ctx->wire = desc->wire;
    ctx->threads = desc->threads > 0 ? desc->threads : 1;
    ctx->seed = desc->seed;
    const size_t bytes = desc->bucket_bytes ? desc->bucket_bytes : (size_t)TSHI_BUCKET_BYTES;
    /* a bucket of gradients is full once it has this many elements */
    ctx->buckets.limit = (int64_t)((bytes - 1) / tshi_dtype_reals(1) + 1);
    ctx->buckets.hold = desc->no_overlap; /* no bucket is sent before backward ends */
    ctx->world = desc->comm;
    if (!ctx->world.ops) ctx->world.size = 1; /* desc.comm is empty: one rank */
    ctx->tp.size = ctx->pp.size = ctx->dp.size = ctx->deal.ranks = 1;
    tshi_tensor_ring(&ctx->handles.owned); /* makes an empty list */
    tshi_tensor_ring(&ctx->handles.step);
    return ctx;
}

/* Reports to the logger and to the other ranks that there is no memory for a ctx. (Other errors are
 * kept in the ctx.) */
static TSHI_COLD tsh_result tshi_context_no_memory(const tsh_desc *desc) {
    tsh_comm world = desc->comm;
    tsh_error error = {TSH_ERR_MEMORY, world.ops ? world.rank : -1, ""}; /* rank -1: no world */
    if (world.size > 1)
        tsh_text_add(error.message, sizeof error.message, "rank %d: ", world.rank);
    tsh_text_add(error.message, sizeof error.message, "tsh_open: no memory for a ctx (%d bytes)",
                 (int)sizeof(tsh_ctx));
    tsh_log_message(&desc->logger, "%s (%s)", error.message, tsh_result_name(error.code));
    if (world.ops) world.ops->abort(&world, &error); /* the world fails on all ranks */
    return TSH_ERR_MEMORY;
}

/* Returns the name of a compiler option, such as -fassociative-math, that makes floating-point
 * arithmetic in this file inexact; NULL: none was found. Finds it by computing, since clang defines
 * no macro for these options. (The operands are volatile so that the results are those of the
 * program, not of the compiler; 1e30 swallows 1 in every format.) */
static TSHI_COLD const char *tshi_context_inexact(void) {
    const volatile float big = 1e30f, one = 1, three = 3, five = 5, zero = 0, endless = INFINITY;
    const float a = big, b = one, c = five, d = -zero, e = endless;
    const volatile float sum = (a + b) - a, third = c / 3, exact = c / three, positive = d + 0.0f;
    const float nothing = e - e; /* infinity - infinity: NaN */
    if (nothing == nothing) return "-ffinite-math-only";
    if (sum != 0) return "-fassociative-math";
    if (third != exact) return "-freciprocal-math";
    if (1 / positive < 0) return "-fno-signed-zeros";
    return NULL;
}

/* Returns 1 if the library was compiled with the same version and the same sizes of tsh_real and
 * tsh_desc as the program, which calls op (see TSH_BUILT); else returns 0 and fills in *error. */
static TSHI_COLD int tshi_context_same_build(const char *op, int version, size_t real, size_t size,
                                             const tsh_desc *desc, tsh_error *error) {
    const int mine = TSHARD_VERSION_MAJOR * 1000 + TSHARD_VERSION_MINOR;
    if (version == mine && real == sizeof(tsh_real) &&
        (size == sizeof(tsh_desc) || (!size && !desc)))
        return 1;
    if (version != mine)
        (void)tsh_error_set(error, TSH_ERR_UNSUPPORTED, -1,
                            "%s: the program was compiled with tshard.h %d.%d, the library is "
                            "%d.%d; compile the program with the library's header",
                            op, version / 1000, version % 1000, mine / 1000, mine % 1000);
    else
        (void)tsh_error_set(error, TSH_ERR_UNSUPPORTED, -1,
                            "%s: the program was compiled with a tsh_real of %d bytes and a "
                            "tsh_desc of %d, the library with %d and %d; give both the same "
                            "TSHARD_REAL",
                            op, (int)real, (int)size, (int)sizeof(tsh_real),
                            (int)sizeof(tsh_desc));
    return 0;
}

/* Logs why a program was refused. Loggers of version 0.1 took `user` first. */
static TSHI_COLD void tshi_context_log_refusal(const tsh_desc *desc, int version,
                                               const tsh_error *why) {
    char text[TSH_MESSAGE_SIZE + 64];
    if (!desc || !desc->logger.log) return;
    (void)snprintf(text, sizeof text, "%s (%s)", why->message, tsh_result_name(why->code));
    if (version == 1)
        ((void (*)(void *, const char *))desc->logger.log)(desc->logger.user, text);
    else
        desc->logger.log(text, desc->logger.user);
}

/* Returns 1 if activations can be sent in this dtype. */
static int tshi_context_sends(tsh_dtype wire) {
    return tshi_dtype_exists(wire) && (wire == TSH_BF16 || tshi_dtype_in_blocks(wire));
}

TSH_API TSHI_COLD tsh_result tsh_open_built(int version, size_t real, size_t size,
                                            const tsh_desc *desc, tsh_ctx **out) {
    tsh_desc usual = TSHI_ZERO;
    tsh_error refusal;
    const int same = tshi_context_same_build("tsh_open", version, real, size, desc, &refusal);
    if (!same) tshi_context_log_refusal(desc, version, &refusal);
    if (desc && !same) usual.comm = desc->comm; /* tsh_desc begins with comm in every version */
    if (!desc || !same) desc = &usual;
    if (!out) {
        tsh_log_message(&desc->logger, "tsh_open: out is NULL (TSH_ERR_ARGUMENT)");
        return TSH_ERR_ARGUMENT;
    }
    tsh_ctx *ctx = *out = tshi_context_make(desc); /* the caller closes it, also after an error */
    if (!ctx) return tshi_context_no_memory(desc);
    tshi_isa_open(ctx);
    if (same) {
        tshi_context_groups(ctx, desc);
        tshi_context_deal(ctx, desc);
    } else {
        (void)tsh_fail(ctx, refusal.code, "%s", refusal.message);
    }
    if (tshi_context_inexact())
        (void)tsh_fail(ctx, TSH_ERR_UNSUPPORTED,
                       "tsh_open: tshard.h was compiled with %s, or with a flag that contains it; "
                       "compile the file with TSHARD_IMPLEMENTATION with -fno-fast-math at the end "
                       "of the flags",
                       tshi_context_inexact());
    if (!tshi_dtype_exists(ctx->dtype) || !tshi_dtype_computes(ctx->dtype))
        (void)tsh_fail(ctx, TSH_ERR_DTYPE, "tsh_open: parameters are %s, bf16 or f16, not dtype %d",
                       tshi_dtype_name(TSH_REAL), (int)ctx->dtype);
    if (ctx->wire && !tshi_context_sends(ctx->wire))
        (void)tsh_fail(ctx, TSH_ERR_DTYPE,
                       "tsh_open: .wire is bf16 or a dtype of quantised weights, not dtype %d",
                       (int)ctx->wire);
    tshi_profile_open(ctx);
    tshi_error_report(ctx); /* other ranks learn of an error in tsh_open */
    return ctx->error.code;
}

TSH_API TSHI_COLD tsh_result(tsh_open)(const tsh_desc *desc, tsh_ctx **out) {
    return tsh_open_built(1, 0, 0, desc, out); /* 1: the program was compiled with tshard.h 0.1 */
}

TSH_API TSHI_COLD void tsh_close(tsh_ctx *ctx) {
    if (!ctx) return;
    if (ctx->trace && ctx->trace->profile) tshi_profile_end(ctx);
    tshi_error_report(ctx);  /* before the comms, by which it reports, are closed */
    (void)tsh_step_end(ctx); /* releases the tape and step tensors */
    for (const tshi_outer_request *r = ctx->outer_requests; r; r = r->next)
        (void)tsh_wait(&ctx->dp, r->req);
    while (ctx->handles.owned.next != &ctx->handles.owned)
        tshi_tensor_release(ctx->handles.owned.next);
    tshi_trace_drop(ctx); /* releases a trace that tsh_trace_end has not */
    tshi_mem_release(ctx, ctx->gemm_scratch);
    tshi_mem_close(ctx, TSH_MEM_STEP, ctx->pool.pages); /* frees all pages of the step pool */
    for (tshi_micro *micro = ctx->micros; micro; micro = micro->next)
        tshi_mem_close(ctx, TSH_MEM_BOOKS, micro->arena.first);
    tshi_mem_close(ctx, TSH_MEM_BOOKS, ctx->tape.arena.first);
    tshi_mem_close(ctx, TSH_MEM_BOOKS, ctx->buckets.arena.first);
    tshi_mem_close(ctx, TSH_MEM_BOOKS, ctx->books.first); /* memory of modules, optimisers, ... */
    tsh_comm_close(&ctx->dp);
    tsh_comm_close(&ctx->pp);
    tsh_comm_close(&ctx->tp);
    tsh_comm_close(&ctx->world);                    /* closed after the groups split from it */
    const tsh_allocator allocator = ctx->allocator; /* a copy: the ctx is released with it */
    (void)allocator.allocate(ctx, sizeof *ctx, 0, TSHI_ALIGN, allocator.user);
}

/* Defines tsh_world, tsh_tp, tsh_pp or tsh_dp: returns a group of ctx; of a NULL ctx, a constant
 * empty group that callers must not write to. */
#define TSHI_CONTEXT_GROUP(group)                                                                  \
    TSH_API tsh_comm *tsh_##group(tsh_ctx *ctx) {                                                  \
        return ctx ? &ctx->group : (tsh_comm *)tshi_kernel_unconst(&tshi_comm_none);               \
    }
TSHI_CONTEXT_GROUP(world)
TSHI_CONTEXT_GROUP(tp)
TSHI_CONTEXT_GROUP(pp)
TSHI_CONTEXT_GROUP(dp)
#undef TSHI_CONTEXT_GROUP

TSH_API int tsh_run_built(int version, size_t real, size_t size, const tsh_desc *desc,
                          int (*fn)(tsh_ctx *ctx, void *user), void *user) {
    tsh_ctx *ctx = NULL;
    int result = 1; /* returned if fn is not called */
    if (!fn && tshi_context_same_build("tsh_run", version, real, size, desc, NULL))
        tsh_log_message(desc ? &desc->logger : NULL, "tsh_run: fn is NULL");
    else if (tsh_open_built(version, real, size, desc, &ctx) == TSH_OK)
        result = fn(ctx, user);
    tsh_close(ctx); /* does nothing if ctx is NULL */
    return result;
}

TSH_API int(tsh_run)(const tsh_desc *desc, int (*fn)(tsh_ctx *ctx, void *user), void *user) {
    return tsh_run_built(1, 0, 0, desc, fn, user);
}

TSH_API int tsh_run_on_built(int version, size_t real, size_t size, tsh_comm *comm,
                             const tsh_desc *desc, int (*fn)(tsh_ctx *ctx, void *user), void *user,
                             tsh_error *error) {
    tsh_desc mine = TSHI_ZERO; /* a copy of *desc, with .comm = *comm */
    tsh_ctx *ctx = NULL;
    int result = 1;
    const int same = tshi_context_same_build("tsh_run_on", version, real, size, desc, NULL);
    if (desc && same) mine = *desc;
    if (desc) mine.logger = desc->logger; /* every version of tsh_desc has logger at this place */
    if (same && (!comm || !fn)) {
        const char *missing = comm ? "fn" : "comm";
        tsh_log_message(&mine.logger, "tsh_run_on: %s is NULL", missing);
        if (error) (void)tsh_error_set(error, TSH_ERR_ARGUMENT, -1, "%s is NULL", missing);
        tsh_comm_close(comm);
        return result;
    }
    if (comm) mine.comm = *comm;
    if (tsh_open_built(version, real, size, &mine, &ctx) == TSH_OK)
        result = fn(ctx, user);
    else if (error && ctx) /* tsh_open failed */
        *error = *tsh_last_error(ctx);
    else if (error) /* tsh_open made no ctx */
        (void)tsh_error_set(error, TSH_ERR_MEMORY, mine.comm.rank, "no memory for a ctx");
    if (!ctx) tsh_comm_close(comm); /* no ctx owns the comm */
    tsh_close(ctx);
    return result;
}

TSH_API int(tsh_run_on)(tsh_comm *comm, const tsh_desc *desc, int (*fn)(tsh_ctx *ctx, void *user),
                        void *user, tsh_error *error) {
    return tsh_run_on_built(1, 0, 0, comm, desc, fn, user, error);
}
