/* tshard.h - tensors, autograd and tensor-parallel layers for C and C++, in one header.
 *
 * ========================================================================== */
/* >>front                                                       MARK: - front */
/* What this is, and the two lines that use it.                                */
/* Needs: nothing.                                                              */
/* ==========================================================================
 *
 * Do this in exactly one source file:
 *
 *     #define TSHARD_IMPLEMENTATION
 *     #include "tshard.h"
 *
 * and include it plainly wherever else it is used. It needs libc and libm: cc -O3 prog.c -lm. A
 * backend (backends/tshard_threads.h, with tshard_backend.h beside it) is included after it, in the
 * same file.
 *
 * It is put together from the files of src/: to change it, change those, and make tshard.h.
 *
 * MIT licence, see LICENSE. Version 0.2.0. */
