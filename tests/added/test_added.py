#!/usr/bin/env python3
"""What src/README.md says is little work is done here: a patch of src/ is applied to a copy, of
which tshard.h is made, and a program that uses what it adds is compiled and run. Each patch touches
as many files as that page says. The patch of an op is the one of examples/README.md. Reports in
cmocka's words."""

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
# what is added: program, most lines of the patch, the files it touches, flags
ADDED = {"swiglu": ("swiglu.c", 25, ["7-ops/op-map.h", "1-api/op-api.h"], []),
         "float8": ("float8.c", 50, ["2-base/dtype.h", "1-api/types.h"], []),
         "signum": ("optimiser.c", 50, ["9-training/optim-table.h", "1-api/training-api.h"],
                    ["-DADDED=TSH_SIGNUM"]),
         "lars": ("optimiser.c", 50, ["9-training/optim-table.h", "1-api/training-api.h"],
                  ["-DADDED=TSH_LARS"])}
FLAGS = ["-std=c99", "-D_POSIX_C_SOURCE=200809L", "-DTSHARD_REAL=double", "-O0", "-Wall", "-Wextra",
         "-pedantic", "-Wconversion", "-Wshadow", "-Werror"]


def call(command, folder, **more):
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          universal_newlines=True, timeout=200, **more)
    if done.returncode:
        raise Failed("%s\n%s" % (" ".join(command), done.stdout[:3000]))


def read(*path):
    with open(os.path.join(TOP, *path), encoding="utf-8") as file:
        return file.read()


def patch_of(name):
    if name != "swiglu":
        return read("tests", "added", "programs", name + ".diff")
    found = re.findall(r"^```diff\n(--- a/src/.*?)^```$", read("examples", "README.md"),
                       re.M | re.S)
    check(len(found) == 1, "examples/README.md has %d patches of src/" % len(found))
    return found[0]


def patches_are_small(_):
    rows = re.findall(r"^\| .*", read("src", "README.md"), re.M)
    for name, (_, most, files, _) in ADDED.items():
        lines = patch_of(name).splitlines()
        check(len(lines) <= most, name, "has", len(lines), "lines; at most", most)
        touched = sorted(re.sub("^.*? b/src/", "", line) for line in lines if line[:4] == "+++ ")
        check(touched == sorted(files), name, "touches", touched)
        check(any(name in row and "(%d files)" % len(files) in row
                  and all("`%s`" % file in row for file in files) for row in rows),
              "src/README.md has no row for", name)
        check(not re.search(r"\btsh_%s\b" % name, read("tshard.h"), re.I), "tshard.h has", name,
              "itself")


def works(name):
    def test(folder):
        if not shutil.which("patch"):
            raise Skipped("needs patch")
        os.mkdir(os.path.join(folder, "backends"))
        for header in "tshard_backend.h", "tshard_threads.h":
            shutil.copy(os.path.join(TOP, "backends", header), os.path.join(folder, "backends"))
        shutil.copytree(os.path.join(TOP, "src"), os.path.join(folder, "src"))
        call(["patch", "-p1", "--no-backup-if-mismatch"], folder, input=patch_of(name))
        call([sys.executable, "src/join.py", "src/rooms", "tshard.h"], folder)
        program, _, _, flags = ADDED[name]
        source = os.path.join(HERE, "programs", program)
        call([os.environ.get("CC", "cc")] + FLAGS + flags +
             ["-I.", source, "-o", name, "-lm", "-pthread"], folder)
        call(["./" + name], folder)
    test.__name__ = name + "_works"
    return test


if __name__ == "__main__":
    sys.exit(run_tests("added", [patches_are_small] + [works(name) for name in ADDED]))
