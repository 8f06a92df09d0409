/* ========================================================================== */
/* >>sampler                                        MARK: - sampler (private) */
/* Which samples each step takes, and each replica of it.                     */
/* Needs: >>error >>rng >>layout.                                             */
/* ========================================================================== */

/* The order of an epoch is a permutation of [0, count) that can be evaluated at any place: a
 * Feistel network of 8 rounds permutes the numbers of an even number of bits; one that leads out of
 * [0, count) is permuted again until it is back inside. (Black & Rogaway, Ciphers with Arbitrary
 * Finite Domains, 2002.) */

/* The permutation of one epoch. */
typedef struct tshi_sampler_order {
    /* of the random generator Philox: key, the seed, and stream, a hash of the epoch */
    uint64_t key, stream;
    int half; /* half of the bits of the numbers that the network permutes */
} tshi_sampler_order;

/* Returns the number to which the Feistel network permutes x, a number of 2 order->half bits. */
static uint64_t tshi_sampler_network(const tshi_sampler_order *order, uint64_t x) {
    const uint64_t mask = ((uint64_t)1 << order->half) - 1;
    uint64_t left = x >> order->half, right = x & mask;
    for (uint64_t round = 0; round < 8; round++) {
        uint32_t word[4];
        uint64_t mixed;
        tshi_rng_philox(order->key, order->stream + round, right, word);
        mixed = left ^ (((uint64_t)word[1] << 32 | word[0]) & mask);
        left = right;
        right = mixed;
    }
    return left << order->half | right;
}

/* Returns the sample that stands at `place` in the order of this epoch. */
static int64_t tshi_sampler_at(const tshi_sampler_order *order, int64_t count, int64_t place) {
    uint64_t x = (uint64_t)place;
    do x = tshi_sampler_network(order, x);
    while (x >= (uint64_t)count);
    return (int64_t)x;
}

/* Returns the permutation of the sampler's epoch. */
static tshi_sampler_order tshi_sampler_order_of(const tsh_ctx *ctx, const tsh_sampler *s) {
    tshi_sampler_order order;
    order.key = s->seed ? s->seed : ctx->seed;
    order.stream = tshi_rng_hash((uint64_t)s->epoch, "sampler", 7);
    for (order.half = 1; order.half < 31 && (s->count - 1) >> (2 * order.half); order.half++) {}
    return order;
}

/* Returns 0 and an error that names op if the sampler's values are wrong. */
static int tshi_sampler_check(tsh_ctx *ctx, const tsh_sampler *s, const char *op) {
    const int64_t most = (int64_t)1 << 60; /* so that no number overflows */
    if (!s) return tshi_error_zero(ctx, TSH_ERR_ARGUMENT, "%s: the sampler is NULL", op);
    if (s->count < 1 || s->batch < 1 || s->count > most || s->batch > most)
        return tshi_error_zero(ctx, TSH_ERR_ARGUMENT,
                               "%s: batches of %lld out of %lld samples; both are at least 1", op,
                               (long long)s->batch, (long long)s->count);
    if (s->drop_last && s->batch > s->count)
        return tshi_error_zero(ctx, TSH_ERR_ARGUMENT,
                               "%s: with .drop_last there is no batch of %lld in %lld samples; "
                               "take a smaller one",
                               op, (long long)s->batch, (long long)s->count);
    if (s->epoch < 0 || s->at < 0 || s->at > s->count || s->first < 0 || s->mine < 0 ||
        s->first > s->count - s->mine)
        return tshi_error_zero(ctx, TSH_ERR_ARGUMENT,
                               "%s: the state is epoch %lld, at %lld of %lld samples, %lld from "
                               "%lld on; a new sampler has zeros there",
                               op, (long long)s->epoch, (long long)s->at, (long long)s->count,
                               (long long)s->mine, (long long)s->first);
    return 1;
}

TSH_API int64_t tsh_sampler_next(tsh_ctx *ctx, tsh_sampler *sampler) {
    tsh_range part[TSH_MAX_SEGMENTS];
    tsh_layout rows = tsh_sharded(0);
    int64_t batch;
    if (!ctx || ctx->error.code != TSH_OK || !tshi_sampler_check(ctx, sampler, "tsh_sampler_next"))
        return -1;
    batch = tshi_base_min(sampler->batch, sampler->count - sampler->at);
    sampler->first = sampler->mine = 0;
    if (!batch || (sampler->drop_last && batch < sampler->batch)) { /* the epoch is over */
        sampler->epoch++;
        sampler->at = 0;
        return 0;
    }
    sampler->mine = tsh_shard_range(rows, batch, ctx->dp.size, ctx->dp.rank, part);
    sampler->first = sampler->at + part[0].start;
    sampler->at += batch;
    return batch;
}

TSH_API int64_t tsh_sampler_index(tsh_ctx *ctx, const tsh_sampler *sampler, int64_t i) {
    tshi_sampler_order order;
    if (!ctx || ctx->error.code != TSH_OK || !tshi_sampler_check(ctx, sampler, "tsh_sampler_index"))
        return -1;
    if (i < 0 || i >= sampler->mine) {
        (void)tsh_fail(ctx, TSH_ERR_ARGUMENT,
                       "tsh_sampler_index: sample %lld; this replica has %lld of the batch",
                       (long long)i, (long long)sampler->mine);
        return -1;
    }
    if (sampler->shuffle == TSH_NO) return sampler->first + i;
    order = tshi_sampler_order_of(ctx, sampler);
    return tshi_sampler_at(&order, sampler->count, sampler->first + i);
}
