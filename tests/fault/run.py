#!/usr/bin/env python3
"""Runs the programs of `make faults` and collects their rows.

    run.py [--limit SECONDS] [--out FILE] PROGRAM...

A program prints rows as tests/support/faults.h tells. They are shown as they come and written to
build/faults.json, one entry per figure; the last line is "N passed, N failed, N skipped" (rows). A
program that is missing, dies, prints no row or does not end in time is a failed row. The exit code
is 1 if any row failed.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading

FIGURE = re.compile(r"(?P<name>.*?) (?P<value>-?[\d.]+(?:e[-+]?\d+)?|-?nan|-?inf)"
                    r"(?: (?P<unit>[^<>\d]\S*))?(?: (?P<how><=|>=) (?P<limit>[-\d.e+]+))?$")


def entries(cells):
    """The figures of a row, without its status."""
    found = []
    for cell in cells[2:]:
        match = FIGURE.match(cell)
        if not match:
            raise ValueError("not a figure: %r" % cell)
        value = float(match["value"])
        limit = float(match["limit"]) if match["limit"] else None
        ok = {None: True, "<=": limit is None or value <= limit,
              ">=": limit is None or value >= limit}[match["how"]]
        found.append({"test": cells[0], "case": cells[1], "figure": match["name"],
                      "value": value if value == value else None, "limit": limit,
                      "unit": match["unit"] or "", "ok": ok})
    return found


def read_row(line):
    """(passed, failed or skipped; entries)."""
    cells = re.split(r" {2,}", line.rstrip("\n"))
    status = cells.pop()
    if status.startswith("skipped:"):
        return "skipped", []
    figures = entries(cells)
    if status == "ok" and all(figure["ok"] for figure in figures):
        return "passed", figures
    figures.append({"test": cells[0], "case": cells[1], "figure": "row", "value": 0, "limit": 1,
                    "unit": "", "ok": False})
    return "failed", figures


def end_group(process):
    """Whatever the program left running goes with it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def run(program, limit, count, found):
    """Why the program itself failed, or None."""
    if not os.path.exists(program):
        return "was not built"
    rows, failed = 0, count["failed"]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        # The thread sanitizer does not start where the kernel places memory too randomly.
        prefix = ["setarch", "-R"] if "/tsan/" in program and shutil.which("setarch") else []
        process = subprocess.Popen(prefix + [os.path.abspath(program)], stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
                                   encoding="utf-8", errors="replace")
        late = []
        timer = threading.Timer(limit, lambda: (late.append(1), end_group(process)))
        timer.start()
        for line in process.stdout:
            print(line, end="", flush=True)
            if not re.match(r"F\d+ ", line):
                continue
            rows += 1
            kind, figures = read_row(line)
            count[kind] += 1
            found.extend(figures)
        code = process.wait()
        timer.cancel()
        end_group(process)
        errors.seek(0)
        for line in errors.readlines()[-40:]:
            print("      | " + line.rstrip())
    if late:
        return "no end within %d s" % limit
    if code < 0:
        return "died of signal %d" % -code
    if code and count["failed"] == failed:
        return "exit code %d" % code  # a sanitizer's, or the program's own opinion
    if not rows:
        return "printed no row"
    return None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--limit", type=float, help="seconds of one program",
                        default=3600 if os.environ.get("FULL") == "1" else 300)
    parser.add_argument("--out", default="build/faults.json")
    parser.add_argument("programs", nargs="*")
    args = parser.parse_args()
    count, found = {"passed": 0, "failed": 0, "skipped": 0}, []
    for program in args.programs:
        why = run(program, args.limit, count, found)
        if why:
            count["failed"] += 1
            print("FAIL  %s: %s" % (program, why), flush=True)
            found.append({"test": os.path.basename(program), "case": why, "figure": "program",
                          "value": 0, "limit": 1, "unit": "", "ok": False})
    folder = os.path.dirname(args.out)
    if folder:
        os.makedirs(folder, exist_ok=True)
    with open(args.out, "w", encoding="utf-8") as file:
        json.dump(found, file, indent=1)
        file.write("\n")
    print("%(passed)d passed, %(failed)d failed, %(skipped)d skipped" % count)
    return 1 if count["failed"] or not count["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
