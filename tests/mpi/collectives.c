/* The tests that every backend passes, over MPI. */
#include "../../backends/tshard_threads.h"

#include "../support/processes.h"
#include "../support/collectives.h"
#include "../support/comm_tests.h"

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_grid),     cmocka_unit_test(test_large),
        cmocka_unit_test(test_overlap),  cmocka_unit_test(test_run_ahead),
        cmocka_unit_test(test_messages), cmocka_unit_test(test_self),
        cmocka_unit_test(test_split),    cmocka_unit_test(test_mismatch),
        cmocka_unit_test(test_tie),      cmocka_unit_test(test_message_mismatch),
        cmocka_unit_test(test_leave),    cmocka_unit_test(test_careless_close),
        cmocka_unit_test(test_abort),    cmocka_unit_test(test_abort_from_thread),
        cmocka_unit_test(test_timeout),  cmocka_unit_test(test_circle),
        cmocka_unit_test(test_nan),      cmocka_unit_test(test_repeat),
    };
    comm_way = WORLD_MPI;
    return cmocka_run_group_tests_name("comm/mpi", tests, NULL, NULL);
}
