/* Any MPI: mpirun -n RANKS peer_mpi, then the commands of ranks_bench.h. What carries the bytes is
 * mpirun's to say (--mca btl self,vader or self,tcp). */
#include "ranks_bench.h"

#include <fcntl.h> /* open */
#include <mpi.h>
#include <sys/stat.h> /* mkfifo */

enum { LARGE = 128 * 1024 / 4 };

/* The faster one of two: of Open MPI's that is the general one where pieces are large. */
static int reduce_scatter(const bench *b, const float *send, float *recv, int piece) {
    int pieces[BENCH_RANKS];
    for (int r = 0; r < b->ranks; r++) pieces[r] = piece;
    if (piece >= LARGE)
        return MPI_Reduce_scatter(send, recv, pieces, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    return MPI_Reduce_scatter_block(send, recv, piece, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

static const float *call(bench *b, int kind, float *send, float *recv, long count) {
    const int n = (int)count, piece = (int)(count / b->ranks);
    int result;
    if (kind == BENCH_ALLREDUCE)
        result = MPI_Allreduce(MPI_IN_PLACE, recv, n, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    else if (kind == BENCH_ALLGATHER)
        result = MPI_Allgather(send, piece, MPI_FLOAT, recv, piece, MPI_FLOAT, MPI_COMM_WORLD);
    else
        result = reduce_scatter(b, send, recv, piece);
    return result == MPI_SUCCESS ? recv : NULL;
}

/* mpirun gives its input to rank 0 alone, which passes it on through named pipes: a broadcast would
 * keep the others spinning. */
static int join(bench *b) {
    char folder[] = "/tmp/peer_mpi.XXXXXX", name[sizeof folder + 8];
    int r, ok = b->rank != 0 || mkdtemp(folder) != NULL;
    for (r = 1; b->rank == 0 && r < b->ranks; r++) {
        (void)snprintf(name, sizeof name, "%s/%d", folder, r);
        ok &= mkfifo(name, 0600) == 0;
    }
    MPI_Bcast(folder, sizeof folder, MPI_CHAR, 0, MPI_COMM_WORLD);
    for (r = 1; r < b->ranks; r++) {
        (void)snprintf(name, sizeof name, "%s/%d", folder, r);
        if (b->rank == r) ok &= (b->in = open(name, O_RDONLY)) >= 0;
        if (b->rank == 0) ok &= (b->relay[r] = open(name, O_WRONLY)) >= 0;
        if (b->rank == 0) (void)remove(name);
    }
    if (b->rank == 0) (void)rmdir(folder);
    return ok;
}

int main(int argc, char **argv) {
    bench b;
    int failed;
    memset(&b, 0, sizeof b);
    memset(b.relay, -1, sizeof b.relay);
    (void)alarm(BENCH_SECONDS);
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &b.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &b.ranks);
    b.call = call;
    failed = b.ranks > BENCH_RANKS || !join(&b) || bench_serve(&b);
    MPI_Finalize();
    return failed;
}
