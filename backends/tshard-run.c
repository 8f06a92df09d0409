/* tshard-run - starts the ranks of a job, on this host or on several, and ends them together */
/*
 * DO THIS
 *
 *     cc -O2 -o tshard-run tshard-run.c -luv -lsodium
 *     tshard-run -n 4 ./prog args...
 *
 * and on several hosts, once on each, with the same key everywhere:
 *
 *     tshard-run --new-key key             (once; then copy the file to every host)
 *     export TSHARD_KEY_FILE=$PWD/key      (on each)
 *     tshard-run --hosts alpha:2,beta:2 --node-rank 0 ./prog args...        (on alpha)
 *     tshard-run --hosts alpha:2,beta:2 --node-rank 1 ./prog args...        (on beta)
 *
 * What it does stands in HELP below. Each rank has a session of its own: Ctrl-C comes once, through
 * the launcher, and signals reach what a rank has started, too.
 *
 * DOES NOT
 *
 * - start anything on other hosts: ssh, srun or a person calls it there;
 * - make ranks flush: C's stdio holds back up to 4 KiB of what is printed into a pipe (setvbuf);
 * - agree with the launchers of other hosts: each sees its own ranks end, by themselves or because
 *   the library told them of a lost peer, and counts its own restarts. A rank that is started anew
 *   joins those that wait for it, whatever their count is;
 * - end ranks that ignore SIGTERM where the launcher and its guard (a process that watches over it)
 *   are killed at the same moment.
 */
#ifdef _WIN32
#error "tshard-run does not run on Windows: it starts and ends ranks with POSIX's fork and signals"
#else
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif
#if defined(__APPLE__) && !defined(_DARWIN_C_SOURCE)
#define _DARWIN_C_SOURCE /* or _POSIX_C_SOURCE hides the rest of the system, too */
#endif

#include <errno.h>
#include <fcntl.h>
#include <netdb.h> /* getaddrinfo */
#include <poll.h>
#include <signal.h>
#include <sodium.h> /* randombytes_buf */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef __linux__
#include <pthread.h> /* pthread_atfork */
#include <sys/prctl.h>
#endif
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <uv.h>

/* ========================================================================== */
/* >>settings                                                 MARK: - settings */
/* What the command line asks for. A mistake is one sentence and exit code 2.  */
/* Needs: nothing.                                                             */
/* ========================================================================== */

#if defined(__GNUC__)
#define PRINTF(at, rest) __attribute__((format(printf, at, rest)))
#else
#define PRINTF(at, rest)
#endif

enum { FAILED = 1, BAD_USE = 2, CANNOT_START = 127 }; /* exit codes */
enum { MAX_RANKS = 65535, DEFAULT_PORT = 29400, NAME_SIZE = 256, LEAST_KEY = 16 };

typedef struct host {
    const char *name;
    int slots;
} host;

typedef struct settings {
    host *hosts;
    char *text;         /* that names the hosts */
    int host_count;     /* 1: all ranks on this host, whatever its name */
    int size;           /* ranks of the job; 0: one per slot */
    int node;           /* this host's place among hosts; -1: not told */
    int first, local;   /* this host's first rank, and how many it has */
    int port, restarts; /* port 0: DEFAULT_PORT, on one host any that is free */
    int grace;          /* seconds */
    int least, replica; /* least: a restart may go on with so many ranks; 0: with all. replica:
                         * how many a restart leaves out; 0: 1 */
    int help;
    const char *host_list, *host_file, *job, *new_key;
    char **command;
} settings;

static const char HELP[] =
    "tshard-run [options] [--] program arguments...\n"
    "Starts the ranks of a job and ends them together.\n\n"
    "  -n N                ranks of the job [1, or the slots of all hosts]\n"
    "  --hosts a:2,b:2     hosts and their ranks (slots); call tshard-run once on each of them\n"
    "  --hostfile FILE     the same, one host per line: 'a slots=2' or 'a:2', # begins a comment\n"
    "  --node-rank K       which of the hosts this one is, from 0\n"
    "  --port P            where rank 0 listens [one host: any free port; several hosts: 29400]\n"
    "  --max-restarts R    how often a job that failed is started anew [0]\n"
    "  --min-ranks N       a restart does without a replica that failed, and goes on with at\n"
    "                      least N ranks, on one host; --max-restarts is then as many as it takes\n"
    "  --replica-ranks K   ranks of a replica, such as tp times pp of the program [1]\n"
    "  --grace S           seconds that ranks have to end after SIGINT or SIGTERM [30]\n"
    "  --job NAME          keeps jobs apart that share a key [one host: random; else tshard]\n"
    "  --new-key FILE      writes a new random key into a new file, and starts nothing\n"
    "  --help              this text\n\n"
    "Ranks are numbered host by host. IPv6 addresses stand in brackets: [fd00::1]:2. Several\n"
    "hosts need one key in TSHARD_KEY or TSHARD_KEY_FILE, the same on each, unless all are\n"
    "loopback: write it with --new-key, and copy the file, which only its owner or root may be\n"
    "able to read, to every host. On one host the key is random. A rank finds TSHARD_RANK,\n"
    "TSHARD_SIZE, TSHARD_LOCAL_RANK, TSHARD_LOCAL_SIZE; TSHARD_HOST and TSHARD_PORT, where\n"
    "rank 0 listens; TSHARD_KEY; TSHARD_JOB, the job's name; TSHARD_RESTART, this host's count\n"
    "of restarts; and rank 0 TSHARD_LISTENER, the number of a socket that listens there\n"
    "already.\n\n"
    "stdin goes to rank 0. stdout and stderr come by whole lines, each labelled '[rank] '; a\n"
    "line over 64 KiB in pieces, '[rank]+ ' from the second on. A slow reader makes the ranks\n"
    "wait; one that goes away is gone for the ranks, too. SIGINT, SIGTERM, SIGHUP, SIGUSR1 and\n"
    "SIGUSR2 are passed on; a second SIGINT or SIGTERM, or S seconds after the first, is SIGKILL.\n"
    "When a rank fails the others have 2 s to end, then get SIGTERM, 2 s later SIGKILL; when the\n"
    "launcher itself is killed they get SIGTERM at once. The exit code is that of the rank that\n"
    "failed first (128 + signal); 127: the program cannot be started; 2: wrong arguments.\n";

/* Says in one sentence why nothing can be run; returns the exit code for that. */
PRINTF(1, 2) static int refuse(const char *format, ...) {
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fprintf(stderr, "tshard-run: %s\n", text); /* at once: ranks' lines may come meanwhile */
    return BAD_USE;
}

static int no_memory(void) {
    (void)refuse("out of memory");
    return FAILED;
}

static int read_number(const char *text, int low, int high, int *out) {
    char *end = NULL;
    long value;
    if (text[0] < '0' || text[0] > '9') return 0; /* no blanks, no signs */
    errno = 0;
    value = strtol(text, &end, 10);
    if (errno != 0 || *end != '\0' || value < low || value > high) return 0;
    *out = (int)value;
    return 1;
}

/* Sets what the option name asks for. */
static int set_option(settings *s, const char *name, const char *value) {
    const struct {
        const char *name;
        int *number, low, high;
        const char **text;
    } options[] = {
        {"-n", &s->size, 1, MAX_RANKS, NULL},   {"--node-rank", &s->node, 0, MAX_RANKS, NULL},
        {"--port", &s->port, 1, 65535, NULL},   {"--max-restarts", &s->restarts, 0, 1000000, NULL},
        {"--hosts", NULL, 0, 0, &s->host_list}, {"--hostfile", NULL, 0, 0, &s->host_file},
        {"--job", NULL, 0, 0, &s->job},         {"--grace", &s->grace, 0, 86400, NULL},
        {"--new-key", NULL, 0, 0, &s->new_key}, {"--min-ranks", &s->least, 1, MAX_RANKS, NULL},
        {"--replica-ranks", &s->replica, 1, MAX_RANKS, NULL},
    };
    size_t i = 0, count = sizeof options / sizeof *options;
    while (i < count && strcmp(options[i].name, name) != 0) i++;
    if (i == count) return refuse("there is no option %s; tshard-run --help lists them", name);
    if (value == NULL) return refuse("%s wants a value", name);
    if (options[i].text != NULL) {
        if (value[0] == '\0') return refuse("%s is empty", name);
        *options[i].text = value;
    } else if (!read_number(value, options[i].low, options[i].high, options[i].number)) {
        return refuse("%s takes a whole number from %d to %d, not '%s'", name, options[i].low,
                      options[i].high, value);
    }
    return 0;
}

/* -n 4, -n4, --port 5, --port=5; what follows the options is the command. */
static int read_options(settings *s, int argc, char **argv) {
    int i = 1, code = 0;
    for (; i < argc && argv[i][0] == '-' && strcmp(argv[i], "--") != 0; i++) {
        char name[32];
        size_t length = argv[i][1] == '-' ? strcspn(argv[i], "=") : 2;
        const char *value = argv[i][length] == '=' && length > 2 ? argv[i] + length + 1
                            : argv[i][length] != '\0'            ? argv[i] + length
                                                                 : NULL;
        s->help = strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0;
        if (s->help) return 0;
        snprintf(name, sizeof name, "%.*s", (int)length, argv[i]);
        if (value == NULL && i + 1 < argc) value = argv[++i];
        code = set_option(s, name, value);
        if (code != 0) return code;
    }
    if (s->new_key != NULL) return i == argc ? 0 : refuse("--new-key starts no program");
    if (i < argc && strcmp(argv[i], "--") == 0) i++;
    s->command = argv + i;
    if (i == argc) return refuse("no program is named; tshard-run --help shows how to call it");
    if (s->job != NULL && strlen(s->job) >= NAME_SIZE) return refuse("--job is too long");
    return 0;
}

/* ========================================================================== */
/* >>hosts                                                       MARK: - hosts */
/* Which hosts there are, which one this is, and which ranks it has.           */
/* Needs: >>settings.                                                          */
/* ========================================================================== */

/* "name", "name:slots" or "[address]:slots", found in where; slots where it says none. word is
 * cut to the name. */
static int add_host(settings *s, char *word, int slots, const char *where) {
    int bracket = word[0] == '[';
    char *name = word + bracket, *end = name + strcspn(name, bracket ? "]" : ":");
    const char *rest = end + (bracket && *end == ']');
    host *grown;
    if (end == name || (bracket && rest == end) ||
        (*rest != '\0' && (*rest != ':' || !read_number(rest + 1, 1, MAX_RANKS, &slots))))
        return refuse("%s: '%s' is no host; write name:slots, or [address]:slots for IPv6", where,
                      word);
    grown = (host *)realloc(s->hosts, (size_t)(s->host_count + 1) * sizeof *grown);
    if (grown == NULL) return no_memory();
    s->hosts = grown;
    *end = '\0';
    grown[s->host_count].name = name;
    grown[s->host_count++].slots = slots;
    return 0;
}

/* A host and, maybe, how many slots it has. */
static int read_host(settings *s, char *line, const char *where) {
    char *rest = NULL, *word, *more;
    int slots = 1;
    line[strcspn(line, "#")] = '\0';
    word = strtok_r(line, " \t\r", &rest);
    if (word == NULL) return 0;
    while ((more = strtok_r(NULL, " \t\r", &rest)) != NULL)
        if (strncmp(more, "slots=", 6) != 0 || !read_number(more + 6, 1, MAX_RANKS, &slots))
            return refuse("%s: '%s' is not slots=N", where, more);
    return add_host(s, word, slots, where);
}

/* The whole file as a string. */
static int read_text(const char *path, char **text) {
    FILE *file;
    size_t room = 0;
    int code = 0;
    errno = 0;
    file = fopen(path, "r");
    if (file == NULL || getdelim(text, &room, '\0', file) <= 0) {
        if (errno == ENOMEM)
            code = no_memory();
        else
            code = refuse("--hostfile %s: %s", path,
                          file != NULL && feof(file) ? "it is empty" : strerror(errno));
    }
    if (file != NULL) fclose(file);
    return code;
}

/* Of --hostfile, lines, or of the list, as in --hosts. */
static int read_hosts(settings *s, const char *list) {
    const char *stops = s->host_file != NULL ? "\n" : ",";
    char where[256] = "--hosts", *line, *next;
    int code = 0, number = 0;
    if (s->host_file != NULL)
        code = read_text(s->host_file, &s->text);
    else if ((s->text = strdup(list)) == NULL)
        code = no_memory();
    for (line = s->text; code == 0 && line != NULL; line = next) {
        next = strpbrk(line, stops);
        if (next != NULL) *next++ = '\0';
        if (s->host_file != NULL) snprintf(where, sizeof where, "%s:%d", s->host_file, ++number);
        code = read_host(s, line, where);
    }
    return code == 0 && s->host_count == 0 ? refuse("%s: there is no host", where) : code;
}

/* By its name alone: what a name resolves to may differ between hosts. */
static int is_loopback(const char *name) {
    return strcmp(name, "localhost") == 0 || strncmp(name, "127.", 4) == 0 ||
           strcmp(name, "::1") == 0;
}

static const char NEW_KEY[] = "`tshard-run --new-key FILE` writes a good one into a new file, for "
                              "TSHARD_KEY_FILE";

/* Ranks refuse such a key file, too: here one sentence comes before any is started. */
static int check_key_file(const char *path) {
    struct stat info;
    if (access(path, R_OK) != 0 || stat(path, &info) != 0)
        return refuse("TSHARD_KEY_FILE %s: %s", path, strerror(errno));
    if (info.st_uid != 0 && info.st_uid != geteuid())
        return refuse("TSHARD_KEY_FILE %s belongs to user %ld, who is neither root nor you: "
                      "chown %ld %s",
                      path, (long)info.st_uid, (long)geteuid(), path);
    if ((info.st_mode & 077) != 0)
        return refuse("TSHARD_KEY_FILE: other users can read or write %s (mode %04o): chmod 600 %s",
                      path, (unsigned)info.st_mode & 07777, path);
    if (S_ISREG(info.st_mode) && info.st_size < LEAST_KEY)
        return refuse("TSHARD_KEY_FILE %s: a key of less than %d bytes can be guessed; %s", path,
                      LEAST_KEY, NEW_KEY);
    return 0;
}

/* Ranks of several hosts know each other by a key that every host was given. */
static int check_key(const settings *s) {
    const char *key = getenv("TSHARD_KEY"), *file = getenv("TSHARD_KEY_FILE");
    const char *insecure = getenv("TSHARD_INSECURE");
    int i = 0;
    if (insecure != NULL && insecure[0] != '\0' && strcmp(insecure, "0") != 0 &&
        strcmp(insecure, "1") != 0)
        return refuse("TSHARD_INSECURE is \"%.100s\"; it takes 0 or 1", insecure);
    while (i < s->host_count && is_loopback(s->hosts[i].name)) i++;
    if (i == s->host_count) return 0;
    if (key != NULL && key[0] != '\0')
        return strlen(key) >= LEAST_KEY
                   ? 0
                   : refuse("TSHARD_KEY has less than %d bytes, which can be guessed; %s",
                            LEAST_KEY, NEW_KEY);
    if (file != NULL && file[0] != '\0') return check_key_file(file);
    if (insecure != NULL && strcmp(insecure, "1") == 0) return 0;
    return refuse("ranks on several hosts need a key: set TSHARD_KEY or TSHARD_KEY_FILE to the "
                  "same on each (or TSHARD_INSECURE=1 to let anyone in); %s",
                  NEW_KEY);
}

/* 32 random bytes in hexadecimal, in a file that did not exist. */
static int write_key(const char *path) {
    unsigned char random[32];
    char text[2 * sizeof random + 1];
    size_t size = sizeof text, done = 0;
    int error = 0, fd = open(path, O_WRONLY | O_CREAT | O_EXCL, 0600);
    if (fd < 0 && errno == EEXIST)
        return refuse("--new-key %s: that file exists; name a new one, or remove it", path);
    if (fd < 0) return refuse("--new-key %s: %s", path, strerror(errno));
    randombytes_buf(random, sizeof random);
    sodium_bin2hex(text, sizeof text, random, sizeof random);
    text[size - 1] = '\n';
    if (fchmod(fd, 0600) != 0) error = errno; /* whatever the umask is */
    while (error == 0 && done < size) {
        ssize_t n = write(fd, text + done, size - done);
        if (n > 0) done += (size_t)n;
        if (n < 0 && errno != EINTR) error = errno;
    }
    if (error == 0 && fsync(fd) != 0) error = errno;
    if (close(fd) != 0 && error == 0) error = errno;
    sodium_memzero(random, sizeof random);
    sodium_memzero(text, sizeof text);
    if (error == 0) {
        printf("%s holds a new key: copy it to every host, and set TSHARD_KEY_FILE to its path\n",
               path);
        return 0;
    }
    unlink(path);
    (void)refuse("--new-key %s: %s", path, strerror(error));
    return FAILED;
}

/* Of --min-ranks and --replica-ranks. */
static int check_least(settings *s) {
    const int replica = s->replica > 0 ? s->replica : 1;
    if (s->least == 0 && s->replica > 0) return refuse("--replica-ranks needs --min-ranks");
    if (s->least > 0 && s->host_count > 1)
        return refuse("--min-ranks is for one host: the launchers of several do not agree on how "
                      "many ranks are left");
    if (s->least > s->size)
        return refuse("--min-ranks %d is more than the %d ranks", s->least, s->size);
    s->replica = replica;
    if (s->least > 0 && s->restarts == 0) s->restarts = (s->size - s->least) / replica;
    return 0;
}

/* Puts what was asked for together: hosts, size, and the ranks of this host. */
static int settle(settings *s) {
    char here[32];
    int i, code, slots = 0;
    snprintf(here, sizeof here, "127.0.0.1:%d", s->size > 0 ? s->size : 1);
    if (s->host_list != NULL && s->host_file != NULL)
        return refuse("give --hosts or --hostfile, not both");
    code = read_hosts(s, s->host_list != NULL ? s->host_list : here);
    if (code != 0) return code;
    if (s->node < 0 && s->host_count > 1)
        return refuse("--node-rank is missing: which of the %d hosts is this one, from 0",
                      s->host_count);
    if (s->node < 0) s->node = 0;
    if (s->node >= s->host_count)
        return refuse("--node-rank %d: hosts are numbered from 0 to %d", s->node,
                      s->host_count - 1);
    for (i = 0; i < s->host_count && slots <= MAX_RANKS; i++) {
        if (i < s->node) s->first += s->hosts[i].slots;
        slots += s->hosts[i].slots;
    }
    if (slots > MAX_RANKS) return refuse("the hosts have more than %d slots", MAX_RANKS);
    if (s->size > slots) return refuse("-n %d: the hosts have only %d slots", s->size, slots);
    if (s->size == 0) s->size = slots;
    s->local = s->size - s->first;
    if (s->local > s->hosts[s->node].slots) s->local = s->hosts[s->node].slots;
    if (check_least(s) != 0) return BAD_USE;
    return s->host_count > 1 ? check_key(s) : 0;
}

/* ========================================================================== */
/* >>listener                                                 MARK: - listener */
/* The socket that rank 0 gets: bound before any rank exists, so that none can */
/* come too early and no other job can take its port.                          */
/* Needs: >>settings >>hosts.                                                  */
/* ========================================================================== */

static int listen_at(const struct addrinfo *at) {
    int on = 1, fd = socket(at->ai_family, at->ai_socktype, at->ai_protocol), error;
    if (fd < 0) return -1;
    if (fcntl(fd, F_SETFD, FD_CLOEXEC) == 0 &&
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
        bind(fd, at->ai_addr, at->ai_addrlen) == 0 && listen(fd, SOMAXCONN) == 0)
        return fd;
    error = errno;
    close(fd);
    errno = error;
    return -1;
}

/* Its number and port as text. */
static void spell(const struct sockaddr *at, socklen_t size, char name[NI_MAXHOST],
                  char port[NI_MAXSERV]) {
    name[0] = port[0] = '\0';
    getnameinfo(at, size, name, NI_MAXHOST, port, NI_MAXSERV, NI_NUMERICHOST | NI_NUMERICSERV);
}

/* A listening socket at the host's first address that can be had; -1: none, why says what for. */
static int open_listener(const char *name, int port, char *why, size_t size) {
    struct addrinfo hints, *list = NULL, *at;
    char text[NI_MAXHOST], service[NI_MAXSERV];
    int fd = -1, error;
    memset(&hints, 0, sizeof hints);
    hints.ai_socktype = SOCK_STREAM;
    snprintf(service, sizeof service, "%d", port);
    error = getaddrinfo(name, service, &hints, &list);
    snprintf(why, size, "host %s: %s", name,
             error != 0 ? gai_strerror(error)
                        : "a loopback address here, which no other host can reach; name the first "
                          "host by its address");
    for (at = list; error == 0 && at != NULL && fd < 0; at = at->ai_next) {
        spell(at->ai_addr, at->ai_addrlen, text, service);
        if (is_loopback(text) && !is_loopback(name)) continue; /* Debian's 127.0.1.1 */
        fd = listen_at(at);
        if (fd < 0)
            snprintf(why, size, "cannot listen at %s port %d: %s", text, port, strerror(errno));
    }
    if (list != NULL) freeaddrinfo(list);
    return fd;
}

enum { REACH = 10000 }; /* ms */

/* Returns 1 if a connection to a host's own address can be made: ranks could not join without. */
static int reaches_itself(const char *name, char *why, size_t size) {
    struct sockaddr_storage at;
    socklen_t length = sizeof at;
    int error = 0, out = -1, in = open_listener(name, 0, why, size);
    socklen_t error_size = sizeof error;
    if (in < 0) return 0;
    if (getsockname(in, (struct sockaddr *)&at, &length) == 0)
        out = socket(at.ss_family, SOCK_STREAM, 0);
    if (out < 0 || fcntl(out, F_SETFL, O_NONBLOCK) != 0 ||
        connect(out, (struct sockaddr *)&at, length) != 0)
        error = errno;
    if (error == EINPROGRESS) {
        struct pollfd ready = {out, POLLOUT, 0};
        error = poll(&ready, 1, REACH) == 0 ? ETIMEDOUT : 0;
        if (error == 0) getsockopt(out, SOL_SOCKET, SO_ERROR, &error, &error_size);
    }
    if (out >= 0) close(out);
    close(in);
    snprintf(why, size,
             "this host does not reach itself at %s: %s; is its loopback interface down? "
             "(ip link set lo up)",
             name, strerror(error));
    return error == 0;
}

static int port_of(int fd) {
    struct sockaddr_storage at;
    socklen_t size = sizeof at;
    char name[NI_MAXHOST], port[NI_MAXSERV];
    if (getsockname(fd, (struct sockaddr *)&at, &size) != 0) return 0;
    spell((struct sockaddr *)&at, size, name, port);
    return (int)strtol(port, NULL, 10);
}

/* ========================================================================== */
/* >>job                                                           MARK: - job */
/* What all later rooms share: ranks, where their lines come from and go to.   */
/* Needs: >>settings.                                                          */
/* ========================================================================== */

enum { PIECE = 65536, SINK_FULL = 262144 };             /* bytes */
enum { GRACE = 2000, LAST = 1000 };                     /* ms */

typedef struct buffer {
    char *data;
    size_t size, room;
} buffer;

/* Where lines go. A thread writes, so that a reader who is slow stops neither signals nor the
 * clock, and the descriptor, which others may share, need not be made non-blocking. (Not one of
 * libuv's pool, which aborts where the system gives no thread.) */
typedef struct sink {
    uv_thread_t thread;
    uv_async_t done; /* the thread has ended; keeps the loop alive while it is busy */
    struct job *job;
    int fd, busy;      /* busy: the thread has writing and error */
    int error, broken; /* errno of the thread, and what the loop knows of it */
    buffer waiting, writing;
} sink;

/* One rank's stdout or stderr. */
typedef struct stream {
    uv_pipe_t pipe;
    sink *to;
    int rank, open, reading;
    int cut;  /* the line has begun in an earlier piece */
    int idle; /* nothing came since the clock last looked */
    size_t size;
    char data[PIECE + 1]; /* a line of PIECE bytes and its end */
} stream;

typedef struct rank {
    uv_process_t process;
    struct job *job;
    int number, running;
    stream out[2];
} rank;

/* How the end of the ranks goes on, once it has begun. */
typedef enum stage { RUNNING, LEAVING, TERMINATING, KILLING } stage;

typedef struct job {
    const settings *set;
    uv_loop_t loop;
    uv_timer_t clock;
    uv_signal_t signals[5], child; /* child: SIGCHLD */
    sink sinks[2], *out[2]; /* out[1] is out[0] where stdout and stderr are one file */
    rank *ranks;            /* of this host; NULL between two starts */
    int running, guard;     /* guard: a pipe to it */
    pid_t guard_pid;
    int asked; /* how many SIGINT and SIGTERM came */
    int restarts, no_restart;
    stage now;
    int code, failed, failed_signal; /* of the first rank that failed, and which it is */
    uint64_t failed_at;
    const char *host; /* where rank 0 listens */
    int port;
    char key[65], name[NAME_SIZE + 16];
} job;

/* ========================================================================== */
/* >>output                                                     MARK: - output */
/* Whole lines from the ranks' pipes to stdout and stderr, memory bounded.     */
/* Needs: >>job.                                                               */
/* ========================================================================== */

static void out_of_memory(void) {
    _exit(no_memory()); /* the guard ends the ranks */
}

/* For libuv, which aborts, or crashes, where some of its own allocations fail. */
static void *uv_malloc(size_t size) {
    void *got = malloc(size);
    if (got == NULL && size > 0) out_of_memory();
    return got;
}

static void *uv_calloc(size_t count, size_t size) {
    void *got = calloc(count, size);
    if (got == NULL && count > 0 && size > 0) out_of_memory();
    return got;
}

static void *uv_realloc(void *old, size_t size) {
    void *got = realloc(old, size);
    if (got == NULL && size > 0) out_of_memory();
    return got;
}

static void append(buffer *b, const char *data, size_t size) {
    if (b->size + size > b->room) {
        size_t room = 2 * (b->size + size);
        char *grown = (char *)realloc(b->data, room);
        if (grown == NULL) out_of_memory();
        b->data = grown;
        b->room = room;
    }
    if (size > 0) memcpy(b->data + b->size, data, size);
    b->size += size;
}

/* In a thread of its own. */
static void write_all(void *argument) {
    sink *s = (sink *)argument;
    size_t done = 0;
    while (done < s->writing.size && s->error == 0) {
        struct pollfd ready = {s->fd, POLLOUT, 0};
        ssize_t n = write(s->fd, s->writing.data + done, s->writing.size - done);
        if (n >= 0)
            done += (size_t)n;
        else if (errno == EAGAIN)
            poll(&ready, 1, -1);
        else if (errno != EINTR)
            s->error = errno;
    }
    uv_async_send(&s->done);
}

static void flush(sink *s) {
    buffer done = s->writing;
    if (s->busy || s->waiting.size == 0) return;
    s->writing = s->waiting;
    s->waiting = done;
    s->busy = 1;
    uv_ref((uv_handle_t *)&s->done);
    if (uv_thread_create(&s->thread, write_all, s) != 0) out_of_memory();
}

/* One sentence of the launcher's own. */
PRINTF(2, 3) static void say(job *j, const char *format, ...) {
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (j->out[1]->broken) return;
    append(&j->out[1]->waiting, "tshard-run: ", 12);
    append(&j->out[1]->waiting, text, strlen(text));
    append(&j->out[1]->waiting, "\n", 1);
    flush(j->out[1]);
}

static void put_line(stream *s, const char *line, size_t size) {
    char label[32];
    if (s->to->broken) return;
    snprintf(label, sizeof label, s->cut ? "[%d]+ " : "[%d] ", s->rank);
    append(&s->to->waiting, label, strlen(label));
    append(&s->to->waiting, line, size);
    append(&s->to->waiting, "\n", 1);
}

/* Gives the whole lines of s to its sink; what is left, too, where it fills s or the rank ended. */
static void pass_on(stream *s, int ended) {
    const char *line = s->data, *end = s->data + s->size, *stop;
    while ((stop = (const char *)memchr(line, '\n', (size_t)(end - line))) != NULL) {
        put_line(s, line, (size_t)(stop - line));
        line = stop + 1;
        s->cut = 0;
    }
    s->size = (size_t)(end - line);
    if (s->size == sizeof s->data || (ended && s->size > 0)) {
        put_line(s, line, s->size);
        s->size = 0;
        s->cut = 1;
    }
    if (s->size > 0) memmove(s->data, line, s->size);
    flush(s->to);
}

static void close_stream(stream *s) {
    if (!s->open) return;
    pass_on(s, 1);
    s->open = s->reading = 0;
    uv_close((uv_handle_t *)&s->pipe, NULL);
}

static void give_room(uv_handle_t *handle, size_t hint, uv_buf_t *out) {
    stream *s = (stream *)handle->data;
    (void)hint;
    *out = uv_buf_init(s->data + s->size, (unsigned)(sizeof s->data - s->size));
}

static void on_read(uv_stream_t *from, ssize_t count, const uv_buf_t *unused);

/* Reads where the sink has room and not where it has none; a broken sink takes no more. */
static void set_reading(sink *to) {
    job *j = to->job;
    int i, k, on = to->waiting.size < SINK_FULL;
    for (i = 0; j->ranks != NULL && i < j->set->local; i++)
        for (k = 0; k < 2; k++) {
            stream *s = &j->ranks[i].out[k];
            if (s->to != to || !s->open) continue;
            if (to->broken)
                close_stream(s);
            else if (on && !s->reading)
                uv_read_start((uv_stream_t *)&s->pipe, give_room, on_read);
            else if (!on && s->reading)
                uv_read_stop((uv_stream_t *)&s->pipe);
            s->reading = s->open && on;
            s->idle = 0;
        }
}

static void on_read(uv_stream_t *from, ssize_t count, const uv_buf_t *unused) {
    stream *s = (stream *)from->data;
    (void)unused;
    s->idle = 0;
    if (count > 0) s->size += (size_t)count;
    if (count < 0)
        close_stream(s);
    else
        pass_on(s, 0);
    if (s->to->waiting.size >= SINK_FULL) set_reading(s->to);
}

static void written(uv_async_t *done) {
    sink *s = (sink *)done->data;
    if (!s->busy) return;
    uv_thread_join(&s->thread);
    uv_unref((uv_handle_t *)done);
    s->busy = 0;
    s->writing.size = 0;
    s->broken = s->error;
    if (s->broken) {
        s->waiting.size = 0;
        if (s->broken != EPIPE) say(s->job, "cannot write: %s", strerror(s->broken));
    }
    flush(s);
    set_reading(s);
}

/* ========================================================================== */
/* >>guard                                                       MARK: - guard */
/* A small process that ends the ranks when the launcher is killed. A pipe     */
/* from the launcher tells it their process ids; the pipe closes when the      */
/* launcher dies. The launcher replaces a guard that was killed. If both are   */
/* killed, Linux sends the ranks SIGTERM.                                      */
/* Needs: >>job.                                                               */
/* ========================================================================== */

typedef struct note {
    int place;
    pid_t pid; /* 0: ended */
} note;

static const int passed_on[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2}; /* that are passed on */
enum { SIGNAL_COUNT = 5, MAX_DESCRIPTORS = 65536 };

/* How many descriptors this process may have open. */
static int descriptors(void) {
    long most = sysconf(_SC_OPEN_MAX);
    return most > 0 && most < MAX_DESCRIPTORS ? (int)most : MAX_DESCRIPTORS;
}

static void watch(int from, pid_t *pids, int count) {
    note n;
    int i, left = 0, most = descriptors();
    ssize_t size;
    setsid(); /* out of reach of Ctrl-C */
    for (i = 0; i < SIGNAL_COUNT; i++) signal(passed_on[i], SIG_DFL);
    for (i = 0; i < most; i++) /* or a rank would not see that the launcher's pipes are closed */
        if (i != from) close(i);
    while ((size = read(from, &n, sizeof n)) == (ssize_t)sizeof n || (size < 0 && errno == EINTR))
        if (size > 0) pids[n.place] = n.pid;
    for (i = 0; i < count; i++)
        if (pids[i] > 0) left += kill(-pids[i], SIGTERM) == 0;
    if (left > 0) uv_sleep(GRACE);
    for (i = 0; i < count; i++)
        if (pids[i] > 0) kill(-pids[i], SIGKILL);
    _exit(0);
}

static int start_guard(job *j) {
    pid_t *pids = (pid_t *)calloc((size_t)j->set->local, sizeof *pids);
    int ends[2], error = pids != NULL ? uv_pipe(ends, 0, 0) : UV_ENOMEM;
    pid_t pid = error == 0 ? fork() : -1;
    if (error == 0 && pid < 0) {
        error = uv_translate_sys_error(errno);
        close(ends[0]);
        close(ends[1]);
    }
    if (error != 0) {
        free(pids);
        return refuse("cannot start a guard: %s", uv_strerror(error));
    }
    if (pid == 0) {
#ifdef __linux__
        prctl(PR_SET_PDEATHSIG, 0);
#endif
        watch(ends[0], pids, j->set->local);
    }
    close(ends[0]);
    free(pids);
    j->guard_pid = pid;
    j->guard = ends[1];
    return 0;
}

static void tell_guard(const job *j, const rank *r) {
    note n;
    memset(&n, 0, sizeof n);
    n.place = r->number - j->set->first;
    n.pid = r->running ? r->process.pid : 0;
    while (j->guard >= 0 && write(j->guard, &n, sizeof n) < 0 && errno == EINTR) continue;
}

/* After SIGCHLD: where it was the guard that ended, there is a new one; or, where the system gives
 * no process, a line that says so, and none. */
static void renew_guard(uv_signal_t *handle, int number) {
    job *j = (job *)handle->data;
    int i;
    (void)number;
    if (j->guard < 0 || waitpid(j->guard_pid, NULL, WNOHANG) != j->guard_pid) return;
    close(j->guard);
    j->guard = -1;
    if (start_guard(j) != 0) return;
    for (i = 0; j->ranks != NULL && i < j->set->local; i++)
        if (j->ranks[i].running) tell_guard(j, &j->ranks[i]);
}

#ifdef __linux__
static pid_t launcher; /* the launcher's own number */

/* Runs in every process that this one forks, before it becomes a rank. */
static void end_with_launcher(void) {
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != launcher) _exit(FAILED); /* it has been killed already */
}
#endif

static void stop_guard(job *j) {
    if (j->guard < 0) return;
    close(j->guard);
    while (waitpid(j->guard_pid, NULL, 0) < 0 && errno == EINTR) continue;
}

/* ========================================================================== */
/* >>ending                                                     MARK: - ending */
/* Ranks end together: by themselves, by a signal, or one after the other has  */
/* failed.                                                                     */
/* Needs: >>job >>output >>guard.                                              */
/* ========================================================================== */

/* To the whole group of each rank that runs, or has left someone behind who holds its pipes. */
static void signal_ranks(job *j, int number) {
    int i;
    for (i = 0; j->ranks != NULL && i < j->set->local; i++) {
        const rank *r = &j->ranks[i];
        if (r->running || ((r->out[0].open || r->out[1].open) && r->process.pid > 0))
            kill(-r->process.pid, number);
    }
}

static void on_clock(uv_timer_t *clock);

static void enter(job *j, stage next, uint64_t ms) {
    j->now = next;
    uv_timer_start(&j->clock, on_clock, ms, 0);
}

static void on_clock(uv_timer_t *clock) {
    job *j = (job *)clock->data;
    int i;
    if (j->now == LEAVING) {
        signal_ranks(j, SIGTERM);
        enter(j, TERMINATING, GRACE);
    } else if (j->asked > 1) { /* a reader that takes nothing, or a rank that cannot be killed */
        _exit(j->code != 0 ? j->code : FAILED);
    } else {
        if (j->now == TERMINATING) signal_ranks(j, SIGKILL);
        enter(j, KILLING, LAST);
        /* Pipes that a process outside of the groups holds open. */
        for (i = 0; j->ranks != NULL && i < 2 * j->set->local; i++) {
            stream *s = &j->ranks[i / 2].out[i % 2];
            if (s->open && s->idle && !j->ranks[i / 2].running) close_stream(s);
            s->idle = s->reading;
        }
    }
}

static void on_signal(uv_signal_t *handle, int number) {
    job *j = (job *)handle->data;
    int ending = number == SIGINT || number == SIGTERM;
    j->asked += ending;
    j->no_restart |= ending || number == SIGHUP;
    if (ending && j->asked > 1) {
        signal_ranks(j, SIGKILL);
        enter(j, KILLING, LAST);
        return;
    }
    signal_ranks(j, number);
    if (ending) enter(j, TERMINATING, j->now == RUNNING ? (uint64_t)j->set->grace * 1000 : GRACE);
}

static void on_exit_of(uv_process_t *process, int64_t status, int number) {
    rank *r = (rank *)process->data;
    job *j = r->job;
    int code = number != 0 ? 128 + number : (int)status;
    r->running = 0;
    j->running--;
    tell_guard(j, r);
    uv_close((uv_handle_t *)process, NULL);
    /* Of several found at once, one that was killed failed before those that exit because of it. */
    if (code != 0 && (j->code == 0 ||
                      (number != 0 && j->failed_signal == 0 && j->failed_at == uv_now(&j->loop)))) {
        j->code = code;
        j->failed = r->number;
        j->failed_signal = number;
        j->failed_at = uv_now(&j->loop);
    }
    if ((code != 0 || j->running == 0) && j->now == RUNNING) enter(j, LEAVING, GRACE);
}

/* ========================================================================== */
/* >>starting                                                 MARK: - starting */
/* A rank: its environment, its pipes, its process.                            */
/* Needs: >>job >>listener >>output >>guard >>ending.                          */
/* ========================================================================== */

/* NULL: none, also if this process was itself started as a rank. */
static void set_text(const char *name, const char *value) {
    if ((value != NULL ? setenv(name, value, 1) : unsetenv(name)) != 0) out_of_memory();
}

static void set_number(const char *name, int value) {
    char text[16];
    snprintf(text, sizeof text, "%d", value);
    set_text(name, text);
}

/* In the launcher's own environment, which the rank inherits. */
static void describe(const job *j, const rank *r, int listener) {
    const settings *set = j->set;
    set_number("TSHARD_RANK", r->number);
    set_number("TSHARD_SIZE", set->size);
    set_number("TSHARD_LOCAL_RANK", r->number - set->first);
    set_number("TSHARD_LOCAL_SIZE", set->local);
    set_text("TSHARD_HOST", j->host);
    set_number("TSHARD_PORT", j->port);
    set_text("TSHARD_JOB", j->name);
    set_number("TSHARD_RESTART", j->restarts);
    set_text("TSHARD_LISTENER", listener >= 0 ? "3" : NULL);
    if (set->host_count > 1) return;
    set_text("TSHARD_KEY", j->key);
    set_text("TSHARD_KEY_FILE", NULL);
}

/* A pipe from the rank; *end is its side. Not a socket, as /dev/stdout could not be opened then. */
static int open_stream(rank *r, int which, int *end) {
    stream *s = &r->out[which];
    int ends[2], error = uv_pipe(ends, UV_NONBLOCK_PIPE, 0);
    if (error != 0) return error;
    *end = ends[1];
    s->to = r->job->out[which];
    s->rank = r->number;
    s->pipe.data = s;
    uv_pipe_init(&r->job->loop, &s->pipe, 0);
    s->open = 1;
    error = uv_pipe_open(&s->pipe, ends[0]);
    if (error != 0) close(ends[0]);
    return error;
}

static int start_process(rank *r, const int ends[2], int listener) {
    uv_process_options_t options;
    uv_stdio_container_t stdio[4];
    int k, error;
    /* A terminal that is with another job of the shell stays there. */
    int reads = r->number == 0 && (!isatty(0) || tcgetpgrp(0) == getpgrp());
    memset(&options, 0, sizeof options);
    memset(stdio, 0, sizeof stdio);
    for (k = 0; k < 4; k++) stdio[k].flags = UV_INHERIT_FD;
    if (!reads) stdio[0].flags = UV_IGNORE; /* /dev/null */
    stdio[1].data.fd = ends[0];
    stdio[2].data.fd = ends[1];
    stdio[3].data.fd = listener;
    options.stdio = stdio;
    options.stdio_count = listener >= 0 ? 4 : 3;
    options.file = r->job->set->command[0];
    options.args = r->job->set->command;
    options.flags = UV_PROCESS_DETACHED;
    options.exit_cb = on_exit_of;
    r->process.data = r;
    error = uv_spawn(&r->job->loop, &r->process, &options);
    if (error != 0) uv_close((uv_handle_t *)&r->process, NULL);
    return error;
}

static int start_rank(job *j, int place, int listener) {
    rank *r = &j->ranks[place];
    int k, ends[2] = {-1, -1}, error = 0;
    r->job = j;
    r->number = j->set->first + place;
    describe(j, r, listener);
    for (k = 0; k < 2 && error == 0; k++) error = open_stream(r, k, &ends[k]);
    if (error == 0) error = start_process(r, ends, listener);
    for (k = 0; k < 2; k++) {
        if (ends[k] >= 0) close(ends[k]);
        if (error != 0) close_stream(&r->out[k]);
    }
    r->running = error == 0;
    j->running += r->running;
    if (r->running) tell_guard(j, r);
    return error;
}

/* ========================================================================== */
/* >>main                                                         MARK: - main */
/* A start of the whole job, and another where it failed and that was asked.   */
/* Needs: all of the above.                                                    */
/* ========================================================================== */

/* Name, key and address of one start; *listener is rank 0's, where that is on this host. */
static int prepare(job *j, int *listener) {
    const settings *set = j->set;
    unsigned char random[32];
    char why[NI_MAXHOST + 256];
    int one = set->host_count == 1;
    randombytes_buf(random, sizeof random);
    sodium_bin2hex(j->key, sizeof j->key, random, sizeof random);
    if (one && set->job == NULL)
        snprintf(j->name, sizeof j->name, "%08lx", (unsigned long)randombytes_random());
    else
        snprintf(j->name, sizeof j->name, "%s", set->job != NULL ? set->job : "tshard");
    j->host = one ? "127.0.0.1" : set->hosts[0].name;
    j->port = one || set->port != 0 ? set->port : DEFAULT_PORT;
    if (set->first > 0) return 1;
    *listener = open_listener(j->host, j->port, why, sizeof why);
    if (*listener < 0 && one && j->port == 0) { /* a host that has IPv6 only */
        j->host = "::1";
        *listener = open_listener(j->host, 0, why, sizeof why);
    }
    if (*listener >= 0 && one && set->size > 1 && !reaches_itself(j->host, why, sizeof why)) {
        close(*listener);
        *listener = -1;
    }
    if (*listener < 0)
        say(j, "%s", why);
    else
        j->port = port_of(*listener);
    return *listener >= 0;
}

/* Starts the ranks and returns when all of this host have ended and their lines are written. */
static void run_once(job *j) {
    int i, error = 0, listener = -1;
    j->now = RUNNING;
    j->code = j->failed = j->failed_signal = 0;
    if (!prepare(j, &listener)) {
        j->code = FAILED;
        j->failed = -1;
        return;
    }
    j->ranks = (rank *)calloc((size_t)j->set->local, sizeof *j->ranks);
    if (j->ranks == NULL) out_of_memory();
    for (i = 0; i < j->set->local && error == 0; i++) {
        error = start_rank(j, i, listener);
        if (listener >= 0) close(listener);
        listener = -1;
    }
    if (error != 0) {
        say(j, "cannot start %s: %s", j->set->command[0], uv_strerror(error));
        j->code = CANNOT_START;
        j->failed = -1;
        signal_ranks(j, SIGKILL);
        enter(j, KILLING, LAST);
    }
    set_reading(&j->sinks[0]);
    set_reading(&j->sinks[1]);
    uv_run(&j->loop, UV_RUN_DEFAULT);
    uv_timer_stop(&j->clock);
    free(j->ranks);
    j->ranks = NULL;
}

/* How many ranks a restart has. */
static int ranks_left(const settings *set) {
    const int less = set->size - set->replica;
    return set->least > 0 && less >= set->least ? less : set->size;
}

static void report(job *j, int again) {
    char how[64], then[96] = "";
    if (j->failed < 0) return;
    if (j->failed_signal != 0)
        snprintf(how, sizeof how, "killed by signal %d (%s)", j->failed_signal,
                 strsignal(j->failed_signal));
    else
        snprintf(how, sizeof how, "exit code %d", j->code);
    if (again) snprintf(then, sizeof then, "; restart %d of %d", j->restarts + 1, j->set->restarts);
    if (again && j->set->least > 0)
        snprintf(then + strlen(then), sizeof then - strlen(then), " with %d ranks",
                 ranks_left(j->set));
    say(j, "rank %d failed first: %s%s", j->failed, how, then);
}

/* What was closed is opened, so that no pipe gets the number of stdin, stdout or stderr; what this
 * process was given beside those is not for the ranks. (uv_disable_stdio_inheritance stops at the
 * first descriptor over 15 that is not open.) Refuses if too few descriptors are left: libuv aborts
 * the process where it gets none for some of its own. */
static int tidy_descriptors(const settings *set) {
    /* 3, the guard's pipe, 6 of libuv, the listener; while a rank starts, 2 ends of its pipes, the
     * 2 of libuv, /dev/null; and the pipes of all. */
    int fd = 0, most = descriptors(), need = 16 + 2 * set->local, given = 0;
    while (fd >= 0 && fd < 3) fd = open("/dev/null", O_RDWR);
    if (fd >= 3) close(fd);
    for (fd = 3; fd < most; fd++) given += fcntl(fd, F_SETFD, FD_CLOEXEC) == 0;
    if (most - given >= need) return 0;
    (void)refuse("%d ranks need %d descriptors, and this process may open %d, of which %d are in "
                 "use (ulimit -n)",
                 set->local, need, most, given + 3);
    return FAILED;
}

/* Returns 0, or libuv's error. */
static int open_job(job *j) {
    struct stat out, err;
    struct sigaction old;
    int error, i;
    int same = fstat(1, &out) == 0 && fstat(2, &err) == 0 && out.st_dev == err.st_dev &&
               out.st_ino == err.st_ino;
    error = uv_loop_init(&j->loop);
    if (error != 0) return error;
    uv_timer_init(&j->loop, &j->clock);
    j->clock.data = j;
    uv_unref((uv_handle_t *)&j->clock);
    for (i = 0; i < SIGNAL_COUNT && error == 0; i++) {
        error = uv_signal_init(&j->loop, &j->signals[i]);
        if (error != 0) break;
        j->signals[i].data = j;
        uv_unref((uv_handle_t *)&j->signals[i]);
        if (sigaction(passed_on[i], NULL, &old) != 0 || old.sa_handler != SIG_IGN) /* nohup */
            error = uv_signal_start(&j->signals[i], on_signal, passed_on[i]);
    }
    if (error == 0) error = uv_signal_init(&j->loop, &j->child);
    if (error != 0) return error;
    j->child.data = j;
    uv_unref((uv_handle_t *)&j->child);
    error = uv_signal_start(&j->child, renew_guard, SIGCHLD);
    for (i = 0; i < 2 && error == 0; i++) {
        error = uv_async_init(&j->loop, &j->sinks[i].done, written);
        if (error != 0) break;
        uv_unref((uv_handle_t *)&j->sinks[i].done);
        j->sinks[i].done.data = &j->sinks[i];
        j->sinks[i].job = j;
        j->sinks[i].fd = i + 1;
        j->out[i] = &j->sinks[same ? 0 : i];
    }
    signal(SIGPIPE, SIG_IGN); /* ranks get the default back */
    return error;
}

static void close_job(job *j) {
    int i;
    uv_run(&j->loop, UV_RUN_DEFAULT); /* the last lines */
    for (i = 0; i < SIGNAL_COUNT; i++) uv_close((uv_handle_t *)&j->signals[i], NULL);
    for (i = 0; i < 2; i++) uv_close((uv_handle_t *)&j->sinks[i].done, NULL);
    uv_close((uv_handle_t *)&j->child, NULL);
    uv_close((uv_handle_t *)&j->clock, NULL);
    uv_run(&j->loop, UV_RUN_DEFAULT);
    uv_loop_close(&j->loop);
    for (i = 0; i < 2; i++) {
        if (j->sinks[i].broken && j->code == 0) j->code = FAILED;
        free(j->sinks[i].waiting.data);
        free(j->sinks[i].writing.data);
    }
}

static int run(settings *set) {
    job j;
    int error;
    memset(&j, 0, sizeof j);
    if (tidy_descriptors(set) != 0) return FAILED;
    if (uv_replace_allocator(uv_malloc, uv_realloc, uv_calloc, free) != 0) out_of_memory();
    j.set = set;
    if (start_guard(&j) != 0) return FAILED;
#ifdef __linux__
    launcher = getpid();
    if (pthread_atfork(NULL, NULL, end_with_launcher) != 0) out_of_memory();
#endif
    error = open_job(&j);
    if (error != 0) {
        (void)refuse("cannot start: %s", uv_strerror(error));
        stop_guard(&j);
        return FAILED;
    }
    for (;;) {
        int again;
        run_once(&j);
        if (j.code == 0) break;
        again = j.failed >= 0 && !j.no_restart && j.restarts < set->restarts;
        report(&j, again);
        if (!again) break;
        set->local -= set->size - ranks_left(set); /* 0 on several hosts */
        set->size = ranks_left(set);
        j.restarts++;
    }
    close_job(&j);
    stop_guard(&j);
    return j.code;
}

int main(int argc, char **argv) {
    settings set;
    int code;
    memset(&set, 0, sizeof set);
    set.node = -1;
    set.grace = 30;
    code = read_options(&set, argc, argv);
    if (code == 0 && set.help)
        fputs(HELP, stdout);
    else if (code == 0 && sodium_init() < 0)
        code = refuse("libsodium does not start");
    else if (code == 0 && set.new_key != NULL)
        code = write_key(set.new_key);
    else if (code == 0 && (code = settle(&set)) == 0 && set.local > 0)
        code = run(&set);
    free(set.hosts);
    free(set.text);
    return code;
}
#endif
