/* balance.h - shares of ranks that are not equally fast (tsh_desc.shares): given, or measured. */
#ifndef EXAMPLES_BALANCE_H
#define EXAMPLES_BALANCE_H

#include "../tshard.h"

#include <stdlib.h>
#include <string.h>

enum { BALANCE_RANKS = 64, BALANCE_MOST = 1000 };

/* Returns how many products of matrices this rank computes in a second; 0 after an error. */
static int64_t balance_speed(int threads, tsh_dtype dtype) {
    const int64_t least = INT64_C(500000000); /* ns: some periods of a limit of the system's */
    const tsh_desc desc = {.threads = threads, .dtype = dtype};
    tsh_ctx *ctx = NULL;
    int64_t began = 0, ns = 0, count = 0, rate = 0;
    if (tsh_open(&desc, &ctx) == TSH_OK) {
        tsh_tensor *x = tsh_keep(tsh_randn(ctx, tsh_shape2(256, 512)));
        tsh_tensor *w = tsh_keep(tsh_randn(ctx, tsh_shape2(512, 512)));
        for (began = tsh_now(); ns < least && tsh_ok(ctx); count++) {
            (void)tsh_matmul(x, w);
            (void)tsh_step_end(ctx);
            ns = tsh_now() - began;
        }
        if (tsh_ok(ctx)) rate = count * INT64_C(1000000000) / ns;
    }
    tsh_close(ctx);
    return rate;
}

/* Collective over all ranks: sets shares[t] to the speed of rank t of tp, the fastest one to
 * BALANCE_MOST; in several groups of tp, to the lowest speed. Speeds that differ by less than a
 * tenth count as equal. Ranks are numbered along tp first. */
static tsh_result balance_measure(tsh_comm *comm, int tp, int threads, tsh_dtype dtype,
                                  int *shares) {
    int64_t all[BALANCE_RANKS], ones[BALANCE_RANKS], own, least = INT64_MAX, most = 1;
    tsh_result result = tsh_barrier(comm);
    own = result == TSH_OK ? balance_speed(threads, dtype) : 0;
    for (int r = 0; r < comm->size; r++) ones[r] = 1;
    if (result == TSH_OK) result = tsh_allgather(comm, &own, all, ones, 1, TSH_I64);
    if (result != TSH_OK) return result;
    for (int r = tp; r < comm->size; r++)
        if (all[r] < all[r % tp]) all[r % tp] = all[r];
    for (int t = 0; t < tp; t++) {
        if (all[t] < least) least = all[t];
        if (all[t] > most) most = all[t];
    }
    for (int t = 0; t < tp; t++) {
        shares[t] = least * 10 > most * 9 ? 1 : (int)(all[t] * BALANCE_MOST / most);
        if (shares[t] < 1) shares[t] = 1;
    }
    return TSH_OK;
}

/* Parses a list of tp shares, such as "2,1". Returns 0 if the text is no such list. */
static int balance_parse(const char *text, int tp, int *shares) {
    int count = 0;
    while (count < tp) {
        char *end = NULL;
        const long share = strtol(text, &end, 10);
        if (end == text || share < 1 || share > 1000000) break;
        shares[count++] = (int)share;
        text = end + (*end == ',');
        if (*end != ',') break;
    }
    return *text == '\0' && count == tp;
}

#endif /* EXAMPLES_BALANCE_H */
