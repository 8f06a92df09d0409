/* ========================================================================== */
/* >>file                                              MARK: - file (private) */
/* What C lacks for files: types, symbolic links, locks, owners, fsync.       */
/* Writing files that are replaced as a whole, or that grow by whole rows.    */
/* Needs: >>error >>rng.                                                      */
/* ========================================================================== */

/* A save writes a temporary file, syncs it to disk and renames it over the old one, so a save that
 * is killed leaves the old file whole. A function below whose system call is missing on a system
 * does nothing there and returns success. */

/* how old, in seconds, other hosts' temporary files must be for tshi_file_sweep to remove them */
enum { TSHI_FILE_STALE = 3600 };

#if TSHI_POSIX
/* Returns the type of the file that stat found, such as "a folder"; NULL: a regular file. */
static const char *tshi_file_kind_of(const struct stat *info) {
    return S_ISREG(info->st_mode)                              ? NULL
           : S_ISDIR(info->st_mode)                            ? "a folder"
           : S_ISFIFO(info->st_mode)                           ? "a FIFO"
           : S_ISCHR(info->st_mode) || S_ISBLK(info->st_mode)  ? "a device"
                                                               : "no regular file";
}
#endif

/* Returns the type of the file at a path, such as "a FIFO", with symbolic links followed; NULL: a
 * regular file, or no file. Does not open the file: that could block (a FIFO) or rewind it (a tape
 * drive). */
static const char *tshi_file_kind(const char *path) {
#if defined(_WIN32)
    const unsigned long none = 0xFFFFFFFF, folder = 16, found = GetFileAttributesA(path);
    return found != none && (found & folder) ? "a folder" : NULL;
#elif TSHI_POSIX
    struct stat info; /* describes the link's target */
    return stat(path, &info) == 0 ? tshi_file_kind_of(&info) : NULL;
#else
    (void)path;
    return NULL;
#endif
}

/* Opens a regular file for reading, at its beginning. If it returns NULL, either *kind is the type
 * of what is there instead, such as "a FIFO", or *kind is NULL and errno has the reason. */
static FILE *tshi_file_open(const char *path, const char **kind) {
    FILE *file = NULL;
    *kind = tshi_file_kind(path);
    errno = 0;
    if (*kind) return NULL;
#if TSHI_POSIX
    {
        /* A FIFO may have replaced the file meanwhile: with O_NONBLOCK, open does not wait for its
         * writer. */
        const int descriptor = open(path, O_RDONLY | O_NONBLOCK);
        struct stat info;
        if (descriptor < 0) return NULL;
        if (fstat(descriptor, &info) == 0 && !(*kind = tshi_file_kind_of(&info)))
            file = fdopen(descriptor, "rb");
        if (!file) (void)close(descriptor);
    }
#else
    file = fopen(path, "rb");
#endif
    return file;
}

/* Returns the size in bytes of a file that was just opened; -1: unknown, and errno has the
 * reason. */
static int64_t tshi_file_size(FILE *file) {
#if TSHI_POSIX
    struct stat info;
    return fstat(fileno(file), &info) == 0 ? (int64_t)info.st_size : -1;
#else
    const int64_t size = fseek(file, 0, SEEK_END) == 0 ? (int64_t)ftell(file) : -1;
    return fseek(file, 0, SEEK_SET) == 0 ? size : -1;
#endif
}

/* Returns the relative path `file` without "./" at its beginning. Returns NULL if it may lead out
 * of its folder (by "..", a leading "/", a backslash) or names no file (an empty name, a "/" at its
 * end). */
static const char *tshi_file_below(const char *file) {
    const char *name;
    while (strncmp(file, "./", 2) == 0) file += 2;
    for (name = file; *name;) { /* checks each name of the path */
        const size_t n = strcspn(name, "/");
        if (!n || strncmp(name, "..", n > 2 ? n : 2) == 0) return NULL;
        name += n;
        if (*name && !*++name) return NULL; /* the path ends with / */
    }
    return *file && !strchr(file, '\\') ? file : NULL;
}

/* Sets the position of a file, in bytes. Returns 0 if that fails. Each fseek moves by at most
 * LONG_MAX; a system with 32-bit longs may still refuse files over 2 GiB. */
static int tshi_file_seek(FILE *file, int64_t to) {
#if defined(_WIN32)
    return _fseeki64(file, to, SEEK_SET) == 0;
#else
    const int64_t max = LONG_MAX < INT64_MAX ? LONG_MAX : INT64_MAX;
    int from = SEEK_SET; /* the first step is absolute, the others relative */
    for (; to > max; to -= max, from = SEEK_CUR)
        if (fseek(file, LONG_MAX, from) != 0) return 0;
    return fseek(file, (long)to, from) == 0;
#endif
}

/* Resolves the symbolic links of a path and writes the result to `to`; link: scratch for one link's
 * target. Both have `size` bytes, which the path itself fits in. Returns 0 and sets errno if the
 * result does not fit or links form a loop. */
static int tshi_file_follow(const char *path, char *to, char *link, size_t size) {
#if TSHI_POSIX
    const int max = 40; /* max links to follow, as on Linux */
    /* slash: the last "/" in `to`; name: where the link's name begins in `to` */
    char *slash, *name;
    ssize_t n;
    int links; /* number of links followed */
    strcpy(to, path);
    for (links = 0; (n = readlink(to, link, size)) >= 0; links++) {
        slash = strrchr(to, '/');
        name = link[0] == '/' || !slash ? to : slash + 1; /* an absolute target is the whole path */
        errno = links == max ? ELOOP : ENAMETOOLONG;
        if (links == max || (size_t)(name - to) + (size_t)n + 32 > size) return 0;
        memcpy(name, link, (size_t)n);
        name[n] = '\0';
    }
#else
    (void)link, (void)size;
    strcpy(to, path);
#endif
    return 1;
}

#if TSHI_POSIX
/* Locks a new temporary file, so that other saves see that its writer is alive. Returns 0 if
 * another save has locked the file first, to remove it. On file systems without locks nothing is
 * ever removed. */
static int tshi_file_lock(int descriptor) {
#ifdef LOCK_EX
    struct stat info;
    if (flock(descriptor, LOCK_EX | LOCK_NB) != 0 && (errno == EWOULDBLOCK || errno == EINTR))
        return 0;
    return fstat(descriptor, &info) == 0 && info.st_nlink > 0;
#else
    (void)descriptor;
    return 1;
#endif
}
#endif

/* Removes temporary files that killed saves to `target` left: those that no process has locked.
 * Hosts may not see each other's locks on a network file system, so another host's file must also
 * be TSHI_FILE_STALE seconds old, by the file system's clock. mine: the caller's own temporary
 * file, open as descriptor `lock`. path: scratch for a name as long as `mine`. All names are
 * "<target>.tmp-<8 digits of the host><8 digits>". */
static void tshi_file_sweep(const char *target, const char *mine, int lock, char *path) {
#ifdef LOCK_EX
    const char *slash = strrchr(target, '/'); /* NULL: target is in the current folder */
    const size_t folder = slash ? (size_t)(slash - target) + 1 : 0, digits = 16;
    const size_t length = strlen(mine + folder), prefix = length - digits;
    struct stat now, then; /* stat of the caller's own file and of the one found */
    struct dirent *entry;
    DIR *list; /* the list of names in the folder */
    if (fstat(lock, &now) != 0) return;
    memcpy(path, target, folder);
    path[folder] = '\0';
    list = opendir(folder ? path : ".");
    while (list && (entry = readdir(list)) != NULL) {
        const char *name = entry->d_name;
        int file;
        if (strlen(name) != length || memcmp(name, mine + folder, prefix) != 0 ||
            strspn(name + prefix, "0123456789abcdef") != digits || strcmp(name, mine + folder) == 0)
            continue;
        strcpy(path + folder, name);
        file = open(path, O_WRONLY | O_NONBLOCK); /* opened only to try its lock */
        if (file < 0) continue;
        if (flock(file, LOCK_EX | LOCK_NB) == 0 && fstat(file, &then) == 0 &&
            S_ISREG(then.st_mode) &&
            (memcmp(name, mine + folder, length - digits / 2) == 0 ||
             now.st_mtime - then.st_mtime > TSHI_FILE_STALE))
            (void)remove(path);
        (void)close(file);
    }
    if (list) (void)closedir(list);
#else
    (void)target, (void)mine, (void)lock, (void)path;
#endif
}

/* Gives file `name` the mode of file `path` and, where this process may, its owner and group. */
static void tshi_file_keep_owner(const char *name, const char *path) {
#if TSHI_POSIX
    struct stat old, made; /* stat of the replaced file and of the new one */
    mode_t mode;           /* permission bits */
    if (stat(path, &old) != 0 || stat(name, &made) != 0) return;
    mode = old.st_mode & 0777;
    if ((old.st_uid != made.st_uid || old.st_gid != made.st_gid) &&
        chown(name, old.st_uid, old.st_gid) != 0 && chown(name, made.st_uid, old.st_gid) != 0 &&
        old.st_gid != made.st_gid)
        mode &= 0707; /* the new group does not get the old group's rights */
    (void)chmod(name, mode);
#else
    (void)name, (void)path;
#endif
}

/* Syncs an open file to disk. Returns 0 if that fails. */
static int tshi_file_sync_open(FILE *file) {
#if TSHI_POSIX
    /* EINVAL: a pipe, or another file that cannot be synced */
    return fsync(fileno(file)) == 0 || errno == EINVAL;
#else
    (void)file;
    return 1;
#endif
}

/* Syncs a file to disk or, with folder 1, the list of files in a folder. Returns 0 if that
 * fails. */
static int tshi_file_sync(const char *path, int folder) {
#if defined(_WIN32)
    const unsigned long generic_write = 0x40000000, share_all = 7, open_existing = 3;
    void *file;
    int synced;
    if (folder) return 1; /* Windows cannot sync a folder */
    file = CreateFileA(path, generic_write, share_all, NULL, open_existing, 0, NULL);
    synced = (intptr_t)file != -1 && FlushFileBuffers(file);
    if ((intptr_t)file != -1) (void)CloseHandle(file);
    return synced;
#elif TSHI_POSIX
    const int fd = open(path, folder ? O_RDONLY : O_WRONLY); /* fsync needs a descriptor */
    int synced;
    if (fd < 0) return 0;
    synced = fsync(fd) == 0 || errno == EINVAL; /* EINVAL: this file system cannot sync */
    (void)close(fd);
    return synced;
#else
    (void)path;
    (void)folder;
    return 1;
#endif
}

/* Renames file `name` to `path` atomically: at any time `path` is either the old file or the new
 * one. Returns 0 if that fails. */
static int tshi_file_rename(const char *name, const char *path) {
#if defined(_WIN32) /* the rename of Windows does not replace files */
    const unsigned long replace = 1, write_through = 8;
    if (MoveFileExA(name, path, replace | write_through)) return 1;
    errno = EACCES; /* likely: `path` is a folder, read-only, or open in a program */
    return 0;
#else
    return rename(name, path) == 0;
#endif
}

TSH_API TSHI_COLD FILE *tsh_file_open(const char *path, int64_t max, tsh_error *error) {
    const char *kind = NULL;
    tsh_error unused;
    FILE *file = path ? tshi_file_open(path, &kind) : NULL;
    const int64_t size = file ? tshi_file_size(file) : 0;
    int why = errno; /* a copy: fclose and strerror may change errno */
    if (!error) error = &unused;
    if (!path) {
        (void)tsh_error_set(error, TSH_ERR_ARGUMENT, -1, "tsh_file_open: there is no path");
    } else if (kind) {
        (void)tsh_error_set(error, TSH_ERR_IO, -1, "%.300s is %s, not a regular file", path, kind);
        why = EINVAL;
    } else if (max > 0 && size > max) {
        (void)tsh_error_set(error, TSH_ERR_IO, -1, "%.300s has %lld bytes; at most %lld are read",
                            path, (long long)size, (long long)max);
        why = EFBIG;
    } else if (file && size >= 0) {
        return file;
    } else {
        (void)tsh_error_set(error, TSH_ERR_IO, -1, "%.300s cannot be read: %s", path,
                            why ? strerror(why) : "the system gives no reason");
    }
    if (file) (void)fclose(file);
    errno = path ? why : EINVAL;
    return NULL;
}

/* -- writing a file: tsh_writer ---------------------------------------------- */

/* Initialises a writer for `path`, without opening a file. Sets w->error if the path is too
 * long. */
static void tshi_file_begin(tsh_writer *w, const char *path) {
    memset(w, 0, sizeof *w);
    (void)snprintf(w->name, sizeof w->name, "%s", path);
    if (strlen(path) < sizeof w->target)
        strcpy(w->target, path);
    else
        (void)tsh_error_set(&w->error, TSH_ERR_IO, -1, "\"%.160s...\" is too long a path", path);
}

/* Sets w->error, unless it is set already. Its message is the path, then the text, formatted as by
 * printf. */
TSH_PRINTF(2, 3) static TSHI_COLD void tshi_file_fail(tsh_writer *w, const char *format, ...) {
    char text[TSH_MESSAGE_SIZE];
    va_list list;
    va_start(list, format);
    tsh_text_format(text, sizeof text, format, list);
    va_end(list);
    if (w->error.code == TSH_OK)
        (void)tsh_error_set(&w->error, TSH_ERR_IO, -1, "\"%s\" %s", w->name, text);
}

/* Sets w->error after a failed system call. Its message ends with `what`, then strerror(errno). */
static void tshi_file_system_error(tsh_writer *w, const char *what) {
    tshi_file_fail(w, "%s: %s", what, errno ? strerror(errno) : "the system gives no reason");
}

/* Closes the writer's file. Removes it if it still has its temporary name. */
static void tshi_file_close(tsh_writer *w) {
    errno = 0;
    if (w->file && fclose(w->file) != 0) tshi_file_system_error(w, "cannot be written");
    if (w->temporary[0]) (void)remove(w->temporary); /* tshi_file_finish did not rename it */
#if TSHI_POSIX
    if (w->lock) (void)close(w->lock - 1); /* closing the descriptor unlocks the file */
#endif
    w->file = NULL;
    w->temporary[0] = '\0';
    w->lock = 0;
}

/* Creates, opens and locks the file w->temporary. Returns 0 if another name must be tried. On any
 * other failure returns 1 and leaves w->file NULL. If the file replaces an older one, its mode is
 * 0600 until it gets the older file's mode. */
static int tshi_file_create(tsh_writer *w) {
#if TSHI_POSIX
    struct stat old;
    const int mode = stat(w->target, &old) == 0 ? 0600 : 0666;
    /* lock: descriptor that holds the lock; copy: its duplicate, which fclose of w->file closes */
    int lock, copy;
    errno = 0;
    lock = open(w->temporary, O_WRONLY | O_CREAT | O_EXCL, mode);
    if (lock < 0) return errno != EEXIST;
    w->lock = lock + 1;
    /* a program that this one starts must not inherit the lock */
    (void)fcntl(lock, F_SETFD, FD_CLOEXEC);
    if (!tshi_file_lock(lock)) {
        tshi_file_close(w);
        return 0;
    }
    if ((copy = dup(lock)) < 0) return 1;
    (void)fcntl(copy, F_SETFD, FD_CLOEXEC);
    if (!(w->file = fdopen(copy, "wb"))) (void)close(copy);
#else
    errno = 0;
    w->file = fopen(w->temporary, "wb");
#endif
    return 1;
}

/* Opens a temporary file "<path>.tmp-<8 digits of the host><8 digits>", in the same folder, since a
 * rename cannot cross file systems. */
static void tshi_file_open_new(tsh_writer *w) {
    char other[sizeof w->temporary]; /* scratch for tshi_file_follow and tshi_file_sweep */
    char path[sizeof w->target];
    uint64_t salt[4], host = 0; /* salt: hashed into the name, to make it unlikely to be taken */
    int made = 0;               /* 1: no other name is to be tried */
    if (w->error.code != TSH_OK) return;
    strcpy(path, w->target);
    if (!tshi_file_follow(path, w->target, other, sizeof w->target)) {
        tshi_file_system_error(w, "cannot be written");
        return;
    }
#if TSHI_POSIX
    {
        struct utsname system;
        if (uname(&system) >= 0) host = tshi_rng_hash(0, system.nodename, strlen(system.nodename));
    }
#endif
    salt[0] = (uint64_t)time(NULL);
    salt[1] = (uint64_t)clock();
    salt[2] = (uint64_t)(uintptr_t)w;
    for (salt[3] = 0; salt[3] < 100 && !made; salt[3]++) {
        (void)snprintf(w->temporary, sizeof w->temporary, "%s.tmp-%08lx%08lx", w->target,
                       (unsigned long)(host >> 32),
                       (unsigned long)(tshi_rng_hash(0, salt, sizeof salt) >> 32));
        made = tshi_file_create(w);
    }
    if (w->file) {
        tshi_file_sweep(w->target, w->temporary, w->lock - 1, other);
        return;
    }
    if (!w->lock) w->temporary[0] = '\0'; /* the name is another save's file: must not be removed */
    tshi_file_system_error(w, "cannot be written");
}

/* Returns 1 if the process may write a file of so many bytes (RLIMIT_FSIZE). Else returns 0 and
 * sets w->error: a write beyond the limit would end the process (SIGXFSZ). */
static int tshi_file_fits(tsh_writer *w, int64_t bytes) {
#if TSHI_POSIX
    struct rlimit limit;
    if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY ||
        (uint64_t)limit.rlim_cur >= (uint64_t)bytes)
        return 1;
    tshi_file_fail(w,
                   "cannot be written: it would have %lld bytes, and files of this process may "
                   "have %llu (RLIMIT_FSIZE, ulimit -f)",
                   (long long)bytes, (unsigned long long)limit.rlim_cur);
    return 0;
#else
    (void)w, (void)bytes;
    return 1;
#endif
}

/* Cuts the file back to w->size bytes: removes the part of a row that a failed write has left. */
static void tshi_file_cut(const tsh_writer *w) {
#if TSHI_POSIX && defined(_POSIX_C_SOURCE) && _POSIX_C_SOURCE >= 200112L
    /* if this fails, too, half a row stays; w->error is set already */
    (void)!ftruncate(fileno(w->file), (off_t)w->size);
#else
    (void)w;
#endif
}

/* Appends bytes to the file, unless w->error is set. With w->rows, if the write fails, removes what
 * it has written of these bytes. */
static void tshi_file_put(tsh_writer *w, const void *data, size_t bytes) {
    if (w->error.code != TSH_OK || !tshi_file_fits(w, w->size + (int64_t)bytes)) return;
    errno = 0;
    if (fwrite(data, 1, bytes, w->file) == bytes) {
        w->size += (int64_t)bytes;
        return;
    }
    tshi_file_system_error(w, "cannot be written");
    if (w->rows) tshi_file_cut(w);
}

/* Completes and syncs the temporary file, then renames it over the old file. */
static void tshi_file_finish(tsh_writer *w) {
    char *name = w->temporary, *slash;
    const int closed = fclose(w->file) == 0;
    w->file = NULL;
    if (w->error.code == TSH_OK && (!closed || !tshi_file_sync(name, 0)))
        tshi_file_system_error(w, "cannot be written");
    if (w->error.code != TSH_OK) return;
    tshi_file_keep_owner(name, w->target);
    if (!tshi_file_rename(name, w->target)) {
        tshi_file_system_error(w, "cannot be replaced");
        return;
    }
    slash = strrchr(name, '/');
    if (slash) slash[slash == name] = '\0';
    /* A failure of this sync of the folder is no error: the file is in place. */
    (void)tshi_file_sync(slash ? name : ".", 1);
    name[0] = '\0'; /* tshi_file_close must not remove the file */
}

TSH_API TSHI_COLD tsh_result tsh_writer_open(tsh_writer *writer, const char *path, int rows) {
    const char *kind;
    if (!writer) return TSH_ERR_ARGUMENT;
    tshi_file_begin(writer, path ? path : "");
    if (!path || !*path)
        return tsh_error_set(&writer->error, TSH_ERR_ARGUMENT, -1,
                             "tsh_writer_open: there is no path");
    writer->rows = rows != 0;
    kind = tshi_file_kind(path);
    if (kind && strcmp(kind, "a folder") == 0)
        tshi_file_fail(writer, "is a folder, not a file");
    if (writer->error.code != TSH_OK) return writer->error.code;
    if (!rows && !kind) {
        tshi_file_open_new(writer);
        return writer->error.code;
    }
    errno = 0;
    writer->file = fopen(path, rows ? "ab" : "wb"); /* rows, a pipe or a device: written in place */
    if (!writer->file) {
        tshi_file_system_error(writer, "cannot be written");
        return writer->error.code;
    }
    /* unbuffered, so that a row is one write */
    if (rows) (void)setvbuf(writer->file, NULL, _IONBF, 0);
    if (rows && !kind && (writer->size = tshi_file_size(writer->file)) < 0)
        tshi_file_system_error(writer, "cannot be written");
    return writer->error.code;
}

TSH_API TSHI_COLD tsh_result tsh_writer_add(tsh_writer *writer, const void *data, size_t bytes) {
    if (!writer) return TSH_ERR_ARGUMENT;
    if (writer->error.code == TSH_OK && (!writer->file || (!data && bytes)))
        return tsh_error_set(&writer->error, TSH_ERR_ARGUMENT, -1, "tsh_writer_add: %s",
                             writer->file ? "there are no bytes" : "the file is not open");
    tshi_file_put(writer, data, bytes);
    return writer->error.code;
}

TSH_API TSHI_COLD tsh_result tsh_writer_sync(tsh_writer *writer) {
    if (!writer) return TSH_ERR_ARGUMENT;
    errno = 0;
    if (writer->error.code == TSH_OK && writer->file &&
        (fflush(writer->file) != 0 || !tshi_file_sync_open(writer->file)))
        tshi_file_system_error(writer, "cannot be written");
    return writer->error.code;
}

TSH_API TSHI_COLD tsh_result tsh_writer_close(tsh_writer *writer, int keep) {
    if (!writer) return TSH_ERR_ARGUMENT;
    errno = 0;
    if (keep && writer->file && writer->temporary[0] && writer->error.code == TSH_OK)
        tshi_file_finish(writer);
    tshi_file_close(writer);
    return writer->error.code;
}
