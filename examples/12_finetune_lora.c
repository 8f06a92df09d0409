/* 12: fine-tunes a language model of the Hugging Face hub on a text or on chats, on two ranks: its
 * weights stay, and adapters of rank 8 (LoRA) learn. The model in llm/tiny, whose tokens are
 * characters, learns to write this file. PEFT and build/llm --adapter load what is written.
 * Build: cc -O3 12_finetune_lora.c -lm -pthread -lcjson -lpcre2-8;
 * run: ./a.out [folder of a model, text or .jsonl [folder to write]] */
#define TSHARD_IMPLEMENTATION
#include "../tshard.h"
#include "../backends/tshard_threads.h"
#include "llm/data.h"
#include "llm/model.h"

enum { RANKS = 2, ROWS = 4, LENGTH = 128, STEPS = 60 };

typedef struct task {
    const char *folder, *out; /* out NULL: nothing is written */
    llm_config config;
    const llm_family *family;
    llm_data data; /* all that is learnt from; the ranks read it */
} task;

/* The sum of the losses of a batch's answers. */
static tsh_tensor *loss_of(llm_net *m, const llm_batch *b) {
    const tsh_shape shape = tsh_shape2(b->rows, b->length);
    m->segments = tsh_from(m->ctx, b->segments, shape, TSH_I32); /* texts do not see each other */
    m->places = b->places;
    m->vectors = 1; /* the head runs in llm_loss, for a few rows at a time */
    tsh_tensor *x = llm_forward(m, tsh_from(m->ctx, b->ids, shape, TSH_I32));
    return llm_loss(m, x, tsh_from(m->ctx, b->targets, shape, TSH_I32));
}

static int learn(tsh_ctx *ctx, void *user) {
    task *t = (task *)user;
    llm_net net, *m = &net;
    llm_adapter adapter = {.lora = {.rank = 8, .alpha = 16}, .task = "CAUSAL_LM"};
    const tsh_schedule cosine = {.kind = TSH_COSINE, .lr = 1e-2, .warmup = 5, .total = STEPS};
    const tsh_optim_desc adamw = {.kind = TSH_ADAMW, .clip_norm = 1, .schedule = &cosine};
    llm_batch batch = {0};
    llm_reader reader;
    llm_model_load(m, ctx, &t->config, t->family, t->folder, ROWS, LENGTH, TSH_DTYPE_DEFAULT);
    tsh_cache_free(m->cache); /* is for generating */
    tsh_train(m->root, 1);
    llm_model_adapter_add(m, &adapter); /* to all linear layers; the rest is frozen */
    tsh_optim *optim = tsh_optim_new(m->root, &adamw);
    llm_reader_open(&reader, &t->data, ctx);
    for (int step = 0; step < STEPS && tsh_ok(ctx); step++) {
        const llm_batch_of which = {.step = step, .rows = ROWS};
        if (!llm_data_batch(&reader, &which, &batch, NULL)) break;
        tsh_tensor *loss = tsh_scale(loss_of(m, &batch), 1.0 / (double)batch.answers);
        tsh_backward(ctx, loss);
        tsh_optim_step(optim);
        tsh_zero_grads(m->root);
        const double value = tsh_item(ctx, loss);
        if (step % 10 == 9 && tsh_world(ctx)->rank == 0 && tsh_ok(ctx))
            printf("step %2d  loss %.3f\n", step + 1, value);
        tsh_step_end(ctx);
    }
    if (t->out && tsh_ok(ctx)) llm_model_adapter_save(m, &adapter, t->out);
    llm_batch_free(&batch);
    llm_reader_close(&reader);
    return !tsh_ok(ctx);
}

int main(int argc, char **argv) {
    static task t;
    static text_codec codec;
    const llm_data_desc what = {.path = argc > 2 ? argv[2] : "examples/12_finetune_lora.c",
                                .codec = &codec, .length = LENGTH, .eos = ""};
    const tsh_desc desc = {.dtype = TSH_F32, .logger.log = tsh_log_stderr};
    int failed = 1;
    t.folder = argc > 2 ? argv[1] : "examples/llm/tiny/llama";
    t.out = argc > 3 ? argv[3] : NULL;
    if (!llm_config_read(&t.config, t.folder, &t.family)) fprintf(stderr, "%s\n", t.config.error);
    else if (!text_open(&codec, NULL, t.folder, NULL)) fprintf(stderr, "%s\n", codec.error);
    else if (!llm_data_open(&t.data, &what)) fprintf(stderr, "%s\n", t.data.error);
    else failed = tsh_threads_run(RANKS, &desc, learn, &t);
    llm_data_close(&t.data);
    text_close(&codec);
    llm_config_free(&t.config);
    return failed;
}
