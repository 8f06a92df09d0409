/* ========================================================================== */
/* >>file-api                                                MARK: - file-api */
/* Saving and loading, a program's own files, checks, traces.                 */
/* Needs: >>training-api.                                                     */
/* ========================================================================== */

/* -- save and load ---------------------------------------------------------- */

/* Writes every parameter below module, and with optim its moments, into one safetensors file of
 * global tensors, the same bytes at every degree of tp and pp; tsh_load reads it at any other.
 * Entries: parameters by their path below module (tied ones once; one tied to a parameter elsewhere
 * by its whole path), "optim.first.<path>" and "optim.second.<path>", row-major and in their own
 * dtype, but the exact weights that an optimiser keeps of a BF16 parameter in F32, and quantised
 * weights as bytes (U8), ggml's blocks, with "tshard.dtype.<path>": "q8_0" in __metadata__. There
 * are also a hash of all values, the state of the generators (seed, counts of randn and of every
 * module's dropout) and of optim (kind, steps, skipped). optim NULL: none.
 * Parameters without memory get their initial values first.
 * Collective over the world: two all-reduces; between them tp ranks of the first replica (dp) send
 * pieces of at most 1 MiB to its first rank, which never holds a whole tensor; stages of a pipeline
 * by way of their own first ranks, after an all-reduce more over the world and over pp. It writes a
 * temporary file "<path>.tmp-...", syncs it on POSIX and Windows, and renames it: path is the
 * old file or the whole new one. On POSIX, the new one has the old one's mode, and its owner where
 * this process may give it; a symbolic link stays, and leads to the new file. A save that was
 * killed leaves its temporary file behind: on POSIX the next save of this path removes it, unless
 * the file system has no locks (flock). An error is one on every rank, of the lowest rank's code
 * and sentence: TSH_ERR_IO (the system, or path is no regular file), TSH_ERR_MEMORY,
 * TSH_ERR_UNSUPPORTED (pp above 1 without a pipeline); no temporary file is left, and
 * tsh_clear_error on every rank recovers. */
TSH_API tsh_result tsh_save(tsh_module *module, const char *path, const tsh_optim *optim);
/* A name that tsh_load changes; see tsh_file_desc.rename. */
typedef struct tsh_rename {
    const char *from, *to;
} tsh_rename;
typedef struct tsh_file_desc {
    const char *prefix; /* in the file, each path follows this and a dot; NULL or "": nothing.
                         * Loading: what the file lacks under that name is looked for by the path
                         * alone; tensors of the file under other prefixes are skipped, unless it
                         * has none under this one */
    tsh_dtype dtype;    /* saving: floating-point parameters are rounded to this floating dtype,
                         * once, to nearest even, from exact weights where there are; 0: as
                         * tsh_save. Moments keep their dtype */
    int strict_names;   /* loading: 1: tensors under other prefixes are errors, too */
    int strict_dtype;   /* loading: 1: another dtype than the model's is an error; F32 is a BF16
                         * parameter's own, too, if an optimiser keeps its exact weights */
    const tsh_rename *rename; /* loading: pairs of patterns, each applied in turn to the names in
                               * the files (their prefixes included), up to one with .from NULL;
                               * patterns are a plan's, and the n-th * or ** of .to (of at most 8)
                               * is what the n-th of .from stands for:
                               * {"**.LayerNorm.gamma", "**.LayerNorm.weight"}. NULL: none */
    const char *const *ignore; /* loading: patterns, up to a NULL, of names in the files, before
                                * .rename, of tensors that are read as if the files had none such:
                                * "**.inv_freq". NULL: none */
    int broadcast; /* loading: 1: rank 0 of the world alone has the files, and sends each rank its
                    * shards; other ranks' paths are not looked at */
    /* Loading: copies the bytes of a safetensors file from `at` on, and returns how many there are,
     * -1 if they cannot be read. There need be no such file (path names it in errors): a program
     * can convert other formats as they are asked for. NULL: path is read. */
    int64_t (*read)(void *user, int64_t at, void *to, int64_t bytes);
    void *user;
} tsh_file_desc;
/* The same with more options; desc NULL: tsh_save. TSH_ERR_ARGUMENT: a prefix of TSH_PATH_SIZE
 * characters or more; a dtype that is not floating; one that differs between ranks. */
TSH_API tsh_result tsh_save_with(tsh_module *module, const char *path, const tsh_optim *optim,
                                 const tsh_file_desc *desc);
/* Reads what tsh_save wrote, or other programs' safetensors files, into a model of the same names
 * and shapes, with or without memory, at any degree and layout; every rank reads its own slices.
 * path: a file; an index (*.json, as transformers writes) of files beside it; or a folder, with
 * model.safetensors, else model.safetensors.index.json, else (on POSIX) of all *.safetensors in it.
 * optim: the same kind, its moments and steps are restored; NULL: they are skipped. The state of
 * the generators is restored where the file holds it, so that training goes on with the same bits.
 * F32, F64, BF16 and F16 are converted to the dtype that a parameter or moment has in the model,
 * rounded once, to nearest even; beyond its range a value becomes infinite. So are quantised
 * weights, in both directions: a model that was quantised before loading takes any file of these.
 * For a BF16 parameter, an optimiser that was created before keeps the exact F32 of the file.
 * Between steps. Two all-reduces over the world, no other traffic. All headers and the index are
 * checked whole on all ranks before anything changes. While a save of the same path goes on, too,
 * all ranks read one and the same save, or get TSH_ERR_IO and may load again after tsh_clear_error.
 * For that, they compare the hash of all values that tsh_save stored; for other programs' files, 64
 * bytes of every tensor. A tied parameter may be in the files under any of its names; if it is
 * there under several, every rank checks that the values of its shard are the same. Values that are
 * NaN or infinite are loaded, and the first replica logs them with the tensor's name: one rank for
 * a replicated tensor, each rank for its shard of a sharded one; after eight tensors only how many
 * more there are. An error is one on every rank, as
 * in tsh_save: TSH_ERR_IO (a system call failed, a file is malformed or differs between ranks, two
 * files hold the same tensor, an index does not list what its files hold), TSH_ERR_ARGUMENT
 * (tensors that the files or the model lack, or another kind of optimiser), TSH_ERR_SHAPE,
 * TSH_ERR_DTYPE (other dtypes that differ). Files over 2 GiB need a 64-bit long. */
TSH_API tsh_result tsh_load(tsh_module *module, const char *path, tsh_optim *optim);
/* The same with a prefix, such as that of one block in the file of a whole model, other names, or
 * with .strict_dtype (TSH_ERR_DTYPE); desc NULL: tsh_load. Errors as tsh_save_with. With .broadcast
 * between the two all-reduces: a broadcast and an all-gather over the world and one over pp, a few
 * numbers per tensor; then values in messages of at most 1 MiB, of which a rank holds one at a
 * time, rank 0 two: each shard from rank 0 to its rank of the first replica, a replicated tensor to
 * the first rank of tp, which broadcasts it over tp; all of them are broadcast over dp. */
TSH_API tsh_result tsh_load_with(tsh_module *module, const char *path, tsh_optim *optim,
                                 const tsh_file_desc *desc);

/* -- files of a program ------------------------------------------------------ */

/* Opens a file for reading as tsh_load does, for a program that reads other files of a model's
 * folder: a regular file of at most max bytes (0: of any size), also through symbolic links. A FIFO
 * or a device is not opened, so that nothing waits or reads without end. NULL: *error (which may be
 * NULL) has the sentence, TSH_ERR_IO, and errno is ENOENT if there is no such file. */
TSH_API FILE *tsh_file_open(const char *path, int64_t max, tsh_error *error);
/* A file that a program writes; all 0: one that is not open. */
typedef struct tsh_writer {
    tsh_error error; /* the first one, a sentence with the path; from then on calls return its code
                      * and do nothing else */
    int64_t size;    /* bytes of the file so far */
    /* The others are private. */
    FILE *file;
    int rows, lock; /* lock: a descriptor + 1; 0: none */
    char name[208], target[4096], temporary[4096 + 32];
} tsh_writer;
/* Opens a file for writing. rows 0: as tsh_save, a temporary file that replaces what is at path
 * (also through symbolic links) when it is closed. rows 1: for what grows, such as a log: adds to
 * what is there; what one tsh_writer_add adds is in the file at once, or, as on a full disk, no
 * byte of it (where the program asks for POSIX). A pipe or device is written to as it is. No write
 * raises SIGXFSZ: beyond RLIMIT_FSIZE is an error like others, TSH_ERR_IO with its reason. */
TSH_API tsh_result tsh_writer_open(tsh_writer *writer, const char *path, int rows);
/* Adds bytes. Returns the writer's error, so that it may be looked at once at the end. */
TSH_API tsh_result tsh_writer_add(tsh_writer *writer, const void *data, size_t bytes);
/* Syncs what was added so far to disk. */
TSH_API tsh_result tsh_writer_sync(tsh_writer *writer);
/* Closes the file, after any error, too. keep 1: a whole file is synced and takes its place, if
 * there was no error; else, or with keep 0, it is removed, and the old one stays. */
TSH_API tsh_result tsh_writer_close(tsh_writer *writer, int keep);

/* -- checks ----------------------------------------------------------------- */

/* Compares gradients of fn's scalar with central differences at every element (or `samples` of
 * them, 0: all) of every input; inputs are leaves. Returns the largest |difference| / max(1,
 * |gradient|), negative on an error. Collective over tp: inputs that are replicated are moved on
 * all ranks at once, sharded ones on their owner. eps 0: 1e-2 in float, 1e-5 in double. */
typedef tsh_tensor *(*tsh_gradcheck_fn)(tsh_ctx *ctx, tsh_tensor **in, int n, void *user);
TSH_API double tsh_gradcheck(tsh_ctx *ctx, tsh_gradcheck_fn fn, tsh_tensor **in, int n, void *user,
                             double eps, int64_t samples);
/* 0 and TSH_ERR_STATE on every rank of the world where what should be equal is not: replicated
 * parameters below over tp, all of them over dp, those tied across stages over pp, and likewise the
 * moments that optimisers keep for them (those that .zero cuts not over dp). Hashes are compared:
 * one all-gather over each axis of 8 bytes per tensor, one all-reduce over the world. The error
 * names the first tensor and the ranks that most others differ from. Before that, the whole trees
 * are compared (names, kinds, dtypes, shapes, layouts): TSH_ERR_MISMATCH names rank and module. */
TSH_API int tsh_check_replicas(tsh_module *module);
/* A 64-bit hash of a tensor's global values: equal at every degree if the values are. Collective
 * where sharded. */
TSH_API uint64_t tsh_hash(tsh_ctx *ctx, tsh_tensor *t);

/* -- trace ------------------------------------------------------------------ */

/* Where a trace goes, and its clock. What it points to must stay until tsh_trace_end. */
typedef struct tsh_trace_desc {
    const char *path; /* a file that rank 0 writes, by tsh_writer; NULL: `write` takes the text */
    /* Takes `size` bytes of the text, in order, on rank 0; returns 0 if it cannot. */
    int (*write)(void *user, const char *text, size_t size);
    /* Nanoseconds, never less than before; NULL: the system's clock. */
    int64_t (*now)(void *user);
    void *user;
    int64_t limit; /* events of a rank, 96 bytes each; later ones are only counted; 0: a million */
} tsh_trace_desc;
/* Notes from now on what this rank does: forward passes of modules by path; ops forward and
 * backward by name; an optimiser's steps, and in them the norm of the gradients and updates by
 * parameter; collectives with their bytes (as tsh_comm_stats counts), and the waits for those that
 * were started early; of each the path of the module it ran in, in backward too. On every rank, or
 * tsh_trace_end fails. Names of custom ops must stay until then. Errors: TSH_ERR_STATE (one runs),
 * TSH_ERR_ARGUMENT (neither or both of path and write; no clock). Where no trace runs, an op costs
 * two branches, which go the same way always. */
TSH_API tsh_result tsh_trace_begin(tsh_ctx *ctx, const tsh_trace_desc *desc);
/* Ends it and writes one text of all ranks, a lane per rank, in Chrome's Trace Event Format, which
 * Perfetto opens (ui.perfetto.dev). Collective over the world: every other rank sends to rank 0.
 * Times of different hosts are those of their own clocks. After an error nothing is written.
 * Errors: TSH_ERR_STATE (none runs); TSH_ERR_IO on rank 0. */
TSH_API tsh_result tsh_trace_end(tsh_ctx *ctx);
/* Where the time and the memory of this rank go. on 1: begins; on 0: ends, and gives two tables to
 * the logger, a line per message. All figures are per step (until each tsh_step_end; without one,
 * all is one step). Times, in milliseconds, are those of a row alone, without the ops and
 * collectives that it called, so that rows add up to the step.
 *   By op: calls; forward, backward and update (tsh_optim_step); share of the step; the rate, in
 *   GFLOP/s of matrix products (two per multiply-add), else in GB/s read and written. That of a
 *   collective is of the bytes that tsh_comm_stats counts; "waits" is the time in tsh_wait. In
 *   steps with a backward, what runs between tsh_no_grad_begin and end is one row, evaluation.
 *   By module, where "h.*" is h.0, h.1, ... together: the same times; MB or kB (10^6 or 10^3 bytes)
 *   of parameters, gradients and moments, and of step tensors at the moment when these are most (a
 *   backward begins, or a step ends); then all else, up to tsh_mem_stats' total.
 * Local: no collective runs. The environment variable TSHARD_PROFILE=1 does the same on rank 0 from
 * tsh_open to tsh_close, without the first step where there are more, and to stderr where there is
 * no logger. Errors: TSH_ERR_ARGUMENT (no logger; no clock), TSH_ERR_STATE (a profile or a trace
 * runs already; none runs), TSH_ERR_MEMORY. */
TSH_API tsh_result tsh_profile(tsh_ctx *ctx, int on);
