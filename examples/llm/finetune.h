/* finetune.h - trains a model of this folder on a text, on conversations or on preferences: all of
 * its weights, or adapters of low rank (LoRA)
 *
 *     tune_job job = {.set = {.finetune = "chats.jsonl", .out = "DIR2", .lora = 8, ...}};
 *     if (!tune_prepare(&job)) puts(job.error);   before the ranks start
 *     tune_run(ctx, &job);                        on every rank
 *     if (!tune_finish(&job)) puts(job.error);
 *     tune_close(&job);
 *
 * A step takes set.batch rows of set.context tokens, which the replicas of data parallelism and the
 * micro-batches of each (set.accumulate) share: its loss, the sum over all targets with a loss
 * divided by their number, does not depend on how they are shared. OUT.run has metrics.csv and
 * loss.svg and, with set.save_every, the state of the run; OUT, the result, is written at the end.
 *
 * Include tshard.h first. */
#ifndef LLM_FINETUNE_H
#define LLM_FINETUNE_H

#include "evaluate.h"
#include "preference.h"
#include "tune_setup.h"
#include "tune.h"

/* -- one step ---------------------------------------------------------------- */

/* Makes t->optim, AdamW as in PyTorch, with the norm of the gradients clipped, and t->schedule, the
 * learning rates. Returns 0 after an error. */
static int tune_make_optimiser(tune_rank *t) {
    const tune_settings *s = t->set;
    const tsh_optim_desc adamw = {.kind = TSH_ADAMW,
                                  .lr = s->lr,
                                  .weight_decay = s->decay > 0 ? s->decay : 0,
                                  .clip_norm = s->clip > 0 ? s->clip : 0,
                                  .zero = s->zero};
    t->schedule = (tsh_schedule){
        .kind = TSH_COSINE, .lr = s->lr, .warmup = s->warmup, .total = s->steps};
    t->optim = tsh_optim_new(t->net.root, &adamw);
    return t->optim != NULL;
}

/* Callback of tsh_each_param: a vector, such as a bias or the weight of a norm, does not decay. */
static void tune_group(const char *path, tsh_tensor *param, void *user) {
    tune_rank *t = (tune_rank *)user;
    if (tsh_ndim(param) == 1 && t->optim) (void)tsh_optim_group(t->optim, path, 1, 0);
}

/* Callback t->score: returns the batch's loss, and adds it to t->sums. */
static tsh_tensor *tune_loss(tune_rank *t, tsh_tensor *vectors) {
    tsh_tensor *loss;
    t->weight = (double)t->batch.answers;
    if (t->job->data.pairs)
        loss = prefer_loss(t, vectors);
    else
        loss = llm_loss(&t->net, vectors, tune_tensor(t, &t->batch, t->batch.targets));
    t->sums.loss += loss ? tsh_item(t->ctx, loss) : 0;
    t->sums.count += t->weight;
    t->sums.tokens += tune_count_tokens(&t->batch);
    return loss;
}

/* Runs step t->step of the optimiser. Returns the step's sums of losses and counts over all
 * replicas. */
static tune_sums tune_step(tune_rank *t) {
    if (!t->job->data.pairs || prefer_begin(t, tune_take_micro, t->set->accumulate))
        tune_backward(t, tune_take_micro, tune_loss);
    tsh_optim_set_lr(t->optim, tsh_schedule_lr(&t->schedule, t->step));
    (void)tsh_optim_step(t->optim);
    tsh_zero_grads(t->net.root);
    (void)tsh_step_end(t->ctx);
    return tune_reduce(t);
}

/* -- generating a sample ------------------------------------------------------ */

/* Returns 1 if the token ends a text. */
static int tune_ends(const llm_config *c, int64_t id) {
    for (int i = 0; i < c->eos_count; i++)
        if (c->eos[i] == id) return 1;
    return 0;
}

/* Sets t->next to the most likely token by logits (1, 1, V); -1 after an error. */
static void tune_choose(tune_rank *t, tsh_tensor *logits) {
    const tsh_sample_desc likely = {.temperature = TSH_ZERO};
    if (!logits || tsh_read(t->ctx, tsh_sample(logits, &likely), TSH_GLOBAL, &t->next,
                            sizeof t->next) != TSH_OK)
        t->next = -1;
}

/* Callback t->take: makes t->batch of one row, the sample so far. */
static int tune_take_text(tune_rank *t) {
    llm_batch *b = &t->batch;
    if (!llm_batch_clear(b, 1, t->count, 0)) return 0;
    for (int64_t i = 0; i < t->count; i++) {
        b->ids[i] = t->text[i];
        b->segments[i] = 0;
        b->places[i] = (int32_t)i;
    }
    return 1;
}

/* Callback t->score: sets t->next to the most likely token after the sample so far. */
static tsh_tensor *tune_score_text(tune_rank *t, tsh_tensor *vectors) {
    tune_choose(t, llm_head_logits(&t->net, tsh_slice(vectors, 1, t->count - 1, 1)));
    return tsh_zeros(t->ctx, tsh_shape0());
}

/* Sets t->next to the most likely token after the sample so far. The cache has its first `past`
 * tokens; a pipeline has no cache, and runs the whole sample. Returns 0 after an error. */
static int tune_next(tune_rank *t, int64_t past) {
    tsh_comm *pp = tsh_pp(t->ctx);
    if (t->forward) {
        tune_forward(t, tune_take_text, tune_score_text, 1);
        return tsh_ok(t->ctx) && tsh_broadcast(pp, &t->next, 1, TSH_I64, pp->size - 1) == TSH_OK &&
               t->next >= 0;
    }
    tsh_scope_begin(t->ctx);
    tune_choose(t, llm_logits(&t->net, t->text + past, t->count - past, NULL));
    tsh_scope_end(t->ctx);
    return t->next >= 0;
}

/* Continues the prompt greedily, into `out` on rank 0. */
static void tune_generate(tune_rank *t, text_out *out) {
    const tune_job *job = t->job;
    int64_t past = 0;
    t->count = job->prompt_count;
    t->text = (int32_t *)malloc((size_t)(t->count + t->set->max_new) * sizeof *t->text);
    if (t->text)
        memcpy(t->text, job->prompt, (size_t)t->count * sizeof *t->text);
    else
        (void)tune_no_memory(t);
    for (int64_t i = 0; i < t->set->max_new && tsh_ok(t->ctx); i++) {
        if (!tune_next(t, past) || tune_ends(job->config, t->next)) break;
        past = t->count;
        t->text[t->count++] = (int32_t)t->next;
        if (t->first && !text_add(out, (int32_t)t->next)) (void)tune_no_memory(t);
    }
    free(t->text);
    t->text = NULL;
}

/* Prints what the model writes after the first held-out prompt. when: "before" or "after". */
static void tune_sample(tune_rank *t, const char *when) {
    static const text_list none = {NULL, 0};
    const tune_job *job = t->job;
    llm_net *m = &t->net;
    text_out out = {.codec = job->codec, .stops = &none};
    if (t->set->max_new < 1 || job->prompt_count < 1 || !tsh_ok(t->ctx)) return;
    tune_forget(t);
    memset(m->past, 0, (size_t)m->rows * sizeof *m->past);
    tsh_train(m->root, 0);
    tsh_no_grad_begin(t->ctx);
    if (!t->forward)
        m->cache = tsh_cache_new(m->root, 1, job->prompt_count + t->set->max_new,
                                 TSH_DTYPE_DEFAULT);
    if (tsh_ok(t->ctx)) tune_generate(t, &out);
    tsh_cache_free(m->cache);
    m->cache = NULL;
    tsh_no_grad_end(t->ctx);
    tsh_train(m->root, 1);
    if (t->first && tsh_ok(t->ctx)) {
        (void)text_finish(&out);
        printf("\n%s training, after the first held-out prompt:\n", when);
        (void)text_write(job->codec, out.at ? out.at : "", out.length);
        printf("\n\n");
        fflush(stdout);
    }
    text_clear(&out);
}

/* -- the training loop --------------------------------------------------------- */

static void tune_state_path(char path[STATE_PATH], const tune_job *job) {
    state_path(path, job->folder, "state.safetensors");
}

/* Loads the saved state of an earlier run, if there is one. Returns how many steps that run had
 * done; 0: there is none. */
static int64_t tune_resume(tune_rank *t) {
    tune_job *job = t->job;
    int32_t found = t->first ? job->found : 0; /* only rank 0 has looked for a saved state */
    int64_t step = 0;
    char path[STATE_PATH];
    if (tsh_broadcast(tsh_world(t->ctx), &found, 1, TSH_I32, 0) != TSH_OK) return 0;
    tune_state_path(path, job);
    if (found && tsh_load(t->net.root, path, t->optim) == TSH_OK) {
        const tsh_optim_info info = tsh_optim_state(t->optim);
        step = info.steps + info.skipped;
    }
    if (!t->first || !tsh_ok(t->ctx)) return step;
    if (t->set->resume) (void)report_resume(&job->report, step);
    if (job->report.csv.error.code != TSH_OK)
        (void)tsh_fail(t->ctx, TSH_ERR_IO, "%s", job->report.csv.error.message);
    if (found) printf("resumed   %s, after step %lld\n", path, (long long)step);
    return step;
}

/* Saves the state of the run if it is due after `step` steps, or if a signal has come on any rank.
 * Returns 1, on all ranks, if training is to stop here because of a signal. */
static int tune_save_state(tune_rank *t, int64_t step) {
    const tune_settings *s = t->set;
    char path[STATE_PATH];
    int32_t asked = state_asked;
    if (s->save_every == 0) return 0;
    if (tsh_allreduce(tsh_world(t->ctx), &asked, 1, TSH_I32, TSH_MAX) != TSH_OK) return 0;
    if (!asked && step % s->save_every != 0 && step != s->steps) return 0;
    /* before the state is saved, so that metrics.csv has the rows of all its steps */
    if (t->first) report_sync(&t->job->report);
    tune_state_path(path, t->job);
    (void)tsh_save(t->net.root, path, t->optim);
    return asked && step < s->steps && tsh_ok(t->ctx);
}

/* Trains from step `from` on. Returns the step after which it ended. */
static int64_t tune_loop(tune_rank *t, int64_t from) {
    const tune_settings *s = t->set;
    gpt_report *report = &t->job->report;
    int64_t step = from;
    int stop = 0;
    if (t->first) report_begin(report);
    while (step < s->steps && !stop && tsh_ok(t->ctx)) {
        const double start = report_now();
        t->step = step++;
        const tune_sums sums = tune_step(t);
        const double elapsed = report_now() - start;
        const tsh_optim_info info = tsh_optim_state(t->optim);
        report_row row = {.step = step,
                          .train_loss = sums.loss / sums.count,
                          .lr = info.lr,
                          .grad_norm = info.norm,
                          .tokens_per_s = sums.tokens / elapsed};
        row.evaluated = (step % s->eval_every == 0 || step == s->steps) && t->job->data.held.rows;
        if (row.evaluated) {
            const tune_sums held = evaluate_held(t);
            row.val_loss = held.loss / held.count;
            row.accuracy = held.right / held.count;
        }
        if (t->first && tsh_ok(t->ctx)) report_step(report, &row);
        stop = tsh_ok(t->ctx) && tune_save_state(t, step);
    }
    if (stop && t->first) t->job->stopped = step;
    return step;
}

/* -- the model, and what is written ---------------------------------------------- */

/* Callback of tsh_each_param: adds a parameter's elements to t->parameters, and to t->trained if it
 * is trained. */
static void tune_count(const char *path, tsh_tensor *param, void *user) {
    tune_rank *t = (tune_rank *)user;
    const int adapter = strstr(path, ".lora_A.") || strstr(path, ".lora_B.");
    t->parameters += tsh_numel(param);
    if (adapter || !t->set->lora) t->trained += tsh_numel(param);
}

/* Makes the model, its adapters and, with --pp, its pipelines, and loads the weights. Returns 0
 * after an error. */
static int tune_load(tune_rank *t) {
    tune_job *job = t->job;
    llm_net *m = &t->net;
    const int64_t room = job->prompt_count + t->set->max_new;
    const int64_t rows = job->data.pairs ? 2 * job->rows : job->rows;
    if (llm_model_make(m, t->ctx, job->config, job->family, rows > 1 ? rows : 1,
                       room > 0 ? room : 1, llm_made_as(job->config, job->weights)) != TSH_OK)
        return 0;
    m->rows = 1;
    if (job->adapter.lora.rank && llm_model_adapter_add(m, &job->adapter) != TSH_OK) return 0;
    tsh_each_param(m->root, tune_count, t); /* before tune_deal, so as to count all stages */
    if (!tune_deal(t) || llm_model_fill(m, job->model, job->weights) != TSH_OK) return 0;
    if (t->set->adapter && llm_model_adapter_load(m, &job->adapter, t->set->adapter) != TSH_OK)
        return 0;
    return !t->set->adapter || !t->set->merge || tsh_lora_merge(m->root) == TSH_OK;
}

/* Writes the adapters, with the model's tokenizer, as a folder of PEFT. */
static void tune_write_adapter(tune_rank *t) {
    const tune_job *job = t->job;
    llm_out folder;
    if (llm_out_begin(t->ctx, &folder, t->set->out) != TSH_OK) return;
    if (llm_model_adapter_save(&t->net, &job->adapter, folder.temporary) == TSH_OK &&
        llm_out_tokenizer(t->ctx, &folder, job->model) == TSH_OK)
        (void)llm_out_commit(t->ctx, &folder);
    llm_out_abort(&folder);
}

/* Writes the whole model, in the dtype of --dtype or of its files. Adapters are merged. */
static void tune_write_model(tune_rank *t) {
    const tune_job *job = t->job;
    (void)llm_model_save(&t->net, job->model, t->set->out,
                         job->dtype_name ? job->dtype : job->config->dtype);
}

/* Writes the result of training to --out: the adapters, or the whole model. */
static void tune_write(tune_rank *t) {
    if (t->set->lora && !t->set->merge)
        tune_write_adapter(t);
    else if (!t->set->lora || tsh_lora_merge(t->net.root) == TSH_OK)
        tune_write_model(t);
}

/* Prints what is trained, on what, and how. */
static void tune_tell(const tune_rank *t) {
    const tune_job *job = t->job;
    const tune_settings *s = t->set;
    const llm_data_part *train = &job->data.train, *held = &job->data.held;
    char a[32], b[32], c[32];
    printf(
        "data      %s: %s %s, %s tokens, %s of them with a loss, in %lld rows of %lld; %lld held "
        "out\n",
        s->finetune, report_commas(a, train->count), job->data.pairs ? "preferences" : "documents",
        report_commas(b, train->inputs), report_commas(c, train->answers), (long long)train->rows,
        (long long)s->context, (long long)held->count);
    if (job->data.dropped)
        printf("data      %lld more have no answer within the context\n",
               (long long)job->data.dropped);
    printf("model     %s: %s parameters, of which %s (%.3g %%) are trained", job->model,
           report_commas(a, t->parameters), report_commas(b, t->trained),
           100.0 * (double)t->trained / (double)t->parameters);
    if (s->lora) printf(": LoRA of rank %lld, alpha %g", (long long)s->lora, s->alpha);
    printf("\nranks     %d: tp %d x pp %d x dp %d\n", tsh_world(t->ctx)->size, tsh_tp(t->ctx)->size,
           tsh_pp(t->ctx)->size, tsh_dp(t->ctx)->size);
    printf("training  %lld steps of %lld rows in %lld micro-batches, AdamW, learning rate %g%s\n",
           (long long)s->steps, (long long)s->batch, (long long)s->accumulate, s->lr,
           job->data.pairs ? ", DPO" : "");
    fflush(stdout);
}

/* Prints loss and accuracy of the held-out documents. */
static void tune_tell_held(tune_rank *t, const char *when) {
    if (!t->job->data.held.rows || !tsh_ok(t->ctx)) return;
    const tune_sums held = evaluate_held(t);
    if (t->first && tsh_ok(t->ctx))
        printf("%-9s held-out loss %.4f, %s accuracy %.1f %%\n", when, held.loss / held.count,
               t->job->data.pairs ? "preference" : "token", 100 * held.right / held.count);
    if (t->first) fflush(stdout);
}

/* Trains the model, and writes the result. */
static void tune_train(tune_rank *t) {
    tune_job *job = t->job;
    const int catches = t->set->save_every && (t->first || job->joins);
    tsh_error why;
    memset(&why, 0, sizeof why);
    if (t->first) (void)tune_open_run(job, &why);
    if (llm_agree(t->ctx, &why) != TSH_OK) return;
    llm_reader_open(&t->reader, &job->data, t->ctx);
    if (t->first) tune_tell(t);
    tsh_train(t->net.root, 1);
    tune_checkpoint(t->net.root, t->set->recompute);
    if (job->data.pairs && !prefer_prepare(t)) return;
    if (!tune_make_optimiser(t)) return;
    if (t->set->decay > 0 && !t->set->lora) tsh_each_param(t->net.root, tune_group, t);
    const int64_t from = tune_resume(t);
    if (from == 0) tune_tell_held(t, "before");
    if (from == 0) tune_sample(t, "before");
    if (catches) state_catch_signals(1);
    const int64_t end = tsh_ok(t->ctx) ? tune_loop(t, from) : 0;
    if (catches) state_catch_signals(0);
    if (!tsh_ok(t->ctx) || end < t->set->steps) return;
    tune_sample(t, "after");
    tsh_train(t->net.root, 0);
    if (tsh_ok(t->ctx)) tune_write(t);
}

/* What each rank does for --finetune, --evaluate, and for --adapter with --merge and --out. */
LLM_API int tune_run(tsh_ctx *ctx, void *user) {
    tune_rank *t = (tune_rank *)calloc(1, sizeof *t);
    if (!t) {
        (void)tsh_fail(ctx, TSH_ERR_MEMORY, "not enough memory");
        return 1;
    }
    t->ctx = ctx;
    t->job = (tune_job *)user;
    t->set = &t->job->set;
    t->first = tsh_world(ctx)->rank == 0;
    t->replicas = tsh_dp(ctx)->size;
    t->replica = tsh_dp(ctx)->rank;
    if (tune_load(t)) {
        if (t->set->finetune)
            tune_train(t);
        else if (t->set->evaluate)
            evaluate_run(t);
        else
            tune_write_model(t);
    }
    llm_reader_close(&t->reader);
    llm_batch_free(&t->batch);
    llm_batch_free(&t->pair[0]);
    llm_batch_free(&t->pair[1]);
    free(t->reference);
    free(t->difference);
    free(t);
    return !tsh_ok(ctx);
}

#endif
