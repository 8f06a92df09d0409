/* tokenizers.h - what the fuzzers of tokenizers share: tokenizers that borrow the tables of code
 * points, and what must be so for every text. Include it after examples/llm/tokenizer.h. */
#ifndef TSHARD_TESTS_TOKENIZERS_H
#define TSHARD_TESTS_TOKENIZERS_H

static void must_hold(int condition) {
    if (!condition) abort();
}

/* -- borrowed tables: making them takes longer than all else that a small file needs, and no
 * tokenizer.json changes them ---------------------------------------------- */

/* Gives t the tables of `owner`; NULL: takes them away again. */
static void lend_tables(llm_tokenizer *t, const llm_tokenizer *owner) {
    static const llm_map none = {NULL, 0, 0};
    t->flags = owner ? owner->flags : NULL;
    t->breaks = owner ? owner->breaks : NULL;
    t->compositions = owner ? owner->compositions : none;
    t->compat = owner ? owner->compat : none;
}

static void lent_tokenizer_free(llm_tokenizer *t) {
    if (t) lend_tables(t, NULL);
    llm_tokenizer_free(t);
}

/* As llm_tokenizer_read. Free it with lent_tokenizer_free. */
static llm_tokenizer *lent_tokenizer_read(const char *json, size_t length, const char *name,
                                          char *error, size_t size) {
    static llm_tokenizer owner; /* open until the program ends */
    llm_tokenizer *t = (llm_tokenizer *)calloc(1, sizeof *t);
    must_hold(llm_unicode_open(&owner) && llm_breaks_open(&owner) && llm_compat_open(&owner));
    must_hold(t != NULL);
    lend_tables(t, &owner);
    if (llm_tokenizer_fill(t, json, length, name)) return t;
    (void)snprintf(error, size, "%s", t->error);
    lent_tokenizer_free(t);
    return NULL;
}

/* -- texts ------------------------------------------------------------------ */

/* One line, whatever the input has put into it. */
LLM_TOKENIZER_API void check_tokenizer_error(const char *error) {
    must_hold(strlen(error) > 10 && strlen(error) < 256);
    for (; *error; error++) must_hold((unsigned char)*error >= 0x20 && *error != 0x7f);
}

/* Decodes id by id: no part ends within a character. */
static void check_stream(llm_tokenizer *t, const int32_t *ids, size_t count, int special) {
    llm_stream stream;
    size_t i, n;
    memset(&stream, 0, sizeof stream);
    stream.tokenizer = t;
    stream.special = special;
    for (i = 0; i <= count; i++) {
        const char *part = i < count ? llm_stream_add(&stream, ids[i], &n)
                                     : llm_stream_end(&stream, &n);
        if (part) must_hold(llm_valid_prefix(part, n) == n);
    }
}

/* A text becomes ids, the same ones again from the cache, and these become UTF-8; or there is an
 * error of one sentence. special: with the tokens around a text. */
LLM_TOKENIZER_API void check_text(llm_tokenizer *t, const char *text, size_t size, int special) {
    int32_t *ids, *again;
    const int64_t count = llm_tokenizer_encode(t, text, size, special, &ids);
    char *back;
    int64_t i;
    size_t n;
    if (count < 0) {
        check_tokenizer_error(llm_tokenizer_error(t));
        return;
    }
    for (i = 0; i < count; i++) must_hold(ids[i] >= 0);
    must_hold(llm_tokenizer_encode(t, text, size, special, &again) == count);
    must_hold(count == 0 || memcmp(ids, again, (size_t)count * sizeof *ids) == 0);
    back = llm_tokenizer_decode(t, ids, (size_t)count, special, &n);
    if (back)
        must_hold(llm_valid_prefix(back, n) == n);
    else
        check_tokenizer_error(llm_tokenizer_error(t));
    free(back);
    check_stream(t, ids, (size_t)(count < 16 ? count : 16), special);
    free(ids);
    free(again);
}

#endif
