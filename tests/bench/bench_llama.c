/* Decodes tokens with a small Llama of random weights, whose keys and values are kept: prints
 * "decode_<name> us ours <microseconds of a token>", the best of some rounds, and the same of only
 * reading the weights ("limit"). The peer is peer_run.c.
 *
 * usage: bench_llama stories260K|babyllama [ranks [rounds]]
 *
 *     cc -std=c99 -D_POSIX_C_SOURCE=200809L -O3 -fno-math-errno -o bench_llama bench_llama.c \
 *         -lm -pthread
 *     cc -std=c99 -Ofast -march=native -o peer_run peer_run.c -lm */
#define _DEFAULT_SOURCE
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"

#include "llama_shapes.h"

typedef struct llama_job {
    const llama_shape *s;
    int rounds;
} llama_job;

/* Modules of a layer, and its keys and values of all places so far. */
typedef struct llama_layer {
    tsh_module *norm, *q, *k, *v, *o, *feed_norm, *gate, *up, *down;
    tsh_tensor *keys, *values;
} llama_layer;

typedef struct llama {
    tsh_module *embed, *norm, *head;
    llama_layer layer[LLAMA_MOST_LAYERS];
} llama;

/* unit: features that stay together, 0: any. */
static tsh_module *linear(tsh_module *parent, const char *name, int in, int out, tsh_style style,
                          int unit) {
    const tsh_linear_desc desc = {
        .in = in, .out = out, .no_bias = 1, .style = style, .unit = unit};
    return tsh_add_linear(parent, name, &desc);
}

static void make_layer(tsh_module *self, llama_layer *l, const llama_shape *s) {
    const tsh_rms_norm_desc norm = {.dim = s->dim};
    const int head = s->dim / s->heads, kv = head * s->kv_heads;
    l->norm = tsh_add_rms_norm(self, "norm", &norm);
    l->q = linear(self, "q", s->dim, s->dim, TSH_COLWISE, head);
    l->k = linear(self, "k", s->dim, kv, TSH_COLWISE, head);
    l->v = linear(self, "v", s->dim, kv, TSH_COLWISE, head);
    l->o = linear(self, "o", s->dim, s->dim, TSH_ROWWISE, head);
    l->feed_norm = tsh_add_rms_norm(self, "feed_norm", &norm);
    l->gate = linear(self, "gate", s->dim, s->hidden, TSH_COLWISE, 0);
    l->up = linear(self, "up", s->dim, s->hidden, TSH_COLWISE, 0);
    l->down = linear(self, "down", s->hidden, s->dim, TSH_ROWWISE, 0);
}

static void make_llama(tsh_ctx *ctx, llama *m, const llama_shape *s) {
    const tsh_rms_norm_desc norm = {.dim = s->dim};
    const tsh_embedding_desc embed = {.count = s->vocab, .dim = s->dim};
    tsh_module *root = tsh_root(ctx);
    m->embed = tsh_add_embedding(root, "embed", &embed);
    for (int i = 0; i < s->layers; i++) {
        char name[24];
        snprintf(name, sizeof name, "layer%d", i);
        make_layer(tsh_add_module(root, name, NULL), &m->layer[i], s);
    }
    m->norm = tsh_add_rms_norm(root, "norm", &norm);
    m->head = linear(root, "head", s->dim, s->vocab, TSH_COLWISE, 0);
}

/* (1, 1, C) -> (1, H, 1, D) */
static tsh_tensor *heads_of(tsh_tensor *x, int64_t features) {
    return tsh_transpose(tsh_reshape(x, tsh_shape4(1, 1, tsh_dim(x, -1) / features, features)), 1,
                         2);
}

static tsh_tensor *attend(llama_layer *l, const llama_shape *s, tsh_tensor *x, int64_t place) {
    const tsh_rope_desc rope = {.interleaved = 1, .start = place};
    const int64_t features = s->dim / s->heads;
    tsh_tensor *q = tsh_rope(heads_of(tsh_forward(l->q, x), features), &rope);
    tsh_tensor *k = tsh_rope(heads_of(tsh_forward(l->k, x), features), &rope);
    tsh_tensor *v = heads_of(tsh_forward(l->v, x), features), *y;
    if (l->keys == NULL) {
        const tsh_shape shape = tsh_shape4(1, s->kv_heads, LLAMA_PLACES, features);
        const tsh_layout layout = tsh_layout_of(k);
        l->keys = tsh_tensor_new(tsh_ctx_of(x), TSH_REAL, shape, &layout);
        l->values = tsh_tensor_new(tsh_ctx_of(x), TSH_REAL, shape, &layout);
    }
    const tsh_attention_desc desc = {.cache_k = l->keys, .cache_v = l->values, .past = place};
    y = tsh_transpose(tsh_attention(q, k, v, &desc), 1, 2);
    return tsh_forward(l->o, tsh_reshape(y, tsh_shape3(1, 1, s->dim)));
}

/* The logits after one token. */
static tsh_tensor *decode(llama *m, const llama_shape *s, tsh_tensor *id, int64_t place) {
    tsh_tensor *x = tsh_forward(m->embed, id);
    for (int i = 0; i < s->layers; i++) {
        llama_layer *l = &m->layer[i];
        tsh_tensor *y = attend(l, s, tsh_forward(l->norm, x), place);
        y = tsh_forward_residual(l->feed_norm, &x, y); /* x += y; of that the norm */
        y = tsh_mul(tsh_silu(tsh_forward(l->gate, y)), tsh_forward(l->up, y));
        x = tsh_add(x, tsh_forward(l->down, y));
    }
    return tsh_forward(m->head, tsh_forward(m->norm, x));
}

/* The weights that a token reads: all but the embedding's. */
typedef struct weights {
    const uint32_t *at[16 * LLAMA_MOST_LAYERS];
    int64_t size[16 * LLAMA_MOST_LAYERS];
    int count;
} weights;

static void add_weight(const char *path, tsh_tensor *param, void *user) {
    weights *w = (weights *)user;
    if (strcmp(path, "embed.weight") == 0) return;
    w->at[w->count] = (const uint32_t *)tsh_data(tsh_ctx_of(param), param);
    w->size[w->count++] = tsh_local_numel(param);
}

/* Plainly reads all weights once. */
static uint32_t read_weights(const weights *w) {
    uint32_t sum = 0;
    for (int i = 0; i < w->count; i++)
        for (int64_t j = 0; j < w->size[i]; j++) sum += w->at[i][j];
    return sum;
}

static int run(tsh_ctx *ctx, void *user) {
    const llama_job *job = (const llama_job *)user;
    const int32_t one = 1;
    tsh_tensor *id = tsh_tensor_from(ctx, TSH_I32, tsh_shape2(1, 1), NULL, &one);
    tsh_comm *world = tsh_world(ctx);
    double token = 1e9, reading = 1e9;
    uint32_t sum = 0;
    weights w = {.count = 0};
    llama m;
    memset(&m, 0, sizeof m);
    make_llama(ctx, &m, job->s);
    tsh_each_param(tsh_root(ctx), add_weight, &w);
    tsh_train(tsh_root(ctx), 0);
    tsh_no_grad_begin(ctx);
    for (int round = 0; round <= job->rounds && tsh_ok(ctx); round++) {
        tsh_barrier(world);
        const double start = 1e-9 * (double)tsh_now();
        for (int64_t place = 0; place < LLAMA_PLACES; place++) {
            tsh_scope_begin(ctx);
            decode(&m, job->s, id, place);
            tsh_scope_end(ctx);
        }
        if (!tsh_ok(ctx)) break;
        const double middle = 1e-9 * (double)tsh_now();
        for (int i = 0; i < LLAMA_PLACES / 4; i++) sum += read_weights(&w);
        tsh_barrier(world);
        const double end = 1e-9 * (double)tsh_now();
        if (round > 0 && middle - start < token) token = middle - start;
        if (round > 0 && sum != 1 && 4 * (end - middle) < reading) reading = 4 * (end - middle);
    }
    tsh_no_grad_end(ctx);
    if (!tsh_ok(ctx)) fprintf(stderr, "%s\n", tsh_last_error(ctx)->message);
    if (world->rank == 0 && tsh_ok(ctx)) {
        printf("decode_%s us ours %.4g\n", job->s->name, 1e6 * token / LLAMA_PLACES);
        printf("decode_%s us limit %.4g\n", job->s->name, 1e6 * reading / LLAMA_PLACES);
    }
    return !tsh_ok(ctx);
}

int main(int argc, char **argv) {
    llama_job job = {llama_find(argc > 1 ? argv[1] : "stories260K"), argc > 3 ? atoi(argv[3]) : 5};
    const int ranks = argc > 2 ? atoi(argv[2]) : 1;
    const tsh_desc desc = {.tp = ranks};
    return !job.s || tsh_threads_run(ranks, &desc, run, &job);
}
