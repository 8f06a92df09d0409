/* plan.h - computes how much memory a model takes on a rank, without taking that memory
 *
 *     llm_plan p = {.train = 1, .rows = 4, .length = 512, .tp = 2, .lora = 8};
 *     if (llm_config_read(&config, folder, &family) && llm_plan_run(&p, &config, family))
 *         llm_plan_print(stdout, &p);
 *
 * Rank 0, which has the largest shards, makes the model and runs two steps of training, or a prompt
 * and a token, as a dry run (tsh_dry_run), in a world of one process whose other ranks do not
 * exist: so what is counted is what is allocated. In a pipeline, the first rank of each stage does
 * it in turn. Weights are not read. Include tshard.h first; link as model.h says. */
#ifndef LLM_PLAN_H
#define LLM_PLAN_H

#include "model.h"

#include <inttypes.h>
#include <stdio.h>

typedef struct llm_plan {
    int train;            /* 1: steps of training; 0: a prompt of `length` tokens and an answer */
    int tp, pp, dp;       /* tp: ranks that share each layer; pp, for training: stages of a
                           * pipeline; dp: replicas of the model; 0 stands for 1 */
    int zero;             /* training: 1: the replicas share the optimiser's moments */
    int recompute;        /* training: 1: blocks are computed again in backward */
    int threads;          /* threads of a rank; 0: 1 */
    int lora;             /* training: rank of adapters on all linear layers, which alone are
                           * trained; 0: all weights are */
    int64_t rows, length; /* texts of a replica's batch or micro-batch, and tokens of each */
    int accumulate;       /* training: micro-batches of a step; 0: 1 */
    tsh_dtype dtype;      /* dtype of activations, and of weights unless `weights` is set; 0: f32 */
    tsh_dtype weights;    /* the argument `weights` of llm_model_load */
    /* llm_plan_run sets all fields below. */
    tsh_mem mem;                  /* memory of a rank of the stage that takes most */
    int stage;                    /* index of that stage */
    double all;                   /* bytes that all ranks take together */
    int64_t parameters, trained;  /* elements of all parameters; of those that are trained */
    char error[TSH_MESSAGE_SIZE]; /* why llm_plan_run failed; "": it did not */
    llm_config *config;
    const llm_family *family;
} llm_plan;

/* -- a world of which only one rank exists ----------------------------------- */

enum {
    LLM_PLAN_SHARED = 1 << 16, /* in a collective of up to so many bytes, the other ranks are taken
                                * to send what this one sends: so hashes and sums agree */
    LLM_PLAN_HEADS = 2,        /* number of headers (shape, dtype ...) of tensors that a stage sends
                                * for each micro-batch: one for its vectors, one for segments */
    LLM_PLAN_WORDS = 64        /* most int64 numbers of such a header */
};

/* tsh_comm.impl of a world of which only one rank exists. */
typedef struct llm_plan_world {
    int size[3];   /* sizes of the groups that tsh_open splits the world into, in this order */
    int made;      /* number of groups split off so far */
    int heads;     /* number of tensor headers in `head` */
    int64_t taken; /* number of tensor headers received so far */
    /* the tensor headers that stage 0 has sent; all other stages receive them */
    int64_t head[LLM_PLAN_HEADS][LLM_PLAN_WORDS];
} llm_plan_world;

/* Plays a send to another stage, or a receive from one: stores int64 headers of tensors, or returns
 * stored ones; int32 data, the segments' indices, are received as zeros. */
static void llm_plan_pass(llm_plan_world *world, const tsh_coll *coll) {
    const size_t bytes = (size_t)coll->count * tsh_dtype_size(coll->dtype);
    if (coll->kind == TSH_RECV && coll->dtype == TSH_I32) memset(coll->recv, 0, bytes);
    if (coll->dtype != TSH_I64 || bytes > sizeof world->head[0]) return;
    if (coll->kind == TSH_SEND && world->heads < LLM_PLAN_HEADS)
        memcpy(world->head[world->heads++], coll->send, bytes);
    if (coll->kind == TSH_RECV && world->heads > 0)
        memcpy(coll->recv, world->head[world->taken++ % world->heads], bytes);
}

/* Plays a collective, at once, as if each other rank sent what this one sends. One of more than
 * LLM_PLAN_SHARED bytes leaves recv as it is. */
static tsh_result llm_plan_start(tsh_comm *comm, const tsh_coll *coll, tsh_req *req) {
    const size_t width = tsh_dtype_size(coll->dtype);
    const int64_t blocks = coll->blocks > 0 ? coll->blocks : 1;
    char *to = (char *)coll->recv;
    *req = 0;
    llm_plan_pass((llm_plan_world *)comm->impl, coll);
    if (coll->kind == TSH_ALLREDUCE && coll->send != coll->recv &&
        (size_t)coll->count * width <= LLM_PLAN_SHARED)
        memcpy(to, coll->send, (size_t)coll->count * width);
    if (coll->kind != TSH_ALLGATHER || blocks > 1) return TSH_OK;
    const size_t own = (size_t)coll->recv_counts[0] * width;
    for (int r = 0; r < comm->size && (size_t)comm->size * own <= LLM_PLAN_SHARED; r++) {
        const size_t bytes = (size_t)coll->recv_counts[r] * width;
        if (to != coll->send) memcpy(to, coll->send, bytes < own ? bytes : own);
        to += bytes;
    }
    return TSH_OK;
}

static tsh_result llm_plan_test(tsh_comm *comm, tsh_req req, int *done) {
    (void)comm, (void)req;
    *done = 1;
    return TSH_OK;
}

static tsh_result llm_plan_wait(tsh_comm *comm, tsh_req req) {
    (void)comm, (void)req;
    return TSH_OK;
}

static void llm_plan_progress(tsh_comm *comm) {
    (void)comm;
}

static tsh_result llm_plan_split(tsh_comm *comm, int color, int key, tsh_comm *out) {
    llm_plan_world *world = (llm_plan_world *)comm->impl;
    out->ops = comm->ops;
    out->impl = world;
    out->rank = key;
    out->size = color < 0 ? 0 : world->size[world->made++ % 3];
    return TSH_OK;
}

static tsh_result llm_plan_status(tsh_comm *comm, tsh_error *error) {
    (void)comm, (void)error;
    return TSH_OK;
}

static void llm_plan_abort(tsh_comm *comm, const tsh_error *why) {
    (void)comm, (void)why;
}

static void llm_plan_close(tsh_comm *comm) {
    (void)comm;
}

/* -- running a model as a dry run --------------------------------------------- */

static void llm_plan_log(const char *message, void *user) {
    llm_plan *p = (llm_plan *)user;
    if (!p->error[0] && !strstr(message, "warning: "))
        (void)snprintf(p->error, sizeof p->error, "%s", message);
}

/* Turns off tsh_checkpoint for `module` and all modules below it: their activations are kept. */
static void llm_plan_keep(tsh_module *module) {
    tsh_module *child;
    tsh_checkpoint(module, 0);
    for (int i = 0; (child = tsh_child(module, i)) != NULL; i++) llm_plan_keep(child);
}

static void llm_plan_count(const char *path, tsh_tensor *param, void *user) {
    llm_plan *p = (llm_plan *)user;
    p->parameters += tsh_numel(param);
    if (p->train && (!p->lora || strstr(path, ".lora_"))) p->trained += tsh_numel(param);
}

/* Sets p->parameters and p->trained, before a pipeline deals them to its stages. */
static void llm_plan_count_all(llm_plan *p, llm_net *m) {
    p->parameters = p->trained = 0;
    if (tsh_ok(m->ctx)) tsh_each_param(m->root, llm_plan_count, p);
}

/* A model and a micro-batch for it. Its tokens, `ids` (rows, length), are all 0; they also serve as
 * its segments and targets. */
typedef struct llm_plan_texts {
    llm_net *m;
    const int32_t *ids;
} llm_plan_texts;

static tsh_tensor *llm_plan_ids(const llm_plan_texts *t) {
    return tsh_from(t->m->ctx, t->ids, tsh_shape2(t->m->rows, t->m->length), TSH_I32);
}

/* Sets the fields of the model that describe the micro-batch. Returns its tokens. */
static tsh_tensor *llm_plan_show(const llm_plan_texts *t) {
    t->m->all = t->m->vectors = 1;
    t->m->segments = llm_plan_ids(t);
    return llm_plan_ids(t);
}

static void llm_plan_forget(llm_net *m) {
    m->segments = m->positions = NULL;
    (void)tsh_set_segments(m->root, NULL);
    (void)tsh_step_end(m->ctx);
}

/* Runs a micro-batch forward and backward. defer: 1 if another one of the same step follows. */
static void llm_plan_micro(const llm_plan_texts *t, int defer) {
    llm_net *m = t->m;
    const tsh_backward_desc how = {
        .defer = defer, .summed = 1, .weight = (double)(m->rows * m->length)};
    tsh_tensor *x = llm_forward(m, llm_plan_show(t));
    (void)tsh_backward_with(m->ctx, llm_loss(m, x, llm_plan_ids(t)), &how);
    llm_plan_forget(m);
}

/* Callback .input of a pipeline: returns the first block's input for a micro-batch. */
static tsh_tensor *llm_plan_input(tsh_ctx *ctx, int k, void *user) {
    const llm_plan_texts *t = (const llm_plan_texts *)user;
    (void)ctx, (void)k;
    return llm_forward_begin(t->m, llm_plan_show(t));
}

/* Callback .loss of a pipeline: returns the loss from the last block's output x. */
static tsh_tensor *llm_plan_loss(tsh_ctx *ctx, tsh_tensor *x, int k, void *user) {
    const llm_plan_texts *t = (const llm_plan_texts *)user;
    (void)ctx, (void)k;
    t->m->all = t->m->vectors = 1;
    return llm_loss(t->m, llm_forward_end(t->m, x), llm_plan_ids(t));
}

static double llm_plan_weight(tsh_ctx *ctx, int k, void *user) {
    const llm_net *m = ((const llm_plan_texts *)user)->m;
    (void)ctx, (void)k;
    return (double)(m->rows * m->length);
}

/* Makes a pipeline that deals the model to its stages, with at most stages + 1 micro-batches, as
 * more take no more memory. Returns NULL if there is one stage, or after an error. */
static tsh_pipeline *llm_plan_deal(const llm_plan *p, llm_plan_texts *t) {
    const int most = p->pp + 1, micros = p->accumulate > 1 ? p->accumulate : 1;
    const tsh_pipeline_desc desc = {.micro_batches = micros < most ? micros : most,
                                    .input = llm_plan_input,
                                    .loss = llm_plan_loss,
                                    .weight = llm_plan_weight,
                                    .user = t};
    return p->pp > 1 ? llm_pipeline_new(t->m, &desc) : NULL;
}

/* Runs two steps of training: the optimiser makes its moments in the first. */
static void llm_plan_training(llm_plan *p, llm_net *m, const int32_t *ids) {
    const llm_adapter lora = {.lora = {.rank = p->lora}};
    const tsh_optim_desc adamw = {.kind = TSH_ADAMW, .zero = p->zero, .clip_norm = 1};
    llm_plan_texts texts = {m, ids};
    tsh_train(m->root, 1);
    if (!p->recompute) llm_plan_keep(m->root);
    if (p->lora) (void)llm_model_adapter_add(m, &lora);
    llm_plan_count_all(p, m);
    tsh_pipeline *stages = llm_plan_deal(p, &texts);
    (void)tsh_materialize(m->root);
    tsh_optim *optim = tsh_optim_new(m->root, &adamw);
    for (int i = 0; i < 2 && tsh_ok(m->ctx); i++) {
        if (stages) {
            (void)tsh_pipeline_train(stages, NULL);
            llm_plan_forget(m);
        } else {
            /* two micro-batches at most: a third takes no more memory */
            if (p->accumulate > 1) llm_plan_micro(&texts, 1);
            llm_plan_micro(&texts, 0);
        }
        (void)tsh_optim_step(optim);
        tsh_zero_grads(m->root);
        (void)tsh_step_end(m->ctx);
    }
}

/* Runs the prompts in chunks, as llm.c does: each has 256 tokens of all texts together, but at
 * least 16 of each text. */
static void llm_plan_generation(llm_plan *p, llm_net *m, const int32_t *ids) {
    const int64_t some = 256 / p->rows < 16 ? 16 : 256 / p->rows;
    const int64_t chunk = p->config->causal ? some : p->length;
    llm_plan_count_all(p, m);
    tsh_no_grad_begin(m->ctx);
    (void)tsh_materialize(m->root);
    if (!p->config->encoder && !p->config->headless)
        m->cache = tsh_cache_new(m->root, p->rows, p->length, TSH_DTYPE_DEFAULT);
    for (int64_t at = 0; at < p->length && tsh_ok(m->ctx); at += chunk) {
        tsh_scope_begin(m->ctx);
        (void)llm_logits(m, ids, p->length - at < chunk ? p->length - at : chunk, NULL);
        tsh_scope_end(m->ctx);
    }
    tsh_no_grad_end(m->ctx);
}

/* What the one rank that exists runs: makes the model and runs it, without computing anything. */
static int llm_plan_rank(tsh_ctx *ctx, void *user) {
    llm_plan *p = (llm_plan *)user;
    llm_net *m = (llm_net *)calloc(1, sizeof *m);
    int32_t *ids = (int32_t *)calloc((size_t)(p->rows * p->length), sizeof *ids);
    tsh_dry_run(ctx, 1);
    if (!m || !ids) (void)tsh_fail(ctx, TSH_ERR_MEMORY, "not enough memory");
    else if (llm_model_make(m, ctx, p->config, p->family, p->rows, p->length, p->weights) == TSH_OK)
        (p->train ? llm_plan_training : llm_plan_generation)(p, m, ids);
    p->mem = tsh_mem_stats(ctx);
    free(ids);
    free(m);
    return !tsh_ok(ctx);
}

/* llm_plan_ranks returns how many ranks a stage has; llm_plan_stages how many stages there are. */
static int llm_plan_ranks(const llm_plan *p) {
    return (p->tp > 1 ? p->tp : 1) * (p->dp > 1 ? p->dp : 1);
}
static int llm_plan_stages(const llm_plan *p) {
    return p->train && p->pp > 1 ? p->pp : 1;
}

/* Sets p->mem to the memory that a rank of stage p->stage takes, and the numbers of parameters.
 * Call it for stage 0 first: the others receive what that has sent. Returns 0: p->error says why
 * not. */
static int llm_plan_stage(llm_plan *p, llm_plan_world *world) {
    static const tsh_comm_ops ops = TSH_COMM_OPS(llm_plan, "plan", 0);
    const int sizes[3] = {p->tp, llm_plan_stages(p), p->dp};
    tsh_desc desc = {.tp = p->tp > 1 ? p->tp : 1,
                     .pp = llm_plan_stages(p),
                     .threads = p->threads,
                     .dtype = p->dtype ? p->dtype : TSH_F32,
                     .logger = {llm_plan_log, p}};
    world->made = 0;
    for (int i = 0, n = 0; i < 3; i++) /* tsh_open splits off no groups of one rank */
        if (sizes[i] > 1) world->size[n++] = sizes[i];
    desc.comm.size = llm_plan_ranks(p) * desc.pp;
    desc.comm.rank = desc.tp * p->stage;
    if (desc.comm.size > 1) {
        desc.comm.ops = &ops;
        desc.comm.impl = world;
    }
    if (tsh_run(&desc, llm_plan_rank, p) == 0) return 1;
    if (!p->error[0]) (void)snprintf(p->error, sizeof p->error, "not enough memory");
    return 0;
}

/* Computes what llm_plan_run does. each: called after each stage, when p->mem is the memory of that
 * stage's ranks; NULL: nothing is called. Returns 0 after an error, which is in p->error. */
static int llm_plan_each(llm_plan *p, llm_config *c, const llm_family *family,
                         void (*each)(FILE *file, const llm_plan *p), FILE *file) {
    llm_plan_world world;
    tsh_mem most;
    int stage = 0;
    memset(&world, 0, sizeof world);
    memset(&most, 0, sizeof most);
    p->error[0] = 0;
    p->config = c;
    p->family = family;
    p->all = 0;
    for (p->stage = 0; p->stage < llm_plan_stages(p); p->stage++) {
        if (!llm_plan_stage(p, &world)) return 0;
        if (each) each(file, p);
        p->all += (double)p->mem.total_peak * llm_plan_ranks(p);
        if (p->mem.total_peak <= most.total_peak) continue;
        most = p->mem;
        stage = p->stage;
    }
    p->stage = stage;
    p->mem = most;
    return 1;
}

/* Finds p->mem, p->all and the numbers of parameters for the model of a config. Returns 0: p->error
 * says why not. */
LLM_API int llm_plan_run(llm_plan *p, llm_config *c, const llm_family *family) {
    return llm_plan_each(p, c, family, NULL, NULL);
}

/* -- how much memory there is ------------------------------------------------- */

/* Returns the number that a line of the file has after `key` at its beginning (key "": the first
 * line that begins with a number), times `unit`; -1: there is none. */
static int64_t llm_plan_number(const char *path, const char *key, int64_t unit) {
    char line[256];
    int64_t found = -1, n;
    FILE *file = fopen(path, "r");
    while (file && found < 0 && fgets(line, sizeof line, file))
        if (strncmp(line, key, strlen(key)) == 0 &&
            sscanf(line + strlen(key), "%" SCNd64, &n) == 1 && n >= 0 && n <= INT64_MAX / unit)
            found = n * unit;
    if (file) (void)fclose(file);
    return found;
}

/* Lowers *least to the memory that a control group (cgroup) has left: the number in the file
 * `limit` minus that in the file `used`, if both exist. */
static void llm_plan_limit(int64_t *least, const char *limit, const char *used) {
    const int64_t most = llm_plan_number(limit, "", 1), now = llm_plan_number(used, "", 1);
    const int64_t left = most > now ? most - now : 0;
    if (most >= 0 && now >= 0 && (*least < 0 || left < *least)) *least = left;
}

/* Returns the bytes of memory that this process can still get: what Linux calls available, or what
 * the limit of its control group (cgroup version 2 or 1) leaves, whichever is less; -1: not
 * known. */
LLM_API int64_t llm_plan_available(void) {
    int64_t least = llm_plan_number("/proc/meminfo", "MemAvailable:", 1024);
    char line[300] = "", limit[400], used[400];
    FILE *file = fopen("/proc/self/cgroup", "r");
    while (file && fgets(line, sizeof line, file) && strncmp(line, "0::", 3) != 0) line[0] = 0;
    if (file) (void)fclose(file);
    line[strcspn(line, "\n")] = 0;
    (void)snprintf(limit, sizeof limit, "/sys/fs/cgroup%s/memory.max", line[0] ? line + 3 : "");
    (void)snprintf(used, sizeof used, "/sys/fs/cgroup%s/memory.current", line[0] ? line + 3 : "");
    llm_plan_limit(&least, limit, used);
    llm_plan_limit(&least, "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current");
    llm_plan_limit(&least, "/sys/fs/cgroup/memory/memory.limit_in_bytes",
                   "/sys/fs/cgroup/memory/memory.usage_in_bytes");
    return least;
}

/* -- printing a plan ----------------------------------------------------------- */

/* Prints a row of the table: the memory that a rank takes, and that all ranks of its stage take. */
static void llm_plan_row(FILE *file, const llm_plan *p, const char *name, size_t bytes) {
    (void)fprintf(file, "  %-28s %12.2f %12.2f\n", name, 1e-6 * (double)bytes,
                  1e-6 * (double)bytes * llm_plan_ranks(p));
}

/* Prints the total of plan p, which has the flags `name`, and whether it fits into the `there`
 * bytes of memory that there are; -1: not known. */
static void llm_plan_other(FILE *file, llm_plan p, const char *name, int64_t there) {
    /* prints nothing if the flags are an error, such as tp above the number of heads */
    if (!llm_plan_run(&p, p.config, p.family)) return;
    (void)fprintf(file, "  %-28s %12.2f %12.2f%s\n", name, 1e-6 * (double)p.mem.total_peak,
                  1e-6 * p.all,
                  there < 0 ? "" : p.all <= (double)there ? "  fits" : "  does not fit");
}

/* Prints the totals of plans that may take less memory: more ranks, recomputation, adapters,
 * weights of 8 bits. */
static void llm_plan_others(FILE *file, const llm_plan *p, int64_t there) {
    llm_plan other = *p;
    char name[40];
    other.tp = p->tp > 1 ? 2 * p->tp : 2;
    (void)snprintf(name, sizeof name, "--tp %d", other.tp);
    llm_plan_other(file, other, name, there);
    other.tp = p->tp;
    other.pp = p->pp > 1 ? 2 * p->pp : 2;
    (void)snprintf(name, sizeof name, "--pp %d", other.pp);
    if (p->train) llm_plan_other(file, other, name, there);
    other.pp = p->pp;
    if (p->dtype != TSH_BF16 && p->dtype != TSH_F16) {
        other.dtype = TSH_BF16;
        if (!p->weights) other.weights = TSH_F32; /* weights of a GGUF file become bf16, too */
        llm_plan_other(file, other, "--dtype bf16", there);
        other.dtype = p->dtype;
        other.weights = p->weights;
    }
    other.recompute = 1;
    if (p->train && !p->recompute) llm_plan_other(file, other, "--recompute", there);
    if (!p->lora) other.lora = 8;
    if (p->train && !p->lora) llm_plan_other(file, other, "--lora 8 --recompute", there);
    other.weights = TSH_Q8_0;
    if (p->weights != TSH_Q8_0 && p->train)
        llm_plan_other(file, other, p->lora ? "--recompute --weights q8_0"
                                            : "--lora 8 --recompute, q8_0", there);
    if (p->weights != TSH_Q8_0 && !p->train) llm_plan_other(file, other, "--weights q8_0", there);
}

/* Prints the table of what a rank of stage p->stage takes; in a pipeline also which layers it
 * has. */
static void llm_plan_kinds(FILE *file, const llm_plan *p) {
    const size_t *peak = p->mem.peak;
    const int stages = llm_plan_stages(p), layers = (int)p->config->layers, s = p->stage;
    const int first = layers / stages * s + (s < layers % stages ? s : layers % stages);
    const int count = layers / stages + (s < layers % stages);
    char name[80] = "MB";
    if (stages > 1)
        (void)snprintf(name, sizeof name, "MB of stage %d, layers %d-%d", s, first,
                       first + count - 1);
    (void)fprintf(file, "  %-28s %12s %12s\n", name, "a rank",
                  stages > 1 ? "its ranks" : "all ranks");
    llm_plan_row(file, p, "weights", peak[TSH_MEM_PARAMETERS]);
    if (p->train) llm_plan_row(file, p, "gradients", peak[TSH_MEM_GRADIENTS]);
    if (p->train) llm_plan_row(file, p, "moments", peak[TSH_MEM_OPTIMISER]);
    llm_plan_row(file, p, p->train ? "activations and gradients" : "activations",
                 peak[TSH_MEM_STEP]);
    llm_plan_row(file, p, p->train ? "other tensors" : "keys and values", peak[TSH_MEM_TENSORS]);
    llm_plan_row(file, p, "tape, modules", peak[TSH_MEM_BOOKS]);
    llm_plan_row(file, p, "at most at a time", p->mem.total_peak);
}

/* Prints a table of what llm_plan_run found, in MB (10^6 bytes), the memory there is, and what
 * other flags would take. In a pipeline, the table is of each stage. */
LLM_API void llm_plan_print(FILE *file, const llm_plan *p) {
    const int64_t there = llm_plan_available();
    llm_plan each = *p;
    (void)fprintf(file, "%s: %.1f M parameters", p->config->type, 1e-6 * (double)p->parameters);
    if (p->train) (void)fprintf(file, ", %.1f M of them trained", 1e-6 * (double)p->trained);
    (void)fprintf(file, "; %" PRId64 " x %" PRId64 " tokens%s\n", p->rows, p->length,
                  p->dp > 1 ? " in each replica" : "");
    (void)llm_plan_each(&each, p->config, p->family, llm_plan_kinds, file);
    if (llm_plan_stages(p) > 1)
        (void)fprintf(file, "  %-28s %12.2f %12.2f\n", "at most, of all stages",
                      1e-6 * (double)p->mem.total_peak, 1e-6 * p->all);
    if (there >= 0)
        (void)fprintf(file, "  %-41s %12.2f: it %s\n", "there are", 1e-6 * (double)there,
                      p->all <= (double)there ? "fits" : "does not fit");
    (void)fprintf(file, "with other flags:\n");
    llm_plan_others(file, p, there);
}

#endif
