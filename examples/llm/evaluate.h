/* evaluate.h - computes loss and accuracy of a model: on held-out documents while finetune.h trains
 * it, or on the file of --evaluate */
#ifndef LLM_EVALUATE_H
#define LLM_EVALUATE_H

#include "preference.h"
#include "tune.h"

/* Callback t->score: adds loss, hits and number of the batch's targets to t->sums. Returns the
 * loss. */
static tsh_tensor *evaluate_batch(tune_rank *t, tsh_tensor *vectors) {
    tsh_tensor *targets = tune_tensor(t, &t->batch, t->batch.targets);
    tsh_tensor *loss = llm_loss(&t->net, vectors, targets);
    if (loss) t->sums.loss += tsh_item(t->ctx, loss);
    if (loss) t->sums.right += (double)llm_accuracy(&t->net, vectors, targets);
    t->sums.count += (double)t->batch.answers;
    return loss;
}

/* evaluate_begin turns off gradients and dropout, and turns on checkpointing, so that a block's
 * activations are freed when it has run; evaluate_end restores all three. */
static void evaluate_begin(tune_rank *t) {
    tsh_train(t->net.root, 0);
    tune_checkpoint(t->net.root, 1);
    tsh_no_grad_begin(t->ctx);
}
static void evaluate_end(tune_rank *t) {
    tsh_no_grad_end(t->ctx);
    tune_checkpoint(t->net.root, t->set->recompute);
    tsh_train(t->net.root, 1);
}

/* Returns the sums of losses, hits and counts over the held-out documents of all replicas. */
static tune_sums evaluate_held(tune_rank *t) {
    const llm_data *data = &t->job->data;
    const int64_t count = llm_data_held_steps(data, t->job->rows * t->replicas);
    evaluate_begin(t);
    if (!data->pairs)
        tune_forward(t, tune_take_held, evaluate_batch, count);
    else if (prefer_begin(t, tune_take_held, count))
        tune_forward(t, tune_take_held, prefer_add, count);
    evaluate_end(t);
    return tune_reduce(t);
}

/* -- a plain text, by windows ---------------------------------------------------- */

/* Returns how many windows of --context tokens the text is evaluated in, one every --stride
 * tokens. */
static int64_t evaluate_windows(const tune_job *job) {
    const int64_t more = job->count - job->set.context, stride = job->set.stride;
    return more > 0 ? 1 + (more + stride - 1) / stride : 1;
}

/* Writes window w of the text to row r of the batch. Tokens that an earlier window has predicted
 * get no loss in this one. */
static void evaluate_window(const tune_job *job, int64_t w, int64_t r, llm_batch *b) {
    const int64_t begin = w * job->set.stride, length = b->length;
    const int64_t n = job->count - begin < length ? job->count - begin : length;
    /* index in the text of the first token that no earlier window has predicted */
    const int64_t from = w > 0 ? begin - job->set.stride + length
                               : begin + 1;
    for (int64_t i = 0; i < n; i++) {
        b->ids[r * length + i] = job->tokens[begin + i];
        b->segments[r * length + i] = 0;
        b->places[r * length + i] = (int32_t)i;
        if (i + 1 == n || begin + i + 1 < from) continue;
        b->targets[r * length + i] = job->tokens[begin + i + 1];
        b->answers++;
    }
}

/* Callback t->take: makes t->batch of the windows that this replica's batch t->k has. */
static int evaluate_take(tune_rank *t) {
    const tune_job *job = t->job;
    const int64_t rows = job->rows, first = (t->k * t->replicas + t->replica) * rows;
    const int64_t left = evaluate_windows(job) - first, some = left < rows ? left : rows;
    if (!llm_batch_clear(&t->batch, some, job->set.context, 0)) return 0;
    for (int64_t r = 0; r < some; r++) evaluate_window(job, first + r, r, &t->batch);
    tune_trim(&t->batch);
    return 1;
}

/* Returns the sums of losses, hits and counts over all windows of the text. Each replica computes
 * some of them. */
static tune_sums evaluate_text(tune_rank *t) {
    const int64_t rows = t->job->rows, all = t->replicas * rows;
    const int64_t left = evaluate_windows(t->job) - t->replica * rows;
    evaluate_begin(t);
    tune_forward(t, evaluate_take, evaluate_batch, left > 0 ? (left + all - 1) / all : 0);
    evaluate_end(t);
    return tune_reduce(t);
}

/* Runs --evaluate on one rank; the first rank prints the result. */
LLM_API void evaluate_run(tune_rank *t) {
    const tune_job *job = t->job;
    llm_reader_open(&t->reader, &job->data, t->ctx);
    const tune_sums sums = job->tokens ? evaluate_text(t) : evaluate_held(t);
    if (!t->first || !tsh_ok(t->ctx)) return;
    const double loss = sums.loss / sums.count, share = 100 * sums.right / sums.count;
    if (job->data.pairs)
        printf("loss %.6f, preferred %.2f %%, of %.0f pairs\n", loss, share, sums.count);
    else
        printf("loss %.6f, perplexity %.6g, token accuracy %.2f %%, of %.0f tokens\n", loss,
               exp(loss), share, sums.count);
}

#endif
