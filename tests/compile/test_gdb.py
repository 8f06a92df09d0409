#!/usr/bin/env python3
"""What examples/DEBUGGING.md promises of gdb: a breakpoint on tsh_fail stops in the failing call,
threads have the names of ranks, and tshard-gdb.py shows tensors and a ctx, by reading memory where
structures are known, else by calling the library. Reports in cmocka's words."""

import os
import re
import shutil
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(TOP, "tests", "support"))
from scripts import Skipped, check, debug_object, run_tests

LIMIT = 100  # seconds of a command
SCRIPT = os.path.join(TOP, "backends", "package", "tshard-gdb.py")
PROGRAM = r"""
#include "%s/tshard.h"
#include "%s/backends/tshard_threads.h"

static tsh_tensor *fails(tsh_tensor *a, tsh_tensor *b) {
    return tsh_add(a, b); /* HERE */
}

static int rank(tsh_ctx *ctx, void *user) {
    static const float values[6] = {1, 2, 3, 4, 5.5F, 6};
    static const int64_t numbers[3] = {7, -8, 9};
    tsh_tensor *a = tsh_tensor_from(ctx, TSH_F32, tsh_shape2(2, 3), tsh_replicated(), values);
    tsh_tensor *cut = tsh_redistribute(a, tsh_sharded(1)), *turned = tsh_transpose(a, 0, 1);
    tsh_tensor *half = tsh_cast(a, TSH_BF16), *large = tsh_zeros(ctx, tsh_shape2(5, 8));
    tsh_tensor *n = tsh_tensor_from(ctx, TSH_I64, tsh_shape1(3), tsh_replicated(), numbers);
    (void)user, (void)cut, (void)turned, (void)half, (void)large, (void)n;
    (void)tsh_barrier(tsh_world(ctx));
    if (tsh_world(ctx)->rank == 1) (void)fails(a, tsh_zeros(ctx, tsh_shape1(4)));
    if (tsh_world(ctx)->rank == 1) (void)tsh_version();
    return (int)tsh_barrier(tsh_world(ctx)); /* rank 0 waits here */
}

int main(void) { return tsh_threads_run(2, NULL, rank, NULL); }
""" % (TOP, TOP)
# Of rank 1 of 2; the second element of `turned` is that of the next row.
SHOWN = {"a": "f32 (2, 3) R: 1 2 3 4 5.5 6", "cut": "f32 (2, 3) S(1): 3 6",
         "turned": "f32 (3, 2) R: 1 4 2 5.5 3 6", "half": "bf16 (2, 3) R: 1 2 3 4 5.5 6",
         "n": "i64 (3) R: 7 -8 9"}


def cc(*words):
    subprocess.run([os.environ.get("CC", "cc"), "-std=c99", "-D_POSIX_C_SOURCE=200809L", "-O0"]
                   + list(words), check=True, timeout=LIMIT, stderr=subprocess.DEVNULL)


def gdb(program, *commands):
    """What gdb prints when it runs the program with these commands."""
    if not shutil.which("gdb"):
        raise Skipped("gdb is missing: apt-get install gdb")
    words = ["gdb", "-nx", "-batch", "-iex", "set debuginfod enabled off"]
    for command in commands:
        words += ["-ex", command]
    done = subprocess.run(words + [program], timeout=LIMIT, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, encoding="utf-8",
                          env=dict(os.environ, TSHARD_TIMEOUT="50"))
    if "ptrace" in done.stdout or "Couldn't get registers" in done.stdout:
        raise Skipped("gdb may not trace a program here")
    if "Python scripting is not supported" in done.stdout:
        raise Skipped("this gdb has no Python")
    return done.stdout


def build(folder, debug_information, program_flags=()):
    """The program, with a library with or without debug information."""
    source, program = os.path.join(folder, "program.c"), os.path.join(folder, "program")
    with open(source, "w", encoding="utf-8") as file:
        file.write(PROGRAM)
    library = debug_object()
    if not debug_information:
        stripped = os.path.join(folder, "library.o")
        subprocess.run(["objcopy", "--strip-debug", library, stripped], check=True, timeout=LIMIT)
        library = stripped
    cc("-g", *program_flags, "-o", program, source, library, "-lm", "-pthread")
    return program


def break_stops_at_the_failing_call(folder):
    line = PROGRAM[:PROGRAM.index("/* HERE */")].count("\n") + 1
    program = build(folder, True)
    text = gdb(program, "break tsh_fail", "run", "backtrace 12", "info threads",
               "source " + SCRIPT, "up 3", "frame function rank",
               *["print %s" % name for name in SHOWN], "print large", "print ctx",
               "print (tsh_tensor *) 0", "tshard n", "kill")
    check(re.search(r'"tsh rank 1".* hit Breakpoint 1.*tsh_fail', text), "no stop:", text)
    check(re.search(r"tsh_add .*\n#\d+ .* fails .*program\.c:%d\n" % line, text), "stack:", text)
    check(re.search(r'"tsh rank 0"', text), "names of threads:", text)
    for name, says in SHOWN.items():
        check(re.search(r"= \(tsh_tensor \*\) 0x[0-9a-f]+ " + re.escape(says) + "\n", text), name,
              "is not", says, "in", text)
    check(re.search(r"f32 \(5, 8\) R: (0 ){16}\.\.\.\n", text), "a large tensor:", text)
    check(re.search(r"= \(tsh_ctx \*\) 0x[0-9a-f]+ rank 1 of 2: no error\n", text), "ctx:", text)
    check("(tsh_tensor *) 0x0\n" in text, "NULL:", text)
    check("\ni64 (3) R: 7 -8 9\n" in text, "the command:", text)
    text = gdb(program, "break tsh_version", "run", "source " + SCRIPT,
               "frame function rank", "print ctx", "kill")
    check(re.search(r"rank 1 of 2: TSH_ERR_SHAPE: tsh_add: shapes \(2, 3\) R and \(4\) R", text),
          text)


def without_debug_information_functions_are_called(folder):
    program = build(folder, False, ["-DTSHARD_IMPLEMENTED", "-DTSHARD_THREADS_IMPLEMENTED"])
    text = gdb(program, "break tsh_version", "run", "source " + SCRIPT, "frame function rank",
               "print a", "tshard a", "tshard cut", "tshard ctx", "tshard user",
               "show scheduler-locking", "kill")
    check(re.search(r"= \(tsh_tensor \*\) 0x[0-9a-f]+\n", text), "print calls something:", text)
    if "Couldn't write extended state" in text:
        raise Skipped("gdb cannot call functions of a program here")
    check("\nf32 (2, 3) R: 1 2 3 / 4 5.5 6\n" in text, "a tensor:", text)
    check("\nf32 (2, 3) S(1): 3 / 6\n" in text, "a shard:", text)
    check("\nTSH_ERR_SHAPE: tsh_add: shapes" in text, "the error:", text)
    check("tshard: takes a tsh_tensor *" in text, "another type:", text)
    check('"replay"' in text, "other threads stay locked:", text)


def the_page_is_short(_):
    with open(os.path.join(TOP, "examples", "DEBUGGING.md"), encoding="utf-8") as file:
        lines = file.read().count("\n")
    check(lines <= 120, "examples/DEBUGGING.md has", lines, "lines")


if __name__ == "__main__":
    sys.exit(run_tests("gdb", [break_stops_at_the_failing_call,
                               without_debug_information_functions_are_called,
                               the_page_is_short]))
