/* ========================================================================== */
/* >>config                                                    MARK: - config */
/* The switches a user may define before including this file.                 */
/* Needs: nothing.                                                            */
/* ========================================================================== */

/* TSHARD_IMPLEMENTATION   in exactly one source file: compiles the library, and every backend
 *                         included there
 * TSHARD_IMPLEMENTED      beside TSHARD_IMPLEMENTATION: compiles only the backends; the library is
 *                         compiled in another file, which includes a backend or
 *                         backends/tshard_backend.h
 * TSHARD_STATIC           makes all functions static: several copies may live in one program
 * TSHARD_SHARED           with the implementation: a shared library exports the public functions,
 *                         also under -fvisibility=hidden
 * TSHARD_REAL             float (default) or double: the type of tsh_real
 * TSHARD_NO_SIMD          compiles portable C kernels only
 * TSHARD_WINDOWS_AVX      enables the AVX kernels with gcc for Windows, where they are off by
 *                         default: this gcc may place 32-byte vectors at addresses that are only
 *                         multiples of 16, and the program then crashes (GCC bug 54412; the gcc
 *                         of Debian and of MSYS2 is patched) */
#ifndef TSHARD_REAL
#define TSHARD_REAL float
#endif

#ifdef TSHARD_STATIC
#if defined(__GNUC__)
#define TSH_API __attribute__((unused)) static
#else
#define TSH_API static
#endif
#elif defined(TSHARD_SHARED) && defined(_WIN32)
#define TSH_API __declspec(dllexport) extern
#elif defined(TSHARD_SHARED) && defined(__GNUC__)
#define TSH_API __attribute__((visibility("default"))) extern
#else
#define TSH_API extern
#endif

/* TSH_PRINTF(fmt, first) makes the compiler check calls as those of printf: parameter number fmt is
 * the format, first the first value. mingw's stdio.h says which formats its printf takes: those of
 * Microsoft's C runtime or those of GNU. */
#if defined(__MINGW32__)
#define TSH_PRINTF(fmt, first) __attribute__((format(__MINGW_PRINTF_FORMAT, fmt, first)))
#elif defined(__GNUC__)
#define TSH_PRINTF(fmt, first) __attribute__((format(printf, fmt, first)))
#else
#define TSH_PRINTF(fmt, first)
#endif

/* The version of this header. tsh_version() returns that of the library the program is linked
 * to. */
#define TSHARD_VERSION_MAJOR 0
#define TSHARD_VERSION_MINOR 2
#define TSHARD_VERSION_PATCH 0
#define TSHARD_VERSION /* "MAJOR.MINOR.PATCH" */                                                   \
    TSH_VERSION_TEXT(TSHARD_VERSION_MAJOR, TSHARD_VERSION_MINOR, TSHARD_VERSION_PATCH)
#define TSH_VERSION_TEXT(major, minor, patch)   TSH_VERSION_QUOTED(major, minor, patch)
#define TSH_VERSION_QUOTED(major, minor, patch) #major "." #minor "." #patch

enum {
    TSH_MAX_DIMS = 6,       /* max number of dimensions of a tensor */
    TSH_MAX_SEGMENTS = 4,   /* max number of segments of a sharded dimension (tsh_segment) */
    TSH_MESSAGE_SIZE = 512, /* max bytes of an error's sentence, with the final 0 */
    TSH_PATH_SIZE = 192     /* max bytes of a parameter's path, with the final 0 */
};
