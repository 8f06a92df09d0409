/* The library, compiled once: for libtshard.so (make shared) and for CMake's tshard::static. */
#define TSHARD_IMPLEMENTATION
#include "../tshard_backend.h"
#ifndef TSHARD_NO_THREADS
#include "../tshard_threads.h"
#endif
