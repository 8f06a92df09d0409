#!/usr/bin/env python3
"""Writes tshard_cdef.h: what tshard.h and tshard_threads.h declare, in the form that cffi reads.

    make_cdef.py            writes the file
    make_cdef.py --check    says whether it is what the headers give; the exit code is 1 if not

The C compiler (CC, or cc) preprocesses the headers. Kept are their declarations, and macros that
are numbers; left out are functions that take a va_list."""

import os
import re
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
PAGE = os.path.join(HERE, "tshard_cdef.h")
HEAD = """/* Made from tshard.h and backends/tshard_threads.h by examples/python/make_cdef.py;
 * tests/consumer/test_python.py checks that it is up to date. */
"""
NUMBER = re.compile(r"#define (TSH\w+) \(?(-?\d+(?:\.\d+)?(?:e-?\d+)?)\)?$")


def declarations():
    source = '#include "tshard.h"\n#include "backends/tshard_threads.h"\n'
    command = os.environ.get("CC", "cc").split() + [
        "-std=c99", "-D_POSIX_C_SOURCE=200809L", "-E", "-dD", "-D__attribute__(x)=", "-I", TOP, "-"]
    done = subprocess.run(command, input=source, stdout=subprocess.PIPE, check=True,
                          universal_newlines=True)
    ours, lines = False, []
    for line in done.stdout.split("\n"):
        marker = re.match(r'# \d+ "(.*?)"', line)
        if marker:  # what follows comes from this file
            ours = os.path.basename(marker[1]) in ("tshard.h", "tshard_threads.h")
        elif ours and line.startswith("#"):
            number = NUMBER.match(line)
            if number:
                lines.append("#define %s %s" % number.groups())
        elif ours and line.strip():
            lines.append(line.rstrip())
    text = "\n".join(lines) + "\n"
    return HEAD + re.sub(r"^extern [^;]*\bva_list\b[^;]*;\n", "", text, flags=re.M)


def main():
    text = declarations()
    if "--check" not in sys.argv[1:]:
        with open(PAGE, "w", encoding="utf-8") as out:
            out.write(text)
        return 0
    with open(PAGE, encoding="utf-8") as file:
        current = file.read() == text
    if not current:
        print("examples/python/tshard_cdef.h is out of date: python3 examples/python/make_cdef.py")
    return 0 if current else 1


if __name__ == "__main__":
    sys.exit(main())
