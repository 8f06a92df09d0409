/* The library with ranks as threads, compiled once for all tests that use what is public. */
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "library.h"

int library_isa(const tsh_ctx *ctx) {
    return ctx->isa;
}

void library_set_isa(tsh_ctx *ctx, int isa) {
    ctx->isa = isa;
}
