/* Elementwise ops, norms, losses, optimisers and lookups on arrays that no cache holds: GB/s of
 * what an op has to read and write, and of a plain loop with as many streams, the two by turns and,
 * but for what updates in place, in the same memory (of two arrays of one process, one may be a
 * third faster, by where its pages lie).
 *
 *     cc -std=c99 -D_POSIX_C_SOURCE=200809L -O3 -fno-math-errno tests/bench/bench_kernels.c -lm
 *
 * usage: bench_kernels [rounds [part of a name]]
 * Prints "kernel_<op> ours limit ratio": medians of the rounds, and the median of their ratios. Ops
 * run through the public interface without a gradient; slopes (kernel_<op>_slope) through the
 * tape's node, whose output's gradient is there already. Memory is that of the step pool and warm:
 * no page is touched for the first time. */
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"

#include <stdio.h>
#include <time.h>

#define COUNT(a) ((int)(sizeof(a) / sizeof((a)[0])))
enum { N = 16 << 20, COLUMNS = 768, CLASSES = 50304, STREAMS = 4, MOST_ROUNDS = 99 };

/* -- plain loops: so many arrays read, so many written ------------------------ */

typedef void (*loop_fn)(int64_t n, float *const *at);
typedef struct loop {
    loop_fn of[3]; /* by instruction set, as the library chooses it */
} loop;

/* One loop for every instruction set that the library has kernels for. */
#define INLINE static inline __attribute__((always_inline))
#if defined(__x86_64__)
#define AVX2   __attribute__((target("avx2,fma")))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#else
#define AVX2
#define AVX512
#endif
#define LOOP(name)                                                                                 \
    static void name##_portable(int64_t n, float *const *at) {                                     \
        name##_body(n, at);                                                                        \
    }                                                                                              \
    AVX2 static void name##_avx2(int64_t n, float *const *at) {                                    \
        name##_body(n, at);                                                                        \
    }                                                                                              \
    AVX512 static void name##_avx512(int64_t n, float *const *at) {                                \
        name##_body(n, at);                                                                        \
    }                                                                                              \
    static const loop name = {{name##_portable, name##_avx2, name##_avx512}};
#define LIMIT(name, statement)                                                                     \
    INLINE void name##_body(int64_t n, float *const *at) {                                         \
        float *restrict a = at[0], *restrict b = at[1], *restrict c = at[2], *restrict d = at[3];  \
        (void)a, (void)b, (void)c, (void)d;                                                        \
        for (int64_t i = 0; i < n; i++) {                                                          \
            statement;                                                                             \
        }                                                                                          \
    }                                                                                              \
    LOOP(name)

LIMIT(limit_0r1w, a[i] = 3)
LIMIT(limit_1r1w, a[i] = b[i] * 3)
LIMIT(limit_2r1w, a[i] = b[i] + c[i])
LIMIT(limit_3r1w, a[i] = b[i] + c[i] + d[i])
LIMIT(limit_1u, a[i] *= 0.999f)                                    /* in place */
LIMIT(limit_1r1u, a[i] += b[i])                                    /* SGD */
LIMIT(limit_1r2u, c[i] += b[i]; a[i] += c[i])                      /* with momentum */
LIMIT(limit_1r3u, c[i] += b[i]; d[i] -= b[i]; a[i] += c[i] + d[i]) /* Adam */

/* Which row of a table the r-th id names: they lie anywhere. */
INLINE int64_t row_of(int64_t r) {
    return (int64_t)(((uint64_t)r * 2654435761u >> 7) % (uint64_t)(N / COLUMNS));
}

#define LIMIT_ROWS(name, statement)                                                                \
    INLINE void name##_body(int64_t n, float *const *at) {                                         \
        for (int64_t r = 0; r < n / COLUMNS; r++) {                                                \
            float *restrict a = at[0] + r * COLUMNS, *restrict b = at[1] + row_of(r) * COLUMNS;    \
            for (int i = 0; i < COLUMNS; i++) statement;                                           \
        }                                                                                          \
    }                                                                                              \
    LOOP(name)

LIMIT_ROWS(limit_gather, a[i] = b[i])
LIMIT_ROWS(limit_scatter, b[i] += a[i])

/* One array read. */
INLINE void limit_1r_body(int64_t n, float *const *at) {
    float lane[64] = {0};
    for (int64_t i = 0; i + 64 <= n; i += 64)
        for (int j = 0; j < 64; j++) lane[j] += at[1][i + j];
    for (int j = 0; j < 64; j++) at[0][j] = lane[j];
}
LOOP(limit_1r)

/* -- the ops ------------------------------------------------------------------ */

/* What an op computes with. */
typedef struct bench {
    tsh_ctx *ctx;
    tsh_tensor *x, *y, *z, *mask,
        *integers;                  /* (N / 768, 768), values in (0, 1), mixed signs, ... */
    tsh_tensor *weight, *bias;      /* (768) */
    tsh_tensor *logits, *target;    /* (N / CLASSES, CLASSES) */
    tsh_tensor *ids, *table;        /* (N / 768), (N / 768, 768) */
    tsh_tensor *row, *q8_0, *q4_0;  /* (1, 768), and quantised weights of as many bytes as x */
    tsh_module *layer;              /* its weight has N elements */
    tsh_optim *sgd, *momentum, *adam, *adamw;
    double norm; /* of its gradient */
    float *plain[STREAMS];
} bench;

typedef struct row {
    const char *name;
    tsh_tensor *(*op)(bench *); /* forward, or what records the node; NULL: step */
    void (*step)(bench *);
    const loop *limit, *then; /* one or two loops */
    int streams;              /* arrays that they and the op read or write */
    int slope;
    const char *at; /* what the loops work on: a letter for each array; NULL: plain ones */
} row;

#define OP(name, ...)                                                                              \
    static tsh_tensor *op_##name(bench *b) {                                                       \
        return __VA_ARGS__;                                                                        \
    }
OP(add, tsh_add(b->x, b->y))
OP(add_row, tsh_add(b->x, b->bias))
OP(mul, tsh_mul(b->x, b->y))
OP(div, tsh_div(b->y, b->x))
OP(pow, tsh_pow(b->x, b->y))
OP(scale, tsh_scale(b->x, 3))
OP(pow_scalar, tsh_pow_scalar(b->x, 1.7))
OP(square, tsh_pow_scalar(b->x, 2))
OP(exp, tsh_exp(b->y))
OP(log, tsh_log(b->x))
OP(sqrt, tsh_sqrt(b->x))
OP(sigmoid, tsh_sigmoid(b->y))
OP(tanh, tsh_tanh(b->y))
OP(relu, tsh_relu(b->y))
OP(erf, tsh_erf(b->y))
OP(gelu, tsh_gelu(b->y))
OP(linear_q8_0, tsh_linear(b->row, b->q8_0, NULL)) /* one token: reads the weight once */
OP(linear_q4_0, tsh_linear(b->row, b->q4_0, NULL))
OP(gelu_tanh, tsh_gelu_tanh(b->y))
OP(silu, tsh_silu(b->y))
OP(where, tsh_where(b->mask, b->x, b->y))
OP(cast_int, tsh_cast(b->y, TSH_I32))
OP(cast_real, tsh_cast(b->integers, TSH_REAL))
OP(lt, tsh_lt(b->x, b->y))
OP(eq, tsh_eq(b->x, b->y))
OP(dropout, tsh_dropout(b->x, 0.1, NULL))
OP(clone, tsh_clone(b->x))
OP(sum, tsh_sum(b->x, TSH_ALL, 0))
OP(sum_rows, tsh_sum(b->x, 0, 0))
OP(mean, tsh_mean(b->x, -1, 0))
OP(max, tsh_max(b->x, -1, 0))
OP(max_all, tsh_max(b->x, TSH_ALL, 0))
OP(softmax, tsh_softmax(b->y, -1))
OP(log_softmax, tsh_log_softmax(b->y, -1))
OP(layer_norm, tsh_layer_norm(b->y, b->weight, b->bias, 0))
OP(rms_norm, tsh_rms_norm(b->y, b->weight, 0))
OP(cross_entropy, tsh_cross_entropy(b->logits, b->target, NULL))
OP(embedding, tsh_embedding(b->ids, b->table, NULL))

static void step_of(bench *b, tsh_optim *optim) {
    tsh_tensor *w = tsh_param(b->layer, "weight");
    int i;
    for (i = 0; i < optim->count; i++)
        if (optim->each[i].param == w) tshi_optim_update(&optim->each[i], optim->desc.lr, 1);
}

static void step_sgd(bench *b) {
    step_of(b, b->sgd);
}

static void step_momentum(bench *b) {
    step_of(b, b->momentum);
}

static void step_adam(bench *b) {
    step_of(b, b->adam);
}

static void step_adamw(bench *b) {
    step_of(b, b->adamw);
}

static void step_norm(bench *b) {
    double norm;
    (void)tshi_optim_norm(b->layer, &norm);
}

/* A little smaller each time: read for the norm, then read and written. */
static void step_clip(bench *b) {
    (void)tsh_clip_grad_norm(b->layer, b->norm *= 0.99, NULL);
}

#define FORWARD(name, limit, streams, at)                                                          \
    { "kernel_" #name, op_##name, NULL, &limit, NULL, streams, 0, at }
#define SLOPE(name, limit, streams, at)                                                            \
    { "kernel_" #name "_slope", op_##name, NULL, &limit, NULL, streams, 1, at }
#define STEP(name, limit, streams)                                                                 \
    { "kernel_" #name, NULL, step_##name, &limit, NULL, streams, 0, NULL }
static const row rows[] = {
    FORWARD(clone, limit_1r1w, 2, ".x"),
    FORWARD(add, limit_2r1w, 3, ".xy"),
    FORWARD(add_row, limit_1r1w, 2, ".x"),
    FORWARD(mul, limit_2r1w, 3, ".xy"),
    {"kernel_mul_slope", op_mul, NULL, &limit_2r1w, &limit_2r1w, 6, 1, "X.y"},
    FORWARD(div, limit_2r1w, 3, ".yx"),
    FORWARD(scale, limit_1r1w, 2, ".x"),
    FORWARD(sqrt, limit_1r1w, 2, ".x"),
    FORWARD(square, limit_1r1w, 2, ".x"),
    FORWARD(relu, limit_1r1w, 2, ".y"),
    SLOPE(relu, limit_2r1w, 3, "Yy."),
    FORWARD(where, limit_3r1w, 4, ".xy-"),
    FORWARD(lt, limit_2r1w, 3, ".xy"),
    FORWARD(eq, limit_2r1w, 3, ".xy"),
    FORWARD(cast_int, limit_1r1w, 2, ".y"),
    FORWARD(cast_real, limit_1r1w, 2, ".-"),
    FORWARD(exp, limit_1r1w, 2, ".y"),
    FORWARD(log, limit_1r1w, 2, ".x"),
    FORWARD(pow, limit_2r1w, 3, ".xy"),
    FORWARD(pow_scalar, limit_1r1w, 2, ".x"),
    FORWARD(sigmoid, limit_1r1w, 2, ".y"),
    FORWARD(tanh, limit_1r1w, 2, ".y"),
    FORWARD(erf, limit_1r1w, 2, ".y"),
    FORWARD(gelu, limit_1r1w, 2, ".y"),
    SLOPE(gelu, limit_2r1w, 3, "Yy."),
    FORWARD(gelu_tanh, limit_1r1w, 2, ".y"),
    SLOPE(gelu_tanh, limit_2r1w, 3, "Yy."),
    FORWARD(silu, limit_1r1w, 2, ".y"),
    SLOPE(silu, limit_2r1w, 3, "Yy."),
    FORWARD(dropout, limit_1r1w, 2, ".x"),
    SLOPE(dropout, limit_1r1w, 2, "X."),
    FORWARD(sum, limit_1r, 1, ".x"),
    FORWARD(sum_rows, limit_1r, 1, ".x"),
    SLOPE(sum, limit_0r1w, 1, "X"),
    FORWARD(mean, limit_1r, 1, ".x"),
    FORWARD(max, limit_1r, 1, ".x"),
    FORWARD(max_all, limit_1r, 1, ".x"),
    FORWARD(softmax, limit_1r1w, 2, ".y"),
    SLOPE(softmax, limit_2r1w, 3, "Y.."),
    FORWARD(log_softmax, limit_1r1w, 2, ".y"),
    SLOPE(log_softmax, limit_2r1w, 3, "Y.."),
    FORWARD(layer_norm, limit_1r1w, 2, ".y"),
    SLOPE(layer_norm, limit_2r1w, 3, "Yy."),
    FORWARD(rms_norm, limit_1r1w, 2, ".y"),
    SLOPE(rms_norm, limit_2r1w, 3, "Yy."),
    FORWARD(cross_entropy, limit_1r, 1, ".l"),
    SLOPE(cross_entropy, limit_1r1w, 2, "Ll"),
    FORWARD(embedding, limit_gather, 2, ".t"),
    SLOPE(embedding, limit_scatter, 3, NULL),
    FORWARD(linear_q8_0, limit_1r, 1, NULL),
    FORWARD(linear_q4_0, limit_1r, 1, NULL),
    STEP(sgd, limit_1r1u, 3),
    STEP(momentum, limit_1r2u, 5),
    STEP(adam, limit_1r3u, 7),
    STEP(adamw, limit_1r3u, 7),
    STEP(norm, limit_1r, 1),
    {"kernel_clip", NULL, step_clip, &limit_1r, &limit_1u, 3, 0, NULL},
};

/* -- measuring ---------------------------------------------------------------- */

/* Seconds of this thread on a processor: others who use the machine do not count. */
static double now(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int by_value(const void *x, const void *y) {
    const double a = *(const double *)x, b = *(const double *)y;
    return (a > b) - (a < b);
}

static double median(double *values, int n) {
    qsort(values, (size_t)n, sizeof *values, by_value);
    return values[n / 2];
}

/* Seconds of the slope alone: forward records the node, and its output gets a gradient. */
static double slope_time(bench *b, const row *r) {
    tsh_tensor *out = r->op(b);
    tshi_node *node = out ? out->node : NULL;
    double start = 0, end = 0;
    int64_t i;
    int warm, in;
    if (node && tshi_tape_allocate(out, &out->gr)) {
        tsh_real *g = (tsh_real *)tshi_mem_data(out->gr.block);
        for (i = 0; i < tsh_numel(out); i++) g[i] = 1;
        out->gr.live = 1;
        for (warm = 0; warm < 2; warm++) { /* the inputs' gradients are touched the first time */
            for (in = 0; in < node->n; in++)
                if (node->in[in]) node->in[in]->base->gr.live = 0;
            if (strcmp(node->op->name, "tsh_embedding") == 0) node->in[1]->base->gr.live = warm;
            start = now();
            node->op->backward(node);
            end = now();
        }
    }
    (void)tsh_step_end(b->ctx);
    return end - start;
}

static double ours(bench *b, const row *r) {
    double start, end;
    if (r->slope) return slope_time(b, r);
    tsh_no_grad_begin(b->ctx);
    tsh_scope_begin(b->ctx);
    start = now();
    if (r->step)
        r->step(b);
    else
        (void)r->op(b);
    end = now();
    tsh_scope_end(b->ctx);
    tsh_no_grad_end(b->ctx);
    return end - start;
}

/* An operand of ops by its letter; its gradient by the capital one. */
static float *operand(bench *b, char letter) {
    tsh_tensor *t = strchr("xX", letter)   ? b->x
                    : strchr("yY", letter) ? b->y
                    : strchr("lL", letter) ? b->logits
                                           : b->table;
    return (float *)(letter < 'a' ? tshi_mem_data(t->gr.block) : tsh_data(b->ctx, t));
}

/* In the same memory as the op, which went before. A dot: step memory, of the size of results, so
 * that they are the same blocks; -: plain floats in the place of integers. */
static double limit(bench *b, const row *r) {
    const int64_t n = r->at && strpbrk(r->at, "lL") ? tsh_numel(b->logits) : tsh_numel(b->x);
    tshi_block *step[STREAMS] = {NULL};
    float *at[STREAMS];
    double start, end;
    int i;
    memcpy(at, b->plain, sizeof at);
    for (i = 0; r->at && r->at[i]; i++)
        if (r->at[i] == '.') {
            step[i] = tshi_mem_alloc(b->ctx, TSH_MEM_STEP, (size_t)n * sizeof(float));
            if (step[i]) at[i] = (float *)tshi_mem_data(step[i]);
        } else if (r->at[i] != '-') {
            at[i] = operand(b, r->at[i]);
        }
    start = now();
    r->limit->of[b->ctx->isa](n, at);
    if (r->then) r->then->of[b->ctx->isa](n, at);
    end = now();
    while (i-- > 0) tshi_mem_release(b->ctx, step[i]);
    return end - start;
}

static void measure(bench *b, const row *r, int rounds) {
    double mine[MOST_ROUNDS], theirs[MOST_ROUNDS], ratios[MOST_ROUNDS];
    const double bytes = 4e-9 * N * r->streams;
    int i;
    (void)ours(b, r);
    (void)limit(b, r);
    for (i = 0; i < rounds; i++) {
        mine[i] = bytes / ours(b, r);
        theirs[i] = bytes / limit(b, r);
        ratios[i] = mine[i] / theirs[i];
    }
    printf("%s %.2f %.2f %.3f\n", r->name, median(mine, rounds), median(theirs, rounds),
           median(ratios, rounds));
    (void)fflush(stdout);
}

/* -- what it works on --------------------------------------------------------- */

static tsh_tensor *values(tsh_ctx *ctx, tsh_shape shape, double low, double high) {
    tsh_tensor *t = tsh_tensor_new(ctx, TSH_REAL, shape, tsh_replicated());
    tsh_real *x = t ? (tsh_real *)tsh_data(ctx, t) : NULL;
    int64_t i;
    for (i = 0; x && i < tsh_numel(t); i++)
        x[i] = (tsh_real)(low +
                          (high - low) * (double)((uint64_t)i * 2654435761u % 1000003) / 1000003);
    return t;
}

static tsh_tensor *integers(tsh_ctx *ctx, tsh_shape shape, int64_t below) {
    tsh_tensor *t = tsh_tensor_new(ctx, TSH_I32, shape, tsh_replicated());
    int32_t *x = t ? (int32_t *)tsh_data(ctx, t) : NULL;
    int64_t i;
    for (i = 0; x && i < tsh_numel(t); i++)
        x[i] = (int32_t)(((uint64_t)i * 2654435761u >> 7) % (uint64_t)below);
    return t;
}

static tsh_optim *optimiser(tsh_module *module, tsh_optim_kind kind, double momentum) {
    tsh_optim_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.kind = kind;
    desc.lr = 1e-6;
    desc.momentum = momentum;
    desc.weight_decay = 0.01;
    return tsh_optim_new(module, &desc);
}

/* A weight of N floats' bytes, 768 columns. */
static tsh_tensor *quantised(tsh_ctx *ctx, tsh_dtype dtype) {
    const int64_t block = (int64_t)tsh_dtype_size(dtype), outs = 4ll * N / (COLUMNS / 32 * block);
    tsh_tensor *t = tsh_tensor_new(ctx, dtype, tsh_shape2(outs, COLUMNS), tsh_replicated());
    unsigned char *at = t ? (unsigned char *)tsh_data(ctx, t) : NULL;
    for (int64_t i = 0; at && i < outs * (COLUMNS / 32) * block; i++)
        at[i] = (unsigned char)(i % block == 1 ? 0x24 : (uint64_t)i * 2654435761u >> 7);
    return t;
}

static void prepare(bench *b) {
    const tsh_shape matrix = tsh_shape2(N / COLUMNS, COLUMNS), line = tsh_shape1(COLUMNS);
    tsh_linear_desc desc;
    tsh_tensor *w;
    tsh_real *g;
    int64_t i;
    memset(&desc, 0, sizeof desc);
    desc.in = COLUMNS;
    desc.out = N / COLUMNS;
    desc.bias = TSH_NO;
    b->x = values(b->ctx, matrix, 0.01, 1);
    b->y = values(b->ctx, matrix, -4, 4);
    b->mask = integers(b->ctx, matrix, 2);
    b->integers = integers(b->ctx, matrix, 1000);
    b->weight = values(b->ctx, line, 0.5, 1.5);
    b->bias = values(b->ctx, line, -1, 1);
    b->logits = values(b->ctx, tsh_shape2(N / CLASSES, CLASSES), -8, 8);
    b->target = integers(b->ctx, tsh_shape1(N / CLASSES), CLASSES);
    b->ids = integers(b->ctx, tsh_shape1(N / COLUMNS), N / COLUMNS); /* row_of */
    b->table = values(b->ctx, matrix, -1, 1);
    b->row = values(b->ctx, tsh_shape2(1, COLUMNS), -1, 1);
    b->q8_0 = quantised(b->ctx, TSH_Q8_0);
    b->q4_0 = quantised(b->ctx, TSH_Q4_0);
    tsh_requires_grad(b->x, 1);
    tsh_requires_grad(b->y, 1);
    tsh_requires_grad(b->weight, 1);
    tsh_requires_grad(b->bias, 1);
    tsh_requires_grad(b->logits, 1);
    tsh_requires_grad(b->table, 1);
    b->layer = tsh_add_linear(tsh_root(b->ctx), "layer", &desc);
    (void)tsh_materialize(b->layer);
    w = tsh_param(b->layer, "weight");
    if (w && tshi_tape_allocate(w, &w->gr)) {
        g = (tsh_real *)tshi_mem_data(w->gr.block);
        for (i = 0; i < tsh_numel(w); i++) g[i] = (tsh_real)0.001;
        w->gr.live = 1;
    }
    b->sgd = optimiser(b->layer, TSH_SGD, 0);
    b->momentum = optimiser(b->layer, TSH_SGD, 0.9);
    b->adam = optimiser(b->layer, TSH_ADAM, 0);
    b->adamw = optimiser(b->layer, TSH_ADAMW, 0);
    for (i = 0; i < STREAMS; i++)
        b->plain[i] = (float *)tsh_data(b->ctx, values(b->ctx, tsh_shape1(N), 0.25, 0.75));
    (void)tshi_optim_norm(b->layer, &b->norm);
}

int main(int argc, char **argv) {
    int rounds = argc > 1 ? atoi(argv[1]) : 7, i, found = 0;
    bench b;
    memset(&b, 0, sizeof b);
    if (rounds < 1 || rounds > MOST_ROUNDS || tsh_open(NULL, &b.ctx) != TSH_OK) return 2;
    prepare(&b);
    for (i = 0; i < COUNT(rows) && tsh_ok(b.ctx); i++)
        if (argc < 3 || strstr(rows[i].name, argv[2])) {
            measure(&b, &rows[i], rounds);
            found++;
        }
    if (!tsh_ok(b.ctx))
        fprintf(stderr, "bench_kernels: %s\n", tsh_last_error(b.ctx)->message);
    else if (!found)
        fprintf(stderr, "bench_kernels: no row's name holds \"%s\"\n", argv[2]);
    i = !tsh_ok(b.ctx) || !found;
    tsh_close(b.ctx);
    return i;
}
