#!/usr/bin/env python3
"""An op with two inputs is one row of a table and a declaration: the patch of src/ in
examples/README.md is applied to a copy, of which tshard.h is made, and swiglu.c is compiled with it
and run. Reports in cmocka's words."""

import os
import re
import shutil
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(TOP, "tests", "support"))
from scripts import Failed, Skipped, check, run_tests

SCRIPT_LIMIT = 300  # seconds, for tests/run.sh
LINES = 25          # of the patch
FILES = 2           # that it touches, as src/README.md says
FLAGS = ["-std=c99", "-D_POSIX_C_SOURCE=200809L", "-DTSHARD_REAL=double", "-O0", "-Wall", "-Wextra",
         "-pedantic", "-Wconversion", "-Wshadow", "-Werror"]


def call(command, folder, **more):
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          universal_newlines=True, timeout=200, **more)
    if done.returncode:
        raise Failed("%s\n%s" % (" ".join(command), done.stdout[:3000]))


def the_patch():
    with open(os.path.join(TOP, "examples", "README.md"), encoding="utf-8") as file:
        found = re.findall(r"^```diff\n(--- a/src/.*?)^```$", file.read(), re.M | re.S)
    check(len(found) == 1, "examples/README.md has %d patches of src/" % len(found))
    return found[0]


def the_patch_is_small(_):
    lines = the_patch().count("\n")
    check(lines <= LINES, "%d lines; at most %d" % (lines, LINES))
    check(the_patch().count("\n+++ ") == FILES, "it touches other than", FILES, "files")
    with open(os.path.join(TOP, "tshard.h"), encoding="utf-8") as file:
        check("swiglu" not in file.read(), "tshard.h has swiglu itself")


def swiglu_works(folder):
    if not shutil.which("patch"):
        raise Skipped("needs patch")
    os.mkdir(os.path.join(folder, "backends"))
    for name in "tshard_backend.h", "tshard_threads.h":
        shutil.copy(os.path.join(TOP, "backends", name), os.path.join(folder, "backends"))
    shutil.copytree(os.path.join(TOP, "src"), os.path.join(folder, "src"))
    call(["patch", "-p1", "--no-backup-if-mismatch"], folder, input=the_patch())
    call([sys.executable, "src/join.py", "src/rooms", "tshard.h"], folder)
    call([os.environ.get("CC", "cc")] + FLAGS +
         ["-I.", os.path.join(HERE, "patched", "swiglu.c"), "-o", "swiglu", "-lm", "-pthread"],
         folder)
    call(["./swiglu"], folder)


if __name__ == "__main__":
    sys.exit(run_tests("swiglu", [the_patch_is_small, swiglu_works]))
