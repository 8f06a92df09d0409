#!/usr/bin/env python3
"""examples/gpt.c on threads: however tensor, pipeline and data parallelism share a model and its
batch, evenly or not, every one of 200 losses is that of one rank. build/gpt is made where it is
missing."""

import os
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(TOP, "tests", "support"))
from scripts import check, run_tests

SCRIPT_LIMIT = 400  # seconds, for tests/run.sh
EACH = 100          # of one run
STEPS = 200
# Sums in another order move a loss by 1e-6 in a step; training may let that grow.
TOLERANCE = 1e-3
GPT = ["--layers", "4", "--heads", "4", "--width", "32", "--context", "16", "--batch", "8",
       "--steps", str(STEPS), "--eval-every", "50", "--sample", "0"]
GRIDS = [(2, "--tp 2"), (2, "--tp 2 --sequence-parallel"), (2, "--tp 2 --policy gpt2"),
         (3, "--tp 3"), (2, "--dp 2"), (3, "--dp 3 --zero"), (4, "--dp 4 --micro-batches 2"),
         (2, "--pp 2 --micro-batches 4"), (3, "--pp 3 --stages 1,1,2 --micro-batches 3"),
         (4, "--tp 2 --pp 2 --micro-batches 2 --checkpoint"), (4, "--tp 2 --dp 2 --zero"),
         (4, "--pp 2 --dp 2 --micro-batches 3"),
         (8, "--tp 2 --pp 2 --dp 2 --micro-batches 2 --zero"),
         (6, "--pp 2 --dp 3 --micro-batches 2 --zero")]


def gpt(ranks, flags, folder):
    """(training loss, validation loss or nothing) of every step."""
    program = os.path.join(TOP, "build", "gpt")
    if not os.path.exists(program):
        subprocess.check_call(["make", "--no-print-directory", "build/gpt"], cwd=TOP, timeout=EACH)
    run = subprocess.run([program, "--ranks", str(ranks), "--out", folder] + GPT + flags.split(),
                         stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, cwd=TOP, timeout=EACH,
                         stderr=subprocess.STDOUT, encoding="utf-8", errors="replace")
    check(run.returncode == 0, flags, run.stdout[-600:])
    with open(os.path.join(folder, "metrics.csv"), encoding="utf-8") as file:
        rows = [line.split(",") for line in file][1:]
    check(len(rows) == STEPS, flags, len(rows), "steps")
    return [(row[1], row[2]) for row in rows]


def near(a, b):
    return a == b or (a and b and abs(float(a) - float(b)) <= TOLERANCE)


def grids_give_the_losses_of_one_rank(folder):
    want = gpt(1, "", os.path.join(folder, "one"))
    check(float(want[-1][0]) < float(want[0][0]) - 0.5, "it learns", want[0], want[-1])
    for number, (ranks, flags) in enumerate(GRIDS):
        got = gpt(ranks, flags, os.path.join(folder, str(number)))
        for step, (ours, theirs) in enumerate(zip(got, want)):
            check(all(map(near, ours, theirs)), flags, "step", step + 1, ours, "not", theirs)


def a_batch_too_small_to_share_is_refused(_):
    run = subprocess.run([os.path.join(TOP, "build", "gpt"), "--ranks", "3", "--dp", "3", "--batch",
                          "5", "--micro-batches", "2"], stderr=subprocess.PIPE, encoding="utf-8",
                         timeout=EACH)
    check(run.returncode == 2 and "is less than --dp 3 times --micro-batches 2" in run.stderr,
          run.stderr)


if __name__ == "__main__":
    sys.exit(run_tests("gpt", [grids_give_the_losses_of_one_rank,
                               a_batch_too_small_to_share_is_refused]) > 0)
