/* gguf_tokenizer.h - converts the tokenizer of a GGUF file to the text of a tokenizer.json, which
 * tokenizer.h reads. Include tshard.h first. */
#ifndef LLM_GGUF_TOKENIZER_H
#define LLM_GGUF_TOKENIZER_H

#include "gguf.h"

/* The values of tokenizer.ggml.token_type. */
enum { GGUF_NORMAL = 1, GGUF_UNKNOWN, GGUF_CONTROL, GGUF_USER, GGUF_UNUSED, GGUF_BYTE };

/* Returns the bool of a key; `otherwise` if it is missing; 0 and an error if it is something
 * else. */
static int gguf_flag(gguf *g, const char *key, int otherwise) {
    const gguf_pair *pair = gguf_find(g, key);
    if (pair && pair->type != GGUF_BOOL) return gguf_fail(g, "the key \"%s\" is no bool", key);
    return pair ? gguf_element(pair, 0) != 0 : otherwise;
}

/* Returns the entry of a key whose value is an array of strings (`strings` is 1) or of numbers (0);
 * NULL: the key is missing, or, with an error, its value is something else. */
static const gguf_pair *gguf_array(gguf *g, const char *key, int strings) {
    const gguf_pair *pair = gguf_find(g, key);
    if (!pair) return NULL;
    if (pair->type == GGUF_ARRAY && (strings ? pair->of == GGUF_STRING : gguf_is_number(pair->of)))
        return pair;
    (void)gguf_fail(g, "the key \"%s\" is no array of %s", key, strings ? "strings" : "numbers");
    return NULL;
}

/* -- pre-tokenizers of llama.cpp, by name ------------------------------------- */

/* The regular expression by which GPT-4's tokenizer splits a text into words. digits: quantifier of
 * \p{N}, such as "{1,3}": how many digits one match has. */
#define GGUF_GPT4(digits)                                                                          \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}" digits                     \
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
/* As GGUF_GPT4, with one digit in a match, and combining marks (\p{M}) among the letters. */
#define GGUF_GPT4_MARKS                                                                            \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}"                    \
    "| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define GGUF_GPT2                                                                                  \
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)"
#define GGUF_UPPER "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define GGUF_LOWER "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
#define GGUF_CASED(ends, digits)                                                                   \
    "[^\\r\\n\\p{L}\\p{N}]?" GGUF_UPPER "*" GGUF_LOWER "+" ends                                    \
    "|[^\\r\\n\\p{L}\\p{N}]?" GGUF_UPPER "+" GGUF_LOWER "*" ends "|\\p{N}" digits                  \
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

#define GGUF_DEEPSEEK_LETTERS                                                                      \
    "A-Za-z\\x{B5}\\x{C0}-\\x{D6}\\x{D8}-\\x{F6}\\x{F8}-\\x{1BA}\\x{1BC}-\\x{1BF}"                 \
    "\\x{1C4}-\\x{293}\\x{295}-\\x{2AF}\\x{370}-\\x{373}\\x{376}\\x{377}\\x{37B}-\\x{37D}\\x{37F}" \
    "\\x{386}\\x{388}-\\x{38A}\\x{38C}\\x{38E}-\\x{3A1}\\x{3A3}-\\x{3F5}\\x{3F7}-\\x{481}"         \
    "\\x{48A}-\\x{52F}\\x{531}-\\x{556}\\x{10A0}-\\x{10C5}\\x{13A0}-\\x{13F5}\\x{13F8}-\\x{13FD}"  \
    "\\x{1C90}-\\x{1CBA}\\x{1CBD}-\\x{1CBF}\\x{1D00}-\\x{1D2B}\\x{1D6B}-\\x{1D77}"                 \
    "\\x{1D79}-\\x{1D9A}\\x{1E00}-\\x{1F15}\\x{1F18}-\\x{1F1D}\\x{1F20}-\\x{1F45}"                 \
    "\\x{1F48}-\\x{1F4D}\\x{1F50}-\\x{1F57}\\x{1F59}\\x{1F5B}\\x{1F5D}\\x{1F5F}-\\x{1F7D}"         \
    "\\x{1F80}-\\x{1FB4}\\x{1FB6}-\\x{1FBC}\\x{1FBE}\\x{1FC2}-\\x{1FC4}\\x{1FC6}-\\x{1FCC}"        \
    "\\x{1FD0}-\\x{1FD3}\\x{1FD6}-\\x{1FDB}\\x{1FE0}-\\x{1FEC}\\x{1FF2}-\\x{1FF4}"                 \
    "\\x{1FF6}-\\x{1FFC}\\x{2102}\\x{2107}\\x{210A}-\\x{2113}\\x{2115}\\x{2119}-\\x{211D}"         \
    "\\x{2124}\\x{2126}\\x{2128}\\x{212A}-\\x{212D}\\x{212F}-\\x{2134}\\x{2139}"                   \
    "\\x{213C}-\\x{213F}\\x{2145}-\\x{2149}\\x{214E}\\x{2183}\\x{2184}\\x{2C00}-\\x{2C7B}"         \
    "\\x{2C7E}-\\x{2CE4}\\x{2CEB}-\\x{2CEE}\\x{2CF2}\\x{2CF3}\\x{A640}-\\x{A66D}"                  \
    "\\x{A680}-\\x{A69B}\\x{A722}-\\x{A76F}\\x{A771}-\\x{A787}\\x{A78B}-\\x{A78E}"                 \
    "\\x{AB70}-\\x{ABBF}\\x{FB00}-\\x{FB06}\\x{FB13}-\\x{FB17}\\x{FF21}-\\x{FF3A}"                 \
    "\\x{FF41}-\\x{FF5A}\\x{10400}-\\x{1044F}\\x{104B0}-\\x{104D3}\\x{104D8}-\\x{104FB}"           \
    "\\x{10C80}-\\x{10CB2}\\x{10CC0}-\\x{10CF2}\\x{118A0}-\\x{118DF}\\x{1E900}-\\x{1E943}"
#define GGUF_DEEPSEEK_SIGNS                                                                        \
    "!-/:-~\\x{FF01}-\\x{FF0F}\\x{FF1A}-\\x{FF5E}\\x{2018}-\\x{201F}\\x{3000}-\\x{3002}"
#define GGUF_EAST_ASIAN "[\\x{4E00}-\\x{9FA5}\\x{800}-\\x{4E00}\\x{AC00}-\\x{D7FF}]+"
#define GGUF_DEEPSEEK3                                                                             \
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"                                        \
    "|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\\r\\n]*"                      \
    "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define GGUF_BLOOM                                                                                 \
    " ?[^(\\s|.,!?\\x{2026}\\x{3002}\\x{FF0C}\\x{3001}\\x{964}\\x{6D4}\\x{60C})]+"

/* How byte-level BPE splits a text into words before it merges bytes: at the matches of each
 * pattern, one pattern after the other. names: llama.cpp's names for it, values of
 * tokenizer.ggml.pre, separated by blanks. */
typedef struct gguf_pre {
    const char *names;
    const char *patterns[7]; /* regular expressions, NULL after the last; none: GPT-2's */
    int digits;              /* 1: each digit is split off, before the patterns */
    int whole;               /* 1: a word that is a token as a whole is not merged from parts */
    int begins;              /* 1: without the key add_bos_token, the bos token begins a text */
    int composes;            /* 1: the text is normalized to NFC first */
} gguf_pre;

static const gguf_pre gguf_pres[] = {
    {"default", {"[\\p{P}\\$\\+<=>\\^~\\|]+", GGUF_GPT2, "\\p{N}+", "[0-9][0-9][0-9]"}, 0, 0, 0, 0},
    {"gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat mellum modern-bert "
     "a.x-4.0",
     {NULL}, 0, 0, 0, 0},
    {"smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", {NULL}, 1, 0, 0, 0},
    {"falcon", {"[\\p{P}\\$\\+<=>\\^~\\|`]+", GGUF_GPT2, "[0-9][0-9][0-9]"}, 0, 0, 0, 0},
    {"llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral lfm2 midm-2.0", {GGUF_GPT4("{1,3}")}, 0,
     1, 1, 0},
    {"glm4 glm5", {GGUF_GPT4("{1,3}")}, 0, 1, 0, 0},
    {"dbrx smaug-bpe chatglm-bpe", {GGUF_GPT4("{1,3}")}, 0, 0, 0, 0},
    {"qwen2 stablelm2 deepseek-r1-qwen megrez kormo", {GGUF_GPT4("")}, 0, 0, 0, 1},
    {"qwen35", {GGUF_GPT4_MARKS}, 0, 0, 0, 0},
    {"hunyuan grok-2 solar-open", {GGUF_GPT4("")}, 0, 0, 0, 0},
    {"gpt-4o llama4 kanana2", {GGUF_CASED("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "{1,3}")}, 0, 0, 0, 0},
    {"tekken", {GGUF_CASED("", "")}, 0, 1, 1, 0},
    {"deepseek-llm",
     {"[\\r\\n]", "\\s?[" GGUF_DEEPSEEK_LETTERS "]+", "\\s?[" GGUF_DEEPSEEK_SIGNS "]+",
      "\\s+$", GGUF_EAST_ASIAN, "\\p{N}+"},
     0, 0, 0, 0},
    {"deepseek-coder", {"[\\r\\n]", "\\s?\\p{L}+", "\\s?\\p{P}+", GGUF_EAST_ASIAN, "\\p{N}"}, 0, 0,
     0, 0},
    {"deepseek-v3 hunyuan-dense joyai-llm",
     {"\\p{N}{1,3}", "[\\x{4E00}-\\x{9FA5}\\x{3040}-\\x{309F}\\x{30A0}-\\x{30FF}]+",
      GGUF_DEEPSEEK3},
     0, 0, 0, 0},
    {"bloom poro-chat gpt3-finnish", {GGUF_BLOOM}, 0, 0, 0, 0},
    {"viking", {GGUF_BLOOM, "\\p{N}"}, 0, 0, 0, 0}};

/* Returns the row of gguf_pres with the name `given`, or, if that is NULL, with the name in the
 * file's key tokenizer.ggml.pre. NULL and an error: the name is not known. */
static const gguf_pre *gguf_find_pre(gguf *g, const char *given) {
    const gguf_string text = gguf_text(g, "tokenizer.ggml.pre");
    const size_t rows = sizeof gguf_pres / sizeof *gguf_pres;
    char name[64];
    size_t i;
    if (given) (void)snprintf(name, sizeof name, "%.60s", given);
    else (void)gguf_quote(text, name, sizeof name);
    if (!given && (!text.length || gguf_is(text, "default")))
        (void)snprintf(g->warning, sizeof g->warning,
                       "%.120s: tokenizer.ggml.pre is %s: texts are split by llama.cpp's default, "
                       "which is not the model's own way; --pre NAME sets that", g->path,
                       text.length ? "\"default\"" : "missing");
    if (!given && !text.length) return &gguf_pres[0];
    for (i = 0; i < rows; i++)
        if (gguf_listed(gguf_pres[i].names, name)) return &gguf_pres[i];
    (void)gguf_fail(g, "%s is \"%s\", which is not known; %sREADME.md lists the names",
                    given ? "--pre" : "the key \"tokenizer.ggml.pre\"", name,
                    given ? "" : "--pre NAME takes its place, ");
    return NULL;
}

/* -- making objects of JSON ------------------------------------------------- */

/* Returns a new JSON object {"type": type}. */
static cJSON *gguf_typed(gguf *g, const char *type) {
    cJSON *o = cJSON_CreateObject();
    gguf_put_string(g, o, "type", type);
    return o;
}

/* Adds {"type": "Sequence", name: []} to the tokenizer.json `file` under `key`. Returns the
 * array. */
static cJSON *gguf_put_sequence(gguf *g, cJSON *file, const char *key, const char *name) {
    cJSON *o = gguf_put(g, file, key, gguf_typed(g, "Sequence"));
    return gguf_put(g, o, name, cJSON_CreateArray());
}

/* Returns a new JSON object for a tokenizer step of the type "Replace" or "Split". kind: what its
 * `pattern` is, "String" or "Regex". */
static cJSON *gguf_pattern(gguf *g, const char *type, const char *kind, const char *pattern) {
    cJSON *o = gguf_typed(g, type);
    gguf_put_string(g, gguf_put(g, o, "pattern", cJSON_CreateObject()), kind, pattern);
    return o;
}

/* -- the vocabulary --------------------------------------------------------- */

/* The vocabulary: zero-terminated texts of the tokens, their types and scores. If several tokens
 * have the same text, only the last of them is used to encode a text, as in llama.cpp; an empty
 * token is never used. */
typedef struct gguf_words {
    gguf *g;
    char **text;           /* text[id]: the token's text */
    int32_t *order;        /* ids sorted by text, equal texts by id */
    const gguf_pair *type; /* tokenizer.ggml.token_type; NULL: all tokens are normal */
    /* tokenizer.ggml.scores; NULL: the file has none. */
    const gguf_pair *score;
    int32_t count;
} gguf_words;

/* Returns a token's type, GGUF_NORMAL ...; 0: the number in the file is below 0 or above 255. */
static int gguf_type_of(const gguf_words *w, int32_t id) {
    const double type = w->type ? gguf_element(w->type, (uint64_t)id) : GGUF_NORMAL;
    return type >= 0 && type < 256 ? (int)type : 0;
}

static void gguf_words_free(gguf_words *w) {
    if (w->text) free(w->text[0]);
    free(w->text);
    free(w->order);
}

/* Fills w->order with all token ids, sorted by text: merge sort, bottom up. Returns 0: not enough
 * memory. */
static int gguf_sort_words(gguf_words *w) {
    int32_t *from = w->order, *to = (int32_t *)malloc((size_t)w->count * sizeof *to), *swap;
    int32_t width, begin, i;
    if (!to) return 0;
    for (i = 0; i < w->count; i++) from[i] = i;
    for (width = 1; width < w->count; width *= 2) {
        for (begin = 0; begin < w->count; begin += 2 * width) {
            const int32_t middle = begin + width < w->count ? begin + width : w->count;
            const int32_t end = middle + width < w->count ? middle + width : w->count;
            int32_t a = begin, b = middle;
            for (i = begin; i < end; i++)
                to[i] = b >= end || (a < middle && strcmp(w->text[from[a]], w->text[from[b]]) <= 0)
                            ? from[a++]
                            : from[b++];
        }
        swap = from;
        from = to;
        to = swap;
    }
    w->order = from;
    free(to);
    return 1;
}

/* Reads the tokens, their types and scores into w. Returns 0 and an error if it cannot. */
static int gguf_read_words(gguf *g, gguf_words *w) {
    const gguf_pair *tokens = gguf_array(g, "tokenizer.ggml.tokens", 1);
    const unsigned char *at;
    size_t bytes = 0;
    char *text;
    int32_t i;
    memset(w, 0, sizeof *w);
    w->g = g;
    w->type = gguf_array(g, "tokenizer.ggml.token_type", 0);
    w->score = gguf_array(g, "tokenizer.ggml.scores", 0);
    if (!tokens || !tokens->count || tokens->count > 1 << 24)
        return gguf_fail(g, "the key \"tokenizer.ggml.tokens\" is missing, or has no tokens");
    w->count = (int32_t)tokens->count;
    if (w->type && w->type->count != tokens->count)
        return gguf_fail(g, "the key \"tokenizer.ggml.token_type\" has %llu numbers for %d tokens",
                         (unsigned long long)w->type->count, (int)w->count);
    if (w->score && w->score->count != tokens->count)
        return gguf_fail(g, "the key \"tokenizer.ggml.scores\" has %llu numbers for %d tokens",
                         (unsigned long long)w->score->count, (int)w->count);
    for (i = 0, at = tokens->at; i < w->count; i++) bytes += gguf_next(&at).length + 1;
    w->text = (char **)calloc((size_t)w->count, sizeof *w->text);
    w->order = (int32_t *)malloc((size_t)w->count * sizeof *w->order);
    text = w->text && w->order ? (char *)malloc(bytes) : NULL;
    if (!text) return gguf_fail(g, "not enough memory");
    for (i = 0, at = tokens->at; i < w->count; i++) {
        const gguf_string s = gguf_next(&at);
        w->text[i] = text;
        memcpy(text, s.at, s.length);
        text[s.length] = 0;
        if (strlen(text) != s.length)
            return gguf_fail(g, "the key \"tokenizer.ggml.tokens\": token %d holds the character "
                                "U+0000", (int)i);
        text += s.length + 1;
    }
    for (i = 0; w->score && i < w->count; i++)
        if (!isfinite(gguf_element(w->score, (uint64_t)i)))
            return gguf_fail(g, "the key \"tokenizer.ggml.scores\": the score of token %d is not "
                                "finite", (int)i);
    return gguf_sort_words(w) || gguf_fail(g, "not enough memory");
}

/* Returns the last id whose token, of any type, is the n bytes of `text`; -1: there is none. */
static int32_t gguf_last_word(const gguf_words *w, const char *text, size_t n) {
    /* binary search for the first entry of `order` whose token is larger than the text */
    int32_t low = 0, high = w->count;
    while (low < high) {
        const int32_t middle = low + (high - low) / 2, id = w->order[middle];
        const int order = strncmp(w->text[id], text, n);
        if (order < 0 || (order == 0 && !w->text[id][n])) low = middle + 1;
        else high = middle;
    }
    if (!low) return -1;
    low = w->order[low - 1];
    return strncmp(w->text[low], text, n) == 0 && !w->text[low][n] ? low : -1;
}

/* Returns the last id whose token is the n bytes of `text`, if that token is normal; else -1. */
static int32_t gguf_word_id(const gguf_words *w, const char *text, size_t n) {
    const int32_t id = gguf_last_word(w, text, n);
    return id >= 0 && gguf_type_of(w, id) == GGUF_NORMAL ? id : -1;
}

/* -- merges of SentencePiece -------------------------------------------------- */

/* Two tokens that SentencePiece joins to one, whose score is `score`. Pairs with a higher score are
 * joined first. */
typedef struct gguf_merge {
    double score;
    /* left, right: ids of the two tokens; lefts, rights: their lengths in characters */
    int32_t left, right, lefts, rights;
    int32_t order; /* the pair's index before pairs are sorted, the last tie-breaker */
} gguf_merge;

static int gguf_by_score(const void *a, const void *b) {
    const gguf_merge *x = (const gguf_merge *)a, *y = (const gguf_merge *)b;
    if (x->score > y->score || x->score < y->score) return x->score > y->score ? -1 : 1;
    if (x->lefts != y->lefts) return x->lefts > y->lefts ? -1 : 1;
    if (x->rights != y->rights) return x->rights > y->rights ? -1 : 1;
    return (x->order > y->order) - (x->order < y->order);
}

/* Compares two pairs that make the same token, for qsort: by the ids of the two parts. */
static int gguf_by_parts(const void *a, const void *b) {
    const gguf_merge *x = (const gguf_merge *)a, *y = (const gguf_merge *)b;
    if (x->left != y->left) return x->left < y->left ? -1 : 1;
    return (x->right > y->right) - (x->right < y->right);
}

/* Appends to *all each pair of normal tokens whose texts together are that of token `id`. count:
 * pairs in *all so far; *room: its capacity. Returns the new count; -1: not enough memory. */
static int64_t gguf_add_merges(const gguf_words *w, int32_t id, gguf_merge **all, size_t *room,
                               int64_t count) {
    const char *text = w->text[id];
    const size_t length = strlen(text);
    const int64_t first = count;
    int32_t chars = 0, total = 0;
    size_t i;
    for (i = 0; i < length; i++) total += ((unsigned char)text[i] & 0xC0) != 0x80;
    for (i = 1; i < length; i++) {
        gguf_merge m;
        chars += ((unsigned char)text[i - 1] & 0xC0) != 0x80;
        if (((unsigned char)text[i] & 0xC0) == 0x80) continue; /* byte i is within a character */
        m.left = gguf_word_id(w, text, i);
        m.right = m.left < 0 ? -1 : gguf_word_id(w, text + i, length - i);
        if (m.right < 0) continue;
        m.score = gguf_element(w->score, (uint64_t)id);
        m.lefts = chars;
        m.rights = total - chars;
        m.order = 0;
        if ((size_t)count == *room) {
            gguf_merge *more = (gguf_merge *)realloc(*all, (*room = 2 * *room + 1024) * sizeof m);
            if (!more) return -1;
            *all = more;
        }
        (*all)[count++] = m;
    }
    if (count - first > 1)
        qsort(*all + first, (size_t)(count - first), sizeof **all, gguf_by_parts);
    return count;
}

/* Adds to the tokenizer.json's `model` the merges that the scores imply: SentencePiece joins the
 * two tokens whose result has the highest score. Of equal scores, the pair with the longer left
 * part comes first, then that with the longer right part, as in transformers. */
static int gguf_score_merges(gguf *g, const gguf_words *w, cJSON *model) {
    gguf_merge *all = NULL;
    size_t room = 0;
    int64_t count = 0, i;
    int32_t id;
    cJSON *list = gguf_put(g, model, "merges", cJSON_CreateArray());
    if (!w->score) return gguf_fail(g, "the key \"tokenizer.ggml.scores\" is missing");
    for (id = 0; id < w->count && count >= 0; id++)
        if (gguf_type_of(w, id) == GGUF_NORMAL) count = gguf_add_merges(w, id, &all, &room, count);
    for (i = 0; i < count; i++) all[i].order = (int32_t)i;
    if (count > 0) qsort(all, (size_t)count, sizeof *all, gguf_by_score);
    for (i = 0; i < count && !g->error[0]; i++) {
        cJSON *pair = gguf_push(g, list, cJSON_CreateArray());
        (void)gguf_push(g, pair, cJSON_CreateString(w->text[all[i].left]));
        (void)gguf_push(g, pair, cJSON_CreateString(w->text[all[i].right]));
    }
    free(all);
    if (count < 0) (void)gguf_fail(g, "not enough memory");
    return !g->error[0];
}

/* -- the parts of a tokenizer.json, put together ------------------------------ */

/* Returns the token id that `key` has as its value; -1: the key is missing, or, with an error,
 * there is no such token. */
static int32_t gguf_special(gguf *g, const gguf_words *w, const char *key) {
    const int64_t id = gguf_find(g, key) ? gguf_count(g, key, INT32_MAX, -1) : -1;
    if (id >= w->count)
        (void)gguf_fail(g, "the key \"%s\" is %lld, and there are %d tokens", key, (long long)id,
                        (int)w->count);
    return id < w->count ? (int32_t)id : -1;
}

static void gguf_put_model(const gguf_words *w, cJSON *model) {
    cJSON *vocabulary = gguf_put(w->g, model, "vocab", cJSON_CreateObject());
    int32_t id;
    for (id = 0; id < w->count && !w->g->error[0]; id++) {
        cJSON *number = cJSON_CreateNumber((double)id);
        if (number && cJSON_AddItemToObjectCS(vocabulary, w->text[id], number)) continue;
        cJSON_Delete(number);
        (void)gguf_fail(w->g, "not enough memory");
    }
}

/* Adds "added_tokens" to the tokenizer.json `file`: control tokens, unknown tokens and those of the
 * user, which are found in a text as they are. */
static void gguf_put_added(const gguf_words *w, cJSON *file) {
    cJSON *list = gguf_put(w->g, file, "added_tokens", cJSON_CreateArray());
    int32_t id;
    for (id = 0; id < w->count && !w->g->error[0]; id++) {
        const int type = gguf_type_of(w, id);
        cJSON *o;
        if (type != GGUF_CONTROL && type != GGUF_USER && type != GGUF_UNKNOWN) continue;
        if (gguf_last_word(w, w->text[id], strlen(w->text[id])) != id) continue;
        o = gguf_push(w->g, list, cJSON_CreateObject());
        gguf_put_number(w->g, o, "id", (double)id);
        gguf_put_string(w->g, o, "content", w->text[id]);
        gguf_put_flag(w->g, o, "normalized", 0);
        gguf_put_flag(w->g, o, "special", type != GGUF_USER);
    }
}

/* Adds the post-processor to the tokenizer.json `file`: it puts the bos token before a text and the
 * eos token after it, as the GGUF file says. begins: 1: without the key add_bos_token, a text
 * begins with bos. */
static void gguf_put_template(gguf *g, const gguf_words *w, cJSON *file, int begins) {
    static const char *const keys[] = {"tokenizer.ggml.bos_token_id", "",
                                       "tokenizer.ggml.eos_token_id"};
    const int adds[] = {gguf_flag(g, "tokenizer.ggml.add_bos_token", begins), 1,
                        gguf_flag(g, "tokenizer.ggml.add_eos_token", 0)};
    cJSON *o, *single, *special;
    int i;
    if (!adds[0] && !adds[2]) return;
    o = gguf_put(g, file, "post_processor", gguf_typed(g, "TemplateProcessing"));
    single = gguf_put(g, o, "single", cJSON_CreateArray());
    special = gguf_put(g, o, "special_tokens", cJSON_CreateObject());
    for (i = 0; i < 3; i++) {
        const int32_t id = i == 1 || !adds[i] ? -1 : gguf_special(g, w, keys[i]);
        cJSON *part, *named;
        if (!adds[i]) continue;
        if (i != 1 && id < 0) {
            (void)gguf_fail(g, "the key \"%s\" is missing, and a text %s with that token", keys[i],
                            i ? "ends" : "begins");
            return;
        }
        part = gguf_push(g, single, cJSON_CreateObject());
        named = gguf_put(g, part, i == 1 ? "Sequence" : "SpecialToken", cJSON_CreateObject());
        gguf_put_string(g, named, "id", i == 1 ? "A" : w->text[id]);
        if (i == 1) continue;
        named = gguf_put(g, special, w->text[id], cJSON_CreateObject());
        named = gguf_put(g, named, "ids", cJSON_CreateArray());
        (void)gguf_push(g, named, cJSON_CreateNumber((double)id));
    }
}

/* Adds the GGUF file's merges to the tokenizer.json's `model`, each as one string of two tokens.
 * Returns 0 on error. */
static int gguf_put_merges(gguf *g, cJSON *model) {
    const gguf_pair *merges = gguf_array(g, "tokenizer.ggml.merges", 1);
    cJSON *list = gguf_put(g, model, "merges", cJSON_CreateArray());
    const unsigned char *at = merges ? merges->at : NULL;
    uint64_t i;
    if (!merges) return gguf_fail(g, "the key \"tokenizer.ggml.merges\" is missing");
    for (i = 0; i < merges->count && !g->error[0]; i++) {
        const gguf_string s = gguf_next(&at);
        char *text = (char *)malloc(s.length + 1);
        if (!text) return gguf_fail(g, "not enough memory");
        memcpy(text, s.at, s.length);
        text[s.length] = 0;
        (void)gguf_push(g, list, cJSON_CreateString(text));
        free(text);
    }
    return !g->error[0];
}

/* Adds what byte-level BPE (tokenizer.ggml.model "gpt2") needs to the tokenizer.json `file`, and
 * its merges to `model`. name: the pre-tokenizer's name; NULL: the one that the GGUF file names. */
static int gguf_put_bytes(gguf *g, const gguf_words *w, cJSON *file, cJSON *model,
                          const char *name) {
    const gguf_pre *pre = gguf_find_pre(g, name);
    cJSON *step, *split;
    size_t i;
    if (!pre || !gguf_put_merges(g, model)) return 0;
    if (pre->composes) (void)gguf_put(g, file, "normalizer", gguf_typed(g, "NFC"));
    gguf_put_flag(g, model, "ignore_merges", pre->whole);
    split = gguf_put_sequence(g, file, "pre_tokenizer", "pretokenizers");
    if (pre->digits) {
        step = gguf_push(g, split, gguf_typed(g, "Digits"));
        gguf_put_flag(g, step, "individual_digits", 1);
    }
    for (i = 0; i < sizeof pre->patterns / sizeof *pre->patterns && pre->patterns[i]; i++) {
        step = gguf_push(g, split, gguf_pattern(g, "Split", "Regex", pre->patterns[i]));
        gguf_put_string(g, step, "behavior", "Isolated");
        gguf_put_flag(g, step, "invert", 0);
    }
    step = gguf_push(g, split, gguf_typed(g, "ByteLevel"));
    gguf_put_flag(g, step, "add_prefix_space", gguf_flag(g, "tokenizer.ggml.add_space_prefix", 0));
    gguf_put_flag(g, step, "use_regex", !pre->patterns[0]);
    (void)gguf_put(g, file, "decoder", gguf_typed(g, "ByteLevel"));
    gguf_put_template(g, w, file, pre->begins);
    return !g->error[0];
}

/* Adds SentencePiece's normalizer and decoder to the tokenizer.json `file`: a space is U+2581 in
 * tokens, and tokens <0x..> are bytes. prefix: 1 puts a space before each text. */
static void gguf_put_spaces(gguf *g, cJSON *file, int prefix) {
    cJSON *list = gguf_put_sequence(g, file, "normalizer", "normalizers"), *step;
    if (prefix) {
        step = gguf_push(g, list, gguf_typed(g, "Prepend"));
        gguf_put_string(g, step, "prepend", "\xE2\x96\x81");
    }
    step = gguf_push(g, list, gguf_pattern(g, "Replace", "String", " "));
    gguf_put_string(g, step, "content", "\xE2\x96\x81");
    list = gguf_put_sequence(g, file, "decoder", "decoders");
    step = gguf_push(g, list, gguf_pattern(g, "Replace", "String", "\xE2\x96\x81"));
    gguf_put_string(g, step, "content", " ");
    (void)gguf_push(g, list, gguf_typed(g, "ByteFallback"));
    (void)gguf_push(g, list, gguf_typed(g, "Fuse"));
    if (!prefix) return;
    step = gguf_push(g, list, gguf_typed(g, "Strip"));
    gguf_put_string(g, step, "content", " ");
    gguf_put_number(g, step, "start", 1);
    gguf_put_number(g, step, "stop", 0);
}

/* Adds what SentencePiece's BPE with byte fallback (tokenizer.ggml.model "llama") needs to the
 * tokenizer.json `file` and to its `model`. Returns 0 on error. */
static int gguf_put_pieces(gguf *g, const gguf_words *w, cJSON *file, cJSON *model) {
    int32_t id;
    int bytes = 0;
    for (id = 0; id < w->count; id++) {
        const int type = gguf_type_of(w, id);
        bytes += type == GGUF_BYTE;
        if (type == GGUF_UNKNOWN) gguf_put_string(g, model, "unk_token", w->text[id]);
    }
    gguf_put_flag(g, model, "byte_fallback", bytes > 0);
    gguf_put_flag(g, model, "fuse_unk", 1);
    gguf_put_spaces(g, file, gguf_flag(g, "tokenizer.ggml.add_space_prefix", 1));
    if (!gguf_score_merges(g, w, model)) return 0;
    gguf_put_template(g, w, file, 1);
    return !g->error[0];
}

/* Adds what BPE on characters with byte fallback (tokenizer.ggml.model "gemma4") needs to the
 * tokenizer.json `file` and to its `model`. It splits a text into lines first; the merges are in
 * the GGUF file. Returns 0 on error. */
static int gguf_put_lines(gguf *g, const gguf_words *w, cJSON *file, cJSON *model) {
    cJSON *step;
    gguf_put_flag(g, model, "byte_fallback", 1);
    gguf_put_spaces(g, file, gguf_flag(g, "tokenizer.ggml.add_space_prefix", 0));
    step = gguf_put(g, file, "pre_tokenizer",
                    gguf_pattern(g, "Split", "Regex", "[^\\n]+|[\\n]+"));
    gguf_put_string(g, step, "behavior", "Isolated");
    gguf_put_flag(g, step, "invert", 0);
    if (!gguf_put_merges(g, model)) return 0;
    gguf_put_template(g, w, file, 1);
    return !g->error[0];
}

/* Adds WordPiece's vocabulary to the tokenizer.json's `model`, with tokens renamed: llama.cpp marks
 * tokens that begin a word by U+2581 before them, BERT marks the others by "##". Tokens in
 * brackets, such as [CLS], are the same in both. */
static int gguf_put_word_pieces(const gguf_words *w, cJSON *model) {
    cJSON *vocabulary = gguf_put(w->g, model, "vocab", cJSON_CreateObject());
    int32_t id;
    for (id = 0; id < w->count && !w->g->error[0]; id++) {
        const char *text = w->text[id];
        const size_t n = strlen(text);
        const int begins = strncmp(text, "\xE2\x96\x81", 3) == 0;
        const int same = begins || (n > 1 && text[0] == '[' && text[n - 1] == ']');
        char *name = (char *)malloc(n + 3);
        if (!name) return gguf_fail(w->g, "not enough memory");
        (void)snprintf(name, n + 3, "%s%s", same ? "" : "##", text + (begins ? 3 : 0));
        gguf_put_number(w->g, vocabulary, name, (double)id);
        free(name);
    }
    return !w->g->error[0];
}

/* Returns the text of the token whose id is the value of `key`, or, if the key is missing, of the
 * token `usual`, llama.cpp's default. */
static const char *gguf_bert_special(gguf *g, const gguf_words *w, const char *key, int32_t usual) {
    const int32_t id = gguf_find(g, key) ? gguf_special(g, w, key) : usual;
    if (id >= w->count) (void)gguf_fail(g, "the key \"%s\" is missing", key);
    return id >= 0 && id < w->count ? w->text[id] : "";
}

/* Adds "key": [text, id] to the BertProcessing o, such as "cls": ["[CLS]", 101]. */
static void gguf_put_end(gguf *g, const gguf_words *w, cJSON *o, const char *key,
                         const char *text) {
    cJSON *pair = gguf_put(g, o, key, cJSON_CreateArray());
    (void)gguf_push(g, pair, cJSON_CreateString(text));
    (void)gguf_push(g, pair, cJSON_CreateNumber((double)gguf_last_word(w, text, strlen(text))));
}

/* Adds what WordPiece (tokenizer.ggml.model "bert") needs to the tokenizer.json `file` and to its
 * `model`. Returns 0 on error. */
static int gguf_put_bert(gguf *g, const gguf_words *w, cJSON *file, cJSON *model) {
    const int lower = gguf_flag(g, "tokenizer.ggml.normalizer.lowercase", 1);
    const char *const begin = gguf_find(g, "tokenizer.ggml.cls_token_id")
                                  ? "tokenizer.ggml.cls_token_id"
                                  : "tokenizer.ggml.bos_token_id";
    cJSON *o = gguf_put(g, file, "normalizer", gguf_typed(g, "BertNormalizer"));
    gguf_put_flag(g, o, "clean_text", 1);
    gguf_put_flag(g, o, "handle_chinese_chars", 1);
    gguf_put_flag(g, o, "lowercase", lower);
    gguf_put_flag(g, o, "strip_accents",
                  gguf_flag(g, "tokenizer.ggml.normalizer.strip_accents", lower));
    (void)gguf_put(g, file, "pre_tokenizer", gguf_typed(g, "BertPreTokenizer"));
    o = gguf_put(g, file, "post_processor", gguf_typed(g, "BertProcessing"));
    gguf_put_end(g, w, o, "cls", gguf_bert_special(g, w, begin, 101));
    gguf_put_end(g, w, o, "sep",
                 gguf_bert_special(g, w, "tokenizer.ggml.seperator_token_id", 102));
    o = gguf_put(g, file, "decoder", gguf_typed(g, "WordPiece"));
    gguf_put_string(g, o, "prefix", "##");
    gguf_put_flag(g, o, "cleanup", 1);
    gguf_put_string(g, model, "continuing_subword_prefix", "##");
    gguf_put_string(g, model, "unk_token",
                    gguf_bert_special(g, w, "tokenizer.ggml.unknown_token_id", 100));
    gguf_put_number(g, model, "max_input_chars_per_word", 1e9); /* no limit, as in llama.cpp */
    return gguf_put_word_pieces(w, model);
}

/* Fills in the tokenizer.json `file`, by the kind of tokenizer in tokenizer.ggml.model. pre: name
 * of the pre-tokenizer; NULL: as the GGUF file says. Returns 0 and an error if it cannot. */
static int gguf_put_tokenizer(gguf *g, const gguf_words *w, cJSON *file, const char *pre) {
    const gguf_string kind = gguf_text(g, "tokenizer.ggml.model");
    const int bert = gguf_is(kind, "bert"), bytes = gguf_is(kind, "gpt2");
    cJSON *model = gguf_put(g, file, "model", gguf_typed(g, bert ? "WordPiece" : "BPE"));
    char quote[64];
    (void)gguf_quote(kind, quote, sizeof quote);
    if (!bytes && pre)
        return gguf_fail(g, "--pre is for tokenizers of the model gpt2, and this one is \"%s\"",
                         quote);
    gguf_put_added(w, file);
    if (bert) return gguf_put_bert(g, w, file, model);
    gguf_put_model(w, model);
    return bytes                     ? gguf_put_bytes(g, w, file, model, pre)
           : gguf_is(kind, "gemma4") ? gguf_put_lines(g, w, file, model)
                                     : gguf_put_pieces(g, w, file, model);
}

/* Returns the GGUF file's tokenizer as the text of a tokenizer.json, to be freed with cJSON_free;
 * NULL and an error in g->error. pre: name of the pre-tokenizer; NULL: the one that the file
 * names. */
GGUF_API char *gguf_tokenizer(gguf *g, const char *pre) {
    const gguf_string kind = gguf_text(g, "tokenizer.ggml.model");
    cJSON *file = cJSON_CreateObject();
    gguf_words words;
    char quote[64], *text = NULL;
    int ok = 0;
    memset(&words, 0, sizeof words);
    (void)gguf_quote(kind, quote, sizeof quote);
    if (!kind.length)
        (void)gguf_fail(g, "the key \"tokenizer.ggml.model\" is missing");
    else if (!gguf_listed("gpt2 llama bert gemma4", quote))
        (void)gguf_fail(g, "the key \"tokenizer.ggml.model\" is \"%s\"; known are gpt2, llama, "
                           "bert and gemma4", quote);
    else if (gguf_read_words(g, &words))
        ok = gguf_put_tokenizer(g, &words, file, pre);
    if (ok && !(text = cJSON_PrintUnformatted(file))) (void)gguf_fail(g, "not enough memory");
    cJSON_Delete(file);
    gguf_words_free(&words);
    return text;
}

/* Adds to the object `config`, as `name`, the text of the token whose id is the value of `key`;
 * nothing if there is no such token. */
static void gguf_put_token(gguf *g, cJSON *config, const char *name, const char *key) {
    const gguf_pair *tokens = gguf_array(g, "tokenizer.ggml.tokens", 1);
    int64_t id = gguf_find(g, key) ? gguf_count(g, key, INT32_MAX, -1) : -1;
    const unsigned char *at = tokens ? tokens->at : NULL;
    gguf_string text = {"", 0};
    char *copy;
    if (!tokens || id < 0 || (uint64_t)id >= tokens->count) return;
    for (; id >= 0; id--) text = gguf_next(&at);
    copy = (char *)calloc(text.length + 1, 1);
    if (copy) memcpy(copy, text.at, text.length);
    /* without memory copy is NULL, for which gguf_put_string records an error */
    gguf_put_string(g, config, name, copy);
    free(copy);
}

/* Returns what tokenizer_config.json would say about conversations, to be freed with cJSON_free:
 * the texts of the bos and eos tokens, and the chat template. NULL and an error in g->error. */
GGUF_API char *gguf_tokenizer_config(gguf *g) {
    cJSON *config = cJSON_CreateObject();
    size_t length;
    const char *jinja = gguf_chat_template(g, &length);
    char *copy = jinja ? (char *)calloc(length + 1, 1) : NULL, *text = NULL;
    if (copy) memcpy(copy, jinja, length);
    if (jinja) gguf_put_string(g, config, "chat_template", copy);
    gguf_put_token(g, config, "bos_token", "tokenizer.ggml.bos_token_id");
    gguf_put_token(g, config, "eos_token", "tokenizer.ggml.eos_token_id");
    if (!config || (!g->error[0] && !(text = cJSON_PrintUnformatted(config))))
        (void)gguf_fail(g, "not enough memory");
    cJSON_Delete(config);
    free(copy);
    return text;
}

#endif
