/* mpi_world.h - tests compiled with TESTS_MPI run on the n processes of an mpirun, all of which run
 * the same test functions. A body for n ranks runs on a world of all of them; one for 1 rank in
 * each process; one for another number as threads of the first process, whose assertions are the
 * only ones that count. What other ranks find they CHECK, and the first process hears of it.
 *
 * The functions are in tests/mpi/main.c: tests themselves do not know which MPI there is. */
#ifndef TSHARD_TESTS_MPI_WORLD_H
#define TSHARD_TESTS_MPI_WORLD_H

#ifdef main
int main(void); /* renamed, to be one of several in a program */
#endif

/* The degrees that tests go through: 1 and n. */
extern int mpi_degrees[2];

int mpi_rank(void);
int mpi_size(void);
/* A world of all processes. */
tsh_result mpi_join(tsh_comm *out);
/* Every process has written its own of n rows of `bytes` bytes: now all have all of them. */
void mpi_share(void *rows, size_t bytes);

#endif
