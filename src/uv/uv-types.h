/* ========================================================================== */
/* >>uv-types                                      MARK: - uv-types (private) */
/* The structs of a world. Each process has two threads: the caller's thread  */
/* moves data, on two data connections per peer and group; the control thread */
/* makes connections, sends heartbeats and decides on errors, on one control  */
/* connection per peer. What both use is guarded by world->lock, or atomic.   */
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

#include <sodium.h> /* HMAC-SHA256, random nonces */
#include <uv.h>

#if defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h> /* CRC32C */
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define TSHI_UV_GET(place)        __atomic_load_n((place), __ATOMIC_SEQ_CST)
#define TSHI_UV_PUT(place, value) __atomic_store_n((place), (value), __ATOMIC_SEQ_CST)

#define TSHI_UV_SECOND  INT64_C(1000000000) /* all int64_t times and durations are in ns */
#define TSHI_UV_MS      INT64_C(1000000)

enum {
    TSHI_UV_OPS = 64,            /* operations in flight in one group: the limit of a comm */
    TSHI_UV_RECORDS = 128,       /* latest collectives remembered, to answer the coordinator */
    TSHI_UV_COUNTS = 16,         /* counts of a call that are remembered, to describe it */
    TSHI_UV_IO_SPANS = 64,       /* contiguous spans of memory per system call, at most */
    TSHI_UV_IO_BYTES = 1 << 20,  /* bytes of payload per system call, at most */
    TSHI_UV_RANKS = 1024,        /* ranks in a world: all addresses fit one control message */
    TSHI_UV_NAME = 32,           /* bytes of a group's name */
    TSHI_UV_UNPROVEN = 1024,     /* largest limit of unauthenticated connections */
    TSHI_UV_FEW = 8,             /* smallest limit of unauthenticated connections */
    TSHI_UV_ACCEPTS = 64,        /* connections accepted per event of the listener, at most */
    TSHI_UV_NEAR = 512 << 10,    /* SO_SNDBUF, in bytes, between two ranks of one host */
    TSHI_UV_SEGMENT = 512 << 10, /* bytes of a chunk that go around a ring at a time */
    TSHI_UV_WINDOW = 1 << 20     /* bytes of a ring sum's scratch; more than a segment */
};

/* The header of a frame on a data connection: before the bytes of each collective and of each
 * message. It is sent as it is in memory, in the byte order that all ranks share: the handshake
 * refuses another one, in which the job's number (tshi_uv_settings) differs. */
typedef struct tshi_uv_head {
    uint64_t group,        /* id of the group */
        seq,               /* number of the collective in the group; of the message in its pair */
        digest, bytes;     /* hash of the call (of messages: 0); size of the payload that follows */
    int64_t count;         /* elements */
    int32_t tag;           /* of a message */
    uint8_t kind,          /* tsh_coll_kind; TSH_RECV: a "clear" */
        dtype, pad[6];     /* tsh_dtype of a message; the others are 0 */
    uint32_t check;        /* checksum of all fields before; 0 where link->checks is 0 */
} tshi_uv_head;

/* What a group remembers of a collective that it started, to compare and to describe it. */
typedef struct tshi_uv_record {
    tsh_coll coll;   /* the call; its pointers are not valid */
    uint64_t digest; /* hash of the call: the same on all ranks that made the same call */
    int counts;      /* number of entries of send_counts, and of recv_counts */
    int64_t send_counts[TSHI_UV_COUNTS], recv_counts[TSHI_UV_COUNTS]; /* elements, by rank */
} tshi_uv_record;

/* How much of one frame has been sent to, or received from, one peer. Where link->checks is 1, the
 * payload is cut into blocks (tshi_uv_block), each followed by a checksum of 4 bytes. */
typedef struct tshi_uv_stream {
    int64_t total, done; /* bytes of payload: in all; moved so far */
    int64_t block, good; /* where the block being moved ends; where the last whole one did. Received
                          * bytes are used up to `good` only: their checksum was right */
    int64_t summed;      /* bytes of payload that `check` covers: from the first one on */
    size_t head;         /* bytes of the header sent so far; incoming: only set from this rank */
    size_t tail;         /* bytes of the block's checksum moved so far */
    uint32_t check, received; /* checksum of the payload; the one that the peer has sent */
} tshi_uv_stream;

/* Between which ranks the bytes of a collective are sent. */
typedef enum tshi_uv_algorithm {
    TSHI_UV_DIRECT, /* each rank sends to each other rank */
    TSHI_UV_RING,   /* each rank sends to the next one, summing or gathering on the way */
    TSHI_UV_PIECES, /* each rank sums a chunk that it gets from each, and sends the sum to each */
    TSHI_UV_CHAIN,  /* broadcast: each rank forwards to the next one */
    TSHI_UV_STAR,   /* broadcast: root sends to each other rank */
    TSHI_UV_MESSAGE /* SEND, RECV, SENDRECV */
} tshi_uv_algorithm;

typedef struct tshi_uv_group tshi_uv_group;

/* A slot for an operation (collective or message) in flight. Used by the caller's thread only. */
typedef struct tshi_uv_op {
    tshi_uv_group *group;
    tsh_coll coll; /* the call */
    tshi_uv_algorithm algorithm;
    tshi_uv_head head;        /* sent in front of each frame of a collective */
    int64_t deadline;         /* when the operation has timed out */
    int used;                 /* 1: started, and not waited for yet; 0: the slot is free */
    int pending;              /* number of frames not completely sent or received */
    int64_t ready;            /* RING: bytes of the incoming stream that may be forwarded;
                               * PIECES: bytes of this rank's chunk that are summed */
    tshi_uv_stream *in, *out; /* frames from and to each peer, by rank of the group */
    tshi_uv_stream clear;     /* RECV: the frame that asks the sender for the message */
    uint64_t number[2];       /* [0]: number of the message sent; [1]: of the one received */
    char *scratch;            /* buffer of a sum; stays allocated for the slot's next sum */
    size_t scratch_size;      /* in bytes */
} tshi_uv_op;

/* A queue of operations, in the order in which they use one direction of a connection. */
typedef struct tshi_uv_fifo {
    unsigned char op[TSHI_UV_OPS]; /* ring buffer of indices into group->op */
    unsigned first, used;          /* position of the oldest entry; number of entries */
} tshi_uv_fifo;

/* A data connection to one peer of a group. A pair of ranks has two, for collectives and for
 * messages, so that neither blocks the other. A message is sent only after its receiver has sent a
 * "clear": a header of kind RECV, without payload. Otherwise a message that nobody receives yet
 * would block the clears after it. */
typedef struct tshi_uv_link {
    tshi_uv_group *group;
    int fd, peer;                    /* socket, -1 if peer is this rank; peer's rank in the group */
    int checks;                      /* 1: headers and payload have checksums */
    int confirmed;                   /* control thread: 1 once the peer has sent LINKED */
    tshi_uv_fifo in, out, clears;    /* operations yet to receive; to send; to send a clear */
    tshi_uv_fifo *writing;           /* queue whose first frame is sent in part; NULL: none */
    tshi_uv_head heard;              /* header of the frame that is being received */
    size_t heard_done;               /* bytes of that header received so far */
    uint64_t sends, receives;        /* number of messages started: SENDs; RECVs */
    uint64_t sent, cleared;          /* number of messages begun to be sent; of clears received */
    tshi_uv_head clear[TSHI_UV_OPS]; /* the clears; that of message n is at n % TSHI_UV_OPS */
    int want, polled;                /* libuv events: needed now; those that poll waits for */
    uint64_t wrote, got;             /* atomic: bytes written; bytes read; headers included */
    int awaits;                      /* atomic: 1 if the caller has read all bytes and needs more */
    uint64_t peer_got;               /* control thread: the peer's `got` in its latest AWAIT */
    int64_t peer_got_at;             /* control thread: when that AWAIT arrived */
    int64_t stalled_since;           /* control thread: when peer_got began to lag wrote; 0: not */
    uv_poll_t *poll;                 /* NULL until the caller first sleeps */
} tshi_uv_link;

typedef struct tsh_uv_world tsh_uv_world;

struct tshi_uv_group {
    tsh_uv_world *world;
    tshi_uv_group *next;        /* next of world->groups; guarded by the lock */
    uint64_t id, started;       /* id: the same on all members; number of collectives started */
    int rank, size, active;     /* this rank in the group; members; operations in flight */
    int *ranks;                 /* world rank of each member, by rank of the group */
    tshi_uv_link *link;         /* [r]: collectives with peer r; [size + r]: messages with r */
    tshi_uv_op op[TSHI_UV_OPS]; /* slots; a tsh_req is an index + 1 */
    tshi_uv_stream *streams;    /* memory of op[].in and op[].out */
    /* What was called: collective seq at [seq % TSHI_UV_RECORDS]. Guarded by the lock. */
    tshi_uv_record record[TSHI_UV_RECORDS];
    /* Used by the control thread, once the caller's thread has set world->requested: */
    int listener, missing; /* listening socket, -1: none; connections and LINKED still to come */
    int *ports;            /* port each member listens on for this group; 0: peer->address has it */
    int linked;            /* atomic: 1 once all connections are made; then the caller uses them */
};

/* What a connection is made for. Both ends prove that they know the key and agree on all this. */
typedef struct tshi_uv_hello {
    uint32_t version;         /* TSHI_UV_VERSION of the other end */
    int client, server, size; /* world rank of the client and of the server; number of ranks */
    uint32_t purpose;         /* a tshi_uv_purpose */
    uint64_t group, job;      /* id of the group, 0: none; hash of the job's name */
    uint64_t process;         /* random number of the client's process, not 0 */
    int checks;               /* 1: the client wants checksums. Once both ends are authenticated:
                               * 1 if one of them does */
    unsigned char client_nonce[32], server_nonce[32]; /* random: a handshake cannot be replayed */
} tshi_uv_hello;

enum { TSHI_UV_ADDRESSES = 8 }; /* addresses of one host that are tried, at most */

/* A socket address, IPv4 or IPv6. */
typedef struct tshi_uv_address {
    struct sockaddr_storage storage;
    socklen_t size; /* bytes of storage that are used */
} tshi_uv_address;

/* What an error report is about. A report of a larger kind replaces one of a smaller kind. */
typedef enum tshi_uv_error_kind {
    TSHI_UV_NOTHING,  /* there is no report */
    TSHI_UV_LATE,     /* a collective, or joining, timed out */
    TSHI_UV_SILENT,   /* a rank sends no heartbeat, or a data connection is dead */
    TSHI_UV_CROSSED,  /* ranks wait for each other in a cycle */
    TSHI_UV_MISMATCH, /* ranks called different collectives */
    TSHI_UV_GONE,     /* a connection ended */
    TSHI_UV_DAMAGED,  /* a checksum is wrong */
    TSHI_UV_ABORT     /* a rank reports that it cannot continue itself */
} tshi_uv_error_kind;

/* An error that one rank found, for the coordinator. */
typedef struct tshi_uv_report {
    tshi_uv_error_kind kind;
    uint64_t group, seq; /* collective that the coordinator asks all ranks about; group 0: none */
    tsh_error error;     /* the world's error, if the coordinator decides on this report */
} tshi_uv_report;

/* A rank's answer (TELL) to the coordinator's question (ASK) about one collective of a group. */
typedef struct tshi_uv_answer {
    int told, member,      /* 1 if the rank has answered; 1 if it is in the group */
        started, rank;     /* 1 if it has started the collective; its rank in the group */
    tshi_uv_record record; /* what the rank called, if started */
} tshi_uv_answer;

enum { TSHI_UV_BLOCKED_GROUPS = 64, TSHI_UV_BLOCKED_PAIRS = 256 }; /* entries, at most */

/* What a rank reports when it has waited for 20 ms: its wait, and what it had started by then. */
typedef struct tshi_uv_blocked {
    uint64_t wait;       /* number of the wait; 0: not blocked */
    uint64_t group, seq; /* group of the wait; number of the collective, or of the message */
    int peer;            /* message: world rank that it waits for; -1: it waits in a collective */
    int sends;           /* message: 1 if that rank is to receive it from this one, else 0 */
    char text[160];      /* description of the call */
    int members, groups, pairs; /* number of entries of member; of groups_of; of pairs_of */
    int *member;                /* world ranks of the group; memory of world->members */
    struct {
        uint64_t id, started; /* id of a group; how many collectives the rank has started there */
    } groups_of[TSHI_UV_BLOCKED_GROUPS];
    struct {
        uint64_t group, sends, receives; /* a group; number of SENDs and of RECVs started */
        int peer;                        /* with this world rank */
    } pairs_of[TSHI_UV_BLOCKED_PAIRS];
} tshi_uv_blocked;

/* The state of a peer, as this rank sees it. */
typedef enum tshi_uv_state {
    TSHI_UV_ABSENT, /* no control connection yet */
    TSHI_UV_THERE,  /* connected */
    TSHI_UV_MUTE, /* silent for TSHARD_HEARTBEAT, counts as lost; the connection stays open, so that
                     peer and this rank still receive each other's decision */
    TSHI_UV_LEFT, /* orderly shutdown: it has sent BYE */
    TSHI_UV_LOST  /* its control connection ended without BYE */
} tshi_uv_state;

/* A growing array of bytes, received or to be sent. */
typedef struct tshi_uv_buffer {
    char *data;
    size_t used, room; /* bytes in use; bytes allocated */
} tshi_uv_buffer;

/* A position in bytes that are written or read, field by field. */
typedef struct tshi_uv_cursor {
    unsigned char *at, *end; /* the next field; the end of the bytes */
    int writes, bad;         /* 1: writes, 0: reads; 1 if a field did not fit or is invalid */
} tshi_uv_cursor;

/* Bytes of a control message: length, type and their checksum; at most; checksum of the payload. */
enum { TSHI_UV_MESSAGE_HEAD = 9, TSHI_UV_PAYLOAD = 60000, TSHI_UV_MESSAGE_TAIL = 4 };

/* A control message that is being written. */
typedef struct tshi_uv_outgoing {
    tshi_uv_cursor c; /* over bytes */
    unsigned char bytes[TSHI_UV_MESSAGE_HEAD + TSHI_UV_PAYLOAD + TSHI_UV_MESSAGE_TAIL];
} tshi_uv_outgoing;

/* Times of a recurring event: bytes received, or an acknowledgement. */
typedef struct tshi_uv_pulse {
    int64_t last; /* time of the latest event */
    int64_t back; /* time of the latest event after a silence (tshi_uv_gap): then the network may
                   * just have healed; 0: none yet */
} tshi_uv_pulse;

/* What the control thread knows of a rank. */
typedef struct tshi_uv_peer {
    tsh_uv_world *world;
    int rank;
    tshi_uv_state state;
    int fd, events; /* control connection, -1: none; libuv events that poll waits for */
    uv_poll_t *poll;
    tshi_uv_buffer in, out;  /* bytes received and not yet handled; bytes to be sent */
    tshi_uv_pulse heard;     /* bytes arrived from the peer */
    tshi_uv_pulse acked;     /* its system acknowledged all bytes sent by that time */
    uint64_t sent, mark;     /* bytes sent; `acked` waits until so many are acknowledged, 0: none */
    int64_t marked;          /* when mark was set */
    int reported;            /* 1: it has sent this rank an error report and waits for a decision */
    int used, deaf;          /* 1: it has sent something on this connection; 1: that was damaged, so
                              * that nothing more is read, but this rank still sends */
    uint64_t process;        /* number of the process that dialled this rank; 0: none has yet */
    tshi_uv_address address; /* where it listens */
    int placed, ready;       /* rank 0 only: 1 if address is known; 1 if it has sent READY */
    char name[80];           /* host:port of the control connection */
    /* What the coordinator knows of it: */
    tshi_uv_answer answer;   /* to the latest ASK */
    tshi_uv_blocked blocked; /* its latest BLOCKED message */
    uint64_t asked;          /* number of the wait that it is asked to confirm (CONFIRM); 0: none */
} tshi_uv_peer;

/* What a connection is for. */
typedef enum tshi_uv_purpose {
    TSHI_UV_JOIN,    /* a rank joins the world: its control connection with rank 0 */
    TSHI_UV_CONTROL, /* a control connection between two other ranks */
    TSHI_UV_DATA,    /* collectives of a group */
    TSHI_UV_MESSAGES /* SEND and RECV of a group */
} tshi_uv_purpose;

/* The state of a handshake: the first four are the client's, the others the server's. */
typedef enum tshi_uv_phase {
    TSHI_UV_WAITS,           /* not connected; to be dialled at conn->until */
    TSHI_UV_CONNECTS,        /* connect() is in progress */
    TSHI_UV_AWAITS_GREETING, /* the server sends first */
    TSHI_UV_AWAITS_REPLY,    /* the client's hello has been written */
    TSHI_UV_AWAITS_HELLO,    /* the server hello has been written */
    TSHI_UV_HAS_HELLO,       /* the hello is checked once rank 0's address table is here */
    TSHI_UV_REPLIES          /* the reply is being sent */
} tshi_uv_phase;

/* A connection that is not authenticated yet: dialled by this rank (the client), or accepted. */
typedef struct tshi_uv_conn {
    tsh_uv_world *world;
    struct tshi_uv_conn *next; /* next of world->conns */
    int dialled, attempts;     /* 1: dialled, 0: accepted; number of attempts that failed */
    tshi_uv_address address;   /* where to dial; unused for JOIN */
    int fd;                    /* -1: none */
    int earlier;               /* dialled: socket of an attempt without a valid reply, or -1. Stays
                                * open until this rank is accepted: if the server has accepted the
                                * attempt, its end would tell it that this rank is gone */
    tshi_uv_phase phase;
    uv_poll_t *poll;
    int64_t until; /* WAITS: when to dial; else: when the handshake times out */
    tshi_uv_hello hello;
    unsigned char in[128], out[128];   /* bytes received; bytes to be sent */
    size_t in_used, in_need, out_used; /* bytes in `in`; bytes to wait for; bytes left in `out` */
    int welcome;                       /* server: 1 if the reply accepts the client */
    char name[80];                     /* host:port of the other end */
} tshi_uv_conn;

/* Limits log messages of one kind to one a second. */
typedef struct tshi_uv_log_count {
    int64_t told;   /* when the last one was logged; 0: never */
    int count;      /* number of messages since then */
    char last[256]; /* text of the latest message */
} tshi_uv_log_count;

/* Kinds: refused clients that did not prove the key, or did; unproven servers; number of kinds. */
enum { TSHI_UV_OF_UNPROVEN, TSHI_UV_OF_KEY_HOLDERS, TSHI_UV_OF_SERVERS, TSHI_UV_TALLIES };

struct tsh_uv_world {
    int rank, size, spins;        /* this rank; number of ranks; idle turns before a wait sleeps */
    int64_t timeout, heartbeat;   /* TSHARD_TIMEOUT and TSHARD_HEARTBEAT, in ns */
    int64_t notice;               /* tsh_uv_desc.notice, in ns */
    int checksum;                 /* 1: data is checked; -1: not; 0: beyond loopback */
    int crc_wide;                 /* 1: the processor has an instruction for CRC32C */
    uint32_t crc_table[8][256];   /* else: CRC32C of each byte, 0 to 7 bytes before the end */
    uint64_t job, process;        /* hash of jobname; random, differs between processes */
    unsigned char secret[32],     /* hash of the shared key; all 0: no key */
        token[32],                /* random bytes, which rank 0 sends with the address table */
        mesh[32];                 /* HMAC of token by secret: the key of all connections but JOIN */
    char jobname[300], host[256]; /* TSHARD_JOB; host of rank 0 */
    const char *host_from;        /* name of the setting that gave host */
    int port;                     /* of rank 0 */
    tsh_logger logger;

    /* Used by the caller's thread: */
    uv_loop_t loop;
    uv_timer_t timer;       /* ends the loop's sleep */
    uv_async_t wake_caller; /* the control thread wakes loop */
    int open;               /* number of groups not closed yet */
    uint64_t waits, ids;    /* number of long waits so far; of splits so far */

    /* Used by both threads, under the lock unless a field says otherwise: */
    uv_mutex_t lock;
    uv_cond_t changed;        /* signalled when the world has formed or failed */
    int failed;               /* atomic, a tsh_result; error is valid once this is not TSH_OK */
    int halted;               /* atomic: 1: an error was reported, no data moves */
    tsh_error error;          /* the world's error */
    tshi_uv_group *groups;    /* list of all groups that are not closed */
    tshi_uv_report reported;  /* written by the caller's thread, taken by the control thread */
    tshi_uv_report held;      /* control thread: the gravest report, until a decision comes */
    tshi_uv_blocked blocked;  /* what the caller's thread is blocked on */
    uint64_t last;            /* id of the group of the latest collective */
    int blocked_new, leaving; /* atomic: 1 if `blocked` is to be sent; 1 if this rank shuts down */
    int forming;              /* 1 until the world is complete; written by the control thread */
    tshi_uv_group *requested; /* group whose connections the control thread is to make; or NULL */
    tshi_uv_group *ended;     /* caller's thread: groups closed after the world failed, not freed */

    /* Used by the control thread: */
    uv_thread_t thread;
    uv_loop_t control;
    uv_prepare_t turn;       /* calls tshi_uv_on_turn each time before the loop sleeps */
    uv_timer_t tick;         /* ends that sleep */
    uv_async_t wake_control; /* the caller's thread wakes control */
    uv_poll_t *listening;    /* watches listener; NULL: none, or no descriptors were left */
    int listener,            /* listening socket; -1: none */
        tabled, told_ready,  /* 1 if the address table is known; 1 if this rank has sent READY */
        insecure, keyed;     /* 1 if other hosts need no key; 1 if a key is given */
    char bind_host[256];     /* TSHARD_BIND, or the address of TSHARD_INTERFACE; "": none */
    tshi_uv_address own;     /* where this rank listens */
    tshi_uv_address address[TSHI_UV_ADDRESSES]; /* of rank 0 */
    int addresses;                              /* number of entries of address */
    tshi_uv_peer *peer;                         /* by world rank */
    int *members;                               /* memory of all tshi_uv_blocked.member */
    tshi_uv_conn *conns;                        /* list of connections not authenticated yet */
    int unproven, unproven_limit;               /* number of those that were accepted; its limit */
    tshi_uv_log_count tally[TSHI_UV_TALLIES];
    tshi_uv_group *world_group, *making; /* of all ranks; whose connections are made now, or NULL */
    tshb_coll_search *search; /* by rank: the coordinator's search for a cycle of blocked ranks */
    int confirming;          /* number of ranks on a cycle that have not confirmed their wait */
    tshi_uv_outgoing outgoing;
    int64_t due, notice_at;  /* when joining times out; when the logger is told who is absent */
    int64_t beat, accept_at; /* when heartbeats are sent next; when accepting is tried again */
    int64_t silent_at;       /* when the next rank counts as lost, if it stays silent */
    int64_t await_at;        /* when the next AWAIT messages are to be sent */
    int64_t ticked;          /* when this thread was to wake last, at the latest */
    int64_t parting;         /* when this rank sent BYE; 0: not yet */
    int64_t held_since;      /* when the first report came into `held`; 0: none did */
    int64_t considered_at;   /* when this rank, as coordinator, began to collect reports; 0: not */
    int reported_to;         /* coordinator to which `held` was sent; -1: to none yet */
    tsh_error offer;         /* held-back decision of a rank that is not the coordinator */
    int offered_by;          /* rank that sent the offer */
    int64_t offered_at;      /* when the first offer arrived; 0: none did */
    char absent[256];        /* ranks that have not joined, as rank 0 reports them */
    char obstacle[300];      /* why a connection last failed, for the error of a timeout */
};

/* Returns a text for an errno. */
static const char *tshi_uv_why(int error) {
    return uv_strerror(uv_translate_sys_error(error));
}

static int64_t tshi_uv_min(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* Logs the counted messages, one a second of each kind at most; `now` INT64_MAX: all at once. */
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

/* Logs a message that others can cause as often as they like: at most one a second of its kind. */
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
