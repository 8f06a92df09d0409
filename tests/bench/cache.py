#!/usr/bin/env python3
"""What --cache of build/llm saves: two hosts of one rank, network namespaces with a link between
them (root, ip, tc), of which only the first has the model's files. Prints the bytes that it sends,
and the seconds from the start until a token is there, without a cache, at the first start with one,
and at the second one.

usage: cache.py MODEL [RATE]     MODEL: a folder or file; RATE: as tc takes it, 1gbit"""

import os
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
sys.path[:0] = [os.path.join(TOP, "tests", "fault"), os.path.join(TOP, "tests", "support")]
import test_hosts
from scripts import LAUNCHER


def sent(space):
    return int(subprocess.check_output(["ip", "netns", "exec", space, "cat",
                                        "/sys/class/net/veth0/statistics/tx_bytes"], text=True))


def main():
    model = os.path.abspath(sys.argv[1])
    rate = sys.argv[2] if len(sys.argv) > 2 else "1gbit"
    subprocess.run(["make", "-C", TOP, "build/llm", "tshard-run"], check=True,
                   stdout=subprocess.DEVNULL)
    with tempfile.TemporaryDirectory() as folder, test_hosts.Hosts(folder) as hosts:
        for space in hosts.spaces.values():
            subprocess.run(["tc", "-n", space, "qdisc", "add", "dev", "veth0", "root", "tbf",
                            "rate", rate, "burst", "128kb", "latency", "50ms"], check=True)
        for name, kept in (("without", 0), ("first start", 1), ("second start", 1)):
            before = sent(hosts.spaces["alpha"])
            started, begin = [], time.monotonic()
            for host, node in (("beta", "1"), ("alpha", "0")):
                here = os.path.dirname(model) if host == "alpha" else folder
                command = [LAUNCHER, "--hosts", "alpha:1,beta:1", "--node-rank", node,
                           test_hosts.LLM, "--backend", "tcp", "--model", os.path.basename(model),
                           "--prompt", "The quick brown fox", "--max-new", "1", "--ignore-eos"]
                if kept:
                    command += ["--cache", os.path.join(folder, "cache-" + host)]
                started.append(hosts.start(host, "sh", "-c", 'cd "$0" && exec "$@"', here, *command,
                                           env={"TSHARD_KEY": "a key that both hosts have"}))
            ends = []
            for one in started:
                out, err = one.communicate(timeout=600)
                ends.append((one.returncode, out.decode(), err.decode()))
            if any(end[0] for end in ends):
                raise SystemExit(ends)
            print("%-13s %12d bytes sent, a token after %.2f s" % (
                name, sent(hosts.spaces["alpha"]) - before, time.monotonic() - begin), flush=True)


if __name__ == "__main__":
    main()
