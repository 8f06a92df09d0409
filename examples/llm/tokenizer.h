/* tokenizer.h - converts text to token ids and back, by the tokenizer.json of a model's folder
 *
 * The ids are those of the Python package `tokenizers`. A type or setting of the file that is not
 * supported is an error that names it; nothing is guessed.
 *
 *     llm_tokenizer *t = llm_tokenizer_open("model/tokenizer.json", error, sizeof error);
 *     int32_t *ids;
 *     int64_t n = llm_tokenizer_encode(t, text, strlen(text), 1, &ids);
 *
 * Supported: BPE (byte-level, or with byte fallback), WordPiece, Unigram; normalizers NFC, NFD,
 * NFKC, NFKD, Precompiled (sentencepiece's), Lowercase, StripAccents, BertNormalizer, Prepend,
 * Replace, Strip; pre-tokenizers ByteLevel, Split, Digits, Metaspace, BertPreTokenizer, Whitespace,
 * WhitespaceSplit, Punctuation; post-processors TemplateProcessing, BertProcessing,
 * RobertaProcessing, ByteLevel; decoders ByteLevel, WordPiece, Metaspace, ByteFallback, Fuse,
 * Strip, Replace; a Sequence of any. Not supported, among others: WordLevel, Nmt, UnicodeScripts.
 *
 * Regular expressions in the file are written for Oniguruma; they are translated for PCRE2, which
 * runs them: nested character classes, &&, POSIX classes, general categories, the scripts of
 * classes.h, \h, \b, \R and possessive quantifiers. What would mean something else in PCRE2 (\X,
 * other forms of (?...)) is refused.
 *
 * The file's `truncation` and `padding` are not applied: the caller limits the number of tokens.
 *
 * A tokenizer caches the words that it has seen, so only one thread at a time may use it. Link with
 * tshard, cJSON (Debian: libcjson-dev) and PCRE2 (libpcre2-dev): -lcjson -lpcre2-8. */
#ifndef LLM_TOKENIZER_H
#define LLM_TOKENIZER_H

#ifndef PCRE2_CODE_UNIT_WIDTH
#define PCRE2_CODE_UNIT_WIDTH 8
#endif
#include <cjson/cJSON.h>
#include <pcre2.h>

#include "classes.h"
#include "files.h"
#include "quote.h"
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

typedef struct llm_entry {
    uint64_t key, value;
} llm_entry;

/* A hash table from numbers to numbers, with open addressing. Key 0 marks an empty slot. */
typedef struct llm_map {
    llm_entry *at;
    size_t count, size; /* count: used slots; size: all slots, a power of two */
} llm_map;

/* What a step does. The normalizer, the pre-tokenizer and the decoder are each a list of steps. */
typedef enum llm_kind {
    LLM_NFC,
    LLM_NFD,
    LLM_NFKC,
    LLM_NFKD,
    LLM_PRECOMPILED,
    LLM_LOWERCASE,
    LLM_STRIP_ACCENTS,
    LLM_BERT_NORMALIZER,
    LLM_PREPEND,
    LLM_REPLACE,
    LLM_STRIP,
    /* Pre-tokenizer: puts a space before the text, splits by GPT-2's regular expression. Decoder:
     * turns characters back into bytes, see llm_char_byte. */
    LLM_BYTE_LEVEL,
    LLM_BYTE_CHARS, /* replaces each byte by a character, see llm_byte_char */
    LLM_SPLIT,
    LLM_DIGITS,
    LLM_METASPACE,
    LLM_WHITESPACE,
    LLM_WHITESPACE_SPLIT,
    LLM_PUNCTUATIONS,
    LLM_WORDPIECE,
    LLM_BYTE_FALLBACK,
    LLM_FUSE,
    LLM_SEQUENCE
} llm_kind;

/* What a splitting step does with the matches of its pattern: the setting "behavior". */
typedef enum llm_behavior {
    LLM_REMOVED,
    LLM_ISOLATED,
    LLM_MERGED_WITH_PREVIOUS,
    LLM_MERGED_WITH_NEXT,
    LLM_CONTIGUOUS
} llm_behavior;

/* When Metaspace prepends its character: never, to the first piece of the text, to every piece. */
typedef enum llm_scheme { LLM_NEVER, LLM_FIRST, LLM_ALWAYS } llm_scheme;

typedef struct llm_step {
    llm_kind kind;
    /* pattern: the literal string to search for, if `code` is NULL. content: what replaces a
     * match. */
    llm_text pattern, content;
    /* code: compiled regular expression. plain: the same without the code points of
     * llm_unicode_added, faster, for texts that have none of these; NULL: use `code`. */
    pcre2_code *code, *plain;
    pcre2_match_data *match;
    /* 1: PCRE2's JIT has compiled `code` and `plain`. */
    int jit;
    llm_behavior behavior;
    /* invert: 1: the text between matches counts as the match. split: 1: the step splits the text.
     * rewrites: 1: the step changes the text, before it splits it. */
    int invert, split, rewrites;
    llm_scheme scheme; /* setting of LLM_METASPACE: when to prepend its character */
    int clean, chinese, accents, lowercase; /* settings of LLM_BERT_NORMALIZER */
    int cleanup;                            /* setting of LLM_WORDPIECE */
    /* LLM_STRIP. Decoder: how many copies of `pattern` are removed at most at each end of a token.
     * Normalizer: 1: white space is removed at that end of the text. */
    size_t left, right;
    uint32_t *units; /* LLM_PRECOMPILED: the trie; its replacements are in `content` */
    size_t unit_count;
    /* LLM_PRECOMPILED: changes[c] is 1 if the ASCII character c may be replaced */
    char changes[128];
} llm_step;

typedef struct llm_steps {
    llm_step *at;
    size_t count, room;
} llm_steps;

/* An added token, such as "<|im_end|>": it is found in the text before anything else is done. */
typedef struct llm_added {
    int32_t id;
    /* content: the token's text; normal: this text normalized, which is searched for if
     * `normalized` is 1 */
    llm_text content, normal;
    int single_word, lstrip, rstrip, normalized, special;
} llm_added;

/* The added tokens sorted by their bytes, to find them in a text; equal texts stay in file
 * order. */
typedef struct llm_finder {
    uint32_t *order; /* indices of llm_tokenizer.added */
    size_t count;
    /* order[begin[c]] to order[begin[c + 1] - 1]: tokens whose first byte is c */
    size_t begin[257];
    int only; /* the first byte that all tokens share; -1: they differ */
} llm_finder;

typedef struct llm_token {
    size_t offset;   /* where the token's text begins in llm_tokenizer.texts */
    uint32_t length; /* bytes of the token's text; UINT32_MAX: no token has this id */
    uint32_t added;  /* 1 + index in llm_tokenizer.added of the added token with this id; 0: none */
} llm_token;

/* The first and the last 8 bytes of a word (fewer if it is shorter, see llm_ends_of). With its
 * length, they identify a word of at most 16 bytes. */
typedef struct llm_ends {
    uint64_t first, last;
} llm_ends;

/* A cache entry: a word and its token ids. If the word has more than 16 bytes, ends.first is its
 * offset in cache_text and ends.last its hash. */
typedef struct llm_cached {
    llm_ends ends;
    uint32_t ids; /* the word's id, if count is 1; else the offset of its ids in cache_ids */
    uint16_t length, count; /* length: bytes of the word, 0: empty slot; count: number of ids */
} llm_cached;

typedef enum llm_model { LLM_BPE, LLM_WORD_PIECE, LLM_UNIGRAM } llm_model;

enum { LLM_FILTER = 1 << 22 /* size of llm_tokenizer.filter in bits */ };
/* LLM_NONE: the id that stands for no token. LLM_CACHED: longest word that is cached, in bytes.
 * LLM_CACHE_WORDS: words in the cache before it is emptied. LLM_MAX_ID: every id is below it. */
enum { LLM_NONE = -1, LLM_CACHED = 96, LLM_CACHE_WORDS = 1 << 19, LLM_MAX_ID = 1 << 22 };

typedef struct llm_tokenizer {
    char error[256];  /* the first error of the current call; empty: none */
    const char *name; /* the file's name for errors; set only while it is read */
    /* given: bytes of the text of the current call; most: how many bytes the steps may make of that
     * text, see llm_fits */
    size_t given, most;
    size_t grown;    /* bytes that normalizers have written for the text of the current call */
    uint8_t *flags;  /* one byte per code point: LLM_WORD ... of unicode.h */
    uint8_t *breaks; /* one byte per code point: LLM_BREAK_...; NULL: no step needs them */
    /* For NFC: first code point << 32 | second -> the code point that they compose to. */
    llm_map compositions;
    /* For LLM_NFKC and LLM_NFKD: code point -> index of its decomposition in llm_unicode_compat. */
    llm_map compat;
    /* 1: the text has no code point of llm_unicode_added, so llm_step.plain can match it; within
     * llm_compile: the pattern is compiled without these code points */
    int plain;
    int sets; /* number of classes in patterns that were resolved by trying all code points */
    pcre2_match_context *context;
    pcre2_jit_stack *stack;

    llm_steps normalizers, pre_tokenizers, decoders;
    /* has_decoder: 1: the file has a decoder. byte_level: 1: the last pre-tokenizer step is
     * LLM_BYTE_CHARS, which llm_word_new does in its place, for words that are not in the cache. */
    int has_decoder, byte_level;
    llm_added *added;
    size_t added_count, added_room;
    /* Added tokens to find in the text as it is (raw), and in the normalized text. */
    llm_finder raw, normalized;
    llm_ids before, after; /* ids of the special tokens that are put before and after a text */

    llm_model model;
    llm_text texts; /* the texts of all tokens, one after the other */
    llm_token *tokens;
    int32_t size; /* the largest token id + 1 */
    size_t tokens_room;
    int32_t *slots; /* hash table from a token's text to its id; LLM_NONE: empty slot */
    size_t slots_size;
    /* Id of the unknown token, or LLM_NONE. */
    int32_t unk;
    int fuse_unk, byte_fallback, ignore_merges, has_continuing, cut_at_spaces;
    /* char_ids[c]: id of the token that is the character c alone; byte_ids[b]: id of the token
     * "<0x..>" of the byte b; LLM_NONE: there is none. */
    int32_t char_ids[1024], byte_ids[256];
    llm_map merges; /* BPE: (left id << 32 | right id) + 1 -> rank << 32 | id of the merged token */
    /* Bit h is set if a key of `merges` has the hash h. It is tested first, as most pairs of tokens
     * have no merge. */
    uint64_t *filter;
    /* WordPiece: prefix of tokens that continue a word, such as "##". */
    llm_text continuing;
    /* max_chars: WordPiece takes a word of more characters for unknown. max_length: bytes of the
     * longest token. */
    size_t max_chars, max_length;
    /* Unigram's trie of all tokens: (node << 8 | next byte) + 1 -> child node. trie_ids: the token
     * that ends at each node, or LLM_NONE. */
    llm_map trie;
    llm_ids trie_ids;
    /* scores: Unigram's score of each token. unk_score: the score of an unknown character, 10 below
     * the lowest of these. */
    double *scores, unk_score;

    /* The cache of words, a hash table, see llm_cached. */
    llm_cached *cache;
    size_t cache_size, cache_count;
    llm_text cache_text;
    llm_ids cache_ids;

    /* Scratch buffers, from here on, which are kept from call to call. */
    llm_text clean, buffers[2], pieces[2], mapped, piece;
    llm_spans spans[2];
    llm_points points, sorted;
    llm_ids ids, symbols, next;
    llm_points ranks;
    uint64_t *heap;
    size_t heap_count, heap_room;
    /* Unigram: best[i] is the score of the best segmentation of the first i bytes. */
    double *best;
    size_t best_room;
    /* Unigram: the last token of the best segmentation of the first i bytes begins at
     * path.at[i].begin and has the id path.at[i].end. */
    llm_spans path;
} llm_tokenizer;

/* Records an error, unless the current call has one already. Returns 0. */
LLM_FORMAT static int llm_fail(llm_tokenizer *t, const char *format, ...) {
    va_list args;
    if (t->error[0]) return 0;
    va_start(args, format);
    (void)vsnprintf(t->error, sizeof t->error, format, args);
    va_end(args);
    (void)quote_message(t->error);
    return 0;
}

/* Returns `at`, reallocated if it has no room for `need` elements of `size` bytes; *room: its
 * capacity in elements. Without memory, records an error and returns `at` as it was. */
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

/* Returns the bytes of a text; "" if no buffer was allocated yet. */
static const char *llm_bytes(const llm_text *text) {
    return text->at ? text->at : "";
}

static int llm_put(llm_tokenizer *t, llm_text *text, const char *s, size_t n) {
    if (!llm_room(t, text, n)) return 0;
    if (n) memcpy(text->at + text->length, s, n);
    text->length += n;
    return 1;
}

/* The steps of a tokenizer may make LLM_GROWTH * n + LLM_GROWTH_MORE bytes of n bytes of text (NFKC
 * makes at most 11 of one). A file whose steps multiply a text must not take all memory. */
enum { LLM_GROWTH = 64, LLM_GROWTH_MORE = 1 << 16 };

/* Begins a call with a text of n bytes: sets how many bytes the steps may make of it. */
static void llm_begin_text(llm_tokenizer *t, size_t n) {
    t->given = n;
    t->most = n < SIZE_MAX / (2 * LLM_GROWTH) ? LLM_GROWTH * n + LLM_GROWTH_MORE : SIZE_MAX;
    t->grown = 0;
}

/* Returns 1 if `bytes` is not more than the steps may make of the text of the current call; else 0
 * and an error. */
static int llm_fits(llm_tokenizer *t, size_t bytes) {
    return bytes <= t->most ||
           llm_fail(t, "the steps of the tokenizer make more than %zu bytes of %zu; more than %d "
                       "times as much is refused", t->most, t->given, LLM_GROWTH);
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

static llm_ends llm_ends_of(const char *s, size_t n) {
    llm_ends ends = {0, 0};
    uint32_t four;
    if (n >= 8) {
        memcpy(&ends.first, s, 8);
        memcpy(&ends.last, s + n - 8, 8);
    } else if (n >= 4) {
        memcpy(&four, s, 4);
        ends.first = four;
        memcpy(&four, s + n - 4, 4);
        ends.last = four;
    } else if (n) {
        ends.first = (uint64_t)(unsigned char)s[0] | (uint64_t)(unsigned char)s[n / 2] << 8;
        ends.last = (unsigned char)s[n - 1];
    }
    return ends;
}

static uint64_t llm_hash_ends(llm_ends ends, size_t n) {
    const uint64_t hash = n * UINT64_C(0xFF51AFD7ED558CCD);
    return llm_mix(hash ^ ends.first) ^ llm_mix(ends.last ^ UINT64_C(0xD6E8FEB86659FD93));
}

static uint64_t llm_hash(const char *s, size_t n) {
    uint64_t hash = llm_hash_ends(llm_ends_of(s, n), n), part;
    for (; n > 16; n -= 8, s += 8) {
        memcpy(&part, s + 8, 8);
        hash = llm_mix(hash ^ part) + part;
    }
    return hash;
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
        bigger.at = (llm_entry *)calloc(bigger.size, sizeof *bigger.at);
        if (!bigger.at) return llm_fail(t, "there is no memory for a map of a tokenizer");
        for (at = 0; at < map->size; at++)
            if (map->at[at].key) (void)llm_map_set(t, &bigger, map->at[at].key, map->at[at].value);
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

/* Returns the code point at s, which is valid UTF-8; *n: its length in bytes. */
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

/* Returns the code point that ends just before s + at; *n: its length in bytes. */
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

/* Returns the length in bytes of the character at s (n bytes are left); 0: it is not valid UTF-8,
 * and its first *bad bytes count as one U+FFFD. */
static size_t llm_valid(const char *s, size_t n, size_t *bad) {
    const unsigned char *u = (const unsigned char *)s;
    const unsigned c = u[0];
    const size_t size = c < 0x80   ? 1
                        : c < 0xC2 ? 0
                        : c < 0xE0 ? 2
                        : c < 0xF0 ? 3
                        : c < 0xF5 ? 4
                                   : 0;
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

/* Returns how many bytes at the beginning of s are valid UTF-8. */
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

/* Appends s with each invalid part replaced by U+FFFD, as Python's errors="replace" and Rust's
 * from_utf8_lossy do. */
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

#define LLM_ROWS(table) (sizeof(table) / sizeof(table)[0])

/* Returns how many rows of a sorted table begin at or before code point c. A row has `width`
 * numbers; the first of them, shifted right by `shift`, is the code point at which the row
 * begins. */
static size_t llm_rows_until(const uint32_t *table, size_t rows, size_t width, int shift,
                             uint32_t c) {
    size_t low = 0, high = rows;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if (table[width * middle] >> shift <= c)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Returns the canonical combining class of c. */
static uint32_t llm_class(uint32_t c) {
    const size_t n = c < 0x300 ? 0 : llm_rows_until(llm_unicode_classes,
                                                    LLM_ROWS(llm_unicode_classes), 1, 8, c);
    return n ? llm_unicode_classes[n - 1] & 0xFF : 0;
}

/* Returns the row of c in llm_unicode_pairs; NULL: c has no canonical decomposition. */
static const uint32_t *llm_pair(uint32_t c) {
    const size_t n =
        llm_rows_until(llm_unicode_pairs, LLM_ROWS(llm_unicode_pairs) / 3, 3, 1, c);
    const uint32_t *row = n ? llm_unicode_pairs + 3 * (n - 1) : NULL;
    return row && row[0] >> 1 == c ? row : NULL;
}

/* Hangul: SBase, LBase, VBase, TBase and SCount of the Unicode standard. */
enum { LLM_S = 0xAC00, LLM_L = 0x1100, LLM_V = 0x1161, LLM_T = 0x11A7, LLM_SYLLABLES = 11172 };

static int llm_unicode_open(llm_tokenizer *t) {
    size_t i;
    uint32_t c, end;
    if (t->flags) return 1;
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

/* Fills t->compat, the index of compatibility decompositions, for a step that needs it. */
static int llm_compat_open(llm_tokenizer *t) {
    const uint32_t *points = llm_unicode_compat;
    size_t i, at = 0;
    uint32_t c;
    if (t->compat.size) return 1;
    for (i = 0; i < LLM_ROWS(llm_unicode_compat_runs); i += 2)
        for (c = llm_unicode_compat_runs[i]; c <= llm_unicode_compat_runs[i + 1]; c++) {
            if (!llm_map_set(t, &t->compat, c, at)) return 0;
            while (!(points[at++] & 1)) continue;
        }
    return 1;
}

/* Flags of a normalization form. LLM_COMPOSED: NFC, NFKC; LLM_COMPATIBLE: NFKC, NFKD. */
enum { LLM_COMPOSED = 1, LLM_COMPATIBLE = 2 };

/* Returns 1 if the normalization form `form` may change c, alone or together with its
 * neighbours. */
static int llm_is_active(const llm_tokenizer *t, uint32_t c, int form) {
    return (t->flags[c] & LLM_ACTIVE) ||
           ((form & LLM_COMPATIBLE) && llm_map_find(&t->compat, c) != NULL);
}

/* Appends to t->points the decomposition of c in the normalization form `form`; c itself if it has
 * none. */
static int llm_decompose(llm_tokenizer *t, uint32_t c, int form) {
    const uint32_t *row;
    const uint64_t *compat = form & LLM_COMPATIBLE ? llm_map_find(&t->compat, c) : NULL;
    if (compat) {
        const uint32_t *point = llm_unicode_compat + *compat;
        for (; !(*point & 1); point++)
            if (!llm_put_point(t, &t->points, *point >> 1)) return 0;
        return llm_put_point(t, &t->points, *point >> 1);
    }
    if (c - LLM_S < LLM_SYLLABLES) {
        const uint32_t s = c - LLM_S;
        if (!llm_put_point(t, &t->points, LLM_L + s / 588)) return 0;
        if (!llm_put_point(t, &t->points, LLM_V + s % 588 / 28)) return 0;
        return s % 28 ? llm_put_point(t, &t->points, LLM_T + s % 28) : 1;
    }
    row = t->flags[c] & LLM_ACTIVE ? llm_pair(c) : NULL;
    if (!row) return llm_put_point(t, &t->points, c);
    return llm_decompose(t, row[1], form) && (!row[2] || llm_decompose(t, row[2], form));
}

/* Fills t->breaks, the classes of code points that decide where a grapheme cluster ends, for a step
 * that needs them. */
static int llm_breaks_open(llm_tokenizer *t) {
    size_t i;
    uint32_t c, end;
    if (t->breaks) return 1;
    t->breaks = (uint8_t *)calloc(0x110000, 1);
    if (!t->breaks) return llm_fail(t, "there is no memory for the tables of a tokenizer");
    for (i = 0; i < LLM_ROWS(llm_unicode_breaks); i++) {
        const uint32_t value = llm_unicode_breaks[i] & 0xFF;
        end = i + 1 < LLM_ROWS(llm_unicode_breaks) ? llm_unicode_breaks[i + 1] >> 8 : 0x110000;
        c = llm_unicode_breaks[i] >> 8;
        if (value) memset(t->breaks + c, (int)value, end - c);
    }
    for (c = LLM_S; c < LLM_S + LLM_SYLLABLES; c++)
        if ((c - LLM_S) % 28) t->breaks[c] = LLM_BREAK_LVT;
    return 1;
}

/* Sorts each run of combining characters in t->points by canonical combining class; equal classes
 * keep their order. */
static int llm_reorder(llm_tokenizer *t) {
    uint32_t *p = t->points.at;
    const size_t n = t->points.count;
    size_t begin, end, i, at, count[257];
    t->sorted.count = 0;
    if (n && !llm_put_point(t, &t->sorted, 0)) return 0;
    t->sorted.at = (uint32_t *)llm_grow(t, t->sorted.at, &t->sorted.room, n, sizeof *p);
    if (n > t->sorted.room) return 0;
    for (begin = 0; begin < n; begin = end) {
        end = begin + 1;
        if (!llm_class(p[begin])) continue;
        while (end < n && llm_class(p[end])) end++;
        if (end - begin < 2) continue;
        memset(count, 0, sizeof count);
        for (i = begin; i < end; i++) count[llm_class(p[i]) + 1]++;
        for (i = 1; i < 257; i++) count[i] += count[i - 1];
        for (i = begin; i < end; i++) {
            at = count[llm_class(p[i])]++;
            t->sorted.at[at] = p[i];
        }
        memcpy(p + begin, t->sorted.at, (end - begin) * sizeof *p);
    }
    return 1;
}

/* Returns the code point that the code points a and b compose to; 0: they stay two. */
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

/* Appends to `out` s normalized to NFD, NFC, NFKD or NFKC. Only runs of characters that the form
 * may change, each with the character before it, are decomposed and composed; the rest is
 * copied. */
static int llm_canonical(llm_tokenizer *t, const char *s, size_t n, llm_text *out, int form) {
    /* The smallest first byte, in UTF-8, of a character that the normalization form changes: that
     * of U+00A0 for NFKC and NFKD, that of U+00C0 for NFC and NFD. */
    const unsigned low = form & LLM_COMPATIBLE ? 0xC2 : 0xC3;
    size_t at = 0, done = 0, size, before = 0, i;
    while (at < n) {
        if (n - at > 8) {
            uint64_t eight;
            memcpy(&eight, s + at, 8);
            if (!(eight & UINT64_C(0x8080808080808080))) {
                at += 8;
                before = at - 1;
                continue;
            }
        }
        if ((unsigned char)s[at] < low || !llm_is_active(t, llm_point(s + at, &size), form)) {
            before = at;
            at += (unsigned char)s[at] < 0x80 ? 1 : (unsigned char)s[at] < low ? 2 : size;
            continue;
        }
        if (!llm_put(t, out, s + done, before - done)) return 0;
        t->points.count = 0;
        if (before < at && !llm_decompose(t, llm_point(s + before, &size), form)) return 0;
        while (at < n) {
            const uint32_t c = llm_point(s + at, &size);
            if (!llm_is_active(t, c, form)) break;
            if (!llm_decompose(t, c, form)) return 0;
            at += size;
        }
        if (!llm_reorder(t)) return 0;
        if (form & LLM_COMPOSED) llm_compose(t);
        for (i = 0; i < t->points.count; i++)
            if (!llm_put_utf8(t, out, t->points.at[i])) return 0;
        before = done = at;
    }
    return llm_put(t, out, s + done, n - done);
}

static uint32_t llm_lower(uint32_t c) {
    const int32_t *row = llm_unicode_lower, point = (int32_t)c;
    size_t n;
    if (c < 0x80) return c >= 'A' && c <= 'Z' ? c + 32 : c;
    n = llm_rows_until((const uint32_t *)row, LLM_ROWS(llm_unicode_lower) / 4, 4, 0, c);
    if (!n) return c;
    row += 4 * (n - 1);
    return point <= row[1] && (point - row[0]) % row[2] == 0 ? (uint32_t)(point + row[3]) : c;
}

/* == patterns ============================================================== */

/* White space, and all other code points, as the inside of a class [...]. White space is Unicode's
 * White_Space; PCRE2's \s has U+180E, too. */
#define LLM_SPACES                                                                                 \
    "\\x{9}-\\x{D} \\x{85}\\x{A0}\\x{1680}\\x{2000}-\\x{200A}\\x{2028}\\x{2029}\\x{202F}"          \
    "\\x{205F}\\x{3000}"
#define LLM_NO_SPACES                                                                              \
    "\\x{0}-\\x{8}\\x{E}-\\x{1F}!-\\x{84}\\x{86}-\\x{9F}\\x{A1}-\\x{167F}\\x{1681}-\\x{1FFF}"      \
    "\\x{200B}-\\x{2027}\\x{202A}-\\x{202E}\\x{2030}-\\x{205E}\\x{2060}-\\x{2FFF}"                 \
    "\\x{3001}-\\x{10FFFF}"

/* Letters in circles and squares, which Oniguruma's \w matches, as the inside of a class [...]. */
#define LLM_CIRCLED                                                                                \
    "\\x{24B6}-\\x{24E9}\\x{1F130}-\\x{1F149}\\x{1F150}-\\x{1F169}\\x{1F170}-\\x{1F189}"

static int llm_puts(llm_tokenizer *t, llm_text *out, const char *s) {
    return llm_put(t, out, s, strlen(s));
}

/* Looks for the script or POSIX class `name`, of n bytes in any case, in the table of classes.h.
 * Returns 1 and sets *row to its row; 0: there is none. */
static int llm_find_class(const char *name, size_t n, const llm_class_row **row) {
    size_t i, k;
    for (i = 0; i < LLM_ROWS(llm_classes); i++) {
        *row = &llm_classes[i];
        for (k = 0; k < n && ((name[k] ^ (*row)->name[k]) & ~32) == 0 && (*row)->name[k];) k++;
        if (k == n && !(*row)->name[n]) return 1;
    }
    return 0;
}

/* Appends the ranges of code points of a row of classes.h, as the inside of a class [...]. */
static int llm_put_ranges(llm_tokenizer *t, llm_text *out, const llm_class_row *row) {
    char text[40];
    size_t i;
    for (i = 0; i < row->count; i++) {
        (void)snprintf(text, sizeof text, "\\x{%X}-\\x{%X}", (unsigned)row->ranges[2 * i],
                       (unsigned)row->ranges[2 * i + 1]);
        if (!llm_puts(t, out, text)) return 0;
    }
    return 1;
}

/* Appends a general category or a script, as the inside of a class [...]; a category with the code
 * points that PCRE2's version of Unicode may lack, see llm_unicode_added. */
static int llm_put_category(llm_tokenizer *t, llm_text *out, const char *name, size_t n) {
    char text[40];
    size_t i;
    const char *known = NULL;
    const llm_class_row *script;
    (void)snprintf(text, sizeof text, "%.*s", (int)(n < 3 ? n : 3), name);
    if (n > 2 && name[0] >= 'A' && name[0] <= 'Z' && llm_find_class(name, n, &script))
        return llm_put_ranges(t, out, script);
    if (n == 2) known = strstr(llm_unicode_categories, text);
    if (n == 1) known = strchr("LMNPSZ", text[0]);
    if (!known)
        return llm_fail(t, "%s: \\p{%.*s} in a pattern is not known", t->name,
                        (int)(n < 40 ? n : 40), name);
    /* ASCII is named first: PCRE2 tests it by a table of bits, not by Unicode properties. */
    if (strcmp(text, "L") == 0 && !llm_puts(t, out, "A-Za-z")) return 0;
    if (strcmp(text, "Lu") == 0 && !llm_puts(t, out, "A-Z")) return 0;
    if (strcmp(text, "Ll") == 0 && !llm_puts(t, out, "a-z")) return 0;
    if ((strcmp(text, "N") == 0 || strcmp(text, "Nd") == 0) && !llm_puts(t, out, "0-9")) return 0;
    if (!llm_puts(t, out, "\\p{") || !llm_puts(t, out, text) || !llm_puts(t, out, "}")) return 0;
    for (i = 0; !t->plain && i + 2 < LLM_ROWS(llm_unicode_added); i += 3) {
        const uint32_t *row = llm_unicode_added + i;
        if (strncmp(llm_unicode_categories + 3 * row[2], text, n) != 0) continue;
        (void)snprintf(text + 3, sizeof text - 3, "\\x{%X}-\\x{%X}", (unsigned)row[0],
                       (unsigned)row[1]);
        if (!llm_puts(t, out, text + 3)) return 0;
    }
    return 1;
}

/* Where an escape such as \p{L} stands: outside of [...]; inside; inside, but written as a class
 * [...] of its own. */
typedef enum llm_where { LLM_ALONE, LLM_INSIDE, LLM_NESTED } llm_where;

/* Translates the escape for a class of characters at p: \p{L}, \s, \h (in Oniguruma a hexadecimal
 * digit) ...; *used: its length. */
static int llm_put_class(llm_tokenizer *t, llm_text *out, const char *p, size_t n,
                         llm_where where, size_t *used) {
    const char kind = p[1];
    const int inside = where == LLM_INSIDE;
    int negated = kind == 'P' || kind == 'S' || kind == 'D' || kind == 'W' || kind == 'H';
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
    } else if (kind == 'h' || kind == 'H') {
        if (!llm_puts(t, out, "0-9A-Fa-f")) return 0;
    } else if (kind == 'd' || kind == 'D') {
        if (!llm_put_category(t, out, "Nd", 2)) return 0;
    } else if (kind == 'w' || kind == 'W') {
        /* Oniguruma's \w has letters in circles and squares, too; outside of [...] also Latin-1's
         * superscript digits and fractions. */
        if (!llm_put_category(t, out, "L", 1) || !llm_put_category(t, out, "M", 1) ||
            !llm_put_category(t, out, "Nd", 2) || !llm_put_category(t, out, "Nl", 2) ||
            !llm_put_category(t, out, "Pc", 2) || !llm_puts(t, out, LLM_CIRCLED) ||
            (where == LLM_ALONE && !llm_puts(t, out, "\\x{B2}\\x{B3}\\x{B9}\\x{BC}-\\x{BE}")))
            return 0;
    } else {
        const char *name = p + 3 + (p[3] == '^');
        if (!llm_put_category(t, out, name, (size_t)(p + *used - 1 - name))) return 0;
    }
    return inside || llm_puts(t, out, "]");
}

/* Appends the word boundary \b (`is` is 1) or its opposite \B (0) as lookarounds with Oniguruma's
 * \w. */
static int llm_put_boundary(llm_tokenizer *t, llm_text *out, int is) {
    static const char *const parts[2][5] = {{"(?:(?<=", ")(?=", ")|(?<!", ")(?!", "))"},
                                            {"(?:(?<=", ")(?!", ")|(?<!", ")(?=", "))"}};
    size_t i, used;
    for (i = 0; i < 5; i++)
        if (!llm_puts(t, out, parts[is][i]) ||
            (i < 4 && !llm_put_class(t, out, "\\w", 2, LLM_ALONE, &used)))
            return 0;
    return 1;
}

/* Translates the escape at p; *used: its length. Oniguruma's \v and \u differ from PCRE2's; an
 * escape that is not known is an error. */
static int llm_put_escape(llm_tokenizer *t, llm_text *out, const char *p, size_t n, int inside,
                          size_t *used) {
    const char e = n > 1 ? p[1] : 0;
    char text[16];
    if (e && strchr("sSdDwWpPhH", e))
        return llm_put_class(t, out, p, n, inside ? LLM_INSIDE : LLM_ALONE, used);
    *used = 2;
    if (!inside && (e == 'b' || e == 'B')) return llm_put_boundary(t, out, e == 'b');
    if ((!inside && e == 'R') || (inside && e == 'b')) return llm_put(t, out, p, 2);
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

/* Called for a position p of a pattern outside of [...]. If a construct begins there that Oniguruma
 * and PCRE2 read differently, returns a name of it for errors, such as "(?..."; else NULL. */
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

/* -- character classes: Oniguruma's may be nested, and intersected by && -- */

/* A class [...] that is being translated. It matches the characters of `flat`, the inside of a
 * PCRE2 class, and of `more`, expressions that match one character, each after a '|'. In a class
 * with &&, these two hold the operand after the last &&, and `also` has a lookahead for each
 * operand before it. */
typedef struct llm_chars {
    llm_text flat, more, also;
    int negated;
} llm_chars;

/* LLM_MOST_DEPTH: most classes nested in each other. LLM_MOST_SETS: most classes of a file that are
 * resolved by trying all code points. */
enum { LLM_MOST_DEPTH = 16, LLM_MOST_SETS = 32 };

static void llm_chars_free(llm_chars *set) {
    free(set->flat.at);
    free(set->more.at);
    free(set->also.at);
}

/* Appends an expression that matches one character of set->flat or set->more, which, in a class
 * with &&, are its last operand. */
static int llm_put_union(llm_tokenizer *t, llm_text *out, const llm_chars *set) {
    const int flat = set->flat.length > 0, more = set->more.length > 0;
    if (!flat && !more) return llm_puts(t, out, "(?!)");
    if (more && !llm_puts(t, out, "(?:")) return 0;
    if (flat && (!llm_puts(t, out, "[") || !llm_put(t, out, set->flat.at, set->flat.length) ||
                 !llm_puts(t, out, "]")))
        return 0;
    return !more || (llm_put(t, out, set->more.at + !flat, set->more.length - (size_t)!flat) &&
                     llm_puts(t, out, ")"));
}

/* Appends an expression that matches one character of the whole class `set`. */
static int llm_put_set(llm_tokenizer *t, llm_text *out, const llm_chars *set) {
    return llm_puts(t, out, set->negated ? "(?:(?!" : "(?:") &&
           llm_put(t, out, llm_bytes(&set->also), set->also.length) &&
           llm_put_union(t, out, set) && llm_puts(t, out, set->negated ? ")(?s:.))" : ")");
}

/* Handles && in a class: the operand before it becomes a lookahead, and the next one begins. */
static int llm_chars_intersect(llm_tokenizer *t, llm_chars *set) {
    if (!llm_puts(t, &set->also, "(?=") || !llm_put_union(t, &set->also, set) ||
        !llm_puts(t, &set->also, ")"))
        return 0;
    set->flat.length = set->more.length = 0;
    return 1;
}

/* Translates the POSIX class at p, such as [:alpha:], and adds it to `set`; *used: its length, 0:
 * there is none. */
static int llm_chars_posix(llm_tokenizer *t, llm_chars *set, const char *p, size_t n,
                           size_t *used) {
    static const struct {
        /* A POSIX class: its name, the general categories that it has, further ranges. A row of
         * llm_classes with the same name is added to these. */
        const char *name, *categories, *ranges;
    } rows[] = {{"alnum", "L Nl Nd", NULL}, {"alpha", "L Nl", NULL}, {"lower", "Ll", NULL},
                {"upper", "Lu", NULL}, {"ascii", "", "\\x{0}-\\x{7F}"}, {"blank", "Zs", "\\x{9}"},
                {"cntrl", "", "\\x{0}-\\x{1F}\\x{7F}-\\x{9F}"}, {"digit", "Nd", NULL},
                {"graph", "L M N P S Cf Co", NULL}, {"print", "L M N P S Cf Co Zs", NULL},
                {"punct", "P S", NULL}, {"space", "", LLM_SPACES}, {"xdigit", "", "0-9A-Fa-f"},
                {"word", "L M Nd Nl Pc", LLM_CIRCLED}};
    const int negated = n > 2 && p[2] == '^';
    const char *name = p + 2 + negated, *at;
    const llm_class_row *row;
    llm_text *out = negated ? &set->more : &set->flat;
    size_t i, length = 0;
    while ((size_t)(name - p) + length < n && name[length] >= 'a' && name[length] <= 'z') length++;
    *used = (size_t)(name - p) + length + 2;
    if (*used > n || name[length] != ':' || name[length + 1] != ']') {
        *used = 0;
        return 1;
    }
    for (i = 0; i < LLM_ROWS(rows); i++)
        if (strlen(rows[i].name) == length && memcmp(rows[i].name, name, length) == 0) break;
    if (i == LLM_ROWS(rows))
        return llm_fail(t, "%s: [:%.*s:] in a pattern is not known", t->name,
                        (int)(length < 40 ? length : 40), name);
    if (negated && !llm_puts(t, out, "|[^")) return 0;
    for (at = rows[i].categories; *at; at += strspn(at, " ")) {
        const size_t one = strcspn(at, " ");
        if (!llm_put_category(t, out, at, one)) return 0;
        at += one;
    }
    if (rows[i].ranges && !llm_puts(t, out, rows[i].ranges)) return 0;
    at = i == 0 ? "alpha" : rows[i].name; /* alnum has the ranges of alpha in llm_classes, too */
    if (llm_find_class(at, strlen(at), &row) && !llm_put_ranges(t, out, row)) return 0;
    return !negated || llm_puts(t, out, "]");
}

/* Appends one character of a class, literal or an escape; *used: its length in the pattern. */
static int llm_chars_char(llm_tokenizer *t, llm_text *out, const char *p, size_t n, size_t *used) {
    if (p[0] == '\\') return llm_put_escape(t, out, p, n, 1, used);
    (void)llm_point(p, used);
    if (strchr("^-[]", p[0]) && !llm_puts(t, out, "\\")) return 0;
    return llm_put(t, out, p, *used);
}

/* Translates an item of a class: a character, a range, or an escape for several characters. *after:
 * before the call, 1 if the item before was a range or such an escape, so that a '-' here begins no
 * range; after the call, the same of this item. */
static int llm_chars_item(llm_tokenizer *t, llm_chars *set, const char *p, size_t n, size_t *used,
                        int *after) {
    const int several = n > 1 && p[0] == '\\' && strchr("sSdDwWpPhH", p[1]) && p[1];
    const int begins = !(*after && p[0] == '-');
    size_t more;
    *after = several;
    if (several) {
        const int negated = strchr("DWPH", p[1]) || (p[1] == 'p' && n > 3 && p[3] == '^');
        if (!negated) return llm_put_class(t, &set->flat, p, n, LLM_INSIDE, used);
        return llm_puts(t, &set->more, "|") && llm_put_class(t, &set->more, p, n, LLM_NESTED, used);
    }
    if (!llm_chars_char(t, &set->flat, p, n, used)) return 0;
    if (!begins || n < *used + 2 || p[*used] != '-' || strchr("[]", p[*used + 1]) ||
        (n > *used + 2 && memcmp(p + *used + 1, "&&", 2) == 0) ||
        (p[*used + 1] == '\\' && n > *used + 2 && strchr("sSdDwWpPhH", p[*used + 2])))
        return 1;
    *after = 1;
    if (!llm_puts(t, &set->flat, "-") ||
        !llm_chars_char(t, &set->flat, p + *used + 1, n - *used - 1, &more))
        return 0;
    *used += 1 + more;
    return 1;
}

static int llm_chars_read(llm_tokenizer *t, llm_chars *set, const char *p, size_t n, int depth,
                        size_t *used);

/* Reads the class at p, which is nested in `set`, and adds it: to set->flat and set->more, or, if
 * the inner class is negated or has &&, as one expression to set->more. */
static int llm_chars_nest(llm_tokenizer *t, llm_chars *set, const char *p, size_t n, int depth,
                        size_t *used) {
    llm_chars inner;
    int ok;
    memset(&inner, 0, sizeof inner);
    ok = llm_chars_read(t, &inner, p, n, depth, used);
    if (ok && (inner.negated || inner.also.length))
        ok = llm_puts(t, &set->more, "|") && llm_put_set(t, &set->more, &inner);
    else if (ok)
        ok = llm_put(t, &set->flat, llm_bytes(&inner.flat), inner.flat.length) &&
             llm_put(t, &set->more, llm_bytes(&inner.more), inner.more.length);
    llm_chars_free(&inner);
    return ok;
}

/* Reads the class at p into *set; *used: its length; depth: 1 + the number of classes around it. */
static int llm_chars_read(llm_tokenizer *t, llm_chars *set, const char *p, size_t n, int depth,
                        size_t *used) {
    size_t i, one;
    int after = 0, ok = 1;
    set->negated = n > 1 && p[1] == '^';
    i = 1 + (size_t)set->negated;
    if (depth > LLM_MOST_DEPTH)
        return llm_fail(t, "%s: more than %d classes in each other in a pattern are not known",
                        t->name, LLM_MOST_DEPTH);
    if (i < n && p[i] == ']') return llm_fail(t, "%s: [] in a pattern is not known", t->name);
    for (; i < n && p[i] != ']' && ok; i += one) {
        one = 0;
        if (p[i] == '[') {
            if (n - i > 1 && p[i + 1] == ':') ok = llm_chars_posix(t, set, p + i, n - i, &one);
            if (ok && !one) ok = llm_chars_nest(t, set, p + i, n - i, depth + 1, &one);
            after = 1;
        } else if (n - i > 1 && memcmp(p + i, "&&", 2) == 0) {
            ok = llm_chars_intersect(t, set);
            one = 2;
            after = 0;
        } else {
            ok = llm_chars_item(t, set, p + i, n - i, &one, &after);
        }
    }
    *used = i + 1;
    return ok && (i < n || llm_fail(t, "%s: a pattern does not compile: [ without ]", t->name));
}

/* Appends a class [...] of the code points that `code` matches, as ranges. all: the text of all
 * code points in order; `code` matches a run of one or more of them. */
static int llm_put_matches(llm_tokenizer *t, llm_text *out, const pcre2_code *code,
                           const llm_text *all) {
    pcre2_match_data *match = pcre2_match_data_create(1, NULL);
    int got = match ? 1 : 0, any = 0;
    size_t at = 0, size;
    while (got > 0) {
        char text[40];
        const PCRE2_SIZE *ends = pcre2_get_ovector_pointer(match);
        got = pcre2_match(code, (PCRE2_SPTR)all->at, all->length, at, PCRE2_NO_UTF_CHECK, match,
                          NULL);
        if (got < 1) break;
        (void)snprintf(text, sizeof text, "%s\\x{%X}-\\x{%X}", any++ ? "" : "[",
                       (unsigned)llm_point(all->at + ends[0], &size),
                       (unsigned)llm_point_before(all->at, ends[1], &size));
        if (!llm_puts(t, out, text)) got = 0;
        at = ends[1];
    }
    pcre2_match_data_free(match);
    if (got != PCRE2_ERROR_NOMATCH)
        return llm_fail(t, "%s: there is no memory for a class of a pattern", t->name);
    return llm_puts(t, out, any ? "]" : "(?!)");
}

/* Appends a class [...] of all code points that match `expression`, which stands for one character.
 * Tries every code point. */
static int llm_put_members(llm_tokenizer *t, llm_text *out, const llm_text *expression) {
    llm_text text = {NULL, 0, 0}, all = {NULL, 0, 0};
    int error, ok = t->sets++ < LLM_MOST_SETS;
    PCRE2_SIZE where;
    pcre2_code *code = NULL;
    uint32_t c;
    if (!ok)
        return llm_fail(t, "%s: more than %d classes in patterns with && or a negated one in "
                           "another are not known", t->name, LLM_MOST_SETS);
    ok = llm_puts(t, &text, "(?:") && llm_put(t, &text, expression->at, expression->length) &&
         llm_puts(t, &text, ")++") && llm_room(t, &all, (size_t)4 * 0x110000);
    for (c = 0; ok && c < 0x110000; c += c == 0xD7FF ? 0x801 : 1) ok = llm_put_utf8(t, &all, c);
    if (ok) code = pcre2_compile((PCRE2_SPTR)text.at, text.length, PCRE2_UTF, &error, &where, NULL);
    /* The JIT makes matching faster; if it fails, PCRE2 matches without it. */
    if (code) (void)pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
    if (ok)
        ok = code ? llm_put_matches(t, out, code, &all)
                  : llm_fail(t, "%s: a class of a pattern does not compile, or there is no memory "
                                "for it", t->name);
    pcre2_code_free(code);
    free(text.at);
    free(all.at);
    return ok;
}

/* Translates a class [...] at p that is not nested; *used: its length. folds: 1: it stands within
 * (?i...), which ignores case. */
static int llm_translate_class(llm_tokenizer *t, const char *p, size_t n, int folds, llm_text *out,
                               size_t *used) {
    llm_text expression = {NULL, 0, 0};
    llm_chars set;
    int ok;
    memset(&set, 0, sizeof set);
    ok = llm_chars_read(t, &set, p, n, 1, used);
    if (ok && !set.also.length && !set.more.length) {
        ok = llm_puts(t, out, set.negated ? "[^" : "[") &&
             llm_put(t, out, llm_bytes(&set.flat), set.flat.length) && llm_puts(t, out, "]");
    } else if (ok && folds) {
        ok = llm_fail(t, "%s: a class with && or a negated one, within (?i), in a pattern is not "
                         "known", t->name);
    } else if (ok) {
        ok = llm_put_set(t, &expression, &set) && llm_put_members(t, out, &expression);
    }
    free(expression.at);
    llm_chars_free(&set);
    return ok;
}

/* Translates a pattern of Oniguruma to PCRE2, and appends it. */
static int llm_translate(llm_tokenizer *t, const char *p, size_t n, llm_text *out) {
    size_t i, used;
    /* depth: number of parentheses around position i. folds: 0 if case matters there; else 1 + the
     * depth inside the (?i: ...) around it, or 1 if the pattern begins with (?i). */
    int depth = 0, folds = n > 3 && memcmp(p, "(?i)", 4) == 0 ? 1 : 0;
    for (i = 0; i < n; i += used) {
        const char *bad = llm_unlike(p, p + i, n - i);
        used = 1;
        if (bad) return llm_fail(t, "%s: %s in a pattern is not known", t->name, bad);
        if (p[i] == '[') {
            if (!llm_translate_class(t, p + i, n - i, folds, out, &used)) return 0;
            continue;
        }
        if (p[i] == '\\') {
            if (!llm_put_escape(t, out, p + i, n - i, 0, &used)) return 0;
            continue;
        }
        if (p[i] == '(') depth++;
        if (p[i] == '(' && !folds && n - i > 3 && memcmp(p + i, "(?i:", 4) == 0) folds = 1 + depth;
        if (p[i] == ')' && folds == 1 + depth) folds = 0;
        depth -= p[i] == ')';
        if (!llm_put(t, out, p + i, used)) return 0;
    }
    return 1;
}

/* Compiles one of the two forms of a pattern, see llm_compile: with the code points of
 * llm_unicode_added, or, if t->plain, without. Sets *jit to 0 if PCRE2's JIT cannot compile it. */
static pcre2_code *llm_compile_one(llm_tokenizer *t, const char *pattern, size_t n, int *jit) {
    llm_text text = {NULL, 0, 0};
    pcre2_code *code = NULL;
    int error;
    PCRE2_SIZE where;
    PCRE2_UCHAR why[128];
    if (llm_translate(t, pattern, n, &text)) {
        code = pcre2_compile((PCRE2_SPTR)llm_bytes(&text), text.length,
                             PCRE2_UTF | PCRE2_MULTILINE, &error, &where, NULL);
        if (!code) {
            (void)pcre2_get_error_message(error, why, sizeof why);
            (void)llm_fail(t, "%s: a pattern does not compile: %s", t->name, (const char *)why);
        } else if (pcre2_jit_compile(code, PCRE2_JIT_COMPLETE) != 0) {
            *jit = 0;
        }
    }
    free(text.at);
    return code;
}

/* Compiles a step's pattern in two forms: with the code points of llm_unicode_added, which make it
 * several times slower, and without them, for the many texts that have none. A pattern with a class
 * that llm_put_members has converted to ranges gets the first form only. */
static int llm_compile(llm_tokenizer *t, llm_step *step, const char *pattern, size_t n) {
    const int sets = t->sets;
    step->jit = 1;
    step->code = llm_compile_one(t, pattern, n, &step->jit);
    t->plain = 1;
    if (step->code && t->sets == sets) step->plain = llm_compile_one(t, pattern, n, &step->jit);
    t->plain = 0;
    if (!step->code || (t->sets == sets && !step->plain)) return 0;
    step->match = pcre2_match_data_create_from_pattern(step->code, NULL);
    return step->match || llm_fail(t, "there is no memory for a pattern");
}

/* Returns 1 if s has no code point of llm_unicode_added, those that Unicode 14 did not have. */
static int llm_is_plain(const char *s, size_t n) {
    const size_t rows = LLM_ROWS(llm_unicode_added) / 3;
    size_t at = 0, size, row;
    while (at < n) {
        uint32_t c;
        uint64_t eight = UINT64_MAX;
        if (n - at >= 8) memcpy(&eight, s + at, 8);
        if (!(eight & UINT64_C(0x8080808080808080))) {
            at += 8;
            continue;
        }
        c = llm_point(s + at, &size);
        at += size;
        if (size < 3) continue;
        row = llm_rows_until(llm_unicode_added, rows, 3, 0, c);
        if (row && c <= llm_unicode_added[3 * (row - 1) + 1]) return 0;
    }
    return 1;
}

/* Finds the first match of the step's pattern in s at or after byte `from`. Returns 0 if there is
 * none, or after an error. */
static int llm_find(llm_tokenizer *t, const llm_step *step, const char *s, size_t n, size_t from,
                    llm_span *found) {
    const pcre2_code *code = t->plain && step->plain ? step->plain : step->code;
    const PCRE2_SIZE *ends;
    int got;
    if (!code) {
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
        got = pcre2_jit_match(code, (PCRE2_SPTR)s, n, from, PCRE2_NO_UTF_CHECK, step->match,
                              t->context);
    else
        got = pcre2_match(code, (PCRE2_SPTR)s, n, from, PCRE2_NO_UTF_CHECK, step->match,
                          t->context);
    if (got == PCRE2_ERROR_NOMATCH) return 0;
    if (got < 0) return llm_fail(t, "a pattern of the tokenizer fails: PCRE2's error %d", got);
    ends = pcre2_get_ovector_pointer(step->match);
    found->begin = ends[0];
    found->end = ends[1];
    return found->begin <= found->end;
}

/* == the vocabulary ======================================================== */

/* Returns the id of the token with this text in the model's vocabulary; LLM_NONE: there is none. */
static int32_t llm_lookup(const llm_tokenizer *t, const char *s, size_t n) {
    size_t at;
    if (!t->slots_size) return LLM_NONE;
    for (at = (size_t)llm_hash(s, n) & (t->slots_size - 1); t->slots[at] != LLM_NONE;
         at = (at + 1) & (t->slots_size - 1)) {
        const llm_token *token = &t->tokens[t->slots[at]];
        if (token->length == n && memcmp(t->texts.at + token->offset, s, n) == 0)
            return t->slots[at];
    }
    return LLM_NONE;
}

/* Makes t->tokens long enough for `id`; new entries are empty. */
static int llm_token_room(llm_tokenizer *t, int32_t id) {
    t->tokens = (llm_token *)llm_grow(t, t->tokens, &t->tokens_room, (size_t)id + 1,
                                      sizeof *t->tokens);
    if ((size_t)id >= t->tokens_room) return 0;
    for (; t->size <= id; t->size++) {
        t->tokens[t->size].offset = 0;
        t->tokens[t->size].length = UINT32_MAX;
        t->tokens[t->size].added = 0;
    }
    return 1;
}

static int llm_put_token(llm_tokenizer *t, int32_t id, const char *s) {
    const size_t n = strlen(s);
    if (n > INT32_MAX) return llm_fail(t, "%s: a token is too long", t->name);
    if (!llm_token_room(t, id)) return 0;
    if (t->tokens[id].length != UINT32_MAX)
        return llm_fail(t, "%s: two tokens have the id %d", t->name, (int)id);
    t->tokens[id].offset = t->texts.length;
    t->tokens[id].length = (uint32_t)n;
    if (n > t->max_length) t->max_length = n;
    return llm_put(t, &t->texts, s, n);
}

/* Builds the table of token ids by text, once all tokens are there (of two with the same text, the
 * larger id counts), then char_ids and byte_ids. */
static int llm_index_tokens(llm_tokenizer *t) {
    size_t at;
    int32_t id, c;
    t->slots_size = 1024;
    while (t->slots_size < 2 * (size_t)t->size) t->slots_size *= 2;
    t->slots = (int32_t *)malloc(t->slots_size * sizeof *t->slots);
    if (!t->slots || !llm_room(t, &t->texts, 1))
        return llm_fail(t, "there is no memory for a vocabulary");
    for (at = 0; at < t->slots_size; at++) t->slots[at] = LLM_NONE;
    for (id = 0; id < t->size; id++) {
        const llm_token *token = &t->tokens[id];
        const char *s = t->texts.at + token->offset;
        if (token->length == UINT32_MAX) continue;
        at = (size_t)llm_hash(s, token->length) & (t->slots_size - 1);
        while (t->slots[at] != LLM_NONE) {
            const llm_token *other = &t->tokens[t->slots[at]];
            if (other->length == token->length &&
                memcmp(t->texts.at + other->offset, s, token->length) == 0)
                break;
            at = (at + 1) & (t->slots_size - 1);
        }
        t->slots[at] = id;
    }
    for (c = 0; c < 1024; c++) {
        t->piece.length = 0;
        if (!llm_put_utf8(t, &t->piece, (uint32_t)c)) return 0;
        t->char_ids[c] = llm_lookup(t, t->piece.at, t->piece.length);
    }
    for (c = 0; c < 256; c++) {
        char name[8];
        (void)snprintf(name, sizeof name, "<0x%02X>", (unsigned)c);
        t->byte_ids[c] = llm_lookup(t, name, 6);
    }
    return 1;
}

/* == BPE =================================================================== */

/* Returns the merge of two tokens, rank << 32 | id of the result; UINT64_MAX: there is none. */
static uint64_t llm_merge(const llm_tokenizer *t, int32_t left, int32_t right) {
    const uint64_t key = ((uint64_t)(uint32_t)left << 32 | (uint32_t)right) + 1;
    const uint64_t bit = llm_mix(key) >> 42, *found;
    if (!(t->filter[bit / 64] >> bit % 64 & 1)) return UINT64_MAX;
    found = llm_map_find(&t->merges, key);
    return found ? *found : UINT64_MAX;
}

/* Splits s into t->symbols, one token per character. A character without a token becomes the tokens
 * of its bytes, or the unknown token; several of those in a row become one if "fuse_unk" is set. */
static int llm_symbols(llm_tokenizer *t, const char *s, size_t n) {
    size_t at, size, i;
    int32_t id;
    int unknown = 0;
    t->symbols.count = 0;
    for (at = 0; at < n; at += size) {
        const uint32_t c = llm_point(s + at, &size);
        id = c < 1024 ? t->char_ids[c] : llm_lookup(t, s + at, size);
        if (id != LLM_NONE) {
            if (unknown && !llm_put_id(t, &t->symbols, t->unk)) return 0;
            unknown = 0;
            if (!llm_put_id(t, &t->symbols, id)) return 0;
            continue;
        }
        if (t->byte_fallback) {
            for (i = 0; i < size && t->byte_ids[(unsigned char)s[at + i]] != LLM_NONE;) i++;
            if (i == size) {
                for (i = 0; i < size; i++)
                    if (!llm_put_id(t, &t->symbols, t->byte_ids[(unsigned char)s[at + i]]))
                        return 0;
                continue;
            }
        }
        if (t->unk == LLM_NONE) continue;
        if (unknown && !t->fuse_unk && !llm_put_id(t, &t->symbols, t->unk)) return 0;
        unknown = 1;
    }
    return !unknown || llm_put_id(t, &t->symbols, t->unk);
}

/* BPE of a short word: merges the pair of lowest rank, the leftmost of equal ones, until no pair
 * has a merge. Searches all pairs each time; `merges` has room for them. */
static void llm_merge_few(llm_tokenizer *t, uint64_t *merges) {
    int32_t *ids = t->symbols.at;
    size_t n = t->symbols.count, i, best;
    for (i = 0; i + 1 < n; i++) merges[i] = llm_merge(t, ids[i], ids[i + 1]);
    while (n > 1) {
        for (best = 0, i = 1; i + 1 < n; i++)
            if (merges[i] >> 32 < merges[best] >> 32) best = i;
        if (merges[best] == UINT64_MAX) break;
        ids[best] = (int32_t)(merges[best] & 0xFFFFFFFFu);
        n--;
        memmove(ids + best + 1, ids + best + 2, (n - best - 1) * sizeof *ids);
        if (best + 1 < n) {
            memmove(merges + best + 1, merges + best + 2, (n - best - 2) * sizeof *merges);
            merges[best] = llm_merge(t, ids[best], ids[best + 1]);
        }
        if (best) merges[best - 1] = llm_merge(t, ids[best - 1], ids[best]);
    }
    t->symbols.count = n;
}

/* Pushes rank << 32 | position of a pair of symbols onto the min-heap t->heap. merge: what
 * llm_merge returned for the pair; UINT64_MAX: nothing is pushed. */
static int llm_heap_push(llm_tokenizer *t, uint64_t merge, size_t position) {
    const uint64_t key = (merge & UINT64_C(0xFFFFFFFF00000000)) | position;
    size_t at = t->heap_count;
    if (merge == UINT64_MAX) return 1;
    t->heap = (uint64_t *)llm_grow(t, t->heap, &t->heap_room, at + 1, sizeof *t->heap);
    if (at == t->heap_room) return 0;
    t->heap_count++;
    for (; at && t->heap[(at - 1) / 2] > key; at = (at - 1) / 2)
        t->heap[at] = t->heap[(at - 1) / 2];
    t->heap[at] = key;
    return 1;
}

static uint64_t llm_heap_pop(llm_tokenizer *t) {
    const uint64_t top = t->heap[0], key = t->heap[--t->heap_count];
    const size_t n = t->heap_count;
    size_t at = 0, child;
    for (; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && t->heap[child + 1] < t->heap[child]) child++;
        if (t->heap[child] >= key) break;
        t->heap[at] = t->heap[child];
    }
    t->heap[at] = key;
    return top;
}

/* BPE of a long word, in O(n log n): symbols are a linked list, and pairs that have a merge are in
 * a heap. A pair that has changed since it was pushed is skipped when it is popped. */
static int llm_merge_many(llm_tokenizer *t) {
    const size_t n = t->symbols.count;
    int32_t *ids = t->symbols.at, *next, *before;
    size_t i, kept = 0;
    t->heap_count = 0;
    t->next.count = 0;
    if (n > INT32_MAX) return llm_fail(t, "a word of %zu characters is too long", n);
    if (!llm_ids_room(t, &t->next, 2 * n)) return 0;
    next = t->next.at;
    before = next + n;
    for (i = 0; i < n; i++) {
        next[i] = i + 1 < n ? (int32_t)i + 1 : LLM_NONE;
        before[i] = (int32_t)i - 1;
        if (i + 1 < n && !llm_heap_push(t, llm_merge(t, ids[i], ids[i + 1]), i)) return 0;
    }
    while (t->heap_count) {
        const uint64_t top = llm_heap_pop(t);
        const size_t at = (size_t)(top & 0xFFFFFFFFu);
        const int32_t right = ids[at] == LLM_NONE ? LLM_NONE : next[at];
        uint64_t merge;
        if (right == LLM_NONE) continue;
        merge = llm_merge(t, ids[at], ids[right]);
        if (merge == UINT64_MAX || merge >> 32 != top >> 32) continue;
        ids[at] = (int32_t)(merge & 0xFFFFFFFFu);
        ids[right] = LLM_NONE;
        next[at] = next[right];
        if (next[at] != LLM_NONE) {
            before[next[at]] = (int32_t)at;
            if (!llm_heap_push(t, llm_merge(t, ids[at], ids[next[at]]), at)) return 0;
        }
        if (before[at] != LLM_NONE) {
            const size_t left = (size_t)before[at];
            if (!llm_heap_push(t, llm_merge(t, ids[left], ids[at]), left)) return 0;
        }
    }
    for (i = 0; i < n; i++)
        if (ids[i] != LLM_NONE) ids[kept++] = ids[i];
    t->symbols.count = kept;
    return 1;
}

static int llm_bpe(llm_tokenizer *t, const char *s, size_t n, llm_ids *ids) {
    uint64_t merges[64];
    if (t->ignore_merges) {
        const int32_t whole = llm_lookup(t, s, n);
        if (whole != LLM_NONE) return llm_put_id(t, ids, whole);
    }
    if (!llm_symbols(t, s, n)) return 0;
    if (t->symbols.count <= 64)
        llm_merge_few(t, merges);
    else if (!llm_merge_many(t))
        return 0;
    return llm_put_ids(t, ids, t->symbols.at, t->symbols.count);
}

/* == WordPiece and Unigram ================================================= */

/* WordPiece: takes the longest token that the rest of the word begins with, until nothing is left.
 * If no token fits, or the word is too long, the whole word becomes the unknown token. */
static int llm_word_piece(llm_tokenizer *t, const char *s, size_t n, llm_ids *ids) {
    const size_t first = ids->count, prefix = t->continuing.length;
    size_t at, end, size, chars = 0;
    int32_t id;
    for (at = 0; at < n; at += size, chars++) (void)llm_point(s + at, &size);
    for (at = 0; at < n && chars <= t->max_chars; at = end) {
        const size_t skip = at ? prefix : 0;
        end = n - at + skip > t->max_length ? at + t->max_length - skip : n;
        if (t->max_length <= skip) end = at;
        while (end > at && end < n && ((unsigned char)s[end] & 0xC0) == 0x80) end--;
        t->piece.length = 0;
        if (skip && !llm_put(t, &t->piece, t->continuing.at, skip)) return 0;
        if (!llm_put(t, &t->piece, s + at, end - at)) return 0;
        for (id = LLM_NONE; end > at; end -= size) {
            id = llm_lookup(t, t->piece.at, end - at + skip);
            if (id != LLM_NONE) break;
            (void)llm_point_before(s, end, &size);
        }
        if (id == LLM_NONE) break;
        if (!llm_put_id(t, ids, id)) return 0;
    }
    if (at == n && chars <= t->max_chars) return 1;
    ids->count = first;
    return llm_put_id(t, ids, t->unk);
}

static int llm_unigram_room(llm_tokenizer *t, size_t n) {
    size_t i;
    t->best = (double *)llm_grow(t, t->best, &t->best_room, n + 1, sizeof *t->best);
    t->path.at = (llm_span *)llm_grow(t, t->path.at, &t->path.room, n + 1, sizeof *t->path.at);
    if (t->best_room <= n || t->path.room <= n) return 0;
    for (i = 0; i <= n; i++) t->path.at[i].begin = SIZE_MAX;
    t->best[0] = 0;
    return 1;
}

/* Records the token `id`, bytes [from, to), as the last one of the best segmentation up to `to`, if
 * that makes the sum of scores higher. */
static void llm_unigram_step(llm_tokenizer *t, size_t from, size_t to, int32_t id, double score) {
    const double sum = score + t->best[from];
    if (t->path.at[to].begin != SIZE_MAX && !(sum > t->best[to])) return;
    t->best[to] = sum;
    t->path.at[to].begin = from;
    t->path.at[to].end = (size_t)id;
}

/* Appends the ids of a run of unknown characters: the token with exactly this text, the tokens of
 * its bytes, or the unknown token. */
static int llm_unigram_unknown(llm_tokenizer *t, const char *s, size_t n, llm_ids *ids) {
    const int32_t id = llm_lookup(t, s, n);
    size_t i;
    if (id != LLM_NONE) return llm_put_id(t, ids, id);
    if (t->byte_fallback) {
        for (i = 0; i < n && t->byte_ids[(unsigned char)s[i]] != LLM_NONE;) i++;
        if (i == n) {
            for (i = 0; i < n; i++)
                if (!llm_put_id(t, ids, t->byte_ids[(unsigned char)s[i]])) return 0;
            return 1;
        }
    }
    return llm_put_id(t, ids, t->unk);
}

/* Unigram: appends the ids of the segmentation with the highest sum of scores, by Viterbi's
 * algorithm. */
static int llm_unigram(llm_tokenizer *t, const char *s, size_t n, llm_ids *ids) {
    size_t at, size, end, begin;
    if (!llm_unigram_room(t, n)) return 0;
    for (at = 0; at < n; at += size) {
        uint64_t node = 0;
        int single = 0;
        (void)llm_point(s + at, &size);
        for (end = at; end < n;) {
            const uint64_t *found = llm_map_find(&t->trie, (node << 8 | (unsigned char)s[end]) + 1);
            if (!found) break;
            node = *found;
            end++;
            if (t->trie_ids.at[node] == LLM_NONE) continue;
            llm_unigram_step(t, at, end, t->trie_ids.at[node], t->scores[t->trie_ids.at[node]]);
            if (end - at == size) single = 1;
        }
        if (single) continue;
        if (t->unk == LLM_NONE)
            return llm_fail(t, "the text has a character that is no token, and there is no unk_id");
        llm_unigram_step(t, at, at + size, t->unk, t->unk_score);
    }
    /* Follows the best path back from its end, and joins consecutive unknown tokens: from here on
     * best[begin] says where the token that begins there ends. */
    for (end = n; end; end = begin) {
        begin = t->path.at[end].begin;
        if ((int32_t)t->path.at[end].end == t->unk)
            while (begin && (int32_t)t->path.at[begin].end == t->unk)
                begin = t->path.at[begin].begin;
        t->best[begin] = (double)end;
    }
    for (begin = 0; begin < n; begin = end) {
        end = (size_t)t->best[begin];
        if ((int32_t)t->path.at[end].end == t->unk
                ? !llm_unigram_unknown(t, s + begin, end - begin, ids)
                : !llm_put_id(t, ids, (int32_t)t->path.at[end].end))
            return 0;
    }
    return 1;
}

/* == words ================================================================= */

/* Returns GPT-2's character for a byte: a printable byte stands for itself, the others become
 * U+0100, U+0101, ... */
static uint32_t llm_byte_char(unsigned char b) {
    if ((b >= '!' && b <= '~') || (b >= 0xA1 && b != 0xAD)) return b;
    return b <= ' ' ? 0x100u + b : b == 0xAD ? 0x143u : 0x121u + b - 0x7Fu;
}

/* Returns the byte that a character stands for, see llm_byte_char; -1: none. */
static int llm_char_byte(uint32_t c) {
    if (c < 0x100) return llm_byte_char((unsigned char)c) == c ? (int)c : -1;
    if (c <= 0x120) return (int)c - 0x100;
    return c <= 0x142 ? (int)(c - 0x121u + 0x7Fu) : c == 0x143 ? 0xAD : -1;
}

static int llm_put_byte_chars(llm_tokenizer *t, llm_text *out, const char *s, size_t n) {
    size_t i;
    if (!llm_room(t, out, 2 * n)) return 0;
    for (i = 0; i < n; i++) {
        const uint32_t c = llm_byte_char((unsigned char)s[i]);
        if (c >= 0x80) out->at[out->length++] = (char)(0xC0 | c >> 6);
        out->at[out->length++] = (char)(c < 0x80 ? c : 0x80 | (c & 0x3F));
    }
    return 1;
}

static int llm_word_new(llm_tokenizer *t, const char *s, size_t n, llm_ids *ids) {
    if (t->byte_level) {
        t->mapped.length = 0;
        if (!llm_put_byte_chars(t, &t->mapped, s, n)) return 0;
        s = t->mapped.at;
        n = t->mapped.length;
    }
    if (t->model == LLM_BPE) return llm_bpe(t, s, n, ids);
    return t->model == LLM_UNIGRAM ? llm_unigram(t, s, n, ids) : llm_word_piece(t, s, n, ids);
}

static int llm_cache_grow(llm_tokenizer *t) {
    const size_t size = t->cache_size ? 2 * t->cache_size : 4096;
    llm_cached *bigger;
    size_t i, at;
    /* A full cache is emptied in place of growing: few texts have so many different words. */
    if (t->cache_count >= LLM_CACHE_WORDS) {
        memset(t->cache, 0, t->cache_size * sizeof *t->cache);
        t->cache_count = t->cache_text.length = t->cache_ids.count = 0;
        return 1;
    }
    bigger = (llm_cached *)calloc(size, sizeof *bigger);
    if (!bigger) return llm_fail(t, "there is no memory for the words of a text");
    for (i = 0; i < t->cache_size; i++) {
        const llm_cached *c = &t->cache[i];
        if (!c->length) continue;
        at = (size_t)(c->length > 16 ? c->ends.last : llm_hash_ends(c->ends, c->length)) &
             (size - 1);
        while (bigger[at].length) at = (at + 1) & (size - 1);
        bigger[at] = *c;
    }
    free(t->cache);
    t->cache = bigger;
    t->cache_size = size;
    return 1;
}

/* Stores a new word in an empty slot of the cache; its ids are ids->at[first] and all after it. */
static int llm_cache_put(llm_tokenizer *t, llm_cached *slot, llm_ends ends, const char *s, size_t n,
                         const llm_ids *ids, size_t first) {
    const size_t count = ids->count - first;
    if (count > UINT16_MAX || t->cache_ids.count > UINT32_MAX - count) return 1;
    slot->ids = count == 1 ? (uint32_t)ids->at[first] : (uint32_t)t->cache_ids.count;
    if (count > 1 && !llm_put_ids(t, &t->cache_ids, ids->at + first, count)) return 0;
    if (n > 16) {
        ends.first = t->cache_text.length;
        if (!llm_put(t, &t->cache_text, s, n)) return 0;
    }
    slot->ends = ends;
    slot->count = (uint16_t)count;
    slot->length = (uint16_t)n;
    t->cache_count++;
    return 1;
}

/* Appends the ids of a word, from the cache if it has the word. */
static int llm_word(llm_tokenizer *t, const char *s, size_t n, llm_ids *ids) {
    llm_ends ends;
    size_t at, first;
    uint64_t hash;
    llm_cached *slot;
    if (!n) return 1;
    if (n > LLM_CACHED) return llm_word_new(t, s, n, ids);
    ends = llm_ends_of(s, n);
    hash = n > 16 ? llm_hash(s, n) : llm_hash_ends(ends, n);
    if (n > 16) ends.last = hash;
    if (2 * (t->cache_count + 1) > t->cache_size && !llm_cache_grow(t)) return 0;
    for (at = (size_t)hash & (t->cache_size - 1);; at = (at + 1) & (t->cache_size - 1)) {
        slot = &t->cache[at];
        if (!slot->length) break;
        if (slot->ends.last != ends.last || slot->length != n) continue;
        if (n <= 16 ? slot->ends.first != ends.first
                    : memcmp(t->cache_text.at + slot->ends.first, s, n) != 0)
            continue;
        if (slot->count == 1) return llm_put_id(t, ids, (int32_t)slot->ids);
        return !slot->count || llm_put_ids(t, ids, t->cache_ids.at + slot->ids, slot->count);
    }
    first = ids->count;
    return llm_word_new(t, s, n, ids) && llm_cache_put(t, slot, ends, s, n, ids, first);
}

/* Appends the ids of a text that is not split any further. If no merge contains a U+2581 after
 * another character, the text can be cut before each U+2581 that follows another character: the ids
 * are the same, and the cache may have the parts. */
static int llm_words(llm_tokenizer *t, const char *s, size_t n, llm_ids *ids) {
    size_t begin = 0, at = 0;
    if (!t->cut_at_spaces) return llm_word(t, s, n, ids);
    while (at < n) {
        const char *p = (const char *)memchr(s + at, 0xE2, n - at);
        at = p ? (size_t)(p - s) : n;
        if (at + 2 >= n) break;
        if (memcmp(s + at, "\xE2\x96\x81", 3) != 0) {
            at++;
            continue;
        }
        if (at > begin && (at < begin + 3 || memcmp(s + at - 3, "\xE2\x96\x81", 3) != 0)) {
            if (!llm_word(t, s + begin, at - begin, ids)) return 0;
            begin = at;
        }
        at += 3;
    }
    return llm_word(t, s + begin, n - begin, ids);
}

/* == normalizers =========================================================== */

static int llm_is_chinese(uint32_t c) {
    return (c >= 0x4E00 && c <= 0x9FFF) || (c >= 0x3400 && c <= 0x4DBF) ||
           (c >= 0x20000 && c <= 0x2A6DF) || (c >= 0x2A700 && c <= 0x2B73F) ||
           (c >= 0x2B740 && c <= 0x2B81F) || (c >= 0x2B920 && c <= 0x2CEAF) ||
           (c >= 0xF900 && c <= 0xFAFF) || (c >= 0x2F800 && c <= 0x2FA1F);
}

static int llm_bert_clean(llm_tokenizer *t, const llm_step *step, const char *s, size_t n,
                          llm_text *out) {
    size_t at, size;
    for (at = 0; at < n; at += size) {
        uint32_t c = llm_point(s + at, &size);
        if (step->clean) {
            if (t->flags[c] & LLM_OTHER) continue;
            if (t->flags[c] & LLM_SPACE) c = ' ';
        }
        if (step->chinese && llm_is_chinese(c)) {
            if (!llm_puts(t, out, " ") || !llm_put(t, out, s + at, size)) return 0;
            c = ' ';
        }
        if (!llm_put_utf8(t, out, c)) return 0;
    }
    return 1;
}

/* Appends to `out` the characters of s that have none of the properties `flags` (LLM_WORD ...). */
static int llm_without(llm_tokenizer *t, const char *s, size_t n, unsigned flags, llm_text *out) {
    size_t at, size;
    for (at = 0; at < n; at += size)
        if (!(t->flags[llm_point(s + at, &size)] & flags) && !llm_put(t, out, s + at, size))
            return 0;
    return 1;
}

static int llm_lowercase(llm_tokenizer *t, const char *s, size_t n, llm_text *out) {
    size_t at, size;
    for (at = 0; at < n; at += size) {
        const uint32_t c = llm_point(s + at, &size);
        if (c == 0x130 ? !llm_puts(t, out, "i\xCC\x87") : !llm_put_utf8(t, out, llm_lower(c)))
            return 0;
    }
    return 1;
}

static int llm_bert(llm_tokenizer *t, const llm_step *step, const char *s, size_t n,
                    llm_text *out) {
    llm_text other = {NULL, 0, 0}, swap;
    int ok = llm_bert_clean(t, step, s, n, out);
    if (ok && step->accents) {
        ok = llm_canonical(t, llm_bytes(out), out->length, &other, 0);
        out->length = 0;
        ok = ok && llm_without(t, llm_bytes(&other), other.length, LLM_NONSPACING, out);
    }
    if (ok && step->lowercase) {
        other.length = 0;
        ok = llm_lowercase(t, llm_bytes(out), out->length, &other);
        swap = *out;
        *out = other;
        other = swap;
    }
    free(other.at);
    return ok;
}

static int llm_replace(llm_tokenizer *t, const llm_step *step, const char *s, size_t n,
                       llm_text *out) {
    const size_t room = t->most - t->grown;
    size_t at = 0, done = 0;
    llm_span found = {0, 0};
    while (at <= n && llm_find(t, step, s, n, at, &found)) {
        if (!llm_put(t, out, s + done, found.begin - done)) return 0;
        if (!llm_put(t, out, step->content.at, step->content.length)) return 0;
        if (out->length > room) return llm_fits(t, t->grown + out->length);
        at = done = found.end;
        if (found.end == found.begin) at++;
        while (at < n && ((unsigned char)s[at] & 0xC0) == 0x80) at++;
    }
    return !t->error[0] && llm_put(t, out, s + done, n - done);
}

/* -- Precompiled: the charsmap of sentencepiece, as `tokenizers` applies it -- */

/* Returns the replacement of the shortest key that s begins with, and its length in *length; NULL:
 * s begins with no key. The trie is a double array of darts-clone: a unit has its label in bits 0
 * to 7 (bit 31 is set in leaves), in bit 8 whether a leaf follows, and in bits 9 to 30 where its
 * children are. */
static const char *llm_charsmap_find(llm_tokenizer *t, const llm_step *step, const char *s,
                                     size_t n, size_t *length) {
    const llm_text *results = &step->content;
    size_t at = 0, i, begin;
    uint32_t unit = step->units[0];
    for (i = 0;; i++) {
        at ^= (size_t)(unit >> 10) << ((unit & 512) >> 6);
        if (i > 0 && unit >> 8 & 1) break;
        if (i == n || !s[i]) return NULL;
        at ^= (unsigned char)s[i];
        if (at >= step->unit_count) return NULL;
        unit = step->units[at];
        if ((unit & 0x800000FFu) != (unsigned char)s[i]) return NULL;
    }
    begin = at < step->unit_count ? step->units[at] & 0x7FFFFFFFu : SIZE_MAX;
    if (begin >= results->length || ((unsigned char)results->at[begin] & 0xC0) == 0x80) {
        (void)llm_fail(t, "the charsmap of the tokenizer points outside of its results");
        return NULL;
    }
    /* A replacement ends with a zero byte, the last one too: llm_read_charsmap appends one. */
    *length = strlen(results->at + begin);
    return results->at + begin;
}

/* Returns 1 if two adjacent code points of these classes are in the same grapheme cluster: rules
 * GB4 to GB11 of UAX #29 (llm_cluster has GB3). picture: 2 after a pictograph and a joiner;
 * conjunct: 2 after a consonant and a linker. */
static int llm_joins(unsigned last, unsigned next, int picture, int conjunct) {
    if (last == LLM_BREAK_CONTROL || next == LLM_BREAK_CONTROL) return 0;
    if (next >= LLM_BREAK_EXTEND && next <= LLM_BREAK_SPACING) return 1;
    if (last == LLM_BREAK_PREPEND) return 1;
    if (picture == 2 && next == LLM_BREAK_PICTURE) return 1;
    if (conjunct == 2 && next == LLM_BREAK_CONSONANT) return 1;
    if (last == LLM_BREAK_L)
        return next == LLM_BREAK_L || next == LLM_BREAK_V || next == LLM_BREAK_LV ||
               next == LLM_BREAK_LVT;
    if (last == LLM_BREAK_V || last == LLM_BREAK_LV)
        return next == LLM_BREAK_V || next == LLM_BREAK_T;
    return (last == LLM_BREAK_T || last == LLM_BREAK_LVT) && next == LLM_BREAK_T;
}

/* Returns where the grapheme cluster that begins at s + at ends. */
static size_t llm_cluster(const llm_tokenizer *t, const char *s, size_t n, size_t at) {
    size_t size;
    unsigned last = t->breaks[llm_point(s + at, &size)], next;
    int picture = last == LLM_BREAK_PICTURE, conjunct = last == LLM_BREAK_CONSONANT;
    if (s[at] == '\r' && n - at > 1 && s[at + 1] == '\n') return at + 2;
    for (at += size; at < n; at += size, last = next) {
        next = t->breaks[llm_point(s + at, &size)];
        if (!llm_joins(last, next, picture, conjunct)) break;
        if (next == LLM_BREAK_PICTURE)
            picture = 1;
        else if (next == LLM_BREAK_JOINER)
            picture = picture == 1 ? 2 : 0;
        else if (next < LLM_BREAK_EXTEND || next > LLM_BREAK_LINKER || picture == 2)
            picture = 0;
        if (next == LLM_BREAK_CONSONANT)
            conjunct = 1;
        else if (next == LLM_BREAK_LINKER)
            conjunct = conjunct ? 2 : 0;
        else if (next != LLM_BREAK_EXTEND && next != LLM_BREAK_JOINER)
            conjunct = 0;
    }
    return at;
}

/* Appends the replacement of s, if the charsmap has one: *found is then 1, else 0. Returns 0 on
 * error. */
static int llm_put_result(llm_tokenizer *t, const llm_step *step, const char *s, size_t n,
                          llm_text *out, int *found) {
    size_t length;
    const char *result = llm_charsmap_find(t, step, s, n, &length);
    *found = result != NULL;
    return !result || (llm_put(t, out, result, length) && llm_fits(t, t->grown + out->length));
}

/* Applies a charsmap. A grapheme cluster of less than 6 bytes that begins with a key is replaced as
 * a whole; otherwise each of its code points is replaced by itself. */
static int llm_precompiled(llm_tokenizer *t, const llm_step *step, const char *s, size_t n,
                           llm_text *out) {
    size_t at = 0, end, size;
    int found;
    while (at < n) {
        for (end = at; end < n && (unsigned char)s[end] < 0x80; end++)
            if (step->changes[(unsigned char)s[end]]) break;
        /* Of these ASCII characters, which stay as they are, the last one is not copied yet: a
         * combining accent may follow it. */
        if (end > at && end < n && (unsigned char)s[end] >= 0x80) end--;
        if (end > at && !llm_put(t, out, s + at, end - at)) return 0;
        at = end;
        if (at == n) break;
        end = llm_cluster(t, s, n, at);
        found = 0;
        if (end - at < 6 && !llm_put_result(t, step, s + at, end - at, out, &found)) return 0;
        for (; at < end && !found; at += size) {
            (void)llm_point(s + at, &size);
            if (!llm_put_result(t, step, s + at, size, out, &found)) return 0;
            if (!found && !llm_put(t, out, s + at, size)) return 0;
            found = 0;
        }
        if (t->error[0]) return 0;
        at = end;
    }
    return 1;
}

static int llm_normalize_step(llm_tokenizer *t, const llm_step *step, const char *s, size_t n,
                              llm_text *out) {
    size_t size, end = n, at = 0;
    out->length = 0;
    switch (step->kind) {
    case LLM_NFC: return llm_canonical(t, s, n, out, LLM_COMPOSED);
    case LLM_NFD: return llm_canonical(t, s, n, out, 0);
    case LLM_NFKC: return llm_canonical(t, s, n, out, LLM_COMPATIBLE | LLM_COMPOSED);
    case LLM_NFKD: return llm_canonical(t, s, n, out, LLM_COMPATIBLE);
    case LLM_PRECOMPILED: return llm_precompiled(t, step, s, n, out);
    case LLM_LOWERCASE: return llm_lowercase(t, s, n, out);
    case LLM_STRIP_ACCENTS: return llm_without(t, s, n, LLM_MARK, out);
    case LLM_BERT_NORMALIZER: return llm_bert(t, step, s, n, out);
    case LLM_REPLACE: return llm_replace(t, step, s, n, out);
    case LLM_PREPEND:
        if (n && !llm_put(t, out, step->content.at, step->content.length)) return 0;
        return llm_put(t, out, s, n);
    default: break;
    }
    while (step->left && at < n && (t->flags[llm_point(s + at, &size)] & LLM_SPACE)) at += size;
    while (step->right && end > at && (t->flags[llm_point_before(s, end, &size)] & LLM_SPACE))
        end -= size;
    return llm_put(t, out, s + at, end - at);
}

/* Normalizes *s, *n bytes, and sets both to the result, which is in one of the two buffers, or *s
 * itself if there are no normalizers. */
static int llm_normalize(llm_tokenizer *t, const char **s, size_t *n) {
    size_t i, which = 0, largest = 0;
    for (i = 0; i < t->normalizers.count; i++, which = !which) {
        llm_text *out = &t->buffers[which];
        if (!llm_normalize_step(t, &t->normalizers.at[i], *s, *n, out) ||
            !llm_fits(t, t->grown + out->length))
            return 0;
        *s = llm_bytes(out);
        *n = out->length;
        if (*n > largest) largest = *n;
    }
    t->grown += largest;
    return 1;
}

/* == pre-tokenizers ======================================================== */

/* State of a split, which turns matches and the text between them into pieces, as its behavior
 * says. */
typedef struct llm_fold {
    llm_behavior behavior;
    llm_spans *out;
    int matched, any; /* matched: the last part was a match; any: there was a part */
    llm_span waits;   /* LLM_MERGED_WITH_NEXT: the last match, which joins the text after it */
} llm_fold;

/* Adds the bytes [begin, end), a match (`match` is 1) or the text between matches (0), to the
 * pieces, as the behavior says. */
static int llm_fold_put(llm_tokenizer *t, llm_fold *f, size_t begin, size_t end, int match) {
    const int join = f->behavior == LLM_CONTIGUOUS ? f->any && match == f->matched
                                                   : f->behavior == LLM_MERGED_WITH_PREVIOUS &&
                                                         match && f->any && !f->matched;
    int ok = 1;
    if (begin == end) return 1;
    if (f->behavior == LLM_MERGED_WITH_NEXT) {
        if (f->matched && !match) begin = f->waits.begin;
        if (f->matched && match) ok = llm_put_span(t, f->out, f->waits.begin, f->waits.end);
        f->waits.begin = begin;
        f->waits.end = end;
        if (!match) ok = llm_put_span(t, f->out, begin, end);
    } else if (join) {
        f->out->at[f->out->count - 1].end = end;
    } else if (!match || f->behavior != LLM_REMOVED) {
        ok = llm_put_span(t, f->out, begin, end);
    }
    f->matched = match;
    f->any = 1;
    return ok;
}

/* Finds the next match of a splitting step at or after byte `from`. Returns 0 if there is none, or
 * after an error. */
static int llm_next(llm_tokenizer *t, const llm_step *step, const char *s, size_t n, size_t from,
                    llm_span *found) {
    const unsigned flag = step->kind == LLM_DIGITS             ? LLM_NUMERIC
                          : step->kind == LLM_WHITESPACE_SPLIT ? LLM_SPACE
                                                               : LLM_PUNCTUATION;
    size_t size;
    if (step->kind == LLM_SPLIT || step->kind == LLM_BYTE_LEVEL || step->kind == LLM_METASPACE)
        return llm_find(t, step, s, n, from, found);
    for (; from < n; from += size)
        if (t->flags[llm_point(s + from, &size)] & flag) {
            found->begin = from;
            found->end = from + size;
            return 1;
        }
    return 0;
}

static int llm_split(llm_tokenizer *t, const llm_step *step, const char *s, llm_span piece,
                     llm_spans *out) {
    const size_t n = piece.end - piece.begin, base = piece.begin;
    size_t at = 0, done = 0;
    llm_span found;
    llm_fold f;
    memset(&f, 0, sizeof f);
    f.behavior = step->behavior;
    f.out = out;
    while (at < n && llm_next(t, step, s + base, n, at, &found)) {
        if (done < found.begin &&
            !llm_fold_put(t, &f, base + done, base + found.begin, step->invert))
            return 0;
        if (!llm_fold_put(t, &f, base + found.begin, base + found.end, !step->invert)) return 0;
        at = done = found.end;
        if (found.begin == found.end) {
            at++;
            while (at < n && ((unsigned char)s[base + at] & 0xC0) == 0x80) at++;
        }
    }
    if (t->error[0]) return 0;
    if (done < n && !llm_fold_put(t, &f, base + done, base + n, step->invert)) return 0;
    if (f.behavior == LLM_MERGED_WITH_NEXT && f.matched)
        return llm_put_span(t, out, f.waits.begin, f.waits.end);
    return 1;
}

/* Does the pre-tokenizer Whitespace: splits a piece at the matches of \w+|[^\w\s]+. */
static int llm_split_words(llm_tokenizer *t, const char *s, llm_span piece, llm_spans *out) {
    size_t at = piece.begin, begin, size;
    while (at < piece.end) {
        const unsigned kind = t->flags[llm_point(s + at, &size)] & (LLM_WORD | LLM_SPACE);
        begin = at;
        for (at += size; at < piece.end; at += size)
            if ((t->flags[llm_point(s + at, &size)] & (LLM_WORD | LLM_SPACE)) != kind) break;
        if (!(kind & LLM_SPACE) && !llm_put_span(t, out, begin, at)) return 0;
    }
    return 1;
}

/* Appends a piece as a pre-tokenizer step rewrites it: LLM_BYTE_CHARS replaces its bytes by
 * characters; ByteLevel adds a space before it; Metaspace adds its character before it, and puts it
 * in place of spaces. first: 1: it is the first piece of the text. */
static int llm_rewrite(llm_tokenizer *t, const llm_step *step, const char *s, size_t n, int first,
                       llm_text *text) {
    const llm_text *space = &step->pattern;
    size_t i;
    if (step->kind == LLM_BYTE_CHARS) return llm_put_byte_chars(t, text, s, n);
    if (step->kind == LLM_BYTE_LEVEL)
        return (s[0] == ' ' || llm_puts(t, text, " ")) && llm_put(t, text, s, n);
    if ((step->scheme == LLM_ALWAYS || (step->scheme == LLM_FIRST && first)) && s[0] != ' ' &&
        (n < space->length || memcmp(s, space->at, space->length) != 0) &&
        !llm_put(t, text, space->at, space->length))
        return 0;
    for (i = 0; i < n; i++)
        if (s[i] == ' ' ? !llm_put(t, text, space->at, space->length) : !llm_put(t, text, s + i, 1))
            return 0;
    return 1;
}

/* Applies a pre-tokenizer step to all pieces `in` of the text *s: `out` gets the new pieces, and *s
 * the new text, if the step rewrites it. first: 1: *s begins where the whole text does. */
static int llm_pre_step(llm_tokenizer *t, const llm_step *step, const char **s, int first,
                        const llm_spans *in, llm_spans *out) {
    llm_text *text = &t->pieces[*s == t->pieces[0].at];
    llm_span piece;
    size_t i;
    out->count = text->length = 0;
    for (i = 0; i < in->count; i++) {
        piece = in->at[i];
        if (step->kind == LLM_WHITESPACE) {
            if (!llm_split_words(t, *s, piece, out)) return 0;
            continue;
        }
        if (step->rewrites) {
            const char *from = *s + piece.begin;
            const size_t n = piece.end - piece.begin;
            piece.begin = text->length;
            if (!llm_rewrite(t, step, from, n, first && !i, text) ||
                !llm_fits(t, text->length))
                return 0;
            piece.end = text->length;
        }
        if (step->split ? !llm_split(t, step, step->rewrites ? text->at : *s, piece, out)
                        : !llm_put_span(t, out, piece.begin, piece.end))
            return 0;
    }
    if (step->rewrites && text->at) *s = text->at;
    return 1;
}

/* Does the last pre-tokenizer step and the model together, if the step splits by a regular
 * expression with the behavior Isolated: appends the ids of each match, and of the text between
 * matches. */
static int llm_isolate(llm_tokenizer *t, const llm_step *step, const char *s, size_t n) {
    size_t done = 0, at = 0;
    llm_span found;
    while (at < n && llm_find(t, step, s, n, at, &found)) {
        if (done < found.begin && !llm_words(t, s + done, found.begin - done, &t->ids)) return 0;
        if (!llm_words(t, s + found.begin, found.end - found.begin, &t->ids)) return 0;
        at = done = found.end;
        if (found.begin == found.end) {
            at++;
            while (at < n && ((unsigned char)s[at] & 0xC0) == 0x80) at++;
        }
    }
    return !t->error[0] && (done == n || llm_words(t, s + done, n - done, &t->ids));
}

/* Splits normalized text without added tokens into words, and appends their ids. first: 1: it
 * begins where the whole text does. */
static int llm_pre_tokenize(llm_tokenizer *t, const char *s, size_t n, int first) {
    const llm_step *last;
    size_t i, which = 0, fused;
    t->spans[0].count = 0;
    if (!n) return 1;
    if (!t->pre_tokenizers.count) return llm_words(t, s, n, &t->ids);
    if (!llm_put_span(t, &t->spans[0], 0, n)) return 0;
    last = &t->pre_tokenizers.at[t->pre_tokenizers.count - 1];
    fused = last->code && last->split && last->behavior == LLM_ISOLATED && !last->rewrites;
    for (i = 0; i + fused < t->pre_tokenizers.count; i++, which = !which)
        if (!llm_pre_step(t, &t->pre_tokenizers.at[i], &s, first, &t->spans[which],
                          &t->spans[!which]))
            return 0;
    for (i = 0; i < t->spans[which].count; i++) {
        const llm_span piece = t->spans[which].at[i];
        if (fused ? !llm_isolate(t, last, s + piece.begin, piece.end - piece.begin)
                  : !llm_words(t, s + piece.begin, piece.end - piece.begin, &t->ids))
            return 0;
    }
    return 1;
}

/* == added tokens ========================================================== */

static const llm_text *llm_added_text(const llm_added *added) {
    return added->normalized ? &added->normal : &added->content;
}

/* Narrows order[*low, *high), tokens whose first `at` bytes are the same, to those whose next byte
 * is c. A token that ends after these `at` bytes comes first in the order. */
static void llm_finder_narrow(const llm_tokenizer *t, const llm_finder *f, size_t at,
                              unsigned char c, size_t *low, size_t *high) {
    size_t begin = *low, end = *high, side;
    for (side = 0; side < 2; side++) { /* side 0: find the new *low; side 1: the new *high */
        size_t from = side ? *low : begin, to = end;
        while (from < to) {
            const size_t middle = from + (to - from) / 2;
            const llm_text *text = llm_added_text(&t->added[f->order[middle]]);
            if (text->length <= at || (unsigned char)text->at[at] < c + side) from = middle + 1;
            else to = middle;
        }
        if (side) *high = from;
        else *low = from;
    }
}

/* Returns the longest added token at the first position from `from` on where there is one, and
 * where it is in *found; NULL: there is none. */
static const llm_added *llm_added_find(const llm_tokenizer *t, const llm_finder *f, const char *s,
                                       size_t n, size_t from, llm_span *found) {
    if (!f->count) return NULL;
    for (; from < n; from++) {
        const unsigned char c = (unsigned char)s[from];
        const llm_added *longest = NULL;
        size_t low, high, at;
        if (f->only >= 0 && c != f->only) {
            const char *p = (const char *)memchr(s + from, f->only, n - from);
            if (!p) return NULL;
            from = (size_t)(p - s) - 1;
            continue;
        }
        low = f->begin[c];
        high = f->begin[c + 1];
        for (at = 1; low < high; at++) {
            const llm_added *added = &t->added[f->order[low]];
            if (llm_added_text(added)->length == at) longest = added;
            if (from + at == n) break;
            llm_finder_narrow(t, f, at, (unsigned char)s[from + at], &low, &high);
        }
        if (!longest) continue;
        found->begin = from;
        found->end = from + llm_added_text(longest)->length;
        return longest;
    }
    return NULL;
}

/* Returns 0 if the added token at *found is part of a longer word, which single_word forbids, else
 * 1. Widens *found over the white space that the token takes in (lstrip, rstrip), but not beyond
 * byte `done`, the end of the token before it. */
static int llm_added_fits(const llm_tokenizer *t, const llm_added *added, const char *s, size_t n,
                          size_t done, llm_span *found) {
    size_t size;
    if (added->single_word &&
        ((found->begin && (t->flags[llm_point_before(s, found->begin, &size)] & LLM_WORD)) ||
         (found->end < n && (t->flags[llm_point(s + found->end, &size)] & LLM_WORD))))
        return 0;
    while (added->lstrip && found->begin > done &&
           (t->flags[llm_point_before(s, found->begin, &size)] & LLM_SPACE))
        found->begin -= size;
    while (added->rstrip && found->end < n &&
           (t->flags[llm_point(s + found->end, &size)] & LLM_SPACE))
        found->end += size;
    return 1;
}

/* Appends the ids of normalized text: of the added tokens in it whose setting "normalized" is true,
 * and of the text between them. first: 1: s begins where the whole text does. */
static int llm_normalized(llm_tokenizer *t, const char *s, size_t n, int first) {
    size_t at = 0, done = 0;
    const llm_added *added;
    llm_span found;
    while ((added = llm_added_find(t, &t->normalized, s, n, at, &found)) != NULL) {
        at = found.end;
        if (!llm_added_fits(t, added, s, n, done, &found)) continue;
        if (done < found.begin &&
            !llm_pre_tokenize(t, s + done, found.begin - done, first && !done))
            return 0;
        if (!llm_put_id(t, &t->ids, added->id)) return 0;
        done = found.end;
    }
    return done == n || llm_pre_tokenize(t, s + done, n - done, first && !done);
}

/* Normalizes a section of the text, which lies between added tokens whose setting "normalized" is
 * false, and appends its ids. first: 1: s begins where the whole text does. */
static int llm_section(llm_tokenizer *t, const char *s, size_t n, int first) {
    int ok;
    if (!n) return 1;
    if (!llm_normalize(t, &s, &n)) return 0;
    t->plain = llm_is_plain(s, n);
    ok = llm_normalized(t, s, n, first);
    t->plain = 0;
    return ok;
}

static int llm_encode(llm_tokenizer *t, const char *s, size_t n) {
    size_t at = 0, done = 0;
    const llm_added *added;
    llm_span found;
    while ((added = llm_added_find(t, &t->raw, s, n, at, &found)) != NULL) {
        at = found.end;
        if (!llm_added_fits(t, added, s, n, done, &found)) continue;
        if (done < found.begin && !llm_section(t, s + done, found.begin - done, !done)) return 0;
        if (!llm_put_id(t, &t->ids, added->id)) return 0;
        done = found.end;
    }
    return done == n || llm_section(t, s + done, n - done, !done);
}

/* Encodes a text. Returns the number of ids, and the ids in *ids, to be passed to free(); -1: an
 * error, see llm_tokenizer_error. Invalid UTF-8 counts as U+FFFD. special: 1 adds the tokens that
 * the file puts before and after a text. */
LLM_TOKENIZER_API int64_t llm_tokenizer_encode(llm_tokenizer *t, const char *text, size_t length,
                                               int special, int32_t **ids) {
    int64_t count;
    int ok = 1;
    t->error[0] = 0;
    t->ids.count = t->clean.length = 0;
    llm_begin_text(t, length);
    *ids = NULL;
    if (llm_valid_prefix(text, length) < length) {
        ok = llm_put_lossy(t, &t->clean, text, length);
        text = t->clean.at;
        length = t->clean.length;
    }
    if (special) ok = ok && llm_put_ids(t, &t->ids, t->before.at, t->before.count);
    ok = ok && llm_encode(t, text, length);
    if (special) ok = ok && llm_put_ids(t, &t->ids, t->after.at, t->after.count);
    if (!ok || t->error[0] || !llm_ids_room(t, &t->ids, 1)) return -1;
    count = (int64_t)t->ids.count;
    *ids = t->ids.at;
    t->ids.at = NULL;
    t->ids.room = 0;
    return count;
}

/* == from ids to text ====================================================== */

static const char *llm_token_text(const llm_tokenizer *t, int32_t id, size_t *n) {
    const llm_token *token;
    if (id < 0 || id >= t->size) return NULL;
    token = &t->tokens[id];
    if (token->added) {
        const llm_text *text = llm_added_text(&t->added[token->added - 1]);
        *n = text->length;
        return text->at;
    }
    *n = token->length;
    return token->length == UINT32_MAX ? NULL : t->texts.at + token->offset;
}

/* Appends the bytes that a token's characters stand for, see llm_char_byte; the token as it is if
 * one of its characters stands for none. */
static int llm_put_bytes(llm_tokenizer *t, llm_text *out, const char *s, size_t n) {
    const size_t begin = out->length;
    size_t at, size;
    for (at = 0; at < n; at += size) {
        const int byte = llm_char_byte(llm_point(s + at, &size));
        const char c = (char)byte;
        if (byte < 0) {
            out->length = begin;
            return llm_put(t, out, s, n);
        }
        if (!llm_put(t, out, &c, 1)) return 0;
    }
    return 1;
}

/* Returns the byte of a token such as "<0xAB>"; -1: it is not of this form. */
static int llm_byte_token(const char *s, size_t n) {
    char *end, digits[3];
    if (n != 6 || memcmp(s, "<0x", 3) != 0 || s[5] != '>' || s[3] == '-' || s[3] == '+' ||
        s[3] == ' ' || (unsigned char)(s[3] - 9) < 5)
        return -1;
    memcpy(digits, s + 3, 2);
    digits[2] = 0;
    n = strtoul(digits, &end, 16);
    return end == digits + 2 ? (int)n : -1;
}

/* Appends the bytes of the tokens first to last - 1, all of the form <0x..>; if together they are
 * not UTF-8, U+FFFD for each. */
static int llm_put_fallback(llm_tokenizer *t, const char *s, const llm_spans *in, size_t first,
                            size_t last, llm_text *text, llm_spans *out) {
    const size_t begin = text->length;
    size_t i;
    for (i = first; i < last; i++) {
        const char c = (char)llm_byte_token(s + in->at[i].begin, 6);
        if (!llm_put(t, text, &c, 1)) return 0;
    }
    if (llm_valid_prefix(text->at + begin, last - first) == last - first)
        return llm_put_span(t, out, begin, text->length);
    text->length = begin;
    for (i = first; i < last; i++) {
        if (!llm_put(t, text, "\xEF\xBF\xBD", 3)) return 0;
        if (!llm_put_span(t, out, text->length - 3, text->length)) return 0;
    }
    return 1;
}

/* Replaces `from` by `to` in the text from byte `begin` on, in place: `to` is not longer. */
static void llm_shorten(llm_text *text, size_t begin, const char *from, const char *to) {
    const size_t m = strlen(from), k = strlen(to);
    size_t at = begin, put = begin;
    while (at < text->length) {
        if (text->length - at >= m && memcmp(text->at + at, from, m) == 0) {
            memcpy(text->at + put, to, k);
            at += m;
            put += k;
        } else {
            text->at[put++] = text->at[at++];
        }
    }
    text->length = put;
}

static int llm_decode_wordpiece(llm_tokenizer *t, const llm_step *step, const char *s, size_t n,
                                int first, llm_text *text) {
    static const char *const cleanups[][2] = {
        {" .", "."},   {" ?", "?"},     {" !", "!"},     {" ,", ","},
        {" ' ", "'"},  {" n't", "n't"}, {" 'm", "'m"},   {" do not", " don't"},
        {" 's", "'s"}, {" 've", "'ve"}, {" 're", "'re"},
    };
    const size_t begin = text->length;
    size_t i;
    if (!first) {
        const size_t m = step->pattern.length;
        if (n >= m && memcmp(s, step->pattern.at, m) == 0) {
            s += m;
            n -= m;
        } else if (!llm_puts(t, text, " ")) {
            return 0;
        }
    }
    if (!llm_put(t, text, s, n)) return 0;
    for (i = 0; step->cleanup && i < sizeof cleanups / sizeof cleanups[0]; i++)
        llm_shorten(text, begin, cleanups[i][0], cleanups[i][1]);
    return 1;
}

/* Returns a piece without up to step->left copies of step->pattern at its beginning, and up to
 * step->right at its end. */
static llm_span llm_strip(const llm_step *step, const char *s, llm_span piece) {
    const size_t m = step->pattern.length;
    size_t i;
    for (i = 0; i < step->left && piece.end - piece.begin >= m; i++, piece.begin += m)
        if (memcmp(s + piece.begin, step->pattern.at, m) != 0) break;
    for (i = 0; i < step->right && piece.end - piece.begin >= m; i++, piece.end -= m)
        if (memcmp(s + piece.end - m, step->pattern.at, m) != 0) break;
    return piece;
}

static int llm_decode_token(llm_tokenizer *t, const llm_step *step, const char *s, size_t n,
                            int first, llm_text *text) {
    size_t at, size;
    llm_span piece = {0, 0};
    switch (step->kind) {
    case LLM_BYTE_LEVEL: return llm_put_bytes(t, text, s, n);
    case LLM_WORDPIECE: return llm_decode_wordpiece(t, step, s, n, first, text);
    case LLM_REPLACE: {
        llm_text replaced = {NULL, 0, 0};
        const int ok = llm_replace(t, step, s, n, &replaced) &&
                       llm_put(t, text, replaced.at, replaced.length);
        free(replaced.at);
        return ok;
    }
    case LLM_STRIP:
        piece.end = n;
        piece = llm_strip(step, s, piece);
        return llm_put(t, text, s + piece.begin, piece.end - piece.begin);
    case LLM_METASPACE:
        for (at = 0; at < n; at += size) {
            (void)llm_point(s + at, &size);
            if (size != step->pattern.length || memcmp(s + at, step->pattern.at, size) != 0) {
                if (!llm_put(t, text, s + at, size)) return 0;
            } else if ((!first || step->scheme == LLM_NEVER) && !llm_puts(t, text, " ")) {
                return 0;
            }
        }
        return 1;
    /* LLM_FUSE, and LLM_BYTE_FALLBACK for a token other than <0x..>: the text stays as it is */
    default: return llm_put(t, text, s, n);
    }
}

static int llm_decode_step(llm_tokenizer *t, const llm_step *step, const char *s,
                           const llm_spans *in, llm_text *text, llm_spans *out) {
    const int whole = step->kind == LLM_FUSE || step->kind == LLM_BYTE_LEVEL;
    size_t i, k;
    text->length = out->count = 0;
    for (i = 0; i < in->count; i++) {
        const char *from = s + in->at[i].begin;
        const size_t n = in->at[i].end - in->at[i].begin, begin = text->length;
        if (step->kind == LLM_BYTE_FALLBACK && llm_byte_token(from, n) >= 0) {
            for (k = i + 1; k < in->count; k++)
                if (llm_byte_token(s + in->at[k].begin, in->at[k].end - in->at[k].begin) < 0) break;
            if (!llm_put_fallback(t, s, in, i, k, text, out)) return 0;
            i = k - 1;
            continue;
        }
        if (!llm_decode_token(t, step, from, n, !i, text)) return 0;
        if (!whole && !llm_put_span(t, out, begin, text->length)) return 0;
    }
    /* The bytes of a character may come from several tokens, so invalid UTF-8 is replaced only
     * here, in the text of all tokens. */
    if (step->kind == LLM_BYTE_LEVEL) {
        t->mapped.length = 0;
        if (!llm_put_lossy(t, &t->mapped, text->at, text->length)) return 0;
        text->length = 0;
        if (!llm_put(t, text, t->mapped.at, t->mapped.length)) return 0;
    }
    return !whole || llm_put_span(t, out, 0, text->length);
}

/* Decodes ids into t->pieces[0]. special: 1 keeps special tokens. */
static int llm_decode(llm_tokenizer *t, const int32_t *ids, size_t count, int special) {
    size_t i, n, which = 0;
    const char *s;
    t->pieces[0].length = t->spans[0].count = 0;
    for (i = 0; i < count; i++) {
        const size_t begin = t->pieces[0].length;
        s = llm_token_text(t, ids[i], &n);
        if (!s) continue;
        if (!special && t->tokens[ids[i]].added && t->added[t->tokens[ids[i]].added - 1].special)
            continue;
        if (!t->has_decoder && t->spans[0].count && !llm_puts(t, &t->pieces[0], " ")) return 0;
        if (!llm_put(t, &t->pieces[0], s, n)) return 0;
        if (!llm_put_span(t, &t->spans[0], begin, t->pieces[0].length)) return 0;
    }
    llm_begin_text(t, t->pieces[0].length);
    for (i = 0; i < t->decoders.count; i++, which = !which)
        if (!llm_room(t, &t->pieces[which], 1) ||
            !llm_decode_step(t, &t->decoders.at[i], t->pieces[which].at, &t->spans[which],
                             &t->pieces[!which], &t->spans[!which]) ||
            !llm_fits(t, t->pieces[!which].length))
            return 0;
    if (which) { /* an odd number of decoders: the text is in pieces[1], and is copied to [0] */
        t->pieces[0].length = 0;
        return llm_put(t, &t->pieces[0], t->pieces[1].at, t->pieces[1].length);
    }
    return 1;
}

/* Decodes ids. Returns the text, to be passed to free(), with a zero byte after its *length bytes;
 * NULL: an error, see llm_tokenizer_error. Ids without a token are skipped. special: 1 keeps
 * special tokens. */
LLM_TOKENIZER_API char *llm_tokenizer_decode(llm_tokenizer *t, const int32_t *ids, size_t count,
                                             int special, size_t *length) {
    char *text;
    t->error[0] = 0;
    if (!llm_decode(t, ids, count, special) || !llm_room(t, &t->pieces[0], 1)) return NULL;
    text = t->pieces[0].at;
    *length = t->pieces[0].length;
    text[*length] = 0;
    memset(&t->pieces[0], 0, sizeof t->pieces[0]);
    return text;
}

/* Decodes ids that arrive one by one, and returns whole characters only. Initialize it with zeros
 * and the tokenizer; end it with llm_stream_end. */
typedef struct llm_stream {
    llm_tokenizer *tokenizer;
    int special; /* 1: special tokens are shown */
    llm_ids ids; /* ids whose text was returned last, and all ids after them */
    /* How many of `ids` have been shown, and their text. */
    size_t shown_ids;
    llm_text shown;
} llm_stream;

/* Returns the first position from `at`, the number of bytes shown, on where a character of the text
 * begins. It may be above `at`, as a decoder may change text that was shown, which stays as it was:
 * with ByteFallback, a character becomes U+FFFD if the bytes after it are not UTF-8. */
static size_t llm_boundary(const llm_text *text, size_t at) {
    while (at < text->length && ((unsigned char)text->at[at] & 0xC0) == 0x80) at++;
    return at;
}

/* Adds an id. Returns the text that it adds, *length bytes, valid until the next call; often none,
 * while a character is not complete. NULL: an error. */
LLM_TOKENIZER_API const char *llm_stream_add(llm_stream *stream, int32_t id, size_t *length) {
    llm_tokenizer *t = stream->tokenizer;
    const llm_text *text = &t->pieces[0];
    size_t begin = stream->shown.length;
    t->error[0] = 0;
    *length = 0;
    if (!llm_put_id(t, &stream->ids, id)) return NULL;
    if (!llm_decode(t, stream->ids.at, stream->ids.count, stream->special)) return NULL;
    if (text->length <= begin) return "";
    if (text->length >= 3 && memcmp(text->at + text->length - 3, "\xEF\xBF\xBD", 3) == 0) return "";
    begin = llm_boundary(text, begin);
    *length = text->length - begin;
    /* Keep the ids of the text that is returned now, since the text of the next ids depends on
     * them; forget those before. */
    t->clean.length = 0;
    if (!llm_put(t, &t->clean, text->at + begin, *length)) return NULL;
    stream->ids.count -= stream->shown_ids;
    memmove(stream->ids.at, stream->ids.at + stream->shown_ids,
            stream->ids.count * sizeof *stream->ids.at);
    stream->shown_ids = stream->ids.count;
    if (!llm_decode(t, stream->ids.at, stream->ids.count, stream->special)) return NULL;
    stream->shown.length = 0;
    if (!llm_put(t, &stream->shown, t->pieces[0].at, t->pieces[0].length)) return NULL;
    return t->clean.at;
}

/* Ends the stream and frees its memory. Returns the text that was held back, *length bytes, if
 * any. */
LLM_TOKENIZER_API const char *llm_stream_end(llm_stream *stream, size_t *length) {
    llm_tokenizer *t = stream->tokenizer;
    const int ok = llm_decode(t, stream->ids.at, stream->ids.count, stream->special);
    const size_t begin = llm_boundary(&t->pieces[0], stream->shown.length);
    *length = ok && t->pieces[0].length > begin ? t->pieces[0].length - begin : 0;
    free(stream->ids.at);
    free(stream->shown.at);
    memset(stream, 0, sizeof *stream);
    return *length ? t->pieces[0].at + begin : "";
}

/* Returns the id of the token with this text, an added one or one of the vocabulary; -1: there is
 * no such token. */
LLM_TOKENIZER_API int32_t llm_tokenizer_id(const llm_tokenizer *t, const char *token) {
    const size_t n = strlen(token);
    size_t i;
    for (i = t->added_count; i-- > 0;)
        if (t->added[i].content.length == n && memcmp(t->added[i].content.at, token, n) == 0)
            return t->added[i].id;
    return llm_lookup(t, token, n);
}

/* Returns the largest id + 1: a model's embedding has at least so many rows. */
LLM_TOKENIZER_API int32_t llm_tokenizer_size(const llm_tokenizer *t) {
    return t->size;
}

/* Returns the error of the last call, one sentence; "": there was none. */
LLM_TOKENIZER_API const char *llm_tokenizer_error(const llm_tokenizer *t) {
    return t->error;
}

/* == reading tokenizer.json ================================================ */

static const char *llm_type(const cJSON *o) {
    const char *type = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(o, "type"));
    return type ? type : "without a type";
}

/* Returns 1 if every setting of o is in `keys`, which have a blank before and after each; else 0
 * and an error that names the setting. what: what o is, for the error. */
static int llm_only(llm_tokenizer *t, const cJSON *o, const char *what, const char *keys) {
    const cJSON *item;
    char name[64];
    cJSON_ArrayForEach(item, o) {
        (void)snprintf(name, sizeof name, " %s ", item->string ? item->string : "");
        if (!item->string || strlen(item->string) > 60 || !strstr(keys, name))
            return llm_fail(t, "%s: the setting \"%.60s\" of %s is not known", t->name,
                            item->string ? item->string : "", what);
    }
    return 1;
}

static const cJSON *llm_get(const cJSON *o, const char *key) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(o, key);
    return item && cJSON_IsNull(item) ? NULL : item;
}

static int llm_flag(llm_tokenizer *t, const cJSON *o, const char *key, int absent) {
    const cJSON *item = llm_get(o, key);
    if (item && !cJSON_IsBool(item))
        (void)llm_fail(t, "%s: \"%s\" is not true or false", t->name, key);
    return item ? cJSON_IsTrue(item) : absent;
}

/* Returns the value of `key` in o, a whole number from 0 to `high`; -1 if it is missing, or, with
 * an error, something else. */
static int64_t llm_whole(llm_tokenizer *t, const cJSON *o, const char *key, double high) {
    const cJSON *item = llm_get(o, key);
    if (!item) return -1;
    if (!cJSON_IsNumber(item) || !(item->valuedouble >= 0) || item->valuedouble > high ||
        item->valuedouble != (double)(int64_t)item->valuedouble) {
        (void)llm_fail(t, "%s: \"%s\" is no whole number from 0 to %.0f", t->name, key, high);
        return -1;
    }
    return (int64_t)item->valuedouble;
}

static const char *llm_string(llm_tokenizer *t, const cJSON *o, const char *key) {
    const char *s = cJSON_GetStringValue(llm_get(o, key));
    if (!s) (void)llm_fail(t, "%s: \"%s\" is missing or no string", t->name, key);
    return s;
}

static int llm_set(llm_tokenizer *t, llm_text *text, const char *s) {
    return s && llm_puts(t, text, s);
}

/* Reads the setting "pattern" of o: {"String": "..."} or {"Regex": "..."}. */
static int llm_read_pattern(llm_tokenizer *t, llm_step *step, const cJSON *o) {
    const cJSON *pattern = llm_get(o, "pattern");
    const char *string = cJSON_GetStringValue(llm_get(pattern, "String"));
    const char *regex = cJSON_GetStringValue(llm_get(pattern, "Regex"));
    if (!pattern || !string == !regex)
        return llm_fail(t, "%s: the pattern of %s is neither a String nor a Regex", t->name,
                        llm_type(o));
    return string ? llm_set(t, &step->pattern, string) : llm_compile(t, step, regex, strlen(regex));
}

static int llm_read_behavior(llm_tokenizer *t, llm_step *step, const cJSON *o) {
    static const char *const names[] = {"Removed", "Isolated", "MergedWithPrevious",
                                        "MergedWithNext", "Contiguous"};
    const char *name = llm_string(t, o, "behavior");
    size_t i;
    for (i = 0; name && i < sizeof names / sizeof names[0]; i++)
        if (strcmp(name, names[i]) == 0) {
            step->behavior = (llm_behavior)i;
            return 1;
        }
    return llm_fail(t, "%s: the behavior \"%s\" is not known", t->name, name ? name : "");
}

static int llm_read_scheme(llm_tokenizer *t, llm_step *step, const cJSON *o) {
    const char *scheme = cJSON_GetStringValue(llm_get(o, "prepend_scheme"));
    step->scheme = llm_flag(t, o, "add_prefix_space", 1) ? LLM_ALWAYS : LLM_NEVER;
    if (!scheme) return 1;
    if (strcmp(scheme, "always") == 0)
        step->scheme = LLM_ALWAYS;
    else if (strcmp(scheme, "first") == 0)
        step->scheme = LLM_FIRST;
    else if (strcmp(scheme, "never") == 0)
        step->scheme = LLM_NEVER;
    else
        return llm_fail(t, "%s: the prepend_scheme \"%s\" is not known", t->name, scheme);
    return 1;
}

static llm_step *llm_put_step(llm_tokenizer *t, llm_steps *steps, llm_kind kind) {
    llm_step *step;
    steps->at = (llm_step *)llm_grow(t, steps->at, &steps->room, steps->count + 1,
                                     sizeof *steps->at);
    if (steps->count == steps->room) return NULL;
    step = &steps->at[steps->count++];
    memset(step, 0, sizeof *step);
    step->kind = kind;
    return step;
}

/* A supported type of step: its name in the file (`type`), its settings (`keys`), and its kind. */
typedef struct llm_known {
    const char *type, *keys;
    llm_kind kind;
} llm_known;

/* Returns the one of `rows` that has o's type; NULL and an error if there is none, or if o has a
 * setting that the row does not list. what: what o is, for the error. */
static const llm_known *llm_known_type(llm_tokenizer *t, const cJSON *o, const char *what,
                                       const llm_known *rows, size_t count) {
    size_t i;
    for (i = 0; i < count; i++)
        if (strcmp(llm_type(o), rows[i].type) == 0)
            return llm_only(t, o, rows[i].type, rows[i].keys) ? &rows[i] : NULL;
    (void)llm_fail(t, "%s: the %s %.60s is not known", t->name, what, llm_type(o));
    return NULL;
}

/* Appends the bytes that base64 text encodes. */
static int llm_put_base64(llm_tokenizer *t, llm_text *out, const char *s) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    uint32_t bits = 0;
    int count = 0;
    for (; *s && *s != '='; s++) {
        const char *digit = strchr(digits, *s);
        char byte;
        if (!digit) return llm_fail(t, "%s: the charsmap is not base64", t->name);
        bits = bits << 6 | (uint32_t)(digit - digits);
        count += 6;
        if (count < 8) continue;
        count -= 8;
        byte = (char)(bits >> count & 0xFF);
        if (!llm_put(t, out, &byte, 1)) return 0;
    }
    return 1;
}

/* Reads a charsmap, little-endian: the size of the trie in bytes (32 bits), its units (32 bits
 * each), the replacements, each with a zero byte at its end. */
static int llm_read_charsmap(llm_tokenizer *t, llm_step *step, const cJSON *o) {
    const char *base64 = llm_string(t, o, "precompiled_charsmap");
    llm_text bytes = {NULL, 0, 0};
    size_t i, size = 0;
    if (!base64 || !llm_put_base64(t, &bytes, base64)) {
        free(bytes.at);
        return 0;
    }
    for (i = 0; i < 4 && bytes.length >= 4; i++)
        size |= (size_t)(unsigned char)bytes.at[i] << 8 * i;
    if (size < 4 || size % 4 || size > bytes.length - 4 ||
        llm_valid_prefix(bytes.at + 4 + size, bytes.length - 4 - size) < bytes.length - 4 - size)
        (void)llm_fail(t, "%s: the charsmap is no trie with its results", t->name);
    else
        step->units = (uint32_t *)calloc(size / 4, sizeof *step->units);
    for (i = 0; step->units && i < size; i++)
        step->units[i / 4] |= (uint32_t)(unsigned char)bytes.at[4 + i] << 8 * (i % 4);
    step->unit_count = size / 4;
    if (step->units) (void)llm_put(t, &step->content, bytes.at + 4 + size, bytes.length - 4 - size);
    free(bytes.at);
    /* Appends a zero byte, so that the last replacement ends with one whatever the file has. */
    if (!step->units || !llm_put(t, &step->content, "", 1))
        return llm_fail(t, "there is no memory for a charsmap");
    for (i = 0; i < 128; i++) {
        const char c = (char)i;
        size_t length;
        step->changes[i] = i == '\r' || llm_charsmap_find(t, step, &c, 1, &length) != NULL;
    }
    return !t->error[0] && llm_breaks_open(t);
}

static int llm_read_normalizer(llm_tokenizer *t, const cJSON *o) {
    static const llm_known rows[] = {
        {"Sequence", " type normalizers ", LLM_SEQUENCE},
        {"NFC", " type ", LLM_NFC},
        {"NFD", " type ", LLM_NFD},
        {"NFKC", " type ", LLM_NFKC},
        {"NFKD", " type ", LLM_NFKD},
        {"Precompiled", " type precompiled_charsmap ", LLM_PRECOMPILED},
        {"Lowercase", " type ", LLM_LOWERCASE},
        {"StripAccents", " type ", LLM_STRIP_ACCENTS},
        {"BertNormalizer", " type clean_text handle_chinese_chars strip_accents lowercase ",
         LLM_BERT_NORMALIZER},
        {"Prepend", " type prepend ", LLM_PREPEND},
        {"Replace", " type pattern content ", LLM_REPLACE},
        {"Strip", " type strip_left strip_right ", LLM_STRIP},
    };
    const llm_known *known = llm_known_type(t, o, "normalizer", rows, LLM_ROWS(rows));
    const cJSON *item;
    llm_step *step;
    if (!known) return 0;
    if (known->kind == LLM_SEQUENCE) {
        cJSON_ArrayForEach(item, llm_get(o, "normalizers")) {
            if (!llm_read_normalizer(t, item)) return 0;
        }
        return 1;
    }
    step = llm_put_step(t, &t->normalizers, known->kind);
    if (!step) return 0;
    step->clean = llm_flag(t, o, "clean_text", 1);
    step->chinese = llm_flag(t, o, "handle_chinese_chars", 1);
    step->lowercase = llm_flag(t, o, "lowercase", 1);
    step->accents = llm_flag(t, o, "strip_accents", step->lowercase);
    step->left = (size_t)llm_flag(t, o, "strip_left", 1);
    step->right = (size_t)llm_flag(t, o, "strip_right", 1);
    if (known->kind == LLM_PRECOMPILED) return llm_read_charsmap(t, step, o);
    if (known->kind == LLM_NFKC || known->kind == LLM_NFKD) return llm_compat_open(t);
    if (known->kind == LLM_PREPEND && !llm_set(t, &step->content, llm_string(t, o, "prepend")))
        return 0;
    if (known->kind == LLM_REPLACE)
        return llm_read_pattern(t, step, o) &&
               llm_set(t, &step->content, llm_string(t, o, "content"));
    return !t->error[0];
}

static int llm_read_byte_level(llm_tokenizer *t, const cJSON *o) {
    static const char gpt2[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|"
                               "\\s+(?!\\S)|\\s+";
    const int prefix = llm_flag(t, o, "add_prefix_space", 1),
              regex = llm_flag(t, o, "use_regex", 1);
    llm_step *step;
    if (prefix || regex) {
        step = llm_put_step(t, &t->pre_tokenizers, LLM_BYTE_LEVEL);
        if (!step) return 0;
        step->rewrites = prefix;
        step->split = regex;
        step->behavior = LLM_ISOLATED;
        if (regex && !llm_compile(t, step, gpt2, sizeof gpt2 - 1)) return 0;
    }
    step = llm_put_step(t, &t->pre_tokenizers, LLM_BYTE_CHARS);
    if (step) step->rewrites = 1;
    return step != NULL;
}

/* Reads from the object o the settings of a pre-tokenizer step that splits the text. Returns 0 on
 * error. */
static int llm_read_split(llm_tokenizer *t, llm_step *step, const cJSON *o) {
    step->split = 1;
    step->behavior = step->kind == LLM_WHITESPACE_SPLIT ? LLM_REMOVED : LLM_ISOLATED;
    if (step->kind == LLM_DIGITS && !llm_flag(t, o, "individual_digits", 0))
        step->behavior = LLM_CONTIGUOUS;
    if (step->kind == LLM_PUNCTUATIONS && llm_get(o, "behavior"))
        return llm_read_behavior(t, step, o);
    if (step->kind == LLM_SPLIT) {
        step->invert = llm_flag(t, o, "invert", 0);
        return llm_read_pattern(t, step, o) && llm_read_behavior(t, step, o);
    }
    if (step->kind == LLM_METASPACE) {
        size_t size = 0;
        if (!llm_set(t, &step->pattern, llm_string(t, o, "replacement"))) return 0;
        if (step->pattern.length) (void)llm_point(step->pattern.at, &size);
        if (!size || size != step->pattern.length)
            return llm_fail(t, "%s: the replacement of Metaspace is not one character", t->name);
        step->split = llm_flag(t, o, "split", 1);
        step->rewrites = 1;
        step->behavior = LLM_MERGED_WITH_NEXT;
        return llm_read_scheme(t, step, o);
    }
    return 1;
}

static int llm_read_pre_tokenizer(llm_tokenizer *t, const cJSON *o) {
    static const llm_known rows[] = {
        {"Sequence", " type pretokenizers ", LLM_SEQUENCE},
        {"ByteLevel", " type add_prefix_space trim_offsets use_regex ", LLM_BYTE_LEVEL},
        {"Split", " type pattern behavior invert ", LLM_SPLIT},
        {"Digits", " type individual_digits ", LLM_DIGITS},
        {"Metaspace", " type replacement add_prefix_space prepend_scheme split str_rep ",
         LLM_METASPACE},
        {"Whitespace", " type ", LLM_WHITESPACE},
        {"WhitespaceSplit", " type ", LLM_WHITESPACE_SPLIT},
        {"Punctuation", " type behavior ", LLM_PUNCTUATIONS},
        {"BertPreTokenizer", " type ", LLM_WORDPIECE},
    };
    const llm_known *known = llm_known_type(t, o, "pre_tokenizer", rows, LLM_ROWS(rows));
    const cJSON *item;
    llm_step *step;
    if (!known) return 0;
    if (known->kind == LLM_SEQUENCE) {
        cJSON_ArrayForEach(item, llm_get(o, "pretokenizers")) {
            if (!llm_read_pre_tokenizer(t, item)) return 0;
        }
        return 1;
    }
    if (known->kind == LLM_BYTE_LEVEL) return llm_read_byte_level(t, o);
    /* BertPreTokenizer is two steps: it splits at spaces, then at punctuation. */
    if (known->kind == LLM_WORDPIECE) {
        step = llm_put_step(t, &t->pre_tokenizers, LLM_WHITESPACE_SPLIT);
        if (!step || !llm_read_split(t, step, o)) return 0;
        step = llm_put_step(t, &t->pre_tokenizers, LLM_PUNCTUATIONS);
        return step && llm_read_split(t, step, o);
    }
    step = llm_put_step(t, &t->pre_tokenizers, known->kind);
    return step && llm_read_split(t, step, o) && !t->error[0];
}

static int llm_read_decoder(llm_tokenizer *t, const cJSON *o) {
    static const llm_known rows[] = {
        {"Sequence", " type decoders ", LLM_SEQUENCE},
        {"ByteLevel", " type add_prefix_space trim_offsets use_regex ", LLM_BYTE_LEVEL},
        {"WordPiece", " type prefix cleanup ", LLM_WORDPIECE},
        {"Metaspace", " type replacement add_prefix_space prepend_scheme split str_rep ",
         LLM_METASPACE},
        {"ByteFallback", " type ", LLM_BYTE_FALLBACK},
        {"Fuse", " type ", LLM_FUSE},
        {"Strip", " type content start stop ", LLM_STRIP},
        {"Replace", " type pattern content ", LLM_REPLACE},
    };
    const llm_known *known = llm_known_type(t, o, "decoder", rows, LLM_ROWS(rows));
    const cJSON *item;
    llm_step *step;
    if (!known) return 0;
    if (known->kind == LLM_SEQUENCE) {
        cJSON_ArrayForEach(item, llm_get(o, "decoders")) {
            if (!llm_read_decoder(t, item)) return 0;
        }
        return 1;
    }
    step = llm_put_step(t, &t->decoders, known->kind);
    if (!step) return 0;
    if (known->kind == LLM_REPLACE)
        return llm_read_pattern(t, step, o) &&
               llm_set(t, &step->content, llm_string(t, o, "content"));
    if (known->kind == LLM_METASPACE) return llm_read_split(t, step, o);
    if (known->kind == LLM_WORDPIECE) {
        step->cleanup = llm_flag(t, o, "cleanup", 1);
        return llm_set(t, &step->pattern, llm_string(t, o, "prefix")) && !t->error[0];
    }
    if (known->kind == LLM_STRIP) {
        const int64_t left = llm_whole(t, o, "start", 1e6), right = llm_whole(t, o, "stop", 1e6);
        step->left = left > 0 ? (size_t)left : 0;
        step->right = right > 0 ? (size_t)right : 0;
        if (!llm_set(t, &step->pattern, llm_string(t, o, "content"))) return 0;
        if (!step->pattern.length)
            return llm_fail(t, "%s: the content of the decoder Strip is empty", t->name);
    }
    return !t->error[0];
}

/* -- reading the model: BPE, WordPiece or Unigram -- */

static int llm_read_vocabulary(llm_tokenizer *t, const cJSON *o) {
    const cJSON *item, *vocabulary = llm_get(o, "vocab");
    if (!vocabulary || !cJSON_IsObject(vocabulary))
        return llm_fail(t, "%s: the model has no vocab", t->name);
    cJSON_ArrayForEach(item, vocabulary) {
        if (!cJSON_IsNumber(item) || !(item->valuedouble >= 0) || item->valuedouble >= LLM_MAX_ID ||
            item->valuedouble != (double)(int32_t)item->valuedouble)
            return llm_fail(t, "%s: the id of the token \"%.60s\" is no whole number from 0 to %d",
                            t->name, item->string, LLM_MAX_ID - 1);
        if (!llm_put_token(t, (int32_t)item->valuedouble, item->string)) return 0;
    }
    return llm_index_tokens(t);
}

/* Finds the two tokens of a merge, which is "a b" or ["a", "b"] in the file; n: their lengths in
 * bytes. */
static int llm_merge_halves(llm_tokenizer *t, const cJSON *item, const char *half[2], size_t n[2]) {
    const char *s = cJSON_GetStringValue(item), *blank;
    if (s) {
        blank = strchr(s, ' ');
        if (!blank || strchr(blank + 1, ' '))
            return llm_fail(t, "%s: the merge \"%.60s\" is not two tokens", t->name, s);
        half[0] = s;
        n[0] = (size_t)(blank - s);
        half[1] = blank + 1;
    } else {
        half[0] = cJSON_GetStringValue(cJSON_GetArrayItem(item, 0));
        half[1] = cJSON_GetStringValue(cJSON_GetArrayItem(item, 1));
        if (!half[0] || !half[1] || cJSON_GetArraySize(item) != 2)
            return llm_fail(t, "%s: a merge is not two tokens", t->name);
        n[0] = strlen(half[0]);
    }
    n[1] = strlen(half[1]);
    return 1;
}

/* Returns 0 if a U+2581 follows another character in s, else 1. */
static int llm_starts_words(const char *s, size_t n) {
    size_t at, size, before = 1;
    for (at = 0; at < n; at += size) {
        const uint32_t c = llm_point(s + at, &size);
        if (c == 0x2581 && !before) return 0;
        before = c == 0x2581;
    }
    return 1;
}

static int llm_read_merges(llm_tokenizer *t, const cJSON *o) {
    const cJSON *item, *merges = llm_get(o, "merges");
    uint64_t rank = 0, key;
    const char *half[2] = {NULL, NULL};
    size_t n[2] = {0, 0};
    if (!merges || !cJSON_IsArray(merges))
        return llm_fail(t, "%s: the model has no merges", t->name);
    t->filter = (uint64_t *)calloc(LLM_FILTER / 64, sizeof *t->filter);
    if (!t->filter) return llm_fail(t, "there is no memory for merges");
    t->cut_at_spaces = !t->ignore_merges && llm_lookup(t, "\xE2\x96\x81", 3) != LLM_NONE;
    cJSON_ArrayForEach(item, merges) {
        int32_t left, right, both;
        if (!llm_merge_halves(t, item, half, n)) return 0;
        left = llm_lookup(t, half[0], n[0]);
        right = llm_lookup(t, half[1], n[1]);
        t->piece.length = 0;
        if (!llm_put(t, &t->piece, half[0], n[0]) || !llm_put(t, &t->piece, half[1], n[1]))
            return 0;
        both = llm_lookup(t, t->piece.at, t->piece.length);
        if (left == LLM_NONE || right == LLM_NONE || both == LLM_NONE)
            return llm_fail(t,
                            "%s: the merge of \"%.*s\" and \"%.60s\" has a part or a result that "
                            "is not in the vocab",
                            t->name, (int)(n[0] < 60 ? n[0] : 60), half[0], half[1]);
        if (!llm_starts_words(t->piece.at, t->piece.length)) t->cut_at_spaces = 0;
        key = ((uint64_t)(uint32_t)left << 32 | (uint32_t)right) + 1;
        t->filter[(llm_mix(key) >> 42) / 64] |= UINT64_C(1) << (llm_mix(key) >> 42) % 64;
        if (!llm_map_set(t, &t->merges, key, rank++ << 32 | (uint32_t)both)) return 0;
    }
    return 1;
}

/* Sets t->unk to the id of the model's unk_token, if it has one. */
static int llm_read_unk(llm_tokenizer *t, const cJSON *o) {
    const char *unk = cJSON_GetStringValue(llm_get(o, "unk_token"));
    if (!unk) return 1;
    t->unk = llm_lookup(t, unk, strlen(unk));
    return t->unk != LLM_NONE ||
           llm_fail(t, "%s: the unk_token \"%.60s\" is not in the vocab", t->name, unk);
}

static int llm_read_bpe(llm_tokenizer *t, const cJSON *o) {
    static const char *const empty[] = {"dropout", "continuing_subword_prefix",
                                        "end_of_word_suffix"};
    size_t i;
    t->model = LLM_BPE;
    if (!llm_only(t, o, "BPE",
                  " type dropout unk_token continuing_subword_prefix "
                  "end_of_word_suffix fuse_unk byte_fallback ignore_merges vocab "
                  "merges "))
        return 0;
    for (i = 0; i < LLM_ROWS(empty); i++) {
        const cJSON *item = llm_get(o, empty[i]);
        const char *s = cJSON_GetStringValue(item);
        /* 1: this is "dropout" (i is 0) and has the value 0, which means that there is none */
        const int zero = i == 0 && cJSON_IsNumber(item) && item->valuedouble == 0;
        if (item && !(s && !*s) && !zero)
            return llm_fail(t, "%s: a BPE with \"%s\" is not known", t->name, empty[i]);
    }
    t->fuse_unk = llm_flag(t, o, "fuse_unk", 0);
    t->byte_fallback = llm_flag(t, o, "byte_fallback", 0);
    t->ignore_merges = llm_flag(t, o, "ignore_merges", 0);
    return llm_read_vocabulary(t, o) && llm_read_unk(t, o) && llm_read_merges(t, o);
}

static int llm_read_wordpiece(llm_tokenizer *t, const cJSON *o) {
    const int64_t most = llm_whole(t, o, "max_input_chars_per_word", 1e9);
    t->model = LLM_WORD_PIECE;
    t->max_chars = most < 0 ? 100 : (size_t)most;
    if (!llm_only(t, o, "WordPiece",
                  " type unk_token continuing_subword_prefix "
                  "max_input_chars_per_word vocab "))
        return 0;
    if (!llm_set(t, &t->continuing, llm_string(t, o, "continuing_subword_prefix"))) return 0;
    if (!llm_read_vocabulary(t, o) || !llm_string(t, o, "unk_token") || !llm_read_unk(t, o))
        return 0;
    return !t->error[0];
}

/* Adds a token to Unigram's trie. */
static int llm_put_trie(llm_tokenizer *t, const char *s, int32_t id) {
    uint64_t node = 0;
    for (; *s; s++) {
        const uint64_t key = (node << 8 | (unsigned char)*s) + 1;
        const uint64_t *found = llm_map_find(&t->trie, key);
        if (found) {
            node = *found;
            continue;
        }
        node = t->trie_ids.count;
        if (!llm_map_set(t, &t->trie, key, node) || !llm_put_id(t, &t->trie_ids, LLM_NONE))
            return 0;
    }
    if (node) t->trie_ids.at[node] = id;
    return 1;
}

/* Returns a score rounded as `tokenizers` reads it: all digits as one whole number, rounded to
 * double, then divided or multiplied by a power of ten. Its last bit may differ from that of the
 * nearest double, and decides between two segmentations of equal scores. The digits are those of
 * the shortest decimal form of the value, as files have it: cJSON does not keep the file's
 * digits. */
static double llm_score(double value) {
    char text[40], *at = text;
    uint64_t whole = 0;
    double read;
    int digits, power;
    for (digits = 15; digits < 17; digits++) {
        (void)snprintf(text, sizeof text, "%.*e", digits - 1, value);
        if (strtod(text, NULL) == value) break;
    }
    if (digits < 16) return value; /* up to 15 digits: nothing is rounded */
    (void)snprintf(text, sizeof text, "%.*e", digits - 1, value);
    for (; *at && *at != 'e'; at++)
        if (*at >= '0' && *at <= '9') whole = 10 * whole + (uint64_t)(*at - '0');
    power = (*at ? atoi(at + 1) : 0) - (digits - 1);
    (void)snprintf(text, sizeof text, "1e%d", power < 0 ? -power : power);
    read = power < 0 ? (double)whole / strtod(text, NULL) : (double)whole * strtod(text, NULL);
    return value < 0 ? -read : read;
}

static int llm_read_unigram(llm_tokenizer *t, const cJSON *o) {
    const cJSON *item, *vocabulary = llm_get(o, "vocab");
    const int64_t unk = llm_whole(t, o, "unk_id", LLM_MAX_ID - 1);
    const int count = cJSON_GetArraySize(vocabulary);
    int32_t id = 0;
    t->model = LLM_UNIGRAM;
    t->byte_fallback = llm_flag(t, o, "byte_fallback", 0);
    if (!llm_only(t, o, "Unigram", " type unk_id vocab byte_fallback ")) return 0;
    if (!cJSON_IsArray(vocabulary) || !count || count > LLM_MAX_ID || unk >= count)
        return llm_fail(t, "%s: a Unigram without a vocab, or whose unk_id is not in it", t->name);
    t->unk = unk < 0 ? LLM_NONE : (int32_t)unk;
    t->scores = (double *)malloc((size_t)count * sizeof *t->scores);
    if (!t->scores) return llm_fail(t, "there is no memory for a vocabulary");
    if (!llm_put_id(t, &t->trie_ids, LLM_NONE)) return 0;
    t->unk_score = 1e300;
    cJSON_ArrayForEach(item, vocabulary) {
        const char *token = cJSON_GetStringValue(cJSON_GetArrayItem(item, 0));
        const cJSON *score = cJSON_GetArrayItem(item, 1);
        if (!token || !cJSON_IsNumber(score) || cJSON_GetArraySize(item) != 2)
            return llm_fail(t, "%s: the token %d of the vocab is no text with a score", t->name,
                            (int)id);
        if (!llm_put_token(t, id, token) || !llm_put_trie(t, token, id)) return 0;
        if (!(score->valuedouble >= -1e300 && score->valuedouble <= 1e300))
            return llm_fail(t, "%s: the score of the token %d of the vocab is beyond 1e300",
                            t->name, (int)id);
        t->scores[id] = llm_score(score->valuedouble);
        if (t->scores[id] < t->unk_score) t->unk_score = t->scores[id];
        id++;
    }
    t->unk_score -= 10;
    return llm_index_tokens(t) && !t->error[0];
}

static int llm_read_model(llm_tokenizer *t, const cJSON *o) {
    const char *type = llm_type(o);
    if (!o) return llm_fail(t, "%s: there is no model", t->name);
    if (strcmp(type, "BPE") == 0) return llm_read_bpe(t, o);
    if (strcmp(type, "WordPiece") == 0) return llm_read_wordpiece(t, o);
    if (strcmp(type, "Unigram") == 0) return llm_read_unigram(t, o);
    return llm_fail(t, "%s: the model %.60s is not known", t->name, type);
}

/* -- reading added tokens, the post-processor, and the whole file -- */

static int llm_read_added(llm_tokenizer *t, const cJSON *o) {
    const int64_t id = llm_whole(t, o, "id", LLM_MAX_ID - 1);
    const char *s = llm_string(t, o, "content"), *normal;
    llm_added *added;
    int32_t known;
    size_t n;
    if (!llm_only(t, o, "an added token",
                  " id content single_word lstrip rstrip normalized special "))
        return 0;
    if (!s || id < 0) return llm_fail(t, "%s: an added token has no id", t->name);
    known = llm_lookup(t, s, strlen(s));
    if (known != LLM_NONE && known != (int32_t)id)
        return llm_fail(t, "%s: the added token \"%.60s\" has the id %d, and %d in the vocab",
                        t->name, s, (int)id, (int)known);
    t->added = (llm_added *)llm_grow(t, t->added, &t->added_room, t->added_count + 1,
                                     sizeof *t->added);
    if (t->added_count == t->added_room || !llm_token_room(t, (int32_t)id)) return 0;
    added = &t->added[t->added_count++];
    memset(added, 0, sizeof *added);
    added->id = (int32_t)id;
    added->single_word = llm_flag(t, o, "single_word", 0);
    added->lstrip = llm_flag(t, o, "lstrip", 0);
    added->rstrip = llm_flag(t, o, "rstrip", 0);
    added->special = llm_flag(t, o, "special", 0);
    added->normalized = llm_flag(t, o, "normalized", !added->special);
    t->tokens[id].added = (uint32_t)t->added_count;
    if (!llm_puts(t, &added->content, s)) return 0;
    normal = s;
    n = strlen(s);
    if (added->normalized)
        return llm_normalize(t, &normal, &n) && llm_put(t, &added->normal, normal, n);
    return !t->error[0];
}

/* Returns 1 if added token b comes before a: by bytes; of two that begin alike, the shorter one
 * first. */
static int llm_added_before(const llm_tokenizer *t, uint32_t b, uint32_t a) {
    const llm_text *x = llm_added_text(&t->added[b]), *y = llm_added_text(&t->added[a]);
    const size_t n = x->length < y->length ? x->length : y->length;
    const int order = memcmp(x->at, y->at, n);
    return order ? order < 0 : x->length < y->length;
}

/* Sorts f->order by the tokens' texts: merge sort, bottom up; equal texts keep their order. */
static int llm_finder_sort(llm_tokenizer *t, llm_finder *f) {
    uint32_t *from = f->order, *to = (uint32_t *)malloc((f->count + 1) * sizeof *to), *swap;
    size_t width, begin, i;
    if (!to) return llm_fail(t, "there is no memory for added tokens");
    for (width = 1; width < f->count; width *= 2) {
        for (begin = 0; begin < f->count; begin += 2 * width) {
            const size_t middle = f->count - begin > width ? begin + width : f->count;
            const size_t end = f->count - middle > width ? middle + width : f->count;
            size_t a = begin, b = middle;
            for (i = begin; i < end; i++)
                to[i] = b >= end || (a < middle && !llm_added_before(t, from[b], from[a]))
                            ? from[a++]
                            : from[b++];
        }
        swap = from;
        from = to;
        to = swap;
    }
    f->order = from;
    free(to);
    return 1;
}

/* Fills a finder with the added tokens whose setting "normalized" is `normalized`, and sorts
 * them. */
static int llm_finder_fill(llm_tokenizer *t, llm_finder *f, int normalized) {
    size_t i;
    int c;
    f->order = (uint32_t *)malloc((t->added_count + 1) * sizeof *f->order);
    if (!f->order) return llm_fail(t, "there is no memory for added tokens");
    for (i = 0; i < t->added_count; i++)
        if (t->added[i].normalized == normalized && llm_added_text(&t->added[i])->length)
            f->order[f->count++] = (uint32_t)i;
    if (!llm_finder_sort(t, f)) return 0;
    f->only = -1;
    for (i = 0, c = 0; c < 256; c++) {
        f->begin[c] = i;
        while (i < f->count && (unsigned char)llm_added_text(&t->added[f->order[i]])->at[0] == c)
            i++;
        if (i == f->count && f->begin[c] == 0 && i) f->only = c;
    }
    f->begin[256] = i;
    return 1;
}

/* Reads the template of a single text, such as [{"SpecialToken": {"id": "[CLS]"}}, {"Sequence":
 * {"id": "A"}}, ...]: appends the ids before the text, and those after it. */
static int llm_read_template(llm_tokenizer *t, const cJSON *o, llm_ids *before, llm_ids *after) {
    const cJSON *item, *special, *id;
    int texts = 0;
    cJSON_ArrayForEach(item, llm_get(o, "single")) {
        if (llm_get(item, "Sequence")) {
            const char *name = llm_string(t, llm_get(item, "Sequence"), "id");
            if (!name || strcmp(name, "A") != 0 || texts++)
                return llm_fail(t, "%s: the template of a single text is not one with A once",
                                t->name);
            continue;
        }
        special = llm_get(item, "SpecialToken");
        if (!special || !llm_string(t, special, "id"))
            return llm_fail(t, "%s: a part of the template is not known", t->name);
        special = llm_get(llm_get(o, "special_tokens"), llm_string(t, special, "id"));
        if (!llm_get(special, "ids"))
            return llm_fail(t, "%s: a special token of the template has no ids", t->name);
        cJSON_ArrayForEach(id, llm_get(special, "ids")) {
            if (!cJSON_IsNumber(id) || !(id->valuedouble >= 0 && id->valuedouble < LLM_MAX_ID))
                return llm_fail(t, "%s: an id of the template is none", t->name);
            if (!llm_put_id(t, texts ? after : before, (int32_t)id->valuedouble)) return 0;
        }
    }
    return texts == 1 || llm_fail(t, "%s: the template of a single text has no A", t->name);
}

/* Appends the id of a pair such as ["[CLS]", 101] of BertProcessing or RobertaProcessing. */
static int llm_read_pair(llm_tokenizer *t, const cJSON *o, const char *key, llm_ids *ids) {
    const cJSON *id = cJSON_GetArrayItem(llm_get(o, key), 1);
    if (!cJSON_IsNumber(id) || !(id->valuedouble >= 0 && id->valuedouble < LLM_MAX_ID))
        return llm_fail(t, "%s: \"%s\" of %s has no id", t->name, key, llm_type(o));
    return llm_put_id(t, ids, (int32_t)id->valuedouble);
}

static int llm_read_processor(llm_tokenizer *t, const cJSON *o) {
    static const llm_known rows[] = {
        {"Sequence", " type processors ", LLM_SEQUENCE},
        {"TemplateProcessing", " type single pair special_tokens ", LLM_SPLIT},
        {"BertProcessing", " type sep cls ", LLM_WORDPIECE},
        {"RobertaProcessing", " type sep cls trim_offsets add_prefix_space ", LLM_WORDPIECE},
        {"ByteLevel", " type add_prefix_space trim_offsets use_regex ", LLM_BYTE_LEVEL},
    };
    const llm_known *known = llm_known_type(t, o, "post_processor", rows, LLM_ROWS(rows));
    llm_ids before = {NULL, 0, 0};
    const cJSON *item;
    int ok;
    if (!known) return 0;
    if (known->kind == LLM_BYTE_LEVEL) return 1; /* ByteLevel changes offsets only, not ids */
    if (known->kind == LLM_SEQUENCE) {
        cJSON_ArrayForEach(item, llm_get(o, "processors")) {
            if (!llm_read_processor(t, item)) return 0;
        }
        return 1;
    }
    if (known->kind == LLM_SPLIT)
        ok = llm_read_template(t, o, &before, &t->after);
    else
        ok = llm_read_pair(t, o, "cls", &before) && llm_read_pair(t, o, "sep", &t->after);
    /* The special tokens of a later post-processor stand outside of those of the earlier ones, so
     * its `before` comes first. */
    ok = ok && llm_put_ids(t, &before, t->before.at, t->before.count);
    free(t->before.at);
    t->before = before;
    return ok;
}

static int llm_read_parts(llm_tokenizer *t, const cJSON *o) {
    const cJSON *item, *part;
    size_t n;
    if (!llm_only(t, o, "the file",
                  " version truncation padding added_tokens normalizer "
                  "pre_tokenizer post_processor decoder model "))
        return 0;
    if (!llm_read_model(t, llm_get(o, "model"))) return 0;
    part = llm_get(o, "normalizer");
    if (part && !llm_read_normalizer(t, part)) return 0;
    part = llm_get(o, "pre_tokenizer");
    if (part && !llm_read_pre_tokenizer(t, part)) return 0;
    part = llm_get(o, "post_processor");
    if (part && !llm_read_processor(t, part)) return 0;
    part = llm_get(o, "decoder");
    t->has_decoder = part != NULL;
    if (part && !llm_read_decoder(t, part)) return 0;
    /* If the last step is LLM_BYTE_CHARS, it is taken off the list: llm_word_new does it in its
     * place, for words that are not in the cache. */
    n = t->pre_tokenizers.count;
    if (n && t->pre_tokenizers.at[n - 1].kind == LLM_BYTE_CHARS) {
        t->byte_level = 1;
        t->pre_tokenizers.count--;
    }
    cJSON_ArrayForEach(item, llm_get(o, "added_tokens")) {
        if (!llm_read_added(t, item)) return 0;
    }
    return llm_finder_fill(t, &t->raw, 0) && llm_finder_fill(t, &t->normalized, 1);
}

static void llm_free_steps(llm_steps *steps) {
    size_t i;
    for (i = 0; i < steps->count; i++) {
        free(steps->at[i].pattern.at);
        free(steps->at[i].content.at);
        free(steps->at[i].units);
        pcre2_code_free(steps->at[i].code);
        pcre2_code_free(steps->at[i].plain);
        pcre2_match_data_free(steps->at[i].match);
    }
    free(steps->at);
}

LLM_TOKENIZER_API void llm_tokenizer_free(llm_tokenizer *t) {
    size_t i;
    if (!t) return;
    llm_free_steps(&t->normalizers);
    llm_free_steps(&t->pre_tokenizers);
    llm_free_steps(&t->decoders);
    for (i = 0; i < t->added_count; i++) {
        free(t->added[i].content.at);
        free(t->added[i].normal.at);
    }
    for (i = 0; i < 2; i++) {
        free(t->buffers[i].at);
        free(t->pieces[i].at);
        free(t->spans[i].at);
    }
    pcre2_match_context_free(t->context);
    pcre2_jit_stack_free(t->stack);
    {
        void *const blocks[] = {t->flags,
                                t->breaks,
                                t->compositions.at,
                                t->compat.at,
                                t->added,
                                t->raw.order,
                                t->normalized.order,
                                t->before.at,
                                t->after.at,
                                t->texts.at,
                                t->tokens,
                                t->slots,
                                t->merges.at,
                                t->filter,
                                t->continuing.at,
                                t->trie.at,
                                t->trie_ids.at,
                                t->scores,
                                t->cache,
                                t->cache_text.at,
                                t->cache_ids.at,
                                t->clean.at,
                                t->mapped.at,
                                t->piece.at,
                                t->points.at,
                                t->sorted.at,
                                t->ids.at,
                                t->symbols.at,
                                t->next.at,
                                t->heap,
                                t->best,
                                t->path.at};
        for (i = 0; i < sizeof blocks / sizeof blocks[0]; i++) free(blocks[i]);
    }
    free(t);
}

/* Returns 1 if a text of JSON has the character U+0000, as a byte or as \u0000. It would end a
 * string of cJSON, so the file is refused. */
static int llm_has_nul(const char *json, size_t n) {
    size_t i;
    for (i = 0; i < n; i++) {
        if (!json[i]) return 1;
        if (json[i] != '\\') continue;
        if (n - i >= 6 && memcmp(json + i, "\\u0000", 6) == 0) return 1;
        i++;
    }
    return 0;
}

/* Fills t from a tokenizer.json. t is zero except for Unicode tables that are already filled.
 * Returns 0 on error, in t->error; the caller then frees t. */
static int llm_tokenizer_fill(llm_tokenizer *t, const char *json, size_t length, const char *name) {
    cJSON *file;
    t->name = name;
    llm_begin_text(t, length);
    t->unk = LLM_NONE;
    t->context = pcre2_match_context_create(NULL);
    t->stack = pcre2_jit_stack_create(32 * 1024, 4 * 1024 * 1024, NULL);
    if (!t->context || !t->stack) return llm_fail(t, "there is no memory for a tokenizer");
    pcre2_jit_stack_assign(t->context, NULL, t->stack);
    if (llm_valid_prefix(json, length) < length)
        (void)llm_fail(t, "%s: this is not UTF-8", name);
    else if (llm_has_nul(json, length))
        (void)llm_fail(t, "%s: a token with the character U+0000 is not known", name);
    if (!t->error[0] && llm_unicode_open(t)) {
        errno = 0; /* to tell lack of memory (malloc sets ENOMEM) from malformed JSON */
        file = cJSON_ParseWithLength(json, length);
        if (!file && errno == ENOMEM)
            (void)llm_fail(t, "%s: there is no memory for its JSON", name);
        else if (!file || !cJSON_IsObject(file))
            (void)llm_fail(t, "%s: this is not JSON, or no object", name);
        else if (!llm_read_parts(t, file))
            (void)llm_fail(t, "%s: this is no tokenizer", name);
        cJSON_Delete(file);
    }
    t->name = NULL;
    return t->error[0] == 0;
}

/* Creates a tokenizer from the `length` bytes of a tokenizer.json, which errors call `name`.
 * Returns NULL on error, with one sentence in `error`, of `size` bytes. */
LLM_TOKENIZER_API llm_tokenizer *llm_tokenizer_read(const char *json, size_t length,
                                                    const char *name, char *error, size_t size) {
    llm_tokenizer *t = (llm_tokenizer *)calloc(1, sizeof *t);
    if (t && llm_tokenizer_fill(t, json, length, name)) return t;
    (void)snprintf(error, size, "%s", t ? t->error : "there is no memory for a tokenizer");
    llm_tokenizer_free(t);
    return NULL;
}

/* Creates a tokenizer from the file tokenizer.json at `path`; free it with llm_tokenizer_free.
 * Returns NULL on error, with one sentence in `error`, of `size` bytes. */
LLM_TOKENIZER_API llm_tokenizer *llm_tokenizer_open(const char *path, char *error, size_t size) {
    tsh_error why;
    size_t length;
    char *json = llm_read(path, LLM_TOKENIZER_MAX, &length, &why);
    llm_tokenizer *t = json ? llm_tokenizer_read(json, length, path, error, size) : NULL;
    if (!json) (void)snprintf(error, size, "%.*s", (int)size - 1, why.message);
    free(json);
    return t;
}

#endif
