/* short_floats.h - bf16 and f16, written from their definitions: slow, and without the library. */
#ifndef TSHARD_TESTS_SHORT_FLOATS_H
#define TSHARD_TESTS_SHORT_FLOATS_H

#include <math.h>
#include <stdint.h>

/* A format of 16 bits: sign, exponent, fraction. */
typedef struct short_format {
    int fraction, bias; /* bits of the fraction; an exponent field of 1 means 2^(1 - bias) */
} short_format;

static const short_format short_bf16 = {7, 127}, short_f16 = {10, 15};

/* The value of 16 bits. */
static double short_value(const short_format *f, uint16_t bits) {
    const int exponent = (bits & 0x7FFF) >> f->fraction, most = 2 * f->bias + 1;
    const int fraction = bits & ((1 << f->fraction) - 1);
    const double sign = bits & 0x8000 ? -1 : 1;
    if (exponent == most) return fraction ? (double)NAN : sign * (double)INFINITY;
    if (exponent == 0) return sign * ldexp(fraction, 1 - f->bias - f->fraction);
    return sign * ldexp((1 << f->fraction) + fraction, exponent - f->bias - f->fraction);
}

/* The bits of x, rounded to the nearest, ties to even. Any NaN: a quiet one. */
static uint16_t short_bits(const short_format *f, double x) {
    const unsigned sign = signbit(x) ? 0x8000u : 0;
    const unsigned infinity = (unsigned)(2 * f->bias + 1) << f->fraction;
    int exponent;
    double steps;
    if (x != x) return (uint16_t)(sign | infinity | 1u << (f->fraction - 1));
    x = fabs(x);
    if (x > ldexp(1, f->bias + 1)) return (uint16_t)(sign | infinity);
    exponent = x > 0 ? ilogb(x) : 1 - f->bias;
    if (exponent < 1 - f->bias) exponent = 1 - f->bias; /* subnormal */
    steps = nearbyint(ldexp(x, f->fraction - exponent));
    if (steps >= ldexp(2, f->fraction)) { /* rounded up to the next power of two */
        steps /= 2;
        exponent++;
    }
    if (exponent > f->bias) return (uint16_t)(sign | infinity);
    if (steps < ldexp(1, f->fraction)) return (uint16_t)(sign | (unsigned)steps);
    return (uint16_t)(sign | (unsigned)(exponent + f->bias - 1) << f->fraction) + (uint16_t)steps;
}

#endif
