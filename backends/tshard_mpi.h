/* tshard_mpi.h - one process per rank, on any MPI-3 */
/*
 * DO THIS
 *
 *     #define TSHARD_IMPLEMENTATION           // in exactly one source file
 *     #include "tshard.h"
 *     #include "backends/tshard_mpi.h"
 *
 *     static int rank_main(tsh_ctx *ctx, void *user) { ...; return 0; }
 *     int main(int argc, char **argv) {
 *         tsh_desc desc = {.logger.log = tsh_log_stderr};      // prints errors
 *         return tsh_mpi_run(&argc, &argv, &desc, rank_main, NULL);
 *     }
 *
 * compile with mpicc -D_POSIX_C_SOURCE=200809L (or -std=gnu99), and start it:
 *
 *     mpirun -n 4 ./prog                      or srun -n 4 ./prog
 *
 * In a program that uses MPI itself, open a comm beside its own:
 *
 *     tsh_comm comm;
 *     tsh_mpi_desc mpi = {0};
 *     mpi.comm = &my_mpi_comm;                // NULL: MPI_COMM_WORLD
 *     if (tsh_mpi_open(&mpi, &comm) == TSH_OK) { ...; tsh_comm_close(&comm); }
 *
 * DOES
 *
 * - every collective of tshard.h in its documented order of sums: MPI_Ialltoallv, a sum of one's
 *   own chunk, MPI_Iallgatherv; where all messages together have at most 32 KiB, MPI_Iallgather and
 *   a sum of all. The bits are those of the threads and the TCP backend, and do not depend on the
 *   MPI library, its version or its algorithms;
 * - compare what all ranks called before any data moves: an MPI_Iallgather of 200 bytes per rank,
 *   the heads, comes first. Messages of up to 80 bytes are sent in the heads (never those of a
 *   reduce-scatter), so that a small collective is a single call of MPI. In an all-to-all, every
 *   rank also sends its counts, 16 P bytes, to all P ranks;
 * - move long messages in segments of TSHARD_MPI_SEGMENT bytes, through buffers of its own. MPI
 *   never gets a larger count, and never a buffer of the caller's: when a call returns, also with
 *   an error, nothing touches the caller's memory any more;
 * - report one error, the same on every rank, if ranks call different collectives, a rank closes
 *   its comm early, ranks wait for each other in a cycle (searched for after 20 ms), a collective
 *   exceeds its time limit or a rank aborts. Ranks report errors to rank 0 over a communicator of
 *   their own, and rank 0 sends the first one to all. If rank 0 makes no calls, a rank takes the
 *   error that it has seen itself after 0.5 s;
 * - leave MPI to its owner: a program that has called MPI_Init also calls MPI_Finalize.
 *
 * DOES NOT
 *
 * - notice that a rank has died: mpirun and srun end the whole job then;
 * - call MPI_Abort. After an error, buffers that MPI still uses stay allocated until the process
 *   ends, and communicators are not freed. MPI stays usable, and another world can be opened, but
 *   MPI_Finalize then finds communication that never completes: Open MPI and MPICH accept this, the
 *   standard does not promise it. tsh_mpi_run calls MPI_Finalize after an error only if all ranks
 *   have closed their comms within a second;
 * - move data in the background: MPI is called in start, test, wait and progress;
 * - know which ranks are late: a timeout names all ranks that do not wait in the collective as
 *   absent, also one that has started it and computes meanwhile;
 * - use a rank's comms from several threads; only tsh_comm_abort may come from any thread. The
 *   other ranks learn of it at the next call of the rank's own thread;
 * - keep a time limit in what MPI-3 has only in a blocking form: MPI_Init_thread, MPI_Comm_split
 *   (in tsh_comm_split, once all ranks have started theirs), MPI_Comm_free and MPI_Finalize. They
 *   return when all ranks have called them: if a rank is stopped before or in such a call, the
 *   others wait until the job is ended. So nothing says which ranks MPI_Init waits for: look at
 *   what the launcher says of them.
 *
 * The last tsh_comm_close of a world waits until all ranks have closed theirs, or times out.
 *
 * COSTS, per rank, from libc's malloc: for each collective in flight, about 230 bytes per member of
 * its group (an all-to-all: and 16 P per member); while its data moves, up to two segments.
 *
 * THREADS. If MPI is not initialised, this backend initialises it with desc.thread_level (0:
 * MPI_THREAD_FUNNELED); otherwise MPI must have that level at least. Below
 * MPI_THREAD_SERIALIZED, only the thread that initialised MPI may use the backend.
 *
 * ENVIRONMENT
 *
 *     TSHARD_TIMEOUT             after how many seconds opening, or a collective without
 *                                timeout_ns, fails; 0: never; default 300
 *     TSHARD_MPI_NATIVE          1 (on rank 0): all-reduces of over 80 bytes by MPI_Iallreduce
 *                                (SUM, PROD, AVG). MPI chooses the order of sums, so the bits
 *                                differ; it may be faster. MIN and MAX are not affected, since
 *                                MPI does not define them for NaN. 0: no (default)
 *
 * Any other value of a variable is an error; an empty one counts as unset.
 */
#include "tshard_backend.h"

#ifndef TSHARD_MPI_H
#define TSHARD_MPI_H
/* ========================================================================== */
/* >>mpi-api                                                 MARK: - mpi-api */
/* A runner for whole programs; or a comm in a program that uses MPI itself.   */
/* Needs: the public part of tshard.h.                                         */
/* ========================================================================== */

#ifdef __cplusplus
extern "C" {
#endif

/* How a world is opened. All zero: the world of MPI_COMM_WORLD. */
typedef struct tsh_mpi_desc {
    const void *comm; /* points to the MPI_Comm whose ranks form the world; it is duplicated. NULL:
                         MPI_COMM_WORLD */
    int thread_level; /* the lowest level MPI may have, MPI_THREAD_FUNNELED ...; 0: FUNNELED, or if
                         MPI is initialised, any that allows calls from this thread */
    double timeout;   /* after how many seconds opening, or a collective without timeout_ns, fails;
                         negative: never; 0: as the variable TSHARD_TIMEOUT says, else 300 */
    int native;       /* 1: sums by MPI_Iallreduce; negative: in the documented order; 0: as the
                         variable TSHARD_MPI_NATIVE says. Rank 0's value counts */
    tsh_error *error; /* output: why tsh_mpi_open failed; NULL: not wanted */
} tsh_mpi_desc;

/* Opens a world; collective over desc->comm (desc NULL: all zero). If MPI is not initialised, does
 * so, and finalises it when the world's last comm is closed; MPI cannot be initialised again after
 * that. Errors: TSH_ERR_ARGUMENT (out is NULL; desc->comm is MPI_COMM_NULL or an intercommunicator;
 * a variable or timeout is not valid), TSH_ERR_STATE (MPI has been finalised), TSH_ERR_UNSUPPORTED
 * (the thread level), TSH_ERR_MEMORY (if a rank has none, all ranks fail, unless it cannot even
 * tell them), TSH_ERR_TIMEOUT (some rank has not called it), TSH_ERR_IO (a call of MPI failed).
 * After the last two, MPI is not finalised and may still use desc->comm: open no other world of
 * it. */
TSH_API tsh_result tsh_mpi_open(const tsh_mpi_desc *desc, tsh_comm *out);
/* Initialises MPI with argc and argv (both may be NULL) unless that was done, opens the world and a
 * ctx by desc (NULL: all defaults; its comm is ignored), runs fn, closes both, and finalises MPI if
 * it has initialised it. Returns fn's result; 1, and reports why to desc->logger, if fn is NULL or
 * the world or the ctx could not be opened. */
TSH_API int tsh_mpi_run(int *argc, char ***argv, const tsh_desc *desc,
                        int (*fn)(tsh_ctx *ctx, void *user), void *user);
TSH_API int tsh_mpi_run_built(int version, size_t real, size_t size, int *argc, char ***argv,
                              const tsh_desc *desc, int (*fn)(tsh_ctx *ctx, void *user),
                              void *user);
#define tsh_mpi_run(...) tsh_mpi_run_built(TSH_BUILT, __VA_ARGS__)

#ifdef __cplusplus
}
#endif
/* ========================================================================== */
/* end of header: stop here if you only want the API                           */
/* ========================================================================== */
#endif

#if defined(TSHARD_IMPLEMENTATION) && !defined(TSHARD_MPI_IMPLEMENTED)
#define TSHARD_MPI_IMPLEMENTED
/* ========================================================================== */
/* >>mpi-types                                     MARK: - mpi-types (private) */
/* A world of groups, each with an MPI communicator and a list of operations.  */
/* An operation is a state machine: in each state it waits for one nonblocking */
/* call of MPI (tshi_mpi_follow says what comes next). A collective first      */
/* exchanges heads, a message envelopes: blocks that say what was called.      */
/* Needs: >>mpi-api.                                                            */
/* ========================================================================== */

#if !defined(__GNUC__)
#error "tshard_mpi.h needs the __atomic builtins of gcc or clang"
#endif
#if defined(__has_include)
#if !__has_include(<mpi.h>)
#error "tshard_mpi.h needs an MPI: install libopenmpi-dev or libmpich-dev, compile with mpicc"
#endif
#endif

#include <pthread.h> /* pthread_self */
#include <sched.h>   /* sched_yield */
#include <stdio.h>   /* snprintf */
#include <stdlib.h>  /* calloc */
#include <string.h>
#include <time.h>   /* clock_gettime, nanosleep */
#include <unistd.h> /* sysconf */

#ifndef CLOCK_MONOTONIC
#error "tshard_mpi.h needs POSIX: compile with -D_POSIX_C_SOURCE=200809L (or -std=gnu99)"
#endif

#ifndef OMPI_SKIP_MPICXX
#define OMPI_SKIP_MPICXX 1 /* leaves out the C++ bindings, which MPI-3 has removed */
#endif
#ifndef MPICH_SKIP_MPICXX
#define MPICH_SKIP_MPICXX 1 /* the same in MPICH */
#endif
#include <mpi.h>
#undef OMPI_SKIP_MPICXX
#undef MPICH_SKIP_MPICXX

#if MPI_VERSION < 3
#error "tshard_mpi.h needs MPI-3"
#endif

/* Bytes that one call of MPI gets at most. */
#ifndef TSHARD_MPI_SEGMENT
#define TSHARD_MPI_SEGMENT (4 << 20)
#endif
#if TSHARD_MPI_SEGMENT < 1 || TSHARD_MPI_SEGMENT > 1 << 30
#error "TSHARD_MPI_SEGMENT is 1 ... 2^30 bytes: MPI counts in int"
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum { TSHI_MPI_EAGER = 80 };       /* bytes of the longest message that is sent in a head */
enum { TSHI_MPI_STAGES = 4 };       /* buffers that are kept for later collectives */
enum { TSHI_MPI_NEAR = 32 << 10 };  /* bytes of all messages together, if they go to all ranks */
enum { TSHI_MPI_BODIES = 1 << 14 }; /* tags of messages' bodies: more than can be in flight */

/* Tags on a group's communicator: envelopes from a sender, from a receiver; from BODY on, bodies of
 * messages. Then tags on the world's control communicator. */
enum { TSHI_MPI_TAG_SEND, TSHI_MPI_TAG_RECV, TSHI_MPI_TAG_BODY };
enum {
    TSHI_MPI_DECISION, /* from rank 0: the world's error */
    TSHI_MPI_ERROR,    /* to rank 0: an error */
    TSHI_MPI_ABORT,    /* to all ranks: an error */
    TSHI_MPI_LATE,     /* to rank 0: a timeout; rank 0 finds out which ranks are absent */
    TSHI_MPI_REPORT    /* to rank 0: a tshb_wait_report */
};

#define TSHI_MPI_MS INT64_C(1000000) /* a millisecond in ns */

/* The head of a collective, sent to all ranks, or the envelope of a message, sent to its other end.
 * The pointers in call.coll are valid only on the rank that sent the block. */
typedef struct tshi_mpi_block {
    tshb_call call;
    char eager[TSHI_MPI_EAGER]; /* a short message, or a tshi_mpi_ticket */
} tshi_mpi_block;

/* What the call of MPI that an operation waits for does. */
typedef enum tshi_mpi_state {
    TSHI_MPI_QUEUED,  /* no call yet: operations before this one must go on first */
    TSHI_MPI_HEADS,   /* all ranks exchange their heads */
    TSHI_MPI_COUNTS,  /* all ranks exchange counts: of an all-to-all, or to describe a mismatch */
    TSHI_MPI_DIRECT,  /* a small all-reduce: every rank gets every message */
    TSHI_MPI_SCATTER, /* every rank gets a segment of its own piece from all ranks */
    TSHI_MPI_GATHER,  /* every rank gets a segment of every piece from the piece's owner */
    TSHI_MPI_WHOLE,   /* a segment of a broadcast, of a message, or of MPI's own all-reduce */
    TSHI_MPI_ENVELOPE,   /* the two ends of a message exchange envelopes */
    TSHI_MPI_DONE     /* no call is left */
} tshi_mpi_state;

/* A stage: a buffer that MPI sends from or receives to. The world has a list of free ones. */
typedef struct tshi_mpi_stage {
    struct tshi_mpi_stage *next;
    size_t size; /* capacity in bytes */
    char *bytes; /* they follow the struct in memory */
} tshi_mpi_stage;

/* An operation: a collective, or the sending or receiving half of a message, from its start to its
 * wait. A piece is the part of a message that one rank owns: its chunk, or its count. */
typedef struct tshi_mpi_op {
    struct tshi_mpi_op *next;  /* the operation that was started next in this group */
    struct tshi_mpi_op *other; /* of a SENDRECV's sending half: the receiving half; else NULL */
    const struct tshi_mpi_group *group;
    tsh_coll coll; /* a copy of the caller's */
    uint64_t id;   /* the request: how many operations of the group were started, this one too */
    uint64_t seq;  /* its number, from 0: of collectives, or of messages from sender to receiver */
    int message, peer; /* 1: a send or a receive; peer: rank of its other end in the group */
    int sends;         /* 1: this rank sends: a message, or as the root of a broadcast */
    int64_t deadline;  /* the time (tsh_now) at which it times out */
    tshi_mpi_state state;
    int last;              /* 1: its last collective call of MPI was made: the next op may begin */
    MPI_Request req[2];    /* the calls it waits for; [1]: only to receive a envelope */
    int64_t at, step;      /* at: how many elements of each piece are done; step: of a segment */
    int64_t longest;       /* elements of the longest piece */
    tshi_mpi_block *block; /* [0]: this rank's; [1 + r]: rank r's, or [1]: the other end's */
    int64_t *counts;       /* send and recv counts: 2 P of this rank, then of all; NULL: none */
    int64_t *from, *into;  /* P + 1 offsets: where each piece starts in a row of send, of recv */
    int *lengths;          /* 2 P lengths and offsets to send, then 2 P to receive, for MPI */
    tshi_mpi_stage *out, *in; /* what MPI sends from and receives to; NULL: none */
    char *part;               /* this rank's segment for GATHER */
} tshi_mpi_op;

typedef struct tshi_mpi_world tshi_mpi_world;

typedef struct tshi_mpi_group {
    struct tshi_mpi_group *next; /* in the world's list */
    tshi_mpi_world *world;
    MPI_Comm comm; /* carries the group's collectives and messages */
    uint64_t id;   /* the same on all its ranks; 1: the whole world */
    int rank, size;
    int closing, broken;     /* 1: this rank has closed its comm; 1: calls did not fit */
    int *ranks;              /* the world rank of each rank of the group */
    uint64_t started, ids;   /* how many collectives, and operations of any kind, were started */
    uint64_t *sends, *recvs; /* how many messages to, and from, each peer were started */
    tshi_mpi_op *first;      /* operations, in the order in which they were started */
} tshi_mpi_group;

/* A control message that is being sent; its bytes follow the struct in memory. */
typedef struct tshi_mpi_post {
    struct tshi_mpi_post *next;
    MPI_Request req;
} tshi_mpi_post;

struct tshi_mpi_world {
    tsh_comm_ops ops; /* the table that this world's comms point to */
    MPI_Comm control; /* carries control messages, about errors and waits */
    int rank, size;
    int native, ours;   /* 1: sums by MPI_Iallreduce; 1: this world has initialised MPI */
    int crowded, open;  /* 1: more ranks than cores on this host; how many comms are open */
    int64_t timeout;    /* of opening and of collectives without timeout_ns, in ns */
    uint64_t moves;     /* how many calls of MPI have completed: a wait in vain sees no change */
    uint64_t splits;    /* how many splits this rank has taken part in */
    pthread_t owner;    /* the thread that opened the world and makes all calls of MPI */
    tsh_error error;    /* the world's error; code TSH_OK: none */
    tsh_error suspect;  /* an error that rank 0 has not decided on yet; code TSH_OK: none */
    int64_t suspect_at; /* the time (tsh_now) at which this rank learnt of it */
    int asked;          /* atomic: an abort from another thread, which 1: writes, 2: has written
                           `wish`; 3: the owner has reported it; 0: none */
    tsh_error wish;
    /* Used in opening only, but MPI may write here even after opening has failed: */
    int mine[2], least[2]; /* [0]: has memory, [1]: rank 0's `native`; least: the min over ranks */
    char *hosts;           /* the host name of this rank, then of all ranks, of equal lengths */
    tshi_mpi_group *groups;
    tshi_mpi_post *posts;   /* control messages that are being sent */
    tshi_mpi_stage *stages; /* free buffers, the one used last first */
    /* Used by rank 0 only: */
    tshb_wait_report **report; /* the last one of each rank; NULL: none */
    tshb_coll_search *search;  /* one for each rank: the search for a cycle of waits */
    tsh_error late;           /* a timeout; code TSH_OK: none */
    int64_t late_at; /* when `late` becomes the world's error: 50 ms later, as reports may come */
    int late_from;   /* the rank that timed out */
};

static int64_t tshi_mpi_min(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* 1 if the world has failed, or an error waits for rank 0's decision: collectives stand still. */
static int tshi_mpi_over(const tshi_mpi_world *world) {
    return world->error.code != TSH_OK || world->suspect.code != TSH_OK;
}

/* ========================================================================== */
/* >>mpi-post                                       MARK: - mpi-post (private) */
/* Sending control messages to ranks of the world.                             */
/* Needs: >>mpi-types.                                                          */
/* ========================================================================== */

/* Starts to send a copy of bytes to rank `to`. Ignores failures, as every wait has a time limit. */
static void tshi_mpi_send(tshi_mpi_world *world, int to, int tag, const void *bytes, size_t size) {
    tshi_mpi_post *post = (tshi_mpi_post *)malloc(sizeof *post + size);
    if (!post) return;
    memcpy(post + 1, bytes, size);
    if (MPI_Isend(post + 1, (int)size, MPI_BYTE, to, tag, world->control, &post->req)) {
        free(post);
        return;
    }
    post->next = world->posts;
    world->posts = post;
}

static void tshi_mpi_send_all(tshi_mpi_world *world, int tag, const tsh_error *error) {
    for (int r = 0; r < world->size; r++)
        if (r != world->rank) tshi_mpi_send(world, r, tag, error, sizeof *error);
}

/* Frees control messages that have been sent. */
static void tshi_mpi_sent(tshi_mpi_world *world) {
    for (tshi_mpi_post **at = &world->posts; *at;) {
        tshi_mpi_post *post = *at;
        int done = 0;
        (void)MPI_Test(&post->req, &done, MPI_STATUS_IGNORE);
        if (done) {
            *at = post->next;
            free(post);
        } else {
            at = &post->next;
        }
    }
}

/* ========================================================================== */
/* >>mpi-raise                                     MARK: - mpi-raise (private) */
/* Ranks report errors to rank 0, which sends the first one to all ranks: the  */
/* world's error. If it sends none, a rank's own report is its error in 0.5 s. */
/* Needs: >>mpi-post.                                                           */
/* ========================================================================== */

/* On rank 0: sets the world's error, unless there is one, and sends it to all ranks. */
static void tshi_mpi_decide(tshi_mpi_world *world, const tsh_error *error) {
    if (world->error.code != TSH_OK) return;
    world->error = *error;
    tshi_mpi_send_all(world, TSHI_MPI_DECISION, error);
}

/* Handles an error that rank `from`, which may be this rank, reports. Rank 0 decides on it at once,
 * or, if it is a timeout (LATE), 50 ms later; other ranks keep the first one in `suspect`. */
static void tshi_mpi_take_error(tshi_mpi_world *world, int from, int tag, const tsh_error *error) {
    if (world->error.code != TSH_OK) return;
    if (world->rank == 0 && tag == TSHI_MPI_LATE && world->late.code == TSH_OK) {
        world->late = *error;
        world->late_from = from;
        world->late_at = tsh_now() + 50 * TSHI_MPI_MS;
    } else if (world->rank == 0 && tag != TSHI_MPI_LATE) {
        tshi_mpi_decide(world, error);
    } else if (world->rank != 0 && world->suspect.code == TSH_OK) {
        world->suspect = *error;
        world->suspect_at = tsh_now();
    }
}

/* Reports an error of this rank to rank 0. error.rank is the rank blamed; of LATE it is -1: rank 0
 * finds out. An ABORT goes to all ranks, since rank 0 may not be in a call. */
static void tshi_mpi_raise(tshi_mpi_world *world, int tag, const tsh_error *error) {
    if (tshi_mpi_over(world)) return;
    if (tag == TSHI_MPI_ABORT && world->rank != 0)
        tshi_mpi_send_all(world, tag, error);
    else if (world->rank != 0)
        tshi_mpi_send(world, 0, tag, error, sizeof *error);
    tshi_mpi_take_error(world, world->rank, tag, error);
}

/* Raises and returns TSH_ERR_MEMORY; `what` follows "rank 1 has no memory to". */
static tsh_result tshi_mpi_no_memory(tshi_mpi_world *world, const char *what) {
    tsh_error error;
    (void)tsh_error_set(&error, TSH_ERR_MEMORY, world->rank, "rank %d has no memory to %s",
                        world->rank, what);
    tshi_mpi_raise(world, TSHI_MPI_ERROR, &error);
    return TSH_ERR_MEMORY;
}

/* If code, which MPI's function `what` has returned, is an error, raises it and returns 1. */
static int tshi_mpi_refused(tshi_mpi_world *world, int code, const char *what) {
    char reason[MPI_MAX_ERROR_STRING + 1];
    tsh_error error;
    int length = 0;
    if (code == MPI_SUCCESS) return 0;
    if (MPI_Error_string(code, reason, &length)) length = 0;
    reason[length] = '\0';
    (void)tsh_error_set(&error, TSH_ERR_IO, world->rank, "rank %d: %s failed: %s", world->rank,
                        what, reason);
    tshi_mpi_raise(world, TSHI_MPI_ERROR, &error);
    return 1;
}

/* Calls a function of MPI. If it fails, raises an error and returns 1. */
#define TSHI_MPI_CALL(world, call, arguments) tshi_mpi_refused(world, call arguments, #call)

/* ========================================================================== */
/* >>mpi-hear                                       MARK: - mpi-hear (private) */
/* Receiving control messages, and deciding on errors.                         */
/* Needs: >>mpi-raise.                                                          */
/* ========================================================================== */

/* On rank 0: replaces rank `from`'s report, and raises an error if the rank waits in a cycle. Takes
 * ownership of report, from malloc. */
static void tshi_mpi_reported(tshi_mpi_world *world, int from, tshb_wait_report *report) {
    tsh_error error;
    free(world->report[from]);
    world->report[from] = report;
    if (tshb_wait_cycle(world->report, world->size, from, world->search, &error))
        tshi_mpi_raise(world, TSHI_MPI_ERROR, &error);
}

/* Receives and handles one control message. 0: none has arrived, or it cannot be received. */
static int tshi_mpi_receive(tshi_mpi_world *world) {
    MPI_Status status;
    int there = 0, size = (int)sizeof(tsh_error); /* there: one has arrived; size: in bytes */
    tsh_error error;
    tshb_wait_report *report = NULL;
    if (MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, world->control, &there, &status) || !there)
        return 0;
    if (status.MPI_TAG == TSHI_MPI_REPORT) {
        (void)MPI_Get_count(&status, MPI_BYTE, &size);
        report = (tshb_wait_report *)malloc((size_t)size);
        if (!report) return 0;
    }
    if (MPI_Recv(report ? (void *)report : &error, size, MPI_BYTE, status.MPI_SOURCE,
                 status.MPI_TAG, world->control, MPI_STATUS_IGNORE)) {
        free(report);
        return 0;
    }
    if (report)
        tshi_mpi_reported(world, status.MPI_SOURCE, report);
    else if (status.MPI_TAG == TSHI_MPI_DECISION && world->error.code == TSH_OK)
        world->error = error;
    else
        tshi_mpi_take_error(world, status.MPI_SOURCE, status.MPI_TAG, &error);
    return 1;
}

/* Does all that can be done now about control messages and errors, without blocking. */
static void tshi_mpi_serve(tshi_mpi_world *world) {
    if (world->posts) tshi_mpi_sent(world);
    if (__atomic_load_n(&world->asked, __ATOMIC_SEQ_CST) == 2) {
        __atomic_store_n(&world->asked, 3, __ATOMIC_SEQ_CST);
        tshi_mpi_raise(world, TSHI_MPI_ABORT, &world->wish);
    }
    while (world->error.code == TSH_OK && tshi_mpi_receive(world)) continue;
    if (world->error.code != TSH_OK) return;
    if (world->late.code != TSH_OK && tsh_now() >= world->late_at) {
        tshb_wait_absent(world->report, world->late_from, &world->late);
        tshi_mpi_decide(world, &world->late);
    }
    if (world->suspect.code != TSH_OK &&
        tsh_now() >= world->suspect_at + 500 * TSHI_MPI_MS) { /* rank 0 makes no calls */
        if (world->suspect.rank < 0)
            tsh_text_add(world->suspect.message, sizeof world->suspect.message,
                         "; rank 0 is in no call, and others may not be");
        world->error = world->suspect;
    }
}

/* ========================================================================== */
/* >>mpi-stage                                     MARK: - mpi-stage (private) */
/* Buffers for MPI; copying between them and the caller's; sums.               */
/* A message has `blocks` rows; elements start[k] ... start[k + 1] - 1 of each */
/* row belong to piece k, which is rank k's. All pieces move at the same time, */
/* `step` elements of each in a round.                                         */
/* Needs: >>mpi-hear.                                                           */
/* ========================================================================== */

/* Returns a buffer of at least `size` bytes, free or new. NULL: no memory, an error is raised. */
static tshi_mpi_stage *tshi_mpi_take(tshi_mpi_world *world, size_t size) {
    tshi_mpi_stage **at = &world->stages, *stage;
    while (*at && (*at)->size < size) at = &(*at)->next;
    stage = *at;
    if (stage) {
        *at = stage->next;
        return stage;
    }
    stage = (tshi_mpi_stage *)malloc(sizeof *stage + size);
    if (stage) {
        stage->size = size;
        stage->bytes = (char *)(stage + 1);
        return stage;
    }
    (void)tshi_mpi_no_memory(world, "hold what MPI works on");
    return NULL;
}

/* Puts a buffer (may be NULL) in the list of free ones, and frees the one that was used longest ago
 * if there are more than TSHI_MPI_STAGES. */
static void tshi_mpi_give(tshi_mpi_world *world, tshi_mpi_stage *stage) {
    tshi_mpi_stage **at = &world->stages;
    if (!stage) return;
    stage->next = world->stages;
    world->stages = stage;
    for (int i = 0; *at && i < TSHI_MPI_STAGES; i++) at = &(*at)->next;
    free(*at);
    *at = NULL;
}

/* Returns how many elements piece k has, in all rows. */
static int64_t tshi_mpi_length(const tshi_mpi_op *op, const int64_t *start, int k) {
    return (start[k + 1] - start[k]) * op->coll.blocks;
}

/* Returns how many elements of piece k move in this round. */
static int64_t tshi_mpi_round(const tshi_mpi_op *op, const int64_t *start, int k) {
    int64_t left = tshi_mpi_length(op, start, k) - op->at;
    return left <= 0 ? 0 : tshi_mpi_min(left, op->step);
}

/* Copies this round's n elements of piece k: from the caller's send to the stage (packs is 1), or
 * from the stage to the caller's recv. */
static void tshi_mpi_copy(const tshi_mpi_op *op, const int64_t *start, int k, int64_t n,
                          char *stage, int packs) {
    size_t width = tsh_dtype_size(op->coll.dtype);
    int64_t row = start[k + 1] - start[k], run; /* run: elements until the end of a row */
    for (int64_t i = op->at, end = i + n; i < end; i += run, stage += (size_t)run * width) {
        size_t place = (size_t)(i / row * start[op->group->size] + start[k] + i % row) * width;
        run = tshi_mpi_min(row - i % row, end - i);
        if (packs)
            memcpy(stage, (const char *)op->coll.send + place, (size_t)run * width);
        else
            memcpy((char *)op->coll.recv + place, stage, (size_t)run * width);
    }
}

/* Copies this round's elements of all pieces: piece k's are places[k] bytes into the stage. */
static void tshi_mpi_copy_all(const tshi_mpi_op *op, const int64_t *start, const int *places,
                              char *stage, int packs) {
    for (int k = 0; k < op->group->size; k++)
        tshi_mpi_copy(op, start, k, tshi_mpi_round(op, start, k), stage + places[k], packs);
}

/* For tshi_mpi_part: what each rank contributes to a sum, `stride` bytes apart in memory. */
typedef struct tshi_mpi_parts {
    char *first;   /* rank 0's */
    size_t stride; /* in bytes */
} tshi_mpi_parts;

static const void *tshi_mpi_part(const void *user, int r) {
    const tshi_mpi_parts *parts = (const tshi_mpi_parts *)user;
    return parts->first + (size_t)r * parts->stride;
}

/* Sums n elements of chunk k in the order of rule 5 of >>comm-api. x: those of rank 0; the others'
 * follow, `stride` bytes apart. */
static void tshi_mpi_sum(const tshi_mpi_op *op, char *x, size_t stride, int k, int64_t n,
                         char *sum) {
    tshi_mpi_parts parts;
    parts.first = x;
    parts.stride = stride;
    if (n > 0) tshb_coll_sum(sum, n, &op->coll, op->group->size, k, tshi_mpi_part, &parts);
}

/* Sums all chunks of an all-reduce to recv; x, stride: as above, but whole messages. */
static void tshi_mpi_sum_all(const tshi_mpi_op *op, char *x, size_t stride) {
    for (int k = 0; k < op->group->size; k++) {
        size_t offset = (size_t)op->into[k] * tsh_dtype_size(op->coll.dtype);
        tshi_mpi_sum(op, x + offset, stride, k, op->into[k + 1] - op->into[k],
                     (char *)op->coll.recv + offset);
    }
}

/* ========================================================================== */
/* >>mpi-heads                                     MARK: - mpi-heads (private) */
/* What all ranks have called, to be compared; short messages are sent along.  */
/* Needs: >>mpi-stage.                                                          */
/* ========================================================================== */

static int tshi_mpi_gathers(const tsh_coll *coll) {
    return coll->kind == TSH_ALLGATHER || coll->kind == TSH_REDUCE_SCATTER;
}

/* Fills op's from, into and longest: where the pieces of the message start. */
static void tshi_mpi_lay(const tshi_mpi_group *group, tshi_mpi_op *op) {
    const tsh_coll *coll = &op->coll;
    const int64_t *send = coll->kind == TSH_ALLTOALL ? coll->send_counts : coll->recv_counts;
    op->longest = 0;
    op->from[0] = op->into[0] = 0;
    for (int k = 0; k < group->size; k++) {
        if (coll->kind == TSH_ALLREDUCE) {
            op->from[k + 1] = op->into[k + 1] = tshb_coll_chunk(coll->count, group->size, k + 1);
        } else {
            op->from[k + 1] = op->from[k] + send[k];
            op->into[k + 1] = op->into[k] + coll->recv_counts[k];
        }
        if (op->longest < tshi_mpi_length(op, op->into, k))
            op->longest = tshi_mpi_length(op, op->into, k);
    }
}

/* 1 if what each rank sends fits in its head, so that no other call of MPI is needed. All ranks
 * of the group that make the same call get the same answer. */
static int tshi_mpi_is_eager(const tshi_mpi_op *op) {
    const tsh_coll *coll = &op->coll;
    int64_t n = coll->kind == TSH_ALLGATHER ? op->longest : coll->count;
    return (coll->kind == TSH_ALLREDUCE || coll->kind == TSH_BROADCAST ||
            coll->kind == TSH_ALLGATHER) &&
           n <= (int64_t)(TSHI_MPI_EAGER / tsh_dtype_size(coll->dtype));
}

static void tshi_mpi_fill(const tshi_mpi_group *group, tshi_mpi_block *block,
                          const tsh_coll *coll) {
    block->call.coll = *coll;
    block->call.digest = tshb_coll_digest(coll, group->size);
    block->call.rank = group->ranks[group->rank];
}

/* Copies what this rank sends to its own block. */
static void tshi_mpi_pack_eager(const tshi_mpi_group *group, tshi_mpi_op *op) {
    const tsh_coll *coll = &op->coll;
    int64_t n = coll->count;
    const void *from = coll->kind == TSH_BROADCAST ? coll->recv : coll->send;
    if (coll->kind == TSH_ALLGATHER) n = tshi_mpi_length(op, op->from, group->rank);
    if (n > 0) memcpy(op->block->eager, from, (size_t)n * tsh_dtype_size(coll->dtype));
}

/* Copies or sums what all ranks have sent in their blocks to recv. */
static void tshi_mpi_unpack_eager(const tshi_mpi_group *group, tshi_mpi_op *op) {
    const tsh_coll *coll = &op->coll;
    tshi_mpi_block *all = op->block + 1;
    if (coll->kind == TSH_BROADCAST && coll->count > 0 && !op->sends)
        memcpy(coll->recv, all[coll->root].eager,
               (size_t)coll->count * tsh_dtype_size(coll->dtype));
    if (coll->kind == TSH_ALLREDUCE) tshi_mpi_sum_all(op, all->eager, sizeof *all);
    for (int k = 0; k < group->size && coll->kind == TSH_ALLGATHER; k++)
        tshi_mpi_copy(op, op->into, k, tshi_mpi_length(op, op->into, k), all[k].eager, 0);
}

/* For tshb_calls_match; user: an operation. Outputs rank r's call of the same collective. */
static int tshi_mpi_called(const void *user, int r, tshb_call *out) {
    const tshi_mpi_op *op = (const tshi_mpi_op *)user;
    size_t n = (size_t)op->group->size;
    *out = op->block[1 + r].call;
    if (op->counts) {
        out->counts = op->group->size;
        out->coll.send_counts = op->counts + 2 * n * (size_t)(1 + r);
        out->coll.recv_counts = out->coll.send_counts + n;
    }
    return 1;
}

/* Raises an error and returns 1 if the calls of all ranks, or counts if exchanged, do not fit. */
static int tshi_mpi_mismatch(tshi_mpi_group *group, const tshi_mpi_op *op) {
    tsh_error error;
    if (tshb_calls_match(tshi_mpi_called, op, group->size, op->seq, group->id, &error)) return 0;
    group->broken = 1;
    tshi_mpi_raise(group->world, TSHI_MPI_ERROR, &error);
    return 1;
}

/* ========================================================================== */
/* >>mpi-rounds                                   MARK: - mpi-rounds (private) */
/* The steps of a collective or a message: each makes one nonblocking MPI call. */
/* Needs: >>mpi-heads.                                                          */
/* ========================================================================== */

/* On one communicator, all ranks must call MPI's collectives in the same order. So an operation
 * begins when all operations before it have made their last collective call (`last` is 1). Which
 * call is the last depends only on the operation, which is the same on all ranks. */

static void tshi_mpi_finish(tshi_mpi_world *world, tshi_mpi_op *op) {
    tshi_mpi_give(world, op->out);
    tshi_mpi_give(world, op->in);
    op->out = op->in = NULL;
    op->state = TSHI_MPI_DONE;
    op->last = 1; /* no further call is made */
}

/* The first call of a collective: all ranks exchange their heads. */
static void tshi_mpi_begin_heads(tshi_mpi_group *group, tshi_mpi_op *op) {
    op->state = TSHI_MPI_HEADS;
    /* If ranks may have to exchange counts next, the next operation must wait. */
    op->last = op->coll.kind >= TSH_BARRIER ||
               (tshi_mpi_is_eager(op) && !tshi_mpi_gathers(&op->coll));
    (void)TSHI_MPI_CALL(group->world, MPI_Iallgather,
                        (op->block, (int)sizeof *op->block, MPI_BYTE, op->block + 1,
                         (int)sizeof *op->block, MPI_BYTE, group->comm, op->req));
}

/* All ranks exchange their counts. */
static void tshi_mpi_tell_counts(tshi_mpi_group *group, tshi_mpi_op *op) {
    size_t n = (size_t)group->size, width = sizeof *op->counts;
    op->counts = (int64_t *)calloc(2 * n * (n + 1), width);
    if (!op->counts) {
        (void)tshi_mpi_no_memory(group->world, "keep the counts of a collective");
        return;
    }
    if (op->coll.send_counts) memcpy(op->counts, op->coll.send_counts, n * width);
    if (op->coll.recv_counts) memcpy(op->counts + n, op->coll.recv_counts, n * width);
    op->state = TSHI_MPI_COUNTS;
    (void)TSHI_MPI_CALL(group->world, MPI_Iallgather,
                        (op->counts, 2 * group->size, MPI_INT64_T, op->counts + 2 * n,
                         2 * group->size, MPI_INT64_T, group->comm, op->req));
}

/* Fills length with P lengths and P offsets in bytes of this round: of all pieces; or (own is 1) of
 * this rank's piece, once from each rank. */
static void tshi_mpi_measure(const tshi_mpi_group *group, const tshi_mpi_op *op,
                             const int64_t *start, int own, int *length) {
    int width = (int)tsh_dtype_size(op->coll.dtype), sum = 0;
    for (int k = 0; k < group->size; k++) {
        length[k] = width * (int)tshi_mpi_round(op, start, own ? group->rank : k);
        length[group->size + k] = sum;
        sum += length[k];
    }
}

/* 1 if a single call of MPI moves (or sums) a segment of the whole message, not of P pieces. */
static int tshi_mpi_is_whole(const tshi_mpi_op *op) {
    const tsh_coll *coll = &op->coll;
    return op->message || coll->kind == TSH_BROADCAST ||
           (coll->kind == TSH_ALLREDUCE && op->group->world->native && coll->redop != TSH_MIN &&
            coll->redop != TSH_MAX && !tshb_coll_rounds(coll->dtype, coll->redop));
}

/* 1 if the messages of all ranks are so short that each rank gets and sums them all. */
static int tshi_mpi_is_direct(const tshi_mpi_group *group, const tshi_mpi_op *op) {
    const tsh_coll *coll = &op->coll;
    int64_t most = tshi_mpi_min(TSHI_MPI_NEAR, TSHARD_MPI_SEGMENT); /* bytes */
    return coll->kind == TSH_ALLREDUCE && !tshi_mpi_is_whole(op) &&
           coll->count <= most / group->size / (int64_t)tsh_dtype_size(coll->dtype);
}

/* A short all-reduce: every rank gets every message, and later sums all chunks. */
static void tshi_mpi_direct(tshi_mpi_group *group, tshi_mpi_op *op) {
    int bytes = (int)((size_t)op->coll.count * tsh_dtype_size(op->coll.dtype));
    memcpy(op->out->bytes, op->coll.send, (size_t)bytes);
    op->state = TSHI_MPI_DIRECT;
    op->last = 1;
    (void)TSHI_MPI_CALL(
        group->world, MPI_Iallgather,
        (op->out->bytes, bytes, MPI_BYTE, op->in->bytes, bytes, MPI_BYTE, group->comm, op->req));
}

/* Every rank gets a segment of its own piece from each rank: in an all-to-all, or to be summed. */
static void tshi_mpi_scatter(tshi_mpi_group *group, tshi_mpi_op *op) {
    int *out = op->lengths, *in = op->lengths + 2 * group->size;
    int all_to_all = op->coll.kind == TSH_ALLTOALL;
    tshi_mpi_measure(group, op, op->from, 0, out);
    tshi_mpi_measure(group, op, all_to_all ? op->into : op->from, !all_to_all, in);
    tshi_mpi_copy_all(op, op->from, out + group->size, op->out->bytes, 1);
    op->state = TSHI_MPI_SCATTER;
    op->last = op->coll.kind != TSH_ALLREDUCE && op->at + op->step >= op->longest;
    (void)TSHI_MPI_CALL(group->world, MPI_Ialltoallv,
                        (op->out->bytes, out, out + group->size, MPI_BYTE, op->in->bytes, in,
                         in + group->size, MPI_BYTE, group->comm, op->req));
}

/* Every rank gets a segment of every piece from its owner; this rank sends op->part. */
static void tshi_mpi_gather(tshi_mpi_group *group, tshi_mpi_op *op) {
    int *in = op->lengths;
    tshi_mpi_measure(group, op, op->into, 0, in);
    op->state = TSHI_MPI_GATHER;
    op->last = op->at + op->step >= op->longest;
    (void)TSHI_MPI_CALL(group->world, MPI_Iallgatherv,
                        (op->part, in[group->rank], MPI_BYTE, op->out->bytes, in, in + group->size,
                         MPI_BYTE, group->comm, op->req));
}

/* Moves the next segment of a broadcast, a message or MPI's own all-reduce. */
static void tshi_mpi_whole(tshi_mpi_group *group, tshi_mpi_op *op) {
    const tsh_coll *coll = &op->coll;
    size_t width = tsh_dtype_size(coll->dtype);
    int64_t n = tshi_mpi_min(op->step, op->longest - op->at);
    const char *from = (const char *)(coll->kind == TSH_BROADCAST ? coll->recv : coll->send);
    int bytes = (int)((size_t)n * width); /* of this segment */
    int tag = TSHI_MPI_TAG_BODY + (int)(op->seq % TSHI_MPI_BODIES);
    char *stage = op->out->bytes;
    MPI_Datatype types[TSH_I64 + 1]; /* MPI's type of each tsh_dtype */
    types[TSH_F32] = MPI_FLOAT;
    types[TSH_F64] = MPI_DOUBLE;
    types[TSH_I32] = MPI_INT32_T;
    types[TSH_I64] = MPI_INT64_T;
    op->state = TSHI_MPI_WHOLE;
    op->last = op->message || op->at + op->step >= op->longest;
    if (coll->kind == TSH_ALLREDUCE || op->sends)
        memcpy(stage, from + (size_t)op->at * width, (size_t)bytes);
    if (coll->kind == TSH_BROADCAST)
        (void)TSHI_MPI_CALL(group->world, MPI_Ibcast,
                            (stage, bytes, MPI_BYTE, coll->root, group->comm, op->req));
    else if (coll->kind == TSH_ALLREDUCE)
        (void)TSHI_MPI_CALL(group->world, MPI_Iallreduce,
                            (MPI_IN_PLACE, stage, (int)n, types[coll->dtype],
                             coll->redop == TSH_PROD ? MPI_PROD : MPI_SUM, group->comm, op->req));
    else if (op->sends)
        (void)TSHI_MPI_CALL(group->world, MPI_Isend,
                            (stage, bytes, MPI_BYTE, op->peer, tag, group->comm, op->req));
    else
        (void)TSHI_MPI_CALL(group->world, MPI_Irecv,
                            (stage, bytes, MPI_BYTE, op->peer, tag, group->comm, op->req));
}

/* Makes the call of the next round, or finishes: all elements are done. */
static void tshi_mpi_next_round(tshi_mpi_group *group, tshi_mpi_op *op) {
    const tsh_coll *coll = &op->coll;
    if (op->at >= op->longest) {
        tshi_mpi_finish(group->world, op);
    } else if (tshi_mpi_is_whole(op)) {
        tshi_mpi_whole(group, op);
    } else if (tshi_mpi_is_direct(group, op)) {
        tshi_mpi_direct(group, op);
    } else if (coll->kind == TSH_ALLGATHER) {
        int64_t n = tshi_mpi_round(op, op->into, group->rank);
        size_t width = tsh_dtype_size(coll->dtype);
        op->part = op->in->bytes;
        if (n > 0)
            memcpy(op->part, (const char *)coll->send + (size_t)op->at * width, (size_t)n * width);
        tshi_mpi_gather(group, op);
    } else {
        tshi_mpi_scatter(group, op);
    }
}

/* All ranks have called the same, and the message was too long for the heads: chooses the length of
 * a segment, gets buffers and starts the first round. */
static void tshi_mpi_begin(tshi_mpi_group *group, tshi_mpi_op *op) {
    const tsh_coll *coll = &op->coll;
    int whole = tshi_mpi_is_whole(op);
    int64_t width = (int64_t)tsh_dtype_size(coll->dtype), pieces = whole ? 1 : group->size;
    if (whole && !op->message) op->longest = coll->count;
    if (coll->kind == TSH_ALLTOALL)
        for (int64_t i = 0; i < 2 * pieces * pieces; i++) {
            int64_t n = op->counts[2 * pieces + i] * coll->blocks;
            if (op->longest < n) op->longest = n; /* the longest piece of any rank */
        }
    op->step = tshi_mpi_min(op->longest, TSHARD_MPI_SEGMENT / (width * pieces));
    if (op->step < 1) op->step = 1;
    if (op->longest > 0) {
        size_t bytes = (size_t)(op->step * width * pieces);
        size_t messages = tshi_mpi_is_direct(group, op) ? (size_t)group->size : 1;
        op->out = tshi_mpi_take(group->world, bytes);
        if (op->out && !whole) op->in = tshi_mpi_take(group->world, bytes * messages);
        if (!op->out || (!whole && !op->in)) return; /* an error was raised */
    }
    tshi_mpi_next_round(group, op);
}

/* The heads of all ranks have arrived: compares them, and starts what comes next. */
static void tshi_mpi_compare(tshi_mpi_group *group, tshi_mpi_op *op) {
    const tsh_coll *coll = &op->coll;
    int fits = 1, alike = 1; /* 1 if all calls, all kinds are the same */
    for (int r = 1; r <= group->size; r++) {
        fits = fits && op->block[r].call.digest == op->block->call.digest;
        alike = alike && op->block[r].call.coll.kind == coll->kind;
    }
    if (!fits) {
        group->broken = 1; /* the group's other operations stop */
        if (alike && tshi_mpi_gathers(coll))
            tshi_mpi_tell_counts(group, op);
        else
            (void)tshi_mpi_mismatch(group, op);
    } else if (coll->kind == TSH_ALLTOALL) {
        tshi_mpi_tell_counts(group, op);
    } else if (coll->kind >= TSH_BARRIER) {
        tshi_mpi_finish(group->world, op);
    } else if (tshi_mpi_is_eager(op)) {
        tshi_mpi_unpack_eager(group, op);
        tshi_mpi_finish(group->world, op);
    } else {
        tshi_mpi_begin(group, op);
    }
}

/* A segment of this rank's piece has arrived from each rank: copies or sums them. The sum of an
 * all-reduce overwrites its first summand. */
static void tshi_mpi_scattered(tshi_mpi_group *group, tshi_mpi_op *op) {
    const tsh_coll *coll = &op->coll;
    int64_t n = tshi_mpi_round(op, op->from, group->rank);
    size_t width = tsh_dtype_size(coll->dtype), stride = (size_t)n * width;
    if (coll->kind == TSH_ALLTOALL) {
        tshi_mpi_copy_all(op, op->into, op->lengths + 3 * group->size, op->in->bytes, 0);
        return;
    }
    op->part = op->in->bytes + (size_t)((group->rank + 1) % group->size) * stride;
    if (coll->kind == TSH_REDUCE_SCATTER && n > 0)
        op->part = (char *)coll->recv + (size_t)op->at * width;
    tshi_mpi_sum(op, op->in->bytes, stride, group->rank, n, op->part);
}

/* A segment of a broadcast, a message or MPI's own all-reduce has arrived: copies it to recv. */
static void tshi_mpi_came_whole(const tshi_mpi_op *op) {
    const tsh_coll *coll = &op->coll;
    size_t width = tsh_dtype_size(coll->dtype);
    int64_t n = tshi_mpi_min(op->step, op->longest - op->at);
    if (coll->kind == TSH_ALLREDUCE)
        tshb_coll_finish(op->out->bytes, n, coll->dtype, coll->redop, op->group->size);
    if (coll->kind == TSH_ALLREDUCE || !op->sends)
        memcpy((char *)coll->recv + (size_t)op->at * width, op->out->bytes, (size_t)n * width);
}

/* The other end's envelope has arrived: compares it. A short message came with it. */
static void tshi_mpi_met(tshi_mpi_group *group, tshi_mpi_op *op) {
    const tshb_call *sent = &op->block[!op->sends].call, *wanted = &op->block[op->sends].call;
    int64_t bytes = op->longest * (int64_t)tsh_dtype_size(op->coll.dtype);
    tsh_error error;
    if (sent->digest != wanted->digest) {
        tshb_message_mismatch(&sent->coll, &wanted->coll, sent->rank, wanted->rank, op->seq,
                              group->id, &error);
        group->broken = 1;
        tshi_mpi_raise(group->world, TSHI_MPI_ERROR, &error);
    } else if (bytes <= TSHI_MPI_EAGER) {
        if (!op->sends && bytes > 0) memcpy(op->coll.recv, op->block[1].eager, (size_t)bytes);
        tshi_mpi_finish(group->world, op);
    } else {
        tshi_mpi_begin(group, op);
    }
}

/* ========================================================================== */
/* >>mpi-progress                               MARK: - mpi-progress (private) */
/* Starting, advancing and freeing operations.                                 */
/* Needs: >>mpi-rounds.                                                         */
/* ========================================================================== */

/* The calls of MPI that op waited for have completed: does what comes next. */
static void tshi_mpi_follow(tshi_mpi_group *group, tshi_mpi_op *op) {
    group->world->moves++;
    switch (op->state) {
    case TSHI_MPI_QUEUED: tshi_mpi_begin_heads(group, op); return;
    case TSHI_MPI_HEADS: tshi_mpi_compare(group, op); return;
    case TSHI_MPI_COUNTS:
        if (!tshi_mpi_mismatch(group, op)) tshi_mpi_begin(group, op);
        return;
    case TSHI_MPI_DIRECT:
        tshi_mpi_sum_all(op, op->in->bytes,
                         (size_t)op->coll.count * tsh_dtype_size(op->coll.dtype));
        break;
    case TSHI_MPI_SCATTER:
        tshi_mpi_scattered(group, op);
        if (op->coll.kind != TSH_ALLREDUCE) break;
        tshi_mpi_gather(group, op);
        return;
    case TSHI_MPI_GATHER:
        tshi_mpi_copy_all(op, op->into, op->lengths + group->size, op->out->bytes, 0);
        break;
    case TSHI_MPI_WHOLE: tshi_mpi_came_whole(op); break;
    case TSHI_MPI_ENVELOPE: tshi_mpi_met(group, op); return;
    case TSHI_MPI_DONE: return;
    }
    op->at += op->step; /* the round is done */
    tshi_mpi_next_round(group, op);
}

/* Advances all operations of a group that can go on, in order. In a group with a mismatch, only the
 * exchange of counts goes on, which serves to describe it. */
static void tshi_mpi_advance_group(tshi_mpi_group *group) {
    tshi_mpi_world *world = group->world;
    int turn = 1; /* all operations before op have made their last collective call */
    for (tshi_mpi_op *op = group->first; op; op = op->next) {
        int done = 1;
        while (op->state != TSHI_MPI_DONE && done && (turn || op->state != TSHI_MPI_QUEUED) &&
               (!group->broken || op->state == TSHI_MPI_COUNTS)) {
            MPI_Status status[2]; /* for MPI_STATUSES_IGNORE gcc warns with MPICH */
            /* If a call of MPI failed, there is no request, and Testall says done. */
            if (op->state == TSHI_MPI_QUEUED ||
                !TSHI_MPI_CALL(world, MPI_Testall, (2, op->req, &done, status))) {
                if (done) tshi_mpi_follow(group, op);
            }
            if (tshi_mpi_over(world)) return;
        }
        turn = turn && op->last;
    }
}

/* Appends a new operation to the group's list, allocated in one block of memory with its arrays for
 * `ranks` ranks. NULL: out of memory. */
static tshi_mpi_op *tshi_mpi_add_op(tshi_mpi_group *group, const tsh_coll *coll, int ranks) {
    size_t n = (size_t)ranks, starts = 2 * (n + 1) * sizeof(int64_t);
    tshi_mpi_op **at = &group->first;
    tshi_mpi_op *op = (tshi_mpi_op *)calloc(1, sizeof *op + starts + (n + 1) * sizeof *op->block +
                                                   4 * n * sizeof *op->lengths);
    if (!op) return NULL;
    op->from = (int64_t *)(void *)(op + 1);
    op->into = op->from + n + 1;
    op->block = (tshi_mpi_block *)(void *)(op->into + n + 1);
    op->lengths = (int *)(void *)(op->block + n + 1);
    while (*at) at = &(*at)->next;
    *at = op;
    op->group = group;
    op->coll = *coll;
    op->id = ++group->ids;
    op->deadline = tshb_deadline(coll->timeout_ns, group->world->timeout);
    op->req[0] = op->req[1] = MPI_REQUEST_NULL;
    return op;
}

/* Appends a collective, or a close, to the group's list. NULL: out of memory. */
static tshi_mpi_op *tshi_mpi_add_collective(tshi_mpi_group *group, const tsh_coll *coll) {
    tshi_mpi_op *op = tshi_mpi_add_op(group, coll, group->size);
    if (!op) return NULL;
    op->seq = group->started++;
    op->sends = coll->kind == TSH_BROADCAST && coll->root == group->rank;
    tshi_mpi_fill(group, op->block, coll);
    if (coll->kind == TSH_ALLREDUCE || tshi_mpi_gathers(coll) || coll->kind == TSH_ALLTOALL)
        tshi_mpi_lay(group, op);
    if (coll->kind < TSH_BARRIER && tshi_mpi_is_eager(op)) tshi_mpi_pack_eager(group, op);
    return op;
}

/* Appends half of a message to the group's list, sends its envelope and starts to receive that of
 * the other end. NULL: out of memory. */
static tshi_mpi_op *tshi_mpi_add_half(tshi_mpi_group *group, const tsh_coll *coll, int sends) {
    const tsh_coll half = tshb_coll_half(coll, !sends);
    size_t bytes = (size_t)half.count * tsh_dtype_size(half.dtype);
    int peer = sends ? half.send_to : half.recv_from;
    int tag = sends ? TSHI_MPI_TAG_SEND : TSHI_MPI_TAG_RECV;
    int answer = sends ? TSHI_MPI_TAG_RECV : TSHI_MPI_TAG_SEND;
    tshi_mpi_op *op = tshi_mpi_add_op(group, coll, 1);
    if (!op) return NULL;
    op->message = 1;
    op->sends = sends;
    op->peer = peer;
    op->state = TSHI_MPI_ENVELOPE;
    op->last = 1; /* messages need no order with collectives */
    op->longest = half.count;
    op->seq = sends ? group->sends[peer]++ : group->recvs[peer]++;
    tshi_mpi_fill(group, op->block, &half);
    if (sends && bytes > 0 && bytes <= TSHI_MPI_EAGER) memcpy(op->block->eager, half.send, bytes);
    if (!TSHI_MPI_CALL(group->world, MPI_Irecv,
                       (op->block + 1, (int)sizeof *op->block, MPI_BYTE, peer, answer, group->comm,
                        &op->req[1])))
        (void)TSHI_MPI_CALL(
            group->world, MPI_Isend,
            (op->block, (int)sizeof *op->block, MPI_BYTE, peer, tag, group->comm, &op->req[0]));
    return op;
}

/* 1 if op is done and, if it is a SENDRECV, so is its other half. */
static int tshi_mpi_is_done(const tshi_mpi_op *op) {
    return op->state == TSHI_MPI_DONE && (!op->other || op->other->state == TSHI_MPI_DONE);
}

/* Removes op and its other half from the list and frees them. One that is not done is not freed:
 * after an error, MPI may still use its memory. */
static void tshi_mpi_release(tshi_mpi_group *group, tshi_mpi_op *op) {
    tshi_mpi_op **at = &group->first;
    while (*at != op) at = &(*at)->next;
    *at = op->next;
    if (op->other) tshi_mpi_release(group, op->other);
    if (op->state != TSHI_MPI_DONE) return;
    free(op->counts);
    free(op);
}

/* Frees the groups that all of their ranks have closed. After an error frees none, as MPI may still
 * use them. */
static void tshi_mpi_sweep(tshi_mpi_world *world) {
    if (tshi_mpi_over(world)) return;
    for (tshi_mpi_group **at = &world->groups; *at;) {
        tshi_mpi_group *group = *at;
        if (group->closing && group->first && group->first->state == TSHI_MPI_DONE) {
            *at = group->next;
            tshi_mpi_release(group, group->first);
            (void)MPI_Comm_free(&group->comm);
            free(group);
        } else {
            at = &group->next;
        }
    }
}

/* Does everything that this rank can do now on any of its comms, without blocking. */
static void tshi_mpi_advance(tshi_mpi_world *world) {
    if (tshi_mpi_over(world)) return;
    for (tshi_mpi_group *group = world->groups; group; group = group->next)
        if (group->first) tshi_mpi_advance_group(group);
}

/* ========================================================================== */
/* >>mpi-wait                                       MARK: - mpi-wait (private) */
/* A waiting rank polls; after 20 ms it reports to rank 0, which finds cycles. */
/* Needs: >>mpi-progress.                                                       */
/* ========================================================================== */

/* Appends to report how many messages to and from `peer` of a group this rank has started; or, if
 * peer is -1, how many collectives. */
static void tshi_mpi_mark(const tshi_mpi_group *group, int peer, tshb_wait_report *report) {
    tshb_wait_mark *mark = (tshb_wait_mark *)(void *)(report + 1) + report->marks;
    mark->group = group->id;
    mark->peer = peer < 0 ? -1 : group->ranks[peer];
    mark->sends = peer < 0 ? group->started : group->sends[peer];
    mark->recvs = peer < 0 ? 0 : group->recvs[peer];
    if (peer < 0 || mark->sends || mark->recvs) report->marks++;
}

/* Writes the world ranks that op waits for to awaited; of a message also which half is not done. */
static void tshi_mpi_write_awaited(const tshi_mpi_op *op, tshb_wait_report *report, int *awaited) {
    const tshi_mpi_group *group = op->group;
    report->send_to = report->recv_from = -1;
    report->pairwise = op->message;
    if (!op->message) {
        report->seq = op->seq;
        report->awaited = group->size;
        memcpy(awaited, group->ranks, (size_t)group->size * sizeof *awaited);
    }
    for (; op && op->message; op = op->other) {
        if (op->state == TSHI_MPI_DONE) continue;
        awaited[report->awaited++] = group->ranks[op->peer];
        *(op->sends ? &report->send_to : &report->recv_from) = group->ranks[op->peer];
        *(op->sends ? &report->send_number : &report->recv_number) = op->seq;
    }
}

/* Reports to rank 0 that this rank waits for op. Without memory, does nothing. */
static void tshi_mpi_tell_wait(tshi_mpi_world *world, const tshi_mpi_op *op) {
    const tshi_mpi_group *group = op->group;
    size_t marks = 0;
    tshb_wait_report *report;
    int *awaited;
    for (const tshi_mpi_group *g = world->groups; g; g = g->next) marks += (size_t)g->size + 1;
    report = (tshb_wait_report *)calloc(1, sizeof *report + marks * sizeof(tshb_wait_mark) +
                                               ((size_t)group->size + 2) * sizeof *awaited);
    if (!report) return;
    for (const tshi_mpi_group *g = world->groups; g; g = g->next)
        for (int peer = -1; peer < g->size; peer++) tshi_mpi_mark(g, peer, report);
    report->group = group->id;
    awaited = (int *)(void *)((tshb_wait_mark *)(void *)(report + 1) + report->marks);
    tshi_mpi_write_awaited(op, report, awaited);
    tshb_coll_where(&op->coll, group->size, op->seq, group->id, report->text, sizeof report->text);
    if (world->rank == 0) {
        tshi_mpi_reported(world, 0, report);
        return;
    }
    tshi_mpi_send(world, 0, TSHI_MPI_REPORT, report,
                  (size_t)((char *)(awaited + report->awaited) - (char *)report));
    free(report);
}

/* Reports that op has timed out, unless there is an error. Rank 0 finds out who is absent. */
static void tshi_mpi_time_out(tshi_mpi_world *world, const tshi_mpi_op *op) {
    const tshi_mpi_group *group = op->group;
    tsh_error error;
    if (tshi_mpi_over(world) || world->late.code != TSH_OK) return;
    tshi_mpi_tell_wait(world, op);
    (void)tsh_error_set(&error, TSH_ERR_TIMEOUT, -1, "rank %d ran out of time in ", world->rank);
    tshb_coll_where(&op->coll, group->size, op->seq, group->id, error.message,
                    sizeof error.message);
    tshi_mpi_raise(world, TSHI_MPI_LATE, &error);
}

/* Pauses between two polls of a wait that has lasted `waited` ns. If ranks share cores (crowded), a
 * short sleep lets the awaited rank run sooner than sched_yield does. */
static void tshi_mpi_rest(int crowded, int64_t waited, unsigned spins) {
    struct timespec t;
    t.tv_sec = 0;
    t.tv_nsec = crowded ? 1000 : 50000;
    if (waited > 10 * TSHI_MPI_MS || (crowded && spins > 16))
        (void)nanosleep(&t, NULL);
    else if (spins > 64)
        (void)sched_yield();
}

/* Waits until op is done or the world has failed. */
static void tshi_mpi_await(tshi_mpi_world *world, const tshi_mpi_op *op) {
    int64_t begin = tsh_now(), waited = 0; /* waited: ns since a call of MPI completed */
    uint64_t moves = world->moves;
    unsigned spins = 0;
    int told = 0; /* 1: this rank has reported to rank 0 that it waits */
    for (unsigned round = 1; world->error.code == TSH_OK; round++) {
        tshi_mpi_advance(world);
        if (tshi_mpi_is_done(op) && world->suspect.code == TSH_OK) {
            tshi_mpi_serve(world); /* the world may have failed meanwhile */
            break;
        }
        if (round % 8 == 0 || waited > 10 * TSHI_MPI_MS) {
            int64_t now = tsh_now();
            if (moves != world->moves) {
                moves = world->moves;
                begin = now;
                spins = 0;
            }
            waited = now - begin;
            tshi_mpi_serve(world);
            if (waited > 20 * TSHI_MPI_MS && !told++) tshi_mpi_tell_wait(world, op);
            if (now >= op->deadline) tshi_mpi_time_out(world, op);
        }
        tshi_mpi_rest(world->crowded, waited, spins++);
    }
}

/* Waits until MPI has sent this rank's control messages and completed *request (may be NULL). 0: it
 * has not, after `limit` ns or, if the world fails, a second after that. */
static int tshi_mpi_settle(tshi_mpi_world *world, MPI_Request *request, int64_t limit) {
    int64_t begin = tsh_now(), well = begin; /* well: when there was last no error */
    for (unsigned spins = 0;; spins++) {
        int64_t now = tsh_now();
        int done = 1;
        if (request && MPI_Test(request, &done, MPI_STATUS_IGNORE)) return 0;
        tshi_mpi_serve(world);
        if (done && !world->posts) return 1;
        if (world->error.code == TSH_OK) well = now;
        if (now - begin > limit || now - well > 1000 * TSHI_MPI_MS) return 0;
        tshi_mpi_rest(world->crowded, now - begin, spins);
    }
}

/* ========================================================================== */
/* >>mpi-ops                                         MARK: - mpi-ops (private) */
/* start, test, wait, progress, split, status, abort, close: see >>comm-api.   */
/* Needs: >>mpi-wait.                                                           */
/* ========================================================================== */

static tshi_mpi_group *tshi_mpi_group_of(const tsh_comm *comm) {
    return (tshi_mpi_group *)comm->impl;
}

/* Returns the operation of a request. NULL: there is none, or it has been waited for. */
static tshi_mpi_op *tshi_mpi_find(const tshi_mpi_group *group, tsh_req req) {
    tshi_mpi_op *op = group->first;
    while (op && op->id != req) op = op->next;
    return op;
}

static tsh_result tshi_mpi_start(tsh_comm *comm, const tsh_coll *coll, tsh_req *req) {
    tshi_mpi_group *group = tshi_mpi_group_of(comm);
    int message = coll->kind == TSH_SEND || coll->kind == TSH_RECV || coll->kind == TSH_SENDRECV;
    tshi_mpi_op *op;
    tshi_mpi_serve(group->world);
    if (group->world->error.code != TSH_OK) return group->world->error.code;
    op = message ? tshi_mpi_add_half(group, coll, coll->kind != TSH_RECV)
                 : tshi_mpi_add_collective(group, coll);
    if (op && coll->kind == TSH_SENDRECV) op->other = tshi_mpi_add_half(group, coll, 0);
    if (!op || (coll->kind == TSH_SENDRECV && !op->other))
        return tshi_mpi_no_memory(group->world, "start a collective");
    *req = op->id;
    if (!tshi_mpi_over(group->world)) tshi_mpi_advance_group(group);
    return TSH_OK;
}

static tsh_result tshi_mpi_test(tsh_comm *comm, tsh_req req, int *done) {
    tshi_mpi_group *group = tshi_mpi_group_of(comm);
    tshi_mpi_world *world = group->world;
    const tshi_mpi_op *op = tshi_mpi_find(group, req);
    if (!op) return TSH_ERR_ARGUMENT;
    tshi_mpi_advance(world);
    tshi_mpi_serve(world);
    if (!tshi_mpi_is_done(op) && tsh_now() >= op->deadline) tshi_mpi_time_out(world, op);
    *done = world->error.code != TSH_OK || tshi_mpi_is_done(op);
    return world->error.code;
}

static tsh_result tshi_mpi_wait(tsh_comm *comm, tsh_req req) {
    tshi_mpi_group *group = tshi_mpi_group_of(comm);
    tshi_mpi_op *op = tshi_mpi_find(group, req);
    if (!op) return TSH_ERR_ARGUMENT;
    tshi_mpi_await(group->world, op);
    tshi_mpi_release(group, op);
    return group->world->error.code;
}

static void tshi_mpi_progress(tsh_comm *comm) {
    tshi_mpi_advance(tshi_mpi_group_of(comm)->world);
    tshi_mpi_serve(tshi_mpi_group_of(comm)->world);
}

static tsh_result tshi_mpi_status(tsh_comm *comm, tsh_error *error) {
    tshi_mpi_world *world = tshi_mpi_group_of(comm)->world;
    if (world->error.code == TSH_OK) tshi_mpi_serve(world);
    if (world->error.code != TSH_OK && error) *error = world->error;
    return world->error.code;
}

static void tshi_mpi_abort(tsh_comm *comm, const tsh_error *why) {
    tshi_mpi_world *world = tshi_mpi_group_of(comm)->world;
    tsh_error error = *why;
    int none = 0;
    if (error.rank < 0) error.rank = world->rank;
    if (pthread_equal(pthread_self(), world->owner)) {
        tshi_mpi_raise(world, TSHI_MPI_ABORT, &error);
    } else if (__atomic_compare_exchange_n(&world->asked, &none, 1, 0, __ATOMIC_SEQ_CST,
                                           __ATOMIC_SEQ_CST)) {
        world->wish = error;
        __atomic_store_n(&world->asked, 2, __ATOMIC_SEQ_CST);
    }
}

/* Allocates a group and its arrays in one block; it has no communicator yet. NULL: no memory. */
static tshi_mpi_group *tshi_mpi_group_new(tshi_mpi_world *world, int size) {
    size_t n = (size_t)size;
    tshi_mpi_group *group = (tshi_mpi_group *)calloc(
        1, sizeof *group + 2 * n * sizeof *group->sends + n * sizeof *group->ranks);
    if (!group) return NULL;
    group->world = world;
    group->size = size;
    group->sends = (uint64_t *)(void *)(group + 1);
    group->recvs = group->sends + n;
    group->ranks = (int *)(void *)(group->recvs + n);
    return group;
}

/* Adds a group, which has its communicator now, to the world's list; outputs its comm. */
static void tshi_mpi_join(tshi_mpi_group *group, uint64_t id, tsh_comm *out) {
    tshi_mpi_world *world = group->world;
    MPI_Group all, some;
    group->id = id;
    (void)MPI_Comm_set_errhandler(group->comm, MPI_ERRORS_RETURN);
    (void)MPI_Comm_rank(group->comm, &group->rank);
    (void)MPI_Comm_group(world->control, &all);
    (void)MPI_Comm_group(group->comm, &some);
    for (int r = 0; r < group->size; r++)
        (void)MPI_Group_translate_ranks(some, 1, &r, all, &group->ranks[r]);
    (void)MPI_Group_free(&all);
    (void)MPI_Group_free(&some);
    group->next = world->groups;
    world->groups = group;
    world->open++;
    *out = tshb_comm_make(&world->ops, group, group->rank, group->size, id);
}

/* What a rank puts in the `eager` bytes of its head of a split. */
typedef struct tshi_mpi_ticket {
    int64_t color;
    uint64_t id; /* of the new group, if this rank is the first of its color */
} tshi_mpi_ticket;

/* Returns the id of a color's new group, that of the ticket of the color's first rank. */
static uint64_t tshi_mpi_new_id(const tshi_mpi_op *op, int color) {
    tshi_mpi_ticket ticket;
    int r = -1;
    do {
        memcpy(&ticket, op->block[1 + ++r].eager, sizeof ticket);
    } while (ticket.color != color);
    return ticket.id;
}

/* A barrier before MPI_Comm_split, which has no time limit. 1: all ranks of the group are here, and
 * will call MPI_Comm_split. A rank that failed after it started the split does not come here. On an
 * error waits 200 ms more, as other ranks may have passed before they learnt of it. */
static int tshi_mpi_all_go(tshi_mpi_world *world, const tshi_mpi_group *group,
                           const tshi_mpi_op *op) {
    int64_t begin = tsh_now(), well = begin;
    MPI_Request all;
    int done = 0;
    if (TSHI_MPI_CALL(world, MPI_Ibarrier, (group->comm, &all))) return 0;
    for (unsigned spins = 0;; spins++) {
        int64_t now = tsh_now();
        if (TSHI_MPI_CALL(world, MPI_Test, (&all, &done, MPI_STATUS_IGNORE)) || done) return done;
        tshi_mpi_advance(world);
        tshi_mpi_serve(world);
        if (world->error.code == TSH_OK) well = now;
        if (now - well > 200 * TSHI_MPI_MS) return 0;
        if (now >= op->deadline) tshi_mpi_time_out(world, op);
        tshi_mpi_rest(world->crowded, now - begin, spins);
    }
}

/* Calls MPI_Comm_split once all ranks of the group have started the split. */
static tsh_result tshi_mpi_split(tsh_comm *comm, int color, int key, tsh_comm *out) {
    tshi_mpi_group *group = tshi_mpi_group_of(comm), *part;
    tshi_mpi_world *world = group->world;
    tsh_coll coll = tsh_coll_make(TSH_SPLIT, TSH_F32);
    tshi_mpi_op *op;
    tshi_mpi_ticket ticket;
    MPI_Comm made = MPI_COMM_NULL;
    uint64_t id = 0;
    int expected, refused, size;
    if (world->error.code != TSH_OK) return world->error.code;
    op = tshi_mpi_add_collective(group, &coll);
    if (!op) return tshi_mpi_no_memory(world, "start a split");
    ticket.color = color;
    ticket.id = 1 + (uint64_t)world->rank + (uint64_t)world->size * ++world->splits; /* unique */
    ticket.id |= out->id; /* the group's name */
    memcpy(op->block->eager, &ticket, sizeof ticket);
    tshi_mpi_await(world, op);
    expected = op->state == TSHI_MPI_DONE && tshi_mpi_all_go(world, group, op);
    if (expected && color >= 0) id = tshi_mpi_new_id(op, color);
    refused = expected &&
              TSHI_MPI_CALL(world, MPI_Comm_split,
                            (group->comm, color < 0 ? MPI_UNDEFINED : color, key, &made));
    tshi_mpi_release(group, op);
    if (refused) (void)tshi_mpi_settle(world, NULL, 1000 * TSHI_MPI_MS);
    if (world->error.code != TSH_OK) return world->error.code;
    if (refused) return TSH_ERR_IO;
    if (color < 0) return TSH_OK;
    (void)MPI_Comm_size(made, &size);
    part = tshi_mpi_group_new(world, size);
    if (!part) return tshi_mpi_no_memory(world, "join a group");
    part->comm = made;
    tshi_mpi_join(part, id, out);
    return TSH_OK;
}

static void tshi_mpi_world_free(tshi_mpi_world *world) {
    tshi_mpi_stage *stage;
    while ((stage = world->stages) != NULL) {
        world->stages = stage->next;
        free(stage);
    }
    for (int r = 0; world->report && r < world->size; r++) free(world->report[r]);
    free(world->report);
    free(world->search);
    free(world->hosts);
    free(world);
}

/* Called when the last comm of this rank is closed. Waits until all ranks have closed theirs, after
 * an error for a second at most. Frees the world unless MPI may still use it. */
static void tshi_mpi_end(tshi_mpi_world *world) {
    tshi_mpi_group *group = world->groups;
    MPI_Request all;
    int ours = world->ours, came;
    while (group && world->error.code == TSH_OK) {
        if (group->first)
            tshi_mpi_await(world, group->first);
        else
            tshi_mpi_serve(world); /* the close could not be started: an error follows */
        tshi_mpi_sweep(world);
        group = world->groups;
    }
    came = tshi_mpi_settle(world, NULL, world->timeout) && /* reports are sent before the barrier */
           MPI_Ibarrier(world->control, &all) == MPI_SUCCESS &&
           tshi_mpi_settle(world, &all, world->timeout);
    if (came && world->error.code == TSH_OK) {
        (void)MPI_Comm_free(&world->control);
        tshi_mpi_world_free(world);
    }
    if (ours && came) (void)MPI_Finalize();
}

static void tshi_mpi_close(tsh_comm *comm) {
    tshi_mpi_group *group = tshi_mpi_group_of(comm);
    tshi_mpi_world *world = group->world;
    tsh_coll coll = tsh_coll_make(TSH_BARRIER, TSH_F32);
    coll.kind = TSH_COLL_KINDS; /* means that this rank closes the group */
    if (world->error.code == TSH_OK) tshi_mpi_serve(world);
    if (world->error.code == TSH_OK && group->first) {
        char name[32]; /* of the group */
        tsh_error error;
        (void)tsh_error_set(&error, TSH_ERR_LOST, world->rank,
                            "rank %d closed %s before it waited for its requests", world->rank,
                            tshb_group_text(group->id, name, sizeof name));
        tshi_mpi_raise(world, TSHI_MPI_ERROR, &error);
        for (; world->error.code == TSH_OK; tshi_mpi_serve(world)) /* at most half a second */
            (void)sched_yield();
    }
    group->closing = 1;
    if (world->error.code == TSH_OK && !tshi_mpi_add_collective(group, &coll))
        (void)tshi_mpi_no_memory(world, "close a group");
    tshi_mpi_advance(world);
    tshi_mpi_sweep(world);
    if (--world->open == 0) tshi_mpi_end(world);
    comm->impl = NULL;
}

static const tsh_comm_ops tshi_mpi_ops = TSH_COMM_OPS(tshi_mpi, "mpi", TSH_CAP_ORDERED);

/* ========================================================================== */
/* >>mpi-world                                     MARK: - mpi-world (private) */
/* Opening a world, and the runner.                                            */
/* Needs: >>mpi-ops.                                                            */
/* ========================================================================== */

static const char *tshi_mpi_level_name(int level) {
    return level == MPI_THREAD_SINGLE       ? "MPI_THREAD_SINGLE"
           : level == MPI_THREAD_FUNNELED   ? "MPI_THREAD_FUNNELED"
           : level == MPI_THREAD_SERIALIZED ? "MPI_THREAD_SERIALIZED"
                                            : "MPI_THREAD_MULTIPLE";
}

/* Initialises MPI if that was not done (*ours is then 1), and checks that its thread level is at
 * least `wanted` (0: any) and allows calls from this thread. */
static tsh_result tshi_mpi_init(int wanted, int *argc, char ***argv, int *ours, tsh_error *error) {
    int begun = 0, ended = 0, level = MPI_THREAD_SINGLE, mine = 1;
    tsh_result result = TSH_OK;
    *ours = 0;
    (void)MPI_Initialized(&begun);
    (void)MPI_Finalized(&ended);
    if (ended) return tsh_error_set(error, TSH_ERR_STATE, -1, "MPI has been finalised");
    if (!begun) {
        if (!wanted) wanted = MPI_THREAD_FUNNELED;
        if (MPI_Init_thread(argc, argv, wanted, &level))
            return tsh_error_set(error, TSH_ERR_IO, -1, "MPI_Init_thread failed");
        *ours = 1;
        (void)MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
        (void)MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
    } else {
        (void)MPI_Query_thread(&level);
        (void)MPI_Is_thread_main(&mine);
    }
    if (level < wanted)
        result = tsh_error_set(error, TSH_ERR_UNSUPPORTED, -1, "MPI gives %s where %s is asked for",
                               tshi_mpi_level_name(level), tshi_mpi_level_name(wanted));
    else if (!mine && level < MPI_THREAD_SERIALIZED)
        result = tsh_error_set(error, TSH_ERR_UNSUPPORTED, -1,
                               "this is not the thread that initialised MPI, which gives %s: ask "
                               "for MPI_THREAD_SERIALIZED (MPI_Init_thread)",
                               tshi_mpi_level_name(level));
    if (result == TSH_OK || !*ours) return result;
    (void)MPI_Finalize();
    *ours = 0;
    return result;
}

/* Waits until *request, a step of opening, completes; code: what its call of MPI has returned. */
static tsh_result tshi_mpi_opened(const tshi_mpi_world *world, int code, MPI_Request *request,
                                  tsh_error *error) {
    int64_t begin = tsh_now(), waited = 0;
    int done = 0;
    for (unsigned spins = 0; code == MPI_SUCCESS && waited <= world->timeout; spins++) {
        code = MPI_Test(request, &done, MPI_STATUS_IGNORE);
        if (done) return TSH_OK;
        waited = tsh_now() - begin;
        tshi_mpi_rest(1, waited, spins);
    }
    if (code != MPI_SUCCESS)
        return tsh_error_set(error, TSH_ERR_IO, -1, "tsh_mpi_open: MPI refused a communicator");
    return tsh_error_set(error, TSH_ERR_TIMEOUT, -1,
                         "tsh_mpi_open: not all ranks came within %.1f s",
                         (double)world->timeout / 1e9);
}

/* Makes the control communicator, allocates all memory, and lets all ranks fail if one has none;
 * then makes the communicator of the world's group. */
static tsh_result tshi_mpi_form(tshi_mpi_world *world, MPI_Comm base, tsh_comm *out,
                                tsh_error *error) {
    MPI_Request request;
    tshi_mpi_group *group;
    size_t n;
    const int room = MPI_MAX_PROCESSOR_NAME;
    int code = MPI_Comm_idup(base, &world->control, &request), here = 0, length;
    tsh_result result = tshi_mpi_opened(world, code, &request, error);
    if (result != TSH_OK) return result;
    (void)MPI_Comm_set_errhandler(world->control, MPI_ERRORS_RETURN);
    (void)MPI_Comm_rank(world->control, &world->rank);
    (void)MPI_Comm_size(world->control, &world->size);
    n = (size_t)world->size;
    group = tshi_mpi_group_new(world, world->size);
    world->report = (tshb_wait_report **)calloc(n, sizeof *world->report);
    world->search = (tshb_coll_search *)calloc(n, sizeof *world->search);
    world->hosts = (char *)calloc(n + 1, (size_t)room);
    world->mine[0] = group && world->report && world->search && world->hosts;
    world->mine[1] = world->rank == 0 ? world->native : 1;
    code = MPI_Iallreduce(world->mine, world->least, 2, MPI_INT, MPI_MIN, world->control, &request);
    result = tshi_mpi_opened(world, code, &request, error);
    if (result != TSH_OK) return result;
    if (!world->least[0] || !group) {
        free(group);
        return tsh_error_set(error, TSH_ERR_MEMORY, -1, "tsh_mpi_open: no memory on some rank");
    }
    (void)MPI_Get_processor_name(world->hosts, &length);
    code = MPI_Iallgather(world->hosts, room, MPI_CHAR, world->hosts + room, room, MPI_CHAR,
                          world->control, &request);
    result = tshi_mpi_opened(world, code, &request, error);
    if (result != TSH_OK) return result;
    for (int r = 1; r <= world->size; r++)
        here += strncmp(world->hosts + (size_t)r * (size_t)room, world->hosts, (size_t)room) == 0;
    world->crowded = here > sysconf(_SC_NPROCESSORS_ONLN);
    world->native = world->least[1];
    if (world->native) world->ops.caps &= ~(uint64_t)TSH_CAP_ORDERED;
    code = MPI_Comm_idup(world->control, &group->comm, &request);
    result = tshi_mpi_opened(world, code, &request, error);
    if (result == TSH_OK) tshi_mpi_join(group, 1, out);
    return result;
}

static tsh_result tshi_mpi_open(const tsh_mpi_desc *desc, int *argc, char ***argv, tsh_comm *out,
                                tsh_error *error) {
    tshi_mpi_world *world, set;
    MPI_Comm base = MPI_COMM_WORLD;
    tsh_result result;
    int inter = 1;
    if (!out) return tsh_error_set(error, TSH_ERR_ARGUMENT, -1, "tsh_mpi_open: out is NULL");
    memset(out, 0, sizeof *out);
    memset(&set, 0, sizeof set);
    set.ops = tshi_mpi_ops;
    set.owner = pthread_self();
    set.native = desc->native > 0;
    if (!tshb_timeout(desc->timeout, "tsh_mpi_desc.timeout", &set.timeout, error) ||
        (!desc->native && tshb_env_int("TSHARD_MPI_NATIVE", 0, 1, &set.native, error) < 0))
        return error->code;
    result = tshi_mpi_init(desc->thread_level, argc, argv, &set.ours, error);
    if (result != TSH_OK) return result;
    if (desc->comm) base = *(const MPI_Comm *)desc->comm;
    if (base != MPI_COMM_NULL) (void)MPI_Comm_test_inter(base, &inter);
    world = inter ? NULL : (tshi_mpi_world *)malloc(sizeof *world);
    if (world) {
        *world = set;
        result = tshi_mpi_form(world, base, out, error);
    } else if (inter) {
        result = tsh_error_set(error, TSH_ERR_ARGUMENT, -1,
                               "tsh_mpi_open: desc->comm is MPI_COMM_NULL or an intercommunicator");
    } else {
        result = tsh_error_set(error, TSH_ERR_MEMORY, -1, "tsh_mpi_open: no memory");
    }
    if (result != TSH_ERR_MEMORY && result != TSH_ERR_ARGUMENT) return result;
    if (world) { /* MPI does not use it any more */
        (void)MPI_Comm_free(&world->control);
        tshi_mpi_world_free(world);
    }
    if (set.ours) (void)MPI_Finalize(); /* returns when all ranks have called it */
    return result;
}

TSH_API tsh_result tsh_mpi_open(const tsh_mpi_desc *desc, tsh_comm *out) {
    tsh_mpi_desc usual;
    tsh_error error;
    memset(&usual, 0, sizeof usual);
    memset(&error, 0, sizeof error);
    (void)tshi_mpi_open(desc ? desc : &usual, NULL, NULL, out, &error);
    if (desc && desc->error) *desc->error = error;
    return error.code;
}

/* Logs why no world was opened; the message begins with this rank if MPI can still tell it. */
static void tshi_mpi_not_open(const tsh_desc *desc, tsh_result code, const char *why) {
    int begun = 0, ended = 0, rank = -1;
    char who[24] = "";
    if (!desc) return;
    (void)MPI_Initialized(&begun);
    (void)MPI_Finalized(&ended);
    if (begun && !ended) (void)MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (rank >= 0) (void)snprintf(who, sizeof who, "rank %d: ", rank);
    tsh_log_message(&desc->logger, "%s%s (%s)", who, why, tsh_result_name(code));
}

TSH_API int tsh_mpi_run_built(int version, size_t real, size_t size, int *argc, char ***argv,
                              const tsh_desc *desc, int (*fn)(tsh_ctx *ctx, void *user),
                              void *user) {
    tsh_mpi_desc usual;
    tsh_comm comm;
    tsh_error why = {TSH_ERR_ARGUMENT, -1, "tsh_mpi_run: fn is NULL"};
    if (!tshb_same_build("tsh_mpi_run", version, real, size, desc)) return 1;
    memset(&usual, 0, sizeof usual);
    if (fn && tshi_mpi_open(&usual, argc, argv, &comm, &why) == TSH_OK)
        return tsh_run_on(&comm, desc, fn, user, NULL); /* logs its own errors */
    tshi_mpi_not_open(desc, why.code, why.message);
    return 1;
}

TSH_API int(tsh_mpi_run)(int *argc, char ***argv, const tsh_desc *desc,
                         int (*fn)(tsh_ctx *ctx, void *user), void *user) {
    return tsh_mpi_run_built(1, 0, 0, argc, argv, desc, fn, user);
}

#undef TSHI_MPI_MS
#undef TSHI_MPI_CALL

#ifdef __cplusplus
}
#endif
#endif
