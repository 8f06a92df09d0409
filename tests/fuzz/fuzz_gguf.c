/* Feeds bytes to examples/llm/gguf.h as if they were a GGUF file. What is no such file must give an
 * error of one sentence. Of what is one, three things are checked:
 *
 * - the config has a model_type, or there is an error;
 * - tokenizer.h reads the tokenizer, or refuses it with an error, also of a file of keys alone;
 * - the safetensors file that gguf_file_read writes has a header of JSON, all values lie within its
 *   length, and reading it in small parts gives the same bytes as reading it at once.
 *
 * `make fuzz` runs it under libFuzzer, test_gguf.c once for every file of the folder gguf, which
 * tests/llm/make_gguf.py writes. */
#if !defined(_POSIX_C_SOURCE)
#define _POSIX_C_SOURCE 200809L /* mmap */
#endif
#include "../../examples/llm/tokenizer.h"
#include "../../examples/llm/gguf.h"
#include "../../examples/llm/gguf_tokenizer.h"

#include "tokenizers.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_error(const char *error) {
    must_hold(strlen(error) > 10 && strlen(error) < 512);
    for (; *error; error++) must_hold((unsigned char)*error >= 0x20 && *error != 0x7f);
}

static int keep_some(void *user, const char *name, const char *dtype) {
    must_hold(strlen(name) > 0 && strlen(dtype) == 4);
    return *(const int *)user;
}

/* The header is JSON; the values end where it says; parts of any size are parts of the whole. */
static void check_values(const gguf *g, int keeps) {
    gguf_file f;
    int64_t end, n, at;
    char *whole, part[7];
    cJSON *json;
    const cJSON *item, *offsets;
    if (!gguf_file_open(&f, g, keep_some, &keeps)) return;
    end = f.header_size + (f.entries ? f.entry[f.entries - 1].end : 0);
    json = cJSON_ParseWithLength(f.header + 8, (size_t)f.header_size - 8);
    must_hold(cJSON_GetArraySize(json) == (int)f.entries + 1);
    cJSON_ArrayForEach(item, json) {
        offsets = cJSON_GetObjectItem(item, "data_offsets");
        if (offsets)
            must_hold(cJSON_GetArrayItem(offsets, 1)->valuedouble <= (double)(end - f.header_size));
    }
    cJSON_Delete(json);
    whole = end < 1 << 20 ? (char *)malloc((size_t)end + 1) : NULL;
    if (whole) must_hold(gguf_file_read(0, whole, end + 1, &f) == end);
    for (at = 0; whole && at < end && at < 1 << 16; at += n) {
        n = gguf_file_read(at, part, 1 + at % 7, &f);
        must_hold(n > 0 && memcmp(part, whole + at, (size_t)n) == 0);
    }
    must_hold(gguf_file_read(end + 5, part, 3, &f) == 0);
    free(whole);
    gguf_file_close(&f);
}

static void check_tokenizer(gguf *g) {
    char error[256] = "", *json = gguf_tokenizer(g, NULL);
    llm_tokenizer *t;
    int32_t *ids;
    int64_t n;
    if (!json) {
        check_error(g->error);
        return;
    }
    t = lent_tokenizer_read(json, strlen(json), "input", error, sizeof error);
    cJSON_free(json);
    if (!t) {
        check_error(error);
        return;
    }
    n = llm_tokenizer_encode(t, "the other 12 <s>", 16, 1, &ids);
    if (n >= 0) free(ids);
    lent_tokenizer_free(t);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char error[512] = "";
    char *copy = (char *)malloc(size ? size : 1); /* so that reading beyond is seen */
    gguf *g;
    cJSON *config;
    must_hold(copy != NULL);
    if (size) memcpy(copy, data, size);
    g = gguf_read_as(GGUF_KEYS, copy, size, "input", error, sizeof error);
    if (g) check_tokenizer(g);
    gguf_close(g);
    g = gguf_read(copy, size, "input", error, sizeof error);
    if (!g) {
        check_error(error);
        free(copy);
        return 0;
    }
    check_values(g, 0);
    check_values(g, 1);
    config = gguf_config(g);
    if (config) must_hold(cJSON_IsString(cJSON_GetObjectItem(config, "model_type")));
    else check_error(g->error);
    cJSON_Delete(config);
    cJSON_free(gguf_tokenizer_config(g));
    (void)gguf_factors(g, 2);
    g->error[0] = 0;
    check_tokenizer(g);
    gguf_close(g);
    free(copy);
    return 0;
}
