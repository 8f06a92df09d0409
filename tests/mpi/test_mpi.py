#!/usr/bin/env python3
"""Runs the tests that `make test-mpi` builds under mpirun, with each MPI that is installed: the
layer and collective tests of the other backends on 2 and 3 processes, those of collectives on 4,
those of tests/mpi/only.c, and examples/gpt.c, whose losses are those of the other backends. What an
MPI may do differently is in tests/mpi/only.c, so two MPIs share the numbers of processes: one has 3
and 4, the other, which waits without giving its core up, has 2. Layers on 4 ranks have the threads
and TCP. With FULL=1 in the environment each MPI runs all on 2, 3 and 4."""

import functools
import os
import re
import shutil
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(TOP, "tests", "support"))
from scripts import (LAUNCHER, NO_LAUNCHER, Failed, Skipped, has_launcher, mpis, outcome,
                     tell)

# Of tests/mpi/only.c: on how many processes.
ONLY = {"runner": [2], "reasons": [2], "host": [4],
        "threads": [1], "refused": [1], "native": [3],
        "segments": [2, 3, 4], "fails": [3], "busy": [3], "limit": [2], "deserted": [2],
        "scarce": [2], "arguments": [1], "late": [2], "last": [3],
        "given_up": [2], "unfinished": [2]}
STEPS = 20
GPT = ["--steps", str(STEPS), "--layers", "2", "--heads", "4", "--width", "32", "--context", "16",
       "--batch", "4", "--eval-every", "10", "--sample", "0",
       "--text", os.path.join(TOP, "LICENSE")]  # it stays; the sources draw new roundings each time
# On 8 ranks: two replicas of a pipeline of two stages, each cut in two. Replicas draw dropout of
# their own.
GRID = ["--tp", "2", "--pp", "2", "--dp", "2", "--zero", "--micro-batches", "2"]
# Seconds, for tests/run.sh.
SCRIPT_LIMIT = 900
EACH = 280  # of one mpirun
ENVIRONMENT = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
                   # MPICH's transport tells of the messages that a world leaves behind whose
                   # ranks disagreed
                   UCX_LOG_LEVEL="fatal")


def mpirun(name, ranks):
    program = "mpirun" if name == "any" else "mpirun." + name
    version = subprocess.run([program, "--version"], stdout=subprocess.PIPE, env=ENVIRONMENT,
                             timeout=20).stdout
    crowd = ["--oversubscribe"] if re.search(b"OpenRTE|Open MPI", version) else []
    return [program] + crowd + ["-n", str(ranks)]


def run(command, limit=EACH):
    """Exit code and what was said, without what mpirun says of a program that failed."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, env=ENVIRONMENT, encoding="utf-8",
                               errors="replace")
    try:
        text = process.communicate(timeout=limit)[0]
    except subprocess.TimeoutExpired:
        process.terminate()  # mpirun ends its processes
        try:
            text = process.communicate(timeout=20)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            text = process.communicate()[0]
        raise Failed("no end within %d s: %s" % (limit, text[-600:]))
    return process.returncode, text


def program_of(name, program):
    path = os.path.join(TOP, "build", "mpi-" + name, program)
    if not os.path.exists(path):
        raise Failed(path + " was not built")
    return path


def must(command):
    code, text = run(command)
    if code:
        raise Failed("exit code %d: %s" % (code, text[-1200:]))
    return text


def shared(name, ranks, parts, _):
    """The tests of all backends, or those parts of them, on so many processes: how many passed, and
    in which time."""
    begin = time.monotonic()
    text = must(mpirun(name, ranks) + [program_of(name, "tests")] + parts)
    passed = sum(map(int, re.findall(r"\[  PASSED  \] (\d+) test", text)))
    if not passed:
        raise Failed("no test passed: " + text[-1200:])
    print("%s on %d processes: %d tests in %.0f s" % (name, ranks, passed,
                                                       time.monotonic() - begin))


def only(name, test, ranks, _):
    must(mpirun(name, ranks) + [program_of(name, "only"), test])


def losses(program, backend, folder, ranks, more):
    """Of the steps of examples/gpt.c: losses, rate and norm, not the time they took."""
    text = must(program + [os.path.join(TOP, "build", "gpt-mpi"), "--backend", backend,
                           "--out", folder] + GPT + more)
    with open(os.path.join(folder, "metrics.csv"), encoding="utf-8") as file:
        rows = [line.split(",")[:5] for line in file]
    if len(rows) != 1 + STEPS or "final: ranks %d tp %d" % (ranks, min(ranks, 2)) not in text:
        raise Failed(backend, rows[-1:], text[-600:])
    return rows


def backends_agree(ranks, dropout, more, folder):
    """With one rank within what the file rounds, with each other to the last digit. gpt-mpi is
    built by mpicc, whose launcher is mpirun."""
    more = ["--dropout", dropout] + more
    one = losses([], "threads", os.path.join(folder, "one"), 1, ["--ranks", "1"] + more[:2])
    threads = losses([], "threads", os.path.join(folder, "threads"), ranks,
                     ["--ranks", str(ranks)] + more)
    for alone, row in zip(one[1:], threads[1:]):
        if abs(float(alone[1]) - float(row[1])) > 2e-6:
            raise Failed("one rank", alone, "%d ranks" % ranks, row)
    if not has_launcher():
        raise Skipped(NO_LAUNCHER)
    for backend, program in (("tcp", [LAUNCHER, "-n", str(ranks)]), ("mpi", mpirun("any", ranks))):
        found = losses(program, backend, os.path.join(folder, backend), ranks, more)
        if found != threads:
            raise Failed(backend, found, "threads", threads)


def under_slurm(_):
    if not shutil.which("srun"):
        raise Skipped("srun: no Slurm here")
    must(["srun", "-n", "2", program_of(list(mpis())[0], "only"), "runner"])


def main():
    if not mpis():
        raise SystemExit(tell("mpi", [("mpi", "SKIPPED", "no mpicc: apt-get install libopenmpi-dev "
                                       "openmpi-bin libmpich-dev mpich")]))
    tests = [("srun", under_slurm),
             ("backends_agree", functools.partial(backends_agree, 2, "0.1", [])),
             ("backends_agree on a grid", functools.partial(backends_agree, 8, "0", GRID))]
    for number, name in enumerate(mpis()):
        full, alone = os.environ.get("FULL"), len(mpis()) == 1
        tests += [("%s on %d processes" % (name, ranks), functools.partial(shared, name, ranks, []))
                  for ranks in (2, 3, 4) if full or (ranks < 4 and (alone or ranks == 3 - number))]
        if number == 0 and not full:
            tests.append(("%s on 4 processes" % name,
                          functools.partial(shared, name, 4, ["collectives"])))
        tests += [("%s: %s on %d" % (name, test, ranks), functools.partial(only, name, test, ranks))
                  for test, counts in ONLY.items() for ranks in counts]
    ends = [(title, *outcome(test)) for title, test in tests]
    return 1 if tell("mpi", ends) else 0


if __name__ == "__main__":
    sys.exit(main())
