/* Compiled as C99 and as C++11, with TSHARD_WHERE and without: of nested calls, the error names the
 * line of the one that failed, and without TSHARD_WHERE none. The exit code is 1 if not. */
#include "../../tshard.h"
#include "../../backends/tshard_where.h"

#include <string.h>

int main(void) {
    char place[32];
    tsh_ctx *ctx = NULL;
    int found, wanted = 0;
    if (tsh_open(NULL, &ctx) != TSH_OK) return 1;
    tsh_tensor *a = tsh_ones(ctx, tsh_shape1(2)), *b = tsh_ones(ctx, tsh_shape1(3));
    (void)snprintf(place, sizeof place, "where.c:%d)", __LINE__ + 2);
    (void)tsh_add(tsh_relu(a),
                  tsh_mul(a, b));
    found = strstr(tsh_last_error(ctx)->message, place) != NULL;
#ifdef TSHARD_WHERE
    wanted = 1;
#endif
    tsh_close(ctx);
    return found != wanted;
}
