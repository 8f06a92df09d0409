/* Feeds bytes to tsh_load as if they were the index of two files, which are right: whatever they
 * are, the answer is a load or an error of one sentence. `make fuzz` runs it under libFuzzer,
 * test_index.c once for every file of the folder index, which make_corpus.py writes. */
#if !defined(_POSIX_C_SOURCE)
#define _POSIX_C_SOURCE 200809L /* fmemopen, mkdtemp */
#endif
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"
#include "memory.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char *const index_files[] = {"a.safetensors", "b.safetensors"};
static const char *const index_headers[] = {
    "{\"a.weight\":{\"dtype\":\"F32\",\"shape\":[3,2],\"data_offsets\":[0,24]}}  ",
    "{\"a.bias\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,12]}}      "};

static char index_folder[64]; /* of the two files */

/* Writes a name of the folder to path. */
static const char *index_path(const char *name, char *path, size_t size) {
    (void)snprintf(path, size, "%s/%s", index_folder, name);
    return path;
}

static void index_remove(void) {
    char path[128];
    int i;
    for (i = 0; i < 2; i++) (void)remove(index_path(index_files[i], path, sizeof path));
    (void)remove(index_folder);
}

/* Writes the two files; atexit removes them. */
static void index_begin(void) {
    char path[128], bytes[128];
    int i;
    strcpy(index_folder, "/tmp/tshard-fuzz-XXXXXX");
    if (!mkdtemp(index_folder)) abort();
    for (i = 0; i < 2; i++) {
        const size_t n = strlen(index_headers[i]), values = i ? 12 : 24;
        FILE *file = fopen(index_path(index_files[i], path, sizeof path), "wb");
        memset(bytes, 0, sizeof bytes);
        bytes[0] = (char)n;
        memcpy(bytes + 8, index_headers[i], n);
        if (!file || fwrite(bytes, 1, 8 + n + values, file) != 8 + n + values || fclose(file))
            abort();
    }
    (void)atexit(index_remove);
}

static tsh_ctx *index_open(void) {
    const tsh_linear_desc d = {.in = 2, .out = 3};
    tsh_ctx *ctx;
    if (!index_folder[0]) index_begin();
    if (tsh_open(NULL, &ctx) != TSH_OK) abort();
    tsh_add_linear(tsh_root(ctx), "a", &d);
    if (tsh_materialize(tsh_root(ctx)) != TSH_OK) abort();
    return ctx;
}

/* tsh_load of an index with this text, but for the opening of that. */
static tsh_result index_load(tsh_ctx *ctx, const uint8_t *data, size_t size) {
    /* no file of fmemopen is empty */
    memory_file file = memory_open(size ? data : (const uint8_t *)" ", size + !size);
    char path[128];
    tshi_io_source source;
    tsh_result result;
    tsh_file_desc desc;
    tshi_io io;
    memset(&desc, 0, sizeof desc);
    desc.read_at = memory_read;
    desc.user = &file;
    memset(&source, 0, sizeof source);
    source.path = index_path("x.json", path, sizeof path);
    tshi_io_begin(&io, "tsh_load", tsh_root(ctx), path, NULL, NULL);
    io.index = 1;
    io.open = &source;
    io.file = fmemopen(file.data, file.size, "rb"); /* tells its length */
    if (!io.file) abort();
    io.reader = &desc;
    (void)tshi_load_take_index(&io, strlen(index_folder) + 1);
    io.index = 0;
    io.reader = NULL; /* the two files that the index names are on the disk */
    result = tshi_load_all(&io);
    tshi_io_end(&io);
    free(file.data);
    if (result != tsh_last_error(ctx)->code) abort();
    if (result != TSH_OK && strlen(tsh_last_error(ctx)->message) < 30) abort();
    for (const char *at = tsh_last_error(ctx)->message; *at; at++)
        if ((unsigned char)*at < 0x20 || *at == 0x7f) abort();
    return result;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static tsh_ctx *ctx;
    size_t before;
    if (!ctx) ctx = index_open();
    before = tsh_mem_stats(ctx).total;
    (void)index_load(ctx, data, size);
    tsh_clear_error(ctx);
    if (!tsh_ok(ctx)) abort();
    if (tsh_mem_stats(ctx).total != before) abort(); /* nothing leaks */
    return 0;
}
