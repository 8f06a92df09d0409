/* tshard_uv.h - one process per rank: collectives over TCP and in shared memory, driven by libuv
 *
 * ========================================================================== */
/* >>uv-manual                                             MARK: - uv-manual */
/* How to use the libuv backend, what it promises and what it does not.        */
/* Needs: nothing.                                                              */
/* ==========================================================================
 *
 *
 *     #define TSHARD_IMPLEMENTATION           // in exactly one source file
 *     #include "tshard.h"
 *     #include "backends/tshard_uv.h"
 *
 *     static int rank_main(tsh_ctx *ctx, void *user) { ...; return 0; }
 *     int main(void) {
 *         tsh_desc desc = {.logger.log = tsh_log_stderr};      // prints errors
 *         return tsh_uv_run(NULL, &desc, rank_main, NULL);
 *     }
 *
 * compile with -D_POSIX_C_SOURCE=200809L (or -std=gnu99) -pthread -luv -lsodium, and start it:
 *
 *     tshard-run -n 4 ./prog                                            4 ranks of this host
 *     tshard-run --hosts alpha:2,beta:2 --node-rank 0 ./prog            on alpha, and
 *     tshard-run --hosts alpha:2,beta:2 --node-rank 1 ./prog            on beta, with one key
 *     torchrun --no_python --nproc_per_node 4 ./prog                    or srun -n 4 ./prog
 *
 * DOES
 *
 * - run every collective of tshard.h with sums in the documented order: a run can be repeated on
 *   the threads backend, in one debugger, with bitwise the same results;
 * - send short arrays directly from each rank to each, and long ones along a ring, in segments that
 *   are summed and forwarded as they arrive. Long sums of 16-bit floats are rounded only once, so
 *   each piece goes directly to the rank that sums it, and its sum back: as many bytes as on a
 *   ring. Bytes that need no sum are not copied. Every group has its own connections;
 * - send what is gathered to a host once, not once per rank, where ranks that share memory are side
 *   by side in the group, as tshard-run deals them: of an all-reduce of n bytes, H hosts of R ranks
 *   send (H-1)/H n + (HR-1)/(HR) n each, for the order of sums passes through the ranks in turn;
 *   of 16-bit floats (H-1)/H n + (H-1) R/H n, for they are sent before they are summed;
 * - use shared memory between ranks of one host, on 64-bit Linux: of one user, and in one network
 *   namespace. What a rank sends in a collective of up to 2 KiB is written once, for all others to
 *   read. The memory has no name, so a rank that is killed leaves nothing behind, and is reserved
 *   before use. Sums have the same bits as over TCP, and errors are the same. Where the system
 *   refuses, TCP is used, and one line logged (TSHARD_SHM);
 * - on request (TSHARD_SHM=2, or tsh_uv_desc.tensors) have tensors in memory that the ranks of this
 *   host can read, but not write: what is sent is then copied once, or summed where it lies. That
 *   is for long arrays that are sent unchanged more than once, as weights are: their all-gathers
 *   and reduce-scatters take as long as on the threads backend, in place of two or three times as
 *   long. Where a rank soon overwrites what others have read, it gains little, and more ranks than
 *   cores lose. A tensor takes memory when it is made, not when it is written, also in a dry run,
 *   and is in no core dump. It has no huge pages where Linux gives none to shared memory
 *   (/sys/kernel/mm/transparent_hugepage/shmem_enabled);
 * - let a waiting rank spin briefly if every rank of its host has a core, and then sleep;
 * - report one error, the same on every rank, that names the rank at fault: at once if a process
 *   ends; after TSHARD_HEARTBEAT if a process is stopped or cut off; soon if ranks call different
 *   collectives or wait for each other in a cycle; after a timeout if a rank never calls. A small
 *   thread in each process watches for errors, also while its rank computes;
 * - find bytes that the network changes, which TCP's own 16-bit sum often misses: each header, and
 *   each 256 KiB of data at most, has a CRC32C, on connections between other addresses than
 *   loopback (TSHARD_CHECKSUM). No byte is summed or sent on before it is checked; the error names
 *   both ends of the connection. A damaged handshake is repeated;
 * - encrypt what ranks of several hosts send, if there is a key (SECURITY);
 * - open /dev/null where stdin, stdout or stderr is closed, as daemons have them, and leave it so;
 * - tell the logger which ranks are absent if the world is not complete after 10 s: rank 0 says
 *   it, other ranks only what it cannot know. Joining goes on until TSHARD_TIMEOUT.
 *
 * A NETWORK THAT BREAKS
 *
 * Ranks agree on one error through a coordinator, the lowest rank that is not lost. A rank that
 * finds an error reports it to the coordinator, which sends its decision to all ranks. A silent
 * rank counts as lost after TSHARD_HEARTBEAT; half a second later all lost ranks are known.
 *
 * - A break that heals before that causes no error. TCP retransmits at growing intervals, so a
 *   connection may stay silent for up to twice as long as the break lasted.
 * - If the network is cut into two sides, the world fails on both with the same error. It blames
 *   the lowest rank of the smaller side; of equal sides, of the one without the lowest rank. Of two
 *   ranks that is rank 1. Each side finds this without hearing the other, so the error does not
 *   depend on when the cut heals. A rank that was cut off never decides for the others. If a rank
 *   closes its world or is stopped just before or during the cut, the error is the same only if
 *   both sides knew that: each side counts the ranks that it knew of.
 * - A stopped process sends nothing, but its system still acknowledges what arrives: its rank is
 *   blamed. When the process continues, it gets the same error.
 * - Cuts into three or more sides, or only between two ranks that a third rank hears, cause errors
 *   that name an end of a broken connection on every rank, but not always the same error.
 * - A data connection that a firewall or NAT has dropped is found when a rank waits on it: an error
 *   names both ends, TSHARD_HEARTBEAT after the first byte that does not arrive. A peer that only
 *   computes, or does not read, is not reported.
 *
 * DOES NOT
 *
 * - move data in the background: bytes move only during calls of start, test, wait and progress;
 * - limit the time of a host name lookup: it takes as long as the system's resolver takes;
 * - continue without a lost rank: the world fails. tshard-run --max-restarts starts it again;
 * - use several networks;
 * - connect more than 1,024 ranks, or machines of different byte orders;
 * - survive if another thread takes the last memory between tshard's test (64 KiB while a world
 *   opens, later 16 bytes for each descriptor) and libuv's own allocation: libuv 1.44 then aborts
 *   the process; or if memory runs out while glibc 2.36 looks up a host name, which crashes (an
 *   address is not looked up). Other lack of memory is an error;
 * - survive fork(), or use a rank's comms from several threads; only tsh_comm_abort may come from
 *   any thread.
 *
 * COSTS, in a world of P ranks, per rank
 *
 * Descriptors: 3 (P-1) connections and 13, and 1 for each rank that shares memory; a group of p
 * ranks 2 (p-1) more. Memory from libc's malloc: about 160 KiB, and 20 KiB per rank, for the world;
 * 65 KiB, and 10 KiB per member, for a group; 1 MiB, kept until its group is closed, for each long
 * sum that is in flight at once; 2 KiB per encrypted connection, and up to 256 KiB once it has
 * carried long arrays; and the system's socket buffers. Shared memory: for a group 33 KiB, and for
 * each other member on this host 520 KiB, less in groups of more than 8; and 1 GiB of addresses for
 * each rank of this host, with tensors there also as many as the host has memory. Heartbeats: a
 * packet to each rank every 250 ms.
 *
 * ENVIRONMENT: read for each setting that the tsh_uv_desc leaves out. An empty variable counts as
 * unset. Rank and size come from the first family that sets them: TSHARD_, torchrun's, Slurm's. If
 * none does, the world is one rank. An invalid value is an error that names the variable.
 *
 *     TSHARD_RANK, TSHARD_SIZE   this rank and how many there are; else RANK, WORLD_SIZE; else
 *                                SLURM_PROCID, SLURM_NTASKS
 *     TSHARD_HOST                host where rank 0 listens; else MASTER_ADDR; else, with Slurm, the
 *                                first host of SLURM_STEP_NODELIST or SLURM_JOB_NODELIST; else
 *                                127.0.0.1
 *     TSHARD_PORT                port of rank 0; else MASTER_PORT, plus 1 if
 *                                TORCHELASTIC_USE_AGENT_STORE is True (torchrun's store listens on
 *                                that port); else, with Slurm, 20000 + SLURM_JOB_ID mod 20000
 *     TSHARD_BIND                address this rank listens on; else rank 0: its host, other ranks:
 *                                the address from which they reach rank 0. 0.0.0.0 or :: is all
 *     TSHARD_INTERFACE           name of a network interface, such as eth0: as TSHARD_BIND with
 *                                that interface's address (TSHARD_BIND goes before)
 *     TSHARD_LISTENER            rank 0: descriptor number of a socket that listens already
 *     TSHARD_JOB                 a name that keeps apart jobs that share a key; else empty
 *     TSHARD_KEY                 the shared secret, 16 bytes or more
 *     TSHARD_KEY_FILE            a file that holds the key; line ends after the key do not count.
 *                                The file must belong to root or this user, and no other user may
 *                                read it. `tshard-run --new-key FILE` writes one
 *     TSHARD_INSECURE            1: let other hosts connect without a key; 0 (default): do not
 *     TSHARD_CHECKSUM            1: check the bytes of all data connections of this rank, 0: of
 *                                none on which the other end does not ask for it; default: of
 *                                those that are not loopback. Control messages are always checked
 *     TSHARD_ENCRYPT             1: encrypt all connections of this rank, 0: none on which the
 *                                other end does not ask for it; default: with a key, those that
 *                                are not loopback. These have tags in place of checksums
 *     TSHARD_SHM                 0: use TCP within a host, too; 1 (default): use shared memory; 2:
 *                                have the tensors of tsh_uv_run's ctx in it, too
 *     TSHARD_TIMEOUT             seconds after which joining, or a collective without timeout_ns,
 *                                fails; default 300; 0: never
 *     TSHARD_HEARTBEAT           seconds of silence after which a rank counts as lost, 1 or more;
 *                                default 10; 0: never, for debuggers
 *
 * SECURITY
 *
 * Protected: who can join. On loopback no key is needed; any other address needs a key, or
 * TSHARD_INSECURE. Both ends of every connection prove that they know the key, the client first, by
 * HMAC-SHA256 over both ends' ephemeral public keys, both ranks, the connection's purpose, job,
 * world size and version; so neither a replayed nor a reflected handshake is accepted. The key of
 * that HMAC comes from CPace, a key exchange (on ristretto255) in which each attempt to join tests
 * one guess of the key at most, and a recorded handshake tests none.
 *
 * Protected: what is sent after the handshake, on connections that are encrypted (TSHARD_ENCRYPT):
 * control messages, headers and data, by AES-256-GCM where both processors compute it, else by
 * ChaCha20-Poly1305. Each connection has its own two keys, from its handshake's ephemeral keys: who
 * learns TSHARD_KEY later cannot read what was recorded before. Whoever is on the path learns how
 * many bytes are sent when, and can end connections. Bytes that are changed, repeated, left out or
 * moved have a wrong tag: one error, which names both ends of the connection, and no wrong number.
 *
 * Not protected: connections that are not encrypted: anybody on the path can read and change them;
 * checksums find accidents, not attacks. Whoever knows the key is trusted: a rank can make the
 * world fail, and blame any rank for it. Without a key any local user may join a loopback job
 * (tshard-run -n makes a random key), and with TSHARD_INSECURE anybody who can connect, also in
 * between two ranks whose connection is encrypted.
 *
 * UNAUTHENTICATED CONNECTIONS, FIREWALLS
 *
 * While the world is set up, rank 0 listens on its port, and each other rank on a port that the
 * system picks (net.ipv4.ip_local_port_range). While a group is set up, its members listen on other
 * such ports. Firewalls between hosts must let these through. Once connected, no rank listens.
 *
 * To a connection that is not authenticated yet, a rank sends the protocol version and an ephemeral
 * public key, and it reads 116 bytes from it, within 5 s. At most half of the descriptors that
 * `ulimit -n` allows beyond tshard's own need, 8 to 1,024, are used for such connections; when they
 * are in use, each new connection replaces one chosen at random. Scanners, browsers, wrong keys and
 * other jobs are refused; once a second the logger gets their number and the address of the last
 * one. Ranks that were replaced connect again. A rank that is refused by a server without a proof
 * that it has the key logs that, and connects again until the timeout. */

/* ========================================================================== */
/* >>contents                                                MARK: - contents */
/* The sections of this file, in reading order; search for ">>name".          */
/* Needs: nothing.                                                            */
/* ==========================================================================
 *
 *   src/uv/             one process per rank, over TCP
 *     >>uv-manual       how to use it, what it promises and what not
 *     >>uv-api          the runner, and comms for one's own
 *     >>uv-types        the structs of a world
 *     >>uv-check        CRC32C
 *     >>uv-wire         encoding of messages; nothing received is trusted
 *     >>uv-secret       keys of a connection by CPace; its ciphers
 *     >>uv-socket       addresses and sockets
 *     >>uv-shm          shared memory between ranks of one host
 *     >>uv-heap         a heap for tensors in shared memory
 *     >>uv-settings     tsh_uv_desc, then the environment
 *     >>uv-error        the world's first error
 *     >>uv-post         sending control messages
 *     >>uv-decide       how ranks agree on one error, and whom it blames
 *     >>uv-cycle        ranks that wait for each other
 *     >>uv-connect      the handshake
 *     >>uv-share        finding the ranks of this host, and exchanging shared memory
 *     >>uv-form         setting up the connections of a world, of a group
 *     >>uv-hear         received control messages
 *     >>uv-admit        dialling, accepting
 *     >>uv-control      the control thread: heartbeats, timeouts
 *     >>uv-group        a group, its connections and operations
 *     >>uv-algorithm    which bytes go where
 *     >>uv-sealed       frames of encrypted connections
 *     >>uv-flow         frames on the data connections
 *     >>uv-shm-flow     frames in shared memory
 *     >>uv-board        small collectives in shared memory
 *     >>uv-advance      moving all bytes that can be moved now
 *     >>uv-start        starting a collective
 *     >>uv-wait         waiting for one
 *     >>uv-ops          the backend's eight functions
 *     >>uv-world        joining and closing a world; the runner
 */

#include "tshard_backend.h"

#ifndef TSHARD_UV_H
#define TSHARD_UV_H

#ifdef __cplusplus
extern "C" {
#endif

/* ========================================================================== */
/* >>uv-api                                                    MARK: - uv-api */
/* tsh_uv_run runs a function in a world of processes; tsh_uv_open joins one. */
/* Needs: the public part of tshard.h.                                        */
/* ========================================================================== */

/* How this process joins its world. Settings that are left 0 or NULL are read from the environment
 * (see ENVIRONMENT in the manual above). If that has none either, the world is one rank. */
typedef struct tsh_uv_desc {
    int rank, size;    /* this rank, and the number of ranks; size 0: both from the environment */
    const char *host;  /* name or address of the host where rank 0 listens; NULL: from the
                          environment, else 127.0.0.1 */
    int port;          /* TCP port of rank 0; 0: from the environment */
    const char *bind;  /* address on which this rank listens; NULL: TSHARD_BIND, else rank 0: host,
                          other ranks: the address from which they reach rank 0 */
    const char *interface_name; /* name of a network interface whose address is used if neither bind
                          nor TSHARD_BIND is given; NULL: TSHARD_INTERFACE, else none */
    int listener;      /* rank 0: file descriptor of a socket that listens already; 0:
                          TSHARD_LISTENER, else rank 0 opens a socket */
    const char *job;   /* name of the job, which keeps apart jobs that share a key; NULL:
                          TSHARD_JOB, else "" */
    const void *key;   /* secret that all ranks share; NULL: TSHARD_KEY, else TSHARD_KEY_FILE, else
                          there is none */
    size_t key_size;   /* size of key in bytes, 16 or more */
    int checksum;      /* 1: data connections have checksums; negative: they have none, unless the
                          peer wants them; 0: as TSHARD_CHECKSUM says, else those that are not
                          loopback have them */
    int encrypt;       /* 1: connections are encrypted; negative: they are not, unless the peer
                          wants that; 0: as TSHARD_ENCRYPT says, else those that are not loopback
                          are, if there is a key */
    int insecure;      /* 1: other hosts may connect without a key; 0: as TSHARD_INSECURE says */
    int tensors;       /* 1: the tensors of tsh_uv_run's ctx are in shared memory, where ranks of
                          this host read them (tsh_uv_allocator); negative: they are not; 0: as
                          TSHARD_SHM says */
    double timeout;    /* seconds after which joining, or a collective without timeout_ns, fails;
                          negative: never; 0: TSHARD_TIMEOUT, else 300. Looking up the names in host
                          and bind may take longer */
    double heartbeat;  /* seconds of silence after which a rank counts as lost, 1 or more; negative:
                          never; 0: TSHARD_HEARTBEAT, else 10 */
    double notice;     /* if the world is still incomplete after so many seconds, the absent ranks
                          are logged, once; negative: never; 0: 10 */
    tsh_logger logger; /* logs refused connections and the absent ranks. Called by the backend's own
                          thread, it must return quickly: no heartbeat is sent meanwhile. All zero:
                          tsh_uv_run uses tsh_desc.logger, tsh_uv_open logs nothing */
    tsh_error *error;  /* receives the error of tsh_uv_open or tsh_uv_run; NULL: tsh_uv_open
                          logs its error instead */
} tsh_uv_desc;

/* Joins the world and returns when all ranks have joined. *out: the comm of all ranks, which the
 * caller closes with tsh_comm_close. desc NULL: all settings from the environment. Errors:
 * TSH_ERR_ARGUMENT (a setting that makes no sense), TSH_ERR_IO (no socket, no address),
 * TSH_ERR_TIMEOUT (with the list of absent ranks, or since keys differ), TSH_ERR_LOST,
 * TSH_ERR_MEMORY. */
TSH_API tsh_result tsh_uv_open(const tsh_uv_desc *desc, tsh_comm *out);
/* Returns an allocator, for tsh_desc.allocator of a ctx on this comm, whose blocks of 16 KiB and
 * more lie in memory that the ranks of this host read: what a collective or message of 16 KiB and
 * more sends from there is copied once, or summed where it lies, not copied into a ring and out of
 * it. Smaller blocks come from malloc; so do all if the system has no memory for more. The
 * allocator is for one thread, the one that uses the comm, and lives until the world is closed and
 * all blocks are freed. Returns an empty one, which stands for malloc, if tsh_uv_desc.tensors is
 * not wanted (tsh_uv_open), there is no shared memory, or comm is not of this backend. */
TSH_API tsh_allocator tsh_uv_allocator(const tsh_comm *comm);
/* Joins the world, opens a ctx by desc (NULL: all defaults; its comm is ignored), runs fn in it and
 * closes both. Returns fn's result, or 1 if fn is NULL or the world or the ctx could not be opened;
 * that error is copied to uv->error and logged by desc->logger, or by uv->logger if desc has
 * none. If uv->tensors is wanted and desc has no allocator, the ctx gets that of
 * tsh_uv_allocator. */
TSH_API int tsh_uv_run(const tsh_uv_desc *uv, const tsh_desc *desc,
                       int (*fn)(tsh_ctx *ctx, void *user), void *user);
TSH_API int tsh_uv_run_built(int version, size_t real, size_t size, const tsh_uv_desc *uv,
                             const tsh_desc *desc, int (*fn)(tsh_ctx *ctx, void *user),
                             void *user);
#define tsh_uv_run(...) tsh_uv_run_built(TSH_BUILT, __VA_ARGS__)

#ifdef __cplusplus
}
#endif
/* ========================================================================== */
/* end of header: stop here if you only want the API                           */
/* ========================================================================== */
#endif

#if defined(TSHARD_IMPLEMENTATION) && defined(_WIN32)
#error "tshard_uv.h does not run on Windows: beside libuv it uses POSIX sockets, poll and sendmsg"
#elif defined(TSHARD_IMPLEMENTATION) && !defined(TSHARD_UV_IMPLEMENTED)
#define TSHARD_UV_IMPLEMENTED

/* ========================================================================== */
/* >>uv-types                                      MARK: - uv-types (private) */
/* The structs of a world. Each process of a world has two threads.           */
/* The caller's thread moves data: two data connections per peer and group.   */
/* The control thread makes connections, sends heartbeats, decides on errors. */
/* It has one control connection per peer, for short messages (tshi_uv_type). */
/* What both threads use is guarded by world->lock, or atomic.                */
/* Needs: >>uv-api.                                                           */
/* ========================================================================== */

#if !defined(__GNUC__)
#error "tshard_uv.h needs the __atomic builtins of gcc or clang"
#endif
#if defined(__has_include)
#if !__has_include(<uv.h>)
#error "tshard_uv.h needs libuv: install libuv1-dev, link with -luv"
#elif !__has_include(<sodium.h>)
#error "tshard_uv.h needs libsodium: install libsodium-dev, link with -lsodium"
#endif
#endif

#include <errno.h>
#include <fcntl.h>  /* O_NONBLOCK, FD_CLOEXEC */
#include <limits.h> /* INT_MAX */
#include <netdb.h>  /* getaddrinfo */
#include <netinet/in.h>
#include <netinet/tcp.h> /* TCP_NODELAY */
#include <sched.h>       /* sched_yield */
#include <signal.h>      /* pthread_sigmask */
#include <stdarg.h>
#include <stddef.h> /* offsetof */
#include <stdio.h>  /* snprintf */
#include <stdlib.h> /* calloc, strtol */
#include <string.h>
#include <sys/ioctl.h>    /* TIOCOUTQ */
#include <sys/resource.h> /* getrlimit */
#include <sys/socket.h>
#include <sys/stat.h> /* fstat: who can read a key file */
#include <sys/uio.h>  /* struct iovec */
#include <unistd.h>

#ifndef SIG_BLOCK
#error "tshard_uv.h needs POSIX: compile with -D_POSIX_C_SOURCE=200809L (or -std=gnu99)"
#endif

#if defined(__linux__) && defined(__LP64__)
#define TSHI_UV_SHM 1 /* ranks of one host may use shared memory */
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h> /* SYS_memfd_create, SYS_fallocate */
#include <sys/un.h>
#if !defined(SO_PEERCRED)
#include <asm/socket.h> /* SO_PEERCRED, hidden under -std=c99 */
#endif
#else
#define TSHI_UV_SHM 0
#endif

#include <sodium.h> /* HMAC-SHA256, ristretto255, AES-256-GCM, ChaCha20-Poly1305 */
#include <uv.h>

#if defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h> /* CRC32C */
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define TSHI_UV_GET(place)        __atomic_load_n((place), __ATOMIC_SEQ_CST)
#define TSHI_UV_PUT(place, value) __atomic_store_n((place), (value), __ATOMIC_SEQ_CST)

/* 1 s and 1 ms in ns, the unit of all times and durations of type int64_t */
#define TSHI_UV_SECOND INT64_C(1000000000)
#define TSHI_UV_MS     INT64_C(1000000)

enum {
    TSHI_UV_OPS = 64, /* most operations in flight in one group; a tsh_comm has the same limit */
    /* A group remembers so many of its latest collectives: the coordinator, the rank that decides
     * on errors, may ask about them. */
    TSHI_UV_RECORDS = 128,
    /* most entries of send_counts (and recv_counts) that are kept of a remembered collective */
    TSHI_UV_COUNTS = 16,
    /* most entries of the iovec, for headers and payload, that one sendmsg or recvmsg takes */
    TSHI_UV_IO_SPANS = 64,
    TSHI_UV_IO_BYTES = 1 << 20, /* most bytes of payload per sendmsg or recvmsg */
    TSHI_UV_RANKS = 1024, /* most ranks in a world: their addresses fit in one control message */
    TSHI_UV_NAME = 32,    /* bytes for a group's name ("tp", "group 7") with its final 0 */
    /* upper bound of the limit of unauthenticated connections (world->unproven_limit) */
    TSHI_UV_UNPROVEN = 1024,
    TSHI_UV_FEW = 8,      /* lower bound of the limit of unauthenticated connections */
    TSHI_UV_ACCEPTS = 64, /* most connections accepted per event of the listener */
    TSHI_UV_SPARES = 64,  /* most ephemeral keys that are kept for the next connections */
    /* SO_SNDBUF, in bytes, of a connection between two ranks of one host */
    TSHI_UV_NEAR = 512 << 10,
    /* bytes of a segment; a ring sends every chunk in segments (>>uv-algorithm) */
    TSHI_UV_SEGMENT = 512 << 10,
    /* bytes of the circular buffer into which a ring receives what is to be summed; must be more
     * than TSHI_UV_SEGMENT */
    TSHI_UV_WINDOW = 1 << 20
};

/* Header of a frame on a data connection. A frame is this header and the payload that one
 * collective or message sends to one peer. It is sent as it lies in memory, since all ranks have
 * the same byte order: a rank with another one has another world->job (tshi_uv_settings), so the
 * handshake refuses it. */
typedef struct tshi_uv_head {
    uint64_t group, /* id of the group */
        /* seq: number of the collective in its group, or of the message among those from its sender
         * to its receiver */
        seq, digest, bytes; /* digest: hash of the call, 0: a message; bytes: size of the payload */
    int64_t count;          /* collective: tsh_coll.count; message: its number of elements */
    int32_t tag;            /* tag of a message; 0: a collective */
    uint8_t kind,      /* tsh_coll_kind; TSH_RECV: a "clear", which lets the peer send a message */
        dtype,         /* tsh_dtype of a message, 0 for a collective */
        refers,        /* 1: in shared memory: the payload is given by reference */
        pad[5];        /* zeros */
    uint32_t check;    /* CRC32C of all fields above; 0: the connection has no checksums */
} tshi_uv_head;

/* A collective that a rank has started in a group: kept to compare it with the calls of other
 * ranks, and to describe it in an error. */
typedef struct tshi_uv_record {
    tsh_coll coll;   /* the call; its pointers are not valid */
    uint64_t digest; /* hash of the call: the same on all ranks that made the same call */
    int counts;      /* number of valid entries of send_counts, and of recv_counts */
    /* entry r: elements sent to, and received from, rank r of the group */
    int64_t send_counts[TSHI_UV_COUNTS], recv_counts[TSHI_UV_COUNTS];
} tshi_uv_record;

/* How much of one frame has been sent to, or received from, one peer. If the connection has
 * checksums, the payload is cut into blocks (tshi_uv_block), each followed by its checksum of 4
 * bytes. */
typedef struct tshi_uv_stream {
    int64_t total, done; /* bytes of payload: of the whole frame; sent or received so far */
    /* Offsets in the payload. block: end of the current block; good: end of the last complete one.
     * Received bytes are used only up to `good`: the checksum of later ones is not verified yet. */
    int64_t block, good;
    int64_t summed; /* of a sent frame: how many bytes of the payload `check` covers so far */
    /* of a sent frame: bytes of its header sent so far. Of a received frame: only used for a
     * message of this rank to itself: not 0 once it is copied */
    size_t head;
    size_t tail; /* bytes of the current block's checksum sent or received so far */
    /* check: CRC32C of the payload so far, computed here; received: the one that the peer sent */
    uint32_t check, received;
} tshi_uv_stream;

/* Which ranks exchange the bytes of an operation. */
typedef enum tshi_uv_algorithm {
    TSHI_UV_DIRECT, /* each rank sends its data directly to each other rank */
    /* each rank sends to the next one, which sums or stores what it gets and forwards it */
    TSHI_UV_RING,
    /* sum: rank k gets chunk k from each rank, sums it, and (all-reduce) sends it to each */
    TSHI_UV_PIECES,
    /* broadcast: root sends to the next rank, and each rank forwards to its next one */
    TSHI_UV_CHAIN,
    TSHI_UV_STAR,   /* broadcast: root sends to each other rank */
    TSHI_UV_BOARD,  /* small: each rank shows its data to all others in shared memory */
    TSHI_UV_MESSAGE /* SEND, RECV and SENDRECV, between two ranks */
} tshi_uv_algorithm;

typedef struct tshi_uv_group tshi_uv_group;
typedef struct tshi_uv_channel tshi_uv_channel; /* the ciphers of a connection (>>uv-secret) */

/* A slot for an operation (collective or message) in flight. Used by the caller's thread only. */
typedef struct tshi_uv_op {
    tshi_uv_group *group;
    tsh_coll coll; /* the collective or message, as the caller described it */
    int64_t width; /* bytes of an element */
    tshi_uv_algorithm algorithm;
    tshi_uv_head head; /* header of all frames of a collective; unused for a message */
    int64_t deadline;  /* time at which the operation times out */
    int used;          /* 1: started, and not waited for yet; 0: the slot is free */
    int pending;       /* number of its frames that are not completely sent or received */
    /* RING: bytes of the incoming stream that are summed (if they need to be) and may be forwarded;
     * PIECES: bytes of this rank's chunk that are summed */
    int64_t ready;
    /* number of collectives on the board that were started up to and including this one */
    uint64_t boarded;
    int seen;                 /* BOARD: ranks [0, seen) are known to have shown their data */
    tshi_uv_stream *in, *out; /* progress of the frame from, and to, each rank of the group */
    /* RECV: progress of sending the "clear", the header that allows the peer to send its message */
    tshi_uv_stream clear;
    uint64_t number[2]; /* number of the message that is sent ([0]), or received ([1]) */
    char *scratch; /* buffer for received data that is to be summed; kept for the slot's next sum */
    size_t scratch_size; /* size of the scratch buffer in bytes */
} tshi_uv_op;

/* A queue of operations, in the order in which they use one direction of a connection. */
typedef struct tshi_uv_fifo {
    unsigned char op[TSHI_UV_OPS]; /* ring buffer of indices into group->op */
    unsigned first, used;          /* position of the oldest entry; number of entries */
} tshi_uv_fifo;

/* Each rank has a segment of shared memory, which the ranks of its host map. It begins with a
 * tshi_uv_shm_segment; then come, for each group, a row for each connection of the rank: counters
 * on a page of their own, and a ring, a circular buffer of bytes for the peer (>>uv-shm). At its
 * end is the heap (>>uv-heap), if there is one. */
enum {
    TSHI_UV_SHM_GROUPS = 128,     /* most groups of a rank that use shared memory */
    TSHI_UV_SHM_PAGE = 4096,      /* bytes of a row's page of counters, and of the heap's pages */
    TSHI_UV_SHM_SIZE = 1 << 30,   /* bytes of a segment before the heap; most have no memory */
    TSHI_UV_SHM_PIECE = 64 << 10, /* most bytes copied before the peer is told of them */
    TSHI_UV_SLOTS = 16,           /* slots of a rank in a group (>>uv-board) */
    TSHI_UV_SLOT_MOST = 2 << 10,  /* bytes of data in a slot, less in groups of over 32 */
    TSHI_UV_SHM_LEAST = 16 << 10, /* smaller blocks are not in the heap */
    /* Smaller payloads are not sent by reference; those of an all-reduce, whose buffer both ends
     * write next, only if larger than caches: a core writes slowly what another has read */
    TSHI_UV_SHM_REFERS = 4096,
    TSHI_UV_SHM_REFERS_SUM = 2 << 20,
    /* most bytes that are copied, or summed, out of another rank's heap before this rank looks at
     * its other connections */
    TSHI_UV_SHM_STEP = 128 << 10
};

/* Where the rows of one group are in a segment. All fields are atomic, and written by the segment's
 * owner only. */
typedef struct tshi_uv_shm_entry {
    uint64_t id;     /* id of the group; 0: the entry is free */
    uint64_t offset; /* offset of the group's first row in the segment */
    uint64_t closed; /* 1: the owner has closed the group */
} tshi_uv_shm_entry;

typedef struct tshi_uv_shm_segment {
    uint64_t sleeps; /* atomic: odd while the owner's thread sleeps; grows with each sleep */
    char apart[56];  /* padding: gives `sleeps` a cache line of its own */
    /* atomic: 1: the owner's world has failed: its heap may change while others read it */
    uint64_t withdrawn;
    tshi_uv_shm_entry group[TSHI_UV_SHM_GROUPS]; /* [0]: entry of the world's group */
    /* [r]: atomic: 1: the owner has mapped the segment of world rank r, and has rows for it */
    unsigned char near[TSHI_UV_RANKS];
} tshi_uv_shm_segment;

/* What one rank shows to all others of its group in a collective on the board (>>uv-board). The
 * bytes follow. */
typedef struct tshi_uv_slot {
    uint64_t number; /* atomic, written last: tshi_uv_op.boarded of the collective; 0: none yet */
    uint64_t seq, digest; /* as in tshi_uv_head */
} tshi_uv_slot;

/* What this rank knows of the segment of a rank of this host, or of its own. */
typedef struct tshi_uv_near {
    char *base;    /* where the segment is mapped; NULL: it is not */
    int64_t size;  /* its bytes, the heap included */
    int bell;      /* eventfd that wakes the rank's thread; -1: none */
    uint64_t rung; /* the value of `sleeps` for which this rank rang the bell last */
} tshi_uv_near;

/* The bytes [begin, end) of a payload by reference, where this rank reads them. */
typedef struct tshi_uv_source {
    const char *at;
    int64_t begin, end;
} tshi_uv_source;

typedef struct tshi_uv_heap tshi_uv_heap; /* >>uv-heap */

/* The two rings of a data connection in shared memory. Positions count the bytes of a ring since
 * its beginning; byte n is at offset n % size. */
typedef struct tshi_uv_pipe {
    char *out;      /* ring for bytes to the peer; NULL: the connection uses its socket */
    const char *in; /* ring for bytes from the peer */
    int64_t size;   /* bytes of each ring: a power of two */
    /* sent: end of the bytes in `out`; taken: beginning of those in `in` that are still needed.
     * Both are in this rank's segment, and atomic */
    int64_t *sent, *taken;
    const int64_t *peer_sent, *peer_taken; /* the peer's counters of the same names */
    const tshi_uv_shm_entry *theirs;       /* the group's entry in the peer's segment */
    int64_t seen_sent, seen_taken;         /* peer_sent and peer_taken as read last */
    int64_t wrote, read;                   /* positions of the next byte to write, and to read */
    int64_t payload; /* position at which the payload of the frame that is being read begins */
    int refers;      /* 1: the payload of the frame that is being written is sent by reference */
    /* of the frame being read, if by reference: what is summed where it lies; what is copied */
    tshi_uv_source summed, copied;
} tshi_uv_pipe;

/* A data connection to one peer of a group. A pair of ranks has two, one for collectives and one
 * for messages, so that neither kind blocks the other. A message is sent only after its receiver
 * has sent a "clear", a header of kind RECV without payload. Otherwise a message that nobody
 * receives yet would block the clears that follow it. */
typedef struct tshi_uv_link {
    tshi_uv_group *group;
    /* fd: socket, -1: not connected, or peer is this rank; peer: the peer's rank in the group */
    int fd, peer;
    int checks;    /* 1: headers and payload have checksums */
    tshi_uv_channel *channel; /* NULL: the connection is not encrypted */
    int confirmed; /* control thread: 1 once the peer has sent LINKED (it has both connections) */
    /* queues of operations that are to receive (in), to send (out), to send a clear (clears) */
    tshi_uv_fifo in, out, clears;
    tshi_uv_fifo *writing; /* queue whose first operation is sending its frame; NULL: none */
    tshi_uv_head heard;    /* header of the frame that is being received */
    size_t heard_done;     /* bytes of that header received so far */
    /* number of SENDs to the peer, and of RECVs from it, that this rank has started */
    uint64_t sends, receives;
    /* sent: number of messages whose sending has begun; cleared: number of clears received */
    uint64_t sent, cleared;
    /* received clears; the one for message n is entry n % TSHI_UV_OPS */
    tshi_uv_head clear[TSHI_UV_OPS];
    int want, polled;    /* libuv events (UV_READABLE, ...): want: awaited; polled: watched now */
    uint64_t wrote, got; /* atomic: bytes written to, and read from, the socket, with headers */
    int awaits; /* atomic: not 0 if the caller's thread sleeps until the peer sends more bytes */
    uint64_t peer_got;   /* control thread: bytes that the peer had received at its last AWAIT */
    int64_t peer_got_at; /* control thread: when the peer's last AWAIT message arrived */
    /* control thread: since when written bytes do not arrive (peer_got does not grow and is less
     * than wrote); 0: they arrive */
    int64_t stalled_since;
    uv_poll_t *poll;   /* watches fd for the caller's thread; NULL until that first sleeps */
    tshi_uv_pipe pipe; /* the connection's rings in shared memory, if it has any */
    char *slots; /* the peer's slots (>>uv-board), or this rank's own; NULL: not for collectives */
} tshi_uv_link;

typedef struct tsh_uv_world tsh_uv_world;

struct tshi_uv_group {
    tsh_uv_world *world;
    tshi_uv_group *next;  /* next group in world->groups; guarded by world->lock */
    uint64_t id, started; /* id: the same on all members; started: number of collectives started */
    /* rank: this rank in the group; size: number of members; active: operations in flight */
    int rank, size, active;
    int *ranks; /* world rank of each member, by rank of the group */
    /* [r]: connection for collectives with peer r; [size + r]: for messages with r */
    tshi_uv_link *link;
    tshi_uv_op op[TSHI_UV_OPS]; /* slots of operations; a tsh_req is the index of one, plus 1 */
    tshi_uv_stream *streams;    /* array that all op[].in and op[].out point into */
    /* The latest collectives that this rank started: number seq is entry seq % TSHI_UV_RECORDS.
     * Guarded by world->lock. */
    tshi_uv_record record[TSHI_UV_RECORDS];
    /* The fields below are used by the control thread, once the caller's thread has set
     * world->requested to this group. */
    /* listener: listening socket, -1: none; missing: number of connections that are not made yet
     * and of LINKED messages that have not arrived yet */
    int listener, missing;
    /* TCP port on which each member listens for this group; 0: the one in its peer->address */
    int *ports;
    int linked; /* atomic: 1 once all connections are made and the caller's thread may use them */
    int whole;  /* 1: all members share memory with each other */
    /* collectives on the board: those in flight; number of those started, and of those shown */
    tshi_uv_fifo board;
    uint64_t boarded, shown;
    int64_t slot; /* bytes of a slot, with its data */
    /* first[r], last[r]: the ranks from first[r] to last[r] are those of rank r's host. If there is
     * one host only, or one has several such ranges, each rank counts as a host: both are r */
    int *first, *last;
};

/* What client and server tell each other in the handshake of a connection. Both prove that they
 * know the key by an HMAC that covers all these fields (tshi_uv_proof). */
typedef struct tshi_uv_hello {
    uint32_t version;         /* version of the protocol (TSHI_UV_VERSION) at the other end */
    int client, server, size; /* world rank of the client and of the server; ranks in the world */
    uint32_t purpose;         /* what the connection is for: a tshi_uv_purpose */
    uint64_t group, job;      /* group: id of a group, 0: none; job: hash of the job's name */
    uint64_t process;         /* random number of the client's process, not 0 */
    /* bits of tshi_uv_option: what the client wants of this connection, or can. After the
     * handshake: what both ends have agreed on (tshi_uv_agreed) */
    int options;
    /* ephemeral public keys of both ends, new for each handshake: none can be replayed */
    unsigned char client_share[32], server_share[32];
} tshi_uv_hello;

/* Bits of tshi_uv_hello.options. */
typedef enum tshi_uv_option {
    TSHI_UV_CHECKED = 1, /* a data connection has checksums */
    TSHI_UV_SEALED = 2,  /* the connection is encrypted; it has tags in place of checksums */
    /* encryption is by AES-256-GCM, for which both processors have instructions; else by
     * ChaCha20-Poly1305 */
    TSHI_UV_AES = 4
} tshi_uv_option;

enum { TSHI_UV_ADDRESSES = 8 }; /* most addresses of one host that are tried */

/* A socket address, IPv4 or IPv6. */
typedef struct tshi_uv_address {
    struct sockaddr_storage storage;
    socklen_t size; /* how many bytes of storage the address takes */
} tshi_uv_address;

/* Kinds of errors that a rank reports to the coordinator, in order of priority: a report of a
 * larger kind replaces one of a smaller kind. */
typedef enum tshi_uv_error_kind {
    TSHI_UV_NOTHING,  /* there is no report */
    TSHI_UV_LATE,     /* a collective, or joining, timed out */
    TSHI_UV_SILENT,   /* a rank sends no heartbeat, or a data connection is dead */
    TSHI_UV_CROSSED,  /* ranks wait for each other in a cycle */
    TSHI_UV_MISMATCH, /* ranks called different collectives */
    TSHI_UV_GONE,     /* a connection ended */
    TSHI_UV_DAMAGED,  /* a checksum or tag is wrong */
    TSHI_UV_ABORT     /* a rank reports that it cannot continue (no memory, tsh_comm_abort, ...) */
} tshi_uv_error_kind;

/* An error that a rank has found and reports to the coordinator. */
typedef struct tshi_uv_report {
    tshi_uv_error_kind kind;
    /* The collective in question, which the coordinator asks all ranks about. group: id of its
     * group, 0: there is no collective; seq: its number in the group. */
    uint64_t group, seq;
    tsh_error error; /* the world's error, if the coordinator decides on this report */
} tshi_uv_report;

/* A rank's answer (TELL) to the coordinator's question (ASK) about one collective of a group. */
typedef struct tshi_uv_answer {
    int told, member, /* told: 1 if the rank has answered; member: 1 if it is in the group */
        /* started: 1 if the rank has started the collective; rank: its rank in the group */
        started, rank;
    tshi_uv_record record; /* if started: the call that the rank made */
} tshi_uv_answer;

/* most groups, and most pairs of a group and a peer, that a tshi_uv_blocked lists */
enum { TSHI_UV_BLOCKED_GROUPS = 64, TSHI_UV_BLOCKED_PAIRS = 256 };

/* What a rank reports to the coordinator once it has been blocked for 20 ms: the call in which it
 * waits, and which operations it had started by then. */
typedef struct tshi_uv_blocked {
    uint64_t wait; /* number that identifies the rank's wait; 0: the rank is not blocked */
    /* group: id of the group in which the rank waits; seq: number of the awaited collective or
     * message */
    uint64_t group, seq;
    int peer;       /* world rank of the awaited message's other end; -1: it is a collective */
    int sends;      /* 1: the rank waits to send to peer; 0: it waits to receive */
    char text[160]; /* description of the call in which it waits, for the error */
    int members, groups, pairs; /* numbers of valid entries of member, groups_of and pairs_of */
    int *member; /* world ranks of the members of `group`; points into world->members */
    struct {
        /* id: id of a group; started: number of collectives that the rank has started in it */
        uint64_t id, started;
    } groups_of[TSHI_UV_BLOCKED_GROUPS];
    struct {
        /* group: id of a group; sends, receives: numbers of SENDs to `peer`, and of RECVs from it,
         * that the rank has started in the group */
        uint64_t group, sends, receives;
        int peer; /* world rank to which the SENDs go and from which the RECVs come */
    } pairs_of[TSHI_UV_BLOCKED_PAIRS];
} tshi_uv_blocked;

/* The state of a peer, as this rank sees it. */
typedef enum tshi_uv_state {
    TSHI_UV_ABSENT, /* no control connection yet */
    TSHI_UV_THERE,  /* its control connection is open */
    TSHI_UV_MUTE, /* silent for TSHARD_HEARTBEAT, counts as lost; the connection stays open, so that
                     peer and this rank still receive each other's decision */
    TSHI_UV_LEFT, /* orderly shutdown: it has sent BYE */
    TSHI_UV_LOST  /* its control connection ended without BYE */
} tshi_uv_state;

/* A growing array of bytes, received or to be sent. */
typedef struct tshi_uv_buffer {
    char *data;
    size_t used, room; /* used: bytes in use; room: bytes allocated */
} tshi_uv_buffer;

/* A position in a message that is being written, or read, field by field. */
typedef struct tshi_uv_cursor {
    unsigned char *at, *end; /* where the next field begins; end of the message */
    /* writes: 1: fields are written, 0: read; bad: 1 if a field did not fit or is invalid */
    int writes, bad;
} tshi_uv_cursor;

/* Bytes of a control message: its head (length, type, checksum of these); its payload, at most; the
 * checksum at its end. */
enum { TSHI_UV_MESSAGE_HEAD = 9, TSHI_UV_PAYLOAD = 60000, TSHI_UV_MESSAGE_TAIL = 4 };

/* A control message that is being written. */
typedef struct tshi_uv_outgoing {
    tshi_uv_cursor c; /* cursor that writes the message into `bytes` */
    unsigned char bytes[TSHI_UV_MESSAGE_HEAD + TSHI_UV_PAYLOAD + TSHI_UV_MESSAGE_TAIL];
} tshi_uv_outgoing;

/* Times of a recurring event: bytes arrived from a peer, or a peer's system acknowledged bytes. */
typedef struct tshi_uv_pulse {
    int64_t last; /* time of the latest event */
    /* time of the latest event that ended a silence of more than tshi_uv_gap(): the network may
     * have healed then; 0: none yet */
    int64_t back;
} tshi_uv_pulse;

/* What the control thread knows of one rank of the world. */
typedef struct tshi_uv_peer {
    tsh_uv_world *world;
    int rank;
    tshi_uv_state state;
    int fd, events; /* fd: control connection, -1: none; events: libuv events of poll */
    uv_poll_t *poll;
    tshi_uv_buffer in, out; /* bytes received and not yet handled; bytes to be sent */
    tshi_uv_pulse heard;    /* times at which bytes arrived from the peer */
    /* times at which the peer's system had acknowledged all bytes sent so far */
    tshi_uv_pulse acked;
    /* sent: bytes sent to the peer so far; mark: `acked` is updated once the peer's system has
     * acknowledged so many bytes; 0: it has acknowledged all */
    uint64_t sent, mark;
    int64_t marked; /* when mark was last set */
    int reported;   /* 1: the peer has reported an error to this rank and awaits a decision */
    /* used: 1: the peer has sent something on its control connection; deaf: 1: one of its messages
     * was damaged: this rank reads nothing more from it, but still sends to it */
    int used, deaf;
    tshi_uv_channel *channel; /* NULL: the control connection is not encrypted */
    int opened; /* 1: the head of the first message in `in` is checked, and decrypted */
    uint64_t process;        /* random number of the peer's process; 0: it has not dialled */
    tshi_uv_address address; /* address on which the peer listens */
    int placed, ready;       /* on rank 0: placed: address is known; ready: the peer sent READY */
    int host; /* lowest rank with which it shares memory, or itself: known once the world forms */
    char name[80];           /* host:port of the peer's end of the control connection */
    /* The fields below are used on the coordinator only. */
    tshi_uv_answer answer;   /* the peer's answer to the latest ASK message */
    tshi_uv_blocked blocked; /* the peer's latest BLOCKED message */
    uint64_t asked;          /* number of the peer's wait that it is to CONFIRM; 0: none */
} tshi_uv_peer;

/* What a connection is for. */
typedef enum tshi_uv_purpose {
    TSHI_UV_JOIN,     /* a rank joins the world: its control connection with rank 0 */
    TSHI_UV_CONTROL,  /* a control connection between two other ranks */
    TSHI_UV_DATA,     /* a data connection for the collectives of a group */
    TSHI_UV_MESSAGES, /* a data connection for SEND and RECV in a group */
    TSHI_UV_SHARE     /* a Unix socket over which two ranks of one host pass each other the
                       * descriptors of their shared memory */
} tshi_uv_purpose;

/* The state of a handshake: the first four are the client's, the others the server's. */
typedef enum tshi_uv_phase {
    TSHI_UV_WAITS,           /* not connected; to be dialled at conn->until */
    TSHI_UV_CONNECTS,        /* connect() is in progress */
    TSHI_UV_AWAITS_GREETING, /* connected; the server hello, which comes first, is awaited */
    TSHI_UV_AWAITS_REPLY,    /* the client hello is sent, and the server's reply awaited */
    TSHI_UV_AWAITS_HELLO,    /* the server hello is sent, and the client hello awaited */
    /* the client hello has arrived; its proof is checked once rank 0's address table has, too */
    TSHI_UV_HAS_HELLO,
    TSHI_UV_REPLIES, /* the reply is being sent */
    TSHI_UV_SHARES   /* purpose SHARE: the handshake is over, and this rank awaits the other's
                        segment of shared memory */
} tshi_uv_phase;

/* Ephemeral keys of a server (this rank), which no client has answered yet. */
typedef struct tshi_uv_share {
    unsigned char scalar[32], share[32]; /* private key; public key */
    int64_t until;                       /* after this time they are not sent to another client */
} tshi_uv_share;

/* A connection that is not authenticated yet: dialled by this rank (the client), or accepted. */
typedef struct tshi_uv_conn {
    tsh_uv_world *world;
    struct tshi_uv_conn *next; /* next connection in the list world->conns */
    int dialled, attempts;     /* dialled: 1: dialled here, 0: accepted; attempts: failed ones */
    tshi_uv_address address;   /* address that is dialled; a JOIN dials world->address instead */
    int fd;                    /* socket, -1: none */
    /* dialled: socket of an earlier attempt that got no valid reply, -1: none. It stays open until
     * this rank is accepted: the server may have accepted that attempt, and would take the end of
     * its connection for the loss of this rank */
    int earlier;
    tshi_uv_phase phase;
    uv_poll_t *poll;
    int64_t until; /* in phase WAITS: when to dial; else: when the handshake times out */
    tshi_uv_hello hello;
    unsigned char in[128], out[128]; /* in: bytes received; out: bytes to be sent */
    /* in_used: bytes in `in`; in_need: how many of them the next step needs; out_used: bytes in
     * `out` that are not sent yet */
    size_t in_used, in_need, out_used;
    int welcome;   /* server: 1 if the reply accepts the client */
    unsigned char scalar[32]; /* this end's ephemeral private key, until session is computed */
    int64_t share_until;      /* server: time after which no other client gets that key */
    unsigned char session[32]; /* session secret, from which all keys of the connection come */
    char name[80]; /* host:port of the other end */
} tshi_uv_conn;

/* Limits log messages of one kind to one a second. */
typedef struct tshi_uv_log_count {
    int64_t told;   /* when a message of this kind was last logged; 0: never */
    int count;      /* number of messages since then, which are not logged yet */
    char last[256]; /* text of the latest message */
} tshi_uv_log_count;

/* Kinds of limited log messages: this rank refused a client without a valid proof of the key; it
 * refused a client with one; a server refused this rank without a proof; number of kinds. */
enum { TSHI_UV_OF_UNPROVEN, TSHI_UV_OF_KEY_HOLDERS, TSHI_UV_OF_SERVERS, TSHI_UV_TALLIES };

struct tsh_uv_world {
    /* spins: polls without progress before a waiting rank sleeps */
    int rank, size, spins;
    int64_t timeout, heartbeat; /* TSHARD_TIMEOUT and TSHARD_HEARTBEAT, in ns */
    int64_t notice;             /* tsh_uv_desc.notice, in ns */
    /* 0: no shared memory (TSHARD_SHM); 1: within a host; 2: with a heap for tensors, too */
    int shm;
    int checksum; /* checksums on data connections: 1: on all, -1: on none, 0: if not loopback */
    int encrypt;  /* encrypted connections: 1: all, -1: none, 0: with a key, those not loopback */
    int crc_wide; /* 1: CRC32C is computed by the processor's instruction for it */
    /* if crc_wide is 0: [k][b]: CRC32C of byte b followed by k zero bytes */
    uint32_t crc_table[8][256];
    uint64_t job, process;    /* job: hash of jobname; process: random number of this process */
    unsigned char secret[32], /* hash of the shared key; all 0: no key */
        token[32],            /* random bytes that rank 0 sends with the address table */
        mesh[32];             /* HMAC of token under secret: the key of all handshakes but JOIN */
    char jobname[300], host[256]; /* name of the job (TSHARD_JOB); host of rank 0 */
    const char *host_from;        /* name of the field or variable that gave host, for errors */
    int port;                     /* TCP port of rank 0 */
    tsh_logger logger;
    /* segments of shared memory, by world rank; used by the control thread while the world forms,
     * then by the caller's thread */
    tshi_uv_near *near;
    int segment;                       /* descriptor of this rank's own segment, -1: none */
    tshi_uv_heap *heap;                /* NULL: none */
    int shm_sizes[TSHI_UV_SHM_GROUPS]; /* [i]: ranks of the group of that segment's entry i */

    /* The fields below are used by the caller's thread. */
    uv_loop_t loop;
    uv_timer_t timer;       /* ends the sleep of `loop` at a given time */
    uv_async_t wake_caller; /* the control thread uses it to end the sleep of `loop` */
    uv_poll_t *bell;        /* watches this rank's bell, which ranks of this host ring; or NULL */
    int open;               /* number of groups that are not closed yet */
    /* waits: number of waits of 20 ms or more so far; ids: number of splits of groups so far */
    uint64_t waits, ids;

    /* The fields below are used by both threads, under the lock unless a field says otherwise. */
    uv_mutex_t lock;
    uv_cond_t changed;     /* signalled when the world has formed or failed */
    int failed;            /* atomic, a tsh_result; error is valid once this is not TSH_OK */
    int halted;            /* atomic: 1: an error was reported, no data moves */
    tsh_error error;       /* the world's error, if `failed` is not TSH_OK */
    tshi_uv_group *groups; /* list of all groups that are not closed */
    /* error report of the caller's thread, which the control thread takes */
    tshi_uv_report reported;
    /* control thread: the report of highest priority, until the world's error is decided */
    tshi_uv_report held;
    tshi_uv_blocked blocked; /* what the caller's thread is blocked on */
    uint64_t last;           /* id of the group in which this rank started its latest collective */
    /* atomic. blocked_new: 1 if the control thread is to send `blocked` to the coordinator;
     * leaving: 1 if the world is to shut down */
    int blocked_new, leaving;
    int forming;              /* 1 until the world is complete; written by the control thread */
    tshi_uv_group *requested; /* group whose connections the control thread is to make; or NULL */
    /* caller's thread: groups closed after the world failed; freed with the world */
    tshi_uv_group *ended;

    /* The fields below are used by the control thread. */
    uv_thread_t thread;
    uv_loop_t control;
    uv_prepare_t turn;        /* calls tshi_uv_on_turn each time before the loop `control` sleeps */
    uv_timer_t tick;          /* ends the sleep of `control` at a given time */
    uv_async_t wake_control;  /* the caller's thread uses it to end the sleep of `control` */
    uv_poll_t *listening;     /* watches listener; NULL: no listener, or accepting is paused */
    uv_poll_t *shm_listening; /* watches shm_listener; NULL: not open, or paused */
    int shm_listener; /* Unix socket on which ranks of this host ask for the segment; -1: none */
    int listener,     /* listening socket; -1: none */
        /* tabled: 1: rank 0's address table is known; told_ready: 1: READY is sent */
        tabled, told_ready, insecure,
        keyed;           /* insecure: 1: other hosts need no key; keyed: 1: a key is given */
    char bind_host[256]; /* TSHARD_BIND, or the address of TSHARD_INTERFACE; "": none */
    tshi_uv_address own; /* address on which this rank listens */
    tshi_uv_address address[TSHI_UV_ADDRESSES]; /* addresses of rank 0's host */
    int addresses;                              /* number of valid entries of address */
    tshi_uv_peer *peer;                         /* what is known of each rank, by world rank */
    int *members;                 /* array that every tshi_uv_blocked.member points into */
    tshi_uv_conn *conns;          /* list of connections not authenticated yet */
    int unproven, unproven_limit; /* number of accepted connections in conns; its limit */
    tshi_uv_share spare[TSHI_UV_SPARES]; /* keys of connections that ended without a client hello */
    int spares;                          /* number of valid entries of spare */
    tshi_uv_log_count tally[TSHI_UV_TALLIES];
    /* world_group: group of all ranks; making: group whose connections are being made, or NULL */
    tshi_uv_group *world_group, *making;
    tshb_coll_search *search; /* by rank: the coordinator's search for a cycle of blocked ranks */
    int confirming;           /* ranks on the cycle that have not yet confirmed that they wait */
    tshi_uv_outgoing outgoing;
    /* due: when joining times out; notice_at: when absent ranks are logged */
    int64_t due, notice_at;
    /* beat: when heartbeats are sent next; accept_at: when to accept connections again */
    int64_t beat, accept_at;
    int64_t silent_at;  /* when the next rank counts as lost, if it stays silent */
    int64_t await_at;   /* when the next AWAIT messages are to be sent */
    int64_t ticked;     /* when the last sleep of `control` should have ended at the latest */
    int64_t parting;    /* when this rank sent BYE; 0: not yet */
    int64_t held_since; /* when `held` got its first report; 0: it has none */
    /* when this rank began, as coordinator, to collect reports; 0: it has not */
    int64_t considered_at;
    int reported_to; /* coordinator to which `held` was sent; -1: to none yet */
    /* decision received from a rank that is not the coordinator; not adopted yet */
    tsh_error offer;
    int offered_by;     /* rank that sent `offer` */
    int64_t offered_at; /* when the first such decision arrived; 0: none did */
    char absent[256];   /* ranks that have not joined, as the latest MISSING message lists them */
    char obstacle[300]; /* why a connection last failed, for the error of a timeout */
};

/* Returns the text of an errno value. */
static const char *tshi_uv_why(int error) {
    return uv_strerror(uv_translate_sys_error(error));
}

static int64_t tshi_uv_min(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* ========================================================================== */
/* >>uv-check                                      MARK: - uv-check (private) */
/* Computes CRC32C checksums (Castagnoli; RFC 3720, B.4), reflected.          */
/* By a processor's instruction: in three streams at once, to hide latency.   */
/* Without such an instruction: by tables, 8 bytes at a time.                 */
/* Needs: >>uv-types.                                                         */
/* ========================================================================== */

#if defined(__x86_64__)
#define TSHI_UV_WIDE              __attribute__((target("sse4.2")))
#define TSHI_UV_CRC_8(crc, value) __builtin_ia32_crc32di((crc), (value))
#define TSHI_UV_CRC_1(crc, value) __builtin_ia32_crc32qi((crc), (value))
#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32) && !defined(__AARCH64EB__)
#define TSHI_UV_WIDE
#define TSHI_UV_CRC_8(crc, value) __crc32cd((uint32_t)(crc), (value))
#define TSHI_UV_CRC_1(crc, value) __crc32cb((crc), (value))
#endif

static int tshi_uv_crc_is_wide(void) { /* Returns 1 if there is an instruction for CRC32C. */
#if defined(__x86_64__)
    return __builtin_cpu_supports("sse4.2") != 0;
#elif defined(TSHI_UV_WIDE)
    return 1;
#else
    return 0;
#endif
}

#ifdef TSHI_UV_WIDE
static uint64_t tshi_uv_load_8(const unsigned char *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

/* Returns crc times x^(8 n) modulo the CRC's polynomial: the CRC register after n more zero bytes.
 * `factor` is x^(8 n - 33). */
TSHI_UV_WIDE static uint32_t tshi_uv_crc_skip(uint32_t crc, uint32_t factor) {
    uint64_t product = 0; /* crc times factor as polynomials over GF(2), times x */
    for (int i = 0; i < 32; i++) product ^= (0 - (uint64_t)(crc >> i & 1)) & (uint64_t)factor << i;
    /* returns product times x^32, modulo the polynomial */
    return (uint32_t)TSHI_UV_CRC_8(0, product);
}

TSHI_UV_WIDE static uint32_t tshi_uv_crc_fast(uint32_t crc, const unsigned char *at, size_t n) {
    static const struct {
        size_t size; /* bytes of each of the three streams: the n of tshi_uv_crc_skip */
        uint32_t factor;
    } by[] = {{8192, 0x54a86326u}, {512, 0xdd7e3b0cu}};
    for (int i = 0; i < 2; i++) {
        const size_t size = by[i].size;
        for (; n >= 3 * size; n -= 3 * size, at += 3 * size) {
            uint64_t a = crc, b = 0, c = 0;
            for (size_t k = 0; k < size; k += 8) {
                a = TSHI_UV_CRC_8(a, tshi_uv_load_8(at + k));
                b = TSHI_UV_CRC_8(b, tshi_uv_load_8(at + size + k));
                c = TSHI_UV_CRC_8(c, tshi_uv_load_8(at + 2 * size + k));
            }
            crc = tshi_uv_crc_skip((uint32_t)a, by[i].factor) ^ (uint32_t)b;
            crc = tshi_uv_crc_skip(crc, by[i].factor) ^ (uint32_t)c;
        }
    }
    for (; n >= 8; n -= 8, at += 8) crc = (uint32_t)TSHI_UV_CRC_8(crc, tshi_uv_load_8(at));
    for (; n; n--, at++) crc = (uint32_t)TSHI_UV_CRC_1(crc, *at);
    return crc;
}
#undef TSHI_UV_CRC_8
#undef TSHI_UV_CRC_1
#else
static uint32_t tshi_uv_crc_fast(uint32_t crc, const unsigned char *at, size_t n) {
    (void)at;
    (void)n;
    return crc; /* never called: there is no CRC32C instruction */
}
#endif

static uint32_t tshi_uv_crc_by_table(const uint32_t table[8][256], uint32_t crc,
                                     const unsigned char *at, size_t n) {
    for (; n >= 8; n -= 8, at += 8)
        crc = table[7][(crc ^ at[0]) & 255] ^ table[6][(crc >> 8 ^ at[1]) & 255] ^
              table[5][(crc >> 16 ^ at[2]) & 255] ^ table[4][crc >> 24 ^ at[3]] ^ table[3][at[4]] ^
              table[2][at[5]] ^ table[1][at[6]] ^ table[0][at[7]];
    for (; n; n--, at++) crc = crc >> 8 ^ table[0][(crc ^ *at) & 255];
    return crc;
}

/* Fills the tables: table[k][b] is what a byte b adds to the CRC if k more bytes follow it. */
static void tshi_uv_crc_tables(uint32_t table[8][256]) {
    for (uint32_t i = 0; i < 256; i++) {
        table[0][i] = i;
        for (int bit = 0; bit < 8; bit++)
            table[0][i] = table[0][i] >> 1 ^ (table[0][i] & 1 ? 0x82f63b78u : 0);
    }
    for (int k = 1; k < 8; k++)
        for (int i = 0; i < 256; i++)
            table[k][i] = table[k - 1][i] >> 8 ^ table[0][table[k - 1][i] & 255];
}

/* Returns a CRC32C continued by n bytes. crc: the CRC32C of the bytes before these; 0: there are
 * none. */
static uint32_t tshi_uv_crc(const tsh_uv_world *world, uint32_t crc, const void *bytes, size_t n) {
    const unsigned char *at = (const unsigned char *)bytes;
    return ~(world->crc_wide ? tshi_uv_crc_fast(~crc, at, n)
                             : tshi_uv_crc_by_table(world->crc_table, ~crc, at, n));
}

/* Returns the checksum of the header of a frame. */
static uint32_t tshi_uv_head_check(const tsh_uv_world *world, const tshi_uv_head *head) {
    return tshi_uv_crc(world, 0, head, sizeof *head - sizeof head->check);
}

/* ========================================================================== */
/* >>uv-wire                                        MARK: - uv-wire (private) */
/* Encodes and decodes the messages of handshakes and control connections.    */
/* For each message one function writes its fields, or reads them.            */
/* A field that is invalid or does not fit sets cursor->bad.                  */
/* The fields after it are read as 0. Nothing received is trusted.            */
/* Needs: >>uv-types.                                                         */
/* ========================================================================== */

/* Returns a cursor at the beginning of bytes. `writes` 1: fields will be written, 0: read. */
static tshi_uv_cursor tshi_uv_cursor_over(void *bytes, size_t size, int writes) {
    unsigned char *at = (unsigned char *)bytes;
    tshi_uv_cursor c = {at, at + size, writes, 0};
    return c;
}

/* Returns the next n bytes and moves the cursor past them. If fewer are left: sets c->bad and
 * returns NULL. */
static unsigned char *tshi_uv_take(tshi_uv_cursor *c, size_t n) {
    unsigned char *at = c->at;
    if (c->bad || n > (size_t)(c->end - c->at)) {
        c->bad = 1;
        return NULL;
    }
    c->at += n;
    return at;
}

/* Writes `value` as a number of n bytes, little endian, or reads such a number. Returns the number;
 * 0 if fewer bytes are left. */
static uint64_t tshi_uv_field(tshi_uv_cursor *c, uint64_t value, size_t n) {
    unsigned char *at = tshi_uv_take(c, n);
    uint64_t there = 0; /* the number that the bytes hold */
    for (size_t i = 0; at && i < n; i++) {
        if (c->writes) at[i] = (unsigned char)(value >> 8 * i);
        there |= (uint64_t)at[i] << 8 * i;
    }
    return there;
}

static int tshi_uv_int_field(tshi_uv_cursor *c, int value) {
    return (int)(int32_t)(uint32_t)tshi_uv_field(c, (uint64_t)value, 4);
}

static int64_t tshi_uv_i64_field(tshi_uv_cursor *c, int64_t value) {
    return (int64_t)tshi_uv_field(c, (uint64_t)value, 8);
}

static void tshi_uv_bytes_field(tshi_uv_cursor *c, void *bytes, size_t n) {
    unsigned char *at = tshi_uv_take(c, n);
    if (at) memcpy(c->writes ? at : bytes, c->writes ? bytes : at, n);
}

/* Writes or reads the length of a text (2 bytes), then the text. Reading cuts the text to `room`
 * bytes, with a final 0, and replaces control characters by '?'. */
static void tshi_uv_text_field(tshi_uv_cursor *c, char *text, size_t room) {
    size_t n = (size_t)tshi_uv_field(c, c->writes ? strlen(text) : 0, 2), kept = 0;
    unsigned char *at = tshi_uv_take(c, n);
    if (c->writes) {
        if (at) memcpy(at, text, n);
        return;
    }
    for (; at && kept < n && kept + 1 < room; kept++)
        text[kept] = (char)(at[kept] < 32 || at[kept] == 127 ? '?' : at[kept]);
    text[kept] = 0;
}

/* Writes or reads a rank of a world of `size` ranks, or -1. Sets c->bad if it is anything else. */
static int tshi_uv_rank_field(tshi_uv_cursor *c, int rank, int size) {
    rank = tshi_uv_int_field(c, rank);
    if (rank < -1 || rank >= size) c->bad = 1;
    return rank;
}

/* Writes or reads a number of entries, 0 to `most`, and returns it. If it is out of range: sets
 * c->bad and returns 0. */
static int tshi_uv_count_field(tshi_uv_cursor *c, int count, int most) {
    count = tshi_uv_int_field(c, count);
    if (count < 0 || count > most) c->bad = 1;
    return c->bad ? 0 : count;
}

/* ---- the three messages of the handshake ---- */

/* The handshake:
 * 1. Server hello: "tshd", version, share (the server's ephemeral public key).
 * 2. Client hello: "TSHD", version, share, the fields of tshi_uv_hello, proof.
 * 3. Server reply: status, value, proof. If the client is accepted, value is what both ends have
 *    agreed on (tshi_uv_option); if it is refused, what the server has in the field that differs.
 * A proof is an HMAC over both hellos (tshi_uv_proof) under the session secret, which both ends
 * compute if they have the same key (>>uv-secret). */
#define TSHI_UV_VERSION UINT32_C(0x74730004) /* "ts", then the version of the protocol, 4 */

/* sizes of the three handshake messages in bytes */
enum { TSHI_UV_SERVER_HELLO = 40, TSHI_UV_CLIENT_HELLO = 116, TSHI_UV_REPLY = 44 };

typedef enum tshi_uv_reply {
    TSHI_UV_WELCOME,       /* the client is accepted */
    TSHI_UV_OTHER_KEY,     /* the client has another key, so its proof is wrong */
    TSHI_UV_OTHER_VERSION, /* the client has another version of the protocol */
    TSHI_UV_OTHER_JOB,     /* client and server belong to jobs of different names */
    TSHI_UV_OTHER_SIZE,    /* client and server belong to worlds of different sizes */
    TSHI_UV_OTHER_RANK,    /* the client expected another rank at this address */
    TSHI_UV_TAKEN,         /* the client's rank has made this connection already */
    TSHI_UV_UNKNOWN        /* the server is not setting up the group (or world) now */
} tshi_uv_reply;

static void tshi_uv_hello_fields(tshi_uv_cursor *c, tshi_uv_hello *hello) {
    hello->client = tshi_uv_int_field(c, hello->client);
    hello->server = tshi_uv_int_field(c, hello->server);
    hello->size = tshi_uv_int_field(c, hello->size);
    hello->purpose = (uint32_t)tshi_uv_field(c, hello->purpose, 4);
    hello->group = tshi_uv_field(c, hello->group, 8);
    hello->job = tshi_uv_field(c, hello->job, 8);
    hello->process = tshi_uv_field(c, hello->process, 8);
    hello->options = tshi_uv_int_field(c, hello->options);
}

/* Computes a proof, HMAC-SHA256 (RFC 2104) over: who proves ('C'lient or 'S'erver), the reply's
 * status and value (client: 0, 0), and the fields of hello. session: the session secret. */
static void tshi_uv_proof(const unsigned char session[32], char who, uint32_t status, int64_t value,
                          const tshi_uv_hello *hello, unsigned char proof[32]) {
    /* bytes of: who (1), status (4), value (8); then of hello: its version and 5 ints (4 each), its
     * group, job and process (8 each), its client_share and server_share (32 each) */
    unsigned char bytes[13 + 4 * 6 + 24 + 64];
    tshi_uv_cursor c = tshi_uv_cursor_over(bytes, sizeof bytes, 1);
    tshi_uv_hello all = *hello;
    (void)tshi_uv_field(&c, (uint64_t)who, 1);
    (void)tshi_uv_field(&c, status, 4);
    (void)tshi_uv_i64_field(&c, value);
    (void)tshi_uv_field(&c, all.version, 4);
    tshi_uv_hello_fields(&c, &all);
    tshi_uv_bytes_field(&c, all.client_share, 32);
    tshi_uv_bytes_field(&c, all.server_share, 32);
    (void)crypto_auth_hmacsha256(proof, bytes, sizeof bytes, session);
}

/* Writes or reads the beginning of a hello: `word` (4 bytes), the version and the share of the end
 * that wrote it. Returns 0 if it read another word. */
static int tshi_uv_hello_start(tshi_uv_cursor *c, const char *word, uint32_t *version,
                               unsigned char share[32]) {
    char magic[4];
    memcpy(magic, word, 4);
    tshi_uv_bytes_field(c, magic, 4);
    *version = (uint32_t)tshi_uv_field(c, *version, 4);
    tshi_uv_bytes_field(c, share, 32);
    return memcmp(magic, word, 4) == 0;
}

/* Writes or reads the server hello. Returns 0 if the bytes that it read are no server hello. */
static int tshi_uv_server_hello(unsigned char bytes[TSHI_UV_SERVER_HELLO], int writes,
                                uint32_t *version, unsigned char share[32]) {
    tshi_uv_cursor c = tshi_uv_cursor_over(bytes, TSHI_UV_SERVER_HELLO, writes);
    return tshi_uv_hello_start(&c, "tshd", version, share);
}

/* Writes or reads the client hello, which has all fields but the server's share. Reading does not
 * check "TSHD": tshi_uv_server_step does that as soon as these bytes arrive. */
static void tshi_uv_client_hello(unsigned char bytes[TSHI_UV_CLIENT_HELLO], int writes,
                                 tshi_uv_hello *hello, unsigned char proof[32]) {
    tshi_uv_cursor c = tshi_uv_cursor_over(bytes, TSHI_UV_CLIENT_HELLO, writes);
    (void)tshi_uv_hello_start(&c, "TSHD", &hello->version, hello->client_share);
    tshi_uv_hello_fields(&c, hello);
    tshi_uv_bytes_field(&c, proof, 32);
}

/* Returns 1 if a server's reply with this status has a proof. It has none if keys or versions
 * differ. */
static int tshi_uv_is_proven(uint32_t status) {
    return status != TSHI_UV_OTHER_KEY && status != TSHI_UV_OTHER_VERSION;
}

/* Writes the server's reply. value: for TSHI_UV_WELCOME, what both ends have agreed on; for a
 * refusal, what the server has in the field that differs. */
static void tshi_uv_put_reply(unsigned char bytes[TSHI_UV_REPLY], tshi_uv_reply status,
                              int64_t value, const tshi_uv_hello *hello,
                              const unsigned char session[32]) {
    tshi_uv_cursor c = tshi_uv_cursor_over(bytes, TSHI_UV_REPLY, 1);
    unsigned char proof[32] = {0};
    int proven = tshi_uv_is_proven(status);
    if (proven) tshi_uv_proof(session, 'S', status, value, hello, proof);
    (void)tshi_uv_field(&c, status, 4);
    (void)tshi_uv_i64_field(&c, proven ? value : 0);
    tshi_uv_bytes_field(&c, proof, 32);
}

/* Reads the server's reply. Returns 0 if the bytes are not a reply, or its proof is wrong. */
static int tshi_uv_get_reply(unsigned char bytes[TSHI_UV_REPLY], const tshi_uv_hello *hello,
                             const unsigned char session[32], uint32_t *status, int64_t *value) {
    tshi_uv_cursor c = tshi_uv_cursor_over(bytes, TSHI_UV_REPLY, 0);
    unsigned char proof[32], expected[32];
    *status = (uint32_t)tshi_uv_field(&c, 0, 4);
    *value = tshi_uv_i64_field(&c, 0);
    tshi_uv_bytes_field(&c, proof, 32);
    if (*status > TSHI_UV_UNKNOWN) return 0;
    if (!tshi_uv_is_proven(*status)) return 1;
    tshi_uv_proof(session, 'S', *status, *value, hello, expected);
    return sodium_memcmp(proof, expected, 32) == 0;
}

/* ---- the messages on control connections ---- */

/* A control message is: length of the payload (4 bytes), type (1), checksum of these 5 bytes (4);
 * payload; checksum of all bytes before it (4). Control messages always have checksums: they are
 * few. On an encrypted connection a message is two records (>>uv-secret): length and type; the
 * payload. */

typedef enum tshi_uv_type {
    TSHI_UV_BEAT,    /* heartbeat, to all */
    TSHI_UV_HERE,    /* to rank 0: where the sender listens */
    TSHI_UV_MISSING, /* from rank 0: which ranks have not joined yet */
    TSHI_UV_TABLE,   /* from rank 0: the address table (where each rank listens), and the token */
    TSHI_UV_READY,   /* to rank 0: the sender has all its connections; its host */
    TSHI_UV_GO,      /* from rank 0: all ranks have all their connections; the hosts of all */
    TSHI_UV_REPORT,  /* to the coordinator: an error report */
    TSHI_UV_ASK,     /* from the coordinator: which call was collective seq of a group? */
    TSHI_UV_TELL,    /* answer to ASK: what the sender called as that collective */
    /* to the coordinator: the sender has been blocked for 20 ms (tshi_uv_blocked) */
    TSHI_UV_BLOCKED,
    TSHI_UV_CONFIRM, /* from the coordinator: is the receiver still in the wait that it reported? */
    TSHI_UV_STILL,   /* answers CONFIRM: 1 if the rank is still in the wait that it reported */
    TSHI_UV_DECISION, /* the world's error, on which the sender has decided */
    TSHI_UV_BYE,      /* the sender shuts down in good order */
    TSHI_UV_AWAIT,    /* number of bytes that the sender has received; it waits for more */
    TSHI_UV_LINKED,   /* the sender, which dialled the receiver, has both connections of a group */
    TSHI_UV_TYPES     /* number of types of control messages */
} tshi_uv_type;

static void tshi_uv_error_fields(tshi_uv_cursor *c, tsh_error *error, int size) {
    unsigned code = (unsigned)tshi_uv_field(c, (uint64_t)error->code, 1);
    error->code = code > TSH_OK && code < TSH_RESULT_COUNT ? (tsh_result)code : TSH_ERR_ABORTED;
    error->rank = tshi_uv_rank_field(c, error->rank, size);
    tshi_uv_text_field(c, error->message, sizeof error->message);
}

static void tshi_uv_report_fields(tshi_uv_cursor *c, tshi_uv_report *e, int size) {
    e->kind = (tshi_uv_error_kind)tshi_uv_field(c, (uint64_t)e->kind, 1);
    if (e->kind == TSHI_UV_NOTHING || e->kind > TSHI_UV_ABORT) c->bad = 1;
    e->group = tshi_uv_field(c, e->group, 8);
    e->seq = tshi_uv_field(c, e->seq, 8);
    tshi_uv_error_fields(c, &e->error, size);
}

/* Writes or reads the payload of a TELL message: id of the group and number of the collective that
 * it is about, then the answer. */
static void tshi_uv_answer_fields(tshi_uv_cursor *c, uint64_t *group, uint64_t *seq,
                                  tshi_uv_answer *answer) {
    tshi_uv_record *record = &answer->record;
    tsh_coll *coll = &record->coll;
    /* member and started share one byte */
    unsigned bits = (unsigned)(answer->member | answer->started << 1);
    *group = tshi_uv_field(c, *group, 8);
    *seq = tshi_uv_field(c, *seq, 8);
    bits = (unsigned)tshi_uv_field(c, bits, 1);
    answer->told = 1;
    answer->member = (int)(bits & 1);
    answer->started = (int)(bits >> 1 & 1);
    answer->rank = tshi_uv_int_field(c, answer->rank);
    record->digest = tshi_uv_field(c, record->digest, 8);
    coll->kind = (tsh_coll_kind)tshi_uv_field(c, (uint64_t)coll->kind, 1);
    coll->dtype = (tsh_dtype)tshi_uv_field(c, (uint64_t)coll->dtype, 1);
    coll->redop = (tsh_redop)tshi_uv_field(c, (uint64_t)coll->redop, 1);
    coll->count = tshi_uv_i64_field(c, coll->count);
    coll->blocks = tshi_uv_i64_field(c, coll->blocks);
    coll->root = tshi_uv_int_field(c, coll->root);
    coll->tag = tshi_uv_int_field(c, coll->tag);
    record->counts = (int)tshi_uv_field(c, (uint64_t)record->counts, 1);
    if (record->counts > TSHI_UV_COUNTS || answer->rank < 0) c->bad = 1;
    for (int i = 0; i < record->counts && !c->bad; i++) {
        record->send_counts[i] = tshi_uv_i64_field(c, record->send_counts[i]);
        record->recv_counts[i] = tshi_uv_i64_field(c, record->recv_counts[i]);
    }
}

/* Writes or reads the payload of a BLOCKED message in a world of `size` ranks. s->member must have
 * room for `size` entries. */
static void tshi_uv_blocked_fields(tshi_uv_cursor *c, tshi_uv_blocked *s, int size) {
    s->wait = tshi_uv_field(c, s->wait, 8);
    s->group = tshi_uv_field(c, s->group, 8);
    s->seq = tshi_uv_field(c, s->seq, 8);
    s->peer = tshi_uv_rank_field(c, s->peer, size);
    s->sends = (int)tshi_uv_field(c, (uint64_t)s->sends, 1);
    tshi_uv_text_field(c, s->text, sizeof s->text);
    s->members = tshi_uv_count_field(c, s->members, size);
    for (int i = 0; i < s->members && !c->bad; i++) {
        s->member[i] = tshi_uv_rank_field(c, s->member[i], size);
        if (s->member[i] < 0) c->bad = 1;
    }
    s->groups = tshi_uv_count_field(c, s->groups, TSHI_UV_BLOCKED_GROUPS);
    for (int i = 0; i < s->groups && !c->bad; i++) {
        s->groups_of[i].id = tshi_uv_field(c, s->groups_of[i].id, 8);
        s->groups_of[i].started = tshi_uv_field(c, s->groups_of[i].started, 8);
    }
    s->pairs = tshi_uv_count_field(c, s->pairs, TSHI_UV_BLOCKED_PAIRS);
    for (int i = 0; i < s->pairs && !c->bad; i++) {
        s->pairs_of[i].group = tshi_uv_field(c, s->pairs_of[i].group, 8);
        s->pairs_of[i].sends = tshi_uv_field(c, s->pairs_of[i].sends, 8);
        s->pairs_of[i].receives = tshi_uv_field(c, s->pairs_of[i].receives, 8);
        s->pairs_of[i].peer = tshi_uv_int_field(c, s->pairs_of[i].peer);
    }
    /* the message is invalid: the rank that sent it counts as not blocked */
    if (c->bad && !c->writes) s->wait = 0;
}

/* ========================================================================== */
/* >>uv-secret                                    MARK: - uv-secret (private) */
/* Keys of a connection, and the ciphers that encrypt what it carries.        */
/* A handshake gives both ends a session secret, by CPace: ephemeral keys of  */
/* a group (ristretto255) whose generator is a hash of the shared key. Who    */
/* records a handshake cannot test guesses of the key; who takes part in it   */
/* can test one. Who learns the key later cannot read what was recorded.      */
/* Bytes are sealed in records: the encrypted bytes, then a tag of 16 bytes.  */
/* Records are numbered, so a record that is changed, repeated, left out or   */
/* moved has a wrong tag. Each direction of each connection has its own key.  */
/* Needs: >>uv-wire.                                                          */
/* ========================================================================== */

/* TAG: bytes of the tag at a record's end. RECORDS_PER_KEY: records after which a direction takes
 * its next key. */
enum { TSHI_UV_TAG = 16, TSHI_UV_RECORDS_PER_KEY = 1 << 24 };

/* ---- CPace (draft-irtf-cfrg-cpace, CPaceRistretto255 with SHA-512) ---- */

/* A text to be hashed, of less than 128 bytes. */
typedef struct tshi_uv_hashed {
    const void *at;
    size_t size; /* length of the text in bytes */
} tshi_uv_hashed;

/* Hashes n texts, each with its length before it. */
static void tshi_uv_hash_all(crypto_hash_sha512_state *hash, const tshi_uv_hashed *parts, int n) {
    for (int i = 0; i < n; i++) {
        unsigned char length = (unsigned char)parts[i].size;
        (void)crypto_hash_sha512_update(hash, &length, 1);
        (void)crypto_hash_sha512_update(hash, (const unsigned char *)parts[i].at, parts[i].size);
    }
}

/* Computes the generator of the group that belongs to a key (or password). channel, id: the draft's
 * CI and sid. */
static void tshi_uv_cpace_generator(tshi_uv_hashed key, tshi_uv_hashed channel, tshi_uv_hashed id,
                                    unsigned char generator[32]) {
    static const unsigned char zeros[128] = {0};
    tshi_uv_hashed parts[5];
    crypto_hash_sha512_state hash;
    unsigned char digest[64];
    parts[0].at = "CPaceRistretto255";
    parts[0].size = 17;
    parts[1] = key;
    parts[2].at = zeros; /* zeros fill up the first block of SHA-512 (128 bytes) */
    parts[2].size = 128 - 18 - (1 + key.size) - 1;
    parts[3] = channel;
    parts[4] = id;
    (void)crypto_hash_sha512_init(&hash);
    tshi_uv_hash_all(&hash, parts, 5);
    (void)crypto_hash_sha512_final(&hash, digest);
    (void)crypto_core_ristretto255_from_hash(generator, digest);
}

/* Computes the key that both ends share (the draft's ISK) from this end's private key (scalar) and
 * the other end's public one (share). transcript: the client's share and what it says, the server's
 * share and what it says. Returns 0 if the share is not a valid point. */
static int tshi_uv_cpace_key(const unsigned char scalar[32], const unsigned char share[32],
                             tshi_uv_hashed id, const tshi_uv_hashed transcript[4],
                             unsigned char key[64]) {
    unsigned char point[32];
    tshi_uv_hashed parts[3] = {{"CPaceRistretto255_ISK", 21}, {NULL, 0}, {NULL, 32}};
    crypto_hash_sha512_state hash;
    int valid = crypto_scalarmult_ristretto255(point, scalar, share) == 0;
    parts[1] = id;
    parts[2].at = point;
    (void)crypto_hash_sha512_init(&hash);
    tshi_uv_hash_all(&hash, parts, 3);
    tshi_uv_hash_all(&hash, transcript, 4);
    (void)crypto_hash_sha512_final(&hash, key);
    sodium_memzero(point, sizeof point);
    sodium_memzero(&hash, sizeof hash);
    return valid;
}

/* ---- the session secret of a connection ---- */

/* Draws an ephemeral private key (scalar), and computes the public one (share), which the hello
 * carries to the other end. secret: hash of the shared key. The server sends its hello before it
 * knows who the client is, so the share's generator does not depend on the ranks; the session
 * secret does. */
static void tshi_uv_new_share(const unsigned char secret[32], unsigned char scalar[32],
                              unsigned char share[32]) {
    unsigned char generator[32];
    tshi_uv_hashed key = {NULL, 32}, channel = {"tshard 3", 8}, none = {"", 0};
    key.at = secret;
    tshi_uv_cpace_generator(key, channel, none, generator);
    crypto_core_ristretto255_scalar_random(scalar);
    /* fails only for a scalar of 0, which is never drawn; a share of zeros would be refused */
    if (crypto_scalarmult_ristretto255(share, scalar, generator) != 0) memset(share, 0, 32);
    sodium_memzero(generator, sizeof generator);
}

/* Computes the session secret from this end's private key and the other end's share, and erases the
 * private key. It depends on all fields of hello, and on `base`: world->secret, or world->mesh.
 * Returns 0 if the share is not a valid point. */
static int tshi_uv_agree(const unsigned char base[32], unsigned char scalar[32],
                         const unsigned char share[32], const tshi_uv_hello *hello,
                         unsigned char session[32]) {
    unsigned char fields[44], key[64];
    tshi_uv_cursor c = tshi_uv_cursor_over(fields, sizeof fields, 1);
    tshi_uv_hello all = *hello;
    tshi_uv_hashed none = {"", 0};
    tshi_uv_hashed transcript[4] = {{NULL, 32}, {NULL, sizeof fields}, {NULL, 32}, {"", 0}};
    int valid;
    tshi_uv_hello_fields(&c, &all);
    transcript[0].at = hello->client_share;
    transcript[1].at = fields;
    transcript[2].at = hello->server_share;
    valid = tshi_uv_cpace_key(scalar, share, none, transcript, key);
    (void)crypto_auth_hmacsha256(session, key, sizeof key, base);
    sodium_memzero(scalar, 32);
    sodium_memzero(key, sizeof key);
    return valid;
}

/* ---- records ---- */

/* Encrypts, or decrypts, the records of one direction of a connection. */
typedef struct tshi_uv_cipher {
    crypto_aead_aes256gcm_state state; /* AES-256-GCM: the expanded key */
    unsigned char key[32];             /* ChaCha20-Poly1305: the key */
    unsigned char chain[32];           /* secret from which the next key is made */
    uint64_t count;                    /* number of records under this key, the next one's nonce */
    int aes;                           /* 1: AES-256-GCM, 0: ChaCha20-Poly1305 */
} tshi_uv_cipher;

/* What an encrypted connection has beside its socket. A control connection uses the ciphers
 * only. */
struct tshi_uv_channel {
    tshi_uv_cipher out, in; /* for records that this end sends, and receives */
    /* records of a data connection that are to be sent, and that have arrived */
    tshi_uv_buffer outgoing, incoming;
    size_t sent;   /* bytes of `outgoing` that are sent */
    size_t sealed; /* bytes of header and payload that are in `outgoing` */
    size_t opened; /* bytes of `incoming` whose records are decrypted */
};

/* Makes the key of the cipher's next records from its chain. */
static void tshi_uv_cipher_key(tshi_uv_cipher *cipher) {
    (void)crypto_auth_hmacsha256(cipher->key, (const unsigned char *)"key", 3, cipher->chain);
    (void)crypto_auth_hmacsha256(cipher->chain, (const unsigned char *)"next", 4, cipher->chain);
    cipher->count = 0;
    if (!cipher->aes) return;
    (void)crypto_aead_aes256gcm_beforenm(&cipher->state, cipher->key);
    sodium_memzero(cipher->key, sizeof cipher->key);
}

/* Sets the first key of a cipher. who: the end that sends the records, 'C' for client or 'S' for
 * server. agreed: what the handshake has agreed on (TSHI_UV_SEALED, ...). */
static void tshi_uv_cipher_begin(tshi_uv_cipher *cipher, const unsigned char session[32], char who,
                                 int agreed) {
    unsigned char label[3] = {'k', (unsigned char)who, (unsigned char)agreed};
    cipher->aes = (agreed & TSHI_UV_AES) != 0;
    (void)crypto_auth_hmacsha256(cipher->chain, label, sizeof label, session);
    tshi_uv_cipher_key(cipher);
}

/* Returns the ciphers of a connection whose handshake gave the secret `session`. client 1: this end
 * is the client. NULL: no memory. */
static tshi_uv_channel *tshi_uv_channel_new(const unsigned char session[32], int client,
                                            int agreed) {
    tshi_uv_channel *channel = (tshi_uv_channel *)calloc(1, sizeof *channel);
    if (!channel) return NULL;
    tshi_uv_cipher_begin(&channel->out, session, client ? 'C' : 'S', agreed);
    tshi_uv_cipher_begin(&channel->in, session, client ? 'S' : 'C', agreed);
    return channel;
}

static void tshi_uv_channel_free(tshi_uv_channel **channel) { /* Erases the keys. */
    if (!*channel) return;
    free((*channel)->outgoing.data);
    free((*channel)->incoming.data);
    sodium_memzero(*channel, sizeof **channel);
    free(*channel);
    *channel = NULL;
}

/* Writes the nonce (record number) of the cipher's next record; takes a new key first if that is
 * due. Both ends count alike, so no nonce is sent. */
static void tshi_uv_cipher_nonce(tshi_uv_cipher *cipher, unsigned char nonce[12]) {
    tshi_uv_cursor c = tshi_uv_cursor_over(nonce, 12, 1);
    if (cipher->count == TSHI_UV_RECORDS_PER_KEY) tshi_uv_cipher_key(cipher);
    (void)tshi_uv_field(&c, cipher->count++, 8);
    (void)tshi_uv_field(&c, 0, 4);
}

/* Encrypts n bytes into `record`, n + TSHI_UV_TAG bytes, which may begin where the bytes do. */
static void tshi_uv_seal(tshi_uv_cipher *cipher, const void *bytes, size_t n, void *record) {
    const unsigned char *from = (const unsigned char *)bytes;
    unsigned char *to = (unsigned char *)record, nonce[12];
    tshi_uv_cipher_nonce(cipher, nonce);
    if (cipher->aes)
        (void)crypto_aead_aes256gcm_encrypt_detached_afternm(to, to + n, NULL, from, n, NULL, 0,
                                                             NULL, nonce, &cipher->state);
    else
        (void)crypto_aead_chacha20poly1305_ietf_encrypt_detached(to, to + n, NULL, from, n, NULL, 0,
                                                                 NULL, nonce, cipher->key);
}

/* Decrypts a record of n bytes and a tag into `bytes`, which may begin where the record does.
 * Returns 0 if the tag is wrong; what `bytes` has then is not to be used. */
static int tshi_uv_unseal(tshi_uv_cipher *cipher, const void *record, size_t n, void *bytes) {
    const unsigned char *from = (const unsigned char *)record;
    unsigned char *to = (unsigned char *)bytes, nonce[12];
    tshi_uv_cipher_nonce(cipher, nonce);
    if (cipher->aes)
        return crypto_aead_aes256gcm_decrypt_detached_afternm(to, NULL, from, n, from + n, NULL, 0,
                                                              nonce, &cipher->state) == 0;
    return crypto_aead_chacha20poly1305_ietf_decrypt_detached(to, NULL, from, n, from + n, NULL, 0,
                                                              nonce, cipher->key) == 0;
}

/* ========================================================================== */
/* >>uv-socket                                    MARK: - uv-socket (private) */
/* Internet addresses; sockets that connect, listen or were accepted.         */
/* Sockets do not block, are closed on exec, and do not raise SIGPIPE.        */
/* Needs: >>uv-types.                                                         */
/* ========================================================================== */

#if defined(MSG_NOSIGNAL)
#define TSHI_UV_NOSIGNAL MSG_NOSIGNAL
#elif defined(SO_NOSIGPIPE)
#define TSHI_UV_NOSIGNAL 0 /* SO_NOSIGPIPE, set on the socket, replaces the flag */
#else
#error "tshard_uv.h needs MSG_NOSIGNAL or SO_NOSIGPIPE: on macOS define _DARWIN_C_SOURCE, too"
#endif

/* Fills list with the addresses of a host, in the system's order of preference, and returns their
 * number. 0: there are none, and *why is the reason. `numeric` 1: host must be an address, no name
 * is looked up. */
static int tshi_uv_resolve(const char *host, int port, int numeric, tshi_uv_address *list,
                           const char **why) {
    struct addrinfo hints, *found = NULL;
    char service[16];
    int n = 0, failed;
    memset(&hints, 0, sizeof hints);
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICSERV | (numeric ? AI_NUMERICHOST : 0);
    (void)snprintf(service, sizeof service, "%d", port);
    failed = getaddrinfo(host, service, &hints, &found);
    *why = failed ? gai_strerror(failed) : "it has no address";
    if (failed) return 0;
    for (const struct addrinfo *at = found; at && n < TSHI_UV_ADDRESSES; at = at->ai_next) {
        if (at->ai_addrlen > sizeof list[n].storage) continue;
        memcpy(&list[n].storage, at->ai_addr, at->ai_addrlen);
        list[n++].size = (socklen_t)at->ai_addrlen;
    }
    freeaddrinfo(found);
    return n;
}

static const struct sockaddr *tshi_uv_sockaddr(const tshi_uv_address *address) {
    return (const struct sockaddr *)&address->storage;
}

static int tshi_uv_port(const tshi_uv_address *address) {
    const struct sockaddr_storage *storage = &address->storage;
    if (storage->ss_family == AF_INET)
        return ntohs(((const struct sockaddr_in *)(const void *)storage)->sin_port);
    if (storage->ss_family == AF_INET6)
        return ntohs(((const struct sockaddr_in6 *)(const void *)storage)->sin6_port);
    return 0;
}

static void tshi_uv_set_port(tshi_uv_address *address, int port) {
    struct sockaddr_storage *storage = &address->storage;
    if (storage->ss_family == AF_INET)
        ((struct sockaddr_in *)(void *)storage)->sin_port = htons((uint16_t)port);
    if (storage->ss_family == AF_INET6)
        ((struct sockaddr_in6 *)(void *)storage)->sin6_port = htons((uint16_t)port);
}

/* Returns 1 if only this host can reach the address. */
static int tshi_uv_loopback(const tshi_uv_address *address) {
    const struct sockaddr_storage *storage = &address->storage;
    if (storage->ss_family == AF_INET) {
        const struct sockaddr_in *in = (const struct sockaddr_in *)(const void *)storage;
        return ntohl(in->sin_addr.s_addr) >> 24 == 127;
    }
    if (storage->ss_family == AF_INET6) {
        const struct sockaddr_in6 *in = (const struct sockaddr_in6 *)(const void *)storage;
        return IN6_IS_ADDR_LOOPBACK(&in->sin6_addr) ||
               (IN6_IS_ADDR_V4MAPPED(&in->sin6_addr) && in->sin6_addr.s6_addr[12] == 127);
    }
    return 0;
}

/* Writes the address in numbers, without its port, such as "10.0.0.1"; "?" if that fails. */
static void tshi_uv_host_text(const tshi_uv_address *address, char *text, size_t room) {
    if (getnameinfo(tshi_uv_sockaddr(address), address->size, text, (socklen_t)room, NULL, 0,
                    NI_NUMERICHOST) != 0)
        (void)snprintf(text, room, "?");
}

/* Writes a host and its port to text: "127.0.0.1:4000" or, for IPv6, "[::1]:4000". */
static void tshi_uv_name(const char *host, int port, char *text, size_t room) {
    (void)snprintf(text, room, strchr(host, ':') ? "[%s]:%d" : "%s:%d", host, port);
}

/* Gets the address of a socket's own end (`other` 0) or of its peer's end (`other` 1). Returns 0 if
 * the system call failed. */
static int tshi_uv_end_of(int fd, int other, tshi_uv_address *address) {
    struct sockaddr *to = (struct sockaddr *)&address->storage;
    memset(address, 0, sizeof *address);
    address->size = (socklen_t)sizeof address->storage;
    return (other ? getpeername(fd, to, &address->size) : getsockname(fd, to, &address->size)) == 0;
}

static void tshi_uv_address_text(const tshi_uv_address *address, char *text, size_t room) {
    char host[64];
    if (address->storage.ss_family == AF_UNIX) {
        (void)snprintf(text, room, "a Unix socket");
        return;
    }
    tshi_uv_host_text(address, host, sizeof host);
    tshi_uv_name(host, tshi_uv_port(address), text, room);
}

static void tshi_uv_close_fd(int *fd) {
    if (*fd >= 0) (void)close(*fd);
    *fd = -1;
}

/* Makes a socket non-blocking, closed on exec, without Nagle's delay and SIGPIPE. Returns 0 if that
 * failed (errno). */
static int tshi_uv_prepare_fd(int fd) {
    int flags = fcntl(fd, F_GETFL), one = 1;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
#ifdef SO_NOSIGPIPE
    (void)setsockopt(fd, SOL_SOCKET, SO_NOSIGPIPE, &one, sizeof one);
#endif
    return flags >= 0 && fcntl(fd, F_SETFL, flags | O_NONBLOCK) == 0 &&
           fcntl(fd, F_SETFD, FD_CLOEXEC) == 0;
}

/* Closes fd, keeps errno as it was, and returns -1. */
static int tshi_uv_give_up(int fd) {
    int why = errno;
    (void)close(fd);
    errno = why;
    return -1;
}

static int tshi_uv_socket(const tshi_uv_address *address) {
    int fd = socket(address->storage.ss_family, SOCK_STREAM, 0);
    return fd < 0 || tshi_uv_prepare_fd(fd) ? fd : tshi_uv_give_up(fd);
}

/* Returns a new socket that listens on the address; -1: a system call failed (errno). */
static int tshi_uv_listen(const tshi_uv_address *address) {
    int one = 1, fd = tshi_uv_socket(address);
    if (fd < 0) return -1;
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    return bind(fd, tshi_uv_sockaddr(address), address->size) == 0 && listen(fd, SOMAXCONN) == 0
               ? fd
               : tshi_uv_give_up(fd);
}

/* Returns a new socket that is connected, or still connecting, to the address; -1: a system call
 * failed (errno). */
static int tshi_uv_connect(const tshi_uv_address *address) {
    int fd = tshi_uv_socket(address);
    if (fd < 0) return -1;
    return connect(fd, tshi_uv_sockaddr(address), address->size) == 0 || errno == EINPROGRESS ||
                   errno == EINTR
               ? fd
               : tshi_uv_give_up(fd);
}

/* Returns 1 if errno says that the call would block or was interrupted: try again later. */
static int tshi_uv_later(void) {
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

/* Returns how many bytes sent on the socket the other end's system has not acknowledged; -1:
 * unknown. */
static int tshi_uv_unacknowledged(int fd) {
    int bytes = -1;
#if defined(SO_NWRITE) /* macOS */
    socklen_t size = (socklen_t)sizeof bytes;
    if (getsockopt(fd, SOL_SOCKET, SO_NWRITE, &bytes, &size) != 0) bytes = -1;
#elif defined(TIOCOUTQ)
    if (ioctl(fd, TIOCOUTQ, &bytes) != 0) bytes = -1;
#else
    (void)fd;
#endif
    return bytes;
}

static int tshi_uv_out_of_descriptors(int why) {
    return why == EMFILE || why == ENFILE;
}

/* Returns the number of file descriptors that a rank needs for a world of `size` ranks; groups need
 * more. */
static int tshi_uv_descriptors(int size) {
    /* 3 connections per peer; 28 for the listeners, event loops and so on */
    return 3 * (size - 1) + 28;
}

/* ========================================================================== */
/* >>uv-shm                                          MARK: - uv-shm (private) */
/* Shared memory between ranks of one host: segments, rows, rings, bells.     */
/* A segment is a memfd: it has no name, and ends with its last process.      */
/* Its size is sealed, and rows have memory before use: no access can fail.   */
/* A rank writes to its own segment and, in the rings of others, again what   */
/* it has read there (tshi_uv_shm_own); never to another's heap.              */
/* Needs: >>uv-socket.                                                        */
/* ========================================================================== */

static tshi_uv_shm_segment *tshi_uv_segment_of(const tsh_uv_world *world, int rank) {
    return (tshi_uv_shm_segment *)(void *)world->near[rank].base; /* NULL: it is not mapped */
}

/* Returns the size in bytes of a ring (a circular buffer) in a group of `size` ranks: smaller in a
 * larger group. */
static int64_t tshi_uv_shm_ring(int size) {
    int64_t bytes = 256 << 10;
    while (bytes > 16 << 10 && bytes * size > 2 << 20) bytes /= 2;
    return bytes;
}

/* Returns the offset of row i from the first row of a group of `size` ranks. Row i belongs to the
 * connection group->link[i]. */
static int64_t tshi_uv_shm_row(int size, int i) {
    return (TSHI_UV_SHM_PAGE + tshi_uv_shm_ring(size)) * i;
}

/* Returns the size in bytes of a slot, with its data, in a group of `size` ranks. The slots of rank
 * r are where row r of its segment would be: it has no connection with itself. */
static int64_t tshi_uv_slot_size(int size) {
    const int64_t most = ((int64_t)sizeof(tshi_uv_slot) + TSHI_UV_SLOT_MOST + 63) / 64 * 64;
    return tshi_uv_min(most, tshi_uv_shm_ring(size) / TSHI_UV_SLOTS);
}

/* Returns the offset in a segment of its first row (counters and ring of one connection). */
static int64_t tshi_uv_shm_begin(void) {
    return ((int64_t)sizeof(tshi_uv_shm_segment) / TSHI_UV_SHM_PAGE + 1) * TSHI_UV_SHM_PAGE;
}

#if TSHI_UV_SHM
#if !defined(__cplusplus)
extern long syscall(long number, ...); /* hidden under -std=c99, as are the functions called here */
int(madvise)(void *from, size_t bytes, int advice);
#endif

/* The values of names that -std=c99 hides: MFD_CLOEXEC | MFD_ALLOW_SEALING; F_ADD_SEALS,
 * F_GET_SEALS; F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW. */
enum { TSHI_UV_MFD = 3, TSHI_UV_ADD_SEALS = 1033, TSHI_UV_GET_SEALS = 1034, TSHI_UV_SEALS = 7 };

/* Allocates memory for n bytes of a segment of this rank. Returns 0 if the system refuses (errno).
 * Does so in pieces, since a signal makes the system undo what it has begun. */
static int tshi_uv_shm_reserve(int segment, int64_t offset, int64_t n) {
    const int64_t piece = 256 << 10;
    for (int64_t now; n > 0; offset += now, n -= now) {
        long failed;
        now = tshi_uv_min(n, piece);
        do {
            failed = syscall(SYS_fallocate, (long)segment, 0L, (long)offset, (long)now);
        } while (failed && errno == EINTR);
        if (failed) return 0;
    }
    return 1;
}

/* Takes the memory of n bytes of a segment away again: they read as zeros. */
static void tshi_uv_shm_release(int segment, int64_t offset, int64_t n) {
    const long punch = 3; /* FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE */
    (void)syscall(SYS_fallocate, (long)segment, punch, (long)offset, (long)n);
}

/* Returns 1 if a limit that getrlimit has filled in, unless it has failed, allows n bytes. */
static int tshi_uv_shm_allowed(int failed, const struct rlimit *limit, int64_t n) {
    return failed || limit->rlim_cur >= (rlim_t)n;
}

/* Returns the size in bytes of this rank's segment: with a heap as large as the host's memory, if
 * that is wanted and the addresses for the heaps of all ranks can be had (of 128 TiB that a process
 * has, they take a quarter at most). */
static int64_t tshi_uv_shm_size(tsh_uv_world *world) {
    const int64_t page = sysconf(_SC_PAGESIZE), pages = sysconf(_SC_PHYS_PAGES);
    int64_t size = TSHI_UV_SHM_SIZE;
    struct rlimit file, all; /* of a file; of this process */
    if (world->shm == 2 && page > 0 && pages > 0)
        size += tshi_uv_min(pages, (INT64_C(1) << 45) / world->size / page) * page;
    if (size == TSHI_UV_SHM_SIZE ||
        (tshi_uv_shm_allowed(getrlimit(RLIMIT_FSIZE, &file), &file, size) &&
         tshi_uv_shm_allowed(getrlimit(RLIMIT_AS, &all), &all, size * world->size * 2)))
        return size;
    tsh_log_message(&world->logger,
                    "rank %d has its tensors in memory of its own, as ulimit -f or -v leaves no "
                    "space for them in shared memory",
                    world->rank);
    return TSHI_UV_SHM_SIZE;
}

/* Leaves a segment out of core dumps: writing one would give memory to all of it. */
static void tshi_uv_shm_undumped(void *base, int64_t size) {
    const int advice = 16; /* MADV_DONTDUMP */
    (void)madvise(base, (size_t)size, advice);
}

/* Makes this rank's segment and bell. Returns 0 if the system refuses (errno). */
static int tshi_uv_shm_create(tsh_uv_world *world) {
    tshi_uv_near *own = &world->near[world->rank];
    struct rlimit file;
    void *base;
    own->size = tshi_uv_shm_size(world);
    /* a file above the limit would raise SIGXFSZ */
    if (!tshi_uv_shm_allowed(getrlimit(RLIMIT_FSIZE, &file), &file, own->size)) {
        errno = EFBIG;
        return 0;
    }
    world->segment = (int)syscall(SYS_memfd_create, "tshard", (long)TSHI_UV_MFD);
    if (world->segment < 0 || ftruncate(world->segment, own->size) != 0 ||
        fcntl(world->segment, TSHI_UV_ADD_SEALS, (int)TSHI_UV_SEALS) != 0 ||
        !tshi_uv_shm_reserve(world->segment, 0, tshi_uv_shm_begin()))
        return 0;
    own->bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    base = own->bell < 0 ? MAP_FAILED
                         : mmap(NULL, (size_t)own->size, PROT_READ | PROT_WRITE, MAP_SHARED,
                                world->segment, 0);
    if (base == MAP_FAILED) return 0;
    tshi_uv_shm_undumped(base, own->size);
    own->base = (char *)base;
    return 1;
}

/* Maps the segment of a rank of this host. Takes over both descriptors: its segment and bell.
 * Returns 0 if that failed (errno). */
static int tshi_uv_shm_map(tsh_uv_world *world, int rank, int fds[2]) {
    tshi_uv_near *near = &world->near[rank];
    struct stat info;
    void *base = MAP_FAILED;
    int seals = fcntl(fds[0], TSHI_UV_GET_SEALS);
    if (near->base) { /* the peer asks again, as its first attempt failed */
        tshi_uv_close_fd(&fds[0]);
        tshi_uv_close_fd(&fds[1]);
        return 1;
    }
    errno = EINVAL;
    if (seals >= 0 && (seals & TSHI_UV_SEALS) == TSHI_UV_SEALS && fstat(fds[0], &info) == 0 &&
        info.st_size >= TSHI_UV_SHM_SIZE)
        base = mmap(NULL, (size_t)info.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fds[0], 0);
    if (base != MAP_FAILED && info.st_size > TSHI_UV_SHM_SIZE &&
        mprotect((char *)base + TSHI_UV_SHM_SIZE, (size_t)(info.st_size - TSHI_UV_SHM_SIZE),
                 PROT_READ) != 0) { /* the heap can only be read */
        (void)munmap(base, (size_t)info.st_size);
        base = MAP_FAILED;
    }
    (void)tshi_uv_give_up(fds[0]); /* the mapping needs it no longer; keeps errno */
    if (base == MAP_FAILED) {
        (void)tshi_uv_give_up(fds[1]);
        return 0;
    }
    tshi_uv_shm_undumped(base, (int64_t)info.st_size);
    near->base = (char *)base;
    near->size = (int64_t)info.st_size;
    near->bell = fds[1];
    return 1;
}

static void tshi_uv_shm_drop(char *base, int64_t size) { /* Unmaps a segment, or NULL. */
    if (base) (void)munmap(base, (size_t)size);
}

static void tshi_uv_shm_unmap(tshi_uv_near *near) {
    tshi_uv_shm_drop(near->base, near->size);
    near->base = NULL;
    tshi_uv_close_fd(&near->bell);
}
#else
static int tshi_uv_shm_reserve(int segment, int64_t offset, int64_t n) {
    (void)segment, (void)offset, (void)n;
    return 0; /* never called: this system has no segments */
}

static void tshi_uv_shm_release(int segment, int64_t offset, int64_t n) {
    (void)segment, (void)offset, (void)n;
}

static void tshi_uv_shm_drop(char *base, int64_t size) {
    (void)base, (void)size;
}

static int tshi_uv_shm_create(tsh_uv_world *world) {
    (void)world;
    errno = ENOSYS;
    return 0;
}

static void tshi_uv_shm_unmap(tshi_uv_near *near) {
    (void)near;
}
#endif

/* Logs that this rank uses no shared memory, and why (errno), and sets world->shm to 0. Does
 * nothing if that is 0 already. */
static void tshi_uv_shm_without(tsh_uv_world *world, const char *what) {
    if (world->shm)
        tsh_log_message(&world->logger,
                        "rank %d uses TCP within its host, as it cannot %s: %s (TSHARD_SHM=0 does "
                        "without shared memory)",
                        world->rank, what, tshi_uv_why(errno));
    world->shm = 0;
}

/* Allocates memory for this rank's slots in a group, in which it has rank m and whose rows begin at
 * `offset` of its segment. Returns 0 if the system refuses (errno). */
static int tshi_uv_shm_slots(const tsh_uv_world *world, int64_t offset, int size, int m) {
    const int64_t at = offset + tshi_uv_shm_row(size, m), slot = tshi_uv_slot_size(size);
    if (!tshi_uv_shm_reserve(world->segment, at, slot * TSHI_UV_SLOTS)) return 0;
    for (int i = 0; i < TSHI_UV_SLOTS; i++)
        memset(world->near[world->rank].base + at + i * slot, 0, sizeof(tshi_uv_slot));
    return 1;
}

/* Makes this rank's segment, if settings and system allow it. */
static void tshi_uv_shm_open(tsh_uv_world *world) {
    tshi_uv_near *own = &world->near[world->rank];
    tshi_uv_shm_segment *segment;
    if (!TSHI_UV_SHM || !world->shm) return;
    if (!tshi_uv_shm_create(world) ||
        !tshi_uv_shm_slots(world, tshi_uv_shm_begin(), world->size, world->rank)) {
        tshi_uv_shm_without(world, "make shared memory");
        tshi_uv_shm_unmap(own);
        tshi_uv_close_fd(&world->segment);
        return;
    }
    segment = tshi_uv_segment_of(world, world->rank);
    segment->group[0].id = 1; /* id of the world's group */
    segment->group[0].offset = (uint64_t)tshi_uv_shm_begin();
}

/* Rings the bell of a rank of this host if its thread sleeps, once per sleep. */
static void tshi_uv_shm_wake(tsh_uv_world *world, int rank) {
    tshi_uv_near *near = &world->near[rank];
    const uint64_t one = 1, sleeps = TSHI_UV_GET(&tshi_uv_segment_of(world, rank)->sleeps);
    if (!(sleeps & 1) || sleeps == near->rung) return;
    near->rung = sleeps;
    if (write(near->bell, &one, sizeof one) < 0) near->rung = 0; /* failed: rings again next time */
}

/* Marks in this rank's segment that its thread is about to sleep (`asleep` 1), or is awake (0). A
 * peer that has written bytes for it reads the mark, to ring the bell; so after setting the mark,
 * this rank must look for bytes once more before it sleeps. */
static void tshi_uv_shm_sleeps(const tsh_uv_world *world, int asleep) {
    tshi_uv_shm_segment *own = tshi_uv_segment_of(world, world->rank);
    if (own && (int)(own->sleeps & 1) != asleep) TSHI_UV_PUT(&own->sleeps, own->sleeps + 1);
}

/* Returns 1 if world ranks a and b have mapped each other's segments, as seen by this rank, which
 * has mapped both. */
static int tshi_uv_shm_pair(const tsh_uv_world *world, int a, int b) {
    tshi_uv_shm_segment *of_a = tshi_uv_segment_of(world, a), *of_b = tshi_uv_segment_of(world, b);
    return of_a && of_b && TSHI_UV_GET(&of_a->near[b]) && TSHI_UV_GET(&of_b->near[a]);
}

/* Returns the entry of a group in the segment of a world rank; NULL: there is none. */
static tshi_uv_shm_entry *tshi_uv_shm_find(const tsh_uv_world *world, int rank, uint64_t id) {
    tshi_uv_shm_segment *segment = tshi_uv_segment_of(world, rank);
    for (int i = 0; segment && i < TSHI_UV_SHM_GROUPS; i++)
        if (TSHI_UV_GET(&segment->group[i].id) == id) return &segment->group[i];
    return NULL;
}

/* Allocates memory for the two rows for member m of a group, whose rows begin at `offset` of this
 * rank's segment. Returns 0 if the system refuses (errno). */
static int tshi_uv_shm_rows(const tsh_uv_world *world, int64_t offset, int size, int m) {
    for (int i = m; i < 2 * size; i += size) { /* row m: collectives; size + m: messages */
        int64_t at = offset + tshi_uv_shm_row(size, i);
        if (!tshi_uv_shm_reserve(world->segment, at, tshi_uv_shm_row(size, 1))) return 0;
        memset(world->near[world->rank].base + at, 0, TSHI_UV_SHM_PAGE); /* clears the counters */
    }
    return 1;
}

/* Frees the entries of groups in this rank's segment that it and all that share memory with it have
 * closed. Returns a free entry; NULL: there is none. */
static tshi_uv_shm_entry *tshi_uv_shm_free_entry(const tsh_uv_world *world) {
    tshi_uv_shm_segment *own = tshi_uv_segment_of(world, world->rank);
    tshi_uv_shm_entry *found = NULL;
    for (int i = TSHI_UV_SHM_GROUPS - 1; i > 0; i--) {
        tshi_uv_shm_entry *entry = &own->group[i];
        int open = !entry->closed;
        for (int r = 0; entry->id && !open && r < world->size; r++) {
            const tshi_uv_shm_entry *its = tshi_uv_shm_find(world, r, entry->id);
            open = its && !TSHI_UV_GET(&its->closed);
        }
        if (!open) TSHI_UV_PUT(&entry->id, 0);
        if (!entry->id) found = entry;
    }
    return found;
}

/* Returns the lowest offset in this rank's segment at which n bytes are free; 0: none. sizes[i]:
 * ranks of the group of entry i. */
static int64_t tshi_uv_shm_gap(const tsh_uv_world *world, const int *sizes, int64_t n) {
    const tshi_uv_shm_segment *own = tshi_uv_segment_of(world, world->rank);
    int64_t at = tshi_uv_shm_begin();
    for (int i = 0; i < TSHI_UV_SHM_GROUPS; i++) {
        int64_t from = (int64_t)own->group[i].offset;
        int64_t to = from + tshi_uv_shm_row(sizes[i], 2 * sizes[i]);
        if (!own->group[i].id || at >= to || at + n <= from) continue;
        at = to; /* overlap: tries behind this group, and checks all entries again */
        i = -1;
    }
    return at + n <= TSHI_UV_SHM_SIZE ? at : 0;
}

/* Gives a new group rows in this rank's segment (a ring for each connection), before its
 * connections are made: so each member finds the rows of those that it is connected to. Without
 * rows the group uses TCP. */
static void tshi_uv_shm_publish(tshi_uv_group *group) {
    tsh_uv_world *world = group->world;
    tshi_uv_shm_entry *entry;
    int64_t offset;
    int wanted = 0;
    for (int m = 0; m < group->size; m++)
        wanted += m != group->rank && tshi_uv_shm_pair(world, world->rank, group->ranks[m]);
    if (!wanted) return;
    entry = tshi_uv_shm_free_entry(world);
    if (!entry) return;
    offset = tshi_uv_shm_gap(world, world->shm_sizes,
                             tshi_uv_shm_row(group->size, 2 * group->size));
    for (int m = 0; offset && m < group->size; m++) {
        int done = 1;
        if (m == group->rank)
            done = tshi_uv_shm_slots(world, offset, group->size, m);
        else if (tshi_uv_shm_pair(world, world->rank, group->ranks[m]))
            done = tshi_uv_shm_rows(world, offset, group->size, m);
        if (done) continue;
        tshi_uv_shm_without(world, "share memory with a new group");
        offset = 0;
    }
    if (!offset) return;
    world->shm_sizes[entry - tshi_uv_segment_of(world, world->rank)->group] = group->size;
    entry->offset = (uint64_t)offset;
    entry->closed = 0;
    TSHI_UV_PUT(&entry->id, group->id);
}

/* Sets up the rings of the connection group->link[i]. mine, theirs: the group's entry in the
 * segment of this rank, and of the peer. */
static void tshi_uv_shm_pipe(tshi_uv_group *group, int i, const tshi_uv_shm_entry *mine,
                             const tshi_uv_shm_entry *theirs) {
    tsh_uv_world *world = group->world;
    tshi_uv_link *link = &group->link[i];
    tshi_uv_pipe *pipe = &link->pipe;
    const int size = group->size,
              back = i - link->peer + group->rank; /* the peer's row for this rank */
    char *own = world->near[world->rank].base + mine->offset + tshi_uv_shm_row(size, i);
    char *its = world->near[group->ranks[link->peer]].base + theirs->offset +
                tshi_uv_shm_row(size, back);
    pipe->size = tshi_uv_shm_ring(size);
    pipe->out = own + TSHI_UV_SHM_PAGE;
    pipe->in = its + TSHI_UV_SHM_PAGE;
    pipe->sent = (int64_t *)(void *)own;
    pipe->taken = (int64_t *)(void *)(own + 64); /* on a cache line of its own */
    pipe->peer_sent = (const int64_t *)(const void *)its;
    pipe->peer_taken = (const int64_t *)(const void *)(its + 64);
    pipe->theirs = theirs;
}

/* Returns 1 if the entry of a group of `size` ranks is valid: all of its rows are in the
 * segment. */
static int tshi_uv_shm_valid(const tshi_uv_shm_entry *entry, int size) {
    return entry && entry->offset % TSHI_UV_SHM_PAGE == 0 &&
           entry->offset <= (uint64_t)(TSHI_UV_SHM_SIZE - tshi_uv_shm_row(size, 2 * size));
}

/* Called once a group's connections are made: those between ranks that share memory use it, not
 * their sockets, from here on. Both ends of a connection choose alike, as each reads the group's
 * entry in the segments of both. */
static void tshi_uv_shm_link(tshi_uv_group *group) {
    tsh_uv_world *world = group->world;
    const int own = world->rank, size = group->size;
    const tshi_uv_shm_entry *mine = tshi_uv_shm_find(world, own, group->id);
    group->whole = tshi_uv_shm_valid(mine, size);
    group->slot = tshi_uv_slot_size(size);
    for (int m = 0; m < size; m++) {
        int peer = group->ranks[m];
        const tshi_uv_shm_entry *theirs = tshi_uv_shm_find(world, peer, group->id);
        if (tshi_uv_shm_valid(theirs, size))
            group->link[m].slots = world->near[peer].base + theirs->offset +
                                   tshi_uv_shm_row(size, m);
        if (peer == own) continue;
        if (!mine || !tshi_uv_shm_valid(theirs, size) || !tshi_uv_shm_pair(world, own, peer)) {
            group->whole = 0;
            continue;
        }
        tshi_uv_shm_pipe(group, m, mine, theirs);
        tshi_uv_shm_pipe(group, size + m, mine, theirs);
    }
    for (int a = 0; a < size && group->whole; a++)
        for (int b = 0; b < a; b++)
            if (!tshi_uv_shm_pair(world, group->ranks[a], group->ranks[b])) group->whole = 0;
}

/* Marks in this rank's segment that it has closed the group, and wakes the members that share
 * memory with it, which may wait for it. */
static void tshi_uv_shm_leave(tshi_uv_group *group) {
    tsh_uv_world *world = group->world;
    tshi_uv_shm_entry *mine = world->near ? tshi_uv_shm_find(world, world->rank, group->id) : NULL;
    if (!mine) return;
    TSHI_UV_PUT(&mine->closed, 1);
    for (int m = 0; group->link && m < group->size; m++)
        if (group->link[m].pipe.out) tshi_uv_shm_wake(world, group->ranks[m]);
}

/* ========================================================================== */
/* >>uv-heap                                        MARK: - uv-heap (private) */
/* A heap for tensors at the end of this rank's segment, where the ranks of   */
/* its host read them: collectives copy them once, not into a ring and out of */
/* it. A block is whole pages, which get memory when it is allocated and lose */
/* it when it is freed. Small blocks, and those that the segment has no room  */
/* or the system no memory for, come from malloc.                             */
/* Needs: >>uv-shm.                                                           */
/* ========================================================================== */

/* A range of the heap: a block, or free. Offsets and sizes are multiples of TSHI_UV_SHM_PAGE. */
typedef struct tshi_uv_extent {
    int64_t at, size; /* offset in the segment; bytes */
    int used;         /* 1: a block */
} tshi_uv_extent;

struct tshi_uv_heap {
    char *base;     /* where this rank's segment is mapped */
    int64_t size;   /* bytes of the segment */
    int segment;    /* its descriptor */
    int64_t blocks; /* blocks that are not freed yet, those of malloc included */
    int closed;     /* 1: the world has ended: the heap ends with its last block */
    tshi_uv_extent *extent; /* all ranges, in order: no gaps, no two free ones side by side */
    int extents, room;      /* valid entries of extent; entries that it has memory for */
};

/* Returns the index of the range that a block begins; -1: the block came from malloc. */
static int tshi_uv_heap_find(const tshi_uv_heap *heap, const void *block) {
    const uintptr_t base = (uintptr_t)heap->base, place = (uintptr_t)block;
    int low = 0, high = heap->extents; /* the range sought is in [low, high) */
    if (place < base + TSHI_UV_SHM_SIZE || place >= base + (uintptr_t)heap->size) return -1;
    while (high - low > 1) {
        const int middle = low + (high - low) / 2;
        if (base + (uintptr_t)heap->extent[middle].at <= place)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* Returns a block of n bytes, n a multiple of the page; NULL: no room, or no memory. */
static void *tshi_uv_heap_take(tshi_uv_heap *heap, int64_t n) {
    tshi_uv_extent *extent;
    int i = 0;
    while (i < heap->extents && (heap->extent[i].used || heap->extent[i].size < n)) i++;
    if (i == heap->extents) return NULL;
    if (heap->extents == heap->room) { /* a range is about to be split */
        const int room = heap->room * 2;
        extent = (tshi_uv_extent *)realloc(heap->extent, (size_t)room * sizeof *extent);
        if (!extent) return NULL;
        heap->extent = extent;
        heap->room = room;
    }
    extent = &heap->extent[i];
    if (!tshi_uv_shm_reserve(heap->segment, extent->at, n)) {
        tshi_uv_shm_release(heap->segment, extent->at, n); /* what it got before it failed */
        return NULL;
    }
    if (extent->size > n) { /* the rest stays free */
        memmove(extent + 1, extent, (size_t)(heap->extents++ - i) * sizeof *extent);
        extent[1].at += n;
        extent[1].size -= n;
        extent->size = n;
    }
    extent->used = 1;
    return heap->base + extent->at;
}

static void tshi_uv_heap_give(tshi_uv_heap *heap, void *block) { /* Frees a block. */
    int i = tshi_uv_heap_find(heap, block), end;
    tshi_uv_extent *extent = heap->extent;
    if (i < 0) {
        free(block);
        return;
    }
    extent[i].used = 0;
    /* joins [i, end), the free ranges side by side */
    end = i + 1 < heap->extents && !extent[i + 1].used ? i + 2 : i + 1;
    if (i > 0 && !extent[i - 1].used) i--;
    extent[i].size = extent[end - 1].at + extent[end - 1].size - extent[i].at;
    memmove(&extent[i + 1], &extent[end], (size_t)(heap->extents - end) * sizeof *extent);
    heap->extents -= end - i - 1;
    /* of the whole range, as a page of the system may be larger than a block */
    tshi_uv_shm_release(heap->segment, extent[i].at, extent[i].size);
}

static void tshi_uv_heap_free(tshi_uv_heap *heap) { /* Frees a heap without blocks. */
    tshi_uv_shm_drop(heap->base, heap->size);
    tshi_uv_close_fd(&heap->segment);
    free(heap->extent);
    free(heap);
}

/* The tsh_allocator_fn of tsh_uv_allocator; user: the heap. */
static void *tshi_uv_heap_allocate(void *ptr, size_t old_size, size_t new_size, size_t align,
                                   void *user) {
    tshi_uv_heap *heap = (tshi_uv_heap *)user;
    const size_t page = TSHI_UV_SHM_PAGE;
    void *block = NULL;
    if (new_size) {
        if (new_size >= TSHI_UV_SHM_LEAST && new_size < (size_t)heap->size && align <= page)
            block = tshi_uv_heap_take(heap, (int64_t)((new_size + page - 1) / page * page));
        if (!block && posix_memalign(&block, align < sizeof block ? sizeof block : align,
                                     new_size) != 0)
            return NULL;
        if (ptr) memcpy(block, ptr, old_size < new_size ? old_size : new_size);
        heap->blocks++;
    }
    if (ptr) {
        tshi_uv_heap_give(heap, ptr);
        heap->blocks--;
    }
    if (heap->closed && !heap->blocks) tshi_uv_heap_free(heap);
    return block;
}

/* Makes the heap, if this rank's segment has room for one. Without memory for it there is none. */
static void tshi_uv_heap_open(tsh_uv_world *world) {
    const tshi_uv_near *own = &world->near[world->rank];
    tshi_uv_heap *heap;
    if (own->size == TSHI_UV_SHM_SIZE) return;
    heap = (tshi_uv_heap *)calloc(1, sizeof *heap);
    if (!heap) return;
    heap->room = 64;
    heap->extent = (tshi_uv_extent *)calloc((size_t)heap->room, sizeof *heap->extent);
    if (!heap->extent) {
        free(heap);
        return;
    }
    heap->base = own->base;
    heap->size = own->size;
    heap->segment = world->segment;
    heap->extent[0].at = TSHI_UV_SHM_SIZE; /* one range, free */
    heap->extent[0].size = own->size - TSHI_UV_SHM_SIZE;
    heap->extents = 1;
    world->heap = heap;
}

/* Unmaps all segments. If there is a heap, this rank's own stays mapped until its last block is
 * freed: a ctx frees some of its memory after it has closed its comms. */
static void tshi_uv_shm_end(tsh_uv_world *world) {
    tshi_uv_heap *heap = world->heap;
    if (heap) {
        world->near[world->rank].base = NULL;
        world->segment = -1;
        heap->closed = 1;
        if (!heap->blocks) tshi_uv_heap_free(heap);
    }
    for (int r = 0; world->near && r < world->size; r++) tshi_uv_shm_unmap(&world->near[r]);
    tshi_uv_close_fd(&world->segment);
    free(world->near);
}

/* Returns 1 if an address is in this rank's heap, so that the ranks of its host can read there. */
static int tshi_uv_in_heap(const tsh_uv_world *world, const void *at) {
    return world->heap && tshi_uv_heap_find(world->heap, at) >= 0;
}

/* Called when an error is about to be returned, after which the caller may change buffers that
 * other ranks still read: marks that in this rank's segment. A rank looks at the mark after it has
 * read (tshi_uv_unchanged), so it never returns such bytes as a result. */
static void tshi_uv_withdraw(const tsh_uv_world *world) {
    tshi_uv_shm_segment *own = world->heap ? tshi_uv_segment_of(world, world->rank) : NULL;
    if (!own || own->withdrawn) return;
    TSHI_UV_PUT(&own->withdrawn, 1);
    __sync_synchronize();
}

/* Returns 0 if a rank of this host has withdrawn its heap: what was read from it may be wrong. */
static int tshi_uv_unchanged(const tsh_uv_world *world, int rank) {
    __sync_synchronize();
    return !TSHI_UV_GET(&tshi_uv_segment_of(world, rank)->withdrawn);
}

/* ========================================================================== */
/* >>uv-settings                                MARK: - uv-settings (private) */
/* Reads a world's settings from tsh_uv_desc, else environment variables.     */
/* Variables are read in this order: TSHARD_*, torchrun's, Slurm's.           */
/* Functions that fail fill *error.                                           */
/* Needs: >>uv-types.                                                         */
/* ========================================================================== */

/* Sets world->rank and world->size. *of: where they come from. 0: desc; 1: TSHARD_*; 2: torchrun's
 * variables; 3: Slurm's; 4: none of these. */
static tsh_result tshi_uv_set_rank(const tsh_uv_desc *desc, tsh_uv_world *world, int *of,
                                   tsh_error *error) {
    static const char *const ranks[] = {"TSHARD_RANK", "RANK", "SLURM_PROCID"};
    static const char *const sizes[] = {"TSHARD_SIZE", "WORLD_SIZE", "SLURM_NTASKS"};
    int family = 0, has_rank = 0, has_size = 0;
    world->rank = desc->rank;
    world->size = desc->size;
    for (; !desc->size && family < 3 && !has_size; family++) {
        const char *rank = ranks[family], *size = sizes[family];
        has_size = tshb_env_int(size, 1, TSHI_UV_RANKS, &world->size, error);
        if (has_size >= 0) has_rank = tshb_env_int(rank, 0, TSHI_UV_RANKS - 1, &world->rank, error);
        if (has_size < 0 || has_rank < 0) return error->code;
        if (has_rank != has_size)
            return tsh_error_set(error, TSH_ERR_ARGUMENT, -1, "%s is set, but not %s",
                                 has_rank ? rank : size, has_rank ? size : rank);
    }
    if (!desc->size && !has_size) { /* no variables are set: a world of one rank */
        family = 4;
        world->rank = 0;
        world->size = 1;
    }
    *of = family;
    if (world->size < 1 || world->size > TSHI_UV_RANKS || world->rank < 0 ||
        world->rank >= world->size)
        return tsh_error_set(error, TSH_ERR_ARGUMENT, -1, "rank %d is not in a world of %d ranks",
                             world->rank, world->size);
    return TSH_OK;
}

/* Writes the first host of a Slurm node list: "node03" for "node[03-07,9],b2", "a" for "a,b". */
static void tshi_uv_first_host(const char *list, char *host, size_t room) {
    size_t n = strcspn(list, "[,"), m;
    const char *inner = list[n] == '[' ? list + n + 1 : "";
    const char *behind = strchr(inner, ']');
    m = strcspn(inner, "-,]"); /* length of the first number in the brackets */
    (void)snprintf(host, room, "%.*s%.*s%.*s", (int)n, list, (int)m, inner,
                   behind ? (int)strcspn(behind + 1, ",[") : 0, behind ? behind + 1 : "");
}

/* Copies into text the desc's field `given` or, if that is NULL, the environment variable. Returns
 * 1: copied; 0: neither is set; -1: an error. */
static int tshi_uv_text(const char *given, const char *variable, char *text, size_t room,
                        tsh_error *error) {
    if (!given) return tshb_env_text(variable, text, room, error);
    if ((size_t)snprintf(text, room, "%s", given) < room) return 1;
    (void)tsh_error_set(error, TSH_ERR_ARGUMENT, -1,
                        "tsh_uv_desc: a text is too long (%lu bytes): %.60s...",
                        (unsigned long)strlen(given), given);
    return -1;
}

/* Same as tshi_uv_text, for the name or address of a host. Removes brackets: "[::1]" becomes "::1".
 * Returns -1 for a URL or a "host:port", as other tools take them. `field`: name of the desc's
 * field, for the error. */
static int tshi_uv_host_setting(const char *given, const char *field, const char *variable,
                                char *host, size_t room, tsh_error *error) {
    int has = tshi_uv_text(given, variable, host, room, error);
    size_t n = has > 0 ? strlen(host) : 0;
    const char *colon;
    if (n > 2 && host[0] == '[' && host[n - 1] == ']' && strchr(host, ':')) {
        memmove(host, host + 1, n - 2);
        host[n - 2] = 0;
    }
    colon = has > 0 ? strchr(host, ':') : NULL;
    if (has <= 0 || (host[0] && !strpbrk(host, " \t\r\n/[]") &&
                     (!colon || strchr(colon + 1, ':')))) /* IPv6 addresses have 2 colons or more */
        return has;
    (void)tsh_error_set(error, TSH_ERR_ARGUMENT, -1,
                        "%s is \"%.100s\"; it takes the name or address of a host alone, such as "
                        "node1, 10.0.0.1 or fd00::1: no scheme, no blank, and the port is "
                        "TSHARD_PORT's",
                        given ? field : variable, host);
    return -1;
}

/* Sets world->host, the host of rank 0, and world->host_from, the name of the field or variable
 * that gave it. */
static tsh_result tshi_uv_set_host(const tsh_uv_desc *desc, int family, tsh_uv_world *world,
                                   tsh_error *error) {
    char *host = world->host, nodes[4096];
    size_t room = sizeof world->host;
    int has = tshi_uv_host_setting(desc->host, "tsh_uv_desc.host", "TSHARD_HOST", host, room,
                                   error);
    world->host_from = desc->host ? "tsh_uv_desc.host" : "TSHARD_HOST";
    if (!has) {
        has = tshi_uv_host_setting(NULL, NULL, "MASTER_ADDR", host, room, error);
        if (has > 0) world->host_from = "MASTER_ADDR";
    }
    if (!has && family == 3) {
        has = tshb_env_text("SLURM_STEP_NODELIST", nodes, sizeof nodes, error);
        if (has > 0) world->host_from = "SLURM_STEP_NODELIST";
        if (!has) has = tshb_env_text("SLURM_JOB_NODELIST", nodes, sizeof nodes, error);
        if (has > 0) tshi_uv_first_host(nodes, host, room);
    }
    if (!has) (void)snprintf(host, room, "127.0.0.1");
    return has < 0 ? error->code : TSH_OK;
}

/* Sets world->port, the TCP port of rank 0; to 0 if no setting gives it. */
static tsh_result tshi_uv_set_rank0_port(const tsh_uv_desc *desc, int family, tsh_uv_world *world,
                                         tsh_error *error) {
    int has, id = 0;
    char agent[64] = "";
    world->port = desc->port;
    if (desc->port < 0 || desc->port > 65535)
        return tsh_error_set(error, TSH_ERR_ARGUMENT, -1, "%d is not a port", desc->port);
    if (desc->port) return TSH_OK;
    has = tshb_env_int("TSHARD_PORT", 1, 65535, &world->port, error);
    if (!has) {
        has = tshb_env_int("MASTER_PORT", 1, 65534, &world->port, error);
        if (has > 0 && tshb_env_text("TORCHELASTIC_USE_AGENT_STORE", agent, sizeof agent, error))
            /* 2: takes the port after MASTER_PORT, since torchrun's store listens on MASTER_PORT;
             * 1: takes MASTER_PORT itself; -1: invalid */
            has = strcmp(agent, "True") == 0 ? 2 : strcmp(agent, "False") == 0 ? 1 : -1;
        if (has < 0 && agent[0])
            return tsh_error_set(error, TSH_ERR_ARGUMENT, -1,
                                 "TORCHELASTIC_USE_AGENT_STORE is \"%s\"; it takes True or False",
                                 agent);
        world->port += has == 2;
    }
    if (!has && family == 3) {
        has = tshb_env_int("SLURM_JOB_ID", 0, INT_MAX, &id, error);
        if (has > 0) world->port = 20000 + id % 20000;
    }
    return has < 0 ? error->code : TSH_OK;
}

/* Sets world->bind_host, unless it is set already, to an address of the network interface that the
 * user named: its first one of the preferred family, else its first one of the other. IPv6 is
 * preferred if rank 0's host is an IPv6 address, else IPv4. */
static tsh_result tshi_uv_set_interface(const tsh_uv_desc *desc, tsh_uv_world *world,
                                        tsh_error *error) {
    const int family = strchr(world->host, ':') ? AF_INET6 : AF_INET;
    uv_interface_address_t *list = NULL;
    char name[64], names[200] = "", text[64];
    int count = 0, best = 0, failed, has;
    if (world->bind_host[0]) return TSH_OK;
    has = tshi_uv_text(desc->interface_name, "TSHARD_INTERFACE", name, sizeof name, error);
    if (has <= 0) return has < 0 ? error->code : TSH_OK;
    failed = uv_interface_addresses(&list, &count);
    for (int i = 0; !failed && i < count; i++) {
        const uv_interface_address_t *at = &list[i];
        int is = at->address.address4.sin_family == AF_INET ? AF_INET : AF_INET6;
        int rank = is == family ? 2 : 1; /* 2: the preferred family, 1: the other */
        (void)snprintf(text, sizeof text, " %s", at->name);
        if (!strstr(names, text)) tsh_text_add(names, sizeof names, "%s", text);
        if (strcmp(at->name, name) != 0 || rank <= best ||
            (is == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&at->address.address6.sin6_addr)))
            continue;
        best = rank;
        (void)(is == AF_INET
                   ? uv_ip4_name(&at->address.address4, world->bind_host, sizeof world->bind_host)
                   : uv_ip6_name(&at->address.address6, world->bind_host, sizeof world->bind_host));
    }
    if (!failed) uv_free_interface_addresses(list, count);
    if (best) return TSH_OK;
    return tsh_error_set(error, TSH_ERR_ARGUMENT, -1,
                         "%s is \"%s\", and no interface of that name has an address here; there "
                         "are:%s",
                         desc->interface_name ? "tsh_uv_desc.interface_name" : "TSHARD_INTERFACE",
                         name, failed ? " none" : names);
}

/* ROOM: bytes of the buffer into which a key is read; LEAST: fewest bytes of a key */
enum { TSHI_UV_KEY_ROOM = 4096, TSHI_UV_KEY_LEAST = 16 };

/* Hashes a key into `hash`; fails if the key is too short. `where`: name of the field, variable or
 * file that has the key, for the error. */
static tsh_result tshi_uv_take_key(const void *key, size_t size, const char *where,
                                   unsigned char hash[32], tsh_error *error) {
    (void)crypto_hash_sha256(hash, (const unsigned char *)key, size);
    if (size >= TSHI_UV_KEY_LEAST) return TSH_OK;
    return tsh_error_set(error, TSH_ERR_ARGUMENT, -1,
                         "%.300s has a key of %d bytes, and less than %d can be guessed; "
                         "`tshard-run --new-key FILE` writes a good one into a new file, for "
                         "TSHARD_KEY_FILE",
                         where, (int)size, TSHI_UV_KEY_LEAST);
}

/* Reads a key file into bytes and adds its length to *size, which must be 0 before. The file must
 * belong to the user of this process or to root, and no other user may read or write it. */
static tsh_result tshi_uv_read_key(int fd, const char *path, unsigned char *bytes, size_t room,
                                   size_t *size, tsh_error *error) {
    struct stat info;
    /* more: 1: there may be more to read, 0: end of file, -1: failed (errno) */
    ssize_t more = fd < 0 || fstat(fd, &info) != 0 ? -1 : 1;
    if (more > 0 && !S_ISREG(info.st_mode))
        return tsh_error_set(error, TSH_ERR_ARGUMENT, -1,
                             "TSHARD_KEY_FILE: %.300s is not a regular file", path);
    if (more > 0 && info.st_uid != 0 && info.st_uid != geteuid())
        return tsh_error_set(error, TSH_ERR_ARGUMENT, -1,
                             "TSHARD_KEY_FILE: %.300s belongs to user %ld, who is neither root nor "
                             "the user of this process: chown %ld %.300s",
                             path, (long)info.st_uid, (long)geteuid(), path);
    if (more > 0 && info.st_mode & 077)
        return tsh_error_set(error, TSH_ERR_ARGUMENT, -1,
                             "TSHARD_KEY_FILE: other users can read or write %.300s (mode %04o): "
                             "chmod 600 %.300s",
                             path, (unsigned)info.st_mode & 07777, path);
    while (more > 0 && *size < room)
        if ((more = read(fd, bytes + *size, room - *size)) > 0) *size += (size_t)more;
    if (more < 0)
        return tsh_error_set(error, TSH_ERR_ARGUMENT, -1, "TSHARD_KEY_FILE: %.300s: %s", path,
                             tshi_uv_why(errno));
    if (more == 0) return TSH_OK;
    return tsh_error_set(error, TSH_ERR_ARGUMENT, -1,
                         "TSHARD_KEY_FILE: %.300s has %d bytes or more", path, (int)room);
}

/* Reads a key file and hashes the key, without the line ends that follow it. */
static tsh_result tshi_uv_key_file(const char *path, unsigned char hash[32], tsh_error *error) {
    unsigned char bytes[TSHI_UV_KEY_ROOM];
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* opening a FIFO does not block */
    size_t n = 0;
    tsh_result result = tshi_uv_read_key(fd, path, bytes, sizeof bytes, &n, error);
    if (fd >= 0) (void)close(fd);
    while (n && (bytes[n - 1] == '\n' || bytes[n - 1] == '\r')) n--;
    if (result == TSH_OK) result = tshi_uv_take_key(bytes, n, path, hash, error);
    sodium_memzero(bytes, sizeof bytes);
    return result;
}

/* Sets world->insecure (1: other hosts need no key), world->keyed (1: there is a key) and
 * world->secret (hash of the key; all zeros: there is no key). */
static tsh_result tshi_uv_set_key(const tsh_uv_desc *desc, tsh_uv_world *world, tsh_error *error) {
    char text[TSHI_UV_KEY_ROOM];
    int has;
    tsh_result result;
    world->insecure = desc->insecure;
    if (!desc->insecure && tshb_env_int("TSHARD_INSECURE", 0, 1, &world->insecure, error) < 0)
        return error->code;
    world->keyed = 1;
    if (desc->key)
        return tshi_uv_take_key(desc->key, desc->key_size, "tsh_uv_desc.key", world->secret, error);
    has = tshb_env_text("TSHARD_KEY", text, sizeof text, error);
    if (has > 0) {
        result = tshi_uv_take_key(text, strlen(text), "TSHARD_KEY", world->secret, error);
        sodium_memzero(text, sizeof text);
        return result;
    }
    if (!has) has = tshb_env_text("TSHARD_KEY_FILE", text, sizeof text, error);
    if (has > 0) return tshi_uv_key_file(text, world->secret, error);
    world->keyed = 0;
    return has < 0 ? error->code : TSH_OK;
}

/* Sets world->checksum: 1: checksums on all data connections, -1: on none unless the peer wants
 * them, 0: on those that are not loopback. */
static tsh_result tshi_uv_set_checksum(const tsh_uv_desc *desc, tsh_uv_world *world,
                                       tsh_error *error) {
    int on = 0, has = 0;
    world->checksum = desc->checksum > 0 ? 1 : desc->checksum < 0 ? -1 : 0;
    if (!world->checksum) has = tshb_env_int("TSHARD_CHECKSUM", 0, 1, &on, error);
    if (has > 0) world->checksum = on ? 1 : -1;
    return has < 0 ? error->code : TSH_OK;
}

/* Sets world->encrypt: 1: all connections are encrypted, -1: none unless the peer wants it, 0: with
 * a key, those that are not loopback. */
static tsh_result tshi_uv_set_encrypt(const tsh_uv_desc *desc, tsh_uv_world *world,
                                      tsh_error *error) {
    int on = 0, has = 0;
    world->encrypt = desc->encrypt > 0 ? 1 : desc->encrypt < 0 ? -1 : 0;
    if (!world->encrypt) has = tshb_env_int("TSHARD_ENCRYPT", 0, 1, &on, error);
    if (has > 0) world->encrypt = on ? 1 : -1;
    return has < 0 ? error->code : TSH_OK;
}

/* Sets world->shm: by TSHARD_SHM, else 1; by tensors (tsh_uv_desc), whether there is a heap. */
static tsh_result tshi_uv_set_shm(tsh_uv_world *world, int tensors, tsh_error *error) {
    world->shm = 1;
    if (tshb_env_int("TSHARD_SHM", 0, 2, &world->shm, error) < 0) return error->code;
    if (world->shm && tensors) world->shm = tensors > 0 ? 2 : 1;
    return TSH_OK;
}

/* Reads and checks all settings of the world; opens no socket. */
static tsh_result tshi_uv_settings(const tsh_uv_desc *desc, tsh_uv_world *world, tsh_error *error) {
    unsigned char hash[32];
    int family = 0;
    size_t room = sizeof world->bind_host;
    if (tshi_uv_set_rank(desc, world, &family, error) != TSH_OK ||
        tshi_uv_set_host(desc, family, world, error) != TSH_OK ||
        tshi_uv_set_rank0_port(desc, family, world, error) != TSH_OK ||
        !tshb_timeout(desc->timeout, "tsh_uv_desc.timeout", &world->timeout, error) ||
        !tshb_time_limit(desc->heartbeat, "tsh_uv_desc.heartbeat", "TSHARD_HEARTBEAT", 10,
                         &world->heartbeat, error) ||
        !tshb_time_limit(desc->notice, "tsh_uv_desc.notice", "", 10, &world->notice, error) ||
        tshi_uv_host_setting(desc->bind, "tsh_uv_desc.bind", "TSHARD_BIND", world->bind_host, room,
                             error) < 0 ||
        tshi_uv_set_interface(desc, world, error) != TSH_OK ||
        tshi_uv_text(desc->job, "TSHARD_JOB", world->jobname, sizeof world->jobname, error) < 0 ||
        tshi_uv_set_key(desc, world, error) != TSH_OK)
        return error->code;
    if (tshi_uv_set_checksum(desc, world, error) != TSH_OK ||
        tshi_uv_set_encrypt(desc, world, error) != TSH_OK ||
        tshi_uv_set_shm(world, desc->tensors, error) != TSH_OK)
        return error->code;
    if (world->heartbeat < TSHI_UV_SECOND)
        return tsh_error_set(error, TSH_ERR_ARGUMENT, world->rank,
                             "a heartbeat of %.3f s (TSHARD_HEARTBEAT) is below 1 s, the least "
                             "that a busy machine keeps",
                             (double)world->heartbeat / 1e9);
    (void)crypto_hash_sha256(hash, (const unsigned char *)world->jobname, strlen(world->jobname));
    /* a rank of another byte order gets another number, so that the handshake refuses it */
    memcpy(&world->job, hash, sizeof world->job);
    world->listener = desc->listener > 0 ? desc->listener : -1;
    if (world->listener < 0 && world->rank == 0 &&
        tshb_env_int("TSHARD_LISTENER", 1, INT_MAX, &world->listener, error) < 0)
        return error->code;
    if (world->size == 1 || world->port || (world->rank == 0 && world->listener >= 0))
        return TSH_OK;
    return tsh_error_set(error, TSH_ERR_ARGUMENT, -1,
                         "rank %d does not know on which port rank 0 listens: set TSHARD_PORT, or "
                         "start the ranks with tshard-run",
                         world->rank);
}

/* ========================================================================== */
/* >>uv-error                                      MARK: - uv-error (private) */
/* The world's error is the first one that is set, and does not change.       */
/* The caller's thread reports errors to the control thread.                  */
/* The control thread decides (>>uv-decide) and sets the error, locked.       */
/* Messages in the log that other hosts can cause are limited, at the end.    */
/* Needs: >>uv-types.                                                         */
/* ========================================================================== */

/* Returns the code of the world's error, TSH_OK if it has none. Any thread may call this. */
static tsh_result tshi_uv_failed(const tsh_uv_world *world) {
    return (tsh_result)TSHI_UV_GET(&world->failed);
}

/* Sets the world's error, unless it has one already, and wakes the caller's thread. */
static void tshi_uv_fail(tsh_uv_world *world, const tsh_error *error) {
    uv_mutex_lock(&world->lock);
    if (tshi_uv_failed(world) == TSH_OK) {
        world->error = *error;
        TSHI_UV_PUT(&world->halted, 1); /* the caller's thread moves no more data */
        TSHI_UV_PUT(&world->failed, (int)error->code);
    }
    uv_cond_broadcast(&world->changed);
    uv_mutex_unlock(&world->lock);
    (void)uv_async_send(&world->wake_caller);
}

TSH_PRINTF(5, 0)
static void tshi_uv_fill_report(tshi_uv_report *e, tshi_uv_error_kind kind, tsh_result code,
                                int rank, const char *format, va_list list) {
    memset(e, 0, sizeof *e);
    e->kind = kind;
    e->error.code = code;
    e->error.rank = rank;
    tsh_text_format(e->error.message, sizeof e->error.message, format, list);
}

/* Hands an error report of the caller's thread to the control thread, unless an earlier one is
 * pending there, and stops moving data. group, seq: id of the group and number of the collective in
 * question; group 0: none. */
TSH_PRINTF(7, 8)
static void tshi_uv_report_error(tsh_uv_world *world, tshi_uv_error_kind kind, uint64_t group,
                                 uint64_t seq, tsh_result code, int rank, const char *format, ...) {
    tshi_uv_report e;
    va_list list;
    va_start(list, format);
    tshi_uv_fill_report(&e, kind, code, rank, format, list);
    va_end(list);
    e.group = group;
    e.seq = seq;
    uv_mutex_lock(&world->lock);
    if (world->reported.kind == TSHI_UV_NOTHING) world->reported = e;
    TSHI_UV_PUT(&world->halted, 1);
    uv_mutex_unlock(&world->lock);
    (void)uv_async_send(&world->wake_control);
}

/* Reports "rank 1 cannot `what`: `why`" while other ranks wait for this one. Waits until the
 * world's error is decided and returns its code, so that tsh_comm_error has a sentence when the
 * failed call returns. */
static tsh_result tshi_uv_cannot(tsh_uv_world *world, tsh_result code, const char *what,
                                 const char *why) {
    tshi_uv_report_error(world, TSHI_UV_ABORT, 0, 0, code, world->rank, "rank %d cannot %s: %s",
                         world->rank, what, why);
    uv_mutex_lock(&world->lock);
    while (tshi_uv_failed(world) == TSH_OK) uv_cond_wait(&world->changed, &world->lock);
    uv_mutex_unlock(&world->lock);
    return tshi_uv_failed(world);
}

/* Format of the error for a wrong checksum or tag. Arguments: "data" or "control"; this rank and
 * its host:port; the peer and its host:port; TSHI_UV_CHECK_OF; what was damaged; "" or " of
 * all-reduce ...". */
#define TSHI_UV_DAMAGED_TEXT                                                                       \
    "the %s connection of rank %d (%s) and rank %d (%s) changes bytes: the %s of %s%s is wrong; "  \
    "is a network card, cable or switch between them faulty?"
/* What reveals damaged bytes on a connection: the tag if it is encrypted, else (channel NULL) the
 * checksum. */
#define TSHI_UV_CHECK_OF(channel) ((channel) ? "tag" : "checksum")

/* Returns the open group with this id; NULL: there is none. The caller must hold the lock. */
static tshi_uv_group *tshi_uv_find_group(const tsh_uv_world *world, uint64_t id) {
    tshi_uv_group *group = world->groups;
    while (group && group->id != id) group = group->next;
    return group;
}

/* Converts a world rank to a rank of the group; -1: it is not a member. */
static int tshi_uv_member(const tshi_uv_group *group, int world_rank) {
    for (int r = 0; r < group->size; r++)
        if (group->ranks[r] == world_rank) return r;
    return -1;
}

/* Logs one line for each kind of message that was counted but not logged, unless one of that kind
 * was logged less than a second ago. now INT64_MAX: logs them in any case. */
static void tshi_uv_log_counted(tsh_uv_world *world, int64_t now) {
    for (int i = 0; i < TSHI_UV_TALLIES; i++) {
        tshi_uv_log_count *t = &world->tally[i];
        if (!t->count || (t->told && now - t->told < TSHI_UV_SECOND)) continue;
        if (t->count == 1)
            tsh_log_message(&world->logger, "%s", t->last);
        else
            tsh_log_message(&world->logger, "%s (the last of %d since the message before)", t->last,
                            t->count);
        t->count = 0;
        t->told = tsh_now();
    }
}

/* Logs a message that other hosts can cause as often as they like. Of each kind, at most one a
 * second is logged; the others are only counted. */
TSH_PRINTF(3, 4)
static void tshi_uv_note(tsh_uv_world *world, int kind, const char *format, ...) {
    tshi_uv_log_count *t = &world->tally[kind];
    va_list list;
    va_start(list, format);
    tsh_text_format(t->last, sizeof t->last, format, list);
    va_end(list);
    t->count++;
    tshi_uv_log_counted(world, tsh_now());
}

/* ========================================================================== */
/* >>uv-post                                        MARK: - uv-post (private) */
/* Sends control messages. tshi_uv_write begins one, in world->outgoing.      */
/* The *_field functions append fields to it; tshi_uv_post sends it.          */
/* Needs: >>uv-check >>uv-secret >>uv-socket.                                 */
/* ========================================================================== */

/* limit of unsent bytes to one peer: above it, new messages to that peer are discarded */
enum { TSHI_UV_BACKLOG = 1 << 20 };

/* Begins a control message; returns the cursor for its payload. */
static tshi_uv_cursor *tshi_uv_write(tsh_uv_world *world, tshi_uv_type type) {
    tshi_uv_outgoing *outgoing = &world->outgoing;
    outgoing->c = tshi_uv_cursor_over(outgoing->bytes, sizeof outgoing->bytes, 1);
    /* 0 in place of the payload's length, which tshi_uv_post fills in */
    (void)tshi_uv_field(&outgoing->c, 0, 4);
    (void)tshi_uv_field(&outgoing->c, type, 1);
    (void)tshi_uv_field(&outgoing->c, 0, 4); /* 0 for the checksum: tshi_uv_post fills it in */
    return &outgoing->c;
}

/* Makes sure that the buffer has capacity for n more bytes. Returns 0 if memory is lacking. */
static int tshi_uv_reserve(tshi_uv_buffer *bytes, size_t n) {
    size_t room = bytes->room ? bytes->room : 1024;
    char *data;
    while (room < bytes->used + n) room *= 2;
    if (room == bytes->room) return 1;
    data = (char *)realloc(bytes->data, room);
    if (!data) return 0;
    bytes->data = data;
    bytes->room = room;
    return 1;
}

/* Removes the first n bytes of the buffer. */
static void tshi_uv_drop(tshi_uv_buffer *bytes, size_t n) {
    memmove(bytes->data, bytes->data + n, bytes->used - n);
    bytes->used -= n;
}

/* Sends as much of peer->out as the socket takes now; tshi_uv_watch_peers waits until the rest can
 * be sent. If sending fails, discards the bytes: reading will report that the peer is gone. */
static void tshi_uv_flush(tshi_uv_peer *peer) {
    tshi_uv_buffer *out = &peer->out;
    while (out->used) {
        ssize_t n = send(peer->fd, out->data, out->used, TSHI_UV_NOSIGNAL);
        if (n < 0 && tshi_uv_later()) return;
        if (n > 0) {
            peer->sent += (uint64_t)n;
            if (!peer->mark) peer->marked = tsh_now();
            if (!peer->mark) peer->mark = peer->sent;
        }
        tshi_uv_drop(out, n > 0 ? (size_t)n : out->used);
    }
}

/* Encrypts and sends world->outgoing, a message of n bytes, as two records: length and type; the
 * payload. The place of a checksum between these is left out. */
static void tshi_uv_post_sealed(tshi_uv_peer *peer, size_t n) {
    const unsigned char *bytes = peer->world->outgoing.bytes;
    const size_t head = TSHI_UV_MESSAGE_HEAD - TSHI_UV_MESSAGE_TAIL; /* length and type */
    const size_t payload = n - TSHI_UV_MESSAGE_HEAD;
    char *to = peer->out.data + peer->out.used;
    tshi_uv_seal(&peer->channel->out, bytes, head, to);
    tshi_uv_seal(&peer->channel->out, bytes + TSHI_UV_MESSAGE_HEAD, payload,
                 to + head + TSHI_UV_TAG);
    peer->out.used += head + payload + 2 * TSHI_UV_TAG;
    tshi_uv_flush(peer);
}

/* Sends world->outgoing, the message that tshi_uv_write began, to the peer. No-op if there is no
 * connection to it (the peer may be this rank), if too much is unsent (a peer that does not read
 * will be found silent), or if memory is lacking. */
static void tshi_uv_post(tshi_uv_peer *peer) {
    tsh_uv_world *world = peer->world;
    tshi_uv_outgoing *outgoing = &world->outgoing;
    /* size of the message without the checksum at its end */
    size_t n = (size_t)(outgoing->c.at - outgoing->bytes);
    /* bytes of the message before the checksum of its head */
    size_t before = TSHI_UV_MESSAGE_HEAD - TSHI_UV_MESSAGE_TAIL;
    tshi_uv_cursor c = tshi_uv_cursor_over(outgoing->bytes, n + TSHI_UV_MESSAGE_TAIL, 1);
    if (peer->fd < 0 || outgoing->c.bad || n > TSHI_UV_MESSAGE_HEAD + TSHI_UV_PAYLOAD ||
        peer->out.used > TSHI_UV_BACKLOG || !tshi_uv_reserve(&peer->out, n + 2 * TSHI_UV_TAG))
        return;
    (void)tshi_uv_field(&c, n - TSHI_UV_MESSAGE_HEAD, 4);
    if (peer->channel) {
        tshi_uv_post_sealed(peer, n);
        return;
    }
    c.at = outgoing->bytes + before;
    (void)tshi_uv_field(&c, tshi_uv_crc(world, 0, outgoing->bytes, before), 4);
    c.at = outgoing->bytes + n;
    (void)tshi_uv_field(&c, tshi_uv_crc(world, 0, outgoing->bytes, n), 4);
    n += TSHI_UV_MESSAGE_TAIL;
    memcpy(peer->out.data + peer->out.used, outgoing->bytes, n);
    peer->out.used += n;
    tshi_uv_flush(peer);
}

static void tshi_uv_post_all(tsh_uv_world *world) {
    for (int r = 0; r < world->size; r++) tshi_uv_post(&world->peer[r]);
}

/* ========================================================================== */
/* >>uv-decide                                    MARK: - uv-decide (private) */
/* How all ranks agree on one error, on which the coordinator decides.        */
/* The coordinator is the lowest rank that is not lost.                       */
/* A rank that finds an error reports it to the coordinator (REPORT).         */
/* The coordinator collects reports for 20 ms and keeps the gravest one.      */
/* If that is about a collective, it asks all ranks what they called (ASK).   */
/* Then it sends its decision to all ranks (DECISION).                        */
/* Needs: >>uv-error >>uv-post.                                               */
/* ========================================================================== */

/* The coordinator collects reports for 20 ms, and waits for answers to ASK until 60 ms after the
 * first report. Any rank that has reported decides alone if no decision arrives for 500 ms. */
enum { TSHI_UV_COLLECT_MS = 20, TSHI_UV_ASK_MS = 60, TSHI_UV_ALONE_MS = 500 };

/* Returns this rank's coordinator: the lowest rank that it is connected to, or itself. */
static int tshi_uv_coordinator_of(const tsh_uv_world *world) {
    int r = 0;
    while (r != world->rank && world->peer[r].state != TSHI_UV_THERE) r++;
    return r;
}

/* Sends the world's error to the peers that have sent this rank an error report. */
static void tshi_uv_pass_on(tsh_uv_world *world) {
    tsh_error error = world->error;
    tshi_uv_error_fields(tshi_uv_write(world, TSHI_UV_DECISION), &error, world->size);
    for (int r = 0; r < world->size; r++)
        if (world->peer[r].reported) tshi_uv_post(&world->peer[r]);
}

/* Handles a DECISION, the error on which a peer has decided. It becomes the world's error at once
 * if the peer is the coordinator, or if it says that this rank is lost. Any other is held back as
 * world->offer (of several, that of the lowest rank), so that a rank that was cut off does not
 * decide for the others when it is back. */
static void tshi_uv_on_decision(tshi_uv_peer *peer, const tsh_error *error) {
    tsh_uv_world *world = peer->world;
    if (tshi_uv_failed(world) != TSH_OK) return;
    if (peer->rank == tshi_uv_coordinator_of(world) ||
        (error->code == TSH_ERR_LOST && error->rank == world->rank)) {
        tshi_uv_fail(world, error);
        tshi_uv_pass_on(world);
    } else if (!world->offered_at || peer->rank < world->offered_by) {
        if (!world->offered_at) world->offered_at = tsh_now();
        world->offer = *error;
        world->offered_by = peer->rank;
    }
}

/* Makes `error` the world's error and sends it to all peers. */
static void tshi_uv_send_decision(tsh_uv_world *world, tsh_error *error) {
    tshi_uv_error_fields(tshi_uv_write(world, TSHI_UV_DECISION), error, world->size);
    tshi_uv_post_all(world);
    tshi_uv_fail(world, error);
}

/* Adopts the decision held back as world->offer, once no rank below its sender is connected, or
 * after TSHI_UV_ALONE_MS. Forwards it to all peers: its sender may not reach every rank. */
static void tshi_uv_take_offer(tsh_uv_world *world, int64_t now) {
    if (!world->offered_at || tshi_uv_failed(world) != TSH_OK ||
        (world->offered_by > tshi_uv_coordinator_of(world) &&
         now - world->offered_at < TSHI_UV_ALONE_MS * TSHI_UV_MS))
        return;
    tshi_uv_send_decision(world, &world->offer);
}

/* Fills this rank's answer to an ASK message, which asks about collective number seq of the group
 * with this id. */
static void tshi_uv_answer_for(tsh_uv_world *world, uint64_t id, uint64_t seq,
                               tshi_uv_answer *answer) {
    const tshi_uv_group *group;
    memset(answer, 0, sizeof *answer);
    answer->told = 1;
    uv_mutex_lock(&world->lock);
    group = tshi_uv_find_group(world, id);
    if (group) {
        answer->member = 1;
        answer->rank = group->rank;
        answer->started = seq < group->started && group->started - seq <= TSHI_UV_RECORDS;
        if (answer->started) answer->record = group->record[seq % TSHI_UV_RECORDS];
    }
    uv_mutex_unlock(&world->lock);
}

/* Returns 1 if a rank's answer to ASK is final: it has started the collective, or is not in the
 * group. */
static int tshi_uv_has_told(const tshi_uv_answer *answer) {
    return answer->told && (answer->started || !answer->member);
}

/* Asks all ranks (ASK) what they called as the collective that the report world->held is about,
 * except those that have given a final answer. */
static void tshi_uv_ask(tsh_uv_world *world) {
    tshi_uv_cursor *c = tshi_uv_write(world, TSHI_UV_ASK);
    (void)tshi_uv_field(c, world->held.group, 8);
    (void)tshi_uv_field(c, world->held.seq, 8);
    for (int r = 0; r < world->size; r++) {
        tshi_uv_peer *peer = &world->peer[r];
        if (tshi_uv_has_told(&peer->answer)) continue;
        tshi_uv_post(peer);
        if (r == world->rank)
            tshi_uv_answer_for(world, world->held.group, world->held.seq, &peer->answer);
    }
}

/* Returns 1 if this rank holds an error report and waits for a decision. */
static int tshi_uv_has_reported(const tsh_uv_world *world) {
    return world->held.kind != TSHI_UV_NOTHING && tshi_uv_failed(world) == TSH_OK;
}

/* Sends world->held, the report that this rank holds, to the coordinator, unless that has it
 * already. If this rank is the coordinator: begins to collect reports, and asks all ranks about the
 * collective that the report is about. */
static void tshi_uv_send_report(tsh_uv_world *world) {
    int to = tshi_uv_coordinator_of(world);
    if (!tshi_uv_has_reported(world) || to == world->reported_to) return;
    world->reported_to = to;
    if (to != world->rank) {
        TSHI_UV_PUT(&world->halted, 1);
        tshi_uv_report_fields(tshi_uv_write(world, TSHI_UV_REPORT), &world->held, world->size);
        tshi_uv_post(&world->peer[to]);
        return;
    }
    if (!world->considered_at) world->considered_at = tsh_now();
    for (int r = 0; r < world->size; r++) world->peer[r].answer.told = 0;
    if (world->held.group) tshi_uv_ask(world);
}

/* Stores an error report, of this rank or received, in world->held, unless the report there has
 * priority: it is of a larger kind, or of the same kind and does not blame a higher rank. If this
 * rank is the coordinator, it still moves data: calls in flight may yet complete. */
static void tshi_uv_hold(tsh_uv_world *world, const tshi_uv_report *e) {
    if (tshi_uv_failed(world) != TSH_OK || e->kind < world->held.kind ||
        (e->kind == world->held.kind && e->error.rank >= world->held.error.rank))
        return;
    world->held = *e;
    if (!world->held_since) world->held_since = tsh_now();
    world->reported_to = -1;
    tshi_uv_send_report(world);
}

/* Reports an error that the control thread of this rank has found: stops moving data and holds the
 * report. */
TSH_PRINTF(5, 6)
static void tshi_uv_suspect(tsh_uv_world *world, tshi_uv_error_kind kind, tsh_result code, int rank,
                            const char *format, ...) {
    tshi_uv_report e;
    va_list list;
    va_start(list, format);
    tshi_uv_fill_report(&e, kind, code, rank, format, list);
    va_end(list);
    TSHI_UV_PUT(&world->halted, 1);
    tshi_uv_hold(world, &e);
}

static void tshi_uv_lacks_memory(tsh_uv_world *world, int rank) {
    tshi_uv_suspect(world, TSHI_UV_ABORT, TSH_ERR_MEMORY, world->rank,
                    "rank %d has no memory for a connection to rank %d", world->rank, rank);
}

/* ---- finding out that the network is cut ---- */

/* Returns the longest time in ns that may pass between two events of a pulse (tshi_uv_pulse). A
 * longer time is a gap: heartbeats are missing. */
static int64_t tshi_uv_gap(const tsh_uv_world *world) {
    return world->heartbeat / 3;
}

/* Records in `pulse` (peer->heard or peer->acked) that its event occurred at time `at`. Time in
 * which this thread itself did not run does not count as a gap between events. */
static void tshi_uv_beats(tshi_uv_peer *peer, tshi_uv_pulse *pulse, int64_t at) {
    const tsh_uv_world *world = peer->world;
    int64_t now = tsh_now(), gap = tshi_uv_gap(world);
    int overslept = world->ticked && now - world->ticked > gap;
    if ((overslept ? world->ticked : now) - pulse->last > gap) pulse->back = now;
    pulse->last = at;
}

/* If the peer's system has acknowledged the first peer->mark bytes sent to it, updates peer->acked
 * and sets the next mark. */
static void tshi_uv_look(tshi_uv_peer *peer) {
    int left = tshi_uv_unacknowledged(peer->fd);
    int64_t now = tsh_now();
    if (left < 0) { /* unknown: assumes that all sent bytes are acknowledged */
        tshi_uv_beats(peer, &peer->acked, now);
        peer->mark = 0;
        return;
    }
    if (peer->sent - (uint64_t)left < peer->mark) return;
    tshi_uv_beats(peer, &peer->acked, left ? peer->marked : now);
    peer->mark = left ? peer->sent : 0;
    peer->marked = now;
}

/* Returns 1 if a pulse has had no event for longer than tshi_uv_gap, or if such a gap ended less
 * than TSHARD_HEARTBEAT ago. */
static int tshi_uv_missed(const tsh_uv_world *world, const tshi_uv_pulse *pulse) {
    int64_t now = tsh_now();
    return now - pulse->last > tshi_uv_gap(world) ||
           (pulse->back && now - pulse->back < world->heartbeat);
}

/* Returns 1 if the network to a peer is cut, or was a short time ago. A process that is stopped or
 * busy is silent, too, but its system still acknowledges the bytes that arrive. */
static int tshi_uv_is_cut(const tshi_uv_peer *peer) {
    return tshi_uv_missed(peer->world, &peer->heard) && tshi_uv_missed(peer->world, &peer->acked);
}

typedef enum tshi_uv_side { TSHI_UV_OURS, TSHI_UV_THEIRS, TSHI_UV_NEITHER } tshi_uv_side;

/* Returns the side of a network cut on which rank r is: with this rank, or beyond the cut. Ranks
 * that left or are stopped are on neither side. */
static tshi_uv_side tshi_uv_side_of(const tsh_uv_world *world, int r) {
    const tshi_uv_peer *peer = &world->peer[r];
    if (r == world->rank) return TSHI_UV_OURS;
    if (peer->state == TSHI_UV_ABSENT || peer->state == TSHI_UV_LEFT) return TSHI_UV_NEITHER;
    if (tshi_uv_is_cut(peer)) return TSHI_UV_THEIRS;
    return peer->state == TSHI_UV_THERE ? TSHI_UV_OURS : TSHI_UV_NEITHER;
}

/* Writes the ranks on one side of a network cut, and the address of the lowest: "ranks 2 3
 * (10.77.0.3)". *count: number of these ranks. Returns the lowest rank; -1: there is none. */
static int tshi_uv_list_side(const tsh_uv_world *world, tshi_uv_side side, int *count, char *text,
                             size_t room) {
    char host[64];
    int lowest = -1;
    *count = 0;
    (void)snprintf(text, room, "ranks");
    for (int r = 0; r < world->size; r++) {
        if (tshi_uv_side_of(world, r) != side) continue;
        if (lowest < 0) lowest = r;
        if (++*count <= 8)
            tsh_text_add(text, room, " %d", r);
        else if (*count == 9)
            tsh_text_add(text, room, " ...");
    }
    if (lowest < 0) return -1;
    if (*count == 1) (void)snprintf(text, room, "rank %d", lowest);
    tshi_uv_host_text(lowest == world->rank ? &world->own : &world->peer[lowest].address, host,
                      sizeof host);
    tsh_text_add(text, room, " (%s)", host);
    return lowest;
}

/* Reports that the network is cut. Blames the lowest rank of the smaller side. If both sides have
 * the same number of ranks, blames the side that does not have the lowest rank of all. Both sides
 * write the same text without hearing each other. */
static void tshi_uv_suspect_cut(tsh_uv_world *world) {
    char ours[128], theirs[128];
    int here, there;
    int a = tshi_uv_list_side(world, TSHI_UV_OURS, &here, ours, sizeof ours);
    int b = tshi_uv_list_side(world, TSHI_UV_THEIRS, &there, theirs, sizeof theirs);
    int first = here > there || (here == there && a < b);
    if (b < 0) return; /* no rank is cut off any more */
    tshi_uv_suspect(world, TSHI_UV_SILENT, TSH_ERR_LOST, first ? b : a,
                    "%s and %s have not heard each other for %.1f s (TSHARD_HEARTBEAT): the "
                    "network between them is cut, or a host is down",
                    first ? ours : theirs, first ? theirs : ours, (double)world->heartbeat / 1e9);
}

/* Callback of tshb_calls_match: sets *out to the call that a rank of the group has given in its
 * answer to ASK. Returns 0 if it has given none. */
static int tshi_uv_called(const void *user, int rank, tshb_call *out) {
    const tsh_uv_world *world = (const tsh_uv_world *)user;
    for (int r = 0; r < world->size; r++) {
        const tshi_uv_answer *answer = &world->peer[r].answer;
        const tshi_uv_record *record = &answer->record;
        if (!answer->told || !answer->started || answer->rank != rank) continue;
        out->coll = record->coll;
        out->coll.send_counts = record->send_counts;
        out->coll.recv_counts = record->recv_counts;
        out->digest = record->digest;
        out->rank = r;
        out->counts = record->counts;
        return 1;
    }
    return 0;
}

/* After a timeout of a collective: appends to the error's text the ranks that have not started it,
 * and blames the lowest. A rank that has not answered ASK counts as one of them if this rank knows
 * that it is in the group. */
static void tshi_uv_find_absent(tsh_uv_world *world, tsh_error *error) {
    const tshi_uv_group *group;
    int first = -1;
    uv_mutex_lock(&world->lock);
    group = tshi_uv_find_group(world, world->held.group);
    for (int r = 0; r < world->size; r++) {
        const tshi_uv_answer *answer = &world->peer[r].answer;
        int known = group && tshi_uv_member(group, r) >= 0;
        if (answer->told ? !answer->member || answer->started : !known) continue;
        tsh_text_add(error->message, sizeof error->message, "%s %d",
                     first < 0 ? "; absent ranks:" : "", r);
        if (first < 0) first = r;
    }
    uv_mutex_unlock(&world->lock);
    if (first < 0)
        tsh_text_add(error->message, sizeof error->message, "; every rank has started it");
    error->rank = first;
}

/* Returns 1 if this rank and all connected ranks have given a final answer to ASK. */
static int tshi_uv_answered(const tsh_uv_world *world) {
    for (int r = 0; r < world->size; r++)
        if ((r == world->rank || world->peer[r].state == TSHI_UV_THERE) &&
            !tshi_uv_has_told(&world->peer[r].answer))
            return 0;
    return 1;
}

/* On the coordinator: makes the report in world->held the world's error, once reports have been
 * collected and the ranks asked have answered. On another rank, whose report waits for the
 * coordinator: decides alone if no decision has arrived for TSHI_UV_ALONE_MS. */
static void tshi_uv_decide(tsh_uv_world *world, int64_t now) {
    tshi_uv_report *e = &world->held;
    int64_t waited = now - world->considered_at;
    if (!tshi_uv_has_reported(world)) return;
    if (world->considered_at && waited >= TSHI_UV_COLLECT_MS * TSHI_UV_MS) {
        if (e->group && !tshi_uv_answered(world) && waited < TSHI_UV_ASK_MS * TSHI_UV_MS) {
            tshi_uv_ask(world);
            return;
        }
        if (e->group && e->kind == TSHI_UV_MISMATCH)
            (void)tshb_calls_match(tshi_uv_called, world, world->size, e->seq, e->group,
                                   &e->error);
        if (e->group && e->kind == TSHI_UV_LATE) tshi_uv_find_absent(world, &e->error);
    } else if (now - world->held_since < TSHI_UV_ALONE_MS * TSHI_UV_MS) {
        return;
    }
    tshi_uv_send_decision(world, &e->error);
}

/* ========================================================================== */
/* >>uv-cycle                                      MARK: - uv-cycle (private) */
/* Finds ranks that wait in a cycle for each other's collectives or messages. */
/* A rank that has waited for 20 ms tells the coordinator (BLOCKED).          */
/* The coordinator searches for a cycle and asks its ranks to confirm it.     */
/* When all its ranks have confirmed the cycle, it reports an error.          */
/* Needs: >>uv-decide.                                                        */
/* ========================================================================== */

/* Returns the number of collectives that a blocked rank had started in the group with this id. */
static uint64_t tshi_uv_blocked_started(const tshi_uv_blocked *s, uint64_t group) {
    for (int i = 0; i < s->groups; i++)
        if (s->groups_of[i].id == group) return s->groups_of[i].started;
    return UINT64_MAX; /* the group is not listed: assumes that all its collectives were started */
}

/* Returns how many RECVs from world rank `peer` (`receives` 1), or SENDs to it (`receives` 0), a
 * blocked rank had started in a group. */
static uint64_t tshi_uv_blocked_messages(const tshi_uv_blocked *s, uint64_t group, int peer,
                                         int receives) {
    if (tshi_uv_blocked_started(s, group) == UINT64_MAX) return UINT64_MAX;
    for (int i = 0; i < s->pairs; i++)
        if (s->pairs_of[i].group == group && s->pairs_of[i].peer == peer)
            return receives ? s->pairs_of[i].receives : s->pairs_of[i].sends;
    return s->pairs < TSHI_UV_BLOCKED_PAIRS ? 0 : UINT64_MAX; /* a full list may lack `peer` */
}

/* Callback of tshb_coll_cycle: returns the i-th rank that blocked rank r waits for, if that rank is
 * blocked, too, and has not started what r waits for; else -1. `user` is world->peer. */
static int tshi_uv_awaits(const void *user, int r, int i) {
    const tshi_uv_peer *all = (const tshi_uv_peer *)user;
    const tshi_uv_blocked *s = &all[r].blocked, *other;
    uint64_t started;
    int m;
    if (!s->wait || i >= (s->peer >= 0 ? 1 : s->members)) return -1;
    m = s->peer >= 0 ? s->peer : s->member[i];
    other = &all[m].blocked;
    /* only a send or a receive can make a rank wait for itself; a collective cannot */
    if ((m == r && s->peer < 0) || !other->wait) return -1;
    started = s->peer >= 0 ? tshi_uv_blocked_messages(other, s->group, r, s->sends)
                           : tshi_uv_blocked_started(other, s->group);
    return started <= s->seq ? m : -1;
}

/* Callback of tshb_coll_blame: returns how many ranks are blocked in the same collective as rank r.
 * `user` is world->peer. */
static int tshi_uv_together(const void *user, int r) {
    const tshi_uv_peer *all = (const tshi_uv_peer *)user;
    const tshi_uv_blocked *s = &all[r].blocked;
    int count = 0;
    for (int i = 0; s->peer < 0 && i < s->members; i++) {
        const tshi_uv_blocked *m = &all[s->member[i]].blocked;
        count += m->wait && m->group == s->group && m->seq == s->seq && m->peer < 0;
    }
    return count;
}

/* Reports the cycle that rank r is on, after all its ranks have confirmed that they still wait. */
static void tshi_uv_report_cycle(tsh_uv_world *world, int r) {
    const tshi_uv_peer *all = world->peer;
    int waits, blamed = tshb_coll_blame(world->search, r, tshi_uv_together, all, &waits);
    tsh_error error;
    tshb_cycle_error(blamed, all[blamed].blocked.text, waits, all[waits].blocked.text, &error);
    tshi_uv_suspect(world, TSHI_UV_CROSSED, error.code, blamed, "%s", error.message);
}

/* Returns 1 if this rank is still in the wait with number `wait`. */
static int tshi_uv_still(tsh_uv_world *world, uint64_t wait) {
    int still;
    uv_mutex_lock(&world->lock);
    still = wait && world->blocked.wait == wait;
    uv_mutex_unlock(&world->lock);
    return still;
}

/* Handles rank r's answer to CONFIRM: whether it is still in the wait with number `wait`. Reports
 * the cycle once all ranks on it have confirmed. Returns 1 if rank r does not wait any more. */
static int tshi_uv_confirmed(tsh_uv_world *world, int r, uint64_t wait, int still) {
    tshi_uv_peer *peer = &world->peer[r];
    if (!world->confirming || peer->asked != wait) return 0;
    peer->asked = 0;
    if (still && peer->blocked.wait == wait) {
        if (--world->confirming == 0) tshi_uv_report_cycle(world, r);
        return 0;
    }
    if (peer->blocked.wait == wait) peer->blocked.wait = 0;
    world->confirming = 0;
    return 1;
}

/* Asks the ranks on the cycle of rank `on` whether they still wait. Returns 1 if this rank is one
 * of them and does not wait any more, so that there is no cycle. */
static int tshi_uv_ask_cycle(tsh_uv_world *world, int on) {
    uint64_t mine;
    int at = on;
    do {
        tshi_uv_peer *peer = &world->peer[at];
        world->confirming++;
        peer->asked = peer->blocked.wait;
        (void)tshi_uv_field(tshi_uv_write(world, TSHI_UV_CONFIRM), peer->asked, 8);
        tshi_uv_post(peer);
        at = world->search[at].next;
    } while (at != on);
    mine = world->peer[world->rank].asked;
    return mine && tshi_uv_confirmed(world, world->rank, mine, tshi_uv_still(world, mine));
}

/* Searches for a cycle from rank r on (r = -1: from every rank), and asks its ranks to confirm. A
 * blocked rank can be released only by the ranks that it waits for: if all ranks on a cycle are
 * still in the waits that they reported, the cycle is real. */
static void tshi_uv_follow(tsh_uv_world *world, int r) {
    int on, at; /* on: a rank on the cycle found, -1: none; at: loop index */
    if (world->confirming || tshi_uv_failed(world) != TSH_OK) return;
    do {
        int end = r < 0 ? world->size : r + 1;
        memset(world->search, 0, (size_t)world->size * sizeof *world->search);
        for (at = 0; at < world->size; at++) world->peer[at].asked = 0;
        for (on = -1, at = r < 0 ? 0 : r; on < 0 && at < end; at++)
            on = tshb_coll_cycle(world->search, world->size, at, tshi_uv_awaits, world->peer);
        r = -1;
    } while (on >= 0 && tshi_uv_ask_cycle(world, on));
}

/* Sends world->blocked, what this rank waits for, to the coordinator. If this rank is the
 * coordinator, decodes the message right here. */
static void tshi_uv_send_blocked(tsh_uv_world *world) {
    int to = tshi_uv_coordinator_of(world);
    /* own: a second cursor, by which the coordinator reads its own message back */
    tshi_uv_cursor *c = tshi_uv_write(world, TSHI_UV_BLOCKED), own = *c;
    uv_mutex_lock(&world->lock);
    TSHI_UV_PUT(&world->blocked_new, 0);
    tshi_uv_blocked_fields(c, &world->blocked, world->size);
    uv_mutex_unlock(&world->lock);
    own.writes = 0;
    if (to == world->rank) {
        tshi_uv_blocked_fields(&own, &world->peer[to].blocked, world->size);
        tshi_uv_follow(world, to);
    } else {
        tshi_uv_post(&world->peer[to]);
    }
}

/* ========================================================================== */
/* >>uv-connect                                  MARK: - uv-connect (private) */
/* The handshake of a connection, by which both ends are authenticated.       */
/* The end that dialled advances it by tshi_uv_client_step.                   */
/* The end that accepted the connection advances it by tshi_uv_server_step.   */
/* >>uv-admit calls these when the socket is ready.                           */
/* Needs: >>uv-decide.                                                        */
/* ========================================================================== */

/* Time limits in seconds. PATIENCE: on the server, for the whole handshake. DIAL: on the client,
 * until the server hello arrives, and for the reply to a JOIN. REPLY: on the client, for the reply
 * to any other hello, which may wait for rank 0's address table. */
enum { TSHI_UV_PATIENCE_S = 5, TSHI_UV_DIAL_S = 2, TSHI_UV_REPLY_S = 6 };
enum { TSHI_UV_SHARE_TRIES = 20 }; /* attempts to share memory with a rank; then TCP is used */

static void tshi_uv_freed(uv_handle_t *handle) {
    free(handle);
}

/* Returns 1 if so many bytes can be allocated now. This is tested before libuv enlarges its table
 * of descriptors, since libuv aborts the process if it gets no memory. */
static int tshi_uv_has_memory(size_t bytes) {
    void *volatile probe = malloc(bytes); /* volatile: else compilers remove malloc and free */
    free(probe);
    return probe != NULL;
}

/* Makes loop call `callback` when libuv's `events` (UV_READABLE, ...) occur on fd; poll->data is
 * `data`. Returns NULL if memory is lacking. */
static uv_poll_t *tshi_uv_watch(uv_loop_t *loop, int fd, int events, void *data,
                                uv_poll_cb callback) {
    uv_poll_t *poll = (uv_poll_t *)calloc(1, sizeof *poll);
    /* size of libuv's table, which grows to a power of 2 entries */
    size_t table = 2 * ((size_t)fd + 4) * sizeof(void *);
    if (!poll || ((unsigned)fd >= loop->nwatchers && !tshi_uv_has_memory(table)) ||
        uv_poll_init(loop, poll, fd) != 0) {
        free(poll);
        return NULL;
    }
    poll->data = data;
    (void)uv_poll_start(poll, events, callback);
    return poll;
}

static void tshi_uv_unwatch(uv_poll_t **poll) {
    if (!*poll) return;
    (void)uv_poll_stop(*poll);
    uv_close((uv_handle_t *)*poll, tshi_uv_freed);
    *poll = NULL;
}

/* Adds a connection to world->conns: an accepted one (`dialled` 0), or one that is to be dialled
 * (`dialled` 1). Returns NULL if memory is lacking. */
static tshi_uv_conn *tshi_uv_conn_new(tsh_uv_world *world, int dialled) {
    tshi_uv_conn *conn = (tshi_uv_conn *)calloc(1, sizeof *conn);
    if (!conn) return NULL;
    conn->world = world;
    conn->fd = conn->earlier = -1;
    conn->dialled = dialled;
    conn->next = world->conns;
    world->conns = conn;
    world->unproven += !dialled;
    return conn;
}

/* Gives an accepted connection its ephemeral keys: unused ones of an earlier connection, if there
 * are any, since new keys take 50 us, more than all else that is done for a peer that
 * may not have the key. */
static void tshi_uv_give_share(tshi_uv_conn *conn) {
    tsh_uv_world *world = conn->world;
    int64_t now = tsh_now();
    while (world->spares) {
        tshi_uv_share *spare = &world->spare[--world->spares];
        if (now >= spare->until) continue;
        memcpy(conn->scalar, spare->scalar, sizeof conn->scalar);
        memcpy(conn->hello.server_share, spare->share, sizeof spare->share);
        conn->share_until = spare->until;
        return;
    }
    tshi_uv_new_share(world->secret, conn->scalar, conn->hello.server_share);
    conn->share_until = now + TSHI_UV_PATIENCE_S * TSHI_UV_SECOND;
}

/* Keeps the ephemeral keys of an accepted connection that ends, if no client has used them. */
static void tshi_uv_keep_share(const tshi_uv_conn *conn) {
    tsh_uv_world *world = conn->world;
    tshi_uv_share *spare = &world->spare[world->spares];
    if (conn->phase != TSHI_UV_AWAITS_HELLO || world->spares == TSHI_UV_SPARES) return;
    memcpy(spare->scalar, conn->scalar, sizeof spare->scalar);
    memcpy(spare->share, conn->hello.server_share, sizeof spare->share);
    spare->until = conn->share_until;
    world->spares++;
}

static void tshi_uv_conn_free(tshi_uv_conn *conn) {
    tshi_uv_conn **at = &conn->world->conns;
    tshi_uv_keep_share(conn);
    while (*at != conn) at = &(*at)->next;
    *at = conn->next;
    conn->world->unproven -= !conn->dialled;
    tshi_uv_unwatch(&conn->poll);
    tshi_uv_close_fd(&conn->fd);
    tshi_uv_close_fd(&conn->earlier);
    sodium_memzero(conn, sizeof *conn); /* the session's secrets are in it */
    free(conn);
}

/* Ends a handshake that failed. Frees an accepted connection; a dialled one is dialled again after
 * a random delay, which grows with each attempt from 5 ms to 160 ms on average. */
static void tshi_uv_conn_end(tshi_uv_conn *conn) {
    int shift = conn->attempts < 5 ? conn->attempts : 5;
    int64_t step = TSHI_UV_MS * 5 << shift; /* mean delay in ns */
    if (!conn->dialled ||
        (conn->hello.purpose == TSHI_UV_SHARE && conn->attempts >= TSHI_UV_SHARE_TRIES)) {
        tshi_uv_conn_free(conn);
        return;
    }
    tshi_uv_unwatch(&conn->poll);
    /* While the reply is awaited, the server may have accepted the connection: keeps it open. */
    if (conn->phase == TSHI_UV_AWAITS_REPLY) {
        tshi_uv_close_fd(&conn->earlier);
        conn->earlier = conn->fd;
        conn->fd = -1;
    }
    tshi_uv_close_fd(&conn->fd);
    conn->in_used = conn->out_used = 0;
    conn->phase = TSHI_UV_WAITS;
    conn->attempts++;
    conn->until = tsh_now() + step / 2 + (int64_t)randombytes_uniform((uint32_t)step);
}

/* Records in world->obstacle why a connection could not be made, for the error after a timeout. */
TSH_PRINTF(2, 3) static void tshi_uv_hindered(tsh_uv_world *world, const char *format, ...) {
    va_list list;
    va_start(list, format);
    tsh_text_format(world->obstacle, sizeof world->obstacle, format, list);
    va_end(list);
}

/* Computes conn->session, the session secret, from this end's private key and the other end's
 * public one (its share). Returns 0 if the share is not valid. */
static int tshi_uv_set_session(tshi_uv_conn *conn) {
    const tsh_uv_world *world = conn->world;
    const tshi_uv_hello *hello = &conn->hello;
    return tshi_uv_agree(hello->purpose == TSHI_UV_JOIN ? world->secret : world->mesh, conn->scalar,
                         conn->dialled ? hello->server_share : hello->client_share, hello,
                         conn->session);
}

/* Returns the data connection to `peer`, a rank of the group: for SEND and RECV if `messages` is 1,
 * else for collectives. */
static tshi_uv_link *tshi_uv_link_to(tshi_uv_group *group, int peer, int messages) {
    return &group->link[(messages ? group->size : 0) + peer];
}

/* Returns the data connection with this purpose to a world rank; NULL if that is this rank or not a
 * member of the group. */
static tshi_uv_link *tshi_uv_link_for(tshi_uv_group *group, uint32_t purpose, int world_rank) {
    int r = tshi_uv_member(group, world_rank);
    return r < 0 || r == group->rank ? NULL
                                     : tshi_uv_link_to(group, r, purpose == TSHI_UV_MESSAGES);
}

/* Returns 1 if a group that is being made still lacks a connection to member r or, if r is above
 * this rank, r's LINKED message. */
static int tshi_uv_unlinked(tshi_uv_group *group, int r) {
    return tshi_uv_link_to(group, r, 0)->fd < 0 || tshi_uv_link_to(group, r, 1)->fd < 0 ||
           (r > group->rank && !group->link[r].confirmed);
}

/* Returns the data connection to world rank `rank` that a hello asks for, in the group that is
 * being set up; NULL: it asks for another group, or the rank is not in it. */
static tshi_uv_link *tshi_uv_meant(const tsh_uv_world *world, const tshi_uv_hello *hello,
                                   int rank) {
    tshi_uv_group *group = world->forming ? world->world_group : world->making;
    if (!group || group->id != hello->group) return NULL;
    return tshi_uv_link_for(group, hello->purpose, rank);
}

/* ---- the server's side of the handshake ---- */

/* Returns 1 if the connection is a Unix socket. */
static int tshi_uv_is_unix(const tshi_uv_conn *conn) {
    return conn->address.storage.ss_family == AF_UNIX;
}

/* Returns the reply to a client hello with a valid proof. *value: if it is a refusal, what this
 * rank has in the field that differs. */
static tshi_uv_reply tshi_uv_check_hello(const tshi_uv_conn *conn, int64_t *value) {
    const tsh_uv_world *world = conn->world;
    const tshi_uv_hello *hello = &conn->hello;
    const tshi_uv_peer *peer;
    const tshi_uv_link *link;
    int same; /* 1: the client's process has connected to this rank before */
    *value = 0;
    if (hello->job != world->job) return TSHI_UV_OTHER_JOB;
    *value = world->size;
    if (hello->size != world->size) return TSHI_UV_OTHER_SIZE;
    *value = world->rank;
    if (hello->server != world->rank || hello->client < 0 || hello->client >= world->size ||
        hello->client == world->rank)
        return TSHI_UV_OTHER_RANK;
    *value = hello->client;
    if (hello->purpose > TSHI_UV_SHARE ||
        (hello->purpose == TSHI_UV_SHARE) != tshi_uv_is_unix(conn))
        return TSHI_UV_UNKNOWN;
    if (hello->purpose == TSHI_UV_SHARE) return world->forming ? TSHI_UV_WELCOME : TSHI_UV_UNKNOWN;
    peer = &world->peer[hello->client];
    same = peer->process == hello->process;
    if (hello->purpose <= TSHI_UV_CONTROL) { /* a control connection */
        if (peer->state != TSHI_UV_ABSENT &&
            (!same || !world->forming || peer->state != TSHI_UV_THERE || peer->used))
            return TSHI_UV_TAKEN;
        return world->forming ? TSHI_UV_WELCOME : TSHI_UV_UNKNOWN;
    }
    /* link belongs to a group that is still being made, so nothing was sent on it yet */
    link = tshi_uv_meant(world, hello, hello->client);
    if (!link) return TSHI_UV_UNKNOWN;
    return link->fd < 0 || same ? TSHI_UV_WELCOME : TSHI_UV_TAKEN;
}

/* Returns bits of tshi_uv_option: whether this rank wants checksums or encryption on the connection
 * fd, and whether it has instructions for AES. */
static int tshi_uv_wants(const tsh_uv_world *world, int fd) {
    tshi_uv_address own;
    int far = !tshi_uv_end_of(fd, 0, &own) || !tshi_uv_loopback(&own);
    int options = crypto_aead_aes256gcm_is_available() ? TSHI_UV_AES : 0;
    if (world->checksum ? world->checksum > 0 : far) options |= TSHI_UV_CHECKED;
    if (world->encrypt ? world->encrypt > 0 : far && world->keyed) options |= TSHI_UV_SEALED;
    return options;
}

/* Returns the options of a connection whose ends want `a` and `b`: checksums, or encryption, if
 * either end wants it. */
static int tshi_uv_agreed(int a, int b) {
    if ((a | b) & TSHI_UV_SEALED) return TSHI_UV_SEALED | (a & b & TSHI_UV_AES);
    return (a | b) & TSHI_UV_CHECKED;
}

static const char *tshi_uv_status_text(uint32_t status) {
    static const char *const texts[] = {"welcome",
                                        "it has another key",
                                        "it speaks another version",
                                        "it belongs to another job",
                                        "it belongs to a world of another size",
                                        "it means another rank",
                                        "that rank is here already",
                                        "no such group is being made"};
    return texts[status];
}

/* Checks the client hello in conn->in, puts the reply into conn->out and logs a refusal. Returns 0
 * if this must wait for rank 0's address table, since the key (world->mesh) is derived from the
 * token in it. */
static int tshi_uv_reply_to_hello(tshi_uv_conn *conn) {
    tsh_uv_world *world = conn->world;
    tshi_uv_hello *hello = &conn->hello;
    unsigned char proof[32], expected[32];
    tshi_uv_reply status;
    int64_t value = 0;
    tshi_uv_client_hello(conn->in, 0, hello, proof);
    if (hello->purpose != TSHI_UV_JOIN && world->forming && !world->tabled) return 0;
    if (hello->version != TSHI_UV_VERSION) {
        status = TSHI_UV_OTHER_VERSION;
    } else {
        int valid = tshi_uv_set_session(conn);
        tshi_uv_proof(conn->session, 'C', 0, 0, hello, expected);
        status = !valid || sodium_memcmp(proof, expected, 32) != 0
                     ? TSHI_UV_OTHER_KEY
                     : tshi_uv_check_hello(conn, &value);
    }
    if (status == TSHI_UV_OTHER_KEY || status == TSHI_UV_OTHER_VERSION)
        tshi_uv_note(world, TSHI_UV_OF_UNPROVEN, "rank %d refused %s: %s", world->rank, conn->name,
                     tshi_uv_status_text(status));
    else if (status != TSHI_UV_WELCOME)
        tshi_uv_note(world, TSHI_UV_OF_KEY_HOLDERS,
                     "rank %d refused %s, which says that it is rank %d of %d: %s", world->rank,
                     conn->name, hello->client, hello->size, tshi_uv_status_text(status));
    if (status == TSHI_UV_WELCOME)
        value = tshi_uv_agreed(hello->options, tshi_uv_wants(world, conn->fd));
    tshi_uv_put_reply(conn->out, status, value, hello, conn->session);
    hello->options = (int)value; /* matters only if the reply is a welcome */
    conn->out_used = TSHI_UV_REPLY;
    conn->welcome = status == TSHI_UV_WELCOME;
    conn->phase = TSHI_UV_REPLIES;
    return 1;
}

/* ---- the client's side of the handshake ---- */

/* Logs that a server refused this rank without a proof that it has the key. Anybody could have sent
 * such a refusal, so this rank dials again. */
static void tshi_uv_unproven(tshi_uv_conn *conn, const char *why) {
    tsh_uv_world *world = conn->world;
    tshi_uv_hindered(world,
                     "%s, where rank %d was expected, refuses without a proof that it has the key: "
                     "%s",
                     conn->name, conn->hello.server, why);
    tshi_uv_note(world, TSHI_UV_OF_SERVERS, "rank %d tries again: %s", world->rank,
                 world->obstacle);
}

/* Reads the server hello in conn->in and puts the client hello into conn->out. Returns 0 if the
 * server hello is wrong, so that the connection is to end. */
static int tshi_uv_make_hello(tshi_uv_conn *conn) {
    tsh_uv_world *world = conn->world;
    tshi_uv_hello *hello = &conn->hello;
    unsigned char proof[32];
    if (!tshi_uv_server_hello(conn->in, 0, &hello->version, hello->server_share)) {
        tshi_uv_hindered(world, "something else than tshard answers at %s", conn->name);
        return 0;
    }
    if (hello->version != TSHI_UV_VERSION) {
        tshi_uv_unproven(conn, "it speaks another version of the protocol");
        return 0;
    }
    hello->client = world->rank;
    hello->size = world->size;
    hello->job = world->job;
    hello->process = world->process;
    hello->options = tshi_uv_wants(world, conn->fd);
    tshi_uv_new_share(world->secret, conn->scalar, hello->client_share);
    if (!tshi_uv_set_session(conn)) {
        tshi_uv_unproven(conn, "it sent a share that is not valid");
        return 0;
    }
    tshi_uv_proof(conn->session, 'C', 0, 0, hello, proof);
    tshi_uv_client_hello(conn->out, 1, hello, proof);
    conn->out_used = TSHI_UV_CLIENT_HELLO;
    conn->in_used = 0;
    conn->in_need = TSHI_UV_REPLY;
    conn->until = tsh_now() + (hello->purpose == TSHI_UV_JOIN ? TSHI_UV_DIAL_S : TSHI_UV_REPLY_S) *
                                  TSHI_UV_SECOND;
    conn->phase = TSHI_UV_AWAITS_REPLY;
    return 1;
}

/* Handles a server's refusal: the world fails if the refusal has a proof and dialling again cannot
 * help; else this rank dials again. */
static void tshi_uv_refused(tshi_uv_conn *conn, uint32_t status, int64_t value) {
    tsh_uv_world *world = conn->world;
    int to = conn->hello.server;
    switch (status) {
    case TSHI_UV_OTHER_VERSION:
        tshi_uv_unproven(conn, "it speaks another version of the protocol");
        break;
    case TSHI_UV_OTHER_KEY:
        tshi_uv_unproven(conn, "the two do not have the same key (TSHARD_KEY or TSHARD_KEY_FILE)");
        break;
    case TSHI_UV_OTHER_SIZE:
        tshi_uv_suspect(world, TSHI_UV_ABORT, TSH_ERR_ARGUMENT, world->rank,
                        "rank %d was started for a world of %d ranks (TSHARD_SIZE), rank %d at %s "
                        "for %lld",
                        world->rank, world->size, to, conn->name, (long long)value);
        break;
    case TSHI_UV_TAKEN:
        if (conn->hello.purpose != TSHI_UV_JOIN) break; /* an earlier attempt has succeeded */
        tshi_uv_suspect(world, TSHI_UV_ABORT, TSH_ERR_ARGUMENT, world->rank,
                        "rank %d is already in the world of rank %d at %s: each rank needs its own "
                        "TSHARD_RANK",
                        world->rank, to, conn->name);
        break;
    case TSHI_UV_OTHER_RANK:
        tshi_uv_hindered(world, "rank %lld answers at %s, where rank %d was expected",
                         (long long)value, conn->name, to);
        break;
    default:
        tshi_uv_hindered(world, "rank %d at %s refused: %s (this rank's job is \"%s\")", to,
                         conn->name, tshi_uv_status_text(status), world->jobname);
    }
}

/* Checks the server's reply in conn->in. Returns 1 if it is a welcome: both ends are
 * authenticated. */
static int tshi_uv_accept_reply(tshi_uv_conn *conn) {
    uint32_t status;
    int64_t value;
    if (!tshi_uv_get_reply(conn->in, &conn->hello, conn->session, &status, &value))
        status = TSHI_UV_OTHER_KEY;
    if (status != TSHI_UV_WELCOME) tshi_uv_refused(conn, status, value);
    /* AES-256-GCM only if this rank has it; matters only if the reply is a welcome */
    conn->hello.options = (int)value & (conn->hello.options | TSHI_UV_SEALED | TSHI_UV_CHECKED);
    return status == TSHI_UV_WELCOME;
}

/* ---- the handshake's sends and receives, and the steps of both sides ---- */

/* Sends the bytes in conn->out. Returns 1: all are sent; 0: call again later; -1: the connection
 * broke. */
static int tshi_uv_conn_write(tshi_uv_conn *conn) {
    ssize_t n;
    if (!conn->out_used) return 1;
    n = send(conn->fd, conn->out, conn->out_used, TSHI_UV_NOSIGNAL);
    if (n < 0) return tshi_uv_later() ? 0 : -1;
    conn->out_used -= (size_t)n;
    memmove(conn->out, conn->out + n, conn->out_used);
    return conn->out_used == 0;
}

/* Receives until conn->in has in_need bytes, and no more than that. Returns 1: it has them; 0: call
 * again later; -1: the connection broke or ended. */
static int tshi_uv_conn_read(tshi_uv_conn *conn) {
    ssize_t n;
    if (conn->in_used == conn->in_need) return 1;
    n = recv(conn->fd, conn->in + conn->in_used, conn->in_need - conn->in_used, 0);
    if (n < 0) return tshi_uv_later() ? 0 : -1;
    if (n == 0) return -1;
    conn->in_used += (size_t)n;
    return conn->in_used == conn->in_need;
}

/* Advances the server's side of a handshake as far as possible now. Returns 1: both ends are
 * authenticated; 0: call again when the socket is ready; -1: the connection is to end. */
static int tshi_uv_server_step(tshi_uv_conn *conn) {
    int done = tshi_uv_conn_write(conn);
    if (done < 0) return -1;
    if (conn->phase == TSHI_UV_AWAITS_HELLO) {
        done = tshi_uv_conn_read(conn);
        if (memcmp(conn->in, "TSHD", conn->in_used < 4 ? conn->in_used : 4) != 0) done = -1;
        if (done < 0)
            tshi_uv_note(conn->world, TSHI_UV_OF_UNPROVEN, "rank %d refused %s: it %s",
                         conn->world->rank, conn->name,
                         conn->in_used ? "does not speak the protocol" : "came and went");
        if (done <= 0) return done;
        conn->phase = TSHI_UV_HAS_HELLO;
    }
    if (conn->phase == TSHI_UV_HAS_HELLO) {
        /* the reply must wait for rank 0's address table; then tshi_uv_tend goes on */
        if (!tshi_uv_reply_to_hello(conn)) return 0;
        done = tshi_uv_conn_write(conn);
    }
    /* a refused connection ends once the refusal is sent */
    return done == 1 && !conn->welcome ? -1 : done;
}

/* Advances the client's side of a handshake. Returns the same as tshi_uv_server_step. */
static int tshi_uv_client_step(tshi_uv_conn *conn) {
    int failed = 0, done;
    socklen_t size = (socklen_t)sizeof failed;
    if (conn->phase == TSHI_UV_CONNECTS) {
        if (getsockopt(conn->fd, SOL_SOCKET, SO_ERROR, &failed, &size) != 0) failed = errno;
        if (failed) {
            tshi_uv_hindered(conn->world, "%s%s: %s",
                             failed == ECONNREFUSED ? "nobody listens at " : "", conn->name,
                             tshi_uv_why(failed));
            return -1;
        }
        conn->phase = TSHI_UV_AWAITS_GREETING;
        conn->in_need = TSHI_UV_SERVER_HELLO;
    }
    if (tshi_uv_conn_write(conn) < 0) return -1;
    done = tshi_uv_conn_read(conn);
    if (done < 0) tshi_uv_hindered(conn->world, "%s closed the connection", conn->name);
    if (done <= 0) return done;
    if (conn->phase == TSHI_UV_AWAITS_REPLY) return tshi_uv_accept_reply(conn) ? 1 : -1;
    return tshi_uv_make_hello(conn) ? tshi_uv_client_step(conn) : -1;
}

/* ========================================================================== */
/* >>uv-share                                      MARK: - uv-share (private) */
/* Ranks of one host find each other and exchange their segments, over a Unix */
/* socket with an abstract name: only processes of the same network namespace */
/* reach it, so no address decides what one host is. Both must be of the same */
/* user, and prove the key as on every connection (>>uv-connect). Then each   */
/* end sends the descriptors of its segment and bell, the client first.       */
/* Needs: >>uv-shm >>uv-connect.                                              */
/* ========================================================================== */

#if TSHI_UV_SHM
/* Returns the address of a rank's Unix socket. Its name is derived from the key of this world. */
static tshi_uv_address tshi_uv_share_address(const tsh_uv_world *world, int rank) {
    tshi_uv_address address;
    struct sockaddr_un *un = (struct sockaddr_un *)(void *)&address.storage;
    unsigned char bytes[32];
    char text[33];
    tshi_uv_cursor c = tshi_uv_cursor_over(bytes, sizeof bytes, 1);
    (void)tshi_uv_field(&c, (uint64_t)rank, 8);
    (void)crypto_auth_hmacsha256(bytes, bytes, 8, world->mesh);
    memset(&address, 0, sizeof address);
    un->sun_family = AF_UNIX; /* sun_path[0] is 0: an abstract name, in no file system */
    memcpy(un->sun_path + 1, "tshard-", 7);
    memcpy(un->sun_path + 8, sodium_bin2hex(text, sizeof text, bytes, 16), 32);
    address.size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 40);
    return address;
}

/* Returns 1 if the process at the other end of a Unix socket is of this user. */
static int tshi_uv_same_user(int fd) {
    struct { /* struct ucred, which strict POSIX hides */
        int pid;
        unsigned uid, gid;
    } peer = {-1, 0, 0};
    socklen_t size = (socklen_t)sizeof peer;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == geteuid();
}

/* Space for a control message with two descriptors, aligned for its header. */
typedef union tshi_uv_passage {
    struct cmsghdr align;
    char bytes[CMSG_SPACE(2 * sizeof(int))];
} tshi_uv_passage;

/* Fills `message`: one byte of data, and a control message in `passage` that can carry two
 * descriptors. */
static void tshi_uv_passing(struct msghdr *message, struct iovec *iov, char *byte,
                            tshi_uv_passage *passage) {
    memset(message, 0, sizeof *message);
    memset(passage, 0, sizeof *passage);
    iov->iov_base = byte;
    iov->iov_len = 1;
    message->msg_iov = iov;
    message->msg_iovlen = 1;
    message->msg_control = passage->bytes;
    message->msg_controllen = sizeof passage->bytes;
}

/* Sends the descriptors of this rank's segment and bell on a Unix socket. Returns 0 if that
 * failed. */
static int tshi_uv_give_segment(const tsh_uv_world *world, int fd) {
    const int fds[2] = {world->segment, world->near[world->rank].bell};
    tshi_uv_passage passage;
    struct msghdr message;
    struct cmsghdr *head;
    struct iovec iov;
    char byte = 0;
    tshi_uv_passing(&message, &iov, &byte, &passage);
    head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof fds);
    memcpy(CMSG_DATA(head), fds, sizeof fds);
    return sendmsg(fd, &message, TSHI_UV_NOSIGNAL) == 1;
}

/* Receives the descriptors of a segment and a bell. Returns 1: they are in fds; 0: call again
 * later; -1: failed. */
static int tshi_uv_take_segment(int fd, int fds[2]) {
    tshi_uv_passage passage;
    struct msghdr message;
    const struct cmsghdr *head;
    struct iovec iov;
    char byte;
    ssize_t n;
    tshi_uv_passing(&message, &iov, &byte, &passage);
    n = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
    if (n < 0) return tshi_uv_later() ? 0 : -1;
    head = n ? CMSG_FIRSTHDR(&message) : NULL;
    if (!head || head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS ||
        head->cmsg_len < CMSG_LEN(sizeof(int)))
        return -1;
    memcpy(fds, CMSG_DATA(head), sizeof fds[0] * 2);
    if (head->cmsg_len == CMSG_LEN(2 * sizeof(int))) return 1;
    (void)close(fds[0]); /* this process had a free descriptor for one of the two only */
    return -1;
}

/* Begins to listen on a Unix socket for ranks of this host. If that fails, they use TCP with this
 * one. */
static void tshi_uv_share_listen(tsh_uv_world *world) {
    tshi_uv_address at = tshi_uv_share_address(world, world->rank);
    if (!world->near[world->rank].base) return;
    world->shm_listener = tshi_uv_listen(&at);
    if (world->shm_listener < 0) tshi_uv_shm_without(world, "open a Unix socket");
}

/* Called at both ends once they are authenticated. The client sends its segment; then each end
 * awaits the other's. Returns 0, or -1 if the connection is to end. */
static int tshi_uv_share_begin(tshi_uv_conn *conn) {
    conn->phase = TSHI_UV_SHARES;
    return !conn->dialled || tshi_uv_give_segment(conn->world, conn->fd) ? 0 : -1;
}

/* Receives and maps the other rank's segment; the server then sends its own. Returns 1: done, also
 * if one end cannot share, so that this pair uses TCP; 0: call again later; -1: the connection is
 * to end. */
static int tshi_uv_share_step(tshi_uv_conn *conn) {
    tsh_uv_world *world = conn->world;
    const int rank = conn->dialled ? conn->hello.server : conn->hello.client;
    tshi_uv_shm_segment *own = tshi_uv_segment_of(world, world->rank);
    int fds[2], got = tshi_uv_take_segment(conn->fd, fds);
    if (got <= 0) return got;
    if (tshi_uv_shm_map(world, rank, fds) &&
        tshi_uv_shm_rows(world, tshi_uv_shm_begin(), world->size, rank))
        TSHI_UV_PUT(&own->near[rank], 1);
    else
        tshi_uv_shm_without(world, "map the memory of another rank");
    return conn->dialled || tshi_uv_give_segment(world, conn->fd) ? 1 : -1;
}
#else
static int tshi_uv_same_user(int fd) {
    (void)fd;
    return 0;
}

static void tshi_uv_share_listen(tsh_uv_world *world) {
    (void)world;
}

static int tshi_uv_share_begin(tshi_uv_conn *conn) {
    (void)conn;
    return -1;
}

static int tshi_uv_share_step(tshi_uv_conn *conn) {
    (void)conn;
    return -1;
}
#endif

/* Returns 1 while this rank waits for the segment of a lower rank. */
static int tshi_uv_sharing(const tsh_uv_world *world) {
    const tshi_uv_conn *conn = world->conns;
    while (conn && (!conn->dialled || conn->hello.purpose != TSHI_UV_SHARE)) conn = conn->next;
    return conn != NULL;
}

static void tshi_uv_share_end(tsh_uv_world *world) { /* Stops listening for ranks of this host. */
    tshi_uv_unwatch(&world->shm_listening);
    tshi_uv_close_fd(&world->shm_listener);
}

/* ========================================================================== */
/* >>uv-form                                        MARK: - uv-form (private) */
/* Sets up all connections. First, each rank connects to rank 0.              */
/* A rank sends its own address to rank 0 (HERE), which sends all (TABLE).    */
/* Each rank then dials all lower ranks; in a new group, the lower members.   */
/* A rank that has all its connections sends READY to rank 0.                 */
/* When all ranks are ready, rank 0 sends GO: the world has formed.           */
/* Needs: >>uv-share.                                                         */
/* ========================================================================== */

/* Returns an error if other hosts can reach `address`, and neither a key nor TSHARD_INSECURE is
 * set; else TSH_OK. */
static tsh_result tshi_uv_need_key(tsh_uv_world *world, const tshi_uv_address *address,
                                   tsh_error *error) {
    char host[64]; /* the address as numbers, for the error */
    if (world->keyed || world->insecure || tshi_uv_loopback(address)) return TSH_OK;
    tshi_uv_host_text(address, host, sizeof host);
    return tsh_error_set(error, TSH_ERR_ARGUMENT, world->rank,
                         "rank %d: %s is not a loopback address: set TSHARD_KEY or "
                         "TSHARD_KEY_FILE, the same on every rank (or TSHARD_INSECURE=1 to let "
                         "anybody in)",
                         world->rank, host);
}

static void tshi_uv_close_listener(tsh_uv_world *world) { /* Stops accepting connections. */
    tshi_uv_unwatch(&world->listening);
    tshi_uv_close_fd(&world->listener);
}

/* Adds a connection to world rank `rank` at `address`, which the control thread dials in its next
 * tick. A lack of memory is reported. */
static void tshi_uv_add_dial(tsh_uv_world *world, tshi_uv_purpose purpose, uint64_t group, int rank,
                             const tshi_uv_address *address) {
    tshi_uv_conn *conn = tshi_uv_conn_new(world, 1); /* 1: dialled by this rank */
    if (!conn) {
        tshi_uv_lacks_memory(world, rank);
        return;
    }
    conn->hello.purpose = purpose; /* what the connection will be used for */
    conn->hello.group = group;
    conn->hello.server = rank; /* the rank that should answer */
    conn->address = *address;
}

#if TSHI_UV_SHM
/* Adds a Unix-socket connection by which this rank asks a lower rank to share memory. The lower
 * rank listens by now, if it is on this host. */
static void tshi_uv_add_share(tsh_uv_world *world, int rank) {
    tshi_uv_address address = tshi_uv_share_address(world, rank);
    if (world->shm) tshi_uv_add_dial(world, TSHI_UV_SHARE, 0, rank, &address);
}
#else
static void tshi_uv_add_share(tsh_uv_world *world, int rank) {
    (void)world, (void)rank;
}
#endif

/* Dials the data connections to the group's lower ranks; the higher ranks dial this rank. */
static void tshi_uv_dial_group(tsh_uv_world *world, const tshi_uv_group *group) {
    for (int r = 0; r < group->rank; r++) {
        int rank = group->ranks[r]; /* world rank of member r */
        tshi_uv_address address = world->peer[rank].address;
        /* 0: for this group, too, member r listens on its port in the address table */
        if (group->ports[r]) tshi_uv_set_port(&address, group->ports[r]);
        /* adds the connection for collectives */
        tshi_uv_add_dial(world, TSHI_UV_DATA, group->id, rank, &address);
        /* adds the connection for messages */
        tshi_uv_add_dial(world, TSHI_UV_MESSAGES, group->id, rank, &address);
    }
}

/* Called when rank 0 has accepted this rank: starts to listen, and tells rank 0 the address. */
static void tshi_uv_joined(tsh_uv_world *world) {
    tsh_error error;
    tshi_uv_cursor *c;
    char host[64] = "";        /* "": rank 0 takes the host that this rank connects from */
    if (world->bind_host[0]) { /* the user chose an address (TSHARD_BIND) */
        tshi_uv_host_text(&world->own, host, sizeof host);
        if (strcmp(host, "0.0.0.0") == 0 || strcmp(host, "::") == 0) host[0] = 0;
    } else {
        /* listens on the address of this rank's end of the connection to rank 0 */
        (void)tshi_uv_end_of(world->peer[0].fd, 0, &world->own);
        tshi_uv_set_port(&world->own, 0); /* the system picks a port */
    }
    if (tshi_uv_need_key(world, &world->own, &error) != TSH_OK) {
        tshi_uv_suspect(world, TSHI_UV_ABORT, error.code, error.rank, "%s", error.message);
        return;
    }
    world->listener = tshi_uv_listen(&world->own); /* -1: a system call failed (errno) */
    if (world->listener < 0) {
        tshi_uv_host_text(&world->own, host, sizeof host);
        tshi_uv_suspect(world, TSHI_UV_ABORT, TSH_ERR_IO, world->rank,
                        "rank %d cannot listen on %s: %s; set TSHARD_BIND to an address of this "
                        "host",
                        world->rank, host, tshi_uv_why(errno));
        return;
    }
    (void)tshi_uv_end_of(world->listener, 0, &world->own); /* world->own now has the port */
    (void)tshi_uv_end_of(world->peer[0].fd, 1, &world->peer[0].address); /* rank 0's address */
    c = tshi_uv_write(world, TSHI_UV_HERE);
    tshi_uv_text_field(c, host, sizeof host); /* rank 0 reads it in tshi_uv_read_place */
    (void)tshi_uv_field(c, (uint64_t)tshi_uv_port(&world->own), 2);
    tshi_uv_post(&world->peer[0]);
}

/* Reads a host and a port from c into *address. Returns 0 if the host is missing or not an address:
 * then only the port is set. */
static int tshi_uv_read_place(tshi_uv_cursor *c, tshi_uv_address *address) {
    tshi_uv_address found[TSHI_UV_ADDRESSES]; /* only the first one is used */
    const char *why;
    char host[64];
    int port, told; /* told: 1 if a valid host was read */
    tshi_uv_text_field(c, host, sizeof host);
    port = (int)tshi_uv_field(c, 0, 2);
    told = !c->bad && host[0] && tshi_uv_resolve(host, port, 1, found, &why); /* no DNS lookup */
    if (told) *address = found[0];
    tshi_uv_set_port(address, port);
    return told;
}

/* Handles HERE, on rank 0: stores the address where the peer listens: the host that it sent, else
 * the one that it connects from, and its port. */
static void tshi_uv_on_here(tshi_uv_peer *peer, tshi_uv_cursor *c) {
    if (peer->world->rank != 0) return; /* only rank 0 collects addresses */
    /* default: the host that the peer connects from */
    (void)tshi_uv_end_of(peer->fd, 1, &peer->address);
    (void)tshi_uv_read_place(c, &peer->address);
    peer->placed = !c->bad; /* the address is known and may go into the table */
}

/* Writes the ranks that have not connected to this rank yet, as " 1 3"; "": none. */
static void tshi_uv_list_absent(const tsh_uv_world *world, char *text, size_t room) {
    text[0] = 0;
    for (int r = 0; r < world->size; r++)
        if (r != world->rank && world->peer[r].state == TSHI_UV_ABSENT)
            tsh_text_add(text, room, " %d", r);
}

/* Rank 0: sends all ranks the list of the ranks that are absent (MISSING). */
static void tshi_uv_tell_absent(tsh_uv_world *world) {
    char text[256];
    tshi_uv_list_absent(world, text, sizeof text);
    tshi_uv_text_field(tshi_uv_write(world, TSHI_UV_MISSING), text, sizeof text);
    tshi_uv_post_all(world);
}

/* Derives world->mesh, the key of all connections but JOIN. It needs the token in rank 0's address
 * table, which only ranks that have joined receive. */
static void tshi_uv_set_mesh(tsh_uv_world *world) {
    (void)crypto_auth_hmacsha256(world->mesh, world->token, sizeof world->token, world->secret);
    tshi_uv_share_listen(world); /* listens before any rank can dial it */
    world->tabled = 1;           /* rank 0's address table is known now */
}

static void tshi_uv_send_table(tsh_uv_world *world) { /* Rank 0: sends all ranks' addresses. */
    tshi_uv_cursor *c = tshi_uv_write(world, TSHI_UV_TABLE);
    char host[64];
    randombytes_buf(world->token, sizeof world->token); /* random bytes for tshi_uv_set_mesh */
    tshi_uv_set_mesh(world);
    tshi_uv_bytes_field(c, world->token, sizeof world->token);
    for (int r = 1; r < world->size; r++) { /* all ranks know rank 0's address already */
        tshi_uv_host_text(&world->peer[r].address, host, sizeof host);
        tshi_uv_text_field(c, host, sizeof host);
        (void)tshi_uv_field(c, (uint64_t)tshi_uv_port(&world->peer[r].address), 2);
    }
    tshi_uv_post_all(world);
}

/* Handles TABLE: reads the addresses on which the ranks listen, and dials the lower ranks. */
static void tshi_uv_on_table(tsh_uv_world *world, tshi_uv_cursor *c) {
    if (world->tabled) return; /* a second table is ignored */
    tshi_uv_bytes_field(c, world->token, sizeof world->token);
    for (int r = 1; r < world->size && !c->bad; r++) /* reads rank r's host and port */
        if (!tshi_uv_read_place(c, &world->peer[r].address)) c->bad = 1;
    if (c->bad) return; /* the message is malformed: tshi_uv_next_message ends the connection */
    tshi_uv_set_mesh(world);
    for (int r = 1; r < world->rank; r++) /* lower ranks; the higher ones dial this rank */
        tshi_uv_add_dial(world, TSHI_UV_CONTROL, 0, r, &world->peer[r].address);
    tshi_uv_add_share(world, 0); /* other ranks: by tshi_uv_proven */
    tshi_uv_dial_group(world, world->world_group); /* the data connections, to rank 0 as well */
}

static void tshi_uv_completed(tsh_uv_world *world) { /* The world has formed: wakes the caller. */
    tshi_uv_log_counted(world, INT64_MAX);           /* logs the refusals counted so far */
    tshi_uv_close_listener(world);
    tshi_uv_share_end(world);
    uv_mutex_lock(&world->lock);
    world->forming = 0;                 /* read by tshi_uv_await_world */
    uv_cond_broadcast(&world->changed); /* wakes tshi_uv_await_world */
    uv_mutex_unlock(&world->lock);
}

/* Returns the number that stands for this rank's host: the lowest rank with which it shares memory,
 * or its own rank. */
static int tshi_uv_own_host(const tsh_uv_world *world) {
    int r = 0;
    while (r < world->rank && !tshi_uv_shm_pair(world, world->rank, r)) r++;
    return r;
}

/* Reads peer->host, the lowest rank on the peer's host: a number above the peer's own rank is
 * malformed. */
static void tshi_uv_read_host(tshi_uv_peer *peer, tshi_uv_cursor *c) {
    peer->host = (int)tshi_uv_field(c, 0, 2);
    if (peer->host > peer->rank) c->bad = 1;
}

/* Handles GO: reads the hosts of all ranks; the world has formed. */
static void tshi_uv_on_go(tsh_uv_world *world, tshi_uv_cursor *c) {
    for (int r = 0; r < world->size && !c->bad; r++) tshi_uv_read_host(&world->peer[r], c);
    if (!c->bad) tshi_uv_completed(world);
}

/* ready 1: returns 1 if every other rank has sent READY. ready 0: returns 1 if every other rank has
 * a control connection to this one and, if placed is 1, a known address. */
static int tshi_uv_all(const tsh_uv_world *world, int placed, int ready) {
    for (int r = 0; r < world->size; r++) {
        const tshi_uv_peer *peer = &world->peer[r];
        int there = peer->state == TSHI_UV_THERE && (!placed || peer->placed);
        if (r != world->rank && !(ready ? peer->ready : there)) return 0;
    }
    return 1;
}

/* Called at every tick: finishes a new group once it has all its connections, and takes the next
 * step of forming the world (sends TABLE, READY or GO) once what that step needs has happened. */
static void tshi_uv_form(tsh_uv_world *world) {
    tshi_uv_group *group = world->making;
    if (group && group->missing == 0) { /* all connections of the group are made */
        world->making = NULL;
        tshi_uv_close_listener(world);
        TSHI_UV_PUT(&group->linked, 1); /* from here on the caller's thread uses the group */
        (void)uv_async_send(&world->wake_caller); /* wakes tshi_uv_wait_for */
    }
    if (!world->forming) return; /* the world has formed: no steps are left */
    if (world->rank == 0 && !world->tabled && tshi_uv_all(world, 1, 0)) tshi_uv_send_table(world);
    if (!world->told_ready && world->tabled && tshi_uv_all(world, 0, 0) &&
        world->world_group->missing == 0 &&
        !tshi_uv_sharing(world)) { /* all of this rank's connections are made */
        world->told_ready = 1;
        world->peer[world->rank].host = tshi_uv_own_host(world);
        (void)tshi_uv_field(tshi_uv_write(world, TSHI_UV_READY),
                            (uint64_t)world->peer[world->rank].host, 2);
        tshi_uv_post(&world->peer[0]); /* no-op if this is rank 0 */
    }
    if (world->rank == 0 && world->told_ready && tshi_uv_all(world, 0, 1)) { /* all sent READY */
        tshi_uv_cursor *c = tshi_uv_write(world, TSHI_UV_GO);
        for (int r = 0; r < world->size; r++)
            (void)tshi_uv_field(c, (uint64_t)world->peer[r].host, 2);
        tshi_uv_post_all(world);
        tshi_uv_completed(world);
    }
}

/* ========================================================================== */
/* >>uv-hear                                        MARK: - uv-hear (private) */
/* Handles, on the control thread, what peers send on control connections.    */
/* Each type of message has a handler, which sets c->bad if it is malformed.  */
/* A peer that sends a malformed message counts as lost.                      */
/* Needs: >>uv-cycle >>uv-form.                                               */
/* ========================================================================== */

/* Closes the control connection of a peer, whose state becomes `state`. */
static void tshi_uv_peer_end(tshi_uv_peer *peer, tshi_uv_state state) {
    tshi_uv_unwatch(&peer->poll);
    tshi_uv_close_fd(&peer->fd);
    tshi_uv_channel_free(&peer->channel);
    peer->in.used = peer->out.used = 0; /* discards unread and unsent bytes */
    peer->state = state;                /* why the connection ended */
}

/* Handles TELL: stores the peer's answer to this rank's ASK, unless it is about another
 * collective. */
static void tshi_uv_on_tell(tshi_uv_peer *peer, tshi_uv_cursor *c) {
    const tshi_uv_report *held = &peer->world->held; /* the report that this rank asked about */
    tshi_uv_answer answer;
    uint64_t group = 0, seq = 0;
    memset(&answer, 0, sizeof answer);
    answer.record.coll = tsh_coll_make(TSH_BARRIER, TSH_F32); /* values of fields that TELL lacks */
    tshi_uv_answer_fields(c, &group, &seq, &answer);
    if (!c->bad && group == held->group && seq == held->seq) peer->answer = answer;
}

/* Handles ASK: sends the coordinator this rank's answer (TELL). */
static void tshi_uv_on_ask(tshi_uv_peer *peer, tshi_uv_cursor *c) {
    tshi_uv_answer answer;
    uint64_t group = tshi_uv_field(c, 0, 8), seq = tshi_uv_field(c, 0, 8);
    tshi_uv_answer_for(peer->world, group, seq, &answer);
    tshi_uv_answer_fields(tshi_uv_write(peer->world, TSHI_UV_TELL), &group, &seq, &answer);
    tshi_uv_post(peer);
}

/* Handles REPORT, an error report: the peer takes this rank for its coordinator. If the world has
 * failed already, the peer gets that error. Else this rank holds the report, unless it holds a more
 * severe one, and forwards it to its own coordinator if that is another rank. */
static void tshi_uv_on_report(tshi_uv_peer *peer, tshi_uv_cursor *c) {
    tsh_uv_world *world = peer->world;
    tshi_uv_report e;
    memset(&e, 0, sizeof e);
    tshi_uv_report_fields(c, &e, world->size);
    if (c->bad) return;
    peer->reported = 1; /* tshi_uv_pass_on sends it the decision */
    if (tshi_uv_failed(world) != TSH_OK)
        tshi_uv_pass_on(world); /* the error is decided already */
    else
        tshi_uv_hold(world, &e);
}

/* Handles CONFIRM, which names a wait of this rank: answers (STILL) whether that wait goes on. */
static void tshi_uv_on_confirm(tshi_uv_peer *peer, tshi_uv_cursor *c) {
    uint64_t wait = tshi_uv_field(c, 0, 8); /* number of the wait that is asked about */
    tshi_uv_cursor *out = tshi_uv_write(peer->world, TSHI_UV_STILL);
    (void)tshi_uv_field(out, wait, 8);
    (void)tshi_uv_field(out, (uint64_t)tshi_uv_still(peer->world, wait), 1);
    tshi_uv_post(peer);
}

/* Handles STILL, the peer's answer to this rank's CONFIRM. */
static void tshi_uv_on_still(tshi_uv_peer *peer, tshi_uv_cursor *c) {
    uint64_t wait = tshi_uv_field(c, 0, 8);
    int still = (int)tshi_uv_field(c, 0, 1);
    if (!c->bad && tshi_uv_confirmed(peer->world, peer->rank, wait, still))
        tshi_uv_follow(peer->world, -1); /* the cycle is gone: looks for another */
}

/* Handles LINKED: a higher member of the group that is being made has both its connections to this
 * rank. Until it says so, it may dial again, since this rank's reply may have been damaged. */
static void tshi_uv_on_linked(tshi_uv_peer *peer, tshi_uv_cursor *c) {
    tshi_uv_group *group = peer->world->making;
    uint64_t id = tshi_uv_field(c, 0, 8);
    int r = group && group->id == id ? tshi_uv_member(group, peer->rank) : -1;
    if (r <= (group ? group->rank : 0) || group->link[r].confirmed) return;
    group->link[r].confirmed = 1;
    group->missing--;
}

/* Returns 1 if the group that is being made still lacks a connection to world rank `rank`. */
static int tshi_uv_misses(const tsh_uv_world *world, int rank) {
    int r = world->making ? tshi_uv_member(world->making, rank) : -1;
    return r >= 0 && r != world->making->rank && tshi_uv_unlinked(world->making, r);
}

/* Handles BYE: the peer has shut down in good order. That is an error only if a connection to it is
 * still to be made. */
static void tshi_uv_on_bye(tshi_uv_peer *peer) {
    tsh_uv_world *world = peer->world;
    tshi_uv_peer_end(peer, TSHI_UV_LEFT); /* closes the connection */
    if ((world->forming && !world->told_ready) || tshi_uv_misses(world, peer->rank))
        tshi_uv_suspect(world, TSHI_UV_GONE, TSH_ERR_LOST, peer->rank,
                        "rank %d at %s left while its connections were made", peer->rank,
                        peer->name);
    uv_mutex_lock(&world->lock);
    /* If this rank waits, reports that again: another rank may be the coordinator now. */
    TSHI_UV_PUT(&world->blocked_new, world->blocked.wait != 0);
    uv_mutex_unlock(&world->lock);
}

/* Writes this rank's latest collective for an error: "; rank 0 last called barrier, collective 3 of
 * tp", or "" if it has called none. Returns text. */
static const char *tshi_uv_last_call(tsh_uv_world *world, char *text, size_t room) {
    const tshi_uv_group *group;
    tshi_uv_record record;
    uint64_t id = 0, seq = 0; /* id 0: no collective yet */
    uv_mutex_lock(&world->lock);
    /* NULL: no collective yet, or its group is closed */
    group = tshi_uv_find_group(world, world->last);
    if (group) {
        id = group->id;
        seq = group->started - 1;                      /* number of the group's latest collective */
        record = group->record[seq % TSHI_UV_RECORDS]; /* copied: the caller may overwrite it */
    }
    uv_mutex_unlock(&world->lock);
    text[0] = 0;
    if (id) tsh_text_add(text, room, "; rank %d last called ", world->rank);
    if (id) tshb_coll_where(&record.coll, 0, seq, id, text, room);
    return text;
}

/* Reports that a data connection is dead: bytes that this rank wrote never reach the peer. ends:
 * addresses of this rank's end and the peer's. */
static void tshi_uv_suspect_link(tshi_uv_peer *peer, const tshi_uv_address ends[2]) {
    tsh_uv_world *world = peer->world;
    char texts[2][80], last[240]; /* texts: both ends as host:port */
    for (int i = 0; i < 2; i++) tshi_uv_address_text(&ends[i], texts[i], sizeof texts[i]);
    tshi_uv_suspect(world, TSHI_UV_SILENT, TSH_ERR_LOST, tshb_blamed(world->rank, peer->rank),
                    "the data connection of rank %d (%s) and rank %d (%s) is dead: for %.1f s "
                    "(TSHARD_HEARTBEAT) no byte has come through, though both ranks answer; has a "
                    "firewall or NAT between them dropped it?%s",
                    world->rank, texts[0], peer->rank, texts[1], (double)world->heartbeat / 1e9,
                    tshi_uv_last_call(world, last, sizeof last));
}

/* Handles AWAIT: a peer waits on a data connection, and says how many bytes it has received. If
 * this rank has written more, some are in flight; if none of them arrives for TSHARD_HEARTBEAT, the
 * connection is dead. TCP does not report that: it retries for minutes while bytes are
 * unacknowledged, does nothing if none are, and TCP_USER_TIMEOUT also ends a connection whose
 * reader is only busy. */
static void tshi_uv_on_await(tshi_uv_peer *peer, tshi_uv_cursor *c) {
    tsh_uv_world *world = peer->world;
    /* got: bytes that the peer has received */
    uint64_t id = tshi_uv_field(c, 0, 8), got = tshi_uv_field(c, 0, 8);
    uint32_t purpose = (uint32_t)tshi_uv_field(c, 0, 1); /* TSHI_UV_DATA or TSHI_UV_MESSAGES */
    int64_t now = tsh_now();
    tshi_uv_group *group;
    tshi_uv_link *link = NULL; /* NULL: its group is closed or unknown */
    tshi_uv_address ends[2];   /* addresses of both ends, for the error */
    int dead = 0;              /* 1: the connection is dead, to be reported after unlocking */
    uv_mutex_lock(&world->lock);
    group = c->bad ? NULL : tshi_uv_find_group(world, id);
    if (group) link = tshi_uv_link_for(group, purpose, peer->rank);
    if (link) {
        /* same: 1: the peer has received nothing since its previous AWAIT message, a short time
         * ago */
        int same = got == link->peer_got && now - link->peer_got_at < world->heartbeat / 2;
        /* The time just after a cut of the network does not count: before TCP resends, it may wait
         * for as long again as the cut lasted. */
        if (!same || TSHI_UV_GET(&link->wrote) <= got || tshi_uv_missed(world, &peer->heard))
            link->stalled_since = 0; /* bytes arrive, or none are in flight */
        else if (!link->stalled_since)
            link->stalled_since = now; /* the first AWAIT without new bytes */
        link->peer_got = got;
        link->peer_got_at = now;
        dead = link->stalled_since && now - link->stalled_since >= world->heartbeat;
        for (int i = 0; i < 2 && dead; i++) (void)tshi_uv_end_of(link->fd, i, &ends[i]);
    }
    uv_mutex_unlock(&world->lock);
    /* called only after unlocking, since it takes the lock itself */
    if (dead) tshi_uv_suspect_link(peer, ends);
}

/* Handles one message of a peer. Sets c->bad if it is malformed or of an unknown type. */
static void tshi_uv_dispatch(tshi_uv_peer *peer, unsigned type, tshi_uv_cursor *c) {
    tsh_uv_world *world = peer->world;
    tsh_error error;
    switch (type) {
    case TSHI_UV_BEAT: break; /* tshi_uv_read_peer has noted that the peer is alive */
    case TSHI_UV_HERE: tshi_uv_on_here(peer, c); break; /* to rank 0: where the peer listens */
    case TSHI_UV_MISSING: tshi_uv_text_field(c, world->absent, sizeof world->absent); break;
    case TSHI_UV_TABLE: tshi_uv_on_table(world, c); break; /* from rank 0: all addresses */
    case TSHI_UV_READY: /* to rank 0: the peer has all its connections */
        tshi_uv_read_host(peer, c);
        peer->ready = !c->bad;
        break;
    case TSHI_UV_GO: /* from rank 0: the world has formed */
        if (world->forming) tshi_uv_on_go(world, c);
        break;
    /* the peer reports an error to this rank, its coordinator */
    case TSHI_UV_REPORT: tshi_uv_on_report(peer, c); break;
    /* the coordinator asks what this rank called */
    case TSHI_UV_ASK: tshi_uv_on_ask(peer, c); break;
    case TSHI_UV_TELL: tshi_uv_on_tell(peer, c); break; /* the answer to an ASK */
    case TSHI_UV_BLOCKED: /* to this rank as coordinator: what the peer waits for */
        tshi_uv_blocked_fields(c, &peer->blocked, world->size);
        if (!c->bad) tshi_uv_follow(world, peer->rank); /* looks for a cycle */
        break;
    /* the coordinator asks if this rank still waits */
    case TSHI_UV_CONFIRM: tshi_uv_on_confirm(peer, c); break;
    case TSHI_UV_STILL: tshi_uv_on_still(peer, c); break; /* the answer to a CONFIRM */
    case TSHI_UV_DECISION: /* the world's error, from a coordinator */
        memset(&error, 0, sizeof error);
        tshi_uv_error_fields(c, &error, world->size);
        if (!c->bad) tshi_uv_on_decision(peer, &error);
        break;
    /* the peer shuts down */
    case TSHI_UV_BYE: tshi_uv_on_bye(peer); break;
    /* the peer says how many bytes it has received from this rank */
    case TSHI_UV_AWAIT: tshi_uv_on_await(peer, c); break;
    /* the peer says that it has both connections of a new group to this rank */
    case TSHI_UV_LINKED: tshi_uv_on_linked(peer, c); break;
    default: c->bad = 1; /* unknown type */
    }
}

/* Checks n bytes of the first message in peer->in, from byte `from` on: by the checksum behind
 * them, which covers the message from its beginning; or, on an encrypted connection, by decrypting
 * them in place. Returns 0 if the checksum, or the tag, is wrong. */
static int tshi_uv_intact(const tshi_uv_peer *peer, size_t from, size_t n) {
    char *message = peer->in.data, *at = message + from;
    tshi_uv_cursor c = tshi_uv_cursor_over(at + n, TSHI_UV_MESSAGE_TAIL, 0);
    if (peer->channel) return tshi_uv_unseal(&peer->channel->in, at, n, at);
    return tshi_uv_field(&c, 0, 4) == tshi_uv_crc(peer->world, 0, message, from + n);
}

/* Handles a wrong checksum or tag of a control message: what follows on this connection cannot be
 * read. The connection stays open, so that the peer still gets this rank's report and decision. */
static void tshi_uv_deafen(tshi_uv_peer *peer) {
    tsh_uv_world *world = peer->world;
    tshi_uv_address ends[2];
    char texts[2][80]; /* both ends as host:port */
    peer->deaf = 1;
    for (int i = 0; i < 2; i++) {
        (void)tshi_uv_end_of(peer->fd, i, &ends[i]);
        tshi_uv_address_text(&ends[i], texts[i], sizeof texts[i]);
    }
    if (world->parting) return; /* this rank shuts down: no error */
    tshi_uv_suspect(world, TSHI_UV_DAMAGED, TSH_ERR_LOST, tshb_blamed(world->rank, peer->rank),
                    TSHI_UV_DAMAGED_TEXT, "control", world->rank, texts[0], peer->rank, texts[1],
                    TSHI_UV_CHECK_OF(peer->channel), "a control message", "");
}

/* Handles the first message in peer->in. Returns 1: handled, or it is damaged; 0: incomplete;
 * -1: malformed. */
static int tshi_uv_next_message(tshi_uv_peer *peer) {
    const size_t tail = peer->channel ? (size_t)TSHI_UV_TAG : (size_t)TSHI_UV_MESSAGE_TAIL;
    const size_t head = 5 + tail; /* length and type, then their checksum or tag */
    tshi_uv_cursor c = tshi_uv_cursor_over(peer->in.data, peer->in.used, 0);
    size_t n; /* length of the payload */
    unsigned type;
    if (peer->in.used < head) return 0; /* the head is incomplete */
    if (!peer->opened && !tshi_uv_intact(peer, 0, 5)) {
        tshi_uv_deafen(peer);
        return 1;
    }
    peer->opened = 1; /* a head is decrypted only once, also if its payload arrives later */
    n = (size_t)tshi_uv_field(&c, 0, 4);
    type = (unsigned)tshi_uv_field(&c, 0, 1);
    /* the payload is too long, or the type unknown */
    if (n > TSHI_UV_PAYLOAD || type >= TSHI_UV_TYPES) return -1;
    if (peer->in.used < head + n + tail) return 0;
    peer->opened = 0;
    if (!tshi_uv_intact(peer, head, n)) {
        tshi_uv_deafen(peer);
        return 1;
    }
    c.at += tail;
    c.end = c.at + n; /* the message's handler reads no further */
    tshi_uv_dispatch(peer, type, &c);
    if (c.bad) return -1;
    if (peer->fd >= 0) /* unless a handler closed the connection: removes the message */
        tshi_uv_drop(&peer->in, head + n + tail);
    return 1;
}

/* Ends the connection of a peer that is lost, and reports the loss, unless this rank shuts down. */
static void tshi_uv_peer_gone(tshi_uv_peer *peer, const char *how) {
    tsh_uv_world *world = peer->world;
    char last[240];
    tshi_uv_peer_end(peer, TSHI_UV_LOST);
    if (world->parting) return; /* expected while this rank shuts down */
    if (tshi_uv_is_cut(peer))   /* the network broke; else the process ended */
        tshi_uv_suspect_cut(world);
    else
        tshi_uv_suspect(world, TSHI_UV_GONE, TSH_ERR_LOST, peer->rank,
                        "rank %d at %s is gone: %s%s", peer->rank, peer->name, how,
                        tshi_uv_last_call(world, last, sizeof last));
}

/* Reads from a control connection and handles all messages that have arrived. */
static void tshi_uv_read_peer(tshi_uv_peer *peer) {
    for (;;) {
        ssize_t n;
        int heard = 0;                           /* latest result of tshi_uv_next_message */
        if (!tshi_uv_reserve(&peer->in, 4096)) { /* 0: no memory for 4 KiB more */
            if (!peer->world->parting) tshi_uv_lacks_memory(peer->world, peer->rank);
            return;
        }
        n = recv(peer->fd, peer->in.data + peer->in.used, peer->in.room - peer->in.used, 0);
        if (n < 0 && tshi_uv_later()) return; /* nothing more for now */
        if (n <= 0) {                         /* 0: the peer closed; -1: an error */
            tshi_uv_peer_gone(peer, n == 0 ? "its connection ended" : tshi_uv_why(errno));
            return;
        }
        peer->in.used += (size_t)n;
        peer->used = 1;
        tshi_uv_beats(peer, &peer->heard, tsh_now()); /* the peer is alive */
        tshi_uv_look(peer);                           /* updates peer->acked */
        while (peer->fd >= 0 && !peer->deaf && (heard = tshi_uv_next_message(peer)) > 0) {
        }
        if (peer->deaf) peer->in.used = 0;
        if (heard < 0) tshi_uv_peer_gone(peer, "it sent what is not a control message");
        if (peer->fd < 0) return; /* a handler closed the connection */
    }
}

/* Callback when a control connection is ready: receives, then sends. */
static void tshi_uv_peer_event(uv_poll_t *poll, int status, int events) {
    tshi_uv_peer *peer = (tshi_uv_peer *)poll->data;
    (void)status;
    (void)events;
    tshi_uv_read_peer(peer);
    if (peer->fd >= 0) tshi_uv_flush(peer); /* sends what waits in peer->out */
}

/* ========================================================================== */
/* >>uv-admit                                      MARK: - uv-admit (private) */
/* Dials and accepts connections, and hands them over once authenticated.     */
/* A connection then belongs to a peer (control), or to a link of a group.    */
/* A dialled connection that fails is dialled again; an accepted one, freed.  */
/* Needs: >>uv-hear.                                                          */
/* ========================================================================== */

/* Makes fd the control connection to world rank `rank`. Returns 0 if memory is lacking, which it
 * reports. */
static int tshi_uv_attach(tsh_uv_world *world, int rank, int fd, tshi_uv_channel *channel,
                          const char *name) {
    tshi_uv_peer *peer = &world->peer[rank];
#ifdef TCP_THIN_LINEAR_TIMEOUTS
    /* Switches on that TCP, after a short break of the network, resends at even intervals, not at
     * doubled ones. Data connections do without: on a slow link they would leave no room for these
     * messages. */
    int one = 1;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_THIN_LINEAR_TIMEOUTS, &one, sizeof one);
#endif
    peer->poll = tshi_uv_watch(&world->control, fd, UV_READABLE, peer, tshi_uv_peer_event);
    if (!peer->poll) {
        tshi_uv_lacks_memory(world, rank);
        return 0;
    }
    peer->fd = fd;
    peer->channel = channel;
    peer->used = peer->deaf = peer->opened = 0;
    peer->events = UV_READABLE; /* the events that peer->poll watches now */
    peer->state = TSHI_UV_THERE;
    /* the peer's silence is counted from here on */
    peer->heard.last = peer->acked.last = tsh_now();
    (void)snprintf(peer->name, sizeof peer->name, "%s", name);
    return 1;
}

/* Returns 1 if both ends of the connection fd are on this host. */
static int tshi_uv_is_local(int fd) {
    tshi_uv_address ends[2];
    char text[2][64];
    for (int i = 0; i < 2; i++) { /* 0: this end; 1: the other */
        if (!tshi_uv_end_of(fd, i, &ends[i])) return 0;
        tshi_uv_host_text(&ends[i], text[i], sizeof text[i]);
    }
    /* both ends have the same address: one host */
    return tshi_uv_loopback(&ends[0]) || strcmp(text[0], text[1]) == 0;
}

/* Assigns a data connection to its tshi_uv_link; returns 0 if no link needs it. Between ranks of
 * one host a small send buffer lets the receiver read bytes while they are in the cache. */
static int tshi_uv_place_link(tsh_uv_world *world, const tshi_uv_hello *hello, int rank, int fd,
                              tshi_uv_channel *channel) {
    tshi_uv_link *link = tshi_uv_meant(world, hello, rank);
    int near = TSHI_UV_NEAR; /* size of the send buffer in bytes */
    if (!link) return 0;     /* no group needs this connection any more */
    if (tshi_uv_is_local(fd)) (void)setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &near, sizeof near);
    if (link->fd < 0) link->group->missing--; /* one connection less is missing */
    tshi_uv_close_fd(&link->fd);              /* the connection of an earlier attempt, if any */
    link->fd = fd;
    link->checks = (hello->options & TSHI_UV_CHECKED) != 0;
    tshi_uv_channel_free(&link->channel);
    link->channel = channel;
    return 1;
}

/* Sends the message LINKED to a lower rank, once this rank has both connections to it that a new
 * group needs. While the world forms, ranks send READY to rank 0 instead. */
static void tshi_uv_tell_linked(tsh_uv_world *world, int rank) {
    tshi_uv_group *group = world->making;
    if (!group || tshi_uv_unlinked(group, tshi_uv_member(group, rank))) return;
    (void)tshi_uv_field(tshi_uv_write(world, TSHI_UV_LINKED), group->id, 8);
    tshi_uv_post(&world->peer[rank]);
}

/* Hands an authenticated connection over to its tshi_uv_peer or tshi_uv_link. Ends it if no link
 * needs it, or if memory is lacking. */
static void tshi_uv_proven(tshi_uv_conn *conn) {
    tsh_uv_world *world = conn->world;
    int rank = conn->dialled ? conn->hello.server : conn->hello.client, kept;
    tshi_uv_channel *channel = NULL;
    tshi_uv_unwatch(&conn->poll);
    if (conn->hello.options & TSHI_UV_SEALED) {
        channel = tshi_uv_channel_new(conn->session, conn->dialled, conn->hello.options);
        if (!channel) {
            tshi_uv_lacks_memory(world, rank);
            tshi_uv_conn_end(conn);
            return;
        }
    }
    if (!conn->dialled) world->peer[rank].process = conn->hello.process;
    if (conn->hello.purpose <= TSHI_UV_CONTROL) { /* a control connection */
        /* closes the connection of an earlier attempt, if any */
        tshi_uv_peer_end(&world->peer[rank], TSHI_UV_ABSENT);
        kept = tshi_uv_attach(world, rank, conn->fd, channel, conn->name);
        if (kept && conn->hello.purpose == TSHI_UV_CONTROL && conn->dialled)
            tshi_uv_add_share(world, rank);
        if (kept && rank == 0) tshi_uv_joined(world); /* rank 0 has accepted this rank */
        /* sends all ranks the list of absent ranks, which has changed */
        if (kept && world->rank == 0) tshi_uv_tell_absent(world);
    } else {
        kept = tshi_uv_place_link(world, &conn->hello, rank, conn->fd, channel);
        if (kept && conn->dialled) tshi_uv_tell_linked(world, rank);
    }
    if (kept) {
        conn->fd = -1; /* the peer or the link owns the socket now */
        tshi_uv_conn_free(conn);
    } else {
        tshi_uv_channel_free(&channel);
        tshi_uv_conn_end(conn); /* if this rank dialled, it dials again */
    }
}

/* Callback when the socket of an unauthenticated connection is ready: goes on with its
 * handshake. */
static void tshi_uv_conn_event(uv_poll_t *poll, int status, int events) {
    tshi_uv_conn *conn = (tshi_uv_conn *)poll->data;
    int share = 1, done;
    (void)status;
    (void)events;
    if (conn->phase == TSHI_UV_SHARES) {
        done = tshi_uv_share_step(conn);
    } else {
        done = conn->dialled ? tshi_uv_client_step(conn) : tshi_uv_server_step(conn);
        share = conn->hello.purpose == TSHI_UV_SHARE; /* known from the client hello */
        if (done == 1 && share) done = tshi_uv_share_begin(conn);
    }
    if (done > 0 && share) {
        tshi_uv_conn_free(conn); /* the two ranks have each other's segment, or use TCP */
    } else if (done < 0) {       /* the handshake failed */
        tshi_uv_conn_end(conn);
    } else if (done) { /* both ends are authenticated */
        tshi_uv_proven(conn);
    } else if (conn->phase == TSHI_UV_HAS_HELLO) { /* the handshake waits for rank 0's table */
        (void)uv_poll_stop(poll);                  /* tshi_uv_tend continues the handshake */
    } else {
        int writes = conn->out_used || conn->phase == TSHI_UV_CONNECTS;
        (void)uv_poll_start(poll, UV_READABLE | (writes ? UV_WRITABLE : 0), tshi_uv_conn_event);
    }
}

/* Starts the handshake on fd, whose other end is `peer`. If this rank accepted the connection,
 * sends the server hello. */
static void tshi_uv_conn_begin(tshi_uv_conn *conn, int fd, const tshi_uv_address *peer) {
    /* a dialled socket becomes writable (UV_WRITABLE) when it has connected */
    int events = UV_READABLE | (conn->dialled ? UV_WRITABLE : 0);
    /* time limit of the handshake in seconds */
    int patience = conn->dialled ? TSHI_UV_DIAL_S : TSHI_UV_PATIENCE_S;
    conn->fd = fd;
    conn->phase = conn->dialled ? TSHI_UV_CONNECTS : TSHI_UV_AWAITS_HELLO;
    conn->until = tsh_now() + patience * TSHI_UV_SECOND; /* tshi_uv_tend ends the handshake then */
    tshi_uv_address_text(peer, conn->name, sizeof conn->name);
    conn->poll = tshi_uv_watch(&conn->world->control, fd, events, conn, tshi_uv_conn_event);
    if (!conn->poll) {
        tshi_uv_conn_end(conn); /* there is no memory to watch the socket */
    } else if (!conn->dialled) {
        uint32_t version = TSHI_UV_VERSION;
        tshi_uv_give_share(conn); /* new keys, so no client hello can be replayed */
        (void)tshi_uv_server_hello(conn->out, 1, &version, conn->hello.server_share);
        conn->out_used = TSHI_UV_SERVER_HELLO;
        conn->in_need = TSHI_UV_CLIENT_HELLO; /* bytes of the client hello, to be read */
        tshi_uv_conn_event(conn->poll, 0, 0); /* writes the server hello at once */
    }
}

/* Closes one accepted, unauthenticated connection, chosen at random. Returns 0 if there is none.
 * Closing the oldest would shut out ranks whose round trip takes longer than others need to fill
 * all n places (world->unproven_limit). At random, a connection survives n arrivals with
 * probability 1/e, and a rank dials again. */
static int tshi_uv_drop_unproven(tsh_uv_world *world) {
    tshi_uv_conn *conn = world->conns; /* this list has dialled connections, too */
    int skip;
    if (!world->unproven) return 0;
    /* number of accepted connections in the list before the one to be closed */
    skip = (int)randombytes_uniform((uint32_t)world->unproven);
    while (conn->dialled || skip--) conn = conn->next; /* skips dialled ones, too */
    tshi_uv_note(world, TSHI_UV_OF_UNPROVEN,
                 "rank %d refused %s: %d connections wait for their proof", world->rank, conn->name,
                 world->unproven);
    tshi_uv_conn_end(conn);
    return 1;
}

/* Handles a lack of file descriptors. While the world forms, it is only recorded in
 * world->obstacle, since descriptors may become free; later it is an error. */
static void tshi_uv_too_few(tsh_uv_world *world) {
    /* number of file descriptors that the world needs; below, those of its groups are added */
    int need = tshi_uv_descriptors(world->size);
    uv_mutex_lock(&world->lock);
    for (const tshi_uv_group *group = world->groups; group; group = group->next)
        if (group != world->world_group) need += 2 * (group->size - 1); /* 2 per member */
    uv_mutex_unlock(&world->lock);
    tshi_uv_hindered(world, "too few descriptors: rank %d needs about %d (ulimit -n)", world->rank,
                     need);
    if (!world->forming) /* before the world has formed, accepting is tried again */
        tshi_uv_suspect(world, TSHI_UV_ABORT, TSH_ERR_IO, world->rank, "%s", world->obstacle);
}

/* Callback when connections arrive on world->listener: accepts them and starts their handshakes. */
static void tshi_uv_accept(uv_poll_t *poll, int status, int events) {
    tsh_uv_world *world = (tsh_uv_world *)poll->data;
    const int near = poll == world->shm_listening; /* 1: connections of this host's ranks */
    const int *listener = near ? &world->shm_listener : &world->listener;
    (void)status;
    (void)events;
    /* accepts up to TSHI_UV_ACCEPTS connections per event */
    for (int i = 0; i < TSHI_UV_ACCEPTS && *listener >= 0; i++) {
        tshi_uv_address from;
        tshi_uv_conn *conn;
        int fd;
        from.size = (socklen_t)sizeof from.storage;
        fd = accept(*listener, (struct sockaddr *)&from.storage, &from.size);
        if (fd < 0) {
            if (!tshi_uv_out_of_descriptors(errno)) return; /* no connection waits to be accepted */
            if (tshi_uv_drop_unproven(world)) continue;     /* frees a descriptor: try again */
            tshi_uv_too_few(world);
            tshi_uv_unwatch(near ? &world->shm_listening
                                 : &world->listening); /* a later tick tries again */
            world->accept_at = tsh_now() + 100 * TSHI_UV_MS;
            return;
        }
        if (world->unproven >= world->unproven_limit) (void)tshi_uv_drop_unproven(world);
        conn = tshi_uv_prepare_fd(fd) && (!near || tshi_uv_same_user(fd))
                   ? tshi_uv_conn_new(world, 0)
                   : NULL;
        if (conn) {
            conn->address = from;
            tshi_uv_conn_begin(conn, fd, &from);
        } else
            (void)close(fd); /* no memory, another user, or the system refused */
    }
}

/* Starts to connect conn to its address. If that fails at once, it is dialled again later. */
static void tshi_uv_dial(tshi_uv_conn *conn) {
    tsh_uv_world *world = conn->world;
    const tshi_uv_address *address = &conn->address;
    char name[80]; /* host:port, for the error */
    int fd, why;
    if (conn->hello.purpose == TSHI_UV_JOIN) /* tries all addresses of rank 0's host in turn */
        address = &world->address[conn->attempts % world->addresses];
    fd = tshi_uv_connect(address);
    why = errno; /* saved before another call changes errno */
    if (conn->hello.purpose == TSHI_UV_SHARE &&
        (fd >= 0 ? !tshi_uv_same_user(fd) : why == ECONNREFUSED)) {
        tshi_uv_close_fd(&fd); /* peer of another user, or on another host: TCP is used */
        tshi_uv_conn_free(conn);
        return;
    }
    if (fd >= 0) {
        tshi_uv_conn_begin(conn, fd, address);
        return;
    }
    tshi_uv_address_text(address, name, sizeof name);
    if (tshi_uv_out_of_descriptors(why))
        tshi_uv_too_few(world);
    else
        tshi_uv_hindered(world, "%s: %s", name, tshi_uv_why(why));
    tshi_uv_conn_end(conn); /* dialled again later */
}

/* ========================================================================== */
/* >>uv-control                                  MARK: - uv-control (private) */
/* The loop of the control thread, which runs until the world has shut down.  */
/* After each batch of events, at least every 100 ms, it calls tshi_uv_tick.  */
/* That does what is due: heartbeats, dialling, error reports and decisions.  */
/* The loop ends once the last group is closed and the peers were told.       */
/* Needs: >>uv-admit.                                                         */
/* ========================================================================== */

/* ms between heartbeats; ms of silence after which a heartbeat is overdue */
enum { TSHI_UV_BEAT_MS = 250, TSHI_UV_MISSING_MS = 300 };
/* AWAIT: ms between two AWAIT messages (tshi_uv_tell_awaited). OVERSLEPT: if this thread wakes up
 * later than planned by more ms than this, it starts to count the silence of all peers anew. */
enum { TSHI_UV_AWAIT_MS = 120, TSHI_UV_OVERSLEPT_MS = 1000 };

/* Sends a heartbeat (BEAT) to every peer, if one is due. */
static void tshi_uv_beat(tsh_uv_world *world, int64_t now) {
    if (now < world->beat) return;
    for (int r = 0; r < world->size; r++)
        if (world->peer[r].fd >= 0) tshi_uv_look(&world->peer[r]); /* updates peer->acked */
    (void)tshi_uv_write(world, TSHI_UV_BEAT);
    for (int r = 0; r < world->size; r++)
        /* a peer to which bytes are still to be sent needs no heartbeat */
        if (!world->peer[r].out.used) tshi_uv_post(&world->peer[r]);
    world->beat = now + TSHI_UV_BEAT_MS * TSHI_UV_MS;
}

/* While the caller's thread is blocked, sends each peer whose data it waits for an AWAIT message,
 * with the number of bytes received from it so far. A peer gets the next one only after it has
 * acknowledged the previous one, so that they do not pile up on slow networks. */
static void tshi_uv_tell_awaited(tsh_uv_world *world, int64_t now) {
    if (now < world->await_at) return;
    world->await_at = now + TSHI_UV_AWAIT_MS * TSHI_UV_MS;
    uv_mutex_lock(&world->lock);
    for (tshi_uv_group *group = world->groups; group; group = group->next) {
        for (int i = 0; world->blocked.wait && i < 2 * group->size; i++) {
            tshi_uv_link *link = &group->link[i];
            tshi_uv_peer *peer = &world->peer[group->ranks[link->peer]];
            tshi_uv_cursor *c;
            /* no control connection to the peer, or no bytes of this link are awaited */
            if (peer->fd < 0 || !TSHI_UV_GET(&link->awaits)) continue;
            tshi_uv_look(peer); /* updates peer->acked */
            /* waits until the peer's system has acknowledged the previous messages */
            if (peer->mark && peer->marked < now) continue;
            c = tshi_uv_write(world, TSHI_UV_AWAIT);
            (void)tshi_uv_field(c, group->id, 8);               /* id of the link's group */
            (void)tshi_uv_field(c, TSHI_UV_GET(&link->got), 8); /* bytes received so far */
            (void)tshi_uv_field(c, i < group->size ? TSHI_UV_DATA : TSHI_UV_MESSAGES, 1);
            tshi_uv_post(peer);
        }
    }
    uv_mutex_unlock(&world->lock);
}

/* Reports peers that have been silent for TSHARD_HEARTBEAT. Time in which this thread did not run
 * does not count. */
static void tshi_uv_note_silence(tsh_uv_world *world, int64_t now) {
    /* overslept: 1: this thread woke so late that messages of peers may be unread; cut: 1: the
     * network to a peer is cut */
    int overslept = world->ticked && now - world->ticked > TSHI_UV_OVERSLEPT_MS * TSHI_UV_MS, cut;
    int64_t due; /* when this peer's silence becomes an error */
    char last[240];
    world->silent_at = INT64_MAX; /* set below to the earliest `due` of all peers */
    for (int r = 0; r < world->size; r++) {
        tshi_uv_peer *peer = &world->peer[r];
        if (peer->state != TSHI_UV_THERE) continue;
        /* counts the silence anew from now on */
        if (overslept) peer->heard.last = peer->acked.last = now;
        /* after BYE or an error, silence is not reported */
        if (world->parting || tshi_uv_failed(world) != TSH_OK) continue;
        cut = tshi_uv_is_cut(peer);
        /* Silence starts when a heartbeat is overdue. On a half-open connection the peer is still
         * heard after it ceased to receive: there silence starts with the first bytes that it does
         * not acknowledge. */
        due = peer->heard.last + TSHI_UV_MISSING_MS * TSHI_UV_MS + world->heartbeat;
        if (cut && peer->mark) due = tshi_uv_min(due, peer->marked + world->heartbeat);
        if (now < due) {
            world->silent_at = tshi_uv_min(world->silent_at, due);
            continue;
        }
        peer->state = TSHI_UV_MUTE; /* so that the silence is reported only once */
        if (cut)
            tshi_uv_suspect_cut(world);
        else
            tshi_uv_suspect(world, TSHI_UV_SILENT, TSH_ERR_LOST, r,
                            "rank %d at %s has been silent for %.1f s (TSHARD_HEARTBEAT)%s", r,
                            peer->name, (double)(now - peer->heard.last) / 1e9,
                            tshi_uv_last_call(world, last, sizeof last));
    }
}

/* Continues handshakes that waited for rank 0's address table, dials the connections that are due,
 * and ends handshakes that take too long. */
static void tshi_uv_tend(tsh_uv_world *world, int64_t now) {
    tshi_uv_conn *conn = world->conns, *next;
    for (; conn; conn = next) {
        next = conn->next; /* conn may be freed below */
        if (conn->phase == TSHI_UV_HAS_HELLO && world->tabled) {
            tshi_uv_conn_event(conn->poll, 0, 0); /* the table has arrived: replies now */
            continue;
        }
        if (now < conn->until) continue;
        if (conn->phase == TSHI_UV_WAITS) {
            if (tshi_uv_failed(world) == TSH_OK) tshi_uv_dial(conn);
            continue;
        }
        if (conn->dialled)
            tshi_uv_hindered(world, "%s does not answer", conn->name);
        else
            tshi_uv_note(world, TSHI_UV_OF_UNPROVEN, "rank %d refused %s: no proof within %d s",
                         world->rank, conn->name, TSHI_UV_PATIENCE_S);
        tshi_uv_conn_end(conn); /* dialled again later, or freed */
    }
}

/* Appends to `text` the ranks that may still lack connections to others. Called when all ranks have
 * joined, but the world is not complete. */
static void tshi_uv_list_unready(const tsh_uv_world *world, char *text, size_t room) {
    tsh_text_add(text, room, "; a firewall between hosts? Still connecting:");
    /* a rank other than 0 knows only that it is not ready itself */
    if (world->rank) tsh_text_add(text, room, " %d", world->rank);
    for (int r = 1; r < world->size && !world->rank; r++)
        /* rank 0 lists the ranks that have not sent READY */
        if (!world->peer[r].ready) tsh_text_add(text, room, " %d", r);
}

/* Fills error with a sentence that says that the world is not complete after `passed` ns, which
 * ranks are absent, and what prevents connections. how: the sentence's verb, "did not form in" or
 * "is not complete after". */
static void tshi_uv_not_formed(const tsh_uv_world *world, const char *how, int64_t passed,
                               tsh_error *error) {
    char absent[256], where[340], hint[256] = "", host[64]; /* parts of the error's sentence */
    int there = world->rank == 0 || world->peer[0].state == TSHI_UV_THERE;
    const char *obstacle; /* why a connection of this rank last failed, or "" */
    long first;           /* lowest absent rank; -1: none */
    if (world->rank == 0)
        tshi_uv_list_absent(world, absent, sizeof absent); /* rank 0 knows who is absent */
    else
        (void)snprintf(absent, sizeof absent, "%s", there ? world->absent : "");
    first = absent[0] ? strtol(absent, NULL, 10) : -1; /* the list is sorted by rank */
    /* rank 0 sent world->absent: check that it names a rank */
    if (first < 0 || first >= world->size) first = -1;
    tshi_uv_name(world->host, world->port, where, sizeof where);
    tshi_uv_host_text(&world->own, host, sizeof host);
    if (world->rank == 0 && tshi_uv_loopback(&world->own) && strcmp(world->host, host) != 0)
        (void)snprintf(hint, sizeof hint,
                       "; rank 0 listens on %s, where other hosts cannot reach it: set TSHARD_HOST "
                       "or TSHARD_BIND to an address of its network",
                       host);
    else if (!there) /* no control connection to rank 0 */
        (void)snprintf(hint, sizeof hint,
                       "; rank 0 has not started, does not listen at %.60s (TSHARD_HOST, "
                       "TSHARD_PORT), or its world is complete already",
                       where);
    else if (!absent[0] && !world->obstacle[0]) /* all have joined, nothing was refused */
        tshi_uv_list_unready(world, hint, sizeof hint);
    /* the obstacle is left out if ranks are absent: they are the reason, not this rank's failed
     * attempts */
    obstacle = there && absent[0] ? "" : world->obstacle;
    if (there)
        (void)tsh_error_set(error, TSH_ERR_TIMEOUT, (int)first,
                            "the world of %d ranks %s %.1f s%s%s%s%s%s", world->size, how,
                            (double)passed / 1e9, absent[0] ? "; absent ranks:" : "", absent,
                            obstacle[0] ? "; " : "", obstacle, hint);
    else
        (void)tsh_error_set(error, TSH_ERR_TIMEOUT, -1,
                            "rank %d of %d did not reach rank 0 in %.1f s%s%s%s", world->rank,
                            world->size, (double)passed / 1e9, obstacle[0] ? ": " : "", obstacle,
                            hint);
}

/* Logs that the world is not complete yet. Rank 0 knows which ranks are absent; another rank logs
 * something only if it cannot reach rank 0, or if all have joined but it cannot reach some. */
static void tshi_uv_give_notice(const tsh_uv_world *world) {
    /* joined: 1 if this rank, which is not 0, is connected to rank 0 */
    int joined = world->rank && world->peer[0].state == TSHI_UV_THERE;
    tsh_error error;
    if (joined && (world->absent[0] || world->told_ready)) return;
    tshi_uv_not_formed(world, "is not complete after", world->notice, &error);
    /* a timeout of 10^9 s or more stands for no time limit */
    if (world->timeout < INT64_C(1000000000) * TSHI_UV_SECOND)
        tsh_log_message(&world->logger, "%s; waiting until %g s are over (TSHARD_TIMEOUT)",
                        error.message, (double)world->timeout / 1e9);
    else
        tsh_log_message(&world->logger, "%s; waiting without a time limit", error.message);
}

/* While the world forms: logs once that this takes long, and reports an error when the time is
 * over. */
static void tshi_uv_watch_forming(tsh_uv_world *world, int64_t now) {
    tsh_error error;
    if (!world->forming || tshi_uv_failed(world) != TSH_OK) return;
    if (now >= world->due) {
        tshi_uv_not_formed(world, "did not form in", world->timeout, &error);
        tshi_uv_suspect(world, TSHI_UV_LATE, error.code, error.rank, "%s", error.message);
    } else if (now >= world->notice_at) {
        world->notice_at = INT64_MAX; /* logged only once */
        tshi_uv_give_notice(world);
    }
}

static void tshi_uv_tick(tsh_uv_world *world) { /* Does all periodic work that is due now. */
    int64_t now = tsh_now();
    tshi_uv_beat(world, now);         /* sends heartbeats every 250 ms */
    tshi_uv_tell_awaited(world, now); /* sends AWAIT every 120 ms while the caller is blocked */
    tshi_uv_note_silence(world, now); /* reports peers that have been silent too long */
    tshi_uv_take_offer(world, now);   /* adopts a decision held back, if its time has come */
    tshi_uv_send_report(world);       /* sends world->held, again if the coordinator has changed */
    tshi_uv_form(world);              /* completes the world or a group */
    tshi_uv_tend(world, now);         /* continues handshakes, dials the connections that are due */
    tshi_uv_log_counted(world, now);  /* logs refused connections, once a second */
    if (tshi_uv_failed(world) == TSH_OK && world->listener >= 0 && !world->listening &&
        now >= world->accept_at) /* starts or resumes accepting */
        world->listening = tshi_uv_watch(&world->control, world->listener, UV_READABLE, world,
                                         tshi_uv_accept);
    if (world->shm_listener >= 0 && !world->shm_listening)
        world->shm_listening = tshi_uv_watch(&world->control, world->shm_listener, UV_READABLE,
                                             world, tshi_uv_accept);
    tshi_uv_watch_forming(world, now); /* logs that joining takes long, or has timed out */
    /* sends world->blocked to the coordinator */
    if (TSHI_UV_GET(&world->blocked_new)) tshi_uv_send_blocked(world);
    tshi_uv_decide(world, now); /* chooses the world's error, if that is due */
}

/* Returns 1 if the shutdown can end: all peers have closed their connections, or 20 ms have passed
 * since this rank sent BYE (200 ms if bytes still wait to be sent; 2 s if a peer's system has not
 * acknowledged BYE: once the connection is closed, a lost BYE is not sent again, and the peer would
 * take this rank for lost). */
static int tshi_uv_parted(tsh_uv_world *world, int64_t now) {
    int unsent = 0, unheard = 0, there = 0;
    for (int r = 0; r < world->size; r++) {
        const tshi_uv_peer *peer = &world->peer[r];
        if (peer->fd < 0) continue;
        there++;
        unsent += peer->out.used != 0;
        unheard += tshi_uv_unacknowledged(peer->fd) > 0 && !tshi_uv_is_cut(peer);
    }
    return !there || now - world->parting > (unheard ? 2000 : unsent ? 200 : 20) * TSHI_UV_MS;
}

static void tshi_uv_part(tsh_uv_world *world) { /* Begins the shutdown: sends BYE to all. */
    if (tshi_uv_has_reported(world)) return;    /* first awaits the decision on its error */
    world->parting = tsh_now();
    (void)tshi_uv_write(world, TSHI_UV_BYE);
    tshi_uv_post_all(world);
    for (int r = 0; r < world->size; r++)
        if (world->peer[r].fd >= 0 && !world->peer[r].out.used)
            /* tells the peer's system that no more bytes will be sent */
            (void)shutdown(world->peer[r].fd, SHUT_WR);
}

/* Tells libuv for which events (UV_READABLE, UV_WRITABLE) to watch each control connection. */
static void tshi_uv_watch_peers(tsh_uv_world *world) {
    for (int r = 0; r < world->size; r++) {
        tshi_uv_peer *peer = &world->peer[r];
        /* UV_WRITABLE only if bytes wait to be sent to the peer */
        int events = UV_READABLE | (peer->out.used ? UV_WRITABLE : 0);
        if (peer->fd < 0 || events == peer->events) continue; /* no connection, or no change */
        (void)uv_poll_start(peer->poll, events, tshi_uv_peer_event);
        peer->events = events;
    }
}

/* Callback of world->tick. It does nothing: the event itself ends the loop's sleep. */
static void tshi_uv_on_tick(uv_timer_t *timer) {
    (void)timer;
}

/* Runs before the loop of the control thread sleeps: does what is due (tshi_uv_tick), then sets a
 * timer for the next time. */
static void tshi_uv_on_turn(uv_prepare_t *turn) {
    tsh_uv_world *world = (tsh_uv_world *)turn->data;
    int ended = tshi_uv_failed(world) != TSH_OK, leaving = TSHI_UV_GET(&world->leaving), wait;
    int64_t next; /* when the next heartbeat, or the next error for silence, is due */
    tshi_uv_tick(world);
    if (leaving && !world->parting) tshi_uv_part(world);
    if (world->parting && tshi_uv_parted(world, tsh_now())) {
        uv_stop(&world->control); /* ends uv_run in tshi_uv_main */
        return;
    }
    tshi_uv_watch_peers(world);
    next = tshi_uv_min(world->silent_at, world->beat);
    wait = world->forming || world->making || world->conns || leaving || /* next tick in 5 ms */
                   tshi_uv_has_reported(world) || (!ended && world->offered_at)
               ? 5 /* ms until the next tick */
               /* ms until `next`, at most 100 */
               : (int)tshi_uv_min(100, (next - tsh_now()) / TSHI_UV_MS + 1);
    if (wait < 1) wait = 1;
    world->ticked = tsh_now() + wait * TSHI_UV_MS; /* when this thread should wake up */
    (void)uv_timer_start(&world->tick, tshi_uv_on_tick, (uint64_t)wait, 0);
}

/* After a timeout of a new group's connections: appends to error the lowest rank that is not
 * connected, and why. */
static void tshi_uv_name_missing(tshi_uv_group *group, tsh_error *error) {
    const tsh_uv_world *world = group->world;
    for (int r = group->size - 1; r >= 0; r--) /* sets the lowest missing rank last */
        if (r != group->rank && tshi_uv_unlinked(group, r)) error->rank = group->ranks[r];
    if (error->rank < 0) return; /* no rank is missing */
    tsh_text_add(error->message, sizeof error->message, "; absent ranks: %d", error->rank);
    if (world->obstacle[0]) /* says why the last attempt to connect failed */
        tsh_text_add(error->message, sizeof error->message, " (%s)", world->obstacle);
}

/* Callback of wake_control: takes the error report of the caller's thread, and the group that it
 * wants connected. Other reasons to wake this thread, a long wait or a shutdown, are seen by the
 * next tick. */
static void tshi_uv_on_request(uv_async_t *async) {
    tsh_uv_world *world = (tsh_uv_world *)async->data;
    tshi_uv_report e;
    tshi_uv_group *made = NULL;
    uv_mutex_lock(&world->lock);
    e = world->reported;
    world->reported.kind = TSHI_UV_NOTHING;
    if (world->requested) {
        /* the control thread owns the group until it is connected */
        made = world->making = world->requested;
        world->requested = NULL;
        made->missing += made->size - 1 - made->rank; /* one LINKED from each higher rank */
        world->listener = made->listener;             /* the higher ranks dial this listener */
        made->listener = -1;
    }
    uv_mutex_unlock(&world->lock);
    if (e.kind == TSHI_UV_LATE && world->making) tshi_uv_name_missing(world->making, &e.error);
    /* holds the report and sends it to the coordinator */
    if (e.kind != TSHI_UV_NOTHING) tshi_uv_hold(world, &e);
    if (made) tshi_uv_dial_group(world, made); /* dials the lower ranks */
}

/* Main function of the control thread: runs its loop until it is stopped, then closes all. */
static void tshi_uv_main(void *argument) {
    tsh_uv_world *world = (tsh_uv_world *)argument;
    if (world->rank) tshi_uv_add_dial(world, TSHI_UV_JOIN, 0, 0, &world->address[0]);
    (void)uv_run(&world->control, UV_RUN_DEFAULT); /* until tshi_uv_on_turn stops it */
    while (world->conns) tshi_uv_conn_free(world->conns);
    tshi_uv_log_counted(world, INT64_MAX); /* logs the counted messages that are not logged yet */
    for (int r = 0; r < world->size; r++) {
        tshi_uv_peer_end(&world->peer[r], TSHI_UV_LEFT);
        free(world->peer[r].in.data);
        free(world->peer[r].out.data);
    }
    tshi_uv_close_listener(world);
    tshi_uv_share_end(world);
}

/* ========================================================================== */
/* >>uv-group                                      MARK: - uv-group (private) */
/* A group of ranks: its members, two data connections to each (one for       */
/* collectives, one for messages) and its operations. The control thread      */
/* connects a group; after that only the caller's thread uses it.             */
/* Needs: >>uv-shm >>uv-connect.                                              */
/* ========================================================================== */

static void tshi_uv_group_free(tshi_uv_group *group) { /* Closes and frees a group, or NULL. */
    if (!group) return;
    tshi_uv_shm_leave(group);
    /* group->link is NULL if there was no memory for it */
    for (int i = 0; group->link && i < 2 * group->size; i++) {
        tshi_uv_unwatch(&group->link[i].poll);
        tshi_uv_close_fd(&group->link[i].fd);
        tshi_uv_channel_free(&group->link[i].channel);
    }
    for (int i = 0; i < TSHI_UV_OPS; i++) free(group->op[i].scratch);
    tshi_uv_close_fd(&group->listener);
    free(group->link);
    free(group->streams);
    free(group->ranks);
    free(group);
}

/* Returns a group without connections, whose ranks and ports the caller has to fill in; NULL: no
 * memory. */
static tshi_uv_group *tshi_uv_group_new(tsh_uv_world *world, uint64_t id, int rank, int size) {
    size_t n = (size_t)size;
    tshi_uv_group *group = (tshi_uv_group *)calloc(1, sizeof *group);
    if (!group) return NULL;
    group->world = world;
    group->id = id;
    group->rank = rank;
    group->size = size;
    group->listener = -1;            /* no listening socket yet */
    group->missing = 2 * (size - 1); /* two connections to every other member */
    /* `size` connections for collectives, then `size` for messages */
    group->link = (tshi_uv_link *)calloc(2 * n, sizeof *group->link);
    group->streams = (tshi_uv_stream *)calloc(2 * n * TSHI_UV_OPS, sizeof *group->streams);
    /* one array of 4 n entries: ranks, ports, first and last */
    group->ranks = (int *)calloc(4 * n, sizeof *group->ranks);
    for (int i = 0; group->link && i < 2 * size; i++) {
        group->link[i].group = group;
        group->link[i].fd = -1;         /* not connected */
        group->link[i].peer = i % size; /* the peer's rank in the group */
    }
    if (!group->link || !group->streams || !group->ranks) {
        tshi_uv_group_free(group);
        return NULL;
    }
    group->ports = group->ranks + n;
    group->first = group->ports + n;
    group->last = group->first + n;
    /* until tshi_uv_find_hosts knows the hosts, each rank counts as one */
    for (int r = 0; r < size; r++) group->first[r] = group->last[r] = r;
    for (size_t i = 0; i < TSHI_UV_OPS; i++) {
        group->op[i].group = group;
        group->op[i].in = group->streams + 2 * i * n; /* per op: n from peers, n to peers */
        group->op[i].out = group->op[i].in + n;
    }
    return group;
}

static int tshi_uv_next(const tshi_uv_group *group) { /* Returns the next rank on the ring. */
    return group->rank + 1 == group->size ? 0 : group->rank + 1;
}

static int tshi_uv_prev(const tshi_uv_group *group) { /* Returns the previous rank on the ring. */
    return group->rank == 0 ? group->size - 1 : group->rank - 1;
}

/* Returns the number that stands for the host of rank r of the group (peer->host). */
static int tshi_uv_host_of(const tshi_uv_group *group, int r) {
    return group->world->peer[group->ranks[r]].host;
}

/* Returns the last rank of the range of ranks from `from` on that are all on the host of rank
 * `from`. */
static int tshi_uv_range_end(const tshi_uv_group *group, int from) {
    int r = from;
    while (r + 1 < group->size && tshi_uv_host_of(group, r + 1) == tshi_uv_host_of(group, from))
        r++;
    return r;
}

/* Sets group->first and group->last (the range of ranks on each rank's host) once the world has
 * formed. */
static void tshi_uv_find_hosts(tshi_uv_group *group) {
    const int size = group->size;
    int end;
    if (tshi_uv_range_end(group, 0) == size - 1) return; /* one host: keeps first and last */
    for (int begin = 0; begin < size; begin = tshi_uv_range_end(group, begin) + 1)
        for (int r = 0; r < begin; r++) /* has this host an earlier range, too? */
            if (tshi_uv_host_of(group, r) == tshi_uv_host_of(group, begin)) return;
    for (int begin = 0; begin < size; begin = end + 1) {
        end = tshi_uv_range_end(group, begin);
        for (int r = begin; r <= end; r++) {
            group->first[r] = begin;
            group->last[r] = end;
        }
    }
}

/* ---- queues of operations that wait for a connection ---- */

static void tshi_uv_push(tshi_uv_fifo *fifo, const tshi_uv_op *op) { /* Appends op to a queue. */
    fifo->op[(fifo->first + fifo->used) % TSHI_UV_OPS] = (unsigned char)(op - op->group->op);
    fifo->used++;
}

static void tshi_uv_pop(tshi_uv_fifo *fifo) { /* Removes the first operation of a queue. */
    fifo->first = (fifo->first + 1) % TSHI_UV_OPS;
    fifo->used--;
}

/* Returns operation n of a queue, which must have more than n. */
static tshi_uv_op *tshi_uv_nth(tshi_uv_group *group, const tshi_uv_fifo *fifo, unsigned n) {
    /* it holds indices of group->op */
    return &group->op[fifo->op[(fifo->first + n) % TSHI_UV_OPS]];
}

/* Returns the first operation of a queue, which must not be empty. */
static tshi_uv_op *tshi_uv_first(tshi_uv_group *group, const tshi_uv_fifo *fifo) {
    return tshi_uv_nth(group, fifo, 0);
}

/* ========================================================================== */
/* >>uv-algorithm                              MARK: - uv-algorithm (private) */
/* Computes which bytes a collective sends to which peer, and where received  */
/* bytes belong. It does no I/O: >>uv-flow calls tshi_uv_bytes_at.            */
/* Needs: >>uv-heap >>uv-group.                                               */
/* ========================================================================== */

/* The ring algorithm. Every rank sends one stream of bytes to the next rank and receives one from
 * the previous rank. The data is cut into P chunks, one per rank, and every chunk into segments of
 * TSHI_UV_SEGMENT bytes. A stream is a sequence of rows, and row i a sequence of steps, each of
 * which carries segment i of one chunk. In step t, rank r sends a segment of chunk r-1-t if it
 * sums, of chunk r-t if it gathers (indices mod P), and receives one of the chunk before. What
 * arrives in one step is sent in the next, while it is in the cache: in the first P-1 steps of a
 * sum with this rank's own segment added, else unchanged. So chunk k is the sum x[k+1] + x[k+2] +
 * ... + x[k+P], with x[r] from rank r mod P: the documented order (rule 5 of >>comm-api).
 *
 * With several hosts, each of which has a range of ranks, the first rank of a host gathers what
 * began on its own host (the last steps of its row) from the host's last rank, not from the
 * previous rank: so no chunk that a host has crosses a link to it. On a link between H hosts of R
 * ranks an all-gather of n bytes takes (H-1)/H n, an all-reduce (P-1)/P n more. */

/* Contiguous bytes in a buffer. */
typedef struct tshi_uv_span {
    char *at;     /* address of the first byte */
    int64_t size; /* number of bytes */
} tshi_uv_span;

/* Returns the bytes of rank k's chunk of op's data; 0 if the chunk is empty. */
static int64_t tshi_uv_length(const tshi_uv_op *op, int k) {
    const tsh_coll *coll = &op->coll;
    const int size = op->group->size;
    if (coll->kind == TSH_ALLREDUCE) /* chunks of rule 5 (>>comm-api) */
        return (tshb_coll_chunk(coll->count, size, k + 1) - tshb_coll_chunk(coll->count, size, k)) *
               op->width;
    /* chunk k is recv_counts[k] elements of each of `blocks` rows */
    return coll->recv_counts[k] * coll->blocks * op->width;
}

/* Finds byte `offset` of rank k's part of a buffer. The buffer is coll.blocks rows of counts[0] +
 * counts[1] + ... elements; rank k's part is the k-th range of every row, counts[k] elements. */
static tshi_uv_span tshi_uv_in_rows(const tshi_uv_op *op, void *base, const int64_t *counts, int k,
                                    int64_t offset) {
    /* row: size in bytes of rank k's range in each row */
    int64_t width = op->width, row = counts[k] * width;
    /* whole: size in bytes of a row, which has one range per rank */
    int64_t whole = tshb_coll_before(counts, op->group->size) * width;
    /* b: index of the row that holds the byte; within: its offset in rank k's range of that row */
    int64_t b = row ? offset / row : 0, within = row ? offset % row : 0;
    tshi_uv_span span;
    span.at = (char *)base + b * whole + tshb_coll_before(counts, k) * width + within;
    span.size = row - within; /* up to the end of the range in this row */
    return span;
}

/* Finds byte `offset` of chunk k in a buffer that holds the chunks of all ranks. */
static tshi_uv_span tshi_uv_in_whole(const tshi_uv_op *op, void *base, int k, int64_t offset) {
    const tsh_coll *coll = &op->coll;
    int64_t chunk; /* index in the buffer of chunk k's first element */
    tshi_uv_span span;
    if (coll->kind != TSH_ALLREDUCE) return tshi_uv_in_rows(op, base, coll->recv_counts, k, offset);
    chunk = tshb_coll_chunk(coll->count, op->group->size, k);
    span.at = (char *)base + chunk * op->width + offset;
    span.size = tshi_uv_length(op, k) - offset;
    return span;
}

static void *tshi_uv_send_buffer(const tshi_uv_op *op) { /* Returns coll.send as non-const. */
    return (void *)(uintptr_t)op->coll.send; /* removes const; the bytes are only read */
}

static int tshi_uv_sums(const tshi_uv_op *op) { /* Returns 1 if op is a reduction. */
    return op->coll.kind == TSH_ALLREDUCE || op->coll.kind == TSH_REDUCE_SCATTER;
}

/* Returns the chunk that this rank sends in step 0 of a ring. */
static int tshi_uv_first_out(const tshi_uv_op *op) {
    return tshi_uv_sums(op) ? tshi_uv_prev(op->group) : op->group->rank;
}

/* Returns the chunk that this rank receives in step 0 of a ring. */
static int tshi_uv_first_in(const tshi_uv_op *op) {
    return (tshi_uv_first_out(op) + op->group->size - 1) % op->group->size;
}

/* Returns the number of steps that each row of a ring's stream has (row i: a sequence of steps, of
 * which each carries segment i of one chunk). */
static int tshi_uv_steps(const tshi_uv_op *op) {
    return (op->coll.kind == TSH_ALLREDUCE ? 2 : 1) * (op->group->size - 1);
}

/* Returns how many steps of a ring, the first ones of each row, receive bytes that are added to
 * this rank's own; 0: op is no reduction. */
static int tshi_uv_summed(const tshi_uv_op *op) {
    return tshi_uv_sums(op) ? op->group->size - 1 : 0;
}

/* A lane is what one rank sends to another in a ring: steps [from, to) of each row of its stream.
 * first: the chunk of step 0. */
typedef struct tshi_uv_lane {
    int first, from, to;
} tshi_uv_lane;

/* Returns the lane (steps of a ring's rows) that this rank sends to a peer (out = 1), or receives
 * from it. */
static tshi_uv_lane tshi_uv_lane_of(const tshi_uv_op *op, int peer, int out) {
    const tshi_uv_group *group = op->group;
    const int rank = group->rank, receiver = out ? peer : rank, sender = out ? rank : peer;
    const int steps = tshi_uv_steps(op), others = group->last[receiver] - group->first[receiver];
    tshi_uv_lane lane = {out ? tshi_uv_first_out(op) : tshi_uv_first_in(op), 0, steps};
    if (op->coll.kind == TSH_REDUCE_SCATTER || receiver != group->first[receiver]) return lane;
    if (sender != group->last[receiver]) { /* sender: the ring's previous rank */
        lane.to = steps - others;
    } else {
        /* the receiver's last steps of each row are the sender's first ones after its sums */
        lane.from = out ? tshi_uv_summed(op) : steps - others;
        lane.to = lane.from + others;
    }
    return lane;
}

/* Returns 1 if op is an all-gather or all-reduce and this rank's host has several ranks: then the
 * host's last rank sends to its first the chunks that the first does not get from the previous
 * rank. */
static int tshi_uv_closes(const tshi_uv_op *op) {
    const tshi_uv_group *group = op->group;
    return group->last[group->rank] > group->first[group->rank] &&
           op->coll.kind != TSH_REDUCE_SCATTER;
}

/* A position in the stream of bytes that a rank sends, or receives, in the ring algorithm. */
typedef struct tshi_uv_at {
    int64_t row;        /* index of the row of the stream */
    int step, chunk;    /* step within the row; chunk whose segment that step carries */
    int64_t done, left; /* done, left: bytes of the step before this position, and from it on */
    int64_t offset;     /* offset of this position in the chunk, in bytes */
} tshi_uv_at;

/* Returns the chunk of which step `step` of a lane carries a segment. */
static int tshi_uv_chunk_of(const tshi_uv_op *op, const tshi_uv_lane *lane, int step) {
    return (lane->first + 2 * op->group->size - step) % op->group->size;
}

/* Returns the number of bytes of a lane's stream that precede row `row` (row i: a sequence of
 * steps, of which each carries segment i of one chunk). */
static int64_t tshi_uv_before_row(const tshi_uv_op *op, const tshi_uv_lane *lane, int64_t row) {
    int64_t total = 0;
    for (int t = lane->from; t < lane->to; t++)
        total += tshi_uv_min(tshi_uv_length(op, tshi_uv_chunk_of(op, lane, t)),
                             row * TSHI_UV_SEGMENT);
    return total;
}

/* Returns the size in bytes of a lane's whole stream. */
static int64_t tshi_uv_lane_total(const tshi_uv_op *op, const tshi_uv_lane *lane) {
    return tshi_uv_before_row(op, lane, INT64_MAX / TSHI_UV_SEGMENT);
}

/* Returns the size in bytes of segment `row` of chunk k; 0: the chunk has fewer segments. All but
 * a chunk's last segment have TSHI_UV_SEGMENT bytes. */
static int64_t tshi_uv_segment(const tshi_uv_op *op, int k, int64_t row) {
    int64_t left = tshi_uv_length(op, k) - row * TSHI_UV_SEGMENT;
    return left < 0 ? 0 : tshi_uv_min(left, TSHI_UV_SEGMENT);
}

/* Returns the offset in a lane's stream of the point `done` bytes into step `step` of row `row`. */
static int64_t tshi_uv_position(const tshi_uv_op *op, const tshi_uv_lane *lane, int64_t row,
                                int step, int64_t done) {
    int64_t total = tshi_uv_before_row(op, lane, row) + done;
    for (int t = lane->from; t < step; t++)
        total += tshi_uv_segment(op, tshi_uv_chunk_of(op, lane, t), row);
    return total;
}

/* Finds the row, step and chunk of byte `at` of a lane's stream. Rows have the same size, but for
 * the last ones, so a division mostly finds the row. */
static tshi_uv_at tshi_uv_locate(const tshi_uv_op *op, const tshi_uv_lane *lane, int64_t at) {
    tshi_uv_at place;
    int64_t low = at / (TSHI_UV_SEGMENT * (int64_t)(lane->to - lane->from)), high = low + 1;
    while (tshi_uv_before_row(op, lane, high) <= at) high = low + 2 * (high - low);
    while (high - low > 1) { /* the row sought is in [low, high) */
        int64_t middle = low + (high - low) / 2;
        if (tshi_uv_before_row(op, lane, middle) <= at)
            low = middle;
        else
            high = middle;
    }
    at -= tshi_uv_before_row(op, lane, low); /* now the offset in row `low` */
    place.row = low;
    for (place.step = lane->from;; place.step++) { /* goes through the steps of the row */
        int64_t n;
        place.chunk = tshi_uv_chunk_of(op, lane, place.step);
        n = tshi_uv_segment(op, place.chunk, low); /* bytes that this step of the ring carries */
        place.done = at;
        place.left = n - at;
        place.offset = low * TSHI_UV_SEGMENT + at;
        if (at < n) return place;
        at -= n;
    }
}

/* Finds byte `at` of the incoming stream in the window: a circular buffer in scratch for bytes that
 * wait to be summed or, in a reduce-scatter, to be sent on. */
static tshi_uv_span tshi_uv_window(const tshi_uv_op *op, int64_t at) {
    tshi_uv_span span;
    span.at = op->scratch + at % TSHI_UV_WINDOW;
    /* up to the end of scratch, where the window wraps around */
    span.size = TSHI_UV_WINDOW - at % TSHI_UV_WINDOW;
    return span;
}

/* Returns how many bytes of the outgoing lane may be sent, given that `ready` bytes of what `peer`
 * sends may be forwarded. INT64_MAX: the rest of the lane does not depend on `peer`. */
static int64_t tshi_uv_lane_ready(const tshi_uv_op *op, const tshi_uv_lane *out, int peer,
                                  int64_t ready) {
    const tshi_uv_lane lane = tshi_uv_lane_of(op, peer, 0);
    tshi_uv_at in;
    int again; /* the first step of each row of `out` that needs bytes from the peer */
    if (ready >= op->in[peer].total) return INT64_MAX;
    in = tshi_uv_locate(op, &lane, ready);
    again = lane.from + 1 < out->from ? out->from : lane.from + 1;
    if (in.step + 1 < out->from) return tshi_uv_position(op, out, in.row, out->from, 0);
    if (in.step + 1 < out->to) return tshi_uv_position(op, out, in.row, in.step + 1, in.done);
    /* byte `ready` is in a step that is not forwarded: nothing waits for it before the next row */
    return again < out->to ? tshi_uv_position(op, out, in.row + 1, again, 0) : INT64_MAX;
}

/* Returns how many bytes of the ring's stream to a peer may be sent so far: bytes of step t need
 * the bytes received in step t-1; those of step 0 need none. */
static int64_t tshi_uv_ring_ready(const tshi_uv_op *op, int peer, int64_t total) {
    const tshi_uv_group *group = op->group;
    const int last = group->last[group->rank];
    const tshi_uv_lane out = tshi_uv_lane_of(op, peer, 1);
    int64_t ready = tshi_uv_lane_ready(op, &out, tshi_uv_prev(group), op->ready);
    if (group->rank == group->first[last] && tshi_uv_closes(op))
        ready = tshi_uv_min(ready, tshi_uv_lane_ready(op, &out, last, op->in[last].good));
    return tshi_uv_min(ready, total);
}

/* Returns how many bytes of a reduce-scatter's incoming stream have been forwarded, so that their
 * place in the window (op->scratch) is free. */
static int64_t tshi_uv_sent_on(const tshi_uv_op *op) {
    const int prev = tshi_uv_prev(op->group), next = tshi_uv_next(op->group);
    const tshi_uv_stream *s = &op->out[next];
    const tshi_uv_lane in = tshi_uv_lane_of(op, prev, 0), lane = tshi_uv_lane_of(op, next, 1);
    tshi_uv_at out;
    if (s->done == s->total) return op->ready; /* the whole outgoing stream is sent */
    out = tshi_uv_locate(op, &lane, s->done);
    if (out.step == 0) return tshi_uv_min(op->ready, tshi_uv_before_row(op, &in, out.row));
    return tshi_uv_min(op->ready, tshi_uv_position(op, &in, out.row, out.step - 1, out.done));
}

/* Finds byte `at` of the ring's stream to a peer, which must be ready to send. */
static tshi_uv_span tshi_uv_ring_out(const tshi_uv_op *op, int peer, int64_t at) {
    const tshi_uv_lane in = tshi_uv_lane_of(op, tshi_uv_prev(op->group), 0);
    const tshi_uv_lane lane = tshi_uv_lane_of(op, peer, 1);
    tshi_uv_at out = tshi_uv_locate(op, &lane, at);
    char *send = (char *)tshi_uv_send_buffer(op);
    tshi_uv_span span = {send + out.offset, out.left}; /* for an all-gather's step 0 */
    /* later steps of a reduce-scatter send the sums that are in the window */
    if (out.step > 0 && op->coll.kind == TSH_REDUCE_SCATTER)
        span = tshi_uv_window(op, tshi_uv_position(op, &in, out.row, out.step - 1, out.done));
    else if (out.step > 0 || tshi_uv_sums(op)) /* step 0: from send; later: from recv */
        span = tshi_uv_in_whole(op, out.step ? op->coll.recv : send, out.chunk, out.offset);
    span.size = tshi_uv_min(span.size, out.left);
    return span;
}

/* Finds where byte `at` of the ring's stream from a peer is to be stored; size 0: the window
 * (op->scratch) is full. */
static tshi_uv_span tshi_uv_ring_in(const tshi_uv_op *op, int peer, int64_t at) {
    const tshi_uv_lane lane = tshi_uv_lane_of(op, peer, 0);
    tshi_uv_at in = tshi_uv_locate(op, &lane, at);
    int64_t used = op->ready; /* bytes received so far whose place in the window is free again */
    tshi_uv_span span;
    if (in.step >= tshi_uv_summed(op)) { /* bytes that are not to be summed go straight into recv */
        span = tshi_uv_in_whole(op, op->coll.recv, in.chunk, in.offset);
    } else {
        if (op->coll.kind == TSH_REDUCE_SCATTER) used = tshi_uv_sent_on(op);
        span = tshi_uv_window(op, at);
        /* limits the span to the free space of the window */
        span.size = tshi_uv_min(span.size, used + TSHI_UV_WINDOW - at);
    }
    span.size = tshi_uv_min(span.size, in.left);
    return span;
}

/* Adds at most `come` received bytes of one step, from op->ready on, to this rank's own elements;
 * only whole elements are added. in: the position of op->ready in the incoming stream. Returns how
 * many bytes were added. */
static int64_t tshi_uv_fold_step(tshi_uv_op *op, tshi_uv_at in, int64_t come) {
    const tsh_coll *coll = &op->coll;
    /* left: the received partial sums; out: where the new sums are stored; right: this rank's own
     * elements */
    tshi_uv_span left = tshi_uv_window(op, op->ready), out = left;
    tshi_uv_span right = tshi_uv_in_whole(op, tshi_uv_send_buffer(op), in.chunk, in.offset);
    int64_t width = op->width, most = tshi_uv_min(left.size, right.size);
    int64_t n = tshi_uv_min(most, tshi_uv_min(come, in.left)) / width; /* n: number of elements */
    int last = in.step == op->group->size - 2; /* 1: this step completes the chunk */
    if (coll->kind == TSH_ALLREDUCE)
        out = tshi_uv_in_whole(op, coll->recv, in.chunk, in.offset); /* the sum's final place */
    else if (last)
        out.at = (char *)coll->recv + in.offset; /* recv holds this rank's chunk only */
    tshb_coll_fold(out.at, left.at, right.at, n, coll->dtype, coll->redop);
    if (last) tshb_coll_finish(out.at, n, coll->dtype, coll->redop, op->group->size);
    return n * width;
}

/* Sums what has arrived from the previous rank of a ring, and advances op->ready, the bytes that
 * may be sent on. */
static void tshi_uv_ring_fold(tshi_uv_op *op) {
    const tshi_uv_lane lane = tshi_uv_lane_of(op, tshi_uv_prev(op->group), 0);
    /* come: bytes received; n: bytes that one turn of the loop summed, or kept unchanged; 0: not
     * even one whole element is left */
    int64_t come = op->in[tshi_uv_prev(op->group)].good, n = 1;
    while (op->ready < come && n) {
        tshi_uv_at in = tshi_uv_locate(op, &lane, op->ready);
        n = in.step < tshi_uv_summed(op) ? tshi_uv_fold_step(op, in, come - op->ready)
                                         : tshi_uv_min(in.left, come - op->ready);
        op->ready += n;
    }
}

/* ---- TSHI_UV_DIRECT: every rank sends its data to every other rank ---- */

/* Returns 1 if rank `from` sends the sum of chunk k to rank `to` in TSHI_UV_PIECES. Rank k sends it
 * to all ranks of its host and to one rank of each other host, which sends it to the others
 * there. */
static int tshi_uv_carries(const tshi_uv_op *op, int from, int to, int k) {
    const int *first = op->group->first, *last = op->group->last;
    const int at = first[to] == first[from] ? from : to; /* a rank of `to`'s host */
    /* the rank of that host to which rank k sends the sum of chunk k */
    const int twin = first[at] + (k - first[k]) % (last[at] - first[at] + 1);
    if (first[to] != first[from]) return k == from && twin == to;
    return k == from || (first[k] != first[from] && twin == from);
}

/* Returns the bytes of all sums that rank `from` sends to rank `to` by TSHI_UV_PIECES. */
static int64_t tshi_uv_carried(const tshi_uv_op *op, int from, int to) {
    int64_t sum = 0;
    for (int k = 0; k < op->group->size; k++)
        if (tshi_uv_carries(op, from, to, k)) sum += tshi_uv_length(op, k);
    return sum;
}

/* Returns how many bytes rank `from` sends to rank `to` by TSHI_UV_DIRECT or TSHI_UV_PIECES. */
static int64_t tshi_uv_direct_size(const tshi_uv_op *op, int from, int to) {
    const tsh_coll *coll = &op->coll;
    switch (coll->kind) {
    case TSH_ALLREDUCE:
        if (op->algorithm == TSHI_UV_PIECES) /* data of chunk `to`, then sums */
            return tshi_uv_length(op, to) + tshi_uv_carried(op, from, to);
        return coll->count * op->width;                     /* the whole send buffer */
    case TSH_ALLGATHER: return tshi_uv_length(op, from);    /* all that rank `from` has */
    case TSH_REDUCE_SCATTER: return tshi_uv_length(op, to); /* the chunk that rank `to` sums */
    case TSH_ALLTOALL: /* this rank is `from` or `to`, so it knows the count */
        return (from == op->group->rank ? coll->send_counts[to] : coll->recv_counts[from]) *
               coll->blocks * op->width;
    case TSH_SPLIT: return coll->count; /* bytes of a ticket (tshi_uv_ticket) */
    default: return 0;                  /* a barrier: headers without payload */
    }
}

/* Returns the size in bytes of a row of scratch. Row r stores what rank r has sent; with
 * TSHI_UV_PIECES it is a circular buffer, which holds a whole number of elements. */
static int64_t tshi_uv_row_size(const tshi_uv_op *op) {
    const int64_t least = 4096, share = TSHI_UV_WINDOW / op->group->size / 64 * 64;
    if (op->algorithm == TSHI_UV_PIECES) return share < least ? least : share;
    return tshi_uv_direct_size(op, op->group->rank, op->group->rank);
}

/* Returns where the bytes sent by rank `from` are stored: row `from` of scratch or, in a split,
 * ticket `from` in recv. */
static char *tshi_uv_row(const tshi_uv_op *op, int from) {
    char *rows = op->coll.kind == TSH_SPLIT ? (char *)op->coll.recv : op->scratch;
    return rows + tshi_uv_row_size(op) * from;
}

/* Finds byte `offset` of the data that is sent to a peer (out = 1), or received from it (out = 0),
 * by TSHI_UV_DIRECT. */
static tshi_uv_span tshi_uv_direct_at(const tshi_uv_op *op, int peer, int64_t offset, int out) {
    const tsh_coll *coll = &op->coll;
    void *base = out ? tshi_uv_send_buffer(op) : coll->recv;
    int own = op->group->rank;
    tshi_uv_span span;
    if (coll->kind == TSH_ALLTOALL)
        return tshi_uv_in_rows(op, base, out ? coll->send_counts : coll->recv_counts, peer, offset);
    /* `base` has a part for each rank; finds that of the peer */
    if (coll->kind == (out ? TSH_REDUCE_SCATTER : TSH_ALLGATHER))
        return tshi_uv_in_whole(op, base, peer, offset);
    /* otherwise the data sent to a peer, or received from it, is contiguous */
    span.at = (out ? (char *)base : tshi_uv_row(op, peer)) + offset;
    span.size = tshi_uv_direct_size(op, out ? own : peer, out ? peer : own) - offset;
    return span;
}

/* Returns the slot in which rank r shows what it sends in collective `number` on the board. The
 * bytes are behind the struct. */
static tshi_uv_slot *tshi_uv_slot_of(const tshi_uv_group *group, int r, uint64_t number) {
    const int64_t offset = (int64_t)(number % TSHI_UV_SLOTS) * group->slot;
    return (tshi_uv_slot *)(void *)(group->link[r].slots + offset);
}

/* Returns the bytes that rank r shows in op. */
static char *tshi_uv_slot_data(const tshi_uv_op *op, int r) {
    return (char *)(tshi_uv_slot_of(op->group, r, op->boarded) + 1);
}

/* Argument of tshi_uv_message_of, the callback that gives tshb_coll_sum each rank's elements. */
typedef struct tshi_uv_parts {
    const tshi_uv_op *op; /* the reduction that is computed */
    const char *own;      /* this rank's own elements, in its send buffer */
    int64_t at; /* offset in bytes in what each other rank has sent: a row of scratch, a payload in
                 * a ring of shared memory, or the data of a slot */
} tshi_uv_parts;

/* Returns how many bytes of the payload from a peer are summed where they lie, in the rings of
 * shared memory, and not copied to rows of scratch before. */
static int64_t tshi_uv_summed_in_place(const tshi_uv_op *op) {
    const tshi_uv_group *group = op->group;
    return op->algorithm == TSHI_UV_PIECES && group->whole ? tshi_uv_length(op, group->rank) : 0;
}

/* Finds byte `offset` of the payload of op that has arrived from rank r in shared memory: in the
 * ring or, by reference, in that rank's heap. The casts remove const; the bytes are only read. */
static tshi_uv_span tshi_uv_arrived(const tshi_uv_op *op, int r, int64_t offset) {
    const tshi_uv_link *link = &op->group->link[r];
    const tshi_uv_pipe *pipe = &link->pipe;
    const int64_t at = (pipe->payload + offset) & (pipe->size - 1);
    tshi_uv_span span = {(char *)(uintptr_t)pipe->in + at, pipe->size - at};
    if (!link->heard.refers) return span;
    span.at = (char *)(uintptr_t)pipe->summed.at + (offset - pipe->summed.begin);
    span.size = pipe->summed.end - offset;
    return span;
}

/* Returns 0 if a rank whose bytes were just read in its heap has withdrawn them. */
static int tshi_uv_all_unchanged(const tshi_uv_op *op) {
    const tshi_uv_group *group = op->group;
    int intact = 1;
    for (int r = 0; r < group->size && intact; r++)
        if (r != group->rank && group->link[r].heard.refers)
            intact = tshi_uv_unchanged(group->world, group->ranks[r]);
    return intact;
}

static const void *tshi_uv_message_of(const void *user, int r) { /* Returns rank r's elements. */
    const tshi_uv_parts *p = (const tshi_uv_parts *)user;
    if (r == p->op->group->rank) return p->own;
    if (p->op->algorithm == TSHI_UV_BOARD) return tshi_uv_slot_data(p->op, r) + p->at;
    if (tshi_uv_summed_in_place(p->op)) return tshi_uv_arrived(p->op, r, p->at).at;
    return tshi_uv_row(p->op, r) + p->at;
}

/* Sums up to `most` bytes of chunk k over all ranks, from byte `at` of the chunk on, and stores the
 * sums at byte `to` of recv. The other ranks' data begins at byte `from` of their rows of scratch.
 * Sums are computed in a tile and then copied, since recv may be the same buffer as send. Returns
 * how many bytes were summed, whole elements only. */
static int64_t tshi_uv_sum_tile(const tshi_uv_op *op, int k, int64_t at, int64_t most, int64_t from,
                                int64_t to) {
    double tile[512]; /* buffer for sums, as double, so that it is aligned for every dtype */
    /* this rank's own data: in an all-reduce at the same offset of send as the sums in recv */
    tshi_uv_span own = {(char *)tshi_uv_send_buffer(op) + to, most};
    tshi_uv_parts parts = {op, NULL, from};
    int64_t width = op->width, n;
    if (op->coll.kind != TSH_ALLREDUCE)
        own = tshi_uv_in_rows(op, tshi_uv_send_buffer(op), op->coll.recv_counts, k, at);
    parts.own = own.at;
    /* a slot has the data of a whole send buffer */
    if (op->algorithm == TSHI_UV_BOARD) parts.at = own.at - (const char *)op->coll.send;
    n = tshi_uv_min(tshi_uv_min(own.size, most), (int64_t)sizeof tile) / width;
    if (n <= 0) return 0;
    tshb_coll_sum(tile, n, &op->coll, op->group->size, k, tshi_uv_message_of, &parts);
    memcpy((char *)op->coll.recv + to, tile, (size_t)(n * width));
    return n * width;
}

/* Returns the offset in recv, in bytes, at which the sum of chunk k is stored. */
static int64_t tshi_uv_sum_place(const tshi_uv_op *op, int k) {
    if (op->coll.kind != TSH_ALLREDUCE) return 0; /* recv is that chunk only */
    return tshb_coll_chunk(op->coll.count, op->group->size, k) * op->width;
}

/* Sums the data of all ranks (TSHI_UV_DIRECT, _BOARD). Called once all of it has arrived. */
static void tshi_uv_direct_sums(const tshi_uv_op *op) {
    const tshi_uv_group *group = op->group;
    /* 1: sums every chunk; 0 (reduce-scatter): only this rank's */
    int all = op->coll.kind == TSH_ALLREDUCE;
    int64_t base = 0; /* offset in recv at which the sum of chunk k is stored */
    for (int k = all ? 0 : group->rank; k < (all ? group->size : group->rank + 1); k++) {
        int64_t size = all ? tshi_uv_sum_place(op, k + 1) - base : tshi_uv_length(op, k);
        for (int64_t at = 0; at < size;)
            at += tshi_uv_sum_tile(op, k, at, size - at, base + at, base + at);
        base += size;
    }
}

/* ---- TSHI_UV_PIECES: rank k sums chunk k of all ranks ---- */

/* Sums of 16-bit floats are to be rounded only once, at their end, so partial sums cannot be sent
 * on in 16 bits, as in a ring. Instead every rank sends its chunk k to rank k, which sums them and,
 * in an all-reduce, sends the sum to all ranks: as many bytes as in a ring. On each other host only
 * one rank gets the sum from rank k, and sends it to the others there. The stream to a peer is this
 * rank's data of the peer's chunk, then the sum of this rank's chunk, then the sums that it
 * forwards. In place (recv is send) that works too: the sum of a chunk, which overwrites this
 * rank's data, arrives only after that data was sent. */

/* A position in the sum of a chunk. */
typedef struct tshi_uv_sum {
    int chunk;
    int64_t at, left; /* at, left: bytes of the sum before the position, and from it on */
} tshi_uv_sum;

/* Finds byte `offset` of all sums that rank `from` sends to rank `to`: the sum of its own chunk
 * comes first. */
static tshi_uv_sum tshi_uv_sum_at(const tshi_uv_op *op, int from, int to, int64_t offset) {
    const int size = op->group->size;
    tshi_uv_sum sum = {from, offset, tshi_uv_length(op, from) - offset};
    if (tshi_uv_carries(op, from, to, from) && sum.left > 0) return sum;
    if (tshi_uv_carries(op, from, to, from)) offset -= tshi_uv_length(op, from);
    for (sum.chunk = 0; sum.chunk < size; sum.chunk++) {
        const int64_t length = tshi_uv_length(op, sum.chunk);
        if (sum.chunk == from || !tshi_uv_carries(op, from, to, sum.chunk)) continue;
        sum.at = offset;
        sum.left = length - offset;
        if (sum.left > 0) break;
        offset -= length;
    }
    return sum;
}

/* Returns how many of the `total` bytes of the stream to a peer may be sent so far, in
 * TSHI_UV_PIECES. */
static int64_t tshi_uv_pieces_ready(const tshi_uv_op *op, int peer, int64_t total) {
    const int own = op->group->rank;
    int64_t ready = tshi_uv_length(op, peer);
    while (ready < total) {
        const tshi_uv_sum sum = tshi_uv_sum_at(op, own, peer, ready - tshi_uv_length(op, peer));
        /* bytes of this sum that this rank has: computed here, or received from rank sum.chunk,
         * which first sends its data of this rank's chunk */
        const int64_t there = sum.chunk == own ? op->ready
                                               : op->in[sum.chunk].good - tshi_uv_length(op, own);
        if (there < sum.at + sum.left) return there > sum.at ? ready + there - sum.at : ready;
        ready += sum.left;
    }
    return total;
}

/* Sums those elements of this rank's chunk that have arrived from all ranks, and advances
 * op->ready, the bytes of the chunk that are summed. */
static void tshi_uv_pieces_fold(tshi_uv_op *op) {
    const int rank = op->group->rank, in_place = tshi_uv_summed_in_place(op) > 0;
    int64_t row = tshi_uv_row_size(op), base = tshi_uv_sum_place(op, rank);
    /* come: bytes of this rank's chunk that have arrived from every rank; n: bytes that one turn of
     * the loop below sums */
    int64_t come = tshi_uv_length(op, rank), n = 1;
    for (int r = 0; r < op->group->size; r++)
        if (r != rank) come = tshi_uv_min(come, op->in[r].good);
    /* the caller sends the sums on before it calls again */
    if (in_place) come = tshi_uv_min(come, op->ready + TSHI_UV_SHM_STEP);
    for (; op->ready < come && n; op->ready += n) { /* n is 0 if no whole element has arrived */
        int64_t at = op->ready % row, most = tshi_uv_min(come - op->ready, row - at);
        if (in_place) {
            at = op->ready;
            most = come - at;
            for (int r = 0; r < op->group->size; r++)
                if (r != rank) most = tshi_uv_min(most, tshi_uv_arrived(op, r, at).size);
        }
        n = tshi_uv_sum_tile(op, rank, op->ready, most, at, base + op->ready);
        if (in_place && !tshi_uv_all_unchanged(op)) return; /* the world has failed */
    }
}

/* Finds byte `offset` of the stream to a peer (out = 1), or from it (out = 0), by TSHI_UV_PIECES.
 * Size 0: the peer's row of scratch is full. */
static tshi_uv_span tshi_uv_pieces_at(const tshi_uv_op *op, int peer, int64_t offset, int out) {
    const int own = op->group->rank;
    int64_t part = tshi_uv_length(op, out ? peer : own), row = tshi_uv_row_size(op);
    tshi_uv_span span;
    if (offset >= part) {
        const tshi_uv_sum sum = tshi_uv_sum_at(op, out ? own : peer, out ? peer : own,
                                               offset - part);
        return tshi_uv_in_whole(op, op->coll.recv, sum.chunk, sum.at);
    }
    if (out) return tshi_uv_in_whole(op, tshi_uv_send_buffer(op), peer, offset);
    span.at = tshi_uv_row(op, peer) + offset % row;
    span.size = tshi_uv_min(row - offset % row, part - offset);
    /* limits the span to the free space of the row */
    span.size = tshi_uv_min(span.size, op->ready + row - offset);
    return span;
}

/* Copies the part of send that this rank would send to itself to its place in recv: n bytes from
 * byte `offset` of that part on. */
static void tshi_uv_own_piece(const tshi_uv_op *op, int64_t offset, int64_t n) {
    const int rank = op->group->rank;
    for (int64_t end = offset + n; offset < end;) {
        tshi_uv_span from = tshi_uv_direct_at(op, rank, offset, 1);
        tshi_uv_span to = tshi_uv_direct_at(op, rank, offset, 0);
        to.size = tshi_uv_min(to.size, end - offset);
        /* if send and recv are one buffer, the bytes are there already */
        if (to.at != from.at) memmove(to.at, from.at, (size_t)to.size);
        offset += to.size;
    }
}

/* ---- where the next bytes of a frame are, whatever the algorithm ---- */

/* Finds where byte `offset` of a frame's payload of `total` bytes is taken from, if the frame goes
 * to `peer` (out = 1), or stored, if it comes from `peer` (out = 0), and how many bytes can be
 * moved there at once. Size 0: no byte is ready to be sent, or there is no space for received ones
 * yet. */
static tshi_uv_span tshi_uv_bytes_at(const tshi_uv_op *op, int peer, int64_t offset, int64_t total,
                                     int out) {
    tshi_uv_span span = {NULL, 0};
    int64_t ready = total; /* bytes of payload that may be sent or stored so far */
    if (out && op->algorithm == TSHI_UV_RING) ready = tshi_uv_ring_ready(op, peer, total);
    if (out && op->algorithm == TSHI_UV_CHAIN && op->group->rank != op->coll.root)
        ready = op->in[tshi_uv_prev(op->group)].good; /* a chain sends on what has arrived */
    if (out && op->algorithm == TSHI_UV_PIECES) ready = tshi_uv_pieces_ready(op, peer, total);
    if (offset >= ready) return span;
    if (op->algorithm == TSHI_UV_PIECES) {
        span = tshi_uv_pieces_at(op, peer, offset, out);
    } else if (op->algorithm == TSHI_UV_RING) {
        span = out ? tshi_uv_ring_out(op, peer, offset) : tshi_uv_ring_in(op, peer, offset);
    } else if (op->algorithm == TSHI_UV_DIRECT) {
        span = tshi_uv_direct_at(op, peer, offset, out);
    } else {
        /* TSHI_UV_CHAIN, _STAR or _MESSAGE: the payload is one contiguous buffer. sends: 1: the
         * buffer is coll.send (of a message to send); 0: coll.recv (broadcasts are sent from it) */
        int sends = out && op->algorithm == TSHI_UV_MESSAGE;
        span.at = (char *)(sends ? tshi_uv_send_buffer(op) : op->coll.recv) + offset;
        span.size = total - offset;
    }
    span.size = tshi_uv_min(span.size, ready - offset);
    return span;
}

enum { TSHI_UV_BLOCK = 256 << 10 }; /* bytes of payload that one checksum covers, at most */

/* Returns where a block of payload ends that begins at byte `offset` of a frame to (out = 1) or
 * from (out = 0) a peer; both ends compute the same. A receiver uses only whole blocks. So a block
 * must end before bytes that the sender can compute only from what the receiver makes of the block:
 * it ends with the step of a ring, and with the peer's chunk in TSHI_UV_PIECES. In that chunk a
 * block is half a row of scratch at most, so that the row has space for the next block. */
static int64_t tshi_uv_block(const tshi_uv_op *op, int peer, int64_t offset, int64_t total,
                             int out) {
    int64_t most = TSHI_UV_BLOCK, left = total - offset;
    if (op->algorithm == TSHI_UV_RING) {
        const tshi_uv_lane lane = tshi_uv_lane_of(op, peer, out);
        left = tshi_uv_locate(op, &lane, offset).left;
    } else if (op->algorithm == TSHI_UV_PIECES) {
        int64_t part = tshi_uv_length(op, out ? peer : op->group->rank);
        if (offset < part) left = part - offset;
        if (offset < part) most = tshi_uv_min(most, tshi_uv_row_size(op) / 2);
    }
    return offset + tshi_uv_min(left, most);
}

/* ========================================================================== */
/* >>uv-sealed                                    MARK: - uv-sealed (private) */
/* Sends and receives the frames of an encrypted data connection: a record    */
/* with the header, then records with pieces of the payload. A piece is       */
/* encrypted as a whole, so it is sent once all of it is ready, and stored    */
/* once there is space for all of it; the peer decrypts a piece while the     */
/* next one is encrypted. Nothing is used before its tag is checked.          */
/* Needs: >>uv-algorithm.                                                     */
/* ========================================================================== */

enum { TSHI_UV_PIECE = 64 << 10 }; /* bytes of payload in a record, at most */

/* Negative results of the functions below, which else return a number of bytes. */
enum { TSHI_UV_IO_FAILED = -1, TSHI_UV_IO_CLOSED = -2, TSHI_UV_BAD_TAG = -3, TSHI_UV_NO_ROOM = -4 };

/* Sets s->block to the end of the next piece of payload (what one record encrypts); returns its
 * size, 0 at the end of the frame. Both ends compute the same. */
static size_t tshi_uv_next_piece(const tshi_uv_op *op, int peer, tshi_uv_stream *s, int out) {
    if (s->done == s->total) return 0;
    s->block = tshi_uv_min(tshi_uv_block(op, peer, s->done, s->total, out),
                           s->done + TSHI_UV_PIECE);
    return (size_t)(s->block - s->done);
}

/* Returns 1 if the whole next piece of payload can be sent (out = 1), or stored, now. *whole:
 * address of its bytes, or of their destination; NULL: they are in several places. */
static int tshi_uv_piece_at(const tshi_uv_op *op, int peer, const tshi_uv_stream *s, int out,
                            char **whole) {
    int64_t at = s->done;
    *whole = NULL;
    while (at < s->block) {
        tshi_uv_span span = tshi_uv_bytes_at(op, peer, at, s->total, out);
        if (span.size <= 0) return 0;
        if (at == s->done && span.size >= s->block - at) *whole = span.at;
        at += span.size;
    }
    return 1;
}

/* Copies the next piece of payload from where op keeps it to `bytes` (out = 1), or from `bytes` to
 * where it belongs (out = 0). */
static void tshi_uv_copy_piece(const tshi_uv_op *op, int peer, const tshi_uv_stream *s, int out,
                               char *bytes) {
    for (int64_t at = s->done, now; at < s->block; at += now, bytes += now) {
        tshi_uv_span span = tshi_uv_bytes_at(op, peer, at, s->total, out);
        now = tshi_uv_min(span.size, s->block - at);
        memcpy(out ? bytes : span.at, out ? span.at : bytes, (size_t)now);
    }
}

/* Encrypts `left` bytes of a header (0: it is sent already), and the next piece of op's payload if
 * that is ready. op NULL: there is no payload. Returns 0 if memory is lacking. */
static int tshi_uv_seal_next(tshi_uv_link *link, const void *head, size_t left,
                             const tshi_uv_op *op, tshi_uv_stream *s) {
    tshi_uv_channel *channel = link->channel;
    tshi_uv_buffer *to = &channel->outgoing;
    size_t n = op ? tshi_uv_next_piece(op, link->peer, s, 1) : 0;
    char *whole = NULL, *at;
    if (n && !tshi_uv_piece_at(op, link->peer, s, 1, &whole)) n = 0;
    channel->sealed = left + n;
    if (!channel->sealed) return 1;
    if (!tshi_uv_reserve(to, left + n + 2 * TSHI_UV_TAG)) return 0;
    if (left) {
        tshi_uv_seal(&channel->out, head, left, to->data);
        to->used = left + TSHI_UV_TAG;
    }
    if (!n) return 1;
    at = to->data + to->used;
    if (!whole) tshi_uv_copy_piece(op, link->peer, s, 1, at);
    tshi_uv_seal(&channel->out, whole ? whole : at, n, at);
    to->used += n + TSHI_UV_TAG;
    return 1;
}

/* Sends (out = 1) or receives up to n bytes in one system call, and counts them. Returns how many;
 * 0: none for now; or TSHI_UV_IO_FAILED (errno), TSHI_UV_IO_CLOSED. */
static ssize_t tshi_uv_move_bytes(tshi_uv_link *link, char *bytes, size_t n, int out) {
    uint64_t *count = out ? &link->wrote : &link->got;
    struct msghdr message;
    struct iovec iov;
    ssize_t moved;
    memset(&message, 0, sizeof message);
    iov.iov_base = bytes;
    iov.iov_len = n;
    message.msg_iov = &iov;
    message.msg_iovlen = 1;
    moved = out ? sendmsg(link->fd, &message, TSHI_UV_NOSIGNAL) : recvmsg(link->fd, &message, 0);
    if (moved < 0 && !tshi_uv_later()) return TSHI_UV_IO_FAILED;
    if (moved == 0 && !out) return TSHI_UV_IO_CLOSED;
    if (moved < 0) moved = 0;
    if ((size_t)moved < n) link->want |= out ? UV_WRITABLE : UV_READABLE;
    TSHI_UV_PUT(count, *count + (uint64_t)moved);
    return moved;
}

/* Sends the next records: one with `left` bytes of a header, one with a piece of op's payload.
 * Returns the bytes of header and payload in them, once they are sent completely, else 0; or a
 * negative result (TSHI_UV_IO_FAILED, ...). */
static ssize_t tshi_uv_send_sealed(tshi_uv_link *link, const void *head, size_t left,
                                   const tshi_uv_op *op, tshi_uv_stream *s) {
    tshi_uv_channel *channel = link->channel;
    tshi_uv_buffer *to = &channel->outgoing;
    ssize_t n;
    if (!to->used && !tshi_uv_seal_next(link, head, left, op, s)) return TSHI_UV_NO_ROOM;
    if (!to->used) return 0; /* the next piece is not ready */
    n = tshi_uv_move_bytes(link, to->data + channel->sent, to->used - channel->sent, 1);
    if (n < 0) return n;
    channel->sent += (size_t)n;
    if (channel->sent < to->used) return 0;
    to->used = channel->sent = 0;
    return (ssize_t)channel->sealed;
}

/* Decrypts the piece of op's payload that has arrived, n bytes at `at`, to where it belongs.
 * Returns n; 0: there is no space for it yet; or TSHI_UV_BAD_TAG. */
static ssize_t tshi_uv_unseal_piece(tshi_uv_link *link, const tshi_uv_op *op, tshi_uv_stream *s,
                                    char *at, size_t n) {
    char *whole;
    if (!tshi_uv_piece_at(op, link->peer, s, 0, &whole)) return 0;
    if (!tshi_uv_unseal(&link->channel->in, at, n, whole ? whole : at)) return TSHI_UV_BAD_TAG;
    if (!whole) tshi_uv_copy_piece(op, link->peer, s, 0, at);
    return (ssize_t)n;
}

/* Receives the record with a header, `left` bytes (0: it is received already), and one with a piece
 * of op's payload (op NULL: none is expected). Decrypts one of them, the header to `head`. Returns
 * the bytes of header or payload in it; 0: it has not arrived completely; or a negative result. */
static ssize_t tshi_uv_receive_sealed(tshi_uv_link *link, void *head, size_t left,
                                      const tshi_uv_op *op, tshi_uv_stream *s) {
    tshi_uv_channel *channel = link->channel;
    tshi_uv_buffer *from = &channel->incoming;
    size_t piece = op ? tshi_uv_next_piece(op, link->peer, s, 0) : 0;
    size_t first = left ? left : piece; /* bytes in the record that is to be decrypted */
    size_t end = channel->opened + (left ? left + TSHI_UV_TAG : 0) +
                 (piece ? piece + TSHI_UV_TAG : 0); /* bytes that `from` is to hold */
    ssize_t n;
    char *at;
    if (!first) return 0;
    if (from->used < end) {
        if (!tshi_uv_reserve(from, end - from->used)) return TSHI_UV_NO_ROOM;
        n = tshi_uv_move_bytes(link, from->data + from->used, end - from->used, 0);
        if (n < 0) return n;
        from->used += (size_t)n;
    }
    if (from->used < channel->opened + first + TSHI_UV_TAG) return 0;
    at = from->data + channel->opened;
    if (!left)
        n = tshi_uv_unseal_piece(link, op, s, at, piece);
    else
        n = tshi_uv_unseal(&channel->in, at, left, head) ? (ssize_t)left : (ssize_t)TSHI_UV_BAD_TAG;
    if (n <= 0) return n;
    channel->opened += first + TSHI_UV_TAG;
    if (channel->opened == from->used) from->used = channel->opened = 0;
    return n;
}

/* ========================================================================== */
/* >>uv-flow                                        MARK: - uv-flow (private) */
/* Moves bytes on the data connections, in frames: a header and a payload.    */
/* Each connection has a queue of operations per direction (in, out). A       */
/* connection for messages also has a queue of clears. A clear is a frame     */
/* without a payload, by which the receiver of a message tells the sender     */
/* that it may send it.                                                       */
/* Needs: >>uv-sealed.                                                        */
/* ========================================================================== */

/* Returns 1 if the connection is for SEND and RECV, 0 if it is for collectives. */
static int tshi_uv_for_messages(const tshi_uv_link *link) {
    return link >= link->group->link + link->group->size;
}

/* Describes op in `text`: "all-reduce of 7 f32 (sum), collective 3 of tp". If op is NULL, writes
 * "the connections of tp". */
static void tshi_uv_op_text(const tshi_uv_group *group, const tshi_uv_op *op, char *text,
                            size_t room) {
    char name[TSHI_UV_NAME];
    text[0] = 0;
    if (op)
        tshb_coll_where(&op->coll, group->size, op->head.seq, group->id, text, room);
    else
        tsh_text_add(text, room, "the connections of %s",
                     tshb_group_text(group->id, name, sizeof name));
}

/* Returns a queue of the connection that is not empty: an error names its first operation. */
static tshi_uv_fifo *tshi_uv_in_use(tshi_uv_link *link) {
    return link->in.used ? &link->in : link->out.used ? &link->out : &link->clears;
}

/* Reports that a data connection is lost, and which call (the first in fifo) needed it. how:
 * "closed its connection", for example. */
static void tshi_uv_broke(tshi_uv_link *link, const tshi_uv_fifo *fifo, const char *how) {
    tshi_uv_group *group = link->group;
    tsh_uv_world *world = group->world;
    int peer = group->ranks[link->peer]; /* world rank of the peer */
    char text[200];
    tshi_uv_op_text(group, tshi_uv_first(group, fifo), text, sizeof text);
    tshi_uv_report_error(world, TSHI_UV_GONE, 0, 0, TSH_ERR_LOST, peer,
                         "rank %d at %s %s while rank %d waits for it in %s", peer,
                         world->peer[peer].name, how, world->rank, text);
}

/* Reports that a message and the receive for it differ in count, dtype or tag. from, to: sender
 * and receiver, as ranks of the group. */
static void tshi_uv_unfit(tshi_uv_link *link, const tshi_uv_head *sent, const tshi_uv_head *wanted,
                          int from, int to) {
    tshi_uv_group *group = link->group;
    tsh_coll a = tsh_coll_make(TSH_SEND, (tsh_dtype)sent->dtype);
    tsh_coll b = tsh_coll_make(TSH_RECV, (tsh_dtype)wanted->dtype);
    tsh_error error;
    a.count = sent->count;
    a.send_to = to;
    a.tag = sent->tag;
    b.count = wanted->count;
    b.recv_from = from;
    b.tag = wanted->tag;
    tshb_message_mismatch(&a, &b, group->ranks[from], group->ranks[to], sent->seq, group->id,
                          &error);
    tshi_uv_report_error(group->world, TSHI_UV_MISMATCH, 0, 0, error.code, error.rank, "%s",
                         error.message);
}

/* Returns 1 if the header of a message and that of its receive or clear agree in count, dtype, tag
 * and number. */
static int tshi_uv_fits(const tshi_uv_head *sent, const tshi_uv_head *wanted) {
    return sent->count == wanted->count && sent->dtype == wanted->dtype &&
           sent->tag == wanted->tag && sent->seq == wanted->seq;
}

/* Returns the header of a message (receives = 0), or of the clear for it (receives = 1). */
static tshi_uv_head tshi_uv_message_head(const tshi_uv_op *op, int receives) {
    /* the call itself or, of a SENDRECV, its RECV (receives = 1) or its SEND (receives = 0) */
    const tsh_coll half = tshb_coll_half(&op->coll, receives);
    tshi_uv_head head;
    memset(&head, 0, sizeof head);
    head.group = op->group->id;
    head.kind = (uint8_t)half.kind;
    head.dtype = (uint8_t)half.dtype;
    head.tag = half.tag;
    head.seq = op->number[receives]; /* messages are numbered per peer and direction */
    head.count = half.count;
    if (!receives) head.bytes = (uint64_t)(half.count * op->width);
    return head;
}

/* Removes op's finished frame from its queue. After op's last frame, TSHI_UV_DIRECT sums what has
 * arrived. */
static void tshi_uv_frame_done(tshi_uv_op *op, tshi_uv_fifo *fifo) {
    tshi_uv_pop(fifo);
    if (--op->pending == 0 && op->algorithm == TSHI_UV_DIRECT && tshi_uv_sums(op))
        tshi_uv_direct_sums(op);
}

/* Reports that a checksum, or tag, of received bytes is wrong. what: "the header" or "the
 * payload". */
static void tshi_uv_damaged(tshi_uv_link *link, const char *what) {
    const tshi_uv_group *group = link->group;
    const tshi_uv_fifo *fifo = tshi_uv_in_use(link);
    int a = group->world->rank, b = group->ranks[link->peer]; /* world ranks of both ends */
    tshi_uv_address ends[2];
    char texts[2][80], text[200] = " of "; /* texts: both ends as host:port; text: the call */
    for (int i = 0; i < 2; i++) {
        (void)tshi_uv_end_of(link->fd, i, &ends[i]);
        tshi_uv_address_text(&ends[i], texts[i], sizeof texts[i]);
    }
    tshi_uv_op_text(group, tshi_uv_first(link->group, fifo), text + 4, sizeof text - 4);
    tshi_uv_report_error(group->world, TSHI_UV_DAMAGED, 0, 0, TSH_ERR_LOST, tshb_blamed(a, b),
                         TSHI_UV_DAMAGED_TEXT, "data", a, texts[0], b, texts[1],
                         TSHI_UV_CHECK_OF(link->channel), what, text);
}

/* Reports that the peer has called another collective than op, or the same one with another number:
 * its number is `seq`. */
static void tshi_uv_differ(const tshi_uv_link *link, const tshi_uv_op *op, uint64_t seq) {
    const tshi_uv_group *group = link->group;
    const int peer = group->ranks[link->peer], own = group->world->rank;
    char name[TSHI_UV_NAME];
    if (op->head.seq < seq) seq = op->head.seq; /* the earlier one */
    tshi_uv_report_error(
        group->world, TSHI_UV_MISMATCH, group->id, seq, TSH_ERR_MISMATCH, tshb_blamed(peer, own),
        "rank %d and rank %d called different collectives (collective %llu of %s)", peer, own,
        (unsigned long long)seq, tshb_group_text(group->id, name, sizeof name));
}

/* Checks the header of a frame that is being received. Returns 0 after reporting an error, else 1.
 * If the peer's collective is not this rank's, the coordinator asks all ranks what they called. */
static int tshi_uv_check_head(tshi_uv_link *link) {
    tshi_uv_group *group = link->group;
    const tshi_uv_head *head = &link->heard;
    const tshi_uv_op *op = link->in.used ? tshi_uv_first(group, &link->in) : NULL;
    /* what came through shared memory has no checksum */
    if (link->checks && !link->pipe.out &&
        head->check != tshi_uv_head_check(group->world, head)) {
        tshi_uv_damaged(link, "the header");
        return 0;
    }
    if (!tshi_uv_for_messages(link)) {
        if (head->seq == op->head.seq && head->digest == op->head.digest &&
            head->group == group->id && head->bytes == (uint64_t)op->in[link->peer].total)
            return 1; /* both called the same collective */
        tshi_uv_differ(link, op, head->seq);
        return 0;
    }
    /* a header of kind RECV is a clear: the peer is ready to receive a message */
    if (head->kind == TSH_RECV && link->cleared - link->sent < TSHI_UV_OPS) {
        link->clear[link->cleared++ % TSHI_UV_OPS] = *head; /* lets this rank send the message */
        link->heard_done = 0;                               /* expect the next header */
        return 1;
    }
    if (op && head->kind == TSH_SEND && head->bytes == (uint64_t)op->in[link->peer].total) {
        tshi_uv_head wanted = tshi_uv_message_head(op, 1);
        if (tshi_uv_fits(head, &wanted)) return 1; /* it is op's message */
    }
    tshi_uv_broke(link, tshi_uv_in_use(link), "sent what nobody asked for");
    return 0;
}

/* What one sendmsg or recvmsg moves: a header, spans of payload, a checksum. */
typedef struct tshi_uv_batch {
    struct iovec iov[TSHI_UV_IO_SPANS + 2];
    int used;               /* number of valid entries of iov */
    int head;               /* number of entries of iov that hold the header: 0 or 1 */
    int64_t payload, asked; /* payload: its bytes in iov; asked: all bytes in iov */
} tshi_uv_batch;

static void tshi_uv_batch_add(tshi_uv_batch *batch, void *at, size_t n) {
    batch->iov[batch->used].iov_base = at;
    batch->iov[batch->used].iov_len = n;
    batch->used += n != 0;
    batch->asked += (int64_t)n;
}

/* Adds to batch the next payload of op's frame, up to the end of the current block (the bytes that
 * one checksum covers), and the block's checksum. Outgoing bytes enter the checksum here: they do
 * not change any more. */
static void tshi_uv_batch_fill(tshi_uv_batch *batch, const tshi_uv_link *link, const tshi_uv_op *op,
                               tshi_uv_stream *s, int out) {
    const tsh_uv_world *world = link->group->world;
    int64_t at = s->done, most, now;
    if (s->done == s->good) /* a new block begins */
        s->block = link->checks && s->done < s->total
                       ? tshi_uv_block(op, link->peer, s->done, s->total, out)
                       : s->total;
    most = tshi_uv_min(TSHI_UV_IO_BYTES, s->block - s->done);
    while (batch->used < TSHI_UV_IO_SPANS && batch->payload < most) {
        tshi_uv_span span = tshi_uv_bytes_at(op, link->peer, at, s->total, out);
        if (span.size <= 0) break; /* no bytes are ready to send, or no space for received ones */
        span.size = tshi_uv_min(span.size, most - batch->payload);
        tshi_uv_batch_add(batch, span.at, (size_t)span.size);
        at += span.size;
        batch->payload += span.size;
        now = at - s->summed; /* bytes of the span that the checksum does not cover yet */
        if (!link->checks || !out || now <= 0) continue;
        s->check = tshi_uv_crc(world, s->check, span.at + span.size - now, (size_t)now);
        s->summed = at;
    }
    if (link->checks && at == s->block && s->good < s->total)
        tshi_uv_batch_add(batch, (char *)(out ? &s->check : &s->received) + s->tail,
                          sizeof s->check - s->tail);
}

/* Updates the payload's checksum for the n bytes just received, leaving out those of the header. */
static void tshi_uv_batch_sum(const tshi_uv_batch *batch, const tsh_uv_world *world,
                              tshi_uv_stream *s, size_t n) {
    size_t left = (size_t)batch->payload;
    for (int i = 0; n && left && i < batch->used; i++) {
        size_t now = batch->iov[i].iov_len < n ? batch->iov[i].iov_len : n;
        n -= now;
        if (i < batch->head) continue;
        now = now < left ? now : left;
        s->check = tshi_uv_crc(world, s->check, batch->iov[i].iov_base, now);
        left -= now;
    }
}

/* Same as tshi_uv_transfer, for an encrypted connection. */
static size_t tshi_uv_transfer_sealed(tshi_uv_link *link, const tshi_uv_fifo *fifo, void *head,
                                      size_t left, const tshi_uv_op *op, tshi_uv_stream *s,
                                      int out) {
    tsh_uv_world *world = link->group->world;
    ssize_t n = out ? tshi_uv_send_sealed(link, head, left, op, s)
                    : tshi_uv_receive_sealed(link, head, left, op, s);
    if (n == TSHI_UV_IO_FAILED) tshi_uv_broke(link, fifo, "lost its connection");
    if (n == TSHI_UV_IO_CLOSED) tshi_uv_broke(link, fifo, "closed its connection");
    if (n == TSHI_UV_BAD_TAG) tshi_uv_damaged(link, left ? "the header" : "the payload");
    if (n == TSHI_UV_NO_ROOM)
        tshi_uv_report_error(world, TSHI_UV_ABORT, 0, 0, TSH_ERR_MEMORY, world->rank,
                             "rank %d: no memory to encrypt what it sends", world->rank);
    return n > 0 ? (size_t)n : 0;
}

/* Sends (out = 1) or receives, in one system call, `left` bytes of a header and then payload of op
 * (NULL: none). Returns how many bytes were moved; if that was not all, link->want has the event to
 * wait for. */
static size_t tshi_uv_transfer(tshi_uv_link *link, const tshi_uv_fifo *fifo, void *head,
                               size_t left, const tshi_uv_op *op, int out) {
    tshi_uv_batch batch;
    struct msghdr message;
    tshi_uv_stream *s = !op ? NULL : out ? &op->out[link->peer] : &op->in[link->peer];
    /* counts the bytes sent, or received, on this connection, so that a dead one is noticed */
    uint64_t *count = out ? &link->wrote : &link->got;
    ssize_t n;
    if (link->channel) return tshi_uv_transfer_sealed(link, fifo, head, left, op, s, out);
    batch.used = 0;
    batch.payload = batch.asked = 0;
    tshi_uv_batch_add(&batch, head, left);
    batch.head = batch.used;
    if (op) tshi_uv_batch_fill(&batch, link, op, s, out);
    if (!batch.used) return 0;
    memset(&message, 0, sizeof message);
    message.msg_iov = batch.iov;
    message.msg_iovlen = (size_t)batch.used;
    n = out ? sendmsg(link->fd, &message, TSHI_UV_NOSIGNAL) : recvmsg(link->fd, &message, 0);
    if ((n < 0 && !tshi_uv_later()) || (n == 0 && !out)) { /* an error, or the peer closed */
        tshi_uv_broke(link, fifo, n < 0 ? "lost its connection" : "closed its connection");
        return 0;
    }
    if (n < 0) n = 0; /* nothing was moved: try again later */
    TSHI_UV_PUT(count, *count + (uint64_t)n);
    if (n < batch.asked) link->want |= out ? UV_WRITABLE : UV_READABLE;
    if (link->checks && op && !out) tshi_uv_batch_sum(&batch, link->group->world, s, (size_t)n);
    return (size_t)n;
}

/* Counts n bytes of payload just sent to a peer. All-gather on a ring also copies this rank's own
 * part among them from send to recv now, while it is in the cache. */
static void tshi_uv_payload_went(const tshi_uv_op *op, int peer, tshi_uv_stream *s, size_t n) {
    const int ring = op->algorithm == TSHI_UV_RING && peer == tshi_uv_next(op->group);
    int64_t end = s->done + (int64_t)n;
    while (ring && op->coll.kind == TSH_ALLGATHER && s->done < end) {
        const tshi_uv_lane lane = tshi_uv_lane_of(op, peer, 1);
        tshi_uv_at at = tshi_uv_locate(op, &lane, s->done);
        int64_t now = tshi_uv_min(at.left, end - s->done);
        if (at.step == 0) tshi_uv_own_piece(op, at.offset, now); /* step 0 sends this rank's part */
        s->done += now;
    }
    s->done = end;
}

/* Counts n bytes just sent or received, of a block's payload and its checksum. Returns 1 if they
 * complete the block (without checksums: always). */
static int tshi_uv_block_moved(const tshi_uv_link *link, const tshi_uv_op *op, tshi_uv_stream *s,
                               size_t n, int out) {
    size_t payload = (size_t)tshi_uv_min((int64_t)n, s->block - s->done);
    if (out)
        tshi_uv_payload_went(op, link->peer, s, payload);
    else
        s->done += (int64_t)payload;
    s->tail += n - payload;
    if (link->checks && s->good < s->total && s->tail < sizeof s->check) return 0;
    s->tail = 0;
    s->good = s->done;
    return 1;
}

/* Reads from the connection once. Returns 2: all bytes asked for have arrived, so more may be
 * there; 1: fewer have; 0: none, or no space for them, or an error. */
static int tshi_uv_read_once(tshi_uv_link *link) {
    tshi_uv_op *op = link->in.used ? tshi_uv_first(link->group, &link->in) : NULL;
    tshi_uv_stream *s = op ? &op->in[link->peer] : NULL;
    /* head: bytes of the header not received yet */
    size_t head = sizeof link->heard - link->heard_done, n, got;
    /* The header of a message is read alone: only if it fits op, the payload belongs to op. */
    got = tshi_uv_transfer(link, tshi_uv_in_use(link), (char *)&link->heard + link->heard_done,
                           head, !head || !tshi_uv_for_messages(link) ? op : NULL, 0);
    if (!got) return 0;
    n = got < head ? got : head; /* header bytes among those received */
    link->heard_done += n;
    if (head && n == head && !tshi_uv_check_head(link)) return 0; /* the header is complete */
    if (op && link->heard_done == sizeof link->heard) {
        if (tshi_uv_block_moved(link, op, s, got - n, 0) && link->checks &&
            s->check != s->received) {
            tshi_uv_damaged(link, "the payload");
            return 0;
        }
        if (op->algorithm == TSHI_UV_RING) tshi_uv_ring_fold(op); /* sums what has arrived */
        if (op->algorithm == TSHI_UV_PIECES) tshi_uv_pieces_fold(op);
        if (s->good == s->total) {
            link->heard_done = 0; /* a header comes next */
            tshi_uv_frame_done(op, &link->in);
        }
    }
    return link->want & UV_READABLE ? 1 : 2; /* 1: fewer bytes than asked for */
}

/* Returns the queue whose first frame is to be written next; NULL: none may be sent now. */
static tshi_uv_fifo *tshi_uv_choose(tshi_uv_link *link) {
    /* the clear for the next message to be sent */
    const tshi_uv_head *wanted = &link->clear[link->sent % TSHI_UV_OPS];
    tshi_uv_head sent;
    if (link->writing) return link->writing; /* a frame that was begun must be finished first */
    if (!tshi_uv_for_messages(link)) return link->out.used ? &link->out : NULL;
    if (link->clears.used) return &link->clears; /* clears go before messages */
    /* no message is to be sent, or its receiver has not sent the clear for it yet */
    if (!link->out.used || link->cleared == link->sent) return NULL;
    sent = tshi_uv_message_head(tshi_uv_first(link->group, &link->out), 0);
    if (tshi_uv_fits(&sent, wanted)) {
        link->sent++; /* the message uses up this clear */
        return &link->out;
    }
    /* an error: the message and its clear differ */
    tshi_uv_unfit(link, &sent, wanted, link->group->rank, link->peer);
    return NULL;
}

/* Writes once, as much as the socket takes. Returns 0 if nothing could be sent. */
static int tshi_uv_write_once(tshi_uv_link *link) {
    /* link->writing stays set until the whole frame is sent */
    tshi_uv_fifo *fifo = link->writing = tshi_uv_choose(link);
    tshi_uv_op *op = fifo ? tshi_uv_first(link->group, fifo) : NULL;
    tshi_uv_stream *s;
    tshi_uv_head head;
    size_t left, n, put;
    if (!op) return 0;
    s = fifo == &link->clears ? &op->clear : &op->out[link->peer]; /* a clear has no payload */
    head = tshi_uv_for_messages(link) ? tshi_uv_message_head(op, fifo == &link->clears) : op->head;
    head.bytes = (uint64_t)s->total;
    if (link->checks) head.check = tshi_uv_head_check(link->group->world, &head);
    left = sizeof head - s->head; /* header bytes still to send */
    put = tshi_uv_transfer(link, fifo, (char *)&head + s->head, left, s->total ? op : NULL, 1);
    if (!put) return 0;
    n = put < left ? put : left; /* header bytes among those sent */
    s->head += n;
    if (s->total) (void)tshi_uv_block_moved(link, op, s, put - n, 1);
    if (s->head == sizeof head && s->good == s->total) { /* the frame is complete */
        link->writing = NULL;
        tshi_uv_frame_done(op, fifo);
    }
    return 1;
}

/* ========================================================================== */
/* >>uv-shm-flow                                MARK: - uv-shm-flow (private) */
/* Moves frames through the rings of a connection in shared memory, as        */
/* >>uv-flow does on a socket, but without checksums. A header is at the      */
/* beginning of a cache line (64 bytes). A payload that fits into the rest of */
/* that line follows at once; a longer one begins with the next line.         */
/* With TSHI_UV_PIECES in a group that shares memory as a whole, data to be   */
/* summed is read where it lies.                                              */
/* A payload that lies in the sender's heap is sent by reference: the ring    */
/* has references to its parts, as they become ready, and the receiver reads  */
/* the heap. Such a frame is complete once the receiver has read everything.  */
/* Needs: >>uv-flow.                                                          */
/* ========================================================================== */

/* A part of a payload by reference: the ring has these in place of the bytes. */
typedef struct tshi_uv_reference {
    int64_t at, size; /* offset in the sender's segment; bytes */
} tshi_uv_reference;

/* Returns the position of the first cache line at or after `at`. */
static int64_t tshi_uv_shm_line(int64_t at) {
    return (at + 63) / 64 * 64;
}

/* Returns the position of a payload whose header ends at `at`: there, if all of it fits into the
 * header's cache line, else the next line's. */
static int64_t tshi_uv_shm_payload(int64_t at, uint64_t bytes) {
    const int64_t line = tshi_uv_shm_line(at);
    return bytes <= (uint64_t)(line - at) ? at : line;
}

/* Tells the peer how far this rank has written, if that is new to it. */
static void tshi_uv_shm_tell_sent(tshi_uv_link *link) {
    tshi_uv_pipe *pipe = &link->pipe;
    if (*pipe->sent == pipe->wrote) return;
    TSHI_UV_PUT(pipe->sent, pipe->wrote);
    tshi_uv_shm_wake(link->group->world, link->group->ranks[link->peer]);
}

/* Tells the peer that its ring is free up to position `taken`, once that frees `least` bytes. */
static void tshi_uv_shm_tell_taken(tshi_uv_link *link, int64_t taken, int64_t least) {
    if (taken - *link->pipe.taken < least) return;
    TSHI_UV_PUT(link->pipe.taken, taken);
    tshi_uv_shm_wake(link->group->world, link->group->ranks[link->peer]);
}

/* Returns how many bytes of a ring are to be free before the peer is told: not every few bytes. */
static int64_t tshi_uv_shm_some(const tshi_uv_link *link) {
    return link->pipe.size / 4;
}

/* Returns how many bytes can be written from position pipe->wrote on (out = 1), or read from
 * pipe->read on, by the peer's counter as this rank has read it last. `look` 1: reads that counter
 * again first. */
static int64_t tshi_uv_shm_count(tshi_uv_pipe *pipe, int out, int look) {
    if (look && out) pipe->seen_taken = TSHI_UV_GET(pipe->peer_taken);
    if (look && !out) pipe->seen_sent = TSHI_UV_GET(pipe->peer_sent);
    return out ? pipe->size - (pipe->wrote - pipe->seen_taken) : pipe->seen_sent - pipe->read;
}

/* Returns 1 if all references of a payload are written, and the last time that this rank looked the
 * peer had not read all. If the peer has closed the group since, the next write sees whether it had
 * done so before. */
static int tshi_uv_shm_unread(const tshi_uv_link *link) {
    const tshi_uv_stream *s;
    if (!link->writing || !link->pipe.refers) return 0;
    s = &tshi_uv_first(link->group, link->writing)->out[link->peer];
    return s->done == s->total;
}

/* Returns how many bytes can be written (out = 1) or read; 0 if fewer than `need`: then link->want
 * has the event to wait for. Reports an error if the peer has closed the group, or if its counter
 * is impossible. */
static int64_t tshi_uv_shm_room(tshi_uv_link *link, int64_t need, int out) {
    tshi_uv_pipe *pipe = &link->pipe;
    int64_t n = tshi_uv_shm_count(pipe, out, 0);
    int closed;
    if (n >= need && n <= pipe->size) return n;
    /* read first: once the peer has set it, the counters read below are final */
    closed = TSHI_UV_GET(&pipe->theirs->closed) != 0;
    n = tshi_uv_shm_count(pipe, out, 1);
    if (n >= need && n <= pipe->size) return n;
    link->want |= out ? UV_WRITABLE : UV_READABLE;
    if (n > pipe->size)
        tshi_uv_broke(link, tshi_uv_in_use(link), "sent what nobody asked for");
    else if (closed && (out || !tshi_uv_shm_unread(link)))
        tshi_uv_broke(link, tshi_uv_in_use(link), "closed its connection");
    return 0;
}

/* Writes a byte of each cache line of n bytes that have arrived in a ring, as it was. So this core
 * gets the lines as their only owner, not to share them with the sender's: of lines that both have,
 * the sender would later write an eighth as many in the same time (AMD Zen 4). */
static void tshi_uv_shm_own(char *at, int64_t n) {
    for (int64_t i = 0; i < n; i += 64) *(volatile char *)(at + i) = *(volatile char *)(at + i);
}

/* Copies n bytes from `at` into the ring (out = 1), or out of the ring to `at`, and advances
 * pipe->wrote or pipe->read. */
static void tshi_uv_shm_copy(tshi_uv_pipe *pipe, char *at, int64_t n, int out) {
    while (n > 0) {
        int64_t *position = out ? &pipe->wrote : &pipe->read, offset = *position & (pipe->size - 1);
        const int64_t now = tshi_uv_min(n, pipe->size - offset);
        memcpy(out ? pipe->out + offset : at, out ? at : pipe->in + offset, (size_t)now);
        *position += now;
        at += now;
        n -= now;
    }
}

/* Returns 1 if the payload that op sends to a peer is long, and lies in this rank's heap in parts
 * that are not short. */
static int tshi_uv_shm_refers(const tshi_uv_link *link, const tshi_uv_op *op,
                              const tshi_uv_stream *s) {
    const tsh_uv_world *world = link->group->world;
    const tsh_coll *coll = &op->coll;
    const int rows = coll->kind == TSH_ALLGATHER || coll->kind == TSH_REDUCE_SCATTER ||
                     coll->kind == TSH_ALLTOALL;
    /* where bytes are sent from; a sum by TSHI_UV_PIECES from recv, too */
    const void *first = coll->kind == TSH_BROADCAST ? coll->recv : coll->send;
    const void *second = coll->kind == TSH_ALLREDUCE ? coll->recv : first;
    const int64_t least = coll->kind == TSH_ALLREDUCE ? TSHI_UV_SHM_REFERS_SUM : TSHI_UV_SHM_REFERS;
    if (s->total < least || !tshi_uv_in_heap(world, first) || !tshi_uv_in_heap(world, second))
        return 0;
    if (op->algorithm == TSHI_UV_RING) return 0; /* it sends from scratch, too */
    return !rows || tshi_uv_bytes_at(op, link->peer, 0, s->total, 1).size >= TSHI_UV_SHM_PAGE;
}

/* Begins a frame: writes its header to the ring. Returns 0 if there is no room. */
static int tshi_uv_shm_write_head(tshi_uv_link *link, const tshi_uv_op *op, tshi_uv_stream *s,
                                  int clear) {
    tshi_uv_pipe *pipe = &link->pipe;
    tshi_uv_head head = tshi_uv_for_messages(link) ? tshi_uv_message_head(op, clear) : op->head;
    int64_t need; /* bytes that the ring must have room for */
    pipe->wrote = tshi_uv_shm_line(pipe->wrote);
    /* the header; if the payload begins with the next line, all of the header's line */
    need = tshi_uv_shm_payload((int64_t)sizeof head, (uint64_t)s->total);
    if (!tshi_uv_shm_room(link, need, 1)) return 0;
    pipe->refers = tshi_uv_shm_refers(link, op, s);
    head.bytes = (uint64_t)s->total;
    head.refers = (uint8_t)pipe->refers;
    tshi_uv_shm_copy(pipe, (char *)&head, (int64_t)sizeof head, 1);
    pipe->wrote = tshi_uv_shm_payload(pipe->wrote, head.bytes);
    s->head = sizeof head;
    return 1;
}

/* Writes a part of a payload to the ring, as far as there is room: its bytes or, by reference,
 * where they lie. Returns how many bytes of the payload that is; 0: there is no room. */
static int64_t tshi_uv_shm_put(tshi_uv_link *link, tshi_uv_span span) {
    const tsh_uv_world *world = link->group->world;
    tshi_uv_pipe *pipe = &link->pipe;
    tshi_uv_reference part = {0, span.size};
    const int64_t room = tshi_uv_shm_room(link, pipe->refers ? (int64_t)sizeof part : 1, 1);
    if (!room) return 0;
    if (pipe->refers) {
        part.at = span.at - world->near[world->rank].base;
        tshi_uv_shm_copy(pipe, (char *)&part, (int64_t)sizeof part, 1);
        return span.size;
    }
    span.size = tshi_uv_min(span.size, tshi_uv_min(room, TSHI_UV_SHM_PIECE));
    tshi_uv_shm_copy(pipe, span.at, span.size, 1);
    return span.size;
}

/* Writes once to a connection in shared memory: what is ready of its first frame, as far as the
 * ring has room. Returns 0 if nothing could be written. */
static int tshi_uv_shm_write(tshi_uv_link *link) {
    tshi_uv_fifo *fifo = link->writing = tshi_uv_choose(link);
    tshi_uv_op *op = fifo ? tshi_uv_first(link->group, fifo) : NULL;
    tshi_uv_pipe *pipe = &link->pipe;
    tshi_uv_stream *s;
    const int64_t before = pipe->wrote;
    if (!op) return 0;
    s = fifo == &link->clears ? &op->clear : &op->out[link->peer];
    if (s->head == 0 && !tshi_uv_shm_write_head(link, op, s, fifo == &link->clears)) return 0;
    while (s->done < s->total) {
        tshi_uv_span span = tshi_uv_bytes_at(op, link->peer, s->done, s->total, 1);
        if (span.size <= 0) { /* no more bytes are ready yet */
            link->want |= UV_WRITABLE;
            break;
        }
        span.size = tshi_uv_shm_put(link, span);
        if (!span.size) break;
        tshi_uv_payload_went(op, link->peer, s, (size_t)span.size);
        if (s->done < s->total) tshi_uv_shm_tell_sent(link);
    }
    s->good = s->done;
    tshi_uv_shm_tell_sent(link);
    /* by reference: it is complete once the peer has taken everything from the ring */
    if (s->done < s->total || (pipe->refers && !tshi_uv_shm_room(link, pipe->size, 1)))
        return pipe->wrote != before;
    link->writing = NULL;
    tshi_uv_frame_done(op, fifo);
    return 1;
}

/* Reads the header of a frame from the ring. Returns 0 if it has not arrived yet, or after an
 * error. */
static int tshi_uv_shm_read_head(tshi_uv_link *link) {
    tshi_uv_pipe *pipe = &link->pipe;
    const int64_t head = (int64_t)sizeof link->heard;
    pipe->read = tshi_uv_shm_line(pipe->read);
    if (!tshi_uv_shm_room(link, head, 0)) return 0;
    tshi_uv_shm_copy(pipe, (char *)&link->heard, head, 0);
    pipe->payload = pipe->read = tshi_uv_shm_payload(pipe->read, link->heard.bytes);
    memset(&pipe->summed, 0, sizeof pipe->summed);
    memset(&pipe->copied, 0, sizeof pipe->copied);
    link->heard_done = sizeof link->heard; /* tshi_uv_check_head sets it to 0 after a clear */
    return tshi_uv_check_head(link);
}

/* Reads the next reference of a payload into *source. Returns 0 if it has not arrived, or if it is
 * none that a rank sends: then an error is reported. */
static int tshi_uv_shm_read_reference(tshi_uv_link *link, const tshi_uv_stream *s,
                                      tshi_uv_source *source) {
    const tshi_uv_near *near = &link->group->world->near[link->group->ranks[link->peer]];
    tshi_uv_reference part;
    if (!tshi_uv_shm_room(link, (int64_t)sizeof part, 0)) return 0;
    tshi_uv_shm_copy(&link->pipe, (char *)&part, (int64_t)sizeof part, 0);
    if (part.size <= 0 || part.size > s->total - s->done || part.at < TSHI_UV_SHM_SIZE ||
        part.at > near->size - part.size) {
        tshi_uv_broke(link, tshi_uv_in_use(link), "sent what nobody asked for");
        return 0;
    }
    source->at = near->base + part.at;
    source->begin = s->done;
    source->end = s->done + part.size;
    return 1;
}

/* Finds the next bytes of op's payload, of which `summed` bytes are summed where they lie. Size 0:
 * they have not arrived, or those before them are not summed yet. */
static tshi_uv_span tshi_uv_shm_next(tshi_uv_link *link, const tshi_uv_op *op,
                                     const tshi_uv_stream *s, int64_t summed) {
    tshi_uv_pipe *pipe = &link->pipe;
    const int64_t offset = pipe->read & (pipe->size - 1);
    tshi_uv_source *source = s->done < summed ? &pipe->summed : &pipe->copied;
    /* the casts remove const; the bytes are only read */
    tshi_uv_span span = {(char *)(uintptr_t)pipe->in + offset, 0};
    if (!link->heard.refers) {
        span.size = tshi_uv_min(tshi_uv_shm_room(link, 1, 0), pipe->size - offset);
        return span;
    }
    if (s->done == source->end || source->end == 0) {
        const int64_t used = tshi_uv_min(s->done, summed); /* all that is to be summed before */
        if (op->ready < used && source == &pipe->summed) return span;
        if (op->ready >= used) tshi_uv_shm_tell_taken(link, pipe->read, tshi_uv_shm_some(link));
        if (!tshi_uv_shm_read_reference(link, s, source)) return span;
    }
    span.at = (char *)(uintptr_t)source->at + (s->done - source->begin);
    span.size = tshi_uv_min(source->end - s->done, TSHI_UV_SHM_STEP);
    return span;
}

/* Reads what has arrived of op's payload. */
static void tshi_uv_shm_read_payload(tshi_uv_link *link, tshi_uv_op *op) {
    tshi_uv_stream *s = &op->in[link->peer];
    tshi_uv_pipe *pipe = &link->pipe;
    const int refers = link->heard.refers;
    /* bytes of payload that are not copied, but summed where they lie */
    const int64_t summed = tshi_uv_summed_in_place(op);
    while (s->done < s->total) {
        tshi_uv_span from = tshi_uv_shm_next(link, op, s, summed), to;
        if (from.size <= 0) break;
        if (s->done < summed) {
            from.size = tshi_uv_min(from.size, summed - s->done);
            if (!refers) tshi_uv_shm_own(from.at, from.size);
        } else {
            to = tshi_uv_bytes_at(op, link->peer, s->done, s->total, 0);
            if (to.size <= 0) break; /* scratch has no space */
            from.size = tshi_uv_min(from.size, to.size);
            if (!refers) from.size = tshi_uv_min(from.size, TSHI_UV_SHM_PIECE);
            if (!refers) tshi_uv_shm_own(from.at, from.size);
            memcpy(to.at, from.at, (size_t)from.size);
            if (refers && !tshi_uv_unchanged(link->group->world, link->group->ranks[link->peer]))
                break; /* the world has failed */
        }
        if (!refers) pipe->read += from.size;
        s->good = s->done += from.size;
        if (!refers && op->ready >= summed)
            tshi_uv_shm_tell_taken(link, pipe->read, tshi_uv_shm_some(link));
        if (op->algorithm == TSHI_UV_RING) tshi_uv_ring_fold(op);
        if (op->algorithm == TSHI_UV_PIECES && !summed) tshi_uv_pieces_fold(op);
        if (refers && s->done > summed) break; /* other connections come first */
    }
}

/* Sums what has arrived in the rings of all peers, and then frees its place in them. summed: bytes
 * of each payload that are summed in the rings; 0: none. */
static void tshi_uv_shm_fold(tshi_uv_op *op, int64_t summed) {
    tshi_uv_group *group = op->group;
    const int64_t before = op->ready;
    if (before < summed) tshi_uv_pieces_fold(op);
    for (int r = 0; op->ready != before && r < group->size; r++) {
        tshi_uv_link *link = &group->link[r];
        const tshi_uv_pipe *pipe = &link->pipe;
        if (r != group->rank && !link->heard.refers)
            tshi_uv_shm_tell_taken(link,
                                   op->ready < summed ? pipe->payload + op->ready : pipe->read,
                                   tshi_uv_shm_some(link));
    }
}

/* Reads once from a connection in shared memory. Returns 2: more bytes may be there; 1: no more for
 * now; 0: nothing was read. */
static int tshi_uv_shm_read(tshi_uv_link *link) {
    tshi_uv_op *op = link->in.used ? tshi_uv_first(link->group, &link->in) : NULL;
    tshi_uv_stream *s = op ? &op->in[link->peer] : NULL;
    const int64_t read = link->pipe.read, done = s ? s->done : 0, ready = op ? op->ready : 0;
    int64_t summed;
    if (!link->heard_done && !tshi_uv_shm_read_head(link)) return 0;
    if (!link->heard_done) { /* the frame was a clear, without payload */
        tshi_uv_shm_tell_taken(link, link->pipe.read, tshi_uv_shm_some(link));
        return 2;
    }
    if (!op) return 0;
    tshi_uv_shm_read_payload(link, op);
    summed = tshi_uv_summed_in_place(op);
    tshi_uv_shm_fold(op, summed);
    if (s->good == s->total && op->ready >= summed) {
        link->heard_done = 0; /* a header comes next */
        /* by reference: the sender waits until all is read */
        tshi_uv_shm_tell_taken(link, link->pipe.read,
                               link->heard.refers ? 1 : tshi_uv_shm_some(link));
        tshi_uv_frame_done(op, &link->in);
        return link->in.used ? 2 : 1;
    }
    return link->pipe.read != read || s->done != done || op->ready != ready;
}

/* ========================================================================== */
/* >>uv-board                                      MARK: - uv-board (private) */
/* Small collectives of a group that shares memory as a whole. Each rank has  */
/* a few slots in its segment; those of all ranks are the board. A rank shows */
/* what it sends, once for all others, in its next slot, and reads theirs.    */
/* Needs: >>uv-shm-flow.                                                      */
/* ========================================================================== */

/* Collective n on the board (from 1 on) is in slot n % TSHI_UV_SLOTS of each rank. A slot is used
 * again only when all have read it: a rank shows n once it has completed n - TSHI_UV_AHEAD. So all
 * have shown that one, and each had completed n - 2 TSHI_UV_AHEAD before, whose slot it is. */
enum { TSHI_UV_AHEAD = TSHI_UV_SLOTS / 2 };

/* Returns the bytes of op's send buffer. */
static int64_t tshi_uv_board_size(const tshi_uv_op *op) {
    const tsh_coll *coll = &op->coll;
    const int rank = op->group->rank, size = op->group->size;
    /* otherwise every rank gets the same */
    if (coll->kind != TSH_REDUCE_SCATTER) return tshi_uv_direct_size(op, rank, rank);
    return tshb_coll_before(coll->recv_counts, size) * coll->blocks * op->width;
}

/* Copies what op sends into its slot, and tells the others. */
static void tshi_uv_board_show(const tshi_uv_op *op) {
    tshi_uv_group *group = op->group;
    tshi_uv_slot *slot = tshi_uv_slot_of(group, group->rank, op->boarded);
    const int64_t size = tshi_uv_board_size(op);
    if (size) memcpy(slot + 1, op->coll.send, (size_t)size);
    slot->seq = op->head.seq;
    slot->digest = op->head.digest;
    TSHI_UV_PUT(&slot->number, op->boarded);
    group->shown = op->boarded;
    for (int r = 0; r < group->size; r++)
        if (r != group->rank) tshi_uv_shm_wake(group->world, group->ranks[r]);
}

/* Shows as many of the collectives in flight as may be shown, none after an error. */
static void tshi_uv_board_show_all(tshi_uv_group *group) {
    /* number of the first one in flight */
    const uint64_t first = group->boarded - group->board.used + 1;
    if (TSHI_UV_GET(&group->world->halted)) return;
    while (group->shown < group->boarded && group->shown + 1 < first + TSHI_UV_AHEAD)
        tshi_uv_board_show(tshi_uv_nth(group, &group->board, (unsigned)(group->shown + 1 - first)));
}

/* Returns 1 if a peer has written a frame with op's number to its ring: it has called a collective
 * that is not on the board. Then reports that the calls differ. */
static int tshi_uv_frame_instead(const tshi_uv_link *link, const tshi_uv_op *op) {
    const tshi_uv_pipe *pipe = &link->pipe;
    const int64_t at = tshi_uv_shm_line(pipe->read);
    tshi_uv_head head;
    /* frames of earlier collectives come first; so does op's slot if the frame is of a later one */
    if (link->in.used || TSHI_UV_GET(pipe->peer_sent) - at < (int64_t)sizeof head) return 0;
    memcpy(&head, pipe->in + (at & (pipe->size - 1)), sizeof head);
    if (head.seq != op->head.seq) return 0;
    tshi_uv_differ(link, op, head.seq);
    return 1;
}

/* Returns 1 if rank r has shown what it sends in op. Reports an error if it has called another
 * collective instead, or has closed the group. */
static int tshi_uv_board_shows(const tshi_uv_op *op, int r) {
    tshi_uv_group *group = op->group;
    tshi_uv_link *link = &group->link[r];
    const tshi_uv_slot *slot = tshi_uv_slot_of(group, r, op->boarded);
    /* read first: once the peer has set it, it shows nothing more */
    const int closed = TSHI_UV_GET(&link->pipe.theirs->closed) != 0;
    if (TSHI_UV_GET(&slot->number) != op->boarded) {
        if (closed && !tshi_uv_frame_instead(link, op))
            tshi_uv_broke(link, &group->board, "closed its connection");
        return 0;
    }
    if (slot->seq == op->head.seq && slot->digest == op->head.digest) return 1;
    tshi_uv_differ(link, op, slot->seq);
    return 0;
}

/* Writes to the cache lines of this rank's next slot, as many as op took. So this core has them for
 * itself by the time it shows the next collective: other cores, which have read them, give them up.
 * No rank needs what that slot shows: all have shown op, and had read it before that. */
static void tshi_uv_board_prepare(const tshi_uv_op *op) {
    tshi_uv_slot *next = tshi_uv_slot_of(op->group, op->group->rank, op->boarded + 1);
    const int64_t size = (int64_t)sizeof *next + tshi_uv_board_size(op);
    if (op->group->shown > op->boarded) return; /* that slot is in use already */
    __atomic_store_n(&next->number, 0, __ATOMIC_RELAXED);
    for (int64_t i = 64; i < size; i += 64) *((volatile char *)next + i) = 0;
}

/* Completes op, which all ranks have shown: gathers or sums. */
static void tshi_uv_board_take(const tshi_uv_op *op) {
    const tshi_uv_group *group = op->group;
    for (int r = 0; op->coll.kind == TSH_ALLGATHER && r < group->size; r++) {
        const int64_t size = r == group->rank ? 0 : tshi_uv_length(op, r);
        for (int64_t at = 0; at < size;) { /* one row at a time */
            const tshi_uv_span to = tshi_uv_in_whole(op, op->coll.recv, r, at);
            memcpy(to.at, tshi_uv_slot_data(op, r) + at, (size_t)to.size);
            at += to.size;
        }
    }
    if (tshi_uv_sums(op)) tshi_uv_direct_sums(op);
}

/* Moves the collectives on a group's board as far as they can be moved now. Returns 0 if none was
 * moved. */
static int tshi_uv_board_move(tshi_uv_group *group) {
    int moved = 0;
    for (; group->board.used && !TSHI_UV_GET(&group->world->halted); moved = 1) {
        tshi_uv_op *op = tshi_uv_first(group, &group->board);
        const int before = op->seen;
        tshi_uv_board_show_all(group);
        while (op->seen < group->size &&
               (op->seen == group->rank || tshi_uv_board_shows(op, op->seen)))
            op->seen++;
        if (op->seen < group->size) return moved || op->seen != before;
        tshi_uv_board_take(op);
        tshi_uv_board_prepare(op);
        tshi_uv_pop(&group->board);
        op->pending = 0;
    }
    return moved;
}

/* Looks for errors where waiting ranks do not look: of all ranks that have not shown the first
 * collective on the board, not only the lowest; and on the board, where a frame of a collective
 * with the same number is awaited. */
static void tshi_uv_board_look(tsh_uv_world *world) {
    for (tshi_uv_group *group = world->groups; group; group = group->next) {
        const tshi_uv_op *shown = group->board.used ? tshi_uv_first(group, &group->board) : NULL;
        for (int r = 0; group->whole && r < group->size; r++) {
            const tshi_uv_link *link = &group->link[r];
            const tshi_uv_op *op = link->in.used ? tshi_uv_first(group, &link->in) : NULL;
            const tshi_uv_slot *slot = op ? tshi_uv_slot_of(group, r, op->boarded + 1) : NULL;
            if (r == group->rank || TSHI_UV_GET(&world->halted)) continue;
            if (slot && TSHI_UV_GET(&slot->number) == op->boarded + 1 && slot->seq == op->head.seq)
                tshi_uv_differ(link, op, slot->seq);
            else if (shown && r >= shown->seen && !tshi_uv_board_shows(shown, r))
                (void)tshi_uv_frame_instead(link, shown);
        }
    }
}

/* ========================================================================== */
/* >>uv-advance                                  MARK: - uv-advance (private) */
/* Moves all bytes that can be moved now, on all connections of all groups.   */
/* Needs: >>uv-board.                                                         */
/* ========================================================================== */

/* Copies messages that this rank sends to itself from send to recv. Returns 1 if there were any. */
static int tshi_uv_meet(tshi_uv_link *link) {
    int moved = 0;
    for (; link->in.used && link->out.used; moved = 1) {
        tshi_uv_op *to = tshi_uv_first(link->group, &link->in);    /* the operation that receives */
        tshi_uv_op *from = tshi_uv_first(link->group, &link->out); /* the operation that sends */
        tshi_uv_head sent = tshi_uv_message_head(from, 0);
        tshi_uv_head wanted = tshi_uv_message_head(to, 1);
        if (!tshi_uv_fits(&sent, &wanted)) {
            tshi_uv_unfit(link, &sent, &wanted, link->peer, link->peer);
            return 0;
        }
        if (sent.bytes) memmove(to->coll.recv, from->coll.send, (size_t)sent.bytes);
        /* marks both frames as complete, the one sent and the one received */
        to->in[link->peer].head = from->out[link->peer].head = sizeof sent;
        tshi_uv_frame_done(to, &link->in);
        tshi_uv_frame_done(from, &link->out);
    }
    return moved;
}

/* Reads once from a connection, by its socket or in shared memory. Returns 2: more bytes may be
 * there; 1: no more for now; 0: no byte was read. */
static int tshi_uv_read_link(tshi_uv_link *link) {
    return link->pipe.out ? tshi_uv_shm_read(link) : tshi_uv_read_once(link);
}

/* Writes to a connection as much as it takes now. Returns 0 if that is nothing. */
static int tshi_uv_write_link(tshi_uv_link *link) {
    int moved = 0;
    while ((link->out.used || link->clears.used) && !(link->want & UV_WRITABLE) &&
           (link->pipe.out ? tshi_uv_shm_write(link) : tshi_uv_write_once(link)))
        moved = 1;
    return moved;
}

/* Moves all bytes that can be moved now on one connection: sends, as the peer may wait for that;
 * receives; and sends what the received bytes allow. Returns 0 if no byte was moved, or after an
 * error. */
static int tshi_uv_move_link(tshi_uv_link *link) {
    const int messages = tshi_uv_for_messages(link);
    int moved, got = 2, heard = 0;
    link->want = 0; /* libuv events to wait for, set below: none yet */
    if (!link->in.used && !link->out.used && !link->clears.used) return 0;
    /* messages from this rank to itself are copied, not sent */
    if (link->peer == link->group->rank) return tshi_uv_meet(link);
    moved = tshi_uv_write_link(link);
    if (TSHI_UV_GET(&link->group->world->halted)) return 0; /* an error was reported */
    /* A message to be sent needs its clear, which may arrive now. When none is left to be sent or
     * received, nothing is read: the peer may have closed, which is no error then. */
    for (; got == 2 && (link->in.used || (messages && link->out.used)); heard |= got)
        got = tshi_uv_read_link(link);
    if (!heard || TSHI_UV_GET(&link->group->world->halted)) return moved;
    if (link->pipe.out) link->want &= ~UV_WRITABLE; /* there may be more that is ready to be sent */
    return 1 | tshi_uv_write_link(link);
}

/* Sends and receives all bytes that can be moved now, in all groups. Returns 0 if none were. */
static int tshi_uv_advance(tsh_uv_world *world) {
    int moved = 0;
    for (tshi_uv_group *group = world->groups; group; group = group->next) {
        /* connections are skipped if no operation in flight needs one */
        const int links = group->active > (int)group->board.used ? 2 * group->size : 0;
        if (group->board.used) moved |= tshi_uv_board_move(group);
        for (int i = 0; i < links; i++) {
            if (TSHI_UV_GET(&world->halted)) return 0;               /* an error was reported */
            moved |= tshi_uv_move_link(&group->link[i]);
        }
    }
    return moved;
}

/* ========================================================================== */
/* >>uv-start                                      MARK: - uv-start (private) */
/* Starting a collective: chooses its algorithm, queues its frames on the     */
/* data connections, and sends what the sockets take at once.                 */
/* Needs: >>uv-advance.                                                       */
/* ========================================================================== */

/* Limits in bytes. Up to DIRECT_MOST (see `sent` in tshi_uv_choose_algorithm), ranks send directly
 * to each other; up to STAR_MOST, a root sends its data directly to all ranks. That takes fewer
 * steps than a ring or a chain. */
enum {
    TSHI_UV_DIRECT_MOST = 96 << 10,
    TSHI_UV_SHM_DIRECT_MOST = 8 << 10, /* DIRECT_MOST where all ranks share memory */
    TSHI_UV_STAR_MOST = 32 << 10
};

/* Appends a frame of op with `total` bytes of payload to a queue; s will record its progress. */
static void tshi_uv_queue(tshi_uv_op *op, tshi_uv_fifo *fifo, tshi_uv_stream *s, int64_t total) {
    memset(s, 0, sizeof *s);
    s->total = total;
    op->pending++; /* op is complete when this is 0 again */
    tshi_uv_push(fifo, op);
}

/* Queues the receipt of `total` bytes from a peer (a rank of the group). */
static void tshi_uv_expect(tshi_uv_op *op, int peer, int64_t total) {
    tshi_uv_link *link = tshi_uv_link_to(op->group, peer, op->algorithm == TSHI_UV_MESSAGE);
    tshi_uv_queue(op, &link->in, &op->in[peer], total);
}

/* Queues the sending of `total` bytes to a peer (a rank of the group). */
static void tshi_uv_promise(tshi_uv_op *op, int peer, int64_t total) {
    tshi_uv_link *link = tshi_uv_link_to(op->group, peer, op->algorithm == TSHI_UV_MESSAGE);
    tshi_uv_queue(op, &link->out, &op->out[peer], total);
}

/* Returns the algorithm for op. It depends only on what is the same on all ranks (kind, sizes,
 * dtype, reduction, whether all share memory), so that all choose the same. */
static tshi_uv_algorithm tshi_uv_choose_algorithm(const tshi_uv_op *op) {
    const tsh_coll *coll = &op->coll;
    const int size = op->group->size, whole = op->group->whole && size > 1;
    const int64_t slot = op->group->slot - (int64_t)sizeof(tshi_uv_slot); /* its room for data */
    /* all: bytes of the whole buffer; most: of the largest part that one rank has; sent: about how
     * many bytes one rank would send directly */
    int64_t all = 0, most = 0, sent;
    switch (coll->kind) {
    case TSH_ALLREDUCE:
    case TSH_ALLGATHER:
    case TSH_REDUCE_SCATTER:
        if (coll->kind == TSH_ALLREDUCE)
            all = coll->count * op->width;
        else
            for (int k = 0; k < size; k++) {
                const int64_t part = tshi_uv_length(op, k);
                all += part;
                most = part > most ? part : most;
            }
        if (whole && (coll->kind == TSH_ALLGATHER ? most : all) <= slot) return TSHI_UV_BOARD;
        sent = coll->kind == TSH_ALLREDUCE ? all * (size - 1) : all;
        if (size == 1 || sent <= (whole ? TSHI_UV_SHM_DIRECT_MOST : TSHI_UV_DIRECT_MOST))
            return TSHI_UV_DIRECT;
        /* in shared memory it costs nothing more to reach all ranks than the next one */
        if (whole) return coll->kind == TSH_ALLGATHER ? TSHI_UV_DIRECT : TSHI_UV_PIECES;
        if (coll->kind != TSH_ALLGATHER && tshb_coll_rounds(coll->dtype, coll->redop))
            return TSHI_UV_PIECES; /* a ring would round the sum at every rank */
        return TSHI_UV_RING;
    case TSH_BROADCAST:
        return coll->count * op->width <= TSHI_UV_STAR_MOST ? TSHI_UV_STAR : TSHI_UV_CHAIN;
    case TSH_SEND:
    case TSH_RECV:
    case TSH_SENDRECV: return TSHI_UV_MESSAGE;
    case TSH_BARRIER: return whole ? TSHI_UV_BOARD : TSHI_UV_DIRECT;
    default: return TSHI_UV_DIRECT; /* all-to-all, split */
    }
}

/* Copies this rank's own part of an all-gather or all-to-all from send to recv. (In a ring
 * tshi_uv_payload_went does.) */
static void tshi_uv_copy_own(const tshi_uv_op *op) {
    const tsh_coll *coll = &op->coll;
    const int rank = op->group->rank;
    if (op->algorithm != TSHI_UV_DIRECT && op->algorithm != TSHI_UV_BOARD) return;
    if (coll->kind == TSH_ALLGATHER ||
        (coll->kind == TSH_ALLTOALL && coll->send_counts[rank] == coll->recv_counts[rank]))
        tshi_uv_own_piece(op, 0, tshi_uv_direct_size(op, rank, rank));
}

static void tshi_uv_plan_direct(tshi_uv_op *op) { /* Queues frames to and from every peer. */
    const tsh_coll *coll = &op->coll;
    const int rank = op->group->rank, size = op->group->size;
    if (coll->kind == TSH_ALLTOALL && coll->send_counts[rank] != coll->recv_counts[rank])
        tshi_uv_report_error(
            op->group->world, TSHI_UV_MISMATCH, op->group->id, op->head.seq, TSH_ERR_MISMATCH,
            op->group->world->rank,
            "rank %d called all-to-all with send_counts[%d] = %lld and recv_counts[%d] = %lld",
            op->group->world->rank, rank, (long long)coll->send_counts[rank], rank,
            (long long)coll->recv_counts[rank]);
    for (int j = 1; j < size; j++) {
        /* starts with the next rank, so that not all start with rank 0 */
        int to = (rank + j) % size;
        tshi_uv_promise(op, to, tshi_uv_direct_size(op, rank, to));
        tshi_uv_expect(op, to, tshi_uv_direct_size(op, to, rank));
    }
}

/* Queues the one frame that a ring sends to a peer (out = 1), or receives from it (out = 0). */
static void tshi_uv_plan_lane(tshi_uv_op *op, int peer, int out) {
    const tshi_uv_lane lane = tshi_uv_lane_of(op, peer, out);
    (out ? tshi_uv_promise : tshi_uv_expect)(op, peer, tshi_uv_lane_total(op, &lane));
}

/* Queues the frames of a ring: one to the next rank, one from the previous rank, and one from the
 * last rank of a host to its first. */
static void tshi_uv_plan_ring(tshi_uv_op *op) {
    const tshi_uv_group *group = op->group;
    const int rank = group->rank, first = group->first[rank], last = group->last[rank];
    tshi_uv_plan_lane(op, tshi_uv_next(group), 1);
    tshi_uv_plan_lane(op, tshi_uv_prev(group), 0);
    if (!tshi_uv_closes(op)) return;
    if (rank == last) tshi_uv_plan_lane(op, first, 1);
    if (rank == first) tshi_uv_plan_lane(op, last, 0);
}

/* Queues the frames of a broadcast. Where no payload goes to the next rank, an empty frame does, so
 * that every rank's header is checked. */
static void tshi_uv_plan_broadcast(tshi_uv_op *op) {
    const tshi_uv_group *group = op->group;
    int next = tshi_uv_next(group), prev = tshi_uv_prev(group), root = op->coll.root;
    int64_t bytes = op->coll.count * op->width;
    int star = op->algorithm == TSHI_UV_STAR, is_root = group->rank == root;
    if (group->size == 1) return;
    if (star && is_root) /* root sends to every rank */
        for (int j = 1; j < group->size; j++) tshi_uv_promise(op, (root + j) % group->size, bytes);
    else
        /* the frame is empty in a star, and at the end of a chain, where the next rank is root */
        tshi_uv_promise(op, next, star || next == root ? 0 : bytes);
    /* expects an empty frame from the previous rank */
    if (is_root || (star && prev != root)) tshi_uv_expect(op, prev, 0);
    if (!is_root) tshi_uv_expect(op, star ? root : prev, bytes); /* the frame with the payload */
}

static void tshi_uv_plan_board(tshi_uv_op *op) { /* Shows op to the others, if it is its turn. */
    op->seen = 0;
    op->pending = 1;
    tshi_uv_push(&op->group->board, op);
    tshi_uv_board_show_all(op->group);
}

static void tshi_uv_plan_message(tshi_uv_op *op) { /* Queues a SEND, RECV or SENDRECV. */
    const tsh_coll *coll = &op->coll;
    if (coll->kind != TSH_SEND) {
        tshi_uv_link *link = tshi_uv_link_to(op->group, coll->recv_from, 1);
        op->number[1] = link->receives++; /* the message's number among those from this peer */
        tshi_uv_expect(op, coll->recv_from, tshb_coll_half(coll, 1).count * op->width);
        if (link->peer != op->group->rank) tshi_uv_queue(op, &link->clears, &op->clear, 0);
    }
    if (coll->kind != TSH_RECV) {
        op->number[0] = tshi_uv_link_to(op->group, coll->send_to, 1)->sends++;
        tshi_uv_promise(op, coll->send_to, tshb_coll_half(coll, 0).count * op->width);
    }
}

/* Records the call, under the lock, so that this rank can answer when the coordinator asks for it
 * (ASK). */
static void tshi_uv_remember(const tshi_uv_op *op) {
    tshi_uv_group *group = op->group;
    tshi_uv_record *record = &group->record[op->head.seq % TSHI_UV_RECORDS];
    const tsh_coll *coll = &op->coll;
    int counts = coll->recv_counts ? (int)tshi_uv_min(group->size, TSHI_UV_COUNTS) : 0;
    uv_mutex_lock(&group->world->lock);
    record->coll = *coll;
    record->digest = op->head.digest;
    record->counts = counts; /* number of send_counts, and of recv_counts, recorded below */
    for (int r = 0; r < counts; r++) {
        record->send_counts[r] = coll->send_counts ? coll->send_counts[r] : 0;
        record->recv_counts[r] = coll->recv_counts[r];
    }
    group->started = op->head.seq + 1; /* number of collectives that were started */
    group->world->last = group->id;    /* group of the latest collective */
    uv_mutex_unlock(&group->world->lock);
}

/* Returns the size in bytes of the scratch buffer that op needs; only reductions need one. */
static size_t tshi_uv_scratch(const tshi_uv_op *op) {
    const tshi_uv_group *group = op->group;
    if (!tshi_uv_sums(op) || group->size == 1 || op->algorithm == TSHI_UV_BOARD ||
        tshi_uv_summed_in_place(op))
        return 0;
    /* a ring needs the window, a circular buffer for received bytes */
    if (op->algorithm == TSHI_UV_RING) return TSHI_UV_WINDOW;
    return (size_t)(tshi_uv_row_size(op) * group->size);
}

/* Reports that there is no memory for a collective; returns the world's error. */
static tsh_result tshi_uv_no_scratch(const tshi_uv_group *group, const tsh_coll *coll) {
    char text[200] = "start ", name[TSHI_UV_NAME]; /* text: the end of "rank 1 cannot start ..." */
    size_t used = strlen(text);
    (void)tshb_coll_text(coll, NULL, group->size, text + used, sizeof text - used);
    tsh_text_add(text, sizeof text, " of %s", tshb_group_text(group->id, name, sizeof name));
    return tshi_uv_cannot(group->world, TSH_ERR_MEMORY, text, "no memory");
}

/* Starts coll in a free slot of group->op: queues its frames and writes as much as the sockets take
 * now. *out: the operation. Returns TSH_ERR_STATE if no slot is free. */
static tsh_result tshi_uv_launch(tshi_uv_group *group, const tsh_coll *coll, tshi_uv_op **out) {
    tshi_uv_op *op = group->op;
    size_t need;
    while (op < group->op + TSHI_UV_OPS && op->used) op++; /* the first free slot */
    if (op == group->op + TSHI_UV_OPS) return TSH_ERR_STATE;
    *out = op;
    op->coll = *coll;
    op->width = (int64_t)tsh_dtype_size(coll->dtype);
    op->pending = 0;
    op->ready = 0;
    op->algorithm = tshi_uv_choose_algorithm(op);
    need = tshi_uv_scratch(op);
    if (need > op->scratch_size) {
        free(op->scratch);
        op->scratch = (char *)malloc(need);
        op->scratch_size = op->scratch ? need : 0; /* the slot's later operations reuse scratch */
        if (!op->scratch) return tshi_uv_no_scratch(group, coll);
    }
    op->used = 1;
    group->active++;
    op->boarded = group->boarded += op->algorithm == TSHI_UV_BOARD;
    if (op->algorithm == TSHI_UV_MESSAGE) {
        tshi_uv_plan_message(op);
    } else {
        memset(&op->head, 0, sizeof op->head);
        op->head.group = group->id;
        op->head.seq = group->started; /* the collective's number in the group */
        /* digest: a hash of the call, which peers compare with that of their own call */
        op->head.digest = tshb_coll_digest(coll, group->size);
        op->head.count = coll->count;
        op->head.kind = (uint8_t)coll->kind;
        /* before the call is recorded: the others wait for it. If one of them then reports that the
         * calls differ, the coordinator asks again until it is */
        if (op->algorithm == TSHI_UV_BOARD) tshi_uv_plan_board(op);
        tshi_uv_remember(op);
        op->pending++; /* so that op is not complete before all frames are queued */
        if (op->algorithm == TSHI_UV_DIRECT || op->algorithm == TSHI_UV_PIECES)
            tshi_uv_plan_direct(op);
        if (op->algorithm == TSHI_UV_RING) tshi_uv_plan_ring(op);
        if (op->algorithm == TSHI_UV_STAR || op->algorithm == TSHI_UV_CHAIN)
            tshi_uv_plan_broadcast(op);
        /* a group of one rank has no frames: compute the sum now */
        if (--op->pending == 0 && tshi_uv_sums(op)) tshi_uv_direct_sums(op);
    }
    /* deadline: a point in time, in ns */
    op->deadline = tshb_deadline(coll->timeout_ns, group->world->timeout);
    (void)tshi_uv_advance(group->world); /* starts sending */
    tshi_uv_copy_own(op);
    return TSH_OK;
}

/* ========================================================================== */
/* >>uv-wait                                        MARK: - uv-wait (private) */
/* Waiting. A rank that waits moves data, polls for a short time, then sleeps */
/* in libuv. After 20 ms the control thread reports to the coordinator what   */
/* the rank waits for, to find cycles (>>uv-cycle). A timeout is an error.    */
/* Needs: >>uv-advance.                                                       */
/* ========================================================================== */

/* ms after which a wait is reported to the coordinator; ms of the longest sleep */
enum { TSHI_UV_BLOCKED_MS = 20, TSHI_UV_NAP_MS = 500 };

/* What this rank waits for: an operation or, with op NULL, the connections of a group. */
typedef struct tshi_uv_waiting {
    tshi_uv_group *group; /* group whose operation or connections are awaited */
    tshi_uv_op *op;       /* the awaited operation; NULL: the connections of group are awaited */
    /* deadline: when the wait times out; begun: when it first slept, 0: not yet */
    int64_t deadline, begun;
    int noted; /* 1: the control thread was told of the wait */
} tshi_uv_waiting;

/* Callback when a data connection is ready; the event alone ends the sleep. */
static void tshi_uv_poll_event(uv_poll_t *poll, int status, int events) {
    (void)poll;
    (void)status;
    (void)events;
}

/* Callback of world->timer. The timer may fire before uv_run sleeps; stopping the loop prevents
 * that sleep. */
static void tshi_uv_timer_event(uv_timer_t *timer) {
    uv_stop(timer->loop);
}

static int tshi_uv_over(const tshi_uv_waiting *wait) { /* Returns 1 if the wait is over. */
    if (tshi_uv_failed(wait->group->world) != TSH_OK) return 1;
    return wait->op ? wait->op->pending == 0 : TSHI_UV_GET(&wait->group->linked);
}

/* Returns the peer, a rank of the group, that a SEND, RECV or SENDRECV waits for. *number: number
 * of the message; *sends: 1 if this rank waits to send it, 0 if it waits to receive it. */
static int tshi_uv_awaited(const tshi_uv_op *op, uint64_t *number, int *sends) {
    const tsh_coll *coll = &op->coll;
    const int own = op->group->rank;
    const tshi_uv_stream *in = coll->kind == TSH_SENDRECV ? &op->in[coll->recv_from] : NULL;
    /* a SENDRECV waits to send until its first byte is out, or if it has received everything */
    *sends = coll->kind == TSH_SEND ||
             (in && (op->out[coll->send_to].head == 0 || (in->total && in->good == in->total)));
    if (coll->kind == TSH_SENDRECV && coll->recv_from == own && op->in[own].head == 0)
        /* a SENDRECV that receives from this rank itself: the wait is for that message */
        *sends = 0;
    *number = op->number[!*sends];
    return *sends ? coll->send_to : coll->recv_from;
}

/* Reports a timeout of op or, if op is NULL, of making the group's connections. For a collective,
 * the coordinator finds out which ranks are absent. */
static void tshi_uv_late(const tshi_uv_group *group, const tshi_uv_op *op) {
    tsh_uv_world *world = group->world;
    char text[240];
    /* id, seq: the collective that the coordinator asks all ranks about; id 0: none */
    uint64_t id = op ? group->id : 0, seq = op ? op->head.seq : 0;
    int sends, peer = -1;
    if (TSHI_UV_GET(&world->halted)) return; /* an error was reported already */
    tshi_uv_op_text(group, op, text, sizeof text);
    if (op && op->algorithm == TSHI_UV_MESSAGE) {
        /* world rank of the message's other end */
        peer = group->ranks[tshi_uv_awaited(op, &seq, &sends)];
        id = seq = 0; /* the coordinator need not ask other ranks */
        tsh_text_add(text, sizeof text, "; absent ranks: %d", peer);
    }
    tshi_uv_report_error(world, TSHI_UV_LATE, id, seq, TSH_ERR_TIMEOUT, peer,
                         "rank %d ran out of time in %s", world->rank, text);
}

/* Records in s which collectives and messages this rank has started, for tshi_uv_awaits. The caller
 * must hold world->lock. */
static void tshi_uv_list_started(const tsh_uv_world *world, tshi_uv_blocked *s) {
    const tshi_uv_group *g = world->groups;
    s->groups = s->pairs = 0;
    for (; g && s->groups < TSHI_UV_BLOCKED_GROUPS; g = g->next) {
        s->groups_of[s->groups].id = g->id;
        s->groups_of[s->groups++].started = g->started; /* number of collectives started */
        for (int i = g->size; i < 2 * g->size && s->pairs < TSHI_UV_BLOCKED_PAIRS; i++) {
            const tshi_uv_link *link = &g->link[i];
            if (!link->sends && !link->receives) continue; /* no messages with that peer yet */
            s->pairs_of[s->pairs].group = g->id;
            s->pairs_of[s->pairs].peer = g->ranks[link->peer];
            s->pairs_of[s->pairs].sends = link->sends;         /* number of SENDs to the peer */
            s->pairs_of[s->pairs++].receives = link->receives; /* number of RECVs from the peer */
        }
    }
}

/* Records in world->blocked that this rank is blocked in op; the control thread reports it. */
static void tshi_uv_note_blocked(const tshi_uv_op *op) {
    const tshi_uv_group *group = op->group;
    tsh_uv_world *world = group->world;
    tshi_uv_blocked *s = &world->blocked;
    int peer = -1;
    uv_mutex_lock(&world->lock);
    s->wait = ++world->waits; /* a new number for every wait */
    s->group = group->id;
    s->seq = op->head.seq;
    s->sends = 0;
    if (op->algorithm == TSHI_UV_MESSAGE) peer = tshi_uv_awaited(op, &s->seq, &s->sends);
    /* peer: world rank that is awaited; -1: the wait is in a collective */
    s->peer = peer < 0 ? -1 : group->ranks[peer];
    s->members = group->size;
    memcpy(s->member, group->ranks, (size_t)group->size * sizeof *group->ranks);
    tshi_uv_op_text(group, op, s->text, sizeof s->text);
    tshi_uv_list_started(world, s);
    TSHI_UV_PUT(&world->blocked_new, 1); /* lets the control thread report the wait */
    uv_mutex_unlock(&world->lock);
    (void)uv_async_send(&world->wake_control);
}

/* Clears what tshi_uv_note_blocked has recorded, as the wait is over. */
static void tshi_uv_unblock(tsh_uv_world *world) {
    uv_mutex_lock(&world->lock);
    world->blocked.wait = 0;
    TSHI_UV_PUT(&world->blocked_new, 0); /* cancels the report of the wait, if not sent yet */
    uv_mutex_unlock(&world->lock);
}

/* Tells libuv which events on data connections end this thread's sleep. */
static void tshi_uv_watch_links(tsh_uv_world *world) {
    int still = TSHI_UV_GET(&world->halted); /* 1: an error was reported, watch no connection */
    for (tshi_uv_group *group = world->groups; group; group = group->next) {
        for (int i = 0; i < 2 * group->size; i++) {
            tshi_uv_link *link = &group->link[i];
            /* libuv events to watch; in shared memory a bell is rung instead */
            int want = still || !group->active || link->pipe.out ? 0 : link->want;
            /* if not 0, the control thread tells the peer that this rank waits (AWAIT) */
            TSHI_UV_PUT(&link->awaits, want & UV_READABLE);
            if (want == link->polled || link->fd < 0) continue; /* no change, or not connected */
            if (!link->poll) /* the poll handle is made at the first sleep */
                link->poll = tshi_uv_watch(&world->loop, link->fd, want, NULL, tshi_uv_poll_event);
            else if (want)
                (void)uv_poll_start(link->poll, want, tshi_uv_poll_event);
            else
                (void)uv_poll_stop(link->poll); /* no event is awaited */
            if (!link->poll)
                tshi_uv_report_error(world, TSHI_UV_ABORT, 0, 0, TSH_ERR_MEMORY, world->rank,
                                     "rank %d: no memory to watch a connection", world->rank);
            link->polled = link->poll ? want : 0; /* the events that libuv watches now */
        }
    }
}

/* Sleeps until a connection is ready, the control thread wakes this thread, or something is due:
 * the deadline, or the report that this rank is blocked. */
static void tshi_uv_nap(tshi_uv_waiting *wait) {
    tsh_uv_world *world = wait->group->world;
    int64_t now = tsh_now(), until;
    if (!wait->begun) wait->begun = now;       /* the first sleep of this wait */
    until = now + TSHI_UV_NAP_MS * TSHI_UV_MS; /* the latest time at which the sleep ends */
    if (now >= wait->deadline)
        tshi_uv_late(wait->group, wait->op);
    else
        until = tshi_uv_min(until, wait->deadline);
    if (wait->op && !wait->noted) {
        int64_t note = wait->begun + TSHI_UV_BLOCKED_MS * TSHI_UV_MS;
        wait->noted = now >= note; /* blocked for 20 ms: report it */
        if (wait->noted)
            tshi_uv_note_blocked(wait->op);
        else
            until = tshi_uv_min(until, note);
    }
    tshi_uv_watch_links(world);
    uv_update_time(&world->loop); /* the timer counts from libuv's cached time: update that */
    (void)uv_timer_start(&world->timer, tshi_uv_timer_event,
                         (uint64_t)((until - now) / TSHI_UV_MS + 1), 0); /* in ms, rounded up */
    if (!tshi_uv_over(wait)) (void)uv_run(&world->loop, UV_RUN_ONCE); /* sleeps, handles events */
}

/* Pauses between two polls. Offers the core to another thread, which the awaited rank may run on,
 * on every 32nd poll, or on each if some ranks are reached by sockets or there are more ranks than
 * cores. */
static void tshi_uv_pause(const tsh_uv_world *world, int spins) {
    if (!world->world_group->whole || world->spins < 32 || spins % 32 == 0) {
        (void)sched_yield();
        return;
    }
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause(); /* frees the core's resources for its other hardware thread */
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* Waits until op is complete or, if op is NULL, until the group is connected; or until the world
 * fails. Returns TSH_OK or the world's error. */
static tsh_result tshi_uv_wait_for(tshi_uv_group *group, tshi_uv_op *op) {
    tsh_uv_world *world = group->world;
    tshi_uv_waiting wait = {group, op, 0, 0, 0};
    int asleep = 0;           /* 1: this rank's segment says that it sleeps */
    int spins = 0, turns = 0; /* spins: rounds without progress in a row; turns: all rounds */
    wait.deadline = op ? op->deadline : tshb_deadline(0, world->timeout);
    while (!tshi_uv_over(&wait)) {
        int moved = tshi_uv_advance(world);
        if (tshi_uv_over(&wait)) break;
        if (++turns % 64 == 0 && tsh_now() >= wait.deadline) tshi_uv_late(group, op);
        if (moved) {
            spins = 0;
        } else if (spins++ < world->spins) { /* polls a little before it sleeps */
            tshi_uv_pause(world, spins);
            continue;
        } else if (asleep) { /* no progress since tshi_uv_shm_sleeps(world, 1): sleeps */
            tshi_uv_nap(&wait);
        }
        asleep = !moved && !asleep;
        tshi_uv_shm_sleeps(world, asleep);
        if (asleep) tshi_uv_board_look(world);
    }
    tshi_uv_shm_sleeps(world, 0);
    if (wait.noted) tshi_uv_unblock(world);
    return tshi_uv_failed(world);
}

/* ========================================================================== */
/* >>uv-ops                                          MARK: - uv-ops (private) */
/* The eight functions of the backend (tsh_comm_ops): start, wait, test,      */
/* progress, status, abort, split and close. The caller's thread calls them;  */
/* only abort may come from any thread.                                       */
/* Needs: >>uv-start >>uv-wait.                                               */
/* ========================================================================== */

static tshi_uv_group *tshi_uv_group_of(const tsh_comm *comm) { /* Returns the comm's group. */
    return (tshi_uv_group *)comm->impl;
}

/* Returns the operation's slot for a request; the request is the slot's index plus 1. */
static tshi_uv_op *tshi_uv_op_of(tshi_uv_group *group, tsh_req req) {
    return &group->op[(req - 1) % TSHI_UV_OPS];
}

/* Waits for an operation, then frees its slot. Returns TSH_OK or the world's error. */
static tsh_result tshi_uv_finish(tshi_uv_op *op) {
    tsh_result result = tshi_uv_wait_for(op->group, op);
    if (result != TSH_OK) tshi_uv_withdraw(op->group->world);
    op->used = 0; /* the slot is free again */
    op->group->active--;
    return result;
}

/* Starts a collective. *req: the request, 0 after an error. */
static tsh_result tshi_uv_start(tsh_comm *comm, const tsh_coll *coll, tsh_req *req) {
    tshi_uv_group *group = tshi_uv_group_of(comm);
    tsh_result result = tshi_uv_failed(group->world); /* a failed world starts nothing */
    tshi_uv_op *op = NULL;
    *req = 0; /* 0: no request */
    if (result == TSH_OK) result = tshi_uv_launch(group, coll, &op);
    if (result == TSH_OK) *req = (tsh_req)(op - group->op) + 1; /* index plus 1: 0 means none */
    return result;
}

static tsh_result tshi_uv_wait(tsh_comm *comm, tsh_req req) { /* Waits until req is complete. */
    return tshi_uv_finish(tshi_uv_op_of(tshi_uv_group_of(comm), req));
}

/* Sets *done to 1 if req is complete, else to 0. Makes progress first, but does not wait. */
static tsh_result tshi_uv_test(tsh_comm *comm, tsh_req req, int *done) {
    tshi_uv_group *group = tshi_uv_group_of(comm);
    tshi_uv_op *op = tshi_uv_op_of(group, req);
    tsh_result result;
    if (!tshi_uv_advance(group->world)) tshi_uv_board_look(group->world);
    result = tshi_uv_failed(group->world);
    *done = result != TSH_OK || op->pending == 0; /* an error completes a request, too */
    if (!*done && tsh_now() >= op->deadline) tshi_uv_late(group, op);
    if (result != TSH_OK) tshi_uv_withdraw(group->world);
    return result;
}

static void tshi_uv_progress(tsh_comm *comm) { /* Moves data while the caller computes. */
    (void)tshi_uv_advance(tshi_uv_group_of(comm)->world);
}

/* Returns the code of the world's error (TSH_OK: none), and fills *error, if error is not NULL. */
static tsh_result tshi_uv_status(tsh_comm *comm, tsh_error *error) {
    tsh_uv_world *world = tshi_uv_group_of(comm)->world;
    tsh_result failed = tshi_uv_failed(world);
    /* world->error is complete before tshi_uv_failed returns its code */
    if (failed != TSH_OK && error) *error = world->error;
    return failed;
}

/* Reports `why` as an error of this rank or of why->rank. Does not wait for the coordinator, which
 * decides on one error for all ranks. */
static void tshi_uv_abort(tsh_comm *comm, const tsh_error *why) {
    tsh_uv_world *world = tshi_uv_group_of(comm)->world;
    tshi_uv_report_error(world, TSHI_UV_ABORT, 0, 0, why->code,
                         why->rank < 0 ? world->rank : why->rank, "%s", why->message);
}

/* ---- splitting a group by colors ---- */

typedef struct tshi_uv_ticket { /* What each rank sends to all others in a split. */
    /* color, key: of tsh_comm_split; port: TCP port on which this rank listens, 0: none */
    int32_t color, key, port;
    uint64_t id; /* id of the new group, used if this rank is the lowest of its color */
} tshi_uv_ticket;

/* Returns a new, unconnected group of the ranks of this rank's color. NULL: no memory. */
static tshi_uv_group *tshi_uv_color_group(tshi_uv_group *parent, const tshi_uv_ticket *tickets) {
    int color = tickets[parent->rank].color, n, leader = 0; /* leader: lowest rank of the color */
    /* order[i]: rank in the parent of member i of the new group */
    int *order = (int *)calloc((size_t)parent->size, sizeof *order);
    tshi_uv_group *group;
    if (!order) return NULL;
    n = tshb_split_order(tickets, sizeof *tickets, parent->size, color, order);
    while (tickets[leader].color != color) leader++;
    /* this rank's place in the group, here 0, is set in the loop */
    group = tshi_uv_group_new(parent->world, tickets[leader].id, 0, n);
    for (int i = 0; group && i < n; i++) {
        group->ranks[i] = parent->ranks[order[i]]; /* world rank of member i */
        group->ports[i] = tickets[order[i]].port;  /* port on which member i listens */
        if (order[i] == parent->rank) group->rank = i;
    }
    free(order);
    return group;
}

/* Enters a group into the world's list and makes *out its comm. */
static void tshi_uv_add_group(tshi_uv_group *group, const tsh_comm_ops *ops, tsh_comm *out) {
    tsh_uv_world *world = group->world;
    uv_mutex_lock(&world->lock);
    group->next = world->groups;
    world->groups = group;
    uv_mutex_unlock(&world->lock);
    world->open++; /* number of open groups; the world closes with the last */
    *out = tshb_comm_make(ops, group, group->rank, group->size, group->id);
}

/* All-gathers the tickets (color, key, port, id) of a split over the group that is split. On
 * entry, tickets[group->rank] is this rank's own; the others are overwritten. */
static tsh_result tshi_uv_trade(tshi_uv_group *group, tshi_uv_ticket *tickets) {
    tsh_coll coll = tsh_coll_make(TSH_SPLIT, TSH_F32);
    tsh_result result;
    tshi_uv_op *op = NULL;
    coll.count = (int64_t)sizeof *tickets; /* bytes of a ticket */
    coll.send = &tickets[group->rank];     /* this rank's ticket */
    coll.recv = tickets;                   /* all tickets, by rank */
    result = tshi_uv_launch(group, &coll, &op);
    return result == TSH_OK ? tshi_uv_finish(op) : result;
}

/* Lets the control thread make a new group's connections, and waits for that. Takes over
 * `listener`, this rank's listening socket. */
static tsh_result tshi_uv_link_up(tshi_uv_group *group, int listener) {
    tsh_uv_world *world = group->world;
    tsh_result result;
    group->listener = listener;
    if (group->size == 1) { /* there is no other member */
        tshi_uv_close_fd(&group->listener);
        return TSH_OK;
    }
    tshi_uv_shm_publish(group); /* the other members look for this rank's rows later */
    uv_mutex_lock(&world->lock);
    world->requested = group; /* the control thread then connects it */
    uv_mutex_unlock(&world->lock);
    (void)uv_async_send(&world->wake_control);
    result = tshi_uv_wait_for(group, NULL);
    if (result != TSH_OK) return result;
    tshi_uv_shm_link(group);
    tshi_uv_find_hosts(group);
    return TSH_OK;
}

/* Called by all ranks of comm: makes *out the comm of the ranks of this rank's color. A rank with
 * color < 0 gets no comm. */
static tsh_result tshi_uv_split(tsh_comm *comm, int color, int key, tsh_comm *out) {
    tshi_uv_group *parent = tshi_uv_group_of(comm), *group = NULL;
    tsh_uv_world *world = parent->world;
    tsh_result result = tshi_uv_failed(world);
    tshi_uv_ticket *tickets;
    tshi_uv_address at = world->own; /* the address of the world's listener */
    /* alone: 1 if no connections are needed */
    int alone = color < 0 || parent->size == 1, listener = -1;
    if (result != TSH_OK) return result;
    tshi_uv_set_port(&at, 0); /* the system picks a port */
    if (!alone) listener = tshi_uv_listen(&at);
    if (!alone && (listener < 0 || !tshi_uv_end_of(listener, 0, &at)))
        return tshi_uv_cannot(world, TSH_ERR_IO, "join a group", tshi_uv_why(errno));
    tickets = (tshi_uv_ticket *)calloc((size_t)parent->size, sizeof *tickets);
    if (tickets) {
        uint64_t id = 2 + world->ids++ * (uint64_t)world->size + (uint64_t)world->rank;
        tshi_uv_ticket mine = {color, key, alone ? 0 : tshi_uv_port(&at), out->id | id};
        tickets[parent->rank] = mine; /* of a color, only the lowest rank's id is used */
        result = tshi_uv_trade(parent, tickets);
        if (result == TSH_OK && color >= 0) group = tshi_uv_color_group(parent, tickets);
    }
    if (!tickets || (result == TSH_OK && color >= 0 && !group))
        result = tshi_uv_cannot(world, TSH_ERR_MEMORY, "join a group", "no memory");
    free(tickets);
    if (!group) { /* an error, or color < 0 */
        tshi_uv_close_fd(&listener);
        return result;
    }
    tshi_uv_add_group(group, comm->ops, out);
    result = tshi_uv_link_up(group, listener); /* waits until all members are connected */
    if (result != TSH_OK) tsh_comm_close(out);
    return result;
}

/* ---- closing a group, and the world with the last one ---- */

static void tshi_uv_world_free(tsh_uv_world *world) { /* Frees a world whose loops are closed. */
    if (!world) return;
    tshi_uv_shm_end(world);
    free(world->peer);
    free(world->members);
    free(world->search);
    sodium_memzero(world->secret, sizeof world->secret); /* erases the key from memory */
    sodium_memzero(world->mesh, sizeof world->mesh);
    sodium_memzero(world->spare, sizeof world->spare);
    free(world);
}

/* Closes one handle of an event loop: callback of uv_walk. */
static void tshi_uv_close_handle(uv_handle_t *handle, void *unused) {
    (void)unused;
    if (!uv_is_closing(handle)) uv_close(handle, NULL);
}

/* Closes both event loops and frees the world. The control thread must have ended. */
static void tshi_uv_world_end(tsh_uv_world *world) {
    tshi_uv_unwatch(&world->bell);
    for (int i = 0; i < 2; i++) {
        uv_loop_t *loop = i ? &world->loop : &world->control;
        uv_walk(loop, tshi_uv_close_handle, NULL);
        (void)uv_run(loop, UV_RUN_DEFAULT); /* ends when all handles are closed */
        (void)uv_loop_close(loop);
    }
    uv_cond_destroy(&world->changed);
    uv_mutex_destroy(&world->lock);
    tshi_uv_world_free(world);
}

/* Closes a group. With the last one the world shuts down: the control thread sends BYE to all peers
 * and ends, and the world is freed. */
static void tshi_uv_close(tsh_comm *comm) {
    tshi_uv_group *group = tshi_uv_group_of(comm), **at;
    tsh_uv_world *world = group->world;
    char name[TSHI_UV_NAME];
    if (group->active) tshi_uv_withdraw(world);
    if (group->active && tshi_uv_failed(world) == TSH_OK)
        tshi_uv_report_error(world, TSHI_UV_ABORT, 0, 0, TSH_ERR_LOST, world->rank,
                             "rank %d closed %s before it waited for its requests", world->rank,
                             tshb_group_text(group->id, name, sizeof name));
    uv_mutex_lock(&world->lock);
    /* removes the group from the list */
    for (at = &world->groups; *at != group;) at = &(*at)->next;
    *at = group->next;
    uv_mutex_unlock(&world->lock);
    if (tshi_uv_failed(world) == TSH_OK) {
        tshi_uv_group_free(group);
    } else { /* the control thread may still be connecting this group */
        group->next = world->ended;
        world->ended = group; /* freed with the world */
    }
    comm->impl = NULL;
    if (--world->open) return;       /* other groups are still open */
    TSHI_UV_PUT(&world->leaving, 1); /* tshi_uv_on_turn begins the shutdown */
    (void)uv_async_send(&world->wake_control);
    (void)uv_thread_join(&world->thread); /* waits for the control thread to end */
    while ((group = world->ended) != NULL) {
        world->ended = group->next;
        tshi_uv_group_free(group);
    }
    tshi_uv_world_end(world);
}

static const tsh_comm_ops tshi_uv_ops = TSH_COMM_OPS(tshi_uv, "uv",
                                                     TSH_CAP_ORDERED | TSH_CAP_DEATH);

/* ========================================================================== */
/* >>uv-world                                      MARK: - uv-world (private) */
/* Joining a world: settings, memory, sockets and event loops, then the       */
/* control thread, which makes all connections while the caller waits. Also   */
/* tsh_uv_open and the runner, tsh_uv_run.                                    */
/* Needs: >>uv-settings >>uv-control >>uv-ops.                                */
/* ========================================================================== */

/* Allocates the arrays with one entry per rank. Returns 0 if memory is lacking. */
static int tshi_uv_world_alloc(tsh_uv_world *world) {
    size_t n = (size_t)world->size;
    world->peer = (tshi_uv_peer *)calloc(n, sizeof *world->peer);
    /* n + 1 lists with room for n ranks: a list for each peer, and one for this rank */
    world->members = (int *)calloc((n + 1) * n, sizeof *world->members);
    world->search = (tshb_coll_search *)calloc(n, sizeof *world->search);
    /* 1: id of the world's group */
    world->world_group = tshi_uv_group_new(world, 1, world->rank, world->size);
    world->near = (tshi_uv_near *)calloc(n, sizeof *world->near);
    if (!world->peer || !world->members || !world->search || !world->world_group || !world->near)
        return 0;
    for (int r = 0; r < world->size; r++) {
        world->peer[r].world = world;
        world->peer[r].rank = r;
        world->peer[r].fd = -1;
        world->near[r].bell = -1;
        world->peer[r].blocked.member = world->members + (size_t)r * n;
        world->world_group->ranks[r] = r;
    }
    world->shm_sizes[0] = world->size;
    world->blocked.member = world->members + n * n; /* the last list is for this rank */
    return 1;
}

/* Checks that the limit of descriptors (ulimit -n) suffices. Unauthenticated connections get half
 * of those that the world does not need, so that the program keeps some. */
static tsh_result tshi_uv_enough_descriptors(tsh_uv_world *world, tsh_error *error) {
    struct rlimit limit;
    int need = tshi_uv_descriptors(world->size);
    int64_t half;
    world->unproven_limit = TSHI_UV_UNPROVEN; /* the value if descriptors have no limit */
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return TSH_OK;
    if (limit.rlim_cur < (rlim_t)need)
        return tsh_error_set(error, TSH_ERR_IO, world->rank,
                             "rank %d may open %lu descriptors, but a world of %d ranks needs "
                             "about %d (ulimit -n)",
                             world->rank, (unsigned long)limit.rlim_cur, world->size, need);
    half = (int64_t)(limit.rlim_cur - (rlim_t)need) / 2; /* the other half is left to the program */
    world->unproven_limit = (int)tshi_uv_min(half, TSHI_UV_UNPROVEN);
    /* the limit is never below TSHI_UV_FEW */
    if (world->unproven_limit < TSHI_UV_FEW) world->unproven_limit = TSHI_UV_FEW;
    return TSH_OK;
}

/* Rank 0: listens on the first address of its host that works, or on the socket it was given. */
static tsh_result tshi_uv_rank0_listens(tsh_uv_world *world, tsh_error *error) {
    tshi_uv_address list[TSHI_UV_ADDRESSES];
    const char *why = "is no listening socket"; /* the end of the error's sentence */
    const char *bound = world->bind_host[0] ? world->bind_host : world->host;
    /* given: 1 if TSHARD_LISTENER or tsh_uv_desc.listener gave a socket */
    int given = world->listener >= 0;
    int n = !given ? tshi_uv_resolve(bound, world->port, 0, list, &why) /* n: number of addresses */
                   : tshi_uv_prepare_fd(world->listener) &&
                         tshi_uv_end_of(world->listener, 0, &list[0]);
    for (int i = 0; i < n && (given || world->listener < 0); i++) {
        if (tshi_uv_need_key(world, &list[i], error) != TSH_OK) return error->code;
        /* -1: failed, the next address is tried */
        if (!given) world->listener = tshi_uv_listen(&list[i]);
        if (world->listener < 0) why = tshi_uv_why(errno);
    }
    if (n && world->listener >= 0 && tshi_uv_end_of(world->listener, 0, &world->own)) {
        world->port = tshi_uv_port(&world->own); /* a given socket may have another port */
        return TSH_OK;
    }
    if (given) world->listener = -1; /* the given socket stays open */
    return tsh_error_set(error, TSH_ERR_IO, 0, "rank 0 cannot listen on %s port %d: %s; set %s",
                         bound, world->port, why,
                         given ? "TSHARD_LISTENER to a listening socket, or unset it"
                               : "TSHARD_PORT to a free port, TSHARD_HOST (or TSHARD_BIND) to an "
                                 "address of this host");
}

/* Prepares to join before the control thread runs: rank 0 listens, the others look up its host. */
static tsh_result tshi_uv_find_rank0(tsh_uv_world *world, tsh_error *error) {
    tshi_uv_address list[TSHI_UV_ADDRESSES];
    const char *why;
    if (tshi_uv_enough_descriptors(world, error) != TSH_OK) return error->code;
    if (world->rank == 0) return tshi_uv_rank0_listens(world, error);
    world->listener = -1; /* no listener yet: tshi_uv_joined opens it */
    world->addresses = tshi_uv_resolve(world->host, world->port, 0, world->address, &why);
    if (!world->addresses)
        return tsh_error_set(error, TSH_ERR_IO, world->rank,
                             "rank %d cannot find rank 0's host \"%.100s\": %s (%s)", world->rank,
                             world->host, why, world->host_from);
    if (world->bind_host[0]) {
        if (!tshi_uv_resolve(world->bind_host, 0, 0, list, &why))
            return tsh_error_set(error, TSH_ERR_ARGUMENT, world->rank,
                                 "rank %d: TSHARD_BIND is \"%.100s\": %s", world->rank,
                                 world->bind_host, why);
        world->own = list[0]; /* the address on which this rank will listen */
    }
    /* returns an error if rank 0's address needs a key and none is set */
    return tshi_uv_need_key(world, &world->address[0], error);
}

/* Starts the control thread with all signals blocked: the program's own threads get them. */
static tsh_result tshi_uv_start_control(tsh_uv_world *world, tsh_error *error) {
    sigset_t all, before;
    int failed;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_BLOCK, &all, &before);
    /* the new thread inherits the signal mask */
    failed = uv_thread_create(&world->thread, tshi_uv_main, world);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL); /* restores this thread's mask */
    return failed ? tsh_error_set(error, TSH_ERR_IO, world->rank, "the system refused a thread")
                  : TSH_OK;
}

enum { TSHI_UV_LOOPS_NEED = 64 << 10 }; /* bytes of memory, more than libuv needs for two loops */

/* Makes both event loops with their handles, and the lock and condition between the threads. */
static tsh_result tshi_uv_open_loops(tsh_uv_world *world, tsh_error *error) {
    /* room: 1 if there is enough memory for both loops */
    int room = tshi_uv_has_memory(TSHI_UV_LOOPS_NEED);
    int locked = uv_mutex_init(&world->lock) == 0, noticed = uv_cond_init(&world->changed) == 0;
    int why = locked && noticed && room ? uv_loop_init(&world->loop) : UV_ENOMEM, opened = why == 0;
    if (opened) why = uv_loop_init(&world->control);
    if (why != 0) {
        if (opened) (void)uv_loop_close(&world->loop);
        if (noticed) uv_cond_destroy(&world->changed);
        if (locked) uv_mutex_destroy(&world->lock);
        return tsh_error_set(error, TSH_ERR_IO, world->rank,
                             "rank %d has no event loop: %s (%d descriptors are needed: ulimit -n)",
                             world->rank, uv_strerror(why), tshi_uv_descriptors(world->size));
    }
    (void)uv_timer_init(&world->loop, &world->timer);             /* limits the caller's sleep */
    (void)uv_async_init(&world->loop, &world->wake_caller, NULL); /* ends the caller's sleep */
    (void)uv_timer_init(&world->control, &world->tick);   /* limits the control thread's sleep */
    (void)uv_prepare_init(&world->control, &world->turn); /* runs before every sleep */
    (void)uv_async_init(&world->control, &world->wake_control, tshi_uv_on_request);
    world->turn.data = world->wake_control.data = world;
    (void)uv_prepare_start(&world->turn, tshi_uv_on_turn);
    return TSH_OK;
}

/* Counts the ranks of this host and sets world->spins, how many times a wait polls before it
 * sleeps: fewer if there are more ranks than cores, since the awaited rank may need this core. */
static void tshi_uv_count_local(tsh_uv_world *world) {
    const tshi_uv_group *group = world->world_group;
    int local = 1;                        /* number of ranks on this host */
    for (int r = 0; r < group->size; r++) /* link[r]: the connection for collectives */
        if (group->link[r].fd >= 0) local += tshi_uv_is_local(group->link[r].fd);
    world->spins = local > sysconf(_SC_NPROCESSORS_ONLN) ? 16 : 2000; /* polls before a sleep */
}

/* Callback when another rank rings this one's bell, which ends its sleep. Empties the bell. */
static void tshi_uv_bell_event(uv_poll_t *poll, int status, int events) {
    uint64_t count;
    (void)status;
    (void)events;
    if (read(*(const int *)poll->data, &count, sizeof count) < 0) return; /* the bell was empty */
}

/* Called once the world is complete: lets the ranks of this host share memory. */
static void tshi_uv_begin(tsh_uv_world *world) {
    tshi_uv_near *own = &world->near[world->rank];
    tshi_uv_count_local(world);
    tshi_uv_shm_link(world->world_group);
    tshi_uv_find_hosts(world->world_group);
    if (own->base)
        world->bell = tshi_uv_watch(&world->loop, own->bell, UV_READABLE, &own->bell,
                                    tshi_uv_bell_event);
    if (own->base && !world->bell)
        tshi_uv_report_error(world, TSHI_UV_ABORT, 0, 0, TSH_ERR_MEMORY, world->rank,
                             "rank %d: no memory to watch for ranks of its host", world->rank);
}

/* Waits until the world has formed or failed. Returns TSH_OK or the world's error. */
static tsh_result tshi_uv_await_world(tsh_uv_world *world, tsh_error *error) {
    tsh_result failed;
    uv_mutex_lock(&world->lock);
    while (world->forming && tshi_uv_failed(world) == TSH_OK)
        uv_cond_wait(&world->changed, &world->lock); /* woken by tshi_uv_completed or _fail */
    failed = tshi_uv_failed(world);
    if (failed != TSH_OK) *error = world->error;
    uv_mutex_unlock(&world->lock);
    return failed;
}

/* Opens the world, starts the control thread, and waits until the world is complete. Owns `world`.
 * *out: the comm of all ranks. */
static tsh_result tshi_uv_join(tsh_uv_world *world, tsh_comm *out, tsh_error *error) {
    int opened; /* 1: the event loops exist */
    tsh_result result;
    randombytes_buf(&world->process, sizeof world->process);
    world->process |= 1;                     /* not 0, which stands for no process */
    world->forming = 1;                      /* tshi_uv_completed sets it to 0 */
    world->due = tsh_now() + world->timeout; /* time at which joining times out */
    world->notice_at = tsh_now() + world->notice;
    result = tshi_uv_world_alloc(world)
                 ? tshi_uv_find_rank0(world, error)
                 : tsh_error_set(error, TSH_ERR_MEMORY, world->rank,
                                 "rank %d: no memory for its world", world->rank);
    opened = result == TSH_OK && tshi_uv_open_loops(world, error) == TSH_OK;
    if (opened) tshi_uv_shm_open(world);
    if (opened && world->near[world->rank].base) tshi_uv_heap_open(world);
    if (!opened || tshi_uv_start_control(world, error) != TSH_OK) {
        tshi_uv_group_free(world->world_group);
        tshi_uv_close_fd(&world->listener);
        if (opened)
            tshi_uv_world_end(world);
        else
            tshi_uv_world_free(world);
        return error->code;
    }
    tshi_uv_add_group(world->world_group, &tshi_uv_ops, out);
    result = tshi_uv_await_world(world, error);
    if (result != TSH_OK)
        tsh_comm_close(out); /* ends the control thread; frees the world */
    else
        tshi_uv_begin(world);
    return result;
}

/* Opens /dev/null as stdin, stdout and stderr, if they are closed, as in a daemon. Else sockets
 * would get their numbers, libuv would abort when it closes them, and what the program prints would
 * go to a peer. The opened descriptors stay open. Returns 0 if the system refused (errno). */
static int tshi_uv_fill_standard(void) {
    for (int fd = 0; fd < 3; fd++) /* open() takes the lowest free number, which is fd */
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) < 0) return 0;
    return 1;
}

/* Reads the settings and joins the world. With one rank, no socket is opened: *out is all 0 but its
 * size, 1. */
static tsh_result tshi_uv_open(const tsh_uv_desc *desc, tsh_comm *out, tsh_error *error) {
    tsh_uv_world *world;
    memset(out, 0, sizeof *out);
    world = (tsh_uv_world *)calloc(1, sizeof *world);
    if (!world) {
        (void)tsh_error_set(error, TSH_ERR_MEMORY, -1, "no memory for a world");
        return TSH_ERR_MEMORY;
    }
    world->logger = desc->logger;
    world->segment = world->shm_listener = -1; /* neither is open yet */
    world->crc_wide = tshi_uv_crc_is_wide();
    if (!world->crc_wide) tshi_uv_crc_tables(world->crc_table);
    if (!tshi_uv_fill_standard())
        (void)tsh_error_set(error, TSH_ERR_IO, -1,
                            "stdin, stdout or stderr is closed, and /dev/null cannot take its "
                            "place: %s",
                            tshi_uv_why(errno));
    else if (sodium_init() < 0)
        (void)tsh_error_set(error, TSH_ERR_IO, -1, "libsodium finds no random numbers");
    else if (tshi_uv_settings(desc, world, error) == TSH_OK && world->size > 1)
        return tshi_uv_join(world, out, error);
    tshi_uv_world_free(world); /* after an error, or for a world of one rank */
    if (error->code == TSH_OK) out->size = 1;
    return error->code;
}

/* Copies `error`, the result of opening a world, to *place, if that is not NULL, and logs it if it
 * is an error. */
static void tshi_uv_not_open(tsh_error *place, const tsh_logger *logger, const char *function,
                             const tsh_error *error) {
    if (place) *place = *error;
    if (error->code != TSH_OK)
        tsh_log_message(logger, "%s: %s (%s)", function, error->message,
                        tsh_result_name(error->code));
}

TSH_API tsh_result tsh_uv_open(const tsh_uv_desc *desc, tsh_comm *out) {
    tsh_uv_desc none;
    tsh_error error;
    memset(&none, 0, sizeof none);
    memset(&error, 0, sizeof error);
    if (!desc) desc = &none; /* all settings come from the environment */
    if (out)
        (void)tshi_uv_open(desc, out, &error);
    else
        (void)tsh_error_set(&error, TSH_ERR_ARGUMENT, -1, "out is NULL");
    tshi_uv_not_open(desc->error, desc->error ? NULL : &desc->logger, "tsh_uv_open", &error);
    return error.code;
}

TSH_API tsh_allocator tsh_uv_allocator(const tsh_comm *comm) {
    tsh_allocator allocator = {NULL, NULL}; /* malloc */
    if (comm && comm->impl && comm->ops == &tshi_uv_ops)
        allocator.user = tshi_uv_group_of(comm)->world->heap;
    if (allocator.user) allocator.allocate = tshi_uv_heap_allocate;
    return allocator;
}

TSH_API int tsh_uv_run_built(int version, size_t real, size_t size, const tsh_uv_desc *uv,
                             const tsh_desc *desc, int (*fn)(tsh_ctx *ctx, void *user),
                             void *user) {
    tsh_uv_desc join; /* copy of *uv; all 0 if uv is NULL */
    tsh_desc with;    /* copy of *desc; all 0 if desc is NULL */
    tsh_comm comm;
    tsh_error error;
    if (!tshb_same_build("tsh_uv_run", version, real, size, desc)) return 1;
    memset(&join, 0, sizeof join);
    memset(&with, 0, sizeof with);
    memset(&error, 0, sizeof error);
    if (uv) join = *uv;
    if (desc) with = *desc;
    if (!join.logger.log) join.logger = with.logger; /* if one has no logger, it uses the other's */
    if (!with.logger.log) with.logger = join.logger;
    if (fn)
        (void)tshi_uv_open(&join, &comm, &error);
    else
        (void)tsh_error_set(&error, TSH_ERR_ARGUMENT, -1, "fn is NULL");
    tshi_uv_not_open(join.error, &with.logger, "tsh_uv_run", &error);
    if (error.code != TSH_OK) return 1;
    if (!with.allocator.allocate) with.allocator = tsh_uv_allocator(&comm);
    return tsh_run_on(&comm, &with, fn, user, join.error); /* tsh_run_on logs its errors */
}

TSH_API int(tsh_uv_run)(const tsh_uv_desc *uv, const tsh_desc *desc,
                        int (*fn)(tsh_ctx *ctx, void *user), void *user) {
    return tsh_uv_run_built(1, 0, 0, uv, desc, fn, user);
}

#undef TSHI_UV_GET
#undef TSHI_UV_PUT
#undef TSHI_UV_SECOND
#undef TSHI_UV_MS
#undef TSHI_UV_NOSIGNAL
#undef TSHI_UV_VERSION
#undef TSHI_UV_DAMAGED_TEXT
#undef TSHI_UV_CHECK_OF
#undef TSHI_UV_WIDE
#undef TSHI_UV_SHM

#ifdef __cplusplus
}
#endif
#endif
