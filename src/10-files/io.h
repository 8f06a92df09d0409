/* ========================================================================== */
/* >>io                                                  MARK: - io (private) */
/* What saving and loading share: the tensors of a file, agreeing on errors.  */
/* Needs: >>adapter >>outer >>file.                                           */
/* ========================================================================== */

/* The writer, rank 0 of tp, pp and dp, writes whole tensors: other ranks send it their shards in
 * buffers of TSHI_IO_BUFFER bytes. tsh_save and tsh_load have two halves, checks and values. Each
 * half ends with tshi_io_agree, where an error on any rank becomes the error of all ranks. An error
 * in the first half leaves file or model unchanged; in the second, a save leaves the old file, but
 * a load may have changed some values. */

/* The format (https://github.com/huggingface/safetensors): 8 bytes, the little-endian length n of
 * the header; n bytes of JSON, {"__metadata__": {"key": "text"}, "name": {"dtype": "F32", "shape":
 * [2, 3], "data_offsets": [begin, end]}, ...}, padded with blanks; then the values, row-major and
 * without gaps. Offsets count from the first value. */
enum {
    TSHI_IO_BUFFER = 1 << 20,   /* bytes of a buffer for tensors' values */
    TSHI_IO_HEADER = 100000000, /* max bytes of a header, and of an index */
    /* max bytes of a tensor's name in a file: prefixes, path and NUL */
    TSHI_IO_NAME = 2 * TSH_PATH_SIZE + 48,
    TSHI_IO_QUOTE = 96,   /* max bytes of a name from a file when an error quotes it */
    TSHI_IO_DIGEST = 32,  /* bytes of a hash that names a shard: tsh_hasher */
    TSHI_IO_HASHES = 4,   /* number of interleaved hashes that make the hash of all values */
    TSHI_IO_SAMPLE = 64,  /* bytes of each tensor that tshi_load_sample hashes */
    TSHI_IO_NONFINITE = 8 /* max number of warnings that name a tensor with NaN or infinity */
};

/* A tensor of a file, as the file's header describes it. */
typedef struct tshi_io_entry {
    /* name of the tensor; the first field here and in tshi_io_pair, as tshi_io_by_name requires */
    const char *name;
    /* begin, end: byte offsets of its values, from the first value of the file; dim: its shape */
    int64_t begin, end, dim[TSH_MAX_DIMS];
    int ndim;          /* number of dimensions, of which dim holds at most TSH_MAX_DIMS */
    const char *dtype; /* the tensor's dtype as the file names it */
    int taken;         /* 1: the tensor is matched with one of the model */
    int source;        /* index in tshi_io.source of the file that holds the tensor */
    const char *own;   /* the tensor's name in that file, before .rename */
    /* the tensor that the files have under another name of the same tied parameter; NULL: none */
    const struct tshi_io_entry *twin;
} tshi_io_entry;

/* A key and its text in a file's metadata; or, in an index, a tensor's name and its file. */
typedef struct tshi_io_pair {
    const char *name, *text;
} tshi_io_pair;

/* A file to load from. */
typedef struct tshi_io_source {
    const char *path;      /* path of the file; the first field, as tshi_io_by_name requires */
    const char *file;      /* the file's path as the index has it; NULL: there is no index */
    int64_t data;          /* byte position of its first value; 0: its header was not read yet */
    uint64_t stamp;        /* hash of the file's inode, size and time, see tshi_load_stamp */
    int64_t changed;       /* the file's ctime in s; 0: unknown or recent (tshi_load_stamp) */
    tshi_io_entry *entry;  /* the file's tensors, sorted by name */
    tshi_io_pair *pair;    /* the file's metadata, sorted by key */
    size_t entries, pairs; /* number of tensors in `entry`; number of keys in `pair` */
} tshi_io_source;

/* A counter of the model that is saved in a file's metadata: state of the random generators or of
 * the optimiser. */
typedef struct tshi_io_count {
    const char *prefix, *name; /* the key in the metadata is prefix + name */
    uint64_t *value, read;     /* the model's counter; the value read from the file */
    int optional;              /* 1: a counter of 0 is not saved, and one that a file lacks is 0 */
    int staged;                /* 1: the counter is 0 on stages without its module or parameter */
} tshi_io_count;

/* A tensor of the model: a parameter, or a moment or an average of one. */
typedef struct tshi_io_item {
    const char *prefix, *path; /* the tensor's name in the file, before .rename, is prefix + path */
    const char *name;          /* saving: its name in the file */
    int shard;                 /* saving: which of the files it is written to, from 0 on */
    /* moment: points to an element of .moment of its tshi_moments, or to .average of its
     * tshi_average; NULL: the item is the parameter */
    tsh_tensor *param, **moment;
    const tsh_tensor *form; /* has the item's shape and layout, not its values: the parameter, or
                             * what tshi_optim_form or tshi_ema_form returns */
    const tshi_io_count *steps; /* for a moment: number of updates of its parameter */
    int optional;               /* 1: a moment that files may lack */
    tsh_dtype dtype;            /* the tensor's dtype in the model */
    tsh_dtype file;             /* the tensor's dtype in the file; TSH_DTYPE_DEFAULT, when saving:
                                 * no stage has values, so it is not written */
    const tshi_io_entry *entry; /* loading: the files' tensor of this name; NULL: none */
    const char *of; /* the name of the adapter whose A or B it is; NULL: another parameter */
    int replica;    /* saving: the replica whose values these are, of a tsh_outer; else 0 */
} tshi_io_item;

/* The state of one save or load. */
typedef struct tshi_io {
    tsh_ctx *ctx;
    tsh_module *root;       /* the module to save or load */
    const tsh_optim *optim; /* the optimiser whose moments are included; NULL: none */
    const tsh_ema *ema;     /* the averages that are included; NULL: none */
    const char *op, *path;  /* op: "tsh_save" or "tsh_load", for errors; path: that of the file */
    const char *adapter;    /* the name of the adapters that are saved or loaded, alone; NULL: all
                             * parameters are */
    int plain;              /* 1: A and B of all adapters are left out */
    const char *prefix;     /* names in the file are: prefix, a dot, the path; "": the path only */
    tsh_dtype dtype;        /* saving: dtype in which parameters are written; 0: each in its own */
    /* loading, strict 1: a dtype other than the model's is an error; strict_names 1: so are tensors
     * whose names lack the prefix */
    int strict, strict_names;
    const tsh_rename *rename;    /* pairs of patterns that rename the files' tensors; saving undoes
                                  * them */
    const char *const *ignore;   /* loading: patterns of tensors to ignore, the last one NULL */
    int broadcast;               /* 1: rank 0 reads for the other ranks (.broadcast) */
    const tsh_file_desc *reader; /* its .read_at gives the files' bytes; NULL: `file` gives them */
    FILE *file;                  /* the file being read; NULL: none is open */
    tsh_writer writer;           /* on the rank that saves: the new file */
    /* hash of the model (saving, or loading with .broadcast) or of the files (loading); must be the
     * same on all ranks */
    uint64_t hash;
    tshi_arena arena;     /* memory of this save or load */
    tshi_io_item *item;   /* shape (items): all tensors to save or load */
    tshi_io_count *count; /* shape (counts): counters of the generators, then of the optimiser */
    /* length of `item`; length of `count`; how many of the counters are the random generators' */
    int items, counts, generators;
    /* Saving: a buffer of TSHI_IO_BUFFER bytes, or two on rank 0 of tp if tp has several ranks.
     * Loading with .broadcast: one, or two on rank 0 of the world. Loading without: a quarter of
     * one if values must be converted, else NULL. */
    char *buffer;
    /* The fields from here to `hashes` are for saving. */
    int64_t shard_bytes; /* most bytes of tensors in a file of a folder; 0: one file, at the path */
    /* shards: number of files, 0 if shard_bytes is 0; shard: which of them is being written, from 0
     * on; done: how many files are complete, the index included */
    int shards, shard, done;
    int64_t *known;                  /* dtypes of items, then counters, merged from all stages */
    /* replicas: number of replicas of a tsh_outer whose state is saved; 0: the optimiser has none.
     * each_steps: shape (replicas, optim->count + 2): their counters of steps */
    int replicas;
    int64_t *each_steps;
    tshi_block *whole_block;         /* memory for a whole moment, gathered from dp's chunks */
    int64_t bytes;                   /* bytes of all values in the file (loading: in all files) */
    int64_t hash_at;                 /* position of the hash of all values in the file */
    uint64_t hashes[TSHI_IO_HASHES]; /* interleaved hashes of the file's values so far */
    /* The fields from here on are for loading. */
    const char *given;          /* the user's path; `path` is that of the file being read (or,
                                 * saving to a folder, written) */
    tshi_io_source *source;     /* shape (sources): the files to load from */
    const tshi_io_source *open; /* the source being read, by `file` or .read_at; NULL: none */
    int sources, index;         /* sources: number of files; index: 1 while an index is parsed */
    int prefixed;               /* 1: the files have a tensor whose name begins with the prefix */
    tshi_io_pair *map;          /* shape (maps): the index's names of tensors and their files */
    size_t maps;                /* number of tensors in the index */
    tshi_io_item **order; /* shape (items): the items in the order of their values in the files */
    int64_t *share;       /* .broadcast: what rank 0 broadcasts of the files (tshi_load_share) */
    int32_t *peer, *holds;
    const tsh_file_desc *cache; /* .broadcast: has .cache and .hasher; NULL: nothing is kept */
    int cached;                 /* 1: rank 0 has a cache, so it sends hashes first; 2: and this rank
                                 * has logged that it cannot keep a shard */
    void *state;                /* the user's hasher's state (tsh_hasher) */
    /* cache_path: buffer for the path of a file in the cache; cache_part: the path of a shard's
     * file until it is complete; cache_size: bytes of each */
    char *cache_path, *cache_part;
    size_t cache_size;
    unsigned char *digest;      /* shape (tp, items, TSHI_IO_DIGEST): hashes of the ranks' shards */
    /* shape (3 + world, items); 1: the tensor's shard is kept, in row 0 by this rank, in row 1 by
     * all ranks of tp, in row 2 by all of dp, in row 3 + r by rank r of the world */
    int32_t *kept;
    int64_t nonfinite; /* number of tensors with NaN or infinity that this rank reports */
    char *text, *at;   /* text of the header or index being parsed; its next character */
    /* shape (entries): tensors of the file being read; in the end, of all files */
    tshi_io_entry *entry;
    tshi_io_pair *pair;    /* shape (pairs): keys and texts of the file's __metadata__ */
    size_t entries, pairs; /* lengths of `entry` and `pair` */
    /* buffer of TSHI_LOAD_AHEAD bytes to read ahead, on rank 0 with .broadcast from files; else
     * NULL */
    char *ahead;
    /* ahead_at, ahead_end: the bytes in `ahead`, as offsets from the file's first value; ahead_run:
     * offset of the last run of elements that was read */
    int64_t ahead_at, ahead_end, ahead_run;
    int64_t place;  /* position in the file after the last read, in bytes */
    int unreadable; /* 1: the last read failed for another reason than the end of the file */
} tshi_io;

/* Prefixes of the names of moments in a file, by the moment's number; then those of averages of
 * weights, and of what a tsh_outer keeps. A parameter or moment of replica 2 of a tsh_outer is
 * "optim.replica.2.weight.<path>", "optim.replica.2.first.<path>" and so on; replica 0 has the
 * names that a file without a tsh_outer has. */
enum {
    TSHI_IO_AVERAGE = TSH_MAX_MOMENTS,
    TSHI_IO_OUTER_WEIGHT,
    TSHI_IO_OUTER_MOMENT,
    TSHI_IO_OUTER_CHANGE,
    TSHI_IO_REPLICA,
    TSHI_IO_PREFIXES
};
static const char *const tshi_io_moments[TSHI_IO_PREFIXES] = {
    "optim.first.",        "optim.second.",       "optim.third.",        "optim.average.",
    "optim.outer_weight.", "optim.outer_moment.", "optim.outer_change.", "optim.replica."};

/* Returns which of tshi_io_moments the name begins with; -1: none. */
static int tshi_io_moment_of(const char *name) {
    int i = TSHI_IO_PREFIXES - 1;
    while (i >= 0 && strncmp(name, tshi_io_moments[i], strlen(tshi_io_moments[i])) != 0) i--;
    return i;
}

/* Initialises io for a save or load. Sets an error if an argument is wrong. */
static void tshi_io_begin(tshi_io *io, const char *op, tsh_module *root, const char *path,
                          const tsh_optim *optim, const tsh_file_desc *desc) {
    memset(io, 0, sizeof *io);
    io->ctx = root->ctx;
    io->root = root;
    io->optim = optim;
    io->ema = desc ? desc->ema : NULL;
    io->op = op;
    io->path = io->given = path ? path : "";
    io->plain = desc && desc->adapter && !*desc->adapter;
    io->adapter = desc && !io->plain ? desc->adapter : NULL;
    io->prefix = desc && desc->prefix ? desc->prefix : io->adapter ? "base_model.model" : "";
    io->shard_bytes = desc ? desc->shard_bytes : 0;
    io->dtype = desc ? desc->dtype : TSH_DTYPE_DEFAULT;
    io->strict = desc && desc->strict_dtype;
    io->strict_names = desc && desc->strict_names;
    io->rename = desc ? desc->rename : NULL;
    io->ignore = desc ? desc->ignore : NULL;
    io->reader = desc && desc->read_at ? desc : NULL;
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
    if ((io->adapter || io->plain) && (optim || io->ema))
        (void)tsh_fail(io->ctx, TSH_ERR_ARGUMENT,
                       "%s: .adapter is for %s, without moments and averages; save a run without "
                       "it",
                       op, io->plain ? "a model without adapters" : "adapters alone");
    if (io->shard_bytes < 0 || (io->shard_bytes && io->adapter))
        (void)tsh_fail(io->ctx, TSH_ERR_ARGUMENT,
                       "%s: .shard_bytes is %lld%s; a folder takes whole models, in files of at "
                       "least one byte of tensors",
                       op, (long long)io->shard_bytes, io->adapter ? " and .adapter is set" : "");
    if (io->ema && io->ema->module != root)
        (void)tsh_fail(io->ctx, TSH_ERR_ARGUMENT,
                       "%s: .ema has the averages of another module, \"%s\"", op,
                       io->ema->module->path);
    else if (io->ema)
        (void)tshi_ema_check_swapped(io->ema, op);
}

/* Closes the file and releases all memory of the save or load. */
static void tshi_io_end(tshi_io *io) {
    if (io->file) (void)fclose(io->file);
    tshi_file_close(&io->writer);
    tshi_mem_release(io->ctx, io->whole_block);
    tshi_mem_close(io->ctx, TSH_MEM_BOOKS, io->arena.first);
}

/* Sets an error that begins with the name of the call and the path; format and what follows are as
 * for printf. Returns 0. */
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

/* Sets an error after a failed system call; its sentence ends with `what`, then strerror(errno).
 * Returns 0. */
static int tshi_io_system_error(const tshi_io *io, const char *what) {
    return tshi_io_fail(io, TSH_ERR_IO, "%s: %s", what,
                        errno ? strerror(errno) : "the system gives no reason");
}

/* Sets an error: what is at the path is not one file, but `what`, such as "a folder". Returns 0. */
static int tshi_io_wrong_kind(const tshi_io *io, const char *what) {
    return tshi_io_fail(io, TSH_ERR_IO, "is %s; %s takes one safetensors file", what, io->op);
}

/* Collective over the world: the error of rank world.size - found becomes the error of all ranks,
 * by a broadcast. */
static tsh_result tshi_io_take_error(tsh_ctx *ctx, int64_t found, const char *op) {
    const int rank = ctx->world.size - (int)found;
    tsh_error error = ctx->error; /* the error that `rank` sends and the others receive */
    const tsh_result result = tshi_error_comm(
        ctx, tsh_broadcast(&ctx->world, &error, sizeof error / 4, TSH_I32, rank), op);
    if (result == TSH_OK) ctx->error = error;
    return result;
}

/* Collective over the world. If ranks have errors, that of the lowest such rank becomes the error
 * of all; if the ranks' io->hash differ, all get an error. The world does not fail, so the error
 * can be cleared. */
static tsh_result tshi_io_agree(const tshi_io *io) {
    tsh_ctx *ctx = io->ctx;
    tsh_comm *world = &ctx->world;
    /* max[0]: world.size - rank if this rank has an error, else 0; max[1]: hash; max[2]: -hash */
    int64_t max[3] = {0, 0, 0};
    tsh_coll coll = tshi_comm_coll(TSH_ALLREDUCE, max, max, 3, TSH_I64);
    /* timeout for slow disks: 8 MiB per second; capped, since a file's header may claim any size */
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
        const int files = io->source && !io->broadcast; /* 1: every rank reads the files */
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

/* -- the tensors and counters to save or load -------------------------------- */

/* Returns the name in the file (prefix, dot, path below io->root) of a path in the tree. Returns ""
 * and sets an error if there is no memory. */
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

/* Appends a parameter (moment NULL), or a moment or average of one, to io->item and returns the
 * item. form: tensor with the item's shape and layout, which is copied; NULL: the parameter has
 * them. */
static tshi_io_item *tshi_io_add(tshi_io *io, const char *prefix, tsh_tensor *param,
                                 tsh_tensor **moment, const tsh_tensor *form, tsh_dtype dtype) {
    tsh_tensor *copy = form && form != param
                           ? (tsh_tensor *)tshi_mem_arena_alloc(io->ctx, &io->arena, sizeof *copy)
                           : NULL;
    tshi_io_item *item = &io->item[io->items++];
    item->prefix = prefix;
    item->path = tshi_io_name(io, param->path);
    item->param = param;
    item->moment = moment;
    item->form = param;
    if (copy) { /* NULL after an error: there is no memory */
        *copy = *form;
        item->form = copy;
    }
    item->dtype = dtype;
    return item;
}

/* Appends all parameters below io->root to io->item; with io->plain, not A and B of adapters. */
static void tshi_io_list_params(tshi_io *io) {
    tshi_walk at = {NULL, NULL, 0};
    while (tshi_module_step_once(io->root, &at)) {
        const int adapts = at.module->kind == &tshi_adapter_kind;
        if (io->plain && adapts) continue;
        tshi_io_add(io, "", at.param, NULL, NULL, at.param->dtype)->of =
            adapts ? at.module->name : NULL;
    }
}

/* Returns the name that PEFT gives A or B of an adapter, whose module is m: "<path of the
 * layer>.lora_A.weight", or lora_B. Where the layer is several layers of the file in one (q, k and
 * v), of which the adapter has a part, the layer's own name is replaced by the part's. Returns ""
 * and sets an error if there is no memory. */
static const char *tshi_io_adapter_name(tshi_io *io, const tsh_module *m) {
    const tsh_module *of = m->parent->parent;  /* the layer, or a part of it */
    /* parent of the layer to which the part belongs; NULL: `of` is the layer */
    const tsh_module *above = of->adapters ? NULL : of->parent->parent;
    const char *path = above ? above->path : of->path;
    const size_t size = strlen(path) + strlen(of->name) + 32;
    char *name = (char *)tshi_mem_arena_alloc(io->ctx, &io->arena, size);
    if (!name) return "";
    (void)snprintf(name, size, "%s%s%s%s%s.weight", path, above && *path ? "." : "",
                   above ? of->name : "", above || *path ? "." : "", m->parent->name);
    return tshi_io_name(io, name);
}

/* Appends A and B of all adapters named io->adapter to io->item. Sets an error if there is none. */
static void tshi_io_list_adapters(tshi_io *io) {
    tshi_walk at = {NULL, NULL, 0};
    while (tshi_module_step(io->root, &at)) {
        if (at.module->kind != &tshi_adapter_kind || strcmp(at.module->name, io->adapter) != 0)
            continue;
        tshi_io_add(io, "", at.param, NULL, NULL, at.param->dtype)->path =
            tshi_io_adapter_name(io, at.module);
    }
    if (!io->items)
        (void)tsh_fail(io->ctx, TSH_ERR_ARGUMENT,
                       "%s: no layer below \"%s\" has an adapter \"%.64s\"; tsh_lora adds one",
                       io->op, io->root->path, io->adapter);
}

/* Appends a counter to io->count and returns it. value points to an int64_t or uint64_t. .read
 * starts as the present value, so that it stays if a file lacks the counter. */
static tshi_io_count *tshi_io_add_count(tshi_io *io, const char *prefix, const char *name,
                                        const void *value) {
    tshi_io_count *count = &io->count[io->counts++];
    count->prefix = prefix;
    count->name = name;
    count->value = (uint64_t *)tshi_kernel_unconst(value);
    count->read = *count->value;
    return count;
}

/* Appends the moments of an optimiser to io->item: the first ones of all parameters, then the
 * second ones, then the third. steps: the counters of the parameters' updates. */
static void tshi_io_list_moments(tshi_io *io, const tsh_optim *optim, const tshi_io_count *steps) {
    for (int k = 0; k < TSH_MAX_MOMENTS; k++)
        for (int i = 0; i < optim->count; i++) {
            tshi_moments *each = &optim->each[i];
            const tsh_optim_desc *d = each->desc;
            /* SGD may have been saved with momentum, and be loaded without, or the reverse */
            const int optional = d->kind == TSH_SGD;
            tsh_tensor form;
            tshi_io_item *item;
            if (k >= tshi_optim_moments(d, each->param) && !(optional && !k)) continue;
            item = tshi_io_add(io, tshi_io_moments[k], each->param, &each->moment[k],
                               tshi_optim_form(d, each->param, k, &form),
                               tshi_optim_moments_dtype(d));
            item->steps = &steps[i];
            item->optional = optional;
        }
}

/* Appends averages of weights to io->item, and the number of their updates to io->count. */
static void tshi_io_list_averages(tshi_io *io, const tsh_ema *ema) {
    const tshi_io_count *updates = tshi_io_add_count(io, "tshard.ema.", "updates", &ema->updates);
    for (int i = 0; i < ema->count; i++) {
        const tsh_tensor form = tshi_ema_form(ema->each[i].param);
        tshi_io_add(io, tshi_io_moments[TSHI_IO_AVERAGE], ema->each[i].param,
                    &ema->each[i].average, &form, TSH_REAL)
            ->steps = updates;
    }
}

/* Appends what a tsh_outer keeps of parameters to io->item, and its counters to io->count. steps:
 * the counters of the parameters' updates. */
static void tshi_io_list_outer(tshi_io *io, tsh_outer *outer, const tshi_io_count *steps) {
    static const char *const settings[4] = {"every", "fragments", "delay", "replicas"};
    tshi_io_add_count(io, "tshard.outer.", "steps", &outer->info.steps)->optional = 1;
    tshi_io_add_count(io, "tshard.outer.", "exchanges", &outer->info.exchanges)->optional = 1;
    for (int i = 0; i < 4; i++)
        tshi_io_add_count(io, "tshard.outer.", settings[i], &outer->saved[i])->optional = 1;
    for (int k = 0; k < 3; k++)
        for (int i = 0; i < outer->count; i++) {
            tshi_outer_param *each = &outer->each[i];
            const tsh_tensor form = tshi_ema_form(each->param);
            tshi_io_item *item = tshi_io_add(io, tshi_io_moments[TSHI_IO_OUTER_WEIGHT + k],
                                             each->param,
                                             k == 0   ? &each->weight
                                             : k == 1 ? &each->moment
                                                      : &each->change,
                                             &form, TSH_REAL);
            item->steps = &steps[i];
            item->optional = 1; /* until tshi_load_check_outer */
        }
}

/* Returns a text like "optim.replica.2.first." Returns "" and sets an error if there is no
 * memory. */
static const char *tshi_io_replica_prefix(tshi_io *io, const char *before, int replica,
                                          const char *after) {
    const size_t size = strlen(before) + strlen(after) + 16;
    char *text = (char *)tshi_mem_arena_alloc(io->ctx, &io->arena, size);
    if (!text) return "";
    (void)snprintf(text, size, "%s%d.%s", before, replica, after);
    return text;
}

/* Saving: appends the parameters, moments and counters of replicas 1, 2, ... of a tsh_outer. Those
 * of replica 0 are listed already: the first `items` of io->item, and `counts` of io->count from
 * io->count[io->generators] on. */
static void tshi_io_list_replicas(tshi_io *io, int items, int counts) {
    const size_t skipped = strlen("optim."); /* not repeated in a replica's prefix */
    for (int r = 1; r < io->replicas; r++) {
        const char *steps = tshi_io_replica_prefix(io, "tshard.replica.", r, "optim.steps.");
        const char *total = tshi_io_replica_prefix(io, "tshard.replica.", r, "optim.");
        for (int i = 0; i < counts; i++) {
            const tshi_io_count *first = &io->count[io->generators + i];
            tshi_io_add_count(io, i < 2 ? total : steps, first->name,
                              &io->each_steps[r * counts + i])
                ->staged = first->staged;
        }
        for (int i = 0; i < items; i++) {
            const tshi_io_item *first = &io->item[i];
            tshi_io_item *item = &io->item[io->items];
            if (!first->param->requires_grad) continue;
            *item = *first;
            item->prefix = tshi_io_replica_prefix(
                io, tshi_io_moments[TSHI_IO_REPLICA], r,
                !first->moment ? "weight." : first->prefix + skipped);
            item->replica = r;
            io->items++;
        }
    }
}

/* Lists the tensors and counters to save or load in io->item and io->count, in the order of the
 * file. Returns 0 and sets an error if there is no memory. */
static int tshi_io_list(tshi_io *io) {
    tsh_ctx *ctx = io->ctx;
    const tsh_optim *optim = io->optim;
    /* number of parameters that the optimiser updates */
    const int updated = optim ? optim->count : 0;
    const size_t modules = (size_t)tshi_module_count(ctx);
    /* upper limit of the number of items */
    const size_t state = modules * TSHI_MODULE_PARAMS + TSH_MAX_MOMENTS * (size_t)updated;
    const size_t replicas = io->replicas > 1 ? (size_t)io->replicas : 1;
    const size_t items = state * replicas + 3 * (size_t)updated +
                         (size_t)(io->ema ? io->ema->count : 0);
    const size_t counts = modules + ((size_t)updated + 2) * replicas + 10;
    int first; /* index of the counter of the first parameter's updates */
    tsh_module *m;
    int i;
    io->item = (tshi_io_item *)tshi_mem_arena_alloc(ctx, &io->arena, items * sizeof *io->item);
    io->count = (tshi_io_count *)tshi_mem_arena_alloc(ctx, &io->arena, counts * sizeof *io->count);
    if (!io->item || !io->count) return 0;
    if (io->replicas > 1) {
        const size_t bytes = ((size_t)updated + 2) * replicas * sizeof *io->each_steps;
        io->each_steps = (int64_t *)tshi_mem_arena_alloc(ctx, &io->arena, bytes);
        if (!io->each_steps) return 0;
    }
    if (io->adapter) {
        tshi_io_list_adapters(io);
        return ctx->error.code == TSH_OK;
    }
    (void)tshi_io_add_count(io, "tshard.", "seed", &ctx->seed);
    (void)tshi_io_add_count(io, "tshard.", "randn_calls", &ctx->randn_calls);
    (void)tshi_io_add_count(io, "tshard.", "dropout_calls", &ctx->dropout_calls);
    for (m = io->root; m; m = tshi_module_next(io->root, m)) {
        tshi_io_count *calls = tshi_io_add_count(io, "tshard.dropout_calls.",
                                                 tshi_io_name(io, m->path), &m->dropout_calls);
        calls->optional = calls->staged = 1; /* most modules have no dropout: their counter is 0 */
    }
    io->generators = io->counts; /* the counters so far are those of the generators */
    if (optim) (void)tshi_io_add_count(io, "tshard.optim.", "steps", &optim->info.steps);
    if (optim) (void)tshi_io_add_count(io, "tshard.optim.", "skipped", &optim->info.skipped);
    tshi_io_list_params(io);
    first = io->counts;
    for (i = 0; i < updated; i++) {
        tshi_moments *each = &optim->each[i];
        tshi_io_count *steps = tshi_io_add_count(io, "tshard.optim.steps.",
                                                 tshi_io_name(io, each->param->path), &each->steps);
        steps->staged = 1; /* only the stage that holds the parameter counts its steps */
    }
    if (optim) tshi_io_list_moments(io, optim, &io->count[first]);
    if (io->replicas > 1) tshi_io_list_replicas(io, io->items, updated + 2);
    if (optim && optim->outer) tshi_io_list_outer(io, optim->outer, &io->count[first]);
    if (io->ema) tshi_io_list_averages(io, io->ema);
    return ctx->error.code == TSH_OK; /* an error: no memory for a name */
}

/* Returns 1 if the item is a bf16 parameter of which an optimiser keeps the exact float weights
 * (see tshi_tensor_exact). */
static int tshi_io_is_exact(const tshi_io_item *item) {
    return !item->moment && tshi_tensor_is_exact(item->param);
}

/* Returns the dtype in which tsh_save writes a parameter or moment if tsh_file_desc.dtype is 0. */
static tsh_dtype tshi_io_own_dtype(const tshi_io_item *item) {
    return tshi_io_is_exact(item) ? TSH_F32 : item->dtype;
}

/* Returns the tensor that an item stands for, a parameter or a moment; NULL if the moment was not
 * created. */
static tsh_tensor *tshi_io_values(const tshi_io_item *item) {
    return item->moment ? *item->moment : item->param;
}

/* Returns 1 if the item is a moment of which this rank has only its chunk (tsh_optim_desc.zero). */
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

/* Returns the length in bytes of the UTF-8 sequence at s (RFC 3629: shortest form, no surrogates);
 * 0: no valid one is there. Does not read beyond a NUL. */
static int tshi_io_utf8(const unsigned char *s) {
    int n = s[0] < 0x80 ? 1 : s[0] < 0xC2 ? 0 : s[0] < 0xE0 ? 2 : s[0] < 0xF0 ? 3 : 4, i;
    if (s[0] > 0xF4) return 0; /* beyond U+10FFFF, the last character */
    for (i = 1; i < n; i++)    /* checks the continuation bytes */
        if ((s[i] & 0xC0) != 0x80) return 0;
    if ((s[0] == 0xE0 && s[1] < 0xA0) || (s[0] == 0xED && s[1] > 0x9F) ||
        (s[0] == 0xF0 && s[1] < 0x90) || (s[0] == 0xF4 && s[1] > 0x8F))
        return 0;
    return n;
}
