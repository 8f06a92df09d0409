/* A shared object for LD_PRELOAD: the allocation of number FAIL_AT of the process, counted from 1,
 * fails, and with FAIL_ALL all after it. With FAIL_COUNT it writes how many there were to the file
 * of that name. Needs glibc. */
#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);

static long fails = -1, all, count;

static int refused(void) {
    const long number = __atomic_add_fetch(&count, 1, __ATOMIC_RELAXED);
    if (fails < 0) {
        const char *at = getenv("FAIL_AT");
        all = getenv("FAIL_ALL") != NULL;
        fails = at ? atol(at) : 0;
    }
    if (!fails || (number != fails && !(all && number > fails))) return 0;
    errno = ENOMEM;
    return 1;
}

void *malloc(size_t n) {
    return refused() ? NULL : __libc_malloc(n);
}

void *calloc(size_t n, size_t size) {
    return refused() ? NULL : __libc_calloc(n, size);
}

void *realloc(void *at, size_t n) {
    return refused() ? NULL : __libc_realloc(at, n);
}

__attribute__((destructor)) static void tell(void) {
    const char *name = getenv("FAIL_COUNT");
    const long total = count;
    FILE *file = name ? fopen(name, "w") : NULL;
    if (file) {
        (void)fprintf(file, "%ld\n", total);
        (void)fclose(file);
    }
}
