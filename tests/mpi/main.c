/* The main function of tests that run on the processes of an mpirun; see tests/support/mpi_world.h.
 * TESTS_PARTS is a row of X(name): the program's test files, whose main functions are renamed to
 * name. Arguments are names of those that run; without any all do. */
#define TSHARD_IMPLEMENTATION
#include "../../backends/tshard_mpi.h"

#include "../support/mpi_world.h"

#define X(name) int name(void);
TESTS_PARTS
#undef X

int mpi_degrees[2];

int mpi_rank(void) {
    int rank;
    (void)MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    return rank;
}

int mpi_size(void) {
    return mpi_degrees[1];
}

tsh_result mpi_join(tsh_comm *out) {
    tsh_error why;
    tsh_mpi_desc desc = {.error = &why};
    tsh_result result = tsh_mpi_open(&desc, out);
    if (result != TSH_OK) fprintf(stderr, "rank %d cannot join: %s\n", mpi_rank(), why.message);
    return result;
}

void mpi_share(void *rows, size_t bytes) {
    MPI_Request request;
    int done = 0;
    (void)MPI_Iallgather(MPI_IN_PLACE, 0, MPI_BYTE, rows, (int)bytes, MPI_BYTE, MPI_COMM_WORLD,
                         &request);
    while (!done) { /* ends with the time limit of the program */
        (void)MPI_Test(&request, &done, MPI_STATUS_IGNORE);
        (void)sched_yield();
    }
}

/* Whether the arguments name a program, or none. */
static int is_named(int argc, char **argv, const char *name) {
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], name) == 0) return 1;
    return argc < 2;
}

/* Only the first process reports: where it fails, it ends the others (it exits without
 * MPI_Finalize). */
int main(int argc, char **argv) {
    int failed = 0;
    if (MPI_Init(&argc, &argv)) return 1;
    (void)MPI_Comm_size(MPI_COMM_WORLD, &mpi_degrees[1]);
    mpi_degrees[0] = 1;
    (void)setenv("TSHARD_TIMEOUT", "30", 1); /* a hang ends as a failed test */
    if (mpi_rank() > 0 && !freopen("/dev/null", "w", stdout)) return 1;
#define X(name) failed = failed || (is_named(argc, argv, #name) && name());
    TESTS_PARTS
#undef X
        (void)
    MPI_Finalize();
    return failed;
}
