#!/usr/bin/env python3
"""What tshard uses of macOS, where these tests do not run: every function and every constant of the
system must stand in macos.txt, which says since when macOS has it. Reports in cmocka's words.

The sources are compiled on Linux with macos.h before them, which turns to macOS's branches: those
compile at least, and the linker's view of them (nm -u) is the list of functions. The constants are
what is written in capitals in the lines that the preprocessor leaves."""

import concurrent.futures
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(TOP, "tests", "support"))
from scripts import Failed, Skipped, check, run_tests

SCRIPT_LIMIT = 300  # seconds, for tests/run.sh
CC = "gcc"  # clang's preprocessor keeps no comments and directives apart
SOURCES = {"backends/tshard_backend.h": [], "backends/tshard_threads.h": [],
           "backends/tshard_uv.h": ["-DMACOS_UV"], "backends/tshard-run.c": ["-DMACOS_UV"]}
CORE = ["backends/tshard_backend.h"]
FLAGS = ["-std=c99", "-D_POSIX_C_SOURCE=200809L", "-D_DARWIN_C_SOURCE", "-DTSHARD_IMPLEMENTATION=",
         "-O0", "-fno-builtin", "-include", os.path.join(HERE, "macos.h"), "-x", "c"]
WARN = ["-Wall", "-Wextra", "-pedantic", "-Werror"]
# Linux's names of functions that macOS has under those of C; and what compilers add.
ALIASES = {"__errno_location": "errno", "__sysv_signal": "signal", "__isoc99_sscanf": "sscanf",
           "__isoc23_strtol": "strtol", "__isoc23_strtoll": "strtoll",
           "__isoc23_strtoul": "strtoul"}
COMPILERS = {"_GLOBAL_OFFSET_TABLE_", "__cpu_model", "__cpu_features2", "__cpu_indicator_init",
             "__stack_chk_fail"}
OTHERS = re.compile(r"uv_|crypto_|sodium_|randombytes_|tsh[ib]?_")  # libuv, libsodium, tshard.h
OTHERS_CONSTANTS = re.compile(r"UV_|crypto_")
OUR_CONSTANTS = re.compile(r"TSH|GPT_|MACOS_")


def table():
    """{(kind, name): since when macOS has it}."""
    found = {}
    with open(os.path.join(HERE, "macos.txt"), encoding="utf-8") as file:
        for line in file:
            words = line.split("#")[0].split(None, 2)
            if words:
                check(len(words) == 3, "macos.txt:", line)
                found[words[0], words[1]] = words[2].strip()
    return found


def call(command):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=TOP,
                          universal_newlines=True, timeout=200)
    if done.returncode:
        raise Failed("%s\n%s" % (" ".join(command), done.stderr[:3000]))
    return done.stdout


def possible(source):
    """Skips a source whose libraries are not installed."""
    if "-DMACOS_UV" in SOURCES[source]:
        text = "#if !__has_include(<uv.h>) || !__has_include(<sodium.h>)\n#error missing\n#endif\n"
        done = subprocess.run([CC, "-E", "-x", "c", "-"], input=text, universal_newlines=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        if done.returncode:
            raise Skipped("needs libuv1-dev and libsodium-dev")


@functools.lru_cache(None)
def functions(source):
    """The functions and variables that the source takes from libc and libm on macOS."""
    with tempfile.TemporaryDirectory() as folder:
        return functions_of(source, os.path.join(folder, "macos.o"))


def functions_of(source, path):
    def taken(number, *way):
        built = "%s-%d.o" % (path, number)
        # the functions of tshard.h are CORE's
        rest = [] if source in CORE else ["-DTSHARD_IMPLEMENTED"]
        call([CC] + FLAGS + WARN + SOURCES[source] + rest + list(way) +
             ["-c", source, "-o", built])
        return {line.split()[-1] for line in call(["nm", "-u", built]).splitlines()}

    # In double, and without kernels for x86-64, other functions are called.
    ways = [(0,), (1, "-DTSHARD_REAL=double"), (2, "-DTSHARD_NO_SIMD")][:3 if source in CORE else 1]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        names = set().union(*pool.map(lambda way: taken(*way), ways))
    return {ALIASES.get(name, name) for name in names - COMPILERS if not OTHERS.match(name)}


def lines_of(source):
    """The project's own lines that are left of a source once macOS's conditions are decided."""
    own, kept = False, []
    for line in call([CC] + FLAGS + SOURCES[source] + ["-E", "-fdirectives-only", source]
                     ).splitlines():
        mark = re.match(r'# \d+ "([^"]*)"', line)
        if mark:
            path = os.path.normpath(os.path.join(TOP, mark[1]))
            own = path == source or (path.startswith(TOP + os.sep) and not path.startswith(HERE))
        elif own:
            kept.append(line)
    return "\n".join(kept)


@functools.lru_cache(None)
def constants(source):
    """Names in capitals that the project does not define."""
    text = re.sub(r'/\*.*?\*/|//[^\n]*|"(\\.|[^"\\])*"|\'(\\.|[^\'\\])*\'', " ", lines_of(source),
                  flags=re.DOTALL)
    text = re.sub(r"#\s*pragma[^\n]*|_Pragma\([^)]*\)", " ", text)
    used = set(re.findall(r"\b_?[A-Z][A-Z0-9_]{2,}\b", text))
    used -= {part for name in set(re.findall(r"\bTSHI?_(\w+)", text))
             for part in (name, name.split("_", 1)[-1])}
    ours = set(re.findall(r"#\s*define\s+(\w+)", text))
    for body in re.findall(r"\benum\b[^{};]*\{([^}]*)\}", text):
        ours |= set(re.findall(r"\b([A-Z][A-Z0-9_]+)\b\s*(?:=|,|$)", body + ","))
    ours |= set(re.findall(r"\bstatic const char ([A-Z]\w+)", text))
    # Not the system's: parameters of our macros, and what ## makes a part of a name.
    ours |= set(re.findall(r"\bX\((\w+)", text))
    for parameters in re.findall(r"#\s*define\s+\w+\(([^)]*)\)", text):
        ours |= set(re.findall(r"\w+", parameters))
    return {name for name in used - ours
            if not OUR_CONSTANTS.match(name) and not OTHERS_CONSTANTS.match(name)}


def checks(source):
    def test(folder):
        possible(source)
        known = table()
        for kind, names in ("function", functions(source)), ("constant", constants(source)):
            print("macos: %s: %d %ss" % (source, len(names), kind))
            unknown = sorted(name for name in names if (kind, name) not in known)
            check(not unknown, "%s uses the %s %s, of which tests/compile/macos.txt does not say "
                  "since when macOS has it" % (source, kind, ", ".join(unknown)))
    test.__name__ = "macos_has_what_%s_uses" % re.sub(r"\W", "_", os.path.basename(source))
    return test


def the_table_holds_no_other(folder):
    """What is not used any more does not stand in the table."""
    for source in SOURCES:
        possible(source)
    used = set()
    for source in SOURCES:
        used |= {("function", name) for name in functions(source)}
        used |= {("constant", name) for name in constants(source)}
    left = sorted(name for kind, name in set(table()) - used)
    check(not left, "macos.txt holds what is not used:", ", ".join(left))


def a_missing_name_is_found(folder):
    """Functions that macOS lacks, and a constant, in a source of their own."""
    path = os.path.join(folder, "lacks.c")
    with open(path, "w") as out:
        out.write("#include <pthread.h>\n#include <sys/socket.h>\nint f(pthread_condattr_t *a);\n"
                  "int f(pthread_condattr_t *a) {\n"
                  "    return pthread_condattr_setclock(a, 1) + SOCK_CLOEXEC;\n}\n")
    SOURCES[path] = []
    try:
        found, named = functions(path), constants(path)
    finally:
        del SOURCES[path]
    check(found == {"pthread_condattr_setclock"} and named == {"SOCK_CLOEXEC"}, found, named)
    check(("function", "pthread_condattr_setclock") not in table(), "macOS has it now")
    check(("constant", "SOCK_CLOEXEC") not in table(), "macOS has it now")


# What macOS has and Linux has not, for programs that run.
SHIM = """#include <errno.h>
int pthread_cond_timedwait_relative_np(pthread_cond_t *cond, pthread_mutex_t *mutex,
                                       const struct timespec *time) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    t.tv_sec += time->tv_sec + (t.tv_nsec + time->tv_nsec) / 1000000000;
    t.tv_nsec = (t.tv_nsec + time->tv_nsec) % 1000000000;
    return pthread_cond_timedwait(cond, mutex, &t);
}
"""


def threads_wait_as_on_macos(folder):
    """The tests of the threads backend with macOS's branches, which wait for lengths of time."""
    shim, program = os.path.join(folder, "shim.c"), os.path.join(folder, "test_threads")
    with open(shim, "w") as out:
        out.write(SHIM)
    flags = [flag for flag in FLAGS if flag != "-DTSHARD_IMPLEMENTATION="]
    call([CC] + flags + ["-Itests/support/plain", "tests/comm/test_threads.c",
                         "tests/support/library.c", shim, "-o", program, "-lm", "-pthread"])
    passed = re.search(r"^\[  PASSED  \] (\d+) test", call([program]), re.M)
    check(passed and int(passed[1]) > 10, "ran", passed and passed[0])


TESTS = [checks(source) for source in SOURCES] + [the_table_holds_no_other,
                                                  a_missing_name_is_found,
                                                  threads_wait_as_on_macos]

if __name__ == "__main__":
    if not sys.platform.startswith("linux") or not shutil.which("nm") or not shutil.which(CC):
        print("skip: macos: needs Linux, gcc and binutils")
        print("[  SKIPPED ] macos: 1 test(s), listed below:\n[  SKIPPED ] macos")
        sys.exit(0)
    sys.exit(run_tests("macos", TESTS))
