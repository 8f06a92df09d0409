/* ========================================================================== */
/* >>profile                                        MARK: - profile (private) */
/* Tables of where time and memory go, by op and by module.                   */
/* Needs: >>env >>trace.                                                      */
/* ========================================================================== */

/* A profile is a trace that is not written to a file. At the end of each step, tshi_profile_fold
 * adds every event to two rows, that of its op and that of its module, and frees the events.
 * Memory: the step pool is measured when it is fullest, all other memory when the tables are
 * written. */

enum { TSHI_PROFILE_NAME = 64 }; /* bytes of a row's name */
enum { /* kinds of memory in a row */
    TSHI_PROFILE_PARAMETERS,
    TSHI_PROFILE_GRADIENTS,
    TSHI_PROFILE_MOMENTS,
    TSHI_PROFILE_STEP,
    TSHI_PROFILE_KINDS
};

/* A row of a table. Its numbers are sums over all steps; they are divided by the number of steps
 * when the row is logged. */
typedef struct tshi_profile_row {
    struct tshi_profile_row *next;
    char name[TSHI_PROFILE_NAME];
    int64_t calls;
    int64_t ns[TSHI_PHASE_EVALUATION + 1]; /* ns[phase]: nanoseconds, less those of nested events */
    int64_t wait, bytes;                   /* sums of the events' wait and bytes, see tshi_event */
    double flops;
    size_t held[TSHI_PROFILE_KINDS]; /* bytes held, by kind of memory; 0 in rows of ops */
} tshi_profile_row;

typedef struct tshi_profile {
    tshi_profile_row *ops, *modules; /* lists of rows; modules: in tree order */
    int64_t begin, end, steps;       /* begin, end: times in ns; steps: number of steps that ended
                                      * between them */
    int skip;                        /* 1: the first step is left out if another one follows */
    size_t live; /* bytes of the step pool in use when the modules' step memory was measured */
} tshi_profile;

/* Returns the row with this name; appends it to the list if there is none yet. NULL: no memory. */
static tshi_profile_row *tshi_profile_find(tshi_trace *trace, tshi_profile_row **list,
                                           const char *name) {
    while (*list && strncmp((*list)->name, name, TSHI_PROFILE_NAME - 1) != 0)
        list = &(*list)->next;
    if (*list) return *list;
    *list = (tshi_profile_row *)tshi_mem_arena_alloc(trace->ctx, &trace->books, sizeof **list);
    if (*list) (void)snprintf((*list)->name, TSHI_PROFILE_NAME, "%s", name);
    return *list;
}

/* Returns the row of the module at a path. Names that are numbers become "*": "h.3.mlp" is a part
 * of "h.*.mlp". path NULL: returns the row "(no module)". parameter 1: path is that of a parameter,
 * and its last name, such as "weight", is left out. */
static tshi_profile_row *tshi_profile_module(tshi_trace *trace, const char *path, int parameter) {
    char name[TSHI_PROFILE_NAME];
    const char *end = path ? strrchr(path, '.') : NULL;
    size_t used = 0;
    if (!parameter && path) end = path + strlen(path);
    while (end && path < end && used < sizeof name - 2) {
        const size_t length = strcspn(path, ".");
        const int number = length && strspn(path, "0123456789") == length;
        const size_t n = number ? 1 : length;
        if (used) name[used++] = '.';
        (void)snprintf(name + used, sizeof name - used, "%.*s", (int)n, number ? "*" : path);
        used = used + n < sizeof name ? used + n : sizeof name - 1;
        path += length + (path[length] == '.');
    }
    name[used] = '\0';
    return tshi_profile_find(trace, &trace->profile->modules, used ? name : "(no module)");
}

/* Adds a row for module and all modules below it, so that the table has the order of the tree. */
static TSHI_COLD void tshi_profile_tree(tshi_trace *trace, const tsh_module *module) {
    (void)tshi_profile_module(trace, module->path, 0);
    for (module = module->first; module; module = module->next) tshi_profile_tree(trace, module);
}

/* Adds an event to a row. Does nothing if row is NULL (there was no memory for it). self:
 * nanoseconds of the event without those of events inside it. */
static void tshi_profile_add(tshi_profile_row *row, const tshi_event *event, int64_t self) {
    if (!row) return;
    row->ns[event->phase] += self;
    row->calls += event->kind != TSHI_TRACE_BACKWARD;
    row->wait += event->wait;
    row->bytes += event->bytes;
    row->flops += event->flops;
}

/* Adds an event to the row of its op and to that of its module. self: its nanoseconds without those
 * of events inside it. training 1: the step has a backward; what runs without gradients is then
 * counted as evaluation. */
static void tshi_profile_count(tshi_trace *trace, const tshi_event *event, int64_t self,
                               int training) {
    const char *name = event->kind == TSHI_TRACE_MODULE  ? "modules, between ops"
                       : event->kind == TSHI_TRACE_OPTIM ? "tsh_optim_step"
                                                         : event->name;
    const int evaluation = training && event->phase == TSHI_PHASE_EVALUATION;
    tshi_profile_row **modules = &trace->profile->modules;
    char text[TSHI_PROFILE_NAME];
    (void)snprintf(text, sizeof text, "%s%s%s", name, event->group[0] ? " over " : "",
                   event->group);
    tshi_profile_add(
        tshi_profile_find(trace, &trace->profile->ops, evaluation ? "evaluation" : text), event,
        self);
    tshi_profile_add(evaluation ? tshi_profile_find(trace, modules, "(evaluation)")
                     : event->kind == TSHI_TRACE_OPTIM
                         ? tshi_profile_module(trace, event->name, 1)
                         : tshi_profile_module(trace, event->module, 0),
                     event, self);
}

/* Adds all events to rows and frees them. Events are sorted by their ends: the events inside
 * another one come just before it, and began after it did. The stack `top` (linked by `below`) has
 * the events that no later one has contained so far. */
static void tshi_profile_fold(tshi_trace *trace) {
    tshi_event *event, *top = NULL;
    int training = 0;
    for (event = trace->first; event; event = event->next)
        training |= event->kind == TSHI_TRACE_BACKWARD;
    for (event = trace->first; event; event = event->next) {
        int64_t self = event->end - event->begin;
        for (; top && top->begin >= event->begin; top = top->below) self -= top->end - top->begin;
        event->below = top;
        top = event;
        tshi_profile_count(trace, event, self, training);
    }
    tshi_mem_reset(&trace->arena);
    trace->first = trace->last = NULL;
    trace->count = trace->depth = 0;
    /* forgets the collectives that are not waited for yet: their events are freed */
    memset(trace->flight, 0, sizeof trace->flight);
}

/* Measures the step memory of each module, if the pool is fuller than at any earlier call. */
static void tshi_profile_measure(tshi_trace *trace) {
    const tsh_ctx *ctx = trace->ctx;
    tshi_profile_row *row;
    if (ctx->mem.step_live <= trace->profile->live) return;
    trace->profile->live = ctx->mem.step_live;
    for (row = trace->profile->modules; row; row = row->next) row->held[TSHI_PROFILE_STEP] = 0;
    for (tshi_page *page = ctx->pool.pages; page; page = page->next) {
        tshi_block *block = (tshi_block *)(void *)((char *)page + TSHI_POOL_OFFSET);
        for (;; block = tshi_mem_right(block)) {
            if (block->refs) {
                row = tshi_profile_module(trace, block->module ? block->module->path : NULL, 0);
                if (row) row->held[TSHI_PROFILE_STEP] += block->size + sizeof *block;
            }
            if (block->last) break;
        }
    }
}

/* Measures step memory when a backward begins or a step has ended. ended 1: a step has ended, whose
 * events are also added to the rows. Does nothing without a profile. */
static TSHI_COLD void tshi_profile_step(tshi_trace *trace, int ended) {
    tshi_profile *profile = trace ? trace->profile : NULL;
    tshi_profile_row *row;
    if (!profile) return;
    if (!profile->modules && trace->ctx->root) tshi_profile_tree(trace, trace->ctx->root);
    tshi_profile_measure(trace);
    if (!ended) return;
    if (profile->skip && profile->steps == 1) { /* a second step has ended: forget the first one */
        for (row = profile->ops; row; row = row->next)
            memset(&row->calls, 0, sizeof *row - offsetof(tshi_profile_row, calls));
        for (row = profile->modules; row; row = row->next)
            memset(&row->calls, 0,
                   offsetof(tshi_profile_row, held) - offsetof(tshi_profile_row, calls));
        profile->begin = profile->end;
        profile->steps = profile->skip = 0;
    }
    tshi_profile_fold(trace);
    profile->end = tshi_trace_now(trace);
    profile->steps++;
}

/* -- logging the tables of ops and of modules ------------------------------- */

/* Adds the bytes of a block (may be NULL) to the row of the tensor's module. If several tensors
 * share the block, each gets an equal part. */
static void tshi_profile_hold(tshi_trace *trace, const tsh_tensor *t, const tshi_block *block) {
    const int kind = !block                              ? TSHI_PROFILE_STEP
                     : block->kind == TSH_MEM_PARAMETERS ? TSHI_PROFILE_PARAMETERS
                     : block->kind == TSH_MEM_GRADIENTS  ? TSHI_PROFILE_GRADIENTS
                     : block->kind == TSH_MEM_OPTIMISER  ? TSHI_PROFILE_MOMENTS
                                                         : TSHI_PROFILE_STEP;
    tshi_profile_row *row;
    if (kind == TSHI_PROFILE_STEP) return; /* tshi_profile_measure counts step memory */
    row = tshi_profile_module(trace, t->path, 1);
    if (row) row->held[kind] += (block->size + sizeof *block) / (size_t)block->refs;
}

/* Returns the time of a row in all phases, in nanoseconds. */
static int64_t tshi_profile_time(const tshi_profile_row *row) {
    int64_t ns = 0;
    for (int i = 0; i <= TSHI_PHASE_EVALUATION; i++) ns += row->ns[i];
    return ns;
}

/* Returns a row with the sums of the times and of the memory of a list of rows. */
static tshi_profile_row tshi_profile_sum(const tshi_profile_row *row) {
    tshi_profile_row sum = TSHI_ZERO;
    for (; row; row = row->next) {
        for (int i = 0; i <= TSHI_PHASE_EVALUATION; i++) sum.ns[i] += row->ns[i];
        for (int i = 0; i < TSHI_PROFILE_KINDS; i++) sum.held[i] += row->held[i];
    }
    return sum;
}

/* Writes the times of a row into text: milliseconds per step in forward, backward and update, and
 * the share of the step. Returns text. */
static const char *tshi_profile_times(const tshi_profile *profile, const tshi_profile_row *row,
                                      char text[TSHI_TEXT_SIZE]) {
    const double step = 1e6 * (double)profile->steps; /* time / step: milliseconds per step */
    const double all = (double)(profile->end - profile->begin);
    const int digits = all / step < 1 ? 5 : 3; /* more digits if steps take less than a
                                                * millisecond */
    text[0] = '\0';
    tsh_text_add(text, TSHI_TEXT_SIZE, "%9.*f %9.*f %9.*f %6.1f %%", digits,
                 (double)(row->ns[TSHI_PHASE_FORWARD] + row->ns[TSHI_PHASE_EVALUATION]) / step,
                 digits, (double)row->ns[TSHI_PHASE_BACKWARD] / step, digits,
                 (double)row->ns[TSHI_PHASE_UPDATE] / step,
                 100 * (double)tshi_profile_time(row) / all);
    return text;
}

/* Logs a row of the table of ops. sum 1: the row is a sum, without calls and rate. */
static void tshi_profile_log_op(const tsh_ctx *ctx, const tshi_profile_row *row, int sum) {
    const tshi_profile *profile = ctx->trace->profile;
    const double seconds = (double)tshi_profile_time(row) / 1e9;
    char times[TSHI_TEXT_SIZE], rate[TSHI_TEXT_SIZE] = "", calls[32] = "";
    if (!sum)
        tsh_text_add(calls, sizeof calls, "%.1f", (double)row->calls / (double)profile->steps);
    if (row->flops > 0 && seconds > 0)
        tsh_text_add(rate, sizeof rate, "  %7.1f GFLOP/s", row->flops / seconds / 1e9);
    else if (row->bytes > 0 && seconds > 0)
        tsh_text_add(rate, sizeof rate, "  %7.1f GB/s", (double)row->bytes / seconds / 1e9);
    if (row->wait > 0)
        tsh_text_add(rate, sizeof rate, ", waits %.3f ms",
                     (double)row->wait / 1e6 / (double)profile->steps);
    tsh_log_message(&ctx->logger, "%-30.63s %7s %s%s", row->name, calls,
                    tshi_profile_times(profile, row, times), rate);
}

/* Logs the table of ops, those with the most time first. outside: the row of the time outside the
 * library. */
static void tshi_profile_log_ops(const tsh_ctx *ctx, const tshi_profile_row *outside) {
    tshi_profile_row *row, *most, sum = tshi_profile_sum(ctx->trace->profile->ops);
    int64_t before = INT64_MAX, next; /* times of the row logged last, and of the one to log next */
    tsh_log_message(&ctx->logger, "%-30s %7s %9s %9s %9s %8s  %s", "op", "calls", "forward",
                    "backward", "update", "share", "   rate");
    do {
        next = -1;
        most = NULL;
        for (row = ctx->trace->profile->ops; row; row = row->next) {
            const int64_t time = tshi_profile_time(row);
            if (time < before && time > next) {
                next = time;
                most = row;
            }
        }
        for (row = most; row; row = row->next)
            if (tshi_profile_time(row) == next && row->calls) tshi_profile_log_op(ctx, row, 0);
        before = next;
    } while (most);
    tshi_profile_log_op(ctx, outside, 1);
    for (int i = 0; i <= TSHI_PHASE_EVALUATION; i++) sum.ns[i] += outside->ns[i];
    (void)snprintf(sum.name, sizeof sum.name, "a step");
    tshi_profile_log_op(ctx, &sum, 1);
}

/* Returns a number of bytes in the unit of the table: MB, or kB if the ctx holds < 10 MB. */
static double tshi_profile_unit(const tsh_ctx *ctx, size_t bytes) {
    return (double)bytes / (ctx->mem.total < 10000000 ? 1e3 : 1e6);
}

/* Logs a row of the table of modules. */
static void tshi_profile_log_module(const tsh_ctx *ctx, const tshi_profile_row *row) {
    char text[TSHI_TEXT_SIZE];
    size_t held = 0;
    (void)tshi_profile_times(ctx->trace->profile, row, text);
    for (int i = 0; i < TSHI_PROFILE_KINDS; i++) {
        held += row->held[i];
        tsh_text_add(text, sizeof text, " %9.2f", tshi_profile_unit(ctx, row->held[i]));
    }
    if (!held && !tshi_profile_time(row)) return; /* omitted: it only calls its children */
    tsh_log_message(&ctx->logger, "%-30.63s %s", row->name, text);
}

/* Logs the table of modules, and the other memory in tsh_mem_stats. outside: the row of the time
 * outside the library. */
static void tshi_profile_log_modules(tsh_ctx *ctx, const tshi_profile_row *outside) {
    tshi_trace *trace = ctx->trace;
    tshi_profile_row *row, sum;
    const tsh_tensor *t, *head = &ctx->handles.owned;
    const tsh_mem mem = ctx->mem;
    for (t = head->next; t != head; t = t->next) {
        if (t->base != t) continue; /* a view: its base has been counted */
        tshi_profile_hold(trace, t, t->block);
        tshi_profile_hold(trace, t, t->gr.block);
        tshi_profile_hold(trace, t, t->gp.block);
        tshi_profile_hold(trace, t, t->marks);
        tshi_profile_hold(trace, t, t->low);
        tshi_profile_hold(trace, t, t->packed);
    }
    tsh_log_message(&ctx->logger, "%-30s %9s %9s %9s %8s %9s %9s %9s %9s", "module", "forward",
                    "backward", "update", "share", "parameter", "gradient", "moment", "step");
    for (row = trace->profile->modules; row; row = row->next) tshi_profile_log_module(ctx, row);
    tshi_profile_log_module(ctx, outside);
    sum = tshi_profile_sum(trace->profile->modules);
    for (int i = 0; i <= TSHI_PHASE_EVALUATION; i++) sum.ns[i] += outside->ns[i];
    (void)snprintf(sum.name, sizeof sum.name, "a step");
    tshi_profile_log_module(ctx, &sum);
    tsh_log_message(&ctx->logger,
                    "%s held; besides: %.2f of the step pool that was free then, %.2f of other "
                    "tensors, %.2f of handles, tape, modules, profile; in all %.2f",
                    mem.total < 10000000 ? "kB" : "MB",
                    tshi_profile_unit(ctx, mem.now[TSH_MEM_STEP] - trace->profile->live),
                    tshi_profile_unit(ctx, mem.now[TSH_MEM_TENSORS]),
                    tshi_profile_unit(ctx, mem.now[TSH_MEM_BOOKS]),
                    tshi_profile_unit(ctx, mem.total));
}

/* Ends the running profile: logs its tables and frees it. */
static TSHI_COLD void tshi_profile_end(tsh_ctx *ctx) {
    tshi_trace *trace = ctx->trace;
    tshi_profile *profile = trace->profile;
    const tsh_comm *world = &ctx->world;
    tshi_profile_row outside = TSHI_ZERO;
    /* If no step has ended, all that was recorded counts as one step. */
    if (profile->steps == 0) tshi_profile_step(trace, 1);
    (void)snprintf(outside.name, sizeof outside.name, "outside the library");
    outside.ns[TSHI_PHASE_FORWARD] = profile->end - profile->begin;
    for (const tshi_profile_row *row = profile->ops; row; row = row->next)
        outside.ns[TSHI_PHASE_FORWARD] -= tshi_profile_time(row);
    tsh_log_message(&ctx->logger, "profile of rank %d of %d (tp %d): %lld step%s of %.3f ms",
                    world->rank, world->size, ctx->tp.size, (long long)profile->steps,
                    profile->steps == 1 ? "" : "s",
                    (double)(profile->end - profile->begin) / 1e6 / (double)profile->steps);
    tshi_profile_log_ops(ctx, &outside);
    tshi_profile_log_modules(ctx, &outside);
    if (trace->lost)
        tsh_log_message(&ctx->logger, "%lld events were left out: more than %lld in a step",
                        (long long)trace->lost, (long long)trace->desc.limit);
    tshi_trace_drop(ctx);
}

/* Begins a profile. op: name of the public function, for errors. skip 1: the first step is left out
 * if another one follows. */
static TSHI_COLD void tshi_profile_begin(tsh_ctx *ctx, const char *op, int skip) {
    const tsh_trace_desc desc = TSHI_ZERO;
    tshi_trace *trace = tshi_trace_new(ctx, op, &desc);
    if (!trace) return;
    trace->profile = (tshi_profile *)tshi_mem_arena_alloc(ctx, &trace->books,
                                                          sizeof *trace->profile);
    if (!trace->profile) {
        tshi_trace_drop(ctx);
        return;
    }
    trace->profile->skip = skip;
    trace->profile->begin = trace->profile->end = tshi_trace_now(trace);
}

/* Begins a profile on rank 0 if the environment variable TSHARD_PROFILE is 1. */
static TSHI_COLD void tshi_profile_open(tsh_ctx *ctx) {
    tsh_error error;
    int on = 0;
    if (ctx->error.code != TSH_OK) return;
    if (tshi_env_int("TSHARD_PROFILE", 0, 1, &on, &error) < 0)
        (void)tsh_fail(ctx, error.code, "tsh_open: %s", error.message);
    if (!on || ctx->world.rank > 0) return;
    if (!ctx->logger.log) ctx->logger.log = tsh_log_stderr;
    tshi_profile_begin(ctx, "tsh_open", 1);
}

TSH_API TSHI_COLD tsh_result tsh_profile(tsh_ctx *ctx, int on) {
    if (!ctx || ctx->error.code != TSH_OK) return ctx ? ctx->error.code : TSH_ERR_ARGUMENT;
    if (on && !ctx->logger.log)
        return tsh_fail(ctx, TSH_ERR_ARGUMENT,
                        "tsh_profile: the tables go to the logger, and there is none; give "
                        "tsh_open a tsh_desc.logger.log, such as tsh_log_stderr");
    if (!on && (!ctx->trace || !ctx->trace->profile))
        return tsh_fail(ctx, TSH_ERR_STATE, "tsh_profile: no profile runs");
    if (on)
        tshi_profile_begin(ctx, "tsh_profile", 0);
    else
        tshi_profile_end(ctx);
    return ctx->error.code;
}
