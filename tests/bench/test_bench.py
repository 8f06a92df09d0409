#!/usr/bin/env python3
"""Runs the benchmarks of a model at sizes that take no time: what they print is not judged, but
that it is there. Reports in cmocka's words."""

import os
import re
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(TOP, "tests", "support"))
from scripts import check, run_tests
C = [os.environ.get("CC", "cc"), "-std=c99", "-D_POSIX_C_SOURCE=200809L", "-O1"]
TINY = "--layers 2 --heads 2 --width 16 --context 8 --batch 4 --chars --ranks 2".split()


def printed(folder, name, args, told):
    program = os.path.join(folder, "program")
    subprocess.run(C + ["-o", program, os.path.join(HERE, name), "-lm", "-pthread"], check=True,
                   timeout=100)
    done = subprocess.run([program] + args, input=told, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, universal_newlines=True, timeout=100)
    check(done.returncode == 0, name, "exit code", done.returncode, done.stdout)
    return done.stdout


def steps_are_timed(folder):
    told = ["step", "comm", "held", "held_comm", "memory", "moments"]
    text = printed(folder, "bench_step.c", TINY + ["--text", os.path.join(TOP, "tshard.h")],
                   "".join(name + " 0 2\n" for name in told))
    numbers = [int(line) for line in text.split("\n") if re.fullmatch(r"\d+", line)]
    check(len(numbers) == len(told), "answers:", text)
    check(numbers[0] > 0 and numbers[4] > 0 and numbers[5] > 0, "answers:", text)


def parts_of_a_model_are_timed(folder):
    text = printed(folder, "bench_model.c", ["1", "64"], "")
    rows = dict(re.findall(r"^(\w+) \S+ ours (\S+)$", text, re.M))
    check(set(rows) == {"op_overhead", "attention_T64", "attention_back_T64", "decode_gpt2"}, text)
    check(all(float(value) > 0 for value in rows.values()), text)


if __name__ == "__main__":
    sys.exit(run_tests("bench", [steps_are_timed, parts_of_a_model_are_timed]))
