#!/usr/bin/env python3
"""Decoding a model of TinyLlama's shape on 1, 2 and 4 hosts of one rank: network namespaces with
links of 1 Gbit/s and 0.2 ms delay (far.c). Prints tokens/s, and the collectives of a token, which
are as many round trips where ranks wait for each other.

usage: far.py [--weights q8_0,q4_0] [--rounds N] [--peer COMMAND]

COMMAND is run with the number of hosts and the path of far, and prints another program's tokens/s
on as many hosts, by turns with ours."""

import argparse
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
DELAY_US, RATE = "200", "1gbit"
LIMIT = 600


def build(folder, name, source, *words):
    program = os.path.join(folder, name)
    subprocess.run([os.environ.get("CC", "cc"), "-std=c99", "-O2", "-fopenmp",
                    os.path.join(HERE, source), "-o", program, *words, "-lm", "-pthread"],
                   check=True)
    return program


def ours(far, bench, hosts, weights):
    """(tokens/s, collectives of a token)."""
    command = ("TSHARD_RANK=%d TSHARD_SIZE=%d TSHARD_HOST=10.77.0.1 TSHARD_PORT=29400 "
               "OMP_NUM_THREADS=1 TSHARD_KEY=the-key-of-all-hosts exec %s --backend tcp "
               "--model llama1b --weights %s --rounds 3")
    words = [command % (h, hosts, shlex.quote(bench), weights) for h in range(hosts)]
    text = subprocess.check_output([far, DELAY_US, RATE] + words if hosts > 1 else
                                   [bench, "--ranks", "1", "--model", "llama1b", "--weights",
                                    weights, "--rounds", "3"], text=True, timeout=LIMIT)
    return tuple(float(re.search(what + r" ours (\S+)", text)[1])
                 for what in ("tokens/s", "collectives"))


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", default="q8_0,q4_0")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        far = build(folder, "far", "far.c")
        bench = build(folder, "bench", "bench_model.c", "-DBENCH_TCP", "-luv", "-lsodium")
        for hosts in (1, 2, 4):
            found, peer = {}, []
            for _ in range(args.rounds):
                for weights in args.weights.split(","):
                    found.setdefault(weights, []).append(ours(far, bench, hosts, weights))
                if args.peer:
                    words = shlex.split(args.peer) + [str(hosts), far]
                    peer.append(float(subprocess.check_output(words, text=True, timeout=LIMIT)))
            for weights, values in found.items():
                print("%d hosts, %s: %.2f tokens/s, %.0f collectives of a token" % (
                    hosts, weights, statistics.median(value[0] for value in values), values[0][1]))
            if peer:
                print("%d hosts, the peer: %.2f tokens/s" % (hosts, statistics.median(peer)))


if __name__ == "__main__":
    main()
