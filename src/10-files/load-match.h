/* ========================================================================== */
/* >>load-match                                  MARK: - load-match (private) */
/* Matches the model's tensors with those of the files.                       */
/* Everything is checked here before any value of the model changes.          */
/* Needs: >>load-files.                                                       */
/* ========================================================================== */

/* Returns the struct whose first field, a name, is prefix + name, out of n structs of `width` bytes
 * that are sorted by name; NULL: there is none. */
static void *tshi_load_find(const void *base, size_t n, size_t width, const char *prefix,
                            const char *name) {
    char key[TSHI_IO_NAME];
    const char *wanted = key; /* &wanted: a struct that begins with a name */
    (void)snprintf(key, sizeof key, "%s%s", prefix, name);
    return bsearch(&wanted, base, n, width, tshi_io_by_name);
}

/* Returns the text of the key prefix + name from the metadata of the first file that has it; NULL:
 * no file has. */
static const char *tshi_load_metadata(const tshi_io *io, const char *prefix, const char *name) {
    const tshi_io_pair *pair = NULL;
    int i;
    for (i = 0; i < io->sources && !pair; i++)
        pair = (const tshi_io_pair *)tshi_load_find(io->source[i].pair, io->source[i].pairs,
                                                    sizeof *pair, prefix, name);
    return pair ? pair->text : NULL;
}

/* Sets count->read from the metadata. Returns 0 and sets an error if the counter is missing or is
 * no number. */
static int tshi_load_count(const tshi_io *io, tshi_io_count *count) {
    const char *text = tshi_load_metadata(io, count->prefix, count->name);
    const char *end = text ? tshi_io_digits(text, UINT64_MAX, &count->read) : NULL;
    if (end && end > text && !*end) return 1; /* the text is all digits */
    count->read = 0;                          /* the value of an optional counter that is missing */
    if (!text && count->optional) return 1;
    return tshi_io_fail(io, TSH_ERR_IO, "has no whole number as \"%s%.128s\"", count->prefix,
                        count->name);
}

/* Returns the number of the replica in the files whose state this rank loads: dp.rank modulo the
 * number of replicas in the files; 0 without a tsh_outer. */
static int tshi_load_replica(const tshi_io *io) {
    const char *text = io->optim && io->optim->outer
                           ? tshi_load_metadata(io, "tshard.outer.", "replicas")
                           : NULL;
    uint64_t replicas = 0;
    if (text) (void)tshi_io_digits(text, INT_MAX, &replicas);
    return replicas ? io->ctx->dp.rank % (int)replicas : 0;
}

/* Replaces the optimiser's counters that were read, those of replica 0, by those of this rank's
 * replica. Returns 0 and sets an error if the files lack one. */
static int tshi_load_replica_counts(const tshi_io *io) {
    const int replica = tshi_load_replica(io);
    char prefix[96];
    for (int i = io->generators; replica && i < io->counts; i++) {
        tshi_io_count own = io->count[i];
        if (strncmp(own.prefix, "tshard.optim.", 13) != 0) continue;
        (void)snprintf(prefix, sizeof prefix, "tshard.replica.%d.%s", replica, own.prefix + 7);
        own.prefix = prefix;
        if (!tshi_load_count(io, &own)) return 0;
        io->count[i].read = own.read;
    }
    return 1;
}

/* Returns 1 if there is no tsh_outer, or if it can go on with the counters read; with a file that
 * has none of a tsh_outer, it begins anew. Returns 0 and sets an error if changes were on their way
 * (.delay) and would be due at other steps than before. */
static int tshi_load_check_outer(tshi_io *io) {
    const tsh_outer *outer = io->optim ? io->optim->outer : NULL;
    const tshi_io_count *count = io->count;
    if (!outer) return 1;
    while (count->value != (const uint64_t *)(const void *)&outer->saved[0]) count++;
    for (int i = 0; i < io->items; i++) /* a file with a tsh_outer must have these */
        if (io->item[i].prefix == tshi_io_moments[TSHI_IO_OUTER_WEIGHT] ||
            io->item[i].prefix == tshi_io_moments[TSHI_IO_OUTER_MOMENT])
            io->item[i].optional = !count[0].read;
    if (!count[0].read || (!count[2].read && !outer->desc.delay)) return 1;
    for (int i = 0; i < 3; i++)
        if (count[i].read != (uint64_t)outer->saved[i])
            return tshi_io_fail(io, TSH_ERR_ARGUMENT,
                                "has changes on their way, sent with .every %lld, .fragments %lld, "
                                ".delay %lld; the tsh_outer has %lld, %lld and %lld",
                                (long long)count[0].read, (long long)count[1].read,
                                (long long)count[2].read, (long long)outer->saved[0],
                                (long long)outer->saved[1], (long long)outer->saved[2]);
    return 1;
}

/* Reads the counters of the random generators, which files of other programs lack, and those of the
 * optimiser if there is one. Returns 0 and sets an error if something is wrong. */
static int tshi_load_counts(tshi_io *io) {
    const char *kind = tshi_load_metadata(io, "tshard.", "optim");
    int i = tshi_load_metadata(io, "tshard.", "seed") ? 0 : io->generators;
    char own[TSHI_TEXT_SIZE]; /* the kinds of the optimiser */
    if (io->optim && !kind)
        return tshi_io_fail(io, TSH_ERR_ARGUMENT,
                            "holds no optimiser's state, the optimiser is %s; NULL for it loads "
                            "the parameters alone",
                            tshi_optim_kind(io->optim, own));
    if (io->optim && strcmp(kind, tshi_optim_kind(io->optim, own)) != 0)
        return tshi_io_fail(io, TSH_ERR_ARGUMENT,
                            "holds the state of \"%.64s\", the optimiser is %s", kind, own);
    if (io->ema && !tshi_load_metadata(io, "tshard.ema.", "updates"))
        return tshi_io_fail(io, TSH_ERR_ARGUMENT,
                            "holds no averages of weights; without .ema the parameters are loaded "
                            "alone, of which tsh_ema_update then makes the first averages");
    for (; i < io->counts; i++)
        if (!tshi_load_count(io, &io->count[i])) return 0;
    return tshi_load_replica_counts(io) && tshi_load_check_outer(io);
}

/* Returns 1 if the files must hold this tensor of the model. That is so for a parameter, unless it
 * is A or B of an adapter of which the files have nothing, as those of a base model; and for a
 * moment of a parameter that was updated, unless the optimiser may have been saved without
 * momentum. */
static int tshi_load_required(const tshi_io *io, const tshi_io_item *item) {
    int i = 0;
    if (item->moment) return !item->optional && item->steps->read > 0;
    if (!item->of) return 1;
    while (i < io->items && !(io->item[i].entry && io->item[i].of &&
                              strcmp(io->item[i].of, item->of) == 0))
        i++;
    return i < io->items;
}

/* Returns the dtype of a tensor of the files; TSH_DTYPE_DEFAULT: tshi_dtypes has none for it. */
static tsh_dtype tshi_load_dtype(const tshi_io *io, const tshi_io_entry *entry) {
    const char *blocks = tshi_load_metadata(io, tshi_io_blocks, entry->own);
    int dtype = TSHI_DTYPES - 1;
    for (; dtype > 0; dtype--) {
        const tshi_dtype *row = &tshi_dtypes[dtype];
        if (strcmp(row->file, entry->dtype) == 0 &&
            (row->elements <= 1 || (blocks && strcmp(blocks, row->name) == 0)))
            break;
    }
    return (tsh_dtype)dtype;
}

/* Returns 1 if a tensor of the files has the shape of item, a tensor of the model. Returns 0 if not
 * or, with an error, if it is quantised and the item's shards do not consist of whole blocks. */
static int tshi_load_fits(const tshi_io *io, const tshi_io_item *item, const tshi_io_entry *entry) {
    const tsh_tensor *t = item->form;
    int d, same = entry->ndim == t->ndim;
    for (d = 0; d < t->ndim && same; d++) same = entry->dim[d] == tshi_io_dim(t, d, item->file);
    return same &&
           (!tshi_dtype_in_blocks(item->file) || tshi_tensor_check_blocks(t, io->op, item->file));
}

/* Matches item, a tensor of the model, with the tensor of the files that has its name
 * (item->entry), unless one of the two is matched already. plain 0: compares the whole name; 1: the
 * name without .prefix. */
static void tshi_load_match(const tshi_io *io, tshi_io_item *item, int plain) {
    const size_t n = strlen(io->prefix);
    tshi_io_entry *e;
    if (item->entry) return;
    if (plain && (!n || strncmp(item->path, io->prefix, n) != 0 || item->path[n] != '.')) return;
    e = (tshi_io_entry *)tshi_load_find(io->entry, io->entries, sizeof *e, item->prefix,
                                        item->path + (plain ? n + 1 : 0));
    if (!e || e->taken) return;
    e->taken = 1; /* matched with a tensor of the model */
    item->entry = e;
}

/* The files may hold a tied parameter, and its moments, under any of its names. Matches the tensors
 * under names other than param->path: such a tensor becomes item->entry, and the one that was
 * item->entry becomes its .twin, to be compared with it. Returns 0 and sets an error if there is no
 * memory. */
static int tshi_load_match_ties(tshi_io *io) {
    char path[2 * TSH_PATH_SIZE];
    tshi_walk at = {NULL, NULL, 0};
    while (tshi_module_step(io->root, &at)) {
        const char *module = at.module->path;
        int i, plain;
        (void)snprintf(path, sizeof path, "%s%s%s", module, *module ? "." : "",
                       at.module->param_name[at.slot]);
        if (strcmp(path, at.param->path) == 0) continue;
        for (i = 0; i < io->items; i++) {
            tshi_io_item *item = &io->item[i], other = *item;
            if (item->param != at.param) continue;
            other.path = tshi_io_name(io, path);
            if (!*other.path) return 0;
            other.entry = NULL;
            for (plain = 0; plain < 2; plain++) tshi_load_match(io, &other, plain);
            if (!other.entry) continue;
            io->entry[other.entry - io->entry].twin = item->entry;
            item->entry = other.entry;
        }
    }
    return io->ctx->error.code == TSH_OK;
}

/* Checks that the tensor of the files that is matched with item has its shape, and a dtype that
 * tsh_load converts. Returns 0 and sets an error if not. */
static int tshi_load_check_item(const tshi_io *io, tshi_io_item *item) {
    char theirs[TSHI_TEXT_SIZE], ours[TSHI_TEXT_SIZE], quote[TSHI_IO_QUOTE], dtype[TSHI_IO_QUOTE];
    const tsh_tensor *t = item->form;
    const tshi_io_entry *e = item->entry;
    int same, floating; /* same 1: shapes are equal; floating 1: both dtypes are floating */
    if (!e) return 1;   /* the files lack it: see tshi_load_match_all */
    item->file = tshi_load_dtype(io, e);
    same = tshi_load_fits(io, item, e);
    if (io->ctx->error.code != TSH_OK) return 0;
    floating = tshi_dtypes[item->file].floating && tshi_dtypes[item->dtype].floating;
    if (same && (item->file == item->dtype || item->file == tshi_io_own_dtype(item) ||
                 (floating && !io->strict)))
        return 1;
    (void)tsh_fail(
        io->ctx, same ? TSH_ERR_DTYPE : TSH_ERR_SHAPE,
        "%s: \"%s\" is %s %s in \"%.128s\", %s %s in the model%s", io->op,
        tshi_io_quote(e->own, quote), tshi_io_quote(e->dtype, dtype),
        tshi_tensor_sizes(e->dim, e->ndim < TSH_MAX_DIMS ? e->ndim : TSH_MAX_DIMS, theirs),
        io->source[e->source].path, tshi_dtypes[item->dtype].file,
        tshi_tensor_sizes(t->dim, t->ndim, ours),
        !same      ? ""
        : floating ? "; without .strict_dtype it is converted"
                   : "; only F32, F64, BF16 and F16 are converted to each other");
    return 0;
}

/* Returns 1 if a name in the files, without its first `moment` bytes ("optim.first." or nothing),
 * begins with .prefix and a dot, or .prefix is "". */
static int tshi_load_under(const tshi_io *io, const char *name, size_t moment) {
    const size_t n = strlen(io->prefix);
    return strncmp(name + moment, io->prefix, n) == 0 && (!n || name[moment + n] == '.');
}

/* Returns the length of the prefix of a moment, as in tshi_io_moments, with which the name begins:
 * "optim.first.", for example, or "optim.replica.2.first."; 0: there is none. */
static size_t tshi_load_moment(const char *name) {
    const int i = tshi_io_moment_of(name);
    size_t n = i < 0 ? 0 : strlen(tshi_io_moments[i]);
    for (int words = 0; i == TSHI_IO_REPLICA && words < 2; words++) {
        n += strcspn(name + n, ".");
        n += name[n] == '.';
    }
    return n;
}

/* Returns 1 if a tensor of the files is to be skipped: a moment if no optimiser is loaded, an
 * average if no averages are, what a tsh_outer keeps if there is none; what another replica has
 * (tshi_load_match_replica takes this one's); or, without .strict_names, a tensor whose name does
 * not begin with .prefix if others do. */
static int tshi_load_skips(const tshi_io *io, const char *name) {
    const size_t moment = tshi_load_moment(name);
    const int kind = tshi_io_moment_of(name);
    const int wanted = kind == TSHI_IO_AVERAGE   ? io->ema != NULL
                       : kind == TSHI_IO_REPLICA ? 0
                       : kind < TSHI_IO_AVERAGE  ? io->optim != NULL
                                                 : io->optim && io->optim->outer;
    return (moment && !wanted) ||
           (io->prefixed && !io->strict_names && !tshi_load_under(io, name, moment));
}

/* Returns the length of the prefix if name is "<prefix>.<path>"; else 0. */
static size_t tshi_load_prefix(const char *name, const char *path) {
    const size_t n = strlen(name), k = strlen(path);
    return n > k + 1 && name[n - k - 1] == '.' && strcmp(name + n - k, path) == 0 ? n - k - 1 : 0;
}

/* Writes, for an error, the name under which the files would have a path of the model: the last
 * pair of .rename that can make this path, and whose .from matches some tensor of the files, is
 * applied backwards; without one, the path itself. */
static void tshi_load_own_name(const tshi_io *io, const char *path, char *name, size_t size) {
    const size_t n = strlen(io->prefix);
    int pairs = 0;
    size_t e;
    if (n && !io->prefixed && strncmp(path, io->prefix, n) == 0 && path[n] == '.') path += n + 1;
    while (io->rename && io->rename[pairs].from) pairs++;
    for (; pairs-- > 0;) {
        const tsh_rename *pair = &io->rename[pairs];
        tshi_captures captures;
        captures.count = 0;
        if (!pair->to || !tshi_glob_into(pair->to, path, &captures)) continue;
        for (e = 0; e < io->entries; e++)
            if (strlen(io->entry[e].own) < TSHI_IO_NAME &&
                tshi_glob_match(pair->from, io->entry[e].own))
                break;
        if (e == io->entries || !tshi_glob_replace(pair->from, &captures, name, size)) continue;
        return;
    }
    (void)snprintf(name, size, "%s", path);
}

/* Checks that files and model have the same tensors, apart from those that tshi_load_skips. Returns
 * 0 and sets an error if not. */
static int tshi_load_match_all(tshi_io *io) {
    const tshi_io_item *lacks = NULL; /* the model's first tensor that the files lack */
    const char *strange = NULL;       /* the name of the first tensor that the model lacks */
    char quote[TSHI_IO_QUOTE] = "", hint[TSHI_IO_QUOTE + 64] = "", own[TSHI_IO_NAME] = "";
    int i, plain, missing = 0; /* missing: number of the model's tensors that the files lack */
    size_t e, more = 0;        /* number of the files' tensors that the model lacks */
    /* prefix: length of a prefix that the files' names have and the model's lack; 0: none */
    size_t prefix = 0, found;
    for (e = 0; e < io->entries && !io->prefixed; e++)
        io->prefixed = tshi_load_under(io, io->entry[e].name, tshi_load_moment(io->entry[e].name));
    for (plain = 0; plain < 2; plain++)
        for (i = 0; i < io->items; i++) tshi_load_match(io, &io->item[i], plain);
    if (!tshi_load_match_ties(io)) return 0;
    for (i = 0; i < io->items; i++) {
        if (!tshi_load_check_item(io, &io->item[i])) return 0;
        if (io->item[i].entry || !tshi_load_required(io, &io->item[i])) continue;
        if (!missing++) lacks = &io->item[i]; /* keeps the first one, for the error */
    }
    for (e = 0; e < io->entries; e++) {
        const char *name = io->entry[e].name;
        if (io->entry[e].taken || tshi_load_skips(io, name)) continue;
        found = lacks && !prefix ? tshi_load_prefix(name, lacks->path) : 0;
        if (!more++ || found) strange = found ? name : io->entry[e].own;
        if (found) prefix = found;
    }
    if (!lacks && !strange) return 1; /* all tensors match */
    if (strange) (void)tshi_io_quote(strange, quote);
    if (lacks) tshi_load_own_name(io, lacks->path, own, sizeof own);
    if (!lacks)
        tsh_text_add(hint, sizeof hint, "; .ignore takes names of tensors that are no parameters");
    if (prefix)
        tsh_text_add(hint, sizeof hint, "; tsh_load_with takes .prefix = \"%.*s\"",
                     prefix < sizeof quote ? (int)prefix : (int)sizeof quote - 1, quote);
    return tshi_io_fail(
        io, TSH_ERR_ARGUMENT,
        "lacks %d of the model's tensors%s%s%.96s%s and has %llu that the model lacks%s%s%s%s",
        missing, lacks ? " (\"" : "", lacks ? lacks->prefix : "", own,
        lacks ? "\")" : "", (unsigned long long)more, strange ? " (\"" : "", strange ? quote : "",
        strange ? "\")" : "", hint);
}

/* Makes io->hash, which ranks compare, differ if they read different files. It covers the headers
 * already; those of tsh_save hold the hash of all values, which is enough. For other files, adds a
 * few bytes from the middle of every tensor, which training has probably changed. (Inode and date
 * would differ for copies.) Returns 0 and sets an error if a file cannot be read. */
static int tshi_load_sample(tshi_io *io) {
    unsigned char bytes[TSHI_IO_SAMPLE];
    int i;
    if (io->broadcast || (io->sources == 1 && tshi_load_metadata(io, "tshard.", "hash"))) return 1;
    for (i = 0; i < io->items; i++) {
        const tshi_io_entry *e = io->order[i]->entry;
        const int64_t n = e ? tshi_base_min(e->end - e->begin, TSHI_IO_SAMPLE) : 0;
        if (!n) continue;
        if (!tshi_load_use(io, &io->source[e->source])) return 0;
        if (!tshi_load_read(io, io->open->data + (e->begin + e->end - n) / 2, bytes, (size_t)n))
            return tshi_load_read_error(io, "it became shorter while it was read");
        tshi_io_hash(io, bytes, (size_t)n);
    }
    return 1;
}

/* Compares elements [from, from + n) of a tied parameter as the files have it under two names: of
 * item->entry and of twin. buffer: TSHI_IO_BUFFER bytes of scratch. Returns 0 and sets an error if
 * they differ or cannot be read. */
static int tshi_load_compare(tshi_io *io, const tshi_io_item *item, const tshi_io_entry *twin,
                             int64_t from, int64_t n, char *buffer) {
    const tshi_io_entry *const e[2] = {twin, item->entry};
    const tshi_dtype *row = &tshi_dtypes[item->file];
    const size_t bytes = tshi_dtype_bytes(item->file, n);
    char *at[2], quote[2][TSHI_IO_QUOTE];
    int64_t i;
    int k;
    for (k = 0; k < 2; k++) {
        at[k] = buffer + k * (TSHI_IO_BUFFER / 2);
        if (!tshi_load_use(io, &io->source[e[k]->source])) return 0;
        if (!tshi_load_read(io, io->open->data + e[k]->begin +
                                    (int64_t)tshi_dtype_bytes(item->file, from), at[k], bytes))
            return tshi_load_read_error(io, "it became shorter while it was read");
    }
    if (memcmp(at[0], at[1], bytes) == 0) return 1;
    for (k = 0; k < 2 && row->elements <= 1; k++) tshi_io_swap_bytes(at[k], n, (size_t)row->size);
    for (i = 0; i < n; i += row->elements > 1 ? row->elements : 1) {
        const size_t to = tshi_dtype_bytes(item->file, i);
        if (memcmp(at[0] + to, at[1] + to, (size_t)row->size) != 0) break;
    }
    io->path = io->given;
    return tshi_io_fail(io, TSH_ERR_ARGUMENT,
                        "holds one tied parameter under two names with different values: element "
                        "%lld of \"%s\" is %.9g, of \"%s\" %.9g; untie it in the model, or leave "
                        "out one name by .ignore",
                        (long long)(from + i), tshi_io_quote(e[0]->own, quote[0]),
                        tshi_dtype_get(item->file, at[0], i), tshi_io_quote(e[1]->own, quote[1]),
                        tshi_dtype_get(item->file, at[1], i));
}

/* Compares a tied parameter as the files have it under two names, item->entry and twin: shape,
 * dtype, and all values of this rank's shard (with .broadcast, of the whole tensor). Returns 0 and
 * sets an error if they differ or cannot be read. */
static int tshi_load_check_twin(tshi_io *io, const tshi_io_item *item, const tshi_io_entry *twin,
                                char *buffer) {
    const int64_t all = tsh_numel(item->form), step = TSHI_IO_BUFFER / 64;
    tshi_runs run = tshi_tensor_runs(item->form, io->ctx->tp.rank, 0, all);
    tshi_io_item other = *item;
    int64_t n;
    other.entry = twin;
    if (!tshi_load_check_item(io, &other)) return 0;
    if (other.file != item->file)
        return tshi_io_fail(io, TSH_ERR_DTYPE,
                            "holds one tied parameter under two names, \"%.96s\" in %s, \"%.96s\" "
                            "in %s; leave out one of them by .ignore",
                            twin->own, tshi_dtypes[other.file].file, item->entry->own,
                            tshi_dtypes[item->file].file);
    run.length = io->broadcast ? all : 0; /* 0: goes through this rank's shard instead */
    while (run.length > 0 || (!io->broadcast && tshi_tensor_next_run(&run)))
        for (; run.length > 0; run.global += n, run.length -= n) {
            n = tshi_base_min(run.length, step);
            if (!tshi_load_compare(io, item, twin, run.global, n, buffer)) return 0;
        }
    return 1;
}

/* Checks that the files hold the same values under all names of a tied parameter. Returns 0 and
 * sets an error if not. */
static int tshi_load_check_ties(tshi_io *io) {
    char *buffer = NULL;
    int i;
    for (i = 0; i < io->items; i++) {
        const tshi_io_item *item = &io->item[i];
        const tshi_io_entry *twin = item->entry ? item->entry->twin : NULL;
        if (twin && !buffer)
            buffer = (char *)tshi_mem_arena_alloc(io->ctx, &io->arena, TSHI_IO_BUFFER);
        for (; twin && (io->broadcast || !item->param->absent); twin = twin->twin)
            if (!buffer || !tshi_load_check_twin(io, item, twin, buffer)) return 0;
    }
    return 1;
}

/* Compares two tensors of the model by the place of their values in the files; for qsort. Those
 * that the files lack come last. Those with the same place keep the model's order. */
static int tshi_load_by_place(const void *a, const void *b) {
    const tshi_io_item *x = *(tshi_io_item *const *)a, *y = *(tshi_io_item *const *)b;
    const tshi_io_entry *p = x->entry, *q = y->entry;
    if (!p != !q) return p ? -1 : 1;
    if (p && p->source != q->source) return p->source < q->source ? -1 : 1;
    if (p && p->begin != q->begin) return p->begin < q->begin ? -1 : 1;
    return x < y ? -1 : x > y;
}

/* Fills io->order with all tensors to load, sorted so that files are read one after the other, each
 * from its beginning to its end. */
static void tshi_load_sort_items(tshi_io *io) {
    int i;
    for (i = 0; i < io->items; i++) io->order[i] = &io->item[i];
    qsort(io->order, (size_t)io->items, sizeof *io->order, tshi_load_by_place);
}

/* Replaces the tensors of the files that parameters and moments are matched with, those of the
 * first replica of a tsh_outer, by those of this rank's replica. Returns 0 and sets an error if
 * they do not fit. */
static int tshi_load_match_replica(tshi_io *io) {
    const int replica = tshi_load_replica(io);
    char prefix[64];
    for (int i = 0; replica && i < io->items; i++) {
        tshi_io_item *item = &io->item[i];
        const char *name = item->entry ? item->entry->name : NULL, *point;
        const tshi_io_entry *own;
        if (!name) continue;
        point = item->moment ? strchr(name, '.') + 1 : name; /* after "optim." */
        (void)snprintf(prefix, sizeof prefix, "%s%d.%s", tshi_io_moments[TSHI_IO_REPLICA], replica,
                       item->moment ? "" : "weight.");
        own = (const tshi_io_entry *)tshi_load_find(io->entry, io->entries, sizeof *own, prefix,
                                                    point);
        if (!own) continue; /* the same for all replicas, such as a frozen parameter */
        item->entry = own;
        if (!tshi_load_check_item(io, item)) return 0;
    }
    tshi_load_sort_items(io);
    return 1;
}

/* Allocates io->buffer: with .broadcast one buffer, two on rank 0; else a smaller one if values
 * must be converted. On rank 0 with .broadcast also allocates io->ahead, unless the user's .read_at
 * is used. Returns 0 and sets an error if there is no memory. */
static int tshi_load_prepare(tshi_io *io) {
    size_t bytes = io->broadcast ? TSHI_IO_BUFFER : 0;
    int i;
    if (io->broadcast && io->ctx->world.rank == 0) bytes *= 2;
    for (i = 0; i < io->items && !bytes; i++)
        if (io->item[i].entry && io->item[i].file != io->item[i].dtype) bytes = TSHI_IO_BUFFER / 4;
    if (bytes) io->buffer = (char *)tshi_mem_arena_alloc(io->ctx, &io->arena, bytes);
    if (bytes && !io->buffer) return 0;
    if (!io->broadcast || io->ctx->world.rank != 0 || io->reader) return 1;
    io->ahead = (char *)tshi_mem_arena_alloc(io->ctx, &io->arena, TSHI_LOAD_AHEAD);
    return io->ahead != NULL;
}

enum { TSHI_LOAD_SHARED = 4 }; /* int64 that tshi_load_share broadcasts per tensor */

/* With .broadcast, collective over the world. Rank 0 broadcasts what it found: for each tensor of
 * the model, whether the files have it, and its dtype, file and offset there; the counters; and
 * whether it has a .cache. An all-gather over the world tells which ranks are in the first replica,
 * and at which place of tp and pp (io->peer); an all-gather over pp tells which stages hold which
 * tensor (io->holds). */
static tsh_result tshi_load_share(tshi_io *io) {
    tsh_ctx *ctx = io->ctx;
    const int world = ctx->world.size, stages = ctx->pp.size, items = io->items;
    const int32_t place = ctx->dp.rank ? 0 : 1 + ctx->tp.rank + ctx->tp.size * ctx->pp.rank;
    int64_t *each = io->share, *counts = each + (int64_t)TSHI_LOAD_SHARED * items;
    int64_t *cached = counts + io->counts; /* 1: rank 0 has a .cache */
    int64_t *ones = cached + 1; /* lengths of the ranks' parts in an all-gather */
    int32_t *places = io->peer + world, *held = io->holds + (int64_t)stages * items;
    tsh_result result;
    int i;
    for (i = 0; i < items; i++, each += TSHI_LOAD_SHARED) {
        const tshi_io_entry *e = io->item[i].entry;
        each[0] = e != NULL;
        each[1] = (int64_t)io->item[i].file;
        each[2] = e ? e->source : 0;
        each[3] = e ? e->begin : 0;
        held[i] = !io->item[i].param->absent;
    }
    for (i = 0; i < io->counts; i++) counts[i] = (int64_t)io->count[i].read;
    *cached = io->cache != NULL;
    result = tsh_broadcast(&ctx->world, io->share, ones - io->share, TSH_I64, 0);
    io->cached = (int)*cached;
    for (i = 0; i < world; i++) ones[i] = 1;
    if (result == TSH_OK) result = tsh_allgather(&ctx->world, &place, places, ones, 1, TSH_I32);
    for (i = 0; i < world; i++)
        if (places[i]) io->peer[places[i] - 1] = i;
    for (i = 0; i < stages; i++) ones[i] = items;
    if (result == TSH_OK) result = tsh_allgather(&ctx->pp, held, io->holds, ones, 1, TSH_I32);
    if (tshi_error_comm(ctx, result, io->op) != TSH_OK || ctx->world.rank == 0) return result;
    for (i = 0, each = io->share; i < items; i++, each += TSHI_LOAD_SHARED) {
        io->item[i].file = (tsh_dtype)each[1];
        io->entry[i].source = (int)each[2];
        io->entry[i].begin = each[3];
        if (each[0]) io->item[i].entry = &io->entry[i];
    }
    for (i = 0; i < io->counts; i++) io->count[i].read = (uint64_t)counts[i];
    tshi_load_sort_items(io);
    return TSH_OK;
}

/* Allocates what tshi_load_share needs, and sets io->hash to a hash of the model's names, shapes
 * and dtypes. Returns 0 and sets an error if there is no memory. */
static int tshi_load_prepare_share(tshi_io *io) {
    tsh_ctx *ctx = io->ctx;
    const size_t items = (size_t)io->items, stages = (size_t)ctx->pp.size;
    const size_t ranks = (size_t)ctx->world.size;
    int i;
    io->share = (int64_t *)tshi_mem_arena_alloc(
        ctx, &io->arena,
        (TSHI_LOAD_SHARED * items + (size_t)io->counts + 1 + ranks) * sizeof(int64_t));
    io->peer = (int32_t *)tshi_mem_arena_alloc(ctx, &io->arena, 2 * ranks * sizeof(int32_t));
    io->holds = (int32_t *)tshi_mem_arena_alloc(ctx, &io->arena,
                                                (stages + 1) * items * sizeof(int32_t));
    if (ctx->world.rank > 0) /* one entry per tensor, filled in by tshi_load_share */
        io->entry = (tshi_io_entry *)tshi_mem_arena_alloc(ctx, &io->arena,
                                                          items * sizeof *io->entry);
    io->digest = (unsigned char *)tshi_mem_arena_alloc(
        ctx, &io->arena, (size_t)ctx->tp.size * items * TSHI_IO_DIGEST);
    io->kept = (int32_t *)tshi_mem_arena_alloc(ctx, &io->arena,
                                               (3 + ranks) * items * sizeof(int32_t));
    if (!io->share || !io->peer || !io->holds || !io->digest || !io->kept || (items && !io->entry))
        return 0;
    io->hash = 0;
    for (i = 0; i < io->items; i++) {
        const tshi_io_item *item = &io->item[i];
        tshi_io_hash(io, item->path, strlen(item->path));
        tshi_io_hash(io, item->form->dim, sizeof item->form->dim[0] * (size_t)item->form->ndim);
        tshi_io_hash(io, &item->dtype, sizeof item->dtype);
    }
    return 1;
}

/* Reads the headers and checks them against the model. Returns 0 and sets an error if they do not
 * fit. */
static int tshi_load_check_files(tshi_io *io) {
    const char *format; /* version of tshard's metadata; NULL: another program's file */
    if (!tshi_load_headers(io)) return 0;
    format = tshi_load_metadata(io, "tshard.", "format");
    if (format && strcmp(format, "1") != 0)
        return tshi_io_fail(io, TSH_ERR_UNSUPPORTED,
                            "is of tshard's format %.16s, this version reads 1", format);
    if (!tshi_load_counts(io) || !tshi_load_match_all(io) || !tshi_load_check_ties(io)) return 0;
    tshi_load_sort_items(io);
    return tshi_load_sample(io) && tshi_load_match_replica(io);
}

/* Does all that can fail before values change. Returns 0 and sets an error if something is
 * wrong. */
static int tshi_load_check(tshi_io *io) {
    if (tshi_tensor_any_recorded(io->ctx))
        (void)tsh_fail(io->ctx, TSH_ERR_STATE,
                       "%s: ops are recorded that use the old values; end the step first: "
                       "tsh_step_end",
                       io->op);
    if (io->ctx->error.code != TSH_OK || !tshi_io_list(io)) return 0;
    for (int i = 0; i < io->items; i++)
        if (io->item[i].param->flags & TSHI_MERGED)
            return tshi_error_zero(io->ctx, TSH_ERR_STATE,
                                   "%s: an adapter is merged into \"%s\"; first call "
                                   "tsh_lora_unmerge",
                                   io->op, io->item[i].param->path);
    if (io->broadcast && io->optim && io->optim->outer && io->ctx->dp.size > 1)
        return tshi_io_fail(io, TSH_ERR_UNSUPPORTED,
                            "is not loaded by .broadcast: it sends one state to all replicas, but "
                            "each replica of a tsh_outer has its own; let every rank read it");
    io->order = (tshi_io_item **)tshi_mem_arena_alloc(io->ctx, &io->arena,
                                                      (size_t)io->items * sizeof *io->order);
    if (!io->order) return 0;
    if ((!io->broadcast || io->ctx->world.rank == 0) && !tshi_load_check_files(io)) return 0;
    return tshi_load_prepare(io) && (!io->broadcast || tshi_load_prepare_share(io));
}
