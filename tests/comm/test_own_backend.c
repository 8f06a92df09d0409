/* The tests that every backend passes, on the backend of examples/05_write_a_backend.c. Another
 * backend of processes needs net_prepare(ranks), called before they are made, net_open(rank, ranks,
 * comm, error), called in each of them, and sockets[RANKS][2], which are closed in the parent. */
int example_main(void);
#define main example_main
#include "../../examples/05_write_a_backend.c"
#undef main

#define TESTS_OWN
#include "../support/processes.h"
#include "../support/collectives.h"
#include "../support/comm_tests.h"

static void test_example(void **state) {
    (void)state;
    (void)fflush(NULL);
    assert_int_equal(example_main(), 0);
}

/* A world of one process; and none, where TSHARD_TIMEOUT is no time. */
static void test_compose(void **state) {
    static const tsh_comm_ops ops = TSH_MESSAGE_OPS(net, "net", TSH_CAP_DEATH);
    tsh_comm messages = tshb_comm_make(&ops, NULL, 0, 1, 1), comm;
    tsh_error error;
    (void)state;
    assert_true(net_prepare(1));
    (void)setenv("TSHARD_TIMEOUT", "soon", 1);
    assert_int_equal(tshb_comm_compose(&messages, &comm, &error), TSH_ERR_ARGUMENT);
    assert_non_null(strstr(error.message, "TSHARD_TIMEOUT is \"soon\""));
    (void)unsetenv("TSHARD_TIMEOUT");
    assert_int_equal(tshb_comm_compose(&messages, &comm, &error), TSH_OK);
    assert_string_equal(comm.ops->name, "net");
    assert_true(comm.ops->caps == (TSH_CAP_ORDERED | TSH_CAP_DEATH));
    assert_int_equal(tsh_run_on(&comm, NULL, rank_main, NULL, &error), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {COMM_TESTS, cmocka_unit_test(test_compose),
                                       cmocka_unit_test(test_example)};
    comm_way = WORLD_OWN;
    return cmocka_run_group_tests_name("comm/own_backend", tests, NULL, NULL);
}
