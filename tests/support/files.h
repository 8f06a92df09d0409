/* files.h - a folder of a test's own, its files as bytes. Include it after cmocka.h. */
#ifndef TSHARD_TESTS_FILES_H
#define TSHARD_TESTS_FILES_H

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define FILES_UNUSED __attribute__((unused))

enum { FILES_NAMES = 64, FILES_SIZE = 256, FILES_RANKS = 8 };

#ifdef TESTS_MPI
#include "mpi_world.h"
#define FILES_MINE (mpi_rank() == 0)
#else
#define FILES_MINE 1
#endif

typedef struct files_bytes {
    char *at; /* ends with '\0', which is not counted */
    size_t size;
} files_bytes;

static char files_here[FILES_SIZE];

/* For cmocka: makes the folder, and empties it after each test. */
FILES_UNUSED static int files_begin(void **state) {
    const char *top = getenv("TMPDIR");
    (void)state;
    (void)snprintf(files_here, sizeof files_here, "%s/tshard-test-XXXXXX", top ? top : "/tmp");
    if (!mkdtemp(files_here)) return 1;
#ifdef TESTS_MPI
    {
        static char all[FILES_RANKS][FILES_SIZE]; /* the first process's is the one */
        memcpy(all[mpi_rank()], files_here, sizeof files_here);
        mpi_share(all, sizeof all[0]);
        if (mpi_rank() > 0) (void)rmdir(files_here);
        memcpy(files_here, all[0], sizeof files_here);
    }
#endif
    return 0;
}

/* Calls remove (where `away`) on all that is in the folder; returns how much there was. */
FILES_UNUSED static int files_visit(int away) {
    char path[2 * FILES_SIZE + 2];
    DIR *folder = opendir(files_here);
    struct dirent *entry;
    int count = 0;
    while (folder && (entry = readdir(folder))) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        count++;
        (void)snprintf(path, sizeof path, "%s/%s", files_here, entry->d_name);
        if (!away || !FILES_MINE) continue;
        if (remove(path) != 0) (void)rmdir(path); /* on Windows remove takes files only */
    }
    if (folder) (void)closedir(folder);
    return count;
}

FILES_UNUSED static int files_count(void) {
    return files_visit(0);
}

FILES_UNUSED static void files_clear(void) {
    (void)files_visit(1);
}

FILES_UNUSED static int files_after(void **state) {
    (void)state;
    files_clear();
    return 0;
}

FILES_UNUSED static int files_end(void **state) {
    (void)state;
    files_clear();
    return FILES_MINE ? rmdir(files_here) : 0;
}

/* The path of a name in the folder: an own place for every name, which may be a literal of any
 * thread, so that ranks can share it. */
FILES_UNUSED static const char *files_path(const char *name) {
    static char paths[FILES_NAMES][2 * FILES_SIZE];
    char wanted[2 * FILES_SIZE];
    static int lock;
    int i;
    (void)snprintf(wanted, sizeof wanted, "%s/%s", files_here, name);
    while (__atomic_exchange_n(&lock, 1, __ATOMIC_ACQUIRE)) continue;
    for (i = 0; i < FILES_NAMES - 1 && paths[i][0] && strcmp(paths[i], wanted) != 0;) i++;
    if (i == FILES_NAMES - 1) abort(); /* too many names */
    if (!paths[i][0]) memcpy(paths[i], wanted, sizeof wanted);
    __atomic_store_n(&lock, 0, __ATOMIC_RELEASE);
    return paths[i];
}

FILES_UNUSED static void files_folder(const char *name) {
    if (mkdir(files_path(name), 0777)) fail_msg("folder %s cannot be made", files_path(name));
}

FILES_UNUSED static files_bytes files_read(const char *name) {
    files_bytes bytes = {NULL, 0};
    FILE *file = fopen(files_path(name), "rb");
    if (!file) {
        fail_msg("%s cannot be read", files_path(name));
        return bytes; /* under MPI only the first process fails */
    }
    (void)fseek(file, 0, SEEK_END);
    bytes.size = (size_t)ftell(file);
    bytes.at = (char *)calloc(1, bytes.size + 1);
    (void)fseek(file, 0, SEEK_SET);
    if (fread(bytes.at, 1, bytes.size, file) != bytes.size) fail_msg("%s ends early", name);
    (void)fclose(file);
    return bytes;
}

FILES_UNUSED static void files_free(files_bytes *bytes) {
    free(bytes->at);
    bytes->at = NULL;
}

FILES_UNUSED static void files_write(const char *name, const void *data, size_t size) {
    FILE *file;
    (void)remove(files_path(name)); /* a file cut to nothing and written anew goes to the disk */
    file = fopen(files_path(name), "wb");
    if (!file || fwrite(data, 1, size, file) != size || fclose(file))
        fail_msg("%s cannot be written", files_path(name));
}

FILES_UNUSED static void files_expect_same(const char *a, const char *b) {
    files_bytes x = files_read(a), y = files_read(b);
    size_t i = 0;
    while (i < x.size && i < y.size && x.at[i] == y.at[i]) i++;
    if (x.size != y.size || i < x.size)
        fail_msg("%s (%zu bytes) and %s (%zu) differ at byte %zu", a, x.size, b, y.size, i);
    files_free(&x);
    files_free(&y);
}

#endif
