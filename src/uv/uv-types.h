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
