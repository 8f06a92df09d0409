/* tsh_load of models in several files: a folder, an index or all files of a folder, of mixed dtypes
 * and other names, read by every rank or by rank 0 for all; and folders that are not what they
 * should be, which change nothing. */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../support/files.h"
#include "../support/folder_model.h"
#include <errno.h>

enum { TENSORS = 16, SHARDS = 2 };

/* A tensor of a file. */
typedef struct stored {
    const char *name, *path; /* in the file; in the model: decides its values */
    tsh_dtype dtype;
    int rows, columns; /* columns 0: it has one dimension */
    int file;          /* which of the files has it; -1: none */
    int place;         /* where the index places it, counted from 1; 0: where it is */
} stored;

/* ------------------------------------------------------------------------ files */

static const char *const file_names[] = {"model-1.safetensors", "model-2.safetensors"};
static const char index_name[] = "model.safetensors.index.json";

static int width(tsh_dtype dtype) {
    return dtype == TSH_F32 || dtype == TSH_I32 ? 4 : 2;
}

/* The bits of x, which the dtype holds exactly. */
static uint32_t encode(double x, tsh_dtype dtype) {
    const float f = (float)x;
    double size = x < 0 ? -x : x;
    uint32_t bits;
    int exponent = 15;
    memcpy(&bits, &f, sizeof bits);
    if (dtype == TSH_I32) return 1;
    if (dtype == TSH_F32) return bits;
    if (dtype == TSH_BF16) return bits >> 16;
    if (size == 0) return 0;
    for (; size >= 2; size /= 2) exponent++;
    for (; size < 1; size *= 2) exponent--;
    return (x < 0 ? 0x8000U : 0) | (uint32_t)exponent << 10 | (uint32_t)((size - 1) * 1024);
}

/* Writes the tensors of one file, without the last `cut` bytes. */
static void write_file(const stored *s, int file, size_t cut) {
    static char bytes[16384];
    char header[4096] = "{";
    const char *names[] = {"F32", "BF16", "F16", "I32"};
    size_t at, n, begin = 0, e;
    int i, k, pass;
    for (pass = 0, at = 0; pass < 2; pass++) {
        for (i = 0; i < TENSORS && s[i].name; i++) {
            const size_t count = (size_t)(s[i].rows * (s[i].columns ? s[i].columns : 1));
            const int w = width(s[i].dtype);
            if (s[i].file != file) continue;
            if (!pass) {
                n = strlen(header);
                (void)snprintf(header + n, sizeof header - n,
                               s[i].columns ? "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%d,%d]"
                                            : "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%d]",
                               n > 1 ? "," : "", s[i].name,
                               names[s[i].dtype == TSH_F32    ? 0
                                     : s[i].dtype == TSH_BF16 ? 1
                                     : s[i].dtype == TSH_F16  ? 2
                                                              : 3],
                               s[i].rows, s[i].columns);
                n = strlen(header);
                (void)snprintf(header + n, sizeof header - n, ",\"data_offsets\":[%d,%d]}",
                               (int)begin, (int)(begin + count * (size_t)w));
                begin += count * (size_t)w;
                continue;
            }
            for (e = 0; e < count; e++) {
                const uint32_t bits = encode(number(s[i].path, (int64_t)e), s[i].dtype);
                for (k = 0; k < w; k++) bytes[at++] = (char)(unsigned char)(bits >> 8 * k);
            }
        }
        if (pass) break;
        strcat(header, "}");
        n = strlen(header);
        memset(bytes, 0, 8);
        bytes[0] = (char)(unsigned char)n;
        bytes[1] = (char)(unsigned char)(n >> 8);
        memcpy(bytes + 8, header, n);
        at = 8 + n;
    }
    files_write(file_names[file], bytes, at - cut);
}

/* Writes the index; `more` is added to its map. */
static void write_index(const stored *s, const char *more) {
    char text[4096] = "{\n  \"metadata\": {\"total_size\": 1.5e3, \"x\": [null, {\"y\": true}]},\n"
                      "  \"weight_map\": {";
    size_t n;
    int i, first = 1;
    for (i = 0; i < TENSORS && s[i].name; i++) {
        if (s[i].file < 0 || s[i].place == 9) continue;
        n = strlen(text);
        (void)snprintf(text + n, sizeof text - n, "%s\"%s\": \"%s\"", first ? "" : ", ", s[i].name,
                       file_names[s[i].place ? s[i].place - 1 : s[i].file]);
        first = 0;
    }
    n = strlen(text);
    (void)snprintf(text + n, sizeof text - n, "%s}}\n", more);
    files_write(index_name, text, strlen(text));
}

static const stored tensors[TENSORS] = {
    {"net.embed.weight", "embed.weight", TSH_BF16, WORDS, WIDTH, 0, 0},
    {"net.h.0.norm.gamma", "h.0.norm.weight", TSH_F32, WIDTH, 0, 0, 0},
    {"net.h.0.norm.beta", "h.0.norm.bias", TSH_F16, WIDTH, 0, 0, 0},
    {"net.h.0.rotary.inv_freq", "-", TSH_F32, 3, 0, 0, 0},
    {"net.h.0.up.weight", "h.0.up.weight", TSH_F16, HIDDEN, WIDTH, 1, 0},
    {"net.h.0.up.bias", "h.0.up.bias", TSH_F32, HIDDEN, 0, 1, 0},
    {"net.h.0.down.weight", "h.0.down.weight", TSH_BF16, WIDTH, HIDDEN, 1, 0},
    {"net.h.0.down.bias", "h.0.down.bias", TSH_F32, WIDTH, 0, 1, 0},
    {"head.weight", "head.weight", TSH_F32, WORDS, WIDTH, 1, 0},
};

static const char *const ignored[] = {"**.inv_freq", "none.*", NULL};
static const tsh_rename renamed[] = {
    {"**.gamma", "**.weight"}, {"net.**.*.beta", "net.**.*.bias"}, {NULL, NULL}};

/* Removes "net." from the names, and what the model does not have. */
static void make_plain(stored *s) {
    int i;
    memcpy(s, tensors, sizeof tensors);
    for (i = 0; i < TENSORS && s[i].name; i++)
        if (s[i].path[0] == '-')
            s[i].file = -1;
        else
            s[i].name = s[i].path;
}

/* ------------------------------------------------------------------------ the model */

typedef struct job {
    const char *path; /* NULL: on other ranks than 0 */
    tsh_file_desc desc;
    tsh_result code; /* the error, and a part of its sentence */
    const char *part;
    int pipeline; /* h is one of two stages */
} job;

static tsh_tensor *first(tsh_ctx *ctx, int k, void *user) {
    (void)k, (void)user;
    return tsh_ones(ctx, tsh_shape2(1, WIDTH));
}

static tsh_tensor *last(tsh_ctx *ctx, tsh_tensor *y, int k, void *user) {
    (void)ctx, (void)k, (void)user;
    return tsh_mean(y, TSH_ALL, 0);
}

/* Loads the model; all values are right, or there is the job's error and nothing changed. */
static int loads(tsh_ctx *ctx, void *user) {
    const job *j = (const job *)user;
    const int alone = j->desc.broadcast && tsh_world(ctx)->rank > 0;
    const tsh_pipeline_desc stages = {.micro_batches = 1, .input = first, .loss = last};
    uint64_t before, after;
    walk w;
    memset(&w, 0, sizeof w);
    add_model(ctx);
    if (j->pipeline) {
        const tsh_linear_desc d = {.in = WIDTH, .out = WIDTH};
        tsh_add_linear(tsh_find(tsh_root(ctx), "h"), "1", &d);
        CHECK(tsh_pipeline_new(tsh_find(tsh_root(ctx), "h"), &stages) != NULL, "pipeline");
        CHECK(tsh_load_with(tsh_root(ctx), alone ? NULL : j->path, NULL, &j->desc) == TSH_OK, "");
        tsh_each_param(tsh_root(ctx), compare, &w);
        CHECK(!w.wrong, "%s", w.path);
        return 0;
    }
    CHECK(tsh_materialize(tsh_root(ctx)) == TSH_OK, "values");
    before = tsh_hash(ctx, tsh_param(tsh_root(ctx), "embed.weight"));
    (void)tsh_load_with(tsh_root(ctx), alone ? NULL : j->path, NULL, &j->desc);
    if (j->part) {
        CHECK_SAYS(j->code, j->part);
        after = tsh_hash(ctx, tsh_param(tsh_root(ctx), "embed.weight"));
        CHECK(before == after, "nothing changed");
        return 0;
    }
    CHECK_OK();
    tsh_each_param(tsh_root(ctx), compare, &w);
    CHECK(!w.wrong, "%d wrong, %s", w.wrong, w.path);
    return 0;
}

/* At 1 to 4 ranks of tp, in f32 and bf16, and two replicas; read by all, or by rank 0. */
static void run_loads(job j) {
    tsh_desc desc;
    int ranks;
    for (ranks = 1; ranks <= 4; ranks++) {
        memset(&desc, 0, sizeof desc);
        desc.dtype = ranks % 2 ? TSH_DTYPE_DEFAULT : TSH_BF16;
        j.desc.broadcast = 0;
        ranks_run_at(RANKS_FIRST, ranks, &desc, loads, &j);
        j.desc.broadcast = 1;
        ranks_run_at(RANKS_FIRST, ranks, &desc, loads, &j);
    }
    desc.tp = 2;
    ranks_run_at(RANKS_FIRST, 4, &desc, loads, &j);
    desc.tp = 1;
    ranks_run_at(RANKS_FIRST, 2, &desc, loads, &j);
}

/* ------------------------------------------------------------------------ tests */

static void write_tensors(const stored *s) {
    if (FILES_MINE) write_file(s, 0, 0);
    if (FILES_MINE) write_file(s, 1, 0);
}

static void a_folder_an_index_and_a_file_load(void **state) {
    stored s[TENSORS];
    job j;
    int i;
    (void)state;
    memset(&j, 0, sizeof j);
    j.path = files_here;
    make_plain(s);
    write_tensors(s);
    run_loads(j); /* all files of the folder */
    if (FILES_MINE) write_index(s, "");
    run_loads(j);
    j.path = files_path(index_name);
    run_loads(j);
    for (i = 0; i < TENSORS; i++) s[i].file = s[i].file < 0 ? -1 : 0;
    if (FILES_MINE) write_file(s, 0, 0);
    j.path = files_path(file_names[0]);
    run_loads(j);
}

/* Reads a file in place of tsh_load; user: the position that it cannot read. */
static int64_t read_bytes(int64_t at, void *to, int64_t bytes, void *user) {
    const int64_t fails = *(const int64_t *)user;
    FILE *file = fopen(files_path(file_names[0]), "rb");
    int64_t n = -1;
    if (file && fseek(file, (long)at, SEEK_SET) == 0)
        n = (int64_t)fread(to, 1, (size_t)bytes, file);
    if (file) (void)fclose(file);
    if (at > fails || fails >= at + bytes) return n;
    errno = ENETDOWN;
    return -1;
}

/* Says that it has read more bytes than it was asked for. */
static int64_t read_too_many(int64_t at, void *to, int64_t bytes, void *user) {
    (void)user, (void)at;
    memset(to, 'x', (size_t)bytes);
    return bytes + 1000;
}

static void bytes_come_from_a_function(void **state) {
    stored s[TENSORS];
    int64_t fails = -1;
    job j;
    int i;
    (void)state;
    memset(&j, 0, sizeof j);
    make_plain(s);
    for (i = 0; i < TENSORS; i++) s[i].file = s[i].file < 0 ? -1 : 0;
    if (FILES_MINE) write_file(s, 0, 0);
    j.path = "nowhere";
    j.desc.read_at = read_bytes;
    j.desc.user = &fails;
    run_loads(j);
    j.code = TSH_ERR_IO;
    j.part = "tsh_load: \"nowhere\" cannot be read: ";
    fails = 20;
    ranks_run_at(RANKS_FIRST, 2, NULL, loads, &j);
    fails = -1;
    j.desc.read_at = read_too_many;
    ranks_run_at(RANKS_FIRST, 2, NULL, loads, &j);
    j.desc.read_at = read_bytes;
    if (FILES_MINE) write_file(s, 0, 5);
    j.part = "tsh_load: \"nowhere\" is no safetensors file: its values are cut off";
    ranks_run_at(RANKS_FIRST, 2, NULL, loads, &j);
}

static void names_are_mapped(void **state) {
    job j;
    (void)state;
    memset(&j, 0, sizeof j);
    j.path = files_here;
    j.desc.prefix = "net"; /* which head.weight does not have */
    j.desc.rename = renamed;
    j.desc.ignore = ignored;
    write_tensors(tensors);
    run_loads(j);
    if (FILES_MINE) write_index(tensors, "");
    run_loads(j);
}

/* A prefix that no tensor of the files has. */
static void a_prefix_may_be_absent(void **state) {
    stored s[TENSORS];
    job j;
    (void)state;
    memset(&j, 0, sizeof j);
    make_plain(s);
    j.path = files_here;
    j.desc.prefix = "net";
    write_tensors(s);
    run_loads(j);
    s[9] = s[8]; /* then there are no other prefixes, either, whose tensors would be skipped */
    s[9].name = s[9].path = "cls.bias";
    write_tensors(s);
    j.code = TSH_ERR_ARGUMENT;
    j.part = "has 1 that the model lacks (\"cls.bias\"); .ignore takes names of tensors that";
    ranks_run_at(RANKS_FIRST, 2, NULL, loads, &j);
}

/* Tensors under other prefixes are skipped, or errors; those that are missing have the names that
 * the files would have for them. */
static void names_are_strict(void **state) {
    stored s[TENSORS];
    job j;
    (void)state;
    memset(&j, 0, sizeof j);
    memcpy(s, tensors, sizeof tensors);
    s[9] = s[8];
    s[9].name = s[9].path = "cls.bias";
    j.path = files_here;
    j.desc.prefix = "net";
    j.desc.rename = renamed;
    j.desc.ignore = ignored;
    write_tensors(s);
    run_loads(j);
    j.desc.strict_names = 1;
    j.code = TSH_ERR_ARGUMENT;
    j.part = "has 1 that the model lacks (\"cls.bias\")";
    ranks_run_at(RANKS_FIRST, 2, NULL, loads, &j);
    write_tensors(tensors);
    j.code = TSH_OK;
    j.part = NULL;
    run_loads(j);
    memcpy(s, tensors, sizeof tensors);
    s[1].file = -1;
    s[4].name = "net.h.0.up.gamma"; /* which says that files have this name for a weight */
    write_tensors(s);
    j.code = TSH_ERR_ARGUMENT;
    j.part = "lacks 1 of the model's tensors (\"net.h.0.norm.gamma\")";
    ranks_run_at(RANKS_FIRST, 2, NULL, loads, &j);
}

/* What tsh_save wrote at one rank, as model.safetensors in a folder, where another file is not
 * looked at. */
static int saves(tsh_ctx *ctx, void *user) {
    job j;
    (void)user;
    memset(&j, 0, sizeof j);
    j.path = files_here;
    if (loads(ctx, &j)) return 1;
    CHECK(tsh_save(tsh_root(ctx), files_path("model.safetensors"), NULL) == TSH_OK, "saved");
    return 0;
}

static void one_rank_saves_and_three_load(void **state) {
    stored s[TENSORS];
    job j;
    (void)state;
    memset(&j, 0, sizeof j);
    make_plain(s);
    write_tensors(s);
    ranks_run_at(RANKS_FIRST, 1, NULL, saves, NULL);
    j.path = files_here;
    run_loads(j);
}

static void stages_of_a_pipeline_are_sent_theirs(void **state) {
    tsh_desc desc;
    stored s[TENSORS];
    job j;
    int ranks;
    (void)state;
    memset(&desc, 0, sizeof desc);
    memset(&j, 0, sizeof j);
    make_plain(s);
    s[9] = s[7];
    s[9].name = s[9].path = "h.1.weight";
    s[9].columns = WIDTH;
    s[10] = s[7];
    s[10].name = s[10].path = "h.1.bias";
    write_tensors(s);
    j.path = files_here;
    j.pipeline = 1;
    desc.pp = 2;
    for (ranks = 2; ranks <= 4; ranks += 2)
        for (desc.tp = 1; desc.tp <= ranks / 2; desc.tp++)
            for (j.desc.broadcast = 0; j.desc.broadcast < 2; j.desc.broadcast++)
                ranks_run_at(RANKS_FIRST, ranks, &desc, loads, &j);
}

/* ------------------------------------------------------------------------ mistakes */

/* Rank 0 alone, and all ranks, get the error. */
static void expect_error(const stored *s, const tsh_file_desc *desc, tsh_result code,
                         const char *part) {
    job j;
    int ranks;
    memset(&j, 0, sizeof j);
    if (desc) j.desc = *desc;
    j.path = files_here;
    j.code = code;
    j.part = part;
    if (s) write_tensors(s);
    for (ranks = 1; ranks <= 3; ranks += 2)
        for (j.desc.broadcast = 0; j.desc.broadcast < 2; j.desc.broadcast++)
            ranks_run_at(RANKS_FIRST, ranks, NULL, loads, &j);
}

static void tensors_that_do_not_fit(void **state) {
    static const tsh_rename both[] = {{"h.*.up.bias", "h.*.down.bias"}, {NULL, NULL}},
                            many[] = {{"h.*.up.bias", "h.*.*.bias"}, {NULL, NULL}};
    const tsh_file_desc strict = {.strict_dtype = 1}, twice = {.rename = both},
                        wild = {.rename = many};
    stored s[TENSORS];
    (void)state;
    make_plain(s);
    s[7].file = -1;
    expect_error(s, NULL, TSH_ERR_ARGUMENT, "lacks 1 of the model's tensors (\"h.0.down.bias\")");
    make_plain(s);
    s[3].file = 0;
    s[3].name = s[3].path = "h.1.norm.bias";
    expect_error(s, NULL, TSH_ERR_ARGUMENT,
                 "lacks 0 of the model's tensors and has 1 that the model lacks "
                 "(\"h.1.norm.bias\"); .ignore takes names");
    make_plain(s);
    s[8].rows++;
    expect_error(s, NULL, TSH_ERR_SHAPE, "model-2.safetensors\", F32 (7, 6) in the model");
    make_plain(s);
    s[8].dtype = TSH_I32;
    expect_error(s, NULL, TSH_ERR_DTYPE, "only F32, F64, BF16 and F16 are converted");
    make_plain(s);
    expect_error(s, &strict, TSH_ERR_DTYPE, "\"embed.weight\" is BF16 (7, 6) in \"");
    expect_error(s, &strict, TSH_ERR_DTYPE, "; without .strict_dtype it is converted");
    expect_error(s, &twice, TSH_ERR_IO, "holds one tensor twice: \"h.0.");
    expect_error(s, &wild, TSH_ERR_ARGUMENT, "\"h.*.up.bias\" to \"h.*.*.bias\" makes no name of");
    s[9] = s[8];
    s[9].file = 0;
    expect_error(s, NULL, TSH_ERR_IO, "holds one tensor twice: \"head.weight\" in \"");
    make_plain(s);
    write_tensors(s);
    if (FILES_MINE) write_file(s, 1, 5);
    expect_error(NULL, NULL, TSH_ERR_IO,
                 "model-2.safetensors\" is no safetensors file: its values "
                 "are cut off");
    files_clear();
    expect_error(NULL, NULL, TSH_ERR_IO, "is a folder without model.safetensors, ");
}

/* Text as an index, beside files that are right. */
static void expect_wrong_index(const char *text, const char *part) {
    if (FILES_MINE) files_write(index_name, text, strlen(text));
    expect_error(NULL, NULL, TSH_ERR_IO, part);
}

static void indices_that_lie(void **state) {
    stored s[TENSORS];
    (void)state;
    make_plain(s);
    write_tensors(s);
    s[8].place = 1;
    if (FILES_MINE) write_index(s, "");
    expect_error(NULL, NULL, TSH_ERR_IO,
                 "model-2.safetensors\" holds \"head.weight\", which the "
                 "index places in \"model-1.safetensors\"");
    s[8].place = 9;
    if (FILES_MINE) write_index(s, "");
    expect_error(NULL, NULL, TSH_ERR_IO, "holds \"head.weight\", which the index does not list");
    s[8].place = 0;
    if (FILES_MINE) write_index(s, ", \"x\": \"model-1.safetensors\"");
    expect_error(NULL, NULL, TSH_ERR_IO,
                 "index.json\" places \"x\" in \"model-1.safetensors\", which lacks it");
    if (FILES_MINE) write_index(s, ", \"x\": \"model-3.safetensors\"");
    expect_error(NULL, NULL, TSH_ERR_IO,
                 "model-3.safetensors\" is named by the index and cannot "
                 "be opened: No such file");
    if (FILES_MINE) write_index(s, ", \"x\": \"../model-1.safetensors\"");
    expect_error(NULL, NULL, TSH_ERR_IO, "which is no name of a file beside it");
    if (FILES_MINE) write_index(s, ", \"head.weight\": \"model-2.safetensors\"");
    expect_error(NULL, NULL, TSH_ERR_IO,
                 "is no index of safetensors files: \"head.weight\" is "
                 "there twice");
    expect_wrong_index("{\"weight_map\": {}}", "lists no tensors");
    expect_wrong_index("{\"metadata\": {}}", "there is no weight_map at byte 16");
    expect_wrong_index("{\"weight_map\": 3}", "weight_map is no object at byte 15");
    expect_wrong_index("{\"weight_map\": {\"a\": \"b\"}, \"weight_map\": {}}", "is there twice");
    expect_wrong_index("{\"weight_map\": {\"a\": \"b\"", "a comma or a bracket is missing");
    expect_wrong_index("{\"weight_map\": {\"a\": \"b\"}} {", "something follows the last }");
    expect_wrong_index("{\"metadata\": }, \"weight_map\": {\"a\": \"b\"}}", "there is no value");
    expect_wrong_index("", "there is no {");
}

/* ------------------------------------------------------------------------ bytes */

enum { MANY = 2048, BROAD = 96 };

/* What this thread has read from files so far, and in how many calls; bytes -1: not known. */
typedef struct reading {
    long long bytes, calls;
} reading;

static reading reading_now(void) {
    char text[256];
    reading now = {-1, -1};
    FILE *file = fopen("/proc/thread-self/io", "r");
    while (file && fgets(text, sizeof text, file)) {
        (void)sscanf(text, "rchar: %lld", &now.bytes);
        (void)sscanf(text, "syscr: %lld", &now.calls);
    }
    if (file) (void)fclose(file);
    return now;
}

static int reads_its_own(tsh_ctx *ctx, void *user) {
    const tsh_file_desc *desc = (const tsh_file_desc *)user;
    const tsh_linear_desc up = {.in = BROAD, .out = MANY, .style = TSH_COLWISE},
                          down = {.in = MANY, .out = BROAD, .style = TSH_ROWWISE};
    tsh_module *a = tsh_add_linear(tsh_root(ctx), "a", &up),
               *b = tsh_add_linear(tsh_root(ctx), "b", &down);
    const int ranks = tsh_world(ctx)->size;
    const long long all = (2LL * MANY * BROAD + MANY + BROAD) * (long long)sizeof(tsh_real);
    reading before, after;
    long long bytes, calls, own, most;
    if (!desc) {
        CHECK(tsh_save(tsh_root(ctx), files_path("big.safetensors"), NULL) == TSH_OK, "save");
        return 0;
    }
    before = reading_now();
    CHECK(tsh_load_with(tsh_root(ctx), files_here, NULL, desc) == TSH_OK, "load");
    after = reading_now();
    bytes = after.bytes - before.bytes;
    calls = after.calls - before.calls;
    own = (tsh_local_numel(tsh_param(a, "weight")) + tsh_local_numel(tsh_param(b, "weight")) +
           tsh_local_numel(tsh_param(a, "bias")) + BROAD) *
          (long long)sizeof(tsh_real);
    if (before.bytes < 0 || ranks > 4) return 0;
    if (desc->broadcast && tsh_world(ctx)->rank > 0)
        CHECK(bytes < 4096, "%lld bytes were read here", bytes);
    else if (!desc->broadcast)
        CHECK(bytes > own && bytes < own + own / 50 + 2048, "%lld of %lld bytes", bytes, own);
    if (tsh_world(ctx)->rank > 0 && desc->broadcast) return 0;
    /* Pieces of 64 KiB, a few calls for each tensor and the header; each rank reads the BROAD rows
     * of b.weight one by one, but rank 0 for all does not. */
    most = all / 65536 + 32;
    most = desc->broadcast && ranks > 1 ? most * ranks : most + BROAD;
    CHECK(calls <= most, "%lld calls, not %lld, read %lld bytes", calls, most, bytes);
    return 0;
}

static void a_rank_reads_the_bytes_of_its_shards(void **state) {
    tsh_file_desc desc;
    int ranks;
    (void)state;
    memset(&desc, 0, sizeof desc);
    ranks_run_at(RANKS_FIRST, 1, NULL, reads_its_own, NULL);
    for (ranks = 1; ranks <= 4; ranks++)
        for (desc.broadcast = 0; desc.broadcast < 2; desc.broadcast++)
            ranks_run_at(RANKS_FIRST, ranks, NULL, reads_its_own, &desc);
}

/* ------------------------------------------------------------------------ transformers */

/* The folder that tests/golden/folder.py wrote: a Llama of two layers in bf16, with head.weight
 * outside of "model.". */
static int loads_a_llama(tsh_ctx *ctx, void *user) {
    static const char *const names[] = {"q_proj",    "k_proj",  "v_proj",   "o_proj",
                                        "gate_proj", "up_proj", "down_proj"};
    static const int sizes[][2] = {{12, 12}, {12, 4},  {12, 4}, {12, 12},
                                   {12, 10}, {12, 10}, {10, 12}};
    const tsh_file_desc desc = {.prefix = "model", .broadcast = user != NULL};
    const tsh_rms_norm_desc norm = {.dim = 12};
    const tsh_embedding_desc embed = {.count = 20, .dim = 12, .style = TSH_ROWWISE};
    const tsh_linear_desc head = {.in = 12, .out = 20, .bias = TSH_NO, .style = TSH_COLWISE};
    const char *here = __FILE__, *slash = strrchr(here, '/');
    tsh_module *root = tsh_root(ctx), *layers, *layer, *attention, *mlp;
    char path[512];
    walk w;
    int i, k;
    memset(&w, 0, sizeof w);
    (void)snprintf(path, sizeof path, "%.*s../golden/folder", slash ? (int)(slash - here + 1) : 0,
                   here);
    tsh_add_embedding(root, "embed_tokens", &embed);
    layers = tsh_add_module(root, "layers", NULL);
    for (i = 0; i < 2; i++) {
        const char name[2] = {(char)('0' + i), 0};
        layer = tsh_add_module(layers, name, NULL);
        attention = tsh_add_module(layer, "self_attn", NULL);
        mlp = tsh_add_module(layer, "mlp", NULL);
        tsh_add_rms_norm(layer, "input_layernorm", &norm);
        tsh_add_rms_norm(layer, "post_attention_layernorm", &norm);
        for (k = 0; k < COUNT(names); k++) {
            tsh_linear_desc d = {.bias = TSH_NO};
            d.in = sizes[k][0];
            d.out = sizes[k][1];
            d.style = k == 3 || k == 6 ? TSH_ROWWISE : TSH_COLWISE;
            tsh_add_linear(k < 4 ? attention : mlp, names[k], &d);
        }
    }
    tsh_add_rms_norm(root, "norm", &norm);
    tsh_add_linear(root, "lm_head", &head);
    CHECK(tsh_load_with(root, path, NULL, &desc) == TSH_OK, "loaded");
    tsh_each_param(root, compare, &w);
    CHECK(!w.wrong, "%d wrong, %s", w.wrong, w.path);
    return 0;
}

static void a_folder_of_transformers_loads(void **state) {
    tsh_desc desc;
    int ranks;
    memset(&desc, 0, sizeof desc);
    for (ranks = 1; ranks <= 4; ranks++) {
        desc.dtype = ranks % 2 ? TSH_DTYPE_DEFAULT : TSH_BF16;
        ranks_run_at(RANKS_FIRST, ranks, &desc, loads_a_llama, NULL);
        ranks_run_at(RANKS_FIRST, ranks, &desc, loads_a_llama, state ? (void *)&desc : NULL);
    }
}

/* ------------------------------------------------------------- a tensor with three names */

/* Loads it into an embedding whose weight is a classifier's and a linear's, too. */
static int loads_tied(tsh_ctx *ctx, void *user) {
    const job *j = (const job *)user;
    const tsh_embedding_desc words = {.count = 8, .dim = 6, .style = TSH_ROWWISE};
    const tsh_linear_desc other = {.in = 6, .out = 8, .bias = TSH_NO, .style = TSH_COLWISE};
    tsh_module *root = tsh_root(ctx), *wte = tsh_add_embedding(root, "wte", &words);
    tsh_classifier_desc head = {.in = 6, .classes = 8, .bias = TSH_NO, .style = TSH_COLWISE};
    float values[48];
    int e;
    head.weight = tsh_param(wte, "weight");
    CHECK(tsh_add_classifier(root, "lm_head", &head), "head");
    CHECK(tsh_tie(tsh_add_linear(root, "other", &other), "weight", head.weight) == TSH_OK, "tie");
    CHECK(tsh_load_with(root, files_here, NULL, &j->desc) == j->code, "%s",
          tsh_last_error(ctx)->message);
    if (j->code != TSH_OK) {
        CHECK(strstr(tsh_last_error(ctx)->message, j->part), "%s", tsh_last_error(ctx)->message);
        tsh_clear_error(ctx);
        return 0;
    }
    CHECK(tsh_read(ctx, head.weight, TSH_GLOBAL, values, sizeof values) == TSH_OK, "read");
    for (e = 0; e < 48; e++)
        CHECK((double)values[e] == number("wte.weight", e), "value %d is %g", e, (double)values[e]);
    return 0;
}

static void run_tied(const stored *s, tsh_result code, const char *part) {
    int ranks;
    job j;
    memset(&j, 0, sizeof j);
    j.code = code;
    j.part = part;
    files_clear();
    write_tensors(s);
    for (ranks = 1; ranks <= 3; ranks++)
        for (j.desc.broadcast = 0; j.desc.broadcast < 2; j.desc.broadcast++)
            ranks_run_at(RANKS_FIRST, ranks, NULL, loads_tied, &j);
}

static void a_tied_tensor_has_any_of_its_names(void **state) {
    static const char *const names[] = {"wte.weight", "lm_head.weight", "other.weight"};
    int which, i, n; /* which: bits of the names that are in the files */
    (void)state;
    for (which = 1; which < 8; which++) {
        stored s[4];
        memset(s, 0, sizeof s);
        for (i = n = 0; i < 3; i++) {
            const stored one = {names[i], "wte.weight", TSH_F32, 8, 6, i % 2, 0};
            if (which & 1 << i) s[n++] = one;
        }
        run_tied(s, TSH_OK, "");
        if (n < 2) continue;
        s[n - 1].path = "lm_head.bias"; /* other values */
        run_tied(s, TSH_ERR_ARGUMENT, "under two names with different values: element 0 of \"");
        s[n - 1].dtype = TSH_BF16;
        run_tied(s, TSH_ERR_DTYPE, "in BF16");
        s[n - 1].dtype = TSH_F32;
        s[n - 1].columns = 5;
        run_tied(s, TSH_ERR_SHAPE, "F32 (8, 5)");
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(a_tied_tensor_has_any_of_its_names, files_after),
        cmocka_unit_test_teardown(a_folder_an_index_and_a_file_load, files_after),
        cmocka_unit_test_teardown(bytes_come_from_a_function, files_after),
        cmocka_unit_test_teardown(names_are_mapped, files_after),
        cmocka_unit_test_teardown(a_prefix_may_be_absent, files_after),
        cmocka_unit_test_teardown(names_are_strict, files_after),
        cmocka_unit_test_teardown(one_rank_saves_and_three_load, files_after),
        cmocka_unit_test_teardown(stages_of_a_pipeline_are_sent_theirs, files_after),
        cmocka_unit_test_teardown(tensors_that_do_not_fit, files_after),
        cmocka_unit_test_teardown(indices_that_lie, files_after),
        cmocka_unit_test_teardown(a_rank_reads_the_bytes_of_its_shards, files_after),
        cmocka_unit_test(a_folder_of_transformers_loads),
    };
    return cmocka_run_group_tests_name("folders", tests, files_begin, files_end);
}
