/* gpt.c - trains a GPT on a text file, tensor-parallel on threads, or on processes over TCP or MPI
 *
 *   make run                                      learns the C sources of this project
 *   make run ARGS="--text book.txt --chars"       learns a book, character by character
 *   make run ARGS="--help"                        tells every flag
 *   make run ARGS="--save DIR"                    can go on later, with --resume
 *   build/tshard-run -n 2 build/gpt --backend tcp one process per rank
 *   mpirun -n 2 build/gpt-mpi --backend mpi       the same under MPI
 *
 * The model is GPT-2's, written once, as if for one device (section 1). A plan shards it (section
 * 2), a pipeline deals its blocks to stages. Every rank then runs the same training loop (section
 * 3) on its piece of the weights, and nothing in it knows how many ranks there are.
 *
 * Shapes: B batch, T context, C width, H heads, D = C / H head size, V vocabulary. */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L /* isatty, mkdir, glob, clock_gettime */
#endif
#define TSHARD_IMPLEMENTATION
#include "../tshard.h"
#include "../backends/tshard_threads.h"
#ifdef GPT_TCP
#include "../backends/tshard_uv.h"
#endif
#ifdef GPT_MPI
#include "../backends/tshard_mpi.h"
#endif
#ifdef GPT_BLIS
#include "../backends/tshard_blis.h"
#endif
#include "output.h"
#include "gpt_report.h"
#include "gpt_setup.h"
#include "gpt_state.h"

/* == 1. the model, for one device ========================================== */

/* The output of a module's child: call(block, "ln_1", x). */
static tsh_tensor *call(tsh_module *module, const char *child, tsh_tensor *x) {
    return tsh_forward(tsh_find(module, child), x);
}

/* (B, T, C) -> (B, H, T, D) */
static tsh_tensor *split_heads(tsh_tensor *x, int64_t heads) {
    tsh_shape shape = tsh_shape4(tsh_size(x, 0), tsh_size(x, 1), heads, tsh_size(x, -1) / heads);
    return tsh_transpose(tsh_reshape(x, shape), 1, 2);
}

/* (B, H, T, D) -> (B, T, C) */
static tsh_tensor *merge_heads(tsh_tensor *x) {
    tsh_shape shape = tsh_shape3(tsh_size(x, 0), tsh_size(x, 2), tsh_size(x, 1) * tsh_size(x, 3));
    return tsh_reshape(tsh_transpose(x, 1, 2), shape);
}

static tsh_tensor *attention(tsh_module *self, tsh_tensor **in, int n, void *user) {
    const gpt_settings *set = (const gpt_settings *)user;
    const tsh_attention_desc desc = {
        .causal = 1, .dropout = tsh_training(self) ? set->dropout : 0, .owner = self};
    tsh_tensor *qkv[3] = {NULL, NULL, NULL};
    (void)n;
    tsh_split(call(self, "c_attn", in[0]), -1, 3, qkv); /* (B, T, 3C) -> 3 of (B, T, C) */
    for (int i = 0; i < 3; i++) qkv[i] = split_heads(qkv[i], set->heads);
    tsh_tensor *y = merge_heads(tsh_attention(qkv[0], qkv[1], qkv[2], &desc));
    return call(self, "dropout", call(self, "c_proj", y));
}

static tsh_tensor *mlp(tsh_module *self, tsh_tensor **in, int n, void *user) {
    (void)n, (void)user;
    tsh_tensor *hidden = tsh_gelu_tanh(call(self, "c_fc", in[0])); /* (B, T, 4C) */
    return call(self, "dropout", call(self, "c_proj", hidden));
}

static tsh_tensor *block(tsh_module *self, tsh_tensor **in, int n, void *user) {
    (void)n, (void)user;
    tsh_tensor *x = in[0], *y = call(self, "attn", call(self, "ln_1", x));
    y = tsh_forward_residual(tsh_find(self, "ln_2"), &x, y); /* x += y; of that the norm */
    return tsh_add(x, call(self, "mlp", y));
}

/* ids (B, T) -> (B, T, C): what the first block takes. */
static tsh_tensor *embed(tsh_module *gpt, tsh_tensor *ids) {
    tsh_tensor *place = tsh_arange(tsh_ctx_of(ids), TSH_I32, 0, (double)tsh_size(ids, 1), 1);
    return call(gpt, "drop", tsh_add(call(gpt, "wte", ids), call(gpt, "wpe", place)));
}

/* Weights are stored (in, out), as GPT-2's are. */
static tsh_linear_desc linear(int64_t in, int64_t out, double deviation) {
    tsh_linear_desc desc = {.in = in, .out = out, .reversed = 1};
    desc.weight_init = (tsh_init){.kind = TSH_INIT_NORMAL, .b = deviation};
    desc.bias_init = (tsh_init){.kind = TSH_INIT_ZEROS};
    return desc;
}

static void add_block(tsh_module *h, int64_t index, gpt_settings *set) {
    int64_t width = set->width;
    double residual = 0.02 / sqrt(2.0 * (double)set->layers); /* 2 layers write to the residual */
    tsh_layer_norm_desc norm = {.dim = width};
    tsh_linear_desc c_attn = linear(width, 3 * width, 0.02);
    tsh_linear_desc c_fc = linear(width, 4 * width, 0.02);
    tsh_linear_desc attn_proj = linear(width, width, residual);
    tsh_linear_desc mlp_proj = linear(4 * width, width, residual);
    tsh_module_desc as_block = {.forward = block}, as_mlp = {.forward = mlp};
    tsh_module_desc as_attention = {.forward = attention, .user = set};
    char name[24];

    snprintf(name, sizeof name, "%d", (int)index);
    tsh_module *self = tsh_add_module(h, name, &as_block);
    tsh_checkpoint(self, set->checkpoint);
    tsh_add_layer_norm(self, "ln_1", &norm);
    tsh_module *attn = tsh_add_module(self, "attn", &as_attention);
    tsh_set_argument(attn, "num_heads", set->heads); /* a policy asks for it */
    tsh_add_linear(attn, "c_attn", &c_attn);
    tsh_add_linear(attn, "c_proj", &attn_proj);
    tsh_add_dropout(attn, "dropout", set->dropout);
    tsh_add_layer_norm(self, "ln_2", &norm);
    tsh_module *feed = tsh_add_module(self, "mlp", &as_mlp);
    tsh_add_linear(feed, "c_fc", &c_fc);
    tsh_add_linear(feed, "c_proj", &mlp_proj);
    tsh_add_dropout(feed, "dropout", set->dropout);
}

static void add_gpt(tsh_module *gpt, gpt_settings *set, int64_t vocabulary) {
    tsh_init normal = {.kind = TSH_INIT_NORMAL, .b = 0.02};
    tsh_embedding_desc wte = {.count = vocabulary, .dim = set->width, .init = normal};
    tsh_embedding_desc wpe = {.count = set->context, .dim = set->width, .init = normal};
    tsh_linear_desc lm_head = {.in = set->width, .out = vocabulary, .bias = TSH_NO};

    tsh_add_embedding(gpt, "wte", &wte);
    tsh_add_embedding(gpt, "wpe", &wpe);
    tsh_add_dropout(gpt, "drop", set->dropout);
    tsh_module *h = tsh_add_module(gpt, "h", NULL); /* its children, one after the other */
    for (int64_t i = 0; i < set->layers; i++) add_block(h, i, set);
    tsh_add_layer_norm(gpt, "ln_f", &(tsh_layer_norm_desc){.dim = set->width});
    tsh_tie(tsh_add_linear(gpt, "lm_head", &lm_head), "weight", tsh_param(gpt, "wte.weight"));
}

/* == 2. the plan =========================================================== */

enum { PLAN_RULES = 12 };

/* Column-parallel into a layer's middle, row-parallel out of it: one all-reduce per pair. Returns
 * how many rules there are. */
static int make_plan(tsh_plan_rule plan[PLAN_RULES], const gpt_settings *set) {
    int64_t head = set->width / set->heads; /* heads are never cut; */
    int64_t unit = head, features = set->weights != NULL ? 32 : 1; /* nor blocks of 32 weights */
    while (unit % features != 0) unit += head;
    const tsh_plan_rule rules[] = {
        {.path = "wte", .style = TSH_ROWWISE}, /* rows of the vocabulary, as ... */
        {.path = "h.*.attn.c_attn", .style = TSH_COLWISE, .segments = 3, .unit = unit},
        {.path = "h.*.attn.c_proj", .style = TSH_ROWWISE, .unit = unit},
        {.path = "h.*.mlp.c_fc", .style = TSH_COLWISE, .unit = features},
        {.path = "h.*.mlp.c_proj", .style = TSH_ROWWISE, .unit = features},
        {.path = "lm_head", .style = TSH_COLWISE}, /* ... here: it is the same weight */
    };
    memcpy(plan, rules, sizeof rules);
    return (int)(sizeof rules / sizeof rules[0]);
}

/* The same with all that lies between these pairs, the residual, norms and dropout, cut along the
 * sequence: each all-reduce becomes a reduce-scatter and an all-gather. */
static int make_sequence_plan(tsh_plan_rule plan[PLAN_RULES], const gpt_settings *set) {
    static const tsh_layout whole = {TSH_REPLICATED, 0, 0, {{0, 0}}};
    static const tsh_layout places = {TSH_SHARDED, 0, 1, {{0, 1}}};   /* (T, C) by T */
    static const tsh_layout sequence = {TSH_SHARDED, 1, 1, {{0, 1}}}; /* (B, T, C) by T */
    const tsh_plan_rule between[] = {
        {.path = "wpe", .style = TSH_PLAIN, .output = &places},
        {.path = "drop", .style = TSH_SEQUENCE},
        {.path = "h.*.ln_?", .style = TSH_SEQUENCE},
        {.path = "h.*.*.dropout", .style = TSH_SEQUENCE},
        {.path = "ln_f", .style = TSH_SEQUENCE, .output = &whole},
    };
    int count = make_plan(plan, set);
    for (int i = 0; i < count; i++) {
        if (plan[i].style == TSH_ROWWISE) plan[i].output = &sequence;
        if (strncmp(plan[i].path, "h.", 2) != 0 || plan[i].style != TSH_COLWISE) continue;
        plan[i].input = &sequence;
        plan[i].regather = 1; /* keep this rank's part of the gathered input only */
    }
    memcpy(plan + count, between, sizeof between);
    return count + (int)(sizeof between / sizeof between[0]);
}

/* The rest, where a policy shards the blocks. */
static int make_rest_plan(tsh_plan_rule plan[PLAN_RULES]) {
    const tsh_plan_rule rules[] = {{.path = "wte", .style = TSH_ROWWISE},
                                   {.path = "lm_head", .style = TSH_COLWISE}};
    memcpy(plan, rules, sizeof rules);
    return (int)(sizeof rules / sizeof rules[0]);
}

static int choose_plan(tsh_plan_rule plan[PLAN_RULES], const gpt_settings *set) {
    if (set->policy != NULL) return make_rest_plan(plan);
    return set->sequence_parallel ? make_sequence_plan(plan, set) : make_plan(plan, set);
}

static const char *style_name(tsh_style style) {
    return style == TSH_COLWISE    ? "column-parallel"
           : style == TSH_ROWWISE  ? "row-parallel"
           : style == TSH_SEQUENCE ? "sequence-parallel"
                                   : "replicated, its output by the sequence";
}

static void print_plan(const tsh_plan_rule *plan, int count, const char *policy) {
    for (int i = 0; i < count; i++) {
        printf("%-10s%-16s %s", i == 0 ? "plan" : "", plan[i].path, style_name(plan[i].style));
        if (plan[i].segments > 0) printf(", %d segments", plan[i].segments);
        if (plan[i].unit > 1) printf(", in units of %d", (int)plan[i].unit);
        printf("\n");
    }
    if (policy != NULL) printf("%-10s%-16s by the policy %s\n", "", "h.*", policy);
    printf("%-10s%-16s replicated\n", "", "all the others");
}

/* == 3. training, on every rank ============================================ */

enum { EVAL_BATCHES = 20 };

/* What all ranks of this process share. Only rank 0 writes to it. */
typedef struct gpt_job {
    gpt_settings set;
    tsh_comm comm; /* TCP: this process's place in the world; threads get theirs later */
    gpt_text text;
    gpt_report report;
    double tokens_per_s;
    int cores;       /* that this process may use */
    int found;       /* a state to go on from */
    int64_t stopped; /* after this step, by a signal; 0: not */
} gpt_job;

typedef struct gpt_trainer {
    tsh_ctx *ctx;
    gpt_job *job;
    const gpt_settings *set;
    tsh_module *gpt;
    tsh_pipeline *training, *sampling;
    tsh_optim *optim;
    tsh_outer *outer; /* of copies that seldom meet; NULL: they average all gradients */
    tsh_schedule schedule;
    int64_t first_row, rows;   /* texts of this replica: B / dp, or one more */
    tsh_tensor *ids, *targets; /* (rows, T), the same on every rank of tp and pp */
    int evaluating, stopped;
    int64_t parameters; /* of the whole model */
    int32_t *window;    /* of the sample: the tokens before the next one */
    int64_t window_size;
    double chance; /* that draws it */
} gpt_trainer;

/* Where part k of n begins, of `parts` that differ by 1 at most. */
static int64_t part(int64_t n, int64_t parts, int64_t k) {
    return n * k / parts;
}

static int is_first(const gpt_trainer *t) {
    return tsh_world(t->ctx)->rank == 0;
}

static void make_optimiser(gpt_trainer *t) {
    const gpt_settings *set = t->set;
    const tsh_dtype kept = set->pure ? TSH_BF16 : TSH_DTYPE_DEFAULT;
    const tsh_optim_desc adamw = {.kind = TSH_ADAMW,
                                  .lr = set->lr,
                                  .beta1 = 0.9,
                                  .beta2 = 0.99,
                                  .weight_decay = 0.1,
                                  .clip_norm = 1,
                                  .zero = set->zero,
                                  .grad_dtype = kept,
                                  .moments_dtype = kept,
                                  .round_weights = set->pure};
    t->optim = tsh_optim_new(t->gpt, &adamw);
    tsh_optim_group(t->optim, "**.bias", 1, 0); /* only matrices decay */
    tsh_optim_group(t->optim, "**.ln_?.weight", 1, 0);
    t->schedule = (tsh_schedule){.kind = TSH_COSINE,
                                 .lr = set->lr,
                                 .lr_min = set->lr / 10,
                                 .warmup = set->steps < 500 ? set->steps / 5 : 100,
                                 .total = set->steps};
}

/* With --outer, copies of the model take steps of their own. */
static void make_outer(gpt_trainer *t) {
    const gpt_settings *set = t->set;
    const tsh_outer_desc desc = {.every = set->outer,
                                 .wire = wire_dtype(set->outer_wire),
                                 .fragments = (int)set->outer_fragments,
                                 .delay = set->outer_delay};
    if (set->outer > 0) t->outer = tsh_outer_new(t->gpt, t->optim, &desc);
}

/* Whether copies meet after this many steps; without --outer they always do. */
static int meets(const gpt_settings *set, int64_t steps) {
    return set->outer == 0 || steps % set->outer == 0;
}

/* A model of GPT-2's size has GPT-2's vocabulary, whatever the text. */
static int64_t vocabulary_of(const gpt_job *job) {
    return job->set.vocabulary ? job->set.vocabulary : job->text.vocabulary;
}

static void count_all(const char *path, tsh_tensor *param, void *user) {
    (void)path;
    *(int64_t *)user += tsh_numel(param);
}

static void make_trainer(gpt_trainer *t, tsh_ctx *ctx, gpt_job *job) {
    const tsh_comm *dp = tsh_dp(ctx);
    tsh_plan_rule plan[PLAN_RULES];
    tsh_shape shape;
    int rules;
    memset(t, 0, sizeof *t);
    t->ctx = ctx;
    t->job = job;
    t->set = &job->set;
    t->first_row = part(job->set.batch, dp->size, dp->rank);
    t->rows = part(job->set.batch, dp->size, dp->rank + 1) - t->first_row;
    shape = tsh_shape2(t->rows, job->set.context);
    t->gpt = tsh_root(ctx);
    add_gpt(t->gpt, &job->set, vocabulary_of(job));
    rules = choose_plan(plan, &job->set);
    tsh_parallelize(t->gpt, plan, rules);
    if (t->set->policy != NULL) tsh_parallelize_policy(t->gpt, tsh_policy_find(t->set->policy));
    tsh_each_param(t->gpt, count_all, &t->parameters);
    make_optimiser(t);
    make_outer(t);
    t->ids = tsh_tensor_new(ctx, TSH_I32, shape, tsh_replicated());
    t->targets = tsh_tensor_new(ctx, TSH_I32, shape, tsh_replicated());
}

/* Numbers without a state: mix(seed, step, index) is random in all three. */
static uint64_t mix(uint64_t seed, uint64_t step, uint64_t index) {
    uint64_t word[3] = {seed, step, index}, x = 0;
    for (int i = 0; i < 3; i++) {
        x = (x ^ word[i]) + 0x9e3779b97f4a7c15U;
        x = (x ^ (x >> 31)) * 0xd1342543de82ef95U;
        x = (x ^ (x >> 29)) * 0xaf251af3b0f025b5U;
        x ^= x >> 32;
    }
    return x;
}

/* Row of the batch: T tokens as input, and as target of each the one after it. */
static void load_row(gpt_trainer *t, int64_t row, const unsigned char *tokens) {
    int64_t context = t->set->context;
    int32_t *ids = (int32_t *)tsh_data(t->ctx, t->ids);
    int32_t *targets = (int32_t *)tsh_data(t->ctx, t->targets);
    if (ids == NULL || targets == NULL) return;
    for (int64_t i = 0; i < context; i++) {
        ids[row * context + i] = tokens[i];
        targets[row * context + i] = tokens[i + 1];
    }
}

/* Random windows of the training text: the same whole batch on any number of replicas, of which
 * each takes its part. */
static void load_train_batch(gpt_trainer *t, int64_t step) {
    const gpt_text *text = &t->job->text;
    uint64_t places = (uint64_t)(text->train_size - t->set->context);
    for (int64_t row = 0; row < t->rows; row++) {
        uint64_t index = (uint64_t)(t->first_row + row);
        load_row(t, row, text->train + mix((uint64_t)t->set->seed, (uint64_t)step, index) % places);
    }
}

/* Windows at even distances over the validation text: always the same. */
static void load_val_batch(gpt_trainer *t, int64_t batch) {
    const gpt_text *text = &t->job->text;
    int64_t last = text->val_size - t->set->context - 1, windows = EVAL_BATCHES * t->set->batch;
    int64_t first = batch * t->set->batch + t->first_row;
    for (int64_t row = 0; row < t->rows; row++)
        load_row(t, row, text->val + last * (first + row) / (windows - 1));
}

/* Where a micro-batch begins among this replica's rows. */
static int64_t micro_row(const gpt_trainer *t, int micro_batch) {
    return part(t->rows, t->set->micro_batches, micro_batch);
}

/* Its rows of the training batch; or this replica's of the next validation batch. */
static tsh_tensor *micro_batch_of(gpt_trainer *t, tsh_tensor *batch, int micro_batch) {
    int64_t first = micro_row(t, micro_batch);
    if (!t->evaluating) return tsh_slice(batch, 0, first, micro_row(t, micro_batch + 1) - first);
    load_val_batch(t, micro_batch);
    return batch;
}

static tsh_tensor *batch_input(tsh_ctx *ctx, int micro_batch, void *user) {
    gpt_trainer *t = (gpt_trainer *)user;
    (void)ctx;
    return embed(t->gpt, micro_batch_of(t, t->ids, micro_batch));
}

/* Micro-batches of unequal size count by their tokens, so that their losses are sums. */
static int is_uneven(const gpt_settings *set) {
    return set->batch % (set->dp * set->micro_batches) != 0;
}

static tsh_tensor *batch_loss(tsh_ctx *ctx, tsh_tensor *x, int micro_batch, void *user) {
    gpt_trainer *t = (gpt_trainer *)user;
    const tsh_cross_entropy_desc desc = {.reduction = is_uneven(t->set) ? TSH_REDUCE_SUM
                                                                        : TSH_REDUCE_MEAN};
    (void)ctx;
    tsh_tensor *logits = call(t->gpt, "lm_head", call(t->gpt, "ln_f", x)); /* (B, T, V) */
    return tsh_cross_entropy(logits, micro_batch_of(t, t->targets, micro_batch), &desc);
}

static double batch_weight(tsh_ctx *ctx, int micro_batch, void *user) {
    gpt_trainer *t = (gpt_trainer *)user;
    int64_t rows = micro_row(t, micro_batch + 1) - micro_row(t, micro_batch);
    (void)ctx;
    return (double)((t->evaluating ? t->rows : rows) * t->set->context);
}

/* One step of the optimiser. Returns the mean loss of the replicas; where they do not meet, this
 * replica's. */
static double train_step(gpt_trainer *t, int64_t step) {
    double value;
    load_train_batch(t, step);
    tsh_pipeline_train(t->training, &value);
    tsh_optim_set_lr(t->optim, tsh_schedule_lr(&t->schedule, step));
    if (t->outer != NULL)
        tsh_outer_step(t->outer);
    else
        tsh_optim_step(t->optim);
    tsh_zero_grads(t->gpt);
    tsh_step_end(t->ctx);
    if (meets(t->set, step + 1)) tsh_allreduce(tsh_dp(t->ctx), &value, 1, TSH_F64, TSH_AVG);
    return value;
}

/* The mean loss over EVAL_BATCHES; the replicas share the work. */
static double evaluate(gpt_trainer *t) {
    double mean = 0;
    t->evaluating = 1;
    tsh_train(t->gpt, 0);
    tsh_pipeline_evaluate(t->training, EVAL_BATCHES, &mean);
    tsh_train(t->gpt, 1);
    t->evaluating = 0;
    tsh_allreduce(tsh_dp(t->ctx), &mean, 1, TSH_F64, TSH_AVG);
    return mean;
}

/* The steps that the state of an earlier run has done; 0 where there is none. */
static int64_t resume(gpt_trainer *t) {
    gpt_report *report = &t->job->report;
    int32_t found = is_first(t) ? t->job->found : 0; /* only rank 0 has looked */
    char path[STATE_PATH];
    int64_t step = 0, rows;
    tsh_broadcast(tsh_world(t->ctx), &found, 1, TSH_I32, 0);
    state_path(path, t->set->save, "state.safetensors");
    if (found && tsh_load(t->gpt, path, t->optim) == TSH_OK) {
        tsh_optim_info info = tsh_optim_state(t->optim);
        step = info.steps + info.skipped;
    }
    if (!is_first(t) || !tsh_ok(t->ctx)) return step;
    rows = t->set->resume ? report_resume(report, step) : 0;
    if (report->csv.error.code != TSH_OK)
        tsh_fail(t->ctx, TSH_ERR_IO, "%s", report->csv.error.message);
    if (found) printf("resumed   %s, after step %lld\n", path, (long long)step);
    if (rows < step)
        printf("resumed   %s/metrics.csv has no rows from step %lld to %lld\n", t->set->out,
               (long long)rows + 1, (long long)step);
    return step;
}

/* Saves where it is time to; 1: a signal asks to stop here. All ranks agree, whichever of them it
 * reached. */
static int save_state(gpt_trainer *t, int64_t step) {
    const gpt_settings *set = t->set;
    char path[STATE_PATH];
    int32_t asked = state_asked;
    int due = step % set->save_every == 0 || step == set->steps;
    if (set->save == NULL || (!due && !meets(set, step))) return 0;
    tsh_allreduce(tsh_world(t->ctx), &asked, 1, TSH_I32, TSH_MAX);
    if (!asked && !due) return 0;
    if (is_first(t)) report_sync(&t->job->report); /* before the state: no row is missing later */
    state_path(path, set->save, "state.safetensors");
    tsh_save(t->gpt, path, t->optim);
    return asked && step < set->steps && tsh_ok(t->ctx);
}

static void train_loop(gpt_trainer *t) {
    const gpt_settings *set = t->set;
    double seconds = 0, tokens = (double)(set->batch * set->context);
    int64_t first = set->save != NULL ? resume(t) : 0, step = first;
    int stop = 0, catches = set->save != NULL && (is_first(t) || set->joins);
    if (catches) state_catch_signals(1);
    if (is_first(t)) report_begin(&t->job->report);
    while (step < set->steps && !stop && tsh_ok(t->ctx)) {
        step++;
        double start = report_now();
        report_row row = {.step = step, .train_loss = train_step(t, step - 1)};
        double elapsed = report_now() - start;
        tsh_optim_info info = tsh_optim_state(t->optim);
        seconds += elapsed;
        row.evaluated = step % set->eval_every == 0 || step == set->steps;
        if (row.evaluated) row.val_loss = evaluate(t);
        row.lr = info.lr;
        row.grad_norm = info.norm;
        row.tokens_per_s = tokens / elapsed;
        if (is_first(t) && tsh_ok(t->ctx)) report_step(&t->job->report, &row);
        stop = tsh_ok(t->ctx) && save_state(t, step);
    }
    if (catches) state_catch_signals(0);
    t->stopped = stop;
    if (!is_first(t)) return;
    t->job->stopped = stop ? step : 0;
    t->job->tokens_per_s = step > first ? tokens * (double)(step - first) / seconds : 0;
}

/* == 4. a sample =========================================================== */

/* A token drawn from softmax(logits / temperature); `chance` is in [0, 1). */
static int32_t draw(const tsh_real *logits, int64_t count, double temperature, double chance) {
    double highest = (double)logits[0], sum = 0;
    for (int64_t i = 1; i < count; i++) highest = fmax(highest, (double)logits[i]);
    for (int64_t i = 0; i < count; i++) sum += exp(((double)logits[i] - highest) / temperature);
    for (int64_t i = 0; i < count; i++) {
        chance -= exp(((double)logits[i] - highest) / temperature) / sum;
        if (chance < 0) return (int32_t)i;
    }
    return (int32_t)(count - 1);
}

static tsh_tensor *sample_input(tsh_ctx *ctx, int micro_batch, void *user) {
    gpt_trainer *t = (gpt_trainer *)user;
    tsh_shape shape = tsh_shape2(1, t->window_size);
    (void)micro_batch;
    return embed(t->gpt, tsh_from(ctx, t->window, shape, TSH_I32));
}

/* The token after the window, as the loss that all ranks get. Every rank of the last stage computes
 * its part of the logits, gathers the rest, and draws the same token. */
static tsh_tensor *sample_token(tsh_ctx *ctx, tsh_tensor *x, int micro_batch, void *user) {
    gpt_trainer *t = (gpt_trainer *)user;
    tsh_real logits[256] = {0};
    int64_t vocabulary = t->job->text.vocabulary;
    tsh_tensor *last = tsh_slice(call(t->gpt, "ln_f", x), 1, t->window_size - 1, 1); /* (1, 1, C) */
    tsh_tensor *full = tsh_full_tensor(call(t->gpt, "lm_head", last));               /* (1, 1, V) */
    (void)micro_batch;
    full = tsh_slice(full, -1, 0, vocabulary); /* no byte stands for the others */
    full = tsh_cast(full, TSH_REAL);
    tsh_read(ctx, full, TSH_GLOBAL, logits, (size_t)vocabulary * sizeof *logits);
    return tsh_full(ctx, tsh_shape0(), draw(logits, vocabulary, 0.8, t->chance));
}

/* What has been learnt, in 8 or 4 bits. The optimiser goes first: it holds the exact weights. */
static void quantise(gpt_trainer *t) {
    const char *kind = t->set->weights;
    tsh_optim_free(t->optim);
    t->optim = NULL;
    tsh_quantize(t->gpt, NULL, strcmp(kind, "q8_0") == 0 ? TSH_Q8_0 : TSH_Q4_0);
}

static void print_sample(gpt_trainer *t) {
    const gpt_text *text = &t->job->text;
    int32_t *tokens = (int32_t *)calloc((size_t)t->set->sample + 1, sizeof *tokens);
    if (tokens == NULL) {
        tsh_fail(t->ctx, TSH_ERR_MEMORY, "no memory for a sample");
        return;
    }
    for (int32_t i = 0; i < text->vocabulary; i++)
        if (text->byte_of[i] == '\n') tokens[0] = i; /* a line begins */
    tsh_outer_free(t->outer); /* all copies get the same weights */
    t->outer = NULL;
    tsh_train(t->gpt, 0);
    if (t->set->weights != NULL) quantise(t);
    if (is_first(t)) printf("\nsample, %lld characters:\n", (long long)t->set->sample);
    for (int64_t i = 1; i <= t->set->sample && tsh_ok(t->ctx); i++) {
        double token = 0;
        t->window_size = i < t->set->context ? i : t->set->context;
        t->window = tokens + i - t->window_size;
        t->chance = (double)(mix((uint64_t)t->set->seed, 0, ~(uint64_t)i) >> 11) * 0x1p-53;
        if (tsh_pipeline_evaluate(t->sampling, 1, &token) != TSH_OK) break;
        tokens[i] = (int32_t)token;
        if (is_first(t)) report_byte(&t->job->report, text->byte_of[tokens[i]]);
    }
    if (is_first(t)) printf("\n\n");
    free(tokens);
}

/* The dtype of the parameters, and so of all that is computed with them. */
static tsh_dtype dtype_of(const gpt_settings *set) {
    return strcmp(set->dtype, "bf16") == 0 ? TSH_BF16 : TSH_DTYPE_DEFAULT;
}

/* == 5. what one rank does ================================================= */

/* Deals the blocks to the ranks of pp, then makes this rank's weights. */
static void make_pipelines(gpt_trainer *t) {
    const gpt_settings *set = t->set;
    const tsh_pipeline_desc training = {.micro_batches = (int)set->micro_batches,
                                        .counts = set->stages != NULL ? set->counts : NULL,
                                        .input = batch_input,
                                        .loss = batch_loss,
                                        .weight = is_uneven(set) ? batch_weight : NULL,
                                        .user = t};
    tsh_pipeline_desc sampling = training;
    sampling.weight = NULL;
    sampling.micro_batches = 1;
    sampling.input = sample_input;
    sampling.loss = sample_token;
    t->training = tsh_pipeline_new(tsh_find(t->gpt, "h"), &training);
    t->sampling = tsh_pipeline_new(tsh_find(t->gpt, "h"), &sampling);
    tsh_materialize(t->gpt);
}

/* Every rank's `count` numbers, in the order of the ranks. */
static void gather(tsh_ctx *ctx, const int64_t *mine, int64_t count, int64_t *all) {
    int64_t counts[MAX_RANKS];
    tsh_comm *world = tsh_world(ctx);
    for (int r = 0; r < world->size; r++) counts[r] = count;
    tsh_allgather(world, mine, all, counts, 1, TSH_I64);
}

static void count_here(const char *path, tsh_tensor *param, void *user) {
    (void)path;
    *(int64_t *)user += tsh_local_numel(param);
}

static double mebibytes(int64_t bytes) {
    return (double)bytes / (1 << 20);
}

static void print_shares(const gpt_settings *set) {
    printf("shares   ");
    for (int t = 0; t < set->tp; t++) printf("%s %d", t > 0 ? " :" : "", set->shares[t]);
    printf(" of heads, features and words, for the ranks of tp\n");
}

static void print_intent(gpt_trainer *t) {
    const gpt_settings *set = t->set;
    const gpt_text *text = &t->job->text;
    int64_t here[MAX_RANKS] = {0}, mine = 0;
    char a[32], b[32];
    tsh_plan_rule plan[PLAN_RULES];
    tsh_each_param(t->gpt, count_here, &mine);
    gather(t->ctx, &mine, 1, here);
    if (!is_first(t) || !tsh_ok(t->ctx)) return;
    printf("text      %s: %s tokens to train on, %s to validate\n",
           set->text != NULL ? set->text : "the C sources of this project",
           report_commas(a, text->train_size), report_commas(b, text->val_size));
    printf("model     %d layers, %d heads, width %d, context %d, vocabulary %d: %s parameters\n",
           (int)set->layers, (int)set->heads, (int)set->width, (int)set->context,
           (int)vocabulary_of(t->job), report_commas(a, t->parameters));
    printf("ranks     %d %s: tp %d x pp %d x dp %d\n", tsh_world(t->ctx)->size,
           set->joins ? "processes" : "threads of this process", tsh_tp(t->ctx)->size,
           tsh_pp(t->ctx)->size, tsh_dp(t->ctx)->size);
    if (!set->joins)
        printf("cores     %d: ranks x threads %d x %d%s\n", t->job->cores, (int)set->ranks,
               (int)set->threads, set->chosen ? ", chosen for these cores" : "");
    if (set->balance != NULL) print_shares(set);
    print_plan(plan, choose_plan(plan, set), set->policy);
    for (int r = 0; r < tsh_world(t->ctx)->size; r++)
        printf("%-10srank %d: %s parameters; with gradients and moments %.2f MiB\n",
               r == 0 ? "memory" : "", r, report_commas(a, here[r]),
               mebibytes((2 * here[r] + 2 * here[r] / (set->zero ? tsh_dp(t->ctx)->size : 1)) *
                         (int64_t)sizeof(tsh_real))); /* bf16: an exact float weight, too */
    if (t->outer != NULL)
        printf("outer     copies meet every %lld steps, by %s, in %d parts, %lld steps later\n",
               (long long)set->outer, set->outer_wire != NULL ? set->outer_wire : "f32",
               (int)set->outer_fragments, (long long)set->outer_delay);
    printf("training  %s steps of %s tokens, AdamW, learning rate %g\n\n",
           report_commas(a, set->steps), report_commas(b, set->batch * set->context), set->lr);
    fflush(stdout);
}

/* The peak of every rank beside the sum of what a step needs. */
static void print_memory(gpt_trainer *t) {
    enum { PARTS = 5 };
    tsh_mem mem = tsh_mem_stats(t->ctx);
    int64_t all[MAX_RANKS * PARTS] = {0}, mine[PARTS];
    mine[0] = (int64_t)mem.total_peak;
    mine[1] = (int64_t)mem.peak[TSH_MEM_PARAMETERS];
    mine[2] = (int64_t)mem.peak[TSH_MEM_GRADIENTS];
    mine[3] = (int64_t)mem.peak[TSH_MEM_OPTIMISER];
    mine[4] = (int64_t)mem.step_live_peak;
    gather(t->ctx, mine, PARTS, all);
    for (int r = 0; is_first(t) && tsh_ok(t->ctx) && r < tsh_world(t->ctx)->size; r++) {
        const int64_t *m = all + r * PARTS;
        printf(
            "memory    rank %d: peak %.2f MiB; parameters %.2f + gradients %.2f + moments %.2f + "
            "step %.2f = %.2f MiB\n",
            r, mebibytes(m[0]), mebibytes(m[1]), mebibytes(m[2]), mebibytes(m[3]), mebibytes(m[4]),
            mebibytes(m[1] + m[2] + m[3] + m[4]));
    }
}

static int run_rank(tsh_ctx *ctx, void *user) {
    gpt_job *job = (gpt_job *)user;
    gpt_trainer t;
    make_trainer(&t, ctx, job);
    make_pipelines(&t);
    if (tsh_ok(ctx)) print_intent(&t);
    if (t.set->trace != NULL) tsh_trace_begin(ctx, &(tsh_trace_desc){.path = t.set->trace});
    if (tsh_ok(ctx)) train_loop(&t);
    if (t.set->trace != NULL) tsh_trace_end(ctx);
    if (tsh_ok(ctx)) print_memory(&t);
    if (tsh_ok(ctx) && job->set.sample > 0 && !t.stopped) print_sample(&t);
    return !tsh_ok(ctx); /* the logger has told what it is */
}

/* == 6. main =============================================================== */

/* The logger of every rank: a progress line may have to be ended first. */
static void say(const char *message, void *user) {
    const gpt_job *job = (const gpt_job *)user;
    if (job->report.terminal) fprintf(stderr, "\n");
    tsh_log_stderr(message, NULL);
}

static tsh_result join_mpi(tsh_comm *comm, tsh_error *why) {
#ifdef GPT_MPI
    const tsh_mpi_desc mpi = {.error = why};
    return tsh_mpi_open(&mpi, comm);
#else
    (void)comm;
    snprintf(why->message, sizeof why->message, "built without MPI: make build/gpt-mpi");
    return TSH_ERR_UNSUPPORTED;
#endif
}

static tsh_result join_tcp(tsh_comm *comm, tsh_error *why) {
#ifdef GPT_TCP
    const tsh_uv_desc uv = {.logger.log = tsh_log_stderr, .error = why};
    return tsh_uv_open(&uv, comm);
#else
    (void)comm;
    snprintf(why->message, sizeof why->message,
             "built without TCP: install libuv1-dev and libsodium-dev, and build gpt again");
    return TSH_ERR_UNSUPPORTED;
#endif
}

/* Joins the world that the environment tells of. */
static int join_world(gpt_job *job) {
    const int mpi = strcmp(job->set.backend, "mpi") == 0;
    tsh_error why;
    if ((mpi ? join_mpi : join_tcp)(&job->comm, &why) != TSH_OK) return refuse("%s", why.message);
    job->set.ranks = job->comm.size;
    if (job->comm.size <= MAX_RANKS) return 0;
    return refuse("%d ranks are more than %d", job->comm.size, MAX_RANKS);
}

/* Reads tp shares, as write_shares has written them. Returns 0 if there are none. */
static int read_shares(const char *path, int tp, int *shares) {
    FILE *file = fopen(path, "r");
    int ranks = 0, count = 0;
    if (!file) return 0;
    if (fscanf(file, "%d", &ranks) == 1 && ranks == tp)
        while (count < tp && fscanf(file, "%d", &shares[count]) == 1 && shares[count] > 0) count++;
    (void)fclose(file);
    return count == tp;
}

/* Writes the shares; returns 0 if that failed. */
static int write_shares(const char *path, int tp, const int *shares) {
    FILE *file = fopen(path, "w");
    int good = file != NULL;
    if (good) good = fprintf(file, "%d", tp) > 0;
    for (int t = 0; good && t < tp; t++) good = fprintf(file, " %d", shares[t]) > 0;
    if (good) good = fputc('\n', file) != EOF;
    if (file && fclose(file) != 0) good = 0;
    return good;
}

/* Decides the shares of --balance auto on all ranks: those of the run that goes on, or by
 * measuring. Rank 0 keeps them beside the state. */
static tsh_result decide_shares(gpt_job *job, tsh_comm *comm) {
    gpt_settings *set = &job->set;
    int found[MAX_RANKS + 1] = {0}; /* [0]: 1 if there are shares; then they */
    int *const shares = found + 1;
    char path[STATE_PATH];
    const int tp = (int)set->tp;
    tsh_result result;
    state_path(path, set->save != NULL ? set->save : "", "shares");
    if (comm->rank == 0 && set->resume) found[0] = read_shares(path, tp, shares);
    result = tsh_broadcast(comm, found, tp + 1, TSH_I32, 0);
    if (result == TSH_OK && !found[0]) {
        result = balance_measure(comm, tp, (int)set->threads, dtype_of(set), shares);
        if (result == TSH_OK && comm->rank == 0 && set->save != NULL &&
            !write_shares(path, tp, shares))
            fprintf(stderr, "gpt: %s cannot be written; --resume will measure again\n", path);
    }
    if (result == TSH_OK && (set->joins || comm->rank == 0)) /* threads have one job */
        memcpy(set->shares, shares, (size_t)tp * sizeof *shares);
    return result;
}

/* As a rank of threads. */
static int decide_here(tsh_ctx *ctx, void *user) {
    return decide_shares((gpt_job *)user, tsh_world(ctx)) != TSH_OK;
}

/* As a process. */
static int decide_as_process(gpt_job *job) {
    if (decide_shares(job, &job->comm) == TSH_OK) return 0;
    return refuse("--balance auto: the ranks' speeds cannot be exchanged");
}

static int run_ranks(gpt_job *job) {
    const gpt_settings *set = &job->set;
    const int measures = set->balance != NULL && strcmp(set->balance, "auto") == 0;
    tsh_desc desc = {.tp = (int)set->tp,
                     .pp = (int)set->pp,
                     .seed = (uint64_t)set->seed,
                     .threads = (int)set->threads,
                     .dtype = dtype_of(set),
                     .wire = wire_dtype(set->wire),
                     .logger = {say, job},
                     .comm = job->comm};
#ifdef GPT_BLIS
    if (strcmp(set->gemm, "blis") == 0) desc.gemm.multiply = tsh_blis_gemm;
#endif
    /* with a core for each thread, threads stay on theirs */
    const tsh_threads_desc threads = {.ranks = (int)set->ranks,
                                      .bind = set->ranks * set->threads == job->cores};
    if (measures && (set->joins ? decide_as_process(job)
                                : tsh_threads_run_with(&threads, &desc, decide_here, job)) != 0)
        return 1;
    if (set->balance != NULL) desc.shares = set->shares;
    if (!set->joins) return tsh_threads_run_with(&threads, &desc, run_rank, job);
    memset(&job->comm, 0, sizeof job->comm); /* the ctx closes it */
    return tsh_run(&desc, run_rank, job);
}

/* Runs the ranks, then tells how it went. */
static int run_job(gpt_job *job) {
    const gpt_settings *set = &job->set;
    gpt_report *r = &job->report;
    int silent = job->comm.rank > 0;
    char title[128];
    if (run_ranks(job) != 0) return 1;
    if (silent) return 0;
    snprintf(title, sizeof title,
             "GPT: %d layers, %d heads, width %d, context %d; tp %d of %d ranks", (int)set->layers,
             (int)set->heads, (int)set->width, (int)set->context, (int)set->tp, (int)set->ranks);
    if (!report_svg(r, title)) {
        refuse("%s", r->error.message);
        return 1;
    }
    printf("wrote     %s/metrics.csv, %s/loss.svg\n", set->out, set->out);
    if (job->stopped) {
        printf("stopped   after step %lld of %lld; the same command with --resume goes on\n",
               (long long)job->stopped, (long long)set->steps);
        return 0;
    }
    printf("final: ranks %d tp %d train %.4f val %.4f tokens/s %.0f\n", (int)set->ranks,
           (int)set->tp, r->train_loss, r->val_loss, job->tokens_per_s);
    return 0;
}

/* Of rank 0. A folder with another run's state is refused before its metrics.csv is touched. */
static int open_files(gpt_job *job) {
    const gpt_settings *set = &job->set;
    int found = 0, failed = set->save != NULL ? gpt_state_open(set, &job->text, &found) : 0;
    job->found = found;
    job->report.unit = "nats per byte";
    if (failed || report_open(&job->report, set->out, set->steps, set->resume)) return failed;
    return refuse("%s", job->report.error.message);
}

int main(int argc, char **argv) {
    gpt_job job = {.set = defaults};
    gpt_flag flags[FLAGS];
    int help = 0;
    output_begin();
    make_flags(flags, &job.set, &help);
    int failed = parse_flags(flags, argc, argv);
    const char *restart = getenv("TSHARD_RESTART"); /* of tshard-run: the count of restarts */
    if (job.set.save != NULL && restart != NULL && atoi(restart) > 0) job.set.resume = 1;
    if (!failed && help) {
        print_help(flags);
        return output_end("gpt");
    }
    if (!failed) failed = check_backend(&job.set);
    if (!failed) failed = check_gemm(&job.set);
    if (!failed && job.set.joins) failed = join_world(&job);
    job.cores = tsh_threads_cores();
    if (!failed) failed = check_settings(&job.set, job.cores);
    if (!failed) failed = load_text(&job.text, &job.set);
    if (!failed && job.comm.rank == 0) failed = open_files(&job);
    if (!failed) failed = run_job(&job);
    tsh_comm_close(&job.comm); /* if no ctx has */
    if (!report_close(&job.report) && !failed) {
        refuse("%s", job.report.error.message);
        failed = 1;
    }
    free(job.text.train);
    free(job.text.val);
    return failed ? failed : output_end("gpt");
}
