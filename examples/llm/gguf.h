/* gguf.h - reads GGUF files (the format of llama.cpp's models; version 3, little-endian) of the
 * families llama, qwen2, qwen3, gemma, gpt2 and phi3
 *
 *     gguf *g = gguf_open("model.gguf", error, sizeof error);     see gguf_parts.h
 *     cJSON *config = gguf_config(g);              as config.json of the model's folder
 *     char *json = gguf_tokenizer(g, NULL);        as tokenizer.json; gguf_open_keys suffices
 *     const char *text = gguf_chat_template(g, &length);
 *     gguf_file file;                              as model.safetensors: tsh_load_with takes
 *     gguf_file_open(&file, g, keep, user);        {.read_at = gguf_file_read, .user = &file}
 *
 * From there on, all is done as for a folder. The file is mapped: reading a part of a tensor
 * touches the pages of that part only. Blocks of Q8_0, Q4_0 and Q4_1 may be kept as they are, since
 * tshard's have the same bytes. Blocks of other types, and blocks that are not kept, are read as
 * F32.
 *
 * A key or value that is not known, and may change what the model computes, is an error with its
 * name. The format: docs/gguf.md of https://github.com/ggml-org/ggml. Needs cJSON and POSIX. */
#ifndef LLM_GGUF_H
#define LLM_GGUF_H

#include "files.h"
#include "quote.h"
#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#if defined(__GNUC__)
#define GGUF_API          __attribute__((unused)) static
#define GGUF_PRINTF(f, a) __attribute__((format(printf, f, a)))
#else
#define GGUF_API static
#define GGUF_PRINTF(f, a)
#endif

enum { GGUF_DIMS = 4, GGUF_NAME = 96, GGUF_BLOCK = 256, GGUF_MAX_EOS = 8 };

/* A string in the file, without a zero byte at its end. */
typedef struct gguf_string {
    const char *at;
    size_t length;
} gguf_string;

/* Types of metadata values, with the numbers of the file format. */
typedef enum gguf_type {
    GGUF_U8,
    GGUF_I8,
    GGUF_U16,
    GGUF_I16,
    GGUF_U32,
    GGUF_I32,
    GGUF_F32,
    GGUF_BOOL,
    GGUF_STRING,
    GGUF_ARRAY,
    GGUF_U64,
    GGUF_I64,
    GGUF_F64,
    GGUF_TYPES
} gguf_type;

/* A key and its value: `count` elements of type `of`, from `at` on. If type is not GGUF_ARRAY, `of`
 * is the same and count is 1. */
typedef struct gguf_pair {
    gguf_string key;
    gguf_type type, of;
    uint64_t count;
    const unsigned char *at;
} gguf_pair;

/* A type of tensors: each block has `elements` elements in `bytes` bytes. number: the number that
 * GGUF files have for the type. */
typedef struct gguf_format {
    uint32_t number;
    /* the type's names in ggml and in safetensors ("U8": blocks that tshard computes with) */
    const char *name, *hub;
    const char *dtype; /* tshard's dtype with the same blocks, such as "q8_0"; NULL: none */
    int elements, bytes;
    /* converts a block to F32; NULL: elements are floats (F32, F16, BF16) and not converted */
    void (*decode)(const unsigned char *block, float *to);
} gguf_format;

typedef struct gguf_tensor {
    gguf_string name;
    char hub[GGUF_NAME]; /* the tensor's name in model.safetensors; "": it is no parameter there */
    int dims;
    uint64_t ne[GGUF_DIMS]; /* dimensions: ne[0] elements in a row, ne[1] rows, ... */
    const gguf_format *format;
    uint64_t offset, bytes; /* position of the values in the data section; their size in bytes */
    uint64_t head; /* head size, if rows of a head are in llama.cpp's order (gguf_row); else 0 */
} gguf_tensor;

/* How much of a file is read. */
typedef enum gguf_what {
    GGUF_MODEL, /* the whole file is read: a model of a known architecture */
    GGUF_KEYS,  /* the keys and values of metadata are read, but no tensor */
    GGUF_PART   /* keys and list of tensors are read: the file is one of several of a model */
} gguf_what;

typedef struct gguf {
    gguf_what what;
    char *path;
    const unsigned char *bytes; /* all bytes of the file, mapped or in memory */
    size_t size, at;            /* bytes of the file; position of the next byte to parse */
    void *map; /* mapping that gguf_close unmaps; NULL: the bytes are the caller's */
    gguf_pair *pair;            /* array of `pairs` keys and values, sorted by key */
    gguf_tensor *tensor;        /* array of `tensors` tensors, sorted by offset */
    size_t pairs, tensors;
    size_t keys_end; /* position in the file after the last key and its value */
    size_t data;     /* position in the file of the data section, which has the tensors' values */
    char arch[32];
    char error[512];   /* the first error; empty: none */
    char warning[256]; /* what was read otherwise than the file says; empty: nothing */
} gguf;

/* -- recording errors ------------------------------------------------------- */

/* Records an error as "path: ...", unless there is one already. Returns 0. */
GGUF_PRINTF(2, 3)
static int gguf_fail(gguf *g, const char *format, ...) {
    char text[384];
    va_list list;
    if (g->error[0]) return 0;
    va_start(list, format);
    (void)vsnprintf(text, sizeof text, format, list);
    va_end(list);
    (void)snprintf(g->error, sizeof g->error, "%.120s: %s", g->path, text);
    (void)quote_message(g->error);
    return 0;
}

/* Copies the beginning of a string of the file for an error, with '?' for what is not printable
 * ASCII. Returns `to`, which has `size` bytes. */
static const char *gguf_quote(gguf_string s, char *to, size_t size) {
    size_t i, n = s.length < size - 4 ? s.length : size - 4;
    for (i = 0; i < n; i++) to[i] = s.at[i] >= ' ' && s.at[i] < 127 ? s.at[i] : '?';
    strcpy(to + n, n < s.length ? "..." : "");
    return to;
}

/* -- parsing numbers, strings, keys with their values ----------------------- */

/* Returns the little-endian number of `bytes` bytes at `at`. */
static uint64_t gguf_word(const unsigned char *at, int bytes) {
    uint64_t word = 0;
    int i;
    for (i = 0; i < bytes; i++) word |= (uint64_t)at[i] << 8 * i;
    return word;
}

/* Returns the size in bytes of a value of a type; 0: values differ in size. */
static int gguf_size_of(gguf_type type) {
    static const char size[GGUF_TYPES] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    return size[type];
}

static size_t gguf_left(const gguf *g) {
    return g->size - g->at;
}

/* Returns the next n bytes of the file, and moves g->at past them. NULL and an error if the file
 * ends before; what: says what the bytes are, for the error. */
static const unsigned char *gguf_take(gguf *g, uint64_t n, const char *what) {
    const unsigned char *at = g->bytes + g->at;
    if (n > gguf_left(g)) {
        (void)gguf_fail(g, "the file ends within %s, at byte %llu of %llu", what,
                        (unsigned long long)g->at, (unsigned long long)g->size);
        return NULL;
    }
    g->at += (size_t)n;
    return at;
}

static uint64_t gguf_take_word(gguf *g, int bytes, const char *what) {
    const unsigned char *at = gguf_take(g, (uint64_t)bytes, what);
    return at ? gguf_word(at, bytes) : 0;
}

static gguf_string gguf_take_string(gguf *g, const char *what) {
    gguf_string s = {"", 0};
    const uint64_t n = gguf_take_word(g, 8, what);
    const unsigned char *at = g->error[0] ? NULL : gguf_take(g, n, what);
    if (at) s.at = (const char *)at;
    if (at) s.length = (size_t)n;
    return s;
}

/* Parses the type of a key's value at g->at. Returns 0 and an error if there is no such type. */
static int gguf_take_type(gguf *g, gguf_string key, gguf_type *type) {
    char quote[80];
    const uint64_t number = gguf_take_word(g, 4, "a key's type");
    if (number >= GGUF_TYPES)
        return gguf_fail(g, "the key \"%s\" is of the type %llu, which is not known",
                         gguf_quote(key, quote, sizeof quote), (unsigned long long)number);
    *type = (gguf_type)number;
    return !g->error[0];
}

static int gguf_take_pair(gguf *g, gguf_pair *pair) {
    char quote[80], what[128];
    uint64_t i;
    pair->key = gguf_take_string(g, "a key");
    (void)snprintf(what, sizeof what, "the value of \"%s\"",
                   gguf_quote(pair->key, quote, sizeof quote));
    if (g->error[0] || !gguf_take_type(g, pair->key, &pair->type)) return 0;
    pair->of = pair->type;
    pair->count = 1;
    if (pair->type == GGUF_ARRAY) {
        if (!gguf_take_type(g, pair->key, &pair->of)) return 0;
        pair->count = gguf_take_word(g, 8, what);
        if (pair->of == GGUF_ARRAY)
            return gguf_fail(g, "the key \"%s\" is an array of arrays, which is not known", quote);
    }
    pair->at = g->bytes + g->at;
    if (pair->of == GGUF_STRING) {
        for (i = 0; i < pair->count && !g->error[0]; i++) (void)gguf_take_string(g, what);
    } else {
        const uint64_t each = (uint64_t)gguf_size_of(pair->of);
        (void)gguf_take(g, pair->count > gguf_left(g) ? UINT64_MAX : pair->count * each, what);
    }
    return !g->error[0];
}

static int gguf_compare(gguf_string a, gguf_string b) {
    const size_t n = a.length < b.length ? a.length : b.length;
    const int order = n ? memcmp(a.at, b.at, n) : 0;
    return order ? order : (a.length > b.length) - (a.length < b.length);
}

static int gguf_by_key(const void *a, const void *b) {
    return gguf_compare(((const gguf_pair *)a)->key, ((const gguf_pair *)b)->key);
}

static int gguf_by_name(const void *a, const void *b) {
    return gguf_compare(((const gguf_tensor *)a)->name, ((const gguf_tensor *)b)->name);
}

static int gguf_by_offset(const void *a, const void *b) {
    const gguf_tensor *x = (const gguf_tensor *)a, *y = (const gguf_tensor *)b;
    if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

/* -- finding keys and converting their values ------------------------------- */

static const gguf_pair *gguf_find(const gguf *g, const char *key) {
    gguf_pair wanted;
    memset(&wanted, 0, sizeof wanted);
    wanted.key.at = key;
    wanted.key.length = strlen(key);
    if (!g->pairs) return NULL;
    return (const gguf_pair *)bsearch(&wanted, g->pair, g->pairs, sizeof wanted, gguf_by_key);
}

/* Returns element i of a number or a bool, or of an array of these. */
static double gguf_element(const gguf_pair *pair, uint64_t i) {
    const int size = gguf_size_of(pair->of);
    const uint64_t word = gguf_word(pair->at + i * (uint64_t)size, size);
    const uint32_t low = (uint32_t)word;
    float f;
    double d;
    switch (pair->of) {
    case GGUF_I8: return (double)(int8_t)(uint8_t)word;
    case GGUF_I16: return (double)(int16_t)(uint16_t)word;
    case GGUF_I32: return (double)(int32_t)low;
    case GGUF_I64: return (double)(int64_t)word;
    case GGUF_F32: memcpy(&f, &low, sizeof f); return (double)f;
    case GGUF_F64: memcpy(&d, &word, sizeof d); return d;
    case GGUF_BOOL: return word != 0;
    default: return (double)word;
    }
}

static int gguf_is_number(gguf_type type) {
    return type != GGUF_STRING && type != GGUF_ARRAY && type != GGUF_BOOL;
}

/* Returns 1 if a value is a number, or an array of equal numbers (one for each layer). */
static int gguf_is_one_number(const gguf_pair *pair) {
    uint64_t i = 1;
    if (pair->type != GGUF_ARRAY) return gguf_is_number(pair->type);
    if (!gguf_is_number(pair->of) || !pair->count) return 0;
    while (i < pair->count && !(gguf_element(pair, i) < gguf_element(pair, 0)) &&
           !(gguf_element(pair, i) > gguf_element(pair, 0)))
        i++;
    return i == pair->count;
}

/* Records that the value of a key is not a single number. Returns 0. */
static int gguf_no_number(gguf *g, const char *key, const gguf_pair *pair) {
    return gguf_fail(g, "the key \"%s\" is no number%s", key,
                     pair->type == GGUF_ARRAY ? "; layers that differ are not supported" : "");
}

/* Reads the number of a key. Returns 0: the key is missing, or, with an error, its value is no
 * number. */
static int gguf_number(gguf *g, const char *key, double *number) {
    const gguf_pair *pair = gguf_find(g, key);
    if (!pair) return 0;
    if (!gguf_is_one_number(pair)) return gguf_no_number(g, key, pair);
    *number = gguf_element(pair, 0);
    return 1;
}

/* Returns the whole number of a key, from 0 to `most`. If the key is missing, returns `otherwise`,
 * or, if that is negative, 0 and an error. */
static int64_t gguf_count(gguf *g, const char *key, int64_t most, int64_t otherwise) {
    double number = (double)otherwise;
    if (!gguf_number(g, key, &number)) {
        if (otherwise < 0) (void)gguf_fail(g, "the key \"%s\" is missing", key);
        return otherwise < 0 ? 0 : otherwise;
    }
    if (number >= 0 && number <= (double)most && floor(number) == number) return (int64_t)number;
    (void)gguf_fail(g, "the key \"%s\" is %g, not a whole number from 0 to %lld", key, number,
                    (long long)most);
    return 0;
}

/* Returns the string at *at, and moves *at to the one after it. */
static gguf_string gguf_next(const unsigned char **at) {
    gguf_string s;
    s.length = (size_t)gguf_word(*at, 8);
    s.at = (const char *)*at + 8;
    *at += 8 + s.length;
    return s;
}

/* Returns the string of a key; its length is 0 if the key is missing. */
static gguf_string gguf_text(gguf *g, const char *key) {
    const gguf_pair *pair = gguf_find(g, key);
    gguf_string s = {"", 0};
    const unsigned char *at;
    if (!pair) return s;
    at = pair->at;
    if (pair->type == GGUF_STRING) return gguf_next(&at);
    (void)gguf_fail(g, "the key \"%s\" is no string", key);
    return s;
}

static int gguf_is(gguf_string s, const char *text) {
    return s.length == strlen(text) && memcmp(s.at, text, s.length) == 0;
}

/* -- decoding blocks of quantised weights to F32 ---------------------------- */

/* Returns the F16 at `at` as a float. */
static float gguf_half(const unsigned char *at) {
    const int bits = at[0] | at[1] << 8, exponent = bits >> 10 & 31, fraction = bits & 1023;
    double x = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
    if (exponent == 31) x = fraction ? (double)NAN : (double)HUGE_VAL;
    return (float)(bits & 0x8000 ? -x : x);
}

static void gguf_decode_q4_0(const unsigned char *b, float *to) {
    const float d = gguf_half(b);
    int i;
    for (i = 0; i < 32; i++) to[i] = d * (float)((b[2 + i % 16] >> (i < 16 ? 0 : 4) & 15) - 8);
}

static void gguf_decode_q4_1(const unsigned char *b, float *to) {
    const float d = gguf_half(b), m = gguf_half(b + 2);
    int i;
    for (i = 0; i < 32; i++) to[i] = d * (float)(b[4 + i % 16] >> (i < 16 ? 0 : 4) & 15) + m;
}

/* Decodes Q5_0, where the fifth bit of element i is bit i of a separate 4-byte word. */
static void gguf_decode_q5_0(const unsigned char *b, float *to) {
    const float d = gguf_half(b);
    const uint64_t high = gguf_word(b + 2, 4);
    int i;
    for (i = 0; i < 32; i++)
        to[i] = d * (float)(((b[6 + i % 16] >> (i < 16 ? 0 : 4) & 15) |
                             (int)(high >> i & 1) << 4) - 16);
}

static void gguf_decode_q5_1(const unsigned char *b, float *to) {
    const float d = gguf_half(b), m = gguf_half(b + 2);
    const uint64_t high = gguf_word(b + 4, 4);
    int i;
    for (i = 0; i < 32; i++)
        to[i] = d * (float)((b[8 + i % 16] >> (i < 16 ? 0 : 4) & 15) |
                            (int)(high >> i & 1) << 4) + m;
}

static void gguf_decode_q8_0(const unsigned char *b, float *to) {
    const float d = gguf_half(b);
    int i;
    for (i = 0; i < 32; i++) to[i] = d * (float)(signed char)b[2 + i];
}

/* Unpacks the scale and the minimum, 6 bits each, of sub-block j (0 to 7) of a block of 256
 * elements in Q4_K or Q5_K. s: the 12 bytes that hold those of all sub-blocks. */
static void gguf_part(const unsigned char *s, int j, int *scale, int *min) {
    *scale = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
    *min = j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | (s[j] >> 6) << 4;
}

/* Decodes a block of Q4_K or Q5_K, 8 sub-blocks of 32 elements: element = d * scale * q - m * min,
 * with d and m of the block, scale and min of the sub-block, and q, the stored 4 or 5 bits. low:
 * the lower 4 bits of all q; high: their fifth bits, those of sub-block j in bit j of each byte;
 * NULL: there are none (Q4_K). */
static void gguf_decode_parts(const unsigned char *b, const unsigned char *low,
                              const unsigned char *high, float *to) {
    const float d = gguf_half(b), m = gguf_half(b + 2);
    int i, j, scale, min;
    for (j = 0; j < 8; j++) {
        gguf_part(b + 4, j, &scale, &min);
        for (i = 0; i < 32; i++) {
            const int q = (low[j / 2 * 32 + i] >> 4 * (j % 2) & 15) |
                          (high ? (high[i] >> j & 1) << 4 : 0);
            to[32 * j + i] = d * (float)scale * (float)q - m * (float)min;
        }
    }
}

static void gguf_decode_q4_k(const unsigned char *b, float *to) {
    gguf_decode_parts(b, b + 16, NULL, to);
}

static void gguf_decode_q5_k(const unsigned char *b, float *to) {
    gguf_decode_parts(b, b + 48, b + 16, to);
}

/* Decodes Q6_K: two halves of 128 elements, each with 64 bytes for the lower 4 bits of its elements
 * and 32 bytes for the upper 2 bits. Every 16 elements have a scale. */
static void gguf_decode_q6_k(const unsigned char *b, float *to) {
    const float d = gguf_half(b + 208);
    int i;
    for (i = 0; i < 256; i++) {
        const int half = i / 128, k = i % 128;
        const int low = b[64 * half + k % 64] >> (k < 64 ? 0 : 4) & 15;
        const int high = b[128 + 32 * half + k % 32] >> 2 * (k / 32) & 3;
        to[i] = d * (float)(signed char)b[192 + i / 16] * (float)((low | high << 4) - 32);
    }
}

static const gguf_format gguf_formats[] = {
    {0, "F32", "F32", NULL, 1, 4, NULL},
    {1, "F16", "F16", NULL, 1, 2, NULL},
    {2, "Q4_0", "U8", "q4_0", 32, 18, gguf_decode_q4_0},
    {3, "Q4_1", "U8", "q4_1", 32, 20, gguf_decode_q4_1},
    {6, "Q5_0", "F32", NULL, 32, 22, gguf_decode_q5_0},
    {7, "Q5_1", "F32", NULL, 32, 24, gguf_decode_q5_1},
    {8, "Q8_0", "U8", "q8_0", 32, 34, gguf_decode_q8_0},
    {12, "Q4_K", "F32", NULL, 256, 144, gguf_decode_q4_k},
    {13, "Q5_K", "F32", NULL, 256, 176, gguf_decode_q5_k},
    {14, "Q6_K", "F32", NULL, 256, 210, gguf_decode_q6_k},
    {30, "BF16", "BF16", NULL, 1, 2, NULL}};

/* -- names and descriptions of tensors -------------------------------------- */

/* A tensor's name in GGUF files, without "blk.N.", and in safetensors files of the Hugging Face hub
 * (hub; "": the tensor is no parameter there). arch: the architectures that have it. */
typedef struct gguf_name {
    const char *arch, *name, *hub;
} gguf_name;

#define GGUF_LLAMAS "llama qwen2 qwen3 gemma phi3"
static const gguf_name gguf_names[] = {
    {GGUF_LLAMAS, "token_embd", "model.embed_tokens"},
    {GGUF_LLAMAS, "output_norm", "model.norm"},
    {GGUF_LLAMAS " gpt2", "output", "lm_head"},
    {"llama qwen2 qwen3 gemma", "attn_q", "model.layers.N.self_attn.q_proj"},
    {"llama qwen2 qwen3 gemma", "attn_k", "model.layers.N.self_attn.k_proj"},
    {"llama qwen2 qwen3 gemma", "attn_v", "model.layers.N.self_attn.v_proj"},
    {"phi3", "attn_qkv", "model.layers.N.self_attn.qkv_proj"},
    {GGUF_LLAMAS, "attn_output", "model.layers.N.self_attn.o_proj"},
    {"qwen3", "attn_q_norm", "model.layers.N.self_attn.q_norm"},
    {"qwen3", "attn_k_norm", "model.layers.N.self_attn.k_norm"},
    {GGUF_LLAMAS, "attn_norm", "model.layers.N.input_layernorm"},
    {GGUF_LLAMAS, "ffn_norm", "model.layers.N.post_attention_layernorm"},
    {"llama qwen2 qwen3 gemma", "ffn_gate", "model.layers.N.mlp.gate_proj"},
    {"llama qwen2 qwen3 gemma", "ffn_up", "model.layers.N.mlp.up_proj"},
    {"phi3", "ffn_up", "model.layers.N.mlp.gate_up_proj"},
    {GGUF_LLAMAS, "ffn_down", "model.layers.N.mlp.down_proj"},
    {"gpt2", "token_embd", "transformer.wte"},
    {"gpt2", "position_embd", "transformer.wpe"},
    {"gpt2", "output_norm", "transformer.ln_f"},
    {"gpt2", "attn_norm", "transformer.h.N.ln_1"},
    {"gpt2", "attn_qkv", "transformer.h.N.attn.c_attn"},
    {"gpt2", "attn_output", "transformer.h.N.attn.c_proj"},
    {"gpt2", "ffn_norm", "transformer.h.N.ln_2"},
    {"gpt2", "ffn_up", "transformer.h.N.mlp.c_fc"},
    {"gpt2", "ffn_down", "transformer.h.N.mlp.c_proj"},
    /* no parameter: factors of rotary positions, see gguf_factors */
    {"llama phi3", "rope_freqs", ""},
    {"phi3", "rope_factors_long", ""},
    {"phi3", "rope_factors_short", ""}};

/* Returns 1 if `word` is one of the words of `list`, which have blanks between them. */
static int gguf_listed(const char *list, const char *word) {
    const size_t n = strlen(word);
    const char *at = list;
    while (n && (at = strstr(at, word)) != NULL) {
        if ((at == list || at[-1] == ' ') && (at[n] == ' ' || !at[n])) return 1;
        at += n;
    }
    return 0;
}

/* Sets t->hub, the tensor's name in safetensors files of the Hugging Face hub. Returns 0 and an
 * error if the architecture has no tensor named t->name. */
static int gguf_name_tensor(gguf *g, gguf_tensor *t) {
    char name[GGUF_NAME], quote[80], *part = name, *end;
    const char *number = "", *hub, *n;
    size_t i;
    int ok = t->name.length < 64 && !memchr(t->name.at, 0, t->name.length);
    (void)snprintf(name, sizeof name, "%.*s", (int)(ok ? t->name.length : 0), t->name.at);
    if (ok && strncmp(name, "blk.", 4) == 0) {
        number = name + 4;
        part = strchr(name + 4, '.');
        i = strspn(number, "0123456789");
        ok = part && i && i < 6 && number + i == part && (i == 1 || *number != '0');
        if (ok) *part++ = 0;
    }
    end = ok ? strrchr(part, '.') : NULL; /* the end of the name, which must be .weight or .bias */
    ok = end && (strcmp(end, ".weight") == 0 || strcmp(end, ".bias") == 0);
    if (ok) *end = 0;
    for (i = 0; ok && i < sizeof gguf_names / sizeof *gguf_names; i++) {
        hub = gguf_names[i].hub;
        n = strstr(hub, ".N.");
        if (strcmp(gguf_names[i].name, part) != 0 || !gguf_listed(gguf_names[i].arch, g->arch) ||
            (*hub && !n != !*number))
            continue;
        if (*hub)
            (void)snprintf(t->hub, sizeof t->hub, "%.*s%s%s%s%s",
                           n ? (int)(n - hub + 1) : (int)strlen(hub), hub, number,
                           n ? n + 2 : "", ".", end + 1);
        return 1;
    }
    return gguf_fail(g, "the tensor \"%s\" is not known in a model of the architecture %s",
                     gguf_quote(t->name, quote, sizeof quote), g->arch);
}

/* Parses the description of a tensor at g->at into *t. Returns 0 and an error if it is wrong. */
static int gguf_take_tensor(gguf *g, gguf_tensor *t) {
    char quote[80];
    uint64_t number, count = 1;
    size_t i;
    int d;
    t->name = gguf_take_string(g, "a tensor's name");
    (void)gguf_quote(t->name, quote, sizeof quote);
    number = gguf_take_word(g, 4, "the description of a tensor");
    if (g->error[0]) return 0;
    if (number < 1 || number > GGUF_DIMS)
        return gguf_fail(g, "the tensor \"%s\" has %llu dimensions, not 1 to %d", quote,
                         (unsigned long long)number, GGUF_DIMS);
    t->dims = (int)number;
    for (d = 0; d < t->dims; d++) {
        t->ne[d] = gguf_take_word(g, 8, "the description of a tensor");
        if (g->error[0]) return 0;
        if (!t->ne[d] || t->ne[d] > (uint64_t)INT32_MAX || count > (UINT64_C(1) << 40) / t->ne[d])
            return gguf_fail(g, "the tensor \"%s\" has a dimension of %llu", quote,
                             (unsigned long long)t->ne[d]);
        count *= t->ne[d];
    }
    number = gguf_take_word(g, 4, "the description of a tensor");
    t->offset = gguf_take_word(g, 8, "the description of a tensor");
    for (i = 0; i < sizeof gguf_formats / sizeof *gguf_formats; i++)
        if (gguf_formats[i].number == number) t->format = &gguf_formats[i];
    if (g->error[0]) return 0;
    if (!t->format)
        return gguf_fail(g, "the tensor \"%s\" is of the type %llu, which is not known; known are "
                            "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K and Q6_K",
                         quote, (unsigned long long)number);
    if (t->ne[0] % (uint64_t)t->format->elements)
        return gguf_fail(g, "the tensor \"%s\" has rows of %llu elements, no whole number of the "
                            "blocks of %d of %s", quote, (unsigned long long)t->ne[0],
                         t->format->elements, t->format->name);
    t->bytes = count / (uint64_t)t->format->elements * (uint64_t)t->format->bytes;
    return 1;
}

/* Checks that tensors have different names, lie within the file and do not overlap; sorts them by
 * offset. Returns 0 and an error if they do not. */
static int gguf_check_places(gguf *g, uint64_t alignment) {
    char quote[80], other[80];
    const uint64_t room = g->size - g->data;
    size_t i;
    qsort(g->tensor, g->tensors, sizeof *g->tensor, gguf_by_name);
    for (i = 1; i < g->tensors; i++)
        if (gguf_by_name(&g->tensor[i - 1], &g->tensor[i]) == 0)
            return gguf_fail(g, "the tensor \"%s\" is there twice",
                             gguf_quote(g->tensor[i].name, quote, sizeof quote));
    qsort(g->tensor, g->tensors, sizeof *g->tensor, gguf_by_offset);
    for (i = 0; i < g->tensors; i++) {
        const gguf_tensor *t = &g->tensor[i], *before = i ? t - 1 : t;
        (void)gguf_quote(t->name, quote, sizeof quote);
        if (t->offset % alignment)
            return gguf_fail(g, "the tensor \"%s\" begins at %llu, no multiple of the alignment "
                                "%llu", quote, (unsigned long long)t->offset,
                             (unsigned long long)alignment);
        if (t->offset > room || t->bytes > room - t->offset)
            return gguf_fail(g, "the tensor \"%s\" has %llu bytes at %llu, but there are %llu "
                                "bytes of data", quote, (unsigned long long)t->bytes,
                             (unsigned long long)t->offset, (unsigned long long)room);
        if (i && before->offset + before->bytes > t->offset)
            return gguf_fail(g, "the tensors \"%s\" and \"%s\" overlap",
                             gguf_quote(before->name, other, sizeof other), quote);
    }
    return 1;
}

static const gguf_tensor *gguf_tensor_named(const gguf *g, const char *name) {
    size_t i;
    for (i = 0; i < g->tensors; i++)
        if (gguf_is(g->tensor[i].name, name)) return &g->tensor[i];
    return NULL;
}

/* -- parsing and opening a whole file --------------------------------------- */

static const char gguf_archs[] = "llama, qwen2, qwen3, gemma, gpt2, phi3";

static int gguf_take_arch(gguf *g) {
    char list[] = "llama qwen2 qwen3 gemma gpt2 phi3", quote[64];
    const gguf_string arch = gguf_text(g, "general.architecture");
    if (!arch.length) return gguf_fail(g, "the key \"general.architecture\" is missing");
    if (arch.length < sizeof g->arch) memcpy(g->arch, arch.at, arch.length);
    if (!gguf_listed(list, g->arch) || strlen(g->arch) != arch.length)
        return gguf_fail(g, "the key \"general.architecture\" is \"%s\"; supported are %s",
                         gguf_quote(arch, quote, sizeof quote), gguf_archs);
    return !g->error[0];
}

/* Sets t->head of the projections of queries and keys, whose rows llama.cpp stores in the order in
 * which it rotates them: of each head of size D, row 2 j + s in the GGUF file is row s D / 2 + j in
 * the safetensors file (s is 0 or 1). */
static void gguf_mark_pairs(gguf *g) {
    char key[64];
    int64_t heads, kv, width, size;
    size_t i;
    /* in llama's files only; a file without tensors, which has a tokenizer only, is skipped */
    if (strcmp(g->arch, "llama") != 0 || !g->tensors) return;
    width = gguf_count(g, "llama.embedding_length", INT32_MAX, -1);
    heads = gguf_count(g, "llama.attention.head_count", 65536, -1);
    kv = gguf_count(g, "llama.attention.head_count_kv", 65536, heads);
    size = gguf_count(g, "llama.attention.key_length", 65536, heads ? width / heads : 0);
    for (i = 0; i < g->tensors && size > 0 && !g->error[0]; i++) {
        gguf_tensor *t = &g->tensor[i];
        const int q = strstr(t->hub, ".q_proj.") != NULL, k = strstr(t->hub, ".k_proj.") != NULL;
        if (!q && !k) continue;
        if (size % 2 || t->ne[t->dims - 1] != (uint64_t)(size * (q ? heads : kv)))
            (void)gguf_fail(g, "the tensor \"%s\" has %llu rows, not %lld heads of %lld",
                            gguf_quote(t->name, key, sizeof key),
                            (unsigned long long)t->ne[t->dims - 1], (long long)(q ? heads : kv),
                            (long long)size);
        t->head = (uint64_t)size;
    }
}

static int gguf_take_header(gguf *g, uint64_t *tensors, uint64_t *pairs) {
    const unsigned char *magic = gguf_take(g, 4, "the first 4 bytes");
    uint64_t version;
    if (magic && memcmp(magic, "GGUF", 4) != 0) return gguf_fail(g, "this is no GGUF file");
    version = gguf_take_word(g, 4, "the version");
    if (version && !(version & 0xFFFF)) return gguf_fail(g, "this is a big-endian GGUF file");
    if (!g->error[0] && version != 3)
        return gguf_fail(g, "this is GGUF of version %llu; only version 3 is read",
                         (unsigned long long)version);
    *tensors = gguf_take_word(g, 8, "the number of tensors");
    *pairs = gguf_take_word(g, 8, "the number of keys");
    /* a key with its value takes 14 bytes at least, the description of a tensor 33 */
    if (!g->error[0] && (*pairs > gguf_left(g) / 14 || *tensors > gguf_left(g) / 33))
        return gguf_fail(g, "%llu keys and %llu tensors do not fit into %llu bytes",
                         (unsigned long long)*pairs, (unsigned long long)*tensors,
                         (unsigned long long)g->size);
    return !g->error[0];
}

/* Parses the header and the keys of g->bytes; *tensors: how many tensors follow. Returns 0 and an
 * error if it cannot. */
static int gguf_parse_keys(gguf *g, uint64_t *tensors) {
    uint64_t pairs = 0;
    char quote[80];
    size_t i;
    if (!gguf_take_header(g, tensors, &pairs)) return 0;
    g->pair = (gguf_pair *)calloc((size_t)pairs + 1, sizeof *g->pair);
    if (!g->pair) return gguf_fail(g, "not enough memory");
    for (; g->pairs < pairs; g->pairs++)
        if (!gguf_take_pair(g, &g->pair[g->pairs])) return 0;
    g->keys_end = g->at;
    qsort(g->pair, g->pairs, sizeof *g->pair, gguf_by_key);
    for (i = 1; i < g->pairs; i++)
        if (gguf_by_key(&g->pair[i - 1], &g->pair[i]) == 0)
            return gguf_fail(g, "the key \"%s\" is there twice",
                             gguf_quote(g->pair[i].key, quote, sizeof quote));
    return 1;
}

/* Parses the descriptions of the tensors, and sets g->data. Returns 0 and an error if it cannot. */
static int gguf_parse_tensors(gguf *g, uint64_t tensors) {
    uint64_t alignment;
    g->tensor = (gguf_tensor *)calloc((size_t)tensors + 1, sizeof *g->tensor);
    if (!g->tensor) return gguf_fail(g, "not enough memory");
    for (; g->tensors < tensors; g->tensors++)
        if (!gguf_take_tensor(g, &g->tensor[g->tensors])) return 0;
    alignment = (uint64_t)gguf_count(g, "general.alignment", 1 << 20, 32);
    if (!alignment || (alignment & (alignment - 1)))
        return gguf_fail(g, "the key \"general.alignment\" is %llu, no power of two",
                         (unsigned long long)alignment);
    g->data = (size_t)((g->at + alignment - 1) / alignment * alignment);
    /* a file without tensors may end before its data section */
    if (g->data > g->size) g->data = g->size;
    return gguf_check_places(g, alignment);
}

/* Parses g->bytes, as much as g->what says. Returns 0 and an error if it cannot. */
static int gguf_parse(gguf *g) {
    uint64_t tensors = 0;
    size_t i;
    if (!gguf_parse_keys(g, &tensors)) return 0;
    if (g->what == GGUF_KEYS) return 1;
    if (g->what == GGUF_PART) return gguf_parse_tensors(g, tensors);
    if (!gguf_take_arch(g) || !gguf_parse_tensors(g, tensors)) return 0;
    for (i = 0; i < g->tensors; i++)
        if (!gguf_name_tensor(g, &g->tensor[i])) return 0;
    gguf_mark_pairs(g);
    return !g->error[0];
}

GGUF_API void gguf_close(gguf *g) {
    if (!g) return;
    if (g->map) (void)munmap(g->map, g->size);
    free(g->path);
    free(g->pair);
    free(g->tensor);
    free(g);
}

static gguf *gguf_read_as(gguf_what what, const void *bytes, size_t size, const char *name,
                          char *error, size_t room) {
    gguf *g = (gguf *)calloc(1, sizeof *g);
    if (g) g->path = (char *)malloc(strlen(name) + 1);
    if (!g || !g->path) {
        (void)snprintf(error, room, "not enough memory");
        gguf_close(g);
        return NULL;
    }
    strcpy(g->path, name);
    g->what = what;
    g->bytes = (const unsigned char *)bytes;
    g->size = size;
    if (gguf_parse(g)) return g;
    (void)snprintf(error, room, "%s", g->error);
    gguf_close(g);
    return NULL;
}

/* Reads a GGUF file in memory, which must stay until gguf_close; `name` stands for it in errors.
 * Returns NULL on error, with one sentence in `error`, of `room` bytes. */
GGUF_API gguf *gguf_read(const void *bytes, size_t size, const char *name, char *error,
                         size_t room) {
    return gguf_read_as(GGUF_MODEL, bytes, size, name, error, room);
}

/* Maps and parses an open file of `size` bytes. writable: 1 if what is written to the mapping goes
 * to the file. Returns NULL on error, with one sentence in `error`. */
static gguf *gguf_map(gguf_what what, int file, size_t size, int writable, const char *name,
                      char *error, size_t room) {
    void *map = mmap(NULL, size, writable ? PROT_READ | PROT_WRITE : PROT_READ,
                     writable ? MAP_SHARED : MAP_PRIVATE, file, 0);
    gguf *g;
    if (map == MAP_FAILED) {
        (void)snprintf(error, room, "%s: cannot be read: %s", name, strerror(errno));
        return NULL;
    }
    g = gguf_read_as(what, map, size, name, error, room);
    if (g) g->map = map;
    else (void)munmap(map, size);
    return g;
}

static gguf *gguf_open_as(gguf_what what, const char *path, char *error, size_t room) {
    tsh_error why;
    FILE *file = tsh_file_open(path, 0, &why);
    struct stat info;
    gguf *g = NULL;
    if (!file)
        (void)snprintf(error, room, "%s", why.message);
    else if (fstat(fileno(file), &info) != 0)
        (void)snprintf(error, room, "%s: cannot be read: %s", path, strerror(errno));
    else if (info.st_size == 0)
        (void)snprintf(error, room, "%s: cannot be read: the file is empty", path);
    else
        g = gguf_map(what, fileno(file), (size_t)info.st_size, 0, path, error, room);
    if (file) (void)fclose(file);
    return g;
}

/* Opens a GGUF file of any architecture and reads its keys only, as its tokenizer needs. Returns
 * NULL on error, as gguf_read does. */
GGUF_API gguf *gguf_open_keys(const char *path, char *error, size_t room) {
    return gguf_open_as(GGUF_KEYS, path, error, room);
}

/* Makes a GGUF file of `size` bytes of which only the first n are given, all before the values of
 * the tensors. It is a temporary file: the values are 0 until they are written to g->map, and pages
 * that are never written take no space on disk. Returns NULL on error, as gguf_read does. */
GGUF_API gguf *gguf_of_header(const void *header, size_t n, size_t size, const char *name,
                              char *error, size_t room) {
    struct rlimit limit; /* largest size of a file; writing beyond it ends the process (SIGXFSZ) */
    const int fits = getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur >= (rlim_t)size;
    FILE *file = fits ? tmpfile() : NULL;
    gguf *g = NULL;
    if (!fits) errno = EFBIG;
    if (file && fwrite(header, 1, n, file) == n && fflush(file) == 0 &&
        ftruncate(fileno(file), (off_t)size) == 0)
        g = gguf_map(GGUF_MODEL, fileno(file), size, 1, name, error, room);
    else
        (void)snprintf(error, room, "%s: no temporary file can be made: %s", name, strerror(errno));
    if (file) (void)fclose(file);
    return g;
}

/* Returns 1 if `path` is a regular file that begins with "GGUF", else 0. Allocates nothing. */
GGUF_API int gguf_is_file(const char *path) {
    char magic[4] = "";
    struct stat info;
    const int file = stat(path, &info) == 0 && S_ISREG(info.st_mode) ? open(path, O_RDONLY) : -1;
    const int is = file >= 0 && read(file, magic, 4) == 4 && memcmp(magic, "GGUF", 4) == 0;
    if (file >= 0) (void)close(file);
    return is;
}

/* -- JSON, with every allocation checked ------------------------------------- */

/* gguf_put adds item to an object under a copy of key; gguf_push appends it to an array. Both
 * return item; or NULL, with item freed and the error "not enough memory", if item, its parent or
 * the copy could not be made. */
static cJSON *gguf_put(gguf *g, cJSON *object, const char *key, cJSON *item) {
    if (object && item && cJSON_AddItemToObject(object, key, item)) return item;
    cJSON_Delete(item);
    (void)gguf_fail(g, "not enough memory");
    return NULL;
}

static cJSON *gguf_push(gguf *g, cJSON *array, cJSON *item) {
    if (array && item && cJSON_AddItemToArray(array, item)) return item;
    cJSON_Delete(item);
    (void)gguf_fail(g, "not enough memory");
    return NULL;
}

static void gguf_put_number(gguf *g, cJSON *object, const char *key, double number) {
    (void)gguf_put(g, object, key, cJSON_CreateNumber(number));
}

static void gguf_put_string(gguf *g, cJSON *object, const char *key, const char *string) {
    (void)gguf_put(g, object, key, cJSON_CreateString(string));
}

static void gguf_put_flag(gguf *g, cJSON *object, const char *key, int on) {
    (void)gguf_put(g, object, key, cJSON_CreateBool(on));
}

/* -- keys of a GGUF file as config.json ------------------------------------- */

/* Keys after "llama." (or another architecture), and their names in config.json; those after a ':'
 * belong in its rope_scaling. NULL: the key does not change the result, or is read elsewhere.
 * needed: 1 if the file must have it. */
static const struct {
    const char *key, *hub;
    int needed;
} gguf_keys[] = {{"block_count", "num_hidden_layers", 1},
                 {"context_length", "max_position_embeddings", 1},
                 {"embedding_length", "hidden_size", 1},
                 {"feed_forward_length", "intermediate_size", 1}, /* GPT-2: n_inner */
                 {"attention.head_count", "num_attention_heads", 1},
                 {"attention.head_count_kv", "num_key_value_heads", 0},
                 {"attention.key_length", "head_dim", 0},
                 {"attention.layer_norm_rms_epsilon", "rms_norm_eps", 0},
                 {"attention.layer_norm_epsilon", "layer_norm_epsilon", 0},
                 {"attention.sliding_window", "sliding_window", 0},
                 {"rope.freq_base", "rope_theta", 0},
                 {"rope.scaling.type", ":rope_type", 0},
                 {"rope.scaling.factor", ":factor", 0},
                 {"rope.scaling.original_context_length", ":original_max_position_embeddings", 0},
                 {"rope.scaling.attn_factor", ":attention_factor", 0},
                 {"rope.scaling.yarn_beta_fast", ":beta_fast", 0},
                 {"rope.scaling.yarn_beta_slow", ":beta_slow", 0},
                 {"rope.scaling.finetuned", NULL, 0},
                 {"rope.dimension_count", NULL, 0},
                 {"attention.value_length", NULL, 0},
                 {"vocab_size", NULL, 0}};

/* Returns the whole number of a key of the architecture, such as "llama.block_count"; if the key is
 * missing, `otherwise`, or, if that is negative, 0 and an error. */
static int64_t gguf_arch_count(gguf *g, const char *key, int64_t otherwise) {
    char whole[96];
    (void)snprintf(whole, sizeof whole, "%s.%s", g->arch, key);
    return gguf_count(g, whole, INT32_MAX, otherwise);
}

/* Adds the value of a key of the architecture to config, or to its rope_scaling, `scaling`. Returns
 * 0 and an error if the key is not known. */
static int gguf_config_pair(gguf *g, const gguf_pair *pair, cJSON *config, cJSON *scaling) {
    char key[128];
    const char *hub = "";
    const size_t n = strlen(g->arch) + 1;
    const unsigned char *at = pair->at;
    size_t i;
    (void)gguf_quote(pair->key, key, sizeof key);
    for (i = 0; i < sizeof gguf_keys / sizeof *gguf_keys && hub && !*hub; i++)
        if (strcmp(key + n, gguf_keys[i].key) == 0) hub = gguf_keys[i].hub;
    if (!hub) return 1;
    if (!*hub && (pair->type == GGUF_BOOL || gguf_is_one_number(pair)) &&
        gguf_element(pair, 0) == 0)
        return 1; /* a value of 0 or false does not change the result */
    if (!*hub)
        return gguf_fail(g, "the key \"%s\" is not known, and may change what the model computes",
                         key);
    if (strcmp(hub, "intermediate_size") == 0 && strcmp(g->arch, "gpt2") == 0) hub = "n_inner";
    if (*hub == ':') config = scaling;
    hub += *hub == ':';
    if (strcmp(hub, "rope_type") == 0 && pair->type == GGUF_STRING) {
        char kind[32];
        const gguf_string text = gguf_next(&at);
        (void)gguf_quote(text, kind, sizeof kind);
        gguf_put_string(g, config, hub, strcmp(kind, "none") == 0 ? "default" : kind);
        return !g->error[0];
    }
    if (!gguf_is_one_number(pair)) return gguf_no_number(g, key, pair);
    gguf_put_number(g, config, hub, gguf_element(pair, 0));
    return !g->error[0];
}

/* Adds the values of a tensor, LongRoPE's factors of the frequencies, to `scaling` under `key`.
 * Returns 0 if the file has no such F32 tensor, or after an error. */
static int gguf_config_factors(gguf *g, cJSON *scaling, const char *tensor, const char *key) {
    const gguf_tensor *factors = gguf_tensor_named(g, tensor);
    cJSON *list;
    uint64_t i;
    if (!factors || factors->format->number != 0 || factors->dims != 1) return 0;
    list = gguf_put(g, scaling, key, cJSON_CreateArray());
    for (i = 0; i < factors->ne[0] && i < 4096 && !g->error[0]; i++) {
        const uint32_t bits =
            (uint32_t)gguf_word(g->bytes + g->data + factors->offset + 4 * i, 4);
        float f;
        memcpy(&f, &bits, sizeof f);
        (void)gguf_push(g, list, cJSON_CreateNumber((double)f));
    }
    return !g->error[0];
}

/* Adds what config.json says of rotary positions: to `config`, which part of a head is rotated; to
 * `scaling`, the factors of the frequencies. */
static void gguf_config_rope(gguf *g, cJSON *config, cJSON *scaling) {
    const int64_t heads = gguf_arch_count(g, "attention.head_count", -1);
    const int64_t width = gguf_arch_count(g, "embedding_length", -1);
    const int64_t size = gguf_arch_count(g, "attention.key_length", heads ? width / heads : 0);
    const int64_t turns = gguf_arch_count(g, "rope.dimension_count", size);
    const cJSON *kind = cJSON_GetObjectItem(scaling, "rope_type");
    cJSON *scale = cJSON_GetObjectItem(scaling, "attention_factor");
    const cJSON *factor = cJSON_GetObjectItem(scaling, "factor");
    if (gguf_arch_count(g, "attention.value_length", size) != size)
        (void)gguf_fail(g, "the key \"%s.attention.value_length\" differs from the key_length %d",
                        g->arch, (int)size);
    if (size > 0 && turns != size)
        gguf_put_number(g, config, "partial_rotary_factor", (double)turns / (double)size);
    /* config.json holds the complete factor: the file's value times YaRN's own, 0.1 ln(factor) +
     * 1 */
    if (scale && kind && strcmp(kind->valuestring, "yarn") == 0)
        cJSON_SetNumberValue(scale, scale->valuedouble *
                                        (factor && factor->valuedouble > 1
                                             ? 0.1 * log(factor->valuedouble) + 1
                                             : 1));
    if (gguf_config_factors(g, scaling, "rope_factors_short.weight", "short_factor") &&
        gguf_config_factors(g, scaling, "rope_factors_long.weight", "long_factor")) {
        cJSON_DeleteItemFromObject(scaling, "rope_type");
        gguf_put_string(g, scaling, "rope_type", "longrope");
    }
}

/* Sets eos_token_id of config.json: the tokens that end a text. */
static void gguf_config_ends(gguf *g, cJSON *config) {
    static const char *const ends[] = {"tokenizer.ggml.eos_token_id",
                                       "tokenizer.ggml.eot_token_id",
                                       "tokenizer.ggml.eom_token_id"};
    cJSON *eos = gguf_put(g, config, "eos_token_id", cJSON_CreateArray());
    size_t i;
    for (i = 0; i < sizeof ends / sizeof *ends && !g->error[0]; i++)
        if (gguf_find(g, ends[i]))
            (void)gguf_push(g, eos, cJSON_CreateNumber(
                                        (double)gguf_count(g, ends[i], INT32_MAX, -1)));
}

/* Sets keys of config.json that follow from the tensors and the architecture of a GGUF file. words:
 * the embedding of the tokens. */
static void gguf_config_rest(gguf *g, cJSON *config, const gguf_tensor *words) {
    const int64_t window = gguf_arch_count(g, "attention.sliding_window", 0);
    if (gguf_arch_count(g, "vocab_size", 0) > (int64_t)words->ne[1])
        (void)gguf_fail(g, "the key \"%s.vocab_size\" is larger than the %llu rows of "
                           "\"token_embd.weight\"", g->arch, (unsigned long long)words->ne[1]);
    gguf_config_ends(g, config);
    gguf_put_string(g, config, "model_type",
                    window && strcmp(g->arch, "llama") == 0 ? "mistral" : g->arch);
    gguf_put_number(g, config, "vocab_size", (double)words->ne[1]);
    gguf_put_flag(g, config, "tie_word_embeddings", !gguf_tensor_named(g, "output.weight"));
    gguf_put_string(g, config, "dtype", "float32"); /* llama.cpp computes in f32 */
    if (!window) cJSON_DeleteItemFromObject(config, "sliding_window");
    if (window && strncmp(g->arch, "qwen", 4) == 0) {
        gguf_put_flag(g, config, "use_sliding_window", 1);
        gguf_put_number(g, config, "max_window_layers", 0);
    }
}

/* Returns what config.json of the same model would contain, to be freed with cJSON_Delete; NULL and
 * an error in g->error. */
GGUF_API cJSON *gguf_config(gguf *g) {
    const gguf_tensor *words = gguf_tensor_named(g, "token_embd.weight");
    cJSON *config = cJSON_CreateObject(), *scaling = cJSON_CreateObject();
    const size_t n = strlen(g->arch);
    char prefix[64];
    size_t i;
    (void)snprintf(prefix, sizeof prefix, "%s.", g->arch);
    if (!config || !scaling) (void)gguf_fail(g, "not enough memory");
    for (i = 0; i < sizeof gguf_keys / sizeof *gguf_keys; i++)
        if (gguf_keys[i].needed) (void)gguf_arch_count(g, gguf_keys[i].key, -1);
    for (i = 0; i < g->pairs && !g->error[0]; i++)
        if (g->pair[i].key.length > n && memcmp(g->pair[i].key.at, prefix, n + 1) == 0)
            (void)gguf_config_pair(g, &g->pair[i], config, scaling);
    if (!words || words->dims != 2) (void)gguf_fail(g, "the tensor \"token_embd.weight\" is %s",
                                                    words ? "no matrix" : "missing");
    if (!g->error[0]) gguf_config_rope(g, config, scaling);
    if (!g->error[0]) gguf_config_rest(g, config, words);
    if (!g->error[0] && scaling->child) {
        (void)gguf_put(g, config, "rope_scaling", scaling);
        scaling = NULL;
    }
    cJSON_Delete(scaling);
    if (!g->error[0]) return config;
    cJSON_Delete(config);
    return NULL;
}

/* Returns the n numbers (F32) by which the rotary frequencies are divided, as in Llama 3.1; NULL:
 * the file has no such tensor, or, with an error, the tensor has another type or length. */
GGUF_API const unsigned char *gguf_factors(gguf *g, int64_t n) {
    const gguf_tensor *t = gguf_tensor_named(g, "rope_freqs.weight");
    if (!t) return NULL;
    if (t->format->number == 0 && t->dims == 1 && t->ne[0] == (uint64_t)n)
        return g->bytes + g->data + t->offset;
    (void)gguf_fail(g, "the tensor \"rope_freqs.weight\" is not F32 of %lld elements",
                    (long long)n);
    return NULL;
}

/* Returns 1 if the first block has the bias of `layer`, such as "attn_q". */
GGUF_API int gguf_has_bias(const gguf *g, const char *layer) {
    char name[64];
    (void)snprintf(name, sizeof name, "blk.0.%s.bias", layer);
    return gguf_tensor_named(g, name) != NULL;
}

/* Returns the chat template, in Jinja: *length bytes, without a zero byte at the end; NULL: the
 * file has none. */
GGUF_API const char *gguf_chat_template(gguf *g, size_t *length) {
    const gguf_string text = gguf_text(g, "tokenizer.chat_template");
    *length = text.length;
    return text.length ? text.at : NULL;
}

/* -- tensors of a GGUF file as model.safetensors ----------------------------- */

/* A tensor of the safetensors file that a GGUF file is presented as. */
typedef struct gguf_entry {
    const gguf_tensor *tensor;
    /* begin, end: the first byte of the values and the byte after the last, counted from the end of
     * the header; row: bytes of a row */
    int64_t begin, end, row;
    int decodes; /* 1: the blocks are converted to F32; 0: they are copied as they are */
} gguf_entry;

/* A GGUF file presented as a safetensors file, whose bytes are made when they are read. */
typedef struct gguf_file {
    const gguf *g;
    char *header; /* 8 bytes with the size of the JSON, then the JSON */
    int64_t header_size;
    gguf_entry *entry; /* `entries` tensors, in the order of their data */
    size_t entries;
} gguf_file;

GGUF_API void gguf_file_close(gguf_file *f) {
    free(f->header);
    free(f->entry);
    f->header = NULL;
    f->entry = NULL;
}

/* Writes a tensor's entry in the JSON header of the safetensors file to `at`, which has `room`
 * bytes. Returns the entry's length in bytes. */
static size_t gguf_put_entry(char *at, size_t room, const gguf_entry *e) {
    const gguf_tensor *t = e->tensor;
    const int blocks = !e->decodes && t->format->dtype;
    size_t n = (size_t)snprintf(at, room, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", t->hub,
                                e->decodes ? "F32" : t->format->hub);
    int d;
    for (d = t->dims - 1; d >= 0; d--)
        n += (size_t)snprintf(at + n, room - n, "%lld%s",
                              d == 0 && blocks ? (long long)e->row : (long long)t->ne[d],
                              d ? "," : "");
    n += (size_t)snprintf(at + n, room - n, "],\"data_offsets\":[%lld,%lld]}",
                          (long long)e->begin, (long long)e->end);
    return n;
}

/* Presents g as a safetensors file. Where tshard can compute with a tensor's blocks, keep(user,
 * name, dtype) says whether they stay as they are (1) or are converted to F32 (0); dtype is
 * tshard's name of the blocks. Returns 0: not enough memory. */
GGUF_API int gguf_file_open(gguf_file *f, const gguf *g,
                            int (*keep)(void *user, const char *name, const char *dtype),
                            void *user) {
    const size_t each = 2 * GGUF_NAME + 256, room = 64 + (g->tensors + 1) * each;
    int64_t at = 0;
    size_t i, n = 8;
    int d, kept = 0;
    memset(f, 0, sizeof *f);
    f->g = g;
    f->header = (char *)malloc(room);
    f->entry = (gguf_entry *)calloc(g->tensors + 1, sizeof *f->entry);
    if (!f->header || !f->entry) {
        gguf_file_close(f);
        return 0;
    }
    n += (size_t)snprintf(f->header + n, room - n, "{\"__metadata__\":{");
    for (i = 0; i < g->tensors; i++) {
        const gguf_tensor *t = &g->tensor[i];
        gguf_entry *e = &f->entry[f->entries];
        if (!t->hub[0]) continue;
        e->tensor = t;
        e->decodes = t->format->decode &&
                     !(t->format->dtype && keep(user, t->hub, t->format->dtype));
        e->row = e->decodes ? (int64_t)t->ne[0] * 4
                            : (int64_t)t->ne[0] / t->format->elements * t->format->bytes;
        e->begin = at;
        for (e->end = e->row, d = 1; d < t->dims; d++) e->end *= (int64_t)t->ne[d];
        at = e->end += at;
        f->entries++;
        if (t->format->dtype && !e->decodes)
            n += (size_t)snprintf(f->header + n, room - n, "%s\"tshard.dtype.%s\":\"%s\"",
                                  kept++ ? "," : "", t->hub, t->format->dtype);
    }
    n += (size_t)snprintf(f->header + n, room - n, "}");
    for (i = 0; i < f->entries; i++) n += gguf_put_entry(f->header + n, room - n, &f->entry[i]);
    n += (size_t)snprintf(f->header + n, room - n, "}");
    for (d = 0; d < 8; d++) f->header[d] = (char)(unsigned char)((n - 8) >> 8 * d);
    f->header_size = (int64_t)n;
    return 1;
}

/* GGUF files of some models have the rows of a tensor in another order than the safetensors files
 * (see gguf_mark_pairs). Returns the index in the GGUF file of the safetensors file's row `row`. */
static int64_t gguf_row(const gguf_tensor *t, int64_t row) {
    const int64_t size = (int64_t)t->head, half = size / 2, i = size ? row % size : 0;
    return size ? row - i + 2 * (i % half) + i / half : row;
}

/* Copies `bytes` bytes of a tensor's data from its byte `at` on, or fewer: it stops at the end of a
 * row, or of a block if the tensor's blocks are decoded. Returns how many bytes it copied. */
static int64_t gguf_copy(const gguf_file *f, const gguf_entry *e, int64_t at, char *to,
                         int64_t bytes) {
    const gguf_tensor *t = e->tensor;
    /* single: 1 for a bias of queries or keys, whose rows have one element each */
    const int single = t->dims == 1 && t->head;
    const int64_t row = single ? e->row / (int64_t)t->ne[0] : e->row;
    const int64_t stored = e->decodes ? (int64_t)t->ne[0] / t->format->elements * t->format->bytes
                                      : row;
    const unsigned char *from = f->g->bytes + f->g->data + t->offset +
                                gguf_row(t, at / row) * stored;
    int64_t n = row - at % row;
    if (e->decodes) {
        float values[GGUF_BLOCK];
        const int64_t size = 4 * (int64_t)t->format->elements, block = at % row / size;
        n = size - at % size;
        n = n < bytes ? n : bytes;
        t->format->decode(from + block * t->format->bytes, values);
        memcpy(to, (char *)values + at % size, (size_t)n);
        return n;
    }
    n = n < bytes ? n : bytes;
    memcpy(to, from + at % row, (size_t)n);
    return n;
}

/* Reads bytes of the safetensors file that a GGUF file is presented as: the callback for
 * tsh_file_desc.read_at, with a gguf_file as user. Values converted to F32 have this machine's byte
 * order, so it must be little-endian. */
GGUF_API int64_t gguf_file_read(int64_t at, void *to, int64_t bytes, void *user) {
    const gguf_file *f = (const gguf_file *)user;
    int64_t done = 0, n;
    size_t low = 0, high = f->entries;
    if (at < f->header_size) {
        done = f->header_size - at < bytes ? f->header_size - at : bytes;
        memcpy(to, f->header + at, (size_t)done);
    }
    at += done - f->header_size;
    while (low < high) { /* find the last entry that begins at or before `at` */
        const size_t middle = (low + high) / 2;
        if (f->entry[middle].begin <= at) low = middle + 1;
        else high = middle;
    }
    for (low -= low > 0; done < bytes && low < f->entries; done += n, at += n) {
        if (at >= f->entry[low].end) low++;
        if (low == f->entries) break;
        n = f->entry[low].end - at < bytes - done ? f->entry[low].end - at : bytes - done;
        n = gguf_copy(f, &f->entry[low], at - f->entry[low].begin, (char *)to + done, n);
    }
    return done;
}

#endif
