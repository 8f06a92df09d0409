/* ========================================================================== */
/* >>trace                                            MARK: - trace (private) */
/* Records what ran when, between tsh_trace_begin and tsh_trace_end.          */
/* Needs: >>mem.                                                              */
/* ========================================================================== */

/* The checks of an op's inputs call tshi_trace_open, and the recording of its output on the tape
 * calls tshi_trace_close, which adds the op's event. Backward, modules and optimisers add an event
 * by tshi_trace_add when they end. Collectives find the trace in comm->trace. Events are a list in
 * an arena, oldest first. After desc.limit events, further ones are only counted, in `lost`. A
 * profile (>>profile) is a trace whose events become rows of a table after each step. */
enum { /* kinds of events */
    TSHI_TRACE_FORWARD,
    TSHI_TRACE_BACKWARD,
    TSHI_TRACE_MODULE,
    TSHI_TRACE_COLL,
    TSHI_TRACE_OPTIM
};
enum { /* phases of a step; evaluation: between tsh_no_grad_begin and tsh_no_grad_end */
    TSHI_PHASE_FORWARD,
    TSHI_PHASE_BACKWARD,
    TSHI_PHASE_UPDATE,
    TSHI_PHASE_EVALUATION
};
/* TSHI_TRACE_OPEN: max ops on the stack of running ops. TSHI_TRACE_FLIGHTS: max collectives that
 * are tracked from their start to their wait. TSHI_TRACE_LIMIT: default of desc.limit, the max
 * number of events. */
enum { TSHI_TRACE_OPEN = 16, TSHI_TRACE_FLIGHTS = 64, TSHI_TRACE_LIMIT = 1000000 };

typedef struct tshi_event {
    struct tshi_event *next;
    const char *name;   /* name of an op or collective, path of a module or parameter; not copied */
    const char *module; /* path of the module in whose forward or backward the event is; "": none */
    const char *group;  /* collective: "tp", "pp", "dp" or "world"; others: "" */
    int64_t begin, end; /* when it began and ended, in nanoseconds (tshi_trace_now) */
    int64_t wait;       /* collective: nanoseconds in tsh_wait; others: 0 */
    int64_t bytes; /* bytes read and written; of a collective, as in tsh_comm_stats; 0: not known */
    double flops;  /* floating-point operations of matrix products: two per multiply-add */
    int kind, phase;          /* one of TSHI_TRACE_...; one of TSHI_PHASE_... */
    struct tshi_event *below; /* used by tshi_profile_fold: the event below this one on its stack */
} tshi_event;

/* A collective that was started and not waited for yet. */
typedef struct tshi_flight {
    const tsh_comm *comm; /* the group of the collective; NULL: this entry is free */
    tsh_req req;          /* identifies the collective in tshi_trace_waited */
    tshi_event *event;    /* the event added when the collective started */
} tshi_flight;

struct tshi_trace {
    tsh_ctx *ctx;
    tsh_trace_desc desc;
    tshi_arena arena, books;  /* memory of the events; memory of all that lasts until the trace
                               * ends */
    tshi_event *first, *last; /* first and last event of the list of events */
    int64_t count, lost;      /* number of events in the list; number of events not added */
    int phase; /* TSHI_PHASE_...: what the rank is doing; public functions set it when they begin */
    double flops;             /* flops of matrix products since the last event of an op */
    struct tshi_profile *profile; /* tables, if this trace is a profile; else NULL */
    /* A stack of the ops that began and have not ended; ops may call other ops. */
    struct {
        const char *name; /* name of the op */
        int64_t begin;    /* when it began, in nanoseconds */
    } open[TSHI_TRACE_OPEN];
    int depth; /* number of entries of `open` in use */
    tshi_flight flight[TSHI_TRACE_FLIGHTS];
};

/* Returns the time in nanoseconds; 0 if trace is NULL (no trace runs). */
static int64_t tshi_trace_now(const tshi_trace *trace) {
    if (!trace) return 0;
    return trace->desc.now ? trace->desc.now(trace->desc.user) : tsh_now();
}

/* Sets the phase of the events to come. Returns the previous phase, to be restored later. */
static int tshi_trace_phase(tshi_trace *trace, int phase) {
    const int before = trace ? trace->phase : TSHI_PHASE_FORWARD;
    if (trace) trace->phase = phase;
    return before;
}

/* Appends an event that lasts from `begin` to now. Returns NULL if it was only counted as lost. */
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
    event->module = trace->ctx->module ? trace->ctx->module->path : "";
    event->group = "";
    event->begin = begin;
    event->end = tshi_trace_now(trace);
    event->bytes = bytes;
    event->kind = kind;
    event->phase = trace->ctx->tape.evaluating ? TSHI_PHASE_EVALUATION : trace->phase;
    if (kind == TSHI_TRACE_FORWARD || kind == TSHI_TRACE_BACKWARD) {
        event->flops = trace->flops; /* flops of the op itself, without those of the ops it called,
                                      * which have events of their own */
        trace->flops = 0;
    }
    *(trace->last ? &trace->last->next : &trace->first) = event;
    trace->last = event;
    trace->count++;
    return event;
}

/* Pushes an op onto the stack of running ops when it begins. A function that checks inputs but
 * records no output is pushed, too, and is popped when an op below it ends. */
static void tshi_trace_open(tshi_trace *trace, const char *op) {
    if (trace->depth == TSHI_TRACE_OPEN) { /* the stack is full: forget the oldest op */
        memmove(trace->open, trace->open + 1, sizeof trace->open - sizeof trace->open[0]);
        trace->depth--;
    }
    trace->open[trace->depth].name = op;
    trace->open[trace->depth++].begin = tshi_trace_now(trace);
}

/* Adds the event of an op that has ended. Pops the op, and all entries above it, from the stack.
 * bytes: the number of bytes that the op has read and written. */
static void tshi_trace_close(tshi_trace *trace, const char *op, int64_t bytes) {
    int at = trace->depth;
    while (at > 0 && strcmp(trace->open[at - 1].name, op) != 0) at--;
    if (at == 0) return;
    trace->depth = at - 1;
    (void)tshi_trace_add(trace, TSHI_TRACE_FORWARD, op, trace->open[at - 1].begin, bytes);
}

/* Adds the event of a collective that was started (from `begin` to now), and keeps it in
 * trace->flight until tshi_trace_waited. req 0: the collective is complete already. */
static void tshi_trace_sent(const tsh_comm *comm, const char *name, int64_t begin, uint64_t bytes,
                            tsh_req req) {
    tshi_trace *trace = comm->trace;
    const tsh_ctx *ctx = trace->ctx;
    tshi_event *event = tshi_trace_add(trace, TSHI_TRACE_COLL, name, begin, (int64_t)bytes);
    if (event)
        event->group = comm == &ctx->tp   ? "tp"
                       : comm == &ctx->pp ? "pp"
                       : comm == &ctx->dp ? "dp"
                                          : "world";
    for (int i = 0; i < TSHI_TRACE_FLIGHTS && event && req; i++) {
        if (trace->flight[i].comm) continue;
        trace->flight[i].comm = comm;
        trace->flight[i].req = req;
        trace->flight[i].event = event;
        return;
    }
}

/* Called after the wait for a collective; the wait began at `begin`. Extends the event of the
 * collective to now, or adds an event "wait" if other events were added since its start. */
static void tshi_trace_waited(const tsh_comm *comm, tsh_req req, int64_t begin) {
    tshi_trace *trace = comm->trace;
    for (int i = 0; i < TSHI_TRACE_FLIGHTS; i++) {
        tshi_flight *flight = &trace->flight[i];
        if (flight->comm != comm || flight->req != req) continue;
        tshi_event *event = flight->event;
        flight->comm = NULL;
        if (event == trace->last)
            event->end = tshi_trace_now(trace);
        else
            event = tshi_trace_add(trace, TSHI_TRACE_COLL, "wait", begin, event->bytes);
        if (event) event->wait = event->end - begin;
        if (event) event->group = flight->event->group;
        return;
    }
}

/* Begins a trace. Returns NULL, with an error, if a trace or profile runs already, or there is no
 * memory or no clock. op: name of the public function, for the error. */
static TSHI_COLD tshi_trace *tshi_trace_new(tsh_ctx *ctx, const char *op,
                                            const tsh_trace_desc *desc) {
    tshi_arena books = TSHI_ZERO;
    tshi_trace *trace = NULL;
    if (ctx->trace)
        (void)tsh_fail(ctx, TSH_ERR_STATE, "%s: a %s runs already; end it first", op,
                       ctx->trace->profile ? "profile (tsh_profile, TSHARD_PROFILE)"
                                           : "trace (tsh_trace_begin)");
    else if (!desc->now && tsh_now() < 0)
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT,
                       "%s: the library was compiled without a clock; compile it with "
                       "-D_POSIX_C_SOURCE=200809L or as C11, or give a trace's desc.now",
                       op);
    else
        trace = (tshi_trace *)tshi_mem_arena_alloc(ctx, &books, sizeof *trace);
    if (!trace) return NULL;
    trace->ctx = ctx;
    trace->desc = *desc;
    if (desc->limit < 1) trace->desc.limit = TSHI_TRACE_LIMIT;
    trace->books = books; /* this arena holds the trace itself */
    ctx->trace = ctx->world.trace = ctx->tp.trace = ctx->pp.trace = ctx->dp.trace = trace;
    return trace;
}

/* Ends the trace, if one runs, and frees its events. */
static void tshi_trace_drop(tsh_ctx *ctx) {
    if (!ctx->trace) return;
    const tshi_arena events = ctx->trace->arena, books = ctx->trace->books;
    ctx->trace = ctx->world.trace = ctx->tp.trace = ctx->pp.trace = ctx->dp.trace = NULL;
    tshi_mem_close(ctx, TSH_MEM_BOOKS, events.first);
    tshi_mem_close(ctx, TSH_MEM_BOOKS, books.first); /* this arena holds the trace itself */
}
