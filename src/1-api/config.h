/* ========================================================================== */
/* >>config                                                    MARK: - config */
/* The switches a user may define before including this file.                 */
/* Needs: nothing.                                                            */
/* ========================================================================== */

/* TSHARD_IMPLEMENTATION   in exactly one source file: compile the library, and every backend
 *                         included there
 * TSHARD_IMPLEMENTED      beside it: only the backends; another file has compiled the library, with
 *                         a backend or backends/tshard_backend.h included
 * TSHARD_STATIC           all functions static: several copies may live in one program
 * TSHARD_SHARED           with the implementation: a shared library exports the public functions,
 *                         also under -fvisibility=hidden
 * TSHARD_REAL             float (default) or double: the type of all values
 * TSHARD_NO_SIMD          portable C kernels only
 * TSHARD_WINDOWS_AVX      AVX kernels with gcc for Windows, too, which has them off: it may keep
 *                         32-byte vectors at addresses that are multiples of 16 only, and crash
 *                         (GCC bug 54412; the gcc of Debian and of MSYS2 is patched) */
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

#if defined(__MINGW32__) /* printf of the C runtime, or of mingw: stdio.h says which */
#define TSH_PRINTF(fmt, first) __attribute__((format(__MINGW_PRINTF_FORMAT, fmt, first)))
#elif defined(__GNUC__)
#define TSH_PRINTF(fmt, first) __attribute__((format(printf, fmt, first)))
#else
#define TSH_PRINTF(fmt, first)
#endif

/* Of this header; tsh_version() is that of the library a program is linked with. */
#define TSHARD_VERSION_MAJOR 0
#define TSHARD_VERSION_MINOR 1
#define TSHARD_VERSION_PATCH 0
#define TSHARD_VERSION /* "MAJOR.MINOR.PATCH" */                                                   \
    TSH_VERSION_TEXT(TSHARD_VERSION_MAJOR, TSHARD_VERSION_MINOR, TSHARD_VERSION_PATCH)
#define TSH_VERSION_TEXT(major, minor, patch)   TSH_VERSION_QUOTED(major, minor, patch)
#define TSH_VERSION_QUOTED(major, minor, patch) #major "." #minor "." #patch

#define TSH_MAX_DIMS     6
#define TSH_MAX_SEGMENTS 4
#define TSH_MESSAGE_SIZE 512
#define TSH_PATH_SIZE    192
