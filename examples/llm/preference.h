/* preference.h - finetune.h's loss of preferences: DPO (Rafailov et al. 2023)
 *
 *     -log sigmoid(beta ((log p(chosen) - log p(rejected)) - (log q(chosen) - log q(rejected))))
 *
 * p is the model that is trained, q the one before training, log p the sum over an answer's tokens.
 * Each row of a batch has one answer. With adapters, q is p without them; without, log q of all
 * answers is computed once, before training. */
#ifndef LLM_PREFERENCE_H
#define LLM_PREFERENCE_H

#include "tune.h"

/* Returns log p of the answer in row i of t->batch, a scalar. vectors: the batch's output before
 * the head, (B, T, C). */
static tsh_tensor *prefer_answer(tune_rank *t, tsh_tensor *vectors, int64_t i) {
    const llm_batch *b = &t->batch;
    tsh_tensor *targets = tsh_from(t->ctx, b->targets + i * b->length, tsh_shape2(1, b->length),
                                   TSH_I32);
    return tsh_neg(llm_loss(&t->net, tsh_slice(vectors, 0, i, 1), targets));
}

/* Returns the number of pairs in the batch, padding included. */
static int64_t prefer_pairs(const tune_rank *t) {
    return t->batch.rows / 2;
}

/* Returns the index of the document of pair i; -1: the pair is padding. */
static int64_t prefer_document(const tune_rank *t, int64_t i) {
    return t->batch.documents[i * t->batch.length];
}

/* Returns the address at which log q(chosen) - log q(rejected) of pair i is stored. */
static double *prefer_reference(tune_rank *t, int64_t i) {
    return t->reference ? &t->reference[prefer_document(t, i)]
                        : &t->difference[t->k * prefer_pairs(t) + i];
}

/* Returns log p(chosen) - log p(rejected) of pair i. */
static double prefer_measure(tune_rank *t, tsh_tensor *vectors, int64_t i) {
    const double chosen = tsh_item(t->ctx, prefer_answer(t, vectors, i));
    return chosen - tsh_item(t->ctx, prefer_answer(t, vectors, prefer_pairs(t) + i));
}

/* Callback t->score, while the model is q: stores log q(chosen) - log q(rejected) of the batch's
 * pairs. Returns a loss of 0 that depends on no parameter, for the backward of a pipeline. */
static tsh_tensor *prefer_keep(tune_rank *t, tsh_tensor *vectors) {
    if (!t->zero) t->zero = tsh_requires_grad(tsh_keep(tsh_zeros(t->ctx, tsh_shape0())), 1);
    for (int64_t i = 0; i < prefer_pairs(t) && tsh_ok(t->ctx); i++)
        if (prefer_document(t, i) >= 0) *prefer_reference(t, i) = prefer_measure(t, vectors, i);
    t->weight = 1;
    return t->training ? tsh_neg(t->zero) : t->zero;
}

/* Call it before `count` batches are run: with adapters, computes log q of the answers in these
 * batches, by a run without adapters. Returns 0 after an error. */
LLM_API int prefer_begin(tune_rank *t, int (*take)(tune_rank *t), int64_t count) {
    tsh_module *root = t->net.root;
    if (t->reference) return 1;
    free(t->difference);
    t->difference = (double *)calloc((size_t)(count * t->job->rows) + 1, sizeof *t->difference);
    if (!t->difference) return tune_no_memory(t);
    /* Between tsh_no_grad_begin and tsh_no_grad_end, products with quantised weights round their
     * inputs to 8 bits. So in training, q is computed outside of them, without rounding, as p
     * is. */
    const int exact = tsh_training(root) && (t->job->weights_name || t->job->config->gguf);
    (void)tsh_lora_use(root, NULL);
    if (exact)
        tune_checkpoint(root, 0);
    else
        tsh_no_grad_begin(t->ctx);
    if (exact && t->training)
        tune_backward(t, take, prefer_keep); /* as the pipeline t->forward would round inputs */
    else
        tune_forward(t, take, prefer_keep, count);
    if (t->zero) tsh_zero_grad(t->zero);
    if (exact)
        tune_checkpoint(root, t->set->recompute);
    else
        tsh_no_grad_end(t->ctx);
    (void)tsh_lora_use(root, "default");
    return tsh_ok(t->ctx);
}

/* Callback t->score in training: returns the sum of the losses of the batch's pairs; t->weight is
 * their number. */
LLM_API tsh_tensor *prefer_loss(tune_rank *t, tsh_tensor *vectors) {
    const int64_t pairs = prefer_pairs(t);
    tsh_tensor *sum = NULL;
    t->weight = 0;
    for (int64_t i = 0; i < pairs && tsh_ok(t->ctx); i++) {
        if (prefer_document(t, i) < 0) continue;
        tsh_tensor *x = tsh_sub(prefer_answer(t, vectors, i), prefer_answer(t, vectors, pairs + i));
        x = tsh_scale(tsh_add_scalar(x, -*prefer_reference(t, i)), t->set->beta);
        x = tsh_neg(tsh_log_sigmoid(x));
        sum = sum ? tsh_add(sum, x) : x;
        t->weight++;
    }
    return sum;
}

/* Callback t->score in evaluation: adds the losses of the batch's pairs to t->sums. */
LLM_API tsh_tensor *prefer_add(tune_rank *t, tsh_tensor *vectors) {
    for (int64_t i = 0; i < prefer_pairs(t) && tsh_ok(t->ctx); i++) {
        if (prefer_document(t, i) < 0) continue;
        const double x = t->set->beta * (prefer_measure(t, vectors, i) - *prefer_reference(t, i));
        t->sums.loss += x > 0 ? log1p(exp(-x)) : log1p(exp(x)) - x; /* -log sigmoid(x) */
        t->sums.right += x > 0;
        t->sums.count++;
    }
    return tsh_zeros(t->ctx, tsh_shape0());
}

/* Computes t->reference of the held-out documents of `data`; each replica runs some of their
 * rows. */
static void prefer_part(tune_rank *t, const llm_data *data) {
    const llm_reader own = t->reader;
    llm_reader_open(&t->reader, data, t->ctx);
    tune_forward(t, tune_take_held, prefer_keep,
                 llm_data_held_steps(data, t->job->rows * t->replicas));
    llm_reader_close(&t->reader);
    t->reader = own;
}

/* Call it before training: without adapters, computes t->reference of all documents. Returns 0
 * after an error. */
LLM_API int prefer_prepare(tune_rank *t) {
    const llm_data *data = &t->job->data;
    llm_data train = *data; /* a copy that has the training documents as its held-out ones */
    if (t->set->lora) return 1;
    t->reference = (double *)calloc((size_t)data->documents, sizeof *t->reference);
    if (!t->reference) return tune_no_memory(t);
    train.held = train.train;
    tsh_no_grad_begin(t->ctx);
    tsh_train(t->net.root, 0);
    prefer_part(t, &train);
    if (data->held.rows) prefer_part(t, data);
    tsh_train(t->net.root, 1);
    tsh_no_grad_end(t->ctx);
    return tsh_allreduce(tsh_dp(t->ctx), t->reference, data->documents, TSH_F64, TSH_SUM) == TSH_OK;
}

#endif
