/* logs.h - a logger that keeps its messages for a test to look at. The ranks of a world may share
 * one, as threads. Include it after tshard.h. */
#ifndef TSHARD_TESTS_LOGS_H
#define TSHARD_TESTS_LOGS_H

#include <stdio.h>
#include <string.h>

enum { LOG_LINES = 64 };

typedef struct log_lines {
    int count; /* atomic; may be more than LOG_LINES, of which the first are kept */
    char line[LOG_LINES][TSH_MESSAGE_SIZE + 80];
} log_lines;

/* For tsh_logger.log; user is a log_lines. */
__attribute__((unused)) static void log_keep(const char *message, void *user) {
    log_lines *lines = (log_lines *)user;
    int i = __atomic_fetch_add(&lines->count, 1, __ATOMIC_SEQ_CST);
    if (i < LOG_LINES) (void)snprintf(lines->line[i], sizeof lines->line[i], "%s", message);
}

/* How many of the lines are equal to `line`. */
__attribute__((unused)) static int log_holds(const log_lines *lines, const char *line) {
    int i, found = 0;
    for (i = 0; i < lines->count && i < LOG_LINES; i++)
        found += strcmp(lines->line[i], line) == 0;
    return found;
}

#endif
