#!/usr/bin/env python3
"""gpt --balance auto where rank 1 of 2 has half a core: tokens/s beside equal shares and beside no
throttle, by turns, and the losses of both. The throttle is a thread of real-time priority on the
rank's core, which spins (Linux, root, two cores) for a half of every millisecond, whether the rank
computes or waits. usage: balance.py [ROUNDS]. Exit code 1: a goal is missed."""

import csv
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
GPT, LAUNCHER = (os.path.join(TOP, "build", name) for name in ("gpt", "tshard-run"))
FORM = ("--tp 2 --layers 4 --heads 12 --width 768 --context 128 --batch 8 --steps 10 "
        "--eval-every 100 --sample 0 --threads 1 --backend tcp").split()
PERIOD = 1e-3  # seconds
GOAL = 0.93 * 1.5


def spin(core):
    """Takes a half of the core's time, until it is ended."""
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    begin = time.perf_counter()
    while True:
        while time.perf_counter() < begin + PERIOD / 2:
            pass
        begin += PERIOD
        time.sleep(max(0, begin - time.perf_counter()))


def train(folder, flags):
    """(tokens/s, the losses of all steps, the shares). Each rank has a core of its own."""
    pinned = 'exec taskset -c "$TSHARD_RANK" "$@"'
    text = subprocess.run([LAUNCHER, "-n", "2", "sh", "-c", pinned, "sh", GPT, "--out", folder,
                           *FORM, *flags], check=True, text=True, stdout=subprocess.PIPE, cwd=TOP,
                          timeout=600).stdout
    with open(os.path.join(folder, "metrics.csv"), encoding="ascii") as file:
        rows = list(csv.reader(file))[1:]
    shares = re.search(r"shares +(.*)", text)
    return (statistics.median(float(row[5]) for row in rows[2:]), [float(row[1]) for row in rows],
            shares[1] if shares else "equal")


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    ways = {"equal": [], "auto": ["--balance", "auto"], "no throttle": []}
    found = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for way, flags in ways.items():
                throttle = multiprocessing.Process(target=spin, args=(1,), daemon=True)
                if way != "no throttle":
                    throttle.start()
                found[way].append(train(folder, flags))
                if way != "no throttle":
                    throttle.terminate()
                    throttle.join()
    for way, runs in found.items():
        print("%-12s %6.0f tokens/s, shares %s" % (
            way, statistics.median(run[0] for run in runs), ", ".join({run[2] for run in runs})))
    ratios = [auto[0] / equal[0] for auto, equal in zip(found["auto"], found["equal"])]
    off = max(abs(a - b) for auto, equal in zip(found["auto"], found["equal"])
              for a, b in zip(auto[1], equal[1]))
    print("auto beside equal: %.2f (%s), goal %.3f; losses differ by %.1e, goal 1e-5" % (
        statistics.median(ratios), " ".join("%.2f" % ratio for ratio in ratios), GOAL, off))
    return statistics.median(ratios) < GOAL or off > 1e-5


if __name__ == "__main__":
    sys.exit(main())
