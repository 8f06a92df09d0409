/* ========================================================================== */
/* >>inputs                                          MARK: - inputs (private) */
/* tsh_check_inputs: what all ranks were given must be the same.              */
/* Needs: >>tensor-check >>hash >>comm.                                       */
/* ========================================================================== */

/* A replicated tensor that the program fills itself, by tsh_from, tsh_tensor_from, tsh_write or
 * through tsh_data, is the same on all ranks of tp only if the program gives all of them the same.
 * While tsh_check_inputs is on, each op compares a hash of such inputs. */

TSH_API void tsh_check_inputs(tsh_ctx *ctx, int on) {
    if (ctx) ctx->check_inputs = on != 0;
}

/* Returns 1 if the program itself may have filled t (it is owned, or has TSHI_GIVEN, and is no
 * parameter) and t is replicated, so that all ranks of tp must have the same values. */
static int tshi_inputs_given(const tsh_tensor *t) {
    const unsigned flags = t ? t->base->flags : 0;
    return t && t->block && t->layout.kind == TSH_REPLICATED && !(flags & TSHI_PARAM) &&
           (flags & (TSHI_OWNED | TSHI_GIVEN));
}

/* Gathers the hash of t from all ranks of tp. Returns the first rank whose hash is not that of rank
 * 0; 0 if there is none, and after an error. */
static int tshi_inputs_differ(const tsh_tensor *t) {
    tsh_ctx *ctx = t->ctx;
    const int size = ctx->tp.size;
    int64_t mine = (int64_t)(tshi_hash_part(t) >> 1), *theirs, *counts;
    tshi_block *block = tshi_mem_alloc(ctx, TSH_MEM_STEP, 2 * (size_t)size * sizeof *theirs);
    int r, differ = 0;
    if (!block) return 0;
    theirs = (int64_t *)tshi_mem_data(block);
    counts = theirs + size; /* counts[r]: number of hashes from rank r, 1 */
    for (r = 0; r < size; r++) counts[r] = 1;
    if (tshi_error_comm(ctx, tsh_allgather(&ctx->tp, &mine, theirs, counts, 1, TSH_I64),
                        "tsh_check_inputs") == TSH_OK)
        for (r = size - 1; r > 0; r--)
            if (theirs[r] != theirs[0]) differ = r;
    tshi_mem_release(ctx, block);
    return differ;
}

/* Compares, over tp, the inputs of a call whose values the program gave (tshi_inputs_given). Fails
 * with a sentence that names the op, the input and the first rank that differs. */
static TSHI_COLD void tshi_inputs_check(const tshi_op *op, tsh_tensor *const *in, int n) {
    for (int i = 0; i < n; i++) {
        char text[TSHI_TEXT_SIZE];
        int length, differ;
        const char *name = tshi_tensor_name(op->inputs, i, &length);
        if (!tshi_inputs_given(in[i]) || in[i]->ctx->tp.size < 2) continue;
        differ = tshi_inputs_differ(in[i]);
        if (!differ) continue;
        (void)tsh_fail(in[i]->ctx, TSH_ERR_STATE,
                       "%s: %.*s %s %s has other values on rank %d of tp than on rank 0; all ranks "
                       "of tp must be given the same data: choose it by tsh_dp(ctx)->rank, not by "
                       "the rank of the world",
                       op->name, length, name, tshi_dtype_name(in[i]->dtype),
                       tshi_tensor_text(in[i], text), differ);
        in[i]->ctx->error.rank = -1; /* -1: no single rank's error, all ranks find it */
        return;
    }
}
