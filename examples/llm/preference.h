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

/* Returns log p of the answer in row i of the batch, a scalar. vectors: of the batch. */
static tsh_tensor *prefer_answer(tune_rank *t, const llm_batch *b, tsh_tensor *vectors, int64_t i) {
    tsh_tensor *targets = tsh_from(t->ctx, b->targets + i * b->length, tsh_shape2(1, b->length),
                                   TSH_I32);
    return tsh_neg(llm_loss(&t->net, tsh_slice(vectors, 0, i, 1), targets));
}

/* Returns the index of the document in row i; -1: the row is padding. */
static int64_t prefer_document(const llm_batch *b, int64_t i) {
    return b->documents[i * b->length];
}

/* Sets difference[i] to log q(chosen) - log q(rejected) of row i, for the model as it is: with
 * adapters, it has been told to compute without them. */
static void prefer_measure(tune_rank *t, double *difference) {
    const llm_batch *both[] = {&t->batch, &t->other};
    for (int64_t i = 0; i < t->batch.rows; i++) difference[i] = 0;
    for (int k = 0; k < 2; k++) {
        tsh_scope_begin(t->ctx);
        tsh_tensor *vectors = tune_vectors(t, both[k]);
        for (int64_t i = 0; i < both[k]->rows && tsh_ok(t->ctx); i++) {
            if (prefer_document(both[k], i) < 0) continue;
            const double value = tsh_item(t->ctx, prefer_answer(t, both[k], vectors, i));
            difference[i] += k ? -value : value;
        }
        tune_forget(t);
        tsh_scope_end(t->ctx);
    }
}

/* Sets difference[i] to log q(chosen) - log q(rejected) of row i of the batch. */
static void prefer_reference(tune_rank *t, double *difference) {
    tsh_module *root = t->net.root;
    if (t->reference) {
        for (int64_t i = 0; i < t->batch.rows; i++) {
            const int64_t document = prefer_document(&t->batch, i);
            difference[i] = document < 0 ? 0 : t->reference[document];
        }
        return;
    }
    /* Quantised weights multiply rounded inputs without gradients, but not in training: then q is
     * computed as p is, though nothing has a gradient. */
    const int exact = tsh_training(root) && (t->job->weights_name || t->job->config->gguf);
    (void)tsh_lora_use(root, NULL);
    if (exact)
        tune_checkpoint(root, 0);
    else
        tsh_no_grad_begin(t->ctx);
    prefer_measure(t, difference);
    if (exact)
        tune_checkpoint(root, t->set->recompute);
    else
        tsh_no_grad_end(t->ctx);
    (void)tsh_lora_use(root, "default");
}

/* Returns the sum of the batch's losses. *pairs: their number. */
LLM_API tsh_tensor *prefer_loss(tune_rank *t, double *pairs) {
    double *reference = (double *)malloc((size_t)t->batch.rows * sizeof *reference);
    tsh_tensor *sum = NULL, *vectors[2];
    *pairs = 0;
    if (!reference) {
        (void)tune_no_memory(t);
        return NULL;
    }
    prefer_reference(t, reference);
    vectors[0] = tune_vectors(t, &t->batch);
    vectors[1] = tune_vectors(t, &t->other);
    for (int64_t i = 0; i < t->batch.rows && tsh_ok(t->ctx); i++) {
        if (prefer_document(&t->batch, i) < 0) continue;
        tsh_tensor *x = tsh_sub(prefer_answer(t, &t->batch, vectors[0], i),
                                prefer_answer(t, &t->other, vectors[1], i));
        x = tsh_scale(tsh_add_scalar(x, -reference[i]), t->set->beta);
        x = tsh_neg(tsh_log_sigmoid(x));
        sum = sum ? tsh_add(sum, x) : x;
        (*pairs)++;
    }
    free(reference);
    return sum;
}

/* Without gradients: adds the losses of the batch to the sums. */
LLM_API void prefer_add(tune_rank *t, tune_sums *sums) {
    double *difference = (double *)malloc(2 * (size_t)t->batch.rows * sizeof *difference);
    if (!difference) {
        (void)tune_no_memory(t);
        return;
    }
    double *reference = difference + t->batch.rows;
    prefer_reference(t, reference);
    prefer_measure(t, difference);
    for (int64_t i = 0; i < t->batch.rows; i++) {
        if (prefer_document(&t->batch, i) < 0) continue;
        const double x = t->set->beta * (difference[i] - reference[i]);
        sums->loss += x > 0 ? log1p(exp(-x)) : log1p(exp(x)) - x; /* -log sigmoid(x) */
        sums->right += x > 0;
        sums->count++;
    }
    free(difference);
}

/* Computes t->reference of the documents of one part: its held-out batches are all of its rows, of
 * which each replica has some. */
static void prefer_part(tune_rank *t, const llm_data *data, double *difference) {
    llm_reader reader;
    const int64_t rows = t->job->rows, steps = llm_data_held_steps(data, rows * t->replicas);
    llm_reader_open(&reader, data, t->ctx);
    for (int64_t k = 0; k < steps && tsh_ok(t->ctx); k++) {
        const llm_batch_of of = {
            .step = k, .rows = rows, .replica = t->replica, .replicas = t->replicas};
        if (!llm_data_held(&reader, &of, &t->batch, &t->other)) {
            (void)tune_no_memory(t);
            break;
        }
        tune_trim(&t->batch);
        tune_trim(&t->other);
        prefer_measure(t, difference);
        for (int64_t i = 0; i < t->batch.rows; i++)
            if (prefer_document(&t->batch, i) >= 0)
                t->reference[prefer_document(&t->batch, i)] = difference[i];
    }
    llm_reader_close(&reader);
}

/* Before training: without adapters, computes log q of all answers. Returns 0 after an error. */
LLM_API int prefer_prepare(tune_rank *t) {
    const llm_data *data = &t->job->data;
    llm_data train = *data; /* as if the documents to learn from were held out */
    double *difference;
    if (t->set->lora) return 1;
    difference = (double *)malloc((size_t)t->job->rows * sizeof *difference);
    t->reference = (double *)calloc((size_t)data->documents, sizeof *t->reference);
    if (!difference || !t->reference) {
        free(difference);
        return tune_no_memory(t);
    }
    train.held = train.train;
    tsh_no_grad_begin(t->ctx);
    tsh_train(t->net.root, 0);
    prefer_part(t, &train, difference);
    if (data->held.rows) prefer_part(t, data, difference);
    tsh_train(t->net.root, 1);
    tsh_no_grad_end(t->ctx);
    free(difference);
    return tsh_allreduce(tsh_dp(t->ctx), t->reference, data->documents, TSH_F64, TSH_SUM) == TSH_OK;
}

#endif
