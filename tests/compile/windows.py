#!/usr/bin/env python3
"""Compiles tshard.h and tshard_threads.h for 64-bit Windows with mingw-w64, and runs the tests of
units, ops, layers and of the threads backend under wine.

    windows.py [--only PART] [--warn "FLAGS"] [--warn-c "FLAGS FOR C ALONE"]

Reports in cmocka's words, one test per compilation and per test program; then one line per row of
the table in tests/README.md. --only runs the tests whose name holds PART. Everything is
built under build/windows, where wine has its files, too.
"""

import argparse
import glob
import os
import re
import shutil
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(TOP, "tests", "support"))
sys.path.insert(0, HERE)
from scripts import Failed, Skipped, check, outcome, tell
from test_compile import two_rank_program

OUT = os.path.join("build", "windows")  # all paths are relative to TOP, as wine sees the same
PREFIX = "x86_64-w64-mingw32-"
APT = "apt-get install gcc-mingw-w64-x86-64 g++-mingw-w64-x86-64 wine wine64"
HEADERS = ["tshard.h", "backends/tshard_threads.h"]
COMPILE_LIMIT, WINE_LIMIT, PROGRAM_LIMIT = 300, 120, 300  # seconds
# Programs that are not for Windows, and why.
LEFT_OUT = {"op/test_gemm_blis": "BLIS is not installed for Windows",
            "op/test_gemm_cblas": "BLIS is not installed for Windows",
            "layer/test_replicas_tcp": "the TCP backend needs POSIX"}
# Instruction sets are a processor's, not a system's: what is tested of them is that gcc keeps wide
# vectors where it finds them again.
WITH_AVX = ["unit/test_kernel", "unit/test_gemm"]


def compilers():
    """The C compilers of each thread model, by name; the first one builds the tests."""
    names = [PREFIX + "gcc-" + model for model in ("win32", "posix")]
    return [name for name in names if shutil.which(name)] or [PREFIX + "gcc"]


def wine():
    """Debian's `wine` wants 32-bit wine, too, which these programs do not need."""
    for name in "wine64", "/usr/lib/wine/wine64", "wine":
        if shutil.which(name):
            return name
    return None


def environment():
    path = os.path.join(TOP, OUT)
    return dict(os.environ, WINEPREFIX=os.path.join(path, "wine"), WINEDEBUG="-all",
                WINEDLLOVERRIDES="mscoree,mshtml=", DISPLAY="", TMPDIR=path)


def call(command, limit, **more):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=TOP,
                          encoding="utf-8", errors="replace", timeout=limit, **more)
    return done.returncode, done.stdout


def must(command, limit=COMPILE_LIMIT, **more):
    code, text = call(command, limit, **more)
    if code:
        raise Failed("%s: exit code %d\n%s" % (" ".join(command), code, text[-3000:]))
    return text


def run(program):
    return must([wine(), program], PROGRAM_LIMIT, env=environment(), stdin=subprocess.DEVNULL)


def source(header, name):
    return ['-DHEADER="../../%s"' % header, os.path.join("tests", "compile", name)]


def compilations(warn, warn_c):
    """(name, test) of every way to compile a header."""
    ways = [[], ["-DTSHARD_WINDOWS_AVX"], ["-DTSHARD_NO_SIMD"], ["-DTSHARD_REAL=double"],
            ["-DTSHARD_STATIC"], ["-include", "windows.h", "-Wno-shadow"]]  # it has a type `byte`
    rows = []
    for compiler in compilers():
        first = compiler == compilers()[0]
        rows += [([compiler, "-std=c99"] + warn_c, ways if first else ways[:1]),
                 ([compiler.replace("gcc", "g++"), "-std=c++11", "-x", "c++"],
                  [ways[0], ways[-1]] if first else ways[:1])]
    rows += [([compilers()[0], "-std=c17"] + warn_c, ways[:1])]
    if shutil.which("clang"):
        rows += [(["clang", "--target=x86_64-w64-mingw32", "-std=c99"] + warn_c, ways[:1])]
    for base, some in rows:
        for header in HEADERS:
            for way in some:
                command = base + ["-Werror"] + warn + way
                command += source(header, "implementation.c") + ["-c", "-O0", "-o", os.devnull]
                title = [word for word in base[:3] if word != "-x" and word not in warn_c]
                yield ("compile %s %s" % (" ".join(title + way), header),
                       lambda folder, command=command: must(command))
            command = base + ["-Werror"] + warn + source(header, "declarations.c")
            yield ("compile %s %s, declarations" % (base[0], header),
                   lambda folder, command=command: must(command + ["-c", "-o", os.devnull]))


def imports(program):
    """The DLLs that a program needs."""
    return re.findall(r"DLL Name: (\S+)", must([PREFIX + "objdump", "-p", program]))


def threads_need_no_library(folder):
    """README's two-rank program with README's flags but -pthread, which Windows does not need: it
    trains, and needs the system's own DLLs only."""
    text = os.path.join(OUT, "two_ranks.c")
    with open(os.path.join(TOP, text), "w") as out:
        out.write(two_rank_program())
    for compiler in compilers():
        must([compiler, "-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", text,
              "-o", text[:-1] + "exe", "-lm"])
        needs = set(imports(text[:-1] + "exe"))
        check(needs <= {"KERNEL32.dll", "msvcrt.dll"}, compiler, "needs", needs)
        losses = [float(loss) for loss in re.findall(r"loss (\S+)", run(text[:-1] + "exe"))]
        check(len(losses) == 6 and losses[-1] < 0.1 * losses[0], compiler, losses)


def others_say_so(folder):
    """What needs POSIX says so in one sentence."""
    for path in "backends/tshard_uv.h", "backends/tshard-run.c":
        code, text = call([compilers()[0], "-std=c99", "-DTSHARD_IMPLEMENTATION=", "-x", "c",
                           "-fsyntax-only", path], COMPILE_LIMIT)
        errors = re.findall(r"error: (.*)", text)
        check(code and len(errors) == 1 and "does not run on Windows" in errors[0], path, text)


def starts(folder):
    """The first start of wine makes its files, which takes 10 s and more."""
    program = os.path.join(OUT, "starts")
    must([compilers()[0], "-std=c99", "-x", "c", "-", "-o", program + ".exe"],
         input="int main(void) { return 0; }\n")
    must([wine(), program + ".exe"], WINE_LIMIT, env=environment(), stdin=subprocess.DEVNULL)


def build(name, flags, program):
    """Compiles one test; those without an implementation of their own share one object."""
    path = os.path.join("tests", name + ".c")
    command = [compilers()[0], "-std=c99", "-O1", "-fno-math-errno", "-Wall", "-Wextra", "-Werror",
               "-Itests/support/plain", "-include", "tests/support/windows.h"] + flags
    with open(os.path.join(TOP, path), encoding="utf-8") as file:
        own = "TSHARD_IMPLEMENTATION" in file.read()
    library = os.path.join(OUT, "library.o")
    if not own and not os.path.exists(os.path.join(TOP, library)):
        must(command + ["-c", "tests/support/library.c", "-o", library])
    # -pthread, and mingw's own library of it, are for the tests: they start threads, and sleep
    must(command + [path] + ([] if own else [library])
         + ["-o", program, "-static", "-pthread", "-lm"])


def runs(name, flags=()):
    """A test that builds a program and runs it; how many of its tests passed is kept in COUNTS."""
    def test(folder):
        if name in LEFT_OUT:
            raise Skipped(LEFT_OUT[name])
        program = os.path.join(OUT, name.replace("/", "_") + ("_avx" if flags else "") + ".exe")
        build(name, list(flags), program)
        text = run(program)
        passed = sum(map(int, re.findall(r"^\[  PASSED  \] (\d+) test", text, re.M)))
        check(passed, "runs no test:", text[-1000:])
        skipped = re.findall(r"^skip: (.*)$", text, re.M)
        for why in skipped:
            print("skip: %s: %s" % (name, why))
        COUNTS[name.split("/")[0]][0] += passed
        COUNTS[name.split("/")[0]][1] += len(skipped)
    return test


COUNTS = {part: [0, 0] for part in ("unit", "op", "layer", "comm")}  # tests passed, skipped


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--warn", default="-Wall -Wextra -pedantic")
    parser.add_argument("--warn-c", default="")
    args = parser.parse_args()
    if not shutil.which(compilers()[0]) or not wine():
        print("skip: windows: %s is missing: %s"
              % ("wine" if shutil.which(compilers()[0]) else compilers()[0], APT))
        return tell("windows", [("windows", "SKIPPED", "needs mingw-w64 and wine: " + APT)])
    os.makedirs(os.path.join(TOP, OUT), exist_ok=True)
    if os.path.exists(os.path.join(TOP, OUT, "library.o")):
        os.remove(os.path.join(TOP, OUT, "library.o"))
    tests = list(compilations(args.warn.split(), args.warn_c.split()))
    tests += [("wine starts", starts), ("threads need no library", threads_need_no_library),
              ("other backends say so", others_say_so)]
    for part in COUNTS:
        for path in sorted(glob.glob(os.path.join(TOP, "tests", part, "test_*.c"))):
            name = "%s/%s" % (part, os.path.basename(path)[:-2])
            tests.append((name, runs(name)))
    tests += [(name + " with AVX", runs(name, ["-DTSHARD_WINDOWS_AVX"])) for name in WITH_AVX]
    ends, begin = [], time.monotonic()
    try:
        for name, test in tests:
            if args.only in name or test is starts:
                ends.append((name,) + outcome(test))
                print("%6.0f s  %-8s %s" % (time.monotonic() - begin, ends[-1][1], name))
                sys.stdout.flush()
    finally:  # ends the wine that has this folder as its prefix, and no other
        servers = "wineserver", "/usr/lib/wine/wineserver64", "/usr/lib/wine/wineserver"
        for server in [name for name in servers if shutil.which(name)][:1]:
            call([server, "-k"], WINE_LIMIT, env=environment())
    failed = tell("windows", ends)
    compiled = [state for name, state, _ in ends if name.startswith("compile")]
    print("windows: strict compilations %d of %d; tests passed and skipped: %s"
          % (compiled.count("OK"), len(compiled),
             ", ".join("%s %d, %d" % (part, *COUNTS[part]) for part in COUNTS)))
    return failed


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
