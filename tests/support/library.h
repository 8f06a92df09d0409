/* library.h - what tests/support/library.c adds to the library, for tests that know only what is
 * public: which of the kernels that this processor runs a ctx uses. */
#ifndef TSHARD_TESTS_LIBRARY_H
#define TSHARD_TESTS_LIBRARY_H

/* 0: portable ones; 1: AVX2; 2: AVX-512. A new ctx uses the best that there are. */
int library_isa(const tsh_ctx *ctx);
void library_set_isa(tsh_ctx *ctx, int isa);

#endif
