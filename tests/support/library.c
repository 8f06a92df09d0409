/* The library with ranks as threads, compiled once for all tests that use what is public. */
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
