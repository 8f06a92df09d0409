/* tsh_blis_gemm, where BLIS is found. */
/* build: double */
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#ifdef TESTS_BLIS
#include "../../backends/tshard_blis.h"
#define GEMM tsh_blis_gemm
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
