#!/usr/bin/env python3
"""examples/RECIPES.md and the table of names in examples/FROM_PYTORCH.md: every recipe is short,
compiles without a warning, and gives on 1 and 2 ranks what PyTorch gives
(tests/golden/recipes.json); the table has each of the most used names (tests/lint/torch_names.txt)
once, and what it names is there. A recipe with a function that the library does not have yet is
left out, and said. Reports in cmocka's words."""

import json
import os
import re
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(TOP, "tests", "support"))
sys.path.insert(0, os.path.join(TOP, "tests", "lint"))
from scripts import check, debug_object, run_tests
import api

LINES, OURS, LIMIT = 10, 110, 100  # of a recipe; rows with a function of ours; seconds of a command
WARN = ["-Wall", "-Wextra", "-pedantic", "-Wconversion", "-Wsign-conversion", "-Wshadow", "-Werror"]
TABLE = re.compile(r"^\| `([\w.]+)` \| ([\d,]+) \| (.*) \|$", re.M)


def text_of(*path):
    with open(os.path.join(TOP, *path), encoding="utf-8") as file:
        return file.read()


def public():
    return {item.name for item in api.read(TOP)[0]}


def functions():
    """(name, code) of each function of RECIPES.md, in order."""
    for block in re.findall(r"^```c\n(.*?)^```$", text_of("examples", "RECIPES.md"), re.M | re.S):
        for code in re.split(r"\n\n(?=static )", block.strip("\n")):
            yield re.match(r"static [\w ]+?\*?(\w+)\(", code)[1], code


def recipes_are_short(_):
    found = list(functions())
    check(len(found) > 12, "only", len(found), "recipes")
    for name, code in found:
        check(code.count("\n") + 1 <= LINES, name, "has", code.count("\n") + 1, "lines, at most",
              LINES)


def numbers_are_those_of_pytorch(folder):
    wanted = json.loads(text_of("tests", "golden", "recipes.json"))
    names = [name for name, _ in functions()]
    check(sorted(names) == sorted(wanted), "recipes", sorted(set(names) ^ set(wanted)))
    with open(os.path.join(folder, "recipes.h"), "w", encoding="utf-8") as file:
        file.write("".join(code + "\n\n" for _, code in functions()))
    program = os.path.join(folder, "recipes")
    command = [os.environ.get("CC", "cc"), "-std=c99", "-D_POSIX_C_SOURCE=200809L", "-O0"]
    done = subprocess.run(command + WARN + ["-I", folder, "-o", program,
                                            os.path.join(HERE, "recipes.c"), debug_object(),
                                            "-lm", "-pthread"],
                          timeout=LIMIT, stderr=subprocess.PIPE, encoding="utf-8")
    check(done.returncode == 0, done.stderr)
    done = subprocess.run([program], timeout=LIMIT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          encoding="utf-8")
    check(done.returncode == 0, done.stderr)
    found = [line.split() for line in done.stdout.splitlines()]
    check(len(found) == 2 * len(wanted), len(found), "lines:", done.stdout)
    for _, name, *numbers in found:
        values = [float(number) for number in numbers]
        check(len(values) == len(wanted[name]), name, values, "not", wanted[name])
        for value, right in zip(values, wanted[name]):  # 1e-6: a few roundings of float
            check(abs(value - right) <= 1e-6 * max(1, abs(right)), name, values, "not",
                  wanted[name])


def the_table_has_the_most_used_names(_):
    wanted = dict(line.split()[::-1] for line in
                  text_of("tests", "lint", "torch_names.txt").splitlines() if line[0] != "#")
    rows = TABLE.findall(text_of("examples", "FROM_PYTORCH.md"))
    names = [name for name, _, _ in rows]
    check(len(wanted) == 150, len(wanted), "names")
    check(sorted(names) == sorted(wanted), "the table and torch_names.txt differ in",
          sorted(set(names) ^ set(wanted)), [n for n in names if names.count(n) > 1])
    for name, count, _ in rows:
        check(int(count.replace(",", "")) == int(wanted[name]), name, count, "not", wanted[name])
    ours = [name for name, _, text in rows if text.startswith("`tsh_")]
    check(len(ours) >= OURS, len(ours), "of the names are ours, not", OURS)
    for name, _, text in rows:
        check(re.match(r"`tsh_|`[.&(]|\[recipe\]\(RECIPES.md#|no: ", text), name, "has", text)


def what_the_table_names_is_there(_):
    named = re.findall(r"\btsh_\w+", " ".join(
        text for _, _, text in TABLE.findall(text_of("examples", "FROM_PYTORCH.md"))))
    missing = set(named) - public()
    check(not missing, "the library lacks", sorted(missing))


if __name__ == "__main__":
    sys.exit(run_tests("recipes", [recipes_are_short, numbers_are_those_of_pytorch,
                                   the_table_has_the_most_used_names,
                                   what_the_table_names_is_there]))
