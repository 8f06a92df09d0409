/* 13: teaches an encoder of the Hugging Face hub, such as all-MiniLM-L6-v2, what sentences are
 * about, on two ranks: their mean vectors go through a linear layer, and all learns. Words of the
 * test sentences are in none of the others. transformers loads what is written.
 * Build: cc -O3 13_classifier.c -lm -pthread -lcjson -lpcre2-8; run: ./a.out [folder [to write]] */
#define TSHARD_IMPLEMENTATION
#include "../tshard.h"
#include "../backends/tshard_threads.h"
#include "llm/encoder.h"
#include "llm/save.h"

enum { RANKS = 2, BATCH = 16, STEPS = 40, LEARN = 256, TEXTS = 384, TOPICS = 4 };
static const char *const words[TOPICS][8] = { /* the last 3 of each are in test sentences only */
    {"rain", "storm", "clouds", "winter", "thunder", "snow", "wind", "fog"},
    {"bread", "salt", "butter", "dinner", "cheese", "soup", "sugar", "onions"},
    {"piano", "violin", "band", "choir", "guitar", "song", "drums", "orchestra"},
    {"train", "airport", "bus", "passport", "hotel", "ticket", "flight", "luggage"}};
static const char *const others[] = {"the", "our", "a", "it", "was", "today", "after", "all",
                                     "very", "old", "had", "no", "new", "from", "and", "before"};
static llm_encoder texts; /* which the ranks only read */
static int64_t topics[TEXTS];
static unsigned draw(unsigned *state, unsigned n) { /* a number below n */
    *state = *state * 1664525 + 1013904223;
    return (*state >> 16) % n;
}

static int add_text(int i, unsigned *state) { /* a word of a topic and up to 8 others */
    char text[256] = "";
    const unsigned n = 1 + draw(state, 9), at = draw(state, n), topic = draw(state, TOPICS);
    const char *word = words[topic][i < LEARN ? draw(state, 5) : 5 + draw(state, 3)];
    for (unsigned k = 0; k < n; k++)
        tsh_text_add(text, sizeof text, "%s ", k == at ? word : others[draw(state, 16)]);
    topics[i] = topic;
    return llm_encoder_add(&texts, text);
}

static tsh_tensor *classify(llm_net *m, int at) { /* (BATCH, TOPICS) */
    return tsh_forward(tsh_find(m->root, "classifier"), llm_encoder_means(m, &texts, at, BATCH));
}

static int run(tsh_ctx *ctx, void *out) {
    llm_net model, *m = &model;
    const tsh_linear_desc head = {.in = texts.config.width, .out = TOPICS};
    const tsh_optim_desc adamw = {.kind = TSH_ADAMW, .lr = 1e-3};
    const int first = tsh_world(ctx)->rank == 0;
    int64_t topic[BATCH], right = 0;
    llm_model_load(m, ctx, &texts.config, texts.family, texts.how.folder, BATCH, texts.longest,
                   TSH_DTYPE_DEFAULT);
    tsh_add_linear(m->root, "classifier", &head);
    tsh_optim *optim = tsh_optim_new(m->root, &adamw); /* after tsh_freeze: of the head alone */
    for (int step = 0; step < STEPS && tsh_ok(ctx); step++) {
        const int at = step * BATCH % LEARN;
        tsh_tensor *target = tsh_from(ctx, topics + at, tsh_shape1(BATCH), TSH_I64);
        tsh_tensor *loss = tsh_cross_entropy(classify(m, at), target, NULL);
        tsh_backward(ctx, loss);
        tsh_optim_step(optim);
        tsh_zero_grads(m->root);
        if (first && step % 8 < 2) printf("step %2d  loss %.6f\n", step + 1, tsh_item(ctx, loss));
        tsh_step_end(ctx);
    }
    tsh_no_grad_begin(ctx);
    for (int at = LEARN; at < TEXTS && tsh_ok(ctx); at += BATCH, tsh_step_end(ctx)) {
        tsh_read(ctx, tsh_argmax(classify(m, at), -1, 0), TSH_GLOBAL, topic, sizeof topic);
        for (int k = 0; k < BATCH; k++) right += topic[k] == topics[at + k];
    }
    tsh_no_grad_end(ctx);
    if (first) printf("%d of %d test sentences are right\n", (int)right, TEXTS - LEARN);
    if (out && tsh_ok(ctx)) llm_model_save(m, texts.how.folder, (const char *)out, TSH_F32);
    return !tsh_ok(ctx);
}

int main(int argc, char **argv) {
    const tsh_desc desc = {.dtype = TSH_F32, .logger.log = tsh_log_stderr};
    unsigned state = 1;
    int ok = llm_encoder_open(&texts, argc > 1 ? argv[1] : "examples/llm/tiny/bert");
    for (int i = 0; i < TEXTS && ok; i++) ok = add_text(i, &state);
    if (!ok) fprintf(stderr, "%s\n", texts.error);
    const int failed = !ok || tsh_threads_run(RANKS, &desc, run, argc > 2 ? argv[2] : NULL);
    llm_encoder_close(&texts);
    return failed;
}
