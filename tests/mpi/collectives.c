/* The tests that every backend passes, over MPI. */
#include "../../backends/tshard_threads.h"

#include "../support/processes.h"
#include "../support/collectives.h"
#include "../support/comm_tests.h"

int main(void) {
    const struct CMUnitTest tests[] = {COMM_TESTS};
    comm_way = WORLD_MPI;
    return cmocka_run_group_tests_name("comm/mpi", tests, NULL, NULL);
}
