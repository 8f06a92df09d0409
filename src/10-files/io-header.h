/* ========================================================================== */
/* >>io-header                                    MARK: - io-header (private) */
/* Reads and checks the header of a safetensors file; renames its tensors.    */
/* Needs: >>io-name >>io-json.                                                */
/* ========================================================================== */

/* The dtypes of the safetensors format whose values are whole bytes, to check sizes by. tsh_load
 * reads only those that are in tshi_dtypes too. A tensor that the model lacks may have any other
 * dtype. */
typedef struct tshi_io_type {
    const char *name;
    int64_t size; /* size of a value in bytes */
} tshi_io_type;
static const tshi_io_type tshi_io_types[] = {{"F32", 4}, {"F64", 8},     {"BOOL", 1},    {"U8", 1},
                                             {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1}, {"I16", 2},
                                             {"U16", 2}, {"F16", 2},     {"BF16", 2},    {"I32", 4},
                                             {"U32", 4}, {"I64", 8},     {"U64", 8}};

/* Returns the size in bytes of a value of the dtype called `name`; 0: unknown dtype. */
static int64_t tshi_io_dtype_size(const char *name) {
    int type = (int)(sizeof tshi_io_types / sizeof tshi_io_types[0]) - 1;
    while (type >= 0 && strcmp(name, tshi_io_types[type].name) != 0) type--;
    return type >= 0 ? tshi_io_types[type].size : 0;
}

/* Parses the JSON object of a tensor into entry: {"dtype": .., "shape": .., "data_offsets": ..},
 * each key once, in any order. */
static void tshi_io_read_entry(tshi_io *io, tshi_io_entry *entry) {
    enum { DTYPE = 1, SHAPE = 2, OFFSETS = 4, ALL = 7 };
    int64_t offset[2] = {0, 0};
    int seen = 0, n = 0; /* seen: bits of the keys read so far; n: number of offsets */
    if (!tshi_io_skip_char(io, '{')) (void)tshi_io_bad(io, "a tensor is no object");
    do {
        const char *key = tshi_io_key(io);
        const int which = strcmp(key, "dtype") == 0          ? DTYPE
                          : strcmp(key, "shape") == 0        ? SHAPE
                          : strcmp(key, "data_offsets") == 0 ? OFFSETS
                                                             : 0;
        if (!which || (seen & which)) (void)tshi_io_bad(io, "a key is unknown or twice there");
        seen |= which;
        if (which == DTYPE) entry->dtype = tshi_io_string(io);
        if (which == SHAPE) entry->ndim = tshi_io_numbers(io, entry->dim, TSH_MAX_DIMS);
        if (which == OFFSETS) n = tshi_io_numbers(io, offset, 2);
    } while (tshi_io_next(io, '}'));
    if (seen != ALL || n != 2)
        (void)tshi_io_bad(io, "a tensor lacks its dtype, shape or two data_offsets");
    entry->begin = offset[0];
    entry->end = offset[1];
}

/* Parses {"key": "text", ..}, the metadata or an index's weight_map, and appends it to io->pair.
 * `what` is the error if it is no object. */
static void tshi_io_read_pairs(tshi_io *io, const char *what) {
    int more = tshi_io_open(io, "{}", what);
    for (; more; more = tshi_io_next(io, '}')) {
        /* io->pair is long enough: tshi_load_header and tshi_load_read_index count what the text
         * can hold. */
        tshi_io_pair *pair = &io->pair[io->pairs++];
        pair->name = tshi_io_key(io);
        pair->text = tshi_io_string(io);
    }
}

/* Parses the whole header, n characters and a NUL from io->at, into io->entry and io->pair. */
static void tshi_io_read_entries(tshi_io *io, size_t n) {
    const char *end = io->at + n, *name;
    int more, metadata = 0; /* metadata: 1 after __metadata__ was read */
    /* the format allows no blanks before the { */
    if (*io->at != '{') (void)tshi_io_bad(io, "there is no {");
    for (more = tshi_io_open(io, "{}", ""); more; more = tshi_io_next(io, '}')) {
        name = tshi_io_key(io);
        if (strcmp(name, "__metadata__") != 0) {
            io->entry[io->entries].name = name; /* points into io->text */
            tshi_io_read_entry(io, &io->entry[io->entries++]);
        } else if (metadata++) {
            (void)tshi_io_bad(io, "__metadata__ is there twice");
        } else if (!tshi_io_null(io)) {
            tshi_io_read_pairs(io, "__metadata__ is no object");
        }
    }
    tshi_io_skip(io);
    if (io->at != end) (void)tshi_io_bad(io, "something follows the last }");
}

/* -- reading: checks of offsets, shapes and names ----------------------------- */

/* Compares two tensors of a file by the offsets of their values; for qsort. */
static int tshi_io_by_place(const void *a, const void *b) {
    const tshi_io_entry *x = (const tshi_io_entry *)a, *y = (const tshi_io_entry *)b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return x->end < y->end ? -1 : x->end > y->end;
}

/* Sets an error: the tensor `name` of the file is wrong, as `what` says. Returns 0. */
static int tshi_io_bad_entry(const tshi_io *io, const char *name, const char *what) {
    char quote[TSHI_IO_QUOTE];
    return tshi_io_fail(io, TSH_ERR_IO, "is no %s: \"%s\" %s", tshi_io_form(io),
                        tshi_io_quote(name, quote), what);
}

/* Sorts n structs of `width` bytes by their first field, a name. Returns 0 and sets the error
 * `twice` if a name occurs twice. */
static int tshi_io_sort_names(const tshi_io *io, void *base, size_t n, size_t width,
                              const char *twice) {
    const char *at = (const char *)base;
    size_t i;
    qsort(base, n, width, tshi_io_by_name);
    for (i = 1; i < n; i++, at += width)
        if (tshi_io_by_name(at, at + width) == 0)
            return tshi_io_bad_entry(io, *(const char *const *)(const void *)at, twice);
    return 1;
}

/* Checks that sizes fit shapes (of tensors with a known dtype and at most TSH_MAX_DIMS dimensions),
 * that values have neither gaps nor overlaps, and that no name occurs twice. Returns 0 and sets an
 * error if not. Leaves io->entry and io->pair sorted by name. */
static int tshi_io_check_entries(tshi_io *io) {
    /* at: end of the previous tensor's values; bytes: size by dtype and shape */
    int64_t at = 0, bytes;
    size_t i;
    int d;
    qsort(io->entry, io->entries, sizeof *io->entry, tshi_io_by_place);
    for (i = 0; i < io->entries; i++) {
        const tshi_io_entry *e = &io->entry[i];
        const int64_t size = e->ndim > TSH_MAX_DIMS ? 0 : tshi_io_dtype_size(e->dtype);
        for (bytes = size, d = 0; size && d < e->ndim; d++) {
            if (e->dim[d] && bytes > INT64_MAX / 4 / e->dim[d])
                return tshi_io_bad_entry(io, e->name, "has a shape that no file can hold");
            bytes *= e->dim[d];
        }
        if (e->end < e->begin || (size && e->end - e->begin != bytes))
            return tshi_io_bad_entry(io, e->name, "has data_offsets that do not fit its shape");
        if (e->begin != at)
            return tshi_io_bad_entry(io, e->name, "overlaps another tensor, or leaves a gap");
        at = e->end; /* at most INT64_MAX / 2, the limit of tshi_io_whole */
    }
    io->bytes = at; /* the end of the last tensor's values */
    return tshi_io_sort_names(io, io->entry, io->entries, sizeof *io->entry, "is there twice") &&
           tshi_io_sort_names(io, io->pair, io->pairs, sizeof *io->pair,
                              "is twice in __metadata__");
}

/* -- reading: finding values that are NaN or infinite --------------------------- */

/* Returns 1 if all values are finite: each has an exponent bit that is 0 (in infinity and NaN all
 * are 1). ones: the bits of infinity, signs: the sign bit, both repeated for each value of a 64-bit
 * word. (word & ones) + (signs - ones) sets the sign bit of a value exactly if all its exponent
 * bits are 1. TSHI_APART keeps the function out of line: gcc does not vectorise it in its caller,
 * which runs rarely. */
TSHI_APART int tshi_io_finite_words(const char *TSHI_RESTRICT values, size_t bytes, uint64_t ones,
                                      uint64_t signs) {
    const uint64_t less = signs - ones;
    uint64_t word, found = 0;
    for (size_t i = 0; i < bytes / 8; i++) {
        memcpy(&word, values + 8 * i, 8);
        found |= (word & ones) + less;
    }
    word = 0;
    memcpy(&word, values + bytes / 8 * 8, bytes % 8);
    return !((found | ((word & ones) + less)) & signs);
}

/* Returns 1 if all values are finite. values: `bytes` bytes of a floating dtype. */
static int tshi_io_finite(const tshi_dtype *dtype, const char *values, size_t bytes) {
    const tsh_real infinite = (tsh_real)HUGE_VAL, minus = (tsh_real)-0.0;
    uint64_t ones, signs; /* the bits of infinity and of -0, repeated to fill a word */
    int i;
    for (i = 0; i < 8; i += dtype->size) {
        dtype->store((char *)&ones + i, 1, 1, &infinite);
        dtype->store((char *)&signs + i, 1, 1, &minus);
    }
    return tshi_io_finite_words(values, bytes, ones, signs);
}

/* Adds the number of NaN among `count` values to found[0] and that of infinite values to found[1].
 * x - x is 0 for finite x only. */
static void tshi_io_count_nonfinite(const tshi_dtype *dtype, const char *values, int64_t count,
                                      int64_t *found) {
    enum { BLOCK = 256 };
    const tsh_dtype index = (tsh_dtype)(dtype - tshi_dtypes);
    tsh_real x[BLOCK]; /* up to BLOCK values, converted */
    int64_t e, i, n;
    if (!dtype->floating || (!tshi_dtype_in_blocks(index) &&
                             tshi_io_finite(dtype, values, tshi_dtype_bytes(index, count))))
        return;
    for (e = 0; e < count; e += n) {
        n = tshi_base_min(BLOCK, count - e); /* elements of this block */
        dtype->load(values + tshi_dtype_bytes(index, e), 1, n, x);
        for (i = 0; i < n; i++) {
            found[0] += x[i] != x[i];
            found[1] += x[i] == x[i] && !(x[i] - x[i] == 0);
        }
    }
}
