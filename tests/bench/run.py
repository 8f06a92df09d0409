#!/usr/bin/env python3
"""Compares tshard with its peers; prints a table and writes build/bench.json.

    run.py [--text FILE] [--only NAME] [--rounds N]

A comparison is a list of programs, each a function that gives (name, unit, who, value) of what it
measured, where who is "ours" or a peer. A round runs them one after the other; a ratio is taken
within a round, where both sides saw the machine in the same mood, and the median of the rounds'
ratios counts. What needs a package that is not installed is left out.

A row of the file is {"name", "unit", "ours", "peers": {"name": value}, "ratio"}; the ratio says how
many times better than its best peer ours is, for times and rates alike.
"""

import argparse
import functools
import glob
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
BUILD = os.path.join(TOP, "build", "bench")
LIBRARIES = "/usr/lib/" + os.uname().machine + "-linux-gnu"
TORCH_PYTHON = "/usr/bin/python3"  # the one that Debian's python3-torch belongs to
TIMES = ("s", "ms", "us", "ns")  # units where less is better; of the others more is
LIMIT = 60  # seconds of one program
CC = [os.environ.get("CC", "cc"), "-std=c99", "-D_POSIX_C_SOURCE=200809L", "-O3",
      "-fno-math-errno"]


def note(text):
    print(text, file=sys.stderr, flush=True)


def build(name, compiler, flags):
    """Compiles tests/bench/<name>.c; None if that does not work."""
    program = os.path.join(BUILD, name)
    done = subprocess.run(compiler + ["-o", program, os.path.join(HERE, name + ".c")] + flags)
    return program if done.returncode == 0 else None


def output(command, env=None):
    """What a program prints; nothing if it fails."""
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=TOP,
                                   env=dict(os.environ, **(env or {})), universal_newlines=True)
        out, err = process.communicate(timeout=LIMIT)
    except OSError as why:
        note("bench: %s" % why)
        return ""
    except subprocess.TimeoutExpired:
        note("bench: no end within %d s: %s" % (LIMIT, " ".join(command)))
        process.terminate()  # not killed at once: mpirun ends its ranks first
        try:
            process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        return ""
    if process.returncode:
        note("bench: %s: exit code %d: %s" % (" ".join(command), process.returncode, err[-300:]))
        return ""
    return out


def rounds_of(count, programs):
    """Runs the programs count times; {(name, unit): {who: {round: value}}}."""
    samples = {}
    for number in range(count):
        for program in programs:
            for name, unit, who, value in program():
                samples.setdefault((name, unit), {}).setdefault(who, {})[number] = value
    return samples


def row_of(name, unit, values):
    """The row of one comparison, and the quartiles of its ratio."""
    medians = {who: statistics.median(rounds.values()) for who, rounds in values.items()}
    ours = medians.pop("ours", None)
    if ours is None:
        return None, None
    row = {"name": name, "unit": unit, "ours": ours, "peers": medians}
    less = unit in TIMES
    rivals = sorted((who for who in medians if who != "limit"), key=medians.get, reverse=not less)
    if not rivals:
        return row, None
    mine, theirs = values["ours"], values[rivals[0]]
    both = sorted(set(mine) & set(theirs))
    if not both:
        return row, None
    ratios = [theirs[i] / mine[i] if less else mine[i] / theirs[i] for i in both]
    row["ratio"] = statistics.median(ratios)
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [row["ratio"]] * 3
    return row, quartiles


# ---- the comparisons ---------------------------------------------------------


def gemm(args):
    """The built-in matrix multiply against BLIS, one thread, alternating in one process."""
    folder = os.path.join(LIBRARIES, "blis-pthread")
    include = "/usr/include/%s/blis-pthread" % os.path.basename(LIBRARIES)
    blis = []
    if os.path.exists(include):
        blis = ["-DBENCH_BLIS", "-I" + include, "-L" + folder, "-Wl,-rpath," + folder, "-lblis"]
    program = build("bench_gemm", CC, blis + ["-lm", "-pthread"])

    def both():
        text = output([program], {"BLIS_NUM_THREADS": "1"})
        for name, ours, peer in re.findall(r"^(gemm_\w+) (\S+)(?: (\S+))?", text, re.M):
            yield name, "GFLOP/s", "ours", float(ours)
            if peer:
                yield name, "GFLOP/s", "blis", float(peer)

    if program:
        yield args.rounds, [both]


def comm(args):
    """All-reduce between threads against Open MPI's shared memory."""
    ours = build("bench_comm_threads", CC, ["-lm", "-pthread"])
    peer = build("peer_mpi", ["mpicc"] + CC[1:], []) if shutil.which("mpicc") else None

    def program(command):
        lines = re.findall(r"^allreduce_(\w+?)_(\d+_\w+) (\S+)", output(command), re.M)
        for who, what, us in lines:
            yield ("allreduce_threads_" + what, "us", "ours" if who == "threads" else who,
                   float(us))

    for ranks in ("2", "4") if ours else ():
        commands = [[ours, ranks]]
        if peer:
            commands.append(["mpirun", "--allow-run-as-root", "--oversubscribe", "--mca", "btl",
                             "self,vader", "-n", ranks, peer])
        yield args.rounds, [functools.partial(program, command) for command in commands]


MODEL = "--layers 4 --heads 4 --width 128 --context 64 --batch 12 --steps 60".split()


def text_of(args):
    """The text to train on: the one asked for, or the project's own C files."""
    if args.text:
        return os.path.abspath(args.text)
    path = os.path.join(BUILD, "text.txt")
    with open(path, "w", encoding="utf-8") as out:
        for name in [os.path.join(TOP, "tshard.h")] + sorted(
                glob.glob(os.path.join(TOP, "*", "*.[ch]"))):
            with open(name, encoding="utf-8") as file:
                out.write(file.read())
    return path


def tokens(who, form, command, env=None):
    rate = re.search(form, output(command, env), re.M)
    return [("step_nanogpt", "tokens/s", who, float(rate[1]))] if rate else []


def torch_peers(text):
    """For each BLAS that libblas.so.3 may be, the program with its best number of threads."""
    found = {}
    for path in sorted(glob.glob(os.path.join(LIBRARIES, "*", "libblas.so.3"))):
        folder = os.path.dirname(path)
        blas = re.match(r"(openblas|blis)-", os.path.basename(folder))
        for threads in ("1", "2") if blas else ():
            env = {"LD_LIBRARY_PATH": folder, "OMP_NUM_THREADS": threads,
                   "OPENBLAS_NUM_THREADS": threads, "BLIS_NUM_THREADS": threads}
            command = [TORCH_PYTHON, os.path.join(HERE, "peer_torch.py"), "--text", text,
                       "--threads", threads] + MODEL
            found.setdefault("torch_" + blas[1], []).append(functools.partial(
                tokens, "torch_" + blas[1], r"^tokens/s (\S+)", command, env))
    return [max(choices, key=lambda program: sum(rate for *_, rate in program()))
            for choices in found.values()]


def nanogpt(args):
    """A training step of nanoGPT's CPU setting on 2 ranks against PyTorch's best."""
    text = text_of(args)
    ours = [os.path.join(TOP, "build", "gpt"), "--chars", "--dropout", "0", "--ranks", "2",
            "--sample", "0", "--out", os.path.join(BUILD, "run"), "--text", text] + MODEL
    programs = [functools.partial(tokens, "ours", r"^final: .*tokens/s (\S+)", ours)]
    torch = subprocess.run([TORCH_PYTHON, "-c", "import torch"], stderr=subprocess.DEVNULL)
    yield args.rounds, programs + (torch_peers(text) if torch.returncode == 0 else [])


# ---- the table ---------------------------------------------------------------


def show(row, quartiles):
    peers = "  ".join("%s %.4g" % peer for peer in sorted(row["peers"].items()))
    ratio = ""
    if "ratio" in row:
        ratio = "%5.2f (%.2f .. %.2f)" % (row["ratio"], quartiles[0], quartiles[2])
    print("%-28s %9.4g %-9s %-22s %s" % (row["name"], row["ours"], row["unit"], ratio, peers),
          flush=True)


def write(rows):
    """All of it or nothing."""
    with tempfile.NamedTemporaryFile("w", dir=os.path.join(TOP, "build"), delete=False) as file:
        json.dump(rows, file, indent=1)
    os.chmod(file.name, 0o644)
    os.replace(file.name, os.path.join(TOP, "build", "bench.json"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", help="what step_nanogpt learns (the project's C files)")
    parser.add_argument("--only", choices=["gemm", "comm", "nanogpt"])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    os.makedirs(BUILD, exist_ok=True)
    print("%-28s %9s %-9s %-22s peers" % ("name", "ours", "unit", "ratio (quartiles)"))
    rows = []
    for part in (gemm, comm, nanogpt):
        if args.only in (None, part.__name__):
            for count, programs in part(args):
                for (name, unit), values in rounds_of(count, programs).items():
                    row, quartiles = row_of(name, unit, values)
                    if row:
                        rows.append(row)
                        show(row, quartiles)
    write(rows)
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
