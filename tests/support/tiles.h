/* tiles.h - AMX's instructions in plain C, as Intel's manual (SDM, volume 2) has them. tshard.h,
 * included after it, computes with them instead of the processor's. Where there are any,
 * `tiles_real` switches these on: the same kernels run on both. One thread only.
 *
 * It needs AVX512_BF16, which the rest of these kernels is compiled for, to run. */
#ifndef TSHARD_TESTS_TILES_H
#define TSHARD_TESTS_TILES_H

#if defined(__GNUC__) && defined(__x86_64__) && defined(__linux__) && !defined(__ILP32__) &&       \
    (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#if !defined(__clang__) && __GNUC__ < 14
#pragma GCC diagnostic push /* as in >>kernel-isa: gcc warns of its own intrinsics */
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#if !defined(__clang__) && __GNUC__ < 14
#pragma GCC diagnostic pop
#endif
#include <math.h>
#include <stdint.h>
#include <string.h>

#define TILES 1
#define TILES_TARGET __attribute__((target("amx-tile,amx-bf16,amx-int8")))
#if defined(__clang__)
#define TILES_FAST __attribute__((target("fma,avx512f")))
#else
#define TILES_FAST __attribute__((target("fma,avx512f"), optimize("O3"))) /* also in tests at -O0 */
#endif

/* The macros of >>gemm-amx. */
#define TSHI_AMX_MODEL
#define TSHI_AMX                                                                                   \
    __attribute__((target("avx512vnni,avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,"     \
                          "f16c")))
#define TSHI_AMX_CONFIG(config)        tiles_config(config)
#define TSHI_AMX_RELEASE()             tiles_release()
#define TSHI_AMX_ZERO(tile)            tiles_zero(tile)
#define TSHI_AMX_LOAD(tile, from, row) tiles_load(tile, from, row)
#define TSHI_AMX_STORE(tile, to, row)  tiles_store(tile, to, row)
#define TSHI_AMX_BF16(sum, a, b)       tiles_multiply(sum, a, b, 1)
#define TSHI_AMX_INT8(sum, a, b)       tiles_multiply(sum, a, b, 0)

typedef struct tiles_register {
    int rows, bytes;
    unsigned char data[16][64];
} tiles_register;

static tiles_register tiles_of[8];
static int tiles_real;   /* 1: the processor's instructions run */
static int tiles_open;   /* 1: configured, not released yet */
static int tiles_faults; /* instructions that a processor would refuse */
static int64_t tiles_products; /* products of tiles so far */

/* -- the processor's: the registers are part of an instruction -------------------- */

#define TILES_EACH(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
TILES_TARGET static void tiles_real_config(const void *config) {
    __asm__ volatile("" : : : "memory"); /* gcc does not know that it is read */
    _tile_loadconfig(config);
}
TILES_TARGET static void tiles_real_release(void) {
    _tile_release();
}
TILES_TARGET static void tiles_real_zero(int i) {
#define TILES_ZERO(t)                                                                              \
    if (i == t) _tile_zero(t);
    TILES_EACH(TILES_ZERO)
}
TILES_TARGET static void tiles_real_load(int i, const void *from, size_t row) {
    __asm__ volatile("" : : : "memory");
#define TILES_LOAD(t)                                                                              \
    if (i == t) _tile_loadd(t, from, row);
    TILES_EACH(TILES_LOAD)
}
TILES_TARGET static void tiles_real_store(int i, void *to, size_t row) {
#define TILES_STORE(t)                                                                             \
    if (i == t) _tile_stored(t, to, row);
    TILES_EACH(TILES_STORE)
}
TILES_TARGET static void tiles_real_multiply(int sum, int a, int b, int bf16) {
#define TILES_MULTIPLY(s, x, y)                                                                    \
    if (sum == s && a == x && b == y) {                                                            \
        if (bf16)                                                                                  \
            _tile_dpbf16ps(s, x, y);                                                               \
        else                                                                                       \
            _tile_dpbssd(s, x, y);                                                                 \
        return;                                                                                    \
    }
    TILES_MULTIPLY(0, 4, 6)
    TILES_MULTIPLY(1, 4, 7)
    TILES_MULTIPLY(2, 5, 6)
    TILES_MULTIPLY(3, 5, 7)
    TILES_MULTIPLY(1, 5, 7)
    TILES_MULTIPLY(2, 4, 6)
    tiles_faults++;
}

/* -- the model ---------------------------------------------------------------- */

static void tiles_config(const void *config) {
    const unsigned char *at = (const unsigned char *)config; /* bytes at 16, 2 each; rows at 48 */
    tiles_open = 1;
    tiles_faults += at[0] != 1 || at[1] != 0;
    for (int i = 0; i < 8; i++) {
        memset(&tiles_of[i], 0, sizeof tiles_of[i]);
        tiles_of[i].bytes = at[16 + 2 * i] | at[17 + 2 * i] << 8;
        tiles_of[i].rows = at[48 + i];
        tiles_faults += tiles_of[i].rows > 16 || tiles_of[i].bytes > 64 || tiles_of[i].bytes % 4;
    }
    if (tiles_real) tiles_real_config(config);
}

static void tiles_release(void) {
    tiles_open = 0;
    if (tiles_real) tiles_real_release();
}

static void tiles_zero(int i) {
    tiles_faults += !tiles_open;
    memset(tiles_of[i].data, 0, sizeof tiles_of[i].data);
    if (tiles_real) tiles_real_zero(i);
}

static void tiles_load(int i, const void *from, int64_t row) {
    tiles_faults += !tiles_open;
    if (tiles_real) {
        tiles_real_load(i, from, (size_t)row);
        return;
    }
    memset(tiles_of[i].data, 0, sizeof tiles_of[i].data);
    for (int r = 0; r < tiles_of[i].rows; r++)
        memcpy(tiles_of[i].data[r], (const char *)from + r * row, (size_t)tiles_of[i].bytes);
}

static void tiles_store(int i, void *to, int64_t row) {
    tiles_faults += !tiles_open;
    if (tiles_real) {
        tiles_real_store(i, to, (size_t)row);
        return;
    }
    for (int r = 0; r < tiles_of[i].rows; r++)
        memcpy((char *)to + r * row, tiles_of[i].data[r], (size_t)tiles_of[i].bytes);
}

static uint32_t tiles_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float tiles_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Numbers below 2^-126 count as 0, of the same sign. */
static float tiles_flushed(float x) {
    const uint32_t bits = tiles_bits(x);
    return bits & 0x7F800000u ? x : tiles_float(bits & 0x80000000u);
}

/* What becomes of `result`, which is a b + c, if it is NaN or at most 2^-126: a NaN is the first of
 * the operands', quiet, or else the processor's own. A result that is below 2^-126 with 24 bits of
 * precision becomes 0, also if subnormal numbers, which have fewer bits, round it up to 2^-126. */
static float tiles_special(float a, float b, float c, float result) {
    const float from[3] = {a, b, c};
    for (int i = 0; i < 3; i++)
        if (from[i] != from[i]) return tiles_float(tiles_bits(from[i]) | 0x400000u);
    if (result != result) return tiles_float(0xFFC00000u);
    if (fabs((double)a * (double)b + (double)c) < 0x1p-126 - 0x1p-151) result *= 0;
    return tiles_flushed(result);
}

TILES_FAST static float tiles_fma(float a, float b, float c) {
    const float result = __builtin_fmaf(a, b, c);
    if (result == 0 || __builtin_fabsf(result) > 0x1p-126f) return result;
    return tiles_special(a, b, c, result);
}

static float tiles_add(float a, float b) {
    return tiles_fma(1, tiles_flushed(a), tiles_flushed(b));
}

/* What a product of pairs of bf16 reads, as floats: the elements `half` (0 or 1) of all pairs. */
typedef struct tiles_pairs {
    float a[2][16][16]; /* [half][row of A][k] */
    float b[2][16][16]; /* [half][k][column of B] */
} tiles_pairs;

static float tiles_from(const unsigned char *pair, int half) {
    return tiles_flushed(tiles_float((uint32_t)(pair[2 * half] | pair[2 * half + 1] << 8) << 16));
}

/* Adds up row m of a product of `depth` pairs into sum, the halves of the pairs apart.
 * Returns 1 if a sum on the way needs what tiles_special does. */
TILES_FAST static int tiles_sums(const tiles_pairs *x, int m, int depth, float (*sum)[16]) {
    int special[16] = {0}, any = 0;
    memset(sum, 0, 2 * sizeof *sum);
    for (int h = 0; h < 2; h++)
        for (int k = 0; k < depth; k++)
            for (int n = 0; n < 16; n++) {
                const float y = __builtin_fmaf(x->a[h][m][k], x->b[h][k][n], sum[h][n]);
                special[n] |= !(y == 0 || __builtin_fabsf(y) > 0x1p-126f);
                sum[h][n] = y;
            }
    for (int n = 0; n < 16; n++) any |= special[n];
    return any;
}

/* C += A B of pairs of bf16. */
static void tiles_pairs_add(tiles_register *c, const tiles_register *a, const tiles_register *b) {
    static tiles_pairs x;
    for (int i = 0; i < 2 * 16 * 16; i++) {
        const int h = i / 256, row = i / 16 % 16, word = i % 16;
        x.a[h][row][word] = tiles_from(a->data[row] + 4 * word, h);
        x.b[h][row][word] = tiles_from(b->data[row] + 4 * word, h);
    }
    for (int m = 0; m < c->rows; m++) {
        float sum[2][16], row[16];
        const int special = tiles_sums(&x, m, b->rows, sum);
        memcpy(row, c->data[m], sizeof row);
        if (special) memset(sum, 0, sizeof sum);
        for (int n = 0; n < b->bytes / 4; n++) {
            for (int i = 0; i < 2 * b->rows && special; i++)
                sum[i % 2][n] = tiles_fma(x.a[i % 2][m][i / 2], x.b[i % 2][i / 2][n],
                                          sum[i % 2][n]);
            row[n] = tiles_add(row[n], tiles_add(sum[0][n], sum[1][n]));
        }
        memcpy(c->data[m], row, sizeof row);
    }
}

/* Row m of C += A B, of signed bytes; sums wrap around at 32 bits. */
static void tiles_row_int8(uint32_t *c, const unsigned char *a, const tiles_register *b) {
    for (int n = 0; n < b->bytes / 4; n++)
        for (int k = 0; k < 4 * b->rows; k++)
            c[n] += (uint32_t)((signed char)a[k] * (signed char)b->data[k / 4][4 * n + k % 4]);
}

static void tiles_multiply(int sum, int i, int j, int bf16) {
    tiles_register *c = &tiles_of[sum];
    const tiles_register *a = &tiles_of[i], *b = &tiles_of[j];
    tiles_products++;
    tiles_faults += !tiles_open || a->rows != c->rows || a->bytes != 4 * b->rows ||
                    b->bytes != c->bytes;
    if (tiles_real) {
        tiles_real_multiply(sum, i, j, bf16);
        return;
    }
    if (bf16) tiles_pairs_add(c, a, b);
    for (int m = 0; m < c->rows && !bf16; m++) {
        uint32_t row[16];
        memcpy(row, c->data[m], sizeof row);
        tiles_row_int8(row, a->data[m], b);
        memcpy(c->data[m], row, sizeof row);
    }
}

/* Returns 1 if this machine has AMX: asks as >>isa does. */
static int tiles_exist(void) {
    const unsigned bits = 1u << 22 | 1u << 24 | 1u << 25;
    unsigned a = 7, b, c = 0, d;
    long refused = 158;
    __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    if ((d & bits) != bits) return 0;
    __asm__ volatile("syscall"
                     : "+a"(refused)
                     : "D"(0x1023L), "S"(18L)
                     : "rcx", "r11", "memory");
    return refused == 0;
}
#else
#define TILES 0
#endif
#endif /* TSHARD_TESTS_TILES_H */
