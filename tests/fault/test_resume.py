#!/usr/bin/env python3
"""examples/gpt.c goes on where it stopped: killed at any time, asked to stop, restarted by
tshard-run. The losses are those of an undisturbed run, digit for digit, and so is the last state,
byte for byte. And hosts whose programs differ are told. Reports in cmocka's words. build/gpt is
made where it is missing. FULL=1 kills 300 times instead of 24."""

import atexit
import os
import random
import resource
import signal
import subprocess
import sys
import time

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(TOP, "tests", "support"))
from scripts import (LAUNCHER, NO_LAUNCHER, Skipped, check, children, free_port,
                     has_launcher, run_tests)

SCRIPT_LIMIT = 900 if os.environ.get("FULL") else 200  # seconds, for tests/run.sh
EACH = 60                                              # of one run
KILLS = 300 if os.environ.get("FULL") else 24
STEPS = 200
PROGRAM = os.path.join(TOP, "build", "gpt")
GPT = ["--text", os.path.join(TOP, "README.md"), "--layers", "2", "--heads", "2", "--width", "32",
       "--context", "16", "--batch", "4", "--steps", str(STEPS), "--eval-every", "30", "--dropout",
       "0.1", "--sample", "0"]
STATE = ["settings.txt", "state.safetensors"]


STARTED = []


@atexit.register
def kill_what_a_failed_test_has_left():
    for process in STARTED:
        if process.poll() is None:
            process.kill()


class Run:
    """The same command again and again: with its folder, it goes on."""

    def __init__(self, folder, flags=(), words=()):
        self.out, self.save = os.path.join(folder, "out"), os.path.join(folder, "save")
        self.words = [*words, PROGRAM, "--out", self.out, "--save", self.save, "--save-every", "5",
                      *GPT, *flags]

    def start(self, *more):
        process = subprocess.Popen(self.words + list(more), stdin=subprocess.DEVNULL, cwd=TOP,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                   encoding="utf-8")
        STARTED.append(process)
        return process

    def end(self, process, limit=EACH):
        """(exit code, what it printed)"""
        try:
            text, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.kill()
            text, _ = process.communicate()
            check(False, "no end within", limit, "s:", text[-600:])
        return process.returncode, text

    def __call__(self, *more):
        return self.end(self.start(*more))

    def rows(self):
        """metrics.csv without the time that steps took."""
        with open(os.path.join(self.out, "metrics.csv"), encoding="utf-8") as file:
            return [line.rpartition(",")[0] for line in file]

    def state(self):
        check(sorted(os.listdir(self.save)) == STATE, os.listdir(self.save))
        with open(os.path.join(self.save, "state.safetensors"), "rb") as file:
            return file.read()


def undisturbed(folder, flags=()):
    run = Run(os.path.join(folder, "undisturbed"), flags)
    code, text = run()
    check(code == 0, text[-600:])
    check(len(run.rows()) == STEPS + 1, len(run.rows()))
    return run


def check_same(run, want, *what):
    for ours, theirs in zip(run.rows(), want.rows()):
        check(ours == theirs, *what, ours, "not", theirs)
    check(len(run.rows()) == len(want.rows()), *what, len(run.rows()), "rows")
    check(run.state() == want.state(), *what, "another last state")


def kills_at_any_time(folder):
    streams = "--ranks 2 --dp 2 --outer 12 --outer-fragments 2 --outer-delay 3 --outer-wire q8_0"
    for number, flags in enumerate((["--ranks", "2"], ["--ranks", "2", "--dp", "2", "--zero"],
                                    ["--ranks", "2", "--pp", "2", "--micro-batches", "2"],
                                    streams.split())):
        place = os.path.join(folder, str(number))
        start = time.monotonic()
        want = undisturbed(place, flags)
        seconds = time.monotonic() - start
        chance = random.Random(number)
        kills = goes = 0
        while kills < KILLS // 4:
            run = Run(os.path.join(place, str(goes)), flags)
            goes += 1
            for _ in range(1000):  # it goes on, or is lucky and ends
                process = run.start("--resume")
                try:
                    process.wait(chance.uniform(0.02, 0.4 * seconds))
                except subprocess.TimeoutExpired:
                    process.kill()
                    kills += 1
                code, text = run.end(process)
                if code == 0:
                    break
                check(code == -signal.SIGKILL, "exit code", code, text[-600:])
            check(code == 0, "never ends", text[-600:])
            check_same(run, want, flags, "after", kills, "kills")


def a_signal_stops_after_a_step(folder):
    want = undisturbed(folder)
    run = Run(folder)
    last = 0
    for number in (signal.SIGTERM, signal.SIGINT):
        process = run.start("--resume")
        wait_for_rows(run, last + 20)
        process.send_signal(number)
        code, text = run.end(process)
        check(code == 0, code, text[-600:])
        last = len(run.rows()) - 1
        line = "stopped   after step %d of %d; the same command with --resume goes on\n"
        check(line % (last, STEPS) in text and "final:" not in text, text[-600:])
    code, text = run("--resume")
    check(code == 0 and "resumed   %s/state.safetensors, after step %d\n" % (run.save, last) in text
          and "\nfinal: " in text, text)
    check_same(run, want)
    code, text = run("--resume")
    check(code == 0 and "after step %d\n" % STEPS in text, text)
    check_same(run, want, "with nothing left to do")


def wait_for_rows(run, count):
    """Until the run has saved behind this step, or ended."""
    for _ in range(2000):
        time.sleep(0.01)
        try:
            if len(run.rows()) > count:
                return
        except OSError:
            pass
    check(False, "no", count, "rows in 20 s")


def ranks_of_a_restarted_job_go_on(folder):
    if not has_launcher():
        raise Skipped(NO_LAUNCHER)
    want = undisturbed(folder, ["--dp", "2"])
    run = Run(folder, ["--dp", "2", "--backend", "tcp"],
              [LAUNCHER, "-n", "2", "--max-restarts", "3"])
    process = run.start()
    for step in (20, 60, 100):
        wait_for_rows(run, step)
        ranks = children(process.pid, PROGRAM)
        if ranks:
            os.kill(random.choice(ranks), signal.SIGKILL)
        time.sleep(0.5)
    code, text = run.end(process)
    check(code == 0 and "restart 1 of 3" in text and "resumed" in text, text[-900:])
    check_same(run, want)


def hosts_meet_again(folder):
    """The second of two hosts fails before it has joined: it joins the first one's ranks, though
    only its own count of restarts has grown. Then the first one fails in the middle."""
    if not has_launcher():
        raise Skipped(NO_LAUNCHER)
    want = undisturbed(folder, ["--dp", "2"])
    hosts = ["--hosts", "127.0.0.1,127.0.0.2", "--port", str(free_port()), "--max-restarts", "2"]
    once = ["sh", "-c", '[ -e "$0" ] || { : > "$0"; exit 3; }; exec "$@"', folder + "/mark"]
    runs = [Run(folder, ["--dp", "2", "--backend", "tcp"],
                ["env", "TSHARD_TIMEOUT=20", LAUNCHER, *hosts, "--node-rank", str(node),
                 *once[:4 * node]]) for node in range(2)]
    first, second = (run.start() for run in runs)
    wait_for_rows(runs[0], 50)
    for rank in children(first.pid, PROGRAM):
        os.kill(rank, signal.SIGKILL)
    ends = [run.end(process) for run, process in zip(runs, (first, second))]
    text = ends[0][1] + ends[1][1]
    check([code for code, _ in ends] == [0, 0] and "resumed" in text, text[-1200:])
    check("restart 1 of 2" in ends[0][1] and "restart 2 of 2" in ends[1][1], text[-1200:])
    check_same(runs[0], want)


def ranks_of_different_programs_are_told(folder):
    """Another model, other arguments, another program on the second host: a sentence on each."""
    if not has_launcher():
        raise Skipped(NO_LAUNCHER)
    same = "every rank must run the same program, with the same arguments (TSH_ERR_MISMATCH)"
    for number, (second, says) in enumerate((
            ([PROGRAM, *GPT, "--width", "64"], 'rank 1 has "wte" embedding: weight f32 (256, 64) '
             'S(0) where rank 0 has "wte" embedding: weight f32 (256, 32) S(0)'),
            ([PROGRAM, *GPT, "--seed", "5"], "rank 1 has the seed 5 where rank 0 has the seed 1"),
            ([PROGRAM, *GPT, "--steps", "3"], same), ([PROGRAM, *GPT, "--dp", "2"], same))):
        port = str(free_port())
        nodes = [subprocess.Popen(
            ["env", "TSHARD_TIMEOUT=20", LAUNCHER, "--hosts", "127.0.0.1,127.0.0.2", "--port", port,
             "--node-rank", str(node), *words, "--backend", "tcp", "--out", folder + "/out"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=TOP,
            encoding="utf-8") for node, words in enumerate(([PROGRAM, *GPT], second))]
        STARTED.extend(nodes)
        for node in nodes:
            text, _ = node.communicate(timeout=EACH)
            check(node.returncode == 1 and says in text, number, text[-900:])


def what_would_lose_a_state_is_refused(folder):
    run = Run(folder)
    check(run("--steps", "10")[0] == 0, "ten steps")
    before = run.rows(), run.state()
    for flags, why in ((["--steps", "10"], "state.safetensors is the state of an earlier run: go "
                        "on from it with --resume, or give another folder"),
                       (["--resume", "--batch", "5"], "is of a run with 'batch 4', this one has "
                        "'batch 5'"),
                       (["--resume", "--text", os.path.join(TOP, "CHANGELOG.md")], "'text of "),
                       (["--resume", "--lr", "0.5"], "'lr 0.001', this one has 'lr 0.5'")):
        code, text = run(*flags)
        check(code == 2 and text.startswith("gpt: ") and why in text and text.count("\n") == 1,
              flags, code, text)
        check((run.rows(), run.state()) == before, flags, "changed a file")
    alone = subprocess.run([PROGRAM, "--resume"], stderr=subprocess.PIPE, encoding="utf-8",
                           timeout=EACH)
    check(alone.returncode == 2 and "--save DIR" in alone.stderr, alone.stderr)


def lost_rows_are_told(folder):
    run = Run(folder)
    check(run("--steps", "10")[0] == 0, "ten steps")
    os.remove(os.path.join(run.out, "metrics.csv"))
    code, text = run("--resume", "--steps", "20")
    check(code == 0 and "metrics.csv has no rows from step 1 to 10\n" in text, text)
    check([row.split(",")[0] for row in run.rows()] == ["step"] + [str(s) for s in range(11, 21)],
          run.rows())


def limited():
    """Beyond it a write raises SIGXFSZ, which Python has ignored."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))


def a_full_disk_leaves_whole_rows(folder):
    """metrics.csv ends with a whole row, loss.svg and settings.txt are not there in part; --resume
    goes on from the rows that are there."""
    out, save = os.path.join(folder, "out"), os.path.join(folder, "save")
    flags = [PROGRAM, "--out", out, *GPT, "--steps", "60"]
    done = subprocess.run(flags, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, encoding="utf-8", timeout=EACH,
                          preexec_fn=limited, cwd=TOP)
    check(done.returncode == 1 and "gpt: " in done.stderr and
          "cannot be written" in done.stderr and "may have 2000" in done.stderr,
          done.returncode, done.stderr)
    check(os.listdir(out) == ["metrics.csv"], os.listdir(out))
    with open(os.path.join(out, "metrics.csv"), encoding="utf-8") as file:
        text = file.read()
    lines = text.split("\n")
    check(1900 < len(text) <= 2000 and lines.pop() == "" and
          all(line.count(",") == 5 for line in lines) and
          [line.split(",")[0] for line in lines[1:]] == [str(i + 1) for i in range(len(lines) - 1)],
          text)
    run = Run(folder)
    check(run("--resume", "--steps", "20")[0] == 0 and len(run.rows()) == 21, run.rows())
    for name in os.listdir(save):
        os.remove(os.path.join(save, name))
    os.mkfifo(os.path.join(save, "settings.txt"))
    os.mkfifo(os.path.join(save, "state.safetensors"))
    code, text = run("--resume", "--steps", "20")
    check(code == 2 and "settings.txt is a FIFO" in text, code, text)
    os.remove(os.path.join(out, "metrics.csv"))
    os.mkfifo(os.path.join(out, "metrics.csv"))
    os.remove(os.path.join(save, "settings.txt"))
    os.remove(os.path.join(save, "state.safetensors"))
    code, text = run("--resume", "--steps", "20")
    check(code == 2 and "metrics.csv is a FIFO" in text, code, text)


def lost_output_is_an_error(folder):
    """stdout is a full device, or closed: what is printed goes nowhere, into no file either."""
    flags = [PROGRAM, *GPT, "--steps", "10", "--out", folder]
    for how in (lambda: os.dup2(os.open("/dev/full", os.O_WRONLY), 1), lambda: os.close(1)):
        for more in ([], ["--help"]):
            done = subprocess.run(flags + more, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                  encoding="utf-8", timeout=EACH, preexec_fn=how)
            check(done.returncode == 1 and "gpt: stdout cannot be written" in done.stderr,
                  done.returncode, done.stderr)
        with open(os.path.join(folder, "metrics.csv"), encoding="utf-8") as file:
            check(len(list(file)) == 11, "rows")


def a_text_comes_from_a_pipe(folder):
    with open(os.path.join(TOP, "README.md"), encoding="utf-8") as file:
        text = file.read()
    flags = [*GPT, "--steps", "10", "--out", folder, "--text", "/dev/stdin"]
    done = subprocess.run([PROGRAM, *flags], input=text, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, encoding="utf-8", timeout=EACH)
    check(done.returncode == 0 and "final: " in done.stdout, done.stderr)


TESTS = [kills_at_any_time, a_signal_stops_after_a_step, ranks_of_a_restarted_job_go_on,
         hosts_meet_again, ranks_of_different_programs_are_told,
         what_would_lose_a_state_is_refused, lost_rows_are_told, a_full_disk_leaves_whole_rows,
         lost_output_is_an_error, a_text_comes_from_a_pipe]

if __name__ == "__main__":
    if not os.path.exists(PROGRAM):
        subprocess.check_call(["make", "-C", TOP, "build/gpt"], stdout=subprocess.DEVNULL,
                              timeout=200)
    sys.exit(run_tests("resume", TESTS) > 0)
