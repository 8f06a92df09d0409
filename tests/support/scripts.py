"""scripts.py - runs the tests of a script, and tells what they did in cmocka's words, which
tests/run.sh reads. Import it after sys.path has this folder."""

import concurrent.futures
import errno
import fcntl
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LAUNCHER = os.environ.get("TSHARD_RUN") or os.path.join(TOP, "build", "tshard-run")
NO_LAUNCHER = "needs libuv1-dev libsodium-dev"


def has_launcher():
    """Whether tshard-run is there; makes it where it can be made."""
    if not os.path.exists(LAUNCHER):
        subprocess.call(["make", "-C", TOP, "tshard-run"], stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL, timeout=100)
    return os.path.exists(LAUNCHER)


def mpis():
    """The installed MPIs as {name: compiler}; the name stands in build/mpi-NAME."""
    both = {name: "mpicc." + name for name in ("openmpi", "mpich")}
    found = {name: compiler for name, compiler in both.items() if shutil.which(compiler)}
    return found or ({"any": "mpicc"} if shutil.which("mpicc") else {})


def mpi_flags(compiler):
    """What another compiler needs to find this one's mpi.h, which is not to be warned of."""
    words = subprocess.check_output([compiler, "-show"], universal_newlines=True).split()
    return [part for word in words if word.startswith("-I") for part in ("-isystem", word[2:])]


def children(parent, program):
    """The processes that parent has started and that run program, an absolute path."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open("/proc/%s/stat" % pid, encoding="utf-8") as file:
                above = int(file.read().rpartition(")")[2].split()[1])
            if above == parent and os.readlink("/proc/%s/exe" % pid) == program:
                found.append(int(pid))
        except OSError:  # it has ended
            continue
    return found


def free_port(host="127.0.0.1"):
    """A port below those the system hands out by itself (from 32768), which a test beside this
    one may be given for a connection before the program of this one listens."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for _ in range(1000):
        port = random.randrange(20000, 32768)
        with socket.socket(family) as probe:
            try:
                probe.bind((host, port))
                return port
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
    raise OSError(errno.EADDRINUSE, "no free port from 20000 to 32767")


# What make gets to build the library once for all scripts: with debug information, not optimised.
DEBUG = os.path.join(TOP, "build", "scripts")
DEBUG_FLAGS = ["config=debug", "OUT=" + DEBUG, "OPENMP="]
# Without the variables of the make that may be running a script.
ENVIRONMENT = {name: value for name, value in os.environ.items()
               if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "san", "config", "only")}


def make_debug(*words):
    """Runs make with DEBUG_FLAGS, one script at a time; what it prints. Goal shared makes shared.o
    and libtshard.so below DEBUG."""
    os.makedirs(DEBUG, exist_ok=True)
    with open(os.path.join(DEBUG, "lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(["make", "-C", TOP, "--no-print-directory"] + DEBUG_FLAGS
                              + list(words), env=ENVIRONMENT, timeout=250, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, universal_newlines=True)
    if done.returncode:
        raise Failed("make %s: %s" % (" ".join(words), done.stdout))
    return done.stdout


def debug_object():
    """The path of the library as an object file; link with -lm -pthread."""
    make_debug("shared")
    return os.path.join(DEBUG, "shared.o")


class Failed(Exception):
    pass


class Skipped(Exception):
    pass


def check(condition, *what):
    if not condition:
        raise Failed(" ".join(map(str, what)))


def outcome(test):
    """(OK, FAILED or SKIPPED, why) of a test, which gets a folder of its own."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            test(folder)
        return "OK", None
    except Skipped as why:
        return "SKIPPED", why
    except (Failed, OSError, ValueError, LookupError, subprocess.SubprocessError) as why:
        return "FAILED", "%s %s" % (type(why).__name__, why)


def tell(group, ends):
    """Prints what became of each (name, state, why); how many failed."""
    names = {"OK": [], "FAILED": [], "SKIPPED": []}
    for name, state, why in ends:
        names[state].append(name)
        if state == "OK":
            print("[       OK ] " + name)
        else:
            print("%s%s: %s" % ("skip: " if state == "SKIPPED" else "", name, why))
    print("[  PASSED  ] %d test(s)." % len(names.pop("OK")))
    for state, those in names.items():
        if those:
            print("[  %-8s] %s: %d test(s), listed below:" % (state, group, len(those)))
        for name in those:
            print("[  %-8s] %s" % (state, name))
    return len(names["FAILED"])


def run_tests(group, tests, jobs=1):
    """Runs them, or those that the command line names, so many at once; how many failed."""
    tests = [test for test in tests if not sys.argv[1:] or test.__name__ in sys.argv[1:]]
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        return tell(group, ((test.__name__, *end)
                            for test, end in zip(tests, pool.map(outcome, tests))))
