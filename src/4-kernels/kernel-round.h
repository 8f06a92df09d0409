/* ========================================================================== */
/* >>kernel-round                              MARK: - kernel-round (private) */
/* Stochastic rounding of floats to bf16.                                     */
/* Needs: >>rng >>kernel.                                                     */
/* ========================================================================== */

/* -- stochastic rounding to bf16 ----------------------------------------------
 * A float whose lower 16 bits are l lies l / 2^16 of the way from one bf16 value to the next one
 * away from 0. It is rounded to the latter with probability l / 2^16, else to the former, so that
 * its expected value is exact. The random bits of an element depend on (key, stream, e) only, where
 * e is its index in the whole tensor. */
typedef struct tshi_noise {
    uint64_t key, stream; /* key and stream of the random generator Philox */
    int64_t element;      /* global index of the kernel's first element; the others follow it */
} tshi_noise;

/* The random numbers (32-bit words) drawn last: word[i] is for the element with global index
 * first + i. */
typedef struct tshi_words {
    uint32_t word[TSHI_RNG_WORDS];
    int64_t first; /* global index of word[0]'s element; negative: none were drawn yet */
} tshi_words;

/* Returns the random words, one for each of TSHI_BLOCK elements from the kernel's element e on.
 * Takes them from `drawn` if it has them, else draws them and keeps them in `drawn`. */
TSHI_INLINE const uint32_t *tshi_kernel_words(const tshi_noise *noise, int64_t e,
                                              tshi_words *drawn) {
    const int64_t at = noise->element + e;
    if (drawn->first < 0 || at + TSHI_BLOCK > drawn->first + TSHI_RNG_WORDS) {
        drawn->first = at - at % 4; /* Philox makes 4 words at a time */
        tshi_rng_words(noise->key, noise->stream, (uint64_t)drawn->first / 4, drawn->word);
    }
    return drawn->word + (at - drawn->first);
}

/* Rounds a block stochastically to bf16 and stores it as elements e, e + 1, ... of y, which has n
 * contiguous elements of bf16. The random bits for block[i] are the 16 bits of word[i] from bit
 * `shift` on. */
TSHI_INLINE void tshi_kernel_store_random(const tshi_operand *y, int64_t e, int64_t n,
                                          const tsh_real *block, const uint32_t *word, int shift) {
    uint16_t rounded[TSHI_BLOCK];
    TSHI_LANES for (int i = 0; i < TSHI_BLOCK; i++) {
        const uint32_t bits = tshi_dtype_float_bits((float)block[i]);
        const uint32_t sum = (bits + (word[i] >> shift & 0xFFFFu)) >> 16;
        rounded[i] = (uint16_t)((bits & 0x7FFFFFFFu) > 0x7F800000u ? bits >> 16 | 0x40u : sum);
    }
    if (n - e >= TSHI_BLOCK)
        memcpy((uint16_t *)y->data + e, rounded, sizeof rounded);
    else
        memcpy((uint16_t *)y->data + e, rounded, (size_t)(n - e) * sizeof *rounded);
}

/* Kernel: x[0] = x[1], rounded stochastically to bf16, the dtype of x[0]. */
TSHI_INLINE void tshi_kernel_random_body(int64_t n, const tshi_operand *x,
                                         const tshi_noise *noise) {
    tsh_real pad[TSHI_BLOCK];
    tshi_words drawn;
    drawn.first = -1;
    for (int64_t e = 0; e < n; e += TSHI_BLOCK)
        tshi_kernel_store_random(&x[0], e, n, tshi_kernel_load(&x[1], e, n, pad),
                                 tshi_kernel_words(noise, e, &drawn), 0);
}
TSHI_KERNEL(tshi_kernel_random, tshi_noise);
