#!/usr/bin/env python3
"""Kills build/llm --finetune by SIGKILL at random times, and goes on with --resume each time: what
it writes has the bits of a run that nobody has disturbed, and the result is whole or not there.

    killed_runs.py [100]      so many kills; TSHARD_SEED chooses other times
"""

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "support"))
import test_llm
from scripts import check

STEPS, EACH = 20, 120  # of a run: steps; most seconds
# Data, and flags: on ranks, by preferences, on replicas and stages with adapters and dropout, with
# bf16 weights whose other 16 bits the optimiser keeps.
RUNS = (("text", ("--tp", "2")), ("pairs", ("--tp", "1")),
        ("text", ("--tp", "1", "--dp", "2", "--zero", "--lora", "4", "--lora-dropout", "0.1")),
        ("text", ("--tp", "1", "--pp", "2", "--lora", "4", "--lora-dropout", "0.1")),
        ("text", ("--tp", "2", "--dtype", "bf16", "--recompute")))


def started_again(learner, command, draw, most, kills):
    """Runs the command until it ends by itself, but kills it at most `kills` times, each at a
    random time below `most` seconds. Returns the number of kills."""
    killed = 0
    while True:
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                              encoding="utf-8") as run:
            try:
                _, why = run.communicate(timeout=draw.uniform(0, most) if killed < kills else EACH)
            except subprocess.TimeoutExpired:
                run.kill()
                run.wait()
                check(killed < kills, "a run does not end")
                killed += 1
                whole = sorted(os.listdir(learner.path("killed"))) \
                    if os.path.exists(learner.path("killed")) else []
                check(not whole or any(name.endswith(".safetensors") for name in whole) and
                      any(name.endswith("config.json") for name in whole), "half a result", whole)
                if whole:
                    return killed
                continue
        check(run.returncode == 0, command, why)
        return killed


def killed_runs(learner, kills, data, flags, draw):
    """Kills runs of these flags until there were so many kills, and compares each with an
    undisturbed one. Returns the number of runs."""
    flags = (*flags, "--save-every", "3")
    start, runs, killed = time.time(), 0, 0
    learner.train(data, "whole", *flags, steps=STEPS)
    most = 1.1 * (time.time() - start)
    command = [test_llm.LLM, "--model", learner.model,
               *learner.flags(data, "killed", *flags, "--resume", steps=STEPS)]
    while killed < kills or runs == 0:
        for name in ("killed", "killed.run"):
            shutil.rmtree(learner.path(name), ignore_errors=True)
        start, before = time.time(), killed
        killed += started_again(learner, command, draw, most, kills - killed)
        if killed == before:  # it was slower when `most` was measured
            most = min(most, 1.1 * (time.time() - start))
        check(learner.bits("whole") == learner.bits("killed"), flags, "other bits")
        left = [name for name in os.listdir(learner.folder) if ".tmp-" in name]
        check(len(left) < 2, "temporary folders are left", left)
        runs += 1
    return runs


def main():
    import test_finetune
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    draw = random.Random(os.environ.get("TSHARD_SEED", "killed"))
    for i, (data, flags) in enumerate(RUNS):
        own = kills // len(RUNS) + (i < kills % len(RUNS))
        with tempfile.TemporaryDirectory() as folder:
            learner = test_finetune.Learner(folder)
            runs = killed_runs(learner, own, getattr(learner, data), flags, draw)
        print("%d kills, %d runs with the bits of an undisturbed one: %s, %s" %
              (own, runs, data, " ".join(flags)), flush=True)


if __name__ == "__main__":
    main()
