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
