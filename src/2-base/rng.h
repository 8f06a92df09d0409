/* ========================================================================== */
/* >>rng                                                MARK: - rng (private) */
/* Random numbers: Philox 4x32-10 (Salmon et al. 2011) and distributions.     */
/* Needs: >>base.                                                             */
/* ========================================================================== */

/* There is no generator state. A random number is a function of three values: the key (the seed);
 * the stream, a hash that names one use of random numbers, such as the initial values of one
 * parameter; and the global index of the element. So a rank draws the same numbers for its shard as
 * one device would draw for these elements of the whole tensor. */

/* Computes one round of Philox in place: c is the counter (4 words), k0, k1 are the round's key. */
TSHI_INLINE void tshi_rng_round(uint32_t *c, uint32_t k0, uint32_t k1) {
    uint64_t a = (uint64_t)0xD2511F53u * c[0], b = (uint64_t)0xCD9E8D57u * c[2];
    c[0] = (uint32_t)(b >> 32) ^ c[1] ^ k0;
    c[2] = (uint32_t)(a >> 32) ^ c[3] ^ k1;
    c[1] = (uint32_t)b;
    c[3] = (uint32_t)a;
}

/* Writes the four random 32-bit words of a position, a 64-bit counter, to c. The rounds are written
 * out because compilers do not vectorise the caller's loop over positions if it has a loop of
 * rounds inside. */
TSHI_INLINE void tshi_rng_philox(uint64_t key, uint64_t stream, uint64_t position, uint32_t *c) {
    const uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    c[0] = (uint32_t)position;
    c[1] = (uint32_t)(position >> 32);
    c[2] = (uint32_t)stream;
    c[3] = (uint32_t)(stream >> 32);
#define TSHI_RNG_ROUND(i) tshi_rng_round(c, k0 + i##u * 0x9E3779B9u, k1 + i##u * 0xBB67AE85u)
    TSHI_RNG_ROUND(0);
    TSHI_RNG_ROUND(1);
    TSHI_RNG_ROUND(2);
    TSHI_RNG_ROUND(3);
    TSHI_RNG_ROUND(4);
    TSHI_RNG_ROUND(5);
    TSHI_RNG_ROUND(6);
    TSHI_RNG_ROUND(7);
    TSHI_RNG_ROUND(8);
    TSHI_RNG_ROUND(9);
#undef TSHI_RNG_ROUND
}

enum { TSHI_RNG_WORDS = 64 }; /* elements per call of tshi_rng_words */

/* Writes the random bits of TSHI_RNG_WORDS elements to `word`, 32 each. The first element is
 * 4 * position. */
TSHI_INLINE void tshi_rng_words(uint64_t key, uint64_t stream, uint64_t position, uint32_t *word) {
    for (int i = 0; i < TSHI_RNG_WORDS / 4; i++)
        tshi_rng_philox(key, stream, position + (uint64_t)i, word + 4 * i);
}

/* Returns the 32 random bits of element e: word e mod 4 of the four words of position e / 4. */
static uint32_t tshi_rng_bits(uint64_t key, uint64_t stream, uint64_t element) {
    uint32_t out[4];
    tshi_rng_philox(key, stream, element / 4, out);
    return out[element % 4];
}

/* Returns the uniform random number of an element: a multiple of 2^-24 in [0, 1), exact in
 * float. */
static double tshi_rng_uniform(uint64_t key, uint64_t stream, uint64_t element) {
    return (double)(tshi_rng_bits(key, stream, element) >> 8) / 16777216.0;
}

/* Returns the standard normal random number of an element, computed from two random words (Box &
 * Muller 1958). */
static double tshi_rng_normal(uint64_t key, uint64_t stream, uint64_t element) {
    uint32_t out[4];
    const uint32_t *word = out + element % 2 * 2;
    tshi_rng_philox(key, stream, element / 2, out);
    return sqrt(-2.0 * log(((double)word[0] + 1.0) / 4294967296.0)) *
           cos(6.283185307179586 * ((double)word[1] / 4294967296.0));
}

/* Returns the standard normal distribution function at x. */
static double tshi_rng_cdf(double x) {
    return 0.5 * erfc(-x * 0.70710678118654752);
}

/* Returns the inverse of tshi_rng_cdf for p in (0, 1): Hastings' rational approximation of the
 * tail (Abramowitz & Stegun 26.2.23, error 4.5e-4), then two Halley steps, which cube the error. */
static double tshi_rng_quantile(double p) {
    double tail = p < 0.5 ? p : 1 - p, t, x, off; /* by symmetry, x <= 0 solves cdf(x) = tail */
    if (!(tail > 0)) return p < 0.5 ? -(double)INFINITY : (double)INFINITY;
    t = sqrt(-2.0 * log(tail));
    x = (2.515517 + t * (0.802853 + t * 0.010328)) /
            (1 + t * (1.432788 + t * (0.189269 + t * 0.001308))) -
        t;
    for (int step = 0; step < 2; step++) {
        off = (tshi_rng_cdf(x) - tail) * 2.5066282746310002 * exp(0.5 * x * x);
        x -= off / (1 + 0.5 * x * off);
    }
    return p < 0.5 ? x : -x;
}

/* Returns a hash of bytes (FNV-1a and a final mix), such as the stream of a name. `hash` is 0, or a
 * number to be hashed together with the bytes, such as a count of calls. */
static uint64_t tshi_rng_hash(uint64_t hash, const void *data, size_t bytes) {
    const unsigned char *byte = (const unsigned char *)data;
    hash ^= 14695981039346656037u;
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ byte[i]) * 1099511628211u;
    hash ^= hash >> 32;
    hash *= 0xD6E8FEB86659FD93u;
    return hash ^ hash >> 32;
}
