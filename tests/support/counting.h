/* counting.h - an allocator that counts, checks its contract, fills new memory with noise, and
 * fails where a test wants it to. One for all ranks of a run. */
#ifndef TSHARD_TESTS_COUNTING_H
#define TSHARD_TESTS_COUNTING_H

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { COUNTING_THREADS = 16, COUNTING_HEADER = 64 };

/* Of one thread, that is, of one rank; the thread that came first is number 0. */
typedef struct counting_thread {
    pthread_t thread;
    size_t live, peak; /* bytes */
    uint64_t calls, granted;
} counting_thread;

typedef struct counting {
    pthread_mutex_t lock;
    counting_thread each[COUNTING_THREADS];
    int threads;
    size_t live, blocks;
    const char *broken; /* how the library broke the contract; NULL: it did not */
    int fails;          /* 1: the fail_at-th request for memory fails, 2: and all after it */
    int only;           /* of this thread; -1: of every one */
    uint64_t fail_at;
    uint64_t failed; /* requests that failed */
} counting;

#define COUNTING_INIT                                                                              \
    { .lock = PTHREAD_MUTEX_INITIALIZER, .only = -1 }

static counting_thread *counting_mine(counting *c) {
    int i;
    for (i = 0; i < c->threads; i++)
        if (pthread_equal(c->each[i].thread, pthread_self())) return &c->each[i];
    if (c->threads == COUNTING_THREADS) abort();
    c->each[i].thread = pthread_self();
    c->threads++;
    return &c->each[i];
}

/* 1 where this request is to fail. */
static int counting_refuses(counting *c, counting_thread *t) {
    uint64_t number = t->granted++;
    if (!c->fails || (c->only >= 0 && t != &c->each[c->only])) return 0;
    if (c->fails == 1 ? number != c->fail_at : number < c->fail_at) return 0;
    c->failed++;
    return 1;
}

/* The block's own size and where malloc's block begins stand in the 64 bytes before it. */
typedef struct counting_header {
    size_t size;
    void *raw;
} counting_header;

static void *counting_take(size_t size, size_t align) {
    char *raw = (char *)malloc(size + align + COUNTING_HEADER), *block;
    counting_header header;
    if (!raw) return NULL;
    block = raw + COUNTING_HEADER;
    block += (align - (uintptr_t)block % align) % align;
    header.size = size;
    header.raw = raw;
    memcpy(block - sizeof header, &header, sizeof header);
    memset(block, 0xff, size); /* NaN as float, -1 as integer */
    return block;
}

static void *counting_call(counting *c, counting_thread *t, void *ptr, size_t old_size,
                           size_t new_size, size_t align) {
    counting_header header = {0, NULL};
    char *block = NULL;
    t->calls++;
    if (align == 0 || (align & (align - 1))) c->broken = "an alignment is no power of two";
    if (ptr) memcpy(&header, (char *)ptr - sizeof header, sizeof header);
    if (header.size != old_size) c->broken = "old_size is not what was granted";
    if (!ptr && !new_size) c->broken = "neither memory to take nor to give";
    if (new_size && (counting_refuses(c, t) || !(block = (char *)counting_take(new_size, align))))
        return NULL;
    if (block && ptr) memcpy(block, ptr, old_size < new_size ? old_size : new_size);
    if (ptr) memset(ptr, 0xff, old_size);
    if (ptr) free(header.raw);
    t->live += new_size - old_size;
    c->live += new_size - old_size;
    c->blocks += (size_t)(block != NULL) - (size_t)(ptr != NULL);
    if (t->live > t->peak) t->peak = t->live;
    return block;
}

static void *counting_fn(void *ptr, size_t old_size, size_t new_size, size_t align, void *user) {
    counting *c = (counting *)user;
    void *block;
    (void)pthread_mutex_lock(&c->lock);
    block = counting_call(c, counting_mine(c), ptr, old_size, new_size, align);
    (void)pthread_mutex_unlock(&c->lock);
    return block;
}

/* What this thread's ctx has from the allocator now. */
static inline counting_thread counting_now(counting *c) {
    counting_thread now;
    (void)pthread_mutex_lock(&c->lock);
    now = *counting_mine(c);
    (void)pthread_mutex_unlock(&c->lock);
    return now;
}

/* Makes it a desc's allocator, with nothing counted yet. */
static inline void counting_begin(counting *c, tsh_desc *desc) {
    const counting fresh = COUNTING_INIT;
    *c = fresh;
    desc->allocator.allocate = counting_fn;
    desc->allocator.user = c;
}

#endif
