/* A backend, compiled beside the core of library.c: a file of its own in CMake's tshard::static, so
 * that only a program that calls it needs its libraries. TSHARD_BACKEND: its header. */
#define TSHARD_IMPLEMENTED
#define TSHARD_IMPLEMENTATION
#include TSHARD_BACKEND
