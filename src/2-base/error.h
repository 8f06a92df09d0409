/* ========================================================================== */
/* >>error                                            MARK: - error (private) */
/* A ctx keeps its first error and reports it to the other ranks once; it     */
/* takes over an error that another rank reports.                             */
/* Needs: >>text.                                                             */
/* ========================================================================== */

/* The life of an error:
 *  1. tsh_fail records it in ctx->error, on this rank only. Later errors are ignored.
 *  2. At the next tsh_ok, collective or end of a step, tshi_error_report logs the error and passes
 *     it to the backend's abort: it becomes the world's error.
 *  3. On the other ranks tshi_error_receive copies the world's error into ctx->error.
 * Before step 2 tsh_clear_error can undo it; after step 2 nothing can. */

TSH_API const char *tsh_version(void) {
    return TSHARD_VERSION;
}

/* Name and sentence of each tsh_result, in the order of the enum. */
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

TSH_API tsh_result tsh_error_set(tsh_error *error, tsh_result code, int rank, const char *format,
                                 ...) {
    va_list list;
    if (!error) return code;
    error->code = code;
    error->rank = rank;
    error->message[0] = '\0'; /* the message stays empty if format is NULL */
    va_start(list, format);
    tsh_text_format(error->message, sizeof error->message, format, list);
    va_end(list);
    tshi_base_quote(error->message);
    return code;
}

TSH_API void tsh_log_stderr(const char *message, void *user) {
    (void)user;
    if (!message) return;
    (void)fprintf(stderr, "tshard: %s\n", message); /* one call of fprintf, so that lines of several
                                                     * ranks do not mix */
}

TSH_API void tsh_log_message(const tsh_logger *logger, const char *format, ...) {
    char text[TSH_MESSAGE_SIZE];
    va_list list;
    if (!logger || !logger->log || !format) return;
    va_start(list, format);
    tsh_text_format(text, sizeof text, format, list);
    va_end(list);
    tshi_base_quote(text);
    logger->log(text, logger->user);
}

/* Passes the ctx's error to the logger, once. received: 1 if the error came from another rank. */
static TSHI_COLD void tshi_error_log(tsh_ctx *ctx, int received) {
    char text[TSH_MESSAGE_SIZE + 64] = "";
    if (ctx->logged || !ctx->logger.log) return;
    ctx->logged = 1;
    if (ctx->world.size > 1)
        tsh_text_add(text, sizeof text, "rank %d%s: ", ctx->world.rank, received ? " stops" : "");
    tsh_text_add(text, sizeof text, "%s%s (%s)", ctx->error.message,
                 received && ctx->error.code == TSH_ERR_MISMATCH
                     ? "; every rank must run the same program, with the same arguments"
                     : "",
                 tsh_result_name(ctx->error.code));
    ctx->logger.log(text, ctx->logger.user);
}

/* Logs a warning, once per ctx, on rank 0 of the world only. which: its bit, TSHI_WARN_... */
static TSHI_COLD void tshi_error_warn(tsh_ctx *ctx, unsigned which, const char *sentence) {
    if (!(ctx->warned & which) && ctx->world.rank == 0)
        tsh_log_message(&ctx->logger, "warning: %s", sentence);
    ctx->warned |= which;
}

/* If ctx has an error that is not reported yet: logs the error, and aborts the world with it, so
 * that peers return from the collective they wait in and get the error with "rank 1: " before it.
 * The error is logged here and not in tsh_fail, as tsh_clear_error can undo it until here. */
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

/* If ctx has no error but the world has one, copies it to ctx->error. Returns ctx's error code. */
TSHI_OUTLINE tsh_result tshi_error_receive(tsh_ctx *ctx) {
    tsh_error error;
    if (ctx->error.code == TSH_OK && ctx->world.ops &&
        ctx->world.ops->status(&ctx->world, &error) != TSH_OK) {
        ctx->error = error;
        tshi_base_quote(ctx->error.message); /* another process wrote the message */
        ctx->reported = 1;                   /* the world knows this error already */
        tshi_error_log(ctx, 1);
    }
    return ctx->error.code;
}

/* Prefixes the message with the path of the module that runs: "h.3.mlp.c_fc: tsh_linear: ...". If
 * the path does not fit, "..." replaces its beginning. */
static TSHI_COLD void tshi_error_place(tsh_ctx *ctx) {
    char *text = ctx->error.message;
    const char *path = ctx->module ? ctx->module->path : "";
    const size_t length = strlen(text), space = sizeof ctx->error.message - length;
    const size_t whole = strlen(path);
    if (!whole || space < 32) return; /* 32 bytes for "...", ": ", a final 0, later "rank 1000: " */
    const size_t keep = whole < space - 32 ? whole : space - 32, dots = keep < whole ? 3 : 0;
    memmove(text + dots + keep + 2, text, length + 1);
    memcpy(text, "...", dots);
    memcpy(text + dots, path + whole - keep, keep);
    memcpy(text + dots + keep, ": ", 2);
}

TSH_API TSHI_COLD tsh_result tsh_fail(tsh_ctx *ctx, tsh_result code, const char *format, ...) {
    va_list list;
    if (!ctx || ctx->error.code != TSH_OK) return code; /* the first error is kept */
    if (!format) return tsh_fail(ctx, code, "%s", tsh_result_text(code));
    ctx->error.code = code;
    ctx->error.rank = ctx->world.rank;
    va_start(list, format);
    tsh_text_format(ctx->error.message, sizeof ctx->error.message, format, list);
    va_end(list);
    tshi_base_quote(ctx->error.message);
    tshi_error_place(ctx);
    if (ctx->place.file)
        tsh_text_add(ctx->error.message, sizeof ctx->error.message, " (%s:%d)", ctx->place.file,
                     ctx->place.line);
    return code;
}

TSH_API tsh_place tsh_set_place(tsh_ctx *ctx, const char *file, int line) {
    static const tsh_place none = {NULL, 0};
    const tsh_place before = ctx ? ctx->place : none;
    if (!ctx) return none;
    ctx->place.file = file;
    ctx->place.line = line;
    return before;
}

/* Call tsh_fail with their arguments. The value of tshi_error_null is a NULL tensor, that of
 * tshi_error_zero is 0: for functions that return one of these after an error. */
#define tshi_error_null(...) ((void)tsh_fail(__VA_ARGS__), (tsh_tensor *)NULL)
#define tshi_error_zero(...) ((void)tsh_fail(__VA_ARGS__), 0)

/* If result, which the collective `what` returned, is an error: records the world's error or, if
 * the world has none, result itself (the arguments were refused). Returns result. */
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
    /* the error of a ctx that is NULL, because tsh_open had no memory for it */
    static const tsh_error none = {TSH_ERR_MEMORY, -1, "there is no ctx"};
    return ctx ? &ctx->error : &none;
}

TSH_API void tsh_clear_error(tsh_ctx *ctx) {
    if (!ctx || ctx->reported) return; /* an error that other ranks know cannot be cleared */
    memset(&ctx->error, 0, sizeof ctx->error);
    ctx->logged = 0;
}

/* Records an error if writing to `file` failed. op: the function that wrote, for the error's
 * sentence. Returns the ctx's error code. */
static tsh_result tshi_error_written(tsh_ctx *ctx, const char *op, FILE *file) {
    if (ctx->error.code == TSH_OK && ferror(file))
        (void)tsh_fail(ctx, TSH_ERR_IO, "%s: the file does not take the text", op);
    return ctx->error.code;
}
