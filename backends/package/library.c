/* The library, compiled once, with the threads backend unless TSHARD_NO_THREADS is defined: for
 * libtshard.so, CMake's tshard::static and Meson's tshard-static. Installed as tshard.c, for
 * programs that compile it as a file of theirs and define TSHARD_IMPLEMENTATION in none. */
#define TSHARD_IMPLEMENTATION
#include "../tshard_backend.h"
#ifndef TSHARD_NO_THREADS
#include "../tshard_threads.h"
#endif
