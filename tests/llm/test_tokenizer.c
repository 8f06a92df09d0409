/* examples/llm/tokenizer.h against the Python package `tokenizers`: ids and texts recorded by
 * make_goldens.py, and what has no record: invalid UTF-8, long words, files that lie. */
#if !defined(_POSIX_C_SOURCE)
#define _POSIX_C_SOURCE 200809L
#endif
#include "../../examples/llm/tokenizer.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <time.h>
#include <cmocka.h>

/* A file of tests/golden, found from this file's own place, with a zero after it. */
static char *read_golden(const char *name) {
    const char *here = __FILE__, *slash = strrchr(here, '/');
    char path[512], *text;
    FILE *file;
    long size;
    (void)snprintf(path, sizeof path, "%.*s../golden/%s", slash ? (int)(slash - here + 1) : 0, here,
                   name);
    file = fopen(path, "rb");
    if (!file) fail_msg("%s cannot be opened (make_goldens.py writes it)", path);
    assert_int_equal(fseek(file, 0, SEEK_END), 0);
    size = ftell(file);
    rewind(file);
    text = (char *)malloc((size_t)size + 1);
    assert_non_null(text);
    assert_int_equal(fread(text, 1, (size_t)size, file), (size_t)size);
    text[size] = 0;
    (void)fclose(file);
    return text;
}

static cJSON *goldens(void) {
    char *text = read_golden("tokenizers.json");
    cJSON *all = cJSON_Parse(text);
    free(text);
    assert_non_null(all);
    assert_true(cJSON_GetArraySize(all) >= 20);
    return all;
}

static llm_tokenizer *from_json(const cJSON *json) {
    char *text = cJSON_PrintUnformatted(json), error[256] = "";
    llm_tokenizer *t = llm_tokenizer_read(text, strlen(text), "golden", error, sizeof error);
    if (!t) fail_msg("%s", error);
    cJSON_free(text);
    return t;
}

static const cJSON *golden(const cJSON *all, const char *name) {
    const cJSON *item;
    cJSON_ArrayForEach(item, all) {
        if (strcmp(cJSON_GetStringValue(cJSON_GetObjectItem(item, "name")), name) == 0)
            return cJSON_GetObjectItem(item, "tokenizer");
    }
    fail_msg("there is no golden %s", name);
    return NULL;
}

static const char *string_of(const cJSON *o, const char *key) {
    return cJSON_GetStringValue(cJSON_GetObjectItem(o, key));
}

static void same_ids(const char *name, const cJSON *c, const char *key, int64_t n,
                     const int32_t *ids) {
    const cJSON *want = cJSON_GetObjectItem(c, key), *id;
    int64_t i = 0;
    if (n != cJSON_GetArraySize(want))
        fail_msg("%s: \"%s\": %d ids, not %d", name, string_of(c, "text"), (int)n,
                 cJSON_GetArraySize(want));
    cJSON_ArrayForEach(id, want) {
        if (ids[i] != id->valueint)
            fail_msg("%s: \"%s\": id %d is %d, not %d", name, string_of(c, "text"), (int)i,
                     (int)ids[i], id->valueint);
        i++;
    }
}

static void encoding_is_that_of_tokenizers(void **state) {
    cJSON *all = goldens();
    const cJSON *item, *c;
    int round, special;
    (void)state;
    cJSON_ArrayForEach(item, all) {
        llm_tokenizer *t = from_json(cJSON_GetObjectItem(item, "tokenizer"));
        for (round = 0; round < 4; round++) { /* the second time, words are in the cache */
            special = round % 2;
            cJSON_ArrayForEach(c, cJSON_GetObjectItem(item, "cases")) {
                const char *text = string_of(c, "text");
                int32_t *ids;
                const int64_t n = llm_tokenizer_encode(t, text, strlen(text), special, &ids);
                if (n < 0) fail_msg("%s: %s", string_of(item, "name"), llm_tokenizer_error(t));
                same_ids(string_of(item, "name"), c, special ? "ids" : "plain", n, ids);
                free(ids);
            }
        }
        llm_tokenizer_free(t);
    }
    cJSON_Delete(all);
}

static void same_text(const char *name, const cJSON *c, const char *key, const char *got,
                      size_t n) {
    const char *want = string_of(c, key);
    if (strlen(want) != n || memcmp(got, want, n) != 0)
        fail_msg("%s: \"%.*s\", not \"%s\"", name, (int)n, got, want);
}

static void decode_case(llm_tokenizer *t, const char *name, const cJSON *c) {
    const cJSON *list = cJSON_GetObjectItem(c, "ids"), *id;
    llm_ids ids = {NULL, 0, 0};
    size_t n, total;
    char *text;
    int special;
    cJSON_ArrayForEach(id, list) assert_true(llm_put_id(t, &ids, id->valueint));
    for (special = 0; special < 2; special++) {
        char together[4096];
        llm_stream stream;
        const char *part;
        size_t i;
        text = llm_tokenizer_decode(t, ids.at, ids.count, special, &n);
        assert_non_null(text);
        same_text(name, c, special ? "decoded" : "shown", text, n);
        free(text);
        memset(&stream, 0, sizeof stream);
        stream.tokenizer = t;
        stream.special = special;
        for (i = total = 0; i <= ids.count; i++) {
            part = i < ids.count ? llm_stream_add(&stream, ids.at[i], &n)
                                 : llm_stream_end(&stream, &n);
            assert_non_null(part);
            if (llm_valid_prefix(part, n) != n) /* never half a character */
                fail_msg("%s: \"%s\": half a character", name, string_of(c, "text"));
            assert_true(total + n < sizeof together);
            memcpy(together + total, part, n);
            total += n;
        }
        /* What is no UTF-8 shows by the next token only. */
        if (!strstr(string_of(c, special ? "decoded" : "shown"), "\xEF\xBF\xBD"))
            same_text(name, c, special ? "decoded" : "shown", together, total);
    }
    free(ids.at);
}

static void decoding_is_that_of_tokenizers(void **state) {
    cJSON *all = goldens();
    const cJSON *item, *c;
    (void)state;
    cJSON_ArrayForEach(item, all) {
        llm_tokenizer *t = from_json(cJSON_GetObjectItem(item, "tokenizer"));
        cJSON_ArrayForEach(c, cJSON_GetObjectItem(item, "cases"))
            decode_case(t, string_of(item, "name"), c);
        llm_tokenizer_free(t);
    }
    cJSON_Delete(all);
}

/* A tokenizer that splits at a pattern; the first byte of a word is a token below 256, the others
 * are tokens from 256 on. */
static llm_tokenizer *split_at(const char *pattern) {
    cJSON *file = cJSON_Parse("{\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":["
                              "{\"type\":\"Split\",\"behavior\":\"Isolated\",\"invert\":false},"
                              "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,"
                              "\"use_regex\":false}]},\"model\":{"
                              "\"type\":\"WordPiece\",\"unk_token\":\"unk\","
                              "\"continuing_subword_prefix\":\"##\",\"max_input_chars_per_word\":"
                              "1000,\"vocab\":{\"unk\":512}}}");
    cJSON *vocabulary = cJSON_GetObjectItem(cJSON_GetObjectItem(file, "model"), "vocab");
    cJSON *steps = cJSON_GetObjectItem(cJSON_GetObjectItem(file, "pre_tokenizer"),
                                       "pretokenizers");
    llm_tokenizer none, *t;
    int id;
    memset(&none, 0, sizeof none);
    cJSON_AddStringToObject(cJSON_AddObjectToObject(cJSON_GetArrayItem(steps, 0), "pattern"),
                            "Regex", pattern);
    for (id = 0; id < 512; id++) {
        llm_text name = {NULL, 0, 0};
        assert_true((id < 256 || llm_puts(&none, &name, "##")) &&
                    llm_put_utf8(&none, &name, llm_byte_char((unsigned char)(id % 256))) &&
                    llm_put(&none, &name, "", 1));
        cJSON_AddNumberToObject(vocabulary, name.at, (double)id);
        free(name.at);
    }
    t = from_json(file);
    cJSON_Delete(file);
    return t;
}

/* Nested classes, intersections, POSIX classes, scripts, boundaries, possessive quantifiers: where
 * tokenizers splits, too. */
static void patterns_are_those_of_tokenizers(void **state) {
    char *text = read_golden("patterns.json");
    cJSON *all = cJSON_Parse(text);
    const cJSON *item, *c, *part;
    (void)state;
    assert_true(cJSON_GetArraySize(all) >= 80);
    cJSON_ArrayForEach(item, all) {
        llm_tokenizer *t = split_at(string_of(item, "pattern"));
        cJSON_ArrayForEach(c, cJSON_GetObjectItem(item, "cases")) {
            const char *s = cJSON_GetStringValue(cJSON_GetArrayItem(c, 0));
            int32_t *ids;
            const int64_t n = llm_tokenizer_encode(t, s, strlen(s), 0, &ids);
            int64_t at = 0, i;
            if (n != (int64_t)strlen(s)) fail_msg("%s: %s", string_of(item, "pattern"), s);
            cJSON_ArrayForEach(part, cJSON_GetArrayItem(c, 1)) {
                for (i = 0; i < part->valueint; i++, at++)
                    if (at >= n || (ids[at] < 256) != (i == 0))
                        fail_msg("%s: \"%s\" at byte %d", string_of(item, "pattern"), s, (int)at);
            }
            assert_int_equal(at, n);
            free(ids);
        }
        llm_tokenizer_free(t);
    }
    cJSON_Delete(all);
    free(text);
}

/* Any bytes: those of valid text come back; invalid ones count as U+FFFD. */
static void bytes_come_back(void **state) {
    static const char text[] = "a\0b\xC3\xA4 \xE4\xB8\xAD\xF0\x9F\x98\x80 \x7F\x01 <Norm> 'll\n";
    static const char bad[] =
        "\xFFx\xC3(\xE2\x82y\xF0\x9F\x98\xED\xA0\x80z\xC0\x80\xF4\x90\x80\x80\xE2";
    static const char good[] = "~x~(~y~~~~z~~~~~~~"; /* ~ stands for U+FFFD */
    cJSON *all = goldens();
    llm_tokenizer *t = from_json(golden(all, "gpt2"));
    char clean[128], *back;
    int32_t *ids, *others;
    size_t n, i, length = 0;
    int64_t count;
    (void)state;
    count = llm_tokenizer_encode(t, text, sizeof text - 1, 0, &ids);
    back = llm_tokenizer_decode(t, ids, (size_t)count, 1, &n);
    assert_int_equal(n, sizeof text - 1);
    assert_memory_equal(back, text, n);
    free(back);
    free(ids);
    for (i = 0; good[i]; i++) {
        memcpy(clean + length, good[i] == '~' ? "\xEF\xBF\xBD" : good + i, good[i] == '~' ? 3 : 1);
        length += good[i] == '~' ? 3 : 1;
    }
    count = llm_tokenizer_encode(t, bad, sizeof bad - 1, 0, &ids);
    assert_int_equal(count, llm_tokenizer_encode(t, clean, length, 0, &others));
    assert_memory_equal(ids, others, (size_t)count * sizeof *ids);
    free(ids);
    free(others);
    llm_tokenizer_free(t);
    cJSON_Delete(all);
}

/* A megabyte of one letter, and of letters without an end: n log n steps, or this takes hours. The
 * same ids as of any prefix that ends where a token does, which the short words' way computes. */
static void long_words_are_not_quadratic(void **state) {
    const char *const names[] = {"gpt2", "llama2", "t5", "bert"};
    cJSON *all = goldens();
    const size_t size = 1000000;
    char *text = (char *)malloc(size);
    size_t i, k, n;
    (void)state;
    for (k = 0; k < 4; k++) {
        llm_tokenizer *t = from_json(golden(all, names[k]));
        int kind;
        for (kind = 0; kind < 3; kind++) {
            int32_t *ids;
            int64_t count;
            for (i = 0; i < size; i++)
                text[i] = kind == 0   ? 'e'
                          : kind == 1 ? "theother"[i % 8]
                                      : (char)('a' + i * i % 23);
            count = llm_tokenizer_encode(t, text, size, 0, &ids);
            assert_true(count > 0);
            if (k == 0) {
                char *back = llm_tokenizer_decode(t, ids, (size_t)count, 1, &n);
                assert_int_equal(n, size);
                assert_memory_equal(back, text, size);
                free(back);
            }
            free(ids);
        }
        llm_tokenizer_free(t);
    }
    free(text);
    cJSON_Delete(all);
}

/* The two ways to merge give the same ids. */
static void many_merges_as_few(void **state) {
    cJSON *all = goldens();
    llm_tokenizer *t = from_json(golden(all, "gpt2"));
    uint64_t merges[64];
    uint32_t seed = 7;
    int round, i, shorter = 0;
    (void)state;
    for (round = 0; round < 3000; round++) {
        char text[64];
        int32_t few[64];
        size_t n;
        for (i = 0; i < 64; i++) {
            seed = seed * 1664525u + 1013904223u;
            text[i] = "therinao"[seed >> 24 & 7];
        }
        assert_true(llm_symbols(t, text, 64));
        llm_merge_few(t, merges);
        n = t->symbols.count;
        memcpy(few, t->symbols.at, n * sizeof *few);
        shorter += n < 64;
        assert_true(llm_symbols(t, text, 64) && llm_merge_many(t));
        assert_int_equal(t->symbols.count, n);
        assert_memory_equal(t->symbols.at, few, n * sizeof *few);
    }
    assert_true(shorter > 2900);
    llm_tokenizer_free(t);
    cJSON_Delete(all);
}

static void tokens_have_ids(void **state) {
    cJSON *all = goldens();
    llm_tokenizer *t = from_json(golden(all, "gpt2"));
    (void)state;
    assert_int_equal(llm_tokenizer_id(t, "<s>"), 330);
    assert_int_equal(llm_tokenizer_id(t, "!"), 0);
    assert_int_equal(llm_tokenizer_id(t, "no such token"), -1);
    assert_int_equal(llm_tokenizer_size(t), 335);
    llm_tokenizer_free(t);
    cJSON_Delete(all);
}

/* -- files that lie -- */

#define MODEL                                                                                      \
    "\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"ab\":2},\"merges\":[\"a b\"]}"

#define SPLIT(regex)                                                                               \
    "{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"" regex                       \
    "\"},\"behavior\":\"Isolated\",\"invert\":false}," MODEL "}"

#define CHARSMAP(base64)                                                                           \
    "{\"normalizer\":{\"type\":\"Precompiled\",\"precompiled_charsmap\":\"" base64 "\"}," MODEL   \
    "}"

static const char *const refused[][2] = {
    {"", "not JSON"},
    {"[]", "not JSON"},
    {"{}", "no model"},
    {"{\"model\":{\"type\":\"WordLevel\",\"vocab\":{}}}", "the model WordLevel is not known"},
    {"{\"what\":1," MODEL "}", "\"what\" of the file"},
    {"{\"normalizer\":{\"type\":\"Nmt\"}," MODEL "}", "normalizer Nmt"},
    {"{\"normalizer\":{\"type\":\"NFC\",\"x\":1}," MODEL "}", "\"x\" of NFC"},
    {"{\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"Nmt\"}]}," MODEL "}",
     "normalizer Nmt"},
    {"{\"normalizer\":{\"type\":\"Precompiled\"}," MODEL "}", "precompiled_charsmap"},
    {CHARSMAP("BAAA*AAAAAAAA"), "not base64"},
    {CHARSMAP(""), "no trie with its results"},
    {CHARSMAP("AAAAAAA="), "no trie with its results"},         /* a trie of 0 bytes */
    {CHARSMAP("BQAAAAAAAAAAAA=="), "no trie with its results"}, /* 5 bytes */
    {CHARSMAP("CAAAAAAAAAA="), "no trie with its results"},     /* 8 bytes, of which 4 are there */
    {CHARSMAP("BAAAAAAAAAD/"), "no trie with its results"},     /* results are not UTF-8 */
    {"{\"pre_tokenizer\":{\"type\":\"UnicodeScripts\"}," MODEL "}", "pre_tokenizer UnicodeScripts"},
    {"{\"pre_tokenizer\":{}," MODEL "}", "without a type"},
    {"{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"[a\"},\"behavior\":"
     "\"Isolated\",\"invert\":false}," MODEL "}",
     "does not compile"},
    {SPLIT("\\\\p{Hanunoo}"), "\\p{Hanunoo}"},
    {SPLIT("\\\\Xx"), "\\X"},
    {SPLIT("[a\\\\Rb]"), "\\R"},
    {SPLIT("[[:lowest:]]"), "[:lowest:]"},
    {SPLIT("(?i:[a&&[ab]])"), "(?i)"},
    {SPLIT("[a[b]"), "[ without ]"},
    {SPLIT("a{1,2}+"), "{...}+"},
    {"{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"String\":\"x\"},\"behavior\":"
     "\"Torn\",\"invert\":false}," MODEL "}",
     "\"Torn\""},
    {"{\"pre_tokenizer\":{\"type\":\"Metaspace\",\"replacement\":\"ab\"}," MODEL "}",
     "not one character"},
    {"{\"decoder\":{\"type\":\"CTC\"}," MODEL "}", "decoder CTC"},
    {"{\"post_processor\":{\"type\":\"What\"}," MODEL "}", "post_processor What"},
    {"{\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[]}," MODEL "}", "no A"},
    {"{\"added_tokens\":[{\"id\":9,\"content\":\"a\"}]," MODEL "}", "has the id 9, and 0"},
    {"{\"added_tokens\":[{\"id\":-1,\"content\":\"x\"}]," MODEL "}", "\"id\""},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":0},\"merges\":[]}}", "the id 0"},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":1e9},\"merges\":[]}}", "\"a\""},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[\"a c\"]}}", "\"c\""},
    {"{\"model\":{\"type\":\"BPE\",\"dropout\":0.1,\"vocab\":{\"a\":0},\"merges\":[]}}", "dropout"},
    {"{\"model\":{\"type\":\"BPE\",\"unk_token\":\"u\",\"vocab\":{\"a\":0},\"merges\":[]}}",
     "\"u\""},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\\u0000\":0},\"merges\":[]}}", "U+0000"},
    {"{\"model\":{\"type\":\"Unigram\",\"unk_id\":1,\"vocab\":[[\"a\",-1.0]]}}", "unk_id"},
    {"{\"model\":{\"type\":\"WordPiece\",\"vocab\":{\"a\":0},\"continuing_subword_prefix\":\"#\"}}",
     "unk_token"},
    {"{\"model\":{\"type\":\"Unigram\",\"unk_id\":0,\"vocab\":[[\"a\",-1e999]]}}",
     "score of the token 0"},
    {"{\"model\":{\"type\":\"Unigram\",\"unk_id\":0,\"vocab\":[[\"a\",-1],[\"b\",1e400]]}}",
     "score of the token 1"},
    {"{\"x\":\"\xFF\"}", "UTF-8"},
};

static void files_that_lie_are_refused(void **state) {
    char error[256];
    size_t i;
    (void)state;
    for (i = 0; i < sizeof refused / sizeof refused[0]; i++) {
        const char *json = refused[i][0];
        llm_tokenizer *t = llm_tokenizer_read(json, strlen(json), "t.json", error, sizeof error);
        if (t || strncmp(error, "t.json: ", 8) != 0 || !strstr(error, refused[i][1]))
            fail_msg("%s: \"%s\", not with \"%s\"", json, t ? "read" : error, refused[i][1]);
    }
    assert_null(llm_tokenizer_open("no/such/file", error, sizeof error));
    assert_non_null(strstr(error, "no/such/file"));
}

static void put_base64(llm_tokenizer *t, llm_text *out, const unsigned char *bytes, size_t n) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    size_t i, k;
    for (i = 0; i < n; i += 3) {
        const uint32_t three = (uint32_t)bytes[i] << 16 |
                               (uint32_t)(i + 1 < n ? bytes[i + 1] : 0) << 8 |
                               (i + 2 < n ? bytes[i + 2] : 0u);
        for (k = 0; k < 4 && k <= n - i; k++)
            assert_true(llm_put(t, out, &digits[three >> (18 - 6 * k) & 63], 1));
    }
}

/* A trie whose leaf of "a" points behind the only result is found when the file is read; one whose
 * leaf of U+00E9 does, when a text has it. */
static void charsmaps_that_lie_are_refused(void **state) {
    static const uint32_t result[2] = {2, 1}; /* of results of one zero, and of U+00E9 and a zero */
    char error[256];
    int kind;
    (void)state;
    for (kind = 0; kind < 2; kind++) {
        uint32_t units[512];
        unsigned char bytes[4 + sizeof units + 3];
        llm_text base64 = {NULL, 0, 0}, json = {NULL, 0, 0};
        llm_tokenizer none, *t;
        size_t i, n = 4 + sizeof units;
        int32_t *ids;
        memset(&none, 0, sizeof none);
        memset(units, 0, sizeof units);
        memset(bytes, 0, sizeof bytes);
        units[0] = 256u << 10; /* children at 256 + byte */
        if (kind == 0) {       /* "a": its leaf at (256 ^ 'a') ^ 'a' ^ 1 */
            units[256 ^ 'a'] = 'a' | 256 | (uint32_t)('a' ^ 1) << 10;
            units[256 ^ 1] = result[0] | 1u << 31;
            n += 1;
        } else { /* C3 A9 */
            units[256 ^ 0xC3] = 0xC3 | (uint32_t)0xC3 << 10;
            units[256 ^ 0xA9] = 0xA9 | 256 | (uint32_t)(0xA9 ^ 2) << 10;
            units[256 ^ 2] = result[1] | 1u << 31;
            memcpy(bytes + n, "\xC3\xA9", 2);
            n += 3;
        }
        bytes[1] = sizeof units / 256;
        for (i = 0; i < sizeof units; i++)
            bytes[4 + i] = (unsigned char)(units[i / 4] >> 8 * (i % 4));
        put_base64(&none, &base64, bytes, n);
        assert_true(llm_puts(&none, &json, "{\"normalizer\":{\"type\":\"Precompiled\","
                                           "\"precompiled_charsmap\":\"") &&
                    llm_put(&none, &json, base64.at, base64.length) &&
                    llm_puts(&none, &json, "\"}," MODEL "}"));
        t = llm_tokenizer_read(json.at, json.length, "t.json", error, sizeof error);
        if (kind == 0) {
            assert_null(t);
        } else {
            assert_non_null(t);
            assert_int_equal(llm_tokenizer_encode(t, "ab", 2, 0, &ids), 1);
            free(ids);
            assert_int_equal(llm_tokenizer_encode(t, "\xC3\xA9", 2, 0, &ids), -1);
            (void)snprintf(error, sizeof error, "%s", llm_tokenizer_error(t));
        }
        assert_non_null(strstr(error, "points outside"));
        llm_tokenizer_free(t);
        free(base64.at);
        free(json.at);
    }
}

/* -- files that take all memory or time -- */

/* A text of 64 MiB at most, so a bomb that is not refused ends, too. */
static llm_text made_of(const char *before, const char *step, int steps, const char *after) {
    llm_tokenizer none;
    llm_text text = {NULL, 0, 0};
    int i;
    memset(&none, 0, sizeof none);
    assert_true(llm_puts(&none, &text, before));
    for (i = 0; i < steps; i++)
        assert_true((!i || llm_puts(&none, &text, ",")) && llm_puts(&none, &text, step));
    assert_true(llm_puts(&none, &text, after));
    return text;
}

#define DOUBLE                                                                                     \
    "{\"type\":\"Replace\",\"pattern\":{\"String\":\"a\"},\"content\":\"aa\"}"

/* Steps that multiply a text are refused, wherever they stand; the same steps, few of them, not. */
static void bombs_are_refused(void **state) {
    static const struct {
        const char *before, *step, *after, *text;
    } bombs[] = {
        {"{\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[", DOUBLE, "]}," MODEL "}", "a"},
        {"{\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[",
         "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false}", "]}," MODEL "}",
         "\xC3\xA9"},
        {"{\"decoder\":{\"type\":\"Sequence\",\"decoders\":[", DOUBLE, "]}," MODEL "}", "a"},
        {"{\"added_tokens\":[{\"id\":1,\"content\":\"b\",\"normalized\":false}],"
         "\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[", DOUBLE, "]}," MODEL "}",
         "babababababababababab"}};
    char error[256];
    size_t i, n;
    int many;
    (void)state;
    for (i = 0; i < sizeof bombs / sizeof *bombs; i++)
        for (many = 0; many < 2; many++) {
            llm_text json = made_of(bombs[i].before, bombs[i].step, many ? 24 : 4, bombs[i].after);
            llm_tokenizer *t = llm_tokenizer_read(json.at, json.length, "t.json", error,
                                                  sizeof error);
            int32_t *ids = NULL;
            int64_t count = -1;
            char *text = NULL;
            if (!t) fail_msg("%s", error);
            count = llm_tokenizer_encode(t, bombs[i].text, strlen(bombs[i].text), 0, &ids);
            if (count >= 0) text = llm_tokenizer_decode(t, ids, (size_t)count, 1, &n);
            if ((text == NULL) != many) fail_msg("bomb %d: %d ids", (int)i, (int)count);
            if (many) assert_non_null(strstr(llm_tokenizer_error(t), "is refused"));
            free(ids);
            free(text);
            free(json.at);
            llm_tokenizer_free(t);
        }
}

/* A token that is normalized when the file is read may not multiply, either. */
static void added_tokens_may_not_multiply(void **state) {
    llm_text json = made_of("{\"added_tokens\":[{\"id\":9,\"content\":\"aaaa\","
                            "\"normalized\":true}],\"normalizer\":{\"type\":\"Sequence\","
                            "\"normalizers\":[",
                            DOUBLE, 24, "]}," MODEL "}");
    char error[256];
    (void)state;
    assert_null(llm_tokenizer_read(json.at, json.length, "t.json", error, sizeof error));
    assert_non_null(strstr(error, "is refused"));
    free(json.at);
}

/* A tokenizer with `count` added tokens of one beginning; *seconds: how long reading took. */
static llm_tokenizer *with_added(int count, double *seconds) {
    llm_tokenizer none, *t;
    llm_text json = {NULL, 0, 0};
    char text[160], error[256];
    clock_t begin;
    int i;
    memset(&none, 0, sizeof none);
    assert_true(llm_puts(&none, &json, "{\"added_tokens\":["));
    for (i = 0; i < count; i++) {
        (void)snprintf(text, sizeof text, "%s{\"id\":%d,\"content\":\"<tok%d>\",\"normalized\":%s}",
                       i ? "," : "", 3 + i, i, i % 2 ? "true" : "false");
        assert_true(llm_puts(&none, &json, text));
    }
    assert_true(llm_puts(&none, &json, "]," MODEL "}"));
    begin = clock();
    t = llm_tokenizer_read(json.at, json.length, "t.json", error, sizeof error);
    *seconds = (double)(clock() - begin) / CLOCKS_PER_SEC;
    if (!t) fail_msg("%s", error);
    free(json.at);
    return t;
}

/* 8 times as many added tokens take about 8 times as long, not 64 times. */
static void added_tokens_are_not_quadratic(void **state) {
    static const char text[] = "a<tok17>b<tok39999>ab<tok1><tok<tok40000>";
    static const int32_t want[] = {0, 20, 1, 40002, 2, 4};
    double few = 1e9, many, seconds;
    int32_t *ids;
    llm_tokenizer *t;
    int i;
    (void)state;
    for (i = 0; i < 5; i++) {
        llm_tokenizer_free(with_added(5000, &seconds));
        if (seconds < few) few = seconds;
    }
    t = with_added(40000, &many);
    if (many > 24 * few) fail_msg("40,000 take %g s, 5,000 %g s", many, few);
    assert_int_equal(llm_tokenizer_encode(t, text, sizeof text - 1, 0, &ids), 6);
    assert_memory_equal(ids, want, sizeof want);
    free(ids);
    llm_tokenizer_free(t);
}

/* The token that is found is the longest of the first place, the first of equals: by looking at
 * all. */
static void added_tokens_are_found(void **state) {
    llm_tokenizer none, *t;
    char error[256];
    uint32_t seed = 3;
    int round, i, k;
    (void)state;
    memset(&none, 0, sizeof none);
    for (round = 0; round < 40; round++) {
        llm_text json = {NULL, 0, 0};
        char text[64];
        assert_true(llm_puts(&none, &json, "{\"added_tokens\":["));
        for (i = 0; i < 30; i++) {
            char content[8] = "";
            for (k = 0; k <= (int)(seed >> 20) % 6; k++, seed = seed * 1664525u + 1013904223u)
                content[k] = "xyz"[(seed >> 24) % 3];
            content[k] = 0;
            (void)snprintf(text, sizeof text, "%s{\"id\":%d,\"content\":\"%s\"}", i ? "," : "",
                           3 + i, content);
            text[sizeof text - 1] = 0;
            assert_true(llm_puts(&none, &json, text));
        }
        assert_true(llm_puts(&none, &json, "]," MODEL "}"));
        t = llm_tokenizer_read(json.at, json.length, "t.json", error, sizeof error);
        if (!t) fail_msg("%s", error);
        for (i = 0; i < 50; i++, seed = seed * 1664525u + 1013904223u) {
            const llm_added *want = NULL, *got;
            size_t at = 0, n, a;
            llm_span found;
            for (n = 0; n < 12; n++, seed = seed * 1664525u + 1013904223u)
                text[n] = "wxyz"[(seed >> 24) % 4];
            got = llm_added_find(t, &t->normalized, text, n, 0, &found);
            for (; at < n && !want; at++)
                for (a = 0; a < t->added_count; a++) {
                    const llm_text *content = &t->added[a].content;
                    if (content->length <= n - at &&
                        memcmp(content->at, text + at, content->length) == 0 &&
                        (!want || content->length > want->content.length))
                        want = &t->added[a];
                }
            assert_ptr_equal(got, want);
            if (want) assert_int_equal(found.begin, at - 1);
        }
        free(json.at);
        llm_tokenizer_free(t);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(encoding_is_that_of_tokenizers),
        cmocka_unit_test(decoding_is_that_of_tokenizers),
        cmocka_unit_test(patterns_are_those_of_tokenizers),
        cmocka_unit_test(bytes_come_back),
        cmocka_unit_test(long_words_are_not_quadratic),
        cmocka_unit_test(many_merges_as_few),
        cmocka_unit_test(tokens_have_ids),
        cmocka_unit_test(files_that_lie_are_refused),
        cmocka_unit_test(charsmaps_that_lie_are_refused),
        cmocka_unit_test(bombs_are_refused),
        cmocka_unit_test(added_tokens_may_not_multiply),
        cmocka_unit_test(added_tokens_are_not_quadratic),
        cmocka_unit_test(added_tokens_are_found),
    };
    return cmocka_run_group_tests_name("tokenizer", tests, NULL, NULL);
}
