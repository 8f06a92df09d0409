/* Encodes and decodes arbitrary bytes with the tokenizers of tests/golden/tokenizers.json: the
 * first byte of an input says with which, and whether with the tokens around a text; the others are
 * the text. The answer is ids whose text is UTF-8, and the same text again where nothing is
 * normalized. `make fuzz` runs it under libFuzzer, test_text.c once for every file of the folder
 * text, which make_corpus.py writes. */
#include "../../examples/llm/tokenizer.h"

#include "tokenizers.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { TEXT_MOST = 64 };

static llm_tokenizer *text_tokenizer[TEXT_MOST];
static int text_exact[TEXT_MOST]; /* decoding gives the text that was encoded */
static size_t text_tokenizers;

/* All of tests/golden/tokenizers.json, which is found from this file's own place. */
static cJSON *text_goldens(void) {
    const char *here = __FILE__, *slash = strrchr(here, '/');
    const size_t room = (size_t)1 << 22;
    char path[512], *text = (char *)malloc(room);
    cJSON *all;
    FILE *file;
    (void)snprintf(path, sizeof path, "%.*s../golden/tokenizers.json",
                   slash ? (int)(slash - here + 1) : 0, here);
    file = fopen(path, "rb");
    must_hold(file && text);
    all = cJSON_ParseWithLength(text, fread(text, 1, room, file));
    (void)fclose(file);
    free(text);
    must_hold(cJSON_GetArraySize(all) > 20 && cJSON_GetArraySize(all) <= TEXT_MOST);
    return all;
}

static void text_begin(void) {
    static const char exact[] = " gpt2 llama3 smollm ";
    cJSON *all = text_goldens();
    const cJSON *item;
    cJSON_ArrayForEach(item, all) {
        char *json = cJSON_PrintUnformatted(cJSON_GetObjectItem(item, "tokenizer"));
        const char *name = cJSON_GetStringValue(cJSON_GetObjectItem(item, "name"));
        char word[80], error[256] = "";
        llm_tokenizer *t = lent_tokenizer_read(json, strlen(json), name, error, sizeof error);
        must_hold(t != NULL);
        (void)snprintf(word, sizeof word, " %s ", name);
        text_exact[text_tokenizers] = strstr(exact, word) != NULL;
        text_tokenizer[text_tokenizers++] = t;
        cJSON_free(json);
    }
    cJSON_Delete(all);
}

/* Forgets the words of earlier inputs, so that every input does the same each time. */
static void text_forget(llm_tokenizer *t) {
    if (t->cache_count) memset(t->cache, 0, t->cache_size * sizeof *t->cache);
    t->cache_count = t->cache_text.length = t->cache_ids.count = 0;
}

/* Decoding gives the text again. */
static void text_check_exact(llm_tokenizer *t, const char *text, size_t size) {
    int32_t *ids;
    size_t n;
    const int64_t count = llm_tokenizer_encode(t, text, size, 0, &ids);
    char *back = count < 0 ? NULL : llm_tokenizer_decode(t, ids, (size_t)count, 1, &n);
    must_hold(back && n == size && (n == 0 || memcmp(back, text, n) == 0));
    free(back);
    free(ids);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const size_t length = size ? size - 1 : 0;
    char *text = (char *)malloc(length + !length); /* so that reading beyond is seen */
    size_t which;
    if (!text_tokenizers) text_begin();
    must_hold(text != NULL);
    if (length) memcpy(text, data + 1, length);
    which = size ? data[0] % text_tokenizers : 0;
    text_forget(text_tokenizer[which]);
    check_text(text_tokenizer[which], text, length, size && data[0] / text_tokenizers % 2);
    /* Tokens that are added may take the spaces beside them; their names begin with '<'. */
    if (text_exact[which] && llm_valid_prefix(text, length) == length && !memchr(text, '<', length))
        text_check_exact(text_tokenizer[which], text, length);
    free(text);
    return 0;
}
