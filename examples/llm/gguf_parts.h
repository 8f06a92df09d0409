/* gguf_parts.h - gguf_open: opens a model's GGUF file, or the first of several files and all others
 *
 * Files named NAME-00001-of-00003.gguf and so on, as llama-gguf-split writes them: the first has
 * all keys, each has some of the tensors. They are mapped one after the other, behind a new header
 * that describes the tensors of all of them, so that they read as one GGUF file. Needs POSIX. */
#ifndef LLM_GGUF_PARTS_H
#define LLM_GGUF_PARTS_H

#include "gguf.h"

typedef struct gguf_parts {
    /* The files of a model, `count` of them. */
    gguf **part;
    int count;
    /* Size of a page of memory, in bytes. */
    size_t page;
    size_t header, total; /* bytes of the new header in whole pages; of the whole mapping */
    /* Number of tensors in all files. */
    uint64_t tensors;
} gguf_parts;

/* GGUF_MOST_PARTS: most files of a model. GGUF_ENDING: length of the ending of their names,
 * "-00001-of-00003.gguf". */
enum { GGUF_MOST_PARTS = 1000, GGUF_ENDING = 20 };

/* Writes to `path`, of `size` bytes, the name of file i (from 0) of a model in `count` files;
 * `name` is the name of any of them. Returns 0: `name` does not end in -00001-of-00003.gguf or the
 * like. */
static int gguf_part_name(const char *name, int i, int count, char *path, size_t size) {
    const size_t n = strlen(name);
    char end[32];
    const char *of = n >= GGUF_ENDING ? name + n - GGUF_ENDING + 6 : "";
    (void)snprintf(end, sizeof end, "-of-%05d.gguf", count);
    if (strcmp(of, end) != 0 || of[-6] != '-' || n + 1 > size) return 0;
    (void)snprintf(path, size, "%.*s-%05d%s", (int)(n - GGUF_ENDING), name, i + 1, end);
    return 1;
}

static void gguf_parts_close(gguf_parts *p) {
    int i;
    for (i = 0; p->part && i < p->count; i++) gguf_close(p->part[i]);
    free(p->part);
}

/* Opens all p->count files of a model as p->part. `first`, which is open already, is part 0 and now
 * belongs to p. Returns 0 on error, with one sentence in `error`, of `room` bytes. */
static int gguf_parts_open(gguf_parts *p, gguf *first, char *error, size_t room) {
    char path[4096];
    int i;
    p->part = (gguf **)calloc((size_t)p->count, sizeof *p->part);
    if (!p->part) {
        (void)snprintf(error, room, "not enough memory");
        gguf_close(first);
        return 0;
    }
    p->part[0] = first;
    for (i = 0; i < p->count; i++) {
        gguf *g;
        if (!gguf_part_name(first->path, i, p->count, path, sizeof path)) {
            (void)gguf_fail(first, "this is one of %d files, whose names must end in "
                                   "-00001-of-%05d.gguf and so on", p->count, p->count);
            (void)snprintf(error, room, "%s", first->error);
            return 0;
        }
        if (i > 0) p->part[i] = gguf_open_as(GGUF_PART, path, error, room);
        g = p->part[i];
        if (!g) return 0;
        if (gguf_count(g, "split.no", GGUF_MOST_PARTS, 0) != i ||
            gguf_count(g, "split.count", GGUF_MOST_PARTS, 0) != p->count)
            (void)gguf_fail(g, "its keys \"split.no\" and \"split.count\" are not those of file "
                               "%d of %d", i + 1, p->count);
        p->tensors += g->tensors;
        if (!g->error[0]) continue;
        (void)snprintf(error, room, "%s", g->error);
        return 0;
    }
    return 1;
}

static size_t gguf_round_up(size_t n, size_t unit) {
    return (n + unit - 1) / unit * unit;
}

/* Returns how many bytes the file g takes in the mapping: whole pages, from the one in which its
 * data section begins to the end of the file. */
static size_t gguf_part_pages(const gguf_parts *p, const gguf *g) {
    return gguf_round_up(g->size - g->data / p->page * p->page, p->page);
}

static unsigned char *gguf_put_word(unsigned char *to, uint64_t word, int bytes) {
    int b;
    for (b = 0; b < bytes; b++) *to++ = (unsigned char)(word >> 8 * b);
    return to;
}

/* Writes a tensor's entry in a GGUF header to `to`: its name, shape, format and `offset`, the
 * position of its values in the data section. Returns the position after the entry. */
static unsigned char *gguf_put_tensor(unsigned char *to, const gguf_tensor *t, uint64_t offset) {
    int d;
    to = gguf_put_word(to, t->name.length, 8);
    memcpy(to, t->name.at, t->name.length);
    to = gguf_put_word(to + t->name.length, (uint64_t)t->dims, 4);
    for (d = 0; d < t->dims; d++) to = gguf_put_word(to, t->ne[d], 8);
    to = gguf_put_word(to, t->format->number, 4);
    return gguf_put_word(to, offset, 8);
}

/* Returns the header of the joined file, filled up with zeros to a full page; sets p->header to its
 * size and p->total to the size of the whole mapping. NULL: not enough memory. */
static unsigned char *gguf_parts_header(gguf_parts *p) {
    gguf *first = p->part[0];
    size_t data = first->keys_end, i;
    unsigned char *header, *to;
    int k;
    for (k = 0; k < p->count; k++)
        for (i = 0; i < p->part[k]->tensors; i++)
            data += p->part[k]->tensor[i].name.length + 24 +
                    8 * (size_t)p->part[k]->tensor[i].dims;
    data = gguf_round_up(data, (size_t)gguf_count(first, "general.alignment", 1 << 20, 32));
    p->header = p->total = gguf_round_up(data, p->page);
    header = (unsigned char *)calloc(1, p->header);
    if (!header) return NULL;
    memcpy(header, first->bytes, first->keys_end);
    (void)gguf_put_word(header + 8, p->tensors, 8);
    for (to = header + first->keys_end, k = 0; k < p->count; k++) {
        const gguf *g = p->part[k];
        for (i = 0; i < g->tensors; i++)
            to = gguf_put_tensor(to, &g->tensor[i],
                                 p->total - data + g->data % p->page + g->tensor[i].offset);
        p->total += gguf_part_pages(p, g);
    }
    return header;
}

/* Maps `bytes` bytes of a file (`file` is its descriptor), from byte `from` on (a multiple of the
 * page size), at the address `at`. Returns 0 and sets errno on failure. */
static int gguf_overlay(void *at, size_t bytes, int file, size_t from) {
    return !bytes || mmap(at, bytes, PROT_READ, MAP_PRIVATE | MAP_FIXED, file, (off_t)from) == at;
}

/* Maps the new header, and after it the data of all files, into the p->total bytes of addresses
 * that are reserved at `map`. Returns 0 and sets errno on failure. */
static int gguf_parts_map(const gguf_parts *p, unsigned char *map, const unsigned char *header) {
    FILE *made = tmpfile();
    size_t at = p->header;
    int k, ok = made && fwrite(header, 1, p->header, made) == p->header && fflush(made) == 0 &&
                gguf_overlay(map, p->header, fileno(made), 0);
    for (k = 0; ok && k < p->count; k++) {
        const gguf *g = p->part[k];
        const size_t from = g->data / p->page * p->page;
        const int file = open(g->path, O_RDONLY);
        ok = file >= 0 && gguf_overlay(map + at, g->size - from, file, from);
        at += gguf_part_pages(p, g);
        if (file >= 0) (void)close(file);
    }
    if (made) (void)fclose(made);
    return ok;
}

/* Returns the `count` files of a model as one GGUF file; `first`, already open, is the first of
 * them, and is closed. NULL on error, with one sentence in `error`, of `room` bytes. */
static gguf *gguf_join(gguf *first, int count, char *error, size_t room) {
    gguf_parts p = {NULL, 0, 0, 0, 0, 0};
    unsigned char *header = NULL, *map = NULL;
    gguf *g = NULL;
    p.count = count;
    p.page = (size_t)sysconf(_SC_PAGESIZE);
    if (gguf_parts_open(&p, first, error, room)) {
        header = gguf_parts_header(&p);
        if (!header) (void)snprintf(error, room, "not enough memory");
    }
    if (header) { /* the first file's pages reserve the addresses; gguf_parts_map replaces them */
        const int file = open(first->path, O_RDONLY);
        void *place = mmap(NULL, p.total, PROT_READ, MAP_PRIVATE, file, 0);
        if (file >= 0) (void)close(file);
        map = place == MAP_FAILED ? NULL : (unsigned char *)place;
        if (map && gguf_parts_map(&p, map, header))
            g = gguf_read(map, p.total, first->path, error, room);
        else
            (void)snprintf(error, room, "%s: cannot be read: %s", first->path, strerror(errno));
        if (g) g->map = map;
        else if (map) (void)munmap(map, p.total);
    }
    free(header);
    gguf_parts_close(&p);
    return g;
}

/* Returns how many files the model has whose first file is `path` (1: it is not split). Returns 0,
 * with one sentence in `error`, if `path` is a later file of a model, or cannot be read. */
static int gguf_parts_count(const char *path, char *error, size_t room) {
    gguf *g = gguf_open_keys(path, error, room);
    char name[4096];
    int64_t count, number;
    int ok;
    if (!g) return 0;
    count = gguf_count(g, "split.count", GGUF_MOST_PARTS, 0);
    number = gguf_count(g, "split.no", GGUF_MOST_PARTS, 0);
    if (count > 1 && number > 0)
        (void)gguf_fail(g, "this is file %d of %d; give the first, %s", (int)number + 1, (int)count,
                        gguf_part_name(path, 0, (int)count, name, sizeof name) ? name
                                                                               : "with all keys");
    ok = !g->error[0];
    if (!ok) (void)snprintf(error, room, "%s", g->error);
    gguf_close(g);
    return !ok ? 0 : count > 1 ? (int)count : 1;
}

/* Opens and maps a GGUF file; if it is the first of several files, all of them. Returns NULL on
 * error, with one sentence in `error`, of `room` bytes. */
GGUF_API gguf *gguf_open(const char *path, char *error, size_t room) {
    const int count = gguf_parts_count(path, error, room);
    gguf *g = count ? gguf_open_as(count > 1 ? GGUF_PART : GGUF_MODEL, path, error, room) : NULL;
    return g && count > 1 ? gguf_join(g, count, error, room) : g;
}

#endif
