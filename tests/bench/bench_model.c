/* What parts of a model cost: prints lines "name unit who value".
 *
 * usage: bench_model [layers [longest T]]      12 layers and 2048 unless told
 *
 *     op_overhead          a taped add of one element, on one rank
 *     attention_T          causal attention of 12 heads of 64 (4 batches up to T 256), forward, on
 *     attention_back_T     one rank, counting half of all pairs; and its backward, as 5 products;
 *                          attention_bf16_T... in bf16; product: 256x768x768 in the same dtype
 *     decode_gpt2          one token of GPT-2 124M with a cache of keys and values, on two ranks:
 *                          bytes of weights per second; limit: plain reading of them by the same
 *                          threads, by turns */
#define _DEFAULT_SOURCE
#define main gpt_main
int gpt_main(int argc, char **argv);
#include "../../examples/gpt.c"
#undef main

enum { RANKS = 2, HEADS = 12, HEAD = 64, MOST_LAYERS = 12, WIDTH = HEADS * HEAD, PLACES = 64,
       PRODUCT = 256 };

/* ------------------------------------------------------------------- one rank */

static int by_value(const void *a, const void *b) {
    const clock_t x = *(const clock_t *)a, y = *(const clock_t *)b;
    return (x > y) - (x < y);
}

/* The median of steps, in processor time: a core that is shared is no cost of the op. */
static void bench_overhead(tsh_ctx *ctx) {
    enum { ADDS = 1000, STEPS = 301 };
    tsh_tensor *one = tsh_keep(tsh_ones(ctx, tsh_shape1(1)));
    tsh_tensor *leaf = tsh_requires_grad(tsh_keep(tsh_ones(ctx, tsh_shape1(1))), 1);
    clock_t used[STEPS];
    for (int step = 0; step < STEPS; step++) {
        const clock_t start = clock();
        tsh_tensor *y = leaf;
        for (int i = 0; i < ADDS; i++) y = tsh_add(y, one);
        used[step] = clock() - start;
        tsh_step_end(ctx);
    }
    qsort(used, STEPS, sizeof *used, by_value);
    if (tsh_ok(ctx))
        printf("op_overhead ns ours %.4g\n", 1e9 * (double)used[STEPS / 2] / CLOCKS_PER_SEC / ADDS);
}

/* Seconds of C = A B^T, (256, 768) and (768, 768), of one dtype. */
static double product_time(tsh_ctx *ctx, tsh_tensor *a, tsh_tensor *b, tsh_tensor *c) {
    const tsh_dtype dtype = tsh_dtype_of(a);
    const double start = report_now();
    tshi_matmul_gemm(ctx, PRODUCT, WIDTH, WIDTH, 1,
                     tshi_gemm_matrix_of(tsh_data(ctx, a), dtype, WIDTH, 1),
                     tshi_gemm_matrix_of(tsh_data(ctx, b), dtype, 1, WIDTH), 0,
                     tshi_gemm_matrix((tsh_real *)tsh_data(ctx, c), WIDTH, 1));
    return report_now() - start;
}

static void bench_attention(tsh_ctx *ctx, int64_t length, tsh_dtype dtype) {
    const int64_t batch = length <= 256 ? 4 : 1;
    const tsh_shape shape = tsh_shape4(batch, HEADS, length, HEAD);
    const tsh_attention_desc desc = {.causal = 1};
    /* flop, causal */
    const double each = (double)batch * (double)length * (double)length * HEADS * HEAD;
    const int times = (int)(4e9 / (7 * each)) + 1;
    const char *kind = dtype == TSH_BF16 ? "bf16_" : "";
    double forward = 0, backward = 0, product = 0;
    tsh_tensor *q[3], *a = tsh_keep(tsh_cast(tsh_randn(ctx, tsh_shape2(PRODUCT, WIDTH)), dtype));
    tsh_tensor *b = tsh_keep(tsh_cast(tsh_randn(ctx, tsh_shape2(WIDTH, WIDTH)), dtype));
    tsh_tensor *c = tsh_keep(tsh_zeros(ctx, tsh_shape2(PRODUCT, WIDTH)));
    for (int i = 0; i < 3; i++)
        q[i] = tsh_requires_grad(tsh_keep(tsh_cast(tsh_randn(ctx, shape), dtype)), 1);
    for (int i = -1; i < times; i++) { /* the first finds no memory yet */
        const double start = report_now();
        tsh_tensor *y = tsh_attention(q[0], q[1], q[2], &desc);
        const double middle = report_now();
        tsh_tensor *loss = tsh_sum(y, TSH_ALL, 0); /* little beside */
        const double late = report_now();
        tsh_backward(ctx, loss);
        if (i >= 0) forward += middle - start;
        if (i >= 0) backward += report_now() - late;
        for (int j = 0; j < 3; j++) tsh_zero_grad(q[j]);
        tsh_step_end(ctx);
        if (i >= 0) product += product_time(ctx, a, b, c);
    }
    if (!tsh_ok(ctx)) return;
    product = 2e-9 * PRODUCT * WIDTH * WIDTH * times / product;
    printf("attention_%sT%d GFLOP/s ours %.4g\n", kind, (int)length, 2e-9 * each * times / forward);
    printf("attention_%sT%d GFLOP/s product %.4g\n", kind, (int)length, product);
    printf("attention_back_%sT%d GFLOP/s ours %.4g\n", kind, (int)length,
           5e-9 * each * times / backward);
    printf("attention_back_%sT%d GFLOP/s product %.4g\n", kind, (int)length, product);
    for (int i = 0; i < 3; i++) tsh_tensor_free(q[i]);
    tsh_tensor_free(a);
    tsh_tensor_free(b);
    tsh_tensor_free(c);
}

static int alone(tsh_ctx *ctx, void *user) {
    const int64_t longest = *(const int64_t *)user;
    bench_overhead(ctx);
    for (int64_t length = 64; length <= longest; length *= 2) {
        bench_attention(ctx, length, TSH_REAL);
        bench_attention(ctx, length, TSH_BF16);
    }
    if (!tsh_ok(ctx)) refuse("%s", tsh_last_error(ctx)->message);
    return !tsh_ok(ctx);
}

/* -------------------------------------------------------------------- decoding */

/* Keys and values of a block, of all places so far. */
typedef struct cache {
    tsh_tensor *k, *v;
} cache;

static tsh_tensor *decode_attention(tsh_module *self, tsh_tensor *x, cache *c, int64_t place) {
    tsh_ctx *ctx = tsh_ctx_of(x);
    tsh_tensor *qkv[3] = {NULL, NULL, NULL};
    tsh_split_dim(call(self, "c_attn", x), -1, 3, qkv);
    for (int i = 0; i < 3; i++) qkv[i] = split_heads(qkv[i], HEADS);
    if (c->k == NULL) {
        const tsh_layout layout = tsh_layout_of(qkv[1]);
        const tsh_shape shape = tsh_shape4(1, HEADS, PLACES, HEAD);
        c->k = tsh_tensor_new(ctx, TSH_REAL, shape, &layout);
        c->v = tsh_tensor_new(ctx, TSH_REAL, shape, &layout);
    }
    const tsh_attention_desc desc = {.cache_k = c->k, .cache_v = c->v, .past = place};
    return call(self, "c_proj", merge_heads(tsh_attention(qkv[0], qkv[1], qkv[2], &desc)));
}

/* The logits after one token. */
static tsh_tensor *decode(const gpt_trainer *t, tsh_tensor *id, cache *caches, int64_t place) {
    tsh_module *gpt = t->gpt;
    tsh_tensor *at = tsh_arange(tsh_ctx_of(id), TSH_I32, (double)place, (double)place + 1, 1);
    tsh_tensor *x = tsh_add(call(gpt, "wte", id), call(gpt, "wpe", at));
    for (int i = 0; i < t->set->layers; i++) {
        char name[24];
        snprintf(name, sizeof name, "h.%d", i);
        tsh_module *self = tsh_find(gpt, name), *feed = tsh_find(self, "mlp");
        tsh_tensor *y = decode_attention(tsh_find(self, "attn"), call(self, "ln_1", x), &caches[i],
                                         place);
        y = tsh_forward_residual(tsh_find(self, "ln_2"), &x, y);
        y = tsh_gelu_tanh(call(feed, "c_fc", y));
        x = tsh_add(x, call(feed, "c_proj", y));
    }
    return call(gpt, "lm_head", call(gpt, "ln_f", x));
}

static void sum_words(const char *path, tsh_tensor *param, void *user) {
    const uint32_t *word = (const uint32_t *)tsh_data(tsh_ctx_of(param), param);
    const int64_t n = tsh_local_numel(param);
    uint32_t sum = 0;
    (void)path;
    for (int64_t i = 0; i < n; i++) sum += word[i];
    *(uint32_t *)user += sum;
}

/* Seconds of a token, and of plainly reading the weights, by turns, from an eighth of the places
 * on. */
static void time_of_tokens(gpt_trainer *t, double *token, double *reading) {
    enum { ROUND = PLACES / 8 };
    const int32_t one = 1;
    tsh_comm *world = tsh_world(t->ctx);
    tsh_tensor *id = tsh_tensor_from(t->ctx, TSH_I32, tsh_shape2(1, 1), NULL, &one);
    cache caches[MOST_LAYERS] = {{NULL, NULL}};
    uint32_t sum = 0;
    *token = *reading = 0;
    tsh_train(t->gpt, 0);
    tsh_no_grad_begin(t->ctx);
    for (int64_t place = 0; place < PLACES; place += ROUND) {
        tsh_barrier(world);
        const double start = report_now();
        for (int64_t i = 0; i < ROUND; i++) {
            tsh_scope_begin(t->ctx);
            decode(t, id, caches, place + i);
            tsh_scope_end(t->ctx);
        }
        tsh_barrier(world);
        const double middle = report_now();
        for (int i = 0; i < ROUND; i++) tsh_each_param(t->gpt, sum_words, &sum);
        tsh_barrier(world);
        if (place > 0) *token += (middle - start) / (PLACES - ROUND);
        if (place > 0 && sum != 0) *reading += (report_now() - middle) / (PLACES - ROUND);
    }
    tsh_no_grad_end(t->ctx);
}

static int together(tsh_ctx *ctx, void *user) {
    gpt_trainer t;
    double token, reading;
    make_trainer(&t, ctx, (gpt_job *)user);
    make_pipelines(&t);
    time_of_tokens(&t, &token, &reading);
    if (is_first(&t) && tsh_ok(ctx)) {
        const double gigabytes = 1e-9 * (double)t.parameters * sizeof(tsh_real);
        printf("decode_gpt2 GB/s ours %.4g\n", gigabytes / token);
        printf("decode_gpt2 GB/s limit %.4g\n", gigabytes / reading);
    }
    if (is_first(&t) && !tsh_ok(ctx)) refuse("%s", tsh_last_error(ctx)->message);
    return !tsh_ok(ctx);
}

int main(int argc, char **argv) {
    gpt_job job = {.set = defaults};
    const tsh_desc desc = {.tp = RANKS};
    int64_t longest = argc > 2 ? atol(argv[2]) : 2048;
    job.set.layers = argc > 1 ? atol(argv[1]) : MOST_LAYERS;
    if (job.set.layers < 1 || job.set.layers > MOST_LAYERS)
        return refuse("%s layers; takes 1 to %d", argv[1], MOST_LAYERS);
    job.set.heads = HEADS;
    job.set.width = WIDTH;
    job.set.context = PLACES;
    job.set.batch = job.set.dp = 1;
    job.set.vocabulary = 50257;
    return tsh_run(NULL, alone, &longest) || tsh_threads_run(RANKS, &desc, together, &job);
}
