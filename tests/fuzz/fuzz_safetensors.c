/* Feeds bytes to tsh_load as if they were a file: whatever they are, the answer is a load or an
 * error of one sentence. `make fuzz` runs it under libFuzzer, test_safetensors.c once for every
 * file of the folder safetensors, which make_corpus.py writes. */
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"
#include "memory.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

typedef struct target {
    tsh_ctx *ctx;
    tsh_optim *optim;
} target;

/* One model for all inputs: opening a ctx costs more than reading a small file. */
static target open_target(void) {
    const tsh_linear_desc d = {.in = 2, .out = 3, .style = TSH_COLWISE, .segments = 3};
    const tsh_optim_desc adam = {.kind = TSH_ADAM};
    target t = {NULL, NULL};
    if (tsh_open(NULL, &t.ctx) != TSH_OK) abort();
    tsh_add_linear(tsh_root(t.ctx), "a", &d);
    tsh_add_dropout(tsh_root(t.ctx), "d", 0.5);
    t.optim = tsh_optim_new(tsh_root(t.ctx), &adam);
    return t;
}

/* tsh_load, but for the opening of a file. No byte may leave the ctx in an error. */
static tsh_result load(target t, const uint8_t *data, size_t size, tsh_optim *optim) {
    memory_file file = memory_open(data, size);
    tsh_result result;
    tshi_io_source source;
    tsh_file_desc desc;
    tshi_io io;
    memset(&desc, 0, sizeof desc);
    desc.read_at = memory_read;
    desc.user = &file;
    memset(&source, 0, sizeof source);
    source.path = "input";
    tshi_io_begin(&io, "tsh_load", tsh_root(t.ctx), source.path, optim, &desc);
    io.source = &source;
    io.sources = 1;
    result = tshi_load_all(&io);
    tshi_io_end(&io);
    free(file.data);
    if (result != tsh_last_error(t.ctx)->code) abort();
    if (result != TSH_OK && strlen(tsh_last_error(t.ctx)->message) < 30) abort();
    for (const char *at = tsh_last_error(t.ctx)->message; *at; at++)
        if ((unsigned char)*at < 0x20 || *at == 0x7f) abort();
    tsh_clear_error(t.ctx);
    if (!tsh_ok(t.ctx)) abort();
    return result;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static target t;
    size_t before;
    if (!t.ctx) {
        t = open_target();
        if (tsh_materialize(tsh_root(t.ctx)) != TSH_OK) abort();
    }
    (void)load(t, data, size, t.optim); /* makes moments, at most once */
    before = tsh_mem_stats(t.ctx).total;
    (void)load(t, data, size, NULL);
    (void)load(t, data, size, t.optim);
    if (tsh_mem_stats(t.ctx).total != before) abort(); /* nothing leaks */
    return 0;
}
