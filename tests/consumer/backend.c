/* Calls the library, and refers to a function of each backend that it is built with: all must be in
 * tshard::static and find their libraries. */
#include "tshard.h"
#ifdef WITH_uv
#include "backends/tshard_uv.h"
#endif
#ifdef WITH_mpi
#include "backends/tshard_mpi.h"
#endif
#ifdef WITH_blis
#include "backends/tshard_blis.h"
#endif
#include <stdio.h>

static int sum_to_ten(tsh_ctx *ctx, void *user) {
    tsh_tensor *sum = tsh_sum(tsh_arange(ctx, TSH_REAL, 0, 5, 1), TSH_ALL, 0);
    *(double *)user = tsh_item(ctx, sum);
    return tsh_ok(ctx) ? 0 : 1;
}

/* Returns 0: `always` is 0, which no compiler knows, so that each function is linked. */
static int refer(volatile int always) {
    int result = 0;
#ifdef WITH_uv
    if (always) result = tsh_uv_run(NULL, NULL, sum_to_ten, NULL);
#endif
#ifdef WITH_mpi
    if (always) result = tsh_mpi_run(NULL, NULL, NULL, sum_to_ten, NULL);
#endif
#ifdef WITH_blis
    if (always) tsh_blis_gemm(0, 0, 0, 0, NULL, 0, 0, NULL, 0, 0, 0, NULL, 0, 0, 1, NULL);
#endif
    (void)always;
    return result;
}

int main(void) {
    double sum = 0;
    int result = refer(0) || tsh_run(NULL, sum_to_ten, &sum);
    printf("%g\n", sum);
    return result;
}
