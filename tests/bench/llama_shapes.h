/* llama_shapes.h - the models that bench_llama.c and peer_run.c decode, with random weights. */
#ifndef TSHARD_TESTS_LLAMA_SHAPES_H
#define TSHARD_TESTS_LLAMA_SHAPES_H

#include <stdio.h>
#include <string.h>

typedef struct llama_shape {
    const char *name;
    int dim, hidden, layers, heads, kv_heads, vocab;
} llama_shape;

enum { LLAMA_MOST_LAYERS = 8, LLAMA_PLACES = 256 }; /* tokens that are decoded */

static const llama_shape llama_shapes[] = {
    {"stories260K", 64, 172, 5, 8, 4, 512},
    {"babyllama", 288, 768, 6, 6, 6, 32000}, /* 15 M parameters beside the embedding's 9 M */
};

/* NULL: there is none of this name, which is said. */
static const llama_shape *llama_find(const char *name) {
    for (size_t i = 0; i < sizeof llama_shapes / sizeof *llama_shapes; i++)
        if (strcmp(llama_shapes[i].name, name) == 0) return &llama_shapes[i];
    fprintf(stderr, "no model \"%s\"; there are stories260K and babyllama\n", name);
    return NULL;
}

#endif
