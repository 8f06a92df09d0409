/* ========================================================================== */
/* >>uv-check                                      MARK: - uv-check (private) */
/* Computes CRC32C checksums (Castagnoli; RFC 3720, B.4), reflected.          */
/* By a processor's instruction: in three streams at once, to hide latency.   */
/* Without such an instruction: by tables, 8 bytes at a time.                 */
/* Needs: >>uv-types.                                                         */
/* ========================================================================== */

#if defined(__x86_64__)
#define TSHI_UV_WIDE              __attribute__((target("sse4.2")))
#define TSHI_UV_CRC_8(crc, value) __builtin_ia32_crc32di((crc), (value))
#define TSHI_UV_CRC_1(crc, value) __builtin_ia32_crc32qi((crc), (value))
#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32) && !defined(__AARCH64EB__)
#define TSHI_UV_WIDE
#define TSHI_UV_CRC_8(crc, value) __crc32cd((uint32_t)(crc), (value))
#define TSHI_UV_CRC_1(crc, value) __crc32cb((crc), (value))
#endif

static int tshi_uv_crc_is_wide(void) { /* Returns 1 if there is an instruction for CRC32C. */
#if defined(__x86_64__)
    return __builtin_cpu_supports("sse4.2") != 0;
#elif defined(TSHI_UV_WIDE)
    return 1;
#else
    return 0;
#endif
}

#ifdef TSHI_UV_WIDE
static uint64_t tshi_uv_load_8(const unsigned char *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

/* Returns crc times x^(8 n) modulo the CRC's polynomial: the CRC register after n more zero bytes.
 * `factor` is x^(8 n - 33). */
TSHI_UV_WIDE static uint32_t tshi_uv_crc_skip(uint32_t crc, uint32_t factor) {
    uint64_t product = 0; /* crc times factor as polynomials over GF(2), times x */
    for (int i = 0; i < 32; i++) product ^= (0 - (uint64_t)(crc >> i & 1)) & (uint64_t)factor << i;
    /* returns product times x^32, modulo the polynomial */
    return (uint32_t)TSHI_UV_CRC_8(0, product);
}

TSHI_UV_WIDE static uint32_t tshi_uv_crc_fast(uint32_t crc, const unsigned char *at, size_t n) {
    static const struct {
        size_t size; /* bytes of each of the three streams: the n of tshi_uv_crc_skip */
        uint32_t factor;
    } by[] = {{8192, 0x54a86326u}, {512, 0xdd7e3b0cu}};
    for (int i = 0; i < 2; i++) {
        const size_t size = by[i].size;
        for (; n >= 3 * size; n -= 3 * size, at += 3 * size) {
            uint64_t a = crc, b = 0, c = 0;
            for (size_t k = 0; k < size; k += 8) {
                a = TSHI_UV_CRC_8(a, tshi_uv_load_8(at + k));
                b = TSHI_UV_CRC_8(b, tshi_uv_load_8(at + size + k));
                c = TSHI_UV_CRC_8(c, tshi_uv_load_8(at + 2 * size + k));
            }
            crc = tshi_uv_crc_skip((uint32_t)a, by[i].factor) ^ (uint32_t)b;
            crc = tshi_uv_crc_skip(crc, by[i].factor) ^ (uint32_t)c;
        }
    }
    for (; n >= 8; n -= 8, at += 8) crc = (uint32_t)TSHI_UV_CRC_8(crc, tshi_uv_load_8(at));
    for (; n; n--, at++) crc = (uint32_t)TSHI_UV_CRC_1(crc, *at);
    return crc;
}
#undef TSHI_UV_CRC_8
#undef TSHI_UV_CRC_1
#else
static uint32_t tshi_uv_crc_fast(uint32_t crc, const unsigned char *at, size_t n) {
    (void)at;
    (void)n;
    return crc; /* never called: there is no CRC32C instruction */
}
#endif

static uint32_t tshi_uv_crc_by_table(const uint32_t table[8][256], uint32_t crc,
                                     const unsigned char *at, size_t n) {
    for (; n >= 8; n -= 8, at += 8)
        crc = table[7][(crc ^ at[0]) & 255] ^ table[6][(crc >> 8 ^ at[1]) & 255] ^
              table[5][(crc >> 16 ^ at[2]) & 255] ^ table[4][crc >> 24 ^ at[3]] ^ table[3][at[4]] ^
              table[2][at[5]] ^ table[1][at[6]] ^ table[0][at[7]];
    for (; n; n--, at++) crc = crc >> 8 ^ table[0][(crc ^ *at) & 255];
    return crc;
}

/* Fills the tables: table[k][b] is what a byte b adds to the CRC if k more bytes follow it. */
static void tshi_uv_crc_tables(uint32_t table[8][256]) {
    for (uint32_t i = 0; i < 256; i++) {
        table[0][i] = i;
        for (int bit = 0; bit < 8; bit++)
            table[0][i] = table[0][i] >> 1 ^ (table[0][i] & 1 ? 0x82f63b78u : 0);
    }
    for (int k = 1; k < 8; k++)
        for (int i = 0; i < 256; i++)
            table[k][i] = table[k - 1][i] >> 8 ^ table[0][table[k - 1][i] & 255];
}

/* Returns a CRC32C continued by n bytes. crc: the CRC32C of the bytes before these; 0: there are
 * none. */
static uint32_t tshi_uv_crc(const tsh_uv_world *world, uint32_t crc, const void *bytes, size_t n) {
    const unsigned char *at = (const unsigned char *)bytes;
    return ~(world->crc_wide ? tshi_uv_crc_fast(~crc, at, n)
                             : tshi_uv_crc_by_table(world->crc_table, ~crc, at, n));
}

/* Returns the checksum of the header of a frame. */
static uint32_t tshi_uv_head_check(const tsh_uv_world *world, const tshi_uv_head *head) {
    return tshi_uv_crc(world, 0, head, sizeof *head - sizeof head->check);
}
