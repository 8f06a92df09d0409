#!/usr/bin/env python3
"""Replicas that train apart (tsh_outer_new, DiLoCo), measured with examples/gpt.c.

    outer.py loss [--steps N] [--seeds N] [--dp 2,4]   validation loss beside synchronous dp
    outer.py link [--steps N]    dp 2 over a link of 100 Mbit/s: tokens/s, bytes (root, ip, tc)
    outer.py kills [--times N]   dp 4, a replica killed at a random step: the loss in the end

The text is --text FILE, or else the C sources of this project. Each replica's batch is 12 rows
(--rows), as in nanoGPT's setting, so --dp 4 has batches of 48. Prints tables; exit code
1: a goal is missed."""

import argparse
import concurrent.futures
import csv
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
sys.path[:0] = [os.path.join(TOP, "tests", "fault"), os.path.join(TOP, "tests", "support")]
import test_hosts
from scripts import LAUNCHER, children
GPT = os.path.join(TOP, "build", "gpt")
EVERY = 50
APART = ["--outer", str(EVERY)]
STREAMS = APART + ["--outer-fragments", "4", "--outer-delay", "10"]
WAYS = {"synchronous": [], "outer": APART, "outer q8_0": APART + ["--outer-wire", "q8_0"],
        "streaming q8_0": STREAMS + ["--outer-wire", "q8_0"]}
LIMIT = 3600  # seconds of a program


def words_of(args, replicas, steps, seed, folder, more):
    text = ["--text", args.text, "--chars"] if args.text else []
    return ["--dp", str(replicas), "--batch", str(args.rows * replicas), "--steps", str(steps),
            "--seed", str(seed), "--sample", "0", "--eval-every", str(steps), "--out", folder,
            *text, *more]


def final(text):
    """(validation loss, tokens/s)."""
    found = re.search(r"^(?:\[0\] )?final: .* val (\S+) tokens/s (\S+)$", text, re.M)
    if not found:
        raise SystemExit("no last line: " + text[-2000:])
    return float(found[1]), float(found[2])


# ---- loss --------------------------------------------------------------------


def loss(args):
    ways = args.ways.split(",")

    def of(job):
        way, replicas, seed = job
        with tempfile.TemporaryDirectory() as folder:
            words = words_of(args, replicas, args.steps, seed, folder, WAYS[way])
            return job, final(subprocess.check_output(
                [GPT, "--ranks", str(replicas), "--threads", "1", *words], text=True,
                timeout=LIMIT))[0]

    jobs = [(way, replicas, seed) for seed in range(1, args.seeds + 1) for replicas in args.dp
            for way in ways]
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        found = dict(pool.map(of, jobs))
    print("%d steps a replica, H %d, %d seeds: mean validation loss, beside synchronous dp" %
          (args.steps, EVERY, args.seeds))
    missed = 0
    for replicas in args.dp:
        mean = {way: statistics.mean(found[way, replicas, seed]
                                     for seed in range(1, args.seeds + 1)) for way in ways}
        for way, value in mean.items():
            ratio = value / mean["synchronous"]
            missed |= ratio > 1.01
            each = " ".join("%.4f" % found[way, replicas, seed]
                            for seed in range(1, args.seeds + 1))
            print("dp %d  %-15s %.4f  %.4f   (%s)" % (replicas, way, value, ratio, each))
    return missed


# ---- link --------------------------------------------------------------------


def on_the_link(args, rate, more):
    """(tokens/s, bytes that a host has sent)."""
    with tempfile.TemporaryDirectory() as folder, test_hosts.Hosts(folder) as hosts:
        for space in hosts.spaces.values():
            if rate:
                subprocess.run(["tc", "-n", space, "qdisc", "add", "dev", "veth0", "root", "tbf",
                                "rate", rate, "burst", "32kb", "latency", "50ms"], check=True)
        started = [hosts.start(
            host, LAUNCHER, "--hosts", "alpha:1,beta:1", "--node-rank", node, GPT, "--backend",
            "tcp", *words_of(args, 2, args.steps, 1, os.path.join(folder, "out"), more),
            env={"TSHARD_KEY": "a key that both hosts have"})
            for host, node in (("beta", "1"), ("alpha", "0"))]
        ends = []
        for one in started:
            out, err = one.communicate(timeout=LIMIT)
            ends.append((one.returncode, out.decode(), err.decode()))
        sent = subprocess.check_output(["ip", "netns", "exec", hosts.spaces["alpha"], "cat",
                                        "/sys/class/net/veth0/statistics/tx_bytes"], text=True)
    if any(end[0] for end in ends):
        raise SystemExit(ends)
    return final(ends[1][1])[1], int(sent)


def link(args):
    runs = {"synchronous, 100 Mbit/s": ("100mbit", []),
            "outer, 100 Mbit/s": ("100mbit", APART),
            "outer q8_0, 100 Mbit/s": ("100mbit", WAYS["outer q8_0"]),
            "streaming, 100 Mbit/s": ("100mbit", STREAMS),
            "streaming q8_0, 100 Mbit/s": ("100mbit", WAYS["streaming q8_0"]),
            "never, no limit": (None, ["--outer", "1000000"])}
    found = {name: [] for name in runs}
    for _ in range(args.rounds):
        for name, (rate, more) in runs.items():
            found[name].append(on_the_link(args, rate, more))
    middle = {name: statistics.median(speed for speed, _ in values)
              for name, values in found.items()}
    print("dp 2, %d steps, median of %d: tokens/s, beside synchronous, beside no exchange, bytes "
          "sent by a host" % (args.steps, args.rounds))
    for name, value in middle.items():
        print("%-28s %7.0f  %6.2f  %5.3f  %d" % (
            name, value, value / middle["synchronous, 100 Mbit/s"],
            value / middle["never, no limit"], found[name][0][1]))
    return (middle["outer, 100 Mbit/s"] < 5 * middle["synchronous, 100 Mbit/s"] or
            middle["streaming, 100 Mbit/s"] < 0.95 * middle["never, no limit"])


# ---- kills -------------------------------------------------------------------


def rows_in(path):
    try:
        with open(path, encoding="utf-8") as file:
            return sum(1 for _ in csv.reader(file)) - 1
    except OSError:
        return 0


def killed(args, at, folder):
    """The loss in the end of a run whose replica at[1] is killed after step at[0]; and what the
    launcher said. at None: none is killed."""
    out, save = os.path.join(folder, "out"), os.path.join(folder, "save")
    words = words_of(args, 4, args.steps, 1, out, APART + ["--tp", "1", "--dp", "0"])
    started = subprocess.Popen(
        [LAUNCHER, "-n", "4", "--min-ranks", "3", GPT, "--backend", "tcp", *words, "--threads", "1",
         "--save", save, "--save-every", str(EVERY)], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True)
    if at:
        until = time.monotonic() + LIMIT
        while rows_in(os.path.join(out, "metrics.csv")) < at[0] and started.poll() is None:
            if time.monotonic() > until:
                raise SystemExit("step %d does not come" % at[0])
            time.sleep(0.002)
        ranks = sorted(children(started.pid, os.path.realpath(GPT)))
        if ranks:
            os.kill(ranks[at[1] % len(ranks)], 9)
    text, said = started.communicate(timeout=LIMIT)
    if started.returncode:
        raise SystemExit("exit code %d: %s" % (started.returncode, said))
    return final(text)[0], said


def kills(args):
    chance = random.Random(1)
    values = []
    with tempfile.TemporaryDirectory() as folder:
        want, _ = killed(args, None, os.path.join(folder, "undisturbed"))
        for i in range(args.times):
            at = (chance.randrange(1, args.steps - 1), chance.randrange(4))
            place = os.path.join(folder, str(i))
            value, said = killed(args, at, place)
            shutil.rmtree(place)
            if "with 3 ranks" not in said:
                raise SystemExit("replica %d was not missed: %s" % (at[1], said))
            values.append(value / want)
    print("dp 4, %d steps, %d kills: loss %.4f undisturbed; ratio %.4f to %.4f, median %.4f" %
          (args.steps, args.times, want, min(values), max(values), statistics.median(values)))
    return max(values) > 1.01


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["loss", "link", "kills"])
    parser.add_argument("--text")
    parser.add_argument("--steps", type=int, help="5000, 300, 500")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--dp", type=lambda text: [int(n) for n in text.split(",")],
                        default=[2, 4])
    parser.add_argument("--rows", type=int, default=12, help="of each replica's batch")
    parser.add_argument("--ways", default=",".join(WAYS), help="of loss")
    parser.add_argument("--jobs", type=int, default=1, help="runs of loss at a time")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--times", type=int, default=50)
    args = parser.parse_args()
    args.steps = args.steps or {"loss": 5000, "link": 300, "kills": 500}[args.what]
    subprocess.run(["make", "-C", TOP, "build/gpt", "tshard-run"], check=True,
                   stdout=subprocess.DEVNULL)
    return {"loss": loss, "link": link, "kills": kills}[args.what](args)


if __name__ == "__main__":
    sys.exit(main())
