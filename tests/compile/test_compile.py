#!/usr/bin/env python3
"""Builds and links tshard.h in the ways its users do. Reports in cmocka's words."""

import os
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(TOP, "tests", "support"))
from scripts import Failed, run_tests
HEADER = os.path.join(TOP, "tshard.h")
C = [os.environ.get("CC", "cc"), "-std=c99"]
CXX = [os.environ.get("CXX", "c++"), "-std=c++11", "-x", "c++"]
PLAIN = ["-O0", "-pedantic", "-Wall", "-Wextra", "-Werror"]  # no -pthread: the core needs none
STATIC = ["-DTSHARD_STATIC", "-DTSHARD_IMPLEMENTATION="]
INCLUDE_LIMIT = 0.1  # seconds that the header alone may add to a compilation


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
    paths = []
    for number, (compiler, name, flags) in enumerate(parts):
        paths.append(os.path.join(folder, "%d.o" % number))
        must(compiler + PLAIN + flags + ['-DHEADER="../../tshard.h"', "-c", "-o", paths[-1],
                                         os.path.join(HERE, name)])
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


TESTS = [two_files_in_c, two_files_in_cxx, cxx_program_on_c_library, two_static_copies,
         implementation_is_compiled_once, after_assert_and_twice, including_costs_little]

if __name__ == "__main__":
    sys.exit(run_tests("compile", TESTS))
