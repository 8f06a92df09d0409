#!/usr/bin/env python3
"""Compiles tshard.h and every backend, each alone, under the strict warnings, and lets the
analyzers of clang and gcc read them; so, too, every program that stands beside the backends. Tests,
benchmarks and examples are parsed, under the same warnings. Then the core and the threads backend
are parsed by every other compiler of OTHERS that is installed, for whatever processor.

    check.py --warn "FLAGS" --warn-c "FLAGS FOR C ALONE" [--jobs N]

Every standard, both compilers (clang where it is installed), declarations only and the
implementation. How the implementation is compiled (compiler, standard, -O0 or -O3, float or double,
...) is a choice of each of WAYS; every two choices meet in one compilation, or, with FULL=1 in the
environment, every combination is compiled. Prints what failed, which compilers are not here and the
packages that bring them, and "N passed, N failed, N skipped".
"""

import argparse
import concurrent.futures
import glob
import itertools
import os
import re
import shutil
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(TOP, "tests", "support"))
from scripts import mpi_flags, mpis

C = ["c99", "c11", "c17"]
CXX = ["c++11", "c++20"]
CLANG = ["-Wcomma", "-Wdocumentation", "-Wnewline-eof", "-Wextra-semi"]
PLAIN = os.path.join(TOP, "tests", "support", "plain")
POSIX = ["-D_POSIX_C_SOURCE=200809L"]  # for backends; the core and the threads are strict C99
CORE = os.path.join("backends", "tshard_backend.h")  # tshard.h, with what backends share
KEPT = os.path.join("tests", "compile", "kept.h")
# Macros for programs that have included tshard.h; tests/unit/test_places.c compiles them.
WHERE = os.path.join("backends", "tshard_where.h")
STRICT = ["tshard.h", CORE, os.path.join("backends", "tshard_threads.h")]
DOUBLE = ["-DTSHARD_REAL=double"]
STATIC = ["-DTSHARD_STATIC"]
TAKEN = ["-Dnear=", "-Dfar=", "-Dsmall=char"]  # by windows.h, where a program includes it before
LIMIT = 300  # seconds of one compilation
SHOWN = 30  # lines of what it said
# How the core is compiled: a choice of each row. A backend is compiled apart from the core, and,
# where both are static, with it. The optimiser sees most (values that may be unset, bounds) and
# takes longest, so the choice without it comes first.
APART = ["-DTSHARD_IMPLEMENTED"]  # a backend without the core
WAYS = {"core": [[["-O0"], ["-O3"]], [[], DOUBLE], [[], STATIC + TAKEN], [[], ["-fopenmp"]],
                 [[], ["-DTSHARD_NO_SIMD"]]],
        "backend": [[["-O0"] + APART, ["-O3"] + APART], [[], DOUBLE]],
        "both": [[["-O0"] + STATIC], [[], DOUBLE]]}


# (title, C compiler, C++ compiler, the package of each): they only parse the core and the threads
# backend. One that is the same version as plain gcc or clang is left out.
OTHERS = [("%s-%d" % (c, n), ["%s-%d" % (c, n)], "%s-%d" % (cxx, n), "%s-%d" % (c, n),
           "%s-%d" % (package, n))
          for c, cxx, package, versions in (("gcc", "g++", "g++", range(9, 17)),
                                            ("clang", "clang++", "clang", range(11, 24)))
          for n in versions]
WANTED = ["gcc-12", "gcc-13", "gcc-14", "clang-14", "clang-16", "clang-19"]  # others are not missed
OTHERS += [("gcc -m32", ["gcc", "-m32"], "g++", "gcc-multilib (not beside compilers of others)",
            "g++-multilib"),
           ("musl", ["musl-gcc"], None, "musl-tools", None)]
OTHERS += [(name, [triple + "-gcc"], triple + "-g++",
            "gcc-%s libc6-dev-%s-cross" % (triple, architecture), "g++-" + triple)
           for name, triple, architecture in (
               ("i686", "i686-linux-gnu", "i386"), ("armhf", "arm-linux-gnueabihf", "armhf"),
               ("aarch64", "aarch64-linux-gnu", "arm64"),
               ("riscv64", "riscv64-linux-gnu", "riscv64"),
               ("s390x", "s390x-linux-gnu", "s390x"),
               ("ppc64le", "powerpc64le-linux-gnu", "ppc64el"))]
OTHERS += [("windows", ["x86_64-w64-mingw32-gcc"], "x86_64-w64-mingw32-g++",
            "gcc-mingw-w64-x86-64", "g++-mingw-w64-x86-64")]


def chosen(factors):
    """Of the rows that take one choice of each factor: all with FULL=1, else some in which every
    two choices of different factors meet. Row by row, the one in which most meet for the first
    time."""
    rows = list(itertools.product(*(range(len(choices)) for choices in factors)))
    left = {pair for row in rows for pair in itertools.combinations(enumerate(row), 2)}
    while left and not os.environ.get("FULL"):
        row = max(rows, key=lambda row: len(left.intersection(
            itertools.combinations(enumerate(row), 2))))
        left.difference_update(itertools.combinations(enumerate(row), 2))
        yield [choices[at] for choices, at in zip(factors, row)]
    if os.environ.get("FULL"):
        yield from itertools.product(*factors)


def compiler_of(family, standard):
    return {"gcc": ("gcc", "g++"), "clang": ("clang", "clang++")}[family][standard in CXX]


def strict(family, standard, warn, warn_c):
    """The compiler of a header, with its warnings."""
    command = [compiler_of(family, standard), "-std=" + standard, "-Werror"] + warn
    command += CLANG + ["-Wreserved-identifier"] if family == "clang" else []
    return command + (["-x", "c++"] if standard in CXX else warn_c)


def compilations(families, headers, programs, warn, warn_c):
    """(title, command) of every compilation of a header or a program beside the backends."""
    end = ["-c", "-o", os.devnull]
    for header in headers:
        if header == CORE:
            ways = chosen([families, C + CXX] + WAYS["core"])
        else:  # the later standards see the backend apart and the core
            ways = itertools.chain(chosen([families, C + CXX] + WAYS["backend"]),
                                   chosen([families, C[:1] + CXX[:1]] + WAYS["both"]))
        for family, standard, *flags in ways:
            flags = sum(flags, [])
            yield (" ".join([compiler_of(family, standard), standard, header] + flags),
                   strict(family, standard, warn, warn_c) + flags
                   + source(header, "implementation.c") + end)
        for family, standard in itertools.product(families, C + CXX):
            base = strict(family, standard, warn, warn_c)
            title = " ".join([base[0], standard, header])
            yield title + " declarations", base + source(header, "declarations.c") + end
            for mpi in others(header):
                yield (title + " with " + mpi,
                       base + ["-O3"] + APART + source(header, "implementation.c", mpi) + end)
    for family in families:  # without what only backends call
        yield (family + " c99 tshard.h", strict(family, "c99", warn, warn_c)
               + source("tshard.h", "implementation.c") + ["-fsyntax-only"])
    for family, standard, flag in itertools.product(families, C, ["-O0", "-O3"]):
        for program in programs:
            yield (" ".join([family, standard, program, flag]),
                   strict(family, standard, warn, warn_c) + [flag] + POSIX
                   + [os.path.join(TOP, program)] + end)


def parsings(family, warn, warn_c):
    """(title, command) of every program of tests, benchmarks and examples: by gcc with the
    substitute for cmocka that a bare machine has, by clang with cmocka itself. Without the
    core, if the program does without its internals."""
    warn = ["-Werror"] + warn + (CLANG if family == "clang" else [])
    for program in users():
        flags = ["-I" + TOP] + (["-I" + PLAIN] if family == "gcc" else [])
        if needs_mpi(program):
            flags += mpi_flags(list(mpis().values())[0]) + ["-DTESTS_PARTS=X(test_any)"]
        command = [family, "-std=c99", "-fsyntax-only"] + POSIX + warn + warn_c + flags
        yield (" ".join([family, program]), command + [os.path.join(TOP, program)],
               command + APART + [os.path.join(TOP, program)])


def users():
    """Every C program of tests, benchmarks and examples, but those that this script is made of, and
    the one that consists of others."""
    paths = glob.glob(os.path.join(TOP, "tests", "*", "*.c"))
    paths = [path for path in paths if os.path.dirname(path) != HERE
             and os.path.basename(path) != "private.c"]
    paths += glob.glob(os.path.join(TOP, "examples", "*.c"))
    found = sorted(os.path.relpath(path, TOP) for path in paths)
    return [program for program in found if mpis() or not needs_mpi(program)]


def needs_mpi(program):
    with open(os.path.join(TOP, program), encoding="utf-8") as file:
        return re.search(r'#include .*mpi\.h[">]', file.read()) is not None


def others(header):
    """The MPIs that a header is also compiled with."""
    return list(mpis())[1:] if header.endswith("_mpi.h") else []


def source(header, name, mpi=None):
    flags = [] if header in STRICT else POSIX
    if header.endswith("_mpi.h"):
        flags = flags + mpi_flags(mpis()[mpi or list(mpis())[0]])
    return flags + ['-DHEADER="%s"' % os.path.join(TOP, header), os.path.join(HERE, name)]


def analyses(family, headers, programs):
    """For gcc the core, with what backends share, and every backend apart from it, as its analyzer
    would not come to an end with both. Clang looks into the functions of the main file only: each
    header as that, but the two large ones, of which it does not see what callers make sure. Then
    each program. In what backends share and in backends gcc's warning of lost memory is off
    (kept.h); the address sanitizer finds leaks there. With its usual limit gcc 12 takes over 8 GB
    for the core and over ten minutes; with 1 instead of 5, 4 GB and 40 seconds."""
    command = {"gcc": ["gcc", "-fanalyzer", "-Werror", "-O1", "-c"],
               "clang": ["clang", "--analyze", "--analyzer-output", "text",
                         "-Xclang", "-analyzer-werror"]}[family]
    command += ["-std=c99", "-o", os.devnull] + POSIX
    for compiler in list(mpis().values())[:1]:
        command += mpi_flags(compiler)
    apart = APART + (["-Wno-analyzer-malloc-leak"] if family == "gcc" else [])
    uv = os.path.join("backends", "tshard_uv.h")
    core = ["--param=analyzer-bb-explosion-factor=1"] if family == "gcc" else []
    parts = [(core, ["tshard.h", KEPT, CORE])] + [(apart, [header]) for header in headers[1:]]
    if family == "clang":
        parts = [part for part in parts[1:] if part[1] != [uv]]
    for flags, included in parts:
        paths = [os.path.join(TOP, header) for header in included]
        before = [flag for path in paths for flag in ("-include", path)] if family == "gcc" else []
        yield ("%s analyzer %s" % (family, " ".join(included)),
               command + ["-DTSHARD_IMPLEMENTATION="] + flags + before
               + ["-x", "c", os.devnull if before else paths[0]])
    for program in programs:
        yield family + " analyzer " + program, command + [os.path.join(TOP, program)]


def version(command):
    """A compiler's major version; None if it is not here or has no libc."""
    try:
        done = subprocess.run(command + ["-fsyntax-only", "-x", "c", "-"],
                              input="#include <stdlib.h>\n", stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, universal_newlines=True, timeout=LIMIT)
        if done.returncode:
            return None
        return subprocess.check_output(command + ["-dumpversion"], universal_newlines=True,
                                       timeout=LIMIT).split(".")[0]
    except (OSError, subprocess.SubprocessError):
        return None


def others_of(warn, warn_c):
    """(title, command) of the parsing by every compiler of OTHERS that is here, and (title,
    package) of every one that is not."""
    jobs, missing = [], []
    plain = {family: version([family]) for family in ("gcc", "clang")}
    warn = warn + ["-pedantic-errors", "-Werror", "-fsyntax-only"]
    threads = source(os.path.join("backends", "tshard_threads.h"), "implementation.c")
    for title, command, cxx, package, package_cxx in OTHERS:
        found, family = version(command), title.split("-")[0]
        if family in plain and found and found == plain[family] and len(command) == 1:
            continue
        if not found:
            if title in WANTED or family not in plain:
                missing.append((title, package))
            continue
        c = command + ["-std=c99"] + warn + warn_c
        jobs.append((title + " c99 tshard.h", c + source("tshard.h", "implementation.c")))
        for flags in [], DOUBLE, ["-DTSHARD_NO_SIMD"]:
            jobs.append((" ".join([title, "c99 tshard_threads.h"] + flags), c + flags + threads))
        if cxx and shutil.which(cxx):
            jobs.append((title + " c++11 tshard_threads.h", [cxx] + command[1:] + ["-std=c++11"]
                         + warn + ["-x", "c++"] + threads))
        elif cxx:
            missing.append((title + " in C++", package_cxx))
    return jobs, missing


def run(job):
    """Runs the commands of a job, (title, command, a shorter one that suffices if it passes), the
    shorter first."""
    begin = time.monotonic()
    for command in reversed(job[1:]):
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                  universal_newlines=True, timeout=LIMIT)
            failed, text = done.returncode != 0, done.stdout
        except subprocess.TimeoutExpired:
            failed, text = True, "no end within %d s" % LIMIT
        if not failed:
            break
    return job[0], command, failed, text, time.monotonic() - begin


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--warn", required=True)
    parser.add_argument("--warn-c", required=True)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--only", default="", help="those whose title holds this")
    parser.add_argument("--times", action="store_true", help="print how long each took")
    args = parser.parse_args()
    headers, programs = (sorted(os.path.relpath(path, TOP)
                                for path in glob.glob(os.path.join(TOP, "backends", form)))
                         for form in ("*.h", "*.c"))
    headers.remove(WHERE)
    headers.insert(0, headers.pop(headers.index(CORE)))
    if not mpis():
        headers = [header for header in headers if not header.endswith("_mpi.h")]
    families = [family for family in ("gcc", "clang") if shutil.which(family)]
    jobs = []  # the longest first
    for family in families:
        jobs += analyses(family, headers, programs)
    warn, warn_c = args.warn.split(), args.warn_c.split()
    jobs += compilations(families, headers, programs, warn, warn_c)
    for family in families:
        jobs += parsings(family, warn, warn_c)
    more, missing = others_of(warn, warn_c)
    missing = [(family, family) for family in ("gcc", "clang") if family not in families] + missing
    jobs = [job for job in jobs + more if args.only in job[0]]
    failures, seen = 0, set()
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for title, command, failed, text, seconds in pool.map(run, jobs):
            failures += failed
            if args.times:
                print("%6.1f s  %s" % (seconds, title))
            if failed:
                print("FAIL  " + title)
                errors = set(re.findall(r"[\w.]+:\d+:.*error.*", text)) or {text}
                if errors - seen:  # else one that was shown already
                    print(" ".join(command), *text.splitlines()[:SHOWN], sep="\n")
                seen |= errors
            sys.stdout.flush()
    for title, package in missing:
        print("skip  %s: not here: apt-get install %s" % (title, package))
    print("check: %d compilations and analyses of %s with %s"
          % (len(jobs), ", ".join(headers + programs),
             ", ".join(families + sorted({re.sub(" c.*", "", title) for title, _ in more}))))
    print("%d passed, %d failed, %d skipped" % (len(jobs) - failures, failures, len(missing)))
    return 1 if failures or not jobs or not families else 0


if __name__ == "__main__":
    sys.exit(main())
