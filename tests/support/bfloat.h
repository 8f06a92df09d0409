/* bfloat.h - a dtype of a test's own, the upper 16 bits of a float, as one row of the library's
 * table. Include it before the implementation. */
#ifndef TSHARD_TESTS_BFLOAT_H
#define TSHARD_TESTS_BFLOAT_H

#include <stdint.h>
#include <string.h>

#ifdef TSHARD_REAL
typedef TSHARD_REAL bfloat_real;
#else
typedef float bfloat_real;
#endif

static float bfloat_value(uint16_t bits) {
    const uint32_t wide = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &wide, sizeof x);
    return x;
}

/* Rounded to the nearest, to even in the middle. */
static uint16_t bfloat_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

static void bfloat_load(const void *from, int64_t step, int64_t n, bfloat_real *to) {
    int64_t i;
    for (i = 0; i < n; i++) to[i] = (bfloat_real)bfloat_value(((const uint16_t *)from)[i * step]);
}

static void bfloat_store(void *to, int64_t step, int64_t n, const bfloat_real *from) {
    int64_t i;
    for (i = 0; i < n; i++) ((uint16_t *)to)[i * step] = bfloat_bits((float)from[i]);
}

/* As few fields as a row may have. */
#define TSHI_DTYPE_MORE                                                                            \
    {"bfloat", "U16", 2, 1, bfloat_load, bfloat_store, NULL, NULL, NULL, NULL, NULL, NULL, 1}
#define BFLOAT ((tsh_dtype)(TSHI_DTYPES - 1))

#endif
