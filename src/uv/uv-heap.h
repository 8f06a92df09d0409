/* ========================================================================== */
/* >>uv-heap                                        MARK: - uv-heap (private) */
/* A heap for tensors at the end of this rank's segment, where the ranks of   */
/* its host read them: collectives copy them once, not into a ring and out of */
/* it. A block is whole pages, which get memory when it is allocated and lose */
/* it when it is freed. Small blocks, and those that the segment has no room  */
/* or the system no memory for, come from malloc.                             */
/* Needs: >>uv-shm.                                                           */
/* ========================================================================== */

/* A range of the heap: a block, or free. Offsets and sizes are multiples of TSHI_UV_SHM_PAGE. */
typedef struct tshi_uv_extent {
    int64_t at, size; /* offset in the segment; bytes */
    int used;         /* 1: a block */
} tshi_uv_extent;

struct tshi_uv_heap {
    char *base;     /* where this rank's segment is mapped */
    int64_t size;   /* bytes of the segment */
    int segment;    /* its descriptor */
    int64_t blocks; /* blocks that are not freed yet, those of malloc included */
    int closed;     /* 1: the world has ended: the heap ends with its last block */
    tshi_uv_extent *extent; /* all ranges, in order: no gaps, no two free ones side by side */
    int extents, room;      /* valid entries of extent; entries that it has memory for */
};

/* Returns the index of the range that a block begins; -1: the block came from malloc. */
static int tshi_uv_heap_find(const tshi_uv_heap *heap, const void *block) {
    const uintptr_t base = (uintptr_t)heap->base, place = (uintptr_t)block;
    int low = 0, high = heap->extents; /* the range sought is in [low, high) */
    if (place < base + TSHI_UV_SHM_SIZE || place >= base + (uintptr_t)heap->size) return -1;
    while (high - low > 1) {
        const int middle = low + (high - low) / 2;
        if (base + (uintptr_t)heap->extent[middle].at <= place)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* Returns a block of n bytes, n a multiple of the page; NULL: no room, or no memory. */
static void *tshi_uv_heap_take(tshi_uv_heap *heap, int64_t n) {
    tshi_uv_extent *extent;
    int i = 0;
    while (i < heap->extents && (heap->extent[i].used || heap->extent[i].size < n)) i++;
    if (i == heap->extents) return NULL;
    if (heap->extents == heap->room) { /* a range is about to be split */
        const int room = heap->room * 2;
        extent = (tshi_uv_extent *)realloc(heap->extent, (size_t)room * sizeof *extent);
        if (!extent) return NULL;
        heap->extent = extent;
        heap->room = room;
    }
    extent = &heap->extent[i];
    if (!tshi_uv_shm_reserve(heap->segment, extent->at, n)) {
        tshi_uv_shm_release(heap->segment, extent->at, n); /* what it got before it failed */
        return NULL;
    }
    if (extent->size > n) { /* the rest stays free */
        memmove(extent + 1, extent, (size_t)(heap->extents++ - i) * sizeof *extent);
        extent[1].at += n;
        extent[1].size -= n;
        extent->size = n;
    }
    extent->used = 1;
    return heap->base + extent->at;
}

static void tshi_uv_heap_give(tshi_uv_heap *heap, void *block) { /* Frees a block. */
    int i = tshi_uv_heap_find(heap, block), end;
    tshi_uv_extent *extent = heap->extent;
    if (i < 0) {
        free(block);
        return;
    }
    extent[i].used = 0;
    /* joins [i, end), the free ranges side by side */
    end = i + 1 < heap->extents && !extent[i + 1].used ? i + 2 : i + 1;
    if (i > 0 && !extent[i - 1].used) i--;
    extent[i].size = extent[end - 1].at + extent[end - 1].size - extent[i].at;
    memmove(&extent[i + 1], &extent[end], (size_t)(heap->extents - end) * sizeof *extent);
    heap->extents -= end - i - 1;
    /* of the whole range, as a page of the system may be larger than a block */
    tshi_uv_shm_release(heap->segment, extent[i].at, extent[i].size);
}

static void tshi_uv_heap_free(tshi_uv_heap *heap) { /* Frees a heap without blocks. */
    tshi_uv_shm_drop(heap->base, heap->size);
    tshi_uv_close_fd(&heap->segment);
    free(heap->extent);
    free(heap);
}

/* The tsh_allocator_fn of tsh_uv_allocator; user: the heap. */
static void *tshi_uv_heap_allocate(void *ptr, size_t old_size, size_t new_size, size_t align,
                                   void *user) {
    tshi_uv_heap *heap = (tshi_uv_heap *)user;
    const size_t page = TSHI_UV_SHM_PAGE;
    void *block = NULL;
    if (new_size) {
        if (new_size >= TSHI_UV_SHM_LEAST && new_size < (size_t)heap->size && align <= page)
            block = tshi_uv_heap_take(heap, (int64_t)((new_size + page - 1) / page * page));
        if (!block && posix_memalign(&block, align < sizeof block ? sizeof block : align,
                                     new_size) != 0)
            return NULL;
        if (ptr) memcpy(block, ptr, old_size < new_size ? old_size : new_size);
        heap->blocks++;
    }
    if (ptr) {
        tshi_uv_heap_give(heap, ptr);
        heap->blocks--;
    }
    if (heap->closed && !heap->blocks) tshi_uv_heap_free(heap);
    return block;
}

/* Makes the heap, if this rank's segment has room for one. Without memory for it there is none. */
static void tshi_uv_heap_open(tsh_uv_world *world) {
    const tshi_uv_near *own = &world->near[world->rank];
    tshi_uv_heap *heap;
    if (own->size == TSHI_UV_SHM_SIZE) return;
    heap = (tshi_uv_heap *)calloc(1, sizeof *heap);
    if (!heap) return;
    heap->room = 64;
    heap->extent = (tshi_uv_extent *)calloc((size_t)heap->room, sizeof *heap->extent);
    if (!heap->extent) {
        free(heap);
        return;
    }
    heap->base = own->base;
    heap->size = own->size;
    heap->segment = world->segment;
    heap->extent[0].at = TSHI_UV_SHM_SIZE; /* one range, free */
    heap->extent[0].size = own->size - TSHI_UV_SHM_SIZE;
    heap->extents = 1;
    world->heap = heap;
}

/* Unmaps all segments. If there is a heap, this rank's own stays mapped until its last block is
 * freed: a ctx frees some of its memory after it has closed its comms. */
static void tshi_uv_shm_end(tsh_uv_world *world) {
    tshi_uv_heap *heap = world->heap;
    if (heap) {
        world->near[world->rank].base = NULL;
        world->segment = -1;
        heap->closed = 1;
        if (!heap->blocks) tshi_uv_heap_free(heap);
    }
    for (int r = 0; world->near && r < world->size; r++) tshi_uv_shm_unmap(&world->near[r]);
    tshi_uv_close_fd(&world->segment);
    free(world->near);
}

/* Returns 1 if an address is in this rank's heap, so that the ranks of its host can read there. */
static int tshi_uv_in_heap(const tsh_uv_world *world, const void *at) {
    return world->heap && tshi_uv_heap_find(world->heap, at) >= 0;
}

/* Called when an error is about to be returned, after which the caller may change buffers that
 * other ranks still read: marks that in this rank's segment. A rank looks at the mark after it has
 * read (tshi_uv_unchanged), so it never returns such bytes as a result. */
static void tshi_uv_withdraw(const tsh_uv_world *world) {
    tshi_uv_shm_segment *own = world->heap ? tshi_uv_segment_of(world, world->rank) : NULL;
    if (!own || own->withdrawn) return;
    TSHI_UV_PUT(&own->withdrawn, 1);
    __sync_synchronize();
}

/* Returns 0 if a rank of this host has withdrawn its heap: what was read from it may be wrong. */
static int tshi_uv_unchanged(const tsh_uv_world *world, int rank) {
    __sync_synchronize();
    return !TSHI_UV_GET(&tshi_uv_segment_of(world, rank)->withdrawn);
}
