/* LD_PRELOAD: allocation number FAIL_AT of the process, counted from 1, fails, and with FAIL_ALL
 * all after it. glibc only. */
#include <errno.h>
#include <stdlib.h>

void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *old, size_t size);

static int fails(void) {
    static long at = -1, all, count;
    long number = __atomic_add_fetch(&count, 1, __ATOMIC_SEQ_CST);
    if (at < 0) {
        const char *text = getenv("FAIL_AT");
        all = getenv("FAIL_ALL") != NULL;
        at = text ? atol(text) : 0;
    }
    if (!at || (number != at && !(all && number > at))) return 0;
    errno = ENOMEM;
    return 1;
}

void *malloc(size_t size) {
    return fails() ? NULL : __libc_malloc(size);
}

void *calloc(size_t count, size_t size) {
    return fails() ? NULL : __libc_calloc(count, size);
}

void *realloc(void *old, size_t size) {
    return fails() ? NULL : __libc_realloc(old, size);
}
