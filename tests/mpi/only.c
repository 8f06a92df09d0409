/* What only the MPI backend does: who initialises and ends MPI, thread levels, MPI's own sums,
 * large counts in segments, and errors where the process goes on with MPI. The first argument names
 * a test, and every process of an mpirun runs it; the first failure on any ends the program.
 *
 * Calls of MPI are watched through its profiling interface. */
#include <stdlib.h>

static size_t refused_bytes; /* what malloc and calloc do not give to the backend; 0: all */

static void *scarce_malloc(size_t bytes) {
    return refused_bytes && bytes == refused_bytes ? NULL : malloc(bytes);
}

static void *scarce_calloc(size_t n, size_t bytes) {
    return refused_bytes && n * bytes == refused_bytes ? NULL : calloc(n, bytes);
}

#define TSHARD_IMPLEMENTATION
#define TSHARD_MPI_SEGMENT 64
#define malloc             scarce_malloc
#define calloc             scarce_calloc
#include "../../backends/tshard_mpi.h"
#undef malloc
#undef calloc

#include <math.h>

#include "../support/processes.h"
#include "../support/collectives.h"
#include "../support/logs.h"

/* ------------------------------------------------------------ what MPI is asked */

static int calls_of_allreduce, calls_of_allgather, calls_of_init, calls_of_free, most_bytes;
static int granted = -1; /* the thread level that MPI_Init_thread pretends to give */

static void watch(MPI_Comm comm, const int *counts) {
    int size, sum = 0;
    (void)PMPI_Comm_size(comm, &size);
    for (int r = 0; r < size; r++) sum += counts[r];
    if (sum > most_bytes) most_bytes = sum;
}

int MPI_Iallreduce(const void *send, void *recv, int count, MPI_Datatype type, MPI_Op op,
                   MPI_Comm comm, MPI_Request *request) {
    calls_of_allreduce++;
    return PMPI_Iallreduce(send, recv, count, type, op, comm, request);
}

int MPI_Comm_free(MPI_Comm *comm) {
    calls_of_free++;
    return PMPI_Comm_free(comm);
}

int MPI_Iallgather(const void *send, int count, MPI_Datatype type, void *recv, int recv_count,
                   MPI_Datatype recv_type, MPI_Comm comm, MPI_Request *request) {
    calls_of_allgather++;
    return PMPI_Iallgather(send, count, type, recv, recv_count, recv_type, comm, request);
}

int MPI_Iallgatherv(const void *send, int count, MPI_Datatype type, void *recv, const int counts[],
                    const int places[], MPI_Datatype recv_type, MPI_Comm comm,
                    MPI_Request *request) {
    watch(comm, counts);
    return PMPI_Iallgatherv(send, count, type, recv, counts, places, recv_type, comm, request);
}

int MPI_Ialltoallv(const void *send, const int counts[], const int places[], MPI_Datatype type,
                   void *recv, const int recv_counts[], const int recv_places[],
                   MPI_Datatype recv_type, MPI_Comm comm, MPI_Request *request) {
    watch(comm, counts);
    watch(comm, recv_counts);
    return PMPI_Ialltoallv(send, counts, places, type, recv, recv_counts, recv_places, recv_type,
                           comm, request);
}

int MPI_Ibcast(void *buffer, int count, MPI_Datatype type, int root, MPI_Comm comm,
               MPI_Request *request) {
    if (count > most_bytes) most_bytes = count;
    return PMPI_Ibcast(buffer, count, type, root, comm, request);
}

int MPI_Init_thread(int *argc, char ***argv, int required, int *provided) {
    int result = PMPI_Init_thread(argc, argv, required, provided);
    calls_of_init++;
    if (granted >= 0) *provided = granted;
    return result;
}

int MPI_Abort(MPI_Comm comm, int code) {
    (void)comm, (void)code;
    fprintf(stderr, "MPI_Abort was called\n");
    exit(1);
}

/* --------------------------------------------------------------------- helpers */

#define MUST(condition) must(condition, #condition, __LINE__)

/* A process that exits without MPI_Finalize ends the others. */
static void must(int condition, const char *what, int line) {
    if (condition) return;
    fprintf(stderr, "tests/mpi/only.c:%d: %s\n", line, what);
    exit(1);
}

static int rank_of(MPI_Comm comm) {
    int rank;
    (void)MPI_Comm_rank(comm, &rank);
    return rank;
}

static tsh_comm opened(const void *comm, int native) {
    tsh_error why;
    tsh_mpi_desc desc = {.comm = comm, .native = native, .error = &why};
    tsh_comm out;
    if (tsh_mpi_open(&desc, &out) != TSH_OK) must(0, why.message, __LINE__);
    return out;
}

static void sums_to(tsh_comm *comm, int64_t want) {
    int64_t sum = comm->rank + 1;
    MUST(tsh_allreduce(comm, &sum, 1, TSH_I64, TSH_SUM) == TSH_OK);
    MUST(sum == want);
}

/* ----------------------------------------------------- who begins and ends MPI */

static int ran, returned;

static int ranks_add(tsh_ctx *ctx, void *user) {
    MUST(user == &ran);
    sums_to(tsh_world(ctx), 3);
    MUST(tsh_tp(ctx)->size == 2 && tsh_world(ctx)->ops->caps & TSH_CAP_ORDERED);
    ran++;
    return returned;
}

/* The runner returns 1, and has logged `line` and nothing else. */
static void expect_why(tsh_desc *desc, int (*fn)(tsh_ctx *ctx, void *user), const char *line) {
    log_lines *log = (log_lines *)desc->logger.user;
    log->count = 0;
    MUST(tsh_mpi_run(NULL, NULL, desc, fn, &ran) == 1);
    if (log->count != 1 || strcmp(log->line[0], line) != 0) must(0, log->line[0], __LINE__);
}

/* Two processes: the runner logs why it does not call its function. */
static void reasons(int argc, char **argv) {
    static log_lines log;
    tsh_desc desc = {.logger = {log_keep, &log}};
    char line[200];
    int rank, ended = 0;
    MUST(tsh_mpi_run_built(7003, 4, sizeof desc, NULL, NULL, &desc, ranks_add, &ran) == 1);
    MUST((tsh_mpi_run)(NULL, NULL, NULL, ranks_add, &ran) == 1 && log.count == 1);
    MUST(strstr(log.line[0], "tsh_mpi_run: the program was compiled with tshard.h 7.3") != NULL);
    expect_why(&desc, NULL, "tsh_mpi_run: fn is NULL (TSH_ERR_ARGUMENT)");
    (void)setenv("TSHARD_TIMEOUT", "soon", 1); /* before MPI is there */
    expect_why(&desc, ranks_add,
               "TSHARD_TIMEOUT is \"soon\"; it takes a number of seconds, such as 30 or 0.5, "
               "up to 1000000000 (TSH_ERR_ARGUMENT)");
    MUST(MPI_Init(&argc, &argv) == MPI_SUCCESS);
    rank = rank_of(MPI_COMM_WORLD);
    (void)snprintf(line, sizeof line,
                   "rank %d: TSHARD_TIMEOUT is \"soon\"; it takes a number of seconds, such as "
                   "30 or 0.5, up to 1000000000 (TSH_ERR_ARGUMENT)",
                   rank);
    expect_why(&desc, ranks_add, line);
    (void)setenv("TSHARD_TIMEOUT", "30", 1);
    desc.tp = 3;
    (void)snprintf(line, sizeof line,
                   "rank %d: tsh_open: 2 ranks do not divide into tp 3 times pp 1; tp may be 1 or "
                   "2 (TSH_ERR_ARGUMENT)",
                   rank);
    expect_why(&desc, ranks_add, line);
    MUST(ran == 0);
    desc.tp = 0;
    log.count = 0;
    MUST(tsh_mpi_run(NULL, NULL, &desc, ranks_add, &ran) == 0 && ran == 1 && log.count == 0);
    MUST(MPI_Finalized(&ended) == MPI_SUCCESS && !ended && MPI_Finalize() == MPI_SUCCESS);
    expect_why(&desc, ranks_add, "MPI has been finalised (TSH_ERR_STATE)");
}

/* Two processes: the runner initialises MPI, and ends it. */
static void runner(int argc, char **argv) {
    int ended = 0;
    tsh_comm comm;
    returned = 7;
    MUST(tsh_mpi_run(&argc, &argv, NULL, ranks_add, &ran) == 7);
    MUST(ran == 1 && calls_of_init == 1);
    MUST(MPI_Finalized(&ended) == MPI_SUCCESS && ended);
    MUST(tsh_mpi_open(NULL, &comm) == TSH_ERR_STATE); /* it cannot be had again */
    MUST(tsh_mpi_run(NULL, NULL, NULL, ranks_add, &ran) == 1);
}

/* Four processes of a program that uses MPI: worlds of its communicators beside its own traffic. */
static void host(int argc, char **argv) {
    MPI_Comm half;
    int ended = 1, sum = 1, all = 0;
    tsh_comm whole, part;
    MUST(MPI_Init(&argc, &argv) == MPI_SUCCESS);
    MUST(MPI_Comm_split(MPI_COMM_WORLD, rank_of(MPI_COMM_WORLD) % 2, 0, &half) == MPI_SUCCESS);
    for (int i = 0; i < 3; i++) {
        whole = opened(NULL, 0);
        part = opened(&half, 0);
        MUST(whole.size == 4 && part.size == 2 && part.rank == whole.rank / 2);
        sums_to(&whole, 10);
        MUST(MPI_Allreduce(&sum, &all, 1, MPI_INT, MPI_SUM, half) == MPI_SUCCESS && all == 2);
        sums_to(&part, 3);
        tsh_comm_close(&whole);
        sums_to(&part, 3);
        tsh_comm_close(&part);
    }
    MUST(calls_of_init == 0);
    MUST(MPI_Finalized(&ended) == MPI_SUCCESS && !ended);
    MUST(MPI_Allreduce(&sum, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD) == MPI_SUCCESS && all == 4);
    MUST(MPI_Comm_free(&half) == MPI_SUCCESS && MPI_Finalize() == MPI_SUCCESS);
}

/* -------------------------------------------------------------- thread levels */

static void *open_elsewhere(void *why) {
    tsh_mpi_desc desc = {.error = (tsh_error *)why};
    tsh_comm comm;
    (void)tsh_mpi_open(&desc, &comm);
    return NULL;
}

/* One process: an MPI that may only be called from the thread that initialised it. */
static void threads(int argc, char **argv) {
    tsh_error why;
    tsh_mpi_desc desc = {.thread_level = MPI_THREAD_MULTIPLE, .error = &why};
    tsh_comm comm;
    pthread_t other;
    int level;
    MUST(MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &level) == MPI_SUCCESS);
    MUST(MPI_Query_thread(&level) == MPI_SUCCESS);
    if (level == MPI_THREAD_FUNNELED) {
        MUST(pthread_create(&other, NULL, open_elsewhere, &why) == 0);
        MUST(pthread_join(other, NULL) == 0);
        MUST(why.code == TSH_ERR_UNSUPPORTED && strstr(why.message, "MPI_THREAD_SERIALIZED"));
        MUST(tsh_mpi_open(&desc, &comm) == TSH_ERR_UNSUPPORTED);
        MUST(strcmp(why.message, "MPI gives MPI_THREAD_FUNNELED where MPI_THREAD_MULTIPLE is asked "
                                 "for") == 0);
    }
    desc.thread_level = level;
    MUST(tsh_mpi_open(&desc, &comm) == TSH_OK && comm.size == 1);
    sums_to(&comm, 1);
    tsh_comm_close(&comm);
    MUST(MPI_Finalize() == MPI_SUCCESS);
}

/* One process: MPI gives less than is asked for when the library initialises it. */
static void refused(int argc, char **argv) {
    tsh_error why;
    tsh_mpi_desc desc = {.error = &why};
    tsh_comm comm;
    int ended = 0;
    (void)argc, (void)argv;
    granted = MPI_THREAD_SINGLE;
    MUST(tsh_mpi_open(&desc, &comm) == TSH_ERR_UNSUPPORTED);
    MUST(strcmp(why.message,
                "MPI gives MPI_THREAD_SINGLE where MPI_THREAD_FUNNELED is asked for") == 0);
    MUST(MPI_Finalized(&ended) == MPI_SUCCESS && ended);
}

/* ------------------------------------------------------------ sums and segments */

static void grid(tsh_comm *comm, world *w, int64_t count) {
    job j;
    grid_case c;
    memset(&j, 0, sizeof j);
    memset(&c, 0, sizeof c);
    j.comm = *comm;
    j.rank = comm->rank;
    j.ranks = comm->size;
    j.of = w;
    c.count = count;
    for (int dtype = TSH_F32; dtype <= TSH_I64; dtype++) {
        c.dtype = (tsh_dtype)dtype;
        grid_one(&j, c);
    }
    must(!j.failure[0], j.failure, __LINE__);
    *comm = j.comm;
}

/* Segments of 64 bytes: MPI never sees more, and the bits are the documented ones. */
static void segments(int argc, char **argv) {
    static const int64_t counts[] = {7, 100, 333};
    world w;
    tsh_comm comm;
    int before;
    memset(&w, 0, sizeof w);
    w.desc.way = WORLD_MPI;
    MUST(MPI_Init(&argc, &argv) == MPI_SUCCESS);
    comm = opened(NULL, 0);
    for (int i = 0; i < 3; i++) grid(&comm, &w, counts[i]);
    MUST(most_bytes == 64);
    /* a small one is one of MPI's */
    before = calls_of_allgather;
    most_bytes = 0;
    for (int i = 0; i < 10; i++) sums_to(&comm, (int64_t)comm.size * (comm.size + 1) / 2);
    MUST(calls_of_allgather == before + 10 && most_bytes == 0);
    tsh_comm_close(&comm);
    MUST(MPI_Finalize() == MPI_SUCCESS);
}

/* Sums of 100 elements, left to MPI: only rank 0 says so. */
static void native(int argc, char **argv) {
    float x[100], y[100], hole = (float)NAN;
    tsh_comm comm;
    int before;
    MUST(MPI_Init(&argc, &argv) == MPI_SUCCESS);
    if (rank_of(MPI_COMM_WORLD) == 0) (void)setenv("TSHARD_MPI_NATIVE", "1", 1);
    comm = opened(NULL, 0);
    MUST((comm.ops->caps & TSH_CAP_ORDERED) == 0);
    before = calls_of_allreduce;
    for (int op = TSH_SUM; op <= TSH_AVG; op++) {
        float ranks = (float)comm.size, want = ranks * (ranks + 1) / 2;
        for (int i = 0; i < 100; i++) x[i] = y[i] = (float)(comm.rank + 1);
        y[7] = comm.rank == 1 ? hole : y[7];
        MUST(tsh_allreduce(&comm, x, 100, TSH_F32, (tsh_redop)op) == TSH_OK);
        MUST(tsh_allreduce(&comm, y, 100, TSH_F32, (tsh_redop)op) == TSH_OK);
        if (op == TSH_PROD) want = comm.size == 2 ? 2.0f : comm.size == 3 ? 6.0f : 24.0f;
        if (op == TSH_MIN) want = 1;
        if (op == TSH_MAX) want = ranks;
        if (op == TSH_AVG) want /= ranks;
        for (int i = 0; i < 100; i++) MUST(x[i] == want && (i == 7 || y[i] == want));
        MUST(isnan(y[7]));
    }
    MUST(calls_of_allreduce > before + 6); /* of three ops, in segments */
    tsh_comm_close(&comm);
    (void)setenv("TSHARD_MPI_NATIVE", "1", 1);
    comm = opened(NULL, -1);
    before = calls_of_allreduce;
    MUST(comm.ops->caps & TSH_CAP_ORDERED);
    for (int i = 0; i < 100; i++) x[i] = 1;
    MUST(tsh_allreduce(&comm, x, 100, TSH_F32, TSH_SUM) == TSH_OK && x[99] == (float)comm.size);
    MUST(calls_of_allreduce == before);
    tsh_comm_close(&comm);
    MUST(MPI_Finalize() == MPI_SUCCESS);
}

/* ---------------------------------------------------------------------- errors */

static int one_fails(tsh_ctx *ctx, void *user) {
    tsh_tensor *x = tsh_ones(ctx, tsh_shape2(2, 5)), *w = tsh_ones(ctx, tsh_shape2(3, 8));
    int bad = tsh_world(ctx)->rank == 1;
    const tsh_error *error;
    (void)user;
    if (bad) (void)tsh_linear(x, w, NULL);
    for (int i = 0; i < 1000 && tsh_ok(ctx); i++) (void)tsh_full_tensor(tsh_sum(x, TSH_ALL, 0));
    while (tsh_ok(ctx) && tsh_barrier(tsh_world(ctx)) == TSH_OK) sleep_ms(1);
    error = tsh_last_error(ctx);
    MUST(!tsh_ok(ctx) && error->code == TSH_ERR_SHAPE && error->rank == 1);
    MUST(strstr(error->message, "tsh_linear") != NULL);
    MUST(bad || strncmp(error->message, "rank 1: ", 8) == 0);
    return 5;
}

/* A rank's error reaches the others; all of them end MPI, in time. */
static void fails(int argc, char **argv) {
    double begin = now_ms();
    int ended = 0;
    MUST(tsh_mpi_run(&argc, &argv, NULL, one_fails, NULL) == 5);
    MUST(MPI_Finalized(&ended) == MPI_SUCCESS && ended);
    MUST(now_ms() - begin < 20e3);
}

/* Rank 0, which judges, computes: the others believe rank 1 after half a second, and rank 0 does
 * when it looks. */
static void busy(int argc, char **argv) {
    tsh_comm comm;
    tsh_error error;
    double begin;
    MUST(MPI_Init(&argc, &argv) == MPI_SUCCESS);
    comm = opened(NULL, 0);
    begin = now_ms();
    if (comm.rank == 0) sleep_ms(2500);
    if (comm.rank == 1) tsh_comm_abort(&comm, TSH_ERR_IO, "the disk is full");
    MUST(tsh_barrier(&comm) == TSH_ERR_IO);
    MUST(comm.rank == 0 || now_ms() - begin < 2000);
    MUST(tsh_comm_error(&comm, &error) == TSH_ERR_IO && error.rank == 1);
    MUST(strcmp(error.message, "the disk is full") == 0);
    tsh_comm_close(&comm);
    comm = opened(NULL, 0); /* MPI goes on */
    sums_to(&comm, (int64_t)comm.size * (comm.size + 1) / 2);
    tsh_comm_close(&comm);
    MUST(MPI_Finalize() == MPI_SUCCESS);
}

/* TSHARD_TIMEOUT; a barrier that rank 1 is late for. */
static void limit(int argc, char **argv) {
    tsh_comm comm;
    tsh_error error;
    double begin;
    MUST(MPI_Init(&argc, &argv) == MPI_SUCCESS);
    (void)setenv("TSHARD_TIMEOUT", "0.5", 1);
    comm = opened(NULL, 0);
    sums_to(&comm, 3);
    begin = now_ms();
    if (comm.rank == 1) sleep_ms(2000);
    MUST(tsh_barrier(&comm) == TSH_ERR_TIMEOUT);
    MUST(comm.rank == 1 || (now_ms() - begin > 499 && now_ms() - begin < 1500));
    MUST(tsh_comm_error(&comm, &error) == TSH_ERR_TIMEOUT && error.rank == 1);
    MUST(strcmp(error.message, "rank 0 ran out of time in barrier, collective 1 of world; absent "
                               "ranks: 1") == 0);
    tsh_comm_close(&comm);
    MUST(MPI_Finalize() == MPI_SUCCESS);
}

/* A rank that waits for a message from one that has closed its comm is told, long before its time
 * is up. */
static void deserted(int argc, char **argv) {
    tsh_comm comm;
    float x = 0;
    MUST(MPI_Init(&argc, &argv) == MPI_SUCCESS);
    comm = opened(NULL, 0);
    if (comm.rank == 1) {
        double begin = now_ms();
        MUST(tsh_recv(&comm, &x, 1, TSH_F32, 0) == TSH_ERR_MISMATCH);
        MUST(now_ms() - begin < 5000);
    }
    tsh_comm_close(&comm);
    MUST(MPI_Finalize() == MPI_SUCCESS);
}

/* Starts again after an error that all ranks must have learnt: no memory on rank 1. */
static void open_again(tsh_comm *comm, tsh_result found) {
    tsh_error error;
    MUST(comm->rank == 0 || found == TSH_ERR_MEMORY);
    while (tsh_barrier(comm) == TSH_OK) sleep_ms(1);
    MUST(tsh_comm_error(comm, &error) == TSH_ERR_MEMORY && error.rank == 1);
    refused_bytes = 0;
    tsh_comm_close(comm);
    *comm = opened(NULL, 0);
}

/* Two processes, of which one has no memory for a part of a message, of a sum, for a new group. */
static void scarce(int argc, char **argv) {
    float x[100] = {0};
    tsh_comm comm, part;
    tsh_result found;
    double begin = now_ms();
    MUST(MPI_Init(&argc, &argv) == MPI_SUCCESS);
    comm = opened(NULL, 0);
    refused_bytes = comm.rank == 1 ? sizeof(tshi_mpi_stage) + TSHARD_MPI_SEGMENT : 0;
    open_again(&comm, comm.rank == 1 ? tsh_recv(&comm, x, 100, TSH_F32, 0)
                                     : tsh_send(&comm, x, 100, TSH_F32, 1));
    refused_bytes = comm.rank == 1 ? sizeof(tshi_mpi_stage) + TSHARD_MPI_SEGMENT : 0;
    open_again(&comm, tsh_allreduce(&comm, x, 100, TSH_F32, TSH_SUM));
    refused_bytes = comm.rank == 1
                        ? sizeof(tshi_mpi_group) + 2 * (2 * sizeof(uint64_t) + sizeof(int))
                        : 0;
    found = tsh_comm_split(&comm, 0, 0, &part);
    open_again(&comm, found);
    sums_to(&comm, 3);
    tsh_comm_close(&comm);
    MUST(now_ms() - begin < 20e3);
    MUST(MPI_Finalize() == MPI_SUCCESS);
}

/* What tsh_mpi_open refuses. */
static void arguments(int argc, char **argv) {
    MPI_Comm none = MPI_COMM_NULL;
    tsh_error why;
    tsh_mpi_desc desc = {.comm = &none, .error = &why};
    static const char *const bad[] = {"x",   "1x",  " 1",    "-1",  "yes",
                                      "nan", "inf", "1e400", "1e3", "1000000001"};
    tsh_comm comm;
    MUST(MPI_Init(&argc, &argv) == MPI_SUCCESS);
    MUST(tsh_mpi_open(&desc, NULL) == TSH_ERR_ARGUMENT && strstr(why.message, "out is NULL"));
    MUST(tsh_mpi_open(&desc, &comm) == TSH_ERR_ARGUMENT && strstr(why.message, "MPI_COMM_NULL"));
    desc.comm = NULL;
    for (int i = 0; i < (int)(sizeof bad / sizeof *bad); i++) {
        char part[64];
        (void)setenv("TSHARD_TIMEOUT", bad[i], 1);
        (void)snprintf(part, sizeof part, "TSHARD_TIMEOUT is \"%s\"; it takes a number of", bad[i]);
        MUST(tsh_mpi_open(&desc, &comm) == TSH_ERR_ARGUMENT && strstr(why.message, part));
        (void)setenv("TSHARD_TIMEOUT", "30", 1);
        (void)setenv("TSHARD_MPI_NATIVE", bad[i], 1);
        (void)snprintf(part, sizeof part, "TSHARD_MPI_NATIVE is \"%s\"; it takes 0 or 1", bad[i]);
        MUST(tsh_mpi_open(&desc, &comm) == TSH_ERR_ARGUMENT && strstr(why.message, part));
        (void)unsetenv("TSHARD_MPI_NATIVE");
    }
    desc.timeout = (double)NAN;
    MUST(tsh_mpi_open(&desc, &comm) == TSH_ERR_ARGUMENT);
    MUST(strcmp(why.message, "tsh_mpi_desc.timeout is not a number (NaN)") == 0);
    desc.timeout = 0;
    (void)setenv("TSHARD_TIMEOUT", "0", 1); /* never */
    MUST(tsh_mpi_open(&desc, &comm) == TSH_OK);
    sums_to(&comm, 1);
    tsh_comm_close(&comm);
    MUST(MPI_Finalize() == MPI_SUCCESS);
}

/* Two processes, one of which opens its world too late. MPI goes on. */
static void late(int argc, char **argv) {
    tsh_error why;
    tsh_mpi_desc desc = {.timeout = 0.5, .error = &why};
    tsh_comm comm;
    MPI_Comm self;
    MUST(MPI_Init(&argc, &argv) == MPI_SUCCESS);
    if (rank_of(MPI_COMM_WORLD) == 1) sleep_ms(1500);
    MUST(tsh_mpi_open(&desc, &comm) == TSH_ERR_TIMEOUT);
    MUST(strcmp(why.message, "tsh_mpi_open: not all ranks came within 0.5 s") == 0);
    MUST(MPI_Comm_dup(MPI_COMM_SELF, &self) == MPI_SUCCESS);
    comm = opened(&self, 0);
    sums_to(&comm, 1);
    tsh_comm_close(&comm);
    MUST(MPI_Finalize() == MPI_SUCCESS);
}

/* Rank 0 gives up a split. Rank 1, which comes later, learns it, and does not go alone into
 * MPI_Comm_split, which would not return. */
static void given_up(int argc, char **argv) {
    tsh_mpi_desc desc = {.timeout = 0.5};
    tsh_comm comm, part;
    double begin;
    MUST(MPI_Init(&argc, &argv) == MPI_SUCCESS);
    MUST(tsh_mpi_open(&desc, &comm) == TSH_OK && tsh_barrier(&comm) == TSH_OK);
    if (comm.rank == 1) sleep_ms(1500);
    begin = now_ms();
    MUST(tsh_comm_split(&comm, 0, 0, &part) == TSH_ERR_TIMEOUT);
    MUST(now_ms() - begin < 5000);
    tsh_comm_close(&comm);
    MUST(MPI_Finalize() == MPI_SUCCESS);
}

/* After an error a group is closed whose first sum is done and whose second one MPI still has. */
static void unfinished(int argc, char **argv) {
    static float x[100], y[100];
    tsh_comm comm, part;
    tsh_req first, second;
    int done = 0;
    MUST(MPI_Init(&argc, &argv) == MPI_SUCCESS);
    comm = opened(NULL, 0);
    MUST(tsh_comm_split(&comm, 0, 0, &part) == TSH_OK);
    MUST(tsh_allreduce_start(&part, x, 100, TSH_F32, TSH_SUM, &first) == TSH_OK);
    if (part.rank == 0)
        MUST(tsh_allreduce_start(&part, y, 100, TSH_F32, TSH_SUM, &second) == TSH_OK);
    while (!done) MUST(tsh_test(&part, first, &done) == TSH_OK);
    if (part.rank == 1) {
        sleep_ms(300);
        tsh_comm_abort(&comm, TSH_ERR_ABORTED, "enough");
    }
    while (tsh_comm_error(&comm, NULL) == TSH_OK) sleep_ms(1);
    calls_of_free = 0;
    tsh_comm_close(&part);
    tsh_comm_close(&comm);
    MUST(calls_of_free == 0);
    MUST(MPI_Finalize() == MPI_SUCCESS);
}

/* Rank 0's last close waits for a group that it is not in, and judges: the two ranks of that group
 * disagree, and learn it at once. */
static void last(int argc, char **argv) {
    tsh_comm comm, part;
    double begin;
    int rank;
    MUST(MPI_Init(&argc, &argv) == MPI_SUCCESS);
    comm = opened(NULL, 0);
    rank = comm.rank;
    MUST(tsh_comm_split(&comm, rank == 0 ? -1 : 0, 0, &part) == TSH_OK);
    begin = now_ms();
    tsh_comm_close(&comm);
    if (rank > 0) {
        float x = 0;
        sleep_ms(1000);
        begin = now_ms();
        MUST((rank == 1 ? tsh_barrier(&part) : tsh_allreduce(&part, &x, 1, TSH_F32, TSH_SUM)) ==
             TSH_ERR_MISMATCH);
        MUST(now_ms() - begin < 400);
        tsh_comm_close(&part);
    }
    MUST(rank > 0 || now_ms() - begin > 900);
    MUST(now_ms() - begin < 5000);
    MUST(MPI_Finalize() == MPI_SUCCESS);
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*run)(int argc, char **argv);
    } tests[] = {{"runner", runner},     {"host", host},
                 {"reasons", reasons},
                 {"threads", threads},   {"refused", refused},
                 {"native", native},     {"segments", segments},
                 {"fails", fails},       {"busy", busy},
                 {"limit", limit},       {"deserted", deserted},
                 {"scarce", scarce},     {"arguments", arguments},
                 {"late", late},         {"last", last},
                 {"given_up", given_up}, {"unfinished", unfinished}};
    (void)setenv("TSHARD_TIMEOUT", "30", 1);
    for (size_t i = 0; argc > 1 && i < sizeof tests / sizeof *tests; i++) {
        if (strcmp(argv[1], tests[i].name) != 0) continue;
        tests[i].run(argc, argv);
        return 0;
    }
    return 2;
}
