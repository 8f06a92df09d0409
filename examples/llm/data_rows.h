/* data_rows.h - chooses the row of a batch that each document of data.h stands in: the order of the
 * documents in an epoch, and how they are packed into rows. Include data.h. */
#ifndef LLM_DATA_ROWS_H
#define LLM_DATA_ROWS_H

#include "data_file.h"

/* The documents in each row of a part: a linked list for each row, from the last one backwards. */
typedef struct llm_rows {
    int64_t count, epoch; /* number of rows; the epoch that they were made for, -1: none */
    int64_t *last;        /* last[row]: the last document in the row; -1: there is none */
    int64_t *before;      /* before[document]: the document before it in its row; -1: none */
} llm_rows;

/* Returns how many tokens of a row a document takes up: of a preference, as many as its longer
 * sequence (chosen or rejected). */
static int64_t llm_data_size(const llm_data *d, int64_t document) {
    if (!d->pairs) return d->sequences[document].inputs;
    const int64_t chosen = d->sequences[2 * document].inputs;
    const int64_t rejected = d->sequences[2 * document + 1].inputs;
    return chosen > rejected ? chosen : rejected;
}

/* Returns the number at index `place` of the epoch's random permutation of 0 ... count - 1; ctx
 * NULL: `place` itself. -1: the ctx has an error. */
LLM_DATA_API int64_t llm_data_order(tsh_ctx *ctx, const llm_data *d, int64_t epoch, int64_t count,
                                    int64_t place) {
    tsh_sampler sampler;
    if (!ctx) return place;
    memset(&sampler, 0, sizeof sampler);
    sampler.count = count;
    sampler.batch = sampler.mine = 1;
    sampler.seed = d->desc.seed;
    sampler.epoch = epoch;
    sampler.first = place;
    return tsh_sampler_index(ctx, &sampler, 0);
}

/* The state of packing documents into rows by best fit decreasing (TRL's "bfd"): the longest
 * document comes first, and each goes into a row with the fewest places (free tokens) left that are
 * enough for it. */
typedef struct llm_packing {
    int64_t leaves; /* number of leaves of the tree: a power of 2 above the length of a row */
    /* a binary tree that finds rows by the places left. space[leaves + s]: s if there is a row with
     * s places left, else 0; space[i]: the maximum of space[2 i] and space[2 i + 1] */
    int64_t *space;
    int64_t *open;   /* open[s]: the first row with s places left; -1: there is none */
    int64_t *next;   /* next[row]: another row with as many places left; -1: there is none */
    int64_t *order;  /* documents, the longest first */
    int64_t *starts; /* starts[length - s]: where the next document of s tokens goes in `order` */
} llm_packing;

/* Sets leaf s of the tree, space[leaves + s], to value, and the maxima in the nodes above it. */
static void llm_pack_mark(llm_packing *p, int64_t s, int64_t value) {
    int64_t i = p->leaves + s;
    p->space[i] = value;
    for (i /= 2; i > 0; i /= 2)
        p->space[i] = p->space[2 * i] > p->space[2 * i + 1] ? p->space[2 * i] : p->space[2 * i + 1];
}

/* Removes and returns a row with the fewest places left that are at least `size` (> 0), and sets
 * *left to their number. Returns -1: there is none. */
static int64_t llm_pack_take(llm_packing *p, int64_t size, int64_t *left) {
    int64_t i = 1, row;
    if (p->space[1] < size) return -1;
    while (i < p->leaves) i = p->space[2 * i] >= size ? 2 * i : 2 * i + 1;
    *left = i - p->leaves;
    row = p->open[*left];
    p->open[*left] = p->next[row];
    if (p->open[*left] < 0) llm_pack_mark(p, *left, 0);
    return row;
}

/* Adds a row with `left` places left to those that llm_pack_take finds. */
static void llm_pack_give(llm_packing *p, int64_t row, int64_t left) {
    p->next[row] = p->open[left];
    p->open[left] = row;
    if (left > 0) llm_pack_mark(p, left, left);
}

/* Sorts the documents of the part into p->order by size, the longest first; those of one size are
 * in the epoch's random order (llm_data_order). Returns 0 if the ctx has an error. */
static int llm_pack_sort(llm_packing *p, const llm_data *d, const llm_data_part *part, tsh_ctx *ctx,
                         int64_t epoch) {
    const int64_t length = d->desc.length;
    memset(p->starts, 0, (size_t)(length + 2) * sizeof *p->starts);
    for (int64_t i = 0; i < part->count; i++)
        p->starts[length - llm_data_size(d, part->first + i) + 1]++;
    for (int64_t s = 0; s <= length; s++) p->starts[s + 1] += p->starts[s];
    for (int64_t i = 0; i < part->count; i++) {
        const int64_t u = llm_data_order(ctx, d, epoch, part->count, i);
        if (u < 0) return 0;
        p->order[p->starts[length - llm_data_size(d, part->first + u)]++] = u;
    }
    return 1;
}

/* Puts the documents into rows, in the order of p->order. */
static void llm_pack_fill(llm_packing *p, const llm_data *d, const llm_data_part *part,
                          llm_rows *rows) {
    rows->count = 0;
    for (int64_t i = 0; i < part->count; i++) {
        const int64_t u = p->order[i], size = llm_data_size(d, part->first + u);
        int64_t left = d->desc.length, row = llm_pack_take(p, size, &left);
        if (row < 0) {
            row = rows->count++;
            rows->last[row] = -1;
        }
        rows->before[u] = rows->last[row];
        rows->last[row] = u;
        llm_pack_give(p, row, left - size);
    }
}

LLM_DATA_API void llm_rows_free(llm_rows *rows) {
    free(rows->last);
    free(rows->before);
    memset(rows, 0, sizeof *rows);
    rows->epoch = -1;
}

static void *llm_rows_new(int64_t count) {
    return (uint64_t)count > SIZE_MAX / sizeof(int64_t) ? NULL
                                                        : malloc((size_t)count * sizeof(int64_t));
}

/* Packs the documents of the part into *rows. Returns 0: not enough memory, or the ctx has an
 * error. */
static int llm_data_pack(const llm_data *d, const llm_data_part *part, tsh_ctx *ctx, int64_t epoch,
                         llm_rows *rows) {
    const int64_t n = part->count, length = d->desc.length;
    llm_packing p;
    int ok;
    memset(&p, 0, sizeof p);
    for (p.leaves = 1; p.leaves <= length;) p.leaves *= 2;
    p.space = (int64_t *)llm_rows_new(2 * p.leaves);
    p.open = (int64_t *)llm_rows_new(length + 1);
    p.next = (int64_t *)llm_rows_new(n);
    p.order = (int64_t *)llm_rows_new(n);
    p.starts = (int64_t *)llm_rows_new(length + 2);
    ok = p.space && p.open && p.next && p.order && p.starts;
    if (ok) {
        memset(p.space, 0, (size_t)(2 * p.leaves) * sizeof *p.space);
        for (int64_t s = 0; s <= length; s++) p.open[s] = -1;
        ok = llm_pack_sort(&p, d, part, ctx, epoch);
    }
    if (ok) llm_pack_fill(&p, d, part, rows);
    rows->epoch = ok ? epoch : -1;
    free(p.space);
    free(p.open);
    free(p.next);
    free(p.order);
    free(p.starts);
    return ok;
}

/* Fills *rows with the part's documents as an epoch has them: packed, or one in each row. Returns
 * 0: not enough memory, or the ctx has an error. */
LLM_DATA_API int llm_data_arrange(const llm_data *d, const llm_data_part *part, tsh_ctx *ctx,
                                  int64_t epoch, llm_rows *rows) {
    if (rows->epoch == epoch) return 1;
    if (!rows->last) rows->last = (int64_t *)llm_rows_new(part->count);
    if (!rows->before) rows->before = (int64_t *)llm_rows_new(part->count);
    if (!rows->last || !rows->before) return 0;
    if (!d->desc.unpacked) return llm_data_pack(d, part, ctx, epoch, rows);
    for (int64_t i = 0; i < part->count; i++) {
        rows->last[i] = i;
        rows->before[i] = -1;
    }
    rows->count = part->count;
    rows->epoch = epoch;
    return 1;
}

/* Sets the part's numbers of rows, inputs and answers. All epochs have the same number of rows,
 * which depends on the sizes of documents alone. Returns 0: not enough memory. */
LLM_DATA_API int llm_data_count_part(llm_data *d, llm_data_part *part) {
    const int64_t each = d->pairs ? 2 : 1;
    llm_rows rows;
    int ok;
    memset(&rows, 0, sizeof rows);
    rows.epoch = -1;
    for (int64_t i = each * part->first; i < each * (part->first + part->count); i++) {
        part->inputs += d->sequences[i].inputs;
        part->answers += d->sequences[i].answers;
    }
    ok = part->count == 0 || llm_data_arrange(d, part, NULL, 0, &rows);
    if (!ok) (void)snprintf(d->error, sizeof d->error, "not enough memory");
    part->rows = rows.count;
    llm_rows_free(&rows);
    return ok;
}

#endif
