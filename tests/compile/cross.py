#!/usr/bin/env python3
"""Compiles tshard.h and the threads backend for other processors and another libc, under the strict
warnings, and runs the unit, op, layer and threads tests there: with musl and on i686 on this
machine itself, else emulated by qemu-user.

    cross.py [--platform NAME]... [--only TEXT] [--jobs N] --warn "FLAGS" --warn-c "FLAGS FOR C"

A platform without its compiler or emulator is skipped, with the packages that bring them. Test
programs are static and bring tests/support/plain in place of cmocka; they are kept in build/cross,
and compiled again when a file they are made of is newer. Prints what run.sh prints, then a table of
platforms, then "N passed, N failed, N skipped". To compile strictly counts as one test, C++ beside
it as one skipped where there is no g++ for the platform.
"""

import argparse
import concurrent.futures
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
BUILD = os.path.join(TOP, "build", "cross")

KINDS = ["unit", "op", "layer", "comm"]
COLUMNS = ["strict", "unit", "op", "layer", "threads"]
COMPILE_LIMIT = 300  # seconds of one compilation,
RUN_LIMIT = 900      # and of one program, which may be 20 times as slow as on the machine itself
SHOWN = 30  # lines of what a compiler said
# Tests that choose kernels by the processor, and the processors that qemu-user emulates for them
# after its best one: without any extension of NEON, and with sdot only.
KERNELS = ["unit/test_quant", "unit/test_isa"]
PROCESSORS = {"aarch64": ["cortex-a53", "cortex-a76"]}
LINK = ["-static", "-pthread", "-lm"]
STD = ["-D_POSIX_C_SOURCE=200809L"]
# Without it readdir fails in 32-bit programs under qemu, whose folders have 64-bit positions.
FILES = ["-D_FILE_OFFSET_BITS=64"]


class Platform:
    """A C compiler, the C++ compiler beside it (which may be missing), what runs its programs
    (None: this machine), and the Debian packages that bring them."""

    def __init__(self, name, compiler, emulator, packages):
        self.name, self.compiler, self.emulator, self.packages = name, compiler, emulator, packages
        self.cxx = compiler[:-3] + "g++" if emulator else None
        if name == "i686" and runs_here(compiler):
            self.emulator = None
        self.missing = [tool for tool in (compiler, self.emulator)
                        if tool and not shutil.which(tool)]
        self.prefix = [self.emulator] if self.emulator else []


def runs_here(compiler):
    """Whether this machine runs the programs of a compiler for another processor of its kind."""
    with tempfile.TemporaryDirectory() as folder:
        source, program = os.path.join(folder, "nothing.c"), os.path.join(folder, "nothing")
        with open(source, "w", encoding="utf-8") as file:
            file.write("int main(void) { return 0; }\n")
        try:
            return (subprocess.call([compiler, "-static", "-o", program, source]) == 0
                    and subprocess.call([program]) == 0)
        except OSError:
            return False


def platforms():
    cross = "gcc-%s libc6-dev-%s-cross qemu-user"
    yield Platform("musl", "musl-gcc", None, "musl-tools")
    for name, triple, architecture, emulator in (
            ("i686", "i686-linux-gnu", "i386", "i386"),
            ("armhf", "arm-linux-gnueabihf", "armhf", "arm"),
            ("aarch64", "aarch64-linux-gnu", "arm64", "aarch64"),
            ("riscv64", "riscv64-linux-gnu", "riscv64", "riscv64"),
            ("s390x", "s390x-linux-gnu", "s390x", "s390x"),
            ("ppc64le", "powerpc64le-linux-gnu", "ppc64el", "ppc64le")):
        yield Platform(name, triple + "-gcc", "qemu-" + emulator, cross % (triple, architecture))


def call(command, limit=COMPILE_LIMIT):
    """Whether it succeeded, and what it printed."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              universal_newlines=True, timeout=limit)
        return done.returncode == 0, done.stdout
    except subprocess.TimeoutExpired:
        return False, "no end within %d s" % limit


def strict(platform, warn, warn_c):
    """The commands that have to succeed without a warning: the core as strict C99, then with the
    threads backend, optimised, in double and portable; and in C++11."""
    def source(header):
        return ['-DHEADER="%s"' % os.path.join(TOP, header),
                os.path.join(HERE, "implementation.c"), "-c", "-o", os.devnull]
    threads = STD + source("backends/tshard_threads.h")
    warn = warn + ["-pedantic-errors", "-Werror"]
    c = [platform.compiler, "-std=c99"] + warn + warn_c
    commands = [c + ["-O0"] + source("tshard.h"), c + ["-O1"] + threads,
                c + ["-O0", "-DTSHARD_REAL=double"] + threads,
                c + ["-O0", "-DTSHARD_NO_SIMD"] + threads]
    if platform.cxx and shutil.which(platform.cxx):
        commands.append([platform.cxx, "-std=c++11", "-x", "c++", "-O0"] + warn + threads)
    return commands


def tests_of(only):
    """(source, kind, whether it brings the library along) of every test that needs no other
    library, and the sources of those that do."""
    chosen, left_out = [], []
    for kind in KINDS:
        for path in sorted(glob.glob(os.path.join(TOP, "tests", kind, "test_*.c"))):
            if only and only not in os.path.relpath(path, os.path.join(TOP, "tests")):
                continue
            with open(path, encoding="utf-8") as file:
                text = file.read()
            if "tshard_uv.h" in text:
                left_out.append(path)
            else:
                chosen.append((path, kind, "TSHARD_IMPLEMENTATION" in text))
    return chosen, left_out


def newest():
    """When the newest header was changed, in seconds."""
    forms = ["tshard.h", "backends/*.h", "tests/*/*.h", "tests/support/plain/*.h"]
    return max(os.path.getmtime(path) for form in forms
               for path in glob.glob(os.path.join(TOP, form)))


def build(platform, target, sources, flags, base, std="c99"):
    """Compiles unless the target is newer than its sources and `base`; what went wrong, or None."""
    if os.path.exists(target) and os.path.getmtime(target) > max(
            [base] + [os.path.getmtime(source) for source in sources]):
        return None
    os.makedirs(os.path.dirname(target), exist_ok=True)
    ok, text = call([platform.compiler, "-std=" + std, "-O1", "-fno-math-errno", "-Wall", "-Wextra",
                     "-Werror", "-I" + os.path.join(TOP, "tests", "support", "plain")] + STD + FILES
                    + (["-DTESTS_EMULATED"] if platform.emulator else [])
                    + ["-o", target] + sources + flags)
    return None if ok else text


def programs_of(platform, chosen, jobs):
    """Builds the tests; (program, kind, what went wrong or None) of each."""
    folder, base = os.path.join(BUILD, platform.name), newest()
    library = os.path.join(folder, "library.o")
    wrong = build(platform, library, [os.path.join(TOP, "tests", "support", "library.c")], ["-c"],
                  base)

    def one(test):
        source, kind, whole, std = test
        program = os.path.join(folder, "tests", kind, os.path.basename(source)[:-2])
        if std != "c99":
            program += "_" + std
        if wrong and not whole:
            return program, kind, wrong
        sources = [source] + ([] if whole else [library])
        return program, kind, build(platform, program, sources, LINK, base, std)

    # GNU C keeps more digits on x87 than C99 lets it: the kernels must bear both.
    tests = [test + ("c99",) for test in chosen]
    tests += [test + ("gnu99",) for test in chosen
              if platform.name == "i686" and test[0].endswith("test_kernel.c")]
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, tests))


def run(platform, programs, processor=None):
    """(passed, failed, skipped) of tests, which tests/run.sh runs and prints. A script builds
    programs of its own, and reads their files on this machine, whose byte order may be another.
    processor: the one to emulate; None: qemu's choice, the best one."""
    env = dict(os.environ, PYTHON=sys.executable, CC=platform.compiler + " -static",
               TESTS_RUN=" ".join(platform.prefix))
    if processor:
        print("on %s:" % processor)
        env["QEMU_CPU"] = processor
    done = subprocess.run([os.path.join(TOP, "tests", "run.sh"), "--limit", str(RUN_LIMIT),
                           "--with", " ".join(platform.prefix)] + programs, env=env,
                          stdout=subprocess.PIPE, encoding="utf-8", errors="replace")
    *lines, last = done.stdout.rstrip("\n").split("\n")
    print("".join(line + "\n" for line in lines), end="")
    return tuple(map(int, re.findall(r"\d+", last)))


def add(counts, column, more):
    """Adds (passed, failed, skipped) to a column's."""
    counts[column] = tuple(a + b for a, b in zip(counts.get(column, (0, 0, 0)), more))


def test(platform, args):
    """{column: (passed, failed, skipped)} of a platform."""
    counts = {}
    if not args.only:
        texts = [text for ok, text in map(call, strict(platform, args.warn.split(),
                                                       args.warn_c.split())) if not ok]
        add(counts, "strict", (not texts, len(texts), 0))
        print("%-6s%-36s" % ("FAIL" if texts else "ok", platform.name + "/strict"))
        print("".join(line + "\n" for text in texts for line in text.splitlines()[:SHOWN]), end="")
        if platform.cxx and not shutil.which(platform.cxx):
            print("skip  %s/strict, C++: apt-get install --no-install-recommends %s"
                  % (platform.name, re.sub("(.*)-g..$", r"g++-\1", platform.cxx)))
            add(counts, "strict", (0, 0, 1))
    chosen, left_out = tests_of(args.only)
    for path in left_out:
        name = os.path.relpath(path, os.path.join(TOP, "tests"))[:-2]
        print("skip  %s/%s: libuv for this platform is not installed" % (platform.name, name))
        add(counts, name.split("/")[0], (0, 0, 1))
    programs = programs_of(platform, chosen, args.jobs)
    if args.only in "unit/test_safetensors.py":
        programs.append((os.path.join(TOP, "tests", "unit", "test_safetensors.py"), "unit", None))
    for program, kind, wrong in programs:
        if wrong:
            print("FAIL  %s/%s does not compile\n%s" % (kind, os.path.basename(program), wrong))
        add(counts, "threads" if kind == "comm" else kind,
            (0, 1, 0) if wrong else run(platform, [program]))
    for processor in PROCESSORS.get(platform.name, []):
        for program, kind, wrong in programs:
            if not wrong and program.endswith(tuple(KERNELS)):
                add(counts, kind, run(platform, [program], processor))
    return counts


def cell(numbers):
    """A cell of the table: "12 passed, 1 skipped"."""
    words = ("passed", "failed", "skipped")
    return ", ".join("%d %s" % pair for pair in zip(numbers, words) if pair[0]) or "-"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--platform", action="append", help="one of them; more than once: several")
    parser.add_argument("--only", default="", help="the tests whose name holds this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--warn", default="-Wall -Wextra")
    parser.add_argument("--warn-c", default="")
    args = parser.parse_args()
    rows, total = [], (0, 0, 0)
    for platform in platforms():
        if args.platform and platform.name not in args.platform:
            continue
        if platform.missing:
            print("skip  %s: no %s: apt-get install --no-install-recommends %s"
                  % (platform.name, ", ".join(platform.missing), platform.packages))
            counts = {column: (0, 0, 1) for column in COLUMNS}
        else:
            counts = test(platform, args)
        rows.append([platform.name] + [cell(counts.get(column, (0, 0, 0))) for column in COLUMNS])
        for numbers in counts.values():
            total = tuple(map(sum, zip(total, numbers)))
        sys.stdout.flush()
    rows.insert(0, ["platform"] + COLUMNS)
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join("%-*s" % pair for pair in zip(widths, row)).rstrip())
    print("%d passed, %d failed, %d skipped" % total)
    return 1 if total[1] or not sum(total) else 0


if __name__ == "__main__":
    sys.exit(main())
