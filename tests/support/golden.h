/* golden.h - reads the .safetensors files of tests/golden: a tensor by its name.
 *
 * The format: a little-endian u64 with the length of the header; the header, JSON: "name":
 * {"dtype":"F32","shape":[2,3],"data_offsets":[from,to]}; then the values, row-major and
 * little-endian. Only F32, F64 and I64 are read. Include it after tshard.h. */
#ifndef TSHARD_TESTS_GOLDEN_H
#define TSHARD_TESTS_GOLDEN_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

typedef struct golden_file {
    char *header; /* ends with '\0' */
    char *values; /* in this machine's byte order */
    size_t bytes; /* of values */
    char *read;   /* 1 at the byte of the header where the name of a tensor begins that was read */
} golden_file;

typedef struct golden_tensor {
    tsh_dtype dtype; /* TSH_F32, TSH_F64 or TSH_I64 */
    tsh_shape shape;
    int64_t count;
    const void *data;
} golden_tensor;

/* Reads up to `most` integers of "key":[...] in text; returns how many. */
__attribute__((unused)) static int golden_list(const char *text, const char *key, int64_t *out,
                                               int most) {
    const char *at = strstr(text, key);
    int n = 0;
    assert_non_null(at);
    at += strlen(key);
    assert_int_equal(*at, '[');
    for (at++; *at != ']';) {
        char *end;
        assert_true(n < most);
        out[n++] = (int64_t)strtoll(at, &end, 10);
        assert_ptr_not_equal(at, end);
        at = *end == ',' ? end + 1 : end;
    }
    return n;
}

/* The `width` bytes at `at`, little-endian, as a number. */
static uint64_t golden_number(const char *at, size_t width) {
    uint64_t number = 0;
    size_t i;
    for (i = 0; i < width; i++) number |= (uint64_t)(unsigned char)at[i] << 8 * i;
    return number;
}

/* Puts the values of every tensor into this machine's byte order. */
static void golden_reorder(golden_file *g) {
    static const char dtype[] = "\"dtype\":\"";
    const char *entry = g->header;
    while ((entry = strstr(entry, dtype)) != NULL) {
        int64_t offset[2];
        size_t i, width;
        entry += sizeof dtype - 1;
        width = strncmp(entry + 1, "64", 2) == 0 ? 8 : 4;
        assert_int_equal(golden_list(entry, "\"data_offsets\":", offset, 2), 2);
        assert_true(offset[0] >= 0 && offset[1] >= offset[0] && (size_t)offset[1] <= g->bytes);
        for (i = (size_t)offset[0]; i + width <= (size_t)offset[1]; i += width) {
            const uint64_t wide = golden_number(g->values + i, width);
            const uint32_t narrow = (uint32_t)wide;
            memcpy(g->values + i, width == 8 ? (const void *)&wide : &narrow, width);
        }
    }
}

/* Opens a file by its path. */
__attribute__((unused)) static golden_file golden_open_at(const char *path) {
    golden_file g = {NULL, NULL, 0, NULL};
    char prefix[8];
    uint64_t length;
    long end;
    FILE *file;
    file = fopen(path, "rb");
    if (!file) fail_msg("%s cannot be opened (tests/golden/generate.py writes it)", path);
    assert_int_equal(fread(prefix, sizeof prefix, 1, file), 1);
    length = golden_number(prefix, sizeof prefix);
    assert_int_equal(fseek(file, 0, SEEK_END), 0);
    end = ftell(file);
    assert_true(end > 8 && length <= (uint64_t)end - 8);
    assert_int_equal(fseek(file, 8, SEEK_SET), 0);
    g.bytes = (size_t)end - 8 - (size_t)length;
    g.header = (char *)calloc(1, (size_t)length + 1);
    g.values = (char *)malloc(g.bytes + 1);
    g.read = (char *)calloc(1, (size_t)length + 1);
    assert_non_null(g.read);
    assert_non_null(g.header);
    assert_non_null(g.values);
    assert_int_equal(fread(g.header, 1, (size_t)length, file), length);
    assert_int_equal(fread(g.values, 1, g.bytes, file), g.bytes);
    (void)fclose(file);
    golden_reorder(&g);
    return g;
}

/* Opens tests/golden/<name>.safetensors; the folder is found from this header's own place. */
__attribute__((unused)) static golden_file golden_open(const char *name) {
    const char *here = __FILE__, *slash = strrchr(here, '/');
    char path[512];
    (void)snprintf(path, sizeof path, "%.*s../golden/%s.safetensors",
                   slash ? (int)(slash - here + 1) : 0, here, name);
    return golden_open_at(path);
}

__attribute__((unused)) static void golden_close(golden_file *g) {
    free(g->header);
    free(g->values);
    free(g->read);
    g->header = g->values = g->read = NULL;
}

/* Closes a file of which every tensor must have been read: what nobody reads is not tested. */
__attribute__((unused)) static void golden_finish(golden_file *g) {
    static const char after[] = "\":{\"dtype\"";
    const char *end = g->header;
    for (; (end = strstr(end, after)) != NULL; end++) {
        const char *name = end;
        while (name > g->header && name[-1] != '"') name--;
        if (!g->read[name - g->header])
            fail_msg("no test reads the golden \"%.*s\"", (int)(end - name), name);
    }
    golden_close(g);
}

/* Looks up "case.what"; 0 where the file has none. */
__attribute__((unused)) static int golden_find(const golden_file *g, const char *name,
                                               const char *what, golden_tensor *t) {
    char key[128];
    const char *at;
    int64_t offset[2] = {0, 0};
    int i;
    (void)snprintf(key, sizeof key, "\"%s.%s\":{", name, what);
    at = strstr(g->header, key);
    if (!at) return 0;
    __atomic_store_n(&g->read[at + 1 - g->header], 1, __ATOMIC_RELAXED); /* by ranks at once */
    memset(t, 0, sizeof *t);
    at += strlen(key);
    t->dtype = strncmp(at, "\"dtype\":\"F32\"", 13) == 0   ? TSH_F32
               : strncmp(at, "\"dtype\":\"F64\"", 13) == 0 ? TSH_F64
                                                          : TSH_I64;
    if (t->dtype == TSH_I64) assert_int_equal(strncmp(at, "\"dtype\":\"I64\"", 13), 0);
    t->shape.ndim = golden_list(at, "\"shape\":", t->shape.dim, TSH_MAX_DIMS);
    assert_int_equal(golden_list(at, "\"data_offsets\":", offset, 2), 2);
    for (t->count = 1, i = 0; i < t->shape.ndim; i++) t->count *= t->shape.dim[i];
    assert_int_equal(offset[1] - offset[0], t->count * (int64_t)tsh_dtype_size(t->dtype));
    assert_true(offset[0] >= 0 && (size_t)offset[1] <= g->bytes);
    t->data = g->values + offset[0];
    return 1;
}

/* The same; it must be there. */
__attribute__((unused)) static golden_tensor golden_get(const golden_file *g, const char *name,
                                                        const char *what) {
    golden_tensor t;
    if (!golden_find(g, name, what, &t)) fail_msg("there is no \"%s.%s\"", name, what);
    return t;
}

/* An owned tensor with a golden one's values (F32 as values of this build; not F64). */
__attribute__((unused)) static tsh_tensor *golden_load(tsh_ctx *ctx, const golden_tensor *g) {
    tsh_tensor *t = tsh_tensor_new(ctx, g->dtype == TSH_F32 ? TSH_REAL : TSH_I64, g->shape,
                                   tsh_replicated());
    void *data = tsh_data(ctx, t);
    const float *from = (const float *)g->data;
    int64_t i;
    assert_non_null(data);
    if (g->dtype == TSH_I64) memcpy(data, g->data, (size_t)g->count * 8);
    for (i = 0; g->dtype == TSH_F32 && i < g->count; i++) ((tsh_real *)data)[i] = (tsh_real)from[i];
    return t;
}

#endif
