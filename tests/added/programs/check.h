/* What the programs of this folder share: the header with what a patch has added, and CHECK. */
#define TSHARD_IMPLEMENTATION
#include "tshard.h"
#include "backends/tshard_threads.h"
#include <stdio.h>
#include <string.h>

/* Returns 1 from the function, and prints why, unless the condition holds. */
#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (condition) break;                                                                      \
        (void)fprintf(stderr, "line %d: %s (%s)\n", __LINE__, #condition,                          \
                      tsh_last_error(ctx)->message);                                               \
        return 1;                                                                                  \
    } while (0)
