#!/usr/bin/env python3
"""All-reduces of two hosts of two ranks: network namespaces with a link of 1 Gbit/s between them
(needs root, ip and tc). Prints a table: the bytes that a host sends per byte that is summed, and
the time beside what the link needs for the bytes of the documented order. Also encrypted, and with
TSHARD_SHM=0, where ranks do not know who is on their host. usage: hosts.py [RANKS of each host]"""

import os
import re
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
sys.path[:0] = [os.path.join(TOP, "tests", "fault"), os.path.join(TOP, "tests", "support")]
import test_hosts
RATE = 1e9 / 8  # bytes per second
FRAMES = 1448 / 1514  # of what is sent, the share that is payload of TCP
KEY = {"TSHARD_KEY": "a key that both hosts have"}
WAYS = (("plain", {"TSHARD_ENCRYPT": "0"}), ("encrypted", {}),
        ("hosts unknown", {"TSHARD_ENCRYPT": "0", "TSHARD_SHM": "0"}))


def run(program, ranks, env):
    """{(dtype, bytes): (seconds, bytes on the link)}."""
    with tempfile.TemporaryDirectory() as folder, test_hosts.Hosts(folder) as hosts:
        for space in hosts.spaces.values():
            subprocess.run("tc -n %s qdisc add dev veth0 root tbf rate 1gbit burst 128kb latency "
                           "50ms" % space, shell=True, check=True)
        where = ["--hosts", "alpha:%d,beta:%d" % (ranks, ranks)]
        started = [hosts.start(host, test_hosts.LAUNCHER, *where, "--node-rank", node, program,
                               env=dict(KEY, **env))
                   for host, node in (("beta", "1"), ("alpha", "0"))]
        ends = [test_hosts.end(one) for one in started]
    if any(end[0] for end in ends):
        raise SystemExit(ends)
    return {(dtype, int(size)): (float(seconds), float(sent)) for dtype, size, seconds, sent in
            re.findall(r"(\w+) (\d+) (\S+) (\S+)$", ends[1][1], re.M)}


def main():
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    with tempfile.TemporaryDirectory() as folder:
        program = os.path.join(folder, "bench")
        subprocess.run([os.environ.get("CC", "cc"), "-std=c99", "-D_POSIX_C_SOURCE=200809L", "-O2",
                        os.path.join(HERE, "bench_hosts.c"), "-o", program, "-lm", "-pthread",
                        "-luv", "-lsodium"], check=True)
        found = {way: run(program, ranks, env) for way, env in WAYS}
    print("2 hosts of %d ranks, 1 Gbit/s: bytes sent by a host per byte, time / the link's" % ranks)
    print("%-6s %10s" % ("dtype", "bytes") + "".join("%24s" % way for way, _ in WAYS))
    for dtype, size in found["plain"]:
        parts = {"f32": (2 + (ranks - 1) / ranks) / 2, "bf16": ranks / 2 + 0.5}
        least = parts[dtype] * size / RATE / FRAMES
        cells = [found[way][dtype, size] for way, _ in WAYS]
        print("%-6s %10d" % (dtype, size) + "".join(
            "%16.3f %7.2f" % (sent / size, seconds / least) for seconds, sent in cells))


if __name__ == "__main__":
    main()
