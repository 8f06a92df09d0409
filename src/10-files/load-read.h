/* ========================================================================== */
/* >>load-read                                    MARK: - load-read (private) */
/* Reading a rank's shard of a tensor from the files, in the file's dtype.    */
/* Needs: >>load-files.                                                       */
/* ========================================================================== */

/* Reads bytes of a tensor of the open file; `at` is an offset like entry->begin. With .broadcast,
 * rank 0 reads for all ranks: bytes that it reads for one rank lie among those that it reads for
 * another, and the gaps between short runs (rows of a shard of columns) cost less than a system
 * call for each run. So it reads TSHI_LOAD_AHEAD bytes at once into io->ahead and copies runs from
 * there. Other ranks, and a user's .read_at, which may compute the bytes, read no more than
 * they need. Returns what tshi_load_read returns. */
static int tshi_load_read_run(tshi_io *io, const tshi_io_entry *entry, int64_t at, char *to,
                              size_t bytes) {
    const int64_t last = tshi_base_min(entry->end, at + TSHI_LOAD_AHEAD);
    /* 1: this run is near the last one, as with adjacent rows of a shard of columns */
    const int close = at - io->ahead_run <= TSHI_LOAD_AHEAD / 4;
    io->ahead_run = at;
    if (!io->ahead || !close || bytes > TSHI_LOAD_AHEAD / 4)
        return tshi_load_read(io, io->open->data + at, to, bytes);
    if (at < io->ahead_at || at + (int64_t)bytes > io->ahead_end) {
        if (!tshi_load_read(io, io->open->data + at, io->ahead, (size_t)(last - at))) return 0;
        io->ahead_at = at;
        io->ahead_end = last;
    }
    memcpy(to, io->ahead + (at - io->ahead_at), bytes);
    return 1;
}

/* Reads the next elements, at most n, of the shard whose runs of adjacent elements `run` goes
 * through, to `to`, in the file's dtype; after an error, only counts them. Returns their number. */
static int64_t tshi_load_fill(tshi_io *io, const tshi_io_item *item, tshi_runs *run, int64_t n,
                              char *to) {
    const tshi_dtype *row = &tshi_dtypes[item->file];
    const tshi_io_entry *e = item->entry;
    int64_t done = 0, m;
    char *at = to;
    io->ahead_at = io->ahead_end = 0; /* io->ahead may hold bytes of another tensor */
    io->ahead_run = -TSHI_LOAD_AHEAD;
    while (done < n && (run->length > 0 || tshi_tensor_next_run(run))) {
        const size_t bytes = tshi_dtype_bytes(item->file, m = tshi_base_min(run->length, n - done));
        if (io->ctx->error.code == TSH_OK && tshi_load_use(io, &io->source[e->source]) &&
            !tshi_load_read_run(
                io, e, e->begin + (int64_t)tshi_dtype_bytes(item->file, run->global), at, bytes))
            (void)tshi_load_read_error(io, "it became shorter while it was read");
        at += bytes;
        done += m;
        run->global += m;
        run->length -= m;
    }
    if (row->elements <= 1) tshi_io_swap_bytes(to, done, (size_t)row->size);
    return done;
}

/* Returns how many elements of a tensor are read or sent at a time: with .broadcast TSHI_IO_BUFFER
 * bytes; else a quarter of that, which stays in the CPU's cache until it is checked for NaN. */
static int64_t tshi_load_step(const tshi_io *io, const tshi_io_item *item) {
    const tshi_dtype *row = &tshi_dtypes[item->file];
    const int64_t bytes = io->broadcast ? TSHI_IO_BUFFER : TSHI_IO_BUFFER / 4;
    return bytes / row->size * (row->elements > 1 ? row->elements : 1);
}
