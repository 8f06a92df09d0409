/* The threads backend: every kind of collective against a reference that adds in the documented
 * order, bit for bit; many requests at once; groups; and every way in which a world may end. */
#include "../../backends/tshard_threads.h"

#include "../support/processes.h"
#include "../support/collectives.h"
#include "../support/comm_tests.h"

static void crowd_rank(job *j) {
    grid_case c;
    memset(&c, 0, sizeof c);
    c.count = 1000;
    grid_allreduce(j, c);
}

static void test_crowd(void **state) {
    (void)state;
    world_run(64, crowd_rank, NULL);
}

/* --------------------------------------------------------- front door, runner */

static void door_rank(job *j) {
    float x[8] = {0};
    int64_t bad[2] = {1, -1}, good[2] = {4, 4};
    tsh_coll coll = tsh_coll_make(TSH_ALLREDUCE, TSH_F32);
    tsh_comm *comm = &j->comm;
    tsh_req req;
    CHECK(tsh_allreduce(NULL, x, 1, TSH_F32, TSH_SUM) == TSH_ERR_ARGUMENT);
    CHECK(tsh_allreduce(comm, NULL, 1, TSH_F32, TSH_SUM) == TSH_ERR_ARGUMENT);
    CHECK(tsh_allreduce(comm, x, -1, TSH_F32, TSH_SUM) == TSH_ERR_ARGUMENT);
    CHECK(tsh_allreduce(comm, x, INT64_MAX, TSH_F32, TSH_SUM) == TSH_ERR_ARGUMENT);
    CHECK(tsh_allreduce(comm, x, 1, TSH_I32, TSH_AVG) == TSH_ERR_ARGUMENT);
    CHECK(tsh_broadcast(comm, x, 1, TSH_F32, 2) == TSH_ERR_ARGUMENT);
    CHECK(tsh_send(comm, x, 1, TSH_F32, -1) == TSH_ERR_ARGUMENT);
    CHECK(tsh_recv(comm, x, 1, TSH_F32, 2) == TSH_ERR_ARGUMENT);
    CHECK(tsh_allgather(comm, x, x, bad, 1, TSH_F32) == TSH_ERR_ARGUMENT);
    CHECK(tsh_allgather(comm, x, x, NULL, 1, TSH_F32) == TSH_ERR_ARGUMENT);
    CHECK(tsh_allgather(comm, x, x, good, -1, TSH_F32) == TSH_ERR_ARGUMENT);
    CHECK(tsh_start(comm, NULL, &req) == TSH_ERR_ARGUMENT);
    CHECK(tsh_start(comm, &coll, NULL) == TSH_ERR_ARGUMENT);
    coll.size = 1;
    CHECK(tsh_start(comm, &coll, &req) == TSH_ERR_ARGUMENT);
    CHECK(tsh_wait(comm, 0) == TSH_OK);
    CHECK(comm->stats.calls[TSH_ALLREDUCE] == 0 && comm->next_seq == 0);
    CHECK(tsh_allreduce(comm, x, 8, TSH_F32, TSH_SUM) == TSH_OK);
    CHECK(tsh_allgather(comm, x + 4 * j->rank, x, good, 1, TSH_F32) == TSH_OK);
    CHECK(comm->stats.calls[TSH_ALLREDUCE] == 1 && comm->stats.bytes[TSH_ALLREDUCE] == 32);
    CHECK(comm->stats.bytes[TSH_ALLGATHER] == 16 && comm->next_seq == 2);
    tsh_comm_progress(comm);
}

static void test_front_door(void **state) {
    (void)state;
    world_run(2, door_rank, NULL);
}

static void test_group_of_one(void **state) {
    tsh_comm comm, child;
    tsh_error error;
    float x[4] = {1, 2, 3, 4}, y[4] = {0};
    int64_t two = 2, three = 3;
    tsh_req req = 1;
    (void)state;
    memset(&comm, 0, sizeof comm);
    assert_int_equal(tsh_barrier(&comm), TSH_ERR_ARGUMENT); /* size 0: no group */
    comm.size = 1;
    assert_int_equal(tsh_allreduce_start(&comm, x, 4, TSH_F32, TSH_AVG, &req), TSH_OK);
    assert_int_equal(req, 0);
    assert_int_equal(tsh_wait(&comm, req), TSH_OK);
    assert_int_equal(tsh_reduce_scatter(&comm, x, y, &two, 2, TSH_F32, TSH_SUM), TSH_OK);
    assert_memory_equal(x, y, sizeof x);
    assert_int_equal(tsh_alltoall(&comm, x, &two, y, &three, 1, TSH_F32), TSH_ERR_ARGUMENT);
    assert_int_equal(tsh_send(&comm, x, 1, TSH_F32, 0), TSH_ERR_ARGUMENT);
    assert_int_equal(tsh_sendrecv(&comm, x, 1, 0, y + 3, 1, 0, TSH_F32), TSH_OK);
    assert_true(y[3] == 1);
    assert_int_equal(tsh_split(&comm, 5, 0, &child), TSH_OK);
    assert_int_equal(child.size, 1);
    assert_int_equal(tsh_split(&comm, -1, 0, &child), TSH_OK);
    assert_int_equal(child.size, 0);
    tsh_comm_abort(&comm, TSH_ERR_IO, "nobody hears this");
    assert_int_equal(tsh_comm_error(&comm, &error), TSH_OK);
    assert_int_equal(error.rank, -1);
    assert_int_equal(comm.stats.bytes[TSH_ALLREDUCE], 0);
    tsh_comm_close(&comm);
}

static int runner_rank(tsh_ctx *ctx, void *user) {
    int *seen = (int *)user;
    int64_t sum = tsh_world(ctx)->rank;
    if (tsh_allreduce(tsh_world(ctx), &sum, 1, TSH_I64, TSH_SUM) != TSH_OK) return 1;
    seen[tsh_world(ctx)->rank] = (int)sum + 1;
    return tsh_world(ctx)->rank == 2 ? 9 : 0;
}

static void test_runner(void **state) {
    int seen[4] = {0};
    (void)state;
    assert_int_equal(tsh_threads_run(2, NULL, runner_rank, seen), 0);
    assert_int_equal(tsh_threads_run(4, NULL, runner_rank, seen), 9);
    for (int r = 0; r < 4; r++) assert_int_equal(seen[r], 7);
    assert_int_equal(tsh_threads_run(0, NULL, runner_rank, seen), 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        COMM_TESTS,
        cmocka_unit_test(test_crowd),
        cmocka_unit_test(test_front_door),
        cmocka_unit_test(test_group_of_one),
        cmocka_unit_test(test_runner),
    };
    return cmocka_run_group_tests_name("comm/threads", tests, NULL, NULL);
}
