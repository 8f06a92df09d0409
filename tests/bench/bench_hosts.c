/* All-reduces between ranks of several hosts: for each dtype and size a line of its name, bytes,
 * median seconds, and the bytes that one call sends from rank 0's host over its interface veth0.
 * tests/bench/hosts.py makes the hosts. */
#define TSHARD_IMPLEMENTATION
#include "../../backends/tshard_uv.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

enum { LARGEST = 16 << 20, CALLS = 9 };

static int64_t sent(void) {
    int64_t bytes = 0;
    FILE *file = fopen("/sys/class/net/veth0/statistics/tx_bytes", "r");
    if (!file || fscanf(file, "%" SCNd64, &bytes) != 1) bytes = 0;
    if (file) (void)fclose(file);
    return bytes;
}

static int ascending(const void *a, const void *b) {
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static int measure(tsh_ctx *ctx, char *data, tsh_dtype dtype, int64_t bytes) {
    tsh_comm *world = tsh_world(ctx);
    const int64_t count = bytes / (int64_t)tsh_dtype_size(dtype);
    int64_t ns[CALLS], before = 0;
    for (int i = -1; i < CALLS; i++) { /* the first call finds no memory yet */
        int64_t begin;
        if (tsh_barrier(world) != TSH_OK) return 1;
        if (i == 0) before = sent();
        begin = tsh_now();
        if (tsh_allreduce(world, data, count, dtype, TSH_SUM) != TSH_OK) return 1;
        if (i >= 0) ns[i] = tsh_now() - begin;
    }
    if (tsh_barrier(world) != TSH_OK) return 1;
    qsort(ns, CALLS, sizeof *ns, ascending);
    if (world->rank == 0)
        printf("%s %" PRId64 " %.9f %.0f\n", dtype == TSH_F32 ? "f32" : "bf16", bytes,
               (double)ns[CALLS / 2] / 1e9, (double)(sent() - before) / CALLS);
    return 0;
}

static int rank_main(tsh_ctx *ctx, void *user) {
    static const tsh_dtype dtypes[] = {TSH_F32, TSH_BF16};
    char *data = (char *)calloc(1, LARGEST);
    int failed = !data;
    (void)user;
    for (int d = 0; d < 2; d++)
        for (int64_t bytes = 64 << 10; !failed && bytes <= LARGEST; bytes *= 4)
            failed = measure(ctx, data, dtypes[d], bytes);
    free(data);
    return failed;
}

int main(void) {
    const tsh_desc desc = {.logger.log = tsh_log_stderr};
    return tsh_uv_run(NULL, &desc, rank_main, NULL);
}
