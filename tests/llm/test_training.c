/* Decoder families of examples/llm learn as transformers' do: five steps of AdamW on a small model
 * of each give the losses and norms of gradients of golden/training (make_training.py), all
 * weights being trained, at every degree of tp, over dp and with ZeRO-1, and in pipelines; and
 * adapters read from PEFT's files give its losses, on f32 and on Q8_0 weights. Adapters that are
 * written are read again. Preferences are learnt as by TRL's DPOTrainer (make_preferences.py). */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../support/files.h"
#include "../../examples/llm/preference.h"

enum { STEPS = 5, MOST_TOKENS = 64, PAIRS = 4, ANSWER = 32 };

/* Sums of float32 in another order: differences of 1e-6 in a loss of 5. */
static const double near = 1e-5;

typedef struct golden {
    const char *name;
    cJSON *json;
} golden;

static golden goldens[] = {
    {"bloom", NULL},    {"falcon", NULL},   {"falcon_groups", NULL},   {"falcon_serial", NULL},
    {"gemma", NULL},    {"gemma2", NULL},   {"gemma3", NULL},          {"gpt2", NULL},
    {"gpt_neox", NULL}, {"llama", NULL},    {"gpt_neox_serial", NULL}, {"granite", NULL},
    {"mistral", NULL},  {"olmo2", NULL},    {"opt", NULL},             {"phi", NULL},
    {"phi3", NULL},     {"qwen2", NULL},    {"qwen3", NULL},           {"smollm3", NULL},
    {"starcoder2", NULL}};
static golden dpo = {"dpo", NULL};

/* One training run. */
typedef struct run {
    const cJSON *json; /* the golden */
    const char *want;  /* its losses: "losses", "lora" or "q8_0" */
    int ranks, tp, pp; /* pp 0: no pipeline */
    int zero, recompute;
    tsh_dtype dtype, weights; /* weights: TSH_Q8_0 or TSH_F32 */
    double tolerance;
    const char *adapter; /* folder of adapters, which alone are trained; NULL: all weights are */
    int saves;           /* 1: writes the adapters, to files_here/out */
    const cJSON *dpo;    /* golden/training/dpo.json: its pairs are learnt, and it has the losses */
    double after;        /* the loss after the last step */
    int measures;        /* 1: writes losses, and the loss after the last step, to `found`, in place
                          * of comparing them */
    double found[STEPS + 1];
} run;

static const cJSON *item(const cJSON *json, const char *key) {
    const cJSON *found = cJSON_GetObjectItemCaseSensitive(json, key);
    if (!found) fail_msg("a golden has no %s", key);
    return found;
}

static double number(const run *r, const char *key, int i) {
    const cJSON *json = r->dpo ? r->dpo : r->json;
    return cJSON_GetNumberValue(cJSON_GetArrayItem(cJSON_GetObjectItem(json, key), i));
}

/* ------------------------------------------------------- the folders of a golden */

/* A tensor's values, as make_training.py's function of this name has them. */
static float *values(const char *name, const int64_t *dim, int dims, const char *kind) {
    const int64_t count = dims > 1 ? dim[0] * dim[1] : dim[0];
    const size_t length = strlen(name);
    const int embeds = strstr(name, "emb") || strstr(name, "wte") || strstr(name, "wpe");
    const int in = strcmp(kind, "gpt2") == 0 ? 0 : dims - 1; /* the dimension of input features */
    const double factor = embeds ? 0.2 : 1.5 / sqrt((double)dim[in]);
    const int weighs = length > 6 && strcmp(name + length - 6, "weight") == 0;
    const double middle = weighs && strncmp(kind, "gemma", 5) != 0;
    float *to = (float *)malloc((size_t)count * sizeof *to);
    uint64_t seed = 0xcbf29ce484222325u;
    for (size_t i = 0; i < length; i++)
        seed = (seed ^ (unsigned char)name[i]) * 0x100000001b3u;
    for (int64_t i = 0; to && i < count; i++) {
        uint64_t z = seed + (uint64_t)(i + 1) * 0x9e3779b97f4a7c15u;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        const double u = (double)((z ^ (z >> 31)) >> 40) / 8388608 - 1;
        to[i] = (float)(dims == 1 ? 0.4 * u + middle : u * factor);
    }
    if (!to) fail_msg("not enough memory");
    return to;
}

static void write_json(const char *name, const cJSON *json) {
    char *text = cJSON_PrintUnformatted(json);
    files_write(name, text, strlen(text));
    cJSON_free(text);
}

/* Writes a safetensors file of tensors, an object of shapes. kind: the model_type; "": they belong
 * to an adapter. */
static void write_tensors(const char *path, const cJSON *tensors, const char *kind) {
    cJSON *header = cJSON_CreateObject();
    const cJSON *shape;
    FILE *file = fopen(files_path(path), "wb");
    int64_t at = 0;
    cJSON_ArrayForEach(shape, tensors) {
        cJSON *entry = cJSON_AddObjectToObject(header, shape->string), *offsets;
        int64_t count = 1;
        for (int d = 0; d < cJSON_GetArraySize(shape); d++)
            count *= (int64_t)cJSON_GetNumberValue(cJSON_GetArrayItem(shape, d));
        (void)cJSON_AddStringToObject(entry, "dtype", "F32");
        (void)cJSON_AddItemToObject(entry, "shape", cJSON_Duplicate(shape, 1));
        offsets = cJSON_AddArrayToObject(entry, "data_offsets");
        (void)cJSON_AddItemToArray(offsets, cJSON_CreateNumber((double)at));
        (void)cJSON_AddItemToArray(offsets, cJSON_CreateNumber((double)(at += 4 * count)));
    }
    char *text = cJSON_PrintUnformatted(header);
    unsigned char size[8];
    for (int i = 0; i < 8; i++) size[i] = (unsigned char)((uint64_t)strlen(text) >> 8 * i);
    int ok = file && fwrite(size, 1, 8, file) == 8 && fputs(text, file) >= 0;
    cJSON_ArrayForEach(shape, tensors) {
        int64_t dim[2] = {1, 1};
        const int dims = cJSON_GetArraySize(shape);
        for (int d = 0; d < dims && d < 2; d++)
            dim[d] = (int64_t)cJSON_GetNumberValue(cJSON_GetArrayItem(shape, d));
        float *v = values(shape->string, dim, dims, kind);
        const size_t count = (size_t)(dim[0] * dim[1]);
        ok = ok && fwrite(v, sizeof *v, count, file) == count;
        free(v);
    }
    if (!ok || fclose(file) != 0) fail_msg("%s cannot be written", path);
    cJSON_free(text);
    cJSON_Delete(header);
}

/* Writes the golden's model and adapter to the test's folder. */
static void write_folder(const cJSON *json) {
    const cJSON *config = item(json, "config"), *adapter = item(json, "adapter");
    write_json("config.json", config);
    write_tensors("model.safetensors", item(json, "tensors"),
                  cJSON_GetStringValue(item(config, "model_type")));
    write_json("adapter_config.json", item(adapter, "config"));
    write_tensors("adapter_model.safetensors", item(adapter, "tensors"), "");
    if (access(files_path("out"), F_OK) != 0) files_folder("out");
}

/* --------------------------------------------------------------------- training */

/* The arrays of a llm_batch of chosen answers and, below them, rejected ones: an answer a row. */
typedef struct answers {
    int32_t ids[2 * PAIRS * ANSWER], targets[2 * PAIRS * ANSWER], segments[2 * PAIRS * ANSWER];
    int32_t places[2 * PAIRS * ANSWER], documents[2 * PAIRS * ANSWER];
} answers;

/* A rank's model and batch. */
typedef struct learner {
    llm_config config;
    tune_job job; /* of preferences, like the settings and the answers */
    tune_settings set;
    answers pairs;
    double reference[PAIRS];
    tune_rank rank; /* its .net is the model */
    llm_adapter adapter;
    int64_t length;
    int32_t ids[MOST_TOKENS], targets[MOST_TOKENS];
    tsh_pipeline *pipeline; /* its micro-batches are the rows; NULL: there is none */
} learner;

/* Takes this replica's rows of the golden's batch; a row's last token has no target. */
static void take_batch(learner *l, tsh_ctx *ctx, const cJSON *ids) {
    const int rows = cJSON_GetArraySize(ids) / tsh_dp(ctx)->size, first = tsh_dp(ctx)->rank * rows;
    l->length = cJSON_GetArraySize(cJSON_GetArrayItem(ids, 0));
    for (int64_t i = 0; i < rows * l->length; i++) {
        const int at = (int)(i % l->length);
        const cJSON *row = cJSON_GetArrayItem(ids, first + (int)(i / l->length));
        const cJSON *next = cJSON_GetArrayItem(row, at + 1);
        l->ids[i] = (int32_t)cJSON_GetNumberValue(cJSON_GetArrayItem(row, at));
        l->targets[i] = next ? (int32_t)cJSON_GetNumberValue(next) : -100;
    }
    l->rank.net.rows = rows;
}

/* Sets *b to the answers of all pairs; of a prompt no token is a target. */
static void take_answers(llm_batch *b, answers *to, const cJSON *pairs) {
    const llm_batch batch = {2 * PAIRS,    ANSWER,     to->ids,       to->targets,
                             to->segments, to->places, to->documents, 0};
    *b = batch;
    for (int i = 0; i < 2 * PAIRS * ANSWER; i++) {
        const int row = i / ANSWER, at = i % ANSWER;
        const cJSON *pair = cJSON_GetArrayItem(pairs, row % PAIRS);
        const cJSON *prompt = item(pair, "prompt");
        const cJSON *answer = item(pair, row < PAIRS ? "chosen" : "rejected");
        const int first = cJSON_GetArraySize(prompt);
        const int inside = at < first + cJSON_GetArraySize(answer) - 1;
        const cJSON *own = at < first ? cJSON_GetArrayItem(prompt, at)
                                      : cJSON_GetArrayItem(answer, at - first);
        const cJSON *next = at + 1 < first ? NULL : cJSON_GetArrayItem(answer, at + 1 - first);
        to->ids[i] = inside ? (int32_t)cJSON_GetNumberValue(own) : 0;
        to->targets[i] = next ? (int32_t)cJSON_GetNumberValue(next) : -100;
        to->segments[i] = inside ? 0 : -1;
        to->places[i] = inside ? at : 0;
        to->documents[i] = inside ? row % PAIRS : -1;
    }
}

/* The `take` of tune_rank: there is one batch, which take_pairs has made. */
static int keep_batch(tune_rank *t) {
    (void)t;
    return 1;
}

/* Takes the pairs, and computes what the model says of them before it learns. */
static int take_pairs(learner *l, tsh_ctx *ctx, const run *r) {
    const cJSON *pairs = item(r->dpo, "pairs");
    tune_rank *t = &l->rank;
    CHECK_TRUE(cJSON_GetArraySize(pairs) == PAIRS);
    take_answers(&t->batch, &l->pairs, pairs);
    l->job.config = &l->config;
    l->job.weights_name = r->weights ? "q8_0" : NULL;
    l->job.rows = PAIRS;
    l->set.beta = 0.1;
    t->ctx = ctx;
    t->job = &l->job;
    t->set = &l->set;
    if (r->adapter) return 0; /* then the reference is the model without it */
    tsh_no_grad_begin(ctx);
    t->reference = l->reference;
    tune_forward(t, keep_batch, prefer_keep, 1);
    tsh_no_grad_end(ctx);
    return 0;
}

/* Returns row k of the ids or targets. */
static tsh_tensor *row_of(learner *l, const int32_t *from, int k) {
    return tsh_from(l->rank.net.ctx, from + k * l->length, tsh_shape2(1, l->length), TSH_I32);
}

static tsh_tensor *first_of(tsh_ctx *ctx, int k, void *user) {
    learner *l = (learner *)user;
    (void)ctx;
    return llm_forward_begin(&l->rank.net, row_of(l, l->ids, k));
}

static tsh_tensor *last_of(tsh_ctx *ctx, tsh_tensor *x, int k, void *user) {
    learner *l = (learner *)user;
    const tsh_cross_entropy_desc sum = {.reduction = TSH_REDUCE_SUM};
    (void)ctx;
    return tsh_cross_entropy(llm_forward_end(&l->rank.net, x), row_of(l, l->targets, k), &sum);
}

static double weight_of(tsh_ctx *ctx, int k, void *user) {
    (void)ctx, (void)k;
    return (double)((learner *)user)->length - 1;
}

/* Deals the model to the ranks of pp. */
static int deal(learner *l, tsh_ctx *ctx, const run *r) {
    const tsh_pipeline_desc desc = {.micro_batches = (int)l->rank.net.rows,
                                    .input = first_of,
                                    .loss = last_of,
                                    .weight = weight_of,
                                    .user = l};
    if (!r->pp) return 0;
    l->pipeline = llm_pipeline_new(&l->rank.net, &desc);
    l->rank.net.rows = 1;
    CHECK_TRUE(l->pipeline != NULL);
    return 0;
}

/* Makes the model, and loads it and its adapters. */
static int begin(learner *l, tsh_ctx *ctx, const run *r) {
    llm_net *m = &l->rank.net;
    const llm_family *family;
    tsh_error why;
    CHECK(llm_config_read(&l->config, files_here, &family), "%s", l->config.error);
    take_batch(l, ctx, cJSON_GetObjectItem(r->json, "ids"));
    CHECK_TRUE(llm_model_make(m, ctx, &l->config, family, r->dpo ? 2 * PAIRS : m->rows, l->length,
                              llm_made_as(&l->config, r->weights)) == TSH_OK);
    if (r->adapter) {
        CHECK(llm_adapter_read(&l->adapter, r->adapter, &why), "%s", why.message);
        CHECK_TRUE(llm_model_adapter_add(m, &l->adapter) == TSH_OK);
    }
    if (deal(l, ctx, r)) return 1;
    CHECK_TRUE(llm_model_fill(m, files_here, r->weights) == TSH_OK);
    if (r->adapter) CHECK_TRUE(llm_model_adapter_load(m, &l->adapter, r->adapter) == TSH_OK);
    m->all = 1;
    tsh_train(m->root, 1);
    for (int i = 0; i < l->config.layers; i++)
        tsh_checkpoint(tsh_child(m->blocks, i), !r->pp || r->recompute);
    return 0;
}

static tsh_tensor *loss_of(learner *l, tsh_ctx *ctx, const run *r) {
    tune_rank *t = &l->rank;
    if (r->dpo && !prefer_begin(t, keep_batch, 1)) return NULL;
    if (r->dpo) return tsh_scale(prefer_loss(t, tune_vectors(t)), 1.0 / PAIRS);
    const tsh_shape shape = tsh_shape2(l->rank.net.rows, l->length);
    tsh_tensor *logits = llm_forward(&l->rank.net, tsh_from(ctx, l->ids, shape, TSH_I32));
    return tsh_cross_entropy(logits, tsh_from(ctx, l->targets, shape, TSH_I32), NULL);
}

/* Computes the mean of the replicas' losses, and with learns 1 the gradients. */
static int compute(learner *l, tsh_ctx *ctx, const run *r, int learns, double *value) {
    if (l->pipeline) {
        CHECK_TRUE((learns ? tsh_pipeline_train(l->pipeline, value)
                           : tsh_pipeline_evaluate(l->pipeline, 0, value)) == TSH_OK);
        return 0;
    }
    tsh_tensor *loss = loss_of(l, ctx, r);
    *value = tsh_item(ctx, loss);
    CHECK_TRUE(tsh_allreduce(tsh_dp(ctx), value, 1, TSH_F64, TSH_SUM) == TSH_OK);
    *value /= tsh_dp(ctx)->size;
    CHECK_TRUE(!learns || tsh_backward(ctx, loss) == TSH_OK);
    return 0;
}

static int steps(learner *l, tsh_ctx *ctx, run *r) {
    const tsh_optim_desc adamw = {
        .kind = TSH_ADAMW, .lr = 1e-3, .weight_decay = r->dpo ? 0 : 0.01, .zero = r->zero};
    tsh_optim *optim = tsh_optim_new(l->rank.net.root, &adamw);
    for (int step = 0; step < STEPS && r->want; step++) {
        const double want = number(r, r->want, step);
        double value = 0, norm = 0, normal = r->dpo ? 0 : number(r, "norms", step);
        if (compute(l, ctx, r, 1, &value)) return 1;
        CHECK(r->measures || fabs(value - want) <= r->tolerance * want,
              "step %d: the loss is %.9g, not %.9g", step, value, want);
        if (r->measures && tsh_world(ctx)->rank == 0) r->found[step] = value;
        CHECK_TRUE(tsh_clip_grad_norm(l->rank.net.root, 1e30, &norm) == TSH_OK);
        if (!r->measures && strcmp(r->want, "losses") == 0 && r->tolerance <= near && !r->dpo)
            CHECK(fabs(norm - normal) <= r->tolerance * normal,
                  "step %d: the norm of gradients is %.9g, not %.9g", step, norm, normal);
        CHECK_TRUE(tsh_optim_step(optim) == TSH_OK);
        tsh_zero_grads(l->rank.net.root);
        (void)tsh_step_end(ctx);
    }
    double value = 0;
    if (compute(l, ctx, r, 0, &value)) return 1;
    (void)tsh_step_end(ctx);
    if (r->measures && tsh_world(ctx)->rank == 0) r->found[STEPS] = value;
    if (r->want && tsh_world(ctx)->rank == 0) r->after = value;
    CHECK(r->want || fabs(value - r->after) <= near * value, "read again: %.9g, not %.9g", value,
          r->after);
    CHECK_TRUE(tsh_check_replicas(l->rank.net.root));
    if (r->saves)
        CHECK_TRUE(llm_model_adapter_save(&l->rank.net, &l->adapter, files_path("out")) == TSH_OK);
    CHECK_OK();
    return 0;
}

static int learns(tsh_ctx *ctx, void *user) {
    run *r = (run *)user;
    learner *l = (learner *)calloc(1, sizeof *l);
    int failed = 1;
    CHECK_TRUE(l != NULL);
    failed = begin(l, ctx, r) || (r->dpo && take_pairs(l, ctx, r)) || steps(l, ctx, r);
    llm_config_free(&l->config);
    free(l->rank.difference);
    free(l);
    return failed;
}

/* Returns 1, and says why, if the run of a golden fails. */
static int fails(const golden *g, run *r) {
    const tsh_desc desc = {.tp = r->tp, .pp = r->pp, .dtype = r->dtype};
    const char *why;
    r->json = g->json;
    if (!ranks_try(r->ranks, &desc, learns, r, &why)) return 0;
    print_message("%s, %s, tp %d, pp %d of %d ranks: %s\n", g->name, r->want ? r->want : "written",
                  r->tp, r->pp, r->ranks, why);
    return 1;
}

/* ------------------------------------------------------------------------ tests */

static void all_weights_learn_as_in_transformers(void **state) {
    static const int degrees[][4] = {/* ranks, tp, pp, zero */
                                     {1, 1, 0, 0}, {2, 2, 0, 0}, {3, 3, 0, 0}, {4, 4, 0, 0},
                                     {2, 1, 0, 0}, {2, 1, 0, 1}, {2, 1, 2, 0}, {4, 2, 2, 0},
                                     {4, 1, 2, 1}};
    int failed = 0;
    (void)state;
    for (int k = 0; k < COUNT(goldens); k++) {
        run half = {.want = "losses", .ranks = 2, .tp = 2, .dtype = TSH_BF16,
                    .tolerance = 0.03}; /* bf16 has 8 bits */
        write_folder(goldens[k].json);
        for (int d = 0; d < COUNT(degrees); d++) {
            run r = {.want = "losses", .ranks = degrees[d][0], .tp = degrees[d][1],
                     .pp = degrees[d][2], .zero = degrees[d][3], .recompute = degrees[d][3],
                     .tolerance = near};
            failed += fails(&goldens[k], &r);
        }
        failed += fails(&goldens[k], &half);
    }
    assert_int_equal(failed, 0);
}

/* The names in a file, for comparing: an object of shapes. */
static cJSON *header_of(const char *name) {
    files_bytes bytes = files_read(name);
    cJSON *json = cJSON_ParseWithLength(bytes.at + 8, bytes.size - 8), *shapes, *entry;
    shapes = cJSON_CreateObject();
    cJSON_ArrayForEach(entry, json)
        if (strcmp(entry->string, "__metadata__") != 0)
            (void)cJSON_AddItemToObject(shapes, entry->string,
                                        cJSON_Duplicate(cJSON_GetObjectItem(entry, "shape"), 1));
    cJSON_Delete(json);
    files_free(&bytes);
    return shapes;
}

static int is_written_as_by_peft(const golden *g) {
    const cJSON *adapter = item(g->json, "adapter");
    cJSON *shapes = header_of("out/adapter_model.safetensors");
    const int same = cJSON_Compare(shapes, item(adapter, "tensors"), 1);
    if (!same) print_message("%s: other names than PEFT's\n", g->name);
    cJSON_Delete(shapes);
    return same;
}

static void adapters_learn_as_in_peft(void **state) {
    int failed = 0;
    (void)state;
    for (int k = 0; k < COUNT(goldens); k++) {
        run again = {.ranks = 2, .tp = 2, .adapter = files_path("out")};
        write_folder(goldens[k].json);
        for (int tp = 1; tp <= 4; tp++) { /* 4: two stages of two ranks */
            run r = {.want = "lora", .ranks = tp, .tp = tp == 4 ? 2 : tp, .pp = tp == 4 ? 2 : 0,
                     .tolerance = near, .adapter = files_here, .saves = tp == 4};
            failed += fails(&goldens[k], &r);
            again.after = r.after;
        }
        if (failed) continue;
        failed += !is_written_as_by_peft(&goldens[k]);
        failed += fails(&goldens[k], &again);
    }
    assert_int_equal(failed, 0);
}

/* Replaces target_modules of the golden's adapter_config.json: how 0: by whole names, 1: by a list
 * of so many names that it is read as a pattern, 2: by a regular expression. */
static void write_targets(const cJSON *json, int how) {
    const cJSON *adapter = item(json, "adapter"), *tensor, *name;
    cJSON *config = cJSON_Duplicate(item(adapter, "config"), 1), *list = cJSON_CreateArray();
    char pattern[400] = ".*\\.[\\d]+\\b.*\\.(?:x";
    cJSON_ArrayForEach(tensor, item(adapter, "tensors")) {
        char path[200];
        char *end = strstr(strcpy(path, tensor->string), ".lora_A.");
        if (end) *end = 0;
        for (int i = 0; end && i < (how ? 9 : 1); i++)
            (void)cJSON_AddItemToArray(
                list, cJSON_CreateString(path + strlen("base_model.model.")));
    }
    cJSON_ArrayForEach(name, item(config, "target_modules")) {
        (void)strcat(pattern, "|");
        (void)strcat(pattern, name->valuestring);
    }
    (void)strcat(pattern, ")");
    if (how == 2) {
        cJSON_Delete(list);
        list = cJSON_CreateString(pattern);
    }
    (void)cJSON_ReplaceItemInObject(config, "target_modules", list);
    write_json("adapter_config.json", config);
    cJSON_Delete(config);
}

static void targets_are_read_as_by_peft(void **state) {
    static const char *const names[] = {"bloom", "gpt2", "llama", "opt", "phi3"};
    int failed = 0;
    (void)state;
    for (int k = 0; k < COUNT(goldens); k++)
        for (int how = 0; how < 3; how++) {
            run r = {.want = "lora", .ranks = 1, .tp = 1, .tolerance = near, .adapter = files_here};
            int i = 0;
            while (i < COUNT(names) && strcmp(names[i], goldens[k].name) != 0) i++;
            if (i == COUNT(names)) continue;
            write_folder(goldens[k].json);
            write_targets(goldens[k].json, how);
            failed += fails(&goldens[k], &r);
        }
    assert_int_equal(failed, 0);
}

static void adapters_of_quantised_weights_learn_as_in_peft(void **state) {
    int failed = 0;
    (void)state;
    for (int k = 0; k < COUNT(goldens); k++) {
        write_folder(goldens[k].json);
        for (int tp = 1; tp <= 4; tp++) {
            run r = {.want = "q8_0", .ranks = tp, .tp = tp == 4 ? 2 : tp, .pp = tp == 4 ? 2 : 0,
                     .weights = TSH_Q8_0, .tolerance = near, .adapter = files_here};
            failed += fails(&goldens[k], &r);
        }
    }
    assert_int_equal(failed, 0);
}

/* Gives a golden's model four blocks: the tensors of block 1 are there again as 2 and 3, with other
 * values. */
static void deepen(cJSON *json) {
    cJSON *config = cJSON_GetObjectItem(json, "config"), *tensors, *shape, *more, *next;
    static const char *const keys[] = {"num_hidden_layers", "n_layer"};
    for (int k = 0; k < COUNT(keys); k++)
        if (cJSON_GetObjectItem(config, keys[k]))
            cJSON_SetNumberValue(cJSON_GetObjectItem(config, keys[k]), 4);
    tensors = cJSON_GetObjectItem(json, "tensors");
    more = cJSON_CreateObject();
    cJSON_ArrayForEach(shape, tensors) {
        char name[200];
        char *at;
        (void)snprintf(name, sizeof name, "%s", shape->string);
        at = strstr(name, ".1.");
        for (int block = 2; at && block < 4; block++) {
            at[1] = (char)('0' + block);
            (void)cJSON_AddItemToObject(more, name, cJSON_Duplicate(shape, 1));
        }
    }
    for (shape = more->child; shape; shape = next) {
        next = shape->next;
        (void)cJSON_DetachItemViaPointer(more, shape);
        (void)cJSON_AddItemToObject(tensors, shape->string, shape);
    }
    cJSON_Delete(more);
}

/* Pipelines of 2, 3 and 4 stages, of equal and of unequal ones, against one rank. With untied
 * weights losses have its bits as long as nothing but the order of sums over replicas differs. */
static void more_stages_learn_the_same(void **state) {
    static const struct {
        const char *name;
        int exact; /* 1: no weight is shared by stages */
    } models[] = {{"llama", 1}, {"gpt2", 0}, {"opt", 0}};
    (void)state;
    for (int k = 0; k < COUNT(models); k++) {
        golden deep = {models[k].name, NULL};
        run one = {.want = "losses", .ranks = 1, .tp = 1, .pp = 1, .measures = 1};
        for (int i = 0; i < COUNT(goldens); i++)
            if (strcmp(goldens[i].name, deep.name) == 0)
                deep.json = cJSON_Duplicate(goldens[i].json, 1);
        deepen(deep.json);
        write_folder(deep.json);
        assert_false(fails(&deep, &one));
        for (int pp = 2; pp <= 4; pp++) {
            run r = {.want = "losses", .ranks = pp, .tp = 1, .pp = pp, .measures = 1};
            assert_false(fails(&deep, &r));
            for (int i = 0; i <= STEPS; i++)
                if (models[k].exact ? r.found[i] != one.found[i]
                                    : fabs(r.found[i] - one.found[i]) > 1e-6 * one.found[i])
                    fail_msg("%s, %d stages: loss %d is %.9g, not %.9g", deep.name, pp, i,
                             r.found[i], one.found[i]);
        }
        cJSON_Delete(deep.json);
    }
}

static void preferences_are_learnt_as_in_trl(void **state) {
    int failed = 0;
    (void)state;
    for (int k = 0; k < COUNT(goldens); k++) {
        if (strcmp(goldens[k].name, "llama") != 0) continue;
        write_folder(goldens[k].json);
        for (int tp = 1; tp <= 3; tp++) {
            run r = {.want = "losses", .ranks = tp, .tp = tp, .tolerance = near, .dpo = dpo.json};
            failed += fails(&goldens[k], &r);
            r.want = "lora";
            r.adapter = files_here;
            failed += fails(&goldens[k], &r);
            r.want = "q8_0";
            r.weights = TSH_Q8_0;
            failed += fails(&goldens[k], &r);
        }
    }
    assert_int_equal(failed, 0);
}

static void open_golden(golden *g) {
    char path[4096];
    size_t length;
    tsh_error why;
    (void)snprintf(path, sizeof path, "%.*sgolden/training/%s.json",
                   (int)(strrchr(__FILE__, '/') - __FILE__ + 1), __FILE__, g->name);
    char *text = llm_read(path, 0, &length, &why);
    if (!text) fail_msg("%s", why.message);
    g->json = llm_parse(text);
    free(text);
    if (!g->json) fail_msg("%s is no JSON", path);
}

static int open_goldens(void **state) {
    for (int k = 0; k < COUNT(goldens); k++) open_golden(&goldens[k]);
    open_golden(&dpo);
    return files_begin(state);
}

static int close_goldens(void **state) {
    for (int k = 0; k < COUNT(goldens); k++) cJSON_Delete(goldens[k].json);
    cJSON_Delete(dpo.json);
    (void)remove(files_path("out/adapter_model.safetensors"));
    (void)remove(files_path("out/adapter_config.json"));
    return files_end(state);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_weights_learn_as_in_transformers),
        cmocka_unit_test(more_stages_learn_the_same),
        cmocka_unit_test(adapters_learn_as_in_peft),
        cmocka_unit_test(targets_are_read_as_by_peft),
        cmocka_unit_test(adapters_of_quantised_weights_learn_as_in_peft),
        cmocka_unit_test(preferences_are_learnt_as_in_trl),
    };
    return cmocka_run_group_tests(tests, open_goldens, close_goldens);
}
