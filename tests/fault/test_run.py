#!/usr/bin/env python3
"""tshard-run with small programs as ranks: lines, exit codes, signals, environment, hosts, and what
happens when somebody dies. Reports in cmocka's words. The launcher is $TSHARD_RUN, or
build/tshard-run, which make builds where it is missing."""

import concurrent.futures
import fcntl
import json
import os
import re
import select
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import termios
import time
import zlib

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(TOP, "tests", "support"))
from scripts import (LAUNCHER, NO_LAUNCHER, Skipped, check, children, free_port, has_launcher,
                     run_tests, tell)
PYTHON = [sys.executable, "-B", "-S", "-E", "-c"]
LIMIT = 20  # seconds of one launch
SLACK = 3  # seconds that a busy machine may add to what takes none


# ---- launches ----------------------------------------------------------------


def environment(extra):
    """Without what an outer launch, or somebody's shell, may have set."""
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith("TSHARD_") or name == "TSHARD_RUN"}
    return dict(kept, **extra)


class Launch:
    """A running launcher; it and, through its guard, its ranks end with the block."""

    def __init__(self, *words, env=None, terminal=False, shell=(), **options):
        def prepare():
            for name in ("SIGINT", "SIGHUP"):  # a background shell, nohup ignore these
                signal.signal(getattr(signal, name), signal.SIG_DFL)
            if terminal:  # stdin becomes the terminal of a new session
                os.setsid()
                fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        options.setdefault("stdin", subprocess.DEVNULL)
        options.setdefault("stdout", subprocess.PIPE)
        options.setdefault("stderr", subprocess.PIPE)
        self.process = subprocess.Popen(
            [*shell, LAUNCHER] + [str(word) for word in words], env=environment(env or {}),
            preexec_fn=prepare, **options)
        self.read = b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for file in (self.process.stdin, self.process.stdout, self.process.stderr):
            if file:
                file.close()

    def lines(self, count):
        """The next lines of stdout, sorted."""
        end = time.monotonic() + LIMIT
        while self.read.count(b"\n") < count:
            ready = select.select([self.process.stdout], [], [], max(0, end - time.monotonic()))[0]
            piece = os.read(self.process.stdout.fileno(), 65536) if ready else b""
            check(piece, count, "lines awaited, there are:", self.read)
            self.read += piece
        *lines, self.read = self.read.split(b"\n", count)
        return sorted(line.decode() for line in lines)

    def end(self, limit=LIMIT, text=None):
        """Exit code, what lines() has not returned of stdout, and stderr."""
        out, err = self.process.communicate(text, timeout=limit)
        out = self.read + out if out is not None else self.read
        return self.process.returncode, out, err.decode() if err is not None else None


def launch(*words, env=None, text=None, limit=LIMIT, **options):
    if text is not None:
        options["stdin"] = subprocess.PIPE
    with Launch(*words, env=env, **options) as job:
        return job.end(limit, text)


def python(code, *words):
    return PYTHON + ["import os, sys, time, signal, json\nrank = int(os.environ['TSHARD_RANK'])\n"
                     + code] + [str(word) for word in words]


def by_rank(out):
    """{rank: [line, ...]} of what the launcher passed on."""
    lines = {}
    for line in out.decode().splitlines():
        match = re.match(r"\[(\d+)\] (.*)$", line)
        check(match, "no label:", repr(line))
        lines.setdefault(int(match[1]), []).append(match[2])
    return lines


def environments(*words, env=None, **options):
    """{rank: its TSHARD_ variables} of one launch that must succeed."""
    show = "print(json.dumps({n: v for n, v in os.environ.items() if n.startswith('TSHARD_')}))"
    code, out, err = launch(*words, *python(show), env=env, **options)
    check(code == 0 and err == "", code, err)
    return {rank: json.loads(lines[0]) for rank, lines in by_rank(out).items()}


def alive(pid):
    try:
        with open("/proc/%d/stat" % pid) as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds, *what):
    end = time.monotonic() + seconds
    while not condition():
        check(time.monotonic() < end, "not within %g s:" % seconds, *what)
        time.sleep(0.02)


# ---- lines -------------------------------------------------------------------


CHATTER = """
import zlib
lines = []
for i in range(int(sys.argv[1])):
    body = '%d %d %s' % (rank, i, 'x' * (i * 7919 % 180))
    lines.append('%s %08x\\n' % (body, zlib.crc32(body.encode())))
out, err = ''.join(lines[::2]).encode(), ''.join(lines[1::2]).encode()
while out or err:  # in pieces that end anywhere
    out, err = out[os.write(1, out[:4093]):], err[os.write(2, err[:1021]):]
"""


def check_chatter(out, ranks, count):
    seen = {}
    for rank, lines in by_rank(out).items():
        for line in lines:
            body, _, sum_ = line.rpartition(" ")
            check(sum_ == "%08x" % zlib.crc32(body.encode()), "torn:", line)
            number = int(body.split()[1])
            check(int(body.split()[0]) == rank, "label", rank, "before", line)
            seen.setdefault((rank, number % 2), []).append(number)
    for rank in range(ranks):
        for odd in (0, 1):
            check(seen.get((rank, odd)) == list(range(odd, count, 2)), "rank", rank, "lost lines")


def lines_are_whole_under_load(folder):
    """100,000 lines of 4 ranks, from stdout and stderr into one pipe and into two."""
    code, out, _ = launch("-n", 4, *python(CHATTER, 12500), stderr=subprocess.STDOUT)
    check(code == 0, code)
    check_chatter(out, 4, 12500)
    code, out, err = launch("-n", 4, *python(CHATTER, 12500))
    check(code == 0 and len(out.splitlines()) == len(err.splitlines()) == 25000, code)
    check_chatter(out + err.encode(), 4, 12500)


def long_lines_come_in_pieces(folder):
    sizes = [0, 65535, 65536, 65537, 1 << 20, 3, 131073, 5]
    write = """
data = b'\\n'.join(bytes([97 + (i * 31 + rank) % 26 for i in range(997)] * (n // 997 + 1))[:n]
                  for n in json.loads(sys.argv[1]))
while data: data = data[os.write(1, data[:50021]):]
"""
    code, out, _ = launch("-n", 3, *python(write, sizes))
    check(code == 0, code)
    for rank in range(3):
        letters = bytes([97 + (i * 31 + rank) % 26 for i in range(997)])
        mine = []
        for line in out.split(b"\n")[:-1]:
            match = re.match(rb"\[%d\](\+?) (.*)$" % rank, line)
            if match and match[1]:
                check(len(mine[-1]) >= 65536, "a piece of", len(mine[-1]))
                mine[-1] += match[2]
            elif match:
                mine.append(match[2])
            check(len(line) <= 65537 + 8, "a line of", len(line))
        check([len(line) for line in mine] == sizes, [len(line) for line in mine])
        check(all(line == (letters * (len(line) // 997 + 1))[:len(line)] for line in mine), rank)
    check(len(re.findall(rb"^\[0\] ", out, re.M)) == len(sizes), "labels")


def last_lines_are_completed(folder):
    words = "printf 'a\\n\\n' >/dev/stdout; printf b; printf c >&2"
    code, out, err = launch("-n", 2, "sh", "-c", words)
    check(code == 0 and by_rank(out) == {0: ["a", "", "b"], 1: ["a", "", "b"]}, out)
    check(sorted(err.splitlines()) == ["[0] c", "[1] c"], err)


def a_slow_reader_makes_ranks_wait(folder):
    """Nothing is read for a while: memory stays small, ranks wait, and nothing is lost."""
    mark = os.path.join(folder, "done")
    write = "line = b'x' * 99 + b'\\n'\nfor i in range(800): os.write(1, line * 100)\n" \
            "open(%r + str(rank), 'w').close()" % mark
    with Launch("-n", 4, *python(write)) as job:
        time.sleep(1.5)
        with open("/proc/%d/status" % job.process.pid) as file:
            now = int(re.search(r"VmRSS:\s*(\d+) kB", file.read())[1])
        check(now < (160 if "san/" in LAUNCHER else 12) * 1024, "memory", now, "kB")
        check(not any(os.path.exists(mark + str(rank)) for rank in range(4)), "ranks did not wait")
        code, out, err = job.end()
    check(code == 0 and err == "", code, err)
    check(all(len(lines) == 80000 and set(lines) == {"x" * 99}
              for lines in by_rank(out).values()), "lines were lost")


def a_reader_that_takes_nothing_can_be_interrupted(folder):
    with Launch("-n", 2, "yes") as job:
        time.sleep(0.5)
        for _ in range(2):
            job.process.send_signal(signal.SIGINT)
            time.sleep(0.2)
        begin = time.monotonic()
        job.process.wait(LIMIT)
        check(time.monotonic() - begin < 1 + SLACK, time.monotonic() - begin)
        check(job.process.returncode == 130, job.process.returncode)


def a_reader_that_leaves_ends_the_job(folder):
    with Launch("-n", 2, "yes") as job:
        job.lines(1)
        job.process.stdout.close()
        job.process.stdout = None
        code, _, err = job.end()
    check(code == 128 + signal.SIGPIPE, code)
    check(re.match(r"tshard-run: rank [01] failed first: killed by signal 13", err), err)
    code, _, err = launch("-n", 1, "sh", "-c", "trap '' PIPE; echo a 2>&-; exit 0",
                          stdout=open("/dev/full", "w"))
    check(code == 1 and "No space left" in err, code, err)


def stdin_goes_to_rank_0(folder):
    show = "print(os.path.realpath('/proc/self/fd/0') == '/dev/null', sys.stdin.read())"
    code, out, _ = launch("-n", 3, *python(show), text=b"some words")
    check(code == 0 and by_rank(out) == {0: ["False some words"], 1: ["True "], 2: ["True "]}, out)


# ---- how it ends -------------------------------------------------------------


def the_exit_code_is_the_first_failure(folder):
    for end, code, how in (("sys.exit(0)", 0, ""), ("sys.exit(3)", 3, "exit code 3"),
                           ("sys.exit(255)", 255, "exit code 255"),
                           ("os.kill(os.getpid(), 9)", 137, "killed by signal 9 (Killed)"),
                           ("os.kill(os.getpid(), 15)", 143, "killed by signal 15 (Terminated)")):
        got, out, err = launch("-n", 3, *python("if rank == 1: %s" % end))
        check(got == code and out == b"", end, got, out)
        check(err == ("tshard-run: rank 1 failed first: %s\n" % how if code else ""), err)
    later = "time.sleep([0, .6, .2][rank]); sys.exit(10 * rank)"
    got, _, err = launch("-n", 3, *python(later))
    check(got == 20 and err == "tshard-run: rank 2 failed first: exit code 20\n", got, err)


def of_many_ends_at_once_the_killed_rank_is_named(folder):
    """The launcher sleeps while rank 2 is killed and the others exit because of it."""
    wait = "signal.signal(15, lambda *_: os._exit(1))\nprint(os.getpid(), flush=True)\n" \
           "time.sleep(20)"
    with Launch("-n", 4, *python(wait)) as job:
        pids = [int(line.split()[1]) for line in job.lines(4)]
        job.process.send_signal(signal.SIGSTOP)
        os.kill(pids[2], signal.SIGKILL)
        for rank in (0, 1, 3):
            os.kill(pids[rank], signal.SIGTERM)
        wait_until(lambda: not any(map(alive, pids)), LIMIT, "ranks end")
        job.process.send_signal(signal.SIGCONT)
        code, _, err = job.end()
    check(code == 137 and "rank 2 failed first: killed by signal 9" in err, code, err)


def the_others_end_when_one_fails(folder):
    """Two seconds in peace, then SIGTERM, then SIGKILL, also for what ranks have started."""
    marks = """
begin = time.monotonic()
def say(*what): print(*what, round(time.monotonic() - begin, 1), flush=True)
def term(*_):
    say('term')
    if rank == 2: sys.exit(9)
signal.signal(signal.SIGTERM, term)
if rank == 3: print('child', __import__('subprocess').Popen(['sleep', '20']).pid, flush=True)
if rank == 1: time.sleep(.3); sys.exit(5)
if rank == 0: time.sleep(1.5); say('alone'); sys.exit(7)
for _ in range(400): time.sleep(.05)
"""
    begin = time.monotonic()
    code, out, err = launch("-n", 4, *python(marks))
    seconds = time.monotonic() - begin
    said = {rank: [line.split() for line in lines] for rank, lines in by_rank(out).items()}
    check(code == 5 and err == "tshard-run: rank 1 failed first: exit code 5\n", code, err)
    check([words[0] for words in said[0]] == ["alone"], said)
    check([words[0] for words in said[2]] == ["term"] and float(said[2][0][1]) > 1.8, said)
    check([words[0] for words in said[3]] == ["child", "term"], said)
    check(4 < seconds < 4.5 + SLACK, seconds)
    wait_until(lambda: not alive(int(said[3][0][1])), SLACK, "a child of rank 3 ends")


def what_ranks_leave_behind_ends(folder):
    """A child of a rank that holds its stdout ends with the job; one that left its session is let
    go."""
    begin = time.monotonic()
    code, out, err = launch("-n", 2, "sh", "-c", "sleep 20 & echo $!")
    check(code == 0 and err == "" and 2 < time.monotonic() - begin < 2 + SLACK, code, err)
    pids = [int(lines[0]) for lines in by_rank(out).values()]
    wait_until(lambda: not any(map(alive, pids)), SLACK, "children of ranks end")
    begin = time.monotonic()
    code, out, err = launch("-n", 2, *python(
        "if os.fork() == 0:\n    os.setsid(); time.sleep(12); os._exit(0)\nprint('x')"))
    check(code == 0 and by_rank(out) == {0: ["x"], 1: ["x"]}, code, out, err)
    check(time.monotonic() - begin < 6 + SLACK, time.monotonic() - begin)


def ranks_end_when_the_launcher_is_killed(folder):
    ignore = "signal.signal(15, signal.SIG_IGN if rank else signal.SIG_DFL)\n" \
             "print(os.getpid(), flush=True)\ntime.sleep(20)"
    with Launch("-n", 3, *python(ignore), start_new_session=True) as job:
        pids = [int(line.split()[1]) for line in job.lines(3)]
        os.killpg(job.process.pid, signal.SIGKILL)  # with what it keeps in its own group
        job.process.wait()
        wait_until(lambda: not alive(pids[0]), SLACK, "rank 0 ends by SIGTERM")
        check(alive(pids[1]), "rank 1 had no time to end")
        wait_until(lambda: not any(map(alive, pids)), 2 + SLACK, "ranks end")


def guard_of(launcher):
    return children(launcher, os.path.realpath(LAUNCHER))


def new_guard_of(launcher, old):
    wait_until(lambda: guard_of(launcher) not in ([], [old]), SLACK, "a new guard")
    new, = guard_of(launcher)
    wait_until(lambda: len(os.listdir("/proc/%d/fd" % new)) == 1, SLACK, "it closes the rest")
    return new


def ranks_end_when_guard_and_launcher_are_killed(folder):
    """One after the other, also where a rank ignores SIGTERM; or both at once."""
    show = "signal.signal(15, signal.SIG_IGN if rank and %d else signal.SIG_DFL)\n" \
           "print(os.getpid(), flush=True)\ntime.sleep(20)"
    for wait in (1, 0):
        with Launch("-n", 3, *python(show % wait), start_new_session=True) as job:
            pids = [int(line.split()[1]) for line in job.lines(3)]
            guard, = guard_of(job.process.pid)
            os.kill(guard, signal.SIGKILL)
            if wait:
                new_guard_of(job.process.pid, guard)
                time.sleep(0.2)
            job.process.kill()
            job.process.wait()
            wait_until(lambda: not any(map(alive, pids)), 2 * wait + SLACK, "ranks end")


def the_guard_holds_nothing_of_the_ranks(folder):
    """Nor does the one that takes its place."""
    with Launch("-n", 2, *python("print(1, flush=True)\ntime.sleep(1)")) as job:
        job.lines(2)
        old, = guard_of(job.process.pid)
        check(len(os.listdir("/proc/%d/fd" % old)) == 1, os.listdir("/proc/%d/fd" % old))
        os.kill(old, signal.SIGKILL)
        new = new_guard_of(job.process.pid, old)
        code, _, err = job.end()
        check(code == 0 and err == "" and not alive(new), code, err)


def programs_that_cannot_start(folder):
    path = os.path.join(folder, "text")
    with open(path, "w") as file:
        file.write("echo not executable\n")
    for name, why in ((path, "permission denied"), (folder, "permission denied"),
                      ("no-such-program-anywhere", "no such file or directory")):
        code, out, err = launch("-n", 2, "--max-restarts", 3, name, "word")
        check(code == 127 and out == b"", name, code, out)
        check(err == "tshard-run: cannot start %s: %s\n" % (name, why), err)


def a_failed_job_starts_anew(folder):
    show = """
names = ('RESTART', 'JOB', 'KEY', 'PORT')
print(json.dumps([os.environ['TSHARD_' + name] for name in names]), flush=True)
counts = [time.sleep(.03) or len(os.listdir('/proc/%d/fd' % os.getppid())) for _ in range(9)]
print(min(counts), flush=True)  # more while it starts a rank, fewer when one has ended
mark = sys.argv[2] + os.environ['TSHARD_JOB']
if rank == 1: open(mark, 'w').close()
for _ in range(200 if rank == 0 else 0): os.path.exists(mark) or time.sleep(.05)
sys.exit(4 if rank == 1 and int(os.environ['TSHARD_RESTART']) < int(sys.argv[1]) else 0)
"""
    for fails, restarts, end in ((3, 5, 0), (9, 2, 4)):
        code, out, err = launch("-n", 2, "--max-restarts", restarts,
                                *python(show, fails, folder + "/"))
        starts = min(fails, restarts) + 1
        check(code == end, code, err)
        told = ["; restart %d of %d" % (i, restarts) for i in range(1, starts)] + [""] * (end > 0)
        check(err.splitlines() == ["tshard-run: rank 1 failed first: exit code 4" + word
                                   for word in told], err)
        zero, one = (by_rank(out)[rank] for rank in (0, 1))
        check(zero[::2] == one[::2] and len(zero) == 2 * starts, zero, one)
        runs = [json.loads(line) for line in zero[::2]]
        check([run[0] for run in runs] == [str(i) for i in range(starts)], runs)
        for i, what in ((1, "jobs"), (2, "keys")):
            check(len({run[i] for run in runs}) == starts, what, runs)
        check(len(set(one[1::2])) == 1, "descriptors of the launcher:", one[1::2])
    code, out, _ = launch("-n", 1, "--max-restarts", 1, "--job", "name",
                          *python(show.replace("rank == 1", "True"), 1, folder + "/"))
    check([json.loads(line)[1] for line in by_rank(out)[0][::2]] == ["name", "name"], out)


def a_failed_job_goes_on_with_fewer(folder):
    show = """
print(os.environ['TSHARD_SIZE'], os.environ['TSHARD_LOCAL_SIZE'], flush=True)
sys.exit(4 if int(os.environ['TSHARD_SIZE']) > int(sys.argv[1]) else 0)
"""
    for words, last, end, sizes in ((["--min-ranks", 2], 3, 0, [5, 4, 3]),
                                    (["--min-ranks", 2, "--replica-ranks", 2], 1, 4, [5, 3]),
                                    (["--min-ranks", 4, "--max-restarts", 3], 1, 4, [5, 4, 4, 4])):
        code, out, err = launch("-n", 5, *words, *python(show, last))
        check(code == end, words, code, err)
        check(by_rank(out)[0] == ["%d %d" % (n, n) for n in sizes], words, out)
        check([line.rpartition(" with ")[2] for line in err.splitlines()][:len(sizes) - 1] ==
              ["%d ranks" % n for n in sizes[1:]], words, err)


# ---- signals -----------------------------------------------------------------


LISTENER = """
def hear(number, frame):
    os.write(1, (signal.Signals(number).name + '\\n').encode())
    if number == int(sys.argv[1]): os._exit(int(sys.argv[2]))
for number in (1, 2, 10, 12, 15): signal.signal(number, hear)
os.write(1, b'ready\\n')
for _ in range(40): time.sleep(.5)
"""


def signals_are_passed_on(folder):
    with Launch("-n", 3, "--max-restarts", 2, *python(LISTENER, 15, 0)) as job:
        check(job.lines(3) == ["[%d] ready" % rank for rank in range(3)])
        for name in ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGINT", "SIGUSR1"):
            job.process.send_signal(getattr(signal, name))
            check(job.lines(3) == ["[%d] %s" % (rank, name) for rank in range(3)], name)
    with Launch("-n", 3, "--max-restarts", 2, *python(LISTENER, 15, 6)) as job:
        job.lines(3)
        job.process.terminate()
        code, out, err = job.end()
        check(code == 6 and out.count(b"SIGTERM") == 3 and "restart" not in err, code, out, err)
    with Launch("-n", 3, "--max-restarts", 2, *python(LISTENER, 15, 0)) as job:
        job.lines(3)
        job.process.terminate()
        code, _, err = job.end()
        check(code == 0 and err == "", code, err)


def a_terminal_is_for_rank_0(folder):
    """Its lines, but not in the background; and Ctrl-C comes once."""
    hear = "signal.signal(2, lambda *_: os.write(1, b'SIGINT\\n'))\nprint('ready', flush=True)\n" \
           "print(sys.stdin.readline().strip(), flush=True)\n" \
           "for _ in range(15): time.sleep(.1)"
    keyboard, terminal = os.openpty()
    try:
        with Launch("-n", 2, *python(hear), terminal=True, stdin=terminal) as job:
            check(job.lines(3) == ["[0] ready", "[1] ", "[1] ready"])
            os.write(keyboard, b"words\n")
            check(job.lines(1) == ["[0] words"])
            os.write(keyboard, b"\x03")
            code, out, _ = job.end()
            check(code == 0 and by_rank(out) == {0: ["SIGINT"], 1: ["SIGINT"]}, code, out)
        background = ["sh", "-c", 'set -m; "$@" & wait $!', "sh"]
        with Launch("-n", 1, *python(hear), terminal=True, stdin=terminal, shell=background) as job:
            check(job.lines(2) == ["[0] ", "[0] ready"], "rank 0 has no terminal")
            check(job.end()[0] == 0)
    finally:
        os.close(keyboard)
        os.close(terminal)


def a_second_interrupt_kills(folder):
    with Launch("-n", 3, *python(LISTENER, 0, 0)) as job:
        job.lines(3)
        for name in ("SIGINT", "SIGTERM"):
            job.process.send_signal(getattr(signal, name))
            time.sleep(.3)
        begin = time.monotonic()
        code, out, err = job.end()
        check(code == 137 and time.monotonic() - begin < SLACK, code, err)
        check(out.count(b"SIGINT") == 3 and out.count(b"SIGTERM") == 0, out)


def an_interrupt_that_is_not_heard_kills_in_the_end(folder):
    with Launch("-n", 2, "--grace", 4, *python(LISTENER, 0, 0)) as job:
        job.lines(2)
        begin = time.monotonic()
        job.process.send_signal(signal.SIGINT)
        code, out, _ = job.end()
        seconds = time.monotonic() - begin
        check(code == 137 and 3.9 < seconds < 4 + SLACK, code, seconds)
        check(out.count(b"SIGINT") == 2, out)


def an_ignored_hangup_stays_ignored(folder):
    with Launch("-n", 1, "nohup", LAUNCHER, "-n", "1", *python(LISTENER, 15, 0)) as job:
        check(job.lines(1) == ["[0] [0] ready"])
        job.process.send_signal(signal.SIGHUP)
        time.sleep(.3)
        job.process.terminate()
        code, out, err = job.end()
        check(b"SIGHUP" not in out and b"SIGTERM" in out, code, out, err)


# ---- what a rank is given ----------------------------------------------------


def every_rank_finds_its_environment(folder):
    outer = {"TSHARD_" + name: "77" for name in
             ("RANK SIZE LOCAL_RANK LOCAL_SIZE HOST PORT JOB LISTENER RESTART KEY").split()}
    outer.update(TSHARD_KEY_FILE="/nowhere", TSHARD_HEARTBEAT="2", TSHARD_TIMEOUT="9")
    found = environments("-n", 3, env=outer)
    check(sorted(found) == [0, 1, 2], found)
    for rank, env in found.items():
        fixed = {"RANK": str(rank), "SIZE": "3", "LOCAL_RANK": str(rank), "LOCAL_SIZE": "3",
                 "HOST": "127.0.0.1", "RESTART": "0", "HEARTBEAT": "2", "TIMEOUT": "9"}
        check({name: env.get("TSHARD_" + name) for name in fixed} == fixed, env)
        check(re.fullmatch("[0-9a-f]{64}", env["TSHARD_KEY"]), env)
        check("TSHARD_KEY_FILE" not in env, env)
        check(env.get("TSHARD_LISTENER") == ("3" if rank == 0 else None), env)
        check(all(env["TSHARD_" + name] == found[0]["TSHARD_" + name]
                  for name in ("KEY", "PORT", "JOB")), found)
    check(found[0]["TSHARD_PORT"] not in ("77", "0") and found[0]["TSHARD_JOB"] != "77", found)


def ranks_have_no_other_descriptors(folder):
    show = """
import socket, stat
links = {}
for fd in map(int, os.listdir('/proc/self/fd')):
    try: links[fd] = stat.S_IFMT(os.fstat(fd).st_mode)
    except OSError: pass
say = {'fds': links}
if rank == 0:
    s = socket.socket(fileno=int(os.environ['TSHARD_LISTENER']))
    at = s.getsockname()
    say['listens'] = s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    say['at'] = [at[0], str(at[1])] == [os.environ['TSHARD_HOST'], os.environ['TSHARD_PORT']]
    c = socket.create_connection(at); c.close(); s.close()
    try: socket.create_connection(at); say['closed'] = False
    except ConnectionRefusedError: say['closed'] = True
print(json.dumps(say))
"""
    read, write = os.pipe()
    high = os.dup2(write, 40)
    try:
        code, out, err = launch("-n", 3, *python(show), pass_fds=(read, write, high))
    finally:
        for fd in (read, write, high):
            os.close(fd)
    check(code == 0, code, err)
    for rank, lines in by_rank(out).items():
        said = json.loads(lines[0])
        kinds = {int(fd): kind for fd, kind in said["fds"].items()}
        check(sorted(kinds) == ([0, 1, 2, 3] if rank == 0 else [0, 1, 2]), rank, kinds)
        check(kinds[1] == kinds[2] == stat.S_IFIFO, rank, kinds)
        if rank == 0:
            check(said["listens"] == 1 and said["at"] and said["closed"], said)


def closed_streams_do_no_harm(folder):
    """A launcher without stdin, stdout and stderr."""
    mark = os.path.join(folder, "mark")
    code = "os.write(1, b'x'); open(%r + str(rank), 'w').write(str(len(os.listdir(" \
           "'/proc/self/fd'))))" % mark
    done = subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", LAUNCHER, "-n", "2"]
                          + python(code), env=environment({}), timeout=LIMIT)
    check(done.returncode == 0, done.returncode)
    for rank in range(2):
        with open(mark + str(rank)) as file:
            check(file.read() == str(6 - rank), "descriptors of rank", rank)  # one reads the list


def two_jobs_run_at_once(folder):
    show = "print(os.environ['TSHARD_PORT'], os.environ['TSHARD_KEY'], os.environ['TSHARD_JOB']," \
           "flush=True); sys.stdin.read() if rank == 0 else 0"
    with Launch("-n", 2, *python(show), stdin=subprocess.PIPE) as one:
        with Launch("-n", 2, *python(show), stdin=subprocess.PIPE) as two:
            said = [[line.split()[1:] for line in job.lines(2)] for job in (one, two)]
            check(said[0][0] == said[0][1] and said[1][0] == said[1][1], said)
            check(all(a != b for a, b in zip(said[0][0], said[1][0])), said)
            check(one.end(text=b"")[0] == 0 and two.end(text=b"")[0] == 0)


def many_ranks_start(folder):
    begin = time.monotonic()
    code, out, err = launch("-n64", "--", "sh", "-c", "echo $TSHARD_RANK")
    check(code == 0 and by_rank(out) == {rank: [str(rank)] for rank in range(64)}, code, err)
    check(time.monotonic() - begin < 2 + SLACK, time.monotonic() - begin)


# ---- command line and hosts --------------------------------------------------


def mistakes_are_one_sentence(folder):
    for words, why in (
            ([], "no program is named"), (["-n", "2"], "no program is named"),
            (["-n", "0", "x"], "-n takes a whole number from 1 to"),
            (["-n", "two", "x"], "not 'two'"), (["-n", "2.5", "x"], "not '2.5'"),
            (["-n", "99999999999", "x"], "-n takes"), (["-n"], "-n wants a value"),
            (["--port", "65536", "x"], "--port takes a whole number from 1 to 65535"),
            (["--port=-1", "x"], "not '-1'"), (["--max-restarts", "-1", "x"], "--max-restarts"),
            (["--wrong", "x"], "there is no option --wrong"), (["-x", "y"], "no option -x"),
            (["--hosts", "", "x"], "--hosts is empty"), (["--node-rank", "1", "x"], "rank 1"),
            (["--hosts", "localhost:2,", "--node-rank", "1", "x"], "numbered from 0 to 0"),
            (["--hosts", ",", "x"], "there is no host"), (["--hosts", "a:0", "x"], "'a:0'"),
            (["--hosts", "a:x", "x"], "'a:x'"), (["--hosts", "fd00::1", "x"], "[address]:slots"),
            (["--hosts", "[fd00::1", "x"], "'[fd00::1'"), (["--hosts", "[]:1", "x"], "'[]:1'"),
            (["--hosts", "a:2,b:2", "x"], "--node-rank is missing"),
            (["--hosts", "a:2,b:2", "--node-rank", "2", "x"], "--node-rank 2"),
            (["--hosts", "a:2,b:2", "--node-rank", "0", "-n", "5", "x"], "only 4 slots"),
            (["--hosts", "a:60000,b:60000", "--node-rank", "0", "x"], "more than 65535"),
            (["--hosts", "a", "--hostfile", "b", "x"], "not both"),
            (["--hostfile", "/no/such/file", "x"], "No such file"),
            (["--hostfile", "/dev/null", "x"], "empty"), (["--hostfile", "/", "x"], "directory"),
            (["--min-ranks", "3", "-n", "2", "x"], "more than the 2 ranks"),
            (["--replica-ranks", "2", "x"], "needs --min-ranks"),
            (["--hosts", "a:2,b:2", "--node-rank", "0", "--min-ranks", "1", "x"], "for one host"),
            (["--job", "x" * 300, "x"], "--job is too long")):
        code, out, err = launch(*words)
        check(code == 2 and out == b"" and err.count("\n") == 1, words, code, out, err)
        check(err.startswith("tshard-run: ") and why in err, words, err)
    for word in ("--help", "-h"):
        code, out, err = launch(word)
        check(code == 0 and err == "" and b"--max-restarts R" in out and b"29400" in out, out)
    code, out, _ = launch("-n", 1, "echo", "-n", "--help", "--")
    check(code == 0 and by_rank(out) == {0: ["--help --"]}, out)


def two_hosts(words, extra, port):
    """What the ranks of both nodes find, the launchers running side by side."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        nodes = [pool.submit(environments, *words, "--node-rank", node, "--port", port, env=extra)
                 for node in (1, 0)]
        return dict(list(nodes[0].result().items()) + list(nodes[1].result().items()))


def hosts_share_one_numbering(folder):
    path = os.path.join(folder, "hosts")
    with open(path, "w") as file:
        file.write("# two hosts\n\n127.0.0.1 slots=2\t# the first\r\n  127.0.0.2:3  \n#[::1]:7\n")
    for words, size in ((["--hosts", "127.0.0.1:2,127.0.0.2:3"], 5), (["--hostfile", path], 5),
                        (["--hostfile=" + path, "-n", "4", "--job", "mine"], 4)):
        port = free_port()
        found = two_hosts(words, {"TSHARD_KEY": "", "TSHARD_BIND": "127.0.0.9"}, port)
        check(sorted(found) == list(range(size)), found)
        for rank, env in found.items():
            fixed = {"SIZE": str(size), "HOST": "127.0.0.1", "PORT": str(port), "RESTART": "0",
                     "LOCAL_RANK": str(rank % 2 if rank < 2 else rank - 2), "KEY": "",
                     "LOCAL_SIZE": str(2 if rank < 2 else size - 2), "BIND": "127.0.0.9",
                     "JOB": "mine" if size == 4 else "tshard"}
            check({name: env.get("TSHARD_" + name) for name in fixed} == fixed, rank, env)
            check(("TSHARD_LISTENER" in env) == (rank == 0), rank, env)
    check(len(environments("--hosts", "localhost", "--node-rank", 0)) == 1)
    check(len(environments("--hosts", "a:3,")) == 3, "one host is this host")
    check(launch("--hosts", "127.0.0.1:2,127.0.0.2:2", "-n", 2, "--node-rank", 1, "false")[0] == 0,
          "a host without ranks")
    for text, why in (("a\nb slots=x\n", ":2: 'slots=x'"), ("a b\n", ":1: 'b'"),
                      ("\n\n::1 slots=2\n", ":3: '::1' is no host"), ("# a\n", "there is no host")):
        with open(path, "w") as file:
            file.write(text)
        code, _, err = launch("--hostfile", path, "x")
        check(code == 2 and why in err and err.count("\n") == 1, text, code, err)


def rank_0_listens_where_it_is_told(folder):
    show = """
import socket
if rank == 0:
    s = socket.socket(fileno=3)
    print(s.getsockname()[:2] == (os.environ['TSHARD_HOST'], int(os.environ['TSHARD_PORT'])))
"""
    hosts = ["127.0.0.2"]
    try:
        free_port("::1")
        hosts.append("[::1]")
    except OSError:
        print("skip: the part with IPv6, which is not here")
    for host in hosts:
        port = free_port(host.strip("[]"))
        words = ["--hosts", host + ":1,127.0.0.3", "--node-rank", 0, "--port", port]
        code, out, err = launch(*words, *python(show))
        check(code == 0 and by_rank(out) == {0: ["True"]}, host, out, err)
        code, out, err = launch("-n", 2, "--port", port, *python(show))
        check(code == 0 and by_rank(out) == {0: ["True"]}, "one host", out, err)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for words in (["-n", 2], ["--hosts", "127.0.0.1,127.0.0.2", "--node-rank", 0]):
            code, out, err = launch(*words, "--port", port, "--max-restarts", 2, "true")
            check(code == 1 and out == b"", code, out)
            check(err == "tshard-run: cannot listen at 127.0.0.1 port %d: Address already in use\n"
                  % port, err)
    code, _, err = launch("--hosts", "no.such.host.invalid,b", "--node-rank", 0, "true",
                          env={"TSHARD_KEY": "k" * 16})
    check(code == 1 and "host no.such.host.invalid: " in err and err.count("\n") == 1, code, err)


def a_name_of_loopback_is_no_host_for_others(folder):
    name = socket.gethostname()
    try:
        found = {at[4][0] for at in socket.getaddrinfo(name, 1)}
    except OSError:
        found = set()
    if name == "localhost" or not found or not all(
            at == "::1" or at.startswith("127.") for at in found):
        raise Skipped("this host's name is not one of loopback")
    code, out, err = launch("--hosts", name + ",b", "--node-rank", 0, "true",
                            env={"TSHARD_KEY": "k" * 16})
    check(code == 1 and out == b"" and "name the first host by its address" in err, code, err)


def several_hosts_need_a_key(folder):
    words = ["--hosts", "alpha:2,beta:2", "--node-rank", 1]
    path = os.path.join(folder, "key")
    for env, why in (({}, "set TSHARD_KEY or TSHARD_KEY_FILE"), ({"TSHARD_KEY": ""}, "need a key"),
                     ({"TSHARD_INSECURE": "0"}, "TSHARD_INSECURE=1"),
                     ({"TSHARD_INSECURE": "no"}, 'TSHARD_INSECURE is "no"; it takes 0 or 1'),
                     ({"TSHARD_INSECURE": "11"}, 'TSHARD_INSECURE is "11"; it takes 0 or 1'),
                     ({"TSHARD_KEY": "secret"}, "tshard-run --new-key FILE"),
                     ({"TSHARD_KEY_FILE": path}, "TSHARD_KEY_FILE %s: No such file" % path)):
        code, out, err = launch(*words, "true", env=env)
        check(code == 2 and out == b"" and err.count("\n") == 1 and why in err, env, code, err)
    secret = "a secret of 22 letters"
    for text, mode, why in (("secret", 0o600, "less than 16 bytes can be guessed"),
                            (secret, 0o640, "(mode 0640): chmod 600 " + path),
                            (secret, 0o604, "(mode 0604): chmod 600 " + path)):
        with open(path, "w") as file:
            file.write(text)
        os.chmod(path, mode)
        code, out, err = launch(*words, "true", env={"TSHARD_KEY_FILE": path})
        check(code == 2 and out == b"" and err.count("\n") == 1 and why in err, text, code, err)
    os.chmod(path, 0o600)
    for env in ({"TSHARD_KEY": secret}, {"TSHARD_KEY_FILE": path}, {"TSHARD_INSECURE": "1"}):
        found = environments(*words, env=env)
        check(sorted(found) == [2, 3], found)
        for each in found.values():
            given = {name: each[name] for name in each
                     if name in ("TSHARD_KEY", "TSHARD_KEY_FILE", "TSHARD_INSECURE")}
            check(given == env and each["TSHARD_PORT"] == "29400", given)
            check(each["TSHARD_HOST"] == "alpha", each)


def a_new_key_is_written(folder):
    path = os.path.join(folder, "new-key")
    before = os.umask(0o277)
    try:
        code, out, err = launch("--new-key", path)
    finally:
        os.umask(before)
    check(code == 0 and err == "" and path.encode() in out, code, out, err)
    with open(path) as file:
        text = file.read()
    check(re.fullmatch("[0-9a-f]{64}\n", text), text)
    check(os.stat(path).st_mode & 0o7777 == 0o600, oct(os.stat(path).st_mode))
    words = ["--hosts", "alpha:2,beta:2", "--node-rank", 1]
    check(sorted(environments(*words, env={"TSHARD_KEY_FILE": path})) == [2, 3])
    code, out, err = launch("--new-key=" + path)
    check(code == 2 and out == b"" and "that file exists" in err and err.count("\n") == 1, err)
    with open(path) as file:
        check(file.read() == text, "an existing file was written")
    other = path + "2"
    check(launch("--new-key", other)[0] == 0)
    with open(other) as file:
        check(file.read() != text, "the same key twice")
    for at, why in ((os.path.join(folder, "no", "key"), "No such file or directory"),
                    ("/dev/full", "that file exists"), (folder, "that file exists")):
        code, out, err = launch("--new-key", at)
        check(code == 2 and out == b"" and why in err and err.count("\n") == 1, at, code, err)
    code, _, err = launch("--new-key", other + "3", "true")
    check(code == 2 and "--new-key starts no program" in err, code, err)
    check(not os.path.exists(other + "3"))


def a_host_without_loopback_is_told(_):
    spaces = ["unshare", "--net", "--map-root-user"]
    if subprocess.run(spaces + ["true"], stderr=subprocess.DEVNULL, check=False).returncode:
        raise Skipped("no network namespace")
    begin = time.monotonic()
    code, out, err = launch("-n", 2, "echo", "here", shell=spaces)
    check(code == 1 and out == b"" and err.count("\n") == 1 and
          "this host does not reach itself at " in err and "ip link set lo up" in err, code, err)
    check(time.monotonic() - begin < 10 + SLACK)


def too_few_descriptors_are_one_sentence(_):
    started = 0
    for most in range(5, 30):
        shell = ["sh", "-c", 'ulimit -n %d && exec "$@"' % most, "sh"]
        code, out, err = launch("-n", 2, "echo", "here", shell=shell)
        if "error while loading shared libraries" in err:
            continue
        check(code == 0 and by_rank(out) == {0: ["here"], 1: ["here"]} or
              code == 1 and out == b"" and err.count("\n") == 1 and
              "2 ranks need " in err and "(ulimit -n)" in err, most, code, out, err)
        started += code == 0
    check(started > 2, started)


def memory_that_is_lacking_is_one_sentence(folder):
    if any("/%s/" % san in LAUNCHER for san in ("asan", "tsan")):
        raise Skipped("sanitizers have a malloc of their own")
    library = os.path.join(folder, "failmalloc.so")
    source = os.path.join(TOP, "tests", "support", "failmalloc.c")
    built = subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", library, source],
                           stderr=subprocess.PIPE, check=False)
    if built.returncode:
        raise Skipped("no library that fails allocations: needs glibc")

    def fails(at, more):
        env = dict({"LD_PRELOAD": library, "FAIL_AT": str(at)}, **more)
        code, out, err = launch("-n", 2, "true", env=env)
        return code, out, err
    rows = [(at, more) for at in range(1, 60) for more in ({}, {"FAIL_ALL": "1"})]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(lambda row: fails(*row), rows))
    for row, (code, out, err) in zip(rows, ends):
        check(code == 0 or code == 1 and err.startswith("tshard-run: ") and err.count("\n") == 1,
              row, code, out, err)
    check(sum("out of memory" in err for _, _, err in ends) > 20, ends)


# ---- report ------------------------------------------------------------------


TESTS = [  # those that wait longest first
    the_others_end_when_one_fails, what_ranks_leave_behind_ends,
    an_interrupt_that_is_not_heard_kills_in_the_end, ranks_end_when_the_launcher_is_killed,
    ranks_end_when_guard_and_launcher_are_killed, the_guard_holds_nothing_of_the_ranks,
    a_slow_reader_makes_ranks_wait, a_reader_that_takes_nothing_can_be_interrupted,
    lines_are_whole_under_load, long_lines_come_in_pieces, last_lines_are_completed,
    a_reader_that_leaves_ends_the_job, stdin_goes_to_rank_0, the_exit_code_is_the_first_failure,
    of_many_ends_at_once_the_killed_rank_is_named, programs_that_cannot_start,
    a_failed_job_starts_anew, a_failed_job_goes_on_with_fewer, signals_are_passed_on,
    a_terminal_is_for_rank_0, a_second_interrupt_kills,
    an_ignored_hangup_stays_ignored, every_rank_finds_its_environment,
    ranks_have_no_other_descriptors, closed_streams_do_no_harm, two_jobs_run_at_once,
    many_ranks_start, mistakes_are_one_sentence, hosts_share_one_numbering,
    rank_0_listens_where_it_is_told, a_name_of_loopback_is_no_host_for_others,
    several_hosts_need_a_key, a_new_key_is_written, too_few_descriptors_are_one_sentence,
    a_host_without_loopback_is_told, memory_that_is_lacking_is_one_sentence]


def main():
    if not has_launcher():
        return tell("run", [(test.__name__, "SKIPPED", NO_LAUNCHER) for test in TESTS])
    return run_tests("run", TESTS, 4)


if __name__ == "__main__":
    sys.exit(main())
