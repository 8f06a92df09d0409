/* tokenizer.h - text to token ids and back, from the tokenizer.json of a model's folder
 *
 * The ids are those of the Python package `tokenizers`. What the file says is read as data; a type
 * or setting that is not known here is an error with its name, never a guess.
 *
 *     llm_tokenizer *t = llm_tokenizer_open("model/tokenizer.json", error, sizeof error);
 *     int32_t *ids;
 *     int64_t n = llm_tokenizer_encode(t, text, strlen(text), 1, &ids);
 *
 * Known: BPE (byte-level, or with byte fallback), WordPiece, Unigram; normalizers NFC, NFD,
 * Lowercase, StripAccents, BertNormalizer, Prepend, Replace, Strip; pre-tokenizers ByteLevel, Split,
 * Digits, Metaspace, BertPreTokenizer, Whitespace, WhitespaceSplit, Punctuation; post-processors
 * TemplateProcessing, BertProcessing, RobertaProcessing, ByteLevel; decoders ByteLevel, WordPiece,
 * Metaspace, ByteFallback, Fuse, Strip, Replace; a Sequence of any.
 *
 * The file's `truncation` and `padding` are not applied: how many tokens a model takes is for its
 * caller to say.
 *
 * A tokenizer remembers the words it has seen, so one serves one thread at a time. Link with cJSON
 * (Debian: libcjson-dev) and PCRE2 (libpcre2-dev): -lcjson -lpcre2-8.
 */
#ifndef LLM_TOKENIZER_H
#define LLM_TOKENIZER_H

#ifndef PCRE2_CODE_UNIT_WIDTH
#define PCRE2_CODE_UNIT_WIDTH 8
#endif
#include <cjson/cJSON.h>
#include <pcre2.h>

#include "unicode.h"
#include <errno.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__GNUC__)
#define LLM_TOKENIZER_API __attribute__((unused)) static
#define LLM_FORMAT        __attribute__((format(printf, 2, 3)))
#else
#define LLM_TOKENIZER_API static
#define LLM_FORMAT
#endif

/* == what it is made of ==================================================== */

typedef struct llm_text {
    char *at;
    size_t length, room;
} llm_text;

typedef struct llm_span {
    size_t begin, end;
} llm_span;

typedef struct llm_spans {
    llm_span *at;
    size_t count, room;
} llm_spans;

typedef struct llm_ids {
    int32_t *at;
    size_t count, room;
} llm_ids;

typedef struct llm_points {
    uint32_t *at;
    size_t count, room;
} llm_points;

/* From a number to a number; open addressing. Key 0 is none. */
typedef struct llm_map {
    struct llm_entry {
        uint64_t key, value;
    } * at;
    size_t count, size; /* size: a power of two */
} llm_map;

/* Normalizers, pre-tokenizers and decoders are lists of steps. */
typedef enum llm_kind {
    LLM_NFC,
    LLM_NFD,
    LLM_LOWERCASE,
    LLM_STRIP_ACCENTS,
    LLM_BERT_NORMALIZER,
    LLM_PREPEND,
    LLM_REPLACE,
    LLM_STRIP,
    LLM_BYTE_LEVEL,
    LLM_SPLIT,
    LLM_DIGITS,
    LLM_METASPACE,
    LLM_WHITESPACE,
    LLM_WHITESPACE_SPLIT,
    LLM_PUNCTUATIONS,
    LLM_BERT_PRE_TOKENIZER,
    LLM_WORDPIECE,
    LLM_BYTE_FALLBACK,
    LLM_FUSE,
    LLM_SEQUENCE
} llm_kind;

/* What becomes of the matches of a pattern that splits. */
typedef enum llm_behavior {
    LLM_REMOVED,
    LLM_ISOLATED,
    LLM_MERGED_WITH_PREVIOUS,
    LLM_MERGED_WITH_NEXT,
    LLM_CONTIGUOUS
} llm_behavior;

typedef enum llm_scheme { LLM_NEVER, LLM_FIRST, LLM_ALWAYS } llm_scheme; /* of a prefix */

typedef struct llm_step {
    llm_kind kind;
    llm_text pattern, content; /* a string to look for, unless `code`; what replaces it */
    pcre2_code *code;
    pcre2_match_data *match;
    int jit;
    llm_behavior behavior;
    int invert, split, prefix_space;
    llm_scheme scheme;                              /* LLM_METASPACE */
    int clean, chinese, accents, lowercase;         /* LLM_BERT_NORMALIZER */
    int cleanup;                                    /* LLM_WORDPIECE */
    size_t left, right;                             /* LLM_STRIP: at most so many characters */
} llm_step;

typedef struct llm_steps {
    llm_step *at;
    size_t count, room;
} llm_steps;

/* An added token: it is looked for in the text before all else. */
typedef struct llm_added {
    int32_t id;
    llm_text content, normal; /* normal: what is looked for, normalized */
    int single_word, lstrip, rstrip, normalized, special;
} llm_added;

/* The added tokens by first byte, longest first. */
typedef struct llm_finder {
    uint32_t *order; /* indices of llm_tokenizer.added */
    size_t count;
    size_t begin[257];
    int only; /* the one first byte that all have; -1: several */
} llm_finder;

typedef struct llm_token {
    size_t offset;   /* into `letters` */
    uint32_t length; /* LLM_NONE: no token has this id */
    uint32_t added;  /* index of the added token of this id + 1; 0: none */
} llm_token;

/* Words and their ids. */
typedef struct llm_cached {
    uint64_t hash;
    size_t offset, ids;
    uint32_t length, count; /* length 0: empty */
} llm_cached;

typedef enum llm_model { LLM_BPE, LLM_WORD_PIECE, LLM_UNIGRAM } llm_model;

enum { LLM_NONE = -1, LLM_CACHED = 96, LLM_CACHE_WORDS = 1 << 19, LLM_MAX_ID = 1 << 22 };

typedef struct llm_tokenizer {
    char error[256];  /* the first of the call; empty: none */
    const char *name; /* of the file, while it is read */
    uint8_t *flags;   /* of each code point */
    llm_map compositions;
    pcre2_match_context *context;
    pcre2_jit_stack *stack;

    llm_steps normalizers, pre_tokenizers, decoders;
    int has_decoder, byte_level; /* byte_level: pieces are mapped by the model's cache */
    llm_added *added;
    size_t added_count, added_room;
    llm_finder raw, normalized;
    llm_ids before, after; /* special tokens of a text */

    llm_model model;
    llm_text letters; /* of all tokens */
    llm_token *tokens;
    int32_t size; /* the largest id + 1 */
    size_t tokens_room;
    int32_t *slots; /* tokens by their text */
    size_t slots_size;
    int32_t unk;
    int fuse_unk, byte_fallback, ignore_merges, has_continuing, cut_at_spaces;
    int32_t letter_ids[1024], byte_ids[256];
    llm_map merges; /* left << 32 | right, + 1: rank << 32 | result */
    llm_text continuing;
    size_t max_chars, max_length;
    llm_map trie; /* node << 8 | byte, + 1: node; value of a node: below */
    llm_ids trie_ids;
    double *scores, unk_score;

    llm_cached *cache;
    size_t cache_size, cache_count;
    llm_text cache_text;
    llm_ids cache_ids;

    /* Scratch of a call. */
    llm_text clean, buffers[2], pieces[2], mapped, piece;
    llm_spans spans[2];
    llm_points points, sorted;
    llm_ids ids, symbols, next;
    llm_points ranks;
    uint64_t *heap;
    size_t heap_count, heap_room;
    double *best;
    size_t best_room;
    llm_spans path; /* begin, id */
} llm_tokenizer;

/* Keeps the first sentence of a call. */
LLM_FORMAT static int llm_fail(llm_tokenizer *t, const char *format, ...) {
    va_list args;
    if (t->error[0]) return 0;
    va_start(args, format);
    (void)vsnprintf(t->error, sizeof t->error, format, args);
    va_end(args);
    return 0;
}

/* `at` with room for at least `need` things; unchanged, with an error, if there is no memory. */
static void *llm_grow(llm_tokenizer *t, void *at, size_t *room, size_t need, size_t size) {
    size_t more = need + need / 2 + 16;
    void *bigger;
    if (need <= *room) return at;
    bigger = more > need && more < SIZE_MAX / size ? realloc(at, more * size) : NULL;
    if (!bigger) {
        (void)llm_fail(t, "there is no memory for %zu bytes of a tokenizer", need * size);
        return at;
    }
    *room = more;
    return bigger;
}

static int llm_room(llm_tokenizer *t, llm_text *text, size_t more) {
    text->at = (char *)llm_grow(t, text->at, &text->room, text->length + more, 1);
    return text->length + more <= text->room;
}

static int llm_put(llm_tokenizer *t, llm_text *text, const char *s, size_t n) {
    if (!llm_room(t, text, n)) return 0;
    if (n) memcpy(text->at + text->length, s, n);
    text->length += n;
    return 1;
}

static int llm_put_span(llm_tokenizer *t, llm_spans *spans, size_t begin, size_t end) {
    spans->at = (llm_span *)llm_grow(t, spans->at, &spans->room, spans->count + 1,
                                     sizeof *spans->at);
    if (spans->count == spans->room) return 0;
    spans->at[spans->count].begin = begin;
    spans->at[spans->count++].end = end;
    return 1;
}

static int llm_ids_room(llm_tokenizer *t, llm_ids *ids, size_t more) {
    ids->at = (int32_t *)llm_grow(t, ids->at, &ids->room, ids->count + more, sizeof *ids->at);
    return ids->count + more <= ids->room;
}

static int llm_put_id(llm_tokenizer *t, llm_ids *ids, int32_t id) {
    if (!llm_ids_room(t, ids, 1)) return 0;
    ids->at[ids->count++] = id;
    return 1;
}

static int llm_put_ids(llm_tokenizer *t, llm_ids *ids, const int32_t *at, size_t n) {
    if (!llm_ids_room(t, ids, n)) return 0;
    if (n) memcpy(ids->at + ids->count, at, n * sizeof *at);
    ids->count += n;
    return 1;
}

static int llm_put_point(llm_tokenizer *t, llm_points *points, uint32_t point) {
    points->at = (uint32_t *)llm_grow(t, points->at, &points->room, points->count + 1,
                                      sizeof *points->at);
    if (points->count == points->room) return 0;
    points->at[points->count++] = point;
    return 1;
}

static uint64_t llm_mix(uint64_t x) {
    x = (x ^ x >> 32) * UINT64_C(0x9E3779B97F4A7C15);
    return x ^ x >> 29;
}

static uint64_t llm_hash(const char *s, size_t n) {
    uint64_t hash = n * UINT64_C(0xFF51AFD7ED558CCD), a = 0, b = 0;
    for (; n > 16; n -= 16, s += 16) {
        memcpy(&a, s, 8);
        memcpy(&b, s + 8, 8);
        hash = llm_mix(hash ^ a) ^ b * UINT64_C(0xC2B2AE3D27D4EB4F);
    }
    if (n >= 8) {
        memcpy(&a, s, 8);
        memcpy(&b, s + n - 8, 8);
    } else if (n >= 4) {
        uint32_t low, high;
        memcpy(&low, s, 4);
        memcpy(&high, s + n - 4, 4);
        a = low;
        b = high;
    } else {
        a = b = 0;
        if (n) {
            a = (uint64_t)(unsigned char)s[0] | (uint64_t)(unsigned char)s[n / 2] << 8;
            b = (unsigned char)s[n - 1];
        }
    }
    return llm_mix(hash ^ a) ^ llm_mix(b ^ UINT64_C(0xD6E8FEB86659FD93));
}

static uint64_t *llm_map_find(const llm_map *map, uint64_t key) {
    size_t at;
    if (!map->size) return NULL;
    for (at = (size_t)llm_mix(key) & (map->size - 1); map->at[at].key;
         at = (at + 1) & (map->size - 1))
        if (map->at[at].key == key) return &map->at[at].value;
    return NULL;
}

static int llm_map_set(llm_tokenizer *t, llm_map *map, uint64_t key, uint64_t value) {
    size_t at;
    if (2 * (map->count + 1) > map->size) {
        llm_map bigger = {NULL, 0, 0};
        bigger.size = map->size ? 2 * map->size : 1024;
        bigger.at = (struct llm_entry *)calloc(bigger.size, sizeof *bigger.at);
        if (!bigger.at) return llm_fail(t, "there is no memory for a map of a tokenizer");
        for (at = 0; at < map->size; at++)
            if (map->at[at].key)
                (void)llm_map_set(t, &bigger, map->at[at].key, map->at[at].value);
        free(map->at);
        *map = bigger;
    }
    at = (size_t)llm_mix(key) & (map->size - 1);
    while (map->at[at].key && map->at[at].key != key) at = (at + 1) & (map->size - 1);
    map->count += !map->at[at].key;
    map->at[at].key = key;
    map->at[at].value = value;
    return 1;
}

/* == UTF-8 and Unicode ===================================================== */

/* The code point at s, of valid UTF-8; *n: its bytes. */
static uint32_t llm_point(const char *s, size_t *n) {
    const unsigned char *u = (const unsigned char *)s;
    if (u[0] < 0x80) {
        *n = 1;
        return u[0];
    }
    if (u[0] < 0xE0) {
        *n = 2;
        return (u[0] & 0x1Fu) << 6 | (u[1] & 0x3Fu);
    }
    if (u[0] < 0xF0) {
        *n = 3;
        return (u[0] & 0x0Fu) << 12 | (u[1] & 0x3Fu) << 6 | (u[2] & 0x3Fu);
    }
    *n = 4;
    return (u[0] & 7u) << 18 | (u[1] & 0x3Fu) << 12 | (u[2] & 0x3Fu) << 6 | (u[3] & 0x3Fu);
}

/* The code point that ends before s + at; *n: its bytes. */
static uint32_t llm_point_before(const char *s, size_t at, size_t *n) {
    size_t begin = at - 1;
    while (begin && ((unsigned char)s[begin] & 0xC0) == 0x80) begin--;
    return llm_point(s + begin, n);
}

static int llm_put_utf8(llm_tokenizer *t, llm_text *text, uint32_t c) {
    char s[4];
    size_t n = 0;
    if (c < 0x80) {
        s[n++] = (char)c;
    } else {
        if (c < 0x800) {
            s[n++] = (char)(0xC0 | c >> 6);
        } else {
            if (c < 0x10000) {
                s[n++] = (char)(0xE0 | c >> 12);
            } else {
                s[n++] = (char)(0xF0 | c >> 18);
                s[n++] = (char)(0x80 | (c >> 12 & 0x3F));
            }
            s[n++] = (char)(0x80 | (c >> 6 & 0x3F));
        }
        s[n++] = (char)(0x80 | (c & 0x3F));
    }
    return llm_put(t, text, s, n);
}

/* Bytes of the character at s; 0: it is not valid, and *bad bytes of it are one U+FFFD. */
static size_t llm_valid(const char *s, size_t n, size_t *bad) {
    const unsigned char *u = (const unsigned char *)s;
    const unsigned c = u[0];
    const size_t size = c < 0x80 ? 1 : c < 0xC2 ? 0 : c < 0xE0 ? 2 : c < 0xF0 ? 3 : c < 0xF5 ? 4 : 0;
    const unsigned low = c == 0xE0 ? 0xA0 : c == 0xF0 ? 0x90 : 0x80;
    const unsigned high = c == 0xED ? 0x9F : c == 0xF4 ? 0x8F : 0xBF;
    size_t i;
    *bad = 1;
    if (!size) return 0;
    for (i = 1; i < size; i++) {
        *bad = i;
        if (i >= n || u[i] < (i == 1 ? low : 0x80) || u[i] > (i == 1 ? high : 0xBF)) return 0;
    }
    return size;
}

/* Bytes of s that are valid UTF-8, from its begin. */
static size_t llm_valid_prefix(const char *s, size_t n) {
    size_t at = 0, bad, size;
    while (at < n) {
        uint64_t eight;
        if (n - at >= 8) {
            memcpy(&eight, s + at, 8);
            if (!(eight & UINT64_C(0x8080808080808080))) {
                at += 8;
                continue;
            }
        }
        size = llm_valid(s + at, n - at, &bad);
        if (!size) return at;
        at += size;
    }
    return n;
}

/* Appends s, each invalid part as U+FFFD, as Python's errors="replace" and Rust's lossy do. */
static int llm_put_lossy(llm_tokenizer *t, llm_text *text, const char *s, size_t n) {
    while (n) {
        const size_t good = llm_valid_prefix(s, n);
        size_t bad = 0;
        if (!llm_put(t, text, s, good)) return 0;
        s += good;
        n -= good;
        if (!n) break;
        (void)llm_valid(s, n, &bad);
        if (!llm_put(t, text, "\xEF\xBF\xBD", 3)) return 0;
        s += bad;
        n -= bad;
    }
    return 1;
}

/* The last row of a table of value << 8 | ..., sorted, that begins at or before c. */
static uint32_t llm_run(const uint32_t *table, size_t rows, uint32_t c) {
    size_t low = 0, high = rows;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if (table[middle] >> 8 <= c)
            low = middle + 1;
        else
            high = middle;
    }
    return low ? table[low - 1] & 0xFF : 0;
}

#define LLM_ROWS(table) (sizeof(table) / sizeof(table)[0])

static uint32_t llm_class(uint32_t c) {
    return c < 0x300 ? 0 : llm_run(llm_unicode_classes, LLM_ROWS(llm_unicode_classes), c);
}

/* The row of c in llm_unicode_pairs; NULL: it has no decomposition. */
static const uint32_t *llm_pair(uint32_t c) {
    size_t low = 0, high = LLM_ROWS(llm_unicode_pairs) / 3;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        const uint32_t *row = llm_unicode_pairs + 3 * middle;
        if (row[0] >> 1 == c) return row;
        if (row[0] >> 1 < c)
            low = middle + 1;
        else
            high = middle;
    }
    return NULL;
}

enum { LLM_S = 0xAC00, LLM_L = 0x1100, LLM_V = 0x1161, LLM_T = 0x11A7, LLM_SYLLABLES = 11172 };

static int llm_unicode_open(llm_tokenizer *t) {
    size_t i;
    uint32_t c, end;
    t->flags = (uint8_t *)calloc(0x110000, 1);
    if (!t->flags) return llm_fail(t, "there is no memory for the tables of a tokenizer");
    for (i = 0; i < LLM_ROWS(llm_unicode_flags); i++) {
        end = i + 1 < LLM_ROWS(llm_unicode_flags) ? llm_unicode_flags[i + 1] >> 8 : 0x110000;
        if (!(llm_unicode_flags[i] & 0xFF)) continue;
        c = llm_unicode_flags[i] >> 8;
        memset(t->flags + c, (int)(llm_unicode_flags[i] & 0xFF), end - c);
    }
    for (i = 0; i < LLM_ROWS(llm_unicode_classes); i++) {
        if (!(llm_unicode_classes[i] & 0xFF)) continue;
        end = i + 1 < LLM_ROWS(llm_unicode_classes) ? llm_unicode_classes[i + 1] >> 8 : 0x110000;
        for (c = llm_unicode_classes[i] >> 8; c < end; c++) t->flags[c] |= LLM_ACTIVE;
    }
    for (i = 0; i + 2 < LLM_ROWS(llm_unicode_pairs); i += 3) {
        const uint32_t *row = llm_unicode_pairs + i;
        t->flags[row[0] >> 1] |= LLM_ACTIVE;
        if (!(row[0] & 1)) continue;
        t->flags[row[2]] |= LLM_ACTIVE;
        if (!llm_map_set(t, &t->compositions, (uint64_t)row[1] << 32 | row[2], row[0] >> 1))
            return 0;
    }
    for (c = LLM_V; c < LLM_T + 28; c++) t->flags[c] |= LLM_ACTIVE;
    for (c = LLM_S; c < LLM_S + LLM_SYLLABLES; c++) t->flags[c] |= LLM_ACTIVE;
    return 1;
}

static int llm_decompose(llm_tokenizer *t, uint32_t c) {
    const uint32_t *row;
    if (c - LLM_S < LLM_SYLLABLES) {
        const uint32_t s = c - LLM_S;
        if (!llm_put_point(t, &t->points, LLM_L + s / 588)) return 0;
        if (!llm_put_point(t, &t->points, LLM_V + s % 588 / 28)) return 0;
        return s % 28 ? llm_put_point(t, &t->points, LLM_T + s % 28) : 1;
    }
    row = t->flags[c] & LLM_ACTIVE ? llm_pair(c) : NULL;
    if (!row) return llm_put_point(t, &t->points, c);
    return llm_decompose(t, row[1]) && (!row[2] || llm_decompose(t, row[2]));
}

/* Sorts each run of combining characters by class, those of one class as they stand. */
static int llm_reorder(llm_tokenizer *t) {
    uint32_t *p = t->points.at;
    const size_t n = t->points.count;
    size_t begin, end, i, at, count[257];
    uint32_t k;
    t->sorted.count = 0;
    if (n && !llm_put_point(t, &t->sorted, 0)) return 0;
    t->sorted.at = (uint32_t *)llm_grow(t, t->sorted.at, &t->sorted.room, n, sizeof *p);
    if (n > t->sorted.room) return 0;
    for (begin = 0; begin < n; begin = end) {
        end = begin + 1;
        if (!llm_class(p[begin])) continue;
        memset(count, 0, sizeof count);
        for (end = begin; end < n && (k = llm_class(p[end])) != 0; end++) count[k + 1]++;
        if (end - begin < 2) continue;
        for (i = 1; i < 257; i++) count[i] += count[i - 1];
        for (i = begin; i < end; i++) {
            at = count[llm_class(p[i])]++;
            t->sorted.at[at] = p[i];
        }
        memcpy(p + begin, t->sorted.at, (end - begin) * sizeof *p);
    }
    return 1;
}

/* What a and b are together; 0: they stay apart. */
static uint32_t llm_compose_pair(const llm_tokenizer *t, uint32_t a, uint32_t b) {
    const uint64_t *found;
    if (a - LLM_L < 19 && b - LLM_V < 21) return LLM_S + ((a - LLM_L) * 21 + b - LLM_V) * 28;
    if (a - LLM_S < LLM_SYLLABLES && (a - LLM_S) % 28 == 0 && b - LLM_T - 1 < 27)
        return a + b - LLM_T;
    found = llm_map_find(&t->compositions, (uint64_t)a << 32 | b);
    return found ? (uint32_t)*found : 0;
}

static void llm_compose(llm_tokenizer *t) {
    uint32_t *p = t->points.at, last = 0, k, both;
    size_t i, n = 0, starter = SIZE_MAX;
    for (i = 0; i < t->points.count; i++) {
        k = llm_class(p[i]);
        if (starter != SIZE_MAX && (n == starter + 1 || (last < k && last))) {
            both = llm_compose_pair(t, p[starter], p[i]);
            if (both) {
                p[starter] = both;
                continue;
            }
        }
        if (!k) starter = n;
        last = k;
        p[n++] = p[i];
    }
    t->points.count = n;
}

/* NFD, or with compose NFC. Only runs of characters that it may change, and the one before each,
 * are looked at. */
static int llm_canonical(llm_tokenizer *t, const char *s, size_t n, llm_text *out, int compose) {
    size_t at = 0, done = 0, size, before = 0, i;
    while (at < n) {
        if ((unsigned char)s[at] < 0xC3 || !(t->flags[llm_point(s + at, &size)] & LLM_ACTIVE)) {
            before = at;
            at += (unsigned char)s[at] < 0x80 ? 1 : (unsigned char)s[at] < 0xC3 ? 2 : size;
            continue;
        }
        if (!llm_put(t, out, s + done, before - done)) return 0;
        t->points.count = 0;
        if (before < at && !llm_decompose(t, llm_point(s + before, &size))) return 0;
        while (at < n) {
            const uint32_t c = llm_point(s + at, &size);
            if (!(t->flags[c] & LLM_ACTIVE)) break;
            if (!llm_decompose(t, c)) return 0;
            at += size;
        }
        if (!llm_reorder(t)) return 0;
        if (compose) llm_compose(t);
        for (i = 0; i < t->points.count; i++)
            if (!llm_put_utf8(t, out, t->points.at[i])) return 0;
        before = done = at;
    }
    return llm_put(t, out, s + done, n - done);
}

static uint32_t llm_lower(uint32_t c) {
    const int32_t *table = llm_unicode_lower, point = (int32_t)c;
    size_t low = 0, high = LLM_ROWS(llm_unicode_lower) / 4;
    if (c < 0x80) return c >= 'A' && c <= 'Z' ? c + 32 : c;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        const int32_t *row = table + 4 * middle;
        if (point < row[0])
            high = middle;
        else if (point > row[1])
            low = middle + 1;
        else
            return (point - row[0]) % row[2] ? c : (uint32_t)(point + row[3]);
    }
    return c;
}

/* == patterns ============================================================== */

/* White_Space; PCRE2's \s has U+180E, too. And what is not. */
#define LLM_SPACES                                                                                 \
    "\\x{9}-\\x{D} \\x{85}\\x{A0}\\x{1680}\\x{2000}-\\x{200A}\\x{2028}\\x{2029}\\x{202F}"          \
    "\\x{205F}\\x{3000}"
#define LLM_NO_SPACES                                                                              \
    "\\x{0}-\\x{8}\\x{E}-\\x{1F}!-\\x{84}\\x{86}-\\x{9F}\\x{A1}-\\x{167F}\\x{1681}-\\x{1FFF}"      \
    "\\x{200B}-\\x{2027}\\x{202A}-\\x{202E}\\x{2030}-\\x{205E}\\x{2060}-\\x{2FFF}"                 \
    "\\x{3001}-\\x{10FFFF}"

static int llm_puts(llm_tokenizer *t, llm_text *out, const char *s) {
    return llm_put(t, out, s, strlen(s));
}

/* The inside of a class: a general category, with what PCRE2's version of Unicode may not have. */
static int llm_put_category(llm_tokenizer *t, llm_text *out, const char *name, size_t n) {
    char text[40];
    size_t i;
    const char *known = NULL;
    (void)snprintf(text, sizeof text, "%.*s", (int)(n < 3 ? n : 3), name);
    if (n == 2) known = strstr(llm_unicode_categories, text);
    if (n == 1) known = strchr("LMNPSZ", text[0]);
    if (!known) return llm_fail(t, "%s: \\p{%.*s} in a pattern is not known", t->name,
                                (int)(n < 40 ? n : 40), name);
    if (strcmp(text, "L") == 0 && !llm_puts(t, out, "A-Za-z")) return 0;
    if ((strcmp(text, "N") == 0 || strcmp(text, "Nd") == 0) && !llm_puts(t, out, "0-9")) return 0;
    if (!llm_puts(t, out, "\\p{") || !llm_puts(t, out, text) || !llm_puts(t, out, "}")) return 0;
    for (i = 0; i + 2 < LLM_ROWS(llm_unicode_added); i += 3) {
        const uint32_t *row = llm_unicode_added + i;
        if (strncmp(llm_unicode_categories + 3 * row[2], text, n) != 0) continue;
        (void)snprintf(text + 3, sizeof text - 3, "\\x{%X}-\\x{%X}", (unsigned)row[0],
                       (unsigned)row[1]);
        if (!llm_puts(t, out, text + 3)) return 0;
    }
    return 1;
}

/* \p{L}, \s, ... at p + 1; *used: its length. */
static int llm_put_class(llm_tokenizer *t, llm_text *out, const char *p, size_t n, int inside,
                         size_t *used) {
    const char kind = p[1];
    int negated = kind == 'P' || kind == 'S' || kind == 'D' || kind == 'W';
    const char *end;
    const char *open;
    *used = 2;
    if (kind == 'p' || kind == 'P') {
        end = n > 3 && p[2] == '{' ? (const char *)memchr(p, '}', n) : NULL;
        if (!end) return llm_fail(t, "%s: a pattern holds \\%c without {...}", t->name, kind);
        *used = (size_t)(end - p) + 1;
        if (p[3] == '^') negated = !negated;
    }
    if (inside && negated && kind != 'S')
        return llm_fail(t, "%s: [...\\%c...] in a pattern is not known", t->name, kind);
    open = inside ? "" : negated ? "[^" : "[";
    if (!llm_puts(t, out, open)) return 0;
    if (kind == 's' || kind == 'S') {
        if (!llm_puts(t, out, inside && negated ? LLM_NO_SPACES : LLM_SPACES)) return 0;
    } else if (kind == 'd' || kind == 'D') {
        if (!llm_put_category(t, out, "Nd", 2)) return 0;
    } else if (kind == 'w' || kind == 'W') {
        if (!llm_put_category(t, out, "L", 1) || !llm_put_category(t, out, "M", 1) ||
            !llm_put_category(t, out, "Nd", 2) || !llm_put_category(t, out, "Pc", 2))
            return 0;
    } else {
        const char *name = p + 3 + (p[3] == '^');
        if (!llm_put_category(t, out, name, (size_t)(p + *used - 1 - name))) return 0;
    }
    return inside || llm_puts(t, out, "]");
}

/* An escape at p. Oniguruma's \v and \u are other than PCRE2's; letters that are not listed are
 * errors. */
static int llm_put_escape(llm_tokenizer *t, llm_text *out, const char *p, size_t n, int inside,
                          size_t *used) {
    const char e = n > 1 ? p[1] : 0;
    char text[16];
    if (e && strchr("sSdDwWpP", e)) return llm_put_class(t, out, p, n, inside, used);
    *used = 2;
    if (e == 'v') return llm_puts(t, out, "\\x{B}");
    if (e == 'u' && n >= 6) {
        *used = 6;
        (void)snprintf(text, sizeof text, "\\x{%.4s}", p + 2);
        return llm_puts(t, out, text);
    }
    if (e == 'x' && n >= 4) {
        const char *end = p[2] == '{' ? (const char *)memchr(p, '}', n) : p + 3;
        if (!end) return llm_fail(t, "%s: a pattern holds \\x{ without }", t->name);
        *used = (size_t)(end - p) + 1;
        return llm_put(t, out, p, *used);
    }
    if (!e || (e & 0x80) || (((e | 32) >= 'a' && (e | 32) <= 'z') && !strchr("nrtfaeAz", e)) ||
        (e >= '0' && e <= '9'))
        return llm_fail(t, "%s: \\%c in a pattern is not known", t->name, e ? e : ' ');
    return llm_put(t, out, p, 2);
}

/* What begins at p in a pattern outside of [...], and means other things to Oniguruma and PCRE2. */
static const char *llm_unlike(const char *pattern, const char *p, size_t n) {
    if (p[0] == '(' && n > 2 && p[1] == '?') {
        const int behind = n > 3 && p[2] == '<' && (p[3] == '=' || p[3] == '!');
        const int flag = n > 3 && p[2] == 'i' && (p[3] == ':' || (p[3] == ')' && p == pattern));
        return strchr(":=!>", p[2]) || behind || flag ? NULL : "(?...";
    }
    if (p[0] == '}' && n > 1 && p[1] == '+') return "{...}+";
    if (p[0] == '{' && n > 1 && p[1] == ',') return "{,...}";
    return p[0] == '(' && n > 1 && p[1] == '*' ? "(*...)" : NULL;
}

/* Oniguruma's pattern in PCRE2's words. */
static int llm_translate(llm_tokenizer *t, const char *p, size_t n, llm_text *out) {
    size_t i, used, class_begin = 0;
    int inside = 0;
    for (i = 0; i < n; i += used) {
        const char *bad = NULL;
        used = 1;
        if (p[i] == '\\') {
            if (!llm_put_escape(t, out, p + i, n - i, inside, &used)) return 0;
            if (inside && strchr("sSdwp", p[i + 1]) && i + used + 1 < n && p[i + used] == '-' &&
                p[i + used + 1] != ']') {
                if (!llm_puts(t, out, "\\-")) return 0;
                used++;
            }
            continue;
        }
        if (inside) {
            if (p[i] == '[') bad = "[...[";
            if (p[i] == '&' && i + 1 < n && p[i + 1] == '&') bad = "&&";
            if (p[i] == ']' && i == class_begin) bad = "[]";
            if (p[i] == ']') inside = 0;
        } else {
            bad = llm_unlike(p, p + i, n - i);
            if (p[i] == '[') {
                inside = 1;
                if (i + 1 < n && p[i + 1] == '^') used = 2;
                class_begin = i + used;
            }
        }
        if (bad) return llm_fail(t, "%s: %s in a pattern is not known", t->name, bad);
        if (!llm_put(t, out, p + i, used)) return 0;
    }
    return 1;
}

static int llm_compile(llm_tokenizer *t, llm_step *step, const char *pattern, size_t n) {
    llm_text text = {NULL, 0, 0};
    int code, ok = llm_translate(t, pattern, n, &text);
    PCRE2_SIZE where;
    PCRE2_UCHAR why[128];
    if (ok) {
        step->code = pcre2_compile((PCRE2_SPTR)text.at, text.length, PCRE2_UTF | PCRE2_MULTILINE,
                                   &code, &where, NULL);
        if (!step->code) {
            (void)pcre2_get_error_message(code, why, sizeof why);
            ok = llm_fail(t, "%s: a pattern does not compile: %s", t->name, (const char *)why);
        } else {
            step->jit = pcre2_jit_compile(step->code, PCRE2_JIT_COMPLETE) == 0;
            step->match = pcre2_match_data_create_from_pattern(step->code, NULL);
            if (!step->match) ok = llm_fail(t, "there is no memory for a pattern");
        }
    }
    free(text.at);
    return ok;
}

/* The first match of the step's pattern in s at or after `from`; 0: none, or an error. */
static int llm_find(llm_tokenizer *t, const llm_step *step, const char *s, size_t n, size_t from,
                    llm_span *found) {
    const PCRE2_SIZE *ends;
    int got;
    if (!step->code) {
        const size_t length = step->pattern.length;
        const char *p = s + from;
        for (; length && length <= n - from; p++) {
            p = (const char *)memchr(p, step->pattern.at[0], (size_t)(s + n - p));
            if (!p || (size_t)(s + n - p) < length) return 0;
            if (memcmp(p, step->pattern.at, length) != 0) continue;
            found->begin = (size_t)(p - s);
            found->end = found->begin + length;
            return 1;
        }
        return 0;
    }
    if (step->jit)
        got = pcre2_jit_match(step->code, (PCRE2_SPTR)s, n, from, PCRE2_NO_UTF_CHECK, step->match,
                              t->context);
    else
        got = pcre2_match(step->code, (PCRE2_SPTR)s, n, from, PCRE2_NO_UTF_CHECK, step->match,
                          t->context);
    if (got == PCRE2_ERROR_NOMATCH) return 0;
    if (got < 0) return llm_fail(t, "a pattern of the tokenizer fails: PCRE2's error %d", got);
    ends = pcre2_get_ovector_pointer(step->match);
    found->begin = ends[0];
    found->end = ends[1];
    return found->begin <= found->end;
}
