/* cores.h - chooses how many ranks a transformer runs on, and how many threads each rank has */
#ifndef EXAMPLES_CORES_H
#define EXAMPLES_CORES_H

#include <math.h> /* pow */
#include <stdint.h>

/* The most threads that a rank may have. */
#ifdef _OPENMP
#define CORES_THREADS 1024
#else
#define CORES_THREADS 1
#endif

typedef struct cores_model {
    int64_t heads, kv_heads; /* of each attention layer */
    int trains;              /* 0: it only generates text */
} cores_model;

typedef struct cores_choice {
    int ranks, threads; /* threads: of each rank */
} cores_choice;

/* Returns the part of a layer's weights that the rank with the most heads has. Heads are dealt out
 * whole, in groups that share their keys and values; if there are more ranks than groups, and
 * groups have several heads, each rank has all keys and values. A third of the weights is
 * attention's, the rest is the MLP's, which is divided evenly. */
static double cores_share(const cores_model *m, int64_t ranks) {
    const double heads = (double)m->heads, kv = (double)m->kv_heads;
    const int grouped = ranks <= m->kv_heads || m->kv_heads == m->heads;
    const int64_t parts = grouped ? m->kv_heads : m->heads;
    const double queries = (double)((parts + ranks - 1) / ranks) / (double)parts;
    const double keys = grouped ? queries : 1;
    const double attention = (heads * queries + kv * keys) / (heads + kv);
    return attention / 3 + 2.0 / 3 / (double)ranks;
}

/* Returns the time of a step, in steps of one rank with one thread, by a model with three numbers
 * of GPT-2 124M on 16 cores of an Intel Xeon (seconds of a step at ranks x threads, measured and by
 * the model: 16 x 1 0.30 0.29, 8 x 2 0.28 0.28, 4 x 4 0.27 0.28, 2 x 8 0.32 0.32, 1 x 16 0.37
 * 0.37):
 * - n threads do their rank's products n^(2/3) times as fast as one;
 * - work that is not divided among ranks, as norms, is 5 % of a training step (batch 4, 64 tokens),
 *   and 0.5 % of generating a token;
 * - collectives take 1 %. */
static double cores_time(const cores_model *m, int ranks, int threads) {
    return cores_share(m, ranks) / pow(threads, 2.0 / 3) + (m->trains ? 0.05 : 0.005) / threads +
           (ranks > 1 ? 0.01 : 0);
}

/* Returns what is fastest by cores_time on `cores` cores. The losses of training differ by rounding
 * from one number of ranks to another. ranks, threads: how many there may be; threads of each
 * rank. */
static cores_choice cores_choose(const cores_model *m, int cores, int ranks, int threads) {
    cores_choice best = {1, 1};
    for (int r = 1; r <= cores && r <= ranks; r++) {
        const int t = cores / r < threads ? cores / r : threads;
        if (cores_time(m, r, t) < cores_time(m, best.ranks, best.threads)) {
            best.ranks = r;
            best.threads = t;
        }
    }
    return best;
}

#endif
