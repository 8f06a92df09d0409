#!/usr/bin/env python3
"""Builds and links tshard.h in the ways its users do. Reports in cmocka's words."""

import concurrent.futures
import glob
import os
import re
import resource
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(TOP, "tests", "support"))
from scripts import Failed, check, run_tests
from test_readme import blocks, by_diff
HEADER = os.path.join(TOP, "tshard.h")
C = [os.environ.get("CC", "cc"), "-std=c99"]
CXX = [os.environ.get("CXX", "c++"), "-std=c++11", "-x", "c++"]
PLAIN = ["-O0", "-pedantic", "-Wall", "-Wextra", "-Werror"]  # no -pthread: the core needs none
STATIC = ["-DTSHARD_STATIC", "-DTSHARD_IMPLEMENTATION="]
SCRIPT_LIMIT = 400  # seconds, for tests/run.sh: every compiler that is installed builds a program
INCLUDE_LIMIT = 0.1  # seconds that the header alone may add to a compilation
# CPU seconds of the implementation at -O3. gcc 12 takes 12 on an idle core of a Zen 5; older and
# busy machines take several times as long, so this finds only what makes the time explode. The
# test prints the figure.
IMPLEMENTATION_LIMIT = 60


def call(command):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          universal_newlines=True, timeout=100)
    return done.returncode, done.stdout


def must(command):
    code, text = call(command)
    if code:
        raise Failed("%s\n%s" % (" ".join(command), text))
    return text


def objects(folder, parts):
    """Compiles (compiler, file, flags) each into an object; returns their paths."""
    paths = [os.path.join(folder, "%d.o" % number) for number in range(len(parts))]
    commands = [compiler + PLAIN + flags + ['-DHEADER="../../tshard.h"', "-c", "-o", path,
                                            os.path.join(HERE, name)]
                for path, (compiler, name, flags) in zip(paths, parts)]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(must, commands))
    return paths


def runs(folder, linker, parts):
    program = os.path.join(folder, "program")
    must([linker[0], "-o", program] + objects(folder, parts) + ["-lm"])
    text = must([program])
    if text.strip() != "10":
        raise Failed("printed %r instead of 10" % text)


def two_files_in_c(folder):
    runs(folder, C, [(C, "use.c", []), (C, "implementation.c", [])])


def two_files_in_cxx(folder):
    runs(folder, CXX, [(CXX, "use.c", []), (CXX, "implementation.c", [])])


def cxx_program_on_c_library(folder):
    runs(folder, CXX, [(CXX, "use.c", []), (C, "implementation.c", [])])


def two_static_copies(folder):
    runs(folder, C, [(C, "use.c", STATIC), (C, "implementation.c", STATIC)])


def implementation_is_compiled_once(folder):
    """Two implementations collide, none is missed: so the switch does what it says."""
    for parts, sentence in (([(C, "use.c", [])], "undefined reference"),
                            ([(C, "use.c", []), (C, "implementation.c", []),
                              (C, "implementation.c", [])], "multiple definition")):
        code, text = call([C[0], "-o", os.path.join(folder, "program")]
                          + objects(folder, parts) + ["-lm"])
        if code == 0 or sentence not in text or "tsh_run" not in text:
            raise Failed("%d implementations linked: %s" % (len(parts) - 1, text))


def after_assert_and_twice(folder):
    objects(folder, [(C, "declarations.c", []), (CXX, "declarations.c", [])])


def seconds(source):
    begin = time.monotonic()
    must(C + ["-fsyntax-only", source])
    return time.monotonic() - begin


def including_costs_little(folder):
    sources = []
    for name, text in (("empty.c", "int x;\n"), ("with.c", '#include "%s"\nint x;\n' % HEADER)):
        sources.append(os.path.join(folder, name))
        with open(sources[-1], "w") as out:
            out.write(text)
    # The least of several runs: what the machine does beside only adds.
    empty, with_header = (min(seconds(source) for _ in range(7)) for source in sources)
    print("the header alone costs %.3f s" % (with_header - empty))
    if with_header - empty > INCLUDE_LIMIT:
        raise Failed("including tshard.h costs %.3f s" % (with_header - empty))


def implementation_compiles_in_time(folder):
    source = os.path.join(folder, "implementation.c")
    with open(source, "w") as out:
        out.write('#define TSHARD_IMPLEMENTATION\n#include "%s"\n' % HEADER)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    must(C + ["-O3", "-fno-math-errno", "-c", "-o", os.path.join(folder, "implementation.o"),
              source])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print("the implementation takes %.1f s at -O3" % spent)
    if spent > IMPLEMENTATION_LIMIT:
        raise Failed("compiling the implementation takes %.1f s at -O3" % spent)


def compilers():
    """The installed C compilers, each once: gcc, gcc-12, clang, clang-14, musl-gcc, ..."""
    found = {}
    for folder in os.environ["PATH"].split(os.pathsep):
        for path in sorted(glob.glob(os.path.join(folder, "*"))):
            name = os.path.basename(path)
            if re.fullmatch(r"(musl-)?(gcc|clang)(-\d+)?", name):
                # musl-gcc is a script, whose links lead to another name
                found.setdefault(name if "musl" in name else os.path.realpath(path), path)
    return sorted(found.values())


def two_rank_program():
    """README's first program after the diff that makes it one of two ranks."""
    pieces = list(blocks("README.md"))
    program = [piece.text for piece in pieces if piece.kind == "c"][0]
    changes = [piece.text for piece in pieces if piece.kind == "diff"][0]
    return by_diff(program, changes).replace('"tshard.h"', '"%s"' % HEADER).replace(
        '"backends/', '"%s/' % os.path.join(TOP, "backends"))


def two_ranks_need_no_flag(folder):
    """The two-rank program compiles without a warning with the flags that README gives, and in
    other standards, also where a header that hides POSIX was included before; and it trains."""
    program = two_rank_program()
    warn = ["-pedantic", "-Wall", "-Wextra", "-Werror"]
    first, after = (os.path.join(folder, name) for name in ("first.c", "after.c"))
    with open(first, "w") as out:
        out.write(program)
    with open(after, "w") as out:
        out.write("#include <stdio.h>\n#include <time.h>\n" + program)

    def works(compiler):
        built = os.path.join(folder, os.path.basename(compiler))
        for flags in (["-std=c99"], ["-std=c99", "-pthread", "-DTSHARD_NO_SIMD"], ["-std=gnu99"],
                      ["-std=c17"], ["-std=c99", "-D_POSIX_C_SOURCE=200809L"]):
            must([compiler] + warn + flags + ["-fsyntax-only", after])
        must([compiler] + warn + ["-std=c99", first, "-o", built, "-lm", "-pthread"])
        text = must([built])
        losses = [float(loss) for loss in re.findall(r"loss (\S+)", text)]
        if len(losses) != 6 or not losses[-1] < 0.1 * losses[0]:
            raise Failed("%s: two ranks printed %r" % (compiler, text))

    found = compilers()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(works, found))
    print("two ranks compiled and run by %s" % ", ".join(os.path.basename(c) for c in found))


def two_ranks_in_cxx(folder):
    """The threads backend as C++11, after headers that a program may include before."""
    path = os.path.join(folder, "program.cc")
    with open(path, "w") as out:
        out.write("#include <cstdio>\n#include <ctime>\n#define TSHARD_IMPLEMENTATION\n"
                  '#include "%s"\nint main() { return 0; }\n'
                  % os.path.join(TOP, "backends", "tshard_threads.h"))
    must([CXX[0], "-std=c++11", "-pedantic", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", path])


def sanitizers_are_linked_where_they_are_compiled(_):
    """Of all that make builds: what compiles with a sanitizer's flag is linked with it, too."""
    environment = {name: value for name, value in os.environ.items()
                   if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "config", "only")}
    for san, flag in (("asan", "-fsanitize=address"), ("tsan", "-fsanitize=thread")):
        text = subprocess.run(
            ["make", "-n", "-B", "-C", TOP, "--no-print-directory", "san=" + san, "build-tests",
             "build/%s/gpt" % san, "build/%s/llm" % san], stdout=subprocess.PIPE,
            universal_newlines=True, timeout=100, env=environment).stdout
        links = [line for line in text.replace("\\\n", " ").splitlines()
                 if re.search(r"(^|; )\s*(\S*cc|\S*gcc|\S*clang|\S*\+\+) ", line)
                 and " -o " in line and " -c " not in line]
        check(len(links) > 50, "only", len(links), "programs are linked:", text[-2000:])
        for line in links:
            check(flag in line, "is linked without", flag + ":", line)


TESTS = [two_files_in_c, two_files_in_cxx, cxx_program_on_c_library, two_static_copies,
         implementation_is_compiled_once, after_assert_and_twice, including_costs_little,
         implementation_compiles_in_time, two_ranks_need_no_flag, two_ranks_in_cxx,
         sanitizers_are_linked_where_they_are_compiled]

if __name__ == "__main__":
    sys.exit(run_tests("compile", TESTS))
