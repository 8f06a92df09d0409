/* tune_setup.h - what finetune.h and evaluate.h do before the ranks start and after they have
 * ended: checks the settings, reads the data, opens the folder of the run */
#ifndef LLM_TUNE_SETUP_H
#define LLM_TUNE_SETUP_H

#include "tune.h"

/* -- settings ------------------------------------------------------------------ */

/* Returns a sentence that says which settings do not go together; NULL: all do. */
LLM_API const char *tune_check_set(const tune_settings *s) {
    const int trains = s->finetune != NULL, adapts = s->adapter != NULL;
    if (trains && s->evaluate) return "--finetune and --evaluate are two runs";
    if (trains && !s->out) return "--finetune needs --out DIR, a folder for the result";
    if (trains && adapts)
        return "--finetune makes an adapter of its own, by --lora; leave --adapter out";
    if (s->out && !trains && !(adapts && s->merge))
        return "--out is for --finetune, and for --adapter with --merge";
    if (s->merge && !adapts && !s->lora) return "--merge is for --adapter and --lora";
    if (!trains && (s->lora || s->steps || s->epochs || s->accumulate || s->save_every ||
                    s->resume || s->held_out || s->lr > 0 || s->warmup >= 0 || s->eval_every ||
                    s->recompute || s->zero || s->decay != 0 || s->clip != 0))
        return "--lora, --steps, --epochs, --accumulate, --lr, --warmup, --weight-decay, --clip, "
               "--held-out, --eval-every, --save-every, --resume, --recompute and --zero are for "
               "--finetune";
    if (!s->lora && (s->alpha > 0 || s->dropout > 0 || s->targets))
        return "--alpha, --lora-dropout and --targets are for --lora";
    if (s->steps && s->epochs) return "--steps and --epochs exclude each other";
    if (s->dropout >= 1) return "--lora-dropout is a probability, from 0 to below 1";
    if (s->stride && !s->evaluate) return "--stride is for --evaluate";
    if (s->resume && !s->save_every)
        return "--resume goes on with a run that has --save-every; give it the same flags";
    return NULL;
}

/* Splits --targets, names between commas, into job->adapter.targets. Returns 0 after an error. */
static int tune_targets(tune_job *job) {
    llm_adapter *a = &job->adapter;
    for (const char *at = job->set.targets; at && *at;) {
        const size_t n = strcspn(at, ",");
        if (n == 0 || n >= sizeof a->targets[0] || a->count == LLM_ADAPTER_TARGETS)
            return tune_refuse(job, "--targets is a list such as q_proj,v_proj of at most %d names",
                               LLM_ADAPTER_TARGETS);
        memcpy(a->targets[a->count], at, n);
        a->targets[a->count++][n] = 0;
        at += n + (at[n] == ',');
    }
    return 1;
}

/* Fills in the adapter of --lora, or reads the config of --adapter. Returns 0 after an error. */
static int tune_adapter(tune_job *job) {
    tune_settings *s = &job->set;
    llm_adapter *a = &job->adapter;
    tsh_error why;
    if (s->adapter)
        return llm_adapter_read(a, s->adapter, &why) || tune_refuse(job, "%s", why.message);
    if (!s->lora) return 1;
    if (s->lora > 1 << 20) return tune_refuse(job, "--lora %lld is no rank", (long long)s->lora);
    if (!(s->alpha > 0)) s->alpha = 2 * (double)s->lora;
    a->lora.rank = (int)s->lora;
    a->lora.alpha = s->alpha;
    a->lora.dropout = s->dropout > 0 ? s->dropout : 0;
    snprintf(a->base, sizeof a->base, "%.255s", job->model);
    snprintf(a->task, sizeof a->task, "CAUSAL_LM");
    return tune_targets(job);
}

/* Returns 0 and an error if the flags ask for what the model cannot do. */
static int tune_check_model(tune_job *job) {
    const llm_config *c = job->config;
    const tune_settings *s = &job->set;
    const int whole = s->finetune && !s->lora;
    if (c->encoder || !c->causal)
        return tune_refuse(job, "%s: such a model does not predict the next token", c->type);
    if (s->pp > c->layers)
        return tune_refuse(job,
                           "--pp %lld: the model has %lld layers, of which a stage takes one "
                           "or more",
                           (long long)s->pp, (long long)c->layers);
    if (whole && job->weights_name)
        return tune_refuse(job,
                           "--weights %s: weights of 8 or 4 bits stay as they are; give --lora, "
                           "or leave --weights out",
                           job->weights_name);
    if (whole && c->gguf)
        return tune_refuse(job,
                           "%s is a GGUF file, which is not written; give --lora, whose adapter "
                           "is a folder of its own",
                           job->model);
    if (s->merge && s->out && (c->gguf || job->weights_name))
        return tune_refuse(job, "--merge: weights of 8 or 4 bits and GGUF files cannot be merged "
                                "with an adapter; leave --merge out");
    if (s->finetune && job->dtype == TSH_F16)
        return tune_refuse(job,
                           "--dtype f16 is for running; its range is too small to train in: give "
                           "--dtype bf16 or f32");
    return 1;
}

/* Sets the default of --context. Returns 0 and an error if the model has fewer positions. */
static int tune_context(tune_job *job) {
    const char *why = "";
    const cJSON *trained = cJSON_GetObjectItem(job->config->unread, "max_position_embeddings");
    int64_t most = llm_longest(job->config, &why);
    if (!trained) trained = cJSON_GetObjectItem(job->config->read, "max_position_embeddings");
    if (most && job->set.context > most)
        return tune_refuse(job, "--context %lld is more than %lld: %s", (long long)job->set.context,
                           (long long)most, why);
    if (!most && cJSON_IsNumber(trained) && trained->valuedouble >= 1) {
        most = trained->valuedouble < 1e9 ? (int64_t)trained->valuedouble : 0;
    }
    if (!job->set.context) job->set.context = most && most < TUNE_CONTEXT ? most : TUNE_CONTEXT;
    most = job->config->rope.limit; /* beyond it, each stage would need to know a batch's length */
    if (job->set.pp > 1 && most && job->set.context > most)
        return tune_refuse(
            job,
            "--pp takes a --context of at most %lld here, not %lld: beyond it, rotary "
            "frequencies depend on how long the texts of a batch are",
            (long long)most, (long long)job->set.context);
    return 1;
}

/* Sets how many rows a micro-batch has, and --accumulate. Returns 0 after an error. */
static int tune_split(tune_job *job) {
    tune_settings *s = &job->set;
    const int64_t dp = s->dp ? s->dp : 1;
    if (!s->batch) s->batch = TUNE_BATCH % dp ? dp : TUNE_BATCH;
    if (s->batch % dp)
        return tune_refuse(job, "--batch %lld does not divide by --dp %lld", (long long)s->batch,
                           (long long)dp);
    const int64_t own = s->batch / dp;
    if (!s->accumulate) {
        s->accumulate = 1;
        while (s->accumulate < own &&
               (own % s->accumulate || own / s->accumulate * s->context > TUNE_TOKENS ||
                s->accumulate < s->pp)) /* so that all stages of the pipeline have work */
            s->accumulate++;
    }
    if (own % s->accumulate)
        return tune_refuse(job,
                           "--batch %lld, of which each of %lld replicas has %lld rows, does not "
                           "divide by --accumulate %lld",
                           (long long)s->batch, (long long)dp, (long long)own,
                           (long long)s->accumulate);
    job->rows = own / s->accumulate;
    return 1;
}

/* -- data ------------------------------------------------------------------------- */

/* Returns 1 if a file is read as JSON lines by data.h. */
static int tune_is_json(const char *path) {
    return llm_data_is_json(path);
}

/* Reads the documents of --finetune or --evaluate into job->data. Returns 0 after an error. */
static int tune_read(tune_job *job) {
    const tune_settings *s = &job->set;
    const llm_data_desc desc = {.path = s->finetune ? s->finetune : s->evaluate,
                                .codec = job->codec,
                                .length = s->context,
                                .format = job->format,
                                .held_path = s->held_out,
                                .held_every = s->finetune && !s->held_out ? 10 : 0,
                                .all = s->all_tokens,
                                .unpacked = s->unpacked,
                                .truncate = s->truncate};
    llm_data *d = &job->data;
    if (!llm_data_open(d, &desc)) return tune_refuse(job, "%s", d->error);
    if (s->evaluate) d->held = d->train;
    if (!d->pairs && s->beta > 0)
        return tune_refuse(job,
                           "--dpo is for lines of \"prompt\", \"chosen\" and \"rejected\", and %s "
                           "has none",
                           desc.path);
    if (!d->pairs) return 1;
    d->desc.unpacked = 1; /* preferences are not packed: a row has one of them */
    d->train.rows = d->train.count;
    d->held.rows = d->held.count;
    if (s->evaluate && (!s->adapter || s->merge))
        return tune_refuse(job,
                           "%s has preferences, for which an adapter is compared with the model "
                           "without it; give --adapter DIR, without --merge",
                           desc.path);
    return 1;
}

/* Reads the plain text of --evaluate into job->tokens. Returns 0 after an error. */
static int tune_read_text(tune_job *job) {
    const char *path = job->set.evaluate, *text = NULL;
    size_t length = 0;
    /* fopen, not tsh_file_open: the file may be a pipe */
    llm_data_file f = {.data = &job->data, .path = path, .file = fopen(path, "rb")};
    if (!f.file) (void)tune_refuse(job, "%s: %s", path, strerror(errno));
    if (f.file && !(text = llm_data_whole(&f, &length)))
        (void)tune_refuse(job, "%s", job->data.error);
    if (f.file) (void)fclose(f.file);
    if (text) job->count = text_encode(job->codec, text, length, 1, &job->tokens);
    free(f.text);
    if (job->count < 0) return tune_refuse(job, "%s: %s", path, job->codec->error);
    if (job->tokens && job->count < 2)
        return tune_refuse(
            job, "%s has fewer than two tokens, of which the second would have a loss", path);
    return job->tokens != NULL;
}

/* Sets job->prompt, which the model continues as a sample: the prompt of the first held-out
 * document, or the first tokens of one without a prompt. Returns 0: not enough memory. */
static int tune_choose_prompt(tune_job *job) {
    const llm_data *d = &job->data;
    const int64_t first = d->held.count ? d->held.first : 0;
    const llm_sequence *q = &d->sequences[d->pairs ? 2 * first : first];
    int64_t n = 0;
    while (n < q->inputs && d->ids[q->at + n] < 0) n++;
    if (n == 0) n = q->inputs < TUNE_PROMPT ? q->inputs : TUNE_PROMPT;
    job->prompt = (int32_t *)malloc((size_t)n * sizeof *job->prompt);
    if (!job->prompt) return tune_refuse(job, "not enough memory");
    for (int64_t i = 0; i < n; i++) {
        const int32_t id = d->ids[q->at + i];
        job->prompt[i] = id < 0 ? ~id : id;
    }
    job->prompt_count = n;
    if (job->config->places && n + job->set.max_new > job->config->places)
        job->set.max_new = job->config->places - n;
    /* the limit of a pipeline's texts, as in tune_context */
    const int64_t limit = job->set.pp > 1 ? job->config->rope.limit : 0;
    if (limit && n + job->set.max_new > limit) job->set.max_new = limit - n;
    return 1;
}

/* Sets the defaults of flags, such as --steps, that depend on the data. */
static void tune_defaults(tune_job *job) {
    tune_settings *s = &job->set;
    const int64_t rows = job->data.train.rows * (s->epochs ? s->epochs : 1);
    if (!s->steps) s->steps = (rows + s->batch - 1) / s->batch;
    if (s->warmup < 0) s->warmup = s->steps / 10 < 100 ? s->steps / 10 : 100;
    if (!s->eval_every) s->eval_every = s->steps < 5 ? 1 : s->steps / 5;
    if (!(s->lr > 0)) s->lr = (s->lora ? 2e-4 : 2e-5) / (job->data.pairs ? 10 : 1);
    if (s->clip == 0) s->clip = 1;
    if (!(s->beta > 0)) s->beta = 0.1;
}

/* -- the folder of the run ----------------------------------------------------------- */

/* Writes to `text` a line for each setting on which the losses depend; --resume compares them. */
static void tune_describe(const tune_job *job, char text[STATE_SETTINGS]) {
    const tune_settings *s = &job->set;
    const llm_data *d = &job->data;
    const uint64_t hash = state_hash(STATE_HASH, d->ids, d->tokens * (int64_t)sizeof *d->ids);
    text[0] = 0;
    tsh_text_add(text, STATE_SETTINGS,
                 "model %.300s\ndtype %s\nweights %s\ndata of %lld tokens, hash %016llx\nheld out "
                 "%lld\n",
                 job->model, job->dtype_name ? job->dtype_name : "as the model's",
                 job->weights_name ? job->weights_name : "as the model's", (long long)d->tokens,
                 (unsigned long long)hash, (long long)d->held.count);
    tsh_text_add(text, STATE_SETTINGS,
                 "lora %lld\nalpha %.15g\nlora-dropout %.15g\ntargets %.300s\ncontext %lld\nbatch "
                 "%lld\nunpacked %d\n",
                 (long long)s->lora, s->alpha, s->dropout, s->targets ? s->targets : "all",
                 (long long)s->context, (long long)s->batch, d->desc.unpacked);
    tsh_text_add(
        text, STATE_SETTINGS,
        "steps %lld\nlr %.15g\nwarmup %lld\nweight-decay %.15g\nclip %.15g\ndpo %.15g\nseed "
        "%lld\n",
        (long long)s->steps, s->lr, (long long)s->warmup, s->decay, s->clip,
        d->pairs ? s->beta : 0.0, (long long)s->seed);
}

/* Sets job->folder to OUT.run. Returns 0: not enough memory. */
static int tune_name_run(tune_job *job) {
    const char *out = job->set.out;
    size_t n = strlen(out);
    while (n > 1 && out[n - 1] == '/') n--;
    job->folder = (char *)malloc(n + 5);
    if (!job->folder) return tune_refuse(job, "not enough memory");
    memcpy(job->folder, out, n);
    memcpy(job->folder + n, ".run", 5);
    return 1;
}

/* On rank 0: opens the folder of the run, OUT.run. Returns 0 and *why after an error. */
LLM_API int tune_open_run(tune_job *job, tsh_error *why) {
    const tune_settings *s = &job->set;
    char now[STATE_SETTINGS];
    tune_describe(job, now);
    if (s->save_every && !state_open(job->folder, s->resume, now, &job->found, why)) return 0;
    job->report.unit = job->data.pairs ? "nats per preference" : "nats per token";
    job->report.accuracy = job->data.pairs ? "preferred" : "accuracy";
    if (report_open(&job->report, job->folder, s->steps, s->resume)) return 1;
    *why = job->report.error;
    return 0;
}

/* -- before the ranks start, and after they have ended ------------------------------------ */

/* Checks the settings and reads the data: call it once the config is read and the tokenizer open,
 * before the ranks start. Nothing is written if it fails. Returns 0: job->error says why. Call
 * tune_close in either case. */
LLM_API int tune_prepare(tune_job *job) {
    tune_settings *s = &job->set;
    tsh_error why;
    if (s->max_new < 0) s->max_new = TUNE_SAMPLE;
    if (!s->finetune) s->max_new = 0;
    if (!tune_check_model(job) || !tune_context(job) || !tune_adapter(job)) return 0;
    if (s->out && job->rank == 0 && !llm_out_check(s->out, &why))
        return tune_refuse(job, "%s", why.message);
    if (!tune_split(job)) return 0;
    if (!s->stride) s->stride = s->context > 1 ? s->context / 2 : 1;
    if (s->stride > s->context)
        return tune_refuse(job,
                           "--stride %lld is more than the context of %lld: tokens would be "
                           "left out",
                           (long long)s->stride, (long long)s->context);
    if (s->evaluate && !tune_is_json(s->evaluate)) return tune_read_text(job);
    if (!s->finetune && !s->evaluate) return 1;
    if (!tune_read(job)) return 0;
    tune_defaults(job);
    if (!s->finetune) return 1;
    return tune_choose_prompt(job) && tune_name_run(job);
}

/* Called after the ranks have ended without an error: writes loss.svg, and prints where the results
 * are. Returns 0: job->error says why. */
LLM_API int tune_finish(tune_job *job) {
    const tune_settings *s = &job->set;
    gpt_report *r = &job->report;
    char title[200];
    if (!s->finetune || job->rank > 0) return 1;
    snprintf(title, sizeof title, "%.60s: %lld steps of %lld rows of %lld tokens%s",
             job->config->type, (long long)s->steps, (long long)s->batch, (long long)s->context,
             job->data.pairs ? ", DPO" : "");
    if (!report_svg(r, title)) return tune_refuse(job, "%s", r->error.message);
    if (job->stopped)
        printf("stopped   after step %lld of %lld; the same command with --resume goes on\n",
               (long long)job->stopped, (long long)s->steps);
    else
        printf("wrote     %s, %s\n", s->out, s->lora && !s->merge ? "an adapter" : "a model");
    printf("wrote     %s/metrics.csv, %s/loss.svg\n", job->folder, job->folder);
    return 1;
}

/* Frees what the job has. Returns 0: job->error says what could not be written. */
LLM_API int tune_close(tune_job *job) {
    const int good = report_close(&job->report);
    if (!good) (void)tune_refuse(job, "%s", job->report.error.message);
    llm_data_close(&job->data);
    free(job->tokens);
    free(job->prompt);
    free(job->folder);
    return good;
}

#endif
