/* tune.h - what training (finetune.h) and evaluation (evaluate.h) have in common: the settings, the
 * state of a rank, batches and the model's forward */
#ifndef LLM_TUNE_H
#define LLM_TUNE_H

#include "../state.h"
#include "adapter.h"
#include "data.h"
#include "model.h"
#include "save.h"
#include "text.h"

enum {
    TUNE_CONTEXT = 1024, /* default of --context, if the model takes so many tokens */
    TUNE_TOKENS = 2048,  /* most tokens of a micro-batch, if --accumulate is not given */
    TUNE_PROMPT = 24,    /* tokens of a plain text that the sample goes on from */
    TUNE_SAMPLE = 64     /* default of --max-new: most tokens of a sample */
};

/* What the flags say; 0 or NULL: not given. */
typedef struct tune_settings {
    const char *finetune, *evaluate, *adapter, *out, *held_out, *targets;
    int64_t lora, steps, epochs, batch, accumulate, context, stride;
    int64_t warmup; /* steps; -1: not given */
    int64_t eval_every, save_every, seed, dp, pp, max_new;
    double alpha, dropout, lr, decay, clip, beta;
    int merge, resume, zero, recompute, all_tokens, unpacked, truncate;
} tune_settings;

/* What all ranks of this process share. Only rank 0 writes to it while they run. */
typedef struct tune_job {
    tune_settings set;
    const char *model;                     /* folder or GGUF file */
    const char *dtype_name, *weights_name; /* values of --dtype and --weights; NULL: not given */
    tsh_dtype dtype, weights;              /* of tsh_desc; as llm_model_load takes it */
    llm_config *config;
    const llm_family *family;
    text_codec *codec;
    chat_format *format;
    int joins;           /* 1: ranks are processes, of which this is one */
    int64_t rank;        /* its rank */
    llm_adapter adapter; /* of --lora and --adapter */
    llm_data data;
    int32_t *tokens; /* --evaluate of a plain text: its tokens */
    int64_t count;   /* their number */
    int64_t rows;    /* rows of a micro-batch */
    int32_t *prompt; /* the sample goes on from these tokens */
    int64_t prompt_count;
    char *folder; /* OUT.run */
    gpt_report report;
    int found;       /* 1: there is a state to go on from */
    int64_t stopped; /* step after which a signal stopped the run; 0: none did */
    char error[TSH_MESSAGE_SIZE];
} tune_job;

/* Sums over the targets of some batches; over pairs, of preferences. */
typedef struct tune_sums {
    double loss, count,
        right;     /* right: most likely tokens, or preferred answers that are likelier */
    double tokens; /* that the model read */
} tune_sums;

/* One rank. */
typedef struct tune_rank {
    tsh_ctx *ctx;
    tune_job *job;
    const tune_settings *set;
    llm_net net;
    llm_reader reader;
    tsh_optim *optim;
    tsh_schedule schedule;
    int first;                 /* 1: rank 0 of the world, which prints and writes */
    int64_t replicas, replica; /* size of dp, rank in it */
    llm_batch batch, other;    /* other: the rejected answers of preferences */
    /* Preferences without adapters: log p of both answers of each document before training. */
    double *reference;
    int64_t parameters, trained;
} tune_rank;

/* Records the first error. Returns 0. */
TSH_PRINTF(2, 3)
LLM_API int tune_refuse(tune_job *job, const char *format, ...) {
    va_list list;
    if (job->error[0]) return 0;
    va_start(list, format);
    tsh_text_format(job->error, sizeof job->error, format, list);
    va_end(list);
    return 0;
}

/* Sets the error of a rank's ctx. Returns 0. */
LLM_API int tune_no_memory(tune_rank *t) {
    if (tsh_ok(t->ctx)) (void)tsh_fail(t->ctx, TSH_ERR_MEMORY, "not enough memory");
    return 0;
}

/* -- batches ---------------------------------------------------------------- */

/* Moves the first n columns of an array (rows, length) to its front. */
static void tune_cut(int32_t *at, int64_t rows, int64_t length, int64_t n) {
    for (int64_t r = 1; r < rows; r++) memmove(at + r * n, at + r * length, (size_t)n * sizeof *at);
}

/* Takes the columns off that are padding in all rows. */
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

/* Runs the model on a batch, after tune_trim: returns the vectors (B, T, C) that the head reads. */
LLM_API tsh_tensor *tune_vectors(tune_rank *t, const llm_batch *b) {
    llm_net *m = &t->net;
    int one = 1; /* each row is one sequence, without padding */
    for (int64_t i = 0; i < b->rows * b->length && one; i++) one = b->segments[i] == 0;
    m->rows = b->rows;
    m->all = m->vectors = 1;
    m->lengths = NULL;
    m->places = b->places;
    m->segments = one ? NULL : tune_tensor(t, b, b->segments);
    memset(m->past, 0, (size_t)m->rows * sizeof *m->past);
    return llm_forward(m, tune_tensor(t, b, b->ids));
}

/* Forgets the batch, before other texts are run. */
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

/* Adds up the sums of all replicas. */
LLM_API void tune_reduce(tune_rank *t, tune_sums *sums) {
    double all[4] = {sums->loss, sums->count, sums->right, sums->tokens};
    if (tsh_allreduce(tsh_dp(t->ctx), all, 4, TSH_F64, TSH_SUM) != TSH_OK) return;
    sums->loss = all[0];
    sums->count = all[1];
    sums->right = all[2];
    sums->tokens = all[3];
}

#endif
