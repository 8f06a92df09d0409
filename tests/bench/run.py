#!/usr/bin/env python3
"""Compares tshard with its peers; prints a table and writes build/bench.json.

    run.py [--text FILE] [--only PART] [--rounds N]

A comparison gives samples, {(name, unit): {who: {round: value}}} where who is "ours" or a peer. A
round runs both sides one after the other; a ratio is taken within a round, where they saw the
machine in the same mood, and the median of the rounds' ratios counts. What needs a package that is
not installed is left out.

A row of the file is {"name", "unit", "ours", "peers": {"name": value}, "ratio"}; the ratio says how
many times better than its best peer ours is, for times and rates alike.
"""

import argparse
import functools
import glob
import json
import os
import re
import select
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
LIMIT = 60  # seconds of one program, or one answer
TURN, MOST_CALLS = 50e3, 20000  # microseconds of a collective's turn, and the calls in it
KIB, MIB = 1024, 1024 * 1024
SIZES = {4: "4B", KIB: "1KiB", 16 * KIB: "16KiB", 256 * KIB: "256KiB", MIB: "1MiB", 4 * MIB: "4MiB",
         16 * MIB: "16MiB", 64 * MIB: "64MiB"}
CC = [os.environ.get("CC", "cc"), "-std=c99", "-D_POSIX_C_SOURCE=200809L", "-O3",
      "-fno-math-errno"]
CXX = [os.environ.get("CXX", "c++"), "-std=c++14", "-O3"]


def note(text):
    print(text, file=sys.stderr, flush=True)


def build(name, compiler, flags):
    """Compiles a file of this folder; None if that does not work."""
    program = os.path.join(BUILD, os.path.splitext(name)[0])
    done = subprocess.run(compiler + ["-o", program, os.path.join(HERE, name)] + flags)
    return program if done.returncode == 0 else None


def stop(process):
    """Not killed at once: mpirun ends its ranks first."""
    process.terminate()
    try:
        process.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


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
        stop(process)
        return ""
    if process.returncode:
        note("bench: %s: exit code %d: %s" % (" ".join(command), process.returncode, err[-300:]))
        return ""
    return out


def rounds_of(count, programs):
    """Runs programs that give (name, unit, who, value) of what they measured; their samples."""
    samples = {}
    for number in range(count):
        for program in programs:
            for name, unit, who, value in program():
                samples.setdefault((name, unit), {}).setdefault(who, {})[number] = value
    return samples


class Ranks:
    """A program that obeys the commands of ranks_bench.h, and sleeps between them."""

    def __init__(self, who, command):
        self.who = who
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        cwd=TOP, universal_newlines=True)

    def ask(self, kind, size, calls):
        """Microseconds per call, or "right" if calls is 0; None: it failed."""
        if self.process.poll() is not None:
            return None  # it said why
        try:
            self.process.stdin.write("%s %d %d\n" % (kind, size, calls))
            self.process.stdin.flush()
            ready, _, _ = select.select([self.process.stdout], [], [], LIMIT)
            answer = self.process.stdout.readline().strip() if ready else "no answer"
        except OSError as why:
            answer = str(why)
        if answer == "right" or re.match(r"\d", answer):
            return answer if answer == "right" else float(answer)
        note("bench: %s: %s of %d bytes: %s" % (self.who, kind, size, answer or "it ended"))
        if answer != "wrong":  # of another size it may still be right
            stop(self.process)
        return None

    def calls(self, kind, size):
        """How many calls fill a turn; 0 if the result is not right."""
        if not self.ask(kind, size, 0):
            return 0
        calls, us = 1, self.ask(kind, size, 1)
        while us and us * calls < TURN / 4 and calls < MOST_CALLS:
            calls *= 4
            us = self.ask(kind, size, calls)
        return min(MOST_CALLS, int(TURN / us) + 1) if us else 0

    def close(self):
        if self.process.poll() is None:
            try:
                self.process.communicate(timeout=10)  # its input ends, so it does
            except (subprocess.TimeoutExpired, OSError):
                stop(self.process)


def turns_of(rounds, backend, ranks, kinds, largest, commands):
    """Samples of collectives, a size at a time; ours takes turns with every peer."""
    ours, *peers = programs = [Ranks(who, command) for who, command in commands]
    try:
        for kind, size in [(k, s) for k in kinds for s in SIZES if s <= largest]:
            calls = {program: program.calls(kind, size) for program in programs}
            values = {}
            for pair in [(ours, peer) for peer in peers] * rounds or [(ours,)] * rounds:
                number = sum(map(len, values.values()))
                for program in pair:
                    us = calls[program] and program.ask(kind, size, calls[program])
                    if us:
                        values.setdefault(program.who, {})[number] = us
            name = "%s_%s_%s_%s" % (kind, backend, ranks, SIZES[size])
            yield {(name, "us"): values}
    finally:
        for program in programs:
            program.close()


def row_of(name, unit, values):
    """The row of one comparison, and its ratios: {peer: quartiles}; None without ours."""
    medians = {who: statistics.median(rounds.values()) for who, rounds in values.items()}
    mine = values.get("ours")
    if not mine:
        return None, {}
    row = {"name": name, "unit": unit, "ours": medians.pop("ours"), "peers": medians}
    less = unit in TIMES
    ratios = {}
    for who in medians:
        both = [(mine[i], values[who][i]) for i in values[who] if i in mine]
        each = [theirs / ours if less else ours / theirs for ours, theirs in both]
        if each:
            ratios[who] = statistics.quantiles(each, n=4) if len(each) > 1 else each * 3
    rivals = [who for who in ratios if who != "limit"]
    if rivals:
        best = sorted(rivals, key=medians.get, reverse=not less)[0]
        row["ratio"] = ratios[best][1]
    return row, ratios


# ---- the comparisons ---------------------------------------------------------


def gemm(args):
    """The built-in matrix multiply against BLIS, one thread, alternating in one process."""
    folder = os.path.join(LIBRARIES, "blis-pthread")
    include = "/usr/include/%s/blis-pthread" % os.path.basename(LIBRARIES)
    blis = []
    if os.path.exists(include):
        blis = ["-DBENCH_BLIS", "-I" + include, "-L" + folder, "-Wl,-rpath," + folder, "-lblis"]
    program = build("bench_gemm.c", CC, blis + ["-lm", "-pthread"])

    def both():
        text = output([program], {"BLIS_NUM_THREADS": "1"})
        for name, ours, peer in re.findall(r"^(gemm_\w+) (\S+)(?: (\S+))?", text, re.M):
            yield name, "GFLOP/s", "ours", float(ours)
            if peer:
                yield name, "GFLOP/s", "blis", float(peer)

    if program:
        yield rounds_of(args.rounds, [both])


def mpi(who, ranks, *flags):
    """The command of Open MPI's side, in a list; none without it."""
    if not shutil.which("mpicc"):
        return []
    peer = build("peer_mpi.c", ["mpicc"] + CC[1:], [])
    return [(who, ["mpirun", "--allow-run-as-root", "--oversubscribe", *flags, "-n", ranks,
                   peer])] if peer else []


def comm(args):
    """All-reduce between threads against Open MPI's shared memory."""
    ours = build("bench_comm_threads.c", CC, ["-lm", "-pthread"])
    for ranks in ("2", "4") if ours else ():
        commands = [("ours", [ours, ranks])]
        commands += mpi("openmpi_shm", ranks, "--mca", "btl", "self,vader")
        yield from turns_of(args.rounds, "threads", ranks, ["allreduce"], 16 * MIB, commands)


def comm_tcp(args):
    """Collectives over loopback TCP against gloo and Open MPI, and what plain sockets need."""
    ours = build("bench_comm_uv.c", CC, ["-luv", "-lsodium", "-lm", "-pthread"])
    programs = [("ours", ours), ("limit", build("peer_sockets.c", CC, []))]
    if os.path.exists("/usr/include/gloo/allreduce.h"):
        programs.append(("gloo", build("peer_gloo.cc", CXX, ["-lgloo", "-pthread"])))
    for ranks in ("2", "4") if ours else ():
        commands = [(who, [program, ranks]) for who, program in programs if program]
        commands += mpi("openmpi_tcp", ranks, "--mca", "btl", "self,tcp",
                        "--mca", "btl_tcp_if_include", "lo")
        yield from turns_of(args.rounds, "tcp", ranks, ["allreduce", "allgather", "reduce_scatter"],
                            64 * MIB, commands)


def kernels(args):
    """Elementwise ops, norms, losses and optimisers against loops with as many streams."""
    program = build("bench_kernels.c", CC, ["-lm"])

    def both():
        text = output([program, "1"])
        for name, ours, limit in re.findall(r"^(kernel_\w+) (\S+) (\S+)", text, re.M):
            yield name, "GB/s", "ours", float(ours)
            yield name, "GB/s", "limit", float(limit)

    if program:
        yield rounds_of(args.rounds, [both])


# What a processor with AVX-512 evaluates at half the speed of memory, or faster.
FUNCTIONS = re.compile("kernel_(exp|log|pow|pow_scalar|sigmoid|tanh|gelu|gelu_tanh|silu|dropout|"
                       "softmax|log_softmax|cross_entropy)(_slope)?$")


def figures_of(name):
    """What a row is meant to reach: {peer: least ratio}."""
    if name.startswith("kernel_"):
        return {"limit": 0.5 if FUNCTIONS.match(name) else 0.85}
    row = re.match(r"[a-z_]+_tcp_(\d+)_(\w+)$", name)
    if not row:
        return {}
    size = {text: size for size, text in SIZES.items()}[row[2]]
    figures = {"gloo": 2 if size >= MIB else 1}
    if size >= 256 * KIB:
        figures["openmpi_tcp"] = 1
    if size == 4 and row[1] == "2":
        figures["openmpi_tcp"] = 1 / 1.5
    return figures


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
    yield rounds_of(args.rounds,
                    programs + (torch_peers(text) if torch.returncode == 0 else []))


# ---- the table ---------------------------------------------------------------


COLUMNS = "%-28s %9s %-9s %6s %-7s %s"


def show(row, ratios):
    """A line: a peer is followed by its value, its ratio, the quartiles, and the figure for it."""
    figures = {who: least for who, least in figures_of(row["name"]).items() if who in ratios}
    peers = []
    for who, value in sorted(row["peers"].items()):
        text = "%s %.4g" % (who, value)
        if who in ratios:
            text += " x%.2f (%.2f .. %.2f)" % tuple(ratios[who][i] for i in (1, 0, 2))
        if who in figures:
            text += " >= %.2g" % figures[who]
        peers.append(text)
    met = all(ratios[who][1] >= least for who, least in figures.items())
    print(COLUMNS % (row["name"], "%.4g" % row["ours"], row["unit"],
                     "%.2f" % row["ratio"] if "ratio" in row else "",
                     ("meets" if met else "misses") if figures else "", ",  ".join(peers)),
          flush=True)


def write(rows):
    """All of it or nothing."""
    with tempfile.NamedTemporaryFile("w", dir=os.path.join(TOP, "build"), delete=False) as file:
        json.dump(rows, file, indent=1)
    os.chmod(file.name, 0o644)
    os.replace(file.name, os.path.join(TOP, "build", "bench.json"))


def main():
    parts = (gemm, kernels, comm, comm_tcp, nanogpt)
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", help="what step_nanogpt learns (the project's C files)")
    parser.add_argument("--only", choices=[part.__name__ for part in parts])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    os.makedirs(BUILD, exist_ok=True)
    print(COLUMNS % ("name", "ours", "unit", "ratio", "figures",
                     "peers: value, ratio (quartiles) >= the ratio to reach"), flush=True)
    rows, failed = [], False
    for part in parts:
        for samples in part(args) if args.only in (None, part.__name__) else ():
            for (name, unit), values in samples.items():
                row, ratios = row_of(name, unit, values)
                failed |= row is None
                if row:
                    rows.append(row)
                    show(row, ratios)
    write(rows)
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
