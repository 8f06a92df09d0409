#!/usr/bin/env python3
"""The feature parity table: what five tensor-parallel libraries have, row by row, with the test
that proves each row and its result.

    test_seeds.py [--table | --programs] [--build FOLDER]

Reads table.md beside it: a heading per system, a row per feature, whose last cell names tests as
`program:test`. Runs every program named there once, under a time limit, and looks each test up in
what it printed. With --table the rows are printed and the last line is "seeds: N rows, N proven";
otherwise each row is a test, reported in cmocka's words. --programs only lists the programs.
"""

# It reads what the other tests printed. run: alone
import argparse
import os
import re
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(TOP, "tests", "support"))
from scripts import tell
LIMIT = 120  # seconds of one program
RESULT = re.compile(r"\[\s+(OK|FAILED|SKIPPED)\s+\] (\w+)$", re.MULTILINE)


def rows():
    """(system, there, here, [(program, test)]) of every row of the table."""
    system = None
    with open(os.path.join(HERE, "table.md"), encoding="utf-8") as table:
        for line in table:
            if line.startswith("## "):
                system = line[3:].strip()
            cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
            if not system or len(cells) != 3 or cells[0] == "there" or set(line) <= set("|- \n"):
                continue
            yield system, cells[0], cells[1], re.findall(r"`([\w/]+):(\w+)`", cells[2])


def run(path):
    """What a program prints; nothing if it cannot run."""
    try:
        return subprocess.run([path], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, timeout=LIMIT, encoding="utf-8",
                              errors="replace", cwd=TOP).stdout
    except (OSError, subprocess.TimeoutExpired) as why:
        print("%s: %s" % (path, why))
        return ""


def results(build, program):
    """{test: OK, FAILED or SKIPPED} of one program, by the log of its last run, if that is newer
    than the program; empty if it cannot run."""
    path = os.path.join(build, "tests", program)
    try:
        if os.path.getmtime(path + ".log") > os.path.getmtime(path):
            with open(path + ".log", encoding="utf-8", errors="replace") as log:
                text = log.read()
        else:
            text = run(path)
    except FileNotFoundError:
        text = run(path)
    found = {}
    for result, test in RESULT.findall(text):
        if found.get(test) != "FAILED":
            found[test] = result
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--programs", action="store_true")
    parser.add_argument("--build", default=os.path.join(TOP, "build"))
    args = parser.parse_args()
    table = list(rows())
    programs = sorted({program for row in table for program, _ in row[3]})
    if args.programs:
        print("\n".join(programs))
        return 0
    told = {program: results(args.build, program) for program in programs}
    ends = []
    for system, there, here, tests in table:
        states = [told[program].get(test, "not found") for program, test in tests]
        proven = bool(tests) and all(state == "OK" for state in states)
        ends.append(("%s: %s" % (system, there.replace("`", "")), "OK" if proven else "FAILED",
                     list(zip(tests, states)) or "no test is named"))
        if args.table:
            proof = ", ".join("%s:%s %s" % (program, test, state)
                              for (program, test), state in zip(tests, states)) or "no test"
            print("%-7s %-26s %-62s %s" % ("proven" if proven else "OPEN", system,
                                           there.replace("`", "")[:62], proof))
    if not args.table:
        return tell("seeds", ends)
    proven = sum(state == "OK" for _, state, _ in ends)
    print("seeds: %d rows, %d proven" % (len(table), proven))
    return proven < len(table) or not table


if __name__ == "__main__":
    sys.exit(main())
