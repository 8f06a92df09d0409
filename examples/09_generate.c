/* 09: loads a language model from a folder of the Hugging Face hub and continues a text, on two
 * ranks with half of every layer each. There is no tokenizer here: tokens are numbers. The model
 * that is in llm/tiny takes ASCII characters for tokens, and knows LICENSE by heart.
 * Build: cc -O3 09_generate.c -lm -pthread -lcjson; run: ./a.out [folder token ...] */
#define TSHARD_IMPLEMENTATION
#include "../tshard.h"
#include "../backends/tshard_threads.h"
#include "llm/model.h"

enum { RANKS = 2, NEW = 142, MOST = 256 };
static const char tiny[] = "examples/llm/tiny/llama", prompt[] = "Permission is";

typedef struct task {
    llm_config config; /* what config.json says */
    const llm_family *family;
    const char *folder;
    int32_t tokens[MOST];
    int64_t count;
} task;

static int generate(tsh_ctx *ctx, void *user) {
    task *t = (task *)user;
    llm_net *model = (llm_net *)calloc(1, sizeof *model);
    const int32_t *ids = t->tokens;
    int64_t count = t->count, next = 0; /* tsh_sample gives TSH_I64 */
    int32_t token = 0;
    const tsh_sample_desc likely = {.temperature = TSH_ZERO}; /* the most likely token */
    if (!model) return 1;
    tsh_no_grad_begin(ctx);
    llm_model_load(model, ctx, &t->config, t->family, t->folder, 1, count + NEW, TSH_DTYPE_DEFAULT);
    for (int i = 0; i < NEW && tsh_ok(ctx); i++, ids = &token, count = 1) {
        tsh_scope_begin(ctx); /* what is made until its end is freed there; the cache stays */
        tsh_tensor *logits = llm_logits(model, ids, count, NULL); /* (1, 1, V) */
        tsh_read(ctx, tsh_sample(logits, &likely), TSH_GLOBAL, &next, sizeof next);
        tsh_scope_end(ctx);
        token = (int32_t)next;
        if (tsh_world(ctx)->rank == 0 && tsh_ok(ctx))
            printf(t->folder == tiny ? "%c" : " %d", (int)token);
    }
    tsh_no_grad_end(ctx);
    free(model);
    return !tsh_ok(ctx);
}

int main(int argc, char **argv) {
    static task t;
    const char *why = "";
    t.folder = argc > 2 ? argv[1] : tiny;
    for (int i = 2; i < argc && t.count < MOST; i++) t.tokens[t.count++] = atoi(argv[i]);
    for (const char *c = prompt; argc <= 2 && *c; c++) t.tokens[t.count++] = *c;
    if (!llm_config_read(&t.config, t.folder, &t.family)) why = t.config.error;
    else if (llm_longest(&t.config, &why) >= t.count + NEW) why = ""; /* long enough */
    if (*why) return fprintf(stderr, "%s\n", why) != 0;
    const tsh_desc desc = {.dtype = t.config.dtype, .logger.log = tsh_log_stderr};
    if (t.folder == tiny) printf("%s", prompt);
    const int failed = tsh_threads_run(RANKS, &desc, generate, &t);
    printf("\n");
    llm_config_free(&t.config);
    return failed;
}
