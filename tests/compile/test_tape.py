#!/usr/bin/env python3
"""The picture of a tape in examples/README.md is that of examples/02_two_ranks.c. Reports in
cmocka's words.

    test_tape.py            compares examples/two_ranks.dot with what the program's first step
                            gives, and two_ranks.svg with that
    test_tape.py --write    writes both; needs Graphviz (apt-get install graphviz)
"""

import html
import os
import re
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(TOP, "tests", "support"))
from scripts import Failed, check, run_tests

SCRIPT_LIMIT = 300  # seconds, for tests/run.sh
EXAMPLES = os.path.join(TOP, "examples")
DOT, SVG = os.path.join(EXAMPLES, "two_ranks.dot"), os.path.join(EXAMPLES, "two_ranks.svg")
BEFORE = "        tsh_backward(ctx, loss);\n"
LINES = """        if (step == 0 && tsh_tp(ctx)->rank == 0) {
            FILE *file = fopen("tape.dot", "w");
            tsh_tape_dot(ctx, file);
            fclose(file);
        }
"""


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def the_graph(folder):
    """What tsh_tape_dot writes in the first step of the program, on rank 0."""
    program = read(os.path.join(EXAMPLES, "02_two_ranks.c"))
    check(program.count(BEFORE) == 1, "02_two_ranks.c has no line", BEFORE)
    with open(os.path.join(folder, "prog.c"), "w", encoding="utf-8") as file:
        file.write(program.replace(BEFORE, LINES + BEFORE))
    for command in ([os.environ.get("CC", "cc"), "-std=c99", "-O0", "-I" + EXAMPLES, "prog.c", "-o",
                     "prog", "-lm", "-pthread"], ["./prog"]):
        done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              universal_newlines=True, timeout=200)
        if done.returncode:
            raise Failed("%s\n%s" % (" ".join(command), done.stdout[:3000]))
    return read(os.path.join(folder, "tape.dot"))


def the_graph_is_the_programs(folder):
    check(read(DOT) == the_graph(folder),
          "two_ranks.dot is old: python3 tests/compile/test_tape.py --write")


def the_picture_is_the_graphs(_):
    """Every line of every label stands in it, as often, and there are as many arrows."""
    dot, svg = read(DOT), read(SVG)
    labels = [line for label in re.findall(r'label="(.*?)"', dot) for line in label.split("\\n")]
    texts = [html.unescape(text) for text in re.findall(r"<text .*?>(.*?)</text>", svg)]
    check(sorted(labels) == sorted(texts), "labels:", sorted(labels), "texts:", sorted(texts))
    check(dot.count(" -> ") == svg.count('class="edge"'), "arrows")


def write():
    with tempfile.TemporaryDirectory() as folder:
        graph = the_graph(folder)
    with open(DOT, "w", encoding="utf-8") as file:
        file.write(graph)
    subprocess.check_call(["dot", "-Tsvg", DOT, "-o", SVG])


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        write()
    else:
        sys.exit(run_tests("tape", [the_graph_is_the_programs, the_picture_is_the_graphs]))
