/* tsh_cblas_gemm by the CBLAS of BLIS, where that is found. */
/* build: double */
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#ifdef TESTS_BLIS
#define TSHARD_CBLAS
#include "../../backends/tshard_blis.h"
#define GEMM tsh_cblas_gemm
#include "../support/gemm_tests.h"

int main(void) {
    return gemm_tests();
}
#else
#include "../support/ranks.h"

static void needs_blis(void **state) {
    (void)state;
    print_message("skip: needs libblis-pthread-dev\n");
    skip();
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(needs_blis)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
#endif
