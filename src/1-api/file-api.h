/* ========================================================================== */
/* >>file-api                                                MARK: - file-api */
/* Saving and loading, a program's own files, checks, traces.                 */
/* Needs: >>training-api.                                                     */
/* ========================================================================== */

/* -- save and load ---------------------------------------------------------- */

/* Writes every parameter below module, and with optim its moments and what a tsh_outer of it keeps,
 * into one safetensors file of whole tensors, with the same bytes at every degree of tp and pp;
 * tsh_load reads it at any degree. optim NULL: parameters only.
 * Entries: parameters by their path below module (a tied one once; one that is tied to a parameter
 * outside module by its path from the root), moments as "optim.first.<path>",
 * "optim.second.<path>" and "optim.third.<path>". All are row-major and in their own dtype, except
 * that exact weights which an optimiser keeps of a BF16 parameter are in F32, and quantised weights
 * are bytes (U8) in ggml's blocks, with "tshard.dtype.<path>": "q8_0" in __metadata__. The file
 * also has a hash of all values, the state of the random numbers (seed, counts of randn and of
 * every module's dropout calls) and of optim (kinds, steps, skipped).
 * With a tsh_outer, whose replicas differ, the entries above are those of the first replica. Those
 * of replica 1 are "optim.replica.1.weight.<path>", "optim.replica.1.first.<path>" and so on; outer
 * weights are "optim.outer_weight.<path>", their momentum "optim.outer_moment.<path>", and changes
 * that were sent but are not used yet "optim.outer_change.<path>".
 * Parameters without memory get their initial values first.
 * Collective over the world: two all-reduces. Between them the tp ranks of the first replica (dp)
 * send blocks of at most 1 MiB to its first rank, which never holds a whole tensor; stages of a
 * pipeline send through their own first ranks, after one more all-reduce over the world and one
 * over pp. With a tsh_outer, two more all-reduces over the world and an all-gather over dp come
 * first, and the ranks of other replicas send their shards to those of the first one.
 * It writes a temporary file "<path>.tmp-...", syncs it on POSIX and Windows, and renames it, so
 * that path is the old file or the whole new one. On POSIX, the new file has the old one's mode,
 * and its owner if this process may set it; a symbolic link stays, and leads to the new file. A
 * save that was killed leaves its temporary file behind: on POSIX the next save to this path
 * removes it, unless the file system has no locks (flock).
 * An error on one rank is an error on every rank, with the code and sentence of the lowest rank:
 * TSH_ERR_IO (the system, or path is no regular file), TSH_ERR_MEMORY, TSH_ERR_UNSUPPORTED (pp
 * above 1 without a pipeline). No temporary file is left then, and tsh_clear_error on every rank
 * recovers.
 * torch: torch.save, nn.Module.state_dict, dist.checkpoint.save */
TSH_API tsh_result tsh_save(tsh_module *module, const char *path, const tsh_optim *optim);
/* A pair of patterns: tensors whose name in a file matches .from are loaded as .to, and saved the
 * other way; see tsh_file_desc.rename. */
typedef struct tsh_rename {
    const char *from, *to;
} tsh_rename;
/* A hash function with results of 32 bytes for which nobody can find collisions, such as BLAKE2b:
 * shards with the same hash are taken to be equal. */
typedef struct tsh_hasher {
    size_t size; /* bytes of its state, which the library aligns to 64 */
    void (*begin)(void *state);
    void (*add)(void *state, const void *bytes, size_t count);
    void (*end)(void *state, unsigned char hash[32]);
} tsh_hasher;
/* Options of saving and loading; all 0: none. */
typedef struct tsh_file_desc {
    const char *prefix; /* names in the file begin with this and a dot; NULL or "": no prefix.
                         * Loading: a name that the file lacks with the prefix is looked up
                         * without it; tensors under other prefixes are skipped, unless the file
                         * has none under this one */
    tsh_dtype dtype;    /* saving: the dtype to which floating parameters are rounded, once, to
                         * nearest even, from exact weights if there are any; 0: as tsh_save.
                         * Moments keep their dtype */
    int strict_names;   /* loading: 1: tensors under other prefixes are errors */
    int strict_dtype;   /* loading: 1: a dtype other than the model's is an error; for a BF16
                         * parameter of which an optimiser keeps exact weights, F32 is allowed */
    /* Pairs of patterns, the last one with .from NULL. Loading: each in turn is applied to the
     * names in the files (their prefixes included). Patterns are those of tsh_plan_rule; the n-th *
     * or ** of .to (at most 8) stands for what the n-th of .from matched: {"**.LayerNorm.gamma",
     * "**.LayerNorm.weight"}. Saving: the same pairs are undone in reverse order, so that one desc
     * loads a model and writes it under the files' names: each pair whose .to matches makes .from
     * of the name. A pair that cannot be undone (.from has ?, a [set] or more * than .to), and a
     * name that loading would not give back, are errors. NULL: none. */
    const tsh_rename *rename;
    /* loading: patterns, the last one NULL, of names in the files, before .rename. Tensors that
     * match are treated as if the files did not have them: "**.inv_freq". Saving: a tensor with
     * such a name is an error. NULL: none. */
    const char *const *ignore;
    int broadcast; /* loading: 1: only rank 0 of the world reads the files, and sends each rank
                    * its shards; other ranks ignore their path */
    /* Loading with .broadcast: a folder that exists, in which this rank keeps its shards, each in a
     * file that is named by .hasher's hash of its bytes and dtype. At the next load rank 0 sends
     * the hashes, and then only the shards that a rank has not kept or whose file has changed.
     * Rank 0 keeps the hashes there, for files of the same path, size and times, but not of a file
     * that has changed in the last two seconds, as many file systems count whole seconds. Nothing
     * is cached if rank 0 has no cache; a rank without one is sent everything. If a shard cannot be
     * kept, a warning is logged; one whose hash is not rank 0's is TSH_ERR_IO. NULL: none. */
    const char *cache;
    const tsh_hasher *hasher; /* needed by .cache */
    uint64_t stamp; /* with .cache and .read_at: a number that stands for the bytes that read_at
                     * gives, such as a hash of the path, size and time of change of the file it
                     * reads; 0: unknown, so that rank 0 hashes all at each load (also pass 0 if the
                     * file changed less than two seconds ago) */
    /* Loading: copies `bytes` bytes of a safetensors file, from offset `at` on, and returns how
     * many it copied: fewer if the file ends before, -1 if they cannot be read. The file need not
     * exist (path is only named in errors), so a program can convert other formats as they are
     * read. NULL: the file at path is read. */
    int64_t (*read_at)(int64_t at, void *to, int64_t bytes, void *user);
    void *user;
    /* averages of the module's weights, saved or loaded with it, as "optim.average.<path>"; NULL:
     * none. Loading: those in the file are skipped then */
    tsh_ema *ema;
    /* the name of adapters (tsh_lora): A and B of these alone are saved or loaded, under the names
     * in PEFT's adapter_model.safetensors ("h.0.q_proj.lora_A.weight"), with a .prefix that is
     * "base_model.model" if NULL. "": the model without its adapters, as after tsh_lora_merge;
     * saving: adapters that are active and not merged are TSH_ERR_STATE, as the file would lack
     * what they add. NULL: the model, with all its adapters */
    const char *adapter;
    /* saving: path is a folder that exists and has no model yet, and gets the files that
     * transformers writes: model-00001-of-00003.safetensors and so on, each with at most so many
     * bytes of tensors (a larger tensor has a file of its own), and last
     * model.safetensors.index.json; if one file is enough, model.safetensors alone. After an error
     * none of them is left. 0: path is one file */
    int64_t shard_bytes;
} tsh_file_desc;
/* Saves as tsh_save does, with options; desc NULL: none. TSH_ERR_ARGUMENT: a prefix of
 * TSH_PATH_SIZE characters or more; a dtype that is not floating; a dtype that differs between
 * ranks; names that .rename does not give back. Quantised weights are written in .dtype if it is
 * set. */
TSH_API tsh_result tsh_save_with(tsh_module *module, const char *path, const tsh_optim *optim,
                                 const tsh_file_desc *desc);
/* Loads a file of tsh_save, or safetensors files of other programs, into a model of the same names
 * and shapes, with or without memory, at any degree and layout; every rank reads its own slices.
 * path: a file; an index (*.json, as transformers writes) of files beside it; or a folder with
 * model.safetensors, else model.safetensors.index.json, else (on POSIX) with other *.safetensors
 * files, which are all read. optim: an optimiser of the same kind, whose moments and number of
 * steps are restored; NULL: those in the file are skipped. If it has a tsh_outer, replica r takes
 * the state of replica r modulo the number of replicas in the file; after a file without a
 * tsh_outer, outer steps begin anew. The state of the random numbers is restored if the file has
 * it, so that training goes on with the same bits.
 * F32, F64, BF16 and F16 values are converted to the model's dtype of the parameter or moment,
 * rounded once, to nearest even; beyond its range a value becomes infinite. Quantised weights are
 * converted, too, in both directions: a model that was quantised before loading accepts any of
 * these files. For a BF16 parameter, an optimiser that was made before loading keeps the exact F32
 * value of the file.
 * Call it between steps. It runs two all-reduces over the world, and no other communication.
 * Headers and index are checked completely on all ranks before anything changes. If another process
 * saves to the path meanwhile, all ranks read the same save, or all get TSH_ERR_IO and may load
 * again after tsh_clear_error. To detect that, they compare the hash of all values that tsh_save
 * stored; for files of other programs, 64 bytes of every tensor.
 * A tied parameter may be in the files under any of its names; if it is there under several, every
 * rank checks that the values of its shard are the same. NaN and infinity are loaded, and the first
 * replica logs the name of the tensor: one rank for a replicated tensor, each rank for its shard of
 * a sharded one; after eight tensors, only how many more there are.
 * An error on one rank is an error on every rank, as in tsh_save: TSH_ERR_IO (a system call failed,
 * a file is malformed or differs between ranks, two files have the same tensor, an index does not
 * list what its files have), TSH_ERR_ARGUMENT (tensors missing in the files or in the model;
 * another kind of optimiser), TSH_ERR_SHAPE, TSH_ERR_DTYPE (dtypes that cannot be converted). Files
 * over 2 GiB need a 64-bit long.
 * torch: torch.load, nn.Module.load_state_dict, dist.checkpoint.load */
TSH_API tsh_result tsh_load(tsh_module *module, const char *path, tsh_optim *optim);
/* Loads as tsh_load does, with options: a prefix, such as that of one block in the file of a whole
 * model; other names; strict dtypes (TSH_ERR_DTYPE). desc NULL: tsh_load. Errors as in
 * tsh_save_with.
 * With .broadcast, more collectives run between the two all-reduces: a broadcast and an all-gather
 * over the world and one over pp, of a few numbers per tensor; then the values, in messages of at
 * most 1 MiB, of which a rank holds one at a time, rank 0 two. Rank 0 sends each shard to its rank
 * of the first replica, and a replicated tensor to the first rank of tp, which broadcasts it over
 * tp; then all are broadcast over dp. With rank 0's .cache, before that: a broadcast and an
 * all-gather over the world, and all-reduces over tp and dp. */
TSH_API tsh_result tsh_load_with(tsh_module *module, const char *path, tsh_optim *optim,
                                 const tsh_file_desc *desc);

/* -- files that a program reads or writes itself ----------------------------- */

/* Opens a file for reading as tsh_load does, for a program that reads other files of a model's
 * folder. It must be a regular file of at most max bytes (0: any size), or a symbolic link to one;
 * a FIFO or device is refused, because reading it might block or never end. After an error it
 * returns NULL, *error (may be NULL) has TSH_ERR_IO and a sentence, and errno is ENOENT if there is
 * no such file. */
TSH_API FILE *tsh_file_open(const char *path, int64_t max, tsh_error *error);
/* A file that a program writes. All 0: not open. */
typedef struct tsh_writer {
    tsh_error error; /* the first error, with a sentence that names the path; after it all calls
                      * return its code and do nothing else */
    int64_t size;    /* bytes of the file so far */
    /* The other fields are private. */
    FILE *file;
    int rows, lock; /* rows: argument of tsh_writer_open; lock: 1 + the descriptor of a file that is
                     * locked, or 0 */
    char name[208], target[4096], temporary[4096 + 32];
} tsh_writer;
/* Opens a file for writing.
 * rows 0: writes a temporary file, as tsh_save does, which replaces the file at path (also through
 * symbolic links) when it is closed.
 * rows 1: appends to the file, for files that grow, such as logs. Each tsh_writer_add writes all of
 * its bytes at once or, as on a full disk, none of them (if the program is compiled for POSIX). A
 * pipe or device is written to directly.
 * No write raises SIGXFSZ: beyond RLIMIT_FSIZE, calls fail with TSH_ERR_IO and its reason, as after
 * other errors. */
TSH_API tsh_result tsh_writer_open(tsh_writer *writer, const char *path, int rows);
/* Writes bytes to the file. Returns the writer's error, so that checking the last call is
 * enough. */
TSH_API tsh_result tsh_writer_add(tsh_writer *writer, const void *data, size_t bytes);
/* Syncs to disk what was written so far. */
TSH_API tsh_result tsh_writer_sync(tsh_writer *writer);
/* Closes the file, also after an error. keep 1 and no error: with rows 0, the temporary file is
 * synced and replaces the file at path. Otherwise the temporary file is removed and the old file
 * stays. */
TSH_API tsh_result tsh_writer_close(tsh_writer *writer, int keep);

/* -- checks of gradients, replicas, values ---------------------------------- */

/* tsh_gradcheck compares the gradients of fn with central differences and returns the largest
 * |difference| / max(1, |gradient|), or a negative number after an error. fn, a tsh_gradcheck_fn,
 * returns a scalar, a function of the n inputs, which are leaves. Every element of every input is
 * checked, or `samples` elements of each (0: all). eps: the step; 0: 1e-2 in float, 1e-5 in double.
 * Collective over tp: an element of a replicated input is changed on all ranks at once, an element
 * of a sharded input on the rank that owns it.
 * torch: torch.autograd.gradcheck */
typedef tsh_tensor *(*tsh_gradcheck_fn)(tsh_ctx *ctx, tsh_tensor **in, int n, void *user);
TSH_API double tsh_gradcheck(tsh_ctx *ctx, tsh_gradcheck_fn fn, tsh_tensor **in, int n, void *user,
                             double eps, int64_t samples);
/* Checks that ranks hold the same values where they should: replicated parameters below module over
 * tp, all parameters over dp, tied parameters over the pipeline stages that hold them, and the
 * moments that optimisers keep for them (over dp not those that .zero shards). While there is a
 * tsh_outer, its outer weights and their momentum are compared over dp, and nothing else. Returns 1
 * if so; else 0, with TSH_ERR_STATE on every rank of the world: the error names the first such
 * tensor and the ranks that differ from the majority. It compares hashes: one all-gather over each
 * axis of 8 bytes per tensor, one all-reduce over the world. Before that it compares the module
 * trees (names, kinds, dtypes, shapes, layouts): TSH_ERR_MISMATCH names the rank and the module. */
TSH_API int tsh_check_replicas(tsh_module *module);
/* Returns a 64-bit hash of a tensor's global values, which is the same at every degree if the
 * values are. Collective if the tensor is sharded. */
TSH_API uint64_t tsh_hash(tsh_ctx *ctx, tsh_tensor *t);

/* -- traces and profiles ---------------------------------------------------- */

/* Where a trace is written, and its clock. What it points to must stay valid until
 * tsh_trace_end. */
typedef struct tsh_trace_desc {
    const char *path; /* path of a file that rank 0 writes with a tsh_writer; NULL: `print` gets
                       * the text */
    /* Called on rank 0 with the next `size` bytes of the text; returns 0 if it cannot take them. */
    int (*print)(const char *text, size_t size, void *user);
    /* Returns the time in nanoseconds, monotonic; NULL: tsh_now. */
    int64_t (*now)(void *user);
    void *user;
    int64_t limit; /* max events per rank, 96 bytes each; later ones are only counted; 0: a
                    * million */
} tsh_trace_desc;
/* Starts a trace, which records what this rank does: forward passes of modules, by path; forward
 * and backward of ops, by name; steps of optimisers and, within them, the gradient norm and the
 * updates, by parameter; collectives with their bytes (as in tsh_comm_stats), and the waits for
 * those that were started early. Each event has the path of the module it ran in, in backward, too.
 * Call it on every rank, else tsh_trace_end fails. Names of custom ops must stay valid until then.
 * Errors: TSH_ERR_STATE (a trace or profile runs already), TSH_ERR_ARGUMENT (neither or both of
 * path and print; no clock). Without a trace, an op costs two well-predicted branches.
 * torch: torch.profiler.profile */
TSH_API tsh_result tsh_trace_begin(tsh_ctx *ctx, const tsh_trace_desc *desc);
/* Ends the trace and writes one text for all ranks, with a row per rank, in Chrome's Trace Event
 * Format, which Perfetto opens (ui.perfetto.dev). Collective over the world: every other rank sends
 * to rank 0. Times of different hosts are those of their own clocks. After an error nothing is
 * written. Errors: TSH_ERR_STATE (no trace runs); TSH_ERR_IO on rank 0.
 * torch: torch.profiler.profile.export_chrome_trace */
TSH_API tsh_result tsh_trace_end(tsh_ctx *ctx);
/* Measures where the time and the memory of this rank go. on 1: starts; on 0: ends, and passes two
 * tables to the logger, one message per line. All figures are per step (from one tsh_step_end to
 * the next; without any, all is one step). Times are in milliseconds; that of a row excludes the
 * ops and collectives it calls, so that the rows add up to the step.
 *   By op: calls; forward, backward and update (tsh_optim_step); share of the step; the rate, in
 *   GFLOP/s of matrix products (two per multiply-add), else in GB/s read and written. A
 *   collective's rate is of the bytes that tsh_comm_stats counts; "waits" is its time in tsh_wait.
 *   In steps with a backward, what runs between tsh_no_grad_begin and tsh_no_grad_end is one row,
 *   "evaluation".
 *   By module, where "h.*" is the sum of h.0, h.1, ...: the same times; MB or kB (10^6 or 10^3
 *   bytes) of parameters, gradients and moments, and of step tensors at the backward or step end
 *   where the step pool was fullest; then all else, up to tsh_mem_stats' total.
 * Local: no collective runs. The environment variable TSHARD_PROFILE=1 does the same on rank 0 from
 * tsh_open to tsh_close, leaves out the first step if there are more, and writes to stderr if there
 * is no logger. Errors: TSH_ERR_ARGUMENT (no logger; no clock), TSH_ERR_STATE (a profile or a trace
 * runs already; none runs), TSH_ERR_MEMORY.
 * torch: torch.profiler.record_function */
TSH_API tsh_result tsh_profile(tsh_ctx *ctx, int on);
