/* 10: embeds sentences with a model from the Hugging Face hub on two ranks, as
 * sentence-transformers does, and finds those nearest to a query. The model in llm/tiny knows words
 * of five topics, all-MiniLM-L6-v2 many.
 * Build: cc -O3 10_embeddings.c -lm -pthread -lcjson -lpcre2-8; run: ./a.out [folder [query]] */
#define TSHARD_IMPLEMENTATION
#include "../tshard.h"
#include "../backends/tshard_threads.h"
#include "llm/model.h"
#include "llm/tokenizer.h"

#include "llm/embed.h"
#include <math.h>

enum { RANKS = 2 };
static const char *const sentences[] = {"There is snow and ice on the road today.",
                                        "The soup in the pan has not had salt.",
                                        "We listen to a violin and a piano.",
                                        "This program reads a file from disk.",
                                        "The bus to the airport was late.",
                                        "Bread and butter, and an onion with it.",
                                        "A storm came with thunder all night.",
                                        "The kernel has a bug in its network code.",
                                        "A band with drums and a guitar.",
                                        "My passport is in the luggage."};
enum { SENTENCES = sizeof sentences / sizeof *sentences, TEXTS = SENTENCES + 1 };

typedef struct task {
    embed_model how; /* what modules.json says */
    llm_config config;
    const llm_family *family;
    int32_t *ids[TEXTS]; /* of the query, then of the sentences */
    int64_t counts[TEXTS], longest;
    double *vectors; /* (TEXTS, how.size) */
} task;

/* Text i; tokens: room for the vectors of its tokens. */
static void embed(llm_net *model, task *t, int i, float *tokens) {
    const size_t bytes = (size_t)(t->counts[i] * t->config.width) * sizeof *tokens;
    tsh_scope_begin(model->ctx);
    model->past[0] = 0;
    tsh_tensor *x = llm_logits(model, t->ids[i], t->counts[i], NULL); /* (1, T, width) */
    tsh_read(model->ctx, x, TSH_GLOBAL, tokens, bytes);
    tsh_scope_end(model->ctx);
    if (tsh_world(model->ctx)->rank == 0 && tsh_ok(model->ctx))
        embed_vector(&t->how, tokens, t->counts[i], t->vectors + i * t->how.size);
}

static int embed_all(tsh_ctx *ctx, void *user) {
    task *t = (task *)user;
    llm_net *model = (llm_net *)calloc(1, sizeof *model);
    float *tokens = (float *)malloc((size_t)(t->longest * t->config.width) * sizeof *tokens);
    if (!model || !tokens) tsh_fail(ctx, TSH_ERR_MEMORY, "not enough memory");
    tsh_no_grad_begin(ctx);
    if (tsh_ok(ctx))
        llm_model_load(model, ctx, &t->config, t->family, t->how.folder, 1, t->longest,
                       TSH_DTYPE_DEFAULT);
    for (int i = 0; i < TEXTS && tsh_ok(ctx); i++) embed(model, t, i, tokens);
    tsh_no_grad_end(ctx);
    free(tokens);
    free(model);
    return !tsh_ok(ctx);
}

static double product(const task *t, int i, int j) {
    const double *a = t->vectors + i * t->how.size, *b = t->vectors + j * t->how.size;
    double sum = 0;
    for (int64_t k = 0; k < t->how.size; k++) sum += a[k] * b[k];
    return sum;
}

/* Prints the sentences, nearest first. */
static void print_nearest(const task *t, const char *query) {
    double cosine[SENTENCES];
    for (int i = 0; i < SENTENCES; i++)
        cosine[i] = product(t, 0, i + 1) / sqrt(product(t, 0, 0) * product(t, i + 1, i + 1));
    printf("%s\n", query);
    for (int shown = 0, best = 0; shown < SENTENCES; shown++, best = 0) {
        for (int i = 1; i < SENTENCES; i++)
            if (cosine[i] > cosine[best]) best = i;
        printf("  %6.3f  %s\n", cosine[best], sentences[best]);
        cosine[best] = -2;
    }
}

static int tokenize(task *t, const char *query) {
    char error[1024], path[4200];
    (void)snprintf(path, sizeof path, "%s/tokenizer.json", t->how.folder);
    llm_tokenizer *tokenizer = llm_tokenizer_open(path, error, sizeof error);
    if (!tokenizer) fprintf(stderr, "%s\n", error);
    for (int i = 0; i < TEXTS && tokenizer; i++) {
        const char *text = i ? sentences[i - 1] : query;
        t->counts[i] = embed_encode(&t->how, tokenizer, text, strlen(text), 1, &t->ids[i]);
        if (t->counts[i] > t->longest) t->longest = t->counts[i];
        if (t->counts[i] >= 1) continue;
        fprintf(stderr, "\"%s\" has no token. %s\n", text, t->how.error);
        llm_tokenizer_free(tokenizer);
        return 0;
    }
    llm_tokenizer_free(tokenizer);
    return tokenizer != NULL;
}

int main(int argc, char **argv) {
    static task t;
    const tsh_desc desc = {.dtype = TSH_F32, .logger.log = tsh_log_stderr};
    const char *query = argc > 2 ? argv[2] : "It is a cold and wet day.";
    int failed = 1;
    if (!embed_open(&t.how, argc > 1 ? argv[1] : "examples/llm/tiny/bert") ||
        !llm_config_read(&t.config, t.how.folder, &t.family) || !embed_begin(&t.how, &t.config)) {
        fprintf(stderr, "%s\n", t.how.error[0] ? t.how.error : t.config.error);
    } else if (tokenize(&t, query)) {
        t.config.headless = 1;
        t.vectors = (double *)malloc(TEXTS * (size_t)t.how.size * sizeof *t.vectors);
        failed = !t.vectors || tsh_threads_run(RANKS, &desc, embed_all, &t);
        if (!failed) print_nearest(&t, query);
    }
    for (int i = 0; i < TEXTS; i++) free(t.ids[i]);
    free(t.vectors);
    embed_close(&t.how);
    llm_config_free(&t.config);
    return failed;
}
