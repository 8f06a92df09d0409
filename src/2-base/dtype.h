/* ========================================================================== */
/* >>dtype                                            MARK: - dtype (private) */
/* Everything that depends on the dtype: a table with one row per dtype.      */
/* Needs: >>base.                                                             */
/* ========================================================================== */

/* TO ADD A DTYPE, add a constant to tsh_dtype and a row to tshi_dtypes; no other code depends on
 * which dtype a tensor has. Ops compute in tsh_real: kernels load blocks of elements as tsh_real,
 * compute, and store the results. Only the store rounds to the dtype. A row needs `load` and
 * `store`; if an optional function is NULL, the library uses these two instead. */

/* Computes out[i] = left[i] op right[i] for n elements, where op is +, *, min or max. `out` may be
 * `left`, `right` or both. */
typedef void (*tshi_fold_fn)(void *out, const void *left, const void *right, int64_t n);

typedef struct tshi_dtype {
    const char *name, *file; /* name: in messages, "f32"; file: in safetensors files, "F32" */
    int size;                /* bytes of an element or, if the dtype is quantised, of a block */
    int floating;            /* 1: floating point; 0: integer */
    /* Convert n elements, `step` elements apart, to (load) or from (store) n contiguous values. */
    void (*load)(const void *from, int64_t step, int64_t n, tsh_real *to);
    void (*store)(void *to, int64_t step, int64_t n, const tsh_real *from);
    /* (optional) Read or write element i as a double, not rounded to tsh_real. */
    double (*get)(const void *data, int64_t i);
    void (*put)(void *data, int64_t i, double value);
    /* (integer dtypes only) Do what load and store do, with int64_t in place of tsh_real: exact for
     * every integer. */
    void (*load_integer)(const void *from, int64_t step, int64_t n, int64_t *to);
    void (*store_integer)(void *to, int64_t step, int64_t n, const int64_t *from);
    /* (optional) The functions by which collectives reduce elements. NULL: elements are reduced as
     * tsh_real, and rounded to the dtype once, after those of all ranks are reduced. */
    const tshi_fold_fn *fold;                      /* fold[op]: reduces by op, a tsh_redop */
    void (*divide)(void *sums, int64_t n, int by); /* for TSH_AVG: sums[i] /= by for n elements */
    /* Number of elements in a block if the dtype is quantised, else 1. `load` and `store` of a
     * quantised dtype accept step 1 only and begin at a block; `store` stores whole blocks. */
    int elements;
} tshi_dtype;

/* Returns value clamped to [min, max]. */
static int64_t tshi_dtype_clamp(int64_t value, int64_t min, int64_t max) {
    return value > max ? max : value < min ? min : value;
}

/* Returns value rounded towards zero and clamped to [min, max]; 0 if it is NaN. (The code compares
 * it with 2^63, not with INT64_MAX, which no double equals.) */
static int64_t tshi_dtype_clamp_real(double value, int64_t min, int64_t max) {
    const double end = 9223372036854775808.0; /* 2^63 */
    if (value != value) return 0;
    if (value >= end) return max;
    return value < -end ? min : tshi_dtype_clamp((int64_t)value, min, max);
}

/* Number of elements that a tshi_fold_fn processes at a time: compilers vectorise loops of constant
 * length at every level of optimisation. As `out` may be `left` or `right`, a pragma,
 * TSHI_DTYPE_LANES, says that iterations are independent. (Else clang compares addresses at run
 * time, and processes single elements if they are equal.) */
enum { TSHI_DTYPE_RUN = 32 };
#if defined(__clang__)
#define TSHI_DTYPE_LANES _Pragma("clang loop unroll(disable) vectorize(assume_safety)")
#else
#define TSHI_DTYPE_LANES TSHI_LANES
#endif

/* Defines tshi_dtype_<name>, a tshi_fold_fn: out[i] = expression, in which l is left[i] and r is
 * right[i]. */
#define TSHI_DTYPE_FOLD(name, type, expression)                                                    \
    static void tshi_dtype_##name(void *out_, const void *left_, const void *right_, int64_t n) {  \
        type *out = (type *)out_;                                                                  \
        const type *left = (const type *)left_, *right = (const type *)right_;                     \
        int64_t at = 0;                                                                            \
        int i;                                                                                     \
        for (; at + TSHI_DTYPE_RUN <= n; at += TSHI_DTYPE_RUN) {                                   \
            TSHI_DTYPE_LANES for (i = 0; i < TSHI_DTYPE_RUN; i++) {                                \
                const type l = left[at + i], r = right[at + i];                                    \
                out[at + i] = expression;                                                          \
            }                                                                                      \
        }                                                                                          \
        for (; at < n; at++) {                                                                     \
            const type l = left[at], r = right[at];                                                \
            out[at] = expression;                                                                  \
        }                                                                                          \
    }
/* Defines tshi_dtype_<name>: converts n elements of `type` to the type `wide`. */
#define TSHI_DTYPE_LOAD(name, type, wide)                                                          \
    static void tshi_dtype_##name(const void *data, int64_t step, int64_t n, wide *to) {           \
        const type *TSHI_RESTRICT from = (const type *)data;                                       \
        for (int64_t i = 0; i < n; i++) to[i] = (wide)from[i * step];                              \
    }
/* Defines tshi_dtype_<name>, which stores n elements: to[i] = value, an expression of from[i]. The
 * values from[i] have the type `wide`. */
#define TSHI_DTYPE_STORE(name, type, wide, value)                                                  \
    static void tshi_dtype_##name(void *data, int64_t step, int64_t n, const wide *from) {         \
        type *TSHI_RESTRICT to = (type *)data;                                                     \
        for (int64_t i = 0; i < n; i++) to[i * step] = (type)(value);                              \
    }
/* Defines tshi_dtype_divide_<suffix>: sums[i] /= by for n elements. */
#define TSHI_DTYPE_DIVIDE(suffix, type)                                                            \
    static void tshi_dtype_divide_##suffix(void *sums_, int64_t n, int by) {                       \
        type *sums = (type *)sums_, size = (type)by;                                               \
        int64_t at = 0;                                                                            \
        for (; at + TSHI_DTYPE_RUN <= n; at += TSHI_DTYPE_RUN)                                     \
            for (int i = 0; i < TSHI_DTYPE_RUN; i++) sums[at + i] /= size;                         \
        for (; at < n; at++) sums[at] /= size;                                                     \
    }
/* Defines the functions of a dtype. Sums and products are computed in the type `wide`: for integers
 * the unsigned type, so that they wrap on overflow. The minimum and the maximum of l and r are l if
 * both are equal (as 0 and -0 are), and NaN if either is NaN. FIT clamps a floating value,
 * FIT_INTEGER an int64_t, to [min, max], the range of an integer type; for a floating type both
 * return the value itself. */
#define TSHI_DTYPE(suffix, type, wide, FIT, FIT_INTEGER, min, max)                                 \
    TSHI_DTYPE_FOLD(sum_##suffix, type, (type)((wide)l + (wide)r))                                 \
    TSHI_DTYPE_FOLD(prod_##suffix, type, (type)((wide)l * (wide)r))                                \
    TSHI_DTYPE_FOLD(min_##suffix, type, ((l <= r) | (l != l)) ? l : r)                             \
    TSHI_DTYPE_FOLD(max_##suffix, type, ((l >= r) | (l != l)) ? l : r)                             \
    static const tshi_fold_fn tshi_dtype_folds_##suffix[] = {/* in the order of tsh_redop */       \
                                                             tshi_dtype_sum_##suffix,              \
                                                             tshi_dtype_prod_##suffix,             \
                                                             tshi_dtype_min_##suffix,              \
                                                             tshi_dtype_max_##suffix,              \
                                                             tshi_dtype_sum_##suffix};             \
    static double tshi_dtype_get_##suffix(const void *data, int64_t i) {                           \
        return (double)((const type *)data)[i];                                                    \
    }                                                                                              \
    static void tshi_dtype_put_##suffix(void *data, int64_t i, double value) {                     \
        ((type *)data)[i] = (type)FIT(value, min, max);                                            \
    }                                                                                              \
    TSHI_DTYPE_LOAD(load_##suffix, type, tsh_real)                                                 \
    TSHI_DTYPE_LOAD(load_integer_##suffix, type, int64_t)                                          \
    TSHI_DTYPE_STORE(store_##suffix, type, tsh_real, FIT(from[i], min, max))                       \
    TSHI_DTYPE_STORE(store_integer_##suffix, type, int64_t, FIT_INTEGER(from[i], min, max))
#define TSHI_DTYPE_ANY(x, min, max)   (x) /* FIT of floating dtypes: no clamping */
#define TSHI_DTYPE_CLAMP(x, min, max) tshi_dtype_clamp_real((double)(x), min, max)
TSHI_DTYPE(f32, float, float, TSHI_DTYPE_ANY, TSHI_DTYPE_ANY, 0, 0)
TSHI_DTYPE(f64, double, double, TSHI_DTYPE_ANY, TSHI_DTYPE_ANY, 0, 0)
TSHI_DTYPE(i32, int32_t, uint32_t, TSHI_DTYPE_CLAMP, tshi_dtype_clamp, INT32_MIN, INT32_MAX)
TSHI_DTYPE(i64, int64_t, uint64_t, TSHI_DTYPE_CLAMP, tshi_dtype_clamp, INT64_MIN, INT64_MAX)
TSHI_DTYPE_DIVIDE(f32, float)
TSHI_DTYPE_DIVIDE(f64, double)

/* -- 16-bit floats: conversions without branches, which compilers vectorise ---------------- */

static uint32_t tshi_dtype_float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float tshi_dtype_float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Returns the bits of x as a float. A double that is no float is rounded to the one of its two
 * neighbours whose last bit is 1, so that rounding the result once more, to a shorter format, gives
 * what rounding x itself would ("round to odd"; Boldo & Melquiond 2008). */
static uint32_t tshi_dtype_odd_bits(double x) {
    const float nearest = (float)x;
    uint32_t bits = tshi_dtype_float_bits(nearest);
    if ((double)nearest != x && x == x) {
        bits -= fabs((double)nearest) > fabs(x); /* steps to the neighbour nearer to 0 */
        bits |= 1u;
    }
    return bits;
}

TSHI_INLINE uint32_t tshi_dtype_odd(tsh_real x) {
    return TSHI_DOUBLE ? tshi_dtype_odd_bits((double)x) : tshi_dtype_float_bits((float)x);
}

TSHI_INLINE tsh_real tshi_dtype_from_bf16(uint16_t h) {
    return TSHI_R(tshi_dtype_float_of((uint32_t)h << 16));
}

/* Returns the bits of the bf16 nearest to x, ties to even; a NaN stays a NaN. */
TSHI_INLINE uint16_t tshi_dtype_to_bf16(tsh_real x) {
    const uint32_t bits = tshi_dtype_odd(x);
    const uint32_t rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
    return (uint16_t)((bits & 0x7FFFFFFFu) > 0x7F800000u ? bits >> 16 | 0x40u : rounded);
}

/* Converts an f16 to tsh_real. The bits of exponent and fraction, moved to their places in a float,
 * are the value times 2^-112, even of a subnormal number; the product with 2^112 is the value. */
TSHI_INLINE tsh_real tshi_dtype_from_f16(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16, rest = (uint32_t)(h & 0x7FFFu) << 13;
    const float scaled = tshi_dtype_float_of(rest) * 5192296858534827628530496329220096.0f;
    const uint32_t bits = rest >= 0x0F800000u ? rest | 0x7F800000u /* infinity or NaN */
                                              : tshi_dtype_float_bits(scaled);
    return TSHI_R(tshi_dtype_float_of(bits | sign));
}

/* Returns the bits of the f16 nearest to x, ties to even; of infinity, if x rounds to 2^16 or more.
 * Below 2^-14, f16 numbers are the multiples of 2^-24. So are floats in [0.5, 1): there, adding 0.5
 * rounds x. */
TSHI_INLINE uint16_t tshi_dtype_to_f16(tsh_real x) {
    const uint32_t all = tshi_dtype_odd(x), bits = all & 0x7FFFFFFFu;
    const uint32_t normal = (bits - 0x38000000u + 0xFFFu + (bits >> 13 & 1u)) >> 13;
    const uint32_t tiny = tshi_dtype_float_bits(tshi_dtype_float_of(bits) + 0.5f) - 0x3F000000u;
    const uint32_t special = bits > 0x7F800000u ? 0x7E00u : 0x7C00u; /* f16: NaN; infinity */
    const uint32_t h = bits < 0x38800000u ? tiny : bits < 0x47800000u ? normal : special;
    return (uint16_t)(h | (all >> 16 & 0x8000u));
}

/* Defines the load and store functions of a 16-bit dtype for one instruction set. They convert
 * contiguous elements in runs of TSHI_DTYPE_RUN, as long as a whole run is left, and return how
 * many elements they have converted. */
#define TSHI_DTYPE_RUNS(name, isa, TARGET)                                                         \
    TARGET static int64_t tshi_dtype_load_##name##_##isa(const uint16_t *from, int64_t n,          \
                                                         tsh_real *to) {                           \
        int64_t at = 0;                                                                            \
        for (; at + TSHI_DTYPE_RUN <= n; at += TSHI_DTYPE_RUN) {                                   \
            TSHI_DTYPE_LANES for (int i = 0; i < TSHI_DTYPE_RUN; i++)                              \
                to[at + i] = tshi_dtype_from_##name(from[at + i]);                                 \
        }                                                                                          \
        return at;                                                                                 \
    }                                                                                              \
    TARGET static int64_t tshi_dtype_store_##name##_##isa(uint16_t *to, int64_t n,                 \
                                                          const tsh_real *from) {                  \
        int64_t at = 0;                                                                            \
        for (; at + TSHI_DTYPE_RUN <= n; at += TSHI_DTYPE_RUN) {                                   \
            TSHI_DTYPE_LANES for (int i = 0; i < TSHI_DTYPE_RUN; i++)                              \
                to[at + i] = tshi_dtype_to_##name(from[at + i]);                                   \
        }                                                                                          \
        return at;                                                                                 \
    }
#if TSHI_X86
#define TSHI_DTYPE_WIDE __attribute__((target("avx512bw")))
#define TSHI_DTYPE_AVX2 __attribute__((target("avx2")))
#define TSHI_DTYPE_PICK(name) /* the fastest variant of a function on this processor */            \
    (__builtin_cpu_supports("avx512bw") ? name##_avx512                                            \
     : __builtin_cpu_supports("avx2")   ? name##_avx2                                              \
                                        : name##_portable)
TSHI_DTYPE_RUNS(bf16, avx512, TSHI_DTYPE_WIDE)
TSHI_DTYPE_RUNS(f16, avx512, TSHI_DTYPE_WIDE)
TSHI_DTYPE_RUNS(bf16, avx2, TSHI_DTYPE_AVX2)
TSHI_DTYPE_RUNS(f16, avx2, TSHI_DTYPE_AVX2)
#else
#define TSHI_DTYPE_PICK(name) name##_portable
#endif

/* Defines tshi_dtype_load_<name> and tshi_dtype_store_<name> of a 16-bit dtype. */
#define TSHI_DTYPE_SHORT(name)                                                                     \
    TSHI_DTYPE_RUNS(name, portable, )                                                              \
    static void tshi_dtype_load_##name(const void *data, int64_t step, int64_t n, tsh_real *to) {  \
        const uint16_t *from = (const uint16_t *)data;                                             \
        int64_t i = step == 1 ? TSHI_DTYPE_PICK(tshi_dtype_load_##name)(from, n, to) : 0;          \
        for (; i < n; i++) to[i] = tshi_dtype_from_##name(from[i * step]);                         \
    }                                                                                              \
    static void tshi_dtype_store_##name(void *data, int64_t step, int64_t n,                       \
                                        const tsh_real *from) {                                    \
        uint16_t *to = (uint16_t *)data;                                                           \
        int64_t i = step == 1 ? TSHI_DTYPE_PICK(tshi_dtype_store_##name)(to, n, from) : 0;         \
        for (; i < n; i++) to[i * step] = tshi_dtype_to_##name(from[i]);                           \
    }
TSHI_DTYPE_SHORT(bf16)
TSHI_DTYPE_SHORT(f16)
#undef TSHI_DTYPE_RUNS
#undef TSHI_DTYPE_WIDE
#undef TSHI_DTYPE_AVX2
#undef TSHI_DTYPE_PICK

/* -- quantised weights: the formats and the rounding of ggml -------------------------------- */

/* Number of elements in a quantised block. A block begins with its scale, a little-endian f16; in
 * q4_1 the minimum, another f16, comes next. */
enum { TSHI_DTYPE_BLOCK = 32 };

static float tshi_dtype_scale(const unsigned char *block) {
    return (float)tshi_dtype_from_f16((uint16_t)(block[0] | block[1] << 8));
}

/* Writes the scale of a block. Returns 1 / scale, or 0 if the scale is 0. */
static float tshi_dtype_put_scale(unsigned char *block, float scale) {
    const uint16_t h = tshi_dtype_to_f16((tsh_real)scale);
    block[0] = (unsigned char)(h & 0xFF);
    block[1] = (unsigned char)(h >> 8);
    return scale < 0 || scale > 0 || scale != scale ? 1 / scale : 0;
}

/* Converts 32 values to floats x. Returns the value of largest magnitude (the first, if several
 * have it), or NaN if any value is NaN. */
static float tshi_dtype_extreme(const tsh_real *from, float *x) {
    float extreme = (float)from[0];
    for (int i = 0; i < TSHI_DTYPE_BLOCK; i++) {
        x[i] = (float)from[i];
        if (fabsf(x[i]) > fabsf(extreme) || x[i] != x[i]) extreme = x[i];
    }
    return extreme;
}

static void tshi_dtype_load_q8_0(const void *data, int64_t step, int64_t n, tsh_real *to) {
    const unsigned char *block = (const unsigned char *)data;
    (void)step;
    for (; n > 0; n -= TSHI_DTYPE_BLOCK, block += 34, to += TSHI_DTYPE_BLOCK) {
        const float scale = tshi_dtype_scale(block);
        for (int i = 0; i < TSHI_DTYPE_BLOCK && i < n; i++)
            to[i] = TSHI_R(scale * (float)(signed char)block[2 + i]);
    }
}

static void tshi_dtype_store_q8_0(void *data, int64_t step, int64_t n, const tsh_real *from) {
    unsigned char *block = (unsigned char *)data;
    float x[TSHI_DTYPE_BLOCK];
    (void)step;
    for (; n > 0; n -= TSHI_DTYPE_BLOCK, block += 34, from += TSHI_DTYPE_BLOCK) {
        const float most = fabsf(tshi_dtype_extreme(from, x));
        const float inverse = tshi_dtype_put_scale(block, most / 127);
        /* divides values by the scale, and rounds them to the nearest integers, ties away from 0 */
        for (int i = 0; i < TSHI_DTYPE_BLOCK; i++) {
            const float y = x[i] * inverse, fit = y < 127 ? y > -127 ? y : -127 : 127;
            const int whole = (int)fit;
            const float rest = fit - (float)whole;
            block[2 + i] = (unsigned char)(whole + (rest >= 0.5f) - (rest <= -0.5f));
        }
    }
}

/* Dequantises n elements: element = scale * (bits - 8). Byte i of a block's values has the bits of
 * element i in its low half and those of element i + 16 in its high half. */
static void tshi_dtype_load_q4_0(const void *data, int64_t step, int64_t n, tsh_real *to) {
    const unsigned char *block = (const unsigned char *)data;
    (void)step;
    for (; n > 0; n -= TSHI_DTYPE_BLOCK, block += 18, to += TSHI_DTYPE_BLOCK) {
        const float scale = tshi_dtype_scale(block);
        for (int i = 0; i < TSHI_DTYPE_BLOCK && i < n; i++) {
            const int bits = i < 16 ? block[2 + i] & 15 : block[2 + i - 16] >> 4;
            to[i] = TSHI_R(scale * (float)(bits - 8));
        }
    }
}

static void tshi_dtype_store_q4_0(void *data, int64_t step, int64_t n, const tsh_real *from) {
    unsigned char *block = (unsigned char *)data;
    float x[TSHI_DTYPE_BLOCK];
    (void)step;
    for (; n > 0; n -= TSHI_DTYPE_BLOCK, block += 18, from += TSHI_DTYPE_BLOCK) {
        const float extreme = tshi_dtype_extreme(from, x); /* the value that becomes -8 */
        const float inverse = tshi_dtype_put_scale(block, extreme / -8);
        int bits[TSHI_DTYPE_BLOCK];
        for (int i = 0; i < TSHI_DTYPE_BLOCK; i++) x[i] *= inverse;
        for (int i = 0; i < TSHI_DTYPE_BLOCK; i++) {
            const float y = x[i] + 8.5f;
            bits[i] = (int)(y < 15 ? y > 0 ? y : 0 : 15);
        }
        for (int i = 0; i < 16; i++) block[2 + i] = (unsigned char)(bits[i] | bits[i + 16] << 4);
    }
}

/* Dequantises n elements: element = scale * bits + minimum. Byte i of a block's values has the bits
 * of element i in its low half and those of element i + 16 in its high half. */
static void tshi_dtype_load_q4_1(const void *data, int64_t step, int64_t n, tsh_real *to) {
    const unsigned char *block = (const unsigned char *)data;
    (void)step;
    for (; n > 0; n -= TSHI_DTYPE_BLOCK, block += 20, to += TSHI_DTYPE_BLOCK) {
        const float scale = tshi_dtype_scale(block), min = tshi_dtype_scale(block + 2);
        for (int i = 0; i < TSHI_DTYPE_BLOCK && i < n; i++) {
            const int bits = i < 16 ? block[4 + i] & 15 : block[4 + i - 16] >> 4;
            const float scaled = scale * (float)bits;
            to[i] = TSHI_R(scaled + min);
        }
    }
}

static void tshi_dtype_store_q4_1(void *data, int64_t step, int64_t n, const tsh_real *from) {
    unsigned char *block = (unsigned char *)data;
    (void)step;
    for (; n > 0; n -= TSHI_DTYPE_BLOCK, block += 20, from += TSHI_DTYPE_BLOCK) {
        float min = (float)from[0], max = min, inverse;
        int bits[TSHI_DTYPE_BLOCK];
        for (int i = 0; i < TSHI_DTYPE_BLOCK; i++) { /* finds min and max; a NaN makes both NaN */
            const float x = (float)from[i];
            if (x < min || x != x) min = x;
            if (x > max || x != x) max = x;
        }
        inverse = tshi_dtype_put_scale(block, (max - min) / 15);
        (void)tshi_dtype_put_scale(block + 2, min);
        for (int i = 0; i < TSHI_DTYPE_BLOCK; i++) {
            const float scaled = ((float)from[i] - min) * inverse, y = scaled + 0.5f;
            bits[i] = (int)(y < 15 ? y > 0 ? y : 0 : 15);
        }
        for (int i = 0; i < 16; i++) block[4 + i] = (unsigned char)(bits[i] | bits[i + 16] << 4);
    }
}

#define TSHI_DTYPE_BLOCK_ROW(suffix, size)                                                         \
    {#suffix, "U8", size, 1,    tshi_dtype_load_##suffix, tshi_dtype_store_##suffix,               \
     NULL,    NULL, NULL, NULL, NULL,                     NULL,                                    \
     TSHI_DTYPE_BLOCK}
#define TSHI_DTYPE_SHORT_ROW(suffix, file)                                                         \
    {#suffix, file, 2,    1,    tshi_dtype_load_##suffix, tshi_dtype_store_##suffix,               \
     NULL,    NULL, NULL, NULL, NULL,                     NULL,                     1}
#define TSHI_DTYPE_ROW(suffix, file, size, floating, divide)                                       \
    {#suffix, file, size, floating, tshi_dtype_load_##suffix, tshi_dtype_store_##suffix,           \
     tshi_dtype_get_##suffix, tshi_dtype_put_##suffix, tshi_dtype_load_integer_##suffix,           \
     tshi_dtype_store_integer_##suffix, tshi_dtype_folds_##suffix, divide, 1}
/* One row per dtype, in the order of tsh_dtype. */
static const tshi_dtype tshi_dtypes[] = {{"default", NULL, 0, 0, NULL, NULL,
                                          NULL, NULL, NULL, NULL, NULL, NULL, 1}, /* no dtype */
                                         TSHI_DTYPE_ROW(f32, "F32", 4, 1, tshi_dtype_divide_f32),
                                         TSHI_DTYPE_ROW(f64, "F64", 8, 1, tshi_dtype_divide_f64),
                                         TSHI_DTYPE_SHORT_ROW(bf16, "BF16"),
                                         TSHI_DTYPE_SHORT_ROW(f16, "F16"),
                                         TSHI_DTYPE_ROW(i32, "I32", 4, 0, NULL),
                                         TSHI_DTYPE_ROW(i64, "I64", 8, 0, NULL),
                                         TSHI_DTYPE_BLOCK_ROW(q8_0, 34),
                                         TSHI_DTYPE_BLOCK_ROW(q4_0, 18),
                                         TSHI_DTYPE_BLOCK_ROW(q4_1, 20),
#if defined(TSHI_DTYPE_MORE) /* a test defines it, to add a row */
                                         TSHI_DTYPE_MORE
#endif
};
enum { TSHI_DTYPES = sizeof tshi_dtypes / sizeof tshi_dtypes[0] };
#undef TSHI_DTYPE_ROW
#undef TSHI_DTYPE_SHORT_ROW
#undef TSHI_DTYPE_BLOCK_ROW
#undef TSHI_DTYPE_SHORT
#undef TSHI_DTYPE_CLAMP
#undef TSHI_DTYPE_ANY
#undef TSHI_DTYPE
#undef TSHI_DTYPE_DIVIDE
#undef TSHI_DTYPE_STORE
#undef TSHI_DTYPE_LOAD
#undef TSHI_DTYPE_FOLD
#undef TSHI_DTYPE_LANES

/* Returns the size in bytes of n tsh_real (gradients, moments, scratch); SIZE_MAX: overflow. */
static size_t tshi_dtype_reals(int64_t n) {
    return tshi_base_mul((size_t)n, sizeof(tsh_real));
}

/* Returns the size in bytes of n elements (quantised: of whole blocks); SIZE_MAX: overflow. */
static size_t tshi_dtype_bytes(tsh_dtype dtype, int64_t n) {
    const tshi_dtype *row = &tshi_dtypes[dtype];
    return tshi_base_mul((size_t)(row->elements > 1 ? n / row->elements : n), (size_t)row->size);
}

/* Returns 1 if the dtype is a quantised one. */
static int tshi_dtype_in_blocks(tsh_dtype dtype) {
    return tshi_dtypes[dtype].elements > 1;
}

/* Returns 1 if dtype, a number from a caller, has a row in the table; TSH_DTYPE_DEFAULT counts as
 * having none. */
static int tshi_dtype_exists(tsh_dtype dtype) {
    return dtype != TSH_DTYPE_DEFAULT && (unsigned)dtype < (unsigned)TSHI_DTYPES;
}

TSH_API size_t tsh_dtype_size(tsh_dtype dtype) {
    return tshi_dtype_exists(dtype) ? (size_t)tshi_dtypes[dtype].size : 0;
}

static const char *tshi_dtype_name(tsh_dtype dtype) {
    return tshi_dtypes[dtype].name;
}

static double tshi_dtype_get(tsh_dtype dtype, const void *data, int64_t i) {
    const tshi_dtype *row = &tshi_dtypes[dtype];
    tsh_real value;
    if (row->get) return row->get(data, i);
    row->load((const char *)data + i * row->size, 1, 1, &value);
    return (double)value;
}

static void tshi_dtype_put(tsh_dtype dtype, void *data, int64_t i, double value) {
    const tshi_dtype *row = &tshi_dtypes[dtype];
    const tsh_real rounded = TSHI_R(value);
    if (row->put)
        row->put(data, i, value);
    else
        row->store((char *)data + i * row->size, 1, 1, &rounded);
}

/* Converts n contiguous elements of the dtype `source` to `target`; a quantised dtype needs whole
 * blocks. Elements that become floats are rounded once, to the nearest, ties to even. */
static void tshi_dtype_convert(const void *from, tsh_dtype source, void *to, tsh_dtype target,
                               int64_t n) {
    const tshi_dtype *in = &tshi_dtypes[source], *out = &tshi_dtypes[target];
    tsh_real run[TSHI_DTYPE_RUN];
    int64_t e, m; /* e: first element of the current run; m: its number of elements */
    if (source == target) memcpy(to, from, tshi_dtype_bytes(source, n));
    for (e = 0; e < n && source != target; e += m) {
        const char *at = (const char *)from + tshi_dtype_bytes(source, e);
        m = tshi_base_min(TSHI_DTYPE_RUN, n - e);
        in->load(at, 1, m, run);
        /* 64-bit elements that become 16-bit ones are loaded again and rounded to odd: rounding
         * them to the nearest float, and then to 16 bits, would be less exact. */
        if (in->get && in->size > (int)sizeof *run && out->size < (int)sizeof *run)
            for (int i = 0; i < m; i++)
                run[i] = TSHI_R(tshi_dtype_float_of(tshi_dtype_odd_bits(in->get(at, i))));
        out->store((char *)to + tshi_dtype_bytes(target, e), 1, m, run);
    }
}

/* Returns 0 if dtype is an integer type and value is out of its range, else 1. */
static int tshi_dtype_holds(tsh_dtype dtype, double value) {
    int64_t widest; /* memory for one element of any dtype but the quantised ones */
    tshi_dtype_put(dtype, &widest, 0, value); /* clamps value to the dtype's range */
    return tshi_dtypes[dtype].floating ||
           (value < 9223372036854775808.0 && fabs(value - tshi_dtype_get(dtype, &widest, 0)) < 1);
}

/* Returns 1 if ops can compute with the dtype: it is floating, and no wider than tsh_real. */
static int tshi_dtype_computes(tsh_dtype dtype) {
    return tshi_dtypes[dtype].floating && tshi_dtypes[dtype].size <= (int)sizeof(tsh_real);
}

static void tshi_dtype_fold(void *out, const void *left, const void *right, int64_t n,
                            tsh_dtype dtype, tsh_redop op) {
    const tshi_dtype *row = &tshi_dtypes[dtype];
    tsh_real l[TSHI_DTYPE_RUN], r[TSHI_DTYPE_RUN]; /* up to 32 elements of left and right */
    int64_t e, m; /* e: first element of the current run; m: its number of elements */
    if (row->fold) row->fold[op](out, left, right, n);
    for (e = 0; e < n && !row->fold; e += m) {
        m = tshi_base_min(TSHI_DTYPE_RUN, n - e);
        row->load((const char *)left + e * row->size, 1, m, l);
        row->load((const char *)right + e * row->size, 1, m, r);
        tshi_dtypes[TSH_REAL].fold[op](l, l, r, m);
        row->store((char *)out + e * row->size, 1, m, l);
    }
}
