#!/usr/bin/env python3
"""Programs of this project whose ranks are processes of one host, beside the same with threads, by
turns: tokens/s of gpt (width 768, 4 layers), whose losses must be equal to the bit, on 2 and 4
ranks; and of build/llm on 2, decoding. usage: same_host.py [MODEL of build/llm [ROUNDS]]"""

import os
import re
import statistics
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
GPT, LLM, LAUNCHER = (os.path.join(TOP, "build", name) for name in ("gpt", "llm", "tshard-run"))
FORM = ("--layers 4 --heads 12 --width 768 --context 128 --batch 4 --steps 12 --eval-every 100 "
        "--sample 0").split()


def run(words):
    return subprocess.run(words, check=True, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, cwd=TOP, timeout=600)


def train(folder, ranks, tcp):
    """(tokens/s, the losses of all steps)."""
    launch = [LAUNCHER, "-n", str(ranks)] if tcp else []
    how = ["--backend", "tcp"] if tcp else ["--ranks", str(ranks)]
    text = run(launch + [GPT, *how, "--threads", "1", "--out", folder, *FORM]).stdout
    with open(os.path.join(folder, "metrics.csv"), encoding="ascii") as file:
        rows = [line.split(",") for line in file][1:]
    speed = statistics.median(float(row[5]) for row in rows[2:])
    return speed, [row[1] for row in rows], text


def speak(model, tcp):
    """Tokens per second."""
    launch = [LAUNCHER, "-n", "2"] if tcp else []
    how = ["--backend", "tcp"] if tcp else ["--tp", "2"]
    text = run(launch + [LLM, *how, "--threads", "1", "--model", model, "--prompt",
                         "The capital of France is", "--max-new", "120", "--ignore-eos"]).stderr
    return float(re.search(r"then (\S+) tokens/s", text)[1])


def main():
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 7
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (2, 4):
            turns = [[train(folder, ranks, tcp) for tcp in (0, 1)] for _ in range(rounds)]
            threads, tcp = (statistics.median(one[0] for one in column) for column in zip(*turns))
            ratio = statistics.median(b[0] / a[0] for a, b in turns)
            print("gpt, %d ranks: threads %.0f, processes %.0f tokens/s: %.3f; losses %s" % (
                ranks, threads, tcp, ratio,
                "equal" if all(a[1] == b[1] for a, b in turns) else "DIFFER"), flush=True)
    if len(sys.argv) > 1:
        turns = [[speak(sys.argv[1], tcp) for tcp in (0, 1)] for _ in range(rounds)]
        threads, tcp = (statistics.median(column) for column in zip(*turns))
        print("llm, 2 ranks: threads %.1f, processes %.1f tokens/s: %.3f" % (
            threads, tcp, statistics.median(b / a for a, b in turns)))


if __name__ == "__main__":
    main()
