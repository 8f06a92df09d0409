/* memory.h - a fuzzer's input as a file that tsh_load reads through tsh_file_desc.read. */
#ifndef TSHARD_TESTS_MEMORY_H
#define TSHARD_TESTS_MEMORY_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct memory_file {
    uint8_t *data; /* a copy, so that reading beyond its end is seen */
    size_t size;
} memory_file;

static memory_file memory_open(const uint8_t *data, size_t size) {
    memory_file file;
    file.data = (uint8_t *)malloc(size + !size);
    file.size = size;
    if (!file.data) abort();
    if (size) memcpy(file.data, data, size);
    return file;
}

/* tsh_file_desc.read; user: a memory_file. */
static int64_t memory_read(int64_t at, void *to, int64_t bytes, void *user) {
    const memory_file *file = (const memory_file *)user;
    const int64_t left = at < (int64_t)file->size ? (int64_t)file->size - at : 0;
    if (bytes > left) bytes = left;
    if (bytes > 0) memcpy(to, file->data + at, (size_t)bytes);
    return bytes;
}

#endif
