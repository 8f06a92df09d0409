/* HEADER with its implementation, alone in a file; included twice, as headers are. */
#define TSHARD_IMPLEMENTATION
#include HEADER
#include HEADER
