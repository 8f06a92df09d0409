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
