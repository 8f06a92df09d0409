/* ========================================================================== */
/* >>module-same                                MARK: - module-same (private) */
/* Compares the models of all ranks before the first collective after a       */
/* change.                                                                    */
/* Needs: >>module.                                                           */
/* ========================================================================== */

/* Each rank describes its model as lines of text and hashes them. If the hashes of the ranks
 * differ, the ranks all-gather line after line until they reach one that differs
 * (tshi_module_find_diff). */

/* One line of the description of a model. Line 0 is the seed, tsh_desc.wire and .shares, each
 * further line one module, in pre-order. */
typedef struct tshi_line {
    char text[TSH_PATH_SIZE + 3 * TSHI_TEXT_SIZE]; /* e.g. "h.0" linear: weight f32 (64, 32) S(0) */
    /* tsh_module.number (eps of a norm, p of a dropout), of which text has 9 digits only; of line
     * 0: a hash of the shares */
    double number;
    int64_t hash; /* hash of text and number: equal lines have equal hashes */
    int64_t rank; /* the rank of the world that wrote the line; not part of the hash */
} tshi_line;

/* Writes m's path, kind and number, its active adapter, the name, dtype, shape and layout of its
 * parameters, and which of these are frozen. */
static void tshi_module_describe(const tsh_module *m, tshi_line *line) {
    const size_t size = sizeof line->text;
    char text[TSHI_TEXT_SIZE];
    tsh_text_add(line->text, size, m->path[0] ? "\"%s\" %s" : "the root%s %s", m->path,
                 m->kind->name);
    line->number = m->number;
    if (m->number > 0) tsh_text_add(line->text, size, " (%.9g)", m->number);
    if (m->adapter) tsh_text_add(line->text, size, " with the adapter \"%s\"", m->adapter->name);
    for (int i = 0; i < TSHI_MODULE_PARAMS; i++) {
        const tsh_tensor *param = m->param[i];
        if (!param) continue;
        tsh_text_add(line->text, size, "%s %s%s%s %s", i ? "," : ":", m->param_name[i],
                     *m->param_name[i] ? " " : "", tshi_dtype_name(param->dtype),
                     tshi_tensor_text(param, text));
        /* whether a parameter is frozen is compared, too: else some ranks would wait for gradients
         * that others do not send */
        if (!param->requires_grad && !(param->flags & TSHI_BUFFER))
            tsh_text_add(line->text, size, " frozen");
        /* appends the lengths of the segments, if there are several */
        for (int k = 0; k < param->layout.segments && param->layout.segments > 1; k++)
            tsh_text_add(line->text, size, "%s%lld", k ? " + " : " of ",
                         (long long)param->layout.segment[k].length);
    }
}

/* Writes line 0 of a model's description: the seed, tsh_desc.wire and tsh_desc.shares. */
static void tshi_module_describe_all(const tsh_ctx *ctx, tshi_line *line) {
    const int64_t *before = ctx->deal.before;
    tsh_text_add(line->text, sizeof line->text, "the seed %llu", (unsigned long long)ctx->seed);
    if (ctx->wire)
        tsh_text_add(line->text, sizeof line->text, ", the wire %s", tshi_dtype_name(ctx->wire));
    if (before) /* a hash of all shares: the text below may have no room for those of many ranks */
        line->number = (double)(tshi_rng_hash(0, before,
                                              ((size_t)ctx->deal.ranks + 1) * sizeof *before) >>
                                12);
    for (int r = 0; before && r < ctx->deal.ranks; r++)
        tsh_text_add(line->text, sizeof line->text, "%s%lld", r ? " : " : ", the shares ",
                     (long long)(before[r + 1] - before[r]));
}

/* Writes line i of the description of this rank's model: line 0 by tshi_module_describe_all, each
 * further one a module. Past the last module the text is "nothing", and 0 is returned. */
static int tshi_module_line(const tsh_ctx *ctx, int i, tshi_line *line) {
    tsh_module *m = ctx->root;
    memset(line, 0, sizeof *line);
    for (int k = 1; k < i && m; k++) m = tshi_module_next(ctx->root, m);
    if (i && m)
        tshi_module_describe(m, line);
    else if (i)
        tsh_text_add(line->text, sizeof line->text, "nothing");
    else
        tshi_module_describe_all(ctx, line);
    /* hashes `text` and `number`, the fields before `hash` */
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
        if (same > max) best = r; /* no rank before r has so frequent a hash */
        if (same > max) max = same;
    }
    return best;
}

/* Sets an error that blames odd->rank: it has the line `odd` where another rank has `usual`. */
static void tshi_module_report_diff(const tsh_comm *comm, tsh_ctx *ctx, const tshi_line *odd,
                                    const tshi_line *usual) {
    const char *axis = comm == &ctx->tp ? "tp" : comm == &ctx->dp ? "dp" : "the world";
    /* 1: ctx has no earlier error, so the rank of the new one is set below */
    const int first = ctx->error.code == TSH_OK;
    (void)tsh_fail(ctx, TSH_ERR_MISMATCH,
                   "the ranks of %s built different models: rank %d has %s where rank %d has "
                   "%s; build the same model on each, with the same seed",
                   axis, (int)odd->rank, odd->text, (int)usual->rank, usual->text);
    if (first) ctx->error.rank = (int)odd->rank;
}

/* Collective over comm: all-gathers the descriptions line by line and reports the first line that
 * is not the same on all ranks. Returns TSH_ERR_MISMATCH, or the error of what failed: memory,
 * all-gather. */
static tsh_result tshi_module_find_diff(tsh_comm *comm, tsh_ctx *ctx) {
    const int size = comm->size; /* number of ranks */
    const size_t bytes = (size_t)size * (sizeof(int64_t) + sizeof(tshi_line));
    tshi_block *block = tshi_mem_alloc(ctx, TSH_MEM_STEP, bytes);
    int64_t *counts; /* shape (size): length of a line in int32 words, the same for every rank */
    tshi_line line, *lines; /* this rank's line; one line per rank, shape (size) */
    tsh_result result = TSH_OK;
    /* usual, blamed: ranks whose lines the error compares */
    int r, i = 0, usual = 0, blamed = 0, more;
    if (!block) {
        tshi_error_report(ctx); /* tells the other ranks, which wait in the all-gather */
        return TSH_ERR_MEMORY;
    }
    counts = (int64_t *)tshi_mem_data(block); /* block: counts, then lines */
    lines = (tshi_line *)(void *)(counts + size);
    for (r = 0; r < size; r++) counts[r] = (int64_t)(sizeof line / sizeof(int32_t));
    do {
        more = tshi_module_line(ctx, i++, &line); /* 0: this rank has no line i */
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

/* Collective over comm: compares the models of its ranks. Its collectives are neither counted in
 * comm->stats nor traced. */
static TSHI_COLD tsh_result tshi_module_compare(tsh_comm *comm, tsh_ctx *ctx) {
    const tsh_comm_stats stats = comm->stats; /* restored below: what follows is not counted */
    struct tshi_trace *trace = comm->trace;   /* restored below: what follows is not traced */
    tshi_line line;
    uint64_t hash = 0; /* combined from the hashes of all lines */
    tsh_result result;
    int same;
    for (int i = 0; tshi_module_line(ctx, i, &line); i++)
        hash = tshi_rng_hash(hash, &line.hash, sizeof line.hash);
    comm->trace = NULL; /* what follows is not traced */
    result = tshi_module_same(comm, hash, &same);
    if (result == TSH_OK && !same) result = tshi_module_find_diff(comm, ctx);
    comm->trace = trace;
    comm->stats = stats; /* restored: the collectives above do not count */
    return result;
}

/* Makes the next collective of each group compare the models first. Called after every change of
 * the tree. With pp > 1, only tsh_pipeline_new compares over the world: before it, stages may have
 * different models. */
static void tshi_module_changed(tsh_ctx *ctx) {
    ctx->changes++;
    ctx->compare = tshi_module_compare; /* a pointer, since >>comm is defined before this section */
    if (ctx->tp.size > 1) ctx->tp.unchecked = ctx; /* makes the next collective of tp compare */
    if (ctx->dp.size > 1) ctx->dp.unchecked = ctx;
    if (ctx->world.size > 1 && ctx->pp.size == 1) ctx->world.unchecked = ctx;
}
