/* ========================================================================== */
/* >>load-cache                                  MARK: - load-cache (private) */
/* Shards that a rank keeps on disk, and loads at the next load by .broadcast. */
/* Needs: >>load-read.                                                        */
/* ========================================================================== */

/* HOW IT WORKS. Rank 0 broadcasts a hash for each shard of each tensor (of a replicated one, for
 * all of it), over its dtype and its bytes as the file has them. A rank looks for a file of that
 * name in its folder, and hashes what is in it. Ranks then tell each other what they have kept, and
 * only what is lacking is sent, hashed and kept. A name says all about the bytes in a file, so that
 * models, degrees and ranks may share a folder. Rank 0 has the hashes of a load in a file of its
 * own, "hashes-" and a number that depends on the model, its layouts, and the files it is read
 * from; that file ends with a hash of all that is before. */

/* Returns rank r's hash of item's shard; of a replicated one, r is 0. */
static unsigned char *tshi_load_digest(const tshi_io *io, const tshi_io_item *item, int r) {
    return io->digest + ((int64_t)r * io->items + (item - io->item)) * TSHI_IO_DIGEST;
}

/* Returns this rank's hash of item's shard. */
static const unsigned char *tshi_load_own_digest(const tshi_io *io, const tshi_io_item *item) {
    return tshi_load_digest(io, item,
                            item->form->layout.kind == TSH_SHARDED ? io->ctx->tp.rank : 0);
}

/* Returns the path of a file in the cache, whose name is `name` and, if there is one, the hash. It
 * is valid until the next call. */
static const char *tshi_load_cache_path(const tshi_io *io, const char *name,
                                        const unsigned char *digest) {
    char *at = io->cache_path;
    size_t size = io->cache_size;
    int n = snprintf(at, size, "%s/%s", io->cache->cache, name);
    for (int i = 0; digest && i < TSHI_IO_DIGEST; i++, n += 2)
        (void)snprintf(at + n, size - (size_t)n, "%02x", digest[i]);
    return at;
}

/* Prepares the use of desc's cache. Sets an error if it has no hasher, or there is no memory. */
static TSHI_COLD void tshi_load_open_cache(tshi_io *io, const tsh_file_desc *desc) {
    enum { ALIGN = 64, NAME = 2 * TSHI_IO_DIGEST + 40, MOST = 1 << 20 };
    const tsh_hasher *h = desc->hasher;
    char *state;
    if (!h || !h->begin || !h->add || !h->end || h->size > MOST) {
        (void)tsh_fail(io->ctx, TSH_ERR_ARGUMENT,
                       "tsh_load: .cache \"%.200s\" needs a .hasher, which names its files, with a "
                       "state of at most %d bytes",
                       desc->cache, (int)MOST);
        return;
    }
    io->cache_size = strlen(desc->cache) + NAME;
    io->cache_path = (char *)tshi_mem_arena_alloc(io->ctx, &io->arena, io->cache_size);
    io->cache_part = (char *)tshi_mem_arena_alloc(io->ctx, &io->arena, io->cache_size);
    state = (char *)tshi_mem_arena_alloc(io->ctx, &io->arena, h->size + ALIGN);
    if (!io->cache_path || !io->cache_part || !state) return;
    io->state = state + (ALIGN - (uintptr_t)state % ALIGN) % ALIGN;
    (void)snprintf(io->cache_part, io->cache_size, "%s/part-%d", desc->cache, io->ctx->world.rank);
    io->cache = desc;
}

/* Begins the hash of a shard of item. */
static void tshi_load_hash_begin(const tshi_io *io, const tshi_io_item *item) {
    const char *dtype = tshi_dtypes[item->file].file;
    io->cache->hasher->begin(io->state);
    io->cache->hasher->add(io->state, dtype, strlen(dtype) + 1);
}

/* Returns 1 if the hash of a shard, all of whose bytes were added, is `digest`. */
static int tshi_load_hash_is(const tshi_io *io, const unsigned char *digest) {
    unsigned char found[TSHI_IO_DIGEST];
    io->cache->hasher->end(io->state, found);
    return memcmp(found, digest, sizeof found) == 0;
}

/* -- rank 0: hashes of all shards ------------------------------------------- */

/* Returns the number in the name of rank 0's file of hashes, which depends on all that the hashes
 * depend on (model, layouts, files). 0: the files' versions are not known, so no hashes are
 * reused. */
static uint64_t tshi_load_cache_key(const tshi_io *io) {
    const tshi_deal *deal = &io->ctx->deal;
    uint64_t key = tshi_rng_hash(io->hash, &deal->ranks, sizeof deal->ranks);
    if (deal->before)
        key = tshi_rng_hash(key, deal->before, ((size_t)deal->ranks + 1) * sizeof *deal->before);
    for (int i = 0; i < io->sources; i++) {
        const tshi_io_source *source = &io->source[i];
        const uint64_t changed = io->reader ? io->cache->stamp : (uint64_t)source->changed;
        const uint64_t stamp[2] = {changed, io->reader ? 0 : source->stamp};
        if (!changed) return 0;
        key = tshi_rng_hash(key, stamp, sizeof stamp);
        key = tshi_rng_hash(key, source->path, strlen(source->path) + 1);
    }
    for (int i = 0; i < io->items; i++) {
        const tshi_io_item *item = &io->item[i];
        const tsh_layout *l = &item->form->layout;
        int64_t facts[6] = {item->file, l->kind, l->dim, l->segments, -1, -1};
        if (item->entry) {
            facts[4] = item->entry->source;
            facts[5] = item->entry->begin;
        }
        key = tshi_rng_hash(key, facts, sizeof facts);
        for (int s = 0; l->kind == TSH_SHARDED && s < l->segments; s++) {
            const int64_t segment[2] = {l->segment[s].length, l->segment[s].unit};
            key = tshi_rng_hash(key, segment, sizeof segment);
        }
    }
    return key;
}

/* Opens rank 0's file of the hashes of all shards. mode: as for fopen. Returns NULL if that
 * fails. */
static FILE *tshi_load_hashes_open(const tshi_io *io, uint64_t key, const char *mode) {
    char name[40];
    (void)snprintf(name, sizeof name, "hashes-%016llx", (unsigned long long)key);
    return fopen(tshi_load_cache_path(io, name, NULL), mode);
}

/* Returns the size in bytes of io->digest, and sets `end` to a hash of it, with which the file of
 * hashes ends. */
static size_t tshi_load_hashes_end(const tshi_io *io, unsigned char *end) {
    const size_t size = (size_t)io->ctx->tp.size * (size_t)io->items * TSHI_IO_DIGEST;
    io->cache->hasher->begin(io->state);
    io->cache->hasher->add(io->state, io->digest, size);
    io->cache->hasher->end(io->state, end);
    return size;
}

/* Reads io->digest from the file of hashes that an earlier load has written. Returns 1 if that file
 * is whole. */
static int tshi_load_hashes_read(const tshi_io *io, uint64_t key) {
    const size_t size = (size_t)io->ctx->tp.size * (size_t)io->items * TSHI_IO_DIGEST;
    unsigned char end[TSHI_IO_DIGEST], found[TSHI_IO_DIGEST];
    FILE *file = tshi_load_hashes_open(io, key, "rb");
    int whole;
    if (!file) return 0;
    whole = fread(io->digest, 1, size, file) == size &&
            fread(end, 1, sizeof end, file) == sizeof end;
    (void)fclose(file);
    if (!whole) return 0;
    (void)tshi_load_hashes_end(io, found);
    return memcmp(end, found, sizeof end) == 0;
}

/* Writes io->digest for the next load. A file that is not written whole is of no use: it does not
 * end with the hash of what is before. */
static void tshi_load_hashes_write(const tshi_io *io, uint64_t key) {
    unsigned char end[TSHI_IO_DIGEST];
    const size_t size = tshi_load_hashes_end(io, end);
    FILE *file = tshi_load_hashes_open(io, key, "wb");
    if (!file) return;
    (void)fwrite(io->digest, 1, size, file);
    (void)fwrite(end, 1, sizeof end, file);
    (void)fclose(file);
}

/* Fills in io->digest (the hashes of all shards), from the file of an earlier load or by reading
 * all shards. */
static void tshi_load_hash_all(tshi_io *io) {
    const uint64_t key = tshi_load_cache_key(io);
    if (key && tshi_load_hashes_read(io, key)) return;
    for (int i = 0; i < io->items; i++) {
        const tshi_io_item *item = io->order[i];
        const int ranks = item->form->layout.kind == TSH_SHARDED ? io->ctx->tp.size : 1;
        const int64_t step = tshi_load_step(io, item);
        for (int r = 0; item->entry && r < ranks; r++) {
            tshi_runs run = tshi_tensor_runs(item->form, r, 0, tsh_numel(item->form));
            int64_t n;
            tshi_load_hash_begin(io, item);
            while ((n = tshi_load_fill(io, item, &run, step, io->buffer)) > 0)
                io->cache->hasher->add(io->state, io->buffer, tshi_dtype_bytes(item->file, n));
            io->cache->hasher->end(io->state, tshi_load_digest(io, item, r));
        }
    }
    if (key && io->ctx->error.code == TSH_OK) tshi_load_hashes_write(io, key);
}

/* -- all ranks: what is kept -------------------------------------------------- */

/* Returns 1 if this rank's cache has its shard of item. A file of that name with other bytes is
 * removed. */
static int tshi_load_has(const tshi_io *io, const tshi_io_item *item) {
    const unsigned char *digest = tshi_load_own_digest(io, item);
    const char *path = tshi_load_cache_path(io, "", digest);
    FILE *file = fopen(path, "rb");
    size_t left = tshi_dtype_bytes(item->file, tsh_local_numel(item->form)), n;
    int same;
    if (!file) return 0;
    tshi_load_hash_begin(io, item);
    while ((n = fread(io->buffer, 1, TSHI_IO_BUFFER, file)) > 0 && n <= left) {
        io->cache->hasher->add(io->state, io->buffer, n);
        left -= n;
    }
    same = tshi_load_hash_is(io, digest) && left == 0 && n == 0 && !ferror(file);
    (void)fclose(file);
    if (!same) (void)remove(path);
    return same;
}

/* If rank 0 has a .cache: collective over the world, tp and dp; finds out which ranks have kept
 * which shards (io->kept). If not, only sets io->kept to NULL. */
static tsh_result tshi_load_ask(tshi_io *io) {
    tsh_ctx *ctx = io->ctx;
    const int64_t items = io->items, words = TSHI_IO_DIGEST / 4 * ctx->tp.size * items;
    int32_t *own = io->kept, *tp = own + items, *dp = tp + items, *all = dp + items;
    tsh_result result;
    if (!io->cached) io->kept = NULL;
    if (!io->cached) return TSH_OK;
    if (ctx->world.rank == 0) tshi_load_hash_all(io);
    result = tsh_broadcast(&ctx->world, io->digest, words, TSH_I32, 0);
    for (int64_t i = 0; i < items; i++) {
        const tshi_io_item *item = &io->item[i];
        own[i] = ctx->world.rank == 0 || !item->entry || item->param->absent ||
                 (io->cache && result == TSH_OK && tshi_load_has(io, item));
        tp[i] = dp[i] = own[i];
    }
    for (int r = 0; r < ctx->world.size; r++) io->share[r] = items;
    if (result == TSH_OK) result = tsh_allreduce(&ctx->tp, tp, items, TSH_I32, TSH_MIN);
    if (result == TSH_OK) result = tsh_allreduce(&ctx->dp, dp, items, TSH_I32, TSH_MIN);
    if (result == TSH_OK) result = tsh_allgather(&ctx->world, own, all, io->share, 1, TSH_I32);
    return tshi_error_comm(ctx, result, io->op);
}

/* Returns 1 if rank `rank` of the world has kept its shard of io->item[index]. */
static int tshi_load_kept_by(const tshi_io *io, int rank, int64_t index) {
    return io->kept && io->kept[(3 + (int64_t)rank) * io->items + index];
}

/* -- a shard on its way --------------------------------------------------------- */

/* The cache's file for a shard that is being loaded. writes 1: the shard is written to it; 0: the
 * shard is read from it. file NULL: there is none. */
typedef struct tshi_keeping {
    tshi_io *io;
    const tshi_io_item *item;
    FILE *file;
    int writes;
} tshi_keeping;

/* Logs that a shard cannot be kept in the cache, and why; only once per load. */
static TSHI_COLD void tshi_load_unkept(const tshi_keeping *keep, const char *why) {
    tshi_io *io = keep->io;
    if (io->cached < 2)
        tsh_log_message(&io->ctx->logger,
                        "warning: %s: rank %d cannot keep \"%s%.96s\" in \"%.200s\" (%s); it is "
                        "loaded all the same",
                        io->op, io->ctx->world.rank, keep->item->prefix, keep->item->path,
                        io->cache->cache, why);
    io->cached = 2;
}

/* Sets an error: a file of the cache that tshi_load_has has read cannot be read again. */
static TSHI_COLD void tshi_load_lost(const tshi_keeping *keep) {
    (void)tsh_fail(keep->io->ctx, TSH_ERR_IO,
                   "%s: rank %d cannot read the shard of \"%s%.96s\" again that it has kept in "
                   "\"%.200s\"; load once more",
                   keep->io->op, keep->io->ctx->world.rank, keep->item->prefix, keep->item->path,
                   keep->io->cache->cache);
}

/* Sets an error: a shard does not have the hash that rank 0 has sent. The model's files have
 * changed but kept their sizes and times (or .stamp), so rank 0's hashes are those of the old
 * files. */
static TSHI_COLD void tshi_load_differs(const tshi_keeping *keep) {
    (void)tsh_fail(keep->io->ctx, TSH_ERR_IO,
                   "%s: rank 0 has sent rank %d a shard of \"%s%.96s\" that does not have the hash "
                   "that rank 0 keeps; remove the files \"hashes-*\" in the .cache of rank 0, and "
                   "load again",
                   keep->io->op, keep->io->ctx->world.rank, keep->item->prefix, keep->item->path);
}

/* Opens the cache's file for this rank's shard of item, if there is a cache. keeps 0: opens no file
 * for writing. */
static tshi_keeping tshi_load_keep_begin(tshi_io *io, const tshi_io_item *item, int keeps) {
    tshi_keeping keep = {io, item, NULL, 0};
    if (!io->kept || !io->cache || io->ctx->world.rank == 0) return keep;
    if (io->kept[item - io->item]) {
        keep.file = fopen(tshi_load_cache_path(io, "", tshi_load_own_digest(io, item)), "rb");
        if (!keep.file) tshi_load_lost(&keep);
        return keep;
    }
    if (!keeps) return keep;
    keep.writes = 1;
    tshi_load_hash_begin(io, item);
    keep.file = fopen(io->cache_part, "wb");
    if (!keep.file) tshi_load_unkept(&keep, strerror(errno));
    return keep;
}

/* Reads the next n elements of a shard that an earlier load has kept; does nothing if none has. */
static void tshi_load_keep_read(tshi_keeping *keep, int64_t n, char *bytes) {
    const size_t size = tshi_dtype_bytes(keep->item->file, n);
    if (!keep->file || keep->writes) return;
    if (fread(bytes, 1, size, keep->file) != size) tshi_load_lost(keep);
}

/* Writes the next n elements of a shard that is to be kept. */
static void tshi_load_keep_write(tshi_keeping *keep, int64_t n, const char *bytes) {
    const size_t size = tshi_dtype_bytes(keep->item->file, n);
    if (!keep->file || !keep->writes) return;
    keep->io->cache->hasher->add(keep->io->state, bytes, size);
    if (fwrite(bytes, 1, size, keep->file) == size) return;
    tshi_load_unkept(keep, strerror(errno));
    (void)fclose(keep->file);
    (void)remove(keep->io->cache_part);
    keep->file = NULL;
}

/* Closes the shard's file. One that was written gets its final name if the shard is complete, and
 * is removed if not. */
static void tshi_load_keep_end(tshi_keeping *keep, int complete) {
    const tshi_io *io = keep->io;
    const unsigned char *digest;
    int closed;
    if (!keep->file) return;
    closed = fclose(keep->file) == 0;
    if (!keep->writes) return;
    digest = tshi_load_own_digest(io, keep->item);
    if (complete && !closed) tshi_load_unkept(keep, strerror(errno));
    if (complete && closed && !tshi_load_hash_is(io, digest))
        tshi_load_differs(keep);
    else if (complete && closed) {
        if (rename(io->cache_part, tshi_load_cache_path(io, "", digest)) == 0) return;
        tshi_load_unkept(keep, strerror(errno));
    }
    (void)remove(io->cache_part);
}
