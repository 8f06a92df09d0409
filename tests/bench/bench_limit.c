/* What this machine allows a training step of GPT-2 124M, tensor-parallel on two ranks of one
 * thread: every matrix product of a rank at the better rate of BLIS and OpenBLAS for its shape (at
 * the built-in one's, where there is neither), and causal attention at their mean rate, while the
 * other core does the same; then seven streams of AdamW, 28 bytes per parameter, at the speed of
 * both cores. In bf16, products are assumed to take half as long (AVX512_BF16), but AdamW reads and
 * writes the same 28 bytes: exact weights, gradients and moments have 4 bytes each.
 *
 * usage: BLIS_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 bench_limit BATCH CONTEXT [bf16]
 * Answers every line of its input with the microseconds of one step, measured anew, until the input
 * ends. With the argument "-v" also prints each product. */
#include "products.h"

#include <pthread.h>

enum { LAYERS = 12, HEADS = 12, WIDTH = 768, VOCABULARY = 50257, RANKS = 2, STREAMS = 4 };
enum { NN, NT, TN };
#define NEVER 1e9

/* x (rows, in) times a weight that is stored (in, out), or (out, in) for the logits; one rank's
 * share. */
typedef struct layer {
    int in, out, turned, times;
} layer;

static const layer layers[] = {
    {WIDTH, 3 * WIDTH / RANKS, 0, LAYERS},          /* c_attn */
    {WIDTH / RANKS, WIDTH, 0, LAYERS},              /* c_proj */
    {WIDTH, 4 * WIDTH / RANKS, 0, LAYERS},          /* c_fc */
    {4 * WIDTH / RANKS, WIDTH, 0, LAYERS},          /* c_proj */
    {WIDTH, (VOCABULARY + RANKS - 1) / RANKS, 1, 1} /* lm_head */
};

/* One core's side; both do everything at the same time. */
typedef struct side {
    int rank, rows, context, verbose, half;
    pthread_barrier_t *meet;
    problem p;
    double flop, seconds; /* of all products */
    double streams;       /* seconds of AdamW's */
} side;

/* Seconds of one product by a program. */
static double seconds_of(side *s, int program) {
    const double flop = 2.0 * s->p.m * s->p.n * s->p.k;
    const int times = flop > 5e8 ? 1 : (int)(5e8 / flop) + 1;
    double start, each;
    programs[program].product(&s->p);
    (void)pthread_barrier_wait(s->meet);
    start = now();
    for (int i = 0; i < times; i++) programs[program].product(&s->p);
    each = (now() - start) / times;
    (void)pthread_barrier_wait(s->meet);
    if (s->verbose && s->rank == 0)
        fprintf(stderr, "%d x %d x %d %s %-9s %6.1f GFLOP/s\n", s->p.m, s->p.n, s->p.k,
                s->p.ta   ? "TN"
                : s->p.tb ? "NT"
                          : "NN",
                programs[program].name, flop / each / 1e9);
    return each;
}

/* The least by BLIS (as such, and as tshard_blis.h calls it) and OpenBLAS. */
static double best_of(side *s) {
    double least = NEVER, each;
    for (int i = 1; i < COUNT(programs); i++) {
        each = there(&s->p, i) ? seconds_of(s, i) : NEVER;
        if (each < least) least = each;
    }
    return least < NEVER ? least : seconds_of(s, 0);
}

static void product(side *s, int m, int n, int k, int kind, int times) {
    s->p.m = m;
    s->p.n = n;
    s->p.k = k;
    s->p.ta = kind == TN;
    s->p.tb = kind == NT;
    s->seconds += times * best_of(s);
    s->flop += times * 2.0 * m * n * k;
}

/* Forward, the gradient of x, the gradient of the weight. */
static void products(side *s) {
    s->flop = s->seconds = 0;
    for (int i = 0; i < COUNT(layers); i++) {
        const layer *l = &layers[i];
        product(s, s->rows, l->out, l->in, l->turned ? NT : NN, l->times);
        product(s, s->rows, l->in, l->out, l->turned ? NN : NT, l->times);
        if (l->turned)
            product(s, l->out, l->in, s->rows, TN, l->times);
        else
            product(s, l->in, l->out, s->rows, TN, l->times);
    }
}

/* Two products forward and four backward for each pair of a query and a key that it sees. */
static double attention_flop(const side *s) {
    const double pairs = (double)s->rows * (s->context + 1) / 2;
    return 6 * 2.0 * pairs * (WIDTH / RANKS) * LAYERS;
}

static double parameters(int context) {
    return (double)VOCABULARY * WIDTH + (double)context * WIDTH +
           LAYERS * (12.0 * WIDTH * WIDTH + 13.0 * WIDTH) + 2.0 * WIDTH;
}

/* p, m, v are read and written, g is read: at arrays that no cache holds. */
static void streams(side *s, float *x, int64_t n) {
    float *restrict p = x, *restrict m = x + n, *restrict v = x + 2 * n;
    const float *restrict g = x + 3 * n;
    double start;
    (void)pthread_barrier_wait(s->meet);
    start = now();
    for (int64_t i = 0; i < n; i++) {
        m[i] = 0.9f * m[i] + 0.1f * g[i];
        v[i] = 0.99f * v[i] + 0.01f * g[i] * g[i];
        p[i] -= 1e-3f * m[i] + 1e-6f * v[i];
    }
    s->streams = now() - start;
    (void)pthread_barrier_wait(s->meet);
}

static void *run(void *argument) {
    side *s = (side *)argument;
    const int64_t n = 1 << 24; /* 64 MiB each */
    float *x = (float *)malloc((size_t)n * STREAMS * sizeof *x);
    const size_t most = (size_t)(VOCABULARY / RANKS + 1) * 1024 + (size_t)s->rows * 4 * WIDTH;
    s->p.a = matrix((int)(most / 1024) + 1, 1024);
    s->p.b = matrix((int)(most / 1024) + 1, 1024);
    s->p.c = matrix((int)(most / 1024) + 1, 1024);
    if (!x) exit(1);
    for (int64_t i = 0; i < n * STREAMS; i++) x[i] = 0.01f;
    for (;;) {
        char line[64] = "";
        if (s->rank == 0 && !fgets(line, sizeof line, stdin)) exit(0);
        (void)pthread_barrier_wait(s->meet);
        products(s);
        streams(s, x, n);
        if (s->rank == 0) {
            const double gemm = s->seconds, attention = attention_flop(s) * gemm / s->flop;
            const double adamw = s->streams * parameters(s->context) / RANKS / (double)n;
            if (s->verbose)
                fprintf(stderr, "products %.3f s, attention %.3f s, AdamW %.3f s (%.1f GB/s)\n",
                        gemm, attention, adamw, RANKS * 28e-9 * (double)n / s->streams);
            printf("%.0f\n", 1e6 * ((gemm + attention) / (s->half ? 2 : 1) + adamw));
            (void)fflush(stdout);
        }
    }
}

int main(int argc, char **argv) {
    side sides[RANKS];
    pthread_barrier_t meet;
    pthread_t other;
    if (argc < 3 || pthread_barrier_init(&meet, NULL, RANKS) != 0) return 2;
    memset(sides, 0, sizeof sides);
    for (int i = 0; i < RANKS; i++) {
        side *s = &sides[i];
        s->p = programs_open(1);
        s->rank = i;
        s->context = atoi(argv[2]);
        s->rows = atoi(argv[1]) * s->context;
        s->verbose = strcmp(argv[argc - 1], "-v") == 0;
        s->half = argc > 3 && strcmp(argv[3], "bf16") == 0;
        s->meet = &meet;
    }
    if (pthread_create(&other, NULL, run, &sides[1]) != 0) return 1;
    (void)run(&sides[0]);
    return 0;
}
