/* tsh_blis_gemm, where BLIS is found. */
/* build: double */
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#ifdef TESTS_BLIS
#include "../../backends/tshard_blis.h"
#define GEMM tsh_blis_gemm
#endif
#include "../support/gemm_tests.h"

int main(void) {
    return gemm_tests();
}
