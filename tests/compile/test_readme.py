#!/usr/bin/env python3
"""Runs every program and every command of the Markdown pages as they are written there.

A page's blocks, fenced (```c, ```diff, ```sh ...) or indented by four blanks, are:
  - a C program (it has a main), kept as prog.c until another one follows;
  - a change of prog.c: a diff, or the changed lines alone, with an #include of a backend;
  - a piece of C or C++: it stands word for word in a file of examples/, which is compiled, or it
    compiles here as part of a function;
  - commands. One that compiles prog.c gets a folder of its own with prog.c in it, and may print
    nothing but what the program prints. All others run in a copy of the tree, in the order of the
    page. Those that cannot run here are in NOT_RUN, each with the reason.
Reports in cmocka's words.
"""

import ast
import concurrent.futures
import difflib
import importlib.util
import glob
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(TOP, "tests", "support"))
from scripts import Failed, Skipped, check, mpis, outcome, tell

SCRIPT_LIMIT = 600  # seconds, for tests/run.sh
EACH = 300          # of one command
PORT = "examples/FROM_PYTORCH.md"  # its pieces of C are parts of files of examples/
PAGES = ["README.md", "examples/README.md", PORT, "backends/README.md",
         "tests/README.md", "tests/bench/README.md"]
SHELL, IGNORED = {"sh", "bash", "shell", "console", "indented"}, {"text", "cmake", "make", "json"}

# Commands that are not run as written: a pattern of the whole command, the reason, and what runs in
# its place (None: nothing; targets of make must exist all the same). A pattern that no command
# matches fails the test.
NOT_RUN = [
    (r"git clone <this repository> && cd tshard", "the copy of the tree stands for the clone",
     None),
    (r"make test", "this script is a part of it", None),
    (r"make shared", "tests/consumer/test_consumer.py does it", None),
    (r"build/tshard-run .* --save build/state", "500 steps take half a minute",
     lambda command: command + " --steps 50"),
    (r"make check lint .*", "they take an hour, and are run by .ci/run", None),
    (r"(FULL=1 )?make bench( ARGS=.*)?|make bench-comm", "takes 10 minutes",
     "python3 tests/bench/run.py --help"),
    (r"sh tests/bench/cores\.sh", "takes 8 minutes", "sh tests/bench/cores.sh --help"),
    (r"make run ARGS=\"--text FILE .*", "2000 steps take minutes",
     lambda command: command.replace("FILE", "tshard.h").replace("--steps 2000", "--steps 2")),
    (r"apt-get install .*", "changes the machine", None),
    (r".*tshard-run --hosts alpha.*", "needs two hosts; tests/fault/test_hosts.py has them", None),
    (r"torchrun .*|srun .*|TSHARD_HOST=alpha .*", "needs another launcher or a host alpha", None),
    (r"make build/gpt-mpi|mpirun .*", "tests/mpi/test_mpi.py does it with every MPI", None),
]

# What pieces of C may take for granted.
NAMES = """tsh_ctx *ctx, tsh_module *root, tsh_module *head, tsh_module *block, tsh_module *net,
    tsh_tensor *x, tsh_tensor *y, tsh_tensor *target, tsh_tensor *weight_shard, tsh_tensor *loss,
    tsh_optim *adam, double targets, void *me"""
PIECE = """#define TSHARD_IMPLEMENTED
#include <stdio.h>
#include "%s/tshard.h"
#include "%s/backends/tshard_threads.h"
%s
void piece(%s);
void piece(%s) {
    {
%s
    }
}
"""
IMPLEMENTATION = "#define TSHARD_IMPLEMENTATION"
STRICT = ["-pedantic", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]


class Block:
    def __init__(self, page, line, kind, text):
        self.place, self.kind, self.text = "%s:%d" % (page, line), kind, text
        self.page = page


def blocks(page):
    """The code blocks of a page, in order."""
    with open(os.path.join(TOP, page), encoding="utf-8") as file:
        lines = file.read().split("\n")
    number = 0
    while number < len(lines):
        fence = re.match(r"```(\w*)\s*$", lines[number])
        begin = number + 1
        if fence:
            number = lines.index("```", begin)
            yield Block(page, begin, fence[1], "\n".join(lines[begin:number]) + "\n")
        elif lines[number].startswith("    ") and (number == 0 or not lines[number - 1].strip()):
            while number + 1 < len(lines) and (lines[number + 1].startswith("    ") or
                                               not lines[number + 1].strip()):
                number += 1
            text = "\n".join(line[4:] for line in lines[begin - 1:number + 1])
            yield Block(page, begin, "indented", text.rstrip() + "\n")
        number += 1


def environment(home):
    """This process's, without what make and the tests have put into it. What would be installed or
    kept at home goes into a folder; make run trains for a few steps only."""
    own = ("MAKE", "MFLAGS", "TSHARD_", "TESTS_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(own)}
    return dict(env, HOME=home, DESTDIR=os.path.join(home, "installed"), ARGS="--steps 10")


def call(command, folder, home):
    """Runs a line of shell; its output."""
    run = subprocess.run(["sh", "-c", command], cwd=folder, env=environment(home), timeout=EACH,
                         stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, encoding="utf-8",
                         stderr=subprocess.STDOUT, errors="replace")
    check(run.returncode == 0, "exit code %d of: %s\n%s" % (run.returncode, command,
                                                           run.stdout[-1500:]))
    return run.stdout


# ---- programs ----------------------------------------------------------------


def by_diff(program, text):
    """The program after a diff without line numbers: its lines stand in the order of the
    program's."""
    lines, at = program.split("\n"), 0
    for line in text.rstrip("\n").split("\n"):
        if line[:1] in ("-", " ", ""):
            if line[1:] not in lines[at:]:
                return None
            at = lines.index(line[1:], at)
            if line[:1] == "-":
                del lines[at]
            else:
                at += 1
        elif line[:1] == "+":
            lines.insert(at, line[1:])
            at += 1
        else:
            return None
    return "\n".join(lines)


def by_lines(program, text):
    """The program with each of these lines in place of the line that it resembles most; an include
    goes below that of tshard.h."""
    for line in text.rstrip("\n").split("\n"):
        if line.startswith("int main"):
            program = re.sub(r"^int main\(.*?^}$", lambda _: line, program, flags=re.M | re.S)
        elif line.startswith("#include"):
            program = program.replace('#include "tshard.h"\n', '#include "tshard.h"\n%s\n' % line)
        else:
            old = difflib.get_close_matches(line, program.split("\n"), 1, 0.5)
            check(old, "no line of the program is like", line)
            program = program.replace(old[0], line)
    return program


def lacks(text):
    """Why a program or command cannot run on this machine; None if it can."""
    if re.search(r"tshard_mpi\.h|\bmpicc", text) and not mpis():
        return "mpicc is missing: apt-get install libopenmpi-dev openmpi-bin"
    if re.search(r"tshard_uv\.h|-luv|tshard-run|--backend tcp", text):
        code = "#include <uv.h>\n#include <sodium.h>\n"
        found = subprocess.run(["cc", "-E", "-"], input=code, encoding="utf-8",
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if found.returncode:
            return "libuv or libsodium is missing: apt-get install libuv1-dev libsodium-dev"
    return None


def program_runs(program, command):
    """Compiles prog.c without a warning by the command of the page, which may run it, too. Without
    FULL=1 the optimiser does not run: build/gpt is compiled with it."""
    def test(folder):
        why = lacks(program + command)
        if why:
            raise Skipped(why)
        for name in "tshard.h", "backends", "examples":
            os.symlink(os.path.join(TOP, name), os.path.join(folder, name))
        with open(os.path.join(folder, "prog.c"), "w", encoding="utf-8") as out:
            out.write(program)
        here = command
        if "mpicc" in command and not shutil.which("mpicc"):
            here = command.replace("mpicc", list(mpis().values())[0])
        if not os.environ.get("FULL"):
            here = here.replace(" -O3 ", " -O0 ")
        compiling, _, running = here.partition("&&")
        call("%s -std=c99 -D_POSIX_C_SOURCE=200809L %s prog.c"
             % (here.split()[0], " ".join(STRICT)), folder, folder)
        text = call(compiling, folder, folder)
        check(not text.strip(), "the compiler says\n" + text[:1500])
        if running:
            text = call(running, folder, folder)
            losses = [float(loss) for loss in re.findall(r"loss +(\S+)", text)]
            check(text.strip(), "the program prints nothing")
            check(not losses or losses[-1] < losses[0] / 2, "it does not learn:\n" + text)
    return test


# ---- pieces ------------------------------------------------------------------


def squeezed(text):
    return "\n".join(line.strip() for line in text.split("\n") if line.strip())


def examples():
    folder = os.path.join(TOP, "examples")
    for name in sorted(os.listdir(folder)):
        if name.endswith((".c", ".h", ".cpp")):
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                yield squeezed(file.read())


def piece_compiles(block):
    def test(folder):
        if any(squeezed(block.text) in text for text in examples()):
            return
        check(block.page != PORT, "it stands in no file of examples/")
        cxx = block.kind in ("cpp", "c++")
        outside = r"^(?:static [^;{}=]*\);|#include .*)[^\n]*\n"  # prototypes and includes
        before = "".join(re.findall(outside, block.text, re.M)).replace("static ", "")
        body = re.sub(outside, "", block.text, flags=re.M)
        source = os.path.join(folder, "piece.cpp" if cxx else "piece.c")
        names = NAMES.replace("tsh_tensor *loss", "double loss") if "&loss" in body else NAMES
        with open(source, "w", encoding="utf-8") as out:
            out.write(PIECE % (TOP, TOP, before, names, names, body))
        flags = ["-std=c++17"] if cxx else ["-std=c99", "-D_POSIX_C_SOURCE=200809L"]
        call(shlex.join(["c++" if cxx else "cc"] + flags + STRICT + ["-Wno-unused", source]),
             folder, folder)
    return test


def python_parses(block):
    return lambda _: ast.parse(block.text, block.place) and None


def python_runs(page):
    """The Python pieces of a page, one after the other, are one program; of its training loop a few
    steps run."""
    def test(folder):
        for package in "torch", "safetensors":
            if importlib.util.find_spec(package) is None:
                raise Skipped("%s is missing: pip install torch safetensors" % package)
        code = "\n".join(block.text for block in blocks(page) if block.kind == "python")
        with open(os.path.join(folder, "prog.py"), "w", encoding="utf-8") as out:
            out.write(re.sub(r"\bSTEPS = 64, 500\n", "STEPS = 64, 2\n", code))
        text = call(shlex.join([sys.executable, "prog.py"]), folder, folder)
        check(re.search(r"\d+ of 500 right", text), text)
    return test


# ---- commands ----------------------------------------------------------------


def rules():
    """What make can make, by the rules of the Makefile and what it includes."""
    heads = []
    parts = [path for form in ("*/rules.mk", "*/*/rules.mk")
             for path in glob.glob(os.path.join(TOP, form))]
    for path in [os.path.join(TOP, "Makefile")] + parts:
        with open(path, encoding="utf-8") as file:
            heads += re.findall(r"^([^\s#][^:=\n]*):(?!=)", file.read(), re.M)
    return {word.replace("$(OUT)", "build") for head in heads for word in head.split()}


def targets_exist(command):
    words = shlex.split(command, comments=True)
    while words and re.match(r"\w+=", words[0]):
        words.pop(0)
    if words[:1] == ["make"]:
        for word in words[1:]:
            word = re.sub(r"^build/(asan|ubsan|tsan|debug)/", "build/", word)
            check("=" in word or word.startswith("-") or word in rules(),
                  "make has no target", word)
    part = re.search(r"make bench .*--only[ =](\w+)", command)
    if part:
        with open(os.path.join(TOP, "tests", "bench", "run.py"), encoding="utf-8") as file:
            check("def %s(" % part[1] in file.read(), "make bench has no part", part[1])


def without_comment(command):
    return re.sub(r"\s+#.*", "", command).strip()


def listed(command):
    return next((row for row in NOT_RUN if re.fullmatch(row[0], without_comment(command))), None)


def command_runs(command, tree):
    def test(folder):
        targets_exist(command)
        row, why = listed(command), lacks(command)
        line = command
        if row:
            line = row[2](command) if callable(row[2]) else row[2]
        elif why:
            raise Skipped(why)
        if line:
            call(line, tree, folder)
    return test


def lines_of_shell(text):
    joined = re.sub(r"\\\n\s*", "", text)
    lines = [re.sub(r"^\$ ", "", line) for line in joined.split("\n")]
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def copy_tree(to):
    """A copy of what a clone would have, and of what make has built already, with the times that
    make compares."""
    try:
        done = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=TOP,
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="utf-8")
        names = [] if done.returncode else done.stdout.split("\0")[:-1]
    except OSError:  # without git
        names = []
    if not names:
        names = [os.path.relpath(os.path.join(root, name), TOP)
                 for root, _, found in os.walk(TOP) for name in found]
        names = [name for name in names if not name.startswith(("build" + os.sep, ".git" + os.sep))]
    names += ["build/gpt", "build/gpt.o", "build/tshard.o", "build/tshard-run", "build/found"]
    for name in names:
        if os.path.exists(os.path.join(TOP, name)):
            os.makedirs(os.path.dirname(os.path.join(to, name)), exist_ok=True)
            shutil.copy2(os.path.join(TOP, name), os.path.join(to, name))


def no_stale_entries(commands):
    def test(_):
        for row in NOT_RUN:
            check(any(listed(command) is row for command in commands),
                  "no page has a command like %s: take it out of NOT_RUN" % row[0])
    return test


def cxx17_is_clean(folder):
    """The example in C++17, without a warning of any compiler here."""
    for compiler in filter(shutil.which, ["c++", "g++", "clang++"]):
        source = os.path.join(TOP, "examples", "08_cxx.cpp")
        call(shlex.join([compiler, "-std=c++17"] + STRICT + [source]), folder, folder)


def targets_in_the_text_exist(_):
    """Of `make ...` between the words of a page and in its tables."""
    for page in filter(os.path.exists, (os.path.join(TOP, page) for page in PAGES)):
        with open(page, encoding="utf-8") as file:
            for command in re.findall(r"`(make [^`]+)`", file.read()):
                targets_exist(command)


# ---- all of it ---------------------------------------------------------------


def read_pages(tree):
    """(name, test) of what runs alone; the same of the commands, which run in this order; the
    commands' text."""
    alone, chain, commands = [(PORT + " python", python_runs(PORT))], [], []
    versions = []  # of prog.c, the newest last
    for page in PAGES:
        for block in blocks(page) if os.path.exists(os.path.join(TOP, page)) else []:
            if block.kind == "c" and "int main" in block.text and IMPLEMENTATION in block.text:
                versions = [block.text]
            elif block.kind == "diff" and block.text.startswith("--- "):
                continue  # a patch of a file; tests/added applies it
            elif block.kind == "diff":
                new = next(filter(None, (by_diff(old, block.text) for old in reversed(versions))),
                           None)
                if new is None:
                    raise Failed("%s: the diff does not apply to the program" % block.place)
                versions.append(new)
            elif block.kind == "c" and re.search(r'#include "(backends/|tshard)', block.text):
                versions.append(by_lines(versions[0], block.text))
                if "link with" in block.text:  # the command is said in a comment
                    flag = re.search(r"link with (\S+)", block.text)[1]
                    command = "cc -std=c99 -O3 prog.c -lm %s && ./a.out" % flag
                    alone.append((block.place + " " + command,
                                  program_runs(versions[-1], command)))
            elif block.kind in ("c", "cpp", "c++"):
                alone.append((block.place + " piece", piece_compiles(block)))
            elif block.kind == "python":
                alone.append((block.place + " python", python_parses(block)))
            elif block.kind in SHELL:
                for command in lines_of_shell(block.text):
                    name = "%s %s" % (block.place, without_comment(command))
                    if re.search(r"\bprog\.c\b", command):
                        alone.append((name, program_runs(versions[-1], command)))
                        continue
                    commands.append(command)
                    row = listed(command)
                    if row and not row[2]:
                        print("not run: %s: %s" % (name, row[1]))
                    if not row or row[2] or "make " in command:
                        chain.append((name, command_runs(command, tree)))
            elif block.kind not in IGNORED:
                raise Failed("%s: a block of kind '%s'" % (block.place, block.kind))
    return alone, chain, commands


def run_chain(chain):
    return [(name, *outcome(test)) for name, test in chain]


def main():
    with tempfile.TemporaryDirectory() as tree:
        try:
            copy_tree(tree)
            alone, chain, commands = read_pages(tree)
        except (Failed, OSError, ValueError) as why:
            return tell("readme", [("the pages can be read", "FAILED", why)])
        alone += [("the list of commands that are not run", no_stale_entries(commands)),
                  ("targets in the text", targets_in_the_text_exist),
              ("examples/08_cxx.cpp in C++17", cxx17_is_clean)]
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            chains = pool.map(run_chain, [[one] for one in alone[:1]] + [chain]
                              + [[one] for one in alone[1:]])
            return tell("readme", [end for ends in chains for end in ends])


if __name__ == "__main__":
    sys.exit(main())
