/* HEADER as its user sees it: after <assert.h>, twice, without the implementation. */
#include <assert.h>
#include HEADER
#include HEADER

int declarations_only(tsh_ctx *ctx);

int declarations_only(tsh_ctx *ctx) {
    assert(ctx != NULL);
    return tsh_ok(ctx);
}
