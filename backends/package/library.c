/* The library, compiled once: for libtshard.so (make shared) and for CMake's tshard::static. */
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"
#ifndef TSHARD_NO_THREADS
#include "../tshard_threads.h"
#endif
