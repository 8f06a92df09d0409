/* ========================================================================== */
/* >>mem                                                MARK: - mem (private) */
/* One allocator for everything: reference-counted blocks, a pool for step    */
/* memory, arenas for what is released at once.                               */
/* Needs: >>error.                                                            */
/* ========================================================================== */

/* tshi_mem_alloc returns a block with one reference, tshi_mem_release releases one reference;
 * tshi_mem_arena_alloc allocates from an arena. Step memory comes from the pool: the smallest free
 * block that is large enough is split, and a released block is joined with its free neighbours. The
 * pool grows by pages and keeps them until the ctx is closed, so that a training loop does not call
 * the allocator any more after its first steps. */

/* Asks Linux to back a large block with huge pages (2 MiB on most processors): fewer page faults
 * when the block is first written, fewer TLB misses later. If Linux refuses, only speed is lost. */
static void tshi_mem_huge_pages(char *block, size_t bytes) {
#if defined(__linux__)
    const size_t least = (size_t)4 << 20;
    const size_t page = 65536; /* the size of ordinary pages, or a multiple of it */
    const int huge = 14;       /* value of MADV_HUGEPAGE, the advice to use huge pages */
    char *first = block + (page - (uintptr_t)block % page);
    if (bytes >= least) (void)madvise(first, (bytes - page) / page * page, huge);
#else
    (void)block, (void)bytes;
#endif
}

/* The default tsh_allocator_fn: malloc, whose pointer is stored just before the aligned block. */
static void *tshi_mem_libc(void *ptr, size_t old_size, size_t new_size, size_t align, void *user) {
    char *raw, *block = NULL; /* raw: what malloc returned; block: an aligned address in it */
    (void)user;
    if (new_size) {
        if (new_size > SIZE_MAX - align - sizeof raw) return NULL;
        raw = (char *)malloc(new_size + align + sizeof raw);
        if (!raw) return NULL;
        block = raw + sizeof raw;
        block += (align - (uintptr_t)block % align) % align; /* round up to a multiple of align */
        memcpy(block - sizeof raw, &raw, sizeof raw);
        tshi_mem_huge_pages(block, new_size);
        if (ptr) memcpy(block, ptr, old_size < new_size ? old_size : new_size);
    }
    if (ptr) {
        memcpy(&raw, (char *)ptr - sizeof raw, sizeof raw); /* what malloc returned for ptr */
        free(raw);
    }
    return block;
}

static void tshi_mem_count(tsh_mem *mem, int kind, size_t add, size_t sub) {
    mem->now[kind] += add - sub; /* counts `add` bytes just allocated and `sub` bytes just freed */
    mem->total += add - sub;
    if (mem->now[kind] > mem->peak[kind]) mem->peak[kind] = mem->now[kind];
    if (mem->total > mem->total_peak) mem->total_peak = mem->total;
}

/* Calls the ctx's allocator (see tsh_allocator_fn) and updates the statistics. Returns NULL and
 * records an error if the allocator refuses. All memory but that of the ctx itself comes from
 * here. */
static void *tshi_mem_call(tsh_ctx *ctx, int kind, void *ptr, size_t old_size, size_t new_size) {
    void *block = NULL;
    ctx->mem.calls++;
    if (new_size != SIZE_MAX) /* SIZE_MAX: the computation of the size overflowed */
        block = ctx->allocator.allocate(ptr, old_size, new_size, TSHI_ALIGN, ctx->allocator.user);
    if (new_size && !block)
        (void)tsh_fail(ctx, TSH_ERR_MEMORY, "the allocator refused %llu bytes; the ctx holds %llu",
                       (unsigned long long)new_size, (unsigned long long)ctx->mem.total);
    else
        tshi_mem_count(&ctx->mem, kind, new_size, old_size);
    return block;
}

/* Allocates a page of `bytes` bytes and inserts it at *list. NULL and an error: no memory. */
static tshi_page *tshi_mem_page(tsh_ctx *ctx, int kind, tshi_page **list, size_t bytes) {
    tshi_page *page = (tshi_page *)tshi_mem_call(ctx, kind, NULL, 0, bytes);
    if (!page) return NULL;
    page->bytes = bytes;
    page->used = TSHI_ALIGN; /* the page's header, padded to the alignment */
    page->next = *list;
    *list = page;
    return page;
}

static void *tshi_mem_data(tshi_block *block) {
    return block + 1; /* the data follows the header */
}

/* Returns the right neighbour of a block that is not the last one of its pool page. */
static tshi_block *tshi_mem_right(tshi_block *block) {
    return (tshi_block *)(void *)((char *)(block + 1) + block->size);
}

/* Returns floor(log2 x), x > 0. */
static int tshi_mem_log2(uint64_t x) {
#if defined(__GNUC__)
    return 63 - __builtin_clzll(x);
#else
    int i = 0;
    while (x >>= 1) i++;
    return i;
#endif
}

static int tshi_mem_class(size_t size) { /* size: bytes of data of a block */
    return tshi_mem_log2(size / TSHI_ALIGN | 1u);
}

/* Marks a block as free and inserts it in the free list of its size class. */
static void tshi_mem_link(tshi_pool *pool, tshi_block *block) {
    const int c = tshi_mem_class(block->size);
    block->refs = 0;
    block->prev = NULL;
    block->next = pool->free[c];
    if (block->next) block->next->prev = block;
    pool->free[c] = block;
    pool->filled |= (uint64_t)1 << c;
}

static void tshi_mem_unlink(tshi_pool *pool, tshi_block *block) {
    const int c = tshi_mem_class(block->size);
    if (block->next) block->next->prev = block->prev;
    if (block->prev)
        block->prev->next = block->next;
    else if (!(pool->free[c] = block->next)) /* the list is empty now */
        pool->filled &= ~((uint64_t)1 << c);
}

/* Sets the size of a free block, and moves the block to another free list if its class changes. */
static void tshi_mem_resize(tshi_pool *pool, tshi_block *block, size_t size) {
    const int stays = tshi_mem_class(size) == tshi_mem_class(block->size);
    if (!stays) tshi_mem_unlink(pool, block);
    block->size = size;
    if (!stays) tshi_mem_link(pool, block);
}

/* Returns the smallest free block of at least `size` bytes, or NULL. */
static tshi_block *tshi_mem_fit(tshi_pool *pool, size_t size) {
    tshi_block *block, *best = NULL;
    /* bit mask of the size classes that have free blocks, from the class of `size` up */
    uint64_t left = pool->filled >> tshi_mem_class(size) << tshi_mem_class(size);
    for (; left && !best; left &= left - 1)
        for (block = pool->free[tshi_mem_log2(left & (~left + 1))]; block; block = block->next)
            if (block->size >= size && (!best || block->size < best->size)) best = block;
    return best;
}

/* Adds a page to the pool and returns it as one free block; NULL and an error: no memory. */
static tshi_block *tshi_mem_grow(tsh_ctx *ctx, size_t size) {
    const size_t min = (size_t)1 << 18; /* a page has at least 256 KiB */
    const size_t bytes = (size > min ? size : min) + sizeof(tshi_block) + TSHI_POOL_OFFSET;
    tshi_page *page = tshi_mem_page(ctx, TSH_MEM_STEP, &ctx->pool.pages, bytes);
    if (!page) return NULL;
    tshi_block *block = (tshi_block *)(void *)((char *)page + TSHI_POOL_OFFSET);
    memset(block, 0, sizeof *block);
    block->size = bytes - TSHI_POOL_OFFSET - sizeof *block;
    block->kind = TSH_MEM_STEP;
    block->last = 1;
    tshi_mem_link(&ctx->pool, block);
    return block;
}

/* Splits off and returns the right end of a free block, with `size` bytes of data; returns all of
 * the block if the rest would be too small for a block. Taking the right end avoids the slow case
 * of TSHI_POOL_OFFSET: large sizes are mostly multiples of 4096, so that a block split off next, to
 * the left of this one, lies 64 bytes lower than this one, modulo 4096. */
static tshi_block *tshi_mem_split(tshi_pool *pool, tshi_block *whole, size_t size) {
    const int last = whole->last;
    tshi_block *block;
    if (whole->size < size + sizeof *block + TSHI_ALIGN) {
        tshi_mem_unlink(pool, whole);
        return whole;
    }
    tshi_mem_resize(pool, whole, whole->size - size - sizeof *block);
    block = tshi_mem_right(whole);
    block->size = size;
    block->before = whole->size;
    block->last = last;
    whole->last = 0;
    if (!last) tshi_mem_right(block)->before = size;
    return block;
}

/* Returns a block of the pool, which grows if no free one fits. NULL and an error: no memory. */
static tshi_block *tshi_mem_from_pool(tsh_ctx *ctx, size_t size) {
    tshi_block *block = tshi_mem_fit(&ctx->pool, size);
    if (!block) block = tshi_mem_grow(ctx, size);
    if (!block) return NULL;
    block = tshi_mem_split(&ctx->pool, block, size);
    ctx->mem.step_live += block->size + sizeof *block;
    if (ctx->mem.step_live > ctx->mem.step_live_peak) ctx->mem.step_live_peak = ctx->mem.step_live;
    return block;
}

/* Allocates a block of at least `bytes` bytes, with one reference. NULL and an error: no memory. */
TSHI_OUTLINE tshi_block *tshi_mem_alloc(tsh_ctx *ctx, int kind, size_t bytes) {
    /* replaces a size that overflowed by one that every allocator refuses */
    size_t size = bytes < SIZE_MAX / 4 ? bytes ? bytes : 1 : SIZE_MAX / 4;
    tshi_block *block;
    size = (size + TSHI_ALIGN - 1) / TSHI_ALIGN * TSHI_ALIGN;
    if (kind == TSH_MEM_STEP)
        block = tshi_mem_from_pool(ctx, size);
    else
        block = (tshi_block *)tshi_mem_call(ctx, kind, NULL, 0, size + sizeof *block);
    if (!block) return NULL;
    /* the size of a block of the pool, which may be larger, is set already */
    if (kind != TSH_MEM_STEP) block->size = size;
    block->kind = kind;
    block->refs = 1;
    block->module = ctx->module; /* tsh_profile sums up memory by module */
    return block;
}

/* Returns a block to the pool: joins it with its free neighbours and links the result. */
static void tshi_mem_to_pool(tsh_ctx *ctx, tshi_block *block) {
    tshi_block *other;
    ctx->mem.step_live -= block->size + sizeof *block;
    if (!block->last && !(other = tshi_mem_right(block))->refs) { /* the right neighbour is free */
        tshi_mem_unlink(&ctx->pool, other);
        block->size += other->size + sizeof *other;
        block->last = other->last;
    }
    other = block->before ? (tshi_block *)(void *)((char *)block - block->before) - 1 : NULL;
    if (other && !other->refs) { /* the left neighbour is free: joins the block to it */
        other->last = block->last;
        tshi_mem_resize(&ctx->pool, other, other->size + block->size + sizeof *block);
        block = other;
    } else {
        tshi_mem_link(&ctx->pool, block);
    }
    if (!block->last) tshi_mem_right(block)->before = block->size;
}

/* Removes one reference to a block; the block is freed with the last one. Does nothing if block is
 * NULL. */
static void tshi_mem_release(tsh_ctx *ctx, tshi_block *block) {
    if (!block || --block->refs > 0) return;
    if (block->kind == TSH_MEM_STEP)
        tshi_mem_to_pool(ctx, block);
    else
        (void)tshi_mem_call(ctx, block->kind, block, block->size + sizeof *block, 0);
}

/* Zeroes memory. Not inlined: gcc would write a loop that is slower than libc's. */
TSHI_APART void tshi_mem_zero(void *place, size_t bytes) {
    memset(place, 0, bytes);
}

/* Zeroes a block's first `bytes` bytes, which hold floating values; does nothing in a dry run,
 * where these are undefined. */
static void tshi_mem_clear(const tsh_ctx *ctx, tshi_block *block, size_t bytes) {
    if (!ctx->dry) memset(tshi_mem_data(block), 0, bytes);
}

/* Allocates zeroed memory from an arena; NULL and an error: no memory. */
static void *tshi_mem_arena_alloc(tsh_ctx *ctx, tshi_arena *arena, size_t bytes) {
    tshi_page *page = arena->now;
    bytes = (bytes + 15) / 16 * 16; /* keeps the next allocation aligned to 16 bytes */
    while (page && page->used + bytes > page->bytes) page = page->next;
    if (!page) { /* none of the pages after arena->now has so many bytes left */
        size_t size = bytes + TSHI_ALIGN > 16384 ? bytes + TSHI_ALIGN : 16384;
        page = tshi_mem_page(ctx, TSH_MEM_BOOKS, arena->now ? &arena->now->next : &arena->first,
                             size);
        if (!page) return NULL;
    }
    arena->now = page;
    char *place = (char *)page + page->used;
    page->used += bytes;
    memset(place, 0, bytes);
    return place;
}

/* Releases all that was allocated from an arena; its pages are kept and filled again. */
static void tshi_mem_reset(tshi_arena *arena) {
    for (tshi_page *page = arena->first; page; page = page->next) page->used = TSHI_ALIGN;
    arena->now = arena->first;
}

/* Frees a list of pages: those of an arena (TSH_MEM_BOOKS), or of the pool (TSH_MEM_STEP). */
static void tshi_mem_close(tsh_ctx *ctx, int kind, tshi_page *page) {
    while (page) {
        tshi_page *next = page->next;
        (void)tshi_mem_call(ctx, kind, page, page->bytes, 0);
        page = next;
    }
}

TSH_API tsh_mem tsh_mem_stats(const tsh_ctx *ctx) {
    const tsh_mem none = TSHI_ZERO;
    return ctx ? ctx->mem : none;
}

TSH_API void tsh_dry_run(tsh_ctx *ctx, int on) {
    if (ctx) ctx->dry = on != 0;
}
