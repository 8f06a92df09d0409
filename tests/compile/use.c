/* Calls the library, whose implementation is another file's; with TSHARD_STATIC its own. */
#include "../../tshard.h"
#include <stdio.h>

static int sum_to_ten(tsh_ctx *ctx, void *user) {
    tsh_tensor *sum = tsh_sum(tsh_arange(ctx, TSH_REAL, 0, 5, 1), TSH_ALL, 0);
    *(double *)user = tsh_item(ctx, sum);
    return tsh_ok(ctx) ? 0 : 1;
}

int main(void) {
    double sum = 0;
    int result = tsh_run(NULL, sum_to_ten, &sum);
    printf("%g\n", sum);
    return result;
}
