#!/usr/bin/env python3
"""The headers of examples/llm in a program of one's own: each alone, and all together, compiles
without a warning under the strict set of the Makefile, with gcc and clang. A program may use a few
of their functions, or none."""

import glob
import os
import re
import shutil
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(TOP, "tests", "support"))
from scripts import Skipped, check, run_tests

SCRIPT_LIMIT = 300  # seconds, for tests/run.sh
LIMIT = 250  # seconds of a compilation
COMPILERS = ["gcc", "clang"]
OBJECT = ["-O0", "-c", "-o", os.devnull]  # with -fsyntax-only, gcc tells of no unused function


def flags():
    """The Makefile's warnings, WARN and WARN_C, which are errors here."""
    with open(os.path.join(TOP, "Makefile"), encoding="utf-8") as file:
        text = file.read().replace("\\\n", " ")
    found = [re.search(r"^%s\s*:=(.*)$" % name, text, re.M)[1].split()
             for name in ("WARN", "WARN_C")]
    return found[0] + found[1] + ["-Werror", "-std=c99", "-D_POSIX_C_SOURCE=200809L", "-I", TOP]


def headers():
    return sorted(os.path.basename(path) for path in
                  glob.glob(os.path.join(TOP, "examples", "llm", "*.h")))


def compile_with(compiler, folder, names, more):
    """Compiles a program that includes these headers."""
    path = os.path.join(folder, "program.c")
    with open(path, "w", encoding="ascii") as file:
        file.write('#include "tshard.h"\n')
        file.write("".join('#include "examples/llm/%s"\n' % name for name in names))
        file.write("int main(void) {\n    return 0;\n}\n")
    done = subprocess.run([compiler, *flags(), *more, path], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=LIMIT, encoding="utf-8",
                          errors="replace")
    check(done.returncode == 0, compiler, " ".join(names) + ":\n", "\n".join(
        done.stdout.split("\n")[:30]))


def compilers():
    """The installed ones, if the libraries that the headers need are there."""
    found = [name for name in COMPILERS if shutil.which(name)]
    program = "#define PCRE2_CODE_UNIT_WIDTH 8\n#include <pcre2.h>\n#include <cjson/cJSON.h>\n"
    for name in found:
        done = subprocess.run([name, "-E", "-x", "c", "-"], input=program, encoding="ascii",
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if done.returncode != 0:
            raise Skipped("needs libcjson-dev and libpcre2-dev")
    if not found:
        raise Skipped("needs gcc or clang")
    return found


def each_header_alone(folder):
    for compiler in compilers():
        for name in headers():
            compile_with(compiler, folder, [name], OBJECT)


def all_headers_together(folder):
    for compiler in compilers():
        for names in headers(), headers()[::-1]:
            compile_with(compiler, folder, names, OBJECT)


def texts_are_not_cut(folder):
    """gcc sees what snprintf cuts off only where it optimises, and keeps functions nobody calls."""
    if "gcc" not in compilers():
        raise Skipped("needs gcc")
    more = ["-O2", "-fkeep-static-functions"]
    compile_with("gcc", folder, headers(), OBJECT + more)


if __name__ == "__main__":
    sys.exit(run_tests("headers", [each_header_alone, all_headers_together,
                                   texts_are_not_cut]) > 0)
