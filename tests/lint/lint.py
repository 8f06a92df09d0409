#!/usr/bin/env python3
"""Checks the rules of the house. Each finding is one line: file:line: what.

    lint.py [FOLDER]      the project's folder; this file's by default

A room is a section of a header with a banner "/* >>name ... MARK: - name */". tshard.h and
tshard_uv.h are made of the rooms in src/, which findings name. Private functions are
tshi_<room>_<verb> or, in rooms that share an idea, such as gemm, gemm-pack and gemm-few,
tshi_<first word>_<verb> (of a room "op-x" or "x-api": tshi_x_<verb>); those that macros generate
are not looked at.
"""

import bisect
import glob
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "support"))
from scripts import mpi_flags, mpis
import api
import calls
import dtypes
import floors
import index
import where
sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(HERE)), "src"))
import commands
import join

TOP = os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else
                      os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
COLUMNS, ROOM_LINES, OPENED = 100, 700, 10  # OPENED: rooms that are compiled alone
FUNCTION_LINES, FUNCTION_AIM, FUNCTION_SHARE = 80, 40, 0.95
EXAMPLE_LINES = 60  # of a function of examples/
GENERATED = ("tshard_cdef.h",)  # by a script, for a program to read
POSIX = "-D_POSIX_C_SOURCE=200809L"  # what backends need beside strict C99
BANNER = re.compile(r"/\* >>([\w-]+) +MARK: - ([\w-]+)")
# The library neither prints nor ends the program. What prints is the program's choice: it passes
# this logger.
PRINTS = {"tsh_log_stderr": "stderr"}
FORBIDDEN = set("abort exit _exit _Exit quick_exit raise signal printf vprintf "
                "puts putchar perror __assert_fail stdout stderr".split())

findings = []
made = {}  # {header that is made of src/: its Source}


def report(path, line, what):
    """Of a header that is made of src/, the finding names the room's file and its line there."""
    for rooms, header in floors.LISTS.items():
        source = made.get(header)
        room = source and os.path.samefile(path, source.path) and source.room_at(line)
        for floor, name, _ in join.entries(os.path.join(TOP, rooms)) if room else []:
            if name == room.name:
                path = join.path_of(os.path.join(TOP, rooms), floor, name)
                line += 2 - room.line  # a room's file begins a line above its banner
    findings.append("%s:%d: %s" % (os.path.relpath(path, TOP), line, what))


class Room:
    def __init__(self, name, line):
        self.name, self.line, self.end = name, line, line
        words = re.sub(r"^op-|-api$", "", name).split("-")
        self.prefixes = {"tshi_%s_" % words[0], "tshi_%s_" % "_".join(words)}


class Source:
    """A C file: its lines, its code without comments, strings and directives, its rooms."""

    def __init__(self, path):
        self.path = path
        with open(path, encoding="utf-8") as file:
            self.text = file.read()
        self.lines = self.text.split("\n")
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line) + 1)
        self.code = blank(self.text)
        self.rooms = []
        for number, line in enumerate(self.lines, 1):
            banner = BANNER.match(line)
            if banner:
                self.rooms.append(Room(banner[1], number))
                if banner[1] != banner[2]:
                    report(path, number, "the banner has two names: %s, %s" % banner.groups())
        for room, following in zip(self.rooms, self.rooms[1:]):
            room.end = following.line - 1
        if self.rooms:
            self.rooms[-1].end = len(self.lines)

    def line_at(self, offset):
        return bisect.bisect_right(self.starts, offset)

    def room_at(self, line):
        return next((room for room in self.rooms if room.line <= line <= room.end), None)


def blank(text):
    """The text with comments, literals and preprocessor lines turned into spaces, and the
    parentheses of (tsh_open), a function that is a macro, too."""
    def spaces(match):
        return re.sub(r"[^\n]", " ", match[0])
    text = re.sub(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', spaces, text,
                  flags=re.S)
    text = re.sub(r"\((tsh_\w+)\)\(", r" \1 (", text)
    return re.sub(r"^[ \t]*#(?:\\\n|[^\n])*", spaces, text, flags=re.M)


def functions(source):
    """(name, first line, last line) of every function that is written out."""
    code, depth, begin, name = source.code, 0, 0, None
    for match in re.finditer(r"[{};]", code):
        if match[0] == "{":
            head = code[begin:match.start()].rstrip()
            if depth == 0 and head.strip() == "extern":  # extern "C": its literal is blanked
                begin = match.end()
                continue
            if depth == 0:
                name = function_name(head)
            depth += 1
        elif match[0] == "}":
            depth = max(depth - 1, 0)
            if depth == 0 and name:
                first = source.line_at(begin + name.start(1))
                yield name[1], first, source.line_at(match.start())
                name = None
        if depth == 0:
            begin = match.end()


def function_name(head):
    """A match of the identifier before the parameter list that ends head; None if head is no
    function's."""
    if not head.endswith(")"):
        return None
    depth = 0
    for at in range(len(head) - 1, -1, -1):
        depth += (head[at] == ")") - (head[at] == "(")
        if depth == 0:
            return re.search(r"(\w+)\s*$", head[:at])
    return None


# ---- rooms -------------------------------------------------------------------


def check_joined():
    """The headers are what src/ gives, and src/ has no other files; each room is named as its file,
    needs earlier rooms only, and opens alone."""
    for path, header in floors.LISTS.items():
        with open(os.path.join(TOP, header), encoding="utf-8") as file:
            if file.read() != join.join(os.path.join(TOP, path)):
                report(os.path.join(TOP, header), 1, "is not what src/ gives: make " + header)
    listed = {room.path: room for path in floors.LISTS for room in floors.read(TOP, path)}
    for path in set(glob.glob(os.path.join(TOP, "src", "*", "*"))) ^ set(listed):
        report(path, 1, "is not in src/rooms, or not there")
    for path, room in listed.items():
        if not re.search(r"^/\* >>%s +MARK: - %s " % (room.name, room.name), room.text, re.M):
            report(path, 2, "the banner has another name than the file")
    for path, what in floors.check(TOP):
        report(path, 1, what)
    opened = OPENED if shutil.which("clang") else 0
    for command in random.sample(commands.commands("clang"), opened):
        if subprocess.run(command["arguments"], stderr=subprocess.DEVNULL).returncode:
            report(command["file"], 1, "does not compile after the rooms before it")


def check_needs(source):
    """A room needs earlier rooms only."""
    seen = set()
    for room in source.rooms:
        head = " ".join(source.lines[room.line:room.line + 6]).split("====")[0]
        needs = re.search(r"Needs:(.*)", head)
        if not needs and room.name not in ("front", "contents", "manual"):
            report(source.path, room.line, "room %s does not say what it needs" % room.name)
        for name in re.findall(r">>([\w-]+)", needs[1] if needs else ""):
            if name not in seen:
                report(source.path, room.line, "room %s needs %s, which is no earlier room"
                       % (room.name, name))
        seen.add(room.name)


def check_rooms(source):
    for room in source.rooms:
        lines = room.end - room.line + 1
        if lines > ROOM_LINES:
            report(source.path, room.line, "room %s has %d lines (at most %d)"
                   % (room.name, lines, ROOM_LINES))


# ---- functions ---------------------------------------------------------------


def check_names(source):
    """A private function stands in the room it is named after; a backend's also bears the
    backend's name."""
    backend = re.search(r"backends/tshard_(\w+)\.h$", source.path)
    for name, first, _ in functions(source):
        room = source.room_at(first)
        if name.startswith(("tsh_", "tshb_")):
            continue
        prefixes = set(room.prefixes) if room else set()
        prefixes |= {"tshi_%s_" % backend[1]} if backend else set()
        if not name.startswith(tuple(prefixes)):
            report(source.path, first, "%s stands in room %s, where private names begin with %s"
                   % (name, room.name if room else "none", " or ".join(sorted(prefixes))))


def check_forward(source):
    """Reading order is dependency order: the implementation declares no function ahead."""
    for match in re.finditer(r"^static\b[^;{}=]*\b(tshi_\w+)\s*\([^;{}]*\)\s*;", source.code, re.M):
        report(source.path, source.line_at(match.start()), "%s is declared ahead" % match[1])


def check_dtypes(source):
    for number, what in dtypes.findings(source):
        report(source.path, number, what)


def check_longest(source, most):
    """No function has more lines."""
    for name, first, last in functions(source):
        if last - first + 1 > most:
            report(source.path, first, "%s has %d lines (at most %d)"
                   % (name, last - first + 1, most))


def check_lengths(sources):
    long, total = [], 0
    for source in sources:
        check_longest(source, FUNCTION_LINES)
        for name, first, last in functions(source):
            lines = last - first + 1
            total += 1
            if lines >= FUNCTION_AIM:
                long.append((lines, name, source.path, first))
    if len(long) > (1 - FUNCTION_SHARE) * total:
        for lines, name, path, first in sorted(long, reverse=True):
            report(path, first, "%s has %d lines; %d of %d functions have %d or more (%d %% may)"
                   % (name, lines, len(long), total, FUNCTION_AIM, 100 - 100 * FUNCTION_SHARE))


def check_columns(source):
    for number, line in enumerate(source.lines, 1):
        if len(line) > COLUMNS:
            report(source.path, number, "%d columns (at most %d)" % (len(line), COLUMNS))
        if line != line.rstrip():
            report(source.path, number, "blanks at the end of the line")
        if "\t" in line and not source.path.endswith(("Makefile", ".mk")):
            report(source.path, number, "a tab")


# ---- public functions --------------------------------------------------------


def public(source):
    """(name, line) of every public function's declaration, in order."""
    for match in re.finditer(r"^TSH_API\b[^;{}]*?\b(tshb?_\w+)\s*\([^;{}]*\)[^;{}]*;",
                             source.code, re.M):
        yield match[1], source.line_at(match.start())


def documented(source, line):
    """A comment stands beside the declaration, above it, or above its group, which an empty line
    begins."""
    if "/*" in source.lines[line - 1]:
        return True
    for above in reversed(source.lines[:line - 1]):
        if not above.strip():
            return False
        if above.rstrip().endswith("*/"):
            return True
    return False


def check_public(headers, tests):
    words = set()
    for path in tests:
        with open(path, encoding="utf-8") as file:
            words.update(re.findall(r"\btshb?_\w+", file.read()))
    for source in headers:
        for name, line in public(source):
            if not documented(source, line):
                report(source.path, line, "%s is not documented" % name)
            if name not in words:
                report(source.path, line, "%s is named in no test" % name)


# ---- PyTorch's names ---------------------------------------------------------

# Modules, and what they are called for short: F is torch.nn.functional, dist torch.distributed,
# data torch.utils.data, lr_scheduler torch.optim.lr_scheduler.
TORCH = re.compile(r"(torch|nn|F|optim|lr_scheduler|data|Tensor|DTensor|dist|transformers|peft)"
                   r"(\.\w+)+$")
TORCH_LINE = re.compile(r"^(?:/\*| \*) torch: ((?:[^*]|\*(?!/))*)(\*/)?", re.M)
# Names that stand at several functions, and why.
TORCH_TWICE = {}


def check_torch(source):
    """The last lines of a comment may be "torch: F.mse_loss, nn.MSELoss", each name once."""
    text = source.text.split(api.END)[0]
    for match in TORCH_LINE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        names = re.sub(r"\n \*", " ", match[1])
        for name in names.split(","):
            if not TORCH.match(name.strip()):
                report(source.path, line, "torch: \"%s\" is no name, as F.mse_loss or nn.MSELoss "
                       "are; such lines end a comment" % name.strip())
    first = {}
    for item in api.read(TOP)[0]:
        for name in item.torch:
            at = text.count("\n", 0, max(text.find(item.text), 0)) + 1
            # an op and the layer of it, such as tsh_linear and tsh_add_linear, share one
            own = item.name.replace("tsh_add_", "tsh_")
            if first.setdefault(name, own) != own and name not in TORCH_TWICE:
                report(source.path, at, "torch: %s is %s and %s" % (name, first[name], item.name))
            if item.torch.count(name) > 1:
                report(source.path, at, "torch: %s stands twice at %s" % (name, item.name))


# ---- what the compiler sees --------------------------------------------------


def compile_all(headers, flags, output):
    """Runs cc on a file that includes every header with its implementation."""
    text = "#define TSHARD_IMPLEMENTATION\n"
    text += "".join('#include "%s"\n' % source.path for source in headers
                    if mpis() or not source.path.endswith("_mpi.h"))
    command = [os.environ.get("CC", "cc"), "-std=c99", POSIX, "-x", "c"] + flags
    for compiler in list(mpis().values())[:1]:
        command += mpi_flags(compiler)
    done = subprocess.run(command + ["-", "-o", output], input=text, stderr=subprocess.DEVNULL,
                          universal_newlines=True)
    if done.returncode:
        report(headers[0].path, 1, "does not compile with every backend: make check says more")
    return done.returncode == 0


def defined_at(headers, name):
    for source in headers:
        at = re.search(r"\b%s\b" % re.escape(name), source.code)
        if at:
            return source.path, source.line_at(at.start())
    return headers[0].path, 1


def check_streams(source):
    """A stream is named only by the function that is there to print on it. The linker does not tell
    which function that is."""
    spans = [(first, last, PRINTS.get(name)) for name, first, last in functions(source)]
    for match in re.finditer(r"\b(stdout|stderr)\b", source.code):
        line = source.line_at(match.start())
        if not any(first <= line <= last and match[0] == stream for first, last, stream in spans):
            report(source.path, line, "the library names %s" % match[0])


def check_symbols(headers, folder):
    """No writable data; only tsh_ and tshb_ names are visible; nothing prints or exits."""
    path = os.path.join(folder, "all.o")
    # Position-independent code would keep constant tables of addresses in writable sections.
    if not compile_all(headers, ["-O1", "-fno-pic", "-fno-pie", "-c"], path):
        return
    for line in subprocess.check_output(["nm", path], universal_newlines=True).splitlines():
        kind, name = line.split()[-2:]
        if kind in "bBdDCsSgG":
            what = "%s is writable data (nm: %s)" % (name, kind)
        elif kind == "U" and name in FORBIDDEN - set(PRINTS.values()):  # see check_streams
            what = "the library calls %s" % name
        elif kind.isupper() and kind != "U" and not name.startswith(("tsh_", "tshb_")):
            what = "%s is visible to the linker (nm: %s)" % (name, kind)
        else:
            continue
        report(*defined_at(headers, name.split(".")[0]), what)


def check_macros(headers, folder):
    """Only TSH_ and TSHARD_ macros are left behind by the headers."""
    path = os.path.join(folder, "all.i")
    if not compile_all(headers, ["-E", "-dD"], path):
        return
    ours, file, line = {}, "", 0
    paths = {os.path.realpath(source.path) for source in headers}
    with open(path, encoding="utf-8") as text:
        for row in text:
            marker = re.match(r'# (\d+) "(.*?)"', row)
            if marker:
                line, file = int(marker[1]) - 1, marker[2]
                continue
            line += 1
            directive = re.match(r"#\s*(define|undef)\s+(\w+)", row)
            if directive and directive[1] == "undef":
                ours.pop(directive[2], None)
            elif directive and os.path.realpath(file) in paths:
                ours[directive[2]] = (file, line)
    for name, place in ours.items():
        if not re.match(r"TSH_|TSHARD_", name) and not any(
                name + "_built" in source.code for source in headers):
            report(*place, "macro %s escapes" % name)


def main():
    headers = [Source(path) for path in [os.path.join(TOP, "tshard.h")]
               + sorted(glob.glob(os.path.join(TOP, "backends", "*.h")))]
    programs = [Source(path) for path in sorted(glob.glob(os.path.join(TOP, "backends", "*.c")))]
    texts = [path for form in ("*.c", "*.h", "*.py")
             for path in glob.glob(os.path.join(TOP, "tests", "**", form), recursive=True)]
    tests = [path for path in texts if not path.endswith(calls.PAGE)]  # that one names all of them
    texts += [os.path.join(TOP, "Makefile")] + glob.glob(os.path.join(TOP, "*", "rules.mk"))
    texts += glob.glob(os.path.join(TOP, "*", "*", "rules.mk"))
    shown = [path for path in glob.glob(os.path.join(TOP, "examples", "**", "*.[ch]"),
                                        recursive=True) if not path.endswith(GENERATED)]
    texts += shown
    texts += glob.glob(os.path.join(TOP, "examples", "*.cpp"))
    made.update((os.path.relpath(source.path, TOP), source) for source in headers
                if os.path.relpath(source.path, TOP) in floors.LISTS.values())
    check_joined()
    for source in headers + programs:
        if source not in made.values():  # check_joined looks at those
            check_needs(source)
        check_rooms(source)
    check_dtypes(headers[0])
    for source in headers:
        check_names(source)
        check_forward(source)
        check_streams(source)
    check_lengths(headers + programs)
    for path in sorted(shown):
        check_longest(Source(path), EXAMPLE_LINES)
    for source in headers + programs + [Source(path) for path in sorted(texts)]:
        check_columns(source)
    check_public(headers, tests)
    check_torch(headers[0])
    for page in (index, calls, where):
        if not api.is_current(page.PAGE, page.text(TOP), TOP):
            report(os.path.join(TOP, page.PAGE), 1,
                   "out of date: tests/lint/%s.py --write" % page.__name__)
    with tempfile.TemporaryDirectory() as folder:
        check_symbols(headers, folder)
        check_macros(headers, folder)
    for finding in findings:
        print(finding)
    print("lint: %d rooms, %d functions, %d public; %d findings" % (
        sum(len(source.rooms) for source in headers + programs),
        sum(1 for source in headers + programs for _ in functions(source)),
        sum(1 for source in headers for _ in public(source)), len(findings)))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
