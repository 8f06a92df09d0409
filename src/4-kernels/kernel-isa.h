/* ========================================================================== */
/* >>kernel-isa                                  MARK: - kernel-isa (private) */
/* Elementwise kernels, compiled for each instruction set.                    */
/* Needs: >>base.                                                             */
/* ========================================================================== */

/* An elementwise op adds its operands to a tshi_loop (tshi_kernel_space, tshi_kernel_tensor) and
 * calls tshi_kernel_run, which calls a kernel for each run along the innermost dimension. An op
 * that works on whole rows, such as softmax, sets the operands of a tshi_rows and calls
 * tshi_kernel_run_rows, which calls a kernel once per thread. A kernel loads, computes and stores
 * blocks of TSHI_BLOCK values; tshi_kernel_add_body is the shortest one. */
#if TSHI_X86
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 14
#pragma GCC diagnostic push /* older compilers warn of their own intrinsics (GCC bug 105593) */
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h> /* _mm512_fmadd_ps, _mm512_permutex2var_ps, _mm256_loadu_ps */
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 14
#pragma GCC diagnostic pop
#endif
#endif

/* -- kernels per instruction set --------------------------------------------
 * A kernel computes n elements (or n rows) of its operands x[0], x[1], ..., of which x[0] is
 * usually the output; its parameters are a struct of its own. TSHI_KERNEL(name, type) compiles the
 * inline function name_body(n, x, const type *params) once per instruction set, into the table
 * name[TSHI_ISAS]; the caller takes name[ctx->isa]. A body has plain loops, which the compiler
 * vectorises. */
typedef struct tshi_operand {
    void *data; /* address of the first element; NULL: the operand is not used */
    /* stride in elements: from element to element or, in kernels of rows, from row to row */
    int64_t step;
    tsh_dtype dtype; /* type of the elements */
} tshi_operand;

typedef void (*tshi_kernel_fn)(int64_t n, const tshi_operand *x, const void *params);

/* Instruction sets for which elementwise kernels are compiled; each is an index into tables of
 * kernels. TSHI_ISAS is their number. (>>isa has all instruction sets.) */
enum { TSHI_ISA_PORTABLE, TSHI_ISA_AVX2, TSHI_ISA_AVX512, TSHI_ISAS };

#if TSHI_X86
/* Attributes of functions that are compiled for AVX2 and for AVX-512. (All processors with AVX2
 * have F16C, too.) */
#define TSHI_AVX2   __attribute__((target("avx2,fma,f16c")))
#define TSHI_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))
#else
#define TSHI_AVX2
#define TSHI_AVX512
#endif

/* Defines the kernel name_isa: the inline function name_body, compiled for the instruction set
 * isa. */
#define TSHI_KERNEL_ISA(name, isa, TARGET, ...)                                                    \
    TARGET static void name##_##isa(int64_t n, const tshi_operand *x, const void *params) {        \
        (void)params;                                                                              \
        name##_body(__VA_ARGS__);                                                                  \
    }
#define TSHI_KERNEL_TABLE(name)                                                                    \
    static const tshi_kernel_fn name[TSHI_ISAS] = {name##_portable, name##_avx2, name##_avx512}
#define TSHI_KERNEL(name, type)                                                                    \
    TSHI_KERNEL_ISA(name, portable, , n, x, (const type *)params)                                  \
    TSHI_KERNEL_ISA(name, avx2, TSHI_AVX2, n, x, (const type *)params)                             \
    TSHI_KERNEL_ISA(name, avx512, TSHI_AVX512, n, x, (const type *)params)                         \
    TSHI_KERNEL_TABLE(name)

/* TSHI_KERNEL_FUSED is TSHI_KERNEL for bodies with a fourth argument, `fused`: 1 if the instruction
 * set computes a * b + c in one instruction (FMA). TSHI_FUSED: 1 if the compiler's default
 * target does so. */
#if defined(__FP_FAST_FMAF)
#define TSHI_FUSED 1
#else
#define TSHI_FUSED 0
#endif
#define TSHI_KERNEL_FUSED(name, type)                                                              \
    TSHI_KERNEL_ISA(name, portable, , n, x, (const type *)params, TSHI_FUSED)                      \
    TSHI_KERNEL_ISA(name, avx2, TSHI_AVX2, n, x, (const type *)params, TSHI_X86)                   \
    TSHI_KERNEL_ISA(name, avx512, TSHI_AVX512, n, x, (const type *)params, TSHI_X86)               \
    TSHI_KERNEL_TABLE(name)
/* Variants of TSHI_KERNEL_FUSED that compile a kernel fewer times, for kernels whose time does not
 * matter in a training step: processors with AVX-512 run the one for AVX2 (TSHI_KERNEL_AVX2), or
 * all run the portable one (TSHI_KERNEL_PORTABLE), which suffices where memory is slower than the
 * arithmetic. */
#define TSHI_KERNEL_AVX2(name, type)                                                               \
    TSHI_KERNEL_ISA(name, portable, , n, x, (const type *)params, TSHI_FUSED)                      \
    TSHI_KERNEL_ISA(name, avx2, TSHI_AVX2, n, x, (const type *)params, TSHI_X86)                   \
    static const tshi_kernel_fn name[TSHI_ISAS] = {name##_portable, name##_avx2, name##_avx2}
#define TSHI_KERNEL_PORTABLE(name, type)                                                           \
    TSHI_KERNEL_ISA(name, portable, , n, x, (const type *)params, TSHI_FUSED)                      \
    static const tshi_kernel_fn name[TSHI_ISAS] = {name##_portable, name##_portable,               \
                                                   name##_portable}
