/* tsh_cblas_gemm by the CBLAS of BLIS, where that is found. */
/* build: double */
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#ifdef TESTS_BLIS
#define TSHARD_CBLAS
#include "../../backends/tshard_blis.h"
#define GEMM tsh_cblas_gemm
#endif
#include "../support/gemm_tests.h"

int main(void) {
    return gemm_tests();
}
