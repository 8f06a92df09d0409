/* Feeds bytes to examples/llm/model.h as a config.json, the byte 0xFF, and a
 * generation_config.json. Whatever they are, the answer is an error of one sentence, or a config
 * whose numbers are in range. `make fuzz` runs it under libFuzzer, test_config.c once for every
 * file of the folder config, which make_corpus.py writes. */
#if !defined(_POSIX_C_SOURCE)
#define _POSIX_C_SOURCE 200809L /* what examples/llm includes */
#endif
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"
#include "../../examples/llm/model.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void config_must(int condition) {
    if (!condition) abort();
}

/* n bytes as JSON; NULL: they are none. */
static cJSON *config_json(const uint8_t *data, size_t n) {
    char *copy = (char *)malloc(n + 1); /* so that reading beyond its end is seen */
    cJSON *json;
    config_must(copy != NULL);
    if (n) memcpy(copy, data, n);
    copy[n] = 0;
    json = cJSON_Parse(copy);
    free(copy);
    return json;
}

/* What the layers rely on. */
static void config_check(const llm_config *c) {
    int64_t i;
    const char *why = "";
    config_must(c->eps >= 0);
    config_must(c->layers >= 0 && c->layers <= LLM_MOST_LAYERS);
    config_must(c->heads > 0 && c->kv_heads > 0 && c->heads <= LLM_MOST_HEADS);
    config_must(c->head_size > 0 && c->vocabulary >= 0 && c->width >= 0 && c->hidden >= 0);
    config_must(c->eos_count >= 0 && c->eos_count <= LLM_MOST_EOS);
    config_must(llm_longest(c, &why) >= 0);
    for (i = 0; c->rope.on && i < c->rope.dims / 2; i++)
        config_must(c->rope.freqs[i] - c->rope.freqs[i] == 0); /* finite */
}

/* 1: it is a config; 0: an error. */
static int config_take(const uint8_t *data, size_t size) {
    const uint8_t *end = size ? (const uint8_t *)memchr(data, 0xFF, size) : NULL;
    const size_t n = end ? (size_t)(end - data) : size;
    const llm_family *family = NULL;
    cJSON *generation = end ? config_json(end + 1, size - n - 1) : NULL;
    llm_config *c = (llm_config *)calloc(1, sizeof *c);
    int ok;
    config_must(c != NULL);
    ok = llm_config_take(c, config_json(data, n), "config.json");
    llm_read_eos(c, generation);
    ok = ok && llm_config_finish(c, &family) && llm_config_close(c);
    config_must(ok == !c->error[0] && (ok || strlen(c->error) > 10));
    for (const char *at = c->error; *at; at++) config_must((unsigned char)*at >= 0x20);
    if (ok) config_check(c);
    cJSON_Delete(generation);
    llm_config_free(c);
    free(c);
    return ok;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    (void)config_take(data, size);
    return 0;
}
