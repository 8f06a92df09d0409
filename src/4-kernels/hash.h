/* ========================================================================== */
/* >>hash                                              MARK: - hash (private) */
/* Hashes of values, which say whether ranks hold the same.                   */
/* Needs: >>rng >>kernel.                                                     */
/* ========================================================================== */

/* Returns the sum of the hashes of n elements. Each hash is of a value and its index in the whole
 * tensor; the first element's index is `global`. */
static uint64_t tshi_hash_sum(const void *values, size_t width, int64_t global, int64_t n) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += tshi_rng_hash((uint64_t)(global + i) + 1, (const char *)values + (size_t)i * width,
                             width);
    return sum;
}

/* Returns this rank's part of tsh_hash, the sum of hashes over the whole tensor. For a sharded
 * tensor the parts of all ranks add up to it. */
static uint64_t tshi_hash_part(const tsh_tensor *t) {
    const size_t width = tsh_dtype_size(t->dtype);
    tshi_block *scratch; /* contiguous copy of t's values; NULL: t itself is contiguous */
    /* t's values as a contiguous array; NULL: no memory */
    const char *values = (const char *)tshi_kernel_packed(t, &scratch);
    tshi_runs run = tshi_tensor_own_runs(t);
    uint64_t sum = 0;
    /* elements that share one hash: those of a block, if the dtype is quantised; else 1 */
    const int64_t each = tshi_dtypes[t->dtype].elements;
    while (values && tshi_tensor_next_run(&run))
        sum += tshi_hash_sum(values + tshi_dtype_bytes(t->dtype, run.local), width,
                              run.global / each, run.length / each);
    tshi_mem_release(t->ctx, scratch);
    return sum;
}
