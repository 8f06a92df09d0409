#!/usr/bin/env python3
"""Draws comments at random, to be graded as by a reader who knows PyTorch, C and the manual alone.

    comments.py [SEED [COUNT]]    60 of them; SEED: the hash of the commit that is graded (default:
                                  that of HEAD)

They are drawn from tshard.h, without its manual, tshard_uv.h, tshard_threads.h and the headers and
program of examples/llm: whole comments, trailing ones with the line that they stand on, others with
the line that follows. Grade each: understood at first reading; only with the code; not at all.
"""

import glob
import os
import random
import re
import subprocess
import sys

TOP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
FILES = ["tshard.h", "backends/tshard_uv.h", "backends/tshard_threads.h", "examples/llm/*.[ch]",
         "examples/llm/models/*.h"]
TOKEN = re.compile(r'/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)


def comments(path):
    """(line number, text with the code beside) of a file's comments, but banners and manuals."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    for match in TOKEN.finditer(text):
        said = match[0]
        if not said.startswith("/*") or "====" in said or ">>" in said or len(said) < 12:
            continue
        if said.count("\n") > 40:  # a manual
            continue
        begin = text.rfind("\n", 0, match.start()) + 1
        end = text.find("\n", match.end())
        if not text[begin:match.start()].strip():  # above what it is about
            end = text.find("\n", end + 1)
        yield text.count("\n", 0, match.start()) + 1, text[begin:end]


def draw(seed, count):
    """[(file, line, text)]."""
    paths = [path for form in FILES for path in sorted(glob.glob(os.path.join(TOP, form)))]
    found = [(os.path.relpath(path, TOP), line, text)
             for path in paths for line, text in comments(path)]
    return random.Random(seed).sample(found, count)


def main():
    seed = sys.argv[1] if len(sys.argv) > 1 else subprocess.check_output(
        ["git", "rev-parse", "HEAD"], cwd=TOP, universal_newlines=True).strip()
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 60
    for number, (path, line, text) in enumerate(draw(seed, count), 1):
        print("%d. %s:%d\n%s\n" % (number, path, line, text))


if __name__ == "__main__":
    main()
