#!/usr/bin/env python3
"""Runs test programs one after the other, each under a time limit, and counts.

    run.py [--limit SECONDS] [--slow FACTOR] PROGRAM...

Programs report in cmocka's words; an example (a program in a folder "examples") passes if it prints
something and exits with 0. A program that is missing, dies, runs out of time or runs no test counts
as one failure. A test that is skipped prints a line "skip: ..." that says why. A script may have a
line "SCRIPT_LIMIT = SECONDS" of its own. The last line is "N passed, N failed, N skipped"; the exit
code is 1 if any failed.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time

EXAMPLE_LIMIT = 60
COUNTS = {
    "passed": re.compile(r"\[  PASSED  \] .*?(\d+) test\(s\)"),
    "failed": re.compile(r"\[  FAILED  \] .*?(\d+) test\(s\), listed"),
    "skipped": re.compile(r"\[  SKIPPED \] .*?(\d+) test\(s\), listed"),
}
NOISE = re.compile(r"\[(=+| RUN      |       OK |  PASSED  )\]")


def run(command, limit):
    """Exit code (None: out of time), standard output, standard error."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, start_new_session=True,
                               encoding="utf-8", errors="replace")
    try:
        out, err = process.communicate(timeout=limit)
        return process.returncode, out, err
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        return None, out, err
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def judge(code, text, example, limit):
    """The counts of one program, and why it failed where its own words do not say so."""
    if example:
        counts = {"passed": 1 if code == 0 and text.strip() else 0, "failed": 0, "skipped": 0}
    else:
        counts = {kind: sum(map(int, form.findall(text))) for kind, form in COUNTS.items()}
    why = ""
    if code is None:
        why = "no end within %d s" % limit
    elif code < 0:
        why = "died of signal %d (%s)" % (-code, signal.strsignal(-code))
    elif code > 0 and not counts["failed"]:
        why = "exit code %d" % code
    elif not sum(counts.values()):
        why = "printed nothing" if example else "ran no test"
    if why:
        counts["failed"] += 1
    return counts, why


def show(name, counts, why, seconds, text):
    words = ", ".join("%d %s" % (n, kind) for kind, n in counts.items() if n)
    if why:
        words += ": " + why
    print("%-6s%-36s %6.1f s  %s" % ("FAIL" if counts["failed"] else "ok", name, seconds, words))
    lines = [line for line in text.splitlines() if line.strip() and not NOISE.match(line)]
    if not counts["failed"]:
        lines = [line for line in lines if counts["skipped"] and re.match("skip", line, re.I)]
    for line in lines[-60:]:
        print("      | " + line)
    sys.stdout.flush()


def limit_of(program, usual):
    """The seconds of a program: an example's, a script's own, or the usual."""
    if "/examples/" in program:
        return EXAMPLE_LIMIT
    own = None
    if program.endswith(".py") and os.path.exists(program):
        with open(program, encoding="utf-8") as file:
            own = re.search(r"^SCRIPT_LIMIT = (\d+)\b", file.read(), re.M)
    return float(own[1]) if own else usual


def fixed_addresses():
    """A prefix: the thread sanitizer does not start where the kernel places memory too randomly."""
    prefix = ["setarch", "-R"]
    try:
        return prefix if subprocess.call(prefix + ["true"], stderr=subprocess.DEVNULL) == 0 else []
    except OSError:
        return []


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--limit", type=float, default=120, help="seconds of one program")
    parser.add_argument("--slow", type=float, default=1, help="multiplies every limit")
    parser.add_argument("programs", nargs="*")
    args = parser.parse_args()
    prefix = fixed_addresses() if args.slow > 1 else []
    total = {"passed": 0, "failed": 0, "skipped": 0}
    for program in args.programs:
        example = "/examples/" in program
        limit = limit_of(program, args.limit) * args.slow
        begin = time.monotonic()
        name = re.sub(r"^.*?(tests|examples)/", lambda m: m[1] + "/" if example else "", program)
        if os.path.exists(program):
            script = [sys.executable, "-B"] if program.endswith(".py") else []
            code, out, err = run(prefix + script + [os.path.abspath(program)], limit)
            text = out + "\n" + err
            counts, why = judge(code, text, example, limit)
        else:
            text, counts, why = "", {"passed": 0, "failed": 1, "skipped": 0}, "was not built"
        show(name, counts, why, time.monotonic() - begin, text)
        for kind in total:
            total[kind] += counts[kind]
    print("%(passed)d passed, %(failed)d failed, %(skipped)d skipped" % total)
    return 1 if total["failed"] or not total["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
