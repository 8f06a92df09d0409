/* unit.h - what unit tests share: a ctx of one rank, errors told by code and sentence, tensors told
 * by their text, and an allocator that checks its contract, counts, and can fail.
 *
 * Include it after tshard.h. Its asserts are cmocka's: not for the threads of ranks, which have
 * ranks.h. */
#ifndef TSHARD_TESTS_UNIT_H
#define TSHARD_TESTS_UNIT_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#define UNIT_UNUSED __attribute__((unused))

UNIT_UNUSED static tsh_ctx *unit_open(const tsh_desc *desc) {
    tsh_ctx *ctx = NULL;
    assert_int_equal(tsh_open(desc, &ctx), TSH_OK);
    assert_non_null(ctx);
    return ctx;
}

/* Ends a test: the ctx holds no error, and is closed. */
UNIT_UNUSED static void unit_close(tsh_ctx *ctx) {
    if (!tsh_ok(ctx)) fail_msg("%s", tsh_last_error(ctx)->message);
    tsh_close(ctx);
}

/* The ctx holds an error of this code, whose sentence holds `part`; it is forgotten then. */
#define EXPECT(code, part) unit_expect(ctx, code, part, __LINE__)
UNIT_UNUSED static void unit_expect(tsh_ctx *ctx, tsh_result code, const char *part, int line) {
    const tsh_error *error = tsh_last_error(ctx);
    if (error->code != code || !strstr(error->message, part))
        fail_msg("line %d: %s \"%s\", not %s with \"%s\"", line, tsh_result_name(error->code),
                 error->message, tsh_result_name(code), part);
    tsh_clear_error(ctx);
    assert_int_equal(tsh_last_error(ctx)->code, TSH_OK);
}

/* tsh_to_string without the dtype: "(2, 2) R: 1 2 / 3 4". */
#define EXPECT_TEXT(t, want) unit_text(t, want, __LINE__)
UNIT_UNUSED static void unit_text(tsh_tensor *t, const char *want, int line) {
    char text[512];
    const char *got = strchr(tsh_to_string(t, text, sizeof text), ' ');
    got = got ? got + 1 : "no tensor";
    if (strcmp(got, want) != 0) fail_msg("line %d: \"%s\", not \"%s\"", line, got, want);
}

/* Numbers that may differ by `tolerance`. */
#define EXPECT_NEAR(got, want, tolerance) unit_near(got, want, tolerance, __LINE__)
UNIT_UNUSED static void unit_near(double got, double want, double tolerance, int line) {
    if (!(fabs(got - want) <= tolerance))
        fail_msg("line %d: %.17g, not %.17g within %g", line, got, want, tolerance);
}

/* -------------------------------------------------------------- an allocator */

typedef struct unit_memory {
    uint64_t calls, takes; /* all, and those that ask for memory */
    uint64_t fail_at;      /* the take that fails, counted from 1; 0: none */
    int64_t blocks, bytes; /* alive */
    int broken;            /* calls that did not keep the contract */
} unit_memory;

typedef struct unit_header {
    size_t size, align;
    void *raw; /* malloc's block */
} unit_header;

UNIT_UNUSED static void *unit_allocate(void *ptr, size_t old_size, size_t new_size,
                                       size_t align, void *user) {
    unit_memory *memory = (unit_memory *)user;
    unit_header header;
    void *raw, *old = NULL;
    char *block = NULL;
    memory->calls++;
    if (align < sizeof header || (align & (align - 1)) || (!ptr && (old_size || !new_size)))
        memory->broken++;
    if (ptr) {
        memcpy(&header, (char *)ptr - sizeof header, sizeof header);
        if (header.size != old_size || header.align != align) memory->broken++;
        old = header.raw;
    }
    if (new_size) {
        if (++memory->takes == memory->fail_at) return NULL;
        raw = malloc(2 * align + new_size); /* at least `align` bytes before the block */
        if (!raw) return NULL;
        block = (char *)raw + align;
        block += (align - (uintptr_t)block % align) % align;
        header.size = new_size;
        header.align = align;
        header.raw = raw;
        memcpy(block - sizeof header, &header, sizeof header);
        memset(block, 0xA5, new_size); /* nobody may count on zeros */
        if (ptr) memcpy(block, ptr, old_size < new_size ? old_size : new_size);
        memory->blocks++;
        memory->bytes += (int64_t)new_size;
    }
    if (ptr) {
        free(old);
        memory->blocks--;
        memory->bytes -= (int64_t)old_size;
    }
    return block;
}

UNIT_UNUSED static tsh_ctx *unit_open_memory(unit_memory *memory) {
    tsh_desc desc = {.allocator = {unit_allocate, memory}};
    memset(memory, 0, sizeof *memory);
    return unit_open(&desc);
}

#endif
