/* The same measurement as bench_comm_threads.c, on MPI (mpirun -n RANKS peer_mpi [name] [largest]).
 * Prints "allreduce_<name>_<ranks>_<size> us"; name is openmpi_shm where none is given. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

#define ROUNDS 7

static void size_text(long bytes, char *text, size_t room) {
    if (bytes >= 1048576)
        (void)snprintf(text, room, "%ldMiB", bytes / 1048576);
    else if (bytes >= 1024)
        (void)snprintf(text, room, "%ldKiB", bytes / 1024);
    else
        (void)snprintf(text, room, "%ldB", bytes);
}

static int repeats(long bytes) {
    long n = 400L * 1048576 / (bytes + 20000);
    return n > 20000 ? 20000 : n < 4 ? 4 : (int)n;
}

static double measure(float *buffer, long bytes) {
    double best = 1e30;
    int n = repeats(bytes);
    for (int round = 0; round < ROUNDS; round++) {
        double start, took;
        MPI_Barrier(MPI_COMM_WORLD);
        start = MPI_Wtime();
        for (int i = 0; i < n; i++)
            MPI_Allreduce(MPI_IN_PLACE, buffer, (int)(bytes / 4), MPI_FLOAT, MPI_SUM,
                          MPI_COMM_WORLD);
        took = (MPI_Wtime() - start) * 1e6 / n;
        if (took < best) best = took;
    }
    return best;
}

int main(int argc, char **argv) {
    int rank, ranks;
    const char *name = argc > 1 ? argv[1] : "openmpi_shm";
    long largest = argc > 2 ? atol(argv[2]) : 16L * 1048576;
    char text[32];
    float *buffer = (float *)malloc((size_t)largest);
    if (!buffer) return 2;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    for (long i = 0; i < largest / 4; i++) buffer[i] = 0;
    for (long bytes = 4; bytes <= largest; bytes *= bytes == 4 ? 256 : 4) {
        double us = measure(buffer, bytes);
        if (bytes == 65536) continue;
        size_text(bytes, text, sizeof text);
        if (rank == 0) printf("allreduce_%s_%d_%s %.3f\n", name, ranks, text, us);
    }
    MPI_Finalize();
    free(buffer);
    return 0;
}
