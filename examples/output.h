/* output.h - what a program prints is written, or the program says that it is not: a full disk, or
 * a stdout that is closed, is an error with a sentence and exit code 1. */
#ifndef EXAMPLES_OUTPUT_H
#define EXAMPLES_OUTPUT_H

#include <errno.h>
#include <fcntl.h> /* open */
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h> /* close */

/* First of all in main. Where 0, 1 or 2 are closed, files that are opened later would get these
 * numbers, and what is printed would go into them: /dev/null takes their place, for reading, so
 * that printing fails. A write beyond the limit of a file's size fails, too, without a signal. */
static void output_begin(void) {
    int file;
    do file = open("/dev/null", O_RDONLY);
    while (file >= 0 && file <= 2);
    if (file >= 0) (void)close(file);
    (void)signal(SIGXFSZ, SIG_IGN);
}

/* Last of all: 1, and a sentence on stderr, if something that was printed is lost. */
static int output_end(const char *program) {
    const int lost = ferror(stdout); /* earlier: the reason is not known any more */
    errno = 0;
    if (fflush(stdout) == 0 && !lost) return 0;
    fprintf(stderr, "%s: stdout cannot be written%s%s; what was printed is lost, or a part of it\n",
            program, errno ? ": " : "", errno ? strerror(errno) : "");
    return 1;
}

#endif /* EXAMPLES_OUTPUT_H */
