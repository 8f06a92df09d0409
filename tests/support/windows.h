/* windows.h - what the tests use of POSIX that mingw does not have. tests/compile/windows.py
 * includes it before every test that it compiles for Windows. */
#ifndef TSHARD_TESTS_WINDOWS_H
#define TSHARD_TESTS_WINDOWS_H

#define tell windows_tell /* a test's own name, too */
#include <direct.h>       /* _mkdir */
#undef tell
#include <process.h> /* _getpid */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define WINDOWS_UNUSED    __attribute__((unused))
#define mkdir(path, mode) _mkdir(path)

WINDOWS_UNUSED static int setenv(const char *name, const char *value, int overwrite) {
    if (!overwrite && getenv(name)) return 0;
    return _putenv_s(name, value);
}

/* The last six characters become a number that no folder has yet. */
WINDOWS_UNUSED static char *mkdtemp(char *path) {
    for (int i = 0; i < 1000; i++) {
        (void)snprintf(path + strlen(path) - 6, 7, "%06d", (_getpid() * 1000 + i) % 1000000);
        if (_mkdir(path) == 0) return path;
    }
    return NULL;
}

#endif
