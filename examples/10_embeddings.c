/* 10: embeds sentences with an encoder from the Hugging Face hub, on two ranks, and finds the ones
 * nearest to a query. The model in llm/tiny knows words of five topics, all-MiniLM-L6-v2 many.
 * Build: cc -O3 10_embeddings.c -lm -pthread -lcjson -lpcre2-8; run: ./a.out [folder [query]] */
#define TSHARD_IMPLEMENTATION
#include "../tshard.h"
#include "../backends/tshard_threads.h"
#include "llm/model.h"
#include "llm/tokenizer.h"
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
    llm_config config;
    const llm_family *family;
    const char *folder;
    int32_t *ids[TEXTS]; /* of the query, then of the sentences */
    int64_t counts[TEXTS];
    float *vectors; /* (TEXTS, width), each of length 1 */
} task;

/* The mean of the tokens' vectors, as sentence-transformers takes it. */
static void embed(llm_net *model, const task *t, int i, float *vector) {
    const size_t width = (size_t)t->config.width;
    double square = 0;
    tsh_scope_begin(model->ctx);
    model->past[0] = 0;
    tsh_tensor *x = llm_logits(model, t->ids[i], t->counts[i], NULL); /* (1, T, width) */
    tsh_read(model->ctx, tsh_mean(x, 1, 0), TSH_GLOBAL, vector, width * sizeof *vector);
    tsh_scope_end(model->ctx);
    for (size_t k = 0; k < width; k++) square += (double)vector[k] * (double)vector[k];
    for (size_t k = 0; k < width; k++) vector[k] /= (float)sqrt(square);
}

static int embed_all(tsh_ctx *ctx, void *user) {
    task *t = (task *)user;
    const size_t width = (size_t)t->config.width;
    llm_net *model = (llm_net *)calloc(1, sizeof *model);
    float *row = (float *)malloc(width * sizeof *row);
    if (!model || !row) tsh_fail(ctx, TSH_ERR_MEMORY, "not enough memory");
    tsh_no_grad_begin(ctx);
    if (tsh_ok(ctx))
        llm_model_load(model, ctx, &t->config, t->family, t->folder, 1, 0, TSH_DTYPE_DEFAULT);
    for (int i = 0; i < TEXTS && tsh_ok(ctx); i++) {
        embed(model, t, i, row);
        if (tsh_world(ctx)->rank == 0) memcpy(t->vectors + (size_t)i * width, row, 4 * width);
    }
    tsh_no_grad_end(ctx);
    free(row);
    free(model);
    return !tsh_ok(ctx);
}

/* Prints the sentences, nearest first: the cosine of two vectors of length 1 is their product. */
static void print_nearest(const task *t, const char *query) {
    double cosine[SENTENCES] = {0};
    for (int i = 0; i < SENTENCES; i++)
        for (int64_t k = 0; k < t->config.width; k++)
            cosine[i] += (double)t->vectors[k] *
                         (double)t->vectors[(i + 1) * t->config.width + k];
    printf("%s\n", query);
    for (int shown = 0, best = 0; shown < SENTENCES; shown++, best = 0) {
        for (int i = 1; i < SENTENCES; i++)
            if (cosine[i] > cosine[best]) best = i;
        printf("  %6.3f  %s\n", cosine[best], sentences[best]);
        cosine[best] = -2;
    }
}

static int tokenize(task *t, const char *query) {
    char error[1024], path[512];
    const char *why = "";
    const int64_t longest = llm_longest(&t->config, &why);
    (void)snprintf(path, sizeof path, "%s/tokenizer.json", t->folder);
    llm_tokenizer *tokenizer = llm_tokenizer_open(path, error, sizeof error);
    if (!tokenizer) fprintf(stderr, "%s\n", error);
    for (int i = 0; i < TEXTS && tokenizer; i++) {
        const char *text = i ? sentences[i - 1] : query;
        t->counts[i] = llm_tokenizer_encode(tokenizer, text, strlen(text), 1, &t->ids[i]);
        if (t->counts[i] < 1 || t->counts[i] > longest) {
            fprintf(stderr, "\"%s\" has %d tokens: %s\n", text, (int)t->counts[i], why);
            llm_tokenizer_free(tokenizer);
            return 0;
        }
    }
    llm_tokenizer_free(tokenizer);
    return tokenizer != NULL;
}

int main(int argc, char **argv) {
    static task t;
    const tsh_desc desc = {.dtype = TSH_F32, .logger.fn = tsh_log_stderr};
    const char *query = argc > 2 ? argv[2] : "It is a cold and wet day.";
    int failed = 1;
    t.folder = argc > 1 ? argv[1] : "examples/llm/tiny/bert";
    if (!llm_config_read(&t.config, t.folder, &t.family)) {
        fprintf(stderr, "%s\n", t.config.error);
    } else if (tokenize(&t, query)) {
        t.vectors = (float *)malloc(TEXTS * (size_t)t.config.width * sizeof *t.vectors);
        failed = !t.vectors || tsh_threads_run(RANKS, &desc, embed_all, &t);
        if (!failed) print_nearest(&t, query);
    }
    for (int i = 0; i < TEXTS; i++) free(t.ids[i]);
    free(t.vectors);
    llm_config_free(&t.config);
    return failed;
}
