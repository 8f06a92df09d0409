// The implementation in a file of its own, compiled as C++.
#define TSHARD_IMPLEMENTATION
#include "tshard.h"
#include "backends/tshard_threads.h"
