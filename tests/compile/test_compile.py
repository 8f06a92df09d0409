#!/usr/bin/env python3
"""Builds and links tshard.h in the ways its users do. Reports in cmocka's words."""

import concurrent.futures
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(TOP, "tests", "support"))
from scripts import Failed, Skipped, check, debug_object, run_tests
from test_readme import blocks, by_diff
HEADER = os.path.join(TOP, "tshard.h")
C = [os.environ.get("CC", "cc"), "-std=c99"]
CXX = [os.environ.get("CXX", "c++"), "-std=c++11", "-x", "c++"]
PLAIN = ["-O0", "-pedantic", "-Wall", "-Wextra", "-Werror"]  # no -pthread: the core needs none
# Half the time of compiling the implementation: two_files_in_c compiles all of it.
STATIC = ["-DTSHARD_STATIC", "-DTSHARD_IMPLEMENTATION=", "-DTSHARD_NO_SIMD"]
SCRIPT_LIMIT = 400  # seconds, for tests/run.sh: every compiler that is installed builds a program
INCLUDE_LIMIT = 0.1  # seconds that the header alone may add to a compilation
# CPU seconds of the implementation at -O3. gcc 12 takes 12 on an idle core of a Zen 5; older and
# busy machines take several times as long, so this finds only what makes the time explode. The
# test prints the figure.
IMPLEMENTATION_LIMIT = 60


def call(command):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          universal_newlines=True, timeout=100)
    return done.returncode, done.stdout


def must(command):
    code, text = call(command)
    if code:
        raise Failed("%s\n%s" % (" ".join(command), text))
    return text


WORK = tempfile.TemporaryDirectory()  # for objects that several tests link
compiled = {}  # their paths


def objects(parts):
    """Compiles (compiler, file, flags) each into an object, unless a test before did; returns their
    paths."""
    commands, paths = [], []
    for compiler, name, flags in parts:
        command = compiler + PLAIN + flags + ['-DHEADER="../../tshard.h"', "-c",
                                              os.path.join(HERE, name)]
        key = " ".join(command)
        if key not in compiled:
            compiled[key] = os.path.join(WORK.name, "%d.o" % len(compiled))
            commands.append(command + ["-o", compiled[key]])
        paths.append(compiled[key])
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(must, commands))
    return paths


def runs(folder, linker, parts):
    program = os.path.join(folder, "program")
    must([linker[0], "-o", program] + objects(parts) + ["-lm"])
    text = must([program])
    if text.strip() != "10":
        raise Failed("printed %r instead of 10" % text)


def two_files_in_c(folder):
    runs(folder, C, [(C, "use.c", []), (C, "implementation.c", [])])


def two_files_in_cxx(folder):
    runs(folder, CXX, [(CXX, "use.c", []), (CXX, "implementation.c", [])])


def cxx_program_on_c_library(folder):
    runs(folder, CXX, [(CXX, "use.c", []), (C, "implementation.c", [])])


def two_static_copies(folder):
    runs(folder, C, [(C, "use.c", STATIC), (C, "implementation.c", STATIC)])


def implementation_is_compiled_once(folder):
    """Two implementations collide, none is missed: so the switch does what it says."""
    for parts, sentence in (([(C, "use.c", [])], "undefined reference"),
                            ([(C, "use.c", []), (C, "implementation.c", []),
                              (C, "implementation.c", [])], "multiple definition")):
        code, text = call([C[0], "-o", os.path.join(folder, "program")]
                          + objects(parts) + ["-lm"])
        if code == 0 or sentence not in text or "tsh_run" not in text:
            raise Failed("%d implementations linked: %s" % (len(parts) - 1, text))


def after_assert_and_twice(_):
    objects([(C, "declarations.c", []), (CXX, "declarations.c", [])])


def seconds(source):
    begin = time.monotonic()
    must(C + ["-fsyntax-only", source])
    return time.monotonic() - begin


def including_costs_little(folder):
    sources = []
    for name, text in (("empty.c", "int x;\n"), ("with.c", '#include "%s"\nint x;\n' % HEADER)):
        sources.append(os.path.join(folder, name))
        with open(sources[-1], "w") as out:
            out.write(text)
    # The least of several runs: what the machine does beside only adds.
    empty, with_header = (min(seconds(source) for _ in range(7)) for source in sources)
    print("the header alone costs %.3f s" % (with_header - empty))
    if with_header - empty > INCLUDE_LIMIT:
        raise Failed("including tshard.h costs %.3f s" % (with_header - empty))


def implementation_compiles_in_time(_):
    """As make has compiled it for build/gpt: build/tshard.times has what the shell's `times` said,
    of its own processes and of the compiler's."""
    path = os.path.join(TOP, "build", "tshard.times")
    if not os.path.exists(path):
        must(["make", "-C", TOP, "build/tshard.o"])
    with open(path, encoding="utf-8") as file:
        spent = sum(60 * float(minutes) + float(rest)
                    for minutes, rest in re.findall(r"(\d+)m([\d.]+)s", file.read()))
    print("the implementation takes %.1f s at -O3" % spent)
    if spent > IMPLEMENTATION_LIMIT:
        raise Failed("compiling the implementation takes %.1f s at -O3" % spent)


def compilers():
    """The installed C compilers, each once: gcc, gcc-12, clang, clang-14, musl-gcc, ..."""
    found = {}
    for folder in os.environ["PATH"].split(os.pathsep):
        for path in sorted(glob.glob(os.path.join(folder, "*"))):
            name = os.path.basename(path)
            if re.fullmatch(r"(musl-)?(gcc|clang)(-\d+)?", name):
                # musl-gcc is a script, whose links lead to another name
                found.setdefault(name if "musl" in name else os.path.realpath(path), path)
    return sorted(found.values())


def two_rank_program():
    """README's first program after the diff that makes it one of two ranks."""
    pieces = list(blocks("README.md"))
    program = [piece.text for piece in pieces if piece.kind == "c"][0]
    changes = [piece.text for piece in pieces if piece.kind == "diff"][0]
    return by_diff(program, changes).replace('"tshard.h"', '"%s"' % HEADER).replace(
        '"backends/', '"%s/' % os.path.join(TOP, "backends"))


def two_ranks_need_no_flag(folder):
    """The two-rank program compiles without a warning with the flags that README gives, and in
    other standards, also where a header that hides POSIX was included before; and it trains."""
    program = two_rank_program()
    warn = ["-pedantic", "-Wall", "-Wextra", "-Werror"]
    first, after = (os.path.join(folder, name) for name in ("first.c", "after.c"))
    with open(first, "w") as out:
        out.write(program)
    with open(after, "w") as out:
        out.write("#include <stdio.h>\n#include <time.h>\n" + program)

    def works(compiler):
        built = os.path.join(folder, os.path.basename(compiler))
        for flags in (["-std=c99"], ["-std=c99", "-pthread", "-DTSHARD_NO_SIMD"], ["-std=gnu99"],
                      ["-std=c17"], ["-std=c99", "-D_POSIX_C_SOURCE=200809L"]):
            must([compiler] + warn + flags + ["-fsyntax-only", after])
        must([compiler] + warn + ["-std=c99", first, "-o", built, "-lm", "-pthread"])
        text = must([built])
        losses = [float(loss) for loss in re.findall(r"loss (\S+)", text)]
        if len(losses) != 6 or not losses[-1] < 0.1 * losses[0]:
            raise Failed("%s: two ranks printed %r" % (compiler, text))

    found = compilers()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(works, found))
    print("two ranks compiled and run by %s" % ", ".join(os.path.basename(c) for c in found))


def two_ranks_in_cxx(folder):
    """The threads backend as C++11, after headers that a program may include before."""
    path = os.path.join(folder, "program.cc")
    with open(path, "w") as out:
        out.write("#include <cstdio>\n#include <ctime>\n#define TSHARD_IMPLEMENTATION\n"
                  '#include "%s"\nint main() { return 0; }\n'
                  % os.path.join(TOP, "backends", "tshard_threads.h"))
    must([CXX[0], "-std=c++11", "-pedantic", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", path])


# Flags that change what floating-point code means, and what takes each back. gcc defines a macro
# for every one of them; clang for -ffinite-math-only alone, which -ffast-math and -Ofast contain.
INEXACT = {"-ffast-math": "-fno-fast-math", "-Ofast": "-fno-fast-math",
           "-ffinite-math-only": "-fno-finite-math-only",
           "-funsafe-math-optimizations": "-fno-unsafe-math-optimizations",
           "-fassociative-math -fno-signed-zeros -fno-trapping-math":
               "-fno-associative-math -fsigned-zeros",
           "-ffast-math -fno-finite-math-only": "-fno-unsafe-math-optimizations",
           "-freciprocal-math": "-fno-reciprocal-math", "-fno-signed-zeros": "-fsigned-zeros"}
HAS_MACRO = ["-ffast-math", "-Ofast", "-ffinite-math-only"]  # of clang
EXACT = ["-O3", "-O3 -fno-math-errno", "-O3 -fno-trapping-math", "-O3 -march=native",
         "-Ofast -fno-fast-math", "-O3 -ffast-math -fno-fast-math"]


def families():
    """An installed gcc and an installed clang, those of them that there are."""
    return [name for name in ("gcc", "clang") if shutil.which(name)]


def inexact_arithmetic_is_an_error(folder):
    """#error names the flag that mends it, which does; declarations alone may have any flag."""
    source = os.path.join(folder, "source.c")
    with open(source, "w") as out:
        out.write('#include "%s"\n' % HEADER)

    def read(compiler, flags, implementation=("-DTSHARD_IMPLEMENTATION",)):
        return call([compiler, "-E", "-o", os.devnull, *implementation, *flags.split(), source])

    for compiler in families():
        for flags, mends in INEXACT.items():
            if compiler == "clang" and flags not in HAS_MACRO:
                continue
            code, text = read(compiler, flags)
            check(code, compiler, flags, "is taken")
            check("tshard.h needs" in text and mends.split()[0] in text, compiler, flags, text)
            code, text = read(compiler, flags + " " + mends)
            check(code == 0, compiler, flags, mends, text)
            code, text = read(compiler, flags, ())
            check(code == 0, compiler, flags, "declarations:", text)
        for flags in EXACT:
            code, text = read(compiler, flags)
            check(code == 0, compiler, flags, text)


def tsh_open_finds_inexact_arithmetic(folder):
    """tsh_open asks tshi_context_inexact, which finds every flag in the code that a compiler makes
    of it: for where there is no macro."""
    with open(HEADER, encoding="utf-8") as file:
        text = file.read()
    function = re.search(r"static TSHI_COLD const char \*tshi_context_inexact\(void\) \{.*?\n\}\n",
                         text, re.S)[0]
    opens = re.search(r"tsh_result tsh_open_built\([^)]*\) \{.*?\n\}\n", text, re.S)[0]
    check("if (tshi_context_inexact())" in opens, "tsh_open does not ask")
    source, program = (os.path.join(folder, name) for name in ("inexact.c", "inexact"))
    with open(source, "w") as out:
        out.write("#include <math.h>\n#include <stdio.h>\n#define TSHI_COLD\n%s"
                  "int main(void) {\n    const char *flag = tshi_context_inexact();\n"
                  '    puts(flag ? flag : "exact");\n    return 0;\n}\n' % function)
    for compiler in families():
        for flags in list(INEXACT) + EXACT:
            must([compiler, "-w", "-O2", *flags.split(), "-o", program, source, "-lm"])
            said = must([program]).strip()
            check((said == "exact") == (flags in EXACT), compiler, flags, said)


def optimisers_change_no_bit(folder):
    """The same bits where no type is taken to be another memory, and optimised at link time."""
    if not os.environ.get("FULL"):
        raise Skipped("three builds of the library take 50 s: FULL=1")
    said = {}
    for flags in ("-O3", "-O3 -fno-strict-aliasing", "-O3 -flto"):
        program = os.path.join(folder, "bits")
        must(C + ["-fno-math-errno", *flags.split(), "-o", program, os.path.join(HERE, "bits.c"),
                  "-lm"])
        said[flags] = must([program])
    check(len(set(said.values())) == 1, said)


def sanitizers_are_linked_where_they_are_compiled(_):
    """Of all that make builds: what compiles with a sanitizer's flag is linked with it, too."""
    environment = {name: value for name, value in os.environ.items()
                   if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "config", "only")}
    for san, flag in (("asan", "-fsanitize=address"), ("tsan", "-fsanitize=thread")):
        text = subprocess.run(
            ["make", "-n", "-B", "-C", TOP, "--no-print-directory", "san=" + san, "build-tests",
             "build/%s/gpt" % san, "build/%s/llm" % san], stdout=subprocess.PIPE,
            universal_newlines=True, timeout=100, env=environment).stdout
        links = [line for line in text.replace("\\\n", " ").splitlines()
                 if re.search(r"(^|; )\s*(\S*cc|\S*gcc|\S*clang|\S*\+\+) ", line)
                 and " -o " in line and " -c " not in line]
        check(len(links) > 50, "only", len(links), "programs are linked:", text[-2000:])
        for line in links:
            check(flag in line, "is linked without", flag + ":", line)


def program_of_0_1_is_ported(folder):
    """It does not compile, and does when rename_0_2.sed has gone over it."""
    program = os.path.join(HERE, "program_0_1.c")
    command = C + PLAIN + ["-I", TOP, "-o", os.path.join(folder, "program")]
    code, text = call(command + [program])
    check(code, "it compiles as it is")
    for name in "fn", "no_bias", "tsh_custom_desc", "tsh_retain", "tsh_split_dim", "tsh_dim":
        check(re.search(r"error: .*\b%s\b" % name, text), name, "is no error:", text)
    if "GNU" not in call(["sed", "--version"])[1]:
        raise Skipped("needs GNU sed")
    ported = os.path.join(folder, "program.c")
    with open(ported, "w", encoding="utf-8") as out:
        out.write(must(["sed", "-f", os.path.join(HERE, "rename_0_2.sed"),
                        "-e", "/#define TSHARD_IMPLEMENTATION/d", program]))
    must(command + [ported, debug_object(), "-lm", "-pthread"])
    must([os.path.join(folder, "program")])


def errors_name_the_line_of_the_call(folder):
    """With backends/tshard_where.h, in C and C++, and not without TSHARD_WHERE."""
    program = os.path.join(folder, "where")
    for compiler in C, CXX:
        library = objects([(compiler, "implementation.c", [])])
        for flags in ["-DTSHARD_WHERE"], []:
            must([compiler[0], "-o", program] + library
                 + objects([(compiler, "where.c", flags)]) + ["-lm"])
            must([program])
    code, text = call(C + PLAIN + ["-DTSHARD_WHERE", "-fsyntax-only", "-x", "c", "-include",
                                   os.path.join(HERE, "where.c"), "-DHEADER=\"../../tshard.h\"",
                                   os.path.join(HERE, "implementation.c")])
    check(code and "before backends/tshard_where.h" in text, "an implementation after it:", text)


TESTS = [two_files_in_c, two_files_in_cxx, cxx_program_on_c_library, two_static_copies,
         implementation_is_compiled_once, after_assert_and_twice, including_costs_little,
         implementation_compiles_in_time, two_ranks_need_no_flag, two_ranks_in_cxx,
         inexact_arithmetic_is_an_error, tsh_open_finds_inexact_arithmetic,
         optimisers_change_no_bit, sanitizers_are_linked_where_they_are_compiled,
         errors_name_the_line_of_the_call, program_of_0_1_is_ported]

if __name__ == "__main__":
    sys.exit(run_tests("compile", TESTS))
