#!/usr/bin/env python3
"""Runs the tests that `make test-mpi` builds under mpirun, with each MPI that is installed and 2, 3
and 4 processes: the layer and collective tests of the other backends."""

import os
import re
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(TOP, "tests", "support"))
from scripts import Failed, mpis, outcome, tell

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


def shared(name, ranks):
    """The tests of all backends, on so many processes: how many passed."""
    program = os.path.join(TOP, "build", "mpi-" + name, "tests")
    if not os.path.exists(program):
        raise Failed(program + " was not built")
    code, text = run(mpirun(name, ranks) + [program])
    passed = sum(map(int, re.findall(r"^(\d+) passed$", text, re.M)))
    if code != 0 or not passed:
        raise Failed("exit code %d: %s" % (code, text[-1200:]))
    return passed


def main():
    if not mpis():
        raise SystemExit(tell("mpi", [("mpi", "SKIPPED", "no mpicc: apt-get install libopenmpi-dev "
                                       "openmpi-bin libmpich-dev mpich")]))
    ends = []
    for name in mpis():
        for ranks in 2, 3, 4:
            begin = time.monotonic()
            counts = []
            title = "%s on %d processes" % (name, ranks)
            state, why = outcome(lambda folder: counts.append(shared(name, ranks)))
            if counts:
                print("%s: %d passed in %.0f s" % (title, counts[0], time.monotonic() - begin))
            ends.append((title, state, why))
            sys.stdout.flush()
    return 1 if tell("mpi", ends) else 0


if __name__ == "__main__":
    sys.exit(main())
