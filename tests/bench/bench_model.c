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
 *                          threads, by turns
 *
 * usage: bench_model --model gpt2|llama1b|stories260K|babyllama [--weights f32|f16|bf16|q8_0|q4_0]
 *                    [--ranks R] [--prefill N] [--tokens N] [--rounds N] [--backend threads|tcp]
 *
 *     decode_M_W tokens/s  one token after the other, medians of rounds; limit: plain reading of
 *                          the weights of a token; collectives: of a token
 *     prefill_M_W          a prompt of N tokens, of which the last one's logits are computed
 *
 * --tokens: that a round decodes; 0: no decoding. With --backend tcp (built with BENCH_TCP) each
 * rank is a process: tshard-run -n R bench_model --backend tcp ...
 *
 * usage: bench_model --serve --model ...       so that programs take turns within a second
 *
 * It answers lines of its input as peer_llama.py does: "decode 0 N" by the microseconds of one of N
 * tokens, each after the others; "prefill T N" by those of one of N prompts of T tokens; "read 0 N"
 * by those of plainly reading the weights of a token. */
#define _DEFAULT_SOURCE
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#ifdef BENCH_TCP
#include "../../backends/tshard_uv.h"
#endif
#include "decoder.h"

enum { RANKS = 2, HEADS = 12, HEAD = 64, WIDTH = HEADS * HEAD, PRODUCT = 256, MOST_ROUNDS = 32 };

static double seconds(void) {
    return 1e-9 * (double)tsh_now();
}

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

static int failed(tsh_ctx *ctx) {
    if (!tsh_ok(ctx)) fprintf(stderr, "%s\n", tsh_last_error(ctx)->message);
    return !tsh_ok(ctx);
}

/* Seconds of C = A B^T, (256, 768) and (768, 768), of one dtype. */
static double product_time(tsh_ctx *ctx, tsh_tensor *a, tsh_tensor *b, tsh_tensor *c) {
    const tsh_dtype dtype = tsh_dtype_of(a);
    const double start = seconds();
    tshi_matmul_gemm(ctx, PRODUCT, WIDTH, WIDTH, 1,
                     tshi_gemm_matrix_of(tsh_data(ctx, a), dtype, WIDTH, 1),
                     tshi_gemm_matrix_of(tsh_data(ctx, b), dtype, 1, WIDTH), 0,
                     tshi_gemm_matrix((tsh_real *)tsh_data(ctx, c), WIDTH, 1));
    return seconds() - start;
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
        const double start = seconds();
        tsh_tensor *y = tsh_attention(q[0], q[1], q[2], &desc);
        const double middle = seconds();
        tsh_tensor *loss = tsh_sum(y, TSH_ALL, 0); /* little beside */
        const double late = seconds();
        tsh_backward(ctx, loss);
        if (i >= 0) forward += middle - start;
        if (i >= 0) backward += seconds() - late;
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
    return failed(ctx);
}

/* -------------------------------------------------------------------- decoding */

static const struct {
    const char *name;
    tsh_dtype dtype;
} kinds[] = {{"f32", TSH_F32}, {"f16", TSH_F16}, {"bf16", TSH_BF16}, {"q8_0", TSH_Q8_0},
             {"q4_0", TSH_Q4_0}};

typedef struct decode_job {
    llama_shape s;
    int kind, ranks, prefill, tcp, serve;
    int rates; /* 0: GB/s of decode_gpt2 */
} decode_job;

/* The weights that a token reads: all but tables of which it takes a row. */
typedef struct weights {
    const uint32_t *at[16 * LLAMA_MOST_LAYERS];
    size_t size[16 * LLAMA_MOST_LAYERS], bytes; /* words of each; bytes of all */
    int count, gpt2;
    volatile uint32_t sum; /* of all words; volatile: or the compiler may leave out the reading */
} weights;

static void add_weight(const char *path, tsh_tensor *param, void *user) {
    weights *w = (weights *)user;
    const tsh_dtype dtype = tsh_dtype_of(param);
    const int64_t block = dtype == TSH_Q8_0 || dtype == TSH_Q4_0 ? 32 : 1; /* elements */
    const size_t bytes = (size_t)(tsh_local_numel(param) / block) * tsh_dtype_size(dtype);
    if (strcmp(path, w->gpt2 ? "places.weight" : "embed.weight") == 0) return;
    w->at[w->count] = (const uint32_t *)tsh_data(tsh_ctx_of(param), param);
    w->size[w->count++] = bytes / 4;
    w->bytes += bytes;
}

/* Plainly reads all weights once. It is not inlined: gcc takes its callers for code that is rarely
 * run, and would not vectorise the loop there. */
#ifdef __GNUC__
__attribute__((noinline, hot))
#endif
static void read_weights(weights *w) {
    uint32_t sum = 0;
    for (int i = 0; i < w->count; i++)
        for (size_t j = 0; j < w->size[i]; j++) sum += w->at[i][j];
    w->sum = sum;
}

static int by_size(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, int count) {
    qsort(values, (size_t)count, sizeof *values, by_size);
    return values[count / 2];
}

/* Collectives that this rank has started over tp, all that a token needs. */
static double collectives(tsh_ctx *ctx) {
    double calls = 0;
    for (int kind = 0; kind < TSH_COLL_KINDS; kind++)
        calls += (double)tsh_tp(ctx)->stats.calls[kind];
    return calls;
}

/* Seconds of `count` tokens that follow each other, from `place` on. */
static double decode_tokens(decoder *m, tsh_tensor *id, int place, int count) {
    tsh_ctx *ctx = tsh_ctx_of(id);
    tsh_barrier(tsh_world(ctx));
    const double start = seconds();
    for (int i = 0; i < count && tsh_ok(ctx); i++) {
        tsh_scope_begin(ctx);
        decoder_run(m, id, place + i);
        tsh_scope_end(ctx);
    }
    tsh_barrier(tsh_world(ctx));
    return seconds() - start;
}

static void find_weights(weights *w, tsh_ctx *ctx, int gpt2) {
    memset(w, 0, sizeof *w);
    w->gpt2 = gpt2;
    tsh_each_param(tsh_root(ctx), add_weight, w);
}

/* Prints what a token costs, and plain reading of the weights, by turns. */
static void bench_tokens(decoder *m, const decode_job *job, tsh_ctx *ctx) {
    const llama_shape *s = m->s;
    const int32_t one = 1;
    const int reads = s->tokens > 4 ? s->tokens / 4 : 1;
    tsh_tensor *id = tsh_tensor_from(ctx, TSH_I32, tsh_shape2(1, 1), tsh_replicated(), &one);
    double token[MOST_ROUNDS], reading[MOST_ROUNDS], each, limit, calls = 0;
    weights w;
    find_weights(&w, ctx, s->gpt2);
    for (int round = -1; round < s->rounds && tsh_ok(ctx); round++) {
        decode_tokens(m, id, 0, s->first);
        calls = collectives(ctx);
        each = decode_tokens(m, id, s->first, s->tokens) / s->tokens;
        calls = (collectives(ctx) - calls) / s->tokens;
        const double start = seconds();
        for (int i = 0; i < reads; i++) read_weights(&w);
        tsh_barrier(tsh_world(ctx));
        limit = (seconds() - start) / reads;
        if (round >= 0) token[round] = each;
        if (round >= 0) reading[round] = limit;
    }
    if (tsh_world(ctx)->rank > 0 || !tsh_ok(ctx)) return;
    each = median(token, s->rounds);
    limit = median(reading, s->rounds);
    if (!job->rates) {
        printf("decode_gpt2 GB/s ours %.4g\n", 1e-9 * (double)w.bytes * job->ranks / each);
        printf("decode_gpt2 GB/s limit %.4g\n", 1e-9 * (double)w.bytes * job->ranks / limit);
        return;
    }
    printf("decode_%s_%s tokens/s ours %.5g\n", s->name, kinds[job->kind].name, 1 / each);
    printf("decode_%s_%s tokens/s limit %.5g\n", s->name, kinds[job->kind].name, 1 / limit);
    printf("decode_%s_%s collectives ours %.4g\n", s->name, kinds[job->kind].name, calls);
}

/* (1, length) */
static tsh_tensor *prompt_of(tsh_ctx *ctx, int64_t length) {
    int32_t numbers[DECODER_PLACES];
    for (int i = 0; i < length; i++) numbers[i] = 1 + i;
    return tsh_tensor_from(ctx, TSH_I32, tsh_shape2(1, length), tsh_replicated(), numbers);
}

static void bench_prefill(decoder *m, const decode_job *job, tsh_ctx *ctx) {
    double used[MOST_ROUNDS];
    tsh_tensor *ids = prompt_of(ctx, job->prefill);
    for (int round = -1; round < m->s->rounds && tsh_ok(ctx); round++) {
        const double each = decode_tokens(m, ids, 0, 1);
        if (round >= 0) used[round] = each;
    }
    if (tsh_world(ctx)->rank > 0 || !tsh_ok(ctx)) return;
    printf("prefill_%s_%s tokens/s ours %.5g\n", m->s->name, kinds[job->kind].name,
           job->prefill / median(used, m->s->rounds));
}

enum { NONE, DECODE, PREFILL, READ }; /* commands */
enum { BEFORE = 8 };                    /* tokens before those that "decode" measures */

/* Rank 0's next command, known to all: what, tokens, how often. Returns 0 if there is none. */
static int next_command(tsh_ctx *ctx, int64_t *told) {
    char name[16] = "", line[64];
    long size = 0, count = 0;
    told[0] = NONE;
    if (tsh_world(ctx)->rank == 0 && fgets(line, sizeof line, stdin) != NULL &&
        sscanf(line, "%15s %ld %ld", name, &size, &count) == 3)
        told[0] = strcmp(name, "decode") == 0    ? DECODE
                  : strcmp(name, "prefill") == 0 ? PREFILL
                  : strcmp(name, "read") == 0    ? READ
                                                 : NONE;
    if (size < 1 || size > DECODER_PLACES) size = 1;
    if (told[0] == DECODE && count > DECODER_PLACES - BEFORE) count = DECODER_PLACES - BEFORE;
    told[1] = size;
    told[2] = count < 1 ? 1 : count;
    tsh_broadcast(tsh_world(ctx), told, 3, TSH_I64, 0);
    return told[0] != NONE && tsh_ok(ctx);
}

/* Seconds of one of `count` prompts of `length` tokens. */
static double time_of_prompt(decoder *m, tsh_ctx *ctx, int64_t length, int64_t count) {
    tsh_tensor *ids = prompt_of(ctx, length);
    double used = 0;
    for (int64_t i = 0; i < count; i++) used += decode_tokens(m, ids, 0, 1);
    tsh_tensor_free(ids);
    return used / (double)count;
}

/* Runs a command (told: what, tokens, how often): prompts, tokens one by one, or plain reading of
 * the weights. Returns the mean seconds of one. */
static double time_of(decoder *m, tsh_tensor *id, weights *w, const int64_t *told) {
    tsh_ctx *ctx = tsh_ctx_of(id);
    const double start = seconds();
    if (told[0] == PREFILL) return time_of_prompt(m, ctx, told[1], told[2]);
    if (told[0] == DECODE) {
        decode_tokens(m, id, 0, BEFORE);
        return decode_tokens(m, id, BEFORE, (int)told[2]) / (double)told[2];
    }
    for (int64_t i = 0; i < told[2]; i++) read_weights(w);
    tsh_barrier(tsh_world(ctx));
    return (seconds() - start) / (double)told[2];
}

static void serve(decoder *m, const decode_job *job, tsh_ctx *ctx) {
    const int32_t one = 1;
    tsh_tensor *id = tsh_tensor_from(ctx, TSH_I32, tsh_shape2(1, 1), tsh_replicated(), &one);
    int64_t told[3];
    weights w;
    find_weights(&w, ctx, job->s.gpt2);
    while (next_command(ctx, told)) {
        const double used = time_of(m, id, &w, told);
        if (tsh_world(ctx)->rank == 0 && tsh_ok(ctx)) printf("%.1f\n", 1e6 * used);
        fflush(stdout);
    }
}

static int together(tsh_ctx *ctx, void *user) {
    const decode_job *job = (const decode_job *)user;
    decoder *m = (decoder *)malloc(sizeof *m);
    if (!m) return 1;
    decoder_make(ctx, m, &job->s, kinds[job->kind].dtype);
    tsh_no_grad_begin(ctx);
    if (job->serve) serve(m, job, ctx);
    if (!job->serve && job->s.tokens > 0) bench_tokens(m, job, ctx);
    if (!job->serve && job->prefill > 0) bench_prefill(m, job, ctx);
    tsh_no_grad_end(ctx);
    free(m);
    return failed(ctx);
}

static int run_job(decode_job *job) {
    tsh_desc desc = {.tp = job->ranks, .dtype = decoder_activations(kinds[job->kind].dtype)};
    if (!job->tcp) return tsh_threads_run(job->ranks, &desc, together, job);
#ifdef BENCH_TCP
    tsh_error why;
    const tsh_uv_desc uv = {.logger.log = tsh_log_stderr, .error = &why};
    if (tsh_uv_open(&uv, &desc.comm) == TSH_OK) {
        desc.tp = job->ranks = desc.comm.size;
        return tsh_run(&desc, together, job);
    }
    fprintf(stderr, "%s\n", why.message);
#endif
    fprintf(stderr, "no TCP\n");
    return 1;
}

/* ------------------------------------------------------------------------ main */

/* The value of a flag; `otherwise` without it. */
static const char *flag(int argc, char **argv, const char *name, const char *otherwise) {
    for (int i = 1; i + 1 < argc; i++)
        if (strcmp(argv[i], name) == 0) return argv[i + 1];
    return otherwise;
}

static int number_flag(int argc, char **argv, const char *name, int otherwise, int most) {
    const char *text = flag(argc, argv, name, NULL);
    const int value = text ? atoi(text) : otherwise;
    return value < 0 ? 0 : value > most ? most : value;
}

static int bench_decoder(int argc, char **argv) {
    const llama_shape *s = llama_find(flag(argc, argv, "--model", ""));
    const char *kind = flag(argc, argv, "--weights", "f32");
    decode_job job;
    if (!s) return 2;
    memset(&job, 0, sizeof job);
    job.s = *s;
    while (job.kind < 5 && strcmp(kinds[job.kind].name, kind) != 0) job.kind++;
    if (job.kind == 5) {
        fprintf(stderr, "no weights \"%s\"; there are f32, f16, bf16, q8_0 and q4_0\n", kind);
        return 2;
    }
    job.ranks = number_flag(argc, argv, "--ranks", RANKS, 64);
    job.prefill = number_flag(argc, argv, "--prefill", 0, DECODER_PLACES);
    job.s.tokens = number_flag(argc, argv, "--tokens", s->tokens, DECODER_PLACES - s->first);
    job.s.rounds = number_flag(argc, argv, "--rounds", s->rounds, MOST_ROUNDS);
    job.tcp = strcmp(flag(argc, argv, "--backend", "threads"), "tcp") == 0;
    for (int i = 1; i < argc; i++) job.serve |= strcmp(argv[i], "--serve") == 0;
    job.rates = 1;
    return run_job(&job);
}

int main(int argc, char **argv) {
    int64_t longest = argc > 2 ? atol(argv[2]) : 2048;
    decode_job job;
    if (argc > 1 && strncmp(argv[1], "--", 2) == 0) return bench_decoder(argc, argv);
    memset(&job, 0, sizeof job);
    job.s = *llama_find("gpt2");
    job.ranks = RANKS;
    if (argc > 1) job.s.layers = atoi(argv[1]);
    if (job.s.layers < 1 || job.s.layers > LLAMA_MOST_LAYERS) {
        fprintf(stderr, "%s layers; takes 1 to %d\n", argv[1], LLAMA_MOST_LAYERS);
        return 2;
    }
    return tsh_run(NULL, alone, &longest) || run_job(&job);
}
