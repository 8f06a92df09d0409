/* ========================================================================== */
/* >>tensor-exact                              MARK: - tensor-exact (private) */
/* Exact float weights of bf16 parameters: the lower 16 bits, stored apart.   */
/* Needs: >>tensor.                                                           */
/* ========================================================================== */

/* -- exact weights ------------------------------------------------------------
 * Small updates of a bf16 weight would be lost by rounding. So an optimiser updates an exact
 * weight, a float whose bits are E. The parameter's value is E rounded to bf16, (E + 0x8000) >> 16,
 * and t->low holds E & 0xFFFF: together they take the memory of a float. (Ties are rounded away
 * from 0, so that E can be computed from the two. A NaN loses its lower half.) If t->low is NULL,
 * the exact weights are the parameter's values. */

/* Returns the exact weight, a float, that is stored in two halves. value: the float rounded to
 * bf16; low: the lower 16 bits of the float. */
TSHI_INLINE tsh_real tshi_tensor_join(uint16_t value, uint16_t low) {
    return TSHI_R(tshi_dtype_float_of(((uint32_t)value - (low >> 15)) << 16 | low));
}

/* Undoes tshi_tensor_join: sets *value to x rounded to bf16, and *low to the lower 16 bits of x, as
 * a float. */
TSHI_INLINE void tshi_tensor_split(tsh_real x, uint16_t *value, uint16_t *low) {
    const uint32_t all = tshi_dtype_float_bits((float)x);
    const uint32_t bits = (all & 0x7FFFFFFFu) > 0x7F800000u ? (all & 0xFFFF0000u) | 0x400000u : all;
    *value = (uint16_t)((bits + 0x8000u) >> 16);
    *low = (uint16_t)bits;
}

/* Copies the exact weights of n local elements of t, from element `from` on, to `to`. If t->low is
 * NULL, copies t's values; t may then be any dense tensor. */
static void tshi_tensor_exact(const tsh_tensor *t, int64_t from, int64_t n, tsh_real *to) {
    const tshi_dtype *row = &tshi_dtypes[t->dtype];
    const char *at = (const char *)tshi_tensor_at(t) + from * row->size;
    if (!t->low) {
        row->load(at, 1, n, to);
        return;
    }
    const uint16_t *value = (const uint16_t *)(const void *)at;
    const uint16_t *low = (const uint16_t *)tshi_mem_data(t->low) + from;
    for (int64_t i = 0; i < n; i++) to[i] = tshi_tensor_join(value[i], low[i]);
}

/* Returns 1 if an optimiser keeps exact weights of t, a bf16 parameter: it does not if t is frozen
 * and was never trained. */
static int tshi_tensor_is_exact(const tsh_tensor *t) {
    return t->dtype == TSH_BF16 && (t->flags & TSHI_OPTIMISED) && (t->requires_grad || t->low);
}

/* Prepares a parameter for exact weights: allocates t->low, their lower 16 bits, and sets it to 0,
 * if t is a bf16 parameter whose optimiser keeps exact weights and t->low is NULL. Returns 0 if
 * there is no memory, else 1. */
static int tshi_tensor_keep_exact(tsh_tensor *t) {
    const size_t bytes = tshi_dtype_bytes(TSH_BF16, tsh_local_numel(t));
    if (t->low || !tshi_tensor_is_exact(t) || (t->flags & TSHI_INEXACT)) return 1;
    t->low = tshi_mem_alloc(t->ctx, TSH_MEM_PARAMETERS, bytes);
    if (t->low) tshi_mem_clear(t->ctx, t->low, bytes);
    return t->low != NULL;
}

/* Sets n local elements of t, from element `from` on, to `values`: exactly if t is a bf16 parameter
 * whose optimiser keeps exact weights, else rounded to t's dtype. Returns 0 if there is no memory,
 * else 1. */
static int tshi_tensor_set_exact(tsh_tensor *t, int64_t from, int64_t n, const tsh_real *values) {
    const tshi_dtype *row = &tshi_dtypes[t->dtype];
    char *at = (char *)tshi_tensor_at(t) + from * row->size;
    if (!tshi_tensor_keep_exact(t)) return 0;
    if (!t->low) {
        row->store(at, 1, n, values);
        return 1;
    }
    uint16_t *value = (uint16_t *)(void *)at;
    uint16_t *low = (uint16_t *)tshi_mem_data(t->low) + from;
    for (int64_t i = 0; i < n; i++) tshi_tensor_split(values[i], &value[i], &low[i]);
    return 1;
}

/* Returns 1 if t's gradient, computed in float, is kept in bf16 (see tshi_tape_pack). */
static int tshi_tensor_packs(const tsh_tensor *t) {
    return t->grad_dtype == TSH_BF16;
}

/* Returns the kind of memory for a tensor's gradient: TSH_MEM_GRADIENTS if it is owned,
 * TSH_MEM_STEP if not. The gradient of an owned tensor that is not of tsh_real, or whose gradient
 * is packed to bf16, is in step memory, too: tsh_zero_grad releases it, and backward can use the
 * memory for activations until it computes the gradient. (Row-sparse gradients keep their memory:
 * they are zeroed row by row.) */
static int tshi_tensor_grad_kind(const tsh_tensor *t) {
    const int returns = t->dtype != TSH_REAL || tshi_tensor_packs(t);
    return t->flags & TSHI_OWNED && (!returns || t->marks) ? TSH_MEM_GRADIENTS : TSH_MEM_STEP;
}

/* Clears t->low, if there is one, after t's values were overwritten, so that the exact weights are
 * the new values. */
static void tshi_tensor_forget_exact(const tsh_tensor *t) {
    if (t->low)
        tshi_mem_clear(t->ctx, t->low, tshi_dtype_bytes(TSH_BF16, tsh_local_numel(t)));
}
