/* ========================================================================== */
/* >>io-save                                        MARK: - io-save (private) */
/* Saving a model as one safetensors file, or as several with an index.       */
/* Needs: >>module-state >>io-name.                                           */
/* ========================================================================== */

/* A text that is written to memory or, while `at` is NULL, only measured. */
typedef struct tshi_io_text {
    char *at;          /* the buffer; NULL: measure only */
    size_t size, used; /* bytes of the buffer; length of the text so far */
} tshi_io_text;

/* Appends to the text, as printf; if text->at is NULL, only counts the bytes. */
TSH_PRINTF(2, 3) static void tshi_io_put(tshi_io_text *text, const char *format, ...) {
    va_list list;
    int n;
    va_start(list, format);
    n = vsnprintf(text->at ? text->at + text->used : NULL, text->at ? text->size - text->used : 0,
                  format, list);
    va_end(list);
    if (n > 0) text->used += (size_t)n;
}

/* Writes a character, escaped if JSON needs it, to out as a string. Returns out. */
static const char *tshi_io_escape(char c, char out[8]) {
    (void)snprintf(out, 8,
                   (unsigned char)c < 0x20 ? "\\u%04x"
                   : c == '"' || c == '\\' ? "\\%c"
                                           : "%c",
                   (unsigned char)c);
    return out;
}

/* Appends a JSON key and its colon to the text: "<prefix><name>": */
static void tshi_io_put_key(tshi_io_text *text, const char *prefix, const char *name) {
    char one[8]; /* one character, escaped */
    tshi_io_put(text, "\"%s", prefix);
    for (; *name; name++) tshi_io_put(text, "%s", tshi_io_escape(*name, one));
    tshi_io_put(text, "\":");
}

/* Appends a comma, a JSON key and its colon to the text: ,"<prefix><name>": */
static void tshi_io_put_name(tshi_io_text *text, const char *prefix, const char *name) {
    tshi_io_put(text, ",");
    tshi_io_put_key(text, prefix, name);
}

/* The metadata's key for the hash of all values. Its 16 hexadecimal digits are written last, once
 * the hash is known. The hash does not depend on the degree of parallelism. */
static const char tshi_io_hash_key[] = "\"tshard.hash\":\"";

/* Prefix of the metadata's keys for quantised tensors: "tshard.dtype.<path>": "q8_0". In the file
 * such a tensor has dtype U8, and its last dimension is the number of bytes of a row. */
static const char tshi_io_blocks[] = "tshard.dtype.";

/* Returns the size of dimension d of t as the file's header has it, where t has dtype `file`. The
 * last dimension of a quantised tensor is counted in bytes there. */
static int64_t tshi_io_dim(const tsh_tensor *t, int d, tsh_dtype file) {
    return d == t->ndim - 1 && tshi_dtype_in_blocks(file)
               ? (int64_t)tshi_dtype_bytes(file, t->dim[d])
               : t->dim[d];
}

/* Appends the counters of the random generators and the optimiser (io->count) to the metadata, and
 * the kind of that optimiser. */
static void tshi_io_put_counts(const tshi_io *io, tshi_io_text *text) {
    char kind[TSHI_TEXT_SIZE], one[8];
    int i;
    for (i = 0; i < io->counts; i++) {
        const tshi_io_count *count = &io->count[i];
        if (i == io->generators && io->optim) {
            tshi_io_put(text, ",\"tshard.optim\":\"");
            for (const char *s = tshi_optim_kind(io->optim, kind); *s; s++)
                tshi_io_put(text, "%s", tshi_io_escape(*s, one)); /* may hold a user's names */
            tshi_io_put(text, "\"");
        }
        if (count->optional && !*count->value) continue;
        tshi_io_put_name(text, count->prefix, count->name);
        tshi_io_put(text, "\"%llu\"", (unsigned long long)*count->value);
    }
}

/* Appends the whole header of a file to the text, and returns the number of bytes of its values.
 * PyTorch's files have "format": "pt". Of several files, the first one has the counters. */
static int64_t tshi_io_put_header(const tshi_io *io, tshi_io_text *text) {
    int64_t begin = 0, end; /* byte offsets of a tensor's values */
    int i, d;
    tshi_io_put(text, "{\"__metadata__\":{\"format\":\"pt\",\"tshard.format\":\"1\",%s%016d\"",
                tshi_io_hash_key, 0);
    if (io->shard == 0) tshi_io_put_counts(io, text);
    for (i = 0; i < io->items; i++) {
        if (!tshi_dtype_in_blocks(io->item[i].file) || io->item[i].shard != io->shard) continue;
        tshi_io_put_name(text, tshi_io_blocks, io->item[i].name);
        tshi_io_put(text, "\"%s\"", tshi_dtype_name(io->item[i].file));
    }
    tshi_io_put(text, "}");
    for (i = 0; i < io->items; i++) {
        const tsh_tensor *t = io->item[i].form;
        /* a moment that has not been created is not written */
        if (!io->item[i].file || io->item[i].shard != io->shard) continue;
        end = begin + (int64_t)tshi_dtype_bytes(io->item[i].file, tsh_numel(t));
        tshi_io_put_name(text, "", io->item[i].name);
        tshi_io_put(text, "{\"dtype\":\"%s\",\"shape\":[", tshi_dtypes[io->item[i].file].file);
        for (d = 0; d < t->ndim; d++)
            tshi_io_put(text, d ? ",%lld" : "%lld",
                        (long long)tshi_io_dim(t, d, io->item[i].file));
        tshi_io_put(text, "],\"data_offsets\":[%lld,%lld]}", (long long)begin, (long long)end);
        begin = end;
    }
    tshi_io_put(text, "}");
    while (text->used % 8) tshi_io_put(text, " "); /* aligns the values to 8 bytes */
    return begin;
}

/* -- writing the header and the tensors -------------------------------------- */

/* Returns 1 on the rank that writes the file. */
static int tshi_io_is_writer(const tsh_ctx *ctx) {
    return ctx->tp.rank == 0 && ctx->pp.rank == 0 && ctx->dp.rank == 0;
}

/* Returns 1 if tsh_load can read a tensor whose name is `path`: the name is UTF-8, and does not
 * begin as the names of moments do. Else returns 0 and sets an error. */
static int tshi_io_check_name(const tshi_io *io, const char *path) {
    const unsigned char *s = (const unsigned char *)path;
    while (*s && tshi_io_utf8(s)) s += tshi_io_utf8(s);
    if (!*s && tshi_io_moment_of(path) < 0) return 1;
    (void)tsh_fail(io->ctx, TSH_ERR_ARGUMENT,
                   "%s: the name \"%.96s\" %s; give its module another name", io->op, path,
                   *s ? "is not UTF-8" : "is one of an optimiser's moments in a file");
    return 0;
}

/* Makes an error of io->writer an error of the ctx. Returns 1 if the writer has none. */
static int tshi_io_written(const tshi_io *io) {
    const tsh_error *error = &io->writer.error;
    if (error->code != TSH_OK)
        (void)tsh_fail(io->ctx, error->code, "%s: %s", io->op, error->message);
    return error->code == TSH_OK;
}

/* Writes bytes to the file, unless ctx has an error. */
static void tshi_io_write(tshi_io *io, const void *data, size_t bytes) {
    if (io->ctx->error.code != TSH_OK) return;
    tshi_file_put(&io->writer, data, bytes);
    (void)tshi_io_written(io);
}

/* Returns the number that the `bytes` bytes at `at`, at most 8, are in little-endian order. */
static uint64_t tshi_io_word(const char *at, size_t bytes) {
    const uint16_t one = 1;
    uint64_t word = 0;
    memcpy(&word, at, bytes);
    if (!*(const unsigned char *)&one) tshi_io_swap_bytes(&word, 1, sizeof word);
    return word;
}

/* Adds `left` bytes of values to the hash of all values. Words of 8 bytes go to four hashes in
 * turn, whose multiplications the processor overlaps. */
static void tshi_io_hash_values(tshi_io *io, const char *values, size_t left) {
    uint64_t *hash = io->hashes;
    size_t h; /* index of the hash that takes the next word */
    for (h = 0; left >= 8; h = (h + 1) % TSHI_IO_HASHES, values += 8, left -= 8)
        hash[h] = tshi_coll_mix(hash[h], tshi_io_word(values, 8));
    if (left) hash[h] = tshi_coll_mix(hash[h], tshi_io_word(values, left));
}

/* On the writing rank: makes the header, opens the temporary file and writes the header to it. */
static void tshi_io_write_header(tshi_io *io) {
    tshi_io_text text; /* the header, measured first */
    tshi_block *block;
    const char *kind; /* what is at the path, if it is not a regular file */
    unsigned char length[8];
    int64_t bytes; /* size in bytes of all values in the file */
    memset(&text, 0, sizeof text);
    bytes = tshi_io_put_header(io, &text);
    if (text.used > TSHI_IO_HEADER)
        (void)tshi_io_fail(
            io, TSH_ERR_UNSUPPORTED,
            "cannot be written: its header of %d tensors has %llu bytes, of at most %d", io->items,
            (unsigned long long)text.used, (int)TSHI_IO_HEADER);
    else if ((kind = tshi_file_kind(io->path)) != NULL)
        (void)tshi_io_wrong_kind(io, kind);
    if (io->ctx->error.code != TSH_OK) return;
    block = tshi_mem_alloc(io->ctx, TSH_MEM_BOOKS, text.used + 1);
    if (!block) return;
    text.at = (char *)tshi_mem_data(block); /* the text is now written, no longer measured */
    text.size = text.used + 1;
    text.used = 0;
    (void)tshi_io_put_header(io, &text);
    /* length of the header: the first 8 bytes of the file */
    tshi_module_store_word(length, 0, text.used);
    io->hash_at = 8 + (int64_t)(strstr(text.at, tshi_io_hash_key) - text.at) +
                  (int64_t)sizeof tshi_io_hash_key - 1;
    tshi_file_begin(&io->writer, io->path);
    if (tshi_file_fits(&io->writer, 8 + (int64_t)text.used + bytes))
        tshi_file_open_new(&io->writer);
    if (tshi_io_written(io)) {
        tshi_io_write(io, length, sizeof length);
        tshi_io_write(io, text.at, text.used);
    }
    tshi_mem_release(io->ctx, block);
}

/* Adds bytes to io->hash, which all ranks compare. */
static void tshi_io_hash(tshi_io *io, const void *data, size_t bytes) {
    io->hash = tshi_rng_hash(io->hash, data, bytes);
}

/* Returns the dtype in which tsh_save writes a parameter or moment; TSH_DTYPE_DEFAULT: this rank
 * has no values for it. */
static tsh_dtype tshi_io_file_dtype(const tshi_io *io, const tshi_io_item *item) {
    if (item->param->absent || !tshi_io_values(item)) return TSH_DTYPE_DEFAULT;
    if (io->dtype && !item->moment && !item->replica && tshi_dtypes[item->dtype].floating)
        return io->dtype;
    return tshi_io_own_dtype(item);
}

/* Sets and checks the name that a tensor (item) gets in the file. Returns 0 and sets an error if
 * tsh_load could not read it. */
static int tshi_io_set_name(tshi_io *io, tshi_io_item *item) {
    const size_t size = strlen(item->prefix) + strlen(item->path) + 1;
    char *name; /* prefix + path */
    item->name = item->path;
    if (!tshi_io_check_name(io, item->path)) return 0;
    if (!*item->prefix && !io->rename && !io->ignore) return 1;
    name = (char *)tshi_mem_arena_alloc(io->ctx, &io->arena, size);
    if (!name) return 0;
    (void)snprintf(name, size, "%s%s", item->prefix, item->path);
    item->name = tshi_io_rename_back(io, name);
    return io->ctx->error.code == TSH_OK &&
           (item->moment || item->replica || tshi_io_check_name(io, item->name));
}

/* Checks that .adapter "" leaves out no adapter that the model computes with. Returns 0 and sets an
 * error if it does. */
static TSHI_COLD int tshi_io_check_plain(const tshi_io *io) {
    for (tsh_module *m = io->plain ? io->root : NULL; m; m = tshi_module_next(io->root, m))
        if (m->adapter && !m->adapter->kept)
            return tshi_error_zero(io->ctx, TSH_ERR_STATE,
                                   "%s: the adapter \"%.64s\" of \"%s\" is not merged, and "
                                   ".adapter \"\" would leave it out; first call tsh_lora_merge, "
                                   "or tsh_lora_use(module, NULL) to save the model without it",
                                   io->op, m->adapter->name, m->path);
    return 1;
}

/* Lists and hashes the tensors to save (io->item), checks their names, and allocates what the
 * collectives need. Sets an error if something is wrong. */
static void tshi_io_prepare(tshi_io *io) {
    tsh_ctx *ctx = io->ctx;
    /* 1 + elements of the largest tensor that needs io->whole_block: a moment held in chunks
     * (.zero), or a tensor of another replica; 0: none */
    int64_t whole = 0;
    int i;
    if (ctx->pp.size > 1 && !ctx->pipeline)
        (void)tsh_fail(
            ctx, TSH_ERR_UNSUPPORTED,
            "tsh_save: the ranks of pp, %d, hold what the program gave them; only stages "
            "of a tsh_pipeline can be saved as one model",
            ctx->pp.size);
    if (!tshi_io_check_plain(io) || tsh_materialize(io->root) != TSH_OK || !tshi_io_list(io))
        return;
    for (i = 0; i < io->generators; i++)
        if (*io->count[i].value && !tshi_io_check_name(io, io->count[i].name)) return;
    for (i = 0; i < io->items; i++) {
        const tsh_tensor *t = io->item[i].form;
        io->item[i].file = tshi_io_file_dtype(io, &io->item[i]);
        if (!tshi_io_set_name(io, &io->item[i])) return;
        if ((tshi_io_in_chunks(&io->item[i]) || io->item[i].replica) && tsh_local_numel(t) >= whole)
            whole = tsh_local_numel(t) + 1;
        tshi_io_hash(io, io->item[i].prefix, strlen(io->item[i].prefix));
        tshi_io_hash(io, io->item[i].path, strlen(io->item[i].path));
        tshi_io_hash(io, io->item[i].name, strlen(io->item[i].name));
        tshi_io_hash(io, t->dim, sizeof t->dim[0] * (size_t)t->ndim);
    }
    if (whole) io->whole_block = tshi_mem_alloc(ctx, TSH_MEM_BOOKS, tshi_dtype_reals(whole));
    if (ctx->pp.size > 1)
        io->known = (int64_t *)tshi_mem_arena_alloc(
            ctx, &io->arena, (size_t)(io->items + io->counts) * sizeof *io->known);
}

/* Collective over dp: gathers the optimiser's counters of steps of all replicas of a tsh_outer in
 * io->each_steps. */
static void tshi_io_gather_steps(const tshi_io *io) {
    tsh_ctx *ctx = io->ctx;
    const int n = io->optim->count + 2;
    int64_t *mine = io->each_steps + (int64_t)ctx->dp.rank * n;
    tshi_block *block = tshi_mem_alloc(ctx, TSH_MEM_BOOKS,
                                       (size_t)io->replicas * sizeof(int64_t));
    int64_t *counts; /* shape (replicas): how many counters each replica sends */
    if (!block) {
        tshi_error_report(ctx); /* makes the other ranks leave the all-gather */
        return;
    }
    counts = (int64_t *)tshi_mem_data(block);
    for (int r = 0; r < io->replicas; r++) counts[r] = n;
    for (int i = 0; i < n; i++) mine[i] = (int64_t)*io->count[io->generators + i].value;
    (void)tshi_error_comm(ctx, tsh_allgather(&ctx->dp, mine, io->each_steps, counts, 1, TSH_I64),
                          io->op);
    tshi_mem_release(ctx, block);
}

/* Combines what pipeline stages know, by one all-reduce (MAX) over pp: which moments exist, the
 * dtype in which each tensor is written, and the counters of steps and dropout calls, which are 0
 * on stages that do not hold the parameter or module. */
static void tshi_io_merge_stages(tshi_io *io) {
    int64_t *const dtypes = io->known, *const counts = dtypes + io->items;
    int i;
    for (i = 0; i < io->items; i++) dtypes[i] = (int64_t)io->item[i].file;
    for (i = 0; i < io->counts; i++) counts[i] = (int64_t)*io->count[i].value;
    if (tshi_error_comm(
            io->ctx, tsh_allreduce(&io->ctx->pp, dtypes, io->items + io->counts, TSH_I64, TSH_MAX),
            io->op) != TSH_OK)
        return;
    for (i = 0; i < io->items; i++) io->item[i].file = (tsh_dtype)dtypes[i];
    for (i = 0; i < io->counts; i++)
        if (io->count[i].staged) *io->count[i].value = (uint64_t)counts[i];
}

/* Counts the bytes of all tensors to save, and assigns them to files: each file takes tensors in
 * order while they fit in io->shard_bytes, at least one. */
static void tshi_io_cut(tshi_io *io) {
    int64_t n, full = 0; /* n: bytes of an item; full: bytes of the current file so far */
    int i;
    for (i = 0; i < io->items; i++) {
        tshi_io_item *item = &io->item[i];
        n = (int64_t)tshi_dtype_bytes(item->file, tsh_numel(item->form));
        io->bytes += n;
        if (!io->shards || (io->shard_bytes && full > 0 && n > io->shard_bytes - full)) {
            io->shards++;
            full = 0;
        }
        full += n;
        item->shard = io->shards - 1;
        tshi_io_hash(io, &item->file, sizeof item->file);
        tshi_io_hash(io, &item->shard, sizeof item->shard);
    }
    io->shards = io->shard_bytes ? io->shards + !io->shards : 0; /* a folder has one or more */
}

/* -- a folder: several files and their index ----------------------------------- */

/* As transformers names them: the only file of a folder, and the index of several. */
static const char tshi_io_only[] = "model.safetensors";
static const char tshi_io_index[] = "model.safetensors.index.json";

/* Writes the name of file `shard` of a folder to name. Returns name. */
static const char *tshi_io_shard_name(const tshi_io *io, int shard, char name[48]) {
    if (io->shards == 1)
        strcpy(name, tshi_io_only);
    else
        (void)snprintf(name, 48, "model-%05d-of-%05d.safetensors", shard + 1, io->shards);
    return name;
}

/* Returns the path of a file in the folder io->given. Returns "" and sets an error if there is no
 * memory. */
static const char *tshi_io_in_folder(tshi_io *io, const char *name) {
    const size_t folder = strlen(io->given), size = folder + strlen(name) + 2;
    char *path = (char *)tshi_mem_arena_alloc(io->ctx, &io->arena, size);
    const int slash = folder && io->given[folder - 1] != '/';
    if (path) (void)snprintf(path, size, "%s%s%s", io->given, slash ? "/" : "", name);
    return path ? path : "";
}

/* Returns 1 if the folder has no model yet: tsh_load would read its model.safetensors in place of
 * the new files, and half of a new model with its index. Else returns 0 and sets an error. */
static int tshi_io_folder_is_free(tshi_io *io) {
    const char *const names[] = {tshi_io_only, tshi_io_index};
    int i;
    for (i = 0; i < 2; i++) {
        const char *path = tshi_io_in_folder(io, names[i]), *kind = NULL;
        FILE *file = *path ? tshi_file_open(path, &kind) : NULL;
        if (file) (void)fclose(file);
        if (file || kind)
            return tshi_io_fail(io, TSH_ERR_IO,
                                "has %s already; .shard_bytes writes to a folder without a model",
                                names[i]);
    }
    return io->ctx->error.code == TSH_OK;
}

/* On the writing rank: begins the file io->shard. */
static void tshi_io_begin_shard(tshi_io *io) {
    char name[48];
    memset(io->hashes, 0, sizeof io->hashes);
    if (io->shards) io->path = tshi_io_in_folder(io, tshi_io_shard_name(io, io->shard, name));
    if (io->ctx->error.code == TSH_OK) tshi_io_write_header(io);
    io->path = io->given;
}

/* Appends the index to the text: the bytes of all values, and in which file each tensor is. pair:
 * names of tensors and files, sorted. */
static void tshi_io_put_index(const tshi_io *io, const tshi_io_pair *pair, size_t pairs,
                              tshi_io_text *text) {
    size_t i;
    tshi_io_put(text, "{\n  \"metadata\": {\n    \"total_size\": %lld\n  },\n  \"weight_map\": {",
                (long long)io->bytes);
    for (i = 0; i < pairs; i++) {
        tshi_io_put(text, i ? ",\n    " : "\n    ");
        tshi_io_put_key(text, "", pair[i].name);
        tshi_io_put(text, " \"%s\"", pair[i].text);
    }
    tshi_io_put(text, "\n  }\n}\n");
}

/* Writes the index. Called on the rank that writes files, once they are all complete. */
static void tshi_io_write_index(tshi_io *io) {
    tshi_io_text text; /* the text of the index, measured first */
    char(*names)[48] = (char(*)[48])tshi_mem_arena_alloc(io->ctx, &io->arena,
                                                         (size_t)io->shards * sizeof *names);
    tshi_io_pair *pair = (tshi_io_pair *)tshi_mem_arena_alloc(io->ctx, &io->arena,
                                                              (size_t)io->items * sizeof *pair);
    size_t pairs = 0;
    int i;
    memset(&text, 0, sizeof text);
    if (!names || !pair) return;
    for (i = 0; i < io->items; i++) {
        const tshi_io_item *item = &io->item[i];
        if (!item->file) continue;
        pair[pairs].name = item->name;
        pair[pairs++].text = tshi_io_shard_name(io, item->shard, names[item->shard]);
    }
    qsort(pair, pairs, sizeof *pair, tshi_io_by_name);
    tshi_io_put_index(io, pair, pairs, &text);
    text.size = text.used + 1;
    text.at = (char *)tshi_mem_arena_alloc(io->ctx, &io->arena, text.size);
    text.used = 0;
    io->path = tshi_io_in_folder(io, tshi_io_index);
    if (io->ctx->error.code != TSH_OK) return;
    tshi_io_put_index(io, pair, pairs, &text);
    tshi_file_begin(&io->writer, io->path);
    tshi_file_open_new(&io->writer);
    tshi_io_write(io, text.at, text.used);
    if (tshi_io_written(io)) tshi_file_finish(&io->writer);
    if (tshi_io_written(io)) io->done++;
}

/* On the writing rank, after an error: removes the files that were written to the folder, the last
 * one first. Needs no memory. */
static void tshi_io_remove_shards(tshi_io *io) {
    /* path is long enough: no file was written whose path is longer */
    char name[48], path[sizeof io->writer.target + sizeof name];
    for (; io->shards && io->done > 0; io->done--) {
        const char *file = io->done > io->shards ? tshi_io_index
                                                 : tshi_io_shard_name(io, io->done - 1, name);
        (void)snprintf(path, sizeof path, "%s/%s", io->given, file);
        (void)remove(path);
    }
}

/* Does all that can fail before values are sent: allocates buffers, opens the temporary file and
 * writes its header. */
static void tshi_io_begin_file(tshi_io *io) {
    tsh_ctx *ctx = io->ctx;
    const size_t buffers = ctx->tp.rank == 0 && ctx->tp.size > 1 ? 2 : 1;
    tshi_io_cut(io);
    if (ctx->dp.rank > 0) return; /* only the first replica writes */
    io->buffer = (char *)tshi_mem_arena_alloc(ctx, &io->arena, buffers * TSHI_IO_BUFFER);
    if (io->buffer && tshi_io_is_writer(ctx) && (!io->shards || tshi_io_folder_is_free(io)))
        tshi_io_begin_shard(io);
}

/* Converts n elements of this rank's shard of t, the first at index `local`, to dtype `file`. */
static void tshi_io_convert(const tsh_tensor *t, int64_t local, int64_t n, tsh_dtype file,
                            char *to) {
    const char *from = (const char *)tshi_tensor_at(t) + tshi_dtype_bytes(t->dtype, local);
    tsh_real run[TSHI_DTYPE_RUN]; /* exact weights of up to TSHI_DTYPE_RUN elements */
    int64_t e, m;
    if (!t->low) tshi_dtype_convert(from, t->dtype, to, file, n);
    for (e = 0; e < n && t->low; e += m) {
        m = tshi_base_min(TSHI_DTYPE_RUN, n - e);
        tshi_tensor_exact(t, local + e, m, run);
        tshi_dtype_convert(run, TSH_REAL, to + tshi_dtype_bytes(file, e), file, m);
    }
}

/* Copies the elements which `rank`'s shard of t has of the global elements [from, to), and returns
 * their number. own 1: converts them from this rank's shard to dtype `file`. own 0: takes them from
 * `message`, which rank has sent, one after the other. They go to `whole`, which begins with
 * element `from`. If it is NULL, they go to `message` (own 1), or are only counted (own 0). */
static int64_t tshi_io_copy_runs(const tsh_tensor *t, int rank, int64_t from, int64_t to, int own,
                                 tsh_dtype file, char *message, char *whole) {
    tshi_runs run = tshi_tensor_runs(t, rank, from, to);
    int64_t done = 0; /* elements copied so far */
    while (tshi_tensor_next_run(&run)) {
        char *in = message + tshi_dtype_bytes(file, done);
        char *out = whole ? whole + tshi_dtype_bytes(file, run.global - from) : in;
        if (own)
            tshi_io_convert(t, run.local, run.length, file, out);
        else if (whole) /* if `whole` is NULL, elements are only counted */
            memcpy(out, in, tshi_dtype_bytes(file, run.length));
        done += run.length;
    }
    return done;
}

/* Returns the dtype in which *n elements of `dtype` are sent, and sets *n to their number in it.
 * Blocks of quantised weights are sent as 16-bit numbers, other dtypes as they are. */
static tsh_dtype tshi_io_sent_as(tsh_dtype dtype, int64_t *n) {
    if (!tshi_dtype_in_blocks(dtype)) return dtype;
    *n = (int64_t)tshi_dtype_bytes(dtype, *n) / tshi_dtypes[TSH_BF16].size;
    return TSH_BF16;
}

/* Sends (sends 1) or receives (0) n elements of any dtype, a quantised one included. */
static tsh_result tshi_io_pass(tsh_comm *comm, void *buffer, int64_t n, tsh_dtype dtype, int sends,
                               int peer) {
    dtype = tshi_io_sent_as(dtype, &n);
    return sends ? tsh_send(comm, buffer, n, dtype, peer) : tsh_recv(comm, buffer, n, dtype, peer);
}

/* Collective over the ranks of tp that own a part of t: rank 0 gathers the global elements [from,
 * to) in its io->buffer, in dtype `file`. */
static tsh_result tshi_io_gather(const tshi_io *io, const tsh_tensor *t, int64_t from, int64_t to,
                                 tsh_dtype file) {
    tsh_comm *tp = &io->ctx->tp;
    const int owners = t->layout.kind == TSH_SHARDED ? tp->size : 1;
    char *buffer = io->buffer, *message = buffer + TSHI_IO_BUFFER;
    tsh_result result = TSH_OK;
    int64_t n = tshi_io_copy_runs(t, tp->rank, from, to, 1, file, buffer, tp->rank ? NULL : buffer);
    int r;
    if (tp->rank > 0 && n) result = tshi_io_pass(tp, buffer, n, file, 1, 0);
    for (r = 1; tp->rank == 0 && r < owners && result == TSH_OK; r++) {
        /* number of elements that rank r sends */
        n = tshi_io_copy_runs(t, r, from, to, 0, file, message, NULL);
        if (n) result = tshi_io_pass(tp, message, n, file, 0, r);
        if (result == TSH_OK) (void)tshi_io_copy_runs(t, r, from, to, 0, file, message, buffer);
    }
    return tshi_error_comm(io->ctx, result, io->op);
}

/* Writes the item's tensor t, one buffer after the other: on its stage, rank 0 of tp gathers a
 * buffer and sends it to the writing rank. After a failed write, the other buffers are still
 * received. */
static tsh_result tshi_io_write_tensor(tshi_io *io, const tsh_tensor *t, const tshi_io_item *item) {
    /* the pipeline stage that has the tensor */
    const int stage = item->param->stage ? item->param->stage - 1 : 0;
    tsh_ctx *ctx = io->ctx;
    const tshi_dtype *row = &tshi_dtypes[item->file];
    const int64_t n = tsh_numel(t);
    const int64_t step = TSHI_IO_BUFFER / row->size * (row->elements > 1 ? row->elements : 1);
    const int writer = tshi_io_is_writer(ctx), holds = ctx->pp.rank == stage;
    const int owns = holds && (ctx->tp.rank == 0 || t->layout.kind == TSH_SHARDED);
    char *buffer = io->buffer;
    int64_t from, to;
    for (from = 0; from < n && (writer || owns); from = to) {
        tsh_result result = TSH_OK;
        to = tshi_base_min(from + step, n);
        if (owns && tshi_io_gather(io, t, from, to, item->file) != TSH_OK) return TSH_ERR_IO;
        if (owns && ctx->tp.rank == 0 && !writer)
            result = tshi_io_pass(&ctx->pp, buffer, to - from, item->file, 1, 0);
        if (writer && !holds)
            result = tshi_io_pass(&ctx->pp, buffer, to - from, item->file, 0, stage);
        if (tshi_error_comm(ctx, result, io->op) != TSH_OK) return TSH_ERR_IO;
        if (!writer) continue; /* only the writing rank has the file */
        if (row->elements <= 1) tshi_io_swap_bytes(buffer, to - from, (size_t)row->size);
        tshi_io_hash_values(io, buffer, tshi_dtype_bytes(item->file, to - from));
        tshi_io_write(io, buffer, tshi_dtype_bytes(item->file, to - from));
    }
    return TSH_OK;
}

/* Sends t, a parameter or moment of another replica of a tsh_outer, to the first one, where *whole
 * becomes the tensor that has arrived. */
static tsh_result tshi_io_fetch(const tshi_io *io, const tshi_io_item *item, const tsh_tensor *t,
                                tsh_tensor *whole) {
    tsh_comm *dp = &io->ctx->dp;
    const int64_t n = tsh_local_numel(t);
    char *values = (char *)tshi_mem_data(io->whole_block);
    tsh_result result = TSH_OK;
    *whole = *t;
    whole->block = io->whole_block;
    whole->low = NULL;
    whole->dtype = item->file;
    if (dp->rank == item->replica) {
        tshi_io_convert(t, 0, n, item->file, values);
        result = tsh_send(dp, values, n, item->file, 0);
    } else if (dp->rank == 0) {
        result = tsh_recv(dp, values, n, item->file, item->replica);
    }
    return tshi_error_comm(io->ctx, result, io->op);
}

/* Writes a parameter or moment from the first replica. A moment of which each rank of dp has a
 * chunk (.zero) is gathered over dp first; what another replica has is sent to the first one. */
static tsh_result tshi_io_write_item(tshi_io *io, const tshi_io_item *item) {
    const tsh_tensor *t = item->param->absent ? NULL : tshi_io_values(item);
    tsh_tensor whole; /* the gathered moment, or what another replica has sent */
    if (t && tshi_io_in_chunks(item)) {
        whole = *t;
        whole.block = io->whole_block;
        if (tshi_optim_gather(t, tshi_mem_data(whole.block), io->op) != TSH_OK)
            return TSH_ERR_IO;
        t = &whole;
    }
    if (t && item->file && item->replica) {
        if (tshi_io_fetch(io, item, t, &whole) != TSH_OK) return TSH_ERR_IO;
        t = &whole;
    }
    if (!item->file || io->ctx->dp.rank > 0) return TSH_OK;
    return tshi_io_write_tensor(io, t ? t : item->form, item);
}

/* On the writing rank: writes the hash of all values into the header and replaces the old file. */
static void tshi_io_finish(tshi_io *io) {
    tsh_writer *w = &io->writer;
    char digits[24];
    uint64_t hash = 0;
    int h;
    for (h = 0; h < TSHI_IO_HASHES; h++) hash = tshi_coll_mix(hash, io->hashes[h]);
    (void)snprintf(digits, sizeof digits, "%016llx", (unsigned long long)hash);
    errno = 0;
    if (!tshi_file_seek(w->file, io->hash_at) || fwrite(digits, 1, 16, w->file) != 16)
        tshi_file_system_error(w, "cannot be written");
    tshi_file_finish(w);
    if (tshi_io_written(io)) io->done++;
}

/* Writes all tensors, file after file, and the index if there are several files. After a failed
 * write, the other ranks' shards are still received. */
static void tshi_io_write_items(tshi_io *io) {
    const int writer = tshi_io_is_writer(io->ctx);
    int i;
    for (i = 0; i < io->items; i++) {
        if (io->item[i].shard != io->shard && writer && io->ctx->error.code == TSH_OK) {
            tshi_io_finish(io);
            tshi_file_close(&io->writer);
            io->shard = io->item[i].shard;
            if (io->ctx->error.code == TSH_OK) tshi_io_begin_shard(io);
        }
        if (tshi_io_write_item(io, &io->item[i]) != TSH_OK) break;
    }
    if (io->writer.file && io->ctx->error.code == TSH_OK) tshi_io_finish(io);
    tshi_file_close(&io->writer);
    if (io->shards > 1 && writer && io->ctx->error.code == TSH_OK) tshi_io_write_index(io);
    tshi_file_close(&io->writer);
    io->path = io->given;
}

TSH_API TSHI_COLD tsh_result tsh_save(tsh_module *module, const char *path,
                                      const tsh_optim *optim) {
    return tsh_save_with(module, path, optim, NULL);
}

TSH_API TSHI_COLD tsh_result tsh_save_with(tsh_module *module, const char *path,
                                           const tsh_optim *optim, const tsh_file_desc *desc) {
    tshi_io io;
    tsh_ctx *ctx;
    if (!module) return TSH_ERR_ARGUMENT;
    ctx = module->ctx;
    if (!tsh_ok(ctx)) return ctx->error.code;
    tshi_io_begin(&io, "tsh_save", module, path, optim, desc);
    tshi_comm_set_caller(ctx, TSHI_CALLER_SAVE);
    io.replicas = optim && optim->outer ? ctx->dp.size : 0;
    if (io.replicas && tshi_io_agree(&io) == TSH_OK) (void)tshi_outer_settle(optim->outer);
    if (ctx->error.code == TSH_OK) tshi_io_prepare(&io); /* first half: lists and checks */
    if ((ctx->pp.size > 1 || io.replicas > 1) && tshi_io_agree(&io) == TSH_OK) {
        if (io.replicas > 1) tshi_io_gather_steps(&io);
        if (ctx->pp.size > 1 && ctx->error.code == TSH_OK) tshi_io_merge_stages(&io);
    }
    if (ctx->error.code == TSH_OK) tshi_io_begin_file(&io);
    if (ctx->error.code != TSH_OK) tshi_file_close(&io.writer); /* removes the temporary file */
    if (tshi_io_agree(&io) == TSH_OK) {                         /* second half: writes values */
        tshi_io_write_items(&io);
        if (tshi_io_agree(&io) != TSH_OK) tshi_io_remove_shards(&io);
    }
    tshi_comm_set_caller(ctx, TSHI_CALLER_NONE);
    tshi_io_end(&io);
    return ctx->error.code;
}
