/* ========================================================================== */
/* >>io                                                  MARK: - io (private) */
/* What saving and loading share: the tensors of a file, agreeing on errors.  */
/* Needs: >>module-find >>optim-norm >>file.                                  */
/* ========================================================================== */

/* The writer, rank 0 of tp, pp and dp, writes whole tensors: other ranks send it their shards in
 * buffers of TSHI_IO_BUFFER bytes. tsh_save and tsh_load end each of their two halves with
 * tshi_io_agree: after an error on any rank all ranks return it; file or model are unchanged. */

/* The format (https://github.com/huggingface/safetensors): 8 bytes, the little-endian length n of
 * the header; n bytes of JSON, {"__metadata__": {"key": "text"}, "name": {"dtype": "F32", "shape":
 * [2, 3], "data_offsets": [begin, end]}, ...}, padded with blanks; then the values, row-major and
 * without gaps. Offsets count from the first value. */
enum {
    TSHI_IO_BUFFER = 1 << 20,          /* bytes of the buffer for values */
    TSHI_IO_HEADER = 100000000,        /* max bytes of a header */
    TSHI_IO_NAME = 2 * TSH_PATH_SIZE + 32, /* bytes of a tensor's name: prefixes, path and NUL */
    TSHI_IO_QUOTE = 96,                /* bytes of a name from a file in an error sentence */
    TSHI_IO_HASHES = 4,                /* interleaved parts of the hash of all values */
    TSHI_IO_SAMPLE = 64,               /* bytes of each tensor; see tshi_load_sample */
    TSHI_IO_NONFINITE = 8              /* max warnings that name a tensor */
};

/* A tensor of a file, as its header describes it. */
typedef struct tshi_io_entry {
    const char *name; /* first, as in tshi_io_pair: tshi_io_by_name compares both */
    int64_t begin, end, dim[TSH_MAX_DIMS]; /* offsets of its values, in bytes; its shape */
    int ndim;          /* more than TSH_MAX_DIMS: of dim there are only the first */
    const char *dtype; /* its name in the file */
    int taken;         /* 1: the model has it */
    int source;            /* index of its file */
    const char *own;       /* its name in that file, before .rename */
    const struct tshi_io_entry *twin; /* what the files have under another name of a tied parameter;
                                       * NULL: nothing */
} tshi_io_entry;

/* A key and its text in a file's metadata. */
typedef struct tshi_io_pair {
    const char *name, *text;
} tshi_io_pair;

/* A file that is read. */
typedef struct tshi_io_source {
    const char *path;     /* first: tshi_io_by_name compares it */
    const char *file;     /* its path as an index has it; NULL: there is none */
    int64_t data;         /* position of its first value; 0: its header has not been read */
    uint64_t stamp;       /* see tshi_load_stamp */
    tshi_io_entry *entry; /* its tensors and metadata, sorted by name */
    tshi_io_pair *pair;
    size_t entries, pairs;
} tshi_io_source;

/* A count of the model that a file's metadata holds: state of the generators or the optimiser. */
typedef struct tshi_io_count {
    const char *prefix, *name; /* the metadata's key is both, joined */
    uint64_t *value, read;     /* where the model has it; the file's value */
    int optional;              /* 1: if a file lacks it, it is 0 */
    int staged;                /* 1: is 0 on stages that do not hold its module or parameter */
} tshi_io_count;

/* A tensor of the model: a parameter, or a moment of one. */
typedef struct tshi_io_item {
    const char *prefix, *path;   /* the name in the file is prefix + path */
    tsh_tensor *param, **moment; /* moment NULL: the parameter itself */
    const tshi_io_count *steps;  /* for a moment: number of updates of its parameter */
    tsh_dtype dtype;             /* of the model's tensor; `file`: of the file's */
    tsh_dtype file;              /* of its values in the file; TSH_DTYPE_DEFAULT: saving, and it
                                  * has no values, neither here nor on another stage */
    const tshi_io_entry *entry;  /* loading: what the file has for it; NULL: nothing */
} tshi_io_item;

/* One save or load. */
typedef struct tshi_io {
    tsh_ctx *ctx;
    tsh_module *root;       /* the module to save or load */
    const tsh_optim *optim; /* its moments are included; NULL: no optimiser */
    const char *op, *path;  /* "tsh_save" or "tsh_load", for errors; the user's path */
    const char *prefix;     /* names in the file: this, a dot, the path; "": the path only */
    tsh_dtype dtype;        /* tsh_file_desc.dtype, .strict_dtype and .strict_names */
    int strict, strict_names;
    const tsh_rename *rename; /* tsh_file_desc.rename and .ignore */
    const char *const *ignore;
    int broadcast;                 /* 1: rank 0 alone reads; it is not alone */
    const tsh_file_desc *reader;   /* has .read, in place of a file; NULL: files are read */
    FILE *file;                    /* open for reading; NULL: not open */
    tsh_writer writer;             /* on the rank that saves: the new file */
    uint64_t hash;                 /* hash of the model or file, the same on all ranks */
    tshi_arena arena;              /* memory of this save or load */
    tshi_io_item *item;            /* shape (items): all tensors */
    tshi_io_count *count;          /* shape (counts): the generators', then the optimiser's */
    int items, counts, generators; /* numbers of tensors, of counts, of the generators' counts */
    char *buffer; /* writing: one buffer of TSHI_IO_BUFFER bytes; on rank 0 of tp, two. Reading:
                   * NULL or a quarter of one, for values to be converted */
    /* writing: */
    int64_t *known;                  /* shape (items + counts), see tshi_io_merge_stages */
    tshi_block *whole_block;         /* memory for a moment gathered from its chunks */
    int64_t bytes;                   /* size of all values */
    int64_t hash_at;                 /* position of the hash of all values in the file */
    uint64_t hashes[TSHI_IO_HASHES]; /* the parts of that hash so far */
    /* reading: */
    const char *given;          /* the user's path; `path` is that of the file being read */
    tshi_io_source *source;     /* array of `sources`: the files */
    const tshi_io_source *open; /* the one that `file` is of */
    int sources, index;         /* index: 1 while an index is parsed */
    int prefixed;               /* 1: a tensor of the files is under the prefix */
    tshi_io_pair *map;          /* array of `maps`: an index's tensors and their files */
    size_t maps;
    tshi_io_item **order; /* shape (items): in the order of their values in the files */
    int64_t *share;       /* .broadcast: see tshi_load_share */
    int32_t *peer, *holds;
    int64_t nonfinite;     /* number of tensors with NaN or infinity */
    char *text, *at;       /* the header's text; the next character to parse in it */
    tshi_io_entry *entry;  /* array of `entries`: the tensors of the file, at last of all files */
    tshi_io_pair *pair;    /* array of `pairs`: keys and values of the file's __metadata__ */
    size_t entries, pairs; /* numbers of tensors and of pairs in the file */
    char *ahead;           /* rank 0 with .broadcast of files: TSHI_LOAD_AHEAD bytes; else NULL */
    int64_t ahead_at, ahead_end, ahead_run; /* offsets of its bytes, and of the last run */
    int64_t place;         /* position after the last read */
    int unreadable;        /* 1: the last read failed, other than by the file's end */
} tshi_io;

static const char tshi_io_first[] = "optim.first.", tshi_io_second[] = "optim.second.";

/* Fills in io for a save or load; an error if an argument is wrong. */
static void tshi_io_begin(tshi_io *io, const char *op, tsh_module *root, const char *path,
                          const tsh_optim *optim, const tsh_file_desc *desc) {
    memset(io, 0, sizeof *io);
    io->ctx = root->ctx;
    io->root = root;
    io->optim = optim;
    io->op = op;
    io->path = io->given = path ? path : "";
    io->prefix = desc && desc->prefix ? desc->prefix : "";
    io->dtype = desc ? desc->dtype : TSH_DTYPE_DEFAULT;
    io->strict = desc && desc->strict_dtype;
    io->strict_names = desc && desc->strict_names;
    io->rename = desc ? desc->rename : NULL;
    io->ignore = desc ? desc->ignore : NULL;
    io->reader = desc && desc->read ? desc : NULL;
    if (!*io->path) (void)tsh_fail(io->ctx, TSH_ERR_ARGUMENT, "%s: there is no path", op);
    if (strlen(io->prefix) >= TSH_PATH_SIZE)
        (void)tsh_fail(io->ctx, TSH_ERR_ARGUMENT,
                       "%s: the prefix \"%.64s...\" has %llu characters; at most %d are possible",
                       op, io->prefix, (unsigned long long)strlen(io->prefix), TSH_PATH_SIZE - 1);
    if (io->dtype && !(tshi_dtype_exists(io->dtype) && tshi_dtypes[io->dtype].floating &&
                       !tshi_dtype_in_blocks(io->dtype)))
        (void)tsh_fail(io->ctx, TSH_ERR_ARGUMENT,
                       "%s: .dtype is %s; parameters are written in TSH_F32, TSH_F64, TSH_BF16 or "
                       "TSH_F16, or with 0 each in its own dtype",
                       op, tshi_dtype_exists(io->dtype) ? tshi_dtype_name(io->dtype) : "none");
    if (optim && optim->module->ctx != io->ctx)
        (void)tsh_fail(io->ctx, TSH_ERR_ARGUMENT, "%s: the optimiser belongs to another ctx", op);
}

/* Closes the file and releases all memory of the save or load. */
static void tshi_io_end(tshi_io *io) {
    if (io->file) (void)fclose(io->file);
    tshi_file_close(&io->writer);
    tshi_mem_release(io->ctx, io->whole_block);
    tshi_mem_close(io->ctx, TSH_MEM_BOOKS, io->arena.first);
}

/* Sets an error that begins with operation and path, then as printf. Returns 0. */
TSH_PRINTF(3, 4)
static TSHI_COLD int tshi_io_fail(const tshi_io *io, tsh_result code, const char *format, ...) {
    char text[TSH_MESSAGE_SIZE];
    va_list list;
    va_start(list, format);
    tsh_text_format(text, sizeof text, format, list);
    va_end(list);
    (void)tsh_fail(io->ctx, code, "%s: \"%.200s\" %s", io->op, io->path, text);
    return 0;
}

/* Reports a failed system call with strerror(errno). Returns 0. */
static int tshi_io_system_error(const tshi_io *io, const char *what) {
    return tshi_io_fail(io, TSH_ERR_IO, "%s: %s", what,
                        errno ? strerror(errno) : "the system gives no reason");
}

/* Reports that the path is `what`, such as "a folder". Returns 0. */
static int tshi_io_wrong_kind(const tshi_io *io, const char *what) {
    return tshi_io_fail(io, TSH_ERR_IO, "is %s; %s takes one safetensors file", what, io->op);
}

/* Gives all ranks of the world the error of one rank: found is world.size - that rank. */
static tsh_result tshi_io_take_error(tsh_ctx *ctx, int64_t found, const char *op) {
    const int rank = ctx->world.size - (int)found;
    tsh_error error = ctx->error; /* sent by `rank`, received by others */
    const tsh_result result = tshi_error_comm(
        ctx, tsh_broadcast(&ctx->world, &error, sizeof error / 4, TSH_I32, rank), op);
    if (result == TSH_OK) ctx->error = error;
    return result;
}

/* Collective over the world. If a rank has an error, all get that of the lowest such rank; if
 * hashes differ, all get an error. The world does not fail, so the error can be cleared. */
static tsh_result tshi_io_agree(const tshi_io *io) {
    tsh_ctx *ctx = io->ctx;
    tsh_comm *world = &ctx->world;
    int64_t max[3] = {0, 0, 0}; /* error (0: none), hash, -hash */
    tsh_coll coll = tshi_comm_coll(TSH_ALLREDUCE, max, max, 3, TSH_I64);
    /* 8 MiB per second for slow disks; limited, since a file's header may claim any size */
    const int64_t seconds = tshi_base_min(io->bytes >> 23, 1000000);
    if (ctx->reported) return ctx->error.code;
    max[0] = ctx->error.code != TSH_OK ? world->size - world->rank : 0;
    max[1] = (int64_t)(io->hash >> 1);
    max[2] = -max[1]; /* the maximum of -x is the minimum of x */
    coll.redop = TSH_MAX;
    coll.timeout_ns = seconds > 300 ? seconds * 1000000000 : 0;
    if (tshi_error_comm(ctx, tshi_comm_run(world, &coll), io->op) != TSH_OK) return ctx->error.code;
    if (max[0]) {
        (void)tshi_io_take_error(ctx, max[0], io->op);
    } else if (max[1] != -max[2]) {
        const int files = io->source && !io->broadcast; /* 1: every rank reads */
        (void)tshi_io_fail(io, files ? TSH_ERR_IO : TSH_ERR_ARGUMENT, "%s",
                           files ? "is not the same file on every rank, or was saved anew while "
                                   "ranks opened it; if so, load it again"
                           : io->broadcast
                               ? "cannot be loaded: ranks hold different models or optimisers"
                               : "cannot be written: ranks hold different models or optimisers");
        ctx->error.rank = -1; /* no rank is to blame */
    }
    return ctx->error.code;
}

/* -- the tensors of a file --------------------------------------------------- */

/* Returns the path that the file has for a path of the tree; "" and an error without memory. */
static const char *tshi_io_name(tshi_io *io, const char *path) {
    const char *below = tshi_module_below(io->root, path);
    const size_t size = strlen(io->prefix) + strlen(below) + 2;
    char *name;
    if (!*io->prefix) return below;
    name = (char *)tshi_mem_arena_alloc(io->ctx, &io->arena, size);
    if (!name) return "";
    (void)snprintf(name, size, "%s%s%s", io->prefix, *below ? "." : "", below);
    return name;
}

/* Appends a tensor to io->item and returns it. */
static tshi_io_item *tshi_io_add(tshi_io *io, const char *prefix, tsh_tensor *param,
                                 tsh_tensor **moment) {
    tshi_io_item *item = &io->item[io->items++];
    item->prefix = prefix;
    item->path = tshi_io_name(io, param->path);
    item->param = param;
    item->moment = moment;
    item->dtype = moment ? io->optim->desc.moments_dtype : param->dtype;
    return item;
}

/* Callback of tshi_module_params: appends a parameter. */
static void tshi_io_add_param(const char *path, tsh_tensor *param, void *user) {
    (void)path;
    (void)tshi_io_add((tshi_io *)user, "", param, NULL);
}

/* Appends a count. value points to an int64_t or uint64_t; .read starts with its present value, for
 * files without the count. */
static tshi_io_count *tshi_io_add_count(tshi_io *io, const char *prefix, const char *name,
                                        const void *value) {
    tshi_io_count *count = &io->count[io->counts++];
    count->prefix = prefix;
    count->name = name;
    count->value = (uint64_t *)tshi_kernel_unconst(value);
    count->read = *count->value;
    return count;
}

/* Lists all tensors and counts in the order of the file; 0 and an error without memory. */
static int tshi_io_list(tshi_io *io) {
    tsh_ctx *ctx = io->ctx;
    const tsh_optim *optim = io->optim;
    const int updated = optim ? optim->count : 0; /* number of parameters that it updates */
    const size_t modules = (size_t)tshi_module_count(ctx);
    const size_t items = modules * TSHI_MODULE_PARAMS + 2 * (size_t)updated; /* at most */
    const size_t counts = modules + (size_t)updated + 5;
    tsh_module *m;
    int i;
    io->item = (tshi_io_item *)tshi_mem_arena_alloc(ctx, &io->arena, items * sizeof *io->item);
    io->count = (tshi_io_count *)tshi_mem_arena_alloc(ctx, &io->arena, counts * sizeof *io->count);
    if (!io->item || !io->count) return 0;
    (void)tshi_io_add_count(io, "tshard.", "seed", &ctx->seed);
    (void)tshi_io_add_count(io, "tshard.", "randn_calls", &ctx->randn_calls);
    (void)tshi_io_add_count(io, "tshard.", "dropout_calls", &ctx->dropout_calls);
    for (m = io->root; m; m = tshi_module_next(io->root, m)) {
        tshi_io_count *calls = tshi_io_add_count(io, "tshard.dropout_calls.",
                                                 tshi_io_name(io, m->path), &m->dropout_calls);
        calls->optional = calls->staged = 1; /* most modules have no dropout */
    }
    io->generators = io->counts; /* the counts so far are the generators' */
    if (optim) (void)tshi_io_add_count(io, "tshard.optim.", "steps", &optim->info.steps);
    if (optim) (void)tshi_io_add_count(io, "tshard.optim.", "skipped", &optim->info.skipped);
    tshi_module_params(io->root, 1, tshi_io_add_param, io);
    for (i = 0; i < updated; i++) {
        tshi_moments *each = &optim->each[i];
        tshi_io_count *steps = tshi_io_add_count(
            io, "tshard.optim.steps.", tshi_io_name(io, each->param->path), &each->steps);
        steps->staged = 1; /* counted where the parameter is */
        tshi_io_add(io, tshi_io_first, each->param, &each->first)->steps = steps;
    }
    for (i = 0; i < updated; i++)
        tshi_io_add(io, tshi_io_second, optim->each[i].param, &optim->each[i].second)->steps =
            &io->count[io->generators + 2 + i];
    return ctx->error.code == TSH_OK; /* memory for names */
}

/* Returns 1 if the item is a bf16 parameter with exact weights (see tshi_tensor_exact). */
static int tshi_io_is_exact(const tshi_io_item *item) {
    return !item->moment && item->dtype == TSH_BF16 && (item->param->flags & TSHI_OPTIMISED);
}

/* Returns the dtype in which tsh_save writes an item without .dtype. */
static tsh_dtype tshi_io_own_dtype(const tshi_io_item *item) {
    return tshi_io_is_exact(item) ? TSH_F32 : item->dtype;
}

/* Returns an item's tensor: the parameter or its moment; NULL if the moment was not created. */
static tsh_tensor *tshi_io_values(const tshi_io_item *item) {
    return item->moment ? *item->moment : item->param;
}

/* Returns 1 if the item is a moment of which this rank has a chunk only. */
static int tshi_io_in_chunks(const tshi_io_item *item) {
    return item->moment && *item->moment && ((*item->moment)->flags & TSHI_CHUNKED);
}

/* Converts values between a file's little-endian and this machine's byte order, in place. Blocks of
 * quantised weights are the same bytes in both. */
static void tshi_io_swap_bytes(void *values, int64_t count, size_t width) {
    const uint16_t one = 1; /* its first byte is 1 on a little-endian machine */
    unsigned char *value = (unsigned char *)values, byte;
    size_t i;
    if (*(const unsigned char *)&one) return;
    for (; count > 0; count--, value += width)
        for (i = 0; i < width / 2; i++) { /* reverse the bytes of a value */
            byte = value[i];
            value[i] = value[width - 1 - i];
            value[width - 1 - i] = byte;
        }
}

/* Returns the length of the UTF-8 sequence at s (RFC 3629: shortest form, no surrogates); 0: there
 * is none. Does not read beyond a NUL. */
static int tshi_io_utf8(const unsigned char *s) {
    int n = s[0] < 0x80 ? 1 : s[0] < 0xC2 ? 0 : s[0] < 0xE0 ? 2 : s[0] < 0xF0 ? 3 : 4, i;
    if (s[0] > 0xF4) return 0; /* beyond U+10FFFF, the last character */
    for (i = 1; i < n; i++)    /* continuation bytes */
        if ((s[i] & 0xC0) != 0x80) return 0;
    if ((s[0] == 0xE0 && s[1] < 0xA0) || (s[0] == 0xED && s[1] > 0x9F) ||
        (s[0] == 0xF0 && s[1] < 0x90) || (s[0] == 0xF4 && s[1] > 0x8F))
        return 0;
    return n;
}
