/* ========================================================================== */
/* >>module-state                              MARK: - module-state (private) */
/* The state of the random generators, to be saved and restored.              */
/* Needs: >>module.                                                           */
/* ========================================================================== */

/* The buffer of tsh_rng_state consists of 8-byte words: TSHI_STATE_WORDS words, then dropout_calls
 * of each module in pre-order. */
enum { TSHI_STATE_MAGIC, TSHI_STATE_MODULES, TSHI_STATE_SEED, TSHI_STATE_RANDN, TSHI_STATE_DROPOUT,
       TSHI_STATE_WORDS }; /* indices of these words; TSHI_STATE_WORDS: their number */

/* The bytes "tshrng01" as a little-endian word. */
static const uint64_t tshi_module_magic = 0x3130676E72687374u;

/* Writes value, little-endian, to the 8-byte word number `word` of state. */
static void tshi_module_store_word(unsigned char *state, size_t word, uint64_t value) {
    for (int i = 0; i < 8; i++) state[word * 8 + (size_t)i] = (unsigned char)(value >> 8 * i);
}

/* Returns the 8-byte word number `word` of state, read as little-endian. */
static uint64_t tshi_module_load_word(const unsigned char *state, size_t word) {
    uint64_t value = 0; /* the bytes are added from the highest down */
    for (int i = 7; i >= 0; i--) value = value << 8 | state[word * 8 + (size_t)i];
    return value;
}

TSH_API TSHI_COLD size_t tsh_rng_state(tsh_ctx *ctx, void *state, size_t size) {
    unsigned char *out = (unsigned char *)state;
    uint64_t modules = ctx ? tshi_module_count(ctx) : 0;
    size_t word = TSHI_STATE_WORDS, need = ((size_t)modules + word) * 8;
    if (!modules) return 0;
    /* NULL or too small: only returns the number of bytes needed */
    if (!out || size < need) return need;
    tshi_module_store_word(out, TSHI_STATE_MAGIC, tshi_module_magic);
    tshi_module_store_word(out, TSHI_STATE_MODULES, modules);
    tshi_module_store_word(out, TSHI_STATE_SEED, ctx->seed);
    tshi_module_store_word(out, TSHI_STATE_RANDN, ctx->randn_calls);
    tshi_module_store_word(out, TSHI_STATE_DROPOUT, ctx->dropout_calls);
    for (tsh_module *m = ctx->root; m; m = tshi_module_next(ctx->root, m))
        tshi_module_store_word(out, word++, m->dropout_calls);
    return need;
}

TSH_API TSHI_COLD tsh_result tsh_set_rng_state(tsh_ctx *ctx, const void *state, size_t size) {
    const unsigned char *in = (const unsigned char *)state;
    uint64_t modules = ctx ? tshi_module_count(ctx) : 0;
    size_t word = TSHI_STATE_WORDS; /* index of the first module's word */
    if (!modules || ctx->error.code != TSH_OK) return ctx ? ctx->error.code : TSH_ERR_ARGUMENT;
    if (!in || size < word * 8 || tshi_module_load_word(in, 0) != tshi_module_magic)
        return tsh_fail(ctx, TSH_ERR_ARGUMENT,
                        "tsh_set_rng_state: %llu bytes are no state that tsh_rng_state wrote",
                        in ? (unsigned long long)size : 0ull);
    if (tshi_module_load_word(in, 1) != modules || size / 8 - word != modules || size % 8)
        return tsh_fail(ctx, TSH_ERR_ARGUMENT,
                        "tsh_set_rng_state: the state is of %llu modules and has %llu bytes; this "
                        "tree has %llu modules, whose state has %llu",
                        (unsigned long long)tshi_module_load_word(in, 1), (unsigned long long)size,
                        (unsigned long long)modules, (unsigned long long)((modules + word) * 8));
    /* All checks are done: from here on nothing fails. */
    ctx->seed = tshi_module_load_word(in, TSHI_STATE_SEED);
    ctx->randn_calls = tshi_module_load_word(in, TSHI_STATE_RANDN);
    ctx->dropout_calls = tshi_module_load_word(in, TSHI_STATE_DROPOUT);
    for (tsh_module *m = ctx->root; m; m = tshi_module_next(ctx->root, m))
        m->dropout_calls = tshi_module_load_word(in, word++);
    return TSH_OK;
}
