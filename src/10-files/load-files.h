/* ========================================================================== */
/* >>load-files                                  MARK: - load-files (private) */
/* Finds the files that a path stands for; reads their headers and bytes.     */
/* Needs: >>io-save >>io-header.                                              */
/* ========================================================================== */

/* Every rank reads the files itself: headers, then the bytes of its shards. With .broadcast, rank 0
 * reads them for all. tshi_load_all has two halves: tshi_load_check compares the headers with the
 * model, and the ranks agree that all is well; only then are values changed, in the order of the
 * files. */

/* -- opening files and reading their bytes ------------------------------------ */

enum { TSHI_LOAD_AHEAD = 1 << 16 }; /* bytes that tshi_load_read_run reads ahead */

#if TSHI_POSIX
/* Does what pread does. Uses lseek and read where pread is not declared, since the program has not
 * asked for POSIX.1-2008 (_POSIX_C_SOURCE). */
static ssize_t tshi_load_pread(int file, void *to, size_t bytes, off_t at) {
#if defined(_POSIX_C_SOURCE) && _POSIX_C_SOURCE >= 200809L
    return pread(file, to, bytes, at);
#else
    return lseek(file, at, SEEK_SET) == at ? read(file, to, bytes) : -1;
#endif
}
#endif

/* Reads at most `bytes` bytes from position `at` of the open file, fewer only at its end or after
 * an error. Returns their number. */
static size_t tshi_load_read_file(tshi_io *io, int64_t at, char *to, size_t bytes) {
    size_t got = 0;
#if TSHI_POSIX
    const int fits = (int64_t)(off_t)at == at; /* 0: an off_t of 32 bits cannot hold `at` */
    ssize_t n = fits ? 1 : -1;
    if (!fits) errno = EOVERFLOW;
    while (got < bytes && n > 0) {
        n = tshi_load_pread(fileno(io->file), to + got, bytes - got, (off_t)at + (off_t)got);
        if (n > 0) got += (size_t)n;
        if (n < 0 && errno == EINTR) n = 1; /* interrupted by a signal: try again */
    }
    io->unreadable = n < 0;
#else
    /* no seek if the last read ended here */
    if (at != io->place && !tshi_file_seek(io->file, at)) return 0;
    got = fread(to, 1, bytes, io->file);
    io->unreadable = ferror(io->file) != 0;
#endif
    io->place = at + (int64_t)got;
    return got;
}

/* Reads `bytes` bytes from position `at` of the open file, or by the user's .read_at (io->reader).
 * Returns 0 if the file has fewer bytes, or on an error. */
static int tshi_load_read(tshi_io *io, int64_t at, void *to, size_t bytes) {
    errno = 0;
    if (io->reader) {
        const int64_t n = io->reader->read_at(at, to, (int64_t)bytes, io->reader->user);
        io->unreadable = n < 0 || n > (int64_t)bytes;
        io->place = at + (io->unreadable ? 0 : n);
        return n == (int64_t)bytes;
    }
    return tshi_load_read_file(io, at, (char *)to, bytes) == bytes;
}

/* Sets an error after a failed read: a system error or, if the file ended too early, one that says
 * `what`. Returns 0. */
static int tshi_load_read_error(const tshi_io *io, const char *what) {
    if (io->unreadable) return tshi_io_system_error(io, "cannot be read");
    return tshi_io_fail(io, TSH_ERR_IO, "is no %s: %s", tshi_io_form(io), what);
}

/* Other file formats: the first bytes of such a file, and a description for the error. */
static const tshi_io_pair tshi_load_forms[] = {
    {"{", "JSON text, such as the index of a sharded checkpoint, whose name must end with .json"},
    {"PK\3\4", "a zip archive, as torch.save writes (safetensors.torch.save_file converts it)"},
    {"\x80\2", "a pickle, as torch.save writes (safetensors.torch.save_file converts it)"},
    {"\x80\4", "a Python pickle"},
    {"GGUF", "a GGUF file"},
    {"\x93NUMPY", "a NumPy array"},
    {"\x89HDF", "an HDF5 file"},
    {"<", "HTML or XML, such as the page of a failed download"},
    {"version https://git-lfs", "a git-lfs pointer (`git lfs pull` fetches the file)"},
};

/* Returns 1 and sets an error if the file is recognised as another format, a text, or empty; else
 * 0. */
static int tshi_load_foreign(tshi_io *io) {
    const size_t forms = sizeof tshi_load_forms / sizeof tshi_load_forms[0];
    unsigned char start[32];
    size_t i, n, printable = 0; /* n: bytes read; printable: number of text characters among them */
    memset(start, 0, sizeof start);
    (void)tshi_load_read(io, 0, start, sizeof start);
    n = (size_t)io->place;
    if (io->unreadable) return 0;
    for (i = 0; i < forms; i++)
        if (memcmp(start, tshi_load_forms[i].name, strlen(tshi_load_forms[i].name)) == 0)
            return !tshi_io_wrong_kind(io, tshi_load_forms[i].text);
    for (i = 0; i < n; i++)
        printable += (start[i] >= ' ' && start[i] < 127) || (start[i] >= '\t' && start[i] <= '\r');
    return printable == n && !tshi_io_wrong_kind(io, n ? "a text" : "an empty file");
}

/* Returns a hash that identifies the open file and its version: of inode, size and time of the last
 * change; 0: unknown. If it changes while the file is read, another program has written to the file
 * in place, which tsh_save never does. Where times count whole seconds, such a write may go
 * unnoticed. Sets *changed to the file's ctime in seconds, which every later change moves, even one
 * that sets the file's mtime back; 0: unknown, or the file has changed in the last two seconds. */
static uint64_t tshi_load_stamp(const tshi_io *io, int64_t *changed) {
    *changed = 0;
#if TSHI_POSIX
    struct stat info;
    int64_t facts[4] = {0, 0, 0, 0};
    if (!io->file || fstat(fileno(io->file), &info) != 0) return 0;
    facts[0] = (int64_t)info.st_ino;
    facts[1] = (int64_t)info.st_size;
    facts[2] = (int64_t)info.st_mtime;
#if defined(__linux__) && defined(st_mtime) /* st_mtim is hidden with -std=c99: seconds must do */
    facts[3] = (int64_t)info.st_mtim.tv_nsec;
#endif
    if (time(NULL) - info.st_ctime >= 2) *changed = (int64_t)info.st_ctime;
    return tshi_rng_hash(0, facts, sizeof facts);
#else
    (void)io;
    return 0;
#endif
}

/* Closes the open file. Returns 0 and sets an error if the file was written to since it was
 * opened. */
static int tshi_load_leave(tshi_io *io) {
    int64_t changed;
    const int same = !io->open || tshi_load_stamp(io, &changed) == io->open->stamp;
    if (io->file) (void)fclose(io->file);
    io->file = NULL;
    io->open = NULL;
    return same || tshi_io_fail(io, TSH_ERR_IO, "was written to while it was read; load it again");
}

/* Opens the file of `source`, unless it is open already, and closes the one that was open: a model
 * may have more files than a process may open. The stream is unbuffered: a buffer would read more
 * than is asked for. Returns 0 and sets an error if the file cannot be opened, or is no longer the
 * one whose header was read. */
static int tshi_load_use(tshi_io *io, tshi_io_source *source) {
    const char *kind;
    uint64_t stamp;
    if (io->open == source) return 1;
    if (!tshi_load_leave(io)) return 0;
    io->path = source->path;
    if (io->reader) io->open = source;
    if (io->reader) return 1;
    io->file = tshi_file_open(source->path, &kind);
    if (kind) return tshi_io_wrong_kind(io, kind);
    if (!io->file)
        return tshi_io_system_error(io, io->map && !io->index
                                            ? "is named by the index and cannot be opened"
                                            : "cannot be opened");
    (void)setvbuf(io->file, NULL, _IONBF, 0);
    io->place = 0;
    io->open = source;
    stamp = tshi_load_stamp(io, &source->changed);
    if (source->data && stamp != source->stamp) io->open = NULL;
    source->stamp = stamp;
    return io->open ||
           tshi_io_fail(io, TSH_ERR_IO, "was replaced while it was read; load it again");
}

/* Reads and checks the header of the open file, checks that the file ends with the last value,
 * and sets *data to the position of the first one. Returns 0 and sets an error if something is
 * wrong. */
static int tshi_load_header(tshi_io *io, int64_t *data) {
    unsigned char length[8], byte; /* byte: read only to learn where the file ends */
    char what[TSHI_TEXT_SIZE];
    uint64_t value;
    size_t n, max_entries, max_pairs; /* n: bytes of the header */
    if (!tshi_load_read(io, 0, length, sizeof length))
        return tshi_load_foreign(io) ? 0
                                     : tshi_load_read_error(io, "it ends within the first 8 bytes");
    value = tshi_module_load_word(length, 0);
    (void)snprintf(what, sizeof what, "its header would have %llu bytes",
                   (unsigned long long)value);
    if (value < 2 || value > TSHI_IO_HEADER || !tshi_load_read(io, 7 + (int64_t)value, &byte, 1))
        return tshi_load_foreign(io) ? 0 : tshi_load_read_error(io, what);
    n = (size_t)value;          /* fits a size_t: at most TSHI_IO_HEADER */
    *data = 8 + (int64_t)value; /* values follow the header */
    /* Upper limits of the numbers of tensors and of metadata's keys: as many as fit into n bytes,
     * plus one in which parsing ends with an error. The shortest tensor is
     * "":{"dtype":"U8","shape":[],"data_offsets":[0,0]}, the shortest key and text are "":"", */
    max_entries = n / 49 + 1;
    max_pairs = n / 6 + 1;
    io->text = io->at = (char *)tshi_mem_arena_alloc(io->ctx, &io->arena, n + 1);
    io->entry = (tshi_io_entry *)tshi_mem_arena_alloc(io->ctx, &io->arena,
                                                      max_entries * sizeof *io->entry);
    io->pair = (tshi_io_pair *)tshi_mem_arena_alloc(io->ctx, &io->arena,
                                                    max_pairs * sizeof *io->pair);
    if (!io->text || !io->entry || !io->pair) return 0;
    if (!tshi_load_read(io, 8, io->text, n))
        return tshi_load_read_error(io, "its header is cut off");
    tshi_io_hash(io, io->text, n); /* text[n] is NUL: the arena is zeroed */
    tshi_io_read_entries(io, n);
    if (io->ctx->error.code != TSH_OK || !tshi_io_check_entries(io)) return 0;
    if (io->bytes && !tshi_load_read(io, *data + io->bytes - 1, &byte, 1))
        return tshi_load_read_error(io, "its values are cut off");
    if (tshi_load_read(io, *data + io->bytes, &byte, 1))
        return tshi_load_read_error(io, "something follows its values");
    return 1;
}

/* -- finding the files that a path stands for --------------------------------- */

/* Returns the path of file `name` in a folder, given as the first `folder` characters of io->given.
 * Returns NULL and sets an error if there is no memory. */
static const char *tshi_load_join(tshi_io *io, size_t folder, const char *name) {
    const size_t size = folder + strlen(name) + 2;
    char *path = (char *)tshi_mem_arena_alloc(io->ctx, &io->arena, size);
    const int slash = folder && io->given[folder - 1] != '/';
    if (path)
        (void)snprintf(path, size, "%.*s%s%s", (int)folder, io->given, slash ? "/" : "", name);
    return path;
}

/* Allocates io->source for `count` files. Returns 0 and sets an error if there is no memory. */
static int tshi_load_sources(tshi_io *io, size_t count) {
    io->source = (tshi_io_source *)tshi_mem_arena_alloc(io->ctx, &io->arena,
                                                        count * sizeof *io->source);
    return io->source != NULL;
}

/* Makes the file at a path the only one to load from (io->source). */
static void tshi_load_single(tshi_io *io, const char *path) {
    if (!path || !tshi_load_sources(io, 1)) return;
    io->source[0].path = path;
    io->sources = 1;
}

/* Parses an index of n characters, {"metadata": {..}, "weight_map": {"tensor": "file", ..}}, into
 * io->map. */
static void tshi_load_parse_index(tshi_io *io, size_t n) {
    const char *end = io->at + n;
    int more, maps = 0;
    tshi_io_skip(io);
    for (more = tshi_io_open(io, "{}", "there is no {"); more; more = tshi_io_next(io, '}')) {
        if (strcmp(tshi_io_key(io), "weight_map") != 0)
            tshi_io_skip_value(io);
        else if (maps++)
            (void)tshi_io_bad(io, "weight_map is there twice");
        else
            tshi_io_read_pairs(io, "weight_map is no object");
    }
    tshi_io_skip(io);
    if (io->at != end) (void)tshi_io_bad(io, "something follows the last }");
    if (!maps) (void)tshi_io_bad(io, "there is no weight_map");
}

/* Reads the text of the open index and parses it into io->map. Returns 0 and sets an error if it is
 * not an index. */
static int tshi_load_read_index(tshi_io *io) {
    size_t quotes = 0, i;
    long n;
    errno = 0;
    if (fseek(io->file, 0, SEEK_END) != 0 || (n = ftell(io->file)) < 0)
        return tshi_io_system_error(io, "cannot be read");
    io->place = n;
    if (n > TSHI_IO_HEADER)
        return tshi_io_fail(io, TSH_ERR_IO,
                            "is no index of safetensors files: it has %ld bytes, more than %d", n,
                            (int)TSHI_IO_HEADER);
    io->text = io->at = (char *)tshi_mem_arena_alloc(io->ctx, &io->arena, (size_t)n + 1);
    if (!io->text) return 0;
    if (!tshi_load_read(io, 0, io->text, (size_t)n))
        return tshi_load_read_error(io, "it became shorter while it was read");
    tshi_io_hash(io, io->text, (size_t)n);
    for (i = 0; i < (size_t)n; i++) quotes += io->text[i] == '"';
    io->pairs = 0;
    /* space for the pairs of tensor and file: each has four quotes; one more for a last, incomplete
     * pair */
    io->map = io->pair = (tshi_io_pair *)tshi_mem_arena_alloc(io->ctx, &io->arena,
                                                              (quotes / 4 + 1) * sizeof *io->pair);
    if (!io->map) return 0;
    tshi_load_parse_index(io, (size_t)n);
    io->maps = io->pairs;
    return io->ctx->error.code == TSH_OK;
}

/* Compares two tensors of an index by the names of their files; for qsort. */
static int tshi_load_by_file(const void *a, const void *b) {
    return strcmp(((const tshi_io_pair *)a)->text, ((const tshi_io_pair *)b)->text);
}

/* Sets io->source to the files that io->map names. They must be in the folder given as the first
 * `folder` characters of io->given, or below it. Returns 0 and sets an error if one is not, or if a
 * tensor is listed twice. */
static int tshi_load_map_files(tshi_io *io, size_t folder) {
    char quote[TSHI_IO_QUOTE];
    size_t i, count = 0; /* count: number of files */
    for (i = 0; i < io->maps; i++) {
        const char *file = tshi_file_below(io->map[i].text);
        if (!file)
            return tshi_io_fail(io, TSH_ERR_IO,
                                "places a tensor in \"%s\", which is no name of a file beside it",
                                tshi_io_quote(io->map[i].text, quote));
        io->map[i].text = file;
    }
    qsort(io->map, io->maps, sizeof *io->map, tshi_load_by_file);
    for (i = 0; i < io->maps; i++) {
        count += !i || tshi_load_by_file(&io->map[i - 1], &io->map[i]) != 0;
    }
    if (!count) return tshi_io_fail(io, TSH_ERR_IO, "lists no tensors");
    if (!tshi_load_sources(io, count)) return 0;
    for (i = 0; i < io->maps; i++) {
        if (i && tshi_load_by_file(&io->map[i - 1], &io->map[i]) == 0) continue;
        io->source[io->sources].path = tshi_load_join(io, folder, io->map[i].text);
        io->source[io->sources].file = io->map[i].text;
        if (!io->source[io->sources++].path) return 0;
    }
    return tshi_io_sort_names(io, io->map, io->maps, sizeof *io->map, "is there twice");
}

/* Reads the open index, closes it and sets io->source to its files, which are below the folder
 * given as the first `folder` characters of io->given. Returns 0 and sets an error if something is
 * wrong. */
static int tshi_load_take_index(tshi_io *io, size_t folder) {
    return tshi_load_read_index(io) && tshi_load_leave(io) && tshi_load_map_files(io, folder);
}

/* Sets io->source to the files of the index at a path, which is io->given. */
static void tshi_load_index(tshi_io *io, const char *path) {
    tshi_io_source index;
    const char *slash = path ? strrchr(path, '/') : NULL;
    memset(&index, 0, sizeof index);
    index.path = path;
    if (!path) return;
    io->index = 1; /* errors now speak of an index */
    if (tshi_load_use(io, &index))
        (void)tshi_load_take_index(io, slash ? (size_t)(slash - path) + 1 : 0);
    io->index = 0;
    if (io->open == &index) (void)tshi_load_leave(io); /* an error has left the index open */
}

/* Sets io->source to all *.safetensors of the folder io->given, sorted by name. Returns 0 if there
 * are none, or if the system is not a POSIX one. */
static int tshi_load_list(tshi_io *io) {
#if TSHI_POSIX
    static const char end[] = ".safetensors";
    const size_t folder = strlen(io->given), tail = sizeof end - 1;
    int pass, count = 0, n;
    for (pass = 0; pass < 2; pass++) { /* pass 0 counts the files, pass 1 stores them */
        struct dirent *entry;
        DIR *list = opendir(io->given);
        for (n = 0; list && (entry = readdir(list)) != NULL;) {
            const size_t length = strlen(entry->d_name);
            if (length <= tail || entry->d_name[0] == '.' ||
                strcmp(entry->d_name + length - tail, end) != 0)
                continue;
            if (pass && n < count) io->source[n].path = tshi_load_join(io, folder, entry->d_name);
            n++;
        }
        if (list) (void)closedir(list);
        if (pass) io->sources = n < count ? n : count;
        if (!pass && !n) return 0;
        if (!pass && !tshi_load_sources(io, (size_t)n)) return 1;
        count = n;
    }
    if (io->ctx->error.code == TSH_OK) /* else some paths may be NULL: no memory */
        qsort(io->source, (size_t)io->sources, sizeof *io->source, tshi_io_by_name);
    return 1;
#else
    (void)io;
    return 0;
#endif
}

/* Sets io->source to the files of the folder io->given: model.safetensors; without it, as in
 * transformers, the files of model.safetensors.index.json; without both, all *.safetensors. */
static void tshi_load_folder(tshi_io *io) {
    static const char *const names[] = {"model.safetensors", "model.safetensors.index.json"};
    int i;
    for (i = 0; i < 2; i++) {
        const char *path = tshi_load_join(io, strlen(io->given), names[i]), *kind = NULL;
        FILE *file = path ? tshi_file_open(path, &kind) : NULL;
        if (!path) return;
        if (!file && !kind) continue;
        if (file) (void)fclose(file); /* only looked for: tshi_load_use opens it */
        if (!i) tshi_load_single(io, path);
        if (i) io->given = path;
        if (i) tshi_load_index(io, path);
        return;
    }
    if (!tshi_load_list(io))
        (void)tshi_io_fail(io, TSH_ERR_IO,
                           "is a folder without model.safetensors, model.safetensors.index.json or "
                           "other files *.safetensors");
}

/* Sets io->source to the files that io->path stands for: a file, an index or a folder. */
static void tshi_load_find_files(tshi_io *io) {
    const char *kind = tshi_file_kind(io->path), *end = strrchr(io->path, '.');
    if (io->reader)
        tshi_load_single(io, io->path);
    else if (kind && strcmp(kind, "a folder") == 0)
        tshi_load_folder(io);
    else if (end && strcmp(end, ".json") == 0)
        tshi_load_index(io, io->path);
    else
        tshi_load_single(io, io->path);
}

/* -- collecting the tensors of all files --------------------------------------- */

/* Checks that each file holds exactly the tensors that the index lists for it, apart from those of
 * .ignore. Returns 0 and sets an error if not. Sets .text of each io->map entry that was found to
 * NULL. */
static int tshi_load_check_index(tshi_io *io) {
    char quote[TSHI_IO_QUOTE], other[TSHI_IO_QUOTE];
    size_t i, e;
    for (i = 0; i < (size_t)io->sources; i++) {
        const tshi_io_source *source = &io->source[i];
        for (e = 0; e < source->entries; e++) {
            const char *name = source->entry[e].name;
            tshi_io_pair *pair = (tshi_io_pair *)bsearch(&name, io->map, io->maps, sizeof *io->map,
                                                         tshi_io_by_name);
            if (pair && pair->text && strcmp(pair->text, source->file) == 0) {
                pair->text = NULL; /* marks the entry as found */
            } else if (!tshi_io_ignored(io, name)) {
                io->path = source->path;
                return tshi_io_fail(io, TSH_ERR_IO, "holds \"%s\", which the index %s%s%s",
                                    tshi_io_quote(name, quote),
                                    pair ? "places in \"" : "does not list",
                                    !pair        ? ""
                                    : pair->text ? tshi_io_quote(pair->text, other)
                                                 : "another file",
                                    pair ? "\"" : "");
            }
        }
    }
    for (i = 0; i < io->maps; i++)
        if (io->map[i].text && !tshi_io_ignored(io, io->map[i].name))
            return tshi_io_fail(io, TSH_ERR_IO, "places \"%s\" in \"%s\", which lacks it",
                                tshi_io_quote(io->map[i].name, quote),
                                tshi_io_quote(io->map[i].text, other));
    return 1;
}

/* Sorts the tensors of all files by name. Returns 0 and sets an error if two have the same name. */
static int tshi_load_sort(tshi_io *io) {
    char first[TSHI_IO_QUOTE], second[TSHI_IO_QUOTE];
    size_t i;
    qsort(io->entry, io->entries, sizeof *io->entry, tshi_io_by_name);
    for (i = 1; i < io->entries; i++) {
        const tshi_io_entry *a = &io->entry[i - 1], *b = &io->entry[i];
        if (tshi_io_by_name(a, b) != 0) continue;
        return tshi_io_fail(io, TSH_ERR_IO,
                            "holds one tensor twice: \"%s\" in \"%.160s\" and \"%s\" in \"%.160s\"",
                            tshi_io_quote(a->own, first), io->source[a->source].path,
                            tshi_io_quote(b->own, second), io->source[b->source].path);
    }
    return 1;
}

/* Reads the headers of all files and collects their tensors, renamed and without ignored ones, in
 * io->entry. Returns 0 and sets an error if a header is wrong, or two files contradict each
 * other. */
static int tshi_load_headers(tshi_io *io) {
    size_t e, count = 0;
    int64_t bytes = 0;
    int i;
    for (i = 0; i < io->sources; i++) {
        tshi_io_source *source = &io->source[i];
        io->entries = io->pairs = 0;
        if (!tshi_load_use(io, source) || !tshi_load_header(io, &source->data)) return 0;
        source->entry = io->entry;
        source->entries = io->entries;
        source->pair = io->pair;
        source->pairs = io->pairs;
        count += io->entries;
        bytes += io->bytes;
    }
    io->bytes = bytes;
    io->path = io->given;
    if (io->map && !tshi_load_check_index(io)) return 0;
    io->entries = 0;
    io->entry = (tshi_io_entry *)tshi_mem_arena_alloc(io->ctx, &io->arena,
                                                      count * sizeof *io->entry);
    if (!io->entry) return 0;
    for (i = 0; i < io->sources; i++)
        for (e = 0; e < io->source[i].entries; e++) {
            tshi_io_entry *entry = &io->entry[io->entries];
            if (tshi_io_ignored(io, io->source[i].entry[e].name)) continue;
            *entry = io->source[i].entry[e];
            entry->source = i;
            entry->own = entry->name;
            entry->name = tshi_io_rename(io, entry->own);
            io->entries++;
        }
    return io->ctx->error.code == TSH_OK && tshi_load_sort(io);
}
