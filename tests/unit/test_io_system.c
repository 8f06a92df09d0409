/* tsh_save and tsh_load beside other programs and other saves: saves that are killed, saves during
 * loads, links, modes, owners, what is no file, limits. What is wrong with a file's contents:
 * test_io_malformed.c. FULL=1 repeats more often. */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../support/unit.h"
#include "../support/files.h"

#ifdef _WIN32
static void posix_only(void **state) {
    (void)state;
    print_message("skip: Windows has no signals that kill, FIFOs or modes\n");
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(posix_only)};
    return cmocka_run_group_tests_name("io system", tests, NULL, NULL);
}
#else
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <utime.h>

static int repeats(int few, int many) {
    return getenv("FULL") && strcmp(getenv("FULL"), "1") == 0 ? many : few;
}

static void wait_us(long us) {
    struct timespec time;
    time.tv_sec = us / 1000000;
    time.tv_nsec = us % 1000000 * 1000;
    (void)nanosleep(&time, NULL);
}

/* ------------------------------------------------------------------ a model of one number */

enum { WIDTH = 512 }; /* 1 MiB */

static tsh_module *model(tsh_ctx *ctx, tsh_style style) {
    const tsh_linear_desc d = {.in = WIDTH, .out = WIDTH, .bias = TSH_NO, .style = style};
    return tsh_add_linear(tsh_root(ctx), "m", &d);
}

/* Every value becomes k; each rank writes its own. */
static void fill(tsh_ctx *ctx, double k) {
    tsh_tensor *w = tsh_param(tsh_root(ctx), "m.weight");
    tsh_real *value = (tsh_real *)tsh_data(ctx, w);
    int64_t i;
    for (i = 0; value && i < tsh_local_numel(w); i++) value[i] = (tsh_real)k;
}

/* The number that all values of this rank are; -1 where they differ. */
static double filled(tsh_ctx *ctx) {
    tsh_tensor *w = tsh_param(tsh_root(ctx), "m.weight");
    const tsh_real *value = (const tsh_real *)tsh_data(ctx, w);
    int64_t i;
    for (i = 1; i < tsh_local_numel(w); i++)
        if (value[i] != value[0]) return -1;
    return (double)value[0];
}

static tsh_ctx *open_model(void) {
    tsh_ctx *ctx = unit_open(NULL);
    (void)model(ctx, TSH_PLAIN);
    assert_int_equal(tsh_materialize(tsh_root(ctx)), TSH_OK);
    return ctx;
}

static void save_number(const char *name, double k) {
    tsh_ctx *ctx = open_model();
    fill(ctx, k);
    assert_int_equal(tsh_save(tsh_root(ctx), files_path(name), NULL), TSH_OK);
    unit_close(ctx);
}

/* ------------------------------------------------------------------ saves that are killed */

/* In a child: saves 1, 2, 3, .. until it is killed, or a save fails. */
static void save_for_ever(const char *path) {
    tsh_ctx *ctx = NULL;
    int k;
    if (tsh_open(NULL, &ctx) != TSH_OK) _exit(2);
    (void)model(ctx, TSH_PLAIN);
    if (tsh_materialize(tsh_root(ctx)) != TSH_OK) _exit(2);
    (void)alarm(60); /* should its parent be gone */
    for (k = 1;; k++) {
        fill(ctx, k);
        if (tsh_save(tsh_root(ctx), path, NULL) != TSH_OK) _exit(1);
    }
}

static pid_t begin_saves(const char *path) {
    const pid_t child = fork();
    if (child == 0) save_for_ever(path);
    assert_true(child > 0);
    return child;
}

/* Killed at any moment, a save leaves a whole file; the next one leaves nothing else. */
static void a_killed_save_leaves_a_whole_file(void **state) {
    const int kills = repeats(30, 200);
    tsh_ctx *ctx = open_model();
    int i, left = 0, status;
    (void)state;
    fill(ctx, 0);
    for (i = 0; i < kills || (left < 3 && i < 10 * kills); i++) {
        const pid_t child = begin_saves(files_path("x"));
        /* a busy machine takes longer to begin a save */
        wait_us(2000 + (long)(ranks_mix(5, (uint64_t)i) % (i < kills ? 20000 : 200000)));
        assert_int_equal(kill(child, SIGKILL), 0);
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFSIGNALED(status)); /* no save had failed */
        left += files_count() > 1;
        if (access(files_path("x"), F_OK) == 0) {
            assert_int_equal(tsh_load(tsh_root(ctx), files_path("x"), NULL), TSH_OK);
            assert_true(filled(ctx) >= 0);
        }
        assert_int_equal(tsh_save(tsh_root(ctx), files_path("x"), NULL), TSH_OK);
        if (files_count() != 1) fail_msg("kill %d left %d files", i, files_count());
    }
    assert_true(left >= 3); /* else this has shown nothing */
    unit_close(ctx);
}

/* A save that stands still in the middle is no killed one: another of the same path leaves it its
 * file, but for the moment before it has locked it, when it makes another one. It ends well. */
static void a_save_that_lives_keeps_its_file(void **state) {
    const pid_t child = begin_saves(files_path("x"));
    tsh_ctx *ctx = open_model();
    int i, kept = 0, status;
    (void)state;
    for (i = 0; i < 4000 && kept < 5; i++) {
        wait_us(500);
        assert_int_equal(kill(child, SIGSTOP), 0);
        assert_int_equal(waitpid(child, &status, WUNTRACED), child);
        assert_true(WIFSTOPPED(status));
        if (files_count() == 2) {
            assert_int_equal(tsh_save(tsh_root(ctx), files_path("x"), NULL), TSH_OK);
            kept += files_count() == 2;
        }
        assert_int_equal(kill(child, SIGCONT), 0);
    }
    wait_us(50000);
    assert_int_equal(waitpid(child, &status, WNOHANG), 0); /* no save has failed */
    (void)kill(child, SIGKILL);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(kept, 5);
    unit_close(ctx);
}

/* A temporary file of another host: removed when it has lain for more than an hour and is not
 * locked. Files of other names stay. */
static void what_other_hosts_left_goes_in_time(void **state) {
    static const char other[] = "x.tmp-0123456789abcdef";
    static const char *const names[] = {"x.tmp-0123456789abcde", "x.tmp-0123456789abcdeg",
                                        "y.tmp-0123456789abcdef", "x.tmp"};
    const time_t now = time(NULL);
    struct utimbuf old;
    tsh_ctx *ctx = open_model();
    int i, held;
    (void)state;
    old.actime = old.modtime = now - 7200;
    for (i = 0; i < COUNT(names); i++) {
        files_write(names[i], "x", 1);
        assert_int_equal(utime(files_path(names[i]), &old), 0);
    }
    files_write(other, "x", 1);
    assert_int_equal(tsh_save(tsh_root(ctx), files_path("x"), NULL), TSH_OK);
    assert_int_equal(access(files_path(other), F_OK), 0); /* of now */
    assert_int_equal(utime(files_path(other), &old), 0);
    held = open(files_path(other), O_RDWR);
    assert_int_equal(flock(held, LOCK_EX), 0);
    assert_int_equal(tsh_save(tsh_root(ctx), files_path("x"), NULL), TSH_OK);
    assert_int_equal(access(files_path(other), F_OK), 0); /* locked */
    assert_int_equal(close(held), 0);
    assert_int_equal(tsh_save(tsh_root(ctx), files_path("x"), NULL), TSH_OK);
    assert_int_equal(access(files_path(other), F_OK), -1);
    assert_int_equal(files_count(), 1 + COUNT(names));
    unit_close(ctx);
}

/* ---------------------------------------------------------------------- saves during loads */

typedef struct saver {
    const char *path;
    int stop, failed;
    int saves;
} saver;

static void *save_until_told(void *user) {
    saver *s = (saver *)user;
    tsh_ctx *ctx = NULL;
    if (tsh_open(NULL, &ctx) != TSH_OK) s->failed = 1;
    if (ctx) (void)model(ctx, TSH_PLAIN);
    if (ctx) s->failed = tsh_materialize(tsh_root(ctx)) != TSH_OK;
    while (!s->failed && !__atomic_load_n(&s->stop, __ATOMIC_ACQUIRE)) {
        fill(ctx, __atomic_add_fetch(&s->saves, 1, __ATOMIC_ACQ_REL) + 1);
        s->failed = tsh_save(tsh_root(ctx), s->path, NULL) != TSH_OK;
        wait_us((long)(ranks_mix(9, (uint64_t)s->saves) % 3000));
    }
    tsh_close(ctx);
    return NULL;
}

typedef struct loader {
    const char *path;
    int loads, good, refused;
} loader;

/* Loads again and again: one save on all ranks, or one error on all. */
static int load_again(tsh_ctx *ctx, void *user) {
    loader *l = (loader *)user;
    int i;
    (void)model(ctx, TSH_COLWISE);
    for (i = 0; i < l->loads; i++) {
        double ends[2];
        if (tsh_load(tsh_root(ctx), l->path, NULL) != TSH_OK) {
            CHECK(tsh_last_error(ctx)->code == TSH_ERR_IO, "");
            CHECK(strstr(tsh_last_error(ctx)->message, "if so, load it again"), "");
            tsh_clear_error(ctx);
            if (tsh_world(ctx)->rank == 0) l->refused++;
            continue;
        }
        ends[0] = filled(ctx);
        ends[1] = -ends[0];
        CHECK(ends[0] >= 1, "load %d holds several saves on one rank", i);
        CHECK(tsh_allreduce(tsh_world(ctx), ends, 2, TSH_F64, TSH_MAX) == TSH_OK, "");
        CHECK(ends[0] == -ends[1], "load %d holds the saves %g and %g", i, -ends[1], ends[0]);
        if (tsh_world(ctx)->rank == 0) l->good++;
    }
    return 0;
}

static void a_load_during_saves_is_of_one_save(void **state) {
    loader l = {.path = files_path("x"), .loads = repeats(40, 200)};
    saver s = {.path = files_path("x")};
    const char *why = NULL;
    pthread_t thread;
    int ranks, round;
    (void)state;
    save_number("x", 1);
    assert_int_equal(pthread_create(&thread, NULL, save_until_told, &s), 0);
    for (round = 0; round < 50 && __atomic_load_n(&s.saves, __ATOMIC_ACQUIRE) <= 10; round++)
        for (ranks = 2; ranks <= 4 && !why; ranks++)
            (void)ranks_try(ranks, NULL, load_again, &l, &why);
    __atomic_store_n(&s.stop, 1, __ATOMIC_RELEASE);
    assert_int_equal(pthread_join(thread, NULL), 0);
    if (why) fail_msg("%s", why);
    assert_int_equal(s.failed, 0);
    assert_true(s.saves > 10);
    assert_true(l.good > 0);
    assert_int_equal(files_count(), 1);
}

/* Rank 1 is given another file of the same header. */
static int load_two(tsh_ctx *ctx, void *user) {
    const char *const *names = (const char *const *)user;
    (void)model(ctx, TSH_COLWISE);
    CHECK(tsh_load(tsh_root(ctx), files_path(names[0]), NULL) == TSH_OK, "one file");
    CHECK(filled(ctx) == 1, "values");
    CHECK(tsh_load(tsh_root(ctx), files_path(names[tsh_world(ctx)->rank == 1]), NULL) == TSH_ERR_IO,
          "two files");
    CHECK(strstr(tsh_last_error(ctx)->message, "is not the same file on every rank"), "");
    tsh_clear_error(ctx);
    CHECK(filled(ctx) == 1, "the values are those of before");
    CHECK(tsh_load(tsh_root(ctx), files_path(names[0]), NULL) == TSH_OK, "again");
    return 0;
}

/* Saves that differ in their values alone; and files without tshard's hash, as other programs
 * write them. */
static void two_saves_are_told_apart(void **state) {
    static const char *const names[] = {"a", "b"};
    int i;
    (void)state;
    save_number("a", 1);
    save_number("b", 2);
    ranks_run(3, load_two, (void *)(uintptr_t)names);
    for (i = 0; i < 2; i++) {
        files_bytes file = files_read(names[i]);
        char *hash = strstr(file.at + 8, "tshard.hash");
        if (hash) memcpy(hash, "anybody.key\":\"0123456789abcdef", 30);
        files_write(names[i], file.at, file.size);
        files_free(&file);
    }
    ranks_run(3, load_two, (void *)(uintptr_t)names);
}

/* The logger that the load calls meanwhile writes to the file, as another program might. */
static void write_meanwhile(const char *message, void *user) {
    FILE *file = fopen((const char *)user, "r+b");
    (void)message;
    wait_us(20000); /* so that the file's time is another one */
    (void)fseek(file, -1, SEEK_END);
    (void)fputc('x', file);
    (void)fclose(file);
}

static void a_file_written_to_while_it_is_read_is_refused(void **state) {
    tsh_desc desc = {.logger.log = write_meanwhile};
    tsh_ctx *ctx;
    (void)state;
    save_number("x", (double)NAN);
    wait_us(20000);
    desc.logger.user = (void *)(uintptr_t)files_path("x");
    ctx = unit_open(&desc);
    (void)model(ctx, TSH_PLAIN);
    assert_int_equal(tsh_load(tsh_root(ctx), files_path("x"), NULL), TSH_ERR_IO);
    EXPECT(TSH_ERR_IO, "was written to while it was read; load it again");
    unit_close(ctx);
}

/* ------------------------------------------------------------ links, modes, owners, kinds */

/* Where a link leads is relative to the link's folder. */
static void expect_link(const char *name) {
    struct stat info;
    assert_int_equal(lstat(files_path(name), &info), 0);
    assert_true(S_ISLNK(info.st_mode));
}

static void a_save_goes_through_links(void **state) {
    tsh_ctx *ctx = open_model();
    char path[2 * FILES_SIZE];
    (void)state;
    files_folder("folder");
    save_number("folder/old", 1);
    assert_int_equal(symlink("second", files_path("first")), 0);
    assert_int_equal(symlink("folder/third", files_path("second")), 0);
    (void)snprintf(path, sizeof path, "%s", files_path("folder/old"));
    assert_int_equal(symlink(path, files_path("folder/third")), 0);
    assert_int_equal(symlink("folder/new", files_path("dangling")), 0);
    assert_int_equal(symlink("circle", files_path("circle")), 0);
    fill(ctx, 2);
    assert_int_equal(tsh_save(tsh_root(ctx), files_path("first"), NULL), TSH_OK);
    assert_int_equal(tsh_save(tsh_root(ctx), files_path("dangling"), NULL), TSH_OK);
    expect_link("first");
    expect_link("second");
    expect_link("folder/third");
    expect_link("dangling");
    fill(ctx, 3);
    assert_int_equal(tsh_load(tsh_root(ctx), files_path("folder/old"), NULL), TSH_OK);
    assert_true(filled(ctx) == 2);
    fill(ctx, 3);
    assert_int_equal(tsh_load(tsh_root(ctx), files_path("folder/new"), NULL), TSH_OK);
    assert_true(filled(ctx) == 2);
    assert_int_equal(tsh_save(tsh_root(ctx), files_path("circle"), NULL), TSH_ERR_IO);
    EXPECT(TSH_ERR_IO, "circle\" cannot be written: Too many levels of symbolic links");
    assert_int_equal(files_count(), 5);
    (void)remove(files_path("folder/old"));
    (void)remove(files_path("folder/new"));
    (void)remove(files_path("folder/third"));
    assert_int_equal(rmdir(files_path("folder")), 0); /* nothing else was in it */
    unit_close(ctx);
}

static void mode_and_owner_stay(void **state) {
    static const mode_t modes[] = {0600, 0640, 0664, 0400};
    const mode_t before = umask(022);
    tsh_ctx *ctx = open_model();
    struct stat info;
    int i;
    (void)state;
    assert_int_equal(tsh_save(tsh_root(ctx), files_path("x"), NULL), TSH_OK);
    assert_int_equal(stat(files_path("x"), &info), 0);
    assert_int_equal(info.st_mode & 07777, 0644);
    for (i = 0; i < COUNT(modes); i++) {
        const uid_t owner = geteuid() == 0 ? (uid_t)(12345 + i) : geteuid();
        const gid_t group = geteuid() == 0 ? (gid_t)(54321 + i) : getegid();
        assert_int_equal(chown(files_path("x"), owner, group), 0);
        assert_int_equal(chmod(files_path("x"), modes[i]), 0);
        assert_int_equal(tsh_save(tsh_root(ctx), files_path("x"), NULL), TSH_OK);
        assert_int_equal(stat(files_path("x"), &info), 0);
        assert_int_equal(info.st_mode & 07777, modes[i]);
        assert_int_equal(info.st_uid, owner);
        assert_int_equal(info.st_gid, group);
    }
    (void)umask(before);
    unit_close(ctx);
}

/* Neither saved to nor loaded from, and not waited for: a FIFO, devices, by name or by a link. */
static void what_is_no_file_is_refused(void **state) {
    static const char *const kinds[] = {"a FIFO", "a FIFO", "a device", "a folder"};
    static const char *const names[] = {"fifo", "to fifo", "to null", "folder"};
    tsh_ctx *ctx = open_model();
    struct stat before, after;
    char part[128];
    int i;
    (void)state;
    assert_int_equal(mkfifo(files_path("fifo"), 0600), 0);
    assert_int_equal(symlink("fifo", files_path("to fifo")), 0);
    assert_int_equal(symlink("/dev/null", files_path("to null")), 0);
    files_folder("folder");
    (void)alarm(20); /* an open that waits ends the program */
    for (i = 0; i < COUNT(kinds); i++) {
        assert_int_equal(lstat(files_path(names[i]), &before), 0);
        (void)snprintf(part, sizeof part, "%s\" is %s; tsh_load takes one safetensors file",
                       names[i], kinds[i]);
        assert_int_equal(tsh_load(tsh_root(ctx), files_path(names[i]), NULL), TSH_ERR_IO);
        EXPECT(TSH_ERR_IO, strcmp(kinds[i], "a folder") ? part : "is a folder without model.");
        memcpy(strstr(part, "tsh_load"), "tsh_save", 8);
        assert_int_equal(tsh_save(tsh_root(ctx), files_path(names[i]), NULL), TSH_ERR_IO);
        EXPECT(TSH_ERR_IO, part);
        assert_int_equal(lstat(files_path(names[i]), &after), 0);
        assert_true(before.st_ino == after.st_ino && before.st_mode == after.st_mode);
    }
    (void)alarm(0);
    assert_int_equal(files_count(), 4);
    unit_close(ctx);
}

/* The same of the files that a folder is searched for, and of one that an index names. */
static void what_is_no_file_in_a_folder_is_refused(void **state) {
    static const char index[] = "{\"weight_map\": {\"m.weight\": \"part.safetensors\"}}";
    static const char *const names[] = {"model.safetensors", "model.safetensors.index.json",
                                        "part.safetensors", "part.safetensors"};
    static const char *const targets[] = {NULL, "/dev/zero"}; /* of a link; NULL: a FIFO */
    tsh_ctx *ctx = open_model();
    char part[160];
    int i, k;
    (void)state;
    (void)alarm(20); /* an open that waits ends the program */
    for (i = 0; i < COUNT(names); i++) {
        for (k = 0; k < COUNT(targets); k++) {
            const char *path = files_path(names[i]);
            assert_int_equal(targets[k] ? symlink(targets[k], path) : mkfifo(path, 0600), 0);
            if (i == 3) files_write(names[1], index, sizeof index - 1);
            (void)snprintf(part, sizeof part, "%s\" is %s; tsh_load takes one safetensors file",
                           names[i], targets[k] ? "a device" : "a FIFO");
            assert_int_equal(tsh_load(tsh_root(ctx), files_here, NULL), TSH_ERR_IO);
            EXPECT(TSH_ERR_IO, part);
            files_clear();
        }
    }
    files_folder("model.safetensors");
    assert_int_equal(tsh_load(tsh_root(ctx), files_here, NULL), TSH_ERR_IO);
    EXPECT(TSH_ERR_IO, "model.safetensors\" is a folder; tsh_load takes one safetensors file");
    (void)alarm(0);
    unit_close(ctx);
}

/* What a program opens with tsh_file_open: regular files of at most so many bytes. */
static void a_program_opens_files_as_tsh_load(void **state) {
    static const char *const names[] = {"fifo", "to zero", "folder", "absent", "long"};
    static const char *const parts[] = {"fifo is a FIFO, not a regular file",
                                        "to zero is a device, not", "folder is a folder, not",
                                        "absent cannot be read: No such file",
                                        "long has 5 bytes; at most 4 are read"};
    tsh_error error;
    FILE *file;
    int i;
    (void)state;
    assert_int_equal(mkfifo(files_path("fifo"), 0600), 0);
    assert_int_equal(symlink("/dev/zero", files_path("to zero")), 0);
    assert_int_equal(symlink("long", files_path("to long")), 0);
    files_folder("folder");
    files_write("long", "12345", 5);
    (void)alarm(20);
    for (i = 0; i < COUNT(names); i++) {
        assert_null(tsh_file_open(files_path(names[i]), 4, &error));
        assert_int_equal(errno == ENOENT, strcmp(names[i], "absent") == 0);
        assert_int_equal(error.code, TSH_ERR_IO);
        if (!strstr(error.message, parts[i])) fail_msg("%s", error.message);
        if (i < 4) assert_null(tsh_file_open(files_path(names[i]), 0, NULL));
    }
    (void)alarm(0);
    for (i = 0; i < 2; i++) {
        file = tsh_file_open(files_path("to long"), i ? 5 : 0, &error);
        assert_non_null(file);
        assert_int_equal(fgetc(file), '1');
        assert_int_equal(fclose(file), 0);
    }
    assert_null(tsh_file_open(NULL, 0, &error));
    assert_int_equal(error.code, TSH_ERR_ARGUMENT);
}

/* Beyond the limit of a file's size a write would send SIGXFSZ, which ends a process. */
static void a_limit_of_file_sizes_is_an_error(void **state) {
    tsh_ctx *ctx = open_model();
    pid_t child;
    int status;
    (void)state;
    save_number("x", 1);
    child = fork();
    if (child == 0) {
        const struct rlimit tight = {100000, 100000};
        const char *message = tsh_last_error(ctx)->message;
        if (setrlimit(RLIMIT_FSIZE, &tight) != 0) _exit(2);
        if (tsh_save(tsh_root(ctx), files_path("x"), NULL) != TSH_ERR_IO) _exit(3);
        _exit(strstr(message, "and files of this process may have 100000") ? 0 : 4);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
        fail_msg("%s %d", WIFEXITED(status) ? "exit code" : "signal",
                 WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status));
    assert_int_equal(files_count(), 1);
    assert_int_equal(tsh_load(tsh_root(ctx), files_path("x"), NULL), TSH_OK);
    assert_true(filled(ctx) == 1);
    unit_close(ctx);
}

static void expect_file(const char *name, const char *want) {
    files_bytes found = files_read(name);
    assert_string_equal(found.at, want);
    files_free(&found);
}

static void expect_written(tsh_result code, const tsh_writer *w, const char *part) {
    assert_int_equal(code, TSH_ERR_IO);
    assert_int_equal(w->error.code, TSH_ERR_IO);
    if (!strstr(w->error.message, part)) fail_msg("%s", w->error.message);
}

/* A program's whole files: the old one, or the new one. */
static void a_program_writes_whole_files(void **state) {
    tsh_writer w, none;
    (void)state;
    files_write("x", "old", 3);
    assert_int_equal(symlink("x", files_path("to x")), 0);
    assert_int_equal(tsh_writer_open(&w, files_path("to x"), 0), TSH_OK);
    assert_int_equal(tsh_writer_add(&w, "new ", 4), TSH_OK);
    assert_int_equal(tsh_writer_add(&w, "one", 3), TSH_OK);
    assert_int_equal(w.size, 7);
    expect_file("x", "old");
    assert_int_equal(tsh_writer_close(&w, 1), TSH_OK);
    expect_file("to x", "new one");
    assert_int_equal(tsh_writer_open(&w, files_path("x"), 0), TSH_OK);
    assert_int_equal(tsh_writer_add(&w, "given up", 8), TSH_OK);
    assert_int_equal(tsh_writer_close(&w, 0), TSH_OK);
    expect_file("x", "new one");
    assert_int_equal(files_count(), 2);
    expect_written(tsh_writer_open(&w, files_here, 0), &w, "is a folder");
    assert_int_equal(tsh_writer_add(&w, "a", 1), TSH_ERR_IO);
    assert_int_equal(tsh_writer_close(&w, 1), TSH_ERR_IO);
    expect_written(tsh_writer_open(&w, "/no/folder/x", 1), &w, "x\" cannot be written: No such");
    assert_int_equal(tsh_writer_open(&w, "/dev/full", 0), TSH_OK); /* nothing to replace */
    assert_int_equal(tsh_writer_add(&w, "a", 1), TSH_OK);
    expect_written(tsh_writer_close(&w, 1), &w, "/dev/full\" cannot be written: No space left");
    memset(&none, 0, sizeof none);
    assert_int_equal(tsh_writer_close(&none, 1), TSH_OK);
    assert_int_equal(tsh_writer_add(&none, "a", 1), TSH_ERR_ARGUMENT);
    memset(&none, 0, sizeof none);
    assert_int_equal(tsh_writer_add(&none, NULL, 0), TSH_ERR_ARGUMENT);
    assert_non_null(strstr(none.error.message, "the file is not open"));
    assert_int_equal(tsh_writer_open(&w, NULL, 0), TSH_ERR_ARGUMENT);
    assert_int_equal(tsh_writer_open(NULL, "x", 0), TSH_ERR_ARGUMENT);
}

/* Rows are in the file at once, after those that were there; on a full disk none in part. */
static void a_program_adds_whole_rows(void **state) {
    tsh_writer w;
    (void)state;
    files_write("rows", "1\n", 2);
    assert_int_equal(tsh_writer_open(&w, files_path("rows"), 1), TSH_OK);
    assert_int_equal(w.size, 2);
    assert_int_equal(tsh_writer_add(&w, "2\n", 2), TSH_OK);
    expect_file("rows", "1\n2\n");
    assert_int_equal(tsh_writer_sync(&w), TSH_OK);
    assert_int_equal(tsh_writer_close(&w, 0), TSH_OK);
    expect_file("rows", "1\n2\n");
    assert_int_equal(tsh_writer_open(&w, "/dev/full", 1), TSH_OK);
    expect_written(tsh_writer_add(&w, "3\n", 2), &w, "No space left");
    assert_int_equal(tsh_writer_close(&w, 1), TSH_ERR_IO);
}

/* In a child under a limit of 100 bytes per file; rows 1: of 40 bytes each. Exits with 0 if the
 * third addition is refused in a sentence. */
static void write_beyond_the_limit(int rows) {
    const struct rlimit tight = {100, 100};
    tsh_writer w;
    char row[41];
    int i;
    memset(row, 'x', sizeof row);
    row[39] = '\n';
    if (setrlimit(RLIMIT_FSIZE, &tight) != 0) _exit(2);
    if (tsh_writer_open(&w, files_path("limited"), rows) != TSH_OK) _exit(3);
    for (i = 0; i < 2; i++)
        if (tsh_writer_add(&w, row, 40) != TSH_OK) _exit(4);
    if (tsh_writer_add(&w, row, 40) != TSH_ERR_IO) _exit(5);
    if (!strstr(w.error.message, "120 bytes, and files of this process may have 100")) _exit(6);
    if (tsh_writer_add(&w, row, 1) != TSH_ERR_IO) _exit(7); /* would fit: the error stays */
    _exit(tsh_writer_close(&w, 1) == TSH_ERR_IO ? 0 : 8);
}

static void a_limit_of_sizes_raises_no_signal(void **state) {
    int rows, status;
    (void)state;
    for (rows = 0; rows < 2; rows++) {
        const pid_t child = fork();
        struct stat info;
        if (child == 0) write_beyond_the_limit(rows);
        assert_int_equal(waitpid(child, &status, 0), child);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) fail_msg("%d: status %d", rows, status);
        assert_int_equal(stat(files_path("limited"), &info), rows ? 0 : -1);
        if (rows) assert_int_equal(info.st_size, 80);
        assert_int_equal(files_count(), rows);
    }
}

#define TEST(f) cmocka_unit_test_teardown(f, files_after)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(a_killed_save_leaves_a_whole_file),
        TEST(a_save_that_lives_keeps_its_file),
        TEST(what_other_hosts_left_goes_in_time),
        TEST(a_load_during_saves_is_of_one_save),
        TEST(two_saves_are_told_apart),
        TEST(a_file_written_to_while_it_is_read_is_refused),
        TEST(a_save_goes_through_links),
        TEST(mode_and_owner_stay),
        TEST(what_is_no_file_is_refused),
        TEST(what_is_no_file_in_a_folder_is_refused),
        TEST(a_program_opens_files_as_tsh_load),
        TEST(a_limit_of_file_sizes_is_an_error),
        TEST(a_program_writes_whole_files),
        TEST(a_program_adds_whole_rows),
        TEST(a_limit_of_sizes_raises_no_signal),
    };
    return cmocka_run_group_tests_name("io system", tests, files_begin, files_end);
}
#endif
