/* evaluate.h - loss and accuracy of the model of finetune.h: of held-out documents while it learns,
 * of a file by --evaluate */
#ifndef LLM_EVALUATE_H
#define LLM_EVALUATE_H

#include "preference.h"
#include "tune.h"

/* Adds the losses of the batch to the sums. */
static void evaluate_batch(tune_rank *t, tune_sums *sums) {
    tune_trim(&t->batch);
    if (t->job->data.pairs) {
        tune_trim(&t->other);
        prefer_add(t, sums);
        return;
    }
    tsh_scope_begin(t->ctx);
    tsh_tensor *targets = tune_tensor(t, &t->batch, t->batch.targets);
    tsh_tensor *vectors = tune_vectors(t, &t->batch);
    tsh_tensor *loss = vectors ? llm_loss(&t->net, vectors, targets) : NULL;
    if (loss) sums->loss += tsh_item(t->ctx, loss);
    if (loss) sums->right += (double)llm_accuracy(&t->net, vectors, targets);
    sums->count += (double)t->batch.answers;
    tune_forget(t);
    tsh_scope_end(t->ctx);
}

/* Begins and ends work without gradients and dropout, which frees each block's activations. */
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

/* Returns the sums over all held-out documents. */
static tune_sums evaluate_held(tune_rank *t) {
    const int64_t rows = t->job->rows;
    const int64_t steps = llm_data_held_steps(&t->job->data, rows * t->replicas);
    tune_sums sums = {0, 0, 0, 0};
    evaluate_begin(t);
    for (int64_t k = 0; k < steps && tsh_ok(t->ctx); k++) {
        const llm_batch_of of = {
            .step = k, .rows = rows, .replica = t->replica, .replicas = t->replicas};
        if (llm_data_held(&t->reader, &of, &t->batch, &t->other))
            evaluate_batch(t, &sums);
        else
            (void)tune_no_memory(t);
    }
    evaluate_end(t);
    tune_reduce(t, &sums);
    return sums;
}

/* -- a plain text, by windows ---------------------------------------------------- */

/* Returns how many windows of --context tokens, --stride apart, the text has. */
static int64_t evaluate_windows(const tune_job *job) {
    const int64_t more = job->count - job->set.context, stride = job->set.stride;
    return more > 0 ? 1 + (more + stride - 1) / stride : 1;
}

/* Writes window w to row r of the batch. The tokens that the window before has predicted have no
 * loss. */
static void evaluate_window(const tune_job *job, int64_t w, int64_t r, llm_batch *b) {
    const int64_t begin = w * job->set.stride, length = b->length;
    const int64_t n = job->count - begin < length ? job->count - begin : length;
    const int64_t from = w > 0 ? begin - job->set.stride + length
                               : begin + 1; /* predicted so far */
    for (int64_t i = 0; i < n; i++) {
        b->ids[r * length + i] = job->tokens[begin + i];
        b->segments[r * length + i] = 0;
        b->places[r * length + i] = (int32_t)i;
        if (i + 1 == n || begin + i + 1 < from) continue;
        b->targets[r * length + i] = job->tokens[begin + i + 1];
        b->answers++;
    }
}

/* Returns the sums over all windows of the text, of which each replica has some. */
static tune_sums evaluate_text(tune_rank *t) {
    const tune_job *job = t->job;
    const int64_t windows = evaluate_windows(job), rows = job->rows;
    tune_sums sums = {0, 0, 0, 0};
    for (int64_t w = t->replica * rows; w < windows && tsh_ok(t->ctx); w += t->replicas * rows) {
        const int64_t some = windows - w < rows ? windows - w : rows;
        if (!llm_batch_clear(&t->batch, some, job->set.context, 0)) {
            (void)tune_no_memory(t);
            break;
        }
        for (int64_t r = 0; r < some; r++) evaluate_window(job, w + r, r, &t->batch);
        evaluate_batch(t, &sums);
    }
    tune_reduce(t, &sums);
    return sums;
}

/* Runs --evaluate. */
LLM_API void evaluate_run(tune_rank *t) {
    const tune_job *job = t->job;
    tune_sums sums;
    llm_reader_open(&t->reader, &job->data, t->ctx);
    if (job->tokens) {
        evaluate_begin(t);
        sums = evaluate_text(t);
        evaluate_end(t);
    } else {
        sums = evaluate_held(t);
    }
    if (!t->first || !tsh_ok(t->ctx)) return;
    const double loss = sums.loss / sums.count, share = 100 * sums.right / sums.count;
    if (job->data.pairs)
        printf("loss %.6f, preferred %.2f %%, of %.0f pairs\n", loss, share, sums.count);
    else
        printf("loss %.6f, perplexity %.6g, token accuracy %.2f %%, of %.0f tokens\n", loss,
               exp(loss), share, sums.count);
}

#endif
