/* The TCP backend alone, compiled once for all tests that use what is public of it; library.c has
 * the rest. */
#define TSHARD_IMPLEMENTATION
#define TSHARD_IMPLEMENTED
#include "../../backends/tshard_uv.h"
