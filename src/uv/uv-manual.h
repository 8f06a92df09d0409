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
