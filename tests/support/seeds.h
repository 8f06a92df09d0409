/* seeds.h - the seeds of the fuzzers: the files of tests/fuzz/<folder>, found from this file's own
 * place. Include it after cmocka.h, and define _POSIX_C_SOURCE first. */
#ifndef TSHARD_TESTS_SEEDS_H
#define TSHARD_TESTS_SEEDS_H

#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { SEEDS_PATH = 1024, SEEDS_LONGEST = 65536 };

#define SEEDS_UNUSED __attribute__((unused))

/* name "": the folder. */
static const char *seeds_path(const char *folder, const char *name, char path[SEEDS_PATH]) {
    const char *here = __FILE__, *slash = strrchr(here, '/');
    (void)snprintf(path, SEEDS_PATH, "%.*s../fuzz/%s/%s", slash ? (int)(slash - here + 1) : 0, here,
                   folder, name);
    return path;
}

/* Reads a seed into data and returns its length, at most `size`. */
static size_t seeds_read(const char *folder, const char *name, uint8_t *data, size_t size) {
    char path[SEEDS_PATH];
    FILE *file = fopen(seeds_path(folder, name, path), "rb");
    if (!file) fail_msg("%s cannot be opened", path);
    size = fread(data, 1, size, file);
    (void)fclose(file);
    return size;
}

/* Calls `call`, which may be NULL, with every seed of a folder; returns how many there are. */
SEEDS_UNUSED static int seeds_each(const char *folder,
                                   void (*call)(const char *name, uint8_t *data, size_t size)) {
    static uint8_t data[SEEDS_LONGEST];
    char path[SEEDS_PATH];
    struct dirent *entry;
    int count = 0;
    DIR *list = opendir(seeds_path(folder, "", path));
    if (!list) fail_msg("%s cannot be opened", path);
    while ((entry = readdir(list)) != NULL) {
        if (entry->d_name[0] == '.') continue;
        if (call) call(entry->d_name, data, seeds_read(folder, entry->d_name, data, sizeof data));
        count++;
    }
    (void)closedir(list);
    return count;
}

#endif
