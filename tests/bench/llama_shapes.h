/* llama_shapes.h - the models that bench_model.c, peer_run.c and peer_llama.py decode, with random
 * weights. */
#ifndef TSHARD_TESTS_LLAMA_SHAPES_H
#define TSHARD_TESTS_LLAMA_SHAPES_H

#include <stdio.h>
#include <string.h>

typedef struct llama_shape {
    const char *name;
    int dim, hidden, layers, heads, kv_heads, vocab;
    int gpt2;                  /* 1: GPT-2's blocks: layer norms, biases, learnt positions, GELU */
    int first, tokens, rounds; /* tokens before those that a round measures; these; rounds */
} llama_shape;

enum { LLAMA_MOST_LAYERS = 22, LLAMA_PLACES = 256 }; /* tokens that peer_run.c decodes */

static const llama_shape llama_shapes[] = {
    {"stories260K", 64, 172, 5, 8, 4, 512, 0, 0, LLAMA_PLACES, 9},
    {"babyllama", 288, 768, 6, 6, 6, 32000, 0, 0, LLAMA_PLACES, 5}, /* 15 M and the embedding */
    {"gpt2", 768, 3072, 12, 12, 12, 50257, 1, 8, 24, 7},            /* 124 M */
    {"llama1b", 2048, 5632, 22, 32, 4, 32000, 0, 8, 24, 3},         /* TinyLlama's, 1.1 B */
};

/* NULL: there is none of this name, which is said. */
static const llama_shape *llama_find(const char *name) {
    for (size_t i = 0; i < sizeof llama_shapes / sizeof *llama_shapes; i++)
        if (strcmp(llama_shapes[i].name, name) == 0) return &llama_shapes[i];
    fprintf(stderr, "no model \"%s\"; there are stories260K, babyllama, gpt2 and llama1b\n", name);
    return NULL;
}

#endif
