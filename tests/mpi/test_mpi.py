#!/usr/bin/env python3
"""Runs the tests that `make test-mpi` builds under mpirun, with each MPI that is installed: the layer
and collective tests of the other backends on 2, 3 and 4 processes, and those of tests/mpi/only.c."""

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
from scripts import Failed, Skipped, mpis, outcome, tell

# Of tests/mpi/only.c: on how many processes.
ONLY = {"runner": [2], "host": [4], "threads": [1], "refused": [1], "native": [3],
        "segments": [2, 3, 4], "fails": [3], "busy": [3], "limit": [2], "deserted": [2]}
SCRIPT_LIMIT = 900  # seconds, for tests/run.py
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


def shared(name, ranks):
    """The tests of all backends, on so many processes: how many passed, and in which time."""
    begin = time.monotonic()
    text = must(mpirun(name, ranks) + [program_of(name, "tests")])
    passed = sum(map(int, re.findall(r"^(\d+) passed$", text, re.M)))
    if not passed:
        raise Failed("no test passed: " + text[-1200:])
    print("%s on %d processes: %d tests in %.0f s" % (name, ranks, passed,
                                                       time.monotonic() - begin))


def only(name, test, ranks):
    must(mpirun(name, ranks) + [program_of(name, "only"), test])


def under_slurm():
    if not shutil.which("srun"):
        raise Skipped("srun: no Slurm here")
    must(["srun", "-n", "2", program_of(list(mpis())[0], "only"), "runner"])


def main():
    if not mpis():
        raise SystemExit(tell("mpi", [("mpi", "SKIPPED", "no mpicc: apt-get install libopenmpi-dev "
                                       "openmpi-bin libmpich-dev mpich")]))
    tests = [("srun", under_slurm)]
    for name in mpis():
        tests += [("%s on %d processes" % (name, ranks), functools.partial(shared, name, ranks))
                  for ranks in (2, 3, 4)]
        tests += [("%s: %s on %d" % (name, test, ranks), functools.partial(only, name, test, ranks))
                  for test, counts in ONLY.items() for ranks in counts]
    ends = [(title, *outcome(lambda folder, test=test: test())) for title, test in tests]
    return 1 if tell("mpi", ends) else 0


if __name__ == "__main__":
    sys.exit(main())
