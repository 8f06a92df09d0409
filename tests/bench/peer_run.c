/* The peer of bench_model.c on one rank: a Llama's forward pass as plain loops over one block of
 * floats, on one thread, in the manner of Karpathy's llama2.c, to be compiled with -Ofast
 * -march=native. Prints "decode_<name>_f32 tokens/s runc <value>", the median of some rounds.
 *
 * usage: peer_run stories260K|babyllama [rounds] */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <stdlib.h>
#include <time.h>

#include "llama_shapes.h"

typedef struct peer {
    llama_shape s;
    int head, kv;         /* features of a head; of all keys */
    float *embed, *logit; /* (vocab, dim); the logits' weight is the embedding */
    float *norm;          /* (layers, 2, dim), then that of the end */
    float *wq, *wk, *wv, *wo, *w1, *w2, *w3;
    float *x, *y, *q, *att, *up, *gate; /* of one token */
    float *keys, *values;               /* (layers, places, kv) */
} peer;

static float *numbers(size_t n, float scale) {
    float *p = (float *)malloc(n * sizeof *p);
    if (!p) exit(1);
    for (size_t i = 0; i < n; i++) p[i] = scale * ((float)(rand() % 2001) / 1000.0f - 1.0f);
    return p;
}

static void make(peer *p, const llama_shape *s) {
    const size_t d = (size_t)s->dim, h = (size_t)s->hidden, n = (size_t)s->layers;
    p->s = *s;
    p->head = s->dim / s->heads;
    p->kv = p->head * s->kv_heads;
    p->embed = numbers((size_t)s->vocab * d, 0.05f);
    p->norm = numbers((2 * n + 1) * d, 1.0f);
    p->wq = numbers(n * d * d, 0.05f);
    p->wk = numbers(n * d * (size_t)p->kv, 0.05f);
    p->wv = numbers(n * d * (size_t)p->kv, 0.05f);
    p->wo = numbers(n * d * d, 0.05f);
    p->w1 = numbers(n * d * h, 0.05f);
    p->w2 = numbers(n * d * h, 0.05f);
    p->w3 = numbers(n * d * h, 0.05f);
    p->x = numbers(d, 0);
    p->y = numbers(d, 0);
    p->q = numbers(d, 0);
    p->att = numbers(LLAMA_PLACES, 0);
    p->up = numbers(h, 0);
    p->gate = numbers(h, 0);
    p->logit = numbers((size_t)s->vocab, 0);
    p->keys = numbers(n * LLAMA_PLACES * (size_t)p->kv, 0);
    p->values = numbers(n * LLAMA_PLACES * (size_t)p->kv, 0);
}

/* out (rows) = w (rows, n) x (n) */
static void matrix(float *out, const float *x, const float *w, int n, int rows) {
    for (int i = 0; i < rows; i++) {
        float sum = 0.0f;
        for (int j = 0; j < n; j++) sum += w[(size_t)i * (size_t)n + (size_t)j] * x[j];
        out[i] = sum;
    }
}

static void normalise(float *out, const float *x, const float *w, int n) {
    float squares = 0.0f, scale;
    for (int i = 0; i < n; i++) squares += x[i] * x[i];
    scale = 1.0f / sqrtf(squares / (float)n + 1e-5f);
    for (int i = 0; i < n; i++) out[i] = w[i] * (scale * x[i]);
}

/* Turns pairs (2 i, 2 i + 1) of each head. */
static void rotate(float *x, int n, int head, int place) {
    for (int i = 0; i < n; i += 2) {
        const float angle = (float)place * powf(10000.0f, -(float)(i % head) / (float)head);
        const float c = cosf(angle), s = sinf(angle), a = x[i], b = x[i + 1];
        x[i] = a * c - b * s;
        x[i + 1] = a * s + b * c;
    }
}

/* y = softmax(q keys^T / sqrt(head)) values, head by head. */
static void attend(peer *p, const float *keys, const float *values, int place) {
    const int share = p->s.heads / p->s.kv_heads, d = p->head;
    for (int h = 0; h < p->s.heads; h++) {
        const float *q = p->q + h * d;
        const size_t at = (size_t)(h / share * d);
        float *out = p->y + h * d, most = -INFINITY, sum = 0.0f;
        for (int t = 0; t <= place; t++) {
            const float *k = keys + (size_t)t * (size_t)p->kv + at;
            float score = 0.0f;
            for (int i = 0; i < d; i++) score += q[i] * k[i];
            p->att[t] = score / sqrtf((float)d);
            if (p->att[t] > most) most = p->att[t];
        }
        for (int t = 0; t <= place; t++) sum += p->att[t] = expf(p->att[t] - most);
        for (int i = 0; i < d; i++) out[i] = 0.0f;
        for (int t = 0; t <= place; t++) {
            const float *v = values + (size_t)t * (size_t)p->kv + at, weight = p->att[t] / sum;
            for (int i = 0; i < d; i++) out[i] += weight * v[i];
        }
    }
}

static void forward(peer *p, int id, int place) {
    const int d = p->s.dim, h = p->s.hidden, kv = p->kv;
    memcpy(p->x, p->embed + (size_t)id * (size_t)d, (size_t)d * sizeof *p->x);
    for (int l = 0; l < p->s.layers; l++) {
        const size_t n = (size_t)l, dd = (size_t)d * (size_t)d, dk = (size_t)d * (size_t)kv;
        const size_t dh = (size_t)d * (size_t)h, layer = n * LLAMA_PLACES * (size_t)kv;
        float *k = p->keys + layer + (size_t)(place * kv);
        float *v = p->values + layer + (size_t)(place * kv);
        normalise(p->y, p->x, p->norm + 2 * l * d, d);
        matrix(p->q, p->y, p->wq + n * dd, d, d);
        matrix(k, p->y, p->wk + n * dk, d, kv);
        matrix(v, p->y, p->wv + n * dk, d, kv);
        rotate(p->q, d, p->head, place);
        rotate(k, kv, p->head, place);
        attend(p, p->keys + layer, p->values + layer, place);
        matrix(p->q, p->y, p->wo + n * dd, d, d);
        for (int i = 0; i < d; i++) p->x[i] += p->q[i];
        normalise(p->y, p->x, p->norm + (2 * l + 1) * d, d);
        matrix(p->gate, p->y, p->w1 + n * dh, d, h);
        matrix(p->up, p->y, p->w3 + n * dh, d, h);
        for (int i = 0; i < h; i++) p->up[i] *= p->gate[i] / (1.0f + expf(-p->gate[i]));
        matrix(p->q, p->up, p->w2 + n * dh, h, d);
        for (int i = 0; i < d; i++) p->x[i] += p->q[i];
    }
    normalise(p->x, p->x, p->norm + 2 * p->s.layers * d, d);
    matrix(p->logit, p->x, p->embed, d, p->s.vocab);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int by_size(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    enum { MOST = 64 };
    const llama_shape *s = llama_find(argc > 1 ? argv[1] : "stories260K");
    const int wanted = argc > 2 ? atoi(argv[2]) : 5, rounds = wanted < MOST ? wanted : MOST;
    double used[MOST];
    peer p;
    if (!s || s->gpt2 || s->tokens != LLAMA_PLACES || rounds < 1) return 1;
    make(&p, s);
    for (int round = -1; round < rounds; round++) {
        const double start = now();
        for (int place = 0; place < LLAMA_PLACES; place++) forward(&p, 1, place);
        if (round >= 0) used[round] = now() - start;
    }
    if (p.logit[0] != p.logit[0]) fprintf(stderr, "not a number\n");
    qsort(used, (size_t)rounds, sizeof *used, by_size);
    printf("decode_%s_f32 tokens/s runc %.5g\n", s->name, LLAMA_PLACES / used[rounds / 2]);
    return 0;
}
