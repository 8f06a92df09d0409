#!/usr/bin/env python3
"""What it costs to check layouts and to record the tape, as a share of a training step.

    overhead.py [--limit PERCENT]

Counts instructions with valgrind's callgrind, which a noisy machine cannot disturb: the steps of
examples/gpt.c at width 128 on one rank, one text of 64 tokens at a time (of a larger batch the
share is smaller). Compiled without inlining, every function keeps its own count. A function
computes if it is a kernel, of a room of kernels, or a loop over values; all others of the library
check, derive layouts, take and give memory, record and walk the tape. Exits with 1 above the
limit.
"""

import argparse
import collections
import os
import re
import shutil
import subprocess
import sys
import tempfile

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
STEPS = 2
GPT = ["--ranks", "1", "--layers", "4", "--heads", "4", "--width", "128", "--context", "64",
       "--batch", "1", "--dropout", "0", "--eval-every", "1000000", "--sample", "0"]
# Loops over values that are no kernels.
COMPUTES = re.compile("|".join((
    r"_(avx2|avx512|portable|c|v128)$",
    r"^tshi_(gemm|rng)_",
    r"^tshi_kernel_(run|join|dense|packed)",
    r"^tshi_tensor_(fill|runs)",
    r"^tshi_map_(mask_run|walk)",
    r"^tshi_attention_(scores|masked|drop|rows|round|pack|by_|few|forward_tile|backward_|add_rows)",
    r"^tshi_loss_(rows|targets|backward|reduce)",
    r"^tshi_embedding_(rows?|forward|backward)",
    r"^tshi_reduce_(sums|place)",
    r"^tshi_matmul_gemm",
    r"^tshi_tape_(accumulate|add_all)")))


def counts(program, folder):
    """Instructions of one step by function."""
    out = os.path.join(folder, "callgrind.out")
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=" + out,
               "--toggle-collect=train_step", program, "--out", folder, "--steps", str(STEPS)] + GPT
    subprocess.run(command, check=True, cwd=TOP, stdout=subprocess.DEVNULL,
                   stderr=subprocess.DEVNULL, timeout=900)
    table = subprocess.run(["callgrind_annotate", "--threshold=100", out], check=True,
                           stdout=subprocess.PIPE, universal_newlines=True).stdout
    found = collections.Counter()
    for line in table.splitlines():
        row = re.match(r"\s*([\d,]+) \([^)]*\)\s+\S*?:([\w@.]+)", line)
        if row:
            found[row.group(2).split(".")[0]] += int(row.group(1).replace(",", "")) / STEPS
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--limit", type=float, default=3.0)
    limit = parser.parse_args().limit
    if not shutil.which("valgrind"):
        sys.exit("overhead: valgrind is not installed")
    with tempfile.TemporaryDirectory() as folder:
        program = os.path.join(folder, "gpt")
        subprocess.run([os.environ.get("CC", "cc"), "-std=c99", "-D_POSIX_C_SOURCE=200809L", "-O3",
                        "-g", "-fno-math-errno", "-fno-inline", "-o", program, "examples/gpt.c",
                        "-lm", "-pthread"], check=True, cwd=TOP)
        step = counts(program, folder)
    whole = sum(step.values())
    books = {name: n for name, n in step.items()
             if name.startswith(("tsh_", "tshi_")) and not COMPUTES.search(name)}
    for name, n in sorted(books.items(), key=lambda item: -item[1])[:15]:
        print("%-40s %12d  %5.2f %%" % (name, n, 100 * n / whole))
    share = 100 * sum(books.values()) / whole
    print("%.0f instructions in a step; checking layouts, taking memory, recording and walking the "
          "tape: %.2f %% (limit %g %%)" % (whole, share, limit))
    return share > limit


if __name__ == "__main__":
    sys.exit(main())
