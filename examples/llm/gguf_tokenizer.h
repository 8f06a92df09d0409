/* gguf_tokenizer.h - the tokenizer of a GGUF file, as the tokenizer.json that tokenizer.h reads.
 * Include gguf.h first. */
#ifndef LLM_GGUF_TOKENIZER_H
#define LLM_GGUF_TOKENIZER_H

/* Types of tokens. */
enum { GGUF_NORMAL = 1, GGUF_UNKNOWN, GGUF_CONTROL, GGUF_USER, GGUF_UNUSED, GGUF_BYTE };

static int gguf_flag(gguf *g, const char *key, int otherwise) {
    const gguf_pair *pair = gguf_find(g, key);
    if (pair && pair->type != GGUF_BOOL) return gguf_fail(g, "the key \"%s\" is no bool", key);
    return pair ? gguf_element(pair, 0) != 0 : otherwise;
}

/* An array of numbers or strings; NULL: absent, or, with an error, something else. */
static const gguf_pair *gguf_array(gguf *g, const char *key, int strings) {
    const gguf_pair *pair = gguf_find(g, key);
    if (!pair) return NULL;
    if (pair->type == GGUF_ARRAY && (strings ? pair->of == GGUF_STRING : gguf_is_number(pair->of)))
        return pair;
    (void)gguf_fail(g, "the key \"%s\" is no array of %s", key, strings ? "strings" : "numbers");
    return NULL;
}

/* -- pre-tokenizers, by name -------------------------------------------------- */

#define GGUF_GPT4(digits)                                                                          \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}" digits                     \
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define GGUF_UPPER "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define GGUF_LOWER "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
#define GGUF_CASED(ends, digits)                                                                   \
    "[^\\r\\n\\p{L}\\p{N}]?" GGUF_UPPER "*" GGUF_LOWER "+" ends                                    \
    "|[^\\r\\n\\p{L}\\p{N}]?" GGUF_UPPER "+" GGUF_LOWER "*" ends "|\\p{N}" digits                  \
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

/* How byte-level BPE splits a text before it merges: at the matches of a pattern, or of GPT-2's. */
typedef struct gguf_pre {
    const char *names;
    const char *pattern; /* NULL: GPT-2's */
    int digits;          /* 1: digits stand alone, before that */
    int whole;           /* 1: a word that is a token is not merged */
    int begins;          /* 1: without add_bos_token, a text begins with a token, too */
    int composes;        /* 1: NFC first */
} gguf_pre;

static const gguf_pre gguf_pres[] = {
    {"gpt-2 phi-2 mpt olmo jais", NULL, 0, 0, 0, 0},
    {"smollm starcoder refact command-r codeshell exaone minerva-7b", NULL, 1, 0, 0, 0},
    {"llama-bpe llama3 llama-v3", GGUF_GPT4("{1,3}"), 0, 1, 1, 0},
    {"dbrx smaug-bpe", GGUF_GPT4("{1,3}"), 0, 0, 0, 0},
    {"qwen2 stablelm2 deepseek-r1-qwen megrez", GGUF_GPT4(""), 0, 0, 0, 1},
    {"gpt-4o", GGUF_CASED("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "{1,3}"), 0, 0, 0, 0},
    {"tekken", GGUF_CASED("", ""), 0, 1, 1, 0}};

static const gguf_pre *gguf_find_pre(gguf *g) {
    const gguf_string text = gguf_text(g, "tokenizer.ggml.pre");
    char name[64], known[320] = "";
    size_t i, n = 0;
    (void)gguf_quote(text, name, sizeof name);
    for (i = 0; i < sizeof gguf_pres / sizeof *gguf_pres; i++) {
        if (gguf_listed(gguf_pres[i].names, name)) return &gguf_pres[i];
        n += (size_t)snprintf(known + n, sizeof known - n, "%s%s", i ? " " : "",
                              gguf_pres[i].names);
    }
    if (!text.length) (void)gguf_fail(g, "the key \"tokenizer.ggml.pre\" is missing");
    (void)gguf_fail(g, "the key \"tokenizer.ggml.pre\" is \"%s\", which is not known; known are %s",
                    name, known);
    return NULL;
}

/* -- JSON ------------------------------------------------------------------- */

/* An object with a type. */
static cJSON *gguf_typed(gguf *g, const char *type) {
    cJSON *o = cJSON_CreateObject();
    gguf_put_string(g, o, "type", type);
    return o;
}

/* Puts {"type": "Sequence", name: []} under a key of the file. Returns the array. */
static cJSON *gguf_put_sequence(gguf *g, cJSON *file, const char *key, const char *name) {
    cJSON *o = gguf_put(g, file, key, gguf_typed(g, "Sequence"));
    return gguf_put(g, o, name, cJSON_CreateArray());
}

/* A Replace or Split. */
static cJSON *gguf_pattern(gguf *g, const char *type, const char *kind, const char *pattern) {
    cJSON *o = gguf_typed(g, type);
    gguf_put_string(g, gguf_put(g, o, "pattern", cJSON_CreateObject()), kind, pattern);
    return o;
}

/* -- the vocabulary --------------------------------------------------------- */

/* Tokens with a 0 at the end, and what is said of them. */
typedef struct gguf_words {
    gguf *g;
    char **text;           /* by id */
    int32_t *order;        /* ids sorted by text */
    const gguf_pair *type; /* NULL: all are normal */
    const gguf_pair *score;
    int32_t count;
} gguf_words;

/* 0: a number that is the type of no token. */
static int gguf_type_of(const gguf_words *w, int32_t id) {
    const double type = w->type ? gguf_element(w->type, (uint64_t)id) : GGUF_NORMAL;
    return type >= 0 && type < 256 ? (int)type : 0;
}

static void gguf_words_free(gguf_words *w) {
    if (w->text) free(w->text[0]);
    free(w->text);
    free(w->order);
}

/* Sorts ids by text: merges runs of doubled length. */
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

/* Reads the tokens; 0 and an error. */
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
        if (strlen(text) != s.length || !s.length)
            return gguf_fail(g, "the key \"tokenizer.ggml.tokens\": token %d %s", (int)i,
                             s.length ? "holds the character U+0000" : "is empty");
        text += s.length + 1;
    }
    if (!gguf_sort_words(w)) return gguf_fail(g, "not enough memory");
    for (i = 1; i < w->count; i++)
        if (strcmp(w->text[w->order[i - 1]], w->text[w->order[i]]) == 0)
            return gguf_fail(g, "the key \"tokenizer.ggml.tokens\" has \"%.40s\" twice",
                             w->text[w->order[i]]);
    return 1;
}

/* The id of a normal token of n bytes; -1: there is none. */
static int32_t gguf_word_id(const gguf_words *w, const char *text, size_t n) {
    int32_t low = 0, high = w->count;
    while (low < high) {
        const int32_t middle = low + (high - low) / 2, id = w->order[middle];
        const int order = strncmp(w->text[id], text, n);
        if (order == 0 && !w->text[id][n]) return gguf_type_of(w, id) == GGUF_NORMAL ? id : -1;
        if (order < 0) low = middle + 1;
        else high = middle;
    }
    return -1;
}

/* -- merges of SentencePiece -------------------------------------------------- */

/* A pair of tokens that makes one. Those of a higher score come first. */
typedef struct gguf_merge {
    double score;
    int32_t left, right, lefts, rights; /* ids; characters of both */
    int32_t order;                      /* place before sorting */
} gguf_merge;

static int gguf_by_score(const void *a, const void *b) {
    const gguf_merge *x = (const gguf_merge *)a, *y = (const gguf_merge *)b;
    if (x->score > y->score || x->score < y->score) return x->score > y->score ? -1 : 1;
    if (x->lefts != y->lefts) return x->lefts > y->lefts ? -1 : 1;
    if (x->rights != y->rights) return x->rights > y->rights ? -1 : 1;
    return (x->order > y->order) - (x->order < y->order);
}

/* By the ids of the parts; of one token's. */
static int gguf_by_parts(const void *a, const void *b) {
    const gguf_merge *x = (const gguf_merge *)a, *y = (const gguf_merge *)b;
    if (x->left != y->left) return x->left < y->left ? -1 : 1;
    return (x->right > y->right) - (x->right < y->right);
}

/* Appends the pairs that make token id; returns the new count, -1 without memory. */
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
        if (((unsigned char)text[i] & 0xC0) == 0x80) continue; /* within a character */
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

/* Adds to the model the merges that the scores stand for: SentencePiece joins the two tokens whose
 * result has the highest score. Of equal scores, longer parts come first, as in transformers. */
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

/* -- the parts of tokenizer.json ---------------------------------------------- */

/* The token of a key of ids; -1: there is none, or, with an error, no such token. */
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

/* Control tokens and those of the user are found in the text as they are. */
static void gguf_put_added(const gguf_words *w, cJSON *file) {
    cJSON *list = gguf_put(w->g, file, "added_tokens", cJSON_CreateArray());
    int32_t id;
    for (id = 0; id < w->count && !w->g->error[0]; id++) {
        const int type = gguf_type_of(w, id);
        cJSON *o;
        if (type != GGUF_CONTROL && type != GGUF_USER && type != GGUF_UNKNOWN) continue;
        o = gguf_push(w->g, list, cJSON_CreateObject());
        gguf_put_number(w->g, o, "id", (double)id);
        gguf_put_string(w->g, o, "content", w->text[id]);
        gguf_put_flag(w->g, o, "normalized", 0);
        gguf_put_flag(w->g, o, "special", type != GGUF_USER);
    }
}

/* The tokens that begin and end a text. */
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

/* The merges of the file, as texts of two tokens. */
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

/* tokenizer.ggml.model "gpt2": byte-level BPE. */
static int gguf_put_bytes(gguf *g, const gguf_words *w, cJSON *file, cJSON *model) {
    const gguf_pre *pre = gguf_find_pre(g);
    cJSON *step, *split;
    if (!pre || !gguf_put_merges(g, model)) return 0;
    if (pre->composes) (void)gguf_put(g, file, "normalizer", gguf_typed(g, "NFC"));
    gguf_put_flag(g, model, "ignore_merges", pre->whole);
    split = gguf_put_sequence(g, file, "pre_tokenizer", "pretokenizers");
    if (pre->digits) {
        step = gguf_push(g, split, gguf_typed(g, "Digits"));
        gguf_put_flag(g, step, "individual_digits", 1);
    }
    if (pre->pattern) {
        step = gguf_push(g, split, gguf_pattern(g, "Split", "Regex", pre->pattern));
        gguf_put_string(g, step, "behavior", "Isolated");
        gguf_put_flag(g, step, "invert", 0);
    }
    step = gguf_push(g, split, gguf_typed(g, "ByteLevel"));
    gguf_put_flag(g, step, "add_prefix_space", gguf_flag(g, "tokenizer.ggml.add_space_prefix", 0));
    gguf_put_flag(g, step, "use_regex", !pre->pattern);
    (void)gguf_put(g, file, "decoder", gguf_typed(g, "ByteLevel"));
    gguf_put_template(g, w, file, pre->begins);
    return !g->error[0];
}

/* Spaces as U+2581, tokens <0x..> as bytes; prefix: a text begins with a space. */
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

/* tokenizer.ggml.model "llama": SentencePiece's BPE, with byte fallback. */
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

/* What tokenizer.json would say, to be freed with cJSON_free; NULL and an error in g->error. */
GGUF_API char *gguf_tokenizer(gguf *g) {
    const gguf_string kind = gguf_text(g, "tokenizer.ggml.model");
    cJSON *file = cJSON_CreateObject();
    cJSON *model = gguf_put(g, file, "model", gguf_typed(g, "BPE"));
    gguf_words words;
    char quote[64], *text = NULL;
    int ok = 0;
    memset(&words, 0, sizeof words);
    if (!kind.length)
        (void)gguf_fail(g, "the key \"tokenizer.ggml.model\" is missing");
    else if (!gguf_is(kind, "gpt2") && !gguf_is(kind, "llama"))
        (void)gguf_fail(g, "the key \"tokenizer.ggml.model\" is \"%s\"; known are gpt2 and llama",
                        gguf_quote(kind, quote, sizeof quote));
    else if (gguf_read_words(g, &words)) {
        gguf_put_model(&words, model);
        gguf_put_added(&words, file);
        ok = gguf_is(kind, "gpt2") ? gguf_put_bytes(g, &words, file, model)
                                   : gguf_put_pieces(g, &words, file, model);
    }
    if (ok && !(text = cJSON_PrintUnformatted(file))) (void)gguf_fail(g, "not enough memory");
    cJSON_Delete(file);
    gguf_words_free(&words);
    return text;
}

/* Adds the text of the token of a key of ids. */
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
    gguf_put_string(g, config, name, copy); /* without a copy, it fails */
    free(copy);
}

/* What tokenizer_config.json would say of conversations, to be freed with cJSON_free: the texts of
 * the tokens that begin and end a text, and the chat template. NULL and an error in g->error. */
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
