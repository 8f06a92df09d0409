/* ========================================================================== */
/* >>arm                                                MARK: - arm (private) */
/* Extensions of NEON: which this compiler and this processor have.           */
/* Needs: >>base.                                                             */
/* ========================================================================== */

/* Kernels use NEON, which every 64-bit Arm has, and three extensions of it:
 *
 *   dotprod: sdot adds 4 products of 8-bit integers to each of 4 sums of 32 bits (FEAT_DotProd)
 *   i8mm: smmla adds products of two (2, 8) matrices of 8-bit integers to 2 x 2 sums (FEAT_I8MM)
 *   bf16: bfdot adds 2 products of bf16 to each of 4 sums; bfmmla adds products of two (2, 4)
 *   matrices of bf16 to 2 x 2 sums (FEAT_BF16)
 *
 * TSHI_NEON_DOT, TSHI_NEON_MM and TSHI_NEON_BF16 are 1 if kernels that use these extensions are
 * compiled: gcc 10 has the intrinsics in functions with a target attribute (TSHI_DOT, TSHI_MM,
 * TSHI_BF16), clang only since version 16; older compilers have them if the whole program is
 * compiled for such a processor. */
#if TSHI_NEON
#include <arm_neon.h> /* vfmaq_laneq_f32, vdotq_laneq_s32, vmmlaq_s32, vbfmmlaq_f32 */
#endif
#if TSHI_NEON && (defined(__clang__) ? __clang_major__ >= 16 : __GNUC__ >= 10)
#define TSHI_NEON_DOT  1
#define TSHI_NEON_MM   1
#define TSHI_NEON_BF16 1
#if defined(__ARM_FEATURE_QRDMX) /* the program is compiled for Armv8.1 or later already */
#define TSHI_NEON_TARGET(extensions) __attribute__((target(extensions)))
#else
#define TSHI_NEON_TARGET(extensions) __attribute__((target("arch=armv8.2-a" extensions)))
#endif
#define TSHI_DOT  TSHI_NEON_TARGET("+dotprod")
#define TSHI_MM   TSHI_NEON_TARGET("+dotprod+i8mm")
#define TSHI_BF16 TSHI_NEON_TARGET("+bf16")
#else
#if TSHI_NEON && defined(__ARM_FEATURE_DOTPROD)
#define TSHI_NEON_DOT 1
#else
#define TSHI_NEON_DOT 0
#endif
#if TSHI_NEON_DOT && defined(__ARM_FEATURE_MATMUL_INT8)
#define TSHI_NEON_MM 1
#else
#define TSHI_NEON_MM 0
#endif
#if TSHI_NEON && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define TSHI_NEON_BF16 1
#else
#define TSHI_NEON_BF16 0
#endif
#define TSHI_DOT
#define TSHI_MM
#define TSHI_BF16
#endif

#if TSHI_NEON
/* Bits of the value that tshi_arm_extensions returns. */
enum { TSHI_ARM_DOT = 1, TSHI_ARM_MM = 2, TSHI_ARM_BF16 = 4 };

#if defined(__linux__)
#include <sys/auxv.h> /* getauxval */
#elif defined(__APPLE__)
#ifdef __cplusplus
extern "C" {
#endif
/* Declared here, because <sys/sysctl.h> needs types that a feature macro may hide. */
int(sysctlbyname)(const char *name, void *value, size_t *size, void *set, size_t set_size);
#ifdef __cplusplus
}
#endif

/* Returns 1 if the system says that the processor has the feature `name`. */
static int tshi_arm_feature(const char *name) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, NULL, 0) == 0 && value != 0;
}
#endif

/* Returns the extensions that this processor has, as a sum of bits TSHI_ARM_...: asks the system on
 * Linux and macOS; elsewhere returns those that the program is compiled for. */
static int tshi_arm_extensions(void) {
    int dot, mm, bf16;
#if defined(__linux__)
    const unsigned long first = getauxval(16), second = getauxval(26); /* AT_HWCAP, AT_HWCAP2 */
    dot = (int)(first >> 20 & 1);                                      /* bit 20: HWCAP_ASIMDDP */
    mm = (int)(second >> 13 & 1);                                      /* bit 13: HWCAP2_I8MM */
    bf16 = (int)(second >> 14 & 1);                                    /* bit 14: HWCAP2_BF16 */
#elif defined(__APPLE__)
    dot = tshi_arm_feature("hw.optional.arm.FEAT_DotProd");
    mm = tshi_arm_feature("hw.optional.arm.FEAT_I8MM");
    bf16 = tshi_arm_feature("hw.optional.arm.FEAT_BF16");
#else
    dot = mm = bf16 = 0;
#if defined(__ARM_FEATURE_DOTPROD)
    dot = 1;
#endif
#if defined(__ARM_FEATURE_MATMUL_INT8)
    mm = 1;
#endif
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    bf16 = 1;
#endif
#endif
    return (dot ? TSHI_ARM_DOT : 0) | (mm ? TSHI_ARM_MM : 0) | (bf16 ? TSHI_ARM_BF16 : 0);
}

/* Returns the processor's identification register (MIDR_EL1), if the system lets programs read it,
 * else 0. */
static uint32_t tshi_arm_id(void) {
    uint64_t id = 0;
#if defined(__linux__)
    if (getauxval(16) >> 11 & 1) __asm__("mrs %0, midr_el1" : "=r"(id)); /* HWCAP_CPUID */
#endif
    return (uint32_t)id;
}
#endif /* TSHI_NEON */
