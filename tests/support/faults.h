/* faults.h - what the programs of `make faults` share: a row per test with its figures and their
 * limits. A row is columns with two blanks or more between them:
 *
 *     F1  SIGKILL in all-reduce, N=4  runs 20  p99 3.1 ms <= 100  named 100 % >= 100  ok
 *
 * and ends with "ok", "FAIL: why" or "skipped: why"; tests/fault/run.py reads them. */
#ifndef TSHARD_TESTS_FAULTS_H
#define TSHARD_TESTS_FAULTS_H

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FAULT_SAMPLES = 20000 };

static struct fault_state {
    int begun, rows, failed;
    char why[1200]; /* the first failure of this row */
} fault_row;

/* 1: the counts of the contract; 0: fewer, so that all programs end within ten minutes. */
UNUSED static int fault_full(void) {
    const char *full = getenv("FULL");
    return full && strcmp(full, "1") == 0;
}

__attribute__((format(printf, 2, 3))) UNUSED static void fault_begin(const char *test,
                                                                     const char *format, ...) {
    char name[96];
    va_list list;
    va_start(list, format);
    (void)vsnprintf(name, sizeof name, format, list);
    va_end(list);
    fault_row.begun = 1;
    fault_row.why[0] = 0;
    (void)printf("%-4s  %-46s", test, name);
}

/* The row fails, for this reason if it is the first one. */
__attribute__((format(printf, 1, 2))) UNUSED static void fault_fail(const char *format, ...) {
    va_list list;
    if (fault_row.why[0]) return;
    va_start(list, format);
    (void)vsnprintf(fault_row.why, sizeof fault_row.why, format, list);
    va_end(list);
}

/* A figure without a limit. */
UNUSED static void fault_figure(const char *name, double value, const char *unit) {
    (void)printf("  %s %.*f%s%s", name, value < 100 && floor(value) != value ? 2 : 0, value,
                 *unit ? " " : "", unit);
}

UNUSED static void fault_at_most(const char *name, double value, const char *unit, double limit) {
    fault_figure(name, value, unit);
    (void)printf(" <= %g", limit);
    if (!(value <= limit)) fault_fail("%s is %g %s, more than %g", name, value, unit, limit);
}

UNUSED static void fault_at_least(const char *name, double value, const char *unit, double limit) {
    fault_figure(name, value, unit);
    (void)printf(" >= %g", limit);
    if (!(value >= limit)) fault_fail("%s is %g %s, less than %g", name, value, unit, limit);
}

UNUSED static void fault_end(void) {
    for (char *c = fault_row.why; *c; c++)
        if (*c == '\n') *c = ' ';
    (void)printf(fault_row.why[0] ? "  FAIL: %s\n" : "  ok\n", fault_row.why);
    (void)fflush(stdout);
    fault_row.rows++;
    fault_row.failed += fault_row.why[0] != 0;
}

__attribute__((format(printf, 1, 2))) UNUSED static void fault_skip(const char *format, ...) {
    char why[256];
    va_list list;
    va_start(list, format);
    (void)vsnprintf(why, sizeof why, format, list);
    va_end(list);
    (void)printf("  skipped: %s\n", why);
    (void)fflush(stdout);
    fault_row.rows++;
}

/* What main returns. */
UNUSED static int fault_result(void) {
    return fault_row.failed || !fault_row.rows;
}

/* ------------------------------------------------------------------- samples */

typedef struct samples {
    double value[FAULT_SAMPLES];
    int count;
} samples;

UNUSED static void sample_add(samples *s, double value) {
    if (s->count < FAULT_SAMPLES) s->value[s->count++] = value;
}

static int sample_order(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The smallest sample that so many percent do not exceed. */
UNUSED static double sample_percentile(samples *s, double percent) {
    int at = (int)ceil(percent / 100 * s->count) - 1;
    if (!s->count) return (double)NAN;
    qsort(s->value, (size_t)s->count, sizeof s->value[0], sample_order);
    return s->value[at < 0 ? 0 : at];
}

#endif
