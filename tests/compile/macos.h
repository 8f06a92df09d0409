/* macos.h - makes Linux look like macOS to what is compiled after it, as far as a compiler sees:
 * what only Linux has is undefined, what only macOS has is declared. test_macos.py includes it
 * before everything else. The system's own headers come first, which are Linux's. */
#ifndef TSHARD_TESTS_MACOS_H
#define TSHARD_TESTS_MACOS_H

#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <limits.h>
#include <math.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif
#ifdef MACOS_UV
#include <sodium.h>
#include <uv.h>
#endif

#undef __linux__
#undef __linux
#undef linux
#undef __gnu_linux__
#undef __unix__
#undef __unix
#undef unix
#define __APPLE__ 1

#undef MSG_NOSIGNAL
#undef TCP_THIN_LINEAR_TIMEOUTS
#undef SOCK_CLOEXEC
#undef SOCK_NONBLOCK
#undef O_TMPFILE
#undef CLOCK_BOOTTIME
#undef CLOCK_MONOTONIC_COARSE
#undef PTHREAD_BARRIER_SERIAL_THREAD
#undef SOL_TCP
#undef TCP_KEEPIDLE
#undef TCP_QUICKACK
#undef MSG_MORE

#define SO_NOSIGPIPE         0x1022
#define TCP_KEEPALIVE        0x10
#define SO_NWRITE            0x1024
int pthread_cond_timedwait_relative_np(pthread_cond_t *cond, pthread_mutex_t *mutex,
                                       const struct timespec *time);

#endif
