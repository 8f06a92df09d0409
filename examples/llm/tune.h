/* tune.h - what training (finetune.h) and evaluation (evaluate.h) have in common: the settings, the
 * state of a rank, and functions that run batches through the model or its pipeline */
#ifndef LLM_TUNE_H
#define LLM_TUNE_H

#include "../state.h"
#include "adapter.h"
#include "data.h"
#include "model.h"
#include "save.h"
#include "text.h"

enum {
    TUNE_BATCH = 8,      /* default of --batch */
    TUNE_CONTEXT = 1024, /* default of --context, if the model takes so many tokens */
    TUNE_TOKENS = 2048,  /* most tokens of a micro-batch, if --accumulate is not given */
    TUNE_PROMPT = 24,    /* tokens of a plain text that are the sample's prompt */
    TUNE_SAMPLE = 64     /* default of --max-new: most tokens that are generated as a sample */
};

/* Values of the flags; 0 or NULL: the flag was not given. */
typedef struct tune_settings {
    const char *finetune, *evaluate, *adapter, *out, *held_out, *targets;
    int64_t lora, steps, epochs, batch, accumulate, context, stride;
    int64_t warmup; /* number of steps; -1: the flag was not given */
    int64_t eval_every, save_every, seed, dp, pp, max_new;
    double alpha, dropout, lr, decay, clip, beta;
    int merge, resume, zero, recompute, all_tokens, unpacked, truncate;
} tune_settings;

/* What all ranks of this process share. Only rank 0 writes to it while they run. */
typedef struct tune_job {
    tune_settings set;
    const char *model;                     /* path of the model's folder or GGUF file */
    const char *dtype_name, *weights_name; /* values of --dtype and --weights; NULL: not given */
    tsh_dtype dtype, weights;              /* tsh_desc.dtype; `weights` of llm_model_load */
    llm_config *config;
    const llm_family *family;
    text_codec *codec;
    chat_format *format;
    int joins;           /* 1: ranks are processes, of which this is one */
    int64_t rank;        /* rank of this process in the world */
    llm_adapter adapter; /* the adapter of --lora or --adapter */
    llm_data data;
    int32_t *tokens; /* --evaluate of a plain text: its tokens */
    int64_t count;   /* length of `tokens` */
    int64_t rows;    /* rows of a micro-batch */
    int32_t *prompt; /* tokens that the model continues as a sample of what it writes */
    int64_t prompt_count;
    char *folder; /* path of the folder of the run, OUT.run */
    gpt_report report;
    int found;       /* 1: the folder of the run has a saved state, from which to go on */
    int64_t stopped; /* step after which a signal stopped the run; 0: none did */
    char error[TSH_MESSAGE_SIZE];
} tune_job;

/* Sums over the targets of some batches, or over their pairs if the data are preferences. */
typedef struct tune_sums {
    double loss, count,
        right;     /* hits: targets that are the most likely token, pairs that prefer `chosen` */
    double tokens; /* number of tokens that the model read */
} tune_sums;

/* The state of one rank. */
typedef struct tune_rank {
    tsh_ctx *ctx;
    tune_job *job;
    const tune_settings *set;
    llm_net net;
    llm_reader reader;
    tsh_optim *optim;
    tsh_schedule schedule;
    int first;                 /* 1: rank 0 of the world, which prints and writes */
    int64_t replicas, replica; /* number of replicas (dp), and the index of this rank's */
    /* --pp: training runs the micro-batches of a step, forward runs batches without gradients.
     * NULL: there is no pipeline, and this rank has all layers. */
    tsh_pipeline *training, *forward;
    /* Callbacks for what is run now, batch after batch. take: makes batch number k in `batch`;
     * returns 0 if there is not enough memory. score: gets the vectors that the head reads, adds to
     * `sums`, and returns the loss, which is a sum of `weight` terms, or NULL after an error. In a
     * pipeline, the first and the last stage call `take`, and the last one calls `score`. */
    int (*take)(struct tune_rank *t);
    tsh_tensor *(*score)(struct tune_rank *t, tsh_tensor *vectors);
    int64_t step, k; /* index of the optimiser's step; index of the batch that `take` makes */
    llm_batch batch;
    llm_batch pair[2]; /* preferences: the chosen and the rejected answers; `batch` has both, one
                        * below the other: its rows i and i + rows / 2 are a pair */
    double weight;     /* number of terms of the loss that `score` returned last */
    tune_sums sums; /* in a pipeline, the last stage has them until tune_reduce */
    /* Preferences (DPO): values of log q(chosen) - log q(rejected), where q is the model before
     * training. Without adapters, reference[i] is that of document i. With adapters, reference is
     * NULL, and difference has those of the pairs in the batches that are run next, in order. */
    double *reference, *difference;
    tsh_tensor *zero; /* the loss of prefer_keep: 0, and no parameter has a part in it; or NULL */
    int32_t *text;    /* the sample: tokens of the prompt and those generated so far */
    int64_t count;    /* number of tokens in `text` */
    int64_t next;     /* the token to append to `text`; -1: an error */
    int64_t parameters, trained;
} tune_rank;

/* Sets job->error, unless it has an earlier error. Returns 0. */
TSH_PRINTF(2, 3)
LLM_API int tune_refuse(tune_job *job, const char *format, ...) {
    va_list list;
    if (job->error[0]) return 0;
    va_start(list, format);
    tsh_text_format(job->error, sizeof job->error, format, list);
    va_end(list);
    return 0;
}

/* Records "not enough memory" in the rank's ctx. Returns 0. */
LLM_API int tune_no_memory(tune_rank *t) {
    if (tsh_ok(t->ctx)) (void)tsh_fail(t->ctx, TSH_ERR_MEMORY, "not enough memory");
    return 0;
}

/* -- batches ---------------------------------------------------------------- */

/* Moves the first n columns of an array (rows, length) to its front. */
static void tune_cut(int32_t *at, int64_t rows, int64_t length, int64_t n) {
    for (int64_t r = 1; r < rows; r++) memmove(at + r * n, at + r * length, (size_t)n * sizeof *at);
}

/* Cuts off the last columns of a batch, those that are padding in all rows. */
LLM_API void tune_trim(llm_batch *b) {
    int64_t n = 1;
    for (int64_t i = 0; i < b->rows * b->length; i++)
        if (b->segments[i] >= 0 && i % b->length >= n) n = i % b->length + 1;
    int32_t *const arrays[] = {b->ids, b->targets, b->segments, b->places, b->documents};
    for (size_t k = 0; k < sizeof arrays / sizeof *arrays && n < b->length; k++)
        tune_cut(arrays[k], b->rows, b->length, n);
    b->length = n;
}

LLM_API double tune_count_tokens(const llm_batch *b) {
    int64_t n = 0;
    for (int64_t i = 0; i < b->rows * b->length; i++) n += b->segments[i] >= 0;
    return (double)n;
}

static tsh_tensor *tune_tensor(tune_rank *t, const llm_batch *b, const int32_t *from) {
    return tsh_from(t->ctx, from, tsh_shape2(b->rows, b->length), TSH_I32);
}

/* Sets the fields of t->net that describe t->batch: rows, positions, segments. Returns the batch's
 * ids, (B, T). */
static tsh_tensor *tune_show(tune_rank *t) {
    const llm_batch *b = &t->batch;
    llm_net *m = &t->net;
    int one = 1; /* 1: each row of the batch is one sequence, without padding */
    for (int64_t i = 0; i < b->rows * b->length && one; i++) one = b->segments[i] == 0;
    m->rows = b->rows;
    m->all = m->vectors = 1;
    m->lengths = NULL;
    m->places = b->places;
    m->segments = one ? NULL : tune_tensor(t, b, b->segments);
    memset(m->past, 0, (size_t)m->rows * sizeof *m->past);
    return tune_tensor(t, b, b->ids);
}

/* Runs the model on t->batch: returns the vectors (B, T, C) that the head reads. */
LLM_API tsh_tensor *tune_vectors(tune_rank *t) {
    return llm_forward(&t->net, tune_show(t));
}

/* Resets the fields that tune_show has set, before the model runs other texts. */
LLM_API void tune_forget(tune_rank *t) {
    llm_net *m = &t->net;
    m->places = NULL;
    m->segments = NULL;
    m->all = m->vectors = 0;
    m->rows = 1;
    (void)tsh_set_segments(m->root, NULL);
}

/* Calls tsh_checkpoint for the model's blocks, the modules named by a number. */
LLM_API void tune_checkpoint(tsh_module *module, int on) {
    tsh_module *child;
    for (int i = 0; (child = tsh_child(module, i)) != NULL; i++) {
        const char *path = tsh_module_path(child), *dot = strrchr(path, '.');
        const char *name = dot ? dot + 1 : path;
        if (name[strspn(name, "0123456789")] == 0)
            tsh_checkpoint(child, on);
        else
            tune_checkpoint(child, on);
    }
}

/* Adds up t->sums of all replicas. Returns the result, on every rank; t->sums after an error. */
LLM_API tune_sums tune_reduce(tune_rank *t) {
    tsh_comm *pp = tsh_pp(t->ctx);
    tune_sums sums = t->sums;
    double all[4] = {sums.loss, sums.count, sums.right, sums.tokens};
    if ((pp->size > 1 && tsh_broadcast(pp, all, 4, TSH_F64, pp->size - 1) != TSH_OK) ||
        tsh_allreduce(tsh_dp(t->ctx), all, 4, TSH_F64, TSH_SUM) != TSH_OK)
        return sums;
    sums.loss = all[0];
    sums.count = all[1];
    sums.right = all[2];
    sums.tokens = all[3];
    return sums;
}

/* -- making batches of documents --------------------------------------------- */

/* Makes t->batch of t->pair: the chosen answers, and below them the rejected ones. Returns 0: not
 * enough memory. */
static int tune_join(tune_rank *t) {
    llm_batch *to = &t->batch;
    const int64_t rows = t->pair[0].rows, length = t->pair[0].length, n = rows * length;
    if (!llm_batch_clear(to, 2 * rows, length, 0)) return 0;
    for (int i = 0; i < 2; i++) {
        const llm_batch *from = &t->pair[i];
        const size_t bytes = (size_t)n * sizeof *from->ids;
        memcpy(to->ids + i * n, from->ids, bytes);
        memcpy(to->targets + i * n, from->targets, bytes);
        memcpy(to->segments + i * n, from->segments, bytes);
        memcpy(to->places + i * n, from->places, bytes);
        memcpy(to->documents + i * n, from->documents, bytes);
    }
    return 1;
}

/* Makes t->batch by `read`, which is llm_data_batch or llm_data_held. Returns 0: not enough
 * memory. */
static int tune_read_batch(tune_rank *t, const llm_batch_of *of,
                           int (*read)(llm_reader *reader, const llm_batch_of *of, llm_batch *batch,
                                       llm_batch *rejected)) {
    const int pairs = t->job->data.pairs;
    if (!read(&t->reader, of, pairs ? &t->pair[0] : &t->batch, &t->pair[1]) ||
        (pairs && !tune_join(t)))
        return 0;
    tune_trim(&t->batch);
    return 1;
}

/* Callback t->take: makes t->batch of micro-batch t->k of step t->step. */
LLM_API int tune_take_micro(tune_rank *t) {
    const llm_batch_of of = {.step = t->step,
                             .rows = t->job->rows,
                             .micro = t->k,
                             .micros = t->set->accumulate,
                             .replica = t->replica,
                             .replicas = t->replicas};
    return tune_read_batch(t, &of, llm_data_batch);
}

/* Callback t->take: makes t->batch of batch t->k of the held-out documents. */
LLM_API int tune_take_held(tune_rank *t) {
    const llm_batch_of of = {
        .step = t->k, .rows = t->job->rows, .replica = t->replica, .replicas = t->replicas};
    return tune_read_batch(t, &of, llm_data_held);
}

/* -- batches through the model ------------------------------------------------ */

/* Makes batch k by the callback t->take. Returns 0 after an error. */
static int tune_make(tune_rank *t, int64_t k) {
    t->k = k;
    return t->take(t) || tune_no_memory(t);
}

/* Callback .input of the pipelines: makes batch k and returns the input of the first block. */
static tsh_tensor *tune_stage_input(tsh_ctx *ctx, int k, void *user) {
    tune_rank *t = (tune_rank *)user;
    (void)ctx;
    return tune_make(t, k) ? llm_forward_begin(&t->net, tune_show(t)) : NULL;
}

/* Callback .loss of the pipelines: makes batch k and returns its loss. x: output of the last
 * block. */
static tsh_tensor *tune_stage_loss(tsh_ctx *ctx, tsh_tensor *x, int k, void *user) {
    tune_rank *t = (tune_rank *)user;
    (void)ctx;
    t->net.all = t->net.vectors = 1;
    return tune_make(t, k) ? t->score(t, llm_forward_end(&t->net, x)) : NULL;
}

/* Callback .weight of the pipeline for training: number of terms of the loss. */
static double tune_stage_weight(tsh_ctx *ctx, int k, void *user) {
    (void)ctx, (void)k;
    return ((const tune_rank *)user)->weight;
}

/* With --pp, makes the pipelines t->training and t->forward, which deals the model's blocks to the
 * stages. Returns 0 after an error. */
LLM_API int tune_deal(tune_rank *t) {
    tsh_pipeline_desc desc = {.micro_batches = (int)t->set->accumulate,
                              .input = tune_stage_input,
                              .loss = tune_stage_loss,
                              .weight = tune_stage_weight,
                              .user = t};
    if (tsh_pp(t->ctx)->size < 2) return 1;
    t->training = llm_pipeline_new(&t->net, &desc);
    desc.micro_batches = 1;
    desc.weight = NULL;
    t->forward = llm_pipeline_new(&t->net, &desc);
    return t->forward != NULL;
}

/* Runs `count` batches forward, and sets t->sums to their sums. Ops are recorded unless the caller
 * has called tsh_no_grad_begin; a pipeline never records them. */
LLM_API void tune_forward(tune_rank *t, int (*take)(tune_rank *t),
                          tsh_tensor *(*score)(tune_rank *t, tsh_tensor *vectors), int64_t count) {
    memset(&t->sums, 0, sizeof t->sums);
    t->take = take;
    t->score = score;
    if (t->forward && count > 0) (void)tsh_pipeline_evaluate(t->forward, (int)count, NULL);
    for (int64_t k = 0; !t->forward && k < count && tsh_ok(t->ctx); k++) {
        tsh_scope_begin(t->ctx);
        tsh_tensor *vectors = tune_make(t, k) ? tune_vectors(t) : NULL;
        if (vectors) (void)score(t, vectors);
        tune_forget(t);
        tsh_scope_end(t->ctx);
    }
    if (t->forward) tune_forget(t);
}

/* Runs the micro-batches of an optimiser step forward and backward, and sets t->sums to their
 * sums. */
LLM_API void tune_backward(tune_rank *t, int (*take)(tune_rank *t),
                           tsh_tensor *(*score)(tune_rank *t, tsh_tensor *vectors)) {
    const int64_t micros = t->set->accumulate;
    memset(&t->sums, 0, sizeof t->sums);
    t->take = take;
    t->score = score;
    if (t->training) (void)tsh_pipeline_train(t->training, NULL);
    for (int64_t k = 0; !t->training && k < micros && tsh_ok(t->ctx); k++) {
        tsh_tensor *vectors = tune_make(t, k) ? tune_vectors(t) : NULL;
        tsh_tensor *loss = vectors ? score(t, vectors) : NULL;
        const tsh_backward_desc how = {.defer = k + 1 < micros, .summed = 1, .weight = t->weight};
        if (loss) (void)tsh_backward_with(t->ctx, loss, &how);
        tune_forget(t);
        (void)tsh_step_end(t->ctx);
    }
    if (t->training) tune_forget(t);
}

#endif
