/* ========================================================================== */
/* >>uv-api                                                    MARK: - uv-api */
/* A runner for whole programs, and comms for one's own.                      */
/* Needs: the public part of tshard.h.                                        */
/* ========================================================================== */

/* How this process joins its world. All zero: all from the environment; without any, one rank. */
typedef struct tsh_uv_desc {
    int rank, size;    /* this rank, and the number of ranks; size 0: both from the environment */
    const char *host;  /* where rank 0 listens, a name or an address; NULL: from the environment,
                          else 127.0.0.1 */
    int port;          /* TCP port of rank 0; 0: from the environment */
    const char *bind;  /* the address this rank listens on; NULL: TSHARD_BIND, else rank 0: host,
                          other ranks: the address from which they reach rank 0 */
    const char *interface_name; /* network interface whose address is used if bind is NULL; NULL:
                          TSHARD_INTERFACE, else none */
    int listener;      /* rank 0: descriptor of a socket that listens already; 0: the variable
                          TSHARD_LISTENER, else none */
    const char *job;   /* name that keeps apart jobs that share a key; NULL: TSHARD_JOB, else "" */
    const void *key;   /* shared secret; NULL: TSHARD_KEY, else TSHARD_KEY_FILE, else none */
    size_t key_size;   /* size of key in bytes, 16 or more */
    int checksum;      /* 1: check the bytes of data connections; negative: do not; 0: as
                          TSHARD_CHECKSUM says, else only beyond loopback */
    int insecure;      /* 1: allow other hosts without a key; 0: as TSHARD_INSECURE says */
    double timeout;    /* seconds after which joining, or a collective without timeout_ns, fails;
                          negative: never; 0: TSHARD_TIMEOUT, else 300. Looking up a name in host or
                          bind may take longer */
    double heartbeat;  /* seconds of silence after which a rank counts as lost, 1 or more; negative:
                          never; 0: TSHARD_HEARTBEAT, else 10 */
    double notice;     /* seconds of joining after which the logger is told, once, which ranks are
                          absent; negative: never; 0: 10 */
    tsh_logger logger; /* gets refused connections and that notice, from the backend's thread; must
                          return quickly, as no heartbeat is sent meanwhile. Zero: in tsh_uv_run,
                          tsh_desc.logger */
    tsh_error *error;  /* gets the error of tsh_uv_open or tsh_uv_run; NULL: tsh_uv_open logs it */
} tsh_uv_desc;

/* Joins the world and returns when it is complete. desc NULL: all from the environment. Errors:
 * TSH_ERR_ARGUMENT (a setting that makes no sense), TSH_ERR_IO (no socket, no address, a wrong
 * key), TSH_ERR_TIMEOUT (with the list of absent ranks), TSH_ERR_LOST. */
TSH_API tsh_result tsh_uv_open(const tsh_uv_desc *desc, tsh_comm *out);
/* Joins the world, opens a ctx by desc (NULL: all defaults; its comm is ignored), runs fn and
 * closes both. Returns fn's result, or 1 if fn is NULL or the world or the ctx could not be opened;
 * that error goes to uv->error, and to desc->logger, or uv->logger if desc has none. */
TSH_API int tsh_uv_run(const tsh_uv_desc *uv, const tsh_desc *desc,
                       int (*fn)(tsh_ctx *ctx, void *user), void *user);
