/* ========================================================================== */
/* >>trace-file                                  MARK: - trace-file (private) */
/* Writes the trace of all ranks as one JSON text, in Chrome's trace format.  */
/* Rank 0 writes its own events, then those that the other ranks send to it.  */
/* Needs: >>io-save.                                                          */
/* ========================================================================== */

/* Every rank writes its part of the text to out->message. Whenever the message is full, rank 0
 * writes it to the file; other ranks send it to rank 0, which receives from rank after rank, from
 * each until an empty message. */

enum { TSHI_TRACE_FILE_WORDS = 512 }; /* length of a message in 64-bit words, sent as TSH_I64 */

/* A part of a rank's text, as it is sent to rank 0. */
typedef struct tshi_trace_message {
    int64_t used; /* number of bytes in text; 0: this rank's last message */
    char text[8 * TSHI_TRACE_FILE_WORDS - 8];
} tshi_trace_message;

/* The state of tsh_trace_end on one rank. */
typedef struct tshi_trace_file {
    tsh_ctx *ctx;
    tsh_trace_desc desc;        /* where rank 0 writes the text */
    int refused;                /* on rank 0: 1 after desc.print returned 0 */
    tsh_writer writer;          /* on rank 0, if desc.path is set: the file */
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
    else if (out->desc.path)
        tshi_file_put(&out->writer, message->text, size);
    else if (size > 0 && !out->refused)
        out->refused = !out->desc.print(message->text, size, out->desc.user);
    message->used = 0; /* the message is empty again */
}

/* Appends text to out->message; writes or sends the message whenever it is full. */
static void tshi_trace_file_put(tshi_trace_file *out, const char *text) {
    for (; *text; text++) {
        if (out->message.used == (int64_t)sizeof out->message.text) tshi_trace_file_flush(out);
        out->message.text[out->message.used++] = *text;
    }
}

/* Appends text to out->message, escaped for use between the quotes of a JSON string. */
static void tshi_trace_file_string(tshi_trace_file *out, const char *text) {
    char one[8]; /* one character, escaped */
    for (; *text; text++) tshi_trace_file_put(out, tshi_io_escape(*text, one));
}

/* Appends one event as JSON. Its kind is Chrome's "complete" (ph X): it has a begin and a duration,
 * in microseconds. */
static void tshi_trace_file_event(tshi_trace_file *out, const tshi_event *event) {
    static const char *const kinds[] = {"forward", "backward", "module", "collective", "optimiser"};
    const int64_t length = event->end - event->begin; /* duration in nanoseconds */
    char text[160];                                   /* a part of the event's JSON text */
    tshi_trace_file_put(out, ",\n{\"ph\":\"X\",\"name\":\"");
    tshi_trace_file_string(out, event->name);
    (void)snprintf(text, sizeof text,
                   "\",\"cat\":\"%s\",\"pid\":0,\"tid\":%d,\"ts\":%lld.%03d,\"dur\":%lld.%03d"
                   ",\"args\":{",
                   kinds[event->kind], out->ctx->world.rank, (long long)(event->begin / 1000),
                   (int)(event->begin % 1000), (long long)(length / 1000), (int)(length % 1000));
    tshi_trace_file_put(out, text);
    text[0] = '\0'; /* "": an event that is no collective has no "bytes" */
    if (event->kind == TSHI_TRACE_COLL)
        (void)snprintf(text, sizeof text, "\"bytes\":%lld,", (long long)event->bytes);
    tshi_trace_file_put(out, text);
    tshi_trace_file_put(out, "\"module\":\"");
    tshi_trace_file_string(out, event->module);
    tshi_trace_file_put(out, "\"}}");
}

/* Appends this rank's row of the trace: its name, then its events. */
static void tshi_trace_file_row(tshi_trace_file *out) {
    const tsh_ctx *ctx = out->ctx;
    char text[224];
    if (ctx->world.rank == 0) /* only rank 0 writes the beginning of the file */
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
            tshi_trace_file_flush(out); /* writes the text received last */
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
    if (!ctx || ctx->error.code != TSH_OK) return ctx ? ctx->error.code : TSH_ERR_ARGUMENT;
    if (!desc || !desc->path == !desc->print)
        return tsh_fail(ctx, TSH_ERR_ARGUMENT, "tsh_trace_begin: takes either a path or print");
    (void)tshi_trace_new(ctx, "tsh_trace_begin", desc);
    return ctx->error.code;
}

TSH_API TSHI_COLD tsh_result tsh_trace_end(tsh_ctx *ctx) {
    tshi_trace_file out = TSHI_ZERO; /* the message is empty */
    if (!ctx) return TSH_ERR_ARGUMENT;
    if (ctx->error.code == TSH_OK && (!ctx->trace || ctx->trace->profile))
        return tsh_fail(ctx, TSH_ERR_STATE, "tsh_trace_end: no trace runs");
    if (!tsh_ok(ctx)) {
        tshi_trace_drop(ctx);
        return ctx->error.code;
    }
    out.ctx = ctx;
    out.desc = ctx->trace->desc;
    ctx->world.trace = NULL;                   /* the collectives below are not traced */
    if (ctx->world.rank == 0 && out.desc.path) /* tsh_writer_close reports an error of opening */
        (void)tsh_writer_open(&out.writer, out.desc.path, 0);
    tshi_trace_file_row(&out);
    tshi_trace_file_flush(&out); /* the rest of this rank's text */
    if (ctx->world.rank > 0)
        tshi_trace_file_flush(&out); /* the empty message that ends this rank's text */
    else
        tshi_trace_file_gather(&out);
    tshi_trace_drop(ctx);
    if (ctx->world.rank == 0 && out.desc.path &&
        tsh_writer_close(&out.writer, ctx->error.code == TSH_OK) != TSH_OK)
        return tsh_fail(ctx, TSH_ERR_IO, "tsh_trace_end: %s", out.writer.error.message);
    if (out.refused) return tsh_fail(ctx, TSH_ERR_IO, "tsh_trace_end: the text cannot be written");
    return ctx->error.code;
}
