/* ========================================================================== */
/* >>io-name                                        MARK: - io-name (private) */
/* Names of tensors in files and in the model: .ignore, .rename both ways.    */
/* Needs: >>io.                                                               */
/* ========================================================================== */

/* Copies a name from the file to `quote`, of TSHI_IO_QUOTE bytes, for an error: cut off there,
 * control characters replaced. Returns quote. */
static const char *tshi_io_quote(const char *name, char *quote) {
    (void)snprintf(quote, TSHI_IO_QUOTE, "%s", name);
    tshi_base_quote(quote);
    return quote;
}

/* Orders structs that begin with a pointer to a name by these names; for qsort and bsearch. */
static int tshi_io_by_name(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Returns 1 if the name of a tensor in the files matches a pattern of .ignore. */
static int tshi_io_ignored(const tshi_io *io, const char *name) {
    const char *const *pattern = io->ignore;
    if (!pattern || strlen(name) >= TSHI_IO_NAME)
        return 0; /* no pattern is tried on a name that is too long */
    while (*pattern && !tshi_glob_match(*pattern, name)) pattern++;
    return *pattern != NULL;
}

/* Returns what one pair of .rename makes of a name: the name itself if pair->from does not match
 * it. back 1: undoes the pair, which makes pair->from of what matches pair->to. Sets an error if
 * the pair matches, but the new name would not be valid. */
static const char *tshi_io_rename_by(tshi_io *io, const tsh_rename *pair, const char *name,
                                     int back) {
    const char *from = back ? pair->to : pair->from, *to = back ? pair->from : pair->to;
    char text[TSHI_IO_NAME], quote[TSHI_IO_QUOTE];
    tshi_captures captures;
    char *copy;
    captures.count = 0;
    if (!from || strlen(name) >= sizeof text || !tshi_glob_into(from, name, &captures)) return name;
    if (to && !(back && strpbrk(to, "?[")) &&
        tshi_glob_replace(to, &captures, text, sizeof text)) {
        copy = (char *)tshi_mem_arena_alloc(io->ctx, &io->arena, strlen(text) + 1);
        if (copy) strcpy(copy, text);
        return copy ? copy : name;
    }
    (void)tsh_fail(io->ctx, TSH_ERR_ARGUMENT,
                   back ? "%s: .rename \"%.64s\" to \"%.64s\" cannot be undone for \"%s\": the "
                          "first has ?, a [set] or more * than the second, more than %d *, or the "
                          "name is too long; save with another .rename"
                        : "%s: .rename \"%.64s\" to \"%.64s\" makes no name of \"%s\": it has more "
                          "* than the first, more than %d, or is too long",
                   io->op, pair->from, pair->to ? pair->to : "", tshi_io_quote(name, quote),
                   (int)TSHI_GLOB_CAPTURES);
    return name;
}

/* Returns what the pairs of .rename, applied in order, make of the name of a tensor in the files.
 * The name is unchanged by pairs that do not match. Sets an error if a pair makes no valid name. */
static const char *tshi_io_rename(tshi_io *io, const char *name) {
    const tsh_rename *pair = io->rename;
    for (; pair && pair->from; pair++) name = tshi_io_rename_by(io, pair, name, 0);
    return name;
}

/* Returns the name in the file of a tensor that is called `name` in the model, prefixes included:
 * the pairs of .rename that match are undone, the last one first. Sets an error if loading the file
 * with the same .rename and .ignore would not give the name back. */
static const char *tshi_io_rename_back(tshi_io *io, const char *name) {
    char quote[3][TSHI_IO_QUOTE];
    const char *own = name, *again;
    int pairs = 0, ignored;
    while (io->rename && io->rename[pairs].from) pairs++;
    while (pairs-- > 0) own = tshi_io_rename_by(io, &io->rename[pairs], own, 1);
    ignored = tshi_io_ignored(io, own);
    again = io->ctx->error.code == TSH_OK ? tshi_io_rename(io, own) : name;
    if (io->ctx->error.code == TSH_OK && (ignored || strcmp(again, name) != 0))
        (void)tsh_fail(io->ctx, TSH_ERR_ARGUMENT,
                       "%s: \"%s\" would be written as \"%s\", which loading with the same .rename "
                       "and .ignore would %s%s%s; save with others",
                       io->op, tshi_io_quote(name, quote[0]), tshi_io_quote(own, quote[1]),
                       ignored ? "skip" : "call \"", ignored ? "" : tshi_io_quote(again, quote[2]),
                       ignored ? "" : "\"");
    return own;
}
